/* gt/ssd/sm90/gradients_block.cuh - what all roles of chunk_gradient_hopper_kernel share (gradients.cuh): records of
 * tokens and sums in memory, the layout of shared memory, the current place, B and C as f16, the role prepare, and the
 * rows of a warp. */
#ifndef GT_SSD_SM90_GRADIENTS_BLOCK_CUH
#define GT_SSD_SM90_GRADIENTS_BLOCK_CUH

#include "../../base/bulk.cuh"
#include "../../base/ring.cuh"
#include "../../base/wgmma.cuh"
#include "../problem.cuh"
#include "../mma/chunk.cuh"

namespace gt {
namespace ssd {

/* ---- records of tokens ------------------------------------------------------------------------------------------ */

/* The record of chunk_factors_kernel for a chunk and head, as offsets in floats.  With z there is one record for each
 * tile.
 *
 * The first part serves the neighbour, too, which is the other chunk of the slot.  The neighbour advances a state
 * through this chunk's tokens, with a weight for each token.  The weights are PRE if this chunk is the second one of
 * the slot, and WEIGHTS = Delta SUF if it is the first.  After either array comes exp(sum a), by which the neighbour
 * multiplies its old state.
 *
 * Next come the factors of mma/chunk.cuh.  SQUARE replaces DIAGONAL: each block of 16 tokens has one square of 8 x 8.
 * Row t of the square has L_ts, s <= t, of the block's first half.  Column t has L_ts, s < t, of the second half.
 * AFTER: the decay of all blocks after a block.
 *
 * With POWERS, M is f16, and the record also holds Dskip if it is per head.  For each block of 16 t it holds the
 * inverse of the power of dy, and a bound b such that b * max|S| >= |M|.  The inverse is also multiplied into all
 * factors and weights that apply to rows of dy. */
template <bool POWERS>
struct ChunkTokens {
    static constexpr int PRE = 0, KEPT = CHUNK, SKIP = KEPT + 1, GROWTH = KEPT + 2;
    static constexpr int WEIGHTS = KEPT + 4, SUF = WEIGHTS; /* WEIGHTS overwrites SUF */
    static constexpr int MADE_COUNT = CHUNK + 4;            /* floats that the neighbour reads, from PRE or from WEIGHTS
                                                             * on */
    static constexpr int DY_INVERSE = 2 * MADE_COUNT, BOUND = DY_INVERSE + BLOCKS;
    static constexpr int OWN = POWERS ? BOUND + BLOCKS : DY_INVERSE; /* only the chunk's own step reads the rest */
    static constexpr int DELTA = OWN, U = DELTA + CHUNK, V = U + CHUNK, HALF = V + CHUNK, SQUARE = HALF + CHUNK;
    static constexpr int BETWEEN = SQUARE + BLOCKS * 64;
    static constexpr int AFTER = BETWEEN + 4, COUNT = AFTER + BLOCKS;
    static_assert(COUNT % 4 == 0 && WEIGHTS % 4 == 0, "copied by 16 bytes");

