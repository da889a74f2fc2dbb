/* Safetensors files.  A file holds named tensors, and metadata as pairs of texts.
 *
 *     8 bytes    length of the header, little-endian
 *     header     a JSON object: "__metadata__": {key: text, ...}, then for each tensor
 *                name: {"dtype": "F32", "shape": [n, ...], "data_offsets": [begin, end]};
 *                spaces at its end make its length a multiple of 8
 *     data       the tensors' numbers, little-endian, without gaps
 *
 * The metadata may have a key "checksum".  Its value is "sha256:" and 64 hexadecimal digits.  The digits are the
 * SHA-256 of the whole file with zeros in place of these digits.
 *
 * A strict parser of our own reads the header.  A JSON library would also accept keys given twice, numbers such as
 * 1e3, and text after the end.  Here all of these must be errors. */
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
    int64_t begin, end;                /* byte offsets in the data */
} hy_file_tensor;

typedef struct hy_file_text {
    char *key, *value;
} hy_file_text;

/* ---- reading ------------------------------------------------------------------------------- */

typedef struct hy_file {
    char *path;
    FILE *stream;
    int64_t size, data; /* bytes of the file; offset of its data */
    hy_file_tensor *tensors;
    hy_file_text *texts;
    int tensor_count, text_count;
    char *header;
    int64_t checksum_at; /* offset of the checksum's digits in the header; -1: no checksum */
} hy_file;

/* Returns 1 if the file at `path` begins like a safetensors file, even if the file is cut off. */
int hy_is_model(const char *path);

/* Opens a safetensors file.  Fails if the file is cut off or has a wrong checksum.  If this function or one below
 * fails, hy_last_error() has the reason and names the file. */
gt_status hy_file_open(hy_file *file, const char *path);
void hy_file_close(hy_file *file); /* `file` may also be all zeros, or a file that hy_file_open failed to open */

/* The metadata text with this key; NULL if there is none. */
const char *hy_file_text_of(const hy_file *file, const char *key);
const hy_file_tensor *hy_file_tensor_of(const hy_file *file, const char *name);

/* Reads all numbers of a tensor, as float or int64_t. */
gt_status hy_file_read(hy_file *file, const hy_file_tensor *tensor, void *numbers);

/* ---- writing -----------------------------------------------------------------------------------
 * A caller first names all texts and tensors, then calls hy_writer_begin.  Then it writes the tensors' data in the same
 * order, and calls hy_writer_end.
 * The writer writes PATH.tmp, and hy_writer_end renames PATH.tmp to PATH once all bytes are on the disk.  So an older
 * file at PATH stays until the new file is complete. */
typedef struct hy_file_writer hy_file_writer;

/* Fails if PATH cannot be written: its folder is missing or read-only, PATH is read-only or not a regular file, or
 * another program is writing it. */
gt_status hy_writer_open(hy_file_writer **writer, const char *path);
/* Checks whether hy_writer_open would succeed, without changing any file.  `reads` is a file that the caller reads
 * meanwhile, or "".  Fails if `reads` is PATH.tmp, because the writer would overwrite it. */
gt_status hy_writer_fits(const char *path, const char *reads);
/* Adds a metadata pair; key and value are ASCII. */
gt_status hy_writer_text(hy_file_writer *writer, const char *key, const char *value);
gt_status hy_writer_tensor(hy_file_writer *writer, const char *name, hy_file_dtype dtype, int rank,
                           const int64_t *shape);
gt_status hy_writer_begin(hy_file_writer *writer);
gt_status hy_writer_data(hy_file_writer *writer, const void *bytes, size_t count);
/* Renames PATH.tmp to PATH if `status` is GT_OK, else removes PATH.tmp.  Frees the writer.  Returns the first error,
 * `status` included. */
gt_status hy_writer_end(hy_file_writer *writer, gt_status status);

#endif
