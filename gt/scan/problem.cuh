/* gt/scan/problem.cuh - what every kernel of selective_scan knows: sizes, the arguments, what a block and a thread
 * have. */
#ifndef GT_SCAN_PROBLEM_CUH
#define GT_SCAN_PROBLEM_CUH

#include "../recurrence/ssm.cuh"

namespace gt {
namespace scan {

using namespace ssm;

/* ---- sizes ------------------------------------------------------------------------------------------ */

constexpr int THREADS = 128;

/* LANES neighbouring lanes have a channel: lane l has its state elements l STATES ... l STATES + STATES - 1.  A block
 * has CHANNELS channels of one group.  What follows are sizes, and offsets in shared memory, in floats. */
template <int LANES_, int STATES_>
struct Traits {
    static constexpr int LANES = LANES_, STATES = STATES_;
    static constexpr int CHANNELS = THREADS / LANES, WIDTH = LANES * STATES;
    /* forward: tokens staged together */
    static constexpr int TILE = WIDTH <= 64 ? 32 : 16;
    static constexpr int F_U = 0;                         /* [TILE][CHANNELS] */
    static constexpr int F_DELTA = F_U + TILE * CHANNELS; /* likewise */
    static constexpr int F_Y = F_DELTA + TILE * CHANNELS; /* likewise */
    static constexpr int F_BM = F_Y + TILE * CHANNELS;    /* [TILE][WIDTH] */
    static constexpr int F_CM = F_BM + TILE * WIDTH;      /* likewise */
    static constexpr int FORWARD_END = F_CM + TILE * WIDTH;
    /* backward: tokens between parked states, staged together */
    static constexpr int SUB_CHUNK = WIDTH <= 32 ? 16 : 512 / WIDTH;
    static constexpr int SUB_CHUNKS = CHECKPOINT / SUB_CHUNK;
    static constexpr int VALUES = SUB_CHUNK * CHANNELS;
    static constexpr int U = 0, DELTA = U + VALUES, SLOPE = DELTA + VALUES, DY = SLOPE + VALUES;
    static constexpr int SUMS = DY + VALUES;             /* <g,B>, <A,da>, <h,C>: [3][SUB_CHUNK][CHANNELS] */
    static constexpr int BM = SUMS + 3 * VALUES;         /* [SUB_CHUNK][WIDTH] */
    static constexpr int CM = BM + SUB_CHUNK * WIDTH;    /* likewise */
    static constexpr int STATE = CM + SUB_CHUNK * WIDTH; /* [SUB_CHUNK][STATES/4][THREADS] float4 */
    static constexpr int SHARES = STATE + SUB_CHUNK * STATES * THREADS; /* [4 warps][SUB_CHUNK][2 WIDTH] */
    static constexpr int BACKWARD_END = SHARES + 4 * SUB_CHUNK * 2 * WIDTH;
    static_assert(STATES % 4 == 0 && F_BM % 4 == 0 && BM % 4 == 0, "16-byte pieces");
    static_assert(4 * FORWARD_END <= 64 * 1024, "fits every architecture");
    static_assert(4 * BACKWARD_END <= 64 * 1024, "fits every architecture");
};

/* One argument struct, prepared, as every kernel sees it. */
struct Problem {
    Sequences sequences;
    Segments segments; /* states [slot][D,N], decays [slot][D]: sums of Delta, for A to multiply */
    int64_t D, G;
    int N;
    gt_dtype dtype, dt_dtype;
    DeltaRule rule;
    const void *u, *dt, *Bm, *Cm, *z, *dy;
    const float *A, *Dskip, *dt_bias;
    gt_stride u_stride, dt_stride, z_stride, dy_stride;
    gt_stride4 Bm_stride, Cm_stride;
    int64_t tiles; /* of channels, in a group */
};

/* ---- device helpers ---------------------------------------------------------------------------------- */

/* What a block and a thread work on.  A block has one tile of channels and one strand, number block_x() / (G tiles): of
 * S strands the s-th takes segments s, s + S, ... of the sequences. */
template <class C>
struct Coordinates {
    uint32_t smem;
    int64_t b, g, tile, d0; /* d0: the block's first channel */
    int64_t end;            /* the segment at hand ends before this token of batch element b */
    int channels;           /* of the tile, that exist */
    int channel, lane;      /* the thread's channel in the tile; its lane among those of the channel */

