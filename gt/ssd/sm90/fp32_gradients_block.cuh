/* gt/ssd/sm90/fp32_gradients_block.cuh - helpers of fp32_gradients.cuh, which is ssd backward of a chunk on compute
 * capability 9.0 with fp32 activations: the layout of shared memory, a block's chunk, copies, splitting of tiles, decay
 * factors, and da of a finished step. */
#ifndef GT_SSD_SM90_FP32_GRADIENTS_BLOCK_CUH
#define GT_SSD_SM90_FP32_GRADIENTS_BLOCK_CUH

#include "../mma/fp32_chunk.cuh"
#include "gradients_block.cuh"

namespace gt {
namespace ssd {

/* A tile consists of panels of wgmma.cuh, 64 rows of 128 bytes each.  The panels with hi of all columns come first,
 * then the panels with lo.  fp32 rows take the same bytes as their hi and lo.  So a row lies in the same panels before
 * it is split. */
template <int NP_>
struct HopperSplitTile {
    static constexpr int NP = NP_, PANELS = NP / 64;
    static constexpr int THREADS = 512, WARPS = THREADS / 32;
    static constexpr int TILES = NP / 16; /* tiles of 8 columns in a warp's part of dC or dB */
    static constexpr int PANEL = CHUNK * 128, ROWS = 2 * PANEL, STATE = 2 * PANELS * PANEL;
    static constexpr int ROWS_LO = PANEL, STATE_LO = PANELS * PANEL; /* bytes from hi to lo */
    static constexpr int B = 0, H = B + STATE, G = H + STATE;        /* before the first and after the last step, H has
                                                                      * the other chunk's B or C, and G has C */
    static constexpr int X = G + STATE, DY = X + ROWS, NEXT = DY + ROWS; /* NEXT: x of the earlier chunk, or dy of the
                                                                          * later chunk */
    static constexpr int M = NEXT + ROWS, M_NEXT = M + ROWS; /* M: pairs of own tokens; M_NEXT: pairs with the other
                                                              * chunk */
    static constexpr int S = M_NEXT + ROWS;                  /* [4][thread] of 16 bytes */
    static constexpr int FLOATS = S + 64 * THREADS;
    /* offsets in floats from FLOATS on */
    static constexpr int FACTORS = 0;                                       /* factors of the chunk alone */
    static constexpr int PRE = FACTORS + Factors::COUNT, SUF = PRE + CHUNK; /* PRE, SUF: pre and suf in the slot */
    static constexpr int WEIGHT = SUF + CHUNK, OTHER = WEIGHT + CHUNK;      /* WEIGHT: Delta SUF; OTHER: see
                                                                             * slot_factors() */
    static constexpr int INVERSES = OTHER + CHUNK, DY_INVERSE = INVERSES + CHUNK, NEXT_INVERSE = DY_INVERSE + CHUNK;
    static constexpr int B_INVERSE = NEXT_INVERSE + CHUNK, C_INVERSE = B_INVERSE + CHUNK;
    static constexpr int OTHER_INVERSE = C_INVERSE + CHUNK; /* inverse powers of the other chunk's B or C */
    static constexpr int M_MOST = OTHER_INVERSE + CHUNK;    /* [64 rows][4 warpgroups] */
    static constexpr int STATE_MOST = M_MOST + 4 * CHUNK;   /* [h, G][16 warps] */
    static constexpr int ALL = STATE_MOST + 2 * WARPS;      /* ALL: the slot's decay; STATE_INVERSE: the inverse powers
                                                             * of h and G */
    static constexpr int STATE_INVERSE = ALL + 1,
                         KEPT = ALL + 4; /* KEPT: sums of the head's earlier tiles, [da 64, direct 64, across 32,
                                          * dskip] */
    static constexpr int POSITION = KEPT + 2 * CHUNK + 36;
    static constexpr int SUMS = POSITION + 20;
    /* Offsets in the sums of a step.  There are two sets, because a step's sums are read while the next step writes its
     * sums. */
    static constexpr int E = 0, F = E + 2 * CHUNK, DIRECT = F + 2 * CHUNK; /* E: [2 halves of n]; F and DIRECT: [2
                                                                            * halves of rows p] */
    static constexpr int COLUMNS = DIRECT + 2 * CHUNK;                     /* [3 blocks of s][t]: column sums of
                                                                            * Gamma */
    static constexpr int LATER = COLUMNS + 3 * CHUNK;                      /* [2 halves of t][s]: sums of Gamma over t
                                                                            * in later blocks */
    static constexpr int NEXT_ROWS = LATER + 2 * CHUNK;                    /* [2 halves of NEXT][row]: row sums of Gamma
                                                                            * with the other chunk */
    static constexpr int DIAGONAL = NEXT_ROWS + 2 * CHUNK;
    static constexpr int DSKIP = DIAGONAL + CHUNK; /* if per channel: [4 warps][rows p]; if per head: [4 blocks of
                                                 * tokens] */
    static constexpr int Z = DSKIP + 4 * CHUNK;    /* [16 warps] */
    static constexpr int SUMS_COUNT = Z + WARPS;
    static constexpr int COUNT = SUMS + 2 * SUMS_COUNT, BYTES = FLOATS + 4 * COUNT;
    static_assert(M_MOST % 4 == 0 && STATE_MOST % 4 == 0 && FACTORS % 4 == 0 && POSITION % 2 == 0, "read together");
    static_assert(BYTES <= 227 * 1024, "fits compute capability 9.0");
};

/* A block's chunk.  Values that are read once per step lie in shared memory, because the registers are needed for
 * sums. */
template <class Tile>
struct HopperSplitBlock {
    uint32_t smem;
    int warp, group;          /* group: the warpgroup.  Both are from shfl_idx(), so the compiler knows that all lanes
                               * have the same values */
    int second;               /* the chunk's index in the slot, 0 or 1 */
    int tokens, other_tokens; /* tokens of the chunk, and of the slot's other chunk (0 if it does not exist) */