    /* If the float at offset `at` applies to rows of dy, returns the index of their block of 16 rows; else returns
     * -1. */
    GT_METHOD static int block_of_dy(int at) {
        if (at < KEPT) return at / BLOCK;
        if (at >= U && at < V) return (at - U) / BLOCK;
        if (at >= HALF && at < SQUARE) /* HALF of a block's last 8 tokens applies to rows t, of the first 8 to columns
                                        * s */
            return (at - HALF) % BLOCK < BLOCK / 2 ? -1 : (at - HALF) / BLOCK;
        return at >= SQUARE && at < BETWEEN ? (at - SQUARE) / 64 : -1;
    }
};

/* Sums for da, ddt and dDskip of a slab, chunk, head and tile, as offsets in floats.  In the sums for dDskip, dy still
 * has its powers.  PAIRS [i][k] has one of two sums.  If block i is before k's block: Gamma of row k over s in block i.
 * Otherwise: Gamma / Delta of column k over t in block i + 1, which is after k's block. */
struct ChunkSums {
    static constexpr int PAIRS = 0, DIAGONAL = 3 * CHUNK;       /* [k] */
    static constexpr int E = DIAGONAL + CHUNK, F = E + CHUNK;   /* E: [t]; F: [s] */
    static constexpr int NEAR = F + CHUNK;                      /* [s]: Gamma / Delta over t in the block of s */
    static constexpr int Z = NEAR + CHUNK, DSKIP_HEAD = Z + 4;  /* [4 warps] each.  Z: <G, h>, without exp(sum a);
                                                                 * DSKIP_HEAD: <dy, x> */
    static constexpr int DSKIP = DSKIP_HEAD + 4, COUNT = DSKIP; /* if Dskip is per channel: [4 warps][p] */
};
GT_HD int chunk_sums(const Problem& in) { return ChunkSums::COUNT + (in.skip_per_channel ? 4 * CHUNK : 0); }

/* If every tile has its own record and there is one slab, ChunkSums overwrite ChunkTokens from OWN on.  There,
 * ChunkTokens has factors that only the chunk's own step reads.  The step has copied them to shared memory before it
 * stores sums.  With Dskip per channel the sums are longer than these factors, and plan_tokens() makes records
 * longer. */
static_assert(ChunkTokens<false>::OWN + ChunkSums::COUNT <= ChunkTokens<false>::COUNT, "room for them");

/* The factor by which U is multiplied: Delta, unless Delta is too small to divide it out again. */
constexpr float LEAST_DELTA = 0x1p-20f;
GT_DEV float factor_of_U(float delta) { return fabsf(delta) > LEAST_DELTA ? delta : 1.0f; }

/* ---- shared memory, and where a block stands -------------------------------------------------------------------- */

/* The parameters of the kernel, with tensor maps for TMA.  States have the shape [slot of a batch element and
 * head][P][columns], and a box is a panel: 64 rows p by 64 columns.  x and dy have the shape [B][T][H P], and a box is
 * 64 tokens by 64 rows p. */
struct HopperGradientParams : ChunkGradientParams {
    TensorMap h_map, G_map, x_map, dy_map;
    int has_h, has_G; /* 0: there are no states; the kernel then reads boxes outside the map, which are zeros */
    int has_rows;     /* not 0: x and dy have maps */
    int heads, steps; /* heads of a group; steps of a place */
    int clears;       /* not 0: partial sums of chunk slots without a chunk must be cleared, because reduce_rows() adds
                       * all rows */
    int in_twos;      /* not 0: g lies in the memory of dx; a first chunk reads g of the second, so one block takes
                  * both */
    int records, record_count, sums_count; /* as in TokenParams */
    float *tokens, *sums, *inverses;       /* as in TokenParams; sums and inverses begin at this slab */
};

/* Whether blocks take a place (find_chunk()).  With packed sequences most places may have no chunk.  Blocks take places
 * after the last chunk only if their sums must be cleared. */
GT_DEV bool has_place(const HopperGradientParams& p, int64_t place) {
    const Problem& in = p.in;
    const bool all = p.clears || !in.sequences.cu_seqlens;
    return place < (all ? in.sequences.B * p.slots : used_slots(in.sequences, CHECKPOINT)) * in.G * 2;
}

template <class T_, int N_, class D_>
struct HopperGradientTraits {
    using T = T_;
    using D = D_;                                 /* the type of dy in its tile, and of M: T, or f16 with z
                                                   * (Problem::dy_inverses) */
    static constexpr int N = N_, PANELS = N / 64; /* a panel: 64 rows of 128 bytes */
    static constexpr int THREADS = 512, CONSUMER_THREADS = 384, WARPGROUP = 128;
    static constexpr int PREPARE_REGISTERS = 48, PAIRS_REGISTERS = 144, SUMS_REGISTERS = 160;
    static constexpr int STAGES = N == 64 ? 3 : 2;
    static constexpr int GROUP_COPIES = N == 64 ? 2 : 1; /* copies of B, C and OTHER, which places use in turn */
    static constexpr int M_BUFFERS = 2, M_TERMS = std::is_same<D, bf16>::value ? 2 : 1, M_PANELS = 2;
    static constexpr bool M_HAS_POWER = M_TERMS == 1; /* M has a power for each 16 columns: power_of_M() */
    using Tokens = ChunkTokens<M_HAS_POWER>;
    static constexpr bool PAIRS_MAKE_E = N > 64; /* the role that computes E: pairs, or inputs, whose products are short
                                                  * if N = 64 */
    static constexpr bool M_HAS_SKIP = std::is_same<T, bf16>::value; /* f16 M would round the main part of dx */
    /* offsets and sizes in bytes */
    static constexpr int PANEL = CHUNK * 128, STATE = PANELS * PANEL;
    static constexpr int B = 0, C = B + STATE, OTHER = C + STATE; /* the neighbour's B or C */
    static constexpr int TILES = OTHER + STATE, STAGE0 = GROUP_COPIES * TILES;
    static constexpr int X = 0, DY = X + PANEL, NEXT = DY + PANEL, H = NEXT + PANEL, G = H + STATE; /* in a stage */
    static constexpr int STAGE = G + STATE;
    /* M: two buffers; a buffer has the terms of M, or W for dC and W for dB */
    static constexpr int M = STAGE0 + STAGES * STAGE, OUT = M + M_BUFFERS * M_PANELS * PANEL;
    static constexpr int FLOATS = OUT + PANEL;
    /* offsets in floats from FLOATS on */
    static constexpr int COPIES = STAGES;
    static constexpr int FACTORS = 0;                             /* [STAGES], each a ChunkTokens */
    static constexpr int MADE = FACTORS + COPIES * Tokens::COUNT; /* [STAGES]: weights and KEPT of the neighbour's
                                                                   * tokens */
    static constexpr int MADE_COPIES = COPIES, MADE_FLOATS = Tokens::MADE_COUNT;
    static constexpr int STATE_INVERSES = MADE + MADE_COPIES * MADE_FLOATS; /* [STAGES][h 4, G 4] */
    static constexpr int B_INVERSE = STATE_INVERSES + 8 * STAGES, C_INVERSE = B_INVERSE + CHUNK; /* [GROUP_COPIES] */
    static constexpr int OTHER_INVERSE = C_INVERSE + CHUNK, INVERSES = 3 * CHUNK;
    static constexpr int POWER = B_INVERSE + GROUP_COPIES * INVERSES; /* [2][64]: powers of dC and dB, for W */
    static constexpr int S_MOST = POWER + 2 * CHUNK; /* [2 places in turn][blocks of s][blocks of t]: the largest |S| */
    static constexpr int W_MOST = S_MOST + 2 * BLOCKS * BLOCKS, FLOATS_COUNT = W_MOST + 4;
    /* offsets of mbarriers, in bytes */
    static constexpr int FULL = FLOATS + 4 * FLOATS_COUNT, EMPTY = FULL + 8 * STAGES;
    static constexpr int STATE_MADE = EMPTY + 8 * STAGES, M_FULL = STATE_MADE + 8 * STAGES;
    static constexpr int M_EMPTY = M_FULL + 8 * M_BUFFERS, GROUP_FULL = M_EMPTY + 8 * M_BUFFERS;
    static constexpr int GROUP_EMPTY = GROUP_FULL + 8 * GROUP_COPIES;
    static constexpr int S_MADE = GROUP_EMPTY + 8 * GROUP_COPIES, SHARES_MADE = S_MADE + 8;
    static constexpr int W_FULL = SHARES_MADE + 8, W_EMPTY = W_FULL + 8, PLACE_FULL = W_EMPTY + 8;
    /* A ring of records of places.  PLACES is large enough, because the role prepare runs at most STAGES steps ahead of
     * the readers of the oldest record. */
    static constexpr int PLACES = 8, PLACE_BYTES = 64;
    static constexpr int PLACE = (PLACE_FULL + 8 * PLACES + 15) / 16 * 16;
    static constexpr int SMEM = PLACE + PLACES * PLACE_BYTES;
    using Stages = Ring<STAGES, FULL, EMPTY>;
    using States = Ring<STAGES, STATE_MADE>; /* EMPTY of Stages also frees it */
    using Buffers = Ring<M_BUFFERS, M_FULL, M_EMPTY>;
    using Groups = Ring<GROUP_COPIES, GROUP_FULL, (GROUP_COPIES > 1 ? GROUP_EMPTY : NO_BARRIER)>;
    using Places = Ring<PLACES, PLACE_FULL>;
    using WForStates = Ring<1, W_FULL, W_EMPTY>; /* W for dB */
    static_assert(MADE % 4 == 0 && STATE_INVERSES % 4 == 0 && W_MOST % 4 == 0, "read by 16 bytes");
    static_assert(FULL % 8 == 0 && SMEM <= 227 * 1024, "fits sm_90");
};

/* A place's chunk: its first token, batch element and number of tokens. */
struct PlaceChunk {
    int64_t first;
    int b, tokens;
};

/* Place `number` of a block.  find_place() has written its record to shared memory.  Stages, buffers of M and parities
 * are counted over all places of a block.  before: the number of steps of earlier places, modulo 2 * STAGES.  M_before:
 * how often earlier places have handed M or W on, modulo 4. */
template <class C>
struct HopperBlock : ChunkPlace {
    float* sums; /* sums of step 0 */
    int sums_count;
    int number, before, M_before;
    bool by_maps; /* TMA loads x and dy; any rows of a box after the chunk's last token then lie past the tensor's end,
                   * and become zeros */

