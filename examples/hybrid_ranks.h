/* The processes of a run: ranks 0 to size - 1.  hybrid_ranks.c alone knows MPI; a build without MPI has one rank.
 *
 * Data parallel: every rank has all weights and its share of each batch.  The ranks add up their gradients, and every
 * rank takes the same step.  On CPUs hy_ranks_sum adds them up, on GPUs NCCL (hybrid_nccl.h).  Rank 0 alone prints and
 * writes.
 *
 * Every rank calls the functions that take `own` in the same order.  Each call begins with an exchange of statuses and
 * signals.  A rank with an error passes the error as `own` to its next call.  That call then fails on every rank.  The
 * message names the rank, unless all ranks have the error.  After a failure every call fails at once.  A rank that
 * fails waits HY_RANKS_PATIENCE seconds for the others, and then ends all of them.
 *
 * Ranks exchange statuses before each step in which their GPUs wait for each other.  If a rank fails later, its GPU may
 * never take part in a sum.  So a failed rank notifies all others, which poll for this notice in hy_ranks_await. */
#ifndef HYBRID_RANKS_H
#define HYBRID_RANKS_H

#include "hybrid_ops.h"

enum { HY_RANKS_PATIENCE = 6 };

typedef struct hy_ranks {
    int rank, size;
    int local;          /* number of ranks on this machine, this one included */
    int local_rank;     /* index of this rank among them ... */
    int machine;        /* ... and the lowest rank among them, which identifies the machine */
    int signal;         /* signal that the lowest rank with one reported in the latest exchange; 0: none */
    int (*asked)(void); /* returns the signal that this rank got; NULL: this rank handles no signals */
    gt_status failed;   /* status of the first failure in an exchange */
    int follows;        /* 1: this rank fails only because another rank failed */
    int waits_on_gpu;   /* 1: GPUs wait for each other, so a failed rank notifies the others */
    char library[64];   /* name and version of the MPI library; "": one process without MPI */
} hy_ranks;

/* Joins the processes that mpirun or srun started.  Without these launchers there is one rank.  Fails if this build or
 * its MPI library cannot join the processes. */
gt_status hy_ranks_open(hy_ranks *ranks);
/* Exchanges statuses a last time and leaves the other ranks.  Returns the common status. */
gt_status hy_ranks_close(hy_ranks *ranks, gt_status own);

/* Waits for all ranks. */
gt_status hy_ranks_meet(hy_ranks *ranks, gt_status own);
/* Replaces numbers [n], in host memory, by their sum over all ranks.  The result has the same bits on every rank, and
 * in every run with the same number of ranks. */
gt_status hy_ranks_sum(hy_ranks *ranks, gt_status own, float *numbers, int64_t n);
/* Replaces a few numbers by their sum, added in the order of the ranks. */
gt_status hy_ranks_add(hy_ranks *ranks, gt_status own, double *numbers, int n);
/* Every rank gets the bytes of rank 0. */
gt_status hy_ranks_share(hy_ranks *ranks, gt_status own, void *bytes, size_t count);
/* Rank 0 gets the n numbers of each rank in all [size, n].  Other ranks may pass NULL as `all`. */
gt_status hy_ranks_gather(hy_ranks *ranks, gt_status own, const double *numbers, double *all, int64_t n);
/* Checks that every rank has the same values as rank 0. pairs holds names and values in turn, each ending with NUL.
 * The error message contains the name and both values. */
gt_status hy_ranks_agree(hy_ranks *ranks, gt_status own, const char *pairs, size_t bytes);

/* Waits for a device until poll(arg, &is_done) sets is_done or fails.  Fails if another rank notified this rank of its
 * failure, and ends all ranks after the time limit for hangs. */
gt_status hy_ranks_await(hy_ranks *ranks, gt_status (*poll)(void *arg, int *is_done), void *arg);

/* ---- a run that hangs --------------------------------------------------------------------------- */

/* Sets a time limit for hangs.  If the process calls neither hy_alive nor a function above for so many seconds, it ends
 * with a message and status 1.  0: no limit.  A rank that only waits for others ends two seconds later, so that the
 * message of the rank that hangs comes first. */
void hy_limit_stall(int seconds);
/* Ends the process with a message, unless another call with NULL comes within HY_RANKS_PATIENCE seconds.  For calls of
 * libraries that may hang after an error. */
void hy_ranks_deadline(const char *what);
/* Reports that the run makes progress.  The text names the next piece of work, for the message of a hang. */
#ifdef __GNUC__
__attribute__((format(printf, 1, 2)))
#endif
void hy_alive(const char *format, ...);

#endif
