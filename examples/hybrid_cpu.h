/* The CPU backend exists once per instruction set that the build knows, and with or without a BLAS
 * for its products. hy_backend_cpu takes the best that this processor can run; tests ask for each.
 */
#ifndef HYBRID_CPU_H
#define HYBRID_CPU_H

#include "hybrid_ops.h"

/* What a backend may use, added up. */
enum {
    HY_CPU_AVX2 = 1, /* AVX2 and FMA */
    HY_CPU_BLAS = 2  /* OpenBLAS */
};

/* What this build and this processor have. */
int hy_cpu_features(void);

/* A CPU backend that uses `features` and no others.  Features that are not there:
 * GT_ERROR_UNSUPPORTED. */
gt_status hy_backend_cpu_with(hy_backend **backend, int features);

/* ---- shared by the forms ------------------------------------------------------------------- */

/* GT_ERROR_UNSUPPORTED unless `dtype` is fp32. */
gt_status hy_cpu_check_dtype(const char *op, gt_dtype dtype);

/* Checks the arguments of a product and fills in their defaults. */
gt_status hy_cpu_gemm_defaults(const hy_gemm_args *args, hy_gemm_args *filled);

/* How many of M rows a task of a product computes, at most `most`: enough tasks for several threads
 * even if the product is small, and never a matter of how many threads there are, so that neither
 * are the results. */
int64_t hy_cpu_gemm_rows(int64_t M, int64_t most);

#endif
