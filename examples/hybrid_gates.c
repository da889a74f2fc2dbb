#include "hybrid_gates.h"
#include "gt/base/op.h"
#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

/* Makes the result of a gate: PASS if `pass` holds, else WARN if `warn` holds, else FAIL.  A comparison with NaN is
 * false, so a NaN gives FAIL. */
static hy_gate judge(const char *name, int pass, int warn, const char *bounds, const char *against, const char *format,
                     ...) {
    hy_gate gate = {name, pass ? HY_PASS : warn ? HY_WARN : HY_FAIL, "", bounds, against};
    va_list list;
    va_start(list, format);
    vsnprintf(gate.value, sizeof gate.value, format, list);
    va_end(list);
    return gate;
}

static int within(double x, double low, double high) { return x >= low && x <= high; }

/* ---- G0 -------------------------------------------------------------------------------------
 * Runs every operator on the backend and in its CPU twin, on the same small random arrays.  The operator's table in
 * gt_kernels names the arrays that forward and backward read and write. */

enum { ARRAYS = 48, ARGS_BYTES = 2048 };

typedef struct operator_test {
    const gt_op *(*op)(void);
    const void *args; /* sizes and flags of the call */
    gt_status (*need)(hy_backend *, const void *, gt_workspace *);
    gt_status (*run)(hy_backend *, int backward, const void *);
    gt_status (*twin)(int backward, const void *);
} operator_test;

#define WRAP(op)                                                                                                       \
    static gt_status need_##op(hy_backend *b, const void *a, gt_workspace *need) {                                     \
        return b->op##_workspace(b, a, need);                                                                          \
    }                                                                                                                  \
    static gt_status run_##op(hy_backend *b, int backward, const void *a) {                                            \
        return backward ? b->op##_backward(b, a) : b->op##_forward(b, a);                                              \
    }                                                                                                                  \
    static gt_status twin_##op(int backward, const void *a) {                                                          \
        return backward ? gt_ref_##op##_backward(a) : gt_ref_##op##_forward(a);                                        \
    }
HY_OPERATORS(WRAP, WRAP, WRAP)
#undef WRAP

/* The sizes of the arrays; the tuned kernels accept them.  T = 150 is longer than a chunk (64 tokens) and than the
 * distance of checkpoints (64 or 128 tokens) of the kernels. */
enum { B = 2, T = 150, M = B * T, H = 2, N = 32, C = H * N, S = 16, TAPS = 4, D = C + 2 * S };

static const gt_wkv6_args sizes_wkv6 = {.B = B, .T = T, .H = H, .N = N};
static const gt_ssd_args sizes_ssd = {.B = B, .T = T, .H = H, .P = N, .N = S, .softplus = 1};
static const gt_selective_scan_args sizes_selective_scan = {.B = B, .T = T, .D = C, .N = S, .softplus = 1};
static const gt_conv1d_args sizes_conv1d = {.B = B, .T = T, .D = C, .W = TAPS, .activation = GT_ACT_SILU};
static const gt_conv_ssd_args sizes_conv_ssd = {.B = B, .T = T, .H = H, .P = N, .N = S, .W = TAPS, .softplus = 1};
static const gt_wkv_ssm_args sizes_wkv_ssm = {
    .B = B, .T = T, .wkv6 = {.H = H, .N = N}, .ssd = {.H = H, .P = N, .N = S, .softplus = 1}};
static const gt_rmsnorm_linear_args sizes_rmsnorm_linear = {.M = M, .D = C, .O = N};
static const gt_norm_mix_args sizes_norm_mix = {.M = M, .D = C};
static const gt_norm_gate_args sizes_norm_gate = {.M = M, .D = C, .H = H, .norm = GT_NORM_LAYER};

#define OPERATOR(op) {gt_op_##op, &sizes_##op, need_##op, run_##op, twin_##op},
static const operator_test operators[] = {HY_OPERATORS(OPERATOR, OPERATOR, OPERATOR)};
#undef OPERATOR
enum { OPERATORS = sizeof operators / sizeof operators[0] };

/* The ranges of random inputs.  Inputs that are not in this list lie between -1 and 1. */
static const struct {
    const char *name;
    double low, high;
} ranges[] = {{"w", -4, 0},        {"dt", -3, 0},        {"A", -2, -0.5},
              {"gamma", 0.5, 1.5}, {"gain_a", 0.5, 1.5}, {"gain_b", 0.5, 1.5}};

