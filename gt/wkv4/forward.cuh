/* gt/wkv4/forward.cuh - wkv4 forward, any size: token by token.
 *
 *     y = share v + rest,  share = e / (b' + e),  rest = a' / (b' + e),  e = exp(k + u + g - p)
 *     a <- a' + exp(k - p) v,  b <- b' + exp(k - p)
 * a' and b' are the decayed state in units of exp(p), with the new p = max(p, k).
 *
 * TILE.  A block is one warp with 32 channels, one channel per lane.  It takes the segments of its strand in turn (see
 * strand_of), in tiles of TOKENS tokens, 4 KB of k and v: 32 tokens, or 16 in fp32.  No warp waits for another.
 * GRID: strands * ceil(D / 32).
 * SHARED MEMORY: STAGES tiles, 12 KB.  While a warp reads one tile, cp.async fills STAGES - 1 others: 8 KB per warp.
 * With 4 warps on each of 132 multiprocessors, 4 MB are in flight.  At 4.8 TB/s this covers a latency of 0.9
 * microseconds.
 * REGISTERS: 32 loaded values, a state, and the parameters of a channel; 108 in all.
 * ISSUE SLOTS per token and channel: loads and conversions 4, one exponential 3, a and b 4, y 7, its store 4; p and its
 * check 3 (see share_p); together 25.  Copies and the checkpoint of a tile add 8.  The special function unit takes 2 of
 * them, 8 clocks each.  B = 8 with D = 2048 gives 512 warps, one per scheduler.  Alone there, a warp issues an
 * instruction every 2.3 clocks, so a token takes 76 clocks; its bytes take 41.
 * BYTES per token and channel, bf16: k, v and y 2 each; a checkpoint 12 / 32.
 * SEGMENTS.  If there are few channels, sequences are cut into segments, and forward makes two launches.  The local
 * pass stores the end state of every segment except the last.  In the local pass the first segment starts from
 * state_in, every other segment from a neutral state.  In the final pass each block joins the states of the segments
 * before its own, in order; these are a few KB in the L2.  The final pass finds k and v in the L2, too, if they fit
 * there.
 * A lane processes the tokens of its channel one after another, so results are deterministic. */
#ifndef GT_WKV4_FORWARD_CUH
#define GT_WKV4_FORWARD_CUH

#include "problem.cuh"

namespace gt {
namespace wkv4 {

struct ForwardParams {
    Problem in;
    void* y; /* NULL: the caller wants only states */
    gt_stride y_stride;
    const float* state_in;
    float *state_out, *checkpoints; /* checkpoints [B,chunk slots,3,D] */
    int state_in_shared;
    int is_local; /* the local pass, which writes only segments.states */
};

template <class T>
struct ForwardTile {
    static constexpr int TOKENS = 64 / (int)sizeof(T), STAGES = 3;
    static constexpr int ARRAY = TOKENS * Row<T>::BYTES, STAGE = 2 * ARRAY; /* k, then v */
};

constexpr int FORWARD_SMEM = 3 * 4096;

/* Returns the first state of a segment: joins state_in and the end states of the segments before it.  If there are
 * several segments, the local pass saves state_in in the slot of the last segment.  state_out may be the same array as
 * state_in, so the final pass may overwrite state_in before another block has read it. */
GT_DEV State forward_start(const ForwardParams& p, const Channel& c, const Place& at) {
    const Problem& in = p.in;
    const int64_t first = at.span.segment_slot - at.number, kept = first + at.count - 1;
    if (at.number == 0 && (p.is_local || at.count == 1)) {
        const State s = load_state_in(in, c, p.state_in, p.state_in_shared ? 0 : at.span.sequence);
        if (p.is_local) store_three(in, c, in.segments.states, kept, s.a, s.b, s.p);
        return s;
    }
    if (at.number == 0) return load_state(in, c, in.segments.states, kept);
    if (p.is_local) return neutral_state();
    const float log = (float)at.length * c.log;
    State s = load_state(in, c, in.segments.states, first);
    for (int64_t i = 1; i < at.number; i += 4) { /* four loads are in flight */
        State next[4];
        GT_UNROLL
        for (int j = 0; j < 4; j++)
            next[j] = load_state(in, c, in.segments.states, first + (i + j < at.number ? i + j : i));
        GT_UNROLL
        for (int j = 0; j < 4; j++)
            if (i + j < at.number) s = join(s, log, next[j]);
    }
    return s;
}

/* Processes COUNT tokens of a tile from t on, and advances y.  The function stores y after all COUNT tokens, because a
 * branch between two tokens would stop the compiler from interleaving their instructions. */
template <class T, bool PLAIN, bool HAS_Y, int COUNT>
GT_DEV void forward_tokens(State& s, const Channel& c, uint32_t k_at, uint32_t v_at, int t, T*& y, int64_t y_step) {
    constexpr bool EXACT = std::is_same<T, float>::value;
    float k[COUNT], v[COUNT];
    T made[COUNT];
    GT_UNROLL
    for (int i = 0; i < COUNT; i++) k[i] = value_at<T>(k_at, t + i), v[i] = value_at<T>(v_at, t + i);
    const auto process = [&](auto meet) {
        GT_UNROLL
        for (int i = 0; i < COUNT; i++) {
            Token token;
            meet(token, k[i]);
            if (HAS_Y) Element<T>::store(made, i, fma_rn(token.share, v[i], token.rest));
            s = token.after(v[i]);
        }
    };
    if (PLAIN && COUNT > 1 && share_p<EXACT>(s, c, k))
        process([&](Token& token, float key) { token.meet_shared<HAS_Y, EXACT>(s, c, key); });
    else
        process([&](Token& token, float key) { token.meet<PLAIN, HAS_Y, EXACT>(s, c, key); });
    if constexpr (HAS_Y) {
        if (!c.exists) return;
        GT_UNROLL
        for (int i = 0; i < COUNT; i++, y += y_step) *y = made[i];
    }
}

template <class T, bool PLAIN, bool HAS_Y>
GT_DEV void forward_tile(State& s, const Channel& c, uint32_t tile, int tokens, T* y, int64_t y_step) {
    const uint32_t v_at = tile + ForwardTile<T>::ARRAY;
    int t = 0;
    GT_NO_UNROLL
    for (; t + UNROLL <= tokens; t += UNROLL) forward_tokens<T, PLAIN, HAS_Y, UNROLL>(s, c, tile, v_at, t, y, y_step);
    GT_NO_UNROLL
    for (; t < tokens; t++) forward_tokens<T, PLAIN, HAS_Y, 1>(s, c, tile, v_at, t, y, y_step);
}

/* Copies state_in to state_out for a sequence without tokens. */
GT_DEV void pass_state(const ForwardParams& p, const Channel& c, const Place& at) {
    if (!p.state_out || p.is_local) return;
    const Three x = load_three(p.in, c, p.state_in, p.state_in_shared ? 0 : at.span.sequence);
    store_three(p.in, c, p.state_out, at.span.sequence, x.x, x.y, x.z);
}

template <class T>
GT_KERNEL(32, 16)
forward_kernel(const GT_GRID_CONSTANT ForwardParams p) {
    using Tile = ForwardTile<T>;
    constexpr int TOKENS = Tile::TOKENS, STAGES = Tile::STAGES;
    const Problem& in = p.in;
    const Channel c = channel_of(in, block_x() % in.tiles * CHANNELS + lane_id());
    const bool is_plain = has_plain_bonus(c);
    const int64_t slots = chunk_slots(in.sequences, CHECKPOINT);
    bool has_waited = false;
    for (int64_t item = strand_of(in); item < items_of(in); item += strands_of(in)) {
        const Place at = place_of(in, item);
        const Span& span = at.span;
        if (skips(p.is_local ? ALL_BUT_LAST : NOT_LOCAL, span, span.ends)) continue;
        if (span.first == span.end) {
            if (!has_waited) wait_for_chain();
            has_waited = true;
            pass_state(p, c, at);
            continue;
        }
        const auto copy = [&](int64_t first, int stage) {
            if (first < span.end) {
                const int tokens = (int)(span.end - first < TOKENS ? span.end - first : TOKENS);
                const uint32_t to = smem_base() + (uint32_t)(stage * Tile::STAGE);
                copy_rows<T, TOKENS>(in, c, to, in.k, in.k_stride, span.b, first, tokens);
                copy_rows<T, TOKENS>(in, c, to + Tile::ARRAY, in.v, in.v_stride, span.b, first, tokens);
            }
            cp_async_commit();
        };
        GT_UNROLL
        for (int i = 0; i < STAGES - 1; i++) copy(span.first + i * TOKENS, i);
        if (!has_waited) wait_for_chain(); /* inputs of the call need no wait */
        has_waited = true;
        State s = forward_start(p, c, at);
        int stage = 0;
        GT_NO_UNROLL
        for (int64_t first = span.first; first < span.end; first += TOKENS) {
            const int tokens = (int)(span.end - first < TOKENS ? span.end - first : TOKENS);
            cp_async_wait<STAGES - 2>();
            sync_warp(); /* all lanes see the tile, and no lane reads the previous tile any more */
            copy(first + (STAGES - 1) * TOKENS, stage == 0 ? STAGES - 1 : stage - 1);
            normalise(s);
            if (p.checkpoints && (first - span.first) % CHECKPOINT == 0)
                store_three(in, c, p.checkpoints, span.b * slots + span.chunk_slot + (first - span.first) / CHECKPOINT,
                            s.a, s.b, s.p);
            const uint32_t tile = smem_base() + (uint32_t)(stage * Tile::STAGE);
            T* const y = static_cast<T*>(p.y) + (p.y ? offset_of(p.y_stride, span.b, first, c.d) : 0);
            if (!p.y)
                forward_tile<T, true, false>(s, c, tile, tokens, y, 0);
            else if (is_plain)
                forward_tile<T, true, true>(s, c, tile, tokens, y, p.y_stride.t);
            else
                forward_tile<T, false, true>(s, c, tile, tokens, y, p.y_stride.t);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        cp_async_wait<0>();
        sync_warp(); /* all lanes have read the tiles, which copies of the next segment overwrite */
        if (p.is_local) {
            normalise(s);
            store_three(in, c, in.segments.states, span.segment_slot, s.a, s.b, s.p);
        } else if (p.state_out && span.ends) {
            const Three x = state_of_caller(s);
            store_three(in, c, p.state_out, span.sequence, x.x, x.y, x.z);
        }
    }
    if (!has_waited) wait_for_chain();
}

} /* namespace wkv4 */
} /* namespace gt */

#endif