    /* Waits for the record.  A record with 0 tokens means that no place is left. */
    GT_METHOD HopperBlock(const HopperGradientParams& p, uint32_t first_byte, int place_number) : number(place_number) {
        this->smem = first_byte;
        this->warp = shfl_idx(warp_id(), 0);
        typename C::Places{this->smem}.wait_full(number);
        const uint32_t record = this->record();
        const uint4 a = lds<uint4>(record), b = lds<uint4>(record + 16), c = lds<uint4>(record + 32);
        this->first = (int64_t)((uint64_t)a.y << 32 | a.x);
        this->b = (int)a.z, this->slot = (int)a.w;
        const int64_t step0 = (int64_t)((uint64_t)b.y << 32 | b.x);
        this->tokens = (int)b.z, this->neighbour_tokens = (int)b.w;
        this->g = (int)c.x, before = (int)c.y, M_before = (int)c.z, this->second = c.w & 1, by_maps = c.w & 2;
        this->heads = p.heads, this->steps = p.steps;
        sums_count = p.sums_count;
        sums = p.sums + step0 * sums_count;
    }
    GT_METHOD uint32_t address(int offset) const { return this->smem + C::FLOATS + 4 * offset; }
    GT_METHOD float value(int offset) const { return lds<float>(address(offset)); }
    GT_METHOD uint32_t record() const { return this->smem + C::PLACE + number % C::PLACES * C::PLACE_BYTES; }
    GT_METHOD int place() const { return lds<int>(record() + 48); }
    /* Reads the record again, so that registers need not keep it. */
    GT_METHOD PlaceChunk chunk() const {
        const uint4 a = lds<uint4>(record());
        return {(int64_t)((uint64_t)a.y << 32 | a.x), (int)a.z, lds<int>(record() + 24)};
    }
    /* The index of step 0, counted over all steps of all chunk slots. */
    GT_METHOD int64_t first_step(const HopperGradientParams& p) const {
        return (this->row(p.slots) * p.in.H + this->g * p.heads) * p.in.tiles;
    }
    GT_METHOD float* step_sums(int step) const { return sums + step * sums_count; }

