/* cublasLt.h - the part of cuBLASLt that rmsnorm_linear calls, computed on the CPU for the emulated tests.
 *
 * Matrices are column-major: element (row, column) lies at row + column * ld.  A call returns an error if its arguments
 * break a rule of cuBLASLt.  Each product overwrites the workspace, as cuBLASLt may.  No algorithm supports products
 * with k = 64, so that tests also reach rmsnorm_linear's own kernels for such products. */
#ifndef EMULATED_CUBLASLT_H
#define EMULATED_CUBLASLT_H

#include <stdint.h>
#include <string.h>

#include "../../gt/base/number.cuh"

enum cublasStatus_t { CUBLAS_STATUS_SUCCESS = 0, CUBLAS_STATUS_INVALID_VALUE = 7, CUBLAS_STATUS_NOT_SUPPORTED = 15 };
enum cublasOperation_t { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1 };
enum cublasComputeType_t { CUBLAS_COMPUTE_32F = 68 };
enum cudaDataType_t { CUDA_R_32F = 0, CUDA_R_16F = 2, CUDA_R_16BF = 14 };
enum cublasLtMatmulDescAttributes_t { CUBLASLT_MATMUL_DESC_TRANSA = 3, CUBLASLT_MATMUL_DESC_TRANSB = 4 };
enum { CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE = 2 };
enum cublasLtMatmulPreferenceAttributes_t {
    CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1,
    CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK = 3,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES = 6,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES = 7,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES = 8
};

typedef struct cublasLtContext *cublasLtHandle_t;
struct cublasLtMatmulDescOpaque_t {
    cublasOperation_t trans[2];
};
struct cublasLtMatrixLayoutOpaque_t {
    cudaDataType_t type;
    int64_t rows, columns, ld;
};
struct cublasLtMatmulPreferenceOpaque_t {
    uint64_t bytes;
    uint32_t schemes, alignment[4];
};
struct cublasLtMatmulAlgo_t {
    uint64_t bytes;
    uint32_t alignment[4];
};
struct cublasLtMatmulHeuristicResult_t {
    cublasLtMatmulAlgo_t algo;
};

static inline const char *cublasLtGetStatusString(cublasStatus_t status) {
    return status == CUBLAS_STATUS_SUCCESS ? "success" : "a call that cuBLASLt would refuse";
}

static inline cublasStatus_t cublasLtMatmulDescInit(cublasLtMatmulDescOpaque_t *d, cublasComputeType_t,
                                                    cudaDataType_t) {
    *d = {{CUBLAS_OP_N, CUBLAS_OP_N}};
    return CUBLAS_STATUS_SUCCESS;
}

static inline cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDescOpaque_t *d,
                                                            cublasLtMatmulDescAttributes_t name, const void *value,
                                                            size_t size) {
    if (size != sizeof *d->trans) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(&d->trans[name - CUBLASLT_MATMUL_DESC_TRANSA], value, size);
    return CUBLAS_STATUS_SUCCESS;
}

static inline cublasStatus_t cublasLtMatrixLayoutInit(cublasLtMatrixLayoutOpaque_t *l, cudaDataType_t type,
                                                      uint64_t rows, uint64_t columns, int64_t ld) {
    *l = {type, (int64_t)rows, (int64_t)columns, ld};
    return rows && columns && ld >= l->rows ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

static inline cublasStatus_t cublasLtMatmulPreferenceInit(cublasLtMatmulPreferenceOpaque_t *p) {
    *p = {0, ~0u, {256, 256, 256, 256}};
    return CUBLAS_STATUS_SUCCESS;
}

static inline cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreferenceOpaque_t *p,
                                                                  cublasLtMatmulPreferenceAttributes_t name,
                                                                  const void *value, size_t size) {
    void *to = name == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES     ? (void *)&p->bytes
               : name == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK ? (void *)&p->schemes
                                                                    : (void *)&p->alignment[name - 5];
    if (size != (to == &p->bytes ? 8u : 4u)) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(to, value, size);
    return CUBLAS_STATUS_SUCCESS;
}

