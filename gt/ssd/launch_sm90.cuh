/* gt/ssd/launch_sm90.cuh - ssd forward: which calls take the kernel for compute capability 9.0, and its launch. */
#ifndef GT_SSD_LAUNCH_SM90_CUH
#define GT_SSD_LAUNCH_SM90_CUH

#include "forward_sm90.cuh"
#include "launch_tensor.cuh"

namespace gt {
namespace ssd {

/* Units of a block of forward's kernel, by those of passes over states (states_units()); 0: it takes another.  With
 * more than SLAB columns a warpgroup has one. */
static inline int hopper_units(const gt_ssd_args& a, int states) { return a.N <= SLAB ? states : states >= 2 ? 2 : 0; }

/* Whether B and C come from images, which are made before (group_sm90.cuh).  units: hopper_units().  They save a sixth of
 * a chunk's time and cost a launch and their bytes, 8 N a token and group: so where four blocks or more read each, and
 * every multiprocessor has eight chunks or more of a block. */
static inline bool takes_images(const gt_ssd_args& a, int units, const Device& device) {
    if (!units || !has_images((int)a.N, units, a.z)) return false;
    const int64_t bundles = (units_of_group(a) + units - 1) / units, chunks = (a.T + CHUNK - 1) / CHUNK;
    return bundles >= 4 && a.B * chunks * a.G * bundles >= 8 * (int64_t)device.multiprocessors;
}

/* NULL: there are none. */
static inline char* take_images(Arena& arena, const gt_ssd_args& a, int units, const Device& device) {
    if (!takes_images(a, units, device)) return nullptr;
    return arena.take<char>(a.B * chunk_slots(sequences_of(a), CHECKPOINT) * SLOT_CHUNKS * a.G * image_bytes((int)a.N));
}

static inline gt_status launch_images(const TensorParams& all, const Device& device, Chain& chain) {
    GroupParams p = {all.in, all.images, all.image_slots, all.in.sequences.B * all.image_slots * SLOT_CHUNKS};
    const int64_t warps = p.rows * p.in.G * 2 * 4, blocks = (warps + GROUP_WARPS - 1) / GROUP_WARPS;
    const int64_t room = (int64_t)GROUP_BLOCKS * device.multiprocessors;
    const auto with = [&](auto type, auto columns) {
        return run("ssd group_images_kernel", group_images_kernel<decltype(type), decltype(columns)::value>,
                   blocks < room ? blocks : room, 32 * GROUP_WARPS, 0, chain, p);
    };
    const auto of = [&](auto columns) { return p.in.dtype == GT_BF16 ? with(bf16(), columns) : with(f16(), columns); };
    const int N = image_columns(p.in.N);
    return N == 16     ? of(std::integral_constant<int, 16>())
           : N == 64   ? of(std::integral_constant<int, 64>())
           : N <= SLAB ? of(std::integral_constant<int, SLAB>())
                       : of(std::integral_constant<int, 2 * SLAB>());
}

/* With 128 columns in a warpgroup there are registers enough: one kernel does for calls with and without z. */
template <class T, int NP, int UNITS>
static gt_status launch_forward_hopper_with(const TensorParams& all, const Device& device, Chain& chain) {
    TensorParams p = all;
    const auto launch = [&](auto gate, auto has_images) {
        constexpr int GATE = decltype(gate)::value;
        constexpr bool HAS_IMAGES = decltype(has_images)::value;
        using Tile = HopperTile<T, NP, UNITS, GATE, HAS_IMAGES>;
        const int64_t each = p.in.G * group_bundles(p.in, Tile::UNITS),
                      room = grid_room(p.in.sequences, 8 * Tile::BLOCKS, device);
        const int64_t count = strands(most_sequences(p.in.sequences) * p.in.segments.count, each, room);
        set_bundles(p.in, Tile::UNITS, count);
        return run("ssd forward_hopper_kernel", forward_hopper_kernel<T, NP, UNITS, GATE, HAS_IMAGES>, count * each,
                   Tile::THREADS, Tile::BYTES, chain, p);
    };
    const auto with = [&](auto gate) {
        constexpr int GATE = decltype(gate)::value;
        if constexpr (has_images(NP, UNITS, GATE != UNGATED) && GATE != GATE_GRADIENT)
            if (p.images) return launch(gate, std::true_type());
        return launch(gate, std::false_type());
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
    gt_status status = p.images ? launch_images(p, device, chain) : GT_OK;
    if (status != GT_OK) return status;
    status = start_segments<false>(p.in, p.state_in, p.state_in_shared, UNITS, device, chain);
    if (status != GT_OK) return status;
    p.in.columns = p.in.N;
    if constexpr (UNITS == 2) {
        if (p.in.N > SLAB)
            return p.in.dtype == GT_BF16 ? launch_forward_hopper_with<bf16, 2 * SLAB, 2>(p, device, chain)
                                         : launch_forward_hopper_with<f16, 2 * SLAB, 2>(p, device, chain);
    }
    return dispatch_columns(p.in, [&](auto type, auto columns) {
        constexpr int N = decltype(columns)::value;
        constexpr int NP = N == 32 || (UNITS == 1 && N < 64) ? 64 : N;
        return launch_forward_hopper_with<decltype(type), NP, UNITS>(p, device, chain);
    });
}

/* units: hopper_units(); states: of the passes over states, by which another kernel has its segments. */
static inline gt_status launch_forward_units(const TensorParams& p, int units, int states, const Device& device,
                                             Chain& chain) {
    return units == 4                  ? launch_forward_hopper<4>(p, device, chain)
           : units == 2                ? launch_forward_hopper<2>(p, device, chain)
           : units == 1 && !p.makes_dz ? launch_forward_hopper<1>(p, device, chain)
                                       : launch_forward_tensor(p, states, device, chain);
}

} /* namespace ssd */
} /* namespace gt */

#endif