/* The arrays of one operator, on the backend and on the host. */
typedef struct operator_run {
    const operator_test *test;
    const gt_op *op;
    hy_backend *backend;
    int64_t count[ARRAYS]; /* number of elements; 0: the operator gets NULL for this array */
    void *device[ARRAYS], *workspace;
    float *host[ARRAYS];
    double *numbers; /* room for the largest array */
    _Alignas(16) char args[ARGS_BYTES], twin[ARGS_BYTES];
} operator_run;

/* Returns whether the gate leaves out a tensor.  It leaves out lists of sequences, and tensors that neither forward
 * nor backward uses.  It also leaves out tensors that the trainer's own rmsnorm_linear does not accept. */
static int is_left_out(const gt_op *op, const gt_tensor *t) {
    return t->kind == 'i' || (gt_use(t, GT_FORWARD) == '-' && gt_use(t, GT_BACKWARD) == '-') ||
           (!strcmp(op->name, "rmsnorm_linear") && (strstr(t->name, "bias") || strstr(t->name, "beta")));
}

static int is_input(const gt_tensor *t) {
    return strchr("Ii", gt_use(t, GT_FORWARD)) || strchr("Ii", gt_use(t, GT_BACKWARD));
}

static gt_dtype dtype_of(const operator_run *r, const gt_tensor *t) {
    return strchr("fSPc", t->kind) ? GT_F32 : r->backend->dtype;
}

static void put(void *args, size_t at, const void *value, size_t bytes) { memcpy((char *)args + at, value, bytes); }

/* Fills an input with random numbers.  The twin gets these numbers after the backend has rounded them to its dtype. */
static gt_status prepare_array(operator_run *r, int i, uint64_t *random) {
    hy_backend *b = r->backend;
    const gt_tensor *t = &r->op->tensors[i];
    const int64_t count = r->count[i];
    size_t bytes = (size_t)count * b->fp32_bytes;
    double low = -1, high = 1;
    gt_status status = b->alloc(b, &r->device[i], bytes);
    r->host[i] = calloc((size_t)count, sizeof(float));
    if (status == GT_OK && !r->host[i]) status = GT_ERROR_MEMORY;
    if (status == GT_OK) status = b->zero(b, r->device[i], bytes);
    put(r->args, t->offset, &r->device[i], sizeof r->device[i]);
    put(r->twin, t->offset, &r->host[i], sizeof r->host[i]);
    if (status != GT_OK || !is_input(t)) return status;
    const char *dot = strchr(t->name, '.'), *name = dot ? dot + 1 : t->name; /* the part after the dot: w of wkv6.w */
    for (size_t k = 0; k < sizeof ranges / sizeof ranges[0]; k++)
        if (!strcmp(name, ranges[k].name)) low = ranges[k].low, high = ranges[k].high;
    for (int64_t k = 0; k < count; k++) {
        *random = *random * 6364136223846793005u + 1442695040888963407u;
        r->numbers[k] = low + (high - low) * (double)(*random >> 11) / 9007199254740992.0;
    }
    status = b->write(b, r->device[i], dtype_of(r, t), r->numbers, count);
    if (status == GT_OK) status = b->read(b, r->numbers, r->device[i], dtype_of(r, t), count);
    for (int64_t k = 0; k < count; k++) r->host[i][k] = (float)r->numbers[k];
    return status;
}

/* Computes the number of elements of every array that forward or backward reads or writes. */
static gt_status count_arrays(operator_run *r) {
    _Alignas(16) char filled[ARGS_BYTES];
    gt_dims dims;
    gt_status status = gt_prepare(r->op, GT_QUERY, GT_HOST, r->args, filled, &dims);
    for (int i = 0; r->op->tensors[i].name && status == GT_OK; i++) {
        const gt_tensor *t = &r->op->tensors[i];
        if (i == ARRAYS) return GT_ERROR_UNSUPPORTED;
        if (!is_left_out(r->op, t)) r->count[i] = gt_view_of(r->op, t, filled, &dims).count;
    }
    return status;
}

