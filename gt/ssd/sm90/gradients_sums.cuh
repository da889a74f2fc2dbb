/* gt/ssd/sm90/gradients_sums.cuh - ssd backward of a chunk on compute capability 9.0 (gradients.cuh): dC and dB.  The
 * role inputs sums dC over the heads, and the role states sums dB:
 *
 *     per step   make_left()     dy pre or x Delta suf as f16, 64 x 64, from the stage to registers.
 *                add_left()      sum += left h or left G; the right operand lies in the stage.
 *                store_E()       E_t = <pre_t dy_t, h C_t>, by the role that has C h^T (PAIRS_MAKE_E).  It goes to the
 *                                step's sums in memory, from which chunk_times_kernel computes da.
 *     last       add_W()         sum += W B or W^T C; W comes from the role pairs.
 *                store_share()   stores the rows */
#ifndef GT_SSD_SM90_GRADIENTS_SUMS_CUH
#define GT_SSD_SM90_GRADIENTS_SUMS_CUH

#include "gradients_block.cuh"

namespace gt {
namespace ssd {

/* ---- dC and dB -------------------------------------------------------------------------------------------------- */

/* A warp's 16 rows of dC (which = 0) or dB (which = 1), in accumulators.  Each row has a power of two. */
template <class C>
struct StateShare {
    float sum[C::N / 8][4], power[2];
    GT_METHOD StateShare() {
        GT_UNROLL
        for (int n = 0; n < C::N / 8; n++) {
            GT_UNROLL
            for (int e = 0; e < 4; e++) sum[n][e] = 0.0f;
        }
        power[0] = power[1] = 0x1p100f;
    }
};

/* Loads the warp's rows of a panel as a left operand.  A lane gets the elements that it would have in accumulators. */
GT_DEV void load_left(uint32_t tile, const WarpRows& at, uint32_t (&a)[4][4]) {
    const uint32_t addresses = at.addresses(tile);
    GT_UNROLL
    for (int k = 0; k < 4; k++) ldmatrix_x4(a[k], addresses ^ 32 * k);
}

/* Converts the pairs of a panel's rows to fp32. */
template <class T>
GT_DEV void widen(const uint32_t (&a)[4][4], float (&x)[4][8]) {
    using E = Element<T>;
    GT_UNROLL
    for (int k = 0; k < 4; k++) {
        GT_UNROLL
        for (int i = 0; i < 4; i++) x[k][2 * i] = E::lo(a[k][i]), x[k][2 * i + 1] = E::hi(a[k][i]);
    }
}

/* The largest magnitudes of rows t and t + 8 among the lane's pairs. */
template <class T>
GT_DEV void magnitudes_of(const uint32_t (&a)[4][4], float (&most)[2]) {
    using E = Element<T>;
    GT_UNROLL
    for (int e = 0; e < 2; e++) {
        uint32_t pairs = 0;
        GT_UNROLL
        for (int k = 0; k < 4; k++) pairs = larger_magnitudes<T>(larger_magnitudes<T>(pairs, a[k][e]), a[k][2 + e]);
        most[e] = fmaxf(E::lo(pairs), E::hi(pairs));
    }
}

/* Computes a step's left operand: dy times pre for dC, or x times Delta suf for dB.  Each element is multiplied by the
 * inverse of the state's power and by the power of its row in share.  If dy and x differ in type, only the conversion
 * has two branches. */
template <class C>
GT_DEV void make_left(const HopperBlock<C>& me, const WarpRows& at, int step, int which, StateShare<C>& share,
                      uint32_t (&a)[4][4]) {
    load_left(me.stage(step) + (which ? C::X : C::DY), at, a);
    const float4 inverses = lds<float4>(me.address(C::STATE_INVERSES + 8 * (me.stage_of(step)) + 4 * which));
    const float largest = largest_of(inverses);
    float x[4][8], most[2], decay[2], bound[2];
    if (std::is_same<typename C::T, typename C::D>::value || which) {
        magnitudes_of<typename C::T>(a, most);
        widen<typename C::T>(a, x);
    } else { /* gate_kernel has scaled dy to at most 2^14 */
        widen<typename C::D>(a, x);
        most[0] = most[1] = 0x1p14f;
    }
    bool grows = false;
    GT_UNROLL
    for (int e = 0; e < 2; e++) {
        const int t = at.row + 8 * e;
        decay[e] = me.value(me.factor(step, which ? C::Tokens::WEIGHTS : C::Tokens::PRE) + t);
        most[e] = fmaxf(most[e], shfl_xor(most[e], 1));
        most[e] = fmaxf(most[e], shfl_xor(most[e], 2));
        const float magnitude = most[e] * fabsf(decay[e]) * largest; /* Delta may be below 0 */
        /* the second bound keeps the product of power and `largest` finite, for rows of zeros and for decays above 1 */
        bound[e] = fmaxf(magnitude, fmaxf(fabsf(decay[e]), 1.0f) * largest * 0x1p-85f);
        grows |= !(bound[e] * share.power[e] <= 0x1p15f);
    }
    if (warp_any(grows)) { /* lowers the power so that magnitudes may grow by 8 before the next change */
        wgmma_pin(share.sum);
        GT_UNROLL
        for (int e = 0; e < 2; e++) {
            if (bound[e] * share.power[e] <= 0x1p15f) continue;
            const float next = power_of(8.0f * bound[e]).value, ratio = next * inverse_of(share.power[e]);
            share.power[e] = next;
            GT_UNROLL
            for (int n = 0; n < C::N / 8; n++) share.sum[n][2 * e] *= ratio, share.sum[n][2 * e + 1] *= ratio;
        }
        wgmma_pin(share.sum);
    }
    GT_UNROLL
    for (int k = 0; k < 4; k++) {
        GT_UNROLL
        for (int i = 0; i < 4; i++) {
            const float f = decay[i % 2] * (share.power[i % 2] * part_of(inverses, k));
            a[k][i] = pack_f16(x[k][2 * i] * f, x[k][2 * i + 1] * f);
        }
    }
}

/* Starts dC += left h or dB += left G. */
template <class C>
GT_DEV void add_left(const HopperBlock<C>& me, int step, int which, StateShare<C>& share, const uint32_t (&a)[4][4]) {
    const uint64_t state = columns_operand<C>(me.stage(step) + (which ? C::G : C::H));
    GT_UNROLL
    for (int k = 0; k < 4; k++) wgmma<f16, Major::MN>(share.sum, a[k], down_rows<C>(state, k));
}

/* Publishes the powers of dC or dB for the role pairs, which scales W by them.  They stay fixed until the end of the
 * place. */
template <class C>
GT_DEV void hand_powers_on(const HopperBlock<C>& me, const WarpRows& at, int which, const StateShare<C>& share) {
    if (at.j == 0) {
        sts<float>(me.address(C::POWER + CHUNK * which + at.row), share.power[0]);
        sts<float>(me.address(C::POWER + CHUNK * which + at.row + 8), share.power[1]);
    }
    Ring<1, C::SHARES_MADE>{me.smem}.fill(me.number);
}

/* Adds W B to dC, or W^T C to dB. */
template <class C>
GT_DEV void add_W(const HopperBlock<C>& me, const WarpRows& at, int which, StateShare<C>& share, float (&inverse)[2]) {
    if (which)
        me.W_for_states().wait_full(me.number);
    else
        me.buffers().wait_full(me.in_buffers(me.steps));
    const float most = power_of(largest_of(lds<float4>(me.address(C::W_MOST)))).value;
    wgmma_pin(share.sum);
    GT_UNROLL
    for (int e = 0; e < 2; e++) {
        const float own = share.power[e];
        const float power = !which ? me.value(C::POWER + at.row + 8 * e) : own < most ? own : most;
        const float ratio = power * inverse_of(own);
        inverse[e] = inverse_of(power);
        GT_UNROLL
        for (int n = 0; n < C::N / 8; n++) share.sum[n][2 * e] *= ratio, share.sum[n][2 * e + 1] *= ratio;
    }
    wgmma_pin(share.sum);
    wgmma_fence();
    const uint32_t W = me.M(me.steps);
    const uint64_t right = columns_operand<C>(me.tile_of(which ? C::C : C::B));
    if (which) {
        const uint64_t left = columns_operand<C>(W + C::PANEL);
        GT_UNROLL
        for (int k = 0; k < 4; k++)
            wgmma<f16, Major::MN, Major::MN>(share.sum, down_rows<C>(left, k), down_rows<C>(right, k));
    } else {
        const uint64_t left = rows_operand<C>(W);
        GT_UNROLL
        for (int k = 0; k < 4; k++)
            wgmma<f16, Major::K, Major::MN>(share.sum, along_row<C>(left, k), down_rows<C>(right, k));
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(share.sum);
    if constexpr (C::GROUP_COPIES > 1) me.groups().free(me.number);
}

/* Stores the rows of dC, which pass through OUT, or of dB, which pass through the panel of W for dB.  No warp reads
 * this panel any more.  If M has two terms, the function then clears the panel, because M needs zeros above the
 * diagonal. */
template <class C>
GT_DEV void store_share(const ChunkGradientParams& p, const HopperBlock<C>& me, const WarpRows& at, int which,
                        StateShare<C>& share, const float (&inverse)[2]) {
    const uint32_t W = me.M(me.steps);
    bar_sync(which ? MADE_BARRIER : INPUTS_BARRIER, C::WARPGROUP); /* all warps have read W and B or C */
    if (!which) me.buffers().free(me.in_buffers(me.steps));
    if (void* const out = which ? p.dBm : p.dCm) {
        const gt_stride& stride = which ? p.dBm_stride : p.dCm_stride;
        uint16_t* const to = static_cast<uint16_t*>(out) + gt::offset_of(stride, me.b, me.first, me.g);
        GT_UNROLL
        for (int n = 0; n < C::N / 8; n++) {
            GT_UNROLL
            for (int e = 0; e < 4; e++) share.sum[n][e] *= inverse[e / 2];
        }
        GT_UNROLL
        for (int i = 0; i < C::PANELS; i++)
            store_panel<typename C::T>(at, which ? W + C::PANEL : me.smem + C::OUT, share.sum + 8 * i, to + 64 * i,
                                       stride.t, me.tokens, p.in.columns - 64 * i);
    }
    if (!which) return;
    if constexpr (C::M_TERMS > 1) {
        GT_UNROLL
        for (int i = 0; i < 4; i++) sts<uint4>(W + C::PANEL + 2048 * at.warp + 512 * i + 16 * lane_id(), {0, 0, 0, 0});
        fence_async_proxy();
    }
    me.W_for_states().free(me.number);
}

} /* namespace ssd */
} /* namespace gt */

#endif
