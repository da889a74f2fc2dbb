/* gt/ssd/launch_tensor.cuh - ssd on tensor cores: which calls take these kernels; forward. */
#ifndef GT_SSD_LAUNCH_TENSOR_CUH
#define GT_SSD_LAUNCH_TENSOR_CUH

#include "forward_fp32_sm90.cuh"
#include "launch_states.cuh"

namespace gt {
namespace ssd {

/* NULL, or rows that are whole pieces of 16 bytes. */
static inline bool has_pieces(const gt_ssd_args& a, const void* data, const gt_stride& stride) {
    const int piece = a.dtype == GT_F32 ? 4 : 8;
    return !data ||
           ((uintptr_t)data % 16 == 0 && stride.b % piece == 0 && stride.t % piece == 0 && stride.h % piece == 0);
}

/* States are read and written two numbers at a time. */
static inline bool has_pairs(const float* state) { return (uintptr_t)state % 8 == 0; }

/* Whether the slots of all heads, by tiles of 64 rows, are so many that kernels on tensor cores, which number them and
 * their quarters by int, cannot take them. */
static inline bool has_too_many_slots(const gt_ssd_args& a) {
    return gt_times(checkpoint_slots(a), (a.P + TILE_P - 1) / TILE_P) >= INT32_MAX / 8;
}

/* Whether tensor cores take the call: sizes, device, rows, states. */
static inline bool takes_tensor_cores(const gt_ssd_args& a, const Device& device) {
    return has_tensor_sizes(a) && !has_too_many_slots(a) && device.compute_capability >= 80 &&
           device.shared_bytes >= 99 * 1024 && has_pieces(a, a.x, a.x_stride) && has_pieces(a, a.Bm, a.Bm_stride) &&
           has_pieces(a, a.Cm, a.Cm_stride) && has_pieces(a, a.z, a.z_stride) && has_pieces(a, a.y, a.y_stride) &&
           has_pieces(a, a.dy, a.dy_stride) && has_pieces(a, a.dx, a.dx_stride) && has_pieces(a, a.dz, a.dz_stride) &&
           has_pieces(a, a.dBm, a.dBm_stride) && has_pieces(a, a.dCm, a.dCm_stride) && has_pairs(a.state_in) &&
           has_pairs(a.state_out) && has_pairs(a.dstate_in) && has_pairs(a.dstate_out);
}

/* Whether forward leaves states for backward, which by these kernels needs none but the call's for sequences of one
 * slot.  It must not depend on tensors: of forward they may be aligned otherwise than of backward. */
static inline bool saves_states(const gt_ssd_args& a, const Device& device) {
    return a.seq_capacity > 0 || a.T > CHECKPOINT || !has_tensor_sizes(a) || device.compute_capability < 80;
}

static inline gt_status launch_forward_fp32(const TensorParams& p, int64_t blocks, Chain& chain) {
    return with_size<16, 64, 128>(p.in.columns, [&](auto columns) {
        using Tile = ForwardSplitTile<decltype(columns)::value>;
        return run("ssd forward_fp32_kernel", forward_fp32_kernel<Tile::NP>, blocks, THREADS, Tile::BYTES, chain, p);
    });
}

/* Whether forward of fp32 is that for compute capability 9.0: with one unit a group half of a block would be idle. */
static inline bool takes_split_hopper(const Problem& in, const Device& device) {
    return in.dtype == GT_F32 && in.N > 16 && in.N <= SLAB && group_units(in) >= 2 && device.compute_capability == 90 &&
           has_hopper_kernels();
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

/* units: see states_units(). */
static inline gt_status launch_forward_tensor(const TensorParams& all, int units, const Device& device, Chain& chain) {
    const gt_status status = start_segments<false>(all.in, all.state_in, all.state_in_shared, units, device, chain);
    if (status != GT_OK) return status;
    const int64_t blocks = states_strands(all.in, 0, device) * all.in.G * group_pairs(all.in);
    return each_slab(all, [&](const TensorParams& p, int) {
        if (takes_split_hopper(p.in, device)) return launch_forward_fp32_hopper(p, device, chain);
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
