/* gt/ssd/mma/fp32_chunk.cuh - ssd on tensor cores, with fp32 activations: tiles of split numbers, and states in
 * registers.
 *
 * NUMBERS.  A split number x is the sum of two f16 numbers, times a power of two: hi is x rounded to f16, and lo is the
 * rest.  A number above 2^-15 of the largest in its row keeps 22 bits.  Smaller numbers have an error of 2^-38 of the
 * largest.  A product of two split numbers is three products:
 *
 *     (a_hi + a_lo) (b_hi + b_lo) = a_lo b_hi + a_hi b_lo + a_hi b_hi       a_lo b_lo is left out: it is 2^-22 of the
 *     result.
 *
 * tf32 also has 11 bits, so it would need three products, too, at half the rate.  x, B, C and M have a power of two for
 * each row (token).  The weighted x of the update and the state have one power for each warp.  Scaling by powers is
 * exact; the products are later multiplied by the inverses of the powers.
 *
 * A chunk is SHORT = 32 tokens, half as many as for 16-bit activations, because a split number takes twice the bytes.
 * For make_factors() (chunk.cuh) it is a chunk of 64 tokens whose second half has Delta = 0.
 *
 * TILES.  A tile has rows of COLUMNS fp32 numbers, which are split in place: a row then has hi of all columns, followed
 * by lo of all columns.  For ldmatrix this is a tile of 2 COLUMNS columns of f16.  If a pair of pieces k has hi, the
 * pair COLUMNS / 16 + k has the matching lo.
 *
 * SUMS.  Tensor cores round sums towards zero, so their sums run over at most 128 columns or 32 tokens.  fp32
 * instructions add these sums to the states.  Every sum has one fixed order, so results are deterministic. */
#ifndef GT_SSD_MMA_FP32_CHUNK_CUH
#define GT_SSD_MMA_FP32_CHUNK_CUH

#include "../problem.cuh"
#include "chunk.cuh"

