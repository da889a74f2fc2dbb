/* gt/conv1d/backward.cuh - backward, threads side by side over channels.
 *
 * grid and block as in forward, but a run is one of gradients: step i of the walk makes q_i and
 * finishes dx_{i-3}, i < T + 3.  A run but the first begins 3 steps early, for the q that its first
 * dx needs. registers: weights and their gradients, three inputs and three q, BATCH tokens of x and
 * dy as loaded; more than 2 channels a thread do not fit.
 * shared: the parameter gradients of all threads, 20 VEC bytes each: 10 KB for VEC = 2.
 * bytes: x, dy and dx once; 6 tokens of x and 3 of dy of every run a second time, out of a cache.
 * dweight and dbias are summed over a run, then over the block's runs in order, then over blocks by
 * reduce_rows: deterministic. */
#ifndef GT_CONV1D_BACKWARD_CUH
#define GT_CONV1D_BACKWARD_CUH

#include "forward.cuh"

namespace gt {
namespace conv1d {

struct BackwardParams {
    Problem in;
    Cut cut; /* only of the kernel over channels */
    const void* dy;
    gt_stride dy_at;
    const float* dstate_out;
    void* dx;
    gt_stride dx_at;
    float *dweight, *dbias; /* partial sums [rows, D*W], [rows, D]; NULL if not wanted */
    int lanes, passes;      /* only of the kernel over time */
    int64_t segments;
};

/* What dstate_out adds to the gradient of the input of token t of a sequence that ends at `end`: row `row` of it
 * holds the last W-1 of them. */
GT_DEV float state_gradient(const BackwardParams& p, int64_t row, int64_t t, int64_t end, int64_t d) {
    const int64_t J = p.in.W - 1, j = t - (end - J);
    return p.dstate_out && j >= 0 ? p.dstate_out[(row * p.in.D + d) * J + j] : 0.0f;
}

/* Sums of parameter gradients: of the weights, then of the bias. */
template <int VEC>
struct Sums {
    float tap[TAPS + 1][VEC];
};

/* Sums over the rows of the block; all threads. */
template <int VEC>
GT_DEV void store_sums(const BackwardParams& p, const Place& me, const Sums<VEC>& sums) {
    const Problem& in = p.in;
    const int lanes = p.cut.lanes, first = TAPS - in.W;
    const uint32_t cells = smem_base();
    GT_UNROLL
    for (int k = 0; k <= TAPS; k++) {
        GT_UNROLL
        for (int v = 0; v < VEC; v++)
            sts<float>(cells + 4 * ((k * VEC + v) * THREADS + thread_id()), sums.tap[k][v]);
    }
    sync_threads();
    const int64_t tile = me.d - (int64_t)me.lane * VEC;
    for (int i = thread_id(); i < (TAPS + 1) * VEC * lanes; i += THREADS) {
        const int k = i / lanes / VEC, v = i / lanes % VEC, lane = i % lanes;
        const int64_t d = tile + (int64_t)lane * VEC + v;
        float sum = 0.0f;
        for (int row = 0; row < THREADS / lanes; row++)
            sum += lds<float>(cells + 4 * ((k * VEC + v) * THREADS + row * lanes + lane));
        if (d >= in.D || k < first) continue;
        if (k < TAPS) {
            if (p.dweight) p.dweight[(me.block * in.D + d) * in.W + k - first] = sum;
        } else if (p.dbias) {
            p.dbias[me.block * in.D + d] = sum;
        }
    }
}

template <class T, int VEC>
GT_DEV void backward_run(const BackwardParams& p, const Place& me, Sums<VEC>& sums) {
    constexpr int COUNT = BATCH<T, VEC, 2>;
    const Problem& in = p.in;
    const int64_t start = me.first > 0 ? me.first - HALO : 0;
    Taps<VEC> taps;
    taps.load(in, me.d);
    float e[TAPS][VEC], q[TAPS][VEC] = {};
    load_window<T, VEC>(e, in, me, start, me.b);
    for (int64_t t = start; t < me.last; t += COUNT) {
        Vec<T, VEC> x[COUNT], dy[COUNT];
        load_tokens(x, in.x, in.x_at, me.b, t, me.d, in.T - t);
        load_tokens(dy, p.dy, p.dy_at, me.b, t, me.d, in.T - t);
        GT_UNROLL
        for (int i = 0; i < COUNT; i++) {
            if (t + i >= me.last) break;
            const bool own = t + i >= me.first, inside = t + i < in.T;
            float dx[VEC];
            GT_UNROLL
            for (int v = 0; v < VEC; v++) {
                e[HALO][v] = x[i].get(v);
                q[HALO][v] =
                    inside ? gradient_of_sum<T>(in, taps.sum(e, v), dy[i].get(v)) : 0.0f;
                if (own && inside) {
                    GT_UNROLL
                    for (int k = 0; k < TAPS; k++)
                        if (k >= taps.first)
                            sums.tap[k][v] = fma_rn(e[k][v], q[HALO][v], sums.tap[k][v]);
                    sums.tap[TAPS][v] += q[HALO][v];
                }
                dx[v] = taps.gradient(q, v);
                if (!inside) dx[v] += state_gradient(p, me.b, t + i - HALO, in.T, me.d + v);
            }
            if (p.dx && own && t + i >= HALO)
                store_token<T, VEC>(p.dx, p.dx_at, me.b, t + i - HALO, me.d, dx);
            shift(e);
            shift(q);
        }
    }
}

template <class T, int VEC>
GT_KERNEL(THREADS, 2) backward_kernel(const GT_GRID_CONSTANT BackwardParams p) {
    const Place me = place_of<VEC>(p.in, p.cut, p.in.T + HALO);
    Sums<VEC> sums = {};
    if (me.exists) backward_run<T, VEC>(p, me, sums);
    if (p.dweight || p.dbias) store_sums<VEC>(p, me, sums);
}

} /* namespace conv1d */
} /* namespace gt */

#endif
