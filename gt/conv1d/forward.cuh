/* gt/conv1d/forward.cuh - forward and step, threads side by side over channels.
 *
 * grid tiles * ceil(B * runs / rows of a block), block 256.  A thread has VEC channels and walks
 * through a run of 8 to 32 tokens: BATCH loads, then as many outputs.
 * registers: weights, the last three inputs, BATCH tokens as loaded.  No shared memory.
 * bytes: x and y once; 3 tokens of every run a second time, out of a cache.
 * VEC = 4 or 2 elements lie together in all tensors; VEC = 1 serves any strides.
 * The thread of the first run reads the state and then writes state_out, which may be the same.
 * An output is summed by one thread, in the order of the taps: deterministic. */
#ifndef GT_CONV1D_FORWARD_CUH
#define GT_CONV1D_FORWARD_CUH

#include "problem.cuh"

namespace gt {
namespace conv1d {

struct ForwardParams {
    Problem in;
    Cut cut;
    void* y;
    gt_stride y_at;
    float* state_out;
    bool is_step;
    const int32_t* slots;
    int64_t slot_capacity;
};

/* The last inputs; ascending, for state_in may be the same memory. */
template <class T>
GT_DEV void store_state(const ForwardParams& p, int64_t b, int64_t row, int64_t d) {
    const int J = p.in.W - 1;
    for (int j = 0; j < J; j++) {
        const int64_t t = p.in.T - J + j;
        p.state_out[(row * p.in.D + d) * J + j] =
            t < 0 ? state_input(p.in, row, d, (int)t)
                  : Element<T>::load(static_cast<const T*>(p.in.x), at(p.in.x_at, b, t, d));
    }
}

template <class T, int VEC>
GT_KERNEL(THREADS, 2) forward_kernel(const GT_GRID_CONSTANT ForwardParams p) {
    constexpr int COUNT = BATCH<T, VEC, 1>;
    const Problem& in = p.in;
    const Place me = place_of<VEC>(in, p.cut, in.T);
    if (!me.exists) return;
    const int64_t state_row = p.slots ? p.slots[me.b] : me.b;
    const bool skipped = p.is_step && (state_row < 0 || state_row >= p.slot_capacity);
    if (skipped) {
        const float zero[VEC] = {};
        for (int64_t t = me.first; t < me.last; t++)
            store_token<T, VEC>(p.y, p.y_at, me.b, t, me.d, zero);
        return;
    }
    Taps<VEC> taps;
    taps.load(in, me.d);
    float e[TAPS][VEC];
    load_window<T, VEC>(e, in, me, me.first, state_row);
    for (int64_t t = me.first; t < me.last; t += COUNT) {
        Vec<T, VEC> x[COUNT];
        load_tokens(x, in.x, in.x_at, me.b, t, me.d, me.last - t);
        GT_UNROLL
        for (int i = 0; i < COUNT; i++) {
            if (t + i >= me.last) break;
            float y[VEC];
            GT_UNROLL
            for (int v = 0; v < VEC; v++) {
                e[HALO][v] = x[i].get(v);
                const float pre = taps.sum(e, v);
                y[v] = in.has_silu ? silu_of_sigmoid(pre, sigmoid_of<T>(pre)) : pre;
            }
            store_token<T, VEC>(p.y, p.y_at, me.b, t + i, me.d, y);
            shift(e);
        }
    }
    if (p.state_out && me.first == 0)
        for (int v = 0; v < VEC; v++) store_state<T>(p, me.b, state_row, me.d + v);
}

} /* namespace conv1d */
} /* namespace gt */

#endif
