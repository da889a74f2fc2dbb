/* The CPU backend: calls the CPU twins (reference functions) of gt_kernels.h, and implements the operators of
 * hybrid_ops.h in the order of that header.
 *
 * The rows of an array are divided among the threads.  For a sum over rows, the threads divide the columns instead,
 * or one thread computes the sum.  So every sum has a fixed order, and results do not depend on the number of
 * threads.
 *
 * The build compiles this file once per instruction set, and hybrid_cpu.c chooses one.  The tests also compile this
 * file and the twins with HY_REAL = double.  Every array then holds doubles, and the results serve as the exact
 * reference. */
#include "hybrid_cpu.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tgmath.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#ifndef HY_REAL
#include "hybrid_isa.h"
#include "hybrid_math.h"
#define HY_REAL float
#define HY_REAL_IS_FLOAT
#endif
typedef HY_REAL hy_real;

/* Runs the next loop in parallel; its iterations must be independent.  `work` is the number of inner steps of all
 * iterations.  If there is little work, starting the threads would cost more than they save. */
#ifdef _OPENMP
#define HY_PRAGMA(text) _Pragma(#text)
#define HY_PARALLEL_FOR(work) HY_PRAGMA(omp parallel for if ((work) > 20000))
#else
#define HY_PARALLEL_FOR(work)
#endif

#define CPU_CHECK_DTYPE(op, dtype)                                                                                     \
    do {                                                                                                               \
        gt_status status_ = hy_cpu_check_dtype(op, dtype);                                                             \
        if (status_ != GT_OK) return status_;                                                                          \
    } while (0)

/* ---- elementary functions, so short that compilers vectorise the loops that use them ------- */

static inline hy_real cpu_exp(hy_real x) {
#ifdef HY_REAL_IS_FLOAT
    return hy_exp(x);
#else
    return exp(x);
#endif
}

static inline hy_real cpu_sigmoid(hy_real x) { return 1 / (1 + cpu_exp(-x)); }

static inline hy_real cpu_tanh(hy_real x) {
#ifdef HY_REAL_IS_FLOAT
    /* Near 0 the quotient below would lose digits to cancellation; there the series is exact to the last bit. */
    float s = x * x, e = cpu_exp(2 * x);
    float series = s * (-1.0f / 3 + s * (2.0f / 15 + s * (-17.0f / 315 + s * (62.0f / 2835))));
    float quotient = 1 - 2 / (e + 1);
    return s < 0.0625f ? x + x * series : quotient;
#else
    return tanh(x);
#endif
}

/* GELU(x) = x sigmoid(2 q(x)), q(x) = sqrt(2/pi) (x + 0.044715 x^3).  The clamp keeps x^3 from overflowing.  It
 * changes no result, because for |x| > 16 the sigmoid is 0 or 1 to all digits. */
static inline hy_real cpu_gelu_argument(hy_real x) {
    hy_real c = x > 16 ? 16 : x;
    c = c < -16 ? -16 : c;
    return c * ((hy_real)1.5957691216057308 + (hy_real)0.071354816272600 * c * c);
}
static inline hy_real cpu_gelu(hy_real x) { return (x < -16 ? -16 : x) * cpu_sigmoid(cpu_gelu_argument(x)); }
static inline hy_real cpu_dgelu(hy_real x) {
    hy_real s = cpu_sigmoid(cpu_gelu_argument(x)), c = x > 16 ? 16 : x;
    c = c < -16 ? -16 : c;
    return s + s * (1 - s) * c * ((hy_real)1.5957691216057308 + (hy_real)0.214064448817800 * c * c);
}

/* ---- memory -------------------------------------------------------------------------------- */

static gt_status cpu_alloc(hy_backend *be, void **memory, size_t bytes) {
    (void)be;
    *memory = aligned_alloc(256, (bytes + 255) / 256 * 256);
    return *memory || !bytes ? GT_OK : hy_fail(GT_ERROR_MEMORY, "no memory for %.1f MiB", bytes / 1048576.0);
}

static void cpu_release(hy_backend *be, void *memory) {
    (void)be;
    free(memory);
}

static gt_status cpu_copy(hy_backend *be, void *to, const void *from, size_t bytes) {
    (void)be;
    if (bytes) memcpy(to, from, bytes);
    return GT_OK;
}

static gt_status cpu_zero(hy_backend *be, void *to, size_t bytes) {
    (void)be;
    if (bytes) memset(to, 0, bytes);
    return GT_OK;
}

static gt_status cpu_write(hy_backend *be, void *to, gt_dtype dtype, const double *host, int64_t n) {
    (void)be;
    CPU_CHECK_DTYPE("write", dtype);
    for (int64_t i = 0; i < n; i++) ((hy_real *)to)[i] = (hy_real)host[i];
    return GT_OK;
}

static gt_status cpu_read(hy_backend *be, double *host, const void *from, gt_dtype dtype, int64_t n) {
    (void)be;
    CPU_CHECK_DTYPE("read", dtype);
    for (int64_t i = 0; i < n; i++) host[i] = ((const hy_real *)from)[i];
    return GT_OK;
}

