#include "hybrid_data.h"
#include "hybrid_ops.h"
#include "hybrid_sha256.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- text ----------------------------------------------------------------------------------- */

/* Returns the length of the line end at byte i; 0 if there is none. */
static int64_t line_end_at(const uint8_t *bytes, int64_t size, int64_t i) {
    if (i < size && bytes[i] == '\n') return 1;
    return i + 1 < size && bytes[i] == '\r' && bytes[i + 1] == '\n' ? 2 : 0;
}

/* Returns the length of the separator that starts at byte i; 0 if none starts there.  Three or more line ends in a
 * row (two or more blank lines) count as one separator. */
static int64_t separator_at(const uint8_t *bytes, int64_t size, int64_t i, const char *separator) {
    int64_t length = (int64_t)strlen(separator), line_ends = 0, end = i;
    if (length) return length <= size - i && !memcmp(bytes + i, separator, (size_t)length) ? length : 0;
    if (bytes[i] == '\f') return 1;
    for (int64_t n; (n = line_end_at(bytes, size, end)); end += n) line_ends++;
    return line_ends >= 3 ? end - i : 0;
}

/* Appends a document that starts at token `start` to the list of documents. */
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

/* Sets the vocabulary to the bytes that occur in the text.  Does not count the bytes of separators that become an
 * end symbol. */
static int find_vocabulary(hy_text *text, const hy_span *span, int64_t spans, const hy_source *from) {
    uint8_t occurs[256] = {0}, list[256];
    int count = 0;
    for (const hy_span *s = span; s < span + spans; s++)
        for (int64_t i = 0; i < s->size;) {
            int64_t length = from->end_symbol ? separator_at(s->bytes, s->size, i, from->separator) : 0;
            if (!length) occurs[s->bytes[i]] = 1;
            i += length ? length : 1;
        }
    for (int b = 0; b < 256; b++)
        if (occurs[b]) list[count++] = (uint8_t)b;
    hy_text_vocabulary(text, list, count, from->end_symbol);
    return count;
}

/* Adds a token to the text; stores it if the text lies in memory. */
static void add_token(hy_text *text, int32_t token) {
    if (text->token) put_token(text, text->size, token);
    text->size++;
}

/* Adds the tokens and documents of a file to the text.  The separator after a document belongs to this document. */
static int take_bytes(hy_text *text, int64_t *room, const hy_span *s, const hy_source *from) {
    int64_t start = text->size;
    for (int64_t i = 0; i < s->size;) {
        int64_t length = separator_at(s->bytes, s->size, i, from->separator), end = i + (length ? length : 1);
        if (length && from->end_symbol)
            add_token(text, text->end_symbol);
        else
            for (int64_t k = i; k < end; k++) add_token(text, text->token_of[s->bytes[k]]);
        i = end;
        text->ends += length > 0;
        if (!length && i < s->size) continue;
        if (add_document(text, room, start)) return -1;
        start = text->size;
    }
    return 0;
}

static int64_t number_at(const uint8_t *bytes, int width, int64_t i) {
    int64_t number = 0;
    for (int k = width; k-- > 0;) number = number << 8 | bytes[i * width + k];
    return number;
}

static int take_numbers(hy_text *text, int64_t *room, const hy_span *s, const hy_source *from) {
    const int64_t count = s->size / from->width;
    int64_t start = text->size;
    for (int64_t i = 0; i < count; i++) {
        int32_t token = (int32_t)number_at(s->bytes, from->width, i);
        add_token(text, token);
        text->ends += token == from->end_token;
        if (i + 1 < count && token != from->end_token) continue;
        if (add_document(text, room, start)) return -1;
        start = text->size;
    }
    return 0;
}

