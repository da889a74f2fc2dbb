/* gt/conv1d/rows.cuh - forward and backward over time, [B,D,T], of whole rows.
 *
 * A row is one channel of one batch element, and a segment of it up to MAX_PASSES passes.  In a pass `lanes`
 * neighbouring threads (a power of 2 up to 32) take 16 bytes each, side by side: memory is read and written in long
 * stretches, which the tiles of tile.cuh, 128 bytes of 32 rows, are not.  The inputs before a thread's own come from
 * the lane before, the q behind them from the lane behind, by shuffles; those of a pass's first and last lane from
 * the neighbouring pass.
 * Serves elements of a batch whose rows are whole numbers of 16 aligned bytes, LEAST_CHUNKS or more; tile.cuh the
 * others.
 *
 * grid ceil(B*D*segments*lanes / 128), block 128; no shared memory.
 * registers: weights and their gradients, x (and dy) of three passes: two are in flight while one is worked on.
 * bytes: every tensor once; at either end of a segment 16 bytes more.
 * instructions an element, bf16, W = 4, SiLU: as in forward.cuh and backward.cuh, and 2 to 4 for shuffles and
 * addresses.
 * Backward takes the passes of a segment last one first, so that q is there when dx needs it.  Sums over a segment go
 * through registers, then a butterfly over the lanes; over segments and batch by reduce_rows: deterministic. */
#ifndef GT_CONV1D_ROWS_CUH
#define GT_CONV1D_ROWS_CUH

#include "backward.cuh"
#include "forward.cuh"

namespace gt {
namespace conv1d {

constexpr int ROWS_BLOCK = 128, MAX_PASSES = 32;
constexpr int LEAST_CHUNKS = 128;                                /* of a row: with fewer, tiles are faster */
constexpr int ROWS_FORWARD_BLOCKS = 8, ROWS_BACKWARD_BLOCKS = 6; /* on a multiprocessor */

struct RowsCut {
    int lanes, passes; /* of a segment */
    int64_t segments, blocks;
};

struct ForwardRowsParams {
    ForwardParams f;
    RowsCut rows;
};

struct BackwardRowsParams {
    BackwardParams b;
    RowsCut rows;
};

template <class T>
using Chunk = Vec<T, 16 / (int)sizeof(T)>;

/* A thread's segment. */
template <class T>
struct Segment {
    static constexpr int N = 16 / (int)sizeof(T);
    int64_t b, d, segment, first, last; /* tokens first ... last - 1 */
    int lane, before, behind;           /* lane: of the segment; lanes of the warp */
    bool exists;

