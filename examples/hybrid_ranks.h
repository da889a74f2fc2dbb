/* The processes of a run: ranks 0 to size - 1.  Only hybrid_ranks.c uses MPI; a build without MPI has one rank.
 *
 * Training is data parallel: every rank has all weights and its share of each batch.  The ranks add up their
 * gradients, and every rank takes the same step.  Ranks on CPUs add up gradients with hy_ranks_sum, ranks on GPUs
 * with NCCL (hybrid_nccl.h).  Rank 0 alone prints and writes.
 *
 * Functions with an argument `own` are collective: every rank calls them in the same order.  Each call begins with
 * an exchange of statuses and signals.  A rank with an error passes the error as `own` to its next call, and that
 * call then fails on every rank.  The message names the rank, unless all ranks have the error.  After a failure
 * every call fails at once.  A rank that fails waits HY_RANKS_PATIENCE seconds for the others, and then ends all of
 * them.
 *
 * In some steps GPUs wait for each other; the ranks exchange statuses before such a step.  A rank that fails after
 * this exchange may leave a sum of NCCL waiting forever.  So it notifies all other ranks, and hy_ranks_await polls
 * for this notice. */
#ifndef HYBRID_RANKS_H
#define HYBRID_RANKS_H

#include "hybrid_ops.h"

enum { HY_RANKS_PATIENCE = 6 };

typedef struct hy_ranks {
    int rank, size;
    int local;          /* number of ranks on this machine, this one included */
    int local_rank;     /* index of this rank among the ranks of this machine ... */
    int machine;        /* ... and the lowest rank of this machine, which identifies the machine */
    int signal;         /* signal that a rank reported in the latest exchange (the lowest such rank); 0: none */
    int (*asked)(void); /* returns the signal that this rank received, or 0; NULL: this rank handles no signals */
    gt_status failed;   /* status of the first failure in an exchange */
    int follows;        /* 1: this rank fails only because another rank failed */
    int waits_on_gpu;   /* 1: GPUs wait for each other, so a failed rank notifies the others */
    char library[64];   /* name and version of the MPI library; "": one process without MPI */
} hy_ranks;

/* Joins the processes that mpirun or srun started.  Without these launchers there is one rank.  Fails if the
 * processes cannot be joined, for example because this build has no MPI. */
gt_status hy_ranks_open(hy_ranks *ranks);
/* Exchanges statuses a last time, and leaves the other ranks.  Returns the common status. */
gt_status hy_ranks_close(hy_ranks *ranks, gt_status own);

/* Waits for all ranks. */
gt_status hy_ranks_meet(hy_ranks *ranks, gt_status own);
/* Replaces numbers [n], in host memory, by their sum over all ranks.  The sum has the same bits on every rank, and
 * in every run with the same number of ranks. */
gt_status hy_ranks_sum(hy_ranks *ranks, gt_status own, float *numbers, int64_t n);
/* Replaces a few numbers by their sum, added in the order of the ranks. */
gt_status hy_ranks_add(hy_ranks *ranks, gt_status own, double *numbers, int n);
/* Copies the bytes of rank 0 to every rank. */
gt_status hy_ranks_share(hy_ranks *ranks, gt_status own, void *bytes, size_t count);
/* Collects the n numbers of every rank in all [size, n] on rank 0.  Other ranks may pass NULL as `all`. */
gt_status hy_ranks_gather(hy_ranks *ranks, gt_status own, const double *numbers, double *all, int64_t n);
/* Checks that every rank has the same values as rank 0.  `pairs` holds names and values in turn; each ends with
 * NUL.  The error message contains the name and both values. */
gt_status hy_ranks_agree(hy_ranks *ranks, gt_status own, const char *pairs, size_t bytes);

/* Waits for a device until poll(arg, &is_done) sets is_done or fails.  Fails if another rank notified this rank of
 * its failure.  Ends all ranks when the time limit for hangs has passed. */
gt_status hy_ranks_await(hy_ranks *ranks, gt_status (*poll)(void *arg, int *is_done), void *arg);

/* ---- a run that hangs --------------------------------------------------------------------------- */

/* Sets a time limit for hangs, in seconds; 0: no limit.  The process must call hy_alive or a function above at least
 * that often.  Otherwise it ends with a message and status 1.  A rank that only waits for others ends at least two
 * seconds later, so that the message of the rank that hangs comes first. */
void hy_limit_stall(int seconds);
/* Starts a deadline before a library call that may hang after an error.  The process ends with the message `what`
 * after HY_RANKS_PATIENCE seconds.  A call with NULL removes the deadline. */
void hy_ranks_deadline(const char *what);
/* Reports that the run makes progress, which restarts the time limit for hangs.  The text names the next piece of
 * work, for the message of a hang. */
#ifdef __GNUC__
__attribute__((format(printf, 1, 2)))
#endif
void hy_alive(const char *format, ...);

#endif
