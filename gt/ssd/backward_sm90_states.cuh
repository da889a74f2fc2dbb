/* gt/ssd/backward_sm90_states.cuh - ssd backward of a chunk on compute capability 9.0 (backward_sm90.cuh): the
 * warpgroup that makes the state between the checkpoint's two chunks, and dB.  A step:
 *     gate_dy()               with z: dy silu(z) in place of dy, for all
 *     make_hopper_state()     h of the second chunk, G of the first, in place, from the neighbour's tokens
 *     states_role()           dB += Delta suf x G, and beside it G h^T
 *     store_Z()               <G, h>, the diagonal of G h^T, to the step's sums: Z of da */
#ifndef GT_SSD_BACKWARD_SM90_STATES_CUH
#define GT_SSD_BACKWARD_SM90_STATES_CUH

#include "backward_sm90_sums.cuh"

namespace gt {
namespace ssd {

template <class T>
GT_DEV uint32_t weighted_pair(uint32_t pair, float2 w) {
    return pack_f16(Element<T>::lo(pair) * w.x, Element<T>::hi(pair) * w.y);
}

/* dy of the stage becomes dy silu(z), f16 with a power of two a row; then the powers of M's columns.  DY_GATED says so.
 * The tile of z is free then. */
template <class C>
GT_DEV void gate_dy(const ChunkGradientBlock<C>& me, const WarpRows& at, int step) {
    const int stage = step % C::STAGES, lane = lane_id();
    float most[4], inverse[4];
    gate_rows<typename C::T>(at.warp, me.stage(step) + C::DY, me.smem + C::GATES, most, inverse);
    GT_UNROLL
    for (int i = 0; i < 4; i++)
        if (lane % 8 == 0)
            sts<float>(me.cell(C::DY_INVERSE + CHUNK * stage + 16 * at.warp + lane / 8 + 4 * i), inverse[i]);
    fence_async_proxy();
    bar_sync(MADE_BARRIER, C::GROUP);
    if (at.warp == 0) store_M_powers(me, step);
    mbarrier_arrive(me.smem + C::DY_GATED + 8 * stage);
}

/* state <- kept state + sum_t weight_t row_t (B or C)_t^T, in place: h of rows of x and of B, G of dy and C, which are
 * the neighbour's.  weight and kept: weigh_state()'s, with decays and powers of two. */
template <class C>
GT_DEV void make_hopper_state(const ChunkGradientBlock<C>& me, const WarpRows& at, int step) {
    using T = typename C::T;
    using D = typename C::D;
    const int stage = step % C::STAGES, j = at.j, lane = lane_id();
    const uint32_t next = me.stage(step) + C::NEXT, state = me.stage(step) + (me.second ? C::H : C::G);
    uint32_t rows[4][4], kept[4][4];
    GT_UNROLL
    for (int k = 0; k < 4; k++) { /* rows p, columns t */
        ldmatrix_x4_trans(rows[k], next + panel_at<128>(16 * k + lane % 8 + lane / 16 * 8, 2 * at.warp + lane / 8 % 2));
        GT_UNROLL
        for (int i = 0; i < 2; i++) {
            const float2 w = lds<float2>(me.cell(C::WEIGHT + CHUNK * stage + 16 * k + 8 * i + 2 * j));
            GT_UNROLL
            for (int e = 2 * i; e < 2 * i + 2; e++)
                rows[k][e] = me.second ? weighted_pair<T>(rows[k][e], w) : weighted_pair<D>(rows[k][e], w);
        }
    }
    {
        const float x = me.value(C::KEPT + 4 * stage + at.warp);
        const uint32_t pair = pack_f16(at.g == 2 * j ? x : 0.0f, at.g == 2 * j + 1 ? x : 0.0f);
        const uint32_t none = as_uint(made_here(0.0f));
        GT_UNROLL
        for (int k = 0; k < 4; k++) { /* the diagonal block of the warp, else zeros */
            kept[k][0] = kept[k][3] = k == at.warp ? pair : 0u;
            kept[k][1] = kept[k][2] = none;
        }
    }
    const uint64_t right = columns_operand<C>(me.smem + C::OTHER), old = columns_operand<C>(state);
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
        bar_sync(MADE_BARRIER, C::GROUP); /* the panel is read */
        GT_UNROLL
        for (int i = 0; i < 4; i++) {
            uint32_t words[4];
            GT_UNROLL
            for (int n = 0; n < 4; n++) {
                const float* x = sums[2 * i + n / 2] + n % 2 * 2;
                words[n] = pack_f16(x[0], x[1]);
            }
            stmatrix_x4(at.cells(state + panel * C::PANEL) ^ 32 * i, words);
        }
    }
    fence_async_proxy();
    mbarrier_arrive(me.smem + C::STATE_MADE + 8 * stage);
}

/* The warp's share of <G, h>, from the diagonal of G h^T. */
template <class C>
GT_DEV void store_Z(const ChunkGradientBlock<C>& me, const WarpRows& at, int step, const float (&Gh)[8][4]) {
    float sum = 0.0f;
    GT_UNROLL
    for (int i = 0; i < 4; i++)
        if (i == at.warp)
            sum = at.g == 2 * at.j       ? Gh[2 * i][0] + Gh[2 * i + 1][2]
                  : at.g == 2 * at.j + 1 ? Gh[2 * i][1] + Gh[2 * i + 1][3]
                                         : 0.0f;
    const int inverses = C::STATE_INVERSES + 8 * (step % C::STAGES) + at.warp;
    sum = warp_sum(sum * me.value(inverses) * me.value(inverses + 4));
    if (lane_id() == 0) sts<float>(me.cell(me.sums(step, C::Z) + at.warp), sum);
}

/* A step: FULL says that prepare has filled the stage; STATE_MADE, that all of this warpgroup have made their rows of h
 * or G, is waited for here, too. */
template <class C>
GT_DEV void states_role(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me) {
    const WarpRows at(me.warp);
    StateShare<C> share;
    GT_NO_UNROLL
    for (int step = 0; step < me.steps; step++) {
        const int stage = step % C::STAGES, parity = step / C::STAGES % 2;
        const uint32_t tiles = me.stage(step);
        mbarrier_wait(me.smem + C::FULL + 8 * stage, parity);
        if constexpr (C::GATED) gate_dy(me, at, step);
        if (me.makes_state()) make_hopper_state(me, at, step);
        uint32_t a[4][4];
        float Gh[8][4];
        make_left<1>(me, at, step, share, a);
        if (me.makes_state()) mbarrier_wait(me.smem + C::STATE_MADE + 8 * stage, parity);
        wgmma_fence();
        multiply_rows<C>(Gh, tiles + C::G, tiles + C::H);
        add_left(me, step, 1, share, a);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_pin(Gh);
        store_Z(me, at, step, Gh);
        mbarrier_arrive(me.smem + C::EMPTY + 8 * stage);
    }
    finish_share(p, me, at, 1, share);
}

} /* namespace ssd */
} /* namespace gt */

#endif
