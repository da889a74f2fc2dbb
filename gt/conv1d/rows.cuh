/* gt/conv1d/rows.cuh - forward and backward for long rows of [B,D,T].  They compute the same sums as forward.cuh and
 * backward.cuh.
 *
 * A row is one channel of one batch element.  Rows are cut into segments of up to MAX_ROUNDS rounds; a warp takes a
 * segment.  In a round each lane takes one unit, 16 bytes, so a warp reads 512 adjacent bytes of one row. (tile.cuh
 * reads 128 bytes of each of 32 rows.)  cp.async copies units into a ring of four rounds in shared memory.  A lane
 * reads the inputs before its unit from the ring.  In backward a lane gets the q (see backward.cuh) after its unit by
 * shuffles.  The first and last lanes need values of the neighbouring round.  For its first lane, forward copies the
 * unit before a round once more.  A forward warp takes several segments in turn.  It copies the next segment while it
 * works on the last rounds of the current one.
 *
 * These kernels serve calls whose rows have at least LEAST_UNITS units.  Units are aligned, but rows need not be: the
 * first and last unit of a row may hold tokens of other rows.  A channel's rows must have the same alignment in all
 * tensors; otherwise forward.cuh and backward.cuh serve the call.  If rows are whole numbers of aligned units, other
 * files serve forward: bulk_rows_sm90.cuh on compute capability 9.0, and elsewhere whole_rows.cuh for calls that are
 * not packed.
 *
 * Packed sequences (PACKED) use borders.cuh.  The four warps of a block take the same segment of four channels.
 * Together they write the segment's borders while the first copies are in flight, and then meet at the block's only
 * barrier.  Weights and the tokens after the segment are loaded before the borders, so the latencies overlap.
 *
 * grid: four warps a block.  A warp takes one segment, or several in a forward call that is not packed.
 * registers: weights (backward: also their gradients), a unit of x (backward: also of dy) and its q.  Forward has at
 * most 56, so nine blocks share a multiprocessor; backward has 64, for eight.  Packed forward has 64, for eight blocks,
 * and packed backward 80, for six.
 * shared memory of a block: forward 8.25 KB, backward 16 KB; packed up to 1 KB more.
 * bytes: every tensor once.  Forward reads 16 bytes of x in every round a second time, from a cache.  Backward reads
 * twice the unit of x before a segment, and the W - 1 tokens of x and dy after it.  Backward stores 4 (W + 1) bytes of
 * sums for each segment.
 * instructions per element (bf16, W = 4, SiLU): as many as in forward.cuh and backward.cuh, and more for copies,
 * addresses, shuffles and tests: 8 in forward, 11 in backward, 14 if packed.  In a round of 32 units with a border in
 * or near it, an element takes 4 more in forward, 8 more in backward.
 * Backward has code for three kinds of rounds (Round).  In most rounds all tokens belong to the row and to sequences,
 * so units need no tests.  Rounds at a row's ends need every test.
 * Backward takes the last round of a segment first, because dx needs the q after it.  dweight and dbias are summed in
 * three steps: over a lane's units in registers, over the segment's lanes by a butterfly, over segments and batch by
 * reduce_rows.  The order is fixed, so the sums are deterministic. */
#ifndef GT_CONV1D_ROWS_CUH
#define GT_CONV1D_ROWS_CUH

#include "borders.cuh"

namespace gt {
namespace conv1d {

constexpr int ROWS_BLOCK = 128, MAX_ROUNDS = 32, MAX_EACH = 16;
constexpr int LEAST_UNITS = 128; /* fewest units of a row; for shorter rows forward.cuh and backward.cuh are faster */
template <bool PACKED>
constexpr int ROWS_FORWARD_BLOCKS = PACKED ? 8 : 9; /* resident blocks of a multiprocessor */
template <bool PACKED>
constexpr int ROWS_BACKWARD_BLOCKS = PACKED ? 6 : 8;
constexpr int ROWS_STAGES = 4; /* stages of the ring; the next line has the bytes of a stage */
constexpr int FORWARD_STAGE = 16 * (ROWS_BLOCK + ROWS_BLOCK / 32), BACKWARD_STAGE = 32 * ROWS_BLOCK;

struct RowsCut {
    int rounds;               /* rounds of a segment */
    int each;                 /* consecutive segments of a warp; 1 in backward */
    int64_t segments, blocks; /* segments of a row; blocks of the grid */
    uint32_t all;             /* segments of all rows */
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

constexpr int BEFORE = 4; /* inputs before its unit that a lane loads with one aligned load; at least W - 1 */
template <class T>
using Before = Vec<T, BEFORE>;
template <class T>
constexpr int BEFORE_AT = 16 - BEFORE*(int)sizeof(T); /* byte offset of these inputs in their unit */

/* Where a segment lies.  Segments are numbered; a number fits 32 bits (see form_of in launch.cuh).  In packed calls
 * consecutive numbers mean the same tokens of different channels, so a block needs the borders of only one segment.
 * Some of these numbers stand for channels that do not exist. */
template <class T, bool PACKED>
struct SegmentPosition {
    int64_t b, d, segment, offset; /* offset: from the row's first token to the segment's token 0 */
    int lead;                      /* tokens before the row in the unit that holds the row's first token */

