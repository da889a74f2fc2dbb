/* gt/ssd/backward_tensor.cuh - ssd backward of a chunk on tensor cores: everything but the states.
 *
 * A block has 64 tokens of one group and takes its heads, and their tiles of 64 rows p, one after another ("steps"), from
 * the states that forward and the reverse state pass left every CHECKPOINT = 128 tokens.  With h before the chunk and G
 * after it (gt_ssm.cuh), and everything that the heads of a group share made once or summed in registers:
 *     S = C B^T                      once                  dS = dy x^T                         a step
 *     W_ts = dS_ts L_ts Delta_s      summed over the heads, for   dC += W B   and   dB += W^T C   at the end
 *     M_ts = S_ts L_ts               U = suf . (B G^T) + M^T dy              dx = Delta . U + Dskip . dy
 *     dC += pre . (dy h)             dB += (Delta suf) . (x G)               fp32, 64 x N each, in registers
 * and by token, with Gamma = W . S, E_t = <C_t, its share of dC>, F_s = <B_s, its share of dB>, Z = exp(sum a) <G, h>
 *     da_k = sum_{t>=k>s} Gamma_ts + sum_{t>=k} E_t + sum_{s<k} F_s + Z      ddt = slope (<x, U> + A da)
 * The rectangle sums of Gamma: rows and columns of 16 x 16 blocks, and within blocks on the diagonal suffixes of rows; all
 * by additions.  Of the two chunks of a checkpoint the second makes its h, the first its G: one state update a step.
 *
 * WARPS.  Warps 0 to 7 multiply (mma.sync m16n8k16, f16), warp 8 makes the decay factors of the next step and da, ddt of
 * the last.  Three barriers a step:
 *     x, dy and the neighbour's x or dy are turned into f16 in place, a power of two per row            -- barrier 1
 *     the neighbour's tokens go into h or G                                                             -- barrier 2
 *     S, W, Gamma, M: blocks of 16 s x 16 t, two a warp; dC and E by warps 0-3, dB and F by warps 4-7   -- barrier 3
 *     U, dx, <x, U>, Z: 32 s x 16 p a warp
 * All pairs are held transposed, rows s: M^T is then a left operand as it is stored.
 *
 * REGISTERS a thread (N = 128): S 16, sum of W 16, dC or dB 64, the neighbour's B or C 16; 32 for the product at hand.
 * SHARED MEMORY (N = 128): B, C 32 KB; a stage x, dy, neighbour 24 KB and h, G 32 KB; 10 KB of factors and sums: 98 KB with
 *     one stage, 154 KB with two, where the next step's tiles come in during this one.  M^T lies over the neighbour's rows.
 * PRODUCTS a step: 1184 mma (64 x 128 x 64 three times, 64 x 64 x 128, 0.6 of 64 x 64 x 64 twice) and 700 ldmatrix_x4.
 * BYTES a token and head, bf16, P = 64, N = 128: x, dy, dx 384, the neighbour's 128 (L2), h, G 256 each for 2 chunks: 768. */
#ifndef GT_SSD_BACKWARD_TENSOR_CUH
#define GT_SSD_BACKWARD_TENSOR_CUH

#include "chunk.cuh"

namespace gt {
namespace ssd {

struct ChunkGradientParams {
    Problem in;
    Checkpoints h, G; /* before the first token of each slot; after its last; values NULL: 0 */
    int64_t slots;
    uint32_t by_tiles; /* 2^32 / in.tiles, rounded up; not for one tile */
    void *dx, *ddt, *dBm, *dCm; /* NULL: not wanted */
    gt_stride dx_at, ddt_at, dBm_at, dCm_at;
    /* sums over a chunk, [B*slots*2][H], dskip per channel [B*slots*2][H][P]; NULL: not wanted */
    float *dA, *dbias, *dskip;
};

template <int N_, int STAGES_>
struct ChunkGradientTraits {
    static constexpr int N = N_, STAGES = STAGES_;
    static constexpr int WARPS = 8, THREADS = 32 * WARPS;
    static constexpr int COLUMNS = N / 2; /* of dC or dB, of a warp: with 32 rows */
    static constexpr int PASS = COLUMNS < 32 ? COLUMNS : 32, PASSES = COLUMNS / PASS, TILES = PASS / 8;
    /* of the state that a chunk makes itself, of a warp: columns and blocks of 16 rows */
    static constexpr int GROUPS = N < 64 ? N / 8 : 8, MADE_TILES = N / 8 / GROUPS, MADE_BLOCKS = GROUPS / 2;
    /* bytes */
    static constexpr int STATE = CHUNK * N * 2, ROWS = CHUNK * 64 * 2;
    static constexpr int B = 0, C = B + STATE, STAGE0 = C + STATE;
    static constexpr int X = 0, DY = X + ROWS, NEXT = DY + ROWS, H = NEXT + ROWS, G = H + STATE; /* of a stage */
    static constexpr int STAGE = G + STATE;
    static constexpr int FLOATS = STAGE0 + STAGES * STAGE;
    static constexpr int W_PITCH = 66; /* at the end, fp32 [64][66] over a stage */
    static_assert(4 * CHUNK * W_PITCH <= STAGE, "room for it");
    /* floats, from there; with two stages the factors and the sums by token are there twice, too, for steps in turn */
    static constexpr int COPIES = STAGES;
    static constexpr int FACTORS = 0, MADE = FACTORS + COPIES * Factors::COUNT; /* MADE: [2][64, E], neighbour_factors() */
    static constexpr int MADE_FLOATS = CHUNK + 4;
    static constexpr int STATE_INVERSES = MADE + 2 * MADE_FLOATS; /* [2][h 4, G 4] */
    static constexpr int MADE_INVERSE = STATE_INVERSES + 16;
    static constexpr int ROW_INVERSES = MADE_INVERSE + 4; /* [2][x 64, dy 64] */
    static constexpr int M_INVERSE = ROW_INVERSES + 4 * CHUNK, WEIGHT = M_INVERSE + CHUNK; /* of the neighbour's tokens */
    static constexpr int B_INVERSE = WEIGHT + CHUNK, C_INVERSE = B_INVERSE + CHUNK, NEXT_INVERSE = C_INVERSE + CHUNK;
    static constexpr int M_BOUND = NEXT_INVERSE + CHUNK, WEIGHT_SUM = M_BOUND + 8; /* [8] each, of the warps' rows */
    static constexpr int HEAD_SUMS = WEIGHT_SUM + 8; /* [da 64, direct 64, dskip]: of a head's earlier tiles */
    static constexpr int SUMS = HEAD_SUMS + 2 * CHUNK + 4;
    /* from the step's SUMS */
    static constexpr int ROW_SUMS = 0;                       /* Gamma: [3 blocks of s][t] */
    static constexpr int COLUMN_SUMS = ROW_SUMS + 3 * CHUNK; /* [2 halves of t][s] */
    static constexpr int DIAGONAL = COLUMN_SUMS + 2 * CHUNK; /* [k] */
    static constexpr int E = DIAGONAL + CHUNK, F = E + 2 * CHUNK; /* [2 halves of n][t] */
    static constexpr int DIRECT = F + 2 * CHUNK;                  /* [4 parts of p][s] */
    static constexpr int Z = DIRECT + 4 * CHUNK, DSKIP = Z + 8;   /* [2 halves of t][p] */
    static constexpr int SUMS_COUNT = DSKIP + 2 * CHUNK;
    static constexpr int SMEM = FLOATS + 4 * (SUMS + COPIES * SUMS_COUNT);
    static_assert(SUMS % 4 == 0 && SUMS_COUNT % 4 == 0 && Factors::COUNT % 4 == 0, "read by 16 bytes");
};

/* What a block works on. */
template <class C>
struct ChunkGradientBlock {
    uint32_t smem;
    int64_t first; /* token */
    int b, slot, g, heads, steps;
    int warp; /* its number, in a form that the compiler knows to be the same in all lanes */
    int tokens, neighbour_tokens;
    bool second; /* of the two chunks of its checkpoint */

