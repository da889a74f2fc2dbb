/* reference/gt_wkv_ssm.c - wkv_ssm on the CPU.  It checks all arguments of wkv6 and ssd, then calls the twins of
 * both.
 *
 * A mixed call:  mixed = residual + gain_wkv . y_wkv + gain_ssm . y_ssm.  ssd runs first, then wkv6 adds.
 * Backward:      dy_wkv = gain_wkv . dmixed and dy_ssm = gain_ssm . dmixed, then both twins.
 *                dgain_wkv = sum over tokens of y_wkv . dmixed, and likewise dgain_ssm.
 * Even the double build rounds the y_ssm that it adds, and dy, to the values that kernels store.  So comparisons show
 * the errors of wkv6 and ssd. */
#include "gt_ref.h"

#include "gt/fused/wkv_ssm.h"

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
 * neither twin writes anything if they are wrong.  *used gets the number of tokens of a batch element that belong to
 * sequences. */
static gt_status wkv_ssm_prepare(gt_pass pass, const gt_wkv_ssm_args *args, gt_wkv_ssm_args *a, int64_t *used) {
    gt_dims dims;
    ref_sequences sequences;
    gt_status status = gt_prepare(gt_op_of_wkv_ssm(args, pass), pass, GT_HOST, args, a, &dims);
    if (status != GT_OK) return status;
    status = ref_find_sequences(a->B, a->T, a->cu_seqlens, a->seq_count, a->seq_capacity, &sequences);
    *used = status == GT_OK && a->seq_capacity ? a->cu_seqlens[sequences.count] : a->T;
    return status;
}

/* Runs a mixed forward, or a mixed step. */
static gt_status wkv_ssm_mixed(gt_wkv_ssm_args *a, int step) {
    const gt_mix mix = gt_wkv_ssm_mix_of(a);
    const gt_status status = step ? GT_REF(ssd_step)(&a->ssd) : GT_REF(ssd_forward)(&a->ssd);
    if (status != GT_OK) return status;
    a->wkv6.y = a->mixed, a->wkv6.y_stride = a->mixed_stride;
    return GT_REF(wkv6_mixed)(&a->wkv6, &mix, step);
}

/* A branch in backward of a mixed call: H heads of n channels. */
typedef struct wkv_ssm_branch {
    const void *y;
    gt_stride y_stride;
    const float *gain;
    float *dgain;
    int64_t H, n;
    real *dy; /* scratch [B,T,H,n], in elements of the call's dtype */
} wkv_ssm_branch;

/* Computes the gradient of a branch's gains, and dy.  used: see wkv_ssm_prepare. */
static gt_status wkv_ssm_unmix(const gt_wkv_ssm_args *a, int64_t used, wkv_ssm_branch *x) {
    const int64_t rows = a->B && a->T ? a->B * a->T : 0, width = gt_times(x->H, x->n), V = a->wkv6.V;
    const gt_status status = ref_scratch(&x->dy, rows ? gt_times(rows, width) : 0);
    if (status != GT_OK || (!rows && !x->dgain)) return status;
    GT_PARALLEL_FOR
    for (int64_t c = 0; c < width; c++) {
        const real gain = ref_param(x->gain, c, 1);
        double sum = 0;
        for (int64_t row = 0; row < rows; row++) {
            const int64_t b = row / a->T, t = row % a->T;
            const real d = t < used ? ref_load(a->dmixed, a->dtype, ref_at(a->dmixed_stride, b, t, c / V) + c % V) : 0;
            const real dy = a->dtype == GT_F32 ? gain * d : ref_rounded((real)(float)(gain * d), a->dtype);
            ref_store(x->dy, a->dtype, row * width + c, dy);
            if (x->dgain && t < used)
                sum += (double)d * ref_load(x->y, a->dtype, ref_at(x->y_stride, b, t, c / x->n) + c % x->n);
        }
        ref_grad(x->dgain, c, sum, a->accumulate);
    }
    return GT_OK;
}

static gt_status wkv_ssm_mixed_backward(gt_wkv_ssm_args *a, int64_t used) {
    const gt_stride packed = {0, 0, 0};
    wkv_ssm_branch wkv = {a->wkv6.y, a->wkv6.y_stride, a->gain_wkv, a->dgain_wkv, a->wkv6.H, a->wkv6.V, NULL};
    wkv_ssm_branch ssm = {a->ssd.y, a->ssd.y_stride, a->gain_ssm, a->dgain_ssm, a->ssd.H, a->ssd.P, NULL};
    gt_status status = wkv_ssm_unmix(a, used, &wkv);
    if (status == GT_OK) status = wkv_ssm_unmix(a, used, &ssm);
    a->wkv6.dy = wkv.dy, a->wkv6.dy_stride = packed;
    a->ssd.dy = ssm.dy, a->ssd.dy_stride = packed;
    if (status == GT_OK) status = GT_REF(wkv6_backward)(&a->wkv6);
    if (status == GT_OK) status = GT_REF(ssd_backward)(&a->ssd);
    free(wkv.dy), free(ssm.dy);
    return status;
}

gt_status GT_REF(wkv_ssm_forward)(const gt_wkv_ssm_args *args) {
    gt_wkv_ssm_args a;
    int64_t used;
    const gt_status status = wkv_ssm_prepare(GT_FORWARD, args, &a, &used);
    if (status != GT_OK) return status;
    if (gt_wkv_ssm_mixes(&a, GT_FORWARD)) return wkv_ssm_mixed(&a, 0);
    const gt_status first = GT_REF(wkv6_forward)(&a.wkv6);
    return first != GT_OK ? first : GT_REF(ssd_forward)(&a.ssd);
}

gt_status GT_REF(wkv_ssm_backward)(const gt_wkv_ssm_args *args) {
    gt_wkv_ssm_args a;
    int64_t used;
    const gt_status status = wkv_ssm_prepare(GT_BACKWARD, args, &a, &used);
    if (status != GT_OK) return status;
    if (gt_wkv_ssm_mixes(&a, GT_BACKWARD)) return wkv_ssm_mixed_backward(&a, used);
    const gt_status first = GT_REF(wkv6_backward)(&a.wkv6);
    return first != GT_OK ? first : GT_REF(ssd_backward)(&a.ssd);
}

gt_status GT_REF(wkv_ssm_step)(const gt_wkv_ssm_args *args) {
    gt_wkv_ssm_args a;
    int64_t used;
    const gt_status status = wkv_ssm_prepare(GT_STEP, args, &a, &used);
    if (status != GT_OK) return status;
    if (gt_wkv_ssm_mixes(&a, GT_STEP)) return wkv_ssm_mixed(&a, 1);
    const gt_status first = GT_REF(wkv6_step)(&a.wkv6);
    return first != GT_OK ? first : GT_REF(ssd_step)(&a.ssd);
}