    GT_METHOD typename C::Stages stages() const { return {this->smem}; }
    GT_METHOD typename C::States states() const { return {this->smem}; }
    GT_METHOD typename C::Buffers buffers() const { return {this->smem}; }
    GT_METHOD typename C::Groups groups() const { return {this->smem}; }
    GT_METHOD typename C::WForStates W_for_states() const { return {this->smem}; }
    /* in_stages(): the number by which stages() and states() count a step.  in_buffers(): the number by which buffers()
     * counts the step's M.  W counts as the M of one more step. */
    GT_METHOD uint32_t in_stages(int step) const { return (uint32_t)(before + step); }
    GT_METHOD int in_buffers(int step) const { return M_before + step; }
    GT_METHOD int stage_of(int step) const { return in_stages(step) % C::STAGES; }
    GT_METHOD uint32_t stage(int step) const { return this->smem + C::STAGE0 + stage_of(step) * C::STAGE; }
    GT_METHOD int factor(int step, int offset) const { return C::FACTORS + stage_of(step) * C::Tokens::COUNT + offset; }
    /* The inverse of the power of dy in a block of 16 rows.  bf16 has no power. */
    GT_METHOD float dy_inverse(int step, int block) const {
        if constexpr (!C::M_HAS_POWER) return 1.0f;
        return this->value(factor(step, C::Tokens::DY_INVERSE) + block);
    }
    GT_METHOD int made_cell(int step) const { return C::MADE + stage_of(step) * C::MADE_FLOATS; }
    GT_METHOD uint32_t M(int step) const {
        return this->smem + C::M + in_buffers(step) % C::M_BUFFERS * C::M_PANELS * C::PANEL;
    }
    /* tile_of(): address of the tile B, C or OTHER.  inverses(): offset of the inverses of its rows' powers. */
    GT_METHOD uint32_t tile_of(int offset) const { return this->smem + number % C::GROUP_COPIES * C::TILES + offset; }
    GT_METHOD int inverses(int offset) const { return number % C::GROUP_COPIES * C::INVERSES + offset; }
    GT_METHOD int S_most(int block) const { /* computed at each use; otherwise the offset would be spilled */
        return C::S_MOST + (made_here(number) % 2 * BLOCKS + block) * BLOCKS;
    }
};

/* Named barriers of the warpgroups with the roles pairs, inputs and states. */
enum { PAIRS_BARRIER = 1, INPUTS_BARRIER, MADE_BARRIER };

/* ---- B and C ---------------------------------------------------------------------------------------------------- */

/* Indices of the tiles B, C and OTHER.  OTHER is the neighbour's B or C. */
enum { TILE_B, TILE_C, TILE_OTHER };

/* A warp's 16 rows of B, C or OTHER, in registers.  The warp loads them and stores them to panels as f16, with a power
 * of two for each row.  The inverses of the powers are stored, too.  OTHER is also divided by WEIGHT_RANGE. */
template <class C>
struct PlaceRows {
    uint4 x[4][C::PANELS];

