/* gt/ssd/mma/forward.cuh - ssd forward on tensor cores, for 16-bit activations.  choice.cuh has the conditions.
 *
 * A unit is 64 rows of a head's state (state.cuh).  A block has two units of one group, with 4 warps each.  It takes a
 * segment of a sequence chunk by chunk (chunk.cuh), 64 tokens each.  A chunk takes four phases:
 *     1  x, B, C have arrived and become f16 in place, with a power of two per row.  One warp of each unit computes the
 *        decay factors, except DIAGONAL.
 *     2  S = C B^T, once for both units: ten blocks of 16 x 16 on and under the diagonal, 1 or 2 for each warp.  Before
 *        that, one warp of each unit computes DIAGONAL, and another the factors of tokens for the products.  After a
 *        barrier, each warp stores M_ts = S_ts L_ts Delta_s of its blocks for each unit.  M is f16, with a power of two
 *        from a bound.
 *     3  y = pre_t (C_t H) + M x + Dskip x, times silu(z).  A warp computes 64 tokens by 16 rows, in 32 accumulators
 *        per thread.  H is the right operand of the first product: its accumulators are packed to f16 in registers.
 *     4  H <- E H + (x Delta suf)^T B.
 * Copies of the next chunk's x and B start at the beginning of phase 1.  C has only one stage, so its copy starts at
 * the end of phase 3.
 *
 * N > 128: every 128 columns of the state have a launch of their own.  Each launch but the last stores its partial sums
 * of y in fp32, and the next launch adds them to its own.
 * BACKWARD with z: the same kernel computes dz = dy y silu'(z) instead of y.  It also stores checkpoints if forward
 * stored none.
 *
 * REGISTERS per thread, N = 128: H 64 in all phases; S 8 or 16 in phase 2; y 32 in phase 3; v 16 and sums 16 in phase
 * 4.
 * SHARED MEMORY, N = 128: x 2 x 16 KB, B 2 x 16 KB, C 16 KB, M 10 KB (checkpoints pass through it), factors 9 KB.  In
 * all 99.0 KB, so two blocks share a multiprocessor.  On devices where only one block fits, the block may use all
 * registers.
 * WAVEFRONTS of shared memory (128 bytes each) per chunk and block, N = 128: copies 384, conversion 768, S 580, M 80 to
 * store and 320 to load, C 1024, B 1024, x 384.  In all 4564, or 2282 per unit.
 * PRODUCTS per warp and chunk: 168 m16n8k16.
 * BYTES per token and head: x, y (and z) 2 P each; dy 2 P more for dz.  B and C together 4 N / heads of a group from
 * memory, and 2 N from L2.  Checkpoints P N / 64.  Partial sums 4 P to write and 4 P to read, between two launches.
 * grid: strands*G*pairs of units; block 256.  Every sum has one fixed order, so results are deterministic. */
#ifndef GT_SSD_MMA_FORWARD_CUH
#define GT_SSD_MMA_FORWARD_CUH

#include "state.cuh"

