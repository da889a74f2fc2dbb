/* gt/recurrence/segments.cuh - cuts the time axis into segments that run in parallel.
 *
 * All recurrences of the library have one form.  Every token scales the state S by a decay and adds to the state:
 *     S <- decay . S + key x value
 * So for any run of tokens
 *     S after = (product of decays) . S before + (S after the same tokens, started from zero).
 * A call with few heads and long sequences cuts each sequence into segments and makes three launches:
 *
 *     local   Every segment except a sequence's last one runs in its own block, from a zero state.  The block stores
 *             the segment's end state and the log of its decay.
 *     scan    Every state element runs over the segments in order, independent of the others.  The scan overwrites a
 *             segment's end state with its start state.
 *     final   Every segment runs again, from its start state, and computes the outputs.
 *
 * Backward makes the same three launches for G = dL/dS, from the last segment to the first.
 * gt_OP_segment, for a piece of a sequence, makes only the first two launches.  Its local pass runs all segments.  Its
 * scan stores the state at the piece's end and the log of the piece's decay.
 *
 * Layout of states: [segment slot][state_size].  An entry is the state of all heads.
 * Layout of decays: [segment slot][terms][decay_size].  With terms = 2 an entry is the sum of two numbers.  The natural
 * logarithm of the segment's decay is the entry times `unit`, or times rate[element] if there are rates.  One entry
 * serves state_size / decay_size adjacent elements of the state. */
#ifndef GT_RECURRENCE_SEGMENTS_CUH
#define GT_RECURRENCE_SEGMENTS_CUH

#include "sequences.cuh"

#include <float.h>

