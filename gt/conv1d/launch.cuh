/* gt/conv1d/launch.cuh - conv1d on the current GPU: arguments checked, kernels chosen and launched. */
#ifndef GT_CONV1D_LAUNCH_CUH
#define GT_CONV1D_LAUNCH_CUH

#include "../base/reduce.cuh"
#include "bulk_rows_sm90.cuh"
#include "rows.cuh"
#include "state.cuh"
#include "step.cuh"
#include "whole_rows.cuh"
#include "table.h"

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
    in.x_stride = a.x_stride;
    in.state_in = a.state_in;
    in.state_in_shared = a.state_in_shared;
    in.sequences = sequences_of(a);
    return in;
}

static inline int size_of(gt_dtype dtype) { return dtype == GT_F32 ? 4 : 2; }

/* ---- how a call is cut ----------------------------------------------------------------------- */

/* A tensor of the call; data is NULL if the call lacks it. */
struct View {
    const void* data;
    gt_stride stride;
};

/* Whether in all tensors the tokens of a channel are neighbours (t stride 1), and channels are not. */
template <int COUNT>
static bool is_over_time(const View (&views)[COUNT]) {
    for (const View& v : views)
        if (v.data && (v.stride.t != 1 || v.stride.h == 1)) return false;
    return true;
}

/* The largest number of bytes that copies of all tensors can move at once: 16, 4, or those of an element. */
template <int COUNT>
static int granule_of(const gt_conv1d_args& a, const View (&views)[COUNT], bool over_time) {
    const int size = size_of(a.dtype);
    for (int granule = 16; granule > size; granule /= 4) {
        const int64_t count = granule / size;
        bool fits = true;
        for (const View& v : views) {
            if (!v.data) continue;
            fits =
                fits && (uintptr_t)v.data % (uintptr_t)granule == 0 && v.stride.b % count == 0 &&
                (over_time ? v.stride.t == 1 && v.stride.h % count == 0 : v.stride.h == 1 && v.stride.t % count == 0);
        }
        if (fits) return granule;
    }
    return size;
}

/* The length of runs with which all blocks are done soonest, if a multiprocessor works on `resident` blocks at a time.
 * Long runs read less twice; short ones give more blocks.  A run costs as much as its tokens and about 12 more.
 * channels: of a tile.  step: tokens of a stage, of which runs are multiples.  bytes: of shared memory, a warp. */
static inline Cut cut_for(int64_t B, int64_t T, int64_t D, int channels, int step, int bytes, int64_t resident,
                          const Device& device) {
    Cut cut = {};
    cut.tiles = (D + channels - 1) / channels;
    cut.warps = device.shared_bytes / bytes < WARPS ? device.shared_bytes / bytes : WARPS;
    resident *= device.multiprocessors;
    int64_t best = INT64_MAX;
    for (int run = step; run <= MAX_RUN; run += step) {
        const int64_t runs = T > run ? (T + run - 1) / run : 1, blocks = (B * runs + cut.warps - 1) / cut.warps;
        const int64_t waves = (blocks * cut.tiles + resident - 1) / resident, cost = waves * (run + 12);
        if (run > step && cost > best) continue;
        best = cost;
        cut.run = run;
        cut.runs = runs;
        cut.blocks = T > 0 ? blocks : 0;
    }
    return cut;
}

template <class L>
static Cut forward_cut_for(const gt_conv1d_args& a, const Device& device) {
    return cut_for(a.B, a.T, a.D, L::CHANNELS, L::TOKENS, FORWARD_BYTES<L>, FORWARD_BLOCKS<L>, device);
}

template <class L>
static Cut backward_cut_for(const gt_conv1d_args& a, const Device& device) {
    return cut_for(a.B, a.T, a.D, L::CHANNELS, L::TOKENS, BACKWARD_BYTES<L>, BACKWARD_BLOCKS<L>, device);
}

