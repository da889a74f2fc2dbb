/* gt/ssd/any/launch.cuh - ssd by the kernels for any size: forward, step and backward. */
#ifndef GT_SSD_ANY_LAUNCH_CUH
#define GT_SSD_ANY_LAUNCH_CUH

#include "../../recurrence/driver.cuh"
#include "gradients.cuh"
#include "../choice.cuh"
#include "forward.cuh"

namespace gt {
namespace ssd {

static inline Segments take_segments(Arena& arena, const gt_ssd_args& a, int64_t count, bool wanted = false) {
    return cut_segments(arena, sequences_of(a), count, CHECKPOINT, a.H * a.P * a.N, a.H, wanted);
}

static inline ScanParams scan_of(const Problem& in, const float* state_in, int state_in_shared) {
    return {in.sequences, in.segments, CHECKPOINT, state_in, state_in_shared, in.H * in.P * in.N, in.H, nullptr};
}

/* Blocks of a tile and head: one a segment, but no more than `room` blocks in all are launched. */
static inline int64_t strands_for(const Problem& in, int64_t room) {
    return strands(most_sequences(in.sequences) * in.segments.count, in.H * in.tiles, room);
}

/* Blocks of a pass without scratch memory. */
static inline int64_t pass_blocks(const Problem& in, const Device& device) {
    return strands_for(in, grid_room(in.sequences, 32, device)) * in.H * in.tiles;
}

/* Calls launch(Traits) for the smallest variant that handles N; returns its result. */
template <class Launch>
static inline auto dispatch_size(int64_t N, const Launch& launch) {
    if (N <= 16) return launch(Traits<1, 4>());
    if (N <= 32) return launch(Traits<2, 4>());
    if (N <= 64) return launch(Traits<4, 4>());
    if (N <= 128) return launch(Traits<8, 4>());
    return launch(Traits<8, 8>());
}

static inline gt_status launch_forward_once(const ForwardParams& p, const Device& device, gt_stream stream) {
    return dispatch_size(p.in.N, [&](auto traits) {
        using C = decltype(traits);
        return run("ssd forward_kernel", forward_kernel<C::RN, C::WARPS>, pass_blocks(p.in, device), C::THREADS,
                   4 * C::FORWARD_END, stream, p);
    });
}

static inline gt_status launch_forward(const ForwardParams& p, const Device& device, gt_stream stream) {
    const ScanParams scan = scan_of(p.in, p.state_in, p.state_in_shared);
    return run_pass<false>("ssd scan_segments_kernel", scan, device, stream, [&](bool is_local) {
        ForwardParams once = p;
        if (is_local) {
            once.is_local = ALL_BUT_LAST;
            once.y = nullptr;
            once.keeps_checkpoints = 0;
        }
        return launch_forward_once(once, device, stream);
    });
}

/* The gradient before each segment, from a zero gradient after it. */
static inline gt_status launch_reverse_states(const BackwardParams& p, int64_t blocks, gt_stream stream) {
    return dispatch_size(p.in.N, [&](auto traits) {
        using C = decltype(traits);
        return run("ssd reverse_states_kernel", reverse_states_kernel<C::RN, C::WARPS>, blocks, C::THREADS,
                   4 * C::BACKWARD_END, stream, p);
    });
}

/* ---- backward ------------------------------------------------------------------------------------------------ */

struct AnyBackwardPlan {
    ForwardParams states; /* h where forward did not leave it */
    BackwardParams params;
    GroupSumParams dB, dC; /* out = NULL: not wanted */
    DeltaParams delta;
    int64_t blocks, windows; /* of backward_kernel; in all */

    gt_status make_gradients(const Device& device, gt_stream stream) const {
        const BackwardParams& p = params;
        const ScanParams scan = scan_of(p.in, p.dstate_out, 0);
        return run_pass<true>("ssd scan_segments_kernel", scan, device, stream, [&](bool is_local) {
            if (is_local) return launch_reverse_states(p, blocks, stream);
            return dispatch_size(p.in.N, [&](auto traits) {
                using C = decltype(traits);
                return run("ssd backward_kernel", backward_kernel<C::RN, C::WARPS>, blocks, C::THREADS,
                           4 * C::BACKWARD_END, stream, p);
            });
        });
    }

