/* gt/ssd/mma/launch.cuh - launches the kernels of ssd that use mma.sync.  A launch takes one slab of columns (SLAB in
 * problem.cuh). */
#ifndef GT_SSD_MMA_LAUNCH_CUH
#define GT_SSD_MMA_LAUNCH_CUH

#include "../plan.cuh"
#include "forward.cuh"
#include "fp32_forward.cuh"
#include "fp32_gradients.cuh"
#include "fp32_gradients_tokens.cuh"
#include "gradients.cuh"
#include "states.cuh"

namespace gt {
namespace ssd {

/* ---- forward ---------------------------------------------------------------------------------------------------- */

static inline gt_status launch_forward_tensor(const TensorParams& p, int64_t blocks, Chain& chain) {
    return dispatch_columns(p.in, [&](auto type, auto columns) {
        using Tile = ForwardTile<decltype(type), decltype(columns)::value>;
        return run("ssd forward_tensor_kernel", forward_tensor_kernel<typename Tile::T, Tile::NP>, blocks, THREADS,
                   Tile::BYTES, chain, p);
    });
}

static inline gt_status launch_forward_fp32(const TensorParams& p, int64_t blocks, Chain& chain) {
    return dispatch_fp32<16, 64, 128>(p.in, [&](auto columns) {
        using Tile = ForwardSplitTile<decltype(columns)::value>;
        return run("ssd forward_fp32_kernel", forward_fp32_kernel<Tile::NP>, blocks, THREADS, Tile::BYTES, chain, p);
    });
}

/* ---- states ----------------------------------------------------------------------------------------------------- */

template <bool REVERSE>
static gt_status launch_states_tensor(const StatesParams& p, int64_t blocks, Chain& chain) {
    return dispatch_columns(p.in, [&](auto type, auto columns) {
        using Tile = StatesTile<decltype(type), decltype(columns)::value>;
        return run("ssd states_tensor_kernel", states_tensor_kernel<typename Tile::T, Tile::NP, REVERSE>, blocks,
                   THREADS, Tile::BYTES, chain, p);
    });
}

template <bool REVERSE>
static gt_status launch_states_fp32(const StatesParams& p, int64_t blocks, Chain& chain) {
    return dispatch_fp32<16, 64, 128>(p.in, [&](auto columns) {
        using Tile = StatesSplitTile<decltype(columns)::value>;
        return run("ssd states_fp32_kernel", states_fp32_kernel<Tile::NP, REVERSE>, blocks, THREADS, Tile::BYTES, chain,
                   p);
    });
}

/* ---- gradients -------------------------------------------------------------------------------------------------- */

template <int N, int STAGES>
static gt_status launch_chunks_with(const ChunkGradientParams& p, Chain& chain) {
    using C = ChunkGradientTraits<N, STAGES>;
    const int64_t blocks = p.in.sequences.B * p.slots * p.in.G * 2;
    const bool has_more = p.in.z || p.in.N > SLAB;
    return run("ssd chunk_gradient_kernel",
               has_more ? chunk_gradient_kernel<N, STAGES, true> : chunk_gradient_kernel<N, STAGES, false>, blocks,
               C::THREADS, C::SMEM, chain, p);
}

/* The same kernel takes bf16 and f16. */
static inline gt_status launch_slab_chunks(const ChunkGradientParams& p, int stages, Chain& chain) {
    return dispatch_columns(p.in, [&](auto, auto columns) {
        constexpr int N = decltype(columns)::value;
        static_assert((N < 64) == (ChunkGradientTraits<N, 2>::SMEM <= 99 * 1024), "as choose() has it");
        if constexpr (N >= 64)
            if (stages == 1) return launch_chunks_with<N, 1>(p, chain);
        return launch_chunks_with<N, 2>(p, chain);
    });
}

static inline gt_status launch_split_chunks(const SplitGradientParams& p, Chain& chain) {
    const int64_t places = p.in.sequences.B * p.slots * p.in.G;
    return dispatch_fp32<16, 64, 128>(p.in, [&](auto columns) {
        using Tile = GradientSplitTile<decltype(columns)::value>;
        return run("ssd chunk_gradient_fp32_kernel", chunk_gradient_fp32_kernel<Tile::NP>, places * SLOT_SHORTS,
                   THREADS, Tile::BYTES, chain, p);
    });
}

static inline gt_status launch_split_times(const ChunkTimesParams& p, Chain& chain) {
    return run("ssd chunk_times_fp32_kernel", chunk_times_fp32_kernel,
               p.in.sequences.B * p.slots * ((p.in.H + 31) / 32), THREADS, 8 * THREADS, chain, p);
}

} /* namespace ssd */
} /* namespace gt */

#endif
