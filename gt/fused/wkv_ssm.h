/* gt/fused/wkv_ssm.h - mixed calls of wkv_ssm: which calls mix the branches, and what they add (plain C, shared by the
 * kernels and the CPU twin). */
#ifndef GT_FUSED_WKV_SSM_H
#define GT_FUSED_WKV_SSM_H

#include "../base/op.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Returns whether a call mixes the branches.  A query and a path cover both passes.  Without tokens dmixed may be NULL,
 * but gradients of gains are still written. */
static inline int gt_wkv_ssm_mixes(const gt_wkv_ssm_args *a, gt_pass pass) {
    if (!a) return 0;
    if (pass != GT_BACKWARD && a->mixed) return 1;
    return (pass == GT_BACKWARD || pass >= GT_PASSES) && (a->dmixed || a->dgain_wkv || a->dgain_ssm);
}
static inline const gt_op *gt_op_of_wkv_ssm(const gt_wkv_ssm_args *a, gt_pass pass) {
    return gt_wkv_ssm_mixes(a, pass) ? gt_op_wkv_ssm_mixed() : gt_op_wkv_ssm();
}

/* Describes the sum to wkv6, whose kernels add the branches to `mixed`.  Their y is then `mixed`, and what wkv6.y holds
 * is written only if the caller wants it. */
static inline gt_mix gt_wkv_ssm_mix_of(const gt_wkv_ssm_args *a) {
    gt_mix mix;
    mix.y = a->wkv6.y, mix.y_stride = a->wkv6.y_stride;
    mix.ssm = a->ssd.y, mix.ssm_stride = a->ssd.y_stride, mix.P = a->ssd.P;
    mix.residual = a->residual, mix.residual_stride = a->residual_stride;
    mix.gain_wkv = a->gain_wkv, mix.gain_ssm = a->gain_ssm;
    return mix;
}

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif
