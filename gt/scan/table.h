/* gt/scan/table.h - describes the sizes and tensors of selective_scan, for the checks of arguments.  It is plain C,
 * because the stubs and the CPU twin (the reference implementation) use it, too. */
#ifndef GT_SCAN_TABLE_H
#define GT_SCAN_TABLE_H

#include "../recurrence/ssm.h"

#ifdef __cplusplus
extern "C" {
#endif

static gt_status gt_selective_scan_resolve(void *filled, gt_pass pass, gt_dims *dims) {
    gt_selective_scan_args *a = (gt_selective_scan_args *)filled;
    gt_recurrence f = GT_RECURRENCE(a, a->segments, a->state_in, a->state_out);
    gt_status status;
    if ((status = gt_ssm_resolve_groups(&a->G, "D", a->D, dims)) ||
        (status = gt_check_range(GT_ERROR_VALUE, "softplus", a->softplus, 0, 1)) ||
        (status = gt_resolve_rounding(a->rounding_seed, a->rounding_steps, a->state_dtype, pass, dims)) ||
        (status = gt_resolve_recurrent(&f, pass, dims)) || (status = gt_ssm_check_gate(a->z, a->dz, pass, dims)))
        return status;
    if (pass == GT_STEP) a->slot_capacity = dims->n['Q' - 'A'];
    return GT_OK;
}

GT_WRAP_CALLS(selective_scan)
GT_WRAP_PASS(selective_scan, step)

#define GT_AT(field) offsetof(gt_selective_scan_args, field)
GT_API const gt_op *gt_op_selective_scan(void) {
    static const gt_size sizes[] = {{'B', "B", GT_AT(B), 0},
                                    {'T', "T", GT_AT(T), 0},
                                    {'D', "D", GT_AT(D), 1},
                                    {'N', "N", GT_AT(N), 1},
                                    {0, NULL, 0, 0}};
    static const gt_tensor tensors[] = {{"u", GT_AT(u), GT_AT(u_stride), "BTD", 'x', "III", NULL},
                                        {"dt", GT_AT(dt), GT_AT(dt_stride), "BTD", 'w', "III", NULL},
                                        {"A", GT_AT(A), 0, "DN", 'f', "III", NULL},
                                        {"Bm", GT_AT(Bm), GT_AT(Bm_stride), "BTGN", 'X', "III", NULL},
                                        {"Cm", GT_AT(Cm), GT_AT(Cm_stride), "BTGN", 'X', "III", NULL},
                                        {"Dskip", GT_AT(Dskip), 0, "D", 'P', "iii", NULL},
                                        {"z", GT_AT(z), GT_AT(z_stride), "BTD", 'x', "iii", NULL},
                                        {"dt_bias", GT_AT(dt_bias), 0, "D", 'P', "iii", NULL},
                                        {"state_in", GT_AT(state_in), 0, "SDN", 'S', "ii-", NULL},
                                        {"y", GT_AT(y), GT_AT(y_stride), "BTD", 'x', "O-O", NULL},
                                        {"state_out", GT_AT(state_out), 0, "QDN", 'S', "o-s", "state_in"},
                                        GT_STEP_TENSORS,
                                        GT_ROUNDING_TENSORS,
                                        GT_SEQUENCE_TENSORS("ii-"),
                                        {"dy", GT_AT(dy), GT_AT(dy_stride), "BTD", 'x', "-I-", NULL},
                                        {"dstate_out", GT_AT(dstate_out), 0, "QDN", 'f', "-i-", NULL},
                                        {"du", GT_AT(du), GT_AT(du_stride), "BTD", 'x', "-o-", NULL},
                                        {"ddt", GT_AT(ddt), GT_AT(ddt_stride), "BTD", 'w', "-o-", NULL},
                                        {"dBm", GT_AT(dBm), GT_AT(dBm_stride), "BTGN", 'X', "-o-", NULL},
                                        {"dCm", GT_AT(dCm), GT_AT(dCm_stride), "BTGN", 'X', "-o-", NULL},
                                        {"dz", GT_AT(dz), GT_AT(dz_stride), "BTD", 'x', "-o-", NULL},
                                        {"dA", GT_AT(dA), 0, "DN", 'f', "-g-", NULL},
                                        {"dDskip", GT_AT(dDskip), 0, "D", 'f', "-g-", NULL},
                                        {"ddt_bias", GT_AT(ddt_bias), 0, "D", 'f', "-g-", NULL},
                                        {"dstate_in", GT_AT(dstate_in), 0, "SDN", 'f', "-o-", "dstate_out"},
                                        {NULL, 0, 0, NULL, 0, NULL, NULL}};
    static const gt_op op = {
        "selective_scan",
        sizeof(gt_selective_scan_args),
        GT_AT(dtype),
        GT_AT(dt_dtype),
        "dt_dtype",
        GT_AT(accumulate),
        sizes,
        tensors,
        gt_selective_scan_resolve,
        GT_CALLS(selective_scan, gt_call_selective_scan_step),
        GT_RECURRENT_FIELDS(0),
        GT_NO_SECOND,
        {GT_AT(state_dtype), GT_AT(parameter_dtype), "parameter_dtype", GT_STATES_OF_BOTH, 0, 0, 0, 0}};
    return &op;
}
#undef GT_AT

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif
