/* gt/ssd/mma/gradients.cuh - ssd backward of a chunk on tensor cores, with 16-bit activations: every gradient but dz
 * and dstate_in.  forward_tensor_kernel computes dz.  forward_tensor_kernel or states_tensor_kernel computes h.
 * states_tensor_kernel computes G and dstate_in in reverse.
 *
 * A block has 64 tokens of one group.  It takes the group's heads, and their tiles of 64 rows p, one after another;
 * each of these is a step.  It starts from the checkpoints of h and G, which lie 128 tokens apart.  Results that the
 * heads of a group share are computed once, or summed in registers.  h is the state before the chunk, and G the
 * gradient of the state after the chunk.  In this file S does not include L, and M does not include Delta:
 *
 *     S = C B^T                      once per block        dS = dy x^T                         each step.
 *     w_ts = dS_ts L_ts Delta_s      W is the sum of w over all steps.  After the last step dC += W B and dB += W^T C.
 *     M_ts = S_ts L_ts               U = suf . (B G^T) + M^T dy              dx = Delta . U + Dskip . dy.
 *     dC += pre . (dy h)             dB += (Delta suf) . (x G)               fp32, 64 x N each, in registers.
 *
 * da and ddt are sums for each token.  They use Gamma = w . S, E_t = <C_t, pre_t h^T dy_t>, F_s = <B_s, Delta_s suf_s
 * G^T x_s> and Z = exp(sum a) <G, h>:
 *
 *     da_k = sum_{t>=k>s} Gamma_ts + sum_{t>=k} E_t + sum_{s<k} F_s + Z.
 *     <x_s, U_s> = (F_s + sum_t Gamma_ts) / Delta_s: F and Gamma are summed without Delta.
 *     ddt = slope (<x, U> + A da)
 *
 * The sums of Gamma over t >= k > s use additions only.  They consist of row sums and column sums of 16 x 16 blocks,
 * and of suffix sums of rows in the blocks on the diagonal.  A slot of 128 tokens has two chunks.  The second chunk
 * computes its h, and the first chunk its G, by one state update per step from the tokens of the other chunk (the
 * "neighbour").
 *
 * WARPS.  All eight warps multiply (mma.sync m16n8k16, f16).  The pairs of tokens are ten blocks of 16 x 16: warps 0,
 * 1, 3 and 6 have two blocks each, and warps 2 and 7 have one block and half of <G, h>.  Meanwhile warp 4 computes da
 * and ddt of the previous step, and warp 5 computes Delta of the next step.  With two stages, warp 5 then computes the
 * decay factors, too.  With one stage, warps 4 and 5 compute them while the next step's tiles arrive.  A step has four
 * phases:
 *     x, dy and the neighbour's x or dy become f16 in place, with a power of two per row                -- barrier 1.
 *     the neighbour's tokens are added to h or G                                                        -- barrier 2.
 *     dS, w, Gamma, M in blocks of 16 s x 16 t; <G, h>; warps 0-3: dC and E, warps 4-7: dB and F        -- barrier 3.
 *     U and dx, 32 s x 16 p per warp.
 * With one stage, the copies of the next step's x and h start before the last phase, and the other copies after a
 * fourth barrier.  All pairs are held transposed, with rows s, so that M^T is stored as a left operand.
 *
 * REGISTERS per thread (N = 128): S 16, W 16, dC or dB 64, the neighbour's B or C 16.  In addition 24 for the current
 * product, or 32 in the last phase; with z 16 while rows arrive.
 * SHARED MEMORY (N = 128): B and C 32 KB; a stage 56 KB (x, dy and the neighbour's rows 24, h and G 32); factors and
 * sums of tokens 10.8 KB with one stage, 15.1 KB with two.  In all 98.8 KB with one stage and 159.1 KB with two.  With
 * two stages, the next step's tiles arrive during this step.  M^T overwrites the neighbour's rows.
 * PRODUCTS per step: 1250 mma and about 900 ldmatrix_x4.  The mma are three products of 64 x 128 x 64, one of 64 x 64 x
 * 128, 64 mma for <G, h>, and twice 0.6 of 64 x 64 x 64.  A warp executes 2500 instructions in all.
 * BYTES per token and head, bf16, P = 64, N = 128: x, dy and dx 384, the neighbour's rows 128, h and G 512 (half of h
 * and G from L2).  z adds 128.  In the first chunk of a slot, the neighbour's z adds 128 more.
 * GATE.  With z, dy stands for dy silu(z) everywhere.  The kernel computes this product in fp32 when it converts dy to
 * f16, so dy silu(z) is rounded only once.
 * N > 128: every 128 columns of the states have a launch of their own.  Each launch computes dB and dC of its columns,
 * and partial sums of dx, ddt, dA and ddt_bias.  All launches but the last store the partial sums of dx and ddt in
 * fp32.  The last launch stores dx and ddt.
 * grid: [B, slots of 128 tokens, G], two chunks each; block 256.  Every sum has one fixed order, so results are
 * deterministic. */
#ifndef GT_SSD_MMA_GRADIENTS_CUH
#define GT_SSD_MMA_GRADIENTS_CUH

#include "gradients_tokens.cuh"

