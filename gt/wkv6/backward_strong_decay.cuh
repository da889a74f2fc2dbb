/* gt/wkv6/backward_strong_decay.cuh - backward of a chunk: the strong-decay path of a slice.  backward.cuh defines the
 * symbols.
 *
 * Only the factor 2^c_16 can overflow; the factors between sub-chunks are at most 1.  So on this path X and Z end at
 * the borders of the sub-chunk:
 *     X_a = S dy_a + terms of earlier sub-chunks, up to the start of sub-chunk a
 *     Z_b = G v_b + terms of later sub-chunks, down to the end of sub-chunk b
 * Running products of decays give the terms within the sub-chunk, as in backward_chunk_kernel (generic.cuh).  With e_ij
 * = C_ij prod_{j<m<i} d_m, for pairs j < i - 1 of a sub-chunk,
 *     dr_i = 2^-c_i X_i + sum_j e_ij k_j + ..      dk_j = 2^-(c_16 - c_(j+1)) Z_j + sum_i e_ij r_i + ..
 *     dg_t = crossing + sum_{i>t} R_i X_i + sum_{j<t} K_j Z_j + sum_{j<t<i} e_ij r_i k_j
 * This path forms no differences of sums, since a channel may have a few hard resets among decays close to 1.
 * `crossing` is the sum over pairs that cross all of sub-chunk a.  Such a pair begins in a sub-chunk b < a or in S, and
 * ends in a sub-chunk c > a or in G:
 *     crossing = E_0 .. E_3 rowsum(S . G) + sum_c E_a .. E_(c-1) sum_i R_i (X_c before sub-chunk a's part)_i
 *                                         + sum_b E_(b+1) .. E_3 sum_j K_j (G v_b)_j
 * A thread has one channel of a sub-chunk.  It reads r, k and w from global memory again (L2). */
#ifndef GT_WKV6_BACKWARD_STRONG_DECAY_CUH
#define GT_WKV6_BACKWARD_STRONG_DECAY_CUH

#include "backward_products.cuh"

namespace gt {
namespace wkv6 {

template <class C>
struct StrongColumn {
    using T = typename C::T;
    using W = typename C::W;
    const BackwardParams& p;
    int t0, tokens;   /* the sub-chunk's first token in the chunk; its number of tokens */
    const T *r0, *k0; /* r and k of that token */
    const W* w0;

    GT_METHOD StrongColumn(const BackwardParams& p_, const BackwardBlock<C>& me, int sub_chunk, int channel)
        : p(p_), t0(SUB_CHUNK * sub_chunk), tokens(me.tokens() - SUB_CHUNK * sub_chunk),
          r0(row_of<T>(p, me, OF_R, t0) + me.slice0 + channel), k0(row_of<T>(p, me, OF_K, t0) + me.slice0 + channel),
          w0(row_of<W>(p, me, OF_W, t0) + me.slice0 + channel) {}

