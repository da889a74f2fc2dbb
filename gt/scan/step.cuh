/* gt/scan/step.cuh - selective_scan step: advances every batch element by 1 to 16 tokens and updates its state in
 * place.
 *
 *     h <- exp(Delta A) h + Delta u B        y = (<h, C> + Dskip u) silu(z)        token by token
 *
 * TILE.  LANES adjacent lanes own CHANNELS channels.  A lane has VECS vectors of 4 adjacent elements of each state.
 * Its first vector begins at element 4 lane; if VECS = 2, its second begins 4 LANES elements further.  A warp has TILE
 * = 32 / LANES * CHANNELS channels.  The i-th channel of lane group g is channel i * 32 / LANES + g of the warp, so
 * that a warp's loads are adjacent.  No warp waits for another.
 *
 *     N up to   LANES   VECS   CHANNELS    channels of a warp
 *          16       4      1          4    32
 *          32       8      1          4    16
 *          64      16      1          4     8
 *         128      32      1          4     4
 *         256      32      2          2     2
 *
 * Each lane computes Delta and y of a single channel, which the code calls the lane's own channel.  LANES / CHANNELS
 * lanes have the same own channel.  Shuffles hand Delta and Delta u to all lanes that hold the channel's state.
 * SUMS OVER n.  A lane adds its elements in order.  Then a tree adds lanes: first lanes LANES / 2 apart, and adjacent
 * lanes last.
 * DECAY.  Each element's exponent z chooses how 2^z is computed: by ex2, by a polynomial near 1, or by four steps of
 * growth (see Path in problem.cuh).  The choice for one element does not depend on other elements.  So T tokens in one
 * call give the same bits as T calls of one token.  A warp skips the forms that none of its elements needs.
 *
 * STATE.  The state stays in registers for all tokens.  It is stored after the last token that the caller commits.
 * While a warp works on one batch element, cp.async copies the state of the next one to shared memory.  A warp has two
 * buffers there, 4 KB in all.  Each lane reads only its own copies, so no barrier is needed.  The kernel for AnyType
 * (unaligned or strided tensors) has no such copies.
 * REGISTERS: 16 numbers of the state and 16 of A.  SHARED MEMORY: 8 KB for each block.
 * BYTES per channel: 8 N to read and write the state; 4 N for A from L2, once for all batch elements that a warp takes.
 * Per token and channel, bf16: u, dt, y (and z) 2 each.
 * ISSUE SLOTS per token and element, N = 16: exponent 1, 2^z 1, Delta u B 1, h 1, y 1, the rest about 3.
 * GRID: a strand is a set of G * parts blocks that covers all channels: a part has STEP_WARPS warps of one group.  A
 * strand takes every `strands`-th batch element.  There are as many strands as fit on the GPU at once. */
#ifndef GT_SCAN_STEP_CUH
#define GT_SCAN_STEP_CUH

#include "../recurrence/ssm_step.cuh"
#include "problem.cuh"