namespace gt {

/* ---- how a state decays ---------------------------------------------------------------------------------------- */

/* Limits a factor to finite values, because 0 times infinity would turn a zero state into NaN. */
GT_DEV float finite(float value) { return value > FLT_MAX ? FLT_MAX : value < -FLT_MAX ? -FLT_MAX : value; }

/* Scales a state that decays by exp(a): S <- keep * S + factor * S.
 * Where exp(a) is near 1, keep = 1 and factor = expm1(a), so that a small 1 - exp(a) keeps its relative accuracy.
 * Elsewhere keep = 0 and factor = exp(a).  exp_fast is accurate enough there, because under such factors a state soon
 * vanishes or overflows. */
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

/* Returns the scaled state plus `added`.  The code tests `keep` and does not multiply by it, because 0 times an
 * infinite state would be NaN. */
GT_DEV float rescale(float keep, float factor, float state, float added) {
    float sum = fma_rn(factor, state, added);
    if (keep != 0.0f) sum += state;
    return sum;
}

/* Returns the scale of a whole segment, whose decay is exp(log).  If log > 0 the decay is a growth, which may exceed
 * the range of fp32 although its product with a small state does not.  Then keep = FAR, factor = exp(log / 4), and
 * rescale_far() applies the factor four times. */
constexpr float FAR = 4.0f;

GT_DEV Scale scale_of_segment(float log) {
    if (log < 80.0f) return scale_of_log(log);
    return {FAR, finite(exp_accurate(0.25f * log))};
}

GT_DEV float rescale_far(const Scale& scale, float state, float added) {
    if (scale.keep != FAR) return rescale(scale.keep, scale.factor, state, added);
    return state * scale.factor * scale.factor * scale.factor * scale.factor + added;
}

/* A running sum in two terms; lo keeps the rounding errors of hi.  An infinite sum stays infinite. */
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

/* The kind of a pass.  ALL_BUT_LAST: a local pass that skips the last segment of each sequence (backward: the first).
 * ALL_SEGMENTS: a local pass over all segments that have tokens.  NOT_LOCAL: any other pass. */
enum Local { NOT_LOCAL = 0, ALL_BUT_LAST = 1, ALL_SEGMENTS = 2 };

/* How the sequences of a call are cut into segments. */
struct Segments {
    int64_t count;          /* segments of a batch element; packed: the most segments of any sequence */
    float *states, *decays; /* NULL if count is 1 */
    int64_t tokens = 0;     /* tokens of a segment, in a sequence of T tokens */
};

/* Returns the length of a segment in tokens, if a sequence of `tokens` tokens is cut into at most `count` segments.
 * The length is a multiple of `chunk`, so that no chunk lies in two segments. */
template <class Int>
GT_HD Int segment_tokens(Int tokens, Int count, int chunk) {
    const Int least = (tokens + count - 1) / count, size = (Int)chunk;
    return least > size ? (least + size - 1) / size * size : size;
}

/* Returns the number of segments of a sequence: one if the sequence has no tokens. */
template <class Int>
GT_HD Int segments_in(Int tokens, Int tokens_per_segment) {
    return tokens > tokens_per_segment ? (tokens + tokens_per_segment - 1) / tokens_per_segment : 1;
}

/* segment_tokens() for a sequence of a call.  For packed sequences the device divides in 32 bits, because a 64-bit
 * division would take half a microsecond. */
GT_DEV int64_t segment_length(const Sequences& q, const Segments& cut, int chunk, int64_t tokens) {
    return q.cu_seqlens ? segment_tokens((uint32_t)tokens, (uint32_t)cut.count, chunk) : cut.tokens;
}

GT_DEV int64_t segments_of(const Sequences& q, const Segments& cut, int chunk, int64_t tokens) {
    if (!q.cu_seqlens) return cut.count;
    return segments_in((uint32_t)tokens, segment_tokens((uint32_t)tokens, (uint32_t)cut.count, chunk));
}

/* Returns the segment slot of the first segment of sequence s.  A sequence has at most `count` segments, and no more
 * segments than chunks.  So the sequences before s need at most s * count segment slots, and at most as many as they
 * have chunk slots.  The result is the smaller of these two numbers. */
GT_DEV int64_t first_segment_slot(const Sequences& q, int64_t count, int64_t s, int64_t chunk_slot) {
    const int64_t slot = s * count;
    return q.cu_seqlens && chunk_slot < slot ? chunk_slot : slot;
}

/* Returns the number of segment slots of a call. */
static inline int64_t segment_slots(const Sequences& q, int64_t count, int chunk) {
    const int64_t slots = most_sequences(q) * count, chunks = chunk_slots(q, chunk);
    return q.capacity && chunks < slots ? chunks : slots;
}

/* One segment of one sequence: tokens first ... end-1 of batch element b. */
struct Span {
    bool exists;
    bool starts, ends; /* the segment is the first, the last of its sequence */
    int64_t sequence, b, first, end;
    int64_t chunk_slot, segment_slot; /* slot of the segment's first chunk; slot of the segment */
};

/* Returns segment `segment` of sequence s, for segment < count and s < sequence_count(). */
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

/* The segment of an item, where item = sequence * count + segment. */
GT_DEV Span span_at(const Sequences& q, const Segments& cut, int chunk, int64_t item) {
    if (cut.count == 1) return span_of(q, cut, chunk, item, 0);
    return span_of(q, cut, chunk, item / cut.count, item % cut.count);
}

/* Returns whether a pass skips a segment.  is_last: the pass reaches this segment last in its sequence.  A pass over
 * ALL_SEGMENTS skips segments without tokens, because a sequence without tokens has no segment slot. */
GT_DEV bool skips(int local, const Span& span, bool is_last) {
    return !span.exists || (local == ALL_BUT_LAST && is_last) || (local == ALL_SEGMENTS && span.first == span.end);
}

/* span_at() for callers that know only the number of segments. */
GT_DEV Span span_at(const Sequences& q, int64_t count, int chunk, int64_t item) {
    return span_at(q, Segments{count, nullptr, nullptr, segment_tokens(q.T, count, chunk)}, chunk, item);
}

/* Returns the state [size] from which the pass through a segment starts; NULL means zeros.  If the sequence has several
 * segments, the scan has stored this state in cut.states.  Otherwise it is the state of sequence s in `states`.  With
 * several segments no block may read `states`: the pass through the sequence's last segment may already be writing
 * there. */
GT_DEV const float* first_state(const Sequences& q, const Segments& cut, const Span& span, int64_t size,
                                const float* states, int64_t s) {
    if (!span.starts || !span.ends) return cut.states + span.segment_slot * size;
    return start_row(q, states, size, s);
}

/* Returns the number of segments of a sequence.  asked: the number that the caller asks for.  If it is 0, the function
 * chooses enough segments to fill the device, which runs `room` blocks at once; a segment takes `blocks` blocks.  A
 * chosen segment has at least `least` tokens.  The number of packed sequences is unknown; the function assumes at most
 * as many as could have `least` tokens each. */
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
    if (q.capacity && count > INT32_MAX / q.capacity) count = INT32_MAX / q.capacity; /* segment numbers are int */
    if (count < 1) count = 1;
    /* The length of a segment is rounded up to whole chunks, so a sequence may need fewer than `count` segments.  For
     * packed sequences `count` stays the upper bound: segments_of() computes the number for each sequence. */
    return q.capacity ? count : segments_in(q.T, segment_tokens(q.T, count, chunk));
}

