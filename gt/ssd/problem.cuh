/* gt/ssd/problem.cuh - the arguments of ssd in the form that kernels take.  The file has sizes, the tensors of a call,
 * the parameters that a plan gives to each kernel, and functions that find the segments, tokens and chunks of a block.
 * It includes no other file of ssd. */
#ifndef GT_SSD_PROBLEM_CUH
#define GT_SSD_PROBLEM_CUH

#include "../recurrence/snapshots.cuh"
#include "../recurrence/ssm.cuh"

namespace gt {
namespace ssd {

using namespace ssm;

/* ---- sizes ------------------------------------------------------------------------------------------------------ */

constexpr int TILE_P = 64; /* rows of the state per block */

/* A slab: the columns of a state that one launch on tensor cores takes, at most SLAB.  If N > SLAB, the slabs take
 * several launches, one after another.  y, dx and ddt are sums over columns, so each launch adds a partial sum.
 * Exception: sm90/forward.cuh takes up to 256 columns in one launch. */
constexpr int SLAB = 128;

/* Tokens of a chunk in mma/ with fp32 activations.  The chunk is short because fp32 takes twice the bytes.
 * SLOT_SHORTS: short chunks of a slot, which is the stretch of CHECKPOINT tokens between two checkpoints. */
constexpr int SHORT = 32, SHORT_BLOCKS = SHORT / BLOCK, SLOT_SHORTS = CHECKPOINT / SHORT;

constexpr int SLOT_CHUNKS = CHECKPOINT / CHUNK;

/* ---- the arguments ---------------------------------------------------------------------------------------------- */

/* How a launch on compute capability 9.0 numbers its blocks.  A block takes a bundle, which is several units of one
 * group.  The host prepares these numbers, because a block's first copies would wait half a microsecond for a division.
 * The dividers divide by the blocks of a strand, the bundles of a group, the tiles of a head, and the segments of a
 * sequence. */
struct Bundles {
    int strands, heads, units; /* heads and units of a group */
    Divider by_strand, by_group, by_tile, segments;
};

/* The prepared arguments of a call, as every kernel gets them. */
struct Problem {
    Sequences sequences;
    Segments segments; /* states [slot][H,P,N], decays [slot][H] */
    int64_t H, G;
    int P, N;
    gt_dtype dtype, dt_dtype;
    DeltaRule rule;
    int skip_per_channel;
    const void *x, *dt, *Bm, *Cm, *z, *dy;
    const float *A, *Dskip, *dt_bias;
    /* If not NULL, dy holds dy silu(z) as f16 times powers of two, and z is NULL.  dy_inverses holds the inverses of
     * these powers (sm90/gate.cuh). */
    const float* dy_inverses;
    gt_stride x_stride, dt_stride, Bm_stride, Cm_stride, z_stride, dy_stride;
    int tiles; /* tiles of 64 rows in a head's P rows */
    /* The order in which passes on compute capability 9.0 take the sequences: the longest first (rank_sequences()).
     * NULL: the call's order. */
    const int32_t* order;
    Bundles bundles;
    /* Tensor cores: the number of state columns that the launch takes (take_slab()).  It is at most SLAB, except that
     * sm90/forward.cuh takes all N. */
    int columns;
};

/* Whether a pass over the call's sequences reads only the caller's tensors, so that it need not wait for earlier
 * kernels.  This requires sequences in one segment, so no scan makes first states.  It also requires unpacked
 * sequences, so no kernel ranks them. */
GT_HD bool is_apart(const Problem& in) { return in.segments.count == 1 && !in.sequences.cu_seqlens; }

/* Checkpoints: states every 128 tokens, [b][h][slot][P][N].  They are fp32 in `plain`, or f16 in `values` if
 * has_f16_checkpoints().  The f16 values are scaled by powers of two.  `powers` has the inverse of each: [P/16][N/128]
 * floats for each slot, one for 16 rows and 128 columns. */
struct Checkpoints {
    float* plain;
    f16* values;
    float* powers;
};

GT_HD int row_tiles(int P) { return (int)(((uint32_t)P + 15) / 16); }
GT_HD int slabs(int N) { return (int)(((uint32_t)N + SLAB - 1) / SLAB); }

/* slot_powers(): the number of powers of a slot.  power_index(): the index of the power for a row and the first 128
 * columns. */
GT_HD int slot_powers(int P, int N) { return row_tiles(P) * slabs(N); }
GT_HD int power_index(int N, int row) { return (int)((uint32_t)row / 16) * slabs(N); }

/* Whether the kernels on tensor cores support the sizes. */
static inline bool has_tensor_sizes(const gt_ssd_args& a) { return a.N % 16 == 0 && a.P % 8 == 0; }

/* Whether checkpoints are f16.  The answer depends on the dtype and the sizes only, because forward and backward may
 * run different kernels. */
static inline bool has_f16_checkpoints(const gt_ssd_args& a) { return a.dtype != GT_F32 && has_tensor_sizes(a); }

static inline int64_t checkpoint_slots(const gt_ssd_args& a) {
    return a.B * a.H * chunk_slots(sequences_of(a), CHECKPOINT);
}

/* Takes checkpoints from an arena. */
static inline Checkpoints take_checkpoints(Arena& arena, const gt_ssd_args& a) {
    const int64_t slots = checkpoint_slots(a);
    Checkpoints c = {nullptr, nullptr, nullptr};
    if (has_f16_checkpoints(a)) {
        c.values = arena.take<f16>(slots * a.P * a.N);
        c.powers = arena.take<float>(slots * slot_powers((int)a.P, (int)a.N));
    } else {
        c.plain = arena.take<float>(slots * a.P * a.N);
    }
    return c;
}

/* ---- the parameters of kernels ------------------------------------------------------------------------------- */

/* Parameters of any/forward.cuh. */
struct ForwardParams {
    Problem in;
    void* y; /* NULL: the pass computes states only */
    gt_stride y_stride;
    const float* state_in;
    float* state_out;
    Checkpoints checkpoints;
    int keeps_checkpoints;
    Snapshots snapshots;
    int state_in_shared;
    int is_local; /* a Local (gt/recurrence/segments.cuh): not 0 if segments start from zero states and only
                   * segments.states and segments.decays are written */
};

/* Parameters of backward_kernel and reverse_states_kernel in any/gradients.cuh. */
struct BackwardParams {
    Problem in;
    Checkpoints checkpoints;
    const float* dstate_out;
    float* scratch;    /* [blocks,8,64,WIDTH]: a block's states before sub-chunks */
    float* dstate_in;  /* NULL if the caller does not want it, or if all sequences share it */
    float* dstate_sum; /* [strands,H,P,N], if all sequences share dstate_in: sums over a strand's sequences; else
                        * NULL */
    void *dx, *dz;
    gt_stride dx_stride, dz_stride;
    float *dB, *dC;     /* [B,T,G,H/G*tiles,N]: partial sums over rows p; or NULL */
    float *ddelta, *da; /* [tiles,B,T,H]; ddelta: the gradient of Delta without the term A da */
    float* dskip;       /* rows of partial sums (store_dskip()): [..,H,P] if per channel, [..,H] if per head; or NULL */
    int all_segments;   /* reverse_states_kernel takes the first segment of a sequence, too */
};

/* Parameters of backward_delta_kernel in any/gradients.cuh. */
struct DeltaParams {
    Problem in;
    const float *ddelta, *da;
    void* ddt;
    gt_stride ddt_stride;
    float *dA, *dbias; /* rows of partial sums [B*windows,H]; or NULL */
};

/* B and C as f16, in the layout of shared memory.  values: [chunk][G][2] tiles.  inverses: [chunk][G][2][64], the
 * inverse power of each row (token) of a tile.  chunk counts all chunk slots, two for each slot of 128 tokens. */
struct GroupTiles {
    f16* values;
    float* inverses;
};

/* Parameters of forward in mma/ and sm90/. */
struct TensorParams {
    Problem in;
    void* y;
    gt_stride y_stride;
    const float* state_in;
    float* state_out;
    int state_in_shared;
    Checkpoints checkpoints;
    Snapshots snapshots;
    float* share;                /* [B,T,H,P]: partial sums of y from earlier slabs; NULL: there is only one slab */
    int has_share, leaves_share; /* has_share: the launch adds share to its sums; leaves_share: it stores its sums to
                                  * share, and no y */
    int makes_dz;                /* backward: the kernel computes dz and stores it to y */
    GroupTiles groups;           /* scratch of forward_maps_kernel; NULL pointers if another kernel runs */
};

/* Parameters of the passes over states in mma/ and sm90/. */
struct StatesParams {
    Problem in;
    const float* state_in; /* REVERSE: dstate_out */
    float* state_out;      /* dstate_in */
    float* state_sum;      /* [strands][H,P,N]: if not NULL, gets the sum over a strand's sequences instead of
                            * state_out */
    int state_in_shared;
    Checkpoints checkpoints;
    int is_local; /* a Local: not 0 if segments start from zero states and only segments.states and segments.decays are
                   * written */
};

/* g = dy silu(z), which kernels take in place of dy.  z is then NULL. */
struct GatedRows {
    void* rows; /* f16 [B,T,H,P]; NULL: not used */
    gt_stride stride;
    float* inverses; /* inverses of the powers of two in rows: see inverses_index() */
};

/* How a kernel computes dz from y. */
struct GateGradient {
    const void* y; /* NULL: the kernel does not compute dz */
    void* dz;
    gt_stride y_stride, dz_stride;
    int32_t* lost; /* for each place (a chunk of a head and tile): not 0 if y / silu(z) is lost for some element
                    * (sm90/gate.cuh) */
};

/* Parameters of the gradients of chunks in mma/ and sm90/, with 16-bit activations. */
struct ChunkGradientParams {
    Problem in;
    Checkpoints h, G; /* h before the first token of each slot, G after its last token; values NULL: zeros */
    int64_t slots;
    uint32_t by_tiles;          /* 2^32 / in.tiles, rounded up; not used if there is one tile */
    void *dx, *ddt, *dBm, *dCm; /* NULL: not wanted */
    gt_stride dx_stride, ddt_stride, dBm_stride, dCm_stride;
    /* Partial sums of earlier slabs.  dx_share is indexed by place, step and thread.  ddt_share is [B*slots*2][H][64],
     * and not used on compute capability 9.0.  NULL: there is one slab, or the caller does not want the gradient. */
    float *dx_share, *ddt_share;
    int has_share, leaves_share; /* has_share: the launch adds these partial sums to its own; leaves_share: it stores
                                  * its sums there, not to dx and ddt */
    /* Sums over a chunk, [B*slots*2][H]; dskip per channel is [B*slots*2][H][P].  NULL: the caller does not want
     * them. */
    float *dA, *dbias, *dskip;
};

/* Sums over a chunk (docs/ssd.md, section 6) that the other chunks of its slot need for da.  They lie in memory as [B,
 * slots][SLOT_SHORTS][COUNT][H]. */
struct Across {
    static constexpr int E = 0, F = 1, GAMMA = 2 /* three sums: over pairs with chunk 0, 1 and 2 */, Z = 5, COUNT = 6;
};

/* Parameters of the gradients of chunks in mma/ and sm90/, with fp32 activations. */
struct SplitGradientParams {
    Problem in;
    Checkpoints h, G;          /* h before the first token of each slot, G after its last token; plain NULL: zeros */
    int64_t slots, state_step; /* state_step: slots P N, the stride from a head's states to the next head's */
    float *dx, *dBm, *dCm;     /* NULL: not wanted */
    gt_stride dx_stride, dBm_stride, dCm_stride;
    float *da, *direct, *across; /* [B,T,H].  da: without the sums in `across`; direct: <x, U>; across: see Across.
                                  * NULL: not needed */
    float* dskip;                /* [B*slots*4][H], or per channel [B*slots*4][H][P]; NULL: not wanted */
    int has_share;               /* an earlier slab has stored partial sums of dx, da, direct and across, and this
                                  * launch adds to them */
};

/* Parameters of mma/fp32_gradients_tokens.cuh. */
struct ChunkTimesParams {
    Problem in;
    int64_t slots;
    const float *da, *direct, *across; /* as in SplitGradientParams */
    void* ddt;
    gt_stride ddt_stride;
    float *dA, *dbias; /* [B*slots][H]; NULL: not wanted */
};

/* Parameters of sm90/gradients_tokens.cuh. */
struct TokenParams {
    ChunkGradientParams chunk; /* the parameters before take_slab() */
    /* tokens: [row][H][records] records of type ChunkTokens, record_count floats apart.  sums: [slab][row][H][tiles]
     * records of type ChunkSums, sums_count floats apart.  inverses: [slab][row][H][tiles][8], the inverse powers of h
     * (4) and G (4).  A row is a chunk slot. */
    float *tokens, *sums, *inverses;
    int record_count, sums_count;
    int64_t rows; /* B*slots*2 */
    int records;  /* records of a chunk and head: one per tile with z, else one */
    int has_powers;
};

/* ---- the blocks of a launch ------------------------------------------------------------------------------------- */

constexpr int MMA_UNITS = 2, UNIT_WARPS = 4, WARPS = MMA_UNITS * UNIT_WARPS,
              THREADS = 32 * WARPS; /* of mma/: a block has two units, and UNIT_WARPS warps for each unit */

/* The number of blocks with `bytes` of shared memory that run on a multiprocessor: two if they fit, else one.  The
 * driver takes 1 KB more for each block. */
GT_HD constexpr int blocks_at_once(int bytes) { return 2 * (bytes + 1024) <= GT_SHARED_KB * 1024 ? 2 : 1; }

/* group_units(): the units of a group.  group_bundles(): the blocks that take these units, `units` per block.
 * group_pairs(): the same for blocks of MMA_UNITS. */
GT_HD int64_t group_units(const Problem& in) { return in.H / in.G * in.tiles; }
GT_HD int64_t group_bundles(const Problem& in, int units) { return (group_units(in) + units - 1) / units; }
GT_HD int64_t group_pairs(const Problem& in) { return (group_units(in) + MMA_UNITS - 1) / MMA_UNITS; }

constexpr int TOKEN_WARPS = 8, TOKEN_BLOCKS = 16;

/* ---- the segments, tokens and chunks of a block --------------------------------------------------------------- */

/* Finds segment number `item`, with sequences in the order of Problem::order.  If sequences are cut into segments, item
 * must be below 2^31. */
GT_DEV Span ordered_span(const Problem& in, int64_t item) {
    int segment = 0;
    if (in.segments.count > 1) item = divide((int)item, in.bundles.segments, &segment);
    if (in.order) item = in.order[item];
    return span_of(in.sequences, in.segments, CHECKPOINT, item, segment);
}

/* The number of segments of all sequences, which the strands share. */
GT_DEV int64_t items_of(const Problem& in) { return sequence_count(in.sequences) * in.segments.count; }

/* The address of a segment's first state, or NULL for zeros.  If sequences have one segment, the state is row s of
 * `states`; otherwise it is a result of scan_segments.  Then `states` must not be read, because another segment's block
 * may already have written the last state there. */
GT_DEV const float* first_state(const Problem& in, const Span& span, const float* states, int64_t s) {
    const int64_t size = in.H * in.P * in.N;
    return gt::first_state(in.sequences, in.segments, span, size, states, s);
}

/* The address of the last state of sequence s, or NULL. */
GT_DEV float* last_state(const Problem& in, float* states, int64_t s) {
    return end_row(in.sequences, states, in.H * in.P * in.N, s);
}

/* The address for the state after a segment's first `tokens` tokens, or NULL if no snapshot is due. */
GT_DEV float* snapshot_row(const Problem& in, const Snapshots& snapshots, const Span& span, int tokens) {
    return gt::snapshot_row(in.sequences, snapshots, in.H * in.P * in.N, span, tokens);
}

/* The index in Problem::dy_inverses of a chunk and tile, which have BLOCKS inverses there.  slot: counted over all
 * heads and batch elements. */
GT_DEV int64_t inverses_index(const Problem& in, int64_t slot, int chunk, int tile) {
    return ((slot * SLOT_CHUNKS + chunk % SLOT_CHUNKS) * in.tiles + tile) * BLOCKS;
}

GT_DEV float dot4(float4 a, float4 b, float sum) {
    sum = fma_rn(a.x, b.x, sum);
    sum = fma_rn(a.y, b.y, sum);
    sum = fma_rn(a.z, b.z, sum);
    return fma_rn(a.w, b.w, sum);
}

/* Loads dt, without the bias, for tokens 2 lane and 2 lane + 1 of a chunk with `tokens` tokens.  first: the index of
 * the chunk's first dt. */
GT_DEV void load_dt(const Problem& in, int64_t first, int tokens, float (&dt)[2]) {
    const int t = 2 * here();
    dt[0] = t < tokens ? load_as(in.dt, in.dt_dtype, first + t * in.dt_stride.t) : 0.0f;
    dt[1] = t + 1 < tokens ? load_as(in.dt, in.dt_dtype, first + (t + 1) * in.dt_stride.t) : 0.0f;
}

/* Loads the bits of dt, without conversion.  So the lane does not wait for the loads before dt_of_bits(). */
GT_DEV void load_dt(const Problem& in, int64_t first, int tokens, uint32_t (&bits)[2]) {
    const int t = 2 * here();
    GT_UNROLL
    for (int i = 0; i < 2; i++) {
        const int64_t at = first + (t + i) * in.dt_stride.t;
        bits[i] = 0;
        if (t + i >= tokens) continue;
        bits[i] =
            in.dt_dtype == GT_F32 ? static_cast<const uint32_t*>(in.dt)[at] : static_cast<const uint16_t*>(in.dt)[at];
    }
}

GT_DEV void dt_of_bits(const Problem& in, const uint32_t (&bits)[2], float (&dt)[2]) {
    GT_UNROLL
    for (int i = 0; i < 2; i++)
        dt[i] = in.dt_dtype == GT_F32    ? as_float(bits[i])
                : in.dt_dtype == GT_BF16 ? Element<bf16>::lo(bits[i])
                                         : Element<f16>::lo(bits[i]);
}

/* Computes Delta of tokens 2 lane and 2 lane + 1.  Delta is 0 for missing tokens. */
GT_DEV void deltas_of(const Problem& in, int h, int tokens, const float (&dt)[2], Delta (&delta)[2]) {
    const float bias = in.dt_bias ? in.dt_bias[h] : 0.0f;
    const int t = 2 * here();
    GT_UNROLL
    for (int i = 0; i < 2; i++) {
        delta[i] = {0.0f, 0.0f};
        if (t + i < tokens) delta[i] = delta_of(in.rule, dt[i] + bias);
    }
}

/* Computes Delta without its slope, which takes fewer registers. */
GT_DEV void deltas_of(const Problem& in, int h, int tokens, const float (&dt)[2], float (&delta)[2]) {
    const float bias = in.dt_bias ? in.dt_bias[h] : 0.0f;
    const int t = 2 * here();
    delta[0] = t < tokens ? delta_of(in.rule, dt[0] + bias).value : 0.0f;
    delta[1] = t + 1 < tokens ? delta_of(in.rule, dt[1] + bias).value : 0.0f;
}

/* Calls one of the two functions above with dt from bits. */
template <class T>
GT_DEV void deltas_of(const Problem& in, int h, int tokens, const uint32_t (&bits)[2], T (&delta)[2]) {
    float dt[2];
    dt_of_bits(in, bits, dt);
    deltas_of(in, h, tokens, dt, delta);
}

/* Returns Dskip of rows p and p + 1. */
GT_DEV float2 skips_of(const Problem& in, int h, int p) {
    if (!in.Dskip) return {0.0f, 0.0f};
    if (!in.skip_per_channel) return {in.Dskip[h], in.Dskip[h]};
    const float* skip = in.Dskip + (int64_t)h * in.P;
    return {p < in.P ? skip[p] : 0.0f, p + 1 < in.P ? skip[p + 1] : 0.0f};
}

/* The chunk that a block takes in the gradients of chunks.  The block goes through the heads of a group in steps; a
 * step is 64 rows p of one head. */
struct ChunkPlace {
    uint32_t smem;
    int64_t first; /* the chunk's first token */
    int b, slot, g, heads, steps;
    int warp; /* from shfl_idx(), so the compiler knows that all lanes have the same value */
    int tokens, neighbour_tokens;
    bool second; /* the chunk is the second one of its slot */

