/* gt/scan/backward.cuh - selective_scan backward, any size.  The gradients of one token are at the top of gt_ssm.cuh.
 *
 * grid strands*G*ceil(D/G/CHANNELS), at most 64 blocks for each multiprocessor; block 4 warps.  Threads own the same
 * channels and state elements as in forward.  All warps do the same work.
 * A block takes the segments of its strand in turn.  It runs through a segment from the last chunk of CHECKPOINT tokens
 * to the first.  Each chunk takes two phases:
 *     forwards    h advances from the chunk's checkpoint through sub-chunks of SUB_CHUNK tokens.  The block parks the
 *                 state before each sub-chunk in its own scratch in global memory.
 *     backwards   The block takes the sub-chunks from the last to the first.  h advances through the tokens once more,
 *                 and the state before every second token stays in shared memory.  Then G goes back through the tokens,
 *                 two at a time.  The state between the two is computed from the state before them, because the first
 *                 token's gradients need it anyway.
 * SUB_CHUNK is 8 tokens, or 4 if N > 128.  A sub-chunk takes two barriers, because the warps share B and C, and because
 * dB and dC are summed over warps.
 *
 * registers: A, G, dA of the chunk and dA of all segments, 16 values each; the inputs of the next sub-chunk; the sums
 * of two tokens.  In all 255, for two blocks per multiprocessor.
 * shared memory: B and C.  For each warp Delta, Delta u, DY, the slope of Delta, u and two sums,
 * [SUB_CHUNK][WARP_CHANNELS] each, and states.  After the warp has read the states, its partial sums of dB and dC
 * overwrite them.  In all 61 KB at N = 16.
 * scratch per block: 8 KB for each of CHECKPOINT / SUB_CHUNK sub-chunks; 128 KB for sub-chunks of 8 tokens.
 * issue slots per token and state element, N = 16, on Path FAST: 5 to park h and 1.5 for the channel's inputs; the same
 * again for the second time that h advances; backwards 12, or 13 with dz; sums over lanes 1.5 for <g,B> and <A,da>, and
 * 1.75 for dB and dC; the channel's loads, stores and Delta about 60 / 16.  The sum of these counts is 32.  The kernel
 * executes 42; 12 of them are for the channel.
 * bytes per token and channel, bf16: u and dt 4 each, because the kernel reads them twice; dy (and z) 2 each, or 4 with
 * dz; du, ddt (and dz) 2 each; B and C together 6 N / CHANNELS, because B is read twice; partial sums of dB and dC 8 N
 * / CHANNELS; checkpoints N / 32; scratch, written and read, 8 N / SUB_CHUNK.  The scratch of 256 blocks stays in L2.
 * dB and dC are summed over a thread's channels in order, over a warp's lanes by shuffles, and over warps in order.
 * group_sum() then sums over the tiles of a group.  dA, dDskip and ddt_bias are summed over a thread's tokens in order,
 * and reduce_rows() then sums over strands.  Every order is fixed, so results are deterministic. */
#ifndef GT_SCAN_BACKWARD_CUH
#define GT_SCAN_BACKWARD_CUH

#include "problem.cuh"

namespace gt {
namespace scan {

struct BackwardParams {
    Problem in;
    const float *checkpoints, *dstate_out;
    float* scratch;    /* parked states, [blocks,SUB_CHUNKS,4,128] float4 */
    float* dstate_in;  /* NULL if the caller does not want it, or if all sequences share it */
    float* dstate_sum; /* [strands,D,N], if all sequences share dstate_in: sums over a strand's sequences; else NULL */
    void *du, *ddt, *dz;
    gt_stride du_stride, ddt_stride, dz_stride;
    float *dB, *dC;       /* [B,T,G,tiles,N] or NULL */
    float* dA;            /* [strands,D,N] or NULL */
    float *dskip, *dbias; /* [strands,ROWS,D] or NULL */
};

constexpr int PARKED = 4 * THREADS; /* the number of float4 in a block's states */

/* A thread's sums over all segments of its strand.  dA belongs to the thread's own state elements.  dskip and dbias
 * belong to the lane's channel (Channel).  ROWS lanes have this channel, each with different tokens. */
template <class C>
struct ParameterSums {
    float dA[C::COLUMNS][C::STATES] = {};
    TwoTermSum dskip, dbias;
};

/* park() stores the 16 state values of every thread as float4; unpark() loads them. */
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

/* The offset of the warp's part of shared memory, in floats. */
template <class C>
GT_DEV int warp_place() {
    return C::WARP + warp_id() * C::WARP_SIZE;
}

/* Address of the thread's state elements i to i + 3 of channel c.  They belong to the state before token 2 pair. */
template <class C>
GT_DEV uint32_t state_address(const Coordinates<C>& s, int pair, int c, int i) {
    return s.address(warp_place<C>() + C::STATE + pair * C::PAIR + ((c * C::STATES + i) / 4 * 32 + lane_id()) * 4);
}

/* The inputs of the next sub-chunk, in registers, so that loads overlap with arithmetic.  Without BACKWARD these are
 * only u, dt and B. */
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

