/* gt/ssd/problem.cuh - the arguments of ssd in the form that kernels take.  It has sizes, the tensors of a call, the
 * parameters that a plan gives to each kernel, and the segments, tokens and chunks of a block.  It includes no other
 * file of ssd. */
#ifndef GT_SSD_PROBLEM_CUH
#define GT_SSD_PROBLEM_CUH

#include "../recurrence/ssm.cuh"

namespace gt {
namespace ssd {

using namespace ssm;

/* ---- sizes ------------------------------------------------------------------------------------------------------ */

constexpr int TILE_P = 64; /* rows of the state per block */

/* The number of columns of a state that a launch on tensor cores takes.  More columns take several launches, one after
 * another.  y, dx, ddt and the sums are sums over columns, so each launch adds a partial sum.  Exception:
 * sm90/forward.cuh takes up to 256 columns in one launch. */
constexpr int SLAB = 128;

/* Tokens of a chunk in mma/ with fp32 activations, which take twice as many bytes as 16-bit activations. */
constexpr int SHORT = 32, SHORT_BLOCKS = SHORT / BLOCK, SLOT_SHORTS = CHECKPOINT / SHORT;

constexpr int SLOT_CHUNKS = CHECKPOINT / CHUNK;

/* ---- the arguments ---------------------------------------------------------------------------------------------- */

/* Numbers of the blocks of a launch on 9.0, where a block takes several units of a group.  The host makes them: on the
 * device a division takes half a microsecond, and a block's first copies would wait for it.  Dividers: by blocks of a
 * strand, bundles of a group, tiles of a head, segments of a sequence. */
struct Bundles {
    int strands, heads, units; /* heads, units of a group */
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
    /* If not NULL, dy is dy silu(z) as f16 and z is NULL.  dy_inverses then has the inverses of dy's powers
     * (sm90/gate.cuh). */
    const float* dy_inverses;
    gt_stride x_stride, dt_stride, Bm_stride, Cm_stride, z_stride, dy_stride;
    int tiles; /* of 64 rows of P */
    /* The order of sequences in passes on 9.0: the longest come first (see rank_sequences).  NULL: the call's order. */
    const int32_t* order;
    Bundles bundles;
    /* Tensor cores: the columns of the states that the launch takes (take_slab()).  At most SLAB, but all N in
     * sm90/forward.cuh. */
    int columns;
};

/* Whether a pass over the call's sequences, forward or reverse, reads the caller's tensors only.  This is so if
 * sequences are not cut into segments and not packed, since then no kernel ranks them.  Such a pass need not wait for
 * previous kernels. */
GT_HD bool is_apart(const Problem& in) { return in.segments.count == 1 && !in.sequences.cu_seqlens; }

/* States every 128 tokens, [b][h][slot][P][N].  They are fp32, or f16 if the activations have 16 bits and rows are
 * whole pieces.  After all f16 states come [P/16][N/128] floats for each slot: the factor of the values in each 16
 * rows. */
struct Checkpoints {
    float* plain;
    f16* values;
    float* powers;
};

GT_HD int row_tiles(int P) { return (int)(((uint32_t)P + 15) / 16); }
GT_HD int slabs(int N) { return (int)(((uint32_t)N + SLAB - 1) / SLAB); }

/* The number of powers of a slot, and the index of the power for a row in the first 128 columns. */
GT_HD int slot_powers(int P, int N) { return row_tiles(P) * slabs(N); }
GT_HD int power_index(int N, int row) { return (int)((uint32_t)row / 16) * slabs(N); }

/* Whether tensor cores take the sizes. */
static inline bool has_tensor_sizes(const gt_ssd_args& a) { return a.N % 16 == 0 && a.P % 8 == 0; }

/* Whether checkpoints are f16.  This does not depend on the kernels that write and read them. */
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

/* any/forward.cuh */
struct ForwardParams {
    Problem in;
    void* y; /* NULL: only states are wanted */
    gt_stride y_stride;
    const float* state_in;
    float* state_out;
    Checkpoints checkpoints;
    int keeps_checkpoints;
    int state_in_shared;
    int is_local; /* a Local: segments start from zero states; only segments.states and segments.decays are written */
};

/* any/gradients.cuh: backward_kernel, reverse_states_kernel */
struct BackwardParams {
    Problem in;
    Checkpoints checkpoints;
    const float* dstate_out;
    float* scratch;    /* [blocks,8,64,WIDTH] */
    float* dstate_in;  /* NULL if not wanted, or shared */
    float* dstate_sum; /* [strands,H,P,N]: sums over all sequences of a strand; or NULL */
    void *dx, *dz;
    gt_stride dx_stride, dz_stride;
    float *dB, *dC;     /* [B,T,G,H/G*tiles,N] or NULL */
    float *ddelta, *da; /* [tiles,B,T,H]; ddelta without A da */
    float* dskip;       /* rows of sums, see store_dskip(): [..,H,P] or, per head, [..,H]; or NULL */
    int all_segments;   /* reverse_states_kernel: also the first segment of a sequence */
};

/* any/gradients.cuh: backward_delta_kernel */
struct DeltaParams {
    Problem in;
    const float *ddelta, *da;
    void* ddt;
    gt_stride ddt_stride;
    float *dA, *dbias; /* rows [B*windows,H] or NULL */
};

/* B and C as f16, in the layout of shared memory: [rows][G][2] tiles, and [rows][G][2][64] inverse powers of their
 * rows.  rows: the number of possible chunks, two per slot of 128 tokens. */
struct GroupTiles {
    f16* values;
    float* inverses;
};

/* forward of mma/ and sm90/ */
struct TensorParams {
    Problem in;
    void* y;
    gt_stride y_stride;
    const float* state_in;
    float* state_out;
    int state_in_shared;
    Checkpoints checkpoints;
    float* share;                /* [B,T,H,P]: partial sums of y from earlier launches; NULL: there is only one
                                  * launch */
    int has_share, leaves_share; /* has_share: the launch adds share; leaves_share: it stores share and nothing else */
    int makes_dz;                /* backward: y is dz */
    GroupTiles groups;           /* scratch of forward_maps_kernel; NULL pointers: another kernel runs */
};

/* Parameters of the passes over states in mma/ and sm90/. */
struct StatesParams {
    Problem in;
    const float* state_in; /* REVERSE: dstate_out */
    float* state_out;      /* dstate_in */
    float* state_sum;      /* [strands][H,P,N]: replaces state_out, and gets the sum over a strand's sequences */
    int state_in_shared;
    Checkpoints checkpoints;
    int is_local; /* a Local: segments start from zeros; only segments.states and segments.decays are written */
};

/* g, which kernels take in place of dy; z is then NULL. */
struct GatedRows {
    void* rows; /* f16 [B,T,H,P]; NULL: none */
    gt_stride stride;
    float* inverses; /* see inverses_index() */
};

/* dz of y. */
struct GateGradient {
    const void* y; /* NULL: not made here */
    void* dz;
    gt_stride y_stride, dz_stride;
    int32_t* lost; /* by place: not 0 if u of some element is lost */
};

/* Parameters of the gradients of chunks in mma/ and sm90/, 16 bits. */
struct ChunkGradientParams {
    Problem in;
    Checkpoints h, G; /* h before the first token of each slot, G after its last token; values NULL: 0 */
    int64_t slots;
    uint32_t by_tiles;          /* 2^32 / in.tiles, rounded up; not used if there is one tile */
    void *dx, *ddt, *dBm, *dCm; /* NULL: not wanted */
    gt_stride dx_stride, ddt_stride, dBm_stride, dCm_stride;
    /* Partial sums of earlier launches: of dx, by place, step and thread; of ddt, [B*slots*2][H][64], not used on 9.0.
     * NULL: there is one launch, or the gradient is not wanted. */
    float *dx_share, *ddt_share;
    int has_share, leaves_share; /* has_share: the launch adds them; leaves_share: it stores them instead of dx and
                                  * ddt */
    /* sums over a chunk, [B*slots*2][H]; dskip per channel [B*slots*2][H][P]; NULL: not wanted */
    float *dA, *dbias, *dskip;
};

/* A chunk's sums that the other chunks of its slot need: [B, slots][SLOT_SHORTS][COUNT][H]. */
struct Across {
    static constexpr int E = 0, F = 1, GAMMA = 2 /* with chunk 0, 1, 2 */, Z = 5, COUNT = 6;
};

/* Parameters of the gradients of chunks in mma/ and sm90/, fp32. */
struct SplitGradientParams {
    Problem in;
    Checkpoints h, G;          /* h before the first token of each slot, G after its last token; plain NULL: 0 */
    int64_t slots, state_step; /* state_step: slots P N, from a head's states to the next head's */
    float *dx, *dBm, *dCm;     /* NULL: not wanted */
    gt_stride dx_stride, dBm_stride, dCm_stride;
    float *da, *direct, *across; /* [B,T,H]: da without the sums across chunks; <x, U>.  NULL: not wanted */
    float* dskip;                /* [B*slots*4][H], per channel [H][P]; NULL: not wanted */
    int has_share;               /* an earlier launch has stored its partial sums of dx, da, direct and across */
};

/* mma/fp32_gradients_tokens.cuh */
struct ChunkTimesParams {
    Problem in;
    int64_t slots;
    const float *da, *direct, *across; /* of SplitGradientParams */
    void* ddt;
    gt_stride ddt_stride;
    float *dA, *dbias; /* [B*slots][H]; NULL: not wanted */
};

/* sm90/gradients_tokens.cuh */
struct TokenParams {
    ChunkGradientParams chunk; /* of all slabs */
    /* tokens: [row][H][records] ChunkTokens, record_count floats apart.  sums: [slab][row][H][tiles] ChunkSums,
     * sums_count floats apart.  inverses: as many times the inverse powers of h (4) and G (4). */
    float *tokens, *sums, *inverses;
    int record_count, sums_count;
    int64_t rows; /* B*slots*2 */
    int records;  /* records of a chunk and head: with z one per tile, else one */
    int has_powers;
};

/* ---- the blocks of a launch ------------------------------------------------------------------------------------- */

constexpr int MMA_UNITS = 2, UNIT_WARPS = 4, WARPS = MMA_UNITS * UNIT_WARPS,
              THREADS = 32 * WARPS; /* THREADS per block; UNIT_WARPS per unit */

/* The number of blocks with `bytes` of shared memory per multiprocessor: two, if their memory and the driver's 1 KB for
 * each block fit. */
GT_HD constexpr int blocks_at_once(int bytes) { return 2 * (bytes + 1024) <= GT_SHARED_KB * 1024 ? 2 : 1; }

/* group_units(): units of a group.  group_bundles(): blocks for these units. */
GT_HD int64_t group_units(const Problem& in) { return in.H / in.G * in.tiles; }
GT_HD int64_t group_bundles(const Problem& in, int units) { return (group_units(in) + units - 1) / units; }
GT_HD int64_t group_pairs(const Problem& in) { return (group_units(in) + MMA_UNITS - 1) / MMA_UNITS; }

constexpr int TOKEN_WARPS = 8, TOKEN_BLOCKS = 16;

/* ---- the segments, tokens and chunks of a block --------------------------------------------------------------- */

/* Segment number `item` in the order of Problem::order.  If sequences have several segments each, item must be <
 * 2^31. */
GT_DEV Span ordered_span(const Problem& in, int64_t item) {
    int segment = 0;
    if (in.segments.count > 1) item = divide((int)item, in.bundles.segments, &segment);
    if (in.order) item = in.order[item];
    return span_of(in.sequences, in.segments, CHECKPOINT, item, segment);
}

/* items_of(): the number of segments that the blocks of a tile and head share.  strands(): the number of these
 * blocks. */
GT_DEV int64_t items_of(const Problem& in) { return sequence_count(in.sequences) * in.segments.count; }

/* A segment's first state.  With one segment per sequence it is the sequence's state in `states`, else the result of
 * scan_segments.  With several segments `states` must not be read: the block of another segment may already have
 * written the last state there. */
GT_DEV const float* first_state(const Problem& in, const Span& span, const float* states, int64_t s) {
    const int64_t size = in.H * in.P * in.N;
    return gt::first_state(in.sequences, in.segments, span, size, states, s);
}

/* The address of the last state of sequence s, or NULL. */
GT_DEV float* last_state(const Problem& in, float* states, int64_t s) {
    return end_row(in.sequences, states, in.H * in.P * in.N, s);
}

/* The index in Problem::dy_inverses of the BLOCKS numbers of a chunk and tile.  slot: counted over all heads and batch
 * elements. */
GT_DEV int64_t inverses_index(const Problem& in, int64_t slot, int chunk, int tile) {
    return ((slot * SLOT_CHUNKS + chunk % SLOT_CHUNKS) * in.tiles + tile) * BLOCKS;
}

GT_DEV float dot4(float4 a, float4 b, float sum) {
    sum = fma_rn(a.x, b.x, sum);
    sum = fma_rn(a.y, b.y, sum);
    sum = fma_rn(a.z, b.z, sum);
    return fma_rn(a.w, b.w, sum);
}

/* Loads dt of the tokens 2 lane, 2 lane + 1 of a chunk with `tokens` tokens, as stored.  first: the chunk's first
 * element. */
GT_DEV void load_dt(const Problem& in, int64_t first, int tokens, float (&dt)[2]) {
    const int t = 2 * here();
    dt[0] = t < tokens ? load_as(in.dt, in.dt_dtype, first + t * in.dt_stride.t) : 0.0f;
    dt[1] = t + 1 < tokens ? load_as(in.dt, in.dt_dtype, first + (t + 1) * in.dt_stride.t) : 0.0f;
}

/* The same load as bits, because a conversion to numbers would wait for the loads. */
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

/* Delta of these tokens, 0 beyond. */
GT_DEV void deltas_of(const Problem& in, int h, int tokens, const float (&dt)[2], Delta (&delta)[2]) {
    const float bias = in.dt_bias ? in.dt_bias[h] : 0.0f;
    const int t = 2 * here();
    GT_UNROLL
    for (int i = 0; i < 2; i++) {
        delta[i] = {0.0f, 0.0f};
        if (t + i < tokens) delta[i] = delta_of(in.rule, dt[i] + bias);
    }
}

/* Makes Delta without the slopes, which takes fewer registers. */
GT_DEV void deltas_of(const Problem& in, int h, int tokens, const float (&dt)[2], float (&delta)[2]) {
    const float bias = in.dt_bias ? in.dt_bias[h] : 0.0f;
    const int t = 2 * here();
    delta[0] = t < tokens ? delta_of(in.rule, dt[0] + bias).value : 0.0f;
    delta[1] = t + 1 < tokens ? delta_of(in.rule, dt[1] + bias).value : 0.0f;
}

/* Either of them, from bits. */
template <class T>
GT_DEV void deltas_of(const Problem& in, int h, int tokens, const uint32_t (&bits)[2], T (&delta)[2]) {
    float dt[2];
    dt_of_bits(in, bits, dt);
    deltas_of(in, h, tokens, dt, delta);
}

/* Dskip of the lane's rows p, p + 1. */
GT_DEV float2 skips_of(const Problem& in, int h, int p) {
    if (!in.Dskip) return {0.0f, 0.0f};
    if (!in.skip_per_channel) return {in.Dskip[h], in.Dskip[h]};
    const float* skip = in.Dskip + (int64_t)h * in.P;
    return {p < in.P ? skip[p] : 0.0f, p + 1 < in.P ? skip[p + 1] : 0.0f};
}

/* The chunk of a block in the gradients of chunks.  A step is 64 rows p of one head of its group. */
struct ChunkPlace {
    uint32_t smem;
    int64_t first; /* token */
    int b, slot, g, heads, steps;
    int warp; /* the compiler knows that all lanes have the same value */
    int tokens, neighbour_tokens;
    bool second; /* second of the two chunks of its checkpoint */

