/* gt/ssd/launch_sm90.cuh - ssd forward: which calls take the kernel for compute capability 9.0, and its launch. */
#ifndef GT_SSD_LAUNCH_SM90_CUH
#define GT_SSD_LAUNCH_SM90_CUH

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

/* With 128 columns in a warpgroup there are registers enough: one kernel does for calls with and without z. */
template <class T, int NP, int UNITS>
static gt_status launch_forward_hopper_with(const TensorParams& all, const Device& device, Chain& chain) {
    HopperForwardParams p;
    static_cast<TensorParams&>(p) = all;
    const gt_status status = map_outputs(p);
    if (status != GT_OK) return status;
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