    GT_METHOD static int step_head(const ChunkGradientParams& p, int step) { /* computes step / tiles */
        return p.in.tiles == 1 ? step : (int)((uint64_t)(uint32_t)step * p.by_tiles >> 32);
    }
    GT_METHOD int head(const ChunkGradientParams& p, int step) const { return g * heads + step_head(p, step); }
    GT_METHOD int tile(const ChunkGradientParams& p, int step) const { return step - step_head(p, step) * p.in.tiles; }
    GT_METHOD int p0(const ChunkGradientParams& p, int step) const { return tile(p, step) * TILE_P; }
    GT_METHOD int64_t neighbour() const { return second ? first - CHUNK : first + CHUNK; } /* other chunk's start */
    GT_METHOD int64_t row(int64_t slots) const { return (b * slots + slot) * 2 + second; } /* row of the partial sums */
    GT_METHOD bool makes_state() const { return neighbour_tokens > 0; }
};

/* Finds the chunk of a place.  Places are numbered as [B,slots,G][2 chunks of a slot].  A place without a chunk gets
 * tokens = 0.  Int: the type of the divisions.  32-bit divisions are faster, which matters if a block takes several
 * places. */
template <class Int = int64_t>
GT_DEV ChunkPlace find_chunk(const ChunkGradientParams& p, int place) {
    const Problem& in = p.in;
    ChunkPlace me;
    const Int pair = (Int)(place / 2), groups = (Int)in.G, slots = (Int)p.slots;
    me.smem = smem_base();
    me.warp = shfl_idx(warp_id(), 0);
    me.second = place % 2;
    me.g = (int)(pair % groups);
    const Int index = pair / groups;
    me.slot = (int)(index % slots);
    me.b = (int)(index / slots);
    me.heads = (int)((Int)in.H / groups);
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

/* Clears the partial sums of a chunk slot without a chunk, because reduce_rows() adds over all chunk slots. */
GT_DEV void clear_sums(const ChunkGradientParams& p, int64_t row, int thread, int threads) {
    const Problem& in = p.in;
    const int64_t skips = in.skip_per_channel ? in.H * in.P : in.H;
    for (int64_t i = thread; i < skips; i += threads) {
        if (p.dskip) p.dskip[row * skips + i] = 0.0f;
        if (i >= in.H) continue;
        if (p.dA) p.dA[row * in.H + i] = 0.0f;
        if (p.dbias) p.dbias[row * in.H + i] = 0.0f;
    }
}

/* Clears the partial sums of a chunk slot without a chunk, because reduce_rows() adds over all chunk slots. */
GT_DEV void clear_split_sums(const SplitGradientParams& p, int64_t row) {
    const Problem& in = p.in;
    const int64_t skips = in.skip_per_channel ? in.H * in.P : in.H;
    for (int64_t i = thread_id(); p.dskip && i < skips; i += block_threads()) p.dskip[row * skips + i] = 0.0f;
}

} /* namespace ssd */
} /* namespace gt */

#endif