    /* Stores Delta, Delta u and B to shared memory; with BACKWARD also u, Delta's slope, C and DY.  DY is the gradient
     * of y before the gate: dy silu(z), or dy without z.  Returns the path of the sub-chunk's tokens. */
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

/* Advances h through the staged sub-chunk.  With KEEP, stores the state before every second token to shared memory. */
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
            if (t + 2 == C::SUB_CHUNK) break; /* the state after the sub-chunk is not needed */
        }
        load(second, t + 1);
        first.template advance<PATH>(h, A);
        if (t + 2 < C::SUB_CHUNK) load(first, t + 2);
        second.template advance<PATH>(h, A);
    }
}

/* Stores the COUNT sums that reduce_scatter() has left in x of the LANES lanes.  Sum number k goes to offset(k). */
template <class C, int COUNT, class Offset>
GT_DEV void store_sums(const Coordinates<C>& s, const float (&x)[COUNT], const Offset& offset) {
    constexpr int HELD = COUNT > C::LANES ? COUNT / C::LANES : 1, SAME = C::LANES > COUNT ? C::LANES / COUNT : 1;
    if (s.lane % SAME != 0) return;
    GT_UNROLL
    for (int i = 0; i < HELD; i++) sts<float>(s.address(offset(s.lane / SAME * HELD + i)), x[i]);
}

/* Goes backwards through tokens 2 pair + 1 and 2 pair of the sub-chunk.  On entry, G is the gradient of the state after
 * both tokens; on return, the gradient of the state before them.  Stores each token's sums over n: <g,B> in INPUT,
 * <A,da> in DECAYS and, with has_dz, <h,C> in OUTPUT.  The warp's partial sums of dB and dC overwrite the states in
 * shared memory.  Adds to dA.  In the notation of gt_ssm.cuh, kept is exp(a) h_{t-1}, g is G + dy C, and da is g
 * kept. */
template <class C, int PATH>
GT_DEV void pair_backward(const Coordinates<C>& s, const float (&A)[C::COLUMNS][C::STATES], int pair, bool has_dz,
                          float (&G)[C::COLUMNS][C::STATES], float (&dA)[C::COLUMNS][C::STATES]) {
    constexpr int STATES = C::STATES, COLUMNS = C::COLUMNS, GROUPS = 32 / C::LANES;
    const int place = warp_place<C>();
    float delta[2][COLUMNS], input[2][COLUMNS], dy[2][COLUMNS], B[2][STATES], Cm[2][STATES];
    float sums[4 * COLUMNS] = {};    /* [4][COLUMNS]: <g,B> of both tokens, then <A,da> of both */
    float outputs[2 * COLUMNS] = {}; /* [2][COLUMNS]: <h,C> of both tokens */
    float shares[4 * STATES] = {};   /* partial sums [4][STATES]: dB and dC of the first token, then of the second */
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
        const int k = lane_id() / C::LANES * HELD + i; /* index of the partial sum */
        sts<float>(s.address(place + C::STATE + pair * C::PAIR + k / STATES * C::WIDTH + s.lane * STATES + k % STATES),
                   shares[i]);
    }
}

/* Computes du, ddt and dz of a sub-chunk from the sums in shared memory.  Adds to sums.dskip and sums.dbias. */
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
        /* multiplies each term by the slope first, because the sum of the bare terms may overflow */
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

/* Adds the warps' partial sums of dB and dC for a sub-chunk, and stores the results for group_sum(). */
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

/* Stores the thread's sums over its strand, for reduce_rows(). */
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

/* Runs one segment backwards.  On entry, G is the gradient of the state after the segment; on return, the gradient of
 * the state before it.  The last sub-chunk may have fewer tokens.  The code also computes the missing tokens.  Their
 * Delta, DY, B and C are 0, so they change neither h nor G, and add 0 to sums. */
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
        float dA[C::COLUMNS][C::STATES] = {}; /* sums over one chunk; they are added to sums.dA once, because short sums
                                               * round less */
        load_state(in, s, p.checkpoints + (s.b * slots + span.chunk_slot + chunk) * DN, h);
        {
            SubChunk<false, C> next;
            next.load(in, s, start, SUB_CHUNK < left ? SUB_CHUNK : (int)left);
            for (int sub_chunk = 0; sub_chunk < sub_chunks; sub_chunk++) { /* forwards: parks h before each sub-chunk */
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
        for (int sub_chunk = sub_chunks - 1; sub_chunk >= 0; sub_chunk--) { /* backwards, with G after the sub-chunk */
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
            sync_threads(); /* all threads have read B, C and the states */
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

/* Adds G, the gradient of a sequence's initial state, to the strand's sum. */
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
    load_state(in, s, nullptr, G); /* G = 0, for the next line */
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

/* ---- backward: the gradient of a segment's start, from a zero gradient at its end ---------------------------------
 * This is the local pass of backward (gt/recurrence/segments.cuh), which runs before the scan over segments.  It takes
 * every segment except a sequence's first one.  From the segment's last token to its first it computes
 *     G <- exp(Delta A) (G + DY C)
 * grid, block and shared memory: as in backward.
 * registers: A and G, 16 values each.
 * bytes per token and channel, bf16: u, dt, dy (and z) 2 each, B and C together 4 N / CHANNELS.  The kernel does not
 * use u and B, but SubChunk loads them in any case.
 * A thread takes the tokens in order, so results are deterministic. */
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
        if (!span.exists || span.starts) continue; /* no segment needs the gradient before the first one */
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