    gt_status finish_chunks(gt_stream stream) const {
        gt_status status = GT_OK;
        if (dB.out) status = group_sum("ssd dBm", dB, stream);
        if (dC.out && status == GT_OK) status = group_sum("ssd dCm", dC, stream);
        if (status != GT_OK) return status;
        return run("ssd backward_delta_kernel", backward_delta_kernel, windows * ((params.in.H + 31) / 32), 256, 2048,
                   stream, delta);
    }
};

/* saved: what forward left, or no pointers. */
static inline AnyBackwardPlan plan_any_backward(const gt_ssd_args& a, Arena& arena, const Checkpoints& saved,
                                                RowSums& sums, const Choice& choice, const Device& device) {
    AnyBackwardPlan plan = {};
    BackwardParams& s = plan.params;
    DeltaParams& d = plan.delta;
    s.in = problem_of(a);
    s.in.segments = take_segments(arena, a, choice.any_segments);
    d.in = plan.states.in = s.in;
    const int64_t tiles = s.in.tiles, tokens = a.B * a.T * a.H;
    plan.windows = a.B * windows_of(a.T);
    /* a block parks states, so that there are few more blocks than can run at once */
    const int64_t strands = strands_for(s.in, 16 * (int64_t)device.multiprocessors);
    plan.blocks = strands * a.H * tiles;
    s.checkpoints = a.saved ? saved : take_checkpoints(arena, a);
    plan.states.state_in = a.state_in, plan.states.state_in_shared = a.state_in_shared;
    plan.states.checkpoints = s.checkpoints;
    plan.states.keeps_checkpoints = 1;
    dispatch_size(a.N, [&](auto traits) {
        using C = decltype(traits);
        s.scratch = arena.take<float>(plan.blocks * SUB_CHUNKS * TILE_P * C::WIDTH);
        /* rows of dDskip: of a channel 64 threads', of a head every warp's */
        const int64_t rows = a.Dskip_per_channel ? strands * C::WARPS / 2 : strands * C::WARPS * tiles;
        s.dskip = sums.take(arena, a.dDskip, rows, a.H * (a.Dskip_per_channel ? a.P : 1));
    });
    if (a.dBm) s.dB = arena.take<float>(tokens * tiles * a.N);
    if (a.dCm) s.dC = arena.take<float>(tokens * tiles * a.N);
    s.ddelta = arena.take<float>(tokens * tiles);
    s.da = arena.take<float>(tokens * tiles);
    d.dA = sums.take(arena, a.dA, plan.windows, a.H);
    d.dbias = sums.take(arena, a.ddt_bias, plan.windows, a.H);
    const bool shared = a.dstate_in && a.state_in_shared;
    s.dstate_sum = sums.take(arena, shared ? a.dstate_in : nullptr, strands, a.H * a.P * a.N);
    s.dstate_out = a.dstate_out;
    s.dstate_in = shared ? nullptr : a.dstate_in;
    s.dx = a.dx, s.dz = a.dz;
    s.dx_stride = a.dx_stride, s.dz_stride = a.dz_stride;
    d.ddelta = s.ddelta, d.da = s.da;
    d.ddt = a.ddt, d.ddt_stride = a.ddt_stride;
    plan.dB = {s.dB, a.dBm, a.dtype, a.dBm_stride, s.in.sequences, a.G, a.H / a.G * tiles, (int)a.N};
    plan.dC = {s.dC, a.dCm, a.dtype, a.dCm_stride, s.in.sequences, a.G, a.H / a.G * tiles, (int)a.N};
    return plan;
}

} /* namespace ssd */
} /* namespace gt */

#endif
