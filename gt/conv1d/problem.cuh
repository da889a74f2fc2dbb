/* gt/conv1d/problem.cuh - shared by all kernels of conv1d: sizes, arguments, sequences, sums over taps. */
#ifndef GT_CONV1D_PROBLEM_CUH
#define GT_CONV1D_PROBLEM_CUH

#include "../recurrence/sequences.cuh"

namespace gt {
namespace conv1d {

constexpr int TAPS = 4;        /* the largest W; kernels that are not compiled for one W use it */
constexpr int HALO = TAPS - 1; /* a tap reads at most this many tokens back */
constexpr int THREADS = 256;   /* threads of a block, in the kernels for states and for steps */

/* The checked arguments of a call, as every kernel gets them. */
struct Problem {
    int64_t B, T, D;
    int W;
    gt_dtype dtype;
    bool has_silu;
    const float *weight, *bias;
    const void* x;
    gt_stride x_stride;
    const void* state_in;
    gt_dtype state_dtype; /* of state_in and state_out; fp32 in backward */
    bool state_in_shared;
    gt_stride pool_stride; /* strides of the pool's channels and columns, if there is a pool */
    Sequences sequences;
};

static inline Problem problem_of(const gt_conv1d_args& a) {
    Problem in = {};
    in.B = a.B, in.T = a.T, in.D = a.D;
    in.W = (int)a.W;
    in.dtype = a.dtype;
    in.has_silu = a.activation == GT_ACT_SILU;
    in.weight = a.weight, in.bias = a.bias;
    in.x = a.x;
    in.x_stride = a.x_stride;
    in.state_in = a.state_in;
    in.state_dtype = a.state_dtype;
    in.state_in_shared = a.state_in_shared;
    in.sequences = sequences_of(a, a.state_out_stride.b);
    in.pool_stride = a.state_out_stride;
    return in;
}

/* ---- device helpers -------------------------------------------------------------------------- */

GT_DEV int64_t offset_of(gt_stride s, int64_t b, int64_t t, int64_t d) { return b * s.b + t * s.t + d * s.h; }

/* Returns the sigmoid for results of type T.  For 16-bit results the fast sigmoid suffices, because its error is
 * smaller than the rounding of the result. */
template <class T>
GT_DEV float sigmoid_of(float x) {
    if constexpr (std::is_same<T, float>::value)
        return sigmoid(x);
    else
        return sigmoid_fast(x);
}

/* Returns act(pre). */
template <class T>
GT_DEV float output_of_sum(bool has_silu, float pre) {
    const float y = silu_of_sigmoid(pre, sigmoid_of<T>(pre));
    return has_silu ? y : pre;
}

/* Returns dy act'(pre). */
template <class T>
GT_DEV float gradient_of_sum(bool has_silu, float pre, float dy) {
    const float slope = silu_derivative(pre, sigmoid_of<T>(pre));
    return has_silu ? dy * slope : dy;
}

/* Returns input t of a sequence, where t < 0: one of the W - 1 inputs that the sequence's state holds.  row: index of
 * the sequence.  FORWARD: only forward takes states of 16 bits, and states in pools. */
template <bool FORWARD = true>
GT_DEV float state_input(const Problem& p, int64_t row, int64_t d, int t) {
    const int64_t J = p.W - 1, j = t + J;
    if (!p.state_in || j < 0) return 0.0f;
    const StatePool& pool = p.sequences.pool;
    int64_t at = ((p.state_in_shared ? 0 : row) * p.D + d) * J + j;
    if (!FORWARD) return static_cast<const float*>(p.state_in)[at];
    if (pool.slots) {
        const int64_t slot = pool.starts_zero && pool.starts_zero[row] ? -1 : pool_row(pool, row);
        if (slot < 0) return 0.0f;
        at = slot * pool.stride + d * p.pool_stride.t + j * p.pool_stride.h;
    }
    return load_as(p.state_in, p.state_dtype, at);
}

/* The parameters of VEC channels in a kernel for any width.  Taps before `first` do not exist.  They are skipped, not
 * multiplied by 0, because the input there may be infinite. */
constexpr int LEAST_W = 2; /* the smallest W */

template <int VEC>
struct Taps {
    float weight[TAPS][VEC], bias[VEC];
    int first;

    GT_METHOD void load(const Problem& p, int64_t d) {
        first = TAPS - p.W;
        GT_UNROLL
        for (int v = 0; v < VEC; v++) {
            GT_UNROLL
            for (int k = 0; k < TAPS; k++) weight[k][v] = k >= first ? p.weight[(d + v) * p.W + k - first] : 0.0f;
            bias[v] = p.bias ? p.bias[d + v] : 0.0f;
        }
    }

    /* W is at least LEAST_W.  So a loop needs predicates only for the first taps, and they stay in registers. */
    GT_METHOD bool exists(int k) const { return k >= TAPS - LEAST_W || k >= first; }

    /* Returns pre_t (see gt_conv1d.cuh) of channel v.  e holds the inputs e_{t-3} ... e_t. */
    GT_METHOD float sum(const float (&e)[TAPS][VEC], int v) const {
        float pre = bias[v];
        GT_UNROLL
        for (int k = 0; k < TAPS; k++)
            if (exists(k)) pre = fma_rn(weight[k][v], e[k][v], pre);
        return pre;
    }

    /* Returns the gradient of the input of one token.  q[0] is the token's q (see backward.cuh); q[1 ... 3] belong to
     * the next three tokens. */
    GT_METHOD float gradient(const float (&q)[TAPS][VEC], int v) const {
        float sum = 0.0f;
        GT_UNROLL
        for (int k = 0; k < TAPS; k++)
            if (exists(k)) sum = fma_rn(weight[k][v], q[HALO - k][v], sum);
        return sum;
    }
};

template <int ROWS, int VEC>
GT_DEV void shift(float (&window)[ROWS][VEC]) {
    GT_UNROLL
    for (int i = 0; i < ROWS - 1; i++) {
        GT_UNROLL
        for (int v = 0; v < VEC; v++) window[i][v] = window[i + 1][v];
    }
}

/* ---- packed sequences ------------------------------------------------------------------------ */

/* Returns the sequence that holds token t < used_tokens().  The search starts at sequence `low`, which must not be
 * later.  Every step keeps an eighth of the sequences; the loads of a step are in flight together. */
GT_DEV int64_t sequence_of(const Sequences& q, int64_t t, int64_t low) {
    constexpr int WAYS = 8;
    if (t < q.cu_seqlens[low + 1]) return low;
    int64_t high = sequence_count(q), step;
    do { /* cu_seqlens[low] <= t, and t < cu_seqlens[high] */
        step = (high - low + WAYS - 1) / WAYS;
        int64_t found = low;
        GT_UNROLL
        for (int i = 1; i < WAYS; i++) {
            const int64_t s = low + i * step < high ? low + i * step : high - 1;
            if (q.cu_seqlens[s] <= t) found = s; /* keeps the last such s, because earlier ones end at t or before */
        }
        low = found;
        if (low + step < high) high = low + step;
    } while (step > 1);
    return low;
}

/* A thread's work in kernels over states: one channel, d, of one strand.  A strand is a list of sequences that are
 * processed in turn: first, first + strands, first + 2 strands, ... */
struct Strand {
    int64_t d, first;
    bool exists;
};

GT_DEV Strand strand_of(int64_t D, int64_t strands) {
    const int64_t item = (int64_t)block_x() * THREADS + thread_id();
    return {item % D, item / D, item / D < strands};
}

} /* namespace conv1d */
} /* namespace gt */

#endif
