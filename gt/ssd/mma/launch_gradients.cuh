/* gt/ssd/mma/launch_gradients.cuh - ssd backward on tensor cores: its plan and its launches. */
#ifndef GT_SSD_MMA_LAUNCH_GRADIENTS_CUH
#define GT_SSD_MMA_LAUNCH_GRADIENTS_CUH

#include "../sm90/fp32_gradients.cuh"
#include "../sm90/gradients.cuh"
#include "gradients.cuh"
#include "../sm90/launch.cuh"

namespace gt {
namespace ssd {

/* The parameters of all launches. */
struct TensorBackwardPlan {
    StatesParams forward, reverse; /* h where forward did not leave it; G */
    TensorParams gate;             /* dz; where there is no g it comes first, and makes h, too */
    Problem gated;                 /* what g is made of */
    GatedRows g;                   /* where choice.gates_rows */
    GateGradient gradient;         /* where choice.gates_by_y */
    ChunkGradientParams chunks;
    SplitGradientParams split; /* instead, with fp32 activations */
    ChunkTimesParams times;
    int32_t* order;     /* of packed sequences */
    TokenParams tokens; /* compute capability 9.0, activations of 16 bits */
    Choice choice;
    bool makes_h, makes_G, makes_dz;
    int64_t rows; /* of the sums of a slab */

    /* Whether something comes before G. */
    bool has_first() const { return makes_h || makes_dz || choice.gates_rows; }
    gt_status make_dz(const Device& device, Chain& chain) const {
        return launch_forward_units(gate, choice.gate, device, chain);
    }
    gt_status make_states(const Device& device, Chain& chain) const {
        if (makes_dz && !choice.gates_rows) return make_dz(device, chain);
        const gt_status status = choice.gates_rows ? gate_rows(gated, g, gradient, device, chain) : GT_OK;
        return status == GT_OK && makes_h ? launch_states<false>(forward, choice.states, device, chain) : status;
    }
    gt_status make_gradients(const Device& device, Chain& chain) const {
        return makes_G ? launch_states<true>(reverse, choice.reverse, device, chain) : GT_OK;
    }
    gt_status make_chunks(const Device& device, Chain& chain) const;
    gt_status finish_chunks(const Device& device, Chain& chain) const {
        const gt_status status = make_chunks(device, chain);
        if (status != GT_OK || !makes_dz || !choice.gates_rows) return status;
        return choice.gates_by_y ? make_lost_rows(gated, gradient, chunks.h, device, chain) : make_dz(device, chain);
    }
};

/* Rows of the sums of a slab: two a chunk between checkpoints. */
static inline int64_t slab_rows(const ChunkGradientParams& p) { return p.in.sequences.B * p.slots * 2; }

/* The chunks' gradients with fp32 activations: sums, and what is by token.  c has all but the states. */
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

/* Scratch by token of the SM90 kernels for the chunks' gradients, 16 bits. */
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

/* saved: what forward left, or no pointers. */
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
    /* sequences of one slot: states before and after it are the caller's */
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
        /* rows of several slabs lie one after the other */
        const PackedRows used = slab_count > 1 ? PackedRows() : packed_rows(c.in.sequences, CHECKPOINT, 2);
        c.dA = sums.take(arena, a.dA, plan.rows * slab_count, a.H, used);
        c.dbias = sums.take(arena, a.ddt_bias, plan.rows * slab_count, a.H, used);
        c.dskip = sums.take(arena, a.dDskip, plan.rows, a.H * (a.Dskip_per_channel ? a.P : 1), used);
    }
    plan.reverse.state_sum =
        sums.take(arena, shared ? a.dstate_in : nullptr, strands_of(c.in, choice.reverse, device), a.H * a.P * a.N);
    if (is_split)
        c.dx_share = plan.makes_dz ? take_share(arena, a) : nullptr; /* of dz alone: dx itself holds shares */
    else if ((a.dx || plan.makes_dz) &&
             slab_count > 1) /* 64 rows of every chunk and tile of a head; no less than of dz */
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
    plan.gate.share = c.dx_share; /* before dx needs it, or after */
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

template <int N, int STAGES>
static gt_status launch_chunks_with(const ChunkGradientParams& p, Chain& chain) {
    using C = ChunkGradientTraits<N, STAGES>;
    const int64_t blocks = p.in.sequences.B * p.slots * p.in.G * 2;
    const bool has_more = p.in.z || p.in.N > SLAB;
    return run("ssd chunk_gradient_kernel",
               has_more ? chunk_gradient_kernel<N, STAGES, true> : chunk_gradient_kernel<N, STAGES, false>, blocks,
               C::THREADS, C::SMEM, chain, p);
}

static inline gt_status launch_hopper_chunks(const ChunkGradientParams& all, const TokenParams& tokens, int slab,
                                             const Choice& choice, const Device& device, Chain& chain) {
    const int64_t pairs = all.in.sequences.B * all.slots * all.in.G, places = 2 * pairs, room = device.multiprocessors;
    const int64_t most = choice.gates_in_dx ? pairs : places, blocks = most < room ? most : room;
    if (blocks == 0) return GT_OK; /* no tensors */
    if (places > INT32_MAX - 2 * room) return gt_fail(GT_ERROR_SIZE, "ssd: %lld chunks", (long long)places);
    HopperGradientParams p;
    static_cast<ChunkGradientParams&>(p) = all;
    p.has_h = p.h.values != nullptr, p.has_G = p.G.values != nullptr;
    p.clears = slabs(p.in.N) > 1;
    p.in_twos = choice.gates_in_dx;
    p.heads = (int)(p.in.H / p.in.G), p.steps = p.heads * p.in.tiles;
    const int64_t steps = slab * tokens.rows * p.in.H * p.in.tiles;
    p.records = tokens.records, p.record_count = tokens.record_count, p.tokens = tokens.tokens;
    p.sums = tokens.sums + steps * tokens.sums_count, p.sums_count = tokens.sums_count;
    p.inverses = tokens.inverses + steps * 8;
    gt_status status = map_states(&p.h_map, p.h, p.in, p.slots, TILE_P);
    if (status == GT_OK) status = map_states(&p.G_map, p.G, p.in, p.slots, TILE_P);
    p.has_rows = choice.chunks_by_map;
    p.x_map = p.dy_map = p.h_map; /* not read unless there are maps of rows */
    if (status == GT_OK && p.has_rows) status = map_rows(&p.x_map, p.in.x, p.in.x_stride, p.in);
    if (status == GT_OK && p.has_rows) status = map_rows(&p.dy_map, p.in.dy, p.in.dy_stride, p.in);
    if (status != GT_OK) return status;
    return with_type(p.in, [&](auto type) {
        return with_size<64, 128>(p.in.columns, [&](auto columns) {
            using T = decltype(type);
            constexpr int N = decltype(columns)::value;
            const auto with = [&](auto of_dy) {
                using C = HopperGradientTraits<T, N, decltype(of_dy)>;
                return run("ssd chunk_gradient_hopper_kernel", chunk_gradient_hopper_kernel<T, N, typename C::D>,
                           blocks, C::THREADS, C::SMEM, chain, p);
            };
            return p.in.dy_inverses ? with(f16()) : with(T());
        });
    });
}

static inline gt_status launch_slab_chunks(const ChunkGradientParams& p, int stages, Chain& chain) {
    return with_size<16, 32, 64, 128>(p.in.columns, [&](auto columns) {
        constexpr int N = decltype(columns)::value;
        static_assert((N < 64) == (ChunkGradientTraits<N, 2>::SMEM <= 99 * 1024), "as choose() has it");
        if constexpr (N >= 64)
            if (stages == 1) return launch_chunks_with<N, 1>(p, chain);
        return launch_chunks_with<N, 2>(p, chain);
    });
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
    if (p.leaves_share) p.in.Dskip = p.dskip = nullptr; /* they are no sums over columns */
}

/* The same with fp32 activations: all launches add to one set of sums. */
static inline void take_slab(SplitGradientParams& p, int slab) {
    take_slab(p.in, slab);
    take_slab(p.h, slab);
    take_slab(p.G, slab);
    skip_columns(p.dBm, slab * SLAB);
    skip_columns(p.dCm, slab * SLAB);
    p.has_share = slab > 0;
    if (slab + 1 < slabs(p.in.N)) p.in.Dskip = p.dskip = nullptr; /* they are no sums over columns */
}

static inline gt_status launch_split_chunks(const SplitGradientParams& p, Family family, Chain& chain) {
    const int64_t places = p.in.sequences.B * p.slots * p.in.G;
    if (family == Family::SM90)
        return with_size<64, 128>(p.in.columns, [&](auto columns) {
            using Tile = HopperSplitTile<decltype(columns)::value>;
            return run("ssd chunk_gradient_fp32_hopper_kernel", chunk_gradient_fp32_hopper_kernel<Tile::NP>, places * 2,
                       Tile::THREADS, Tile::BYTES, chain, p);
        });
    return with_size<16, 64, 128>(p.in.columns, [&](auto columns) {
        using Tile = GradientSplitTile<decltype(columns)::value>;
        return run("ssd chunk_gradient_fp32_kernel", chunk_gradient_fp32_kernel<Tile::NP>, places * SLOT_SHORTS,
                   THREADS, Tile::BYTES, chain, p);
    });
}

static inline gt_status finish_split_chunks(const SplitGradientParams& all, const ChunkTimesParams& times,
                                            Family family, Chain& chain) {
    const gt_status status =
        each_slab(all, [&](const SplitGradientParams& p, int) { return launch_split_chunks(p, family, chain); });
    if (status != GT_OK || !times.da) return status;
    return run("ssd chunk_times_fp32_kernel", chunk_times_fp32_kernel,
               times.in.sequences.B * times.slots * ((times.in.H + 31) / 32), THREADS, 8 * THREADS, chain, times);
}

inline gt_status TensorBackwardPlan::make_chunks(const Device& device, Chain& chain) const {
    if (chunks.in.dtype == GT_F32) return finish_split_chunks(split, times, choice.chunks, chain);
    const bool by_hopper = choice.chunks == Family::SM90;
    const int64_t places = rows * ((chunks.in.H + TOKEN_WARPS - 1) / TOKEN_WARPS);
    const int64_t room = (int64_t)TOKEN_BLOCKS * device.multiprocessors, blocks = places < room ? places : room;
    gt_status status = GT_OK;
    const auto with = [&](auto powers) {
        constexpr bool POWERS = decltype(powers)::value;
        return run("ssd chunk_factors_kernel", chunk_factors_kernel<POWERS>, blocks, 32 * TOKEN_WARPS,
                   TOKEN_WARPS * 4 * ChunkTokens<POWERS>::COUNT, chain, tokens);
    };
    if (by_hopper) status = tokens.has_powers ? with(std::true_type()) : with(std::false_type());
    if (status == GT_OK)
        status = each_slab(chunks, [&](const ChunkGradientParams& p, int slab) {
            return by_hopper ? launch_hopper_chunks(p, tokens, slab, choice, device, chain)
                             : launch_slab_chunks(p, choice.chunk_stages, chain);
        });
    if (status != GT_OK || !by_hopper) return status;
    return run("ssd chunk_times_kernel", tokens.has_powers ? chunk_times_kernel<true> : chunk_times_kernel<false>,
               blocks, 32 * TOKEN_WARPS, 0, chain, tokens);
}

} /* namespace ssd */
} /* namespace gt */

#endif
