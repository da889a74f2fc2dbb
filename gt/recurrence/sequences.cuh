/* gt/recurrence/sequences.cuh - which tokens belong to which sequence.
 *
 * A recurrent operator runs over sequences.  These are the elements of a batch, with T tokens each, or packed sequences
 * of any lengths, whose borders are in device memory (cu_seqlens).  Kernels use both through Sequences: the host knows
 * an upper bound of their number, and a block finds its own sequence.
 *
 * Chunks.  An operator cuts every sequence into chunks of a fixed number of tokens, counted from the sequence's first
 * token; the last chunk may be shorter.  Chunk slots are indices of arrays with one entry per chunk.  gt_chunk_slot
 * (gt/base/op.h) gives every chunk of a batch element its own slot, below chunk_slots().
 *
 * Tokens of no sequence lie after the last packed sequence, from used_tokens() on.  Outputs are 0 there: clear_unused()
 * writes these zeros, unless the output's own kernel does.  It also clears partial sums that no chunk writes.
 *
 * A large seq_capacity need not cost time.  If blocks take pieces of work in turn, a launch has only as many blocks as
 * sequences of a sensible length need (most_blocks(), strands()).
 *
 * Lengths may differ much.  Kernels that take whole sequences can take the longest first (rank_sequences()).
 *
 * Pools.  States of sequences are rows of an array, one row per sequence.  In forward with slots they are rows of a
 * pool (StatePool).  All kernels find them by start_row() and end_row(). */
#ifndef GT_RECURRENCE_SEQUENCES_CUH
#define GT_RECURRENCE_SEQUENCES_CUH

#include "../base/reduce.cuh"
#include "../base/warp.cuh"

