/* gt/ssd/mma/launch_states.cuh - ssd on tensor cores: launches of passes over a segment that leave states only, and of
 * the kernels for dy silu(z). */
#ifndef GT_SSD_MMA_LAUNCH_STATES_CUH
#define GT_SSD_MMA_LAUNCH_STATES_CUH

#include "fp32_forward.cuh"
#include "../sm90/gate_lost.cuh"
#include "../any/launch.cuh"
#include "../sm90/plan.cuh"
#include "../sm90/fp32_states.cuh"
#include "../sm90/states.cuh"

namespace gt {
namespace ssd {

/* ---- scratch ----------------------------------------------------------------------------------------------------- */

/* Where the order of packed sequences lies, for kernels of 9.0.  NULL: there is none. */
static inline int32_t* take_order(Arena& arena, const gt_ssd_args& a, const Choice& choice) {
    return choice.ranks ? arena.take<int32_t>(a.seq_capacity) : nullptr;
}

/* ---- dy silu(z) -------------------------------------------------------------------------------------------------- */

/* Places of gate_kernel. */
static inline int64_t gate_places(const gt_ssd_args& a) {
    return checkpoint_slots(a) * SLOT_CHUNKS * ((a.P + TILE_P - 1) / TILE_P);
}

/* dx: memory that is written once all have read g; or NULL. */
static inline GatedRows take_gated_rows(Arena& arena, const gt_ssd_args& a, void* dx, const gt_stride& dx_stride) {
    const int64_t row = a.H * a.P;
    GatedRows g = {dx, dx_stride, arena.take<float>(gate_places(a) * BLOCKS)};
    if (!dx) g.rows = arena.take<f16>(a.B * a.T * row), g.stride = {a.T * row, row, a.P};
    return g;
}

/* in, with g for dy. */
static inline Problem with_gated_rows(Problem in, const GatedRows& g) {
    in.z = nullptr;
    in.dy = g.rows, in.dy_stride = g.stride, in.dy_inverses = g.inverses;
    return in;
}

static inline gt_status gate_rows(const Problem& in, const GatedRows& g, const GateGradient& gradient,
                                  const Device& device, Chain& chain) {
    GateParams p = {in, g, gradient, chunk_slots(in.sequences, CHECKPOINT), 0};
    p.rows = in.sequences.B * p.slots * SLOT_CHUNKS;
    const int64_t blocks = (p.rows * in.H * in.tiles + GATE_WARPS - 1) / GATE_WARPS;
    const int64_t room = (int64_t)GATE_BLOCKS * device.multiprocessors;
    const auto of_bf16 = gradient.y ? gate_kernel<bf16, true> : gate_kernel<bf16, false>;
    return run("ssd gate_kernel", in.dtype == GT_BF16 ? of_bf16 : gate_kernel<f16, false>,
               blocks < room ? blocks : room, 32 * GATE_WARPS, 0, chain, p);
}

/* What dz of y lacks.  h: its checkpoints. */
static inline gt_status make_lost_rows(const Problem& in, const GateGradient& gradient, const Checkpoints& h,
                                       const Device& device, Chain& chain) {
    LostParams p = {in, gradient, h, chunk_slots(in.sequences, CHECKPOINT), 0};
    p.rows = in.sequences.B * p.slots * SLOT_CHUNKS;
    const int64_t each = 32 * GATE_WARPS, blocks = (p.rows * in.H * in.tiles + each - 1) / each;
    const int64_t room = (int64_t)LOST_BLOCKS * device.multiprocessors;
    return run("ssd gate_lost_kernel", gate_lost_kernel<bf16>, blocks < room ? blocks : room, 32 * GATE_WARPS, 0, chain,
               p);
}

/* ---- columns ----------------------------------------------------------------------------------------------------- */

/* launch(the first of these sizes that is n or more; else the last). */
template <int FIRST, int... MORE, class Launch>
static inline gt_status with_size(int n, const Launch& launch) {
    if constexpr (sizeof...(MORE) > 0)
        if (n > FIRST) return with_size<MORE...>(n, launch);
    return launch(std::integral_constant<int, FIRST>());
}

/* launch(T()) for activations of 16 bits. */
template <class Launch>
static inline gt_status with_type(const Problem& in, const Launch& launch) {
    return in.dtype == GT_BF16 ? launch(bf16()) : launch(f16());
}

/* launch(T(), number of columns) of the kernels on tensor cores for them. */
template <class Launch>
static inline gt_status dispatch_columns(const Problem& in, const Launch& launch) {
    return with_type(in, [&](auto type) {
        return with_size<16, 32, 64, 128>(in.columns, [&](auto columns) { return launch(type, columns); });
    });
}

/* Makes rows, which may be NULL, begin with the first column of a launch's. */
template <class T>
static inline void skip_columns(T*& rows, int columns) {
    if (rows) rows += columns;
}

/* Makes p what the launch of slab `slab` gets: all that has columns of states begins with the first of the launch's. */
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

/* launch(parameters, slab) for every slab of columns. */
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

/* ---- launches ---------------------------------------------------------------------------------------------------- */

template <bool REVERSE>
static gt_status launch_states_fp32(const StatesParams& p, int64_t blocks, Chain& chain) {
    return with_size<16, 64, 128>(p.in.columns, [&](auto columns) {
        using Tile = StatesSplitTile<decltype(columns)::value>;
        return run("ssd states_fp32_kernel", states_fp32_kernel<Tile::NP, REVERSE>, blocks, THREADS, Tile::BYTES, chain,
                   p);
    });
}

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
        return with_size<64, 128>(p.states.in.columns, [&](auto columns) {
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
                static_assert(Tile::BLOCKS == (COUNT == 1 ? 2 : 1), "as blocks_of_units() has it");
                return run("ssd states_hopper_kernel", states_hopper_kernel<T, Tile::NP, COUNT, typename Tile::L>,
                           blocks, Tile::THREADS, Tile::BYTES, chain, p);
            };
            /* of what left is in reverse, with z */
            using L = typename std::conditional<REVERSE, f16, T>::type;
            return REVERSE && in.dy_inverses ? with(L()) : with(T());
        });
    });
}

