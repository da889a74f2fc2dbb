/* gt/ssd/backward_tokens.cuh - ssd backward of a chunk on tensor cores (backward_tensor.cuh): what is made by token, by
 * one warp each: decay factors before a step, da and ddt after it. */
#ifndef GT_SSD_BACKWARD_TOKENS_CUH
#define GT_SSD_BACKWARD_TOKENS_CUH

#include "backward_chunk.cuh"

namespace gt {
namespace ssd {

/* ---- decay factors, da, ddt ------------------------------------------------------------------------------------ */

/* What a warp has of a head's dt: of tokens 2 lane, 2 lane + 1 of the chunk and of its neighbour. */
struct StepTimes {
    float own[2] = {}, other[2] = {};
};

template <class C>
GT_DEV void load_times(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me, int step, StepTimes& dt) {
    const Problem& in = p.in;
    const int h = me.head(p, step);
    load_dt(in, offset_of(in.dt_stride, me.b, me.first, h), me.tokens, dt.own);
    if (me.makes_state()) load_dt(in, offset_of(in.dt_stride, me.b, me.neighbour(), h), me.neighbour_tokens, dt.other);
}

/* Of each of the neighbour's tokens, what it weighs in the state that the chunk makes, and exp(sum a). */
template <class C>
GT_DEV void neighbour_factors(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me, int step,
                              const float (&delta)[2]) {
    const int lane = lane_id(), addresses = made_cell<C>(step);
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

/* What a step needs before it begins. */
template <class C>
GT_DEV void prepare_step(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me, int step, const StepTimes& dt) {
    const Problem& in = p.in;
    if (me.makes_state()) {
        float delta[2];
        deltas_of(in, me.head(p, step), me.neighbour_tokens, dt.other, delta);
        neighbour_factors(p, me, step, delta);
    }
    const int which = lane_id() / 4, row = me.p0(p, step) + lane_id() % 4 * 16;
    if (which > 1) return;
    const Checkpoints& states = which ? p.G : p.h;
    const int64_t slot = (me.b * in.H + me.head(p, step)) * p.slots + me.slot;
    const float inverse = states.values && row < in.P
                              ? states.powers[slot * slot_powers(in.P, in.N) + power_index(in.N, row)]
                              : 0x1p-100f;
    sts<float>(me.address(C::STATE_INVERSES + step % 2 * 8 + lane_id()), inverse);
}

/* The decay factors of the chunk itself. */
template <class C>
GT_DEV void own_factors(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me, int step, const StepTimes& dt) {
    const Problem& in = p.in;
    const int h = me.head(p, step);
    float delta[2];
    deltas_of(in, h, me.tokens, dt.own, delta);
    make_factors(me.address(me.factor(step, 0)), delta, in.A[h]);
}

/* Sums of pairs of tokens over this and the later tokens. */
GT_DEV float2 sums_from(float2 x) {
    const int lane = lane_id();
    float from = x.x + x.y;
    GT_UNROLL
    for (int d = 1; d < 32; d *= 2) {
        const float right = shfl_down(from, d);
        from += lane + d < 32 ? right : 0.0f;
    }
    float after = shfl_down(from, 1);
    after = lane < 31 ? after : 0.0f;
    return {x.x + (x.y + after), x.y + after};
}

/* The same over the tokens before, of LANES lanes. */
template <int LANES>
GT_DEV float2 sums_before(float2 x) {
    const int lane = lane_id() % LANES;
    float upto = x.x + x.y;
    GT_UNROLL
    for (int d = 1; d < LANES; d *= 2) {
        const float left = shfl_up(upto, d);
        upto += lane >= d ? left : 0.0f;
    }
    float before = shfl_up(upto, 1);
    before = lane > 0 ? before : 0.0f;
    return {before, before + x.x};
}

GT_DEV float2 plus(float2 a, float2 b) { return {a.x + b.x, a.y + b.y}; }

/* da and ddt of a step that is done, once the head's last tile is; its share of dA, ddt_bias, dDskip. */
template <class C>
GT_DEV void finish_step(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me, int step) {
    const Problem& in = p.in;
    const int lane = lane_id(), block = lane / 8, h = me.head(p, step), tile = me.tile(p, step);
    const auto pair = [&](int offset) { return lds<float2>(me.address(me.sums(step, offset) + 2 * lane)); };
    const float A = in.A[h];
    float dt[2];
    Delta deltas[2];
    load_dt(in, offset_of(in.dt_stride, me.b, me.first, h), me.tokens, dt);
    deltas_of(in, h, me.tokens, dt, deltas);
    float2 da = sums_from(plus(pair(C::E), pair(C::E + CHUNK)));
    GT_UNROLL
    for (int i = 0; i < 3; i++) { /* Gamma_ts: s in an earlier block than k */
        float2 row = {0.0f, 0.0f};
        if (i < block) row = pair(C::ROW_SUMS + CHUNK * i);
        row = sums_from(row);
        if (i < block) da = plus(da, row);
    }
    /* s in the block of k, t in a later one; both in that of k; F */
    da = plus(da, sums_before<8>(plus(pair(C::COLUMN_SUMS), pair(C::COLUMN_SUMS + CHUNK))));
    da = plus(da, pair(C::DIAGONAL));
    da = plus(da, sums_before<32>(plus(pair(C::F), pair(C::F + CHUNK))));
    const float4 z0 = lds<float4>(me.address(me.sums(step, C::Z))),
                 z1 = lds<float4>(me.address(me.sums(step, C::Z) + 4));
    const float Gh = ((z0.x + z0.y) + (z0.z + z0.w)) + ((z1.x + z1.y) + (z1.z + z1.w));
    const float E = exp2_finite(warp_sum((deltas[0].value + deltas[1].value) * A * LOG2_E));
    da = plus(da, {E * Gh, E * Gh});
    float2 direct = plus(plus(pair(C::DIRECT), pair(C::DIRECT + CHUNK)),
                         plus(pair(C::DIRECT + 2 * CHUNK), pair(C::DIRECT + 3 * CHUNK)));
    float dskip = 0.0f;
    if (p.dskip) {
        const float2 both = plus(pair(C::DSKIP), pair(C::DSKIP + CHUNK));
        const int column = me.p0(p, step) + 2 * lane;
        if (in.skip_per_channel) {
            float* to = p.dskip + (me.row(p.slots) * in.H + h) * in.P + column;
            if (column < in.P) to[0] = both.x;
            if (column + 1 < in.P) to[1] = both.y;
        } else {
            dskip = warp_sum(both.x + both.y);
        }
    }
    const uint32_t kept = me.address(C::HEAD_SUMS + 2 * lane);
    if (tile > 0) {
        da = plus(lds<float2>(kept), da);
        direct = plus(lds<float2>(kept + 4 * CHUNK), direct);
        dskip += me.value(C::HEAD_SUMS + 2 * CHUNK);
    }
    if (tile + 1 < in.tiles) {
        sync_warp();
        sts<float2>(kept, da);
        sts<float2>(kept + 4 * CHUNK, direct);
        if (lane == 0) sts<float>(me.address(C::HEAD_SUMS + 2 * CHUNK), dskip);
        sync_warp();
        return;
    }
    float dA = 0.0f, dbias = 0.0f;
    GT_UNROLL
    for (int i = 0; i < 2; i++) {
        const int t = 2 * lane + i;
        const float da_t = i ? da.y : da.x, direct_t = i ? direct.y : direct.x;
        const Delta delta = deltas[i];
        if (t >= me.tokens) continue;
        /* the slope first: the sum without it may overflow */
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