/* Whether the kernels for long rows serve a call: rows of a channel lie alike in all tensors. */
template <int COUNT>
static bool has_long_rows(const gt_conv1d_args& a, const View (&views)[COUNT]) {
    const int size = size_of(a.dtype), unit = 16 / size;
    if (a.T / unit < LEAST_UNITS || !is_over_time(views)) return false;
    const View& first = views[0]; /* x: every call has it */
    for (const View& v : views) {
        if (!v.data) continue;
        const bool alike = ((uintptr_t)v.data - (uintptr_t)first.data) % 16 == 0 && (uintptr_t)v.data % size == 0 &&
                           (v.stride.b - first.stride.b) % unit == 0 && (v.stride.h - first.stride.h) % unit == 0;
        if (!alike) return false;
    }
    return true;
}

/* As cut_for, for the kernels of rows.cuh.  A warp takes up to `most` segments.  It costs as much as their rounds, a
 * quarter each, and two more. */
static inline RowsCut rows_cut_for(const gt_conv1d_args& a, bool aligned, int most, int64_t resident,
                                   const Device& device) {
    RowsCut cut = {};
    const int unit = 16 / size_of(a.dtype), warps = ROWS_BLOCK / 32;
    const int64_t channels = a.seq_capacity > 0 ? (a.D + warps - 1) / warps * warps : a.B * a.D; /* of whole blocks */
    const int64_t units = (a.T + (aligned ? 1 : 2) * (unit - 1)) / unit; /* the first may lack tokens, too */
    resident *= device.multiprocessors;
    int64_t best = INT64_MAX;
    for (int rounds = 1; rounds <= MAX_ROUNDS; rounds++) {
        const int64_t segments = (units + 32 * rounds - 1) / (32 * rounds), all = channels * segments;
        for (int each = 1; each <= most; each++) {
            const int64_t blocks = (all + each * warps - 1) / (each * warps);
            const int64_t waves = (blocks + resident - 1) / resident, cost = waves * (each * (4 * rounds + 1) + 8);
            if (cost >= best) continue;
            best = cost;
            cut = {rounds, each, segments, blocks, (uint32_t)all};
        }
    }
    return cut;
}

static inline RowsCut backward_rows_cut_for(const gt_conv1d_args& a, bool aligned, const Device& device) {
    return rows_cut_for(a, aligned, 1, a.seq_capacity > 0 ? ROWS_BACKWARD_BLOCKS<true> : ROWS_BACKWARD_BLOCKS<false>,
                        device);
}

/* The same for forward of rows that are whole numbers of aligned units.  A segment costs as much as its rounds and two
 * more. */
static inline WholeRowsCut whole_rows_cut_for(const gt_conv1d_args& a, const Device& device) {
    WholeRowsCut cut = {};
    const int64_t units = a.T / (16 / size_of(a.dtype)), resident = WHOLE_ROWS_BLOCKS * device.multiprocessors;
    cut.lanes = 1;
    while (cut.lanes < units && cut.lanes < 32) cut.lanes *= 2;
    int64_t best = INT64_MAX;
    for (int rounds = 1; rounds <= MAX_ROUNDS; rounds++) {
        const int64_t units_of_segment = (int64_t)cut.lanes * rounds;
        const int64_t segments = (units + units_of_segment - 1) / units_of_segment;
        const int64_t blocks = (a.B * a.D * segments * cut.lanes + ROWS_BLOCK - 1) / ROWS_BLOCK;
        const int64_t waves = (blocks + resident - 1) / resident, cost = waves * (rounds + 2);
        if (cost >= best) continue;
        best = cost;
        cut.rounds = rounds, cut.segments = segments, cut.blocks = blocks;
    }
    return cut;
}

/* Whether this build has the kernels of bulk_rows_sm90.cuh for the current device. */
static inline bool has_bulk_rows() {
    static Answers known = {};
    void (*const kernel)(BulkRowsParams) = forward_bulk_rows_kernel<bf16, 4, false>;
    return has_sm90a(reinterpret_cast<const void*>(kernel), ROWS_BLOCK, known);
}

