/* gt/recurrence/segments.cuh - the time axis cut into segments that run side by side.
 *
 * All recurrences of the library have one form: a state S is scaled by a decay and added to, token by token,
 *     S <- decay . S + key x value
 * so that over any run of tokens   S after = (product of decays) . S before + (what a zero state would become).
 * A call with few heads and long sequences cuts each sequence into segments and makes three launches:
 *     local   every segment but the last, by a block of its own, from a zero state: leaves its end state and the log of
 *             its decay
 *     scan    segment after segment, every state element by itself: in place, the end state of a segment gives way to
 *             the state that it starts from
 *     final   every segment again, from its start state: the outputs
 * Backward runs the same three for G = dL/dS, from the last segment to the first.
 * gt_OP_segment, for a piece of a sequence, makes the first two alone: local, of every segment; and a scan that leaves
 * the state at the piece's end, and the log of its decay.
 *
 * Where states lie: [segment slot][state_size], the state of a whole sequence (all heads).  Where decays lie: [segment
 * slot][terms][decay_size].  An entry is a number, or the sum of two (terms = 2).  Times `unit`, or rate[element], it
 * is the natural logarithm of the segment's decay.  It serves state_size / decay_size neighbouring elements of the
 * state. */
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

/* The same through a whole segment, whose decay may be a growth (A > 0) that exp cannot hold although the product with
 * a small state fits: then keep = FAR, and the factor, a fourth of the way, is applied four times. */
constexpr float FAR = 4.0f;

GT_DEV Scale scale_of_segment(float log) {
    if (log < 80.0f) return scale_of_log(log);
    return {FAR, finite(exp_accurate(0.25f * log))};
}

