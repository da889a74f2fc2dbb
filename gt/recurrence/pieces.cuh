/* gt/recurrence/pieces.cuh - pieces of a sequence that are processed apart, for example on several GPUs: gt_OP_segment
 * and gt_OP_join.
 *
 * gt_OP_segment computes the state after a piece that starts from zero, and the log of the piece's decay.
 * gt_OP_segment_backward computes the gradient before a piece whose last gradient is zero.  Both run the local pass
 * over segments, then a scan with ENDS (segments.cuh; call_segment in driver.cuh).
 * From these results gt_OP_join, below, computes the start state of every piece, and gt_OP_join_backward the gradient
 * at the end of every piece.  gt_kernels.h has the mathematics, at gt_wkv6_segment.
 *
 * If an operator has pieces, its Operator (driver.cuh) also has
 *     rows(a)      the number of rows of a state; each row has its own decay.
 *     columns(a)   the number of columns of a row.
 *     JOIN         the name of the launch. */
#ifndef GT_RECURRENCE_PIECES_CUH
#define GT_RECURRENCE_PIECES_CUH

#include "driver.cuh"

namespace gt {

/* ---- join ----------------------------------------------------------------------------------------------------------
 * S <- first;   for every piece, in order:   starts[piece] <- S,   S <- exp(decay) . S + states[piece].
 * REVERSE: from the last piece to the first.
 * grid: ceil(size / 256).  block: 256 threads.  A thread has one element of the states and loads JOIN_STEPS pieces at
 * once.
 * registers: 8 elements of states and 8 logs of decays.  No shared memory.
 * bytes: reads `states` and `decays` once, writes `starts` once.  The operations of an element have a fixed order, so
 * results are deterministic.  `starts` may be the same memory as `states`. */
struct JoinParams {
    int64_t pieces, size, decay_size; /* size: the number of elements in all states of a piece */
    int64_t elements;                 /* elements of a state that one decay serves */
    const float *states, *decays;     /* [pieces][size], [pieces][decay_size] */
    const float* first;               /* [first_size], repeated if all sequences share a state; NULL: zeros */
    int64_t first_size;
    float* starts; /* [pieces][size] */
};

constexpr int JOIN_THREADS = 256, JOIN_STEPS = 8;

template <bool REVERSE>
GT_KERNEL(JOIN_THREADS, 1)
join_kernel(const GT_GRID_CONSTANT JoinParams p) {
    const int64_t i = (int64_t)block_x() * JOIN_THREADS + thread_id(), entry = i / p.elements;
    if (i >= p.size) return;
    float S = p.first ? p.first[i % p.first_size] : 0.0f;
    for (int64_t k = 0; k < p.pieces; k += JOIN_STEPS) {
        const int left = p.pieces - k < JOIN_STEPS ? (int)(p.pieces - k) : JOIN_STEPS;
        float added[JOIN_STEPS], log[JOIN_STEPS];
        const auto piece = [&](int j) { return REVERSE ? p.pieces - 1 - k - j : k + j; };
        GT_UNROLL
        for (int j = 0; j < JOIN_STEPS; j++) {
            added[j] = j < left ? p.states[piece(j) * p.size + i] : 0.0f;
            log[j] = j < left ? p.decays[piece(j) * p.decay_size + entry] : 0.0f;
        }
        GT_UNROLL
        for (int j = 0; j < JOIN_STEPS; j++) {
            if (j >= left) break;
            p.starts[piece(j) * p.size + i] = S;
            S = rescale_far(scale_of_segment(log[j]), S, added[j]);
        }
    }
}

/* rows, columns: sizes of a state; every row has its own decay. */
template <bool REVERSE, class Args>
static inline gt_status run_join(const char* name, const Args& a, int64_t rows, int64_t columns, gt_stream stream) {
    const int64_t state = rows * columns;
    const bool shared = !REVERSE && a.state_in_shared;
    const JoinParams p = {a.pieces,
                          a.B * state,
                          a.B * rows,
                          columns,
                          a.piece_states,
                          a.piece_decays,
                          REVERSE ? a.dstate_out : a.state_in,
                          shared ? state : a.B * state,
                          a.piece_starts};
    return run(name, join_kernel<REVERSE>, (p.size + JOIN_THREADS - 1) / JOIN_THREADS, JOIN_THREADS, 0, stream, p);
}

template <class Operator, bool REVERSE>
static inline gt_status call_join(const typename Operator::Args* args, gt_stream stream) {
    typename Operator::Args a;
    Device device;
    const gt_status status = prepare<Operator>(REVERSE ? GT_JOIN_BACKWARD : GT_JOIN, args, &a, &device);
    return status != GT_OK ? status
                           : run_join<REVERSE>(Operator::JOIN, a, Operator::rows(a), Operator::columns(a), stream);
}

} /* namespace gt */

#endif /* GT_RECURRENCE_PIECES_CUH */
