/* gt/wkv6/prepare.cuh - the producer warps of a pass.  They copy r, k, w and v some sub-chunks ahead, and convert a
 * sub-chunk to the operands R, K and E of the consumer warps.  forward.cuh defines these operands.
 * STATES (TensorTraits): the pass computes only states.  A quad is the 8 lanes that have the same TOKENS tokens. */
#ifndef GT_WKV6_PREPARE_CUH
#define GT_WKV6_PREPARE_CUH

#include "pass.cuh"

namespace gt {
namespace wkv6 {

/* ---- copies ------------------------------------------------------------------------------------------------- */

/* A producer lane's part of a step (TensorTraits::STEP): 2 channels of TOKENS tokens, and pieces of v. */
template <class C>
struct RawSubChunk {
    Pair<typename C::T> r[C::TOKENS], k[C::TOKENS];
    Pair<typename C::W> w[C::TOKENS];
    uint4 v[C::template Copies<typename C::T>::PIECES];
};

/* The pieces of one tensor that a producer lane copies: 16 bytes of one token in each sub-chunk or step. */
struct Source {
    const char* before; /* address of the previous piece; copy() advances it first, which delays no copy */
    int64_t sub_chunk_bytes;

    /* first: the first token of the first sub-chunk.  tokens: the distance from one copied token to the next.  If data
     * is NULL, `before` stays NULL. */
    GT_METHOD void set(const void* data, gt_stride at_, int element, int64_t b, int64_t h, int64_t first, int row,
                       int column, int tokens) {
        sub_chunk_bytes = data ? tokens * at_.t * element : 0;
        before = static_cast<const char*>(data);
        if (before) before += (b * at_.b + h * at_.h + (first + row) * at_.t + column) * element - sub_chunk_bytes;
    }

    GT_METHOD void copy(uint32_t to, bool exists, bool inside) {
        before += sub_chunk_bytes;
        if (exists) cp_async<16>(to, before, inside ? 16 : 0);
    }
};

/* Returns the offset in elements from the start of a tensor in the ring to a token.  Tokens i of the four quads lie in
 * different banks. */
template <class C>
GT_DEV int ring_at(int token) {
    return token * C::WIDTH + token / C::TOKENS * 16;
}

/* A lane of a producer warp, with its position and addresses. */
template <class C>
struct Producer {
    int quad, channel; /* the lane's tokens start at TOKENS quad; its channels are channel and channel + 1 */
    int group;         /* channel / 16 */
    uint32_t r_fragment, k_row, values, bonus, scale; /* where the lane stores, as addresses in buffer 0 */
    uint32_t buffer0, ring;
    int tokens; /* tokens of the span; 0 if there is no span */
    using T = typename C::T;
    using W = typename C::W;
    static constexpr int PIECES = C::template Copies<T>::PIECES, W_PIECES = C::template Copies<W>::PIECES;
    Source r[PIECES], k[PIECES], v[PIECES], w[W_PIECES]; /* pieces of 16 bytes */
    float u0, u1;
    float neg_log2[2], neg_log2_lo[2]; /* -log2 of the decay so far, and the rounding errors of this sum */
    bool raw;                          /* decay = exp(-exp(w)) */
    float log2_scale;                  /* log2 of the scale of y, which multiplies r in the reverse pass */

    /* Sets the sources to the span's tensors, from token `first` on.  step: the number of tokens from one copy to the
     * next. */
    GT_METHOD void open(const Problem& in, const HeadSpan& span, int64_t first, int step) {
        constexpr int ELEMENT = sizeof(T);
        const int64_t b = span.b, h = span.h;
        const int channel0 = C::STATES ? 0 : 16 * group; /* first channel of the ring */
        tokens = span.tokens;
        GT_UNROLL
        for (int i = 0; i < PIECES; i++) {
            const int row = copied_row<T>(i), column = channel0 + copied_column<T>();
            r[i].set(in.r, in.r_stride, ELEMENT, b, h, first, row, column, step);
            k[i].set(in.k, in.k_stride, ELEMENT, b, h, first, row, column, step);
            v[i].set(in.v, in.v_stride, ELEMENT, b, h, first, v_row(i), v_column(i), step);
        }
        GT_UNROLL
        for (int i = 0; i < W_PIECES; i++)
            w[i].set(in.w, in.w_stride, sizeof(W), b, h, first, copied_row<W>(i), channel0 + copied_column<W>(), step);
        u0 = in.u ? in.u[h * C::N + channel] : 0.0f;
        u1 = in.u ? in.u[h * C::N + channel + 1] : 0.0f;
        raw = in.decay == GT_DECAY_RAW;
        log2_scale = in.log2_scale;
    }

    /* Starts to copy the next sub-chunk; the sources advance in the direction of the pass.  Tokens beyond the span
     * become 0. */
    GT_METHOD void copy(int sub_chunk, bool exists, int stage) {
        const uint32_t to = ring + stage * C::STAGE;
        const int left = tokens - sub_chunk * C::STEP;
        if (C::STATES || exists) { /* advancing a source past the end costs less than a condition */
            GT_UNROLL
            for (int i = 0; i < PIECES; i++) {
                const int row = copied_row<T>(i);
                const uint32_t address = to + (int)sizeof(T) * (ring_at<C>(row) + copied_column<T>());
                if (!C::STATES) r[i].copy(address + C::RING_R, exists, row < left);
                k[i].copy(address + C::RING_K, exists, row < left);
                v[i].copy(to + C::RING_V + v_fragment(i), exists, v_row(i) < left);
            }
            GT_UNROLL
            for (int i = 0; i < W_PIECES; i++) {
                const int row = copied_row<W>(i);
                const uint32_t address = to + (int)sizeof(W) * (ring_at<C>(row) + copied_column<W>());
                w[i].copy(address + C::RING_W, exists, row < left);
            }
        }
        cp_async_commit();
    }

    /* For r, k or w with elements of type E: copied_row() is the token of the lane's i-th piece, copied_column() the
     * first channel of the piece in a row of the ring. */
    GT_METHOD int lane_in_team() const { return C::STATES ? 32 * group + lane_id() : lane_id(); }
    template <class E>
    GT_METHOD int copied_row(int i) const {
        return lane_in_team() / C::template Copies<E>::LANES + i * C::template Copies<E>::ROWS;
    }
    template <class E>
    GT_METHOD int copied_column() const {
        return lane_in_team() % C::template Copies<E>::LANES * (16 / (int)sizeof(E));
    }
    GT_METHOD int v_fragment(int i) const { return 16 * (lane_in_team() + 32 * C::TEAM * i); }

    /* Returns log2 of a channel's decay so far.  If the sum is infinite, its low part is left out, because it is
     * NaN. */
    GT_METHOD float log2_decay(int e) const {
        return C::TF32X3 && neg_log2[e] < 1e30f ? -neg_log2[e] - neg_log2_lo[e] : -neg_log2[e];
    }

    /* Token and first value of the lane's i-th piece of v.  In fp32, half a warp copies 8 pieces of each of a
     * fragment's two tokens. */
    GT_METHOD int v_row(int i) const {
        if constexpr (!C::TF32X3) return (32 * group + lane_id()) / (C::N / 8) + SUB_CHUNK * i;
        const int second = lane_id() / 8 % 2;
        if constexpr (C::N == 32) return 8 * group + lane_id() / 16 * 4 + second + 2 * i;
        return 256 / C::N * group + second + (C::N == 64 ? 2 * i : 0);
    }
    GT_METHOD int v_column(int i) const {
        if constexpr (!C::TF32X3) return (32 * group + lane_id()) % (C::N / 8) * 8;
        if constexpr (C::N == 32) return lane_id() % 8 * 4;
        return (lane_id() % 8 + lane_id() / 16 * 8) * 4 + (C::N == 128 ? 64 * i : 0);
    }