static gt_status cpu_synchronize(hy_backend *be) {
    (void)be;
    return GT_OK;
}

static gt_status cpu_scratch(hy_backend *be, const hy_limits *limits, void *memory, size_t *bytes) {
    (void)be, (void)limits, (void)memory;
    *bytes = 0;
    return GT_OK;
}

static gt_status cpu_run(hy_backend *be, int slot, gt_status (*record)(void *), void *arg) {
    (void)be, (void)slot;
    return record(arg);
}

/* ---- gemm -------------------------------------------------------------------------------------
 * A task computes a block of c, at most GEMM_M x GEMM_N, and walks K in steps of GEMM_K.  It packs its panels of op(a)
 * and op(b), so that the micro-kernel reads both in order.  The micro-kernel keeps GEMM_ROWS x GEMM_COLS partial
 * sums in vector registers. */

#ifdef __AVX512F__
#define GEMM_VECTOR 64 /* bytes of a vector register */
#elif defined __AVX__
#define GEMM_VECTOR 32
#else
#define GEMM_VECTOR 16
#endif
typedef hy_real gemm_vector __attribute__((vector_size(GEMM_VECTOR)));
typedef hy_real gemm_unaligned /* a vector at any element of an array */
    __attribute__((vector_size(GEMM_VECTOR), aligned(sizeof(hy_real)), may_alias));

enum {
    GEMM_ROWS = 4,
    GEMM_VECTORS = 2,
    GEMM_COLS = GEMM_VECTORS * GEMM_VECTOR / (int)sizeof(hy_real),
    GEMM_M = 128,
    GEMM_N = 128,
    GEMM_K = 256
};

static int64_t cpu_min(int64_t a, int64_t b) { return a < b ? a : b; }

/* Computes c = sum over k of panel a [K,GEMM_ROWS] times panel b [K,GEMM_COLS]. */
static void gemm_micro(int64_t K, const hy_real *restrict a, const hy_real *restrict b, hy_real *restrict c) {
    gemm_vector sum[GEMM_ROWS][GEMM_VECTORS] = {{{0}}};
    for (int64_t k = 0; k < K; k++, a += GEMM_ROWS, b += GEMM_COLS) {
        const gemm_unaligned *row = (const gemm_unaligned *)b;
        for (int i = 0; i < GEMM_ROWS; i++)
            for (int j = 0; j < GEMM_VECTORS; j++) sum[i][j] += a[i] * row[j];
    }
    memcpy(c, sum, sizeof sum);
}

/* Packs n lines of length K into panels of `width` lines: to[panel][k][i] = from[line * line_step + k * k_step].  A
 * line is a row of op(a) or a column of op(b).  Zeros fill up the last panel.  The function is inline, so that
 * `width` is a compile-time constant. */
static inline void gemm_pack(hy_real *restrict to, const hy_real *restrict from, int64_t n, int64_t K,
                             int64_t line_step, int64_t k_step, int width) {
    for (int64_t line = 0; line < n; line += width, to += K * width) {
        const hy_real *panel = from + line * line_step;
        if (n - line < width) {
            memset(to, 0, (size_t)(K * width) * sizeof *to);
            for (int64_t k = 0; k < K; k++)
                for (int64_t i = 0; i < n - line; i++) to[k * width + i] = panel[i * line_step + k * k_step];
        } else if (line_step == 1) {
            for (int64_t k = 0; k < K; k++) memcpy(to + k * width, panel + k * k_step, (size_t)width * sizeof *to);
        } else {
            for (int64_t k = 0; k < K; k++)
                for (int i = 0; i < width; i++) to[k * width + i] = panel[i * line_step + k * k_step];
        }
    }
}

/* Computes c = alpha tile + beta c for a tile of the micro-kernel.  With beta = 0 it does not read c. */
static void gemm_store(const hy_real *restrict tile, hy_real *restrict c, int64_t ldc, int64_t rows, int64_t cols,
                       hy_real alpha, hy_real beta) {
    for (int64_t i = 0; i < rows; i++, tile += GEMM_COLS, c += ldc)
        if (beta == 0)
            for (int64_t j = 0; j < cols; j++) c[j] = alpha * tile[j];
        else
            for (int64_t j = 0; j < cols; j++) c[j] = alpha * tile[j] + beta * c[j];
}

/* Computes the m x n block of c at row m0 and column n0 of one product.  g has all defaults set. */
static void gemm_block(const hy_gemm_args *g, const hy_real *a, const hy_real *b, hy_real *c, int64_t m0, int64_t m,
                       int64_t n0, int64_t n) {
    hy_real packed_a[GEMM_M * GEMM_K], packed_b[GEMM_N * GEMM_K], tile[GEMM_ROWS * GEMM_COLS];
    int64_t a_line = g->trans_a ? 1 : g->lda, a_k = g->trans_a ? g->lda : 1;
    int64_t b_line = g->trans_b ? g->ldb : 1, b_k = g->trans_b ? 1 : g->ldb;
    hy_real beta = g->beta;
    for (int64_t k0 = 0; k0 == 0 || k0 < g->K; k0 += GEMM_K, beta = 1) {
        int64_t K = cpu_min(GEMM_K, g->K - k0);
        if (K > 0) {
            gemm_pack(packed_a, a + m0 * a_line + k0 * a_k, m, K, a_line, a_k, GEMM_ROWS);
            gemm_pack(packed_b, b + n0 * b_line + k0 * b_k, n, K, b_line, b_k, GEMM_COLS);
        }
        for (int64_t j = 0; j < n; j += GEMM_COLS)
            for (int64_t i = 0; i < m; i += GEMM_ROWS) {
                gemm_micro(K, packed_a + i * K, packed_b + j * K, tile);
                gemm_store(tile, c + (m0 + i) * g->ldc + n0 + j, g->ldc, cpu_min(GEMM_ROWS, m - i),
                           cpu_min(GEMM_COLS, n - j), g->alpha, beta);
            }
    }
}

