/* gt/ssd/mma/fp32_gradients_chunk.cuh - the tiles and tokens of chunk_gradient_fp32_kernel (fp32_gradients.cuh): layout
 * of shared memory, copies, splitting, decay factors, and da after a step. */
#ifndef GT_SSD_MMA_FP32_GRADIENTS_CHUNK_CUH
#define GT_SSD_MMA_FP32_GRADIENTS_CHUNK_CUH

#include "fp32_chunk.cuh"

namespace gt {
namespace ssd {

template <int NP_>
struct GradientSplitTile {
    static constexpr int NP = NP_, WIDE = SplitTile<NP>::WIDE, LO = SplitTile<NP>::LO;
    static constexpr int TILES = NP < 64 ? 1 : NP / 64, ACTIVE = NP / 8 / TILES; /* ACTIVE warps have TILES tiles of 8
                                                                                  * columns each */
    static constexpr int TILE = SplitTile<NP>::BYTES, ROWS = SplitTile<ROWS_P>::BYTES, BLOCK16 = SplitTile<16>::BYTES;
    static constexpr int B = 0, G = B + TILE;
    static constexpr int X = G + TILE, CHUNKS = X + ROWS; /* CHUNKS: [4], x of earlier chunks, dy of the own chunk and
                                                           * of later chunks */
    static constexpr int M = CHUNKS + 4 * ROWS;           /* [8]: M of 16 tokens t each */
    static constexpr int FLOATS = M + 8 * BLOCK16;
    /* offsets in floats from FLOATS on */
    static constexpr int FACTORS = 0, PRE = FACTORS + Factors::COUNT, SUF = PRE + SHORT; /* PRE, SUF: pre and suf in the
                                                                                          * slot */
    static constexpr int WEIGHT = SUF + SHORT;                                           /* Delta SUF */
    static constexpr int OTHER = WEIGHT + SHORT;                       /* [4 chunks]: factors of L, see
                                                                        * slot_factors() */
    static constexpr int INVERSES = OTHER + 4 * SHORT;                 /* inverse powers of X and of CHUNKS [4] */
    static constexpr int B_INVERSE = INVERSES + 5 * SHORT;             /* inverse powers of B */
    static constexpr int M_INVERSE = B_INVERSE + SHORT;                /* [8]: inverse powers of M */
    static constexpr int E = M_INVERSE + 8 * SHORT, F = E + 8 * SHORT; /* E: [8 warps]; F: [4], of 8 rows p each */
    static constexpr int GROUP_INVERSES = E;                           /* before the first and after the last step:
                                                                        * inverse powers of C, and of [3 other
                                                                        * chunks] */
    static constexpr int DIRECT = F + 4 * SHORT, GAMMA = DIRECT + 4 * SHORT;      /* DIRECT: [4], of 8 rows p each;
                                                                                   * GAMMA: [8 warps] */
    static constexpr int DIAGONAL = GAMMA + 8 * SHORT, CORNER = DIAGONAL + SHORT; /* CORNER: sums of 16 rows and of 16
                                                                                   * columns */
    static constexpr int DSKIP = CORNER + SHORT, KEPT = DSKIP + 2 * ROWS_P;       /* DSKIP: [2][rows p]; KEPT: sums of
                                                                                  * earlier steps, [da, direct,
                                                                                  * across] */
    static constexpr int Z = KEPT + 3 * SHORT, G_MOST = Z + 8, ALL = G_MOST + 8;  /* Z, G_MOST: [8 warps]; ALL: E of the
                                                                                  * slot */
    static constexpr int DSKIP_SUM = ALL + 1, POSITION = ALL + 4;                 /* POSITION: see SplitGradientBlock */
    static constexpr int DELTAS = POSITION + 20, TOTALS = DELTAS + SLOT_SHORTS * SHORT; /* Delta and sums of logs, of
                                                                                         * the next head */
    static constexpr int COUNT = TOTALS + SLOT_SHORTS;
    static constexpr int BYTES = FLOATS + 4 * COUNT;
    static_assert(TILE <= 8 * BLOCK16 && TILE <= 2 * ROWS, "tiles of a group fit there");
    static_assert(4 * SHORT * (SHORT + 1) + 2 * BLOCK16 <= 5 * ROWS, "W fits there, at the end");
    static_assert(FLOATS % 128 == 0, "tiles begin at multiples of 128");
    static_assert(BYTES <= 99 * 1024, "fits every device with tensor cores for fp32 activations");
};

/* A block's chunk.  Values that are read once per step lie in shared memory, because the registers are needed for
 * sums. */
template <class Tile>
struct SplitGradientBlock {
    uint32_t smem;
    int warp;        /* from shfl_idx(), so the compiler knows that all lanes have the same value */
    int me;          /* index of the block's chunk in the slot */
    int slot_tokens; /* 0: the slot has no tokens */

    GT_METHOD uint32_t address(int offset) const { return smem + Tile::FLOATS + 4 * offset; }
    GT_METHOD float value(int offset) const { return lds<float>(address(offset)); }
    template <class T>
    GT_METHOD T field(int offset) const {
        return lds<T>(address(Tile::POSITION) + offset);
    }
    GT_METHOD int64_t first() const { return field<int64_t>(0); } /* first token of the slot */
    GT_METHOD int b() const { return field<int>(8); }
    GT_METHOD int slot() const { return field<int>(12); }
    GT_METHOD int g() const { return field<int>(16); }
    /* Offsets in elements, for the group's first head: of the chunk's first rows in x, dy, dx and C, and of the slot in
     * h and G.  i: a SplitBase. */
    GT_METHOD int64_t base(int i) const { return field<int64_t>(24 + 8 * i); }
    GT_METHOD int64_t token(int chunk) const { return first() + SHORT * chunk; }
    GT_METHOD int tokens(int chunk) const {
        const int left = slot_tokens - SHORT * chunk;
        return left < 0 ? 0 : left < SHORT ? left : SHORT;
    }
    /* rows(): a step's tile for a chunk of the slot, see CHUNKS.  inverses(): the inverse powers of the tile's rows. */
    GT_METHOD uint32_t rows(int chunk) const { return smem + (Tile::CHUNKS + Tile::ROWS * chunk); }
    GT_METHOD int inverses(int chunk) const { return Tile::INVERSES + SHORT * (1 + chunk); }
};

/* Finds the block's chunk.  Blocks are numbered as [B,slots,G][chunks of a slot]. */
template <class Tile>
GT_DEV SplitGradientBlock<Tile> find_split_chunk(const SplitGradientParams& p) {
    const Problem& in = p.in;
    SplitGradientBlock<Tile> me;
    const int64_t index = block_x() / SLOT_SHORTS;
    me.smem = smem_base();
    me.warp = shfl_idx(warp_id(), 0);
    me.me = (int)(block_x() % SLOT_SHORTS);
    const int g = (int)(index % in.G), slot = (int)(index / in.G % p.slots), b = (int)(index / in.G / p.slots);
    const gt_chunk chunk = chunk_at(in.sequences, CHECKPOINT, slot);
    me.slot_tokens = chunk.sequence < 0 ? 0 : (int)(chunk.last - chunk.first);
    if (thread_id() == 0) {
        const int64_t h = g * (in.H / in.G), token = chunk.first + SHORT * me.me;
        const uint32_t to = me.address(Tile::POSITION);
        sts<int64_t>(to, chunk.first);
        sts<int>(to + 8, b);
        sts<int>(to + 12, slot);
        sts<int>(to + 16, g);
        const auto put = [&](int i, int64_t elements) { sts<int64_t>(to + 24 + 8 * i, elements); };
        put(BASE_X, offset_of(in.x_stride, b, token, h));
        put(BASE_DY, offset_of(in.dy_stride, b, token, h));
        put(BASE_DX, offset_of(p.dx_stride, b, token, h));
        put(BASE_STATE, ((b * in.H + h) * p.slots + slot) * in.P * in.N);
        put(BASE_C, offset_of(in.Cm_stride, b, token, g));
    }
    sync_threads();
    return me;
}

/* ---- a step: copies, splitting, factors -------------------------------------------------------------------------- */

/* Starts the copies of a step: 64 rows from p0 on, of head number `head` in the group. */
template <class Tile>
GT_DEV void copy_split_step(const SplitGradientParams& p, const SplitGradientBlock<Tile>& me, int head, int p0) {
    const Problem& in = p.in;
    constexpr int WIDE = 2 * ROWS_P, PIECES = ROWS_P / 4, STEP = THREADS / PIECES; /* rows that are copied at a time */
    const int row = (unsigned)thread_here() / PIECES, column = (unsigned)thread_here() % PIECES * 4;
    const uint32_t to = me.smem + Tile::X + panel_at<2 * WIDE>(row, column / 4);
    const float* const x =
        static_cast<const float*>(in.x) + (me.base(BASE_X) + row * in.x_stride.t + head * in.x_stride.h + p0 + column);
    const float* const dy = static_cast<const float*>(in.dy) +
                            (me.base(BASE_DY) + row * in.dy_stride.t + head * in.dy_stride.h + p0 + column);
    const int left = p0 + column < in.P ? me.slot_tokens - row : 0; /* the chunk has the row if left > SHORT chunk */
    GT_NO_UNROLL
    for (int i = 0; i < 5; i++) {
        const int chunk = i ? i - 1 : me.me;
        const bool is_dy = i && chunk >= me.me;
        const int64_t pitch = is_dy ? in.dy_stride.t : in.x_stride.t;
        const float* from = (is_dy ? dy : x) + SHORT * (chunk - me.me) * pitch;
        GT_UNROLL
        for (int k = 0; k < SHORT; k += STEP) /* rows STEP apart have the same swizzle */
            cp_async<16>(to + Tile::ROWS * i + k * TileShape<WIDE>::PITCH_BYTES, from + k * pitch,
                         left > SHORT * chunk + k ? 16 : 0);
    }
    cp_async_commit();
}

/* Splits the tiles of x and dy, 8 rows of a tile at a time. */
template <class Tile>
GT_DEV void split_step_rows(const SplitGradientParams& p, const SplitGradientBlock<Tile>& me, int h, int p0) {
    const Problem& in = p.in;
    const RowSplitter<ROWS_P> rows(0);
    /* The warps split 20 groups of rows: 2, 2, 2, 2, 3, 4, 4 and 1 group.  The first five warps also compute factors,
     * and the last warp finishes the previous step. */
    constexpr uint64_t FIRST =
        0 | 2 << 5 | 4 << 10 | 6 << 15 | 8 << 20 | 11 << 25 | 15ull << 30 | 19ull << 35 | 20ull << 40;
    const int end = (int)(FIRST >> (5 * me.warp + 5)) & 31;
    GT_NO_UNROLL
    for (int i = (int)(FIRST >> (5 * me.warp)) & 31; i < end; i++) {
        const int tile = i / 4, chunk = tile ? tile - 1 : me.me;
        const float* gates = nullptr;
        if (in.z && tile && chunk >= me.me)
            gates = static_cast<const float*>(in.z) + offset_of(in.z_stride, me.b(), me.token(chunk), h) + p0;
        rows.split(me.smem + Tile::X + Tile::ROWS * tile, me.address(Tile::INVERSES + SHORT * tile), i % 4 * 8, gates,
                   in.z_stride.t, me.tokens(chunk), in.P - p0);
    }
}

/* A warp's 4 rows of 32 rows of G, in registers before they are split. */
template <class Tile>
struct SplitRows {
    static constexpr int PIECES = Tile::NP / 4, COUNT = (4 * PIECES + 31) / 32;
    float4 x[COUNT];

