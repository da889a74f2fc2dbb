/* gt/conv1d/time.cuh - forward and backward, threads side by side over time: [B,D,T].
 *
 * A row is one channel of one batch element, cut into chunks of 16 bytes at 16-byte boundaries of
 * memory: rows of any length and alignment, as long as all tensors have the same.  `lanes`
 * neighbouring threads (a power of 2 up to 32) take neighbouring chunks, `passes` times in a row.
 * grid ceil(B*D*segments / (256 / lanes)), block 256; no shared memory.
 * registers: a chunk, and its neighbours for the three elements beyond either end.
 * bytes: every tensor once; neighbours a second time, out of the first-level cache.
 * Sums over a segment go through registers, then a butterfly over the lanes; over segments and
 * batch by reduce_rows: deterministic. */
#ifndef GT_CONV1D_TIME_CUH
#define GT_CONV1D_TIME_CUH

#include "backward.cuh"

namespace gt {
namespace conv1d {

template <class T>
constexpr int CHUNK = 16 / (int)sizeof(T);

constexpr int PASSES = 4; /* at most */

struct ForwardTimeParams {
    ForwardParams f;
    int lanes, passes;
    int64_t segments;
};

/* A thread's row. */
struct Row {
    int64_t b, d, segment;
    int lane, shift; /* elements from a 16-byte boundary to the row */
    bool exists;
};

template <class T>
GT_DEV Row row_of(const Problem& p, int lanes, int64_t segments) {
    Row me;
    int64_t item = (int64_t)block_x() * (THREADS / lanes) + thread_id() / lanes;
    me.exists = item < p.B * p.D * segments;
    if (!me.exists) item = 0;
    me.lane = thread_id() % lanes;
    me.segment = item % segments;
    me.d = item / segments % p.D;
    me.b = item / segments / p.D;
    const T* row = static_cast<const T*>(p.x) + at(p.x_at, me.b, 0, me.d);
    me.shift = (int)((uintptr_t)row / sizeof(T) % CHUNK<T>);
    return me;
}

/* Elements t ... of a row of T; 0 outside. */
template <class T>
GT_DEV void load_chunk(Vec<T, CHUNK<T>>& to, const T* row, int64_t t, int64_t end) {
    if (t >= 0 && t + CHUNK<T> <= end) {
        to = ldg<Vec<T, CHUNK<T>>>(row + t);
        return;
    }
    float x[CHUNK<T>];
    GT_UNROLL
    for (int i = 0; i < CHUNK<T>; i++)
        x[i] = t + i >= 0 && t + i < end ? Element<T>::load(row, t + i) : 0.0f;
    to.set(x);
}

template <class T>
GT_DEV void store_chunk(T* row, int64_t t, int64_t end, const float (&y)[CHUNK<T>]) {
    if (t >= 0 && t + CHUNK<T> <= end) {
        Vec<T, CHUNK<T>> packed;
        packed.set(y);
        stg(row + t, packed);
        return;
    }
    GT_UNROLL
    for (int i = 0; i < CHUNK<T>; i++)
        if (t + i >= 0 && t + i < end) Element<T>::store(row, t + i, y[i]);
}

/* e[i] = the input of token t - 3 + i, from the chunks around t; inputs before the first from the
 * state. */
template <class T, int COUNT, int CHUNKS>
GT_DEV void inputs_around(float (&e)[COUNT][1], const Problem& p, const Row& me, int64_t t,
                          const Vec<T, CHUNK<T>> (&chunks)[CHUNKS]) {
    constexpr int BACK = CHUNK<T> - HALO; /* chunks[0] begins that much before e */
    static_assert(BACK + COUNT <= CHUNKS * CHUNK<T>, "enough chunks");
    GT_UNROLL
    for (int i = 0; i < COUNT; i++) {
        e[i][0] = chunks[(i + BACK) / CHUNK<T>].get((i + BACK) % CHUNK<T>);
        if (t - HALO + i < 0 && t - HALO + i >= -HALO)
            e[i][0] = state_input(p, me.b, me.d, (int)(t - HALO + i));
    }
}

template <class T>
GT_KERNEL(THREADS, 2) forward_time_kernel(const GT_GRID_CONSTANT ForwardTimeParams p) {
    constexpr int N = CHUNK<T>;
    const Problem& in = p.f.in;
    const Row me = row_of<T>(in, p.lanes, p.segments);
    const T* x = static_cast<const T*>(in.x) + at(in.x_at, me.b, 0, me.d);
    T* y = static_cast<T*>(p.f.y) + at(p.f.y_at, me.b, 0, me.d);
    const int64_t step = (int64_t)p.lanes * N;
    const int64_t first = me.segment * p.passes * step + (int64_t)me.lane * N - me.shift;
    const int64_t end = me.exists ? in.T : 0;
    Taps<1> taps;
    taps.load(in, me.d);
    Vec<T, N> chunks[PASSES][2];
    GT_UNROLL
    for (int i = 0; i < PASSES; i++) {
        const int64_t t = first + i * step;
        if (i >= p.passes) break;
        load_chunk<T>(chunks[i][0], x, t - N, t < end ? end : 0);
        load_chunk<T>(chunks[i][1], x, t, end);
    }
    GT_UNROLL
    for (int i = 0; i < PASSES; i++) {
        const int64_t t = first + i * step;
        if (i >= p.passes || t >= end) break;
        float e[N + HALO][1], out[N];
        inputs_around<T>(e, in, me, t, chunks[i]);
        GT_UNROLL
        for (int n = 0; n < N; n++) {
            const float window[TAPS][1] = {{e[n][0]}, {e[n + 1][0]}, {e[n + 2][0]}, {e[n + 3][0]}};
            const float pre = taps.sum(window, 0);
            out[n] = in.has_silu ? silu_of_sigmoid(pre, sigmoid_of<T>(pre)) : pre;
        }
        store_chunk<T>(y, t, end, out);
    }
    sync_warp(); /* the lanes beside have read the state */
    if (p.f.state_out && me.exists && me.segment == 0 && me.lane == 0)
        store_state<T>(p.f, me.b, me.b, me.d);
}

/* A thread's sums over its lanes, then stored by the first of them; all threads. */
GT_DEV void store_row_sums(const BackwardParams& p, const Row& me, Sums<1>& sums) {
    const Problem& in = p.in;
    const int first = TAPS - in.W;
    for (int mask = 1; mask < p.lanes; mask <<= 1) {
        GT_UNROLL
        for (int k = 0; k <= TAPS; k++) sums.tap[k][0] += shfl_xor(sums.tap[k][0], mask);
    }
    if (!me.exists || me.lane != 0) return;
    const int64_t cell = (me.b * p.segments + me.segment) * in.D + me.d;
    GT_UNROLL
    for (int k = 0; k < TAPS; k++)
        if (p.dweight && k >= first) p.dweight[cell * in.W + k - first] = sums.tap[k][0];
    if (p.dbias) p.dbias[cell] = sums.tap[TAPS][0];
}

/* A chunk of gradients, from the inputs 3 before to 3 behind it: dx_t needs q_t ... q_{t+3}. */
template <class T>
GT_DEV void backward_chunk(const BackwardParams& p, const Row& me, const Taps<1>& taps, int64_t t,
                           Sums<1>& sums) {
    constexpr int N = CHUNK<T>;
    const Problem& in = p.in;
    const T* x = static_cast<const T*>(in.x) + at(in.x_at, me.b, 0, me.d);
    const T* dy = static_cast<const T*>(p.dy) + at(p.dy_at, me.b, 0, me.d);
    Vec<T, N> chunks[3], dy_chunks[2];
    GT_UNROLL
    for (int i = 0; i < 3; i++) load_chunk<T>(chunks[i], x, t + (i - 1) * N, in.T);
    GT_UNROLL
    for (int i = 0; i < 2; i++) load_chunk<T>(dy_chunks[i], dy, t + i * N, in.T);
    float e[N + 2 * HALO][1], q[N + HALO], dx[N];
    inputs_around<T>(e, in, me, t, chunks);
    GT_UNROLL
    for (int n = 0; n < N + HALO; n++) {
        const float window[TAPS][1] = {{e[n][0]}, {e[n + 1][0]}, {e[n + 2][0]}, {e[n + 3][0]}};
        const bool inside = t + n >= 0 && t + n < in.T;
        q[n] = inside ? gradient_of_sum<T>(in, taps.sum(window, 0), dy_chunks[n / N].get(n % N))
                      : 0.0f;
        if (n >= N || !inside) continue;
        GT_UNROLL
        for (int k = 0; k < TAPS; k++)
            if (k >= taps.first) sums.tap[k][0] = fma_rn(window[k][0], q[n], sums.tap[k][0]);
        sums.tap[TAPS][0] += q[n];
    }
    if (!p.dx) return;
    GT_UNROLL
    for (int n = 0; n < N; n++) {
        const float later[TAPS][1] = {{q[n]}, {q[n + 1]}, {q[n + 2]}, {q[n + 3]}};
        dx[n] = taps.gradient(later, 0);
        if (t + n + HALO >= in.T && t + n < in.T) dx[n] += state_gradient(p, me.b, t + n, in.T, me.d);
    }
    store_chunk<T>(static_cast<T*>(p.dx) + at(p.dx_at, me.b, 0, me.d), t, in.T, dx);
}

template <class T>
GT_KERNEL(THREADS, 2) backward_time_kernel(const GT_GRID_CONSTANT BackwardParams p) {
    constexpr int N = CHUNK<T>;
    const Row me = row_of<T>(p.in, p.lanes, p.segments);
    const int64_t step = (int64_t)p.lanes * N;
    const int64_t first = me.segment * p.passes * step + (int64_t)me.lane * N - me.shift;
    Taps<1> taps;
    Sums<1> sums = {};
    taps.load(p.in, me.d);
    for (int i = 0; i < p.passes; i++) {
        const int64_t t = first + i * step;
        if (me.exists && t < p.in.T) backward_chunk<T>(p, me, taps, t, sums);
    }
    if (p.dweight || p.dbias) store_row_sums(p, me, sums);
}

} /* namespace conv1d */
} /* namespace gt */

#endif
