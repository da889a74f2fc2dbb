/* gt/ssd/launch_backward_tensor.cuh - ssd backward on tensor cores: its plan and its launches. */
#ifndef GT_SSD_LAUNCH_BACKWARD_TENSOR_CUH
#define GT_SSD_LAUNCH_BACKWARD_TENSOR_CUH

#include "backward_tensor.cuh"
#include "finish.cuh"
#include "launch_tensor.cuh"

namespace gt {
namespace ssd {

/* The pieces of the workspace, and what the kernels are given. */
struct TensorBackwardPlan {
    StatesParams forward, reverse; /* h where forward did not leave it; G */
    ChunkGradientParams chunks;
    int64_t blocks, strands; /* of the passes over states */
    bool makes_h, makes_G;
    size_t bytes;
};

static inline bool takes_tensor_backward(const gt_ssd_args& a, const Device& device) {
    return takes_tensor_cores(a, device) && !a.z;
}

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
    if (plan.makes_h) c.h = take_checkpoints(arena, a);
    if (plan.makes_G) c.G = take_checkpoints(arena, a);
    const int64_t rows = a.B * c.slots * 2;
    if (a.dA) c.dA = arena.take<float>(rows * a.H);
    if (a.ddt_bias) c.dbias = arena.take<float>(rows * a.H);
    if (a.dDskip) c.dskip = arena.take<float>(rows * a.H * (a.Dskip_per_channel ? a.P : 1));
    const bool shared = a.dstate_in && a.state_in_shared;
    if (shared) plan.reverse.state_sum = arena.take<float>(plan.strands * a.H * a.P * a.N);
    plan.bytes = arena.bytes();

    plan.forward.in = plan.reverse.in = c.in;
    plan.forward.state_in = a.state_in;
    plan.forward.state_in_shared = a.state_in_shared;
    plan.forward.checkpoints = c.h;
    plan.reverse.state_in = a.dstate_out;
    plan.reverse.state_out = shared ? nullptr : a.dstate_in;
    plan.reverse.checkpoints = c.G;
    size_t bytes;
    if (a.saved) c.h = checkpoints_in(a.saved, a, &bytes);
    c.dx = a.dx, c.ddt = a.ddt, c.dBm = a.dBm, c.dCm = a.dCm;
    c.dx_at = a.dx_stride, c.ddt_at = a.ddt_stride, c.dBm_at = a.dBm_stride, c.dCm_at = a.dCm_stride;
    return plan;
}

template <int N, int STAGES>
static gt_status launch_chunks_with(const ChunkGradientParams& p, Chain& chain) {
    const int64_t blocks = p.in.sequences.B * p.slots * p.in.G * 2;
    return run("ssd chunk_gradient_kernel", chunk_gradient_kernel<N, STAGES>, blocks,
               ChunkGradientTraits<N, STAGES>::THREADS, ChunkGradientTraits<N, STAGES>::SMEM, chain, p);
}

/* With two stages where the device has room for them. */
static inline gt_status launch_chunks(const ChunkGradientParams& p, const Device& device, Chain& chain) {
    const int N = p.in.N;
    if (N <= 16) return launch_chunks_with<16, 2>(p, chain);
    if (N <= 32) return launch_chunks_with<32, 2>(p, chain);
    if (N <= 64)
        return device.shared_bytes >= ChunkGradientTraits<64, 2>::SMEM ? launch_chunks_with<64, 2>(p, chain)
                                                                       : launch_chunks_with<64, 1>(p, chain);
    return device.shared_bytes >= ChunkGradientTraits<128, 2>::SMEM ? launch_chunks_with<128, 2>(p, chain)
                                                                    : launch_chunks_with<128, 1>(p, chain);
}

static inline gt_status launch_tensor_backward(const gt_ssd_args& a, const TensorBackwardPlan& plan,
                                               const Device& device, gt_stream stream) {
    const ChunkGradientParams& c = plan.chunks;
    const int64_t skips = a.H * (a.Dskip_per_channel ? a.P : 1);
    ClearParams unused = {};
    add_output(unused, a.dx, a.dx_stride, a.dtype, a.H, a.P);
    add_output(unused, a.ddt, a.ddt_stride, a.dt_dtype, a.H, 1);
    add_output(unused, a.dBm, a.dBm_stride, a.dtype, a.G, a.N);
    add_output(unused, a.dCm, a.dCm_stride, a.dtype, a.G, a.N);
    Chain chain = {stream};
    FinishParams finish = {};
    finish.rows = a.B * c.slots * 2;
    finish.accumulate = a.accumulate;
    add_sum(finish, c.dA, a.dA, a.H);
    add_sum(finish, c.dbias, a.ddt_bias, a.H);
    add_sum(finish, c.dskip, a.dDskip, skips);
    gt_status status = clear_unused("ssd clear_unused_kernel", unused, c.in.sequences, device, stream);
    if (status == GT_OK && plan.makes_h) status = launch_states_tensor<false>(plan.forward, plan.blocks, device, chain);
    if (status == GT_OK && plan.makes_G) status = launch_states_tensor<true>(plan.reverse, plan.blocks, device, chain);
    if (status == GT_OK) status = launch_chunks(c, device, chain);
    if (status == GT_OK) status = finish_sums(finish, chain);
    if (status != GT_OK || !plan.reverse.state_sum) return status;
    return reduce_rows(plan.reverse.state_sum, a.dstate_in, plan.strands, a.H * a.P * a.N, a.accumulate, chain);
}

} /* namespace ssd */
} /* namespace gt */

#endif
