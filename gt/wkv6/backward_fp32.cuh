/* gt/wkv6/backward_fp32.cuh - backward of a chunk: the products of fp32 activations.  backward.cuh explains the
 * symbols.
 *
 * Three tf32 products replace every product, as in forward (TF32X3).  Operands are split as they are read.  Differences
 * from the kernels for 16 bits:
 *   - X and Z are tokens by channels.  S, G, R and K are right operands there, and left operands for dv, which is
 *     values by tokens.  So each operand is read in the order of its registers.  The warps of X compute C once and
 *     store it for Z, which needs C transposed.  A fragment of two tokens by two tokens serves both.
 *   - G overwrites S in shared memory as soon as S has been read.  rowsum(S . G) is computed here, not in the reverse
 *     state pass.
 *   - r, k and w are read from global memory again at the end.
 *   - Most loops are not unrolled.  Unrolled code exceeds the instruction cache: 44 % of the samples of a profile
 *     waited for it.
 * Products have 16 inner indices, in two steps of 8.  Rows g and g + 8 are tokens (values) 2g and 2g + 1.  Inner
 * indices j and j + 4 are neighbours.  Tiles 2m and 2m + 1 of X and Z have the even and the odd channels of 16m ... 16m
 * + 15.  So a lane has 4 adjacent channels of these 16, from 4j on.
 * shared, N = 64: R, K 32 KB; v, dy 32 KB; S and then G 16 KB; C 10 KB; vectors 9 KB; together 98 KB.
 * tensor cores per sub-chunk, N = 64, m16n8k8: 3 x (64 for S dy + 64 for G v + 40 for C + 80 for X and Z + 40 for A +
 * 104 for dv).
 * bytes: as many elements as in 16 bits, of 4 bytes each; also r, k, w and G once more from L2.  Together 3.3 KB per
 * token and head. */
#ifndef GT_WKV6_BACKWARD_FP32_CUH
#define GT_WKV6_BACKWARD_FP32_CUH

#include "backward_strong_decay.cuh"

namespace gt {
namespace wkv6 {

/* ---- operands in two terms ---------------------------------------------------------------------------------- */

template <int COUNT>
struct HiLo {
    float hi[COUNT], lo[COUNT]; /* hi: the part of a number that tensor cores read; lo: the rest */

    GT_METHOD void set(int i, float x) {
        hi[i] = tf32_hi(x);
        lo[i] = x - hi[i];
    }
    GT_METHOD void set4(int i, float4 x) { set(i, x.x), set(i + 1, x.y), set(i + 2, x.z), set(i + 3, x.w); }

