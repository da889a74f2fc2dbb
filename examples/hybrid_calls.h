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

/* Intercepts the operators of `backend`: each of them now calls see(seer, backend, call), and `see` makes the call by
 * call->make.  The backend makes and replays no recordings meanwhile.  Only one backend at a time can be intercepted;
 * seer must outlive it. */
void hy_calls_see(hy_backend *backend, gt_status (*see)(void *seer, hy_backend *, const hy_call *), void *seer);
/* Sets the number of parameters that grad_norm and adamw process, for hy_call.bytes.  Their arguments do not hold it.
 * */
void hy_calls_parameters(int64_t count);

/* Ends the interception. */
void hy_calls_leave(hy_backend *backend);

/* Makes the backend wait after every call, and record none.  A device reports errors late; with the wait the error
 * message names the call and the layer that failed. */
void hy_calls_wait(hy_backend *backend);

#endif
