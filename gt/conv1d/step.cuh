/* gt/conv1d/step.cuh - step: 1 to 16 new tokens of every batch element.  States lie in slots and are updated in place.
 *
 *     y_t = act(bias + sum_k weight_k e_{t+k})      e is the W - 1 inputs of the state, followed by the tokens
 *
 * step_rows_kernel serves calls whose channels lie in adjacent, aligned groups of 4 in x, y, states and parameters.
 * tile: a warp has 128 channels of one batch element, a lane 4 of them.  The 8 warps of a block have the same channels,
 * so a block loads weights from L2 once for 8 batch elements.
 * grid: ceil(D / 128) * ceil(B / 8).  Block: 256.  One launch, no workspace.
 * A warp moves its 128 (W - 1) floats of state in 16-byte pieces; adjacent lanes move adjacent pieces.  Lanes exchange
 * the pieces through shared memory, so that every sector is read once and written once.
 * shared memory, W = 4: 2.5 KB of weights, 12 KB of states.  A lane's part has an odd number of pieces, so 8 lanes read
 * their parts from different banks.
 * registers: weights and bias, W - 1 inputs of 4 channels, and BATCH loaded tokens (1 for calls of one token, else 4).
 * bytes of a channel, W = 4: 24 for the state and 2 elements for each token.  20 bytes of parameters come from L2 once
 * for 8 batch elements.
 * A thread issues the loads of states, parameters and BATCH tokens before it uses any of them.
 * issue slots of a thread, W = 4, one token: 10 global and 14 shared loads and stores, 16 multiply-adds, 4 SiLU.
 *
 * A batch element may commit fewer tokens than it has.  Then the new state ends at the last committed token.  Only
 * then does the kernel load the last committed tokens again, so other calls do not pay for this case.
 *
 * step_fours_kernel takes W = 4 and states of 4 columns, in any dtypes.  It has the same tile, without shared memory.
 * Each lane loads the 16 adjacent values of its 4 channels.
 * bytes of a channel, states and weights of 16 bits: 16 for the state and 2 elements for each token; 10 bytes of
 * parameters from L2.
 *
 * step_kernel takes any dtypes, strides, alignment and number of state columns, and states that are rings.  Its grid is
 * B * ceil(D / 256), its block 256, and a thread has one channel.
 *
 * All kernels add in the order of forward, so a result does not depend on the kernel that alignment selects. */
#ifndef GT_CONV1D_STEP_CUH
#define GT_CONV1D_STEP_CUH

#include "../base/launch.cuh"
#include "../recurrence/step_states.cuh"
#include "problem.cuh"

namespace gt {
namespace conv1d {

struct StepParams {
    Problem in; /* the kernels do not read its state_in */
    void* y;
    gt_stride y_stride;
    void* state; /* [slot_capacity,D,columns] */
    gt_dtype state_dtype, weight_dtype;
    gt_stride state_stride; /* strides of rows, channels and columns */
    int64_t columns;
    const int32_t* places;
    StepElements elements;
    Divider by_parts; /* divides by the number of parts of a row; a part is 128 channels, in step_kernel THREADS */
};

constexpr int STEP_BATCH = 4;

/* A thread's tokens of VEC channels.  BATCH tokens are loaded together: 1 in calls of one token, otherwise
 * STEP_BATCH. */
template <class T, int VEC, int BATCH>
struct StepTokens {
    const StepParams& p;
    const StepElement& element;
    const T* x;
    T* y;
    Vec<T, VEC> loaded[BATCH];

    GT_METHOD StepTokens(const StepParams& params, const StepElement& of, int64_t b, int64_t d)
        : p(params), element(of), x(static_cast<const T*>(params.in.x) + offset_of(params.in.x_stride, b, 0, d)),
          y(static_cast<T*>(params.y) + offset_of(params.y_stride, b, 0, d)) {}

    GT_METHOD int count() const { return BATCH == 1 ? 1 : element.tokens; }

