/* gt/fused/add_norm_launch.cuh - add_norm on the current GPU: checks arguments, chooses kernels and launches them. */
#ifndef GT_FUSED_ADD_NORM_LAUNCH_CUH
#define GT_FUSED_ADD_NORM_LAUNCH_CUH

#include "add_norm.cuh"
#include "norm_launch.cuh"

namespace gt {
namespace add_norm {

/* Returns whether 16-byte loads can read a tensor's groups of 8 elements.  data is NULL if there is no such tensor. */
static inline bool has_groups(const void* data, gt_dtype dtype, int64_t M, int64_t stride) {
    const int vector = dtype == GT_F32 ? 4 : 8;
    return !data || ((uintptr_t)data % 16 == 0 && (M == 1 || stride % vector == 0));
}

static inline Params params_of(const gt_add_norm_args& a, gt_pass pass) {
    Params p = {};
    p.M = a.M, p.D = a.D;
    p.dtype = a.dtype, p.sum_dtype = a.sum_dtype;
    p.is_layer = a.norm == GT_NORM_LAYER;
    p.eps = a.eps, p.inverse = 1.0f / (float)a.D;
    p.residual_stride = a.residual_stride, p.sum_stride = a.sum_stride, p.x_stride = a.x_stride;
    p.gamma = a.gamma, p.beta = a.beta;
    if (pass == GT_BACKWARD && a.sum)
        p.sum_in = a.sum;
    else
        p.x = a.x, p.residual = a.residual;
    p.y_stride = a.y_stride;
    if (pass == GT_FORWARD) p.sum = a.sum, p.y = a.y;
    p.dy = a.dy, p.dsum = a.dsum, p.dx = a.dx, p.dresidual = a.dresidual;
    if (pass == GT_BACKWARD) p.dgamma = a.dgamma, p.dbeta = a.dbeta; /* backward() replaces them by partial sums */
    p.dy_stride = a.dy_stride, p.dsum_stride = a.dsum_stride;
    p.dx_stride = a.dx_stride, p.dresidual_stride = a.dresidual_stride;
    return p;
}

/* Number of groups that a thread holds: 1 or 2, or 0 if no kernel can hold the row in registers. */
static inline int groups_of(const Params& p) {
    const gt_dtype x = p.dtype, sum = p.sum_dtype;
    const bool is_aligned = p.D % EIGHT == 0 && p.D <= MOST && has_groups(p.x, x, p.M, p.x_stride) &&
                            has_groups(p.residual, sum, p.M, p.residual_stride) &&
                            has_groups(p.sum_in, sum, p.M, p.sum_stride) && has_groups(p.sum, sum, p.M, p.sum_stride) &&
                            has_groups(p.y, x, p.M, p.y_stride) && has_groups(p.dy, x, p.M, p.dy_stride) &&
                            has_groups(p.dsum, sum, p.M, p.dsum_stride) && has_groups(p.dx, x, p.M, p.dx_stride) &&
                            has_groups(p.dresidual, sum, p.M, p.dresidual_stride) &&
                            has_groups(p.gamma, GT_F32, 1, 0) && has_groups(p.beta, GT_F32, 1, 0);
    if (!is_aligned) return 0;
    return p.D <= MOST / 2 ? 1 : 2;
}

/* Returns whether a kernel with the parameter LEAN serves the call. */
static inline bool is_lean(const Params& p, bool is_backward) {
    const bool is_plain = !p.is_layer && p.dtype != GT_F32 && p.sum_dtype != GT_F32 && groups_of(p) == 1;
    return is_plain && (is_backward ? p.sum_in && !p.dbeta : !p.beta);
}

/* Threads of a block.  slice_sum needs a power of two. */
static inline unsigned threads_for(const Params& p, int groups) {
    unsigned threads = 32;
    while ((int64_t)threads * groups * EIGHT < p.D) threads *= 2;
    return threads;
}

/* Blocks of backward: as many as run at once if a thread has 110 registers, or 64 in a lean kernel.  Each block stores
 * a row of partial sums, so it takes at least 16 rows.  But there are at least 2 blocks a multiprocessor. */
static inline int64_t backward_blocks(const Params& p, const Device& device) {
    const int64_t least = 2 * (int64_t)device.multiprocessors, of_rows = p.M / 16;
    const int64_t threads = is_lean(p, true) ? 1024 : 512;
    const int64_t at_once = p.D <= MOST / 2 ? device.multiprocessors * (threads / (int64_t)threads_for(p, 1)) : 0;
    int64_t blocks = at_once < of_rows ? at_once : of_rows;
    if (blocks < least) blocks = least;
    return p.M < blocks ? p.M : blocks;
}

/* Calls launch(kernel, threads of a block, name of the kernel) for the kernel that serves the call. */
template <class Launch>
static gt_status with_kernel(const Params& p, bool is_backward, const Launch& launch) {
    using Kernel = void (*)(Params);
    const int groups = groups_of(p);
    if (groups) {
        const Kernel kernels[2][2] = {{forward_kernel<1, false>, forward_kernel<2, false>},
                                      {backward_kernel<1, false>, backward_kernel<2, false>}};
        const Kernel lean[2] = {forward_kernel<1, true>, backward_kernel<1, true>};
        return launch(is_lean(p, is_backward) ? lean[is_backward] : kernels[is_backward][groups - 1],
                      threads_for(p, groups), is_backward ? "add_norm backward_kernel" : "add_norm forward_kernel");
    }
    const bool is_tiny = p.D <= norm::TINY;
    const Kernel kernels[2][2] = {{any_forward_kernel<Rows>, any_forward_kernel<TinyRows>},
                                  {any_backward_kernel<Rows>, any_backward_kernel<TinyRows>}};
    return launch(kernels[is_backward][is_tiny], is_tiny ? 32 : (unsigned)norm::BLOCK,
                  is_backward ? "add_norm any_backward_kernel" : "add_norm any_forward_kernel");
}

/* Blocks of forward.  If a thread has one group of 16-bit elements, a grid of one block for each row keeps too few
 * bytes in flight.  Then the grid has only as many blocks as run at once, and each block takes rows in turn.  On an
 * H200 this is faster only if all elements have 16 bits. */
static inline int64_t forward_blocks(const Params& p, unsigned threads, const Device& device) {
    const int64_t at_once = 1024 / threads < 32 ? 1024 / threads : 32; /* at 64 registers a thread */
    const bool is_ahead = groups_of(p) == 1 && p.dtype != GT_F32 && p.sum_dtype != GT_F32;
    const int64_t most = is_ahead ? device.multiprocessors * at_once : INT32_MAX;
    return p.M < most ? p.M : most;
}

static inline gt_status forward(const gt_add_norm_args& a, const Device& device, gt_stream stream) {
    const Params p = params_of(a, GT_FORWARD);
    return with_kernel(p, false, [&](auto kernel, unsigned threads, const char* name) {
        return run(name, kernel, forward_blocks(p, threads, device), threads, (size_t)norm::SUM_SMEM, stream, p);
    });
}

static inline gt_status backward(const gt_add_norm_args& a, const Device& device, gt_stream stream) {
    Params p = params_of(a, GT_BACKWARD);
    const int64_t blocks = backward_blocks(p, device);
    Arena arena(a.workspace);
    RowSums sums;
    p.dgamma = sums.take(arena, a.dgamma, blocks, a.D);
    p.dbeta = sums.take(arena, a.dbeta, blocks, a.D);
    gt_status status = check_workspace(a.workspace, a.workspace_bytes, arena.bytes());
    if (status != GT_OK) return status;
    Chain chain = {stream};
    status = with_kernel(p, true, [&](auto kernel, unsigned threads, const char* name) {
        return run(name, kernel, blocks, threads, (size_t)norm::SUM_SMEM, chain, p);
    });
    return status != GT_OK ? status : reduce_rows(sums, a.accumulate, chain);
}

static inline gt_status answer(const gt_add_norm_args& a, const Device& device, gt_workspace* need) {
    if (!need) return gt_fail(GT_ERROR_NULL, "need is NULL");
    *need = {0, 0, 0, 0, 0};
    Arena arena(nullptr);
    RowSums sums;
    Params p = params_of(a, GT_BACKWARD);
    if (a.reads_sum && !p.sum_in) p.sum_in = reinterpret_cast<const void*>((uintptr_t)256); /* the call will have it */
    const int64_t blocks = backward_blocks(p, device);
    sums.take(arena, a.dgamma, blocks, a.D);
    sums.take(arena, a.dbeta, blocks, a.D);
    need->backward = arena.bytes();
    return GT_OK;
}

} /* namespace add_norm */
} /* namespace gt */

#endif