namespace gt {
namespace ssd {

/* ---- pairs ----------------------------------------------------------------------------------------------------- */

/* The warp's pairs: tokens s of block s_block with tokens t of blocks t_block and t_block + 1.  A block of t before
 * s_block is left out.  Each hexadecimal digit of a constant belongs to a warp; warp 0 has the lowest digit.  A
 * scheduler runs warps w and w + 4, so these two warps together have two or three of the ten blocks. */
struct WarpPairs {
    int s_block, t_block;
    GT_METHOD explicit WarpPairs(int warp) {
        s_block = 0x31322100 >> 4 * warp & 3;
        t_block = 0x22002020 >> 4 * warp & 3;
    }
    GT_METHOD bool has(int i) const { return t_block + i >= s_block; }
};

/* Pairs of the warp: [block of t][tile of 8 columns t][registers of an mma accumulator, with rows s]. */
typedef float Pairs16[2][2][4];

/* Computes the warp's pairs of S^T, and multiplies by the inverses of the powers of B and C. */
template <class C>
GT_DEV void make_S(const ChunkGradientBlock<C>& me, Pairs16& S) {
    const WarpPairs at(me.warp);
    const int g = lane_id() / 4, j = lane_id() % 4;
    const uint32_t left = by_rows<C::N>(me.smem + C::B), right = by_columns<C::N>(me.smem + C::C);
    GT_UNROLL
    for (int i = 0; i < 2; i++) {
        const int block = at.t_block + i;
        GT_UNROLL
        for (int n = 0; n < 2; n++) {
            GT_UNROLL
            for (int e = 0; e < 4; e++) S[i][n][e] = 0.0f;
        }
        if (!at.has(i)) continue;
        GT_UNROLL
        for (int k = 0; k < C::N / 16; k++) {
            uint32_t a[4], b[4];
            ldmatrix_x4(a, block_at<C::N>(left, at.s_block, k));
            ldmatrix_x4(b, block_at<C::N>(right, block, k));
            mma_f16(S[i][0], a, b[0], b[1]);
            mma_f16(S[i][1], a, b[2], b[3]);
        }
        GT_UNROLL
        for (int n = 0; n < 2; n++) {
            const float2 t = lds<float2>(me.address(C::C_INVERSE + 16 * block + 8 * n + 2 * j));
            GT_UNROLL
            for (int e = 0; e < 4; e++)
                S[i][n][e] *= me.value(C::B_INVERSE + 16 * at.s_block + g + e / 2 * 8) * (e % 2 ? t.y : t.x);
        }
    }
}

/* Computes L_ts of the lane's elements: columns t in tile `n` of block `block`, rows s in block `s_block`. */
template <class C>
GT_DEV void pair_decays(const ChunkGradientBlock<C>& me, int step, int block, int s_block, int n, float (&L)[4]) {
    const int g = lane_id() / 4, j = lane_id() % 4, t = 16 * block + 8 * n + 2 * j, s = 16 * s_block + g;
    if (block != s_block) {
        const float2 u = lds<float2>(me.address(me.factor(step, Factors::U) + t));
        const float between = me.value(me.factor(step, between_index(block, s_block)));
        GT_UNROLL
        for (int e = 0; e < 4; e++) {
            const float v = me.value(me.factor(step, Factors::V) + s + e / 2 * 8) * between;
            L[e] = (e % 2 ? u.y : u.x) * v;
        }
        return;
    }
    /* on the diagonal; L is 0 if t is in the first half of the block and s in the second */
    const uint32_t diagonal = me.address(me.factor(step, Factors::DIAGONAL) + 8 * t + g);
    const float near0 = lds<float>(diagonal), near1 = lds<float>(diagonal + 32);
    const float2 u = lds<float2>(me.address(me.factor(step, Factors::HALF) + t));
    const float v = me.value(me.factor(step, Factors::HALF) + s);
    L[0] = n ? u.x * v : near0, L[1] = n ? u.y * v : near1;
    L[2] = n ? near0 : 0.0f, L[3] = n ? near1 : 0.0f;
}

/* Stores sum_t <dy_t, x_t> over the 16 tokens of a block, which is the sum of the diagonal of dS.  The inverses of the
 * powers of x and dy are multiplied in. */
template <class C>
GT_DEV void store_trace(const ChunkGradientBlock<C>& me, int step, int block, const float (&dS)[2][4]) {
    const int g = lane_id() / 4, j = lane_id() % 4;
    float sum = 0.0f;
    GT_UNROLL
    for (int e = 0; e < 2; e++) {
        const int s = 16 * block + 8 * e + g;
        const float x = g % 2 ? dS[e][2 * e + 1] : dS[e][2 * e];
        sum += j == g / 2 ? x * me.value(me.row_inverse(step, true) + s) * me.value(me.row_inverse(step, false) + s)
                          : 0.0f;
    }
    sum = warp_sum(sum);
    if (lane_id() == 0) sts<float>(me.address(me.sums(step, C::TRACE) + block), sum);
}

/* Computes dS, Gamma, the sums of Gamma, and M^T.  Adds w to W. */
template <class C>
GT_DEV void make_pair_gradients(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me, int step,
                                const Pairs16& S, Pairs16& W) {
    const WarpPairs at(me.warp);
    const int g = lane_id() / 4, j = lane_id() % 4, s = 16 * at.s_block + g;
    const uint32_t stage = me.stage(step);
    const uint32_t left = by_rows<64>(stage + C::X), right = by_columns<64>(stage + C::DY);
    GT_UNROLL
    for (int i = 0; i < 2; i++) {
        const int block = at.t_block + i;
        if (!at.has(i)) continue;
        float dS[2][4] = {};
        GT_UNROLL
        for (int k = 0; k < 4; k++) {
            uint32_t a[4], b[4];
            ldmatrix_x4(a, block_at<64>(left, at.s_block, k));
            ldmatrix_x4(b, block_at<64>(right, block, k));
            mma_f16(dS[0], a, b[0], b[1]);
            mma_f16(dS[1], a, b[2], b[3]);
        }
        if (block == at.s_block && p.dskip && !p.in.skip_per_channel) store_trace(me, step, block, dS);
        /* each row of M^T has a power of two; its bound uses |S| <= N 2^28 times the inverses of C and B */
        float delta[2], inverse[2], power[2];
        const float2 bounds = lds<float2>(me.address(C::M_BOUND + 2 * at.s_block));
        const float growth = me.value(me.factor(step, Factors::GROWTH));
        GT_UNROLL
        for (int e = 0; e < 2; e++) {
            const float bound = (e ? bounds.y : bounds.x) * (me.value(C::B_INVERSE + s + 8 * e) * growth);
            const Power M = power_of(bound * (0x1p28f * C::N));
            power[e] = M.value;
            delta[e] = me.value(me.factor(step, Factors::DELTA) + s + 8 * e);
            inverse[e] = me.value(me.row_inverse(step, false) + s + 8 * e);
            if (block == at.s_block && j == 0) sts<float>(me.address(C::M_INVERSE + s + 8 * e), M.inverse);
        }
        float gamma[2][4], columns[4], sums[2] = {}; /* gamma: without Delta_s */
        GT_UNROLL
        for (int n = 0; n < 2; n++) {
            float L[4];
            pair_decays(me, step, block, at.s_block, n, L);
            const float2 dy = lds<float2>(me.address(me.row_inverse(step, true) + 16 * block + 8 * n + 2 * j));
            float M[4];
            GT_UNROLL
            for (int e = 0; e < 4; e++) {
                const float l = L[e] * (e % 2 ? dy.y : dy.x), w = dS[n][e] * l * inverse[e / 2];
                W[i][n][e] = fma_rn(w, delta[e / 2], W[i][n][e]);
                gamma[n][e] = w * S[i][n][e];
                M[e] = S[i][n][e] * l * power[e / 2];
            }
            GT_UNROLL
            for (int e = 0; e < 2; e++) {
                sts<uint32_t>(stage + C::NEXT + panel_at<128>(s + 8 * e, 2 * block + n) + 4 * j,
                              pack_f16(M[2 * e], M[2 * e + 1]));
                sums[e] += gamma[n][2 * e] + gamma[n][2 * e + 1];
            }
        }
        GT_UNROLL
        for (int e = 0; e < 8; e++) gamma[e / 4][e % 4] *= delta[e % 4 / 2];
        const int index = pair_index(block, at.s_block);
        reduce_scatter<2, 4, 1>(sums, j);
        if (j % 2 == 0) sts<float>(me.address(me.sums(step, C::COLUMN_SUMS) + 16 * index + g + 4 * j), sums[0]);
        if (block == at.s_block) {
            store_diagonal(gamma, me.address(me.sums(step, C::DIAGONAL) + 16 * block));
        } else {
            GT_UNROLL
            for (int e = 0; e < 4; e++) columns[e] = gamma[e / 2][e % 2] + gamma[e / 2][e % 2 + 2];
            store_column_sums(columns,
                              me.address(me.sums(step, C::ROW_SUMS) + 16 * lower_pair_index(block, at.s_block)));
        }
    }
}

/* ---- dC and dB ------------------------------------------------------------------------------------------------- */

/* A warp's part of dC (warps 0-3, which = 0) or of dB (warps 4-7, which = 1): half of the tokens and half of the
 * columns. */
struct WarpProduct {
    int which, t_half, n_half;
    GT_METHOD explicit WarpProduct(int warp) {
        which = warp / 4;
        t_half = warp % 2;
        n_half = warp / 2 % 2;
    }
};

template <class C>
struct ProductSums {
    float v[C::PASSES][2][C::TILES][4];
};

/* sums += factor_t sum_k left[t][k] right[k][n].  With DOTS, also dots[t] = <row t of left right, other_t>.  left is 64
 * x 64, right 64 x N, and other [t][n].  ratios: factors for each 16 rows k of `right`, which are multiplied into the
 * columns of left. */
template <bool DOTS, class C>
GT_DEV void add_product(const ChunkGradientBlock<C>& me, ProductSums<C>& sums, uint32_t left, uint32_t right,
                        uint32_t other, const float (&ratios)[4], const float (&factor)[2][2], float (&dots)[4]) {
    const WarpProduct at(me.warp);
    const uint32_t a_addresses = block_at<64>(by_rows<64>(left), 2 * at.t_half, 0);
    const uint32_t b_addresses = block_at<C::N>(by_rows<C::N>(right), 0, at.n_half * C::COLUMNS / 16);
    const uint32_t other_addresses = block_at<C::N>(by_rows<C::N>(other), 2 * at.t_half, at.n_half * C::COLUMNS / 16);
    GT_UNROLL
    for (int m = 0; m < 2; m++) {
        uint32_t a[4][4];
        GT_UNROLL
        for (int k = 0; k < 4; k++) {
            ldmatrix_x4(a[k], block_at<64>(a_addresses, m, k));
            GT_UNROLL
            for (int e = 0; e < 4; e++) a[k][e] = multiply_f16(a[k][e], pack_f16(ratios[k], ratios[k]));
        }
        dots[2 * m] = dots[2 * m + 1] = 0.0f;
        GT_UNROLL
        for (int pass = 0; pass < C::PASSES; pass++) {
            float share[C::TILES][4] = {};
            GT_UNROLL
            for (int k = 0; k < 4; k++) {
                GT_UNROLL
                for (int n = 0; n < C::TILES; n += 2) {
                    uint32_t b[4];
                    ldmatrix_x4_trans(b, block_at<C::N>(b_addresses, k, (C::TILES * pass + n) / 2));
                    if (C::TILES == 1 && at.n_half) b[0] = b[2], b[1] = b[3];
                    mma_f16(share[n], a[k], b[0], b[1]);
                    if constexpr (C::TILES > 1) mma_f16(share[n + 1], a[k], b[2], b[3]);
                }
            }
            GT_UNROLL
            for (int n = 0; n < C::TILES; n += 2) {
                uint32_t pairs[4]; /* elements of `other`: [n][e] */
                if constexpr (DOTS) {
                    ldmatrix_x4(pairs, block_at<C::N>(other_addresses, m, (C::TILES * pass + n) / 2));
                    if (C::TILES == 1 && at.n_half) pairs[0] = pairs[2], pairs[1] = pairs[3];
                }
                GT_UNROLL
                for (int i = 0; i < (C::TILES > 1 ? 4 : 2); i++) {
                    const int e = i % 2;
                    const float x0 = share[n + i / 2][2 * e], x1 = share[n + i / 2][2 * e + 1];
                    float* sum = sums.v[pass][m][n + i / 2] + 2 * e;
                    sum[0] = fma_rn(factor[m][e], x0, sum[0]);
                    sum[1] = fma_rn(factor[m][e], x1, sum[1]);
                    if constexpr (DOTS)
                        dots[2 * m + e] =
                            fma_rn(x0, unpack_f16_lo(pairs[i]), fma_rn(x1, unpack_f16_hi(pairs[i]), dots[2 * m + e]));
                }
            }
        }
    }
}

/* Adds the step's part of dC and dB that comes from the states.  Computes E and F. */
template <class C>
GT_DEV void add_states(const ChunkGradientBlock<C>& me, int step, ProductSums<C>& sums) {
    const WarpProduct at(me.warp);
    const int g = lane_id() / 4, j = lane_id() % 4;
    const uint32_t stage = me.stage(step);
    const float4 inverses = state_inverses(me, step, at.which);
    const float largest = largest_of(inverses), unit = inverse_of(largest);
    const float ratios[4] = {inverses.x * unit, inverses.y * unit, inverses.z * unit, inverses.w * unit};
    /* factor of token 32 t_half + 8 i + g, without Delta */
    const auto factor_of = [&](int i) {
        const int t = 32 * at.t_half + 8 * i + g;
        return me.value(me.factor(step, at.which ? Factors::SUF : Factors::PRE) + t) *
               me.value(me.row_inverse(step, !at.which) + t) * largest;
    };
    float factor[2][2], dots[4];
    GT_UNROLL
    for (int i = 0; i < 4; i++) {
        const int t = 32 * at.t_half + 8 * i + g;
        factor[i / 2][i % 2] = at.which ? me.value(me.factor(step, Factors::DELTA) + t) * factor_of(i) : factor_of(i);
    }
    add_product<true>(me, sums, stage + (at.which ? C::X : C::DY), stage + (at.which ? C::G : C::H),
                      me.smem + (at.which ? C::B : C::C), ratios, factor, dots);
    GT_UNROLL
    for (int i = 0; i < 4; i++) {
        const int t = 32 * at.t_half + 8 * i + g;
        dots[i] *= factor_of(i) * me.value((at.which ? C::B_INVERSE : C::C_INVERSE) + t);
    }
    reduce_scatter<4, 4, 1>(dots, j);
    sts<float>(me.address(me.sums(step, at.which ? C::F : C::E) + CHUNK * at.n_half + 32 * at.t_half + 8 * j + g),
               dots[0]);
}

/* ---- <G, h> ---------------------------------------------------------------------------------------------------- */

/* Computes <G, h> for every 16 rows p.  Warps 2 and 7 call this function, because they have only one block of pairs. */
template <class C>
GT_DEV void dot_states(const ChunkGradientBlock<C>& me, int step) {
    const int g = lane_id() / 4, j = lane_id() % 4;
    const uint32_t stage = me.stage(step);
    const uint32_t G = by_columns<C::N>(stage + C::G), h = by_rows<C::N>(stage + C::H);
    GT_NO_UNROLL
    for (int p_block = me.warp == 7; p_block < 4; p_block += 2) {
        float sums[2][4] = {};
        GT_UNROLL
        for (int k = 0; k < C::N / 16; k++) {
            uint32_t a[4], b[4];
            ldmatrix_x4(a, block_at<C::N>(h, p_block, k));
            ldmatrix_x4(b, block_at<C::N>(G, p_block, k));
            mma_f16(sums[0], a, b[0], b[1]);
            mma_f16(sums[1], a, b[2], b[3]);
        }
        const float undo =
            part_of(state_inverses(me, step, 0), p_block) * part_of(state_inverses(me, step, 1), p_block);
        float sum = g == 2 * j ? sums[0][0] + sums[1][2] : g == 2 * j + 1 ? sums[0][1] + sums[1][3] : 0.0f;
        sum = warp_sum(sum * undo);
        if (lane_id() == 0) sts<float>(me.address(me.sums(step, C::Z) + p_block), sum);
    }
}

/* ---- U and dx --------------------------------------------------------------------------------------------------- */

/* U of the warp's 32 tokens s by 16 rows p, in two parts: from_G is B G^T, and from_pairs is M^T dy. */
struct InputSums {
    float from_G[2][2][4], from_pairs[2][2][4];
};

/* Computes InputSums.  s_block: the block of the warp's first token. */
template <class C>
GT_DEV void multiply_inputs(const ChunkGradientBlock<C>& me, int step, int p_block, int s_block, InputSums& sums) {
    const uint32_t stage = me.stage(step);
    const uint32_t b_addresses = block_at<C::N>(by_columns<C::N>(stage + C::G), p_block, 0);
    const uint32_t a_addresses = block_at<C::N>(by_rows<C::N>(me.smem + C::B), s_block, 0);
    const uint32_t m_addresses = block_at<64>(by_rows<64>(stage + C::NEXT), s_block, s_block); /* s_block is even */
    const uint32_t dy_addresses = block_at<64>(by_rows<64>(stage + C::DY), s_block, p_block);
    GT_UNROLL
    for (int k = 0; k < C::N / 16; k++) {
        uint32_t a[4], b[4];
        ldmatrix_x4(b, block_at<C::N>(b_addresses, 0, k));
        GT_UNROLL
        for (int m = 0; m < 2; m++) {
            ldmatrix_x4(a, block_at<C::N>(a_addresses, m, k));
            mma_f16(sums.from_G[m][0], a, b[0], b[1]);
            mma_f16(sums.from_G[m][1], a, b[2], b[3]);
        }
    }
    GT_UNROLL
    for (int k = 0; k < BLOCKS; k++) { /* block s_block + k of t */
        if (s_block + k >= BLOCKS) break;
        uint32_t a[4], b[4];
        ldmatrix_x4_trans(b, block_at<64>(dy_addresses, k, 0));
        GT_UNROLL
        for (int m = 0; m < 2; m++) {
            if (k < m) continue;
            ldmatrix_x4(a, block_at<64>(m_addresses, m, k));
            mma_f16(sums.from_pairs[m][0], a, b[0], b[1]);
            mma_f16(sums.from_pairs[m][1], a, b[2], b[3]);
        }
    }
}

GT_DEV uint32_t pack_as(gt_dtype dtype, float lo, float hi) {
    return dtype == GT_BF16 ? pack_bf16(lo, hi) : pack_f16(lo, hi);
}

/* Adds the partial sum of dx that earlier launches have stored.  Stores the new sum if later launches follow.  i: one
 * of the thread's four rows. */
template <class C>
GT_DEV void add_share(const ChunkGradientParams& p, int steps, int step, int i, float (&dx)[4]) {
    float* const address = p.dx_share + ((((int64_t)block_x() * steps + step) * 4 + i) * C::THREADS + thread_id()) * 4;
    if (p.has_share) {
        const float4 before = ldg<float4>(address);
        dx[0] += before.x, dx[1] += before.y, dx[2] += before.z, dx[3] += before.w;
    }
    if (p.leaves_share) stg<float4>(address, {dx[0], dx[1], dx[2], dx[3]});
}

/* Whether the last phase of a step reads x, as dDskip per channel requires. */
GT_DEV bool keeps_x(const ChunkGradientParams& p) { return p.dskip && p.in.skip_per_channel; }

template <class C>
GT_DEV void finish_inputs(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me, int step) {
    const Problem& in = p.in;
    if (!p.dx && !keeps_x(p)) return;
    const int g = lane_id() / 4, j = lane_id() % 4;
    const int p_block = me.warp % 4, t_half = me.warp / 4, s_block = 2 * t_half; /* blocks of 16 p and 16 s */
    const int h = me.head(p, step), p0 = me.p0(p, step) + 16 * p_block;
    const uint32_t stage = me.stage(step);
    const float G_inverse = part_of(state_inverses(me, step, 1), p_block);
    InputSums sums = {};
    multiply_inputs(me, step, p_block, s_block, sums);
    float2 skips[2] = {};
    GT_UNROLL
    for (int n = 0; n < 2 && in.Dskip; n++) {
        if (in.skip_per_channel)
            skips[n] = skips_of(in, h, p0 + 8 * n + 2 * j);
        else
            skips[n].x = skips[n].y = me.value(C::SKIP + step % 2);
    }
    const uint32_t dy_addresses = block_at<64>(by_rows<64>(stage + C::DY), s_block, p_block);
    uint32_t dys[4]; /* [n][e]: dy of 16 rows */
    float dskip[4] = {};
    /* A lane has pairs of adjacent columns.  It exchanges pairs with its neighbour lane to get four adjacent columns,
     * so that the lanes of a row write 32 adjacent bytes. */
    const bool odd = j % 2, exists = p.dx && p0 + (odd ? 8 : 0) < in.P && !(C::MORE && p.leaves_share);
    uint16_t* to = place_of<uint16_t>(me, PLACE_DX) + (16 * s_block + g) * p.dx_stride.t + 16 * p_block +
                   (odd ? 8 : 0) + j / 2 * 4;
    GT_UNROLL
    for (int i = 0; i < 4; i++) {
        const int m = i / 2, e = i % 2, s = 16 * s_block + 8 * i + g;
        const float by_G = me.value(me.factor(step, Factors::SUF) + s) * me.value(C::B_INVERSE + s) * G_inverse;
        const float by_pairs = me.value(C::M_INVERSE + s), delta = me.value(me.factor(step, Factors::DELTA) + s);
        const float dy_inverse = me.value(me.row_inverse(step, true) + s);
        if (e == 0 && (in.Dskip || keeps_x(p))) ldmatrix_x4(dys, block_at<64>(dy_addresses, m, 0));
        float dx[4];
        GT_UNROLL
        for (int n = 0; n < 2; n++) {
            const float2 U = {fma_rn(by_pairs, sums.from_pairs[m][n][2 * e], by_G * sums.from_G[m][n][2 * e]),
                              fma_rn(by_pairs, sums.from_pairs[m][n][2 * e + 1], by_G * sums.from_G[m][n][2 * e + 1])};
            dx[2 * n] = delta * U.x, dx[2 * n + 1] = delta * U.y;
            if (!in.Dskip && !keeps_x(p)) continue;
            const uint32_t pair = dys[2 * n + e];
            const float2 dy = {unpack_f16_lo(pair) * dy_inverse, unpack_f16_hi(pair) * dy_inverse};
            if (in.Dskip) {
                dx[2 * n] = fma_rn(skips[n].x, dy.x, dx[2 * n]);
                dx[2 * n + 1] = fma_rn(skips[n].y, dy.y, dx[2 * n + 1]);
            }
            if (!keeps_x(p)) continue;
            const uint32_t x = lds<uint32_t>(stage + C::X + panel_at<128>(s, 2 * p_block + n) + 4 * j);
            const float x_inverse = me.value(me.row_inverse(step, false) + s);
            dskip[2 * n] = fma_rn(dy.x, unpack_f16_lo(x) * x_inverse, dskip[2 * n]);
            dskip[2 * n + 1] = fma_rn(dy.y, unpack_f16_hi(x) * x_inverse, dskip[2 * n + 1]);
        }
        if constexpr (C::MORE)
            if (p.dx_share) add_share<C>(p, me.steps, step, i, dx);
        const uint32_t first = pack_as(in.dtype, dx[0], dx[1]), second = pack_as(in.dtype, dx[2], dx[3]);
        const uint32_t other = shfl_xor(odd ? first : second, 1);
        if (exists && s < me.tokens) stg<uint2>(to, odd ? uint2{other, second} : uint2{first, other});
        to += 8 * p.dx_stride.t;
    }
    if (keeps_x(p)) store_column_sums(dskip, me.address(C::DSKIP + CHUNK * t_half + 16 * p_block));
}

/* ---- dB and dC in the end -------------------------------------------------------------------------------------- */

/* Stores W, the sum over all steps, as f16 with a power of two for every row.  First, at `tile`, comes W_ts times the
 * inverse of B_s, with rows t.  Then comes the transpose, with rows s: W_ts times the inverse of C_t.  All warps call
 * this function, which has two barriers. */
template <class C>
GT_DEV void store_W(const ChunkGradientBlock<C>& me, uint32_t tile, const Pairs16& W) {
    const WarpPairs at(me.warp);
    const int lane = lane_id(), g = lane / 4, j = lane % 4, s = 16 * at.s_block + g;
    constexpr int EACH = CHUNK / C::WARPS; /* rows of a warp */
    GT_UNROLL
    for (int i = 0; i < 2; i++) {
        GT_UNROLL
        for (int n = 0; n < 2; n++) {
            GT_UNROLL
            for (int e = 0; e < 2; e++)
                sts<float2>(tile + 4 * (C::W_PITCH * (s + 8 * e) + 16 * (at.t_block + i) + 8 * n + 2 * j),
                            {W[i][n][2 * e], W[i][n][2 * e + 1]});
        }
    }
    sync_threads();
    float2 rows[2][EACH];
    const float2 B = lds<float2>(me.address(C::B_INVERSE + 2 * lane)),
                 c = lds<float2>(me.address(C::C_INVERSE + 2 * lane));
    GT_UNROLL
    for (int i = 0; i < EACH; i++) {
        const int row = EACH * me.warp + i;
        rows[0][i] = {lds<float>(tile + 4 * (C::W_PITCH * 2 * lane + row)) * B.x,
                      lds<float>(tile + 4 * (C::W_PITCH * (2 * lane + 1) + row)) * B.y};
        rows[1][i] = lds<float2>(tile + 4 * (C::W_PITCH * row + 2 * lane));
        rows[1][i] = {rows[1][i].x * c.x, rows[1][i].y * c.y};
    }
    sync_threads();
    GT_UNROLL
    for (int which = 0; which < 2; which++) {
        GT_UNROLL
        for (int i = 0; i < EACH; i++) {
            const int row = EACH * me.warp + i;
            const float2 x = rows[which][i];
            float largest = fabsf(x.x) > fabsf(x.y) ? fabsf(x.x) : fabsf(x.y);
            GT_UNROLL
            for (int mask = 1; mask < 32; mask *= 2) {
                const float other = shfl_xor(largest, mask);
                largest = other > largest ? other : largest;
            }
            const Power power = power_of(largest);
            sts<uint32_t>(tile + which * C::ROWS + panel_at<128>(row, lane / 4) + 4 * (lane % 4),
                          pack_f16(x.x * power.value, x.y * power.value));
            if (lane == 0) sts<float>(me.address(C::ROW_INVERSES + which * CHUNK + row), power.inverse);
        }
    }
}

/* Stores the warp's part of dC or dB.  It passes through shared memory, so that global stores are 16 bytes wide. */
template <class C>
GT_DEV void store_product(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me, uint32_t tile,
                          const ProductSums<C>& sums) {
    const WarpProduct own(me.warp);
    const int g = lane_id() / 4, j = lane_id() % 4, piece0 = own.n_half * (C::COLUMNS / 8);
    GT_UNROLL
    for (int pass = 0; pass < C::PASSES; pass++) {
        GT_UNROLL
        for (int m = 0; m < 2; m++) {
            GT_UNROLL
            for (int n = 0; n < C::TILES; n++) {
                GT_UNROLL
                for (int e = 0; e < 2; e++)
                    sts<uint32_t>(
                        tile + panel_at<2 * C::N>(32 * own.t_half + 16 * m + 8 * e + g, piece0 + C::TILES * pass + n) +
                            4 * j,
                        pack_as(p.in.dtype, sums.v[pass][m][n][2 * e], sums.v[pass][m][n][2 * e + 1]));
            }
        }
    }
    sync_warp();
    void* out = own.which ? p.dBm : p.dCm;
    if (!out) return;
    const gt_stride out_stride = own.which ? p.dBm_stride : p.dCm_stride;
    uint16_t* to = static_cast<uint16_t*>(out) + offset_of(out_stride, me.b, me.first, me.g);
    constexpr int PIECES = C::COLUMNS / 8;
    GT_UNROLL
    for (int i = 0; i < PIECES; i++) {
        const int t = 32 * own.t_half + (32 * i + lane_id()) / PIECES, piece = piece0 + (32 * i + lane_id()) % PIECES;
        if (t < me.tokens && 8 * piece < p.in.columns)
            stg<uint4>(to + t * out_stride.t + 8 * piece, lds<uint4>(tile + panel_at<2 * C::N>(t, piece)));
    }
}

template <class C>
GT_DEV void finish_dB_and_dC(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me, const Pairs16& W,
                             ProductSums<C>& sums) {
    const WarpProduct own(me.warp);
    const uint32_t tile = me.smem + C::STAGE0;
    store_W(me, tile, W);
    sync_threads();
    float factor[2][2], dots[4];
    const float ratios[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    GT_UNROLL
    for (int i = 0; i < 4; i++)
        factor[i / 2][i % 2] = me.value(C::ROW_INVERSES + own.which * CHUNK + 32 * own.t_half + 8 * i + lane_id() / 4);
    add_product<false>(me, sums, tile + (own.which ? C::ROWS : 0), me.smem + (own.which ? C::C : C::B), 0, ratios,
                       factor, dots);
    sync_threads();
    store_product(p, me, me.smem + (own.which ? C::B : C::C), sums);
}

/* ---- the kernel ------------------------------------------------------------------------------------------------- */

template <class C>
GT_DEV void gradients_of(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me) {
    const Problem& in = p.in;
    const bool finishes = me.warp == C::TIME_WARP, makes_factors = me.warp == C::FACTOR_WARP;
    /* The neighbour's B or C lies in the last stage.  That stage is free until step 0 with one stage, and until step 1
     * with two stages. */
    const uint32_t neighbour_tile = me.smem + C::STAGE0 + (C::STAGES - 1) * C::STAGE + C::H;
    const auto copy_group = [&](uint32_t tile, const void* data, gt_stride stride, int64_t first, int tokens) {
        load_tile<C::N, 32 * C::WARPS>(tile, static_cast<const uint16_t*>(data) + offset_of(stride, me.b, first, me.g),
                                       stride.t, tokens, in.columns);
    };
    const auto copy_step = [&](int step) {
        copy_x_and_h(p, me, step);
        copy_dy_and_G(p, me, step);
    };
    if (makes_factors) place_step(p, me, 0);
    copy_group(me.smem + C::B, in.Bm, in.Bm_stride, me.first, me.tokens);
    copy_group(me.smem + C::C, in.Cm, in.Cm_stride, me.first, me.tokens);
    if (me.makes_state())
        copy_group(neighbour_tile, me.second ? in.Bm : in.Cm, me.second ? in.Bm_stride : in.Cm_stride, me.neighbour(),
                   me.neighbour_tokens);
    cp_async_commit();
    cp_async_wait<0>();
    sync_threads();
    if (C::STAGES > 1) copy_step(0);
    const auto convert_group = [&](uint32_t tile, int inverses) {
        if (in.dtype == GT_BF16)
            rows_to_f16<bf16, C::N>(tile, me.address(inverses), me.warp, C::WARPS);
        else
            rows_to_f16<f16, C::N>(tile, me.address(inverses), me.warp, C::WARPS);
    };
    convert_group(me.smem + C::B, C::B_INVERSE);
    convert_group(me.smem + C::C, C::C_INVERSE);
    if (me.makes_state()) convert_group(neighbour_tile, C::NEXT_INVERSE);
    constexpr int PAIR_FACTORS = DIAGONAL_FACTORS | GROWTH_FACTOR;
    const auto all_factors = [&](int step) {
        sync_warp();
        own_factors<SUM_FACTORS | PAIR_FACTORS>(me, step);
    };
    StepTimes dt;
    if (makes_factors) {
        load_times(p, me, 0, dt);
        prepare_step(p, me, 0, dt);
        if (C::COPIES > 1) all_factors(0);
    }
    sync_threads();
    if (C::STAGES > 1 && makes_factors && me.steps > 1) place_step(p, me, 1);
    Pairs16 S, W = {};
    Neighbour<C> neighbour = {};
    ProductSums<C> sums = {};
    make_S(me, S);
    if (me.makes_state()) read_neighbour(me, neighbour_tile, neighbour);
    sync_threads();
    if (C::STAGES == 1) copy_step(0);
    HeadSums head = {};
    uint32_t last_dt[2] = {0, 0};
    const auto load_last = [&](int step) { load_dt(p, me, step, last_dt); }; /* dt for finish_step() */
    GT_NO_UNROLL
    for (int step = 0; step < me.steps; step++) {
        const bool follows = step + 1 < me.steps;
        Gates gates;
        load_gates(p, me, step, gates);
        /* this work overlaps with the copies */
        if (makes_factors && follows) load_times(p, me, step + 1, dt);
        if (C::COPIES == 1 && makes_factors) own_factors<SUM_FACTORS>(me, step);
        if (finishes && step > 0) load_last(step - 1);
        if (C::COPIES == 1 && finishes) own_factors<PAIR_FACTORS>(me, step);
        convert_step(in, me, step, gates);
        sync_threads(); /* 1 */
        if (C::STAGES > 1 && follows) copy_step(step + 1);
        if (finishes) bound_rows(me);
        if (me.makes_state()) make_state(me, step, neighbour);
        sync_threads(); /* 2 */
        if (makes_factors) {
            if (p.dx) place_dx(p, me, step);
            if (step + C::STAGES < me.steps) place_step(p, me, step + C::STAGES);
            if (follows) prepare_step(p, me, step + 1, dt);
            if (C::COPIES > 1 && follows) all_factors(step + 1);
        }
        if (finishes && step > 0) finish_step(p, me, step - 1, last_dt, head);
        make_pair_gradients(p, me, step, S, W);
        if (me.warp == 2 || me.warp == 7) dot_states(me, step);
        add_states(me, step, sums);
        sync_threads(); /* 3 */
        if (C::STAGES == 1 && follows && !keeps_x(p)) copy_x_and_h(p, me, step + 1);
        finish_inputs(p, me, step);
        if (C::STAGES > 1) continue;
        sync_threads();
        if (!follows) continue;
        if (keeps_x(p)) copy_x_and_h(p, me, step + 1);
        copy_dy_and_G(p, me, step + 1);
    }
    sync_threads(); /* the stages are free */
    if (finishes) {
        load_last(me.steps - 1);
        finish_step(p, me, me.steps - 1, last_dt, head);
    }
    finish_dB_and_dC(p, me, W, sums);
}

template <int N, int STAGES, bool MORE>
GT_KERNEL(256, 1)
chunk_gradient_kernel(const GT_GRID_CONSTANT ChunkGradientParams p) {
    using C = ChunkGradientTraits<N, STAGES, MORE>;
    wait_for_chain();
    const ChunkGradientBlock<C> me = {find_chunk(p, block_x())};
    if (me.tokens <= 0) {
        if (me.g == 0) clear_sums(p, me.row(p.slots), thread_id(), block_threads());
        return;
    }
    gradients_of(p, me);
}

} /* namespace ssd */
} /* namespace gt */

#endif
