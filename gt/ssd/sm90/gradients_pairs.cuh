/* gt/ssd/sm90/gradients_pairs.cuh - ssd backward of a chunk on compute capability 9.0 (gradients.cuh): the role pairs,
 * whose warpgroup computes the matrices of pairs (t, s) of tokens.  S and W, which is a sum over all steps, stay in
 * registers.
 *     once       make_all_S()             S = C B^T.
 *     per step   make_dS()                dS = dy x^T, from tiles in the stage.
 *                make_pairs_of_rows()     W += dS L Delta.  M = S L Delta, to shared memory; with bf16, Dskip per head
 *                                         is added on its diagonal.  Gamma = dS S L Delta.
 *                store_pair_sums()        row, column and diagonal sums of Gamma, from which chunk_times_kernel
 *                                         computes da and ddt.  For N = 128, C h^T runs meanwhile, and store_E()
 *                                         follows.
 *     last       store_all_W()            W to shared memory, for dC and dB.
 * In wgmma's layout a lane has rows 16 warp + lane / 4 and + 8 of a product, and columns 8 n + 2 (lane % 4) and + 1. */
#ifndef GT_SSD_SM90_GRADIENTS_PAIRS_CUH
#define GT_SSD_SM90_GRADIENTS_PAIRS_CUH

#include "gradients_block.cuh"