    GT_METHOD SegmentPosition(const Problem& p, const RowsCut& cut, uint32_t number) {
        if constexpr (PACKED) {
            const uint32_t channels = cut.all / (uint32_t)cut.segments;
            b = 0, segment = number / channels, d = number % channels;
        } else {
            const uint32_t row = number / (uint32_t)cut.segments;
            segment = number % (uint32_t)cut.segments;
            b = row / (uint32_t)p.D;
            d = row % (uint32_t)p.D;
        }
        /* the other tensors have the same alignment */
        const T* first = static_cast<const T*>(p.x) + offset_of(p.x_stride, b, 0, d);
        lead = (int)((uintptr_t)first % 16 / sizeof(T));
        offset = segment * cut.rounds * (32 * 16 / (int)sizeof(T)) - lead;
    }
    GT_METHOD bool exists(const Problem& p) const { return d < p.D; }
};

/* A warp's segment of a row.  Its token 0 is the first token of its first unit. */
template <class T>
struct Segment {
    static constexpr int N = 16 / (int)sizeof(T), STEP = 32 * N; /* STEP: tokens of a round */
    int tokens;                                                  /* tokens up to the end of the segment or of the row */
    /* start: the row's first token, below N.  end: one past the row's last token that belongs to a sequence.  Both
     * count from token 0 of the segment.  A start or end in another segment becomes a value outside the tokens that
     * this segment tests. */
    int start, end;

    template <class Position>
    GT_METHOD Segment(const Problem& p, const RowsCut& cut, const Position& position) {
        const int most = cut.rounds * STEP;
        const int64_t left = p.T - position.offset;
        tokens = left < 0 ? 0 : left < most ? (int)left : most;
        start = position.segment == 0 ? -(int)position.offset : -STEP;
        end = 0;
    }

    /* Sets `end`.  `used` is the number of the row's tokens that belong to a sequence.  The constructor does not set
     * `end`, since packed calls load `used` from memory and copies should not wait for it. */
    template <class Position>
    GT_METHOD void set_end(const RowsCut& cut, const Position& position, int64_t used) {
        const int most = cut.rounds * STEP + BEFORE;
        const int64_t left = used - position.offset;
        end = left < 0 ? 0 : left < most ? (int)left : most;
    }

