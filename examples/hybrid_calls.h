/* Intercepts every operator call of a backend, to time the call or to wait for it. */
#ifndef HYBRID_CALLS_H
#define HYBRID_CALLS_H

#include "hybrid_ops.h"

/* One call of an operator. */
typedef struct hy_call {
    const char *name; /* "wkv6_forward", "gemm" */
    double bytes;     /* bytes moved if the call reads each input once and writes each output once */
    gt_status (*make)(hy_backend *, const void *args);
    const void *args;
    size_t args_bytes;
} hy_call;

/* Intercepts the operators of `backend`: each operator now calls see(seer, backend, call).  `see` does the
 * operator's work by calling call->make.  Meanwhile the backend neither records graphs nor replays them.  Only one
 * backend can be intercepted at a time, and `seer` must outlive the interception. */
void hy_calls_see(hy_backend *backend, gt_status (*see)(void *seer, hy_backend *, const hy_call *), void *seer);
/* Sets the number of parameters that grad_norm and adamw process.  hy_call.bytes needs this number, and the
 * arguments of these two operators do not contain it. */
void hy_calls_parameters(int64_t count);

/* Ends the interception. */
void hy_calls_leave(hy_backend *backend);

/* Makes the backend wait after every call, and stops it from recording graphs.  A device reports errors late; with
 * the wait, the error message names the call and the layer that failed. */
void hy_calls_wait(hy_backend *backend);

#endif