static inline cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, const cublasLtMatmulDescOpaque_t *d,
                                                            const cublasLtMatrixLayoutOpaque_t *a,
                                                            const cublasLtMatrixLayoutOpaque_t *b,
                                                            const cublasLtMatrixLayoutOpaque_t *c,
                                                            const cublasLtMatrixLayoutOpaque_t *out,
                                                            const cublasLtMatmulPreferenceOpaque_t *p, int wanted,
                                                            cublasLtMatmulHeuristicResult_t *results, int *count) {
    const bool ta = d->trans[0] == CUBLAS_OP_T, tb = d->trans[1] == CUBLAS_OP_T;
    const int64_t k = ta ? a->rows : a->columns;
    *count = 0;
    if (wanted < 1 || c != out || p->schemes != CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE || a->type != b->type ||
        (ta ? a->columns : a->rows) != c->rows || (tb ? b->rows : b->columns) != c->columns ||
        (tb ? b->columns : b->rows) != k)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (k == 64) return CUBLAS_STATUS_NOT_SUPPORTED;
    results->algo.bytes = p->bytes;
    memcpy(results->algo.alignment, p->alignment, sizeof p->alignment);
    *count = 1;
    return CUBLAS_STATUS_SUCCESS;
}

namespace emulated_cublaslt {

inline float load(const void *data, cudaDataType_t type, int64_t i) {
    if (type == CUDA_R_32F) return static_cast<const float *>(data)[i];
    const uint16_t bits = static_cast<const uint16_t *>(data)[i];
    return type == CUDA_R_16F ? gt::f16_to_f32(bits) : gt::bf16_to_f32(bits);
}

inline void store(void *data, cudaDataType_t type, int64_t i, float value) {
    if (type == CUDA_R_32F)
        static_cast<float *>(data)[i] = value;
    else
        static_cast<uint16_t *>(data)[i] = type == CUDA_R_16F ? gt::f32_to_f16(value) : gt::f32_to_bf16(value);
}

} // namespace emulated_cublaslt

static inline cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, const cublasLtMatmulDescOpaque_t *d,
                                            const void *alpha, const void *a, const cublasLtMatrixLayoutOpaque_t *al,
                                            const void *b, const cublasLtMatrixLayoutOpaque_t *bl, const void *beta,
                                            const void *c, const cublasLtMatrixLayoutOpaque_t *cl, void *out,
                                            const cublasLtMatrixLayoutOpaque_t *ol, const cublasLtMatmulAlgo_t *algo,
                                            void *workspace, size_t bytes, void *) {
    using namespace emulated_cublaslt;
    const void *const matrices[] = {a, b, c, out};
    const bool ta = d->trans[0] == CUBLAS_OP_T, tb = d->trans[1] == CUBLAS_OP_T;
    const int64_t k = ta ? al->rows : al->columns;
    if (!handle || *static_cast<const float *>(alpha) != 1 || *static_cast<const float *>(beta) != 0 || c != out ||
        cl != ol || bytes < algo->bytes || (uintptr_t)workspace % 256)
        return CUBLAS_STATUS_INVALID_VALUE;
    for (int i = 0; i < 4; i++)
        if ((uintptr_t)matrices[i] % algo->alignment[i]) return CUBLAS_STATUS_INVALID_VALUE;
    memset(workspace, 0xff, bytes);
    for (int64_t j = 0; j < ol->columns; j++)
        for (int64_t i = 0; i < ol->rows; i++) {
            float sum = 0;
            for (int64_t l = 0; l < k; l++)
                sum += load(a, al->type, ta ? l + i * al->ld : i + l * al->ld) *
                       load(b, bl->type, tb ? j + l * bl->ld : l + j * bl->ld);
            store(out, ol->type, i + j * ol->ld, sum);
        }
    return CUBLAS_STATUS_SUCCESS;
}

#endif
