/* gt/wkv6/forward.cuh - forward on tensor cores: N = V in 32, 64, 128.
 *
 * The pass goes through time in sub-chunks of 16 tokens.  Let c_t = -log2 of the product of the decays before token t
 * of the sub-chunk.  Then
 *     R_t = r_t 2^-c_t                    K_t = k_t 2^c_(t+1)        A = tril(R K^T) + diag(bonus)
 *     y   = scale (R S + A v)             S <- E . (S + K^T v)       E = 2^-c_16
 * The same operands R and K serve the pairs inside the sub-chunk, the output and the state.  2^c grows, so c must be
 * limited.  A hard reset, or 16 decays below 2^-4, bring c_16 of a channel to STRONG_DECAY_LIMIT.  Then the channel's
 * group of 16 channels takes the strong-decay path for that sub-chunk.  On this path K holds k_t prod_{m>t} d_m,
 * running products compute the group's share of A, and S is scaled before the update.  Neither path clamps a decay.
 * On compute capability 9.0, N = 128 in 16 bits has a kernel of its own: forward_hopper_kernel (forward_sm90.cuh).
 *
 * grid: ceil(sequences*H*segments/HEADS).  For packed sequences the grid is smaller (most_blocks), and blocks take work
 * in turn (take_work).  For each of its HEADS heads a block has two roles:
 *   - GROUPS producer warps, with 16 channels each.  They copy the inputs by cp.async, AHEAD sub-chunks ahead, and
 *     compute R, K, E and the bonus.  A lane has 2 channels of 4 consecutive tokens; a running sum takes four shuffles
 *     (scan_quads).
 *   - N / COLUMNS consumer warps.  They hold the state and compute A, y and the new state.
 * The roles share two buffers, each with two mbarriers: producers arrive at FULL, consumers at EMPTY.
 *
 * Lanes: g = lane / 4 and j = lane % 4, as device.cuh defines them for fragments.
 * State: a consumer warp holds its part of S^T in accumulators, MT x NT tiles of 16 x 8: 64 registers, 32 at N = 32.  A
 * pair of accumulators is also the B operand of R S, without a move, because R permutes the inner index in the same
 * way.
 * Accuracy: products are of tf32, which has 11 bits and the range of fp32.  R, K and A are rounded to tf32 (2^-11), S
 * is truncated (2^-10), and 16-bit v is exact.  The rounding of y to bf16 is larger, 2^-8; to f16 it is about as large.
 * fp32: see below.
 * Columns of a consumer warp: column c of tile i stands for value 2 TILES (c/2) + 2i + c%2, so that a lane ends with 2
 * TILES adjacent outputs.  v is stored in this permuted order.
 * Rows of A and y: row g is token 2g, row g + 8 is token 2g + 1.  R is stored as fragments of 16 bytes, two tokens by
 * two channels.  A fragment is the left operand of one lane.
 * shared, per head and buffer: R, [8, N/2+4] fragments; K, [16, N+8] fp32; v, [16, N+8]; E, [N]; bonus, [16, GROUPS]; A
 * of strong-decay groups.  To avoid bank conflicts, rows of K whose bit 2 is set exchange their columns by xor 24.  At
 * N = 64 this is 16 KB; two buffers and the rings are 70 KB.
 * tensor cores per sub-chunk and head, N = 64: 2 x (16 + 32 + 8 + 32) m16n8k8.
 * bytes: every input once, y once, states and checkpoints once.  The order of sums is fixed, so results are
 * deterministic.
 *
 * fp32 activations (TF32X3): three products replace every product.  x = hi + lo, where hi is the upper 11 bits of x and
 * lo the rest; both are tf32.  The sum
 *     a b ~ a_hi b_hi + a_lo b_hi + a_hi b_lo
 * drops 2^-21 of a b.  The tensor core ignores bits below tf32, so x itself serves as the operand hi.
 *   - Shared memory holds operands once, in fp32.  Readers split them by a mask and a subtraction, and split S in the
 *     same way.  Storing both terms would double shared memory and save only a tenth of the instructions.
 *   - Tensor cores round sums towards zero.  So the small products have their own accumulators, and tensor cores never
 *     accumulate into S: a sub-chunk's sum starts at zero, and an fp32 addition adds it to S (update_state_3xtf32).
 *   - E near 1 is stored as keep and factor (Scale), not rounded to fp32.  After 4096 sub-chunks that rounding would
 *     show in the state.
 *   - For c < 64 the error of c is at most 2^-19, and the relative error of 2^c is 2e-6.  Errors of this size occur
 *     only where products of R and K are tiny.  Neighbouring tokens have larger products, but their values of c share
 *     all roundings except the last ones.  The measured error of y and of states is 7e-7.
 * v lies in fragments, as R does (value_fragment), in the order of a left operand.
 * shared, N = 64: a buffer is 18 KB; two buffers and the rings, 2 sub-chunks deep, are 74 KB.  N = 128: 108 KB.
 * registers: S 64, y with the small products 32, A 16. */
