#include "hybrid_plan.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The lengths of chunks, in tokens.  Forward stores the state before every chunk for backward.  Backward needs up to
 * as much memory again. */
enum { WKV6_CHUNK = 64, SSD_CHUNK = 128, SCAN_CHUNK = 64 };
enum { PRODUCTS = 32 << 20, SUMS = 512 }; /* WORKSPACE_BYTES and PARTS of hybrid_machine.cuh */

static size_t bytes_of(const hy_backend *be) { return be->dtype == GT_F32 ? 4 : 2; }

static size_t chunks(int64_t T, int length) { return (size_t)((T + length - 1) / length); }

static void needs(gt_workspace *need, size_t forward, size_t backward, size_t saved) {
    *need = (gt_workspace){.forward = forward, .backward = backward, .saved = saved};
}

static gt_status plan_wkv6(hy_backend *be, const gt_wkv6_args *a, gt_workspace *need) {
    const size_t states = (size_t)(a->B * a->H * a->N * a->N) * chunks(a->T, WKV6_CHUNK);
    needs(need, 0, states * bytes_of(be) / 2, states * bytes_of(be));
    return GT_OK;
}

static gt_status plan_ssd(hy_backend *be, const gt_ssd_args *a, gt_workspace *need) {
    const size_t states = (size_t)(a->B * a->H * a->P * a->N) * chunks(a->T, SSD_CHUNK);
    needs(need, 0, states * bytes_of(be), states * bytes_of(be));
    return GT_OK;
}

static gt_status plan_scan(hy_backend *be, const gt_selective_scan_args *a, gt_workspace *need) {
    const size_t states = (size_t)(a->B * a->D * a->N) * chunks(a->T, SCAN_CHUNK) * 4;
    (void)be;
    needs(need, 0, states, states);
    return GT_OK;
}

static gt_status plan_conv1d(hy_backend *be, const gt_conv1d_args *a, gt_workspace *need) {
    (void)be;
    needs(need, 0, (size_t)(a->B * a->D * (a->W + 1) * 4) * chunks(a->T, 64), 0);
    return GT_OK;
}

/* Computes the workspace of conv_ssd.  It holds the convolved rows, and in backward also their gradient.  Behind
 * them is space that conv1d uses for partial sums and ssd as its workspace. */
static gt_status plan_conv_ssd(hy_backend *be, const gt_conv_ssd_args *a, gt_workspace *need) {
    const int64_t D = a->H * a->P + 2 * a->N;
    const gt_conv1d_args conv1d = {.B = a->B, .T = a->T, .D = D, .W = a->W};
    const gt_ssd_args ssd = {.B = a->B, .T = a->T, .H = a->H, .P = a->P, .N = a->N};
    const size_t rows = (size_t)(a->B * a->T * D) * bytes_of(be);
    gt_workspace of_conv1d, of_ssd;
    plan_conv1d(be, &conv1d, &of_conv1d);
    plan_ssd(be, &ssd, &of_ssd);
    const size_t most = of_conv1d.backward > of_ssd.backward ? of_conv1d.backward : of_ssd.backward;
    needs(need, rows, 2 * rows + most, of_ssd.saved);
    return GT_OK;
}

static gt_status plan_wkv_ssm(hy_backend *be, const gt_wkv_ssm_args *a, gt_workspace *need) {
    gt_wkv6_args wkv6 = a->wkv6;
    gt_ssd_args ssd = a->ssd;
    gt_workspace of_wkv6, of_ssd;
    wkv6.B = ssd.B = a->B, wkv6.T = ssd.T = a->T;
    plan_wkv6(be, &wkv6, &of_wkv6);
    plan_ssd(be, &ssd, &of_ssd);
    needs(need, of_wkv6.forward + of_ssd.forward, of_wkv6.backward + of_ssd.backward, of_wkv6.saved + of_ssd.saved);
    return GT_OK;
}

static gt_status plan_rmsnorm_linear(hy_backend *be, const gt_rmsnorm_linear_args *a, gt_workspace *need) {
    const size_t rows = (size_t)(a->M * a->D) * bytes_of(be);
    needs(need, rows, 2 * rows, (size_t)a->M * 4);
    return GT_OK;
}

static gt_status plan_norm_mix(hy_backend *be, const gt_norm_mix_args *a, gt_workspace *need) {
    (void)be;
    needs(need, 0, (size_t)a->D * 2 * 4 * SUMS, 0);
    return GT_OK;
}

static gt_status plan_norm_gate(hy_backend *be, const gt_norm_gate_args *a, gt_workspace *need) {
    (void)be;
    needs(need, 0, (size_t)a->D * 2 * 4 * SUMS, 0);
    return GT_OK;
}

static gt_status plan_scratch(hy_backend *be, const hy_limits *limits, void *memory, size_t *bytes) {
    (void)be, (void)memory;
    *bytes = (size_t)(SUMS * (2 * limits->D + 64)) * 4 + PRODUCTS;
    return GT_OK;
}

static void plan_close(hy_backend *be) { free(be); }

gt_status hy_backend_plan(hy_backend **backend, gt_dtype dtype) {
    static const char *const names[] = {"f32", "f32", "bf16", "f16"};
    hy_backend *be = calloc(1, sizeof *be);
    *backend = be;
    if (!be) return hy_fail(GT_ERROR_MEMORY, "no memory for a backend");
    be->name = "plan";
    be->dtype = dtype;
    be->fp32_bytes = 4;
    snprintf(be->device, sizeof be->device, "any CUDA device, %s", names[dtype]);
    be->close = plan_close;
    be->scratch = plan_scratch;
    be->wkv6_workspace = plan_wkv6;
    be->ssd_workspace = plan_ssd;
    be->selective_scan_workspace = plan_scan;
    be->conv1d_workspace = plan_conv1d;
    be->conv_ssd_workspace = plan_conv_ssd;
    be->wkv_ssm_workspace = plan_wkv_ssm;
    be->rmsnorm_linear_workspace = plan_rmsnorm_linear;
    be->norm_mix_workspace = plan_norm_mix;
    be->norm_gate_workspace = plan_norm_gate;
    return GT_OK;
}