    /* Calls take(exists, address, k, i) for every piece of the lane: rows 4 k further, panel i. */
    template <class Take>
    GT_METHOD static void each(const Problem& in, const HopperBlock<C>& me, int tile, int part, const Take& take) {
        const bool is_B = tile == TILE_B || (tile == TILE_OTHER && me.second);
        const void* const data = is_B ? in.Bm : in.Cm;
        const gt_stride& stride = is_B ? in.Bm_stride : in.Cm_stride;
        const int64_t first = tile == TILE_OTHER ? me.neighbour() : me.first;
        const int tokens = tile == TILE_OTHER ? me.neighbour_tokens : me.tokens;
        const int lane = lane_id(), row0 = 16 * part + lane / 8, piece = lane % 8;
        const uint16_t* from =
            static_cast<const uint16_t*>(data) + offset_of(stride, me.b, first, me.g) + row0 * stride.t + 8 * piece;
        GT_UNROLL
        for (int k = 0; k < 4; k++) {
            GT_UNROLL
            for (int i = 0; i < C::PANELS; i++)
                take(row0 + 4 * k < tokens && 64 * i + 8 * piece < in.columns, from + 4 * k * stride.t + 64 * i, k, i);
        }
    }
    GT_METHOD static uint32_t address(const HopperBlock<C>& me, int tile, int part, int k, int i) {
        const int row = 16 * part + lane_id() / 8 + 4 * k;
        return me.tile_of(tile * C::STATE) + i * C::PANEL + panel_at<128>(row, lane_id() % 8);
    }
    GT_METHOD void load(const Problem& in, const HopperBlock<C>& me, int tile, int part) {
        each(in, me, tile, part, [&](bool exists, const uint16_t* from, int k, int i) {
            x[k][i] = {0, 0, 0, 0};
            if (exists) x[k][i] = ldg<uint4>(from);
        });
    }
    /* Starts to copy the rows, unconverted, to where store() puts them.  So no registers wait for the loads.  The lane
     * then reads its pieces by find(). */
    GT_METHOD static void copy(const Problem& in, const HopperBlock<C>& me, int tile, int part) {
        each(in, me, tile, part, [&](bool exists, const uint16_t* from, int k, int i) {
            cp_async<16>(address(me, tile, part, k, i), exists ? static_cast<const void*>(from) : in.Bm,
                         exists ? 16 : 0);
        });
    }
    GT_METHOD void find(const HopperBlock<C>& me, int tile, int part) {
        GT_UNROLL
        for (int k = 0; k < 4; k++) {
            GT_UNROLL
            for (int i = 0; i < C::PANELS; i++) x[k][i] = lds<uint4>(address(me, tile, part, k, i));
        }
    }
    GT_METHOD void store(const HopperBlock<C>& me, int tile, int part) const {
        using T = typename C::T;
        const int lane = lane_id(), row0 = 16 * part + lane / 8, piece = lane % 8;
        const int inverses = me.inverses(C::B_INVERSE + tile * CHUNK);
        const float less = tile == TILE_OTHER ? 1.0f / WEIGHT_RANGE : 1.0f;
        GT_UNROLL
        for (int k = 0; k < 4; k++) {
            const int row = row0 + 4 * k;
            const Power power = power_of(row_maximum<T, 8>(larger_of<T>(x[k])));
            const float value = power.value * less;
            GT_UNROLL
            for (int i = 0; i < C::PANELS; i++)
                sts<uint4>(address(me, tile, part, k, i),
                           {scaled_f16<T>(x[k][i].x, value), scaled_f16<T>(x[k][i].y, value),
                            scaled_f16<T>(x[k][i].z, value), scaled_f16<T>(x[k][i].w, value)});
            if (piece == 0) sts<float>(me.address(inverses + row), inverse_of(value));
        }
    }
};

/* If B, C and OTHER have one copy, the roles pairs, inputs and states call this function, each for one tile. */
template <class C>
GT_DEV void convert_group_rows(const Problem& in, const HopperBlock<C>& me, int tile) {
    if (me.tokens > 0 && (tile < TILE_OTHER || me.makes_state())) {
        PlaceRows<C> rows;
        rows.load(in, me, tile, me.warp % 4);
        rows.store(me, tile, me.warp % 4);
    }
    fence_async_proxy();
    me.groups().fill(me.number);
}

/* ---- the role prepare: copies ----------------------------------------------------------------------------------- */

/* Starts to copy a warp's 16 rows of x, dy or NEXT.  A lane copies piece lane % 8 of every fourth row, from row lane /
 * 8 on.  from: the lane's first piece.  pitch: elements from row to row.  rows, columns: how many exist in the tile;
 * the others become zeros. */
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

/* Where a step's data lie in global memory.  advance() goes to the next step.  x, dy: offsets of the lane's first
 * piece, used without maps. */
template <class C>
struct StepSource {
    int64_t x, dy;
    const float* tokens; /* ChunkTokens of the head, or with z of the tile */
    int tile, head, slot;