#ifndef GT_WKV6_FORWARD_CUH
#define GT_WKV6_FORWARD_CUH

#include "prepare.cuh"

namespace gt {
namespace wkv6 {

/* ---- consumer warps -------------------------------------------------------------------------------------------- */

/* A consumer warp: the columns of S^T that it owns, and its addresses in shared memory. */
template <class C>
struct ConsumerWarp {
    float S[C::MT][C::NT][4];
    int g, j;    /* lane / 4, lane % 4 */
    int column0; /* the first of the warp's values */
    /* Addresses in buffer 0.  Entry i serves columns 8i .. 8i+7 of every 32 columns, or these columns xor 24. */
    uint32_t row[4];    /* K, row g, columns 2j */
    uint32_t column[4]; /* K, row 2j (fp32: 6 - 2j), column g */
    uint32_t fragments; /* R, tokens 2g and 2g + 1, channels 2j and 2j + 1 */
    uint32_t values_left, values_right, bonus, scales, pairs, flags;
    uint32_t full, empty; /* mbarriers; not a Ring, because in the unrolled loop the buffer is a constant */

    /* Returns the pair of tokens that the lane multiplies in the update.  In fp32 the pair is 3 - j.  With j the
     * compiler would load v once for two operands, which then need it in different registers. */
    GT_METHOD int token_pair() const { return C::TF32X3 ? 3 - j : j; }

    GT_METHOD void set_addresses(uint32_t buffer0) {
        g = lane_id() / 4;
        j = lane_id() % 4;
        GT_UNROLL
        for (int i = 0; i < 4; i++) {
            row[i] = buffer0 + C::K + 4 * (g * C::PITCH + 2 * j + 8 * (i ^ (g & 4 ? 3 : 0)));
            column[i] = buffer0 + C::K + 4 * (2 * token_pair() * C::PITCH + g + 8 * (i ^ (token_pair() & 2 ? 3 : 0)));
        }
        fragments = buffer0 + C::R + 16 * (g * C::FRAGMENTS + j);
        /* Matrices of 8 tokens by 8 values.  Their order suits v both as left operand and as right operand. */
        const int matrix = lane_id() / 8, s = lane_id() % 8;
        if constexpr (C::TF32X3) {
            values_left = buffer0 + C::VALUES + value_fragment<C>(2 * token_pair(), column0) + 16 * g;
            values_right = buffer0 + C::VALUES + value_fragment<C>(2 * j, column0) + 16 * g;
        } else {
            values_left = buffer0 + C::VALUES + 2 * ((s + matrix / 2 * 8) * C::PITCH + column0 + matrix % 2 * 8);
            values_right = buffer0 + C::VALUES + 2 * ((s + matrix % 2 * 8) * C::PITCH + column0 + matrix / 2 * 8);
        }
        bonus = buffer0 + C::BONUS + 4 * 2 * g * C::GROUPS;
        scales = buffer0 + C::SCALE + (C::TF32X3 ? 16 : 8) * j;
        pairs = buffer0 + C::PAIRS + 4 * (SUB_CHUNK * 2 * g + 2 * j);
        flags = buffer0 + C::STRONG_DECAY;
        full = buffer0 + C::FULL;
        empty = buffer0 + C::EMPTY;
    }

