/* The files of a text: their names, their contents, and the table of a tokeniser. */
#ifndef HYBRID_FILES_H
#define HYBRID_FILES_H

#include "gt_kernels.h"

/* Paths in the order in which they are read. */
typedef struct hy_paths {
    char **path;
    int64_t count;
} hy_paths;

/* Lists the files that `value` names.  `value` is a list of files and folders, separated by commas.  A folder stands
 * for its files, without hidden ones, in the order of their names.  shuffle is the seed of a random order, or NULL
 * for the order of `value`. */
gt_status hy_paths_expand(hy_paths *paths, const char *value, const uint64_t *shuffle);
void hy_paths_free(hy_paths *paths);

/* The contents of one file of a text. */
typedef struct hy_span {
    const uint8_t *bytes;
    int64_t size;
    int64_t first; /* index, in the text, of the file's first token */
    int is_mapped;
} hy_span;

/* The largest number of bytes that hy_span_load reads from a pipe or a device.  A regular file may be larger. */
#define HY_STREAM_MAX ((size_t)1 << 30)

/* Reads a file into memory, or maps it if is_mapped = 1.  The system reads a page of a mapped file only when the
 * program uses the page.  So the file may be larger than memory, but no program may change it meanwhile.  A pipe
 * cannot be mapped and is always read. */
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

/* Reads a table that tools/tokenize_text.py wrote.  Line n holds the bytes of token n, with the escapes \n \t \r \f
 * \\ \xNN. */
gt_status hy_table_load(hy_table *table, const char *path);
void hy_table_free(hy_table *table);

#endif
