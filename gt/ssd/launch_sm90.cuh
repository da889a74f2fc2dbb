/* gt/ssd/launch_sm90.cuh - ssd forward: which calls take the kernel for compute capability 9.0, and its launch. */
#ifndef GT_SSD_LAUNCH_SM90_CUH
#define GT_SSD_LAUNCH_SM90_CUH

#include "forward_sm90.cuh"
#include "launch_tensor.cuh"

namespace gt {
namespace ssd {

static inline bool has_hopper_kernels() {
    static Answers known = {};
    void (*const kernel)(TensorParams) = forward_hopper_kernel<bf16, 64, 2, false>;
    return has_sm90a(reinterpret_cast<const void*>(kernel), HopperTile<bf16, 64, 2, false>::THREADS, known);
}

/* Units of a block of the kernel for a call that takes_tensor_cores(): 4, or 2 where half of the multiprocessors would
 * have nothing to do; 0: no such kernel, or more columns than one launch has.  With one unit a group half of a block
 * has nothing to do either way. */
static inline int hopper_units(const gt_ssd_args& a, const Device& device) {
    const int64_t units = a.H / a.G * ((a.P + TILE_P - 1) / TILE_P);
    if (a.dtype == GT_F32 || units < 2 || a.N > SLAB || !has_hopper_kernels()) return 0;
    const int64_t sequences = most_sequences(sequences_of(a)) * a.G, room = device.multiprocessors;
    const int64_t with_4 = sequences * ((units + 3) / 4), with_2 = sequences * ((units + 1) / 2);
    return units > 2 && (with_2 > room || 4 * with_4 > 3 * room || a.T > 2 * CHECKPOINT) ? 4 : 2;
}

/* As many segments as fill the multiprocessors with a block each. */
static inline int64_t hopper_segments(const gt_ssd_args& a, const Device& device) {
    int units = hopper_units(a, device);
    if (!units) units = 4;
    const int64_t all = a.H / a.G * ((a.P + TILE_P - 1) / TILE_P);
    return choose_segments(sequences_of(a), a.segments, a.G * ((all + units - 1) / units), device.multiprocessors,
                           2 * CHECKPOINT, CHECKPOINT);
}

static inline int64_t forward_segments(const gt_ssd_args& a, const Device& device) {
    return hopper_units(a, device) ? hopper_segments(a, device) : tensor_segments(a, device);
}

/* With one unit a warpgroup there are registers enough: one kernel does for calls with and without z. */
template <class T, int NP, int HEADS>
static gt_status launch_forward_hopper_with(const TensorParams& p, const Device& device, Chain& chain) {
    const auto with = [&](auto has_gate) {
        constexpr bool HAS_GATE = decltype(has_gate)::value;
        using Tile = HopperTile<T, NP, HEADS, HAS_GATE>;
        const int64_t each = p.in.G * group_bundles(p.in, Tile::UNITS), room = grid_room(p.in.sequences, 8, device);
        return run("ssd forward_hopper_kernel", forward_hopper_kernel<T, NP, HEADS, HAS_GATE>,
                   strands(most_sequences(p.in.sequences) * p.in.segments.count, each, room) * each, Tile::THREADS,
                   Tile::BYTES, chain, p);
    };
    return HEADS == 1 || p.in.z ? with(std::true_type()) : with(std::integral_constant<bool, HEADS == 1>());
}

template <int HEADS>
static gt_status launch_forward_hopper(const TensorParams& all, const Device& device, Chain& chain) {
    TensorParams p = all;
    const gt_status status =
        start_segments<false>(p.in, p.state_in, p.state_in_shared, tensor_blocks(p.in, device), device, chain);
    if (status != GT_OK) return status;
    p.in.columns = p.in.N;
    return dispatch_columns(p.in, [&](auto type, auto columns) {
        constexpr int N = decltype(columns)::value;
        return launch_forward_hopper_with < decltype(type), N == 32 ? 64 : N, HEADS > (p, device, chain);
    });
}

/* By the kernel that takes the call. */
static inline gt_status launch_fastest_forward(const gt_ssd_args& a, const TensorParams& p, const Device& device,
                                               Chain& chain) {
    const int units = hopper_units(a, device);
    return units == 4   ? launch_forward_hopper<2>(p, device, chain)
           : units == 2 ? launch_forward_hopper<1>(p, device, chain)
                        : launch_forward_tensor(p, device, chain);
}

} /* namespace ssd */
} /* namespace gt */

#endif
