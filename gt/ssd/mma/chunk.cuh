/* gt/ssd/mma/chunk.cuh - the arithmetic of a chunk on tensor cores: tiles, numbers, decay factors, sums.  A chunk is 64
 * tokens; chunks count from a sequence's first token.  Tokens after the last one have Delta = 0 and rows of zeros, so
 * they change nothing.  This file knows no Problem and includes no other file of ssd.
 *
 * TILES.  A tile has rows of COLUMNS 16-bit elements, 16 to 128, in pieces of 16 bytes.  The pieces lie as panel_at()
 * of base/tile.cuh places them: the pieces of one column in eight rows lie in different banks.
 *
 * NUMBERS.  Operands of products with states are f16.  Each row (token) or tile has its own power of two, which brings
 * its largest magnitude to 2^13 ... 2^14.  Elements then keep 11 bits over 27 binades below that maximum (fewer in one
 * case: see WEIGHT_RANGE).  rows_to_f16() converts the rows of a tile in place, exactly.  It stores the inverses of the
 * powers, which become factors of the decay factors.  power_of() makes the power of a computed tile from its bound.
 *
 * DECAY FACTORS of a chunk and head, from a_t = Delta_t A.  Every exponent is a sum of the a it spans, formed by
 * additions alone; factors are never divided.  Blocks have 16 tokens, and their halves have 8:
 *
 *     L_ts = exp(sum_{s<m<=t} a_m) = U[t] . between(t/16, s/16) . V[s]    t, s in different blocks
 *                                  = HALF[t] . HALF[s]                    in one block, different halves
 *                                  = DIAGONAL[t][s % 8]                   in one half; 0 for s > t.
 *     U = exp(from its block's first token through t)     V = exp(from after s to its block's end).
 *     HALF = V of halves for a block's first 8 tokens, U of halves for its last 8.
 *     PRE = exp(from the chunk's first token through t)   SUF = exp(from after s to the chunk's end).
 * Factors too large for fp32 (Delta A > 0) are stored as 2^127.99, which is finite: a state of zero stays zero under
 * any growth. */
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

/* A lane's address for ldmatrix_x4 of the 16 x 16 elements at row 0 of a tile, pieces 0 and 1, in two orders.  At rows
 * 16 i and pieces 2 k, 2 k + 1 the address is  (address ^ 32 k) + 16 i PITCH_BYTES.  This needs tiles that start at
 * multiples of 128 bytes.  For offsets of 128 bytes or more within a row, add (32 k & ~127) and apply only the rest by
 * xor.
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

/* The address at rows 16 `row_block` ... and pieces 2 `pair`, 2 `pair` + 1. */
template <int COLUMNS>
GT_DEV uint32_t block_at(uint32_t address, int row_block, int pair) {
    const uint32_t k = 32u * (uint32_t)pair;
    return (address ^ (k & 127u)) + (k & ~127u) + (uint32_t)(16 * row_block * TileShape<COLUMNS>::PITCH_BYTES);
}

/* Starts the copy of a tile from global memory by all THREADS threads of a block.  Row r begins at first + r pitch (in
 * elements; 16-byte aligned).  Rows from `rows` on and columns from `columns` on (a multiple of 8) become zeros. */
