#include "hybrid_check.h"
#include "hybrid_calls.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        gt_status status_ = (call);                                                                                    \
        if (status_ != GT_OK) return status_;                                                                          \
    } while (0)

/* The limit of each tensor's error is measured, because no fixed limit fits all tensors.  Deep models amplify
 * rounding, and some gradients are small sums of large terms.
 *
 * `nudged` is the true model with every parameter changed by a random part of the device's unit roundoff.  The mean
 * change of a tensor over TRIALS such models is the effect of a single rounding.  The device rounds in every
 * operator, so the limit is a multiple of this effect. */
enum { TRIALS = 4 };
static const double allowed = 10;   /* the limit is this multiple of a single rounding's effect ... */
static const double base_units = 8; /* ... plus this number of unit roundoffs */

typedef struct check {
    hy_model *device, *truth, *nudged;
    hy_backend *cpu; /* the backend of truth and nudged */
    const hy_config *config;
    int vocab, B, T;
    uint64_t seed;
    const int32_t *tokens, *targets;
    double unit;                    /* unit roundoff of the device */
    uint64_t rounding;              /* seed of round_after_norm */
    double *got, *expected;         /* each has room for the largest tensor */
    double *before, *nudged_before; /* all parameters before the step */
    int64_t parameters;
    /* per tensor: squared relative changes, summed over the trials */
    double *activation_nudge, *gradient_nudge, *update_nudge;
    FILE *out;
    int failures;
} check;

/* Computes |a - b| / |b|; NaN if any number is NaN. */
static double distance(const double *a, const double *b, int64_t n) {
    double d = 0, s = 0;
    for (int64_t i = 0; i < n; i++) {
        d += (a[i] - b[i]) * (a[i] - b[i]);
        s += b[i] * b[i];
    }
    return d == 0 ? 0 : sqrt(d / (s > 0 ? s : 1e-300));
}

static double noise(uint64_t *state) { /* a random number from -1 to 1 */
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (double)(*state >> 11) / 4503599627370496.0 - 1;
}

/* Changes every parameter a little, by the same amount in both models.  New models have parameters that are zero.
 * They make the gradients of the operators before them zero, so an error in these operators would not show. */
static gt_status shake(check *c) {
    uint64_t state = 1;
    for (int i = 0; i < hy_model_param_count(c->truth); i++) {
        TRY(hy_model_read(c->truth, HY_VALUE, i, c->got));
        for (int64_t k = 0; k < hy_model_param(c->truth, i)->count; k++) c->got[k] += 0.01 * noise(&state);
        TRY(hy_model_write(c->device, i, c->got));
        TRY(hy_model_write(c->truth, i, c->got));
        TRY(hy_model_read(c->truth, HY_VALUE, i, c->before + hy_model_param(c->truth, i)->offset));
    }
    return GT_OK;
}

static gt_status nudge(check *c, int trial) {
    uint64_t state = (uint64_t)trial + 2;
    for (int i = 0; i < hy_model_param_count(c->truth); i++) {
        const hy_param *p = hy_model_param(c->truth, i);
        double *numbers = c->nudged_before + p->offset;
        for (int64_t k = 0; k < p->count; k++) numbers[k] = c->before[p->offset + k] * (1 + c->unit * noise(&state));
        TRY(hy_model_write(c->nudged, i, numbers));
        TRY(hy_model_read(c->nudged, HY_VALUE, i, numbers));
    }
    return hy_model_forward(c->nudged, c->tokens, c->targets, NULL);
}

static gt_status read_activations(check *c, hy_model *m, int i) {
    TRY(hy_model_read_activation(m, i, c->got));
    return hy_model_read_activation(c->truth, i, c->expected);
}

static gt_status read_gradients(check *c, hy_model *m, int i) {
    TRY(hy_model_read(m, HY_GRADIENT, i, c->got));
    return hy_model_read(c->truth, HY_GRADIENT, i, c->expected);
}

