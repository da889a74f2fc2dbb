/* gt/fused/wkv_ssm_table.h - describes wkv_ssm to the checks of arguments (plain C, shared with the stubs and the CPU
 * twin).  The table joins the tables of wkv6 and ssd.  Its tensors are fields of the inner structs.  Sizes that only
 * ssd has are written in small letters.
 *
 * There are two tables of one struct.  Calls with `mixed`, or in backward with `dmixed`, have the second one, because
 * they require other tensors.  gt_op_of_wkv_ssm (wkv_ssm.h) chooses the table of a call.
 *
 * Fields that both operators share are only in the outer struct.  gt_wkv_ssm_share copies them to the inner structs;
 * then the checks of both operators run. */
#ifndef GT_FUSED_WKV_SSM_TABLE_H
#define GT_FUSED_WKV_SSM_TABLE_H

#include "wkv_ssm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Checks that these fields of an inner struct are 0.  Each list begins with the fields that the outer struct has, too.
 * The other fields belong to functions that wkv_ssm lacks. */
#define GT_WKV_SSM_CHECK_ZEROS(x)                                                                                      \
    static gt_status gt_wkv_ssm_check_##x(const gt_##x##_args *a) {                                                    \
        const struct {                                                                                                 \
            const char *name;                                                                                          \
            int64_t value;                                                                                             \
        } numbers[] = {{"B", a->B},                                                                                    \
                       {"T", a->T},                                                                                    \
                       {"dtype", a->dtype},                                                                            \
                       {"state_in_shared", a->state_in_shared},                                                        \
                       {"accumulate", a->accumulate},                                                                  \
                       {"segments", a->segments},                                                                      \
                       {"seq_capacity", a->seq_capacity},                                                              \
                       {"slot_capacity", a->slot_capacity},                                                            \
                       {"saved_bytes", (int64_t)(a->saved_bytes != 0)},                                                \
                       {"workspace_bytes", (int64_t)(a->workspace_bytes != 0)},                                        \
                       {"pieces", a->pieces},                                                                          \
                       {"state_out_stride", a->state_out_stride},                                                      \
                       {"state_dtype", a->state_dtype},                                                                \
                       {"parameter_dtype", a->parameter_dtype},                                                        \
                       {"snapshot_every", a->snapshot_every},                                                          \
                       {"snapshot_dtype", a->snapshot_dtype},                                                          \
                       {"state_scale_stride", a->state_scale_stride}};                                                 \
        const struct {                                                                                                 \
            const char *name;                                                                                          \
            const void *value;                                                                                         \
        } pointers[] = {{"cu_seqlens", a->cu_seqlens},                                                                 \
                        {"seq_count", a->seq_count},                                                                   \
                        {"slots", a->slots},                                                                           \
                        {"tokens", a->tokens},                                                                         \
                        {"commit", a->commit},                                                                         \
                        {"saved", a->saved},                                                                           \
                        {"workspace", a->workspace},                                                                   \
                        {"decay_out", a->decay_out},                                                                   \
                        {"piece_states", a->piece_states},                                                             \
                        {"piece_decays", a->piece_decays},                                                             \
                        {"starts_zero", a->starts_zero},                                                               \
                        {"rounding_seed", a->rounding_seed},                                                           \
                        {"rounding_steps", a->rounding_steps},                                                         \
                        {"state_scale", a->state_scale},                                                               \
                        {"snapshots", a->snapshots},                                                                   \
                        {"piece_starts", a->piece_starts}};                                                            \
        for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)                                                \
            if (numbers[i].value)                                                                                      \
                return gt_fail(GT_ERROR_VALUE, "%s is set: it must be 0 in an inner struct of wkv_ssm%s",              \
                               numbers[i].name, i < 10 ? "; set it in gt_wkv_ssm_args" : "");                          \
        for (size_t i = 0; i < sizeof pointers / sizeof pointers[0]; i++)                                              \
            if (pointers[i].value)                                                                                     \
                return gt_fail(GT_ERROR_VALUE, "%s is set: it must be NULL in an inner struct of wkv_ssm%s",           \
                               pointers[i].name, i < 7 ? "; set it in gt_wkv_ssm_args" : "");                          \
        return GT_OK;                                                                                                  \
    }

GT_WKV_SSM_CHECK_ZEROS(wkv6)
GT_WKV_SSM_CHECK_ZEROS(ssd)
#undef GT_WKV_SSM_CHECK_ZEROS

