/* gt/ssd/launch_sm90.cuh - ssd forward: which calls take the kernel for compute capability 9.0, and its launch. */
#ifndef GT_SSD_LAUNCH_SM90_CUH
#define GT_SSD_LAUNCH_SM90_CUH

#include "forward_maps_sm90.cuh"
#include "launch_tensor.cuh"

namespace gt {
namespace ssd {

/* Units of a block of forward's kernel, by those of passes over states (states_units()); 0: it takes another.  With
 * more than SLAB columns a warpgroup has one. */
static inline int hopper_units(const gt_ssd_args& a, int states) { return a.N <= SLAB ? states : states >= 2 ? 2 : 0; }

/* The same where dz is not made.  Of short sequences of few heads, a block of two units for a multiprocessor at most, two
 * of one take no longer, and begin where the kernel before leaves room for one.  The bits are the same, as long as both
 * have as many columns: those of one unit have 64. */
static inline int forward_units(const gt_ssd_args& a, int states) {
    return states == 2 && a.N > 16 && a.N <= 64 && a.T <= 2 * CHECKPOINT ? 1 : hopper_units(a, states);
}

/* Whether forward_maps_kernel may take the call, by sizes: where as many heads share B and C as make up for another
 * kernel for these.  Packed sequences would share boxes of rows.  units: forward_units(). */
static inline bool takes_maps(const gt_ssd_args& a, int units) {
    return units == 4 && a.N > SLAB / 2 && a.N <= SLAB && a.P % TILE_P == 0 && a.seq_capacity == 0 &&
           units_of_group(a) >= (a.z ? 16 : 48);
}

/* No pointers where it does not. */
static inline GroupTiles take_groups(Arena& arena, const gt_ssd_args& a, int units) {
    return takes_maps(a, units) ? take_group_tiles(arena, sequences_of(a), a.G, SLAB) : GroupTiles();
}

/* Its launches, if all rows have maps: else *launched is false. */
template <class T>
static gt_status launch_forward_maps(const HopperForwardParams& all, const Device& device, Chain& chain,
                                     bool* launched) {
    constexpr int UNITS = 4;
    MapsForwardParams p;
    static_cast<HopperForwardParams&>(p) = all;
    *launched =
        map_rows(&p.x_map, p.in.x, p.in.x_stride, p.in) && (!p.in.z || map_rows(&p.z_map, p.in.z, p.in.z_stride, p.in));
    if (!*launched) return GT_OK;
    if (!p.in.z) p.z_map = p.x_map; /* not read */
    using Group = GroupTile<T, SLAB>;
    const gt_status status = run("ssd group_rows_kernel", group_rows_kernel<T, SLAB>,
                                 group_tiles(p.in.sequences, p.in.G), Group::THREADS, Group::BYTES, chain, p);
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

/* With 128 columns in a warpgroup there are registers enough: one kernel does for calls with and without z. */
template <class T, int NP, int UNITS>
static gt_status launch_forward_hopper_with(const TensorParams& all, const Device& device, Chain& chain) {
    HopperForwardParams p;
    static_cast<TensorParams&>(p) = all;
    gt_status status = map_outputs(p);
    if (status != GT_OK) return status;
    if constexpr (UNITS == 4 && NP == SLAB) {
        bool launched = false;
        if (p.groups.values) status = launch_forward_maps<T>(p, device, chain, &launched);
        if (status != GT_OK || launched) return status;
    }
    const auto with = [&](auto gate) {
        constexpr int GATE = decltype(gate)::value;
        using Tile = HopperTile<T, NP, UNITS, GATE>;
        const int64_t strands = strands_of_units(p.in, Tile::UNITS, Tile::BLOCKS, device);
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
static gt_status launch_forward_hopper(const TensorParams& all, const Device& device, Chain& chain) {
    TensorParams p = all;
    const gt_status status = start_segments<false>(p.in, p.state_in, p.state_in_shared, UNITS, device, chain);
    if (status != GT_OK) return status;
    p.in.columns = p.in.N;
    if constexpr (UNITS == 2)
        if (p.in.N > SLAB)
            return with_type(p.in, [&](auto type) {
                return launch_forward_hopper_with<decltype(type), 2 * SLAB, 2>(p, device, chain);
            });
    return dispatch_columns(p.in, [&](auto type, auto columns) {
        constexpr int N = decltype(columns)::value;
        constexpr int NP = N == 32 || (UNITS == 1 && N < 64) ? 64 : N;
        return launch_forward_hopper_with<decltype(type), NP, UNITS>(p, device, chain);
    });
}

/* units: hopper_units(); states: of the passes over states, by which another kernel has its segments. */
static inline gt_status launch_forward_units(const TensorParams& p, int units, int states, const Device& device,
                                             Chain& chain) {
    if (units == 0 || (units == 1 && p.makes_dz)) return launch_forward_tensor(p, states, device, chain);
    return with_size<1, 2, 4>(
        units, [&](auto count) { return launch_forward_hopper<decltype(count)::value>(p, device, chain); });
}

} /* namespace ssd */
} /* namespace gt */

#endif