namespace gt {
namespace ssd {

/* Offsets in shared memory, in bytes.  Comments give the shapes of arrays. */
template <class T_, int NP_>
struct ForwardTile {
    using T = T_;
    static constexpr int NP = NP_, TILE_X = TileShape<64>::BYTES, TILE_B = TileShape<NP>::BYTES;
    static constexpr int BLOCK_BYTES = 16 * 16 * 2, PAIR_BLOCKS = BLOCKS * (BLOCKS + 1) / 2;
    static constexpr int X = 0;                          /* [2 stages][MMA_UNITS] */
    static constexpr int B = X + 2 * MMA_UNITS * TILE_X; /* [2 stages] */
    static constexpr int C = B + 2 * TILE_B;
    static constexpr int M = C + TILE_B; /* [MMA_UNITS][PAIR_BLOCKS], one row of blocks after another */
    static constexpr int STAGING = MMA_UNITS * PAIR_BLOCKS * BLOCK_BYTES / WARPS; /* each warp's part of M, through
                                                                                   * which its checkpoints pass */
    static constexpr int FACTORS = M + WARPS * STAGING;                           /* [MMA_UNITS] */
    static constexpr int WEIGHTS = FACTORS + MMA_UNITS * 4 * Factors::COUNT;      /* [MMA_UNITS] */
    static constexpr int B_INVERSE = WEIGHTS + MMA_UNITS * 4 * Weights::COUNT;
    static constexpr int NEXT_DELTA = B_INVERSE; /* [MMA_UNITS]: Delta of the next chunk, which overwrites B's inverses
                                                  * after their last use */
    static constexpr int C_INVERSE = NEXT_DELTA + MMA_UNITS * 4 * CHUNK;
    static constexpr int X_INVERSE = C_INVERSE + 4 * CHUNK;          /* [MMA_UNITS] */
    static constexpr int BOUNDS = X_INVERSE + MMA_UNITS * 4 * CHUNK; /* [WARPS]: a bound of each warp's part of the
                                                                      * state */
    static constexpr int CURSOR = BOUNDS + 4 * WARPS;
    static constexpr int STREAMS = CURSOR + Cursor::BYTES;
    static constexpr int X_STREAM = 0, B_STREAM = MMA_UNITS, C_STREAM = B_STREAM + 1, Y_STREAM = C_STREAM + 1;
    static constexpr int BYTES = STREAMS + Streams::BYTES;
    static constexpr int MIN_BLOCKS = blocks_at_once(BYTES);
    static constexpr int AT_ONCE = NP == 128 ? 2 : 1; /* row blocks that a warp converts to f16 together */
    static_assert(STAGING >= WarpState<NP>::STAGING && STAGING % 128 == 0, "holds rows of a state");
    static_assert(BYTES <= 99 * 1024, "fits every device with tensor cores for bf16");
};

/* The offset in a unit's M of the block with tokens t of block tb and tokens s of block sb. */
GT_DEV uint32_t pair_block(int tb, int sb) { return 512u * (uint32_t)(tb * (tb + 1) / 2 + sb); }

/* Prefetches a unit's rows of z or dy to L2, because store_y() waits for them later.  A lane fetches half of a 128-byte
 * row. */
template <class T>
GT_DEV void fetch_rows(const Problem& in, const void* data, const gt_stride& stride, const Cursor& cursor, int chunk,
                       int unit, int unit_warp) {
    const int t = 16 * unit_warp + here() % 16, row = cursor.row0(unit) + here() / 16 * (TILE_P / 2);
    const T* from =
        static_cast<const T*>(data) + offset_of(stride, cursor.b(), cursor.token(chunk) + t, cursor.head(unit)) + row;
    if (t < cursor.tokens(chunk) && row < in.P) prefetch(from);
}

/* One warp computes a unit's factors of tokens for the products.  A lane has tokens 2 lane and 2 lane + 1.  The results
 * are the weights of the update, the power of two of M, and factors that overwrite their own inputs:
 *     DELTA  Delta with the inverses of B and x: right factors of M      V    V times DELTA
 *     SUF    C's inverse with M's power: left factors of M               U    U times SUF
 *     PRE    PRE with C's inverse                                        x's inverses  times Dskip of a head
 * The power of M follows from bounds of Delta_s B_s x_s, of C_t and of the growth.  y is summed with the same power.
 * The part of y that comes from the state may be much larger than the part from M.  It must not overflow, so the power
 * also follows from the bound of the state. */
template <class Tile>
GT_DEV void make_unit_factors(uint32_t smem, int unit, float skip) {
    const int t = 2 * here();
    const uint32_t addresses = smem + Tile::FACTORS + 4 * Factors::COUNT * unit,
                   weights = smem + Tile::WEIGHTS + 4 * Weights::COUNT * unit,
                   inverses = smem + Tile::X_INVERSE + 4 * (CHUNK * unit + t);
    const auto two = [&](int at) { return lds<float2>(addresses + 4 * (at + t)); };
    const auto put = [&](int at, float x, float y) { sts<float2>(addresses + 4 * (at + t), {x, y}); };
    const float2 weight =
        update_weight(addresses, smem + Tile::X_INVERSE + 4 * CHUNK * unit, smem + Tile::B_INVERSE, false);
    make_weights(weights, weight, update_bounds(weight));
    const float2 b = lds<float2>(smem + Tile::B_INVERSE + 4 * t), c = lds<float2>(smem + Tile::C_INVERSE + 4 * t);
    const float2 x = lds<float2>(inverses), delta = two(Factors::DELTA);
    const float2 right = {delta.x * b.x * x.x, delta.y * b.y * x.y};
    float most = fmaxf(fabsf(right.x), fabsf(right.y)), most_left = fmaxf(c.x, c.y);
    GT_UNROLL
    for (int mask = 1; mask < 32; mask *= 2) {
        most = fmaxf(most, shfl_xor(most, mask));
        most_left = fmaxf(most_left, shfl_xor(most_left, mask));
    }
    const float4 states = lds<float4>(smem + Tile::BOUNDS + 4 * UNIT_WARPS * unit);
    most = fmaxf(most * 0x1p14f, fmaxf(fmaxf(states.x, states.y), fmaxf(states.z, states.w)) * 0x1p-106f);
    const float growth = lds<float>(addresses + 4 * Factors::GROWTH),
                power = power_of(finite(most_left * most * growth * (0x1p14f * Tile::NP))).value;
    const float2 left = {c.x * power, c.y * power}, U = two(Factors::U), V = two(Factors::V), pre = two(Factors::PRE);
    put(Factors::DELTA, right.x, right.y);
    put(Factors::V, right.x * V.x, right.y * V.y);
    put(Factors::SUF, left.x, left.y);
    put(Factors::U, left.x * U.x, left.y * U.y);
    put(Factors::PRE, pre.x * c.x, pre.y * c.y);
    sts<float2>(inverses, {x.x * skip, x.y * skip});
    if (t == 0) sts<float>(weights + 4 * Weights::PAIRS, power);
}

/* Computes M of a unit's block (tb, sb) from S and stores it.  A lane has t = 16 tb + g and t + 8, and s = 16 sb + 2 j,
 * s + 1, s + 8 and s + 9. */
template <class Tile>
GT_DEV void store_pairs(uint32_t smem, int unit, int tb, int sb, const float (&S)[2][4]) {
    const int lane = here(), g = lane / 4, j = lane % 4, t = BLOCK * tb + g, s = BLOCK * sb + 2 * j;
    const uint32_t addresses = smem + Tile::FACTORS + 4 * Factors::COUNT * unit, of_t = addresses + 4 * t,
                   of_s = addresses + 4 * s;
    float M[2][4];
    if (tb == sb) {
        const uint32_t diagonal = addresses + 4 * (Factors::DIAGONAL + 8 * t + 2 * j);
        const float left[2] = {lds<float>(of_t + 4 * Factors::SUF), lds<float>(of_t + 4 * (Factors::SUF + 8))};
        const float2 right[2] = {lds<float2>(of_s + 4 * Factors::DELTA), lds<float2>(of_s + 4 * (Factors::DELTA + 8))};
        const float2 corner = lds<float2>(of_s + 4 * Factors::HALF), upper = lds<float2>(diagonal),
                     lower = lds<float2>(diagonal + 4 * 8 * 8);
        const float below = left[1] * lds<float>(of_t + 4 * (Factors::HALF + 8));
        M[0][0] = S[0][0] * left[0] * (right[0].x * upper.x);
        M[0][1] = S[0][1] * left[0] * (right[0].y * upper.y);
        M[0][2] = S[0][2] * below * (right[0].x * corner.x);
        M[0][3] = S[0][3] * below * (right[0].y * corner.y);
        M[1][0] = M[1][1] = 0.0f;
        M[1][2] = S[1][2] * left[1] * (right[1].x * lower.x);
        M[1][3] = S[1][3] * left[1] * (right[1].y * lower.y);
    } else {
        const float between = lds<float>(addresses + 4 * between_index(tb, sb));
        const float left[2] = {lds<float>(of_t + 4 * Factors::U) * between,
                               lds<float>(of_t + 4 * (Factors::U + 8)) * between};
        GT_UNROLL
        for (int n = 0; n < 2; n++) {
            const float2 right = lds<float2>(of_s + 4 * (Factors::V + 8 * n));
            GT_UNROLL
            for (int e = 0; e < 4; e++) M[n][e] = S[n][e] * left[e / 2] * (e % 2 ? right.y : right.x);
        }
    }
    const uint32_t to = smem + Tile::M + unit * Tile::PAIR_BLOCKS * Tile::BLOCK_BYTES + pair_block(tb, sb) + 4 * j;
    GT_UNROLL
    for (int i = 0; i < 4; i++)
        sts<uint32_t>(to + panel_at<32>(g + 8 * (i / 2), i % 2),
                      pack_f16(M[i % 2][2 * (i / 2)], M[i % 2][2 * (i / 2) + 1]));
}

/* Computes COUNT blocks of S, from block (tb, sb) on.  After a barrier, when the factors of all units exist, computes M
 * of these blocks for each unit. */
template <class Tile, int COUNT>
GT_DEV void make_pairs(uint32_t smem, uint32_t B, int units, int tb, int sb) {
    float S[COUNT][2][4] = {};
    const uint32_t left = by_rows<Tile::NP>(smem + Tile::C), right = by_columns<Tile::NP>(B);
    GT_UNROLL
    for (int k = 0; k < Tile::NP / 16; k++) {
        uint32_t c[4], b[4];
        ldmatrix_x4(c, block_at<Tile::NP>(left, tb, k));
        GT_UNROLL
        for (int i = 0; i < COUNT; i++) {
            ldmatrix_x4(b, block_at<Tile::NP>(right, sb + i, k));
            mma_f16(S[i][0], c, b[0], b[1]);
            mma_f16(S[i][1], c, b[2], b[3]);
        }
    }
    bar_sync(1, THREADS);
    GT_NO_UNROLL
    for (int unit = 0; unit < units; unit++) {
        GT_UNROLL
        for (int i = 0; i < COUNT; i++) store_pairs<Tile>(smem, unit, tb, sb + i, S[i]);
    }
}

/* Computes the products of y.  y[tb][n] has tokens 16 tb + g and 8 tokens later, in rows p = 16 unit_warp + 8 n + 2 j
 * and p + 1 of the unit. */
template <class Tile>
GT_DEV void make_y(uint32_t smem, uint32_t x, int unit, int unit_warp, const WarpState<Tile::NP>& state,
                   float (&y)[BLOCKS][2][4]) {
    const int g = here() / 4;
    GT_UNROLL
    for (int i = 0; i < 8 * BLOCKS; i++) y[i / 8][i / 4 % 2][i % 4] = 0.0f;
    const uint32_t C = by_rows<Tile::NP>(smem + Tile::C);
    GT_UNROLL
    for (int k = 0; k < Tile::NP / 16; k++) {
        uint32_t H[2][2];
        GT_UNROLL
        for (int i = 0; i < 4; i++) {
            const float(&from)[4] = state.H[2 * k + i % 2];
            H[i / 2][i % 2] = pack_f16(from[i / 2 * 2], from[i / 2 * 2 + 1]);
        }
        GT_UNROLL
        for (int tb = 0; tb < BLOCKS; tb++) {
            uint32_t c[4];
            ldmatrix_x4(c, block_at<Tile::NP>(C, tb, k));
            GT_UNROLL
            for (int n = 0; n < 2; n++) mma_f16(y[tb][n], c, H[n][0], H[n][1]);
        }
    }
    const uint32_t pre = smem + Tile::FACTORS + 4 * (Factors::COUNT * unit + Factors::PRE) + 4 * g;
    const float power =
        state.power.inverse * lds<float>(smem + Tile::WEIGHTS + 4 * (Weights::COUNT * unit + Weights::PAIRS));
    GT_UNROLL
    for (int i = 0; i < 2 * BLOCKS; i++) {
        const float factor = finite(lds<float>(pre + 32 * i) * power);
        GT_UNROLL
        for (int n = 0; n < 2; n++) {
            y[i / 2][n][i % 2 * 2] *= factor;
            y[i / 2][n][i % 2 * 2 + 1] *= factor;
        }
    }
    const uint32_t M = by_rows<16>(smem + Tile::M + unit * Tile::PAIR_BLOCKS * Tile::BLOCK_BYTES),
                   rows = by_rows<64>(x);
    GT_UNROLL
    for (int sb = 0; sb < BLOCKS; sb++) {
        uint32_t right[4], m[4];
        ldmatrix_x4_trans(right, block_at<64>(rows, sb, unit_warp));
        GT_UNROLL
        for (int tb = sb; tb < BLOCKS; tb++) {
            ldmatrix_x4(m, M + pair_block(tb, sb));
            GT_UNROLL
            for (int n = 0; n < 2; n++) mma_f16(y[tb][n], m, right[2 * n], right[2 * n + 1]);
        }
    }
}

/* Finishes y and stores it.  A lane has pairs of adjacent columns.  It exchanges pairs with its neighbour lane to get
 * four adjacent columns, so that the lanes of a token write 32 adjacent bytes. */
template <class Tile>
GT_DEV void store_y(const TensorParams& p, uint32_t smem, uint32_t x, const Cursor& cursor, const Streams& streams,
                    int chunk, int unit, int unit_warp, float (&y)[BLOCKS][2][4]) {
    using T = typename Tile::T;
    using E = Element<T>;
    constexpr int PAIRS = 4 * BLOCKS;
    const Problem& in = p.in;
    const int lane = here(), g = lane / 4, j = lane % 4;
    const auto pair = [&](int i) {
        return &y[i / 4][i % 2][i / 2 % 2 * 2];
    }; /* pair i: token 8 (i / 2) + g, columns from 8 (i % 2) + 2 j on */
    const float undo = inverse_of(lds<float>(smem + Tile::WEIGHTS + 4 * (Weights::COUNT * unit + Weights::PAIRS)));
    GT_UNROLL
    for (int i = 0; i < 2 * PAIRS; i++) pair(i / 2)[i % 2] *= undo;
    const int tokens = cursor.tokens(chunk) - g;
    const auto exists = [&](int i, int row0) { return 8 * (i / 2) < tokens && row0 + 8 * (i % 2) < in.P; };
    if (p.share) {
        const int h = cursor.head(unit), row0 = cursor.row0(unit) + 16 * unit_warp;
        const int64_t token = cursor.b() * in.sequences.T + cursor.token(chunk) + g;
        float* share = p.share + (token * in.H + h) * in.P + row0 + 2 * j;
        GT_UNROLL
        for (int i = 0; i < PAIRS; i++) {
            float *to = pair(i), *address = share + 8 * (i % 2);
            if (exists(i, row0) && p.has_share) {
                const float2 before = ldg<float2>(address);
                to[0] += before.x;
                to[1] += before.y;
            }
            if (exists(i, row0) && p.leaves_share) stg<float2>(address, {to[0], to[1]});
            if (i % 2) share += 8 * in.H * in.P;
        }
        if (p.leaves_share) return;
    }
    if (in.Dskip) {
        float2 skip[2] = {{1.0f, 1.0f}, {1.0f, 1.0f}}; /* if Dskip is per head, it is already a factor of the inverses
                                                        * of x */
        if (in.skip_per_channel) {
            GT_UNROLL
            for (int n = 0; n < 2; n++) {
                const int row = cursor.row0(unit) + 16 * unit_warp + 8 * n + 2 * j;
                const float* of_row = in.Dskip + (int64_t)cursor.head(unit) * in.P + row;
                if (row < in.P) skip[n] = {of_row[0], of_row[1]};
            }
        }
        const uint32_t rows = by_rows<64>(x), inverses = smem + Tile::X_INVERSE + 4 * (CHUNK * unit + g);
        GT_UNROLL
        for (int i = 0; i < BLOCKS; i++) {
            uint32_t plain[4];
            ldmatrix_x4(plain, block_at<64>(rows, i, unit_warp));
            const float inverse[2] = {lds<float>(inverses + 64 * i), lds<float>(inverses + 64 * i + 32)};
            GT_UNROLL
            for (int e = 0; e < 4; e++) { /* n = e / 2; an odd e is 8 tokens later */
                float* to = &y[i][e / 2][e % 2 * 2];
                float x[2] = {unpack_f16_lo(plain[e]), unpack_f16_hi(plain[e])};
                if (in.skip_per_channel) x[0] *= skip[e / 2].x, x[1] *= skip[e / 2].y;
                to[0] = fma_rn(x[0], inverse[e % 2], to[0]);
                to[1] = fma_rn(x[1], inverse[e % 2], to[1]);
            }
        }
    }
    const auto multiply = [&](const void* data, const gt_stride& stride, auto factor) {
        const int row0 = cursor.row0(unit) + 16 * unit_warp;
        const T* from = static_cast<const T*>(data) + row0 + 2 * j +
                        offset_of(stride, cursor.b(), cursor.token(chunk) + g, cursor.head(unit));
        GT_UNROLL
        for (int i = 0; i < PAIRS; i += 4) {
            uint32_t values[4];
            GT_UNROLL
            for (int k = 0; k < 4; k++) {
                values[k] = exists(i + k, row0) ? ldg<uint32_t>(from + 8 * (k % 2)) : 0;
                if (k % 2) from += 8 * stride.t;
            }
            GT_UNROLL
            for (int k = 0; k < 4; k++) {
                pair(i + k)[0] *= factor(E::lo(values[k]));
                pair(i + k)[1] *= factor(E::hi(values[k]));
            }
        }
    };
    if (in.z && p.makes_dz) {
        multiply(in.z, in.z_stride, [](float z) { return dsilu(z); });
        multiply(in.dy, in.dy_stride, [](float dy) { return dy; });
    } else if (in.z) {
        multiply(in.z, in.z_stride, [](float z) { return silu(z); });
    }
    const bool odd = j % 2; /* an odd lane gets four columns from 8 + 4 (j / 2) on, an even lane from 4 (j / 2) on */
    const int column = 16 * unit_warp + (odd ? 8 : 0) + j / 2 * 4;
    T* to = streams.at<T>(Tile::Y_STREAM + unit) + g * p.y_stride.t + column;
    const int rows = cursor.row0(unit) + column < in.P ? tokens : 0;
    GT_UNROLL
    for (int i = 0; i < 2 * BLOCKS; i++) {
        const uint32_t first = E::pack(y[i / 2][0][i % 2 * 2], y[i / 2][0][i % 2 * 2 + 1]);
        const uint32_t second = E::pack(y[i / 2][1][i % 2 * 2], y[i / 2][1][i % 2 * 2 + 1]);
        const uint32_t other = shfl_xor(odd ? first : second, 1);
        const uint32_t low = odd ? other : first, high = odd ? second : other;
        /* one 8-byte number, because the compiler could split two numbers into two stores */
        if (8 * i < rows) stg<uint64_t>(global_pointer<T>(to), (uint64_t)high << 32 | low);
        to += 8 * p.y_stride.t;
    }
}

/* Sets the streams of x and B to chunk 1, of C to chunk 0, and of y to the chunk before the first.  In each chunk all
 * streams advance at the same point: after the next x and B are copied, and before C is copied and y is stored. */
template <class Tile>
GT_DEV void begin_streams(const TensorParams& p, const Cursor& cursor, const Streams& streams) {
    using T = typename Tile::T;
    const Problem& in = p.in;
    for (int unit = 0; unit < MMA_UNITS; unit++) { /* the stream of a missing unit is not used */
        const int h = cursor.head(unit), row0 = cursor.row0(unit);
        streams.begin<T>(Tile::X_STREAM + unit, in.x, offset_of(in.x_stride, cursor.b(), cursor.token(1), h) + row0);
        streams.begin<T>(Tile::Y_STREAM + unit, p.y, offset_of(p.y_stride, cursor.b(), cursor.token(-1), h) + row0);
    }
    streams.begin<T>(Tile::B_STREAM, in.Bm, offset_of(in.Bm_stride, cursor.b(), cursor.token(1), cursor.group()));
    streams.begin<T>(Tile::C_STREAM, in.Cm, offset_of(in.Cm_stride, cursor.b(), cursor.token(0), cursor.group()));
    streams.set_whole(whole_chunks<Tile::NP>(in, cursor));
}

template <class Tile>
GT_DEV void move_streams(const TensorParams& p, const Streams& streams) {
    using T = typename Tile::T;
    GT_UNROLL
    for (int unit = 0; unit < MMA_UNITS; unit++) {
        streams.move<T>(Tile::X_STREAM + unit, CHUNK * p.in.x_stride.t);
        streams.move<T>(Tile::Y_STREAM + unit, CHUNK * p.y_stride.t);
    }
    streams.move<T>(Tile::B_STREAM, CHUNK * p.in.Bm_stride.t);
    streams.move<T>(Tile::C_STREAM, CHUNK * p.in.Cm_stride.t);
}

/* Runs one segment, chunk by chunk: phases 1 to 4.  Returns `item` from shared memory, so that no register keeps it
 * during the pass. */
template <class Tile>
GT_DEV int64_t forward_pass(const TensorParams& p, int64_t item) {
    using T = typename Tile::T;
    constexpr int NP = Tile::NP;
    const Problem& in = p.in;
    const uint32_t smem = smem_base();
    const Cursor cursor = {smem + Tile::CURSOR};
    const Streams streams = {smem + Tile::STREAMS};
    const int warp = uniform_warp();
    const int unit = warp / UNIT_WARPS, unit_warp = warp % UNIT_WARPS;
    const uint32_t addresses = smem + Tile::FACTORS + 4 * Factors::COUNT * unit,
                   next_delta = smem + Tile::NEXT_DELTA + 4 * CHUNK * unit,
                   weights = smem + Tile::WEIGHTS + 4 * Weights::COUNT * unit;
    WarpState<NP> state;
    {
        const Span span = span_at(in.sequences, in.segments.count, CHECKPOINT, item);
        if (!span.exists) return item;
        cursor.enter(in, span, item);
        if (thread_id() == 0) begin_streams<Tile>(p, cursor, streams);
        const float* start = first_state(in, span, p.state_in, p.state_in_shared ? 0 : span.sequence);
        const bool reads = start && unit < cursor.units();
        state.load(reads ? start + unit_state(in, cursor, unit, 0) : nullptr, cursor.row0(unit) + 16 * unit_warp, in);
    }
    const int chunks = cursor.chunks();
    if (chunks > 0) {
        load_units<T>(in, in.x, in.x_stride, smem + Tile::X, cursor, 0);
        load_group<T, NP>(in, in.Bm, in.Bm_stride, smem + Tile::B, cursor, 0);
        load_group<T, NP>(in, in.Cm, in.Cm_stride, smem + Tile::C, cursor, 0);
    }
    cp_async_commit();
    if (unit_warp == 0 && unit < cursor.units() && chunks > 0) {
        uint32_t bits[2];
        float delta[2];
        load_dt(in, cursor, unit, 0, bits);
        deltas_of(in, cursor, unit, 0, bits, delta);
        sts<float2>(next_delta + 8 * here(), {delta[0], delta[1]});
    }
    GT_NO_UNROLL
    for (int chunk = 0; chunk < chunks; chunk++) {
        const uint32_t x = smem + Tile::X + (chunk % 2 * MMA_UNITS + unit) * Tile::TILE_X;
        const uint32_t B = smem + Tile::B + chunk % 2 * Tile::TILE_B, staging = smem + Tile::M + warp * Tile::STAGING;
        const bool active = unit < cursor.units();
        const bool makes_next = active && unit_warp == 1 && chunk + 1 < chunks; /* this warp makes Delta of the next
                                                                                 * chunk */
        uint32_t next[2] = {0, 0};
        float delta[2] = {0.0f, 0.0f}, A = 0.0f;
        if (active && unit_warp == 0) {
            const float2 kept = lds<float2>(next_delta + 8 * here());
            delta[0] = kept.x, delta[1] = kept.y;
            A = in.A[cursor.head(unit)];
        }
        if (active && p.checkpoints.values && chunk % SLOT_CHUNKS == 0) {
            state.keep(p.checkpoints, unit_slot(in, cursor, unit, chunk), staging, cursor.row0(unit) + 16 * unit_warp,
                       in);
        }
        if (lane_id() == 0) sts<float>(smem + Tile::BOUNDS + 4 * warp, state.bound);
        cp_async_wait<0>();
        sync_threads();
        if (chunk + 1 < chunks) { /* copies go to the stage that the previous chunk has freed */
            const uint32_t next_x = smem + Tile::X + (chunk + 1) % 2 * MMA_UNITS * Tile::TILE_X,
                           next_B = smem + Tile::B + (chunk + 1) % 2 * Tile::TILE_B;
            if (chunk + 1 < streams.whole()) {
                load_whole_units<T>(streams, Tile::X_STREAM, in.x_stride.t, next_x, cursor.units());
                load_whole_tile<NP, THREADS>(next_B, streams.at<T>(Tile::B_STREAM), in.Bm_stride.t);
            } else {
                load_units<T>(in, in.x, in.x_stride, next_x, cursor, chunk + 1);
                load_group<T, NP>(in, in.Bm, in.Bm_stride, next_B, cursor, chunk + 1);
            }
            if (makes_next) load_dt(in, cursor, unit, chunk + 1, next);
        }
        cp_async_commit();
        if (active && in.z) {
            fetch_rows<T>(in, in.z, in.z_stride, cursor, chunk, unit, unit_warp);
            if (p.makes_dz) fetch_rows<T>(in, in.dy, in.dy_stride, cursor, chunk, unit, unit_warp);
        }
        if (unit_warp >= 2) {
            rows_to_f16<T, NP, Tile::AT_ONCE>(B, smem + Tile::B_INVERSE, 2 * unit + unit_warp - 2, 2 * MMA_UNITS);
            rows_to_f16<T, NP, Tile::AT_ONCE>(smem + Tile::C, smem + Tile::C_INVERSE, 2 * unit + unit_warp - 2,
                                              2 * MMA_UNITS);
        } else if (active) {
            if (unit_warp == 0)
                make_factors<SUM_FACTORS | CHUNK_FACTORS>(addresses, delta, A);
            else
                rows_to_f16<T, 64, 2>(x, smem + Tile::X_INVERSE + 4 * CHUNK * unit, 0, 1);
        }
        sync_threads();
        if (active && unit_warp == 3) {
            const bool of_head = in.Dskip && !in.skip_per_channel;
            make_unit_factors<Tile>(smem, unit, of_head ? in.Dskip[cursor.head(unit)] : 1.0f);
        }
        if (active && unit_warp == 0) make_factors<DIAGONAL_FACTORS>(addresses, delta, A);
        if (makes_next) deltas_of(in, cursor, unit, chunk + 1, next, delta);
        if (warp == 1 && lane_id() == 0) move_streams<Tile>(p, streams);
        /* Warp 2 of each unit has no other work in this phase, so it takes two blocks of S.  Each other warp takes the
         * block (tb, sb) that its hexadecimal digit of the two constants gives; warp 0 has the lowest digit. */
        if (unit_warp == 2)
            make_pairs<Tile, 2>(smem, B, cursor.units(), 2 * unit + 1, 2 * unit);
        else
            make_pairs<Tile, 1>(smem, B, cursor.units(), 0x20223030 >> 4 * warp & 3, 0x20101000 >> 4 * warp & 3);
        sync_threads();                                                             /* M is stored */
        if (makes_next) sts<float2>(next_delta + 8 * here(), {delta[0], delta[1]}); /* overwrites B_INVERSE */
        if (active) {
            float y[BLOCKS][2][4];
            make_y<Tile>(smem, x, unit, unit_warp, state, y);
            store_y<Tile>(p, smem, x, cursor, streams, chunk, unit, unit_warp, y);
        }
        sync_threads(); /* all warps have read C and M */
        if (chunk + 1 < streams.whole())
            load_whole_tile<NP, THREADS>(smem + Tile::C, streams.at<T>(Tile::C_STREAM), in.Cm_stride.t);
        else if (chunk + 1 < chunks)
            load_group<T, NP>(in, in.Cm, in.Cm_stride, smem + Tile::C, cursor, chunk + 1);
        cp_async_commit();
        if (!active) continue;
        state.template update<T>(x, 0, unit_warp, B, weights, chunk_decay(addresses));
        if (p.snapshots.data && chunk % SLOT_CHUNKS == SLOT_CHUNKS - 1)
            keep_snapshot(p, cursor, unit, unit_warp, (chunk + 1) * CHUNK, state);
    }
    const Span same = span_at(in.sequences, in.segments.count, CHECKPOINT, cursor.item()); /* computed again, which
                                                                                            * needs no registers during
                                                                                            * the pass */
    float* const end = same.ends ? last_state(in, p.state_out, same.sequence) : nullptr;
    if (unit < cursor.units() && end)
        state.store(end + unit_state(in, cursor, unit, 0), cursor.row0(unit) + 16 * unit_warp, in);
    return cursor.item();
}

template <class T, int NP>
GT_KERNEL(THREADS, (ForwardTile<T, NP>::MIN_BLOCKS))
forward_tensor_kernel(const GT_GRID_CONSTANT TensorParams p) {
#if GT_SM80_KERNELS
    wait_for_chain();
    for (int64_t item = unit_strand(p.in); item < items_of(p.in); item += unit_strands(p.in))
        item = forward_pass<ForwardTile<T, NP>>(p, item);
#else
    (void)p;
    __trap();
#endif
}

} /* namespace ssd */
} /* namespace gt */

#endif
