/* gt/ssd/sm90/fp32_forward.cuh - ssd forward on compute capability 9.0, with fp32 activations, by wgmma.  It computes
 * the same as forward_fp32_kernel (mma/fp32_forward.cuh).  It takes N from 17 to 128 and groups of at least two units;
 * a unit is 64 rows of a head's state (mma/state.cuh).  N up to 64 runs as 64 columns, and larger N as 128.
 *
 * A block has two units of one group and takes a segment of a sequence chunk by chunk, 64 tokens each.
 *
 * WARPGROUPS
 *     producer     Warpgroup 2.  It copies x of the next chunk by cp.async.  It loads B and C into registers, splits
 *                  them into hi and lo once for both units, and stores hi and lo to panels for wgmma.  Warps 0 and 1
 *                  each compute the decay factors and the update's weights of one unit.  Warps 2 and 3 each compute the
 *                  powers of two of the rows of x of one unit.
 *     consumers    Warpgroups 0 and 1, with one unit each.  The unit's state stays in registers in the layout of
 *                  accumulators, 16 rows per warp:
 *
 *         1  S = C B^T                        64 x 64 x N, from shared memory; the checkpoint is stored meanwhile.
 *            M_ts = S_ts L_ts Delta_s         split, with a power of two per row, to shared memory; zero above the
 *                                             diagonal.  Dskip is added on the diagonal if it is per head.
 *         2  y^T = pre H C^T                  64 x 64 x N; H split in registers.
 *         3  y^T += x^T M^T                   64 x 64 x 64; x split in registers.
 *            Then + Dskip x if Dskip is per channel, times silu(z).  Threads store y from registers: 8 rows p of a
 *            token are 32 adjacent bytes.
 *         4  H <- E H + (x Delta suf)^T B     64 x N x 64; the sum starts at zero, and an fp32 addition adds it to H.
 *
 * NUMBERS.  As in mma/fp32_chunk.cuh, a number is hi + lo of f16, and a product is three products, the small ones
 * first.
 * SHARED MEMORY in KB, N = 128: 211 in all, so one block per multiprocessor.  The last column names the warpgroups that
 * write the buffer.
 *
 *     X                64     two stages of two units, fp32 (fp32_pair_at)          producer
 *     B                64     two stages, hi and lo                                 producer.
 *     C                32     one stage, which is free after phase 2                producer
 *     M                32     of each unit, hi and lo                               consumers.
 *     FACTORS ...      19     two stages of each unit: Factors, Prepared; inverses of rows' powers; cursors, barriers
 * MBARRIERS.  FULL and EMPTY belong to a stage of everything except C and M.  The producer's threads arrive at FULL
 * after they have also stored C.  The consumers' threads arrive at EMPTY.  C_EMPTY belongs to C; the consumers' threads
 * arrive.
 * REGISTERS per thread, N = 128: a consumer has 208, of which H takes 64, y 32, sums 32, and operands 32.  The producer
 * has 88, of which B or C takes 64.
 * ISSUE SLOTS per token and head, N = 128, counted in the machine code: consumers 140, producer 45.
 * PRODUCTS, clocks of the tensor cores per unit and chunk at full rate, N = 128: S 768, y 768 + 384, H 768.
 * BYTES per token and head: x, y (and z) 4 P each.  B and C together 8 N / heads of a group from memory, and 4 N from
 * L2.  Checkpoints P N / 32.
 * grid: strands*G*bundles (a bundle has two units); block 384.  Every sum has one fixed order, so results are
 * deterministic. */
#ifndef GT_SSD_SM90_FP32_FORWARD_CUH
#define GT_SSD_SM90_FP32_FORWARD_CUH

#include "../mma/fp32_chunk.cuh"
#include "block.cuh"

namespace gt {
namespace ssd {

/* ---- shared memory ----------------------------------------------------------------------------------------------- */

/* More inputs of the consumers for a chunk and unit, as offsets in floats: Weights, and the powers of the rows of x. */
struct SplitPrepared {
    static constexpr int WEIGHTS = 0, X_POWER = Weights::COUNT, X_INVERSE = X_POWER + CHUNK, COUNT = X_INVERSE + CHUNK;
};

/* Offsets in shared memory, in bytes.  Comments give the shapes of arrays. */
template <int NP_>
struct SplitHopperTile {
    static constexpr int NP = NP_, UNITS = 2, CONSUMERS = UNITS, THREADS = (CONSUMERS + 1) * WARPGROUP;
    static constexpr int REGISTERS = 208, PRODUCER_REGISTERS = 504 - 2 * REGISTERS;
    static constexpr int PANELS = NP / 64, PANEL = CHUNK * 128, LO = PANELS * PANEL; /* hi of all columns, then lo */
    static constexpr int TILE_X = CHUNK * 256, TILE_B = 2 * LO, TILE_M = 2 * PANEL;
    static constexpr int X = 0;                                                       /* [2 stages][UNITS] */
    static constexpr int B = X + 2 * UNITS * TILE_X;                                  /* [2 stages] */
    static constexpr int C = B + 2 * TILE_B;                                          /* one stage */
    static constexpr int M = C + TILE_B;                                              /* [UNITS] */
    static constexpr int FACTORS = M + UNITS * TILE_M;                                /* [2][UNITS] */
    static constexpr int PREPARED = FACTORS + 2 * UNITS * 4 * Factors::COUNT;         /* [2][UNITS] */
    static constexpr int B_INVERSE = PREPARED + 2 * UNITS * 4 * SplitPrepared::COUNT; /* [2] */
    static constexpr int C_INVERSE = B_INVERSE + 2 * 4 * CHUNK;                       /* [2] */
    static constexpr int M_INVERSE = C_INVERSE + 2 * 4 * CHUNK;                       /* [UNITS] */
    static constexpr int CURSOR = M_INVERSE + UNITS * 4 * CHUNK;                      /* one per warpgroup */
    static constexpr int FULL = CURSOR + (CONSUMERS + 1) * GroupCursor<UNITS>::BYTES, EMPTY = FULL + 16; /* [2] */
    static constexpr int C_EMPTY = EMPTY + 16, BYTES = C_EMPTY + 8;
    using Chunks = Ring<2, FULL, EMPTY>;       /* stages of all buffers but C and M */
    using OneC = Ring<1, NO_BARRIER, C_EMPTY>; /* C; FULL of Chunks also covers it */
    static_assert(PREPARED % 16 == 0 && B_INVERSE % 16 == 0 && FULL % 8 == 0, "aligned");
    static_assert(BYTES <= 227 * 1024, "fits sm_90");
};

/* ---- producer ---------------------------------------------------------------------------------------------------- */

/* Starts to copy a chunk of a unit's x.  from: the thread's piece in its first row.  rows, columns: how many exist; the
 * others become zeros. */
GT_DEV void copy_split_x(uint32_t tile, const float* from, int64_t pitch, int rows, int columns) {
    const int row = own_thread() % WARPGROUP / 16, piece = own_thread() % 16;
    const uint32_t to = tile + fp32_pair_at(row, 4 * piece);
    const int left = 4 * piece < columns ? rows - row : 0;
    GT_UNROLL
    for (int k = 0; k < CHUNK; k += 8) {
        cp_async<16>(to + 256 * k, from, left > k ? 16 : 0);
        from += 8 * pitch;
    }
}

/* One warp computes the powers of two of the rows of a unit's x. */
GT_DEV void make_x_powers(uint32_t tile, uint32_t prepared) {
    const int lane = own_lane(), row = lane / 8, piece = lane % 8;
    const uint32_t from = tile + fp32_pair_at(row, 4 * piece);
    GT_NO_UNROLL
    for (int row0 = 0; row0 < CHUNK; row0 += 16) {
        float4 x[4][2];
        GT_UNROLL
        for (int i = 0; i < 8; i++) /* 4 rows further, the swizzle swaps the halves of 128 bytes */
            x[i / 2][i % 2] = lds<float4>((from ^ 64 * (i / 2 % 2)) + 256 * (row0 + 4 * (i / 2)) + 128 * (i % 2));
        GT_UNROLL
        for (int i = 0; i < 4; i++) {
            float most = 0.0f;
            GT_UNROLL
            for (const float4& v : x[i])
                most = fmaxf(most, fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
            GT_UNROLL
            for (int mask = 1; mask < 8; mask *= 2) most = fmaxf(most, shfl_xor(most, mask));
            const Power power = split_power(most);
            if (piece == 0) {
                const uint32_t to = prepared + 4 * (row0 + 4 * i + row);
                sts<float>(to + 4 * SplitPrepared::X_POWER, power.value);
                sts<float>(to + 4 * SplitPrepared::X_INVERSE, power.inverse);
            }
        }
    }
}

/* A producer thread's part of a chunk of B or C, in registers: 4 rows, 16 apart.  In each row the thread has 8 adjacent
 * columns of every 64 columns. */
template <class Tile>
struct GroupRows {
    static constexpr int ROWS = CHUNK / 16;
    float4 x[ROWS][2 * Tile::PANELS];

    GT_METHOD static int row() { return own_thread() % WARPGROUP / 8; }
    GT_METHOD static int column() { return own_thread() % 8 * 8; }
    /* from: the element at row() and column() of the chunk.  rows, columns: how many exist; the others become zeros. */
    GT_METHOD void load(const float* from, int64_t pitch, int rows, int columns) {
        GT_UNROLL
        for (int k = 0; k < ROWS; k++) {
            GT_UNROLL
            for (int i = 0; i < Tile::PANELS; i++) {
                const bool exists = 16 * k < rows - row() && 64 * i < columns - column();
                x[k][2 * i] = exists ? ldg<float4>(from + 64 * i) : float4{0.0f, 0.0f, 0.0f, 0.0f};
                x[k][2 * i + 1] = exists ? ldg<float4>(from + 64 * i + 4) : float4{0.0f, 0.0f, 0.0f, 0.0f};
            }
            from += 16 * pitch;
        }
    }
    /* Splits the rows and stores them to a tile.  inverses[row] becomes the inverse of the row's power. */
    GT_METHOD void split(uint32_t tile, uint32_t inverses) const {
        const uint32_t to = tile + panel_at<128>(row(), column() / 8);
        GT_UNROLL
        for (int k = 0; k < ROWS; k++) {
            float most = 0.0f;
            GT_UNROLL
            for (const float4& v : x[k])
                most = fmaxf(most, fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
            GT_UNROLL
            for (int mask = 1; mask < 8; mask *= 2) most = fmaxf(most, shfl_xor(most, mask));
            const Power power = split_power(most);
            GT_UNROLL
            for (int i = 0; i < Tile::PANELS; i++) {
                const float4 v = x[k][2 * i], w = x[k][2 * i + 1];
                uint4 hi, lo;
                split_pair(v.x * power.value, v.y * power.value, hi.x, lo.x);
                split_pair(v.z * power.value, v.w * power.value, hi.y, lo.y);
                split_pair(w.x * power.value, w.y * power.value, hi.z, lo.z);
                split_pair(w.z * power.value, w.w * power.value, hi.w, lo.w);
                sts<uint4>(to + 16 * 128 * k + Tile::PANEL * i, hi);
                sts<uint4>(to + 16 * 128 * k + Tile::PANEL * i + Tile::LO, lo);
            }
            if (own_thread() % 8 == 0) sts<float>(inverses + 4 * (row() + 16 * k), power.inverse);
        }
    }
};

template <class Tile>
GT_DEV void forward_split_producer(const TensorParams& p, uint32_t smem) {
    constexpr int BARRIER = 1, UNITS = Tile::UNITS;
    const Problem& in = p.in;
    const GroupCursor<UNITS> cursor = {smem + Tile::CURSOR + Tile::CONSUMERS * GroupCursor<UNITS>::BYTES};
    using Rows = GroupRows<Tile>;
    const int warp = warp_id() % 4, unit = warp % UNITS;
    const bool makes_factors = warp < UNITS;
    const typename Tile::Chunks ring = {smem};
    int n = 0; /* counts chunks over all segments */
    each_bundle_item(in, [&](const Span& span, int64_t item) {
        if (!span.exists) return item;
        cursor.enter(in, span, item, BARRIER, [&] { cursor.put_offsets(0, in.x_stride); });
        const int chunks = cursor.chunks();
        const int64_t b = cursor.b(), token = cursor.token(0);
        int64_t x = own_thread() % WARPGROUP / 16 * in.x_stride.t + 4 * (own_thread() % 16);
        const float* B = static_cast<const float*>(in.Bm) + offset_of(in.Bm_stride, b, token, cursor.group()) +
                         Rows::row() * in.Bm_stride.t + Rows::column();
        const float* C = static_cast<const float*>(in.Cm) + offset_of(in.Cm_stride, b, token, cursor.group()) +
                         Rows::row() * in.Cm_stride.t + Rows::column();
        int64_t times = offset_of(in.dt_stride, b, token, cursor.head(unit));
        UnitTimes of_unit = {};
        if (makes_factors) of_unit.enter(in, cursor.head(unit));
        const auto load_times = [&](int chunk) {
            if (makes_factors && chunk < chunks) of_unit.load(in, times, cursor.tokens(chunk));
            times += CHUNK * in.dt_stride.t;
        };
        load_times(0);
        GT_NO_UNROLL
        for (int chunk = 0; chunk < chunks; chunk++, n++) {
            const int stage = n % 2, tokens = cursor.tokens(chunk);
            const uint32_t addresses = smem + Tile::FACTORS + 4 * Factors::COUNT * (stage * UNITS + unit);
            const uint32_t prepared = smem + Tile::PREPARED + 4 * SplitPrepared::COUNT * (stage * UNITS + unit);
            const uint32_t x_tiles = smem + Tile::X + stage * UNITS * Tile::TILE_X;
            const uint32_t B_inverse = smem + Tile::B_INVERSE + stage * 4 * CHUNK;
            ring.wait_free(n);
            GT_NO_UNROLL
            for (int i = 0; i < UNITS; i++)
                copy_split_x(x_tiles + i * Tile::TILE_X, static_cast<const float*>(in.x) + (cursor.offset(0, i) + x),
                             in.x_stride.t, tokens, (int)in.P - cursor.row0(i));
            x += CHUNK * in.x_stride.t;
            cp_async_commit();
            GT_NO_UNROLL
            for (int i = 0; i < 2; i++) { /* B, then C */
                if (i) {
                    if (makes_factors) {
                        const float delta[2] = {of_unit.delta(in, 0, tokens), of_unit.delta(in, 1, tokens)};
                        make_factors<SUM_FACTORS | DIAGONAL_FACTORS | CHUNK_FACTORS | SHORT_CODE>(addresses, delta,
                                                                                                  of_unit.A);
                        load_times(chunk + 1);
                    } else {
                        make_x_powers(x_tiles + unit * Tile::TILE_X, prepared);
                    }
                }
                Rows rows;
                rows.load(i ? C : B, i ? in.Cm_stride.t : in.Bm_stride.t, tokens, in.columns);
                if (i) typename Tile::OneC{smem}.wait_free(n);
                rows.split(smem + (i ? Tile::C : Tile::B + stage * Tile::TILE_B),
                           i ? smem + Tile::C_INVERSE + stage * 4 * CHUNK : B_inverse);
                cp_async_wait<0>();
                bar_sync(BARRIER, WARPGROUP);
            }
            B += CHUNK * in.Bm_stride.t, C += CHUNK * in.Cm_stride.t;
            if (makes_factors) {
                const int t = 2 * own_lane();
                const auto two = [&](uint32_t from, int at) { return lds<float2>(from + 4 * (at + t)); };
                const float2 delta = two(addresses, Factors::DELTA), suf = two(addresses, Factors::SUF);
                make_split_weights(prepared + 4 * SplitPrepared::WEIGHTS, {delta.x * suf.x, delta.y * suf.y},
                                   two(prepared, SplitPrepared::X_INVERSE), two(B_inverse, 0));
            }
            fence_async_proxy();
            ring.fill(n);
        }
        return cursor.item();
    });
}

/* ---- consumers --------------------------------------------------------------------------------------------------- */

template <class Tile>
struct SplitConsumer : BundleConsumer<Tile> {
    using BundleConsumer<Tile>::smem;
    GT_METHOD int unit() const { return this->warpgroup(); }
    GT_METHOD uint32_t stage(int n) const { return (unsigned)made_here(n) % 2; }
    GT_METHOD uint32_t x(int n) const { return smem + Tile::X + (stage(n) * Tile::UNITS + unit()) * Tile::TILE_X; }
    GT_METHOD uint32_t B(int n) const { return smem + Tile::B + stage(n) * Tile::TILE_B; }
    GT_METHOD uint32_t C() const { return smem + Tile::C; }
    GT_METHOD uint32_t M() const { return smem + Tile::M + unit() * Tile::TILE_M; }
    GT_METHOD uint32_t addresses(int n) const {
        return smem + Tile::FACTORS + 4 * Factors::COUNT * (stage(n) * Tile::UNITS + unit());
    }
    GT_METHOD uint32_t prepared(int n) const {
        return smem + Tile::PREPARED + 4 * SplitPrepared::COUNT * (stage(n) * Tile::UNITS + unit());
    }
    GT_METHOD uint32_t B_inverse(int n) const { return smem + Tile::B_INVERSE + stage(n) * 4 * CHUNK; }
    GT_METHOD uint32_t C_inverse(int n) const { return smem + Tile::C_INVERSE + stage(n) * 4 * CHUNK; }
    GT_METHOD uint32_t M_inverse() const { return smem + Tile::M_INVERSE + unit() * 4 * CHUNK; }
};

/* Computes M of a unit from S, and stores the warp's 16 rows t, block by block up to the diagonal.  A lane has rows 16
 * unit_warp + g and 8 rows later.  skip: Dskip if it is per head, else 0. */
template <class Tile>
GT_DEV void store_split_M(const SplitConsumer<Tile>& me, int n, float skip, float (&S)[8][4]) {
    const int lane = own_lane(), g = lane / 4, j = lane % 4, unit_warp = me.unit_warp(), t = BLOCK * unit_warp + g;
    const uint32_t addresses = me.addresses(n), x_inverse = me.prepared(n) + 4 * SplitPrepared::X_INVERSE;
    const auto value = [&](int at) { return lds<float>(addresses + 4 * at); };
    const auto two = [&](uint32_t from, int at) { return lds<float2>(from + 4 * at); };
    const float c[2] = {lds<float>(me.C_inverse(n) + 4 * t), lds<float>(me.C_inverse(n) + 4 * (t + 8))};
    float most[2] = {0.0f, 0.0f};
    {
        const float from[2] = {c[0] * value(Factors::U + t), c[1] * value(Factors::U + t + 8)};
        GT_UNROLL
        for (int sb = 0; sb < BLOCKS - 1; sb++) {
            if (sb >= unit_warp) break;
            const float between = value(between_index(unit_warp, sb));
            GT_UNROLL
            for (int half = 0; half < 2; half++) {
                const int s = BLOCK * sb + 8 * half + 2 * j;
                const float2 V = two(addresses, Factors::V + s), delta = two(addresses, Factors::DELTA + s),
                             x = two(x_inverse, s), b = two(me.B_inverse(n), s);
                const float right[2] = {delta.x * x.x * clamped(V.x * between), delta.y * x.y * clamped(V.y * between)};
                GT_UNROLL
                for (int e = 0; e < 4; e++) {
                    float& to = S[2 * sb + half][e];
                    to = clamped(to * (e % 2 ? b.y : b.x) * from[e / 2] * right[e % 2]);
                    most[e / 2] = fmaxf(most[e / 2], fabsf(to));
                }
            }
        }
    }
    float own[2][4]; /* the block on the diagonal */
    GT_UNROLL
    for (int i = 0; i < 8; i++) {
        own[i / 4][i % 4] = S[i / 4][i % 4];
        GT_UNROLL
        for (int sb = 1; sb < BLOCKS; sb++)
            if (sb == unit_warp) own[i / 4][i % 4] = S[2 * sb + i / 4][i % 4];
    }
    GT_UNROLL
    for (int half = 0; half < 2; half++) {
        const int s = BLOCK * unit_warp + 8 * half + 2 * j;
        const float2 near = two(addresses, Factors::DIAGONAL + 8 * (t + 8 * half) + 2 * j);
        const float2 delta = two(addresses, Factors::DELTA + s), x = two(x_inverse, s), b = two(me.B_inverse(n), s);
        const float right[2] = {delta.x * x.x, delta.y * x.y};
        GT_UNROLL
        for (int e = 0; e < 2; e++) { /* t and s lie in the same half of the block */
            float& to = own[half][2 * half + e];
            const int column = 2 * j + e;
            to = column > g ? 0.0f : clamped(to * (e ? b.y : b.x) * c[half] * (right[e] * (e ? near.y : near.x)));
            if (column == g) to = clamped(fma_rn(skip, e ? x.y : x.x, to));
            most[half] = fmaxf(most[half], fabsf(to));
        }
        if (half) continue;
        const float2 corner = two(addresses, Factors::HALF + s);
        const float from = c[1] * value(Factors::HALF + t + 8);
        GT_UNROLL
        for (int e = 0; e < 2; e++) {
            float& to = own[0][2 + e];
            to = clamped(to * (e ? b.y : b.x) * from * (right[e] * (e ? corner.y : corner.x)));
            most[1] = fmaxf(most[1], fabsf(to));
            own[1][e] = 0.0f;
        }
    }
    Power power[2];
    GT_UNROLL
    for (int e = 0; e < 2; e++) {
        GT_UNROLL
        for (int mask = 1; mask < 4; mask *= 2) most[e] = fmaxf(most[e], shfl_xor(most[e], mask));
        power[e] = split_power(most[e]);
        if (j == 0) sts<float>(me.M_inverse() + 4 * (t + 8 * e), power[e].inverse);
    }
    const uint32_t to = by_rows<64>(me.M(), own_lane());
    GT_UNROLL
    for (int sb = 0; sb < BLOCKS; sb++) {
        if (sb > unit_warp) break;
        uint32_t hi[4], lo[4]; /* columns + 0 of rows + 0 and rows + 8; then columns + 8 of both */
        GT_UNROLL
        for (int e = 0; e < 4; e++) {
            float v[2];
            GT_UNROLL
            for (int i = 0; i < 2; i++) {
                v[i] = S[2 * sb + e / 2][e % 2 * 2 + i];
                if (sb == unit_warp) v[i] = own[e / 2][e % 2 * 2 + i];
            }
            split_pair(v[0] * power[e % 2].value, v[1] * power[e % 2].value, hi[e], lo[e]);
        }
        stmatrix_x4(block_at<64>(to, unit_warp, sb), hi);
        stmatrix_x4(block_at<64>(to, unit_warp, sb) + Tile::PANEL, lo);
    }
}

/* Fills the warp's rows of M with zeros above the diagonal.  store_split_M() does not write there, so these zeros
 * stay. */
template <class Tile>
GT_DEV void clear_split_M(const SplitConsumer<Tile>& me) {
    const int unit_warp = me.unit_warp();
    const uint32_t to = by_rows<64>(me.M(), own_lane());
    const uint32_t zeros[4] = {0, 0, 0, 0};
    for (int sb = unit_warp + 1; sb < BLOCKS; sb++) {
        stmatrix_x4(block_at<64>(to, unit_warp, sb), zeros);
        stmatrix_x4(block_at<64>(to, unit_warp, sb) + Tile::PANEL, zeros);
    }
}

/* x_operand() returns the lane's address in a tile of x.  x_pair() loads pair e of block k of the left operand x^T: row
 * p = 16 unit_warp + g + 8 (e % 2), token 16 k + 2 j + 8 (e / 2) and the next token. */
GT_DEV uint32_t x_operand(uint32_t tile, int unit_warp) {
    const int lane = own_lane();
    return tile + fp32_pair_at(2 * (lane % 4), 16 * unit_warp + lane / 4);
}
GT_DEV float2 x_pair(uint32_t address, int k, int e) {
    const uint32_t at = (address ^ 32 * (e % 2)) + 256 * (16 * k + 8 * (e / 2));
    return {lds<float>(at), lds<float>(at + 256)};
}

/* Splits x^T in registers, with a power of two per token.  With WEIGHTED, x^T is also multiplied by the weights of the
 * update. */
template <bool WEIGHTED>
GT_DEV void split_x(uint32_t address, uint32_t prepared, uint32_t (&hi)[BLOCKS][4], uint32_t (&lo)[BLOCKS][4]) {
    const uint32_t tokens = prepared + 8 * (own_lane() % 4);
    GT_UNROLL
    for (int i = 0; i < 2 * BLOCKS; i++) {
        const float2 power = lds<float2>(tokens + 4 * (SplitPrepared::X_POWER + 8 * i));
        float2 weight = {1.0f, 1.0f};
        if constexpr (WEIGHTED)
            weight = lds<float2>(tokens + 4 * (SplitPrepared::WEIGHTS + Weights::OF_TOKENS + 8 * i));
        GT_UNROLL
        for (int e = i % 2 * 2; e < i % 2 * 2 + 2; e++) {
            float2 x = x_pair(address, i / 2, e);
            x.x *= power.x, x.y *= power.y;
            if constexpr (WEIGHTED) x.x *= weight.x, x.y *= weight.y;
            split_pair(x.x, x.y, hi[i / 2][e], lo[i / 2][e]);
        }
    }
}

/* Starts c += left right, or c = left right if `accumulates` is false.  left is in registers; k has 16 COUNT elements.
 * panel: bytes from panel to panel of right.  right_lo: bytes from hi to lo of right. */
template <Major MAJOR, int COUNT, int TILES>
GT_DEV void multiply_left(float (&c)[TILES][4], const uint32_t (&hi)[COUNT][4], const uint32_t (&lo)[COUNT][4],
                          uint64_t right, uint32_t panel, uint32_t right_lo, bool accumulates) {
    GT_UNROLL
    for (int i = 0; i < 3 * COUNT; i++) {
        const int term = i / COUNT, k = i % COUNT;
        wgmma<f16, MAJOR>(c, term == 0 ? lo[k] : hi[k],
                          operand_step(right, k_bytes<128, MAJOR>(16 * k, panel) + (term == 1 ? right_lo : 0)),
                          accumulates || i > 0);
    }
}

/* Adds Dskip x if Dskip is per channel, applies the gate, and stores y. */
template <class Tile>
GT_DEV void store_hopper_y(const TensorParams& p, const SplitConsumer<Tile>& me, int n, int chunk, float (&y)[8][4]) {
    const Problem& in = p.in;
    const GroupCursor<Tile::UNITS> cursor = me.cursor();
    const int unit = me.unit(), lane = own_lane(), g = lane / 4, j = lane % 4;
    if (!cursor.exists(unit)) return;
    const int row0 = cursor.row0(unit) + 16 * me.unit_warp() + g;
    const int tokens = cursor.tokens(chunk) - 2 * j, rows = (int)in.P - row0;
    const bool whole = cursor.tokens(chunk) == CHUNK && in.P - cursor.row0(unit) >= TILE_P;
    const auto each_of = [&](const float* from, int64_t pitch, auto work) {
        if (whole) { /* the common case, without conditions */
            GT_UNROLL
            for (int i = 0; i < 16; i++) {
                work(y[i / 2][i % 2], from);
                work(y[i / 2][2 + i % 2], from + 8);
                from += i % 2 ? 7 * pitch : pitch;
            }
            return;
        }
        GT_UNROLL
        for (int i = 0; i < 16; i++) {
            GT_UNROLL
            for (int half = 0; half < 2; half++)
                if (8 * (i / 2) + i % 2 < tokens && 8 * half < rows) work(y[i / 2][2 * half + i % 2], from + 8 * half);
            from += i % 2 ? 7 * pitch : pitch;
        }
    };
    const auto each = [&](const void* data, const gt_stride& stride, auto work) {
        each_of(static_cast<const float*>(data) +
                    offset_of(stride, cursor.b(), cursor.token(chunk), cursor.head(unit)) + 2 * j * stride.t + row0,
                stride.t, work);
    };
    if (in.Dskip && in.skip_per_channel) {
        const float* from = in.Dskip + (int64_t)cursor.head(unit) * in.P + row0;
        const float skip[2] = {rows > 0 ? from[0] : 0.0f, rows > 8 ? from[8] : 0.0f};
        const uint32_t address = x_operand(me.x(n), me.unit_warp());
        GT_UNROLL
        for (int i = 0; i < 16; i++) {
            const int k = i / 4, e = i % 4;
            const float2 x = x_pair(address, k, e);
            float* to = &y[2 * k + e / 2][e % 2 * 2];
            to[0] = fma_rn(skip[e % 2], x.x, to[0]);
            to[1] = fma_rn(skip[e % 2], x.y, to[1]);
        }
    }
    if (in.z)
        each(in.z, in.z_stride, [&](float& to, const float* address) {
            const float z = ldg<float>(address);
            to *= p.makes_dz ? dsilu(z) : silu(z);
        });
    if (p.makes_dz) each(in.dy, in.dy_stride, [&](float& to, const float* address) { to *= ldg<float>(address); });
    const int64_t first = ((int64_t)chunk * CHUNK + 2 * j) * p.y_stride.t + 16 * me.unit_warp() + g;
    each_of(static_cast<const float*>(p.y) + (cursor.offset(0, unit) + first), p.y_stride.t,
            [&](float& to, const float* address) { stg<float>(const_cast<float*>(address), to); });
}

/* Computes y of a chunk and the state after it.  M must have been stored before.  y: may share its
 * registers with S, which is no longer needed. */
template <class Tile>
GT_DEV void forward_split_unit(const TensorParams& p, const SplitConsumer<Tile>& me, int n, int chunk, float (&y)[8][4],
                               SplitState<Tile::NP>& state) {
    constexpr int NP = Tile::NP, STEPS = NP / 16, PANEL = Tile::PANEL;
    const int j = own_lane() % 4;
    uint32_t hi[BLOCKS][4], lo[BLOCKS][4]; /* hi, lo: left operands */
    {
        const Power power = state.power();
        const uint64_t C = wgmma_tile<128, Major::K>(me.C(), PANEL);
        GT_UNROLL
        for (int k0 = 0; k0 < STEPS; k0 += 4) { /* a panel at a time */
            GT_UNROLL
            for (int i = 0; i < 16; i++) {
                const int k = i / 4, e = i % 4;
                const float* from = &state.H[2 * (k0 + k) + e / 2][e % 2 * 2];
                split_pair(from[0] * power.value, from[1] * power.value, hi[k][e], lo[k][e]);
            }
            wgmma_fence();
            multiply_left<Major::K>(y, hi, lo, operand_step(C, k_bytes<128, Major::K>(16 * k0, PANEL)), PANEL, Tile::LO,
                                    k0 > 0);
            wgmma_commit();
            wgmma_wait<0>();
        }
        wgmma_pin(y);
        typename Tile::OneC{me.smem}.free(n);
        float sums[8][4];
        split_x<false>(x_operand(me.x(n), me.unit_warp()), me.prepared(n), hi, lo);
        wgmma_fence();
        multiply_left<Major::K>(sums, hi, lo, wgmma_tile<128, Major::K>(me.M(), PANEL), PANEL, PANEL, false);
        wgmma_commit();
        GT_UNROLL
        for (int i = 0; i < 8; i++) { /* overlaps with the products */
            const float2 pre = lds<float2>(me.addresses(n) + 4 * (Factors::PRE + 8 * i + 2 * j));
            const float2 c = lds<float2>(me.C_inverse(n) + 4 * (8 * i + 2 * j));
            const float factor[2] = {pre.x * c.x, pre.y * c.y};
            GT_UNROLL
            for (int e = 0; e < 4; e++) y[i][e] = clamped(y[i][e] * power.inverse * factor[e % 2]);
        }
        wgmma_wait<0>();
        wgmma_pin(sums);
        GT_UNROLL
        for (int i = 0; i < 8; i++) {
            const float2 inverse = lds<float2>(me.M_inverse() + 4 * (8 * i + 2 * j));
            GT_UNROLL
            for (int e = 0; e < 4; e++) y[i][e] = fma_rn(sums[i][e], e % 2 ? inverse.y : inverse.x, y[i][e]);
        }
    }
    store_hopper_y(p, me, n, chunk, y);
    split_x<true>(x_operand(me.x(n), me.unit_warp()), me.prepared(n), hi, lo);
    const float undo =
        lds<float>(me.prepared(n) + 4 * (SplitPrepared::WEIGHTS + Weights::INVERSE)) * (1.0f / WEIGHT_POWER);
    const uint64_t B = wgmma_tile<128, Major::MN>(me.B(n), PANEL);
    GT_UNROLL
    for (int n0 = 0; n0 < NP / 8; n0 += 8) {
        wgmma_fence();
        multiply_left<Major::MN>(y, hi, lo, operand_step(B, mn_bytes<128, Major::MN>(8 * n0, PANEL)), PANEL, Tile::LO,
                                 false);
        wgmma_commit();
        if (n0 == 0) state.decay(split_decay(me.addresses(n)));
        wgmma_wait<0>();
        wgmma_pin(y);
        GT_UNROLL
        for (int i = 0; i < 32; i++) {
            float& to = state.H[n0 + i / 4][i % 4];
            to = fma_rn(y[i / 4][i % 4], undo, to);
        }
    }
}

template <class Tile>
GT_DEV void forward_split_consumer(const TensorParams& p, uint32_t smem) {
    constexpr int NP = Tile::NP, PANEL = Tile::PANEL;
    const Problem& in = p.in;
    const SplitConsumer<Tile> me = {smem};
    const typename Tile::Chunks ring = {smem};
    clear_split_M(me);
    int n = 0; /* counts chunks over all segments */
    each_bundle_item(in, [&](const Span& span, int64_t item) {
        SplitState<NP> state;
        if (!span.exists) return item;
        me.cursor().enter(in, span, item, 2 + me.unit(), [&] {
            me.cursor().put_offsets(0, p.y_stride);
            for (int i = 0; i < Tile::UNITS; i++) /* keeps Dskip if it is per head */
                me.cursor().put_number(i, in.Dskip && !in.skip_per_channel ? in.Dskip[me.cursor().head(i)] : 0.0f);
        });
        const float* start = first_state(in, span, p.state_in, p.state_in_shared ? 0 : span.sequence);
        state.load(start ? start + me.cursor().state(in, me.unit(), 0) : nullptr,
                   me.cursor().row0(me.unit()) + 16 * me.unit_warp(), in);
        const int chunks = me.cursor().chunks();
        /* Stores the state to a row of fp32 states, unless `to` is NULL. */
        const auto store = [&](float* to) {
            if (to && me.cursor().exists(me.unit()))
                state.store(to + me.cursor().state(in, me.unit(), 0), me.cursor().row0(me.unit()) + 16 * me.unit_warp(),
                            in);
        };
        float S[8][4] = {}; /* S, y and the sums of the update use the same registers in turn */
        GT_NO_UNROLL
        for (int chunk = 0; chunk < chunks; chunk++, n++) {
            if (p.snapshots.data && chunk > 0 && chunk % SLOT_CHUNKS == 0)
                store(snapshot_row(in, p.snapshots, ordered_span(in, me.cursor().item()), chunk * CHUNK));
            ring.wait_full(n);
            const uint64_t left = wgmma_tile<128, Major::K>(me.C(), PANEL),
                           right = wgmma_tile<128, Major::K>(me.B(n), PANEL);
            wgmma_fence();
            GT_UNROLL
            for (int i = 0; i < 3 * (NP / 16); i++) {
                const int term = i / (NP / 16);
                const uint32_t bytes = k_bytes<128, Major::K>(16 * (i % (NP / 16)), PANEL);
                wgmma<f16>(S, operand_step(left, bytes + (term == 0 ? Tile::LO : 0)),
                           operand_step(right, bytes + (term == 1 ? Tile::LO : 0)), i > 0);
            }
            wgmma_commit();
            if (p.checkpoints.plain && chunk % SLOT_CHUNKS == 0 && me.cursor().exists(me.unit()))
                state.store(p.checkpoints.plain + me.cursor().slot(me.unit(), chunk) * in.P * in.N,
                            me.cursor().row0(me.unit()) + 16 * me.unit_warp(), in);
            wgmma_wait<0>();
            wgmma_pin(S);
            store_split_M(me, n, me.cursor().number(me.unit()), S);
            fence_async_proxy();
            me.wait();
            forward_split_unit(p, me, n, chunk, S, state);
            ring.free(n);
            me.wait(); /* all warps have read M */
        }
        item = me.cursor().item();
        const Span same = ordered_span(in, item); /* computed again, because no registers are left to keep it */
        if (p.snapshots.data) store(snapshot_row(in, p.snapshots, same, INT32_MAX));
        store(same.ends ? last_state(in, p.state_out, same.sequence) : nullptr);
        return item;
    });
}

/* For other architectures the kernel has no code and launch bounds of one warp.  Device::runs_sm90a finds out which
 * code the device runs. */
template <int NP>
GT_KERNEL(GT_SM90A ? (SplitHopperTile<NP>::THREADS) : 32, 1)
forward_fp32_hopper_kernel(const GT_GRID_CONSTANT TensorParams p) {
#if GT_SM90A
    using Tile = SplitHopperTile<NP>;
    const uint32_t smem = smem_base_of_tiles();
    typename Tile::Chunks{smem}.init(thread_id(), WARPGROUP, Tile::CONSUMERS * WARPGROUP);
    typename Tile::OneC{smem}.init(thread_id(), 0, Tile::CONSUMERS * WARPGROUP);
    sync_threads();
    run_chained_roles<Tile>([&] { return p.in.order != nullptr; }, [] { return false; },
                            [&] { forward_split_producer<Tile>(p, smem); },
                            [&] { forward_split_consumer<Tile>(p, smem); });
#else
    (void)p;
    __trap();
#endif
}

} /* namespace ssd */
} /* namespace gt */

#endif