namespace gt {

/* A pool of states: sequence s has row slots[s]. */
struct StatePool {
    const int32_t *slots, *starts_zero; /* slots NULL: there is no pool */
    int64_t capacity, stride;           /* number of rows; elements from row to row */
};

/* The sequences of one call.  cu_seqlens is NULL if the sequences are the elements of a batch. */
struct Sequences {
    int64_t B, T; /* packed: B = 1, and T is the number of all tokens */
    const int32_t *cu_seqlens, *seq_count;
    int64_t capacity; /* packed: the most sequences that cu_seqlens has room for; else 0 */
    StatePool pool = {};
};

template <class Args>
static inline Sequences sequences_of(const Args& a) {
    return {a.B, a.T, a.cu_seqlens, a.seq_count, a.seq_capacity};
}

/* sequences_of() for operators whose forward takes pools. */
template <class Args>
static inline Sequences sequences_of(const Args& a, int64_t state_stride) {
    Sequences q = sequences_of(a);
    if (a.slots) q.pool = {a.slots, a.starts_zero, a.slot_capacity, state_stride};
    return q;
}

/* Upper bound of the number of sequences.  It determines the sizes of states and workspace. */
GT_HD int64_t most_sequences(const Sequences& q) { return q.capacity ? q.capacity : q.B; }

/* The number of slots for the chunks of a batch element. */
GT_HD int64_t chunk_slots(const Sequences& q, int chunk) {
    return q.capacity ? gt_chunk_slots(q.T, q.capacity, chunk) : (q.T + chunk - 1) / chunk;
}

/* The number of sequences. */
GT_DEV int64_t sequence_count(const Sequences& q) {
    if (!q.cu_seqlens) return q.B;
    return q.seq_count ? *q.seq_count : q.capacity;
}

GT_DEV bool sequence_exists(const Sequences& q, int64_t s) { return !q.cu_seqlens || s < sequence_count(q); }

/* Blocks of a launch with up to `all` pieces of work, one per block.  `sensible`: the number of pieces if each sequence
 * has SENSIBLE_TOKENS.  A packed call with more pieces gets `sensible` blocks, or four for each multiprocessor if that
 * is more; these blocks take pieces in turn.  An idle block costs 5 ns, a token and head of work more than 0.2 ns.  So
 * idle blocks take at most a few percent of the time. */
constexpr int64_t SENSIBLE_TOKENS = 256;

static inline int64_t most_blocks(const Sequences& q, int64_t all, int64_t sensible, const Device& device) {
    const int64_t room = 4 * (int64_t)device.multiprocessors, most = sensible > room ? sensible : room;
    return q.capacity && most < all ? most : all;
}

/* A call's sequences if each had SENSIBLE_TOKENS, for counting pieces of work. */
static inline Sequences sensible(Sequences q) {
    const int64_t count = q.T / SENSIBLE_TOKENS + 1;
    if (q.capacity > count) q.capacity = count;
    return q;
}

/* Returns the number of strands, S.  A strand is `each` blocks; strand s takes the items s, s + S, ...  There is one
 * strand for each item, but no more strands than `room` blocks make up, and at least one if there are items. */
static inline int64_t strands(int64_t items, int64_t each, int64_t room) {
    const int64_t most = room / each > 1 ? room / each : 1;
    return items < most ? items : most;
}

/* The `room` of strands() if nothing else limits it.  Only the device knows the number of packed sequences, so they get
 * `rounds` blocks for each multiprocessor, which serve any number. */
static inline int64_t grid_room(const Sequences& q, int rounds, const Device& device) {
    return q.capacity ? rounds * (int64_t)device.multiprocessors : (int64_t)1 << 22;
}

/* The rows of a sum (reduce.cuh) in a packed call.  Every sequence adds `each` rows; if chunk is not 0, every chunk
 * slot does. */
static inline PackedRows packed_rows(const Sequences& q, int chunk, int each = 1) {
    return {q.capacity ? q.cu_seqlens : nullptr, q.seq_count, q.capacity, chunk, each};
}

/* The number of a batch element's tokens that belong to sequences.  They are its first tokens. */
GT_DEV int64_t used_tokens(const Sequences& q) { return q.cu_seqlens ? q.cu_seqlens[sequence_count(q)] : q.T; }

/* An upper bound of the slots of packed sequences' chunks: all of them are smaller. */
GT_DEV int64_t used_slots(const Sequences& q, int chunk) {
    return gt_chunk_slot(q.cu_seqlens, chunk, sequence_count(q), 0);
}

/* A sequence: tokens first ... first + tokens - 1 of batch element b. */
struct Sequence {
    int64_t b, first, tokens;
    int64_t slot; /* slot of its first chunk */
};

/* Sequence s; s < sequence_count(). */
GT_DEV Sequence sequence_at(const Sequences& q, int chunk, int64_t s) {
    if (!q.cu_seqlens) return {s, 0, q.T, 0};
    const int64_t first = q.cu_seqlens[s];
    return {0, first, q.cu_seqlens[s + 1] - first, gt_chunk_slot(q.cu_seqlens, chunk, s, 0)};
}

/* The chunk in a slot of a batch element.  Its sequence is -1 if the slot has no chunk, and 0 in a call that is not
 * packed. */
GT_DEV gt_chunk chunk_at(const Sequences& q, int chunk, int64_t slot) {
    if (q.cu_seqlens) return gt_chunk_at(q.cu_seqlens, sequence_count(q), chunk, slot);
    const int64_t first = slot * chunk;
    return {0, first, q.T - first < chunk ? q.T : first + chunk};
}

/* ---- the states of sequences ------------------------------------------------------------------------------------- */

/* The row of sequence s in a pool; -1 if the pool lacks it. */
GT_DEV int64_t pool_row(const StatePool& pool, int64_t s) {
    const int64_t row = pool.slots[s];
    return row < pool.capacity ? row : -1;
}

/* The memory of the last state [size] of sequence s, or NULL; states may be NULL, too. */
GT_DEV float* end_row(const Sequences& q, float* states, int64_t size, int64_t s) {
    if (!q.pool.slots || !states) return states ? states + s * size : nullptr;
    const int64_t row = pool_row(q.pool, s);
    return row >= 0 ? states + row * q.pool.stride : nullptr;
}

/* The first state of sequence s; NULL: zeros.  s: 0 if the sequences share one state. */
GT_DEV const float* start_row(const Sequences& q, const float* states, int64_t size, int64_t s) {
    if (q.pool.slots && q.pool.starts_zero && q.pool.starts_zero[s]) return nullptr;
    return end_row(q, const_cast<float*>(states), size, s);
}

/* The offset, in elements, of a token's head (or group or channel) in a tensor. */
GT_DEV int64_t offset_of(gt_stride s, int64_t b, int64_t t, int64_t h) { return b * s.b + t * s.t + h * s.h; }
GT_DEV int64_t offset_of(const gt_stride4& s, int64_t b, int64_t t, int64_t h) { return b * s.b + t * s.t + h * s.h; }

/* ---- steps --------------------------------------------------------------------------------------------------------
 *
 * In a step, a batch element has a row of the pool of states (slots of gt_wkv6_args) and the first of the call's tokens
 * (tokens).  The first of these tokens enter the state (commit). */

struct StepElements {
    const int32_t *slots, *tokens, *commit;
    int64_t slot_capacity;
    int T;
};

template <class Args>
static inline StepElements step_elements_of(const Args& a) {
    return {a.slots, a.tokens, a.commit, a.slot_capacity, (int)a.T};
}

/* One batch element of a step.  Only is_skipped() waits for the loads. */
struct StepElement {
    int64_t row;
    int tokens, commit; /* unless skipped, 1 <= tokens <= T and 0 <= commit <= tokens */

