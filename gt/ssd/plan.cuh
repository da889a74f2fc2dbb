/* gt/ssd/plan.cuh - plans of ssd: where scratch lies, and the parameters of kernels.  If N > 128, launches take slabs
 * of 128 columns one after another (SLAB in problem.cuh); this file sets the parameters of each slab.  It has no
 * kernels and no launches.  conv_ssd includes it without launch.cuh, because conv_ssd's own kernel runs on the plan of
 * forward. */
#ifndef GT_SSD_PLAN_CUH
#define GT_SSD_PLAN_CUH

#include "../recurrence/driver.cuh"
#include "any/block.cuh"
#include "choice.cuh"
#include "sm90/block.cuh"
#include "sm90/gradients_block.cuh"

namespace gt {
namespace ssd {

/* ---- from values to types --------------------------------------------------------------------------------------- */

/* Calls launch() with the first of these numbers that is at least n, or else with the last number. */
template <int FIRST, int... MORE, class Launch>
static inline gt_status with_size(int n, const Launch& launch) {
    if constexpr (sizeof...(MORE) > 0)
        if (n > FIRST) return with_size<MORE...>(n, launch);
    return launch(std::integral_constant<int, FIRST>());
}

/* Calls launch() with the first of these numbers of columns that is at least n and that this build has a kernel for.
 * If the build leaves out a kernel, the next larger kernel takes its columns.  FROM: the number before FIRST. */
template <int FROM, int FIRST, int... MORE, class Launch>
static inline gt_status with_columns_from(int n, [[maybe_unused]] const Launch& launch) {
    if constexpr (is_built_columns<FROM, FIRST>())
        if (n <= FIRST) return launch(std::integral_constant<int, FIRST>());
    if constexpr (sizeof...(MORE) > 0)
        return with_columns_from<FIRST, MORE...>(n, launch);
    else
        return gt_fail(GT_ERROR_UNSUPPORTED, "this build has no kernel for %d columns", n);
}
template <int... COLUMNS, class Launch>
static inline gt_status with_columns(int n, const Launch& launch) {
    return with_columns_from<0, COLUMNS...>(n, launch);
}

/* Calls launch(T()) with the type of 16-bit activations. */
template <class Launch>
static inline gt_status with_type(const Problem& in, const Launch& launch) {
    return in.dtype == GT_BF16 ? with_built<bf16>(launch) : with_built<f16>(launch);
}

/* Calls launch(T(), number of columns), for MMA and SM90 kernels with 16-bit activations. */
template <class Launch>
static inline gt_status dispatch_columns(const Problem& in, const Launch& launch) {
    return with_type(in, [&](auto type) {
        return with_columns<16, 32, 64, 128>(in.columns, [&](auto columns) { return launch(type, columns); });
    });
}

/* Calls launch(number of columns), for MMA and SM90 kernels with fp32 activations. */
template <int... COLUMNS, class Launch>
static inline gt_status dispatch_fp32(const Problem& in, const Launch& launch) {
    return with_built<float>([&](auto) { return with_columns<COLUMNS...>(in.columns, launch); });
}

/* ---- blocks ----------------------------------------------------------------------------------------------------- */

/* ANY: the number of strands, that is, of blocks for each tile and head.  There is one strand per segment, unless the
 * grid would exceed `room` blocks. */
static inline int64_t strands_for(const Problem& in, int64_t room) {
    return strands(most_sequences(in.sequences) * in.segments.count, in.H * in.tiles, room);
}

/* ANY: the number of blocks in the grid of a pass whose blocks have no scratch. */
static inline int64_t pass_blocks(const Problem& in, const Device& device) {
    return strands_for(in, grid_room(in.sequences, 32, device)) * in.H * in.tiles;
}

/* The number of blocks of a launch with `units` units per block; sets in.bundles. */
static inline int64_t take_bundles(Problem& in, int units, int64_t strands) {
    set_bundles(in, units, strands);
    return strands * in.G * group_bundles(in, units);
}

/* ---- scratch ---------------------------------------------------------------------------------------------------- */

static inline Segments take_segments(Arena& arena, const gt_ssd_args& a, int64_t count, bool wanted = false) {
    return cut_segments(arena, sequences_of(a), count, CHECKPOINT, a.H * a.P * a.N, a.H, wanted);
}

static inline ScanParams scan_of(const Problem& in, const float* state_in, int state_in_shared) {
    return {in.sequences, in.segments, CHECKPOINT, state_in, state_in_shared, in.H * in.P * in.N, in.H, nullptr};
}

/* Takes memory for the order of packed sequences, if the call ranks them by length; else returns NULL. */
static inline int32_t* take_order(Arena& arena, const gt_ssd_args& a, const Choice& choice) {
    return choice.ranks ? arena.take<int32_t>(a.seq_capacity) : nullptr;
}

/* Takes memory for the partial sums of y or dx that the launch of a slab hands to the next.  Returns NULL if there is
 * one slab. */
static inline float* take_share(Arena& arena, const gt_ssd_args& a) {
    return slabs((int)a.N) > 1 ? arena.take<float>(a.B * a.T * a.H * a.P) : nullptr;
}

/* The number of tiles of B and C in a call: two tiles, B and C, for each chunk slot and group. */
static inline int64_t group_tiles(const Sequences& q, int64_t G) {
    return q.B * chunk_slots(q, CHECKPOINT) * 2 * G * 2;
}

static inline GroupTiles take_group_tiles(Arena& arena, const Sequences& q, int64_t G, int columns) {
    const int64_t tiles = group_tiles(q, G);
    f16* const values = arena.take<f16>(tiles * CHUNK * columns);
    return {values, arena.take<float>(tiles * CHUNK)};
}

/* Takes memory for B and C as f16 if forward_maps_kernel supports the sizes; else returns NULL pointers. */
static inline GroupTiles take_groups(Arena& arena, const gt_ssd_args& a, const Problem& in, int units) {
    return has_sizes_of_maps(a, in, units) ? take_group_tiles(arena, sequences_of(a), a.G, SLAB) : GroupTiles();
}

/* The number of places of gate_kernel (sm90/gate.cuh).  A place is one chunk of a head and a tile of 64 rows. */
static inline int64_t gate_places(const gt_ssd_args& a) {
    return checkpoint_slots(a) * SLOT_CHUNKS * ((a.P + TILE_P - 1) / TILE_P);
}

/* Finds memory for g = dy silu(z): the memory of dx, or workspace if dx is NULL.  The caller passes dx only if all
 * kernels read g before they overwrite it. */
static inline GatedRows take_gated_rows(Arena& arena, const gt_ssd_args& a, void* dx, const gt_stride& dx_stride) {
    const int64_t row = a.H * a.P;
    GatedRows g = {dx, dx_stride, arena.take<float>(gate_places(a) * BLOCKS)};
    if (!dx) g.rows = arena.take<f16>(a.B * a.T * row), g.stride = {a.T * row, row, a.P};
    return g;
}

/* Returns `in` with g in place of dy. */
static inline Problem with_gated_rows(Problem in, const GatedRows& g) {
    in.z = nullptr;
    in.dy = g.rows, in.dy_stride = g.stride, in.dy_inverses = g.inverses;
    return in;
}

/* ---- tensor maps ------------------------------------------------------------------------------------------------ */

/* Makes a tensor map of checkpoints.  A box has `rows` rows by 64 columns. */
static inline gt_status map_states(TensorMap* map, const Checkpoints& states, const Problem& in, int64_t slots,
                                   int rows) {
    TensorShape shape = {
        {in.columns, in.P, in.sequences.B * in.H * slots}, {in.N, (int64_t)in.P * in.N}, {64, rows, 1}, true};
    if (!states.values) shape.size[0] = 8, shape.size[1] = shape.size[2] = 1;
    /* without checkpoints, kernels read only boxes outside the map, which are zeros; so any valid address will do */
    const f16* data = states.values ? states.values : static_cast<const f16*>(in.x);
    return report(make_tensor_map(map, data, shape), "ssd cuTensorMapEncodeTiled");
}

/* Makes a tensor map of rows_shape().  has_rows() must be true. */
static inline gt_status map_rows(TensorMap* map, const void* data, const gt_stride& stride, const Problem& in) {
    return report(make_tensor_map(map, static_cast<const f16*>(data), rows_shape(stride, in)),
                  "ssd cuTensorMapEncodeTiled");
}

/* Makes the tensor maps by which the SM90 forward kernel stores y and checkpoints. */
static inline gt_status map_outputs(HopperForwardParams& p, bool y_by_map) {
    const int64_t slots = chunk_slots(p.in.sequences, CHECKPOINT);
    p.y_map = p.checkpoint_map = TensorMap();
    p.has_y_map = y_by_map;
    const gt_status status = y_by_map ? map_rows(&p.y_map, p.y, p.y_stride, p.in) : GT_OK;
    if (status != GT_OK || !p.checkpoints.values || slots == 0) return status;
    return map_states(&p.checkpoint_map, p.checkpoints, p.in, slots, 16);
}

/* ---- forward ---------------------------------------------------------------------------------------------------- */

/* The plan of a forward call. */
struct ForwardPlan {
    static constexpr const char* CLEAR = "ssd clear_unused_kernel";
    Choice choice;
    Sequences sequences;
    ClearParams unused;
    TensorParams tensor;
    ForwardParams any;
    size_t bytes, saved;

    gt_status pass(const Device& device, Chain& chain) const; /* defined in launch.cuh */
};

/* Takes the scratch of forward on tensor cores. */
static inline void take_forward(Arena& arena, const gt_ssd_args& a, const Choice& choice, TensorParams& p) {
    p.in = problem_of(a);
    p.in.segments = take_segments(arena, a, choice.segments);
    p.share = take_share(arena, a);
    p.in.order = take_order(arena, a, choice);
    p.groups = take_groups(arena, a, p.in, choice.forward.units);
}

/* The workspace of forward.  It suffices for ANY and for tensor cores.  The alignment of tensors decides between them,
 * but a query may lack the tensors. */
static inline size_t forward_workspace(const gt_ssd_args& a, const Choice& choice) {
    Arena of_any(nullptr), of_tensor(nullptr);
    TensorParams unused;
    take_segments(of_any, a, choice.any_segments);
    if (choice.has_tensor_sizes) take_forward(of_tensor, a, choice, unused);
    return of_any.bytes() > of_tensor.bytes() ? of_any.bytes() : of_tensor.bytes();
}

static inline ForwardPlan plan_forward(const gt_ssd_args& a, const Choice& choice, const Device&) {
    ForwardPlan plan = {};
    Arena arena(a.workspace), saved(choice.saves_states ? a.saved : nullptr);
    const Checkpoints checkpoints = choice.saves_states ? take_checkpoints(saved, a) : Checkpoints();
    plan.choice = choice;
    plan.sequences = sequences_of(a, a.state_out_stride);
    add_output(plan.unused, a.y, a.y_stride, a.dtype, a.H, a.P);
    if (choice.on_tensor_cores) {
        TensorParams& p = plan.tensor;
        take_forward(arena, a, choice, p);
        plan.unused.order = const_cast<int32_t*>(p.in.order);
        p.y = a.y, p.y_stride = a.y_stride;
        p.state_in = a.state_in, p.state_in_shared = a.state_in_shared;
        p.state_out = a.state_out;
        p.checkpoints = checkpoints;
        p.snapshots = snapshots_of(a);
    } else {
        ForwardParams& p = plan.any;
        p.in = problem_of(a);
        p.in.segments = take_segments(arena, a, choice.any_segments);
        p.y = a.y, p.y_stride = a.y_stride;
        p.state_in = a.state_in, p.state_in_shared = a.state_in_shared;
        p.state_out = a.state_out;
        p.keeps_checkpoints = choice.saves_states && a.saved;
        p.checkpoints = checkpoints;
        p.snapshots = snapshots_of(a);
    }
    plan.bytes = forward_workspace(a, choice), plan.saved = saved.bytes();
    return plan;
}

/* ---- backward for any size -------------------------------------------------------------------------------------- */

struct AnyBackwardPlan {
    ForwardParams states; /* computes h again, if forward did not store it */
    BackwardParams params;
    GroupSumParams dB, dC; /* out is NULL: the caller does not want it */
    DeltaParams delta;
    int64_t blocks, windows; /* blocks: of backward_kernel; windows: stretches of 128 tokens in the call, for
                              * backward_delta_kernel */

    gt_status make_gradients(const Device& device, gt_stream stream) const; /* both are defined in any/launch.cuh */
    gt_status finish_chunks(gt_stream stream) const;
};

/* Plans backward by ANY.  saved: states that forward stored, or NULL pointers. */
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
    /* Every block has its own scratch for states, so the grid is limited to 16 blocks for each multiprocessor. */
    const int64_t strands = strands_for(s.in, 16 * (int64_t)device.multiprocessors);
    plan.blocks = strands * a.H * tiles;
    s.checkpoints = a.saved ? saved : take_checkpoints(arena, a);
    plan.states.state_in = a.state_in, plan.states.state_in_shared = a.state_in_shared;
    plan.states.checkpoints = s.checkpoints;
    plan.states.keeps_checkpoints = 1;
    dispatch_size(a.N, [&](auto traits) {
        using C = decltype(traits);
        s.scratch = arena.take<float>(plan.blocks * SUB_CHUNKS * TILE_P * C::WIDTH);
        /* rows of partial sums of dDskip: per channel, one row for every 64 threads; per head, one for every warp */
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

/* ---- backward on tensor cores ----------------------------------------------------------------------------------- */

/* The parameters of all launches of backward on MMA or SM90. */
struct TensorBackwardPlan {
    StatesParams forward, reverse; /* forward: computes h again, if the forward call did not store it; reverse: computes
                                    * G */
    TensorParams gate;             /* computes dz; without choice.gates_rows, this launch comes first and computes h,
                                    * too */
    Problem gated;                 /* the inputs from which g is computed */
    GatedRows g;                   /* if choice.gates_rows */
    GateGradient gradient;         /* if choice.gates_by_y */
    ChunkGradientParams chunks;
    SplitGradientParams split; /* replaces `chunks` with fp32 activations */
    ChunkTimesParams times;
    int32_t* order;     /* the order of packed sequences, or NULL */
    TokenParams tokens; /* SM90 with 16-bit activations */
    Choice choice;
    bool makes_h, makes_G, makes_dz;
    int64_t rows; /* rows of the partial sums of a slab */

    /* Whether a launch comes before the launch that makes G. */
    bool has_first() const { return makes_h || makes_dz || choice.gates_rows; }
    /* defined in launch.cuh */
    gt_status make_dz(const Device& device, Chain& chain) const;
    gt_status make_states(const Device& device, Chain& chain) const;
    gt_status make_gradients(const Device& device, Chain& chain) const;
    gt_status make_chunks(const Device& device, Chain& chain) const;
    gt_status finish_chunks(const Device& device, Chain& chain) const;
};

/* The number of rows of a slab's partial sums: one for each chunk.  A slot, from one checkpoint to the next, has two
 * chunks. */
static inline int64_t slab_rows(const ChunkGradientParams& p) { return p.in.sequences.B * p.slots * 2; }

/* Plans the gradients of chunks with fp32 activations: partial sums, and the kernel that then computes ddt for each
 * token.  c has all parameters but the states. */
static inline void plan_split_chunks(const gt_ssd_args& a, Arena& arena, const ChunkGradientParams& c, RowSums& sums,
                                     TensorBackwardPlan& plan) {
    SplitGradientParams& s = plan.split;
    ChunkTimesParams& t = plan.times;
    const int64_t slots = a.B * c.slots;
    s.in = t.in = c.in;
    s.slots = t.slots = c.slots;
    s.state_step = c.slots * a.P * a.N;
    s.dskip = sums.take(arena, a.dDskip, slots * SLOT_SHORTS, a.H * (a.Dskip_per_channel ? a.P : 1));
    s.dx = static_cast<float*>(a.dx), s.dBm = static_cast<float*>(a.dBm), s.dCm = static_cast<float*>(a.dCm);
    s.dx_stride = a.dx_stride, s.dBm_stride = a.dBm_stride, s.dCm_stride = a.dCm_stride;
    t.dA = sums.take(arena, a.dA, slots, a.H);
    t.dbias = sums.take(arena, a.ddt_bias, slots, a.H);
    t.ddt = a.ddt, t.ddt_stride = a.ddt_stride;
    if (!a.ddt && !a.dA && !a.ddt_bias) return;
    t.da = s.da = arena.take<float>(a.B * a.T * a.H);
    t.direct = s.direct = arena.take<float>(a.B * a.T * a.H);
    t.across = s.across = arena.take<float>(slots * SLOT_SHORTS * Across::COUNT * a.H);
}

/* Reserves scratch with one entry per token.  The SM90 kernels use it for gradients of chunks with 16-bit
 * activations. */
static inline TokenParams plan_tokens(const gt_ssd_args& a, Arena& arena, const Problem& in, int64_t rows,
                                      const Choice& choice) {
    TokenParams t = {};
    const int slab_count = slabs((int)a.N);
    const int64_t steps = rows * a.H * in.tiles * slab_count;
    t.rows = rows;
    t.records = choice.gates_rows ? in.tiles : 1;
    t.has_powers = a.dtype == GT_F16 || choice.gates_rows;
    const bool in_records = t.records == in.tiles && slab_count == 1;
    const int own = t.has_powers ? ChunkTokens<true>::OWN : ChunkTokens<false>::OWN;
    t.record_count = t.has_powers ? ChunkTokens<true>::COUNT : ChunkTokens<false>::COUNT;
    if (in_records && t.record_count < own + chunk_sums(in)) t.record_count = own + chunk_sums(in);
    t.tokens = arena.take<float>(rows * a.H * t.records * t.record_count);
    t.sums_count = in_records ? t.record_count : chunk_sums(in);
    if (!in_records)
        t.sums = arena.take<float>(steps * t.sums_count);
    else if (t.tokens)
        t.sums = t.tokens + own;
    t.inverses = arena.take<float>(steps * 8);
    return t;
}

/* Plans backward by MMA and SM90.  saved: states that forward stored, or NULL pointers. */
static inline TensorBackwardPlan plan_tensor_backward(const gt_ssd_args& a, Arena& arena, const Checkpoints& saved,
                                                      RowSums& sums, const Choice& choice, const Device& device) {
    TensorBackwardPlan plan = {};
    ChunkGradientParams& c = plan.chunks;
    plan.choice = choice;
    c.in = problem_of(a);
    c.in.segments = take_segments(arena, a, choice.segments);
    c.slots = chunk_slots(c.in.sequences, CHECKPOINT);
    c.by_tiles = (uint32_t)(((1ull << 32) + c.in.tiles - 1) / c.in.tiles);
    c.in.order = plan.order = take_order(arena, a, choice);
    /* If a sequence is one slot, the states before and after this slot are the caller's own, and need no
     * checkpoints. */
    const bool one_slot = a.T <= CHECKPOINT, shared = a.dstate_in && a.state_in_shared;
    plan.makes_h = !a.saved && !(one_slot && !a.state_in);
    plan.makes_G = !one_slot || a.dstate_out || a.dstate_in;
    plan.makes_dz = a.z && a.dz;
    if (plan.makes_h) c.h = take_checkpoints(arena, a);
    if (plan.makes_G) c.G = take_checkpoints(arena, a);
    plan.rows = slab_rows(c);
    const int slab_count = slabs((int)a.N);
    const bool is_split = a.dtype == GT_F32;
    if (is_split) {
        plan_split_chunks(a, arena, c, sums, plan);
    } else {
        /* With several slabs, the rows of one slab follow the rows of another.  PackedRows cannot describe that, so all
         * rows are added up. */
        const PackedRows used = slab_count > 1 ? PackedRows() : packed_rows(c.in.sequences, CHECKPOINT, 2);
        c.dA = sums.take(arena, a.dA, plan.rows * slab_count, a.H, used);
        c.dbias = sums.take(arena, a.ddt_bias, plan.rows * slab_count, a.H, used);
        c.dskip = sums.take(arena, a.dDskip, plan.rows, a.H * (a.Dskip_per_channel ? a.P : 1), used);
    }
    plan.reverse.state_sum =
        sums.take(arena, shared ? a.dstate_in : nullptr, strands_of(c.in, choice.reverse, device), a.H * a.P * a.N);
    if (is_split)
        c.dx_share = plan.makes_dz ? take_share(arena, a) : nullptr; /* for dz only: with fp32, dx itself holds its
                                                                      * partial sums */
    else if ((a.dx || plan.makes_dz) &&
             slab_count > 1) /* for dx, 64 by 64 numbers for every chunk, head and tile; the size suffices for dz,
                              * too */
        c.dx_share = arena.take<float>(plan.rows * CHUNK * a.H * c.in.tiles * TILE_P);
    if (!is_split && choice.chunks == Family::SM90) plan.tokens = plan_tokens(a, arena, c.in, plan.rows, choice);
    if (a.ddt && slab_count > 1 && !is_split) c.ddt_share = arena.take<float>(plan.rows * CHUNK * a.H);

    if (choice.gates_rows) {
        plan.g = take_gated_rows(arena, a, choice.gates_in_dx ? a.dx : nullptr, a.dx_stride);
        plan.gated = c.in;
        if (choice.gates_by_y)
            plan.gradient = {a.y, a.dz, a.y_stride, a.dz_stride, arena.take<int32_t>(gate_places(a))};
    }

    plan.forward.in = plan.reverse.in = plan.gate.in = c.in;
    if (choice.gates_rows) plan.reverse.in = with_gated_rows(c.in, plan.g);
    plan.forward.state_in = plan.gate.state_in = a.state_in;
    plan.forward.state_in_shared = plan.gate.state_in_shared = a.state_in_shared;
    plan.forward.checkpoints = c.h;
    if (!choice.gates_rows) plan.gate.checkpoints = c.h;
    plan.gate.y = a.dz;
    plan.gate.y_stride = a.dz_stride;
    plan.gate.share = c.dx_share; /* dz uses this memory before or after dx does */
    plan.gate.makes_dz = 1;
    plan.reverse.state_in = a.dstate_out;
    plan.reverse.state_out = shared ? nullptr : a.dstate_in;
    plan.reverse.checkpoints = c.G;
    if (a.saved) c.h = saved;
    plan.split.h = c.h, plan.split.G = c.G;
    if (!a.dx) c.dx_share = nullptr;
    c.dx = a.dx, c.ddt = a.ddt, c.dBm = a.dBm, c.dCm = a.dCm;
    c.dx_stride = a.dx_stride, c.ddt_stride = a.ddt_stride, c.dBm_stride = a.dBm_stride, c.dCm_stride = a.dCm_stride;
    if (choice.gates_rows && choice.chunks == Family::SM90) c.in = with_gated_rows(c.in, plan.g);
    plan.tokens.chunk = c;
    return plan;
}

/* ---- backward --------------------------------------------------------------------------------------------------- */

struct BackwardPlan {
    static constexpr const char* CLEAR = "ssd clear_unused_kernel";
    Sequences sequences;
    ClearParams unused;
    bool has_states, on_tensor_cores;
    TensorBackwardPlan tensor;
    AnyBackwardPlan any;
    RowSums sums;
    int accumulate;
    size_t bytes, saved;

    /* defined in launch.cuh */
    gt_status make_states(const Device& device, Chain& chain) const;
    gt_status make_gradients(const Device& device, Chain& chain) const;
    gt_status finish_chunks(const Device& device, Chain& chain) const;
};

/* The arguments of backward, with y = NULL unless backward reads y. */
static inline gt_ssd_args backward_args(gt_ssd_args a) {
    if (!a.reads_y || !a.z || !a.dz) a.y = nullptr; /* so y of forward cannot influence the choice */
    a.snapshots = nullptr;                          /* nor can snapshots, which a size query may have */
    return a;
}

static inline BackwardPlan plan_backward(const gt_ssd_args& args, const Choice& choice, const Device& device) {
    BackwardPlan plan = {};
    gt_ssd_args a = backward_args(args);
    if (!choice.saves_states) a.saved = nullptr;
    Arena arena(a.workspace), saved(const_cast<void*>(static_cast<const void*>(a.saved)));
    const Checkpoints states = choice.saves_states ? take_checkpoints(saved, a) : Checkpoints();
    plan.sequences = sequences_of(a);
    plan.accumulate = a.accumulate;
    plan.on_tensor_cores = choice.on_tensor_cores;
    add_output(plan.unused, a.dx, a.dx_stride, a.dtype, a.H, a.P);
    add_output(plan.unused, a.dz, a.dz_stride, a.dtype, a.H, a.P);
    if (plan.on_tensor_cores) {
        plan.tensor = plan_tensor_backward(a, arena, states, plan.sums, choice, device);
        plan.has_states = !plan.tensor.has_first();
        plan.unused.order = plan.tensor.order;
        add_output(plan.unused, a.ddt, a.ddt_stride, a.dt_dtype, a.H, 1);
        add_output(plan.unused, a.dBm, a.dBm_stride, a.dtype, a.G, a.N);
        add_output(plan.unused, a.dCm, a.dCm_stride, a.dtype, a.G, a.N);
    } else {
        plan.any = plan_any_backward(a, arena, states, plan.sums, choice, device);
        plan.has_states = a.saved;
    }
    plan.bytes = arena.bytes(), plan.saved = saved.bytes();
    return plan;
}

/* ---- slabs of columns ------------------------------------------------------------------------------------------- */

/* Moves a pointer to rows by `columns` columns, to the first column of a launch.  The pointer may be NULL. */
template <class T>
static inline void skip_columns(T*& rows, int columns) {
    if (rows) rows += columns;
}

/* Sets the parameters for the launch of slab `slab`: every tensor with columns of states begins at the slab's first
 * column. */
static inline void take_slab(Problem& in, int slab) {
    const int bytes = in.dtype == GT_F32 ? 4 : 2;
    const auto move = [&](const void* rows) -> const void* {
        return rows ? static_cast<const char*>(rows) + slab * SLAB * bytes : nullptr;
    };
    in.columns = in.N - slab * SLAB < SLAB ? in.N - slab * SLAB : SLAB;
    in.Bm = move(in.Bm);
    in.Cm = move(in.Cm);
    skip_columns(in.segments.states, slab * SLAB);
}

static inline void take_slab(Checkpoints& checkpoints, int slab) {
    skip_columns(checkpoints.plain, slab * SLAB);
    skip_columns(checkpoints.values, slab * SLAB);
    if (checkpoints.values) checkpoints.powers += slab;
}

static inline void take_slab(StatesParams& p, int slab) {
    take_slab(p.in, slab);
    take_slab(p.checkpoints, slab);
    skip_columns(p.state_in, slab * SLAB);
    skip_columns(p.state_out, slab * SLAB);
    skip_columns(p.state_sum, slab * SLAB);
}

static inline void take_slab(TensorParams& p, int slab) {
    take_slab(p.in, slab);
    take_slab(p.checkpoints, slab);
    skip_columns(p.state_in, slab * SLAB);
    skip_columns(p.state_out, slab * SLAB);
    skip_columns(p.snapshots.data, slab * SLAB);
    p.has_share = slab > 0;
    p.leaves_share = slab + 1 < slabs(p.in.N);
}

static inline void take_slab(ChunkGradientParams& p, int slab) {
    const int64_t sums = slab * slab_rows(p) * p.in.H;
    take_slab(p.in, slab);
    take_slab(p.h, slab);
    take_slab(p.G, slab);
    if (p.dBm) p.dBm = static_cast<uint16_t*>(p.dBm) + slab * SLAB;
    if (p.dCm) p.dCm = static_cast<uint16_t*>(p.dCm) + slab * SLAB;
    if (p.dA) p.dA += sums;
    if (p.dbias) p.dbias += sums;
    p.has_share = slab > 0;
    p.leaves_share = slab + 1 < slabs(p.in.N);
    if (p.leaves_share) p.in.Dskip = p.dskip = nullptr; /* only the last slab adds Dskip x and dDskip */
}

/* take_slab() for fp32 activations.  All launches add to the same partial sums. */
static inline void take_slab(SplitGradientParams& p, int slab) {
    take_slab(p.in, slab);
    take_slab(p.h, slab);
    take_slab(p.G, slab);
    skip_columns(p.dBm, slab * SLAB);
    skip_columns(p.dCm, slab * SLAB);
    p.has_share = slab > 0;
    if (slab + 1 < slabs(p.in.N)) p.in.Dskip = p.dskip = nullptr; /* only the last launch adds Dskip x and dDskip */
}

/* Calls launch(parameters, slab) for every slab of columns. */
template <class Params, class Launch>
static inline gt_status each_slab(const Params& all, const Launch& launch) {
    gt_status status = GT_OK;
    for (int slab = 0; slab < slabs(all.in.N) && status == GT_OK; slab++) {
        Params p = all;
        take_slab(p, slab);
        status = launch(p, slab);
    }
    return status;
}

} /* namespace ssd */
} /* namespace gt */

#endif