/* Computes how the step changed parameter i of a model. */
static gt_status read_update(hy_model *m, int i, const double *before, double *update) {
    const hy_param *p = hy_model_param(m, i);
    TRY(hy_model_read(m, HY_VALUE, i, update));
    for (int64_t k = 0; k < p->count; k++) update[k] -= before[p->offset + k];
    return GT_OK;
}

static gt_status read_updates(check *c, hy_model *m, const double *before, int i) {
    TRY(read_update(m, i, before, c->got));
    return read_update(c->truth, i, c->before, c->expected);
}

/* Runs AdamW with settings that suit a comparison.  AdamW divides each gradient by its own size.  A tiny gradient's
 * sign may be rounding error, and with a small eps it would change its parameter as much as a large gradient does.
 * So eps is the root mean square of the gradient after clipping to the 2-norm `norm`.  lr is large, so that updates
 * stand out from the rounding of the parameters. */
static gt_status update(const check *c, hy_model *m) {
    const float norm = 0.1f;
    const hy_optimizer o = {.lr = 100,
                            .beta1 = 0.9f,
                            .beta2 = 0.95f,
                            .eps = norm / sqrtf((float)c->parameters),
                            .weight_decay = 0.1f,
                            .max_norm = norm};
    return hy_model_update(m, &o);
}

static double squared_change(const check *c, int64_t n) {
    double change = distance(c->got, c->expected, n);
    return change * change;
}

/* Measures the changes of activations between `truth` and `nudged`.  Call it before any backward, because backward
 * overwrites activations. */
static gt_status measure_activations(check *c) {
    for (int trial = 0; trial < TRIALS; trial++) {
        TRY(nudge(c, trial));
        for (int i = 0; i < hy_model_activation_count(c->truth); i++) {
            TRY(read_activations(c, c->nudged, i));
            c->activation_nudge[i] += squared_change(c, hy_model_activation(c->truth, i).count);
        }
    }
    return GT_OK;
}

static gt_status create_nudged(check *c) {
    hy_model_destroy(c->nudged);
    c->nudged = NULL;
    return hy_model_create(c->cpu, c->config, c->vocab, c->B, c->T, c->seed, &c->nudged);
}

/* Returns whether parameter p is the Dskip of a Mamba-2 with a single head; its gradient needs a wider limit.
 * Mamba-2's gated norm removes a common factor of the row.  With a single head Dskip mostly scales the whole row, so
 * its gradient is a sum of terms that nearly cancel.  Nudged parameters keep this cancellation, but rounding the
 * norm's gradient element by element breaks it.  So the limit also includes the measured effect of that rounding. */
static int is_single_scale(const hy_param *p) {
    const char *end = strstr(p->name, "mamba.Dskip");
    return end && p->count == 1;
}

static gt_status round_after_norm(void *seer, hy_backend *be, const hy_call *call) {
    const check *c = seer;
    TRY(call->make(be, call->args));
    if (strcmp(call->name, "norm_gate_backward") || strcmp(be->at.part, "mamba")) return GT_OK;
    const gt_norm_gate_args *a = call->args;
    float *dx = a->dx;
    uint64_t state = c->rounding;
    for (int64_t i = 0; i < a->M * a->D; i++) dx[i] *= (float)(1 + c->unit * noise(&state));
    return GT_OK;
}

static gt_status measure_single_scales(check *c, int trial) {
    TRY(create_nudged(c));
    TRY(nudge(c, trial));
    c->rounding = (uint64_t)trial + 100;
    hy_calls_see(c->cpu, round_after_norm, c);
    gt_status status = hy_model_backward(c->nudged, 0);
    hy_calls_leave(c->cpu);
    if (status == GT_OK) status = update(c, c->nudged);
    for (int i = 0; i < hy_model_param_count(c->truth) && status == GT_OK; i++) {
        if (!is_single_scale(hy_model_param(c->truth, i))) continue;
        TRY(read_gradients(c, c->nudged, i));
        c->gradient_nudge[i] += squared_change(c, 1);
        TRY(read_updates(c, c->nudged, c->nudged_before, i));
        c->update_nudge[i] += squared_change(c, 1);
    }
    return status;
}

