/* gt/conv1d/table.h - describes conv1d to the checks of arguments (plain C, shared with the stubs and the CPU twin). */
#ifndef GT_CONV1D_TABLE_H
#define GT_CONV1D_TABLE_H

#include "../base/op.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Sets J, the inputs that a state holds. */
static gt_status gt_conv1d_resolve_columns(gt_conv1d_args *a, gt_pass pass, gt_dims *dims) {
    const int is_step = pass == GT_STEP || pass == GT_QUERY;
    const gt_stride s = a->state_out_stride;
    const char *const of_steps = a->state_columns ? "state_columns" : a->places ? "places" : NULL;
    if (!is_step && of_steps) return gt_fail(GT_ERROR_VALUE, "%s is set: only the step function uses it", of_steps);
    if (!is_step && !(pass == GT_FORWARD && a->slots) && (s.b || s.t || s.h))
        return gt_fail(GT_ERROR_STRIDE,
                       "state_out_stride is set: only the step function and forward with slots use it");
    if (a->state_columns == 0) a->state_columns = a->W - 1;
    dims->n['J' - 'A'] = a->state_columns;
    return gt_check_range(GT_ERROR_SIZE, "state_columns", a->state_columns, a->W - 1, GT_MAX_SIZE);
}

static gt_status gt_conv1d_resolve(void *filled, gt_pass pass, gt_dims *dims) {
    gt_conv1d_args *a = (gt_conv1d_args *)filled;
    gt_recurrence f = GT_RECURRENCE(a, 0, a->state_in, a->state_out);
    gt_status status;
    GT_TAKE_POOLS(f, a);
    if ((status = gt_check_range(GT_ERROR_SIZE, "W", a->W, 2, 4)) ||
        (status = gt_conv1d_resolve_columns(a, pass, dims)) ||
        (status = gt_check_range(GT_ERROR_VALUE, "activation", (int)a->activation, GT_ACT_NONE, GT_ACT_SILU)) ||
        (status = gt_resolve_recurrent(&f, pass, dims)))
        return status;
    if (pass == GT_STEP || a->slots) a->slot_capacity = dims->n['Q' - 'A'];
    return GT_OK;
}

GT_WRAP_CALLS(conv1d)
GT_WRAP_PASS(conv1d, step)

#define GT_AT(field) offsetof(gt_conv1d_args, field)
GT_API const gt_op *gt_op_conv1d(void) {
    static const gt_size sizes[] = {{'B', "B", GT_AT(B), 0},
                                    {'T', "T", GT_AT(T), 0},
                                    {'D', "D", GT_AT(D), 1},
                                    {'W', "W", GT_AT(W), 2},
                                    {0, NULL, 0, 0}};
    static const gt_tensor tensors[] = {
        {"x", GT_AT(x), GT_AT(x_stride), "BTD", 'x', "III", NULL},
        {"weight", GT_AT(weight), 0, "DW", 'P', "III", NULL},
        {"bias", GT_AT(bias), 0, "D", 'P', "iii", NULL},
        {"y", GT_AT(y), GT_AT(y_stride), "BTD", 'x', "O-O", NULL},
        {"state_out", GT_AT(state_out), GT_AT(state_out_stride), "QDJ", 'S', "o-s", "state_in"},
        {"state_in", GT_AT(state_in), GT_AT(state_out_stride), "SDJ", 'S', "ii-", NULL},
        GT_POOL_TENSORS,
        {"places", GT_AT(places), 0, "B", 'i', "--i", NULL},
        GT_SEQUENCE_TENSORS("ii-"),
        {"dy", GT_AT(dy), GT_AT(dy_stride), "BTD", 'x', "-I-", NULL},
        {"dstate_out", GT_AT(dstate_out), 0, "QDJ", 'f', "-i-", NULL},
        {"dx", GT_AT(dx), GT_AT(dx_stride), "BTD", 'x', "-o-", NULL},
        {"dweight", GT_AT(dweight), 0, "DW", 'f', "-g-", NULL},
        {"dbias", GT_AT(dbias), 0, "D", 'f', "-g-", NULL},
        {"dstate_in", GT_AT(dstate_in), 0, "SDJ", 'f', "-o-", "dstate_out"},
        {NULL, 0, 0, NULL, 0, NULL, NULL}};
    static const gt_op op = {"conv1d",
                             sizeof(gt_conv1d_args),
                             GT_AT(dtype),
                             0,
                             NULL,
                             GT_AT(accumulate),
                             sizes,
                             tensors,
                             gt_conv1d_resolve,
                             GT_CALLS(conv1d, gt_call_conv1d_step),
                             {GT_AT(workspace), GT_AT(workspace_bytes), 0, 0, 0, GT_AT(seq_capacity),
                              GT_AT(slot_capacity), GT_AT(state_in_shared), 0},
                             GT_NO_SECOND,
                             {GT_AT(state_dtype), GT_AT(weight_dtype), "weight_dtype", GT_STATES_OF_BOTH, 0, 0, 0, 0}};
    return &op;
}
#undef GT_AT

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif
