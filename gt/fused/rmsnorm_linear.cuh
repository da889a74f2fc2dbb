/* gt/fused/rmsnorm_linear.cuh - rmsnorm_linear: what its kernels share; mean and rstd.
 *
 * In the words of gt_fused.cuh, of any size and alignment:
 *     moments_kernel   mean and rstd of every row: what `saved` holds
 *     product_kernel   y = n weight^T + bias        dn = dy weight          dweight = dy^T n
 *     row_kernel       dx   = rstd (dxhat - mean(dxhat) - xhat mean(dxhat . xhat))
 *                      with dxhat = dn . gamma; RMSNorm leaves out mean(dxhat)
 *     column_kernel    dgamma = sum_m dn . xhat     dbeta = sum_m dn        dbias = sum_m dy
 * n is never stored: the products normalise x on its way to shared memory, and round it there to
 * the operands' type if they run on tensor cores.  dn is fp32 in the workspace.
 *
 * 16-bit activations in rows of 16-byte pieces, on compute capability 8.0 and newer:
 *     normalise_kernel   mean and rstd, and n in 16 bits; in backward xhat, where dx is not wanted
 *     tiles_kernel       y = n weight^T + bias      dn = dy weight          G = dy^T xhat
 *     gradient_kernel    dx from dn, and xhat in 16 bits, which takes the place of dn
 *     finish_kernel      dweight = G . gamma + dbias beta^T
 *                        dgamma = sum_o weight . G          dbeta = sum_o weight dbias
 * and on 9.0 alone:
 *     hopper_tiles_kernel   the products of tiles_kernel
 *     hopper_whole_kernel   mean and rstd, and y, for D <= 512: n stays in shared memory
 * n, xhat and dn are in 16 bits in the workspace, dn in fp16 with a power of two for 64 neighbours.
 * All sums have a fixed order. */
#ifndef GT_FUSED_RMSNORM_LINEAR_CUH
#define GT_FUSED_RMSNORM_LINEAR_CUH

#include "../base/op.h"
#include "../base/warp.cuh"

namespace gt {
namespace rmsnorm_linear {

/* xhat = (x - center) rstd - offset.  center is the mean rounded to fp32, offset what the rounding
 * took, times rstd: xhat keeps its digits in rows that are far from zero. */
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

constexpr int ROW_WARPS = 8; /* in a block of the kernels that are not products */
constexpr int AT_ONCE = 8;   /* loads of a thread in flight there */

GT_DEV float xhat_of(Moments s, float x) { return fma_rn(x - s.center, s.rstd, -s.offset); }

/* ---- rmsnorm_linear: mean and rstd -----------------------------------------------------------
 * grid ceil(M/8), block 256: a warp per row.  Reads x once for RMS, three times for LAYER, from the
 * first-level cache but for the first; writes 16 bytes a row.
 * registers: 8 elements as loaded and a sum.  No shared memory.
 * Sums: a lane's elements in order, then a butterfly: deterministic. */

/* Row m of x, of any dtype and alignment. */
struct AnyRow {
    const Input& in;
    int64_t m;

    /* Sum over the row of f(x), the same in all lanes. */
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

/* Of the row times scale, a power of two: its mean in two terms, center + lo, and the sum of
 * squared distances from it. */
struct ScaledMoments {
    float center, lo, square;
};

template <class Row>
GT_DEV ScaledMoments scaled_moments(Row& row, const Input& in, float scale) {
    const float count = (float)in.D;
    ScaledMoments s = {0.0f, 0.0f, 0.0f};
    if (in.norm == GT_NORM_LAYER) {
        s.center = row.sum([=](float x) { return x * scale; }) / count;
        s.lo = row.sum([=](float x) { return x * scale - s.center; }) / count;
    }
    s.square = row.sum([=](float x) {
        const float distance = x * scale - s.center - s.lo;
        return distance * distance;
    });
    return s;
}

/* A warp may have several rows, of 8 lanes or more. */
template <class Row>
GT_DEV Moments moments_of(Row& row, const Input& in) {
    float scale = 1.0f;
    ScaledMoments s = scaled_moments(row, in, scale);
    const bool overflows = !(s.square < INFINITY); /* squares or the sum do, but the result need not */
    if (warp_any(overflows)) {
        const ScaledMoments smaller = scaled_moments(row, in, 0x1p-80f);
        if (overflows) s = smaller, scale = 0x1p-80f;
    }
    const float eps = fmaxf(in.eps * scale * scale, 0x1p-126f);
    const float rstd = 1.0f / sqrtf(s.square / (float)in.D + eps);
    return {s.center / scale, rstd * scale, s.lo * rstd, 0.0f};
}

GT_KERNEL(32 * ROW_WARPS, 1) moments_kernel(const GT_GRID_CONSTANT Input in) {
    wait_for_chain();
    const int64_t m = (int64_t)block_x() * ROW_WARPS + warp_id();
    if (m >= in.M) return;
    AnyRow row = {in, m};
    const Moments moments = moments_of(row, in);
    if (lane_id() == 0) stg(in.moments + m, moments);
}

} /* namespace rmsnorm_linear */
} /* namespace gt */

#endif