/* Measures the changes of gradients and updates between `truth` and `nudged`.  Call it after the step of `truth`.
 * Every trial is the first step of a new optimiser. */
static gt_status measure_step(check *c) {
    int scales = 0;
    for (int i = 0; i < hy_model_param_count(c->truth); i++) scales += is_single_scale(hy_model_param(c->truth, i));
    for (int trial = 0; trial < TRIALS; trial++) {
        TRY(create_nudged(c));
        TRY(nudge(c, trial));
        TRY(hy_model_backward(c->nudged, 0));
        TRY(update(c, c->nudged));
        for (int i = 0; i < hy_model_param_count(c->truth); i++) {
            int64_t count = hy_model_param(c->truth, i)->count;
            TRY(read_gradients(c, c->nudged, i));
            if (is_single_scale(hy_model_param(c->truth, i))) continue;
            c->gradient_nudge[i] += squared_change(c, count);
            TRY(read_updates(c, c->nudged, c->nudged_before, i));
            c->update_nudge[i] += squared_change(c, count);
        }
        if (scales) TRY(measure_single_scales(c, trial));
    }
    return GT_OK;
}

/* Prints and judges one tensor's error.  `floor` is an error that even an exact device would have. */
static void report(check *c, const char *kind, const char *name, int64_t n, double nudge, double floor) {
    double error = distance(c->got, c->expected, n);
    double limit = allowed * sqrt(nudge / TRIALS) + base_units * c->unit + floor;
    int good = error <= limit;
    c->failures += !good;
    if (c->out || !good)
        fprintf(c->out ? c->out : stdout, "  %-9s %-34s %.1e  %.1e%s\n", kind, name, error, limit,
                good ? "" : "  FAIL");
}

static gt_status check_activations(check *c) {
    for (int i = 0; i < hy_model_activation_count(c->truth); i++) {
        hy_activation a = hy_model_activation(c->truth, i);
        TRY(read_activations(c, c->device, i));
        report(c, "forward", a.name, a.count, c->activation_nudge[i], 0);
    }
    return GT_OK;
}

static gt_status check_gradients(check *c) {
    for (int i = 0; i < hy_model_param_count(c->truth); i++) {
        const hy_param *p = hy_model_param(c->truth, i);
        TRY(read_gradients(c, c->device, i));
        report(c, "gradient", p->name, p->count, c->gradient_nudge[i], 0);
    }
    return GT_OK;
}

/* Computes the error that the rounding of parameters to fp32 adds to an update.  The check computes an update as the
 * parameter after the step minus the parameter before the step.  Each model rounds the parameter after the step, by
 * up to 2^-24 of its value.  The smaller an update is in proportion to its parameter, the larger this relative error
 * is. */
static double rounding_of_values(const check *c, const hy_param *p) {
    double after = 0, moved = 0;
    for (int64_t k = 0; k < p->count; k++) {
        const double value = c->before[p->offset + k] + c->expected[k];
        after += value * value;
        moved += c->expected[k] * c->expected[k];
    }
    return moved > 0 ? 2 * ldexp(1, -24) * sqrt(after / moved) : 0;
}

static gt_status check_updates(check *c) {
    for (int i = 0; i < hy_model_param_count(c->truth); i++) {
        const hy_param *p = hy_model_param(c->truth, i);
        TRY(read_updates(c, c->device, c->before, i));
        report(c, "update", p->name, p->count, c->update_nudge[i], rounding_of_values(c, p));
    }
    return GT_OK;
}