    GT_METHOD StepElement(const StepElements& all, int64_t b)
        : row(all.slots ? all.slots[b] : b), tokens(all.tokens ? all.tokens[b] : all.T),
          commit(all.commit ? all.commit[b] : tokens) {}

    /* Whether y is 0 and no state is written, because the element has no tokens, no row of the pool, or numbers out of
     * range. */
    GT_METHOD bool is_skipped(const StepElements& all) const {
        return row < 0 || row >= all.slot_capacity || tokens < 1 || tokens > all.T || commit < 0 || commit > tokens;
    }
};

/* ---- tokens of no sequence ------------------------------------------------------------------------------------------
 * Writes zeros in outputs, for the tokens after the last packed sequence.  Writes zeros in partial sums, for all chunk
 * slots, before existing chunks write their sums.  As an operator's first kernel in a packed call, it also ranks the
 * sequences by length (rank_sequences).
 * grid two blocks for each multiprocessor, block 8 warps; a row is a token and head, and warps take rows in turn.  No
 * shared memory.  bytes: the zeros. */
struct ClearParams {
    struct Output {
        void* data;
        gt_stride stride;
        gt_dtype dtype;
        int64_t heads, size; /* [token][heads][size]; adjacent elements of the last index are `step` elements apart */
        int64_t step;
    } outputs[6];
    int count;
    Sequences sequences;
    struct Sums {
        float* data; /* [chunk slot][size]; NULL: none */
        int64_t size;
        int chunk;
    } sums;         /* partial sums in which some chunk slots have no chunk that writes their row */
    int32_t* order; /* see rank_sequences(); NULL: not wanted */
};

/* order[rank] <- a sequence: the longest comes first; of equally long sequences the first comes first.  Blocks that
 * take whole sequences in this order end at about the same time.  Otherwise a long sequence that starts last would keep
 * a few blocks busy alone.  For one sequence after another, a warp counts the sequences that come before it.  More than
 * MOST_RANKED sequences keep their order, because one sequence is then usually a small part of the whole, and counting
 * takes the square of their number. */
constexpr int64_t MOST_RANKED = 256;

GT_DEV void rank_sequences(const Sequences& q, int32_t* order, int64_t warp, int64_t warps) {
    const int count = (int)sequence_count(q);
    const int32_t* starts = q.cu_seqlens;
    for (int s = (int)warp; s < count; s += (int)warps) {
        int rank = 0;
        if (count > MOST_RANKED) {
            rank = s;
        } else {
            const int tokens = starts[s + 1] - starts[s];
            for (int other = lane_id(); other < count; other += 32) {
                const int others = starts[other + 1] - starts[other];
                rank += others > tokens || (others == tokens && other < s);
            }
            GT_UNROLL
            for (int mask = 1; mask < 32; mask *= 2) rank += shfl_xor(rank, mask);
        }
        if (lane_id() == 0) order[rank] = s;
    }
}

GT_KERNEL(256, 1) clear_unused_kernel(const GT_GRID_CONSTANT ClearParams p) {
    wait_for_chain();
    const int64_t first = used_tokens(p.sequences), tokens = p.sequences.T - first;
    const int64_t warp = (int64_t)block_x() * 8 + warp_id(), warps = (int64_t)grid_x() * 8;
    if (p.order) rank_sequences(p.sequences, p.order, warp, warps);
    for (int i = 0; i < p.count; i++) {
        const ClearParams::Output& x = p.outputs[i];
        for (int64_t row = warp; row < tokens * x.heads; row += warps) {
            const int64_t start = (first + row / x.heads) * x.stride.t + row % x.heads * x.stride.h;
            for (int64_t n = lane_id(); n < x.size; n += 32) store_as(x.data, x.dtype, start + n * x.step, 0.0f);
        }
    }
    if (!p.sums.data) return;
    const int64_t size = used_slots(p.sequences, p.sums.chunk) * p.sums.size;
    for (int64_t i = 32 * warp + lane_id(); i < size; i += 32 * warps) p.sums.data[i] = 0.0f;
}

/* Adds an output that clear_unused() clears; skips NULL. */
static inline void add_output(ClearParams& p, void* data, gt_stride stride, gt_dtype dtype, int64_t heads, int64_t size,
                              int64_t step = 1) {
    if (data) p.outputs[p.count++] = {data, stride, dtype, heads, size, step};
}

/* Launches clear_unused_kernel, unless all tokens belong to sequences.  stream: a gt_stream, or a Chain. */
template <class Stream>
static inline gt_status clear_unused(const char* name, ClearParams p, const Sequences& sequences, const Device& device,
                                     Stream& stream) {
    if (!sequences.capacity || (p.count == 0 && !p.sums.data && !p.order)) return GT_OK;
    p.sequences = sequences;
    return run(name, clear_unused_kernel, 2 * device.multiprocessors, 256, 0, stream, p);
}

/* ---- sequences without a row of the pool ----------------------------------------------------------------------------
 * Writes zeros in outputs, for the tokens of sequences without a row of the pool, after the kernels that make these
 * outputs.  grid at most two blocks for each multiprocessor, block 8 warps; blocks take sequences in turn, and a
 * block's warps take the rows.  No shared memory.  bytes: the zeros. */
GT_KERNEL(256, 1) clear_skipped_kernel(const GT_GRID_CONSTANT ClearParams p) {
    wait_for_chain();
    const Sequences& q = p.sequences;
    const int64_t count = sequence_count(q);
    for (int64_t s = block_x(); s < count; s += grid_x()) {
        if (pool_row(q.pool, s) >= 0) continue;
        const int64_t first = q.cu_seqlens[s], tokens = q.cu_seqlens[s + 1] - first;
        for (int i = 0; i < p.count; i++) {
            const ClearParams::Output& x = p.outputs[i];
            for (int64_t row = warp_id(); row < tokens * x.heads; row += 8) {
                const int64_t start = (first + row / x.heads) * x.stride.t + row % x.heads * x.stride.h;
                for (int64_t n = lane_id(); n < x.size; n += 32) store_as(x.data, x.dtype, start + n * x.step, 0.0f);
            }
        }
    }
}

/* Launches clear_skipped_kernel after forward, in a call with a pool. */
template <class Stream>
static inline gt_status clear_skipped(const char* name, ClearParams p, const Sequences& sequences, const Device& device,
                                      Stream& stream) {
    if (!sequences.pool.slots || p.count == 0) return GT_OK;
    p.sequences = sequences;
    const int64_t most = 2 * (int64_t)device.multiprocessors;
    return run(name, clear_skipped_kernel, sequences.capacity < most ? sequences.capacity : most, 256, 0, stream, p);
}

} /* namespace gt */

#endif /* GT_RECURRENCE_SEQUENCES_CUH */
