/* gt/scan/backward.cuh - selective_scan backward, any size.  The gradients of one token are at the top of gt_ssm.cuh.
 *
 * grid strands*G*ceil(D/G/CHANNELS), at most 64 blocks for each multiprocessor; block 128.  Channels, lanes and states
 * of a thread as in forward; all warps do the same.
 * A block takes the segments of its strand in turn.  It goes through a segment from its end, one chunk of CHECKPOINT
 * tokens at a time:
 *     forwards    h advances from the chunk's checkpoint through sub-chunks of SUB_CHUNK tokens.  The state before each
 *                 sub-chunk is parked in global memory, in a scratch of the block's own.
 *     backwards   the last sub-chunk comes first.  h advances through its tokens once more, and the state before every
 *                 token stays in shared memory.  Then G goes back through them.
 * SUB_CHUNK is 16 tokens at N <= 32, 8 at N <= 64, 4 at N <= 128, 2 at N <= 256.
 *
 * registers: h, A, G and two sums for dA, STATES values each; 168 at most at N <= 16, for three blocks a
 * multiprocessor, else 255, for two.
 * shared: u, Delta, its slope, DY and three sums [SUB_CHUNK][CHANNELS]; B, C; the states [SUB_CHUNK][STATES] of every
 * thread; the warps' shares of dB and dC: 56 KB at N = 16, 64 KB at most.
 * scratch: 512 STATES CHECKPOINT / SUB_CHUNK bytes a block, 16 KB at N <= 32, 128 KB at N = 128, 256 KB at N = 256.
 * The blocks that 132 multiprocessors run at once hold 6 MB at N = 16, but 35 MB at N = 128 and 69 MB at N = 256: with
 * large N it does not stay in L2.
 * arithmetic per token and state: about 75 instructions, three of them ex2.
 * bytes per token and channel, bf16: u and dt 4 each (read twice); dy (, z) 2 each, 4 with dz; du, ddt (, dz) 2 each;
 * B and C 6 N / CHANNELS (B is read twice); shares of dB and dC 8 N / CHANNELS, which group_sum reads; checkpoints
 * N / 32; scratch, written and read, 8 N / SUB_CHUNK.
 * dB and dC are summed over the channels of a warp by a butterfly, over warps in order, over tiles by group_sum.  dA,
 * dDskip and ddt_bias are summed over a thread's tokens in order, over strands by reduce_rows.  Every order is fixed:
 * deterministic. */
#ifndef GT_SCAN_BACKWARD_CUH
#define GT_SCAN_BACKWARD_CUH

#include "problem.cuh"