    GT_METHOD uint32_t cell(int offset) const { return smem + C::FLOATS + 4 * offset; }
    GT_METHOD float value(int offset) const { return lds<float>(cell(offset)); }
    GT_METHOD uint32_t stage(int step) const { return smem + C::STAGE0 + step % C::STAGES * C::STAGE; }
    GT_METHOD int factor(int step, int offset) const { return C::FACTORS + step % C::COPIES * Factors::COUNT + offset; }
    GT_METHOD int sums(int step, int offset) const { return C::SUMS + step % C::COPIES * C::SUMS_COUNT + offset; }
    GT_METHOD int row_inverse(int step, bool of_dy) const { return C::ROW_INVERSES + (step % 2 * 2 + of_dy) * CHUNK; }
    GT_METHOD static int step_head(const ChunkGradientParams& p, int step) { /* step / tiles */
        return p.in.tiles == 1 ? step : (int)((uint64_t)(uint32_t)step * p.by_tiles >> 32);
    }
    GT_METHOD int head(const ChunkGradientParams& p, int step) const { return g * heads + step_head(p, step); }
    GT_METHOD int tile(const ChunkGradientParams& p, int step) const { return step - step_head(p, step) * p.in.tiles; }
    GT_METHOD int p0(const ChunkGradientParams& p, int step) const { return tile(p, step) * TILE_P; }
    GT_METHOD int64_t neighbour() const { return second ? first - CHUNK : first + CHUNK; } /* its first token */
    GT_METHOD int64_t row(int64_t slots) const { return (b * slots + slot) * 2 + second; }    /* of the sums */
    GT_METHOD bool makes_state() const { return neighbour_tokens > 0; }
};

/* ---- the block's chunk ----------------------------------------------------------------------------------------- */

/* Blocks: [B,slots,G], then the two chunks of a slot.  tokens = 0: there is none. */
template <class C>
GT_DEV ChunkGradientBlock<C> find_chunk(const ChunkGradientParams& p) {
    const Problem& in = p.in;
    ChunkGradientBlock<C> me;
    const int64_t pair = block_x() / 2;
    me.smem = smem_base();
    me.warp = shfl_idx(warp_id(), 0);
    me.second = block_x() % 2;
    me.g = (int)(pair % in.G);
    const int64_t place = pair / in.G;
    me.slot = (int)(place % p.slots);
    me.b = (int)(place / p.slots);
    me.heads = (int)(in.H / in.G);
    me.steps = me.heads * in.tiles;
    gt_chunk chunk = {0, (int64_t)me.slot * CHECKPOINT, (me.slot + (int64_t)1) * CHECKPOINT};
    if (in.sequences.cu_seqlens)
        chunk = gt_chunk_at(in.sequences.cu_seqlens, sequence_count(in.sequences), CHECKPOINT, me.slot);
    else if (chunk.last > in.sequences.T)
        chunk.last = in.sequences.T;
    const int all = chunk.sequence < 0 ? 0 : (int)(chunk.last - chunk.first), left = all - CHUNK > 0 ? all - CHUNK : 0;
    me.first = chunk.first + (me.second ? CHUNK : 0);
    me.tokens = me.second ? left : all - left;
    me.neighbour_tokens = me.second ? all - left : left;
    return me;
}

/* ---- loads, and f16 -------------------------------------------------------------------------------------------- */

/* Starts the copy of rows of x or dy: a lane copies the pieces that it converts.  What is not there is not read. */
GT_DEV void copy_rows(int warp, uint32_t tile, const void* data, int64_t first, int64_t pitch, int rows, int columns) {
    const RowLanes<64> at;
    const int row = warp * RowLanes<64>::ROWS + at.row;
    const uint16_t* from = static_cast<const uint16_t*>(data) + first + row * pitch + 8 * at.piece;
    GT_UNROLL
    for (int i = 0; i < RowLanes<64>::PIECES; i++) {
        const int column = 8 * RowLanes<64>::LANES * i;
        cp_async<16>(tile + at.cell(warp, i), from + column,
                     row < rows && column + 8 * at.piece < columns ? 16 : 0);
    }
}

template <class C>
GT_DEV void copy_state(const Problem& in, const Checkpoints& states, int64_t offset, int p0, uint32_t tile) {
    using S = TileShape<C::N>;
    constexpr int STEP = C::THREADS / S::PIECES; /* rows at a time */
    const int row0 = thread_id() / S::PIECES, piece = thread_id() % S::PIECES;
    const int rows = !states.values || 8 * piece >= in.N ? 0 : in.P - p0;
    /* for zeros any address does */
    const f16* from = states.values ? states.values + offset + row0 * in.N + 8 * piece : static_cast<const f16*>(in.x);
    GT_UNROLL
    for (int k = 0; k < (CHUNK + STEP - 1) / STEP; k++) {
        const int row = row0 + k * STEP;
        if (CHUNK % STEP && row >= CHUNK) break;
        cp_async<16>(tile + tile_cell<C::N>(row, piece), from + k * STEP * in.N, row < rows ? 16 : 0);
    }
}

/* Everything that a step reads, by the warps that multiply. */
template <class C>
GT_DEV void copy_step(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me, int step) {
    const Problem& in = p.in;
    const int h = me.head(p, step), p0 = me.p0(p, step), columns = in.P - p0;
    const uint32_t stage = me.stage(step);
    copy_rows(me.warp, stage + C::X, in.x, at(in.x_at, me.b, me.first, h) + p0, in.x_at.t, me.tokens, columns);
    copy_rows(me.warp, stage + C::DY, in.dy, at(in.dy_at, me.b, me.first, h) + p0, in.dy_at.t, me.tokens, columns);
    if (me.makes_state()) {
        const gt_stride from = me.second ? in.x_at : in.dy_at;
        copy_rows(me.warp, stage + C::NEXT, me.second ? in.x : in.dy, at(from, me.b, me.neighbour(), h) + p0, from.t,
                     me.neighbour_tokens, columns);
    }
    const int64_t state = (((int64_t)me.b * in.H + h) * p.slots + me.slot) * in.P * in.N + p0 * in.N;
    copy_state<C>(in, p.h, state, p0, stage + C::H);
    copy_state<C>(in, p.G, state, p0, stage + C::G);
    cp_async_commit();
}

/* The warp's 8 rows of a tile, f16 in place; returns what undoes a lane's row, RowLanes<64>().row of them. */
template <class T>
GT_DEV float convert_rows_of(int warp, uint32_t tile) {
    const RowLanes<64> at;
    uint4 x[RowLanes<64>::PIECES];
    uint32_t most = 0;
    GT_UNROLL
    for (int i = 0; i < RowLanes<64>::PIECES; i++) {
        x[i] = lds<uint4>(tile + at.cell(warp, i));
        most = larger_pair<T>(larger_pair<T>(most, x[i].x), x[i].y);
        most = larger_pair<T>(larger_pair<T>(most, x[i].z), x[i].w);
    }
    const Power power = power_of(row_maximum<T, RowLanes<64>::LANES>(most));
    GT_UNROLL
    for (int i = 0; i < RowLanes<64>::PIECES; i++)
        sts<uint4>(tile + at.cell(warp, i),
                   {scaled_f16<T>(x[i].x, power.value), scaled_f16<T>(x[i].y, power.value),
                    scaled_f16<T>(x[i].z, power.value), scaled_f16<T>(x[i].w, power.value)});
    return power.inverse;
}

GT_DEV float convert_rows(gt_dtype dtype, int warp, uint32_t tile) {
    return dtype == GT_BF16 ? convert_rows_of<bf16>(warp, tile) : convert_rows_of<f16>(warp, tile);
}

/* Over the 8 rows of which lanes 4 i have one each. */
GT_DEV float rows_sum(float x) {
    GT_UNROLL
    for (int mask = 4; mask < 32; mask *= 2) x += shfl_xor(x, mask);
    return x;
}

GT_DEV float rows_largest(float x) {
    GT_UNROLL
    for (int mask = 4; mask < 32; mask *= 2) {
        const float other = shfl_xor(x, mask);
        x = other > x ? other : x;
    }
    return x;
}

/* The warp's rows of what came for a step. */
template <class C>
GT_DEV void convert_step(gt_dtype dtype, const ChunkGradientBlock<C>& me, int step) {
    const RowLanes<64> at;
    const uint32_t stage = me.stage(step);
    const int row = me.warp * RowLanes<64>::ROWS + at.row;
    const float x = convert_rows(dtype, me.warp, stage + C::X), dy = convert_rows(dtype, me.warp, stage + C::DY);
    const float bound = rows_largest(dy * me.value(C::C_INVERSE + row));
    float weight = 0.0f;
    if (me.makes_state())
        weight = convert_rows(dtype, me.warp, stage + C::NEXT) * me.value(C::NEXT_INVERSE + row) *
                 me.value(C::MADE + step % 2 * C::MADE_FLOATS + row);
    const float sum = rows_sum(weight);
    if (at.piece == 0) {
        sts<float>(me.cell(me.row_inverse(step, false) + row), x);
        sts<float>(me.cell(me.row_inverse(step, true) + row), dy);
        sts<float>(me.cell(C::WEIGHT + row), weight);
    }
    if (lane_id() == 0) {
        sts<float>(me.cell(C::M_BOUND + me.warp), bound);
        sts<float>(me.cell(C::WEIGHT_SUM + me.warp), sum);
    }
}

/* ---- the state that the chunk makes ---------------------------------------------------------------------------- */

/* What the neighbour's B or C is to a warp: right operands of all 64 tokens and its columns. */
template <class C>
struct Neighbour {
    uint32_t words[4][C::MADE_TILES][2];
};

template <class C>
GT_DEV int made_piece(const ChunkGradientBlock<C>& me, int i) { return me.warp % C::GROUPS * C::MADE_TILES + i; }

template <class C>
GT_DEV void read_neighbour(const ChunkGradientBlock<C>& me, uint32_t tile, Neighbour<C>& neighbour) {
    GT_UNROLL
    for (int k = 0; k < 4; k++)
        GT_UNROLL
        for (int i = 0; i < C::MADE_TILES; i++)
            ldmatrix_x2_trans(neighbour.words[k][i],
                              tile + tile_cell<C::N>(16 * k + lane_id() % 16, made_piece(me, i)));
}

/* The larger of four inverses. */
GT_DEV float largest_of(float4 x) {
    const float a = x.x > x.y ? x.x : x.y, b = x.z > x.w ? x.z : x.w;
    return a > b ? a : b;
}

/* 1 / x, of a power of two. */
GT_DEV float inverse_power(float x) { return as_float(0x7f000000u - as_uint(x)); }

/* state <- exp(sum a) state + sum_t weight_t row_t (B or C)_t^T, over the neighbour's tokens, in place: f16 with one power
 * of two.  h: rows of x and B; G: of dy and C. */
template <class C>
GT_DEV void make_state(const ChunkGradientBlock<C>& me, int step, const Neighbour<C>& neighbour) {
    const int lane = lane_id(), g = lane / 4, j = lane % 4;
    const uint32_t stage = me.stage(step), state = stage + (me.second ? C::H : C::G);
    const int block0 = me.warp / C::GROUPS * C::MADE_BLOCKS;
    const float4 sums0 = lds<float4>(me.cell(C::WEIGHT_SUM)), sums1 = lds<float4>(me.cell(C::WEIGHT_SUM + 4));
    const float sum = ((sums0.x + sums0.y) + (sums0.z + sums0.w)) + ((sums1.x + sums1.y) + (sums1.z + sums1.w));
    const float E = me.value(C::MADE + step % 2 * C::MADE_FLOATS + CHUNK);
    const int from = C::STATE_INVERSES + step % 2 * 8 + (me.second ? 0 : 4);
    const Power weights = power_of(sum * 0x1p14f); /* to at most 1 */
    /* no row and no row of B or C exceeds 2^14, no state 2^16 */
    const float bound = fma_rn(E * 0x1p16f, largest_of(lds<float4>(me.cell(from))), sum * 0x1p28f);
    const Power made = power_of(bound);
    float sums[C::MADE_BLOCKS][C::MADE_TILES][4] = {};
    const uint32_t left = by_columns<64>(stage + C::NEXT);
    GT_UNROLL
    for (int k = 0; k < 4; k++) {
        uint32_t right[C::MADE_TILES][2];
        GT_UNROLL
        for (int e = 0; e < 2; e++) {
            const float2 w = lds<float2>(me.cell(C::WEIGHT + 16 * k + 8 * e + 2 * j));
            const float w0 = w.x * weights.value, w1 = w.y * weights.value;
            GT_UNROLL
            for (int i = 0; i < C::MADE_TILES; i++) {
                const uint32_t pair = as_uint(made_here(as_float(neighbour.words[k][i][e])));
                right[i][e] = pack_f16(unpack_f16_lo(pair) * w0, unpack_f16_hi(pair) * w1);
            }
        }
        GT_UNROLL
        for (int m = 0; m < C::MADE_BLOCKS; m++) {
            uint32_t a[4];
            ldmatrix_x4_trans(a, tile_at<64>(left, k, block0 + m));
            GT_UNROLL
            for (int i = 0; i < C::MADE_TILES; i++) mma_f16(sums[m][i], a, right[i][0], right[i][1]);
        }
    }
    const float added = weights.inverse * made.value;
    GT_UNROLL
    for (int m = 0; m < C::MADE_BLOCKS; m++) {
        const float kept = E * me.value(from + block0 + m) * made.value;
        GT_UNROLL
        for (int i = 0; i < C::MADE_TILES; i++)
            GT_UNROLL
            for (int e = 0; e < 2; e++) {
                const uint32_t cell =
                    state + tile_cell<C::N>(16 * (block0 + m) + g + 8 * e, made_piece(me, i)) + 4 * j;
                const uint32_t old = lds<uint32_t>(cell);
                sts<uint32_t>(cell, pack_f16(fma_rn(kept, unpack_f16_lo(old), added * sums[m][i][2 * e]),
                                             fma_rn(kept, unpack_f16_hi(old), added * sums[m][i][2 * e + 1])));
            }
    }
    if (thread_id() == 0) sts<float>(me.cell(C::MADE_INVERSE), made.inverse);
}

/* What undoes the powers of 16 rows of h (0) or G (1), and the largest of the tile. */
template <class C>
GT_DEV float4 state_inverses(const ChunkGradientBlock<C>& me, int step, int which) {
    if (me.makes_state() && which == (me.second ? 0 : 1)) {
        const float x = me.value(C::MADE_INVERSE);
        return {x, x, x, x};
    }
    return lds<float4>(me.cell(C::STATE_INVERSES + step % 2 * 8 + 4 * which));
}

/* ---- pairs ----------------------------------------------------------------------------------------------------- */

/* The warp's pairs: tokens s of block S_BLOCK, tokens t of blocks 2 half, 2 half + 1 that are not before it.  Of the ten
 * blocks every scheduler (warps w and w + 4) has two or three. */
struct PairPlace {
    int s_block, half;
    GT_METHOD explicit PairPlace(int warp) {
        s_block = 0x31322100 >> 4 * warp & 3;
        half = 0x11001010 >> 4 * warp & 1;
    }
};

/* of block 2 half + i: [i][columns t of 8][as mma has them, rows s] */
typedef float Pairs16[2][2][4];

/* S^T of the chunk, in full. */
template <class C>
GT_DEV void make_S(const ChunkGradientBlock<C>& me, Pairs16& S) {
    const PairPlace at(me.warp);
    const int g = lane_id() / 4, j = lane_id() % 4;
    const uint32_t left = by_rows<C::N>(me.smem + C::B), right = by_columns<C::N>(me.smem + C::C);
    GT_UNROLL
    for (int i = 0; i < 2; i++) {
        const int block = 2 * at.half + i;
        GT_UNROLL
        for (int n = 0; n < 2; n++)
            GT_UNROLL
            for (int e = 0; e < 4; e++) S[i][n][e] = 0.0f;
        if (block < at.s_block) continue;
        GT_UNROLL
        for (int k = 0; k < C::N / 16; k++) {
            uint32_t a[4], b[4];
            ldmatrix_x4(a, tile_at<C::N>(left, at.s_block, k));
            ldmatrix_x4(b, tile_at<C::N>(right, block, k));
            mma_f16(S[i][0], a, b[0], b[1]);
            mma_f16(S[i][1], a, b[2], b[3]);
        }
        GT_UNROLL
        for (int n = 0; n < 2; n++) {
            const float2 t = lds<float2>(me.cell(C::C_INVERSE + 16 * block + 8 * n + 2 * j));
            GT_UNROLL
            for (int e = 0; e < 4; e++)
                S[i][n][e] *= me.value(C::B_INVERSE + 16 * at.s_block + g + e / 2 * 8) * (e % 2 ? t.y : t.x);
        }
    }
}

/* L_ts of the elements of a lane in tile `n` of a block of t, rows s of block `s_block`. */
template <class C>
GT_DEV void pair_decays(const ChunkGradientBlock<C>& me, int step, int block, int s_block, int n, float (&L)[4]) {
    const int g = lane_id() / 4, j = lane_id() % 4, t = 16 * block + 8 * n + 2 * j, s = 16 * s_block + g;
    if (block != s_block) {
        const float2 u = lds<float2>(me.cell(me.factor(step, Factors::U) + t));
        const float between = me.value(me.factor(step, between_cell(block, s_block)));
        GT_UNROLL
        for (int e = 0; e < 4; e++) {
            const float v = me.value(me.factor(step, Factors::V) + s + e / 2 * 8) * between;
            L[e] = (e % 2 ? u.y : u.x) * v;
        }
        return;
    }
    /* the half of t before that of s: none */
    const uint32_t diagonal = me.cell(me.factor(step, Factors::DIAGONAL) + 8 * t + g);
    const float near0 = lds<float>(diagonal), near1 = lds<float>(diagonal + 32);
    const float2 u = lds<float2>(me.cell(me.factor(step, Factors::HALF) + t));
    const float v = me.value(me.factor(step, Factors::HALF) + s);
    L[0] = n ? u.x * v : near0, L[1] = n ? u.y * v : near1;
    L[2] = n ? near0 : 0.0f, L[3] = n ? near1 : 0.0f;
}

/* Sums over the 8 lanes of a column, for tile n / 2 and column 2 j + n % 2, to out + 8 (n / 2) + 2 j + n % 2. */
GT_DEV void store_column_sums(float (&v)[4], uint32_t out) {
    const int g = lane_id() / 4, n = g / 2;
    reduce_scatter<4, 8, 4>(v, g);
    if (g % 2 == 0) sts<float>(out + 4 * (8 * (n / 2) + 2 * (lane_id() % 4) + n % 2), v[0]);
}

/* sum_{t>=k>s} of a 16 x 16 block on the diagonal, for its 16 k. */
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

/* dS, W (added to), Gamma and its sums, M^T. */
template <class C>
GT_DEV void make_pairs(const ChunkGradientBlock<C>& me, int step, const Pairs16& S, Pairs16& W) {
    const PairPlace at(me.warp);
    const int g = lane_id() / 4, j = lane_id() % 4, s = 16 * at.s_block + g;
    const uint32_t stage = me.stage(step);
    const uint32_t left = by_rows<64>(stage + C::X), right = by_columns<64>(stage + C::DY);
    float dS[2][2][4] = {};
    GT_UNROLL
    for (int i = 0; i < 2; i++) {
        if (2 * at.half + i < at.s_block) continue;
        GT_UNROLL
        for (int k = 0; k < 4; k++) {
            uint32_t a[4], b[4];
            ldmatrix_x4(a, tile_at<64>(left, at.s_block, k));
            ldmatrix_x4(b, tile_at<64>(right, 2 * at.half + i, k));
            mma_f16(dS[i][0], a, b[0], b[1]);
            mma_f16(dS[i][1], a, b[2], b[3]);
        }
    }
    /* a power of two for each row of M^T: |S| <= N 2^28 of what C and B were multiplied by */
    float weight[2], power[2], sums[2] = {};
    GT_UNROLL
    for (int e = 0; e < 2; e++) {
        float bound = 0.0f;
        GT_UNROLL
        for (int i = 0; i < 8; i++) {
            const float other = me.value(C::M_BOUND + i);
            bound = i >= 2 * at.s_block + e && other > bound ? other : bound;
        }
        bound *= me.value(C::B_INVERSE + s + 8 * e) * me.value(me.factor(step, Factors::GROWTH));
        const Power M = power_of(bound * (0x1p28f * C::N));
        power[e] = M.value;
        weight[e] = me.value(me.factor(step, Factors::DELTA) + s + 8 * e) * me.value(me.row_inverse(step, false) + s + 8 * e);
        if (at.half == 1 && j == 0) sts<float>(me.cell(C::M_INVERSE + s + 8 * e), M.inverse);
    }
    GT_UNROLL
    for (int i = 0; i < 2; i++) {
        const int block = 2 * at.half + i;
        if (block < at.s_block) continue;
        float gamma[2][4], columns[4];
        GT_UNROLL
        for (int n = 0; n < 2; n++) {
            float L[4];
            pair_decays(me, step, block, at.s_block, n, L);
            const float2 dy = lds<float2>(me.cell(me.row_inverse(step, true) + 16 * block + 8 * n + 2 * j));
            float M[4];
            GT_UNROLL
            for (int e = 0; e < 4; e++) {
                const float l = L[e] * (e % 2 ? dy.y : dy.x), w = dS[i][n][e] * l * weight[e / 2];
                W[i][n][e] += w;
                gamma[n][e] = w * S[i][n][e];
                M[e] = S[i][n][e] * l * power[e / 2];
            }
            GT_UNROLL
            for (int e = 0; e < 2; e++)
                sts<uint32_t>(stage + C::NEXT + tile_cell<64>(s + 8 * e, 2 * block + n) + 4 * j,
                              pack_f16(M[2 * e], M[2 * e + 1]));
            columns[2 * n] = gamma[n][0] + gamma[n][2];
            columns[2 * n + 1] = gamma[n][1] + gamma[n][3];
        }
        if (block == at.s_block) {
            store_diagonal(gamma, me.cell(me.sums(step, C::DIAGONAL) + 16 * block));
            continue;
        }
        GT_UNROLL
        for (int e = 0; e < 2; e++)
            sums[e] += (gamma[0][2 * e] + gamma[0][2 * e + 1]) + (gamma[1][2 * e] + gamma[1][2 * e + 1]);
        store_column_sums(columns, me.cell(me.sums(step, C::ROW_SUMS) + CHUNK * at.s_block + 16 * block));
    }
    reduce_scatter<2, 4, 1>(sums, j);
    if (j % 2 == 0) sts<float>(me.cell(me.sums(step, C::COLUMN_SUMS) + CHUNK * at.half + s + 4 * j), sums[0]);
}

/* ---- dC and dB ------------------------------------------------------------------------------------------------- */

/* What a warp has of dC (warps 0-3) or dB: 32 tokens, COLUMNS columns. */
struct ProductPlace {
    int which, rows, half;
    GT_METHOD explicit ProductPlace(int warp) {
        which = warp / 4;
        rows = warp % 2;
        half = warp / 2 % 2;
    }
};

template <class C>
struct ProductSums {
    float v[C::PASSES][2][C::TILES][4];
};

/* sums += factor_t sum_k left[t][k] right[k][n] and, if asked, dots[t] = <those of token t, other_t>.  left: 64 x
 * 64, right: 64 x N, other: [t][n].  ratios: multiply the left columns of 16 rows k of `right`. */
template <bool DOTS, class C>
GT_DEV void add_product(const ChunkGradientBlock<C>& me, ProductSums<C>& sums, uint32_t left, uint32_t right, uint32_t other, const float (&ratios)[4],
                        const float (&factor)[2][2], float (&dots)[4]) {
    const ProductPlace at(me.warp);
    const int g = lane_id() / 4, j = lane_id() % 4;
    const uint32_t a_cells = tile_at<64>(by_rows<64>(left), 2 * at.rows, 0);
    const uint32_t b_cells = tile_at<C::N>(by_rows<C::N>(right), 0, at.half * C::COLUMNS / 16);
    GT_UNROLL
    for (int i = 0; i < 4; i++) dots[i] = 0.0f;
    GT_UNROLL
    for (int pass = 0; pass < C::PASSES; pass++) {
        float share[2][C::TILES][4] = {};
        GT_UNROLL
        for (int k = 0; k < 4; k++) {
            uint32_t a[2][4];
            GT_UNROLL
            for (int m = 0; m < 2; m++) {
                ldmatrix_x4(a[m], tile_at<64>(a_cells, m, k));
                GT_UNROLL
                for (int e = 0; e < 4; e++) a[m][e] = multiply_f16(a[m][e], pack_f16(ratios[k], ratios[k]));
            }
            GT_UNROLL
            for (int n = 0; n < C::TILES; n += 2) {
                uint32_t b[4];
                ldmatrix_x4_trans(b, tile_at<C::N>(b_cells, k, 2 * pass + n / 2));
                if (C::TILES == 1 && at.half) b[0] = b[2], b[1] = b[3];
                GT_UNROLL
                for (int m = 0; m < 2; m++) {
                    mma_f16(share[m][n], a[m], b[0], b[1]);
                    if constexpr (C::TILES > 1) mma_f16(share[m][n + 1], a[m], b[2], b[3]);
                }
            }
        }
        GT_UNROLL
        for (int m = 0; m < 2; m++)
            GT_UNROLL
            for (int n = 0; n < C::TILES; n++)
                GT_UNROLL
                for (int e = 0; e < 2; e++) {
                    const float x0 = share[m][n][2 * e], x1 = share[m][n][2 * e + 1];
                    float* sum = sums.v[pass][m][n] + 2 * e;
                    sum[0] = fma_rn(factor[m][e], x0, sum[0]);
                    sum[1] = fma_rn(factor[m][e], x1, sum[1]);
                    if constexpr (!DOTS) continue;
                    const int row = 32 * at.rows + 16 * m + 8 * e + g;
                    const int piece = at.half * (C::COLUMNS / 8) + 4 * pass + n;
                    const uint32_t pair = lds<uint32_t>(other + tile_cell<C::N>(row, piece) + 4 * j);
                    dots[2 * m + e] = fma_rn(x0, unpack_f16_lo(pair), fma_rn(x1, unpack_f16_hi(pair), dots[2 * m + e]));
                }
    }
}

/* The step's share of dC and dB, E and F. */
template <class C>
GT_DEV void add_states(const ChunkGradientBlock<C>& me, int step, ProductSums<C>& sums) {
    const ProductPlace at(me.warp);
    const int g = lane_id() / 4, j = lane_id() % 4;
    const uint32_t stage = me.stage(step);
    const float4 inverses = state_inverses(me, step, at.which);
    const float largest = largest_of(inverses), unit = inverse_power(largest);
    const float ratios[4] = {inverses.x * unit, inverses.y * unit, inverses.z * unit, inverses.w * unit};
    float factor[2][2], dots[4];
    GT_UNROLL
    for (int m = 0; m < 2; m++)
        GT_UNROLL
        for (int e = 0; e < 2; e++) {
            const int t = 32 * at.rows + 16 * m + 8 * e + g;
            const float decay = at.which ? me.value(me.factor(step, Factors::DELTA) + t) * me.value(me.factor(step, Factors::SUF) + t)
                                         : me.value(me.factor(step, Factors::PRE) + t);
            factor[m][e] = decay * me.value(me.row_inverse(step, !at.which) + t) * largest;
        }
    add_product<true>(me, sums, stage + (at.which ? C::X : C::DY), stage + (at.which ? C::G : C::H),
                me.smem + (at.which ? C::B : C::C), ratios, factor, dots);
    GT_UNROLL
    for (int i = 0; i < 4; i++) {
        const int t = 32 * at.rows + 8 * i + g;
        dots[i] *= factor[i / 2][i % 2] * me.value((at.which ? C::B_INVERSE : C::C_INVERSE) + t);
    }
    reduce_scatter<4, 4, 1>(dots, j);
    sts<float>(me.cell(me.sums(step, at.which ? C::F : C::E) + CHUNK * at.half + 32 * at.rows + 8 * j + g), dots[0]);
}

/* ---- U, dx, <x, U>, Z ------------------------------------------------------------------------------------------ */

/* U of 32 tokens s by 16 rows p, in two parts: what G gives, by `from_G`, and pairs, by `from_pairs`; the warp's share of
 * <G, h> of its 16 rows. */
struct InputSums {
    float from_G[2][2][4], from_pairs[2][2][4], Gh[2][4];
};

template <class C>
GT_DEV void multiply_inputs(const ChunkGradientBlock<C>& me, int step, int part, int rows, InputSums& sums) {
    const uint32_t stage = me.stage(step);
    const uint32_t b_cells = tile_at<C::N>(by_columns<C::N>(stage + C::G), part, 0);
    const uint32_t h_cells = tile_at<C::N>(by_rows<C::N>(stage + C::H), part, 0);
    const uint32_t a_cells = tile_at<C::N>(by_rows<C::N>(me.smem + C::B), 2 * rows, 0);
    const uint32_t m_cells = tile_at<64>(by_rows<64>(stage + C::NEXT), 2 * rows, 2 * rows);
    const uint32_t dy_cells = tile_at<64>(by_rows<64>(stage + C::DY), 2 * rows, part);
    constexpr int STEPS = C::N / 16, HALF = STEPS / 2;
    GT_UNROLL
    for (int i = 0; i < STEPS; i++) { /* each of the two warps with these p begins with its half, of which it takes <G, h> */
        const int half = i < HALF ? rows : 1 - rows, k = i % (HALF ? HALF : 1);
        uint32_t a[4], b[4];
        const auto at_half = [&](uint32_t cells) { return tile_at<C::N>(tile_at<C::N>(cells, 0, half * HALF), 0, k); };
        ldmatrix_x4(b, at_half(b_cells));
        GT_UNROLL
        for (int m = 0; m < 2; m++) {
            ldmatrix_x4(a, at_half(tile_at<C::N>(a_cells, m, 0)));
            mma_f16(sums.from_G[m][0], a, b[0], b[1]);
            mma_f16(sums.from_G[m][1], a, b[2], b[3]);
        }
        if (i >= HALF && (HALF || rows)) continue;
        ldmatrix_x4(a, at_half(h_cells));
        mma_f16(sums.Gh[0], a, b[0], b[1]);
        mma_f16(sums.Gh[1], a, b[2], b[3]);
    }
    GT_UNROLL
    for (int k = 0; k < 4; k++) { /* blocks of t, from that of the first s on */
        if (k >= 2 && rows) break;
        uint32_t a[4], b[4];
        ldmatrix_x4_trans(b, tile_at<64>(dy_cells, k, 0));
        GT_UNROLL
        for (int m = 0; m < 2; m++) {
            if (k < m) continue;
            ldmatrix_x4(a, tile_at<64>(m_cells, m, k));
            mma_f16(sums.from_pairs[m][0], a, b[0], b[1]);
            mma_f16(sums.from_pairs[m][1], a, b[2], b[3]);
        }
    }
}

GT_DEV uint32_t pack_as(gt_dtype dtype, float lo, float hi) {
    return dtype == GT_BF16 ? pack_bf16(lo, hi) : pack_f16(lo, hi);
}

GT_DEV float part_of(float4 x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

/* Dskip of the rows p of column tile n of a lane. */
GT_DEV float2 skips_of(const Problem& in, int h, int p) {
    if (!in.Dskip) return {0.0f, 0.0f};
    if (!in.skip_per_channel) return {in.Dskip[h], in.Dskip[h]};
    const float* skip = in.Dskip + (int64_t)h * in.P;
    return {p < in.P ? skip[p] : 0.0f, p + 1 < in.P ? skip[p + 1] : 0.0f};
}

template <class C>
GT_DEV void finish_inputs(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me, int step) {
    const Problem& in = p.in;
    const int g = lane_id() / 4, j = lane_id() % 4;
    const int part = me.warp % 4, rows = me.warp / 4; /* of p, 16; of s, 32 */
    const int h = me.head(p, step), p0 = me.p0(p, step);
    const uint32_t stage = me.stage(step);
    const float h_inverse = part_of(state_inverses(me, step, 0), part);
    const float G_inverse = part_of(state_inverses(me, step, 1), part);
    InputSums sums = {};
    multiply_inputs(me, step, part, rows, sums);
    float Gh = g == 2 * j ? sums.Gh[0][0] + sums.Gh[1][2] : g == 2 * j + 1 ? sums.Gh[0][1] + sums.Gh[1][3] : 0.0f;
    Gh = warp_sum(Gh * h_inverse * G_inverse);
    if (lane_id() == 0) sts<float>(me.cell(me.sums(step, C::Z) + me.warp), Gh);
    const bool needs_dy = in.Dskip || p.dskip;
    float2 skips[2];
    GT_UNROLL
    for (int n = 0; n < 2; n++) skips[n] = skips_of(in, h, p0 + 16 * part + 8 * n + 2 * j);
    float direct[4], dskip[4] = {};
    GT_UNROLL
    for (int m = 0; m < 2; m++)
        GT_UNROLL
        for (int e = 0; e < 2; e++) {
            const int s = 32 * rows + 16 * m + 8 * e + g;
            const float x_inverse = me.value(me.row_inverse(step, false) + s), dy_inverse = me.value(me.row_inverse(step, true) + s);
            const float by_G = me.value(me.factor(step, Factors::SUF) + s) * me.value(C::B_INVERSE + s) * G_inverse;
            const float by_pairs = me.value(C::M_INVERSE + s), delta = me.value(me.factor(step, Factors::DELTA) + s);
            float dot = 0.0f;
            GT_UNROLL
            for (int n = 0; n < 2; n++) {
                const uint32_t cell = tile_cell<64>(s, 2 * part + n) + 4 * j;
                const uint32_t x = lds<uint32_t>(stage + C::X + cell);
                const float x0 = unpack_f16_lo(x), x1 = unpack_f16_hi(x);
                const float U0 = fma_rn(by_pairs, sums.from_pairs[m][n][2 * e], by_G * sums.from_G[m][n][2 * e]);
                const float U1 = fma_rn(by_pairs, sums.from_pairs[m][n][2 * e + 1], by_G * sums.from_G[m][n][2 * e + 1]);
                float dx0 = delta * U0, dx1 = delta * U1;
                dot = fma_rn(x0, U0, fma_rn(x1, U1, dot));
                const uint32_t dy = needs_dy ? lds<uint32_t>(stage + C::DY + cell) : 0;
                const float dy0 = unpack_f16_lo(dy) * dy_inverse, dy1 = unpack_f16_hi(dy) * dy_inverse;
                dx0 = fma_rn(skips[n].x, dy0, dx0);
                dx1 = fma_rn(skips[n].y, dy1, dx1);
                dskip[2 * n] = fma_rn(dy0, x0 * x_inverse, dskip[2 * n]);
                dskip[2 * n + 1] = fma_rn(dy1, x1 * x_inverse, dskip[2 * n + 1]);
                sts<uint32_t>(stage + C::X + cell, pack_as(in.dtype, dx0, dx1)); /* over x, which is read no more */
            }
            direct[2 * m + e] = dot * x_inverse;
        }
    reduce_scatter<4, 4, 1>(direct, j);
    sts<float>(me.cell(me.sums(step, C::DIRECT) + CHUNK * part + 32 * rows + 8 * j + g), direct[0]);
    if (p.dskip) store_column_sums(dskip, me.cell(me.sums(step, C::DSKIP) + CHUNK * rows + 16 * part));
    sync_warp();
    if (!p.dx) return;
    uint16_t* to = static_cast<uint16_t*>(p.dx) + at(p.dx_at, me.b, me.first, h) + p0;
    GT_UNROLL
    for (int i = 0; i < 2; i++) {
        const int t = 32 * rows + 16 * i + lane_id() / 2, piece = 2 * part + lane_id() % 2;
        if (t < me.tokens && p0 + 8 * piece < in.P)
            stg<uint4>(to + t * p.dx_at.t + 8 * piece, lds<uint4>(stage + C::X + tile_cell<64>(t, piece)));
    }
}

/* ---- decay factors, da, ddt ------------------------------------------------------------------------------------ */

/* What a warp has of a head's dt: of tokens 2 lane, 2 lane + 1 of the chunk and of its neighbour. */
struct StepTimes {
    float own[2] = {}, other[2] = {};
};

GT_DEV void load_dt(const Problem& in, int64_t b, int64_t first, int h, int tokens, float (&dt)[2]) {
    GT_UNROLL
    for (int i = 0; i < 2; i++) {
        const int t = 2 * lane_id() + i;
        dt[i] = t < tokens ? load_as(in.dt, in.dt_dtype, at(in.dt_at, b, first + t, h)) : 0.0f;
    }
}

/* Delta of the same tokens, 0 beyond the last. */
GT_DEV void make_deltas(const Problem& in, int h, int tokens, const float (&dt)[2], Delta (&delta)[2]) {
    const float bias = in.dt_bias ? in.dt_bias[h] : 0.0f;
    GT_UNROLL
    for (int i = 0; i < 2; i++) {
        delta[i] = delta_of(in.rule, dt[i] + bias);
        if (2 * lane_id() + i >= tokens) delta[i] = {0.0f, 0.0f};
    }
}

template <class C>
GT_DEV void load_times(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me, int step, StepTimes& dt) {
    const Problem& in = p.in;
    const int h = me.head(p, step);
    load_dt(in, me.b, me.first, h, me.tokens, dt.own);
    if (me.makes_state()) load_dt(in, me.b, me.neighbour(), h, me.neighbour_tokens, dt.other);
}

/* Of each of the neighbour's tokens, what it weighs in the state that the chunk makes, and exp(sum a). */
template <class C>
GT_DEV void neighbour_factors(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me, int step, const StepTimes& dt) {
    const Problem& in = p.in;
    const int lane = lane_id(), h = me.head(p, step), cells = C::MADE + step % 2 * C::MADE_FLOATS;
    Delta delta[2];
    make_deltas(in, h, me.neighbour_tokens, dt.other, delta);
    const float A = in.A[h] * LOG2_E, l0 = delta[0].value * A, l1 = delta[1].value * A;
    float upto = l0 + l1, from = upto;
    GT_UNROLL
    for (int d = 1; d < 32; d *= 2) {
        const float left = shfl_up(upto, d), right = shfl_down(from, d);
        upto += lane >= d ? left : 0.0f;
        from += lane + d < 32 ? right : 0.0f;
    }
    float before = shfl_up(upto, 1), after = shfl_down(from, 1);
    before = lane > 0 ? before : 0.0f;
    after = lane < 31 ? after : 0.0f;
    if (me.second)
        sts<float2>(me.cell(cells + 2 * lane),
                    {delta[0].value * exp2_finite(after + l1), delta[1].value * exp2_finite(after)});
    else
        sts<float2>(me.cell(cells + 2 * lane), {exp2_finite(before + l0), exp2_finite(before + l0 + l1)});
    if (lane == 0) sts<float>(me.cell(cells + CHUNK), exp2_finite(from));
}

/* What a step needs before it begins. */
template <class C>
GT_DEV void prepare_step(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me, int step, const StepTimes& dt) {
    const Problem& in = p.in;
    if (me.makes_state()) neighbour_factors(p, me, step, dt);
    const int which = lane_id() / 4, i = lane_id() % 4, blocks = (int)row_tiles(in.P), block = me.p0(p, step) / 16 + i;
    if (which > 1) return;
    const Checkpoints& states = which ? p.G : p.h;
    const int64_t at = ((me.b * in.H + me.head(p, step)) * p.slots + me.slot) * blocks + block;
    const float inverse = states.values && block < blocks ? states.powers[at] : 0x1p-100f;
    sts<float>(me.cell(C::STATE_INVERSES + step % 2 * 8 + lane_id()), inverse);
}

/* The decay factors of the chunk itself. */
template <class C>
GT_DEV void own_factors(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me, int step, const StepTimes& dt) {
    const Problem& in = p.in;
    const int h = me.head(p, step);
    Delta delta[2];
    make_deltas(in, h, me.tokens, dt.own, delta);
    const float values[2] = {delta[0].value, delta[1].value};
    make_factors(me.cell(me.factor(step, 0)), values, in.A[h]);
}

/* Sums of pairs of tokens over this and the later tokens. */
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

/* The same over the tokens before, of LANES lanes. */
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

GT_DEV float2 plus(float2 a, float2 b) { return {a.x + b.x, a.y + b.y}; }

/* da and ddt of a step that is done, once the head's last tile is; its share of dA, ddt_bias, dDskip. */
template <class C>
GT_DEV void finish_step(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me, int step) {
    const Problem& in = p.in;
    const int lane = lane_id(), block = lane / 8, h = me.head(p, step), tile = me.tile(p, step);
    const auto pair = [&](int offset) { return lds<float2>(me.cell(me.sums(step, offset) + 2 * lane)); };
    const float A = in.A[h];
    float dt[2];
    Delta deltas[2];
    load_dt(in, me.b, me.first, h, me.tokens, dt);
    make_deltas(in, h, me.tokens, dt, deltas);
    float2 da = sums_from(plus(pair(C::E), pair(C::E + CHUNK)));
    GT_UNROLL
    for (int i = 0; i < 3; i++) { /* Gamma_ts: s in an earlier block than k */
        float2 row = {0.0f, 0.0f};
        if (i < block) row = pair(C::ROW_SUMS + CHUNK * i);
        row = sums_from(row);
        if (i < block) da = plus(da, row);
    }
    /* s in the block of k, t in a later one; both in that of k; F */
    da = plus(da, sums_before<8>(plus(pair(C::COLUMN_SUMS), pair(C::COLUMN_SUMS + CHUNK))));
    da = plus(da, pair(C::DIAGONAL));
    da = plus(da, sums_before<32>(plus(pair(C::F), pair(C::F + CHUNK))));
    const float4 z0 = lds<float4>(me.cell(me.sums(step, C::Z))), z1 = lds<float4>(me.cell(me.sums(step, C::Z) + 4));
    const float Gh = ((z0.x + z0.y) + (z0.z + z0.w)) + ((z1.x + z1.y) + (z1.z + z1.w));
    const float E = exp2_finite(warp_sum((deltas[0].value + deltas[1].value) * A * LOG2_E));
    da = plus(da, {E * Gh, E * Gh});
    float2 direct = plus(plus(pair(C::DIRECT), pair(C::DIRECT + CHUNK)),
                         plus(pair(C::DIRECT + 2 * CHUNK), pair(C::DIRECT + 3 * CHUNK)));
    float dskip = 0.0f;
    if (p.dskip) {
        const float2 both = plus(pair(C::DSKIP), pair(C::DSKIP + CHUNK));
        const int column = me.p0(p, step) + 2 * lane;
        if (in.skip_per_channel) {
            float* to = p.dskip + (me.row(p.slots) * in.H + h) * in.P + column;
            if (column < in.P) to[0] = both.x;
            if (column + 1 < in.P) to[1] = both.y;
        } else {
            dskip = warp_sum(both.x + both.y);
        }
    }
    const uint32_t kept = me.cell(C::HEAD_SUMS + 2 * lane);
    if (tile > 0) {
        da = plus(lds<float2>(kept), da);
        direct = plus(lds<float2>(kept + 4 * CHUNK), direct);
        dskip += me.value(C::HEAD_SUMS + 2 * CHUNK);
    }
    if (tile + 1 < in.tiles) {
        sync_warp();
        sts<float2>(kept, da);
        sts<float2>(kept + 4 * CHUNK, direct);
        if (lane == 0) sts<float>(me.cell(C::HEAD_SUMS + 2 * CHUNK), dskip);
        sync_warp();
        return;
    }
    float dA = 0.0f, dbias = 0.0f;
    GT_UNROLL
    for (int i = 0; i < 2; i++) {
        const int t = 2 * lane + i;
        const float da_t = i ? da.y : da.x, direct_t = i ? direct.y : direct.x;
        const Delta delta = deltas[i];
        if (t >= me.tokens) continue;
        /* the slope first: the sum without it may overflow */
        float ddt = fma_rn(delta.slope * A, da_t, delta.slope * direct_t);
        if (delta.slope == 0.0f) ddt = 0.0f;
        if (p.ddt) store_as(p.ddt, in.dt_dtype, at(p.ddt_at, me.b, me.first + t, h), ddt);
        dA = fma_rn(delta.value, da_t, dA);
        dbias += ddt;
    }
    dA = warp_sum(dA);
    dbias = warp_sum(dbias);
    if (lane > 0) return;
    if (p.dA) p.dA[me.row(p.slots) * in.H + h] = dA;
    if (p.dbias) p.dbias[me.row(p.slots) * in.H + h] = dbias;
    if (p.dskip && !in.skip_per_channel) p.dskip[me.row(p.slots) * in.H + h] = dskip;
}

/* ---- dB and dC in the end -------------------------------------------------------------------------------------- */

/* Leaves the sum of W over the heads as f16, a power of two a row: at `tile` W_ts times what undoes B_s, rows t; behind it
 * its transpose times what undoes C_t, rows s.  All warps that multiply; two barriers. */
template <class C>
GT_DEV void store_W(const ChunkGradientBlock<C>& me, uint32_t tile, const Pairs16& W) {
    const PairPlace at(me.warp);
    const int lane = lane_id(), g = lane / 4, j = lane % 4, s = 16 * at.s_block + g;
    GT_UNROLL
    for (int i = 0; i < 2; i++)
        GT_UNROLL
        for (int n = 0; n < 2; n++)
            GT_UNROLL
            for (int e = 0; e < 2; e++)
                sts<float2>(tile + 4 * (C::W_PITCH * (s + 8 * e) + 16 * (2 * at.half + i) + 8 * n + 2 * j),
                            {W[i][n][2 * e], W[i][n][2 * e + 1]});
    sync_threads();
    float2 rows[2][8];
    const float2 B = lds<float2>(me.cell(C::B_INVERSE + 2 * lane)), c = lds<float2>(me.cell(C::C_INVERSE + 2 * lane));
    GT_UNROLL
    for (int i = 0; i < 8; i++) {
        const int row = 8 * me.warp + i;
        rows[0][i] = {lds<float>(tile + 4 * (C::W_PITCH * 2 * lane + row)) * B.x,
                      lds<float>(tile + 4 * (C::W_PITCH * (2 * lane + 1) + row)) * B.y};
        rows[1][i] = lds<float2>(tile + 4 * (C::W_PITCH * row + 2 * lane));
        rows[1][i] = {rows[1][i].x * c.x, rows[1][i].y * c.y};
    }
    sync_threads();
    GT_UNROLL
    for (int which = 0; which < 2; which++)
        GT_UNROLL
        for (int i = 0; i < 8; i++) {
            const int row = 8 * me.warp + i;
            const float2 x = rows[which][i];
            float largest = fabsf(x.x) > fabsf(x.y) ? fabsf(x.x) : fabsf(x.y);
            GT_UNROLL
            for (int mask = 1; mask < 32; mask *= 2) {
                const float other = shfl_xor(largest, mask);
                largest = other > largest ? other : largest;
            }
            const Power power = power_of(largest);
            sts<uint32_t>(tile + which * C::ROWS + tile_cell<64>(row, lane / 4) + 4 * (lane % 4),
                          pack_f16(x.x * power.value, x.y * power.value));
            if (lane == 0) sts<float>(me.cell(C::ROW_INVERSES + which * CHUNK + row), power.inverse);
        }
}

/* The warp's part of dC or dB, through shared memory in rows of 16 bytes. */
template <class C>
GT_DEV void store_product(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me, uint32_t tile,
                          const ProductSums<C>& sums) {
    const ProductPlace place(me.warp);
    const int g = lane_id() / 4, j = lane_id() % 4, piece0 = place.half * (C::COLUMNS / 8);
    GT_UNROLL
    for (int pass = 0; pass < C::PASSES; pass++)
        GT_UNROLL
        for (int m = 0; m < 2; m++)
            GT_UNROLL
            for (int n = 0; n < C::TILES; n++)
                GT_UNROLL
                for (int e = 0; e < 2; e++)
                    sts<uint32_t>(tile + tile_cell<C::N>(32 * place.rows + 16 * m + 8 * e + g, piece0 + 4 * pass + n) + 4 * j,
                                  pack_as(p.in.dtype, sums.v[pass][m][n][2 * e], sums.v[pass][m][n][2 * e + 1]));
    sync_warp();
    void* out = place.which ? p.dBm : p.dCm;
    if (!out) return;
    const gt_stride out_at = place.which ? p.dBm_at : p.dCm_at;
    uint16_t* to = static_cast<uint16_t*>(out) + at(out_at, me.b, me.first, me.g);
    constexpr int PIECES = C::COLUMNS / 8;
    GT_UNROLL
    for (int i = 0; i < PIECES; i++) {
        const int t = 32 * place.rows + (32 * i + lane_id()) / PIECES, piece = piece0 + (32 * i + lane_id()) % PIECES;
        if (t < me.tokens && 8 * piece < p.in.N)
            stg<uint4>(to + t * out_at.t + 8 * piece, lds<uint4>(tile + tile_cell<C::N>(t, piece)));
    }
}

template <class C>
GT_DEV void finish_groups(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me, const Pairs16& W,
                          ProductSums<C>& sums) {
    const ProductPlace place(me.warp);
    const uint32_t tile = me.smem + C::STAGE0;
    store_W(me, tile, W);
    sync_threads();
    float factor[2][2], dots[4];
    const float ratios[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    GT_UNROLL
    for (int i = 0; i < 4; i++)
        factor[i / 2][i % 2] =
            me.value(C::ROW_INVERSES + place.which * CHUNK + 32 * place.rows + 8 * i + lane_id() / 4);
    add_product<false>(me, sums, tile + (place.which ? C::ROWS : 0), me.smem + (place.which ? C::C : C::B), 0, ratios, factor, dots);
    sync_threads();
    store_product(p, me, me.smem + (place.which ? C::B : C::C), sums);
}

/* ---- the kernel ------------------------------------------------------------------------------------------------- */

/* Zeros where sums are added over all chunks that there may be. */
GT_DEV void clear_sums(const ChunkGradientParams& p, int64_t row) {
    const Problem& in = p.in;
    const int64_t skips = in.skip_per_channel ? in.H * in.P : in.H;
    for (int64_t i = thread_id(); i < skips; i += block_threads()) {
        if (p.dskip) p.dskip[row * skips + i] = 0.0f;
        if (i >= in.H) continue;
        if (p.dA) p.dA[row * in.H + i] = 0.0f;
        if (p.dbias) p.dbias[row * in.H + i] = 0.0f;
    }
}

template <class C>
GT_DEV void gradients_of(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me) {
    const Problem& in = p.in;
    const bool finishes = me.warp == 4, makes_factors = me.warp == 5; /* they have no pairs */
    const uint32_t neighbour_tile = me.smem + C::STAGE0 + C::H;
    const auto copy_group = [&](uint32_t tile, const void* data, gt_stride stride, int64_t first, int tokens) {
        load_tile<C::N, 32 * C::WARPS>(tile, static_cast<const uint16_t*>(data) + at(stride, me.b, first, me.g), stride.t,
                                       tokens, in.N);
    };
    copy_group(me.smem + C::B, in.Bm, in.Bm_at, me.first, me.tokens);
    copy_group(me.smem + C::C, in.Cm, in.Cm_at, me.first, me.tokens);
    if (me.makes_state())
        copy_group(neighbour_tile, me.second ? in.Bm : in.Cm, me.second ? in.Bm_at : in.Cm_at, me.neighbour(),
                   me.neighbour_tokens);
    cp_async_commit();
    cp_async_wait<0>();
    sync_threads();
    const auto convert_group = [&](uint32_t tile, int inverses) {
        if (in.dtype == GT_BF16)
            rows_to_f16<bf16, C::N>(tile, me.cell(inverses), me.warp, C::WARPS);
        else
            rows_to_f16<f16, C::N>(tile, me.cell(inverses), me.warp, C::WARPS);
    };
    convert_group(me.smem + C::B, C::B_INVERSE);
    convert_group(me.smem + C::C, C::C_INVERSE);
    if (me.makes_state()) convert_group(neighbour_tile, C::NEXT_INVERSE);
    StepTimes dt;
    if (makes_factors) {
        load_times(p, me, 0, dt);
        prepare_step(p, me, 0, dt);
        if (C::COPIES > 1) own_factors(p, me, 0, dt);
    }
    sync_threads();
    Pairs16 S, W = {};
    Neighbour<C> neighbour = {};
    ProductSums<C> sums = {};
    make_S(me, S);
    if (me.makes_state()) read_neighbour(me, neighbour_tile, neighbour);
    sync_threads();
    copy_step(p, me, 0);
    GT_NO_UNROLL
    for (int step = 0; step < me.steps; step++) {
        const bool follows = step + 1 < me.steps;
        cp_async_wait<0>();
        convert_step(in.dtype, me, step);
        sync_threads(); /* 1 */
        if (C::STAGES > 1 && follows) copy_step(p, me, step + 1);
        if (C::COPIES == 1) {
            if (finishes && step > 0) finish_step(p, me, step - 1);
            if (makes_factors) own_factors(p, me, step, dt);
        }
        if (makes_factors && follows) load_times(p, me, step + 1, dt);
        if (me.makes_state()) make_state(me, step, neighbour);
        sync_threads(); /* 2 */
        if (makes_factors && follows) {
            prepare_step(p, me, step + 1, dt);
            if (C::COPIES > 1) own_factors(p, me, step + 1, dt);
        }
        if (C::COPIES > 1 && finishes && step > 0) finish_step(p, me, step - 1);
        make_pairs(me, step, S, W);
        add_states(me, step, sums);
        sync_threads(); /* 3 */
        finish_inputs(p, me, step);
        if (C::STAGES > 1) continue;
        sync_threads();
        if (follows) copy_step(p, me, step + 1);
    }
    sync_threads(); /* the stages are free */
    if (finishes) finish_step(p, me, me.steps - 1);
    finish_groups(p, me, W, sums);
}

template <int N, int STAGES>
GT_KERNEL(256, 1) chunk_gradient_kernel(const GT_GRID_CONSTANT ChunkGradientParams p) {
    using C = ChunkGradientTraits<N, STAGES>;
    wait_for_chain();
    const ChunkGradientBlock<C> me = find_chunk<C>(p);
    if (me.tokens <= 0) {
        if (me.g == 0) clear_sums(p, me.row(p.slots));
        return;
    }
    gradients_of(p, me);
}

} /* namespace ssd */
} /* namespace gt */

#endif