static gt_status cpu_gemm(hy_backend *be, const hy_gemm_args *args) {
    hy_gemm_args g;
    gt_status status = hy_cpu_gemm_defaults(args, &g);
    (void)be;
    if (status != GT_OK) return status;
    int64_t m = hy_cpu_gemm_rows(g.M, GEMM_M);
    int64_t rows = (g.M + m - 1) / m, cols = (g.N + GEMM_N - 1) / GEMM_N;
    HY_PARALLEL_FOR(g.count * g.M * g.N * g.K)
    for (int64_t task = 0; task < g.count * rows * cols; task++) {
        int64_t product = task / (rows * cols);
        int64_t m0 = task / cols % rows * m, n0 = task % cols * GEMM_N;
        gemm_block(&g, (const hy_real *)g.a + product * g.a_step, (const hy_real *)g.b + product * g.b_step,
                   (hy_real *)g.c + product * g.c_step, m0, cpu_min(m, g.M - m0), n0, cpu_min(GEMM_N, g.N - n0));
    }
    return GT_OK;
}

/* ---- the operators of gt_kernels.h ------------------------------------------------------------
 * The backend calls the twins, which need no workspace.  The exceptions are forward and backward of rmsnorm_linear,
 * which use the backend's faster matrix product. */

#define CPU_TWIN(name, op)                                                                                             \
    gt_status HY_TWIN(name)(const gt_##op##_args *);                                                                   \
    static gt_status cpu_##name(hy_backend *be, const gt_##op##_args *a) {                                             \
        gt_status status = HY_TWIN(name)(a);                                                                           \
        (void)be;                                                                                                      \
        return status == GT_OK ? GT_OK : hy_fail(status, "%s", gt_last_error());                                       \
    }
#define CPU_NO_WORKSPACE(op)                                                                                           \
    static gt_status cpu_##op##_workspace(hy_backend *be, const gt_##op##_args *a, gt_workspace *need) {               \
        (void)be, (void)a;                                                                                             \
        memset(need, 0, sizeof *need);                                                                                 \
        return GT_OK;                                                                                                  \
    }
#define CPU_ROWS(op) CPU_NO_WORKSPACE(op) CPU_TWIN(op##_forward, op) CPU_TWIN(op##_backward, op)
#define CPU_STEPS(op) CPU_ROWS(op) CPU_TWIN(op##_step, op)
#define CPU_PRODUCT(op) CPU_TWIN(op##_step, op) /* the other functions of this operator stand below */
HY_OPERATORS(CPU_STEPS, CPU_ROWS, CPU_PRODUCT)

/* Computes the workspace of rmsnorm_linear: it holds the normalised rows, and in backward also their gradient. */
static gt_status cpu_rmsnorm_linear_workspace(hy_backend *be, const gt_rmsnorm_linear_args *a, gt_workspace *need) {
    (void)be;
    memset(need, 0, sizeof *need);
    need->forward = (size_t)(a->M * a->D) * sizeof(hy_real);
    need->backward = 2 * need->forward;
    return GT_OK;
}

static gt_status cpu_check_rmsnorm_linear(const gt_rmsnorm_linear_args *a, size_t need) {
    CPU_CHECK_DTYPE("rmsnorm_linear", a->dtype);
    if (a->bias || a->dbias) return hy_fail(GT_ERROR_UNSUPPORTED, "cpu rmsnorm_linear: bias must be NULL");
    if (a->workspace_bytes < need)
        return hy_fail(GT_ERROR_WORKSPACE, "cpu rmsnorm_linear: workspace_bytes = %zu: must be at least %zu",
                       a->workspace_bytes, need);
    return GT_OK;
}

/* Makes the arguments of rmsnorm_linear's norm, whose output lies in the workspace. */
static gt_norm_gate_args cpu_norm_of(const gt_rmsnorm_linear_args *a) {
    return (gt_norm_gate_args){.M = a->M,
                               .D = a->D,
                               .norm = a->norm,
                               .eps = a->eps,
                               .accumulate = a->accumulate,
                               .x = a->x,
                               .gamma = a->gamma,
                               .beta = a->beta,
                               .y = a->workspace,
                               .x_stride = a->x_stride};
}

static gt_status cpu_rmsnorm_linear_forward(hy_backend *be, const gt_rmsnorm_linear_args *a) {
    gt_norm_gate_args norm = cpu_norm_of(a);
    hy_gemm_args project = {.M = a->M,
                            .N = a->O,
                            .K = a->D,
                            .trans_b = 1,
                            .alpha = 1,
                            .a = norm.y,
                            .b = a->weight,
                            .c = a->y,
                            .ldc = a->y_stride};
    gt_workspace need;
    gt_status status;
    cpu_rmsnorm_linear_workspace(be, a, &need);
    if ((status = cpu_check_rmsnorm_linear(a, need.forward)) != GT_OK ||
        (status = cpu_norm_gate_forward(be, &norm)) != GT_OK)
        return status;
    return be->gemm(be, &project);
}

static gt_status cpu_rmsnorm_linear_backward(hy_backend *be, const gt_rmsnorm_linear_args *a) {
    gt_norm_gate_args norm = cpu_norm_of(a);
    hy_real *n = (hy_real *)a->workspace, *dn = n + a->M * a->D;
    hy_gemm_args weight = {.M = a->O,
                           .N = a->D,
                           .K = a->M,
                           .trans_a = 1,
                           .alpha = 1,
                           .beta = (float)a->accumulate,
                           .a = a->dy,
                           .b = n,
                           .c = a->dweight,
                           .lda = a->dy_stride};
    hy_gemm_args rows = {
        .M = a->M, .N = a->D, .K = a->O, .alpha = 1, .a = a->dy, .b = a->weight, .c = dn, .lda = a->dy_stride};
    gt_workspace need;
    gt_status status;
    cpu_rmsnorm_linear_workspace(be, a, &need);
    if ((status = cpu_check_rmsnorm_linear(a, need.backward)) != GT_OK) return status;
    if (a->dweight &&
        ((status = cpu_norm_gate_forward(be, &norm)) != GT_OK || (status = be->gemm(be, &weight)) != GT_OK))
        return status;
    if ((status = be->gemm(be, &rows)) != GT_OK) return status;
    norm.dy = dn;
    norm.dx = a->dx;
    norm.dx_stride = a->dx_stride;
    norm.dgamma = a->dgamma;
    norm.dbeta = a->dbeta;
    return cpu_norm_gate_backward(be, &norm);
}

/* ---- embedding ----------------------------------------------------------------------------- */

static gt_status cpu_embedding_forward(hy_backend *be, const hy_embedding_args *a) {
    const hy_real *table = a->table;
    hy_real *y = a->y;
    (void)be;
    CPU_CHECK_DTYPE("embedding", a->dtype);
    for (int64_t m = 0; m < a->M; m++) memcpy(y + m * a->D, table + a->token[m] * a->D, (size_t)a->D * sizeof *y);
    return GT_OK;
}

static gt_status cpu_embedding_backward(hy_backend *be, const hy_embedding_args *a) {
    const hy_real *dy = a->dy;
    hy_real *dtable = (hy_real *)a->dtable;
    (void)be;
    CPU_CHECK_DTYPE("embedding", a->dtype);
    if (!a->accumulate) memset(dtable, 0, (size_t)(a->V * a->D) * sizeof *dtable);
    for (int64_t m = 0; m < a->M; m++)
        for (int64_t d = 0; d < a->D; d++) dtable[a->token[m] * a->D + d] += dy[m * a->D + d];
    return GT_OK;
}

/* ---- lerp ---------------------------------------------------------------------------------- */

enum { CPU_BLOCK = 16 }; /* columns per task of a sum over rows */

/* Returns x of the token before row `row`; NULL means zeros. */
static const hy_real *lerp_before(const hy_lerp_args *a, int64_t row) {
    const hy_real *state = (const hy_real *)a->state_in;
    if (row % a->T) return (const hy_real *)a->x + (row - 1) * a->D;
    return state ? state + row / a->T * a->D : NULL;
}

static gt_status cpu_lerp_forward(hy_backend *be, const hy_lerp_args *a) {
    int64_t M = a->B * a->T, D = a->D;
    const hy_real *m = a->m, *mu = (const hy_real *)a->mu;
    hy_real *y = a->y;
    (void)be;
    CPU_CHECK_DTYPE("lerp", a->dtype);
    HY_PARALLEL_FOR(M * D * a->count)
    for (int64_t row = 0; row < M; row++) {
        const hy_real *x = (const hy_real *)a->x + row * D, *before = lerp_before(a, row);
        for (int64_t i = 0; i < a->count; i++)
            for (int64_t d = 0; d < D; d++) {
                int64_t at = (i * M + row) * D + d;
                hy_real e = (before ? before[d] : 0) - x[d];
                y[at] = x[d] + e * (mu[i * D + d] + (m ? m[at] : 0));
            }
    }
    for (int64_t b = 0; a->state_out && a->T > 0 && b < a->B; b++)
        memcpy((hy_real *)a->state_out + b * D, (const hy_real *)a->x + ((b + 1) * a->T - 1) * D,
               (size_t)D * sizeof *y);
    return GT_OK;
}

/* Runs backward of channels d0 ... d1 - 1 in one row, which belongs to token t of its sequence.  On entry next[d] is
 * the contribution of token t+1 to dx_t.  On return it is the contribution of token t to dx_{t-1}. */
