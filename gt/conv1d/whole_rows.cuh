/* gt/conv1d/whole_rows.cuh - forward over time, [B,D,T], for long rows that are whole numbers of aligned 16-byte units.
 * It gives the same results as forward_rows_kernel (rows.cuh).  On compute capability 9.0 bulk_rows_sm90.cuh takes
 * these rows.
 *
 * A row is one channel of one batch element.  Rows are cut into segments of up to MAX_ROUNDS rounds; a warp takes a
 * segment.  In a round each lane takes a unit of 16 bytes; the units of neighbouring lanes are adjacent.  A lane gets
 * the inputs before its unit by shuffles from the previous lane; the first lane gets them from the previous round.
 * The loads of two rounds are in flight to registers while one round is computed.  Loads to registers make forward 7 %
 * faster than a ring in shared memory.
 * grid: ceil(B*D*segments / 4).  Block: 128.  All warps do the same work.  No shared memory.
 * registers: weights, x of three rounds; 64 at most, so that eight blocks share a multiprocessor.
 * bytes: every tensor once.  The unit of x before every segment is read twice.
 * instructions per element (bf16, W = 4, SiLU): as many as in forward.cuh, and 2 to 4 for shuffles and addresses. */
#ifndef GT_CONV1D_WHOLE_ROWS_CUH
#define GT_CONV1D_WHOLE_ROWS_CUH

#include "rows.cuh"

namespace gt {
namespace conv1d {

constexpr int WHOLE_ROWS_BLOCKS = 8; /* resident blocks of a multiprocessor */

/* A warp's segment of a row. */
template <class T>
struct WholeSegment {
    static constexpr int N = 16 / (int)sizeof(T), STEP = 32 * N; /* STEP: tokens of a round */
    int64_t b, d, segment, first, last;                          /* tokens first ... last - 1 */

    GT_METHOD WholeSegment(const Problem& p, const RowsCut& cut, uint32_t number) {
        const uint32_t row = number / (uint32_t)cut.segments;
        segment = number % (uint32_t)cut.segments;
        b = row / (uint32_t)p.D;
        d = row % (uint32_t)p.D;
        const int64_t tokens = (int64_t)cut.rounds * STEP;
        first = segment * tokens;
        last = first + tokens < p.T ? first + tokens : p.T;
    }
};

/* Loads the unit that begins with token t of a row.  Tokens from `end` on are 0. */
template <class T>
GT_DEV Unit<T> load_unit(const T* row, int64_t t, int64_t end) {
    Unit<T> unit = {};
    if (t < end) unit = ldg<Unit<T>>(row + t);
    return unit;
}

/* Sets e[0 ... W-2] to the inputs before a lane's unit `own`.  A shuffle brings them from the end of the previous
 * lane's unit.  The first lane gets the end of `earlier`, the last lane's unit in the previous round.  Only words FIRST
 * ... 3 of a unit hold inputs that are needed. */
template <class T, int W, int COUNT>
GT_DEV void inputs_before(float (&e)[COUNT], const Unit<T>& own, const Unit<T>& earlier) {
    constexpr int N = WholeSegment<T>::N, WORDS = 4, FIRST = (N - (W - 1)) * (int)sizeof(T) / 4;
    uint32_t own_words[WORDS], earlier_words[WORDS], got[WORDS] = {};
    memcpy(own_words, &own, 16);
    memcpy(earlier_words, &earlier, 16);
    GT_UNROLL
    for (int i = FIRST; i < WORDS; i++)
        got[i] = shfl_idx(lane_id() == 31 ? earlier_words[i] : own_words[i], (lane_id() + 31) % 32);
    Unit<T> unit;
    memcpy(&unit, got, 16);
    GT_UNROLL
    for (int i = 0; i < W - 1; i++) e[i] = unit.get(N - (W - 1) + i);
}

template <class T, int W>
GT_KERNEL(ROWS_BLOCK, WHOLE_ROWS_BLOCKS)
forward_whole_rows_kernel(const GT_GRID_CONSTANT ForwardRowsParams p) {
    constexpr int N = WholeSegment<T>::N, J = W - 1;
    const Problem& in = p.f.in;
    const uint32_t number = block_x() * (ROWS_BLOCK / 32) + shfl_idx(warp_id(), 0);
    if (number >= p.rows.all) return;
    const WholeSegment<T> me(in, p.rows, number);
    const T* x = static_cast<const T*>(in.x) + offset_of(in.x_stride, me.b, 0, me.d);
    T* y = static_cast<T*>(p.f.y) + offset_of(p.f.y_stride, me.b, 0, me.d);
    constexpr int STEP = WholeSegment<T>::STEP;
    int64_t t = me.first + lane_id() * N;
    Unit<T> own = load_unit(x, t, me.last), next = load_unit(x, t + STEP, me.last), earlier = {};
    if (lane_id() == 31 && me.first > 0) earlier = load_unit(x, me.first - N, me.last);
    Filter<W, 1> filter;
    filter.load(in, me.d, 1);
    for (int round = 0; round < p.rows.rounds; round++, t += STEP) {
        const Unit<T> after = load_unit(x, t + 2 * STEP, me.last);
        float e[N + J], out[N];
        inputs_before<T, W>(e, own, earlier);
        if (in.state_in && t == 0) {
            GT_UNROLL
            for (int i = 0; i < J; i++) e[i] = state_input(in, me.b, me.d, i - J);
        }
        GT_UNROLL
        for (int n = 0; n < N; n++) e[n + J] = own.get(n);
        forward_unit<T>(out, in, filter, e, 0);
        if (t < me.last) {
            Unit<T> packed;
            packed.set(out);
            stg(y + t, packed);
        }
        earlier = own;
        own = next;
        next = after;
    }
    if (p.f.state_out && me.segment == 0 && lane_id() == 0) store_state<T>(in, p.f.state_out, me.b, me.b, me.d);
}

} /* namespace conv1d */
} /* namespace gt */

#endif
