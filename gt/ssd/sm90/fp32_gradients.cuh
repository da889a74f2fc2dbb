/* gt/ssd/sm90/fp32_gradients.cuh - ssd backward of a chunk on compute capability 9.0, with fp32 activations, by wgmma:
 * every gradient but dz and dstate_in.  N is at least 17.  N up to 64 runs as 64 columns, and N up to 128 as 128.
 *
 * It computes the same as chunk_gradient_fp32_kernel; mma/fp32_gradients.cuh has the formulas and the notation.  A
 * chunk is 64 tokens here, half of a slot of 128.  A block has a chunk and one group.  It takes the group's heads, and
 * their tiles of 64 rows p, one after another; each of these is a step.  L, pre, suf and E refer to the whole slot.
 * Pairs of own tokens have rows s and columns t.  Pairs with the slot's other chunk have own tokens as rows: t if the
 * other chunk is earlier, else s.
 *
 * WARPGROUPS: 4.  All are in the same phase of a step at a time:
 *
 *               wait for copies of x, dy, NEXT, h and G                                                   -- barrier
 *     rows      Split x, dy and NEXT (x of the chunk before or dy of the chunk after), with a power of two per
 *               row.  Find the largest magnitudes of h and G.  Z = E <G, h>, of half of the rows if the slot has
 *               two chunks.                                                                               -- barrier
 *     pairs     Each warpgroup has 64 rows x 32 columns (0, 1: own; 2, 3: the other chunk's).  It makes w,
 *               W += w, sums of Gamma, M, and the largest magnitudes of M's rows.  While tensor cores multiply,
 *               h and G are split, with one power of two each.                                            -- barrier
 *               M is split, with a power of two per row                                                   -- barrier
 *     products  0, 1: dC += pre h^T dy, half of the columns each; E.  2, 3: dB += Delta suf G^T x; suf G B, 32
 *               rows p each                                                                               -- barrier
 *     inputs    2, 3: M dy; U, dx, <x, U>, F.  0: factors of the next head, da of the previous step.  1: starts
 *               the copies of the next h and G                                                            -- barrier
 *               copies of the next x, dy, NEXT start
 *
 * NUMBERS.  As in mma/fp32_chunk.cuh, a number is hi + lo of f16, and a product is three products, the small ones
 * first.  Every product of a step is summed from zero, and then added or used in fp32.  W is split after the last step,
 * with a power for each row.  For dC, W of own pairs is transposed; in that product all of W has one power.
 * registers per thread, N = 128: dC or dB 32, W 16, the current product 48.
 * shared memory in KB, N = 128: 225, so one block per multiprocessor.  B 32, h 32, G 32, x, dy and NEXT 48, M 32, S =
 * <C, B> as fp32 32, factors and sums 17.  Before the first and after the last step, the other chunk's B or C lies in
 * the memory of h, and C in the memory of G.
 * PRODUCTS per step, m64n32k16, N = 128: <dy, x> 48, dC, dB 96, G B 48, M dy 48 or 24.
 * bytes per token and head, P = 64, N = 128: from memory x, dy, dx 768 and h, G 512; from L2 NEXT 256, C 512 and h, G
 * 512.
 * N > 128: as in mma/fp32_gradients.cuh.
 * grid: [B, slots, G], two chunks each; block 512.  Every sum has one fixed order, so results are deterministic. */
#ifndef GT_SSD_SM90_FP32_GRADIENTS_CUH
#define GT_SSD_SM90_FP32_GRADIENTS_CUH

#include "fp32_gradients_block.cuh"

namespace gt {
namespace ssd {

/* ---- products ---------------------------------------------------------------------------------------------------- */

typedef float Product32[4][4]; /* a warp's accumulators: 16 rows, 32 columns */

/* The accumulators of all products of a step except M dy, one after another.  If each product had its own array, ptxas
 * would not let their registers overlap. */
typedef float StepWork[8][4];

template <int TILES>
GT_DEV float (&tiles_of(StepWork& work, int from))[TILES][4] {
    return reinterpret_cast<float(&)[TILES][4]>(work[from]);
}

template <class Tile, Major MAJOR>
GT_DEV uint64_t split_operand(uint32_t tile, int from = 0) { /* from: offset along the dimension that is not k */
    return wgmma_step(wgmma_tile<128, MAJOR>(tile, Tile::PANEL), mn_bytes<128, MAJOR>(from, Tile::PANEL));
}

/* Starts c += left right, or c = left right if `accumulates` is false.  k has 16 K elements, and the small products
 * come first.  left_lo, right_lo: bytes from hi to lo. */
template <class Tile, int K, Major LEFT, Major RIGHT, int TILES>
GT_DEV void multiply_split(float (&c)[TILES][4], uint64_t left, uint32_t left_lo, uint64_t right, uint32_t right_lo,
                           bool accumulates) {
    GT_UNROLL
    for (int i = 0; i < 3 * K; i++) {
        const int term = i / K, k = 16 * (i % K);
        const uint32_t at_left = k_bytes<128, LEFT>(k, Tile::PANEL) + (term == 0 ? left_lo : 0);
        const uint32_t at_right = k_bytes<128, RIGHT>(k, Tile::PANEL) + (term == 1 ? right_lo : 0);
        wgmma<f16, LEFT, RIGHT>(c, wgmma_step(left, at_left), wgmma_step(right, at_right), i > 0 || accumulates);
    }
}

/* Computes <C_t, B_s> of the warpgroup's pairs and stores it at kept_S(). */
template <class Tile>
GT_DEV void make_split_products(const HopperSplitBlock<Tile>& me, const WarpRows& at) {
    const bool is_own = me.group < 2, is_C = !is_own && me.second; /* is_C: rows are own tokens t */
    const uint32_t left = me.smem + (is_C ? Tile::G : Tile::B), right = me.smem + (is_own ? Tile::G : Tile::H);
    const int column0 = me.group % 2 * 32;
    Product32 S;
    wgmma_fence();
    multiply_split<Tile, Tile::NP / 16, Major::K, Major::K>(S, split_operand<Tile, Major::K>(left), Tile::STATE_LO,
                                                            split_operand<Tile, Major::K>(right, column0),
                                                            Tile::STATE_LO, false);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(S);
    const int inverse = (is_C ? Tile::C_INVERSE : Tile::B_INVERSE) + at.row;
    const float row[2] = {me.value(inverse), me.value(inverse + 8)};
    GT_UNROLL
    for (int n = 0; n < 4; n++) {
        const float2 column =
            lds<float2>(me.address((is_own ? Tile::C_INVERSE : Tile::OTHER_INVERSE) + column0 + 8 * n + 2 * at.j));
        GT_UNROLL
        for (int e = 0; e < 4; e++) S[n][e] = finite(S[n][e] * row[e / 2] * (e % 2 ? column.y : column.x));
        sts<float4>(me.kept_S(n), {S[n][0], S[n][1], S[n][2], S[n][3]});
    }
}

/* ---- a step: dC, dB, E, the part of U from G --------------------------------------------------------------------- */

/* Warpgroups 0 and 1 compute half of the columns of dC each, and E.  Warpgroups 2 and 3 compute half of the columns of
 * dB each, and the part of U from G for half of the rows p. */
template <class Tile>
GT_DEV void add_split_states(const SplitGradientParams& p, const HopperSplitBlock<Tile>& me, const WarpRows& at,
                             int step, float (&sums)[Tile::TILES][4], StepWork& work) {
    const Problem& in = p.in;
    const bool is_dB = me.group >= 2;
    const int half = me.group % 2;
    const uint32_t rows = me.smem + (is_dB ? Tile::X : Tile::DY), state = me.smem + (is_dB ? Tile::G : Tile::H);
    float(&share)[Tile::TILES][4] = tiles_of<Tile::TILES>(work, 0);
    Product32& U = tiles_of<4>(work, 0);
    wgmma_fence();
    multiply_split<Tile, 4, Major::K, Major::MN>(share, split_operand<Tile, Major::K>(rows), Tile::ROWS_LO,
                                                 split_operand<Tile, Major::MN>(state, Tile::NP / 2 * half),
                                                 Tile::STATE_LO, false);
    wgmma_commit();
    float2 of_C[Tile::TILES] = {};
    const auto load_C = [&](int e) {
        const int t = at.row + 8 * e, column0 = Tile::NP / 2 * half + 2 * at.j;
        const float* C = static_cast<const float*>(in.Cm) + (me.base(BASE_C) + t * in.Cm_stride.t + column0);
        const int columns = t < me.tokens ? in.columns - column0 : 0;
        GT_UNROLL
        for (int n = 0; n < Tile::TILES; n++) of_C[n] = 8 * n < columns ? ldg<float2>(C + 8 * n) : float2{0.0f, 0.0f};
    };
    if (!is_dB) load_C(0); /* overlaps with the products */
    const float state_inverse = me.value(Tile::STATE_INVERSE + is_dB);
    float factor[2];
    GT_UNROLL
    for (int e = 0; e < 2; e++) {
        const int t = at.row + 8 * e;
        const float inverse = me.value((is_dB ? Tile::INVERSES : Tile::DY_INVERSE) + t);
        factor[e] = clamped(me.value((is_dB ? Tile::WEIGHT : Tile::PRE) + t) * inverse * state_inverse);
    }
    wgmma_wait<0>();
    wgmma_pin(share);
    if (is_dB) {
        GT_UNROLL
        for (int n = 0; n < Tile::TILES; n++) {
            GT_UNROLL
            for (int e = 0; e < 4; e++) sums[n][e] = fma_rn(factor[e / 2], share[n][e], sums[n][e]);
        }
        wgmma_pin(share);
        wgmma_fence();
        multiply_split<Tile, Tile::NP / 16, Major::K, Major::K>(
            U, split_operand<Tile, Major::K>(me.smem + Tile::B), Tile::STATE_LO,
            split_operand<Tile, Major::K>(state, 32 * half), Tile::STATE_LO, false);
        wgmma_commit();
        GT_UNROLL
        for (int e = 0; e < 2; e++)
            factor[e] = finite(me.value(Tile::SUF + at.row + 8 * e) * me.value(Tile::B_INVERSE + at.row + 8 * e) *
                               state_inverse);
        wgmma_wait<0>();
        wgmma_pin(U);
        GT_UNROLL
        for (int n = 0; n < 4; n++) {
            GT_UNROLL
            for (int e = 0; e < 4; e++) U[n][e] *= factor[e / 2];
        }
        return;
    }
    float dots[2] = {};
    GT_UNROLL
    for (int e = 0; e < 2; e++) {
        float2 c[Tile::TILES];
        GT_UNROLL
        for (int n = 0; n < Tile::TILES; n++) c[n] = of_C[n];
        if (e == 0) load_C(1);
        GT_UNROLL
        for (int n = 0; n < Tile::TILES; n++) {
            const float x0 = factor[e] * share[n][2 * e], x1 = factor[e] * share[n][2 * e + 1];
            sums[n][2 * e] += x0;
            sums[n][2 * e + 1] += x1;
            dots[e] = fma_rn(x0, c[n].x, fma_rn(x1, c[n].y, dots[e]));
        }
    }
    store_row_sums(at, dots, me.address(me.sums(step, Tile::E) + CHUNK * half));
}

/* ---- a step: w, W, M, Gamma -------------------------------------------------------------------------------------- */

/* Computes L_ts of pairs of own tokens: rows s in the warp's block, columns t in block `t_block`, from 8 n on. */
template <class Tile>
GT_DEV void own_decays(const HopperSplitBlock<Tile>& me, const WarpRows& at, int t_block, int n, float (&L)[4]) {
    const int t = 16 * t_block + 8 * n + 2 * at.j, s = at.row;
    if (at.warp > t_block) { /* all t are before all s */
        L[0] = L[1] = L[2] = L[3] = 0.0f;
        return;
    }
    if (at.warp < t_block) {
        const float between = me.value(Tile::FACTORS + between_index(t_block, at.warp));
        const float2 u = lds<float2>(me.address(Tile::FACTORS + Factors::U + t));
        const float v0 = me.value(Tile::FACTORS + Factors::V + s) * between,
                    v1 = me.value(Tile::FACTORS + Factors::V + s + 8) * between;
        L[0] = u.x * v0, L[1] = u.y * v0, L[2] = u.x * v1, L[3] = u.y * v1;
        return;
    }
    const uint32_t diagonal = me.address(Tile::FACTORS + Factors::DIAGONAL + 8 * t + at.g);
    const float near0 = lds<float>(diagonal), near1 = lds<float>(diagonal + 32);
    const float2 u = lds<float2>(me.address(Tile::FACTORS + Factors::HALF + t));
    const float v = me.value(Tile::FACTORS + Factors::HALF + s);
    L[0] = n ? u.x * v : near0, L[1] = n ? u.y * v : near1;
    L[2] = n ? near0 : 0.0f, L[3] = n ? near1 : 0.0f;
}

/* Stores the largest magnitude of each row, over the warpgroup's 32 columns. */
template <class Tile>
GT_DEV void store_most(const HopperSplitBlock<Tile>& me, const WarpRows& at, const Product32& v) {
    GT_UNROLL
    for (int e = 0; e < 2; e++) {
        float most = 0.0f;
        GT_UNROLL
        for (int n = 0; n < 4; n++) most = fmaxf(most, fmaxf(fabsf(v[n][2 * e]), fabsf(v[n][2 * e + 1])));
        most = fmaxf(most, shfl_xor(most, 1));
        most = fmaxf(most, shfl_xor(most, 2));
        if (at.j == 0) sts<float>(me.address(Tile::M_MOST + 4 * (at.row + 8 * e) + me.group), most);
    }
}

/* The power of two that row `row` of M and the same row of M_NEXT share. */
template <class Tile>
GT_DEV Power power_of_M(const HopperSplitBlock<Tile>& me, int row) {
    return split_power(largest_of(lds<float4>(me.address(Tile::M_MOST + 4 * row))));
}

/* Splits the warpgroup's pairs and stores them to M or M_NEXT. */
template <class Tile>
GT_DEV void store_split_pairs(const HopperSplitBlock<Tile>& me, const WarpRows& at, const Product32& v,
                              const float (&power)[2]) {
    const uint32_t addresses = at.addresses(me.smem + (me.group < 2 ? Tile::M : Tile::M_NEXT));
    GT_UNROLL
    for (int i = 0; i < 2; i++) {
        uint32_t hi[4], lo[4];
        GT_UNROLL
        for (int q = 0; q < 4; q++) {
            const float* x = v[2 * i + q / 2] + q % 2 * 2;
            split_pair(x[0] * power[q % 2], x[1] * power[q % 2], hi[q], lo[q]);
        }
        const uint32_t address = addresses ^ 32 * (me.group % 2 * 2 + i);
        stmatrix_x4(address, hi);
        stmatrix_x4(address + Tile::ROWS_LO, lo);
    }
}

/* Splits h and G of a step in place, with one power of two each.  measure_states() has found the largest magnitudes. */
template <class Tile>
GT_DEV void split_states(const HopperSplitBlock<Tile>& me) {
    PanelRows<Tile, Tile::PANELS> rows(me.warp);
    GT_NO_UNROLL
    for (int i = 0; i < 2; i++) {
        const uint32_t tile = me.smem + Tile::H + Tile::STATE * i;
        rows.load(tile);
        const Power power = power_of_state(me, i);
        if (me.warp == 0 && lane_id() == 0) sts<float>(me.address(Tile::STATE_INVERSE + i), power.inverse);
        sync_warp();
        rows.store(tile, power.value);
    }
}

/* Computes w, adds it to W, stores sums of Gamma, and leaves M in v.  Splits h and G while the product <dy, x> runs. */
template <class Tile>
GT_DEV void make_split_pairs(const HopperSplitBlock<Tile>& me, const WarpRows& at, int step, bool has_skip,
                             Product32& W, Product32& v) {
    const bool is_own = me.group < 2, is_before = !is_own && me.second;
    const int column0 = me.group % 2 * 32;
    const uint32_t left = me.smem + (is_before ? Tile::DY : Tile::X),
                   right = me.smem + (is_own ? Tile::DY : Tile::NEXT);
    wgmma_fence();
    multiply_split<Tile, 4, Major::K, Major::K>(v, split_operand<Tile, Major::K>(left), Tile::ROWS_LO,
                                                split_operand<Tile, Major::K>(right, column0), Tile::ROWS_LO, false);
    wgmma_commit();
    split_states(me);
    float decay[2], weight[2], rows[2] = {};
    GT_UNROLL
    for (int e = 0; e < 2; e++) {
        const int row = at.row + 8 * e;
        if (is_before) {
            decay[e] = me.value(Tile::FACTORS + Factors::PRE + row) * me.value(Tile::DY_INVERSE + row);
            weight[e] = 1.0f;
        } else {
            decay[e] = is_own ? 1.0f : me.value(Tile::FACTORS + Factors::SUF + row);
            weight[e] = me.value(Tile::FACTORS + Factors::DELTA + row) * me.value(Tile::INVERSES + row);
        }
    }
    wgmma_wait<0>();
    wgmma_pin(v);
    GT_UNROLL
    for (int i = 0; i < 2; i++) {
        float gamma[2][4];
        const int block = column0 / 16 + i;
        if (has_skip && is_own && at.warp == block) { /* <dy_s, x_s> */
            float sum = 0.0f;
            GT_UNROLL
            for (int e = 0; e < 2; e++) {
                const float(&x)[4] = v[2 * i + e];
                const float dot = at.g == 2 * at.j ? x[2 * e] : at.g == 2 * at.j + 1 ? x[2 * e + 1] : 0.0f;
                const int token = at.row + 8 * e;
                sum = fma_rn(dot * me.value(Tile::INVERSES + token), me.value(Tile::DY_INVERSE + token), sum);
            }
            sum = warp_sum(sum);
            if (lane_id() == 0) sts<float>(me.address(me.sums(step, Tile::DSKIP) + block), sum);
        }
        GT_UNROLL
        for (int n = 0; n < 2; n++) {
            const int c = 16 * block + 8 * n + 2 * at.j;
            float L[4];
            const float4 of_S = lds<float4>(me.kept_S(2 * i + n));
            const float S[4] = {of_S.x, of_S.y, of_S.z, of_S.w};
            float2 column = lds<float2>(me.address((is_own ? Tile::DY_INVERSE : Tile::NEXT_INVERSE) + c));
            if (is_own) {
                own_decays(me, at, block, n, L);
            } else {
                const float2 factor = lds<float2>(me.address(Tile::OTHER + c));
                column.x *= factor.x, column.y *= factor.y;
            }
            GT_UNROLL
            for (int e = 0; e < 4; e++) {
                const float by = (is_own ? L[e] : decay[e / 2]) * (e % 2 ? column.y : column.x);
                const float w = v[2 * i + n][e] * weight[e / 2] * clamped(by);
                W[2 * i + n][e] += w;
                gamma[n][e] = w * S[e];
                v[2 * i + n][e] = clamped(S[e] * by);
            }
        }
        if (!is_own || at.warp < block) {
            GT_UNROLL
            for (int e = 0; e < 2; e++)
                rows[e] += (gamma[0][2 * e] + gamma[0][2 * e + 1]) + (gamma[1][2 * e] + gamma[1][2 * e + 1]);
        }
        if (!is_own) continue;
        if (at.warp == block) store_diagonal(gamma, me.address(me.sums(step, Tile::DIAGONAL) + 16 * block));
        if (at.warp < block) {
            float columns[4] = {gamma[0][0] + gamma[0][2], gamma[0][1] + gamma[0][3], gamma[1][0] + gamma[1][2],
                                gamma[1][1] + gamma[1][3]};
            store_column_sums(columns, me.address(me.sums(step, Tile::COLUMNS) + CHUNK * at.warp + 16 * block));
        }
    }
    store_row_sums(at, rows,
                   me.address(me.sums(step, is_own ? Tile::LATER : Tile::NEXT_ROWS) + CHUNK * (me.group % 2)));
}

/* ---- a step: dx -------------------------------------------------------------------------------------------------- */

/* Warpgroups 2 and 3 compute U, dx, <x, U> and F, for 32 rows p each.  work: the part of U from G.  delta: Delta of the
 * lane's two tokens. */
template <class Tile>
GT_DEV void finish_split_inputs(const SplitGradientParams& p, const HopperSplitBlock<Tile>& me, const WarpRows& at,
                                int step, int h, int head, int p0, const float (&delta)[2], StepWork& work) {
    const Problem& in = p.in;
    const int half = me.group % 2;
    const bool has_next = !me.second && me.other_tokens > 0;
    const Product32& U = tiles_of<4>(work, 0);
    Product32 pairs;
    wgmma_fence();
    multiply_split<Tile, 4, Major::K, Major::MN>(pairs, split_operand<Tile, Major::K>(me.smem + Tile::M), Tile::ROWS_LO,
                                                 split_operand<Tile, Major::MN>(me.smem + Tile::DY, 32 * half),
                                                 Tile::ROWS_LO, false);
    wgmma_commit();
    const bool has_skips = p.dskip && in.skip_per_channel, needs_dy = in.Dskip || has_skips;
    /* the address of the lane's columns 2 j and 2 j + 1 in the first 8 columns */
    const uint32_t first = me.smem + Tile::X + 128 * at.row + (64 * half ^ 16 * at.g) + 4 * at.j;
    const auto pair = [&](uint32_t address) {
        const uint32_t hi = lds<uint32_t>(address), lo = lds<uint32_t>(address + Tile::ROWS_LO);
        return float2{unpack_f16_lo(hi) + unpack_f16_lo(lo), unpack_f16_hi(hi) + unpack_f16_hi(lo)};
    };
    float dots[2] = {}, of_G[2] = {};
    wgmma_wait<0>();
    wgmma_pin(pairs);
    if (has_next) {
        wgmma_fence();
        multiply_split<Tile, 4, Major::K, Major::MN>(
            pairs, split_operand<Tile, Major::K>(me.smem + Tile::M_NEXT), Tile::ROWS_LO,
            split_operand<Tile, Major::MN>(me.smem + Tile::NEXT, 32 * half), Tile::ROWS_LO, true);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_pin(pairs);
    }
    GT_UNROLL
    for (int i = 0; i < 2; i++) {
        float dskip[4] = {};
        GT_UNROLL
        for (int e = 0; e < 2; e++) {
            const int t = at.row + 8 * e, column0 = p0 + 32 * half + 16 * i + 2 * at.j;
            const float M_inverse = power_of_M(me, t).inverse, x_inverse = me.value(Tile::INVERSES + t),
                        dy_inverse = me.value(Tile::DY_INVERSE + t);
            float* to = p.dx + (p.dx ? me.base(BASE_DX) + head * p.dx_stride.h + t * p.dx_stride.t + column0 : 0);
            GT_UNROLL
            for (int n = 0; n < 2; n++) {
                const uint32_t address = (first ^ 16 * (2 * i + n)) + 1024 * e;
                const float g0 = U[2 * i + n][2 * e], g1 = U[2 * i + n][2 * e + 1];
                const float U0 = fma_rn(M_inverse, pairs[2 * i + n][2 * e], g0),
                            U1 = fma_rn(M_inverse, pairs[2 * i + n][2 * e + 1], g1);
                const float2 x = pair(address);
                dots[e] = fma_rn(x.x, U0, fma_rn(x.y, U1, dots[e]));
                of_G[e] = fma_rn(x.x, g0, fma_rn(x.y, g1, of_G[e]));
                float dx0 = delta[e] * U0, dx1 = delta[e] * U1;
                if (needs_dy) {
                    const float2 skip = skips_of(in, h, column0 + 8 * n);
                    float2 dy = pair(address + (Tile::DY - Tile::X));
                    dy.x *= dy_inverse, dy.y *= dy_inverse;
                    dx0 = fma_rn(skip.x, dy.x, dx0);
                    dx1 = fma_rn(skip.y, dy.y, dx1);
                    if (has_skips) {
                        dskip[2 * n] = fma_rn(dy.x, x.x * x_inverse, dskip[2 * n]);
                        dskip[2 * n + 1] = fma_rn(dy.y, x.y * x_inverse, dskip[2 * n + 1]);
                    }
                }
                if (!p.dx || t >= me.tokens || column0 + 8 * n >= in.P) continue;
                if (p.has_share) {
                    const float2 before = ldg<float2>(to + 8 * n);
                    dx0 += before.x, dx1 += before.y;
                }
                stg<float2>(to + 8 * n, {dx0, dx1});
            }
        }
        if (has_skips)
            store_column_sums(dskip, me.address(me.sums(step, Tile::DSKIP) + CHUNK * at.warp + 32 * half + 16 * i));
    }
    GT_UNROLL
    for (int e = 0; e < 2; e++) {
        const float x_inverse = me.value(Tile::INVERSES + at.row + 8 * e);
        dots[e] *= x_inverse;
        of_G[e] *= x_inverse * delta[e];
    }
    store_row_sums(at, dots, me.address(me.sums(step, Tile::DIRECT) + CHUNK * half));
    store_row_sums(at, of_G, me.address(me.sums(step, Tile::F) + CHUNK * half));
}

/* ---- dB and dC in the end ---------------------------------------------------------------------------------------- */

/* sums += inverse . (W times 64 rows of B or C).  pairs: address of the split W.  inverse: a factor for each row of the
 * sums. */
template <class Tile, Major LEFT>
GT_DEV void add_weighted(const HopperSplitBlock<Tile>& me, StepWork& work, float (&sums)[Tile::TILES][4],
                         uint32_t pairs, uint32_t right, const float (&inverse)[2]) {
    float(&share)[Tile::TILES][4] = tiles_of<Tile::TILES>(work, 0);
    wgmma_fence();
    multiply_split<Tile, 4, LEFT, Major::MN>(share, split_operand<Tile, LEFT>(pairs), Tile::ROWS_LO,
                                             split_operand<Tile, Major::MN>(right, Tile::NP / 2 * (me.group % 2)),
                                             Tile::STATE_LO, false);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(share);
    GT_UNROLL
    for (int n = 0; n < Tile::TILES; n++) {
        GT_UNROLL
        for (int e = 0; e < 4; e++) sums[n][e] = fma_rn(inverse[e / 2], share[n][e], sums[n][e]);
    }
}

/* Adds W^T C to dB and W B to dC, for pairs of own tokens and for pairs with the other chunk.  Then stores dB and
 * dC. */
template <class Tile>
GT_DEV void finish_split_sums(const SplitGradientParams& p, const HopperSplitBlock<Tile>& me, const WarpRows& at,
                              const Product32& W, StepWork& work, float (&sums)[Tile::TILES][4]) {
    const Problem& in = p.in;
    const bool is_own = me.group < 2, is_dB = !is_own, has_other = me.other_tokens != 0;
    stage_split_group(p, me, true, false, me.smem + Tile::G, Tile::C_INVERSE);
    if (has_other) stage_split_group(p, me, !me.second, true, me.smem + Tile::H, Tile::OTHER_INVERSE);
    sync_threads();
    Product32 v;
    GT_UNROLL
    for (int n = 0; n < 4; n++) {
        const int at_column = (is_own ? Tile::C_INVERSE : Tile::OTHER_INVERSE) + 32 * (me.group % 2) + 8 * n;
        const float2 column = is_own || has_other ? lds<float2>(me.address(at_column + 2 * at.j)) : float2{0.0f, 0.0f};
        GT_UNROLL
        for (int e = 0; e < 4; e++) v[n][e] = finite(W[n][e] * (e % 2 ? column.y : column.x));
    }
    store_most(me, at, v);
    sync_threads();
    {
        float power[2], inverse[2], inverse_next[2];
        GT_UNROLL
        for (int e = 0; e < 2; e++) {
            const float4 most = lds<float4>(me.address(Tile::M_MOST + 4 * (at.row + 8 * e)));
            const Power own = split_power(fmaxf(most.x, most.y)), next = split_power(fmaxf(most.z, most.w));
            power[e] = is_own ? own.value : next.value;
            inverse[e] = own.inverse, inverse_next[e] = next.inverse;
        }
        store_split_pairs(me, at, v, power);
        fence_async_proxy();
        sync_threads();
        if (is_dB) add_weighted<Tile, Major::K>(me, work, sums, me.smem + Tile::M, me.smem + Tile::G, inverse);
        if (has_other && is_dB != (me.second != 0))
            add_weighted<Tile, Major::K>(me, work, sums, me.smem + Tile::M_NEXT, me.smem + Tile::H, inverse_next);
    }
    sync_threads();
    /* Splits W of own pairs again, for dC.  In this product W is transposed: k runs over its rows s, so all of W has
     * one power. */
    if (is_own) {
        const float row[2] = {me.value(Tile::B_INVERSE + at.row), me.value(Tile::B_INVERSE + at.row + 8)};
        GT_UNROLL
        for (int n = 0; n < 4; n++) {
            GT_UNROLL
            for (int e = 0; e < 4; e++) v[n][e] = finite(W[n][e] * row[e / 2]);
        }
        store_most(me, at, v);
    }
    sync_threads();
    float most = 0.0f;
    const float2 lane_most[2] = {lds<float2>(me.address(Tile::M_MOST + 4 * lane_id())),
                                 lds<float2>(me.address(Tile::M_MOST + 4 * (lane_id() + 32)))};
    most = fmaxf(fmaxf(lane_most[0].x, lane_most[0].y), fmaxf(lane_most[1].x, lane_most[1].y));
    GT_UNROLL
    for (int mask = 1; mask < 32; mask *= 2) most = fmaxf(most, shfl_xor(most, mask));
    const Power power = split_power(most);
    const float powers[2] = {power.value, power.value}, inverses[2] = {power.inverse, power.inverse};
    if (is_own) store_split_pairs(me, at, v, powers);
    fence_async_proxy();
    sync_threads();
    if (!is_dB) add_weighted<Tile, Major::MN>(me, work, sums, me.smem + Tile::M, me.smem + Tile::B, inverses);
    float* out = is_dB ? p.dBm : p.dCm;
    if (!out) return;
    const gt_stride& stride = is_dB ? p.dBm_stride : p.dCm_stride;
    const int column0 = Tile::NP / 2 * (me.group % 2) + 2 * at.j;
    GT_UNROLL
    for (int e = 0; e < 2; e++) {
        const int t = at.row + 8 * e;
        float* to = out + offset_of(stride, me.b(), me.first() + t, me.g()) + column0;
        GT_UNROLL
        for (int n = 0; n < Tile::TILES; n++)
            if (t < me.tokens && column0 + 8 * n < in.columns)
                stg<float2>(to + 8 * n, {sums[n][2 * e], sums[n][2 * e + 1]});
    }
}

/* ---- the kernel -------------------------------------------------------------------------------------------------- */

/* Finds the largest magnitudes of a step's h and G, and computes Z. */
template <class Tile>
GT_DEV void measure_states(const HopperSplitBlock<Tile>& me, int step) {
    PanelRows<Tile, Tile::PANELS> h(me.warp), G(me.warp);
    h.load(me.smem + Tile::H);
    G.load(me.smem + Tile::G);
    float most[2] = {h.largest(), G.largest()}, Z = 0.0f;
    GT_UNROLL
    for (int i = 0; i < 2 * Tile::PANELS; i++) Z = dot4(h.x[i], G.x[i], Z);
    GT_UNROLL
    for (int mask = 1; mask < 32; mask *= 2) {
        most[0] = fmaxf(most[0], shfl_xor(most[0], mask));
        most[1] = fmaxf(most[1], shfl_xor(most[1], mask));
    }
    Z = warp_sum(Z);
    if (lane_id() > 0) return;
    sts<float>(me.address(Tile::STATE_MOST + me.warp), most[0]);
    sts<float>(me.address(Tile::STATE_MOST + Tile::WARPS + me.warp), most[1]);
    sts<float>(me.address(me.sums(step, Tile::Z) + me.warp), me.owns_rows() ? Z * me.value(Tile::ALL) : 0.0f);
}

template <class Tile>
GT_DEV void hopper_split_gradients(const SplitGradientParams& p, const HopperSplitBlock<Tile>& me) {
    const Problem& in = p.in;
    const int heads = (int)(in.H / in.G), tiles = in.tiles;
    const WarpRows at(me.warp);
    int h = me.g() * heads;
    Product32 W;
    StepWork work;
    float sums[Tile::TILES][4];
    GT_UNROLL
    for (int i = 0; i < 16; i++) W[i / 4][i % 4] = 0.0f;
    GT_UNROLL
    for (int i = 0; i < 32; i++) work[i / 4][i % 4] = 0.0f;
    GT_UNROLL
    for (int i = 0; i < 4 * Tile::TILES; i++) sums[i / 4][i % 4] = 0.0f;
    copy_rows(p, me, 0, 0);
    stage_split_group(p, me, false, false, me.smem + Tile::B, Tile::B_INVERSE);
    stage_split_group(p, me, true, false, me.smem + Tile::G, Tile::C_INVERSE);
    if (me.other_tokens) stage_split_group(p, me, !me.second, true, me.smem + Tile::H, Tile::OTHER_INVERSE);
    if (me.warp < 3) make_step_factors(p, me, h);
    fence_async_proxy();
    sync_threads();
    if (me.group < 2 || me.other_tokens) make_split_products(me, at);
    sync_threads();
    if (me.group == 1) copy_states(p, me, 0, 0);
    cp_async_commit();
    int head = 0, p0 = 0;
    GT_NO_UNROLL
    for (int step = 0; step < heads * tiles; step++) {
        const bool ends_head = p0 + ROWS_P >= in.P, is_last = step + 1 == heads * tiles;
        const int next_head = ends_head ? head + 1 : head, next_p0 = ends_head ? 0 : p0 + ROWS_P;
        cp_async_wait<0>();
        sync_threads();
        split_step_rows(p, me, h, p0);
        measure_states(me, step);
        fence_async_proxy();
        sync_threads();
        {
            const bool has_pairs = me.group < 2 || me.other_tokens, has_M = me.group < 2 || !me.second;
            Product32& v = tiles_of<4>(work, 0);
            GT_UNROLL
            for (int i = 0; i < 16; i++) v[i / 4][i % 4] = 0.0f;
            if (has_pairs)
                make_split_pairs(me, at, step, p.dskip && !in.skip_per_channel, W, v);
            else {
                split_states(me);
                float none[2] = {0.0f, 0.0f};
                store_row_sums(at, none, me.address(me.sums(step, Tile::NEXT_ROWS) + CHUNK * (me.group % 2)));
            }
            if (!has_M) {
                GT_UNROLL
                for (int i = 0; i < 16; i++) v[i / 4][i % 4] = 0.0f;
            }
            store_most(me, at, v);
            sync_threads();
            if (has_pairs && has_M) {
                const float power[2] = {power_of_M(me, at.row).value, power_of_M(me, at.row + 8).value};
                store_split_pairs(me, at, v, power);
            }
        }
        const float delta[2] = {me.value(Tile::FACTORS + Factors::DELTA + at.row),
                                me.value(Tile::FACTORS + Factors::DELTA + at.row + 8)};
        fence_async_proxy();
        sync_threads();
        add_split_states(p, me, at, step, sums, work);
        sync_threads();
        if (me.group >= 2) {
            finish_split_inputs(p, me, at, step, h, head, p0, delta, work);
        } else if (me.group == 1) {
            if (!is_last) copy_states(p, me, next_head, next_p0);
        } else if (me.warp < 3) {
            if (ends_head && !is_last) make_step_factors(p, me, h + 1);
        } else if (step > 0) {
            finish_split_step(p, me, step - 1, p0 ? h : h - 1, p0 ? p0 - ROWS_P : (tiles - 1) * ROWS_P);
        }
        sync_threads();
        if (!is_last) copy_rows(p, me, next_head, next_p0);
        cp_async_commit();
        if (is_last && me.warp == 3) finish_split_step(p, me, step, h, p0);
        h += next_head - head, head = next_head, p0 = next_p0;
    }
    finish_split_sums(p, me, at, W, work, sums);
}

/* For other architectures the kernel has no code and launch bounds of one warp.  Device::runs_sm90a finds out which
 * code the device runs. */
template <int NP>
GT_KERNEL(GT_SM90A ? 512 : 32, 1)
chunk_gradient_fp32_hopper_kernel(const GT_GRID_CONSTANT SplitGradientParams p) {
#if GT_SM90A
    using Tile = HopperSplitTile<NP>;
    wait_for_chain();
    const HopperSplitBlock<Tile> me = find_hopper_split_chunk<Tile>(p);
    if (me.tokens == 0) {
        const int64_t row = ((int64_t)me.b() * p.slots + me.slot()) * SLOT_SHORTS + 2 * me.second;
        if (me.g() == 0) clear_split_sums(p, row), clear_split_sums(p, row + 1);
        return;
    }
    hopper_split_gradients(p, me);
#else
    (void)p;
    __trap();
#endif
}

} /* namespace ssd */
} /* namespace gt */

#endif
