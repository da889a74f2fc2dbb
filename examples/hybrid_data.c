#define _XOPEN_SOURCE 700 /* fileno, fstat */
#include "hybrid_data.h"
#include "hybrid_ops.h"
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* ---- text ----------------------------------------------------------------------------------- */

/* The whole file, also if it is a pipe, whose size is not known.  NULL with errno; EFBIG if what is
 * no regular file goes on after HY_STREAM_MAX bytes, as /dev/zero does. */
static uint8_t *read_all(FILE *file, int64_t *size) {
    size_t room = 1 << 16, used = 0;
    struct stat about;
    int may_be_endless = fstat(fileno(file), &about) || !S_ISREG(about.st_mode);
    uint8_t *bytes = malloc(room);
    while (bytes) {
        used += fread(bytes + used, 1, room - used, file);
        if (used < room) break;
        if (may_be_endless && used >= HY_STREAM_MAX) {
            if (getc(file) == EOF) break;
            free(bytes);
            errno = EFBIG;
            return NULL;
        }
        uint8_t *larger = realloc(bytes, room *= 2);
        if (!larger) free(bytes);
        bytes = larger;
    }
    if (!bytes) errno = ENOMEM;
    if (bytes && ferror(file)) {
        free(bytes);
        bytes = NULL;
    }
    *size = (int64_t)used;
    return bytes;
}

/* Length of the line end at byte i, 0 if there is none. */
static int64_t line_end_at(const uint8_t *bytes, int64_t size, int64_t i) {
    if (i < size && bytes[i] == '\n') return 1;
    return i + 1 < size && bytes[i] == '\r' && bytes[i + 1] == '\n' ? 2 : 0;
}

/* Length of the separator that starts at byte i, 0 if none does.  A run of three or more line ends
 * (that is, two or more blank lines) counts as a whole. */
static int64_t separator_at(const uint8_t *bytes, int64_t size, int64_t i, const char *separator) {
    int64_t length = (int64_t)strlen(separator), line_ends = 0, end = i;
    if (length) return length <= size - i && !memcmp(bytes + i, separator, (size_t)length) ? length : 0;
    if (bytes[i] == '\f') return 1;
    for (int64_t n; (n = line_end_at(bytes, size, end)); end += n) line_ends++;
    return line_ends >= 3 ? end - i : 0;
}

/* Fills document; a document includes the separator that ends it. */
static int find_documents(hy_text *text, const uint8_t *bytes, const char *separator) {
    int64_t room = 1024;
    text->documents = 0;
    text->document = malloc((size_t)room * sizeof(int64_t));
    for (int64_t i = 0, start = 0; text->document && i < text->size;) {
        int64_t length = separator_at(bytes, text->size, i, separator);
        i += length ? length : 1;
        if (!length && i < text->size) continue;
        if (text->documents + 2 > room) {
            int64_t *larger = realloc(text->document, (size_t)(room *= 2) * sizeof(int64_t));
            if (!larger) return -1;
            text->document = larger;
        }
        text->document[text->documents++] = start;
        text->document[text->documents] = start = i;
    }
    return text->document ? 0 : -1;
}

static void count_entropy(hy_text *text) {
    int64_t count[256] = {0}, held_out = text->size - text->train;
    for (int64_t i = 0; i < text->train; i++) count[text->token[i]]++;
    double total = (double)text->train, smoothed = total + text->vocab;
    text->entropy_train = text->entropy_held_out = 0;
    for (int v = 0; v < text->vocab; v++)
        if (count[v]) text->entropy_train -= (double)count[v] / total * log((double)count[v] / total);
    for (int64_t i = text->train; i < text->size; i++)
        text->entropy_held_out -= log((double)(count[text->token[i]] + 1) / smoothed);
    if (held_out) text->entropy_held_out /= (double)held_out;
}

gt_status hy_text_from_bytes(hy_text *text, const void *data, int64_t size, const char *separator) {
    const uint8_t *bytes = data;
    memset(text, 0, sizeof *text);
    for (int b = 0; b < 256; b++) text->token_of[b] = -1;
    for (int64_t i = 0; i < size; i++) text->token_of[bytes[i]] = 0;
    for (int b = 0; b < 256; b++) {
        if (text->token_of[b] < 0) continue;
        text->byte_of[text->vocab] = (uint8_t)b;
        text->token_of[b] = text->vocab++;
    }
    if (text->vocab < 2)
        return hy_fail(GT_ERROR_VALUE, size ? "every byte of the text is the same: there is nothing to "
                                              "learn"
                                            : "the text is empty");
    text->size = size;
    text->train = size - (size + 9) / 10;
    text->token = malloc((size_t)size);
    if (!text->token || find_documents(text, bytes, separator)) {
        hy_text_free(text);
        return hy_fail(GT_ERROR_MEMORY, "no memory for a text of %lld bytes", (long long)size);
    }
    for (int64_t i = 0; i < size; i++) text->token[i] = (uint8_t)text->token_of[bytes[i]];
    count_entropy(text);
    return GT_OK;
}

