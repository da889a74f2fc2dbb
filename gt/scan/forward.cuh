/* gt/scan/forward.cuh - selective_scan forward, any size: token by token,
 *     h <- exp(Delta A) h + Delta u B     y = (<h, C> + Dskip u) silu(z)
 *
 * grid strands*G*ceil(D/G/CHANNELS), block 4 warps, which all do the same work.  A block has CHANNELS channels of one
 * group: 128 if N <= 16.  It takes the segments of its strand in turn (Coordinates).  Each warp has its own channels.
 * It computes Delta and Delta u for TILE tokens at once, one channel per lane.  It also stores its y without waiting
 * for another warp.  All warps share B and C, which takes one barrier per tile.  The next tile's inputs are loaded into
 * registers before this tile's tokens run.
 * For the recurrence, LANES lanes have COLUMNS channels, and each lane has STATES elements of their states (Traits).
 * Each y is summed over a thread's states, then over the lanes.  The order is fixed, so results are deterministic.
 * registers per thread: 16 state values, 16 values of A and the inputs of the next tile; at most 255.  With fp32
 * tensors a tile has half as many tokens.  For N <= 16 the kernel for fp32 tensors is limited to 168 registers: with
 * 255 it takes a quarter longer, for an unknown reason.
 * shared memory: B and C, [2][TILE][WIDTH] each; for each warp Delta, Delta u and y, [TILE][WARP_CHANNELS] each.  In
 * all 28 KB at N = 16.
 * issue slots per token and state element, N = 16, on Path FAST: exponent and ex2 2, Delta u B 1, h 1, y 1, loads from
 * shared memory 0.25, sums over lanes 0.6, a channel's Delta, y and loads about 80 / 16.  In all about 11.  NEAR_ONE
 * adds 5 for 16-bit tensors, 7 for fp32.  One ex2 of a warp occupies the special function unit for 8 clocks, in which a
 * scheduler issues 8 instructions.
 * bytes per token and channel, bf16: u, dt, y (and z) 2 each; B and C together 4 N / CHANNELS; checkpoints for backward
 * N / 32.  The local pass over segments (gt/recurrence/segments.cuh) reads only u, dt and B. */
#ifndef GT_SCAN_FORWARD_CUH
#define GT_SCAN_FORWARD_CUH

#include "problem.cuh"