/* The same for those: every warp that is resident takes as many pieces. */
static inline BulkRowsCut bulk_rows_cut_for(const gt_conv1d_args& a, const Device& device) {
    const int64_t piece = BULK_PIECE / size_of(a.dtype), pieces = (a.T + piece - 1) / piece, all = a.B * a.D * pieces;
    const int64_t resident = (int64_t)BULK_BLOCKS * BULK_WARPS * device.multiprocessors;
    const int64_t each = (all + resident - 1) / resident, of_block = each * BULK_WARPS;
    BulkRowsCut cut = {};
    cut.pieces = (uint32_t)pieces, cut.all = (uint32_t)all, cut.each = (uint32_t)each;
    cut.blocks = all > 0 ? (all + of_block - 1) / of_block : 0;
    return cut;
}

/* Strands of a kernel over states: one a sequence, but no more than fill the device. */
static inline int64_t strands_for(const gt_conv1d_args& a, const Device& device) {
    if (a.seq_capacity == 0) return a.B;
    const int64_t wanted = (8 * (int64_t)THREADS * device.multiprocessors + a.D - 1) / a.D;
    return a.seq_capacity < wanted ? a.seq_capacity : wanted;
}

static inline int64_t strand_blocks(const gt_conv1d_args& a, int64_t strands) {
    return (a.D * strands + THREADS - 1) / THREADS;
}

/* Bytes of shared memory for the borders of a block of the kernels of rows.cuh. */
static inline int border_bytes(const gt_conv1d_args& a, const RowsCut& cut) {
    return a.seq_capacity > 0 ? 4 * border_words(cut.rounds * 32 * 16 / size_of(a.dtype)) : 0;
}

/* Calls launch(std::true_type()) for a packed call, else launch(std::false_type()). */
template <class Launch>
static gt_status with_packed(const gt_conv1d_args& a, Launch launch) {
    return a.seq_capacity > 0 ? launch(std::true_type()) : launch(std::false_type());
}

/* Calls launch(T()) for the type of a dtype. */
template <class Launch>
static gt_status with_dtype(gt_dtype dtype, Launch launch) {
    if (dtype == GT_BF16) return launch(bf16());
    if (dtype == GT_F16) return launch(f16());
    return launch(float());
}

/* Calls launch(layout, width) for the kernel that serves a call. */
template <class T, class Launch>
static gt_status with_kernel(bool over_time, int W, Launch launch) {
    using Channels = Layout<T, false>;
    using Time = Layout<T, true>;
    constexpr std::integral_constant<int, 2> two{};
    constexpr std::integral_constant<int, 3> three{};
    constexpr std::integral_constant<int, 4> four{};
    if (W == 2) return over_time ? launch(Time(), two) : launch(Channels(), two);
    if (W == 3) return over_time ? launch(Time(), three) : launch(Channels(), three);
    return over_time ? launch(Time(), four) : launch(Channels(), four);
}

/* ---- forward --------------------------------------------------------------------------------- */

