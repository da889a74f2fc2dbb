/* gt/fused/conv_ssd_table.h - describes conv_ssd to the checks of arguments (plain C, shared with the stubs and the CPU
 * twin). */
#ifndef GT_FUSED_CONV_SSD_TABLE_H
#define GT_FUSED_CONV_SSD_TABLE_H

#include "../recurrence/ssm.h"
#include "conv_ssd.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Returns whether the pass has states of the convolution, or their gradients, for each batch element.  A shared state
 * does not count, because it exists only once.  States of the other pass do not count either. */
static int gt_conv_ssd_has_states(const gt_conv_ssd_args *a, gt_pass pass, const gt_dims *dims) {
    const int64_t S = dims->n['S' - 'A'], Q = dims->n['Q' - 'A'];
    const int is_each = S > 1 || (S == 1 && a->B == 1);
    const int is_forward = pass != GT_BACKWARD, is_backward = pass != GT_FORWARD; /* a query is both */
    return (is_each && (a->conv_state_in || (is_backward && a->conv_dstate_in))) ||
           (Q > 0 && ((is_forward && a->conv_state_out) || (is_backward && a->conv_dstate_out)));
}

/* Checks that D, the number of channels, is within the limit of conv1d.  A call without tokens and states may have
 * more, because none of its tensors has a channel. */
static gt_status gt_conv_ssd_check_channels(const gt_conv_ssd_args *a, gt_pass pass, const gt_dims *dims) {
    const int64_t D = gt_conv_ssd_channels(a);
    const int has_tokens = a->B > 0 && a->T > 0;
    if (D <= GT_MAX_SIZE || (!has_tokens && !gt_conv_ssd_has_states(a, pass, dims))) return GT_OK;
    return gt_fail(GT_ERROR_SIZE, "H = %lld, P = %lld, G = %lld, N = %lld: H P + 2 G N is more than 2^40",
                   (long long)a->H, (long long)a->P, (long long)a->G, (long long)a->N);
}

/* A step takes states of fp32 alone, so it has no rounding. */
static gt_status gt_conv_ssd_resolve_rounding(const gt_conv_ssd_args *a, gt_pass pass, gt_dims *dims) {
    if (pass != GT_FORWARD && pass != GT_QUERY && (a->rounding_seed || a->rounding_steps))
        return gt_fail(GT_ERROR_VALUE, "%s is set: only forward uses it",
                       a->rounding_seed ? "rounding_seed" : "rounding_steps");
    return gt_resolve_rounding(a->rounding_seed, a->rounding_steps, a->state_dtype, pass, dims);
}

static gt_status gt_conv_ssd_resolve(void *filled, gt_pass pass, gt_dims *dims) {
    gt_conv_ssd_args *a = (gt_conv_ssd_args *)filled;
    gt_recurrence f = GT_RECURRENCE(a, a->segments, a->state_in, a->state_out);
    gt_status status;
    GT_TAKE_POOLS(f, a);
    dims->n['K' - 'A'] = a->Dskip_per_channel ? a->P : 1; /* columns of Dskip */
    dims->n['J' - 'A'] = a->W - 1;                        /* inputs that a state of the convolution holds */
    if ((status = gt_ssm_resolve_groups(&a->G, "H", a->H, dims)) ||
        (status = gt_check_range(GT_ERROR_SIZE, "W", a->W, 2, 4)) ||
        (status = gt_check_range(GT_ERROR_VALUE, "softplus", a->softplus, 0, 1)) ||
        (status = gt_check_range(GT_ERROR_VALUE, "Dskip_per_channel", a->Dskip_per_channel, 0, 1)) ||
        (status = gt_ssm_check_limits(a->dt_limit, a->dt_min, a->dt_max)) ||
        (status = gt_resolve_recurrent(&f, pass, dims)) ||
        (status = gt_resolve_row_stride("conv_state_out_stride", a->conv_state_out_stride, &f, pass, dims)) ||
        (status = gt_resolve_row_stride("state_out_stride", a->state_out_stride, &f, pass, dims)) ||
        (status = gt_conv_ssd_resolve_rounding(a, pass, dims)) ||
        (status = gt_resolve_snapshots("conv_snapshots", a->conv_snapshots != NULL, a->snapshot_every, pass, dims)) ||
        (status = gt_resolve_snapshots("snapshots", a->snapshots != NULL, a->snapshot_every, pass, dims)) ||
        (status = gt_ssm_check_gate(a->z, a->dz, pass, dims)) || (status = gt_ssm_resolve_y(a->reads_y, &a->y, pass)))
        return status;
    if (pass == GT_STEP && a->conv_state_in && a->conv_state_in != a->conv_state_out)
        return gt_fail(GT_ERROR_VALUE,
                       "conv_state_in = %p: must be NULL or equal conv_state_out, which is updated in place",
                       (const void *)a->conv_state_in);
    if (pass == GT_STEP || a->slots) a->slot_capacity = dims->n['Q' - 'A'];
    dims->n['D' - 'A'] = gt_conv_ssd_channels(a);
    return gt_conv_ssd_check_channels(a, pass, dims);
}