static void lerp_row_backward(const hy_lerp_args *a, int64_t row, int64_t d0, int64_t d1, hy_real *next) {
    int64_t M = a->B * a->T, D = a->D;
    const hy_real *x = (const hy_real *)a->x + row * D, *before = lerp_before(a, row);
    const hy_real *m = a->m, *mu = (const hy_real *)a->mu, *dy = a->dy;
    hy_real *dx = a->dx, *dm = a->dm, *dmu = (hy_real *)a->dmu, own[CPU_BLOCK], earlier[CPU_BLOCK] = {0};
    for (int64_t d = d0; d < d1; d++) own[d - d0] = next[d - d0] + (dx && a->accumulate_dx ? dx[row * D + d] : 0);
    for (int64_t i = 0; i < a->count; i++)
        for (int64_t d = d0; d < d1; d++) {
            int64_t at = (i * M + row) * D + d;
            hy_real e = (before ? before[d] : 0) - x[d];
            hy_real weight = mu[i * D + d] + (m ? m[at] : 0);
            own[d - d0] += dy[at] * (1 - weight);
            earlier[d - d0] += dy[at] * weight;
            if (dm) dm[at] = dy[at] * e;
            if (dmu) dmu[i * D + d] += dy[at] * e;
        }
    for (int64_t d = d0; d < d1; d++) {
        if (dx) dx[row * D + d] = own[d - d0];
        next[d - d0] = earlier[d - d0];
    }
}

static gt_status cpu_lerp_backward(hy_backend *be, const hy_lerp_args *a) {
    (void)be;
    CPU_CHECK_DTYPE("lerp", a->dtype);
    if (a->dmu && !a->accumulate) memset(a->dmu, 0, (size_t)(a->count * a->D) * sizeof(hy_real));
    HY_PARALLEL_FOR(a->B * a->T * a->D * a->count)
    for (int64_t d0 = 0; d0 < a->D; d0 += CPU_BLOCK)
        for (int64_t b = 0; b < a->B; b++) {
            hy_real next[CPU_BLOCK] = {0};
            for (int64_t row = (b + 1) * a->T - 1; row >= b * a->T; row--)
                lerp_row_backward(a, row, d0, cpu_min(d0 + CPU_BLOCK, a->D), next);
        }
    return GT_OK;
}

/* ---- map ----------------------------------------------------------------------------------- */

static gt_status cpu_check_function(hy_function function) {
    if (function == HY_TANH || function == HY_GELU || function == HY_NEG_EXP) return GT_OK;
    return hy_fail(GT_ERROR_VALUE, "cpu map: function = %d: must be 0 to 2", (int)function);
}

/* Computes elements first ... last - 1. */
static void map_forward_part(const hy_map_args *a, int64_t first, int64_t last) {
    const hy_real *x = a->x;
    hy_real *y = a->y;
    switch (a->function) {
    case HY_TANH:
        for (int64_t i = first; i < last; i++) y[i] = cpu_tanh(x[i]);
        break;
    case HY_GELU:
        for (int64_t i = first; i < last; i++) y[i] = cpu_gelu(x[i]);
        break;
    case HY_NEG_EXP:
        for (int64_t i = first; i < last; i++) y[i] = -cpu_exp(x[i]);
        break;
    }
}

static void map_backward_part(const hy_map_args *a, int64_t first, int64_t last) {
    const hy_real *x = a->x, *y = a->y, *dy = a->dy;
    hy_real *dx = a->dx;
    for (int64_t i = first; i < last; i++) {
        hy_real before = a->accumulate ? dx[i] : 0;
        switch (a->function) {
        case HY_TANH: dx[i] = before + dy[i] * (1 - y[i] * y[i]); break;
        case HY_GELU: dx[i] = before + dy[i] * cpu_dgelu(x[i]); break;
        case HY_NEG_EXP: dx[i] = before + dy[i] * y[i]; break;
        }
    }
}

enum { CPU_PART = 4096 }; /* elements per task */

static gt_status cpu_map_forward(hy_backend *be, const hy_map_args *a) {
    gt_status status = cpu_check_function(a->function);
    (void)be;
    CPU_CHECK_DTYPE("map", a->dtype);
    HY_PARALLEL_FOR(a->n)
    for (int64_t i = 0; i < a->n; i += CPU_PART)
        if (status == GT_OK) map_forward_part(a, i, cpu_min(i + CPU_PART, a->n));
    return status;
}

static gt_status cpu_map_backward(hy_backend *be, const hy_map_args *a) {
    gt_status status = cpu_check_function(a->function);
    (void)be;
    CPU_CHECK_DTYPE("map", a->dtype);
    HY_PARALLEL_FOR(a->n)
    for (int64_t i = 0; i < a->n; i += CPU_PART)
        if (status == GT_OK) map_backward_part(a, i, cpu_min(i + CPU_PART, a->n));
    return status;
}

/* ---- bias ---------------------------------------------------------------------------------- */

static gt_status cpu_bias_forward(hy_backend *be, const hy_bias_args *a) {
    const hy_real *bias = (const hy_real *)a->bias;
    hy_real *y = a->y;
    (void)be;
    CPU_CHECK_DTYPE("bias", a->dtype);
    for (int64_t m = 0; m < a->M; m++)
        for (int64_t d = 0; d < a->D; d++) y[m * a->D + d] += bias[d];
    return GT_OK;
}

