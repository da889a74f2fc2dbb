/* gt/recurrence/segments.cuh - the time axis cut into segments that run side by side.
 *
 * All recurrences of the library have one form: a state S is scaled by a decay and added to, token by token,
 *     S <- decay . S + key x value
 * so that over any run of tokens   S after = (product of decays) . S before + (what a zero state would become).
 * A call with few heads and long sequences cuts each sequence into segments and makes three launches:
 *     local   every segment by a block of its own from a zero state: leaves its end state and the log of its decay
 *     scan    segment after segment, every state element by itself: the state that each segment starts from
 *     final   every segment again, from its start state: the outputs
 * Backward runs the same three for G = dL/dS, from the last segment to the first.
 *
 * Where states lie: [segment slot][state_size], the state of a whole sequence (all heads).  Decays: the logarithm of a
 * segment's decay, or what `rate` turns into it, [segment slot][decay_size], summed in two terms (TwoTermSum) and stored
 * rounded; an entry serves state_size / decay_size neighbouring state elements. */
#ifndef GT_RECURRENCE_SEGMENTS_CUH
#define GT_RECURRENCE_SEGMENTS_CUH

#include "sequences.cuh"

#include <float.h>

namespace gt {

/* ---- how a state decays ---------------------------------------------------------------------------------------- */

/* What is made of a decay, kept finite: a state of zero stays zero under any growth. */
GT_DEV float finite(float value) { return value > FLT_MAX ? FLT_MAX : value < -FLT_MAX ? -FLT_MAX : value; }

/* How a state that decays by exp(a) is scaled: S <- keep * S + factor * S.  Near 1 the small part of the decay is
 * factor = expm1(a), which keeps its relative accuracy; keep = 1.  Else keep = 0; such a decay is not carried far, so
 * that exp_fast is accurate enough. */
struct Scale {
    float keep, factor;
};

GT_DEV Scale scale_of_log(float a) {
    Scale s;
    const bool near_one = a > -0.69f && a < 0.05f;
    s.keep = near_one ? 1.0f : 0.0f;
    s.factor = near_one ? expm1_neg(a) : finite(exp_fast(a));
    return s;
}

/* keep is no factor: where it is 0, an infinite state must not make a NaN. */
GT_DEV float rescale(float keep, float factor, float state, float added) {
    float sum = fma_rn(factor, state, added);
    if (keep != 0.0f) sum += state;
    return sum;
}

/* The same through a whole segment, whose decay may be a growth (A > 0) that exp cannot hold although the product with a
 * small state fits: then it is applied in four steps. */
GT_DEV float rescale_far(float log, float state, float added) {
    if (log < 80.0f) {
        const Scale scale = scale_of_log(log);
        return rescale(scale.keep, scale.factor, state, added);
    }
    const float step = finite(exp_accurate(0.25f * log));
    return state * step * step * step * step + added;
}

/* A running sum whose rounding errors are kept; an infinite sum stays infinite. */
struct TwoTermSum {
    float hi = 0.0f, lo = 0.0f;

