/* Reads safetensors files. */
#define _XOPEN_SOURCE 700 /* fseeko, fileno */
#include "hybrid_file.h"
#include "hybrid_sha256.h"
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the numbers of these files are");

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        gt_status status_ = (call);                                                                                    \
        if (status_ != GT_OK) return status_;                                                                          \
    } while (0)

static const int64_t header_max = 100000000; /* bytes; the safetensors package of Python and Rust has this limit */
enum { DIGITS = 64 };                        /* hexadecimal digits of a checksum */

/* ---- the JSON of the header ------------------------------------------------------------------
 * The reader decodes strings in place, and writes a NUL at the end of each. */

typedef struct reader {
    char *start, *at, *end;
    const char *path;
} reader;

static gt_status fail_at(const reader *r, const char *format, ...) {
    char text[160];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    return hy_fail(GT_ERROR_VALUE, "%s: damaged, or not a safetensors file: byte %lld of the header: %s", r->path,
                   (long long)(r->at - r->start), text);
}

static void skip_space(reader *r) {
    while (r->at < r->end && strchr(" \t\r\n", *r->at) && *r->at) r->at++;
}

/* Returns whether the next character is `sign`, and if so, reads it. */
static int next_is(reader *r, char sign) {
    skip_space(r);
    if (r->at == r->end || *r->at != sign) return 0;
    r->at++;
    return 1;
}

static gt_status expect(reader *r, char sign) { return next_is(r, sign) ? GT_OK : fail_at(r, "'%c' is missing", sign); }

/* Reads the four hexadecimal digits of the escape \uXXXX. */
static gt_status read_hex(reader *r, unsigned *code) {
    static const char digits[] = "0123456789abcdef0123456789ABCDEF";
    *code = 0;
    for (int i = 0; i < 4; i++, r->at++) {
        const char *digit = r->at < r->end && *r->at ? strchr(digits, *r->at) : NULL;
        if (!digit) return fail_at(r, "\\u without four hexadecimal digits");
        *code = *code * 16 + (unsigned)((digit - digits) % 16);
    }
    return *code ? GT_OK : fail_at(r, "a NUL in a text");
}

/* Writes a 16-bit code as UTF-8. */
static char *put_code(char *to, unsigned code) {
    if (code < 0x80) {
        *to++ = (char)code;
    } else if (code < 0x800) {
        *to++ = (char)(0xc0 | code >> 6);
        *to++ = (char)(0x80 | (code & 63));
    } else {
        *to++ = (char)(0xe0 | code >> 12);
        *to++ = (char)(0x80 | (code >> 6 & 63));
        *to++ = (char)(0x80 | (code & 63));
    }
    return to;
}

static gt_status read_escape(reader *r, char **to) {
    static const char signs[] = "\"\\/bfnrt", bytes[] = "\"\\/\b\f\n\r\t";
    const char *known = r->at < r->end && *r->at ? strchr(signs, *r->at) : NULL;
    unsigned code;
    if (known) {
        *(*to)++ = bytes[known - signs];
        r->at++;
        return GT_OK;
    }
    if (r->at == r->end || *r->at != 'u') return fail_at(r, "an unknown escape");
    r->at++;
    TRY(read_hex(r, &code));
    *to = put_code(*to, code);
    return GT_OK;
}

static gt_status read_text(reader *r, char **text) {
    TRY(expect(r, '"'));
    char *to = r->at;
    *text = to;
    while (r->at < r->end && *r->at != '"') {
        if ((unsigned char)*r->at < 32) return fail_at(r, "a control character in a text");
        if (*r->at == '\\') {
            r->at++;
            TRY(read_escape(r, &to));
        } else {
            *to++ = *r->at++;
        }
    }
    TRY(expect(r, '"'));
    *to = 0;
    return GT_OK;
}

/* Reads a whole number >= 0 that consists of digits only. */
static gt_status read_whole(reader *r, int64_t *number) {
    const int64_t most = (int64_t)1 << 53;
    skip_space(r);
    if (r->at == r->end || *r->at < '0' || *r->at > '9') return fail_at(r, "a number is missing");
    *number = 0;
    if (*r->at == '0') {
        r->at++;
    } else {
        while (r->at < r->end && *r->at >= '0' && *r->at <= '9') {
            *number = *number * 10 + (*r->at++ - '0');
            if (*number > most) return fail_at(r, "a number is too large");
        }
    }
    if (r->at < r->end && *r->at && strchr("0123456789.eE", *r->at)) return fail_at(r, "a number that is not whole");
    return GT_OK;
}

