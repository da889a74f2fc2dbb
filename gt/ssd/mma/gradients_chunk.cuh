/* gt/ssd/mma/gradients_chunk.cuh - the chunk and the steps of a block of chunk_gradient_kernel (gradients.cuh): layout
 * of shared memory, copies, conversion to f16, and the state that the chunk makes itself. */
#ifndef GT_SSD_MMA_GRADIENTS_CHUNK_CUH
#define GT_SSD_MMA_GRADIENTS_CHUNK_CUH

#include "../problem.cuh"
#include "chunk.cuh"

namespace gt {
namespace ssd {

/* MORE: with z, or with partial sums of other launches.  Kernels without MORE take fewer registers. */
template <int N_, int STAGES_, bool MORE_ = false>
struct ChunkGradientTraits {
    static constexpr int N = N_, STAGES = STAGES_;
    static constexpr bool MORE = MORE_;
    static constexpr int WARPS = 8, THREADS = 32 * WARPS;
    static constexpr int COLUMNS = N / 2; /* columns of dC or dB per warp, in 32 rows */
    static constexpr int PASS = COLUMNS > 32 ? 16 : COLUMNS, PASSES = COLUMNS / PASS, TILES = PASS / 8;
    /* per warp, of the state that a chunk makes itself: tiles of columns, and blocks of 16 rows */
    static constexpr int MADE_WARPS = N < 64 ? N / 8 : 8, MADE_TILES = N / 8 / MADE_WARPS, MADE_BLOCKS = MADE_WARPS / 2;
    /* the two warps without pairs: they make da and ddt of the previous step, and decay factors */
    static constexpr int TIME_WARP = 4, FACTOR_WARP = 5;
    /* bytes */
    static constexpr int STATE = CHUNK * N * 2, ROWS = CHUNK * 64 * 2;
    static constexpr int B = 0, C = B + STATE, STAGE0 = C + STATE;
    static constexpr int X = 0, DY = X + ROWS, NEXT = DY + ROWS, H = NEXT + ROWS, G = H + STATE; /* of a stage */
    static constexpr int STAGE = G + STATE;
    static constexpr int FLOATS = STAGE0 + STAGES * STAGE;
    static constexpr int W_PITCH = 66; /* at the end: fp32 [64][66], over a stage */
    static_assert(4 * CHUNK * W_PITCH <= STAGE, "room for it");
    /* offsets in floats from FLOATS on; with two stages there are two sets of factors, which steps use in turn */
    static constexpr int COPIES = STAGES;
    static constexpr int FACTORS = 0, MADE = FACTORS + COPIES * Factors::COUNT; /* [64, E]: neighbour_factors() */
    static constexpr int STATE_INVERSES = MADE + CHUNK + 4;                     /* [2][h 4, G 4] */
    static constexpr int PLACES = STATE_INVERSES + 16;                          /* place_step() */
    static constexpr int MADE_INVERSE = PLACES + 12, SKIP = MADE_INVERSE + 1;   /* SKIP: [2], Dskip of a step's head */
    static constexpr int ROW_INVERSES = MADE_INVERSE + 4; /* [COPIES][x 64, dy 64]; at the end for W's rows */
    static constexpr int M_INVERSE = ROW_INVERSES + COPIES * 2 * CHUNK,
                         STEP_DELTA = M_INVERSE + CHUNK; /* [64, A]: Delta of the step whose factors are made next, and
                                                          * A of its head */
    /* for the neighbour's tokens; with one stage, a barrier separates the uses of WEIGHT and of M_INVERSE */
    static constexpr int WEIGHT = STAGES == 1 ? M_INVERSE : STEP_DELTA + CHUNK + 4;
    static constexpr int B_INVERSE = (STAGES == 1 ? STEP_DELTA + 4 : WEIGHT) + CHUNK, C_INVERSE = B_INVERSE + CHUNK,
                         NEXT_INVERSE = C_INVERSE + CHUNK;
    static constexpr int ROW_BOUND = NEXT_INVERSE + CHUNK, WEIGHT_SUM = ROW_BOUND + 8; /* of the warps' rows */
    static constexpr int M_BOUND = WEIGHT_SUM + 8; /* [8]: bounds of the rows from 8 i on */
    static constexpr int DSKIP = M_BOUND + 8;      /* by channel: [2 halves of t][p] */
    static constexpr int SUMS = DSKIP + 2 * CHUNK; /* [2], of steps in turn */
    /* offsets from the step's SUMS; sums of Gamma by blocks of pairs, see pair_index() */
    static constexpr int ROW_SUMS = 0;                            /* [6][t]: sums over s, where t is in a later block */
    static constexpr int COLUMN_SUMS = ROW_SUMS + 6 * BLOCK;      /* [10][s]: over t, without Delta_s */
    static constexpr int DIAGONAL = COLUMN_SUMS + 10 * BLOCK;     /* [k] */
    static constexpr int E = DIAGONAL + CHUNK, F = E + 2 * CHUNK; /* [2 halves of n][t]; F without Delta_s */
    static constexpr int Z = F + 2 * CHUNK, TRACE = Z + 4;        /* Z by 16 rows p; TRACE: <dy_t, x_t> by 16 tokens */
    static constexpr int SUMS_COUNT = TRACE + 4;
    static constexpr int SMEM = FLOATS + 4 * (SUMS + 2 * SUMS_COUNT);
    static_assert(SMEM <= (STAGES == 2 ? 163 : 99) * 1024, "fits: where two stages may not, one does");
    static_assert(SUMS % 4 == 0 && SUMS_COUNT % 4 == 0 && Factors::COUNT % 4 == 0 && PLACES % 2 == 0, "aligned");
};

/* The index of a block of pairs, with tokens t of block `t` and tokens s of block `s`.  pair_index() counts the blocks
 * on or under the diagonal; lower_pair_index() counts the blocks under it. */
GT_HD int pair_index(int t, int s) { return t * (t + 1) / 2 + s; }
GT_HD int lower_pair_index(int t, int s) { return t * (t - 1) / 2 + s; }

/* A block's chunk, and the block's addresses in shared memory. */
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

/* Names of the first addresses of a step's copies, and of dx. */
enum Place { PLACE_X, PLACE_DY, PLACE_NEXT, PLACE_H, PLACE_G, PLACE_DX };

template <class C>
GT_DEV void set_place(const ChunkGradientBlock<C>& me, int place, const void* first) {
    sts<uint64_t>(me.address(C::PLACES + 2 * place), (uint64_t)(uintptr_t)first);
}

template <class T, class C>
GT_DEV T* place_of(const ChunkGradientBlock<C>& me, int place) {
    return (T*)(uintptr_t)lds<uint64_t>(me.address(C::PLACES + 2 * place));
}

/* Sets the addresses of the copies for `step`, once for all threads.  Called by one warp. */
template <class C>
GT_DEV void place_step(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me, int step) {
    const Problem& in = p.in;
    const int lane = lane_id(), h = me.head(p, step), p0 = me.p0(p, step);
    if (lane < 3) {
        const bool of_x = lane == PLACE_X || (lane == PLACE_NEXT && me.second);
        const gt_stride stride = of_x ? in.x_stride : in.dy_stride;
        const int64_t first = lane == PLACE_NEXT ? me.neighbour() : me.first;
        set_place(me, lane, static_cast<const uint16_t*>(of_x ? in.x : in.dy) + offset_of(stride, me.b, first, h) + p0);
    } else if (lane < 5) { /* zeros: any address will do */
        const f16* states = lane == PLACE_H ? p.h.values : p.G.values;
        const int64_t state = ((((int64_t)me.b * in.H + h) * p.slots + me.slot) * in.P + p0) * in.N;
        set_place(me, lane, states ? states + state : static_cast<const f16*>(in.x));
    }
}

/* That of dx. */
template <class C>
GT_DEV void place_dx(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me, int step) {
    if (lane_id() == 0)
        set_place(me, PLACE_DX,
                  static_cast<uint16_t*>(p.dx) + offset_of(p.dx_stride, me.b, me.first, me.head(p, step)) +
                      me.p0(p, step));
}

/* Starts the copy of rows of x or dy.  A lane copies the pieces that it will convert.  Missing rows and columns become
 * zeros. */
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
    constexpr int STEP = C::THREADS / S::PIECES; /* rows at a time */
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

/* Starts the copies of x and h of a step.  They may start early, because nothing reads x and h after dC and dB.  Called
 * by all threads. */
template <class C>
GT_DEV void copy_x_and_h(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me, int step) {
    const int p0 = me.p0(p, step);
    const uint32_t stage = me.stage(step);
    copy_rows(me.warp, stage + C::X, place_of<const uint16_t>(me, PLACE_X), p.in.x_stride.t, me.tokens, p.in.P - p0);
    copy_state<C>(p.in, p.h, place_of<const f16>(me, PLACE_H), p0, stage + C::H);
    cp_async_commit();
}

/* Starts the other copies: dy, the neighbour's rows and G.  load_gates() loads z. */
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

/* The pieces of z that match the pieces of dy that a lane converts: for the chunk, and for the neighbour. */
struct Gates {
    uint4 own[RowLanes<64>::PIECES], neighbour[RowLanes<64>::PIECES];
};

/* Rows as copy_rows; zeros outside. */
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

/* Turns the warp's rows of a tile into f16 in place.  Returns the inverse of the power of the lane's row, which is
 * RowLanes<64>().row of these rows. */
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

/* The same for dy silu(z). */
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

/* The sum over a warp's 8 rows, each of which is in 4 lanes. */
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

/* Converts the warp's rows of a step's tiles, x first.  The same warp has copied them. */
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

/* Makes bounds of dy and C over all rows from each row on, 8 rows at a time.  Called by one warp, between barriers. */
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

/* The neighbour's B or C in the form that a warp multiplies: right operands of all 64 tokens and the warp's columns,
 * divided by WEIGHT_RANGE. */
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

/* state <- exp(sum a) state + sum_t weight_t row_t (B or C)_t^T over the neighbour's tokens, in place, as f16 with one
 * power of two.  The rows are x and B for h, dy and C for G. */
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
    const Power weights = power_of(sum * (0x1p14f / WEIGHT_RANGE)); /* to at most WEIGHT_RANGE */
    /* the bound holds since no element of rows, B or C exceeds 2^14, and no element of the state 2^16 */
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

/* The inverses of the powers of h (0) or G (1), one for every 16 rows. */
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
