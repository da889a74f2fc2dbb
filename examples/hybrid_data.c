#define _XOPEN_SOURCE 700 /* fileno, fstat */
#include "hybrid_data.h"
#include "hybrid_ops.h"
#include "hybrid_sha256.h"
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

/* Appends the start of another document. */
static int add_document(hy_text *text, int64_t *room, int64_t start) {
    if (text->documents + 2 > *room) {
        *room = *room ? 2 * *room : 1024;
        int64_t *larger = realloc(text->document, (size_t)*room * sizeof(int64_t));
        if (!larger) return -1;
        text->document = larger;
    }
    text->document[text->documents++] = start;
    return 0;
}

static int width_for(int64_t vocab) { return vocab <= 256 ? 1 : vocab <= 65536 ? 2 : 4; }

static void put_token(hy_text *text, int64_t i, int32_t token) {
    if (text->width == 1)
        ((uint8_t *)text->token)[i] = (uint8_t)token;
    else if (text->width == 2)
        ((uint16_t *)text->token)[i] = (uint16_t)token;
    else
        ((int32_t *)text->token)[i] = token;
}

/* The vocabulary: the bytes that occur, without those of separators that become a symbol of their own. */
static int find_vocabulary(hy_text *text, const uint8_t *bytes, int64_t size, const hy_source *from) {
    uint8_t occurs[256] = {0}, list[256];
    int count = 0;
    for (int64_t i = 0; i < size;) {
        int64_t length = from->end_symbol ? separator_at(bytes, size, i, from->separator) : 0;
        if (!length) occurs[bytes[i]] = 1;
        i += length ? length : 1;
    }
    for (int b = 0; b < 256; b++)
        if (occurs[b]) list[count++] = (uint8_t)b;
    hy_text_vocabulary(text, list, count, from->end_symbol);
    return count;
}

/* Fills token and document; a document includes the separator that ends it. */
static int take_bytes(hy_text *text, const uint8_t *bytes, int64_t size, const hy_source *from) {
    int64_t room = 0, n = 0, start = 0;
    text->width = width_for(text->vocab);
    text->token = malloc((size_t)(size + 1) * (size_t)text->width);
    if (!text->token) return -1;
    for (int64_t i = 0; i < size;) {
        int64_t length = separator_at(bytes, size, i, from->separator), end = i + (length ? length : 1);
        if (length && from->end_symbol)
            put_token(text, n++, text->end_symbol);
        else
            for (int64_t k = i; k < end; k++) put_token(text, n++, text->token_of[bytes[k]]);
        i = end;
        text->ends += length > 0;
        if (!length && i < size) continue;
        if (add_document(text, &room, start)) return -1;
        start = n;
    }
    text->document[text->documents] = text->size = n;
    return 0;
}

static int64_t number_at(const uint8_t *bytes, int width, int64_t i) {
    int64_t number = 0;
    for (int k = width; k-- > 0;) number = number << 8 | bytes[i * width + k];
    return number;
}

static int take_numbers(hy_text *text, const uint8_t *bytes, int64_t size, const hy_source *from) {
    int64_t room = 0, start = 0;
    text->width = width_for(text->vocab);
    text->token = malloc((size_t)size * (size_t)text->width);
    if (!text->token) return -1;
    for (int64_t i = 0; i < size; i++) {
        int32_t token = (int32_t)number_at(bytes, from->width, i);
        put_token(text, i, token);
        text->ends += token == from->end_token;
        if (i + 1 < size && token != from->end_token) continue;
        if (add_document(text, &room, start)) return -1;
        start = i + 1;
    }
    text->document[text->documents] = text->size = size;
    return 0;
}

