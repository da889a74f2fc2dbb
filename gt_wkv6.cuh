/* gt_wkv6.cuh - RWKV-6 time mixing.
 *
 * THE OPERATOR (one batch element and head; the state S is [N,V], the decay d_t in [0,1] has a value per channel n)
 *     y_t = S_{t-1}^T r_t + (sum_n r_t u k_t) v_t            S_t = diag(d_t) S_{t-1} + k_t v_t^T
 * The factor of a pair of tokens j < i is prod_{j<m<i} d_m, without the decays of i and j themselves.
 * y is also multiplied by the caller's scale.  The formulas below omit the scale; in backward it multiplies r and dr.
 *
 * ON TENSOR CORES.  These kernels need N = V in 32, 64, 128, compute capability 8.0, and rows aligned to 16 bytes.
 * fp32 with N = 128 also needs more than 99 KB of shared memory per block.  The kernels use matrix products over chunks
 * of 64 tokens and sub-chunks of 16 tokens.  docs/wkv6.md has the formulas in the order of the kernels, and names the
 * function for each.  tests/wkv6_chunked.c implements the same formulas in plain C.
 *
 * ANY SIZE (generic.cuh).  Forward goes token by token.  Backward works in sub-chunks.  Let S be the state before a
 * sub-chunk, and G = dL/dS after it.  With
 *     P_t = prod_{m<t} d_m      Q_t = prod_{m>t} d_m      D_ij = prod_{j<m<i} d_m      E = prod d_m
 *     C_ij = <dy_i, v_j>        A_ij = sum_n r_i k_j D_ij (j < i),   A_ii = sum_n r_i u k_i
 * over the sub-chunk's tokens, the gradients are
 *     dr_i = P_i . (S dy_i) + u . k_i C_ii + sum_{j<i} C_ij k_j . D_ij
 *     dk_j = Q_j . (G v_j)  + u . r_j C_jj + sum_{i>j} C_ij r_i . D_ij
 *     dv_j = G^T (Q_j . k_j) + sum_{i>=j} A_ij dy_i                    du = sum_t C_tt r_t . k_t
 *     dg_t = E . rowsum(S . G) + sum_{i>t} r_i . P_i . (S dy_i) + sum_{j<t} k_j . Q_j . (G v_j)
 *            + sum_{j<t<i} C_ij r_i . k_j . D_ij                        g = log d
 *     S <- E . S + sum_t (Q_t . k_t) v_t^T         G <- E . G + sum_t (P_t . r_t) dy_t^T
 *
 * NUMERICAL HAZARDS, and the remedies
 *   - Quotients of decays.  The decay between two tokens is a quotient of decays from a common start.  Under strong
 *     decay the quotient overflows.  The kernels for any size use only products of decays, all in [0,1].  Kernels on
 *     tensor cores use quotients within 16 tokens.  If the decay over 16 tokens is 2^-64 or less (STRONG_DECAY_LIMIT),
 *     the kernels take the strong-decay path, which uses only products.  No decay is clamped, so exact zeros and hard
 *     resets are right.
 *   - Cancellation in dg.  As a difference of two running sums, dg is noise in channels with fast decay.  The kernels
 *     for any size and the strong-decay path only add.  Chunks on tensor cores subtract only terms that they have added
 *     before, and that belong to dg of some token of the chunk.  If tokens decay much faster than their neighbours, the
 *     chunk takes the strong-decay path, too.
 *   - d near 1.  fp32 cannot hold 1 - d (20 % error at 1 - 3e-7), and a long accumulation shows the error.  So kernels
 *     update states as S + (expm1(g) S + k v), unless the decay is strong (scale_of_log).  With 16-bit activations on
 *     tensor cores they multiply states by the decay of 16 tokens or more (sub_chunk_decay).
 *   - Raw decay: dw = -exp(w) dg would be inf * 0 if d = 0.  The kernels set dw = 0 in that case.
 *
 * THE PARTS lie in gt/wkv6/.
 *     table.h              describes the operator (plain C, shared with the stubs and the CPU twin)
 *     problem.cuh          sizes, arguments and decays, shared by all kernels
 *     generic.cuh          the kernels for any N and V
 *     operands.cuh, pass.cuh, prepare.cuh
 *                          shared by the kernels on tensor cores
 *     forward.cuh, forward_sm90.cuh
 *                          forward on tensor cores; the same on compute capability 9.0
 *     states.cuh           passes that compute only states: G in reverse, S of segments
 *     step.cuh             steps
 *     backward.cuh         the chunks of backward on tensor cores, with backward_inputs.cuh,
 *                          backward_products.cuh, backward_fp32.cuh, backward_strong_decay.cuh
 *     path.cuh             which kernels a call takes
 *     launch.cuh           plans and launches
 *     segment.cuh          the state after a piece that starts from zeros; recurrence/pieces.cuh joins pieces
 * All recurrent operators share the code for sequences, segments and the order of launches: gt/recurrence/.
 * This file has the C functions. */
#ifndef GT_WKV6_CUH
#define GT_WKV6_CUH

#include "gt/wkv6/table.h"

#if defined(__CUDACC__) || defined(GT_EMU)

