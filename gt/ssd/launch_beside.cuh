/* gt/ssd/launch_beside.cuh - ssd beside another operator's kernels, of wkv_ssm: which calls, and the launches. */
#ifndef GT_SSD_LAUNCH_BESIDE_CUH
#define GT_SSD_LAUNCH_BESIDE_CUH

#include "beside_sm90.cuh"
#include "launch_sm90.cuh"

namespace gt {
namespace ssd {

/* units: see states_units().  With two, the call has no more blocks than there are multiprocessors, or few more. */
static inline bool fits_beside(const Problem& in, int units) {
    return units == 2 && in.N > 32 && in.N <= 64 && in.segments.count == 1;
}

static inline int64_t beside_strands(const Problem& in, const Device& device) {
    return strands(most_sequences(in.sequences), in.G * group_bundles(in, 2), grid_room(in.sequences, 8, device));
}

static inline gt_status launch_forward_beside(const TensorParams& all, const Device& device, Chain& chain) {
    TensorParams p = all;
    p.in.columns = p.in.N;
    const auto with = [&](auto type) {
        using Tile = BesideTile<decltype(type)>;
        return run("ssd forward_beside_kernel", forward_beside_kernel<typename Tile::T>,
                   beside_strands(p.in, device) * p.in.G * group_bundles(p.in, Tile::UNITS), Tile::THREADS, Tile::BYTES,
                   chain, p);
    };
    return p.in.dtype == GT_BF16 ? with(bf16()) : with(f16());
}

/* G: the reverse pass. */
static inline gt_status launch_states_beside(const StatesParams& states, const Device& device, Chain& chain) {
    const Problem& in = states.in;
    HopperStatesParams p = {states, in.dy, in.Cm, in.dy_stride, in.Cm_stride, true};
    p.states.in.columns = in.N;
    const auto with = [&](auto type) {
        using Tile = BesideStatesTile<decltype(type)>;
        return run("ssd states_beside_kernel", states_beside_kernel<typename Tile::T>,
                   beside_strands(in, device) * in.G * group_bundles(in, Tile::UNITS), Tile::THREADS, Tile::BYTES,
                   chain, p);
    };
    return in.dtype == GT_BF16 ? with(bf16()) : with(f16());
}

} /* namespace ssd */
} /* namespace gt */

#endif