GT_WRAP_CALLS(conv_ssd)
GT_WRAP_PASS(conv_ssd, step)

#define GT_AT(field) offsetof(gt_conv_ssd_args, field)
GT_API const gt_op *gt_op_conv_ssd(void) {
    static const gt_size sizes[] = {{'B', "B", GT_AT(B), 0}, {'T', "T", GT_AT(T), 0}, {'H', "H", GT_AT(H), 1},
                                    {'P', "P", GT_AT(P), 1}, {'N', "N", GT_AT(N), 1}, {'W', "W", GT_AT(W), 2},
                                    {0, NULL, 0, 0}};
    static const gt_tensor tensors[] = {
        {"xBC", GT_AT(xBC), GT_AT(xBC_stride), "BTD", 'x', "III", NULL},
        {"dt", GT_AT(dt), GT_AT(dt_stride), "BTH", 'w', "III", NULL},
        {"z", GT_AT(z), GT_AT(z_stride), "BTHP", 'x', "iii", NULL},
        {"weight", GT_AT(weight), 0, "DW", 'f', "III", NULL},
        {"bias", GT_AT(bias), 0, "D", 'f', "iii", NULL},
        {"A", GT_AT(A), 0, "H", 'f', "III", NULL},
        {"Dskip", GT_AT(Dskip), 0, "HK", 'f', "iii", NULL},
        {"dt_bias", GT_AT(dt_bias), 0, "H", 'f', "iii", NULL},
        {"conv_state_in", GT_AT(conv_state_in), GT_AT(conv_state_out_stride), "SDJ", 'c', "ii", NULL},
        {"state_in", GT_AT(state_in), GT_AT(state_out_stride), "SHPN", 'S', "ii", NULL},
        {"y", GT_AT(y), GT_AT(y_stride), "BTHP", 'x', "OiO", NULL},
        {"conv_state_out", GT_AT(conv_state_out), GT_AT(conv_state_out_stride), "QDJ", 'c', "o-s", "conv_state_in"},
        {"state_out", GT_AT(state_out), GT_AT(state_out_stride), "QHPN", 'S', "o-s", "state_in"},
        GT_POOL_TENSORS,
        GT_INT32_TENSOR(rounding_seed, "Y", "i"),
        GT_INT32_TENSOR(rounding_steps, "L", "i"),
        GT_SEQUENCE_TENSORS("ii"),
        {"conv_snapshots", GT_AT(conv_snapshots), 0, "UDJ", 'c', "o", NULL},
        GT_SNAPSHOT_TENSOR(snapshots, "UHPN"),
        {"dy", GT_AT(dy), GT_AT(dy_stride), "BTHP", 'x', "-I", NULL},
        {"conv_dstate_out", GT_AT(conv_dstate_out), 0, "QDJ", 'f', "-i", NULL},
        {"dstate_out", GT_AT(dstate_out), 0, "QHPN", 'f', "-i", NULL},
        {"dxBC", GT_AT(dxBC), GT_AT(dxBC_stride), "BTD", 'x', "-o", NULL},
        {"ddt", GT_AT(ddt), GT_AT(ddt_stride), "BTH", 'w', "-o", NULL},
        {"dz", GT_AT(dz), GT_AT(dz_stride), "BTHP", 'x', "-o", NULL},
        {"dweight", GT_AT(dweight), 0, "DW", 'f', "-g", NULL},
        {"dbias", GT_AT(dbias), 0, "D", 'f', "-g", NULL},
        {"dA", GT_AT(dA), 0, "H", 'f', "-g", NULL},
        {"ddt_bias", GT_AT(ddt_bias), 0, "H", 'f', "-g", NULL},
        {"dDskip", GT_AT(dDskip), 0, "HK", 'f', "-g", NULL},
        {"conv_dstate_in", GT_AT(conv_dstate_in), 0, "SDJ", 'f', "-o", "conv_dstate_out"},
        {"dstate_in", GT_AT(dstate_in), 0, "SHPN", 'f', "-o", "dstate_out"},
        {NULL, 0, 0, NULL, 0, NULL, NULL}};
    static const gt_op op = {"conv_ssd",
                             sizeof(gt_conv_ssd_args),
                             GT_AT(dtype),
                             GT_AT(dt_dtype),
                             "dt_dtype",
                             GT_AT(accumulate),
                             sizes,
                             tensors,
                             gt_conv_ssd_resolve,
                             GT_CALLS(conv_ssd, gt_call_conv_ssd_step),
                             GT_RECURRENT_FIELDS(0),
                             GT_NO_SECOND,
                             {GT_AT(state_dtype), 0, NULL, GT_STATES_OF_FORWARD, 0, GT_AT(snapshot_dtype),
                              GT_AT(snapshot_every), GT_AT(conv_state_dtype)}};
    return &op;
}
#undef GT_AT

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif
