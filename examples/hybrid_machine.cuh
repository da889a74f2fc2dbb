/* Parts that the kernels of hybrid_ops.cuh share: the device as a hy_backend, launches, and two kernels.  Most
 * operators use these two: one works element by element, the other sums rows.
 *
 * A block has 8 warps.  If rows are independent, a warp takes one row.  For a sum over rows, a warp adds up 128
 * columns of some rows, and a block adds up its warps in order.  reduce_rows then adds up the blocks.  So the order
 * of every sum depends only on the sizes.
 *
 * Kernels read four elements at a time, if the addresses are aligned and the row length is a multiple of four. */
#ifndef HYBRID_MACHINE_CUH
#define HYBRID_MACHINE_CUH

#include "gt/base/reduce.cuh"
#include "hybrid_ops.h"

namespace hy {

using namespace gt;

/* ---- the machine ----------------------------------------------------------------------------- */

struct Machine : hy_backend {
    cudaStream_t stream;
    size_t workspace_want; /* bytes of workspace that matrix products can use */
    float* sums;           /* in scratch memory: the operators' partial sums ... */
    int64_t sums_count;
    void* workspace; /* ... and the workspace of matrix products */
    size_t workspace_bytes;
};

static Machine& machine(hy_backend* be) { return *static_cast<Machine*>(be); }

constexpr size_t WORKSPACE_BYTES = 32 << 20; /* of matrix products: the default of cuBLAS on sm_90 */
constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;
constexpr int64_t PARTS = 512; /* the largest number of partial sums per column */

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static size_t size_of(gt_dtype dtype) { return dtype == GT_BF16 || dtype == GT_F16 ? 2 : 4; }

/* Launches a kernel.  The grid's y dimension counts blocks of columns, or independent products. */
template <class Params>
static gt_status enqueue(const Machine& m, const char* name, void (*kernel)(Params), int64_t blocks, int64_t y,
                         size_t smem, const Params& params) {
    if (blocks == 0 || y == 0) return GT_OK;
    if (blocks > INT32_MAX || y > 65535)
        return hy_fail(GT_ERROR_SIZE, "cuda %s: %lld x %lld blocks are too many for a grid", name, (long long)blocks,
                       (long long)y);
    const Grid grid = {(unsigned)blocks, (unsigned)y, 1};
    const cudaError_t error = launch(kernel, grid, THREADS, smem, m.stream, params);
    if (error == cudaSuccess) return GT_OK;
    return hy_fail(GT_ERROR_CUDA, "cuda %s: %s", name, cudaGetErrorString(error));
}

/* Bundles the template parameters of a kernel that processes N elements of type T at a time. */
template <class T_, int N_>
struct Layout {
    using T = T_;
    static constexpr int N = N_;
};

template <class F>
static gt_status with_layout(gt_dtype dtype, bool fours, F f) {
    if (dtype == GT_BF16) return fours ? f(Layout<bf16, 4>()) : f(Layout<bf16, 1>());
    if (dtype == GT_F16) return fours ? f(Layout<f16, 4>()) : f(Layout<f16, 1>());
    return fours ? f(Layout<float, 4>()) : f(Layout<float, 1>());
}

/* Returns whether kernels can read four elements at a time in all these arrays, whose rows have `columns` elements. */
template <class... Pointers>
static bool in_fours(int64_t columns, Pointers... arrays) {
    return columns % 4 == 0 && (... && ((uintptr_t)arrays % 16 == 0));
}

/* Computes the number of partial sums per column, for `columns` columns.  It is `wanted`, or fewer if scratch memory
 * has no room for so many. */
static gt_status count_parts(const Machine& m, const char* name, int64_t wanted, int64_t columns, int64_t* parts) {
    *parts = smaller(smaller(wanted, PARTS), m.sums_count / (columns ? columns : 1));
    if (*parts > 0 || wanted == 0) return GT_OK;
    return hy_fail(GT_ERROR_WORKSPACE, "cuda %s: %lld columns, but scratch holds %lld numbers", name,
                   (long long)columns, (long long)m.sums_count);
}

static gt_status reduce_parts(const Machine& m, float* out, int64_t parts, int64_t columns, int accumulate) {
    const gt_status status = reduce_rows(m.sums, out, parts, columns, accumulate, m.stream);
    return status == GT_OK ? GT_OK : hy_fail(status, "cuda reduce_rows: %s", gt_last_error());
}

/* ---- shared by the kernels ------------------------------------------------------------------ */

template <class T, int N>
GT_DEV void load(float (&x)[N], const void* data, int64_t i) {
    const Vec<T, N> v = ldg<Vec<T, N>>(static_cast<const T*>(data) + i);
    GT_UNROLL
    for (int j = 0; j < N; j++) x[j] = v.get(j);
}

template <class T, int N>
GT_DEV void store(void* data, int64_t i, const float (&x)[N]) {
    Vec<T, N> v;
    v.set(x);
    stg(static_cast<T*>(data) + i, v);
}

GT_DEV int64_t row_of_warp() { return (int64_t)block_x() * WARPS + warp_id(); }

/* Sums `value` over the block, in a fixed order.  Only thread 0 gets the sum.  The function uses 8 bytes of shared
 * memory per thread, which the caller may use again right after it. */
GT_DEV double block_sum(double value) {
    const uint32_t address = smem_base() + 8 * thread_id();
    sts<double>(address, value);
    for (int half = block_threads() / 2; half > 0; half /= 2) {
        sync_threads();
        if (thread_id() < half) sts<double>(address, lds<double>(address) + lds<double>(address + 8 * half));
    }
    value = lds<double>(address);
    sync_threads();
    return value;
}

/* Adds up the sums of a block's 8 warps, and writes them to out[i * D + column] for i < COUNT.  Each lane holds the
 * sums of N columns of COUNT arrays.  The function uses shared memory for 8 x COUNT x N x 32 floats. */
template <int COUNT, int N>
GT_DEV void write_block_sums(float* out, int64_t D, const float (&sum)[COUNT][N]) {
    constexpr int WIDTH = 32 * N;
    const uint32_t cells = smem_base();
    GT_UNROLL
    for (int i = 0; i < COUNT; i++) {
        GT_UNROLL
        for (int j = 0; j < N; j++) {
            const int column = lane_id() * N + j;
            sts<float>(cells + 4 * ((warp_id() * COUNT + i) * WIDTH + column), sum[i][j]);
        }
    }
    sync_threads();
    for (int c = thread_id(); c < COUNT * WIDTH; c += THREADS) {
        const int64_t column = (int64_t)block_y() * WIDTH + c % WIDTH;
        if (column >= D) continue;
        float total = 0.0f;
        for (int w = 0; w < WARPS; w++) total += lds<float>(cells + 4 * (w * COUNT * WIDTH + c));
        out[c / WIDTH * D + column] = total;
    }
}

template <int COUNT, int N>
constexpr size_t block_sums_bytes() {
    return sizeof(float) * WARPS * COUNT * N * 32;
}

/* ---- element by element -----------------------------------------------------------------------
 * Computes out[i] = F::of(in[0][i], in[1][i], in[2][i]); F may use fewer inputs.
 * The grid has ceil(n / 1024) blocks if a thread takes four elements, else ceil(n / 256) blocks.  The kernel reads and
 * writes every element once. */
struct EachParams {
    const void* in[3];
    void* out;
    int64_t n;
};

template <class From, class To, int N, class F>
GT_KERNEL(THREADS, 1)
each_kernel(const GT_GRID_CONSTANT EachParams p) {
    const int64_t i = ((int64_t)block_x() * THREADS + thread_id()) * N;
    if (i >= p.n) return;
    float x[3][N] = {}, y[N];
    GT_UNROLL
    for (int k = 0; k < F::INPUTS; k++) load<From>(x[k], p.in[k], i);
    GT_UNROLL
    for (int j = 0; j < N; j++) y[j] = F::of(x[0][j], x[1][j], x[2][j]);
    store<To>(p.out, i, y);
}

template <class F>
static gt_status each(const Machine& m, const char* name, gt_dtype dtype, EachParams p) {
    const bool fours = in_fours(p.n, p.in[0], p.in[1], p.in[2], p.out);
    return with_layout(dtype, fours, [&](auto l) {
        using L = decltype(l);
        return enqueue(m, name, each_kernel<typename L::T, typename L::T, L::N, F>, ceil_div(p.n, THREADS * L::N), 1, 0,
                       p);
    });
}

/* ---- sums over rows ---------------------------------------------------------------------------
 * Computes sums[part][d] = sum over the part's rows of weight[row] x[row][d]; weight = NULL means 1.
 * The grid has parts x ceil(D / 128) blocks, each with 4 KB of shared memory.  (If a lane takes one element instead of
 * four: ceil(D / 32) and 1 KB.)  The kernel reads x once. */
struct ColumnsParams {
    const void* x;
    const float* weight;
    float* sums;
    int64_t M, D, rows; /* rows: number of rows per warp */
};

template <class T, int N>
GT_KERNEL(THREADS, 1)
columns_kernel(const GT_GRID_CONSTANT ColumnsParams p) {
    const int64_t d = ((int64_t)block_y() * 32 + lane_id()) * N;
    const int64_t first = row_of_warp() * p.rows;
    const int64_t last = first + p.rows < p.M ? first + p.rows : p.M;
    float sum[1][N] = {}, x[N];
    GT_UNROLL
    for (int64_t row = first; d < p.D && row < last; row++) {
        const float weight = p.weight ? p.weight[row] : 1.0f;
        load<T>(x, p.x, row * p.D + d);
        GT_UNROLL
        for (int j = 0; j < N; j++) sum[0][j] += weight * x[j];
    }
    write_block_sums(p.sums + block_x() * p.D, p.D, sum);
}

/* Computes out[d] = sum over rows of weight[row] x[row][d]; accumulate = 1 adds the sum to out[d]. */
static gt_status sum_columns(const Machine& m, const char* name, gt_dtype dtype, int64_t M, int64_t D, const void* x,
                             const float* weight, float* out, int accumulate) {
    int64_t parts;
    const gt_status status = count_parts(m, name, ceil_div(M, 8 * WARPS), D, &parts);
    if (status != GT_OK) return status;
    const ColumnsParams p = {x, weight, m.sums, M, D, parts ? ceil_div(M, parts * WARPS) : 0};
    const gt_status summed = with_layout(dtype, in_fours(D, x), [&](auto l) {
        using L = decltype(l);
        return enqueue(m, name, columns_kernel<typename L::T, L::N>, parts, ceil_div(D, 32 * L::N),
                       block_sums_bytes<1, L::N>(), p);
    });
    return summed == GT_OK ? reduce_parts(m, out, parts, D, accumulate) : summed;
}

} /* namespace hy */

#endif
