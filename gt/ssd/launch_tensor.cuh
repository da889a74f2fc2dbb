/* gt/ssd/launch_tensor.cuh - ssd on tensor cores: which calls take these kernels; forward and the passes over
 * states. */
#ifndef GT_SSD_LAUNCH_TENSOR_CUH
#define GT_SSD_LAUNCH_TENSOR_CUH

#include "forward_fp32.cuh"
#include "launch_any.cuh"

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

/* Whether tensor cores take the call: sizes, device, rows, states. */
static inline bool takes_tensor_cores(const gt_ssd_args& a, const Device& device) {
    return has_tensor_sizes(a) && device.compute_capability >= 80 && device.shared_bytes >= 99 * 1024 &&
           has_pieces(a, a.x, a.x_stride) && has_pieces(a, a.Bm, a.Bm_stride) && has_pieces(a, a.Cm, a.Cm_stride) &&
           has_pieces(a, a.z, a.z_stride) && has_pieces(a, a.y, a.y_stride) && has_pieces(a, a.dy, a.dy_stride) &&
           has_pieces(a, a.dx, a.dx_stride) && has_pieces(a, a.dz, a.dz_stride) && has_pieces(a, a.dBm, a.dBm_stride) &&
           has_pieces(a, a.dCm, a.dCm_stride) && has_pairs(a.state_in) && has_pairs(a.state_out) &&
           has_pairs(a.dstate_in) && has_pairs(a.dstate_out);
}

constexpr int BLOCKS_FIT = 2; /* on a multiprocessor, as compiled */

static inline int64_t tensor_pairs(const gt_ssd_args& a) {
    const int64_t units = a.H / a.G * ((a.P + TILE_P - 1) / TILE_P);
    return a.G * ((units + UNITS - 1) / UNITS);
}

/* As many segments as fill the multiprocessors. */
static inline int64_t tensor_segments(const gt_ssd_args& a, const Device& device) {
    return choose_segments(sequences_of(a), a.segments, tensor_pairs(a), BLOCKS_FIT * (int64_t)device.multiprocessors,
                           2 * CHECKPOINT, CHECKPOINT);
}

/* launch(T(), number of columns) of the kernels on tensor cores that handle the columns of a launch. */
template <class Launch>
static inline gt_status dispatch_columns(const Problem& in, const Launch& launch) {
    const auto with = [&](auto columns) {
        return in.dtype == GT_BF16 ? launch(bf16(), columns) : launch(f16(), columns);
    };
    const int N = in.columns;
    if (N <= 16) return with(std::integral_constant<int, 16>());
    if (N <= 32) return with(std::integral_constant<int, 32>());
    if (N <= 64) return with(std::integral_constant<int, 64>());
    return with(std::integral_constant<int, 128>());
}

/* launch(number of columns) of the kernels for fp32. */
template <class Launch>
static inline gt_status dispatch_fp32_columns(const Problem& in, const Launch& launch) {
    if (in.columns <= 16) return launch(std::integral_constant<int, 16>());
    if (in.columns <= 64) return launch(std::integral_constant<int, 64>());
    return launch(std::integral_constant<int, 128>());
}

static inline gt_status launch_forward_fp32(const TensorParams& p, int64_t blocks, Chain& chain) {
    return dispatch_fp32_columns(p.in, [&](auto columns) {
        using Tile = ForwardSplitTile<decltype(columns)::value>;
        return run("ssd forward_fp32_kernel", forward_fp32_kernel<Tile::NP>, blocks, THREADS, Tile::BYTES, chain, p);
    });
}

template <bool REVERSE>
static gt_status launch_states_fp32(const StatesParams& p, int64_t blocks, Chain& chain) {
    return dispatch_fp32_columns(p.in, [&](auto columns) {
        using Tile = StatesSplitTile<decltype(columns)::value>;
        return run("ssd states_fp32_kernel", states_fp32_kernel<Tile::NP, REVERSE>, blocks, THREADS, Tile::BYTES, chain,
                   p);
    });
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
    if (in.segments.states) in.segments.states += slab * SLAB;
}

static inline void take_slab(Checkpoints& checkpoints, int slab) {
    if (checkpoints.plain) checkpoints.plain += slab * SLAB;
    if (!checkpoints.values) return;
    checkpoints.values += slab * SLAB;
    checkpoints.powers += slab;
}