namespace gt {
namespace ssd {

constexpr int ROWS_P = 64, HALF_P = 32; /* ROWS_P: rows p of a step; HALF_P: rows of G and h that are processed
                                         * together */

/* Indices of the offsets that a block of the gradients' kernels keeps in shared memory: see base(). */
enum SplitBase { BASE_X, BASE_DY, BASE_DX, BASE_STATE, BASE_C };

/* The warp's unit, and its index in the unit.  made_here() makes the compiler compute them again at each use.
 * Otherwise they would be spilled, and the kernels use so much shared memory that the L1 cache has no room for
 * spills. */
GT_DEV int unit_here() { return made_here(warp_id()) / UNIT_WARPS; }
GT_DEV int part_here() { return made_here(warp_id()) % UNIT_WARPS; }

/* ---- split numbers --------------------------------------------------------------------------------------------- */

/* power_of() for the whole range of fp32.  So rows of the smallest fp32 numbers keep their bits, too. */
GT_DEV Power split_power(float bound) {
    int exponent = 127 + 13 + 127 - (int)(as_uint(bound) >> 23 & 255);
    exponent = exponent < 12 ? 12 : exponent > 253 ? 253 : exponent;
    return {as_float((uint32_t)exponent << 23), as_float((uint32_t)(254 - exponent) << 23)};
}

/* finite() in two instructions.  NaN stays NaN. */
GT_DEV float clamped(float x) {
#ifdef __CUDA_ARCH__
    asm("min.NaN.f32 %0, %0, %1;\n\tmax.NaN.f32 %0, %0, %2;" : "+f"(x) : "f"(FLT_MAX), "f"(-FLT_MAX));
    return x;
#else
    return finite(x);
#endif
}

/* Splits x and y into a pair of hi and a pair of lo.  Both must be below 2^15. */
GT_DEV void split_pair(float x, float y, uint32_t& hi, uint32_t& lo) {
    hi = pack_f16(x, y);
    lo = pack_f16(x - unpack_f16_lo(hi), y - unpack_f16_hi(hi));
}

/* A left operand of 16 x 16 split numbers. */
struct SplitLeft {
    uint32_t hi[4], lo[4];
};

/* sums[m][n] += left[m] right[n].  Successive products go to different sums, so that they do not wait for each other.
 * hi, lo: the right operands, [n][two registers]. */
template <int ROWS, int COUNT>
GT_DEV void mma_split(float (&sums)[ROWS][COUNT][4], const SplitLeft (&left)[ROWS], const uint32_t (&hi)[COUNT][2],
                      const uint32_t (&lo)[COUNT][2]) {
    GT_UNROLL
    for (int i = 0; i < 3 * ROWS * COUNT; i++) { /* the small products come first */
        const int term = i / (ROWS * COUNT), m = i / COUNT % ROWS, n = i % COUNT;
        const uint32_t(&b)[2] = term == 1 ? lo[n] : hi[n];
        mma_f16(sums[m][n], term == 0 ? left[m].lo : left[m].hi, b[0], b[1]);
    }
}

/* ---- tiles ----------------------------------------------------------------------------------------------------- */

template <int COLUMNS>
struct SplitTile {
    static constexpr int WIDE = 2 * COLUMNS, BYTES = SHORT * TileShape<WIDE>::PITCH_BYTES, LO = COLUMNS / 16;
    /* for a warp that splits rows: LANES lanes for each row, EACH pieces of 8 numbers for each lane, ROWS rows at a
     * time */
    static constexpr int LANES = COLUMNS / 8 < 8 ? COLUMNS / 8 : 8, EACH = COLUMNS / 8 / LANES, ROWS = 32 / LANES;
    static constexpr int ROW_SETS = SHORT / ROWS, AT_ONCE = EACH < 2 ? 2 : 1; /* ROW_SETS: sets of ROWS rows; AT_ONCE:
                                                                               * sets that are processed together */
};

/* load_tile() for SHORT rows of fp32, with a multiple of 4 columns.  first: the first element that this thread
 * copies. */
template <int COLUMNS>
GT_DEV void load_split_rows(uint32_t tile, const float* first, int64_t pitch, int rows, int columns) {
    constexpr int WIDE = SplitTile<COLUMNS>::WIDE, PIECES = TileShape<WIDE>::PIECES, STEP = THREADS / PIECES;
    const unsigned thread = thread_here();
    const int row = thread / PIECES, piece = thread % PIECES;
    const uint32_t to = tile + panel_at<2 * WIDE>(row, piece);
    if (4 * piece >= columns) rows = 0;
    GT_UNROLL
    for (int k = 0; k < SHORT; k += STEP) { /* rows STEP apart have the same swizzle */
        if (SHORT < STEP && row >= SHORT) break;
        cp_async<16>(to + k * TileShape<WIDE>::PITCH_BYTES, first + k * pitch, row + k < rows ? 16 : 0);
    }
}

/* load_split_rows() with the tile's first element as `first`. */
template <int COLUMNS>
GT_DEV void load_split_tile(uint32_t tile, const float* first, int64_t pitch, int rows, int columns) {
    constexpr unsigned PIECES = COLUMNS / 4;
    const unsigned thread = thread_here();
    load_split_rows<COLUMNS>(tile, first + (thread / PIECES * pitch + 4 * (thread % PIECES)), pitch, rows, columns);
}

/* Lets a warp split rows of a tile in place.  The object holds the lane's offsets in the rows from ROWS group on: of
 * its first 4 numbers, and of hi of these numbers.  The same offsets serve rows that are a multiple of 8 further,
 * because the swizzle repeats. */
template <int COLUMNS>
struct RowSplitter {
    using S = SplitTile<COLUMNS>;
    static constexpr int AT_ONCE = S::AT_ONCE, COUNT = AT_ONCE * 2 * S::EACH;
    int piece, row0;
    uint32_t from[AT_ONCE], to[AT_ONCE];