#include "gt/wkv6/segment.cuh"

/* ---- the C functions -------------------------------------------------------------------------------------------- */

extern "C" {

GT_API gt_status gt_wkv6_forward(const gt_wkv6_args* args, gt_stream stream) {
    return gt::call_forward<gt::wkv6::Operator>(args, stream);
}
GT_API gt_status gt_wkv6_step(const gt_wkv6_args* args, gt_stream stream) {
    return gt::call_step<gt::wkv6::Operator>(args, stream);
}
GT_API gt_status gt_wkv6_backward(const gt_wkv6_args* args, gt_stream stream) {
    return gt::call_backward<gt::wkv6::Operator>(args, stream);
}
GT_API gt_status gt_wkv6_segment(const gt_wkv6_args* args, gt_stream stream) {
    return gt::call_segment<gt::wkv6::Operator, false>(args, stream);
}
GT_API gt_status gt_wkv6_segment_backward(const gt_wkv6_args* args, gt_stream stream) {
    return gt::call_segment<gt::wkv6::Operator, true>(args, stream);
}
GT_API gt_status gt_wkv6_join(const gt_wkv6_args* args, gt_stream stream) {
    return gt::call_join<gt::wkv6::Operator, false>(args, stream);
}
GT_API gt_status gt_wkv6_join_backward(const gt_wkv6_args* args, gt_stream stream) {
    return gt::call_join<gt::wkv6::Operator, true>(args, stream);
}
GT_API gt_status gt_wkv6_workspace(const gt_wkv6_args* args, gt_workspace* need) {
    return gt::call_workspace<gt::wkv6::Operator>(args, need);
}

GT_API gt_status gt_wkv6_plan(gt_pass pass, int is_query, const gt_wkv6_args* args, void* plan) {
    return gt::plan_pass<gt::wkv6::Operator>(pass, is_query, args, plan);
}
GT_API gt_status gt_wkv6_run(const void* plan, int stage, void* chain) {
    return gt::run_stage<gt::wkv6::Operator>(plan, stage, chain);
}
GT_API gt_status gt_wkv6_step_in(const gt_wkv6_args* args, void* chain) {
    return gt::call_step_on<gt::wkv6::Operator>(args, *static_cast<gt::Chain*>(chain));
}

static gt::wkv6::MixedArgs gt_wkv6_mixed_args(const gt_wkv6_args* args, const gt_mix* mix) {
    gt::wkv6::MixedArgs a;
    static_cast<gt_wkv6_args&>(a) = *args;
    a.mix = *mix;
    return a;
}
GT_API gt_status gt_wkv6_plan_mixed(int is_query, const gt_wkv6_args* args, const gt_mix* mix, void* plan) {
    const gt::wkv6::MixedArgs a = gt_wkv6_mixed_args(args, mix);
    return gt::plan_pass<gt::wkv6::MixedOperator>(GT_FORWARD, is_query, &a, plan);
}
GT_API gt_status gt_wkv6_step_mixed(const gt_wkv6_args* args, const gt_mix* mix, void* chain) {
    const gt::wkv6::MixedArgs a = gt_wkv6_mixed_args(args, mix);
    return gt::call_step_on<gt::wkv6::MixedOperator>(&a, *static_cast<gt::Chain*>(chain));
}

static const gt::PathPasses<gt_wkv6_args> gt_wkv6_passes = {
    {gt_wkv6_forward, gt_wkv6_backward, gt_wkv6_step, gt_wkv6_segment, gt_wkv6_segment_backward},
    gt::wkv6::why_no_pass_is_faster};

GT_API gt_status gt_wkv6_path(const gt_wkv6_args* args, char* text, size_t bytes) {
    return gt::path_over_time<true>(gt_op_wkv6(), gt_wkv6_passes, args, text, bytes);
}
GT_API gt_status gt_wkv6_pass_path(gt_pass pass, const gt_wkv6_args* args, char* text, size_t bytes) {
    return gt::path_of_pass(gt_op_wkv6(), gt_wkv6_passes, pass, args, text, bytes);
}

} /* extern "C" */

#else

/* ---- stubs: this file was compiled without nvcc --------------------------------------------------- */

#include "gt/base/stubs.h"

#ifdef __cplusplus
extern "C" {
#endif

GT_STUBS(wkv6)
GT_STUB(wkv6, step, GT_STEP)
GT_STUBS_IN_PARTS(wkv6)
GT_API gt_status gt_wkv6_plan_mixed(int is_query, const gt_wkv6_args *args, const gt_mix *mix, void *plan) {
    (void)is_query, (void)args, (void)mix, (void)plan;
    return gt_no_cuda(gt_op_wkv6(), GT_FORWARD);
}
GT_API gt_status gt_wkv6_step_mixed(const gt_wkv6_args *args, const gt_mix *mix, void *chain) {
    (void)args, (void)mix, (void)chain;
    return gt_no_cuda(gt_op_wkv6(), GT_STEP);
}

#ifdef __cplusplus
}
#endif

#endif /* kernels or stubs */

#include "gt_kernels.h" /* adds the other parts of the implementation whose macros are defined */

#endif /* GT_WKV6_CUH */