static gt_status cpu_bias_backward(hy_backend *be, const hy_bias_args *a) {
    const hy_real *dy = a->dy;
    hy_real *dbias = (hy_real *)a->dbias;
    (void)be;
    CPU_CHECK_DTYPE("bias", a->dtype);
    if (!a->accumulate) memset(dbias, 0, (size_t)a->D * sizeof *dbias);
    for (int64_t m = 0; m < a->M; m++)
        for (int64_t d = 0; d < a->D; d++) dbias[d] += dy[m * a->D + d];
    return GT_OK;
}

/* ---- gate_mix ------------------------------------------------------------------------------ */

static hy_real cpu_dot(int64_t n, const hy_real *x, const hy_real *y) {
    hy_real sum = 0;
    for (int64_t i = 0; i < n; i++) sum += x[i] * y[i];
    return sum;
}

static gt_status cpu_gate_mix_forward(hy_backend *be, const hy_gate_mix_args *a) {
    int64_t D = a->D;
    const hy_real *weight = (const hy_real *)a->weight, *residual = a->residual;
    hy_real bias = ((const hy_real *)a->bias)[0];
    (void)be;
    CPU_CHECK_DTYPE("gate_mix", a->dtype);
    HY_PARALLEL_FOR(a->M * D)
    for (int64_t m = 0; m < a->M; m++) {
        const hy_real *xa = (const hy_real *)a->a + m * D, *xb = (const hy_real *)a->b + m * D;
        hy_real *y = (hy_real *)a->y + m * D, g = bias;
        if (weight) g = cpu_sigmoid(cpu_dot(D, weight, xa) + cpu_dot(D, weight + D, xb) + bias);
        for (int64_t d = 0; d < D; d++) y[d] = (residual ? residual[m * D + d] : 0) + g * xa[d] + (1 - g) * xb[d];
        ((hy_real *)a->gate)[m] = g;
    }
    return GT_OK;
}

/* Computes da and db of one row, and sets gate[m] to q. */
static void gate_mix_row_backward(const hy_gate_mix_args *a, int64_t m) {
    int64_t D = a->D;
    const hy_real *weight = (const hy_real *)a->weight, *dy = (const hy_real *)a->dy + m * D;
    const hy_real *xa = (const hy_real *)a->a + m * D, *xb = (const hy_real *)a->b + m * D;
    hy_real *da = a->da, *db = a->db, *gate = (hy_real *)a->gate, g = gate[m];
    hy_real q = (cpu_dot(D, dy, xa) - cpu_dot(D, dy, xb)) * (weight ? g * (1 - g) : 1);
    for (int64_t d = 0; da && d < D; d++) da[m * D + d] = g * dy[d] + (weight ? q * weight[d] : 0);
    for (int64_t d = 0; db && d < D; d++) db[m * D + d] = (1 - g) * dy[d] + (weight ? q * weight[D + d] : 0);
    gate[m] = q;
}

static gt_status cpu_gate_mix_backward(hy_backend *be, const hy_gate_mix_args *a) {
    int64_t D = a->D;
    const hy_real *xa = a->a, *xb = a->b, *q = (const hy_real *)a->gate;
    hy_real *dweight = (hy_real *)a->dweight, *dbias = (hy_real *)a->dbias;
    (void)be;
    CPU_CHECK_DTYPE("gate_mix", a->dtype);
    HY_PARALLEL_FOR(a->M * D)
    for (int64_t m = 0; m < a->M; m++) gate_mix_row_backward(a, m);
    if (dweight && !a->accumulate) memset(dweight, 0, (size_t)(2 * D) * sizeof *dweight);
    if (dbias && !a->accumulate) dbias[0] = 0;
    for (int64_t m = 0; m < a->M; m++) {
        if (dbias) dbias[0] += q[m];
        for (int64_t d = 0; dweight && d < D; d++) {
            dweight[d] += q[m] * xa[m * D + d];
            dweight[D + d] += q[m] * xb[m * D + d];
        }
    }
    return GT_OK;
}

/* ---- cross_entropy ------------------------------------------------------------------------- */

static void cross_entropy_row(const hy_cross_entropy_args *a, int64_t m) {
    const hy_real *z = (const hy_real *)a->logits + m * a->V;
    hy_real largest = z[0], sum = 0, weighted = 0, lse;
    for (int64_t v = 1; v < a->V; v++) largest = z[v] > largest ? z[v] : largest;
    for (int64_t v = 0; v < a->V; v++) {
        hy_real d = z[v] - largest, p;
        d = d < -87 ? -87 : d; /* exp(-87) adds nothing to 1, and an infinite d would give NaN */
        p = cpu_exp(d);
        sum += p;
        weighted += p * d;
    }
    lse = largest + log(sum);
    ((hy_real *)a->lse)[m] = lse;
    ((hy_real *)a->loss)[m] = a->target[m] < 0 ? 0 : lse - z[a->target[m]];
    ((hy_real *)a->entropy)[m] = a->target[m] < 0 ? 0 : log(sum) - weighted / sum;
}

