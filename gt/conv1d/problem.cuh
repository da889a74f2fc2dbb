/* gt/conv1d/problem.cuh - what every kernel of conv1d knows: sizes, the arguments, taps, inputs and their gradients. */
#ifndef GT_CONV1D_PROBLEM_CUH
#define GT_CONV1D_PROBLEM_CUH

#include "../base/op.h"
#include "../base/warp.cuh"

namespace gt {
namespace conv1d {

/* ---- sizes ----------------------------------------------------------------------------------- */

constexpr int TAPS = 4;        /* every width is taken as 4, with the first 4 - W taps left out */
constexpr int HALO = TAPS - 1; /* tokens that a tap reaches back */
constexpr int THREADS = 256;
constexpr int MAX_RUN = 32, MIN_RUN = 8; /* tokens that a thread walks through */
static_assert(MIN_RUN >= 2 * HALO, "only the first run of a sequence needs the state");

/* One argument struct, prepared, as every kernel sees it. */
struct Problem {
    int64_t B, T, D;
    int W;
    gt_dtype dtype;
    bool has_silu;
    const float *weight, *bias;
    const void* x;
    gt_stride x_at;
    const float* state_in;
    bool state_in_shared;
};

/* How a kernel over channels is cut into blocks: `lanes` neighbouring threads (a power of 2 up to
 * 32) hold neighbouring groups of channels, THREADS / lanes rows lie in a block; a row is a run of
 * tokens of one batch element. */
struct Cut {
    int lanes, run;
    int64_t tiles, runs, blocks; /* of channels; in a sequence; of rows */
};

/* Tokens that a thread has in flight: of one tensor in forward, of two in backward. */
template <class T, int VEC, int TENSORS>
constexpr int BATCH = VEC * sizeof(T) * TENSORS == 16 ? 4 : 8;

/* ---- device helpers -------------------------------------------------------------------------- */

GT_DEV int64_t at(gt_stride s, int64_t b, int64_t t, int64_t d) {
    return b * s.b + t * s.t + d * s.h;
}

/* The sigmoid of outputs stored in T: under the rounding of 16 bits the fast one will do. */
template <class T>
GT_DEV float sigmoid_of(float x) {
    if constexpr (std::is_same<T, float>::value)
        return sigmoid(x);
    else
        return sigmoid_fast(x);
}

/* The parameters of VEC channels.  A tap before `first` does not exist: it is skipped, not
 * multiplied by 0, for the input there may be infinite. */
template <int VEC>
struct Taps {
    float weight[TAPS][VEC], bias[VEC];
    int first;

    GT_METHOD void load(const Problem& p, int64_t d) {
        first = TAPS - p.W;
        GT_UNROLL
        for (int v = 0; v < VEC; v++) {
            GT_UNROLL
            for (int k = 0; k < TAPS; k++)
                weight[k][v] = k >= first ? p.weight[(d + v) * p.W + k - first] : 0.0f;
            bias[v] = p.bias ? p.bias[d + v] : 0.0f;
        }
    }

    /* pre_t of channel v from the inputs e_{t-3} ... e_t */
    template <int ROWS>
    GT_METHOD float sum(const float (&e)[ROWS][VEC], int v) const {
        float pre = bias[v];
        GT_UNROLL
        for (int k = 0; k < TAPS; k++)
            if (k >= first) pre = fma_rn(weight[k][v], e[k][v], pre);
        return pre;
    }

    /* the gradient of an input from the q of its own token, q[3], and the three before it in a walk
     * that goes forward: the input was three tokens ago */
    GT_METHOD float gradient(const float (&q)[TAPS][VEC], int v) const {
        float sum = 0.0f;
        GT_UNROLL
        for (int k = 0; k < TAPS; k++)
            if (k >= first) sum = fma_rn(weight[k][v], q[HALO - k][v], sum);
        return sum;
    }
};

/* dy silu'(pre) */
template <class T>
GT_DEV float gradient_of_sum(const Problem& p, float pre, float dy) {
    return p.has_silu ? dy * silu_derivative(pre, sigmoid_of<T>(pre)) : dy;
}

/* The input t < 0, one of the 3 before the sequence, of batch element `row` of the states. */
GT_DEV float state_input(const Problem& p, int64_t row, int64_t d, int t) {
    const int64_t J = p.W - 1, j = t + J;
    if (!p.state_in || j < 0) return 0.0f;
    return p.state_in[((p.state_in_shared ? 0 : row) * p.D + d) * J + j];
}

/* A thread's channels and tokens. */
struct Place {
    int64_t b, d, first, last; /* batch element, first channel, tokens [first, last) */
    int64_t block;             /* of rows */
    int lane, row;             /* in the block */
    bool exists;
};

template <int VEC>
GT_DEV Place place_of(const Problem& p, const Cut& cut, int64_t tokens) {
    Place me;
    const int64_t tile = block_x() % (int)cut.tiles; /* tiles * blocks is a grid's size */
    me.block = block_x() / (int)cut.tiles;
    me.lane = thread_id() % cut.lanes;
    me.row = thread_id() / cut.lanes;
    const int64_t row = me.block * (THREADS / cut.lanes) + me.row;
    me.b = row / cut.runs;
    me.d = (tile * cut.lanes + me.lane) * VEC;
    me.first = row % cut.runs * cut.run;
    me.last = me.first + cut.run < tokens ? me.first + cut.run : tokens;
    me.exists = me.b < p.B && me.d < p.D;
    return me;
}

/* Tokens t, t+1, ... of VEC channels as they lie in memory; those from `valid` on repeat the first.
 *  All loads are in flight together. */
template <class T, int VEC, int COUNT>
GT_DEV void load_tokens(Vec<T, VEC> (&to)[COUNT], const void* data, gt_stride s, int64_t b,
                        int64_t t, int64_t d, int64_t valid) {
    if (valid <= 0) {
        GT_UNROLL
        for (int i = 0; i < COUNT; i++) to[i] = {};
        return;
    }
    const T* from = static_cast<const T*>(data) + at(s, b, t, d);
    GT_UNROLL
    for (int i = 0; i < COUNT; i++) to[i] = ldg<Vec<T, VEC>>(from + (i < valid ? i : 0) * s.t);
}

template <class T, int VEC>
GT_DEV void store_token(void* data, gt_stride s, int64_t b, int64_t t, int64_t d,
                        const float (&y)[VEC]) {
    Vec<T, VEC> packed;
    packed.set(y);
    stg(static_cast<T*>(data) + at(s, b, t, d), packed);
}

/* window[0..2] = the three inputs before token t: those of the state if t is 0. */
template <class T, int VEC>
GT_DEV void load_window(float (&window)[TAPS][VEC], const Problem& p, const Place& me, int64_t t,
                        int64_t state_row) {
    Vec<T, VEC> before[HALO];
    load_tokens(before, p.x, p.x_at, me.b, t - HALO, me.d, t > 0 ? HALO : 0);
    GT_UNROLL
    for (int i = 0; i < HALO; i++) {
        GT_UNROLL
        for (int v = 0; v < VEC; v++)
            window[i][v] = t > 0 ? before[i].get(v) : state_input(p, state_row, me.d + v, i - HALO);
    }
}

template <int VEC>
GT_DEV void shift(float (&window)[TAPS][VEC]) {
    GT_UNROLL
    for (int i = 0; i < HALO; i++) {
        GT_UNROLL
        for (int v = 0; v < VEC; v++) window[i][v] = window[i + 1][v];
    }
}

} /* namespace conv1d */
} /* namespace gt */

#endif
