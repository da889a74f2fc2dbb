/* reference/gt_wkv_ssm.c - wkv_ssm on the CPU.  It checks all arguments of wkv6 and ssd, then calls the twins of
 * both. */
#include "gt_ref.h"

gt_status GT_REF(wkv_ssm_forward)(const gt_wkv_ssm_args *args);
gt_status GT_REF(wkv_ssm_backward)(const gt_wkv_ssm_args *args);
gt_status GT_REF(wkv_ssm_step)(const gt_wkv_ssm_args *args);
gt_status GT_REF(wkv6_forward)(const gt_wkv6_args *args);
gt_status GT_REF(wkv6_backward)(const gt_wkv6_args *args);
gt_status GT_REF(wkv6_step)(const gt_wkv6_args *args);
gt_status GT_REF(ssd_forward)(const gt_ssd_args *args);
gt_status GT_REF(ssd_backward)(const gt_ssd_args *args);
gt_status GT_REF(ssd_step)(const gt_ssd_args *args);

/* Copies the arguments to *a and fills in the inner structs for the two twins.  Also checks packed sequences, so that
 * neither twin writes anything if they are wrong. */
static gt_status wkv_ssm_prepare(gt_pass pass, const gt_wkv_ssm_args *args, gt_wkv_ssm_args *a) {
    gt_dims dims;
    ref_sequences sequences;
    const gt_status status = gt_prepare(gt_op_wkv_ssm(), pass, GT_HOST, args, a, &dims);
    if (status != GT_OK) return status;
    return ref_find_sequences(a->B, a->T, a->cu_seqlens, a->seq_count, a->seq_capacity, &sequences);
}

gt_status GT_REF(wkv_ssm_forward)(const gt_wkv_ssm_args *args) {
    gt_wkv_ssm_args a;
    const gt_status status = wkv_ssm_prepare(GT_FORWARD, args, &a);
    if (status != GT_OK) return status;
    const gt_status first = GT_REF(wkv6_forward)(&a.wkv6);
    return first != GT_OK ? first : GT_REF(ssd_forward)(&a.ssd);
}

gt_status GT_REF(wkv_ssm_backward)(const gt_wkv_ssm_args *args) {
    gt_wkv_ssm_args a;
    const gt_status status = wkv_ssm_prepare(GT_BACKWARD, args, &a);
    if (status != GT_OK) return status;
    const gt_status first = GT_REF(wkv6_backward)(&a.wkv6);
    return first != GT_OK ? first : GT_REF(ssd_backward)(&a.ssd);
}

gt_status GT_REF(wkv_ssm_step)(const gt_wkv_ssm_args *args) {
    gt_wkv_ssm_args a;
    const gt_status status = wkv_ssm_prepare(GT_STEP, args, &a);
    if (status != GT_OK) return status;
    const gt_status first = GT_REF(wkv6_step)(&a.wkv6);
    return first != GT_OK ? first : GT_REF(ssd_step)(&a.ssd);
}
