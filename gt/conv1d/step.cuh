/* gt/conv1d/step.cuh - step: forward for a few new tokens of every batch element; states lie in slots, in place.
 *
 * grid ceil(B * D / VEC / 256), block 256: a thread has VEC channels of one batch element; neighbours have neighbouring
 * channels.  It takes BATCH tokens at a time: all their loads, then their outputs.
 * registers: weights, the last three inputs, BATCH tokens as loaded.  No shared memory.
 * bytes: x and y once, the states once each way, the parameters.
 * VEC = 4 or 2 serves x and y whose channels lie side by side and aligned; VEC = 1 serves any strides.
 * Sums have the order of forward: deterministic. */
#ifndef GT_CONV1D_STEP_CUH
#define GT_CONV1D_STEP_CUH

#include "forward.cuh"

namespace gt {
namespace conv1d {

struct StepParams {
    Problem in;
    void* y;
    gt_stride y_stride;
    float* state_out;
    const int32_t* slots;
    int64_t slot_capacity;
};

template <class T, int VEC>
GT_KERNEL(THREADS, 2)
step_kernel(const GT_GRID_CONSTANT StepParams p) {
    constexpr int BATCH = 4;
    const Problem& in = p.in;
    const int64_t groups = in.D / VEC, item = (int64_t)block_x() * THREADS + thread_id();
    const int64_t b = item / groups, d = item % groups * VEC;
    if (b >= in.B) return;
    const T* x = static_cast<const T*>(in.x) + offset_of(in.x_stride, b, 0, d);
    T* y = static_cast<T*>(p.y) + offset_of(p.y_stride, b, 0, d);
    const int64_t row = p.slots ? p.slots[b] : b;
    if (row < 0 || row >= p.slot_capacity) {
        for (int64_t t = 0; t < in.T; t++) stg(y + t * p.y_stride.t, Vec<T, VEC>{});
        return;
    }
    Taps<VEC> taps;
    taps.load(in, d);
    float e[TAPS][VEC];
    GT_UNROLL
    for (int i = 0; i < HALO; i++) {
        GT_UNROLL
        for (int v = 0; v < VEC; v++) e[i][v] = state_input(in, row, d + v, i - HALO);
    }
    for (int64_t t = 0; t < in.T; t += BATCH) {
        Vec<T, VEC> loaded[BATCH];
        GT_UNROLL
        for (int i = 0; i < BATCH; i++) loaded[i] = ldg<Vec<T, VEC>>(x + (t + i < in.T ? t + i : t) * in.x_stride.t);
        GT_UNROLL
        for (int i = 0; i < BATCH; i++) {
            if (t + i >= in.T) break;
            float out[VEC];
            GT_UNROLL
            for (int v = 0; v < VEC; v++) {
                e[HALO][v] = loaded[i].get(v);
                out[v] = output_of_sum<T>(in.has_silu, taps.sum(e, v));
            }
            Vec<T, VEC> packed;
            packed.set(out);
            stg(y + (t + i) * p.y_stride.t, packed);
            shift(e);
        }
    }
    for (int v = 0; v < VEC; v++) store_state<T>(in, p.state_out, b, row, d + v);
}

} /* namespace conv1d */
} /* namespace gt */

#endif
