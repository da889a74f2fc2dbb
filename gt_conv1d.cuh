/* gt_conv1d.cuh - causal depthwise convolution.
 *
 * THE OPERATOR, for one batch element and channel.  e is the W-1 inputs before the first token, followed by x_0 ...
 *     pre_t = bias + sum_{j<W} weight[j] e_{t+j}     y_t = act(pre_t)     state_out = last W-1 of e
 * Backward, with q_t = dy_t act'(pre_t):
 *     de_{t+j} += weight[j] q_t     dweight[j] += e_{t+j} q_t     dbias += q_t
 * Before these sums the last W-1 elements of de are dstate_out, the others 0.  After them the first W-1 elements are
 * dstate_in.
 *
 * NUMERICAL HAZARDS, and the remedies
 *   - Some kernels treat every width as 4.  They skip the taps that a smaller width lacks.  Weights of 0 would not do,
 *     because the input there may be infinite.
 *   - SiLU and its derivative at infinity: see silu_of_sigmoid and silu_derivative.
 *   - dweight and dbias are sums over batch and time.  A thread adds at most 256 tokens, then a block adds its warps,
 *     then reduce_rows adds the blocks.
 *
 * THE PARTS lie in gt/conv1d/.
 *     table.h        describes the operator (plain C, shared with the stubs and the CPU twin)
 *     problem.cuh    shared by all kernels
 *     tile.cuh       how forward and backward are cut, and their copies through shared memory
 *     forward.cuh    forward
 *     backward.cuh   backward
 *     borders.cuh    where packed sequences begin, for rows
 *     rows.cuh       forward and backward over time, long rows
 *     whole_rows.cuh forward over time, long rows that are whole numbers of aligned units
 *     bulk_rows_sm90.cuh the same rows on compute capability 9.0, packed sequences too
 *     step.cuh       steps
 *     state.cuh      states of packed sequences, gradients of states
 *     launch.cuh     plans and launches
 * This file defines the C functions. */
#ifndef GT_CONV1D_CUH
#define GT_CONV1D_CUH

#include "gt/conv1d/table.h"

#if defined(__CUDACC__) || defined(GT_EMU)

#include "gt/base/path.cuh"
#include "gt/conv1d/launch.cuh"

/* ---- the C functions ------------------------------------------------------------------------- */

extern "C" {

GT_API gt_status gt_conv1d_forward(const gt_conv1d_args* args, gt_stream stream) {
    gt_conv1d_args a;
    gt::Device device;
    const gt_status status = gt::conv1d::prepare(GT_FORWARD, args, &a, &device);
    return status != GT_OK ? status : gt::conv1d::launch_forward(a, device, stream);
}

GT_API gt_status gt_conv1d_step(const gt_conv1d_args* args, gt_stream stream) {
    gt_conv1d_args a;
    gt::Device device;
    const gt_status status = gt::conv1d::prepare(GT_STEP, args, &a, &device);
    return status != GT_OK ? status : gt::conv1d::launch_step(a, stream);
}

GT_API gt_status gt_conv1d_backward(const gt_conv1d_args* args, gt_stream stream) {
    gt_conv1d_args a;
    gt::Device device;
    gt_status status = gt::conv1d::prepare(GT_BACKWARD, args, &a, &device);
    if (status != GT_OK) return status;
    const gt::conv1d::BackwardPlan plan = gt::conv1d::plan_backward(a, device);
    status = gt::check_workspace(a.workspace, a.workspace_bytes, plan.bytes);
    return status != GT_OK ? status : gt::conv1d::launch_backward(a, plan, device, stream);
}

GT_API gt_status gt_conv1d_workspace(const gt_conv1d_args* args, gt_workspace* need) {
    gt_no_answer(need);
    gt_conv1d_args a;
    gt::Device device;
    const gt_status status = gt::conv1d::prepare(GT_QUERY, args, &a, &device);
    if (status != GT_OK) return status;
    if (!need) return gt_fail(GT_ERROR_NULL, "need is NULL");
    gt_workspace sizes = {0, 0, 0, 0, 0};
    a.workspace = nullptr;
    sizes.backward = gt::conv1d::plan_backward(a, device).bytes;
    *need = sizes;
    return GT_OK;
}

GT_API gt_status gt_conv1d_path(const gt_conv1d_args* args, char* text, size_t bytes) {
    const gt::PathPasses<gt_conv1d_args> passes = {{gt_conv1d_forward, gt_conv1d_backward, gt_conv1d_step}, nullptr};
    return gt::path_over_time(gt_op_conv1d(), passes, args, text, bytes);
}

} /* extern "C" */

#else

/* ---- stubs: this file was compiled without nvcc ---------------------------------------------- */

#include "gt/base/stubs.h"

#ifdef __cplusplus
extern "C" {
#endif

GT_STUBS(conv1d)
GT_STUB(conv1d, step, GT_STEP)

#ifdef __cplusplus
}
#endif

#endif /* kernels or stubs */

#include "gt_kernels.h" /* the implementation of the other operators, if macros ask for it here */

#endif /* GT_CONV1D_CUH */