static gt_status cpu_cross_entropy_forward(hy_backend *be, const hy_cross_entropy_args *a) {
    double loss = 0, entropy = 0;
    int64_t counted = 0;
    hy_real *total = (hy_real *)a->total;
    (void)be;
    CPU_CHECK_DTYPE("cross_entropy", a->dtype);
    HY_PARALLEL_FOR(a->M * a->V)
    for (int64_t m = 0; m < a->M; m++) cross_entropy_row(a, m);
    for (int64_t m = 0; m < a->M; m++) {
        loss += ((const hy_real *)a->loss)[m];
        entropy += ((const hy_real *)a->entropy)[m];
        counted += a->target[m] >= 0;
    }
    total[0] = (hy_real)loss;
    total[1] = (hy_real)counted;
    total[2] = (hy_real)entropy;
    return GT_OK;
}

static gt_status cpu_cross_entropy_backward(hy_backend *be, const hy_cross_entropy_args *a) {
    hy_real counted = ((const hy_real *)a->total)[1];
    hy_real scale = (a->scale ? ((const hy_real *)a->scale)[0] : 1) / (counted > 1 ? counted : 1);
    (void)be;
    CPU_CHECK_DTYPE("cross_entropy", a->dtype);
    HY_PARALLEL_FOR(a->M * a->V)
    for (int64_t m = 0; m < a->M; m++) {
        hy_real *z = (hy_real *)a->logits + m * a->V, lse = ((const hy_real *)a->lse)[m];
        hy_real row_scale = a->target[m] < 0 ? 0 : scale;
        for (int64_t v = 0; v < a->V; v++) z[v] = cpu_exp(z[v] - lse) * row_scale;
        if (a->target[m] >= 0) z[a->target[m]] -= scale;
    }
    return GT_OK;
}

/* ---- gradient norm and AdamW --------------------------------------------------------------- */

static gt_status cpu_grad_norm(hy_backend *be, const hy_grad_norm_args *a) {
    const hy_segments *s = &a->segments;
    const hy_real *grad = (const hy_real *)a->grad;
    double scale = ((const hy_real *)a->control)[HY_LOSS_SCALE], sum[HY_GROUPS] = {0}, all = 0;
    (void)be;
    HY_PARALLEL_FOR(s->count ? s->start[s->count] : 0)
    for (int64_t i = 0; i < s->count; i++) {
        a->partial[i] = 0;
        for (int64_t j = s->start[i]; j < s->start[i + 1]; j++) a->partial[i] += (double)grad[j] * grad[j];
    }
    for (int64_t i = 0; i < s->count; i++) sum[s->group[i]] += a->partial[i];
    for (int g = 0; g < HY_GROUPS; g++) {
        ((hy_real *)a->norm)[g] = (hy_real)(sqrt(sum[g]) / scale);
        all += sum[g];
    }
    ((hy_real *)a->norm)[HY_GROUPS] = (hy_real)(sqrt(all) / scale);
    return GT_OK;
}

/* Updates elements first ... last - 1, which belong to one segment. */
static void adamw_part(const hy_adamw_args *a, hy_real scale, hy_real shrink, int64_t first, int64_t last) {
    const hy_real *control = (const hy_real *)a->control, *grad = (const hy_real *)a->grad;
    hy_real *w = (hy_real *)a->w, *m = (hy_real *)a->m, *v = (hy_real *)a->v;
    hy_real lr = control[HY_LR], c1 = control[HY_CORRECTION1], c2 = control[HY_CORRECTION2];
    hy_real beta1 = control[HY_BETA1], beta2 = control[HY_BETA2], eps = control[HY_EPS];
    for (int64_t i = first; i < last; i++) {
        hy_real g = grad[i] * scale;
        m[i] = beta1 * m[i] + (1 - beta1) * g;
        v[i] = beta2 * v[i] + (1 - beta2) * g * g;
        w[i] -= lr * (m[i] * c1 / (sqrt(v[i] * c2) + eps)) + shrink * w[i];
    }
}

static gt_status cpu_adamw(hy_backend *be, const hy_adamw_args *a) {
    const hy_segments *s = &a->segments;
    const hy_real *control = (const hy_real *)a->control;
    hy_real norm = ((const hy_real *)a->norm)[HY_GROUPS], max_norm = control[HY_MAX_NORM];
    hy_real scale = 1 / control[HY_LOSS_SCALE];
    (void)be;
    if (a->copy) return hy_fail(GT_ERROR_UNSUPPORTED, "cpu adamw: copy must be NULL in fp32");
    if (!isfinite(norm)) return GT_OK;
    if (max_norm > 0 && norm > max_norm) scale *= max_norm / norm;
    HY_PARALLEL_FOR(s->count ? s->start[s->count] : 0)
    for (int64_t i = 0; i < s->count; i++)
        adamw_part(a, scale, control[HY_LR] * control[HY_WEIGHT_DECAY] * ((const hy_real *)s->decay)[i], s->start[i],
                   s->start[i + 1]);
    return GT_OK;
}

/* ---- small helpers ------------------------------------------------------------------------- */