    /* Gathers 2 TILES adjacent values of channel 8 nt + 2j + g % 2, from gathered_column() on.  The lane swaps values
     * with lane ^ 4. */
    GT_METHOD void gather_row(int nt, float (&x)[2 * C::TILES]) const {
        const bool odd = g & 1;
        GT_UNROLL
        for (int i = 0; i < C::TILES; i++) {
            const float even_row = S[i / 2][nt][2 * (i % 2)];
            const float odd_row = S[i / 2][nt][2 * (i % 2) + 1];
            const float other = shfl_xor(odd ? even_row : odd_row, 4);
            x[2 * i] = odd ? other : even_row;
            x[2 * i + 1] = odd ? odd_row : other;
        }
    }

    GT_METHOD int gathered_column() const { return column0 + 2 * C::TILES * (g / 2); }

    GT_METHOD void store(float* state) const {
        state += (int64_t)(2 * j + g % 2) * C::N + gathered_column();
        GT_UNROLL
        for (int nt = 0; nt < C::NT; nt++) {
            float x[2 * C::TILES];
            gather_row(nt, x);
            store_row<C::TILES>(state + 8 * nt * C::N, x);
        }
    }

    /* Stores the state as bf16.  A transpose gives each lane adjacent values of channel 8 nt + g of every tile. */
    GT_METHOD void store(bf16* state, bool of_lo = false) const {
        state += g * C::N + column0 + 2 * C::TILES * j;
        GT_UNROLL
        for (int nt = 0; nt < C::NT; nt++) {
            struct alignas(4 * C::TILES) {
                uint32_t words[C::TILES]; /* two adjacent values each */
            } row;
            GT_UNROLL
            for (int i = 0; i < C::TILES; i++) {
                const float lo = S[i / 2][nt][2 * (i % 2)], hi = S[i / 2][nt][2 * (i % 2) + 1];
                row.words[i] = movmatrix_trans(of_lo ? bf16_lo_pair(lo, hi) : pack_bf16(lo, hi));
            }
            stg(state + 8 * nt * C::N, row);
        }
    }

    /* Multiplies columns 2j and 2j + 1 of a tile by the decays of their channels. */
    GT_METHOD void scale(int nt, float2 decay) {
        GT_UNROLL
        for (int x = 0; x < C::MT * 4; x++) S[x / 4][nt][x % 4] *= x % 2 ? decay.y : decay.x;
    }

    /* Updates an fp32 state without loss of accuracy: S <- E . (S + added) or, with scale_first, S <- E . S + added.  E
     * is a sum of two terms (Scale). */
    GT_METHOD void rescale_and_add(int nt, float4 scale, const float (&added)[C::MT][4], bool scale_first) {
        GT_UNROLL
        for (int x = 0; x < C::MT * 4; x++) {
            const float factor = x % 2 ? scale.y : scale.x, keep = x % 2 ? scale.w : scale.z;
            float& element = S[x / 4][nt][x % 4];
            const float add = added[x / 4][x % 4];
            element = scale_first ? rescale(keep, factor, element, add) : rescale(keep, factor, element + add, 0.0f);
        }
    }

