/* The output of hybrid_train: streams that report every failure, and the log, a CSV file with a row per step. */
#ifndef HYBRID_LOG_H
#define HYBRID_LOG_H

#include "hybrid_config.h"
#include "hybrid_model.h"
#include "hybrid_watch.h"
#include <stdio.h>

/* Status of a failed write to a file or stream.  gt_status has no such code, since no operator writes files. */
#define HY_ERROR_WRITE ((gt_status)500)

/* Protects the standard streams; call this function before any other.  It gives every closed standard stream an
 * unusable descriptor.  Otherwise the next opened file could get the descriptor of standard output, and printed text
 * would land in that file.  It also ignores the signal of a file that reaches its size limit (ulimit -f), so that
 * the write fails with an ordinary error. */
gt_status hy_streams_open(void);

/* Flushes the stream.  Fails if the flush or an earlier write failed.  The error message contains `name`. */
gt_status hy_flush(FILE *file, const char *name);
/* Flushes the stream as hy_flush does, and closes it even if that fails. */
gt_status hy_close(FILE *file, const char *name);

/* Returns 1 if both paths lead to the same file, also through links.  For files that do not exist yet, returns 1 if
 * creating both would create one file. */
int hy_same_file(const char *a, const char *b);
/* Fails if writing `path` would overwrite `other`.  An empty path means no file.  The error message contains
 * `option`, which gave `path`, and `what`, a description of `other`. */
gt_status hy_keep_apart(const char *option, const char *path, const char *what, const char *other);

/* Returns 1 if standard output or standard error goes to the regular file at `path`.  A log at `path` and that
 * stream would overwrite each other. */
int hy_is_standard(const char *path);

/* Room for a path after its links are resolved. */
#define HY_PATH_MAX 4096

/* Keeps an old file under a second name; call this function before replacing a file.  A non-empty file gets the
 * first free name of PATH.1, PATH.2, ...  The function follows links.  On file systems without hard links it renames
 * the file instead.  *kept is the new name, or "" if there is no old file. */
gt_status hy_keep_older(const char *option, const char *path, char *kept, size_t size);

double hy_now(void); /* seconds of a clock that never goes back */

/* ---- the log -------------------------------------------------------------------------------- */

/* Room for a row of the log, in bytes. */
#define HY_ROW_MAX 1024

typedef struct hy_log {
    FILE *file;                   /* NULL: no log */
    int is_regular;               /* 1: a regular file, so hy_log_complete may be called */
    int columns;                  /* index of the file's heading in the list of headings in hybrid_log.c */
    char row[HY_ROW_MAX];         /* the last row ... */
    long long at;                 /* ... and its offset in the file */
    char path[HY_TEXT_MAX];       /* as the user gave it */
    char note[HY_PATH_MAX + 128]; /* for the report: says what happened to an older file at this path */
} hy_log;

typedef struct hy_log_row {
    int64_t step, tokens;
    double loss, held_out;                          /* held_out: NAN if not measured after this step */
    double grad_norm, rwkv_norm, mamba_norm, ratio; /* ratio: NAN if the model has only one branch */
    double lr, tokens_per_s, memory_mib, seconds;
    const hy_probe *probe; /* NULL: no probe after this step */
    double final_loss;     /* loss of the final evaluation, which follows the last step ... */
    int64_t final_tokens;  /* ... and the number of its tokens; 0: no final evaluation */
    hy_gpu gpu;            /* with --watch: the latest reading */
} hy_log_row;

/* The last step before a run is resumed. */
typedef struct hy_log_point {
    int64_t step, tokens;
    double loss; /* NAN: not known */
} hy_log_point;

/* Opens the log.  With an empty path the log discards its rows.  A file that is not regular, such as a pipe, is
 * written from its current position.
 *
 * from = NULL begins a new log.  A regular file at PATH is renamed to the first free name of PATH.1, PATH.2, ...
 * Links are followed.
 *
 * from != NULL continues the log at PATH, and drops all rows after step from->step.  If complete rows are dropped,
 * the old log is first kept as PATH.1.  A half-written last row is dropped without such a copy.
 *
 * A log belongs to another run if its last row up to from->step differs from `from` in step, tokens or loss.  A log
 * of another run, or a file that is no log, is kept as PATH.1, and a new log begins.
 *
 * watched = 1 gives a new log columns for the GPU.  A log that is continued keeps its columns. */
gt_status hy_log_open(hy_log *log, const char *path, const hy_log_point *from, int watched);
/* Opens the log of a complete run at PATH, so that hy_log_complete can add the final results.  The log's last row
 * must belong to step `last` and have no held-out loss.  A run that was killed during its final evaluation leaves
 * such a row.  Any other file stays as it is, and log->file is NULL. */
gt_status hy_log_reopen(hy_log *log, const char *path, const hy_log_point *last);
/* Appends a row and flushes it to the file. */
gt_status hy_log_write(hy_log *log, const hy_log_row *row);
/* Adds the held-out loss, the probe of the branches and the final evaluation to the last row of a regular file.  One
 * write replaces the row in place; if the write fails, the function restores the row.  With held_out = NAN the
 * held-out loss stays empty. */
gt_status hy_log_complete(hy_log *log, double held_out, double final_loss, int64_t final_tokens, const hy_probe *probe);
gt_status hy_log_close(hy_log *log);

#endif
