/* gt/wkv6/table.h - wkv6's table for the argument checks of gt_prepare (plain C, shared with the stubs and the CPU
 * twin). */
#ifndef GT_WKV6_TABLE_H
#define GT_WKV6_TABLE_H

#include "../base/op.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Kernels compute the logarithm of scale, and multiply by scale.  The products must stay in the range of fp32, so scale
 * must be neither too small nor too large. */
static gt_status gt_wkv6_check_scale(float scale) {
    if (scale >= 1 / 4294967296.0f && scale <= 4294967296.0f) return GT_OK;
    return gt_fail(GT_ERROR_VALUE, "scale = %g: must be 0, or 2^-32 to 2^32", (double)scale);
}

static gt_status gt_wkv6_resolve(void *filled, gt_pass pass, gt_dims *dims) {
    gt_wkv6_args *a = (gt_wkv6_args *)filled;
    gt_recurrence f = GT_RECURRENCE(a, a->segments, a->state_in, a->state_out);
    gt_status status;
    GT_TAKE_POOLS(f, a);
    if (a->V == 0) a->V = a->N;
    if (a->scale == 0) a->scale = 1;
    dims->n['V' - 'A'] = a->V;
    if ((status = gt_check_range(GT_ERROR_SIZE, "V", a->V, 1, GT_MAX_SIZE)) ||
        (status = gt_check_range(GT_ERROR_VALUE, "decay", (int)a->decay, GT_DECAY_RAW, GT_DECAY_LOG)) ||
        (status = gt_wkv6_check_scale(a->scale)) || (status = gt_resolve_recurrent(&f, pass, dims)) ||
        (status = gt_resolve_row_stride("state_out_stride", a->state_out_stride, &f, pass, dims)) ||
        (status = gt_resolve_scale(a->state_scale, a->state_scale_stride, a->state_dtype, gt_plus(a->V, 63) / 64, pass,
                                   dims)) ||
        (status = gt_resolve_rounding(a->rounding_seed, a->rounding_steps, a->state_dtype, pass, dims)) ||
        (status = gt_resolve_snapshots("snapshots", a->snapshots != NULL, a->snapshot_every, pass, dims)) ||
        (status = gt_resolve_pieces(&a->pieces, &a->T, pass, dims)))
        return status;
    dims->n['Z' - 'A'] = gt_times(a->H, a->N); /* rows of states, each with a decay */
    if (pass == GT_STEP || a->slots) a->slot_capacity = dims->n['Q' - 'A'];
    return GT_OK;
}

GT_WRAP_CALLS(wkv6)
GT_WRAP_PASS(wkv6, step)
GT_WRAP_PIECES(wkv6)

#define GT_AT(field) offsetof(gt_wkv6_args, field)
GT_API const gt_op *gt_op_wkv6(void) {
    static const gt_size sizes[] = {{'B', "B", GT_AT(B), 0},
                                    {'T', "T", GT_AT(T), 0},
                                    {'H', "H", GT_AT(H), 1},
                                    {'N', "N", GT_AT(N), 1},
                                    {0, NULL, 0, 0}};
    static const gt_tensor tensors[] = {
        {"r", GT_AT(r), GT_AT(r_stride), "BTHN", 'x', "III-I", NULL},
        {"k", GT_AT(k), GT_AT(k_stride), "BTHN", 'x', "IIII", NULL},
        {"w", GT_AT(w), GT_AT(w_stride), "BTHN", 'w', "IIIII", NULL},
        {"v", GT_AT(v), GT_AT(v_stride), "BTHV", 'x', "IIII", NULL},
        {"u", GT_AT(u), 0, "HN", 'P', "iii", NULL},
        {"state_in", GT_AT(state_in), GT_AT(state_out_stride), "SHNV", 'S', "ii---i", NULL},
        {"y", GT_AT(y), GT_AT(y_stride), "BTHV", 'x', "O-O", NULL},
        {"state_out", GT_AT(state_out), GT_AT(state_out_stride), "QHNV", 'S', "o-sO", "state_in"},
        GT_POOL_TENSORS,
        GT_ROUNDING_TENSORS,
        GT_SCALE_TENSOR("QHNI"),
        GT_SEQUENCE_TENSORS("ii-ii"),
        GT_SNAPSHOT_TENSOR(snapshots, "UHNV"),
        {"dy", GT_AT(dy), GT_AT(dy_stride), "BTHV", 'x', "-I--I", NULL},
        {"dstate_out", GT_AT(dstate_out), 0, "QHNV", 'f', "-i----i", NULL},
        {"dr", GT_AT(dr), GT_AT(dr_stride), "BTHN", 'x', "-o-", NULL},
        {"dk", GT_AT(dk), GT_AT(dk_stride), "BTHN", 'x', "-o-", NULL},
        {"dw", GT_AT(dw), GT_AT(dw_stride), "BTHN", 'w', "-o-", NULL},
        {"dv", GT_AT(dv), GT_AT(dv_stride), "BTHV", 'x', "-o-", NULL},
        {"du", GT_AT(du), 0, "HN", 'f', "-g-", NULL},
        {"dstate_in", GT_AT(dstate_in), 0, "SHNV", 'f', "-o--O", "dstate_out"},
        {"decay_out", GT_AT(decay_out), 0, "QHN", 'f', "---Oo", NULL},
        {"piece_states", GT_AT(piece_states), 0, "RBZV", 'f', "-----II", NULL},
        {"piece_decays", GT_AT(piece_decays), 0, "RBZ", 'f', "-----II", NULL},
        {"piece_starts", GT_AT(piece_starts), 0, "RBZV", 'f', "-----OO", "piece_states"},
        {NULL, 0, 0, NULL, 0, NULL, NULL}};
    static const gt_op op = {"wkv6",
                             sizeof(gt_wkv6_args),
                             GT_AT(dtype),
                             GT_AT(w_dtype),
                             "w_dtype",
                             GT_AT(accumulate),
                             sizes,
                             tensors,
                             gt_wkv6_resolve,
                             GT_CALLS(wkv6, GT_STEP_AND_PIECES(wkv6)),
                             GT_RECURRENT_FIELDS(GT_AT(pieces)),
                             GT_NO_SECOND,
                             {GT_AT(state_dtype), GT_AT(parameter_dtype), "parameter_dtype", GT_STATES_OF_BOTH,
                              GT_AT(state_scale), GT_AT(snapshot_dtype), GT_AT(snapshot_every), 0}};
    return &op;
}
#undef GT_AT

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif
