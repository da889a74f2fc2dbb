/* gt/ssd/sm90/gradients_inputs.cuh - ssd backward of a chunk on compute capability 9.0 (gradients.cuh): the role
 * inputs, which computes dC and dx.  In a step, sums_role() first computes dC += pre dy h and B G^T, and for N = 64
 * also E.  Then it calls these functions, which read tiles in the stage and M of the role pairs:
 *
 *     make_inputs()      U = Delta suf B G^T and F = <x, U>; dx = U + M^T dy.
 *     add_input_share()  N > 128: adds partial sums of dx of the launches for other columns.
 *     store_inputs()     stores dx by rows.
 * F goes to the step's sums in memory, from which chunk_times_kernel computes da and ddt.  M has Delta as a factor.
 * With M_HAS_SKIP, Dskip is on the diagonal of M if it is per head.  Otherwise these functions add Dskip dy. */
#ifndef GT_SSD_SM90_GRADIENTS_INPUTS_CUH
#define GT_SSD_SM90_GRADIENTS_INPUTS_CUH

#include "gradients_block.cuh"

namespace gt {
namespace ssd {

/* The lane's part of <x_s, U_s> for its rows s = at.row and at.row + 8. */
template <class T>
GT_DEV void dots_of(uint32_t tile, const WarpRows& at, const float (&U)[8][4], float (&sums)[2]) {
    const uint32_t addresses = at.addresses(tile);
    float odd[2] = {};
    sums[0] = sums[1] = 0.0f;
    GT_UNROLL
    for (int k = 0; k < 4; k++) {
        uint32_t x[4];
        ldmatrix_x4(x, addresses ^ 32 * k);
        GT_UNROLL
        for (int i = 0; i < 4; i++) {
            const float* u = U[2 * k + i / 2] + i % 2 * 2;
            sums[i % 2] = fma_rn(Element<T>::lo(x[i]), u[0], sums[i % 2]);
            odd[i % 2] = fma_rn(Element<T>::hi(x[i]), u[1], odd[i % 2]);
        }
    }
    sums[0] += odd[0], sums[1] += odd[1];
}

/* dx += Dskip dy, for Dskip per head.  of_head: Dskip of the step's head. */
template <class C>
GT_DEV void add_skip(const HopperBlock<C>& me, const WarpRows& at, int step, float of_head, float (&dx)[8][4]) {
    using E = Element<typename C::D>;
    const uint32_t addresses = at.addresses(me.stage(step) + C::DY);
    const float f = of_head * me.dy_inverse(step, at.warp);
    GT_UNROLL
    for (int k = 0; k < 4; k++) {
        uint32_t dy[4];
        ldmatrix_x4(dy, addresses ^ 32 * k);
        GT_UNROLL
        for (int i = 0; i < 4; i++) {
            float* const to = dx[2 * k + i / 2] + i % 2 * 2;
            to[0] = fma_rn(f, E::lo(dy[i]), to[0]), to[1] = fma_rn(f, E::hi(dy[i]), to[1]);
        }
    }
}

/* add_skip() for Dskip per channel.  It also stores sums of dy x for dDskip; in these sums dy still has its power. */
template <class C>
GT_DEV void add_channel_skips(const ChunkGradientParams& p, const HopperBlock<C>& me, const WarpRows& at, int step,
                              float (&dx)[8][4]) {
    using E = Element<typename C::T>;
    using D = Element<typename C::D>;
    const int h = me.head(p, step), p0 = me.p0(p, step);
    const uint32_t addresses = at.addresses(me.stage(step));
    const float by = me.dy_inverse(step, at.warp);
    GT_UNROLL
    for (int k = 0; k < 4; k++) {
        uint32_t dy[4], x[4];
        float v[4];
        ldmatrix_x4(dy, (addresses ^ 32 * k) + C::DY);
        ldmatrix_x4(x, (addresses ^ 32 * k) + C::X);
        GT_UNROLL
        for (int n = 0; n < 2; n++) {
            const float2 skip = skips_of(p.in, h, p0 + 16 * k + 8 * n + 2 * at.j);
            float* to = dx[2 * k + n];
            const float f0 = skip.x * by, f1 = skip.y * by;
            const float a0 = D::lo(dy[2 * n]), a1 = D::hi(dy[2 * n]);
            const float b0 = D::lo(dy[2 * n + 1]), b1 = D::hi(dy[2 * n + 1]);
            to[0] = fma_rn(f0, a0, to[0]), to[1] = fma_rn(f1, a1, to[1]);
            to[2] = fma_rn(f0, b0, to[2]), to[3] = fma_rn(f1, b1, to[3]);
            v[2 * n] = fma_rn(a0, E::lo(x[2 * n]), b0 * E::lo(x[2 * n + 1]));
            v[2 * n + 1] = fma_rn(a1, E::hi(x[2 * n]), b1 * E::hi(x[2 * n + 1]));
        }
        if (p.dskip) store_column_sums(v, me.step_sums(step) + ChunkSums::DSKIP + CHUNK * at.warp + 16 * k);
    }
}

template <class C>
GT_DEV void store_inputs(const ChunkGradientParams& p, const HopperBlock<C>& me, const WarpRows& at, int step,
                         const float (&dx)[8][4]) {
    const PlaceChunk chunk = me.chunk(); /* read again here, because registers cannot keep it over the steps */
    const int p0 = me.p0(p, step);
    uint16_t* const to =
        static_cast<uint16_t*>(p.dx) + gt::offset_of(p.dx_stride, chunk.b, chunk.first, me.head(p, step)) + p0;
    store_panel<typename C::T>(at, me.smem + C::OUT, dx, to, p.dx_stride.t, chunk.tokens, p.in.P - p0);
}

/* Adds to dx the partial sums of earlier launches.  All of these loads are in flight at once.  Stores the new sums if
 * later launches follow.  Layout: [place][step][8][thread of the warpgroup] float4. */
template <class C>
GT_DEV void add_input_share(const ChunkGradientParams& p, const HopperBlock<C>& me, int step, float (&dx)[8][4]) {
    const int64_t place = me.place();
    float4* const share = reinterpret_cast<float4*>(p.dx_share) + (place * me.steps + step) * (8 * C::WARPGROUP) +
                          thread_id() % C::WARPGROUP;
    if (p.has_share) {
        float4 before[8];
        GT_UNROLL
        for (int n = 0; n < 8; n++) before[n] = ldg<float4>(share + n * C::WARPGROUP);
        GT_UNROLL
        for (int n = 0; n < 8; n++)
            dx[n][0] += before[n].x, dx[n][1] += before[n].y, dx[n][2] += before[n].z, dx[n][3] += before[n].w;
    }
    if (!p.leaves_share) return;
    GT_UNROLL
    for (int n = 0; n < 8; n++) stg<float4>(share + n * C::WARPGROUP, {dx[n][0], dx[n][1], dx[n][2], dx[n][3]});
}

/* Computes U, F and dx of a step.  U: on entry B G^T, not yet complete.  M comes from the role pairs and is scaled by
 * power_of_M().  If this power is too large for U, U gets a smaller power.  M^T dy then keeps the larger power, so its
 * part of the sum is too large.  This does no harm, because M^T dy is at most 2^36, while such a U may reach 2^70. */
template <class C>
GT_DEV void make_inputs(const ChunkGradientParams& p, const HopperBlock<C>& me, const WarpRows& at, int step,
                        float (&U)[8][4]) {
    using T = typename C::T;
    using D = typename C::D;
    const int stage = me.stage_of(step);
    const uint32_t tiles = me.stage(step);
    const float skip = C::M_TERMS > 1 ? 0.0f : skip_of_head(p, me, step);
    const float4 G_inverse = lds<float4>(me.address(C::STATE_INVERSES + 8 * stage + 4));
    float delta[2], by_G[2], sums[2];
    GT_UNROLL
    for (int e = 0; e < 2; e++) {
        const int s = at.row + 8 * e;
        delta[e] = me.value(me.factor(step, C::Tokens::DELTA) + s);
        by_G[e] = me.value(me.factor(step, C::Tokens::WEIGHTS) + s);
    }
    const bool any_tiny = warp_any(factor_of_U(delta[0]) != delta[0] || factor_of_U(delta[1]) != delta[1]);
    if (any_tiny) { /* then WEIGHTS / Delta does not give SUF, so SUF is computed as V AFTER */
        const float after = me.value(me.factor(step, C::Tokens::AFTER) + at.warp);
        GT_UNROLL
        for (int e = 0; e < 2; e++)
            if (factor_of_U(delta[e]) != delta[e])
                by_G[e] = fminf(me.value(me.factor(step, C::Tokens::V) + at.row + 8 * e) * after, 0x1.fp127f);
    }
    GT_UNROLL
    for (int e = 0; e < 2; e++) by_G[e] *= me.value(me.inverses(C::B_INVERSE) + at.row + 8 * e);
    Power M[2] = {{1.0f, 1.0f}, {1.0f, 1.0f}};
    if constexpr (C::M_HAS_POWER) {
        M[0] = M[1] = power_of_M(me, step, at.warp, skip);
        const float G = largest_of(G_inverse) * (C::N * 0x1p30f); /* the bound holds because no element of B exceeds
                                                                   * 2^14, and no element of the state 2^16 */
        if (warp_any(!(fmaxf(fabsf(by_G[0]), fabsf(by_G[1])) * (G * M[0].value) <= 0x1p70f))) {
            GT_UNROLL
            for (int e = 0; e < 2; e++) {
                const Power most = power_of(fabsf(by_G[e]) * (G * 0x1p-56f));
                if (most.value < M[e].value) M[e] = most;
            }
        }
        by_G[0] *= M[0].value, by_G[1] *= M[1].value;
    }
    wgmma_wait<0>();
    wgmma_pin(U);
    GT_UNROLL
    for (int n = 0; n < 8; n++) {
        GT_UNROLL
        for (int e = 0; e < 4; e++) U[n][e] *= by_G[e / 2] * part_of(G_inverse, n / 2);
    }
    dots_of<T>(tiles + C::X, at, U, sums);
    if (C::M_HAS_POWER) sums[0] *= M[0].inverse, sums[1] *= M[1].inverse;
    store_row_sums(at, sums, me.step_sums(step) + ChunkSums::F);
    if (any_tiny) {
        GT_UNROLL
        for (int e = 0; e < 2; e++) delta[e] = factor_of_U(delta[e]) == delta[e] ? 1.0f : delta[e];
        GT_UNROLL
        for (int n = 0; n < 8; n++) {
            GT_UNROLL
            for (int e = 0; e < 4; e++) U[n][e] *= delta[e / 2];
        }
    }
    me.buffers().wait_full(me.in_buffers(step));
    wgmma_pin(U);
    wgmma_fence();
    const uint64_t right = columns_operand<C>(tiles + C::DY);
    GT_UNROLL
    for (int i = 0; i < C::M_TERMS; i++) {
        const uint64_t left = columns_operand<C>(me.M(step) + i * C::PANEL);
        GT_UNROLL
        for (int k = 0; k < 4; k++) wgmma<D, Major::MN, Major::MN>(U, down_rows<C>(left, k), down_rows<C>(right, k));
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(U);
    me.buffers().free(me.in_buffers(step));
    if constexpr (C::M_HAS_POWER) {
        GT_UNROLL
        for (int n = 0; n < 8; n++) {
            GT_UNROLL
            for (int e = 0; e < 4; e++) U[n][e] *= M[e / 2].inverse;
        }
    }
    if (p.in.skip_per_channel)
        add_channel_skips(p, me, at, step, U);
    else if (!C::M_HAS_SKIP && p.in.Dskip)
        add_skip(me, at, step, skip, U);
    me.stages().free(me.in_stages(step));
    if (p.dx_share) add_input_share(p, me, step, U);
    if (p.dx && !p.leaves_share) store_inputs(p, me, at, step, U);
}

} /* namespace ssd */
} /* namespace gt */

#endif
