/* gt/ssd/backward_sm90_block.cuh - ssd backward of a chunk on compute capability 9.0 (backward_sm90.cuh): where
 * everything lies in shared memory, dy silu(z), and the warpgroup that prepares: copies of a step's tiles, decay
 * factors, the weights of the state that the chunk makes, da and ddt of steps that are done. */
#ifndef GT_SSD_BACKWARD_SM90_BLOCK_CUH
#define GT_SSD_BACKWARD_SM90_BLOCK_CUH

#include "../base/bulk.cuh"
#include "../base/wgmma.cuh"
#include "backward_tensor.cuh"

namespace gt {
namespace ssd {

/* The states as tensors [slot of a batch element and head][P][columns] of f16, in boxes of 64 rows p, a panel each. */
struct HopperGradientParams : ChunkGradientParams {
    TensorMap h_map, G_map;
    int has_h, has_G; /* else the map is of something else, and nothing of it is read: zeros */
    int clears;       /* the sums of chunks that there are not: those of several launches are added as one */
};

/* Whether there is a place, or what others add from it is to be cleared: see find_chunk().  Of packed sequences most
 * places may have no chunk. */
GT_DEV bool has_place(const HopperGradientParams& p, int64_t place) {
    const Problem& in = p.in;
    const bool all = p.clears || !in.sequences.cu_seqlens;
    return place < (all ? in.sequences.B * p.slots : used_slots(in.sequences, CHECKPOINT)) * in.G * 2;
}

template <class T_, int N_, bool GATED_ = false>
struct HopperGradientTraits {
    using T = T_;
    static constexpr bool GATED = GATED_;         /* with z */
    using D = std::conditional_t<GATED, f16, T>;  /* of dy in its tile, and of M */
    static constexpr int N = N_, PANELS = N / 64; /* a panel: 64 rows of 128 bytes */
    static constexpr int THREADS = 512, CONSUMERS = 384, GROUP = 128;
    static constexpr int PREPARE_REGISTERS = 48, PAIRS_REGISTERS = 144, SUMS_REGISTERS = 160;
    static constexpr int STAGES = N == 64 ? 3 : 2;
    /* of factors and sums by token, which are made a step earlier than tiles come, and read a step later */
    static constexpr int COPIES = STAGES + 1;
    static constexpr int M_BUFFERS = 2, M_TERMS = std::is_same<D, bf16>::value ? 2 : 1;
    static constexpr bool M_HAS_POWER = M_TERMS == 1 && !GATED; /* one of the chunk */
    static constexpr bool M_HAS_SKIP =
        std::is_same<T, bf16>::value; /* f16 would round what dx consists of for the most */
    /* bytes */
    static constexpr int PANEL = CHUNK * 128, STATE = PANELS * PANEL;
    static constexpr int B = 0, C = B + STATE, OTHER = C + STATE; /* the neighbour's B or C */
    static constexpr int STAGE0 = OTHER + STATE;
    static constexpr int X = 0, DY = X + PANEL, NEXT = DY + PANEL, H = NEXT + PANEL, G = H + STATE; /* of a stage */
    static constexpr int STAGE = G + STATE;
    static constexpr int M = STAGE0 + STAGES * STAGE, OUT = M + M_BUFFERS * M_TERMS * PANEL;
    static constexpr int GATES = OUT + PANEL, NEXT_GATES = GATES + PANEL; /* GATED: z of a step at a time */
    static constexpr int FLOATS = OUT + PANEL * (GATED ? 3 : 1);
    /* at the end, over the stages: W for dC, W for dB, rows of dC, of dB */
    static constexpr int W = STAGE0, ROWS = W + 2 * PANEL;
    /* floats, from FLOATS */
    static constexpr int FACTORS = 0;                              /* [STAGES] */
    static constexpr int MADE = FACTORS + COPIES * Factors::COUNT; /* [COPIES][64, E], neighbour_factors() */
    static constexpr int MADE_COPIES = COPIES, MADE_FLOATS = CHUNK + 4;
    static constexpr int STATE_INVERSES = MADE + MADE_COPIES * MADE_FLOATS; /* [STAGES][h 4, G 4] */
    static constexpr int B_INVERSE = STATE_INVERSES + 8 * STAGES, C_INVERSE = B_INVERSE + CHUNK;
    static constexpr int OTHER_INVERSE = C_INVERSE + CHUNK;
    static constexpr int POWER = OTHER_INVERSE + CHUNK; /* [2][64]: at the end, of dC and dB */
    static constexpr int S_MOST = POWER + 2 * CHUNK, W_MOST = S_MOST + 4;
    /* [TIMES_COPIES][Delta 64, its slope 64, exp(sum a), largest_delta()]: of the tokens of a step, until its da are
     * made, by a warp that may be as many steps behind as there are stages */
    static constexpr int TIMES_COPIES = 2 * STAGES + 2;
    static constexpr int TIMES = W_MOST + 4, TIMES_FLOATS = 2 * CHUNK + 4;
    static constexpr int HEAD_SUMS =
        TIMES + TIMES_COPIES * TIMES_FLOATS; /* [da 64, direct 64, dskip]: of a head's earlier tiles */
    /* GATED, [STAGES][64]: what undoes the powers of dy's rows; the powers of M's columns */
    static constexpr int DY_INVERSE = HEAD_SUMS + 2 * CHUNK + 4;
    static constexpr int M_POWER = DY_INVERSE + (GATED ? STAGES * CHUNK : 0);
    static constexpr int SUMS = M_POWER + (GATED ? STAGES * CHUNK : 0);
    /* from the step's SUMS.  PAIR_SUMS, [i][k]: Gamma of row k with block i of s before k's, or Gamma / Delta of column
     * k with block i + 1 of t behind k's */
    static constexpr int PAIR_SUMS = 0;
    static constexpr int DIAGONAL = PAIR_SUMS + 3 * CHUNK;     /* [k] */
    static constexpr int E = DIAGONAL + CHUNK, F = E + CHUNK;  /* [t] */
    static constexpr int NEAR = F + CHUNK;                     /* [s]: Gamma / Delta over t in the block of s */
    static constexpr int Z = NEAR + CHUNK, DSKIP_HEAD = Z + 4; /* [4 warps] */
    static constexpr int DSKIP = DSKIP_HEAD + 4;               /* [4 warps][p] */
    static constexpr int SUMS_COUNT = DSKIP + 4 * CHUNK;
    /* mbarriers, in bytes */
    static constexpr int FULL = FLOATS + 4 * (SUMS + COPIES * SUMS_COUNT), EMPTY = FULL + 8 * STAGES;
    static constexpr int STATE_MADE = EMPTY + 8 * STAGES, M_FULL = STATE_MADE + 8 * STAGES;
    static constexpr int M_EMPTY = M_FULL + 8 * M_BUFFERS, POWERS_MADE = M_EMPTY + 8 * M_BUFFERS;
    static constexpr int PLACE = POWERS_MADE + (GATED ? 8 * STAGES : 0); /* see init_barriers() */
    static constexpr int SMEM = PLACE + 8;
    static_assert(SUMS % 4 == 0 && SUMS_COUNT % 4 == 0 && Factors::COUNT % 4 == 0, "read by 16 bytes");
    static_assert(FULL % 8 == 0 && ROWS + 2 * STATE <= M && SMEM <= 227 * 1024, "fits sm_90");
};

/* U has Delta as a factor unless that is so small that what has it as a factor does not tell what has not. */
constexpr float LEAST_DELTA = 0x1p-20f;
GT_DEV float factor_of_U(float delta) { return fabsf(delta) > LEAST_DELTA ? delta : 1.0f; }

/* Named barriers: of B, C and OTHER, for all that multiply and the warp of the neighbour's factors; of the pairs, of
 * the state that is made, of S_MOST, of all that multiply. */
enum { STAGED_BARRIER = 1, PAIRS_BARRIER, MADE_BARRIER, BOUND_BARRIER, MULTIPLYING_BARRIER };

/* ---- B and C ---------------------------------------------------------------------------------------------------- */

/* 64 rows of B or C as f16 panels, a power of two a row; inverses[row] <- what undoes it.  A warpgroup, 16 rows a
 * warp. */
template <class C>
GT_DEV void stage_group(const ChunkGradientBlock<C>& me, const Problem& in, const void* data, gt_stride stride,
                        int64_t first, int tokens, uint32_t tile, int inverses) {
    using T = typename C::T;
    const int lane = lane_id(), row0 = 16 * (me.warp % 4) + lane / 8, piece = lane % 8;
    const uint16_t* from =
        static_cast<const uint16_t*>(data) + offset_of(stride, me.b, first, me.g) + row0 * stride.t + 8 * piece;
    uint4 x[4][C::PANELS];
    GT_UNROLL
    for (int k = 0; k < 4; k++) {
        GT_UNROLL
        for (int i = 0; i < C::PANELS; i++) {
            x[k][i] = {0, 0, 0, 0};
            if (row0 + 4 * k < tokens && 64 * i + 8 * piece < in.columns)
                x[k][i] = ldg<uint4>(from + 4 * k * stride.t + 64 * i);
        }
    }
    GT_UNROLL
    for (int k = 0; k < 4; k++) {
        const int row = row0 + 4 * k;
        const Power power = power_of(row_maximum<T, 8>(larger_of<T>(x[k])));
        GT_UNROLL
        for (int i = 0; i < C::PANELS; i++)
            sts<uint4>(tile + i * C::PANEL + panel_at<128>(row, piece),
                       {scaled_f16<T>(x[k][i].x, power.value), scaled_f16<T>(x[k][i].y, power.value),
                        scaled_f16<T>(x[k][i].z, power.value), scaled_f16<T>(x[k][i].w, power.value)});
        if (piece == 0) sts<float>(me.address(inverses + row), power.inverse);
    }
}

/* B, C and the neighbour's B or C, by a warpgroup each; zeros in M, of which no pairs with s > t are ever written. */
template <class C>
GT_DEV void stage_groups(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me) {
    const int role = me.warp / 4;
    const bool is_B = role == 1 || (role == 2 && me.second);
    if (role < 2 || me.makes_state())
        stage_group<C>(me, p.in, is_B ? p.in.Bm : p.in.Cm, is_B ? p.in.Bm_stride : p.in.Cm_stride,
                       role < 2 ? me.first : me.neighbour(), role < 2 ? me.tokens : me.neighbour_tokens,
                       me.smem + (role == 0   ? C::C
                                  : role == 1 ? C::B
                                              : C::OTHER),
                       role == 0   ? C::C_INVERSE
                       : role == 1 ? C::B_INVERSE
                                   : C::OTHER_INVERSE);
    for (int i = thread_id(); i < (C::OUT - C::M) / 16; i += C::CONSUMERS)
        sts<uint4>(me.smem + C::M + 16 * i, {0, 0, 0, 0});
    fence_async_proxy();
    bar_sync(STAGED_BARRIER, C::CONSUMERS + 32);
}

/* ---- the preparing warps: copies -------------------------------------------------------------------------------- */

/* A warp's 16 rows of x, dy or the neighbour's: a lane has row lane / 8 of every four, piece lane % 8, from `from` on,
 * and steps of `pitch` elements a row.  rows, columns: that there are; others become zeros. */
GT_DEV void copy_panel(int warp, uint32_t tile, const uint16_t* from, int64_t pitch, int rows, int columns) {
    const int lane = here(), row0 = 16 * warp + lane / 8, piece = lane % 8;
    const uint32_t address = tile + panel_at<128>(row0, piece);
    if (8 * piece >= columns) rows = 0;
    GT_UNROLL
    for (int i = 0; i < 4; i++) {
        cp_async<16>((address ^ (uint32_t)(i % 2 * 64)) + 512 * i, from, row0 + 4 * i < rows ? 16 : 0);
        from += 4 * pitch;
    }
}

/* Where the first rows of a lane are in x, dy and z, in elements, and states in their maps; of a step, and of the
 * next. */
template <class C>
struct StepSource {
    int64_t x, dy, z;
    int tile, slot;

    GT_METHOD void start(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me, int warp) {
        const Problem& in = p.in;
        const int lane = lane_id(), head = me.g * me.heads, row = 16 * warp + lane / 8, piece = lane % 8;
        x = offset_of(in.x_stride, me.b, me.first + row, head) + 8 * piece;
        dy = offset_of(in.dy_stride, me.b, me.first + row, head) + 8 * piece;
        z = C::GATED ? offset_of(in.z_stride, me.b, me.first + row, head) + 8 * piece : 0;
        slot = (int)((me.b * in.H + head) * p.slots) + me.slot;
        tile = 0;
    }
    /* Both states of the step, by one warp; what is not there comes as zeros. */
    GT_METHOD void load_states(const HopperGradientParams& p, uint32_t stage, uint32_t full) const {
        GT_NO_UNROLL
        for (int i = 0; i < 2 * C::PANELS; i++) {
            const bool is_h = i < C::PANELS;
            tile_load(stage + C::H + i * C::PANEL, is_h ? p.h_map : p.G_map, 64 * (i % C::PANELS), tile * TILE_P,
                      (is_h ? p.has_h : p.has_G) ? slot : -1, full);
        }
    }
    GT_METHOD void copy(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me, int warp, uint32_t stage) const {
        const Problem& in = p.in;
        const uint16_t *x_rows = static_cast<const uint16_t*>(in.x) + x,
                       *dy_rows = static_cast<const uint16_t*>(in.dy) + dy;
        const int tiles = me.makes_state() ? 3 : 2;
        GT_NO_UNROLL
        for (int i = 0; i < tiles; i++) { /* X, DY, and NEXT: 64 tokens before, or behind */
            const bool is_x = i == 0 || (i == 2 && me.second);
            const int64_t pitch = is_x ? in.x_stride.t : in.dy_stride.t;
            const uint16_t* from = is_x ? x_rows : dy_rows;
            if (i == 2) from += (me.second ? -CHUNK : CHUNK) * pitch;
            copy_panel(warp, stage + C::X + i * C::PANEL, from, pitch, i == 2 ? me.neighbour_tokens : me.tokens,
                       in.P - tile * TILE_P);
        }
    }
    /* z of the chunk, and, where dy of the neighbour comes, of the neighbour. */
    GT_METHOD void copy_gates(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me, int warp) const {
        const Problem& in = p.in;
        const int rows = in.P - tile * TILE_P;
        const uint16_t* from = static_cast<const uint16_t*>(in.z) + z;
        copy_panel(warp, me.smem + C::GATES, from, in.z_stride.t, me.tokens, rows);
        if (me.makes_state() && !me.second)
            copy_panel(warp, me.smem + C::NEXT_GATES, from + CHUNK * in.z_stride.t, in.z_stride.t, me.neighbour_tokens,
                       rows);
    }
    GT_METHOD void advance(const ChunkGradientParams& p) {
        const Problem& in = p.in;
        if (++tile < in.tiles) {
            x += TILE_P, dy += TILE_P, z += TILE_P;
        } else {
            const int columns = (in.tiles - 1) * TILE_P;
            x += in.x_stride.h - columns, dy += in.dy_stride.h - columns, z += in.z_stride.h - columns;
            slot += (int)p.slots;
            tile = 0;
        }
    }
};

/* ---- dy silu(z) ------------------------------------------------------------------------------------------------- */

/* silu(z), to what 16 bits tell. */
GT_DEV float gate_of(float z) { return silu_of_sigmoid(z, sigmoid_fast(z)); }

/* A warp's 16 rows of dy silu(z) of a step, f16 in place, a power of two a row.  A lane has of the rows what it copied
 * itself. */
template <class C>
GT_DEV void gate_rows(const ChunkGradientBlock<C>& me, int warp, int step) {
    using E = Element<typename C::T>;
    const uint32_t tile = me.stage(step) + C::DY, gates = me.smem + C::GATES;
    const int lane = here();
    GT_UNROLL
    for (int i = 0; i < 4; i++) {
        const uint32_t address = panel_at<128>(16 * warp + lane / 8 + 4 * i, lane % 8);
        const uint4 dy = lds<uint4>(tile + address), z = lds<uint4>(gates + address);
        const uint32_t left[4] = {dy.x, dy.y, dy.z, dy.w}, right[4] = {z.x, z.y, z.z, z.w};
        float x[8], largest = 0.0f;
        GT_UNROLL
        for (int e = 0; e < 4; e++) {
            x[2 * e] = E::lo(left[e]) * gate_of(E::lo(right[e]));
            x[2 * e + 1] = E::hi(left[e]) * gate_of(E::hi(right[e]));
            largest = fmaxf(largest, fmaxf(fabsf(x[2 * e]), fabsf(x[2 * e + 1])));
        }
        GT_UNROLL
        for (int mask = 1; mask < 8; mask *= 2) largest = fmaxf(largest, shfl_xor(largest, mask));
        const Power power = power_of(finite(largest));
        const auto pair = [&](int e) { return pack_f16(x[e] * power.value, x[e + 1] * power.value); };
        sts<uint4>(tile + address, {pair(0), pair(2), pair(4), pair(6)});
        if (lane % 8 == 0)
            sts<float>(me.address(C::DY_INVERSE + CHUNK * (step % C::STAGES) + 16 * warp + lane / 8 + 4 * i),
                       power.inverse);
    }
}

/* The step's largest |Delta|, or LEAST_DELTA. */
template <class C>
GT_DEV float largest_delta(const ChunkGradientBlock<C>& me, int step) {
    return me.value(C::TIMES + step % C::TIMES_COPIES * C::TIMES_FLOATS + 2 * CHUNK + 1);
}

/* What undoes the power of dy's row t. */
template <class C>
GT_DEV float dy_inverse(const ChunkGradientBlock<C>& me, int step, int t) {
    if constexpr (C::GATED) return me.value(C::DY_INVERSE + CHUNK * (step % C::STAGES) + t);
    return 1.0f;
}

/* The powers of the columns s of M_ts = S_ts L_ts Delta_s + Dskip (t = s) times what undoes dy_t.  No t >= s exceeds
 * f16 then; nor does U, which has these powers, too, exceed 2^60 by what G gives.  One warp. */
template <class C>
GT_DEV void store_M_powers(const ChunkGradientBlock<C>& me, int step, float skip) {
    const int lane = lane_id(), stage = step % C::STAGES;
    const auto pair = [&](int offset) { return lds<float2>(me.address(offset + 2 * lane)); };
    const float2 dy = pair(C::DY_INVERSE + CHUNK * stage), c = pair(C::C_INVERSE), b = pair(C::B_INVERSE);
    const float2 suf = pair(me.factor(step, Factors::SUF));
    const float second = dy.y * c.y;
    float from = fmaxf(dy.x * c.x, second); /* the largest of this lane's tokens and of those behind */
    GT_UNROLL
    for (int d = 1; d < 32; d *= 2) {
        const float right = shfl_down(from, d);
        from = lane + d < 32 ? fmaxf(from, right) : from;
    }
    const float right = shfl_down(from, 1), after = lane < 31 ? fmaxf(second, right) : second;
    /* no row of B or C exceeds 2^14, no state 2^16 */
    const float delta = largest_delta(me, step), pairs = me.value(me.factor(step, Factors::GROWTH)) * (0x1p28f * C::N);
    const float G = largest_of(lds<float4>(me.address(C::STATE_INVERSES + 8 * stage + 4))) * (0x1p4f * C::N);
    const float x = b.x * fmaxf(from * pairs, suf.x * G), y = b.y * fmaxf(after * pairs, suf.y * G);
    sts<float2>(
        me.address(C::M_POWER + CHUNK * stage + 2 * lane),
        {power_of(fma_rn(x, delta, fabsf(skip) * dy.x)).value, power_of(fma_rn(y, delta, fabsf(skip) * dy.y)).value});
}

/* Lane 4 which + i: what undoes the power of rows 16 i ... of h (0) or G (1). */
template <class C>
GT_DEV float read_inverse(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me, int step) {
    const int P = p.in.P, N = p.in.N, row = me.p0(p, step) + lane_id() % 4 * 16;
    const Checkpoints& states = lane_id() / 4 % 2 ? p.G : p.h;
    const int64_t slot = (me.b * p.in.H + me.head(p, step)) * p.slots + me.slot;
    return states.values && row < P ? states.powers[slot * slot_powers(P, N) + power_index(N, row)] : 0x1p-100f;
}

/* ---- da, ddt ---------------------------------------------------------------------------------------------------- */

/* da and ddt of a step that is done, once the head's last tile is; its share of dA, ddt_bias, dDskip.  One warp. */
template <class C>
GT_DEV void finish_hopper_step(const ChunkGradientParams& p, const ChunkGradientBlock<C>& me, int step) {
    const Problem& in = p.in;
    const int lane = lane_id(), block = lane / 8, h = me.head(p, step), tile = me.tile(p, step);
    const auto pair = [&](int offset) { return lds<float2>(me.address(me.sums(step, offset) + 2 * lane)); };
    const int times = C::TIMES + step % C::TIMES_COPIES * C::TIMES_FLOATS;
    const float A = in.A[h];
    const float2 values = lds<float2>(me.address(times + 2 * lane));
    float2 da = {0.0f, 0.0f}, columns = {0.0f, 0.0f};
    GT_NO_UNROLL
    for (int i = -1; i < 3; i++) { /* E; Gamma_ts, s in an earlier block than k */
        const float2 both = pair(i < 0 ? C::E : C::PAIR_SUMS + CHUNK * i);
        const float2 row = sums_from(i < block ? both : float2{0.0f, 0.0f});
        if (i < block)
            da = plus(da, row);
        else
            columns = plus(columns, both);
    }
    /* s in the block of k, t in a later one */
    da = plus(da, sums_before<8>({columns.x * values.x, columns.y * values.y}));
    da = plus(da, pair(C::DIAGONAL)); /* both in that of k */
    /* <x, U>: by pairs, and by G */
    const float2 f = pair(C::F), by = {factor_of_U(values.x), factor_of_U(values.y)};
    float2 direct = plus(plus(columns, pair(C::NEAR)), {f.x / by.x, f.y / by.y});
    da = plus(da, sums_before<32>({by.x == values.x ? f.x : f.x * values.x, by.y == values.y ? f.y : f.y * values.y}));
    const float4 z = lds<float4>(me.address(me.sums(step, C::Z)));
    const float EGh = me.value(times + 2 * CHUNK) * ((z.x + z.y) + (z.z + z.w));
    da = plus(da, {EGh, EGh});
    float dskip = 0.0f;
    if (p.dskip && in.skip_per_channel) {
        const float2 all = plus(plus(pair(C::DSKIP), pair(C::DSKIP + CHUNK)),
                                plus(pair(C::DSKIP + 2 * CHUNK), pair(C::DSKIP + 3 * CHUNK)));
        const int column = me.p0(p, step) + 2 * lane;
        float* to = p.dskip + (me.row(p.slots) * in.H + h) * in.P + column;
        if (column < in.P) to[0] = all.x;
        if (column + 1 < in.P) to[1] = all.y;
    } else if (p.dskip) {
        const float4 warps = lds<float4>(me.address(me.sums(step, C::DSKIP_HEAD)));
        dskip = (warps.x + warps.y) + (warps.z + warps.w);
    }
    const uint32_t kept = me.address(C::HEAD_SUMS + 2 * lane);
    if (tile > 0) {
        da = plus(lds<float2>(kept), da);
        direct = plus(lds<float2>(kept + 4 * CHUNK), direct);
        dskip += me.value(C::HEAD_SUMS + 2 * CHUNK);
    }
    if (tile + 1 < in.tiles) {
        sync_warp();
        sts<float2>(kept, da);
        sts<float2>(kept + 4 * CHUNK, direct);
        if (lane == 0) sts<float>(me.address(C::HEAD_SUMS + 2 * CHUNK), dskip);
        sync_warp();
        return;
    }
    float dA = 0.0f, dbias = 0.0f;
    const float2 slopes = lds<float2>(me.address(times + CHUNK + 2 * lane));
    GT_NO_UNROLL
    for (int i = 0; i < 2; i++) {
        const int t = 2 * lane + i;
        const float da_t = i ? da.y : da.x, direct_t = i ? direct.y : direct.x;
        const Delta delta = {i ? values.y : values.x, i ? slopes.y : slopes.x};
        if (t >= me.tokens) continue;
        /* the slope first: the sum without it may overflow */
        float ddt = fma_rn(delta.slope * A, da_t, delta.slope * direct_t);
        if (delta.slope == 0.0f) ddt = 0.0f;
        dA = fma_rn(delta.value, da_t, dA);
        dbias += ddt;
        if (p.ddt_share) {
            float* const share = p.ddt_share + (me.row(p.slots) * in.H + h) * CHUNK + t;
            if (p.has_share) ddt += *share;
            if (p.leaves_share) *share = ddt;
        }
        if (p.ddt && !p.leaves_share) store_as(p.ddt, in.dt_dtype, offset_of(p.ddt_stride, me.b, me.first + t, h), ddt);
    }
    dA = warp_sum(dA);
    dbias = warp_sum(dbias);
    if (lane > 0) return;
    GT_NO_UNROLL
    for (int i = 0; i < 3; i++) {
        float* const to = i == 0 ? p.dA : i == 1 ? p.dbias : in.skip_per_channel ? nullptr : p.dskip;
        if (to) to[me.row(p.slots) * in.H + h] = i == 0 ? dA : i == 1 ? dbias : dskip;
    }
}

/* ---- the preparing warps ---------------------------------------------------------------------------------------- */

/* Of a step: as soon as its stage is free, copies, for which nobody waits here but with z, to gate dy; then the decay
 * factors of the next step, by warps 0 to 2, and da and ddt of the step that had the stage before, by warp 3. */
template <class C>
GT_DEV void prepare_role(const HopperGradientParams& p, const ChunkGradientBlock<C>& me) {
    const int warp = me.warp - C::CONSUMERS / 32;
    const Problem& in = p.in;
    StepSource<C> source;
    float inverse = 0.0f, dt[2] = {};
    /* of the chunk's tokens warps 0 and 2, of the neighbour's warp 1 */
    const bool makes_factors = warp == 0 || warp == 2 || (warp == 1 && me.makes_state());
    const auto load_step = [&](int step) {
        if (!makes_factors || step >= me.steps) return;
        const int64_t first = offset_of(in.dt_stride, me.b, warp == 1 ? me.neighbour() : me.first, me.head(p, step));
        const int tokens = warp == 1 ? me.neighbour_tokens : me.tokens;
        GT_NO_UNROLL
        for (int i = 0; i < 2; i++) {
            const int t = 2 * here() + i;
            const float x = t < tokens ? load_as(in.dt, in.dt_dtype, first + t * in.dt_stride.t) : 0.0f;
            dt[0] = i ? dt[0] : x;
            dt[1] = x;
        }
    };
    const auto make_factors_of = [&](int step) {
        const int h = me.head(p, step), lane = lane_id();
        const uint32_t addresses = me.address(me.factor(step, 0));
        const float bias = in.dt_bias ? in.dt_bias[h] : 0.0f;
        const int tokens = warp == 1 ? me.neighbour_tokens : me.tokens;
        Delta delta[2] = {};
        GT_NO_UNROLL
        for (int i = 0; i < 2; i++) { /* short code: see the kernel's file */
            Delta x = {0.0f, 0.0f};
            if (2 * lane + i < tokens) x = delta_of(in.rule, (i ? dt[1] : dt[0]) + bias);
            delta[0] = i ? delta[0] : x;
            delta[1] = x;
        }
        const float values[2] = {delta[0].value, delta[1].value};
        if (warp == 1) { /* times what undoes the powers of B's or C's rows */
            neighbour_factors(p, me, step, values);
            const uint32_t weights = me.address(made_cell<C>(step) + 2 * lane);
            const float2 w = lds<float2>(weights), other = lds<float2>(me.address(C::OTHER_INVERSE + 2 * lane));
            sts<float2>(weights, {w.x * other.x, w.y * other.y});
            return;
        }
        if (warp == 2) {
            make_factors<DIAGONAL_FACTORS | SHORT_CODE>(addresses, values, in.A[h]);
            return;
        }
        const uint32_t times = me.address(C::TIMES + step % C::TIMES_COPIES * C::TIMES_FLOATS);
        make_factors<SUM_FACTORS | (C::M_TERMS > 1 ? 0 : GROWTH_FACTOR)>(addresses, values, in.A[h]);
        sts<float2>(times + 8 * lane, {values[0], values[1]});
        sts<float2>(times + 4 * CHUNK + 8 * lane, {delta[0].slope, delta[1].slope});
        float largest = LEAST_DELTA;
        if (C::M_TERMS == 1) {
            largest = fmaxf(largest, fmaxf(fabsf(values[0]), fabsf(values[1])));
            GT_UNROLL
            for (int mask = 1; mask < 32; mask *= 2) largest = fmaxf(largest, shfl_xor(largest, mask));
        }
        sync_warp();
        if (lane == 0) sts<float2>(times + 8 * CHUNK, {me.value(me.factor(step, Factors::PRE + CHUNK - 1)), largest});
    };
    const auto copy_step = [&](int step) {
        const uint32_t full = me.smem + C::FULL + 8 * (step % C::STAGES);
        if (warp == 0) source.load_states(p, me.stage(step), full);
        source.copy(p, me, warp, me.stage(step));
        if constexpr (C::GATED) { /* the lane has read GATES; states have read NEXT_GATES */
            if (step > 0 && me.makes_state() && !me.second)
                mbarrier_wait(me.smem + C::POWERS_MADE + 8 * ((step - 1) % C::STAGES), (step - 1) / C::STAGES % 2);
            source.copy_gates(p, me, warp);
            cp_async_commit();
        }
        cp_async_arrive(full);
        source.advance(p);
    };
    const auto hand_over = [&](int step) {
        const int stage = step % C::STAGES;
        if (warp == 0) {
            mbarrier_arrive_expect(me.smem + C::FULL + 8 * stage, 2 * C::STATE);
        } else {
            if (warp == 3 && lane_id() < 8) sts<float>(me.address(C::STATE_INVERSES + 8 * stage + lane_id()), inverse);
            mbarrier_arrive(me.smem + C::FULL + 8 * stage);
        }
        if (warp == 3 && step + 1 < me.steps) inverse = read_inverse(p, me, step + 1);
    };
    load_step(0);
    wait_for_chain(); /* h, G and their powers */
    if (warp == 3) inverse = read_inverse(p, me, 0);
    source.start(p, me, warp);
    copy_step(0);
    if (warp == 1) bar_sync(STAGED_BARRIER, C::CONSUMERS + 32); /* OTHER_INVERSE */
    if (makes_factors) make_factors_of(0);
    load_step(1);
    GT_NO_UNROLL
    for (int step = 0; step < me.steps + C::STAGES; step++) {
        mbarrier_wait(me.smem + C::EMPTY + 8 * (step % C::STAGES), 1 - step / C::STAGES % 2);
        if (step < me.steps) {
            if (step > 0) copy_step(step);
            if (!C::GATED) hand_over(step);
        }
        if (makes_factors && step + 1 < me.steps) make_factors_of(step + 1);
        load_step(step + 2);
        if (warp == 3 && step >= C::STAGES) finish_hopper_step(p, me, step - C::STAGES);
        if (C::GATED && step < me.steps) {
            cp_async_wait<0>();
            gate_rows(me, warp, step);
            fence_async_proxy();
            hand_over(step);
        }
    }
}

} /* namespace ssd */
} /* namespace gt */

#endif