    /* Returns the element of token t, counted from the sub-chunk's first token.  t may lie in a neighbouring sub-chunk;
     * outside of the chunk the result is 0.  h() is -log2 of the token's decay. */
    template <class E>
    GT_METHOD float load(const E* from, int tensor, int t) const {
        const bool inside = t < tokens && t0 + t >= 0 && t0 + t < CHECKPOINT;
        return inside ? Element<E>::load(from + (int64_t)t * (int)p.tensors[tensor].stride.t, 0) : 0.0f;
    }
    GT_METHOD float r(int t) const { return load(r0, OF_R, t); }
    GT_METHOD float k(int t) const { return load(k0, OF_K, t); }
    GT_METHOD float h(int t) const {
        const float w = load(w0, OF_W, t);
        return t >= tokens ? 0.0f : p.raw ? bits_of_raw(w) : -w * LOG2_E;
    }
};

/* Computes R, K and E again.  The decays to the sub-chunk's end are summed from the end, without subtractions, because
 * a sum may be infinite. */
template <class C>
GT_DEV void prepare_strong_column(const BackwardParams& p, const BackwardBlock<C>& me, int sub_chunk, int channel) {
    const StrongColumn<C> own(p, me, sub_chunk, channel);
    float before = -p.log2_scale, after = 0.0f;
    GT_NO_UNROLL
    for (int i = 0; i < SUB_CHUNK; i++) {
        const int j = SUB_CHUNK - 1 - i;
        const auto fragment = [&](int t) {
            return me.smem + fragment_of<C::CHANNELS>((own.t0 + t) / 2, channel) + operand_in_cell<C>(t, channel);
        };
        sts<float>(C::R + fragment(i), chunk_operand<C>(own.r(i) * ex2_approx(-before)));
        sts<float>(C::K + fragment(j), chunk_operand<C>(own.k(j) * ex2_approx(-after)));
        before += own.h(i);
        after += own.h(j);
    }
    sts<float>(me.smem + C::E + 4 * (sub_chunk * C::CHANNELS + channel), sub_chunk_decay(after));
}

/* Computes A of the sub-chunk, in the order of pair_products().  A lane computes row i, over every second channel. */
template <class C>
GT_DEV void strong_pairs(const BackwardParams& p, const BackwardBlock<C>& me, float (&A)[2][4]) {
    const int i = lane_id() % SUB_CHUNK;
    float a[SUB_CHUNK] = {};
    GT_NO_UNROLL
    for (int channel = lane_id() / SUB_CHUNK; channel < C::CHANNELS; channel += 2) {
        const StrongColumn<C> own(p, me, me.sub_chunk, channel);
        float product = p.scale * own.r(i);
        GT_UNROLL
        for (int j = SUB_CHUNK - 2; j >= 0; j--) {
            const float k = own.k(j), decay = ex2_approx(-own.h(j));
            a[j] = fma_rn(j < i ? product : 0.0f, k, a[j]);
            product *= j < i ? decay : 1.0f;
        }
    }
    GT_UNROLL
    for (int j = 0; j < SUB_CHUNK; j++) a[j] += shfl_xor(a[j], SUB_CHUNK);
    GT_UNROLL
    for (int x = 0; x < 8; x++) { /* element j of row i goes to the lane that needs it as an operand */
        const int row = 4 * me.j + 2 * (x % 2) + x / 4;
        GT_UNROLL
        for (int g = 0; g < 8; g++) {
            const float from = shfl_idx(a[2 * g + x % 4 / 2], row);
            if (me.g == g) A[x / 4][x % 4] = from;
        }
    }
}

/* Returns `crossing` of a channel, defined at the top of this file.  For bf16 the result includes the correction of dg
 * (backward.cuh). */
template <class C>
GT_DEV float strong_crossing(const BackwardBlock<C>& me, int sub_chunk, int channel) {
    const auto of = [&](int vector) { return lds<float>(me.smem + vector + 4 * channel); };
    const auto E = [&](int a) { return of(C::E + 4 * a * C::CHANNELS); };
    float sum = 0.0f, end = 0.0f, decay = 1.0f, sums[C::SUMS] = {}; /* end: dg at the chunk's end */
    for (int c = sub_chunk + 1; c < SUB_CHUNKS; c++) {
        decay *= E(c - 1);
        sum = fma_rn(decay, of(sub_chunk == 0 ? C::FIRST + 4 * c * C::CHANNELS : strong_ends<C>(sub_chunk, c)), sum);
    }
    decay = 1.0f;
    for (int b = SUB_CHUNKS - 1; b >= 0; b--) { /* decay: from the end of sub-chunk b to the end of the chunk */
        const float begins = of(C::STRONG_DECAY_BEGINS + 4 * b * C::CHANNELS);
        if (b < sub_chunk) sum = fma_rn(decay, begins, sum);
        end = fma_rn(decay, begins, end);
        decay *= E(b);
    }
    GT_UNROLL
    for (int i = 0; i < C::SUM_PARTS; i++) sums[i / C::ROWSUM_PARTS] += rowsum_part<float>(me, i, channel);
    sum = fma_rn(decay, sums[0], sum);
    if constexpr (C::KEEPS_BF16) {
        const float lost = decay * sums[1];
        end = sums[2] - fma_rn(decay, sums[0], end) - lost;
        sum = fma_rn(lost, (float)sub_chunk / SUB_CHUNKS, sum);
        if (sums[2] != 0.0f) sum = fma_rn(0.5f * decay, end, sum);
    }
    return sum;
}

/* Computes dr, dk, dw and du of a channel of a sub-chunk.  Inner loops are unrolled, because they index arrays in
 * registers; outer loops are not unrolled. */
template <class C>
GT_DEV void finish_strong_column(const BackwardParams& p, const BackwardBlock<C>& me, int sub_chunk, int channel) {
    using T = typename C::T;
    using W = typename C::W;
    const StrongColumn<C> own(p, me, sub_chunk, channel);
    const int n = me.slice0 + channel;
    const float u = lds<float>(me.smem + C::U + 4 * (me.slice0 + channel));
    const auto near = [&](int t) { return lds<float2>(near_fragment(me, own.t0 + t)); };
    const auto sum_at = [&](int of, int t) {
        return lds<float>(me.smem + of + fragment_of<C::CHANNELS>((own.t0 + t) / 2, channel) + sum_in_cell(t, channel));
    };
    /* x: k, later r.  decayed: -log2 of the decay so far. */
    float d[SUB_CHUNK], x[SUB_CHUNK], dg[SUB_CHUNK], decayed = 0.0f, du = 0.0f;
    GT_UNROLL
    for (int t = 0; t < SUB_CHUNK; t++) {
        d[t] = ex2_approx(-own.h(t));
        x[t] = own.k(t);
        dg[t] = 0.0f;
    }
    GT_NO_UNROLL
    for (int i = 0; i < SUB_CHUNK; i++) { /* pairs that end at i */
        const float r = p.scale * own.r(i), k = own.k(i), from_start = ex2_approx(-decayed) * sum_at(C::X, i);
        const float2 products = near(i);
        float term[SUB_CHUNK], within = 0.0f, decay = 1.0f, crossing = from_start;
        GT_UNROLL
        for (int j = SUB_CHUNK - 2; j >= 0; j--) {
            const bool is_pair = j < i - 1;
            decay *= is_pair ? d[j + 1] : 1.0f;
            term[j] = is_pair ? decay * lds<float>(C_element(me, sub_chunk, i, j)) * x[j] : 0.0f;
            within += term[j];
        }
        GT_UNROLL
        for (int t = 0; t < SUB_CHUNK - 1; t++) {
            dg[t] = fma_rn(t < i ? r : 0.0f, crossing, dg[t]);
            crossing += term[t];
        }
        const float dr = fma_rn(u * k, products.x, fma_rn(own.k(i - 1), products.y, p.scale * (from_start + within)));
        if (p.tensors[OF_DR].data && i < own.tokens) Element<T>::store(row_of<T>(p, me, OF_DR, own.t0 + i), n, dr);
        du = fma_rn(products.x * own.r(i), k, du);
        decayed += own.h(i);
    }
    sts<float>(me.smem + C::DU + 4 * (sub_chunk * C::CHANNELS + channel), du);
    const float all = strong_crossing(me, sub_chunk, channel);
    GT_UNROLL
    for (int t = 0; t < SUB_CHUNK; t++) {
        x[t] = p.scale * own.r(t);
        dg[t] += all;
    }
    decayed = 0.0f;
    GT_NO_UNROLL
    for (int j = SUB_CHUNK - 1; j >= 0; j--) { /* pairs that begin at j */
        const float k = own.k(j), to_end = ex2_approx(-decayed) * sum_at(C::Z, j);
        float within = 0.0f;
        GT_UNROLL
        for (int i = SUB_CHUNK - 1; i >= 2; i--)
            if (i >= j + 2) within = fma_rn(lds<float>(C_element(me, sub_chunk, i, j)), x[i], within) * d[i - 1];
        GT_UNROLL
        for (int t = 1; t < SUB_CHUNK; t++) dg[t] = fma_rn(t > j ? k : 0.0f, to_end, dg[t]);
        const float dk = fma_rn(u * own.r(j), near(j).x, fma_rn(own.r(j + 1), near(j + 1).y, to_end + within));
        if (p.tensors[OF_DK].data && j < own.tokens) Element<T>::store(row_of<T>(p, me, OF_DK, own.t0 + j), n, dk);
        decayed += own.h(j);
    }
    if (!p.tensors[OF_DW].data) return;
    GT_UNROLL
    for (int t = 0; t < SUB_CHUNK; t++) {
        /* If d = 0, h may be infinite, and h * dg could be NaN. */
        const float dw = d[t] == 0.0f ? 0.0f : p.raw ? -LN_2 * own.h(t) * dg[t] : dg[t];
        if (t < own.tokens) Element<W>::store(row_of<W>(p, me, OF_DW, own.t0 + t), n, dw);
    }
}

} /* namespace wkv6 */
} /* namespace gt */

#endif
