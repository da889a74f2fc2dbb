/* gt/conv1d/step.cuh - step: 1 to 16 new tokens of every batch element; states lie in slots, in place.
 *
 *     y_t = act(bias + sum_k weight_k e_{t+k})      with e: the W - 1 inputs of the state, then the tokens
 *
 * step_rows_kernel, for 4 neighbouring channels that are aligned in x, y, states and parameters.
 * tile: a warp has 128 channels of one batch element, a lane 4 of them.  The 8 warps of a block have the same channels:
 *     weights come from L2 once for 8 batch elements.
 * grid ceil(D / 128) * ceil(B / 8), block 256; one launch, no workspace.
 * A warp moves its 128 (W - 1) floats of state in 16-byte pieces, neighbours by neighbouring lanes.  It exchanges them
 *     through shared memory, so that every sector moves once each way.
 * shared, W = 4: 2.5 KB of weights, 12 KB of states.  The part of a lane has an odd number of pieces: 8 lanes that read
 *     theirs meet in no bank.
 * registers: weights and bias, W - 1 inputs of 4 channels, BATCH tokens as loaded (1 for calls of one token, else 4).
 * bytes of a channel, W = 4: 24 of state, 2 elements a token; 20 of parameters from L2 for 8 batch elements.
 * A thread issues the loads of states, parameters and BATCH tokens before it uses any of them.
 * issue slots of a thread, W = 4, one token: 10 global and 14 shared loads and stores, 16 multiply-adds, 4 SiLU.
 *
 * The inputs that the new state holds are stored when the last token to commit is done; of step_rows_kernel into shared
 *     memory, from where the warp moves them after the last token.
 *
 * step_kernel, for any strides and alignment: grid ceil(B * D / 256), block 256, a thread has one channel.
 *
 * Both have the sums of forward, in the same order: a result does not depend on alignment. */
#ifndef GT_CONV1D_STEP_CUH
#define GT_CONV1D_STEP_CUH

#include "../base/launch.cuh"
#include "problem.cuh"

namespace gt {
namespace conv1d {

struct StepParams {
    Problem in; /* its state_in is not read */
    void* y;
    gt_stride y_stride;
    float* state; /* [slot_capacity,D,W-1] */
    StepElements elements;
    Divider by_parts; /* of a row, 128 channels each */
};

constexpr int STEP_BATCH = 4;

/* The tokens of VEC channels that a thread has.  BATCH: how many are loaded together; 1 if the call has no more, else
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

    /* BATCH tokens from t on, as far as there are any. */
    GT_METHOD void load(int t) {
        GT_UNROLL
        for (int i = 0; i < BATCH; i++)
            if (t + i < count()) loaded[i] = ldg<Vec<T, VEC>>(x + (t + i) * p.in.x_stride.t);
    }

    /* e[0 ... W-2]: the inputs before the tokens, oldest first; store() when they are those of the state to come.  The
     * first tokens are loaded.  y of tokens that the element does not have is 0. */
    template <int W, class Store>
    GT_METHOD void run(const float (&weight)[W][VEC], const float (&bias)[VEC], float (&e)[W][VEC],
                       const Store& store) {
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
                if (t + i + 1 == element.commit) store();
            }
        }
        if (BATCH > 1) clear(tokens);
    }

    /* y = 0 of tokens first ... T-1. */
    GT_METHOD void clear(int first) {
        for (int t = first; t < p.elements.T; t++) stg(y + t * p.y_stride.t, Vec<T, VEC>{});
    }
};

template <class T, int W>
GT_KERNEL(THREADS, 2)
step_kernel(const GT_GRID_CONSTANT StepParams p) {
    constexpr int J = W - 1;
    const Problem& in = p.in;
    const int64_t item = (int64_t)block_x() * THREADS + thread_id(), b = item / in.D, d = item % in.D;
    if (b >= in.B) return;
    const StepElement element(p.elements, b);
    StepTokens<T, 1, STEP_BATCH> tokens(p, element, b, d);
    if (element.is_skipped(p.elements)) {
        tokens.clear(0);
        return;
    }
    float* state = p.state + (element.row * in.D + d) * J;
    float weight[W][1], e[W][1];
    const float bias[1] = {in.bias ? in.bias[d] : 0.0f};
    GT_UNROLL
    for (int j = 0; j < J; j++) e[j][0] = state[j];
    GT_UNROLL
    for (int k = 0; k < W; k++) weight[k][0] = in.weight[d * W + k];
    tokens.load(0);
    tokens.run(weight, bias, e, [&] {
        GT_UNROLL
        for (int j = 0; j < J; j++) state[j] = e[j][0];
    });
}

/* How 4 COUNT numbers of a lane, of 32 lanes, lie in shared memory.  Piece i, of 4 numbers, is the i-th in global
 * memory. */
template <int COUNT>
struct LaneParts {
    static constexpr int PART = 16 * (COUNT | 1), BYTES = 32 * PART;
    static constexpr int PIECES = 32 * COUNT;

    GT_HD uint32_t piece(int i) { return (uint32_t)(i / COUNT * PART + i % COUNT * 16); }

    /* to[i][v]: number i of channel v of the lane */
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

constexpr int STEP_WARPS = THREADS / 32, STEP_CHANNELS = 128; /* of a block: batch elements, and channels of each */

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
    float* state = p.state + (element.row * in.D + d0) * J;
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
    if (has_channels) tokens.run(weight, bias, e, [&] { States::store(states, e); });
    if (element.commit == 0) return;
    sync_warp();
    GT_UNROLL
    for (int i = 0; i < J; i++) {
        const int piece = lane_id() + 32 * i;
        if (4 * piece < channels * J) stg<float4>(state + 4 * piece, lds<float4>(states + States::piece(piece)));
    }
}

/* ---- launch ----------------------------------------------------------------------------------- */

/* Whether groups of 4 channels are neighbours and aligned, in all that a step moves. */
static inline bool has_step_rows(const gt_conv1d_args& a) {
    const int element = a.dtype == GT_F32 ? 4 : 2;
    const auto is_aligned = [](const void* data, int bytes) { return (uintptr_t)data % (uintptr_t)bytes == 0; };
    const auto has_rows = [&](const void* data, const gt_stride& stride) {
        return is_aligned(data, 4 * element) && stride.h == 1 && stride.b % 4 == 0 && stride.t % 4 == 0;
    };
    return a.D % 4 == 0 && has_rows(a.x, a.x_stride) && has_rows(a.y, a.y_stride) && is_aligned(a.state_out, 16) &&
           is_aligned(a.weight, 16) && is_aligned(a.bias, 16);
}

} /* namespace conv1d */
} /* namespace gt */

#endif
