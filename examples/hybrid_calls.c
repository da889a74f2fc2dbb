#include "hybrid_calls.h"
#include "gt/base/op.h"
#include <stdio.h>

static hy_backend own; /* the original functions of the intercepted backend */
static gt_status (*see)(void *, hy_backend *, const hy_call *);
static void *seer;
static int64_t parameters;

void hy_calls_parameters(int64_t count) { parameters = count; }

/* ---- bytes ------------------------------------------------------------------------------------ */

static double size_of(gt_dtype dtype) { return dtype == GT_BF16 || dtype == GT_F16 ? 2 : 4; }

/* Computes the bytes that one call of a gt_kernels.h operator moves; the operator's table lists its arrays. */
static double bytes_of(const gt_op *op, gt_pass pass, const void *args) {
    _Alignas(16) char filled[2048];
    gt_dims dims;
    double bytes = 0;
    if (op->args_bytes > sizeof filled || gt_prepare(op, pass, GT_DEVICE, args, filled, &dims) != GT_OK) return 0;
    for (const gt_tensor *t = op->tensors; t->name; t++) {
        const char use = gt_use(t, pass);
        if (use == '-' || !*(void *const *)(const void *)(filled + t->offset)) continue;
        const gt_view v = gt_view_of(op, t, filled, &dims);
        const int accumulates = use == 'g' && *(const int *)(const void *)(filled + op->accumulate_offset);
        bytes += (double)v.count * v.element * (use == 's' || accumulates ? 2 : 1);
    }
    if (op->fields.saved && *(void *const *)(const void *)(filled + op->fields.saved))
        bytes += (double)*(const size_t *)(const void *)(filled + op->fields.saved_bytes);
    return bytes;
}

static double bytes_gemm(const hy_gemm_args *a) {
    const double c = (double)(a->M * a->N) * size_of(a->c_dtype ? a->c_dtype : a->dtype);
    return (double)(a->count ? a->count : 1) *
           ((double)(a->M * a->K + a->K * a->N) * size_of(a->dtype) + c * (a->beta != 0 ? 2 : 1));
}

static double bytes_embedding(const hy_embedding_args *a, int backward) {
    const double row = size_of(a->dtype) * (double)a->D, table = 4.0 * (double)(a->V * a->D);
    return (double)a->M * (4 + row * (backward ? 1 : 2)) + (backward ? table * (1 + a->accumulate) : 0);
}

static double bytes_lerp(const hy_lerp_args *a, int backward) {
    const double each = (double)(a->B * a->T * a->D) * size_of(a->dtype), of_all = each * (double)a->count;
    if (!backward) return each + of_all * (a->m ? 2 : 1);
    return each + of_all * ((a->m ? 2 : 1) + (a->dm ? 1 : 0)) + (a->dx ? each * (1 + a->accumulate_dx) : 0);
}

static double bytes_map(const hy_map_args *a, int backward) {
    return (double)a->n * size_of(a->dtype) * (backward ? 3 + a->accumulate : 2);
}

static double bytes_bias(const hy_bias_args *a, int backward) {
    return (double)(a->M * a->D) * size_of(a->dtype) * (backward ? 1 : 2);
}

static double bytes_gate_mix(const hy_gate_mix_args *a, int backward) {
    return (double)(a->M * a->D) * size_of(a->dtype) * (backward ? 5 : a->residual ? 4 : 3);
}

static double bytes_cross_entropy(const hy_cross_entropy_args *a, int backward) {
    return (double)(a->M * a->V) * size_of(a->dtype) * (backward ? 2 : 1);
}

/* ---- operators ---------------------------------------------------------------------------------- */

/* Expands F(name, arguments, bytes) for every function of a backend that computes.  `bytes` is an expression that
 * reads the arguments `a`. */