    /* Loads the lane's part of a sub-chunk that has arrived. */
    GT_METHOD RawSubChunk<C> read(int stage) const {
        const uint32_t from = ring + stage * C::STAGE;
        constexpr int SIZE = sizeof(typename C::T), W_SIZE = sizeof(typename C::W);
        const int own = ring_at<C>(C::TOKENS * quad) + (C::STATES ? 16 * group : 0) + lane_id() % 8 * 2;
        const uint32_t rows = from + SIZE * own, w_rows = from + C::RING_W + W_SIZE * own;
        RawSubChunk<C> x = {};
        GT_UNROLL
        for (int i = 0; i < C::TOKENS; i++) {
            if (!C::STATES) x.r[i] = lds<Pair<typename C::T>>(rows + C::RING_R + SIZE * C::WIDTH * i);
            x.k[i] = lds<Pair<typename C::T>>(rows + C::RING_K + SIZE * C::WIDTH * i);
            x.w[i] = lds<Pair<typename C::W>>(w_rows + W_SIZE * C::WIDTH * i);
        }
        if (!C::STATES) read_values(x, stage);
        return x;
    }

    /* STATES: loads v later than r, k and w, when registers are free. */
    GT_METHOD void read_values(RawSubChunk<C>& x, int stage) const {
        GT_UNROLL
        for (int i = 0; i < PIECES; i++) x.v[i] = lds<uint4>(ring + stage * C::STAGE + C::RING_V + v_fragment(i));
    }
};

/* ---- decays, and sums over a sub-chunk --------------------------------------------------------------------------- */

/* Computes h, -log2 of the lane's decays; 0 for tokens beyond the span. */
template <class C>
GT_DEV void decay_bits(const Producer<C>& me, const RawSubChunk<C>& x, int sub_chunk, float (&h)[C::TOKENS][2]) {
    if (me.raw) {
        GT_UNROLL
        for (int i = 0; i < C::TOKENS; i++) {
            h[i][0] = bits_of_raw(x.w[i].lo());
            h[i][1] = bits_of_raw(x.w[i].hi());
        }
    } else {
        GT_UNROLL
        for (int i = 0; i < C::TOKENS; i++) {
            h[i][0] = -x.w[i].lo() * LOG2_E;
            h[i][1] = -x.w[i].hi() * LOG2_E;
        }
    }
    const int left = me.tokens - sub_chunk * C::STEP;
    if (left < C::STEP) {
        GT_UNROLL
        for (int i = 0; i < C::TOKENS; i++)
            if (C::TOKENS * me.quad + i >= left) h[i][0] = h[i][1] = 0.0f;
    }
}

/* Returns the sum of one channel over the lane's tokens, added pair by pair. */
template <int TOKENS>
GT_DEV float sum_of(const float (&h)[TOKENS][2], int e) {
    float sum[TOKENS / 2];
    GT_UNROLL
    for (int i = 0; i < TOKENS / 2; i++) sum[i] = h[2 * i][e] + h[2 * i + 1][e];
    GT_UNROLL
    for (int left = TOKENS / 4; left > 0; left /= 2) {
        GT_UNROLL
        for (int i = 0; i < left; i++) sum[i] = sum[2 * i] + sum[2 * i + 1];
    }
    return sum[0];
}

/* Sums the bonus of a quad's 4 tokens over its 8 lanes.  Each lane gets only the sum of token bonus_token(), so 4
 * tokens take 4 shuffles instead of 12. */
GT_DEV float sum_bonus(const float (&bonus)[4]) {
    const bool upper = lane_id() & 1, odd = lane_id() & 2;
    float a = upper ? bonus[2] : bonus[0], b = upper ? bonus[3] : bonus[1];
    a += shfl_xor(upper ? bonus[0] : bonus[2], 1);
    b += shfl_xor(upper ? bonus[1] : bonus[3], 1);
    float sum = odd ? b : a;
    sum += shfl_xor(odd ? a : b, 2);
    return sum + shfl_xor(sum, 4);
}

GT_DEV int bonus_token() { return (lane_id() & 1) * 2 + (lane_id() >> 1 & 1); }

/* ---- operands of forward ------------------------------------------------------------------------------------ */

/* The strong-decay path of one group.  It computes K with the decays after each token and passes K to store_key.  With
 * MAKES_Y it also computes the group's part of A.  For A it loads r and k from the ring again, and stores the decays
 * there over w and v. */
template <class C, class StoreKey>
GT_DEV void prepare_strong_decay(const Producer<C>& me, const RawSubChunk<C>& x, const float (&h)[4][2], int buffer,
                                 int stage, StoreKey store_key) {
    static_assert(C::STAGE - C::RING_W >= 4 * SUB_CHUNK * SUB_CHUNK, "room for the decays");
    using E = Element<typename C::T>;
    constexpr int SIZE = sizeof(typename C::T);
    const uint32_t from = me.ring + stage * C::STAGE, decays = from + C::RING_W;
    float after[2];
    GT_UNROLL
    for (int e = 0; e < 2; e++) after[e] = sum_later_quads(h[0][e] + h[1][e] + h[2][e] + h[3][e], me.quad);
    sync_warp(); /* all lanes have read w and v of the stage */
    GT_UNROLL
    for (int i = 3; i >= 0; i--) {
        float2 k;
        k.x = stored_operand<C>(x.k[i].lo() * ex2_approx(-after[0]));
        k.y = stored_operand<C>(x.k[i].hi() * ex2_approx(-after[1]));
        store_key(i, k);
        after[0] += h[i][0];
        after[1] += h[i][1];
        if constexpr (!C::MAKES_Y) continue;
        sts<float2>(decays + 4 * (SUB_CHUNK * (4 * me.quad + i) + lane_id() % 8 * 2),
                    {ex2_approx(-h[i][0]), ex2_approx(-h[i][1])});
    }
    if constexpr (!C::MAKES_Y) return;
    sync_warp();
    const uint32_t pairs = me.buffer0 + buffer * C::BUFFER + C::PAIRS + 4 * SUB_CHUNK * SUB_CHUNK * me.group;
    for (int pair = lane_id(); pair < SUB_CHUNK * SUB_CHUNK; pair += 32) {
        const int i = pair / SUB_CHUNK, j = pair % SUB_CHUNK;
        float sum = 0.0f;
        for (int n = 0; j < i && n < SUB_CHUNK; n++) {
            const typename C::T r = lds<typename C::T>(from + C::RING_R + SIZE * (ring_at<C>(i) + n));
            const typename C::T k = lds<typename C::T>(from + C::RING_K + SIZE * (ring_at<C>(j) + n));
            float product = E::load(&r, 0) * E::load(&k, 0);
            for (int m = j + 1; m < i; m++) product *= lds<float>(decays + 4 * (SUB_CHUNK * m + n));
            sum += product;
        }
        sts<float>(pairs + 4 * pair, sum);
    }
}

template <class C>
GT_DEV void store_scale_and_values(Producer<C>& me, const RawSubChunk<C>& x, const float (&total)[2], int buffer) {
    /* v is stored in a permuted order: see value_column() and value_fragment(). */
    if constexpr (C::TF32X3) {
        GT_UNROLL
        for (int e = 0; e < 2; e++) {
            const float sum = me.neg_log2[e] + total[e];
            me.neg_log2_lo[e] += total[e] - (sum - me.neg_log2[e]);
            me.neg_log2[e] = sum;
        }
        if (me.quad < 2) { /* each lane stores one of its channels */
            const Scale scale = scale_of_log(-(me.quad ? total[1] : total[0]) * LN_2);
            sts<float>(me.scale + buffer * C::BUFFER, scale.factor);
            sts<float>(me.scale + buffer * C::BUFFER + 8, scale.keep);
        }
        GT_UNROLL
        for (int i = 0; i < 2; i++) {
            const int token = C::N == 128 ? 0 : 2 * i, v = C::N == 128 ? 64 * i : 0; /* relative to the lane's first */
            const uint32_t to = me.values + buffer * C::BUFFER;
            if constexpr (C::STATES) {
                sts<uint4>(to + 4 * (token * C::VALUE_PITCH + v), x.v[i]);
            } else {
                sts<uint2>(to + value_fragment<C>(token, v), {x.v[i].x, x.v[i].z});
                sts<uint2>(to + value_fragment<C>(token, v) + 16, {x.v[i].y, x.v[i].w});
            }
        }
    } else {
        me.neg_log2[0] += total[0];
        me.neg_log2[1] += total[1];
        if (me.quad < 2) sts<float>(me.scale + buffer * C::BUFFER, sub_chunk_decay(me.quad ? total[1] : total[0]));
        GT_UNROLL
        for (int piece = 0; piece < me.PIECES; piece++) {
            const uint32_t to = me.values + buffer * C::BUFFER + 2 * SUB_CHUNK * C::PITCH * piece;
            const uint32_t pairs[4] = {x.v[piece].x, x.v[piece].y, x.v[piece].z, x.v[piece].w};
            GT_UNROLL
            for (int i = 0; i < 4; i++) sts<uint32_t>(to + 2 * value_column<C>(2 * i), pairs[i]);
        }
    }
}

/* Computes R and K.  Stores R if MAKES_Y; passes K to store_key(i, k), two channels of token i.  c: the sum of h before
 * the lane's first token.  bonus: gets the part of the lane's channels. */
template <class C, class StoreKey>
GT_DEV void make_operands(const Producer<C>& me, const RawSubChunk<C>& x, const float (&h)[4][2], float (&c)[2],
                          int buffer, float (&bonus)[4], StoreKey store_key) {
    float4 fragment;
    GT_UNROLL
    for (int i = 0; i < 4; i++) {
        const float r0 = x.r[i].lo(), r1 = x.r[i].hi(), k0 = x.k[i].lo(), k1 = x.k[i].hi();
        const float r_low = stored_operand<C>(r0 * ex2_approx(-c[0]));
        const float r_high = stored_operand<C>(r1 * ex2_approx(-c[1]));
        if (i % 2 == 0) {
            fragment.x = r_low;
            fragment.z = r_high;
        } else if (C::MAKES_Y) {
            fragment.y = r_low;
            fragment.w = r_high;
            sts<float4>(me.r_fragment + buffer * C::BUFFER + i / 2 * C::FRAGMENTS * 16, fragment);
        }
        c[0] += h[i][0];
        c[1] += h[i][1];
        float2 k;
        k.x = stored_operand<C>(k0 * ex2_approx(c[0]));
        k.y = stored_operand<C>(k1 * ex2_approx(c[1]));
        store_key(i, k);
        bonus[i] = fma_rn(r1, k1 * me.u1, r0 * (k0 * me.u0));
    }
}

/* Returns whether -log2 of the decay of a channel of the group is at least `limit`, or NaN. */
GT_DEV bool exceeds(const float (&decay)[2], float limit) {
    return warp_any(!(fabsf(decay[0]) < limit && fabsf(decay[1]) < limit));
}

/* Converts a sub-chunk to the operands of the consumer warps. */
template <class C>
GT_DEV void prepare_sub_chunk(Producer<C>& me, const RawSubChunk<C>& x, int sub_chunk, int buffer, int stage) {
    float h[4][2], total[2], c[2], bonus[4];
    decay_bits<C>(me, x, sub_chunk, h);
    GT_UNROLL
    for (int e = 0; e < 2; e++) c[e] = scan_quads((h[0][e] + h[1][e]) + (h[2][e] + h[3][e]), me.quad, &total[e]);
    const bool strong = exceeds(total, STRONG_DECAY_LIMIT);
    const auto store_key = [&](int i, float2 k) { sts<float2>(me.k_row + buffer * C::BUFFER + 4 * i * C::PITCH, k); };
    make_operands<C>(me, x, h, c, buffer, bonus, store_key);
    if (strong) prepare_strong_decay<C>(me, x, h, buffer, stage, store_key); /* its K overwrites the usual K */
    const float sum = sum_bonus(bonus);
    if ((lane_id() & 4) == 0) sts<float>(me.bonus + buffer * C::BUFFER, sum);
    if (lane_id() == 0) sts<uint32_t>(me.buffer0 + buffer * C::BUFFER + C::STRONG_DECAY + 4 * me.group, strong);
    store_scale_and_values<C>(me, x, total, buffer);
}

/* ---- operands of a pass that computes only states ----------------------------------------------------------- */

/* STATES: stores K of the lane's tokens i and i + 1 as one fragment, two tokens by two channels, which is a left
 * operand. */
template <class C>
GT_DEV void store_cell(const Producer<C>& me, int i, const float (&k)[2][2], int buffer) {
    sts<float4>(me.k_row + buffer * C::BUFFER + i / 2 * C::PAIR_PITCH, {k[0][0], k[0][1], k[1][0], k[1][1]});
}

/* Converts a sub-chunk for S.  K contains the decays after each token, as on the strong-decay path. */
template <class C>
GT_DEV void prepare_states(Producer<C>& me, RawSubChunk<C>& x, int sub_chunk, int buffer, int stage) {
    float h[C::TOKENS][2], total[2], after[2];
    decay_bits<C>(me, x, sub_chunk, h);
    GT_UNROLL
    for (int e = 0; e < 2; e++) {
        const float sum = sum_of(h, e);
        after[e] = sum_later_quads(sum, me.quad);
        total[e] = shfl_idx(after[e] + sum, lane_id() % 8);
    }
    GT_UNROLL
    for (int i = C::TOKENS - 2; i >= 0; i -= 2) {
        float k[2][2];
        GT_UNROLL
        for (int j = 1; j >= 0; j--) {
            k[j][0] = stored_operand<C>(x.k[i + j].lo() * ex2_approx(-after[0]));
            k[j][1] = stored_operand<C>(x.k[i + j].hi() * ex2_approx(-after[1]));
            after[0] += h[i + j][0];
            after[1] += h[i + j][1];
        }
        store_cell<C>(me, i, k, buffer);
    }
    me.read_values(x, stage);
    store_scale_and_values<C>(me, x, total, buffer);
}

/* Converts a sub-chunk for G, in reverse.  K holds scale r_t 2^-c_t, which never exceeds scale r_t. */
template <class C>
GT_DEV void prepare_reverse(Producer<C>& me, RawSubChunk<C>& x, int sub_chunk, int buffer, int stage) {
    float h[C::TOKENS][2], total[2], c[2];
    decay_bits<C>(me, x, sub_chunk, h);
    GT_UNROLL
    for (int e = 0; e < 2; e++) c[e] = scan_quads(sum_of(h, e), me.quad, &total[e]) - me.log2_scale;
    GT_UNROLL
    for (int i = 0; i < C::TOKENS; i += 2) {
        float r[2][2];
        GT_UNROLL
        for (int j = 0; j < 2; j++) {
            r[j][0] = stored_operand<C>(x.k[i + j].lo() * ex2_approx(-c[0]));
            r[j][1] = stored_operand<C>(x.k[i + j].hi() * ex2_approx(-c[1]));
            c[0] += h[i + j][0];
            c[1] += h[i + j][1];
        }
        store_cell<C>(me, i, r, buffer);
    }
    me.read_values(x, stage);
    store_scale_and_values<C>(me, x, total, buffer);
}

/* ---- the work of a producer warp ----------------------------------------------------------------------------- */

template <class C>
GT_DEV int steps_of(const HeadSpan& span) {
    return (span.tokens + C::STEP - 1) / C::STEP;
}

/* Local pass: stores log2 of the decay over the span.  If producer warps take turns, each stores the sum of its own
 * sub-chunks. */
template <class C>
GT_DEV void store_decays(const TensorParams& p, const HeadSpan& span, const Producer<C>& me, int turn) {
    if (!p.local || !span.exists || me.quad != 0) return;
    float* neg_log2 = p.segments.decays + ((span.slot * 2 + turn) * p.in.H + span.h) * C::N + me.channel;
    neg_log2[0] = me.log2_decay(0);
    neg_log2[1] = me.log2_decay(1);
    if (C::TURNS == 1) neg_log2[p.in.H * C::N] = neg_log2[p.in.H * C::N + 1] = 0.0f;
}

template <class C, bool REVERSE>
GT_DEV void produce(const TensorParams& p, uint32_t smem, int work) {
    Producer<C> me;
    const int sub = C::HEADS == 1 ? 0 : warp_id() / C::GROUPS % C::HEADS; /* a constant 0 makes addresses uniform */
    const int turn = warp_id() / (C::HEADS * C::GROUPS);
    me.group = warp_id() % C::GROUPS;
    me.quad = lane_id() / 8;
    me.channel = 16 * me.group + 2 * (lane_id() % 8);
    me.buffer0 = smem + sub * C::HEAD_BUFFER;
    const int team = warp_id() / C::TEAM;
    me.ring = smem + C::RING + team * C::AHEAD * C::STAGE;
    me.r_fragment = me.buffer0 + C::R + 16 * (2 * me.quad * C::FRAGMENTS + me.channel / 2);
    /* Row 4 quad of K.  Rows whose bit 2 is set have their columns xor 24: see forward.cuh. */
    me.k_row = me.buffer0 + C::K +
               (C::STATES ? C::TOKENS / 2 * me.quad * C::PAIR_PITCH + 8 * me.channel
                          : 4 * (4 * me.quad * C::PITCH + (me.channel ^ (me.quad % 2 ? 24 : 0))));
    me.values = me.buffer0 + C::VALUES +
                (!C::TF32X3  ? 2 * (me.v_row(0) * C::PITCH + value_column<C>(me.v_column(0)))
                 : C::STATES ? 4 * (me.v_row(0) * C::VALUE_PITCH + me.v_column(0))
                             : value_fragment<C>(me.v_row(0), me.v_column(0)));
    /* fp32: both terms of two channels.  STATES: 2 channels of a group, then 2 of the next group, the order in which
     * StatePart reads them. */
    me.scale = me.buffer0 + C::SCALE + 4 * (me.quad & 1) +
               (C::TF32X3   ? 8 * me.channel
                : C::STATES ? 128 * (me.group / 2) + 16 * (lane_id() % 8) + 8 * (me.group % 2)
                            : 4 * me.channel);
    me.bonus = me.buffer0 + C::BONUS + 4 * ((4 * me.quad + bonus_token()) * C::GROUPS + me.group);
    const HeadSpan span = span_of<C, REVERSE>(p, work, sub);
    const int steps = steps_of<C>(span), direction = REVERSE ? -C::TURNS : C::TURNS;
    const auto sub_chunk_at = [=](int i) { return REVERSE ? steps - 1 - i : i; };
    me.open(p.in, span, span.start + sub_chunk_at(turn) * C::STEP, direction * C::STEP);
    me.neg_log2[0] = me.neg_log2[1] = me.neg_log2_lo[0] = me.neg_log2_lo[1] = 0.0f;

    /* Copies run FIRST steps ahead.  A team copies to the stage of the previous step; a single warp copies to the stage
     * that it has just read. */
    constexpr int FIRST = C::STATES ? C::AHEAD - 1 : C::AHEAD;
    const auto copy_next = [&](int step) {
        const int next = step + C::TURNS * FIRST;
        me.copy(sub_chunk_at(next), next < steps, next / C::TURNS % C::AHEAD);
    };
    const auto prepare = [&](int step, int buffer) {
        const int stage = step / C::TURNS % C::AHEAD;
        cp_async_wait<FIRST - 1>();
        if constexpr (C::STATES) {
            bar_sync(1 + team, 32 * C::TEAM);
            copy_next(step);
        } else {
            sync_warp();
        }
        RawSubChunk<C> x = me.read(stage);
        mbarrier_wait(me.buffer0 + buffer * C::BUFFER + C::EMPTY, (step / 2 + 1) % 2);
        if constexpr (!C::STATES) {
            prepare_sub_chunk<C>(me, x, sub_chunk_at(step), buffer, stage);
        } else if constexpr (REVERSE) {
            prepare_reverse<C>(me, x, sub_chunk_at(step), buffer, stage);
        } else {
            prepare_states<C>(me, x, sub_chunk_at(step), buffer, stage);
        }
        mbarrier_arrive(me.buffer0 + buffer * C::BUFFER + C::FULL);
        if constexpr (!C::STATES) {
            sync_warp(); /* all lanes have read the stage */
            copy_next(step);
        }
    };
    for (int i = 0; i < FIRST; i++) me.copy(sub_chunk_at(turn + C::TURNS * i), turn + C::TURNS * i < steps, i);
    if constexpr (C::TURNS == 2) {
        for (int step = turn; step < steps; step += 2) prepare(step, turn);
    } else {
        for (int step = 0; step < steps; step += C::PREPARED) {
            prepare(step, C::PREPARED == 1 ? step % 2 : 0);
            if (C::PREPARED == 2 && step + 1 < steps) prepare(step + 1, 1);
        }
    }
    store_decays<C>(p, span, me, turn);
}

} /* namespace wkv6 */
} /* namespace gt */

#endif
