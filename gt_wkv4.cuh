/* gt_wkv4.cuh - RWKV-4 time mixing (wkv4).
 *
 * THE OPERATOR (one batch element and channel; g is the log of the decay)
 *     y_t = (A_{t-1} + exp(u + k_t) v_t) / (B_{t-1} + exp(u + k_t))         a mean of all v, weighted by exp(k)
 *     A_t = exp(g) A_{t-1} + exp(k_t) v_t        B_t = exp(g) B_{t-1} + exp(k_t)
 * Peng et al., 2023, arXiv:2305.13048.
 *
 * FORWARD keeps A = a exp(p) and B = b exp(p), where p is about the largest key so far.  In RWKV-4's own kernel p
 * decays with the state, token by token.  Here a and b decay, and p stays.  So p is not a sum that is rounded at every
 * token.  There is one exception: if |g| > 2, the kernels add g to p, because a and b would vanish or overflow.
 * BACKWARD uses the mean m = A / B and l = log B.  Then all factors are shares between 0 and 1: see
 * gt/wkv4/backward.cuh.
 *
 * NUMERICAL HAZARDS, and the remedies
 *   - Large keys.  exp(k) overflows for a key above 88.  So kernels take exponentials only of differences from the
 *     largest key.
 *   - A key far above later keys.  After its weight has decayed, all weights are small beside exp(p).  So every 32
 *     tokens b is scaled back to about 1, and p falls (normalise).
 *   - exp(g) near 1.  fp32 cannot hold 1 - exp(g), and a long mean shows the error.  So a and b are scaled as a +
 *     expm1(g) a.
 *   - Keys so large that fp32 cannot tell p from p + g.  Kernels first subtract keys, then add n g for n tokens.
 *   - exp(u) above exp(40).  y then takes exponentials of its own.
 *   - Keys of minus infinity, and neutral states (no tokens yet).  If a sum of weights is 0, quotients divide by the
 *     smallest number instead.
 *   - dstate_in of a neutral state.  m has no meaning there, but A and B do; see first_gradient().
 *
 * SEQUENCES AND SEGMENTS.  Kernels treat batch elements and packed sequences alike.  Long sequences are cut into
 * segments that run in parallel.  See gt/recurrence/sequences.cuh and segments.cuh.  wkv4 joins the states of segments
 * itself, as triples (a, b, p).  It does not use the scan of segments.cuh, where A and B would overflow.
 *
 * THE PARTS lie in gt/wkv4/.
 *     table.h        describes the operator (plain C, shared with the stubs and the CPU twin)
 *     problem.cuh    the arguments as every kernel gets them; a token; tiles
 *     forward.cuh, backward.cuh, step.cuh
 *     launch.cuh     plans and launches
 * This file has the C functions. */
#ifndef GT_WKV4_CUH
#define GT_WKV4_CUH

#include "gt/wkv4/table.h"

#if defined(__CUDACC__) || defined(GT_EMU)

#include "gt/base/path.cuh"
#include "gt/wkv4/launch.cuh"

/* ==== the C functions ================================================================================= */

extern "C" {

GT_API gt_status gt_wkv4_forward(const gt_wkv4_args* args, gt_stream stream) {
    return gt::call_forward<gt::wkv4::Operator>(args, stream);
}
GT_API gt_status gt_wkv4_step(const gt_wkv4_args* args, gt_stream stream) {
    return gt::call_step<gt::wkv4::Operator>(args, stream);
}
GT_API gt_status gt_wkv4_backward(const gt_wkv4_args* args, gt_stream stream) {
    return gt::call_backward<gt::wkv4::Operator>(args, stream);
}
GT_API gt_status gt_wkv4_workspace(const gt_wkv4_args* args, gt_workspace* need) {
    return gt::call_workspace<gt::wkv4::Operator>(args, need);
}
GT_API gt_status gt_wkv4_path(const gt_wkv4_args* args, char* text, size_t bytes) {
    const gt::PathPasses<gt_wkv4_args> passes = {{gt_wkv4_forward, gt_wkv4_backward, gt_wkv4_step}, nullptr};
    return gt::path_over_time(gt_op_wkv4(), passes, args, text, bytes);
}

} /* extern "C" */

#else

/* ---- stubs: this file was compiled without nvcc --------------------------------------------------- */

#include "gt/base/stubs.h"

#ifdef __cplusplus
extern "C" {
#endif

GT_STUBS(wkv4)
GT_STUB(wkv4, step, GT_STEP)

#ifdef __cplusplus
}
#endif

#endif /* kernels or stubs */

#include "gt_kernels.h" /* adds the other parts of the implementation whose macros are defined */

#endif /* GT_WKV4_CUH */
