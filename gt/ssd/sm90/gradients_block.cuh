/* gt/ssd/sm90/gradients_block.cuh - the common parts of a block of chunk_gradient_hopper_kernel (gradients.cuh).  These
 * are records of tokens and sums in memory, the layout of shared memory, the current place, B and C as f16, the
 * warpgroup that prepares, and the rows of a warp. */
#ifndef GT_SSD_SM90_GRADIENTS_BLOCK_CUH
#define GT_SSD_SM90_GRADIENTS_BLOCK_CUH

#include "../../base/bulk.cuh"
#include "../../base/ring.cuh"
#include "../../base/wgmma.cuh"
#include "../problem.cuh"
#include "../mma/chunk.cuh"

namespace gt {
namespace ssd {

/* ---- records by token ------------------------------------------------------------------------------------------- */

/* The record of a chunk and head, as offsets in floats; with z, the record of a chunk, head and tile.
 *
 * First comes the part that the neighbour's step reads, too: each token's weight in the state that the neighbour makes.
 * The second chunk of a slot stores PRE as weights, the first chunk stores WEIGHTS = Delta SUF.  exp(sum a) follows
 * both, because the neighbour's step multiplies its old state by it.
 *
 * Next come the factors of mma/chunk.cuh.  DIAGONAL of a block of 16 tokens is one square of 8 x 8.  Its row t has
 * L_ts, s <= t, of the block's first half.  Its column t has L_ts, s < t, of the second half.  AFTER: exp(a of all
 * blocks after a block).
 *
 * With POWERS, M is f16 and the record also holds the head's Dskip.  In addition it holds two numbers for each block of
 * 16 t: the inverse of dy's power, and b such that b * max|S| >= |M|.  Factors and weights of rows of dy then contain
 * the inverse of the rows' power. */
template <bool POWERS>
struct ChunkTokens {
    static constexpr int PRE = 0, KEPT = CHUNK, SKIP = KEPT + 1, GROWTH = KEPT + 2;
    static constexpr int WEIGHTS = KEPT + 4, SUF = WEIGHTS; /* SUF until it is multiplied */
    static constexpr int MADE_COUNT = CHUNK + 4;            /* from PRE or from WEIGHTS */
    static constexpr int DY_INVERSE = 2 * MADE_COUNT, BOUND = DY_INVERSE + BLOCKS;
    static constexpr int OWN = POWERS ? BOUND + BLOCKS : DY_INVERSE; /* only the chunk's own step reads the rest */
    static constexpr int DELTA = OWN, U = DELTA + CHUNK, V = U + CHUNK, HALF = V + CHUNK, SQUARE = HALF + CHUNK;
    static constexpr int BETWEEN = SQUARE + BLOCKS * 64;
    static constexpr int AFTER = BETWEEN + 4, COUNT = AFTER + BLOCKS;
    static_assert(COUNT % 4 == 0 && WEIGHTS % 4 == 0, "copied by 16 bytes");

