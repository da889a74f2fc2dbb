/* gt/ssd/any/forward.cuh - ssd forward, any size and dtype.
 *
 * A block owns 64 rows of one head's state for a whole segment.  It takes the segment a sub-chunk of 16 tokens at a
 * time.  For each sub-chunk it stages x, B, C, silu(z) and the decays in shared memory, and then computes:
 *
 *     S_ts = <C_t, B_s> L_ts.
 *     y_t = pre_t C_t h + sum_s S_ts Delta_s x_s + Dskip x_t, times silu(z).
 *     h <- E h + sum_s Delta_s suf_s x_s B_s^T
 *
 * REGISTERS per thread: 8 RN for h (64 at N = 128), and up to 32 for the sum that a sub-chunk adds to h.
 * SHARED MEMORY: x, B, C, z, S_ts, the decays and the sums over n.  In all 19.4 KB for N up to 16, 33.4 KB for N up to
 * 128, and 49.4 KB for N up to 256.
 * ARITHMETIC per token and head: 2 P N multiply-adds on the state, and 16 N + 16 P within the sub-chunk.  The sums over
 * n take 3 P N / (4 RN) lane shuffles.
 * BYTES per token and head, bf16: x, y (and z) 2 P each; B and C together 4 N from L2; checkpoints P N / 32.
 * grid: strands*H*tiles; block 128, 256 for N > 128.  Every sum has one fixed order, so results are deterministic. */
#ifndef GT_SSD_ANY_FORWARD_CUH
#define GT_SSD_ANY_FORWARD_CUH

#include "block.cuh"

namespace gt {
namespace ssd {

/* Finishes y of ROUND tokens from token `round` on.  Their partial sums lie in PARTIAL. */
template <class C>
GT_DEV void finish_y(const ForwardParams& p, const Position<C>& s, int64_t first, int round, int tokens) {
    const Problem& in = p.in;
    GT_NO_UNROLL
    for (int i = thread_id(); i < C::ROUND * TILE_P; i += C::THREADS) {
        const int t = round + i / TILE_P, row = i % TILE_P, address = t * TILE_P + row;
        if (t >= tokens || row >= s.rows) continue;
        float y = fma_rn(skip_of(in, s, row), s.value(C::X + address), sum_partial(s, i));
        if (in.z) y *= s.value(C::GATE + address);
        store_as(p.y, in.dtype, offset_of(p.y_stride, s.b, first + t, s.h) + s.p0 + row, y);
    }
}

/* Stores silu(z) of a sub-chunk to GATE.  The code takes half of the tokens at a time, to save registers. */
template <class C>
GT_DEV void stage_gate(const Problem& in, const Position<C>& s, int64_t first) {
    using Half = Tile<SUB_CHUNK / 2, TILE_P, C::THREADS>;
    GT_NO_UNROLL
    for (int row = 0; row < SUB_CHUNK; row += SUB_CHUNK / 2) {
        Half z;
        z.load(head_rows(in, s, in.z, in.z_stride, first).after(row));
        GT_UNROLL
        for (int k = 0; k < Half::COUNT; k++)
            sts<float>(s.address(C::GATE + row * TILE_P + Half::index(k)), silu(z.value(k)));
    }
}

/* Stores the state after a segment's first `tokens` tokens, if a snapshot is due.  tokens: INT32_MAX at the segment's
 * end. */
template <class C>
GT_DEV void keep_snapshot(const ForwardParams& p, const Position<C>& s, int64_t item, int tokens,
                          float (&state)[8][C::RN]) {
    const Span span = span_at(p.in.sequences, p.in.segments.count, CHECKPOINT, item);
    float* const to = snapshot_row(p.in, p.snapshots, span, tokens);
    if (to) store_state(p.in, s, to + state_of(p.in, s, 0), state);
}

/* Runs segment number `item`, in the numbering of all sequences' segments. */
template <class C>
GT_DEV void forward_segment(const ForwardParams& p, Position<C>& s, int64_t item) {
    const Problem& in = p.in;
    const Span span = span_at(in.sequences, in.segments.count, CHECKPOINT, item);
    if (skips(p.is_local, span, span.ends)) return;
    const int sub_chunks = (int)((span.end - span.first + SUB_CHUNK - 1) / SUB_CHUNK);
    s.enter(span);

    float state[8][C::RN];
    const float* start = nullptr;
    if (!p.is_local) start = first_state(in, span, p.state_in, p.state_in_shared ? 0 : span.sequence);
    load_state(in, s, start ? start + state_of(in, s, 0) : nullptr, state);
    for (int sub_chunk = 0; sub_chunk < sub_chunks; sub_chunk++) {
        const int64_t first = s.recall() + sub_chunk * SUB_CHUNK;
        if (p.keeps_checkpoints && sub_chunk % SUB_CHUNKS == 0) {
            const int64_t slots = chunk_slots(in.sequences, CHECKPOINT);
            const int64_t slot = (s.b * in.H + s.h) * slots + s.chunk_slot() + sub_chunk / SUB_CHUNKS;
            store_checkpoint(in, s, p.checkpoints, slot, state);
        }
        if (p.snapshots.data && sub_chunk > 0 && sub_chunk % SUB_CHUNKS == 0)
            keep_snapshot(p, s, item, sub_chunk * SUB_CHUNK, state);
        const int tokens = tokens_from(s, first);
        stage_decays(in, s, first);
        stage<SUB_CHUNK, TILE_P, C::THREADS>(s.address(C::X), head_rows(in, s, in.x, in.x_stride, first));
        stage<SUB_CHUNK, C::WIDTH, C::THREADS>(s.address(C::B), group_rows(in, s, in.Bm, in.Bm_stride, first));
        if (p.y) {
            stage<SUB_CHUNK, C::WIDTH, C::THREADS>(s.address(C::C), group_rows(in, s, in.Cm, in.Cm_stride, first));
            if (in.z) stage_gate(in, s, first);
        }
        sync_threads();
        if (p.is_local) s.add_log();
        if (p.y) {
            stage_pairs<C, false>(s);
            sync_threads();
            float v[8];
            load_pair_rows(s, C::X, C::DELTA, v);
            GT_NO_UNROLL
            for (int round = 0; round < tokens; round += C::ROUND) {
                sum_over_n(s, state, round, tokens, C::C, C::PRE, {C::S, PITCH, 1}, v);
                sync_threads();
                finish_y(p, s, first, round, tokens);
                if (round + C::ROUND < tokens) sync_threads();
            }
        }
        update_state(s, state, tokens, C::X, C::WEIGHT, C::B);
        sync_threads();
    }
    if (p.snapshots.data) keep_snapshot(p, s, item, INT32_MAX, state);
    const Span same = span_at(in.sequences, in.segments.count, CHECKPOINT, item); /* computed again, because no
                                                                                   * registers are left to keep it */
    if (p.is_local) {
        store_segment(in, s, same, state);
    } else if (same.ends) {
        float* const end = last_state(in, p.state_out, same.sequence);
        if (end) store_state(in, s, end + state_of(in, s, 0), state);
    }
}

template <int RN, int WARPS>
GT_KERNEL(32 * WARPS, WARPS > 4 ? 1
                      : RN == 8 ? 4
                                : 3)
forward_kernel(const GT_GRID_CONSTANT ForwardParams p) {
    Position<Traits<RN, WARPS>> s(p.in);
    for (int64_t item = own_strand(p.in); item < items_of(p.in); item += launched_strands(p.in))
        forward_segment(p, s, item);
}

} /* namespace ssd */
} /* namespace gt */

#endif
