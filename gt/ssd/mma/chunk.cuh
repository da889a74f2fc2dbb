/* gt/ssd/mma/chunk.cuh - the arithmetic of a chunk on tensor cores: tiles in shared memory, conversion to f16, decay
 * factors, and sums.  A chunk is 64 tokens; chunks count from a sequence's first token.  Tokens after the last one have
 * Delta = 0 and rows of zeros, so they change nothing.  This file does not use Problem and includes no other file of
 * ssd.
 *
 * TILES.  A tile has rows of COLUMNS 16-bit elements, 16 to 128.  It consists of 16-byte pieces, which panel_at() of
 * base/tile.cuh places: the pieces of one column in eight adjacent rows lie in different banks.
 *
 * NUMBERS.  Operands of products with states are f16.  Each row (token) or tile has its own power of two, which brings
 * its largest magnitude to 2^13 ... 2^14.  Elements then keep 11 bits if they are at most 27 binades below that maximum
 * (WEIGHT_RANGE is an exception).  rows_to_f16() converts the rows of a tile in place.  It stores the inverses of the
 * powers, which are later multiplied into the decay factors.  For a computed tile, power_of() finds the power from a
 * bound of the tile's elements.
 *
 * DECAY FACTORS of a chunk and head, from a_t = Delta_t A.  Every exponent is a sum of the a that it spans, computed by
 * additions only.  Factors are never divided.  A block has 16 tokens, and a half of a block has 8:
 *
 *     L_ts = exp(sum_{s<m<=t} a_m) = U[t] . between(t/16, s/16) . V[s]    t, s in different blocks
 *                                  = HALF[t] . HALF[s]                    in one block, different halves
 *                                  = DIAGONAL[t][s % 8]                   in one half; 0 for s > t.
 *     U = exp(from its block's first token through t)     V = exp(from after s to its block's end).
 *     HALF: like V, but to the half's end, for a block's first 8 tokens; like U, but from the half's start, for its
 *     last 8.
 *     PRE = exp(from the chunk's first token through t)   SUF = exp(from after s to the chunk's end).
 * If Delta A > 0, a factor may be too large for fp32.  It is stored as 2^127.99, so that a state of zero stays zero. */
#ifndef GT_SSD_MMA_CHUNK_CUH
#define GT_SSD_MMA_CHUNK_CUH

#include "../../base/tile.cuh"
#include "../../recurrence/ssm.cuh"

namespace gt {
namespace ssd {

/* ---- tiles ----------------------------------------------------------------------------------------------------- */

template <int COLUMNS>
struct TileShape {
    static constexpr int PIECES = COLUMNS / 8, PITCH_BYTES = 2 * COLUMNS, BYTES = CHUNK * PITCH_BYTES;
    static_assert(PIECES >= 2 && (PIECES & (PIECES - 1)) == 0, "a power of two");
};

/* by_rows() and by_columns() return a lane's address for ldmatrix_x4.  It loads the 16 x 16 elements at row 0 of a
 * tile, in pieces 0 and 1.  block_at() moves the address to another block of 16 rows and another pair of pieces.  This
 * needs tiles that start at multiples of 128 bytes.  The two functions differ in the order of the four 8 x 8 matrices:
 *     by_rows     The matrices are rows 0-7 piece 0, rows 8-15 piece 0, rows 0-7 piece 1, rows 8-15 piece 1.  Plain
 *                 loads give the left operand A[row][k = column].  Transposed loads give right operands B[k = row][n =
 *                 column], of piece 0 in registers 0, 1 and of piece 1 in registers 2, 3.
 *     by_columns  The matrices are rows 0-7 piece 0, rows 0-7 piece 1, rows 8-15 piece 0, rows 8-15 piece 1.  Plain
 *                 loads give right operands B[k = column][n = row], of rows 0-7 in registers 0, 1 and of rows 8-15 in
 *                 registers 2, 3.  Transposed loads give the left operand A[row' = column][k = row]. */
template <int COLUMNS>
GT_DEV uint32_t by_rows(uint32_t tile, int lane = here()) {
    return tile + panel_at<2 * COLUMNS>(lane % 16, lane / 16);
}

template <int COLUMNS>
GT_DEV uint32_t by_columns(uint32_t tile, int lane = here()) {
    return tile + panel_at<2 * COLUMNS>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

/* Moves an address of by_rows() or by_columns() to row 16 row_block and to pieces 2 pair and 2 pair + 1. */
template <int COLUMNS>
GT_DEV uint32_t block_at(uint32_t address, int row_block, int pair) {
    const uint32_t k = 32u * (uint32_t)pair;
    return (address ^ (k & 127u)) + (k & ~127u) + (uint32_t)(16 * row_block * TileShape<COLUMNS>::PITCH_BYTES);
}

/* Starts the copy of a tile from global memory by all THREADS threads of a block.  Row r begins at element first + r
 * pitch, which is aligned to 16 bytes.  Rows from `rows` on become zeros, and so do columns from `columns` on.  columns
 * is a multiple of 8. */
template <int COLUMNS, int THREADS, class T>
GT_DEV void load_tile(uint32_t tile, const T* first, int64_t pitch, int rows, int columns) {
    using S = TileShape<COLUMNS>;
    constexpr int STEP = THREADS / S::PIECES; /* rows that are copied at a time */
    static_assert(THREADS % S::PIECES == 0, "a thread stays in its column");
    const int thread = thread_here(), row0 = thread / S::PIECES, piece = thread % S::PIECES;
    const T* from = first + row0 * pitch + 8 * piece;
    if (8 * piece >= columns) rows = 0;
    GT_UNROLL
    for (int k = 0; k < (CHUNK + STEP - 1) / STEP; k++) {
        const int row = row0 + k * STEP;
        if (CHUNK % STEP && row >= CHUNK) break;
        cp_async<16>(tile + panel_at<2 * COLUMNS>(row, piece), row < rows ? from : first, row < rows ? 16 : 0);
        from += STEP * pitch;
    }
}

/* load_tile() for a tile whose rows and columns all exist.  It takes half the instructions. */
template <int COLUMNS, int THREADS, class T>
GT_DEV void load_whole_tile(uint32_t tile, const T* first, int64_t pitch) {
    using S = TileShape<COLUMNS>;
    constexpr int STEP = THREADS / S::PIECES; /* rows that are copied at a time */
    static_assert(THREADS % S::PIECES == 0 && STEP % 8 == 0, "a thread's rows have one exchange");
    const int thread = thread_here();
    GT_ASSUME(thread >= 0 && thread < THREADS);
    const int row0 = thread / S::PIECES, piece = thread % S::PIECES;
    const T* from = first + row0 * pitch + 8 * piece;
    const uint32_t to = tile + panel_at<2 * COLUMNS>(row0, piece);
    GT_UNROLL
    for (int k = 0; k < (CHUNK + STEP - 1) / STEP; k++) {
        if (CHUNK % STEP && row0 + k * STEP >= CHUNK) break;
        cp_async<16>(to + k * STEP * S::PITCH_BYTES, from);
        from += STEP * pitch;
    }
}

/* ---- numbers --------------------------------------------------------------------------------------------------- */

/* How a warp reads the rows of a tile without bank conflicts: ROWS rows at a time, with LANES lanes for each row and
 * PIECES pieces for each lane. */
template <int COLUMNS>
struct RowLanes {
    using S = TileShape<COLUMNS>;
    static constexpr int LANES = S::PIECES < 4 ? S::PIECES : 4, PIECES = S::PIECES / LANES, ROWS = 32 / LANES;
    int row, piece; /* the lane's first row and piece; its next piece is LANES pieces further */
    GT_METHOD RowLanes(int lane = here()) {
        const int i = lane / LANES;
        row = S::PIECES >= 8 ? i / 2 + i % 2 * 4 : i;
        piece = lane % LANES;
    }
    GT_METHOD uint32_t address(int block, int i) const { /* ROWS is a multiple of 8, so all blocks have the same
                                                          * swizzle */
        const uint32_t k = 16u * (uint32_t)(LANES * i);
        return ((uint32_t)panel_at<2 * COLUMNS>(row, piece) ^ (k & 127u)) + (k & ~127u) +
               (uint32_t)(block * ROWS * S::PITCH_BYTES);
    }
};

/* Returns the largest magnitude of a row to all LANES lanes of the row.  most: the lane's own pair from larger_of(). */
template <class T, int LANES>
GT_DEV float row_maximum(uint32_t most) {
    float largest = fmaxf(Element<T>::lo(most), Element<T>::hi(most));
    GT_UNROLL
    for (int mask = 1; mask < LANES; mask *= 2) largest = fmaxf(largest, shfl_xor(largest, mask));
    return largest;
}

/* Returns the largest magnitudes in the lane's pieces of a row, as a pair of 16-bit numbers. */
template <class T, int COUNT>
GT_DEV uint32_t larger_of(const uint4 (&x)[COUNT]) {
    uint32_t even = 0, odd = 0;
    GT_UNROLL
    for (int i = 0; i < COUNT; i++) {
        even = larger_magnitudes<T>(larger_magnitudes<T>(even, x[i].x), x[i].y);
        odd = larger_magnitudes<T>(larger_magnitudes<T>(odd, x[i].z), x[i].w);
    }
    return larger_magnitudes<T>(even, odd);
}

/* The maximum of |silu(z)| over all z <= most.  For negative z, |silu| is largest at z = -1.278, where it is 0.2785. */
GT_DEV float gate_bound(float most) {
    if (most > -1.28f) return fmaxf(most, 0.2785f);
    const float z = fmaxf(most, -100.0f); /* otherwise z = -infinity would give infinity times 0 */
    return -z * ex2_approx(z * LOG2_E);
}

/* The largest number in a row of a tile.  This is not the largest magnitude: every number counts with its sign. */
template <class T>
GT_DEV float largest_in_row(uint32_t tile, int row) {
    using E = Element<T>;
    float most = -INFINITY;
    GT_NO_UNROLL
    for (int piece = 0; piece < TileShape<64>::PIECES; piece++) {
        const uint4 x = lds<uint4>(tile + panel_at<128>(row, piece));
        most = fmaxf(most, fmaxf(fmaxf(fmaxf(E::lo(x.x), E::hi(x.x)), fmaxf(E::lo(x.y), E::hi(x.y))),
                                 fmaxf(fmaxf(E::lo(x.z), E::hi(x.z)), fmaxf(E::lo(x.w), E::hi(x.w)))));
    }
    return most;
}

/* Multiplies a pair of numbers of type T by `power`, a power of two, and converts the products to f16. */
template <class T>
GT_DEV uint32_t scaled_f16(uint32_t pair, float power) {
    return pack_f16(Element<T>::lo(pair) * power, Element<T>::hi(pair) * power);
}

/* The same for four pairs. */
template <class T>
GT_DEV uint4 scaled_f16(const uint4& pairs, float power) {
    uint32_t x[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
    const uint32_t bits = as_uint(power), both = bits | bits >> 16; /* as a pair of bf16 */
    GT_UNROLL
    for (int i = 0; i < 4; i++) {
        if constexpr (std::is_same<T, bf16>::value)
            x[i] = scaled_f16<bf16>(times_power_bf16(x[i], both), 1.0f);
        else
            x[i] = scaled_f16<T>(x[i], power);
    }
    return {x[0], x[1], x[2], x[3]};
}

/* Converts the 64 rows of a tile to f16 in place, each row times a power of two.  inverses[row] becomes the inverse of
 * the power.  The conversion is exact, except for elements more than 2^27 times smaller than the largest of their row.
 * `warps` warps share the rows; `warp` is this warp's index.  A warp converts AT_ONCE row blocks together. */
template <class T, int COLUMNS, int AT_ONCE = 1>
GT_DEV void rows_to_f16(uint32_t tile, uint32_t inverses, int warp, int warps) {
    using Lanes = RowLanes<COLUMNS>;
    const Lanes at;
    GT_NO_UNROLL
    for (int block = warp; block < CHUNK / Lanes::ROWS; block += AT_ONCE * warps) {
        uint4 x[AT_ONCE][Lanes::PIECES];
        Power power[AT_ONCE];
        GT_UNROLL
        for (int i = 0; i < AT_ONCE * Lanes::PIECES; i++)
            x[i / Lanes::PIECES][i % Lanes::PIECES] =
                lds<uint4>(tile + at.address(block + i / Lanes::PIECES * warps, i % Lanes::PIECES));
        GT_UNROLL
        for (int k = 0; k < AT_ONCE; k++) power[k] = power_of(row_maximum<T, Lanes::LANES>(larger_of<T>(x[k])));
        GT_UNROLL
        for (int i = 0; i < AT_ONCE * Lanes::PIECES; i++) {
            const uint4 from = x[i / Lanes::PIECES][i % Lanes::PIECES];
            const float value = power[i / Lanes::PIECES].value;
            sts<uint4>(tile + at.address(block + i / Lanes::PIECES * warps, i % Lanes::PIECES),
                       scaled_f16<T>(from, value));
        }
        GT_UNROLL
        for (int k = 0; k < AT_ONCE; k++)
            if (at.piece == 0)
                sts<float>(inverses + 4 * ((block + k * warps) * Lanes::ROWS + at.row), power[k].inverse);
    }
}

/* Backward computes a state inside a slot as a product of f16 operands.  The tokens' weights are factors of one
 * operand; the other operand has rows of B or C.  The weights are scaled so that their sum is at most WEIGHT_RANGE.  On
 * compute capability 9.0 the old state is part of the product, and the sum includes its part.  Elements of B or C are
 * scaled to at most 2^14 / WEIGHT_RANGE, so no product exceeds 2^14.  A weight keeps all its bits if it is at least
 * 2^-23 of the sum.  An element keeps all its bits if it is at least 2^-17 of the largest in its row, or 2^-20 in
 * bf16. */
constexpr float WEIGHT_RANGE = 0x1p10f;

/* ---- decay factors --------------------------------------------------------------------------------------------- */

/* Offsets of the decay factors of a chunk and head, in floats. */
struct Factors {
    static constexpr int DELTA = 0, PRE = 64, SUF = 128, U = 192, V = 256, HALF = 320; /* [64] each */
    static constexpr int DIAGONAL = 384;                                               /* [64][8] */
    static constexpr int BETWEEN = 896;            /* factors between two blocks: exp(a of block 1), exp(a of block 2),
                                                    * exp(a of both), 1 */
    static constexpr int KEEP = 900, FACTOR = 901; /* the Scale of the whole chunk (gt/recurrence/segments.cuh) */
    static constexpr int LOG = 902;                /* sum of a over the chunk, in natural logarithms */
    static constexpr int GROWTH = 903;             /* a bound of all L_ts, and at least 1 */
    static constexpr int COUNT = 904;
};

/* The factors that WarpState::update() needs for a chunk and unit, as offsets in floats.  OF_TOKENS: the tokens'
 * weights times the power of v.  INVERSE: the inverse of that power.  SUM: a bound of the sum that the chunk adds. */
struct Weights {
    static constexpr int OF_TOKENS = 0, INVERSE = 64, SUM = 65, PAIRS = 66,
                         COUNT = 68; /* PAIRS: in forward, the power of M */
};

/* 2^sum, but at most 2^127.99.  NaN stays NaN. */
GT_DEV float exp2_finite(float sum) { return ex2_approx(sum > 127.99f ? 127.99f : sum); }

/* The index in Layout of the decay between blocks t and s, t > s. */
template <class Layout = Factors>
GT_DEV int between_index(int t, int s) {
    return Layout::BETWEEN + (t - s == 3 ? 2 : t - s == 1 ? 3 : s);
}

/* Flags of make_factors(): which factors it computes.  SHORT_CODE computes DIAGONAL in a loop, which takes half the
 * machine code.  SQUARE_FACTORS are DIAGONAL_FACTORS in the layout of ChunkTokens (sm90/). */
constexpr int SUM_FACTORS = 1, DIAGONAL_FACTORS = 2, GROWTH_FACTOR = 4, CHUNK_FACTORS = 8; /* CHUNK_FACTORS: also
                                                                                            * GROWTH */
constexpr int SHORT_CODE = 16, SQUARE_FACTORS = 32;

/* Computes L_ts for one t and all 8 s in a half of a block.  log: log2 of each token's decay. */
GT_DEV void make_half_row(const float (&log)[8], int t, float (&row)[8]) {
    float sum = 0.0f;
    GT_UNROLL
    for (int s = 7; s >= 0; s--) {
        if (s < 7) sum += s < t ? log[s < 7 ? s + 1 : 7] : 0.0f;
        row[s] = s <= t ? exp2_finite(sum) : 0.0f;
    }
}

/* Stores the result of make_half_row() for token t of 64.  In DIAGONAL the result is a row.  A SQUARE of 8 x 8 has both
 * halves of a block: the result is a row if t is in the first half, and a column if t is in the second half. */
template <int WHICH, class Layout>
GT_DEV void store_half_row(uint32_t addresses, int t, const float (&row)[8]) {
    if constexpr (WHICH & SQUARE_FACTORS) {
        const bool is_column = t & 8;
        const int i = t % 8;
        const uint32_t to = addresses + 4 * (Layout::SQUARE + t / BLOCK * 64 + (is_column ? i : 8 * i));
        GT_UNROLL
        for (int s = 0; s < 8; s++)
            if (s < i || (s == i && !is_column)) sts<float>(to + 4 * (is_column ? 8 * s : s), row[s]);
    } else {
        const uint32_t to = addresses + 4 * (Layout::DIAGONAL + 8 * t);
        sts<float4>(to, {row[0], row[1], row[2], row[3]});
        sts<float4>(to + 16, {row[4], row[5], row[6], row[7]});
    }
}

/* One warp computes decay factors and stores them to shared memory at `addresses`.  delta: Delta of tokens 2 lane and 2
 * lane + 1.  The caller synchronises.  WHICH: flags of the factors to compute, so that several warps can share the
 * work.  Layout: the offset of each factor. */
template <int WHICH = SUM_FACTORS | DIAGONAL_FACTORS | CHUNK_FACTORS, class Layout = Factors>
GT_DEV void make_factors(uint32_t addresses, const float (&delta)[2], float A) {
    const int lane = here(), in_half = lane % 4, block = lane / 8;
    const bool upper = lane & 4; /* the second half of a block */
    const float a0 = delta[0] * A, a1 = delta[1] * A, l0 = a0 * LOG2_E, l1 = a1 * LOG2_E;
    if constexpr (WHICH & SUM_FACTORS) {
        /* sums over the lanes of a half: up to this lane, and from this lane on */
        float upto = l0 + l1, from = upto;
        GT_UNROLL
        for (int d = 1; d < 4; d *= 2) {
            const float left = shfl_up(upto, d), right = shfl_down(from, d);
            upto += in_half >= d ? left : 0.0f;
            from += in_half + d < 4 ? right : 0.0f;
        }
        float before = shfl_up(upto, 1), after = shfl_down(from, 1);
        before = in_half > 0 ? before : 0.0f;
        after = in_half < 3 ? after : 0.0f;
        const float half = shfl_idx(upto, lane | 3), other = shfl_xor(half, 4), all = half + other;
        const float block_before = upper ? other + before : before, block_after = upper ? after : other + after;
        float total[BLOCKS], chunk_before = 0.0f, chunk_after = 0.0f;
        GT_UNROLL
        for (int i = 0; i < BLOCKS; i++) total[i] = shfl_idx(all, 8 * i);
        GT_UNROLL
        for (int i = 0; i < BLOCKS; i++) {
            chunk_before += i < block ? total[i] : 0.0f;
            chunk_after += i > block ? total[i] : 0.0f;
        }
        const auto put = [&](int at, float first, float second) {
            sts<float2>(addresses + 4 * (at + 2 * lane), {exp2_finite(first), exp2_finite(second)});
        };
        sts<float2>(addresses + 4 * (Layout::DELTA + 2 * lane), {delta[0], delta[1]});
        const float pre0 = block_before + l0, pre1 = pre0 + l1, suf0 = block_after + l1, suf1 = block_after;
        put(Layout::U, pre0, pre1);
        put(Layout::V, suf0, suf1);
        put(Layout::HALF, upper ? before + l0 : after + l1, upper ? before + l0 + l1 : after);
        put(Layout::PRE, chunk_before + pre0, chunk_before + pre1);
        put(Layout::SUF, chunk_after + suf0, chunk_after + suf1);
        if (lane == 0)
            sts<float4>(addresses + 4 * Layout::BETWEEN,
                        {exp2_finite(total[1]), exp2_finite(total[2]), exp2_finite(total[1] + total[2]), 1.0f});
    }
    if constexpr (WHICH & (DIAGONAL_FACTORS | SQUARE_FACTORS)) {
        float log[8];
        GT_UNROLL
        for (int i = 0; i < 8; i++) log[i] = shfl_idx(i % 2 ? l1 : l0, (lane & ~3) + i / 2);
        /* computes the row of token 2 lane + i */
        const auto make_row = [&](int i) {
            float row[8];
            make_half_row(log, 2 * in_half + i, row);
            store_half_row<WHICH, Layout>(addresses, 2 * lane + i, row);
        };
        if constexpr (WHICH & SHORT_CODE) {
            GT_NO_UNROLL
            for (int i = 0; i < 2; i++) make_row(i);
        } else {
            GT_UNROLL
            for (int i = 0; i < 2; i++) make_row(i);
        }
    }
    if constexpr (WHICH & (GROWTH_FACTOR | CHUNK_FACTORS)) {
        const float growth = warp_sum((l0 > 0.0f ? l0 : 0.0f) + (l1 > 0.0f ? l1 : 0.0f));
        if (lane == 0) sts<float>(addresses + 4 * Layout::GROWTH, exp2_finite(growth));
    }
    if constexpr (WHICH & CHUNK_FACTORS) {
        const float sum = warp_sum(a0 + a1);
        if (lane == 0) {
            const Scale scale = scale_of_log(sum);
            sts<float2>(addresses + 4 * Layout::KEEP, {scale.keep, scale.factor});
            sts<float>(addresses + 4 * Layout::LOG, sum);
        }
    }
}

/* ---- sums ------------------------------------------------------------------------------------------------------- */

/* The largest of four inverses. */
GT_DEV float largest_of(float4 x) {
    const float a = x.x > x.y ? x.x : x.y, b = x.z > x.w ? x.z : x.w;
    return a > b ? a : b;
}

GT_DEV float part_of(float4 x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

GT_DEV float2 plus(float2 a, float2 b) { return {a.x + b.x, a.y + b.y}; }

/* x has values of tokens 2 lane and 2 lane + 1.  Returns, for both tokens, the sum over the token and all later
 * tokens. */
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

/* x has values of tokens 2 lane and 2 lane + 1.  Returns, for both tokens, the sum over all earlier tokens in the same
 * group of LANES lanes. */
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

/* Adds v over the 8 lanes that share j = lane % 4, and stores the sums to shared memory.  v[n] is a sum of column 2 j +
 * n % 2 of tile n / 2, where a tile is 8 columns of mma accumulators. */
GT_DEV void store_column_sums(float (&v)[4], uint32_t out) {
    const int g = lane_id() / 4, n = g / 2;
    reduce_scatter<4, 8, 4>(v, g);
    if (g % 2 == 0) sts<float>(out + 4 * (8 * (n / 2) + 2 * (lane_id() % 4) + n % 2), v[0]);
}

/* store_column_sums() to global memory. */
GT_DEV void store_column_sums(float (&v)[4], float* out) {
    const int g = lane_id() / 4, n = g / 2;
    reduce_scatter<4, 8, 4>(v, g);
    if (g % 2 == 0) out[8 * (n / 2) + 2 * (lane_id() % 4) + n % 2] = v[0];
}

/* x is a 16 x 16 block on the diagonal with rows s and columns t.  For each of its 16 tokens k, stores the sum of x
 * over t >= k > s. */
GT_DEV void store_diagonal(const float (&x)[2][4], uint32_t out) {
    const int g = lane_id() / 4, j = lane_id() % 4;
    float v[4] = {};
    GT_UNROLL
    for (int e = 0; e < 2; e++) { /* s = g + 8 e */
        float later = 0.0f;
        GT_UNROLL
        for (int n = 1; n >= 0; n--) { /* suffix sums along t, over the four lanes of a row */
            const float a = x[n][2 * e], b = x[n][2 * e + 1];
            float from = a + b, right = shfl_down(from, 1);
            from += j < 3 ? right : 0.0f;
            right = shfl_down(from, 2);
            from += j < 2 ? right : 0.0f;
            right = shfl_down(from, 1);
            const float after = (j < 3 ? right : 0.0f) + later;
            const int s = g + 8 * e, k = 8 * n + 2 * j;
            v[2 * n] += s < k ? a + (b + after) : 0.0f;
            v[2 * n + 1] += s < k + 1 ? b + after : 0.0f;
            later = shfl_idx(from, 4 * g);
        }
    }
    store_column_sums(v, out);
}

} /* namespace ssd */
} /* namespace gt */

#endif
