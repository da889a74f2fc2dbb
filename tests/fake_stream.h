/* Sums of NCCL for backends of tests whose device is host memory.  The stream that they pass to tests/fake_nccl.c is a
 * count of unfinished sums, as an int. */
#ifndef FAKE_STREAM_H
#define FAKE_STREAM_H

#include "hybrid_ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Gives the backend the functions connect, sum, join and waited.  Its close also closes the communicator, and read also
 * waits for the stream, as a GPU's functions do. */
void fake_stream_open(hy_backend *backend);

/* Sets the address of the GPU: the environment variable HY_GPUS is the number of GPUs of the machine.  rank: as of
 * hy_backend_cuda.  Without the variable the address stays as it is. */
void fake_stream_address(hy_backend *backend, int rank);

#ifdef __cplusplus
}
#endif
#endif
