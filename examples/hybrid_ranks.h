/* The processes of a run: ranks 0 to size - 1.  hybrid_ranks.c alone knows MPI; a build without MPI has one rank.
 *
 * Data parallel: every rank has all weights and its share of each batch.  hy_ranks_sum adds up gradients, and every
 * rank takes the same step.  Rank 0 alone prints and writes.
 *
 * Every rank calls the functions that take `own` in the same order.  Each call begins with an exchange of statuses and
 * signals.  A rank whose `own` is an error passes it to its next call, and that call fails on every rank: the message
 * names the rank, unless all ranks have the error.  After a failure every call fails at once.  A rank that fails waits
 * HY_RANKS_PATIENCE seconds for the others, and then ends all of them.
 *
 * NCCL fits behind hy_ranks_sum: the model calls it once a step, between backward and the optimiser, with an array of
 * the backend.  A GPU's form would load NCCL by dlopen and send the identifier of its communicator by hy_ranks_share.
 * In the captured step it would sum buckets of the array as backward finishes them; statuses would be exchanged before
 * the step is launched. */
#ifndef HYBRID_RANKS_H
#define HYBRID_RANKS_H

#include "hybrid_ops.h"

enum { HY_RANKS_PATIENCE = 6 };

typedef struct hy_ranks {
    int rank, size;
    int local;          /* ranks on this machine, this one included */
    int signal;         /* the first signal that a rank had at the latest exchange; 0: none */
    int (*asked)(void); /* tells the signal that this rank got; NULL: it takes none */
    gt_status failed;   /* of the first failure that ranks exchanged */
    char library[64];   /* name and version of the MPI library; "": one process without MPI */
} hy_ranks;

/* Joins the processes that mpirun or srun started; without them there is one rank.  Fails if this build, or its MPI,
 * cannot join them. */
gt_status hy_ranks_open(hy_ranks *ranks);
/* Tells the others the status, and leaves them.  The status of all. */
gt_status hy_ranks_close(hy_ranks *ranks, gt_status own);

/* Waits for all ranks. */
gt_status hy_ranks_meet(hy_ranks *ranks, gt_status own);
/* numbers [n], host memory: the sum over ranks.  One number of ranks gives the same bits each time, on every rank. */
gt_status hy_ranks_sum(hy_ranks *ranks, gt_status own, float *numbers, int64_t n);
/* A few numbers: the sum, added up in the order of ranks. */
gt_status hy_ranks_add(hy_ranks *ranks, gt_status own, double *numbers, int n);
/* Every rank gets the bytes of rank 0. */
gt_status hy_ranks_share(hy_ranks *ranks, gt_status own, void *bytes, size_t count);
/* Rank 0 gets the n numbers of each rank, in all [size, n], which other ranks may leave out. */
gt_status hy_ranks_gather(hy_ranks *ranks, gt_status own, const double *numbers, double *all, int64_t n);
/* Texts in pairs, a name and a value, each ending with NUL.  Fails, with name and both values, if a rank has another
 * value than rank 0. */
gt_status hy_ranks_agree(hy_ranks *ranks, gt_status own, const char *pairs, size_t bytes);

/* ---- a run that hangs --------------------------------------------------------------------------- */

/* From now on the process ends, with a message and status 1, if for so many seconds neither hy_alive nor a function
 * above is called.  0: never.  A rank that only waits for others ends two seconds later, so that the message of the
 * rank that hangs comes first. */
void hy_limit_stall(int seconds);
/* The run makes progress.  The text names the next thing that it does, for that message. */
#ifdef __GNUC__
__attribute__((format(printf, 1, 2)))
#endif
void hy_alive(const char *format, ...);

#endif