    GT_METHOD void start(const HopperGradientParams& p, const HopperBlock<C>& me, int warp) {
        const Problem& in = p.in;
        const int lane = lane_id(), row = 16 * warp + lane / 8, piece = lane % 8;
        head = me.g * me.heads;
        slot = (int)((me.b * in.H + head) * p.slots) + me.slot;
        tile = 0;
        tokens = p.tokens + (me.row(p.slots) * in.H + head) * p.records * p.record_count;
        if (me.by_maps) return;
        x = offset_of(in.x_stride, me.b, me.first + row, head) + 8 * piece;
        dy = offset_of(in.dy_stride, me.b, me.first + row, head) + 8 * piece;
    }
    /* One warp starts all bulk copies of a step: h and G; x, dy and NEXT if they have maps; factors of the chunk and
     * weights of the neighbour; the inverses of the states' powers.  Missing states and rows become zeros. */
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
            for (int i = 0; i < tiles; i++) { /* X, DY, and NEXT, which is 64 tokens before or after */
                const bool is_x = i == 0 || (i == 2 && me.second);
                tile_load(stage + C::X + i * C::PANEL, is_x ? p.x_map : p.dy_map, head * p.in.P + tile * TILE_P,
                          (int)(i == 2 ? me.neighbour() : me.first), me.b, full);
            }
        }
        bulk_load(me.address(me.factor(step, 0)), tokens, 4 * C::Tokens::COUNT, full);
        if (me.makes_state())
            bulk_load(me.address(me.made_cell(step)),
                      tokens + (me.second ? -1 : 1) * p.in.H * p.records * p.record_count +
                          (me.second ? C::Tokens::WEIGHTS : C::Tokens::PRE),
                      4 * C::Tokens::MADE_COUNT, full);
        bulk_load(me.address(C::STATE_INVERSES + 8 * (me.stage_of(step))), p.inverses + (me.first_step(p) + step) * 8,
                  32, full);
    }
    /* The number of bytes that load() copies. */
    GT_METHOD static uint32_t bytes(const HopperBlock<C>& me) {
        const int tiles = !me.by_maps ? 0 : me.makes_state() ? 3 : 2;
        return 2 * C::STATE + tiles * C::PANEL + 4 * C::Tokens::COUNT + 32 +
               (me.makes_state() ? 4 * C::Tokens::MADE_COUNT : 0);
    }
    /* Without maps, starts to copy a warp's rows of x, dy and NEXT. */
    GT_METHOD void copy(const ChunkGradientParams& p, const HopperBlock<C>& me, int warp, uint32_t stage) const {
        const Problem& in = p.in;
        const uint16_t *x_rows = static_cast<const uint16_t*>(in.x) + x,
                       *dy_rows = static_cast<const uint16_t*>(in.dy) + dy;
        const int tiles = me.makes_state() ? 3 : 2;
        GT_NO_UNROLL
        for (int i = 0; i < tiles; i++) { /* X, DY, and NEXT, which is 64 tokens before or after */
            const bool is_x = i == 0 || (i == 2 && me.second);
            const int64_t pitch = is_x ? in.x_stride.t : in.dy_stride.t;
            const uint16_t* from = is_x ? x_rows : dy_rows;
            if (i == 2) from += (me.second ? -CHUNK : CHUNK) * pitch;
            copy_panel(warp, stage + C::X + i * C::PANEL, from, pitch, i == 2 ? me.neighbour_tokens : me.tokens,
                       in.P - tile * TILE_P);
        }
    }
    GT_METHOD void advance(const HopperGradientParams& p) {
        const Problem& in = p.in;
        if (++tile < in.tiles) {
            x += TILE_P, dy += TILE_P;
            if (p.records > 1) tokens += p.record_count;
        } else {
            tokens += p.record_count;
            head++;
            const int columns = (in.tiles - 1) * TILE_P;
            x += in.x_stride.h - columns, dy += in.dy_stride.h - columns;
            slot += (int)p.slots;
            tile = 0;
        }
    }
};

/* ---- powers ------------------------------------------------------------------------------------------------------ */

/* The power of M for the 16 columns s of a block.  M_ts is S_ts L_ts Delta_s, plus Dskip if t = s, times the inverse of
 * the power of dy_t.  With this power, no M_ts with t >= s exceeds the range of f16.  skip: 0 if Dskip is added
 * elsewhere. */
template <class C>
GT_DEV Power power_of_M(const HopperBlock<C>& me, int step, int block, float skip) {
    const float4 S = lds<float4>(me.address(me.S_most(block))),
                 by = lds<float4>(me.address(me.factor(step, C::Tokens::BOUND)));
    const float most = largest_of({S.x * by.x, S.y * by.y, S.z * by.z, S.w * by.w});
    return power_of(C::M_HAS_SKIP ? fma_rn(fabsf(skip), me.dy_inverse(step, block), most) : most);
}

/* ---- the role prepare ------------------------------------------------------------------------------------------- */

/* in_twos(): whether a block takes places in pairs, both chunks of a slot; never if dy is bf16.  first_place(),
 * next_place(): the block's first place, and the one after `place`. */
template <class C>
GT_DEV bool in_twos(const HopperGradientParams& p) {
    return C::M_HAS_POWER && p.in_twos;
}
template <class C>
GT_DEV int first_place(const HopperGradientParams& p) {
    return in_twos<C>(p) ? 2 * block_x() : block_x();
}
template <class C>
GT_DEV int next_place(const HopperGradientParams& p, int place) {
    return place + (!in_twos<C>(p) ? grid_x() : place % 2 == 0 ? 1 : 2 * grid_x() - 1);
}

/* One warp finds the next place with a chunk and writes record `number`.  If no place is left, the record gets 0
 * tokens.  The warp clears the sums of places without a chunk.  place: on entry the first place to check, on return the
 * place found.  before, M_before: see HopperBlock. */
template <class C>
GT_DEV void find_place(const HopperGradientParams& p, uint32_t smem, int number, int& place, int before, int M_before) {
    ChunkPlace me = {};
    GT_NO_UNROLL
    for (; has_place(p, place); place = next_place<C>(p, place)) {
        me = find_chunk<uint32_t>(p, place);
        if (me.tokens > 0) break;
        wait_for_chain();
        if (me.g == 0) clear_sums(p, me.row(p.slots), lane_id(), 32);
    }
    if (lane_id() == 0) {
        const uint32_t record = smem + C::PLACE + number % C::PLACES * C::PLACE_BYTES;
        const auto four = [&](int at, int64_t x, int y, int z) {
            sts<uint4>(record + 16 * at, {(uint32_t)x, (uint32_t)(x >> 32), (uint32_t)y, (uint32_t)z});
        };
        const bool whole = me.tokens == CHUNK && me.neighbour_tokens % CHUNK == 0;
        const bool by_maps = p.has_rows && (whole || !p.in.sequences.cu_seqlens);
        four(0, me.first, me.b, me.slot);
        four(1, (me.row(p.slots) * p.in.H + me.g * me.heads) * p.in.tiles, me.tokens, me.neighbour_tokens);
        four(2, me.g | (int64_t)before << 32, M_before, me.second + 2 * by_maps);
        sts<int>(record + 48, place);
    }
    typename C::Places{smem}.fill(number);
}

