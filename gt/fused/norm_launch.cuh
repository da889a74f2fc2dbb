/* gt/fused/norm_launch.cuh - norm_mix and norm_gate on the current GPU: arguments checked, kernels chosen and
 * launched. */
#ifndef GT_FUSED_NORM_LAUNCH_CUH
#define GT_FUSED_NORM_LAUNCH_CUH

#include "../base/reduce.cuh"
#include "norm_gate.cuh"
#include "norm_mix.cuh"
#include "table.h"

namespace gt {
namespace norm {

/* ---- launchers ------------------------------------------------------------------------------- */

static inline Shape shape_for(int64_t M, int64_t D, int64_t H, gt_dtype dtype, gt_pass pass,
                              const Device& device) {
    Shape s = {};
    s.M = M, s.D = D, s.H = H, s.n = D / H;
    s.dtype = dtype;
    s.inverse = 1.0f / (float)s.n;
    s.lanes = 1;
    while (s.lanes < MAX_LANES && s.lanes * ELEMENTS < s.n) s.lanes *= 2;
    if (s.lanes * ELEMENTS < s.n) s.lanes = BLOCK;
    s.chunks = (s.n + s.lanes * ELEMENTS - 1) / (s.lanes * ELEMENTS);
    s.slices = s.rows = 1;
    if (s.lanes <= 32) {
        const int64_t most = BLOCK / s.lanes; /* slices of a block */
        s.slices = (int)(H < most ? H : most);
        s.rows = (int)(most / s.slices);
    }
    s.threads = (s.lanes * s.slices * s.rows + 31) / 32 * 32;
    s.tiles = (H + s.slices - 1) / s.slices;
    /* backward: few groups, for each has a row of partial sums */
    const int64_t threads = (int64_t)device.multiprocessors * (pass == GT_FORWARD ? 2048 : 1024);
    const int64_t blocks = threads / s.threads, groups = (M + s.rows - 1) / s.rows;
    s.groups = blocks / s.tiles < groups ? blocks / s.tiles : groups;
    if (s.groups == 0 && M > 0) s.groups = 1;
    s.smem = pass == GT_BACKWARD ? 4 * ELEMENTS * s.threads : s.lanes > 32 ? SUM_SMEM : 0;
    return s;
}

/* Whether vectors of 16 bytes can move rows of a tensor; NULL: there is none. */
static inline bool is_aligned(const Shape& s, const void* data, int64_t stride) {
    const int vec = s.dtype == GT_F32 ? 4 : 8;
    return !data ||
           (s.n % vec == 0 && (uintptr_t)data % 16 == 0 && (s.M == 1 || stride % vec == 0));
}

/* Calls launch(kind) for the kind of kernel that fits. */
template <class Launch>
static gt_status with_kind(const Shape& s, bool vectors, Launch launch) {
    if (s.n <= TINY) return launch(Kind<Any, 1, double>());
    if (s.chunks > 1) return launch(Kind<Any, 1, float, true>());
    if (s.dtype == GT_BF16) return vectors ? launch(Kind<bf16, 8>()) : launch(Kind<bf16, 1>());
    if (s.dtype == GT_F16) return vectors ? launch(Kind<f16, 8>()) : launch(Kind<f16, 1>());
    return vectors ? launch(Kind<float, 4>()) : launch(Kind<float, 1>());
}

static inline gt_status launch_mix_forward(const gt_norm_mix_args& a, const Device& device,
                                           gt_stream stream) {
    MixForwardParams p = {};
    p.shape = shape_for(a.M, a.D, a.H, a.dtype, GT_FORWARD, device);
    p.a = a.a, p.b = a.b, p.residual = a.residual, p.y = a.y;
    p.a_stride = a.a_stride, p.b_stride = a.b_stride;
    p.residual_stride = a.residual_stride, p.y_stride = a.y_stride;
    p.gain_a = a.gain_a, p.gain_b = a.gain_b;
    p.eps = a.eps;
    const Shape& s = p.shape;
    const bool vectors = is_aligned(s, a.a, a.a_stride) && is_aligned(s, a.b, a.b_stride) &&
                         is_aligned(s, a.residual, a.residual_stride) &&
                         is_aligned(s, a.y, a.y_stride);
    return with_kind(s, vectors, [&](auto kind) {
        return run("norm_mix forward_kernel", mix_forward_kernel<decltype(kind)>,
                   s.tiles * s.groups, (unsigned)s.threads, (size_t)s.smem, stream, p);
    });
}

/* Partial sums of two parameter gradients, in backward's workspace; NULL if not wanted. */
struct Partials {
    float *first, *second;
    size_t bytes;
};

static inline Partials partials_in(void* workspace, const Shape& s, bool first, bool second) {
    Partials partials = {};
    Arena arena(workspace);
    if (first) partials.first = arena.take<float>(s.groups * s.D);
    if (second) partials.second = arena.take<float>(s.groups * s.D);
    partials.bytes = arena.bytes();
    return partials;
}

static inline gt_status reduce_partials(const Partials& partials, const Shape& s, float* first,
                                        float* second, int accumulate, gt_stream stream) {
    gt_status status = GT_OK;
    if (first) status = reduce_rows(partials.first, first, s.groups, s.D, accumulate, stream);
    if (status == GT_OK && second)
        status = reduce_rows(partials.second, second, s.groups, s.D, accumulate, stream);
    return status;
}

static inline gt_status launch_mix_backward(const gt_norm_mix_args& a, const Shape& s,
                                            const Partials& partials, gt_stream stream) {
    MixBackwardParams p = {};
    p.shape = s;
    p.a = a.a, p.b = a.b, p.dy = a.dy, p.da = a.da, p.db = a.db;
    p.a_stride = a.a_stride, p.b_stride = a.b_stride, p.dy_stride = a.dy_stride;
    p.da_stride = a.da_stride, p.db_stride = a.db_stride;
    p.gain_a = a.gain_a, p.gain_b = a.gain_b;
    p.dgain_a = partials.first, p.dgain_b = partials.second;
    p.eps = a.eps;
    const bool vectors = is_aligned(s, a.a, a.a_stride) && is_aligned(s, a.b, a.b_stride) &&
                         is_aligned(s, a.dy, a.dy_stride) && is_aligned(s, a.da, a.da_stride) &&
                         is_aligned(s, a.db, a.db_stride);
    const gt_status status = with_kind(s, vectors, [&](auto kind) {
        return run("norm_mix backward_kernel", mix_backward_kernel<decltype(kind)>,
                   s.tiles * s.groups, (unsigned)s.threads, (size_t)s.smem, stream, p);
    });
    if (status != GT_OK) return status;
    return reduce_partials(partials, s, a.dgain_a, a.dgain_b, a.accumulate, stream);
}

static inline GateParams gate_params_of(const gt_norm_gate_args& a, const Shape& s) {
    GateParams p = {};
    p.shape = s;
    p.x = a.x, p.z = a.z;
    p.x_stride = a.x_stride, p.z_stride = a.z_stride;
    p.gamma = a.gamma, p.beta = a.beta;
    p.is_layer = a.norm == GT_NORM_LAYER;
    p.gate_first = a.gate_first;
    p.eps = a.eps;
    return p;
}

static inline gt_status launch_gate_forward(const gt_norm_gate_args& a, const Device& device,
                                            gt_stream stream) {
    const Shape s = shape_for(a.M, a.D, a.H, a.dtype, GT_FORWARD, device);
    const GateForwardParams p = {gate_params_of(a, s), a.y, a.y_stride};
    const bool vectors = is_aligned(s, a.x, a.x_stride) && is_aligned(s, a.z, a.z_stride) &&
                         is_aligned(s, a.y, a.y_stride);
    return with_kind(s, vectors, [&](auto kind) {
        return run("norm_gate forward_kernel", gate_forward_kernel<decltype(kind)>,
                   s.tiles * s.groups, (unsigned)s.threads, (size_t)s.smem, stream, p);
    });
}

static inline gt_status launch_gate_backward(const gt_norm_gate_args& a, const Shape& s,
                                             const Partials& partials, gt_stream stream) {
    GateBackwardParams p = {};
    p.in = gate_params_of(a, s);
    p.dy = a.dy, p.dx = a.dx, p.dz = a.dz;
    p.dy_stride = a.dy_stride, p.dx_stride = a.dx_stride, p.dz_stride = a.dz_stride;
    p.dgamma = partials.first, p.dbeta = partials.second;
    const bool vectors = is_aligned(s, a.x, a.x_stride) && is_aligned(s, a.z, a.z_stride) &&
                         is_aligned(s, a.dy, a.dy_stride) && is_aligned(s, a.dx, a.dx_stride) &&
                         is_aligned(s, a.dz, a.dz_stride);
    const gt_status status = with_kind(s, vectors, [&](auto kind) {
        return run("norm_gate backward_kernel", gate_backward_kernel<decltype(kind)>,
                   s.tiles * s.groups, (unsigned)s.threads, (size_t)s.smem, stream, p);
    });
    if (status != GT_OK) return status;
    return reduce_partials(partials, s, a.dgamma, a.dbeta, a.accumulate, stream);
}

/* ---- dispatch and checks --------------------------------------------------------------------- */

template <class Args>
static gt_status prepare(const gt_op* op, gt_pass pass, const Args* args, Args* a, Device* device) {
    gt_dims dims;
    const gt_status status = gt_prepare(op, pass, GT_DEVICE, args, a, &dims);
    return status != GT_OK ? status : current_device(device);
}

static inline gt_status mix_backward(const gt_norm_mix_args& a, const Device& device,
                                     gt_stream stream) {
    const Shape s = shape_for(a.M, a.D, a.H, a.dtype, GT_BACKWARD, device);
    const Partials partials = partials_in(a.workspace, s, a.dgain_a, a.dgain_b);
    const gt_status status = check_workspace(a.workspace, a.workspace_bytes, partials.bytes);
    return status != GT_OK ? status : launch_mix_backward(a, s, partials, stream);
}

static inline gt_status gate_backward(const gt_norm_gate_args& a, const Device& device,
                                      gt_stream stream) {
    const Shape s = shape_for(a.M, a.D, a.H, a.dtype, GT_BACKWARD, device);
    const Partials partials = partials_in(a.workspace, s, a.dgamma, a.dbeta);
    const gt_status status = check_workspace(a.workspace, a.workspace_bytes, partials.bytes);
    return status != GT_OK ? status : launch_gate_backward(a, s, partials, stream);
}

/* What gt_OP_workspace answers. */
static inline gt_status answer(gt_workspace* need, const Shape& s, bool first, bool second) {
    if (!need) return gt_fail(GT_ERROR_NULL, "need is NULL");
    gt_workspace sizes = {0, 0, 0, 0};
    sizes.backward = partials_in(nullptr, s, first, second).bytes;
    *need = sizes;
    return GT_OK;
}

} /* namespace norm */
} /* namespace gt */

#endif
