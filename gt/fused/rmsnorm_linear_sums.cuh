/* gt/fused/rmsnorm_linear_sums.cuh - rmsnorm_linear backward: dx from dn; sums over the rows. */
#ifndef GT_FUSED_RMSNORM_LINEAR_SUMS_CUH
#define GT_FUSED_RMSNORM_LINEAR_SUMS_CUH

#include "rmsnorm_linear.cuh"

namespace gt {
namespace rmsnorm_linear {

/* ---- rmsnorm_linear: dx from dn --------------------------------------------------------------
 * grid: ceil(M/8).  Block: 256, a warp for each row.  A warp reads x and dn twice, the second time from the L1 cache,
 * and writes dx.
 * registers: 8 loaded elements each of x, dn and gamma, and two sums.  No shared memory.
 * Sums have the same fixed order as in moments_kernel. */
struct RowParams {
    Input in;
    const float* dn; /* [M,D] */
    void* dx;
    int64_t dx_stride;
};

/* dx of rows with up to this many elements is computed in double.  In a row of one or two elements almost all of dxhat
 * cancels.  Because of eps a small remainder stays, which must keep its digits. */
constexpr int SHORT_ROW = 4;

GT_DEV void finish_short_row(const RowParams& p, int64_t m) {
    const Input& in = p.in;
    const int D = (int)in.D;
    const auto x = [&](int d) { return (double)load_as(in.x, in.dtype, m * in.stride + d); };
    const auto dxhat = [&](int d) { return (double)p.dn[m * D + d] * (in.gamma ? in.gamma[d] : 1.0f); };
    const bool has_mean = in.norm == GT_NORM_LAYER;
    double mean = 0, square = 0, dmean = 0, slope = 0;
    for (int d = 0; d < D; d++) {
        mean += has_mean ? x(d) / D : 0;
        dmean += has_mean ? dxhat(d) / D : 0;
    }
    for (int d = 0; d < D; d++) square += (x(d) - mean) * (x(d) - mean);
    const double rstd = 1 / sqrt(square / D + (double)in.eps);
    for (int d = 0; d < D; d++) slope += dxhat(d) * (x(d) - mean) * rstd / D;
    for (int d = 0; d < D; d++)
        store_as(p.dx, in.dtype, m * p.dx_stride + d,
                 (float)(rstd * (dxhat(d) - dmean - (x(d) - mean) * rstd * slope)));
}

/* Loads elements d, d + 32, ... of row m.  dxhat is 0 beyond the row. */
GT_DEV void load_row(float (&xhat)[AT_ONCE], float (&dxhat)[AT_ONCE], const RowParams& p, Moments s, int64_t m,
                     int64_t d) {
    const int64_t valid = (p.in.D - d + 31) / 32;
    float gamma[AT_ONCE];
    load_column(xhat, p.in.x, p.in.dtype, m * p.in.stride + d, 32, valid);
    load_column(dxhat, p.dn, GT_F32, m * p.in.D + d, 32, valid);
    if (p.in.gamma) load_column(gamma, p.in.gamma, GT_F32, d, 32, valid);
    GT_UNROLL
    for (int i = 0; i < AT_ONCE; i++) {
        xhat[i] = xhat_of(s, xhat[i]);
        if (p.in.gamma) dxhat[i] *= gamma[i];
    }
}

GT_KERNEL(32 * ROW_WARPS, 1) row_kernel(const GT_GRID_CONSTANT RowParams p) {
    const int64_t m = (int64_t)block_x() * ROW_WARPS + warp_id();
    if (m >= p.in.M) return;
    if (p.in.D <= SHORT_ROW) {
        if (lane_id() == 0) finish_short_row(p, m);
        return;
    }
    const Moments s = ldg<Moments>(p.in.moments + m);
    float xhat[AT_ONCE], dxhat[AT_ONCE], mean = 0.0f, slope = 0.0f;
    for (int64_t d = lane_id(); d < p.in.D; d += 32 * AT_ONCE) {
        load_row(xhat, dxhat, p, s, m, d);
        GT_UNROLL
        for (int i = 0; i < AT_ONCE; i++) {
            mean += dxhat[i];
            slope = fma_rn(dxhat[i], xhat[i], slope);
        }
    }
    mean = p.in.norm == GT_NORM_RMS ? 0.0f : warp_sum(mean) / (float)p.in.D;
    slope = warp_sum(slope) / (float)p.in.D;
    for (int64_t d = lane_id(); d < p.in.D; d += 32 * AT_ONCE) {
        load_row(xhat, dxhat, p, s, m, d);
        GT_UNROLL
        for (int i = 0; i < AT_ONCE; i++)
            if (d + 32 * i < p.in.D)
                store_as(p.dx, p.in.dtype, m * p.dx_stride + d + 32 * i, s.rstd * (dxhat[i] - mean - xhat[i] * slope));
    }
}

/* ---- rmsnorm_linear: sums over the rows ------------------------------------------------------
 * Sums of v [M,C], and of v . xhat if C = D.  Each block of rows stores its partial sums, which reduce_rows adds.
 * grid: ceil(C/32) * (blocks of rows).  Block: 256, for 8 rows x 32 columns.  2 KB of shared memory.
 * registers: 8 loaded elements each of v and x, and two sums.
 * bytes: v once.  For the second sum also x once, and 16 bytes of moments for each row and tile of columns.
 * A warp adds its rows in order, then the warps' sums are added in order, so sums are deterministic. */
struct ColumnParams {
    const void* v;
    gt_dtype dtype;
    int64_t stride, columns;
    Input in;
    int64_t tiles, rows; /* tiles of columns; rows of a block */
    float *sums, *dots;  /* [blocks of rows, C]; NULL: not computed */
};

/* Adds up the sums of 8 warps for column c.  Stores the total in row `block` of `partials`.  values: address of the
 * warps' sums. */
GT_DEV void store_column(float* partials, uint32_t values, const ColumnParams& p, int64_t block, int64_t c) {
    if (!partials || c >= p.columns) return;
    float sum = 0.0f;
    for (int i = 0; i < ROW_WARPS; i++) sum += lds<float>(values + 4 * (32 * i + lane_id()));
    partials[block * p.columns + c] = sum;
}

GT_KERNEL(32 * ROW_WARPS, 1) column_kernel(const GT_GRID_CONSTANT ColumnParams p) {
    wait_for_chain();
    const int64_t block = block_x() / p.tiles, c = block_x() % p.tiles * 32 + lane_id();
    const int64_t first = block * p.rows;
    const int64_t end = c >= p.columns ? first : first + p.rows < p.in.M ? first + p.rows : p.in.M;
    float sum = 0.0f, dot = 0.0f;
    for (int64_t m = first + warp_id(); m < end; m += ROW_WARPS * AT_ONCE) {
        const int64_t valid = (end - m + ROW_WARPS - 1) / ROW_WARPS;
        float v[AT_ONCE], x[AT_ONCE];
        load_column(v, p.v, p.dtype, m * p.stride + c, ROW_WARPS * p.stride, valid);
        GT_UNROLL
        for (int i = 0; i < AT_ONCE; i++) sum += v[i];
        if (!p.dots) continue;
        load_column(x, p.in.x, p.in.dtype, m * p.in.stride + c, ROW_WARPS * p.in.stride, valid);
        GT_UNROLL
        for (int i = 0; i < AT_ONCE; i++)
            if (i < valid) {
                const Moments s = ldg<Moments>(p.in.moments + m + ROW_WARPS * i);
                dot = fma_rn(v[i], xhat_of(s, x[i]), dot);
            }
    }
    const uint32_t sums = smem_base(), dots = sums + 4 * 32 * ROW_WARPS;
    sts<float>(sums + 4 * thread_id(), sum);
    sts<float>(dots + 4 * thread_id(), dot);
    sync_threads();
    if (warp_id() == 0) store_column(p.sums, sums, p, block, c);
    if (warp_id() == 1) store_column(p.dots, dots, p, block, c);
}

} /* namespace rmsnorm_linear */
} /* namespace gt */

#endif