    GT_METHOD static bool exists(int i) { return 4 * PIECES >= 32 || lane_id() + 32 * i < 4 * PIECES; }
    GT_METHOD static int row(int warp, int i) { return 4 * warp + (lane_id() + 32 * i) / PIECES; }
    GT_METHOD static int piece(int i) { return (lane_id() + 32 * i) % PIECES; }

    /* from: the first of the 32 rows, or NULL.  Stores the largest magnitude of the warp's rows at `most`. */
    GT_METHOD void load(const float* from, int rows, const Problem& in, int warp, uint32_t most) {
        float largest = 0.0f;
        GT_UNROLL
        for (int i = 0; i < COUNT; i++) {
            x[i] = {0.0f, 0.0f, 0.0f, 0.0f};
            if (from && exists(i) && row(warp, i) < rows && 4 * piece(i) < in.columns)
                x[i] = ldg<float4>(from + (int64_t)row(warp, i) * in.N + 4 * piece(i));
        }
        GT_UNROLL
        for (int i = 0; i < COUNT; i++)
            largest = fmaxf(largest, fmaxf(fmaxf(fabsf(x[i].x), fabsf(x[i].y)), fmaxf(fabsf(x[i].z), fabsf(x[i].w))));
        GT_UNROLL
        for (int mask = 1; mask < 32; mask *= 2) largest = fmaxf(largest, shfl_xor(largest, mask));
        if (lane_id() == 0) sts<float>(most, largest);
    }

    GT_METHOD void store(uint32_t tile, int warp, float power) const {
        GT_UNROLL
        for (int i = 0; i < COUNT; i++) {
            uint2 hi, lo;
            if (!exists(i)) continue;
            split_pair(x[i].x * power, x[i].y * power, hi.x, lo.x);
            split_pair(x[i].z * power, x[i].w * power, hi.y, lo.y);
            const uint32_t half = 8 * (piece(i) % 2);
            sts<uint2>(tile + panel_at<2 * Tile::WIDE>(row(warp, i), piece(i) / 2) + half, hi);
            sts<uint2>(tile + panel_at<2 * Tile::WIDE>(row(warp, i), piece(i) / 2 + Tile::NP / 8) + half, lo);
        }
    }
};

/* Loads 32 rows of a head's G from p0 on. */
template <class Tile>
GT_DEV void load_G(const SplitGradientParams& p, const SplitGradientBlock<Tile>& me, int head, int p0,
                   SplitRows<Tile>& G) {
    const float* from = p.G.plain;
    if (from) from += me.base(BASE_STATE) + head * p.state_step + (int64_t)p0 * p.in.N;
    G.load(from, p.in.P - p0, p.in, me.warp, me.address(Tile::G_MOST + me.warp));
}

/* The power of the rows of G that were last loaded. */
template <class Tile>
GT_DEV Power power_of_G(const SplitGradientBlock<Tile>& me) {
    const float4 a = lds<float4>(me.address(Tile::G_MOST)), b = lds<float4>(me.address(Tile::G_MOST + 4));
    return split_power(fmaxf(fmaxf(fmaxf(a.x, a.y), fmaxf(a.z, a.w)), fmaxf(fmaxf(b.x, b.y), fmaxf(b.z, b.w))));
}

/* Loads dt of a token of the slot.  Each of the first SLOT_SHORTS warps loads one chunk. */
template <class Tile>
GT_DEV float fetch_time(const Problem& in, const SplitGradientBlock<Tile>& me, int h) {
    const int t = SHORT * me.warp + lane_id();
    if (me.warp >= SLOT_SHORTS || t >= me.slot_tokens) return 0.0f;
    return load_as(in.dt, in.dt_dtype, offset_of(in.dt_stride, me.b(), me.first() + t, h));
}

/* Stores Delta of the same token, and the sum of log2 of the chunk's decays, for the next head. */
template <class Tile>
GT_DEV void keep_time(const Problem& in, const SplitGradientBlock<Tile>& me, int h, float dt) {
    const int t = SHORT * me.warp + lane_id();
    if (me.warp >= SLOT_SHORTS) return;
    const float bias = in.dt_bias ? in.dt_bias[h] : 0.0f;
    const float delta = t < me.slot_tokens ? delta_of(in.rule, dt + bias).value : 0.0f;
    const float total = warp_sum(delta * in.A[h] * LOG2_E);
    sts<float>(me.address(Tile::DELTAS + t), delta);
    if (lane_id() == 0) sts<float>(me.address(Tile::TOTALS + me.warp), total);
}

/* One warp computes the decay factors of the tokens of chunk `chunk`, by the chunk's position:
 *
 *     earlier than the block's   OTHER: Delta_s exp(from after s to the block's chunk); times PRE_t it is L_ts Delta_s
 *     later than the block's     OTHER: exp(from after the block's chunk through t); times SUF_s it is L_ts
 *     the block's own            PRE, SUF and ALL: pre, suf and E of the slot; WEIGHT: Delta suf */
template <class Tile>
GT_DEV void slot_factors(const SplitGradientBlock<Tile>& me, float A, int chunk) {
    const int lane = lane_id();
    const float4 totals = lds<float4>(me.address(Tile::TOTALS));
    const float total[SLOT_SHORTS] = {totals.x, totals.y, totals.z, totals.w};
    const float delta = me.value(Tile::DELTAS + SHORT * chunk + lane), log = delta * A * LOG2_E;
    float upto = log, from = log, before = 0.0f, between = 0.0f, after = 0.0f;
    GT_UNROLL
    for (int d = 1; d < 32; d *= 2) {
        const float left = shfl_up(upto, d), right = shfl_down(from, d);
        upto += lane >= d ? left : 0.0f;
        from += lane + d < 32 ? right : 0.0f;
    }
    from = shfl_down(from, 1);
    from = lane < 31 ? from : 0.0f; /* sum after the token */
    GT_UNROLL
    for (int i = 0; i < SLOT_SHORTS; i++) {
        before += i < me.me ? total[i] : 0.0f;
        after += i > me.me ? total[i] : 0.0f;
        between += (i > chunk && i < me.me) || (i > me.me && i < chunk) ? total[i] : 0.0f;
    }
    if (chunk == me.me) {
        sts<float>(me.address(Tile::PRE + lane), exp2_finite(before + upto));
        const float suf = exp2_finite(after + from);
        sts<float>(me.address(Tile::SUF + lane), suf);
        sts<float>(me.address(Tile::WEIGHT + lane), finite(delta * suf));
        if (lane == 0) sts<float>(me.address(Tile::ALL), exp2_finite((total[0] + total[1]) + (total[2] + total[3])));
        return;
    }
    const float factor = chunk < me.me ? delta * exp2_finite(between + from) : exp2_finite(between + upto);
    sts<float>(me.address(Tile::OTHER + SHORT * chunk + lane), finite(factor));
}

/* ---- da --------------------------------------------------------------------------------------------------------- */

/* After a step, one warp adds da, <x, U>, Across and dDskip of the step to the sums of the head's earlier steps.  After
 * the head's last step it stores the sums. */
template <class Tile>
GT_DEV void finish_split_step(const SplitGradientParams& p, const SplitGradientBlock<Tile>& me, int h, int p0) {
    const Problem& in = p.in;
    const int lane = lane_id(), tokens = me.tokens(me.me);
    const bool is_first = p0 == 0, is_last = p0 + ROWS_P >= in.P;
    const auto address = [&](int offset) { return lds<float>(me.address(offset + lane)); };
    if (p.dskip) {
        const int64_t row = ((int64_t)me.b() * p.slots + me.slot()) * SLOT_SHORTS + me.me;
        float sums[2];
        GT_UNROLL
        for (int i = 0; i < 2; i++) {
            const int column = p0 + SHORT * i + lane;
            sums[i] =
                column < in.P ? address(Tile::DSKIP + SHORT * i) + address(Tile::DSKIP + ROWS_P + SHORT * i) : 0.0f;
            if (in.skip_per_channel && column < in.P) p.dskip[(row * in.H + h) * in.P + column] = sums[i];
        }
        if (!in.skip_per_channel) {
            float all = warp_sum(sums[0] + sums[1]);
            if (!is_first) all += me.value(Tile::DSKIP_SUM);
            sync_warp();
            if (lane == 0) {
                sts<float>(me.address(Tile::DSKIP_SUM), all);
                if (is_last) p.dskip[row * in.H + h] = all;
            }
        }
    }
    if (!p.da) return;
    float E = 0.0f, Z = 0.0f;
    GT_UNROLL
    for (int i = 0; i < Tile::ACTIVE; i++) E += address(Tile::E + SHORT * i);
    GT_UNROLL
    for (int i = 0; i < Tile::ACTIVE; i++) Z += me.value(Tile::Z + i);
    const float F =
        (address(Tile::F) + address(Tile::F + SHORT)) + (address(Tile::F + 2 * SHORT) + address(Tile::F + 3 * SHORT));
    float direct = (address(Tile::DIRECT) + address(Tile::DIRECT + SHORT)) +
                   (address(Tile::DIRECT + 2 * SHORT) + address(Tile::DIRECT + 3 * SHORT));
    float across = 0.0f, from = E, upto = F; /* from: summed over t >= k; upto: summed over s < k */
    const float all_E = warp_sum(E), all_F = warp_sum(F);
    if (lane == Across::E) across = all_E;
    if (lane == Across::F) across = all_F;
    if (lane == Across::Z) across = Z;
    GT_UNROLL
    for (int i = 0; i < SLOT_SHORTS; i++) {
        if (i == me.me) continue;
        const float row = address(Tile::GAMMA + 2 * SHORT * i) + address(Tile::GAMMA + 2 * SHORT * i + SHORT);
        if (i > me.me) {
            upto += row;
            continue;
        }
        from += row;
        const float all = warp_sum(row);
        if (lane == Across::GAMMA + i) across = all;
    }
    const float corner =
        address(Tile::CORNER); /* Gamma of the pairs with s in the first and t in the last 16 tokens: lanes 0 to 15 have
                                * sums by s, the others by t */
    float corner_upto = corner, corner_from = corner;
    GT_UNROLL
    for (int d = 1; d < 32; d *= 2) {
        const float left = shfl_up(upto, d), right = shfl_down(from, d);
        upto += lane >= d ? left : 0.0f;
        from += lane + d < 32 ? right : 0.0f;
        const float corner_left = shfl_up(corner_upto, d), corner_right = shfl_down(corner_from, d);
        corner_upto += lane >= d ? corner_left : 0.0f;
        corner_from += lane + d < 32 ? corner_right : 0.0f;
    }
    upto = shfl_up(upto, 1);
    corner_upto = shfl_up(corner_upto, 1);
    if (lane == 0) upto = corner_upto = 0.0f;
    float da = from + upto + (lane < 16 ? corner_upto : corner_from) + address(Tile::DIAGONAL);
    if (!is_first) {
        da += address(Tile::KEPT);
        direct += address(Tile::KEPT + SHORT);
        across += address(Tile::KEPT + 2 * SHORT);
    }
    if (!is_last) {
        sync_warp();
        sts<float>(me.address(Tile::KEPT + lane), da);
        sts<float>(me.address(Tile::KEPT + SHORT + lane), direct);
        sts<float>(me.address(Tile::KEPT + 2 * SHORT + lane), across);
        sync_warp();
        return;
    }
    const auto put = [&](float* to, float value) { *to = p.has_share ? *to + value : value; };
    if (lane < tokens) {
        const int64_t to = ((int64_t)me.b() * in.sequences.T + me.token(me.me) + lane) * in.H + h;
        put(p.da + to, da);
        put(p.direct + to, direct);
    }
    const int64_t slot = (int64_t)me.b() * p.slots + me.slot();
    if (lane < Across::COUNT) put(p.across + ((slot * SLOT_SHORTS + me.me) * Across::COUNT + lane) * in.H + h, across);
}

} /* namespace ssd */
} /* namespace gt */

#endif
