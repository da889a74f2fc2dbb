/* Every call of a backend, seen: to time it, or to wait for it. */
#ifndef HYBRID_CALLS_H
#define HYBRID_CALLS_H

#include "hybrid_ops.h"

/* One call of an operator. */
typedef struct hy_call {
    const char *name; /* "wkv6_forward", "gemm" */
    double bytes;     /* of its arrays, each input read once and each output written once */
    gt_status (*make)(hy_backend *, const void *args);
    const void *args;
    size_t args_bytes;
} hy_call;

/* From now on the operators of `backend` call see(seer, backend, call), which makes the call, by call->make, as it
 * likes; recordings are neither made nor replayed.  One backend at a time; seer must outlive it. */
void hy_calls_see(hy_backend *backend, gt_status (*see)(void *seer, hy_backend *, const hy_call *), void *seer);
/* The parameters that grad_norm and adamw work on, which their arguments do not say; for hy_call.bytes. */
void hy_calls_parameters(int64_t count);

/* The operators of the backend are its own again. */
void hy_calls_leave(hy_backend *backend);

/* From now on every call is waited for, and none is recorded, so that an error that a device tells later names the call
 * that it is of, and the layer. */
void hy_calls_wait(hy_backend *backend);

#endif