gt_status hy_text_load(hy_text *text, const char *path, const char *separator) {
    gt_status status;
    int64_t size = 0;
    memset(text, 0, sizeof *text);
    FILE *file = fopen(path, "rb");
    uint8_t *bytes = file ? read_all(file, &size) : NULL;
    if (bytes) {
        status = hy_text_from_bytes(text, bytes, size, separator);
        if (status != GT_OK) hy_fail(status, "data file %s: %s", path, hy_last_error());
    } else if (file && errno == EFBIG) {
        status = hy_fail(GT_ERROR_VALUE,
                         "data file %s: no regular file, and longer than %zu MiB; put the text "
                         "into a file",
                         path, HY_STREAM_MAX >> 20);
    } else {
        status = hy_fail(GT_ERROR_VALUE, "data file %s: %s", path, strerror(errno));
    }
    if (file) fclose(file);
    free(bytes);
    return status;
}

gt_status hy_text_fits(const hy_text *text, int64_t length) {
    if (text->train > length) return GT_OK;
    if (text->train < 2)
        return hy_fail(GT_ERROR_VALUE, "the text is too short: it has %lld bytes, the least is 3",
                       (long long)text->size);
    return hy_fail(GT_ERROR_VALUE,
                   "the text is too short for one window: its training part has %lld bytes, seq %lld "
                   "needs %lld; use a longer text or a smaller seq (at most %lld)",
                   (long long)text->train, (long long)length, (long long)length + 1, (long long)text->train - 1);
}

void hy_text_vocabulary(hy_text *text, const uint8_t *bytes, int count) {
    text->vocab = count;
    for (int b = 0; b < 256; b++) text->token_of[b] = -1;
    for (int v = 0; v < count; v++) text->token_of[text->byte_of[v] = bytes[v]] = v;
}

static gt_status not_in_vocabulary(uint8_t byte) {
    if (byte > 32 && byte < 127) return hy_fail(GT_ERROR_VALUE, "'%c' is not in the model's vocabulary", byte);
    return hy_fail(GT_ERROR_VALUE, "byte 0x%02x is not in the model's vocabulary", byte);
}

gt_status hy_text_recode(hy_text *text, const uint8_t *bytes, int count) {
    hy_text other = *text;
    hy_text_vocabulary(&other, bytes, count);
    for (int v = 0; v < text->vocab; v++) {
        uint8_t byte = text->byte_of[v];
        if (other.token_of[byte] < 0) return not_in_vocabulary(byte);
    }
    for (int64_t i = 0; i < text->size; i++) text->token[i] = (uint8_t)other.token_of[text->byte_of[text->token[i]]];
    *text = other;
    count_entropy(text);
    return GT_OK;
}

void hy_text_free(hy_text *text) {
    free(text->token);
    free(text->document);
    memset(text, 0, sizeof *text);
}

gt_status hy_text_encode(const hy_text *text, const char *string, int32_t *token, int of_model) {
    for (int64_t i = 0; string[i]; i++) {
        unsigned char byte = (unsigned char)string[i];
        token[i] = text->token_of[byte];
        if (token[i] >= 0) continue;
        if (of_model) return not_in_vocabulary(byte);
        if (byte > 32 && byte < 127) return hy_fail(GT_ERROR_VALUE, "'%c' does not occur in the text", byte);
        return hy_fail(GT_ERROR_VALUE, "byte 0x%02x does not occur in the text", byte);
    }
    return GT_OK;
}

/* ---- batches -------------------------------------------------------------------------------- */

gt_status hy_batch_create(hy_batch *batch, int64_t rows, int64_t length) {
    size_t n = (size_t)rows * (size_t)length;
    *batch = (hy_batch){.rows = rows, .length = length};
    batch->input = calloc(n, sizeof(int32_t));
    batch->target = calloc(n, sizeof(int32_t));
    batch->keep = calloc((size_t)rows, sizeof(int32_t));
    if (batch->input && batch->target && batch->keep) return GT_OK;
    hy_batch_free(batch);
    return hy_fail(GT_ERROR_MEMORY, "no memory for a batch of %lld x %lld", (long long)rows, (long long)length);
}

void hy_batch_free(hy_batch *batch) {
    free(batch->input);
    free(batch->target);
    free(batch->keep);
    memset(batch, 0, sizeof *batch);
}