GT_DEV float rescale_far(const Scale& scale, float state, float added) {
    if (scale.keep != FAR) return rescale(scale.keep, scale.factor, state, added);
    return state * scale.factor * scale.factor * scale.factor * scale.factor + added;
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

/* Which segments a local pass takes: all that another follows, or all that have tokens. */
enum Local { NOT_LOCAL = 0, ALL_BUT_LAST = 1, ALL_SEGMENTS = 2 };

/* How the sequences of a call are cut. */
struct Segments {
    int64_t count;          /* that the longest sequence may have; elements of a batch have all so many */
    float *states, *decays; /* NULL if count is 1 */
    int64_t tokens = 0;     /* of a segment of T tokens */
};

/* Tokens of a segment, whole chunks, in a sequence of so many. */
template <class Int>
GT_HD Int segment_tokens(Int tokens, Int count, int chunk) {
    const Int least = (tokens + count - 1) / count, size = (Int)chunk;
    return least > size ? (least + size - 1) / size * size : size;
}

/* Segments of such a sequence; one if it has no tokens. */
template <class Int>
GT_HD Int segments_in(Int tokens, Int tokens_per_segment) {
    return tokens > tokens_per_segment ? (tokens + tokens_per_segment - 1) / tokens_per_segment : 1;
}

/* segment_tokens() of a sequence of a call.  Lengths of packed ones have 32 bits: a division of 64 bits takes half a
 * microsecond. */
GT_DEV int64_t segment_length(const Sequences& q, const Segments& cut, int chunk, int64_t tokens) {
    return q.cu_seqlens ? segment_tokens((uint32_t)tokens, (uint32_t)cut.count, chunk) : cut.tokens;
}

GT_DEV int64_t segments_of(const Sequences& q, const Segments& cut, int chunk, int64_t tokens) {
    if (!q.cu_seqlens) return cut.count;
    return segments_in((uint32_t)tokens, segment_tokens((uint32_t)tokens, (uint32_t)cut.count, chunk));
}

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

/* Segment `segment`, below count, of sequence s, below sequence_count(). */
GT_DEV Span span_of(const Sequences& q, const Segments& cut, int chunk, int64_t s, int64_t segment) {
    const Sequence seq = sequence_at(q, chunk, s);
    const int64_t length = segment_length(q, cut, chunk, seq.tokens);
    const int64_t start = segment * length, left = seq.tokens - start;
    return {segment == 0 || left > 0,
            segment == 0,
            left <= length,
            s,
            seq.b,
            seq.first + start,
            seq.first + start + (left < length ? left : length),
            seq.slot + start / chunk,
            first_segment_slot(q, cut.count, s, seq.slot) + segment};
}

/* item: sequence * count + segment. */
GT_DEV Span span_at(const Sequences& q, const Segments& cut, int chunk, int64_t item) {
    if (cut.count == 1) return span_of(q, cut, chunk, item, 0);
    return span_of(q, cut, chunk, item / cut.count, item % cut.count);
}

/* Whether a pass leaves the span out.  is_last: the pass through its sequence ends here.  A sequence without tokens has
 * no segment slot of its own. */
GT_DEV bool skips(int local, const Span& span, bool is_last) {
    return !span.exists || (local == ALL_BUT_LAST && is_last) || (local == ALL_SEGMENTS && span.first == span.end);
}

/* The same where only the number of segments is known. */
GT_DEV Span span_at(const Sequences& q, int64_t count, int chunk, int64_t item) {
    return span_at(q, Segments{count, nullptr, nullptr, segment_tokens(q.T, count, chunk)}, chunk, item);
}

/* The state [size] that a span's pass begins with: what the scan found or, where the sequence is one segment, its own
 * in row `row` of `states`.  The memory of `states` may be that which the pass through another segment of the sequence
 * writes in the end, so that it is not read where there are several. */
GT_DEV const float* first_state(const Segments& cut, const Span& span, int64_t size, const float* states, int64_t row) {
    if (!span.starts || !span.ends) return cut.states + span.segment_slot * size;
    return states ? states + row * size : nullptr;
}

/* Segments that pay: as many as give each of `room` blocks, those that the device runs at once, something to do;
 * `least` tokens are worth a segment, so that no more packed sequences count than have as many.  blocks: those of one
 * segment. asked: by the caller, 0 if the choice is left. */
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

/* So many segments, with room for their states and for `decays` numbers each; of one only if it is `wanted`. */
static inline Segments cut_segments(Arena& arena, const Sequences& q, int64_t count, int chunk, int64_t state_size,
                                    int64_t decays, bool wanted = false) {
    Segments cut = {count, nullptr, nullptr, segment_tokens(q.T, count, chunk)};
    if (count == 1 && !wanted) return cut;
    const int64_t slots = segment_slots(q, count, chunk);
    cut.states = arena.take<float>(slots * state_size);
    cut.decays = arena.take<float>(slots * decays);
    return cut;
}

/* ---- the scan over segments ---------------------------------------------------------------------------------------
 * S <- state_in;   for every segment but the last, in order:   S <- decay . S + its end state,   which is what the next
 * one starts from.  REVERSE: from the last segment to the first, from dstate_out.
 * ENDS: of every segment, from zero; S and the log of the whole decay are left, segments.states stay as they are.
 * In place: where a segment had left its end state, the state that it starts from is written.  States and decays were
 * left in `segments` by a local pass.
 * grid strands * ceil(state_size/128), block 4 warps, which know nothing of each other; a state element a thread.  A
 * strand is the blocks of one set of sequences: the s-th takes sequences s, s + strands, ...  so that the grid need not
 * grow with seq_capacity.  All of its time is latency, so the sums of 64 segments come by cp.async at once.
 * WHOLE_WARPS: the 32 elements of a warp decay alike.  Meanwhile its lanes make the scales of a segment or two each;
 * else every lane makes its own, 8 at a time.
 * shared, a warp: 64 sums of each element, 64 scales: 34 KB a block.  bytes: the segment states once each way. */
struct ScanParams {
    Sequences sequences;
    Segments segments;
    int chunk;
    const float* state_in; /* [sequence][state_size], or one for all; NULL = 0 */
    int state_in_shared;
    int64_t state_size, decay_size;
    const float* rate; /* [state_size], multiplies the logs of decays; NULL: `unit` does */
    float unit = 1.0f;
    int terms = 1;
    int64_t elements = 0;                     /* that an entry serves; set by scan_segments() */
    Divider tiles = {};                       /* likewise: blocks of a sequence */
    float *ends = nullptr, *decays = nullptr; /* ENDS: [sequence][state_size], [sequence][decay_size] or NULL */
};

constexpr int SCAN_THREADS = 128, SCAN_BATCH = 64, SCAN_STEPS = 8;           /* segments at once, and in registers */
constexpr int SCAN_SUMS = 4 * 32 * SCAN_BATCH, SCAN_SCALES = 8 * SCAN_BATCH; /* bytes of a warp */
constexpr int SCAN_SMEM = SCAN_THREADS / 32 * (SCAN_SUMS + SCAN_SCALES);

/* Starts the copies of the warp's elements in `left` segments, `stride` elements from each to the next. */
template <bool WHOLE_WARPS>
GT_DEV void copy_sums(uint32_t sums, const float* states, int64_t stride, int left, bool inside) {
    if constexpr (WHOLE_WARPS) { /* 16 bytes of a segment each; 4 segments at once */
        const float* from = states - lane_id() + lane_id() % 8 * 4 + lane_id() / 8 * stride;
        GT_NO_UNROLL
        for (int k = lane_id() / 8; k < left; k += 4, from += 4 * stride)
            cp_async<16>(sums + 16 * (8 * k + lane_id() % 8), from);
    } else {
        GT_NO_UNROLL
        for (int k = 0; inside && k < left; k++) cp_async<4>(sums + 4 * (32 * k + lane_id()), states + k * stride);
    }
    cp_async_commit();
}

template <bool REVERSE, bool WHOLE_WARPS, bool ENDS = false>
GT_KERNEL(SCAN_THREADS, 4)
scan_segments_kernel(const GT_GRID_CONSTANT ScanParams p) {
    wait_for_chain();
    int tile;
    const Segments& cut = p.segments;
    const int strand = divide(block_x(), p.tiles, &tile), strands = grid_x() / p.tiles.divisor;
    const int64_t element = (int64_t)tile * SCAN_THREADS + thread_id();
    const bool inside = element < p.state_size;
    if (element - lane_id() >= p.state_size) return;
    const int64_t sequences = sequence_count(p.sequences), step = REVERSE ? -1 : 1, stride = step * p.state_size;
    /* which decay of a segment is this element's */
    const int64_t entry = element <= UINT32_MAX && p.elements <= UINT32_MAX ? (uint32_t)element / (uint32_t)p.elements
                                                                            : element / p.elements;
    const float rate = p.rate && inside ? p.rate[element] : p.unit;
    const uint32_t sums = smem_base() + SCAN_SUMS * warp_id();
    const uint32_t scales = smem_base() + SCAN_THREADS / 32 * SCAN_SUMS + SCAN_SCALES * warp_id();
    for (int64_t s = strand; s < sequences; s += strands) {
        const Sequence seq = sequence_at(p.sequences, p.chunk, s);
        const int64_t count = segments_of(p.sequences, cut, p.chunk, seq.tokens);
        if (count == 1 && !ENDS) continue;
        /* segments whose decay and end state S takes up */
        const int64_t passed = !ENDS ? count - 1 : seq.tokens ? count : 0;
        const int64_t first = first_segment_slot(p.sequences, cut.count, s, seq.slot) + (REVERSE ? count - 1 : 0);
        float* states = cut.states + first * p.state_size + element;
        const float* decays = cut.decays + first * p.terms * p.decay_size + entry;
        const auto log_of = [&](int64_t k) {
            const float* decay = decays + k * step * p.terms * p.decay_size;
            return rate * (p.terms == 2 ? decay[0] + decay[p.decay_size] : decay[0]);
        };
        float S = p.state_in && inside ? p.state_in[(p.state_in_shared ? 0 : s) * p.state_size + element] : 0.0f;
        float whole = 0.0f; /* ENDS: the sum of the logs, of the segments that the lane has seen */
        for (int64_t k0 = 0; k0 < passed; k0 += SCAN_BATCH) {
            const int left = passed - k0 < SCAN_BATCH ? (int)(passed - k0) : SCAN_BATCH;
            bool grows = false;
            copy_sums<WHOLE_WARPS>(sums, states, stride, left, inside);
            if constexpr (WHOLE_WARPS) {
                float log[SCAN_BATCH / 32];
                GT_UNROLL
                for (int j = 0; j < SCAN_BATCH / 32; j++)
                    log[j] = lane_id() + 32 * j < left ? log_of(k0 + lane_id() + 32 * j) : 0.0f;
                GT_UNROLL
                for (int j = 0; j < SCAN_BATCH / 32; j++) {
                    const Scale scale = scale_of_segment(log[j]);
                    sts<float2>(scales + 8 * (lane_id() + 32 * j), {scale.keep, scale.factor});
                    grows = grows || scale.keep == FAR;
                    if (ENDS) whole += log[j];
                }
            }
            cp_async_wait<0>();
            sync_warp();
            for (int k = 0; k < left; k += SCAN_STEPS) {
                float sum[SCAN_STEPS];
                Scale scale[SCAN_STEPS];
                GT_UNROLL
                for (int i = 0; i < SCAN_STEPS; i++) {
                    const int at = k + i < left ? k + i : k;
                    sum[i] = inside ? lds<float>(sums + 4 * (32 * at + lane_id())) : 0.0f;
                    if constexpr (WHOLE_WARPS) {
                        const float2 x = lds<float2>(scales + 8 * at);
                        scale[i] = {x.x, x.y};
                    } else {
                        scale[i].factor = inside ? log_of(k0 + at) : 0.0f; /* the log; below, what is made of it */
                        if (ENDS && k + i < left) whole += scale[i].factor;
                    }
                }
                GT_UNROLL
                for (int i = 0; !WHOLE_WARPS && i < SCAN_STEPS; i++) {
                    scale[i] = scale_of_segment(scale[i].factor);
                    grows = grows || scale[i].keep == FAR;
                }
                /* All time is the chain of dependent steps: nearly always they go without a branch. */
                if (k + SCAN_STEPS <= left && !warp_any(grows)) {
                    GT_UNROLL
                    for (int i = 0; i < SCAN_STEPS; i++) {
                        if (inside && !ENDS) states[i * stride] = S;
                        S = rescale(scale[i].keep, scale[i].factor, S, sum[i]);
                    }
                    states += SCAN_STEPS * stride;
                    continue;
                }
                GT_UNROLL
                for (int i = 0; i < SCAN_STEPS; i++) {
                    if (k + i >= left) break;
                    if (inside && !ENDS) *states = S;
                    states += stride;
                    S = rescale_far(scale[i], S, sum[i]);
                }
            }
            sync_warp(); /* before the next are written over them */
        }
        if (inside && !ENDS) *states = S;
        if constexpr (ENDS) {
            if (WHOLE_WARPS) whole = warp_sum(whole);
            if (inside) p.ends[s * p.state_size + element] = S;
            if (inside && p.decays && entry * p.elements == element) p.decays[s * p.decay_size + entry] = whole;
        }
    }
}

/* stream: a gt_stream, or a Chain. */
template <bool REVERSE, bool ENDS = false, class Stream>
static inline gt_status scan_segments(const char* name, ScanParams p, const Device& device, Stream& stream) {
    const int64_t tiles = (p.state_size + SCAN_THREADS - 1) / SCAN_THREADS, room = 32 * (int64_t)device.multiprocessors;
    const int64_t most = most_sequences(p.sequences), wanted = (room + tiles - 1) / tiles;
    if (tiles > INT32_MAX) return gt_fail(GT_ERROR_SIZE, "%s: %lld blocks exceed a grid", name, (long long)tiles);
    p.elements = p.state_size / p.decay_size;
    p.tiles = divide_by((int)tiles);
    p.segments.tokens = segment_tokens(p.sequences.T, p.segments.count, p.chunk);
    const bool whole_warps = !p.rate && p.elements % 32 == 0;
    return run(name,
               whole_warps ? scan_segments_kernel<REVERSE, true, ENDS> : scan_segments_kernel<REVERSE, false, ENDS>,
               tiles * (most < wanted ? most : wanted), SCAN_THREADS, SCAN_SMEM, stream, p);
}

} /* namespace gt */

#endif /* GT_RECURRENCE_SEGMENTS_CUH */
