/* gt/wkv4/table.h - wkv4's table for the argument checks of gt_prepare (plain C, shared with the stubs and the CPU
 * twin). */
#ifndef GT_WKV4_TABLE_H
#define GT_WKV4_TABLE_H

#include "../base/op.h"

#ifdef __cplusplus
extern "C" {
#endif

static gt_status gt_wkv4_resolve(void *filled, gt_pass pass, gt_dims *dims) {
    gt_wkv4_args *a = (gt_wkv4_args *)filled;
    gt_recurrence f = GT_RECURRENCE(a, a->segments, a->state_in, a->state_out);
    gt_status status;
    dims->n['K' - 'A'] = 3; /* a, b and p */
    if ((status = gt_check_range(GT_ERROR_VALUE, "decay", (int)a->decay, GT_DECAY_RAW, GT_DECAY_LOG)) ||
        (status = gt_check_reserved("state_dtype", (int)a->state_dtype)) ||
        (status = gt_resolve_recurrent(&f, pass, dims)))
        return status;
    if (pass == GT_STEP) a->slot_capacity = dims->n['Q' - 'A'];
    return GT_OK;
}

GT_WRAP_CALLS(wkv4)
GT_WRAP_PASS(wkv4, step)

#define GT_AT(field) offsetof(gt_wkv4_args, field)
GT_API const gt_op *gt_op_wkv4(void) {
    static const gt_size sizes[] = {
        {'B', "B", GT_AT(B), 0}, {'T', "T", GT_AT(T), 0}, {'D', "D", GT_AT(D), 1}, {0, NULL, 0, 0}};
    static const gt_tensor tensors[] = {{"k", GT_AT(k), GT_AT(k_stride), "BTD", 'x', "III", NULL},
                                        {"v", GT_AT(v), GT_AT(v_stride), "BTD", 'x', "III", NULL},
                                        {"w", GT_AT(w), 0, "D", 'f', "III", NULL},
                                        {"u", GT_AT(u), 0, "D", 'f', "iii", NULL},
                                        {"state_in", GT_AT(state_in), 0, "SKD", 'f', "ii-", NULL},
                                        {"y", GT_AT(y), GT_AT(y_stride), "BTD", 'x', "O-O", NULL},
                                        {"state_out", GT_AT(state_out), 0, "QKD", 'f', "o-s", "state_in"},
                                        GT_STEP_TENSORS,
                                        GT_SEQUENCE_TENSORS("ii-"),
                                        {"dy", GT_AT(dy), GT_AT(dy_stride), "BTD", 'x', "-I-", NULL},
                                        {"dstate_out", GT_AT(dstate_out), 0, "QKD", 'f', "-i-", NULL},
                                        {"dk", GT_AT(dk), GT_AT(dk_stride), "BTD", 'x', "-o-", NULL},
                                        {"dv", GT_AT(dv), GT_AT(dv_stride), "BTD", 'x', "-o-", NULL},
                                        {"dw", GT_AT(dw), 0, "D", 'f', "-g-", NULL},
                                        {"du", GT_AT(du), 0, "D", 'f', "-g-", NULL},
                                        {"dstate_in", GT_AT(dstate_in), 0, "SKD", 'f', "-o-", "dstate_out"},
                                        {NULL, 0, 0, NULL, 0, NULL, NULL}};
    static const gt_op op = {"wkv4",
                             sizeof(gt_wkv4_args),
                             GT_AT(dtype),
                             0,
                             NULL,
                             GT_AT(accumulate),
                             sizes,
                             tensors,
                             gt_wkv4_resolve,
                             GT_CALLS(wkv4, gt_call_wkv4_step),
                             GT_RECURRENT_FIELDS(0),
                             GT_NO_SECOND,
                             GT_NO_STEP_DTYPES};
    return &op;
}
#undef GT_AT

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif
