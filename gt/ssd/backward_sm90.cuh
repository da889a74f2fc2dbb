/* gt/ssd/backward_sm90.cuh - ssd backward of a chunk on compute capability 9.0, by wgmma: everything but the states.
 *
 * As chunk_gradient_kernel (backward_tensor.cuh has the formulas), a block has 64 tokens of one group and takes its
 * heads, and their tiles of 64 rows p, one after another ("steps").  16-bit activations; N from 33 to 64 as 64, to 128
 * as 128.
 *
 * WARPGROUPS, each a step or less ahead of those that need its results:
 *     prepare   copies x, dy, the neighbour's x or dy, h and G of a step as soon as its stage is free (cp.async); decay
 *               factors of the next step; weights of the state that the chunk makes; da and ddt of steps that are done
 *     pairs     S = C B^T once; a step: dS = dy x^T, W += dS L Delta, sums of Gamma = W S, M = S L to shared memory
 *     inputs    dC += pre dy h;  E from C h^T;  U = suf B G^T + M^T dy;  dx, <x, U>, F from its first part
 *     states    the state between the checkpoint's two chunks (h of the second, G of the first), in place, from the
 *               neighbour's tokens;  dB += Delta suf x G;  Z from G h^T, of which only the diagonal counts
 * Pairs come with rows t: warp i has the blocks of 16 x 16 left of the diagonal and on it in rows 16 i.
 *
 * NUMBERS.  x, dy are operands as they are in dS and M^T dy; M is of their type: two terms of bf16, or f16 times a
 * power of two of the chunk.  For products with states they are f16 from registers, times their decay and a power of
 * two that a token keeps over the heads, as long as it holds (StateShare): dC and dB are summed where the products are
 * made.  B, C: f16, a power a row; h, G as saved, a power for 16 rows, which goes into the left operand or, for columns, behind
 * the product.  The state that the chunk makes: exp(sum a) h as a product too, with a diagonal left operand.
 *
 * REGISTERS a thread: pairs 136 (S 32, W 32, dS 32), inputs 152 (dC 64, product 32, dy 16), states 160 (dB 64, product
 *     32, x 16), prepare 64.
 * SHARED MEMORY (N = 128, bf16): B, C, the neighbour's B or C 48 KB; two stages of x, dy, neighbour 24 KB and h, G
 *     32 KB; M twice 32 KB, dx 8 KB; factors and sums by token 27 KB: one block a multiprocessor.  N = 64: three stages.
 * PRODUCTS a step, clocks at full rate (N = 128): dS 128, M^T dy 256, C h^T, B G^T, dy h, x G 1024, the state made 512,
 *     G h^T 256.
 * BYTES a token and head: as chunk_gradient_kernel.
 * grid: [B, slots of 128 tokens, G], two chunks each; block 512.  Every sum has one fixed order: deterministic. */
#ifndef GT_SSD_BACKWARD_SM90_CUH
#define GT_SSD_BACKWARD_SM90_CUH

#include "backward_sm90_block.cuh"