/* Copies the shared fields to an inner struct. */
#define GT_WKV_SSM_SHARE(all, one)                                                                                     \
    ((one)->B = (all)->B, (one)->T = (all)->T, (one)->dtype = (all)->dtype,                                            \
     (one)->state_in_shared = (all)->state_in_shared, (one)->accumulate = (all)->accumulate,                           \
     (one)->segments = (all)->segments, (one)->cu_seqlens = (all)->cu_seqlens, (one)->seq_count = (all)->seq_count,    \
     (one)->seq_capacity = (all)->seq_capacity, (one)->slots = (all)->slots,                                           \
     (one)->slot_capacity = (all)->slot_capacity, (one)->tokens = (all)->tokens, (one)->commit = (all)->commit)

/* Fills the inner structs as for a call of each operator, but leaves their `saved` and `workspace` NULL. */
static inline void gt_wkv_ssm_share(gt_wkv_ssm_args *a) {
    GT_WKV_SSM_SHARE(a, &a->wkv6);
    GT_WKV_SSM_SHARE(a, &a->ssd);
}
#undef GT_WKV_SSM_SHARE

static gt_status gt_wkv_ssm_resolve_parts(gt_wkv_ssm_args *a, gt_pass pass, gt_dims *dims) {
    gt_dims inner = *dims;
    gt_status status;
    gt_enter_part("wkv6.");
    if ((status = gt_wkv_ssm_check_wkv6(&a->wkv6)) != GT_OK) return status;
    gt_enter_part("ssd.");
    if ((status = gt_wkv_ssm_check_ssd(&a->ssd)) != GT_OK) return status;
    gt_wkv_ssm_share(a);
    gt_enter_part("wkv6.");
    if ((status = gt_op_wkv6()->resolve(&a->wkv6, pass, &inner)) != GT_OK) return status;
    dims->n['V' - 'A'] = inner.n['V' - 'A'];
    gt_enter_part("ssd.");
    if ((status = gt_op_ssd()->resolve(&a->ssd, pass, &inner)) != GT_OK) return status;
    dims->n['g' - 'A'] = inner.n['G' - 'A'];
    dims->n['k' - 'A'] = inner.n['K' - 'A'];
    gt_enter_part("");
    return GT_OK;
}

static gt_status gt_wkv_ssm_resolve_both(gt_wkv_ssm_args *a, gt_pass pass, gt_dims *dims) {
    gt_recurrence f = GT_RECURRENCE(a, a->segments, NULL, NULL);
    const gt_status status = gt_resolve_recurrent(&f, pass, dims);
    return status != GT_OK ? status : gt_wkv_ssm_resolve_parts(a, pass, dims);
}

/* Refuses fields of a mixed call in any other call: a caller who sets them expects a sum. */
static gt_status gt_wkv_ssm_resolve(void *filled, gt_pass pass, gt_dims *dims) {
    gt_wkv_ssm_args *a = (gt_wkv_ssm_args *)filled;
    const char *const sum = pass == GT_BACKWARD ? "dmixed" : "mixed";
    const struct {
        const char *name;
        const void *value;
    } fields[] = {{"gain_wkv", a->gain_wkv},
                  {"gain_ssm", a->gain_ssm},
                  {"residual", a->residual},
                  {"dgain_wkv", a->dgain_wkv},
                  {"dgain_ssm", a->dgain_ssm}};
    const int has_tokens = dims->n['B' - 'A'] && dims->n['T' - 'A']; /* otherwise the sum has no elements */
    for (size_t i = 0; pass < GT_PASSES && has_tokens && i < sizeof fields / sizeof fields[0]; i++)
        if (fields[i].value) return gt_fail(GT_ERROR_NULL, "%s is NULL, but %s is set", sum, fields[i].name);
    return gt_wkv_ssm_resolve_both(a, pass, dims);
}

