/* gt/wkv6/backward_products.cuh - backward of a chunk: the products X and Z of 16-bit activations, and the operands of
 * dv.  backward.cuh explains the symbols. */
#ifndef GT_WKV6_BACKWARD_PRODUCTS_CUH
#define GT_WKV6_BACKWARD_PRODUCTS_CUH

#include "backward_inputs.cuh"

namespace gt {
namespace wkv6 {

/* ---- S and G times tokens, tokens times tokens -------------------------------------------------------------- */

/* Return the offset of the piece whose address a lane gives to ldmatrix, within the first 16 rows and their first 16
 * values: left_piece() for a left operand, right_piece() for two right operands. */
template <int N>
GT_DEV uint32_t left_piece() {
    return row_piece<N>(lane_id() / 8 % 2 * 8 + lane_id() % 8, lane_id() / 16);
}

template <int N>
GT_DEV uint32_t right_piece() {
    return row_piece<N>(lane_id() / 16 * 8 + lane_id() % 8, lane_id() / 8 % 2);
}

/* X or Z of a sub-chunk, [channels,16 tokens].  Rows g and g + 8 of tile q are channels 16 q + 2g and 16 q + 2g + 1;
 * column c of tile e is token 8e + c.  So a lane's accumulators of a tile are a fragment: two channels by two
 * tokens. */
template <class C>
struct Sums {
    float tile[C::GROUPS][2][4];
};

/* sum = the slice of a state (S or G) times the tokens of the warp's sub-chunk (dy or v). */
template <class C>
GT_DEV void times_state(const BackwardBlock<C>& me, int from, int state, Sums<C>& sum) {
    const uint32_t tokens = me.smem + from + add_16_rows<C::N>(right_piece<C::N>(), me.sub_chunk);
    const uint32_t rows = me.smem + state + row_piece<C::N>(lane_id() % 8 * 2 + lane_id() / 8 % 2, lane_id() / 16);
    sum = {};
    GT_UNROLL
    for (int kk = 0; kk < C::N / 16; kk++) {
        uint32_t b[4];
        ldmatrix_x4(b, add_16(tokens, kk));
        GT_UNROLL
        for (int q = 0; q < C::GROUPS; q++) {
            uint32_t a[4];
            ldmatrix_x4(a, add_16_rows<C::N>(add_16(rows, kk), q));
            mma<typename C::T>(sum.tile[q][0], a, b[0], b[1]);
            mma<typename C::T>(sum.tile[q][1], a, b[2], b[3]);
        }
    }
}

/* v or dy of the warp's sub-chunk, as left operands.  With LARGE registers keep them; otherwise get() loads them at
 * each use. */
template <class C>
struct SubChunkRows {
    uint32_t left;
    uint32_t kept[C::LARGE ? C::N / 16 : 1][4];

    GT_METHOD SubChunkRows(const BackwardBlock<C>& me, int from)
        : left(me.smem + from + add_16_rows<C::N>(left_piece<C::N>(), me.sub_chunk)) {
        if constexpr (C::LARGE) {
            GT_UNROLL
            for (int kk = 0; kk < C::N / 16; kk++) ldmatrix_x4(kept[kk], add_16(left, kk));
        }
    }

    GT_METHOD void get(int kk, uint32_t (&a)[4]) const {
        if constexpr (C::LARGE) {
            GT_UNROLL
            for (int i = 0; i < 4; i++) a[i] = kept[kk][i];
        } else {
            ldmatrix_x4(a, add_16(left, kk));
        }
    }
};

/* c = products of the tokens of the warp's sub-chunk (rows) with the tokens of sub-chunk `sub_chunk` (columns), whose v
 * or dy lies at `other`.  Column c of tile e is token 8e + c. */
template <class C>
GT_DEV void token_products(const BackwardBlock<C>& me, const SubChunkRows<C>& own, int other, int sub_chunk,
                           float (&c)[2][4]) {
    constexpr int SUMS = C::LARGE ? 2 : 1; /* two chains of products in parallel, if registers suffice */
    const uint32_t right = me.smem + other + add_16_rows<C::N>(right_piece<C::N>(), sub_chunk);
    float sums[SUMS][2][4] = {};
    GT_UNROLL
    for (int kk = 0; kk < C::N / 16; kk++) {
        uint32_t a[4], b[4];
        own.get(kk, a);
        ldmatrix_x4(b, add_16(right, kk));
        mma<typename C::T>(sums[kk % SUMS][0], a, b[0], b[1]);
        mma<typename C::T>(sums[kk % SUMS][1], a, b[2], b[3]);
    }
    GT_UNROLL
    for (int x = 0; x < 8; x++) {
        c[x / 4][x % 4] = sums[0][x / 4][x % 4];
        if (SUMS == 2) c[x / 4][x % 4] += sums[SUMS - 1][x / 4][x % 4];
    }
}

/* Turns one tile of token products into a left operand: reorders and rounds it. */
GT_DEV void left_of(const float (&c)[4], float (&a)[4]) {
    a[0] = round_tf32(c[0]), a[1] = round_tf32(c[2]), a[2] = round_tf32(c[1]), a[3] = round_tf32(c[3]);
}

/* sum += (R or K of a sub-chunk)^T c^T */
template <class C>
GT_DEV void add_sub_chunk(const BackwardBlock<C>& me, const float (&c)[2][4], int from, int sub_chunk, Sums<C>& sum) {
    float b[2][4];
    GT_UNROLL
    for (int x = 0; x < 8; x++) b[x / 4][x % 4] = round_tf32(c[x / 4][x % 4]);
    GT_UNROLL
    for (int e = 0; e < 2; e++) {
        const uint32_t address =
            me.smem + from + fragment_of<C::CHANNELS>(SUB_CHUNK / 2 * sub_chunk + 4 * e + me.j, 2 * me.g);
        GT_UNROLL
        for (int q = 0; q < C::GROUPS; q++) {
            const float4 x = lds<float4>(address + 128 * q);
            const float a[4] = {x.x, x.y, x.z, x.w};
            mma_tf32(sum.tile[q][0], a, b[e][0], b[e][1]);
            mma_tf32(sum.tile[q][1], a, b[e][2], b[e][3]);
        }
    }
}

/* ---- X and Z ------------------------------------------------------------------------------------------------ */

/* Strong-decay path: returns the offset of the sum over pairs that begin before sub-chunk a and end in sub-chunk c > a
 * > 0. */
template <class C>
GT_DEV int strong_ends(int a, int c) {
    return C::STRONG_DECAY_ENDS + 4 * (a + c - 3) * C::CHANNELS;
}

/* Multiplies the sums of each channel by an element of a vector in shared memory. */
template <class C>
GT_DEV void scale_channels(const BackwardBlock<C>& me, uint32_t offset, Sums<C>& sum) {
    GT_UNROLL
    for (int q = 0; q < C::GROUPS; q++) {
        const float2 scale = lds<float2>(me.smem + offset + 4 * (16 * q + 2 * me.g));
        GT_UNROLL
        for (int x = 0; x < 8; x++) sum.tile[q][x / 4][x % 4] *= x % 4 < 2 ? scale.x : scale.y;
    }
}

/* Returns the address of C_tt and C_(t,t-1) of a token t, the products whose terms contain no decay. */
template <class C>
GT_DEV uint32_t near_fragment(const BackwardBlock<C>& me, int token) {
    return me.smem + C::NEAR + 8 * token;
}

/* Returns the address of a fragment of C of sub-chunks a >= b: a pair of tokens of a by a pair of b.  With 16-bit types
 * only a = b occurs. */
template <class C>
GT_DEV uint32_t C_fragment(const BackwardBlock<C>& me, int a, int b, int pair_a, int pair_b) {
    const int swap = (pair_a & 1) << 2 | (pair_a & 2), block = C::TF32X3 ? a * (a + 1) / 2 + b : a;
    return me.smem + C::C_FRAGMENTS + 4 * SUB_CHUNK * SUB_CHUNK * block + 128 * pair_a + 16 * (pair_b ^ swap);
}

template <class C>
GT_DEV uint32_t C_element(const BackwardBlock<C>& me, int sub_chunk, int i, int j) {
    return C_fragment(me, sub_chunk, sub_chunk, i / 2, j / 2) + 4 * (2 * (i % 2) + j % 2);
}

/* Stores, for every channel, the sum over the sub-chunk's tokens t of R_t x_t or K_t x_t, where x is `sum`.  `of`
 * selects R or K; the result [channels] goes to `to`.  If x is S dy, the result is the sub-chunk's part of dg_0.  It
 * leaves out the chunk's first token, which has no decay before it. */
template <class C>
GT_DEV void store_sub_chunk_sum(const BackwardBlock<C>& me, const Sums<C>& sum, int of, int to) {
    constexpr int COUNT = 2 * C::GROUPS;
    const float carries = of == C::R && me.sub_chunk == 0 && me.j == 0 ? 0.0f : 1.0f;
    float first[COUNT];
    GT_UNROLL
    for (int q = 0; q < C::GROUPS; q++) {
        const uint32_t address = me.smem + of + 128 * q;
        const float4 R0 =
            lds<float4>(address + fragment_of<C::CHANNELS>(SUB_CHUNK / 2 * me.sub_chunk + me.j, 2 * me.g));
        const float4 R1 =
            lds<float4>(address + fragment_of<C::CHANNELS>(SUB_CHUNK / 2 * me.sub_chunk + 4 + me.j, 2 * me.g));
        const float(&x)[2][4] = sum.tile[q];
        first[2 * q] = fma_rn(R1.z, x[1][1], fma_rn(R1.x, x[1][0], fma_rn(R0.z, x[0][1], R0.x * x[0][0] * carries)));
        first[2 * q + 1] =
            fma_rn(R1.w, x[1][3], fma_rn(R1.y, x[1][2], fma_rn(R0.w, x[0][3], R0.y * x[0][2] * carries)));
    }
    halve_sums<COUNT / 2>(first, 2);
    halve_sums<COUNT / 4>(first, 1);
    GT_UNROLL
    for (int x = 0; x < COUNT / 4; x++) {
        const int i = COUNT / 2 * (me.j / 2) + COUNT / 4 * (me.j % 2) + x;
        sts<float>(me.smem + to + 4 * (16 * (i / 2) + 2 * me.g + i % 2), first[x]);
    }
}

/* Computes X of the sub-chunk without its last factor 2^c_16.  Also stores the products C_tt and C_(t,t-1) times the
 * scale of y, and the sub-chunk's part of dg_0.  On the strong-decay path X has only the terms from before the
 * sub-chunk.  That path also stores C of the sub-chunk, and the sums over pairs that end in the sub-chunk. */
template <class C, bool STRONG_DECAY>
GT_DEV void make_X(float scale, const BackwardBlock<C>& me, Sums<C>& sum) {
    const int a = me.sub_chunk;
    const bool corner = me.g == 0 && me.j == 3; /* the lane has C of the sub-chunk's first token and the token before */
    float c[2][4], before = 0.0f;               /* before: that element of C; 0 for the chunk's first token */
    times_state<C>(me, C::DY, C::S, sum);
    if constexpr (C::ROUNDED) scale_channels<C>(me, C::S_SCALE, sum);
    store_sub_chunk_sum<C>(me, sum, C::R, C::FIRST + 4 * a * C::CHANNELS);
    const SubChunkRows<C> dy(me, C::DY);
    for (int b = 0; b < a; b++) {
        token_products<C>(me, dy, C::VALUES, b, c);
        if (b == a - 1 && corner) {
            before = c[1][1];
            c[1][1] = 0.0f;
        }
        scale_channels<C>(me, C::E + 4 * b * C::CHANNELS, sum);
        add_sub_chunk<C>(me, c, C::K, b, sum);
        if (STRONG_DECAY && b < a - 1) store_sub_chunk_sum<C>(me, sum, C::R, strong_ends<C>(b + 1, a));
    }
    if (corner) sts<float>(near_fragment(me, SUB_CHUNK * a) + 4, scale * before);
    /* The pair of the chunk's last token and the next token is in G. */
    if (a == SUB_CHUNKS - 1 && corner) sts<float2>(near_fragment(me, CHECKPOINT), {0.0f, 0.0f});
    token_products<C>(me, dy, C::VALUES, a, c);
    GT_UNROLL
    for (int x = 0; x < 8; x++) {
        const int i = me.g + x % 4 / 2 * 8, j = 8 * (x / 4) + 2 * me.j + x % 2;
        float& element = c[x / 4][x % 4];
        if (j == i || j + 1 == i) sts<float>(near_fragment(me, SUB_CHUNK * a + i) + (j == i ? 0 : 4), scale * element);
        if (STRONG_DECAY) sts<float>(C_element(me, a, i, j), element);
        if (j + 1 >= i) element = 0.0f;
    }
    if (STRONG_DECAY) return;
    scale_channels<C>(me, C::E + 4 * a * C::CHANNELS, sum);
    add_sub_chunk<C>(me, c, C::K, a, sum);
}

/* Computes Z of the sub-chunk without its last factor 2^c_16.  On the strong-decay path Z has only the terms from after
 * the sub-chunk.  That path also stores the sum over pairs of the sub-chunk and G. */
template <class C, bool STRONG_DECAY>
GT_DEV void make_Z(const BackwardBlock<C>& me, Sums<C>& sum) {
    const int b = me.sub_chunk;
    float c[2][4];
    times_state<C>(me, C::VALUES, C::G, sum);
    if constexpr (C::ROUNDED) scale_channels<C>(me, C::G_SCALE, sum);
    if (STRONG_DECAY) store_sub_chunk_sum<C>(me, sum, C::K, C::STRONG_DECAY_BEGINS + 4 * b * C::CHANNELS);
    const SubChunkRows<C> v(me, C::VALUES);
    for (int a = SUB_CHUNKS - 1; a > b; a--) {
        token_products<C>(me, v, C::DY, a, c);
        if (a == b + 1 && me.g == 7 && me.j == 0) c[0][2] = 0.0f;
        scale_channels<C>(me, C::E + 4 * a * C::CHANNELS, sum);
        add_sub_chunk<C>(me, c, C::R, a, sum);
    }
    if (STRONG_DECAY) return;
    token_products<C>(me, v, C::DY, b, c);
    GT_UNROLL
    for (int x = 0; x < 8; x++) {
        const int j = me.g + x % 4 / 2 * 8, i = 8 * (x / 4) + 2 * me.j + x % 2;
        if (i <= j + 1) c[x / 4][x % 4] = 0.0f;
    }
    scale_channels<C>(me, C::E + 4 * b * C::CHANNELS, sum);
    add_sub_chunk<C>(me, c, C::R, b, sum);
}

/* Stores X or Z of the sub-chunk in shared memory.  A fragment has the two tokens of its first channel, then the two
 * tokens of its second channel. */
template <class C>
GT_DEV void store_sums(const BackwardBlock<C>& me, int to, const Sums<C>& sum) {
    GT_UNROLL
    for (int e = 0; e < 2; e++) {
        const uint32_t address =
            me.smem + to + fragment_of<C::CHANNELS>(SUB_CHUNK / 2 * me.sub_chunk + 4 * e + me.j, 2 * me.g);
        GT_UNROLL
        for (int q = 0; q < C::GROUPS; q++) {
            const float(&x)[4] = sum.tile[q][e];
            sts<float4>(address + 128 * q, {x[0], x[1], x[2], x[3]});
        }
    }
}

/* ---- operands of dv ----------------------------------------------------------------------------------------- */

/* LARGE: a left operand of 16 columns, made from two tiles of accumulators, as a sum of two bf16 terms.  It takes as
 * many products as tf32, is more exact, and multiplies rows of bf16 without a conversion.  But it takes more
 * registers. */
struct TwoTerms {
    uint32_t high[4], low[4];

    GT_METHOD TwoTerms(const float (&x)[4], const float (&y)[4]) {
        set(0, x[0], x[1]);
        set(1, x[2], x[3]);
        set(2, y[0], y[1]);
        set(3, y[2], y[3]);
    }

    GT_METHOD void set(int i, float a, float b) {
        high[i] = pack_bf16(a, b);
        low[i] = pack_bf16(a - unpack_bf16_lo(high[i]), b - unpack_bf16_hi(high[i]));
    }

    /* dv += this operand times 16 rows of bf16.  rows: the lane's address for ldmatrix, in the first 16 values.  Lanes
     * 8 to 15 and 24 to 31 address the second half of the rows. */
    template <int TILES>
    GT_METHOD void multiply(float (&dv)[TILES][4], uint32_t rows) const {
        GT_UNROLL
        for (int x = 0; x < TILES; x += 2) {
            uint32_t b[4]; /* two tiles; for each, both halves of the rows */
            ldmatrix_x4_trans(b, add_16(rows, x / 2));
            GT_UNROLL
            for (int y = 0; y < 2; y++) {
                mma_bf16(dv[x + y], high, b[2 * y], b[2 * y + 1]);
                mma_bf16(dv[x + y], low, b[2 * y], b[2 * y + 1]);
            }
        }
    }
};

/* dv += A^T dy_a, where A^T is a left operand: column c of tile e is token 2c + e of sub-chunk a. */
template <class C>
GT_DEV void add_dv(const BackwardBlock<C>& me, const float (&A)[2][4], int sub_chunk, float (&dv)[C::VALUE_TILES][4]) {
    using Unpack = Element<typename C::T>;
    const int matrix = lane_id() / 8, i = lane_id() % 8;
    if constexpr (C::LARGE) { /* the halves are even and odd tokens */
        const uint32_t rows = me.smem + C::DY + row_piece<C::N>(2 * i + matrix % 2, matrix / 2);
        TwoTerms(A[0], A[1]).multiply(dv, add_16_rows<C::N>(rows, sub_chunk));
    } else {
        GT_UNROLL
        for (int e = 0; e < 2; e++) {
            const uint32_t rows = me.smem + C::DY + row_piece<C::N>(2 * i + e, matrix);
            float a[4];
            left_of(A[e], a);
            GT_UNROLL
            for (int x = 0; x < C::N / 32; x++) {
                uint32_t b[4];
                ldmatrix_x4_trans(b, add_16(add_16_rows<C::N>(rows, sub_chunk), 2 * x));
                GT_UNROLL
                for (int y = 0; y < 4; y++) mma_tf32(dv[4 * x + y], a, Unpack::lo(b[y]), Unpack::hi(b[y]));
            }
        }
    }
}

/* K of a sub-chunk as left operands, and a factor for each channel.  The tensor core truncates operands to tf32, which
 * makes products smaller on average.  To correct this, factors start from TF32_MEAN. */
constexpr float TF32_MEAN = 1.0f + 0.69f / 2048.0f;

template <class C>
struct SubChunkK {
    float K[C::TILES][4];
    float2 factor[C::TILES];

    GT_METHOD void scaled(int kk, float (&left)[4]) const {
        GT_UNROLL
        for (int e = 0; e < 4; e++) left[e] = K[kk][e] * (e < 2 ? factor[kk].x : factor[kk].y);
    }

    GT_METHOD void set_factor(float x) {
        GT_UNROLL
        for (int kk = 0; kk < C::TILES; kk++) factor[kk] = {x, x};
    }

    GT_METHOD void scale_factor(float x) {
        GT_UNROLL
        for (int kk = 0; kk < C::TILES; kk++) factor[kk] = {factor[kk].x * x, factor[kk].y * x};
    }

    /* Multiplies the factors by the elements of a vector in shared memory. */
    GT_METHOD void multiply_factor(const BackwardBlock<C>& me, uint32_t offset) {
        GT_UNROLL
        for (int kk = 0; kk < C::TILES; kk++) {
            const float2 x = lds<float2>(me.smem + offset + 4 * (8 * kk + 2 * me.j));
            factor[kk] = {factor[kk].x * x.x, factor[kk].y * x.y};
        }
    }
};

/* A^T = K_b R_a^T.  Column c of tile e is token 2c + e of sub-chunk a. */
template <class C>
GT_DEV void pair_products(const BackwardBlock<C>& me, const SubChunkK<C>& left, int sub_chunk, float (&A)[2][4]) {
    const uint32_t row = me.smem + C::R + fragment_of<C::CHANNELS>(SUB_CHUNK / 2 * sub_chunk + me.g, 2 * me.j);
    GT_UNROLL
    for (int x = 0; x < 8; x++) A[x / 4][x % 4] = 0.0f;
    GT_UNROLL
    for (int kk = 0; kk < C::TILES; kk++) {
        float a[4];
        left.scaled(kk, a);
        const float4 b = lds<float4>(add_8(row, kk));
        mma_tf32(A[0], a, b.x, b.y);
        mma_tf32(A[1], a, b.z, b.w);
    }
}

/* Completes A of the sub-chunk with itself, transposed as in pair_products(): keeps the pairs with later tokens, and
 * puts the bonus on the diagonal. */
template <class C>
GT_DEV void set_bonus(const BackwardBlock<C>& me, float (&A)[2][4]) {
    const float4 parts = lds<float4>(me.smem + C::BONUS + 8 * (SUB_CHUNK * me.sub_chunk + 2 * me.g));
    const float bonus[2] = {parts.x + parts.y, parts.z + parts.w};
    GT_UNROLL
    for (int x = 0; x < 8; x++) {
        const int j = 2 * me.g + x % 4 / 2, i = 4 * me.j + 2 * (x % 2) + x / 4;
        float& element = A[x / 4][x % 4];
        element = i > j ? element : i == j ? bonus[x % 4 / 2] : 0.0f;
    }
}

} /* namespace wkv6 */
} /* namespace gt */

#endif
