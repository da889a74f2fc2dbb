/* gt/conv1d/state.cuh - the gradient of the state.
 *
 * grid ceil(B*D/256), block 256: a thread per channel and batch element.  It runs after the kernels
 * of backward, which read dstate_out: dstate_in may be the same memory.
 * registers: weights, the first 3 tokens of x and dy, the state and q.  No shared memory.
 * bytes: 3 tokens of x and dy, state_in, dstate_out and dstate_in once.
 * Every sum is one thread's: deterministic. */
#ifndef GT_CONV1D_STATE_CUH
#define GT_CONV1D_STATE_CUH

#include "backward.cuh"

namespace gt {
namespace conv1d {

struct StateParams {
    BackwardParams b;
    float* dstate_in; /* [B,D,W-1] */
};

GT_KERNEL(THREADS, 1) backward_state_kernel(const GT_GRID_CONSTANT StateParams p) {
    const Problem& in = p.b.in;
    const int64_t item = (int64_t)block_x() * THREADS + thread_id();
    const int64_t b = item / in.D, d = item % in.D;
    if (b >= in.B) return;
    Taps<1> taps;
    taps.load(in, d);
    float x[HALO], dy[HALO], e[2 * HALO][1], q[TAPS][1] = {}, gradient[HALO];
    load_column(x, in.x, in.dtype, at(in.x_at, b, 0, d), in.x_at.t, in.T);
    load_column(dy, p.b.dy, in.dtype, at(p.b.dy_at, b, 0, d), p.b.dy_at.t, in.T);
    GT_UNROLL
    for (int i = 0; i < HALO; i++) {
        e[i][0] = state_input(in, b, d, i - HALO);
        e[i + HALO][0] = x[i];
    }
    GT_UNROLL
    for (int i = 0; i < HALO; i++) { /* as in the walk over channels, steps 0 to 2 */
        const float window[TAPS][1] = {{e[i][0]}, {e[i + 1][0]}, {e[i + 2][0]}, {e[i + 3][0]}};
        const float pre = taps.sum(window, 0);
        q[HALO][0] = 0.0f;
        if (i < in.T)
            q[HALO][0] = in.dtype == GT_F32 ? gradient_of_sum<float>(in, pre, dy[i])
                                            : gradient_of_sum<bf16>(in, pre, dy[i]);
        gradient[i] = taps.gradient(q, 0);
        if (i >= in.T) gradient[i] += state_gradient(p.b, b, i - HALO, in.T, d);
        shift(q);
    }
    GT_UNROLL
    for (int i = 0; i < HALO; i++)
        if (i >= taps.first)
            p.dstate_in[(b * in.D + d) * (in.W - 1) + i - taps.first] = gradient[i];
}

} /* namespace conv1d */
} /* namespace gt */

#endif