    /* Loads up to BATCH tokens, from t on. */
    GT_METHOD void load(int t) {
        GT_UNROLL
        for (int i = 0; i < BATCH; i++)
            if (t + i < count()) loaded[i] = ldg<Vec<T, VEC>>(x + (t + i) * p.in.x_stride.t);
    }

    /* Computes and stores y.  On entry e[0 ... W-2] holds the inputs before the tokens, oldest first; on return the
     * last inputs.  load(0) must come first. */
    template <int W>
    GT_METHOD void run(const float (&weight)[W][VEC], const float (&bias)[VEC], float (&e)[W][VEC]) {
        const int tokens = count();
        for (int t = 0; t < tokens; t += BATCH) {
            if (t > 0) load(t);
            GT_UNROLL
            for (int i = 0; i < BATCH; i++) {
                if (t + i >= tokens) break;
                float out[VEC];
                GT_UNROLL
                for (int v = 0; v < VEC; v++) {
                    e[W - 1][v] = loaded[i].get(v);
                    float pre = bias[v];
                    GT_UNROLL
                    for (int k = 0; k < W; k++) pre = fma_rn(weight[k][v], e[k][v], pre);
                    out[v] = output_of_sum<T>(p.in.has_silu, pre);
                }
                Vec<T, VEC> packed;
                packed.set(out);
                stg(y + (t + i) * p.y_stride.t, packed);
                shift(e);
            }
        }
        if (BATCH > 1) clear(tokens);
    }

    GT_METHOD bool commits_fewer() const { return BATCH > 1 && element.commit < count(); }

    /* On entry e[0 ... W-2] holds the inputs before the tokens; on return the inputs before the first uncommitted
     * token. */
    template <int W>
    GT_METHOD void commit(float (&e)[W][VEC]) {
        GT_UNROLL
        for (int j = 0; j < W - 1; j++) {
            const int t = element.commit - (W - 1) + j;
            if (t < 0) continue;
            const Vec<T, VEC> last = ldg<Vec<T, VEC>>(x + t * p.in.x_stride.t);
            GT_UNROLL
            for (int v = 0; v < VEC; v++) e[W - 1][v] = last.get(v);
            shift(e);
        }
    }

    /* Stores y = 0 for tokens first ... T-1. */
    GT_METHOD void clear(int first) {
        for (int t = first; t < p.elements.T; t++) stg(y + t * p.y_stride.t, Vec<T, VEC>{});
    }
};

/* The state of one channel: S inputs, either in order of time or as a ring. */
struct StepColumns {
    void* data;
    gt_dtype dtype;
    int64_t first, step, S; /* index of column 0; stride of columns; number of columns */
    int64_t place;          /* ring: the column of the next input; otherwise S */