    /* Float `at` is a factor of rows of dy: the number of their block of 16 rows; -1 if there are none. */
    GT_METHOD static int block_of_dy(int at) {
        if (at < KEPT) return at / BLOCK;
        if (at >= U && at < V) return (at - U) / BLOCK;
        if (at >= HALF && at < SQUARE) /* its second half belongs to rows, the first to columns */
            return (at - HALF) % BLOCK < BLOCK / 2 ? -1 : (at - HALF) / BLOCK;
        return at >= SQUARE && at < BETWEEN ? (at - SQUARE) / 64 : -1;
    }
};

/* Sums of a slab, chunk, head and tile for da, ddt and dDskip, as offsets in floats.  In the sums for dDskip, dy still
 * has its powers.  PAIRS [i][k]: either Gamma of row k with block i of s, before k's block, or Gamma / Delta of column
 * k with block i + 1 of t, after k's block. */
struct ChunkSums {
    static constexpr int PAIRS = 0, DIAGONAL = 3 * CHUNK;       /* [k] */
    static constexpr int E = DIAGONAL + CHUNK, F = E + CHUNK;   /* [t], [s] */
    static constexpr int NEAR = F + CHUNK;                      /* [s]: Gamma / Delta over t in the block of s */
    static constexpr int Z = NEAR + CHUNK, DSKIP_HEAD = Z + 4;  /* [4 warps]: <G, h>, without exp(sum a); <dy, x> */
    static constexpr int DSKIP = DSKIP_HEAD + 4, COUNT = DSKIP; /* Dskip per channel: [4 warps][p] */
};
GT_HD int chunk_sums(const Problem& in) { return ChunkSums::COUNT + (in.skip_per_channel ? 4 * CHUNK : 0); }

/* The sums overwrite the tokens' record from OWN on, if every tile has its own record and there is one slab.  They
 * replace factors that only the chunk's own step reads and has copied to shared memory by then.  With Dskip per channel
 * the sums extend beyond these factors. */
static_assert(ChunkTokens<false>::OWN + ChunkSums::COUNT <= ChunkTokens<false>::COUNT, "room for them");

/* U has Delta as a factor, unless Delta is too small to divide out again. */
constexpr float LEAST_DELTA = 0x1p-20f;
GT_DEV float factor_of_U(float delta) { return fabsf(delta) > LEAST_DELTA ? delta : 1.0f; }

/* ---- shared memory, and where a block stands -------------------------------------------------------------------- */

/* Maps of 16-bit tensors for TMA.  States are [slot of a batch element and head][P][columns], in boxes of 64 rows p,
 * one panel each.  x and dy are [B][T][H P], in boxes of 64 tokens. */
struct HopperGradientParams : ChunkGradientParams {
    TensorMap h_map, G_map, x_map, dy_map;
    int has_h, has_G; /* 0: the map belongs to another tensor, and every box reads as zeros */
    int has_rows;     /* x and dy have maps */
    int heads, steps; /* heads of a group; steps of a place */
    int clears;       /* set if sums of chunks that do not exist are cleared, because sums of several launches are added
                       * as one */
    int in_twos;      /* With z, dy lies in dx.  The first chunk of a slot reads dy of the second, so one block takes
                  * both. */
    int records, record_count, sums_count; /* of TokenParams */
    float *tokens, *sums, *inverses;       /* of TokenParams; sums and inverses from this slab's first element on */
};

/* Whether a block takes a place (find_chunk()).  In packed sequences most places may have no chunk.  Places after the
 * last chunk count only if their sums must be cleared. */
GT_DEV bool has_place(const HopperGradientParams& p, int64_t place) {
    const Problem& in = p.in;
    const bool all = p.clears || !in.sequences.cu_seqlens;
    return place < (all ? in.sequences.B * p.slots : used_slots(in.sequences, CHECKPOINT)) * in.G * 2;
}

template <class T_, int N_, class D_>
struct HopperGradientTraits {
    using T = T_;
    using D = D_;                                 /* type of dy in its tile, and of M: f16 with z
                                                   * (Problem::dy_inverses) */
    static constexpr int N = N_, PANELS = N / 64; /* a panel: 64 rows of 128 bytes */
    static constexpr int THREADS = 512, CONSUMER_THREADS = 384, WARPGROUP = 128;
    static constexpr int PREPARE_REGISTERS = 48, PAIRS_REGISTERS = 144, SUMS_REGISTERS = 160;
    static constexpr int STAGES = N == 64 ? 3 : 2;
    static constexpr int GROUP_COPIES = N == 64 ? 2 : 1; /* copies of B, C and OTHER, which places use in turn */
    static constexpr int M_BUFFERS = 2, M_TERMS = std::is_same<D, bf16>::value ? 2 : 1, M_PANELS = 2;
    static constexpr bool M_HAS_POWER = M_TERMS == 1; /* for 16 columns of a head: power_of_M() */
    using Tokens = ChunkTokens<M_HAS_POWER>;
    static constexpr bool PAIRS_MAKE_E = N > 64; /* else the inputs role makes E, since its products are shorter then */
    static constexpr bool M_HAS_SKIP = std::is_same<T, bf16>::value; /* f16 would round the main part of dx */
    /* bytes */
    static constexpr int PANEL = CHUNK * 128, STATE = PANELS * PANEL;
    static constexpr int B = 0, C = B + STATE, OTHER = C + STATE; /* the neighbour's B or C */
    static constexpr int TILES = OTHER + STATE, STAGE0 = GROUP_COPIES * TILES;
    static constexpr int X = 0, DY = X + PANEL, NEXT = DY + PANEL, H = NEXT + PANEL, G = H + STATE; /* of a stage */
    static constexpr int STAGE = G + STATE;
    /* M: its terms, or W for dC and W for dB */
    static constexpr int M = STAGE0 + STAGES * STAGE, OUT = M + M_BUFFERS * M_PANELS * PANEL;
    static constexpr int FLOATS = OUT + PANEL;
    /* offsets in floats from FLOATS on */
    static constexpr int COPIES = STAGES;
    static constexpr int FACTORS = 0;                             /* [STAGES], of ChunkTokens */
    static constexpr int MADE = FACTORS + COPIES * Tokens::COUNT; /* [STAGES]: weights and KEPT of the neighbour */
    static constexpr int MADE_COPIES = COPIES, MADE_FLOATS = Tokens::MADE_COUNT;
    static constexpr int STATE_INVERSES = MADE + MADE_COPIES * MADE_FLOATS; /* [STAGES][h 4, G 4] */
    static constexpr int B_INVERSE = STATE_INVERSES + 8 * STAGES, C_INVERSE = B_INVERSE + CHUNK; /* [GROUP_COPIES] */
    static constexpr int OTHER_INVERSE = C_INVERSE + CHUNK, INVERSES = 3 * CHUNK;
    static constexpr int POWER = B_INVERSE + GROUP_COPIES * INVERSES; /* [2][64]: powers of dC and dB, at the end */
    static constexpr int S_MOST = POWER + 2 * CHUNK; /* [2, for places in turn][blocks of s][blocks of t]: the largest
                                                      * |S| */
    static constexpr int W_MOST = S_MOST + 2 * BLOCKS * BLOCKS, FLOATS_COUNT = W_MOST + 4;
    /* mbarriers, in bytes */
    static constexpr int FULL = FLOATS + 4 * FLOATS_COUNT, EMPTY = FULL + 8 * STAGES;
    static constexpr int STATE_MADE = EMPTY + 8 * STAGES, M_FULL = STATE_MADE + 8 * STAGES;
    static constexpr int M_EMPTY = M_FULL + 8 * M_BUFFERS, GROUP_FULL = M_EMPTY + 8 * M_BUFFERS;
    static constexpr int GROUP_EMPTY = GROUP_FULL + 8 * GROUP_COPIES;
    static constexpr int S_MADE = GROUP_EMPTY + 8 * GROUP_COPIES, SHARES_MADE = S_MADE + 8;
    static constexpr int W_FULL = SHARES_MADE + 8, W_EMPTY = W_FULL + 8, PLACE_FULL = W_EMPTY + 8;
    /* Records of places, in a ring.  Copies run at most STAGES steps ahead of the readers of the oldest record. */
    static constexpr int PLACES = 8, PLACE_BYTES = 64;
    static constexpr int PLACE = (PLACE_FULL + 8 * PLACES + 15) / 16 * 16;
    static constexpr int SMEM = PLACE + PLACES * PLACE_BYTES;
    using Stages = Ring<STAGES, FULL, EMPTY>;
    using States = Ring<STAGES, STATE_MADE>; /* free as its stage is */
    using Buffers = Ring<M_BUFFERS, M_FULL, M_EMPTY>;
    using Groups = Ring<GROUP_COPIES, GROUP_FULL, (GROUP_COPIES > 1 ? GROUP_EMPTY : NO_BARRIER)>;
    using Places = Ring<PLACES, PLACE_FULL>;
    using WForStates = Ring<1, W_FULL, W_EMPTY>; /* W for dB */
    static_assert(MADE % 4 == 0 && STATE_INVERSES % 4 == 0 && W_MOST % 4 == 0, "read by 16 bytes");
    static_assert(FULL % 8 == 0 && SMEM <= 227 * 1024, "fits sm_90");
};

/* The rows of a place's chunk. */
struct PlaceChunk {
    int64_t first;
    int b, tokens;
};

/* Place `number` of a block; find_place() has left its record in shared memory.  Stages, buffers of M and parities are
 * counted over all places of a block.  before: the number of steps of earlier places, modulo 2 * STAGES.  M_before: how
 * often M and W were handed on, modulo 4. */
template <class C>
struct HopperBlock : ChunkPlace {
    float* sums; /* sums of step 0 */
    int sums_count;
    int number, before, M_before;
    bool by_maps; /* x and dy come by TMA: every row of a box after the chunk's last token lies past the tensor's end */