template <int COLUMNS, int THREADS, class T>
GT_DEV void load_tile(uint32_t tile, const T* first, int64_t pitch, int rows, int columns) {
    using S = TileShape<COLUMNS>;
    constexpr int STEP = THREADS / S::PIECES; /* rows at a time */
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
    constexpr int STEP = THREADS / S::PIECES; /* rows at a time */
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

/* The order in which a warp reads the rows of a tile without bank conflicts: ROWS rows at a time, LANES lanes per row,
 * PIECES pieces per lane. */
template <int COLUMNS>
struct RowLanes {
    using S = TileShape<COLUMNS>;
    static constexpr int LANES = S::PIECES < 4 ? S::PIECES : 4, PIECES = S::PIECES / LANES, ROWS = 32 / LANES;
    int row, piece; /* the lane's first row and piece; its next pieces are LANES further */
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

/* The largest magnitude among the lanes of a row, as float, returned to each of these lanes. */
template <class T, int LANES>
GT_DEV float row_maximum(uint32_t most) {
    float largest = fmaxf(Element<T>::lo(most), Element<T>::hi(most));
    GT_UNROLL
    for (int mask = 1; mask < LANES; mask *= 2) largest = fmaxf(largest, shfl_xor(largest, mask));
    return largest;
}

/* The largest magnitudes of the pieces of a row, as a pair. */
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

/* A bound of |silu(z)| for every z up to `most`.  The bound is tight: |silu| is 0.2785 at z = -1.278 and falls below
 * that z. */
GT_DEV float gate_bound(float most) {
    if (most > -1.28f) return fmaxf(most, 0.2785f);
    const float z = fmaxf(most, -100.0f); /* avoids infinity times 0 */
    return -z * ex2_approx(z * LOG2_E);
}

/* The largest number (with its sign) in row `row` of a tile. */
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

/* A pair of T times a power of two, as f16. */
template <class T>
GT_DEV uint32_t scaled_f16(uint32_t pair, float power) {
    return pack_f16(Element<T>::lo(pair) * power, Element<T>::hi(pair) * power);
}

/* Four pairs of T times a power of two, as f16. */
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

/* Turns the 64 rows of a tile into f16 in place, each row times a power of two; inverses[row] <- its inverse, for the
 * products.  Exact, except for elements more than 2^27 times smaller than their row's largest.  `warps` warps share the
 * rows; `warp` is this warp's number. */
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

/* Backward makes a state of a chunk as a product of f16 operands.  One operand has the tokens' weights, alone or as
 * factors in rows of x or dy.  The other has rows of B or C.  The sum of weights (on 9.0 the bound of the state) is at
 * most WEIGHT_RANGE.  An element of the rows of B or C is at most 2^14 / WEIGHT_RANGE, so no product exceeds 2^14.
 * Weights keep all their bits down to 2^-23 of that sum.  A row's elements keep theirs down to 2^-17 of the row's
 * largest, bf16's down to 2^-20. */
constexpr float WEIGHT_RANGE = 0x1p10f;

/* ---- decay factors --------------------------------------------------------------------------------------------- */

/* Offsets of the decay factors of a chunk and head, in floats. */
struct Factors {
    static constexpr int DELTA = 0, PRE = 64, SUF = 128, U = 192, V = 256, HALF = 320; /* [64] each */
    static constexpr int DIAGONAL = 384;                                               /* [64][8] */
    static constexpr int BETWEEN = 896;            /* between two blocks: exp(a of block 1), exp(of block 2), exp(of
                                                    * both), 1 */
    static constexpr int KEEP = 900, FACTOR = 901; /* Scale of the whole chunk */
    static constexpr int LOG = 902;                /* sum of a over the chunk, natural */
    static constexpr int GROWTH = 903;             /* at least 1, and at least L_ts of any pair */
    static constexpr int COUNT = 904;
};

/* Factors of update() for a chunk and unit, as offsets in floats.  OF_TOKENS: the tokens' weights times the power of v.
 * INVERSE: the inverse of that power.  SUM: a bound of the added sum. */
struct Weights {
    static constexpr int OF_TOKENS = 0, INVERSE = 64, SUM = 65, PAIRS = 66,
                         COUNT = 68; /* PAIRS: forward's power of M */
};

/* 2^sum, at most 2^127.99; NaN stays. */
GT_DEV float exp2_finite(float sum) { return ex2_approx(sum > 127.99f ? 127.99f : sum); }

/* The factor between blocks `t` > `s`, as an index in Factors or in another layout with these factors. */
template <class Layout = Factors>
GT_DEV int between_index(int t, int s) {
    return Layout::BETWEEN + (t - s == 3 ? 2 : t - s == 1 ? 3 : s);
}

/* Flags that choose the factors to make.  SHORT_CODE makes them in a loop, which takes half the machine code.
 * SQUARE_FACTORS: DIAGONAL_FACTORS in the layout of ChunkTokens. */
constexpr int SUM_FACTORS = 1, DIAGONAL_FACTORS = 2, GROWTH_FACTOR = 4, CHUNK_FACTORS = 8; /* also GROWTH */
constexpr int SHORT_CODE = 16, SQUARE_FACTORS = 32;

/* Makes row t of half a block: L_ts for s = 0 to 7.  log: log2 of each token's decay. */
GT_DEV void make_half_row(const float (&log)[8], int t, float (&row)[8]) {
    float sum = 0.0f;
    GT_UNROLL
    for (int s = 7; s >= 0; s--) {
        if (s < 7) sum += s < t ? log[s < 7 ? s + 1 : 7] : 0.0f;
        row[s] = s <= t ? exp2_finite(sum) : 0.0f;
    }
}

/* Stores the row that make_half_row() made for token t of 64, to DIAGONAL or to SQUARE.  In SQUARE it becomes a row if
 * t is in the first half of a block, else a column. */
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

/* Fills the factors at `addresses` (shared) from A and from Delta of the tokens 2 lane, 2 lane + 1.  Called by one
 * warp; the caller synchronises.  WHICH: flags of the factors to make, so that warps can share the work.  Layout: the
 * offset of each factor. */
template <int WHICH = SUM_FACTORS | DIAGONAL_FACTORS | CHUNK_FACTORS, class Layout = Factors>
GT_DEV void make_factors(uint32_t addresses, const float (&delta)[2], float A) {
    const int lane = here(), in_half = lane % 4, block = lane / 8;
    const bool upper = lane & 4; /* the second half of a block */
    const float a0 = delta[0] * A, a1 = delta[1] * A, l0 = a0 * LOG2_E, l1 = a1 * LOG2_E;
    if constexpr (WHICH & SUM_FACTORS) {
        /* sums within a half: of the lanes before, and of the lanes after */
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
        /* for token 2 lane + i */
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

/* Each token's sum over itself and all later tokens, for the lane's pair of tokens. */
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

/* Each token's sum over all earlier tokens, without itself, within LANES lanes. */
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

/* Stores column sums, each over the 8 lanes of a column.  The sum of tile n / 2, column 2 j + n % 2 goes to out + 8 (n
 * / 2) + 2 j + n % 2. */
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

/* Stores sum_{t>=k>s} of a 16 x 16 block on the diagonal, for each of its 16 k. */
GT_DEV void store_diagonal(const float (&x)[2][4], uint32_t out) {
    const int g = lane_id() / 4, j = lane_id() % 4;
    float v[4] = {};
    GT_UNROLL
    for (int e = 0; e < 2; e++) { /* s = g + 8 e */
        float later = 0.0f;
        GT_UNROLL
        for (int n = 1; n >= 0; n--) { /* suffixes along t, in the four lanes of a row */
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
