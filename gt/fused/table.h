/* gt/fused/table.h - describes rmsnorm_linear, norm_mix, norm_gate and add_norm to the checks of arguments (plain C,
 * shared with the stubs and the CPU twins). */
#ifndef GT_FUSED_TABLE_H
#define GT_FUSED_TABLE_H

#include "../base/op.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- fields that the operators share --------------------------------------------------------- */

/* Read as unsigned integers, finite positive floats are below 0x7f800000; negative floats, infinity and NaN are not.
 * So one comparison refuses all of these, even if the compiler may assume that there is no NaN. */
static gt_status gt_resolve_eps(float *eps) {
    if (*eps == 0) *eps = 1e-5f;
    if (gt_float_bits(*eps) < 0x7f800000u) return GT_OK;
    return gt_fail(GT_ERROR_VALUE, "eps = %g: must be positive and finite, or 0 for 1e-5", *eps);
}

static gt_status gt_resolve_norm(gt_norm norm) {
    return gt_check_range(GT_ERROR_VALUE, "norm", (int)norm, GT_NORM_RMS, GT_NORM_LAYER);
}

/* Sets H, the number of slices in a row of D. */
static gt_status gt_resolve_slices(int64_t *H, int64_t D) {
    gt_status status;
    if (*H == 0) *H = 1;
    if ((status = gt_check_range(GT_ERROR_SIZE, "H", *H, 1, GT_MAX_SIZE)) != GT_OK) return status;
    if (D % *H == 0) return GT_OK;
    return gt_fail(GT_ERROR_SIZE, "D = %lld: must be a multiple of H = %lld", (long long)D, (long long)*H);
}

/* ---- rmsnorm_linear: the operator's table ---------------------------------------------------- */

#define GT_STEP_ROWS 64 /* a step takes at most this many rows */

static gt_status gt_rmsnorm_linear_resolve(void *filled, gt_pass pass, gt_dims *dims) {
    gt_rmsnorm_linear_args *a = (gt_rmsnorm_linear_args *)filled;
    gt_status status;
    (void)dims;
    if (pass == GT_STEP && (status = gt_check_range(GT_ERROR_SIZE, "M", a->M, 0, GT_STEP_ROWS)) != GT_OK) return status;
    if ((status = gt_resolve_norm(a->norm)) != GT_OK) return status;
    if ((pass == GT_FORWARD || pass == GT_BACKWARD) && a->M > 0 && !a->weight && a->weight_int8)
        return gt_fail(GT_ERROR_NULL, "weight is NULL: only the step function reads weight_int8");
    return gt_resolve_eps(&a->eps);
}

GT_WRAP_CALLS(rmsnorm_linear)
GT_WRAP_PASS(rmsnorm_linear, step)

#define GT_AT(field) offsetof(gt_rmsnorm_linear_args, field)
GT_API const gt_op *gt_op_rmsnorm_linear(void) {
    static const gt_size sizes[] = {
        {'M', "M", GT_AT(M), 0}, {'D', "D", GT_AT(D), 1}, {'O', "O", GT_AT(O), 1}, {0, NULL, 0, 0}};
    static const gt_tensor tensors[] = {{"x", GT_AT(x), GT_AT(x_stride), "MD", 'x', "III", NULL},
                                        {"weight", GT_AT(weight), 0, "OD", 'x', "II-", NULL},
                                        {"weight_int8", GT_AT(weight_int8), 0, "OD", 'b', "--I", NULL},
                                        {"weight_scale", GT_AT(weight_scale), 0, "O", 'f', "--I", NULL},
                                        {"gamma", GT_AT(gamma), 0, "D", 'f', "iii", NULL},
                                        {"beta", GT_AT(beta), 0, "D", 'f', "iii", NULL},
                                        {"bias", GT_AT(bias), 0, "O", 'f', "i-i", NULL},
                                        {"y", GT_AT(y), GT_AT(y_stride), "MO", 'x', "O-O", NULL},
                                        {"dy", GT_AT(dy), GT_AT(dy_stride), "MO", 'x', "-I-", NULL},
                                        {"dx", GT_AT(dx), GT_AT(dx_stride), "MD", 'x', "-o-", NULL},
                                        {"dweight", GT_AT(dweight), 0, "OD", 'f', "-g-", NULL},
                                        {"dgamma", GT_AT(dgamma), 0, "D", 'f', "-g-", NULL},
                                        {"dbeta", GT_AT(dbeta), 0, "D", 'f', "-g-", NULL},
                                        {"dbias", GT_AT(dbias), 0, "O", 'f', "-g-", NULL},
                                        {NULL, 0, 0, NULL, 0, NULL, NULL}};
    static const gt_op op = {
        "rmsnorm_linear",
        sizeof(gt_rmsnorm_linear_args),
        GT_AT(dtype),
        0,
        NULL,
        GT_AT(accumulate),
        sizes,
        tensors,
        gt_rmsnorm_linear_resolve,
        GT_CALLS(rmsnorm_linear, gt_call_rmsnorm_linear_step),
        {GT_AT(workspace), GT_AT(workspace_bytes), GT_AT(saved), GT_AT(saved_bytes), 0, 0, 0, 0, 0},
        GT_NO_SECOND,
        GT_NO_STEP_DTYPES};
    return &op;
}
#undef GT_AT

