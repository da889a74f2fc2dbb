/* The files that a text lies in: names, what they hold, and the table of a tokeniser. */
#ifndef HYBRID_FILES_H
#define HYBRID_FILES_H

#include "gt_kernels.h"

/* Paths in the order in which they are read. */
typedef struct hy_paths {
    char **path;
    int64_t count;
} hy_paths;

/* The files that a value names: a file; a folder, whose files come in the order of their names, without hidden ones; or
 * several of both with commas between.  shuffle: NULL, or a seed that orders them. */
gt_status hy_paths_expand(hy_paths *paths, const char *value, const uint64_t *shuffle);
void hy_paths_free(hy_paths *paths);

/* What a file holds. */
typedef struct hy_span {
    const uint8_t *bytes;
    int64_t size;
    int64_t first; /* token of the text */
    int is_mapped;
} hy_span;

/* Most bytes that are read from a pipe or a device; a regular file may be longer. */
#define HY_STREAM_MAX ((size_t)1 << 30)

/* Reads a file, or maps it: then the system reads the pages that are needed, and the file may be larger than memory.
 * A mapped file must stay as it is.  A pipe cannot be mapped and is read. */
gt_status hy_span_load(hy_span *span, const char *path, int is_mapped);
void hy_span_free(hy_span *span);

/* Bytes of the regular files, together. */
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
