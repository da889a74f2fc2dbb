/* Connects test backends, whose device memory is host memory, to tests/fake_nccl.c.  The stream that they pass is an
 * int, the number of unfinished sums. */
#ifndef FAKE_STREAM_H
#define FAKE_STREAM_H

#include "hybrid_ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Sets the backend's functions connect, sum, join and waited.  Also extends two functions as on a GPU: close closes the
 * communicator, and read first waits for the stream. */
void fake_stream_open(hy_backend *backend);

/* Sets the PCI address of the GPU of a rank.  The environment variable HY_GPUS is the number of GPUs of the machine;
 * without this variable the address stays as it is.  rank: as in hy_backend_cuda. */
void fake_stream_address(hy_backend *backend, int rank);

#ifdef __cplusplus
}
#endif
#endif
