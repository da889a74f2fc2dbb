#define _XOPEN_SOURCE 700 /* fileno, fstat, scandir */
#include "hybrid_files.h"
#include "hybrid_data.h"
#include "hybrid_ops.h"
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

/* ---- names ---------------------------------------------------------------------------------- */

static gt_status no_memory(void) { return hy_fail(GT_ERROR_MEMORY, "no memory for the names of files"); }

/* Adds the path FOLDER/NAME, or NAME if the folder is "". */
static gt_status add_path(hy_paths *paths, const char *folder, const char *name) {
    const size_t size = strlen(folder) + strlen(name) + 2;
    char **larger = realloc(paths->path, (size_t)(paths->count + 1) * sizeof *larger), *path = malloc(size);
    if (larger) paths->path = larger;
    if (!larger || !path) {
        free(path);
        return no_memory();
    }
    snprintf(path, size, "%s%s%s", folder, *folder ? "/" : "", name);
    paths->path[paths->count++] = path;
    return GT_OK;
}

static int is_folder(const char *path) {
    struct stat about;
    return !stat(path, &about) && S_ISDIR(about.st_mode);
}

static gt_status add_folder(hy_paths *paths, const char *folder) {
    struct dirent **list;
    const int count = scandir(folder, &list, NULL, NULL);
    const int64_t before = paths->count;
    gt_status status = GT_OK;
    if (count < 0) return hy_fail(GT_ERROR_VALUE, "data folder %s: %s", folder, strerror(errno));
    for (int i = 0; i < count; i++) {
        if (status == GT_OK && list[i]->d_name[0] != '.') status = add_path(paths, folder, list[i]->d_name);
        if (status == GT_OK && paths->count && list[i]->d_name[0] != '.' && is_folder(paths->path[paths->count - 1]))
            free(paths->path[--paths->count]); /* leaves out folders inside this folder */
        free(list[i]);
    }
    free(list);
    if (status == GT_OK && paths->count == before)
        status = hy_fail(GT_ERROR_VALUE, "data folder %s: contains no files", folder);
    return status;
}

/* Compares with strcmp, so that the order does not depend on the locale. */
static int compare_paths(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

static gt_status add_name(hy_paths *paths, const char *name) {
    const int64_t before = paths->count;
    if (!is_folder(name)) return add_path(paths, "", name);
    gt_status status = add_folder(paths, name);
    if (status == GT_OK)
        qsort(paths->path + before, (size_t)(paths->count - before), sizeof *paths->path, compare_paths);
    return status;
}

gt_status hy_paths_expand(hy_paths *paths, const char *value, const uint64_t *shuffle) {
    struct stat about;
    gt_status status = GT_OK;
    *paths = (hy_paths){NULL, 0};
    char *names = malloc(strlen(value) + 1), *name = names;
    if (!names) return no_memory();
    strcpy(names, value);
    if (!strchr(value, ',') || !stat(value, &about)) { /* a single name, which may contain commas */
        status = add_name(paths, value);
        name = NULL;
    }
    while (name && status == GT_OK) {
        char *comma = strchr(name, ',');
        if (comma) *comma = 0;
        status = *name ? add_name(paths, name) : hy_fail(GT_ERROR_VALUE, "data: '%s' contains an empty name", value);
        name = comma ? comma + 1 : NULL;
    }
    free(names);
    uint64_t random = shuffle ? *shuffle ^ 0x66696c6573u : 0; /* not the numbers that place windows */
    for (int64_t i = paths->count - 1; status == GT_OK && shuffle && i > 0; i--) {
        const int64_t k = (int64_t)(hy_random(&random) % (uint64_t)(i + 1));
        char *path = paths->path[i];
        paths->path[i] = paths->path[k], paths->path[k] = path;
    }
    if (status != GT_OK) hy_paths_free(paths);
    return status;
}

void hy_paths_free(hy_paths *paths) {
    for (int64_t i = 0; i < paths->count; i++) free(paths->path[i]);
    free(paths->path);
    *paths = (hy_paths){NULL, 0};
}

int64_t hy_paths_bytes(const hy_paths *paths) {
    int64_t bytes = 0;
    struct stat about;
    for (int64_t i = 0; i < paths->count; i++)
        if (!stat(paths->path[i], &about) && S_ISREG(about.st_mode)) bytes += (int64_t)about.st_size;
    return bytes;
}

/* ---- contents of files ---------------------------------------------------------------------- */

/* Reads a whole file, or a pipe, whose size is not known in advance.  On failure it returns NULL and sets errno.
 * EFBIG means that a file that is not regular, such as /dev/zero, has more than HY_STREAM_MAX bytes. */
static uint8_t *read_all(FILE *file, int may_be_endless, int64_t *size) {
    size_t room = 1 << 16, used = 0;
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

gt_status hy_span_load(hy_span *span, const char *path, int is_mapped) {
    struct stat about;
    *span = (hy_span){.bytes = NULL};
    FILE *file = fopen(path, "rb");
    const int is_regular = file && !fstat(fileno(file), &about) && S_ISREG(about.st_mode);
    if (file && is_mapped && is_regular && about.st_size) {
        void *map = mmap(NULL, (size_t)about.st_size, PROT_READ, MAP_PRIVATE, fileno(file), 0);
        if (map != MAP_FAILED) span->bytes = map, span->size = (int64_t)about.st_size, span->is_mapped = 1;
    } else if (file) {
        span->bytes = read_all(file, !is_regular, &span->size);
    }
    const int error = errno;
    if (file) fclose(file);
    if (span->bytes) return GT_OK;
    if (file && error == EFBIG)
        return hy_fail(GT_ERROR_VALUE,
                       "data file %s: not a regular file, and longer than %zu MiB; put the text into a file", path,
                       HY_STREAM_MAX >> 20);
    return hy_fail(GT_ERROR_VALUE, "data file %s: %s", path, strerror(error));
}

void hy_span_free(hy_span *span) {
    union {
        const uint8_t *read;
        void *owned;
    } bytes = {span->bytes};
    if (span->is_mapped)
        munmap(bytes.owned, (size_t)span->size);
    else
        free(bytes.owned);
    *span = (hy_span){.bytes = NULL};
}

/* ---- the table of a tokeniser --------------------------------------------------------------- */

static int digit_of(uint8_t c) { return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1; }

/* Decodes the escape at `at` into *byte.  Returns the length of the escape; 0: the escape is not valid. */
static int unescape(const uint8_t *at, int64_t left, uint8_t *byte) {
    static const char codes[] = "ntrf\\", bytes[] = "\n\t\r\f\\";
    const char *known = left > 1 && at[1] ? strchr(codes, at[1]) : NULL;
    if (known) *byte = (uint8_t)bytes[known - codes];
    if (known || left < 4 || at[1] != 'x') return known ? 2 : 0;
    const int high = digit_of(at[2]), low = digit_of(at[3]);
    *byte = (uint8_t)(16 * high + low);
    return high < 0 || low < 0 ? 0 : 4;
}

static gt_status read_table(hy_table *table, const hy_span *file, const char *path) {
    int64_t used = 0;
    for (int64_t i = 0; i < file->size; i++) table->count += file->bytes[i] == '\n';
    if (!table->count || file->bytes[file->size - 1] != '\n')
        return hy_fail(GT_ERROR_VALUE, "table %s: must end with a line break", path);
    table->bytes = malloc((size_t)file->size);
    table->start = malloc((size_t)(table->count + 1) * sizeof *table->start);
    if (!table->bytes || !table->start) return hy_fail(GT_ERROR_MEMORY, "table %s: no memory", path);
    table->start[0] = 0;
    for (int64_t i = 0, line = 0; i < file->size;) {
        uint8_t byte = file->bytes[i];
        const int length = byte == '\\' ? unescape(file->bytes + i, file->size - i, &byte) : 1;
        if (!length)
            return hy_fail(GT_ERROR_VALUE, "table %s: line %lld: unknown escape; use \\n \\t \\r \\f \\\\ or \\xNN",
                           path, (long long)line + 1);
        if (byte == '\n' && length == 1)
            table->start[++line] = used;
        else
            table->bytes[used++] = byte;
        i += length;
    }
    return GT_OK;
}

gt_status hy_table_load(hy_table *table, const char *path) {
    hy_span file;
    *table = (hy_table){.count = 0};
    gt_status status = hy_span_load(&file, path, 0);
    if (status != GT_OK) return hy_fail(status, "table: %s", hy_last_error());
    status = read_table(table, &file, path);
    hy_span_free(&file);
    if (status != GT_OK) hy_table_free(table);
    return status;
}

void hy_table_free(hy_table *table) {
    free(table->bytes);
    free(table->start);
    *table = (hy_table){.count = 0};
}
