/* gt_ssm.cuh - Mamba-2 state space duality (ssd) and the Mamba-1 selective scan.
 *
 * THE OPERATORS, for one batch element.  A head has a state h [P,N].  A channel of the scan is a head with P = 1 and x
 * = u.
 *     v = dt + dt_bias        Delta = softplus(v) if asked, clamped if asked        a_t = Delta_t A
 *     h_t = exp(a_t) h_{t-1} + Delta_t x_t Bm_t^T
 *     y_t = (h_t Cm_t + Dskip . x_t) . silu(z_t)                     read after the update
 * In ssd, A and a_t are one number for each head.  In the scan, they are one number for each channel and state element.
 *
 * SSD IN SUB-CHUNKS OF 16 TOKENS.  The kernels for any size use this form; docs/ssd.md has the form of the tensor-core
 * kernels.  h is the state before the sub-chunk, and G the gradient of the state after the sub-chunk.  Here dy is the
 * gradient of y before the gate, dy . silu(z).  Sums of a within the sub-chunk give these factors:
 *     pre_t = exp(sum_{m<=t} a_m)    suf_s = exp(sum_{m>s} a_m)    L_ts = exp(sum_{s<m<=t} a_m), s <= t
 *     S_ts = <C_t, B_s> L_ts         R_ts = <dy_t, x_s> L_ts       E = exp(sum a)
 * All results are small matrix products of these factors:
 *     y_t  = pre_t h C_t + sum_{s<=t} S_ts Delta_s x_s
 *     U_s  = suf_s G B_s + sum_{t>=s} S_ts dy_t              dx_s = Delta_s U_s + Dskip . dy_s
 *     dC_t = pre_t dy_t^T h + sum_{s<=t} Delta_s R_ts B_s        (summed over the heads of a group)
 *     dB_s = Delta_s (suf_s x_s^T G + sum_{t>=s} R_ts C_t)       (likewise)
 *     h <- E h + sum_s Delta_s suf_s x_s B_s^T               G <- E G + sum_t pre_t dy_t C_t^T
 * da is a sum of terms of three kinds.  e_t contains h, f_s contains G, and c_ts contains two tokens of the sub-chunk:
 *     e_t = <C_t, pre_t dy_t^T h>    f_s = <B_s, suf_s x_s^T G>    c_ts = <C_t, B_s> L_ts <dy_t, x_s>
 *     dDelta_s = f_s + sum_{t>=s} c_ts + A da_s              dA = sum Delta da
 *     da_k = E <G, h> + sum_{t>=k} e_t + sum_{s<k} Delta_s f_s + sum_{t>=k>s} Delta_s c_ts
 *
 * THE SCAN goes token by token, with the state elements in registers.  Backward, with g = G + dy_t C_t, computes:
 *     dC_t = sum_d dy_t h_t      dB_t = sum_d Delta u g      du = Delta <g, B> + Dskip dy
 *     da = g exp(a) h_{t-1}      dDelta = u <g, B> + <A, da>      G <- exp(a) g
 *
 * NUMERICAL HAZARDS, and the remedies
 *   - Let c be the running sum of a.  exp(c_t - c_s) overflows for s > t, and the difference loses small decays next to
 *     large ones.  So every exponent is a sum of its own a, without subtractions.  Pairs with s > t are never computed.
 *   - If da were computed as row sums minus column sums, strong decay would leave only rounding noise.  The formula
 *     above only adds.
 *   - If exp(a) is near 1, rounding exp(a) to fp32 loses most bits of 1 - exp(a).  Over a long sequence this error adds
 *     up.  So unless the decay is strong, the kernels compute h + expm1(a) h (scale_of_log).
 *   - In fp32, log(1 + exp(v)) is 0 for v < -17, although softplus and its slope are not 0.  So softplus uses log1p.
 *   - One function computes Delta, its limits and its slope, so forward and backward agree at the limits.
 *   - If Delta A > 0, exp(a) may overflow although the state is 0 or small.  ssd replaces infinite factors by finite
 *     ones.  The scan and both step kernels multiply a state four times by exp(a / 4) instead (grow).  The same is done
 *     for the growth through a whole segment (rescale_far).
 *
 * SEQUENCES AND SEGMENTS.  Kernels treat batch elements and packed sequences alike.  Long sequences are cut into
 * segments that run side by side.  See gt/recurrence/sequences.cuh and segments.cuh.
 *
 * THE PARTS lie in gt/ssd/ and gt/scan/; both operators share gt/recurrence/ssm.h and ssm.cuh.
 *     table.h        describes the operator in plain C, for the kernels, the stubs and the CPU twin (gt/base/op.h)
 *     problem.cuh    the arguments as every kernel gets them
 *     step.cuh       the step kernel; gt/recurrence/ssm_step.cuh holds the code that both step kernels share
 *     launch.cuh     launches the kernels of a call; scan's file also has the plans
 *     scan: forward.cuh, backward.cuh
 *     ssd:  choice.cuh     which kernels a call takes
 *           plan.cuh       where their memory lies
 *           segment.cuh    runs over a piece of a sequence from a zero state; gt/recurrence/pieces.cuh joins pieces
 *           any/           kernels for any size
 *           mma/           kernels for tensor cores; files fp32_* hold the same passes for fp32
 *           sm90/          kernels for compute capability 9.0; files fp32_* as in mma/
 * A pass has one entry file in each of these folders: forward.cuh, states.cuh or gradients.cuh.  Names of its other
 * files begin with the pass's name.
 * This file defines the C functions. */
