/* The variants of the CPU backend.  A build has one variant per instruction set, each with or without a BLAS for
 * matrix products.  hy_backend_cpu takes the fastest variant that this processor can run; tests ask for each
 * variant. */
#ifndef HYBRID_CPU_H
#define HYBRID_CPU_H

#include "hybrid_ops.h"

/* Features that a variant uses, as bits to add up. */
enum {
    HY_CPU_AVX2 = 1, /* AVX2 and FMA */
    HY_CPU_BLAS = 2  /* OpenBLAS */
};

/* The features that this build and this processor have. */
int hy_cpu_features(void);

/* Makes a CPU backend that uses exactly `features`.  Returns GT_ERROR_UNSUPPORTED if one of them is missing. */
gt_status hy_backend_cpu_with(hy_backend **backend, int features);

/* ---- shared by the variants ---------------------------------------------------------------- */

/* Returns GT_ERROR_UNSUPPORTED unless `dtype` is fp32. */
static inline gt_status hy_cpu_check_dtype(const char *op, gt_dtype dtype) {
    if (dtype == GT_DTYPE_DEFAULT || dtype == GT_F32) return GT_OK;
    return hy_fail(GT_ERROR_UNSUPPORTED, "cpu %s: dtype = %d: the CPU backend computes in fp32", op, (int)dtype);
}

/* Checks the arguments of a product and fills in their defaults. */
static inline gt_status hy_cpu_gemm_defaults(const hy_gemm_args *args, hy_gemm_args *filled) {
    hy_gemm_args g = *args;
    gt_status status = hy_cpu_check_dtype("gemm", g.dtype);
    if (status == GT_OK) status = hy_cpu_check_dtype("gemm", g.c_dtype);
    if (!g.lda) g.lda = g.trans_a ? g.M : g.K;
    if (!g.ldb) g.ldb = g.trans_b ? g.K : g.N;
    if (!g.ldc) g.ldc = g.N;
    if (!g.count) g.count = 1;
    *filled = g;
    return status;
}

/* Returns the number of rows of c that one task of a matrix product computes, at most `most`.  Even a small product
 * gets enough tasks for several threads.  The number does not depend on the thread count, so the results do not
 * depend on it either. */
static inline int64_t hy_cpu_gemm_rows(int64_t M, int64_t most) {
    const int64_t quarter = (M / 4 + 15) / 16 * 16;
    return quarter < 32 ? 32 : quarter > most ? most : quarter;
}

#endif
