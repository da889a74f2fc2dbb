/* gt/fused/rmsnorm_linear_launch_sm90.cuh - rmsnorm_linear: launches of the kernels for compute capability 9.0
 * alone. */
#ifndef GT_FUSED_RMSNORM_LINEAR_LAUNCH_SM90_CUH
#define GT_FUSED_RMSNORM_LINEAR_LAUNCH_SM90_CUH

#include "rmsnorm_linear_launch_any.cuh"
#include "rmsnorm_linear_small_sm90.cuh"

namespace gt {
namespace rmsnorm_linear {

constexpr int64_t MOST_STRIDE = (int64_t)1 << 38; /* the largest stride that tile_load and tile_store take */

/* Returns whether this build has kernels of 9.0 for the device. */
static inline bool has_hopper_kernels(gt_dtype dtype, const Device& device) {
    return is_built(dtype) && device.runs_sm90a;
}

/* ---- tiles ------------------------------------------------------------------------------------- */

constexpr int HOPPER_GROUP = 16;

/* Estimated clocks of a tile of 128 x `columns`: hopper_step for each 64 of K, HOPPER_ENDS to start and end it. */
static inline int64_t hopper_step(int columns) { return columns == 256 ? 1024 : 640; }
constexpr int64_t HOPPER_ENDS = 1500;

/* Chooses the columns of a tile with which a product [M,N] of 16-bit matrices ends soonest. */
static inline int hopper_columns(int64_t M, int64_t N, int64_t K, int64_t slices, const Device& device) {
    int64_t time[2];
    for (int i = 0; i < 2; i++) {
        const int columns = 128 << i;
        const int64_t tiles = ceil_div(M, 128) * ceil_div(N, columns) * slices;
        time[i] = ceil_div(tiles, device.multiprocessors) * (ceil_div(K, 64) * hopper_step(columns) + HOPPER_ENDS);
    }
    return time[1] <= time[0] ? 256 : 128;
}

template <class T, class Shape>
static gt_status map_matrix(TensorMap* map, const Matrix& of, const Shape& shape) {
    return report(make_tensor_map(map, static_cast<const PartOf<T>*>(of.data), shape),
                  "rmsnorm_linear cuTensorMapEncodeTiled");
}

template <class C>
static gt_status prepare_hopper(HopperParams* params, const TilesParams& product, int64_t slices) {
    TilesParams& p = params->tiles;
    p = product;
    p.tiles_m = (int)ceil_div(p.M, C::BM);
    p.tiles_n = (int)ceil_div(p.N, C::BN);
    p.tiles = (int)(p.tiles_m * slices) * p.tiles_n;
    p.group = HOPPER_GROUP;
    if (p.tiles == 0 || p.K == 0) return GT_OK; /* without elements nothing is launched */
    typedef typename C::Type T;
    const gt_status status = map_matrix<T>(&params->a, p.a, panels_of<C::MAJOR_A, C::BM>(p.a, PARTS<T>));
    return status != GT_OK ? status : map_matrix<T>(&params->b, p.b, panels_of<C::MAJOR_B, C::BN>(p.b, PARTS<T>));
}

static inline int64_t hopper_blocks(int64_t tiles, const Device& device) {
    return tiles < device.multiprocessors ? tiles : device.multiprocessors;
}

template <class C>
static gt_status launch_hopper_product(const TilesParams& p, int64_t slices, const Device& device, Chain& chain) {
    HopperParams params;
    const gt_status status = prepare_hopper<C>(&params, p, slices);
    if (status != GT_OK) return status;
    return run("rmsnorm_linear hopper_tiles_kernel", hopper_tiles_kernel<C>, hopper_blocks(params.tiles.tiles, device),
               C::THREADS, C::SMEM, chain, params);
}

template <class T, Product P>
static gt_status launch_hopper_tiles(const TilesParams& p, int64_t slices, const Device& device, Chain& chain) {
    if constexpr (is_built_for<T>() && PARTS<T> == 3) {
        return launch_hopper_product<HopperTile<T, P, 128>>(p, slices, device, chain);
    } else if constexpr (is_built_for<T>()) {
        if (hopper_columns(p.M, p.N, P == DWEIGHT ? p.slice : p.K, slices, device) == 256)
            return launch_hopper_product<HopperTile<T, P, 256>>(p, slices, device, chain);
        return launch_hopper_product<HopperTile<T, P, 128>>(p, slices, device, chain);
    }
    return GT_OK; /* not reached: there are no such kernels */
}

/* ---- dx from whole rows of dn -------------------------------------------------------------------- */

/* Returns whether a tile holds whole rows of dn, and there are enough tiles for the device. */
static inline bool fits_whole_dx(const gt_rmsnorm_linear_args& a, const Device& device) {
    return a.D <= 128 || (a.D <= 256 && 2 * ceil_div(a.M, 128) >= device.multiprocessors);
}

template <class T, int COLUMNS>
static gt_status launch_hopper_dx_of(const TilesParams& p, const GradientParams& gradient, const Device& device,
                                     Chain& chain) {
    if constexpr (is_built_for<T>()) {
        typedef HopperTile<T, DNORM, COLUMNS> C;
        DxParams params = {{}, gradient};
        const gt_status status = prepare_hopper<C>(&params.product, p, 1);
        if (status != GT_OK) return status;
        return run("rmsnorm_linear hopper_dx_kernel", hopper_dx_kernel<C>,
                   hopper_blocks(params.product.tiles.tiles, device), C::THREADS, C::SMEM, chain, params);
    }
    return GT_OK; /* not reached: there are no such kernels */
}

static inline gt_status launch_hopper_dx(const TilesParams& p, const GradientParams& gradient, const Device& device,
                                         Chain& chain) {
    if (gradient.in.dtype == GT_BF16)
        return p.N <= 128 ? launch_hopper_dx_of<bf16, 128>(p, gradient, device, chain)
                          : launch_hopper_dx_of<bf16, 256>(p, gradient, device, chain);
    return p.N <= 128 ? launch_hopper_dx_of<f16, 128>(p, gradient, device, chain)
                      : launch_hopper_dx_of<f16, 256>(p, gradient, device, chain);
}

/* ---- y from whole rows -------------------------------------------------------------------------- */

/* Returns whether the whole weight fits in shared memory beside rows and y (rmsnorm_linear_small_sm90.cuh). */
static inline bool fits_small(const gt_rmsnorm_linear_args& a) {
    return a.D <= 128 && ceil_div(a.O, 128) <= (a.D <= 64 ? SmallTile<bf16, 1>::MOST : SmallTile<bf16, 2>::MOST) &&
           a.y_stride <= MOST_STRIDE;
}
static inline bool fits_whole_rows(const gt_rmsnorm_linear_args& a) {
    return (a.D <= 512 && a.O > 128 && a.y_stride <= MOST_STRIDE) || fits_small(a);
}

template <class T, int K_BLOCKS>
static gt_status launch_whole_of(WholeParams p, const Matrix& x, const Matrix& weight, const Device& device,
                                 Chain& chain) {
    typedef WholeTile<T, K_BLOCKS> C;
    if (p.M == 0) return GT_OK;
    gt_status status = map_matrix<T>(&p.x, x, panels_of<Major::K, C::BM>(x));
    if (status == GT_OK) status = map_matrix<T>(&p.weight, weight, panels_of<Major::K, C::BN>(weight));
    const Matrix y = {p.y, p.y_stride, p.M, p.O};
    if (C::HAS_PANELS && status == GT_OK) status = map_matrix<T>(&p.y_map, y, panels_of<Major::K, 64>(y));
    if (status != GT_OK) return status;
    const int64_t rows = ceil_div(p.M, C::BM), tiles = ceil_div(p.O, C::BN);
    /* Estimated clocks of a unit: 1024 for each step, 256 of O by 64 of D.  For each 64 columns of its rows, 800 to
     * copy and 500 to normalise.  2000 for the rest. */
    int64_t least = INT64_MAX;
    for (int64_t parts = 1; parts <= tiles; parts++) {
        const int64_t of_part = ceil_div(tiles, parts), units = rows * ceil_div(tiles, of_part);
        const int64_t time = ceil_div(units, device.multiprocessors) * (p.k_blocks * (1024 * of_part + 1300) + 2000);
        if (time < least) least = time, p.tiles = (int)of_part;
    }
    p.parts = (int)ceil_div(tiles, p.tiles);
    p.units = (int)rows * p.parts;
    p.stages = C::stages(p.k_blocks);
    if (p.stages > p.tiles * p.k_blocks) p.stages = p.tiles * p.k_blocks;
    return run("rmsnorm_linear hopper_whole_kernel", hopper_whole_kernel<C>, hopper_blocks(p.units, device), C::THREADS,
               C::SMEM, chain, p);
}

template <class T>
static gt_status launch_whole(const WholeParams& p, const Matrix& x, const Matrix& weight, const Device& device,
                              Chain& chain) {
    if constexpr (is_built_for<T>()) {
        if (p.k_blocks <= 4) return launch_whole_of<T, 4>(p, x, weight, device, chain);
        return launch_whole_of<T, 8>(p, x, weight, device, chain);
    }
    return GT_OK; /* not reached: there are no such kernels */
}

template <class T, int K_BLOCKS>
static gt_status launch_small_of(const gt_rmsnorm_linear_args& a, const Input& in, const Matrix& weight,
                                 const Device& device, Chain& chain) {
    typedef SmallTile<T, K_BLOCKS> C;
    if constexpr (is_built_for<T>()) {
        if (a.M == 0) return GT_OK;
        SmallParams p = {};
        p.in = in;
        p.bias = a.bias;
        p.M = (int)a.M, p.O = (int)a.O;
        p.pieces = (int)ceil_div(a.O, C::BN), p.units = (int)ceil_div(a.M, C::BM);
        const Matrix y = {a.y, a.y_stride, (int)a.M, (int)a.O};
        gt_status status = map_matrix<T>(&p.weight, weight, panels_of<Major::K, C::BN>(weight));
        if (status == GT_OK) status = map_matrix<T>(&p.y, y, panels_of<Major::K, 64>(y));
        if (status != GT_OK) return status;
        return run("rmsnorm_linear hopper_small_kernel", hopper_small_kernel<C>, hopper_blocks(p.units, device),
                   C::THREADS, C::SMEM, chain, p);
    }
    return GT_OK; /* not reached: there are no such kernels */
}

template <class T>
static gt_status launch_small(const gt_rmsnorm_linear_args& a, const Input& in, const Matrix& weight,
                              const Device& device, Chain& chain) {
    if (a.D <= 64) return launch_small_of<T, 1>(a, in, weight, device, chain);
    return launch_small_of<T, 2>(a, in, weight, device, chain);
}

/* Launches the kernel that computes y and the moments of x. */
static inline gt_status launch_whole_rows(const gt_rmsnorm_linear_args& a, const Input& in, const Device& device,
                                          Chain& chain) {
    WholeParams p = {};
    p.in = in;
    const Matrix x = {a.x, a.x_stride, (int)a.M, (int)a.D}, weight = {a.weight, a.D, (int)a.O, (int)a.D};
    if (fits_small(a))
        return a.dtype == GT_BF16 ? launch_small<bf16>(a, in, weight, device, chain)
                                  : launch_small<f16>(a, in, weight, device, chain);
    p.y = a.y, p.y_stride = a.y_stride;
    p.bias = a.bias;
    p.M = (int)a.M, p.O = (int)a.O;
    p.k_blocks = (int)ceil_div(a.D, 64);
    return a.dtype == GT_BF16 ? launch_whole<bf16>(p, x, weight, device, chain)
                              : launch_whole<f16>(p, x, weight, device, chain);
}

} /* namespace rmsnorm_linear */
} /* namespace gt */

#endif
