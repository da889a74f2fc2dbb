/* gt/ssd/launch_backward_tensor.cuh - ssd backward on tensor cores: its plan and its launches. */
#ifndef GT_SSD_LAUNCH_BACKWARD_TENSOR_CUH
#define GT_SSD_LAUNCH_BACKWARD_TENSOR_CUH

#include "../base/reduce.cuh"
#include "backward_sm90.cuh"
#include "backward_tensor.cuh"
#include "launch_tensor.cuh"

namespace gt {
namespace ssd {

/* The pieces of the workspace, and what the kernels are given. */
struct TensorBackwardPlan {
    StatesParams forward, reverse; /* h where forward did not leave it; G */
    TensorParams gate;             /* dz, and h then */
    ChunkGradientParams chunks;
    int64_t blocks, strands; /* of the passes over states */
    bool makes_h, makes_G, makes_dz;
    int64_t rows; /* of the sums of a slab */
    size_t bytes;
};

/* problem: with its segments, which lie in the arena already. */
static inline TensorBackwardPlan plan_tensor_backward(const gt_ssd_args& a, Arena& arena, const Problem& problem,
                                                      const Device& device) {
    TensorBackwardPlan plan = {};
    ChunkGradientParams& c = plan.chunks;
    c.in = problem;
    c.slots = chunk_slots(c.in.sequences, CHECKPOINT);
    c.by_tiles = (uint32_t)(((1ull << 32) + c.in.tiles - 1) / c.in.tiles);
    plan.blocks = tensor_blocks(c.in, device);
    plan.strands = plan.blocks / (c.in.G * group_pairs(c.in));
    /* sequences of one slot: states before and after it are the caller's */
    const bool one_slot = a.T <= CHECKPOINT;
    plan.makes_h = !a.saved && !(one_slot && !a.state_in);
    plan.makes_G = !one_slot || a.dstate_out || a.dstate_in;
    plan.makes_dz = a.z && a.dz;
    if (plan.makes_h) c.h = take_checkpoints(arena, a);
    if (plan.makes_G) c.G = take_checkpoints(arena, a);
    plan.rows = a.B * c.slots * 2;
    const int64_t rows = plan.rows * slabs((int)a.N);
    if (a.dA) c.dA = arena.take<float>(rows * a.H);
    if (a.ddt_bias) c.dbias = arena.take<float>(rows * a.H);
    if (a.dDskip) c.dskip = arena.take<float>(plan.rows * a.H * (a.Dskip_per_channel ? a.P : 1));
    const bool shared = a.dstate_in && a.state_in_shared;
    if (shared) plan.reverse.state_sum = arena.take<float>(plan.strands * a.H * a.P * a.N);
    if ((a.dx || plan.makes_dz) &&
        slabs((int)a.N) > 1) /* 64 rows of every chunk and tile of a head; no less than of dz */
        c.dx_share = arena.take<float>(plan.rows * CHUNK * a.H * c.in.tiles * TILE_P);
    if (a.ddt && slabs((int)a.N) > 1) c.ddt_share = arena.take<float>(a.B * a.T * a.H);
    plan.bytes = arena.bytes();

    plan.forward.in = plan.reverse.in = plan.gate.in = c.in;
    plan.forward.state_in = plan.gate.state_in = a.state_in;
    plan.forward.state_in_shared = plan.gate.state_in_shared = a.state_in_shared;
    plan.forward.checkpoints = plan.gate.checkpoints = c.h;
    plan.gate.y = a.dz;
    plan.gate.y_at = a.dz_stride;
    plan.gate.share = c.dx_share; /* before dx needs it */
    plan.gate.makes_dz = 1;
    plan.reverse.state_in = a.dstate_out;
    plan.reverse.state_out = shared ? nullptr : a.dstate_in;
    plan.reverse.checkpoints = c.G;
    size_t bytes;
    if (a.saved) c.h = checkpoints_in(a.saved, a, &bytes);
    if (!a.dx) c.dx_share = nullptr;
    c.dx = a.dx, c.ddt = a.ddt, c.dBm = a.dBm, c.dCm = a.dCm;
    c.dx_at = a.dx_stride, c.ddt_at = a.ddt_stride, c.dBm_at = a.dBm_stride, c.dCm_at = a.dCm_stride;
    return plan;
}

template <int N, int STAGES>
static gt_status launch_chunks_with(const ChunkGradientParams& p, Chain& chain) {
    using C = ChunkGradientTraits<N, STAGES>;
    const int64_t blocks = p.in.sequences.B * p.slots * p.in.G * 2;
    const bool has_more = p.in.z || p.in.N > SLAB;
    return run("ssd chunk_gradient_kernel",
               has_more ? chunk_gradient_kernel<N, STAGES, true> : chunk_gradient_kernel<N, STAGES, false>, blocks,
               C::THREADS, C::SMEM, chain, p);
}

/* Compute capability 9.0; N of more than 32, no z.  *taken: whether it was this kernel. */
template <class T, int N>
static gt_status launch_hopper_chunks(const ChunkGradientParams& p, const Device& device, Chain& chain, bool* taken) {
    using C = HopperGradientTraits<T, N>;
    static Answers known = {};
    void (*const kernel)(ChunkGradientParams) = chunk_gradient_hopper_kernel<T, N>;
    *taken = device.shared_bytes >= C::SMEM && has_sm90a(reinterpret_cast<const void*>(kernel), C::THREADS, known);
    if (!*taken) return GT_OK;
    return run("ssd chunk_gradient_hopper_kernel", kernel, p.in.sequences.B * p.slots * p.in.G * 2, C::THREADS, C::SMEM,
               chain, p);
}

/* With two stages where the device has room for them. */
static inline gt_status launch_slab_chunks(const ChunkGradientParams& p, const Device& device, Chain& chain) {
    const int N = p.in.columns;
    if (N > 32 && p.in.N <= SLAB && !p.in.z) {
        bool taken;
        const bool is_bf16 = p.in.dtype == GT_BF16;
        const gt_status status = N <= 64   ? is_bf16 ? launch_hopper_chunks<bf16, 64>(p, device, chain, &taken)
                                                     : launch_hopper_chunks<f16, 64>(p, device, chain, &taken)
                                   : is_bf16 ? launch_hopper_chunks<bf16, 128>(p, device, chain, &taken)
                                           : launch_hopper_chunks<f16, 128>(p, device, chain, &taken);
        if (taken) return status;
    }
    if (N <= 16) return launch_chunks_with<16, 2>(p, chain);
    if (N <= 32) return launch_chunks_with<32, 2>(p, chain);
    if (N <= 64)
        return device.shared_bytes >= ChunkGradientTraits<64, 2>::SMEM ? launch_chunks_with<64, 2>(p, chain)
                                                                       : launch_chunks_with<64, 1>(p, chain);
    return device.shared_bytes >= ChunkGradientTraits<128, 2>::SMEM ? launch_chunks_with<128, 2>(p, chain)
                                                                    : launch_chunks_with<128, 1>(p, chain);
}

/* rows: of the sums of a slab. */
static inline void take_slab(ChunkGradientParams& p, int slab, int64_t rows) {
    take_slab(p.in, slab);
    take_slab(p.h, slab);
    take_slab(p.G, slab);
    if (p.dBm) p.dBm = static_cast<uint16_t*>(p.dBm) + slab * SLAB;
    if (p.dCm) p.dCm = static_cast<uint16_t*>(p.dCm) + slab * SLAB;
    if (p.dA) p.dA += slab * rows * p.in.H;
    if (p.dbias) p.dbias += slab * rows * p.in.H;
    p.has_share = slab > 0;
    p.leaves_share = slab + 1 < slabs(p.in.N);
    if (p.leaves_share) p.in.Dskip = p.dskip = nullptr; /* they are no sums over columns */
}

static inline gt_status launch_chunks(const ChunkGradientParams& all, int64_t rows, const Device& device,
                                      Chain& chain) {
    gt_status status = GT_OK;
    for (int slab = 0; slab < slabs(all.in.N) && status == GT_OK; slab++) {
        ChunkGradientParams p = all;
        take_slab(p, slab, rows);
        status = launch_slab_chunks(p, device, chain);
    }
    return status;
}

static inline gt_status launch_tensor_backward(const gt_ssd_args& a, const TensorBackwardPlan& plan,
                                               const Device& device, gt_stream stream) {
    const ChunkGradientParams& c = plan.chunks;
    ClearParams unused = {};
    add_output(unused, a.dx, a.dx_stride, a.dtype, a.H, a.P);
    add_output(unused, a.dz, a.dz_stride, a.dtype, a.H, a.P);
    add_output(unused, a.ddt, a.ddt_stride, a.dt_dtype, a.H, 1);
    add_output(unused, a.dBm, a.dBm_stride, a.dtype, a.G, a.N);
    add_output(unused, a.dCm, a.dCm_stride, a.dtype, a.G, a.N);
    Chain chain = {stream};
    RowSums sums;
    const int64_t rows = plan.rows * slabs((int)a.N);
    if (a.dA) sums.add(c.dA, a.dA, rows, a.H);
    if (a.ddt_bias) sums.add(c.dbias, a.ddt_bias, rows, a.H);
    if (a.dDskip) sums.add(c.dskip, a.dDskip, plan.rows, a.H * (a.Dskip_per_channel ? a.P : 1));
    gt_status status = clear_unused("ssd clear_unused_kernel", unused, c.in.sequences, device, stream);
    if (status == GT_OK && plan.makes_dz)
        status = launch_forward_tensor(plan.gate, device, chain);
    else if (status == GT_OK && plan.makes_h)
        status = launch_states_tensor<false>(plan.forward, plan.blocks, device, chain);
    if (status == GT_OK && plan.makes_G) status = launch_states_tensor<true>(plan.reverse, plan.blocks, device, chain);
    if (status == GT_OK) status = launch_chunks(c, plan.rows, device, chain);
    if (status == GT_OK) status = reduce_rows(sums, a.accumulate, chain);
    if (status != GT_OK || !plan.reverse.state_sum) return status;
    return reduce_rows(plan.reverse.state_sum, a.dstate_in, plan.strands, a.H * a.P * a.N, a.accumulate, chain);
}

} /* namespace ssd */
} /* namespace gt */

#endif
