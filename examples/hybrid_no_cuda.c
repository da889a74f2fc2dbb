/* Stands in for hybrid_ops.cu in a build without CUDA. */
#include "hybrid_ops.h"

gt_status hy_backend_cuda(hy_backend **backend, gt_dtype dtype, int rank) {
    (void)dtype, (void)rank;
    *backend = NULL;
#ifdef HY_NO_CUBLASLT
    return hy_fail(GT_ERROR_NO_CUDA, "this program was built without cuBLASLt");
#else
    return hy_fail(GT_ERROR_NO_CUDA, "this program was built without CUDA");
#endif
}
