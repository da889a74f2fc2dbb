/* gt/wkv4/backward.cuh - wkv4 backward, any size.
 *
 * m = A / B, the weighted mean of the values so far, and l = log B describe the state (gt_wkv4.cuh).  A token has two
 * shares: p = exp(k) / B with B after the token, and r = exp(u + k) / (B + exp(u + k)) with B before it.  (This p is
 * not the exponent p of the forward pass.)  With these shares
 *     y = (1 - r) m + r v        m <- (1 - p) m + p v        l <- log(exp(l + g) + exp(k))
 * Let M = dL/dm and L = dL/dl of the state after the token, and e = v - m for m before the token.  Then
 *     dy' = r (1 - r) e dy       dm' = p (1 - p) e M
 *     dv = r dy + p M            dk = dy' + dm' + p L         du += dy'        dg += (1 - p) L - dm'
 *     M <- (1 - p) M + (1 - r) dy                             L <- (1 - p) L - dm' - dy'
 * The backward formulas have no exponentials: every factor is between 0 and 1, whatever the keys are.  The kernel
 * computes 1 - p and 1 - r as quotients of their own.  As differences they would lose digits if a token has nearly all
 * weight.
 *
 * TILE.  A block is one warp with 32 channels, one channel per lane.  It takes the segments of its strand in turn (see
 * strand_of).  In a segment it goes from the last chunk of CHECKPOINT = 32 tokens to the first, and through each chunk
 * twice:
 *     forwards    from the chunk's checkpoint, token by token: stores p, 1 - p, r, 1 - r and e in shared memory
 *     backwards   takes M and L back through the chunk, and computes dv and dk
 * GRID: strands * ceil(D / 32).
 * SHARED MEMORY: two stages of k, v and dy, 12 KB, or 24 KB in fp32; shares and e, 20 KB.  While a warp computes one
 * chunk, it copies the next one: 6 KB are in flight per warp.
 * REGISTERS: 32 or 56 loaded values, a state, M and L, and sums; 165 in all.
 * ISSUE SLOTS per token and channel: forwards 26, backwards 32.  The special function unit takes 3 of them, 8 clocks
 * each.  B = 8 with D = 2048 gives one warp per scheduler.  In the time that the bytes need, a scheduler has 62 slots
 * per token.
 * BYTES per token and channel, bf16: k, v, dy, dv and dk 2 each; a checkpoint 12 / 32.
 * SEGMENTS.  Through a segment of n tokens, from its end E to its start S, M and L become
 *     M_S = c M_E + x        L_S = c L_E + c (m_S - m_E) M_E + y        c = exp(n g + l_S - l_E)
 * The local pass, over all segments except the first, stores c, c (m_S - m_E), x and y.  The last segment starts from
 * dstate_out, so its x and y are M_S and L_S.  In the final pass each block applies these formulas for all segments
 * after its own.
 * dw and du are summed over a chunk, then over a strand in two terms; reduce_rows adds the strands.  All sums have a
 * fixed order, so results are deterministic. */
#ifndef GT_WKV4_BACKWARD_CUH
#define GT_WKV4_BACKWARD_CUH

#include "problem.cuh"

namespace gt {
namespace wkv4 {

struct BackwardParams {
    Problem in;
    const float *checkpoints, *state_in, *dstate_out;
    int state_in_shared;
    int is_local;      /* the local pass, which writes only segments.states */
    float* dstate_in;  /* NULL if the caller does not want it, or if the sequences share a state */
    float* dstate_sum; /* for a shared state: [strands,3,D], the sum over the sequences of a strand; or NULL */
    void *dk, *dv;
    gt_stride dk_stride, dv_stride;
    float *dw, *du; /* [strands,D] or NULL */
};

/* Layout of shared memory.  A stage has three arrays: k, v and dy.  Behind the stages lie the shares of every token,
 * then e of every token. */
template <class T>
struct BackwardTile {
    static constexpr int ARRAY = CHECKPOINT * Row<T>::BYTES, STAGE = 3 * ARRAY;
    static constexpr int SHARES = 2 * STAGE, DIFFERENCES = SHARES + CHECKPOINT * 4 * Row<float>::BYTES;
    static constexpr int SMEM = DIFFERENCES + CHECKPOINT * Row<float>::BYTES;
};

/* dL/dm and dL/dl of a state. */
struct Gradient {
    float M, L;
};

/* Sums of a channel over tokens. */
struct Sums {
    TwoTermSum dg, du;
    float dstate[3] = {0.0f, 0.0f, 0.0f};
};

/* p, 1 - p, r and 1 - r of a token and channel. */
struct alignas(16) Shares {
    float p, not_p, r, not_r;
};

/* Return the addresses of the shares and of e of token t, for the lane's channel. */
template <class T>
GT_DEV uint32_t shares_at(int t) {
    return smem_base() + (uint32_t)(BackwardTile<T>::SHARES + 16 * (32 * t + lane_id()));
}
template <class T>
GT_DEV uint32_t difference_at(int t) {
    return smem_base() + (uint32_t)(BackwardTile<T>::DIFFERENCES + 4 * (32 * t + lane_id()));
}

/* Goes forwards through COUNT tokens of a chunk, from t on, and stores their shares and e. */
template <class T, bool PLAIN, int COUNT>
GT_DEV void share_tokens(State& s, float& mean, const Channel& c, uint32_t stage, int t) {
    using Tile = BackwardTile<T>;
    constexpr bool EXACT = std::is_same<T, float>::value;
    float k[COUNT], v[COUNT];
    GT_UNROLL
    for (int i = 0; i < COUNT; i++) k[i] = value_at<T>(stage, t + i), v[i] = value_at<T>(stage + Tile::ARRAY, t + i);
    const auto process = [&](auto meet) {
        GT_UNROLL
        for (int i = 0; i < COUNT; i++) {
            Token token;
            meet(token, k[i]);
            s = token.after(v[i]);
            const float inverse = rcp_approx(s.b + FLT_MIN);
            sts<Shares>(shares_at<T>(t + i), {token.weight * inverse, token.b * inverse, token.share, token.others});
            sts<float>(difference_at<T>(t + i), v[i] - mean);
            mean = s.a * inverse;
        }
    };
    if (PLAIN && COUNT > 1 && share_p<EXACT>(s, c, k))
        process([&](Token& token, float key) { token.meet_shared<true, EXACT>(s, c, key); });
    else
        process([&](Token& token, float key) { token.meet<PLAIN, true, EXACT>(s, c, key); });
}

template <class T, bool PLAIN>
GT_DEV void share_chunk(State& s, const Channel& c, uint32_t stage, int tokens) {
    float mean = s.a * rcp_approx(s.b + FLT_MIN);
    int t = 0;
    GT_NO_UNROLL
    for (; t + UNROLL <= tokens; t += UNROLL) share_tokens<T, PLAIN, UNROLL>(s, mean, c, stage, t);
    GT_NO_UNROLL
    for (; t < tokens; t++) share_tokens<T, PLAIN, 1>(s, mean, c, stage, t);
}

/* Addresses of dk and dv of one token, for the lane's channel.  They move back from token to token. */
template <class T>
struct Outputs {
    T *dk, *dv; /* NULL: the caller does not want this gradient */
    int64_t dk_step, dv_step;
};

/* Goes backwards through COUNT tokens from t on.  `out` first points to the token after them.  dg and du are sums over
 * the chunk. */
template <class T, bool WRITES, int COUNT>
GT_DEV void gradient_tokens(Gradient& G, uint32_t dy_at, int t, Outputs<T>& out, float& dg, float& du) {
    Shares x[COUNT];
    float e[COUNT], dy[COUNT];
    T dk[COUNT], dv[COUNT];
    GT_UNROLL
    for (int i = 0; i < COUNT; i++) {
        x[i] = lds<Shares>(shares_at<T>(t + i)), e[i] = lds<float>(difference_at<T>(t + i));
        dy[i] = value_at<T>(dy_at, t + i);
    }
    GT_UNROLL
    for (int i = COUNT - 1; i >= 0; i--) {
        const float of_m = x[i].not_r * dy[i], of_r = x[i].r * (of_m * e[i]);
        const float of_p = x[i].p * x[i].not_p * (e[i] * G.M), left = fma_rn(x[i].not_p, G.L, -of_p);
        if constexpr (WRITES) {
            Element<T>::store(dv, i, fma_rn(x[i].p, G.M, x[i].r * dy[i]));
            Element<T>::store(dk, i, fma_rn(x[i].p, G.L, of_r + of_p));
            du += of_r, dg += left;
        }
        G.M = fma_rn(x[i].not_p, G.M, of_m);
        G.L = left - of_r;
    }
    if constexpr (WRITES) {
        if (out.dv) {
            GT_UNROLL
            for (int i = COUNT - 1; i >= 0; i--) out.dv -= out.dv_step, *out.dv = dv[i];
        }
        if (out.dk) {
            GT_UNROLL
            for (int i = COUNT - 1; i >= 0; i--) out.dk -= out.dk_step, *out.dk = dk[i];
        }
    }
}

constexpr int GRADIENT_UNROLL = 8; /* tokens */

/* Goes backwards through tokens t ... tokens-1 of a chunk. */
template <class T, bool WRITES>
GT_DEV void gradient_chunk(Gradient& G, uint32_t dy_at, int t, int tokens, Outputs<T>& out, Sums& sums) {
    float dg = 0.0f, du = 0.0f;
    GT_NO_UNROLL
    for (; tokens - t >= GRADIENT_UNROLL; tokens -= GRADIENT_UNROLL)
        gradient_tokens<T, WRITES, GRADIENT_UNROLL>(G, dy_at, tokens - GRADIENT_UNROLL, out, dg, du);
    GT_NO_UNROLL
    for (; tokens > t; tokens--) gradient_tokens<T, WRITES, 1>(G, dy_at, tokens - 1, out, dg, du);
    if (WRITES) sums.dg.add(dg), sums.du.add(du);
}

/* Returns the gradients of state_in (a, b and p), from G after the sequence's first token.  If state_in has no weight,
 * m is undefined, but A and B still have gradients, which the first token's k, v and dy determine. */
GT_DEV Three first_gradient(const Channel& c, const Gradient& G, const State& caller, float k, float v, float dy) {
    const State s = caller.a == 0.0f && caller.b == 0.0f ? neutral_state() : caller;
    Token token;
    token.meet<false, true, true>(s, c, k);
    const State after = token.after(v);
    const float inverse = after.b != 0.0f ? 1.0f / after.b : 0.0f;
    const bool has_weight = caller.a != 0.0f || caller.b != 0.0f; /* without weight y is v, whatever p was */
    const float above = (k - s.p) + c.u, less = exp_accurate(above > 0.0f ? -above : 0.0f);
    const float weights = fma_rn(s.b, less, exp_accurate(above > 0.0f ? 0.0f : above));
    const float ratio = has_weight ? less : exp_accurate((caller.p - k) - c.u);
    const float of_y = weights != 0.0f ? ratio * dy / weights : 0.0f, y = fma_rn(token.share, v, token.rest);
    const float scale = exp_accurate((caller.p - token.p) + c.log) * inverse, m = after.a * inverse;
    const float da = fma_rn(scale, G.M, of_y), db = fma_rn(scale, fma_rn(-m, G.M, G.L), -of_y * y);
    const float of_a = caller.a != 0.0f ? caller.a * da : 0.0f, of_b = caller.b != 0.0f ? caller.b * db : 0.0f;
    return {da, db, of_a + of_b};
}

/* How M and L change over a segment: c, c (m_S - m_E), x and y in the formulas at the top of this file.  Stored as
 * [segment slot][4,D]. */
struct Passage {
    float factor, slope, M, L;
};

GT_DEV Passage load_passage(const Problem& in, const Channel& c, int64_t slot) {
    if (!c.exists) return {};
    const float* const from = in.segments.states + slot * 4 * in.D + c.d;
    return {from[0], from[in.D], from[2 * in.D], from[3 * in.D]};
}

GT_DEV void store_passage(const Problem& in, const Channel& c, int64_t slot, const Passage& x) {
    if (!c.exists) return;
    float* const to = in.segments.states + slot * 4 * in.D + c.d;
    to[0] = x.factor, to[in.D] = x.slope, to[2 * in.D] = x.M, to[3 * in.D] = x.L;
}

/* Returns G after a segment: dstate_out, taken back through the segments after this one.  If there are several
 * segments, the local pass saves dstate_out in the slot of the first segment, because dstate_in may be the same
 * array. */
GT_DEV Gradient backward_start(const BackwardParams& p, const Channel& c, const Place& at) {
    const Problem& in = p.in;
    const int64_t first = at.span.segment_slot - at.number;
    Gradient G = {0.0f, 0.0f};
    if (at.number == at.count - 1 && (p.is_local || at.count == 1)) {
        const Three given = load_three(in, c, p.dstate_out, at.span.sequence);
        if (p.is_local) store_passage(in, c, first, {0.0f, 0.0f, given.x, given.z});
        return {given.x, given.z};
    }
    if (p.is_local) return G;
    if (at.number == at.count - 1) {
        const Passage kept = load_passage(in, c, first);
        return {kept.M, kept.L};
    }
    for (int64_t i = at.count - 1; i > at.number; i -= 4) { /* four loads are in flight */
        Passage next[4];
        GT_UNROLL
        for (int j = 0; j < 4; j++) next[j] = load_passage(in, c, first + (i - j > at.number ? i - j : i));
        GT_UNROLL
        for (int j = 0; j < 4; j++) {
            if (i - j <= at.number) continue;
            /* G starts as 0 here, since x and y of the last segment contain dstate_out. */
            G.L = fma_rn(next[j].factor, G.L, fma_rn(next[j].slope, G.M, next[j].L));
            G.M = fma_rn(next[j].factor, G.M, next[j].M);
        }
    }
    return G;
}

/* Returns dstate_in of a sequence without tokens, which is its dstate_out. */
GT_DEV Three passed_gradient(const BackwardParams& p, const Channel& c, const Place& at) {
    return load_three(p.in, c, p.dstate_out, at.span.sequence);
}

GT_DEV void finish_dstate(const BackwardParams& p, const Channel& c, const Place& at, const Three& d, Sums& sums) {
    if (p.dstate_in) store_three(p.in, c, p.dstate_in, at.span.sequence, d.x, d.y, d.z);
    sums.dstate[0] += d.x, sums.dstate[1] += d.y, sums.dstate[2] += d.z;
}

/* Goes backwards through one segment. */
template <class T>
GT_DEV void backward_segment(const BackwardParams& p, const Channel& c, bool is_plain, const Place& at,
                             bool& has_waited, Sums& sums) {
    using Tile = BackwardTile<T>;
    const Problem& in = p.in;
    const Span& span = at.span;
    const int64_t slots = chunk_slots(in.sequences, CHECKPOINT), slot = span.b * slots + span.chunk_slot;
    const int64_t chunks = (span.end - span.first + CHECKPOINT - 1) / CHECKPOINT;
    const auto tokens_of = [&](int64_t chunk) {
        const int64_t left = span.end - span.first - chunk * CHECKPOINT;
        return (int)(left < CHECKPOINT ? left : CHECKPOINT);
    };
    const auto copy = [&](int64_t chunk, int stage) {
        if (chunk >= 0) {
            const int64_t first = span.first + chunk * CHECKPOINT;
            const uint32_t to = smem_base() + (uint32_t)(stage * Tile::STAGE);
            const int tokens = tokens_of(chunk);
            copy_rows<T, CHECKPOINT>(in, c, to, in.k, in.k_stride, span.b, first, tokens);
            copy_rows<T, CHECKPOINT>(in, c, to + Tile::ARRAY, in.v, in.v_stride, span.b, first, tokens);
            copy_rows<T, CHECKPOINT>(in, c, to + 2 * Tile::ARRAY, in.dy, in.dy_stride, span.b, first, tokens);
        }
        cp_async_commit();
    };
    copy(chunks - 1, 0);
    if (!has_waited) wait_for_chain(); /* inputs of the call need no wait */
    has_waited = true;
    State next = load_state(in, c, p.checkpoints, slot + chunks - 1), start = next, end = next;
    Gradient G = backward_start(p, c, at);
    int stage = 0;
    GT_NO_UNROLL
    for (int64_t chunk = chunks - 1; chunk >= 0; chunk--, stage ^= 1) {
        const uint32_t tile = smem_base() + (uint32_t)(stage * Tile::STAGE);
        const int tokens = tokens_of(chunk);
        start = next;
        cp_async_wait<0>();
        sync_warp(); /* all lanes see the tile, and no lane reads the previous tile any more */
        copy(chunk - 1, stage ^ 1);
        if (chunk > 0) next = load_state(in, c, p.checkpoints, slot + chunk - 1);
        State s = start;
        if (is_plain)
            share_chunk<T, true>(s, c, tile, tokens);
        else
            share_chunk<T, false>(s, c, tile, tokens);
        if (chunk == chunks - 1) end = s;
        const uint32_t dy_at = tile + 2 * Tile::ARRAY;
        if (p.is_local) {
            Outputs<T> none = {};
            gradient_chunk<T, false>(G, dy_at, 0, tokens, none, sums);
            continue;
        }
        const int64_t behind = span.first + chunk * CHECKPOINT + tokens;
        Outputs<T> out = {nullptr, nullptr, p.dk_stride.t, p.dv_stride.t};
        if (p.dk && c.exists) out.dk = static_cast<T*>(p.dk) + offset_of(p.dk_stride, span.b, behind, c.d);
        if (p.dv && c.exists) out.dv = static_cast<T*>(p.dv) + offset_of(p.dv_stride, span.b, behind, c.d);
        const bool is_first = span.starts && chunk == 0 && (p.dstate_in || p.dstate_sum);
        if (is_first) {
            gradient_chunk<T, true>(G, dy_at, 1, tokens, out, sums);
            const State given = load_state(in, c, p.state_in, p.state_in_shared ? 0 : span.sequence);
            finish_dstate(p, c, at,
                          first_gradient(c, G, given, value_at<T>(tile, 0), value_at<T>(tile + Tile::ARRAY, 0),
                                         value_at<T>(dy_at, 0)),
                          sums);
        }
        gradient_chunk<T, true>(G, dy_at, 0, is_first ? 1 : tokens, out, sums);
    }
    cp_async_wait<0>();
    sync_warp(); /* all lanes have read the tiles, which copies of the next segment overwrite */
    if (!p.is_local) return;
    const float log = (start.p - end.p) + (float)(span.end - span.first) * c.log;
    const float factor = end.b != 0.0f ? exp_accurate(log) * (start.b / end.b) : 1.0f;
    const float moved = start.a * rcp_approx(start.b + FLT_MIN) - end.a * rcp_approx(end.b + FLT_MIN);
    store_passage(in, c, span.segment_slot, {factor, factor * moved, G.M, G.L});
}

template <class T>
GT_KERNEL(32, 12)
backward_kernel(const GT_GRID_CONSTANT BackwardParams p) {
    const Problem& in = p.in;
    const Channel c = channel_of(in, block_x() % in.tiles * CHANNELS + lane_id());
    const bool is_plain = has_plain_bonus(c);
    bool has_waited = false;
    Sums sums;
    for (int64_t item = strand_of(in); item < items_of(in); item += strands_of(in)) {
        const Place at = place_of(in, item);
        if (skips(p.is_local ? ALL_BUT_LAST : NOT_LOCAL, at.span, at.span.starts)) continue;
        if (at.span.first < at.span.end) {
            backward_segment<T>(p, c, is_plain, at, has_waited, sums);
            continue;
        }
        if (!has_waited) wait_for_chain();
        has_waited = true;
        if (!p.is_local) finish_dstate(p, c, at, passed_gradient(p, c, at), sums);
    }
    if (!has_waited) wait_for_chain();
    if (p.is_local || !c.exists) return;
    const int64_t row = strand_of(in) * in.D + c.d;
    if (p.dw) p.dw[row] = c.slope * sums.dg.value();
    if (p.du) p.du[row] = sums.du.value();
    if (p.dstate_sum) store_three(in, c, p.dstate_sum, strand_of(in), sums.dstate[0], sums.dstate[1], sums.dstate[2]);
}

} /* namespace wkv4 */
} /* namespace gt */

#endif