#define GT_PASS(op, pass, PASS) F(op##_##pass, gt_##op##_args, bytes_of(gt_op_##op(), PASS, a))
#define GT_OP(op) GT_PASS(op, forward, GT_FORWARD) GT_PASS(op, backward, GT_BACKWARD)
#define GT_OP_AND_STEP(op) GT_OP(op) GT_PASS(op, step, GT_STEP)
#define OWN(op) F(op##_forward, hy_##op##_args, bytes_##op(a, 0)) F(op##_backward, hy_##op##_args, bytes_##op(a, 1))
#define OPERATORS                                                                                                      \
    HY_OPERATORS(GT_OP_AND_STEP, GT_OP, GT_OP_AND_STEP)                                                                \
    F(gemm, hy_gemm_args, bytes_gemm(a))                                                                               \
    OWN(embedding)                                                                                                     \
    OWN(lerp)                                                                                                          \
    OWN(map)                                                                                                           \
    OWN(bias)                                                                                                          \
    OWN(gate_mix)                                                                                                      \
    OWN(cross_entropy)                                                                                                 \
    F(grad_norm, hy_grad_norm_args, 4.0 * (double)parameters)                                                          \
    F(adamw, hy_adamw_args, (28.0 + (a->copy ? 2 : 0)) * (double)parameters)                                           \
    F(add, hy_add_args, 3 * (double)a->n * size_of(a->dtype))                                                          \
    F(cast, hy_cast_args, (double)a->n *(size_of(a->from_dtype) + size_of(a->to_dtype)))                               \
    F(carry, hy_carry_args, 8.0 * (double)(a->count * a->B * a->n))                                                    \
    F(dropout, hy_dropout_args, 2 * (double)a->n * size_of(a->dtype))                                                  \
    F(average, hy_average_args, (a->decay < 0 ? 16.0 : 12.0) * (double)a->n)

#define F(name, type, bytes)                                                                                           \
    static gt_status make_##name(hy_backend *be, const void *args) { return own.name(be, (const type *)args); }        \
    static gt_status seen_##name(hy_backend *be, const type *a) {                                                      \
        const hy_call call = {#name, bytes, make_##name, a, sizeof *a};                                                \
        return see(seer, be, &call);                                                                                   \
    }
OPERATORS
#undef F

typedef struct copy_args {
    void *to;
    const void *from; /* NULL: zeros */
    size_t bytes;
} copy_args;

static gt_status make_copy(hy_backend *be, const void *args) {
    const copy_args *a = args;
    return a->from ? own.copy(be, a->to, a->from, a->bytes) : own.zero(be, a->to, a->bytes);
}

static gt_status seen_copy(hy_backend *be, void *to, const void *from, size_t bytes) {
    const copy_args a = {to, from, bytes};
    const hy_call call = {"copy", 2 * (double)bytes, make_copy, &a, sizeof a};
    return see(seer, be, &call);
}

static gt_status seen_zero(hy_backend *be, void *to, size_t bytes) {
    const copy_args a = {to, NULL, bytes};
    const hy_call call = {"zero", (double)bytes, make_copy, &a, sizeof a};
    return see(seer, be, &call);
}

static gt_status run_directly(hy_backend *be, int slot, gt_status (*record)(void *arg), void *arg) {
    (void)be, (void)slot;
    return record(arg);
}

void hy_calls_leave(hy_backend *be) {
    if (be->gemm != seen_gemm) return;
#define F(name, type, bytes) be->name = own.name;
    OPERATORS
#undef F
    be->copy = own.copy;
    be->zero = own.zero;
    be->run = own.run;
}

void hy_calls_see(hy_backend *be, gt_status (*function)(void *, hy_backend *, const hy_call *), void *argument) {
    hy_calls_leave(be);
    own = *be;
    see = function, seer = argument;
#define F(name, type, bytes) be->name = seen_##name;
    OPERATORS
#undef F
    be->copy = seen_copy;
    be->zero = seen_zero;
    be->run = run_directly;
}

/* ---- waiting ------------------------------------------------------------------------------------ */

static gt_status wait_for(void *unused, hy_backend *be, const hy_call *call) {
    gt_status status = call->make(be, call->args);
    (void)unused;
    if (status == GT_OK) status = be->synchronize(be);
    if (status == GT_OK) return GT_OK;
    return hy_fail(status, "%s%s%s%s%s: %s", be->at.pass ? be->at.pass : "", be->at.pass ? ", " : "",
                   be->at.part ? be->at.part : "", be->at.part ? ": " : "", call->name, hy_last_error());
}

void hy_calls_wait(hy_backend *be) { hy_calls_see(be, wait_for, NULL); }