    GT_METHOD StepColumns(const StepParams& p, int64_t row, int64_t b, int64_t d)
        : data(p.state), dtype(p.state_dtype), first(offset_of(p.state_stride, row, d, 0)), step(p.state_stride.h),
          S(p.columns), place(S) {
        if (!p.places) return;
        place = p.places[b] % S;
        if (place < 0) place += S;
    }
    GT_METHOD uint32_t bits(int64_t column) const { return load_bits(data, dtype, first + column * step); }
    GT_METHOD void store(int64_t column, float x) const { store_as(data, dtype, first + column * step, x); }
    GT_METHOD int64_t around(int64_t column) const { return column < S ? column : column % S; }
    /* Returns the column of an input.  Its age is 1 for the newest input, and at most S. */
    GT_METHOD int64_t before(int age) const { return place >= age ? place - age : place - age + S; }
    GT_METHOD bool is_ring() const { return place < S; }
};

template <class T, int W>
GT_KERNEL(THREADS, 2)
step_kernel(const GT_GRID_CONSTANT StepParams p) {
    constexpr int J = W - 1;
    const Problem& in = p.in;
    int part;
    const int64_t b = divide(block_x(), p.by_parts, &part), d = (int64_t)part * THREADS + thread_id();
    if (d >= in.D) return;
    const StepElement element(p.elements, b);
    StepTokens<T, 1, STEP_BATCH> tokens(p, element, b, d);
    if (element.is_skipped(p.elements)) {
        tokens.clear(0);
        return;
    }
    const StepColumns state(p, element.row, b, d);
    uint32_t state_bits[J], weight_bits[W];
    float weight[W][1], e[W][1];
    GT_UNROLL
    for (int j = 0; j < J; j++) state_bits[j] = state.bits(state.before(J - j));
    GT_UNROLL
    for (int k = 0; k < W; k++) weight_bits[k] = load_bits(in.weight, p.weight_dtype, d * W + k);
    const uint32_t bias_bits = in.bias ? load_bits(in.bias, p.weight_dtype, d) : 0;
    tokens.load(0);
    GT_UNROLL
    for (int j = 0; j < J; j++) e[j][0] = value_of_bits(state_bits[j], p.state_dtype);
    GT_UNROLL
    for (int k = 0; k < W; k++) weight[k][0] = value_of_bits(weight_bits[k], p.weight_dtype);
    const float bias[1] = {value_of_bits(bias_bits, p.weight_dtype)};
    tokens.run(weight, bias, e);
    if (element.commit == 0) return;
    /* Without a ring, the inputs that stay move to the front. */
    const int64_t S = state.S, kept = element.commit < S ? S - element.commit : 0;
    for (int64_t j = 0; j < kept && !state.is_ring(); j++)
        state.store(j, value_of_bits(state.bits(j + element.commit), p.state_dtype));
    for (int t = element.commit < S ? 0 : element.commit - (int)S; t < element.commit; t++)
        state.store(state.is_ring() ? state.around(state.place + t) : S - element.commit + t,
                    load_as(in.x, in.dtype, offset_of(in.x_stride, b, t, d)));
}

constexpr int STEP_WARPS = THREADS / 32, STEP_CHANNELS = 128; /* batch elements of a block, and channels of each */

/* Loads the four adjacent values of each of 4 consecutive channels, of a state or of weights.  x[i][v] becomes value i
 * of channel v. */
GT_DEV void load_fours(const void* data, gt_dtype dtype, int64_t at, float (&x)[4][4]) {
    float numbers[16];
    load_step_state<true, 4>(numbers, {const_cast<void*>(data), dtype, at}, [](int v) {
        return StatePiece{4 * v, 4, 0};
    });
    GT_UNROLL
    for (int i = 0; i < 16; i++) x[i % 4][i / 4] = numbers[i];
}

template <class T, int BATCH>
GT_KERNEL(THREADS, BATCH == 1 ? 4 : 2)
step_fours_kernel(const GT_GRID_CONSTANT StepParams p) {
    const Problem& in = p.in;
    int part;
    const int64_t b = (int64_t)STEP_WARPS * divide(block_x(), p.by_parts, &part) + warp_id();
    const int64_t d = (int64_t)part * STEP_CHANNELS + 4 * lane_id();
    if (b >= in.B || d >= in.D) return;
    const StepElement element(p.elements, b);
    StepTokens<T, 4, BATCH> tokens(p, element, b, d);
    if (element.is_skipped(p.elements)) {
        tokens.clear(0);
        return;
    }
    const int64_t row = element.row * p.state_stride.b + 4 * d;
    float weight[4][4], inputs[4][4], e[4][4], bias[4];
    tokens.load(0);
    load_fours(p.state, p.state_dtype, row, inputs); /* [0] is the oldest input, which no sum reads */
    load_fours(in.weight, p.weight_dtype, 4 * d, weight);
    GT_UNROLL
    for (int v = 0; v < 4; v++) {
        bias[v] = load_parameter(in.bias, p.weight_dtype, d + v);
        GT_UNROLL
        for (int j = 0; j < 3; j++) e[j][v] = inputs[j + 1][v];
    }
    tokens.run(weight, bias, e);
    if (element.commit == 0) return;
    for (int t = element.commit < 4 ? 0 : element.commit - 4; t < element.commit; t++) {
        const Vec<T, 4> last = ldg<Vec<T, 4>>(tokens.x + t * in.x_stride.t);
        GT_UNROLL
        for (int v = 0; v < 4; v++) {
            GT_UNROLL
            for (int j = 0; j < 3; j++) inputs[j][v] = inputs[j + 1][v];
            inputs[3][v] = last.get(v);
        }
    }
    float numbers[16];
    GT_UNROLL
    for (int i = 0; i < 16; i++) numbers[i] = inputs[i % 4][i / 4];
    store_step_state<true, 4>(
        {p.state, p.state_dtype, row}, numbers,
        [](int v) {
            return StatePiece{4 * v, 4, 0};
        },
        StepRounding(), 0, 0);
}

/* Layout in shared memory of 4 * COUNT values for each of 32 lanes.  A piece is 4 values; pieces are numbered as they
 * follow in global memory. */
template <int COUNT>
struct LaneParts {
    static constexpr int PART = 16 * (COUNT | 1), BYTES = 32 * PART;
    static constexpr int PIECES = 32 * COUNT;

