/* gt/ssd/mma/fp32_gradients_tokens.cuh - ssd backward of a chunk on tensor cores, fp32 activations (fp32_gradients.cuh): what
 * is made by token: da and its sums across chunks, by a warp after a step; and the kernel that makes ddt of them. */
#ifndef GT_SSD_MMA_FP32_GRADIENTS_TOKENS_CUH
#define GT_SSD_MMA_FP32_GRADIENTS_TOKENS_CUH

#include "fp32_gradients_chunk.cuh"

namespace gt {
namespace ssd {

/* ---- a chunk ----------------------------------------------------------------------------------------------------- */

/* da, <x, U>, the sums across and dDskip of a step that is done, added to those of the head's steps before; after the
 * last they go to memory.  One warp. */
template <class Tile>
GT_DEV void finish_split_step(const SplitGradientParams& p, const SplitGradientBlock<Tile>& me, int h, int p0) {
    const Problem& in = p.in;
    const int lane = lane_id(), tokens = me.tokens(me.me);
    const bool is_first = p0 == 0, is_last = p0 + ROWS_P >= in.P;
    const auto address = [&](int offset) { return lds<float>(me.address(offset + lane)); };
    if (p.dskip) {
        const int64_t row = ((int64_t)me.b() * p.slots + me.slot()) * SLOT_SHORTS + me.me;
        float sums[2];
        GT_UNROLL
        for (int i = 0; i < 2; i++) {
            const int column = p0 + SHORT * i + lane;
            sums[i] =
                column < in.P ? address(Tile::DSKIP + SHORT * i) + address(Tile::DSKIP + ROWS_P + SHORT * i) : 0.0f;
            if (in.skip_per_channel && column < in.P) p.dskip[(row * in.H + h) * in.P + column] = sums[i];
        }
        if (!in.skip_per_channel) {
            float all = warp_sum(sums[0] + sums[1]);
            if (!is_first) all += me.value(Tile::DSKIP_SUM);
            sync_warp();
            if (lane == 0) {
                sts<float>(me.address(Tile::DSKIP_SUM), all);
                if (is_last) p.dskip[row * in.H + h] = all;
            }
        }
    }
    if (!p.da) return;
    float E = 0.0f, Z = 0.0f;
    GT_UNROLL
    for (int i = 0; i < Tile::ACTIVE; i++) E += address(Tile::E + SHORT * i);
    GT_UNROLL
    for (int i = 0; i < Tile::ACTIVE; i++) Z += me.value(Tile::Z + i);
    const float F =
        (address(Tile::F) + address(Tile::F + SHORT)) + (address(Tile::F + 2 * SHORT) + address(Tile::F + 3 * SHORT));
    float direct = (address(Tile::DIRECT) + address(Tile::DIRECT + SHORT)) +
                   (address(Tile::DIRECT + 2 * SHORT) + address(Tile::DIRECT + 3 * SHORT));
    float across = 0.0f, from = E, upto = F; /* of k: sums over t >= k, over s < k */
    const float all_E = warp_sum(E), all_F = warp_sum(F);
    if (lane == Across::E) across = all_E;
    if (lane == Across::F) across = all_F;
    if (lane == Across::Z) across = Z;
    GT_UNROLL
    for (int i = 0; i < SLOT_SHORTS; i++) {
        if (i == me.me) continue;
        const float row = address(Tile::GAMMA + 2 * SHORT * i) + address(Tile::GAMMA + 2 * SHORT * i + SHORT);
        if (i > me.me) {
            upto += row;
            continue;
        }
        from += row;
        const float all = warp_sum(row);
        if (lane == Across::GAMMA + i) across = all;
    }
    const float corner =
        address(Tile::CORNER); /* s of the first 16 with all later t; t of the later with all of those */
    float corner_upto = corner, corner_from = corner;
    GT_UNROLL
    for (int d = 1; d < 32; d *= 2) {
        const float left = shfl_up(upto, d), right = shfl_down(from, d);
        upto += lane >= d ? left : 0.0f;
        from += lane + d < 32 ? right : 0.0f;
        const float corner_left = shfl_up(corner_upto, d), corner_right = shfl_down(corner_from, d);
        corner_upto += lane >= d ? corner_left : 0.0f;
        corner_from += lane + d < 32 ? corner_right : 0.0f;
    }
    upto = shfl_up(upto, 1);
    corner_upto = shfl_up(corner_upto, 1);
    if (lane == 0) upto = corner_upto = 0.0f;
    float da = from + upto + (lane < 16 ? corner_upto : corner_from) + address(Tile::DIAGONAL);
    if (!is_first) {
        da += address(Tile::KEPT);
        direct += address(Tile::KEPT + SHORT);
        across += address(Tile::KEPT + 2 * SHORT);
    }
    if (!is_last) {
        sync_warp();
        sts<float>(me.address(Tile::KEPT + lane), da);
        sts<float>(me.address(Tile::KEPT + SHORT + lane), direct);
        sts<float>(me.address(Tile::KEPT + 2 * SHORT + lane), across);
        sync_warp();
        return;
    }
    const auto put = [&](float* to, float value) { *to = p.has_share ? *to + value : value; };
    if (lane < tokens) {
        const int64_t to = ((int64_t)me.b() * in.sequences.T + me.token(me.me) + lane) * in.H + h;
        put(p.da + to, da);
        put(p.direct + to, direct);
    }
    const int64_t slot = (int64_t)me.b() * p.slots + me.slot();
    if (lane < Across::COUNT) put(p.across + ((slot * SLOT_SHORTS + me.me) * Across::COUNT + lane) * in.H + h, across);
}

/* ---- a slot ------------------------------------------------------------------------------------------------------ */

/* What is across chunks of a slot; ddt, dA and ddt_bias.
 * grid B*slots*ceil(H/32), block 256: a slot of 32 heads, a head a lane; warp w takes tokens w, w + 8, ... in order,
 * and the warps' sums are added in order.
 * registers: a sum for each chunk.  shared: 2 KB.  bytes per token and head: dt, ddt, and 8.  Deterministic. */
struct ChunkTimesParams {
    Problem in;
    int64_t slots;
    const float *da, *direct, *across; /* of SplitGradientParams */
    void* ddt;
    gt_stride ddt_stride;
    float *dA, *dbias; /* [B*slots][H]; NULL: not wanted */
};

GT_KERNEL(THREADS, 2) chunk_times_fp32_kernel(const GT_GRID_CONSTANT ChunkTimesParams p) {
    const Problem& in = p.in;
    wait_for_chain();
    const int64_t lanes = (in.H + 31) / 32, slot = block_x() / lanes, b = slot / p.slots;
    const int64_t h = block_x() % lanes * 32 + lane_id();
    const gt_chunk chunk = chunk_at(in.sequences, CHECKPOINT, slot % p.slots);
    const int tokens = chunk.sequence < 0 || h >= in.H ? 0 : (int)(chunk.last - chunk.first);
    const int chunks = (tokens + SHORT - 1) / SHORT;
    /* of each chunk k: E of those after it, F of those before it, Gamma of t after it with s before it, Z */
    float sums[SLOT_SHORTS] = {}, Z = 0.0f;
    GT_UNROLL
    for (int i = 0; i < SLOT_SHORTS; i++) {
        if (i >= chunks) continue;
        const float* from = p.across + (slot * SLOT_SHORTS + i) * Across::COUNT * in.H + h;
        Z += from[Across::Z * in.H];
        float later = from[Across::E * in.H]; /* with s in a chunk before k, or h */
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
        /* the slope first: the sum without it may overflow */
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
