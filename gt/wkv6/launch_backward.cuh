/* gt/wkv6/launch_backward.cuh - backward's plan, its workspace and its launches. */
#ifndef GT_WKV6_LAUNCH_BACKWARD_CUH
#define GT_WKV6_LAUNCH_BACKWARD_CUH

#include "../base/reduce.cuh"
#include "backward.cuh"
#include "launch_forward.cuh"

namespace gt {
namespace wkv6 {

/* ---- the plan ----------------------------------------------------------------------------------------------- */

/* The pieces of backward's workspace. */
struct BackwardPlan {
    bool tensor; /* on tensor cores; else by the kernels for any size */
    ChunkParams chunk;
    void* S_checkpoints;
    void* G_checkpoints; /* [B,H,places,N,V] */
    bool last_first;     /* see BackwardParams */
    bool G_in_outputs;   /* see TensorParams::G_rows; G_checkpoints is [sequences,H,N,N] then, for last chunks */
    float *rowsums, *G_undo; /* bf16 [B,H,places,3,G_parts(),N]; f16 without the 3 */
    bool shared_gradient; /* dstate_in is a sum over the sequences: of dstate_sum [sequences,H,N,V] */
    float* dstate_sum;
    Segments cut;
    float *segment_states, *segment_decays;
    int64_t blocks;
    size_t bytes;
};

static inline int G_parts(const gt_wkv6_args& a) {
    return a.N == 32   ? StatesTraits<bf16, bf16, 32>::PARTS
           : a.N == 64 ? StatesTraits<bf16, bf16, 64>::PARTS
                       : StatesTraits<bf16, bf16, 128>::PARTS;
}

/* Whether the gradients that are wanted can hold G. */
static inline bool outputs_hold_G(const gt_wkv6_args& a, const Device& device) {
    const int size = size_of(a.dtype);
    if (a.N == 128 && (a.dtype == GT_F32 || slice_channels(a.dtype, device) < 64)) return false; /* G_IN_OUTPUTS */
    return a.dv && aligned(a.dv, a.dv_stride, size, 16) &&
           (a.N < 128 || (a.dk && aligned(a.dk, a.dk_stride, size, 16)));
}

static inline BackwardPlan plan_with(const gt_wkv6_args& a, const Device& device, bool G_in_outputs) {
    BackwardPlan plan = {};
    ChunkParams& c = plan.chunk;
    Arena arena(a.workspace);
    c.in = problem_of(a);
    c.rows = (int)(a.N + 3) / 4 * 4;
    c.columns = (int)(a.V + 3) / 4 * 4;
    int limit = 64;
    while (4 * sweep_layout(c.rows, limit, limit + 4).end > SHARED_BYTES) limit /= 2;
    if (c.columns > limit) c.columns = limit;
    c.pitch = c.columns + 4;
    c.tiles = (int)(a.V + c.columns - 1) / c.columns;
    c.places = places_of(a);
    c.scratch_size = LEAVES * c.rows * c.columns + CHECKPOINT * (2 * a.N + a.V) + LEAVES * a.N;
    c.scratch_size = (c.scratch_size + 63) / 64 * 64;
    plan.blocks = a.B * a.H * c.places;
    if (plan.blocks > 2 * device.multiprocessors) plan.blocks = 2 * device.multiprocessors;
    c.S_dtype = state_dtype(a.dtype, a.N, a.V);
    plan.tensor = backward_fits(a, device);
    c.G_dtype = plan.tensor ? a.dtype : GT_F32; /* GradientOf */
    if (!a.saved) plan.S_checkpoints = take_checkpoints(arena, a, c.S_dtype, a.B * a.H * c.places, rest_at(a));
    plan.last_first = plan.tensor && c.S_dtype == GT_BF16 && a.saved && !a.dstate_out && !a.seq_capacity &&
                      c.places > 1 && cut_time(a, device, a.T).count == 1;
    plan.G_in_outputs = G_in_outputs;
    if (!G_in_outputs) {
        plan.G_checkpoints = take_checkpoints(arena, a, c.G_dtype, a.B * a.H * c.places);
    } else if (plan.last_first || a.seq_capacity || a.T % CHECKPOINT) {
        plan.G_checkpoints = take_checkpoints(arena, a, c.G_dtype, sequences_of(a) * a.H);
    }
    if (!plan.tensor) c.scratch = arena.take<float>(plan.blocks * c.scratch_size);
    if (plan.tensor && a.dtype == GT_BF16)
        plan.rowsums = arena.take<float>(a.B * a.H * c.places * SWEEP_SUMS * G_parts(a) * a.N);
    if (plan.tensor && a.dtype == GT_F16)
        plan.G_undo = arena.take<float>(a.B * a.H * c.places * G_parts(a) * a.N);
    if (a.du) c.du = arena.take<float>(a.B * c.places * a.H * a.N);
    plan.shared_gradient = a.dstate_in && a.state_in_shared;
    if (plan.shared_gradient) plan.dstate_sum = arena.take<float>(sequences_of(a) * a.H * a.N * a.V);
    if (plan.tensor) {
        plan.cut = cut_time(a, device, a.T);
        take_segments(arena, a, plan.cut, &plan.segment_states, &plan.segment_decays);
    }
    plan.bytes = arena.bytes();
    c.dr = a.dr, c.dk = a.dk, c.dw = a.dw, c.dv = a.dv;
    c.dr_at = a.dr_stride, c.dk_at = a.dk_stride, c.dw_at = a.dw_stride, c.dv_at = a.dv_stride;
    return plan;
}

/* G lies in gradients unless sequences are so short that it takes more workspace there. */
static inline BackwardPlan plan_backward(const gt_wkv6_args& a, const Device& device) {
    const BackwardPlan plan = plan_with(a, device, false);
    if (!plan.tensor || !outputs_hold_G(a, device)) return plan;
    const BackwardPlan in_outputs = plan_with(a, device, true);
    return in_outputs.bytes <= plan.bytes ? in_outputs : plan;
}

/* ---- launches ----------------------------------------------------------------------------------------------- */

/* S before every chunk: what forward saved, or made again. */
static inline gt_status make_S_checkpoints(const gt_wkv6_args& a, BackwardPlan& plan, Chain& stream) {
    size_t bytes;
    plan.chunk.S_checkpoints = checkpoints_in(a.saved, a, &bytes);
    if (a.saved) return GT_OK;
    if (plan.tensor) {
        TensorParams t = {};
        t.in = problem_of(a);
        t.state_in = a.state_in;
        t.state_in_shared = a.state_in_shared;
        t.checkpoints = plan.S_checkpoints;
        t.rest = rest_at(a);
        t.places = (int)places_of(a);
        t.segments = plan.cut;
        t.segment_states = plan.segment_states, t.segment_decays = plan.segment_decays;
        plan.chunk.S_checkpoints = plan.S_checkpoints;
        return launch_tensor_any<false>(t, stream);
    }
    ForwardParams p = {};
    p.in = problem_of(a);
    p.state_in = a.state_in;
    p.state_in_shared = a.state_in_shared;
    p.checkpoints = plan.S_checkpoints;
    p.rest = rest_at(a);
    p.places = places_of(a);
    p.checkpoint_dtype = plan.chunk.S_dtype;
    plan.chunk.S_checkpoints = plan.S_checkpoints;
    return launch_tokens<false>(p, stream);
}

/* G after every chunk, and dstate_in. */
static inline gt_status make_G_checkpoints(const gt_wkv6_args& a, BackwardPlan& plan, const Device& device,
                                           Chain& stream) {
    plan.chunk.G_checkpoints = plan.G_checkpoints;
    if (plan.tensor) {
        TensorParams t = {};
        t.in = problem_of(a);
        t.in.k = a.r;
        t.in.k_at = a.r_stride;
        t.in.v = a.dy;
        t.in.v_at = a.dy_stride;
        t.state_in = a.dstate_out;
        t.state_out = plan.shared_gradient ? plan.dstate_sum : a.dstate_in;
        t.checkpoints = plan.G_checkpoints;
        if (plan.G_in_outputs) {
            t.G_rows[0] = {a.dv, a.dv_stride};
            if (a.N == 128) t.G_rows[0] = {a.dk, a.dk_stride}, t.G_rows[1] = {a.dv, a.dv_stride};
        }
        t.rest = rest_at(a);
        if (a.dw && plan.rowsums) t.S = plan.chunk.S_checkpoints, t.rowsums = plan.rowsums;
        t.S_copies = a.N < 128 || slice_channels(a.dtype, device) >= 64 ? 2 : 1;
        t.S_starts_zero = !a.state_in;
        t.last_apart = plan.last_first;
        t.G_undo = plan.G_undo;
        t.places = (int)places_of(a);
        t.segments = plan.cut;
        t.segment_states = plan.segment_states, t.segment_decays = plan.segment_decays;
        return launch_tensor_any<true>(t, stream);
    }
    ForwardParams p = {};
    p.in = problem_of(a);
    p.in.k = a.r;
    p.in.k_at = a.r_stride;
    p.in.v = a.dy;
    p.in.v_at = a.dy_stride;
    p.state_in = a.dstate_out;
    p.state_out = plan.shared_gradient ? plan.dstate_sum : a.dstate_in;
    p.checkpoints = plan.G_checkpoints;
    p.places = places_of(a);
    p.checkpoint_dtype = plan.chunk.G_dtype;
    return launch_tokens<true>(p, stream);
}

template <class T, class W, int N, int CHANNELS = N>
static gt_status launch_chunks_with(const BackwardParams& p, Chain& stream) {
    using C = BackwardTraits<T, W, N, CHANNELS>;
    return run("wkv6 backward_tensor_kernel", backward_tensor_kernel<C>, (int64_t)p.places * p.heads.divisor,
               C::THREADS, C::SMEM, stream, p);
}

/* N = 128, in slices of channels. */
template <class T, class W>
static gt_status launch_chunks_in_slices(const gt_wkv6_args& a, const BackwardParams& p, const Device& device,
                                         Chain& stream) {
    const int channels = slice_channels(a.dtype, device);
    if constexpr (std::is_same<T, bf16>::value) {
        if (channels == 128) return launch_chunks_with<T, W, 128, 128>(p, stream);
    }
    if constexpr (!std::is_same<T, float>::value) {
        if (channels == 32) return launch_chunks_with<T, W, 128, 32>(p, stream);
    }
    return launch_chunks_with<T, W, 128, 64>(p, stream);
}

template <class T, class W>
static gt_status launch_chunks_of(const gt_wkv6_args& a, [[maybe_unused]] const BackwardParams& p,
                                  [[maybe_unused]] const Device& device, [[maybe_unused]] Chain& stream) {
    if constexpr (is_built_for<T, 32>())
        if (a.N == 32) return launch_chunks_with<T, W, 32>(p, stream);
    if constexpr (is_built_for<T, 64>())
        if (a.N == 64) return launch_chunks_with<T, W, 64>(p, stream);
    if constexpr (is_built_for<T, 128>())
        if (a.N == 128) return launch_chunks_in_slices<T, W>(a, p, device, stream);
    return left_out(problem_of(a));
}

static inline gt_status launch_chunks(const gt_wkv6_args& a, const BackwardPlan& plan, const Device& device,
                                      Chain& stream) {
    const ChunkParams& c = plan.chunk;
    const int size = size_of(a.dtype), w_size = size_of(a.w_dtype);
    if (a.B == 0 || c.places == 0) return GT_OK;
    BackwardParams p = {};
    const auto set = [&](int i, const void* data, gt_stride at_, int element) {
        p.tensors[i] = {const_cast<void*>(data), at_, element};
    };
    set(OF_R, a.r, a.r_stride, size);
    set(OF_K, a.k, a.k_stride, size);
    set(OF_W, a.w, a.w_stride, w_size);
    set(OF_V, a.v, a.v_stride, size);
    set(OF_DY, a.dy, a.dy_stride, size);
    set(OF_DR, a.dr, a.dr_stride, size);
    set(OF_DK, a.dk, a.dk_stride, size);
    set(OF_DW, a.dw, a.dw_stride, w_size);
    set(OF_DV, a.dv, a.dv_stride, size);
    p.heads = divide_by((int)(a.B * a.H)), p.H = divide_by((int)a.H), p.T = (int)a.T;
    p.packing = packing_of(a);
    p.raw = a.decay == GT_DECAY_RAW;
    p.scale = a.scale, p.log2_scale = log2f(a.scale);
    p.last_first = plan.last_first;
    p.u = a.u;
    p.S_checkpoints = c.S_checkpoints, p.G_checkpoints = c.G_checkpoints;
    p.G_in_outputs = plan.G_in_outputs;
    p.rowsums = plan.rowsums;
    p.G_undo = plan.G_undo;
    p.du = c.du;
    p.places = (int)c.places;
    if (a.dtype == GT_F32) return launch_chunks_of<float, float>(a, p, device, stream);
    if (a.dtype == GT_BF16)
        return a.w_dtype == GT_F32 ? launch_chunks_of<bf16, float>(a, p, device, stream)
                                   : launch_chunks_of<bf16, bf16>(a, p, device, stream);
    return a.w_dtype == GT_F32 ? launch_chunks_of<f16, float>(a, p, device, stream)
                               : launch_chunks_of<f16, f16>(a, p, device, stream);
}

/* Chunks of any size. */
static inline gt_status launch_any_chunks(const gt_wkv6_args& a, const BackwardPlan& plan, Chain& stream) {
    const ChunkParams& c = plan.chunk;
    const int part1 = 4 * sweep_layout(c.rows, c.columns, c.pitch).end;
    const bool wide = leaf_smem((int)a.N, (int)a.V, false) > SHARED_BYTES;
    const int part2 = leaf_smem((int)a.N, (int)a.V, wide);
    return run("wkv6 backward_chunk_kernel", wide ? backward_chunk_kernel<true> : backward_chunk_kernel<false>,
               plan.blocks, SWEEP_THREADS, part1 > part2 ? part1 : part2, stream, c);
}

static inline gt_status launch_backward(const gt_wkv6_args& a, BackwardPlan& plan,
                                        const Device& device, Chain& stream) {
    const ChunkParams& c = plan.chunk;
    ClearParams rest = {};
    gt_status status;
    add_output(rest, a.dr, a.dr_stride, a.dtype, a.N);
    add_output(rest, a.dk, a.dk_stride, a.dtype, a.N);
    add_output(rest, a.dw, a.dw_stride, a.w_dtype, a.N);
    add_output(rest, a.dv, a.dv_stride, a.dtype, a.V);
    rest.states = plan.dstate_sum, rest.du = c.du;
    if ((status = clear_rest(a, rest, device, stream)) != GT_OK ||
        (status = make_S_checkpoints(a, plan, stream)) != GT_OK ||
        (status = make_G_checkpoints(a, plan, device, stream)) != GT_OK ||
        (status = plan.tensor ? launch_chunks(a, plan, device, stream)
                              : launch_any_chunks(a, plan, stream)) != GT_OK)
        return status;
    if (a.du && (status = reduce_rows(c.du, a.du, a.B * c.places, a.H * a.N, a.accumulate,
                                      stream)) != GT_OK)
        return status;
    if (plan.shared_gradient)
        return reduce_rows(plan.dstate_sum, a.dstate_in, sequences_of(a), a.H * a.N * a.V, a.accumulate,
                           stream);
    return GT_OK;
}

} /* namespace wkv6 */
} /* namespace gt */

#endif
