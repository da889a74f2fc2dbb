/* gt/ssd/sm90/gradients_states.cuh - ssd backward of a chunk on compute capability 9.0 (gradients.cuh): the role
 * states, whose warpgroup computes dB and the state between the slot's two chunks.  In a step:
 *
 *     make_hopper_state()     advances h for the second chunk, or G for the first, through the tokens of the other
 *                             chunk.
 *     store_Z()               stores <G, h>, the sum of the diagonal of G h^T, as Z of da.
 * Between these two, sums_role() computes dB += Delta suf x G, and G h^T. */
#ifndef GT_SSD_SM90_GRADIENTS_STATES_CUH
#define GT_SSD_SM90_GRADIENTS_STATES_CUH

#include "gradients_block.cuh"

namespace gt {
namespace ssd {

/* Computes left operands of make_hopper_state() for the warp's 16 rows p and all tokens t of the neighbour.  They are
 * NEXT times the tokens' weights and the inverses of the powers of OTHER.  The weights are WEIGHTS of the neighbour's
 * record if the neighbour is a first chunk, and PRE if it is a second chunk.  Returns the factor by which the warp's
 * rows of the old state are multiplied.  Operands and factor contain a power of two, which brings the sums into the
 * range of f16.  The inverse of this power overwrites the inverse of the old rows. */
template <class C>
GT_DEV float make_state_operands(const HopperBlock<C>& me, const WarpRows& at, int step, uint32_t (&rows)[4][4]) {
    using E = Element<typename C::T>;
    using D = Element<typename C::D>;
    const int lane = lane_id(), weights = me.made_cell(step);
    const uint32_t address = panel_at<128>(lane % 8 + lane / 16 * 8, 2 * at.warp + lane / 8 % 2);
    const uint32_t inverse = me.address(C::STATE_INVERSES + 8 * (me.stage_of(step)) + (me.second ? 0 : 4) + at.warp);
    float x[4][4][2], sums[2] = {}; /* x: rows p = g and g + 8, columns t; sums: over a row */
    const auto take = [&](auto element) {
        using L = decltype(element);
        GT_UNROLL
        for (int k = 0; k < 4; k++) {
            uint32_t pairs[4];
            ldmatrix_x4_trans(pairs, me.stage(step) + C::NEXT + address + 2048 * k);
            GT_UNROLL
            for (int e = 0; e < 4; e++) x[k][e][0] = L::lo(pairs[e]), x[k][e][1] = L::hi(pairs[e]);
        }
    };
    if (!std::is_same<E, D>::value && !me.second)
        take(D());
    else
        take(E());
    GT_UNROLL
    for (int k = 0; k < 4; k++) {
        GT_UNROLL
        for (int i = 0; i < 2; i++) {
            const int t = 16 * k + 8 * i + 2 * at.j;
            const float2 all = lds<float2>(me.address(weights + t)),
                         row = lds<float2>(me.address(me.inverses(C::OTHER_INVERSE) + t));
            const float2 w = {all.x * row.x, all.y * row.y};
            GT_UNROLL
            for (int e = 2 * i; e < 2 * i + 2; e++) {
                x[k][e][0] *= w.x, x[k][e][1] *= w.y;
                sums[e % 2] += fabsf(x[k][e][0]) + fabsf(x[k][e][1]);
            }
        }
    }
    GT_UNROLL
    for (int e = 0; e < 2; e++) sums[e] += shfl_xor(sums[e], 1);
    GT_UNROLL
    for (int e = 0; e < 2; e++) sums[e] += shfl_xor(sums[e], 2);
    float most = fmaxf(sums[0], sums[1]);
    GT_UNROLL
    for (int mask = 4; mask < 32; mask *= 2) most = fmaxf(most, shfl_xor(most, mask));
    /* The bound holds because no element of B or C exceeds 2^14 / WEIGHT_RANGE, and no element of the state exceeds
     * 2^16. */
    const float kept = me.value(weights + CHUNK) * lds<float>(inverse);
    const Power power = power_of(fma_rn(kept, 0x1p16f, most * (0x1p14f / WEIGHT_RANGE)));
    GT_UNROLL
    for (int k = 0; k < 4; k++) {
        GT_UNROLL
        for (int e = 0; e < 4; e++) rows[k][e] = pack_f16(x[k][e][0] * power.value, x[k][e][1] * power.value);
    }
    sync_warp();
    if (lane == 0) sts<float>(inverse, power.inverse);
    return kept * power.value;
}

/* Advances h or G through the neighbour's tokens, in place: state <- exp(sum a) state + sum_t weight_t left_t
 * right_t^T.  For h, left is x and right is B of the neighbour; for G, left is dy and right is C. */
template <class C>
GT_DEV void make_hopper_state(const HopperBlock<C>& me, const WarpRows& at, int step) {
    const int j = at.j;
    const uint32_t state = me.stage(step) + (me.second ? C::H : C::G);
    uint32_t rows[4][4], kept[4][4];
    {
        const float x = make_state_operands(me, at, step, rows);
        const uint32_t pair = pack_f16(at.g == 2 * j ? x : 0.0f, at.g == 2 * j + 1 ? x : 0.0f);
        const uint32_t none = as_uint(made_here(0.0f));
        GT_UNROLL
        for (int k = 0; k < 4; k++) { /* kept: the warp's block on the diagonal; zeros elsewhere */
            kept[k][0] = kept[k][3] = k == at.warp ? pair : 0u;
            kept[k][1] = kept[k][2] = none;
        }
    }
    const uint64_t right = columns_operand<C>(me.tile_of(C::OTHER)), old = columns_operand<C>(state);
    GT_UNROLL
    for (int panel = 0; panel < C::PANELS; panel++) {
        const uint32_t bytes = mn_bytes<128, Major::MN>(64 * panel, C::PANEL);
        float sums[8][4];
        wgmma_fence();
        GT_UNROLL
        for (int k = 0; k < 4; k++)
            wgmma<f16, Major::MN>(sums, kept[k], wgmma_step(down_rows<C>(old, k), bytes), k > 0);
        GT_UNROLL
        for (int k = 0; k < 4; k++) wgmma<f16, Major::MN>(sums, rows[k], wgmma_step(down_rows<C>(right, k), bytes));
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_pin(sums);
        bar_sync(MADE_BARRIER, C::WARPGROUP); /* all warps have read the panel */
        GT_UNROLL
        for (int i = 0; i < 4; i++) {
            uint32_t words[4];
            GT_UNROLL
            for (int n = 0; n < 4; n++) {
                const float* x = sums[2 * i + n / 2] + n % 2 * 2;
                words[n] = pack_f16(x[0], x[1]);
            }
            stmatrix_x4(at.addresses(state + panel * C::PANEL) ^ 32 * i, words);
        }
    }
    fence_async_proxy();
}

/* Stores the warp's part of <G, h>, which is the sum of its diagonal elements of G h^T. */
template <class C>
GT_DEV void store_Z(const HopperBlock<C>& me, const WarpRows& at, int step, const float (&Gh)[8][4]) {
    float sum = 0.0f;
    GT_UNROLL
    for (int i = 0; i < 4; i++)
        if (i == at.warp)
            sum = at.g == 2 * at.j       ? Gh[2 * i][0] + Gh[2 * i + 1][2]
                  : at.g == 2 * at.j + 1 ? Gh[2 * i][1] + Gh[2 * i + 1][3]
                                         : 0.0f;
    const int inverses = C::STATE_INVERSES + 8 * (me.stage_of(step)) + at.warp;
    sum = warp_sum(sum * me.value(inverses) * me.value(inverses + 4));
    if (lane_id() == 0) me.step_sums(step)[ChunkSums::Z + at.warp] = sum;
}

} /* namespace ssd */
} /* namespace gt */

#endif