/* Checks the numbers of the files, and sets the vocabulary size. */
static gt_status check_numbers(hy_text *text, const hy_span *span, int64_t spans, const hy_source *from) {
    const int64_t limit = from->vocab ? from->vocab : HY_VOCAB_MAX;
    int64_t most = 0;
    for (const hy_span *s = span; s < span + spans; s++) {
        if (s->size % from->width)
            return hy_fail(GT_ERROR_VALUE, "%lld bytes are not a multiple of the %d bytes of a token",
                           (long long)s->size, from->width);
        for (int64_t i = 0; i < s->size / from->width; i++) {
            int64_t token = number_at(s->bytes, from->width, i);
            if (token >= limit)
                return hy_fail(GT_ERROR_VALUE, "the token at index %lld is %lld: must be below %lld, the %s",
                               (long long)i, (long long)token, (long long)limit,
                               from->vocab ? "size of the vocabulary" : "size of the largest possible vocabulary");
            if (token > most) most = token;
        }
    }
    text->is_numbers = 1;
    text->end_symbol = -1;
    text->vocab = (int)(from->vocab ? from->vocab : most + 1);
    if (from->end_token >= text->vocab)
        return hy_fail(GT_ERROR_VALUE, "end-token: %lld: must be below %d, the size of the vocabulary",
                       (long long)from->end_token, text->vocab);
    return text->vocab > 1 ? GT_OK : hy_fail(GT_ERROR_VALUE, "every token is 0: there is nothing to learn");
}

/* Returns the number of held-out tokens among `tokens`.  It uses integer arithmetic, since a tenth is not exact in
 * binary floating point. */
static int64_t held_out_of(int64_t tokens, const hy_source *from) {
    const int64_t million = 1000000, share = from->held_out ? from->held_out : million / 10;
    return tokens / million * share + (tokens % million * share + million - 1) / million;
}

/* Sets the sizes of the training part and of the held-out part.  The held-out part is one of three: the end of the
 * text, the end of each track, or other files.  `other` is the index of the first token of the other files, or -1
 * without such files.  If the tracks do not divide the text evenly, the function drops a few tokens at its end. */
static gt_status cut_pieces(hy_text *text, int64_t other, const hy_source *from) {
    const int64_t tracks = from->tracks;
    text->pieces = tracks ? tracks : 1;
    text->piece = text->size / text->pieces;
    text->skipped = other >= 0;
    text->piece_train = other >= 0 ? other : text->piece - held_out_of(text->piece, from);
    text->size = text->pieces * text->piece;
    text->train = text->pieces * text->piece_train;
    if (tracks && (text->piece_train < 2 || text->piece == text->piece_train))
        return hy_fail(GT_ERROR_VALUE,
                       "batch: the text is too short for %lld tracks; give a smaller --batch or a longer text",
                       (long long)tracks);
    if (other >= 0 && text->size - other < 2)
        return hy_fail(GT_ERROR_VALUE, "val: the text is too short: it has %lld tokens, but needs at least 2",
                       (long long)(text->size - other));
    while (text->documents > 1 && text->document[text->documents - 1] >= text->size) text->documents--;
    text->document[text->documents] = text->size;
    return GT_OK;
}

/* Counts how often each token occurs in the training parts, or in the held-out parts, in count[vocab]. */
static void count_tokens(const hy_text *text, int is_held_out, int64_t *count) {
    for (int64_t p = 0; p < text->pieces; p++) {
        const int64_t start = p * text->piece, middle = start + text->piece_train, end = start + text->piece;
        for (int64_t i = is_held_out ? middle + text->skipped : start; i < (is_held_out ? end : middle); i++)
            count[hy_token(text, i)]++;
    }
}

static gt_status count_entropy(hy_text *text) {
    int64_t *count = calloc(2 * (size_t)text->vocab, sizeof *count), *held_out = count + text->vocab;
    double total = (double)text->train, smoothed = total + text->vocab;
    if (!count) return hy_fail(GT_ERROR_MEMORY, "no memory to count %d tokens", text->vocab);
    text->entropy_train = text->entropy_held_out = 0;
    count_tokens(text, 0, count);
    count_tokens(text, 1, held_out);
    for (int v = 0; v < text->vocab; v++) {
        if (count[v]) text->entropy_train -= (double)count[v] / total * log((double)count[v] / total);
        text->entropy_held_out -= (double)held_out[v] * log((double)(count[v] + 1) / smoothed);
    }
    text->entropy_held_out /= (double)hy_held_out_tokens(text);
    free(count);
    return GT_OK;
}

