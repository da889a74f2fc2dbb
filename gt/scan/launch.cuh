/* gt/scan/launch.cuh - selective_scan on the current GPU: chooses a kernel's variant, plans a call, and launches its
 * kernels.  gt/recurrence/driver.cuh has the order of the launches and the C functions. */
#ifndef GT_SCAN_LAUNCH_CUH
#define GT_SCAN_LAUNCH_CUH

#include "../base/built.cuh"
#include "../recurrence/driver.cuh"
#include "backward.cuh"
#include "forward.cuh"
#include "step.cuh"
#include "table.h"

namespace gt {
namespace scan {

/* ---- which kernels a call takes ------------------------------------------------------------------------------ */

/* Calls launch(Traits) for the smallest built variant that handles N, and returns its result.  A build may leave out
 * variants, but never the largest one. */
template <class Launch>
static inline auto dispatch_size(int64_t N, const Launch& launch) {
    if constexpr (is_built_columns<0, 16>())
        if (N <= 16) return launch(Traits<4, 4, 4>());
    if constexpr (is_built_columns<16, 32>())
        if (N <= 32) return launch(Traits<8, 4, 4>());
    if constexpr (is_built_columns<32, 64>())
        if (N <= 64) return launch(Traits<16, 4, 4>());
    if constexpr (is_built_columns<64, 128>())
        if (N <= 128) return launch(Traits<32, 4, 4>());
    return launch(Traits<32, 8, 2>());
}

/* dispatch_size() with EXACT set for fp32 tensors.  Operator::check() has already refused a dtype that this build does
 * not have. */
template <class Launch>
static inline auto dispatch(const Problem& in, const Launch& launch) {
    return dispatch_size(in.N, [&](auto traits) {
        using C = decltype(traits);
        using Exact = Traits<C::LANES, C::STATES, C::COLUMNS, true>;
        if constexpr (!BUILT_F32)
            return launch(traits);
        else if constexpr (!BUILT_BF16 && !BUILT_F16)
            return launch(Exact());
        else
            return in.dtype == GT_F32 ? launch(Exact()) : launch(traits);
    });
}

static inline int64_t tiles_of(const gt_selective_scan_args& a) {
    return dispatch_size(a.N, [&](auto traits) { return (a.D / a.G + traits.CHANNELS - 1) / traits.CHANNELS; });
}

/* The number of segments per sequence that gives every multiprocessor two blocks. */
static inline int64_t segments_for(const gt_selective_scan_args& a, const Device& device) {
    return choose_segments(sequences_of(a), a.segments, a.G * tiles_of(a), 2 * (int64_t)device.multiprocessors,
                           4 * CHECKPOINT, CHECKPOINT);
}

static inline Problem problem_of(const gt_selective_scan_args& a, Arena& arena, int64_t segments) {
    Problem in = {};
    in.sequences = sequences_of(a);
    in.segments = cut_segments(arena, in.sequences, segments, CHECKPOINT, a.D * a.N, a.D);
    in.D = a.D, in.G = a.G;
    in.N = (int)a.N;
    in.tiles = tiles_of(a);
    in.dtype = a.dtype, in.dt_dtype = a.dt_dtype;
    in.softplus = a.softplus;
    in.u = a.u, in.dt = a.dt, in.Bm = a.Bm, in.Cm = a.Cm, in.z = a.z, in.dy = a.dy;
    in.A = a.A, in.Dskip = a.Dskip, in.dt_bias = a.dt_bias;
    in.u_stride = a.u_stride, in.dt_stride = a.dt_stride, in.Bm_stride = a.Bm_stride, in.Cm_stride = a.Cm_stride;
    in.z_stride = a.z_stride, in.dy_stride = a.dy_stride;
    return in;
}

static inline float* take_states(Arena& arena, const gt_selective_scan_args& a) {
    return arena.take<float>(a.B * chunk_slots(sequences_of(a), CHECKPOINT) * a.D * a.N);
}

static inline ScanParams scan_of(const Problem& in, const float* state_in, int state_in_shared) {
    return {in.sequences, in.segments, CHECKPOINT, state_in, state_in_shared, in.D * in.N, in.D, in.A};
}

/* The number of strands: one for each segment of each sequence, unless the grid would exceed `room` blocks. */
static inline int64_t strands_for(const Problem& in, int64_t room) {
    return strands(most_sequences(in.sequences) * in.segments.count, in.G * in.tiles, room);
}

/* ---- forward ---------------------------------------------------------------------------------------- */

static inline gt_status launch_forward(const ForwardParams& p, const Device& device, gt_stream stream) {
    const int64_t blocks = strands_for(p.in, grid_room(p.in.sequences, 32, device)) * p.in.G * p.in.tiles;
    const ScanParams scan = scan_of(p.in, p.state_in, p.state_in_shared);
    return run_pass<false>("selective_scan scan_segments_kernel", scan, device, stream, [&](bool is_local) {
        ForwardParams once = p;
        if (is_local) {
            once.is_local = 1;
            once.y = nullptr;
            once.checkpoints = nullptr;
        }
        return dispatch(p.in, [&](auto traits) {
            using C = decltype(traits);
            return run("selective_scan forward_kernel", forward_kernel<C::LANES, C::STATES, C::COLUMNS, C::EXACT>,
                       blocks, THREADS, 4 * C::FORWARD_END, stream, once);
        });
    });
}

struct ForwardPlan {
    static constexpr const char* CLEAR = "selective_scan clear_unused_kernel";
    Sequences sequences;
    ClearParams unused;
    ForwardParams params;
    size_t bytes, saved;

    gt_status pass(const Device& device, gt_stream stream) const { return launch_forward(params, device, stream); }
};

static inline ForwardPlan plan_forward(const gt_selective_scan_args& a, const Device& device) {
    ForwardPlan plan = {};
    ForwardParams& p = plan.params;
    Arena arena(a.workspace), saved(a.saved);
    plan.sequences = sequences_of(a);
    add_output(plan.unused, a.y, a.y_stride, a.dtype, 1, a.D, a.y_stride.h);
    p.in = problem_of(a, arena, segments_for(a, device));
    p.y = a.y, p.y_stride = a.y_stride;
    p.state_in = a.state_in, p.state_in_shared = a.state_in_shared;
    p.state_out = a.state_out;
    p.checkpoints = take_states(saved, a);
    plan.bytes = arena.bytes(), plan.saved = saved.bytes();
    return plan;
}

/* ---- backward ------------------------------------------------------------------------------------------------ */

struct BackwardPlan {
    static constexpr const char* CLEAR = "selective_scan clear_unused_kernel";
    Sequences sequences;
    ClearParams unused;
    bool has_states;
    ForwardParams states;
    BackwardParams params;
    int64_t blocks;
    GroupSumParams dB, dC; /* out = NULL: not wanted */
    RowSums sums;
    int accumulate;
    size_t bytes, saved;