    /* Splits numbers that are loaded in another order than the operand needs.  hi comes from a subtraction instead of a
     * mask.  The compiler knows which bits the tensor core drops, so it would remove the mask and then move x for every
     * product. */
    GT_METHOD void reorder4(int i, float4 x) {
        set4(i, x);
        hi[i] = x.x - lo[i], hi[i + 1] = x.y - lo[i + 1];
        hi[i + 2] = x.z - lo[i + 2], hi[i + 3] = x.w - lo[i + 3];
    }
};

/* Operands of two steps of 8 inner indices: element e of a step is at [4 step + e] for a left operand, [2 step + e] for
 * a right one. */
using HiLoLeft = HiLo<8>;
using HiLoRight = HiLo<4>;

/* sum = a b.  The small products come first, because tensor cores truncate each term at the precision of the current
 * sum. */
GT_DEV void mma_16(float (&sum)[4], const HiLoLeft& a, const HiLoRight& b) {
    const auto add = [&](const float(&x)[8], const float(&y)[4]) {
        GT_UNROLL
        for (int s = 0; s < 2; s++) {
            const float left[4] = {x[4 * s], x[4 * s + 1], x[4 * s + 2], x[4 * s + 3]};
            mma_tf32(sum, left, y[2 * s], y[2 * s + 1]);
        }
    };
    GT_UNROLL
    for (int e = 0; e < 4; e++) sum[e] = 0.0f;
    add(a.lo, b.hi);
    add(a.hi, b.lo);
    add(a.hi, b.hi);
}

/* c += a b */
GT_DEV void add_mma_16(float (&c)[4], const HiLoLeft& a, const HiLoRight& b) {
    float sum[4];
    mma_16(sum, a, b);
    GT_UNROLL
    for (int e = 0; e < 4; e++) c[e] += sum[e];
}

/* Loads 16 columns of two adjacent rows as a left operand.  A lane has 4 adjacent values of each row; row0 and row1 are
 * the addresses of its values. */
GT_DEV void load_two_rows(uint32_t row0, uint32_t row1, HiLoLeft& a) {
    const float4 x = lds<float4>(row0), y = lds<float4>(row1);
    a.reorder4(0, {x.x, y.x, x.y, y.y});
    a.reorder4(4, {x.z, y.z, x.w, y.w});
}

/* ---- X and Z ------------------------------------------------------------------------------------------------ */

/* X or Z of a sub-chunk, tokens by channels. */
template <class C>
struct RowSums {
    float tile[C::GROUPS][2][4];
};

/* sum = the tokens of the warp's sub-chunk at `from` (dy or v) times the slice of the state (S or G). */
template <class C>
GT_DEV void rows_times_state(const BackwardBlock<C>& me, int from, RowSums<C>& sum) {
    const int swap0 = 16 * (me.j ^ fp32_swap(2 * me.g)), swap1 = 16 * (me.j ^ fp32_swap(2 * me.g + 1));
    const uint32_t tokens = me.smem + from + 4 * C::N * (SUB_CHUNK * me.sub_chunk + 2 * me.g);
    const uint32_t state = me.smem + C::S + 4 * C::N * 2 * me.g;
    sum = {};
    GT_NO_UNROLL
    for (int kk = 0; kk < C::N / 16; kk++) {
        const int even = swap0 ^ 64 * kk, odd = 4 * C::N + (swap1 ^ 64 * kk);
        HiLoLeft a;
        load_two_rows(tokens + even, tokens + odd, a);
        GT_UNROLL
        for (int m = 0; m < C::GROUPS; m++) {
            GT_UNROLL
            for (int e = 0; e < 2; e++) {
                HiLoRight b;
                b.set4(0, lds<float4>(state + (e ? odd : even) + 64 * C::N * m));
                add_mma_16(sum.tile[m][e], a, b);
            }
        }
    }
}

/* c = products of dy of the warp's sub-chunk (rows) with v of sub-chunk `sub_chunk` (columns).  Column c of tile e is
 * token 8e + c. */
template <class C>
GT_DEV void row_products(const BackwardBlock<C>& me, int sub_chunk, float (&c)[2][4]) {
    const int swap0 = 16 * (me.j ^ fp32_swap(2 * me.g)), swap1 = 16 * (me.j ^ fp32_swap(2 * me.g + 1));
    const uint32_t left = me.smem + C::DY + 4 * C::N * (SUB_CHUNK * me.sub_chunk + 2 * me.g);
    const uint32_t right = me.smem + C::VALUES + 4 * C::N * (SUB_CHUNK * sub_chunk + me.g);
    const int swap = 16 * (me.j ^ fp32_swap(me.g));
    GT_UNROLL
    for (int x = 0; x < 8; x++) c[x / 4][x % 4] = 0.0f;
    GT_NO_UNROLL
    for (int kk = 0; kk < C::N / 16; kk++) {
        HiLoLeft a;
        load_two_rows(left + (swap0 ^ 64 * kk), left + 4 * C::N + (swap1 ^ 64 * kk), a);
        GT_UNROLL
        for (int e = 0; e < 2; e++) { /* 8 rows further on the swap differs */
            HiLoRight b;
            b.set4(0, lds<float4>(right + 32 * C::N * e + (swap ^ 64 * e ^ 64 * kk)));
            add_mma_16(c[e], a, b);
        }
    }
}

/* sum <- E . sum + c times R or K, where E and R or K belong to sub-chunk `sub_chunk`. */
template <class C>
GT_DEV void add_rows(const BackwardBlock<C>& me, const HiLoLeft& c, int from, int sub_chunk, RowSums<C>& sum) {
    const uint32_t rows = me.smem + from + fragment_of<C::CHANNELS>(SUB_CHUNK / 2 * sub_chunk + me.j, 2 * me.g);
    const uint32_t rows8 = me.smem + from + fragment_of<C::CHANNELS>(SUB_CHUNK / 2 * sub_chunk + 4 + me.j, 2 * me.g);
    GT_UNROLL
    for (int m = 0; m < C::GROUPS; m++) {
        const float4 E = lds<float4>(me.smem + C::E + 4 * (sub_chunk * C::CHANNELS + 16 * m + 4 * me.j));
        const float4 x = lds<float4>(rows + 128 * m), y = lds<float4>(rows8 + 128 * m);
        GT_UNROLL
        for (int e = 0; e < 2; e++) {
            float added[4];
            HiLoRight b;
            b.set4(0, e ? float4{x.z, x.w, y.z, y.w} : float4{x.x, x.y, y.x, y.y});
            mma_16(added, c, b);
            GT_UNROLL
            for (int i = 0; i < 4; i++) {
                const float scale = e ? (i % 2 ? E.w : E.y) : (i % 2 ? E.z : E.x);
                float& element = sum.tile[m][e][i];
                element = fma_rn(element, scale, added[i]);
            }
        }
    }
}

/* store_sub_chunk_sum() for RowSums. */
template <class C>
GT_DEV void store_sub_chunk_rows(const BackwardBlock<C>& me, const RowSums<C>& sum, int of, int to) {
    constexpr int COUNT = 4 * C::GROUPS;
    const float carries = of == C::R && me.sub_chunk == 0 && me.g == 0 ? 0.0f : 1.0f;
    float first[COUNT];
    GT_UNROLL
    for (int m = 0; m < C::GROUPS; m++) {
        GT_UNROLL
        for (int i = 0; i < 2; i++) { /* two channels */
            const float4 R =
                lds<float4>(me.smem + of +
                            fragment_of<C::CHANNELS>(SUB_CHUNK / 2 * me.sub_chunk + me.g, 16 * m + 4 * me.j + 2 * i));
            const float(&x)[2][4] = sum.tile[m];
            first[4 * m + 2 * i] = fma_rn(R.y, x[0][2 + i], R.x * x[0][i] * carries);
            first[4 * m + 2 * i + 1] = fma_rn(R.w, x[1][2 + i], R.z * x[1][i] * carries);
        }
    }
    halve_sums<COUNT / 2>(first, 16);
    halve_sums<COUNT / 4>(first, 8);
    halve_sums<COUNT / 8>(first, 4);
    GT_UNROLL
    for (int x = 0; x < COUNT / 8; x++) {
        const int i = COUNT / 8 * (4 * (me.g / 4) + 2 * (me.g / 2 % 2) + me.g % 2) + x;
        sts<float>(me.smem + to + 4 * (16 * (i / 4) + 4 * me.j + i % 4), first[x]);
    }
}

/* Turns token products into a left operand with the same rows. */
GT_DEV void products_to_hi_lo(const float (&c)[2][4], HiLoLeft& a) {
    GT_UNROLL
    for (int e = 0; e < 2; e++) a.reorder4(4 * e, {c[e][0], c[e][2], c[e][1], c[e][3]});
}

/* make_X() for fp32.  Also stores C for make_Z_rows(), and starts to copy G over S. */
template <class C, bool STRONG_DECAY>
GT_DEV void make_X_rows(const BackwardParams& p, const BackwardBlock<C>& me, RowSums<C>& X) {
    const int a = me.sub_chunk;
    const bool corner = me.g == 0 && me.j == 3; /* the lane has C of the sub-chunk's first token and the token before */
    rows_times_state<C>(me, C::DY, X);
    mbarrier_arrive(me.smem + C::S_READ);
    store_sub_chunk_rows<C>(me, X, C::R, C::FIRST + 4 * a * C::CHANNELS);
    mbarrier_wait(me.smem + C::S_READ, me.slice0 / C::CHANNELS % 2);
    constexpr int ROWS = C::CHANNELS / SUB_CHUNKS;
    copy_state_rows<C>(me, G_rows<C>(p, me), ROWS * a, ROWS * (a + 1));
    cp_async_commit();
    /* The pair across the chunk's first token is in S; the pair across the chunk's end is in G. */
    if (a == 0 && corner) sts<float>(near_fragment(me, 0) + 4, 0.0f);
    if (a == SUB_CHUNKS - 1 && corner) sts<float2>(near_fragment(me, CHECKPOINT), {0.0f, 0.0f});
    GT_NO_UNROLL
    for (int b = 0; b <= a; b++) {
        float c[2][4];
        row_products<C>(me, b, c);
        if (b == a) {
            GT_UNROLL
            for (int x = 0; x < 8; x++) {
                const int i = 2 * me.g + x % 4 / 2, j = 8 * (x / 4) + 2 * me.j + x % 2;
                float& element = c[x / 4][x % 4];
                if (j == i || j + 1 == i)
                    sts<float>(near_fragment(me, SUB_CHUNK * a + i) + (j == i ? 0 : 4), p.scale * element);
                if (j + 1 >= i) element = 0.0f;
            }
        } else if (b == a - 1 && corner) {
            sts<float>(near_fragment(me, SUB_CHUNK * a) + 4, p.scale * c[1][1]);
            c[1][1] = 0.0f;
        }
        GT_UNROLL
        for (int e = 0; e < 2; e++)
            sts<float4>(C_fragment(me, a, b, me.g, 4 * e + me.j), {c[e][0], c[e][1], c[e][2], c[e][3]});
        if (STRONG_DECAY && b == a) break;
        HiLoLeft left;
        products_to_hi_lo(c, left);
        add_rows<C>(me, left, C::K, b, X);
        if (STRONG_DECAY && b < a - 1) store_sub_chunk_rows<C>(me, X, C::R, strong_ends<C>(b + 1, a));
    }
}

/* make_Z() for fp32, from the C that make_X_rows() has stored. */
template <class C, bool STRONG_DECAY>
GT_DEV void make_Z_rows(const BackwardBlock<C>& me, RowSums<C>& Z) {
    rows_times_state<C>(me, C::VALUES, Z);
    if (STRONG_DECAY) store_sub_chunk_rows<C>(me, Z, C::K, C::STRONG_DECAY_BEGINS + 4 * me.sub_chunk * C::CHANNELS);
    GT_NO_UNROLL
    for (int a = SUB_CHUNKS - 1; a >= me.sub_chunk + STRONG_DECAY; a--) {
        HiLoLeft left;
        left.set4(0, lds<float4>(C_fragment(me, a, me.sub_chunk, me.j, me.g)));
        left.set4(4, lds<float4>(C_fragment(me, a, me.sub_chunk, 4 + me.j, me.g)));
        add_rows<C>(me, left, C::R, a, Z);
    }
}

/* Stores X or Z in shared memory, in the fragments that finish_part() reads. */
template <class C>
GT_DEV void store_rows(const BackwardBlock<C>& me, int to, const RowSums<C>& sum) {
    GT_UNROLL
    for (int m = 0; m < C::GROUPS; m++) {
        const float(&x)[2][4] = sum.tile[m];
        GT_UNROLL
        for (int i = 0; i < 2; i++)
            sts<float4>(me.smem + to +
                            fragment_of<C::CHANNELS>(SUB_CHUNK / 2 * me.sub_chunk + me.g, 16 * m + 4 * me.j + 2 * i),
                        {x[0][i], x[0][2 + i], x[1][i], x[1][2 + i]});
    }
}

/* ---- rowsum(S . G), dv -------------------------------------------------------------------------------------- */

/* Computes rowsum(S . G) of a slice, in the warps that compute dv.  EARLY: they load G to registers before they need
 * it.  With N = 128 G would take too many registers for that. */
template <class C>
struct StateRows {
    static constexpr int ROWS = C::CHANNELS / 16; /* rows of a lane, 4 apart; 8 lanes share a row */
    static constexpr int PIECES = C::N / 32;
    static constexpr bool EARLY = C::N < 128;
    float4 G[ROWS][PIECES];

