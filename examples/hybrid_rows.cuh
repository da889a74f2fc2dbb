/* Kernels that work element by element or row by row: map, bias, gate_mix, add, cast, carry, dropout and average. */
#ifndef HYBRID_ROWS_CUH
#define HYBRID_ROWS_CUH

#include "hybrid_machine.cuh"

namespace hy {

/* ---- map ------------------------------------------------------------------------------------- */

GT_HD float tanh_of(float x) {
    /* Near 0 the quotient below would lose digits to cancellation; there the series is exact to the last bit. */
    const float s = x * x;
    const float series = s * (-1.0f / 3 + s * (2.0f / 15 + s * (-17.0f / 315 + s * (62.0f / 2835))));
    return s < 0.0625f ? fma_rn(x, series, x) : 1.0f - 2.0f / (exp_accurate(2.0f * x) + 1.0f);
}

/* GELU(x) = x sigmoid(2 q(x)), q(x) = sqrt(2/pi) (x + 0.044715 x^3).  The bound keeps x^3 from overflowing.  It
 * changes no result, because for |x| > 16 the sigmoid is 0 or 1 to all digits.  NaN stays NaN. */
GT_HD float gelu_bound(float x) { return x > 16.0f ? 16.0f : x < -16.0f ? -16.0f : x; }

GT_HD float gelu_sigmoid(float c) { return sigmoid(c * fma_rn(0.071354816272600f * c, c, 1.5957691216057308f)); }

GT_HD float gelu_of(float x) { return (x < -16.0f ? -16.0f : x) * gelu_sigmoid(gelu_bound(x)); }

GT_HD float gelu_derivative(float x) {
    const float c = gelu_bound(x), s = gelu_sigmoid(c);
    return s + s * (1.0f - s) * c * fma_rn(0.214064448817800f * c, c, 1.5957691216057308f);
}

struct Tanh {
    static constexpr int INPUTS = 1;
    GT_DEV float of(float x, float, float) { return tanh_of(x); }
    GT_DEV float slope(float y) { return 1.0f - y * y; }
};
struct Gelu {
    static constexpr int INPUTS = 1;
    GT_DEV float of(float x, float, float) { return gelu_of(x); }
    GT_DEV float slope(float x) { return gelu_derivative(x); }
};
struct NegExp {
    static constexpr int INPUTS = 1;
    GT_DEV float of(float x, float, float) { return -exp_accurate(x); }
    GT_DEV float slope(float y) { return y; }
};
template <class F>
struct Backward { /* the second input is x or y, whichever the slope depends on */
    static constexpr int INPUTS = 2;
    GT_DEV float of(float dy, float at, float) { return dy * F::slope(at); }
};
template <class F>
struct BackwardAdd { /* does what Backward does, but adds to the old value */
    static constexpr int INPUTS = 3;
    GT_DEV float of(float dy, float at, float before) { return before + dy * F::slope(at); }
};

static gt_status check_function(hy_function function) {
    return hy_fail(GT_ERROR_VALUE, "cuda map: function = %d: must be 0 to 2", (int)function);
}

static gt_status map_forward(hy_backend* be, const hy_map_args* a) {
    const EachParams p = {{a->x, nullptr, nullptr}, a->y, a->n};
    switch (a->function) {
    case HY_TANH: return each<Tanh>(machine(be), "map", a->dtype, p);
    case HY_GELU: return each<Gelu>(machine(be), "map", a->dtype, p);
    case HY_NEG_EXP: return each<NegExp>(machine(be), "map", a->dtype, p);
    }
    return check_function(a->function);
}

template <class F>
static gt_status map_backward_of(const Machine& m, const hy_map_args* a, const void* at) {
    const EachParams p = {{a->dy, at, a->accumulate ? a->dx : nullptr}, a->dx, a->n};
    return a->accumulate ? each<BackwardAdd<F>>(m, "map", a->dtype, p) : each<Backward<F>>(m, "map", a->dtype, p);
}

static gt_status map_backward(hy_backend* be, const hy_map_args* a) {
    switch (a->function) {
    case HY_TANH: return map_backward_of<Tanh>(machine(be), a, a->y);
    case HY_GELU: return map_backward_of<Gelu>(machine(be), a, a->x);
    case HY_NEG_EXP: return map_backward_of<NegExp>(machine(be), a, a->y);
    }
    return check_function(a->function);
}

/* ---- bias ------------------------------------------------------------------------------------ */

struct BiasParams {
    int64_t M, D;
    const float* bias;
    void* y;
};

/* The grid has ceil(M/8) blocks, with one warp per row. */
template <class T, int N>
GT_KERNEL(THREADS, 1)
bias_forward_kernel(const GT_GRID_CONSTANT BiasParams p) {
    const int64_t row = row_of_warp();
    for (int64_t d = lane_id() * N; row < p.M && d < p.D; d += 32 * N) {
        float y[N], bias[N];
        load<T>(y, p.y, row * p.D + d);
        load<float>(bias, p.bias, d);
        GT_UNROLL
        for (int j = 0; j < N; j++) y[j] += bias[j];
        store<T>(p.y, row * p.D + d, y);
    }
}

static gt_status bias_forward(hy_backend* be, const hy_bias_args* a) {
    const BiasParams p = {a->M, a->D, a->bias, a->y};
    return with_layout(a->dtype, in_fours(a->D, a->y, a->bias), [&](auto l) {
        using L = decltype(l);
        return enqueue(machine(be), "bias", bias_forward_kernel<typename L::T, L::N>, ceil_div(a->M, WARPS), 1, 0, p);
    });
}

static gt_status bias_backward(hy_backend* be, const hy_bias_args* a) {
    return sum_columns(machine(be), "bias", a->dtype, a->M, a->D, a->dy, nullptr, a->dbias, a->accumulate);
}

/* ---- gate_mix -------------------------------------------------------------------------------- */

struct GateMixParams {
    int64_t M, D;
    const void *a, *b, *residual, *dy;
    const float *weight, *bias;
    void *y, *da, *db;
    float* gate;
};

/* Both in forward and in backward, the grid has ceil(M/8) blocks, with one warp per row; a warp reads its row twice. */
template <class T, int N>
GT_KERNEL(THREADS, 1)
gate_mix_forward_kernel(const GT_GRID_CONSTANT GateMixParams p) {
    const int64_t row = row_of_warp(), D = p.D;
    if (row >= p.M) return;
    float a[N], b[N], wa[N], wb[N], g = p.bias[0];
    if (p.weight) {
        float dot = 0.0f;
        for (int64_t d = lane_id() * N; d < D; d += 32 * N) {
            load<T>(a, p.a, row * D + d);
            load<T>(b, p.b, row * D + d);
            load<float>(wa, p.weight, d);
            load<float>(wb, p.weight, D + d);
            GT_UNROLL
            for (int j = 0; j < N; j++) dot += a[j] * wa[j] + b[j] * wb[j];
        }
        g = sigmoid(warp_sum(dot) + g);
    }
    for (int64_t d = lane_id() * N; d < D; d += 32 * N) {
        float y[N] = {};
        load<T>(a, p.a, row * D + d);
        load<T>(b, p.b, row * D + d);
        if (p.residual) load<T>(y, p.residual, row * D + d);
        GT_UNROLL
        for (int j = 0; j < N; j++) y[j] += g * a[j] + (1.0f - g) * b[j];
        store<T>(p.y, row * D + d, y);
    }
    if (lane_id() == 0) p.gate[row] = g;
}

template <class T, int N>
GT_KERNEL(THREADS, 1)
gate_mix_backward_kernel(const GT_GRID_CONSTANT GateMixParams p) {
    const int64_t row = row_of_warp(), D = p.D;
    if (row >= p.M) return;
    float a[N], b[N], dy[N], wa[N] = {}, wb[N] = {}, s = 0.0f;
    for (int64_t d = lane_id() * N; d < D; d += 32 * N) {
        load<T>(a, p.a, row * D + d);
        load<T>(b, p.b, row * D + d);
        load<T>(dy, p.dy, row * D + d);
        GT_UNROLL
        for (int j = 0; j < N; j++) s += dy[j] * (a[j] - b[j]);
    }
    /* Only lane 0 reads gate, since lane 0 overwrites it later. */
    const float g = shfl_idx(lane_id() == 0 ? p.gate[row] : 0.0f, 0);
    const float q = warp_sum(s) * (p.weight ? g * (1.0f - g) : 1.0f);
    for (int64_t d = lane_id() * N; d < D; d += 32 * N) {
        load<T>(dy, p.dy, row * D + d);
        if (p.weight) {
            load<float>(wa, p.weight, d);
            load<float>(wb, p.weight, D + d);
        }
        GT_UNROLL
        for (int j = 0; j < N; j++) {
            a[j] = g * dy[j] + q * wa[j];
            b[j] = (1.0f - g) * dy[j] + q * wb[j];
        }
        if (p.da) store<T>(p.da, row * D + d, a);
        if (p.db) store<T>(p.db, row * D + d, b);
    }
    if (lane_id() == 0) p.gate[row] = q;
}

static GateMixParams gate_mix_params(const hy_gate_mix_args* a) {
    return {a->M, a->D, a->a, a->b, a->residual, a->dy, a->weight, a->bias, a->y, a->da, a->db, a->gate};
}

static gt_status gate_mix_forward(hy_backend* be, const hy_gate_mix_args* a) {
    const bool fours = in_fours(a->D, a->a, a->b, a->residual, a->weight, a->y);
    return with_layout(a->dtype, fours, [&](auto l) {
        using L = decltype(l);
        return enqueue(machine(be), "gate_mix", gate_mix_forward_kernel<typename L::T, L::N>, ceil_div(a->M, WARPS), 1,
                       0, gate_mix_params(a));
    });
}

static gt_status gate_mix_backward(hy_backend* be, const hy_gate_mix_args* a) {
    const Machine& m = machine(be);
    const bool fours = in_fours(a->D, a->a, a->b, a->dy, a->weight, a->da, a->db);
    gt_status status = with_layout(a->dtype, fours, [&](auto l) {
        using L = decltype(l);
        return enqueue(m, "gate_mix", gate_mix_backward_kernel<typename L::T, L::N>, ceil_div(a->M, WARPS), 1, 0,
                       gate_mix_params(a));
    });
    const void* branches[] = {a->a, a->b};
    for (int k = 0; k < 2 && a->dweight && status == GT_OK; k++)
        status = sum_columns(m, "gate_mix", a->dtype, a->M, a->D, branches[k], a->gate, a->dweight + k * a->D,
                             a->accumulate);
    if (status != GT_OK || !a->dbias) return status;
    return sum_columns(m, "gate_mix", GT_F32, a->M, 1, a->gate, nullptr, a->dbias, a->accumulate);
}

/* ---- small helpers --------------------------------------------------------------------------- */

struct Sum {
    static constexpr int INPUTS = 2;
    GT_DEV float of(float x, float y, float) { return x + y; }
};

static gt_status add(hy_backend* be, const hy_add_args* a) {
    return each<Sum>(machine(be), "add", a->dtype, {{a->x, a->y, nullptr}, a->y, a->n});
}

struct Same {
    static constexpr int INPUTS = 1;
    GT_DEV float of(float x, float, float) { return x; }
};

static gt_status cast(hy_backend* be, const hy_cast_args* a) {
    const EachParams p = {{a->from, nullptr, nullptr}, a->to, a->n};
    return with_layout(a->from_dtype, in_fours(a->n, a->from, a->to), [&](auto from) {
        return with_layout(a->to_dtype, false, [&](auto to) {
            using From = decltype(from);
            using To = typename decltype(to)::T;
            return enqueue(machine(be), "cast", each_kernel<typename From::T, To, From::N, Same>,
                           ceil_div(a->n, THREADS * From::N), 1, 0, p);
        });
    });
}

struct CarryParams {
    hy_carry_args a;
};

/* One thread computes one element. */
GT_KERNEL(THREADS, 1) carry_kernel(const GT_GRID_CONSTANT CarryParams p) {
    const int64_t i = (int64_t)block_x() * THREADS + thread_id();
    if (i >= p.a.count * p.a.B * p.a.n) return;
    p.a.to[i] = p.a.keep[i / p.a.n % p.a.B] ? p.a.from[i] : 0.0f;
}

static gt_status carry(hy_backend* be, const hy_carry_args* a) {
    const CarryParams p = {*a};
    return enqueue(machine(be), "carry", carry_kernel, ceil_div(a->count * a->B * a->n, THREADS), 1, 0, p);
}

struct DropoutParams {
    const float* control;
    void* x;
    int64_t n, window;
    float kept;
    uint32_t limit, site;
};

/* One thread computes one element. */
template <class T>
GT_KERNEL(THREADS, 1)
dropout_kernel(const GT_GRID_CONSTANT DropoutParams p) {
    const int64_t i = (int64_t)block_x() * THREADS + thread_id();
    if (i >= p.n) return;
    const uint32_t low = (uint32_t)p.control[HY_DROP_LOW], high = (uint32_t)p.control[HY_DROP_HIGH];
    const int64_t start = (int64_t)p.control[HY_DROP_WINDOW] * p.window;
    float x[1];
    load<T>(x, p.x, i);
    x[0] = hy_stays(low, high, p.site, start + i, p.limit) ? x[0] * p.kept : 0.0f;
    store<T>(p.x, i, x);
}

static gt_status dropout(hy_backend* be, const hy_dropout_args* a) {
    const DropoutParams p = {
        a->control,       a->x, a->n, a->window, 1.0f / (1.0f - a->rate), (uint32_t)((double)a->rate * 4294967296.0),
        (uint32_t)a->site};
    return with_layout(a->dtype, false, [&](auto l) {
        return enqueue(machine(be), "dropout", dropout_kernel<typename decltype(l)::T>, ceil_div(a->n, THREADS), 1, 0,
                       p);
    });
}

struct AverageParams {
    hy_average_args a;
};

/* One thread computes one element. */
GT_KERNEL(THREADS, 1) average_kernel(const GT_GRID_CONSTANT AverageParams p) {
    const int64_t i = (int64_t)block_x() * THREADS + thread_id();
    if (i >= p.a.n) return;
    const float w = p.a.w[i], average = p.a.average[i], decay = p.a.decay;
    p.a.average[i] = decay < 0.0f ? w : decay * average + (1.0f - decay) * w;
    if (decay < 0.0f) p.a.w[i] = average;
}

static gt_status average(hy_backend* be, const hy_average_args* a) {
    const AverageParams p = {*a};
    return enqueue(machine(be), "average", average_kernel, ceil_div(a->n, THREADS), 1, 0, p);
}

} /* namespace hy */

#endif