namespace gt {
namespace ssd {

/* ---- a warp's place --------------------------------------------------------------------------------------------- */

/* Of a warp in its warpgroup: rows 16 warp ... of every product; of a lane, rows row and row + 8, of every 8 columns
 * 2 j, 2 j + 1. */
struct WarpRows {
    int warp, g, j, row;
    uint32_t cell0;
    GT_METHOD explicit WarpRows(int warp_of_block) {
        const int lane = lane_id();
        warp = warp_of_block % 4;
        g = lane / 4;
        j = lane % 4;
        row = 16 * warp + g;
        cell0 = panel_at<128>(16 * warp + lane % 16, lane / 16);
    }
    /* the lane's address for ldmatrix_x4 or stmatrix_x4 of the warp's rows, pieces 0 and 1 of a panel; of 2 i, 2 i + 1
     * it is this ^ 32 i.  Made where it is needed: kept over the steps, all of them would take too many registers */
    GT_METHOD uint32_t cells(uint32_t panel) const { return (uint32_t)made_here((int)(panel + cell0)); }
};

template <class C>
GT_DEV uint64_t rows_operand(uint32_t tile) { /* elements of a row along k */
    return wgmma_tile<128, Major::K>(tile, C::PANEL);
}

template <class C>
GT_DEV uint64_t columns_operand(uint32_t tile) { /* rows along k */
    return wgmma_tile<128, Major::MN>(tile, C::PANEL);
}

template <class C>
GT_DEV uint64_t along_row(uint64_t operand, int k) { /* k: in 16 */
    return wgmma_step(operand, k_bytes<128, Major::K>(16 * k, C::PANEL));
}

template <class C>
GT_DEV uint64_t down_rows(uint64_t operand, int k) {
    return wgmma_step(operand, k_bytes<128, Major::MN>(16 * k, C::PANEL));
}

/* c = left right^T over all N columns of two tiles of 64 rows. */
template <class C>
GT_DEV void multiply_rows(float (&c)[8][4], uint32_t left, uint32_t right) {
    const uint64_t a = rows_operand<C>(left), b = rows_operand<C>(right);
    GT_UNROLL
    for (int k = 0; k < C::N / 16; k++) wgmma<f16>(c, along_row<C>(a, k), along_row<C>(b, k), k > 0);
}

/* 1 over the power of two that M is multiplied by: for f16, |M| <= most of |S| times GROWTH. */
template <class C>
GT_DEV Power power_of_M(const ChunkGradientBlock<C>& me, int step) {
    if constexpr (std::is_same<typename C::T, bf16>::value) return {1.0f, 1.0f};
    const float4 S = lds<float4>(me.cell(C::S_MOST));
    const float most = largest_of(S) * me.value(me.factor(step, Factors::GROWTH));
    return power_of(most > 0x1p-40f ? most : 0x1p-40f);
}

/* ---- pairs ------------------------------------------------------------------------------------------------------ */

typedef float Pairs64[8][4]; /* of a warp: 16 rows t, all s */

/* What a warp needs of them: the blocks left of the diagonal, of which it has as many as its number, and the one on it,
 * apart so that there is one piece of code for it and not four. */
struct PairBlocks {
    float left[3][2][4], diagonal[2][4];
};

/* The block on the diagonal. */
GT_DEV void take_diagonal(const Pairs64& x, const WarpRows& at, float (&diagonal)[2][4]) {
    GT_UNROLL
    for (int i = 0; i < 8; i++) {
        const int n = i / 4, e = i % 4;
        diagonal[n][e] = at.warp < 2 ? at.warp == 0 ? x[n][e] : x[2 + n][e] : at.warp == 2 ? x[4 + n][e] : x[6 + n][e];
    }
}

template <class C>
GT_DEV void make_all_S(const ChunkGradientBlock<C>& me, const WarpRows& at, PairBlocks& blocks) {
    Pairs64 S;
    wgmma_fence();
    multiply_rows<C>(S, me.smem + C::C, me.smem + C::B);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(S);
    const float row[2] = {me.value(C::C_INVERSE + at.row), me.value(C::C_INVERSE + at.row + 8)};
    float most = 0.0f;
    GT_UNROLL
    for (int n = 0; n < 8; n++) {
        const float2 column = lds<float2>(me.cell(C::B_INVERSE + 8 * n + 2 * at.j));
        GT_UNROLL
        for (int e = 0; e < 4; e++) {
            S[n][e] *= row[e / 2] * (e % 2 ? column.y : column.x);
            most = fmaxf(most, fabsf(S[n][e]));
        }
    }
    GT_UNROLL
    for (int mask = 1; mask < 32; mask *= 2) most = fmaxf(most, shfl_xor(most, mask));
    if (lane_id() == 0) sts<float>(me.cell(C::S_MOST + at.warp), most);
    take_diagonal(S, at, blocks.diagonal);
    GT_UNROLL
    for (int i = 0; i < 24; i++) blocks.left[i / 8][i / 4 % 2][i % 4] = S[i / 4][i % 4];
}

/* sum_{t>=k>s} of a 16 x 16 block on the diagonal, rows t, for its 16 k. */
GT_DEV void store_diagonal_rows(const float (&x)[2][4], uint32_t out) {
    const int g = lane_id() / 4, j = lane_id() % 4;
    float upto[2][2], left[2][2],
        v[4] = {}; /* [e][n]: t = g + 8 e, s = 8 n ...; sums along s, in the four lanes of a row */
    GT_UNROLL
    for (int i = 0; i < 4; i++) upto[i / 2][i % 2] = x[i % 2][i / 2 * 2] + x[i % 2][i / 2 * 2 + 1];
    GT_UNROLL
    for (int d = 1; d < 4; d *= 2) {
        GT_UNROLL
        for (int i = 0; i < 4; i++) left[i / 2][i % 2] = shfl_up(upto[i / 2][i % 2], d);
        GT_UNROLL
        for (int i = 0; i < 4; i++) upto[i / 2][i % 2] += j >= d ? left[i / 2][i % 2] : 0.0f;
    }
    GT_UNROLL
    for (int i = 0; i < 4; i++) left[i / 2][i % 2] = shfl_up(upto[i / 2][i % 2], 1);
    GT_UNROLL
    for (int e = 0; e < 2; e++) {
        const float first_half = shfl_idx(upto[e][0], 4 * g + 3);
        GT_UNROLL
        for (int n = 0; n < 2; n++) {
            const float before = (n ? first_half : 0.0f) + (j > 0 ? left[e][n] : 0.0f);
            const int t = g + 8 * e, k = 8 * n + 2 * j;
            v[2 * n] += k <= t ? before : 0.0f;
            v[2 * n + 1] += k < t ? before + x[n][2 * e] : 0.0f;
        }
    }
    store_column_sums(v, out);
}

/* A tile of 8 columns of M, f16 times a power of two, or in two terms of bf16. */
template <class T>
GT_DEV void pack_M(const float (&M)[4], float power, int n, uint32_t (&words)[4], uint32_t (&rest)[4]) {
    GT_UNROLL
    for (int e = 0; e < 2; e++) {
        const float a = M[2 * e], b = M[2 * e + 1];
        uint32_t& word = words[2 * n + e];
        if constexpr (std::is_same<T, bf16>::value) {
            word = pack_bf16(a, b);
            rest[2 * n + e] = pack_bf16(a - unpack_bf16_lo(word), b - unpack_bf16_hi(word));
        } else {
            word = pack_f16(a * power, b * power);
        }
    }
}

/* From dS of a step: W (added to), Gamma and its sums, M. */
template <class C>
GT_DEV void make_pairs_of_rows(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me, const WarpRows& at,
                               int step, const PairBlocks& S, const Pairs64& dS, PairBlocks& W) {
    using T = typename C::T;
    const int j = at.j, t = at.row, factors = me.factor(step, 0);
    const uint32_t M_cells = at.cells(me.smem + C::M + step % C::M_BUFFERS * C::M_TERMS * C::PANEL);
    const float power = power_of_M(me, step).value;
    const float U0 = me.value(factors + Factors::U + t), U1 = me.value(factors + Factors::U + t + 8);
    float rows[8] = {}, columns[16] = {}; /* of the blocks left of the diagonal: [i][t, t + 8], [8 columns][2] */
    float diagonal[2][4];
    take_diagonal(dS, at, diagonal);
    GT_UNROLL
    for (int i = 0; i < 3; i++) { /* blocks of s */
        if (i >= at.warp) continue;
        uint32_t words[4], rest[4];
        const float between = me.value(factors + between_cell(at.warp, i));
        const float u[2] = {U0 * between, U1 * between};
        GT_UNROLL
        for (int n = 0; n < 2; n++) {
            const int s = 16 * i + 8 * n + 2 * j;
            const float2 v = lds<float2>(me.cell(factors + Factors::V + s));
            const float2 delta = lds<float2>(me.cell(factors + Factors::DELTA + s));
            float M[4], gamma[4];
            GT_UNROLL
            for (int e = 0; e < 4; e++) {
                const float L = u[e / 2] * (e % 2 ? v.y : v.x), x = dS[2 * i + n][e];
                float& w = W.left[i][n][e];
                M[e] = S.left[i][n][e] * L;
                w = fma_rn(x * L, e % 2 ? delta.y : delta.x, w);
                gamma[e] = x * M[e];
                rows[2 * i + e / 2] = fma_rn(gamma[e], e % 2 ? delta.y : delta.x, rows[2 * i + e / 2]);
            }
            columns[4 * i + 2 * n] = (gamma[0] + gamma[2]) * delta.x;
            columns[4 * i + 2 * n + 1] = (gamma[1] + gamma[3]) * delta.y;
            pack_M<T>(M, power, n, words, rest);
        }
        stmatrix_x4(M_cells ^ 32 * i, words);
        if constexpr (C::M_TERMS > 1) stmatrix_x4((M_cells ^ 32 * i) + C::PANEL, rest);
    }
    {
        const int first = 16 * at.warp;
        uint32_t words[4], rest[4];
        const float2 near0 = lds<float2>(me.cell(factors + Factors::DIAGONAL + 8 * t + 2 * j));
        const float2 near1 = lds<float2>(me.cell(factors + Factors::DIAGONAL + 8 * (t + 8) + 2 * j));
        const float2 v = lds<float2>(me.cell(factors + Factors::HALF + first + 2 * j));
        const float u = me.value(factors + Factors::HALF + t + 8);
        const float L[2][4] = {{near0.x, near0.y, u * v.x, u * v.y}, {0.0f, 0.0f, near1.x, near1.y}};
        float gamma[2][4];
        GT_UNROLL
        for (int n = 0; n < 2; n++) {
            const float2 delta = lds<float2>(me.cell(factors + Factors::DELTA + first + 8 * n + 2 * j));
            float M[4];
            GT_UNROLL
            for (int e = 0; e < 4; e++) {
                const float w = diagonal[n][e] * L[n][e] * (e % 2 ? delta.y : delta.x);
                M[e] = S.diagonal[n][e] * L[n][e];
                W.diagonal[n][e] += w;
                gamma[n][e] = w * S.diagonal[n][e];
            }
            pack_M<T>(M, power, n, words, rest);
        }
        stmatrix_x4(M_cells ^ 32 * at.warp, words);
        if constexpr (C::M_TERMS > 1) stmatrix_x4((M_cells ^ 32 * at.warp) + C::PANEL, rest);
        fence_async_proxy();
        mbarrier_arrive(me.smem + C::M_FULL + 8 * (step % C::M_BUFFERS));
        store_diagonal_rows(gamma, me.cell(me.sums(step, C::DIAGONAL) + first));
    }
    if (p.dskip && !p.in.skip_per_channel) { /* <dy_t, x_t> */
        float sum = at.g == 2 * j       ? diagonal[0][0] + diagonal[1][2]
                    : at.g == 2 * j + 1 ? diagonal[0][1] + diagonal[1][3]
                                        : 0.0f;
        sum = warp_sum(sum);
        if (lane_id() == 0) sts<float>(me.cell(me.sums(step, C::DSKIP_HEAD) + at.warp), sum);
    }
    if (at.warp == 0) return;
    reduce_scatter<16, 8, 4>(columns, at.g); /* columns 8 g + 2 j, + 1 */
    reduce_scatter<8, 4, 1>(rows, j);        /* block j */
    sts<float2>(me.cell(me.sums(step, C::COLUMN_SUMS) + CHUNK * (at.warp - 1) + 8 * at.g + 2 * j),
                {columns[0], columns[1]});
    if (j >= at.warp) return;
    sts<float>(me.cell(me.sums(step, C::ROW_SUMS) + CHUNK * j + t), rows[0]);
    sts<float>(me.cell(me.sums(step, C::ROW_SUMS) + CHUNK * j + t + 8), rows[1]);
}

/* Leaves the sum of W over the heads as f16 in two tiles, rows t: W_ts times what undoes B_s and the power of dC's row
 * t; W_ts times what undoes C_t and the power of dB's row s.  POWER: on entry those of the sums, then of dC's rows no
 * more than W allows. */
template <class C>
GT_DEV void store_all_W(const ChunkGradientBlock<C>& me, const WarpRows& at, const PairBlocks& blocks) {
    Pairs64 W;
    GT_UNROLL
    for (int i = 0; i < 32; i++) { /* to the right there are zeros */
        const int block = i / 8;
        const float left = block < 3 ? blocks.left[block < 3 ? block : 0][i / 4 % 2][i % 4] : 0.0f;
        W[i / 4][i % 4] = block == at.warp ? blocks.diagonal[i / 4 % 2][i % 4] : left;
    }
    const float c[2] = {me.value(C::C_INVERSE + at.row), me.value(C::C_INVERSE + at.row + 8)};
    float of_dC[2] = {}, of_dB = 0.0f;
    GT_UNROLL
    for (int n = 0; n < 8; n++) {
        const float2 b = lds<float2>(me.cell(C::B_INVERSE + 8 * n + 2 * at.j));
        GT_UNROLL
        for (int e = 0; e < 4; e++) {
            const float x = fabsf(W[n][e]);
            of_dC[e / 2] = fmaxf(of_dC[e / 2], x * (e % 2 ? b.y : b.x));
            of_dB = fmaxf(of_dB, x * c[e / 2]);
        }
    }
    GT_UNROLL
    for (int mask = 1; mask < 32; mask *= 2) of_dB = fmaxf(of_dB, shfl_xor(of_dB, mask));
    if (lane_id() == 0) sts<float>(me.cell(C::W_MOST + at.warp), of_dB);
    float power[2];
    GT_UNROLL
    for (int e = 0; e < 2; e++) {
        of_dC[e] = fmaxf(of_dC[e], shfl_xor(of_dC[e], 1));
        of_dC[e] = fmaxf(of_dC[e], shfl_xor(of_dC[e], 2));
        const float sum = me.value(C::POWER + at.row + 8 * e), most = power_of(of_dC[e]).value;
        power[e] = sum < most ? sum : most;
    }
    bar_sync(PAIRS_BARRIER, C::GROUP); /* W_MOST */
    if (at.j == 0) {
        sts<float>(me.cell(C::POWER + at.row), power[0]);
        sts<float>(me.cell(C::POWER + at.row + 8), power[1]);
    }
    const float most = power_of(largest_of(lds<float4>(me.cell(C::W_MOST)))).value;
    GT_UNROLL
    for (int i = 0; i < 4; i++) {
        uint32_t for_dC[4], for_dB[4];
        GT_UNROLL
        for (int n = 0; n < 2; n++) {
            const int s = 16 * i + 8 * n + 2 * at.j;
            const float2 b = lds<float2>(me.cell(C::B_INVERSE + s)), sum = lds<float2>(me.cell(C::POWER + CHUNK + s));
            const float f0 = sum.x < most ? sum.x : most, f1 = sum.y < most ? sum.y : most;
            const float(&w)[4] = W[2 * i + n];
            GT_UNROLL
            for (int e = 0; e < 2; e++) {
                for_dC[2 * n + e] = pack_f16(w[2 * e] * b.x * power[e], w[2 * e + 1] * b.y * power[e]);
                for_dB[2 * n + e] = pack_f16(w[2 * e] * c[e] * f0, w[2 * e + 1] * c[e] * f1);
            }
        }
        stmatrix_x4(at.cells(me.smem + C::W) ^ 32 * i, for_dC);
        stmatrix_x4(at.cells(me.smem + C::W + C::PANEL) ^ 32 * i, for_dB);
    }
}

template <class C>
GT_DEV void pairs_role(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me) {
    using T = typename C::T;
    const WarpRows at(me.warp);
    PairBlocks S, W = {};
    make_all_S(me, at, S);
    if (C::M_TERMS == 1) bar_sync(BOUND_BARRIER, 2 * C::GROUP); /* S_MOST */
    GT_NO_UNROLL
    for (int step = 0; step < me.steps; step++) {
        const int stage = step % C::STAGES, buffer = step % C::M_BUFFERS;
        mbarrier_wait(me.smem + C::FULL + 8 * stage, step / C::STAGES % 2);
        Pairs64 dS;
        const uint64_t left = rows_operand<C>(me.stage(step) + C::DY), right = rows_operand<C>(me.stage(step) + C::X);
        wgmma_fence();
        GT_UNROLL
        for (int k = 0; k < 4; k++) wgmma<T>(dS, along_row<C>(left, k), along_row<C>(right, k), k > 0);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_pin(dS);
        mbarrier_wait(me.smem + C::M_EMPTY + 8 * buffer, (step / C::M_BUFFERS + 1) % 2);
        make_pairs_of_rows(p, me, at, step, S, dS, W);
        sync_warp();
        mbarrier_arrive(me.smem + C::EMPTY + 8 * stage);
    }
    bar_sync(MULTIPLYING_BARRIER, C::CONSUMERS); /* the stages are free, POWER is written */
    store_all_W(me, at, W);
    fence_async_proxy();
    bar_sync(MULTIPLYING_BARRIER, C::CONSUMERS);
}

/* ---- dC and dB -------------------------------------------------------------------------------------------------- */

/* dC (0) or dB (1), rows times a power of two each. */
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

/* The left operand of a product of the warpgroup's rows of a panel; the pairs that a lane has of a product, too. */
GT_DEV void load_left(uint32_t tile, const WarpRows& at, uint32_t (&a)[4][4]) {
    const uint32_t cells = at.cells(tile);
    GT_UNROLL
    for (int k = 0; k < 4; k++) ldmatrix_x4(a[k], cells ^ 32 * k);
}

/* A step's left operand: dy times pre (0), or x times Delta suf (1), times what undoes the state's powers and the row's
 * power.  Whether it holds all rows to 11 bits: heads before may have left a power that is too small for this one. */
template <class C>
GT_DEV bool make_left(const ChunkGradientBlock<C>& me, const WarpRows& at, int step, int which, StateShare<C>& share,
                      uint32_t (&a)[4][4]) {
    using E = Element<typename C::T>;
    load_left(me.stage(step) + (which ? C::X : C::DY), at, a);
    const float4 inverses = lds<float4>(me.cell(C::STATE_INVERSES + 8 * (step % C::STAGES) + 4 * which));
    const float largest = largest_of(inverses);
    float decay[2], magnitude[2], bound[2];
    bool grows = false, is_small = false;
    GT_UNROLL
    for (int e = 0; e < 2; e++) {
        uint32_t pairs = 0;
        GT_UNROLL
        for (int k = 0; k < 4; k++)
            pairs = larger_magnitudes<typename C::T>(larger_magnitudes<typename C::T>(pairs, a[k][e]), a[k][2 + e]);
        const int t = at.row + 8 * e;
        decay[e] = which ? me.value(me.factor(step, Factors::DELTA) + t) * me.value(me.factor(step, Factors::SUF) + t)
                         : me.value(me.factor(step, Factors::PRE) + t);
        magnitude[e] = row_maximum<typename C::T, 4>(pairs) * fabsf(decay[e]) * largest; /* Delta may be below 0 */
        bound[e] = fmaxf(magnitude[e], largest * 0x1p-85f); /* power times largest is finite, of zeros too */
        grows |= !(bound[e] * share.power[e] <= 0x1p15f);
    }
    if (warp_any(grows)) { /* with room for eight times as much */
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
            a[k][i] = pack_f16(E::lo(a[k][i]) * f, E::hi(a[k][i]) * f);
        }
    }
    GT_UNROLL
    for (int e = 0; e < 2; e++) is_small |= magnitude[e] > 0.0f && magnitude[e] * share.power[e] < 0x1p-3f;
    return !warp_any(is_small);
}

/* Starts dC += left h or dB += left G. */
template <class C>
GT_DEV void add_left(const ChunkGradientBlock<C>& me, int step, int which, StateShare<C>& share,
                     const uint32_t (&a)[4][4]) {
    const uint64_t state = columns_operand<C>(me.stage(step) + (which ? C::G : C::H));
    GT_UNROLL
    for (int k = 0; k < 4; k++) wgmma<f16, Major::MN>(share.sum, a[k], down_rows<C>(state, k));
}

/* Adds W B to dC, or W^T C to dB, and stores the rows. */
template <class C>
GT_DEV void finish_share(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me, const WarpRows& at, int which,
                         StateShare<C>& share) {
    using T = typename C::T;
    if (at.j == 0) {
        sts<float>(me.cell(C::POWER + CHUNK * which + at.row), share.power[0]);
        sts<float>(me.cell(C::POWER + CHUNK * which + at.row + 8), share.power[1]);
    }
    bar_sync(MULTIPLYING_BARRIER, C::CONSUMERS);
    bar_sync(MULTIPLYING_BARRIER, C::CONSUMERS); /* W */
    float inverse[2];
    const float most = power_of(largest_of(lds<float4>(me.cell(C::W_MOST)))).value;
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
    const uint64_t right = columns_operand<C>(me.smem + (which ? C::C : C::B));
    if (which) {
        const uint64_t left = columns_operand<C>(me.smem + C::W + C::PANEL);
        GT_UNROLL
        for (int k = 0; k < 4; k++)
            wgmma<f16, Major::MN, Major::MN>(share.sum, down_rows<C>(left, k), down_rows<C>(right, k));
    } else {
        const uint64_t left = rows_operand<C>(me.smem + C::W);
        GT_UNROLL
        for (int k = 0; k < 4; k++)
            wgmma<f16, Major::K, Major::MN>(share.sum, along_row<C>(left, k), down_rows<C>(right, k));
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(share.sum);
    const uint32_t rows = me.smem + C::ROWS + which * C::STATE;
    GT_UNROLL
    for (int i = 0; i < C::N / 16; i++) {
        uint32_t words[4];
        GT_UNROLL
        for (int n = 0; n < 4; n++) {
            const float f = inverse[n % 2], *x = share.sum[2 * i + n / 2] + n % 2 * 2;
            words[n] = Element<T>::pack(x[0] * f, x[1] * f);
        }
        stmatrix_x4(at.cells(rows + i / 4 * C::PANEL) ^ i % 4 * 32, words);
    }
    sync_warp();
    void* out = which ? p.dBm : p.dCm;
    if (!out) return;
    const gt_stride out_at = which ? p.dBm_at : p.dCm_at;
    constexpr int PIECES = C::N / 8, STEP = 32 / PIECES;
    const int row0 = 16 * at.warp + lane_id() / PIECES, piece = lane_id() % PIECES;
    uint16_t* to = static_cast<uint16_t*>(out) + gt::at(out_at, me.b, me.first, me.g) + 8 * piece;
    GT_UNROLL
    for (int i = 0; i < 16 / STEP; i++) {
        const int t = row0 + STEP * i;
        if (t < me.tokens && 8 * piece < p.in.N)
            stg<uint4>(to + t * out_at.t, lds<uint4>(rows + piece / 8 * C::PANEL + panel_at<128>(t, piece % 8)));
    }
}

/* ---- inputs: dC, E, U, dx, F, <x, U> ---------------------------------------------------------------------------- */

/* out[row], out[row + 8] <- sums over the quad. */
GT_DEV void store_row_sums(const WarpRows& at, float (&x)[2], uint32_t out) {
    reduce_scatter<2, 4, 1>(x, at.j);
    if (at.j % 2 == 0) sts<float>(out + 4 * (at.row + 4 * at.j), x[0]);
}

/* E_t = <pre dy_t, h C_t>, from the left operand of dC or, where that is not exact, from dy. */
template <class C>
GT_DEV void store_E(const ChunkGradientBlock<C>& me, const WarpRows& at, int step, const StateShare<C>& share,
                    bool is_exact, const uint32_t (&a)[4][4], const float (&Ch)[8][4]) {
    using T = typename C::T;
    float sums[2] = {}, odd[2] = {};
    const float c[2] = {me.value(C::C_INVERSE + at.row), me.value(C::C_INVERSE + at.row + 8)};
    if (is_exact) {
        GT_UNROLL
        for (int k = 0; k < 4; k++) {
            GT_UNROLL
            for (int i = 0; i < 4; i++) {
                const float* y = Ch[2 * k + i / 2] + i % 2 * 2;
                sums[i % 2] = fma_rn(unpack_f16_lo(a[k][i]), y[0], sums[i % 2]);
                odd[i % 2] = fma_rn(unpack_f16_hi(a[k][i]), y[1], odd[i % 2]);
            }
        }
        GT_UNROLL
        for (int e = 0; e < 2; e++) sums[e] = (sums[e] + odd[e]) * (c[e] * inverse_of(share.power[e]));
    } else {
        const uint32_t cells = at.cells(me.stage(step) + C::DY);
        const float4 inverses = lds<float4>(me.cell(C::STATE_INVERSES + 8 * (step % C::STAGES)));
        GT_UNROLL
        for (int k = 0; k < 4; k++) {
            uint32_t dy[4];
            ldmatrix_x4(dy, cells ^ 32 * k);
            GT_UNROLL
            for (int i = 0; i < 4; i++) {
                const float *y = Ch[2 * k + i / 2] + i % 2 * 2, f = part_of(inverses, k) * c[i % 2];
                sums[i % 2] = fma_rn(Element<T>::lo(dy[i]), y[0] * f, sums[i % 2]);
                sums[i % 2] = fma_rn(Element<T>::hi(dy[i]), y[1] * f, sums[i % 2]);
            }
        }
        GT_UNROLL
        for (int e = 0; e < 2; e++) sums[e] *= me.value(me.factor(step, Factors::PRE) + at.row + 8 * e);
    }
    store_row_sums(at, sums, me.cell(me.sums(step, C::E)));
}

/* <x_s, U_s> of a lane's rows.  x is read anew: kept until the second time it would take 16 registers. */
template <class T>
GT_DEV void dots_of(uint32_t tile, const WarpRows& at, const float (&U)[8][4], float (&sums)[2]) {
    const uint32_t cells = at.cells(tile);
    float odd[2] = {};
    sums[0] = sums[1] = 0.0f;
    GT_UNROLL
    for (int k = 0; k < 4; k++) {
        uint32_t x[4];
        ldmatrix_x4(x, cells ^ 32 * k);
        GT_UNROLL
        for (int i = 0; i < 4; i++) {
            const float* u = U[2 * k + i / 2] + i % 2 * 2;
            sums[i % 2] = fma_rn(Element<T>::lo(x[i]), u[0], sums[i % 2]);
            odd[i % 2] = fma_rn(Element<T>::hi(x[i]), u[1], odd[i % 2]);
        }
    }
    sums[0] += odd[0], sums[1] += odd[1];
}

/* dx += Dskip dy, of which of_head is the number where it is one. */
template <class C>
GT_DEV void add_skip(const ChunkGradientBlock<C>& me, const WarpRows& at, int step, float of_head, float (&dx)[8][4]) {
    using E = Element<typename C::T>;
    const uint32_t cells = at.cells(me.stage(step) + C::DY);
    GT_UNROLL
    for (int k = 0; k < 4; k++) {
        uint32_t dy[4];
        ldmatrix_x4(dy, cells ^ 32 * k);
        GT_UNROLL
        for (int i = 0; i < 4; i++) {
            float* to = dx[2 * k + i / 2] + i % 2 * 2;
            to[0] = fma_rn(of_head, E::lo(dy[i]), to[0]), to[1] = fma_rn(of_head, E::hi(dy[i]), to[1]);
        }
    }
}

/* The same with Dskip per channel, and the sums of dy x for dDskip. */
template <class C>
GT_DEV void add_channel_skips(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me, const WarpRows& at,
                              int step, float (&dx)[8][4]) {
    using E = Element<typename C::T>;
    const int h = me.head(p, step), p0 = me.p0(p, step);
    const uint32_t cells = at.cells(me.stage(step));
    GT_UNROLL
    for (int k = 0; k < 4; k++) {
        uint32_t dy[4], x[4];
        float v[4];
        ldmatrix_x4(dy, (cells ^ 32 * k) + C::DY);
        ldmatrix_x4(x, (cells ^ 32 * k) + C::X);
        GT_UNROLL
        for (int n = 0; n < 2; n++) {
            const float2 skip = skips_of(p.in, h, p0 + 16 * k + 8 * n + 2 * at.j);
            float* to = dx[2 * k + n];
            const uint32_t a = dy[2 * n], b = dy[2 * n + 1];
            to[0] = fma_rn(skip.x, E::lo(a), to[0]), to[1] = fma_rn(skip.y, E::hi(a), to[1]);
            to[2] = fma_rn(skip.x, E::lo(b), to[2]), to[3] = fma_rn(skip.y, E::hi(b), to[3]);
            v[2 * n] = fma_rn(E::lo(a), E::lo(x[2 * n]), E::lo(b) * E::lo(x[2 * n + 1]));
            v[2 * n + 1] = fma_rn(E::hi(a), E::hi(x[2 * n]), E::hi(b) * E::hi(x[2 * n + 1]));
        }
        if (p.dskip) store_column_sums(v, me.cell(me.sums(step, C::DSKIP) + CHUNK * at.warp + 16 * k));
    }
}

/* The warp's rows of dx, through shared memory in rows of 16 bytes. */
template <class C>
GT_DEV void store_inputs(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me, const WarpRows& at, int step,
                         const float (&dx)[8][4]) {
    const uint32_t tile = me.smem + C::OUT, cells = at.cells(tile);
    GT_UNROLL
    for (int i = 0; i < 4; i++) {
        uint32_t words[4];
        GT_UNROLL
        for (int n = 0; n < 4; n++) {
            const float* x = dx[2 * i + n / 2] + n % 2 * 2;
            words[n] = Element<typename C::T>::pack(x[0], x[1]);
        }
        stmatrix_x4(cells ^ 32 * i, words);
    }
    sync_warp();
    const int p0 = me.p0(p, step), row0 = 16 * at.warp + lane_id() / 8, piece = lane_id() % 8;
    uint16_t* to = static_cast<uint16_t*>(p.dx) + gt::at(p.dx_at, me.b, me.first, me.head(p, step)) + p0 + 8 * piece;
    GT_UNROLL
    for (int i = 0; i < 4; i++) {
        const int t = row0 + 4 * i;
        if (t < me.tokens && p0 + 8 * piece < p.in.P)
            stg<uint4>(to + t * p.dx_at.t, lds<uint4>(tile + panel_at<128>(t, piece)));
    }
    sync_warp(); /* before the next step's */
}

template <class C>
GT_DEV void make_inputs(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me, const WarpRows& at, int step) {
    using T = typename C::T;
    const int stage = step % C::STAGES, buffer = step % C::M_BUFFERS;
    const uint32_t tiles = me.stage(step);
    float U[8][4];
    wgmma_fence();
    multiply_rows<C>(U, me.smem + C::B, tiles + C::G);
    wgmma_commit();
    const float skip = p.in.Dskip && !p.in.skip_per_channel ? p.in.Dskip[me.head(p, step)] : 0.0f;
    const Power M = power_of_M(me, step);
    const float4 G_inverse = lds<float4>(me.cell(C::STATE_INVERSES + 8 * stage + 4));
    float delta[2], by_G[2], sums[2];
    GT_UNROLL
    for (int e = 0; e < 2; e++) {
        const int s = at.row + 8 * e;
        delta[e] = me.value(me.factor(step, Factors::DELTA) + s) * M.inverse;
        by_G[e] = me.value(me.factor(step, Factors::SUF) + s) * me.value(C::B_INVERSE + s) * M.value;
    }
    wgmma_wait<0>();
    wgmma_pin(U);
    GT_UNROLL
    for (int n = 0; n < 8; n++) {
        GT_UNROLL
        for (int e = 0; e < 4; e++) U[n][e] *= by_G[e / 2] * part_of(G_inverse, n / 2);
    }
    dots_of<T>(tiles + C::X, at, U, sums);
    float both[4] = {sums[0] * delta[0], sums[1] * delta[1]};
    mbarrier_wait(me.smem + C::M_FULL + 8 * buffer, step / C::M_BUFFERS % 2);
    wgmma_pin(U);
    wgmma_fence();
    const uint64_t right = columns_operand<C>(tiles + C::DY);
    GT_UNROLL
    for (int i = 0; i < C::M_TERMS; i++) {
        const uint64_t left = columns_operand<C>(me.smem + C::M + (buffer * C::M_TERMS + i) * C::PANEL);
        GT_UNROLL
        for (int k = 0; k < 4; k++) wgmma<T, Major::MN, Major::MN>(U, down_rows<C>(left, k), down_rows<C>(right, k));
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(U);
    mbarrier_arrive(me.smem + C::M_EMPTY + 8 * buffer);
    dots_of<T>(tiles + C::X, at, U, sums);
    both[2] = sums[0] * M.inverse, both[3] = sums[1] * M.inverse;
    reduce_scatter<4, 4, 1>(both, at.j);
    sts<float>(me.cell(me.sums(step, at.j < 2 ? C::F : C::DIRECT) + at.row + at.j % 2 * 8), both[0]);
    GT_UNROLL
    for (int n = 0; n < 8; n++) {
        GT_UNROLL
        for (int e = 0; e < 4; e++) U[n][e] *= delta[e / 2];
    }
    if (p.in.skip_per_channel)
        add_channel_skips(p, me, at, step, U);
    else if (p.in.Dskip)
        add_skip(me, at, step, skip, U);
    mbarrier_arrive(me.smem + C::EMPTY + 8 * stage);
    if (p.dx) store_inputs(p, me, at, step, U);
}

template <class C>
GT_DEV void inputs_role(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me) {
    const WarpRows at(me.warp);
    StateShare<C> share;
    if (C::M_TERMS == 1) bar_sync(BOUND_BARRIER, 2 * C::GROUP); /* S_MOST */
    GT_NO_UNROLL
    for (int step = 0; step < me.steps; step++) {
        const int stage = step % C::STAGES, parity = step / C::STAGES % 2;
        mbarrier_wait(me.smem + C::FULL + 8 * stage, parity);
        if (me.makes_state() && me.second) mbarrier_wait(me.smem + C::STATE_MADE + 8 * stage, parity);
        {
            uint32_t a[4][4];
            float Ch[8][4];
            const bool is_exact = make_left(me, at, step, 0, share, a);
            wgmma_fence();
            multiply_rows<C>(Ch, me.smem + C::C, me.stage(step) + C::H);
            add_left(me, step, 0, share, a);
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_pin(Ch);
            store_E(me, at, step, share, is_exact, a, Ch);
        }
        if (me.makes_state() && !me.second) mbarrier_wait(me.smem + C::STATE_MADE + 8 * stage, parity);
        make_inputs(p, me, at, step);
    }
    finish_share(p, me, at, 0, share);
}

/* ---- states: the one that the chunk makes, dB, Z ---------------------------------------------------------------- */

/* state <- kept state + sum_t weight_t row_t (B or C)_t^T, in place. */
template <class C>
GT_DEV void make_hopper_state(const ChunkGradientBlock<C>& me, const WarpRows& at, int step) {
    using E = Element<typename C::T>;
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
                rows[k][e] = pack_f16(E::lo(rows[k][e]) * w.x, E::hi(rows[k][e]) * w.y);
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

template <class C>
GT_DEV void states_role(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me) {
    const WarpRows at(me.warp);
    StateShare<C> share;
    GT_NO_UNROLL
    for (int step = 0; step < me.steps; step++) {
        const int stage = step % C::STAGES, parity = step / C::STAGES % 2;
        const uint32_t tiles = me.stage(step);
        mbarrier_wait(me.smem + C::FULL + 8 * stage, parity);
        if (me.makes_state()) make_hopper_state(me, at, step);
        uint32_t a[4][4];
        float Gh[8][4];
        make_left(me, at, step, 1, share, a);
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

/* ---- the kernel ------------------------------------------------------------------------------------------------- */

/* For other architectures it is empty, and bounded to one warp: see has_sm90a. */
template <class T, int N>
GT_KERNEL(GT_SM90A ? 512 : 32, 1)
chunk_gradient_hopper_kernel(const GT_GRID_CONSTANT ChunkGradientParams p) {
#if GT_SM90A
    using C = HopperGradientTraits<T, N>;
    wait_for_chain();
    ChunkGradientBlock<C> me = find_chunk<C>(p);
    me.smem = smem_base_of_tiles();
    if (me.tokens <= 0) {
        if (me.g == 0) clear_sums(p, me.row(p.slots));
        return;
    }
    if (thread_id() < C::STAGES) {
        const uint32_t barriers = me.smem + 8 * thread_id();
        mbarrier_init(barriers + C::FULL, C::GROUP);
        mbarrier_init(barriers + C::EMPTY, C::CONSUMERS);
        mbarrier_init(barriers + C::STATE_MADE, C::GROUP);
        if (thread_id() < C::M_BUFFERS) {
            mbarrier_init(barriers + C::M_FULL, C::GROUP);
            mbarrier_init(barriers + C::M_EMPTY, C::GROUP);
        }
    }
    stage_group<C>(me, p.in, p.in.Bm, p.in.Bm_at, me.first, me.tokens, me.smem + C::B, C::B_INVERSE);
    stage_group<C>(me, p.in, p.in.Cm, p.in.Cm_at, me.first, me.tokens, me.smem + C::C, C::C_INVERSE);
    if (me.makes_state())
        stage_group<C>(me, p.in, me.second ? p.in.Bm : p.in.Cm, me.second ? p.in.Bm_at : p.in.Cm_at, me.neighbour(),
                       me.neighbour_tokens, me.smem + C::OTHER, C::OTHER_INVERSE);
    for (int i = thread_id(); i < (C::OUT - C::M) / 16; i += C::THREADS) /* no pairs with s > t, ever */
        sts<uint4>(me.smem + C::M + 16 * i, {0, 0, 0, 0});
    fence_async_proxy();
    sync_threads();
    const int role = me.warp / 4;
    if (role == 3) {
        give_registers<C::PREPARE_REGISTERS>();
        prepare_role(p, me);
    } else {
        if (role == 0) {
            take_registers<C::PAIRS_REGISTERS>();
            pairs_role(p, me);
        } else if (role == 1) {
            take_registers<C::INPUTS_REGISTERS>();
            inputs_role(p, me);
        } else {
            take_registers<C::STATES_REGISTERS>();
            states_role(p, me);
        }
    }
#else
    (void)p;
    __trap();
#endif
}

} /* namespace ssd */
} /* namespace gt */

#endif
