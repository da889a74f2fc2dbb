/* A device that fails, for the trainer's tests: the CPU backend under the name hy_backend_cuda.  Its ranks communicate
 * through the fake NCCL of tests/fake_nccl.c.  The environment variable HY_FAULT chooses the fault:
 *     OPERATION N              the N-th call of OPERATION fails, which is gemm, adamw or read
 *     OPERATION N for good     after that call, all calls of gemm, adamw and read fail
 *     late N                   the N-th call of wkv_ssm_backward fails
 * As after an error of a kernel, the call of `late` succeeds, and the next call that waits for the device reports the
 * failure. */
#include "fake_stream.h"
#include "hybrid_ops.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static hy_backend working; /* the CPU backend, without faults */
static const char *operation = "", *end = "";
static long left;
static int is_dead, is_late;

static gt_status fault(const char *name, const char *call) {
    if (!strcmp(name, operation) && --left == 0) {
        is_dead = !strcmp(end, "for good");
        return hy_fail(GT_ERROR_CUDA, "%s: an illegal memory access was encountered", call);
    }
    return is_dead ? hy_fail(GT_ERROR_CUDA, "%s: the device is lost", call) : GT_OK;
}

static gt_status faulty_gemm(hy_backend *be, const hy_gemm_args *a) {
    gt_status status = fault("gemm", "cublasLtMatmul");
    return status == GT_OK ? working.gemm(be, a) : status;
}

static gt_status faulty_adamw(hy_backend *be, const hy_adamw_args *a) {
    gt_status status = fault("adamw", "cuda adamw");
    return status == GT_OK ? working.adamw(be, a) : status;
}

static gt_status faulty_wkv_ssm(hy_backend *be, const gt_wkv_ssm_args *a) {
    if (!strcmp(operation, "late") && --left == 0) is_late = 1;
    return working.wkv_ssm_backward(be, a);
}

static gt_status faulty_synchronize(hy_backend *be) {
    if (!is_late) return working.synchronize(be);
    return hy_fail(GT_ERROR_CUDA, "a kernel: an illegal memory access was encountered");
}

static gt_status faulty_read(hy_backend *be, double *host, const void *from, gt_dtype dtype, int64_t n) {
    gt_status status = faulty_synchronize(be);
    if (status == GT_OK) status = fault("read", "cudaMemcpyAsync");
    return status == GT_OK ? working.read(be, host, from, dtype, n) : status;
}

gt_status hy_backend_cuda(hy_backend **backend, gt_dtype dtype, int rank) {
    static char name[16], rest[16];
    const char *fault_at = getenv("HY_FAULT");
    gt_status status = hy_backend_cpu(backend);
    (void)dtype; /* the CPU backend always computes in fp32 */
    if (status != GT_OK) return status;
    if (fault_at && sscanf(fault_at, "%15s %ld %15[a-z ]", name, &left, rest) >= 2) operation = name, end = rest;
    fake_stream_open(*backend);
    working = **backend;
    (*backend)->name = "faulty";
    snprintf((*backend)->device, sizeof working.device, "a device that fails");
    snprintf((*backend)->pci, sizeof working.pci, "0000:0A:00.0");
    fake_stream_address(*backend, rank);
    (*backend)->gemm = faulty_gemm;
    (*backend)->adamw = faulty_adamw;
    (*backend)->read = faulty_read;
    (*backend)->wkv_ssm_backward = faulty_wkv_ssm;
    (*backend)->synchronize = faulty_synchronize;
    return GT_OK;
}