/* Reads a list [n, ...] of at most HY_RANK_MAX numbers. */
static gt_status read_list(reader *r, int64_t *list, int *count) {
    *count = 0;
    TRY(expect(r, '['));
    if (next_is(r, ']')) return GT_OK;
    do {
        if (*count == HY_RANK_MAX) return fail_at(r, "more than %d numbers", HY_RANK_MAX);
        TRY(read_whole(r, &list[(*count)++]));
    } while (next_is(r, ','));
    return expect(r, ']');
}

/* ---- the header ---------------------------------------------------------------------------- */

/* Makes room for one more element of a list.  The list doubles when its count is a power of two. */
static gt_status make_room(const reader *r, void **list, int count, size_t size) {
    if (count & (count - 1)) return GT_OK;
    void *larger = realloc(*list, (count ? 2 * (size_t)count : 1) * size);
    if (!larger) return hy_fail(GT_ERROR_MEMORY, "%s: no memory for its header", r->path);
    *list = larger;
    return GT_OK;
}

static gt_status read_metadata(reader *r, hy_file *file) {
    TRY(expect(r, '{'));
    if (next_is(r, '}')) return GT_OK;
    do {
        void *list = file->texts;
        TRY(make_room(r, &list, file->text_count, sizeof *file->texts));
        file->texts = list;
        hy_file_text *text = &file->texts[file->text_count++];
        *text = (hy_file_text){NULL, NULL};
        TRY(read_text(r, &text->key));
        TRY(expect(r, ':'));
        TRY(read_text(r, &text->value));
        if (strcmp(text->key, "checksum")) continue;
        if (strncmp(text->value, "sha256:", 7) || strlen(text->value) != 7 + DIGITS ||
            r->at - 1 - text->value != 7 + DIGITS || strspn(text->value + 7, "0123456789abcdef") != DIGITS)
            return fail_at(r, "the checksum is not 'sha256:' and %d digits", DIGITS);
        file->checksum_at = text->value + 7 - r->start;
    } while (next_is(r, ','));
    return expect(r, '}');
}

static int size_of_dtype(hy_file_dtype dtype) { return dtype == HY_FILE_F32 ? 4 : 8; }

/* Computes the number of elements, and checks that the tensor's bytes match it. */
static gt_status check_tensor(const reader *r, hy_file_tensor *t) {
    t->count = 1;
    for (int i = 0; i < t->rank; i++)
        if (__builtin_mul_overflow(t->count, t->shape[i], &t->count) || t->count > header_max << 24)
            return fail_at(r, "the shape of %.60s is too large", t->name);
    if (t->begin > t->end || (t->dtype != HY_FILE_OTHER && t->count * size_of_dtype(t->dtype) != t->end - t->begin))
        return fail_at(r, "the shape of %.60s does not match its data_offsets", t->name);
    return GT_OK;
}

/* Reads the description of a tensor: {"dtype": ..., "shape": ..., "data_offsets": ...}.  The keys may have any
 * order. */
static gt_status read_tensor(reader *r, hy_file_tensor *t) {
    static const char *const keys[] = {"dtype", "shape", "data_offsets"};
    int64_t offsets[HY_RANK_MAX];
    int seen[3] = {0}, count = 0;
    char *key, *dtype;
    TRY(expect(r, '{'));
    do {
        int which = 0;
        TRY(read_text(r, &key));
        while (which < 3 && strcmp(key, keys[which])) which++;
        if (which == 3 || seen[which]++) return fail_at(r, "unknown or repeated key '%.60s' of a tensor", key);
        TRY(expect(r, ':'));
        if (which == 0) {
            TRY(read_text(r, &dtype));
            t->dtype = !strcmp(dtype, "F32") ? HY_FILE_F32 : !strcmp(dtype, "I64") ? HY_FILE_I64 : HY_FILE_OTHER;
        } else {
            TRY(which == 1 ? read_list(r, t->shape, &t->rank) : read_list(r, offsets, &count));
        }
    } while (next_is(r, ','));
    TRY(expect(r, '}'));
    if (!seen[0] || !seen[1] || count != 2) return fail_at(r, "%.60s lacks dtype, shape or data_offsets", t->name);
    t->begin = offsets[0];
    t->end = offsets[1];
    return check_tensor(r, t);
}

