/* gt/fused/wkv_ssm_calls.cuh - wkv_ssm: the C functions, and the stubs.  wkv_ssm calls wkv6 and ssd, so it is
 * implemented only beside them.  gt_kernels.h includes this file; gt_fused.cuh does not need it. */
#ifndef GT_FUSED_WKV_SSM_CALLS_CUH
#define GT_FUSED_WKV_SSM_CALLS_CUH

#include "wkv_ssm_table.h"

#if defined(__CUDACC__) || defined(GT_EMU)

#include "wkv_ssm.cuh"

extern "C" {

GT_API gt_status gt_wkv_ssm_forward(const gt_wkv_ssm_args* args, gt_stream stream) {
    return gt::wkv_ssm::call(GT_FORWARD, args, stream);
}
GT_API gt_status gt_wkv_ssm_backward(const gt_wkv_ssm_args* args, gt_stream stream) {
    return gt::wkv_ssm::call(GT_BACKWARD, args, stream);
}
GT_API gt_status gt_wkv_ssm_step(const gt_wkv_ssm_args* args, gt_stream stream) {
    return gt::wkv_ssm::step(args, stream);
}
GT_API gt_status gt_wkv_ssm_workspace(const gt_wkv_ssm_args* args, gt_workspace* need) {
    gt_no_answer(need);
    return gt::wkv_ssm::query(args, need);
}
GT_API gt_status gt_wkv_ssm_path(const gt_wkv_ssm_args* args, char* text, size_t bytes) {
    return gt::wkv_ssm::path(args, text, bytes);
}

} /* extern "C" */

#else

/* ---- stubs: this file was compiled without nvcc ---------------------------------------------- */

#include "../base/stubs.h"

#ifdef __cplusplus
extern "C" {
#endif

GT_STUBS(wkv_ssm)
GT_STUB(wkv_ssm, step, GT_STEP)

#ifdef __cplusplus
}
#endif

#endif /* kernels or stubs */

#endif /* GT_FUSED_WKV_SSM_CALLS_CUH */