/* What a file of numbers says of its vocabulary. */
static gt_status check_numbers(hy_text *text, const uint8_t *bytes, int64_t size, const hy_source *from) {
    const int64_t count = size / from->width, limit = from->vocab ? from->vocab : HY_VOCAB_MAX;
    int64_t most = 0;
    if (size % from->width)
        return hy_fail(GT_ERROR_VALUE, "%lld bytes are no whole numbers of %d bytes", (long long)size, from->width);
    if (!count) return hy_fail(GT_ERROR_VALUE, "the text is empty");
    for (int64_t i = 0; i < count; i++) {
        int64_t token = number_at(bytes, from->width, i);
        if (token >= limit)
            return hy_fail(GT_ERROR_VALUE, "token %lld is %lld: must be under %lld, the %s", (long long)i,
                           (long long)token, (long long)limit, from->vocab ? "vocabulary" : "largest vocabulary");
        if (token > most) most = token;
    }
    text->is_numbers = 1;
    text->end_symbol = -1;
    text->vocab = (int)(from->vocab ? from->vocab : most + 1);
    if (from->end_token >= text->vocab)
        return hy_fail(GT_ERROR_VALUE, "end-token: %lld is not under %d, the vocabulary", (long long)from->end_token,
                       text->vocab);
    return text->vocab > 1 ? GT_OK : hy_fail(GT_ERROR_VALUE, "every token is 0: there is nothing to learn");
}

/* Sizes of the parts: the last tenth is held out, of all or of each track, the rest of which may be a token or two
 * that fit no track. */
static gt_status cut_pieces(hy_text *text, int64_t tracks) {
    text->pieces = tracks ? tracks : 1;
    text->piece = text->size / text->pieces;
    text->piece_train = tracks ? text->piece * 9 / 10 : text->size - (text->size + 9) / 10;
    text->size = text->pieces * text->piece;
    text->train = text->pieces * text->piece_train;
    if (tracks && (text->piece_train < 2 || text->piece == text->piece_train))
        return hy_fail(GT_ERROR_VALUE, "batch: the text is too short for %lld tracks of their own", (long long)tracks);
    while (text->documents > 1 && text->document[text->documents - 1] >= text->size) text->documents--;
    text->document[text->documents] = text->size;
    return GT_OK;
}

static gt_status count_entropy(hy_text *text) {
    int64_t *count = calloc((size_t)text->vocab, sizeof *count), held_out = text->size - text->train;
    double total = (double)text->train, smoothed = total + text->vocab;
    if (!count) return hy_fail(GT_ERROR_MEMORY, "no memory for %d counts", text->vocab);
    text->entropy_train = text->entropy_held_out = 0;
    for (int64_t i = 0; i < text->size; i++)
        if (i % text->piece < text->piece_train) count[hy_token(text, i)]++;
    for (int v = 0; v < text->vocab; v++)
        if (count[v]) text->entropy_train -= (double)count[v] / total * log((double)count[v] / total);
    for (int64_t i = 0; i < text->size; i++)
        if (i % text->piece >= text->piece_train)
            text->entropy_held_out -= log((double)(count[hy_token(text, i)] + 1) / smoothed);
    if (held_out) text->entropy_held_out /= (double)held_out;
    free(count);
    return GT_OK;
}

static void sum_bytes(hy_text *text, const uint8_t *bytes, int64_t size) {
    hy_sha256 sum;
    hy_sha256_start(&sum);
    hy_sha256_add(&sum, bytes, (size_t)size);
    hy_sha256_end(&sum, text->sum);
}

static gt_status read_text(hy_text *text, const uint8_t *bytes, int64_t size, const hy_source *from) {
    gt_status status = GT_OK;
    if (from->width) {
        status = check_numbers(text, bytes, size, from);
    } else if (find_vocabulary(text, bytes, size, from) < 2) {
        status = hy_fail(GT_ERROR_VALUE, size ? "every byte of the text is the same: there is nothing to "
                                                "learn"
                                              : "the text is empty");
    }
    if (status != GT_OK) return status;
    if (from->width ? take_numbers(text, bytes, size / from->width, from) : take_bytes(text, bytes, size, from))
        return hy_fail(GT_ERROR_MEMORY, "no memory for a text of %lld bytes", (long long)size);
    snprintf(text->end_text, sizeof text->end_text, "%s",
             from->separator && *from->separator ? from->separator : "\n\n\n");
    status = cut_pieces(text, from->tracks);
    if (status == GT_OK) status = count_entropy(text);
    if (from->sum) sum_bytes(text, bytes, size);
    return status;
}

gt_status hy_text_read(hy_text *text, const void *bytes, int64_t size, const hy_source *source) {
    memset(text, 0, sizeof *text);
    gt_status status = read_text(text, bytes, size, source);
    if (status != GT_OK) hy_text_free(text);
    return status;
}

gt_status hy_text_from_bytes(hy_text *text, const void *bytes, int64_t size, const char *separator) {
    const hy_source source = {.separator = separator, .end_token = -1, .sum = 1};
    return hy_text_read(text, bytes, size, &source);
}

gt_status hy_text_load(hy_text *text, const char *path, const hy_source *source) {
    gt_status status;
    int64_t size = 0;
    memset(text, 0, sizeof *text);
    FILE *file = fopen(path, "rb");
    uint8_t *bytes = file ? read_all(file, &size) : NULL;
    if (bytes) {
        status = hy_text_read(text, bytes, size, source);
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
    const char *what = text->is_numbers ? "tokens" : "bytes";
    if (text->piece_train > length) return GT_OK;
    if (text->train < 2)
        return hy_fail(GT_ERROR_VALUE, "the text is too short: it has %lld %s, the least is 3", (long long)text->size,
                       what);
    return hy_fail(GT_ERROR_VALUE,
                   "the text is too short for one window: its training part has %lld %s%s, seq %lld "
                   "needs %lld; use a longer text or a smaller seq (at most %lld)",
                   (long long)text->piece_train, what, text->pieces > 1 ? " in each track" : "", (long long)length,
                   (long long)length + 1, (long long)text->piece_train - 1);
}

void hy_text_vocabulary(hy_text *text, const uint8_t *bytes, int count, int has_end) {
    text->vocab = count + (has_end != 0);
    text->end_symbol = has_end ? count : -1;
    for (int b = 0; b < 256; b++) text->token_of[b] = -1;
    for (int v = 0; v < count; v++) text->token_of[text->byte_of[v] = bytes[v]] = v;
}

gt_status hy_text_resize(hy_text *text, int vocab) {
    int32_t most = 0;
    for (int64_t i = 0; i < text->size; i++)
        if (hy_token(text, i) > most) most = hy_token(text, i);
    if (most >= vocab)
        return hy_fail(GT_ERROR_VALUE, "token %d is not in the model's vocabulary of %d", (int)most, vocab);
    text->vocab = vocab;
    return count_entropy(text);
}

static gt_status not_in_vocabulary(uint8_t byte) {
    if (byte > 32 && byte < 127) return hy_fail(GT_ERROR_VALUE, "'%c' is not in the model's vocabulary", byte);
    return hy_fail(GT_ERROR_VALUE, "byte 0x%02x is not in the model's vocabulary", byte);
}

gt_status hy_text_recode(hy_text *text, const uint8_t *bytes, int count) {
    hy_text other = *text;
    const int old_count = text->vocab - (text->end_symbol >= 0);
    hy_text_vocabulary(&other, bytes, count, text->end_symbol >= 0);
    other.width = width_for(other.vocab);
    for (int v = 0; v < old_count; v++)
        if (other.token_of[text->byte_of[v]] < 0) return not_in_vocabulary(text->byte_of[v]);
    other.token = malloc((size_t)text->size * (size_t)other.width + 1);
    if (!other.token) return hy_fail(GT_ERROR_MEMORY, "no memory for a text of %lld tokens", (long long)text->size);
    for (int64_t i = 0; i < text->size; i++) {
        int32_t token = hy_token(text, i);
        put_token(&other, i, token == text->end_symbol ? other.end_symbol : other.token_of[text->byte_of[token]]);
    }
    free(text->token);
    *text = other;
    return count_entropy(text);
}

void hy_text_free(hy_text *text) {
    free(text->token);
    free(text->document);
    memset(text, 0, sizeof *text);
}

static gt_status encode_numbers(const hy_text *text, const char *string, int32_t *token, int *count) {
    for (const char *at = string + strspn(string, " ,"); *at; at += strspn(at, " ,")) {
        char *end;
        long long number = strtoll(at, &end, 10);
        if (end == at || (*end && !strchr(" ,", *end)))
            return hy_fail(GT_ERROR_VALUE, "'%.20s' is no list of tokens such as 17 4 256", at);
        if (number < 0 || number >= text->vocab)
            return hy_fail(GT_ERROR_VALUE, "token %lld is not in the vocabulary of %d", number, text->vocab);
        token[(*count)++] = (int32_t)number;
        at = end;
    }
    return GT_OK;
}

gt_status hy_text_encode(const hy_text *text, const char *string, int32_t *token, int *count, int of_model) {
    *count = 0;
    if (text->is_numbers) return encode_numbers(text, string, token, count);
    for (int64_t i = 0; string[i]; i++) {
        unsigned char byte = (unsigned char)string[i];
        token[(*count)++] = text->token_of[byte];
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
        input[t] = t < count ? hy_token(text, first + t - 1) : 0;
        target[t] = t < count ? hy_token(text, first + t) : -1;
    }
    batch->targets += count;
}

void hy_batch_random(hy_batch *batch, const hy_text *text, uint64_t *random) {
    int64_t places = text->piece_train - batch->length; /* of a piece; first predicted token: 1 ... */
    batch->targets = 0;
    for (int64_t row = 0; row < batch->rows; row++) {
        int64_t place = (int64_t)(hy_random(random) % (uint64_t)(text->pieces * places));
        fill_row(batch, text, row, place / places * text->piece + 1 + place % places, batch->length);
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
        if (tracks->next[row] < tracks->first[row] || tracks->next[row] > tracks->end[row]) return 0;
        find_document(tracks, text, row);
    }
    return 1;
}

gt_status hy_tracks_create(hy_tracks *tracks, const hy_text *text, int64_t rows) {
    *tracks = (hy_tracks){.rows = rows};
    if (text->pieces > 1 && text->pieces != rows)
        return hy_fail(GT_ERROR_VALUE, "batch: %lld rows do not fit the %lld tracks of the text", (long long)rows,
                       (long long)text->pieces);
    if (text->train - 1 < rows)
        return hy_fail(GT_ERROR_VALUE, "batch: %lld tracks are too many for a text of %lld %s; at most %lld fit",
                       (long long)rows, (long long)text->size, text->is_numbers ? "tokens" : "bytes",
                       (long long)text->train - 1);
    tracks->first = malloc((size_t)rows * sizeof(int64_t));
    tracks->end = malloc((size_t)rows * sizeof(int64_t));
    tracks->next = malloc((size_t)rows * sizeof(int64_t));
    tracks->document = malloc((size_t)rows * sizeof(int64_t));
    if (!tracks->first || !tracks->end || !tracks->next || !tracks->document) {
        hy_tracks_free(tracks);
        return hy_fail(GT_ERROR_MEMORY, "no memory for %lld tracks", (long long)rows);
    }
    for (int64_t row = 0; row < rows; row++) {
        if (text->pieces > 1) {
            tracks->first[row] = row * text->piece + 1;
            tracks->end[row] = row * text->piece + text->piece_train;
        } else {
            tracks->first[row] = 1 + (text->train - 1) * row / rows;
            tracks->end[row] = 1 + (text->train - 1) * (row + 1) / rows;
        }
        rewind_track(tracks, text, row);
    }
    return GT_OK;
}

void hy_tracks_free(hy_tracks *tracks) {
    free(tracks->first);
    free(tracks->end);
    free(tracks->next);
    free(tracks->document);
    memset(tracks, 0, sizeof *tracks);
}

void hy_batch_tracks(hy_batch *batch, const hy_text *text, hy_tracks *tracks) {
    batch->targets = 0;
    for (int64_t row = 0; row < batch->rows; row++) {
        if (tracks->next[row] == tracks->end[row]) rewind_track(tracks, text, row);
        int64_t first = tracks->next[row], end = first + batch->length;
        int64_t document_start = text->document[tracks->document[row]];
        int64_t document_end = text->document[tracks->document[row] + 1];
        if (end > document_end) end = document_end;
        if (end > tracks->end[row]) end = tracks->end[row];
        fill_row(batch, text, row, first, end - first);
        batch->keep[row] = first != tracks->first[row] && first != document_start;
        tracks->next[row] = end;
        tracks->document[row] += end == document_end;
    }
}

int hy_batch_held_out(hy_batch *batch, const hy_text *text, int64_t *next) {
    const int64_t held_out = text->piece - text->piece_train;
    const int64_t windows = (held_out + batch->length - 1) / batch->length; /* of a piece */
    int64_t row = 0;
    batch->targets = 0;
    for (int64_t i; row < batch->rows && (i = *next + row) < text->pieces * windows; row++) {
        int64_t done = i % windows * batch->length, left = held_out - done;
        fill_row(batch, text, row, i / windows * text->piece + text->piece_train + done,
                 left < batch->length ? left : batch->length);
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
