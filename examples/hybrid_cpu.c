/* Opens the CPU backend of hybrid_ops.c.  A build has several variants of it; this file takes the fastest that the
 * processor can run. */
#include "hybrid_cpu.h"
#include <stdio.h>
#include <string.h>

/* ---- the variants of the backend ----------------------------------------------------------- */

/* hybrid_ops.c is compiled twice: for every processor of this architecture, and for processors with AVX2. */
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
