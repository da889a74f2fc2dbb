/* Safetensors files: named tensors, and pairs of texts beside them.
 *
 *     8 bytes    length of the header, little-endian
 *     header     a JSON object: "__metadata__": {key: text, ...}, then for each tensor
 *                name: {"dtype": "F32", "shape": [n, ...], "data_offsets": [begin, end]};
 *                spaces at its end make its length a multiple of 8
 *     data       the tensors' numbers, little-endian, without gaps
 *
 * The metadata's key "checksum" is "sha256:" and 64 hexadecimal digits: the SHA-256 of the whole
 * file with these digits as zeros.  It may be missing.
 *
 * The header is read by a strict reader of its own, not by a JSON library: this form is all that
 * may stand there, and what such libraries let through (keys given twice, numbers such as 1e3, text
 * after the end) has to be an error. */
#ifndef HYBRID_FILE_H
#define HYBRID_FILE_H

#include "hybrid_ops.h"
#include <stdio.h>

enum { HY_RANK_MAX = 8 };
typedef enum hy_file_dtype { HY_FILE_F32, HY_FILE_I64, HY_FILE_OTHER } hy_file_dtype;

typedef struct hy_file_tensor {
    char *name;
    hy_file_dtype dtype;
    int rank;
    int64_t shape[HY_RANK_MAX], count; /* elements */
    int64_t begin, end;                /* bytes in the data */
} hy_file_tensor;

typedef struct hy_file_text {
    char *key, *value;
} hy_file_text;

/* ---- reading ------------------------------------------------------------------------------- */

typedef struct hy_file {
    char *path;
    FILE *stream;
    int64_t size, data; /* bytes of the file; where its data begin */
    hy_file_tensor *tensors;
    hy_file_text *texts;
    int tensor_count, text_count;
    char *header;
    int64_t checksum_at; /* place of the checksum's digits in the header; -1: it has none */
} hy_file;

/* 1 if the file at `path` begins as a safetensors file does, whole or cut off. */
int hy_is_model(const char *path);

/* Opens a safetensors file.  Refuses a file that is not whole, or whose checksum is wrong.  If this or a function below
 * fails, hy_last_error() has the reason and names the file. */
gt_status hy_file_open(hy_file *file, const char *path);
void hy_file_close(hy_file *file); /* also one that could not be opened, or is all zeros */

/* NULL if there is none. */
const char *hy_file_text_of(const hy_file *file, const char *key);
const hy_file_tensor *hy_file_tensor_of(const hy_file *file, const char *name);

/* All numbers of a tensor: floats or int64_t. */
gt_status hy_file_read(hy_file *file, const hy_file_tensor *tensor, void *numbers);

/* ---- writing -----------------------------------------------------------------------------------
 * Name all texts and tensors; begin; write the data of the tensors in the same order; end.
 * The file is written as PATH.tmp.  The end renames it to PATH once it is on the disk, so an older file stays until the
 * new one is whole. */
typedef struct hy_file_writer hy_file_writer;

/* Fails if the path cannot be written: its folder is missing or read-only, it is no regular file or
 * a read-only one, or another program is writing it. */
gt_status hy_writer_open(hy_file_writer **writer, const char *path);
/* Whether it can be, with every file left as it is.  Fails also if the file `reads`, "" being none,
 * is PATH.tmp, which writing would take over. */
gt_status hy_writer_fits(const char *path, const char *reads);
/* ASCII texts. */
gt_status hy_writer_text(hy_file_writer *writer, const char *key, const char *value);
gt_status hy_writer_tensor(hy_file_writer *writer, const char *name, hy_file_dtype dtype, int rank,
                           const int64_t *shape);
gt_status hy_writer_begin(hy_file_writer *writer);
gt_status hy_writer_data(hy_file_writer *writer, const void *bytes, size_t count);
/* Puts the file in place, unless `status` is an error; frees the writer and removes PATH.tmp.
 * Returns the first error, `status` included. */
gt_status hy_writer_end(hy_file_writer *writer, gt_status status);

#endif
