/* gt/scan/launch.cuh - selective_scan on the current GPU: arguments checked, kernels chosen and launched. */
#ifndef GT_SCAN_LAUNCH_CUH
#define GT_SCAN_LAUNCH_CUH

#include "../base/reduce.cuh"
#include "backward.cuh"
#include "forward.cuh"
#include "table.h"

namespace gt {
namespace scan {

static inline Problem problem_of(const gt_selective_scan_args& a) {
    Problem in = {};
    in.sequences = sequences_of(a);
    in.D = a.D, in.G = a.G;
    in.N = (int)a.N;
    in.dtype = a.dtype, in.dt_dtype = a.dt_dtype;
    in.rule.softplus = a.softplus;
    in.u = a.u, in.dt = a.dt, in.Bm = a.Bm, in.Cm = a.Cm, in.z = a.z, in.dy = a.dy;
    in.A = a.A, in.Dskip = a.Dskip, in.dt_bias = a.dt_bias;
    in.u_at = a.u_stride, in.dt_at = a.dt_stride, in.Bm_at = a.Bm_stride, in.Cm_at = a.Cm_stride;
    in.z_at = a.z_stride, in.dy_at = a.dy_stride;
    return in;
}

/* The variant that handles N, and what it fixes. */
struct Variant {
    int64_t lanes, states, leaves, tiles;
};

template <class C>
static inline Variant variant_with(const gt_selective_scan_args& a) {
    return {C::LANES, C::STATES, C::LEAVES, (a.D / a.G + C::CHANNELS - 1) / C::CHANNELS};
}

static inline Variant variant_of(const gt_selective_scan_args& a) {
    if (a.N <= 16) return variant_with<Traits<4, 4>>(a);
    if (a.N <= 32) return variant_with<Traits<8, 4>>(a);
    if (a.N <= 64) return variant_with<Traits<16, 4>>(a);
    if (a.N <= 128) return variant_with<Traits<16, 8>>(a);
    return variant_with<Traits<32, 8>>(a);
}

/* Blocks of a tile: one a segment, but no more than `room` blocks in all are launched. */
static inline int64_t strands_for(const Problem& in, int64_t room) {
    const int64_t each = in.G * in.tiles, items = most_sequences(in.sequences) * in.segments.count;
    const int64_t most = room / each > 1 ? room / each : 1;
    return items < most ? items : most;
}

/* Blocks of a pass without scratch memory.  How many packed sequences there are the device finds: a few rounds of blocks
 * do for any number. */
static inline int64_t grid_room(const Problem& in, const Device& device) {
    return in.sequences.capacity ? 32 * (int64_t)device.multiprocessors : (int64_t)1 << 22;
}

/* As many segments as give every multiprocessor four blocks. */
static inline int64_t segments_for(const gt_selective_scan_args& a, const Device& device) {
    return choose_segments(sequences_of(a), a.segments, a.G * variant_of(a).tiles,
                           4 * (int64_t)device.multiprocessors, 4 * CHECKPOINT, CHECKPOINT);
}

static inline Segments take_segments(Arena& arena, const gt_selective_scan_args& a, int64_t count) {
    Segments cut = {count, nullptr, nullptr};
    if (count == 1) return cut;
    const int64_t slots = segment_slots(sequences_of(a), count, CHECKPOINT);
    cut.states = arena.take<float>(slots * a.D * a.N);
    cut.decays = arena.take<float>(slots * a.D);
    return cut;
}

static inline ScanParams scan_of(const Problem& in, const float* state_in, int state_in_shared) {
    return {in.sequences, in.segments, CHECKPOINT, state_in, state_in_shared, in.D * in.N, in.D, in.A};
}

template <int LANES, int STATES>
static gt_status launch_forward_with(const ForwardParams& p, const Device& device, gt_stream stream) {
    return run("selective_scan forward_kernel", forward_kernel<LANES, STATES>,
               strands_for(p.in, grid_room(p.in, device)) * p.in.G * p.in.tiles, THREADS, 4 * Traits<LANES, STATES>::FORWARD_END,
               stream, p);
}

static inline gt_status launch_forward_once(const ForwardParams& p, const Device& device, gt_stream stream) {
    if (p.in.N <= 16) return launch_forward_with<4, 4>(p, device, stream);
    if (p.in.N <= 32) return launch_forward_with<8, 4>(p, device, stream);
    if (p.in.N <= 64) return launch_forward_with<16, 4>(p, device, stream);
    if (p.in.N <= 128) return launch_forward_with<16, 8>(p, device, stream);
    return launch_forward_with<32, 8>(p, device, stream);
}

/* In one launch, or in three. */
static inline gt_status launch_forward(const ForwardParams& p, const Device& device, gt_stream stream) {
    gt_status status;
    if (p.in.segments.count > 1) {
        ForwardParams local = p;
        local.is_local = 1;
        local.y = nullptr;
        local.checkpoints = nullptr;
        if ((status = launch_forward_once(local, device, stream)) != GT_OK ||
            (status = scan_segments<false>("selective_scan scan_segments_kernel",
                                           scan_of(p.in, p.state_in, p.state_in_shared), device, stream)) != GT_OK)
            return status;
    }
    return launch_forward_once(p, device, stream);
}

template <int LANES, int STATES>
static gt_status launch_backward_with(const BackwardParams& p, int64_t blocks, const Device& device,
                                      gt_stream stream) {
    constexpr int SMEM = 4 * Traits<LANES, STATES>::BACKWARD_END;
    gt_status status;
    if (p.in.segments.count > 1 &&
        ((status = run("selective_scan reverse_states_kernel", reverse_states_kernel<LANES, STATES>, blocks, THREADS,
                       SMEM, stream, p)) != GT_OK ||
         (status = scan_segments<true>("selective_scan scan_segments_kernel", scan_of(p.in, p.dstate_out, 0), device,
                                       stream)) != GT_OK))
        return status;
    return run("selective_scan backward_kernel", backward_kernel<LANES, STATES>, blocks, THREADS, SMEM, stream, p);
}

static inline gt_status launch_backward_kernel(const BackwardParams& p, int64_t blocks, const Device& device,
                                               gt_stream stream) {
    if (p.in.N <= 16) return launch_backward_with<4, 4>(p, blocks, device, stream);
    if (p.in.N <= 32) return launch_backward_with<8, 4>(p, blocks, device, stream);
    if (p.in.N <= 64) return launch_backward_with<16, 4>(p, blocks, device, stream);
    if (p.in.N <= 128) return launch_backward_with<16, 8>(p, blocks, device, stream);
    return launch_backward_with<32, 8>(p, blocks, device, stream);
}

static inline int64_t checkpoint_count(const gt_selective_scan_args& a) {
    return a.B * chunk_slots(sequences_of(a), CHECKPOINT) * a.D * a.N;
}

static inline size_t forward_workspace(const gt_selective_scan_args& a, const Device& device) {
    Arena arena(nullptr);
    take_segments(arena, a, segments_for(a, device));
    return arena.bytes();
}

/* The pieces of backward's workspace. */
struct BackwardPlan {
    BackwardParams params;
    float* checkpoints;
    int64_t strands, blocks;
    int64_t rows; /* of dskip and dbias */
    size_t bytes;
};

static inline BackwardPlan plan_backward(const gt_selective_scan_args& a, const Device& device) {
    BackwardPlan plan = {};
    BackwardParams& p = plan.params;
    Arena arena(a.workspace);
    const Variant v = variant_of(a);
    p.in = problem_of(a);
    p.in.tiles = v.tiles;
    p.in.segments = take_segments(arena, a, segments_for(a, device));
    /* a block parks states, so that there are no more blocks than a few rounds of those that run at once */
    plan.strands = strands_for(p.in, 64 * (int64_t)device.multiprocessors);
    plan.blocks = plan.strands * a.G * v.tiles;
    plan.rows = plan.strands * v.lanes;
    const int64_t shares = a.B * a.T * a.G * v.tiles * a.N;
    if (!a.saved) plan.checkpoints = arena.take<float>(checkpoint_count(a));
    p.scratch = arena.take<float>(plan.blocks * v.leaves * v.states * THREADS);
    if (a.dBm) p.dB = arena.take<float>(shares);
    if (a.dCm) p.dC = arena.take<float>(shares);
    if (a.dA) p.dA = arena.take<float>(plan.strands * a.D * a.N);
    if (a.dDskip) p.dskip = arena.take<float>(plan.rows * a.D);
    if (a.ddt_bias) p.dbias = arena.take<float>(plan.rows * a.D);
    if (a.dstate_in && a.state_in_shared) p.dstate_sum = arena.take<float>(plan.strands * a.D * a.N);
    plan.bytes = arena.bytes();
    return plan;
}

static inline gt_status recompute_checkpoints(const gt_selective_scan_args& a, BackwardPlan& plan,
                                              const Device& device, gt_stream stream) {
    ForwardParams f = {};
    f.in = plan.params.in;
    f.state_in = a.state_in;
    f.state_in_shared = a.state_in_shared;
    f.checkpoints = plan.checkpoints;
    plan.params.checkpoints = plan.checkpoints;
    return launch_forward(f, device, stream);
}

static inline gt_status sum_tiles(const gt_selective_scan_args& a, const char* name, int64_t tiles,
                                  const float* shares, void* out, const gt_stride4& out_at,
                                  gt_stream stream) {
    if (!out) return GT_OK;
    return group_sum(name,
                     {shares, out, a.dtype, {out_at.b, out_at.t, out_at.h}, sequences_of(a), a.G, tiles, (int)a.N, out_at.n},
                     stream);
}

static inline gt_status launch_backward(const gt_selective_scan_args& a, BackwardPlan& plan, const Device& device,
                                        gt_stream stream) {
    BackwardParams& p = plan.params;
    const bool shared = a.dstate_in && a.state_in_shared;
    ClearParams unused = {};
    gt_status status;
    size_t bytes;
    p.checkpoints = floats_in(a.saved, checkpoint_count(a), &bytes);
    if (!a.saved && (status = recompute_checkpoints(a, plan, device, stream)) != GT_OK) return status;
    p.dstate_out = a.dstate_out;
    p.dstate_in = shared ? nullptr : a.dstate_in;
    p.du = a.du, p.ddt = a.ddt, p.dz = a.dz;
    p.du_at = a.du_stride, p.ddt_at = a.ddt_stride, p.dz_at = a.dz_stride;
    add_output(unused, a.du, a.du_stride, a.dtype, 1, a.D, a.du_stride.h);
    add_output(unused, a.ddt, a.ddt_stride, a.dt_dtype, 1, a.D, a.ddt_stride.h);
    add_output(unused, a.dz, a.dz_stride, a.dtype, 1, a.D, a.dz_stride.h);
    if ((status = clear_unused("selective_scan clear_unused_kernel", unused, p.in.sequences, device,
                               stream)) != GT_OK ||
        (status = launch_backward_kernel(p, plan.blocks, device, stream)) != GT_OK ||
        (status = sum_tiles(a, "selective_scan dBm", p.in.tiles, p.dB, a.dBm, a.dBm_stride,
                            stream)) != GT_OK ||
        (status = sum_tiles(a, "selective_scan dCm", p.in.tiles, p.dC, a.dCm, a.dCm_stride,
                            stream)) != GT_OK)
        return status;
    if (a.dA && (status = reduce_rows(p.dA, a.dA, plan.strands, a.D * a.N, a.accumulate, stream)) != GT_OK)
        return status;
    if (a.dDskip &&
        (status = reduce_rows(p.dskip, a.dDskip, plan.rows, a.D, a.accumulate, stream)) != GT_OK)
        return status;
    if (a.ddt_bias &&
        (status = reduce_rows(p.dbias, a.ddt_bias, plan.rows, a.D, a.accumulate, stream)) != GT_OK)
        return status;
    return shared ? reduce_rows(p.dstate_sum, a.dstate_in, plan.strands, a.D * a.N, a.accumulate, stream) : GT_OK;
}

/* ---- dispatch and checks ------------------------------------------------------------------------------------ */

/* Prepares the arguments and checks what only the GPU limits. */
static inline gt_status prepare(gt_pass pass, const gt_selective_scan_args* args,
                                gt_selective_scan_args* a, Device* device) {
    gt_dims dims;
    gt_status status = gt_prepare(gt_op_selective_scan(), pass, GT_DEVICE, args, a, &dims);
    if (status != GT_OK) return status;
    if (a->B == 0) { /* neither tokens nor states, of packed sequences either */
        a->seq_capacity = 0;
        a->cu_seqlens = a->seq_count = nullptr;
    }
    if (a->N > MAX_SIZE)
        return gt_fail(GT_ERROR_UNSUPPORTED, "N = %lld: at most %d", (long long)a->N, MAX_SIZE);
    return current_device(device);
}

static inline gt_status forward(const gt_selective_scan_args& a, bool is_step, const Device& device,
                                gt_stream stream) {
    ForwardParams p = {};
    ClearParams unused = {};
    Arena arena(a.workspace);
    add_output(unused, a.y, a.y_stride, a.dtype, 1, a.D, a.y_stride.h);
    p.in = problem_of(a);
    p.in.tiles = variant_of(a).tiles;
    p.in.segments = take_segments(arena, a, is_step ? 1 : segments_for(a, device));
    p.y = a.y;
    p.y_at = a.y_stride;
    p.state_in = is_step ? a.state_out : a.state_in;
    p.state_out = a.state_out;
    size_t bytes;
    p.checkpoints = is_step ? nullptr : floats_in(a.saved, checkpoint_count(a), &bytes);
    p.state_in_shared = a.state_in_shared;
    p.is_step = is_step;
    p.slots = a.slots;
    p.slot_capacity = a.slot_capacity;
    const gt_status status =
        clear_unused("selective_scan clear_unused_kernel", unused, p.in.sequences, device, stream);
    return status != GT_OK ? status : launch_forward(p, device, stream);
}

} /* namespace scan */
} /* namespace gt */

#endif
