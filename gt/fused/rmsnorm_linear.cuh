/* gt/fused/rmsnorm_linear.cuh - rmsnorm_linear: the shared parts of its kernels, and mean and rstd.
 *
 * The kernels for any size and alignment, with the letters of gt_fused.cuh:
 *     moments_kernel   mean and rstd of every row, for `saved`
 *     product_kernel   y = n weight^T + bias        dn = dy weight          dweight = dy^T n
 *     single_kernel    y of fp32 where O is 1
 *     row_kernel       dx   = rstd (dxhat - mean(dxhat) - xhat mean(dxhat . xhat))
 *                      with dxhat = dn . gamma; RMSNorm leaves out mean(dxhat)
 *     column_kernel    dgamma = sum_m dn . xhat     dbeta = sum_m dn        dbias = sum_m dy
 * n is never stored.  The products normalise x on its way to shared memory.  On tensor cores they also round n there,
 * to the operands' type.  dn is fp32 in the workspace.
 *
 * The kernels for 16-bit activations in rows of 16-byte pieces, on compute capability 8.0 and newer; on 9.0 also for
 * fp32:
 *     normalise_kernel   mean and rstd, and n in 16 bits; in backward xhat, if dx is not wanted
 *     tiles_kernel       y = n weight^T + bias      dn = dy weight          G = dy^T xhat
 *     gradient_kernel    dx from dn; and xhat in 16 bits, which overwrites dn
 *     finish_kernel      dweight = G . gamma + dbias beta^T
 *                        dgamma = sum_o weight . G          dbeta = sum_o weight dbias
 * The kernels for 9.0 alone:
 *     hopper_tiles_kernel   the products of tiles_kernel; fp32 operands are split into parts (rmsnorm_linear_parts.cuh)
 *     hopper_split_kernel   splits weight and dy into parts
 *     hopper_whole_kernel   mean and rstd, and y, for D <= 512 in 16 bits: n stays in shared memory
 *     hopper_small_kernel   the same for D <= 128: the weight stays in shared memory, too
 * In the workspace n, xhat and dn have 16 bits; dn in fp16 is scaled by a power of two for every 64 adjacent columns.
 * For fp32 activations n and xhat are in parts, and dn is fp32.
 * All sums have a fixed order. */
#ifndef GT_FUSED_RMSNORM_LINEAR_CUH
#define GT_FUSED_RMSNORM_LINEAR_CUH

#include "../base/op.h"
#include "../base/warp.cuh"

namespace gt {
namespace rmsnorm_linear {

/* xhat = (x - center) rstd - offset.  center is the mean rounded to fp32.  offset is the error of this rounding times
 * rstd.  So xhat keeps its digits in rows whose mean is far from zero. */
struct alignas(16) Moments {
    float center, rstd, offset, unused;
};

struct Input {
    const void* x;
    int64_t stride, M, D;
    gt_dtype dtype;
    gt_norm norm;
    float eps;
    const float *gamma, *beta;
    Moments* moments;
};

constexpr int ROW_WARPS = 8; /* warps of a block, in kernels other than products */
constexpr int AT_ONCE = 8;   /* loads that a thread of these kernels has in flight */

GT_DEV float xhat_of(Moments s, float x) { return fma_rn(x - s.center, s.rstd, -s.offset); }

/* ---- rmsnorm_linear: mean and rstd -----------------------------------------------------------
 * grid: ceil(M/8).  Block: 256, a warp for each row.  RMS reads x once, LAYER three times.  All reads but the first hit
 * the L1 cache.  16 bytes are written for each row.
 * registers: 8 loaded elements and a sum.  No shared memory.
 * A lane sums its elements in order, then a butterfly adds the lanes, so sums are deterministic. */

/* Row m of x, for any dtype and alignment. */
struct AnyRow {
    const Input& in;
    int64_t m;

    /* Returns the sum of f(x) over the row.  All lanes get the same sum. */
    template <class Function>
    GT_METHOD float sum(Function f) {
        float sum = 0.0f;
        for (int64_t d = lane_id(); d < in.D; d += 32 * AT_ONCE) {
            float x[AT_ONCE];
            load_column(x, in.x, in.dtype, m * in.stride + d, 32, (in.D - d + 31) / 32);
            GT_UNROLL
            for (int i = 0; i < AT_ONCE; i++) sum += d + 32 * i < in.D ? f(x[i]) : 0.0f;
        }
        return warp_sum(sum);
    }
};

/* Moments of a row whose elements are multiplied by `scale`, a power of two.  The mean is center + lo.  square: the sum
 * of squared distances from the mean. */
struct ScaledMoments {
    float center, lo, square;
};

/* One row of a warp, as an argument of scaled_moments.  Types of such arguments have COUNT rows for each group of 8 or
 * more lanes.  Their sums(sum, f) sums f(x, i) over each row, where i is the row's index.  All lanes of the group get
 * the same sums. */
template <class Row>
struct OneRow {
    static constexpr int COUNT = 1;
    Row& row;

    template <class Function>
    GT_METHOD void sums(float (&sum)[1], Function f) {
        sum[0] = row.sum([=](float x) { return f(x, 0); });
    }
};

template <class Rows>
GT_DEV void scaled_moments(ScaledMoments (&s)[Rows::COUNT], Rows& rows, const Input& in, float scale) {
    constexpr int N = Rows::COUNT;
    const float count = (float)in.D;
    float center[N] = {}, lo[N] = {}, square[N];
    if (in.norm == GT_NORM_LAYER) {
        rows.sums(center, [=](float x, int) { return x * scale; });
        GT_UNROLL
        for (int i = 0; i < N; i++) center[i] /= count;
        rows.sums(lo, [=](float x, int i) { return x * scale - center[i]; });
        GT_UNROLL
        for (int i = 0; i < N; i++) lo[i] /= count;
    }
    if (in.norm == GT_NORM_LAYER) {
        rows.sums(square, [=](float x, int i) {
            const float distance = x * scale - center[i] - lo[i];
            return distance * distance;
        });
    } else {
        rows.sums(square, [=](float x, int) { return x * scale * (x * scale); });
    }
    GT_UNROLL
    for (int i = 0; i < N; i++) s[i] = {center[i], lo[i], square[i]};
}

/* Returns 1 / sqrt(x) of a normal x, within 2 units of the last place.  Rows with infinite elements have x = infinity,
 * and get NaN.  One Newton step replaces a square root and a division, because both would test for a slow path. */
GT_DEV float rsqrt_of_normal(float x) {
    const float y = rsqrt_approx(x);
    return fma_rn(0.5f * y, fma_rn(-x * y, y, 1.0f), y);
}

template <class Rows>
GT_DEV void moments_of_rows(Moments (&moments)[Rows::COUNT], Rows& rows, const Input& in) {
    constexpr int N = Rows::COUNT;
    const float inverse = 1.0f / (float)in.D; /* computed while x is on its way */
    ScaledMoments s[N];
    float scale[N];
    scaled_moments(s, rows, in, 1.0f);
    bool overflows = false; /* the squares or the sum overflow, although the result may not */
    GT_UNROLL
    for (int i = 0; i < N; i++) {
        scale[i] = s[i].square < INFINITY ? 1.0f : 0x1p-80f;
        overflows = overflows || scale[i] != 1.0f;
    }
    if (warp_any(overflows)) {
        ScaledMoments smaller[N];
        scaled_moments(smaller, rows, in, 0x1p-80f);
        GT_UNROLL
        for (int i = 0; i < N; i++)
            if (scale[i] != 1.0f) s[i] = smaller[i];
    }
    GT_UNROLL
    for (int i = 0; i < N; i++) {
        const float eps = fmaxf(in.eps * scale[i] * scale[i], 0x1p-126f);
        const float rstd = rsqrt_of_normal(fma_rn(s[i].square, inverse, eps));
        /* A product instead of center / scale, because the division takes a slow path if the quotient is 0. */
        const float center = s[i].center * (scale[i] == 1.0f ? 1.0f : 0x1p80f);
        moments[i] = {center, rstd * scale[i], s[i].lo * rstd, 0.0f};
    }
}

template <class Row>
GT_DEV Moments moments_of(Row& row, const Input& in) {
    OneRow<Row> one = {row};
    Moments moments[1];
    moments_of_rows(moments, one, in);
    return moments[0];
}

GT_KERNEL(32 * ROW_WARPS, 1) moments_kernel(const GT_GRID_CONSTANT Input in) {
    wait_for_chain();
    const int64_t m = (int64_t)block_x() * ROW_WARPS + warp_id();
    if (m >= in.M) return;
    AnyRow row = {in, m};
    const Moments moments = moments_of(row, in);
    if (lane_id() == 0) stg(in.moments + m, moments);
}

/* ---- rmsnorm_linear: y of a single output, fp32 ----------------------------------------------
 * Large terms may cancel in y, and the row has no other output that shows their size.  So all of y is computed in
 * double.
 * grid: ceil(M/8).  Block: 256, a warp for each row.  RMS reads x three times, LAYER four times.  All reads but the
 * first hit the L1 cache.
 * registers: three sums in double.  No shared memory.
 * A lane sums its elements in order, then a butterfly adds the lanes, so sums are deterministic. */
struct SingleParams {
    Input in;
    const float *weight, *bias; /* bias may be NULL */
    float* y;
    int64_t y_stride;
};

/* Returns the sum of f(d) over d < D.  All lanes get the same sum. */
template <class Function>
GT_DEV double sum_in_double(int64_t D, Function f) {
    double sum = 0;
    for (int64_t d = lane_id(); d < D; d += 32) sum += f(d);
    GT_UNROLL
    for (int mask = 16; mask > 0; mask >>= 1) {
        uint32_t half[2];
        memcpy(half, &sum, sizeof sum);
        half[0] = shfl_xor(half[0], mask);
        half[1] = shfl_xor(half[1], mask);
        double other;
        memcpy(&other, half, sizeof other);
        sum += other;
    }
    return sum;
}

GT_KERNEL(32 * ROW_WARPS, 1) single_kernel(const GT_GRID_CONSTANT SingleParams p) {
    const Input& in = p.in;
    const int64_t m = (int64_t)block_x() * ROW_WARPS + warp_id();
    if (m >= in.M) return;
    const float* x = static_cast<const float*>(in.x) + m * in.stride;
    const double count = (double)in.D;
    double mean = 0;
    if (in.norm == GT_NORM_LAYER) mean = sum_in_double(in.D, [&](int64_t d) { return (double)x[d]; }) / count;
    const double square = sum_in_double(in.D, [&](int64_t d) { return (x[d] - mean) * (x[d] - mean); });
    const double rstd = 1 / sqrt(square / count + (double)fmaxf(in.eps, 0x1p-126f));
    const double y = sum_in_double(in.D, [&](int64_t d) {
        const double n = (x[d] - mean) * rstd * (in.gamma ? in.gamma[d] : 1.0f) + (in.beta ? in.beta[d] : 0.0f);
        return n * p.weight[d];
    });
    if (lane_id() == 0) p.y[m * p.y_stride] = (float)(y + (p.bias ? p.bias[0] : 0.0f));
}

} /* namespace rmsnorm_linear */
} /* namespace gt */

#endif