namespace gt {
namespace scan {

struct BackwardParams {
    Problem in;
    const float *checkpoints, *dstate_out;
    float* scratch;    /* parked states, [blocks,SUB_CHUNKS,STATES/4,128] float4 */
    float* dstate_in;  /* NULL if not wanted, or shared */
    float* dstate_sum; /* [strands,D,N]: of all sequences of a strand; or NULL */
    void *du, *ddt, *dz;
    gt_stride du_stride, ddt_stride, dz_stride;
    float *dB, *dC;       /* [B,T,G,tiles,N] or NULL */
    float* dA;            /* [strands,D,N] or NULL */
    float *dskip, *dbias; /* [strands,128/CHANNELS,D] or NULL */
};

/* What a thread sums over all segments of its strand.
 * dA: of its own state elements, channel s.channel of the tile.
 * dskip, dbias: of the channel of its elements in a ChannelTile, thread_id() % CHANNELS.  LANES threads have that
 * channel, each with other tokens. */
template <int STATES>
struct ParameterSums {
    float dA[STATES] = {};
    TwoTermSum dskip, dbias;
};

/* Store and load STATES values of every thread, as float4. */
template <int STATES>
GT_DEV void park(float4* to, const float (&h)[STATES]) {
    GT_UNROLL
    for (int i = 0; i < STATES; i += 4)
        stg<float4>(to + i / 4 * THREADS + thread_id(), float4{h[i], h[i + 1], h[i + 2], h[i + 3]});
}

template <int STATES>
GT_DEV void unpark(const float4* from, float (&h)[STATES]) {
    GT_UNROLL
    for (int i = 0; i < STATES; i += 4) {
        const float4 v = ldg<float4>(from + i / 4 * THREADS + thread_id());
        h[i] = v.x, h[i + 1] = v.y, h[i + 2] = v.z, h[i + 3] = v.w;
    }
}

/* Where shared memory has the thread's state elements 4 i .. 4 i + 3 before token t of the sub-chunk. */
template <class C>
GT_DEV uint32_t state_address(const Coordinates<C>& s, int t, int i) {
    return s.address(C::STATE + ((t * C::STATES / 4 + i) * THREADS + thread_id()) * 4);
}

/* Stages u, Delta and B of a sub-chunk; if BACKWARD also Delta's slope, C, and DY, the gradient of y before the gate:
 * dy silu(z), or dy without z.  The loads of channels are in flight while B and C are staged. */
template <bool BACKWARD, class C>
GT_DEV void stage_sub_chunk(const Problem& in, const Coordinates<C>& s, int64_t first, int tokens) {
    using ChannelTile = Tile<C::SUB_CHUNK, C::CHANNELS, THREADS>;
    ChannelTile u, dt, dy, z;
    u.load(channel_rows(in, s, in.u, in.u_stride, first, tokens));
    dt.load(dt_rows(in, s, first, tokens));
    if constexpr (BACKWARD) {
        dy.load(channel_rows(in, s, in.dy, in.dy_stride, first, tokens));
        if (in.z) z.load(channel_rows(in, s, in.z, in.z_stride, first, tokens));
        stage<C::SUB_CHUNK, C::WIDTH, THREADS>(s.address(C::CM), group_rows(in, s, in.Cm, in.Cm_stride, first, tokens));
    }
    stage<C::SUB_CHUNK, C::WIDTH, THREADS>(s.address(C::BM), group_rows(in, s, in.Bm, in.Bm_stride, first, tokens));
    u.store(s.address(C::U));
    store_delta<BACKWARD>(in, s, dt, tokens, C::DELTA, C::SLOPE);
    if constexpr (BACKWARD) {
        GT_UNROLL
        for (int k = 0; k < ChannelTile::COUNT; k++) {
            const float dout = dy.value(k);
            if (ChannelTile::index(k) < ChannelTile::SIZE)
                sts<float>(s.address(C::DY + ChannelTile::index(k)), in.z ? dout * silu(z.value(k)) : dout);
        }
    }
}

/* Advances h through the staged sub-chunk.  KEEP: the state before every token goes to shared memory. */
template <class C, bool KEEP>
GT_DEV void advance_sub_chunk(const Coordinates<C>& s, const float (&A)[C::STATES], float (&h)[C::STATES]) {
    for (int t = 0; t < C::SUB_CHUNK; t++) {
        if constexpr (KEEP) {
            GT_UNROLL
            for (int i = 0; i < C::STATES; i += 4)
                sts<float4>(state_address(s, t, i / 4), float4{h[i], h[i + 1], h[i + 2], h[i + 3]});
        }
        const int index = t * C::CHANNELS + s.channel;
        float B[C::STATES];
        load_vector(B, s.address(C::BM + t * C::WIDTH + s.lane * C::STATES));
        advance(h, A, B, s.value(C::DELTA + index), s.value(C::U + index));
    }
}

/* One token backwards.  G on entry: the gradient of the state after the token; on return: of the state before it.
 * Leaves the token's three sums over n in SUMS and the warp's shares of dB and dC in SHARES.  Adds to dA.
 * In the words of gt_ssm.cuh: kept = exp(a) h_{t-1}, g = G + dy C, da = g kept.
 * GROWS_FAR: some state of the warp may grow by more than exp(FAR_GROWTH) in the token. */
template <class C, bool GROWS_FAR>
GT_DEV void token_backward(const Coordinates<C>& s, const float (&A)[C::STATES], int t, float (&G)[C::STATES],
                           float (&dA)[C::STATES]) {
    constexpr int STATES = C::STATES, HELD = C::WIDTH / 16; /* sums over the warp's channels, of a lane */
    const int index = t * C::CHANNELS + s.channel, vector = t * C::WIDTH + s.lane * STATES;
    const float delta = s.value(C::DELTA + index), dy = s.value(C::DY + index);
    const float w = delta * s.value(C::U + index);
    float shares[2 * STATES];                 /* of dB, then of dC */
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f}; /* <g,B>, <A,da>, <h,C>; the fourth makes it a power of 2 */
    GT_UNROLL
    for (int i = 0; i < STATES; i += 4) {
        float B[4], Cm[4], before[4];
        load_vector(B, s.address(C::BM + vector + i));
        load_vector(Cm, s.address(C::CM + vector + i));
        load_vector(before, state_address(s, t, i / 4));
        GT_UNROLL
        for (int e = 0; e < 4; e++) {
            const float a = delta * A[i + e];
            const Carrier token(GROWS_FAR && a >= FAR_GROWTH ? 0.0f : a);
            const auto carry = [&](float x) {
                if (GROWS_FAR && a >= FAR_GROWTH) return grow(a, x);
                return rescale(token.keep, token.factor, x, 0.0f);
            };
            const float kept = carry(before[e]);
            const float h = fma_rn(w, B[e], kept), g = fma_rn(dy, Cm[e], G[i + e]), da = g * kept;
            sums[0] = fma_rn(g, B[e], sums[0]);
            sums[1] = fma_rn(A[i + e], da, sums[1]);
            sums[2] = fma_rn(h, Cm[e], sums[2]);
            dA[i + e] = fma_rn(delta, da, dA[i + e]);
            shares[i + e] = w * g;
            shares[STATES + i + e] = dy * h;
            G[i + e] = carry(g);
        }
    }
    reduce_scatter<4, C::LANES, 1>(sums, s.lane);
    const int which = s.lane / (C::LANES / 4);
    if (which < 3 && s.lane % (C::LANES / 4) == 0) sts<float>(s.address(C::SUMS + which * C::VALUES + index), sums[0]);
    const int warp_channel = lane_id() / C::LANES; /* index of the channel among those of the warp */
    reduce_scatter<2 * STATES, 32 / C::LANES, C::LANES>(shares, warp_channel);
    GT_UNROLL
    for (int i = 0; i < HELD; i++) {
        const int value = warp_channel * HELD + i; /* index among the 2 STATES shares */
        const int n = s.lane * STATES + value % STATES;
        const int to = (warp_id() * C::SUB_CHUNK + t) * 2 * C::WIDTH + value / STATES * C::WIDTH + n;
        sts<float>(s.address(C::SHARES + to), shares[i]);
    }
}

/* du, ddt and dz of a sub-chunk, from SUMS.  Adds to dskip and dbias. */
template <class C>
GT_DEV void finish_channels(const BackwardParams& p, const Coordinates<C>& s, int64_t first, int tokens,
                            ParameterSums<C::STATES>& sums) {
    using ChannelTile = Tile<C::SUB_CHUNK, C::CHANNELS, THREADS>;
    const Problem& in = p.in;
    ChannelTile z, dout;
    if (p.dz) {
        z.load(channel_rows(in, s, in.z, in.z_stride, first, tokens));
        dout.load(channel_rows(in, s, in.dy, in.dy_stride, first, tokens));
    }
    float dskip = 0.0f, dbias = 0.0f;
    GT_UNROLL
    for (int k = 0; k < ChannelTile::COUNT; k++) {
        const int t = ChannelTile::row(k), c = ChannelTile::column(k), i = ChannelTile::index(k);
        if (t >= tokens || c >= s.channels) continue;
        const int64_t d = s.d0 + c;
        const float skip = in.Dskip ? in.Dskip[d] : 0.0f;
        const float u = s.value(C::U + i), dy = s.value(C::DY + i), delta = s.value(C::DELTA + i);
        const float gB = s.value(C::SUMS + i), slope = s.value(C::SLOPE + i);
        /* the slope first: the sum without it may overflow */
        float ddt = fma_rn(slope, s.value(C::SUMS + C::VALUES + i), slope * u * gB);
        if (slope == 0.0f) ddt = 0.0f;
        dskip = fma_rn(dy, u, dskip);
        dbias += ddt;
        if (p.du) store_as(p.du, in.dtype, offset_of(p.du_stride, s.b, first + t, d), fma_rn(delta, gB, skip * dy));
        if (p.ddt) store_as(p.ddt, in.dt_dtype, offset_of(p.ddt_stride, s.b, first + t, d), ddt);
        if (p.dz)
            store_as(p.dz, in.dtype, offset_of(p.dz_stride, s.b, first + t, d),
                     dout.value(k) * fma_rn(skip, u, s.value(C::SUMS + 2 * C::VALUES + i)) * dsilu(z.value(k)));
    }
    sums.dskip.add(dskip);
    sums.dbias.add(dbias);
}

/* The block's shares of dB and dC for a sub-chunk: sums of SHARES over the warps. */
template <class C>
GT_DEV void finish_group(const BackwardParams& p, const Coordinates<C>& s, int64_t first, int tokens) {
    const Problem& in = p.in;
    for (int i = thread_id(); i < tokens * 2 * C::WIDTH; i += THREADS) {
        const int t = i / (2 * C::WIDTH), n = i % C::WIDTH;
        float* out = i % (2 * C::WIDTH) < C::WIDTH ? p.dB : p.dC;
        if (!out || n >= in.N) continue;
        float sum = 0.0f;
        for (int w = 0; w < 4; w++) sum += s.value(C::SHARES + w * C::SUB_CHUNK * 2 * C::WIDTH + i);
        out[(((s.b * in.sequences.T + first + t) * in.G + s.g) * in.tiles + s.tile) * in.N + n] = sum;
    }
}

/* The thread's sums go to rows of partial sums, for reduce_rows. */
template <class C>
GT_DEV void store_parameters(const BackwardParams& p, const Coordinates<C>& s, const ParameterSums<C::STATES>& sums) {
    const Problem& in = p.in;
    if (p.dA) store_state(in, s, p.dA + strand_of(in) * in.D * in.N, sums.dA);
    const int c = thread_id() % C::CHANNELS, row = thread_id() / C::CHANNELS;
    if (c >= s.channels) return;
    const int64_t to = (strand_of(in) * C::LANES + row) * in.D + s.d0 + c;
    if (p.dskip) p.dskip[to] = sums.dskip.value();
    if (p.dbias) p.dbias[to] = sums.dbias.value();
}

/* One segment.  G on entry: the gradient of the state after it; on return: of the state before it.
 * The last sub-chunk may be short.  Its tokens that do not exist are computed, too: their Delta, DY, B and C are 0, so
 * that they leave h and G as they are and add 0 to sums. */
template <class C>
GT_DEV void backward_segment(const BackwardParams& p, const Coordinates<C>& s, const Span& span,
                             const float (&A)[C::STATES], float (&G)[C::STATES], ParameterSums<C::STATES>& sums) {
    constexpr int STATES = C::STATES, PARKED = STATES / 4 * THREADS; /* float4 of a block's state */
    const Problem& in = p.in;
    const int64_t DN = in.D * in.N, slots = chunk_slots(in.sequences, CHECKPOINT);
    float4* parked = reinterpret_cast<float4*>(p.scratch) + (int64_t)block_x() * C::SUB_CHUNKS * PARKED;
    float h[STATES];
    for (int64_t chunk = (span.end - span.first + CHECKPOINT - 1) / CHECKPOINT - 1; chunk >= 0; chunk--) {
        const int64_t start = span.first + chunk * CHECKPOINT;
        const int64_t left = s.end - start < CHECKPOINT ? s.end - start : CHECKPOINT;
        const int sub_chunks = (int)((left + C::SUB_CHUNK - 1) / C::SUB_CHUNK);
        float dA[STATES] = {}; /* of the chunk: short sums round less */
        load_state(in, s, p.checkpoints + (s.b * slots + span.chunk_slot + chunk) * DN, h);
        for (int sub_chunk = 0; sub_chunk < sub_chunks; sub_chunk++) { /* forwards: h before each sub-chunk */
            park(parked + sub_chunk * PARKED, h);
            if (sub_chunk + 1 == sub_chunks) break;
            stage_sub_chunk<false>(in, s, start + sub_chunk * C::SUB_CHUNK, C::SUB_CHUNK);
            sync_threads();
            advance_sub_chunk<C, false>(s, A, h);
            sync_threads();
        }
        for (int sub_chunk = sub_chunks - 1; sub_chunk >= 0; sub_chunk--) { /* backwards: G after each sub-chunk */
            const int64_t first = start + sub_chunk * C::SUB_CHUNK;
            const int tokens = (int)(s.end - first < C::SUB_CHUNK ? s.end - first : C::SUB_CHUNK);
            stage_sub_chunk<true>(in, s, first, tokens);
            unpark(parked + sub_chunk * PARKED, h);
            sync_threads();
            advance_sub_chunk<C, true>(s, A, h);
            for (int t = C::SUB_CHUNK - 1; t >= 0; t--) {
                bool grows_far = false;
                GT_UNROLL
                for (int i = 0; i < C::STATES; i++)
                    grows_far |= s.value(C::DELTA + t * C::CHANNELS + s.channel) * A[i] >= FAR_GROWTH;
                if (warp_any(grows_far)) {
                    token_backward<C, true>(s, A, t, G, dA);
                } else {
                    token_backward<C, false>(s, A, t, G, dA);
                }
            }
            sync_threads();
            finish_channels(p, s, first, tokens, sums);
            finish_group(p, s, first, tokens);
            sync_threads();
        }
        GT_UNROLL
        for (int i = 0; i < STATES; i++) sums.dA[i] += dA[i];
    }
}

/* Adds G, the gradient of a sequence's first state, to the strand's sum. */
template <class C>
GT_DEV void add_dstate(const BackwardParams& p, const Coordinates<C>& s, const float (&G)[C::STATES]) {
    float* sums = p.dstate_sum + strand_of(p.in) * p.in.D * p.in.N;
    float sum[C::STATES];
    load_state(p.in, s, sums, sum);
    GT_UNROLL
    for (int i = 0; i < C::STATES; i++) sum[i] += G[i];
    store_state(p.in, s, sums, sum);
}

template <int LANES, int STATES>
GT_KERNEL(128, LANES == 4 ? 3 : 2)
backward_kernel(const GT_GRID_CONSTANT BackwardParams p) {
    const Problem& in = p.in;
    Coordinates<Traits<LANES, STATES>> s(in);
    float A[STATES], G[STATES];
    ParameterSums<STATES> sums;
    load_state(in, s, in.A, A);
    load_state(in, s, nullptr, G); /* zeros, which the strand's sum starts from */
    if (p.dstate_sum) store_state(in, s, p.dstate_sum + strand_of(in) * in.D * in.N, G);
    for (int64_t item = strand_of(in); item < items_of(in); item += strands_of(in)) {
        const Span span = span_at(in.sequences, in.segments, CHECKPOINT, item);
        if (!span.exists) continue;
        s.enter(span);
        load_state(in, s, first_state(in.segments, span, in.D * in.N, p.dstate_out, span.sequence), G);
        backward_segment(p, s, span, A, G, sums);
        if (!span.starts) continue;
        if (p.dstate_in) store_state(in, s, p.dstate_in + span.sequence * in.D * in.N, G);
        if (p.dstate_sum) add_dstate(p, s, G);
    }
    store_parameters(p, s, sums);
}

/* ---- backward: what a segment makes of a zero gradient ----------------------------------------------------
 * The local pass: of every segment but a sequence's first, before the scan over segments.  From a segment's last token
 * to its first,
 *     G <- exp(Delta A) (G + DY C)
 * grid, block and shared memory as backward.
 * registers: A and G, STATES values each.
 * bytes per token and channel, bf16: u, dt, dy (, z) 2 each, B and C 4 N / CHANNELS; u and B are staged, not used.
 * A thread takes the tokens of its states one after another: deterministic. */
template <int LANES, int STATES>
GT_KERNEL(128, 2)
reverse_states_kernel(const GT_GRID_CONSTANT BackwardParams p) {
    using C = Traits<LANES, STATES>;
    const Problem& in = p.in;
    Coordinates<C> s(in);
    float A[STATES];
    load_state(in, s, in.A, A);
    for (int64_t item = strand_of(in); item < items_of(in); item += strands_of(in)) {
        const Span span = span_at(in.sequences, in.segments, CHECKPOINT, item);
        if (!span.exists || span.starts) continue; /* nothing comes before the first */
        s.enter(span);
        float G[STATES];
        TwoTermSum delta_sum;
        load_state(in, s, nullptr, G);
        for (int64_t sub_chunk = (span.end - span.first - 1) / C::SUB_CHUNK; sub_chunk >= 0; sub_chunk--) {
            const int64_t first = span.first + sub_chunk * C::SUB_CHUNK;
            const int tokens = (int)(s.end - first < C::SUB_CHUNK ? s.end - first : C::SUB_CHUNK);
            stage_sub_chunk<true>(in, s, first, tokens);
            sync_threads();
            add_deltas(s, C::DELTA, tokens, delta_sum);
            for (int t = tokens - 1; t >= 0; t--) {
                const int index = t * C::CHANNELS + s.channel;
                const float delta = s.value(C::DELTA + index), dy = s.value(C::DY + index);
                float Cm[STATES];
                load_vector(Cm, s.address(C::CM + t * C::WIDTH + s.lane * STATES));
                GT_UNROLL
                for (int i = 0; i < STATES; i++) G[i] = Carrier(delta * A[i]).carry(fma_rn(dy, Cm[i], G[i]), 0.0f);
            }
            sync_threads();
        }
        store_segment(in, s, span, G, delta_sum);
    }
}

} /* namespace scan */
} /* namespace gt */

#endif