    /* group: a multiple of AT_ONCE */
    GT_METHOD explicit RowSplitter(int group) {
        const int lane = here();
        piece = lane % S::LANES, row0 = group * S::ROWS + lane / S::LANES;
        /* flip: which half of the 8 numbers the lane takes first.  Because of flip, the 16-byte pieces of eight lanes
         * lie in different banks, and so do the 8-byte pieces of sixteen lanes. */
        const int flip = (piece / 4 ^ row0) & 1;
        GT_UNROLL
        for (int k = 0; k < AT_ONCE; k++) {
            from[k] = panel_at<2 * S::WIDE>(row0 + k * S::ROWS, 2 * piece + flip);
            to[k] = panel_at<2 * S::WIDE>(row0 + k * S::ROWS, piece) + 8 * flip;
        }
    }

    /* Splits the rows that are `further` rows after the group's rows.  further: a multiple of 8.  inverses[row] becomes
     * the inverse of the row's power.  gates: NULL, or the tile's first row of z, which has `rows` rows and `columns`
     * columns.  With gates, the tile is first multiplied by silu(z). */
    GT_METHOD void split(uint32_t tile, uint32_t inverses, int further, const float* gates = nullptr, int64_t pitch = 0,
                         int rows = 0, int columns = 0) const {
        float4 x[COUNT];
        Power power[AT_ONCE];
        tile += further * TileShape<S::WIDE>::PITCH_BYTES;
        GT_UNROLL
        for (int i = 0; i < COUNT; i++) {
            const int k = i / (2 * S::EACH), n = i / 2 % S::EACH;
            x[i] = lds<float4>(tile + (from[k] ^ 16 * (i % 2)) + 32 * S::LANES * n);
        }
        if (gates) {
            GT_UNROLL
            for (int i = 0; i < COUNT; i++) {
                const int row = row0 + further + i / (2 * S::EACH) * S::ROWS;
                const int half = i % 2 ^ ((piece / 4 ^ row0) & 1);
                const int column = 8 * (piece + i / 2 % S::EACH * S::LANES) + 4 * half;
                if (row >= rows || column >= columns) continue;
                const float4 z = ldg<float4>(gates + row * pitch + column);
                x[i] = {x[i].x * silu(z.x), x[i].y * silu(z.y), x[i].z * silu(z.z), x[i].w * silu(z.w)};
            }
        }
        GT_UNROLL
        for (int k = 0; k < AT_ONCE; k++) {
            float largest = 0.0f;
            GT_UNROLL
            for (int i = 2 * S::EACH * k; i < 2 * S::EACH * (k + 1); i++)
                largest =
                    fmaxf(largest, fmaxf(fmaxf(fabsf(x[i].x), fabsf(x[i].y)), fmaxf(fabsf(x[i].z), fabsf(x[i].w))));
            GT_UNROLL
            for (int mask = 1; mask < S::LANES; mask *= 2) largest = fmaxf(largest, shfl_xor(largest, mask));
            power[k] = split_power(largest);
        }
        sync_warp(); /* all lanes have read the rows */
        GT_UNROLL
        for (int i = 0; i < COUNT; i++) {
            uint2 hi, lo;
            const int k = i / (2 * S::EACH), n = i / 2 % S::EACH;
            const float by = power[k].value;
            split_pair(x[i].x * by, x[i].y * by, hi.x, lo.x);
            split_pair(x[i].z * by, x[i].w * by, hi.y, lo.y);
            const uint32_t address = to[k] ^ 8 * (i % 2),
                           address_lo = COLUMNS < 64 ? address ^ 2 * COLUMNS : address + 2 * COLUMNS;
            sts<uint2>(tile + address + 16 * S::LANES * n, hi);
            sts<uint2>(tile + address_lo + 16 * S::LANES * n, lo);
        }
        GT_UNROLL
        for (int k = 0; k < AT_ONCE; k++)
            if (piece == 0) sts<float>(inverses + 4 * (row0 + further + k * S::ROWS), power[k].inverse);
    }
};

/* Splits a tile.  `warps` warps share the rows, and `warp` is this warp's index.  warps: a power of two, and more than
 * 1 for 128 columns. */
template <int COLUMNS>
GT_DEV void split_rows(uint32_t tile, uint32_t inverses, int warp, int warps) {
    using S = SplitTile<COLUMNS>;
    constexpr int AT_ONCE = S::AT_ONCE;
    const int group = AT_ONCE * warp, step = AT_ONCE * warps * S::ROWS;
    if (group >= S::ROW_SETS) return;
    const RowSplitter<COLUMNS> rows(group);
    GT_NO_UNROLL
    for (int further = 0; further + group * S::ROWS < SHORT; further += step) rows.split(tile, inverses, further);
}

/* ---- states ---------------------------------------------------------------------------------------------------- */

/* make_split_weights() fills Weights for tokens 2 lane and 2 lane + 1.  weight: Delta suf, or pre in reverse.  left,
 * right: the inverse powers of both tiles.  The stored weights are WEIGHT_POWER times as large.  The reason: for
 * numbers near 1 each inverse is 2^-13, so the products with the smallest weights would leave the range of fp32.
 * Weights::INVERSE becomes the inverse of the power of v. */
constexpr float WEIGHT_POWER = 0x1p24f;

GT_DEV void make_split_weights(uint32_t addresses, float2 weight, float2 left, float2 right) {
    weight = {weight.x * left.x * WEIGHT_POWER * right.x, weight.y * left.y * WEIGHT_POWER * right.y};
    float largest = fmaxf(finite(fabsf(weight.x) * 0x1p14f), finite(fabsf(weight.y) * 0x1p14f));
    GT_UNROLL
    for (int mask = 1; mask < 32; mask *= 2) largest = fmaxf(largest, shfl_xor(largest, mask));
    const Power power = split_power(largest);
    sts<float2>(addresses + 4 * Weights::OF_TOKENS + 8 * here(), {weight.x * power.value, weight.y * power.value});
    if (here() == 0) sts<float>(addresses + 4 * Weights::INVERSE, power.inverse);
}

/* A warp's part of a state: like WarpState, but the registers have no power of two. */
template <int NP>
struct SplitState {
    static constexpr int TILES = NP / 8;
    float H[TILES][4];