static gt_status gt_wkv_ssm_resolve_mixed(void *filled, gt_pass pass, gt_dims *dims) {
    gt_wkv_ssm_args *a = (gt_wkv_ssm_args *)filled;
    const int is_backward = pass == GT_BACKWARD;
    void *const y = a->ssd.y;
    const gt_status status = gt_wkv_ssm_resolve_both(a, pass, dims);
    if (status != GT_OK) return status;
    a->ssd.y = y; /* ssd forgets a y that it does not read, but dgain_ssm needs it */
    const int64_t width = gt_times(a->wkv6.H, a->wkv6.V);
    if (width != gt_times(a->ssd.H, a->ssd.P))
        return gt_fail(GT_ERROR_SIZE,
                       "wkv6.H = %lld, wkv6.V = %lld, ssd.H = %lld, ssd.P = %lld: H V must equal H P to "
                       "mix the branches",
                       (long long)a->wkv6.H, (long long)a->wkv6.V, (long long)a->ssd.H, (long long)a->ssd.P);
    if (is_backward && (a->wkv6.dy || a->ssd.dy))
        return gt_fail(GT_ERROR_VALUE, "%s is set: must be NULL, because dmixed is set",
                       a->wkv6.dy ? "wkv6.dy" : "ssd.dy");
    if (is_backward && dims->n['B' - 'A'] && dims->n['T' - 'A'] &&
        ((a->dgain_wkv && !a->wkv6.y) || (a->dgain_ssm && !a->ssd.y)))
        return gt_fail(GT_ERROR_NULL, "%s is NULL, but dgain_%s is set",
                       a->dgain_wkv && !a->wkv6.y ? "wkv6.y" : "ssd.y", a->dgain_wkv && !a->wkv6.y ? "wkv" : "ssm");
    return GT_OK;
}

GT_WRAP_CALLS(wkv_ssm)
GT_WRAP_PASS(wkv_ssm, step)

#define GT_AT(field) offsetof(gt_wkv_ssm_args, field)
#define GT_TENSOR(x, strided, shape, kind, use, may_equal)                                                             \
    { #x, GT_AT(x), strided, shape, kind, use, may_equal }
#define GT_STRIDED(x, shape, kind, use) GT_TENSOR(x, GT_AT(x##_stride), shape, kind, use, NULL)
#define GT_PACKED(x, shape, kind, use) GT_TENSOR(x, 0, shape, kind, use, NULL)
#define GT_WKV_SSM_SIZES                                                                                               \
    {'B', "B", GT_AT(B), 0}, {'T', "T", GT_AT(T), 0}, {'H', "wkv6.H", GT_AT(wkv6.H), 1},                               \
        {'N', "wkv6.N", GT_AT(wkv6.N), 1}, {'h', "ssd.H", GT_AT(ssd.H), 1}, {'p', "ssd.P", GT_AT(ssd.P), 1},           \
        {'n', "ssd.N", GT_AT(ssd.N), 1}, {                                                                             \
        0, NULL, 0, 0                                                                                                  \
    }
/* The tensors of both tables, in their order.  wkv_y: the uses of wkv6.y. */
#define GT_WKV_SSM_FORWARD_TENSORS(wkv_y)                                                                              \
    GT_STRIDED(wkv6.r, "BTHN", 'x', "III"), GT_STRIDED(wkv6.k, "BTHN", 'x', "III"),                                    \
        GT_STRIDED(wkv6.w, "BTHN", 'w', "III"), GT_STRIDED(wkv6.v, "BTHV", 'x', "III"),                                \
        GT_PACKED(wkv6.u, "HN", 'f', "iii"), GT_PACKED(wkv6.state_in, "SHNV", 'f', "ii"),                              \
        GT_STRIDED(wkv6.y, "BTHV", 'x', wkv_y), GT_TENSOR(wkv6.state_out, 0, "QHNV", 'f', "o-s", "wkv6.state_in"),     \
        GT_STRIDED(ssd.x, "BThp", 'x', "III"), GT_STRIDED(ssd.dt, "BTh", 'd', "III"),                                  \
        GT_PACKED(ssd.A, "h", 'f', "III"), GT_STRIDED(ssd.Bm, "BTgn", 'x', "III"),                                     \
        GT_STRIDED(ssd.Cm, "BTgn", 'x', "III"), GT_PACKED(ssd.Dskip, "hk", 'f', "iii"),                                \
        GT_STRIDED(ssd.z, "BThp", 'x', "iii"), GT_PACKED(ssd.dt_bias, "h", 'f', "iii"),                                \
        GT_PACKED(ssd.state_in, "Shpn", 'f', "ii"), GT_STRIDED(ssd.y, "BThp", 'x', "OiO"),                             \
        GT_TENSOR(ssd.state_out, 0, "Qhpn", 'f', "o-s", "ssd.state_in"), GT_STEP_TENSORS, GT_SEQUENCE_TENSORS("ii")
#define GT_WKV_SSM_WKV_GRADIENTS                                                                                       \
    GT_PACKED(wkv6.dstate_out, "QHNV", 'f', "-i"), GT_STRIDED(wkv6.dr, "BTHN", 'x', "-o"),                             \
        GT_STRIDED(wkv6.dk, "BTHN", 'x', "-o"), GT_STRIDED(wkv6.dw, "BTHN", 'w', "-o"),                                \
        GT_STRIDED(wkv6.dv, "BTHV", 'x', "-o"), GT_PACKED(wkv6.du, "HN", 'f', "-g"),                                   \
        GT_TENSOR(wkv6.dstate_in, 0, "SHNV", 'f', "-o", "wkv6.dstate_out")
#define GT_WKV_SSM_SSD_GRADIENTS                                                                                       \
    GT_PACKED(ssd.dstate_out, "Qhpn", 'f', "-i"), GT_STRIDED(ssd.dx, "BThp", 'x', "-o"),                               \
        GT_STRIDED(ssd.ddt, "BTh", 'd', "-o"), GT_STRIDED(ssd.dBm, "BTgn", 'x', "-o"),                                 \
        GT_STRIDED(ssd.dCm, "BTgn", 'x', "-o"), GT_STRIDED(ssd.dz, "BThp", 'x', "-o"),                                 \
        GT_PACKED(ssd.dA, "h", 'f', "-g"), GT_PACKED(ssd.dDskip, "hk", 'f', "-g"),                                     \
        GT_PACKED(ssd.ddt_bias, "h", 'f', "-g"), GT_TENSOR(ssd.dstate_in, 0, "Shpn", 'f', "-o", "ssd.dstate_out")
#define GT_WKV_SSM_OP(resolve)                                                                                         \
    {                                                                                                                  \
        "wkv_ssm", sizeof(gt_wkv_ssm_args), GT_AT(dtype), GT_AT(wkv6.w_dtype), "wkv6.w_dtype", GT_AT(accumulate),      \
            sizes, tensors, resolve, GT_CALLS(wkv_ssm, gt_call_wkv_ssm_step), GT_RECURRENT_FIELDS(0),                  \
            {"ssd.dt_dtype", GT_AT(ssd.dt_dtype)}, GT_NO_STEP_DTYPES                                                   \
    }
GT_API const gt_op *gt_op_wkv_ssm(void) {
    static const gt_size sizes[] = {GT_WKV_SSM_SIZES};
    static const gt_tensor tensors[] = {GT_WKV_SSM_FORWARD_TENSORS("O-O"), GT_STRIDED(wkv6.dy, "BTHV", 'x', "-I"),
                                        GT_WKV_SSM_WKV_GRADIENTS,          GT_STRIDED(ssd.dy, "BThp", 'x', "-I"),
                                        GT_WKV_SSM_SSD_GRADIENTS,          {NULL, 0, 0, NULL, 0, NULL, NULL}};
    static const gt_op op = GT_WKV_SSM_OP(gt_wkv_ssm_resolve);
    return &op;
}

GT_API const gt_op *gt_op_wkv_ssm_mixed(void) {
    static const gt_size sizes[] = {GT_WKV_SSM_SIZES};
    static const gt_tensor tensors[] = {GT_WKV_SSM_FORWARD_TENSORS("oio"),
                                        GT_PACKED(gain_wkv, "HV", 'f', "iii"),
                                        GT_PACKED(gain_ssm, "hp", 'f', "iii"),
                                        GT_STRIDED(residual, "BTHV", 'x', "i-i"),
                                        GT_TENSOR(mixed, GT_AT(mixed_stride), "BTHV", 'x', "O-O", "residual"),
                                        GT_STRIDED(dmixed, "BTHV", 'x', "-I"),
                                        GT_PACKED(dgain_wkv, "HV", 'f', "-g"),
                                        GT_PACKED(dgain_ssm, "hp", 'f', "-g"),
                                        GT_WKV_SSM_WKV_GRADIENTS,
                                        GT_WKV_SSM_SSD_GRADIENTS,
                                        {NULL, 0, 0, NULL, 0, NULL, NULL}};
    static const gt_op op = GT_WKV_SSM_OP(gt_wkv_ssm_resolve_mixed);
    return &op;
}
#undef GT_WKV_SSM_SIZES
#undef GT_WKV_SSM_FORWARD_TENSORS
#undef GT_WKV_SSM_WKV_GRADIENTS
#undef GT_WKV_SSM_SSD_GRADIENTS
#undef GT_WKV_SSM_OP
#undef GT_PACKED
#undef GT_STRIDED
#undef GT_TENSOR
#undef GT_AT

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif
