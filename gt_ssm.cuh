/* gt_ssm.cuh - Mamba-2 state space duality (ssd) and the Mamba-1 selective scan.
 *
 * This file has two parts: what describes the operators (plain C, so that the stubs and the CPU
 * twins share it), and the kernels (CUDA C++). */
#ifndef GT_SSM_CUH
#define GT_SSM_CUH

#ifndef GT_KERNELS_INTERNAL
#define GT_KERNELS_INTERNAL
#endif
#include "gt_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- the operators' tables ------------------------------------------------------------------- */

/* Groups share Bm and Cm evenly between the heads (or channels) that `field` counts. */
static gt_status gt_ssm_resolve_groups(int64_t *G, const char *field, int64_t heads,
                                       gt_dims *dims) {
    gt_status status;
    if (*G == 0) *G = 1;
    dims->n['G' - 'A'] = *G;
    if ((status = gt_check_range(GT_ERROR_SIZE, "G", *G, 1, GT_MAX_SIZE))) return status;
    if (heads % *G)
        return gt_fail(GT_ERROR_SIZE, "G = %lld: must divide %s = %lld", (long long)*G, field,
                       (long long)heads);
    return GT_OK;
}

/* dz without the gate that it is the gradient of; no elements, no gate needed */
static gt_status gt_ssm_check_gate(const void *z, const void *dz, gt_pass pass,
                                   const gt_dims *dims) {
    if (pass != GT_BACKWARD || !dz || z || !dims->n['B' - 'A'] || !dims->n['T' - 'A']) return GT_OK;
    return gt_fail(GT_ERROR_NULL, "z is NULL: dz needs it");
}

static gt_status gt_ssd_check_limits(const gt_ssd_args *a) {
    if (!a->dt_limit) return GT_OK;
    if (a->dt_min != a->dt_min || a->dt_max != a->dt_max)
        return gt_fail(GT_ERROR_VALUE, "%s is NaN", a->dt_min != a->dt_min ? "dt_min" : "dt_max");
    if (a->dt_min > a->dt_max)
        return gt_fail(GT_ERROR_VALUE, "dt_min = %g: must not be above dt_max = %g",
                       (double)a->dt_min, (double)a->dt_max);
    return GT_OK;
}

static gt_status gt_ssd_resolve(void *filled, gt_pass pass, gt_dims *dims) {
    gt_ssd_args *a = (gt_ssd_args *)filled;
    gt_recurrence f = {a->B, a->T, a->segments, a->seq_capacity, a->slot_capacity,
                       a->state_in_shared, a->state_in, a->state_out,
                       a->cu_seqlens, a->seq_count, a->slots};
    gt_status status;
    dims->n['K' - 'A'] = a->Dskip_per_channel ? a->P : 1; /* columns of Dskip */
    if ((status = gt_ssm_resolve_groups(&a->G, "H", a->H, dims)) ||
        (status = gt_check_range(GT_ERROR_VALUE, "softplus", a->softplus, 0, 1)) ||
        (status = gt_check_range(GT_ERROR_VALUE, "dt_limit", a->dt_limit, 0, 1)) ||
        (status =
             gt_check_range(GT_ERROR_VALUE, "Dskip_per_channel", a->Dskip_per_channel, 0, 1)) ||
        (status = gt_ssd_check_limits(a)) || (status = gt_resolve_recurrent(&f, pass, dims)) ||
        (status = gt_ssm_check_gate(a->z, a->dz, pass, dims)))
        return status;
    if (pass == GT_STEP) a->slot_capacity = dims->n['Q' - 'A'];
    return GT_OK;
}

#define GT_AT(field) offsetof(gt_ssd_args, field)
GT_API const gt_op *gt_op_ssd(void) {
    static const gt_size sizes[] = {{'B', "B", GT_AT(B), 0}, {'T', "T", GT_AT(T), 0},
                                    {'H', "H", GT_AT(H), 1}, {'P', "P", GT_AT(P), 1},
                                    {'N', "N", GT_AT(N), 1}, {0, NULL, 0, 0}};
    static const gt_tensor tensors[] = {
        {"x", GT_AT(x), GT_AT(x_stride), "BTHP", 'x', "III", NULL},
        {"dt", GT_AT(dt), GT_AT(dt_stride), "BTH", 'w', "III", NULL},
        {"A", GT_AT(A), 0, "H", 'f', "III", NULL},
        {"Bm", GT_AT(Bm), GT_AT(Bm_stride), "BTGN", 'x', "III", NULL},
        {"Cm", GT_AT(Cm), GT_AT(Cm_stride), "BTGN", 'x', "III", NULL},
        {"Dskip", GT_AT(Dskip), 0, "HK", 'f', "iii", NULL},
        {"z", GT_AT(z), GT_AT(z_stride), "BTHP", 'x', "iii", NULL},
        {"dt_bias", GT_AT(dt_bias), 0, "H", 'f', "iii", NULL},
        {"state_in", GT_AT(state_in), 0, "SHPN", 'f', "ii-", NULL},
        {"y", GT_AT(y), GT_AT(y_stride), "BTHP", 'x', "O-O", NULL},
        {"state_out", GT_AT(state_out), 0, "QHPN", 'f', "o-s", "state_in"},
        {"slots", GT_AT(slots), 0, "B", 'i', "--i", NULL},
        {"dy", GT_AT(dy), GT_AT(dy_stride), "BTHP", 'x', "-I-", NULL},
        {"dstate_out", GT_AT(dstate_out), 0, "QHPN", 'f', "-i-", NULL},
        {"dx", GT_AT(dx), GT_AT(dx_stride), "BTHP", 'x', "-o-", NULL},
        {"ddt", GT_AT(ddt), GT_AT(ddt_stride), "BTH", 'w', "-o-", NULL},
        {"dBm", GT_AT(dBm), GT_AT(dBm_stride), "BTGN", 'x', "-o-", NULL},
        {"dCm", GT_AT(dCm), GT_AT(dCm_stride), "BTGN", 'x', "-o-", NULL},
        {"dz", GT_AT(dz), GT_AT(dz_stride), "BTHP", 'x', "-o-", NULL},
        {"dA", GT_AT(dA), 0, "H", 'f', "-g-", NULL},
        {"dDskip", GT_AT(dDskip), 0, "HK", 'f', "-g-", NULL},
        {"ddt_bias", GT_AT(ddt_bias), 0, "H", 'f', "-g-", NULL},
        {"dstate_in", GT_AT(dstate_in), 0, "SHPN", 'f', "-o-", "dstate_out"},
        {NULL, 0, 0, NULL, 0, NULL, NULL}};
    static const gt_op op = {"ssd",      sizeof(gt_ssd_args), GT_AT(dtype), GT_AT(dt_dtype),
                             "dt_dtype", GT_AT(accumulate),   sizes,        tensors,
                             gt_ssd_resolve};
    return &op;
}
#undef GT_AT

static gt_status gt_selective_scan_resolve(void *filled, gt_pass pass, gt_dims *dims) {
    gt_selective_scan_args *a = (gt_selective_scan_args *)filled;
    gt_recurrence f = {a->B, a->T, a->segments, a->seq_capacity, a->slot_capacity,
                       a->state_in_shared, a->state_in, a->state_out,
                       a->cu_seqlens, a->seq_count, a->slots};
    gt_status status;
    if ((status = gt_ssm_resolve_groups(&a->G, "D", a->D, dims)) ||
        (status = gt_check_range(GT_ERROR_VALUE, "softplus", a->softplus, 0, 1)) ||
        (status = gt_resolve_recurrent(&f, pass, dims)) ||
        (status = gt_ssm_check_gate(a->z, a->dz, pass, dims)))
        return status;
    if (pass == GT_STEP) a->slot_capacity = dims->n['Q' - 'A'];
    return GT_OK;
}

#define GT_AT(field) offsetof(gt_selective_scan_args, field)
GT_API const gt_op *gt_op_selective_scan(void) {
    static const gt_size sizes[] = {{'B', "B", GT_AT(B), 0},
                                    {'T', "T", GT_AT(T), 0},
                                    {'D', "D", GT_AT(D), 1},
                                    {'N', "N", GT_AT(N), 1},
                                    {0, NULL, 0, 0}};
    static const gt_tensor tensors[] = {
        {"u", GT_AT(u), GT_AT(u_stride), "BTD", 'x', "III", NULL},
        {"dt", GT_AT(dt), GT_AT(dt_stride), "BTD", 'w', "III", NULL},
        {"A", GT_AT(A), 0, "DN", 'f', "III", NULL},
        {"Bm", GT_AT(Bm), GT_AT(Bm_stride), "BTGN", 'x', "III", NULL},
        {"Cm", GT_AT(Cm), GT_AT(Cm_stride), "BTGN", 'x', "III", NULL},
        {"Dskip", GT_AT(Dskip), 0, "D", 'f', "iii", NULL},
        {"z", GT_AT(z), GT_AT(z_stride), "BTD", 'x', "iii", NULL},
        {"dt_bias", GT_AT(dt_bias), 0, "D", 'f', "iii", NULL},
        {"state_in", GT_AT(state_in), 0, "SDN", 'f', "ii-", NULL},
        {"y", GT_AT(y), GT_AT(y_stride), "BTD", 'x', "O-O", NULL},
        {"state_out", GT_AT(state_out), 0, "QDN", 'f', "o-s", "state_in"},
        {"slots", GT_AT(slots), 0, "B", 'i', "--i", NULL},
        {"dy", GT_AT(dy), GT_AT(dy_stride), "BTD", 'x', "-I-", NULL},
        {"dstate_out", GT_AT(dstate_out), 0, "QDN", 'f', "-i-", NULL},
        {"du", GT_AT(du), GT_AT(du_stride), "BTD", 'x', "-o-", NULL},
        {"ddt", GT_AT(ddt), GT_AT(ddt_stride), "BTD", 'w', "-o-", NULL},
        {"dBm", GT_AT(dBm), GT_AT(dBm_stride), "BTGN", 'x', "-o-", NULL},
        {"dCm", GT_AT(dCm), GT_AT(dCm_stride), "BTGN", 'x', "-o-", NULL},
        {"dz", GT_AT(dz), GT_AT(dz_stride), "BTD", 'x', "-o-", NULL},
        {"dA", GT_AT(dA), 0, "DN", 'f', "-g-", NULL},
        {"dDskip", GT_AT(dDskip), 0, "D", 'f', "-g-", NULL},
        {"ddt_bias", GT_AT(ddt_bias), 0, "D", 'f', "-g-", NULL},
        {"dstate_in", GT_AT(dstate_in), 0, "SDN", 'f', "-o-", "dstate_out"},
        {NULL, 0, 0, NULL, 0, NULL, NULL}};
    static const gt_op op = {"selective_scan",        sizeof(gt_selective_scan_args),
                             GT_AT(dtype),            GT_AT(dt_dtype),
                             "dt_dtype",              GT_AT(accumulate),
                             sizes,                   tensors,
                             gt_selective_scan_resolve};
    return &op;
}
#undef GT_AT

#if !defined(__CUDACC__) && !defined(GT_EMU)

/* ---- stubs: this file was compiled without nvcc ---------------------------------------------- */

GT_API gt_status gt_ssd_forward(const gt_ssd_args *args, gt_stream stream) {
    (void)args, (void)stream;
    return gt_no_cuda(gt_op_ssd(), GT_FORWARD);
}
GT_API gt_status gt_ssd_backward(const gt_ssd_args *args, gt_stream stream) {
    (void)args, (void)stream;
    return gt_no_cuda(gt_op_ssd(), GT_BACKWARD);
}
GT_API gt_status gt_ssd_step(const gt_ssd_args *args, gt_stream stream) {
    (void)args, (void)stream;
    return gt_no_cuda(gt_op_ssd(), GT_STEP);
}
GT_API gt_status gt_ssd_workspace(const gt_ssd_args *args, gt_workspace *need) {
    (void)args, (void)need;
    return gt_no_cuda(gt_op_ssd(), GT_QUERY);
}

GT_API gt_status gt_selective_scan_forward(const gt_selective_scan_args *args, gt_stream stream) {
    (void)args, (void)stream;
    return gt_no_cuda(gt_op_selective_scan(), GT_FORWARD);
}
GT_API gt_status gt_selective_scan_backward(const gt_selective_scan_args *args, gt_stream stream) {
    (void)args, (void)stream;
    return gt_no_cuda(gt_op_selective_scan(), GT_BACKWARD);
}
GT_API gt_status gt_selective_scan_step(const gt_selective_scan_args *args, gt_stream stream) {
    (void)args, (void)stream;
    return gt_no_cuda(gt_op_selective_scan(), GT_STEP);
}
GT_API gt_status gt_selective_scan_workspace(const gt_selective_scan_args *args,
                                             gt_workspace *need) {
    (void)args, (void)need;
    return gt_no_cuda(gt_op_selective_scan(), GT_QUERY);
}

#endif

#ifdef __cplusplus
}
#endif

#endif /* GT_SSM_CUH */
