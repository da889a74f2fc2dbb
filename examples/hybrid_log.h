/* What hybrid_train writes: streams whose every failure is seen, and the log, a CSV file with a row
 * per step. */
#ifndef HYBRID_LOG_H
#define HYBRID_LOG_H

#include "hybrid_config.h"
#include "hybrid_model.h"
#include <stdio.h>

/* A file or a stream could not be written: no gt_status, as no operator writes one. */
#define HY_ERROR_WRITE ((gt_status)500)

/* Call it first.  A standard stream that is closed gets a descriptor that cannot be used: else the
 * next file that is opened would take its place, and what is printed would land there.  A file that
 * reaches its largest size (ulimit -f) becomes an error as any other. */
gt_status hy_streams_open(void);

/* Writes out what the stream holds back.  Fails if that or an earlier write to it failed.  `name`
 * is for the message, here and below. */
gt_status hy_flush(FILE *file, const char *name);
/* The same, and closes it in any case. */
gt_status hy_close(FILE *file, const char *name);

/* 1 if both paths lead to one file, be it through links, or would if they were created. */
int hy_same_file(const char *a, const char *b);
/* Fails if writing `path`, which `option` names, would overwrite `other`, which `what` describes.
 * An empty path is none. */
gt_status hy_keep_apart(const char *option, const char *path, const char *what, const char *other);

/* 1 if standard output or error goes to that very regular file: each would overwrite the other. */
int hy_is_standard(const char *path);

/* Room for a path without links. */
#define HY_PATH_MAX 4096

/* Before a file is replaced: gives the one that is there, unless it is empty, a second name, the
 * first of PATH.1, PATH.2, ... that is free; of a link, what it leads to.  Where files cannot have
 * two names it is renamed.  *kept: that name, "" if there is no file. */
gt_status hy_keep_older(const char *option, const char *path, char *kept, size_t size);

/* ---- the log -------------------------------------------------------------------------------- */

typedef struct hy_log {
    FILE *file;                   /* NULL: there is none */
    char path[HY_TEXT_MAX];       /* as it was given */
    char note[HY_PATH_MAX + 128]; /* what became of the file that stood there, for the report */
} hy_log;

typedef struct hy_log_row {
    int64_t step, tokens;
    double loss, held_out;                          /* held_out: NAN if it was not measured after this step */
    double grad_norm, rwkv_norm, mamba_norm, ratio; /* ratio: NAN if there is one branch alone */
    double lr, tokens_per_s, memory_mib, seconds;
    const hy_probe *probe; /* NULL: the branches were not looked at after this step */
} hy_log_row;

/* The end of a run that goes on. */
typedef struct hy_log_point {
    int64_t step, tokens;
    double loss; /* NAN: not known */
} hy_log_point;

/* Opens the log; an empty path gives one that takes rows and keeps none.
 *
 * from NULL: a new log.  A regular file of that name is kept as PATH.1, or under the first
 * number that is free; of a link, what it leads to.  Else the log is continued: rows after that
 * step are dropped, and the whole log is kept as above; a last row that was not written to its end is dropped alone.
 * A file that is no log is kept aside as above, and so is one whose last row up to that step has another step, number
 * of tokens or loss: it is another run's.
 *
 * What is no regular file, such as a pipe, is written from where it stands. */
gt_status hy_log_open(hy_log *log, const char *path, const hy_log_point *from);
/* The row is in the file when it returns. */
gt_status hy_log_write(hy_log *log, const hy_log_row *row);
gt_status hy_log_close(hy_log *log);

#endif
