/* gt/conv1d/launch.cuh - conv1d on the current GPU: checks arguments, chooses kernels and launches them. */
#ifndef GT_CONV1D_LAUNCH_CUH
#define GT_CONV1D_LAUNCH_CUH

#include "../base/built.cuh"
#include "../base/reduce.cuh"
#include "bulk_rows_sm90.cuh"
#include "rows.cuh"
#include "state.cuh"
#include "step.cuh"
#include "whole_rows.cuh"
#include "table.h"

namespace gt {
namespace conv1d {

static inline int size_of(gt_dtype dtype) { return dtype == GT_F32 ? 4 : 2; }

/* ---- how a call is cut ----------------------------------------------------------------------- */

/* A tensor of the call; data is NULL if the call lacks it. */
struct View {
    const void* data;
    gt_stride stride;
};

/* Layout of a call's tensors. */
struct Form {
    bool over_time;      /* in every tensor the tokens of a channel are adjacent (t stride 1), and channels are not */
    int granule;         /* bytes of the largest copy that all tensors permit: 16, 4 or one element */
    bool has_long_rows;  /* rows are long and equally aligned in all tensors: kernels for long rows serve the call */
    bool has_whole_rows; /* besides, rows are aligned to 16 bytes and have a whole number of 16-byte units */
};

/* x is the first view, since every call has it. */
template <int COUNT>
static Form form_of(const gt_conv1d_args& a, const View (&views)[COUNT]) {
    const int size = size_of(a.dtype), unit = 16 / size;
    const auto fits = [](const View& v, int bytes, int64_t step, int64_t count) {
        return (uintptr_t)v.data % (uintptr_t)bytes == 0 && v.stride.b % count == 0 && step % count == 0;
    };
    /* An upper bound of the segments of all rows.  Kernels number segments in 32 bits, so it must be below 2^31. */
    const int64_t segments = gt_times(a.B * a.D, a.T / unit / 32 + 2);
    Form form = {true, 16, a.T / unit >= LEAST_UNITS && segments < INT32_MAX, false};
    for (const View& v : views)
        if (v.data && (v.stride.t != 1 || v.stride.h == 1)) form.over_time = false;
    for (const View& v : views) {
        if (!v.data) continue;
        const int64_t neighbours = form.over_time ? v.stride.t : v.stride.h;
        const int64_t step = form.over_time ? v.stride.h : v.stride.t;
        while (form.granule > size && (neighbours != 1 || !fits(v, form.granule, step, form.granule / size)))
            form.granule = form.granule / 4 > size ? form.granule / 4 : size;
        const int64_t apart = (int64_t)((uintptr_t)v.data - (uintptr_t)views[0].data);
        if (apart % 16 != 0 || (uintptr_t)v.data % size != 0 || (v.stride.b - views[0].stride.b) % unit != 0 ||
            (v.stride.h - views[0].stride.h) % unit != 0)
            form.has_long_rows = false;
    }
    form.has_long_rows = form.has_long_rows && form.over_time;
    form.has_whole_rows = form.has_long_rows && form.granule == 16 && a.T % unit == 0;
    return form;
}

/* Returns how often the blocks fill the device, if a multiprocessor runs `resident` blocks at a time. */
static inline int64_t waves(int64_t blocks, int64_t resident, const Device& device) {
    resident *= device.multiprocessors;
    return (blocks + resident - 1) / resident;
}

/* Chooses the run length (see tile.cuh) with which the launch ends soonest.  Long runs read fewer tokens twice; short
 * runs give more blocks.  The cost of a run is its number of tokens plus about 12.  bytes: shared memory of a warp. */
template <class L>
static Cut cut_for(const gt_conv1d_args& a, int granule, int bytes, int64_t resident, const Device& device) {
    Cut cut = {};
    cut.tiles = (a.D + L::CHANNELS - 1) / L::CHANNELS;
    cut.warps = device.shared_bytes / bytes < WARPS ? device.shared_bytes / bytes : WARPS;
    cut.granule = granule;
    cut.is_whole = granule == 16 && a.D % L::VEC == 0;
    int64_t best = INT64_MAX;
    for (int run = L::TOKENS; run <= MAX_RUN; run += L::TOKENS) { /* whole stages */
        const int64_t runs = a.T > run ? (a.T + run - 1) / run : 1, blocks = (a.B * runs + cut.warps - 1) / cut.warps;
        const int64_t cost = waves(blocks * cut.tiles, resident, device) * (run + 12);
        if (cost > best) continue;
        best = cost;
        cut.run = run, cut.runs = runs, cut.blocks = a.T > 0 ? blocks : 0;
    }
    return cut;
}

template <class L>
static Cut backward_cut_for(const gt_conv1d_args& a, int granule, const Device& device) {
    return cut_for<L>(a, granule, BACKWARD_BYTES<L>, BACKWARD_BLOCKS<L>, device);
}

/* Chooses the segment length of long rows (see rows.cuh) with which the launch ends soonest.  A warp takes up to `most`
 * segments.  The cost of a warp, in rounds: the rounds of its segments, a quarter round for each segment, and 2. */
static inline RowsCut rows_cut_for(const gt_conv1d_args& a, bool aligned, int most, int64_t resident,
                                   const Device& device) {
    RowsCut cut = {};
    const int unit = 16 / size_of(a.dtype), warps = ROWS_BLOCK / 32;
    /* in packed calls, rounded up to whole blocks */
    const int64_t channels = a.seq_capacity > 0 ? (a.D + warps - 1) / warps * warps : a.B * a.D;
    const int64_t units = (a.T + (aligned ? 1 : 2) * (unit - 1)) / unit; /* unaligned rows may begin inside a unit */
    int64_t best = INT64_MAX;
    for (int rounds = 1; rounds <= MAX_ROUNDS; rounds++) {
        const int64_t segments = (units + 32 * rounds - 1) / (32 * rounds), all = channels * segments;
        for (int each = 1; each <= most; each++) {
            const int64_t blocks = (all + each * warps - 1) / (each * warps);
            const int64_t cost = waves(blocks, resident, device) * (each * (4 * rounds + 1) + 8);
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

/* Bytes of shared memory that a block of rows.cuh needs for the borders of packed sequences (see borders.cuh). */
static inline int border_bytes(const gt_conv1d_args& a, const RowsCut& cut) {
    return a.seq_capacity > 0 ? 4 * border_words(cut.rounds * 32 * 16 / size_of(a.dtype)) : 0;
}

/* The cut for bulk_rows_sm90.cuh: every resident warp takes equally many pieces. */
static inline BulkRowsCut bulk_rows_cut_for(const gt_conv1d_args& a, const Device& device) {
    const int64_t piece = BULK_PIECE / size_of(a.dtype), pieces = (a.T + piece - 1) / piece, all = a.B * a.D * pieces;
    const int64_t each = waves(all, BULK_BLOCKS * BULK_WARPS, device), of_block = each * BULK_WARPS;
    return {(uint32_t)pieces, (uint32_t)all, (uint32_t)each, all > 0 ? (all + of_block - 1) / of_block : 0};
}

/* Calls launch(T()) for the type of a dtype.  Fails if this build has no kernels for that dtype. */
template <class Launch>
static gt_status with_dtype(gt_dtype dtype, Launch launch) {
    if (dtype == GT_BF16) return with_built<bf16>(launch);
    if (dtype == GT_F16) return with_built<f16>(launch);
    return with_built<float>(launch);
}

/* Calls launch with `value`, which is FIRST ... LAST, as a compile-time constant. */
template <int FIRST, int LAST, class Launch>
static gt_status with_constant(int value, Launch launch) {
    if constexpr (FIRST < LAST)
        if (value != FIRST) return with_constant<FIRST + 1, LAST>(value, launch);
    return launch(std::integral_constant<int, FIRST>());
}

/* ---- forward --------------------------------------------------------------------------------- */

template <class T, int W, bool PACKED>
static gt_status launch_forward_rows(const gt_conv1d_args& a, const Form& form, const ForwardParams& p,
                                     const Device& device, gt_stream stream) {
    if (form.has_whole_rows && device.runs_sm90a) {
        const BulkRowsParams rows = {p, bulk_rows_cut_for(a, device)};
        return run("conv1d forward_bulk_rows_kernel", forward_bulk_rows_kernel<T, W, PACKED>, rows.rows.blocks,
                   ROWS_BLOCK, BULK_SMEM<T, PACKED>, stream, rows);
    }
    if constexpr (!PACKED) {
        const ForwardRowsParams rows = {p, rows_cut_for(a, true, 1, WHOLE_ROWS_BLOCKS, device)};
        if (form.has_whole_rows)
            return run("conv1d forward_whole_rows_kernel", forward_whole_rows_kernel<T, W>, rows.rows.blocks,
                       ROWS_BLOCK, 0, stream, rows);
    }
    const ForwardRowsParams rows = {
        p, rows_cut_for(a, form.granule == 16, PACKED ? 1 : MAX_EACH, ROWS_FORWARD_BLOCKS<PACKED>, device)};
    return run("conv1d forward_rows_kernel", forward_rows_kernel<T, W, PACKED>, rows.rows.blocks, ROWS_BLOCK,
               ROWS_STAGES * FORWARD_STAGE + border_bytes(a, rows.rows), stream, rows);
}

static inline gt_status launch_forward(const gt_conv1d_args& a, const Device& device, gt_stream stream) {
    ForwardParams p = {};
    p.in = problem_of(a);
    p.y = a.y;
    p.y_stride = a.y_stride;
    p.state_out = a.state_out;
    const View views[] = {{a.x, a.x_stride}, {a.y, a.y_stride}};
    const Form form = form_of(a, views);
    ClearParams skipped = {};
    add_output(skipped, a.y, a.y_stride, a.dtype, 1, a.D, a.y_stride.h);
    return with_dtype(a.dtype, [&](auto element) {
        using T = decltype(element);
        gt_status status = with_constant<2, 4>(p.in.W, [&](auto width) {
            constexpr int W = decltype(width)::value;
            if (form.has_long_rows)
                return with_constant<0, 1>(a.seq_capacity > 0, [&](auto packed) {
                    return launch_forward_rows<T, W, decltype(packed)::value>(a, form, p, device, stream);
                });
            return with_constant<0, 1>(form.over_time, [&](auto over_time) {
                using L = Layout<T, decltype(over_time)::value>;
                p.cut = cut_for<L>(a, form.granule, FORWARD_BYTES<L>, FORWARD_BLOCKS<L>, device);
                return run("conv1d forward_kernel", forward_kernel<L, W>, p.cut.blocks * p.cut.tiles, 32 * p.cut.warps,
                           p.cut.warps * FORWARD_BYTES<L>, stream, p);
            });
        });
        const bool has_states = a.state_out && (a.seq_capacity > 0 || a.T == 0);
        if (status == GT_OK && has_states) status = launch_state<T>(a, device, stream);
        if (status != GT_OK) return status;
        return clear_skipped("conv1d clear_skipped_kernel", skipped, p.in.sequences, device, stream);
    });
}

static inline gt_status launch_step(const gt_conv1d_args& a, gt_stream stream) {
    if (a.T == 0) return GT_OK;
    StepParams p = {};
    p.in = problem_of(a);
    p.y = a.y;
    p.y_stride = a.y_stride;
    p.state = a.state_out;
    p.state_dtype = a.state_dtype, p.weight_dtype = a.weight_dtype;
    p.state_stride = a.state_out_stride;
    p.columns = a.state_columns;
    p.places = a.places;
    p.elements = step_elements_of(a);
    const bool has_rows = has_step_rows(a), has_fours = !has_rows && has_step_fours(a);
    const bool has_tiles = has_rows || has_fours;
    const int channels = has_tiles ? STEP_CHANNELS : THREADS, elements = has_tiles ? STEP_WARPS : 1; /* per block */
    const int64_t parts = (a.D + channels - 1) / channels, groups = (a.B + elements - 1) / elements;
    p.by_parts = divide_by((int)parts);
    return with_dtype(a.dtype, [&](auto element) {
        using T = decltype(element);
        if (has_fours) {
            void (*const kernel)(StepParams) = a.T == 1 ? step_fours_kernel<T, 1> : step_fours_kernel<T, STEP_BATCH>;
            return run("conv1d step_fours_kernel", kernel, parts * groups, THREADS, 0, stream, p);
        }
        return with_constant<2, 4>(p.in.W, [&](auto width) {
            constexpr int W = decltype(width)::value;
            if (!has_rows) return run("conv1d step_kernel", step_kernel<T, W>, parts * groups, THREADS, 0, stream, p);
            void (*const kernel)(StepParams) =
                a.T == 1 ? step_rows_kernel<T, W, 1> : step_rows_kernel<T, W, STEP_BATCH>;
            return run("conv1d step_rows_kernel", kernel, parts * groups, THREADS, STEP_ROWS_SMEM<W>, stream, p);
        });
    });
}

/* ---- backward -------------------------------------------------------------------------------- */

/* Workspace of backward.  Its size covers every kernel that backward may choose, for any alignment and strides. */
struct BackwardPlan {
    float *dweight, *dbias, *dstate;
    int64_t state_rows; /* rows of dstate */
    size_t bytes;
};

static inline bool sums_states(const gt_conv1d_args& a) { return a.dstate_in && a.state_in_shared; }

static inline BackwardPlan plan_backward(const gt_conv1d_args& a, const Device& device) {
    BackwardPlan plan = {};
    Arena arena(a.workspace);
    int64_t rows = 0;
    (void)with_dtype(a.dtype, [&](auto element) {
        using T = decltype(element);
        const int64_t channels = backward_cut_for<Layout<T, false>>(a, 16, device).blocks;
        const int64_t time = backward_cut_for<Layout<T, true>>(a, 16, device).blocks;
        rows = channels > time ? channels : time;
        return GT_OK;
    });
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

/* Launches the kernels of a call as a chain: a kernel's blocks may start before the kernel before it ends.  reduce_rows
 * adds the partial sums of dweight, dbias and a shared state's gradient in one kernel. */
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
    const Form form = form_of(a, views);
    return with_dtype(a.dtype, [&](auto element) {
        using T = decltype(element);
        int64_t rows = 0; /* rows of partial sums */
        const auto launch_rows = [&](auto width, auto packed) {
            const BackwardRowsParams segments = {p, backward_rows_cut_for(a, form.granule == 16, device)};
            rows = a.B * segments.rows.segments;
            return run("conv1d backward_rows_kernel",
                       backward_rows_kernel<T, decltype(width)::value, decltype(packed)::value>, segments.rows.blocks,
                       ROWS_BLOCK, ROWS_STAGES * BACKWARD_STAGE + border_bytes(a, segments.rows), chain, segments);
        };
        const auto launch_tiles = [&](auto width, auto over_time) {
            using L = Layout<T, decltype(over_time)::value>;
            p.cut = backward_cut_for<L>(a, form.granule, device);
            rows = p.cut.blocks;
            return run("conv1d backward_kernel", backward_kernel<L, decltype(width)::value>, p.cut.blocks * p.cut.tiles,
                       32 * p.cut.warps, p.cut.warps * BACKWARD_BYTES<L>, chain, p);
        };
        gt_status status = GT_OK;
        if (a.dx || a.dweight || a.dbias)
            status = with_constant<2, 4>(p.in.W, [&](auto width) {
                if (form.has_long_rows)
                    return with_constant<0, 1>(a.seq_capacity > 0,
                                               [&](auto packed) { return launch_rows(width, packed); });
                return with_constant<0, 1>(form.over_time,
                                           [&](auto over_time) { return launch_tiles(width, over_time); });
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
    gt_status status = gt_prepare(gt_op_conv1d(), pass, GT_DEVICE, args, a, &dims);
    if (status == GT_OK) status = check_built(a->dtype);
    return status != GT_OK ? status : current_device(device);
}

} /* namespace conv1d */
} /* namespace gt */

#endif
