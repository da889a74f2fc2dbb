/* gt/conv1d/launch.cuh - conv1d on the current GPU: arguments checked, kernels chosen and launched. */
#ifndef GT_CONV1D_LAUNCH_CUH
#define GT_CONV1D_LAUNCH_CUH

#include "../base/reduce.cuh"
#include "packed.cuh"
#include "state.cuh"
#include "table.h"
#include "time.cuh"

namespace gt {
namespace conv1d {

static inline Problem problem_of(const gt_conv1d_args& a) {
    Problem in = {};
    in.B = a.B, in.T = a.T, in.D = a.D;
    in.W = (int)a.W;
    in.dtype = a.dtype;
    in.has_silu = a.activation == GT_ACT_SILU;
    in.weight = a.weight, in.bias = a.bias;
    in.x = a.x;
    in.x_at = a.x_stride;
    in.state_in = a.state_in;
    in.state_in_shared = a.state_in_shared;
    return in;
}

/* The largest power of 2 up to `most` that is not more than needed for n. */
static inline int power_for(int64_t n, int most) {
    int power = 1;
    while (power < n && power < most) power *= 2;
    return power;
}

/* Long runs read less twice, short ones give more blocks. */
static inline Cut cut_for(int64_t B, int64_t D, int64_t tokens, int vec, const Device& device) {
    Cut cut = {};
    const int64_t groups = (D + vec - 1) / vec;
    cut.lanes = power_for(groups, 32);
    cut.tiles = (groups + cut.lanes - 1) / cut.lanes;
    const int64_t rows = THREADS / cut.lanes;
    for (cut.run = MAX_RUN;; cut.run /= 2) {
        cut.runs = tokens > cut.run ? (tokens + cut.run - 1) / cut.run : 1;
        cut.blocks = (B * cut.runs + rows - 1) / rows;
        if (cut.run == MIN_RUN || cut.blocks * cut.tiles >= 4 * device.multiprocessors) return cut;
    }
}

/* Packed: threads of a kernel over states that share a channel. */
static inline int64_t strands_for(const gt_conv1d_args& a, const Device& device) {
    const int64_t wanted = (8 * (int64_t)THREADS * device.multiprocessors + a.D - 1) / a.D;
    return a.seq_capacity < wanted ? a.seq_capacity : wanted;
}

static inline int64_t strand_blocks(const Problem& in, int64_t strands) {
    return (in.D * strands + THREADS - 1) / THREADS;
}

/* How a kernel over time is cut. */
struct TimeCut {
    int lanes, passes;
    int64_t segments, blocks;
};

/* Rows may begin anywhere in their first chunk.  If there are several segments a segment has 32
 * chunks or more, so that one warp meets all of the state. */
static inline TimeCut time_cut_for(int64_t B, int64_t D, int64_t T, int chunk,
                                   const Device& device) {
    TimeCut cut = {};
    const int64_t chunks = (T + 2 * (chunk - 1)) / chunk;
    cut.lanes = power_for(chunks, 32);
    for (cut.passes = PASSES;; cut.passes /= 2) {
        const int64_t chunks_of_segment = cut.lanes * cut.passes;
        cut.segments = (chunks + chunks_of_segment - 1) / chunks_of_segment;
        if (cut.passes == 1 || (cut.lanes * cut.passes / 2 < chunks &&
                                B * D * cut.segments * cut.lanes >= 1024 * device.multiprocessors))
            break;
    }
    const int64_t rows = THREADS / cut.lanes;
    cut.blocks = (B * D * cut.segments + rows - 1) / rows;
    return cut;
}

static inline int size_of(gt_dtype dtype) { return dtype == GT_F32 ? 4 : 2; }

/* A tensor of the call; data is NULL if it has none of it. */
struct View {
    const void* data;
    gt_stride at;
};

/* Channels that one load of every tensor can move: a power of 2 up to `most`. */
template <int COUNT>
static int vector_size(const gt_conv1d_args& a, const View (&views)[COUNT], int most) {
    const int size = size_of(a.dtype);
    for (int vec = most; vec > 1; vec /= 2) {
        bool fits = a.D % vec == 0;
        for (const View& v : views) {
            if (!v.data) continue;
            fits = fits && (uintptr_t)v.data % (uintptr_t)(vec * size) == 0 && v.at.h == 1 &&
                   v.at.b % vec == 0 && v.at.t % vec == 0;
        }
        if (fits) return vec;
    }
    return 1;
}

/* Whether time is contiguous in all tensors, with rows that begin at the same place of a chunk. */
template <int COUNT>
static bool is_over_time(const gt_conv1d_args& a, const View (&views)[COUNT]) {
    const int size = size_of(a.dtype), chunk = 16 / size;
    for (const View& v : views) {
        if (!v.data) continue;
        if (v.at.t != 1 || (v.at.b - views[0].at.b) % chunk != 0 ||
            (v.at.h - views[0].at.h) % chunk != 0 ||
            ((uintptr_t)v.data - (uintptr_t)views[0].data) % 16 != 0)
            return false;
    }
    return true;
}

template <class T>
static gt_status launch_packed_states(const PackedForwardParams& p, gt_stream stream) {
    return run("conv1d packed_state_kernel", packed_state_kernel<T>, strand_blocks(p.f.in, p.strands), THREADS, 0,
               stream, p);
}

template <class T, int VEC>
static gt_status launch_forward_with(const gt_conv1d_args& a, ForwardParams p, const Device& device,
                                     gt_stream stream) {
    p.cut = cut_for(p.in.B, p.in.D, p.in.T, VEC, device);
    if (a.seq_capacity > 0) {
        const PackedForwardParams packed = {p, sequences_of(a), strands_for(a, device)};
        const gt_status status = run("conv1d packed_forward_kernel", packed_forward_kernel<T, VEC>,
                                     p.cut.blocks * p.cut.tiles, THREADS, 0, stream, packed);
        return status == GT_OK && p.state_out ? launch_packed_states<T>(packed, stream) : status;
    }
    return run("conv1d forward_kernel", forward_kernel<T, VEC>, p.cut.blocks * p.cut.tiles, THREADS,
               0, stream, p);
}

template <class T>
static gt_status launch_forward_of(const gt_conv1d_args& a, const ForwardParams& p,
                                   const Device& device, gt_stream stream) {
    const View views[] = {{a.x, a.x_stride}, {a.y, a.y_stride}};
    if (!p.is_step && a.seq_capacity == 0 && is_over_time(a, views)) {
        const TimeCut cut = time_cut_for(a.B, a.D, a.T, CHUNK<T>, device);
        const ForwardTimeParams time = {p, cut.lanes, cut.passes, cut.segments};
        return run("conv1d forward_time_kernel", forward_time_kernel<T>, cut.blocks, THREADS, 0,
                   stream, time);
    }
    const int vec = vector_size(a, views, 4);
    if (vec == 4) return launch_forward_with<T, 4>(a, p, device, stream);
    if (vec == 2) return launch_forward_with<T, 2>(a, p, device, stream);
    return launch_forward_with<T, 1>(a, p, device, stream);
}

static inline gt_status launch_forward(const gt_conv1d_args& a, bool is_step, const Device& device,
                                       gt_stream stream) {
    ForwardParams p = {};
    p.in = problem_of(a);
    if (is_step) p.in.state_in = a.state_out;
    p.y = a.y;
    p.y_at = a.y_stride;
    p.state_out = a.state_out;
    p.is_step = is_step;
    p.slots = a.slots;
    p.slot_capacity = a.slot_capacity;
    if (a.dtype == GT_BF16) return launch_forward_of<bf16>(a, p, device, stream);
    if (a.dtype == GT_F16) return launch_forward_of<f16>(a, p, device, stream);
    return launch_forward_of<float>(a, p, device, stream);
}

/* The pieces of backward's workspace, as large as any alignment and strides may need. */
struct BackwardPlan {
    float *dweight, *dbias, *dstate;
    int64_t state_rows; /* of dstate */
    size_t bytes;
};

static inline bool sums_states(const gt_conv1d_args& a) { return a.dstate_in && a.state_in_shared; }

/* Of the kernels over channels; without packing a run is one of gradients, those of the state too. */
static inline Cut backward_cut_for(const gt_conv1d_args& a, int vec, const Device& device) {
    return cut_for(a.B, a.D, a.seq_capacity > 0 ? a.T : a.T + HALO, vec, device);
}

static inline BackwardPlan plan_backward(const gt_conv1d_args& a, const Device& device) {
    BackwardPlan plan = {};
    Arena arena(a.workspace);
    int64_t rows = 0;
    if (a.seq_capacity == 0)
        rows = a.B * time_cut_for(a.B, a.D, a.T, 16 / size_of(a.dtype), device).segments;
    for (int vec = 1; vec <= 2; vec++) {
        const int64_t blocks = backward_cut_for(a, vec, device).blocks;
        if (blocks > rows) rows = blocks;
    }
    plan.state_rows = a.seq_capacity > 0 ? strands_for(a, device) : a.B;
    if (a.dweight) plan.dweight = arena.take<float>(rows * a.D * a.W);
    if (a.dbias) plan.dbias = arena.take<float>(rows * a.D);
    if (sums_states(a)) plan.dstate = arena.take<float>(plan.state_rows * a.D * (a.W - 1));
    plan.bytes = arena.bytes();
    return plan;
}

template <class T, int VEC>
static gt_status launch_backward_with(const gt_conv1d_args& a, BackwardParams p, int64_t* rows,
                                      const Device& device, gt_stream stream) {
    constexpr int SUMS = 4 * (TAPS + 1) * VEC * THREADS; /* bytes */
    p.cut = backward_cut_for(a, VEC, device);
    *rows = p.cut.blocks;
    if (a.seq_capacity > 0) {
        const PackedBackwardParams packed = {p, sequences_of(a)};
        return run("conv1d packed_backward_kernel", packed_backward_kernel<T, VEC>, p.cut.blocks * p.cut.tiles,
                   THREADS, SUMS, stream, packed);
    }
    return run("conv1d backward_kernel", backward_kernel<T, VEC>, p.cut.blocks * p.cut.tiles,
               THREADS, SUMS, stream, p);
}

/* *rows: of the partial sums */
template <class T>
static gt_status launch_backward_of(const gt_conv1d_args& a, BackwardParams p, int64_t* rows,
                                    const Device& device, gt_stream stream) {
    const View views[] = {{a.x, a.x_stride}, {a.dy, a.dy_stride}, {a.dx, a.dx_stride}};
    if (a.seq_capacity == 0 && is_over_time(a, views)) {
        const TimeCut cut = time_cut_for(a.B, a.D, a.T, CHUNK<T>, device);
        p.lanes = cut.lanes;
        p.passes = cut.passes;
        p.segments = cut.segments;
        *rows = a.B * cut.segments;
        return run("conv1d backward_time_kernel", backward_time_kernel<T>, cut.blocks, THREADS, 0,
                   stream, p);
    }
    if (vector_size(a, views, 2) == 2) return launch_backward_with<T, 2>(a, p, rows, device, stream);
    return launch_backward_with<T, 1>(a, p, rows, device, stream);
}

static inline gt_status launch_backward_runs(const gt_conv1d_args& a, const BackwardParams& p,
                                             const Device& device, gt_stream stream) {
    gt_status status;
    int64_t rows = 0;
    if (a.dtype == GT_BF16)
        status = launch_backward_of<bf16>(a, p, &rows, device, stream);
    else if (a.dtype == GT_F16)
        status = launch_backward_of<f16>(a, p, &rows, device, stream);
    else
        status = launch_backward_of<float>(a, p, &rows, device, stream);
    if (status == GT_OK && a.dweight)
        status = reduce_rows(p.dweight, a.dweight, rows, a.D * a.W, a.accumulate, stream);
    if (status == GT_OK && a.dbias)
        status = reduce_rows(p.dbias, a.dbias, rows, a.D, a.accumulate, stream);
    return status;
}

template <class T>
static gt_status launch_packed_backward_states(const PackedStateParams& p, gt_stream stream) {
    return run("conv1d packed_backward_state_kernel", packed_backward_state_kernel<T>,
               strand_blocks(p.b.in, p.strands), THREADS, 0, stream, p);
}

static inline gt_status launch_backward_states(const gt_conv1d_args& a, const BackwardParams& p,
                                               const BackwardPlan& plan, gt_stream stream) {
    float* const out = sums_states(a) ? plan.dstate : a.dstate_in;
    if (a.seq_capacity == 0) {
        const StateParams state = {p, out};
        return run("conv1d backward_state_kernel", backward_state_kernel, (a.B * a.D + THREADS - 1) / THREADS,
                   THREADS, 0, stream, state);
    }
    const PackedStateParams packed = {p, sequences_of(a), plan.state_rows, sums_states(a), out};
    if (a.dtype == GT_BF16) return launch_packed_backward_states<bf16>(packed, stream);
    if (a.dtype == GT_F16) return launch_packed_backward_states<f16>(packed, stream);
    return launch_packed_backward_states<float>(packed, stream);
}

static inline gt_status launch_backward(const gt_conv1d_args& a, const BackwardPlan& plan,
                                        const Device& device, gt_stream stream) {
    BackwardParams p = {};
    p.in = problem_of(a);
    p.dy = a.dy;
    p.dy_at = a.dy_stride;
    p.dstate_out = a.dstate_out;
    p.dx = a.dx;
    p.dx_at = a.dx_stride;
    p.dweight = plan.dweight;
    p.dbias = plan.dbias;
    gt_status status = GT_OK;
    if (a.dx || a.dweight || a.dbias) status = launch_backward_runs(a, p, device, stream);
    if (status != GT_OK || !a.dstate_in) return status;
    status = launch_backward_states(a, p, plan, stream);
    if (status != GT_OK || !sums_states(a)) return status;
    return reduce_rows(plan.dstate, a.dstate_in, plan.state_rows, a.D * (a.W - 1), a.accumulate, stream);
}

/* ---- dispatch and checks --------------------------------------------------------------------- */

static inline gt_status prepare(gt_pass pass, const gt_conv1d_args* args, gt_conv1d_args* a,
                                Device* device) {
    gt_dims dims;
    const gt_status status = gt_prepare(gt_op_conv1d(), pass, GT_DEVICE, args, a, &dims);
    return status != GT_OK ? status : current_device(device);
}

} /* namespace conv1d */
} /* namespace gt */

#endif
