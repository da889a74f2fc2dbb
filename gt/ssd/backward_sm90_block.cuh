/* gt/ssd/backward_sm90_block.cuh - ssd backward of a chunk on compute capability 9.0 (backward_sm90.cuh): where
 * everything lies in shared memory, B and C as f16, and the warpgroup that prepares: copies of a step's tiles and of
 * what chunk_factors_kernel has made.  store_M_powers() is of the states' warpgroup. */
#ifndef GT_SSD_BACKWARD_SM90_BLOCK_CUH
#define GT_SSD_BACKWARD_SM90_BLOCK_CUH

#include "../base/bulk.cuh"
#include "../base/wgmma.cuh"
#include "backward_sm90_tokens.cuh"
#include "state.cuh"

namespace gt {
namespace ssd {

/* Tensors of 16 bits for TMA.  States: [slot of a batch element and head][P][columns], in boxes of 64 rows p, a panel
 * each.  x and dy: [B][T][H P], in boxes of 64 tokens. */
struct HopperGradientParams : ChunkGradientParams {
    TensorMap h_map, G_map, x_map, dy_map;
    int has_h, has_G; /* else the map is of something else, and nothing of it is read: zeros */
    int has_rows;     /* x and dy have maps */
    int clears;       /* the sums of chunks that there are not: those of several launches are added as one */
    float *tokens, *sums, *inverses; /* of TokenParams; the latter two from this slab's first on */
};

/* Whether a block takes a place (find_chunk()).  Of packed sequences most places may have no chunk: those behind the
 * last chunk count only where their sums are to be cleared. */
GT_DEV bool has_place(const HopperGradientParams& p, int64_t place) {
    const Problem& in = p.in;
    const bool all = p.clears || !in.sequences.cu_seqlens;
    return place < (all ? in.sequences.B * p.slots : used_slots(in.sequences, CHECKPOINT)) * in.G * 2;
}

template <class T_, int N_, bool GATED_ = false>
struct HopperGradientTraits {
    using T = T_;
    static constexpr bool GATED = GATED_;         /* with z: dy is dy silu(z), see Problem::dy_inverses */
    using D = std::conditional_t<GATED, f16, T>;  /* of dy in its tile, and of M */
    static constexpr int N = N_, PANELS = N / 64; /* a panel: 64 rows of 128 bytes */
    static constexpr int THREADS = 512, CONSUMERS = 384, GROUP = 128;
    static constexpr int PREPARE_REGISTERS = 48, PAIRS_REGISTERS = 144, SUMS_REGISTERS = 160;
    static constexpr int STAGES = N == 64 ? 3 : 2;
    static constexpr int M_BUFFERS = 2, M_TERMS = std::is_same<D, bf16>::value ? 2 : 1;
    static constexpr bool M_HAS_POWER = M_TERMS == 1 && !GATED; /* one of the chunk and head */
    static constexpr bool M_HAS_SKIP =
        std::is_same<T, bf16>::value; /* f16 would round what dx consists of for the most */
    /* bytes */
    static constexpr int PANEL = CHUNK * 128, STATE = PANELS * PANEL;
    static constexpr int B = 0, C = B + STATE, OTHER = C + STATE; /* the neighbour's B or C */
    static constexpr int STAGE0 = OTHER + STATE;
    static constexpr int X = 0, DY = X + PANEL, NEXT = DY + PANEL, H = NEXT + PANEL, G = H + STATE; /* of a stage */
    static constexpr int STAGE = G + STATE;
    static constexpr int M = STAGE0 + STAGES * STAGE, OUT = M + M_BUFFERS * M_TERMS * PANEL;
    static constexpr int FLOATS = OUT + PANEL;
    /* at the end, over the stages: W for dC, W for dB, rows of dC, of dB */
    static constexpr int W = STAGE0, ROWS = W + 2 * PANEL;
    /* floats, from FLOATS */
    static constexpr int COPIES = STAGES;
    static constexpr int FACTORS = 0;                              /* [STAGES], of ChunkTokens */
    static constexpr int MADE = FACTORS + COPIES * Factors::COUNT; /* [STAGES]: WEIGHTS, KEPT of the neighbour's */
    static constexpr int MADE_COPIES = COPIES, MADE_FLOATS = ChunkTokens::MADE_COUNT;
    static constexpr int STATE_INVERSES = MADE + MADE_COPIES * MADE_FLOATS; /* [STAGES][h 4, G 4] */
    static constexpr int B_INVERSE = STATE_INVERSES + 8 * STAGES, C_INVERSE = B_INVERSE + CHUNK;
    static constexpr int OTHER_INVERSE = C_INVERSE + CHUNK;
    static constexpr int POWER = OTHER_INVERSE + CHUNK; /* [2][64]: at the end, of dC and dB */
    static constexpr int S_MOST = POWER + 2 * CHUNK, W_MOST = S_MOST + 4;
    /* GATED, [STAGES][64]: what undoes the powers of dy's rows, and of NEXT's where that is dy; the powers of M's
     * columns */
    static constexpr int DY_INVERSE = W_MOST + 4;
    static constexpr int NEXT_INVERSE = DY_INVERSE + (GATED ? STAGES * CHUNK : 0);
    static constexpr int M_POWER = NEXT_INVERSE + (GATED ? STAGES * CHUNK : 0);
    static constexpr int FLOATS_COUNT = M_POWER + (GATED ? STAGES * CHUNK : 0);
    /* mbarriers, in bytes */
    static constexpr int FULL = FLOATS + 4 * FLOATS_COUNT, EMPTY = FULL + 8 * STAGES;
    static constexpr int STATE_MADE = EMPTY + 8 * STAGES, M_FULL = STATE_MADE + 8 * STAGES;
    static constexpr int M_EMPTY = M_FULL + 8 * M_BUFFERS, POWERS_MADE = M_EMPTY + 8 * M_BUFFERS;
    static constexpr int PLACE = POWERS_MADE + (GATED ? 8 * STAGES : 0); /* see init_barriers() */
    static constexpr int SMEM = PLACE + 8;
    static_assert(MADE % 4 == 0 && STATE_INVERSES % 4 == 0 && W_MOST % 4 == 0, "read by 16 bytes");
    static_assert(FULL % 8 == 0 && ROWS + 2 * STATE <= M && SMEM <= 227 * 1024, "fits sm_90");
};

/* What a block works on. */
template <class C>
struct HopperBlock : ChunkGradientBlock<C> {
    float* sums; /* of step 0 */
    int sums_count;
    bool by_maps; /* x and dy come by TMA: rows of a box that are not the chunk's lie past the tensor's end */

    GT_METHOD HopperBlock(const HopperGradientParams& p, uint32_t first_byte, int place)
        : ChunkGradientBlock<C>(find_chunk<C, uint32_t>(p, place)) {
        this->smem = first_byte;
        sums_count = chunk_sums(p.in);
        sums = p.sums + first_step(p) * sums_count;
        const bool whole = this->tokens == CHUNK && this->neighbour_tokens % CHUNK == 0;
        by_maps = p.has_rows && (whole || !p.in.sequences.cu_seqlens);
    }
    /* The number of step 0 among those of all blocks. */
    GT_METHOD int64_t first_step(const HopperGradientParams& p) const {
        return (this->row(p.slots) * p.in.H + this->g * this->heads) * p.in.tiles;
    }
    GT_METHOD float* step_sums(int step) const { return sums + step * sums_count; }
};

/* Named barriers: of B, C and OTHER, for all that multiply; of the pairs; of the state that is made; of S_MOST, for
 * pairs and inputs; of all that multiply, around W. */
enum { STAGED_BARRIER = 1, PAIRS_BARRIER, MADE_BARRIER, BOUND_BARRIER, MULTIPLYING_BARRIER };

/* ---- B and C ---------------------------------------------------------------------------------------------------- */

/* 64 rows of B or C as f16 panels, a power of two a row; inverses[row] <- what undoes it.  A warpgroup, 16 rows a
 * warp. */
template <class C>
GT_DEV void stage_group(const HopperBlock<C>& me, const Problem& in, const void* data, gt_stride stride, int64_t first,
                        int tokens, uint32_t tile, int inverses) {
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

/* C by pairs, B by inputs, the neighbour's B or C by states; zeros in M, whose blocks with s > t nobody writes. */
template <class C>
GT_DEV void stage_groups(const ChunkGradientParams& p, const HopperBlock<C>& me) {
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
    bar_sync(STAGED_BARRIER, C::CONSUMERS);
}

/* ---- the preparing warps: copies -------------------------------------------------------------------------------- */

/* A warp's 16 rows of x, dy, z or the neighbour's: a lane has row lane / 8 of every four, piece lane % 8, from `from`
 * on, and steps of `pitch` elements a row.  rows, columns: that there are; others become zeros. */
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

/* NEXT is the neighbour's dy, not x. */
template <class C>
GT_DEV bool next_is_dy(const HopperBlock<C>& me) {
    return me.makes_state() && !me.second;
}

/* Where a step is in the tensors; advance() goes to the next.  x, dy: the lane's first row, in elements, where they do
 * not come by maps. */
template <class C>
struct StepSource {
    int64_t x, dy;
    int tile, head, slot;

    GT_METHOD void start(const HopperGradientParams& p, const HopperBlock<C>& me, int warp) {
        const Problem& in = p.in;
        const int lane = lane_id(), row = 16 * warp + lane / 8, piece = lane % 8;
        head = me.g * me.heads;
        slot = (int)((me.b * in.H + head) * p.slots) + me.slot;
        tile = 0;
        if (me.by_maps) return;
        x = offset_of(in.x_stride, me.b, me.first + row, head) + 8 * piece;
        dy = offset_of(in.dy_stride, me.b, me.first + row, head) + 8 * piece;
    }
    /* Starts all bulk copies of the step, by one warp: h, G, x, dy and NEXT where they have maps, factors of the chunk
     * and of its neighbour, what undoes the states' powers and those of dy.  What is not there comes as zeros. */
    GT_METHOD void load(const HopperGradientParams& p, const HopperBlock<C>& me, int step, uint32_t full) const {
        const uint32_t stage = me.stage(step);
        GT_NO_UNROLL
        for (int i = 0; i < 2 * C::PANELS; i++) {
            const bool is_h = i < C::PANELS;
            tile_load(stage + C::H + i * C::PANEL, is_h ? p.h_map : p.G_map, 64 * (i % C::PANELS), tile * TILE_P,
                      (is_h ? p.has_h : p.has_G) ? slot : -1, full);
        }
        if (me.by_maps) {
            const int tiles = me.makes_state() ? 3 : 2;
            GT_NO_UNROLL
            for (int i = 0; i < tiles; i++) { /* X, DY, and NEXT: 64 tokens before, or behind */
                const bool is_x = i == 0 || (i == 2 && me.second);
                tile_load(stage + C::X + i * C::PANEL, is_x ? p.x_map : p.dy_map, head * p.in.P + tile * TILE_P,
                          (int)(i == 2 ? me.neighbour() : me.first), me.b, full);
            }
        }
        const float* const tokens = p.tokens + (me.row(p.slots) * p.in.H + head) * ChunkTokens::COUNT;
        bulk_load(me.address(me.factor(step, 0)), tokens, 4 * Factors::COUNT, full);
        if (me.makes_state())
            bulk_load(me.address(made_cell<C>(step)),
                      tokens + (me.second ? -1 : 1) * p.in.H * ChunkTokens::COUNT + ChunkTokens::WEIGHTS,
                      4 * ChunkTokens::MADE_COUNT, full);
        bulk_load(me.address(C::STATE_INVERSES + 8 * (step % C::STAGES)), p.inverses + (me.first_step(p) + step) * 8,
                  32, full);
        if constexpr (C::GATED) {
            const float* const inverses = p.in.dy_inverses + inverses_index(p.in, slot, me.second, tile);
            bulk_load(me.address(C::DY_INVERSE + CHUNK * (step % C::STAGES)), inverses, 4 * CHUNK, full);
            if (next_is_dy(me)) /* of the second chunk */
                bulk_load(me.address(C::NEXT_INVERSE + CHUNK * (step % C::STAGES)), inverses + p.in.tiles * CHUNK,
                          4 * CHUNK, full);
        }
    }
    /* Of load(). */
    GT_METHOD static uint32_t bytes(const HopperBlock<C>& me) {
        const int tiles = !me.by_maps ? 0 : me.makes_state() ? 3 : 2;
        return 2 * C::STATE + tiles * C::PANEL + 4 * Factors::COUNT + 32 +
               (me.makes_state() ? 4 * ChunkTokens::MADE_COUNT : 0) + (C::GATED ? 4 * CHUNK : 0) +
               (C::GATED && next_is_dy(me) ? 4 * CHUNK : 0);
    }
    /* Without maps: starts the copies of a warp's rows of x, dy and NEXT. */
    GT_METHOD void copy(const ChunkGradientParams& p, const HopperBlock<C>& me, int warp, uint32_t stage) const {
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
    GT_METHOD void advance(const ChunkGradientParams& p) {
        const Problem& in = p.in;
        if (++tile < in.tiles) {
            x += TILE_P, dy += TILE_P;
        } else {
            head++;
            const int columns = (in.tiles - 1) * TILE_P;
            x += in.x_stride.h - columns, dy += in.dy_stride.h - columns;
            slot += (int)p.slots;
            tile = 0;
        }
    }
};

/* ---- powers ------------------------------------------------------------------------------------------------------ */

/* The step's largest |Delta|, or LEAST_DELTA. */
template <class C>
GT_DEV float largest_delta(const HopperBlock<C>& me, int step) {
    return me.value(me.factor(step, ChunkTokens::LARGEST));
}

/* What undoes the power of dy's row t. */
template <class C>
GT_DEV float dy_inverse(const HopperBlock<C>& me, int step, int t) {
    if constexpr (C::GATED) return me.value(C::DY_INVERSE + CHUNK * (step % C::STAGES) + t);
    return 1.0f;
}

/* The powers of the columns s of M_ts = S_ts L_ts Delta_s + Dskip (t = s) times what undoes dy_t.  No t >= s exceeds
 * f16 then; nor does U, which has these powers, too, exceed 2^60 by what G gives.  One warp. */
template <class C>
GT_DEV void store_M_powers(const HopperBlock<C>& me, int step, float skip) {
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

/* ---- the preparing warps ---------------------------------------------------------------------------------------- */

/* A step: as soon as its stage is free, its copies.  Nobody waits for them here.  By maps it is the work of one warp,
 * which arrives at FULL alone; else each thread arrives twice, once by its cp_async. */
template <class C>
GT_DEV void prepare_role(const HopperGradientParams& p, const HopperBlock<C>& me) {
    const int warp = me.warp - C::CONSUMERS / 32;
    if (me.by_maps && warp > 0) return;
    StepSource<C> source;
    wait_for_chain(); /* h, G and their powers; factors */
    source.start(p, me, warp);
    GT_NO_UNROLL
    for (int step = 0; step < me.steps; step++) {
        const int stage = step % C::STAGES;
        const uint32_t full = me.smem + C::FULL + 8 * stage;
        mbarrier_wait(me.smem + C::EMPTY + 8 * stage, 1 - step / C::STAGES % 2);
        if (warp == 0) source.load(p, me, step, full);
        if (!me.by_maps) {
            source.copy(p, me, warp, me.stage(step));
            cp_async_arrive(full);
        }
        source.advance(p);
        if (warp == 0)
            mbarrier_arrive_expect(full, source.bytes(me));
        else
            mbarrier_arrive(full);
    }
}

} /* namespace ssd */
} /* namespace gt */

#endif