/* Whether TMA loads x and dy of all places, so that one warp starts all copies. */
GT_DEV bool has_only_maps(const HopperGradientParams& p) { return p.has_rows && !p.in.sequences.cu_seqlens; }

/* The role prepare.  It starts the copies of a step as soon as the stage is free, and does not wait for them to arrive.
 * If all places have maps, only warp 0 copies and arrives at FULL.  Otherwise all threads copy, and each arrives twice,
 * once by its cp.async.  Warp 0 also finds the places.  If B, C and OTHER have two copies, warps 1 to 3 convert these
 * tiles of the next place. */
template <class C>
GT_DEV void prepare_role(const HopperGradientParams& p, uint32_t smem) {
    const int warp = shfl_idx(warp_id(), 0) - C::CONSUMER_THREADS / 32;
    const bool alone = has_only_maps(p);
    if (C::GROUP_COPIES == 1 && alone && warp > 0) return;
    int place = first_place<C>(p), before = 0, M_before = 0;
    GT_NO_UNROLL
    for (int number = 0;; number++) {
        if (warp == 0) find_place<C>(p, smem, number, place, before, M_before);
        const HopperBlock<C> me(p, smem, number);
        if (me.tokens == 0) return;
        place = next_place<C>(p, place);
        before = (before + me.steps) % (2 * C::STAGES), M_before = (M_before + me.steps + 1) % 4;
        if constexpr (C::GROUP_COPIES > 1)
            if (warp > 0) {
                const int tile = warp - 1;
                me.groups().wait_free(me.number);
                if (tile < TILE_OTHER || me.makes_state()) {
                    GT_NO_UNROLL
                    for (int part = 0; part < 4; part++) PlaceRows<C>::copy(p.in, me, tile, part);
                    cp_async_commit();
                    cp_async_wait<0>();
                    GT_NO_UNROLL
                    for (int part = 0; part < 4; part++) {
                        PlaceRows<C> rows;
                        rows.find(me, tile, part);
                        rows.store(me, tile, part);
                    }
                }
                fence_async_proxy();
                me.groups().fill(me.number);
            }
        if (alone && warp > 0) continue;
        StepSource<C> source;
        wait_for_chain(); /* for h, G, their powers, and the factors of tokens */
        source.start(p, me, warp);
        GT_NO_UNROLL
        for (int step = 0; step < me.steps; step++) {
            const uint32_t full = me.stages().full(me.in_stages(step));
            me.stages().wait_free(me.in_stages(step));
            if (warp == 0) source.load(p, me, step, full);
            if (!alone) {
                if (!me.by_maps) source.copy(p, me, warp, me.stage(step));
                cp_async_arrive(full);
            }
            source.advance(p);
            if (warp == 0)
                mbarrier_arrive_expect(full, source.bytes(me));
            else
                mbarrier_arrive(full);
        }
    }
}

/* ---- rows of a warp, operands ----------------------------------------------------------------------------------- */

/* A warp's rows of a product: rows 16 w to 16 w + 15 for warp w of its warpgroup.  A lane has rows `row` and row + 8,
 * and columns 2 j and 2 j + 1 of every 8 columns. */
struct WarpRows {
    int warp, g, j, row;
    uint32_t address0;
    GT_METHOD explicit WarpRows(int warp_of_block) {
        const int lane = lane_id();
        warp = warp_of_block % 4;
        g = lane / 4;
        j = lane % 4;
        row = 16 * warp + g;
        address0 = panel_at<128>(16 * warp + lane % 16, lane / 16);
    }
    /* The lane's address for ldmatrix_x4 or stmatrix_x4, for the warp's rows and pieces 0 and 1 of a panel.  For pieces
     * 2 i and 2 i + 1, the address is addresses() ^ 32 i.  Each use computes the address again, because keeping all of
     * them would take too many registers. */
    GT_METHOD uint32_t addresses(uint32_t panel) const { return (uint32_t)made_here((int)panel) + address0; }
};

template <class C>
GT_DEV uint64_t rows_operand(uint32_t tile) { /* k runs along a row */
    return wgmma_tile<128, Major::K>(tile, C::PANEL);
}

template <class C>
GT_DEV uint64_t columns_operand(uint32_t tile) { /* k runs down the rows */
    return wgmma_tile<128, Major::MN>(tile, C::PANEL);
}

template <class C>
GT_DEV uint64_t along_row(uint64_t operand, int k) { /* k: counts 16 elements */
    return wgmma_step(operand, k_bytes<128, Major::K>(16 * k, C::PANEL));
}

template <class C>
GT_DEV uint64_t down_rows(uint64_t operand, int k) {
    return wgmma_step(operand, k_bytes<128, Major::MN>(16 * k, C::PANEL));
}

