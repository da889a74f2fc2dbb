/* gt/conv1d/rows.cuh - forward and backward over time, [B,D,T], of long rows: the same sums as forward.cuh and
 * backward.cuh.
 *
 * A row is one channel of one batch element.  It is cut into segments of up to MAX_ROUNDS rounds.  In a round `lanes`
 * neighbouring threads (a power of 2 up to 32) take a unit each, 16 bytes side by side: up to 512 bytes of a row at
 * once, where tile.cuh takes 128 bytes of each of 32 rows.  A thread needs the inputs before its unit, and the q after
 * it.  They come from the lanes before and after by shuffles; for the first and last lane, from the neighbouring round.
 * These kernels serve calls without packed sequences whose rows are whole numbers of aligned units, LEAST_UNITS or
 * more.  Those of forward.cuh and backward.cuh serve the others.
 *
 * grid ceil(B*D*segments*lanes / 128), block 128, all warps alike; no shared memory.
 * registers: weights (backward: and their gradients), x (and dy) of three rounds: two are in flight while one is worked
 * on.  64 at most, so that eight blocks share a multiprocessor; backward 80, for six.
 * bytes: every tensor once; a second time the unit of x before every segment.  Backward also reads a second time the
 * W - 1 tokens of x and dy after every segment, and stores 4 (W + 1) bytes of sums a segment.
 * instructions an element, bf16, W = 4, SiLU: as in forward.cuh and backward.cuh, and 2 to 4 for shuffles and
 * addresses.
 * Backward takes the last round of a segment first, so that q is there when dx needs it.  dweight and dbias are summed
 * over a thread's units in registers, over the segment's lanes by a butterfly, over segments and batch by reduce_rows:
 * deterministic. */
#ifndef GT_CONV1D_ROWS_CUH
#define GT_CONV1D_ROWS_CUH

#include "backward.cuh"
#include "forward.cuh"

namespace gt {
namespace conv1d {

constexpr int ROWS_BLOCK = 128, MAX_ROUNDS = 32;
constexpr int LEAST_UNITS = 128;                                 /* of a row: with fewer, tiles are faster */
constexpr int ROWS_FORWARD_BLOCKS = 8, ROWS_BACKWARD_BLOCKS = 6; /* on a multiprocessor */

struct RowsCut {
    int lanes, rounds;        /* of a segment */
    int64_t segments, blocks; /* segments of a row; blocks of the grid */
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
using Unit = Vec<T, 16 / (int)sizeof(T)>;

/* A thread's segment of a row, and its neighbours. */
template <class T>
struct Segment {
    static constexpr int N = 16 / (int)sizeof(T);
    int64_t b, d, segment, first, last; /* tokens first ... last - 1 */
    int lane;                           /* among those of the segment */
    int lane_before, lane_after;        /* in the warp; the segment's lanes form a ring */
    bool exists;