    GT_METHOD int row0(const BackwardBlock<C>& me) const {
        return C::CHANNELS / SUB_CHUNKS * me.sub_chunk + lane_id() / 8;
    }

    GT_METHOD void load(const BackwardParams& p, const BackwardBlock<C>& me) {
        const SliceRows<float> rows = G_rows<C>(p, me);
        const float* from = rows.data + row0(me) * (int64_t)rows.pitch + 4 * (lane_id() % 8);
        GT_UNROLL
        for (int i = 0; i < ROWS; i++) {
            GT_UNROLL
            for (int k = 0; k < PIECES; k++) G[i][k] = ldg<float4>(from + 32 * k);
            from += 4 * (int64_t)rows.pitch;
        }
    }

    GT_METHOD void sum(const BackwardBlock<C>& me) const {
        float sum[ROWS];
        GT_UNROLL
        for (int i = 0; i < ROWS; i++) {
            sum[i] = 0.0f;
            GT_UNROLL
            for (int k = 0; k < PIECES; k++) {
                const float4 x = G[i][k];
                const float4 y =
                    lds<float4>(me.smem + C::S + fp32_piece<C::N>(row0(me) + 4 * i, lane_id() % 8 + 8 * k));
                sum[i] = fma_rn(x.x, y.x, fma_rn(x.y, y.y, fma_rn(x.z, y.z, fma_rn(x.w, y.w, sum[i]))));
            }
        }
        int i = lane_id() >> 2 & 1;
        halve_sums<ROWS / 2>(sum, 4);
        if constexpr (ROWS == 4) {
            halve_sums<1>(sum, 2);
            i = 2 * i + (lane_id() >> 1 & 1);
        } else {
            sum[0] += shfl_xor(sum[0], 2);
        }
        sum[0] += shfl_xor(sum[0], 1);
        if (lane_id() % (8 / ROWS) == 0) sts<float>(me.smem + C::ROWSUM + 4 * (me.slice0 + row0(me) + 4 * i), sum[0]);
    }
};

/* dv += (rows of dy or G)^T b.  rows: addresses of the lane's rows, two for each step.  dv of the warp's sub-chunk is
 * values by tokens: rows g and g + 8 of tile 2m + e are values 16m + 2g and 16m + 2g + 1; column c is token 2c + e. */
template <class C>
GT_DEV void add_columns(const uint32_t (&rows)[4], const HiLoRight (&b)[2], float (&dv)[C::VALUE_TILES][4]) {
    GT_UNROLL
    for (int m = 0; m < C::N / 16; m++) {
        HiLoLeft a;
        GT_UNROLL
        for (int i = 0; i < 4; i++) {
            const float2 x = lds<float2>((rows[i] ^ 64 * (m % 2)) + 128 * (m / 2));
            a.set(2 * i, x.x), a.set(2 * i + 1, x.y);
        }
        add_mma_16(dv[2 * m], a, b[0]);
        add_mma_16(dv[2 * m + 1], a, b[1]);
    }
}

/* Returns the address of a lane's two values among the first 16 values of a row.  For the next 16 values take the
 * address xor 64; every further 32 values add 128. */
template <class C>
GT_DEV uint32_t column_address(const BackwardBlock<C>& me, int from, int row) {
    static_assert(C::DY % 128 == 0 && C::G % 128 == 0, "as smem_base() is");
    return me.smem + from + fp32_piece<C::N>(row, me.g / 2) + 8 * (me.g % 2);
}

/* Updates the warp's factors, one for each channel, which multiply R or K in add_dv_columns().  by >= 0: multiplies the
 * factors by the vector at this offset of shared memory.  by < 0: sets the factors to 1. */
template <class C>
GT_DEV void set_factors(const BackwardBlock<C>& me, int by) {
    constexpr int COUNT = C::CHANNELS / 32;
    const uint32_t to = me.smem + C::DU + 4 * (me.sub_chunk * C::CHANNELS + lane_id());
    sync_warp();
    GT_UNROLL
    for (int i = 0; i < COUNT; i++) {
        const float x = by < 0 ? 1.0f : lds<float>(to + 128 * i) * lds<float>(me.smem + by + 4 * (lane_id() + 32 * i));
        sts<float>(to + 128 * i, x);
    }
    sync_warp();
}

/* Adds the slice's part of dv of the warp's sub-chunk b.  A^T = K_b (R_a . factors)^T; column c of tile e is token 2c +
 * e of sub-chunk a.  Then adds G^T (K_b . factors)^T, where column c of tile e is token 2c + e of sub-chunk b. */
template <class C, bool STRONG_DECAY>
GT_DEV void add_dv_columns(const BackwardParams& p, const BackwardBlock<C>& me, float (&dv)[C::VALUE_TILES][4]) {
    const int b = me.sub_chunk;
    const uint32_t K = me.smem + C::K + fragment_of<C::CHANNELS>(SUB_CHUNK / 2 * b + me.g, 2 * me.j);
    const uint32_t factors = me.smem + C::DU + 4 * (b * C::CHANNELS + 2 * me.j);
    const auto scaled = [&](uint32_t address,
                            int kk) { /* channels from 8 kk on */
                                      const float4 x = lds<float4>(add_8(address, kk));
                                      const float2 f = lds<float2>(factors + 32 * kk);
                                      return float4{x.x * f.x, x.z * f.y, x.y * f.x, x.w * f.y}; /* by tokens */
    };
    set_factors<C>(me, -1);
    GT_NO_UNROLL
    for (int a = b; a < SUB_CHUNKS; a++) {
        const uint32_t R = me.smem + C::R + fragment_of<C::CHANNELS>(SUB_CHUNK / 2 * a + me.g, 2 * me.j);
        float A[2][4] = {};
        const bool runs = STRONG_DECAY && a == b; /* strong_pairs() computes A by running products */
        if (runs) {
            strong_pairs<C>(p, me, A);
        } else if (a == b) {
            set_factors<C>(me, C::GROWTH + 4 * b * C::CHANNELS);
        } else if (a == b + 1) {
            set_factors<C>(me, -1);
        } else {
            set_factors<C>(me, C::E + 4 * (a - 1) * C::CHANNELS);
        }
        GT_NO_UNROLL
        for (int kk = 0; kk < C::TILES && !runs; kk += 2) {
            HiLoLeft left;
            HiLoRight right[2];
            left.set4(0, lds<float4>(add_8(K, kk)));
            left.set4(4, lds<float4>(add_8(K, kk + 1)));
            const float4 x = scaled(R, kk), y = scaled(R, kk + 1);
            right[0].set4(0, {x.x, x.y, y.x, y.y});
            right[1].set4(0, {x.z, x.w, y.z, y.w});
            add_mma_16(A[0], left, right[0]);
            add_mma_16(A[1], left, right[1]);
        }
        if (a == b) set_bonus<C>(me, A);
        /* In tile e the lane's inner indices are tokens 4j + e and 4j + 2 + e. */
        HiLoRight right[2];
        GT_UNROLL
        for (int x = 0; x < 8; x++) right[x / 4].set(x % 4, A[x % 4 / 2][x / 4 * 2 + x % 2]);
        const int t = SUB_CHUNK * a + 4 * me.j;
        const uint32_t rows[4] = {column_address<C>(me, C::DY, t), column_address<C>(me, C::DY, t + 2),
                                  column_address<C>(me, C::DY, t + 1), column_address<C>(me, C::DY, t + 3)};
        add_columns<C>(rows, right, dv);
    }
    set_factors<C>(me, b == SUB_CHUNKS - 1 ? -1 : C::E + 4 * (SUB_CHUNKS - 1) * C::CHANNELS);
    mbarrier_wait(me.smem + C::G_HERE, me.slice0 / C::CHANNELS % 2);
    GT_NO_UNROLL
    for (int kk = 0; kk < C::TILES; kk += 2) {
        const int n = 8 * kk + 2 * me.j;
        const float4 x = scaled(K, kk), y = scaled(K, kk + 1);
        HiLoRight right[2];
        right[0].set4(0, {x.x, x.y, y.x, y.y});
        right[1].set4(0, {x.z, x.w, y.z, y.w});
        const uint32_t rows[4] = {column_address<C>(me, C::G, n), column_address<C>(me, C::G, n + 1),
                                  column_address<C>(me, C::G, n + 8), column_address<C>(me, C::G, n + 9)};
        add_columns<C>(rows, right, dv);
    }
}

template <class C>
GT_DEV void store_dv_columns(const BackwardParams& p, const BackwardBlock<C>& me,
                             const float (&dv)[C::VALUE_TILES][4]) {
    const int tokens = me.tokens();
    GT_UNROLL
    for (int x = 0; x < 4; x++) {
        const int e = x / 2, c = x % 2, t = SUB_CHUNK * me.sub_chunk + 2 * (2 * me.j + c) + e;
        if (!p.tensors[OF_DV].data || t >= tokens) continue;
        float* to = row_of<float>(p, me, OF_DV, t) + 2 * me.g;
        GT_UNROLL
        for (int m = 0; m < C::N / 16; m++) stg<float2>(to + 16 * m, {dv[2 * m + e][c], dv[2 * m + e][2 + c]});
    }
}

template <class C, bool STRONG_DECAY>
GT_DEV void fp32_products(const BackwardParams& p, const BackwardBlock<C>& me, StateRows<C>& states,
                          float (&dv)[C::VALUE_TILES][4]) {
    const int slice = me.slice0 / C::CHANNELS;
    if (me.makes_dv()) {
        if (!states.EARLY || STRONG_DECAY) states.load(p, me);
        states.sum(me);
        mbarrier_arrive(me.smem + C::S_READ);
        if (p.tensors[OF_DV].data) add_dv_columns<C, STRONG_DECAY>(p, me, dv);
        if (slice + 1 == C::SLICES) store_dv_columns<C>(p, me, dv);
        sync_threads();
    } else {
        RowSums<C> X, Z;
        make_X_rows<C, STRONG_DECAY>(p, me, X);
        cp_async_wait<0>();
        mbarrier_arrive(me.smem + C::G_HERE);
        mbarrier_wait(me.smem + C::G_HERE, slice % 2);
        make_Z_rows<C, STRONG_DECAY>(me, Z);
        sync_threads(); /* all warps have read v, dy, G */
        store_rows<C>(me, C::X, X);
        store_rows<C>(me, C::Z, Z);
    }
}

} /* namespace wkv6 */
} /* namespace gt */

#endif