/* Computes the SHA-256 of all files, in order.  A mark precedes the held-out files, which begin at span
 * `first_other`. */
static void sum_bytes(hy_text *text, const hy_span *span, int64_t spans, int64_t first_other) {
    hy_sha256 sum;
    hy_sha256_start(&sum);
    for (int64_t i = 0; i < spans; i++) {
        if (i == first_other) hy_sha256_add(&sum, "\0val", 4);
        hy_sha256_add(&sum, span[i].bytes, (size_t)span[i].size);
    }
    hy_sha256_end(&sum, text->sum);
}

/* Returns whether all files are mapped, so that the text can read its tokens from them. */
static int all_mapped(const hy_span *span, int64_t spans) {
    int64_t mapped = 0;
    for (int64_t i = 0; i < spans; i++) mapped += span[i].is_mapped;
    return spans && mapped == spans;
}

/* Reads a text from spans (the contents of files).  `first_other` is the index of the first held-out span, or -1 for
 * none.  If the tokens stay in mapped files, the text takes over the array `span`. */
static gt_status read_text(hy_text *text, hy_span *span, int64_t spans, int64_t first_other, const hy_source *from) {
    int64_t bytes = 0, room = 0, other = -1;
    const int stays = all_mapped(span, spans) && !from->end_symbol;
    gt_status status = GT_OK;
    for (int64_t i = 0; i < spans; i++) bytes += span[i].size;
    if (!bytes) return hy_fail(GT_ERROR_VALUE, "the text is empty");
    if (from->width)
        status = check_numbers(text, span, spans, from);
    else if (find_vocabulary(text, span, spans, from) < 2)
        status = hy_fail(GT_ERROR_VALUE, "every byte of the text is the same: there is nothing to learn");
    if (status != GT_OK) return status;
    text->width = stays ? from->width : width_for(text->vocab);
    if (!stays) text->token = malloc((size_t)(bytes / (from->width ? from->width : 1) + 1) * (size_t)text->width);
    int failed = !stays && !text->token;
    for (int64_t i = 0; i < spans && !failed; i++) {
        if (i == first_other) other = text->size;
        span[i].first = text->size;
        failed = from->width ? take_numbers(text, &room, span + i, from) : take_bytes(text, &room, span + i, from);
    }
    if (first_other == spans) other = text->size; /* the held-out files are empty */
    if (failed) return hy_fail(GT_ERROR_MEMORY, "no memory for a text of %lld bytes", (long long)bytes);
    text->document[text->documents] = text->size;
    snprintf(text->end_text, sizeof text->end_text, "%s",
             from->separator && *from->separator ? from->separator : "\n\n\n");
    if (stays) text->span = span, text->spans = spans;
    status = cut_pieces(text, other, from);
    if (status == GT_OK) status = count_entropy(text);
    if (from->sum) sum_bytes(text, span, spans, first_other);
    return status;
}

int32_t hy_mapped_token(const hy_text *text, int64_t i) {
    int64_t low = 0, high = text->spans;
    while (high - low > 1) { /* finds the last span that begins at or before the token */
        const int64_t middle = low + (high - low) / 2;
        if (text->span[middle].first <= i)
            low = middle;
        else
            high = middle;
    }
    const uint8_t *bytes = text->span[low].bytes;
    i -= text->span[low].first;
    return text->width ? (int32_t)number_at(bytes, text->width, i) : text->token_of[bytes[i]];
}

gt_status hy_text_read(hy_text *text, const void *bytes, int64_t size, const hy_source *source) {
    hy_span span = {.bytes = bytes, .size = size};
    memset(text, 0, sizeof *text);
    gt_status status = read_text(text, &span, 1, -1, source);
    if (status != GT_OK) hy_text_free(text);
    return status;
}

gt_status hy_text_from_bytes(hy_text *text, const void *bytes, int64_t size, const char *separator) {
    const hy_source source = {.separator = separator, .end_token = -1, .sum = 1};
    return hy_text_read(text, bytes, size, &source);
}

/* Loads the files of both lists into spans, and leaves out empty files. */
static gt_status load_spans(hy_span *span, int64_t *spans, int64_t *first_other, const hy_paths *paths,
                            const hy_paths *other, const hy_source *from) {
    const int is_mapped =
        hy_paths_bytes(paths) + hy_paths_bytes(other) >= (from->map_from ? from->map_from : HY_MAP_FROM);
    *spans = 0, *first_other = -1;
    for (int64_t i = 0; i < paths->count + other->count; i++) {
        const int is_other = i >= paths->count;
        const char *path = is_other ? other->path[i - paths->count] : paths->path[i];
        if (is_other && *first_other < 0) *first_other = *spans;
        gt_status status = hy_span_load(span + *spans, path, is_mapped);
        if (status != GT_OK) return status;
        if (from->width && span[*spans].size % from->width) {
            status = hy_fail(GT_ERROR_VALUE, "data file %s: %lld bytes are not a multiple of the %d bytes of a token",
                             path, (long long)span[*spans].size, from->width);
            ++*spans;
            return status;
        }
        if (span[*spans].size)
            ++*spans;
        else
            hy_span_free(span + *spans);
    }
    return GT_OK;
}

gt_status hy_text_load(hy_text *text, const hy_paths *paths, const hy_paths *other, const hy_source *source) {
    static const hy_paths none;
    int64_t spans = 0, first_other;
    memset(text, 0, sizeof *text);
    if (!other) other = &none;
    const int64_t count = paths->count + other->count;
    hy_span *span = calloc((size_t)(count + 1), sizeof *span);
    if (!span) return hy_fail(GT_ERROR_MEMORY, "no memory for %lld files", (long long)count);
    gt_status status = load_spans(span, &spans, &first_other, paths, other, source);
    if (status == GT_OK) {
        status = read_text(text, span, spans, first_other, source);
        if (status != GT_OK)
            hy_fail(status, "data file %s%s: %s", paths->count ? paths->path[0] : other->path[0],
                    count > 1 ? " and others" : "", hy_last_error());
    }
    if (text->span && status == GT_OK) return GT_OK; /* the text owns the spans now */
    text->span = NULL;
    for (int64_t i = 0; i < spans; i++) hy_span_free(span + i);
    free(span);
    if (status != GT_OK) hy_text_free(text);
    return status;
}

gt_status hy_text_fits(const hy_text *text, int64_t length) {
    const char *what = text->is_numbers ? "tokens" : "bytes";
    if (text->piece_train > length) return GT_OK;
    if (text->train < 2)
        return hy_fail(GT_ERROR_VALUE, "the text is too short: it has %lld %s, but needs at least 3",
                       (long long)text->size, what);
    return hy_fail(GT_ERROR_VALUE,
                   "the text is too short for one window: its training part has %lld %s%s, but seq %lld needs %lld; "
                   "use a longer text or a smaller seq (at most %lld)",
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
    for (int v = 0; v < old_count; v++)
        if (other.token_of[text->byte_of[v]] < 0) return not_in_vocabulary(text->byte_of[v]);
    if (text->span) { /* mapped bytes become tokens when they are read */
        *text = other;
        return count_entropy(text);
    }
    other.width = width_for(other.vocab);
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

gt_status hy_text_table(hy_text *text, const char *path) {
    gt_status status = hy_table_load(&text->table, path);
    if (status != GT_OK || text->table.count >= text->vocab) return status;
    return hy_fail(GT_ERROR_VALUE, "table %s: it has %lld tokens, but the vocabulary has %d", path,
                   (long long)text->table.count, text->vocab);
}

int64_t hy_token_bytes(const hy_text *text, int32_t token) {
    if (text->table.start) return text->table.start[token + 1] - text->table.start[token];
    return !text->is_numbers && text->end_symbol < 0;
}

void hy_text_free(hy_text *text) {
    for (int64_t i = 0; i < text->spans && text->span; i++) hy_span_free(text->span + i);
    free(text->span);
    hy_table_free(&text->table);
    free(text->token);
    free(text->document);
    memset(text, 0, sizeof *text);
}

static const char between[] = " ,\n\r\t"; /* characters between the numbers of a list */

static gt_status encode_numbers(const hy_text *text, const char *string, int32_t *token, int *count) {
    for (const char *at = string + strspn(string, between); *at; at += strspn(at, between)) {
        char *end;
        long long number = strtoll(at, &end, 10);
        if (end == at || (*end && !strchr(between, *end)))
            return hy_fail(GT_ERROR_VALUE, "'%.20s' is not a list of tokens such as 17 4 256", at);
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
    *batch = (hy_batch){.rows = rows, .length = length, .all = rows};
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

void hy_batch_share(hy_batch *batch, int rank, int ranks) {
    batch->first = rank * batch->rows;
    batch->all = ranks * batch->rows;
}

/* Fills row `row` of the whole batch.  The row predicts `count` tokens, starting with token `first`; targets after
 * these are -1.  The struct hy_batch explains `keep`. */
static void fill_row(hy_batch *batch, const hy_text *text, int64_t row, int64_t first, int64_t count, int keep) {
    batch->all_targets += count;
    row -= batch->first;
    if (row < 0 || row >= batch->rows) return; /* a row of another rank */
    int32_t *input = batch->input + row * batch->length, *target = batch->target + row * batch->length;
    batch->keep[row] = keep;
    for (int64_t t = 0; t < batch->length; t++) {
        input[t] = t < count ? hy_token(text, first + t - 1) : 0;
        target[t] = t < count ? hy_token(text, first + t) : -1;
    }
    batch->targets += count;
}

void hy_batch_random(hy_batch *batch, const hy_text *text, uint64_t *random) {
    int64_t places = text->piece_train - batch->length; /* number of windows that fit a piece; none predicts token 0 */
    batch->targets = batch->all_targets = 0;
    for (int64_t row = 0; row < batch->all; row++) {
        int64_t place = (int64_t)(hy_random(random) % (uint64_t)(text->pieces * places));
        fill_row(batch, text, row, place / places * text->piece + 1 + place % places, batch->length, 0);
    }
}

/* Finds the document that contains the track's next token. */
static void find_document(hy_tracks *tracks, const hy_text *text, int64_t row) {
    int64_t low = 0, high = text->documents;
    while (high - low > 1) { /* finds the last document that starts at or before the token */
        int64_t middle = low + (high - low) / 2;
        if (text->document[middle] <= tracks->next[row])
            low = middle;
        else
            high = middle;
    }
    tracks->document[row] = low;
}

/* Moves a track to its beginning. */
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
        return hy_fail(GT_ERROR_VALUE, "batch: %lld rows, but the text is cut into %lld tracks; both must be equal",
                       (long long)rows, (long long)text->pieces);
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
    batch->targets = batch->all_targets = 0;
    for (int64_t row = 0; row < batch->all; row++) {
        if (tracks->next[row] == tracks->end[row]) rewind_track(tracks, text, row);
        int64_t first = tracks->next[row], end = first + batch->length;
        int64_t document_start = text->document[tracks->document[row]];
        int64_t document_end = text->document[tracks->document[row] + 1];
        if (end > document_end) end = document_end;
        if (end > tracks->end[row]) end = tracks->end[row];
        fill_row(batch, text, row, first, end - first, first != tracks->first[row] && first != document_start);
        tracks->next[row] = end;
        tracks->document[row] += end == document_end;
    }
}

int64_t hy_held_out_tokens(const hy_text *text) {
    return text->pieces * (text->piece - text->piece_train - text->skipped);
}

int hy_batch_held_out(hy_batch *batch, const hy_text *text, int64_t *next) {
    const int64_t first = text->piece_train + text->skipped, held_out = text->piece - first;
    const int64_t windows = (held_out + batch->length - 1) / batch->length; /* windows per piece */
    int64_t row = 0;
    batch->targets = batch->all_targets = 0;
    for (int64_t i; row < batch->all && (i = *next + row) < text->pieces * windows; row++) {
        int64_t done = i % windows * batch->length, left = held_out - done;
        fill_row(batch, text, row, i / windows * text->piece + first + done,
                 left < batch->length ? left : batch->length, 0);
    }
    *next += row;
    if (row == 0) return 0;
    for (; row < batch->all; row++) fill_row(batch, text, row, text->train, 0, 0);
    return 1;
}
