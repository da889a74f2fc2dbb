/* gt/recurrence/snapshots.cuh - where forward stores snapshots, the states after every k-th token of a sequence.
 *
 * Forward's kernels hold a state in registers for a whole segment.  At multiples of SNAPSHOT_TOKENS they ask
 * snapshot_row(), and store the state as they store a last state.  So a snapshot costs one write of the state.
 * k is a multiple of SNAPSHOT_TOKENS, at which every kernel has a complete state.  Kernels store only fp32.  For
 * snapshots of 16 bits see WideSnapshots (small_states.cuh). */
#ifndef GT_RECURRENCE_SNAPSHOTS_CUH
#define GT_RECURRENCE_SNAPSHOTS_CUH

#include "segments.cuh"

namespace gt {

constexpr int SNAPSHOT_TOKENS = GT_SNAPSHOT_TOKENS;

struct Snapshots {
    float* data;      /* [B,rows][state]; NULL: the call stores no snapshots */
    int64_t rows;     /* of a batch element: floor(T / k) */
    Divider by_units; /* divides by k / SNAPSHOT_TOKENS */
};

template <class Args>
static inline Snapshots snapshots_of(const Args& a) {
    const int64_t every = a.snapshot_every;
    if (!a.snapshots || every == 0 || every > a.T) return {};
    return {static_cast<float*>(a.snapshots), a.T / every, divide_by((int)(every / SNAPSHOT_TOKENS))};
}

/* Returns the number of the row for the state of sequence s after `tokens` tokens, or -1 if there is no such row. */
GT_DEV int64_t snapshot_number(const Sequences& q, const Snapshots& p, int64_t s, int64_t tokens) {
    int rest;
    const int count = divide((int)(tokens / SNAPSHOT_TOKENS), p.by_units, &rest);
    if (count == 0 || rest || tokens % SNAPSHOT_TOKENS || (q.pool.slots && pool_row(q.pool, s) < 0)) return -1;
    const int64_t first = q.cu_seqlens ? divide(q.cu_seqlens[s] / SNAPSHOT_TOKENS, p.by_units, &rest) : s * p.rows;
    return first + count - 1;
}

/* Returns where the state goes after the first `tokens` tokens of a segment, or NULL if no snapshot is due.  first: the
 * segment's first token.  size: numbers of a state.  p.data is not NULL. */
GT_DEV float* snapshot_row(const Sequences& q, const Snapshots& p, int64_t size, int64_t s, int64_t first,
                           int64_t tokens) {
    const int64_t row = snapshot_number(q, p, s, first + tokens - (q.cu_seqlens ? q.cu_seqlens[s] : 0));
    return row < 0 ? nullptr : p.data + row * size;
}

/* The same for a segment that may end before `tokens` tokens. */
GT_DEV float* snapshot_row(const Sequences& q, const Snapshots& p, int64_t size, const Span& span, int64_t tokens) {
    const int64_t all = span.end - span.first;
    return snapshot_row(q, p, size, span.sequence, span.first, tokens < all ? tokens : all);
}

} /* namespace gt */

#endif
