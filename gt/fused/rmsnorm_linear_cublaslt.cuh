/* gt/fused/rmsnorm_linear_cublaslt.cuh - rmsnorm_linear: products by the caller's cuBLASLt handle.
 *
 * This code is compiled only if GT_WITH_CUBLASLT is defined; the program must then link cuBLASLt.  The code takes the
 * first algorithm that cuBLASLt's heuristic proposes.  If the algorithm splits a product along K, a separate step adds
 * the parts in fp32, so results repeat bit for bit.  Descriptors live on the stack.  If cuBLASLt has no algorithm, the
 * kernels of rmsnorm_linear_tiles.cuh compute the product. */
#ifndef GT_FUSED_RMSNORM_LINEAR_CUBLASLT_CUH
#define GT_FUSED_RMSNORM_LINEAR_CUBLASLT_CUH

#include "rmsnorm_linear_tiles.cuh"
#ifdef GT_WITH_CUBLASLT
#include <cublasLt.h>
#endif

namespace gt {
namespace rmsnorm_linear {

#ifdef GT_WITH_CUBLASLT
constexpr bool HAS_CUBLASLT = true;
#else
constexpr bool HAS_CUBLASLT = false;
#endif
constexpr size_t HANDLE_BYTES = (size_t)32 << 20; /* bytes of workspace, as much as cuBLAS uses on sm_90 */

/* A product C [M,N] = A B, with a sum over K.  a, b and out (C) are stored by rows. */
struct HandleProduct {
    void *handle, *workspace;
    gt_dtype dtype, out_dtype;
    Product product;
    Matrix a, b;
    void* out;
    int64_t out_stride, M, N, K;
};

#ifdef GT_WITH_CUBLASLT
static inline gt_status check_lt(cublasStatus_t status, const char* what) {
    if (status == CUBLAS_STATUS_SUCCESS) return GT_OK;
    return gt_fail(GT_ERROR_CUDA, "rmsnorm_linear %s: %s", what, cublasLtGetStatusString(status));
}

static inline cudaDataType_t type_of(gt_dtype dtype) {
    return dtype == GT_BF16 ? CUDA_R_16BF : dtype == GT_F16 ? CUDA_R_16F : CUDA_R_32F;
}

/* Returns the largest power of two, at most 256, that divides an address. */
static inline uint32_t alignment_of(const void* data) {
    const uintptr_t bits = (uintptr_t)data | 256;
    return (uint32_t)(bits & (~bits + 1));
}

/* Enqueues the product and sets *is_done, or leaves *is_done unchanged if cuBLASLt has no algorithm.  cuBLASLt stores
 * matrices by columns, so it sees the transpose of a matrix stored by rows.  The call therefore asks for
 * C^T = B^T A^T, with b as the first matrix. */
static inline gt_status multiply_by(const HandleProduct& p, gt_stream stream, bool* is_done) {
    const cublasOperation_t first = p.product == OUTPUT ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t second = p.product == DWEIGHT ? CUBLAS_OP_T : CUBLAS_OP_N;
    const uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    const uint64_t bytes = HANDLE_BYTES;
    const uint32_t alignments[] = {alignment_of(p.b.data), alignment_of(p.a.data), alignment_of(p.out)};
    cublasLtMatmulDescOpaque_t product = {};
    cublasLtMatrixLayoutOpaque_t a = {}, b = {}, c = {};
    cublasLtMatmulPreferenceOpaque_t preference = {};
    const struct {
        cublasLtMatmulPreferenceAttributes_t name;
        const void* value;
        size_t size;
    } wishes[] = {{CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes},
                  {CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes, sizeof schemes},
                  {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignments, sizeof *alignments},
                  {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignments + 1, sizeof *alignments},
                  {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignments + 2, sizeof *alignments},
                  {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignments + 2, sizeof *alignments}};
    cublasStatus_t status = cublasLtMatmulDescInit(&product, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    if (!status) status = cublasLtMatmulDescSetAttribute(&product, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first);
    if (!status) status = cublasLtMatmulDescSetAttribute(&product, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second);
    if (!status)
        status = cublasLtMatrixLayoutInit(&b, type_of(p.dtype), (uint64_t)p.b.columns, (uint64_t)p.b.rows, p.b.stride);
    if (!status)
        status = cublasLtMatrixLayoutInit(&a, type_of(p.dtype), (uint64_t)p.a.columns, (uint64_t)p.a.rows, p.a.stride);
    if (!status)
        status = cublasLtMatrixLayoutInit(&c, type_of(p.out_dtype), (uint64_t)p.N, (uint64_t)p.M, p.out_stride);
    if (!status) status = cublasLtMatmulPreferenceInit(&preference);
    for (const auto& wish : wishes)
        if (!status) status = cublasLtMatmulPreferenceSetAttribute(&preference, wish.name, wish.value, wish.size);
    if (status) return check_lt(status, "descriptors of cuBLASLt");
    const cublasLtHandle_t handle = static_cast<cublasLtHandle_t>(p.handle);
    cublasLtMatmulHeuristicResult_t found = {};
    int count = 0;
    status = cublasLtMatmulAlgoGetHeuristic(handle, &product, &b, &a, &c, &c, &preference, 1, &found, &count);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED || (!status && count == 0)) return GT_OK;
    if (status) return check_lt(status, "cublasLtMatmulAlgoGetHeuristic");
    if (KernelList* list = noted_kernels()) { /* gt_rmsnorm_linear_path asks only for names */
        list->add("rmsnorm_linear cublasLtMatmul");
        *is_done = true;
        return GT_OK;
    }
    const float one = 1.0f, zero = 0.0f;
    status = cublasLtMatmul(handle, &product, &one, p.b.data, &b, p.a.data, &a, &zero, p.out, &c, p.out, &c,
                            &found.algo, p.workspace, HANDLE_BYTES, (cudaStream_t)stream);
    *is_done = !status;
    return check_lt(status, "cublasLtMatmul");
}

/* Enqueues the product.  During a stream capture cuBLASLt may have to load kernels, so the capture mode is relaxed for
 * the time of the call. */
static inline gt_status multiply(const HandleProduct& p, gt_stream stream, bool* is_done) {
    if (!p.handle || p.M == 0 || p.N == 0 || p.K == 0) return GT_OK;
#ifdef GT_EMU
    return multiply_by(p, stream, is_done);
#else
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    gt_status status = report(cudaThreadExchangeStreamCaptureMode(&mode), "rmsnorm_linear");
    if (status != GT_OK) return status;
    status = multiply_by(p, stream, is_done);
    const gt_status back = report(cudaThreadExchangeStreamCaptureMode(&mode), "rmsnorm_linear");
    return status != GT_OK ? status : back;
#endif
}
#else
static inline gt_status multiply(const HandleProduct&, gt_stream, bool*) { return GT_OK; }
#endif

} /* namespace rmsnorm_linear */
} /* namespace gt */

#endif
