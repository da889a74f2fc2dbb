/* gt/ssd/sm90/launch.cuh - launches the kernels of ssd for compute capability 9.0.  A launch takes one slab of columns
 * (SLAB in problem.cuh) unless noted. */
#ifndef GT_SSD_SM90_LAUNCH_CUH
#define GT_SSD_SM90_LAUNCH_CUH

#include "../plan.cuh"
#include "forward_maps.cuh"
#include "fp32_gradients.cuh"
#include "fp32_states.cuh"
#include "gate_lost.cuh"
#include "gradients.cuh"
#include "gradients_tokens.cuh"

namespace gt {
namespace ssd {

/* ---- forward ---------------------------------------------------------------------------------------------------- */

template <class T>
static gt_status launch_forward_maps(const HopperForwardParams& all, const Device& device, Chain& chain) {
    constexpr int UNITS = 4;
    MapsForwardParams p;
    static_cast<HopperForwardParams&>(p) = all;
    gt_status status = map_rows(&p.x_map, p.in.x, p.in.x_stride, p.in);
    p.z_map = p.x_map; /* not read without z */
    if (status == GT_OK && p.in.z) status = map_rows(&p.z_map, p.in.z, p.in.z_stride, p.in);
    if (status != GT_OK) return status;
    using Group = GroupTile<T, SLAB>;
    status = run("ssd group_rows_kernel", group_rows_kernel<T, SLAB>, group_tiles(p.in.sequences, p.in.G),
                 Group::THREADS, Group::BYTES, chain, p);
    if (status != GT_OK) return status;
    const auto with = [&](auto gate) {
        constexpr int GATE = decltype(gate)::value;
        using Tile = HopperTile<T, SLAB, UNITS, GATE, MAPPED_ROWS>;
        const int64_t blocks = take_bundles(p.in, UNITS, strands_of_units(p.in, UNITS, 1, device));
        return run("ssd forward_maps_kernel", forward_maps_kernel<T, SLAB, UNITS, GATE>, blocks, Tile::THREADS,
                   Tile::BYTES, chain, p);
    };
    return p.in.z ? with(std::integral_constant<int, GATED>()) : with(std::integral_constant<int, UNGATED>());
}

/* If a warpgroup has at most 128 columns of states, one kernel serves calls with and without z, because registers
 * suffice. */
template <class T, int NP, int UNITS>
static gt_status launch_forward_hopper_with(const TensorParams& all, const ForwardChoice& choice, const Device& device,
                                            Chain& chain) {
    HopperForwardParams p;
    static_cast<TensorParams&>(p) = all;
    const gt_status status = map_outputs(p, choice.y_by_map);
    if (status != GT_OK) return status;
    if constexpr (UNITS == 4 && NP == SLAB)
        if (choice.by_maps) return launch_forward_maps<T>(p, device, chain);
    const auto with = [&](auto gate) {
        constexpr int GATE = decltype(gate)::value;
        using Tile = HopperTile<T, NP, UNITS, GATE>;
        const int64_t strands = strands_of_units(p.in, Tile::UNITS, Tile::FIT, device);
        return run("ssd forward_hopper_kernel", forward_hopper_kernel<T, NP, UNITS, GATE>,
                   take_bundles(p.in, Tile::UNITS, strands), Tile::THREADS, Tile::BYTES, chain, p);
    };
    constexpr bool ONE = UNITS <= 2 && NP <= SLAB;
    if constexpr (UNITS > 1)
        if (p.makes_dz) return with(std::integral_constant<int, GATE_GRADIENT>());
    constexpr int WITHOUT_Z = ONE ? GATED : UNGATED;
    return p.in.z ? with(std::integral_constant<int, GATED>()) : with(std::integral_constant<int, WITHOUT_Z>());
}

template <int UNITS>
static gt_status launch_forward_hopper(const TensorParams& all, const ForwardChoice& choice, const Device& device,
                                       Chain& chain) {
    TensorParams p = all;
    p.in.columns = p.in.N;
    if constexpr (UNITS == 2 && is_built_columns<SLAB, 2 * SLAB>())
        if (p.in.N > SLAB)
            return with_type(p.in, [&](auto type) {
                return launch_forward_hopper_with<decltype(type), 2 * SLAB, 2>(p, choice, device, chain);
            });
    return dispatch_columns(p.in, [&](auto type, auto columns) {
        constexpr int N = decltype(columns)::value;
        constexpr int NP = N == 32 || (UNITS == 1 && N < 64) ? 64 : N;
        return launch_forward_hopper_with<decltype(type), NP, UNITS>(p, choice, device, chain);
    });
}

/* Launches forward for 16-bit activations.  One launch takes all columns. */
static inline gt_status launch_forward_hopper_units(const TensorParams& p, const ForwardChoice& choice,
                                                    const Device& device, Chain& chain) {
    return with_size<1, 2, 4>(choice.units, [&](auto count) {
        return launch_forward_hopper<decltype(count)::value>(p, choice, device, chain);
    });
}

static inline gt_status launch_forward_fp32_hopper(const TensorParams& all, const Device& device, Chain& chain) {
    return dispatch_fp32<64, 128>(all.in, [&](auto columns) {
        using Tile = SplitHopperTile<decltype(columns)::value>;
        TensorParams p = all;
        const int64_t blocks = take_bundles(p.in, Tile::UNITS, strands_of_units(p.in, Tile::UNITS, 1, device));
        return run("ssd forward_fp32_hopper_kernel", forward_fp32_hopper_kernel<Tile::NP>, blocks, Tile::THREADS,
                   Tile::BYTES, chain, p);
    });
}

/* ---- states ----------------------------------------------------------------------------------------------------- */

static inline HopperStatesParams hopper_states(const StatesParams& states, bool reverse) {
    const Problem& in = states.in;
    return {states,
            reverse ? in.dy : in.x,
            reverse ? in.Cm : in.Bm,
            reverse ? in.dy_stride : in.x_stride,
            reverse ? in.Cm_stride : in.Bm_stride,
            reverse};
}

template <bool REVERSE>
static gt_status launch_states_fp32_hopper(const StatesParams& states, int units, int64_t strands, Chain& chain) {
    HopperStatesParams p = hopper_states(states, REVERSE);
    return with_size<2, 4>(units, [&](auto count) {
        return dispatch_fp32<64, 128>(p.states.in, [&](auto columns) {
            using Tile = StatesSplitHopperTile<decltype(columns)::value, decltype(count)::value>;
            const int64_t blocks = take_bundles(p.states.in, Tile::UNITS, strands);
            return run("ssd states_fp32_hopper_kernel", states_fp32_hopper_kernel<Tile::NP, Tile::UNITS>, blocks,
                       Tile::THREADS, Tile::BYTES, chain, p);
        });
    });
}

template <bool REVERSE>
static gt_status launch_states_hopper(const StatesParams& states, int units, int64_t strands, Chain& chain) {
    const Problem& in = states.in;
    HopperStatesParams p = hopper_states(states, REVERSE);
    const int64_t blocks = take_bundles(p.states.in, units, strands);
    return dispatch_columns(in, [&](auto type, auto columns) {
        return with_size<1, 2, 4>(units, [&](auto count) {
            using T = decltype(type);
            constexpr int N = decltype(columns)::value, COUNT = decltype(count)::value;
            constexpr int NP = N == 32 || (COUNT == 1 && N < 64) ? 64 : N;
            const auto with = [&](auto left) {
                using Tile = StatesHopperTile<T, NP, COUNT, decltype(left)>;
                static_assert(Tile::FIT == (COUNT == 1 ? 2 : 1), "as choose_states() has it");
                return run("ssd states_hopper_kernel", states_hopper_kernel<T, Tile::NP, COUNT, typename Tile::L>,
                           blocks, Tile::THREADS, Tile::BYTES, chain, p);
            };
            /* the type of the left operand: f16 in a reverse pass with z */
            using L = typename std::conditional<REVERSE, f16, T>::type;
            return REVERSE && in.dy_inverses ? with(L()) : with(T());
        });
    });
}

/* ---- dy silu(z) ------------------------------------------------------------------------------------------------- */

static inline gt_status gate_rows(const Problem& in, const GatedRows& g, const GateGradient& gradient,
                                  const Device& device, Chain& chain) {
    GateParams p = {in, g, gradient, chunk_slots(in.sequences, CHECKPOINT), 0};
    p.rows = in.sequences.B * p.slots * SLOT_CHUNKS;
    const int64_t blocks = (p.rows * in.H * in.tiles + GATE_WARPS - 1) / GATE_WARPS;
    const int64_t room = (int64_t)GATE_BLOCKS * device.multiprocessors;
    return with_type(in, [&](auto type) {
        using T = decltype(type);
        auto* kernel = gate_kernel<T, false>;
        if constexpr (std::is_same<T, bf16>::value)
            if (gradient.y) kernel = gate_kernel<bf16, true>;
        return run("ssd gate_kernel", kernel, blocks < room ? blocks : room, 32 * GATE_WARPS, 0, chain, p);
    });
}

/* Computes dz of the elements that gate_kernel could not compute from y.  h: the checkpoints of h. */
static inline gt_status make_lost_rows(const Problem& in, const GateGradient& gradient, const Checkpoints& h,
                                       const Device& device, Chain& chain) {
    LostParams p = {in, gradient, h, chunk_slots(in.sequences, CHECKPOINT), 0};
    p.rows = in.sequences.B * p.slots * SLOT_CHUNKS;
    const int64_t each = 32 * GATE_WARPS, blocks = (p.rows * in.H * in.tiles + each - 1) / each;
    const int64_t room = (int64_t)LOST_BLOCKS * device.multiprocessors;
    return with_built<bf16>([&](auto type) {
        return run("ssd gate_lost_kernel", gate_lost_kernel<decltype(type)>, blocks < room ? blocks : room,
                   32 * GATE_WARPS, 0, chain, p);
    });
}

/* ---- gradients -------------------------------------------------------------------------------------------------- */

/* The number of blocks of a kernel in sm90/gradients_tokens.cuh. */
static inline int64_t token_blocks(const TokenParams& p, const Device& device) {
    const int64_t places = p.rows * ((p.chunk.in.H + TOKEN_WARPS - 1) / TOKEN_WARPS);
    const int64_t room = (int64_t)TOKEN_BLOCKS * device.multiprocessors;
    return places < room ? places : room;
}

static inline gt_status launch_chunk_factors(const TokenParams& p, const Device& device, Chain& chain) {
    const auto with = [&](auto powers) {
        constexpr bool POWERS = decltype(powers)::value;
        return run("ssd chunk_factors_kernel", chunk_factors_kernel<POWERS>, token_blocks(p, device), 32 * TOKEN_WARPS,
                   TOKEN_WARPS * 4 * ChunkTokens<POWERS>::COUNT, chain, p);
    };
    return p.has_powers ? with(std::true_type()) : with(std::false_type());
}

static inline gt_status launch_chunk_times(const TokenParams& p, const Device& device, Chain& chain) {
    return run("ssd chunk_times_kernel", p.has_powers ? chunk_times_kernel<true> : chunk_times_kernel<false>,
               token_blocks(p, device), 32 * TOKEN_WARPS, 0, chain, p);
}

static inline gt_status launch_hopper_chunks(const ChunkGradientParams& all, const TokenParams& tokens, int slab,
                                             const Choice& choice, const Device& device, Chain& chain) {
    const int64_t pairs = all.in.sequences.B * all.slots * all.in.G, places = 2 * pairs, room = device.multiprocessors;
    const int64_t most = choice.gates_in_dx ? pairs : places, blocks = most < room ? most : room;
    if (blocks == 0) return GT_OK; /* the call has no chunks */
    if (places > INT32_MAX - 2 * room)
        return gt_fail(GT_ERROR_SIZE, "ssd: %lld chunks are too many for a grid", (long long)places);
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
    p.x_map = p.dy_map = p.h_map; /* kernels read these maps only if has_rows */
    if (status == GT_OK && p.has_rows) status = map_rows(&p.x_map, p.in.x, p.in.x_stride, p.in);
    if (status == GT_OK && p.has_rows) status = map_rows(&p.dy_map, p.in.dy, p.in.dy_stride, p.in);
    if (status != GT_OK) return status;
    return with_type(p.in, [&](auto type) {
        return with_columns<64, 128>(p.in.columns, [&](auto columns) {
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

static inline gt_status launch_split_hopper_chunks(const SplitGradientParams& p, Chain& chain) {
    const int64_t places = p.in.sequences.B * p.slots * p.in.G;
    return dispatch_fp32<64, 128>(p.in, [&](auto columns) {
        using Tile = HopperSplitTile<decltype(columns)::value>;
        return run("ssd chunk_gradient_fp32_hopper_kernel", chunk_gradient_fp32_hopper_kernel<Tile::NP>, places * 2,
                   Tile::THREADS, Tile::BYTES, chain, p);
    });
}

} /* namespace ssd */
} /* namespace gt */

#endif
