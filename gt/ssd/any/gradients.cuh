/* gt/ssd/any/gradients.cuh - ssd backward, any size and dtype, in two kernels.  The first computes everything except
 * sums over heads, batch and time.  The second computes ddt and partial sums of dA and ddt_bias.  A third kernel is the
 * local pass over segments (gt/recurrence/segments.cuh), which computes only states. */
#ifndef GT_SSD_ANY_GRADIENTS_CUH
#define GT_SSD_ANY_GRADIENTS_CUH

#include "block.cuh"

namespace gt {
namespace ssd {

/* ---- part 1: everything except sums over heads, batch and time ---------------------------------------------------
 * A block owns 64 rows of one head's state h and of its gradient G.  It takes a segment backwards, one checkpoint (8
 * sub-chunks of 16 tokens) at a time.  First the block advances h through the sub-chunks and parks the state before
 * each of them in its scratch.  The scratch is global memory, but small enough to stay mostly in L2.  Then the block
 * goes back through the sub-chunks with G.
 * REGISTERS per thread: 8 RN for G during the whole segment, and 8 RN for h of the current sub-chunk: 128 at N = 128.
 * The sum that a sub-chunk adds to h or G takes up to 32 more.
 * SHARED MEMORY: as forward, and also dy, R, c and the partial sums of e and f.  In all 41.1 KB for N from 65 to 128,
 * and 57.7 KB for N up to 256.
 * ARITHMETIC per token and head: 5 P N multiply-adds on the states (to advance h and G, and for dC, dB and U), or 6 P N
 * with dz.  48 N + 48 P within the sub-chunk.
 * BYTES per token and head, bf16: 8 P for x (read twice), dy and dx; 6 N from L2 for B (read twice) and C; P N / 32 for
 * checkpoints; P N / 2 to write and read parked states; 8 N for partial sums of dB and dC.  In all about 5.8 KB at P =
 * 64, N = 128.
 * grid: strands*H*tiles; block 128, 256 for N > 128.  Sums over p, n and t have a fixed order, so results are
 * deterministic. */

/* For all 16 tokens t, computes out[t][n] = scale_t sum_p state[p][n] vector_t[p] + sum_j pairs[t][j] row_j[n], and
 * stores it to global memory unless out is NULL.  Also stores to `sums` [warp][t] the warp's part of <state^T vector_t,
 * other_t>, without the scale. */
template <class C>
GT_DEV void sum_over_p(const BackwardParams& p, const Position<C>& s, const float (&state)[8][C::RN], int64_t first,
                       int vector, int scale, int other, int sums, Pairs pairs, int rows, float* out) {
    constexpr int RN = C::RN, TOKENS = 8 / RN;     /* tokens whose sums are reduced together */
    constexpr int GROUP = TOKENS < 2 ? 2 : TOKENS; /* tokens whose inner products are reduced together */
    const Problem& in = p.in;
    const int heads = (int)(in.H / in.G), parts = heads * in.tiles;
    const int part = s.h % heads * in.tiles + s.tile;
    const int tokens = tokens_from(s, first);
    float row0[RN], row1[RN];
    s.load_n(row0, rows + s.p_lane * C::WIDTH);
    s.load_n(row1, rows + (s.p_lane + 8) * C::WIDTH);
    GT_NO_UNROLL
    for (int t0 = 0; t0 < SUB_CHUNK; t0 += GROUP) {
        float inner[GROUP];
        GT_UNROLL
        for (int i = 0; i < GROUP; i += TOKENS) {
            float v[8];
            GT_UNROLL
            for (int j = 0; j < TOKENS; j++) {
                const int t = t0 + i + j;
                float x[8], y[RN], sum[RN] = {};
                s.load_p(x, vector + t * TILE_P);
                const float factor = s.value(scale + t);
                const int pair = pairs.offset + t * pairs.row + s.p_lane * pairs.column;
                const float pair0 = s.value(pair), pair1 = s.value(pair + 8 * pairs.column);
                GT_UNROLL
                for (int k = 0; k < 8; k++) {
                    GT_UNROLL
                    for (int n = 0; n < RN; n++) sum[n] = fma_rn(x[k], state[k][n], sum[n]);
                }
                s.load_n(y, other + t * C::WIDTH);
                inner[i + j] = 0.0f;
                GT_UNROLL
                for (int n = 0; n < RN; n++) {
                    inner[i + j] = fma_rn(sum[n], y[n], inner[i + j]);
                    v[j * RN + n] = fma_rn(pair0, row0[n], fma_rn(pair1, row1[n], sum[n] * factor));
                }
            }
            reduce_scatter<8, 8, 1>(v, s.p_lane);
            const int t = t0 + i + s.p_lane / RN, n = s.n0 + s.p_lane % RN;
            if (out && t < tokens && n < in.N)
                out[(((s.b * in.sequences.T + first + t) * in.G + s.g) * parts + part) * in.N + n] = v[0];
        }
        reduce_scatter<GROUP, 32, 1>(inner, lane_id());
        if (lane_id() % (32 / GROUP) == 0)
            sts<float>(s.address(sums + warp_id() * SUB_CHUNK + t0 + lane_id() / (32 / GROUP)), inner[0]);
    }
}

/* Stores the gradient of y before the gate, dy silu(z), to DY.  Stores dy silu'(z) to GATE; y times this number is
 * dz. */
template <class C>
GT_DEV void stage_dy(const Problem& in, const Position<C>& s, int64_t first) {
    using Half = Tile<SUB_CHUNK / 2, TILE_P, C::THREADS>;
    GT_NO_UNROLL
    for (int row = 0; row < SUB_CHUNK; row += SUB_CHUNK / 2) {
        Half dy, z;
        dy.load(head_rows(in, s, in.dy, in.dy_stride, first).after(row));
        if (in.z) z.load(head_rows(in, s, in.z, in.z_stride, first).after(row));
        GT_UNROLL
        for (int k = 0; k < Half::COUNT; k++) {
            const int address = row * TILE_P + Half::index(k);
            const float dout = dy.value(k);
            sts<float>(s.address(C::DY + address), in.z ? dout * silu(z.value(k)) : dout);
            if (in.z) sts<float>(s.address(C::GATE + address), dout * dsilu(z.value(k)));
        }
    }
}

/* Stages all inputs of a sub-chunk for the pass with G. */
template <class C>
GT_DEV void stage_sub_chunk(const Problem& in, const Position<C>& s, int64_t first) {
    stage_decays(in, s, first);
    stage_dy(in, s, first);
    stage<SUB_CHUNK, TILE_P, C::THREADS>(s.address(C::X), head_rows(in, s, in.x, in.x_stride, first));
    stage<SUB_CHUNK, C::WIDTH, C::THREADS>(s.address(C::B), group_rows(in, s, in.Bm, in.Bm_stride, first));
    stage<SUB_CHUNK, C::WIDTH, C::THREADS>(s.address(C::C), group_rows(in, s, in.Cm, in.Cm_stride, first));
    sync_threads();
}

/* The address at which a block parks the state before a sub-chunk. */
template <class C>
GT_DEV float4* parked_state(const BackwardParams& p, int sub_chunk) {
    constexpr int PARKED = 2 * C::RN * C::THREADS; /* number of float4 in a block's state */
    return reinterpret_cast<float4*>(p.scratch) + ((int64_t)block_x() * SUB_CHUNKS + sub_chunk) * PARKED;
}

/* Advances h from the checkpoint in slot `slot` through the sub-chunks, and parks h before each sub-chunk.  start: the
 * checkpoint's first token. */
template <class C>
GT_DEV void park_states(const BackwardParams& p, Position<C>& s, int64_t slot, int64_t start, int sub_chunks) {
    const Problem& in = p.in;
    const int64_t slots = chunk_slots(in.sequences, CHECKPOINT), head = s.b * in.H + s.h;
    float state[8][C::RN];
    load_checkpoint(in, s, p.checkpoints, head * slots + slot, state);
    for (int sub_chunk = 0; sub_chunk < sub_chunks; sub_chunk++) {
        GT_UNROLL
        for (int i = 0; i < 2 * C::RN; i++) {
            const int e = 4 * i;
            const float4 four = {state[e / C::RN][e % C::RN], state[(e + 1) / C::RN][(e + 1) % C::RN],
                                 state[(e + 2) / C::RN][(e + 2) % C::RN], state[(e + 3) / C::RN][(e + 3) % C::RN]};
            stg<float4>(parked_state<C>(p, sub_chunk) + i * C::THREADS + thread_id(), four);
        }
        if (sub_chunk + 1 == sub_chunks) break;
        const int64_t first = start + sub_chunk * SUB_CHUNK;
        s.recall();
        stage_decays(in, s, first);
        stage<SUB_CHUNK, TILE_P, C::THREADS>(s.address(C::X), head_rows(in, s, in.x, in.x_stride, first));
        stage<SUB_CHUNK, C::WIDTH, C::THREADS>(s.address(C::B), group_rows(in, s, in.Bm, in.Bm_stride, first));
        sync_threads();
        update_state(s, state, SUB_CHUNK, C::X, C::WEIGHT, C::B);
        sync_threads();
    }
}

/* Computes dz of ROUND tokens from token `round` on.  The partial sums of their y lie in PARTIAL. */
template <class C>
GT_DEV void finish_dz(const BackwardParams& p, const Position<C>& s, int64_t first, int round, int tokens) {
    const Problem& in = p.in;
    GT_NO_UNROLL
    for (int i = thread_id(); i < C::ROUND * TILE_P; i += C::THREADS) {
        const int t = round + i / TILE_P, row = i % TILE_P, address = t * TILE_P + row;
        if (t >= tokens || row >= s.rows) continue;
        const float y = fma_rn(skip_of(in, s, row), s.value(C::X + address), sum_partial(s, i));
        store_as(p.dz, in.dtype, offset_of(p.dz_stride, s.b, first + t, s.h) + s.p0 + row,
                 y * s.value(C::GATE + address));
    }
}

/* Computes the sums that need h: dC, e, <G, h> and dz. */
template <class C>
GT_DEV void sub_chunk_with_state(const BackwardParams& p, const Position<C>& s, int64_t first, const float4* parked,
                                 const float (&G)[8][C::RN]) {
    constexpr int RN = C::RN;
    const int tokens = tokens_from(s, first);
    float h[8][RN], Gh = 0.0f;
    GT_UNROLL
    for (int i = 0; i < 2 * RN; i++) {
        const float4 four = ldg<float4>(parked + i * C::THREADS + thread_id());
        const float values[4] = {four.x, four.y, four.z, four.w};
        GT_UNROLL
        for (int e = 0; e < 4; e++) {
            const int k = (4 * i + e) / RN, n = (4 * i + e) % RN;
            h[k][n] = values[e];
            Gh = fma_rn(G[k][n], h[k][n], Gh);
        }
    }
    Gh = warp_sum(Gh);
    if (lane_id() == 0) sts<float>(s.address(C::Z_PARTS + warp_id()), Gh);
    sum_over_p(p, s, h, first, C::DY, C::PRE, C::C, C::E_PARTS, {C::R, PITCH, 1}, C::B, p.dC);
    if (!p.dz) return;
    float v[8];
    load_pair_rows(s, C::X, C::DELTA, v);
    GT_NO_UNROLL
    for (int round = 0; round < tokens; round += C::ROUND) {
        sum_over_n(s, h, round, tokens, C::C, C::PRE, {C::S, PITCH, 1}, v);
        sync_threads();
        finish_dz(p, s, first, round, tokens);
        sync_threads();
    }
}

/* Computes da and the direct part of dDelta (dDelta without A da), by additions only.  For each token k, 8 lanes share
 * the terms. */
template <class C>
GT_DEV void sub_chunk_delta(const BackwardParams& p, const Position<C>& s, int64_t first) {
    if (warp_id() >= 4) return;
    const Problem& in = p.in;
    const int k = thread_id() / 8, j = thread_id() % 8;
    float da = 0.0f, direct = 0.0f, f = 0.0f;
    for (int t = j; t < SUB_CHUNK; t += 8) {
        float e = 0.0f;
        f = 0.0f;
        for (int w = 0; w < C::WARPS; w++) {
            e += s.value(C::E_PARTS + w * SUB_CHUNK + t);
            f += s.value(C::F_PARTS + w * SUB_CHUNK + t);
        }
        if (t == k) direct = fma_rn(s.value(C::SUF + t), f, direct);
        direct += s.value(C::PAIR + t * PITCH + k); /* 0 for t < k */
        if (t < k) da = fma_rn(s.value(C::WEIGHT + t), f, da);
        if (t >= k) da += fma_rn(s.value(C::PRE + t), e, s.value(C::BEFORE + t * PITCH + k));
    }
    for (int mask = 1; mask < 8; mask <<= 1) {
        da += shfl_xor(da, mask);
        direct += shfl_xor(direct, mask);
    }
    float Gh = 0.0f;
    for (int w = 0; w < C::WARPS; w++) Gh += s.value(C::Z_PARTS + w);
    da = fma_rn(s.value(C::SCALE + 2), Gh, da);
    if (j == 0 && k < tokens_from(s, first)) {
        const int64_t to = ((s.tile * in.sequences.B + s.b) * in.sequences.T + first + k) * in.H + s.h;
        p.da[to] = da;
        p.ddelta[to] = direct;
    }
}

/* Computes dx of ROUND tokens from token `round` on.  The partial sums of their U lie in PARTIAL.  Returns the thread's
 * part of <dy, x> for dDskip.  All of its elements belong to one row p. */
template <class C>
GT_DEV float finish_dx(const BackwardParams& p, const Position<C>& s, int64_t first, int round, int tokens) {
    const Problem& in = p.in;
    float dskip = 0.0f;
    GT_NO_UNROLL
    for (int i = thread_id(); i < C::ROUND * TILE_P; i += C::THREADS) {
        const int t = round + i / TILE_P, row = i % TILE_P, address = t * TILE_P + row;
        if (t >= tokens || row >= s.rows) continue;
        const float dy = s.value(C::DY + address), U = sum_partial(s, i);
        dskip = fma_rn(dy, s.value(C::X + address), dskip);
        if (p.dx)
            store_as(p.dx, in.dtype, offset_of(p.dx_stride, s.b, first + t, s.h) + s.p0 + row,
                     fma_rn(s.value(C::DELTA + t), U, skip_of(in, s, row) * dy));
    }
    return dskip;
}

/* Stores a strand's partial sums of dDskip.  If Dskip is per channel, each thread stores its sum; if per head, each
 * warp does. */
template <class C>
GT_DEV void store_dskip(const BackwardParams& p, const Position<C>& s, float dskip) {
    const Problem& in = p.in;
    const int64_t strand = own_strand(in);
    if (in.skip_per_channel) {
        const int row = thread_id() % TILE_P;
        const int64_t to = strand * (C::THREADS / TILE_P) + thread_id() / TILE_P;
        if (row < s.rows) p.dskip[(to * in.H + s.h) * in.P + s.p0 + row] = dskip;
    } else {
        dskip = warp_sum(dskip);
        const int64_t to = (strand * in.tiles + s.tile) * C::WARPS + warp_id();
        if (lane_id() == 0) p.dskip[to * in.H + s.h] = dskip;
    }
}

/* Adds G, the gradient of a sequence's initial state, to the strand's sum. */
template <class C>
GT_DEV void add_dstate(const BackwardParams& p, const Position<C>& s, const float (&G)[8][C::RN]) {
    float* sums = p.dstate_sum + state_of(p.in, s, own_strand(p.in));
    float sum[8][C::RN];
    load_state(p.in, s, sums, sum);
    GT_UNROLL
    for (int i = 0; i < 8; i++) {
        GT_UNROLL
        for (int n = 0; n < C::RN; n++) sum[i][n] += G[i][n];
    }
    store_state(p.in, s, sums, sum);
}

/* Runs one segment backwards.  On entry, G is the gradient of the state after the segment; on return, the gradient of
 * the state before it. */
template <class C>
GT_DEV void backward_segment(const BackwardParams& p, Position<C>& s, const Span& span, float (&G)[8][C::RN],
                             TwoTermSum& dskip_sum) {
    const Problem& in = p.in;
    const int64_t chunks = (span.end - span.first + CHECKPOINT - 1) / CHECKPOINT;
    float v[8];
    for (int64_t chunk = chunks - 1; chunk >= 0; chunk--) {
        const int64_t start = span.first + chunk * CHECKPOINT;
        const int64_t left = s.end - start < CHECKPOINT ? s.end - start : CHECKPOINT;
        const int sub_chunks = (int)((left + SUB_CHUNK - 1) / SUB_CHUNK);
        float dskip = 0.0f;
        park_states(p, s, span.chunk_slot + chunk, start, sub_chunks);
        for (int sub_chunk = sub_chunks - 1; sub_chunk >= 0; sub_chunk--) {
            const int64_t first = start + sub_chunk * SUB_CHUNK;
            const int tokens = tokens_from(s, first);
            s.recall();
            stage_sub_chunk(in, s, first);
            stage_pairs<C, true>(s);
            sync_threads();
            sub_chunk_with_state(p, s, first, parked_state<C>(p, sub_chunk), G);
            sum_over_p(p, s, G, first, C::X, C::WEIGHT, C::B, C::F_PARTS, {C::R, 1, PITCH}, C::C, p.dB);
            load_pair_rows(s, C::DY, -1, v);
            GT_NO_UNROLL
            for (int round = 0; round < tokens; round += C::ROUND) {
                sum_over_n(s, G, round, tokens, C::B, C::SUF, {C::S, 1, PITCH}, v);
                sync_threads();
                if (round == 0) sub_chunk_delta(p, s, first);
                dskip += finish_dx(p, s, first, round, tokens);
                if (round + C::ROUND < tokens) sync_threads();
            }
            update_state(s, G, tokens, C::DY, C::PRE, C::C);
            sync_threads();
        }
        dskip_sum.add(dskip);
    }
}

template <int RN, int WARPS>
GT_KERNEL(32 * WARPS, WARPS > 4 ? 1
                      : RN <= 2 ? 3
                                : 2)
backward_kernel(const GT_GRID_CONSTANT BackwardParams p) {
    using C = Traits<RN, WARPS>;
    const Problem& in = p.in;
    Position<C> s(in);
    float G[8][RN];
    TwoTermSum dskip;
    if (p.dstate_sum) {
        load_state(in, s, nullptr, G);
        store_state(in, s, p.dstate_sum + state_of(in, s, own_strand(in)), G);
    }
    for (int64_t item = own_strand(in); item < items_of(in); item += launched_strands(in)) {
        const Span span = span_at(in.sequences, in.segments.count, CHECKPOINT, item);
        if (!span.exists) continue;
        s.enter(span);
        const float* start = first_state(in, span, p.dstate_out, span.sequence);
        load_state(in, s, start ? start + state_of(in, s, 0) : nullptr, G);
        backward_segment(p, s, span, G, dskip);
        if (!span.starts) continue;
        if (p.dstate_in) store_state(in, s, p.dstate_in + state_of(in, s, span.sequence), G);
        if (p.dstate_sum) add_dstate(p, s, G);
    }
    if (p.dskip) store_dskip(p, s, dskip.value());
}

/* ---- local pass: a segment backwards from a zero gradient --------------------------------------------------------
 * grid, block and shared memory: as in backward_kernel.  From the segment's last sub-chunk to its first, the kernel
 * computes
 *     G <- E G + sum_t pre_t dy_t C_t^T
 * REGISTERS: G, 8 RN values per thread.  BYTES per token and head: dy (and z) 2 P, C 2 N. */
template <int RN, int WARPS>
GT_KERNEL(32 * WARPS, 8 / WARPS)
reverse_states_kernel(const GT_GRID_CONSTANT BackwardParams p) {
    using C = Traits<RN, WARPS>;
    const Problem& in = p.in;
    Position<C> s(in);
    for (int64_t item = own_strand(in); item < items_of(in); item += launched_strands(in)) {
        const Span span = span_at(in.sequences, in.segments.count, CHECKPOINT, item);
        if (skips(p.all_segments ? ALL_SEGMENTS : ALL_BUT_LAST, span, span.starts)) continue;
        s.enter(span);
        float G[8][RN];
        load_state(in, s, nullptr, G);
        for (int64_t sub_chunk = (span.end - span.first - 1) / SUB_CHUNK; sub_chunk >= 0; sub_chunk--) {
            const int64_t first = span.first + sub_chunk * SUB_CHUNK;
            stage_decays(in, s, first);
            stage_dy(in, s, first);
            stage<SUB_CHUNK, C::WIDTH, C::THREADS>(s.address(C::C), group_rows(in, s, in.Cm, in.Cm_stride, first));
            sync_threads();
            s.add_log();
            update_state(s, G, tokens_from(s, first), C::DY, C::PRE, C::C);
            sync_threads();
        }
        store_segment(in, s, span, G);
    }
}

/* ---- part 2: ddt, and the partial sums of dA and ddt_bias ----------------------------------------------------------
 * grid B*windows*ceil(H/32), block 256: a block has a window of 128 tokens and 32 heads, one head per lane.  Warp w
 * takes tokens w, w + 8, ... in order, and the sums of the warps are added in order.  So results are deterministic.
 * registers: the head's parameters and two sums.  shared memory: 2 KB.
 * bytes per token and head: dt, ddt, and 8 for each tile of 64 rows. */

GT_KERNEL(256, 1) backward_delta_kernel(const GT_GRID_CONSTANT DeltaParams p) {
    const Problem& in = p.in;
    const int64_t B = in.sequences.B, T = in.sequences.T, used = used_tokens(in.sequences);
    const int64_t lanes = (in.H + 31) / 32, windows = windows_of(T);
    const int64_t h = block_x() % lanes * 32 + lane_id(), row = block_x() / lanes;
    const int64_t b = row / windows, start = row % windows * CHECKPOINT;
    const int64_t end = start + CHECKPOINT < T ? start + CHECKPOINT : T;
    float dA = 0.0f, dbias = 0.0f;
    for (int64_t t = start + warp_id(); h < in.H && t < end; t += 8) {
        float direct = 0.0f, da = 0.0f;
        if (t >= used) { /* the token belongs to no sequence */
            if (p.ddt) store_as(p.ddt, in.dt_dtype, offset_of(p.ddt_stride, b, t, h), 0.0f);
            continue;
        }
        for (int64_t tile = 0; tile < in.tiles; tile++) {
            const int64_t from = ((tile * B + b) * T + t) * in.H + h;
            direct += p.ddelta[from];
            da += p.da[from];
        }
        const float bias = in.dt_bias ? in.dt_bias[h] : 0.0f;
        const Delta delta = delta_of(in.rule, load_as(in.dt, in.dt_dtype, offset_of(in.dt_stride, b, t, h)) + bias);
        /* multiplies each term by the slope first, because the sum of the bare terms may overflow */
        float ddt = fma_rn(delta.slope * in.A[h], da, delta.slope * direct);
        if (delta.slope == 0.0f) ddt = 0.0f;
        if (p.ddt) store_as(p.ddt, in.dt_dtype, offset_of(p.ddt_stride, b, t, h), ddt);
        dA = fma_rn(delta.value, da, dA);
        dbias += ddt;
    }
    const uint32_t addresses = smem_base();
    sts<float2>(addresses + 8 * thread_id(), float2{dA, dbias});
    sync_threads();
    if (warp_id() != 0 || h >= in.H) return;
    dA = dbias = 0.0f;
    for (int w = 0; w < 8; w++) {
        const float2 sum = lds<float2>(addresses + 8 * (32 * w + lane_id()));
        dA += sum.x;
        dbias += sum.y;
    }
    if (p.dA) p.dA[row * in.H + h] = dA;
    if (p.dbias) p.dbias[row * in.H + h] = dbias;
}

} /* namespace ssd */
} /* namespace gt */

#endif
