/* gt/fused/conv_ssd_calls.cuh - conv_ssd: the C functions, or stubs.  They call conv1d and ssd, so gt_kernels.h
 * includes this file only where all operators are implemented; gt_fused.cuh does not include it. */
#ifndef GT_FUSED_CONV_SSD_CALLS_CUH
#define GT_FUSED_CONV_SSD_CALLS_CUH

#include "conv_ssd_table.h"

#if defined(__CUDACC__) || defined(GT_EMU)

#include "../base/path.cuh"
#include "conv_ssd_launch.cuh"

extern "C" {

GT_API gt_status gt_conv_ssd_forward(const gt_conv_ssd_args* args, gt_stream stream) {
    return gt::conv_ssd::forward(args, stream);
}

GT_API gt_status gt_conv_ssd_backward(const gt_conv_ssd_args* args, gt_stream stream) {
    return gt::conv_ssd::backward(args, stream);
}

GT_API gt_status gt_conv_ssd_step(const gt_conv_ssd_args* args, gt_stream stream) {
    return gt::conv_ssd::step(args, stream);
}

GT_API gt_status gt_conv_ssd_workspace(const gt_conv_ssd_args* args, gt_workspace* need) {
    gt_no_answer(need);
    return gt::conv_ssd::workspace(args, need);
}

GT_API gt_status gt_conv_ssd_path(const gt_conv_ssd_args* args, char* text, size_t bytes) {
    const gt::PathPasses<gt_conv_ssd_args> passes = {{gt_conv_ssd_forward, gt_conv_ssd_backward, gt_conv_ssd_step},
                                                     nullptr};
    return gt::path_over_time(gt_op_conv_ssd(), passes, args, text, bytes);
}

} /* extern "C" */

#else

/* ---- stubs: this file was compiled without nvcc ---- */

#include "../base/stubs.h"

#ifdef __cplusplus
extern "C" {
#endif

GT_STUBS(conv_ssd)
GT_STUB(conv_ssd, step, GT_STEP)

#ifdef __cplusplus
}
#endif

#endif /* kernels or stubs */

#endif