    GT_METHOD Segment(const Problem& p, const RowsCut& cut) {
        int64_t item = (int64_t)block_x() * (ROWS_BLOCK / cut.lanes) + thread_id() / cut.lanes;
        exists = item < p.B * p.D * cut.segments;
        if (!exists) item = 0;
        segment = item % cut.segments;
        d = item / cut.segments % p.D;
        b = item / cut.segments / p.D;
        lane = lane_id() % cut.lanes;
        lane_before = lane_id() - lane + (lane + cut.lanes - 1) % cut.lanes;
        lane_after = lane_id() - lane + (lane + 1) % cut.lanes;
        const int64_t tokens = (int64_t)cut.rounds * cut.lanes * N;
        first = segment * tokens;
        last = first + tokens < p.T ? first + tokens : p.T;
    }
};

/* The unit that begins with token t of a row; zeros if t is outside of first ... end - 1. */
template <class T>
GT_DEV Unit<T> load_unit(const T* row, int64_t t, int64_t first, int64_t end) {
    Unit<T> unit = {};
    if (t >= first && t < end) unit = ldg<Unit<T>>(row + t);
    return unit;
}

/* e[0 ... W-2] = the inputs before a thread's unit `own`: the end of the unit that the lane before sends.  The first
 * lane gets `earlier` from the last lane, whose unit it is in the round that is earlier in time.
 * Only words FIRST ... 3 of a unit hold inputs that are asked for. */
template <class T, int W, int COUNT>
GT_DEV void inputs_before(float (&e)[COUNT], const Segment<T>& me, bool is_last_lane, const Unit<T>& own,
                          const Unit<T>& earlier) {
    constexpr int N = Segment<T>::N, WORDS = 4, FIRST = (N - (W - 1)) * (int)sizeof(T) / 4;
    uint32_t own_words[WORDS], earlier_words[WORDS], got[WORDS] = {};
    memcpy(own_words, &own, 16);
    memcpy(earlier_words, &earlier, 16);
    GT_UNROLL
    for (int i = FIRST; i < WORDS; i++)
        got[i] = shfl_idx(is_last_lane ? earlier_words[i] : own_words[i], me.lane_before);
    Unit<T> unit;
    memcpy(&unit, got, 16);
    GT_UNROLL
    for (int i = 0; i < W - 1; i++) e[i] = unit.get(N - (W - 1) + i);
}

/* ---- forward --------------------------------------------------------------------------------- */

template <class T, int W>
GT_KERNEL(ROWS_BLOCK, ROWS_FORWARD_BLOCKS)
forward_rows_kernel(const GT_GRID_CONSTANT ForwardRowsParams p) {
    constexpr int N = Segment<T>::N, J = W - 1;
    const Problem& in = p.f.in;
    const Segment<T> me(in, p.rows);
    const T* x = static_cast<const T*>(in.x) + offset_of(in.x_stride, me.b, 0, me.d);
    T* y = static_cast<T*>(p.f.y) + offset_of(p.f.y_stride, me.b, 0, me.d);
    const int step = p.rows.lanes * N;
    const bool is_last_lane = me.lane == p.rows.lanes - 1;
    const int64_t end = me.exists ? me.last : 0;
    int64_t t = me.first + me.lane * N;
    Unit<T> own = load_unit(x, t, 0, end), next = load_unit(x, t + step, 0, end), earlier = {};
    if (is_last_lane && me.first > 0) earlier = load_unit(x, me.first - N, 0, end);
    Filter<W, 1> filter;
    filter.load(in, me.d, 1);
    for (int round = 0; round < p.rows.rounds; round++, t += step) {
        const Unit<T> after = load_unit(x, t + 2 * step, 0, end);
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
            Unit<T> packed;
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

/* Adds up the sums of a segment's lanes; its first lane stores them.  All threads of the block call it. */
template <class T, int W>
GT_DEV void store_row_sums(const BackwardRowsParams& p, const Segment<T>& me, Sums<W, 1>& sums) {
    const Problem& in = p.b.in;
    for (int mask = 1; mask < p.rows.lanes; mask <<= 1) {
        GT_UNROLL
        for (int k = 0; k <= W; k++) sums.tap[k][0] += shfl_xor(sums.tap[k][0], mask);
    }
    if (!me.exists || me.lane != 0) return;
    const int64_t to = (me.b * p.rows.segments + me.segment) * in.D + me.d;
    GT_UNROLL
    for (int k = 0; k < W; k++)
        if (p.b.dweight) p.b.dweight[to * W + k] = sums.tap[k][0];
    if (p.b.dbias) p.b.dbias[to] = sums.tap[W][0];
}

template <class T, int W>
GT_KERNEL(ROWS_BLOCK, ROWS_BACKWARD_BLOCKS)
backward_rows_kernel(const GT_GRID_CONSTANT BackwardRowsParams p) {
    constexpr int N = Segment<T>::N, J = W - 1;
    wait_for_chain(); /* the first of its chain: it waits for none, but lets blocks of the next kernel start early */
    const Problem& in = p.b.in;
    const Segment<T> me(in, p.rows);
    const T* x = static_cast<const T*>(in.x) + offset_of(in.x_stride, me.b, 0, me.d);
    const T* dy = static_cast<const T*>(p.b.dy) + offset_of(p.b.dy_stride, me.b, 0, me.d);
    T* dx = static_cast<T*>(p.b.dx) + offset_of(p.b.dx_stride, me.b, 0, me.d);
    const int step = p.rows.lanes * N;
    const bool is_last_lane = me.lane == p.rows.lanes - 1;
    const int64_t start = me.first + me.lane * N, end = me.exists ? me.last : 0;
    /* before the segment only the last lane's x is needed, one unit of it */
    const int64_t earliest = is_last_lane && me.first > 0 ? me.first - N : me.first;
    int64_t t = start + (int64_t)(p.rows.rounds - 1) * step;
    const auto load_x = [&](int64_t from) { return load_unit(x, from, earliest, end); };
    const auto load_dy = [&](int64_t from) { return load_unit(dy, from, me.first, end); };
    Unit<T> own = load_x(t), own_dy = load_dy(t), next = load_x(t - step), next_dy = load_dy(t - step);
    Filter<W, 1> filter;
    filter.load(in, me.d, 1);
    float e[N + J], q[N + J]; /* inputs from J before the unit on; q from the unit's first to J after it */
    GT_UNROLL
    for (int i = 0; i < J; i++) { /* the q after the segment, which the last lane asks the first for: see below */
        float window[W][1];
        q[i] = 0.0f;
        if (end == 0 || me.last + i >= in.T) continue;
        GT_UNROLL
        for (int k = 0; k < W; k++) window[k][0] = Element<T>::load(x, me.last + i - J + k);
        q[i] = gradient_of_sum<T>(in.has_silu, filter.sum(window, 0), Element<T>::load(dy, me.last + i));
    }
    Sums<W, 1> sums = {};
    for (int round = 0; round < p.rows.rounds; round++, t -= step) { /* next, after: earlier in time */
        const Unit<T> after = load_x(t - 2 * step), after_dy = load_dy(t - 2 * step);
        float carried[J], out[N]; /* carried: q of the first tokens of the round before, later in time */
        GT_UNROLL
        for (int i = 0; i < J; i++) carried[i] = q[i];
        inputs_before<T, W>(e, me, is_last_lane, own, next);
        if (in.state_in && t == 0) {
            GT_UNROLL
            for (int i = 0; i < J; i++) e[i] = state_input(in, me.b, me.d, i - J);
        }
        GT_UNROLL
        for (int i = 0; i < J; i++) q[i] = 0.0f; /* of a unit beyond the row's end */
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
        for (int i = 0; i < J; i++) q[N + i] = shfl_idx(me.lane == 0 ? carried[i] : q[i], me.lane_after);
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
            Unit<T> packed;
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
