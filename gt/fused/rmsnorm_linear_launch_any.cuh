/* gt/fused/rmsnorm_linear_launch_any.cuh - rmsnorm_linear: launches for any size, dtype and alignment. */
#ifndef GT_FUSED_RMSNORM_LINEAR_LAUNCH_ANY_CUH
#define GT_FUSED_RMSNORM_LINEAR_LAUNCH_ANY_CUH

#include "../base/built.cuh"
#include "../base/reduce.cuh"
#include "rmsnorm_linear_product.cuh"
#include "rmsnorm_linear_sums.cuh"

namespace gt {
namespace rmsnorm_linear {

/* ---- rmsnorm_linear: launchers --------------------------------------------------------------- */

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

static inline bool is_aligned(const void* data, int64_t stride, int64_t element, int64_t bytes) {
    return (uintptr_t)data % (uintptr_t)bytes == 0 && stride * element % bytes == 0;
}

static inline int64_t size_of(gt_dtype dtype) { return dtype == GT_F32 ? 4 : 2; }

static inline Input input_of(const gt_rmsnorm_linear_args& a, Moments* moments) {
    return {a.x, a.x_stride, a.M, a.D, a.dtype, a.norm, a.eps, a.gamma, a.beta, moments};
}

/* Tensor cores are not used if a result depends on only a few elements of n: the rounding errors of all these elements
 * may be large. */
static inline bool uses_tensor_cores(const gt_rmsnorm_linear_args& a, const Device& device) {
    if (a.D < 32 || a.O < 32 || !is_built(a.dtype)) return false;
    return a.dtype == GT_F16 || (a.dtype == GT_BF16 && device.compute_capability >= 80);
}

/* Rows of a tile for tensor cores: 128 if this leaves two tiles for each multiprocessor, otherwise 64. */
static inline int tile_rows(int64_t M, int64_t N, const Device& device) {
    return ceil_div(M, 128) * ceil_div(N, BN) >= 2 * device.multiprocessors ? 128 : 64;
}

static inline gt_status launch_moments(const Input& in, gt_stream stream) {
    return run("rmsnorm_linear moments_kernel", moments_kernel, ceil_div(in.M, ROW_WARPS), 32 * ROW_WARPS, 0, stream,
               in);
}

template <class C>
static gt_status launch_tiles(ProductParams p, gt_stream stream) {
    p.tiles_m = ceil_div(p.M, C::BM);
    p.tiles_n = ceil_div(p.N, BN);
    return run("rmsnorm_linear product_kernel", product_kernel<C>, p.tiles_m * p.tiles_n * p.slices, THREADS, C::SMEM,
               stream, p);
}

template <class T, Product P>
static gt_status launch_product_of(const ProductParams& p, int rows, gt_stream stream) {
    if constexpr (sizeof(T) == 2 && is_built_for<T>()) {
        if (rows == 128) return launch_tiles<ProductTraits<T, P, true, 128>>(p, stream);
        if (rows == 64) return launch_tiles<ProductTraits<T, P, true, 64>>(p, stream);
    }
    return launch_tiles<ProductTraits<T, P, false, 64>>(p, stream);
}

template <Product P>
static gt_status launch_product(const gt_rmsnorm_linear_args& a, ProductParams p, const Device& device,
                                gt_stream stream) {
    const int64_t size = size_of(a.dtype), out_size = P == OUTPUT ? size : 4;
    p.a.is_aligned = is_aligned(p.a.data, p.a.stride, size, 16);
    p.b.is_aligned = is_aligned(p.b.data, p.b.stride, size, 16);
    p.parameters_are_aligned = is_aligned(a.gamma, 0, 4, 16) && is_aligned(a.beta, 0, 4, 16);
    p.out_is_aligned = is_aligned(p.out, p.out_stride, out_size, 2 * out_size);
    const int rows = uses_tensor_cores(a, device) ? tile_rows(p.M, p.N, device) : 0;
    if (a.dtype == GT_BF16) return launch_product_of<bf16, P>(p, rows, stream);
    if (a.dtype == GT_F16) return launch_product_of<f16, P>(p, rows, stream);
    return launch_product_of<float, P>(p, rows, stream);
}

/* Launches y = n weight^T + bias. */
static inline gt_status launch_output(const gt_rmsnorm_linear_args& a, const Input& in, const Device& device,
                                      gt_stream stream) {
    if (a.dtype == GT_F32 && a.O == 1) {
        const SingleParams p = {in, static_cast<const float*>(a.weight), a.bias, static_cast<float*>(a.y), a.y_stride};
        return run("rmsnorm_linear single_kernel", single_kernel, ceil_div(a.M, ROW_WARPS), 32 * ROW_WARPS, 0, stream,
                   p);
    }
    ProductParams p = {};
    p.a = {a.x, a.x_stride, a.M, a.D, false};
    p.b = {a.weight, a.D, a.O, a.D, false};
    p.in = in;
    p.out = a.y;
    p.out_stride = a.y_stride;
    p.bias = a.bias;
    p.M = a.M, p.N = a.O, p.K = a.D;
    p.slices = 1, p.slice = ceil_div(a.D, BK) * BK;
    return launch_product<OUTPUT>(a, p, device, stream);
}

/* Launches dn = dy weight. */
static inline gt_status launch_dnorm(const gt_rmsnorm_linear_args& a, const Input& in, float* dn, const Device& device,
                                     gt_stream stream) {
    ProductParams p = {};
    p.a = {a.dy, a.dy_stride, a.M, a.O, false};
    p.b = {a.weight, a.D, a.O, a.D, false};
    p.in = in;
    p.out = dn;
    p.out_stride = a.D;
    p.M = a.M, p.N = a.D, p.K = a.O;
    p.slices = 1, p.slice = ceil_div(a.O, BK) * BK;
    return launch_product<DNORM>(a, p, device, stream);
}

/* Workspace of a backward pass, and how its sums over the rows are cut. */
struct BackwardPlan {
    Moments* moments;
    float* dn;                               /* [M,D] */
    float *dweight, *dbias, *dgamma, *dbeta; /* partial sums; the slowest index is the slice or block */
    int64_t slice, slices;                   /* for dweight: rows of a slice, number of slices */
    int64_t rows, blocks;                    /* for the other sums: rows of a block, number of blocks */
    size_t bytes;
};

/* Returns the number of rows of a part of M: a multiple of `unit`, so that M has about `wanted` parts. */
static inline int64_t part_of(int64_t M, int64_t wanted, int64_t unit) {
    return ceil_div(ceil_div(M, wanted > 1 ? wanted : 1), unit) * unit;
}

static inline BackwardPlan plan_backward(const gt_rmsnorm_linear_args& a, const Device& device) {
    BackwardPlan plan = {};
    Arena arena(a.workspace);
    const int64_t rows = uses_tensor_cores(a, device) ? tile_rows(a.O, a.D, device) : 64;
    const int64_t tiles = ceil_div(a.O, rows) * ceil_div(a.D, BN);
    plan.slice = part_of(a.M, 4 * device.multiprocessors / tiles, 4 * BK);
    plan.slices = a.M ? ceil_div(a.M, plan.slice) : 0;
    plan.rows = part_of(a.M, 4 * device.multiprocessors, ROW_WARPS * AT_ONCE);
    plan.blocks = a.M ? ceil_div(a.M, plan.rows) : 0;
    if (!a.saved) plan.moments = arena.take<Moments>(a.M);
    if (a.dx || a.dgamma || a.dbeta) plan.dn = arena.take<float>(a.M * a.D);
    if (a.dweight && plan.slices > 1) plan.dweight = arena.take<float>(plan.slices * a.O * a.D);
    if (a.dbias) plan.dbias = arena.take<float>(plan.blocks * a.O);
    if (a.dgamma) plan.dgamma = arena.take<float>(plan.blocks * a.D);
    if (a.dbeta) plan.dbeta = arena.take<float>(plan.blocks * a.D);
    plan.bytes = arena.bytes();
    return plan;
}

/* Launches dweight = dy^T n. */
static inline gt_status launch_dweight(const gt_rmsnorm_linear_args& a, const Input& in, const BackwardPlan& plan,
                                       const Device& device, gt_stream stream) {
    const bool is_whole = plan.slices == 1;
    ProductParams p = {};
    p.a = {a.dy, a.dy_stride, a.M, a.O, false};
    p.b = {a.x, a.x_stride, a.M, a.D, false};
    p.in = in;
    p.out = is_whole ? a.dweight : plan.dweight;
    p.out_stride = a.D;
    p.accumulate = is_whole && a.accumulate;
    p.M = a.O, p.N = a.D, p.K = a.M;
    p.slices = plan.slices, p.slice = plan.slice;
    const gt_status status = launch_product<DWEIGHT>(a, p, device, stream);
    if (status != GT_OK || is_whole) return status;
    return reduce_rows(plan.dweight, a.dweight, plan.slices, a.O * a.D, a.accumulate, stream);
}

static inline gt_status launch_columns(ColumnParams p, const BackwardPlan& plan, gt_stream stream) {
    p.tiles = ceil_div(p.columns, 32);
    p.rows = plan.rows;
    return run("rmsnorm_linear column_kernel", column_kernel, p.tiles * plan.blocks, 32 * ROW_WARPS,
               2 * 4 * 32 * ROW_WARPS, stream, p);
}

static inline gt_status launch_dbias(const gt_rmsnorm_linear_args& a, const Input& in, const BackwardPlan& plan,
                                     gt_stream stream) {
    ColumnParams p = {};
    p.v = a.dy;
    p.dtype = a.dtype;
    p.stride = a.dy_stride, p.columns = a.O;
    p.in = in;
    p.sums = plan.dbias;
    const gt_status status = launch_columns(p, plan, stream);
    if (status != GT_OK) return status;
    return reduce_rows(plan.dbias, a.dbias, plan.blocks, a.O, a.accumulate, stream);
}

static inline gt_status launch_dparameters(const gt_rmsnorm_linear_args& a, const Input& in, const BackwardPlan& plan,
                                           gt_stream stream) {
    ColumnParams p = {};
    p.v = plan.dn;
    p.dtype = GT_F32;
    p.stride = a.D, p.columns = a.D;
    p.in = in;
    p.sums = plan.dbeta;
    p.dots = plan.dgamma;
    gt_status status = launch_columns(p, plan, stream);
    if (status == GT_OK && a.dgamma)
        status = reduce_rows(plan.dgamma, a.dgamma, plan.blocks, a.D, a.accumulate, stream);
    if (status == GT_OK && a.dbeta) status = reduce_rows(plan.dbeta, a.dbeta, plan.blocks, a.D, a.accumulate, stream);
    return status;
}

static inline gt_status launch_dx(const gt_rmsnorm_linear_args& a, const Input& in, const BackwardPlan& plan,
                                  gt_stream stream) {
    const RowParams p = {in, plan.dn, a.dx, a.dx_stride};
    return run("rmsnorm_linear row_kernel", row_kernel, ceil_div(a.M, ROW_WARPS), 32 * ROW_WARPS, 0, stream, p);
}

static inline gt_status launch_backward(const gt_rmsnorm_linear_args& a, const BackwardPlan& plan, Moments* saved,
                                        const Device& device, gt_stream stream) {
    const Input in = input_of(a, saved ? saved : plan.moments);
    gt_status status = saved ? GT_OK : launch_moments(in, stream);
    if (status == GT_OK && a.dbias) status = launch_dbias(a, in, plan, stream);
    if (status == GT_OK && a.dweight) status = launch_dweight(a, in, plan, device, stream);
    if (status == GT_OK && (a.dx || a.dgamma || a.dbeta)) status = launch_dnorm(a, in, plan.dn, device, stream);
    if (status == GT_OK && a.dx) status = launch_dx(a, in, plan, stream);
    if (status == GT_OK && (a.dgamma || a.dbeta)) status = launch_dparameters(a, in, plan, stream);
    return status;
}

} /* namespace rmsnorm_linear */
} /* namespace gt */

#endif
