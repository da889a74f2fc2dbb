/* gt/ssd/launch.cuh - ssd on the current GPU: arguments checked, kernels chosen and launched. */
#ifndef GT_SSD_LAUNCH_CUH
#define GT_SSD_LAUNCH_CUH

#include "../base/reduce.cuh"
#include "backward.cuh"
#include "forward.cuh"
#include "launch_backward_tensor.cuh"
#include "launch_sm90.cuh"
#include "table.h"

namespace gt {
namespace ssd {

static inline Problem problem_of(const gt_ssd_args& a) {
    Problem in = {};
    in.sequences = sequences_of(a);
    in.H = a.H, in.G = a.G;
    in.P = (int)a.P, in.N = (int)a.N;
    in.dtype = a.dtype, in.dt_dtype = a.dt_dtype;
    in.rule = {a.softplus, a.dt_limit, a.dt_min, a.dt_max};
    in.skip_per_channel = a.Dskip_per_channel;
    in.x = a.x, in.dt = a.dt, in.Bm = a.Bm, in.Cm = a.Cm, in.z = a.z, in.dy = a.dy;
    in.A = a.A, in.Dskip = a.Dskip, in.dt_bias = a.dt_bias;
    in.x_at = a.x_stride, in.dt_at = a.dt_stride, in.Bm_at = a.Bm_stride, in.Cm_at = a.Cm_stride;
    in.z_at = a.z_stride, in.dy_at = a.dy_stride;
    in.tiles = ((int)a.P + TILE_P - 1) / TILE_P;
    return in;
}

/* Blocks of a tile and head: one a segment, but no more than `room` blocks in all are launched. */
static inline int64_t strands_for(const Problem& in, int64_t room) {
    const int64_t each = in.H * in.tiles, items = most_sequences(in.sequences) * in.segments.count;
    const int64_t most = room / each > 1 ? room / each : 1;
    return items < most ? items : most;
}

/* Blocks of a pass without scratch memory.  How many packed sequences there are the device finds: a few rounds of blocks
 * do for any number. */
static inline int64_t grid_room(const Problem& in, const Device& device) {
    return in.sequences.capacity ? 32 * (int64_t)device.multiprocessors : (int64_t)1 << 22;
}

/* As many segments as give every multiprocessor three blocks. */
static inline int64_t segments_for(const gt_ssd_args& a, const Device& device) {
    const int64_t tiles = (a.P + TILE_P - 1) / TILE_P;
    return choose_segments(sequences_of(a), a.segments, a.H * tiles, 3 * (int64_t)device.multiprocessors,
                           4 * CHECKPOINT, CHECKPOINT);
}

static inline Segments take_segments(Arena& arena, const gt_ssd_args& a, int64_t count, bool wanted = false) {
    return cut_segments(arena, sequences_of(a), count, CHECKPOINT, a.H * a.P * a.N, a.H, wanted);
}

static inline ScanParams scan_of(const Problem& in, const float* state_in, int state_in_shared) {
    return {in.sequences, in.segments, CHECKPOINT, state_in, state_in_shared, in.H * in.P * in.N, in.H, nullptr};
}

template <int RN, int WARPS>
static gt_status launch_forward_with(const ForwardParams& p, const Device& device, gt_stream stream) {
    using C = Traits<RN, WARPS>;
    return run("ssd forward_kernel", forward_kernel<RN, WARPS>,
               strands_for(p.in, grid_room(p.in, device)) * p.in.H * p.in.tiles, C::THREADS, 4 * C::FORWARD_END, stream,
               p);
}

static inline gt_status launch_forward_once(const ForwardParams& p, const Device& device, gt_stream stream) {
    if (p.in.N <= 16) return launch_forward_with<1, 4>(p, device, stream);
    if (p.in.N <= 32) return launch_forward_with<2, 4>(p, device, stream);
    if (p.in.N <= 64) return launch_forward_with<4, 4>(p, device, stream);
    if (p.in.N <= 128) return launch_forward_with<8, 4>(p, device, stream);
    return launch_forward_with<8, 8>(p, device, stream);
}

/* In one launch, or in three. */
static inline gt_status launch_forward(const ForwardParams& p, const Device& device, gt_stream stream) {
    gt_status status;
    if (p.in.segments.count > 1) {
        ForwardParams local = p;
        local.is_local = ALL_BUT_LAST;
        local.y = nullptr;
        local.keeps_checkpoints = 0;
        if ((status = launch_forward_once(local, device, stream)) != GT_OK ||
            (status = scan_segments<false>("ssd scan_segments_kernel", scan_of(p.in, p.state_in, p.state_in_shared),
                                           device, stream)) != GT_OK)
            return status;
    }
    return launch_forward_once(p, device, stream);
}

template <int RN, int WARPS>
static gt_status launch_sweep_with(const SweepParams& p, int64_t blocks, const Device& device, gt_stream stream) {
    using C = Traits<RN, WARPS>;
    gt_status status;
    if (p.in.segments.count > 1 &&
        ((status = run("ssd reverse_states_kernel", reverse_states_kernel<RN, WARPS>, blocks, C::THREADS,
                       4 * C::BACKWARD_END, stream, p)) != GT_OK ||
         (status = scan_segments<true>("ssd scan_segments_kernel", scan_of(p.in, p.dstate_out, 0), device, stream)) !=
             GT_OK))
        return status;
    return run("ssd backward_sweep_kernel", backward_sweep_kernel<RN, WARPS>, blocks, C::THREADS, 4 * C::BACKWARD_END,
               stream, p);
}

/* The kernel for one segment after another alone: what each makes of a zero gradient. */
static inline gt_status launch_reverse_states(const SweepParams& p, int64_t blocks, gt_stream stream) {
    const auto with = [&](auto columns, auto warps) {
        constexpr int RN = decltype(columns)::value, WARPS = decltype(warps)::value;
        return run("ssd reverse_states_kernel", reverse_states_kernel<RN, WARPS>, blocks, Traits<RN, WARPS>::THREADS,
                   4 * Traits<RN, WARPS>::BACKWARD_END, stream, p);
    };
    const std::integral_constant<int, 4> four = {};
    if (p.in.N <= 16) return with(std::integral_constant<int, 1>(), four);
    if (p.in.N <= 32) return with(std::integral_constant<int, 2>(), four);
    if (p.in.N <= 64) return with(four, four);
    if (p.in.N <= 128) return with(std::integral_constant<int, 8>(), four);
    return with(std::integral_constant<int, 8>(), std::integral_constant<int, 8>());
}

static inline gt_status launch_sweep(const SweepParams& p, int64_t blocks, const Device& device, gt_stream stream) {
    if (p.in.N <= 16) return launch_sweep_with<1, 4>(p, blocks, device, stream);
    if (p.in.N <= 32) return launch_sweep_with<2, 4>(p, blocks, device, stream);
    if (p.in.N <= 64) return launch_sweep_with<4, 4>(p, blocks, device, stream);
    if (p.in.N <= 128) return launch_sweep_with<8, 4>(p, blocks, device, stream);
    return launch_sweep_with<8, 8>(p, blocks, device, stream);
}

/* What the sweep's variant for this N fixes. */
static inline int64_t sweep_width(int64_t N) {
    return N <= 16 ? 16 : N <= 32 ? 32 : N <= 64 ? 64 : N <= 128 ? 128 : 256;
}
static inline int64_t sweep_warps(int64_t N) { return N <= 128 ? 4 : 8; }

/* Enough for any kind of kernels. */
static inline size_t forward_workspace(const gt_ssd_args& a, const Device& device) {
    size_t most = 0;
    for (const int64_t count : {segments_for(a, device), tensor_segments(a, device), hopper_segments(a, device)}) {
        Arena arena(nullptr);
        take_segments(arena, a, count);
        if (has_f16_checkpoints(a)) take_share(arena, a);
        if (arena.bytes() > most) most = arena.bytes();
    }
    return most;
}

/* The pieces of backward's workspace. */
struct BackwardPlan {
    SweepParams sweep;
    DeltaParams delta;
    Checkpoints checkpoints;
    int64_t strands, blocks; /* of the sweep */
    int64_t dskip_rows;
    size_t bytes;
};

static inline BackwardPlan plan_backward(const gt_ssd_args& a, const Device& device) {
    BackwardPlan plan = {};
    SweepParams& s = plan.sweep;
    DeltaParams& d = plan.delta;
    Arena arena(a.workspace);
    s.in = problem_of(a);
    s.in.segments = take_segments(arena, a, segments_for(a, device));
    d.in = s.in;
    const int64_t tiles = s.in.tiles, tokens = a.B * a.T * a.H, windows = a.B * windows_of(a.T);
    /* a block parks states, so that there are few more blocks than can run at once */
    plan.strands = strands_for(s.in, 16 * (int64_t)device.multiprocessors);
    plan.blocks = plan.strands * a.H * tiles;
    if (!a.saved) plan.checkpoints = take_checkpoints(arena, a);
    s.scratch = arena.take<float>(plan.blocks * LEAVES * TILE_P * sweep_width(a.N));
    if (a.dBm) s.dB = arena.take<float>(tokens * tiles * a.N);
    if (a.dCm) s.dC = arena.take<float>(tokens * tiles * a.N);
    s.ddelta = arena.take<float>(tokens * tiles);
    s.da = arena.take<float>(tokens * tiles);
    if (a.dA) d.dA = arena.take<float>(windows * a.H);
    if (a.ddt_bias) d.dbias = arena.take<float>(windows * a.H);
    plan.dskip_rows = plan.strands * sweep_warps(a.N);
    if (a.Dskip_per_channel)
        plan.dskip_rows /= 2; /* 64 threads a row */
    else
        plan.dskip_rows *= tiles;
    if (a.dDskip) s.dskip = arena.take<float>(plan.dskip_rows * a.H * (a.Dskip_per_channel ? a.P : 1));
    if (a.dstate_in && a.state_in_shared) s.dstate_sum = arena.take<float>(plan.strands * a.H * a.P * a.N);
    plan.bytes = arena.bytes();
    return plan;
}

static inline gt_status recompute_checkpoints(const gt_ssd_args& a, BackwardPlan& plan, const Device& device,
                                              gt_stream stream) {
    ForwardParams f = {};
    f.in = plan.sweep.in;
    f.state_in = a.state_in;
    f.state_in_shared = a.state_in_shared;
    f.checkpoints = plan.checkpoints;
    f.keeps_checkpoints = 1;
    plan.sweep.checkpoints = plan.checkpoints;
    return launch_forward(f, device, stream);
}

static inline gt_status sum_heads(const gt_ssd_args& a, const char* name, const float* shares, void* out,
                                  gt_stride out_at, gt_stream stream) {
    if (!out) return GT_OK;
    const int64_t parts = a.H / a.G * ((a.P + TILE_P - 1) / TILE_P);
    return group_sum(name, {shares, out, a.dtype, out_at, sequences_of(a), a.G, parts, (int)a.N}, stream);
}

static inline gt_status launch_backward(const gt_ssd_args& a, BackwardPlan& plan, const Device& device,
                                        gt_stream stream) {
    SweepParams& s = plan.sweep;
    DeltaParams& d = plan.delta;
    const int64_t windows = a.B * windows_of(a.T), state = a.H * a.P * a.N;
    const bool shared = a.dstate_in && a.state_in_shared;
    ClearParams unused = {};
    gt_status status;
    size_t bytes;
    s.checkpoints = checkpoints_in(a.saved, a, &bytes);
    if (!a.saved && (status = recompute_checkpoints(a, plan, device, stream)) != GT_OK) return status;
    s.dstate_out = a.dstate_out;
    s.dstate_in = shared ? nullptr : a.dstate_in;
    s.dx = a.dx, s.dz = a.dz;
    s.dx_at = a.dx_stride, s.dz_at = a.dz_stride;
    d.ddelta = s.ddelta, d.da = s.da;
    d.ddt = a.ddt, d.ddt_at = a.ddt_stride;
    add_output(unused, a.dx, a.dx_stride, a.dtype, a.H, a.P);
    add_output(unused, a.dz, a.dz_stride, a.dtype, a.H, a.P);
    if ((status = clear_unused("ssd clear_unused_kernel", unused, s.in.sequences, device, stream)) != GT_OK ||
        (status = launch_sweep(s, plan.blocks, device, stream)) != GT_OK ||
        (status = sum_heads(a, "ssd dBm", s.dB, a.dBm, a.dBm_stride, stream)) != GT_OK ||
        (status = sum_heads(a, "ssd dCm", s.dC, a.dCm, a.dCm_stride, stream)) != GT_OK ||
        (status = run("ssd backward_delta_kernel", backward_delta_kernel, windows * ((a.H + 31) / 32), 256, 2048,
                      stream, d)) != GT_OK)
        return status;
    if (a.dA && (status = reduce_rows(d.dA, a.dA, windows, a.H, a.accumulate, stream)) != GT_OK) return status;
    if (a.ddt_bias && (status = reduce_rows(d.dbias, a.ddt_bias, windows, a.H, a.accumulate, stream)) != GT_OK)
        return status;
    if (a.dDskip && (status = reduce_rows(s.dskip, a.dDskip, plan.dskip_rows, a.H * (a.Dskip_per_channel ? a.P : 1),
                                          a.accumulate, stream)) != GT_OK)
        return status;
    return shared ? reduce_rows(s.dstate_sum, a.dstate_in, plan.strands, state, a.accumulate, stream) : GT_OK;
}

static inline TensorBackwardPlan plan_tensor_backward(const gt_ssd_args& a, const Device& device) {
    Arena arena(a.workspace);
    Problem in = problem_of(a);
    in.segments = take_segments(arena, a, tensor_segments(a, device));
    return plan_tensor_backward(a, arena, in, device);
}

/* Of the kernels that the call takes: rows of pointers that are not known yet (NULL) count as aligned. */
static inline size_t backward_workspace(const gt_ssd_args& a, const Device& device) {
    return takes_tensor_cores(a, device) ? plan_tensor_backward(a, device).bytes : plan_backward(a, device).bytes;
}

static inline gt_status backward(const gt_ssd_args& a, const Device& device, gt_stream stream) {
    if (takes_tensor_cores(a, device))
        return launch_tensor_backward(a, plan_tensor_backward(a, device), device, stream);
    BackwardPlan plan = plan_backward(a, device);
    return launch_backward(a, plan, device, stream);
}

/* ---- dispatch and checks ------------------------------------------------------------------------------------ */

/* Prepares the arguments and checks what only the GPU limits. */
static inline gt_status prepare(gt_pass pass, const gt_ssd_args* args, gt_ssd_args* a, Device* device) {
    gt_dims dims;
    gt_status status = gt_prepare(gt_op_ssd(), pass, GT_DEVICE, args, a, &dims);
    if (status != GT_OK) return status;
    if (a->B == 0) { /* neither tokens nor states, of packed sequences either */
        a->seq_capacity = 0;
        a->cu_seqlens = a->seq_count = nullptr;
    }
    if (a->P > MAX_SIZE) return gt_fail(GT_ERROR_UNSUPPORTED, "P = %lld: at most %d", (long long)a->P, MAX_SIZE);
    if (a->N > MAX_SIZE) return gt_fail(GT_ERROR_UNSUPPORTED, "N = %lld: at most %d", (long long)a->N, MAX_SIZE);
    return current_device(device);
}

static inline gt_status forward_tensor(const gt_ssd_args& a, const Device& device, gt_stream stream) {
    TensorParams p = {};
    Arena arena(a.workspace);
    size_t bytes;
    p.in = problem_of(a);
    p.in.segments = take_segments(arena, a, forward_segments(a, device));
    p.share = take_share(arena, a);
    p.y = a.y;
    p.y_at = a.y_stride;
    p.state_in = a.state_in;
    p.state_out = a.state_out;
    p.state_in_shared = a.state_in_shared;
    if (a.saved) p.checkpoints = checkpoints_in(a.saved, a, &bytes);
    Chain chain = {stream};
    return launch_fastest_forward(a, p, device, chain);
}

static inline gt_status forward(const gt_ssd_args& a, bool is_step, const Device& device, gt_stream stream) {
    ForwardParams p = {};
    ClearParams unused = {};
    Arena arena(a.workspace);
    add_output(unused, a.y, a.y_stride, a.dtype, a.H, a.P);
    p.in = problem_of(a);
    const gt_status status = clear_unused("ssd clear_unused_kernel", unused, p.in.sequences, device, stream);
    if (status != GT_OK) return status;
    if (!is_step && takes_tensor_cores(a, device)) return forward_tensor(a, device, stream);
    p.in.segments = take_segments(arena, a, is_step ? 1 : segments_for(a, device));
    p.y = a.y;
    p.y_at = a.y_stride;
    p.state_in = is_step ? a.state_out : a.state_in;
    p.state_out = a.state_out;
    size_t bytes;
    p.keeps_checkpoints = !is_step && a.saved;
    if (p.keeps_checkpoints) p.checkpoints = checkpoints_in(a.saved, a, &bytes);
    p.state_in_shared = a.state_in_shared;
    p.is_step = is_step;
    p.slots = a.slots;
    p.slot_capacity = a.slot_capacity;
    return launch_forward(p, device, stream);
}

} /* namespace ssd */
} /* namespace gt */

#endif
