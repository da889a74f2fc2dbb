/* Computes matrix products c with OpenBLAS.
 *
 * OpenMP distributes the blocks of c over the threads, and OpenBLAS computes each block with one thread.  The sizes
 * of the blocks do not depend on the number of threads, so the results do not depend on it either.
 *
 * A row of c must not depend on the number of windows.  Otherwise a rank with some windows would compute other bits
 * than one process with all windows.  OpenBLAS changes its order of addition with the size of a block and with a
 * row's place in the block.  So no block crosses the border of a window. */
#include "hybrid_cpu.h"
#include <cblas.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

enum { BLAS_M = 64, BLAS_N = 1024 }; /* rows and columns of the largest block */

const char *hy_blas_open(void) {
    static char name[48];
    const char *config = openblas_get_config(); /* "OpenBLAS 0.3.21 ..." */
    size_t length = strcspn(config, " ");
    if (config[length]) length += 1 + strcspn(config + length + 1, " ");
    openblas_set_num_threads(1);
    snprintf(name, sizeof name, "%.*s", (int)length, config);
    return name;
}

/* Converts a size to int, the type of sizes in BLAS.  BLAS demands a leading dimension of at least 1, even for an
 * empty matrix. */
static gt_status blas_int(const char *name, int64_t value, int *to) {
    if (value > INT_MAX)
        return hy_fail(GT_ERROR_UNSUPPORTED, "cpu gemm: %s = %lld: OpenBLAS takes at most %d", name, (long long)value,
                       INT_MAX);
    *to = value < 1 ? 1 : (int)value;
    return GT_OK;
}

gt_status hy_blas_gemm(hy_backend *be, const hy_gemm_args *args) {
    hy_gemm_args g;
    int K, lda, ldb, ldc;
    gt_status status = hy_cpu_gemm_defaults(args, &g);
    if (status == GT_OK) status = blas_int("K", g.K, &K);
    if (status == GT_OK) status = blas_int("lda", g.lda, &lda);
    if (status == GT_OK) status = blas_int("ldb", g.ldb, &ldb);
    if (status == GT_OK) status = blas_int("ldc", g.ldc, &ldc);
    if (status != GT_OK) return status;
    if (g.K == 0) K = 0;
    const int64_t window = be->window && !g.trans_a && g.M % be->window == 0 ? be->window : g.M;
    const int64_t m = BLAS_M, n = BLAS_N, blocks = (window + m - 1) / m; /* number of blocks in a window */
    int64_t rows = window ? g.M / window * blocks : 0, cols = (g.N + n - 1) / n, tasks = g.count * rows * cols;
#ifdef _OPENMP
#pragma omp parallel for if (g.count * g.M * g.N * g.K > 20000)
#endif
    for (int64_t task = 0; task < tasks; task++) {
        int64_t product = task / (rows * cols), row = task / cols % rows, n0 = task % cols * n;
        const int64_t first = row % blocks * m, m0 = row / blocks * window + first;
        const float *a = (const float *)g.a + product * g.a_step + m0 * (g.trans_a ? 1 : g.lda);
        const float *b = (const float *)g.b + product * g.b_step + n0 * (g.trans_b ? g.ldb : 1);
        float *c = (float *)g.c + product * g.c_step + m0 * g.ldc + n0;
        cblas_sgemm(CblasRowMajor, g.trans_a ? CblasTrans : CblasNoTrans, g.trans_b ? CblasTrans : CblasNoTrans,
                    (int)(m < window - first ? m : window - first), (int)(n < g.N - n0 ? n : g.N - n0), K, g.alpha, a,
                    lda, b, ldb, g.beta, c, ldc);
    }
    return GT_OK;
}
