/* gt/wkv4/launch.cuh - wkv4 on the current GPU: plans and launches.  gt/recurrence/driver.cuh has the order of the
 * launches and implements the C functions. */
#ifndef GT_WKV4_LAUNCH_CUH
#define GT_WKV4_LAUNCH_CUH

#include "../recurrence/driver.cuh"
#include "backward.cuh"
#include "forward.cuh"
#include "step.cuh"
#include "table.h"

namespace gt {
namespace wkv4 {

/* ---- the arguments of a call ------------------------------------------------------------------------------------- */

/* Calls launch(T()) for the type of a call's activations. */
template <class Launch>
static inline gt_status dispatch(gt_dtype dtype, const Launch& launch) {
    return dtype == GT_F32    ? with_built<float>(launch)
           : dtype == GT_BF16 ? with_built<bf16>(launch)
                              : with_built<f16>(launch);
}

static inline int64_t tiles_of(const gt_wkv4_args& a) { return (a.D + CHANNELS - 1) / CHANNELS; }

/* WARPS: warps of a pass that a multiprocessor should have.  LEAST: the fewest tokens of a segment; with fewer,
 * segments gain less than the second read of the inputs costs. */
constexpr int FORWARD_WARPS = 6, FORWARD_LEAST = 256, BACKWARD_WARPS = 6, BACKWARD_LEAST = 256;

/* Returns the number of segments that gives `warps` warps to every multiprocessor.  Each segment has at least `least`
 * tokens. */
static inline int64_t segments_for(const gt_wkv4_args& a, int warps, int least, const Device& device) {
    return choose_segments(sequences_of(a), a.segments, tiles_of(a), warps * (int64_t)device.multiprocessors, least,
                           CHECKPOINT);
}

/* Returns whether each row of a tensor starts at a multiple of 16 bytes and its channels are adjacent. */
static inline bool has_vectors(const void* data, const gt_stride& s, gt_dtype dtype) {
    const int64_t each = dtype == GT_F32 ? 4 : 8;
    return ((uintptr_t)data & 15) == 0 && s.h == 1 && s.b % each == 0 && s.t % each == 0;
}

static inline Problem problem_of(const gt_wkv4_args& a, bool has_dy) {
    Problem in = {};
    in.sequences = sequences_of(a);
    in.D = a.D, in.tiles = tiles_of(a);
    in.dtype = a.dtype, in.decay = a.decay;
    in.k = a.k, in.v = a.v, in.dy = a.dy;
    in.w = a.w, in.u = a.u;
    in.k_stride = a.k_stride, in.v_stride = a.v_stride, in.dy_stride = a.dy_stride;
    in.has_vectors = has_vectors(a.k, a.k_stride, a.dtype) && has_vectors(a.v, a.v_stride, a.dtype) &&
                     (!has_dy || has_vectors(a.dy, a.dy_stride, a.dtype));
    return in;
}

/* Cuts the sequences into segments.  rows: how many values a segment stores for each channel. */
static inline void cut_problem(Problem& in, Arena& arena, int64_t segments, int rows) {
    in.segments = cut_segments(arena, in.sequences, segments, CHECKPOINT, rows * in.D, 0);
}

static inline float* take_states(Arena& arena, const gt_wkv4_args& a) {
    return arena.take<float>(a.B * chunk_slots(sequences_of(a), CHECKPOINT) * 3 * a.D);
}

/* Returns the number of strands: one for each segment of each sequence, but no more than `room` blocks allow. */
static inline int64_t strands_for(const Problem& in, int64_t room) {
    return strands(most_sequences(in.sequences) * in.segments.count, in.tiles, room);
}

/* ---- forward ----------------------------------------------------------------------------------------------------- */

static inline gt_status launch_forward(const ForwardParams& p, const Device& device, Chain& chain) {
    const int64_t blocks = strands_for(p.in, grid_room(p.in.sequences, 64, device)) * p.in.tiles;
    return dispatch(p.in.dtype, [&](auto type) {
        using T = decltype(type);
        gt_status status = GT_OK;
        for (int local = p.in.segments.count > 1; local >= 0 && status == GT_OK; local--) {
            ForwardParams once = p;
            once.is_local = local;
            if (local) once.y = nullptr, once.checkpoints = nullptr;
            status = run("wkv4 forward_kernel", forward_kernel<T>, blocks, 32, FORWARD_SMEM, chain, once);
        }
        return status;
    });
}

struct ForwardPlan {
    static constexpr const char* CLEAR = "wkv4 clear_unused_kernel";
    Sequences sequences;
    ClearParams unused;
    ForwardParams params;
    size_t bytes, saved;

    gt_status pass(const Device& device, Chain& chain) const { return launch_forward(params, device, chain); }
};

static inline ForwardPlan plan_forward(const gt_wkv4_args& a, const Device& device) {
    ForwardPlan plan = {};
    ForwardParams& p = plan.params;
    Arena arena(a.workspace), saved(a.saved);
    plan.sequences = sequences_of(a);
    add_output(plan.unused, a.y, a.y_stride, a.dtype, 1, a.D, a.y_stride.h);
    p.in = problem_of(a, false);
    cut_problem(p.in, arena, segments_for(a, FORWARD_WARPS, FORWARD_LEAST, device), 3);
    p.y = a.y, p.y_stride = a.y_stride;
    p.state_in = a.state_in, p.state_in_shared = a.state_in_shared;
    p.state_out = a.state_out;
    p.checkpoints = take_states(saved, a);
    plan.bytes = arena.bytes(), plan.saved = saved.bytes();
    return plan;
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

struct BackwardPlan {
    static constexpr const char* CLEAR = "wkv4 clear_unused_kernel";
    Sequences sequences;
    ClearParams unused;
    bool has_states;
    ForwardParams states;
    BackwardParams params;
    int64_t blocks;
    RowSums sums;
    int accumulate;
    size_t bytes, saved;

    gt_status make_states(const Device& device, Chain& chain) const { return launch_forward(states, device, chain); }
    gt_status make_gradients(const Device& device, Chain& chain) const;
    gt_status finish_chunks(const Device&, Chain&) const { return GT_OK; }
};

inline gt_status BackwardPlan::make_gradients(const Device&, Chain& chain) const {
    return dispatch(params.in.dtype, [&](auto type) {
        using T = decltype(type);
        gt_status status = GT_OK;
        for (int local = params.in.segments.count > 1; local >= 0 && status == GT_OK; local--) {
            BackwardParams once = params;
            once.is_local = local;
            status = run("wkv4 backward_kernel", backward_kernel<T>, blocks, 32, BackwardTile<T>::SMEM, chain, once);
        }
        return status;
    });
}

static inline BackwardPlan plan_backward(const gt_wkv4_args& a, const Device& device) {
    BackwardPlan plan = {};
    BackwardParams& p = plan.params;
    Arena arena(a.workspace), saved(const_cast<void*>(static_cast<const void*>(a.saved)));
    const bool shared = a.dstate_in && a.state_in_shared;
    plan.sequences = sequences_of(a);
    plan.accumulate = a.accumulate;
    plan.has_states = a.saved;
    float* states = take_states(saved, a);
    if (!a.saved) states = take_states(arena, a);
    plan.states.in = problem_of(a, false);
    cut_problem(plan.states.in, arena, segments_for(a, FORWARD_WARPS, FORWARD_LEAST, device), 3);
    plan.states.state_in = a.state_in, plan.states.state_in_shared = a.state_in_shared;
    plan.states.checkpoints = states;
    p.in = problem_of(a, true);
    cut_problem(p.in, arena, segments_for(a, BACKWARD_WARPS, BACKWARD_LEAST, device), 4);
    /* A call without tokens only copies dstate_out to dstate_in. */
    const int64_t all = strands_for(p.in, grid_room(p.in.sequences, 64, device));
    const int64_t strands = a.T > 0 || a.dstate_in ? all : 0;
    plan.blocks = strands * p.in.tiles;
    p.checkpoints = states;
    p.state_in = a.state_in, p.state_in_shared = a.state_in_shared;
    p.dstate_out = a.dstate_out;
    p.dstate_in = shared ? nullptr : a.dstate_in;
    p.dw = plan.sums.take(arena, a.dw, strands, a.D);
    p.du = plan.sums.take(arena, a.du, strands, a.D);
    p.dstate_sum = plan.sums.take(arena, shared ? a.dstate_in : nullptr, strands, 3 * a.D);
    p.dk = a.dk, p.dv = a.dv;
    p.dk_stride = a.dk_stride, p.dv_stride = a.dv_stride;
    add_output(plan.unused, a.dk, a.dk_stride, a.dtype, 1, a.D, a.dk_stride.h);
    add_output(plan.unused, a.dv, a.dv_stride, a.dtype, 1, a.D, a.dv_stride.h);
    plan.bytes = arena.bytes(), plan.saved = saved.bytes();
    return plan;
}

/* ---- the operator ------------------------------------------------------------------------------------------------ */

struct Operator {
    using Args = gt_wkv4_args;
    using Stream = Chain;
    using States = SameStates<Args>;
    using Snapshots = SameStates<Args>;
    static StateShape state_shape(const Args&) { return {0, 0}; }
    static constexpr bool HAS_PIECES = false;
    static const gt_op* table() { return gt_op_wkv4(); }
    static gt_status check(const Args& a) { return check_built(a.dtype); }
    struct Choice {}; /* one set of kernels takes every call */
    static Choice choose(const Args&, gt_pass, const Device&) { return {}; }
    static ForwardPlan plan_forward(const Args& a, const Choice&, const Device& device) {
        return wkv4::plan_forward(a, device);
    }
    static BackwardPlan plan_backward(const Args& a, const Choice&, const Device& device) {
        return wkv4::plan_backward(a, device);
    }
    static gt_status step(const Args& a, const Device&, Chain& chain) {
        StepParams p = {};
        p.in = problem_of(a, false);
        p.in.tiles = (a.D + STEP_THREADS - 1) / STEP_THREADS;
        p.y = a.y, p.y_stride = a.y_stride, p.state = a.state_out;
        p.elements = step_elements_of(a);
        return dispatch(a.dtype, [&](auto type) {
            return run("wkv4 step_kernel", step_kernel<decltype(type)>, a.T > 0 ? a.B * p.in.tiles : 0, STEP_THREADS, 0,
                       chain, p);
        });
    }
};

} /* namespace wkv4 */
} /* namespace gt */

#endif
