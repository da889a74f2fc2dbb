/* gt/ssd/sm90/launch.cuh - ssd forward of 16 bits on compute capability 9.0: launches. */
#ifndef GT_SSD_SM90_LAUNCH_CUH
#define GT_SSD_SM90_LAUNCH_CUH

#include "forward_maps.cuh"
#include "../mma/launch.cuh"

namespace gt {
namespace ssd {

/* No pointers where the sizes are not those of forward_maps_kernel. */
static inline GroupTiles take_groups(Arena& arena, const gt_ssd_args& a, const Problem& in, int units) {
    return has_sizes_of_maps(a, in, units) ? take_group_tiles(arena, sequences_of(a), a.G, SLAB) : GroupTiles();
}

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

/* With 128 columns in a warpgroup there are registers enough: one kernel does for calls with and without z. */
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
static gt_status launch_forward_hopper(const TensorParams& all, const ForwardChoice& choice, const Device& device,
                                       Chain& chain) {
    TensorParams p = all;
    const gt_status status = start_segments<false>(p.in, p.state_in, p.state_in_shared, choice.local, device, chain);
    if (status != GT_OK) return status;
    p.in.columns = p.in.N;
    if constexpr (UNITS == 2)
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

static inline gt_status launch_forward_units(const TensorParams& p, const ForwardChoice& choice, const Device& device,
                                             Chain& chain) {
    if (!choice.units) return launch_forward_tensor(p, choice, device, chain);
    return with_size<1, 2, 4>(choice.units, [&](auto count) {
        return launch_forward_hopper<decltype(count)::value>(p, choice, device, chain);
    });
}

} /* namespace ssd */
} /* namespace gt */

#endif
