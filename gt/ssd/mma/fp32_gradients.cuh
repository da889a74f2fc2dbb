/* gt/ssd/mma/fp32_gradients.cuh - ssd backward of a chunk on tensor cores, with fp32 activations: products of split
 * numbers (fp32_chunk.cuh).  The kernel computes every gradient but dz and dstate_in.  Other passes compute these two,
 * as in gradients.cuh.
 *
 * The formulas treat a slot of 128 tokens, from one checkpoint to the next, as one chunk.  h before the slot and G
 * after it are stored, so no block computes a state.  A block takes 32 tokens of a slot, chunk number `me` of four, for
 * one group.  It takes the group's heads, and their tiles of 64 rows p, one after another; each of these is a step.  L,
 * pre, suf and E refer to the whole slot:
 *
 *     own t, any s <= t of the slot      w_ts = <dy_t, x_s> L_ts Delta_s       W += w       dC_t += sum W_ts B_s (last)
 *     own s, any t >= s of the slot      w_ts, and M_ts = <C_t, B_s> L_ts      W += w       dB_s += sum W_ts C_t (last)
 *     U_s = suf_s G B_s + sum_{t>=s} M_ts dy_t               dx_s = Delta_s U_s + Dskip . dy_s.
 *     dC_t += pre_t h^T dy_t          dB_s += Delta_s suf_s G^T x_s            fp32, in registers.
 *
 * "last" means after the last step.  So a block pairs its own tokens with each of the four chunks.  Tokens of earlier
 * chunks are s, tokens of later chunks are t, and tokens of the own chunk are both.  <C_t, B_s> is computed once per
 * block, and W is summed over the steps.  Both stay in registers.
 *
 * da_k is a sum over pairs of tokens of the slot (docs/ssd.md, section 6).  The block adds the pairs that contain one
 * of its tokens.  The sum over the other pairs is the same for all 32 tokens k of a chunk.  So each block stores its
 * terms of these sums, for each head (Across):
 *     sum E_t and sum F_s of the chunk; sum Gamma_ts with each earlier chunk; its part of Z.
 * chunk_times_fp32_kernel adds these terms to da, and computes ddt, dA and ddt_bias.  F_s = Delta_s <x_s, suf_s G B_s>
 * comes from U.
 *
 * WARPS: 8.  A step has these phases:
 *     x, dy, and x of earlier or dy of later chunks have arrived; 32 rows of G go to registers.
 *                                                                                                         -- barrier
 *     split rows, with a power of two per row; a head's decay factors; da of the previous step            -- barrier
 *     G is split, with one power of two; pairs: 32 own tokens x 16 others per warp: w, W, Gamma, M        -- barrier
 *     dB and dC: 32 tokens x N / 8 columns per warp, h of 32 rows from global memory straight into operands;
 *     U: 16 s x 8 p per warp; dx, <x, U>, <G, h> of the block's rows                                      -- barrier
 *     G of the other 32 rows into registers, barrier, split, barrier, and the products again              -- barrier
 * h has a power of two for every 32 rows p and each warp's columns.  M has a power for every s and 16 tokens t.  So a
 * product of M and dy runs over 16 tokens t, and fp32 instructions add these products.
 *
 * registers per thread, N = 128: <C, B> 16, W 16, dB and dC 32; 60 for the current product.  Two blocks share a
 * multiprocessor.  On devices where only one block fits, the block may use all registers.
 * shared memory, N = 128: B 16 KB, G 16 KB, five tiles of 32 tokens x 64 rows p 40 KB, M 16 KB, factors and sums 11 KB.
 * In all 99 KB.
 * tensor cores per step, N = 128, m16n8k16: dB, dC, G B, <dy, x> 384 each, M dy 96 to 384.  This is 55 per token and
 * head if P = 64.
 * bytes per token and head, P = 64, N = 128: from memory x, dy, dx 768 and h, G 512; from L2 other chunks 768 and h, G
 * 1536.
 * N > 128: every 128 columns have a launch of their own.  Each launch adds its part of dx, da, <x, U> and Across to the
 * stored sums.
 * grid: [B, slots, G], four chunks each; block 256.  Every sum has one fixed order, so results are deterministic. */
#ifndef GT_SSD_MMA_FP32_GRADIENTS_CUH
#define GT_SSD_MMA_FP32_GRADIENTS_CUH

#include "fp32_gradients_chunk.cuh"