static gt_status run_both(operator_run *r) {
    hy_backend *b = r->backend;
    const operator_test *o = r->test;
    const gt_op *op = r->op;
    const gt_dtype f32 = GT_F32;
    gt_workspace need = {0, 0, 0, 0, 0};
    uint64_t random = 1;
    memcpy(r->args, o->args, op->args_bytes);
    memcpy(r->twin, o->args, op->args_bytes);
    put(r->args, op->dtype_offset, &b->dtype, sizeof b->dtype);
    put(r->twin, op->dtype_offset, &f32, sizeof f32);
    gt_status status = count_arrays(r);
    for (int i = 0; i < ARRAYS && status == GT_OK; i++)
        if (r->count[i]) status = prepare_array(r, i, &random);
    if (status == GT_OK) status = o->need(b, r->args, &need);
    size_t bytes = need.forward > need.backward ? need.forward : need.backward;
    if (status == GT_OK && bytes) status = b->alloc(b, &r->workspace, bytes);
    put(r->args, op->fields.workspace, &r->workspace, sizeof r->workspace);
    put(r->args, op->fields.workspace_bytes, &bytes, sizeof bytes);
    for (int backward = 0; backward < 2 && status == GT_OK; backward++) {
        status = o->run(b, backward, r->args);
        if (status == GT_OK) status = o->twin(backward, r->twin);
    }
    return status == GT_OK ? b->synchronize(b) : status;
}

/* Finds the output with the largest relative error in the 2-norm, and its name. */
static gt_status worst_error(operator_run *r, double *worst, const char **name) {
    *worst = 0;
    for (int i = 0; i < ARRAYS && r->op->tensors[i].name; i++) {
        const gt_tensor *t = &r->op->tensors[i];
        double difference = 0, sum = 0;
        if (!r->count[i] || is_input(t)) continue;
        gt_status status = r->backend->read(r->backend, r->numbers, r->device[i], dtype_of(r, t), r->count[i]);
        if (status != GT_OK) return status;
        for (int64_t k = 0; k < r->count[i]; k++) {
            double expected = r->host[i][k], d = r->numbers[k] - expected;
            difference += d * d;
            sum += expected * expected;
        }
        double error = sqrt(difference / sum);
        if (!(error <= *worst)) *worst = error, *name = t->name; /* a NaN counts as the largest error */
        if (isnan(error)) break;
    }
    return GT_OK;
}

static gt_status test_operator(hy_backend *b, const operator_test *o, double *error, const char **name) {
    operator_run r = {.test = o, .op = o->op(), .backend = b};
    r.numbers = malloc((size_t)(M * C * N) * sizeof(double));
    gt_status status = !r.numbers                      ? GT_ERROR_MEMORY
                       : r.op->args_bytes > ARGS_BYTES ? GT_ERROR_UNSUPPORTED
                                                       : run_both(&r);
    if (status == GT_OK) status = worst_error(&r, error, name);
    for (int i = 0; i < ARRAYS; i++) {
        b->release(b, r.device[i]);
        free(r.host[i]);
    }
    b->release(b, r.workspace);
    free(r.numbers);
    return status;
}

hy_gate hy_gate_operators(hy_backend *b) {
    const int is_16 = b->dtype != GT_F32;
    const double limit = is_16 ? 32 * (b->dtype == GT_F16 ? 0x1p-11 : 0x1p-8) : 1e-4;
    double worst = 0;
    int good = 0;
    char where[48] = "";
    for (int i = 0; i < OPERATORS; i++) {
        double error = 0;
        const char *name = "";
        gt_status status = test_operator(b, &operators[i], &error, &name);
        int fits = status == GT_OK && error <= limit;
        good += fits;
        if (!fits) worst = status == GT_OK ? error : (double)NAN;
        if (!fits || (good == i + 1 && error >= worst)) {
            worst = fits ? error : worst;
            snprintf(where, sizeof where, "%s %s", operators[i].op()->name, name);
        }
    }
    return judge("G0", good == OPERATORS, 0,
                 b->dtype == GT_BF16  ? "all, error <0.125 (else FAIL)"
                 : b->dtype == GT_F16 ? "all, error <0.0156 (else FAIL)"
                                      : "all, error <1e-4 (else FAIL)",
                 "operators whose results differ from those of the CPU twins", "%d of %d operators, error %.1e (%s)",
                 good, OPERATORS, worst, where);
}

/* ---- G1 to G4 ------------------------------------------------------------------------------- */

static hy_gate skip(const char *name, const char *why, const char *bounds, const char *against) {
    hy_gate gate = {name, HY_SKIP, "", bounds, against};
    snprintf(gate.value, sizeof gate.value, "%s", why);
    return gate;
}

hy_gate hy_gate_forward(const hy_probe *p, int64_t counted, int64_t targets) {
    int finite = p->finite && isfinite(p->loss);
    return judge("G1", finite && counted == targets, 0, "finite, all targets", "overflow and lost tokens",
                 "forward %s, %lld of %lld targets", finite ? "finite" : "not finite", (long long)counted,
                 (long long)targets);
}