/* ---- norm_mix: the operator's table ---------------------------------------------------------- */

static gt_status gt_norm_mix_resolve(void *filled, gt_pass pass, gt_dims *dims) {
    gt_norm_mix_args *a = (gt_norm_mix_args *)filled;
    gt_status status;
    (void)pass, (void)dims;
    if ((status = gt_resolve_slices(&a->H, a->D)) != GT_OK) return status;
    return gt_resolve_eps(&a->eps);
}

GT_WRAP_CALLS(norm_mix)

#define GT_AT(field) offsetof(gt_norm_mix_args, field)
GT_API const gt_op *gt_op_norm_mix(void) {
    static const gt_size sizes[] = {{'M', "M", GT_AT(M), 0}, {'D', "D", GT_AT(D), 1}, {0, NULL, 0, 0}};
    static const gt_tensor tensors[] = {{"a", GT_AT(a), GT_AT(a_stride), "MD", 'x', "II-", NULL},
                                        {"b", GT_AT(b), GT_AT(b_stride), "MD", 'x', "II-", NULL},
                                        {"gain_a", GT_AT(gain_a), 0, "D", 'f', "ii-", NULL},
                                        {"gain_b", GT_AT(gain_b), 0, "D", 'f', "ii-", NULL},
                                        {"residual", GT_AT(residual), GT_AT(residual_stride), "MD", 'x', "i--", NULL},
                                        {"y", GT_AT(y), GT_AT(y_stride), "MD", 'x', "O--", "residual"},
                                        {"dy", GT_AT(dy), GT_AT(dy_stride), "MD", 'x', "-I-", NULL},
                                        {"da", GT_AT(da), GT_AT(da_stride), "MD", 'x', "-o-", NULL},
                                        {"db", GT_AT(db), GT_AT(db_stride), "MD", 'x', "-o-", NULL},
                                        {"dgain_a", GT_AT(dgain_a), 0, "D", 'f', "-g-", NULL},
                                        {"dgain_b", GT_AT(dgain_b), 0, "D", 'f', "-g-", NULL},
                                        {NULL, 0, 0, NULL, 0, NULL, NULL}};
    static const gt_op op = {"norm_mix",
                             sizeof(gt_norm_mix_args),
                             GT_AT(dtype),
                             0,
                             NULL,
                             GT_AT(accumulate),
                             sizes,
                             tensors,
                             gt_norm_mix_resolve,
                             GT_CALLS(norm_mix, NULL),
                             {GT_AT(workspace), GT_AT(workspace_bytes), 0, 0, 0, 0, 0, 0, 0},
                             GT_NO_SECOND,
                             GT_NO_STEP_DTYPES};
    return &op;
}
#undef GT_AT

/* ---- norm_gate: the operator's table --------------------------------------------------------- */

static gt_status gt_norm_gate_resolve(void *filled, gt_pass pass, gt_dims *dims) {
    gt_norm_gate_args *a = (gt_norm_gate_args *)filled;
    gt_status status;
    (void)dims;
    if ((status = gt_resolve_slices(&a->H, a->D)) || (status = gt_resolve_norm(a->norm)) ||
        (status = gt_check_range(GT_ERROR_VALUE, "gate_first", a->gate_first, 0, 1)) ||
        (status = gt_resolve_eps(&a->eps)))
        return status;
    if (pass == GT_BACKWARD && a->M > 0 && a->dz && !a->z) return gt_fail(GT_ERROR_NULL, "z is NULL, but dz is set");
    return GT_OK;
}

GT_WRAP_CALLS(norm_gate)