    /* Number of bytes of a unit to copy, if `left` tokens remain from its first token to the segment's end. */
    GT_DEV int bytes(int left) { return (int)sizeof(T) * (left > N ? N : left < 0 ? 0 : left); }
    GT_METHOD bool is_first() const { return start >= 0; }
};

/* Stores the results of the unit that begins with token t, but only of tokens in the row. */
template <class T, int N>
GT_DEV void store_unit(T* row, const Segment<T>& me, int t, const float (&x)[N]) {
    if (t >= me.start && t + N <= me.tokens) {
        Unit<T> packed;
        packed.set(x);
        stg(row + t, packed);
        return;
    }
    GT_UNROLL
    for (int i = 0; i < N; i++)
        if (t + i >= me.start && t + i < me.tokens) Element<T>::store(row, t + i, x[i]);
}

/* Replaces the inputs in e that lie before the row: by inputs of the state, or by 0.  e holds the inputs before and in
 * the unit that begins with token t.  channel = b D + d */
template <class T, bool HAS_STATE, bool FORWARD, int COUNT>
GT_DEV void begin_row(float (&e)[COUNT], const Problem& p, int64_t channel, const Segment<T>& me, int t) {
    constexpr int J = COUNT - Segment<T>::N;
    if (t - J >= me.start) return;
    const bool has_state = HAS_STATE && p.state_in;
    const int64_t first = has_state ? (p.state_in_shared ? channel % p.D : channel) * J : 0;
    GT_UNROLL
    for (int i = 0; i < COUNT; i++) {
        const int j = t + i - me.start; /* index into the state's inputs */
        if (j < J) e[i] = has_state && j >= 0 ? load_as(p.state_in, FORWARD ? p.state_dtype : GT_F32, first + j) : 0.0f;
    }
}

/* Writes the borders of a packed call's segment to shared memory at `offset`.  All threads of the block must call
 * this. */
template <class T>
GT_DEV Borders block_borders(const Problem& p, const RowsCut& cut, int64_t used, int64_t segment, int offset) {
    const int tokens = cut.rounds * Segment<T>::STEP;
    const Borders borders = {smem_base() + offset};
    borders.write(p.sequences, used, segment * tokens, tokens, thread_id(), ROWS_BLOCK);
    sync_threads();
    return borders;
}

/* ---- forward --------------------------------------------------------------------------------- */

template <class T, int W, bool PACKED>
GT_KERNEL(ROWS_BLOCK, GT_SM80 ? ROWS_FORWARD_BLOCKS<PACKED> : 8) /* before 8.0 a multiprocessor holds only 1024
                                                                  * threads */
forward_rows_kernel(const GT_GRID_CONSTANT ForwardRowsParams p) {
    constexpr int N = 16 / (int)sizeof(T), J = W - 1;
    const Problem& in = p.f.in;
    constexpr int STEP = Segment<T>::STEP;
    const uint32_t slot = smem_base() + 16 * thread_id(), first_slot = smem_base() + 16 * (ROWS_BLOCK + warp_id());
    const uint32_t before = (lane_id() == 0 ? first_slot : slot - 16) + BEFORE_AT<T>;
    uint32_t number = (block_x() * (ROWS_BLOCK / 32) + shfl_idx(warp_id(), 0)) * p.rows.each;
    if (!PACKED && number >= p.rows.all) return;
    const int64_t used = PACKED ? used_tokens(in.sequences) : in.T;
    uint32_t end = p.rows.all - number < (uint32_t)p.rows.each ? p.rows.all : number + p.rows.each;
    const SegmentPosition<T, PACKED> start(in, p.rows, number);
    if (PACKED && !start.exists(in)) end = number;
    /* The next round to copy.  It is up to ROWS_STAGES - 1 rounds ahead, and may belong to the next segment. */
    struct {
        uint32_t number;
        int tokens, t, round;
        bool is_first;
        const T* x;
    } next;
    const auto enter = [&](uint32_t n) {
        const SegmentPosition<T, PACKED> at(in, p.rows, n);
        const Segment<T> segment(in, p.rows, at);
        next = {n, segment.tokens,     lane_id() * N,
                0, segment.is_first(), static_cast<const T*>(in.x) + offset_of(in.x_stride, at.b, at.offset, at.d)};
    };
    const auto copy = [&](int stage) {
        if (next.number < end) {
            const int bytes = Segment<T>::bytes(next.tokens - next.t);
            const int bytes_before = bytes > 0 && (next.t > 0 || !next.is_first) ? 16 : 0;
            cp_async<16>(slot + stage * FORWARD_STAGE, next.x + (bytes ? next.t : 0), bytes);
            if (lane_id() == 0)
                cp_async<16>(first_slot + stage * FORWARD_STAGE, next.x + (bytes_before ? next.t - N : 0),
                             bytes_before);
            next.t += STEP;
            if (++next.round == p.rows.rounds) {
                if (next.number + 1 < end)
                    enter(next.number + 1);
                else
                    next.number = end;
            }
        }
        cp_async_commit();
    };
    enter(number);
    GT_UNROLL
    for (int i = 0; i < ROWS_STAGES - 1; i++) copy(i);
    Borders borders = {};
    if constexpr (PACKED) borders = block_borders<T>(in, p.rows, used, start.segment, ROWS_STAGES * FORWARD_STAGE);
    int stage = 0;
    GT_NO_UNROLL
    for (; number < end; number++) {
        const SegmentPosition<T, PACKED> at(in, p.rows, number);
        Segment<T> me(in, p.rows, at);
        me.set_end(p.rows, at, used);
        T* y = static_cast<T*>(p.f.y) + offset_of(p.f.y_stride, at.b, at.offset, at.d);
        const int64_t channel = at.b * in.D + at.d;
        Filter<W, 1> filter;
        filter.load(in, at.d, 1);
        int t = lane_id() * N;
        GT_NO_UNROLL
        for (int round = 0; round < p.rows.rounds; round++, t += STEP) {
            cp_async_wait<ROWS_STAGES - 2>();
            sync_warp(); /* all lanes' copies have arrived, and no lane still reads the previous stage */
            copy((stage + ROWS_STAGES - 1) % ROWS_STAGES);
            const Unit<T> own = lds<Unit<T>>(slot + stage * FORWARD_STAGE);
            const Before<T> earlier = lds<Before<T>>(before + stage * FORWARD_STAGE);
            stage = (stage + 1) % ROWS_STAGES;
            float e[N + J], out[N];
            GT_UNROLL
            for (int i = 0; i < J; i++) e[i] = earlier.get(BEFORE - J + i);
            GT_UNROLL
            for (int n = 0; n < N; n++) e[n + J] = own.get(n);
            if constexpr (PACKED) {
                const T* row = static_cast<const T*>(in.x) + at.d * in.x_stride.h;
                forward_packed_unit(out, in, filter, e, borders.near(t - at.lead, N), row, at.d, at.offset, t, me.end);
            } else {
                begin_row<T, true, true>(e, in, channel, me, t);
                forward_unit<T>(out, in, filter, e, 0);
            }
            if (t < me.tokens) store_unit(y, me, t, out);
        }
        if (PACKED || !p.f.state_out || !me.is_first()) continue;
        sync_warp(); /* state_out may be the memory of state_in, which two lanes read if the row is not aligned */
        if (lane_id() == 0) store_state<T>(in, p.f.state_out, at.b, at.b, at.d);
    }
    cp_async_wait<0>();
}

/* ---- backward -------------------------------------------------------------------------------- */

/* Adds the partial sums of a segment's lanes.  The first lane stores the result. */
template <class T, int W, bool PACKED>
GT_DEV void store_row_sums(const BackwardRowsParams& p, uint32_t number, Sums<W, 1>& sums) {
    const Problem& in = p.b.in;
    for (int mask = 1; mask < 32; mask <<= 1) {
        GT_UNROLL
        for (int k = 0; k <= W; k++) sums.tap[k][0] += shfl_xor(sums.tap[k][0], mask);
    }
    const SegmentPosition<T, PACKED> at(in, p.rows, number);
    if (lane_id() != 0) return;
    const int64_t to = (at.b * p.rows.segments + at.segment) * in.D + at.d;
    GT_UNROLL
    for (int k = 0; k < W; k++)
        if (p.b.dweight) p.b.dweight[to * W + k] = sums.tap[k][0];
    if (p.b.dbias) p.b.dbias[to] = sums.tap[W][0];
}

/* Clears the elements of a unit whose bit in `kept` is not set. */
template <class T>
GT_DEV void keep_elements(Unit<T>& unit, uint32_t kept) {
    constexpr int N = Segment<T>::N;
    float x[N];
    GT_UNROLL
    for (int n = 0; n < N; n++) x[n] = kept >> n & 1 ? unit.get(n) : 0.0f;
    unit.set(x);
}

/* Computes q[0 ... N-1] of a unit and adds their terms to the sums.  e holds the inputs before and in the unit. */
template <class T, int W, int COUNT>
GT_DEV void backward_unit(float (&q)[COUNT], Sums<W, 1>& sums, const Problem& p, const Filter<W, 1>& filter,
                          const float (&e)[COUNT], const Unit<T>& dy, uint32_t near) {
    float window[W][1];
    open_window(window, e, near);
    GT_UNROLL
    for (int n = 0; n < Segment<T>::N; n++) {
        next_window(window, e[n + W - 1], n, near);
        q[n] = gradient_of_sum<T>(p.has_silu, filter.sum(window, 0), dy.get(n));
        GT_UNROLL
        for (int k = 0; k < W; k++) sums.tap[k][0] = fma_rn(window[k][0], q[n], sums.tap[k][0]);
        sums.tap[W][0] += q[n];
        shift(window);
    }
}

/* Computes the gradients of a unit's inputs from the unit's q and the W - 1 values of q after it. */
template <int N, int W>
GT_DEV void gradients_of_unit(float (&dx)[N], const Filter<W, 1>& filter, const float (&q)[N + W - 1], uint32_t near) {
    float later[W][1];
    close_window<N>(later, q + N, near);
    GT_UNROLL
    for (int n = N - 1; n >= 0; n--) {
        prior_window(later, q[n], n, near);
        dx[n] = filter.gradient(later, 0);
    }
}

/* Kinds of rounds (32 units), by the tests that their lanes need. */
enum class Round {
    PLAIN,    /* no test: all tokens are in the row and in sequences, and no border is near */
    BORDERED, /* tests for borders; the call has no states */
    ANY       /* all tests */
};

template <class T, int W, bool PACKED>
GT_KERNEL(ROWS_BLOCK, ROWS_BACKWARD_BLOCKS<PACKED>)
backward_rows_kernel(const GT_GRID_CONSTANT BackwardRowsParams p) {
    constexpr int N = 16 / (int)sizeof(T), J = W - 1;
    constexpr uint32_t ALL = (1u << N) - 1;
    wait_for_chain(); /* first kernel of the chain: does not wait, but lets the next kernel's blocks start early */
    const Problem& in = p.b.in;
    const uint32_t number = block_x() * (ROWS_BLOCK / 32) + shfl_idx(warp_id(), 0);
    if (!PACKED && number >= p.rows.all) return;
    const SegmentPosition<T, PACKED> at(in, p.rows, number);
    Segment<T> me(in, p.rows, at);
    constexpr int STEP = Segment<T>::STEP;
    int begin = (p.rows.rounds - 1) * STEP; /* the round's first token, counted from the segment's token 0 */
    /* x, dy and dx point to the lane's unit in the round */
    const T* x = static_cast<const T*>(in.x) + offset_of(in.x_stride, at.b, at.offset, at.d) + begin + lane_id() * N;
    const T* dy =
        static_cast<const T*>(p.b.dy) + offset_of(p.b.dy_stride, at.b, at.offset, at.d) + begin + lane_id() * N;
    T* dx = static_cast<T*>(p.b.dx) + offset_of(p.b.dx_stride, at.b, at.offset, at.d) + begin + lane_id() * N;
    const uint32_t slot = smem_base() + 16 * thread_id();
    const uint32_t before = smem_base() + 16 * (thread_id() - lane_id() + (lane_id() + 31) % 32) + BEFORE_AT<T>;
    /* Returns the ring's stage of the round that begins `earlier` tokens before the current round. */
    const auto stage_of = [&](int earlier) {
        return (uint32_t)(begin - earlier) / STEP % ROWS_STAGES * BACKWARD_STAGE;
    };
    /* Copies the round that lies `rounds` rounds before the current round in time. */
    const auto copy = [&](int rounds) {
        const int earlier = rounds * STEP;
        const uint32_t to = slot + stage_of(earlier);
        if (begin >= earlier && begin - earlier + STEP <= me.tokens) {
            cp_async<16>(to, x - earlier);
            cp_async<16>(to + BACKWARD_STAGE / 2, dy - earlier);
        } else {
            const int t = begin - earlier + lane_id() * N;
            /* the last lane also copies one unit of x before the segment */
            const int of_x = t >= (me.is_first() || me.tokens == 0 ? 0 : -N) ? Segment<T>::bytes(me.tokens - t) : 0,
                      of_dy = t >= 0 ? of_x : 0;
            cp_async<16>(to, x - (of_x ? earlier : 0), of_x);
            cp_async<16>(to + BACKWARD_STAGE / 2, dy - (of_dy ? earlier : 0), of_dy);
        }
        cp_async_commit();
    };
    if (at.exists(in)) {
        GT_UNROLL
        for (int i = 0; i < ROWS_STAGES - 1; i++) copy(i);
    }
    Filter<W, 1> filter;
    filter.load(in, at.d, at.exists(in));
    /* Lane i < J computes the q of token i after the segment (see backward.cuh).  In every round the last lane needs
     * the first J q of the round that follows in time.  For the round that is taken first, these q are computed
     * here. */
    float window[W][1] = {}, dy_after = 0.0f;
    const int64_t token_after = at.offset + me.tokens + lane_id();
    if (at.exists(in) && lane_id() < J && me.tokens > 0 && token_after < in.T) {
        const int from_here = me.tokens + lane_id() - begin - lane_id() * N;
        GT_UNROLL
        for (int k = 0; k < W; k++) window[k][0] = Element<T>::load(x, from_here - J + k);
        dy_after = Element<T>::load(dy, from_here);
    }
    const int64_t used = PACKED ? used_tokens(in.sequences) : in.T;
    me.set_end(p.rows, at, used);
    Borders borders = {};
    if constexpr (PACKED) {
        borders = block_borders<T>(in, p.rows, used, at.segment, ROWS_STAGES * BACKWARD_STAGE);
        if (!at.exists(in)) return;
        /* bit HALO says whether the lane's token begins a sequence */
        const uint32_t near = borders.near(me.tokens - at.lead, N) >> lane_id();
        if (lane_id() < J && (near & near_bits(1 - J, 1)) != 0) {
            if (in.state_in && token_after < used) {
                load_window_of<T, false>(window, in, static_cast<const T*>(in.x) + at.d * in.x_stride.h, at.d,
                                         token_after);
            } else {
                GT_UNROLL
                for (int k = 0; k < J; k++)
                    if (near & near_bits(k + 1 - J, 1)) window[k][0] = 0.0f;
            }
        }
    }
    float q[N + J]; /* q of the unit's tokens and of the J tokens after it */
    float after = 0.0f;
    if (lane_id() < J && me.tokens > 0 && token_after < used)
        after = gradient_of_sum<T>(in.has_silu, filter.sum(window, 0), dy_after);
    GT_UNROLL
    for (int i = 0; i < J; i++) q[i] = shfl_idx(after, i);
    Sums<W, 1> sums = {};
    /* Processes one round.  If a kind does not need a test, the test is a compile-time constant.  So most rounds run
     * only a few instructions besides the sums. */
    const auto take = [&](auto kind, const Unit<T>& loaded, const Unit<T>& loaded_dy, const Before<T>& earlier,
                          uint32_t near) {
        constexpr Round KIND = decltype(kind)::value;
        constexpr bool HAS_BORDERS = PACKED && KIND != Round::PLAIN;
        /* without made_here the compiler computes t earlier and keeps it in a register */
        const int t = KIND == Round::ANY ? made_here(begin + lane_id() * N) : 0;
        Unit<T> own = loaded, own_dy = loaded_dy;
        Before<T> before_own = earlier;
        if constexpr (KIND == Round::ANY) { /* loads again, because registers are scarce */
            own = lds<Unit<T>>(slot + stage_of(0));
            own_dy = lds<Unit<T>>(slot + stage_of(0) + BACKWARD_STAGE / 2);
            before_own = lds<Before<T>>(before + stage_of(lane_id() == 0 ? STEP : 0));
        }
        uint32_t inside = ALL; /* bit n: token t + n is in the row and in a sequence */
        if constexpr (KIND == Round::ANY) {
            if (t < me.start) inside = ALL & ALL << (me.start - t);
            if (t + N > me.end) inside &= t < me.end ? ALL >> (t + N - me.end) : 0;
        }
        const uint32_t early = PACKED && KIND == Round::ANY && in.state_in ? early_tokens<J>(near) & inside : 0;
        if (inside != ALL) keep_elements<T>(own, inside);
        if ((inside & ~early) != ALL) keep_elements<T>(own_dy, inside & ~early);
        /* carried: q of the first J tokens of the previous round, which is later in time */
        float carried[J], e[N + J], out[N];
        GT_UNROLL
        for (int i = 0; i < J; i++) carried[i] = q[i];
        GT_UNROLL
        for (int i = 0; i < J; i++) e[i] = before_own.get(BEFORE - J + i);
        GT_UNROLL
        for (int n = 0; n < N; n++) e[n + J] = own.get(n);
        if constexpr (KIND == Round::ANY) {
            begin_row<T, !PACKED, false>(e, in, at.b * in.D + at.d, me, t);
            GT_UNROLL
            for (int i = 0; i < J; i++) q[i] = 0.0f; /* stays 0 in a unit beyond the row's end */
        }
        if (inside) backward_unit<T>(q, sums, in, filter, e, own_dy, HAS_BORDERS ? near : 0);
        if (PACKED && KIND == Round::ANY && early) {
            GT_NO_UNROLL
            for (int n = 0; n < N; n++) {
                if (!(early >> n & 1)) continue;
                float window[W][1];
                const T* row = static_cast<const T*>(in.x) + at.d * in.x_stride.h;
                load_window_of<T, false>(window, in, row, at.d, at.offset + t + n);
                const float of_token = gradient_of_sum<T>(in.has_silu, filter.sum(window, 0), Element<T>::load(dy, n));
                GT_UNROLL
                for (int k = 0; k < W; k++) sums.tap[k][0] = fma_rn(window[k][0], of_token, sums.tap[k][0]);
                sums.tap[W][0] += of_token;
                GT_UNROLL
                for (int i = 0; i < N; i++) q[i] = i == n ? of_token : q[i];
            }
        }
        GT_UNROLL
        for (int i = 0; i < J; i++) q[N + i] = shfl_idx(lane_id() == 0 ? carried[i] : q[i], (lane_id() + 1) % 32);
        if (!p.b.dx || (KIND == Round::ANY && t >= me.tokens)) return;
        gradients_of_unit<N>(out, filter, q, HAS_BORDERS ? near : 0);
        if (!PACKED && KIND == Round::ANY && p.b.dstate_out && t + N + J > me.end) {
            /* gradients of the row's last J inputs */
            const float* gradient = p.b.dstate_out + (at.b * in.D + at.d) * J;
            GT_UNROLL
            for (int i = 0; i < N; i++) {
                const int j = t + i - (me.end - J);
                if (j >= 0 && j < J) out[i] += gradient[j];
            }
        }
        if (PACKED && KIND == Round::ANY && p.b.dstate_out && near) {
            const uint32_t late = late_tokens<J>(near) & inside;
            GT_NO_UNROLL
            for (int n = 0; n < N; n++) {
                if (!(late >> n & 1)) continue;
                const int64_t token = at.offset + t + n, s = sequence_of(in.sequences, token, 0);
                const float gradient = state_gradient(p.b, s, token, in.sequences.cu_seqlens[s + 1], at.d);
                GT_UNROLL
                for (int i = 0; i < N; i++) out[i] = i == n ? out[i] + gradient : out[i];
            }
        }
        if constexpr (KIND == Round::ANY) {
            if (PACKED && inside != ALL) {
                GT_UNROLL
                for (int n = 0; n < N; n++) out[n] = inside >> n & 1 ? out[n] : 0.0f;
            }
            store_unit(dx - t, me, t, out);
        } else {
            Unit<T> packed;
            packed.set(out);
            stg(dx, packed);
        }
    };
    /* Rounds that end at or before `end_whole` hold only tokens of sequences, except perhaps the row's first round. */
    const bool has_states = in.state_in || p.b.dstate_out;
    const int end_whole = !PACKED && p.b.dstate_out ? me.end - J : me.end;
    GT_NO_UNROLL
    for (; begin >= 0; begin -= STEP, x -= STEP, dy -= STEP, dx -= STEP) {
        cp_async_wait<ROWS_STAGES - 3>(); /* the current and the next round have arrived */
        sync_warp();                      /* all lanes' copies have arrived, and no lane still reads the stage before */
        copy(ROWS_STAGES - 1);
        const uint32_t stage = stage_of(0), next = stage_of(STEP); /* next: the round earlier in time */
        const Unit<T> own = lds<Unit<T>>(slot + stage);
        const Unit<T> own_dy = lds<Unit<T>>(slot + stage + BACKWARD_STAGE / 2);
        const Before<T> earlier = lds<Before<T>>(before + (lane_id() == 0 ? next : stage));
        const uint32_t near = PACKED ? borders.near(begin + lane_id() * N - at.lead, N) : 0;
        const bool has_borders = PACKED && warp_any(near != 0);
        if (begin + STEP > end_whole || (begin == 0 && me.is_first()) || (has_borders && has_states))
            take(std::integral_constant<Round, Round::ANY>(), own, own_dy, earlier, near);
        else if (has_borders)
            take(std::integral_constant<Round, Round::BORDERED>(), own, own_dy, earlier, near);
        else
            take(std::integral_constant<Round, Round::PLAIN>(), own, own_dy, earlier, 0);
    }
    cp_async_wait<0>();
    if (p.b.dweight || p.b.dbias) store_row_sums<T, W, PACKED>(p, number, sums);
}

} /* namespace conv1d */
} /* namespace gt */

#endif