    GT_METHOD void load(const float* from, int row0, const Problem& in) {
        const int row = row0 + here() / 4, column = 2 * (here() % 4);
        if (from) from += (int64_t)row * in.N + column;
        GT_UNROLL
        for (int i = 0; i < TILES * 2; i++) {
            const int n = i % TILES, half = i / TILES;
            const bool exists = from && row + 8 * half < in.P && 8 * n + column < in.columns;
            const float2 x = exists ? ldg<float2>(from + 8 * half * in.N + 8 * n) : float2{0.0f, 0.0f};
            H[n][2 * half] = x.x;
            H[n][2 * half + 1] = x.y;
        }
    }

    GT_METHOD void store(float* to, int row0, const Problem& in, bool adds = false) const {
        const int row = row0 + here() / 4, column = 2 * (here() % 4);
        to += (int64_t)row * in.N + column;
        GT_UNROLL
        for (int i = 0; i < TILES * 2; i++) {
            const int n = i % TILES, half = i / TILES;
            if (row + 8 * half >= in.P || 8 * n + column >= in.columns) continue;
            float* at = to + 8 * half * in.N + 8 * n;
            float2 x = {H[n][2 * half], H[n][2 * half + 1]};
            if (adds) {
                const float2 before = ldg<float2>(at);
                x = {before.x + x.x, before.y + x.y};
            }
            stg<float2>(at, x);
        }
    }

    /* The power of two that brings the largest magnitude of the warp's part to between 2^13 and 2^14. */
    GT_METHOD Power power() const {
        float partial[4] = {};
        GT_UNROLL
        for (int i = 0; i < TILES * 4; i++) partial[i % 4] = fmaxf(partial[i % 4], fabsf(H[i / 4][i % 4]));
        float most = fmaxf(fmaxf(partial[0], partial[1]), fmaxf(partial[2], partial[3]));
        GT_UNROLL
        for (int mask = 1; mask < 32; mask *= 2) most = fmaxf(most, shfl_xor(most, mask));
        return split_power(most);
    }

