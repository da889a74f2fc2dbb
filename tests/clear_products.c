/* clear_products.c - a library to preload.  It fills the output of cublasLtMatmul with 0xff bytes before each call.
 *
 * compute-sanitizer's initcheck does not see the writes of cuBLASLt's kernels.  So it reports every read of their
 * results as a read of uninitialised memory.  It reports nothing if the memory was set before the call.  Step initcheck
 * of tests/run_gpu.sh uses this library:
 *
 *     cc -shared -fPIC -I$CUDA/include -o clear_products.so clear_products.c -L$CUDA/lib64 -lcudart -ldl
 *     LD_PRELOAD=./clear_products.so compute-sanitizer --tool initcheck PROGRAM
 */
#define _GNU_SOURCE
#include <cublasLt.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static uint64_t attribute(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t which, size_t bytes) {
    uint64_t value = 0;
    size_t written = 0;
    if (cublasLtMatrixLayoutGetAttribute(layout, which, &value, bytes, &written) != CUBLAS_STATUS_SUCCESS ||
        written != bytes) {
        fprintf(stderr, "clear_products: attribute %d of a matrix\n", (int)which);
        exit(1);
    }
    return value;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t product, const void *alpha, const void *a,
                              cublasLtMatrixLayout_t a_layout, const void *b, cublasLtMatrixLayout_t b_layout,
                              const void *beta, const void *c, cublasLtMatrixLayout_t c_layout, void *d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t *algorithm, void *workspace,
                              size_t workspace_bytes, cudaStream_t stream) {
    static __typeof__(&cublasLtMatmul) original;
    if (!original) *(void **)&original = dlsym(RTLD_NEXT, "cublasLtMatmul");
    if (*(const float *)beta == 0.0f) { /* with another beta the call adds to d, so the contents of d must stay */
        const uint64_t type = attribute(d_layout, CUBLASLT_MATRIX_LAYOUT_TYPE, 4);
        const uint64_t order = attribute(d_layout, CUBLASLT_MATRIX_LAYOUT_ORDER, 4);
        const uint64_t rows = attribute(d_layout, CUBLASLT_MATRIX_LAYOUT_ROWS, 8);
        const uint64_t columns = attribute(d_layout, CUBLASLT_MATRIX_LAYOUT_COLS, 8);
        const uint64_t pitch = attribute(d_layout, CUBLASLT_MATRIX_LAYOUT_LD, 8);
        const uint64_t element = type == CUDA_R_32F ? 4 : 2; /* the only other types are bf16 and f16 */
        const uint64_t count = attribute(d_layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, 4);
        const uint64_t step = attribute(d_layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, 8);
        const int by_rows = order == CUBLASLT_ORDER_ROW;
        const uint64_t run = by_rows ? columns : rows, runs = by_rows ? rows : columns;
        for (uint64_t i = 0; i < count; i++) {
            if (cudaMemset2DAsync((char *)d + i * step * element, pitch * element, 0xff, run * element, runs, stream) ==
                cudaSuccess)
                continue;
            fprintf(stderr, "clear_products: cudaMemset2DAsync\n");
            exit(1);
        }
    }
    return original(handle, product, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, algorithm,
                    workspace, workspace_bytes, stream);
}