static inline void take_slab(StatesParams& p, int slab) {
    take_slab(p.in, slab);
    take_slab(p.checkpoints, slab);
    if (p.state_in) p.state_in += slab * SLAB;
    if (p.state_out) p.state_out += slab * SLAB;
    if (p.state_sum) p.state_sum += slab * SLAB;
}

static inline void take_slab(TensorParams& p, int slab) {
    take_slab(p.in, slab);
    take_slab(p.checkpoints, slab);
    if (p.state_in) p.state_in += slab * SLAB;
    if (p.state_out) p.state_out += slab * SLAB;
    p.has_share = slab > 0;
    p.leaves_share = slab + 1 < slabs(p.in.N);
}

template <bool REVERSE>
static gt_status launch_states_once(const StatesParams& all, int64_t blocks, Chain& chain) {
    gt_status status = GT_OK;
    for (int slab = 0; slab < slabs(all.in.N) && status == GT_OK; slab++) {
        StatesParams p = all;
        take_slab(p, slab);
        if (p.in.dtype == GT_F32) {
            status = launch_states_fp32<REVERSE>(p, blocks, chain);
            continue;
        }
        status = dispatch_columns(p.in, [&](auto type, auto columns) {
            using Tile = StatesTile<decltype(type), decltype(columns)::value>;
            return run("ssd states_tensor_kernel", states_tensor_kernel<typename Tile::T, Tile::NP, REVERSE>, blocks,
                       THREADS, Tile::BYTES, chain, p);
        });
    }
    return status;
}

/* The states that segments start from, in segments.states, where there are several. */
template <bool REVERSE>
static gt_status start_segments(const Problem& in, const float* state_in, int state_in_shared, int64_t blocks,
                                const Device& device, Chain& chain) {
    if (in.segments.count == 1) return GT_OK;
    StatesParams local = {};
    local.in = in;
    local.is_local = ALL_BUT_LAST;
    const gt_status status = launch_states_once<REVERSE>(local, blocks, chain);
    if (status != GT_OK) return status;
    return scan_segments<REVERSE>("ssd scan_segments_kernel", scan_of(in, state_in, state_in_shared), device, chain);
}

/* Blocks of a pair of units: one a segment. */
static inline int64_t tensor_blocks(const Problem& in, const Device& device) {
    const int64_t pairs = in.G * group_pairs(in), room = grid_room(in.sequences, 8 * BLOCKS_FIT, device);
    return strands(most_sequences(in.sequences) * in.segments.count, pairs, room) * pairs;
}

/* What several launches hand on of y or dx; NULL for one. */
static inline float* take_share(Arena& arena, const gt_ssd_args& a) {
    return slabs((int)a.N) > 1 ? arena.take<float>(a.B * a.T * a.H * a.P) : nullptr;
}

static inline gt_status launch_forward_tensor(const TensorParams& all, const Device& device, Chain& chain) {
    const int64_t blocks = tensor_blocks(all.in, device);
    gt_status status = start_segments<false>(all.in, all.state_in, all.state_in_shared, blocks, device, chain);
    for (int slab = 0; slab < slabs(all.in.N) && status == GT_OK; slab++) {
        TensorParams p = all;
        take_slab(p, slab);
        if (p.in.dtype == GT_F32) {
            status = launch_forward_fp32(p, blocks, chain);
            continue;
        }
        status = dispatch_columns(p.in, [&](auto type, auto columns) {
            using Tile = ForwardTile<decltype(type), decltype(columns)::value>;
            return run("ssd forward_tensor_kernel", forward_tensor_kernel<typename Tile::T, Tile::NP>, blocks, THREADS,
                       Tile::BYTES, chain, p);
        });
    }
    return status;
}

/* Checkpoints of h (state_in: the initial states), or REVERSE of G and dstate_in (state_in: dstate_out).
 * p.state_sum: of `strands` strands. */
template <bool REVERSE>
static gt_status launch_states_tensor(const StatesParams& p, int64_t blocks, const Device& device, Chain& chain) {
    const gt_status status = start_segments<REVERSE>(p.in, p.state_in, p.state_in_shared, blocks, device, chain);
    return status != GT_OK ? status : launch_states_once<REVERSE>(p, blocks, chain);
}

} /* namespace ssd */
} /* namespace gt */

#endif
