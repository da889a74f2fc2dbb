/* Adds up gradients of several GPUs with NCCL.  hybrid_nccl.c loads libnccl.so.2 while the program runs, so a build
 * needs no NCCL.
 *
 * A rank is a process of the run (hybrid_ranks.h), and every rank has a GPU of its own.  MPI starts the ranks,
 * exchanges their statuses, and carries NCCL's identifier from rank 0 to the others.  A backend owns the
 * communicator, and calls hy_nccl_sum and hy_nccl_wait.
 *
 * nccl.h promises that all ranks get identical copies of an all-reduce, but it promises no order of addition.  Runs
 * still repeat bit for bit if version, GPUs and settings are the same.  NCCL then chooses the same algorithm, and
 * its rings and trees add in a fixed order. */
#ifndef HYBRID_NCCL_H
#define HYBRID_NCCL_H

#include "hybrid_ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- the part of NCCL's interface that the trainer uses ----------------------------------------
 * The declarations follow NCCL's documentation of version 2.  tests/test_nccl_header.cpp compares them with nccl.h. */

enum { HY_NCCL_ID_BYTES = 128 };
typedef struct hy_nccl_id {
    char bytes[HY_NCCL_ID_BYTES];
} hy_nccl_id;

enum {
    HY_NCCL_SUCCESS = 0,
    HY_NCCL_IN_PROGRESS = 7, /* no error: a call has not finished yet */
    HY_NCCL_FLOAT32 = 7,     /* a data type */
    HY_NCCL_SUM = 0,         /* an operation */
    HY_NCCL_HOST_NUMBER = 1  /* place of a scalar: host memory, which the call reads before it returns */
};

/* The functions return HY_NCCL_SUCCESS, or an error code that GetErrorString describes.  A stream is a cudaStream_t. */
typedef struct hy_nccl_functions {
    int (*GetVersion)(int *version); /* 22809 is 2.28.9 */
    int (*GetUniqueId)(hy_nccl_id *id);
    int (*CommInitRank)(void **comm, int size, hy_nccl_id id, int rank); /* for the current device */
    int (*CommDestroy)(void *comm);
    int (*CommAbort)(void *comm); /* also ends kernels that wait for other ranks */
    int (*CommGetAsyncError)(void *comm, int *error);
    int (*RedOpCreatePreMulSum)(int *op, void *factor, int type, int place, void *comm);
    int (*AllReduce)(const void *from, void *to, size_t count, int type, int op, void *comm, void *stream);
    const char *(*GetErrorString)(int error);
} hy_nccl_functions;

/* ---- communicators ------------------------------------------------------------------------------ */

struct hy_ranks;
typedef struct hy_nccl hy_nccl;

/* Loads the library at the first call.  Fails if the build has no NCCL support, or if the library or one of its
 * functions is missing. */
gt_status hy_nccl_load(void);
/* The version of the loaded library, such as "2.28.9". */
const char *hy_nccl_version(void);
/* Makes the identifier of a new communicator; one rank calls it. */
gt_status hy_nccl_new_id(hy_nccl_id *id);
/* Makes a communicator of all ranks, each on its current device.  Every rank passes the same identifier, and the
 * call waits for all ranks.  `ranks` must outlive the communicator. */
gt_status hy_nccl_open(hy_nccl **nccl, struct hy_ranks *ranks, const hy_nccl_id *id);
void hy_nccl_close(hy_nccl *nccl);

/* Enqueues a sum on the stream: device array numbers [n] is replaced by its sum over all ranks.  A single rank
 * multiplies its numbers by 1, so that a run with one rank shows the least cost of an NCCL kernel. */
gt_status hy_nccl_sum(hy_nccl *nccl, float *numbers, int64_t n, void *stream);

/* Waits until poll(arg, &is_done) sets is_done or fails.  Also fails if NCCL reports an error, or if another rank
 * failed.
 *
 * If this function or hy_nccl_sum fails, the communicator is aborted.  So kernels that wait for other ranks end.
 * Later waits then work, but the sums are not valid. */
gt_status hy_nccl_wait(hy_nccl *nccl, gt_status (*poll)(void *arg, int *is_done), void *arg);

/* Aborts the communicator if an exchange of the ranks has failed.  Returns whether the communicator is aborted. */
int hy_nccl_stop(hy_nccl *nccl);

#ifdef __cplusplus
}
#endif
#endif