namespace gt {
namespace scan {

constexpr int STEP_WARPS = 2; /* warps of a block; so 8192 channels of one batch element make 128 blocks, if N <= 16 */

struct StepParams {
    int64_t B, D, G;
    int N;
    gt_dtype dtype, dt_dtype;
    int softplus;
    const void *u, *dt, *Bm, *Cm, *z;
    const float* A;
    const void *Dskip, *dt_bias;
    gt_dtype parameter_dtype;
    void* y;
    void* state; /* [slot_capacity,D,N] */
    gt_dtype state_dtype;
    gt_stride u_stride, dt_stride, z_stride, y_stride;
    gt_stride4 Bm_stride, Cm_stride;
    StepRounding rounding;
    StepElements elements;
    int64_t strands;
    Divider by_strand, by_group; /* divide by the blocks of a strand and of a group */
};

/* MIXED: the dtypes of states, Dskip and dt_bias are known only at run time.  Without MIXED, all of these are fp32. */
template <int LANES_, int VECS_, bool EXACT_, bool MIXED_>
struct StepTraits {
    static constexpr int LANES = LANES_, VECS = VECS_, COLUMNS = 4 * VECS, CHANNELS = 16 / COLUMNS;
    static constexpr int PIECES = CHANNELS * VECS; /* pieces of four numbers in a lane's state */
    static constexpr bool EXACT = EXACT_;          /* activations are fp32 */
    static constexpr bool MIXED = MIXED_;
    static constexpr int GROUPS = 32 / LANES, TILE = GROUPS * CHANNELS;
    static constexpr int SAME = LANES / CHANNELS; /* lanes that have the same own channel */
};

/* The least number of blocks per multiprocessor, which limits the registers per thread.  10 blocks leave 96 registers,
 * enough for bf16 with N <= 16; 8 blocks leave 128, and 5 blocks leave 204. */
template <class T, int LANES>
struct StepBlocks {
    static constexpr int VALUE = std::is_same<T, AnyType>::value              ? 5
                                 : std::is_same<T, bf16>::value && LANES == 4 ? 10
                                                                              : 8;
};

/* The batch element and channels of a lane. */
template <class C>
struct StepPlace {
    int64_t b, g, channel; /* channel: the warp's first one */
    int channels;          /* existing channels of the warp */
    int lane, group;       /* lane: index among the LANES lanes of a channel; group: index of this set of lanes in the
                            * warp */
    int own;               /* the lane's own channel, as an index in the warp */

    GT_METHOD int number(int i) const { return i * C::GROUPS + group; }
    GT_METHOD int column(int v) const { return 4 * lane + 4 * C::LANES * v; }
    /* how many state elements of vector v exist in channel i */
    GT_METHOD int valid(int N, int i, int v) const { return number(i) < channels ? N - column(v) : 0; }
};

/* The lane's position in the activations, and its elements of one token.  They are converted to fp32 when they are
 * used. */
template <class T, class C>
struct StepInputs {
    TokenCursor<T> B_at, C_at, u_at, z_at;
    int64_t dt_at;
    Piece<T, 4> B[C::VECS], Cm[C::VECS];
    Piece<T, 1> u, z;
    uint32_t dt = 0;