#define GT_AT(field) offsetof(gt_norm_gate_args, field)
GT_API const gt_op *gt_op_norm_gate(void) {
    static const gt_size sizes[] = {{'M', "M", GT_AT(M), 0}, {'D', "D", GT_AT(D), 1}, {0, NULL, 0, 0}};
    static const gt_tensor tensors[] = {{"x", GT_AT(x), GT_AT(x_stride), "MD", 'x', "II-", NULL},
                                        {"z", GT_AT(z), GT_AT(z_stride), "MD", 'x', "ii-", NULL},
                                        {"gamma", GT_AT(gamma), 0, "D", 'f', "ii-", NULL},
                                        {"beta", GT_AT(beta), 0, "D", 'f', "ii-", NULL},
                                        {"y", GT_AT(y), GT_AT(y_stride), "MD", 'x', "O--", NULL},
                                        {"dy", GT_AT(dy), GT_AT(dy_stride), "MD", 'x', "-I-", NULL},
                                        {"dx", GT_AT(dx), GT_AT(dx_stride), "MD", 'x', "-o-", NULL},
                                        {"dz", GT_AT(dz), GT_AT(dz_stride), "MD", 'x', "-o-", NULL},
                                        {"dgamma", GT_AT(dgamma), 0, "D", 'f', "-g-", NULL},
                                        {"dbeta", GT_AT(dbeta), 0, "D", 'f', "-g-", NULL},
                                        {NULL, 0, 0, NULL, 0, NULL, NULL}};
    static const gt_op op = {"norm_gate",
                             sizeof(gt_norm_gate_args),
                             GT_AT(dtype),
                             0,
                             NULL,
                             GT_AT(accumulate),
                             sizes,
                             tensors,
                             gt_norm_gate_resolve,
                             GT_CALLS(norm_gate, NULL),
                             {GT_AT(workspace), GT_AT(workspace_bytes), 0, 0, 0, 0, 0, 0, 0},
                             GT_NO_SECOND,
                             GT_NO_STEP_DTYPES};
    return &op;
}
#undef GT_AT

/* ---- add_norm: the operator's table ---------------------------------------------------------- */

static gt_status gt_add_norm_resolve(void *filled, gt_pass pass, gt_dims *dims) {
    gt_add_norm_args *a = (gt_add_norm_args *)filled;
    gt_status status;
    (void)dims;
    if ((status = gt_resolve_norm(a->norm)) != GT_OK ||
        (status = gt_check_range(GT_ERROR_VALUE, "reads_sum", a->reads_sum, 0, 1)) != GT_OK)
        return status;
    if (pass == GT_BACKWARD && !a->reads_sum) a->sum = NULL; /* backward does not read forward's output */
    return gt_resolve_eps(&a->eps);
}

GT_WRAP_CALLS(add_norm)

#define GT_AT(field) offsetof(gt_add_norm_args, field)
GT_API const gt_op *gt_op_add_norm(void) {
    static const gt_size sizes[] = {{'M', "M", GT_AT(M), 0}, {'D', "D", GT_AT(D), 1}, {0, NULL, 0, 0}};
    static const gt_tensor tensors[] = {
        {"sum", GT_AT(sum), GT_AT(sum_stride), "MD", 'w', "Oi-", "residual"},
        {"x", GT_AT(x), GT_AT(x_stride), "MD", 'x', "II-", NULL},
        {"residual", GT_AT(residual), GT_AT(residual_stride), "MD", 'w', "ii-", NULL},
        {"gamma", GT_AT(gamma), 0, "D", 'f', "ii-", NULL},
        {"beta", GT_AT(beta), 0, "D", 'f', "i--", NULL},
        {"y", GT_AT(y), GT_AT(y_stride), "MD", 'x', "O--", NULL},
        {"dy", GT_AT(dy), GT_AT(dy_stride), "MD", 'x', "-I-", NULL},
        {"dsum", GT_AT(dsum), GT_AT(dsum_stride), "MD", 'w', "-i-", NULL},
        {"dx", GT_AT(dx), GT_AT(dx_stride), "MD", 'x', "-o-", NULL},
        {"dresidual", GT_AT(dresidual), GT_AT(dresidual_stride), "MD", 'w', "-o-", "dsum"},
        {"dgamma", GT_AT(dgamma), 0, "D", 'f', "-g-", NULL},
        {"dbeta", GT_AT(dbeta), 0, "D", 'f', "-g-", NULL},
        {NULL, 0, 0, NULL, 0, NULL, NULL}};
    static const gt_op op = {"add_norm",
                             sizeof(gt_add_norm_args),
                             GT_AT(dtype),
                             GT_AT(sum_dtype),
                             "sum_dtype",
                             GT_AT(accumulate),
                             sizes,
                             tensors,
                             gt_add_norm_resolve,
                             GT_CALLS(add_norm, NULL),
                             {GT_AT(workspace), GT_AT(workspace_bytes), 0, 0, 0, 0, 0, 0, 0},
                             GT_NO_SECOND,
                             GT_NO_STEP_DTYPES};
    return &op;
}
#undef GT_AT

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif
