/* gt/fused/norm_launch.cuh - norm_mix and norm_gate on the current GPU: checks arguments, chooses kernels and launches
 * them. */
#ifndef GT_FUSED_NORM_LAUNCH_CUH
#define GT_FUSED_NORM_LAUNCH_CUH

#include "../base/reduce.cuh"
#include "norm_gate.cuh"
#include "norm_mix.cuh"
#include "table.h"

namespace gt {
namespace norm {

/* ---- launchers ------------------------------------------------------------------------------- */

/* Chooses how rows are cut.  vectors: 16-byte accesses can move the rows of all tensors. */
static inline Shape shape_for(int64_t M, int64_t D, int64_t H, gt_dtype dtype, gt_pass pass, bool vectors,
                              const Device& device) {
    Shape s = {};
    s.M = M, s.D = D, s.H = H, s.n = D / H;
    s.dtype = dtype;
    s.vectors = vectors;
    s.inverse = 1.0f / (float)s.n;
    const bool is_narrow = vectors && s.n > TINY && s.n <= 32 * (dtype == GT_F32 ? ELEMENTS : MANY);
    s.elements = is_narrow && s.n > 32 * ELEMENTS ? MANY : ELEMENTS;
    s.lanes = 1;
    while (s.lanes < MAX_LANES && s.lanes * s.elements < s.n) s.lanes *= 2;
    if (s.lanes * s.elements < s.n) s.lanes = BLOCK;
    s.rounds = (s.n + s.lanes * s.elements - 1) / (s.lanes * s.elements);
    s.slices = s.rows = 1;
    if (s.lanes <= 32) {
        const int64_t most = (s.elements == MANY ? BLOCK / 2 : BLOCK) / s.lanes; /* slices of a block */
        s.slices = (int)(H < most ? H : most);
        s.rows = (int)(most / s.slices);
    }
    s.threads = (s.lanes * s.slices * s.rows + 31) / 32 * 32;
    s.tiles = (H + s.slices - 1) / s.slices;
    /* For narrow slices, `blocks` is how many blocks a multiprocessor can hold with the register bounds of norm_mix.
     * With 16 elements a thread, only two blocks of norm_gate's backward fit in forms other than RMS_GATE_FIRST, so
     * every third block waits.  Backward has fewer groups, since each group stores a row of partial sums. */
    using Narrow = Kind<bf16, 8, float, false, true>;
    using Longer = Kind<bf16, 8, float, false, true, MANY>;
    int64_t blocks = (pass == GT_FORWARD ? 2048 : 1024) / s.threads;
    if (is_narrow && pass == GT_FORWARD)
        blocks = s.elements == MANY ? Longer::FORWARD_BLOCKS : Narrow::FORWARD_BLOCKS;
    else if (is_narrow)
        blocks = s.elements == MANY ? Longer::BACKWARD_BLOCKS : Narrow::BACKWARD_BLOCKS;
    blocks *= device.multiprocessors;
    const int64_t groups = (M + s.rows - 1) / s.rows;
    s.groups = blocks / s.tiles < groups ? blocks / s.tiles : groups;
    if (s.groups == 0 && M > 0) s.groups = 1;
    s.smem = pass == GT_BACKWARD ? 2 * 4 * s.elements * s.threads : s.lanes > 32 ? SUM_SMEM : 0;
    return s;
}

/* A tensor of a call; data is NULL if the call lacks the tensor.  stride: elements from row to row. */
struct View {
    const void* data;
    int64_t stride;
};

template <int COUNT>
static bool are_aligned(int64_t M, int64_t n, gt_dtype dtype, const View (&views)[COUNT]) {
    const int vec = dtype == GT_F32 ? 4 : 8;
    for (const View& v : views)
        if (v.data && (n % vec != 0 || (uintptr_t)v.data % 16 != 0 || (M != 1 && v.stride % vec != 0))) return false;
    return true;
}

/* Calls launch(kind) for the kind of kernel that suits the shape. */
template <class T, Form FORM, class Launch>
static gt_status with_kind_of(const Shape& s, Launch launch) {
    constexpr int VEC = 16 / (int)sizeof(T);
    if (!s.vectors) return launch(Kind<T, 1>());
    if (s.elements == ELEMENTS && s.n <= 32 * ELEMENTS)
        return launch(Kind<T, VEC, float, false, true, ELEMENTS, FORM>());
    if constexpr (VEC == 8) /* fp32 would need too many registers */
        if (s.elements == MANY) return launch(Kind<T, VEC, float, false, true, MANY, FORM>());
    return launch(Kind<T, VEC>());
}

template <Form FORM, class Launch>
static gt_status with_kind(const Shape& s, Launch launch) {
    if (s.n <= TINY) return launch(Kind<Any, 1, double>());
    if (s.rounds > 1) return launch(Kind<Any, 1, float, true>());
    if (s.dtype == GT_BF16) return with_kind_of<bf16, FORM>(s, launch);
    if (s.dtype == GT_F16) return with_kind_of<f16, FORM>(s, launch);
    return with_kind_of<float, FORM>(s, launch);
}

/* Calls launch(kind) for norm_gate.  has_beta: the call has beta, or wants the gradient of beta. */
template <class Launch>
static gt_status with_gate_kind(const GateParams& p, bool has_beta, Launch launch) {
    if (p.z && !p.is_layer && p.gate_first && !has_beta) return with_kind<RMS_GATE_FIRST>(p.shape, launch);
    if (p.z && p.is_layer && !p.gate_first) return with_kind<LAYER_GATE_LAST>(p.shape, launch);
    return with_kind<ANY_FORM>(p.shape, launch);
}

static inline gt_status launch_mix_forward(const gt_norm_mix_args& a, const Device& device, gt_stream stream) {
    MixForwardParams p = {};
    const View views[] = {{a.a, a.a_stride}, {a.b, a.b_stride}, {a.residual, a.residual_stride}, {a.y, a.y_stride}};
    const bool vectors = are_aligned(a.M, a.D / a.H, a.dtype, views);
    p.shape = shape_for(a.M, a.D, a.H, a.dtype, GT_FORWARD, vectors, device);
    p.a = a.a, p.b = a.b, p.residual = a.residual, p.y = a.y;
    p.a_stride = a.a_stride, p.b_stride = a.b_stride;
    p.residual_stride = a.residual_stride, p.y_stride = a.y_stride;
    p.gain_a = a.gain_a, p.gain_b = a.gain_b;
    p.eps = a.eps;
    const Shape& s = p.shape;
    return with_kind<ANY_FORM>(s, [&](auto kind) {
        return run("norm_mix forward_kernel", mix_forward_kernel<decltype(kind)>, s.tiles * s.groups,
                   (unsigned)s.threads, (size_t)s.smem, stream, p);
    });
}

/* Partial sums of two parameter gradients, in backward's workspace.  NULL: the gradient is not computed. */
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

/* Returns the bytes of backward's workspace, which suffice for any alignment.  So a query may have other pointers than
 * the call. */
static inline size_t partial_bytes(int64_t M, int64_t D, int64_t H, gt_dtype dtype, bool first, bool second,
                                   const Device& device) {
    size_t most = 0;
    for (int vectors = 0; vectors < 2; vectors++) {
        const Shape s = shape_for(M, D, H, dtype, GT_BACKWARD, vectors, device);
        const size_t bytes = partials_in(nullptr, s, first, second).bytes;
        if (bytes > most) most = bytes;
    }
    return most;
}

static inline gt_status reduce_partials(const Partials& partials, const Shape& s, float* first, float* second,
                                        int accumulate, Chain& chain) {
    RowSums sums;
    if (first) sums.add(partials.first, first, s.groups, s.D);
    if (second) sums.add(partials.second, second, s.groups, s.D);
    return reduce_rows(sums, accumulate, chain);
}

static inline gt_status launch_mix_backward(const gt_norm_mix_args& a, const Shape& s, const Partials& partials,
                                            gt_stream stream) {
    MixBackwardParams p = {};
    p.shape = s;
    p.a = a.a, p.b = a.b, p.dy = a.dy, p.da = a.da, p.db = a.db;
    p.a_stride = a.a_stride, p.b_stride = a.b_stride, p.dy_stride = a.dy_stride;
    p.da_stride = a.da_stride, p.db_stride = a.db_stride;
    p.gain_a = a.gain_a, p.gain_b = a.gain_b;
    p.dgain_a = partials.first, p.dgain_b = partials.second;
    p.eps = a.eps;
    Chain chain = {stream};
    const gt_status status = with_kind<ANY_FORM>(s, [&](auto kind) {
        return run("norm_mix backward_kernel", mix_backward_kernel<decltype(kind)>, s.tiles * s.groups,
                   (unsigned)s.threads, (size_t)s.smem, chain, p);
    });
    if (status != GT_OK) return status;
    return reduce_partials(partials, s, a.dgain_a, a.dgain_b, a.accumulate, chain);
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

static inline gt_status launch_gate_forward(const gt_norm_gate_args& a, const Device& device, gt_stream stream) {
    const View views[] = {{a.x, a.x_stride}, {a.z, a.z_stride}, {a.y, a.y_stride}};
    const bool vectors = are_aligned(a.M, a.D / a.H, a.dtype, views);
    const Shape s = shape_for(a.M, a.D, a.H, a.dtype, GT_FORWARD, vectors, device);
    const GateForwardParams p = {gate_params_of(a, s), a.y, a.y_stride};
    return with_gate_kind(p.in, a.beta, [&](auto kind) {
        return run("norm_gate forward_kernel", gate_forward_kernel<decltype(kind)>, s.tiles * s.groups,
                   (unsigned)s.threads, (size_t)s.smem, stream, p);
    });
}

static inline gt_status launch_gate_backward(const gt_norm_gate_args& a, const Shape& s, const Partials& partials,
                                             gt_stream stream) {
    GateBackwardParams p = {};
    p.in = gate_params_of(a, s);
    p.dy = a.dy, p.dx = a.dx, p.dz = a.dz;
    p.dy_stride = a.dy_stride, p.dx_stride = a.dx_stride, p.dz_stride = a.dz_stride;
    p.dgamma = partials.first, p.dbeta = partials.second;
    Chain chain = {stream};
    const gt_status status = with_gate_kind(p.in, a.beta || a.dbeta, [&](auto kind) {
        return run("norm_gate backward_kernel", gate_backward_kernel<decltype(kind)>, s.tiles * s.groups,
                   (unsigned)s.threads, (size_t)s.smem, chain, p);
    });
    if (status != GT_OK) return status;
    return reduce_partials(partials, s, a.dgamma, a.dbeta, a.accumulate, chain);
}

/* ---- dispatch and checks --------------------------------------------------------------------- */

template <class Args>
static gt_status prepare(const gt_op* op, gt_pass pass, const Args* args, Args* a, Device* device) {
    gt_dims dims;
    const gt_status status = gt_prepare(op, pass, GT_DEVICE, args, a, &dims);
    return status != GT_OK ? status : current_device(device);
}

static inline gt_status mix_backward(const gt_norm_mix_args& a, const Device& device, gt_stream stream) {
    const View views[] = {
        {a.a, a.a_stride}, {a.b, a.b_stride}, {a.dy, a.dy_stride}, {a.da, a.da_stride}, {a.db, a.db_stride}};
    const bool vectors = are_aligned(a.M, a.D / a.H, a.dtype, views);
    const Shape s = shape_for(a.M, a.D, a.H, a.dtype, GT_BACKWARD, vectors, device);
    const Partials partials = partials_in(a.workspace, s, a.dgain_a, a.dgain_b);
    const size_t bytes = partial_bytes(a.M, a.D, a.H, a.dtype, a.dgain_a, a.dgain_b, device);
    const gt_status status = check_workspace(a.workspace, a.workspace_bytes, bytes);
    return status != GT_OK ? status : launch_mix_backward(a, s, partials, stream);
}

static inline gt_status gate_backward(const gt_norm_gate_args& a, const Device& device, gt_stream stream) {
    const View views[] = {
        {a.x, a.x_stride}, {a.z, a.z_stride}, {a.dy, a.dy_stride}, {a.dx, a.dx_stride}, {a.dz, a.dz_stride}};
    const bool vectors = are_aligned(a.M, a.D / a.H, a.dtype, views);
    const Shape s = shape_for(a.M, a.D, a.H, a.dtype, GT_BACKWARD, vectors, device);
    const Partials partials = partials_in(a.workspace, s, a.dgamma, a.dbeta);
    const size_t bytes = partial_bytes(a.M, a.D, a.H, a.dtype, a.dgamma, a.dbeta, device);
    const gt_status status = check_workspace(a.workspace, a.workspace_bytes, bytes);
    return status != GT_OK ? status : launch_gate_backward(a, s, partials, stream);
}

static inline gt_status answer(gt_workspace* need, int64_t M, int64_t D, int64_t H, gt_dtype dtype, bool first,
                               bool second, const Device& device) {
    if (!need) return gt_fail(GT_ERROR_NULL, "need is NULL");
    *need = {0, 0, 0, 0, 0};
    need->backward = partial_bytes(M, D, H, dtype, first, second, device);
    return GT_OK;
}

} /* namespace norm */
} /* namespace gt */

#endif