    GT_METHOD void load(const float* state) {
        GT_UNROLL
        for (int x = 0; x < C::MT * C::NT * 4; x++) {
            const int mt = x / 4 / C::NT, nt = x / 4 % C::NT, e = x % 4;
            const int i = 2 * mt + e / 2, n = 8 * nt + 2 * j + e % 2;
            const int column = column0 + 2 * C::TILES * (g / 2) + 2 * i + g % 2;
            S[mt][nt][e] = state ? state[(int64_t)n * C::N + column] : 0.0f;
        }
    }
};

/* Flags of the groups that take the strong-decay path, in one register.  Only the fp32 kernels use this form, since
 * they have no registers to spare. */
struct StrongMask {
    uint32_t bits;
    template <int COUNT>
    GT_METHOD StrongMask(const uint32_t (&flags)[COUNT]) : bits(0) {
        GT_UNROLL
        for (int i = 0; i < COUNT; i++) bits |= flags[i] << i;
    }
    GT_METHOD bool operator[](int group) const { return bits >> group & 1; }
};

template <class C>
using StrongGroups = typename std::conditional<C::TF32X3, StrongMask, const uint32_t (&)[C::GROUPS]>::type;

/* Unpacks v, loaded as transposed matrices of 8 tokens each, into two left operands. */
template <class T>
GT_DEV void unpack_left(const uint32_t (&x)[4], float (&v)[2][4]) {
    using E = Element<T>;
    GT_UNROLL
    for (int half = 0; half < 2; half++) {
        v[half][0] = E::lo(x[2 * half]);
        v[half][1] = E::lo(x[2 * half + 1]);
        v[half][2] = E::hi(x[2 * half]);
        v[half][3] = E::hi(x[2 * half + 1]);
    }
}

/* ---- the update of the state -------------------------------------------------------------------------------- */

/* S^T <- (S^T + v^T K) . E.  With STRONG_DECAY the groups on the strong-decay path compute S^T . E + v^T K instead.
 * state_sub_chunk has loaded v already, but a left operand needs v in other registers.  Loading v again costs less than
 * moving it. */
template <class C, bool STRONG_DECAY>
GT_DEV void update_state_rounded(ConsumerWarp<C>& me, int offset, StrongGroups<C> strong) {
    float v[C::MT][2][4];
    GT_UNROLL
    for (int mt = 0; mt < C::MT; mt++) {
        uint32_t x[4];
        ldmatrix_x4_trans(x, me.values_left + offset + 32 * mt);
        unpack_left<typename C::T>(x, v[mt]);
    }
    GT_UNROLL
    for (int nt = 0; nt < C::NT; nt++) {
        const float2 scale = lds<float2>(me.scales + offset + 32 * nt);
        if (STRONG_DECAY && strong[nt / 2]) me.scale(nt, scale);
        GT_UNROLL
        for (int half = 0; half < 2; half++) {
            const uint32_t address = me.column[nt % 4] + offset + 128 * (nt / 4) + 32 * half * C::PITCH;
            const float k0 = lds<float>(address), k1 = lds<float>(address + 4 * C::PITCH);
            GT_UNROLL
            for (int mt = 0; mt < C::MT; mt++) mma_tf32(me.S[mt][nt], v[mt][half], k0, k1);
        }
        if (!STRONG_DECAY || !strong[nt / 2]) me.scale(nt, scale);
    }
}

/* Computes the sum that a sub-chunk adds to a tile of an fp32 state, small products first.  The sum starts at zero; the
 * caller adds it to S in fp32.  If tensor cores accumulated into S, their rounding towards zero would lose far more
 * over a long memory. */
template <int MT>
GT_DEV void multiply_3xtf32(float (&added)[MT][4], const float (&v)[MT][2][4], const float (&lo)[MT][2][4],
                            const float (&k)[2][2]) {
    GT_UNROLL
    for (int i = 0; i < 2 * MT; i++) {
        const int mt = i % MT, half = i / MT;
        mma_tf32(added[mt], lo[mt][half], k[half][0], k[half][1]);
        mma_tf32(added[mt], v[mt][half], tf32_lo(k[half][0]), tf32_lo(k[half][1]));
    }
    GT_UNROLL
    for (int i = 0; i < 2 * MT; i++) mma_tf32(added[i % MT], v[i % MT][i / MT], k[i / MT][0], k[i / MT][1]);
}

/* Updates an fp32 state.  All operands are split, so none loses bits to tf32. */
template <class C, bool STRONG_DECAY>
GT_DEV void update_state_3xtf32(ConsumerWarp<C>& me, int offset, StrongGroups<C> strong) {
    float v[C::MT][2][4], lo[C::MT][2][4];
    GT_UNROLL
    for (int i = 0; i < 2 * C::MT; i++) {
        lds_words(v[i / 2][i % 2], me.values_left + offset + value_fragment<C>(8 * (i % 2), 4 * (i / 2)));
        set_lo<true>(v[i / 2][i % 2], lo[i / 2][i % 2]);
    }
    GT_UNROLL
    for (int nt = 0; nt < C::NT; nt++) {
        float added[C::MT][4] = {}, k[2][2];
        GT_UNROLL
        for (int i = 0; i < 4; i++)
            k[i / 2][i % 2] =
                lds<float>(me.column[nt % 4] + offset + 128 * (nt / 4) + 4 * C::PITCH * (8 * (i / 2) + i % 2));
        multiply_3xtf32<C::MT>(added, v, lo, k);
        const float4 scale = lds<float4>(me.scales + offset + 64 * nt);
        me.rescale_and_add(nt, scale, added, STRONG_DECAY && strong[nt / 2]);
    }
}

template <class C, bool STRONG_DECAY>
GT_DEV void update_state_warp(ConsumerWarp<C>& me, int offset, StrongGroups<C> strong) {
    if constexpr (C::TF32X3) {
        update_state_3xtf32<C, STRONG_DECAY>(me, offset, strong);
    } else {
        update_state_rounded<C, STRONG_DECAY>(me, offset, strong);
    }
}

/* ---- the output --------------------------------------------------------------------------------------------- */

/* Adds the part of A that a strong-decay group has stored in shared memory at `pairs`.  A[i] holds tokens 2g and 2g + 1
 * by tokens 8i + 2j and 8i + 2j + 1. */
GT_DEV void add_strong_pairs(uint32_t pairs, float (&A)[2][4]) {
    GT_UNROLL
    for (int e = 0; e < 4; e++) { /* tile e / 2, token 2g + e % 2 */
        const float2 two = lds<float2>(pairs + 4 * (SUB_CHUNK * (e % 2) + 8 * (e / 2)));
        A[e / 2][2 * (e % 2)] += two.x;
        A[e / 2][2 * (e % 2) + 1] += two.y;
    }
}

/* Turns A into an operand: keeps the part below the diagonal, and puts the bonus of tokens 2g and 2g + 1 on the
 * diagonal. */
template <class C>
GT_DEV void complete_pairs(int g, int j, const float (&bonus)[2], float (&A)[2][4]) {
    GT_UNROLL
    for (int i = 0; i < 2; i++) {
        const bool below = j + 4 * i < g, on = j + 4 * i == g;
        A[i][0] = stored_operand<C>(below ? A[i][0] : on ? bonus[0] : 0.0f);
        A[i][1] = stored_operand<C>(below ? A[i][1] : 0.0f);
        A[i][2] = stored_operand<C>(below || on ? A[i][2] : 0.0f);
        A[i][3] = stored_operand<C>(below ? A[i][3] : on ? bonus[1] : 0.0f);
    }
}

/* Multiplies y by scale if is_scaled is true.  In nearly every call scale is 1, and is_scaled is false.  Kernels
 * compute is_scaled before their loop.  Inside the loop every sub-chunk would wait for a load of the constant. */
template <int TILES>
GT_DEV void scale_y(bool is_scaled, float scale, float (&y)[TILES][4]) {
    if (!is_scaled) return;
    GT_UNROLL
    for (int i = 0; i < 4 * TILES; i++) y[i / 4][i % 4] *= scale;
}

/* A consumer warp's work on one sub-chunk: computes y of 16 tokens in y[tile][4], and updates S.
 * STRONG_DECAY: some groups take the strong-decay path. */
template <class C, bool STRONG_DECAY>
GT_DEV void state_sub_chunk(ConsumerWarp<C>& me, int offset, StrongGroups<C> strong, float (&y)[C::TILES][4]) {
    using E = Element<typename C::T>;

    /* A = R K^T and y = R S; then y += A v */
    float A[2][4] = {}, A_low[2][4] = {}, y_low[C::TILES][4] = {};
    GT_UNROLL
    for (int kk = 0; kk < C::NT; kk++) {
        const float4 fragment = lds<float4>(me.fragments + offset + 64 * kk);
        const float r[4] = {fragment.x, fragment.y, fragment.z, fragment.w};
        float r_lo[4];
        set_lo<C::TF32X3>(r, r_lo);
        if (!STRONG_DECAY || !strong[kk / 2]) {
            const uint32_t row = me.row[kk % 4] + offset + 128 * (kk / 4);
            const float2 k0 = lds<float2>(row), k1 = lds<float2>(row + 8 * C::PITCH * 4);
            mma_3xtf32<C::TF32X3>(A[0], A_low[0], r, r_lo, k0.x, k0.y);
            mma_3xtf32<C::TF32X3>(A[1], A_low[1], r, r_lo, k1.x, k1.y);
        }
        GT_UNROLL
        for (int i = 0; i < C::TILES; i++)
            mma_3xtf32<C::TF32X3>(y[i], y_low[i], r, r_lo, me.S[i / 2][kk][2 * (i % 2)],
                                  me.S[i / 2][kk][2 * (i % 2) + 1]);
    }
    GT_UNROLL
    for (int i = 0; C::TF32X3 && i < 8; i++) A[i / 4][i % 4] += A_low[i / 4][i % 4];
    GT_UNROLL
    for (int i = 0; STRONG_DECAY && i < C::GROUPS; i++)
        if (strong[i]) add_strong_pairs(me.pairs + offset + 4 * SUB_CHUNK * SUB_CHUNK * i, A);
    float words[2 * C::GROUPS], bonus[2] = {0.0f, 0.0f};
    lds_words(words, me.bonus + offset);
    GT_UNROLL
    for (int i = 0; i < 2 * C::GROUPS; i++) bonus[i / C::GROUPS] += words[i];
    complete_pairs<C>(me.g, me.j, bonus, A);
    const float left[2][4] = {{A[0][0], A[0][2], A[0][1], A[0][3]}, {A[1][0], A[1][2], A[1][1], A[1][3]}};
    if constexpr (C::TF32X3) {
        GT_UNROLL
        for (int i = 0; i < 2; i++) {
            float lo[4];
            set_lo<true>(left[i], lo);
            GT_UNROLL
            for (int mt = 0; mt < C::MT; mt++) {
                float x[4];
                lds_words(x, me.values_right + offset + value_fragment<C>(8 * i, 4 * mt));
                GT_UNROLL
                for (int e = 0; e < 2; e++) {
                    const float b0 = tf32_hi(x[e]), b1 = tf32_hi(x[e + 2]);
                    mma_tf32(y[2 * mt + e], left[i], b0, b1);
                    mma_tf32(y_low[2 * mt + e], lo, b0, b1);
                    mma_tf32(y_low[2 * mt + e], left[i], x[e] - b0, x[e + 2] - b1);
                }
            }
        }
        GT_UNROLL
        for (int i = 0; i < 4 * C::TILES; i++) y[i / 4][i % 4] += y_low[i / 4][i % 4];
    } else {
        GT_UNROLL
        for (int mt = 0; mt < C::MT; mt++) {
            uint32_t x[4];
            ldmatrix_x4_trans(x, me.values_right + offset + 32 * mt);
            GT_UNROLL
            for (int i = 0; i < 4; i++) mma_tf32(y[2 * mt + i / 2], left[i % 2], E::lo(x[i]), E::hi(x[i]));
        }
    }
    update_state_warp<C, STRONG_DECAY>(me, offset, strong);
}

/* ---- mixed calls: the sum of y and ssd's y ------------------------------------------------------------------- */

/* Where the channels of a lane lie at the first token of a span: offsets in the tensors of Mix, and the channel.
 * volatile: local memory keeps them until y is stored, because no registers are left. */
struct MixPlace {
    volatile int64_t ssm, residual, y;
    volatile int channel;