static gt_status check_batch(check *c) {
    TRY(hy_model_forward(c->device, c->tokens, c->targets, NULL));
    TRY(hy_model_forward(c->truth, c->tokens, c->targets, NULL));
    TRY(measure_activations(c));
    TRY(check_activations(c));
    TRY(hy_model_backward(c->device, 0));
    TRY(hy_model_backward(c->truth, 0));
    TRY(update(c, c->device));
    TRY(update(c, c->truth));
    TRY(measure_step(c));
    TRY(check_gradients(c));
    return check_updates(c);
}

static gt_status make_room(check *c) {
    int activations = hy_model_activation_count(c->truth), params = hy_model_param_count(c->truth);
    int64_t most = 1;
    for (int i = 0; i < activations; i++) {
        int64_t n = hy_model_activation(c->truth, i).count;
        if (most < n) most = n;
    }
    for (int i = 0; i < params; i++) {
        const hy_param *p = hy_model_param(c->truth, i);
        if (most < p->count) most = p->count;
        if (c->parameters < p->offset + p->count) c->parameters = p->offset + p->count;
    }
    c->got = malloc((size_t)most * sizeof *c->got);
    c->expected = malloc((size_t)most * sizeof *c->expected);
    c->before = malloc((size_t)c->parameters * sizeof *c->before);
    c->nudged_before = malloc((size_t)c->parameters * sizeof *c->nudged_before);
    c->activation_nudge = calloc((size_t)activations, sizeof *c->activation_nudge);
    c->gradient_nudge = calloc((size_t)params, sizeof *c->gradient_nudge);
    c->update_nudge = calloc((size_t)params, sizeof *c->update_nudge);
    if (c->got && c->expected && c->before && c->nudged_before && c->activation_nudge && c->gradient_nudge &&
        c->update_nudge)
        return GT_OK;
    return hy_fail(GT_ERROR_MEMORY, "no memory for %lld numbers", (long long)(most + c->parameters));
}

/* The loss scale: a power of two near the number of tokens.  The loss is a mean over tokens; the scale turns its
 * gradient into the gradient of a sum.  The terms of that sum are large enough for fp16. */
static float loss_scale(int64_t tokens) {
    float scale = 1;
    while (scale * 2 <= (float)tokens) scale *= 2;
    return scale;
}

static gt_status create_models(check *c, hy_backend *device) {
    TRY(hy_model_create(device, c->config, c->vocab, c->B, c->T, c->seed, &c->device));
    TRY(hy_model_create(c->cpu, c->config, c->vocab, c->B, c->T, c->seed, &c->truth));
    TRY(create_nudged(c));
    TRY(make_room(c));
    if (device->dtype == GT_F16) TRY(hy_model_scale_loss(c->device, loss_scale((int64_t)c->B * c->T)));
    return shake(c);
}

gt_status hy_check(hy_backend *device, hy_backend *truth, const hy_config *config, int vocab, int B, int T,
                   uint64_t seed, const int32_t *tokens, const int32_t *targets, FILE *out, int *failures) {
    static const double units[] = {[GT_F32] = 0x1p-24, [GT_BF16] = 0x1p-8, [GT_F16] = 0x1p-11};
    check c = {.cpu = truth,
               .config = config,
               .vocab = vocab,
               .B = B,
               .T = T,
               .seed = seed,
               .tokens = tokens,
               .targets = targets,
               .unit = units[device->dtype],
               .out = out};
    gt_status status = create_models(&c, device);
    if (status == GT_OK && out) fprintf(out, "tensor: relative error on %s, and its limit\n", device->device);
    if (status == GT_OK) status = check_batch(&c);
    if (status == GT_OK && out) fprintf(out, "%d over the limit\n", c.failures);
    *failures = c.failures;
    free(c.got);
    free(c.expected);
    free(c.before);
    free(c.nudged_before);
    free(c.activation_nudge);
    free(c.gradient_nudge);
    free(c.update_nudge);
    hy_model_destroy(c.device);
    hy_model_destroy(c.truth);
    hy_model_destroy(c.nudged);
    return status;
}