    /* Waits for the record.  After the last place a record has 0 tokens. */
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
    /* Reads the record again. */
    GT_METHOD PlaceChunk chunk() const {
        const uint4 a = lds<uint4>(record());
        return {(int64_t)((uint64_t)a.y << 32 | a.x), (int)a.z, lds<int>(record() + 24)};
    }
    /* The number of step 0 among the steps of all blocks. */
    GT_METHOD int64_t first_step(const HopperGradientParams& p) const {
        return (this->row(p.slots) * p.in.H + this->g * p.heads) * p.in.tiles;
    }
    GT_METHOD float* step_sums(int step) const { return sums + step * sums_count; }

    GT_METHOD typename C::Stages stages() const { return {this->smem}; }
    GT_METHOD typename C::States states() const { return {this->smem}; }
    GT_METHOD typename C::Buffers buffers() const { return {this->smem}; }
    GT_METHOD typename C::Groups groups() const { return {this->smem}; }
    GT_METHOD typename C::WForStates W_for_states() const { return {this->smem}; }
    /* in_stages(): the number of a step in stages() and states().  in_buffers(): the number of the step's M in
     * buffers(), where W counts as M of one more step. */
    GT_METHOD uint32_t in_stages(int step) const { return (uint32_t)(before + step); }
    GT_METHOD int in_buffers(int step) const { return M_before + step; }
    GT_METHOD int stage_of(int step) const { return in_stages(step) % C::STAGES; }
    GT_METHOD uint32_t stage(int step) const { return this->smem + C::STAGE0 + stage_of(step) * C::STAGE; }
    GT_METHOD int factor(int step, int offset) const { return C::FACTORS + stage_of(step) * C::Tokens::COUNT + offset; }
    /* The inverse of the power of dy's rows in a block of 16; bf16 has no power. */
    GT_METHOD float dy_inverse(int step, int block) const {
        if constexpr (!C::M_HAS_POWER) return 1.0f;
        return this->value(factor(step, C::Tokens::DY_INVERSE) + block);
    }
    GT_METHOD int made_cell(int step) const { return C::MADE + stage_of(step) * C::MADE_FLOATS; }
    GT_METHOD uint32_t M(int step) const {
        return this->smem + C::M + in_buffers(step) % C::M_BUFFERS * C::M_PANELS * C::PANEL;
    }
    /* tile_of(): the tile of B, C or OTHER.  inverses_of(): the inverses of the powers of its rows. */
    GT_METHOD uint32_t tile_of(int offset) const { return this->smem + number % C::GROUP_COPIES * C::TILES + offset; }
    GT_METHOD int inverses(int offset) const { return number % C::GROUP_COPIES * C::INVERSES + offset; }
    GT_METHOD int S_most(int block) const { /* computed at each use: kept over the steps, it would be spilled */
        return C::S_MOST + (made_here(number) % 2 * BLOCKS + block) * BLOCKS;
    }
};

/* Named barriers, one for each warpgroup: pairs, inputs, states. */
enum { PAIRS_BARRIER = 1, INPUTS_BARRIER, MADE_BARRIER };

/* ---- B and C ---------------------------------------------------------------------------------------------------- */

/* Numbers of the tiles B, C and OTHER.  OTHER is the neighbour's B or C. */
enum { TILE_B, TILE_C, TILE_OTHER };

/* A warp's 16 rows of B, C or OTHER.  The warp loads them and stores them as f16 panels.  Each row has a power of two,
 * whose inverse is stored, too.  OTHER is also divided by WEIGHT_RANGE. */
template <class C>
struct PlaceRows {
    uint4 x[4][C::PANELS];