static gt_status read_header(reader *r, hy_file *file) {
    int metadata = 0;
    TRY(expect(r, '{'));
    if (!next_is(r, '}')) {
        do {
            char *key;
            TRY(read_text(r, &key));
            TRY(expect(r, ':'));
            if (!strcmp(key, "__metadata__")) {
                if (metadata++) return fail_at(r, "the key __metadata__ occurs twice");
                TRY(read_metadata(r, file));
            } else {
                void *list = file->tensors;
                TRY(make_room(r, &list, file->tensor_count, sizeof *file->tensors));
                file->tensors = list;
                hy_file_tensor *tensor = &file->tensors[file->tensor_count++];
                memset(tensor, 0, sizeof *tensor);
                tensor->name = key;
                TRY(read_tensor(r, tensor));
            }
        } while (next_is(r, ','));
        TRY(expect(r, '}'));
    }
    skip_space(r);
    return r->at == r->end ? GT_OK : fail_at(r, "more text follows its end");
}

/* ---- the file ------------------------------------------------------------------------------ */

static int by_place(const void *a, const void *b) {
    const hy_file_tensor *x = a, *y = b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return (x->end > y->end) - (x->end < y->end);
}
static int by_name(const void *a, const void *b) {
    return strcmp(((const hy_file_tensor *)a)->name, ((const hy_file_tensor *)b)->name);
}
static int by_key(const void *a, const void *b) {
    return strcmp(((const hy_file_text *)a)->key, ((const hy_file_text *)b)->key);
}

/* Checks that the tensors fill the data without gaps, then sorts them by name. */
static gt_status check_places(hy_file *f) {
    int64_t end = 0;
    if (f->tensor_count) qsort(f->tensors, (size_t)f->tensor_count, sizeof *f->tensors, by_name);
    for (int i = 1; i < f->tensor_count; i++) /* comes first: a repeated name also makes the places wrong */
        if (!by_name(f->tensors + i - 1, f->tensors + i))
            return hy_fail(GT_ERROR_VALUE, "%s: damaged: tensor %.60s occurs twice", f->path, f->tensors[i].name);
    if (f->tensor_count) qsort(f->tensors, (size_t)f->tensor_count, sizeof *f->tensors, by_place);
    for (int i = 0; i < f->tensor_count; end = f->tensors[i++].end)
        if (f->tensors[i].begin != end)
            return hy_fail(GT_ERROR_VALUE, "%s: damaged: tensor %.60s does not begin where the tensor before it ends",
                           f->path, f->tensors[i].name);
    if (f->data + end > f->size)
        return hy_fail(GT_ERROR_VALUE, "%s: cut short: it has %lld of %lld bytes", f->path, (long long)f->size,
                       (long long)(f->data + end));
    if (f->data + end < f->size)
        return hy_fail(GT_ERROR_VALUE, "%s: damaged: %lld extra bytes follow its end", f->path,
                       (long long)(f->size - f->data - end));
    if (f->tensor_count) qsort(f->tensors, (size_t)f->tensor_count, sizeof *f->tensors, by_name);
    return GT_OK;
}

static gt_status check_texts(hy_file *f) {
    if (f->text_count) qsort(f->texts, (size_t)f->text_count, sizeof *f->texts, by_key);
    for (int i = 1; i < f->text_count; i++)
        if (!by_key(f->texts + i - 1, f->texts + i))
            return hy_fail(GT_ERROR_VALUE, "%s: damaged: key '%.60s' occurs twice", f->path, f->texts[i].key);
    return GT_OK;
}

static gt_status read_bytes(hy_file *f, void *bytes, int64_t count) {
    errno = 0;
    if (fread(bytes, 1, (size_t)count, f->stream) == (size_t)count) return GT_OK;
    return hy_fail(GT_ERROR_VALUE, "%s: cannot be read: %s", f->path,
                   ferror(f->stream) && errno ? strerror(errno) : "it ends too early");
}

static gt_status seek(hy_file *f, int64_t place) {
    if (!fseeko(f->stream, (off_t)place, SEEK_SET)) return GT_OK;
    return hy_fail(GT_ERROR_VALUE, "%s: cannot be read: %s", f->path, strerror(errno));
}

/* Reads and parses the header of a file whose size is known. */
static gt_status load_header(hy_file *f) {
    uint8_t length[9] = {0};
    int64_t n = 0;
    if (f->size == 0) return hy_fail(GT_ERROR_VALUE, "%s: the file is empty", f->path);
    TRY(read_bytes(f, length, f->size < 9 ? f->size : 9));
    for (int i = 7; i >= 0; i--) n = n > header_max ? n : n << 8 | length[i];
    if (f->size >= 9 && (n < 2 || n > header_max || length[8] != '{'))
        return hy_fail(GT_ERROR_VALUE, "%s: not a safetensors file", f->path);
    if (f->size < 9 || f->size - 8 < n)
        return hy_fail(GT_ERROR_VALUE,
                       "%s: cut short, or not a safetensors file: it has %lld bytes, but its header takes %lld",
                       f->path, (long long)f->size, (long long)n + 8);
    f->data = 8 + n;
    f->header = malloc((size_t)n);
    if (!f->header) return hy_fail(GT_ERROR_MEMORY, "%s: no memory for its header", f->path);
    TRY(seek(f, 8));
    TRY(read_bytes(f, f->header, n));
    reader r = {.start = f->header, .at = f->header, .end = f->header + n, .path = f->path};
    TRY(read_header(&r, f));
    TRY(check_texts(f));
    return check_places(f);
}

/* Replaces digits of the checksum by zeros in `bytes`, which hold a part of the file.  `place` is the offset of this
 * part in the file; it may contain all, some or none of the digits. */
static void blank_digits(const hy_file *f, char *bytes, int64_t place, int64_t count) {
    for (int64_t i = 8 + f->checksum_at; i < 8 + f->checksum_at + DIGITS; i++)
        if (i >= place && i < place + count) bytes[i - place] = '0';
}

static gt_status verify(hy_file *f) {
    enum { PIECE = 1 << 16 };
    hy_sha256 sum;
    char hex[DIGITS + 1], *piece;
    gt_status status = seek(f, 0);
    if (f->checksum_at < 0 || status != GT_OK) return status;
    if (!(piece = malloc(PIECE))) return hy_fail(GT_ERROR_MEMORY, "%s: no memory", f->path);
    hy_sha256_start(&sum);
    for (int64_t place = 0, n; status == GT_OK && place < f->size; place += n) {
        n = f->size - place < PIECE ? f->size - place : PIECE;
        status = read_bytes(f, piece, n);
        if (status != GT_OK) break;
        blank_digits(f, piece, place, n);
        hy_sha256_add(&sum, piece, (size_t)n);
    }
    free(piece);
    hy_sha256_end(&sum, hex);
    if (status == GT_OK && memcmp(hex, hy_file_text_of(f, "checksum") + 7, DIGITS))
        return hy_fail(GT_ERROR_VALUE, "%s: damaged: its checksum is wrong", f->path);
    return status;
}

static gt_status open_stream(hy_file *f) {
    struct stat about;
    if (stat(f->path, &about)) return hy_fail(GT_ERROR_VALUE, "%s: %s", f->path, strerror(errno));
    if (!S_ISREG(about.st_mode)) /* opening a pipe would wait */
        return hy_fail(GT_ERROR_VALUE, "%s: not a regular file", f->path);
    f->stream = fopen(f->path, "rb");
    if (!f->stream || fstat(fileno(f->stream), &about))
        return hy_fail(GT_ERROR_VALUE, "%s: %s", f->path, strerror(errno));
    f->size = (int64_t)about.st_size;
    return GT_OK;
}

int hy_is_model(const char *path) {
    hy_file f = {.path = (char *)path};
    uint8_t bytes[9];
    int64_t n = 0;
    int is_model = open_stream(&f) == GT_OK && fread(bytes, 1, 9, f.stream) == 9 && bytes[8] == '{';
    for (int i = 7; is_model && i >= 0; i--) n = n > header_max ? n : n << 8 | bytes[i];
    if (f.stream) fclose(f.stream);
    return is_model && n >= 2 && n <= header_max;
}

gt_status hy_file_open(hy_file *f, const char *path) {
    *f = (hy_file){.checksum_at = -1, .path = malloc(strlen(path) + 1)};
    if (!f->path) return hy_fail(GT_ERROR_MEMORY, "%s: no memory to read it", path);
    strcpy(f->path, path);
    TRY(open_stream(f));
    TRY(load_header(f));
    return verify(f);
}

void hy_file_close(hy_file *f) {
    if (f->stream) fclose(f->stream);
    free(f->path);
    free(f->header);
    free(f->tensors);
    free(f->texts);
    memset(f, 0, sizeof *f);
}

const char *hy_file_text_of(const hy_file *f, const char *key) {
    for (int i = 0; i < f->text_count; i++)
        if (!strcmp(f->texts[i].key, key)) return f->texts[i].value;
    return NULL;
}

const hy_file_tensor *hy_file_tensor_of(const hy_file *f, const char *name) {
    for (int low = 0, high = f->tensor_count; low < high;) {
        int middle = low + (high - low) / 2, order = strcmp(name, f->tensors[middle].name);
        if (order == 0) return f->tensors + middle;
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return NULL;
}

gt_status hy_file_read(hy_file *f, const hy_file_tensor *t, void *numbers) {
    TRY(seek(f, f->data + t->begin));
    return read_bytes(f, numbers, t->end - t->begin);
}
