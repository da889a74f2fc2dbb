/* gt/wkv4/problem.cuh - code that all kernels of wkv4 share: arguments, the state of a channel, one token, tiles of
 * tokens.  gt_wkv4.cuh explains A, B, a, b, p, g and u. */
#ifndef GT_WKV4_PROBLEM_CUH
#define GT_WKV4_PROBLEM_CUH

#include "../base/built.cuh"
#include "../recurrence/segments.cuh"

namespace gt {
namespace wkv4 {

constexpr int CHANNELS = 32;   /* channels of a block, which is one warp: one channel per lane */
constexpr int CHECKPOINT = 32; /* tokens of a chunk, which begins with a state that forward saves for backward */
constexpr int UNROLL = 16;     /* tokens whose loads from shared memory are in flight together */

/* The prepared arguments of a call, as every kernel gets them. */
struct Problem {
    Sequences sequences;
    Segments segments; /* segments.states: [slot][3,D]; in backward [slot][4,D] */
    int64_t D, tiles;  /* tiles: tiles of channels, one per block */
    gt_dtype dtype;
    gt_decay decay;
    int has_vectors; /* rows of k, v and dy are aligned to 16 bytes */
    const void *k, *v, *dy;
    const float *w, *u;
    gt_stride k_stride, v_stride, dy_stride;
};

/* ---- one channel --------------------------------------------------------------------------------------------- */

/* The state of a channel: A = a exp(p), B = b exp(p).  At the start of a tile, b is 0 or from 2^-20 to 2^40, unless the
 * state grows.  Within a tile of at most 32 tokens b decays by a factor of exp(-64) at most.  So a value that is
 * flushed to 0 is less than 2^-30 of a sum. */
struct State {
    float a, b, p;
};

constexpr float LEAST_P = -FLT_MAX; /* p of the neutral state, which any key replaces */

GT_DEV State neutral_state() { return {0.0f, 0.0f, LEAST_P}; }

/* The parameters of a lane's channel. */
struct Channel {
    int64_t d;
    bool exists;
    float log;   /* g, the log of the decay */
    float slope; /* derivative of g with respect to w */
    /* exp(g) - 1 if |g| <= 2, else 0; a and b are scaled by 1 + delta.  This form is accurate for decays near 1. */
    float delta;
    float whole; /* g if |g| > 2, else 0; it is added to p */
    float least; /* of b at the start of a group of tokens that share p (see share_p); infinite if |g| > 2 */
    float u;
    float factor; /* exp(u + g).  y uses the state after its decay, so the token's weight in y gets exp(g), too */
};

constexpr float LARGEST_LOG = 1e30f, STRONG_DECAY = -2.0f;
constexpr float LEAST_SHARED = 0x1p-40f;

/* Limit of |u + g|.  Beyond it, exp(u + g) times a weight may leave the range of fp32, or the state's weight may be
 * lost.  Then y has weights of its own (Token::meet without PLAIN). */
constexpr float LARGEST_BONUS = 40.0f;

GT_DEV float bounded(float x) { return x > LARGEST_LOG ? LARGEST_LOG : x < -LARGEST_LOG ? -LARGEST_LOG : x; }

GT_DEV Channel channel_of(const Problem& in, int64_t d) {
    Channel c = {};
    c.d = d;
    c.exists = c.d < in.D;
    const float w = c.exists ? in.w[c.d] : 0.0f;
    c.u = c.exists && in.u ? bounded(in.u[c.d]) : 0.0f;
    c.log = bounded(in.decay == GT_DECAY_LOG ? w : -exp_accurate(w));
    c.slope = in.decay == GT_DECAY_LOG ? 1.0f : c.log;
    const bool is_strong = c.log < STRONG_DECAY || c.log > -STRONG_DECAY;
    c.whole = is_strong ? c.log : 0.0f;
    c.least = is_strong ? INFINITY : LEAST_SHARED;
    c.delta = is_strong ? 0.0f : c.log < 0.05f ? expm1_neg(c.log) : exp_accurate(c.log) - 1.0f;
    c.factor = exp_accurate(c.u + c.log);
    return c;
}

/* Returns whether exp(u + g) can be a factor for all channels of the warp. */
GT_DEV bool has_plain_bonus(const Channel& c) { return !warp_any(!(fabsf(c.u + c.log) <= LARGEST_BONUS)); }

/* Scales b back to about 1 if it is far from 1, and changes p to match.  The factor of a and b accounts for the
 * rounding of p.  If p is so large that fp32 cannot add the change, p stays and only a and b are scaled. */
GT_DEV void normalise(State& s) {
    if ((s.b >= 0x1p-20f && s.b <= 0x1p40f) || !(s.b > 0.0f) || s.b > FLT_MAX) return;
    const int exponent = (int)(as_uint(s.b) >> 23) - 127;
    const float p = s.p + (float)exponent * LN_2;
    const float factor = fabsf(s.p) < 1e6f ? exp_accurate(s.p - p) : as_float((uint32_t)(127 - exponent) << 23);
    s.a *= factor, s.b *= factor, s.p = p;
}

/* Returns exp(log) first + second.  log: the log of the decay over the tokens of `second`. */
GT_DEV State join(const State& first, float log, const State& second) {
    const float p = first.p + log, q = fmaxf(p, second.p);
    /* (first.p - q) keeps p's rounding error, unless p is too large. */
    const float keep = exp_fast(fabsf(first.p) < 1e6f ? (first.p - q) + log : p - q), weight = exp_fast(second.p - q);
    State s = {fma_rn(keep, first.a, weight * second.a), fma_rn(keep, first.b, weight * second.b), q};
    normalise(s);
    return s;
}

/* ---- one token ------------------------------------------------------------------------------------------------- */

template <bool EXACT>
GT_DEV float exp_of(float x) {
    return EXACT ? exp_accurate(x) : exp_fast(x);
}

/* A token that meets a state.  All weights are in units of exp(p). */
struct Token {
    float a, b, p;     /* a, b and p of the decayed state */
    float weight;      /* exp(k - p) */
    float share, rest; /* y = share v + rest */
    float others;      /* 1 - share, computed without a subtraction, which would cancel digits */

