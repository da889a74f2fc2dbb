/* The output of hybrid_train: streams that report every failure, and the log, a CSV file with a row per step. */
#ifndef HYBRID_LOG_H
#define HYBRID_LOG_H

#include "hybrid_config.h"
#include "hybrid_model.h"
#include "hybrid_watch.h"
#include <stdio.h>

/* A file or a stream could not be written: no gt_status, as no operator writes one. */
#define HY_ERROR_WRITE ((gt_status)500)

/* Call it first.  It gives every closed standard stream a descriptor that nothing can use.  Without it the next file
 * would get the descriptor of standard output, and printed text would land in that file.  A file that reaches its
 * largest size (ulimit -f) becomes an error as any other. */
gt_status hy_streams_open(void);

/* Flushes the stream.  Fails if the flush or an earlier write failed.  The message has `name`, here and below. */
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

/* Call it before a file is replaced.  It gives the old file, unless that is empty, a second name: the first free one
 * of PATH.1, PATH.2, ...  It follows links.  Where a file cannot have two names, it renames the file.  *kept: the new
 * name, "" if there is no file. */
gt_status hy_keep_older(const char *option, const char *path, char *kept, size_t size);

double hy_now(void); /* seconds of a clock that only goes forward */

/* ---- the log -------------------------------------------------------------------------------- */

/* Room for a row. */
#define HY_ROW_MAX 1024

typedef struct hy_log {
    FILE *file;                   /* NULL: there is none */
    int is_regular;               /* 1: hy_log_complete can be called */
    int columns;                  /* which of its headers the file has: see hybrid_log.c */
    char row[HY_ROW_MAX];         /* the last row ... */
    long long at;                 /* ... and where it begins in the file */
    char path[HY_TEXT_MAX];       /* as it was given */
    char note[HY_PATH_MAX + 128]; /* what became of the file that stood there, for the report */
} hy_log;

typedef struct hy_log_row {
    int64_t step, tokens;
    double loss, held_out;                          /* held_out: NAN if it was not measured after this step */
    double grad_norm, rwkv_norm, mamba_norm, ratio; /* ratio: NAN if there is one branch alone */
    double lr, tokens_per_s, memory_mib, seconds;
    const hy_probe *probe; /* NULL: the branches were not looked at after this step */
    double final_loss;     /* of the final evaluation, which follows the last step ... */
    int64_t final_tokens;  /* ... and how many tokens it read; 0: there was none */
    hy_gpu gpu;            /* with --watch: the latest reading */
} hy_log_row;

/* The last step of the run that is resumed. */
typedef struct hy_log_point {
    int64_t step, tokens;
    double loss; /* NAN: not known */
} hy_log_point;

/* Opens the log.  With an empty path it takes rows and keeps none.
 *
 * from = NULL: begins a new log.  A regular file at PATH is renamed to the first free name of PATH.1, PATH.2, ...
 * Links are followed.
 *
 * Otherwise continues the log at PATH.  Rows after step from->step are dropped.  Before whole rows are dropped, the old
 * log is kept as PATH.1.  A half-written last row is dropped without a copy.  The log belongs to another run if its
 * last row up to that step differs from `from` in step, tokens or loss.  A log of another run, or a file that is no
 * log, is kept as PATH.1, and a new log begins.
 *
 * watched: a new log has columns for the GPU.  A log that is continued keeps its columns.
 *
 * A file that is not regular, such as a pipe, is written from its current position. */
gt_status hy_log_open(hy_log *log, const char *path, const hy_log_point *from, int watched);
/* For a complete run.  Opens the log at PATH if its last row is the row of that step and has no held-out loss: a run
 * that was killed during its final evaluation leaves this row.  Any other file stays as it is, and log->file is
 * NULL. */
gt_status hy_log_reopen(hy_log *log, const char *path, const hy_log_point *last);
/* The row is in the file when it returns. */
gt_status hy_log_write(hy_log *log, const hy_log_row *row);
/* Adds the held-out loss, the branches and the final evaluation to the last row of a regular file, which has none of
 * them.  One write replaces the row in place.  If that fails, it restores the row.  held_out: NAN leaves it empty. */
gt_status hy_log_complete(hy_log *log, double held_out, double final_loss, int64_t final_tokens, const hy_probe *probe);
gt_status hy_log_close(hy_log *log);

#endif
