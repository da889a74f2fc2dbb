/* gt/scan/backward.cuh - selective_scan backward, any size.  gt_ssm.cuh has the gradients of one token, at its top.
 *
 * grid strands*G*ceil(D/G/CHANNELS), at most 64 blocks for each multiprocessor; block 4 warps.  Channels, lanes and
 * states of a thread are as in forward; all warps do the same.
 * A block takes the segments of its strand in turn.  It goes through a segment from its end, one chunk of CHECKPOINT
 * tokens at a time:
 *     forwards    h advances from the chunk's checkpoint through sub-chunks of SUB_CHUNK tokens.  The state before each
 *                 sub-chunk is parked in the block's own scratch in global memory.
 *     backwards   The last sub-chunk comes first.  h advances through its tokens once more, and the state before every
 *                 second token stays in shared memory.  Then G goes back through them, two tokens at a time, because
 *                 the first token's gradients need the state between the two anyway.
 * SUB_CHUNK is 8 tokens, or 4 at N > 128.  A sub-chunk has two barriers, because the warps share B and C, and dB and dC
 * are sums over warps.
 *
 * registers: A, G and two sums for dA, 16 values each, the next sub-chunk and the sums of two tokens: 255, for two
 * blocks a multiprocessor.
 * shared: B, C; for each warp Delta, Delta u, DY, the slope of Delta, u and two sums [SUB_CHUNK][WARP_CHANNELS], and
 * states.  When the states are read, the warp's shares of dB and dC overwrite them.  61 KB at N = 16.
 * scratch: 8 KB CHECKPOINT / SUB_CHUNK a block: 128 KB.
 * issue slots per token and state, N = 16, if all states decay fast (Path): parking 5, and 1.5 for the channel; the
 * sub-chunk the same again; backwards 12, or 13 with dz; sums over lanes 1.5 for <g,B> and <A,da>, 1.75 for dB and dC;
 * the channel's loads, stores and Delta about 60 / 16.  Counted: 30.  Executed: 42, and 12 of them are the channel's.
 * bytes per token and channel, bf16: u and dt 4 each (read twice); dy (, z) 2 each, 4 with dz; du, ddt (, dz) 2 each; B
 * and C 6 N / CHANNELS (B is read twice); shares of dB and dC 8 N / CHANNELS, which group_sum reads; checkpoints N /
 * 32; scratch, written and read, 8 N / SUB_CHUNK, which stays in L2 if 256 blocks run at once.
 * dB and dC are summed over a thread's channels in order, over a warp's channels by a butterfly, over warps in order,
 * and over tiles by group_sum.  dA, dDskip and ddt_bias are summed over a thread's tokens in order, and over strands by
 * reduce_rows.  Every order is fixed: deterministic. */
#ifndef GT_SCAN_BACKWARD_CUH
#define GT_SCAN_BACKWARD_CUH

#include "problem.cuh"