    /* Computes the fields for a token with key k after state s.  PLAIN: c.factor is in range (has_plain_bonus).  EXACT:
     * use exp_accurate.  fp32 activations need it, because gradients would add up the errors of exp_fast over all
     * tokens. */
    template <bool PLAIN, bool HAS_Y, bool EXACT>
    GT_METHOD void meet(const State& s, const Channel& c, float k) {
        const float decayed = s.p + c.whole;
        p = fmaxf(decayed, k);
        const float keep = exp_of<EXACT>(decayed - p);
        weight = exp_of<EXACT>(k - p);
        a = s.a * keep, b = s.b * keep;
        a = fma_rn(c.delta, a, a), b = fma_rn(c.delta, b, b);
        if constexpr (HAS_Y) {
            float of_y = weight * c.factor, a_of_y = a, b_of_y = b;
            if constexpr (!PLAIN) {
                const float above = (k - s.p) + c.u, less = exp_of<EXACT>(above > 0.0f ? -above : 0.0f);
                of_y = exp_of<EXACT>(above > 0.0f ? 0.0f : above), a_of_y = s.a * less, b_of_y = s.b * less;
            }
            const float inverse = rcp_approx(b_of_y + of_y + FLT_MIN); /* if nothing has weight, y is 0 */
            share = of_y * inverse, rest = a_of_y * inverse, others = b_of_y * inverse;
        }
    }
    GT_METHOD State after(float v) const { return {fma_rn(weight, v, a), b + weight, p}; }