    gt_status make_states(const Device& device, gt_stream stream) const {
        return launch_forward(states, device, stream);
    }
    gt_status make_gradients(const Device& device, gt_stream stream) const;
    gt_status finish_chunks(const Device& device, gt_stream stream) const;
};

/* backward_kernel carries G through all chunks and makes the chunks' gradients on the way. */
inline gt_status BackwardPlan::make_gradients(const Device& device, gt_stream stream) const {
    const ScanParams scan = scan_of(params.in, params.dstate_out, 0);
    return run_pass<true>("selective_scan scan_segments_kernel", scan, device, stream, [&](bool is_local) {
        return dispatch(params.in, [&](auto traits) {
            using C = decltype(traits);
            const auto kernel = is_local ? reverse_states_kernel<C::LANES, C::STATES, C::COLUMNS, C::EXACT>
                                         : backward_kernel<C::LANES, C::STATES, C::COLUMNS, C::EXACT>;
            return run(is_local ? "selective_scan reverse_states_kernel" : "selective_scan backward_kernel", kernel,
                       blocks, THREADS, 4 * C::BACKWARD_END, stream, params);
        });
    });
}

/* Adds up the partial sums of dB and dC over the tiles of a group. */
inline gt_status BackwardPlan::finish_chunks(const Device&, gt_stream stream) const {
    gt_status status = GT_OK;
    if (dB.out) status = group_sum("selective_scan dBm", dB, stream);
    if (dC.out && status == GT_OK) status = group_sum("selective_scan dCm", dC, stream);
    return status;
}

static inline BackwardPlan plan_backward(const gt_selective_scan_args& a, const Device& device) {
    BackwardPlan plan = {};
    BackwardParams& p = plan.params;
    Arena arena(a.workspace), saved(const_cast<void*>(static_cast<const void*>(a.saved)));
    const bool shared = a.dstate_in && a.state_in_shared;
    p.in = problem_of(a, arena, segments_for(a, device));
    plan.sequences = p.in.sequences;
    plan.accumulate = a.accumulate;
    plan.has_states = a.saved;
    float* states = take_states(saved, a);
    if (!a.saved) states = take_states(arena, a);
    plan.states.in = p.in;
    plan.states.state_in = a.state_in, plan.states.state_in_shared = a.state_in_shared;
    plan.states.checkpoints = states;
    /* Every block has its own scratch for parked states.  So the grid has at most 64 blocks per multiprocessor, which
     * bounds the scratch. */
    const int64_t strands = strands_for(p.in, 64 * (int64_t)device.multiprocessors), tiles = p.in.tiles;
    plan.blocks = strands * a.G * tiles;
    p.checkpoints = states;
    p.scratch = arena.take<float>(
        dispatch_size(a.N, [&](auto traits) { return plan.blocks * traits.SUB_CHUNKS * PARKED * 4; }));
    const int64_t rows = dispatch_size(a.N, [](auto traits) { return (int64_t)traits.ROWS; });
    const int64_t shares = a.B * a.T * a.G * tiles * a.N;
    if (a.dBm) p.dB = arena.take<float>(shares);
    if (a.dCm) p.dC = arena.take<float>(shares);
    plan.dB = {p.dB,  a.dBm,    a.dtype,       {a.dBm_stride.b, a.dBm_stride.t, a.dBm_stride.h}, p.in.sequences, a.G,
               tiles, (int)a.N, a.dBm_stride.n};
    plan.dC = {p.dC,  a.dCm,    a.dtype,       {a.dCm_stride.b, a.dCm_stride.t, a.dCm_stride.h}, p.in.sequences, a.G,
               tiles, (int)a.N, a.dCm_stride.n};
    p.dA = plan.sums.take(arena, a.dA, strands, a.D * a.N);
    p.dskip = plan.sums.take(arena, a.dDskip, strands * rows, a.D);
    p.dbias = plan.sums.take(arena, a.ddt_bias, strands * rows, a.D);
    p.dstate_sum = plan.sums.take(arena, shared ? a.dstate_in : nullptr, strands, a.D * a.N);
    p.dstate_out = a.dstate_out;
    p.dstate_in = shared ? nullptr : a.dstate_in;
    p.du = a.du, p.ddt = a.ddt, p.dz = a.dz;
    p.du_stride = a.du_stride, p.ddt_stride = a.ddt_stride, p.dz_stride = a.dz_stride;
    add_output(plan.unused, a.du, a.du_stride, a.dtype, 1, a.D, a.du_stride.h);
    add_output(plan.unused, a.ddt, a.ddt_stride, a.dt_dtype, 1, a.D, a.ddt_stride.h);
    add_output(plan.unused, a.dz, a.dz_stride, a.dtype, 1, a.D, a.dz_stride.h);
    plan.bytes = arena.bytes(), plan.saved = saved.bytes();
    return plan;
}

/* ---- the operator -------------------------------------------------------------------------------------------- */

struct Operator {
    using Args = gt_selective_scan_args;
    using Stream = gt_stream;
    using States = WideStates<Args>;
    using Snapshots = SameStates<Args>;
    static StateShape state_shape(const Args& a) { return {a.D, a.N}; }
    static constexpr bool HAS_PIECES = false;
    static const gt_op* table() { return gt_op_selective_scan(); }
    static gt_status check(const Args& a) {
        const gt_status status = check_built(a.dtype);
        return status != GT_OK ? status : check_size("N", a.N, MAX_SIZE);
    }
    struct Choice {}; /* one set of kernels takes every call */
    static Choice choose(const Args&, gt_pass, const Device&) { return {}; }
    static ForwardPlan plan_forward(const Args& a, const Choice&, const Device& device) {
        return scan::plan_forward(a, device);
    }
    static BackwardPlan plan_backward(const Args& a, const Choice&, const Device& device) {
        return scan::plan_backward(a, device);
    }
    static gt_status step(const Args& a, const Device& device, gt_stream stream) {
        return launch_step(a, device, stream);
    }
};

} /* namespace scan */
} /* namespace gt */

#endif