namespace gt {
namespace ssd {

/* ---- pairs ------------------------------------------------------------------------------------------------------- */

/* A warp pairs the block's 32 own tokens with 16 tokens of chunk warp / 2: [16 own][8 others][registers of an mma
 * accumulator].  Own tokens are t if that chunk comes earlier than the block's chunk, otherwise s. */
typedef float SplitPairs[2][2][4];

/* Adds to sums the inner products of the rows of `own` with 16 rows of `others`, from row 16 half on.  COLUMNS: length
 * of a row. */
template <int COLUMNS>
GT_DEV void multiply_pairs(uint32_t own, uint32_t others, int half, SplitPairs& sums) {
    using S = SplitTile<COLUMNS>;
    const uint32_t left = by_rows<S::WIDE>(own), right = by_columns<S::WIDE>(others);
    GT_UNROLL
    for (int k = 0; k < COLUMNS / 16; k++) {
        SplitLeft a[2];
        uint32_t hi[4], lo[4];
        GT_UNROLL
        for (int m = 0; m < 2; m++) {
            ldmatrix_x4(a[m].hi, block_at<S::WIDE>(left, m, k));
            ldmatrix_x4(a[m].lo, block_at<S::WIDE>(left, m, k + S::LO));
        }
        ldmatrix_x4(hi, block_at<S::WIDE>(right, half, k));
        ldmatrix_x4(lo, block_at<S::WIDE>(right, half, k + S::LO));
        const uint32_t b_hi[2][2] = {{hi[0], hi[1]}, {hi[2], hi[3]}}, b_lo[2][2] = {{lo[0], lo[1]}, {lo[2], lo[3]}};
        mma_split(sums, a, b_hi, b_lo);
    }
}

/* Stores pairs as a left operand of 32 rows and 16 columns, with a power of two for each row.  block: address of the
 * operand. */
GT_DEV void store_split_pairs(const SplitPairs& v, uint32_t block, uint32_t inverses) {
    const int g = lane_id() / 4, j = lane_id() % 4;
    GT_UNROLL
    for (int i = 0; i < 4; i++) { /* row 8 i + g */
        const float* const x[2] = {&v[i / 2][0][i % 2 * 2], &v[i / 2][1][i % 2 * 2]};
        float largest = fmaxf(fmaxf(fabsf(x[0][0]), fabsf(x[0][1])), fmaxf(fabsf(x[1][0]), fabsf(x[1][1])));
        largest = fmaxf(largest, shfl_xor(largest, 1));
        largest = fmaxf(largest, shfl_xor(largest, 2));
        const Power power = split_power(largest);
        GT_UNROLL
        for (int n = 0; n < 2; n++) {
            uint32_t hi, lo;
            split_pair(x[n][0] * power.value, x[n][1] * power.value, hi, lo);
            sts<uint32_t>(block + panel_at<64>(8 * i + g, n) + 4 * j, hi);
            sts<uint32_t>(block + panel_at<64>(8 * i + g, n + 2) + 4 * j, lo);
        }
        if (j == 0) sts<float>(inverses + 4 * (8 * i + g), power.inverse);
    }
}

/* Computes <C_t, B_s> of the warp's pairs.  The block's B stays in its tile for the steps. */
template <class Tile>
GT_DEV void make_split_products(const SplitGradientParams& p, const SplitGradientBlock<Tile>& me, SplitPairs& S) {
    constexpr int NP = Tile::NP;
    using Rows = SplitTile<NP>;
    const Problem& in = p.in;
    /* tiles: 0 own B, 1 own C, 2 to 4 B or C of the other chunks */
    const auto tile = [&](int i) {
        return me.smem + (i == 0   ? Tile::B
                          : i == 1 ? Tile::X
                          : i == 2 ? Tile::G
                          : i == 3 ? Tile::CHUNKS + Tile::ROWS
                                   : Tile::M);
    };
    const auto inverses = [](int i) { return i ? Tile::GROUP_INVERSES + (i - 1) * SHORT : Tile::B_INVERSE; };
    const auto load = [&](int i, bool is_C, int chunk) {
        const gt_stride& stride = is_C ? in.Cm_stride : in.Bm_stride;
        const float* first =
            static_cast<const float*>(is_C ? in.Cm : in.Bm) + offset_of(stride, me.b(), me.token(chunk), me.g());
        load_split_tile<NP>(tile(i), first, stride.t, me.tokens(chunk), in.columns);
    };
    load(0, false, me.me);
    load(1, true, me.me);
    for (int i = 0; i < 3; i++) load(2 + i, i >= me.me, i + (i >= me.me));
    cp_async_commit();
    cp_async_wait<0>();
    sync_threads();
    constexpr int CALLS = Rows::ROW_SETS / Rows::AT_ONCE;
    static_assert(WARPS % CALLS == 0, "a warp splits the same rows of every tile");
    const RowSplitter<NP> rows(me.warp % CALLS * Rows::AT_ONCE);
    GT_NO_UNROLL
    for (int i = me.warp; i < 5 * CALLS; i += WARPS) rows.split(tile(i / CALLS), me.address(inverses(i / CALLS)), 0);
    sync_threads();
    const int chunk = me.warp / 2, half = me.warp % 2, lane = lane_id();
    const int left = chunk < me.me ? 1 : 0, right = chunk == me.me ? 1 : 2 + chunk - (chunk > me.me);
    GT_UNROLL
    for (int i = 0; i < 16; i++) S[i / 8][i / 4 % 2][i % 4] = 0.0f;
    multiply_pairs<NP>(tile(left), tile(right), half, S);
    GT_UNROLL
    for (int i = 0; i < 16; i++) {
        const int row = 16 * (i / 8) + 8 * (i / 2 % 2) + lane / 4,
                  column = 16 * half + 8 * (i / 4 % 2) + 2 * (lane % 4);
        float& to = S[i / 8][i / 4 % 2][i % 4];
        to = finite(to * me.value(inverses(left) + row) * me.value(inverses(right) + column + i % 2));
    }
    sync_threads();
}

/* ---- a step: w, W, M, Gamma -------------------------------------------------------------------------------------- */

/* Computes L_ts of pairs inside the block's own chunk: rows s from 16 m on, columns t from 16 half + 8 n on. */
template <class Tile>
GT_DEV void own_decays(const SplitGradientBlock<Tile>& me, int m, int half, int n, float (&L)[4]) {
    const int g = lane_id() / 4, j = lane_id() % 4, t = 16 * half + 8 * n + 2 * j, s = 16 * m + g;
    if (m > half) { /* all t are before all s */
        L[0] = L[1] = L[2] = L[3] = 0.0f;
        return;
    }
    if (m < half) {
        const float2 u = lds<float2>(me.address(Tile::FACTORS + Factors::U + t));
        const float v0 = me.value(Tile::FACTORS + Factors::V + s), v1 = me.value(Tile::FACTORS + Factors::V + s + 8);
        L[0] = u.x * v0, L[1] = u.y * v0, L[2] = u.x * v1, L[3] = u.y * v1;
        return;
    }
    const uint32_t diagonal = me.address(Tile::FACTORS + Factors::DIAGONAL + 8 * t + g);
    const float near0 = lds<float>(diagonal), near1 = lds<float>(diagonal + 32);
    const float2 u = lds<float2>(me.address(Tile::FACTORS + Factors::HALF + t));
    const float v = me.value(Tile::FACTORS + Factors::HALF + s);
    L[0] = n ? u.x * v : near0, L[1] = n ? u.y * v : near1;
    L[2] = n ? near0 : 0.0f, L[3] = n ? near1 : 0.0f;
}

template <class Tile>
GT_DEV void make_split_pairs(const SplitGradientBlock<Tile>& me, const SplitPairs& S, SplitPairs& W) {
    const int chunk = me.warp / 2, half = me.warp % 2, g = lane_id() / 4, j = lane_id() % 4;
    const bool is_own = chunk == me.me, is_before = chunk < me.me;
    SplitPairs v = {}; /* v: <dy, x>, then M */
    multiply_pairs<ROWS_P>(is_before ? me.rows(me.me) : me.smem + Tile::X, me.rows(chunk), half, v);
    float2 column[2]; /* for the other tokens: the inverse of the power, times the decay factor */
    GT_UNROLL
    for (int n = 0; n < 2; n++) {
        const int c = 16 * half + 8 * n + 2 * j;
        column[n] = lds<float2>(me.address(me.inverses(chunk) + c));
        if (is_own) continue;
        const float2 factor = lds<float2>(me.address(Tile::OTHER + SHORT * chunk + c));
        column[n].x *= factor.x, column[n].y *= factor.y;
    }
    float rows[4] = {};
    GT_UNROLL
    for (int m = 0; m < 2; m++) {
        float decay[2], weight[2], gamma[2][4];
        GT_UNROLL
        for (int e = 0; e < 2; e++) {
            const int row = 16 * m + 8 * e + g;
            if (is_before) {
                decay[e] = me.value(Tile::FACTORS + Factors::PRE + row) * me.value(me.inverses(me.me) + row);
                weight[e] = 1.0f;
            } else {
                decay[e] = is_own ? 1.0f : me.value(Tile::FACTORS + Factors::SUF + row);
                weight[e] = me.value(Tile::FACTORS + Factors::DELTA + row) * me.value(Tile::INVERSES + row);
            }
        }
        GT_UNROLL
        for (int n = 0; n < 2; n++) {
            float L[4];
            if (is_own) own_decays(me, m, half, n, L);
            GT_UNROLL
            for (int e = 0; e < 4; e++) {
                const float by = (is_own ? L[e] : decay[e / 2]) * (e % 2 ? column[n].y : column[n].x);
                const float w = v[m][n][e] * weight[e / 2] * clamped(by);
                W[m][n][e] += w;
                gamma[n][e] = w * S[m][n][e];
                v[m][n][e] = clamped(S[m][n][e] * by);
            }
            GT_UNROLL
            for (int e = 0; e < 2; e++) rows[2 * m + e] += gamma[n][2 * e] + gamma[n][2 * e + 1];
        }
        if (!is_own) continue;
        if (m == half) store_diagonal(gamma, me.address(Tile::DIAGONAL + 16 * m));
        if (m < half) {
            float columns[4] = {gamma[0][0] + gamma[0][2], gamma[0][1] + gamma[0][3], gamma[1][0] + gamma[1][2],
                                gamma[1][1] + gamma[1][3]};
            store_column_sums(columns, me.address(Tile::CORNER + 16));
        }
    }
    reduce_scatter<4, 4, 1>(rows, j); /* rows[0]: the sum of own token 8 j + g */
    if (!is_own) sts<float>(me.address(Tile::GAMMA + SHORT * me.warp + 8 * j + g), rows[0]);
    if (is_own && half == 1 && j < 2) sts<float>(me.address(Tile::CORNER + 8 * j + g), rows[0]);
    if (!is_before)
        store_split_pairs(v, me.smem + Tile::M + Tile::BLOCK16 * me.warp,
                          me.address(Tile::M_INVERSE + SHORT * me.warp));
}

/* ---- a step: dB, dC, U, dx --------------------------------------------------------------------------------------- */

/* A warp's columns of dC and dB, for all tokens of the block: [16 tokens][8 columns][registers of an mma
 * accumulator]. */
template <class Tile>
struct SplitSums {
    float dB[2][Tile::TILES][4], dC[2][Tile::TILES][4];
};

GT_DEV void load_left(uint32_t rows, int k, SplitLeft (&a)[2]) {
    GT_UNROLL
    for (int m = 0; m < 2; m++) {
        ldmatrix_x4(a[m].hi, block_at<2 * ROWS_P>(rows, m, k));
        ldmatrix_x4(a[m].lo, block_at<2 * ROWS_P>(rows, m, k + SplitTile<ROWS_P>::LO));
    }
}

/* Loads right operands for a warp's columns, from rows 16 k to 16 k + 15 of a tile of N columns. */
template <class Tile>
GT_DEV void load_right(const SplitGradientBlock<Tile>& me, uint32_t rows, int k, uint32_t (&hi)[Tile::TILES][2],
                       uint32_t (&lo)[Tile::TILES][2]) {
    uint32_t a[4], b[4];
    const int pair = me.warp * Tile::TILES / 2;
    ldmatrix_x4_trans(a, block_at<Tile::WIDE>(rows, k, pair));
    ldmatrix_x4_trans(b, block_at<Tile::WIDE>(rows, k, pair + Tile::LO));
    GT_UNROLL
    for (int i = 0; i < 2 * Tile::TILES; i++) {
        const bool second = Tile::TILES == 1 && me.warp % 2;
        hi[i / 2][i % 2] = second ? a[2 + i % 2] : a[i];
        lo[i / 2][i % 2] = second ? b[2 + i % 2] : b[i];
    }
}

template <class Tile>
GT_DEV void add_split_states(const SplitGradientParams& p, const SplitGradientBlock<Tile>& me, int head, int p0,
                             SplitSums<Tile>& sums) {
    constexpr int TILES = Tile::TILES;
    const Problem& in = p.in;
    if (me.warp >= Tile::ACTIVE) return;
    const int g = lane_id() / 4, j = lane_id() % 4, column0 = 8 * TILES * me.warp;
    /* h in the layout of a right operand: state[k][n] has rows 16 k + 2 j, + 1, + 8, + 9 and column 8 n + g */
    float state[2][TILES][4];
    const float* from = p.h.plain;
    const bool exists = from;
    if (exists) from += me.base(BASE_STATE) + head * p.state_step + (int64_t)(p0 + 2 * j) * in.N + column0 + g;
    GT_UNROLL
    for (int i = 0; i < 4; i++) { /* 8 rows at a time; P is a multiple of 8, so all of them exist or none */
        const bool has_rows = exists && p0 + 8 * i < in.P;
        GT_UNROLL
        for (int n = 0; n < TILES; n++) {
            const bool reads = has_rows && column0 + 8 * n < in.columns;
            GT_UNROLL
            for (int e = 0; e < 2; e++)
                state[i / 2][n][i % 2 * 2 + e] = reads ? ldg<float>(from + (8 * i + e) * in.N + 8 * n) : 0.0f;
        }
    }
    const bool second = p0 % ROWS_P; /* the second half of the step's rows adds to the sums of the first */
    const uint32_t first =
        second ? 2 * HALF_P : 0; /* the offset in bytes, in the swizzled layout, between columns p that are HALF_P
                                  * apart */
    float factor[4], Z = 0.0f;
    const int chunks = (me.slot_tokens + SHORT - 1) / SHORT;
    const Power G_power = power_of_G(me);
    GT_UNROLL
    for (int i = 0; i < 4; i++)
        factor[i] =
            clamped(me.value(Tile::WEIGHT + 8 * i + g) * me.value(Tile::INVERSES + 8 * i + g) * G_power.inverse);
    {
        float share[2][TILES][4] = {};
        GT_UNROLL
        for (int k = 0; k < 2; k++) {
            SplitLeft a[2];
            uint32_t hi[TILES][2], lo[TILES][2];
            load_left(by_rows<2 * ROWS_P>(me.smem + Tile::X) ^ first, k, a);
            load_right(me, by_rows<Tile::WIDE>(me.smem + Tile::G), k, hi, lo);
            mma_split(share, a, hi, lo);
            const int owner = (p0 / 16 + k) % SLOT_SHORTS; /* the chunk whose block adds <G, h> of these 16 rows */
            if ((owner < chunks ? owner : 0) != me.me) continue;
            float Gh = 0.0f;
            GT_UNROLL
            for (int i = 0; i < 4 * TILES; i++) {
                const uint32_t x = hi[i / 4][i / 2 % 2], y = lo[i / 4][i / 2 % 2];
                const float G = i % 2 ? unpack_f16_hi(x) + unpack_f16_hi(y) : unpack_f16_lo(x) + unpack_f16_lo(y);
                Gh = fma_rn(G * G_power.inverse, state[k][i / 4][i % 4], Gh);
            }
            Z += warp_sum(Gh);
        }
        GT_UNROLL
        for (int i = 0; i < 8 * TILES; i++) {
            const int m = i / 4 / TILES, n = i / 4 % TILES, e = i % 4;
            sums.dB[m][n][e] = fma_rn(factor[2 * m + e / 2], share[m][n][e], sums.dB[m][n][e]);
        }
    }
    if (lane_id() == 0) {
        Z *= me.value(Tile::ALL);
        sts<float>(me.address(Tile::Z + me.warp), second ? me.value(Tile::Z + me.warp) + Z : Z);
    }
    float dots[4] = {}, share[2][TILES][4] = {}, largest = 0.0f;
    GT_UNROLL
    for (int i = 0; i < 8 * TILES; i++) largest = fmaxf(largest, fabsf(state[i / 4 / TILES][i / 4 % TILES][i % 4]));
    GT_UNROLL
    for (int mask = 1; mask < 32; mask *= 2) largest = fmaxf(largest, shfl_xor(largest, mask));
    const Power power = split_power(largest);
    GT_UNROLL
    for (int i = 0; i < 4; i++)
        factor[i] = clamped(me.value(Tile::PRE + 8 * i + g) * me.value(me.inverses(me.me) + 8 * i + g) * power.inverse);
    GT_UNROLL
    for (int k = 0; k < 2; k++) {
        SplitLeft a[2];
        uint32_t hi[TILES][2], lo[TILES][2];
        GT_UNROLL
        for (int i = 0; i < 2 * TILES; i++) {
            const float* x = &state[k][i / 2][i % 2 * 2];
            split_pair(x[0] * power.value, x[1] * power.value, hi[i / 2][i % 2], lo[i / 2][i % 2]);
        }
        load_left(by_rows<2 * ROWS_P>(me.rows(me.me)) ^ first, k, a);
        mma_split(share, a, hi, lo);
    }
    const float* const C = static_cast<const float*>(in.Cm) + (me.base(BASE_C) + g * in.Cm_stride.t + column0 + 2 * j);
    const int tokens = me.tokens(me.me) - g;
    GT_UNROLL
    for (int i = 0; i < 4 * TILES; i++) {
        const int m = i / 2 / TILES, n = i / 2 % TILES, e = i % 2; /* token 16 m + 8 e + g */
        const float by = factor[2 * m + e];
        const bool has_C = 16 * m + 8 * e < tokens && column0 + 8 * n < in.columns;
        const float2 c = has_C ? ldg<float2>(C + (16 * m + 8 * e) * in.Cm_stride.t + 8 * n) : float2{0.0f, 0.0f};
        const float x0 = by * share[m][n][2 * e], x1 = by * share[m][n][2 * e + 1];
        sums.dC[m][n][2 * e] += x0;
        sums.dC[m][n][2 * e + 1] += x1;
        dots[2 * m + e] = fma_rn(x0, c.x, fma_rn(x1, c.y, dots[2 * m + e]));
    }
    reduce_scatter<4, 4, 1>(dots, j);
    const int to = Tile::E + SHORT * me.warp + 8 * j + g;
    sts<float>(me.address(to), second ? me.value(to) + dots[0] : dots[0]);
}

/* Computes U, 16 tokens s by 8 rows p for each warp.  Then computes dx, <x, U>, F and dDskip. */
template <class Tile>
GT_DEV void finish_split_inputs(const SplitGradientParams& p, const SplitGradientBlock<Tile>& me, int h, int head,
                                int p0) {
    constexpr int NP = Tile::NP, WIDE = Tile::WIDE, LO = SplitTile<ROWS_P>::LO;
    const Problem& in = p.in;
    const int lane = lane_id(), g = lane / 4, j = lane % 4, s_block = me.warp / 4, p_block = me.warp % 4;
    const bool second = p0 % ROWS_P; /* the second half of the step's rows adds to the sums of the first */
    const int s = 16 * s_block + g, row = p0 + 8 * p_block + 2 * j, piece = p_block + (second ? HALF_P / 8 : 0);
    float from_G[2][1][1][4] = {}, from_pairs[4] = {}; /* [0]: sums of even k, [1]: of odd k, so that a product waits
                                                        * only for every second one */
    const uint32_t B = by_rows<WIDE>(me.smem + Tile::B),
                   G = me.smem + Tile::G +
                       panel_at<2 * WIDE>(8 * p_block + lane % 8, lane / 8 % 2 + lane / 16 * (NP / 8)); /* hi and lo of
                                                                                                         * G */
    const auto multiply = [&](float(&sums)[1][1][4], const SplitLeft(&a)[1], const uint32_t(&b)[4]) {
        const uint32_t hi[1][2] = {{b[0], b[1]}}, lo[1][2] = {{b[2], b[3]}};
        mma_split(sums, a, hi, lo);
    };
    GT_UNROLL
    for (int k = 0; k < NP / 16; k++) {
        SplitLeft a[1];
        uint32_t b[4];
        ldmatrix_x4(a[0].hi, block_at<WIDE>(B, s_block, k));
        ldmatrix_x4(a[0].lo, block_at<WIDE>(B, s_block, k + Tile::LO));
        ldmatrix_x4(b, block_at<WIDE>(G, 0, k));
        multiply(from_G[k % 2], a, b);
    }
    GT_UNROLL
    for (int e = 0; e < 4; e++) from_G[0][0][0][e] += from_G[1][0][0][e];
    {
        /* the loop takes 16 tokens t at a time, from the block of s on */
        constexpr int M_STEP = Tile::BLOCK16, DY_STEP = Tile::ROWS / 2;
        const int blocks = (me.slot_tokens + 15) / 16, first = 2 * me.me + s_block;
        uint32_t M = block_at<32>(by_rows<32>(me.smem + Tile::M + M_STEP * first), s_block, 0),
                 dy = me.smem + Tile::CHUNKS + DY_STEP * first +
                      panel_at<4 * ROWS_P>(lane % 16, piece + lane / 16 * 2 * LO),
                 inverses = me.address(Tile::M_INVERSE + SHORT * first + s);
        GT_NO_UNROLL
        for (int k = first; k < blocks; k++) {
            SplitLeft a[1];
            uint32_t b[4];
            float share[1][1][4] = {};
            ldmatrix_x4(a[0].hi, M);
            ldmatrix_x4(a[0].lo, block_at<32>(M, 0, 1));
            ldmatrix_x4_trans(b, dy);
            multiply(share, a, b);
            const float inverse0 = lds<float>(inverses), inverse1 = lds<float>(inverses + 32);
            GT_UNROLL
            for (int e = 0; e < 4; e++)
                from_pairs[e] = fma_rn(e < 2 ? inverse0 : inverse1, share[0][0][e], from_pairs[e]);
            M += M_STEP, dy += DY_STEP, inverses += 4 * SHORT;
        }
    }
    const float G_inverse = power_of_G(me).inverse;
    const float2 skip = skips_of(in, h, row);
    const bool needs_dy = in.Dskip || p.dskip;
    float dots[4], dskip[2] = {}; /* dots: <x, U> of s and s + 8, then F of s and s + 8 */
    GT_UNROLL
    for (int e = 0; e < 2; e++) {
        const int t = s + 8 * e;
        const float x_inverse = me.value(Tile::INVERSES + t), delta = me.value(Tile::FACTORS + Factors::DELTA + t);
        const float by = finite(me.value(Tile::SUF + t) * me.value(Tile::B_INVERSE + t) * G_inverse);
        const auto pair = [&](uint32_t tile) {
            const uint32_t hi = lds<uint32_t>(tile + panel_at<4 * ROWS_P>(t, piece) + 4 * j),
                           lo = lds<uint32_t>(tile + panel_at<4 * ROWS_P>(t, piece + 2 * LO) + 4 * j);
            return float2{unpack_f16_lo(hi) + unpack_f16_lo(lo), unpack_f16_hi(hi) + unpack_f16_hi(lo)};
        };
        const float2 x = pair(me.smem + Tile::X);
        const float g0 = by * from_G[0][0][0][2 * e], g1 = by * from_G[0][0][0][2 * e + 1];
        const float U0 = g0 + from_pairs[2 * e], U1 = g1 + from_pairs[2 * e + 1];
        dots[e] = fma_rn(x.x, U0, x.y * U1) * x_inverse;
        dots[2 + e] = fma_rn(x.x, g0, x.y * g1) * x_inverse * delta;
        float dx0 = delta * U0, dx1 = delta * U1;
        if (needs_dy) {
            float2 dy = pair(me.rows(me.me));
            const float dy_inverse = me.value(me.inverses(me.me) + t);
            dy.x *= dy_inverse, dy.y *= dy_inverse;
            dx0 = fma_rn(skip.x, dy.x, dx0);
            dx1 = fma_rn(skip.y, dy.y, dx1);
            dskip[0] = fma_rn(dy.x, x.x * x_inverse, dskip[0]);
            dskip[1] = fma_rn(dy.y, x.y * x_inverse, dskip[1]);
        }
        if (!p.dx || t >= me.tokens(me.me) || row >= in.P) continue;
        float* to = p.dx + (me.base(BASE_DX) + t * p.dx_stride.t + head * p.dx_stride.h + row);
        if (p.has_share) {
            const float2 before = ldg<float2>(to);
            dx0 += before.x, dx1 += before.y;
        }
        stg<float2>(to, {dx0, dx1});
    }
    reduce_scatter<4, 4, 1>(dots, j);
    const int to = (j < 2 ? Tile::DIRECT : Tile::F) + SHORT * p_block + s + 8 * (j % 2);
    sts<float>(me.address(to), second ? me.value(to) + dots[0] : dots[0]);
    if (!p.dskip) return;
    reduce_scatter<2, 8, 4>(dskip, g);
    if (g % 4 == 0) sts<float>(me.address(Tile::DSKIP + ROWS_P * s_block + 8 * piece + 2 * j + g / 4), dskip[0]);
}

/* ---- dB and dC in the end ---------------------------------------------------------------------------------------- */

/* sums += W times the rows of `right`.  pairs: two left operands, which store_split_pairs() has stored. */
template <class Tile>
GT_DEV void add_weighted(const SplitGradientBlock<Tile>& me, float (&sums)[2][Tile::TILES][4], uint32_t pairs,
                         int inverses, uint32_t right) {
    if (me.warp >= Tile::ACTIVE) return;
    GT_UNROLL
    for (int k = 0; k < 2; k++) {
        SplitLeft a[2];
        uint32_t hi[Tile::TILES][2], lo[Tile::TILES][2];
        float share[2][Tile::TILES][4] = {};
        const uint32_t rows = by_rows<32>(pairs + Tile::BLOCK16 * k);
        GT_UNROLL
        for (int m = 0; m < 2; m++) {
            ldmatrix_x4(a[m].hi, block_at<32>(rows, m, 0));
            ldmatrix_x4(a[m].lo, block_at<32>(rows, m, 1));
        }
        load_right(me, by_rows<Tile::WIDE>(right), k, hi, lo);
        mma_split(share, a, hi, lo);
        GT_UNROLL
        for (int i = 0; i < 8 * Tile::TILES; i++) {
            const int m = i / 4 / Tile::TILES, n = i / 4 % Tile::TILES, e = i % 4;
            const float inverse = me.value(inverses + SHORT * k + 16 * m + 8 * (e / 2) + lane_id() / 4);
            sums[m][n][e] = fma_rn(inverse, share[m][n][e], sums[m][n][e]);
        }
    }
}

template <class Tile>
GT_DEV void store_split_sums(const SplitGradientBlock<Tile>& me, const Problem& in, float* out, const gt_stride& stride,
                             const float (&sums)[2][Tile::TILES][4]) {
    if (!out || me.warp >= Tile::ACTIVE) return;
    const int column0 = 8 * Tile::TILES * me.warp + 2 * (lane_id() % 4);
    GT_UNROLL
    for (int i = 0; i < 4; i++) {
        const int t = 8 * i + lane_id() / 4;
        float* to = out + offset_of(stride, me.b(), me.token(me.me) + t, me.g()) + column0;
        GT_UNROLL
        for (int n = 0; n < Tile::TILES; n++)
            if (t < me.tokens(me.me) && column0 + 8 * n < in.columns)
                stg<float2>(to + 8 * n, {sums[i / 2][n][i % 2 * 2], sums[i / 2][n][i % 2 * 2 + 1]});
    }
}

/* Adds W B to dC and W^T C to dB, for one chunk of the slot after another.  Then stores dB and dC. */
template <class Tile>
GT_DEV void finish_split_sums(const SplitGradientParams& p, const SplitGradientBlock<Tile>& me, SplitPairs& W,
                              SplitSums<Tile>& sums) {
    constexpr int NP = Tile::NP;
    const Problem& in = p.in;
    const int half = me.warp % 2, lane = lane_id(), g = lane / 4, j = lane % 4;
    const uint32_t tile = me.smem + Tile::G, plain = me.smem + Tile::X; /* plain: fp32 W of own pairs, [s][33] */
    constexpr int TURNED = 4 * SHORT * (SHORT + 1), PITCH = SHORT + 1;
    GT_NO_UNROLL
    for (int chunk = 0; chunk < SLOT_SHORTS; chunk++) {
        const bool is_own = chunk == me.me, is_C = chunk >= me.me, mine = me.warp / 2 == chunk;
        if (me.tokens(chunk) == 0) continue;
        const gt_stride& stride = is_C ? in.Cm_stride : in.Bm_stride;
        const float* first =
            static_cast<const float*>(is_C ? in.Cm : in.Bm) + offset_of(stride, me.b(), me.token(chunk), me.g());
        sync_threads();
        load_split_tile<NP>(tile, first, stride.t, me.tokens(chunk), in.columns);
        cp_async_commit();
        if (is_own && mine) {
            GT_UNROLL
            for (int i = 0; i < 16; i++)
                sts<float>(plain + 4 * (PITCH * (16 * (i / 8) + 8 * (i / 2 % 2) + g) + 16 * half + 8 * (i / 4 % 2) +
                                        2 * j + i % 2),
                           W[i / 8][i / 4 % 2][i % 4]);
        }
        cp_async_wait<0>();
        sync_threads();
        split_rows<NP>(tile, me.address(Tile::GROUP_INVERSES), me.warp, WARPS);
        sync_threads();
        if (mine) {
            GT_UNROLL
            for (int i = 0; i < 4; i++) {
                const float undo = me.value(Tile::GROUP_INVERSES + 16 * half + 8 * (i / 2) + 2 * j + i % 2);
                GT_UNROLL
                for (int row = 0; row < 4; row++) {
                    float& x = W[row / 2][i / 2][row % 2 * 2 + i % 2];
                    x = finite(x * undo);
                }
            }
            store_split_pairs(W, me.smem + Tile::M + Tile::BLOCK16 * half, me.address(Tile::M_INVERSE + SHORT * half));
        }
        if (is_own && me.warp / 2 == (chunk + 1) % SLOT_SHORTS) { /* transposes W of own pairs: a lane has 16 columns s
                                                                   * of a row t */
            float x[16], largest = 0.0f;
            GT_UNROLL
            for (int i = 0; i < 16; i++) {
                const int s = 16 * half + i;
                x[i] = finite(lds<float>(plain + 4 * (PITCH * s + lane)) * me.value(Tile::B_INVERSE + s));
                largest = fmaxf(largest, fabsf(x[i]));
            }
            const Power power = split_power(largest);
            const uint32_t block = plain + TURNED + Tile::BLOCK16 * half;
            GT_UNROLL
            for (int i = 0; i < 2; i++) {
                uint32_t hi[4], lo[4];
                GT_UNROLL
                for (int k = 0; k < 4; k++)
                    split_pair(x[8 * i + 2 * k] * power.value, x[8 * i + 2 * k + 1] * power.value, hi[k], lo[k]);
                sts<uint4>(block + panel_at<64>(lane, i), {hi[0], hi[1], hi[2], hi[3]});
                sts<uint4>(block + panel_at<64>(lane, i + 2), {lo[0], lo[1], lo[2], lo[3]});
            }
            sts<float>(me.address(Tile::M_INVERSE + SHORT * (2 + half) + lane), power.inverse);
        }
        sync_threads();
        if (is_C)
            add_weighted(me, sums.dB, me.smem + Tile::M, Tile::M_INVERSE, tile);
        else
            add_weighted(me, sums.dC, me.smem + Tile::M, Tile::M_INVERSE, tile);
        if (is_own) add_weighted(me, sums.dC, plain + TURNED, Tile::M_INVERSE + 2 * SHORT, me.smem + Tile::B);
    }
    store_split_sums(me, in, p.dBm, p.dBm_stride, sums.dB);
    store_split_sums(me, in, p.dCm, p.dCm_stride, sums.dC);
}

/* ---- the kernels ------------------------------------------------------------------------------------------------- */

template <class Tile>
GT_DEV void split_gradients_of(const SplitGradientParams& p, const SplitGradientBlock<Tile>& me) {
    const Problem& in = p.in;
    constexpr int FINISHES = 7; /* this warp splits the fewest rows and computes no factors */
    const int heads = (int)(in.H / in.G), last_p = (in.P - 1) / ROWS_P * ROWS_P;
    SplitPairs S, W = {};
    SplitSums<Tile> sums = {};
    int h = me.g() * heads;
    keep_time(in, me, h, fetch_time(in, me, h));
    make_split_products(p, me, S);
    GT_NO_UNROLL
    for (int head = 0; head < heads; head++, h++) {
        GT_NO_UNROLL
        for (int p0 = 0; p0 < in.P; p0 += ROWS_P) {
            SplitRows<Tile> G;
            copy_split_step(p, me, head, p0);
            load_G(p, me, head, p0, G);
            cp_async_wait<0>();
            sync_threads();
            split_step_rows(p, me, h, p0);
            if (me.warp == FINISHES && head + p0 > 0)
                finish_split_step(p, me, p0 ? h : h - 1, p0 ? p0 - ROWS_P : last_p);
            if (p0 == 0 && me.warp < SLOT_SHORTS) slot_factors(me, in.A[h], me.warp);
            if (p0 == 0 && me.warp == SLOT_SHORTS) {
                float delta[2] = {0.0f, 0.0f};
                if (2 * lane_id() < SHORT) {
                    const float2 kept = lds<float2>(me.address(Tile::DELTAS + SHORT * me.me + 2 * lane_id()));
                    delta[0] = kept.x, delta[1] = kept.y;
                }
                make_factors<SUM_FACTORS | DIAGONAL_FACTORS>(me.address(Tile::FACTORS), delta, in.A[h]);
            }
            sync_threads();
            G.store(me.smem + Tile::G, me.warp, power_of_G(me).value);
            const bool fetches = p0 == 0 && head + 1 < heads;
            const float dt = fetches ? fetch_time(in, me, h + 1) : 0.0f;
            make_split_pairs(me, S, W);
            if (fetches) keep_time(in, me, h + 1, dt);
            sync_threads();
            add_split_states(p, me, head, p0, sums);
            finish_split_inputs(p, me, h, head, p0);
            sync_threads();
            if (p0 + HALF_P >= in.P) continue;
            load_G(p, me, head, p0 + HALF_P, G);
            sync_threads();
            G.store(me.smem + Tile::G, me.warp, power_of_G(me).value);
            sync_threads();
            add_split_states(p, me, head, p0 + HALF_P, sums);
            finish_split_inputs(p, me, h, head, p0 + HALF_P);
            sync_threads();
        }
    }
    if (me.warp == FINISHES) finish_split_step(p, me, h - 1, last_p);
    finish_split_sums(p, me, W, sums);
}

template <int NP>
GT_KERNEL(THREADS, (blocks_at_once(GradientSplitTile<NP>::BYTES)))
chunk_gradient_fp32_kernel(const GT_GRID_CONSTANT SplitGradientParams p) {
#if GT_SM80_KERNELS
    using Tile = GradientSplitTile<NP>;
    wait_for_chain();
    const SplitGradientBlock<Tile> me = find_split_chunk<Tile>(p);
    if (me.tokens(me.me) == 0) {
        if (me.g() == 0) clear_split_sums(p, ((int64_t)me.b() * p.slots + me.slot()) * SLOT_SHORTS + me.me);
        return;
    }
    split_gradients_of(p, me);
#else
    (void)p;
    __trap();
#endif
}

} /* namespace ssd */
} /* namespace gt */

#endif