    GT_METHOD explicit Coordinates(const Problem& in) {
        const int64_t per_group = in.D / in.G;
        smem = smem_base();
        tile = block_x() % in.tiles;
        g = block_x() / in.tiles % in.G;
        b = 0;
        end = 0;
        d0 = g * per_group + tile * C::CHANNELS;
        const int64_t left = per_group - tile * C::CHANNELS;
        channels = (int)(left < C::CHANNELS ? left : C::CHANNELS);
        channel = thread_id() / C::LANES;
        lane = thread_id() % C::LANES;
    }
    GT_METHOD void enter(const Span& span) {
        b = span.b;
        end = span.end;
    }
    GT_METHOD uint32_t address(int offset) const { return smem + 4 * offset; }
    GT_METHOD float value(int offset) const { return lds<float>(address(offset)); }
    GT_METHOD bool has_state(const Problem& in, int i) const {
        return channel < channels && lane * C::STATES + i < in.N;
    }
    /* index of the thread's state element i in [D,N] */
    GT_METHOD int64_t state_at(const Problem& in, int i) const { return (d0 + channel) * in.N + lane * C::STATES + i; }
};

/* An item is a segment of a sequence.  How many items there are; strands that share them; the block's strand. */
GT_DEV int64_t items_of(const Problem& in) { return sequence_count(in.sequences) * in.segments.count; }
GT_DEV int64_t strands_of(const Problem& in) { return grid_x() / (in.G * in.tiles); }
GT_DEV int64_t strand_of(const Problem& in) { return block_x() / (in.G * in.tiles); }

template <class C>
GT_DEV Rows channel_rows(const Problem& in, const Coordinates<C>& s, const void* data, gt_stride stride, int64_t first,
                         int tokens) {
    return {data, in.dtype, offset_of(stride, s.b, first, s.d0), stride.t, stride.h, tokens, s.channels};
}

template <class C>
GT_DEV Rows dt_rows(const Problem& in, const Coordinates<C>& s, int64_t first, int tokens) {
    Rows rows = channel_rows(in, s, in.dt, in.dt_stride, first, tokens);
    rows.dtype = in.dt_dtype;
    return rows;
}

template <class C>
GT_DEV Rows group_rows(const Problem& in, const Coordinates<C>& s, const void* data, const gt_stride4& stride,
                       int64_t first, int tokens) {
    return {data, in.dtype, offset_of(stride, s.b, first, s.g), stride.t, stride.n, tokens, in.N};
}

/* Stores Delta of loaded tokens (offset `value` in shared memory) and, if SLOPE, its derivative by dt (offset `slope`).
 * Both are 0 where there is no token or channel. */
template <bool SLOPE, class C, class ChannelTile>
GT_DEV void store_delta(const Problem& in, const Coordinates<C>& s, const ChannelTile& dt, int tokens, int value,
                        int slope) {
    GT_UNROLL
    for (int k = 0; k < ChannelTile::COUNT; k++) {
        const int i = ChannelTile::index(k);
        const bool inside = ChannelTile::row(k) < tokens && ChannelTile::column(k) < s.channels;
        Delta delta = {0.0f, 0.0f};
        if (inside) {
            const float bias = in.dt_bias ? in.dt_bias[s.d0 + ChannelTile::column(k)] : 0.0f;
            delta = delta_of(in.rule, dt.value(k) + bias);
        }
        if (i >= ChannelTile::SIZE) continue;
        sts<float>(s.address(value + i), delta.value);
        if constexpr (SLOPE) sts<float>(s.address(slope + i), delta.slope);
    }
}

/* The thread's elements of a state [D,N] or a row of A; outside is 0, and so is NULL. */
template <class C>
GT_DEV void load_state(const Problem& in, const Coordinates<C>& s, const float* from, float (&state)[C::STATES]) {
    GT_UNROLL
    for (int i = 0; i < C::STATES; i++) state[i] = from && s.has_state(in, i) ? from[s.state_at(in, i)] : 0.0f;
}

template <class C>
GT_DEV void store_state(const Problem& in, const Coordinates<C>& s, float* to, const float (&state)[C::STATES]) {
    GT_UNROLL
    for (int i = 0; i < C::STATES; i++)
        if (s.has_state(in, i)) to[s.state_at(in, i)] = state[i];
}

/* Stores the state that a segment makes of a zero state, and the sum of its Delta. */
template <class C>
GT_DEV void store_segment(const Problem& in, const Coordinates<C>& s, const Span& span, const float (&state)[C::STATES],
                          const TwoTermSum& delta) {
    store_state(in, s, in.segments.states + span.segment_slot * in.D * in.N, state);
    if (s.lane > 0 || s.channel >= s.channels) return;
    in.segments.decays[span.segment_slot * in.D + s.d0 + s.channel] = delta.value();
}

/* Adds the staged Delta of the thread's channel; offset: of Delta in shared memory. */
template <class C>
GT_DEV void add_deltas(const Coordinates<C>& s, int offset, int tokens, TwoTermSum& sum) {
    for (int t = 0; t < tokens; t++) sum.add(s.value(offset + t * C::CHANNELS + s.channel));
}

/* h <- exp(Delta A) h + Delta u B */
template <int STATES>
GT_DEV void advance(float (&h)[STATES], const float (&A)[STATES], const float (&B)[STATES], float delta, float u) {
    GT_UNROLL
    for (int i = 0; i < STATES; i++) {
        h[i] = Carrier(delta * A[i]).carry(h[i], delta * u * B[i]);
    }
}

} /* namespace scan */
} /* namespace gt */

#endif