template <bool REVERSE>
static gt_status launch_states_once(const StatesParams& all, const StatesChoice& choice, const Device& device,
                                    Chain& chain) {
    const int64_t strands = strands_of(all.in, choice, device), blocks = strands * all.in.G * group_pairs(all.in);
    const bool is_fp32 = all.in.dtype == GT_F32;
    return each_slab(all, [&](const StatesParams& p, int) {
        if (choice.family == Family::SM90)
            return is_fp32 ? launch_states_fp32_hopper<REVERSE>(p, choice.units, strands, chain)
                           : launch_states_hopper<REVERSE>(p, choice.units, strands, chain);
        if (is_fp32) return launch_states_fp32<REVERSE>(p, blocks, chain);
        return dispatch_columns(p.in, [&](auto type, auto columns) {
            using Tile = StatesTile<decltype(type), decltype(columns)::value>;
            return run("ssd states_tensor_kernel", states_tensor_kernel<typename Tile::T, Tile::NP, REVERSE>, blocks,
                       THREADS, Tile::BYTES, chain, p);
        });
    });
}

/* The states that segments start from, in segments.states, where there are several. */
template <bool REVERSE>
static gt_status start_segments(const Problem& in, const float* state_in, int state_in_shared,
                                const StatesChoice& choice, const Device& device, Chain& chain) {
    if (in.segments.count == 1) return GT_OK;
    StatesParams local = {};
    local.in = in;
    local.is_local = ALL_BUT_LAST;
    const gt_status status = launch_states_once<REVERSE>(local, choice, device, chain);
    if (status != GT_OK) return status;
    return scan_segments<REVERSE>("ssd scan_segments_kernel", scan_of(in, state_in, state_in_shared), device, chain);
}

/* Checkpoints of h (state_in: the initial states), or REVERSE of G and dstate_in (state_in: dstate_out).
 * p.state_sum: of strands_of() strands. */
template <bool REVERSE>
static gt_status launch_states(const StatesParams& p, const StatesChoice& choice, const Device& device, Chain& chain) {
    const gt_status status = start_segments<REVERSE>(p.in, p.state_in, p.state_in_shared, choice, device, chain);
    return status != GT_OK ? status : launch_states_once<REVERSE>(p, choice, device, chain);
}

} /* namespace ssd */
} /* namespace gt */

#endif