    GT_METHOD Segment(const Problem& p, const RowsCut& cut) {
        int64_t item = (int64_t)block_x() * (ROWS_BLOCK / cut.lanes) + thread_id() / cut.lanes;
        exists = item < p.B * p.D * cut.segments;
        if (!exists) item = 0;
        segment = item % cut.segments;
        d = item / cut.segments % p.D;
        b = item / cut.segments / p.D;
        lane = lane_id() % cut.lanes;
        before = lane_id() - lane + (lane + cut.lanes - 1) % cut.lanes;
        behind = lane_id() - lane + (lane + 1) % cut.lanes;
        const int64_t tokens = (int64_t)cut.passes * cut.lanes * N;
        first = segment * tokens;
        last = first + tokens < p.T ? first + tokens : p.T;
    }
};

/* The chunk of token t of a row, 0 outside of first ... end - 1. */
template <class T>
GT_DEV Chunk<T> load_chunk(const T* row, int64_t t, int64_t first, int64_t end) {
    Chunk<T> chunk = {};
    if (t >= first && t < end) chunk = ldg<Chunk<T>>(row + t);
    return chunk;
}

/* e[0 ... J-1] = the inputs before a thread's chunk `own`; `earlier` is that of the last lane in the pass before. */
template <class T, int W, int COUNT>
GT_DEV void inputs_before(float (&e)[COUNT], const Segment<T>& me, bool is_last_lane, const Chunk<T>& own,
                          const Chunk<T>& earlier) {
    constexpr int N = Segment<T>::N, WORDS = 4, FIRST = (N - (W - 1)) * (int)sizeof(T) / 4;
    uint32_t mine[WORDS], theirs[WORDS], got[WORDS] = {};
    memcpy(mine, &own, 16);
    memcpy(theirs, &earlier, 16);
    GT_UNROLL
    for (int i = FIRST; i < WORDS; i++) got[i] = shfl_idx(is_last_lane ? theirs[i] : mine[i], me.before);
    Chunk<T> chunk;
    memcpy(&chunk, got, 16);
    GT_UNROLL
    for (int i = 0; i < W - 1; i++) e[i] = chunk.get(N - (W - 1) + i);
}

/* ---- forward --------------------------------------------------------------------------------- */

template <class T, int W>
GT_KERNEL(ROWS_BLOCK, ROWS_FORWARD_BLOCKS)
forward_rows_kernel(const GT_GRID_CONSTANT ForwardRowsParams p) {
    constexpr int N = Segment<T>::N, J = W - 1;
    const Problem& in = p.f.in;
    const Segment<T> me(in, p.rows);
    const T* x = static_cast<const T*>(in.x) + at(in.x_at, me.b, 0, me.d);
    T* y = static_cast<T*>(p.f.y) + at(p.f.y_at, me.b, 0, me.d);
    const int step = p.rows.lanes * N;
    const bool is_last_lane = me.lane == p.rows.lanes - 1;
    const int64_t end = me.exists ? me.last : 0;
    int64_t t = me.first + me.lane * N;
    Chunk<T> own = load_chunk(x, t, 0, end), next = load_chunk(x, t + step, 0, end), earlier = {};
    if (is_last_lane && me.first > 0) earlier = load_chunk(x, me.first - N, 0, end);
    Filter<W, 1> filter;
    filter.load(in, me.d, 1);
    for (int pass = 0; pass < p.rows.passes; pass++, t += step) {
        const Chunk<T> after = load_chunk(x, t + 2 * step, 0, end);
        float e[N + J], out[N];
        inputs_before<T, W>(e, me, is_last_lane, own, earlier);
        if (in.state_in && t == 0) {
            GT_UNROLL
            for (int i = 0; i < J; i++) e[i] = state_input(in, me.b, me.d, i - J);
        }
        GT_UNROLL
        for (int n = 0; n < N; n++) {
            e[n + J] = own.get(n);
            float window[W][1];
            GT_UNROLL
            for (int k = 0; k < W; k++) window[k][0] = e[n + k];
            out[n] = output_of_sum<T>(in.has_silu, filter.sum(window, 0));
        }
        if (t < end) {
            Chunk<T> packed;
            packed.set(out);
            stg(y + t, packed);
        }
        earlier = own;
        own = next;
        next = after;
    }
    if (p.f.state_out && me.exists && me.segment == 0 && me.lane == 0)
        store_state<T>(in, p.f.state_out, me.b, me.b, me.d);
}

/* ---- backward -------------------------------------------------------------------------------- */

/* A thread's sums over its lanes, then stored by the first of them; all threads. */
template <class T, int W>
GT_DEV void store_row_sums(const BackwardRowsParams& p, const Segment<T>& me, Sums<W, 1>& sums) {
    const Problem& in = p.b.in;
    for (int mask = 1; mask < p.rows.lanes; mask <<= 1) {
        GT_UNROLL
        for (int k = 0; k <= W; k++) sums.tap[k][0] += shfl_xor(sums.tap[k][0], mask);
    }
    if (!me.exists || me.lane != 0) return;
    const int64_t cell = (me.b * p.rows.segments + me.segment) * in.D + me.d;
    GT_UNROLL
    for (int k = 0; k < W; k++)
        if (p.b.dweight) p.b.dweight[cell * W + k] = sums.tap[k][0];
    if (p.b.dbias) p.b.dbias[cell] = sums.tap[W][0];
}

template <class T, int W>
GT_KERNEL(ROWS_BLOCK, ROWS_BACKWARD_BLOCKS)
backward_rows_kernel(const GT_GRID_CONSTANT BackwardRowsParams p) {
    constexpr int N = Segment<T>::N, J = W - 1;
    wait_for_chain(); /* for the kernel behind: it may take places that become free */
    const Problem& in = p.b.in;
    const Segment<T> me(in, p.rows);
    const T* x = static_cast<const T*>(in.x) + at(in.x_at, me.b, 0, me.d);
    const T* dy = static_cast<const T*>(p.b.dy) + at(p.b.dy_at, me.b, 0, me.d);
    T* dx = static_cast<T*>(p.b.dx) + at(p.b.dx_at, me.b, 0, me.d);
    const int step = p.rows.lanes * N;
    const bool is_last_lane = me.lane == p.rows.lanes - 1;
    const int64_t start = me.first + me.lane * N, end = me.exists ? me.last : 0;
    /* of the passes before the first only the last lane's x is needed, and only of one */
    const int64_t earliest = is_last_lane && me.first > 0 ? me.first - N : me.first;
    int64_t t = start + (int64_t)(p.rows.passes - 1) * step;
    const auto load_x = [&](int64_t from) { return load_chunk(x, from, earliest, end); };
    const auto load_dy = [&](int64_t from) { return load_chunk(dy, from, me.first, end); };
    Chunk<T> own = load_x(t), own_dy = load_dy(t), next = load_x(t - step), next_dy = load_dy(t - step);
    Filter<W, 1> filter;
    filter.load(in, me.d, 1);
    float e[N + J], q[N + J];
    GT_UNROLL
    for (int i = 0; i < J; i++) { /* the q behind the segment */
        float window[W][1];
        q[i] = 0.0f;
        if (end == 0 || me.last + i >= in.T) continue;
        GT_UNROLL
        for (int k = 0; k < W; k++) window[k][0] = Element<T>::load(x, me.last + i - J + k);
        q[i] = gradient_of_sum<T>(in.has_silu, filter.sum(window, 0), Element<T>::load(dy, me.last + i));
    }
    Sums<W, 1> sums = {};
    for (int pass = 0; pass < p.rows.passes; pass++, t -= step) {
        const Chunk<T> after = load_x(t - 2 * step), after_dy = load_dy(t - 2 * step);
        float carried[J], out[N];
        GT_UNROLL
        for (int i = 0; i < J; i++) carried[i] = q[i];
        inputs_before<T, W>(e, me, is_last_lane, own, next);
        if (in.state_in && t == 0) {
            GT_UNROLL
            for (int i = 0; i < J; i++) e[i] = state_input(in, me.b, me.d, i - J);
        }
        GT_UNROLL
        for (int i = 0; i < J; i++) q[i] = 0.0f;
        if (t < end) {
            GT_UNROLL
            for (int n = 0; n < N; n++) {
                e[n + J] = own.get(n);
                float window[W][1];
                GT_UNROLL
                for (int k = 0; k < W; k++) window[k][0] = e[n + k];
                q[n] = gradient_of_sum<T>(in.has_silu, filter.sum(window, 0), own_dy.get(n));
                GT_UNROLL
                for (int k = 0; k < W; k++) sums.tap[k][0] = fma_rn(e[n + k], q[n], sums.tap[k][0]);
                sums.tap[W][0] += q[n];
            }
        }
        GT_UNROLL
        for (int i = 0; i < J; i++) q[N + i] = shfl_idx(me.lane == 0 ? carried[i] : q[i], me.behind);
        if (t < end && p.b.dx) {
            GT_UNROLL
            for (int n = 0; n < N; n++) {
                float later[W][1];
                GT_UNROLL
                for (int k = 0; k < W; k++) later[k][0] = q[n + k];
                out[n] = filter.gradient(later, 0);
            }
            if (p.b.dstate_out && t + N == in.T) {
                GT_UNROLL
                for (int i = N - J; i < N; i++) out[i] += state_gradient(p.b, me.b, t + i, in.T, me.d);
            }
            Chunk<T> packed;
            packed.set(out);
            stg(dx + t, packed);
        }
        own = next;
        own_dy = next_dy;
        next = after;
        next_dy = after_dy;
    }
    if (p.b.dweight || p.b.dbias) store_row_sums<T, W>(p, me, sums);
}

} /* namespace conv1d */
} /* namespace gt */

#endif
