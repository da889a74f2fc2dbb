/* Opens the CPU backend, hybrid_ops.c, in the best form that the build and the processor have; and
 * keeps the last error. */
#include "hybrid_cpu.h"
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* ---- errors -------------------------------------------------------------------------------- */

static _Thread_local char hy_error_text[640];

gt_status hy_fail(gt_status status, const char *format, ...) {
    char text[sizeof hy_error_text]; /* an argument may be the last error itself */
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    memcpy(hy_error_text, text, sizeof text);
    return status;
}

const char *hy_last_error(void) { return hy_error_text; }

gt_status hy_cpu_check_dtype(const char *op, gt_dtype dtype) {
    if (dtype == GT_DTYPE_DEFAULT || dtype == GT_F32) return GT_OK;
    return hy_fail(GT_ERROR_UNSUPPORTED, "cpu %s: dtype = %d: the CPU backend computes in fp32", op, (int)dtype);
}

/* ---- products ------------------------------------------------------------------------------ */

gt_status hy_cpu_gemm_defaults(const hy_gemm_args *args, hy_gemm_args *filled) {
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

int64_t hy_cpu_gemm_rows(int64_t M, int64_t most) {
    int64_t quarter = (M / 4 + 15) / 16 * 16;
    return quarter < 32 ? 32 : quarter > most ? most : quarter;
}

/* ---- the forms of the backend -------------------------------------------------------------- */

/* hybrid_ops.c, compiled for any processor of this kind, and for those with AVX2. */
gt_status hy_backend_cpu_base(hy_backend **backend);
gt_status hy_backend_cpu_avx2(hy_backend **backend);

/* hybrid_blas.c */
gt_status hy_blas_gemm(hy_backend *be, const hy_gemm_args *args);
const char *hy_blas_open(void);

int hy_cpu_features(void) {
    int features = 0;
#ifdef HY_AVX2
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) features |= HY_CPU_AVX2;
#endif
#ifdef HY_BLAS
    features |= HY_CPU_BLAS;
#endif
    return features;
}

static void add_to_name(hy_backend *be, const char *what) {
    size_t used = strlen(be->device);
    snprintf(be->device + used, sizeof be->device - used, ", %s", what);
}

gt_status hy_backend_cpu_with(hy_backend **backend, int features) {
    int missing = features & ~hy_cpu_features();
    gt_status status;
    if (missing)
        return hy_fail(GT_ERROR_UNSUPPORTED, "cpu: %s: not in this build, or not on this processor",
                       missing & HY_CPU_AVX2 ? "AVX2" : "BLAS");
#ifdef HY_AVX2
    status = features & HY_CPU_AVX2 ? hy_backend_cpu_avx2(backend) : hy_backend_cpu_base(backend);
#else
    status = hy_backend_cpu_base(backend);
#endif
    if (status != GT_OK) return status;
    if (features & HY_CPU_AVX2) add_to_name(*backend, "AVX2");
#ifdef HY_BLAS
    if (features & HY_CPU_BLAS) {
        add_to_name(*backend, hy_blas_open());
        (*backend)->gemm = hy_blas_gemm;
    }
#endif
    return GT_OK;
}

gt_status hy_backend_cpu(hy_backend **backend) { return hy_backend_cpu_with(backend, hy_cpu_features()); }