namespace gt {
namespace ssd {

typedef float Pairs64[8][4]; /* accumulators of a product: the warp's 16 rows t, all s */

/* The warp's blocks of pairs: warp i has i blocks left of the diagonal and the block on the diagonal.  The diagonal
 * block has its own array, so that the same code serves it in all four warps. */
struct PairBlocks {
    float left[3][2][4], diagonal[2][4];
};

/* Takes the block on the diagonal from a product. */
GT_DEV void take_diagonal(const Pairs64& x, const WarpRows& at, float (&diagonal)[2][4]) {
    GT_UNROLL
    for (int i = 0; i < 8; i++) {
        const int n = i / 4, e = i % 4;
        diagonal[n][e] = at.warp < 2 ? at.warp == 0 ? x[n][e] : x[2 + n][e] : at.warp == 2 ? x[4 + n][e] : x[6 + n][e];
    }
}

/* Clears the pairs with s > t inside the two halves of the diagonal block.  For these pairs, SQUARE has L of other
 * pairs.  So S is cleared at the start of a place, and W at its end. */
GT_DEV void clear_later(const WarpRows& at, float (&diagonal)[2][4]) {
    GT_UNROLL
    for (int e = 0; e < 2; e++)
        if (2 * at.j + e > at.g) diagonal[0][e] = diagonal[1][2 + e] = 0.0f;
}

template <class C>
GT_DEV void make_all_S(const HopperBlock<C>& me, const WarpRows& at, PairBlocks& blocks) {
    Pairs64 S;
    wgmma_fence();
    multiply_rows<C>(S, me.tile_of(C::C), me.tile_of(C::B));
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(S);
    const float row[2] = {me.value(me.inverses(C::C_INVERSE) + at.row),
                          me.value(me.inverses(C::C_INVERSE) + at.row + 8)};
    float most[BLOCKS] = {};
    GT_UNROLL
    for (int n = 0; n < 8; n++) {
        const float2 column = lds<float2>(me.address(me.inverses(C::B_INVERSE) + 8 * n + 2 * at.j));
        GT_UNROLL
        for (int e = 0; e < 4; e++) {
            S[n][e] *= row[e / 2] * (e % 2 ? column.y : column.x);
            most[n / 2] = fmaxf(most[n / 2], fabsf(S[n][e]));
        }
    }
    GT_UNROLL
    for (int mask = 1; mask < 32; mask *= 2) {
        GT_UNROLL
        for (int block = 0; block < BLOCKS; block++) most[block] = fmaxf(most[block], shfl_xor(most[block], mask));
    }
    GT_UNROLL
    for (int block = 0; block < BLOCKS; block++) /* blocks to the right of the diagonal do not count */
        if (lane_id() == 0) sts<float>(me.address(me.S_most(block) + at.warp), block <= at.warp ? most[block] : 0.0f);
    take_diagonal(S, at, blocks.diagonal);
    clear_later(at, blocks.diagonal);
    GT_UNROLL
    for (int i = 0; i < 24; i++) blocks.left[i / 8][i / 4 % 2][i % 4] = S[i / 4][i % 4];
}

/* A lane's terms of a step's sums.  In the block on the diagonal: diagonal has Gamma, near has sums of Gamma / Delta
 * over rows, and dot is <dy_t, x_t> if the lane has t = s.  In blocks left of the diagonal: rows has sums of Gamma over
 * columns, [block][t, t + 8]; columns has sums of Gamma / Delta over rows, [8 columns][2]. */
struct PairSums {
    float diagonal[2][4], near[4], dot, rows[8], columns[16];
};

/* One round of reduce_scatter(): a lane keeps half of its values. */
template <int WIDTH, int V>
GT_DEV void halve(float (&v)[V], bool upper, int mask) {
    GT_UNROLL
    for (int i = 0; i < WIDTH; i++) {
        const float mine = upper ? v[i + WIDTH] : v[i], other = upper ? v[i] : v[i + WIDTH];
        v[i] = mine + shfl_xor(other, mask);
    }
}

/* Adds the step's sums over lanes and stores them.  Each sum is a chain of shuffles with 55 clocks of latency each, so
 * the code interleaves the chains.  It calls between() when most registers of the sums are free again. */
template <class Between>
GT_DEV void store_pair_sums(const WarpRows& at, PairSums& x, bool has_dots, float* sums, const Between& between) {
    const int j = at.j, g = at.g;
    /* sum over t >= k > s, for the block's 16 k: first the sums over s < k, by the four lanes of a row */
    float pairs[4], next[4], far[4], v[8] = {}; /* [2 e + n]: t = g + 8 e, s in the n-th half of the block */
    GT_UNROLL
    for (int i = 0; i < 4; i++) pairs[i] = x.diagonal[i % 2][i / 2 * 2] + x.diagonal[i % 2][i / 2 * 2 + 1];
    GT_UNROLL
    for (int i = 0; i < 4; i++) next[i] = shfl_xor(pairs[i], 1);
    halve<4>(x.rows, j & 2, 2);
    x.dot += shfl_xor(x.dot, 1);
    GT_UNROLL
    for (int i = 0; i < 4; i++) far[i] = shfl_xor(pairs[i] + next[i], 2);
    halve<2>(x.rows, j & 1, 1);
    x.dot += shfl_xor(x.dot, 2);
    GT_UNROLL
    for (int e = 0; e < 2; e++) {
        const float half = pairs[2 * e] + next[2 * e] + far[2 * e];
        GT_UNROLL
        for (int n = 0; n < 2; n++) {
            const float before = (n ? half : 0.0f) + (j & 1 ? next[2 * e + n] : 0.0f) + (j & 2 ? far[2 * e + n] : 0.0f);
            const int t = g + 8 * e, k = 8 * n + 2 * j;
            v[2 * n] += k <= t ? before : 0.0f;
            v[2 * n + 1] += k < t ? before + x.diagonal[n][2 * e] : 0.0f;
        }
    }
    GT_UNROLL
    for (int i = 0; i < 4; i++) v[4 + i] = x.near[i];
    halve<4>(v, g & 4, 16);
    halve<8>(x.columns, g & 4, 16);
    x.dot += shfl_xor(x.dot, 16);
    between();
    halve<2>(v, g & 2, 8);
    halve<4>(x.columns, g & 2, 8);
    x.dot += shfl_xor(x.dot, 8);
    halve<1>(v, g & 1, 4);
    halve<2>(x.columns, g & 1, 4);
    x.dot += shfl_xor(x.dot, 4);
    /* the lane now holds v[g], columns 8 g + 2 j and + 1, and rows of block j */
    const int first = 16 * at.warp + 8 * (g / 2 % 2) + 2 * j + g % 2;
    sums[(g < 4 ? ChunkSums::DIAGONAL : ChunkSums::NEAR) + first] = v[0];
    if (has_dots && lane_id() == 0) sums[ChunkSums::DSKIP_HEAD + at.warp] = x.dot;
    if (g < 2 * at.warp) /* these columns lie before the warp's rows */
        stg<float2>(sums + ChunkSums::PAIRS + CHUNK * (at.warp - 1) + 8 * g + 2 * j, {x.columns[0], x.columns[1]});
    if (j >= at.warp) return;
    sums[ChunkSums::PAIRS + CHUNK * j + at.row] = x.rows[0];
    sums[ChunkSums::PAIRS + CHUNK * j + at.row + 8] = x.rows[1];
}

/* Packs 8 columns of M, as f16 times a power of two, or as one or two terms of bf16.  n: half of the block. */
template <class T, bool TWO_TERMS>
GT_DEV void pack_M(const float (&M)[4], float power, int n, uint32_t (&hi)[4], uint32_t (&lo)[4]) {
    GT_UNROLL
    for (int e = 0; e < 2; e++) {
        const float a = M[2 * e], b = M[2 * e + 1];
        uint32_t& pair = hi[2 * n + e];
        if constexpr (std::is_same<T, bf16>::value) {
            pair = pack_bf16(a, b);
            if (TWO_TERMS) lo[2 * n + e] = pack_bf16(a - unpack_bf16_lo(pair), b - unpack_bf16_hi(pair));
        } else {
            pair = pack_f16(a * power, b * power);
        }
    }
}

/* Adds a step's part to W, and stores its M and the sums of its Gamma.  With PAIRS_MAKE_E, C h^T overwrites dS.  L is a
 * product of the step's factors in ChunkTokens. */
template <class C>
GT_DEV void make_pairs_of_rows(const ChunkGradientParams& p, const HopperBlock<C>& me, const WarpRows& at, int step,
                               float skip, const PairBlocks& S, Pairs64& dS, PairBlocks& W) {
    using D = typename C::D;
    using Tokens = typename C::Tokens;
    const int j = at.j, t = at.row, factors = me.factor(step, 0);
    PairSums sums = {};
    const uint32_t M_addresses = at.addresses(me.M(step));
    const float U0 = me.value(factors + Tokens::U + t), U1 = me.value(factors + Tokens::U + t + 8);
    float power_of_lane = 1.0f; /* power of M for the columns of block lane % 4 */
    if constexpr (C::M_HAS_POWER) power_of_lane = power_of_M(me, step, j, skip).value;
    const auto power = [&](int block) { return C::M_HAS_POWER ? shfl_idx(power_of_lane, block) : 1.0f; };
    { /* the block on the diagonal comes first, so that its registers are free for the other blocks */
        const int first = 16 * at.warp;
        float diagonal[2][4];
        take_diagonal(dS, at, diagonal);
        uint32_t hi[4], lo[4];
        const int square = factors + Tokens::SQUARE + 4 * first;
        const float2 row = lds<float2>(me.address(square + 8 * at.g + 2 * j));
        const float column[2] = {me.value(square + 16 * j + at.g), me.value(square + 16 * j + 8 + at.g)};
        const float2 v = lds<float2>(me.address(factors + Tokens::HALF + first + 2 * j));
        const float u = me.value(factors + Tokens::HALF + t + 8);
        const float L[2][4] = {{row.x, row.y, u * v.x, u * v.y}, {0.0f, 0.0f, column[0], column[1]}};
        const float skip_here = skip * me.dy_inverse(step, at.warp);
        const float power_here = power(at.warp);
        GT_UNROLL
        for (int n = 0; n < 2; n++) {
            const float2 delta = lds<float2>(me.address(factors + Tokens::DELTA + first + 8 * n + 2 * j));
            float M[4];
            GT_UNROLL
            for (int e = 0; e < 4; e++) {
                const float by = e % 2 ? delta.y : delta.x, SL = S.diagonal[n][e] * L[n][e];
                W.diagonal[n][e] = fma_rn(diagonal[n][e] * L[n][e], by, W.diagonal[n][e]);
                const float x = diagonal[n][e] * SL;
                sums.near[2 * n + e % 2] += x;
                sums.diagonal[n][e] = x * by;
                M[e] = SL * by;
                if (C::M_HAS_SKIP && e / 2 == n) M[e] += at.g == 2 * j + e % 2 ? skip_here : 0.0f; /* only if t = s */
            }
            pack_M<D, true>(M, power_here, n, hi, lo);
        }
        stmatrix_x4(M_addresses ^ 32 * at.warp, hi);
        if constexpr (C::M_TERMS > 1) stmatrix_x4((M_addresses ^ 32 * at.warp) + C::PANEL, lo);
        sums.dot = at.g == 2 * j       ? diagonal[0][0] + diagonal[1][2]
                   : at.g == 2 * j + 1 ? diagonal[0][1] + diagonal[1][3]
                                       : 0.0f;
    }
    GT_UNROLL
    for (int i = 0; i < 3; i++) { /* i: block of s */
        if (i >= at.warp) continue;
        const float power_here = power(i);
        uint32_t hi[4], lo[4];
        const float between = me.value(factors + between_index<Tokens>(at.warp, i));
        const float u[2] = {U0 * between, U1 * between};
        GT_UNROLL
        for (int n = 0; n < 2; n++) {
            const int s = 16 * i + 8 * n + 2 * j;
            const float2 v = lds<float2>(me.address(factors + Tokens::V + s));
            const float2 delta = lds<float2>(me.address(factors + Tokens::DELTA + s));
            float M[4], gamma[4]; /* gamma: without Delta */
            GT_UNROLL
            for (int e = 0; e < 4; e++) {
                const float L = u[e / 2] * (e % 2 ? v.y : v.x), x = dS[2 * i + n][e], by = e % 2 ? delta.y : delta.x;
                float& w = W.left[i][n][e];
                const float SL = S.left[i][n][e] * L;
                w = fma_rn(x * L, by, w);
                gamma[e] = x * SL;
                sums.rows[2 * i + e / 2] = fma_rn(gamma[e], by, sums.rows[2 * i + e / 2]);
                M[e] = SL * by;
            }
            sums.columns[4 * i + 2 * n] = gamma[0] + gamma[2];
            sums.columns[4 * i + 2 * n + 1] = gamma[1] + gamma[3];
            pack_M<D, false>(M, power_here, n, hi, lo);
        }
        stmatrix_x4(M_addresses ^ 32 * i, hi);
    }
    fence_async_proxy();
    me.buffers().fill(me.in_buffers(step));
    store_pair_sums(at, sums, p.dskip && !p.in.skip_per_channel, me.step_sums(step), [&] {
        if (!C::PAIRS_MAKE_E) return;
        /* In a second chunk, h comes from the role states.  A first chunk does not need that, but waits, too, so that
         * it misses no phase of the barrier. */
        me.states().wait_full(me.in_stages(step));
        wgmma_fence();
        multiply_rows<C>(dS, me.tile_of(C::C), me.stage(step) + C::H);
        wgmma_commit();
    });
}

/* Waits until the old contents of a buffer of M or W have been read.  For a place's first M, these contents are an M,
 * not W. */
template <class C>
GT_DEV void wait_for_buffer(const HopperBlock<C>& me, int step) {
    me.buffers().wait_free(me.in_buffers(step));
    if (step > 0) me.W_for_states().wait_free(me.number);
}

/* Stores W, the sum over all steps, as f16 in two tiles with rows t.  The first tile has W_ts times the inverse of B_s
 * and the power of row t of dC.  The second tile has W_ts times the inverse of C_t and the power of row s of dB.  POWER
 * holds the powers of dC and dB.  If W needs smaller powers for dC, they replace those in POWER. */
template <class C>
GT_DEV void store_all_W(const HopperBlock<C>& me, const WarpRows& at, PairBlocks& blocks) {
    clear_later(at, blocks.diagonal);
    Pairs64 W;
    GT_UNROLL
    for (int i = 0; i < 32; i++) { /* blocks to the right of the diagonal are 0 */
        const int block = i / 8;
        const float left = block < 3 ? blocks.left[block < 3 ? block : 0][i / 4 % 2][i % 4] : 0.0f;
        W[i / 4][i % 4] = block == at.warp ? blocks.diagonal[i / 4 % 2][i % 4] : left;
    }
    const float c[2] = {me.value(me.inverses(C::C_INVERSE) + at.row), me.value(me.inverses(C::C_INVERSE) + at.row + 8)};
    float of_dC[2] = {}, of_dB = 0.0f;
    GT_UNROLL
    for (int n = 0; n < 8; n++) {
        const float2 b = lds<float2>(me.address(me.inverses(C::B_INVERSE) + 8 * n + 2 * at.j));
        GT_UNROLL
        for (int e = 0; e < 4; e++) {
            const float x = fabsf(W[n][e]);
            of_dC[e / 2] = fmaxf(of_dC[e / 2], x * (e % 2 ? b.y : b.x));
            of_dB = fmaxf(of_dB, x * c[e / 2]);
        }
    }
    GT_UNROLL
    for (int mask = 1; mask < 32; mask *= 2) of_dB = fmaxf(of_dB, shfl_xor(of_dB, mask));
    if (lane_id() == 0) sts<float>(me.address(C::W_MOST + at.warp), of_dB);
    float power[2];
    GT_UNROLL
    for (int e = 0; e < 2; e++) {
        of_dC[e] = fmaxf(of_dC[e], shfl_xor(of_dC[e], 1));
        of_dC[e] = fmaxf(of_dC[e], shfl_xor(of_dC[e], 2));
        const float sum = me.value(C::POWER + at.row + 8 * e), most = power_of(of_dC[e]).value;
        power[e] = sum < most ? sum : most;
    }
    bar_sync(PAIRS_BARRIER, C::WARPGROUP); /* W_MOST is complete */
    if (at.j == 0) {
        sts<float>(me.address(C::POWER + at.row), power[0]);
        sts<float>(me.address(C::POWER + at.row + 8), power[1]);
    }
    const float most = power_of(largest_of(lds<float4>(me.address(C::W_MOST)))).value;
    GT_UNROLL
    for (int i = 0; i < 4; i++) {
        uint32_t for_dC[4], for_dB[4];
        GT_UNROLL
        for (int n = 0; n < 2; n++) {
            const int s = 16 * i + 8 * n + 2 * at.j;
            const float2 b = lds<float2>(me.address(me.inverses(C::B_INVERSE) + s)),
                         sum = lds<float2>(me.address(C::POWER + CHUNK + s));
            const float f0 = sum.x < most ? sum.x : most, f1 = sum.y < most ? sum.y : most;
            const float(&w)[4] = W[2 * i + n];
            GT_UNROLL
            for (int e = 0; e < 2; e++) {
                for_dC[2 * n + e] = pack_f16(w[2 * e] * b.x * power[e], w[2 * e + 1] * b.y * power[e]);
                for_dB[2 * n + e] = pack_f16(w[2 * e] * c[e] * f0, w[2 * e + 1] * c[e] * f1);
            }
        }
        stmatrix_x4(at.addresses(me.M(me.steps)) ^ 32 * i, for_dC);
        stmatrix_x4(at.addresses(me.M(me.steps) + C::PANEL) ^ 32 * i, for_dB);
    }
}

/* After the last step of a place: stores W and hands it on. */
template <class C>
GT_DEV void finish_pairs(const HopperBlock<C>& me, const WarpRows& at, PairBlocks& W) {
    wait_for_buffer(me, me.steps);
    Ring<1, C::SHARES_MADE>{me.smem}.wait_full(me.number);
    store_all_W(me, at, W);
    fence_async_proxy();
    me.buffers().fill(me.in_buffers(me.steps));
    me.W_for_states().fill(me.number);
    if constexpr (C::GROUP_COPIES > 1) me.groups().free(me.number);
}

/* dS = dy x^T, where dy still has its powers.  If x is bf16 and dy f16, dy is split into two terms of bf16, which is
 * exact. */
template <class C>
GT_DEV void make_dS(const HopperBlock<C>& me, const WarpRows& at, int step, Pairs64& dS) {
    using T = typename C::T;
    const uint32_t tiles = me.stage(step);
    const uint64_t right = rows_operand<C>(tiles + C::X);
    if constexpr (std::is_same<T, typename C::D>::value) {
        const uint64_t left = rows_operand<C>(tiles + C::DY);
        wgmma_fence();
        GT_UNROLL
        for (int k = 0; k < 4; k++) wgmma<T>(dS, along_row<C>(left, k), along_row<C>(right, k), k > 0);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_pin(dS);
    } else {
        const uint32_t addresses = at.addresses(tiles + C::DY);
        if constexpr (ADDS_TO_ZEROS) wgmma_clear(dS);
        GT_NO_UNROLL
        for (int k = 0; k < 4; k++) { /* 16 columns at a time; not unrolled, because the code of a step must be short */
            uint32_t hi[4], lo[4];
            ldmatrix_x4(hi, addresses ^ 32 * k);
            GT_UNROLL
            for (int i = 0; i < 4; i++) {
                const float a = unpack_f16_lo(hi[i]), b = unpack_f16_hi(hi[i]);
                hi[i] = pack_bf16(a, b);
                lo[i] = pack_bf16(a - unpack_bf16_lo(hi[i]), b - unpack_bf16_hi(hi[i]));
            }
            wgmma_fence();
            wgmma<T>(dS, hi, along_row<C>(right, k), ADDS_TO_ZEROS || k > 0);
            wgmma<T>(dS, lo, along_row<C>(right, k));
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_pin(dS);
        }
    }
}

/* The barriers that the role pairs waits for in a step:
 *     FULL                 prepare has filled the stage.
 *     STATE_MADE           N = 128: states has advanced the h that C h^T reads.
 *     M_EMPTY              inputs has read the old M in the buffer.
 * The role then fills M_FULL to hand M on, and frees the stage by EMPTY.  At the end of a place it waits for:
 *     SHARES_MADE          the powers of dC and dB are final.
 *     M_EMPTY, W_EMPTY     inputs and states have read W of the previous place.
 * M_FULL and W_FULL hand W on to inputs and states. */
template <class C>
GT_DEV void pairs_role(const HopperGradientParams& p, uint32_t smem) {
    const WarpRows at(shfl_idx(warp_id(), 0));
    PairBlocks S, W = {};
    GT_NO_UNROLL
    for (int number = made_here(0);; number++) {
        const HopperBlock<C> me(p, smem, number);
        if (number > 0) {
            const HopperBlock<C> last(p, smem, number - 1);
            finish_pairs(last, at, W);
            if (C::GROUP_COPIES == 1) { /* waits until the roles no longer read C */
                last.buffers().wait_freed(last.in_buffers(last.steps));
                last.W_for_states().wait_freed(last.number);
            }
        }
        if (C::GROUP_COPIES == 1) convert_group_rows(p.in, me, TILE_C);
        wait_for_chain();
        if (me.tokens == 0) break;
        me.groups().wait_full(number);
        make_all_S(me, at, S);
        if (C::M_HAS_POWER) {
            Ring<1, C::S_MADE>{smem}.fill(number); /* S_MOST is complete */
            Ring<1, C::S_MADE>{smem}.wait_full(number);
        }
        W = {};
        GT_NO_UNROLL
        for (int step = 0; step < me.steps; step++) {
            float skip = 0.0f;
            if (C::M_HAS_SKIP && !C::M_HAS_POWER) skip = skip_of_head(p, me, step); /* overlaps with the wait */
            wait_for_rows(me, step);
            Pairs64 dS;
            make_dS(me, at, step, dS);
            if (C::M_HAS_SKIP && C::M_HAS_POWER) skip = skip_of_head(p, me, step);
            wait_for_buffer(me, step);
            make_pairs_of_rows(p, me, at, step, skip, S, dS, W);
            if constexpr (C::PAIRS_MAKE_E) {
                wgmma_wait<0>();
                wgmma_pin(dS); /* dS now holds C h^T */
                store_E(me, at, step, dS);
            }
            sync_warp();
            me.stages().free(me.in_stages(step));
        }
    }
}

} /* namespace ssd */
} /* namespace gt */

#endif
