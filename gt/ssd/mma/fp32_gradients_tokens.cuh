/* gt/ssd/mma/fp32_gradients_tokens.cuh - ssd backward with fp32 activations: the kernel that completes da with sums
 * from other chunks of the slot, and computes ddt.  It runs after the chunk kernels of mma/ and of sm90/. */
#ifndef GT_SSD_MMA_FP32_GRADIENTS_TOKENS_CUH
#define GT_SSD_MMA_FP32_GRADIENTS_TOKENS_CUH

#include "fp32_chunk.cuh"

namespace gt {
namespace ssd {

/* Adds the sums of the other chunks (Across) to da.  Then computes ddt and the partial sums of dA and ddt_bias.
 * grid B*slots*ceil(H/32), block 256: a block has one slot and 32 heads, one head per lane.  Warp w takes tokens w, w +
 * 8, ... in order, and the sums of the warps are added in order.  So results are deterministic.
 * registers: one sum for each chunk.  shared memory: 2 KB.
 * bytes per token and head: dt, ddt, and 8 for da and <x, U>. */
GT_KERNEL(THREADS, 2) chunk_times_fp32_kernel(const GT_GRID_CONSTANT ChunkTimesParams p) {
    const Problem& in = p.in;
    wait_for_chain();
    const int64_t lanes = (in.H + 31) / 32, slot = block_x() / lanes, b = slot / p.slots;
    const int64_t h = block_x() % lanes * 32 + lane_id();
    const gt_chunk chunk = chunk_at(in.sequences, CHECKPOINT, slot % p.slots);
    const int tokens = chunk.sequence < 0 || h >= in.H ? 0 : (int)(chunk.last - chunk.first);
    const int chunks = (tokens + SHORT - 1) / SHORT;
    /* sums[k] is added to da in chunk k: E of later chunks, F of earlier chunks, and Gamma of pairs with t in a later
     * and s in an earlier chunk. */
    float sums[SLOT_SHORTS] = {}, Z = 0.0f;
    GT_UNROLL
    for (int i = 0; i < SLOT_SHORTS; i++) {
        if (i >= chunks) continue;
        const float* from = p.across + (slot * SLOT_SHORTS + i) * Across::COUNT * in.H + h;
        Z += from[Across::Z * in.H];
        float later = from[Across::E * in.H]; /* E of chunk i, plus Gamma of its t with s in chunks before k */
        const float earlier = from[Across::F * in.H];
        GT_UNROLL
        for (int k = 0; k < SLOT_SHORTS; k++) {
            if (k < i) {
                sums[k] += later;
                later += from[(Across::GAMMA + (k < 3 ? k : 0)) * in.H];
            } else if (k > i) {
                sums[k] += earlier;
            }
        }
    }
    float dA = 0.0f, dbias = 0.0f;
    const float bias = h < in.H && in.dt_bias ? in.dt_bias[h] : 0.0f;
    for (int t = warp_id(); t < tokens; t += WARPS) {
        const int64_t token = chunk.first + t, from = (b * in.sequences.T + token) * in.H + h;
        const int k = t / SHORT;
        const float da = p.da[from] + (k < 2 ? k < 1 ? sums[0] : sums[1] : k < 3 ? sums[2] : sums[3]) + Z;
        const Delta delta = delta_of(in.rule, load_as(in.dt, in.dt_dtype, offset_of(in.dt_stride, b, token, h)) + bias);
        /* multiplies each term by the slope first, because the sum of the bare terms may overflow */
        float ddt = fma_rn(delta.slope * in.A[h], da, delta.slope * p.direct[from]);
        if (delta.slope == 0.0f) ddt = 0.0f;
        if (p.ddt) store_as(p.ddt, in.dt_dtype, offset_of(p.ddt_stride, b, token, h), ddt);
        dA = fma_rn(delta.value, da, dA);
        dbias += ddt;
    }
    const uint32_t addresses = smem_base();
    sts<float2>(addresses + 8 * thread_id(), float2{dA, dbias});
    sync_threads();
    if (warp_id() != 0 || h >= in.H) return;
    dA = dbias = 0.0f;
    for (int w = 0; w < WARPS; w++) {
        const float2 sum = lds<float2>(addresses + 8 * (32 * w + lane_id()));
        dA += sum.x;
        dbias += sum.y;
    }
    if (p.dA) p.dA[slot * in.H + h] = dA;
    if (p.dbias) p.dbias[slot * in.H + h] = dbias;
}

} /* namespace ssd */
} /* namespace gt */

#endif
