/* The operators of hybrid_ops.h as kernels, in the same order, and their part of a backend's table.
 *
 * All kernels are written on the primitives of gt/base, so that they also run in the
 * emulation of gt/emu.  What is left to whoever includes this file (hybrid_ops.cu, and the
 * tests' emulation) is memory, order and the matrix product.
 *
 * Blocks have 8 warps.  Where rows are independent a warp takes a row.  Where rows are summed a
 * warp takes 128 columns of some rows, a block adds up its warps in order, and reduce_rows adds up
 * the blocks: no sum depends on anything but the sizes.  Arrays whose rows and addresses allow it
 * are read four elements at a time. */
#ifndef HYBRID_OPS_CUH
#define HYBRID_OPS_CUH

#include "gt/base/reduce.cuh"
#include "hybrid_ops.h"

namespace hy {

using namespace gt;

/* ---- the machine ----------------------------------------------------------------------------- */

struct Machine : hy_backend {
    cudaStream_t stream;
    size_t workspace_want; /* bytes that the matrix product would like */
    float* sums;           /* from scratch: partial sums of the operators ... */
    int64_t sums_count;
    void* workspace; /* ... and the matrix product's workspace */
    size_t workspace_bytes;
};

static Machine& machine(hy_backend* be) { return *static_cast<Machine*>(be); }

constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;
constexpr int64_t PARTS = 512; /* at most that many partial sums of a column */

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static size_t size_of(gt_dtype dtype) { return dtype == GT_BF16 || dtype == GT_F16 ? 2 : 4; }

/* `y` counts columns or independent products. */
template <class Params>
static gt_status enqueue(const Machine& m, const char* name, void (*kernel)(Params), int64_t blocks, int64_t y,
                         size_t smem, const Params& params) {
    if (blocks == 0 || y == 0) return GT_OK;
    if (blocks > INT32_MAX || y > 65535)
        return hy_fail(GT_ERROR_SIZE, "cuda %s: %lld x %lld blocks exceed a grid", name, (long long)blocks,
                       (long long)y);
    const Grid grid = {(unsigned)blocks, (unsigned)y, 1};
    const cudaError_t error = launch(kernel, grid, THREADS, smem, m.stream, params);
    if (error == cudaSuccess) return GT_OK;
    return hy_fail(GT_ERROR_CUDA, "cuda %s: %s", name, cudaGetErrorString(error));
}

/* What a kernel is compiled for: elements of type T, N of them at a time. */
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

/* Rows of `columns` elements of all these arrays can be read four elements at a time. */
template <class... Pointers>
static bool in_fours(int64_t columns, Pointers... arrays) {
    return columns % 4 == 0 && (... && ((uintptr_t)arrays % 16 == 0));
}

/* The number of partial sums of `columns` columns: `wanted`, or as many as there is room for. */
static gt_status count_parts(const Machine& m, const char* name, int64_t wanted, int64_t columns, int64_t* parts) {
    *parts = smaller(smaller(wanted, PARTS), m.sums_count / (columns ? columns : 1));
    if (*parts > 0 || wanted == 0) return GT_OK;
    return hy_fail(GT_ERROR_WORKSPACE, "cuda %s: %lld columns: scratch holds %lld numbers", name, (long long)columns,
                   (long long)m.sums_count);
}

static gt_status reduce_parts(const Machine& m, float* out, int64_t parts, int64_t columns, int accumulate) {
    const gt_status status = reduce_rows(m.sums, out, parts, columns, accumulate, m.stream);
    return status == GT_OK ? GT_OK : hy_fail(status, "cuda reduce_rows: %s", gt_last_error());
}

/* ---- what the kernels share ------------------------------------------------------------------ */

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

/* Sums `value` over the block, in one order; the sum is valid in thread 0.  8 bytes of shared
 * memory per thread, which is free again afterwards. */
GT_DEV double block_sum(double value) {
    const uint32_t cell = smem_base() + 8 * thread_id();
    sts<double>(cell, value);
    for (int half = block_threads() / 2; half > 0; half /= 2) {
        sync_threads();
        if (thread_id() < half) sts<double>(cell, lds<double>(cell) + lds<double>(cell + 8 * half));
    }
    value = lds<double>(cell);
    sync_threads();
    return value;
}

/* Adds up what the block's warps hold of `N` columns each lane and of `COUNT` arrays, and writes it
 * to out[i * D + column]; shared memory for 8 x COUNT x N x 32 floats. */
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
 * out[i] = F::of(in[0][i], in[1][i], in[2][i]); F says how many inputs it has.
 * grid ceil(n / 1024) or ceil(n / 256); reads and writes every element once. */
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
 * sums[part][d] = sum over the part's rows of weight[row] x[row][d]; weight NULL = 1.
 * grid parts x ceil(D / 128); 4 KB of shared memory; reads x once. */
struct ColumnsParams {
    const void* x;
    const float* weight;
    float* sums;
    int64_t M, D, rows; /* rows of a warp */
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

/* out[d] (+)= sum over rows of weight[row] x[row][d] */
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

/* ---- gemm: the plain product ------------------------------------------------------------------
 * For what the library of the machine has no algorithm for.  A thread computes one element of c,
 * k upwards; grid ceil(M N / 256) x count. */
struct ProductParams {
    hy_gemm_args g;
};

GT_KERNEL(THREADS, 1) product_kernel(const GT_GRID_CONSTANT ProductParams p) {
    const hy_gemm_args& g = p.g;
    const int64_t i = (int64_t)block_x() * THREADS + thread_id();
    if (i >= g.M * g.N) return;
    const int64_t row = i / g.N, column = i % g.N;
    const int64_t a_first = block_y() * g.a_step + row * (g.trans_a ? 1 : g.lda);
    const int64_t b_first = block_y() * g.b_step + column * (g.trans_b ? g.ldb : 1);
    const int64_t a_next = g.trans_a ? g.lda : 1, b_next = g.trans_b ? 1 : g.ldb;
    const int64_t c = block_y() * g.c_step + row * g.ldc + column;
    float sum = 0.0f;
    for (int64_t k = 0; k < g.K; k++)
        sum = fma_rn(load_as(g.a, g.dtype, a_first + k * a_next), load_as(g.b, g.dtype, b_first + k * b_next), sum);
    sum *= g.alpha;
    if (g.beta != 0.0f) sum = fma_rn(g.beta, load_as(g.c, g.c_dtype, c), sum);
    store_as(g.c, g.c_dtype, c, sum);
}

/* Fills in the defaults. */
static hy_gemm_args resolve_gemm(const hy_gemm_args* args) {
    hy_gemm_args g = *args;
    if (g.dtype == GT_DTYPE_DEFAULT) g.dtype = GT_F32;
    if (g.c_dtype == GT_DTYPE_DEFAULT) g.c_dtype = g.dtype;
    if (!g.lda) g.lda = g.trans_a ? g.M : g.K;
    if (!g.ldb) g.ldb = g.trans_b ? g.K : g.N;
    if (!g.ldc) g.ldc = g.N;
    if (!g.count) g.count = 1;
    return g;
}

static gt_status plain_product(const Machine& m, const hy_gemm_args& g) {
    const ProductParams p = {g};
    return enqueue(m, "gemm", product_kernel, ceil_div(g.M * g.N, THREADS), g.count, 0, p);
}

/* ---- embedding ------------------------------------------------------------------------------- */

struct EmbeddingParams {
    int64_t M, V, D;
    const int32_t* token;
    const void *table, *dy;
    void* y;
    float* sums;
    int64_t rows; /* of a warp */
};

/* grid ceil(M/8), a warp per row */
template <class T, int N>
GT_KERNEL(THREADS, 1)
embedding_forward_kernel(const GT_GRID_CONSTANT EmbeddingParams p) {
    const int64_t row = row_of_warp();
    if (row >= p.M) return;
    const int64_t from = p.token[row] * p.D;
    for (int64_t d = lane_id() * N; d < p.D; d += 32 * N) {
        float x[N];
        load<T>(x, p.table, from + d);
        store<T>(p.y, row * p.D + d, x);
    }
}

/* sums[part][v][d] = sum of dy[m][d] over the part's rows m with token v, m upwards in each warp.
 * grid V x parts x ceil(D / 128) as x = v * parts + part; 4 KB of shared memory.  Every block looks
 * at its part of the tokens, and reads only the rows that it adds. */
template <class T, int N>
GT_KERNEL(THREADS, 1)
embedding_backward_kernel(const GT_GRID_CONSTANT EmbeddingParams p) {
    constexpr int AT_ONCE = 8; /* loads in flight */
    const int64_t parts = grid_x() / p.V, v = block_x() / parts, part = block_x() % parts;
    const int64_t d = ((int64_t)block_y() * 32 + lane_id()) * N;
    const int64_t first = (part * WARPS + warp_id()) * p.rows;
    const int64_t last = first + p.rows < p.M ? first + p.rows : p.M;
    float sum[1][N] = {};
    for (int64_t row = first; row < last; row += 32) {
        const int32_t mine = row + lane_id() < last ? p.token[row + lane_id()] : -1;
        if (!warp_any(mine == v)) continue;
        for (int lane = 0; lane < 32; lane += AT_ONCE) {
            float x[AT_ONCE][N] = {};
            GT_UNROLL
            for (int k = 0; k < AT_ONCE; k++)
                if (shfl_idx(mine, lane + k) == v && d < p.D) load<T>(x[k], p.dy, (row + lane + k) * p.D + d);
            GT_UNROLL
            for (int k = 0; k < AT_ONCE; k++) {
                GT_UNROLL
                for (int j = 0; j < N; j++) sum[0][j] += x[k][j];
            }
        }
    }
    write_block_sums(p.sums + (part * p.V + v) * p.D, p.D, sum);
}

static gt_status embedding_forward(hy_backend* be, const hy_embedding_args* a) {
    const EmbeddingParams p = {a->M, a->V, a->D, a->token, a->table, nullptr, a->y, nullptr, 0};
    return with_layout(a->dtype, in_fours(a->D, a->table, a->y), [&](auto l) {
        using L = decltype(l);
        return enqueue(machine(be), "embedding", embedding_forward_kernel<typename L::T, L::N>, ceil_div(a->M, WARPS),
                       1, 0, p);
    });
}

static gt_status embedding_backward(hy_backend* be, const hy_embedding_args* a) {
    const Machine& m = machine(be);
    const int64_t wanted = smaller(16, ceil_div(a->M, 32 * WARPS));
    int64_t parts;
    gt_status status = count_parts(m, "embedding", wanted, a->V * a->D, &parts);
    if (status != GT_OK) return status;
    const int64_t rows = parts ? ceil_div(a->M, parts * WARPS) : 0;
    const EmbeddingParams p = {a->M, a->V, a->D, a->token, nullptr, a->dy, nullptr, m.sums, rows};
    status = with_layout(a->dtype, in_fours(a->D, a->dy), [&](auto l) {
        using L = decltype(l);
        return enqueue(m, "embedding", embedding_backward_kernel<typename L::T, L::N>, a->V * parts,
                       ceil_div(a->D, 32 * L::N), block_sums_bytes<1, L::N>(), p);
    });
    if (status != GT_OK) return status;
    return reduce_parts(m, a->dtable, parts, a->V * a->D, a->accumulate);
}

/* ---- lerp -------------------------------------------------------------------------------------
 * COUNT of the lerps at once: the model's five, or one after the other. */

struct LerpParams {
    int64_t M, T, D;
    int accumulate_dx;
    const void *x, *m, *dy; /* m may be NULL */
    const float *state_in, *mu;
    void *y, *dx, *dm;       /* dx and dm may be NULL */
    float *state_out, *sums; /* may be NULL */
    int64_t rows;            /* of a warp */
};

/* x of the token before row `row`, which is number t of its sequence. */
template <class T, int N>
GT_DEV void load_before(float (&before)[N], const LerpParams& p, int64_t row, int64_t t, int64_t d) {
    if (t > 0) {
        load<T>(before, p.x, (row - 1) * p.D + d);
        return;
    }
    GT_UNROLL
    for (int j = 0; j < N; j++) before[j] = p.state_in ? p.state_in[row / p.T * p.D + d + j] : 0.0f;
}

/* w = mu[i] + m[i] at this row */
template <class T, int N>
GT_DEV void load_weight(float (&w)[N], const LerpParams& p, int i, int64_t row, int64_t d) {
    load<float>(w, p.mu, i * p.D + d);
    if (!p.m) return;
    float m[N];
    load<T>(m, p.m, (i * p.M + row) * p.D + d);
    GT_UNROLL
    for (int j = 0; j < N; j++) w[j] += m[j];
}

/* grid ceil(M/8), a warp per row.  The warp that reads a sequence's state_in also writes its
 * state_out, as the two may be the same. */
template <class T, int N, int COUNT>
GT_KERNEL(THREADS, 1)
lerp_forward_kernel(const GT_GRID_CONSTANT LerpParams p) {
    const int64_t row = row_of_warp(), t = row % p.T;
    if (row >= p.M) return;
    for (int64_t d = lane_id() * N; d < p.D; d += 32 * N) {
        float x[N], before[N], w[COUNT][N], y[N];
        load<T>(x, p.x, row * p.D + d);
        load_before<T>(before, p, row, t, d);
        GT_UNROLL
        for (int i = 0; i < COUNT; i++) load_weight<T>(w[i], p, i, row, d);
        GT_UNROLL
        for (int i = 0; i < COUNT; i++) {
            GT_UNROLL
            for (int j = 0; j < N; j++) y[j] = fma_rn(before[j] - x[j], w[i][j], x[j]);
            store<T>(p.y, (i * p.M + row) * p.D + d, y);
        }
        if (t == 0 && p.state_out) {
            load<T>(x, p.x, (row + p.T - 1) * p.D + d);
            store<float>(p.state_out, row / p.T * p.D + d, x);
        }
    }
}

/* A warp goes backwards through its rows, with what token t+1 adds to dx_t in `next`; it computes
 * that for the row behind its last one too.
 * grid parts x ceil(D / 128); reads x, and m and dy once (and 1/rows of them again), writes dx and
 * dm; 20 KB of shared memory for the five. */
template <class T, int N, int COUNT>
GT_KERNEL(THREADS, 1)
lerp_backward_kernel(const GT_GRID_CONSTANT LerpParams p) {
    const int64_t d = ((int64_t)block_y() * 32 + lane_id()) * N;
    const int64_t first = row_of_warp() * p.rows;
    const int64_t last = first + p.rows < p.M ? first + p.rows : p.M;
    float dmu[COUNT][N] = {}, next[N] = {}, w[COUNT][N], g[COUNT][N];
    if (d < p.D && last < p.M && first < last && last % p.T) {
        GT_UNROLL
        for (int i = 0; i < COUNT; i++) {
            load_weight<T>(w[i], p, i, last, d);
            load<T>(g[i], p.dy, (i * p.M + last) * p.D + d);
        }
        GT_UNROLL
        for (int i = 0; i < COUNT; i++) {
            GT_UNROLL
            for (int j = 0; j < N; j++) next[j] = fma_rn(g[i][j], w[i][j], next[j]);
        }
    }
    for (int64_t row = last - 1, t = (last - 1) % p.T; d < p.D && row >= first; row--) {
        float x[N], before[N], dx[N] = {}, earlier[N] = {};
        load<T>(x, p.x, row * p.D + d);
        load_before<T>(before, p, row, t, d);
        if (p.dx && p.accumulate_dx) load<T>(dx, p.dx, row * p.D + d);
        GT_UNROLL
        for (int i = 0; i < COUNT; i++) {
            load_weight<T>(w[i], p, i, row, d);
            load<T>(g[i], p.dy, (i * p.M + row) * p.D + d);
        }
        GT_UNROLL
        for (int j = 0; j < N; j++) dx[j] += next[j];
        GT_UNROLL
        for (int i = 0; i < COUNT; i++) {
            float dm[N];
            GT_UNROLL
            for (int j = 0; j < N; j++) {
                dx[j] = fma_rn(g[i][j], 1.0f - w[i][j], dx[j]);
                earlier[j] = fma_rn(g[i][j], w[i][j], earlier[j]);
                dm[j] = g[i][j] * (before[j] - x[j]);
                dmu[i][j] += dm[j];
            }
            if (p.dm) store<T>(p.dm, (i * p.M + row) * p.D + d, dm);
        }
        if (p.dx) store<T>(p.dx, row * p.D + d, dx);
        GT_UNROLL
        for (int j = 0; j < N; j++) next[j] = t > 0 ? earlier[j] : 0.0f;
        t = t > 0 ? t - 1 : p.T - 1;
    }
    if (p.sums) write_block_sums(p.sums + (int64_t)block_x() * COUNT * p.D, p.D, dmu);
}

/* The parameters for the lerps from number i on. */
static LerpParams lerps_from(const hy_lerp_args* a, int64_t i) {
    const int64_t M = a->B * a->T, skip = i * M * a->D * (int64_t)size_of(a->dtype);
    LerpParams p = {};
    p.M = M, p.T = a->T, p.D = a->D;
    p.accumulate_dx = a->accumulate_dx || i > 0;
    p.x = a->x, p.state_in = a->state_in, p.mu = a->mu + i * a->D;
    if (a->m) p.m = static_cast<const char*>(a->m) + skip;
    if (a->y) p.y = static_cast<char*>(a->y) + skip;
    if (a->dy) p.dy = static_cast<const char*>(a->dy) + skip;
    if (a->dm) p.dm = static_cast<char*>(a->dm) + skip;
    p.dx = a->dx;
    return p;
}

template <int COUNT>
static gt_status lerp_group_forward(const Machine& m, const hy_lerp_args* a, int64_t i) {
    LerpParams p = lerps_from(a, i);
    if (i + COUNT == a->count) p.state_out = a->state_out; /* no group reads state_in any more */
    const bool fours = in_fours(p.D, p.x, p.m, p.mu, p.y, p.state_out);
    return with_layout(a->dtype, fours, [&](auto l) {
        using L = decltype(l);
        return enqueue(m, "lerp", lerp_forward_kernel<typename L::T, L::N, COUNT>, ceil_div(p.M, WARPS), 1, 0, p);
    });
}

template <int COUNT>
static gt_status lerp_group_backward(const Machine& m, const hy_lerp_args* a, int64_t i) {
    LerpParams p = lerps_from(a, i);
    int64_t parts;
    gt_status status = count_parts(m, "lerp", ceil_div(p.M, 8 * WARPS), COUNT * p.D, &parts);
    if (status != GT_OK) return status;
    p.rows = parts ? ceil_div(p.M, parts * WARPS) : 0;
    p.sums = a->dmu ? m.sums : nullptr;
    const bool fours = in_fours(p.D, p.x, p.m, p.mu, p.dy, p.dx, p.dm);
    status = with_layout(a->dtype, fours, [&](auto l) {
        using L = decltype(l);
        return enqueue(m, "lerp", lerp_backward_kernel<typename L::T, L::N, COUNT>, parts, ceil_div(p.D, 32 * L::N),
                       block_sums_bytes<COUNT, L::N>(), p);
    });
    if (status != GT_OK || !a->dmu) return status;
    return reduce_parts(m, a->dmu + i * p.D, parts, COUNT * p.D, a->accumulate);
}

static gt_status lerp_forward(hy_backend* be, const hy_lerp_args* a) {
    if (a->count == 5) return lerp_group_forward<5>(machine(be), a, 0);
    gt_status status = GT_OK;
    for (int64_t i = 0; i < a->count && status == GT_OK; i++) status = lerp_group_forward<1>(machine(be), a, i);
    return status;
}

static gt_status lerp_backward(hy_backend* be, const hy_lerp_args* a) {
    if (a->count == 5) return lerp_group_backward<5>(machine(be), a, 0);
    gt_status status = GT_OK;
    for (int64_t i = 0; i < a->count && status == GT_OK; i++) status = lerp_group_backward<1>(machine(be), a, i);
    return status;
}

/* ---- map ------------------------------------------------------------------------------------- */

GT_HD float tanh_of(float x) {
    /* the quotient cancels near 0, where the series is exact to the last bit */
    const float s = x * x;
    const float series = s * (-1.0f / 3 + s * (2.0f / 15 + s * (-17.0f / 315 + s * (62.0f / 2835))));
    return s < 0.0625f ? fma_rn(x, series, x) : 1.0f - 2.0f / (exp_accurate(2.0f * x) + 1.0f);
}

/* GELU(x) = x sigmoid(2 q(x)), q(x) = sqrt(2/pi) (x + 0.044715 x^3).  Beyond 16 the sigmoid is 0 or
 * 1 to all digits; the bound keeps x^3 from overflowing, and NaN as it is. */
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
struct Backward { /* of dy and of what the slope depends on */
    static constexpr int INPUTS = 2;
    GT_DEV float of(float dy, float at, float) { return dy * F::slope(at); }
};
template <class F>
struct BackwardAdd { /* the same, added to what was there */
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

/* grid ceil(M/8), a warp per row */
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

/* Both: grid ceil(M/8), a warp per row, which it reads twice. */
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
    /* lane 0 alone touches gate, which it overwrites */
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

/* ---- cross_entropy --------------------------------------------------------------------------- */

struct CrossEntropyParams {
    int64_t M, V;
    const int32_t* target;
    void* logits;
    float *lse, *loss, *entropy, *total;
    const float* scale;
};

/* The largest value of the warp, NaN if there is one. */
GT_DEV float warp_max(float value) {
    GT_UNROLL
    for (int mask = 16; mask > 0; mask >>= 1) {
        const float other = shfl_xor(value, mask);
        if (!(value >= other)) value = value != value ? value : other;
    }
    return value;
}

/* grid ceil(M/8), a warp per row, which it reads twice */
template <class T>
GT_KERNEL(THREADS, 1)
cross_entropy_forward_kernel(const GT_GRID_CONSTANT CrossEntropyParams p) {
    const int64_t row = row_of_warp();
    if (row >= p.M) return;
    const T* z = static_cast<const T*>(p.logits) + row * p.V;
    float largest = Element<T>::load(z, 0), sum = 0.0f, weighted = 0.0f;
    for (int64_t v = lane_id(); v < p.V; v += 32) {
        const float x = Element<T>::load(z, v);
        if (!(largest >= x)) largest = largest != largest ? largest : x;
    }
    largest = warp_max(largest);
    for (int64_t v = lane_id(); v < p.V; v += 32) {
        float x = Element<T>::load(z, v) - largest;
        x = x < -87.0f ? -87.0f : x; /* nothing beside 1, and x may be infinite */
        const float e = exp_accurate(x);
        sum += e;
        weighted += e * x;
    }
    sum = warp_sum(sum);
    weighted = warp_sum(weighted);
    if (lane_id() != 0) return;
    const int32_t target = p.target[row];
    const float lse = largest + logf(sum);
    p.lse[row] = lse;
    p.loss[row] = target < 0 ? 0.0f : lse - Element<T>::load(z, target);
    p.entropy[row] = target < 0 ? 0.0f : logf(sum) - weighted / sum;
}

/* One block adds up the rows. */
GT_KERNEL(THREADS, 1) cross_entropy_total_kernel(const GT_GRID_CONSTANT CrossEntropyParams p) {
    double loss = 0.0, counted = 0.0, entropy = 0.0;
    GT_UNROLL
    for (int64_t row = thread_id(); row < p.M; row += THREADS) {
        loss += p.loss[row];
        counted += p.target[row] >= 0;
        entropy += p.entropy[row];
    }
    loss = block_sum(loss);
    counted = block_sum(counted);
    entropy = block_sum(entropy);
    if (thread_id() != 0) return;
    p.total[0] = (float)loss;
    p.total[1] = (float)counted;
    p.total[2] = (float)entropy;
}

/* grid ceil(M/8), a warp per row */
template <class T>
GT_KERNEL(THREADS, 1)
cross_entropy_backward_kernel(const GT_GRID_CONSTANT CrossEntropyParams p) {
    const int64_t row = row_of_warp();
    if (row >= p.M) return;
    T* z = static_cast<T*>(p.logits) + row * p.V;
    const int32_t target = p.target[row];
    const float counted = p.total[1], lse = p.lse[row];
    const float scale = (p.scale ? p.scale[0] : 1.0f) / (counted > 1.0f ? counted : 1.0f);
    for (int64_t v = lane_id(); v < p.V; v += 32) {
        const float softmax = exp_accurate(Element<T>::load(z, v) - lse);
        const float gradient = target < 0 ? 0.0f : (softmax - (v == target)) * scale;
        Element<T>::store(z, v, gradient);
    }
}

static CrossEntropyParams cross_entropy_params(const hy_cross_entropy_args* a) {
    return {a->M, a->V, a->target, a->logits, a->lse, a->loss, a->entropy, a->total, a->scale};
}

static gt_status cross_entropy_forward(hy_backend* be, const hy_cross_entropy_args* a) {
    const Machine& m = machine(be);
    const CrossEntropyParams p = cross_entropy_params(a);
    const gt_status status = with_layout(a->dtype, false, [&](auto l) {
        return enqueue(m, "cross_entropy", cross_entropy_forward_kernel<typename decltype(l)::T>, ceil_div(a->M, WARPS),
                       1, 0, p);
    });
    if (status != GT_OK) return status;
    return enqueue(m, "cross_entropy", cross_entropy_total_kernel, 1, 1, 8 * THREADS, p);
}

static gt_status cross_entropy_backward(hy_backend* be, const hy_cross_entropy_args* a) {
    return with_layout(a->dtype, false, [&](auto l) {
        return enqueue(machine(be), "cross_entropy", cross_entropy_backward_kernel<typename decltype(l)::T>,
                       ceil_div(a->M, WARPS), 1, 0, cross_entropy_params(a));
    });
}

/* ---- gradient norm and AdamW ----------------------------------------------------------------- */

struct GradNormParams {
    hy_segments segments;
    const float *grad, *control;
    double *slices, *partial;
    float* norm;
    int64_t slices_each; /* pieces that a segment is cut into */
};

/* slices[s][k] = sum of squares of a piece of a segment; grid count x slices_each */
GT_KERNEL(THREADS, 1) squares_kernel(const GT_GRID_CONSTANT GradNormParams p) {
    const int64_t s = block_x() / p.slices_each, k = block_x() % p.slices_each;
    const int64_t start = p.segments.start[s], end = p.segments.start[s + 1];
    const int64_t length = (end - start + p.slices_each - 1) / p.slices_each;
    const int64_t first = start + k * length, last = first + length < end ? first + length : end;
    double sum = 0.0;
    GT_UNROLL
    for (int64_t i = first + thread_id(); i < last; i += THREADS) sum += (double)p.grad[i] * (double)p.grad[i];
    sum = block_sum(sum);
    if (thread_id() == 0) p.slices[block_x()] = sum;
}

/* One block: the segments from their pieces, then the groups from the segments, in order. */
GT_KERNEL(THREADS, 1) grad_norm_kernel(const GT_GRID_CONSTANT GradNormParams p) {
    for (int64_t s = thread_id(); s < p.segments.count; s += THREADS) {
        double sum = 0.0;
        for (int64_t k = 0; k < p.slices_each; k++) sum += p.slices[s * p.slices_each + k];
        p.partial[s] = sum;
    }
    sync_threads();
    const double scale = p.control[HY_LOSS_SCALE];
    const int group = thread_id();
    if (group < HY_GROUPS) {
        double sum = 0.0;
        for (int64_t s = 0; s < p.segments.count; s++)
            if (p.segments.group[s] == group) sum += p.partial[s];
        p.norm[group] = (float)(sqrt(sum) / scale);
        sts<double>(smem_base() + 8 * group, sum);
    }
    sync_threads();
    if (thread_id() != 0) return;
    double all = 0.0;
    for (int g = 0; g < HY_GROUPS; g++) all += lds<double>(smem_base() + 8 * g);
    p.norm[HY_GROUPS] = (float)(sqrt(all) / scale);
}

static gt_status grad_norm(hy_backend* be, const hy_grad_norm_args* a) {
    const Machine& m = machine(be);
    int64_t slices;
    gt_status status = count_parts(m, "grad_norm", 16, 2 * a->segments.count, &slices);
    if (status != GT_OK) return status;
    double* pieces = reinterpret_cast<double*>(m.sums);
    const GradNormParams p = {a->segments, a->grad, a->control, pieces, a->partial, a->norm, slices};
    status = enqueue(m, "grad_norm", squares_kernel, a->segments.count * slices, 1, 8 * THREADS, p);
    if (status != GT_OK) return status;
    return enqueue(m, "grad_norm", grad_norm_kernel, 1, 1, 8 * HY_GROUPS, p);
}

struct AdamwParams {
    hy_segments segments;
    const float *control, *norm, *grad;
    float *w, *m, *v;
    void* copy;
};

constexpr int ADAMW_BLOCKS = 1024;

/* The number of elements is known to the device alone: each of the 1024 blocks takes its share.
 * Reads 16 bytes and writes 12 of every parameter, and its copy. */
template <class T>
GT_KERNEL(THREADS, 1)
adamw_kernel(const GT_GRID_CONSTANT AdamwParams p) {
    const float norm = p.norm[HY_GROUPS], max_norm = p.control[HY_MAX_NORM];
    if (!(norm <= 3.402823466e38f)) return;
    float scale = 1.0f / p.control[HY_LOSS_SCALE];
    if (max_norm > 0.0f && norm > max_norm) scale *= max_norm / norm;
    const float lr = p.control[HY_LR], c1 = p.control[HY_CORRECTION1];
    const float c2 = p.control[HY_CORRECTION2], eps = p.control[HY_EPS];
    const float beta1 = p.control[HY_BETA1], beta2 = p.control[HY_BETA2];
    const float shrink = lr * p.control[HY_WEIGHT_DECAY];
    const int64_t* start = p.segments.start;
    const int64_t n = start[p.segments.count];
    const int64_t share = (n + grid_x() * THREADS - 1) / (grid_x() * THREADS) * THREADS;
    const int64_t first = block_x() * share + thread_id();
    const int64_t last = block_x() * share + share < n ? block_x() * share + share : n;
    int64_t s = 0, beyond = p.segments.count; /* start[s] <= first < start[beyond] */
    while (first < last && beyond - s > 1) {
        const int64_t middle = (s + beyond) / 2;
        if (start[middle] <= first)
            s = middle;
        else
            beyond = middle;
    }
    for (int64_t i = first; i < last; i += THREADS) {
        while (i >= start[s + 1]) s++;
        const float g = p.grad[i] * scale;
        const float m = beta1 * p.m[i] + (1.0f - beta1) * g;
        const float v = beta2 * p.v[i] + (1.0f - beta2) * g * g;
        float w = p.w[i];
        w -= lr * (m * c1 / (sqrtf(v * c2) + eps)) + shrink * p.segments.decay[s] * w;
        p.m[i] = m;
        p.v[i] = v;
        p.w[i] = w;
        if (p.copy) Element<T>::store(static_cast<T*>(p.copy), i, w);
    }
}

static gt_status adamw(hy_backend* be, const hy_adamw_args* a) {
    const AdamwParams p = {a->segments, a->control, a->norm, a->grad, a->w, a->m, a->v, a->copy};
    return with_layout(a->copy ? a->copy_dtype : GT_F32, false, [&](auto l) {
        return enqueue(machine(be), "adamw", adamw_kernel<typename decltype(l)::T>, ADAMW_BLOCKS, 1, 0, p);
    });
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

/* an element per thread */
GT_KERNEL(THREADS, 1) carry_kernel(const GT_GRID_CONSTANT CarryParams p) {
    const int64_t i = (int64_t)block_x() * THREADS + thread_id();
    if (i >= p.a.count * p.a.B * p.a.n) return;
    p.a.to[i] = p.a.keep[i / p.a.n % p.a.B] ? p.a.from[i] : 0.0f;
}

static gt_status carry(hy_backend* be, const hy_carry_args* a) {
    const CarryParams p = {*a};
    return enqueue(machine(be), "carry", carry_kernel, ceil_div(a->count * a->B * a->n, THREADS), 1, 0, p);
}

/* ---- the operators of gt_kernels.h ----------------------------------------------------------- */

#define HY_DEVICE_OP(name, op)                                                                                         \
    static gt_status name(hy_backend* be, const gt_##op##_args* a) {                                                   \
        const gt_status status = gt_##name(a, machine(be).stream);                                                     \
        return status == GT_OK ? GT_OK : hy_fail(status, "%s", gt_last_error());                                       \
    }
#define HY_DEVICE_WORKSPACE(op)                                                                                        \
    static gt_status op##_workspace(hy_backend*, const gt_##op##_args* a, gt_workspace* need) {                        \
        const gt_status status = gt_##op##_workspace(a, need);                                                         \
        return status == GT_OK ? GT_OK : hy_fail(status, "%s", gt_last_error());                                       \
    }
HY_DEVICE_WORKSPACE(wkv6)
HY_DEVICE_OP(wkv6_forward, wkv6)
HY_DEVICE_OP(wkv6_backward, wkv6)
HY_DEVICE_OP(wkv6_step, wkv6)
HY_DEVICE_WORKSPACE(ssd)
HY_DEVICE_OP(ssd_forward, ssd)
HY_DEVICE_OP(ssd_backward, ssd)
HY_DEVICE_OP(ssd_step, ssd)
HY_DEVICE_WORKSPACE(selective_scan)
HY_DEVICE_OP(selective_scan_forward, selective_scan)
HY_DEVICE_OP(selective_scan_backward, selective_scan)
HY_DEVICE_OP(selective_scan_step, selective_scan)
HY_DEVICE_WORKSPACE(conv1d)
HY_DEVICE_OP(conv1d_forward, conv1d)
HY_DEVICE_OP(conv1d_backward, conv1d)
HY_DEVICE_OP(conv1d_step, conv1d)
HY_DEVICE_WORKSPACE(rmsnorm_linear)
HY_DEVICE_OP(rmsnorm_linear_forward, rmsnorm_linear)
HY_DEVICE_OP(rmsnorm_linear_backward, rmsnorm_linear)
HY_DEVICE_WORKSPACE(norm_mix)
HY_DEVICE_OP(norm_mix_forward, norm_mix)
HY_DEVICE_OP(norm_mix_backward, norm_mix)
HY_DEVICE_WORKSPACE(norm_gate)
HY_DEVICE_OP(norm_gate_forward, norm_gate)
HY_DEVICE_OP(norm_gate_backward, norm_gate)
#undef HY_DEVICE_OP
#undef HY_DEVICE_WORKSPACE

/* ---- the table ------------------------------------------------------------------------------- */

/* Partial sums for rows of twice the widest array, then the product's workspace. */
static gt_status scratch(hy_backend* be, const hy_limits* limits, void* memory, size_t* bytes) {
    Machine& m = machine(be);
    const int64_t sums = PARTS * (2 * limits->D + 64);
    if (!memory) {
        *bytes = (size_t)sums * sizeof(float) + m.workspace_want;
        return GT_OK;
    }
    m.sums = static_cast<float*>(memory);
    m.sums_count = sums;
    m.workspace = m.sums + sums;
    m.workspace_bytes = m.workspace_want;
    return GT_OK;
}

static void set_operators(hy_backend* be) {
    be->fp32_bytes = sizeof(float);
    be->scratch = scratch;
    be->wkv6_workspace = wkv6_workspace;
    be->wkv6_forward = wkv6_forward;
    be->wkv6_backward = wkv6_backward;
    be->wkv6_step = wkv6_step;
    be->ssd_workspace = ssd_workspace;
    be->ssd_forward = ssd_forward;
    be->ssd_backward = ssd_backward;
    be->ssd_step = ssd_step;
    be->selective_scan_workspace = selective_scan_workspace;
    be->selective_scan_forward = selective_scan_forward;
    be->selective_scan_backward = selective_scan_backward;
    be->selective_scan_step = selective_scan_step;
    be->conv1d_workspace = conv1d_workspace;
    be->conv1d_forward = conv1d_forward;
    be->conv1d_backward = conv1d_backward;
    be->conv1d_step = conv1d_step;
    be->rmsnorm_linear_workspace = rmsnorm_linear_workspace;
    be->rmsnorm_linear_forward = rmsnorm_linear_forward;
    be->rmsnorm_linear_backward = rmsnorm_linear_backward;
    be->norm_mix_workspace = norm_mix_workspace;
    be->norm_mix_forward = norm_mix_forward;
    be->norm_mix_backward = norm_mix_backward;
    be->norm_gate_workspace = norm_gate_workspace;
    be->norm_gate_forward = norm_gate_forward;
    be->norm_gate_backward = norm_gate_backward;
    be->embedding_forward = embedding_forward;
    be->embedding_backward = embedding_backward;
    be->lerp_forward = lerp_forward;
    be->lerp_backward = lerp_backward;
    be->map_forward = map_forward;
    be->map_backward = map_backward;
    be->bias_forward = bias_forward;
    be->bias_backward = bias_backward;
    be->gate_mix_forward = gate_mix_forward;
    be->gate_mix_backward = gate_mix_backward;
    be->cross_entropy_forward = cross_entropy_forward;
    be->cross_entropy_backward = cross_entropy_backward;
    be->grad_norm = grad_norm;
    be->adamw = adamw;
    be->add = add;
    be->cast = cast;
    be->carry = carry;
}

/* ---- numbers on their way from and to the host ----------------------------------------------- */

static void put_number(void* to, gt_dtype dtype, int64_t i, double x) {
    if (dtype == GT_BF16)
        static_cast<uint16_t*>(to)[i] = gt_f32_to_bf16((float)x);
    else if (dtype == GT_F16)
        static_cast<uint16_t*>(to)[i] = gt_f32_to_f16((float)x);
    else
        static_cast<float*>(to)[i] = (float)x;
}

static double get_number(const void* from, gt_dtype dtype, int64_t i) {
    if (dtype == GT_BF16) return gt_bf16_to_f32(static_cast<const uint16_t*>(from)[i]);
    if (dtype == GT_F16) return gt_f16_to_f32(static_cast<const uint16_t*>(from)[i]);
    return static_cast<const float*>(from)[i];
}

} /* namespace hy */

#endif