    /* Splits 16 columns of the state, from 16 k on, into right operands: [8 rows][two registers]. */
    GT_METHOD void operands(int k, float power, uint32_t (&hi)[2][2], uint32_t (&lo)[2][2]) const {
        GT_UNROLL
        for (int i = 0; i < 4; i++) {
            const float(&from)[4] = H[2 * k + i % 2];
            split_pair(from[i / 2 * 2] * power, from[i / 2 * 2 + 1] * power, hi[i / 2][i % 2], lo[i / 2][i % 2]);
        }
    }

    /* H <- E H, as rescale() does. */
    GT_METHOD void decay(Scale scale) {
        if (scale.keep != 0.0f) {
            GT_UNROLL
            for (int i = 0; i < TILES * 4; i++)
                H[i / 4][i % 4] = fma_rn(scale.factor, H[i / 4][i % 4], H[i / 4][i % 4]);
        } else {
            GT_UNROLL
            for (int i = 0; i < TILES * 4; i++) H[i / 4][i % 4] *= scale.factor;
        }
    }

    /* H += sum_t v_t b_t^T, v_t = weight_t (x_t or dy_t).  left: split tile of 64 columns; the warp takes 16 columns
     * from 16 unit_warp on.  right: split tile of B or C. */
    GT_METHOD void update(uint32_t left, int unit_warp, uint32_t right, uint32_t weights) {
        using X = SplitTile<64>;
        using B = SplitTile<NP>;
        const float undo = lds<float>(weights + 4 * Weights::INVERSE) * (1.0f / WEIGHT_POWER);
        SplitLeft v[SHORT_BLOCKS];
        const uint32_t lefts = by_columns<X::WIDE>(left), tokens = weights + 8 * (here() % 4);
        GT_UNROLL
        for (int block = 0; block < SHORT_BLOCKS; block++) {
            uint32_t hi[4], lo[4];
            const float2 low = lds<float2>(tokens + 64 * block), high = lds<float2>(tokens + 64 * block + 32);
            ldmatrix_x4_trans(hi, block_at<X::WIDE>(lefts, block, unit_warp));
            ldmatrix_x4_trans(lo, block_at<X::WIDE>(lefts, block, unit_warp + X::LO));
            GT_UNROLL
            for (int e = 0; e < 4; e++) {
                const float2 w = e < 2 ? low : high;
                split_pair(fma_rn(unpack_f16_lo(hi[e]), w.x, unpack_f16_lo(lo[e]) * w.x),
                           fma_rn(unpack_f16_hi(hi[e]), w.y, unpack_f16_hi(lo[e]) * w.y), v[block].hi[e],
                           v[block].lo[e]);
            }
        }
        const uint32_t rights = by_rows<B::WIDE>(right);
        constexpr int WIDTH = 2;
        GT_UNROLL
        for (int n0 = 0; n0 < TILES; n0 += WIDTH) {
            float added[1][WIDTH][4] = {};
            GT_UNROLL
            for (int block = 0; block < SHORT_BLOCKS; block++) {
                uint32_t hi[4], lo[4];
                ldmatrix_x4_trans(hi, block_at<B::WIDE>(rights, block, n0 / 2));
                ldmatrix_x4_trans(lo, block_at<B::WIDE>(rights, block, n0 / 2 + B::LO));
                const uint32_t b_hi[2][2] = {{hi[0], hi[1]}, {hi[2], hi[3]}},
                               b_lo[2][2] = {{lo[0], lo[1]}, {lo[2], lo[3]}};
                const SplitLeft a[1] = {v[block]};
                mma_split(added, a, b_hi, b_lo);
            }
            GT_UNROLL
            for (int i = 0; i < WIDTH * 4; i++) {
                float& x = H[n0 + i / 4][i % 4];
                x = fma_rn(added[0][i / 4][i % 4], undo, x);
            }
        }
    }
};

GT_DEV Scale split_decay(uint32_t addresses) {
    const float2 scale = lds<float2>(addresses + 4 * Factors::KEEP);
    return {scale.x, scale.y};
}

} /* namespace ssd */
} /* namespace gt */

#endif
