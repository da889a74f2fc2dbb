/* gt/ssd/mma/launch.cuh - ssd forward on tensor cores: launches, but those of 16 bits on compute capability 9.0. */
#ifndef GT_SSD_MMA_LAUNCH_CUH
#define GT_SSD_MMA_LAUNCH_CUH

#include "../sm90/fp32_forward.cuh"
#include "launch_states.cuh"

namespace gt {
namespace ssd {

static inline gt_status launch_forward_fp32(const TensorParams& p, int64_t blocks, Chain& chain) {
    return with_size<16, 64, 128>(p.in.columns, [&](auto columns) {
        using Tile = ForwardSplitTile<decltype(columns)::value>;
        return run("ssd forward_fp32_kernel", forward_fp32_kernel<Tile::NP>, blocks, THREADS, Tile::BYTES, chain, p);
    });
}

static inline gt_status launch_forward_fp32_hopper(const TensorParams& all, const Device& device, Chain& chain) {
    return with_size<64, 128>(all.in.columns, [&](auto columns) {
        using Tile = SplitHopperTile<decltype(columns)::value>;
        TensorParams p = all;
        const int64_t blocks = take_bundles(p.in, Tile::UNITS, strands_of_units(p.in, Tile::UNITS, 1, device));
        return run("ssd forward_fp32_hopper_kernel", forward_fp32_hopper_kernel<Tile::NP>, blocks, Tile::THREADS,
                   Tile::BYTES, chain, p);
    });
}

static inline void take_slab(TensorParams& p, int slab) {
    take_slab(p.in, slab);
    take_slab(p.checkpoints, slab);
    skip_columns(p.state_in, slab * SLAB);
    skip_columns(p.state_out, slab * SLAB);
    p.has_share = slab > 0;
    p.leaves_share = slab + 1 < slabs(p.in.N);
}

/* What several launches hand on of y or dx; NULL for one. */
static inline float* take_share(Arena& arena, const gt_ssd_args& a) {
    return slabs((int)a.N) > 1 ? arena.take<float>(a.B * a.T * a.H * a.P) : nullptr;
}

static inline gt_status launch_forward_tensor(const TensorParams& all, const ForwardChoice& choice,
                                              const Device& device, Chain& chain) {
    const gt_status status =
        start_segments<false>(all.in, all.state_in, all.state_in_shared, choice.local, device, chain);
    if (status != GT_OK) return status;
    const int64_t blocks = strands_of_units(all.in, 2, 2, device) * all.in.G * group_pairs(all.in);
    return each_slab(all, [&](const TensorParams& p, int) {
        if (choice.family == Family::SM90) return launch_forward_fp32_hopper(p, device, chain);
        if (p.in.dtype == GT_F32) return launch_forward_fp32(p, blocks, chain);
        return dispatch_columns(p.in, [&](auto type, auto columns) {
            using Tile = ForwardTile<decltype(type), decltype(columns)::value>;
            return run("ssd forward_tensor_kernel", forward_tensor_kernel<typename Tile::T, Tile::NP>, blocks, THREADS,
                       Tile::BYTES, chain, p);
        });
    });
}

} /* namespace ssd */
} /* namespace gt */

#endif