/* Makes `count` segments, with memory for each segment's state and for its `decays` numbers.  A single segment gets
 * memory only if `wanted` is set. */
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
 * A local pass has stored every segment's end state and decay in `segments`.  For every sequence the scan computes:
 *     S <- state_in;   for every segment, in order:   start = S,   S <- decay . S + end state
 * It works in place: a segment's start state overwrites its end state.
 * REVERSE: S starts from dstate_out and runs from the last segment to the first.
 * ENDS, for gt_OP_segment: S starts from zero.  The last S goes to `ends`, and the log of the whole decay to `decays`;
 * segments.states do not change.
 * grid: strands * ceil(state_size/128).  block: 4 warps, which share nothing; a thread has one state element.  Strand s
 * is the group of blocks that takes sequences s, s + strands, ...
 * Latency bounds the time.  So cp.async copies the end states of 64 segments at once, and the warp computes the scales
 * meanwhile.
 * WHOLE_WARPS: the 32 elements of a warp have the same decay, and a lane computes the scales of two segments.
 * Otherwise every lane computes the scales of its own element, 8 at a time.
 * shared: 64 end states of each element and 64 scales per warp, 34 KB per block.
 * registers: 8 end states and 8 scales; at most 128.
 * bytes: reads and writes the states of the segments once, reads their decays once.
 * The operations of an element have a fixed order, so results are deterministic. */
struct ScanParams {
    Sequences sequences;
    Segments segments;
    int chunk;
    const float* state_in; /* [sequence][state_size], or rows of a pool, or one state for all; NULL: zeros */
    int state_in_shared;
    int64_t state_size, decay_size;
    const float* rate; /* [state_size], multiplies the logs of decays; if NULL, `unit` does */
    float unit = 1.0f;
    int terms = 1;
    int64_t elements = 0;                     /* elements of the state per entry of decays; set by scan_segments() */
    Divider tiles = {};                       /* blocks of a strand; set by scan_segments() */
    int strands = 1;                          /* set by scan_segments(), too */
    float *ends = nullptr, *decays = nullptr; /* ENDS: [sequence][state_size], [sequence][decay_size] or NULL */
};

/* SCAN_BATCH: segments in shared memory at a time.  SCAN_STEPS: segments in registers at a time. */
constexpr int SCAN_THREADS = 128, SCAN_BATCH = 64, SCAN_STEPS = 8;
constexpr int SCAN_SUMS = 4 * 32 * SCAN_BATCH, SCAN_SCALES = 8 * SCAN_BATCH; /* bytes per warp */
constexpr int SCAN_SMEM = SCAN_THREADS / 32 * (SCAN_SUMS + SCAN_SCALES);

/* Starts to copy the warp's 32 elements of `left` end states to sums[segment][32].  The end states are `stride`
 * elements apart. */