/* Row `row` predicts the `count` tokens from `first` on; the rest of it is not counted. */
static void fill_row(hy_batch *batch, const hy_text *text, int64_t row, int64_t first, int64_t count) {
    int32_t *input = batch->input + row * batch->length, *target = batch->target + row * batch->length;
    for (int64_t t = 0; t < batch->length; t++) {
        input[t] = t < count ? text->token[first + t - 1] : 0;
        target[t] = t < count ? text->token[first + t] : -1;
    }
    batch->targets += count;
}

void hy_batch_random(hy_batch *batch, const hy_text *text, uint64_t *random) {
    uint64_t places = (uint64_t)(text->train - batch->length); /* first predicted token: 1 ... */
    batch->targets = 0;
    for (int64_t row = 0; row < batch->rows; row++) {
        fill_row(batch, text, row, 1 + (int64_t)(hy_random(random) % places), batch->length);
        batch->keep[row] = 0;
    }
}

/* Finds the document of a track's next token. */
static void find_document(hy_tracks *tracks, const hy_text *text, int64_t row) {
    int64_t low = 0, high = text->documents;
    while (high - low > 1) { /* the last document that starts at or before the token */
        int64_t middle = low + (high - low) / 2;
        if (text->document[middle] <= tracks->next[row])
            low = middle;
        else
            high = middle;
    }
    tracks->document[row] = low;
}

/* Sets a track to its beginning. */
static void rewind_track(hy_tracks *tracks, const hy_text *text, int64_t row) {
    tracks->next[row] = tracks->first[row];
    find_document(tracks, text, row);
}

int hy_tracks_moved(hy_tracks *tracks, const hy_text *text) {
    for (int64_t row = 0; row < tracks->rows; row++) {
        if (tracks->next[row] < tracks->first[row] || tracks->next[row] > tracks->first[row + 1]) return 0;
        find_document(tracks, text, row);
    }
    return 1;
}

gt_status hy_tracks_create(hy_tracks *tracks, const hy_text *text, int64_t rows) {
    *tracks = (hy_tracks){.rows = rows};
    if (text->train - 1 < rows)
        return hy_fail(GT_ERROR_VALUE, "batch: %lld tracks are too many for a text of %lld bytes; at most %lld fit",
                       (long long)rows, (long long)text->size, (long long)text->train - 1);
    tracks->first = malloc((size_t)(rows + 1) * sizeof(int64_t));
    tracks->next = malloc((size_t)rows * sizeof(int64_t));
    tracks->document = malloc((size_t)rows * sizeof(int64_t));
    if (!tracks->first || !tracks->next || !tracks->document) {
        hy_tracks_free(tracks);
        return hy_fail(GT_ERROR_MEMORY, "no memory for %lld tracks", (long long)rows);
    }
    for (int64_t row = 0; row <= rows; row++) tracks->first[row] = 1 + (text->train - 1) * row / rows;
    for (int64_t row = 0; row < rows; row++) rewind_track(tracks, text, row);
    return GT_OK;
}

void hy_tracks_free(hy_tracks *tracks) {
    free(tracks->first);
    free(tracks->next);
    free(tracks->document);
    memset(tracks, 0, sizeof *tracks);
}

void hy_batch_tracks(hy_batch *batch, const hy_text *text, hy_tracks *tracks) {
    batch->targets = 0;
    for (int64_t row = 0; row < batch->rows; row++) {
        if (tracks->next[row] == tracks->first[row + 1]) rewind_track(tracks, text, row);
        int64_t first = tracks->next[row], end = first + batch->length;
        int64_t document_start = text->document[tracks->document[row]];
        int64_t document_end = text->document[tracks->document[row] + 1];
        if (end > document_end) end = document_end;
        if (end > tracks->first[row + 1]) end = tracks->first[row + 1];
        fill_row(batch, text, row, first, end - first);
        batch->keep[row] = first != tracks->first[row] && first != document_start;
        tracks->next[row] = end;
        tracks->document[row] += end == document_end;
    }
}

int hy_batch_held_out(hy_batch *batch, const hy_text *text, int64_t *next) {
    int64_t row = 0, first = text->train + *next * batch->length;
    batch->targets = 0;
    for (; row < batch->rows && first < text->size; row++, first += batch->length) {
        int64_t left = text->size - first;
        fill_row(batch, text, row, first, left < batch->length ? left : batch->length);
        batch->keep[row] = 0;
    }
    *next += row;
    if (row == 0) return 0;
    for (; row < batch->rows; row++) {
        fill_row(batch, text, row, text->train, 0);
        batch->keep[row] = 0;
    }
    return 1;
}