    GT_METHOD static int step_head(const ChunkGradientParams& p, int step) { /* step / tiles */
        return p.in.tiles == 1 ? step : (int)((uint64_t)(uint32_t)step * p.by_tiles >> 32);
    }
    GT_METHOD int head(const ChunkGradientParams& p, int step) const { return g * heads + step_head(p, step); }
    GT_METHOD int tile(const ChunkGradientParams& p, int step) const { return step - step_head(p, step) * p.in.tiles; }
    GT_METHOD int p0(const ChunkGradientParams& p, int step) const { return tile(p, step) * TILE_P; }
    GT_METHOD int64_t neighbour() const { return second ? first - CHUNK : first + CHUNK; } /* its first token */
    GT_METHOD int64_t row(int64_t slots) const { return (b * slots + slot) * 2 + second; } /* of the sums */
    GT_METHOD bool makes_state() const { return neighbour_tokens > 0; }
};

/* Finds the chunk of a place.  Places are numbered by [B,slots,G], then by the two chunks of a slot.  tokens = 0: the
 * place has no chunk.  Int: the type of the divisions.  32 bits are quick, which matters where a block takes several
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

/* Clears the sums of a chunk that does not exist, since sums are added over all possible chunks. */
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

/* Clears the sums of a chunk that does not exist, since sums are added over all possible chunks. */
GT_DEV void clear_split_sums(const SplitGradientParams& p, int64_t row) {
    const Problem& in = p.in;
    const int64_t skips = in.skip_per_channel ? in.H * in.P : in.H;
    for (int64_t i = thread_id(); p.dskip && i < skips; i += block_threads()) p.dskip[row * skips + i] = 0.0f;
}

} /* namespace ssd */
} /* namespace gt */

#endif
