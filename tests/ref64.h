/* The truth: the CPU twins compiled with double numbers.  Every array of the argument struct holds
 * doubles, whatever its dtype says; int32 arrays stay int32. */
#ifndef GT_REF64_H
#define GT_REF64_H

#include "gt_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

gt_status gt_ref64_wkv6_forward(const gt_wkv6_args *args);
gt_status gt_ref64_wkv6_backward(const gt_wkv6_args *args);
gt_status gt_ref64_wkv6_step(const gt_wkv6_args *args);
gt_status gt_ref64_ssd_forward(const gt_ssd_args *args);
gt_status gt_ref64_ssd_backward(const gt_ssd_args *args);
gt_status gt_ref64_ssd_step(const gt_ssd_args *args);
gt_status gt_ref64_selective_scan_forward(const gt_selective_scan_args *args);
gt_status gt_ref64_selective_scan_backward(const gt_selective_scan_args *args);
gt_status gt_ref64_selective_scan_step(const gt_selective_scan_args *args);
gt_status gt_ref64_conv1d_forward(const gt_conv1d_args *args);
gt_status gt_ref64_conv1d_backward(const gt_conv1d_args *args);
gt_status gt_ref64_conv1d_step(const gt_conv1d_args *args);
gt_status gt_ref64_rmsnorm_linear_forward(const gt_rmsnorm_linear_args *args);
gt_status gt_ref64_rmsnorm_linear_backward(const gt_rmsnorm_linear_args *args);
gt_status gt_ref64_norm_mix_forward(const gt_norm_mix_args *args);
gt_status gt_ref64_norm_mix_backward(const gt_norm_mix_args *args);
gt_status gt_ref64_norm_gate_forward(const gt_norm_gate_args *args);
gt_status gt_ref64_norm_gate_backward(const gt_norm_gate_args *args);

#ifdef __cplusplus
}
#endif
#endif