namespace gt {
namespace scan {

struct BackwardParams {
    Problem in;
    const float *checkpoints, *dstate_out;
    float* scratch;    /* parked states, [blocks,SUB_CHUNKS,4,128] float4 */
    float* dstate_in;  /* NULL if not wanted or if shared */
    float* dstate_sum; /* [strands,D,N]: sum over all sequences of a strand, or NULL */
    void *du, *ddt, *dz;
    gt_stride du_stride, ddt_stride, dz_stride;
    float *dB, *dC;       /* [B,T,G,tiles,N] or NULL */
    float* dA;            /* [strands,D,N] or NULL */
    float *dskip, *dbias; /* [strands,ROWS,D] or NULL */
};

constexpr int PARKED = 4 * THREADS; /* float4 of a block's parked states */

/* A thread's sums over all segments of its strand.
 * dA: for its own state elements.
 * dskip, dbias: for the lane's channel.  ROWS lanes share the channel, each with other tokens. */
template <class C>
struct ParameterSums {
    float dA[C::COLUMNS][C::STATES] = {};
    TwoTermSum dskip, dbias;
};

/* Store and load the thread's 16 state values as float4. */
template <class C>
GT_DEV void park(float4* to, const float (&h)[C::COLUMNS][C::STATES]) {
    GT_UNROLL
    for (int c = 0; c < C::COLUMNS; c++) {
        GT_UNROLL
        for (int i = 0; i < C::STATES; i += 4)
            stg<float4>(to + (c * C::STATES + i) / 4 * THREADS + thread_id(),
                        float4{h[c][i], h[c][i + 1], h[c][i + 2], h[c][i + 3]});
    }
}

template <class C>
GT_DEV void unpark(const float4* from, float (&h)[C::COLUMNS][C::STATES]) {
    GT_UNROLL
    for (int c = 0; c < C::COLUMNS; c++) {
        GT_UNROLL
        for (int i = 0; i < C::STATES; i += 4) {
            const float4 v = ldg<float4>(from + (c * C::STATES + i) / 4 * THREADS + thread_id());
            h[c][i] = v.x, h[c][i + 1] = v.y, h[c][i + 2] = v.z, h[c][i + 3] = v.w;
        }
    }
}

/* Shared address of array number `array` of the warp. */
template <class C>
GT_DEV int warp_place() {
    return C::WARP + warp_id() * C::WARP_SIZE;
}

/* Address of the thread's state elements i .. i + 3 of channel c, before tokens 2 pair and 2 pair + 1. */
template <class C>
GT_DEV uint32_t state_address(const Coordinates<C>& s, int pair, int c, int i) {
    return s.address(warp_place<C>() + C::STATE + pair * C::PAIR + ((c * C::STATES + i) / 4 * 32 + lane_id()) * 4);
}

/* The inputs of a sub-chunk, loaded into registers before they are needed: u, dt and B, or with BACKWARD all inputs. */
template <bool BACKWARD, class C>
struct SubChunk {
    using Block = ChannelTile<C, C::SUB_CHUNK>;
    Block u, dt, dy, z;
    Tile<C::SUB_CHUNK, C::WIDTH, THREADS> B, Cm;

    GT_METHOD void load(const Problem& in, const Coordinates<C>& s, int64_t first, int tokens) {
        *this = SubChunk();
        u.load(channel_rows(in, s, in.u, in.u_stride, first, tokens));
        dt.load(dt_rows(in, s, first, tokens));
        B.load(group_rows(in, s, in.Bm, in.Bm_stride, first, tokens));
        if (!BACKWARD) return;
        dy.load(channel_rows(in, s, in.dy, in.dy_stride, first, tokens));
        if (in.z) z.load(channel_rows(in, s, in.z, in.z_stride, first, tokens));
        Cm.load(group_rows(in, s, in.Cm, in.Cm_stride, first, tokens));
    }

    /* Stores the sub-chunk in shared memory: Delta, Delta u and B.  BACKWARD also stores u, Delta's slope, C, and DY,
     * the gradient of y before the gate: dy silu(z), or dy without z.  Returns the path of the sub-chunk's tokens. */
    GT_METHOD int store(const Problem& in, const Coordinates<C>& s, const Channel& own, int tokens) const {
        constexpr int COUNT = Block::COUNT;
        const int place = warp_place<C>();
        float x[COUNT], slope[COUNT];
        B.store(s.address(C::BM));
        u.values(x);
        const Paths<C::SUB_CHUNK> paths = store_delta<BACKWARD, C, C::SUB_CHUNK>(
            in, s, own, dt, x, tokens, place + C::DELTA, place + C::INPUT, slope);
        if constexpr (BACKWARD) {
            float dout[COUNT];
            Cm.store(s.address(C::CM));
            dy.values(dout);
            if (in.z) {
                float gate[COUNT];
                z.values(gate);
                GT_UNROLL
                for (int k = 0; k < COUNT; k++) dout[k] *= C::EXACT ? silu(gate[k]) : silu_fast(gate[k]);
            }
            GT_UNROLL
            for (int k = 0; k < COUNT; k++) {
                if (Block::index(k) >= Block::SIZE) continue;
                sts<float>(s.address(place + C::U + Block::index(k)), x[k]);
                sts<float>(s.address(place + C::SLOPE + Block::index(k)), slope[k]);
                sts<float>(s.address(place + C::DY + Block::index(k)), dout[k]);
            }
        }
        return paths.path[0];
    }
};

/* Advances h through the staged sub-chunk.  KEEP stores the state before every second token in shared memory. */
template <class C, int PATH, bool KEEP>
GT_DEV void advance_sub_chunk(const Coordinates<C>& s, const float (&A)[C::COLUMNS][C::STATES],
                              float (&h)[C::COLUMNS][C::STATES]) {
    const int at = warp_place<C>() + s.first;
    const auto load = [&](Token<C>& token, int t) {
        token.load(s.address(at + C::DELTA + t * C::WARP_CHANNELS), s.address(at + C::INPUT + t * C::WARP_CHANNELS),
                   s.address(C::BM + t * C::WIDTH + s.lane * C::STATES));
    };
    Token<C> first, second;
    load(first, 0);
    GT_NO_UNROLL
    for (int t = 0; t < C::SUB_CHUNK; t += 2) {
        if constexpr (KEEP) {
            GT_UNROLL
            for (int c = 0; c < C::COLUMNS; c++) {
                GT_UNROLL
                for (int i = 0; i < C::STATES; i += 4)
                    sts<float4>(state_address(s, t / 2, c, i), float4{h[c][i], h[c][i + 1], h[c][i + 2], h[c][i + 3]});
            }
            if (t + 2 == C::SUB_CHUNK) break; /* no thread needs the state after the sub-chunk */
        }
        load(second, t + 1);
        first.template advance<PATH>(h, A);
        if (t + 2 < C::SUB_CHUNK) load(first, t + 2);
        second.template advance<PATH>(h, A);
    }
}

/* Stores sums over lanes.  x[0 ...] is the result of reduce_scatter on COUNT sums of channels, COLUMNS neighbours at a
 * time.  Sum number k goes to offset(k). */
template <class C, int COUNT, class Offset>
GT_DEV void store_sums(const Coordinates<C>& s, const float (&x)[COUNT], const Offset& offset) {
    constexpr int HELD = COUNT > C::LANES ? COUNT / C::LANES : 1, SAME = C::LANES > COUNT ? C::LANES / COUNT : 1;
    if (s.lane % SAME != 0) return;
    GT_UNROLL
    for (int i = 0; i < HELD; i++) sts<float>(s.address(offset(s.lane / SAME * HELD + i)), x[i]);
}

/* Goes back through two tokens, 2 pair and 2 pair + 1 of the sub-chunk.  G is the gradient of the state after both
 * tokens on entry, and of the state before them on return.  The function stores each token's sums over n: <g,B> in
 * INPUT, <A,da> in DECAYS, and if dz is wanted <h,C> in OUTPUT.  It also stores the warp's shares of dB and dC over the
 * states, and adds to dA.  gt_ssm.cuh defines the letters: kept = exp(a) h_{t-1}, g = G + dy C, da = g kept. */
template <class C, int PATH>
GT_DEV void pair_backward(const Coordinates<C>& s, const float (&A)[C::COLUMNS][C::STATES], int pair, bool has_dz,
                          float (&G)[C::COLUMNS][C::STATES], float (&dA)[C::COLUMNS][C::STATES]) {
    constexpr int STATES = C::STATES, COLUMNS = C::COLUMNS, GROUPS = 32 / C::LANES;
    const int place = warp_place<C>();
    float delta[2][COLUMNS], input[2][COLUMNS], dy[2][COLUMNS], B[2][STATES], Cm[2][STATES];
    float sums[4 * COLUMNS] = {};    /* <g,B> of both tokens, then <A,da> of both */
    float outputs[2 * COLUMNS] = {}; /* <h,C> of both */
    float shares[4 * STATES] = {};   /* dB and dC of the first token, then of the second */
    GT_UNROLL
    for (int t = 0; t < 2; t++) {
        const int at = place + (2 * pair + t) * C::WARP_CHANNELS + s.first,
                  n = (2 * pair + t) * C::WIDTH + s.lane * STATES;
        load_vector(delta[t], s.address(C::DELTA + at));
        load_vector(input[t], s.address(C::INPUT + at));
        load_vector(dy[t], s.address(C::DY + at));
        load_vector(B[t], s.address(C::BM + n));
        load_vector(Cm[t], s.address(C::CM + n));
    }
    GT_UNROLL
    for (int c = 0; c < COLUMNS; c++) {
        GT_UNROLL
        for (int i0 = 0; i0 < STATES; i0 += 4) {
            float before[4];
            load_vector(before, state_address(s, pair, c, i0));
            GT_UNROLL
            for (int e = 0; e < 4; e++) {
                const int i = i0 + e;
                const Decay<PATH, C::EXACT> first(delta[0][c] * A[c][i]), second(delta[1][c] * A[c][i]);
                float kept[2], h[2];
                kept[0] = first.scale(before[e]);
                h[0] = fma_rn(input[0][c], B[0][i], kept[0]);
                kept[1] = second.scale(h[0]);
                h[1] = fma_rn(input[1][c], B[1][i], kept[1]);
                GT_UNROLL
                for (int t = 1; t >= 0; t--) {
                    const float g = fma_rn(dy[t][c], Cm[t][i], G[c][i]), da = g * kept[t];
                    sums[t * COLUMNS + c] = fma_rn(g, B[t][i], sums[t * COLUMNS + c]);
                    sums[(2 + t) * COLUMNS + c] = fma_rn(A[c][i], da, sums[(2 + t) * COLUMNS + c]);
                    if (has_dz) outputs[t * COLUMNS + c] = fma_rn(h[t], Cm[t][i], outputs[t * COLUMNS + c]);
                    dA[c][i] = fma_rn(delta[t][c], da, dA[c][i]);
                    shares[2 * t * STATES + i] = fma_rn(input[t][c], g, shares[2 * t * STATES + i]);
                    shares[(2 * t + 1) * STATES + i] = fma_rn(dy[t][c], h[t], shares[(2 * t + 1) * STATES + i]);
                    G[c][i] = t ? second.scale(g) : first.scale(g);
                }
            }
        }
    }
    const int values = place + 2 * pair * C::WARP_CHANNELS + s.first;
    reduce_scatter<4 * COLUMNS, C::LANES, 1>(sums, s.lane);
    sync_warp(); /* all lanes have read INPUT and the states */
    store_sums(s, sums, [&](int k) {
        return values + (k / (2 * COLUMNS) ? C::DECAYS : C::INPUT) + k / COLUMNS % 2 * C::WARP_CHANNELS + k % COLUMNS;
    });
    if (has_dz) {
        reduce_scatter<2 * COLUMNS, C::LANES, 1>(outputs, s.lane);
        store_sums(s, outputs,
                   [&](int k) { return values + C::OUTPUT + k / COLUMNS * C::WARP_CHANNELS + k % COLUMNS; });
    }
    reduce_scatter<4 * STATES, GROUPS, C::LANES>(shares, lane_id() / C::LANES);
    constexpr int HELD = 4 * STATES / GROUPS;
    GT_UNROLL
    for (int i = 0; i < HELD; i++) {
        const int k = lane_id() / C::LANES * HELD + i; /* number of the sum among the shares */
        sts<float>(s.address(place + C::STATE + pair * C::PAIR + k / STATES * C::WIDTH + s.lane * STATES + k % STATES),
                   shares[i]);
    }
}

/* Computes du, ddt and dz of a sub-chunk from its sums.  Adds to dskip and dbias. */
template <class C>
GT_DEV void finish_channels(const BackwardParams& p, const Coordinates<C>& s, const Channel& own, int64_t first,
                            int tokens, ParameterSums<C>& sums) {
    using Block = ChannelTile<C, C::SUB_CHUNK>;
    constexpr int COUNT = Block::COUNT;
    const Problem& in = p.in;
    const auto value = [&](int array, int k) {
        return Block::row(k) < tokens ? lds<float>(s.address(warp_place<C>() + array + Block::index(k))) : 0.0f;
    };
    Block z, dy;
    if (p.dz) {
        z.load(channel_rows(in, s, in.z, in.z_stride, first, tokens));
        dy.load(channel_rows(in, s, in.dy, in.dy_stride, first, tokens));
    }
    float dskip = 0.0f, dbias = 0.0f, u[COUNT], du[COUNT], ddt[COUNT];
    GT_UNROLL
    for (int k = 0; k < COUNT; k++) {
        const float dout = value(C::DY, k), gB = value(C::INPUT, k), slope = value(C::SLOPE, k);
        u[k] = value(C::U, k);
        /* Each term is multiplied by the slope first: the plain sum may overflow. */
        ddt[k] = fma_rn(slope, LN_2 * value(C::DECAYS, k), slope * u[k] * gB);
        if (slope == 0.0f) ddt[k] = 0.0f;
        dskip = fma_rn(dout, u[k], dskip);
        dbias += ddt[k];
        du[k] = fma_rn(value(C::DELTA, k), gB, own.skip * dout);
    }
    sums.dskip.add(dskip);
    sums.dbias.add(dbias);
    if (p.du) store_tile<Block>(channel_rows(in, s, p.du, p.du_stride, first, tokens), du);
    if (p.ddt) {
        Rows rows = channel_rows(in, s, p.ddt, p.ddt_stride, first, tokens);
        rows.dtype = in.dt_dtype;
        store_tile<Block>(rows, ddt);
    }
    if (!p.dz) return;
    float gate[COUNT], dz[COUNT];
    z.values(gate);
    dy.values(dz);
    GT_UNROLL
    for (int k = 0; k < COUNT; k++) {
        const float slope = silu_derivative(gate[k], C::EXACT ? sigmoid(gate[k]) : sigmoid_fast(gate[k]));
        dz[k] *= fma_rn(own.skip, u[k], value(C::OUTPUT, k)) * slope;
    }
    store_tile<Block>(channel_rows(in, s, p.dz, p.dz_stride, first, tokens), dz);
}

/* Stores the block's shares of dB and dC for a sub-chunk, summed over the warps. */
template <class C>
GT_DEV void finish_group(const BackwardParams& p, const Coordinates<C>& s, int64_t first, int tokens) {
    const Problem& in = p.in;
    for (int i = thread_id(); i < tokens * 2 * C::WIDTH; i += THREADS) {
        const int t = i / (2 * C::WIDTH), n = i % C::WIDTH;
        float* out = i % (2 * C::WIDTH) < C::WIDTH ? p.dB : p.dC;
        if (!out || n >= in.N) continue;
        const int at = C::WARP + C::STATE + t / 2 * C::PAIR + i % (4 * C::WIDTH);
        float sum = 0.0f;
        GT_UNROLL
        for (int w = 0; w < WARPS; w++) sum += lds<float>(s.address(at + w * C::WARP_SIZE));
        out[(((s.b * in.sequences.T + first + t) * in.G + s.g) * in.tiles + s.tile) * in.N + n] = sum;
    }
}

/* Stores the thread's sums as rows of partial sums; reduce_rows adds the rows. */
template <class C>
GT_DEV void store_parameters(const BackwardParams& p, const Coordinates<C>& s, const Channel& own,
                             const ParameterSums<C>& sums) {
    const Problem& in = p.in;
    if (p.dA) store_state(in, s, p.dA + strand_of(in) * in.D * in.N, sums.dA);
    if (!own.exists) return;
    const int64_t to = (strand_of(in) * C::ROWS + lane_id() / C::WARP_CHANNELS) * in.D + own.d;
    if (p.dskip) p.dskip[to] = sums.dskip.value();
    if (p.dbias) p.dbias[to] = sums.dbias.value();
}

/* Takes one segment.  G is the gradient of the state after the segment on entry, and of the state before it on return.
 * The last sub-chunk may be short.  Its missing tokens are computed, too.  Their Delta, DY, B and C are 0, so they
 * change neither h nor G, and add 0 to sums. */
template <class C>
GT_DEV void backward_segment(const BackwardParams& p, const Coordinates<C>& s, const Channel& own, const Span& span,
                             const float (&A)[C::COLUMNS][C::STATES], float (&G)[C::COLUMNS][C::STATES],
                             ParameterSums<C>& sums) {
    constexpr int SUB_CHUNK = C::SUB_CHUNK;
    const Problem& in = p.in;
    const int64_t DN = in.D * in.N, slots = chunk_slots(in.sequences, CHECKPOINT);
    float4* parked = reinterpret_cast<float4*>(p.scratch) + (int64_t)block_x() * C::SUB_CHUNKS * PARKED;
    float h[C::COLUMNS][C::STATES];
    for (int64_t chunk = (span.end - span.first + CHECKPOINT - 1) / CHECKPOINT - 1; chunk >= 0; chunk--) {
        const int64_t start = span.first + chunk * CHECKPOINT;
        const int64_t left = s.end - start < CHECKPOINT ? s.end - start : CHECKPOINT;
        const int sub_chunks = (int)((left + SUB_CHUNK - 1) / SUB_CHUNK);
        float dA[C::COLUMNS][C::STATES] = {}; /* sum over the chunk: shorter sums round less */
        load_state(in, s, p.checkpoints + (s.b * slots + span.chunk_slot + chunk) * DN, h);
        {
            SubChunk<false, C> next;
            next.load(in, s, start, SUB_CHUNK < left ? SUB_CHUNK : (int)left);
            for (int sub_chunk = 0; sub_chunk < sub_chunks; sub_chunk++) { /* forwards: park h before each sub-chunk */
                park<C>(parked + sub_chunk * PARKED, h);
                if (sub_chunk + 1 == sub_chunks) break;
                const int path = next.store(in, s, own, SUB_CHUNK);
                sync_threads();
                if (sub_chunk + 2 < sub_chunks) next.load(in, s, start + (sub_chunk + 1) * SUB_CHUNK, SUB_CHUNK);
                with_path(path, [&](auto way) { advance_sub_chunk<C, decltype(way)::value, false>(s, A, h); });
                sync_threads();
            }
        }
        SubChunk<true, C> next;
        const auto tokens_of = [&](int sub_chunk) {
            const int rest = (int)left - sub_chunk * SUB_CHUNK;
            return rest < SUB_CHUNK ? rest : SUB_CHUNK;
        };
        next.load(in, s, start + (sub_chunks - 1) * SUB_CHUNK, tokens_of(sub_chunks - 1));
        for (int sub_chunk = sub_chunks - 1; sub_chunk >= 0; sub_chunk--) { /* backwards: use G after each sub-chunk */
            const int64_t first = start + sub_chunk * SUB_CHUNK;
            const int tokens = tokens_of(sub_chunk);
            unpark<C>(parked + sub_chunk * PARKED, h);
            const int path = next.store(in, s, own, tokens);
            sync_threads();
            if (sub_chunk > 0) next.load(in, s, first - SUB_CHUNK, SUB_CHUNK);
            with_path(path, [&](auto way) {
                constexpr int PATH = decltype(way)::value;
                advance_sub_chunk<C, PATH, true>(s, A, h);
                GT_NO_UNROLL
                for (int pair = SUB_CHUNK / 2 - 1; pair >= 0; pair--) pair_backward<C, PATH>(s, A, pair, p.dz, G, dA);
            });
            sync_threads(); /* from here on no thread reads B, C or states */
            finish_group(p, s, first, tokens);
            finish_channels(p, s, own, first, tokens, sums);
        }
        GT_UNROLL
        for (int c = 0; c < C::COLUMNS; c++) {
            GT_UNROLL
            for (int i = 0; i < C::STATES; i++) sums.dA[c][i] += dA[c][i];
        }
    }
}

/* Adds G, the gradient of a sequence's first state, to the strand's sum. */
template <class C>
GT_DEV void add_dstate(const BackwardParams& p, const Coordinates<C>& s, const float (&G)[C::COLUMNS][C::STATES]) {
    float* sums = p.dstate_sum + strand_of(p.in) * p.in.D * p.in.N;
    float sum[C::COLUMNS][C::STATES];
    load_state(p.in, s, sums, sum);
    GT_UNROLL
    for (int c = 0; c < C::COLUMNS; c++) {
        GT_UNROLL
        for (int i = 0; i < C::STATES; i++) sum[c][i] += G[c][i];
    }
    store_state(p.in, s, sums, sum);
}

template <int LANES, int STATES, int COLUMNS, bool EXACT>
GT_KERNEL(THREADS, 2)
backward_kernel(const GT_GRID_CONSTANT BackwardParams p) {
    using C = Traits<LANES, STATES, COLUMNS, EXACT>;
    const Problem& in = p.in;
    Coordinates<C> s(in);
    float A[COLUMNS][STATES], G[COLUMNS][STATES];
    ParameterSums<C> sums;
    const Channel own = enter_channels(in, s, warp_place<C>() + C::MOST, A);
    load_state(in, s, nullptr, G); /* the strand's sum starts from zeros */
    if (p.dstate_sum) store_state(in, s, p.dstate_sum + strand_of(in) * in.D * in.N, G);
    for (int64_t item = strand_of(in); item < items_of(in); item += strands_of(in)) {
        const Span span = span_at(in.sequences, in.segments, CHECKPOINT, item);
        if (!span.exists) continue;
        s.enter(span);
        load_state(in, s, first_state(in.sequences, in.segments, span, in.D * in.N, p.dstate_out, span.sequence), G);
        backward_segment(p, s, own, span, A, G, sums);
        if (!span.starts) continue;
        if (p.dstate_in) store_state(in, s, p.dstate_in + span.sequence * in.D * in.N, G);
        if (p.dstate_sum) add_dstate(p, s, G);
    }
    store_parameters(p, s, own, sums);
}

/* ---- backward: the gradient at a segment's start, from a zero gradient at its end ----------------------
 * This local pass takes every segment but a sequence's first, before the scan over segments.  It computes, from a
 * segment's last token to its first,
 *     G <- exp(Delta A) (G + DY C)
 * grid, block and shared memory as backward.
 * registers: A and G, 16 values each.
 * bytes per token and channel, bf16: u, dt, dy (, z) 2 each, B and C 4 N / CHANNELS; u and B are staged, not used.
 * A thread takes the tokens of its states one after another: deterministic. */
template <int LANES, int STATES, int COLUMNS, bool EXACT>
GT_KERNEL(THREADS, 3)
reverse_states_kernel(const GT_GRID_CONSTANT BackwardParams p) {
    using C = Traits<LANES, STATES, COLUMNS, EXACT>;
    const Problem& in = p.in;
    Coordinates<C> s(in);
    const int place = warp_place<C>();
    float A[COLUMNS][STATES];
    const Channel own = enter_channels(in, s, place + C::MOST, A);
    for (int64_t item = strand_of(in); item < items_of(in); item += strands_of(in)) {
        const Span span = span_at(in.sequences, in.segments, CHECKPOINT, item);
        if (!span.exists || span.starts) continue; /* no segment comes before the first */
        s.enter(span);
        float G[COLUMNS][STATES];
        TwoTermSum deltas;
        load_state(in, s, nullptr, G);
        for (int64_t sub_chunk = (span.end - span.first - 1) / C::SUB_CHUNK; sub_chunk >= 0; sub_chunk--) {
            const int64_t first = span.first + sub_chunk * C::SUB_CHUNK;
            const int tokens = (int)(s.end - first < C::SUB_CHUNK ? s.end - first : C::SUB_CHUNK);
            SubChunk<true, C> now;
            now.load(in, s, first, tokens);
            const int path = now.store(in, s, own, tokens);
            sync_threads();
            add_deltas(s, place + C::DELTA, tokens, deltas);
            with_path(path, [&](auto way) {
                GT_NO_UNROLL
                for (int t = tokens - 1; t >= 0; t--) {
                    const int at = place + t * C::WARP_CHANNELS + s.first;
                    float delta[COLUMNS], dy[COLUMNS], Cm[STATES];
                    load_vector(delta, s.address(C::DELTA + at));
                    load_vector(dy, s.address(C::DY + at));
                    load_vector(Cm, s.address(C::CM + t * C::WIDTH + s.lane * STATES));
                    GT_UNROLL
                    for (int c = 0; c < COLUMNS; c++) {
                        GT_UNROLL
                        for (int i = 0; i < STATES; i++)
                            G[c][i] = Decay<decltype(way)::value, C::EXACT>(delta[c] * A[c][i])
                                          .scale(fma_rn(dy[c], Cm[i], G[c][i]));
                    }
                }
            });
            sync_threads();
        }
        store_segment(in, s, span, G, own, deltas);
    }
}

} /* namespace scan */
} /* namespace gt */

#endif