    GT_METHOD StepInputs(const StepParams& p, const StepPlace<C>& s)
        : B_at(p.Bm, p.dtype, offset_of(p.Bm_stride, s.b, 0, s.g) + s.column(0) * p.Bm_stride.n, p.Bm_stride.n),
          C_at(p.Cm, p.dtype, offset_of(p.Cm_stride, s.b, 0, s.g) + s.column(0) * p.Cm_stride.n, p.Cm_stride.n),
          u_at(p.u, p.dtype, offset_of(p.u_stride, s.b, 0, s.channel + s.own)),
          z_at(p.z, p.dtype, offset_of(p.z_stride, s.b, 0, s.channel + s.own)),
          dt_at(offset_of(p.dt_stride, s.b, 0, s.channel + s.own)) {
        load(p, s);
    }
    GT_METHOD void load(const StepParams& p, const StepPlace<C>& s) {
        const int exists = s.own < s.channels;
        u.load(u_at, 0, exists);
        if (exists) dt = load_bits(p.dt, p.dt_dtype, dt_at);
        if (p.z) z.load(z_at, 0, exists);
        GT_UNROLL
        for (int v = 0; v < C::VECS; v++) {
            B[v].load(B_at, 4 * C::LANES * v, p.N - s.column(v));
            Cm[v].load(C_at, 4 * C::LANES * v, p.N - s.column(v));
        }
    }
    GT_METHOD void move(const StepParams& p) {
        B_at.move(p.Bm_stride.t);
        C_at.move(p.Cm_stride.t);
        u_at.move(p.u_stride.t);
        z_at.move(p.z_stride.t);
        dt_at += p.dt_stride.t;
    }
};

/* How the elements of a warp compute decays: all as powers of two; some near 1; some with growth beyond fp32. */
enum Forms { POWERS, SOME_NEAR_ONE, SOME_FAR };

/* 2^z h + added */
template <int FORMS, bool EXACT>
GT_DEV float carry(float z, float h, float added) {
    if (FORMS == SOME_FAR && z * LN_2 >= FAR_GROWTH) return grow(z * LN_2, h) + added;
    const bool is_near = FORMS != POWERS && fabsf(z) < Least<EXACT>::VALUE;
    const float factor = is_near ? Least<EXACT>::below_one(z) : ex2_approx(z);
    float sum = fma_rn(factor, h, added);
    if (is_near) sum += h;
    return sum;
}

/* Advances the states by one token.  delta: Delta times log2(e).  Returns <h, C> of the lane's own channel. */
template <int FORMS, class C>
GT_DEV float advance(float (&h)[C::CHANNELS][C::COLUMNS], const float (&A)[C::CHANNELS][C::COLUMNS],
                     const float (&delta)[C::CHANNELS], const float (&input)[C::CHANNELS], const float (&B)[C::COLUMNS],
                     const float (&Cm)[C::COLUMNS], int lane) {
    float sums[C::CHANNELS];
    GT_UNROLL
    for (int i = 0; i < C::CHANNELS; i++) {
        GT_UNROLL
        for (int c = 0; c < C::COLUMNS; c++) {
            h[i][c] = carry<FORMS, C::EXACT>(delta[i] * A[i][c], h[i][c], input[i] * B[c]);
            sums[i] = c ? fma_rn(h[i][c], Cm[c], sums[i]) : h[i][c] * Cm[c];
        }
    }
    reduce_scatter<C::CHANNELS, C::LANES, 1>(sums, lane);
    return sums[0];
}

template <class C>
GT_DEV int forms_of(const float (&A)[C::CHANNELS][C::COLUMNS], const float (&delta)[C::CHANNELS]) {
    float least = INFINITY, most = -INFINITY;
    GT_UNROLL
    for (int i = 0; i < C::CHANNELS; i++) {
        GT_UNROLL
        for (int c = 0; c < C::COLUMNS; c++) {
            const float z = delta[i] * A[i][c];
            least = fminf(least, fabsf(z)), most = fmaxf(most, z);
        }
    }
    if (warp_any(most * LN_2 >= FAR_GROWTH)) return SOME_FAR;
    return warp_any(least < Least<C::EXACT>::VALUE) ? SOME_NEAR_ONE : POWERS;
}

/* Stores y = 0 for tokens t ... T-1.  y_at: at token t. */
template <class T>
GT_DEV void clear_channel(const StepParams& p, TokenCursor<T> y_at, int t, bool writes) {
    for (; t < p.elements.T; t++, y_at.move(p.y_stride.t))
        if (writes) y_at.store(0, 0.0f);
}

/* state_of(): the batch element's state from the warp's first channel on.  piece_of(): a lane's piece number i of this
 * state, four numbers. */
template <class C>
GT_DEV StepState state_of(const StepParams& p, const StepPlace<C>& s, const StepElement& element) {
    return {p.state, C::MIXED ? p.state_dtype : GT_F32, (element.row * p.D + s.channel) * p.N};
}

template <class C>
GT_DEV StatePiece piece_of(const StepPlace<C>& s, int i, int N) {
    const int channel = i / C::VECS, v = i % C::VECS;
    return {s.number(channel) * N + s.column(v), s.valid(N, channel, v),
            s.number(channel) * (int)gt_row_groups(N) + s.column(v) / 4};
}

/* Starts to copy the state of a batch element to shared memory, as one cp.async group.  The group is empty if the step
 * skips the element. */
template <class C>
GT_DEV void fetch_state(const StepParams& p, const StepPlace<C>& s, const StepElement& element, uint32_t to) {
    if (!element.is_skipped(p.elements))
        fetch_step_state<C::PIECES>(to, state_of(p, s, element), [&](int i) { return piece_of(s, i, p.N); });
    cp_async_commit();
}

/* Runs all tokens of one batch element for the warp's channels.  at: address of the element's state in shared memory,
 * if VECTORS. */
template <class T, class C>
GT_DEV void step_channels(const StepParams& p, const StepPlace<C>& s, const StepElement& element, uint32_t at,
                          const float (&A)[C::CHANNELS][C::COLUMNS], uint32_t bias_bits, uint32_t skip_bits) {
    constexpr bool VECTORS = !std::is_same<T, AnyType>::value;
    const bool writes = s.lane % C::SAME == 0 && s.own < s.channels; /* SAME lanes have the same y; one of them stores
                                                                      * it */
    StepInputs<T, C> inputs(p, s);
    TokenCursor<T> y_at(p.y, p.dtype, offset_of(p.y_stride, s.b, 0, s.channel + s.own));
    if (element.is_skipped(p.elements)) {
        clear_channel(p, y_at, 0, writes);
        return;
    }
    const gt_dtype parameter_dtype = C::MIXED ? p.parameter_dtype : GT_F32;
    const StepState state = state_of(p, s, element);
    float h[C::CHANNELS][C::COLUMNS];
    if constexpr (VECTORS) {
        cp_async_wait<1>(); /* waits for all groups but the last, which copies the next batch element's state */
        read_step_state<C::PIECES>(h[0], at, state.dtype);
    } else {
        load_step_state<false, C::PIECES>(h[0], state, [&](int i) { return piece_of(s, i, p.N); });
    }
    const float bias = value_of_bits(bias_bits, parameter_dtype), skip = value_of_bits(skip_bits, parameter_dtype);
    GT_NO_UNROLL
    for (int t = 0; t < element.tokens; t++) {
        const float u = inputs.u.get(0), dt = value_of_bits(inputs.dt, p.dt_dtype) + bias;
        const float gate = p.z ? inputs.z.get(0) : 0.0f;
        float B[C::COLUMNS], Cm[C::COLUMNS];
        GT_UNROLL
        for (int c = 0; c < C::COLUMNS; c++) B[c] = inputs.B[c / 4].get(c % 4), Cm[c] = inputs.Cm[c / 4].get(c % 4);
        inputs.move(p); /* the next token's loads reuse the registers of the current one */
        if (t + 1 < element.tokens) inputs.load(p, s);
        const float own = !p.softplus ? dt : C::EXACT ? softplus(dt) : softplus_fast(dt);
        const float exponent = finite(LOG2_E * own); /* the exponent of 2 in the decay for A = 1 */
        float delta[C::CHANNELS], input[C::CHANNELS], y;
        GT_UNROLL
        for (int i = 0; i < C::CHANNELS; i++) {
            const int from = s.group * C::LANES + i * C::SAME;
            delta[i] = shfl_idx(exponent, from);
            input[i] = shfl_idx(own * u, from);
        }
        const int forms = forms_of<C>(A, delta);
        /* advance() computes the exponents again, because registers cannot keep those of forms_of() */
        GT_UNROLL
        for (int i = 0; i < C::CHANNELS; i++) delta[i] = made_here(delta[i]);
        if (forms == POWERS)
            y = advance<POWERS, C>(h, A, delta, input, B, Cm, s.lane);
        else if (forms == SOME_NEAR_ONE)
            y = advance<SOME_NEAR_ONE, C>(h, A, delta, input, B, Cm, s.lane);
        else
            y = advance<SOME_FAR, C>(h, A, delta, input, B, Cm, s.lane);
        y = fma_rn(skip, u, y);
        if (p.z) y *= C::EXACT ? silu(gate) : silu_fast(gate);
        if (writes) y_at.store(0, y);
        y_at.move(p.y_stride.t);
        if (t + 1 != element.commit) continue;
        const int N = made_here(p.N); /* otherwise the addresses of the loads would stay in registers */
        store_step_state<VECTORS, C::PIECES>(
            state, h[0], [&](int i) { return piece_of(s, i, N); }, p.rounding, s.b, s.channel * gt_row_groups(N));
    }
    clear_channel(p, y_at, element.tokens, writes);
}

/* Loads A of the lane's elements.  A missing element is -1, so that it does not choose another form of decay.  The
 * function does not wait for the loads, so the state's loads can follow at once. */
template <bool VECTORS, class C>
GT_DEV void load_A(const StepParams& p, const StepPlace<C>& s, float (&A)[C::CHANNELS][C::COLUMNS]) {
    const float* const from = p.A + s.channel * p.N;
    GT_UNROLL
    for (int i = 0; i < C::CHANNELS; i++) {
        GT_UNROLL
        for (int v = 0; v < C::VECS; v++)
            load_four<VECTORS>(A[i] + 4 * v, from + s.number(i) * p.N + s.column(v), s.valid(p.N, i, v), -1.0f);
    }
}

template <class T, int LANES, int VECS, bool EXACT, bool MIXED>
GT_KERNEL(32 * STEP_WARPS, (StepBlocks<T, LANES>::VALUE))
step_kernel(const GT_GRID_CONSTANT StepParams p) {
    using C = StepTraits<LANES, VECS, EXACT, MIXED>;
    const int64_t per_group = p.D / p.G;
    StepPlace<C> s;
    int in_strand, part;
    const int strand = divide(block_x(), p.by_strand, &in_strand);
    s.g = divide(in_strand, p.by_group, &part);
    const int64_t first = ((int64_t)part * STEP_WARPS + warp_id()) * C::TILE, left = per_group - first;
    if (left <= 0) return;
    s.channel = s.g * per_group + first;
    s.channels = (int)(left < C::TILE ? left : C::TILE);
    s.lane = lane_id() % LANES;
    s.group = lane_id() / LANES;
    s.own = s.number(s.lane / C::SAME);
    float A[C::CHANNELS][C::COLUMNS];
    load_A<!std::is_same<T, AnyType>::value>(p, s, A);
    const int64_t d = s.channel + s.own;
    const bool exists = s.own < s.channels;
    const gt_dtype parameter_dtype = MIXED ? p.parameter_dtype : GT_F32;
    const uint32_t bias = p.dt_bias && exists ? load_bits(p.dt_bias, parameter_dtype, d) : 0;
    const uint32_t skip = p.Dskip && exists ? load_bits(p.Dskip, parameter_dtype, d) : 0;
    if constexpr (std::is_same<T, AnyType>::value) {
        for (s.b = strand; s.b < p.B; s.b += p.strands)
            step_channels<T>(p, s, StepElement(p.elements, s.b), 0, A, bias, skip);
    } else {
        uint32_t at = smem_base() + (uint32_t)warp_id() * 2 * AHEAD_BYTES<C::PIECES>,
                 other = at + AHEAD_BYTES<C::PIECES>;
        StepElement element(p.elements, strand);
        fetch_state(p, s, element, at);
        for (s.b = strand; s.b < p.B; s.b += p.strands) {
            StepElement next = element;
            if (s.b + p.strands < p.B) {
                next = StepElement(p.elements, s.b + p.strands);
                fetch_state(p, s, next, other);
            } else {
                cp_async_commit(); /* an empty group, because step_channels() counts groups */
            }
            step_channels<T>(p, s, element, at, A, bias, skip);
            element = next;
            const uint32_t done = at;
            at = other, other = done;
        }
    }
}

/* ---- launch ---------------------------------------------------------------------------------------------------- */

/* Whether all rows of A, B, C and states consist of aligned vectors of four numbers. */
static inline bool has_step_vectors(const gt_selective_scan_args& a) {
    const gt_stride4 &B = a.Bm_stride, &C = a.Cm_stride;
    return a.N % 4 == 0 && has_aligned_fours(a.state_out, a.state_dtype) && has_aligned_fours(a.A, GT_F32) &&
           B.n == 1 && C.n == 1 && has_fours(a.Bm, {B.b, B.t, B.h}, a.dtype) &&
           has_fours(a.Cm, {C.b, C.t, C.h}, a.dtype);
}

template <class T, int LANES, int VECS, bool EXACT, bool MIXED>
static inline gt_status launch_step_of(const gt_selective_scan_args& a, const Device& device, gt_stream stream) {
    using C = StepTraits<LANES, VECS, EXACT, MIXED>;
    constexpr int BLOCK = STEP_WARPS * C::TILE;
    const int64_t parts = (a.D / a.G + BLOCK - 1) / BLOCK, blocks = a.G * parts;
    /* The grid has as many blocks as run at once, so that a warp takes several batch elements in turn.  If one batch
     * element needs more than half of these blocks, only one strand would fit, and many multiprocessors would stay
     * idle.  Then a warp takes 4 batch elements instead. */
    const int64_t at_once = (int64_t)device.multiprocessors * StepBlocks<T, LANES>::VALUE;
    const int64_t count = 2 * blocks > at_once ? (a.B + 3) / 4 : strands(a.B, blocks, at_once);
    StepParams p = {};
    p.B = a.B, p.D = a.D, p.G = a.G;
    p.N = (int)a.N;
    p.dtype = a.dtype, p.dt_dtype = a.dt_dtype;
    p.softplus = a.softplus;
    p.u = a.u, p.dt = a.dt, p.Bm = a.Bm, p.Cm = a.Cm, p.z = a.z;
    p.A = a.A, p.Dskip = a.Dskip, p.dt_bias = a.dt_bias;
    p.parameter_dtype = a.parameter_dtype, p.state_dtype = a.state_dtype;
    p.y = a.y, p.state = a.state_out;
    p.u_stride = a.u_stride, p.dt_stride = a.dt_stride, p.z_stride = a.z_stride, p.y_stride = a.y_stride;
    p.Bm_stride = a.Bm_stride, p.Cm_stride = a.Cm_stride;
    p.elements = step_elements_of(a);
    p.rounding = step_rounding_of(a);
    p.strands = a.T > 0 ? strands(count, blocks, INT32_MAX) : 0;
    p.by_strand = divide_by((int)blocks), p.by_group = divide_by((int)parts);
    return run("selective_scan step_kernel", step_kernel<T, LANES, VECS, EXACT, MIXED>, p.strands * blocks,
               32 * STEP_WARPS, std::is_same<T, AnyType>::value ? 0 : STEP_WARPS * 2 * AHEAD_BYTES<C::PIECES>, stream,
               p);
}

/* Launches the smallest kernel that handles N. */
template <class T, bool EXACT, bool MIXED>
static inline gt_status launch_step_with(const gt_selective_scan_args& a, const Device& device, gt_stream stream) {
    if constexpr (BUILT_N32) {
        if (a.N <= 16) return launch_step_of<T, 4, 1, EXACT, MIXED>(a, device, stream);
        if (a.N <= 32) return launch_step_of<T, 8, 1, EXACT, MIXED>(a, device, stream);
    }
    if constexpr (BUILT_N64)
        if (a.N <= 64) return launch_step_of<T, 16, 1, EXACT, MIXED>(a, device, stream);
    if constexpr (BUILT_N128)
        if (a.N <= 128) return launch_step_of<T, 32, 1, EXACT, MIXED>(a, device, stream);
    return launch_step_of<T, 32, 2, EXACT, MIXED>(a, device, stream);
}

static inline gt_status launch_step(const gt_selective_scan_args& a, const Device& device, gt_stream stream) {
    if (has_step_vectors(a))
        return with_activations(a.dtype, [&](auto type) {
            using T = decltype(type);
            constexpr bool EXACT = std::is_same<T, float>::value;
            const bool is_mixed = a.state_dtype != GT_F32 || a.parameter_dtype != GT_F32;
            if constexpr (!std::is_same<T, AnyType>::value)
                if (!is_mixed) return launch_step_with<T, EXACT, false>(a, device, stream);
            return launch_step_with<T, EXACT, true>(a, device, stream);
        });
    return a.dtype == GT_F32 ? launch_step_with<AnyType, true, true>(a, device, stream)
                             : launch_step_with<AnyType, false, true>(a, device, stream);
}

} /* namespace scan */
} /* namespace gt */

#endif
