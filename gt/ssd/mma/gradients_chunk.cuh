/* gt/ssd/mma/gradients_chunk.cuh - the tiles of chunk_gradient_kernel (gradients.cuh): layout of shared memory, copies,
 * conversion to f16, and the state that the block computes from the neighbour, which is the other chunk of its slot. */
#ifndef GT_SSD_MMA_GRADIENTS_CHUNK_CUH
#define GT_SSD_MMA_GRADIENTS_CHUNK_CUH

#include "../problem.cuh"
#include "chunk.cuh"

namespace gt {
namespace ssd {

/* MORE: the kernel supports z, and partial sums of other launches.  Kernels without MORE take fewer registers. */
template <int N_, int STAGES_, bool MORE_ = false>
struct ChunkGradientTraits {
    static constexpr int N = N_, STAGES = STAGES_;
    static constexpr bool MORE = MORE_;
    static constexpr int WARPS = 8, THREADS = 32 * WARPS;
    static constexpr int COLUMNS = N / 2; /* columns of dC or dB per warp, in 32 rows */
    static constexpr int PASS = COLUMNS > 32 ? 16 : COLUMNS, PASSES = COLUMNS / PASS, TILES = PASS / 8;
    /* make_state(): MADE_WARPS warps share the columns of the state; a warp computes MADE_TILES tiles of 8 columns in
     * MADE_BLOCKS blocks of 16 rows */
    static constexpr int MADE_WARPS = N < 64 ? N / 8 : 8, MADE_TILES = N / 8 / MADE_WARPS, MADE_BLOCKS = MADE_WARPS / 2;
    /* The two warps without pairs.  TIME_WARP computes da and ddt of the previous step.  FACTOR_WARP computes Delta and
     * decay factors. */
    static constexpr int TIME_WARP = 4, FACTOR_WARP = 5;
    /* offsets and sizes in bytes */
    static constexpr int STATE = CHUNK * N * 2, ROWS = CHUNK * 64 * 2;
    static constexpr int B = 0, C = B + STATE, STAGE0 = C + STATE;
    static constexpr int X = 0, DY = X + ROWS, NEXT = DY + ROWS, H = NEXT + ROWS, G = H + STATE; /* in a stage */
    static constexpr int STAGE = G + STATE;
    static constexpr int FLOATS = STAGE0 + STAGES * STAGE;
    static constexpr int W_PITCH = 66; /* after the last step, fp32 W [64][66] overwrites a stage */
    static_assert(4 * CHUNK * W_PITCH <= STAGE, "room for it");
    /* Offsets in floats from FLOATS on.  With two stages there are two sets of factors, which the steps use in turn. */
    static constexpr int COPIES = STAGES;
    static constexpr int FACTORS = 0, MADE = FACTORS + COPIES * Factors::COUNT; /* weights [64] and E of the neighbour:
                                                                                 * neighbour_factors() */
    static constexpr int STATE_INVERSES = MADE + CHUNK + 4;                     /* [2][h 4, G 4] */
    static constexpr int PLACES = STATE_INVERSES + 16;                          /* place_step() */
    static constexpr int MADE_INVERSE = PLACES + 12, SKIP = MADE_INVERSE + 1;   /* SKIP: [2], Dskip of a step's head */
    static constexpr int ROW_INVERSES = MADE_INVERSE + 4; /* inverses of rows, [COPIES][x 64, dy 64]; after the last
                                                           * step, inverses of the rows of W */
    static constexpr int M_INVERSE = ROW_INVERSES + COPIES * 2 * CHUNK,
                         STEP_DELTA = M_INVERSE + CHUNK; /* Delta [64] and A of the step whose decay factors are
                                                          * computed next */
    /* WEIGHT: weights of the neighbour's tokens.  With one stage WEIGHT and M_INVERSE share memory; a barrier separates
     * their uses. */
    static constexpr int WEIGHT = STAGES == 1 ? M_INVERSE : STEP_DELTA + CHUNK + 4;
    static constexpr int B_INVERSE = (STAGES == 1 ? STEP_DELTA + 4 : WEIGHT) + CHUNK, C_INVERSE = B_INVERSE + CHUNK,
                         NEXT_INVERSE = C_INVERSE + CHUNK;
    static constexpr int ROW_BOUND = NEXT_INVERSE + CHUNK, WEIGHT_SUM = ROW_BOUND + 8; /* [8] each: for the rows of each
                                                                                        * warp */
    static constexpr int M_BOUND = WEIGHT_SUM + 8; /* [8]: bounds over all rows from row 8 i on */
    static constexpr int DSKIP = M_BOUND + 8;      /* if per channel: [2 halves of t][p] */
    static constexpr int SUMS = DSKIP + 2 * CHUNK; /* [2]: sums of two steps in turn */
    /* Offsets from the step's SUMS.  ROW_SUMS and COLUMN_SUMS are sums of Gamma in a block of pairs, indexed by
     * pair_index() or lower_pair_index(). */
    static constexpr int ROW_SUMS = 0;                            /* [6][t]: sums over s, for blocks under the
                                                                   * diagonal */
    static constexpr int COLUMN_SUMS = ROW_SUMS + 6 * BLOCK;      /* [10][s]: sums over t, without Delta_s */
    static constexpr int DIAGONAL = COLUMN_SUMS + 10 * BLOCK;     /* [k]: see store_diagonal() */
    static constexpr int E = DIAGONAL + CHUNK, F = E + 2 * CHUNK; /* [2 halves of n][t]; F without Delta_s */
    static constexpr int Z = F + 2 * CHUNK, TRACE = Z + 4;        /* Z: [4], <G, h> of 16 rows p each; TRACE: [4], sum
                                                                   * of <dy_t, x_t> over 16 tokens */
    static constexpr int SUMS_COUNT = TRACE + 4;
    static constexpr int SMEM = FLOATS + 4 * (SUMS + 2 * SUMS_COUNT);
    static_assert(SMEM <= (STAGES == 2 ? 163 : 99) * 1024, "fits: where two stages may not, one does");
    static_assert(SUMS % 4 == 0 && SUMS_COUNT % 4 == 0 && Factors::COUNT % 4 == 0 && PLACES % 2 == 0, "aligned");
};

/* The index of the block of pairs with tokens t of block `t` and tokens s of block `s`.  pair_index() counts the blocks
 * on and under the diagonal.  lower_pair_index() counts only the blocks under the diagonal. */
GT_HD int pair_index(int t, int s) { return t * (t + 1) / 2 + s; }
GT_HD int lower_pair_index(int t, int s) { return t * (t - 1) / 2 + s; }

/* A block's chunk, and functions for its addresses in shared memory. */
template <class C>
struct ChunkGradientBlock : ChunkPlace {
    GT_METHOD uint32_t address(int offset) const { return smem + C::FLOATS + 4 * offset; }
    GT_METHOD float value(int offset) const { return lds<float>(address(offset)); }
    GT_METHOD uint32_t stage(int step) const { return smem + C::STAGE0 + step % C::STAGES * C::STAGE; }
    GT_METHOD int factor(int step, int offset) const { return C::FACTORS + step % C::COPIES * Factors::COUNT + offset; }
    GT_METHOD int sums(int step, int offset) const { return C::SUMS + step % 2 * C::SUMS_COUNT + offset; }
    GT_METHOD int row_inverse(int step, bool of_dy) const {
        return C::ROW_INVERSES + (step % C::COPIES * 2 + of_dy) * CHUNK;
    }
};

/* ---- loads, and f16 -------------------------------------------------------------------------------------------- */

/* Indices of the global addresses of a step: of the sources of its copies, and of dx. */
enum Place { PLACE_X, PLACE_DY, PLACE_NEXT, PLACE_H, PLACE_G, PLACE_DX };

template <class C>
GT_DEV void set_place(const ChunkGradientBlock<C>& me, int place, const void* first) {
    sts<uint64_t>(me.address(C::PLACES + 2 * place), (uint64_t)(uintptr_t)first);
}

template <class T, class C>
GT_DEV T* place_of(const ChunkGradientBlock<C>& me, int place) {
    return (T*)(uintptr_t)lds<uint64_t>(me.address(C::PLACES + 2 * place));
}

/* One warp computes the addresses from which all threads copy the tiles of a step. */
template <class C>
GT_DEV void place_step(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me, int step) {
    const Problem& in = p.in;
    const int lane = lane_id(), h = me.head(p, step), p0 = me.p0(p, step);
    if (lane < 3) {
        const bool of_x = lane == PLACE_X || (lane == PLACE_NEXT && me.second);
        const gt_stride stride = of_x ? in.x_stride : in.dy_stride;
        const int64_t first = lane == PLACE_NEXT ? me.neighbour() : me.first;
        set_place(me, lane, static_cast<const uint16_t*>(of_x ? in.x : in.dy) + offset_of(stride, me.b, first, h) + p0);
    } else if (lane < 5) { /* without states, copy_state() reads nothing, so any address will do */
        const f16* states = lane == PLACE_H ? p.h.values : p.G.values;
        const int64_t state = ((((int64_t)me.b * in.H + h) * p.slots + me.slot) * in.P + p0) * in.N;
        set_place(me, lane, states ? states + state : static_cast<const f16*>(in.x));
    }
}

/* Computes the address of dx. */
template <class C>
GT_DEV void place_dx(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me, int step) {
    if (lane_id() == 0)
        set_place(me, PLACE_DX,
                  static_cast<uint16_t*>(p.dx) + offset_of(p.dx_stride, me.b, me.first, me.head(p, step)) +
                      me.p0(p, step));
}

/* Starts to copy the warp's rows of x or dy.  A lane copies the pieces that the same lane converts later.  Missing rows
 * and columns become zeros. */
GT_DEV void copy_rows(int warp, uint32_t tile, const uint16_t* from, int64_t pitch, int rows, int columns) {
    const RowLanes<64> at;
    const int row = warp * RowLanes<64>::ROWS + at.row;
    from += row * pitch + 8 * at.piece;
    if (row >= rows) columns = 0;
    GT_UNROLL
    for (int i = 0; i < RowLanes<64>::PIECES; i++) {
        const int column = 8 * RowLanes<64>::LANES * i;
        cp_async<16>(tile + at.address(warp, i), from + column, column + 8 * at.piece < columns ? 16 : 0);
    }
}

template <class C>
GT_DEV void copy_state(const Problem& in, const Checkpoints& states, const f16* from, int p0, uint32_t tile) {
    using S = TileShape<C::N>;
    constexpr int STEP = C::THREADS / S::PIECES; /* rows that are copied at a time */
    const int row0 = thread_id() / S::PIECES, piece = thread_id() % S::PIECES;
    const int rows = !states.values || 8 * piece >= in.columns ? 0 : in.P - p0;
    if (states.values) from += row0 * in.N + 8 * piece;
    GT_UNROLL
    for (int k = 0; k < (CHUNK + STEP - 1) / STEP; k++) {
        const int row = row0 + k * STEP;
        if (CHUNK % STEP && row >= CHUNK) break;
        cp_async<16>(tile + panel_at<2 * C::N>(row, piece), from + k * STEP * in.N, row < rows ? 16 : 0);
    }
}

/* Starts to copy x and h of a step.  With one stage, these copies may start as soon as dC and dB are computed, because
 * nothing reads x and h later.  All threads call this function. */
template <class C>
GT_DEV void copy_x_and_h(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me, int step) {
    const int p0 = me.p0(p, step);
    const uint32_t stage = me.stage(step);
    copy_rows(me.warp, stage + C::X, place_of<const uint16_t>(me, PLACE_X), p.in.x_stride.t, me.tokens, p.in.P - p0);
    copy_state<C>(p.in, p.h, place_of<const f16>(me, PLACE_H), p0, stage + C::H);
    cp_async_commit();
}

/* Starts to copy dy, the neighbour's rows and G of a step.  load_gates() loads z. */
template <class C>
GT_DEV void copy_dy_and_G(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me, int step) {
    const Problem& in = p.in;
    const int p0 = me.p0(p, step), columns = in.P - p0;
    const uint32_t stage = me.stage(step);
    copy_rows(me.warp, stage + C::DY, place_of<const uint16_t>(me, PLACE_DY), in.dy_stride.t, me.tokens, columns);
    if (me.makes_state())
        copy_rows(me.warp, stage + C::NEXT, place_of<const uint16_t>(me, PLACE_NEXT),
                  me.second ? in.x_stride.t : in.dy_stride.t, me.neighbour_tokens, columns);
    copy_state<C>(in, p.G, place_of<const f16>(me, PLACE_G), p0, stage + C::G);
    cp_async_commit();
}

/* The pieces of z for the pieces of dy that a lane converts: in the chunk (own), and in the neighbour. */
struct Gates {
    uint4 own[RowLanes<64>::PIECES], neighbour[RowLanes<64>::PIECES];
};

/* Loads the same pieces as copy_rows().  Missing rows and columns become zeros. */
GT_DEV void load_gate(const Problem& in, int warp, int64_t first, int rows, int columns,
                      uint4 (&z)[RowLanes<64>::PIECES]) {
    const RowLanes<64> at;
    const int row = warp * RowLanes<64>::ROWS + at.row;
    const uint16_t* from = static_cast<const uint16_t*>(in.z) + first + row * in.z_stride.t + 8 * at.piece;
    GT_UNROLL
    for (int i = 0; i < RowLanes<64>::PIECES; i++) {
        const int column = 8 * RowLanes<64>::LANES * i;
        z[i] = row < rows && column + 8 * at.piece < columns ? ldg<uint4>(from + column) : uint4{0, 0, 0, 0};
    }
}

template <class C>
GT_DEV void load_gates(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me, int step, Gates& gates) {
    const Problem& in = p.in;
    if (!C::MORE || !in.z) return;
    const int h = me.head(p, step), p0 = me.p0(p, step);
    load_gate(in, me.warp, offset_of(in.z_stride, me.b, me.first, h) + p0, me.tokens, in.P - p0, gates.own);
    if (!me.second && me.makes_state())
        load_gate(in, me.warp, offset_of(in.z_stride, me.b, me.neighbour(), h) + p0, me.neighbour_tokens, in.P - p0,
                  gates.neighbour);
}

/* Converts the warp's 8 rows of a tile to f16 in place.  Returns the inverse of the power of the lane's row.  The
 * lane's row is RowLanes<64>().row of the 8 rows. */
template <class T>
GT_DEV float convert_rows_of(int warp, uint32_t tile) {
    const RowLanes<64> at;
    uint4 x[RowLanes<64>::PIECES];
    GT_UNROLL
    for (int i = 0; i < RowLanes<64>::PIECES; i++) x[i] = lds<uint4>(tile + at.address(warp, i));
    const Power power = power_of(row_maximum<T, RowLanes<64>::LANES>(larger_of<T>(x)));
    GT_UNROLL
    for (int i = 0; i < RowLanes<64>::PIECES; i++)
        sts<uint4>(tile + at.address(warp, i), scaled_f16<T>(x[i], power.value));
    return power.inverse;
}

/* convert_rows_of() for dy silu(z). */
template <class T>
GT_DEV float convert_gated_rows_of(int warp, uint32_t tile, const uint4 (&z)[RowLanes<64>::PIECES]) {
    using E = Element<T>;
    constexpr int PIECES = RowLanes<64>::PIECES;
    const RowLanes<64> at;
    float x[8 * PIECES], largest = 0.0f;
    GT_UNROLL
    for (int i = 0; i < PIECES; i++) {
        const uint4 dy = lds<uint4>(tile + at.address(warp, i));
        const uint32_t left[4] = {dy.x, dy.y, dy.z, dy.w}, right[4] = {z[i].x, z[i].y, z[i].z, z[i].w};
        GT_UNROLL
        for (int e = 0; e < 4; e++) {
            x[8 * i + 2 * e] = E::lo(left[e]) * silu(E::lo(right[e]));
            x[8 * i + 2 * e + 1] = E::hi(left[e]) * silu(E::hi(right[e]));
        }
    }
    GT_UNROLL
    for (int i = 0; i < 8 * PIECES; i++) largest = fmaxf(largest, fabsf(x[i]));
    GT_UNROLL
    for (int mask = 1; mask < RowLanes<64>::LANES; mask *= 2) largest = fmaxf(largest, shfl_xor(largest, mask));
    const Power power = power_of(finite(largest));
    const auto pair = [&](int i) { return pack_f16(x[i] * power.value, x[i + 1] * power.value); };
    GT_UNROLL
    for (int i = 0; i < PIECES; i++)
        sts<uint4>(tile + at.address(warp, i), {pair(8 * i), pair(8 * i + 2), pair(8 * i + 4), pair(8 * i + 6)});
    return power.inverse;
}

GT_DEV float convert_rows(const Problem& in, int warp, uint32_t tile) {
    return in.dtype == GT_BF16 ? convert_rows_of<bf16>(warp, tile) : convert_rows_of<f16>(warp, tile);
}

template <bool MORE>
GT_DEV float convert_dy(const Problem& in, int warp, uint32_t tile, const uint4 (&z)[RowLanes<64>::PIECES]) {
    if (!MORE || !in.z) return convert_rows(in, warp, tile);
    return in.dtype == GT_BF16 ? convert_gated_rows_of<bf16>(warp, tile, z) : convert_gated_rows_of<f16>(warp, tile, z);
}

/* rows_sum() adds x over the warp's 8 rows; rows_largest() finds the largest x.  The 4 lanes of a row have the same
 * x. */
GT_DEV float rows_sum(float x) {
    GT_UNROLL
    for (int mask = RowLanes<64>::LANES; mask < 32; mask *= 2) x += shfl_xor(x, mask);
    return x;
}

GT_DEV float rows_largest(float x) {
    GT_UNROLL
    for (int mask = RowLanes<64>::LANES; mask < 32; mask *= 2) {
        const float other = shfl_xor(x, mask);
        x = other > x ? other : x;
    }
    return x;
}

/* Converts the warp's rows of a step's tiles.  The same lanes have copied these rows, so no barrier is needed before.
 * x comes first, because it arrives first. */
template <class C>
GT_DEV void convert_step(const Problem& in, const ChunkGradientBlock<C>& me, int step, const Gates& gates) {
    const RowLanes<64> at;
    const uint32_t stage = me.stage(step);
    const int row = me.warp * RowLanes<64>::ROWS + at.row;
    cp_async_wait<1>();
    const float x = convert_rows(in, me.warp, stage + C::X);
    cp_async_wait<0>();
    const float dy = convert_dy<C::MORE>(in, me.warp, stage + C::DY, gates.own);
    const float bound = rows_largest(dy * me.value(C::C_INVERSE + row));
    float weight = 0.0f;
    if (me.makes_state()) {
        const float next = me.second ? convert_rows(in, me.warp, stage + C::NEXT)
                                     : convert_dy<C::MORE>(in, me.warp, stage + C::NEXT, gates.neighbour);
        weight = next * me.value(C::NEXT_INVERSE + row) * me.value(C::MADE + row);
    }
    const float sum = rows_sum(fabsf(weight)); /* Delta may be below 0 */
    if (at.piece == 0) {
        sts<float>(me.address(me.row_inverse(step, false) + row), x);
        sts<float>(me.address(me.row_inverse(step, true) + row), dy);
        sts<float>(me.address(C::WEIGHT + row), weight);
    }
    if (lane_id() == 0) {
        sts<float>(me.address(C::ROW_BOUND + me.warp), bound);
        sts<float>(me.address(C::WEIGHT_SUM + me.warp), sum);
    }
}

/* For every 8 rows, one warp computes a bound of dy times C over these rows and all later rows.  M_BOUND holds the
 * results. */
template <class C>
GT_DEV void bound_rows(const ChunkGradientBlock<C>& me) {
    const int lane = lane_id();
    float most = lane < C::WARPS ? me.value(C::ROW_BOUND + lane) : 0.0f;
    GT_UNROLL
    for (int d = 1; d < C::WARPS; d *= 2) {
        const float later = shfl_down(most, d);
        most = later > most ? later : most;
    }
    if (lane < C::WARPS) sts<float>(me.address(C::M_BOUND + lane), most);
}

/* ---- the state that the chunk makes ---------------------------------------------------------------------------- */

/* The neighbour's B or C as right operands of mma: all 64 tokens and the warp's columns, divided by WEIGHT_RANGE. */
template <class C>
struct Neighbour {
    uint32_t words[4][C::MADE_TILES][2];
};

template <class C>
GT_DEV int made_piece(const ChunkGradientBlock<C>& me, int i) {
    return me.warp % C::MADE_WARPS * C::MADE_TILES + i;
}

template <class C>
GT_DEV void read_neighbour(const ChunkGradientBlock<C>& me, uint32_t tile, Neighbour<C>& neighbour) {
    GT_UNROLL
    for (int k = 0; k < 4; k++) {
        GT_UNROLL
        for (int i = 0; i < C::MADE_TILES; i++) {
            uint32_t(&words)[2] = neighbour.words[k][i];
            ldmatrix_x2_trans(words, tile + panel_at<2 * C::N>(16 * k + lane_id() % 16, made_piece(me, i)));
            GT_UNROLL
            for (int e = 0; e < 2; e++)
                words[e] = multiply_f16(words[e], pack_f16(1.0f / WEIGHT_RANGE, 1.0f / WEIGHT_RANGE));
        }
    }
}

/* Advances h or G through the neighbour's tokens: state <- exp(sum a) state + sum_t weight_t left_t right_t^T.  For h,
 * left is x and right is B; for G, left is dy and right is C.  The result is f16 with one power of two, and overwrites
 * the old state. */
template <class C>
GT_DEV void make_state(const ChunkGradientBlock<C>& me, int step, const Neighbour<C>& neighbour) {
    const int lane = lane_id(), g = lane / 4, j = lane % 4;
    const uint32_t stage = me.stage(step), state = stage + (me.second ? C::H : C::G);
    const int block0 = me.warp / C::MADE_WARPS * C::MADE_BLOCKS;
    float sum = 0.0f;
    GT_UNROLL
    for (int i = 0; i < C::WARPS; i += 4) {
        const float4 sums = lds<float4>(me.address(C::WEIGHT_SUM + i));
        sum += (sums.x + sums.y) + (sums.z + sums.w);
    }
    const float E = me.value(C::MADE + CHUNK);
    const int from = C::STATE_INVERSES + step % 2 * 8 + (me.second ? 0 : 4);
    const Power weights = power_of(sum * (0x1p14f / WEIGHT_RANGE)); /* scales the sum of weights to at most
                                                                     * WEIGHT_RANGE */
    /* the bound holds because no element of x, dy, B or C exceeds 2^14, and no element of the old state 2^16 */
    const float bound = fma_rn(E * 0x1p16f, largest_of(lds<float4>(me.address(from))), sum * 0x1p28f);
    const Power made = power_of(bound);
    float sums[C::MADE_BLOCKS][C::MADE_TILES][4] = {};
    const uint32_t left = by_columns<64>(stage + C::NEXT);
    GT_UNROLL
    for (int k = 0; k < 4; k++) {
        uint32_t right[C::MADE_TILES][2];
        GT_UNROLL
        for (int e = 0; e < 2; e++) {
            const float2 w = lds<float2>(me.address(C::WEIGHT + 16 * k + 8 * e + 2 * j));
            const uint32_t pair = pack_f16(w.x * weights.value, w.y * weights.value);
            GT_UNROLL
            for (int i = 0; i < C::MADE_TILES; i++) right[i][e] = multiply_f16(neighbour.words[k][i][e], pair);
        }
        GT_UNROLL
        for (int m = 0; m < C::MADE_BLOCKS; m++) {
            uint32_t a[4];
            ldmatrix_x4_trans(a, block_at<64>(left, k, block0 + m));
            GT_UNROLL
            for (int i = 0; i < C::MADE_TILES; i++) mma_f16(sums[m][i], a, right[i][0], right[i][1]);
        }
    }
    const float added = weights.inverse * made.value * WEIGHT_RANGE;
    GT_UNROLL
    for (int m = 0; m < C::MADE_BLOCKS; m++) {
        const float kept = E * me.value(from + block0 + m) * made.value;
        GT_UNROLL
        for (int i = 0; i < C::MADE_TILES; i++) {
            GT_UNROLL
            for (int e = 0; e < 2; e++) {
                const uint32_t address =
                    state + panel_at<2 * C::N>(16 * (block0 + m) + g + 8 * e, made_piece(me, i)) + 4 * j;
                const uint32_t old = lds<uint32_t>(address);
                sts<uint32_t>(address, pack_f16(fma_rn(kept, unpack_f16_lo(old), added * sums[m][i][2 * e]),
                                                fma_rn(kept, unpack_f16_hi(old), added * sums[m][i][2 * e + 1])));
            }
        }
    }
    if (thread_id() == 0) sts<float>(me.address(C::MADE_INVERSE), made.inverse);
}

/* The inverses of the powers of h (which = 0) or G (which = 1), one for every 16 rows. */
template <class C>
GT_DEV float4 state_inverses(const ChunkGradientBlock<C>& me, int step, int which) {
    if (me.makes_state() && which == (me.second ? 0 : 1)) {
        const float x = me.value(C::MADE_INVERSE);
        return {x, x, x, x};
    }
    return lds<float4>(me.address(C::STATE_INVERSES + step % 2 * 8 + 4 * which));
}

} /* namespace ssd */
} /* namespace gt */

#endif