static gt_status cpu_add(hy_backend *be, const hy_add_args *a) {
    const hy_real *x = a->x;
    hy_real *y = a->y;
    (void)be;
    CPU_CHECK_DTYPE("add", a->dtype);
    for (int64_t i = 0; i < a->n; i++) y[i] += x[i];
    return GT_OK;
}

static gt_status cpu_cast(hy_backend *be, const hy_cast_args *a) {
    CPU_CHECK_DTYPE("cast", a->from_dtype);
    CPU_CHECK_DTYPE("cast", a->to_dtype);
    return cpu_copy(be, a->to, a->from, (size_t)a->n * sizeof(hy_real));
}

static gt_status cpu_carry(hy_backend *be, const hy_carry_args *a) {
    size_t bytes = (size_t)a->n * sizeof(hy_real);
    (void)be;
    for (int64_t row = 0; row < a->count * a->B; row++) {
        hy_real *to = (hy_real *)a->to + row * a->n;
        if (a->keep[row % a->B])
            memcpy(to, (const hy_real *)a->from + row * a->n, bytes);
        else
            memset(to, 0, bytes);
    }
    return GT_OK;
}

static gt_status cpu_dropout(hy_backend *be, const hy_dropout_args *a) {
    const hy_real *control = (const hy_real *)a->control, kept = 1 / (1 - (hy_real)a->rate);
    const uint32_t low = (uint32_t)control[HY_DROP_LOW], high = (uint32_t)control[HY_DROP_HIGH];
    const uint32_t limit = (uint32_t)((double)a->rate * 4294967296.0);
    const int64_t start = (int64_t)control[HY_DROP_WINDOW] * a->window;
    hy_real *x = a->x;
    (void)be;
    CPU_CHECK_DTYPE("dropout", a->dtype);
    HY_PARALLEL_FOR(a->n)
    for (int64_t i = 0; i < a->n; i++)
        x[i] = hy_stays(low, high, (uint32_t)a->site, start + i, limit) ? x[i] * kept : 0;
    return GT_OK;
}

static gt_status cpu_average(hy_backend *be, const hy_average_args *a) {
    hy_real *w = (hy_real *)a->w, *average = (hy_real *)a->average, decay = (hy_real)a->decay;
    (void)be;
    HY_PARALLEL_FOR(a->n)
    for (int64_t i = 0; i < a->n; i++) {
        const hy_real other = average[i];
        average[i] = decay < 0 ? w[i] : decay * other + (1 - decay) * w[i];
        if (decay < 0) w[i] = other;
    }
    return GT_OK;
}

/* ---- the table ----------------------------------------------------------------------------- */

static void cpu_close(hy_backend *be) { free(be); }

static const hy_backend cpu_table = {
    .name = "cpu",
    .dtype = GT_F32,
    .fp32_bytes = sizeof(hy_real),
    .close = cpu_close,
    .alloc = cpu_alloc,
    .release = cpu_release,
    .upload = cpu_copy,
    .download = cpu_copy,
    .write = cpu_write,
    .read = cpu_read,
    .copy = cpu_copy,
    .zero = cpu_zero,
    .synchronize = cpu_synchronize,
    .scratch = cpu_scratch,
    .run = cpu_run,
    .gemm = cpu_gemm,
    .embedding_forward = cpu_embedding_forward,
    .embedding_backward = cpu_embedding_backward,
    .lerp_forward = cpu_lerp_forward,
    .lerp_backward = cpu_lerp_backward,
    .map_forward = cpu_map_forward,
    .map_backward = cpu_map_backward,
    .bias_forward = cpu_bias_forward,
    .bias_backward = cpu_bias_backward,
    .gate_mix_forward = cpu_gate_mix_forward,
    .gate_mix_backward = cpu_gate_mix_backward,
    .cross_entropy_forward = cpu_cross_entropy_forward,
    .cross_entropy_backward = cpu_cross_entropy_backward,
    .grad_norm = cpu_grad_norm,
    .adamw = cpu_adamw,
    .add = cpu_add,
    .cast = cpu_cast,
    .carry = cpu_carry,
    .dropout = cpu_dropout,
    .average = cpu_average,
};

gt_status HY_BACKEND_CPU(hy_backend **backend) {
    *backend = malloc(sizeof **backend);
    if (!*backend) return hy_fail(GT_ERROR_MEMORY, "no memory for a backend");
    **backend = cpu_table;
#define CPU_SET(op, function) (*backend)->op##_##function = cpu_##op##_##function;
#define CPU_SET_ROWS(op) CPU_SET(op, workspace) CPU_SET(op, forward) CPU_SET(op, backward)
#define CPU_SET_STEPS(op) CPU_SET_ROWS(op) CPU_SET(op, step)
    HY_OPERATORS(CPU_SET_STEPS, CPU_SET_ROWS, CPU_SET_STEPS)
#ifdef _OPENMP
    snprintf((*backend)->device, sizeof cpu_table.device, "CPU, %d threads", omp_get_max_threads());
#else
    snprintf((*backend)->device, sizeof cpu_table.device, "CPU, 1 thread (built without OpenMP)");
#endif
    return GT_OK;
}