    /* Calls take(exists, address, k, i) for every piece of the lane. */
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
    /* Copies unconverted rows to the destination of store(), so that no registers wait for them.  The lane reads them
     * again by find(). */
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

/* With one copy of B, C and OTHER, the three roles that multiply make one tile each. */
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

/* ---- the preparing warps: copies -------------------------------------------------------------------------------- */

/* Copies a warp's 16 rows of x, of dy or of the neighbour's tokens.  A lane copies piece lane % 8 of row lane / 8 in
 * every four rows.  from: the lane's first piece; pitch: elements from row to row; rows, columns: the numbers that
 * exist; zeros follow. */
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

/* A step's position in the tensors; advance() goes to the next step.  x, dy: used without maps; the lane's first row,
 * in elements. */
template <class C>
struct StepSource {
    int64_t x, dy;
    const float* tokens; /* ChunkTokens of the head or of the tile */
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
    /* Starts all bulk copies of a step, by one warp.  These are h and G; x, dy and NEXT where they have maps; factors
     * of the chunk and of its neighbour; the inverses of the powers of states and dy.  Missing states and rows become
     * zeros. */
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
    /* Bytes that load() copies. */
    GT_METHOD static uint32_t bytes(const HopperBlock<C>& me) {
        const int tiles = !me.by_maps ? 0 : me.makes_state() ? 3 : 2;
        return 2 * C::STATE + tiles * C::PANEL + 4 * C::Tokens::COUNT + 32 +
               (me.makes_state() ? 4 * C::Tokens::MADE_COUNT : 0);
    }
    /* Without maps, starts the copies of a warp's rows of x, dy and NEXT. */
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

/* The power of a block of 16 columns s of M.  M_ts is S_ts L_ts Delta_s, plus Dskip if t = s, times the inverse of
 * dy_t's power.  With this power no M_ts, t >= s, exceeds f16.  skip: 0 if Dskip is added elsewhere. */
template <class C>
GT_DEV Power power_of_M(const HopperBlock<C>& me, int step, int block, float skip) {
    const float4 S = lds<float4>(me.address(me.S_most(block))),
                 by = lds<float4>(me.address(me.factor(step, C::Tokens::BOUND)));
    const float most = largest_of({S.x * by.x, S.y * by.y, S.z * by.z, S.w * by.w});
    return power_of(C::M_HAS_SKIP ? fma_rn(fabsf(skip), me.dy_inverse(step, block), most) : most);
}

/* ---- the preparing warps ---------------------------------------------------------------------------------------- */

/* A block's first place, and the next place after `place`.  in_twos(): a block takes places in pairs; never if dy is
 * bf16. */
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

/* Finds the next place with a chunk and writes it to record `number`, or writes that none is left.  Clears the sums of
 * places without a chunk.  Called by one warp.  place: on entry the first place to look at, on return the place found.
 * before, M_before: see HopperBlock. */
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

/* True if all places have maps, so that one warp makes all copies of rows. */
GT_DEV bool has_only_maps(const HopperGradientParams& p) { return p.has_rows && !p.in.sequences.cu_seqlens; }

/* Starts a step's copies as soon as its stage is free, and does not wait for them.  If all places have maps, warp 0
 * alone does this and arrives at FULL.  Otherwise each thread arrives twice, once by its cp_async.  Warp 0 finds the
 * places.  If B, C and OTHER have two copies, the other warps make those of the next place. */
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
        wait_for_chain(); /* h, G and their powers; factors */
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

/* The rows of a warp in its warpgroup: 16 rows of every product, from 16 warp on.  A lane has rows row and row + 8, and
 * columns 2 j, 2 j + 1 of every 8 columns. */
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
    /* The lane's address for ldmatrix_x4 or stmatrix_x4 of the warp's rows, pieces 0 and 1 of a panel.  The address of
     * pieces 2 i, 2 i + 1 is this one ^ 32 i.  It is computed at each use: kept over the steps, all addresses would
     * take too many registers. */
    GT_METHOD uint32_t addresses(uint32_t panel) const { return (uint32_t)made_here((int)panel) + address0; }
};

template <class C>
GT_DEV uint64_t rows_operand(uint32_t tile) { /* elements of a row along k */
    return wgmma_tile<128, Major::K>(tile, C::PANEL);
}

template <class C>
GT_DEV uint64_t columns_operand(uint32_t tile) { /* rows along k */
    return wgmma_tile<128, Major::MN>(tile, C::PANEL);
}

template <class C>
GT_DEV uint64_t along_row(uint64_t operand, int k) { /* k: in 16 */
    return wgmma_step(operand, k_bytes<128, Major::K>(16 * k, C::PANEL));
}

template <class C>
GT_DEV uint64_t down_rows(uint64_t operand, int k) {
    return wgmma_step(operand, k_bytes<128, Major::MN>(16 * k, C::PANEL));
}

/* c = left right^T over all N columns of two tiles of 64 rows. */
template <class C>
GT_DEV void multiply_rows(float (&c)[8][4], uint32_t left, uint32_t right) {
    const uint64_t a = rows_operand<C>(left), b = rows_operand<C>(right);
    GT_UNROLL
    for (int k = 0; k < C::N / 16; k++) wgmma<f16>(c, along_row<C>(a, k), along_row<C>(b, k), k > 0);
}

/* Dskip if the head has one number, else 0.  Also 0 in launches that store a partial sum of dx.  With powers, Dskip
 * lies in the stage. */
template <class C>
GT_DEV float skip_of_head(const ChunkGradientParams& p, const HopperBlock<C>& me, int step) {
    if constexpr (C::M_HAS_POWER) return p.in.Dskip ? me.value(me.factor(step, C::Tokens::SKIP)) : 0.0f;
    return p.in.Dskip && !p.in.skip_per_channel ? p.in.Dskip[me.head(p, step)] : 0.0f;
}

/* Waits until the copies of a step by prepare_role() have arrived.  Makes data of cp_async visible to the asynchronous
 * proxy. */
template <class C>
GT_DEV void wait_for_rows(const HopperBlock<C>& me, int step) {
    me.stages().wait_full(me.in_stages(step));
    if (!me.by_maps) fence_async_proxy(); /* not for maps: the fence also waits for stores of the last step's sums */
}

/* out[row], out[row + 8] <- sums of x over the four lanes of a row. */
GT_DEV void store_row_sums(const WarpRows& at, float (&x)[2], float* out) {
    reduce_scatter<2, 4, 1>(x, at.j);
    if (at.j % 2 == 0) out[at.row + 4 * at.j] = x[0];
}
GT_DEV void store_row_sums(const WarpRows& at, float (&x)[2], uint32_t out) { /* in shared memory */
    reduce_scatter<2, 4, 1>(x, at.j);
    if (at.j % 2 == 0) sts<float>(out + 4 * (at.row + 4 * at.j), x[0]);
}

/* E_t = <pre dy_t, h C_t>. */
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

/* Stores the warp's rows of 64 columns through a panel, in pieces of 16 bytes.  to: row 0; rows, columns: the numbers
 * that exist. */
template <class T>
GT_DEV void store_panel(const WarpRows& at, uint32_t panel, const float (*x)[4], uint16_t* to, int64_t pitch, int rows,
                        int columns) {
    const uint32_t addresses = at.addresses(panel);
    const int lane = here(); /* addresses kept over the steps would not fit in registers */
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
    sync_warp(); /* before the next */
}

} /* namespace ssd */
} /* namespace gt */

#endif
