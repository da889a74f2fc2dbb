/* gt/scan/forward.cuh - selective_scan forward and step, any size: token by token,
 *     h <- exp(Delta A) h + Delta u B     y = (<h, C> + Dskip u) silu(z)
 *
 * grid strands*G*ceil(D/G/CHANNELS), block 128; all warps do the same.  A block has CHANNELS = 128 / LANES channels of
 * one group, 32 at N <= 16.  It takes the segments of its strand in turn.  LANES neighbouring lanes have a channel,
 * STATES elements of its state each.  Tokens are staged 32 at a time (16 for N > 64).
 * registers: STATES state values and as many of A a thread, fp32; 255 at most, for two blocks a multiprocessor.
 * shared: u, Delta, y [TILE][CHANNELS], B, C [TILE][WIDTH]: 16 KB at N = 16.
 * arithmetic per token and state: about 20 instructions, one of them ex2.
 * bytes per token and channel, bf16: u, dt (, z), y 2 each; B and C 4 N / CHANNELS; checkpoints, where backward wants
 * them, N / 32.  A local pass reads u, dt and B alone.
 * y is summed over a thread's states, then over the lanes of a channel, for 4 tokens at once, in fixed order:
 * deterministic. */
#ifndef GT_SCAN_FORWARD_CUH
#define GT_SCAN_FORWARD_CUH

#include "problem.cuh"

namespace gt {
namespace scan {

struct ForwardParams {
    Problem in;
    void* y; /* NULL: only states are wanted */
    gt_stride y_stride;
    const float* state_in;
    float *state_out, *checkpoints; /* checkpoints [B,chunk slots,D,N] */
    int state_in_shared, is_step;
    int is_local;         /* the local pass over segments: only segments.states and segments.decays are written */
    const int32_t* slots; /* step: the row of each batch element's state; NULL: its own */
    int64_t slot_capacity;
};

/* y of the staged tokens: adds Dskip u to the sums in Y and applies the gate.  skipped: the step's slot does not
 * exist. */
template <class C>
GT_DEV void finish_y(const ForwardParams& p, const Coordinates<C>& s, int64_t first, int tokens, bool skipped) {
    using ChannelTile = Tile<C::TILE, C::CHANNELS, THREADS>;
    const Problem& in = p.in;
    ChannelTile z;
    if (in.z) z.load(channel_rows(in, s, in.z, in.z_stride, first, tokens));
    GT_UNROLL
    for (int k = 0; k < ChannelTile::COUNT; k++) {
        const int t = ChannelTile::row(k), c = ChannelTile::column(k);
        if (t >= tokens || c >= s.channels) continue;
        const float skip = in.Dskip ? in.Dskip[s.d0 + c] : 0.0f;
        float y = fma_rn(skip, s.value(C::F_U + ChannelTile::index(k)), s.value(C::F_Y + ChannelTile::index(k)));
        if (in.z) y *= silu(z.value(k));
        store_as(p.y, in.dtype, offset_of(p.y_stride, s.b, first + t, s.d0 + c), skipped ? 0.0f : y);
    }
}

/* One segment. */
template <class C>
GT_DEV void forward_segment(const ForwardParams& p, const Coordinates<C>& s, const Span& span) {
    constexpr int LANES = C::LANES, STATES = C::STATES;
    const Problem& in = p.in;
    const int64_t DN = in.D * in.N, slots = chunk_slots(in.sequences, CHECKPOINT);
    const int64_t row = p.is_step && p.slots ? p.slots[s.b] : span.sequence; /* of the state */
    const bool skipped = p.is_step && (row < 0 || row >= p.slot_capacity);

    float h[STATES], A[STATES];
    TwoTermSum delta_sum;
    const float* start = nullptr;
    if (!p.is_local && !skipped) start = first_state(in.segments, span, DN, p.state_in, p.state_in_shared ? 0 : row);
    load_state(in, s, start, h);
    load_state(in, s, in.A, A);
    for (int64_t first = span.first; first < s.end; first += C::TILE) {
        if (p.checkpoints && (first - span.first) % CHECKPOINT == 0) {
            const int64_t slot = span.chunk_slot + (first - span.first) / CHECKPOINT;
            store_state(in, s, p.checkpoints + (s.b * slots + slot) * DN, h);
        }
        const int tokens = (int)(s.end - first < C::TILE ? s.end - first : C::TILE);
        Tile<C::TILE, C::CHANNELS, THREADS> u, dt; /* loads in flight while B and C are staged */
        u.load(channel_rows(in, s, in.u, in.u_stride, first, tokens));
        dt.load(dt_rows(in, s, first, tokens));
        stage<C::TILE, C::WIDTH, THREADS>(s.address(C::F_BM), group_rows(in, s, in.Bm, in.Bm_stride, first, tokens));
        if (p.y)
            stage<C::TILE, C::WIDTH, THREADS>(s.address(C::F_CM),
                                              group_rows(in, s, in.Cm, in.Cm_stride, first, tokens));
        u.store(s.address(C::F_U));
        store_delta<false>(in, s, dt, tokens, C::F_DELTA, 0);
        sync_threads();
        if (p.is_local) add_deltas(s, C::F_DELTA, tokens, delta_sum);
        for (int t0 = 0; t0 < tokens; t0 += 4) { /* beyond the sequence Delta = 0 changes nothing */
            float y[4];
            GT_UNROLL
            for (int j = 0; j < 4; j++) {
                const int index = (t0 + j) * C::CHANNELS + s.channel;
                const int vector = (t0 + j) * C::WIDTH + s.lane * STATES;
                float B[STATES], Cm[STATES];
                load_vector(B, s.address(C::F_BM + vector));
                advance(h, A, B, s.value(C::F_DELTA + index), s.value(C::F_U + index));
                y[j] = 0.0f;
                if (!p.y) continue;
                load_vector(Cm, s.address(C::F_CM + vector));
                GT_UNROLL
                for (int i = 0; i < STATES; i++) y[j] = fma_rn(h[i], Cm[i], y[j]);
            }
            if (!p.y) continue;
            reduce_scatter<4, LANES, 1>(y, s.lane);
            const int t = t0 + s.lane / (LANES / 4);
            if (s.lane % (LANES / 4) == 0) sts<float>(s.address(C::F_Y + t * C::CHANNELS + s.channel), y[0]);
        }
        sync_threads();
        if (p.y) finish_y(p, s, first, tokens, skipped);
        sync_threads();
    }
    if (p.is_local)
        store_segment(in, s, span, h, delta_sum);
    else if (p.state_out && span.ends && !skipped)
        store_state(in, s, p.state_out + row * DN, h);
}

template <int LANES, int STATES>
GT_KERNEL(128, 2)
forward_kernel(const GT_GRID_CONSTANT ForwardParams p) {
    const Problem& in = p.in;
    Coordinates<Traits<LANES, STATES>> s(in);
    for (int64_t item = strand_of(in); item < items_of(in); item += strands_of(in)) {
        const Span span = span_at(in.sequences, in.segments, CHECKPOINT, item);
        if (!span.exists || (p.is_local && span.ends)) continue; /* no segment needs what the last one leaves */
        s.enter(span);
        forward_segment(p, s, span);
    }
}

} /* namespace scan */
} /* namespace gt */

#endif