#ifndef GT_SSM_CUH
#define GT_SSM_CUH

#include "gt/scan/table.h"
#include "gt/ssd/table.h"

#if defined(__CUDACC__) || defined(GT_EMU)

#include "gt/base/path.cuh"
#include "gt/scan/launch.cuh"
#include "gt/ssd/launch.cuh"

/* ==== the C functions ================================================================================= */

extern "C" {

GT_API gt_status gt_ssd_forward(const gt_ssd_args* args, gt_stream stream) {
    return gt::call_forward<gt::ssd::Operator>(args, stream);
}
GT_API gt_status gt_ssd_step(const gt_ssd_args* args, gt_stream stream) {
    return gt::call_step<gt::ssd::Operator>(args, stream);
}
GT_API gt_status gt_ssd_backward(const gt_ssd_args* args, gt_stream stream) {
    return gt::call_backward<gt::ssd::Operator>(args, stream);
}
GT_API gt_status gt_ssd_segment(const gt_ssd_args* args, gt_stream stream) {
    return gt::call_segment<gt::ssd::Operator, false>(args, stream);
}
GT_API gt_status gt_ssd_segment_backward(const gt_ssd_args* args, gt_stream stream) {
    return gt::call_segment<gt::ssd::Operator, true>(args, stream);
}
GT_API gt_status gt_ssd_join(const gt_ssd_args* args, gt_stream stream) {
    return gt::call_join<gt::ssd::Operator, false>(args, stream);
}
GT_API gt_status gt_ssd_join_backward(const gt_ssd_args* args, gt_stream stream) {
    return gt::call_join<gt::ssd::Operator, true>(args, stream);
}
GT_API gt_status gt_ssd_workspace(const gt_ssd_args* args, gt_workspace* need) {
    return gt::call_workspace<gt::ssd::Operator>(args, need);
}

GT_API gt_status gt_selective_scan_forward(const gt_selective_scan_args* args, gt_stream stream) {
    return gt::call_forward<gt::scan::Operator>(args, stream);
}
GT_API gt_status gt_selective_scan_step(const gt_selective_scan_args* args, gt_stream stream) {
    return gt::call_step<gt::scan::Operator>(args, stream);
}
GT_API gt_status gt_selective_scan_backward(const gt_selective_scan_args* args, gt_stream stream) {
    return gt::call_backward<gt::scan::Operator>(args, stream);
}
GT_API gt_status gt_selective_scan_workspace(const gt_selective_scan_args* args, gt_workspace* need) {
    return gt::call_workspace<gt::scan::Operator>(args, need);
}

GT_API gt_status gt_ssd_plan(gt_pass pass, int is_query, const gt_ssd_args* args, void* plan) {
    return gt::plan_pass<gt::ssd::Operator>(pass, is_query, args, plan);
}
GT_API gt_status gt_ssd_run(const void* plan, int stage, void* chain) {
    return gt::run_stage<gt::ssd::Operator>(plan, stage, chain);
}
GT_API gt_status gt_ssd_step_in(const gt_ssd_args* args, void* chain) {
    return gt::call_step_on<gt::ssd::Operator>(args, *static_cast<gt::Chain*>(chain));
}

static const gt::PathPasses<gt_ssd_args> gt_ssd_passes = {
    {gt_ssd_forward, gt_ssd_backward, gt_ssd_step, gt_ssd_segment, gt_ssd_segment_backward}, nullptr};

GT_API gt_status gt_ssd_path(const gt_ssd_args* args, char* text, size_t bytes) {
    return gt::path_over_time<true>(gt_op_ssd(), gt_ssd_passes, args, text, bytes);
}
GT_API gt_status gt_ssd_pass_path(gt_pass pass, const gt_ssd_args* args, char* text, size_t bytes) {
    return gt::path_of_pass(gt_op_ssd(), gt_ssd_passes, pass, args, text, bytes);
}

GT_API gt_status gt_selective_scan_path(const gt_selective_scan_args* args, char* text, size_t bytes) {
    const gt::PathPasses<gt_selective_scan_args> passes = {
        {gt_selective_scan_forward, gt_selective_scan_backward, gt_selective_scan_step}, nullptr};
    return gt::path_over_time(gt_op_selective_scan(), passes, args, text, bytes);
}

} /* extern "C" */

#else

/* ---- stubs: this file was compiled without nvcc --------------------------------------------------- */

#include "gt/base/stubs.h"

#ifdef __cplusplus
extern "C" {
#endif

GT_STUBS(ssd)
GT_STUB(ssd, step, GT_STEP)
GT_STUBS_IN_PARTS(ssd)

GT_STUBS(selective_scan)
GT_STUB(selective_scan, step, GT_STEP)

#ifdef __cplusplus
}
#endif

#endif /* kernels or stubs */

#include "gt_kernels.h" /* the rest of the implementation, if this file is to hold it */

#endif /* GT_SSM_CUH */
