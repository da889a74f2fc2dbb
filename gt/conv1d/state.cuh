/* gt/conv1d/state.cuh - state_out of packed sequences (and if T = 0), and dstate_in of all calls.
 *
 * grid: ceil(D * strands / 256).  Block: 256.  A thread has one channel of one strand.  A strand is a list of sequences
 * that are processed in turn: first, first + strands, ... So the cost of a call depends on the number of sequences, not
 * on seq_capacity.  Without packed sequences every batch element is a strand.
 * These kernels run after all kernels that read state_in and dstate_out, because their outputs may be the same memory.
 * For this reason a thread also reads all its inputs of a sequence before it writes.
 * registers: weights, six inputs, three gradients, and their sums.  No shared memory.
 * A thread adds up the gradients of a shared dstate_in over its strand, and reduce_rows adds the strands.  Both add in
 * a fixed order, so the sums are deterministic. */
#ifndef GT_CONV1D_STATE_CUH
#define GT_CONV1D_STATE_CUH

#include "../base/launch.cuh"
#include "backward.cuh"

namespace gt {
namespace conv1d {

/* Where a sequence lies: batch element, first token, number of tokens. */
struct Extent {
    int64_t b, first, tokens;
};

GT_DEV Extent extent_of(const Sequences& q, int64_t s) {
    if (!q.cu_seqlens) return {s, 0, q.T};
    return {0, q.cu_seqlens[s], (int64_t)q.cu_seqlens[s + 1] - q.cu_seqlens[s]};
}

/* Number of strands of a kernel over states: one for each sequence, but not many more than fill the device. */
static inline int64_t strands_for(const gt_conv1d_args& a, const Device& device) {
    if (a.seq_capacity == 0) return a.B;
    const int64_t wanted = (8 * (int64_t)THREADS * device.multiprocessors + a.D - 1) / a.D;
    return a.seq_capacity < wanted ? a.seq_capacity : wanted;
}

static inline int64_t strand_blocks(const gt_conv1d_args& a, int64_t strands) {
    return (a.D * strands + THREADS - 1) / THREADS;
}

/* Computes state_out, the last W - 1 inputs of each sequence.
 * bytes: up to 3 tokens of x and of state_in of every sequence; state_out once. */
struct StateParams {
    Problem in;
    void* state_out; /* in.state_dtype */
    int64_t strands;
};

template <class T>
GT_KERNEL(THREADS, 2)
state_kernel(const GT_GRID_CONSTANT StateParams p) {
    const Problem& in = p.in;
    const Strand me = strand_of(in.D, p.strands);
    const int64_t sequences = me.exists ? sequence_count(in.sequences) : 0;
    const int J = in.W - 1;
    for (int64_t s = me.first; s < sequences; s += p.strands) {
        const Extent its = extent_of(in.sequences, s);
        float e[HALO];
        GT_UNROLL
        for (int i = 0; i < HALO; i++) { /* oldest input first */
            const int64_t t = its.tokens - HALO + i;
            e[i] = 0.0f;
            if (i < HALO - J) continue;
            e[i] = t >= 0 ? Element<T>::load(static_cast<const T*>(in.x),
                                             offset_of(in.x_stride, its.b, its.first + t, me.d))
                          : state_input(in, s, me.d, (int)t);
        }
        const StatePool& pool = in.sequences.pool;
        const int64_t row = pool.slots ? pool_row(pool, s) : s;
        if (row < 0) continue;
        const int64_t first = pool.slots ? row * pool.stride + me.d * in.pool_stride.t : (row * in.D + me.d) * J;
        const int64_t column = pool.slots ? in.pool_stride.h : 1;
        GT_UNROLL
        for (int i = 0; i < HALO; i++)
            if (i >= HALO - J) store_as(p.state_out, in.state_dtype, first + (i - (HALO - J)) * column, e[i]);
    }
}

template <class T>
static gt_status launch_state(const gt_conv1d_args& a, const Device& device, gt_stream stream) {
    const StateParams p = {problem_of(a), a.state_out, strands_for(a, device)};
    return run("conv1d state_kernel", state_kernel<T>, strand_blocks(a, p.strands), THREADS, 0, stream, p);
}

/* Computes dstate_in.  For a shared state, every strand stores the sum over its sequences.
 * bytes: 3 tokens of x and dy, state_in and dstate_out of every sequence; dstate_in once. */
struct BackwardStateParams {
    BackwardParams b;
    int64_t strands;
    bool is_summed;
    float* dstate_in; /* [sequences,D,W-1]; if is_summed [strands,D,W-1] */
};

GT_DEV void store_state_gradient(const BackwardStateParams& p, int64_t row, int64_t d, const float (&gradient)[HALO]) {
    const int J = p.b.in.W - 1;
    GT_UNROLL
    for (int i = 0; i < HALO; i++)
        if (i >= HALO - J) p.dstate_in[(row * p.b.in.D + d) * J + i - (HALO - J)] = gradient[i];
}

template <class T>
GT_KERNEL(THREADS, 2)
backward_state_kernel(const GT_GRID_CONSTANT BackwardStateParams p) {
    const Problem& in = p.b.in;
    const Strand me = strand_of(in.D, p.strands);
    wait_for_chain();
    if (!me.exists) return;
    const int64_t sequences = sequence_count(in.sequences);
    Taps<1> taps;
    taps.load(in, me.d);
    float sum[HALO] = {};
    for (int64_t s = me.first; s < sequences; s += p.strands) {
        const Extent its = extent_of(in.sequences, s);
        float x[HALO], dy[HALO], e[2 * HALO], q[TAPS][1] = {}, gradient[HALO];
        load_column(x, in.x, in.dtype, offset_of(in.x_stride, its.b, its.first, me.d), in.x_stride.t, its.tokens);
        load_column(dy, p.b.dy, in.dtype, offset_of(p.b.dy_stride, its.b, its.first, me.d), p.b.dy_stride.t,
                    its.tokens);
        GT_UNROLL
        for (int i = 0; i < HALO; i++) {
            e[i] = state_input<false>(in, s, me.d, i - HALO);
            e[i + HALO] = x[i];
        }
        GT_UNROLL
        for (int i = 0; i < HALO; i++) { /* step i completes the gradient of input i - 3 */
            const float window[TAPS][1] = {{e[i]}, {e[i + 1]}, {e[i + 2]}, {e[i + 3]}};
            const float pre = taps.sum(window, 0);
            q[HALO][0] = i < its.tokens ? gradient_of_sum<T>(in.has_silu, pre, dy[i]) : 0.0f;
            gradient[i] = taps.gradient(q, 0);
            if (i >= its.tokens) gradient[i] += state_gradient(p.b, s, i - HALO, its.tokens, me.d);
            shift(q);
        }
        if (!p.is_summed) store_state_gradient(p, s, me.d, gradient);
        GT_UNROLL
        for (int i = 0; i < HALO; i++) sum[i] += gradient[i];
    }
    if (p.is_summed) store_state_gradient(p, me.first, me.d, sum);
}

} /* namespace conv1d */
} /* namespace gt */

#endif