    GT_METHOD uint32_t address(int offset) const { return smem + Tile::FLOATS + 4 * offset; }
    GT_METHOD float value(int offset) const { return lds<float>(address(offset)); }
    template <class T>
    GT_METHOD T field(int offset) const {
        return lds<T>(address(Tile::POSITION) + offset);
    }
    /* the address of 16 bytes that only this thread writes and reads */
    GT_METHOD uint32_t kept_S(int i) const { return smem + Tile::S + 16 * (Tile::THREADS * i + thread_here()); }
    GT_METHOD int64_t first() const { return field<int64_t>(0); } /* first token of the chunk */
    GT_METHOD int b() const { return field<int>(8); }
    GT_METHOD int slot() const { return field<int>(12); }
    GT_METHOD int g() const { return field<int>(16); }
    GT_METHOD int64_t base(int i) const { return field<int64_t>(24 + 8 * i); } /* as in SplitGradientBlock */
    GT_METHOD int64_t other() const { return first() + (second ? -CHUNK : CHUNK); }
    GT_METHOD int sums(int step, int offset) const { return Tile::SUMS + step % 2 * Tile::SUMS_COUNT + offset; }
    /* whether the warp adds <G, h> of its rows to Z; if the slot has both chunks, each block takes half of the rows */
    GT_METHOD bool owns_rows() const { return other_tokens == 0 || warp / (Tile::WARPS / 2) == second; }
};

/* Finds the block's chunk.  Blocks are numbered as [B,slots,G][2 chunks of a slot]. */
template <class Tile>
GT_DEV HopperSplitBlock<Tile> find_hopper_split_chunk(const SplitGradientParams& p) {
    const Problem& in = p.in;
    HopperSplitBlock<Tile> me;
    const int64_t index = block_x() / 2;
    me.smem = smem_base_of_tiles();
    me.warp = shfl_idx(warp_id(), 0);
    me.group = me.warp / 4;
    me.second = block_x() % 2;
    const int g = (int)(index % in.G), slot = (int)(index / in.G % p.slots), b = (int)(index / in.G / p.slots);
    const gt_chunk chunk = chunk_at(in.sequences, CHECKPOINT, slot);
    const int all = chunk.sequence < 0 ? 0 : (int)(chunk.last - chunk.first);
    const int first = all < CHUNK ? all : CHUNK;
    me.tokens = me.second ? all - first : first;
    me.other_tokens = all - me.tokens;
    if (thread_id() == 0) {
        const int64_t h = g * (in.H / in.G), token = chunk.first + CHUNK * me.second;
        const uint32_t to = me.address(Tile::POSITION);
        sts<int64_t>(to, token);
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

/* ---- copies ------------------------------------------------------------------------------------------------------ */

/* THREADS threads start to copy 64 rows of COLUMNS fp32 numbers to panels.  thread: this thread's index among them.
 * Row r begins at from + r pitch.  rows, columns: how many exist; the others become zeros. */
template <class Tile, int COLUMNS, int THREADS>
GT_DEV void copy_panels(int thread, uint32_t tile, const float* from, int64_t pitch, int rows, int columns) {
    constexpr int PIECES = COLUMNS / 4, STEP = THREADS / PIECES; /* rows that are copied at a time */
    const int row = (unsigned)thread / PIECES, piece = (unsigned)thread % PIECES;
    const uint32_t to = tile + tile_at<128>(row, piece, Tile::PANEL);
    from += row * pitch + 4 * piece;
    const int left = 4 * piece < columns ? rows - row : 0;
    const int64_t step = STEP * pitch;
    GT_UNROLL
    for (int k = 0; k < CHUNK; k += STEP) { /* rows 8 apart have the same swizzle */
        cp_async<16>((to ^ 16 * (k % 8)) + 128 * k, from, left > k ? 16 : 0);
        from += step;
    }
}

/* All threads start to copy x, dy and NEXT of a step: 64 rows p from p0 on, of head number `head` in the group. */
template <class Tile>
GT_DEV void copy_rows(const SplitGradientParams& p, const HopperSplitBlock<Tile>& me, int head, int p0) {
    const Problem& in = p.in;
    const int row = (unsigned)thread_here() / 16, piece = (unsigned)thread_here() % 16, column = p0 + 4 * piece;
    const uint32_t to = me.smem + Tile::X + tile_at<128>(row, piece, Tile::PANEL);
    const bool exists = column < in.P;
    const auto copy = [&](uint32_t tile, const float* from, int64_t pitch, int tokens) {
        const int left = exists ? tokens - row : 0;
        cp_async<16>(tile, from, left > 0 ? 16 : 0);
        cp_async<16>(tile + 32 * 128, from + 32 * pitch, left > 32 ? 16 : 0);
    };
    const float* x =
        static_cast<const float*>(in.x) + (me.base(BASE_X) + head * in.x_stride.h + row * in.x_stride.t + column);
    const float* dy =
        static_cast<const float*>(in.dy) + (me.base(BASE_DY) + head * in.dy_stride.h + row * in.dy_stride.t + column);
    copy(to, x, in.x_stride.t, me.tokens);
    copy(to + Tile::ROWS, dy, in.dy_stride.t, me.tokens);
    if (me.other_tokens == 0) return;
    const int64_t pitch = me.second ? in.x_stride.t : in.dy_stride.t;
    copy(to + 2 * Tile::ROWS, me.second ? x - CHUNK * pitch : dy + CHUNK * pitch, pitch, me.other_tokens);
}

/* Warpgroup 1 starts to copy h and G of the same rows. */
template <class Tile>
GT_DEV void copy_states(const SplitGradientParams& p, const HopperSplitBlock<Tile>& me, int head, int p0) {
    const Problem& in = p.in;
    const int64_t first = me.base(BASE_STATE) + head * p.state_step + (int64_t)p0 * in.N;
    GT_NO_UNROLL
    for (int i = 0; i < 2; i++) {
        const float* from = i ? p.G.plain : p.h.plain;
        const bool exists = from;
        from = exists ? from + first : static_cast<const float*>(in.x); /* without states no row is read, so any address
                                                                         * will do */
        copy_panels<Tile, Tile::NP, 128>(thread_here() % 128, me.smem + Tile::H + Tile::STATE * i, from,
                                         exists ? in.N : 0, exists ? in.P - p0 : 0, in.columns);
    }
}

/* ---- splitting --------------------------------------------------------------------------------------------------- */

/* A warp's 4 rows of a tile, in registers, from row 4 warp on.  Each row has 8 lanes, and a lane has 8 adjacent numbers
 * of every 64 columns. */
template <class Tile, int PANELS>
struct PanelRows {
    float4 x[2 * PANELS]; /* of each 8 numbers, half number `flip` comes first */
    int row, piece, flip; /* flip avoids bank conflicts of 16-byte pieces of eight lanes, and of 8-byte pieces of
                           * sixteen lanes */

    GT_METHOD explicit PanelRows(int warp) {
        const int lane = here();
        row = 4 * warp + lane / 8, piece = lane % 8, flip = (piece / 4 ^ row) & 1;
    }
    GT_METHOD void load(uint32_t tile) {
        const uint32_t from = tile + piece / 4 * Tile::PANEL + panel_at<128>(row, 2 * piece % 8 + flip);
        GT_UNROLL
        for (int i = 0; i < 2 * PANELS; i++) x[i] = lds<float4>((from ^ 16 * (i % 2)) + i / 2 * 2 * Tile::PANEL);
    }
    GT_METHOD int column(int i) const { return 64 * (i / 2) + 8 * piece + 4 * (i % 2 ^ flip); } /* column of x[i].x */
    GT_METHOD float largest() const {
        float most = 0.0f;
        GT_UNROLL
        for (int i = 0; i < 2 * PANELS; i++)
            most = fmaxf(most, fmaxf(fmaxf(fabsf(x[i].x), fabsf(x[i].y)), fmaxf(fabsf(x[i].z), fabsf(x[i].w))));
        return most;
    }
    GT_METHOD float largest_of_row() const {
        float most = largest();
        GT_UNROLL
        for (int mask = 1; mask < 8; mask *= 2) most = fmaxf(most, shfl_xor(most, mask));
        return most;
    }
    /* Splits the rows and stores them.  All lanes of the warp must have read their rows before. */
    GT_METHOD void store(uint32_t tile, float power) const {
        const uint32_t to = tile + panel_at<128>(row, piece) + 8 * flip;
        GT_UNROLL
        for (int i = 0; i < 2 * PANELS; i++) {
            uint2 hi, lo;
            split_pair(x[i].x * power, x[i].y * power, hi.x, lo.x);
            split_pair(x[i].z * power, x[i].w * power, hi.y, lo.y);
            const uint32_t at = (to ^ 8 * (i % 2)) + i / 2 * Tile::PANEL;
            sts<uint2>(at, hi);
            sts<uint2>(at + PANELS * Tile::PANEL, lo);
        }
    }
};

/* Splits x, dy and NEXT in place, with a power of two per row.  With z, dy is first multiplied by silu(z). */
template <class Tile>
GT_DEV void split_step_rows(const SplitGradientParams& p, const HopperSplitBlock<Tile>& me, int h, int p0) {
    const Problem& in = p.in;
    PanelRows<Tile, 1> rows(me.warp);
    GT_NO_UNROLL
    for (int i = 0; i < 3; i++) {
        const bool is_other = i == 2;
        if (is_other && me.other_tokens == 0) continue;
        const uint32_t tile = me.smem + Tile::X + Tile::ROWS * i;
        rows.load(tile);
        if (in.z && (i == 1 || (is_other && !me.second))) {
            const int tokens = is_other ? me.other_tokens : me.tokens;
            const float* gates = static_cast<const float*>(in.z) + p0 + rows.row * in.z_stride.t +
                                 offset_of(in.z_stride, me.b(), is_other ? me.other() : me.first(), h);
            GT_UNROLL
            for (int k = 0; k < 2; k++) {
                if (rows.row >= tokens || rows.column(k) >= in.P - p0) continue;
                const float4 z = ldg<float4>(gates + rows.column(k));
                float4& x = rows.x[k];
                x = {x.x * silu(z.x), x.y * silu(z.y), x.z * silu(z.z), x.w * silu(z.w)};
            }
        }
        const Power power = split_power(rows.largest_of_row());
        sync_warp();
        rows.store(tile, power.value);
        if (rows.piece == 0) sts<float>(me.address(Tile::INVERSES + CHUNK * i + rows.row), power.inverse);
    }
}

/* All threads copy B or C of a chunk to a tile of NP columns and split it, with a power of two per row. */
template <class Tile>
GT_DEV void stage_split_group(const SplitGradientParams& p, const HopperSplitBlock<Tile>& me, bool is_C, bool is_other,
                              uint32_t tile, int inverses) {
    const Problem& in = p.in;
    const gt_stride& stride = is_C ? in.Cm_stride : in.Bm_stride;
    const float* from = static_cast<const float*>(is_C ? in.Cm : in.Bm) +
                        offset_of(stride, me.b(), is_other ? me.other() : me.first(), me.g());
    copy_panels<Tile, Tile::NP, Tile::THREADS>(thread_here(), tile, from, stride.t,
                                               is_other ? me.other_tokens : me.tokens, in.columns);
    cp_async_commit();
    cp_async_wait<0>();
    sync_threads();
    PanelRows<Tile, Tile::PANELS> rows(me.warp);
    rows.load(tile);
    const Power power = split_power(rows.largest_of_row());
    sync_warp();
    rows.store(tile, power.value);
    if (rows.piece == 0) sts<float>(me.address(inverses + rows.row), power.inverse);
}

/* The power of two of the step's h (which = 0) or G (which = 1). */
template <class Tile>
GT_DEV Power power_of_state(const HopperSplitBlock<Tile>& me, int which) {
    float4 x[Tile::WARPS / 4];
    GT_UNROLL
    for (int i = 0; i < Tile::WARPS / 4; i++)
        x[i] = lds<float4>(me.address(Tile::STATE_MOST + Tile::WARPS * which + 4 * i));
    float most = 0.0f;
    GT_UNROLL
    for (int i = 0; i < Tile::WARPS / 4; i++) most = fmaxf(most, fmaxf(fmaxf(x[i].x, x[i].y), fmaxf(x[i].z, x[i].w)));
    return split_power(most);
}

/* ---- decay factors ----------------------------------------------------------------------------------------------- */

/* Sums of log2 of the decays, for a lane's two tokens: through each token (upto), after each token, and over all
 * tokens. */
struct LogSums {
    float upto[2], after[2], all;
    GT_METHOD explicit LogSums(const float (&delta)[2], float A) {
        const int lane = lane_id();
        const float l0 = delta[0] * A * LOG2_E, l1 = delta[1] * A * LOG2_E;
        float sum = l0 + l1, from = sum;
        GT_UNROLL
        for (int d = 1; d < 32; d *= 2) {
            const float left = shfl_up(sum, d), right = shfl_down(from, d);
            sum += lane >= d ? left : 0.0f;
            from += lane + d < 32 ? right : 0.0f;
        }
        float before = shfl_up(sum, 1), behind = shfl_down(from, 1);
        before = lane > 0 ? before : 0.0f;
        behind = lane < 31 ? behind : 0.0f;
        upto[0] = before + l0, upto[1] = upto[0] + l1;
        after[0] = behind + l1, after[1] = behind;
        all = shfl_idx(sum, 31);
    }
};

/* One warp computes PRE, SUF and WEIGHT of the chunk, and the slot's decay.  It also computes OTHER, a decay factor for
 * each token of the other chunk, by that chunk's position:
 *
 *     earlier    Delta_s exp(from after s to its chunk's end)     times PRE_t of own t it is L_ts Delta_s
 *     later      exp(from its chunk's first token through t)      times SUF_s of own s it is L_ts */
template <class Tile>
GT_DEV void slot_factors(const HopperSplitBlock<Tile>& me, float A, const float (&own)[2], const float (&other)[2]) {
    const LogSums mine(own, A), its(other, A);
    const float before = me.second ? its.all : 0.0f, behind = me.second ? 0.0f : its.all;
    const auto put = [&](int at, float x, float y) { sts<float2>(me.address(at + 2 * lane_id()), {x, y}); };
    const float suf0 = exp2_finite(behind + mine.after[0]), suf1 = exp2_finite(behind + mine.after[1]);
    put(Tile::PRE, exp2_finite(before + mine.upto[0]), exp2_finite(before + mine.upto[1]));
    put(Tile::SUF, suf0, suf1);
    put(Tile::WEIGHT, finite(own[0] * suf0), finite(own[1] * suf1));
    if (me.second)
        put(Tile::OTHER, finite(other[0] * exp2_finite(its.after[0])), finite(other[1] * exp2_finite(its.after[1])));
    else
        put(Tile::OTHER, exp2_finite(its.upto[0]), exp2_finite(its.upto[1]));
    if (lane_id() == 0) sts<float>(me.address(Tile::ALL), exp2_finite(mine.all + its.all));
}

/* Warps 0 to 2 compute all decay factors of head h. */
template <class Tile>
GT_DEV void make_step_factors(const SplitGradientParams& p, const HopperSplitBlock<Tile>& me, int h) {
    const Problem& in = p.in;
    float dt[2], delta[2];
    load_dt(in, offset_of(in.dt_stride, me.b(), me.first(), h), me.tokens, dt);
    const float A = in.A[h];
    if (me.warp < 2) {
        deltas_of(in, h, me.tokens, dt, delta);
        if (me.warp == 0)
            make_factors<SUM_FACTORS>(me.address(Tile::FACTORS), delta, A);
        else
            make_factors<DIAGONAL_FACTORS | SHORT_CODE>(me.address(Tile::FACTORS), delta, A);
        return;
    }
    float other[2] = {0.0f, 0.0f};
    if (me.other_tokens) load_dt(in, offset_of(in.dt_stride, me.b(), me.other(), h), me.other_tokens, other);
    deltas_of(in, h, me.tokens, dt, delta);
    dt[0] = other[0], dt[1] = other[1];
    deltas_of(in, h, me.other_tokens, dt, other);
    slot_factors(me, A, delta, other);
}

/* ---- da ---------------------------------------------------------------------------------------------------------- */

/* After a step, one warp adds da, <x, U>, Across and dDskip of the step to the sums of the head's earlier steps.  After
 * the head's last step it stores the sums.  A lane has two tokens.  chunk_times_fp32_kernel reads Across for four
 * chunks of 32 tokens.  So E of the slot's second half goes to the third of these chunks, and F of the first half goes
 * to the second. */
template <class Tile>
GT_DEV void finish_split_step(const SplitGradientParams& p, const HopperSplitBlock<Tile>& me, int step, int h, int p0) {
    const Problem& in = p.in;
    const int lane = here(), block = lane / 8;
    const bool is_first = p0 == 0, is_last = p0 + ROWS_P >= in.P;
    const auto pair = [&](int offset) { return lds<float2>(me.address(me.sums(step, offset) + 2 * lane)); };
    const auto both = [&](int offset) { return plus(pair(offset), pair(offset + CHUNK)); };
    const int64_t slot = (int64_t)me.b() * p.slots + me.slot();
    if (p.dskip) { /* dskip has a row for every 32 tokens, so a chunk of 64 has two rows; the second is zero */
        const int64_t row = SLOT_SHORTS * slot + 2 * me.second;
        const int column = p0 + 2 * lane;
        if (in.skip_per_channel) {
            const float2 sums = plus(both(Tile::DSKIP), both(Tile::DSKIP + 2 * CHUNK));
            float *to = p.dskip + (row * in.H + h) * in.P + column, *none = to + in.H * in.P;
            if (column < in.P) stg<float2>(to, sums), stg<float2>(none, {0.0f, 0.0f});
        } else {
            const float4 blocks = lds<float4>(me.address(me.sums(step, Tile::DSKIP)));
            float all = (blocks.x + blocks.y) + (blocks.z + blocks.w);
            if (!is_first) all += me.value(Tile::KEPT + 2 * CHUNK + 32);
            sync_warp();
            if (lane == 0) {
                sts<float>(me.address(Tile::KEPT + 2 * CHUNK + 32), all);
                if (is_last) p.dskip[row * in.H + h] = all, p.dskip[(row + 1) * in.H + h] = 0.0f;
            }
        }
    }
    if (!p.da) return;
    const float2 E = both(Tile::E), F = both(Tile::F), next = both(Tile::NEXT_ROWS);
    float2 direct = both(Tile::DIRECT), da = sums_from(E);
    GT_NO_UNROLL
    for (int i = 0; i < 3; i++) { /* Gamma_ts with s in block i, which is earlier than the block of the token */
        const float2 from = sums_from(i < block ? pair(Tile::COLUMNS + CHUNK * i) : float2{0.0f, 0.0f});
        if (i < block) da = plus(da, from);
    }
    da = plus(da, sums_before<8>(both(Tile::LATER))); /* Gamma_ts with s in the token's block and t in a later block */
    da = plus(da, pair(Tile::DIAGONAL));
    da = plus(da, sums_before<32>(F));
    da = plus(da, me.second ? sums_from(next) : sums_before<32>(next));
    float Z = 0.0f;
    GT_UNROLL
    for (int i = 0; i < Tile::WARPS / 4; i++) {
        const float4 z = lds<float4>(me.address(me.sums(step, Tile::Z + 4 * i)));
        Z += (z.x + z.y) + (z.z + z.w);
    }
    const float all_E = warp_sum(E.x + E.y), all_F = warp_sum(F.x + F.y);
    const int part = lane / Across::COUNT, what = lane % Across::COUNT;
    float across = 0.0f;
    if (part == 0 && what == Across::E && me.second) across = all_E;
    if (part == 1 && what == Across::F && !me.second) across = all_F;
    if (part == 0 && what == Across::Z) across = Z;
    const uint32_t kept = me.address(Tile::KEPT + 2 * lane), kept_across = me.address(Tile::KEPT + 2 * CHUNK + lane);
    if (!is_first) {
        da = plus(lds<float2>(kept), da);
        direct = plus(lds<float2>(kept + 4 * CHUNK), direct);
        across += lds<float>(kept_across);
    }
    if (!is_last) {
        sync_warp();
        sts<float2>(kept, da);
        sts<float2>(kept + 4 * CHUNK, direct);
        sts<float>(kept_across, across);
        sync_warp();
        return;
    }
    const auto put = [&](float* to, float value) { *to = p.has_share ? *to + value : value; };
    const int64_t to = ((int64_t)me.b() * in.sequences.T + me.first() + 2 * lane) * in.H + h;
    GT_UNROLL
    for (int i = 0; i < 2; i++) {
        if (2 * lane + i >= me.tokens) continue;
        put(p.da + to + i * in.H, i ? da.y : da.x);
        put(p.direct + to + i * in.H, i ? direct.y : direct.x);
    }
    if (part < 2)
        put(p.across + ((slot * SLOT_SHORTS + 2 * me.second + part) * Across::COUNT + what) * in.H + h, across);
}

} /* namespace ssd */
} /* namespace gt */

#endif
