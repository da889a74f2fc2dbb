/* gt/wkv6/pass.cuh - shared by the kernels that pass through time on tensor cores, forward or in reverse.  This file
 * has their compile-time traits (TensorTraits) and parameters.  It finds a block's tokens, its first state, and the
 * address of its last state.  forward.cuh explains the roles of warps, R, K, E, and the groups of 16 channels. */
#ifndef GT_WKV6_PASS_CUH
#define GT_WKV6_PASS_CUH

#include "operands.cuh"

namespace gt {
namespace wkv6 {

/* ---- how the kernels are compiled --------------------------------------------------------------------------- */

/* STATES: the traits are for states_tensor_kernel (states.cuh), which computes only states.  S_COPIES: see
 * states.cuh. */
template <class T_, class W_, int N_, bool STATES_ = false, int S_COPIES_ = 2>
struct TensorTraits {
    using T = T_;
    using W = W_;
    using State = StateOf<T>;
    using Gradient = GradientOf<T>;
    static constexpr int N = N_;
    static constexpr bool TF32X3 = std::is_same<T, float>::value;           /* fp32: three tf32 products for each one */
    static constexpr bool SCALES_G = !std::is_same<Gradient, State>::value; /* f16: G is scaled (RowScale) */
    static constexpr int HEADS = N == 32 ? 2 : 1;                           /* heads of a block */
    static constexpr bool STATES = STATES_, MAKES_Y = !STATES;
    static constexpr int TILES = (N == 128 && !STATES) || (STATES && TF32X3) ? 2 : 4;
    /* COLUMNS: values of a consumer warp.  ROWS: channels of a consumer warp. */
    static constexpr int COLUMNS = 8 * TILES, ROWS = !STATES || TF32X3 ? N : N == 128 ? 64 : 32;
    static constexpr int MT = TILES / 2, NT = N / 8;
    /* The number of tiles over which a lane's values are adjacent.  With STATES a lane has 16 bytes of values, as in
     * G. */
    static constexpr int PERMUTED = !STATES ? TILES : TF32X3 ? 1 : 4;
    /* PARTS: parts of a state's row, one for each consumer warp.  SHARES: consumer warps that share a state. */
    static constexpr int GROUPS = N / 16, PARTS = N / COLUMNS, SHARES = N / ROWS * PARTS;
    /* Producer warps of a group that take sub-chunks in turn. */
    static constexpr int TURNS = STATES && N != 128 ? 2 : 1;
    /* Sub-chunks in the body of a producer warp's loop.  fp32 with N = 64 has one.  With two, all loops together would
     * have 29 KB of code, and the instruction cache of a multiprocessor has 32 KB. */
    static constexpr int PREPARED = TF32X3 && N == 64 ? 1 : 2;
    static constexpr int PRODUCER_WARPS = TURNS * HEADS * GROUPS, CONSUMER_WARPS = HEADS * SHARES;
    static constexpr int THREADS = 32 * (PRODUCER_WARPS + CONSUMER_WARPS);
    static constexpr bool KEEPS_BF16 = std::is_same<State, bf16>::value;
    /* STEP: tokens that a producer warp prepares together.  TOKENS: a lane's share of them.  With STATES no factor
     * exceeds 1, so a step may be two sub-chunks.  It is two sub-chunks only for N = 64 in 16 bits: there it is faster,
     * and two blocks still fit the shared memory of 9.0. */
    static constexpr int STEP = STATES && !TF32X3 && N == 64 && sizeof(W) == 2 ? 2 * SUB_CHUNK : SUB_CHUNK,
                         TOKENS = STEP / 4;
    /* A ring of AHEAD steps whose copies are in flight: rows of r, k and w; and v in the order in which lanes copy it.
     * Each producer warp has its own ring, with rows of its 16 channels.  With STATES each team has a ring of whole
     * rows.  A team is the producer warps that prepare the same step of a head.  For N = 128 in 16 bits, AHEAD is the
     * number of steps that fit in 99 KB.  STATES with two copies of S needs more than 99 KB anyway, so AHEAD is 4. */
    static constexpr int TEAM = STATES ? GROUPS : 1, WIDTH = 16 * TEAM;
    static constexpr int AHEAD = STATES     ? (N < 128 || TF32X3 ? 2
                                               : S_COPIES_ == 2  ? 4
                                               : sizeof(W) == 2  ? 3
                                                                 : 2)
                                 : N != 128 ? (TF32X3 ? 2 : 4)
                                            : (sizeof(W) == 2 ? 2 : 1);
    static constexpr int RING_ROWS = STEP * WIDTH + 4 * 16;                            /* in elements: see ring_at() */
    static constexpr int RING_R = 0, RING_K = STATES ? 0 : RING_ROWS * (int)sizeof(T); /* offsets in bytes */
    static constexpr int RING_W = RING_K + RING_ROWS * (int)sizeof(T);
    static constexpr int RING_V = RING_W + RING_ROWS * (int)sizeof(W);
    static constexpr int STAGE = RING_V + STEP * WIDTH * (int)sizeof(T);
    /* How a team copies rows to the ring.  LANES: lanes per row, 16 bytes each.  ROWS: rows at a time.  PIECES: pieces
     * of 16 bytes that a lane copies. */
    template <class E>
    struct Copies {
        static constexpr int LANES = WIDTH * (int)sizeof(E) / 16, ROWS = 32 * TEAM / LANES, PIECES = STEP / ROWS;
    };
    static constexpr int PITCH = N + 8;
    static constexpr int PAIR_PITCH = 8 * N + 32; /* STATES: bytes from K of two tokens to K of the next two */
    static_assert(STEP / 2 * PAIR_PITCH <= STEP * PITCH * 4, "within K");
    /* Offsets in bytes within the buffer of one head.  A fragment is two tokens by two channels, 16 bytes. */
    static constexpr int FRAGMENTS = N / 2 + 4; /* fragments of R for two tokens */
    static constexpr int R = 0, K = STATES ? 0 : SUB_CHUNK / 2 * FRAGMENTS * 16, VALUES = K + STEP * PITCH * 4;
    static constexpr int VALUE_FRAGMENTS = N / 2 + 2; /* fp32: fragments of v for two tokens; with STATES, rows */
    static constexpr int VALUE_PITCH = 2 * VALUE_FRAGMENTS;
    static constexpr int SCALE = VALUES + (TF32X3 ? STEP / 2 * VALUE_FRAGMENTS * 16 : STEP * PITCH * 2);
    static constexpr int BONUS = SCALE + (TF32X3 ? 8 : 4) * N;
    static constexpr int STRONG_DECAY = BONUS + 4 * SUB_CHUNK * GROUPS, FULL = STRONG_DECAY + 32, EMPTY = FULL + 8;
    /* A_FULL = 0: these kernels lack that mbarrier of forward_sm90.cuh.  WORK: the block's index of work, only in
     * buffer 0. */
    static constexpr int A_FULL = 0, WORK = STRONG_DECAY + 56;
    static constexpr int PAIRS = STRONG_DECAY + 64;
    static constexpr int HEAD_BUFFER = PAIRS + (STATES ? 0 : 4 * SUB_CHUNK * SUB_CHUNK * GROUPS);
    static constexpr int BUFFER = HEADS * HEAD_BUFFER, BUFFERS = 2;
    static constexpr int RING = BUFFERS * BUFFER;
    static constexpr int SMEM = RING + PRODUCER_WARPS / TEAM * AHEAD * STAGE;
    /* Reverse pass in bf16: behind the rings lie S_COPIES copies of S of a checkpoint, for each head.  With one copy a
     * sum for each row follows. */
    static constexpr bool KEEPS_LO = KEEPS_BF16 && N == 32; /* keeps_lo() */
    static constexpr bool G_IN_OUTPUTS = G_FITS_OUTPUTS<T, N>;
    static constexpr int S_COPY = STATES && KEEPS_BF16 ? HEADS * N * N * 2 * (KEEPS_LO ? 2 : 1) : 0;
    static constexpr int S_COPIES = S_COPIES_, KEPT = SMEM + S_COPY;
    static constexpr int S_BYTES = S_COPIES == 2 ? 2 * S_COPY : S_COPY + 4 * ROWS * CONSUMER_WARPS;
    static constexpr bool NEEDS_ROOM = N == 128 && (STATES ? KEEPS_BF16 && S_COPIES == 2 : TF32X3);
    static_assert(SMEM + S_BYTES <= (NEEDS_ROOM ? AMPERE_KB : LEAST_KB) * 1024,
                  "fits every architecture, or sm_80 and sm_90");
    static_assert(GROUPS * 4 <= FULL - STRONG_DECAY && FULL % 8 == 0, "strong-decay flags, then mbarriers");
};

/* Returns the column at which shared memory holds value v of a token; v is even.  Values v and v + 1 lie in columns 2j
 * and 2j + 1 of tile i. */
template <class C>
GT_DEV constexpr int value_column(int v) {
    const int o = v % (8 * C::PERMUTED), i = o / 2 % C::PERMUTED, j = o / (2 * C::PERMUTED);
    return v - o + 8 * i + 2 * j;
}

/* fp32: returns the offset in bytes of value v of a token; v is a multiple of 4.  A fragment of v holds two tokens by
 * column c of tiles 2 mt and 2 mt + 1, in the order of a left operand.  One token's v and v + 2 are half of a fragment;
 * v + 1 and v + 3 are half of the next fragment. */
template <class C>
GT_DEV constexpr int value_fragment(int token, int v) {
    const int o = v % C::COLUMNS, mt = o % (2 * C::TILES) / 4, j = o / (2 * C::TILES);
    return 16 * (token / 2 * C::VALUE_FRAGMENTS + (v - o) / 2 + 8 * mt + 2 * j) + token % 2 * 8;
}

/* Traits of states_tensor_kernel. */
template <class T, class W, int N>
using StatesTraits = TensorTraits<T, W, N, true>;

/* ---- parameters ------------------------------------------------------------------------------------------- */

/* A sequence may be cut into segments, each with its own block (recurrence/segments.cuh).  This takes three launches:
 *   1. every segment except the last runs from a zero state (see Local);
 *   2. scan_segments_kernel computes the first state of every segment;
 *   3. every segment runs again, from its first state.
 * segments.states is [slot][H,N,N].  segments.decays is [slot][2][H,N]: log2 of the decay, as a sum of two terms. */
struct TensorParams : PassParams {
    /* Reverse pass: where G after a chunk of 64 tokens lies.  This G lies in the chunk's part of dv, row for row (N =
     * 128: 64 rows in dk, 64 in dv).  Then `checkpoints` [sequences,H,N,N] holds G of shorter chunks, and of the chunk
     * that last_apart names.  If data is NULL, `checkpoints` holds G of all chunks. */
    struct Rows {
        void* data;
        gt_stride stride;
    } G_rows[2];
    const void* S;  /* reverse pass in bf16: S before each chunk */
    float* rowsums; /* NULL, or sums over rows of S: [B,H,chunk slots,3,PARTS,N], see store_rowsums() */
    int S_copies;   /* copies of S for which a block has room: see states.cuh */
    int items;      /* upper bound of the number of items; an item is a segment of one head */
    Segments segments;
    Divider by_segments, by_H;
    int local; /* a Local; if not 0, the pass writes only segments.states and segments.decays */
    /* Reverse pass: G after the last chunk lies in `checkpoints`, not in the outputs.  The block of that chunk writes
     * the outputs while the reverse pass runs (BackwardParams::last_first). */
    bool last_apart;
    bool S_starts_zero; /* reverse pass: S before the first chunk of every sequence is 0 */
    float* G_inverse;   /* reverse pass in f16: [B,H,chunk slots,PARTS,N], RowScale::inverse of G */
    Mix mix;            /* forward only */
};

/* ---- the tokens of a block ---------------------------------------------------------------------------------- */

/* A segment of one head. */
struct HeadSpan {
    bool exists;
    bool starts, ends; /* the segment is the first, the last of its sequence in time */
    int head, h;       /* head: index over the heads of all sequences; h: index within the sequence */
    int slot;          /* slot of the segment */
    int64_t b;
    int64_t chunk; /* the segment's first chunk, in [B,H,chunk slots] */
    int start, tokens, sub_chunks;
};

template <bool REVERSE>
GT_DEV HeadSpan head_span_at(const TensorParams& p, int64_t item) {
    HeadSpan s;
    int segment;
    const bool inside = item < p.items;
    s.head = divide(inside ? (int)item : 0, p.by_segments, &segment);
    const int sequence = divide(s.head, p.by_H, &s.h);
    const bool has_sequence = sequence_exists(p.in.sequences, sequence);
    const Span span = span_of(p.in.sequences, p.segments, CHECKPOINT, has_sequence ? sequence : 0, segment);
    s.starts = span.starts;
    s.ends = span.ends;
    s.exists = inside && has_sequence && !skips(p.local, span, REVERSE ? s.starts : s.ends);
    s.b = span.b;
    s.slot = (int)span.segment_slot;
    s.start = (int)span.first;
    s.tokens = s.exists ? (int)(span.end - span.first) : 0;
    s.sub_chunks = (s.tokens + SUB_CHUNK - 1) / SUB_CHUNK;
    s.chunk = (span.b * p.in.H + s.h) * p.chunk_slots + span.chunk_slot;
    return s;
}

/* Returns the span of a block's head number `sub`, at an index of work. */
template <class C, bool REVERSE>
GT_DEV HeadSpan span_of(const TensorParams& p, int work, int sub) {
    return head_span_at<REVERSE>(p, (int64_t)work * C::HEADS + sub);
}

/* ---- first and last states; barriers ------------------------------------------------------------------------ */

/* Returns where the state of a segment lies between the launches. */
template <class C>
GT_DEV float* segment_state(const TensorParams& p, const HeadSpan& span) {
    return p.segments.states + (span.slot * p.in.H + span.h) * (C::N * C::N);
}

GT_DEV const StatePool& pool_of(const TensorParams& p) { return p.in.sequences.pool; }

GT_DEV int sequence_of(const TensorParams& p, const HeadSpan& span) {
    int h;
    return divide(span.head, p.by_H, &h);
}

/* Returns the first state of a span: the caller's state at `row`, the state that the scan has stored, or NULL for
 * zeros.  See gt::first_state. */
template <class C>
GT_DEV const float* first_state(const TensorParams& p, const HeadSpan& span, int64_t row) {
    if (!span.exists || p.local) return nullptr;
    if (!span.starts || !span.ends) return segment_state<C>(p, span);
    if (pool_of(p).slots) {
        const float* states = start_row(p.in.sequences, p.state_in, 0, sequence_of(p, span));
        return states ? states + span.h * (C::N * C::N) : nullptr;
    }
    return p.state_in ? p.state_in + row * (C::N * C::N) : nullptr;
}

/* Returns where the state after a span goes, or NULL.  is_last: the pass through the sequence ends with this span. */
template <class C>
GT_DEV float* last_state(const TensorParams& p, const HeadSpan& span, bool is_last) {
    if (!span.exists) return nullptr;
    if (p.local) return segment_state<C>(p, span);
    if (!is_last || !p.state_out) return nullptr;
    if (pool_of(p).slots) {
        float* states = end_row(p.in.sequences, p.state_out, 0, sequence_of(p, span));
        return states ? states + span.h * (C::N * C::N) : nullptr;
    }
    return p.state_out + (int64_t)span.head * (C::N * C::N);
}

/* Returns where the state after the first `tokens` tokens of a block's span goes, or NULL if no snapshot is due.
 * tokens: INT32_MAX at the end of a span.  The function computes the span again, because no registers are left to keep
 * it.  Kernels ask before a chunk, not after it, because there ptxas would spill registers. */
template <class C>
GT_DEV float* snapshot_of(const TensorParams& p, int work, int sub, int tokens) {
    constexpr int64_t SIZE = C::N * C::N;
    const HeadSpan span = span_of<C, false>(p, work, sub);
    if (!span.exists) return nullptr;
    float* const to = snapshot_row(p.in.sequences, p.snapshots, p.in.H * SIZE, sequence_of(p, span), span.start,
                                   tokens < span.tokens ? tokens : span.tokens);
    return to ? to + span.h * SIZE : nullptr;
}

/* Initialises the mbarriers and stores the index of work.  A block calls this function before its roles start, and with
 * `again` between two indices of work.  One thread initialises the barriers of each buffer of a head.  The index lies
 * in shared memory, because registers are short. */
template <class C>
GT_DEV void init_work(uint32_t smem, int work, bool again = false) {
    if (thread_id() < C::BUFFERS * C::HEADS) {
        const uint32_t buffer = smem + thread_id() * C::HEAD_BUFFER;
        const auto init = [&](int barrier, int warps) {
            if (again) mbarrier_inval(buffer + barrier);
            mbarrier_init(buffer + barrier, 32 * warps);
        };
        init(C::FULL, C::GROUPS);
        init(C::EMPTY, C::SHARES);
        if constexpr (C::A_FULL != 0) init(C::A_FULL, 1);
        if (thread_id() == 0) sts<int>(smem + C::WORK, work);
    }
    sync_threads();
}

template <class C>
GT_DEV int work_of(uint32_t smem) {
    return lds<int>(smem + C::WORK);
}

/* ---- the work of a block ---------------------------------------------------------------------------------- */

/* Returns x, which is the same in all lanes.  The shuffle lets the compiler know this, so that branches on x need no
 * handling of divergence. */
GT_DEV int uniform(int x) { return shfl_idx(x, 0); }

/* For packed sequences: returns whether items are left at this index of work.  An item is a segment of one head; an
 * index of work covers HEADS consecutive items. */
template <class C>
GT_DEV bool has_work(const TensorParams& p, int64_t work) {
    return work * C::HEADS < sequence_count(p.in.sequences) * p.in.H * p.segments.count;
}

/* Calls pass(work) for one role, with work = block_x(), block_x() + grid_x(), ... while items are left.  The first call
 * comes even if the block has no items.  All roles meet between two calls.  For a batch every index of work has its own
 * block.  For packed sequences blocks take indices in turn, because the host does not know how many sequences there
 * are.
 * The goto seems to give the loop a second entry (hidden_zero), so the front end hoists nothing out of the loop.  In a
 * `for` loop it would keep addresses for the next index, and no registers are left for them.  ptxas sees that
 * hidden_zero() is 0 and that whole warps branch together (uniform, warp_any).  So it adds no wait for divergence
 * inside `pass`. */
template <class C, class Pass>
GT_DEV void take_work(const TensorParams& p, uint32_t smem, const Pass& pass) {
    if (hidden_zero()) goto next;
here:
    pass(uniform(work_of<C>(smem)));
next:
    if (p.in.sequences.cu_seqlens) {
        const int work = uniform(work_of<C>(smem)) + grid_x();
        if (warp_any(has_work<C>(p, work))) {
            sync_threads(); /* no warp uses buffers and mbarriers any more */
            init_work<C>(smem, work, true);
            goto here;
        }
    }
}

} /* namespace wkv6 */
} /* namespace gt */

#endif
