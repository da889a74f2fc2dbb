/* gt/ssd/table.h - describes the sizes and tensors of ssd, for the checks of arguments.  It is plain C, because the
 * stubs and the CPU twin (the reference implementation) use it, too. */
#ifndef GT_SSD_TABLE_H
#define GT_SSD_TABLE_H

#include "../recurrence/ssm.h"

#ifdef __cplusplus
extern "C" {
#endif

static gt_status gt_ssd_resolve(void *filled, gt_pass pass, gt_dims *dims) {
    gt_ssd_args *a = (gt_ssd_args *)filled;
    gt_recurrence f = GT_RECURRENCE(a, a->segments, a->state_in, a->state_out);
    gt_status status;
    GT_TAKE_POOLS(f, a);
    dims->n['K' - 'A'] = a->Dskip_per_channel ? a->P : 1; /* columns of Dskip */
    if ((status = gt_ssm_resolve_groups(&a->G, "H", a->H, dims)) ||
        (status = gt_check_range(GT_ERROR_VALUE, "softplus", a->softplus, 0, 1)) ||
        (status = gt_check_range(GT_ERROR_VALUE, "Dskip_per_channel", a->Dskip_per_channel, 0, 1)) ||
        (status = gt_ssm_check_limits(a->dt_limit, a->dt_min, a->dt_max)) ||
        (status = gt_resolve_recurrent(&f, pass, dims)) ||
        (status = gt_resolve_row_stride("state_out_stride", a->state_out_stride, &f, pass, dims)) ||
        (status = gt_ssm_check_gate(a->z, a->dz, pass, dims)) || (status = gt_ssm_resolve_y(a->reads_y, &a->y, pass)) ||
        (status = gt_resolve_scale(a->state_scale, a->state_scale_stride, a->state_dtype, 1, pass, dims)) ||
        (status = gt_resolve_rounding(a->rounding_seed, a->rounding_steps, a->state_dtype, pass, dims)) ||
        (status = gt_resolve_snapshots("snapshots", a->snapshots != NULL, a->snapshot_every, pass, dims)) ||
        (status = gt_resolve_pieces(&a->pieces, &a->T, pass, dims)))
        return status;
    dims->n['Z' - 'A'] = gt_times(a->P, a->N); /* numbers of a head's state, which share one decay */
    if (pass == GT_STEP || a->slots) a->slot_capacity = dims->n['Q' - 'A'];
    return GT_OK;
}

GT_WRAP_CALLS(ssd)
GT_WRAP_PASS(ssd, step)
GT_WRAP_PIECES(ssd)

#define GT_AT(field) offsetof(gt_ssd_args, field)
GT_API const gt_op *gt_op_ssd(void) {
    static const gt_size sizes[] = {{'B', "B", GT_AT(B), 0}, {'T', "T", GT_AT(T), 0}, {'H', "H", GT_AT(H), 1},
                                    {'P', "P", GT_AT(P), 1}, {'N', "N", GT_AT(N), 1}, {0, NULL, 0, 0}};
    static const gt_tensor tensors[] = {
        {"x", GT_AT(x), GT_AT(x_stride), "BTHP", 'x', "IIII", NULL},
        {"dt", GT_AT(dt), GT_AT(dt_stride), "BTH", 'w', "IIIII", NULL},
        {"A", GT_AT(A), 0, "H", 'f', "IIIII", NULL},
        {"Bm", GT_AT(Bm), GT_AT(Bm_stride), "BTGN", 'x', "IIII", NULL},
        {"Cm", GT_AT(Cm), GT_AT(Cm_stride), "BTGN", 'x', "III-I", NULL},
        {"Dskip", GT_AT(Dskip), 0, "HK", 'P', "iii", NULL},
        {"z", GT_AT(z), GT_AT(z_stride), "BTHP", 'x', "iii-i", NULL},
        {"dt_bias", GT_AT(dt_bias), 0, "H", 'P', "iiiii", NULL},
        {"state_in", GT_AT(state_in), GT_AT(state_out_stride), "SHPN", 'S', "ii---i", NULL},
        {"y", GT_AT(y), GT_AT(y_stride), "BTHP", 'x', "OiO", NULL},
        {"state_out", GT_AT(state_out), GT_AT(state_out_stride), "QHPN", 'S', "o-sO", "state_in"},
        GT_POOL_TENSORS,
        GT_ROUNDING_TENSORS,
        GT_SCALE_TENSOR("QHPI"),
        GT_SEQUENCE_TENSORS("ii-ii"),
        GT_SNAPSHOT_TENSOR(snapshots, "UHPN"),
        {"dy", GT_AT(dy), GT_AT(dy_stride), "BTHP", 'x', "-I--I", NULL},
        {"dstate_out", GT_AT(dstate_out), 0, "QHPN", 'f', "-i----i", NULL},
        {"dx", GT_AT(dx), GT_AT(dx_stride), "BTHP", 'x', "-o-", NULL},
        {"ddt", GT_AT(ddt), GT_AT(ddt_stride), "BTH", 'w', "-o-", NULL},
        {"dBm", GT_AT(dBm), GT_AT(dBm_stride), "BTGN", 'x', "-o-", NULL},
        {"dCm", GT_AT(dCm), GT_AT(dCm_stride), "BTGN", 'x', "-o-", NULL},
        {"dz", GT_AT(dz), GT_AT(dz_stride), "BTHP", 'x', "-o-", NULL},
        {"dA", GT_AT(dA), 0, "H", 'f', "-g-", NULL},
        {"dDskip", GT_AT(dDskip), 0, "HK", 'f', "-g-", NULL},
        {"ddt_bias", GT_AT(ddt_bias), 0, "H", 'f', "-g-", NULL},
        {"dstate_in", GT_AT(dstate_in), 0, "SHPN", 'f', "-o--O", "dstate_out"},
        {"decay_out", GT_AT(decay_out), 0, "QH", 'f', "---Oo", NULL},
        {"piece_states", GT_AT(piece_states), 0, "RBHZ", 'f', "-----II", NULL},
        {"piece_decays", GT_AT(piece_decays), 0, "RBH", 'f', "-----II", NULL},
        {"piece_starts", GT_AT(piece_starts), 0, "RBHZ", 'f', "-----OO", "piece_states"},
        {NULL, 0, 0, NULL, 0, NULL, NULL}};
    static const gt_op op = {"ssd",
                             sizeof(gt_ssd_args),
                             GT_AT(dtype),
                             GT_AT(dt_dtype),
                             "dt_dtype",
                             GT_AT(accumulate),
                             sizes,
                             tensors,
                             gt_ssd_resolve,
                             GT_CALLS(ssd, GT_STEP_AND_PIECES(ssd)),
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