/* c = left right^T, for two tiles of 64 rows and N columns. */
template <class C>
GT_DEV void multiply_rows(float (&c)[8][4], uint32_t left, uint32_t right) {
    const uint64_t a = rows_operand<C>(left), b = rows_operand<C>(right);
    GT_UNROLL
    for (int k = 0; k < C::N / 16; k++) wgmma<f16>(c, along_row<C>(a, k), along_row<C>(b, k), k > 0);
}

/* Returns Dskip if it is per head, else 0.  Launches that store a partial sum of dx have no Dskip and get 0.  With
 * powers, Dskip lies in the stage. */
template <class C>
GT_DEV float skip_of_head(const ChunkGradientParams& p, const HopperBlock<C>& me, int step) {
    if constexpr (C::M_HAS_POWER) return p.in.Dskip ? me.value(me.factor(step, C::Tokens::SKIP)) : 0.0f;
    return p.in.Dskip && !p.in.skip_per_channel ? p.in.Dskip[me.head(p, step)] : 0.0f;
}

/* Waits until the copies of a step have arrived.  Makes data of cp.async visible to the asynchronous proxy. */
template <class C>
GT_DEV void wait_for_rows(const HopperBlock<C>& me, int step) {
    me.stages().wait_full(me.in_stages(step));
    if (!me.by_maps) fence_async_proxy(); /* else no fence: it would also wait for stores of sums */
}

/* Adds x[0] and x[1] over the four lanes of a row, and stores the sums to out[row] and out[row + 8]. */
GT_DEV void store_row_sums(const WarpRows& at, float (&x)[2], float* out) {
    reduce_scatter<2, 4, 1>(x, at.j);
    if (at.j % 2 == 0) out[at.row + 4 * at.j] = x[0];
}
GT_DEV void store_row_sums(const WarpRows& at, float (&x)[2], uint32_t out) { /* out: in shared memory */
    reduce_scatter<2, 4, 1>(x, at.j);
    if (at.j % 2 == 0) sts<float>(out + 4 * (at.row + 4 * at.j), x[0]);
}

/* Computes E_t = <pre_t dy_t, h C_t> and stores it to the step's sums.  Ch: C h^T. */
template <class C>
GT_DEV void store_E(const HopperBlock<C>& me, const WarpRows& at, int step, const float (&Ch)[8][4]) {
    using E = Element<typename C::D>;
    float sums[2] = {}, odd[2] = {};
    const uint32_t addresses = at.addresses(me.stage(step) + C::DY);
    const float4 inverses = lds<float4>(me.address(C::STATE_INVERSES + 8 * (me.stage_of(step))));
    const float c[2] = {me.value(me.inverses(C::C_INVERSE) + at.row), me.value(me.inverses(C::C_INVERSE) + at.row + 8)};
    GT_UNROLL
    for (int k = 0; k < 4; k++) {
        uint32_t dy[4];
        ldmatrix_x4(dy, addresses ^ 32 * k);
        GT_UNROLL
        for (int i = 0; i < 4; i++) {
            const float *y = Ch[2 * k + i / 2] + i % 2 * 2, f = part_of(inverses, k) * c[i % 2];
            sums[i % 2] = fma_rn(E::lo(dy[i]), y[0] * f, sums[i % 2]);
            odd[i % 2] = fma_rn(E::hi(dy[i]), y[1] * f, odd[i % 2]);
        }
    }
    GT_UNROLL
    for (int e = 0; e < 2; e++) {
        const int t = at.row + 8 * e;
        sums[e] = (sums[e] + odd[e]) * me.value(me.factor(step, C::Tokens::PRE) + t);
    }
    store_row_sums(at, sums, me.step_sums(step) + ChunkSums::E);
}

/* Stores the warp's 16 rows of 64 columns to global memory.  They pass through a panel, so that stores are 16 bytes
 * wide.  to: row 0 of the panel.  rows, columns: how many exist. */
template <class T>
GT_DEV void store_panel(const WarpRows& at, uint32_t panel, const float (*x)[4], uint16_t* to, int64_t pitch, int rows,
                        int columns) {
    const uint32_t addresses = at.addresses(panel);
    const int lane = here(); /* computed again, because registers cannot keep the addresses over the steps */
    store_accumulators<4>(
        x, [&](int i) { return addresses ^ 32 * i; }, Element<T>::pack);
    sync_warp();
    const int row0 = 16 * at.warp + lane / 8, piece = lane % 8;
    const uint32_t first = panel + panel_at<128>(row0, piece);
    uint4 values[4];
    GT_UNROLL
    for (int i = 0; i < 4; i++) values[i] = lds<uint4>((first ^ (uint32_t)(i % 2 * 64)) + 512 * i);
    to += row0 * pitch + 8 * piece;
    const int left = 8 * piece < columns ? rows - row0 : 0;
    GT_UNROLL
    for (int i = 0; i < 4; i++) {
        if (4 * i < left) stg<uint4>(to, values[i]);
        to += 4 * pitch;
    }
    sync_warp(); /* before the panel is written again */
}

} /* namespace ssd */
} /* namespace gt */

#endif
