/* The files of a text: their names, their contents, and the table of a tokeniser. */
#ifndef HYBRID_FILES_H
#define HYBRID_FILES_H

#include "gt_kernels.h"

/* Paths in the order in which they are read. */
typedef struct hy_paths {
    char **path;
    int64_t count;
} hy_paths;

/* Lists the files that `value` names: files and folders with commas between.  A folder stands for its files, without
 * hidden ones, in the order of their names.  shuffle: NULL, or the seed of a random order. */
gt_status hy_paths_expand(hy_paths *paths, const char *value, const uint64_t *shuffle);
void hy_paths_free(hy_paths *paths);

/* The contents of a file. */
typedef struct hy_span {
    const uint8_t *bytes;
    int64_t size;
    int64_t first; /* index, in the text, of the file's first token */
    int is_mapped;
} hy_span;

/* Most bytes that hy_span_load reads from a pipe or a device.  A regular file may be larger. */
#define HY_STREAM_MAX ((size_t)1 << 30)

/* Reads a file, or maps it with is_mapped = 1.  The system reads the pages of a mapped file when they are needed, so
 * the file may be larger than memory; it must not change.  A pipe cannot be mapped and is read. */
gt_status hy_span_load(hy_span *span, const char *path, int is_mapped);
void hy_span_free(hy_span *span);

/* Total bytes of the regular files among the paths. */
int64_t hy_paths_bytes(const hy_paths *paths);

/* The bytes that each token of a tokeniser stands for. */
typedef struct hy_table {
    uint8_t *bytes;
    int64_t *start; /* [count + 1]; NULL: there is no table */
    int64_t count;
} hy_table;

/* Reads a file of tools/tokenize_text.py: line n holds token n, with \n \t \r \f \\ \xNN as escapes. */
gt_status hy_table_load(hy_table *table, const char *path);
void hy_table_free(hy_table *table);

#endif