    /* The same as meet<true,...> for a token of a group that shares p (see share_p): p does not change. */
    template <bool HAS_Y, bool EXACT>
    GT_METHOD void meet_shared(const State& s, const Channel& c, float k) {
        p = s.p;
        weight = exp_of<EXACT>(k - p);
        a = fma_rn(c.delta, s.a, s.a), b = fma_rn(c.delta, s.b, s.b);
        if constexpr (HAS_Y) {
            const float of_y = weight * c.factor, inverse = rcp_approx(b + of_y + FLT_MIN);
            share = of_y * inverse, rest = a * inverse, others = b * inverse;
        }
    }
};

/* Raises p to the largest key of a group of COUNT tokens, at most 16, if the channel loses no digits by that.  Then no
 * token of the group changes p, so the exponentials of all its tokens can be computed together.  Otherwise returns
 * false and changes nothing.  Each lane decides for itself, because a channel's bits must not depend on its neighbours.
 * A group may share p if b stays above LEAST_SHARED.  In the group b decays by a factor of exp(-32) at most.  So b is
 * at least 2^-87, and a value that is flushed to 0 is less than 2^-39 of b. */
template <bool EXACT, int COUNT>
GT_DEV bool share_p(State& s, const Channel& c, const float (&k)[COUNT]) {
    float top = s.p;
    GT_UNROLL
    for (int i = 0; i < COUNT; i++) top = fmaxf(top, k[i]);
    const float keep = exp_of<EXACT>(s.p - top);
    if (!(s.b * keep >= c.least)) return false;
    s = {s.a * keep, s.b * keep, top};
    return true;
}

/* ---- where a block works --------------------------------------------------------------------------------------- */

/* A block has one tile of channels and belongs to strand block_x() / tiles.  A strand is one block for each tile of
 * channels.  With S strands, strand s takes items s, s + S, ...  An item is a segment of a sequence. */
GT_DEV int64_t items_of(const Problem& in) { return sequence_count(in.sequences) * in.segments.count; }
GT_DEV int64_t strands_of(const Problem& in) { return grid_x() / in.tiles; }
GT_DEV int64_t strand_of(const Problem& in) { return block_x() / in.tiles; }

/* A segment and its position in its sequence. */
struct Place {
    Span span;
    int64_t number, count; /* index of this segment in its sequence; number of segments of the sequence */
    int64_t length;        /* tokens of every segment except the last */
};

GT_DEV Place place_of(const Problem& in, int64_t item) {
    const Segments& cut = in.segments;
    const int64_t s = cut.count == 1 ? item : item / cut.count, number = item - s * cut.count;
    const Sequence seq = sequence_at(in.sequences, CHECKPOINT, s);
    return {span_of(in.sequences, cut, CHECKPOINT, s, number), number,
            segments_of(in.sequences, cut, CHECKPOINT, seq.tokens),
            segment_length(in.sequences, cut, CHECKPOINT, seq.tokens)};
}

/* Three values of a channel: a column of a state [3,D].  They are 0 if the channel does not exist. */
struct Three {
    float x, y, z;
};

GT_DEV Three load_three(const Problem& in, const Channel& c, const float* rows, int64_t row) {
    if (!c.exists || !rows) return {0.0f, 0.0f, 0.0f};
    const float* const from = rows + row * 3 * in.D + c.d;
    return {from[0], from[in.D], from[2 * in.D]};
}

GT_DEV void store_three(const Problem& in, const Channel& c, float* rows, int64_t row, float x, float y, float z) {
    if (!c.exists) return;
    float* const to = rows + row * 3 * in.D + c.d;
    to[0] = x, to[in.D] = y, to[2 * in.D] = z;
}

GT_DEV State load_state(const Problem& in, const Channel& c, const float* rows, int64_t row) {
    const Three x = load_three(in, c, rows, row);
    return {x.x, x.y, x.z};
}

/* Returns the state for three numbers of the caller.  a = b = 0 means the neutral state. */
GT_DEV State state_of(const Three& x) { return x.x == 0.0f && x.y == 0.0f ? neutral_state() : State{x.x, x.y, x.z}; }

GT_DEV State load_state_in(const Problem& in, const Channel& c, const float* rows, int64_t row) {
    return state_of(load_three(in, c, rows, row));
}

/* Returns the form of a state that the caller gets: the same state with b = 1. */
GT_DEV Three state_of_caller(State s) {
    normalise(s);
    if (s.b == 0.0f) return {0.0f, 0.0f, 0.0f};
    const uint32_t bits = as_uint(s.b);
    const float exponent = (float)((int)(bits >> 23) - 127), mantissa = as_float((bits & 0x7fffffu) | 0x3f800000u);
    const float log = fma_rn(exponent, LN_2, log1p_unit(mantissa - 1.0f));
    return {s.a * rcp_approx(s.b), 1.0f, s.b > 0.0f && s.b <= FLT_MAX ? s.p + log : NAN};
}

/* ---- tiles of tokens ------------------------------------------------------------------------------------------ */

template <class T>
struct Row {
    static constexpr int BYTES = CHANNELS * (int)sizeof(T), PARTS = BYTES / 16, AT_ONCE = 32 / PARTS;
};

/* Starts to copy the block's channels of `tokens` tokens, from `first` on, to an array [TOKENS][CHANNELS] at `to`.
 * Channels that do not exist become 0. */
template <class T, int TOKENS>
GT_DEV void copy_rows(const Problem& in, const Channel& c, uint32_t to, const void* data, gt_stride stride, int64_t b,
                      int64_t first, int tokens) {
    using R = Row<T>;
    const int64_t d0 = c.d - lane_id();
    const T* from = static_cast<const T*>(data) + offset_of(stride, b, first, d0);
    if (in.has_vectors) {
        const int part = lane_id() % R::PARTS, row = lane_id() / R::PARTS, column = part * 16 / (int)sizeof(T);
        const int64_t left = (in.D - d0 - column) * (int64_t)sizeof(T);
        const int bytes = left < 0 ? 0 : left < 16 ? (int)left : 16;
        const T* at = from + row * stride.t + (bytes ? column : 0);
        GT_UNROLL
        for (int t = 0; t < TOKENS; t += R::AT_ONCE, at += R::AT_ONCE * stride.t)
            if (row + t < tokens) cp_async<16>(to + (uint32_t)((row + t) * R::BYTES + 16 * part), at, bytes);
        return;
    }
    const T* at = from + lane_id() * stride.h;
    for (int t0 = 0; t0 < tokens; t0 += UNROLL) {
        T x[UNROLL];
        GT_UNROLL
        for (int i = 0; i < UNROLL; i++) {
            x[i] = T();
            if (c.exists && t0 + i < tokens) x[i] = at[(t0 + i) * stride.t];
        }
        GT_UNROLL
        for (int i = 0; i < UNROLL; i++)
            if (t0 + i < tokens) sts<T>(to + (uint32_t)((t0 + i) * R::BYTES + lane_id() * (int)sizeof(T)), x[i]);
    }
}

/* Returns the lane's value of token t of a tile. */
template <class T>
GT_DEV float value_at(uint32_t tile, int t) {
    const T x = lds<T>(tile + (uint32_t)(t * Row<T>::BYTES + lane_id() * (int)sizeof(T)));
    return Element<T>::load(&x, 0);
}

} /* namespace wkv4 */
} /* namespace gt */

#endif
