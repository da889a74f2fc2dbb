/* gt/ssd/mma/gradients_tokens.cuh - the part of chunk_gradient_kernel (gradients.cuh) that computes numbers for each
 * token.  Before a step, one warp computes Delta and decay factors.  After a step, another warp computes da and ddt. */
#ifndef GT_SSD_MMA_GRADIENTS_TOKENS_CUH
#define GT_SSD_MMA_GRADIENTS_TOKENS_CUH

#include "gradients_chunk.cuh"

namespace gt {
namespace ssd {

/* ---- decay factors, da, ddt ------------------------------------------------------------------------------------ */

/* The bits of a head's dt for tokens 2 lane and 2 lane + 1.  own: of the block's chunk.  other: of the neighbour, which
 * is the other chunk of the slot. */
struct StepTimes {
    uint32_t own[2] = {}, other[2] = {};
};

/* Loads dt of the chunk itself. */
template <class C>
GT_DEV void load_dt(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me, int step, uint32_t (&dt)[2]) {
    load_dt(p.in, offset_of(p.in.dt_stride, me.b, me.first, me.head(p, step)), me.tokens, dt);
}

template <class C>
GT_DEV void load_times(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me, int step, StepTimes& dt) {
    const Problem& in = p.in;
    load_dt(p, me, step, dt.own);
    if (me.makes_state())
        load_dt(in, offset_of(in.dt_stride, me.b, me.neighbour(), me.head(p, step)), me.neighbour_tokens, dt.other);
}

/* Computes the factors of make_state(): the weight of each of the neighbour's tokens, and the decay exp(sum a). */
template <class C>
GT_DEV void neighbour_factors(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me, int step,
                              const float (&delta)[2]) {
    const int lane = lane_id(), addresses = C::MADE;
    const float A = p.in.A[me.head(p, step)] * LOG2_E, l0 = delta[0] * A, l1 = delta[1] * A;
    float upto = l0 + l1, from = upto;
    GT_UNROLL
    for (int d = 1; d < 32; d *= 2) {
        const float left = shfl_up(upto, d), right = shfl_down(from, d);
        upto += lane >= d ? left : 0.0f;
        from += lane + d < 32 ? right : 0.0f;
    }
    float before = shfl_up(upto, 1), after = shfl_down(from, 1);
    before = lane > 0 ? before : 0.0f;
    after = lane < 31 ? after : 0.0f;
    if (me.second)
        sts<float2>(me.address(addresses + 2 * lane),
                    {delta[0] * exp2_finite(after + l1), delta[1] * exp2_finite(after)});
    else
        sts<float2>(me.address(addresses + 2 * lane), {exp2_finite(before + l0), exp2_finite(before + l0 + l1)});
    if (lane == 0) sts<float>(me.address(addresses + CHUNK), exp2_finite(from));
}

/* Before a step begins, computes its Delta, loads Dskip and the inverses of its states, and computes
 * neighbour_factors().  The step's decay factors follow in own_factors(). */
template <class C>
GT_DEV void prepare_step(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me, int step, const StepTimes& dt) {
    const Problem& in = p.in;
    float delta[2];
    deltas_of(in, me.head(p, step), me.tokens, dt.own, delta);
    sts<float2>(me.address(C::STEP_DELTA + 2 * lane_id()), {delta[0], delta[1]});
    if (lane_id() == 0) sts<float>(me.address(C::STEP_DELTA + CHUNK), in.A[me.head(p, step)]);
    if (me.makes_state()) {
        deltas_of(in, me.head(p, step), me.neighbour_tokens, dt.other, delta);
        neighbour_factors(p, me, step, delta);
    }
    if (lane_id() == 0 && in.Dskip && !in.skip_per_channel)
        sts<float>(me.address(C::SKIP + step % 2), in.Dskip[me.head(p, step)]);
    const int which = lane_id() / 4, row = me.p0(p, step) + lane_id() % 4 * 16;
    if (which > 1) return;
    const Checkpoints& states = which ? p.G : p.h;
    const int64_t slot = (me.b * in.H + me.head(p, step)) * p.slots + me.slot;
    const float inverse = states.values && row < in.P
                              ? states.powers[slot * slot_powers(in.P, in.N) + power_index(in.N, row)]
                              : 0x1p-100f;
    sts<float>(me.address(C::STATE_INVERSES + step % 2 * 8 + lane_id()), inverse);
}

/* Computes the chunk's own decay factors from the Delta that prepare_step() has stored. */
template <int WHICH, class C>
GT_DEV void own_factors(const ChunkGradientBlock<C>& me, int step) {
    const float2 pair = lds<float2>(me.address(C::STEP_DELTA + 2 * lane_id()));
    const float delta[2] = {pair.x, pair.y};
    make_factors<WHICH>(me.address(me.factor(step, 0)), delta, me.value(C::STEP_DELTA + CHUNK));
}

/* Multiplies sums by Delta.  If Delta is 0, the result is 0 even if the sum is infinite. */
GT_DEV float2 times(const Delta (&delta)[2], float2 x) {
    return {delta[0].value == 0.0f ? 0.0f : delta[0].value * x.x, delta[1].value == 0.0f ? 0.0f : delta[1].value * x.y};
}

/* Sums over a head's earlier tiles. */
struct HeadSums {
    float2 da, direct;
    float dskip;
};

/* After a step, adds the step's sums to those of the head's earlier tiles.  After the head's last tile, computes da and
 * ddt, and stores the chunk's partial sums of dA, ddt_bias and dDskip.  dt: bits of dt for the lane's two tokens. */
template <class C>
GT_DEV void finish_step(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me, int step,
                        const uint32_t (&dt)[2], HeadSums& head) {
    const Problem& in = p.in;
    const int lane = lane_id(), block = lane / 8, h = me.head(p, step), tile = me.tile(p, step);
    const auto pair = [&](int offset) { return lds<float2>(me.address(me.sums(step, offset) + 2 * lane)); };
    const auto of_halves = [&](int offset) { return plus(pair(offset), pair(offset + CHUNK)); };
    const auto of_pairs = [&](int offset, int index) {
        return lds<float2>(me.address(me.sums(step, offset) + 16 * index + 2 * (lane % 8)));
    };
    const float A = in.A[h];
    Delta deltas[2];
    deltas_of(in, h, me.tokens, dt, deltas);
    float2 da = sums_from(of_halves(C::E));
    GT_UNROLL
    for (int i = 0; i < 3; i++) { /* Gamma_ts with s in block i, which is earlier than the block of k */
        float2 row = {0.0f, 0.0f};
        if (i < block) row = of_pairs(C::ROW_SUMS, lower_pair_index(block, i));
        row = sums_from(row);
        if (i < block) da = plus(da, row);
    }
    /* Gamma_ts with s in the block of k and t in a later block; then with both in the block of k; then F */
    float2 later = {0.0f, 0.0f};
    GT_UNROLL
    for (int i = 1; i < BLOCKS; i++)
        if (i > block) later = plus(later, of_pairs(C::COLUMN_SUMS, pair_index(i, block)));
    const float2 F = of_halves(C::F);
    da = plus(da, sums_before<8>(times(deltas, later)));
    da = plus(da, pair(C::DIAGONAL));
    da = plus(da, sums_before<32>(times(deltas, F)));
    const float4 z = lds<float4>(me.address(me.sums(step, C::Z)));
    const float Gh = (z.x + z.y) + (z.z + z.w);
    const float E = exp2_finite(warp_sum((deltas[0].value + deltas[1].value) * A * LOG2_E));
    da = plus(da, {E * Gh, E * Gh});
    float2 direct = plus(F, plus(later, of_pairs(C::COLUMN_SUMS, pair_index(block, block)))); /* <x, U> */
    float dskip = 0.0f;
    if (p.dskip && in.skip_per_channel) {
        float* to = p.dskip + (me.row(p.slots) * in.H + h) * in.P + me.p0(p, step) + 2 * lane;
        const float2 sum =
            plus(lds<float2>(me.address(C::DSKIP + 2 * lane)), lds<float2>(me.address(C::DSKIP + CHUNK + 2 * lane)));
        const int column = me.p0(p, step) + 2 * lane;
        if (column < in.P) to[0] = sum.x;
        if (column + 1 < in.P) to[1] = sum.y;
    } else if (p.dskip) {
        const float4 trace = lds<float4>(me.address(me.sums(step, C::TRACE)));
        dskip = (trace.x + trace.y) + (trace.z + trace.w);
    }
    if (tile > 0) {
        da = plus(head.da, da);
        direct = plus(head.direct, direct);
        dskip += head.dskip;
    }
    if (tile + 1 < in.tiles) {
        head = {da, direct, dskip};
        return;
    }
    float dA = 0.0f, dbias = 0.0f;
    GT_UNROLL
    for (int i = 0; i < 2; i++) {
        const int t = 2 * lane + i;
        const float da_t = i ? da.y : da.x, direct_t = i ? direct.y : direct.x;
        const Delta delta = deltas[i];
        if (t >= me.tokens) continue;
        /* multiplies each term by the slope first, because the sum of the bare terms may overflow */
        float ddt = fma_rn(delta.slope * A, da_t, delta.slope * direct_t);
        if (delta.slope == 0.0f) ddt = 0.0f;
        if (C::MORE && p.ddt_share) {
            float* const share = p.ddt_share + (me.row(p.slots) * in.H + h) * CHUNK + t;
            const float all = p.has_share ? *share + ddt : ddt;
            if (p.leaves_share)
                *share = all;
            else
                store_as(p.ddt, in.dt_dtype, offset_of(p.ddt_stride, me.b, me.first + t, h), all);
        } else if (p.ddt) {
            store_as(p.ddt, in.dt_dtype, offset_of(p.ddt_stride, me.b, me.first + t, h), ddt);
        }
        dA = fma_rn(delta.value, da_t, dA);
        dbias += ddt;
    }
    dA = warp_sum(dA);
    dbias = warp_sum(dbias);
    if (lane > 0) return;
    if (p.dA) p.dA[me.row(p.slots) * in.H + h] = dA;
    if (p.dbias) p.dbias[me.row(p.slots) * in.H + h] = dbias;
    if (p.dskip && !in.skip_per_channel) p.dskip[me.row(p.slots) * in.H + h] = dskip;
}

} /* namespace ssd */
} /* namespace gt */

#endif