namespace gt {
namespace scan {

struct ForwardParams {
    Problem in;
    void* y; /* NULL: the call wants states only */
    gt_stride y_stride;
    const float* state_in;
    float *state_out, *checkpoints; /* checkpoints [B,chunk slots,D,N] */
    int state_in_shared;
    int is_local; /* the local pass over segments, which writes only segments.states and segments.decays */
};

/* Finishes y of the staged tokens: adds Dskip u to the sums at `sums` and applies the gate. */
template <class C>
GT_DEV void finish_y(const ForwardParams& p, const Coordinates<C>& s, const Channel& own, const Numbers<C, C::TILE>& u,
                     const ChannelTile<C, C::TILE>& z, int sums, int64_t first, int tokens) {
    using Block = ChannelTile<C, C::TILE>;
    float y[Block::COUNT];
    GT_UNROLL
    for (int k = 0; k < Block::COUNT; k++) {
        const float sum = Block::row(k) < tokens ? lds<float>(s.address(sums + Block::index(k))) : 0.0f;
        y[k] = fma_rn(own.skip, u[k], sum);
    }
    if (p.in.z) {
        float gate[Block::COUNT];
        z.values(gate);
        GT_UNROLL
        for (int k = 0; k < Block::COUNT; k++) y[k] *= C::EXACT ? silu(gate[k]) : silu_fast(gate[k]);
    }
    store_tile<Block>(channel_rows(p.in, s, p.y, p.y_stride, first, tokens), y);
}

/* Addresses of the thread's values in shared memory, for the first of a few tokens. */
struct TokenPlaces {
    uint32_t delta, input, y, B, Cm;
};

/* Runs COUNT tokens of the warp.  Each token's inputs are loaded while the previous token is computed, and the y of all
 * tokens are summed over the lanes together, so latencies overlap. */
template <class C, int PATH, bool HAS_Y, int COUNT>
GT_DEV void forward_tokens(float (&h)[C::COLUMNS][C::STATES], const float (&A)[C::COLUMNS][C::STATES],
                           const TokenPlaces& at, int lane) {
    constexpr int COLUMNS = C::COLUMNS, LANES = C::LANES, ROW = 4 * C::WARP_CHANNELS, VECTOR = 4 * C::WIDTH;
    constexpr int SUMS = COLUMNS * COUNT, HELD = SUMS > LANES ? SUMS / LANES : 1,
                  SAME = LANES > SUMS ? LANES / SUMS : 1;
    float y[SUMS]; /* [COLUMNS][COUNT]: of each channel and token */
    Token<C> token, next;
    token.load(at.delta, at.input, at.B);
    GT_UNROLL
    for (int t = 0; t < COUNT; t++) {
        float Cm[C::STATES];
        if (t + 1 < COUNT) next.load(at.delta + (t + 1) * ROW, at.input + (t + 1) * ROW, at.B + (t + 1) * VECTOR);
        if constexpr (HAS_Y) load_vector(Cm, at.Cm + t * VECTOR);
        token.template advance<PATH>(h, A);
        if (t + 1 < COUNT) token = next;
        if constexpr (HAS_Y) {
            GT_UNROLL
            for (int c = 0; c < COLUMNS; c++) {
                float sum = h[c][0] * Cm[0];
                GT_UNROLL
                for (int i = 1; i < C::STATES; i++) sum = fma_rn(h[c][i], Cm[i], sum);
                y[c * COUNT + t] = sum;
            }
        }
    }
    if constexpr (HAS_Y) {
        reduce_scatter<SUMS, LANES, 1>(y, lane);
        if (lane % SAME != 0) return;
        GT_UNROLL
        for (int i = 0; i < HELD; i++) {
            const int k = lane / SAME * HELD + i; /* index of the sum */
            sts<float>(at.y + k % COUNT * ROW + k / COUNT * 4, y[i]);
        }
    }
}

/* Runs one segment.  After the sequence's end Delta and Delta u are 0, so tokens there change nothing. */
template <class C>
GT_DEV void forward_segment(const ForwardParams& p, const Coordinates<C>& s, const Channel& own,
                            const float (&A)[C::COLUMNS][C::STATES], const Span& span) {
    constexpr int TILE = C::TILE, WIDTH = C::WIDTH;
    using Block = ChannelTile<C, TILE>;
    using Vectors = Tile<TILE, WIDTH, THREADS>;
    const Problem& in = p.in;
    const int64_t DN = in.D * in.N, slots = chunk_slots(in.sequences, CHECKPOINT);
    const int delta = C::F_WARP + warp_id() * C::F_WARP_SIZE, input = delta + C::F_VALUES, sums = input + C::F_VALUES;

    float h[C::COLUMNS][C::STATES];
    TwoTermSum deltas;
    const float* start = nullptr;
    if (!p.is_local)
        start = first_state(in.sequences, in.segments, span, DN, p.state_in, p.state_in_shared ? 0 : span.sequence);
    load_state(in, s, start, h);
    const auto tokens_from = [&](int64_t first) { return (int)(s.end - first < TILE ? s.end - first : TILE); };
    Block u, dt;
    Vectors B, Cm;
    const auto load = [&](int64_t first) {
        const int tokens = tokens_from(first);
        u = Block(), dt = Block(), B = Vectors(), Cm = Vectors();
        u.load(channel_rows(in, s, in.u, in.u_stride, first, tokens));
        dt.load(dt_rows(in, s, first, tokens));
        B.load(group_rows(in, s, in.Bm, in.Bm_stride, first, tokens));
        if (p.y) Cm.load(group_rows(in, s, in.Cm, in.Cm_stride, first, tokens));
    };
    if (span.first < s.end) load(span.first);
    int stage = 0;
    for (int64_t first = span.first; first < s.end; first += TILE, stage ^= 1) {
        const int tokens = tokens_from(first);
        if (p.checkpoints && (first - span.first) % CHECKPOINT == 0) {
            const int64_t slot = span.chunk_slot + (first - span.first) / CHECKPOINT;
            store_checkpoint(in, s, p.checkpoints + (s.b * slots + slot) * DN, h);
        }
        const uint32_t B_at = s.address(C::F_BM + stage * TILE * WIDTH),
                       C_at = s.address(C::F_CM + stage * TILE * WIDTH);
        B.store(B_at);
        if (p.y) Cm.store(C_at);
        float now[Block::COUNT], no_slope[Block::COUNT]; /* now: u of this tile */
        u.values(now);
        const Paths<TILE> paths = store_delta<false, C, TILE>(in, s, own, dt, now, tokens, delta, input, no_slope);
        Block z;
        sync_threads(); /* also guards the other stage: no thread writes it before all have read it */
        if (first + TILE < s.end) load(first + TILE);
        if (p.y && in.z) z.load(channel_rows(in, s, in.z, in.z_stride, first, tokens));
        if (p.is_local) add_deltas(s, delta, tokens, deltas);
        GT_NO_UNROLL
        for (int j = 0; j < Paths<TILE>::COUNT; j++) {
            with_path(j == 0 ? paths.path[0] : paths.path[Paths<TILE>::COUNT - 1], [&](auto path) {
                constexpr int PATH = decltype(path)::value;
                constexpr int COUNT = PATH == GROWS ? 1 : BATCH;
                const int last = tokens < (j + 1) * STEPS ? tokens : (j + 1) * STEPS;
                GT_NO_UNROLL
                for (int t = j * STEPS; t < last; t += COUNT) {
                    const int row = t * C::WARP_CHANNELS + s.first, n = 4 * (t * WIDTH + s.lane * C::STATES);
                    const TokenPlaces at = {s.address(delta + row), s.address(input + row), s.address(sums + row),
                                            B_at + n, C_at + n};
                    if (p.y)
                        forward_tokens<C, PATH, true, COUNT>(h, A, at, s.lane);
                    else
                        forward_tokens<C, PATH, false, COUNT>(h, A, at, s.lane);
                }
            });
        }
        sync_warp();
        if (p.y) finish_y(p, s, own, now, z, sums, first, tokens);
        sync_warp(); /* before the next tile's Delta overwrites this one */
    }
    if (p.is_local)
        store_segment(in, s, span, h, own, deltas);
    else if (p.state_out && span.ends)
        store_state(in, s, p.state_out + span.sequence * DN, h);
    sync_threads();
}

template <int LANES, int STATES, int COLUMNS, bool EXACT>
GT_KERNEL(THREADS, (Traits<LANES, STATES, COLUMNS, EXACT>::FORWARD_BLOCKS))
forward_kernel(const GT_GRID_CONSTANT ForwardParams p) {
    using C = Traits<LANES, STATES, COLUMNS, EXACT>;
    const Problem& in = p.in;
    Coordinates<C> s(in);
    float A[COLUMNS][STATES];
    const Channel own = enter_channels(in, s, C::F_WARP + warp_id() * C::F_WARP_SIZE + C::F_MOST, A);
    for (int64_t item = strand_of(in); item < items_of(in); item += strands_of(in)) {
        const Span span = span_at(in.sequences, in.segments, CHECKPOINT, item);
        if (!span.exists || (p.is_local && span.ends)) continue; /* no segment needs a last segment's end state */
        s.enter(span);
        forward_segment(p, s, own, A, span);
    }
}

} /* namespace scan */
} /* namespace gt */

#endif