static inline gt_status launch_forward(const gt_conv1d_args& a, const Device& device, gt_stream stream) {
    ForwardParams p = {};
    p.in = problem_of(a);
    p.y = a.y;
    p.y_stride = a.y_stride;
    p.state_out = a.state_out;
    const View views[] = {{a.x, a.x_stride}, {a.y, a.y_stride}};
    const bool over_time = is_over_time(views);
    return with_dtype(a.dtype, [&](auto element) {
        using T = decltype(element);
        const gt_status status = with_kernel<T>(over_time, p.in.W, [&](auto layout, auto width) {
            using L = decltype(layout);
            if constexpr (L::OVER_TIME) {
                constexpr int W = decltype(width)::value;
                const bool is_aligned = granule_of(a, views, true) == 16;
                const bool is_whole = is_aligned && a.T % (16 / size_of(a.dtype)) == 0;
                if (has_long_rows(a, views) && is_whole && !has_bulk_rows() && a.seq_capacity == 0) {
                    const WholeRowsParams rows = {p, whole_rows_cut_for(a, device)};
                    return run("conv1d forward_whole_rows_kernel", forward_whole_rows_kernel<T, W>, rows.rows.blocks,
                               ROWS_BLOCK, 0, stream, rows);
                }
                if (has_long_rows(a, views))
                    return with_packed(a, [&](auto is_packed) {
                        constexpr bool PACKED = decltype(is_packed)::value;
                        if (is_whole && has_bulk_rows()) {
                            const BulkRowsParams rows = {p, bulk_rows_cut_for(a, device)};
                            return run("conv1d forward_bulk_rows_kernel", forward_bulk_rows_kernel<T, W, PACKED>,
                                       rows.rows.blocks, ROWS_BLOCK, BULK_SMEM<T, PACKED>, stream, rows);
                        }
                        const ForwardRowsParams rows = {
                            p, rows_cut_for(a, is_aligned, PACKED ? 1 : MAX_EACH, ROWS_FORWARD_BLOCKS<PACKED>, device)};
                        return run("conv1d forward_rows_kernel", forward_rows_kernel<T, W, PACKED>, rows.rows.blocks,
                                   ROWS_BLOCK, ROWS_STAGES * FORWARD_STAGE + border_bytes(a, rows.rows), stream, rows);
                    });
            }
            p.cut = forward_cut_for<L>(a, device);
            p.cut.granule = granule_of(a, views, over_time);
            p.cut.is_whole = p.cut.granule == 16 && a.D % L::VEC == 0;
            return run("conv1d forward_kernel", forward_kernel<L, decltype(width)::value>, p.cut.blocks * p.cut.tiles,
                       32 * p.cut.warps, p.cut.warps * FORWARD_BYTES<L>, stream, p);
        });
        const bool has_states = a.state_out && (a.seq_capacity > 0 || a.T == 0);
        if (status != GT_OK || !has_states) return status;
        const StateParams states = {p.in, a.state_out, strands_for(a, device)};
        return run("conv1d state_kernel", state_kernel<T>, strand_blocks(a, states.strands), THREADS, 0, stream,
                   states);
    });
}

template <class T, int VEC>
static gt_status launch_step_with(const gt_conv1d_args& a, const StepParams& p, gt_stream stream) {
    return run("conv1d step_kernel", step_kernel<T, VEC>, (a.B * (a.D / VEC) + THREADS - 1) / THREADS, THREADS, 0,
               stream, p);
}

static inline gt_status launch_step(const gt_conv1d_args& a, gt_stream stream) {
    StepParams p = {};
    p.in = problem_of(a);
    p.in.state_in = a.state_out;
    p.y = a.y;
    p.y_stride = a.y_stride;
    p.state_out = a.state_out;
    p.slots = a.slots;
    p.slot_capacity = a.slot_capacity;
    int vec = 4; /* channels that one load can move */
    for (const View& v : {View{a.x, a.x_stride}, View{a.y, a.y_stride}})
        while (vec > 1 && (a.D % vec || (uintptr_t)v.data % (uintptr_t)(vec * size_of(a.dtype)) || v.stride.h != 1 ||
                           v.stride.b % vec || v.stride.t % vec))
            vec /= 2;
    return with_dtype(a.dtype, [&](auto element) {
        using T = decltype(element);
        if (vec == 4) return launch_step_with<T, 4>(a, p, stream);
        if (vec == 2) return launch_step_with<T, 2>(a, p, stream);
        return launch_step_with<T, 1>(a, p, stream);
    });
}

/* ---- backward -------------------------------------------------------------------------------- */

/* Backward's workspace, as large as any alignment and strides may need. */
struct BackwardPlan {
    float *dweight, *dbias, *dstate;
    int64_t state_rows; /* of dstate */
    size_t bytes;
};

static inline bool sums_states(const gt_conv1d_args& a) { return a.dstate_in && a.state_in_shared; }

static inline BackwardPlan plan_backward(const gt_conv1d_args& a, const Device& device) {
    BackwardPlan plan = {};
    Arena arena(a.workspace);
    const int64_t channels = a.dtype == GT_F32 ? backward_cut_for<Layout<float, false>>(a, device).blocks
                                               : backward_cut_for<Layout<bf16, false>>(a, device).blocks;
    const int64_t time = a.dtype == GT_F32 ? backward_cut_for<Layout<float, true>>(a, device).blocks
                                           : backward_cut_for<Layout<bf16, true>>(a, device).blocks;
    int64_t rows = channels > time ? channels : time;
    for (int aligned = 0; aligned < 2; aligned++) {
        const RowsCut cut = backward_rows_cut_for(a, aligned, device);
        if (a.B * cut.segments > rows) rows = a.B * cut.segments;
    }
    plan.state_rows = strands_for(a, device);
    if (a.dweight) plan.dweight = arena.take<float>(rows * a.D * a.W);
    if (a.dbias) plan.dbias = arena.take<float>(rows * a.D);
    if (sums_states(a)) plan.dstate = arena.take<float>(plan.state_rows * a.D * (a.W - 1));
    plan.bytes = arena.bytes();
    return plan;
}