    /* column: the lane's first column in its head. */
    GT_METHOD void set(const TensorParams& p, const HeadSpan& span, int column) {
        const Mix& m = p.mix;
        const int c = span.h * p.in.V + column;
        channel = c;
        ssm = ssm_offset(m, span.b, span.start, c);
        residual = offset_of(m.residual_stride, span.b, span.start, span.h) + column;
        y = offset_of(m.y_stride, span.b, span.start, span.h) + column;
    }
};

/* Turns y of a lane's two tokens, `first` and first + 1 of the span, into the sum.  The lane's columns are adjacent.
 * No registers are left to load the terms before y is known.  So the loads of TOGETHER tokens are in flight at once.
 * The lines of later tokens are fetched to L2, because a wait for global memory in each sub-chunk took longer than the
 * rest of the kernel. */
template <class C>
GT_DEV void mix_sub_chunk(const Mix& m, const MixPlace& place, int first, int tokens, float (&y)[C::TILES][4]) {
    using T = typename C::T;
    using Four = Vec<T, 4>;
    constexpr int FOURS = C::TILES / 2, TOGETHER = C::N == 128 || C::TF32X3 ? 1 : 2, LATER = 2 * SUB_CHUNK;
    const T* const ssm_row = static_cast<const T*>(m.ssm) + place.ssm;
    const T* const residual_row = m.residual ? static_cast<const T*>(m.residual) + place.residual : nullptr;
    const float4 ones = {1.0f, 1.0f, 1.0f, 1.0f};
    GT_UNROLL
    for (int half0 = 0; half0 < 2; half0 += TOGETHER) {
        Four ssm[TOGETHER][FOURS] = {}, rest[TOGETHER][FOURS] = {};
        GT_UNROLL
        for (int i = 0; i < TOGETHER; i++) {
            const int64_t token = first + half0 + i;
            if (token >= tokens) continue;
            GT_UNROLL
            for (int k = 0; k < FOURS; k++) ssm[i][k] = ldg<Four>(ssm_row + token * m.ssm_stride.t + 4 * k);
            if (residual_row) {
                GT_UNROLL
                for (int k = 0; k < FOURS; k++)
                    rest[i][k] = ldg<Four>(residual_row + token * m.residual_stride.t + 4 * k);
            }
            if (token + LATER >= tokens) continue;
            prefetch(ssm_row + (token + LATER) * m.ssm_stride.t);
            if (residual_row) prefetch(residual_row + (token + LATER) * m.residual_stride.t);
        }
        GT_UNROLL
        for (int k = 0; k < FOURS; k++) {
            const int c = place.channel + 4 * k;
            const float4 of_wkv = m.gain_wkv ? ldg<float4>(m.gain_wkv + c) : ones;
            const float4 of_ssm = m.gain_ssm ? ldg<float4>(m.gain_ssm + c) : ones;
            const float wkv_gain[4] = {of_wkv.x, of_wkv.y, of_wkv.z, of_wkv.w};
            const float ssm_gain[4] = {of_ssm.x, of_ssm.y, of_ssm.z, of_ssm.w};
            GT_UNROLL
            for (int i = 0; i < TOGETHER; i++) {
                const int half = half0 + i;
                const int64_t token = first + half;
                if (token >= tokens) continue;
                float x[4];
                GT_UNROLL
                for (int n = 0; n < 4; n++) x[n] = y[2 * k + n / 2][2 * half + n % 2];
                if (m.y) {
                    Four alone;
                    alone.set(x);
                    stg<Four>(static_cast<T*>(m.y) + place.y + token * m.y_stride.t + 4 * k, alone);
                }
                GT_UNROLL
                for (int n = 0; n < 4; n++)
                    y[2 * k + n / 2][2 * half + n % 2] =
                        fma_rn(wkv_gain[n], x[n], fma_rn(ssm_gain[n], ssm[i][k].get(n), rest[i][k].get(n)));
            }
        }
    }
}

/* ---- the kernel --------------------------------------------------------------------------------------------- */

/* MIXES: y is the sum of a mixed call.  Such calls have kernels of their own, because the sum needs registers that the
 * others do not have. */
template <class C, bool MIXES>
GT_DEV void consume(const TensorParams& p, uint32_t smem, int work) {
    using E = Element<typename C::T>;
    const int warp = warp_id() - C::PRODUCER_WARPS, sub = C::HEADS == 1 ? 0 : warp / C::PARTS;
    ConsumerWarp<C> me;
    me.column0 = warp % C::PARTS * C::COLUMNS;
    me.set_addresses(smem + sub * C::HEAD_BUFFER);
    const HeadSpan span = span_of<C, false>(p, work, sub);
    me.load(first_state<C>(p, span, p.state_in_shared ? span.h : span.head));
    typename C::State* checkpoints = static_cast<typename C::State*>(p.checkpoints);
    if (checkpoints) checkpoints += span.chunk * C::N * C::N;
    typename C::T* y_row = static_cast<typename C::T*>(p.y) +
                           offset_of(p.y_stride, span.b, span.start + 2 * me.g, span.h) + me.column0 +
                           2 * C::TILES * me.j;

    MixPlace place;
    if (MIXES) place.set(p, span, me.column0 + 2 * C::TILES * me.j);

    /* warp_any() makes the compiler keep the answer in a register, which fp32 cannot spare. */
    const bool scales = p.in.scale != 1.0f, is_scaled = C::TF32X3 ? scales : warp_any(scales);
    constexpr int UNROLLED = C::TF32X3 && C::N == 64 ? 1 : 2; /* fp32: two unrolled sub-chunks would spill */
    for (int sub_chunk = 0; sub_chunk < span.sub_chunks; sub_chunk += UNROLLED) {
        if (checkpoints && sub_chunk % SUB_CHUNKS == 0) {
            typename C::State* checkpoint = checkpoints + sub_chunk / SUB_CHUNKS * C::N * C::N;
            me.store(checkpoint);
            if constexpr (C::KEEPS_LO) me.store(checkpoint + p.lo_terms, true);
        }
        if (p.snapshots.data && sub_chunk > 0 && sub_chunk % SUB_CHUNKS == 0)
            if (float* to = snapshot_of<C>(p, work_of<C>(smem), sub, SUB_CHUNK * sub_chunk)) me.store(to);
        GT_UNROLL
        for (int i = 0; i < UNROLLED; i++) {
            if (sub_chunk + i >= span.sub_chunks) break;
            const int buffer = UNROLLED == 1 ? sub_chunk % 2 : i;
            float y[C::TILES][4] = {};
            mbarrier_wait(me.full + buffer * C::BUFFER, sub_chunk / 2 % 2);
            uint32_t strong[C::GROUPS], any = 0;
            lds_words(strong, me.flags + buffer * C::BUFFER);
            GT_UNROLL
            for (int k = 0; k < C::GROUPS; k++) any |= strong[k];
            if (any) {
                state_sub_chunk<C, true>(me, buffer * C::BUFFER, strong, y);
            } else {
                state_sub_chunk<C, false>(me, buffer * C::BUFFER, strong, y);
            }
            mbarrier_arrive(me.empty + buffer * C::BUFFER);
            scale_y(is_scaled, p.in.scale, y);
            if (MIXES) mix_sub_chunk<C>(p.mix, place, (sub_chunk + i) * SUB_CHUNK + 2 * me.g, span.tokens, y);
            GT_UNROLL
            for (int half = 0; half < 2; half++) {
                const bool inside = (sub_chunk + i) * SUB_CHUNK + 2 * me.g + half < span.tokens;
                if constexpr (C::TF32X3) {
                    float x[2 * C::TILES];
                    GT_UNROLL
                    for (int k = 0; k < 2 * C::TILES; k++) x[k] = y[k / 2][2 * half + k % 2];
                    if (inside) store_row<C::TILES>(y_row, x);
                } else {
                    uint32_t words[C::TILES];
                    GT_UNROLL
                    for (int k = 0; k < C::TILES; k++) words[k] = E::pack(y[k][2 * half], y[k][2 * half + 1]);
                    if constexpr (C::TILES == 4) {
                        if (inside) stg<uint4>(y_row, {words[0], words[1], words[2], words[3]});
                    } else {
                        if (inside) stg<uint2>(y_row, {words[0], words[1]});
                    }
                }
                y_row += half ? (SUB_CHUNK - 1) * p.y_stride.t : p.y_stride.t;
            }
        }
    }
    if (p.snapshots.data)
        if (float* to = snapshot_of<C>(p, work_of<C>(smem), sub, INT32_MAX)) me.store(to);
    /* Compute the span again: no registers are left to keep it over the loop. */
    const HeadSpan same = span_of<C, false>(p, work_of<C>(smem), sub);
    if (float* to = last_state<C>(p, same, same.ends)) me.store(to);
}

template <class C, bool MIXES>
GT_DEV void forward_tensor(const TensorParams& p) {
#if GT_SM80_KERNELS
    const uint32_t smem = smem_base();
    init_work<C>(smem, block_x());
    if (warp_id() < C::PRODUCER_WARPS) { /* producer warps read no output of earlier kernels in the chain */
        take_work<C>(p, smem, [&](int work) { produce<C, false>(p, smem, work); });
    } else {
        wait_for_chain();
        take_work<C>(p, smem, [&](int work) { consume<C, MIXES>(p, smem, work); });
    }
#else
    (void)p;
    __trap();
#endif
}

template <class C>
GT_KERNEL(C::THREADS, C::N == 128 ? 1 : 2)
forward_tensor_kernel(const GT_GRID_CONSTANT TensorParams p) {
    forward_tensor<C, false>(p);
}

template <class C>
GT_KERNEL(C::THREADS, C::N == 128 ? 1 : 2)
forward_mixed_kernel(const GT_GRID_CONSTANT TensorParams p) {
    forward_tensor<C, true>(p);
}

} /* namespace wkv6 */
} /* namespace gt */

#endif