    GT_HD uint32_t piece(int i) { return (uint32_t)(i / COUNT * PART + i % COUNT * 16); }

    /* to[i][v] becomes value i of the lane's channel v. */
    template <int ROWS>
    GT_DEV void load(uint32_t smem, float (&to)[ROWS][4]) {
        float numbers[4 * COUNT];
        GT_UNROLL
        for (int i = 0; i < COUNT; i++) {
            const float4 x = lds<float4>(smem + (uint32_t)(lane_id() * PART + 16 * i));
            numbers[4 * i] = x.x, numbers[4 * i + 1] = x.y, numbers[4 * i + 2] = x.z, numbers[4 * i + 3] = x.w;
        }
        GT_UNROLL
        for (int i = 0; i < 4 * COUNT; i++) to[i % COUNT][i / COUNT] = numbers[i];
    }

    template <int ROWS>
    GT_DEV void store(uint32_t smem, const float (&from)[ROWS][4]) {
        float numbers[4 * COUNT];
        GT_UNROLL
        for (int i = 0; i < 4 * COUNT; i++) numbers[i] = from[i % COUNT][i / COUNT];
        GT_UNROLL
        for (int i = 0; i < COUNT; i++)
            sts<float4>(smem + (uint32_t)(lane_id() * PART + 16 * i),
                        {numbers[4 * i], numbers[4 * i + 1], numbers[4 * i + 2], numbers[4 * i + 3]});
    }
};

template <int W>
constexpr int STEP_ROWS_SMEM = LaneParts<W>::BYTES + STEP_WARPS* LaneParts<W - 1>::BYTES;

template <class T, int W, int BATCH>
GT_KERNEL(THREADS, BATCH == 1 ? 4 : 3)
step_rows_kernel(const GT_GRID_CONSTANT StepParams p) {
    constexpr int J = W - 1;
    using Weights = LaneParts<W>;
    using States = LaneParts<J>;
    static_assert(Weights::PIECES <= THREADS, "a thread loads one piece of the weights at most");
    const Problem& in = p.in;
    int part;
    const int64_t b = (int64_t)STEP_WARPS * divide(block_x(), p.by_parts, &part) + warp_id();
    const int64_t d0 = (int64_t)part * STEP_CHANNELS, d = d0 + 4 * lane_id();
    const int channels = (int)(in.D - d0 < STEP_CHANNELS ? in.D - d0 : STEP_CHANNELS); /* a multiple of 4 */
    const uint32_t weights = smem_base(), states = weights + Weights::BYTES + warp_id() * States::BYTES;
    const StepElement element(p.elements, b < in.B ? b : 0);
    const bool has_channels = 4 * lane_id() < channels, has_state = b < in.B && !element.is_skipped(p.elements);
    float* state = static_cast<float*>(p.state) + (element.row * in.D + d0) * J;
    StepTokens<T, 4, BATCH> tokens(p, element, b, d);
    float4 pieces[J], weight_piece = {}, bias_piece = {};
    GT_UNROLL
    for (int i = 0; i < J; i++) {
        const int piece = lane_id() + 32 * i;
        pieces[i] = {};
        if (has_state && 4 * piece < channels * J) pieces[i] = ldg<float4>(state + 4 * piece);
    }
    if (has_state && has_channels) tokens.load(0);
    if (4 * thread_id() < channels * W) weight_piece = ldg<float4>(in.weight + d0 * W + 4 * thread_id());
    if (in.bias && has_channels) bias_piece = ldg<float4>(in.bias + d);

    if (thread_id() < Weights::PIECES) sts<float4>(weights + Weights::piece(thread_id()), weight_piece);
    GT_UNROLL
    for (int i = 0; i < J; i++) sts<float4>(states + States::piece(lane_id() + 32 * i), pieces[i]);
    sync_threads();
    if (b >= in.B) return;
    if (!has_state) {
        if (has_channels) tokens.clear(0);
        return;
    }
    const float bias[4] = {bias_piece.x, bias_piece.y, bias_piece.z, bias_piece.w};
    float weight[W][4], e[W][4];
    Weights::load(weights, weight);
    States::load(states, e);
    if (has_channels) tokens.run(weight, bias, e);
    if (element.commit == 0) return;
    if (has_channels && tokens.commits_fewer()) {
        States::load(states, e);
        tokens.commit(e);
    }
    States::store(states, e);
    sync_warp();
    GT_UNROLL
    for (int i = 0; i < J; i++) {
        const int piece = lane_id() + 32 * i;
        if (4 * piece < channels * J) stg<float4>(state + 4 * piece, lds<float4>(states + States::piece(piece)));
    }
}

/* ---- launch ----------------------------------------------------------------------------------- */

/* Returns whether groups of 4 channels are adjacent and aligned in x and y. */
static inline bool has_step_vectors(const gt_conv1d_args& a) {
    const auto has_rows = [&](const void* data, const gt_stride& stride) {
        return (uintptr_t)data % (a.dtype == GT_F32 ? 16 : 8) == 0 && stride.h == 1 && stride.b % 4 == 0 &&
               stride.t % 4 == 0;
    };
    return a.D % 4 == 0 && has_rows(a.x, a.x_stride) && has_rows(a.y, a.y_stride);
}

/* Returns whether channels and columns of a state are adjacent, and columns are in order of time. */
static inline bool has_packed_states(const gt_conv1d_args& a) {
    const gt_stride& s = a.state_out_stride;
    return !a.places && s.h == 1 && s.t == a.state_columns && s.b >= a.D * a.state_columns && s.b % 4 == 0;
}

/* Returns whether step_rows_kernel takes the call.  It needs fp32 states and parameters. */
static inline bool has_step_rows(const gt_conv1d_args& a) {
    return has_step_vectors(a) && has_packed_states(a) && a.state_dtype == GT_F32 && a.weight_dtype == GT_F32 &&
           a.state_columns == a.W - 1 && a.state_out_stride.b == a.D * (a.W - 1) &&
           has_aligned_fours(a.state_out, GT_F32) && has_aligned_fours(a.weight, GT_F32) &&
           has_aligned_fours(a.bias, GT_F32);
}

/* Returns whether step_fours_kernel takes the call. */
static inline bool has_step_fours(const gt_conv1d_args& a) {
    return a.W == 4 && a.state_columns == 4 && has_step_vectors(a) && has_packed_states(a) &&
           has_aligned_fours(a.state_out, a.state_dtype) && has_aligned_fours(a.weight, a.weight_dtype);
}

} /* namespace conv1d */
} /* namespace gt */

#endif