/* The kernels of a call are a chain; dweight, dbias and a shared state's gradient are summed by one. */
static inline gt_status launch_backward(const gt_conv1d_args& a, const BackwardPlan& plan, const Device& device,
                                        gt_stream stream) {
    Chain chain = {stream};
    BackwardParams p = {};
    p.in = problem_of(a);
    p.dy = a.dy;
    p.dy_stride = a.dy_stride;
    p.dstate_out = a.dstate_out;
    p.dx = a.dx;
    p.dx_stride = a.dx_stride;
    p.dweight = plan.dweight;
    p.dbias = plan.dbias;
    const View views[] = {{a.x, a.x_stride}, {a.dy, a.dy_stride}, {a.dx, a.dx_stride}};
    const bool over_time = is_over_time(views);
    return with_dtype(a.dtype, [&](auto element) {
        using T = decltype(element);
        gt_status status = GT_OK;
        int64_t rows = 0;
        if (a.dx || a.dweight || a.dbias)
            status = with_kernel<T>(over_time, p.in.W, [&](auto layout, auto width) {
                using L = decltype(layout);
                if constexpr (L::OVER_TIME) {
                    if (has_long_rows(a, views))
                        return with_packed(a, [&](auto is_packed) {
                            constexpr bool PACKED = decltype(is_packed)::value;
                            const BackwardRowsParams rowwise = {
                                p, backward_rows_cut_for(a, granule_of(a, views, true) == 16, device)};
                            rows = a.B * rowwise.rows.segments;
                            return run("conv1d backward_rows_kernel",
                                       backward_rows_kernel<T, decltype(width)::value, PACKED>, rowwise.rows.blocks,
                                       ROWS_BLOCK, ROWS_STAGES * BACKWARD_STAGE + border_bytes(a, rowwise.rows), chain,
                                       rowwise);
                        });
                }
                p.cut = backward_cut_for<L>(a, device);
                p.cut.granule = granule_of(a, views, over_time);
                p.cut.is_whole = p.cut.granule == 16 && a.D % L::VEC == 0;
                rows = p.cut.blocks;
                return run("conv1d backward_kernel", backward_kernel<L, decltype(width)::value>,
                           p.cut.blocks * p.cut.tiles, 32 * p.cut.warps, p.cut.warps * BACKWARD_BYTES<L>, chain, p);
            });
        if (status == GT_OK && a.dstate_in) {
            const BackwardStateParams states = {p, plan.state_rows, sums_states(a),
                                                sums_states(a) ? plan.dstate : a.dstate_in};
            status = run("conv1d backward_state_kernel", backward_state_kernel<T>, strand_blocks(a, states.strands),
                         THREADS, 0, chain, states);
        }
        if (status != GT_OK) return status;
        RowSums sums;
        if (a.dweight) sums.add(plan.dweight, a.dweight, rows, a.D * a.W);
        if (a.dbias) sums.add(plan.dbias, a.dbias, rows, a.D);
        if (sums_states(a)) sums.add(plan.dstate, a.dstate_in, plan.state_rows, a.D * (a.W - 1));
        return reduce_rows(sums, a.accumulate, chain);
    });
}

/* ---- dispatch and checks --------------------------------------------------------------------- */

static inline gt_status prepare(gt_pass pass, const gt_conv1d_args* args, gt_conv1d_args* a, Device* device) {
    gt_dims dims;
    const gt_status status = gt_prepare(gt_op_conv1d(), pass, GT_DEVICE, args, a, &dims);
    return status != GT_OK ? status : current_device(device);
}

} /* namespace conv1d */
} /* namespace gt */

#endif
