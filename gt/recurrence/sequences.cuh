/* gt/recurrence/sequences.cuh - which tokens belong to which sequence.
 *
 * A recurrent operator runs over sequences.  The sequences are the elements of a batch, with T tokens each, or packed
 * sequences of any lengths, whose borders are in device memory (cu_seqlens).  Kernels handle both through Sequences.
 * The host knows only an upper bound of the number of packed sequences; a block looks up its sequence on the device.
 *
 * Chunks.  An operator cuts every sequence into chunks of a fixed number of tokens, counted from the sequence's first
 * token; the last chunk may be shorter.  A chunk slot is an index into arrays with one entry per chunk.  gt_chunk_slot
 * (gt/base/op.h) gives every chunk of a batch element its own slot, below chunk_slots().
 *
 * Unused tokens.  Tokens that belong to no sequence lie after the last packed sequence, from used_tokens() on.  Outputs
 * are 0 there: clear_unused() writes these zeros, unless the output's own kernel does.  clear_unused() also clears
 * partial sums that no chunk writes.
 *
 * Large capacities.  A large seq_capacity need not cost time.  If blocks take items of work in turn, a launch needs
 * only as many blocks as sequences of SENSIBLE_TOKENS would need (most_blocks(), strands()).
 *
 * Lengths may differ much.  Kernels that process whole sequences can take the longest ones first (rank_sequences()).
 *
 * Pools.  States are rows of an array.  Usually sequence s has row s.  In forward with slots, sequence s has a row of a
 * pool (StatePool).  All kernels find rows by start_row() and end_row(). */
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
    int64_t capacity; /* packed: the number of sequences that cu_seqlens has room for; else 0 */
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

/* Returns the number of chunk slots of a batch element. */
GT_HD int64_t chunk_slots(const Sequences& q, int chunk) {
    return q.capacity ? gt_chunk_slots(q.T, q.capacity, chunk) : (q.T + chunk - 1) / chunk;
}

/* The number of sequences. */
GT_DEV int64_t sequence_count(const Sequences& q) {
    if (!q.cu_seqlens) return q.B;
    return q.seq_count ? *q.seq_count : q.capacity;
}

GT_DEV bool sequence_exists(const Sequences& q, int64_t s) { return !q.cu_seqlens || s < sequence_count(q); }

/* Returns the number of blocks of a launch for up to `all` items of work.  Usually each item gets a block.  `sensible`
 * is the number of items if each sequence has SENSIBLE_TOKENS.  A packed call gets at most `sensible` blocks, or four
 * per multiprocessor if that is more; then blocks take items in turn.
 * An idle block costs 5 ns.  The work of one token and head costs more than 0.2 ns, and that of SENSIBLE_TOKENS more
 * than 50 ns.  So idle blocks cost at most a tenth of the time. */
constexpr int64_t SENSIBLE_TOKENS = 256;

static inline int64_t most_blocks(const Sequences& q, int64_t all, int64_t sensible, const Device& device) {
    const int64_t room = 4 * (int64_t)device.multiprocessors, most = sensible > room ? sensible : room;
    return q.capacity && most < all ? most : all;
}

/* Returns the call's sequences with the capacity that sequences of SENSIBLE_TOKENS would need, to count items of
 * work. */
static inline Sequences sensible(Sequences q) {
    const int64_t count = q.T / SENSIBLE_TOKENS + 1;
    if (q.capacity > count) q.capacity = count;
    return q;
}

/* Returns the number of strands, S.  A strand is a group of `each` blocks that work on the same item; strand s takes
 * items s, s + S, ...  There is one strand per item, but no more strands than `room` blocks allow, and at least one if
 * there are items. */
static inline int64_t strands(int64_t items, int64_t each, int64_t room) {
    const int64_t most = room / each > 1 ? room / each : 1;
    return items < most ? items : most;
}

/* Returns the `room` for strands(), if nothing else limits the grid.  Only the device knows the number of packed
 * sequences.  So a packed call gets `rounds` blocks per multiprocessor, which serve any number of sequences. */
static inline int64_t grid_room(const Sequences& q, int rounds, const Device& device) {
    return q.capacity ? rounds * (int64_t)device.multiprocessors : (int64_t)1 << 22;
}

/* Returns the number of rows of a sum (reduce.cuh) in a packed call.  Every sequence has `each` rows or, if chunk is
 * not 0, every chunk slot has `each` rows. */
static inline PackedRows packed_rows(const Sequences& q, int chunk, int each = 1) {
    return {q.capacity ? q.cu_seqlens : nullptr, q.seq_count, q.capacity, chunk, each};
}

/* Returns how many tokens of a batch element belong to sequences.  These are its first tokens. */
GT_DEV int64_t used_tokens(const Sequences& q) { return q.cu_seqlens ? q.cu_seqlens[sequence_count(q)] : q.T; }

/* Returns an upper bound: all chunks of packed sequences have slots below it. */
GT_DEV int64_t used_slots(const Sequences& q, int chunk) {
    return gt_chunk_slot(q.cu_seqlens, chunk, sequence_count(q), 0);
}

/* A sequence: tokens first ... first + tokens - 1 of batch element b. */
struct Sequence {
    int64_t b, first, tokens;
    int64_t slot; /* slot of its first chunk */
};

/* Returns sequence s, for s < sequence_count(). */
GT_DEV Sequence sequence_at(const Sequences& q, int chunk, int64_t s) {
    if (!q.cu_seqlens) return {s, 0, q.T, 0};
    const int64_t first = q.cu_seqlens[s];
    return {0, first, q.cu_seqlens[s + 1] - first, gt_chunk_slot(q.cu_seqlens, chunk, s, 0)};
}

/* Returns the chunk in a slot of a batch element.  Its field `sequence` is -1 if the slot has no chunk, and 0 in a call
 * that is not packed. */
GT_DEV gt_chunk chunk_at(const Sequences& q, int chunk, int64_t slot) {
    if (q.cu_seqlens) return gt_chunk_at(q.cu_seqlens, sequence_count(q), chunk, slot);
    const int64_t first = slot * chunk;
    return {0, first, q.T - first < chunk ? q.T : first + chunk};
}

/* ---- the states of sequences ------------------------------------------------------------------------------------- */

/* Returns the row of sequence s in a pool.  A negative result means that the sequence has no row. */
GT_DEV int64_t pool_row(const StatePool& pool, int64_t s) {
    const int64_t row = pool.slots[s];
    return row < pool.capacity ? row : -1;
}

/* Returns where the last state [size] of sequence s goes, or NULL if nothing is to be stored.  `states` may be NULL. */
GT_DEV float* end_row(const Sequences& q, float* states, int64_t size, int64_t s) {
    if (!q.pool.slots || !states) return states ? states + s * size : nullptr;
    const int64_t row = pool_row(q.pool, s);
    return row >= 0 ? states + row * q.pool.stride : nullptr;
}

/* Returns the first state of sequence s; NULL means zeros.  If the sequences share one state, pass s = 0. */
GT_DEV const float* start_row(const Sequences& q, const float* states, int64_t size, int64_t s) {
    if (q.pool.slots && q.pool.starts_zero && q.pool.starts_zero[s]) return nullptr;
    return end_row(q, const_cast<float*>(states), size, s);
}

/* Returns the offset, in elements, of head h of token t in a tensor.  h may also be a group or a channel. */
GT_DEV int64_t offset_of(gt_stride s, int64_t b, int64_t t, int64_t h) { return b * s.b + t * s.t + h * s.h; }
GT_DEV int64_t offset_of(const gt_stride4& s, int64_t b, int64_t t, int64_t h) { return b * s.b + t * s.t + h * s.h; }

/* ---- steps --------------------------------------------------------------------------------------------------------
 *
 * In a step, batch element b has row slots[b] of the pool of states.  It processes the first tokens[b] of the call's T
 * tokens.  Only the first commit[b] of these tokens enter the state.  See gt_wkv6_args. */

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

    /* Returns whether the step skips this element: y is 0 and no state is written.  The element then has no tokens, no
     * row in the pool, or a number out of range. */
    GT_METHOD bool is_skipped(const StepElements& all) const {
        return row < 0 || row >= all.slot_capacity || tokens < 1 || tokens > all.T || commit < 0 || commit > tokens;
    }
};

/* ---- tokens of no sequence ------------------------------------------------------------------------------------------
 * Writes zeros to outputs, for the tokens after the last packed sequence.  Writes zeros to partial sums, for all chunk
 * slots, before existing chunks write their sums.  This kernel is an operator's first in a packed call, so it also
 * ranks the sequences by length (rank_sequences).
 * grid: two blocks per multiprocessor.  block: 8 warps, which take rows in turn.  A row is a head of a token.  No
 * shared memory.  bytes: the zeros. */
struct ClearParams {
    struct Output {
        void* data;
        gt_stride stride;
        gt_dtype dtype;
        int64_t heads, size; /* [token][heads][size]; adjacent values of the last index are `step` elements apart */
        int64_t step;
    } outputs[6];
    int count;
    Sequences sequences;
    struct Sums {
        float* data; /* [chunk slot][size]; NULL: none */
        int64_t size;
        int chunk;
    } sums;         /* partial sums; slots without a chunk would otherwise stay unwritten */
    int32_t* order; /* see rank_sequences(); NULL: do not rank */
};

/* Writes the sequences to order[], longest first; equally long sequences keep their order.  Blocks that take whole
 * sequences in this order end at about the same time.  Otherwise a long sequence that starts last would keep a few
 * blocks busy alone.
 * A warp takes sequences in turn.  The rank of a sequence is the number of sequences that come before it, which the
 * warp counts.  The work grows with the square of the number of sequences.  So more than MOST_RANKED sequences keep
 * their order; among so many, one sequence is usually a small part of the whole. */
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

/* Launches clear_unused_kernel, if the call is packed and there is something to clear or to rank.  stream: a gt_stream,
 * or a Chain. */
template <class Stream>
static inline gt_status clear_unused(const char* name, ClearParams p, const Sequences& sequences, const Device& device,
                                     Stream& stream) {
    if (!sequences.capacity || (p.count == 0 && !p.sums.data && !p.order)) return GT_OK;
    p.sequences = sequences;
    return run(name, clear_unused_kernel, 2 * device.multiprocessors, 256, 0, stream, p);
}

/* ---- sequences without a row in the pool ----------------------------------------------------------------------------
 * Writes zeros to outputs, for the tokens of sequences without a row in the pool.  This kernel runs after the kernels
 * that write these outputs.
 * grid: at most two blocks per multiprocessor.  block: 8 warps.  Blocks take sequences in turn, and the warps of a
 * block take the rows.  No shared memory.  bytes: the zeros. */
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