    GT_METHOD void add(float x) {
        const float sum = hi + x, grown = sum - hi;
        if (sum - sum == 0.0f) lo += (hi - (sum - grown)) + (x - grown);
        hi = sum;
    }
    GT_METHOD float value() const { return hi + lo; }
};

/* ---- segments -------------------------------------------------------------------------------------------------- */

/* How the sequences of a call are cut. */
struct Segments {
    int64_t count;         /* that the longest sequence may have */
    float *states, *decays; /* NULL if count is 1 */
};

/* Tokens of a segment, whole chunks, in a sequence of so many. */
GT_HD int64_t segment_tokens(int64_t tokens, int64_t count, int chunk) {
    const int64_t each = (tokens + count - 1) / count;
    return each > chunk ? (each + chunk - 1) / chunk * chunk : chunk;
}

/* Segments of such a sequence; one if it has no tokens. */
GT_HD int64_t segments_in(int64_t tokens, int64_t each) { return tokens > each ? (tokens + each - 1) / each : 1; }

/* Where a sequence's segments lie among those of all: neither more than `count` nor more than a slot a chunk. */
GT_DEV int64_t first_segment_slot(const Sequences& q, int64_t count, int64_t s, int64_t chunk_slot) {
    const int64_t slot = s * count;
    return q.cu_seqlens && chunk_slot < slot ? chunk_slot : slot;
}

static inline int64_t segment_slots(const Sequences& q, int64_t count, int chunk) {
    const int64_t slots = most_sequences(q) * count, chunks = chunk_slots(q, chunk);
    return q.capacity && chunks < slots ? chunks : slots;
}

/* One segment of one sequence: tokens first ... end-1 of batch element b. */
struct Span {
    bool exists;
    bool starts, ends; /* the first, the last of its sequence */
    int64_t sequence, b, first, end;
    int64_t chunk_slot, segment_slot; /* of its first chunk; its own */
};

/* item: sequence * count + segment, for sequences below sequence_count(). */
GT_DEV Span span_at(const Sequences& q, int64_t count, int chunk, int64_t item) {
    const int64_t s = count == 1 ? item : item / count, segment = count == 1 ? 0 : item % count;
    const Sequence seq = sequence_at(q, chunk, s);
    const int64_t each = segment_tokens(seq.tokens, count, chunk), segments = segments_in(seq.tokens, each);
    const int64_t start = segment * each, left = seq.tokens - start;
    return {segment < segments,
            segment == 0,
            segment == segments - 1,
            s,
            seq.b,
            seq.first + start,
            seq.first + start + (left < each ? left : each),
            seq.slot + start / chunk,
            first_segment_slot(q, count, s, seq.slot) + segment};
}

/* Segments that pay: as many as give each of `room` blocks something to do; `least` tokens are worth a segment, so that
 * no more packed sequences count than have as many.  blocks: those of one segment.  asked: by the caller, 0 if the
 * choice is left. */
static inline int64_t choose_segments(const Sequences& q, int64_t asked, int64_t blocks, int64_t room, int64_t least,
                                      int chunk) {
    const int64_t most = (q.T + chunk - 1) / chunk;
    int64_t count = asked;
    if (count == 0) {
        const int64_t long_ones = q.T / least > 1 ? q.T / least : 1, most_ones = most_sequences(q);
        const int64_t all = (q.capacity && long_ones < most_ones ? long_ones : most_ones) * blocks;
        count = all > 0 ? room / all : 1;
        if (count > q.T / least) count = q.T / least;
    }
    if (count > most) count = most;
    if (count < 1) count = 1;
    /* fewer do if whole chunks make them longer; packed sequences are cut by the number itself */
    return q.capacity ? count : segments_in(q.T, segment_tokens(q.T, count, chunk));
}

/* ---- the scan over segments ---------------------------------------------------------------------------------------
 * S <- state_in;   for every segment but the last, in order:   S <- decay . S + its end state,   which is what the next
 * one starts from.  REVERSE: from the last segment to the first, from dstate_out.
 * grid strands * ceil(state_size/256), block 256, a state element a thread; a strand takes sequences in turn.  All of its
 * time is latency, so the loads of 8 segments are in flight at once.  No shared memory.
 * bytes: the segment states once each way. */
struct ScanParams {
    Sequences sequences;
    Segments segments;
    int chunk;
    const float* state_in; /* [sequence][state_size], or one for all; NULL = 0 */
    int state_in_shared;
    int64_t state_size, decay_size;
    const float* rate; /* [state_size], multiplies the logs of decays, or NULL */
};

template <bool REVERSE>
GT_KERNEL(256, 2) scan_segments_kernel(const GT_GRID_CONSTANT ScanParams p) {
    constexpr int BATCH = 8;
    wait_for_chain();
    const int64_t tiles = (p.state_size + 255) / 256, element = block_x() % tiles * 256 + thread_id();
    const int64_t sequences = sequence_count(p.sequences), strands = grid_x() / tiles;
    if (element >= p.state_size) return;
    const int64_t entry = element / (p.state_size / p.decay_size);
    const float rate = p.rate ? p.rate[element] : 1.0f;
    for (int64_t s = block_x() / tiles; s < sequences; s += strands) {
        const Sequence seq = sequence_at(p.sequences, p.chunk, s);
        const int64_t each = segment_tokens(seq.tokens, p.segments.count, p.chunk);
        const int64_t count = segments_in(seq.tokens, each);
        if (count == 1) continue;
        const int64_t slot0 = first_segment_slot(p.sequences, p.segments.count, s, seq.slot);
        const int64_t first = REVERSE ? slot0 + count - 1 : slot0;
        float S = p.state_in ? p.state_in[(p.state_in_shared ? 0 : s) * p.state_size + element] : 0.0f;
        for (int64_t k0 = 0; k0 < count - 1; k0 += BATCH) {
            float sum[BATCH], log[BATCH];
            GT_UNROLL
            for (int i = 0; i < BATCH; i++) {
                const int64_t k = k0 + i < count - 1 ? k0 + i : k0, slot = REVERSE ? first - k : first + k;
                sum[i] = p.segments.states[slot * p.state_size + element];
                log[i] = rate * p.segments.decays[slot * p.decay_size + entry];
            }
            GT_UNROLL
            for (int i = 0; i < BATCH; i++) {
                const int64_t k = k0 + i, slot = REVERSE ? first - k : first + k;
                if (k >= count - 1) break;
                p.segments.states[slot * p.state_size + element] = S;
                S = rescale_far(log[i], S, sum[i]);
            }
        }
        const int64_t last = REVERSE ? slot0 : slot0 + count - 1;
        p.segments.states[last * p.state_size + element] = S;
    }
}

/* stream: a gt_stream, or a Chain. */
template <bool REVERSE, class Stream>
static inline gt_status scan_segments(const char* name, const ScanParams& p, const Device& device, Stream& stream) {
    const int64_t tiles = (p.state_size + 255) / 256, room = 16 * (int64_t)device.multiprocessors;
    const int64_t most = most_sequences(p.sequences), wanted = (room + tiles - 1) / tiles;
    return run(name, scan_segments_kernel<REVERSE>, tiles * (most < wanted ? most : wanted), 256, 0, stream, p);
}

} /* namespace gt */

#endif /* GT_RECURRENCE_SEGMENTS_CUH */