hy_gate hy_gate_entropy(double entropy, int vocab) {
    double top = log(vocab), relative = entropy / top;
    int depends = relative <= 1 - 1e-6; /* the predictions depend on the input */
    return judge("G2", depends && relative >= 0.9, depends && relative >= 0.5,
                 ">0.9 ln V, <ln V (FAIL <0.5 ln V, =ln V)",
                 "weights that make confident predictions from the start, or a model that ignores its input",
                 "entropy %.3f nats, %.4f ln %d", entropy, relative, vocab);
}

static const char training_against[] = "training that does not learn, or is about to diverge";

hy_gate hy_gate_training(int64_t steps, double first_loss, double loss, double norm) {
    int falls = loss < first_loss;
    return judge("G3", falls && within(norm, 0.5, 1.5), falls && norm <= 5, "falls, 0.5 to 1.5 (FAIL rises, >5)",
                 training_against, "loss %.3f to %.3f in %lld steps, gradient %.2f", first_loss, loss, (long long)steps,
                 norm);
}

hy_gate hy_gate_short_training(int64_t steps, double before, double after, double norm) {
    int good = after < before && norm <= 5;
    return judge("G3", good, 0, "falls, <5 (FAIL rises, >5)", training_against,
                 "first batch %.3f to %.3f in %lld step%s, gradient %.2f", before, after, (long long)steps,
                 steps == 1 ? "" : "s", norm);
}

hy_gate hy_gate_states(const hy_probe *p) {
    static const char bounds[] = "<0.99, >1e-8, >1e-6 (FAIL >0.9999, <1e-8, <1e-6)";
    static const char against[] = "states that are zero or frozen, layers that do nothing";
    char text[2][48] = {"", ""};
    int lives = p->activation_variance > 1e-6, turns = 1, moves = 1;
    if (!p->state_tokens) return skip("G3.5", "skipped: one token has no second half", bounds, against);
    for (int k = 0; k < 2; k++) {
        const double c = p->state_cosine[k], rms = p->state_rms[k];
        if (!p->has[k]) continue; /* the model lacks this branch */
        lives &= rms > 1e-8;
        turns &= c < 0.99;
        moves &= c <= 0.9999;
        snprintf(text[0] + strlen(text[0]), sizeof text[0] - strlen(text[0]), " %.3f", c);
        snprintf(text[1] + strlen(text[1]), sizeof text[1] - strlen(text[1]), " %.2g", rms);
    }
    return judge("G3.5", lives && turns, lives && moves, bounds, against, "cosine%s, RMS%s, variance %.2g", text[0],
                 text[1], p->activation_variance);
}

hy_gate hy_gate_balance(const hy_probe *p, double ratio) {
    static const char bounds[] = "0.3 to 3 (FAIL <0.1, >10)";
    static const char against[] = "a branch that hardly learns while the other does";
    if (!p->has[0] || !p->has[1]) return skip("G4", "skipped: the model has only one branch", bounds, against);
    return judge("G4", within(ratio, 0.3, 3), within(ratio, 0.1, 10), bounds, against, "RWKV / Mamba gradient %.3f",
                 ratio);
}

void hy_gates_print(const hy_screen *s, const hy_gate *gates, int count) {
    enum { INDENT = 14, VALUE = 52 };
    static const char *const verdicts[] = {"PASS", "WARN", "FAIL", "SKIP"};
    static const hy_colour colours[] = {HY_GREEN, HY_YELLOW, HY_RED, HY_YELLOW};
    char against[96];
    int fits = 1;
    for (int i = 0; i < count; i++) fits &= INDENT + VALUE + 2 + (int)strlen(gates[i].bounds) <= s->columns;
    for (const hy_gate *g = gates; g < gates + count; g++) {
        fprintf(s->out, "  %s%s%s  %-4s  ", hy_screen_colour(s, colours[g->verdict]), verdicts[g->verdict],
                hy_screen_plain(s), g->name);
        if (fits) {
            fprintf(s->out, "%-*s  %s\n", VALUE, g->value, g->bounds);
        } else {
            hy_print_wrapped(s->out, g->value, INDENT, INDENT, hy_screen_width(s));
            fprintf(s->out, "%*s", INDENT, "");
            hy_print_wrapped(s->out, g->bounds, INDENT, INDENT, hy_screen_width(s));
        }
        snprintf(against, sizeof against, "against %s", g->against);
        fprintf(s->out, "%*s", INDENT, "");
        hy_print_wrapped(s->out, against, INDENT, INDENT, hy_screen_width(s));
    }
}