template <bool WHOLE_WARPS>
GT_DEV void copy_sums(uint32_t sums, const float* states, int64_t stride, int left, bool inside) {
    if constexpr (WHOLE_WARPS) { /* a lane copies 16 bytes of a segment; 4 segments at once */
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
    int tile;
    const Segments& cut = p.segments;
    const int strand = divide(block_x(), p.tiles, &tile);
    const int64_t element = (int64_t)tile * SCAN_THREADS + thread_id();
    const bool inside = element < p.state_size;
    if (element - lane_id() >= p.state_size) return;
    const int64_t sequences = sequence_count(p.sequences), step = REVERSE ? -1 : 1, stride = step * p.state_size;
    /* index of the element's decay within a segment */
    const int64_t entry = element <= UINT32_MAX && p.elements <= UINT32_MAX ? (uint32_t)element / (uint32_t)p.elements
                                                                            : element / p.elements;
    wait_for_chain();
    const float rate = p.rate && inside ? p.rate[element] : p.unit;
    const uint32_t sums = smem_base() + SCAN_SUMS * warp_id();
    const uint32_t scales = smem_base() + SCAN_THREADS / 32 * SCAN_SUMS + SCAN_SCALES * warp_id();
    for (int64_t s = strand; s < sequences; s += p.strands) {
        const Sequence seq = sequence_at(p.sequences, p.chunk, s);
        const int64_t count = segments_of(p.sequences, cut, p.chunk, seq.tokens);
        if (count == 1 && !ENDS) continue;
        /* Number of segments to add.  Without ENDS the scan leaves out the last segment, since no segment follows. */
        const int64_t passed = !ENDS ? count - 1 : seq.tokens ? count : 0;
        const int64_t first = first_segment_slot(p.sequences, cut.count, s, seq.slot) + (REVERSE ? count - 1 : 0);
        float* states = cut.states + first * p.state_size + element;
        const float* decays = cut.decays + first * p.terms * p.decay_size + entry;
        const auto log_of = [&](int64_t k) {
            const float* decay = decays + k * step * p.terms * p.decay_size;
            return rate * (p.terms == 2 ? decay[0] + decay[p.decay_size] : decay[0]);
        };
        const float* start = start_row(p.sequences, p.state_in, p.state_size, p.state_in_shared ? 0 : s);
        float S = start && inside ? start[element] : 0.0f;
        float whole = 0.0f; /* ENDS: sum of the logs of the lane's segments */
        for (int64_t k0 = 0; k0 < passed; k0 += SCAN_BATCH) {
            const int left = passed - k0 < SCAN_BATCH ? (int)(passed - k0) : SCAN_BATCH;
            bool grows = false;
            copy_sums<WHOLE_WARPS>(sums, states, stride, left, inside);
            if constexpr (WHOLE_WARPS) {
                float log[SCAN_BATCH / 32];
                GT_UNROLL
                for (int j = 0; j < SCAN_BATCH / 32; j++) { /* past the end a lane loads the last segment again,
                                                             * because a branch would make loads wait for each other */
                    const int segment = lane_id() + 32 * j;
                    log[j] = log_of(k0 + (segment < left ? segment : left - 1));
                }
                GT_UNROLL
                for (int j = 0; j < SCAN_BATCH / 32; j++) {
                    const Scale scale = scale_of_segment(log[j]);
                    sts<float2>(scales + 8 * (lane_id() + 32 * j), {scale.keep, scale.factor});
                    grows = grows || scale.keep == FAR;
                    if (ENDS && lane_id() + 32 * j < left) whole += log[j];
                }
            }
            cp_async_wait<0>();
            sync_warp();
            for (int k = 0; k < left; k += SCAN_STEPS) {
                float sum[SCAN_STEPS];
                Scale scale[SCAN_STEPS];
                GT_UNROLL
                for (int i = 0; i < SCAN_STEPS; i++) {
                    const int segment = k + i < left ? k + i : k; /* beyond the last segment any segment will do */
                    sum[i] = inside ? lds<float>(sums + 4 * (32 * segment + lane_id())) : 0.0f;
                    if constexpr (WHOLE_WARPS) {
                        const float2 x = lds<float2>(scales + 8 * segment);
                        scale[i] = {x.x, x.y};
                    } else {
                        scale[i].factor = inside ? log_of(k0 + segment) : 0.0f; /* the log; replaced below */
                        if (ENDS && k + i < left) whole += scale[i].factor;
                    }
                }
                GT_UNROLL
                for (int i = 0; !WHOLE_WARPS && i < SCAN_STEPS; i++) {
                    scale[i] = scale_of_segment(scale[i].factor);
                    grows = grows || scale[i].keep == FAR;
                }
                /* The chain of dependent steps determines the time, so the usual case has no branch in it. */
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
            sync_warp(); /* all lanes have read sums and scales, which the next batch overwrites */
        }
        if (inside && !ENDS) *states = S;
        if constexpr (ENDS) {
            if (WHOLE_WARPS) whole = warp_sum(whole);
            if (inside) p.ends[s * p.state_size + element] = S;
            if (inside && p.decays && entry * p.elements == element) p.decays[s * p.decay_size + entry] = whole;
        }
    }
}

/* Launches scan_segments_kernel.  stream: a gt_stream, or a Chain. */
template <bool REVERSE, bool ENDS = false, class Stream>
static inline gt_status scan_segments(const char* name, ScanParams p, const Device& device, Stream& stream) {
    const int64_t tiles = (p.state_size + SCAN_THREADS - 1) / SCAN_THREADS, room = 32 * (int64_t)device.multiprocessors;
    const int64_t most = most_sequences(p.sequences), wanted = (room + tiles - 1) / tiles;
    if (tiles > INT32_MAX)
        return gt_fail(GT_ERROR_SIZE, "%s: %lld blocks are too many for a grid", name, (long long)tiles);
    p.elements = p.state_size / p.decay_size;
    p.tiles = divide_by((int)tiles);
    p.strands = (int)(most < wanted ? most : wanted);
    p.segments.tokens = segment_tokens(p.sequences.T, p.segments.count, p.chunk);
    const bool whole_warps = !p.rate && p.elements % 32 == 0;
    return run(name,
               whole_warps ? scan_segments_kernel<REVERSE, true, ENDS> : scan_segments_kernel<REVERSE, false, ENDS>,
               tiles * p.strands, SCAN_THREADS, SCAN_SMEM, stream, p);
}

} /* namespace gt */

#endif /* GT_RECURRENCE_SEGMENTS_CUH */
