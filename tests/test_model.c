/* Tests of the model of examples/hybrid_model.h.  Compares its gradient with central differences, and tests decoding,
 * carried states, repeats and training.
 *
 * This file compiles the twins and hybrid_ops.c a second time, in double.  The same model code then also runs in
 * double, so that comparisons can have small tolerances.
 *
 *     test_model [short]       short: one direction for each parameter instead of two; the tests of recomputing run
 *                              each model in only one of float and double, in turn
 */
#define GT_REAL double
#include "../reference/gt_ref.h"

/* gt_prepare assumes 4 bytes for an element, so slices of one buffer of doubles seem to overlap.  This function ignores
 * that error.  The check of overlaps is the last one, so *filled is complete.  The float twins make the same check on
 * the same slices, so no real overlap is missed. */
static gt_status prepare64(const gt_op *op, gt_pass pass, gt_target target, const void *args, void *filled,
                           gt_dims *dims) {
    const gt_status status = gt_prepare(op, pass, target, args, filled, dims);
    return status == GT_ERROR_OVERLAP ? GT_OK : status;
}

#undef gt_prepare
#define gt_prepare prepare64
#include "../reference/gt_wkv6.c"
#include "../reference/gt_ssm.c"
#include "../reference/gt_conv1d.c"
#include "../reference/gt_conv_ssd.c"
#include "../reference/gt_wkv_ssm.c"
#include "../reference/gt_fused.c"

#define HY_REAL double
#define HY_BACKEND_CPU hy_backend_cpu64
#define HY_TWIN(name) gt_ref64_##name
#include "../examples/hybrid_ops.c"
#include "gt_test.h"
#include "hybrid_calls.h"
#include "hybrid_model.h"

#define check test_check

/* Ends the test if this call failed, because the rest of the test needs its result. */
static void need(gt_status status, const char *what) {
    if (check(status == GT_OK, "%s: %s", what, hy_last_error())) return;
    test_finish();
    exit(1);
}
#define NEED(call) need(call, #call)

static hy_backend *be32, *be64;
static int is_short;

static void check_refusal(gt_status status, const char *word) {
    check(status != GT_OK && strstr(hy_last_error(), word), "status %d, \"%s\": does not name %s", (int)status,
          hy_last_error(), word);
}

/* ---- random numbers, models, batches ------------------------------------------------------- */

static uint64_t seed = 1;

static double uniform(void) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (double)(seed >> 11) / 9007199254740992.0;
}
static double normal(void) { return sqrt(-2 * log(1 - uniform())) * cos(6.283185307179586 * uniform()); }

static hy_config config_of(const char *name) {
    int count;
    const hy_config *list = hy_model_list(&count);
    for (int i = 0; i < count; i++)
        if (!strcmp(list[i].name, name)) return list[i];
    printf("no model %s\n", name);
    exit(1);
}

/* The model with this name, in small sizes.  A name may have suffixes: ' sizes' (no size has its default), ' conv_ssd'
 * (with conv_ssd instead of wkv_ssm), ' dropout', ' bare' (without FFN), ' untied' (the head is untied). */
static hy_config small_config(const char *variant, int hidden, int layers, int heads, int stateful) {
    char name[32];
    snprintf(name, sizeof name, "%s", variant);
    char *sizes = strstr(name, " sizes"), *conv_ssd = strstr(name, " conv_ssd"), *dropout = strstr(name, " dropout");
    char *bare = strstr(name, " bare"), *untied = strstr(name, " untied");
    if (dropout) *dropout = 0;
    if (untied) *untied = 0;
    if (bare) *bare = 0;
    if (sizes) *sizes = 0;
    if (conv_ssd) *conv_ssd = 0;
    hy_config c = config_of(name);
    c.hidden = hidden, c.layers = layers, c.heads = heads, c.stateful = stateful;
    if (conv_ssd) c.fuse = HY_CONV_SSD;
    if (dropout) c.dropout = 0.3f;
    if (sizes) c.state = 24, c.expand = 3, c.conv = 3, c.ffn = 2;
    if (sizes && c.mamba == 2) c.mamba_head = 8;
    if (bare) c.ffn = HY_NO_FFN;
    c.untied = untied != NULL;
    return c;
}

static const char *const variants[] = {"HY",           "GF",
                                       "GF-MH",        "WS",
                                       "RF",           "CP",
                                       "RWKV-6",       "HY-M1",
                                       "Mamba-2",      "Mamba-1",
                                       "HY sizes",     "CP sizes",
                                       "HY-M1 sizes",  "Mamba-1 sizes",
                                       "HY conv_ssd",  "CP sizes conv_ssd",
                                       "HY bare",      "Mamba-2 bare untied",
                                       "RWKV-6 untied"};
enum { VARIANTS = sizeof variants / sizeof variants[0] };

typedef struct batch {
    int32_t *tokens, *targets;
    int n;
} batch;

/* A random batch.  With `holes`, every seventh target is -1, which does not count. */
static batch new_batch(int vocab, int n, int holes) {
    batch b = {malloc((size_t)n * sizeof(int32_t)), malloc((size_t)n * sizeof(int32_t)), n};
    for (int i = 0; i < n; i++) {
        b.tokens[i] = (int32_t)(uniform() * vocab);
        b.targets[i] = holes && i % 7 == 3 ? -1 : (int32_t)(uniform() * vocab);
    }
    return b;
}
static void free_batch(batch *b) {
    free(b->tokens);
    free(b->targets);
}

/* Adds random numbers to every parameter, because some gradients are zero at the initial values. */
static void shake(hy_model *m, double by) {
    for (int i = 0; i < hy_model_param_count(m); i++) {
        int64_t n = hy_model_param(m, i)->count;
        double *x = malloc((size_t)n * sizeof *x);
        NEED(hy_model_read(m, HY_VALUE, i, x));
        for (int64_t k = 0; k < n; k++) x[k] += by * normal();
        NEED(hy_model_write(m, i, x));
        free(x);
    }
}

static double loss_of(hy_model *m, const batch *b, const int32_t *keep) {
    hy_result r;
    NEED(hy_model_forward(m, b->tokens, b->targets, keep));
    NEED(hy_model_result(m, &r));
    return r.loss;
}

static const hy_optimizer adam = {.lr = 1e-2f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .max_norm = 1};

/* Reads all parameters, or all gradients, into one array. */
static double *read_all(hy_model *m, hy_value what, int64_t *count) {
    int64_t n = 0;
    for (int i = 0; i < hy_model_param_count(m); i++) n += hy_model_param(m, i)->count;
    double *x = malloc((size_t)n * sizeof *x), *at = x;
    for (int i = 0; i < hy_model_param_count(m); i++) {
        NEED(hy_model_read(m, what, i, at));
        at += hy_model_param(m, i)->count;
    }
    *count = n;
    return x;
}

static double squares(const double *x, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += x[i] * x[i];
    return sum;
}

/* Returns |a - b| / |b| in l2, or NaN if any number is NaN. */
static double distance(const double *a, const double *b, int64_t n) {
    double d = 0, s = 0;
    for (int64_t i = 0; i < n; i++) {
        d += (a[i] - b[i]) * (a[i] - b[i]);
        s += b[i] * b[i];
    }
    return d == 0 ? 0 : sqrt(d / (s > 0 ? s : 1e-300));
}

/* ---- gradient against central differences -------------------------------------------------- */

/* The loss with parameter i moved by h times the direction.  With `keep`, the carried states come from the batch
 * `before`, which runs with the original parameters. */
static double loss_moved(hy_model *m, int i, const double *x, const double *direction, double h, const batch *before,
                         const batch *b, const int32_t *keep) {
    int64_t n = hy_model_param(m, i)->count;
    double *moved = malloc((size_t)n * sizeof *moved);
    for (int64_t k = 0; k < n; k++) moved[k] = x[k] + h * direction[k];
    if (keep) loss_of(m, before, NULL);
    NEED(hy_model_write(m, i, moved));
    double loss = loss_of(m, b, keep);
    NEED(hy_model_write(m, i, x));
    free(moved);
    return loss;
}

/* Checks the gradient of one parameter along one or two random directions.  The error is relative to the norm of the
 * gradient. */
static void check_parameter(hy_model *m, const char *variant, int i, const double *gradient, const batch *before,
                            const batch *b, const int32_t *keep) {
    const double h = 1e-5;
    const hy_param *p = hy_model_param(m, i);
    double *x = malloc((size_t)p->count * sizeof *x), *d = malloc((size_t)p->count * sizeof *d);
    NEED(hy_model_read(m, HY_VALUE, i, x));
    for (int trial = 0; trial < (is_short ? 1 : 2); trial++) {
        double analytic = 0, size = 0;
        for (int64_t k = 0; k < p->count; k++) {
            d[k] = normal();
            analytic += gradient[k] * d[k];
            size += gradient[k] * gradient[k];
        }
        double near = loss_moved(m, i, x, d, h, before, b, keep) - loss_moved(m, i, x, d, -h, before, b, keep);
        double far = loss_moved(m, i, x, d, 2 * h, before, b, keep) - loss_moved(m, i, x, d, -2 * h, before, b, keep);
        /* a difference of fourth order, because the heads' norms make the loss steep */
        double numeric = (8 * near - far) / (12 * h);
        check(size > 0, "%s: %s has no gradient", variant, p->name);
        check(fabs(analytic - numeric) <= 2e-6 * sqrt(size) + 1e-10,
              "%s: %s: the gradient along a direction is %.12g, but the difference quotient is %.12g", variant, p->name,
              analytic, numeric);
    }
    free(x);
    free(d);
}

static void test_gradient(const char *variant, int stateful) {
    enum { V = 11, B = 2, T = 6 };
    const int32_t keep[B] = {1, 0};
    hy_config c = small_config(variant, 16, 2, 2, stateful);
    hy_model *m;
    seed = 7;
    batch before = new_batch(V, B * T, 0), b = new_batch(V, B * T, 1);
    NEED(hy_model_create(be64, &c, V, B, T, 1, &m));
    shake(m, 0.1);
    if (stateful) loss_of(m, &before, NULL);
    loss_of(m, &b, stateful ? keep : NULL);
    NEED(hy_model_backward(m, 0));
    int64_t n;
    double *gradient = read_all(m, HY_GRADIENT, &n), *at = gradient;
    for (int i = 0; i < hy_model_param_count(m); i++) {
        check_parameter(m, variant, i, at, &before, &b, stateful ? keep : NULL);
        at += hy_model_param(m, i)->count;
    }
    free(gradient);
    free_batch(&before);
    free_batch(&b);
    hy_model_destroy(m);
}

/* The accumulated gradients of two batches equal the sum of their gradients.  Gradients in float agree with those in
 * double. */
static void test_gradient_sums(const char *variant) {
    enum { V = 13, B = 2, T = 9 };
    hy_config c = small_config(variant, 32, 2, 2, 0);
    hy_model *m, *f;
    int64_t n;
    seed = 8;
    batch b1 = new_batch(V, B * T, 0), b2 = new_batch(V, B * T, 1);
    NEED(hy_model_create(be64, &c, V, B, T, 1, &m));
    NEED(hy_model_create(be32, &c, V, B, T, 1, &f));
    seed = 9;
    shake(m, 0.05);
    seed = 9;
    shake(f, 0.05);
    loss_of(m, &b2, NULL);
    NEED(hy_model_backward(m, 0));
    double *g2 = read_all(m, HY_GRADIENT, &n);
    loss_of(m, &b1, NULL);
    NEED(hy_model_backward(m, 0));
    double *g1 = read_all(m, HY_GRADIENT, &n);
    loss_of(m, &b2, NULL);
    NEED(hy_model_backward(m, 1));
    double *sum = read_all(m, HY_GRADIENT, &n);
    loss_of(f, &b1, NULL);
    NEED(hy_model_backward(f, 0));
    double *g32 = read_all(f, HY_GRADIENT, &n);
    int64_t at = 0;
    for (int i = 0; i < hy_model_param_count(m); at += hy_model_param(m, i++)->count) {
        const hy_param *p = hy_model_param(m, i);
        double error = distance(g32 + at, g1 + at, p->count);
        check(error < 1e-3, "%s: %s: gradient in float differs by %.3g", variant, p->name, error);
    }
    for (int64_t k = 0; k < n; k++) g1[k] += g2[k];
    at = 0;
    for (int i = 0; i < hy_model_param_count(m); at += hy_model_param(m, i++)->count) {
        const hy_param *p = hy_model_param(m, i);
        double error = distance(sum + at, g1 + at, p->count);
        check(error < 1e-12, "%s: %s: accumulated gradients differ by %.3g", variant, p->name, error);
    }
    free(g1), free(g2), free(sum), free(g32);
    free_batch(&b1);
    free_batch(&b2);
    hy_model_destroy(m);
    hy_model_destroy(f);
}

/* Runs the same steps with whole batches, and in two parts in a model of half the batch.  The results must agree up to
 * rounding, although the parts have different counts of targets.  Dropout must drop the same numbers in both.  Also
 * tests the average of the weights. */
static void test_parts(const char *variant) {
    enum { V = 13, B = 4, T = 9, STEPS = 3 };
    hy_config c = small_config(variant, 32, 2, 2, 0);
    hy_optimizer o = {.lr = 0.01f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-3f, .weight_decay = 0.1f, .max_norm = 1};
    hy_model *whole, *half;
    hy_result a, b;
    int64_t n;
    seed = 12;
    NEED(hy_model_create(be64, &c, V, B, T, 1, &whole));
    c.average = 1;
    NEED(hy_model_create(be64, &c, V, B / 2, T, 1, &half));
    double *average = read_all(half, HY_VALUE, &n);
    for (int step = 0; step < STEPS; step++) {
        batch t = new_batch(V, B * T, 0);
        for (int i = 0; i < 5 + step; i++) t.targets[i] = -1;
        o.parts = 0, o.drop = (uint64_t)step;
        NEED(hy_model_train(whole, t.tokens, t.targets, NULL, &o));
        NEED(hy_model_result(whole, &a));
        o.parts = 2;
        NEED(hy_model_train(half, t.tokens, t.targets, NULL, &o));
        NEED(hy_model_result(half, &b));
        check(a.targets == b.targets && fabs(a.loss - b.loss) < 1e-12, "%s: in parts the loss is %.15g, not %.15g",
              variant, b.loss, a.loss);
        check(fabs(a.norm[HY_GROUPS] / b.norm[HY_GROUPS] - 1) < 1e-10,
              "%s: the gradient's norm is %.15g in two parts, but %.15g in one", variant, b.norm[HY_GROUPS],
              a.norm[HY_GROUPS]);
        double *of_whole = read_all(whole, HY_VALUE, &n), *of_half = read_all(half, HY_VALUE, &n);
        check(distance(of_half, of_whole, n) < 1e-10, "%s: in parts the weights differ by %.3g", variant,
              distance(of_half, of_whole, n));
        NEED(hy_model_average(half, 0.75));
        for (int64_t i = 0; i < n; i++) average[i] = 0.75 * average[i] + 0.25 * of_half[i];
        free(of_whole), free(of_half);
        free_batch(&t);
    }
    double *before = read_all(half, HY_VALUE, &n);
    NEED(hy_model_exchange(half));
    double *swapped = read_all(half, HY_VALUE, &n);
    check(distance(swapped, average, n) < 1e-12, "%s: the average is wrong", variant);
    NEED(hy_model_exchange(half));
    double *back = read_all(half, HY_VALUE, &n);
    check(!memcmp(back, before, (size_t)n * sizeof *back), "%s: the weights are not restored", variant);
    free(average), free(before), free(swapped), free(back);
    check_refusal(hy_model_average(whole, 0.5), "without an average");
    hy_model_destroy(whole), hy_model_destroy(half);
}

/* ---- recurrent forms ----------------------------------------------------------------------- */

static double log_probability(const double *logits, int vocab, int32_t target) {
    double most = logits[0], sum = 0;
    for (int v = 1; v < vocab; v++) most = fmax(most, logits[v]);
    for (int v = 0; v < vocab; v++) sum += exp(logits[v] - most);
    return logits[target] - most - log(sum);
}

/* Inference gives the logits of an evaluation.  Without tokens, it runs on the tokens of the call before. */
static void test_inference(hy_backend *be, const char *variant) {
    enum { V = 17, T = 12 };
    hy_config c = small_config(variant, 32, 2, 0, 0);
    hy_model *m;
    double evaluated[V * T], inferred[V * T], others[V * T], loss = 0;
    int64_t counted = 0;
    seed = 12;
    batch b = new_batch(V, T, 0), other = new_batch(V, T, 0);
    NEED(hy_model_create(be, &c, V, 1, T, 1, &m));
    const int logits = hy_model_activation_count(m) - 1;
    shake(m, 0.1);
    NEED(hy_model_eval(m, b.tokens, b.targets, &loss, &counted));
    NEED(hy_model_read_activation(m, logits, evaluated));
    NEED(hy_model_infer(m, other.tokens));
    NEED(hy_model_read_activation(m, logits, others));
    NEED(hy_model_infer(m, b.tokens));
    NEED(hy_model_read_activation(m, logits, inferred));
    check(!memcmp(evaluated, inferred, sizeof evaluated) && memcmp(others, inferred, sizeof others),
          "%s %s: the logits of inference differ from those of an evaluation", be->name, variant);
    NEED(hy_model_infer(m, NULL));
    NEED(hy_model_read_activation(m, logits, others));
    check(!memcmp(others, inferred, sizeof others), "%s %s: inference of the same tokens again gives other logits",
          be->name, variant);
    free_batch(&b);
    free_batch(&other);
    hy_model_destroy(m);
}

/* A model created for inference gives the same numbers with less memory, and refuses all other calls. */
static void test_inference_only(hy_backend *be, const char *variant) {
    enum { V = 17, B = 2, T = 12 };
    hy_config c = small_config(variant, 32, 3, 0, 0), lean = c;
    hy_model *m[2];
    hy_plan plan[2];
    double logits[2][B * V * T], loss[2] = {0, 0}, fed[2][V];
    lean.inference = 1;
    seed = 12;
    batch b = new_batch(V, B * T, 0);
    for (int i = 0; i < 2; i++) {
        const hy_config *config = i ? &lean : &c;
        int64_t counted = 0;
        int last;
        NEED(hy_model_plan(be, config, V, B, T, &plan[i]));
        NEED(hy_model_create(be, config, V, B, T, 1, &m[i]));
        NEED(hy_model_infer(m[i], b.tokens));
        last = hy_model_activation_count(m[i]) - 1;
        NEED(hy_model_read_activation(m[i], last, logits[i]));
        NEED(hy_model_eval(m[i], b.tokens, b.targets, &loss[i], &counted));
        NEED(hy_model_reset(m[i]));
        NEED(hy_model_feed(m[i], b.tokens, T, fed[i]));
        NEED(hy_model_feed(m[i], b.tokens, 1, fed[i]));
    }
    check(!memcmp(logits[0], logits[1], sizeof logits[0]) && loss[0] == loss[1] &&
              !memcmp(fed[0], fed[1], sizeof fed[0]),
          "%s %s: a model made for inference computes other numbers", be->name, variant);
    check(plan[1].gradients == 0 && plan[1].optimizer == 0 && plan[1].backward == 0 &&
              plan[1].activations < plan[0].activations / 2 && plan[1].total < plan[0].total / 2,
          "%s: a model made for inference takes %zu bytes, one made for training %zu", variant, plan[1].total,
          plan[0].total);
    int count;
    hy_tensor *list = hy_model_tensors(m[1], &count);
    for (int i = 0; i < count; i++)
        check(list[i].kind == HY_WEIGHT, "%s: a model made for inference has the tensor %s", variant, list[i].name);
    free(list);
    double number[32];
    check_refusal(hy_model_forward(m[1], b.tokens, b.targets, NULL), "made for inference");
    check_refusal(hy_model_train(m[1], b.tokens, b.targets, NULL, &adam), "made for inference");
    check_refusal(hy_model_gradient(m[1], b.tokens, b.targets, NULL), "made for inference");
    check_refusal(hy_model_loss(m[1], b.tokens, b.targets, NULL), "made for inference");
    check_refusal(hy_model_update(m[1], &adam), "made for inference");
    check_refusal(hy_model_grad_norm(m[1]), "made for inference");
    check_refusal(hy_model_read(m[1], HY_GRADIENT, 1, number), "made for inference");
    NEED(hy_model_loss(m[0], b.tokens, b.targets, NULL));
    hy_result r;
    NEED(hy_model_result(m[0], &r));
    check(fabs(r.loss * (double)r.targets - loss[0]) < 1e-9 * loss[0] + 1e-4, "%s: loss %g, not %g", variant, r.loss,
          loss[0]);
    check_refusal(hy_model_backward(m[0], 0), "hy_model_forward");
    free_batch(&b);
    hy_model_destroy(m[0]);
    hy_model_destroy(m[1]);
}

/* Decoding token by token gives the loss of the whole sequence.  After prompts of several lengths, it gives the logits
 * of the whole sequence. */
static void test_decoding(hy_backend *be, const char *variant, double tolerance) {
    enum { V = 17, T = 12 };
    hy_config c = small_config(variant, 32, 2, 0, 0);
    hy_model *m;
    double logits[V], prompt[V], loss = 0, sum = 0;
    int64_t counted = 0;
    seed = 10;
    batch b = new_batch(V, T, 0);
    NEED(hy_model_create(be, &c, V, 1, T, 1, &m));
    shake(m, 0.1);
    NEED(hy_model_eval(m, b.tokens, b.targets, &loss, &counted));
    for (int t = 0; t < T; t++) {
        NEED(hy_model_feed(m, &b.tokens[t], 1, logits));
        sum -= log_probability(logits, V, b.targets[t]);
    }
    check(counted == T && fabs(sum - loss) <= tolerance * loss, "%s %s: loss %.9g token by token, but %.9g in one pass",
          be->name, variant, sum, loss);
    for (int split = 1; split <= T; split += 4) {
        NEED(hy_model_reset(m));
        NEED(hy_model_feed(m, b.tokens, split, prompt));
        if (split < T) NEED(hy_model_feed(m, b.tokens + split, T - split, prompt));
        check(distance(prompt, logits, V) <= 10 * tolerance, "%s %s: logits after prompts of %d and %d differ by %.3g",
              be->name, variant, split, T - split, distance(prompt, logits, V));
    }
    int32_t twice[2 * T];
    memcpy(twice, b.tokens, T * sizeof *twice);
    memcpy(twice + T, b.tokens, T * sizeof *twice);
    NEED(hy_model_feed(m, b.tokens, T, logits));
    NEED(hy_model_reset(m));
    NEED(hy_model_feed(m, twice, 2 * T, prompt)); /* this prompt is longer than the model's T */
    check(distance(prompt, logits, V) <= 10 * tolerance, "%s %s: a long prompt differs by %.3g", be->name, variant,
          distance(prompt, logits, V));
    free_batch(&b);
    hy_model_destroy(m);
}

/* Several samples decode together.  Each must have the logits that it has alone.  The prompts of N tokens take several
 * pieces of T tokens. */
static void test_samples(hy_backend *be, const char *variant, double tolerance) {
    enum { V = 17, S = 3, T = 4, N = 2 * T + 2 };
    hy_config c = small_config(variant, 32, 2, 0, 0), alone = c;
    hy_model *m, *one, *none;
    double logits[2][S * V], expected[V];
    int32_t last[S];
    seed = 13;
    batch b = new_batch(V, S * (N + 1), 0);
    for (int i = 0; i < S; i++) last[i] = b.tokens[i * (N + 1) + N];
    int32_t prompts[S * N];
    for (int i = 0; i < S; i++) memcpy(prompts + i * N, b.tokens + i * (N + 1), N * sizeof *prompts);
    c.inference = 1, c.samples = S;
    NEED(hy_model_create(be, &c, V, S, T, 1, &m));
    NEED(hy_model_create(be, &alone, V, 1, T, 1, &one));
    seed = 1, shake(m, 0.1);
    seed = 1, shake(one, 0.1);
    /* hy_model_reset must set the states to zero, so both rounds give the same */
    for (int again = 0; again < 2; again++) {
        NEED(hy_model_reset(m));
        NEED(hy_model_feed(m, prompts, N, logits[0]));
        NEED(hy_model_feed(m, last, 1, logits[1]));
    }
    for (int i = 0; i < S; i++)
        for (int k = 0; k < 2; k++) {
            if (k == 0) NEED(hy_model_reset(one));
            NEED(hy_model_feed(one, k ? &last[i] : prompts + i * N, k ? 1 : N, expected));
            const double far = distance(logits[k] + i * V, expected, V);
            check(far <= tolerance, "%s %s: sample %d of %d differs by %.3g %s", be->name, variant, i, S, far,
                  k ? "after a step" : "after a prompt");
        }
    check(hy_model_token_bytes(m) > hy_model_token_bytes(one) &&
              hy_model_token_bytes(m) < S * hy_model_token_bytes(one),
          "%s %s: %g bytes per token of %d samples, but %g of one sample", be->name, variant, hy_model_token_bytes(m),
          S, hy_model_token_bytes(one));
    prompts[N + 1] = V;
    check_refusal(hy_model_feed(m, prompts, N, logits[0]), "tokens[11]");
    c.samples = 4;
    check_refusal(hy_model_create(be, &c, V, S, T, 1, &none), "samples = 4: must be 1 to 3");
    free_batch(&b);
    hy_model_destroy(m);
    hy_model_destroy(one);
}

/* A backend that records the calls of the second run of a slot, and then replays them, as a GPU does. */
typedef struct replay {
    struct kept_call {
        gt_status (*make)(hy_backend *, const void *);
        void *args;
    } calls[1024];
    int count, runs, is_recording, is_inside;
} replay;
static replay *replayed;

static gt_status keep_call(void *seer, hy_backend *be, const hy_call *call) {
    replay *r = seer;
    if (r->is_inside) return call->make(be, call->args);
    if (r->is_recording && check(r->count < 1024, "more than 1024 calls")) {
        void *args = malloc(call->args_bytes);
        memcpy(args, call->args, call->args_bytes);
        r->calls[r->count++] = (struct kept_call){call->make, args};
    }
    r->is_inside = 1;
    gt_status status = call->make(be, call->args);
    r->is_inside = 0;
    return status;
}

static gt_status replay_run(hy_backend *be, int slot, gt_status (*record)(void *arg), void *arg) {
    replay *r = replayed;
    gt_status status = GT_OK;
    (void)slot;
    r->runs++;
    if (!r->count) {
        r->is_recording = r->runs == 2;
        status = record(arg);
        r->is_recording = 0;
        return status;
    }
    for (int i = 0; i < r->count && status == GT_OK; i++) status = r->calls[i].make(be, r->calls[i].args);
    return status;
}

/* Each token is one run of one slot.  Replays of the recorded run must give the same bits as normal runs. */
static void test_replayed_steps(hy_backend *be, const char *variant, int int8) {
    enum { V = 17, S = 2, T = 4, TOKENS = 9 };
    hy_config c = small_config(variant, 32, 2, 0, 0);
    double logits[2][TOKENS][S * V];
    static replay r;
    seed = 14;
    batch b = new_batch(V, S * TOKENS, 0);
    c.inference = 1, c.samples = S, c.int8 = int8;
    replayed = memset(&r, 0, sizeof r);
    for (int i = 0; i < 2; i++) {
        hy_model *m;
        NEED(hy_model_create(be, &c, V, S, T, 1, &m));
        seed = 1, shake(m, 0.1);
        if (int8) NEED(hy_model_quantise(m));
        if (i) hy_calls_see(be, keep_call, &r), be->run = replay_run;
        NEED(hy_model_feed(m, b.tokens, T, logits[i][0])); /* an earlier prompt must change nothing */
        NEED(hy_model_reset(m));
        for (int t = 0; t < TOKENS; t++) NEED(hy_model_feed(m, b.tokens + S * t, 1, logits[i][t]));
        if (i) hy_calls_leave(be);
        hy_model_destroy(m);
    }
    check(r.runs == TOKENS && r.count > 0, "%s %s: %d tokens took %d runs of %d calls; each token should take one run",
          be->name, variant, TOKENS, r.runs, r.count);
    check(!memcmp(logits[0], logits[1], sizeof logits[0]), "%s %s: replayed steps differ", be->name, variant);
    for (int i = 0; i < r.count; i++) free(r.calls[i].args);
    free_batch(&b);
}

/* ---- int8 weights ---------------------------------------------------------------------------- */

/* Whether hy_model_quantise rounds a parameter: the large matrices, and the head. */
static int is_rounded(const hy_model *m, const hy_param *p) {
    static const char *const names[] = {"rwkv.projections_kvrg", "rwkv.out", "mamba.in", "mamba.out",
                                        "mix.projection",        "ffn.up",   "ffn.down"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (strstr(p->name, names[i])) return 1;
    return !strcmp(p->name, hy_model_config(m)->untied ? "head" : "embedding");
}

/* Checks the rounding of a row: its numbers are whole multiples of the scale, and the nearest ones. */
static int is_nearest_row(const double *row, const double *rounded, int64_t n, double unit) {
    double most = 0;
    int ok = 1;
    for (int64_t i = 0; i < n; i++) most = fmax(most, fabs(row[i]));
    const double scale = (double)((float)most / 127.0f);
    for (int64_t i = 0; i < n; i++) {
        const double q = rounded[i] / scale;
        ok &= fabs(q - round(q)) <= 127 * unit && fabs(q) <= 127.01 && fabs(row[i] - rounded[i]) <= 0.50001 * scale;
    }
    return ok;
}

/* The model m has int8 weights, and `plain` has the weights that m had before.  Checks each parameter, and gives
 * `plain` the weights of m. */
static void check_rounding(hy_model *m, hy_model *plain, const char *variant, double unit) {
    for (int i = 0; i < hy_model_param_count(m); i++) {
        const hy_param *p = hy_model_param(m, i);
        const int64_t columns = p->shape[p->rank - 1];
        double *before = malloc((size_t)p->count * sizeof *before), *after = malloc((size_t)p->count * sizeof *after);
        NEED(hy_model_read(plain, HY_VALUE, i, before));
        NEED(hy_model_read(m, HY_VALUE, i, after));
        int ok = is_rounded(m, p) != !memcmp(before, after, (size_t)p->count * sizeof *before);
        for (int64_t row = 0; row < p->count && is_rounded(m, p); row += columns)
            ok &= is_nearest_row(before + row, after + row, columns, unit);
        check(ok, "%s: %s is %srounded as it should be", variant, p->name, is_rounded(m, p) ? "not " : "");
        NEED(hy_model_write(plain, i, after));
        free(before), free(after);
    }
}

typedef struct seen_calls {
    int steps, gemms, others; /* others: forward of rmsnorm_linear */
} seen_calls;

static gt_status count_call(void *seer, hy_backend *be, const hy_call *call) {
    seen_calls *s = seer;
    s->steps += !strcmp(call->name, "rmsnorm_linear_step");
    s->gemms += !strcmp(call->name, "gemm");
    s->others += !strcmp(call->name, "rmsnorm_linear_forward");
    return call->make(be, call->args);
}

/* After hy_model_quantise, prompts and steps have the logits of a model with the rounded weights.  Only steps read int8
 * weights, and only until another weight is written. */
static void test_int8(hy_backend *be, const char *variant, double tolerance) {
    enum { V = 17, S = 3, T = 4, L = 2, PROMPT = 2 * T + 2, TOKENS = 6 };
    hy_config c = small_config(variant, 32, L, 0, 0), ordinary;
    hy_model *m, *plain;
    double logits[S * V], expected[S * V], first[S * V];
    const int has_rwkv = c.mix != HY_MIX_MAMBA, has_mamba = c.mix != HY_MIX_RWKV;
    const int has_joint = c.mix == HY_MIX_RESIDUAL || c.mix == HY_MIX_CONCAT, has_ffn = c.ffn != HY_NO_FFN;
    seed = 15;
    batch b = new_batch(V, S * (PROMPT + TOKENS), 0);
    c.inference = 1, c.samples = S;
    ordinary = c, c.int8 = 1;
    NEED(hy_model_create(be, &c, V, S, T, 1, &m));
    NEED(hy_model_create(be, &ordinary, V, S, T, 1, &plain));
    check_refusal(hy_model_quantise(plain), "without room for int8 weights");
    seed = 1, shake(m, 0.1);
    seed = 1, shake(plain, 0.1);
    NEED(hy_model_feed(m, b.tokens, 1, logits));
    NEED(hy_model_feed(plain, b.tokens, 1, first));
    check(!memcmp(logits, first, sizeof first), "%s %s: int8 changes steps before the weights are rounded", be->name,
          variant);
    NEED(hy_model_quantise(m));
    double bytes = hy_model_token_bytes(plain);
    for (int i = 0; i < hy_model_param_count(m); i++) {
        const hy_param *p = hy_model_param(m, i);
        if (!is_rounded(m, p)) continue;
        bytes += (double)p->count - (double)(p->count - p->count / p->shape[p->rank - 1]) * (double)be->fp32_bytes;
        if (!c.untied && i == 0) bytes += S * 32.0 * (double)be->fp32_bytes; /* rows of a tied embedding */
    }
    check(hy_model_token_bytes(m) == bytes, "%s %s: a step moves %g bytes, not %g", be->name, variant,
          hy_model_token_bytes(m), bytes);
    check_rounding(m, plain, variant, be == be64 ? 1e-12 : 1e-6);
    NEED(hy_model_reset(m));
    NEED(hy_model_feed(m, b.tokens, 1, logits));
    check(distance(logits, first, S * V) > 1e-5, "%s %s: rounding the weights changes nothing", be->name, variant);
    NEED(hy_model_reset(m));
    NEED(hy_model_reset(plain));
    for (int t = 0; t <= TOKENS; t++) {
        const int32_t *tokens = t ? b.tokens + S * (PROMPT + t - 1) : b.tokens;
        seen_calls seen = {0, 0, 0};
        hy_calls_see(be, count_call, &seen);
        const gt_status status = hy_model_feed(m, tokens, t ? 1 : PROMPT, logits);
        hy_calls_leave(be);
        need(status, "hy_model_feed");
        NEED(hy_model_feed(plain, tokens, t ? 1 : PROMPT, expected));
        const double far = distance(logits, expected, S * V);
        check(far <= tolerance, "%s %s: token %d: logits of int8 weights differ by %.3g", be->name, variant, t, far);
        if (!t) continue;
        const int steps = L * (5 * has_rwkv + 2 * has_mamba + has_joint + 2 * has_ffn) + 1;
        const int gemms = L * (4 * has_rwkv + 2 * (has_mamba && c.mamba == 1));
        check(seen.steps == steps && seen.gemms == gemms && !seen.others,
              "%s %s: %d steps of rmsnorm_linear, %d products, %d others; not %d, %d, 0", be->name, variant, seen.steps,
              seen.gemms, seen.others, steps, gemms);
    }
    /* a weight that is written later counts: the gain of the last norm scales all logits */
    int gain = 0;
    while (strcmp(hy_model_param(m, gain)->name, "final_norm") != 0) gain++;
    double *zeros = calloc((size_t)hy_model_param(m, gain)->count, sizeof *zeros);
    NEED(hy_model_write(m, gain, zeros));
    NEED(hy_model_write(plain, gain, zeros));
    NEED(hy_model_reset(m));
    NEED(hy_model_feed(m, b.tokens, 1, logits));
    check(squares(logits, S * V) == 0 && hy_model_token_bytes(m) == hy_model_token_bytes(plain),
          "%s %s: int8 weights serve after a weight was written", be->name, variant);
    for (int i = 0; i < hy_model_param_count(m); i++) {
        const hy_param *p = hy_model_param(m, i);
        if (!strstr(p->name, has_rwkv ? "1.rwkv.out" : "1.mamba.out")) continue;
        double *x = malloc((size_t)p->count * sizeof *x);
        NEED(hy_model_read(m, HY_VALUE, i, x));
        x[5] = NAN;
        NEED(hy_model_write(m, i, x));
        check_refusal(hy_model_quantise(m), has_rwkv ? "layers.1.rwkv.out: " : "layers.1.mamba.out: ");
        free(x);
    }
    free(zeros);
    free_batch(&b);
    hy_model_destroy(m);
    hy_model_destroy(plain);
}

/* Two batches with carried states must give the loss of one batch of twice the length.  A track that is not kept must
 * start from zero states. */
static void test_carried_states(const char *variant) {
    enum { V = 11, B = 3, T = 10, HALF = T / 2 };
    const int32_t all[B] = {1, 1, 1}, some[B] = {1, 0, 1};
    hy_config whole_config = small_config(variant, 32, 2, 1, 0);
    hy_config half_config = small_config(variant, 32, 2, 1, 1);
    hy_model *whole, *half;
    seed = 11;
    batch b = new_batch(V, B * T, 0), part[2] = {new_batch(V, B * HALF, 0), new_batch(V, B * HALF, 0)};
    for (int row = 0; row < B; row++)
        for (int t = 0; t < T; t++) {
            int at = row * HALF + t % HALF;
            part[t / HALF].tokens[at] = b.tokens[row * T + t];
            part[t / HALF].targets[at] = b.targets[row * T + t];
        }
    NEED(hy_model_create(be64, &whole_config, V, B, T, 1, &whole));
    NEED(hy_model_create(be64, &half_config, V, B, HALF, 1, &half));
    seed = 12;
    shake(whole, 0.1);
    seed = 12;
    shake(half, 0.1);
    double first = loss_of(half, &part[0], NULL), second = loss_of(half, &part[1], all);
    double loss = loss_of(whole, &b, NULL);
    check(fabs((first + second) / 2 - loss) < 1e-12, "%s: loss %.15g with carried states, but %.15g in one window",
          variant, (first + second) / 2, loss);
    loss_of(half, &part[0], NULL);
    double eval_sum = 0, kept = loss_of(half, &part[1], all);
    int64_t counted = 0;
    NEED(hy_model_eval(half, part[1].tokens, part[1].targets, &eval_sum, &counted));
    double fresh = loss_of(half, &part[1], NULL);
    check(fabs(eval_sum / (double)counted - fresh) < 1e-12, "%s: evaluation does not start at zero", variant);
    check(fabs(kept - fresh) > 1e-6, "%s: the carried states change nothing", variant);
    /* only the middle track starts from zero states, which shows in the loss over that track's targets alone */
    for (int i = 0; i < B * HALF; i++)
        if (i / HALF != 1) part[1].targets[i] = -1;
    double alone = loss_of(half, &part[1], NULL);
    loss_of(half, &part[0], NULL);
    check(fabs(loss_of(half, &part[1], some) - alone) < 1e-12, "%s: a track was not reset", variant);
    free_batch(&b);
    free_batch(&part[0]);
    free_batch(&part[1]);
    hy_model_destroy(whole);
    hy_model_destroy(half);
}

/* ---- training ------------------------------------------------------------------------------ */

static void test_untrained(const char *name) {
    enum { V = 65, B = 2, T = 32 };
    hy_config c = config_of(name);
    hy_model *m;
    hy_plan plan;
    hy_probe probe;
    int64_t counted = 0, parameters = 0, group[HY_GROUPS] = {0};
    double loss = 0;
    seed = 13;
    batch b = new_batch(V, B * T, 0);
    NEED(hy_model_plan(be32, &c, V, B, T, &plan));
    NEED(hy_model_create(be32, &c, V, B, T, 1, &m));
    for (int i = 0; i < hy_model_param_count(m); i++) {
        parameters += hy_model_param(m, i)->count;
        group[hy_model_param(m, i)->group] += hy_model_param(m, i)->count;
    }
    check(plan.parameters == parameters && !memcmp(plan.group, group, sizeof group) &&
              plan.non_embedding == parameters - V * c.hidden,
          "%s: the plan counts %lld parameters, not %lld", name, (long long)plan.parameters, (long long)parameters);
    check(plan.total == plan.weights + plan.gradients + plan.optimizer + plan.activations + plan.backward +
                            plan.states + plan.workspace,
          "%s: the plan does not add up", name);
    NEED(hy_model_eval(m, b.tokens, b.targets, &loss, &counted));
    check(fabs(loss / (double)counted - log(V)) < 0.1, "%s: untrained loss %.4f, ln V = %.4f", name,
          loss / (double)counted, log(V));
    NEED(hy_model_probe(m, b.tokens, b.targets, &probe));
    int branches_live = 1, has = probe.has[0] + probe.has[1];
    for (int k = 0; k < 2; k++) {
        const double *cosine = probe.state_cosine, *rms = probe.state_rms, *branch = probe.branch_rms;
        if (probe.has[k])
            branches_live &= cosine[k] < 0.9999 && rms[k] > 1e-6 && branch[k] > 1e-4 && probe.branch_gain[k] > 0;
        else
            branches_live &= cosine[k] == 0 && rms[k] == 0 && branch[k] == 0 && probe.branch_gain[k] == 0;
    }
    check(has == (c.mix == HY_MIX_RWKV || c.mix == HY_MIX_MAMBA ? 1 : 2) && probe.has[0] == (c.mix != HY_MIX_MAMBA),
          "%s: has %d branches", name, has);
    check(branches_live && probe.finite && fabs(probe.entropy - log(V)) < 0.1 && probe.state_tokens == T / 2 &&
              probe.activation_variance > 1e-6 && fabs(probe.branch_cosine) < 0.5 &&
              fabs(probe.loss - loss / (double)counted) < 1e-5,
          "%s: a number of the probe is out of its range: entropy %g, cosines %g %g, variance %g, branches %g %g %g",
          name, probe.entropy, probe.state_cosine[0], probe.state_cosine[1], probe.activation_variance,
          probe.branch_rms[0], probe.branch_rms[1], probe.branch_cosine);
    free_batch(&b);
    hy_model_destroy(m);
}

/* A model must learn one batch by heart if the batch is repeated. */
static void test_overfit(const char *variant) {
    enum { V = 20, B = 2, T = 16, STEPS = 150 };
    hy_config c = small_config(variant, 32, 2, 0, 0);
    hy_model *m;
    hy_result r = {0};
    int step = 0;
    seed = 14;
    batch b = new_batch(V, B * T, 0);
    NEED(hy_model_create(be32, &c, V, B, T, 1, &m));
    do {
        NEED(hy_model_train(m, b.tokens, b.targets, NULL, &adam));
        NEED(hy_model_result(m, &r));
    } while (++step < STEPS && r.loss >= 0.1);
    check(r.loss < 0.1, "%s: the loss is still %.4f after %d steps on one batch", variant, r.loss, step);
    free_batch(&b);
    hy_model_destroy(m);
}

/* Trains a stateful model for some steps on one backend, with weight decay, clipping and a loss scale. */
static double *train_some(hy_backend *be, int threads, float loss_scale, int64_t *n) {
    enum { V = 30, B = 3, T = 20 };
    const int32_t keep[B] = {1, 0, 1};
    hy_config c = small_config("HY", 64, 2, 0, 1);
    hy_optimizer o = adam;
    hy_model *m;
    o.weight_decay = 0.1f, o.loss_scale = loss_scale;
#ifdef _OPENMP
    omp_set_num_threads(threads);
#else
    (void)threads;
#endif
    seed = 15;
    NEED(hy_model_create(be, &c, V, B, T, 3, &m));
    for (int step = 0; step < 4; step++) {
        batch b = new_batch(V, B * T, 1);
        NEED(hy_model_train(m, b.tokens, b.targets, step ? keep : NULL, &o));
        free_batch(&b);
    }
    double *x = read_all(m, HY_VALUE, n);
    hy_model_destroy(m);
    return x;
}

static void test_repeat(void) {
    int64_t n;
    double *first = train_some(be32, 1, 0, &n), *second = train_some(be32, 1, 0, &n);
    double *threads = train_some(be32, 3, 0, &n), *scaled = train_some(be32, 1, 1024, &n);
    double *exact = train_some(be64, 1, 0, &n), *exact_scaled = train_some(be64, 1, 1000, &n);
    check(!memcmp(first, second, (size_t)n * sizeof *first), "a second run differs");
    check(!memcmp(first, threads, (size_t)n * sizeof *first), "other thread counts differ");
    check(!memcmp(first, scaled, (size_t)n * sizeof *first), "a loss scale of 2^10 differs");
    check(distance(exact_scaled, exact, n) < 1e-9, "a loss scale of 1000 differs by %.3g",
          distance(exact_scaled, exact, n));
    check(distance(first, exact, n) < 1e-3, "four steps in float differ by %.3g", distance(first, exact, n));
    free(first), free(second), free(threads), free(scaled), free(exact), free(exact_scaled);
}

/* The gradients that the model reports must not contain the loss scale. */
static void test_loss_scale(void) {
    enum { V = 9, B = 1, T = 8 };
    hy_config c = small_config("HY", 16, 1, 0, 0);
    hy_optimizer o = adam;
    double *gradient[2];
    int64_t n;
    seed = 17;
    batch b = new_batch(V, B * T, 0);
    for (int i = 0; i < 2; i++) {
        hy_model *m;
        hy_result r;
        o.loss_scale = i ? 1000 : 1;
        NEED(hy_model_create(be64, &c, V, B, T, 1, &m));
        NEED(hy_model_train(m, b.tokens, b.targets, NULL, &o));
        NEED(hy_model_result(m, &r));
        gradient[i] = read_all(m, HY_GRADIENT, &n);
        double norm = sqrt(squares(gradient[i], n));
        check(fabs(norm - r.norm[HY_GROUPS]) <= 1e-12 * norm, "loss scale %g: the norm is %g, but the gradient has %g",
              o.loss_scale, r.norm[HY_GROUPS], norm);
        hy_model_destroy(m);
    }
    check(distance(gradient[1], gradient[0], n) < 1e-12, "loss scale 1000: the gradient differs");
    free(gradient[0]), free(gradient[1]);
    free_batch(&b);
}

/* A step with a gradient that is not finite must change nothing, and the result must say so. */
static void test_skipped_step(void) {
    enum { V = 9, B = 1, T = 4 };
    hy_config c = small_config("HY", 16, 1, 0, 0);
    hy_model *m;
    hy_result r;
    int64_t n;
    seed = 16;
    batch b = new_batch(V, B * T, 0);
    NEED(hy_model_create(be32, &c, V, B, T, 1, &m));
    NEED(hy_model_train(m, b.tokens, b.targets, NULL, &adam));
    NEED(hy_model_result(m, &r));
    check(!r.skipped && r.targets == B * T && r.norm[HY_GROUPS] > 0, "a good step was skipped");
    double bad = INFINITY, *before, *after;
    int last = hy_model_param_count(m) - 1, size = (int)hy_model_param(m, last)->count;
    double *gamma = malloc((size_t)size * sizeof *gamma);
    NEED(hy_model_read(m, HY_VALUE, last, gamma));
    gamma[0] = bad;
    NEED(hy_model_write(m, last, gamma));
    before = read_all(m, HY_VALUE, &n);
    NEED(hy_model_train(m, b.tokens, b.targets, NULL, &adam));
    NEED(hy_model_result(m, &r));
    after = read_all(m, HY_VALUE, &n);
    check(r.skipped && !memcmp(before, after, (size_t)n * sizeof *before),
          "a step with an infinite gradient moved the parameters");
    free(gamma), free(before), free(after);
    free_batch(&b);
    hy_model_destroy(m);
}

/* ---- layers that are run again for backward -------------------------------------------------- */

static size_t allocated; /* bytes of the last alloc */
static gt_status (*true_alloc)(hy_backend *, void **, size_t);
static gt_status counting_alloc(hy_backend *be, void **memory, size_t bytes) {
    allocated = bytes;
    return true_alloc(be, memory, bytes);
}

/* A model that recomputes layers must equal a model that does not, bit for bit: activations, the probe, gradients,
 * accumulated gradients, carried states and steps.  Its memory must equal the plan.  The plan has the activations of
 * only one layer, and the inputs of all layers. */
static void test_recompute(hy_backend *be, const char *variant, int stateful) {
    enum { V = 11, B = 2, T = 9, LAYERS = 4 };
    const int32_t keep[B] = {1, 0};
    hy_config c = small_config(variant, 32, LAYERS, 2, stateful), again = c;
    hy_model *m[2];
    hy_plan plan[2];
    hy_probe probe[2];
    double *numbers[2];
    int64_t n;
    again.recompute = 1;
    seed = 18;
    batch b1 = new_batch(V, B * T, 1), b2 = new_batch(V, B * T, 0);
    true_alloc = be->alloc;
    for (int i = 0; i < 2; i++) {
        NEED(hy_model_plan(be, i ? &again : &c, V, B, T, &plan[i]));
        be->alloc = counting_alloc;
        NEED(hy_model_create(be, i ? &again : &c, V, B, T, 1, &m[i]));
        be->alloc = true_alloc;
        check(allocated == plan[i].total, "%s: planned %zu bytes, allocated %zu", variant, plan[i].total, allocated);
        seed = 19;
        shake(m[i], 0.1);
    }
    /* a layer's activations without its input */
    const size_t layer = (plan[0].activations - plan[1].activations) / (LAYERS - 1);
    check(plan[1].total == plan[0].total - (LAYERS - 1) * layer && plan[1].backward == plan[0].backward &&
              plan[0].activations > LAYERS * layer && plan[1].activations < plan[0].activations / 2,
          "%s: with recompute the activations take %zu bytes, without it %zu", variant, plan[1].activations,
          plan[0].activations);
    for (int i = 0; i < 2; i++) {
        memset(&probe[i], 0, sizeof probe[i]);
        NEED(hy_model_probe(m[i], b1.tokens, b1.targets, &probe[i]));
        loss_of(m[i], &b1, NULL);
    }
    check(!memcmp(&probe[0], &probe[1], sizeof probe[0]), "%s: recompute: the probe differs", variant);
    for (int i = hy_model_activation_count(m[0]) - 1; i >= 0; i -= 3) {
        hy_activation a = hy_model_activation(m[0], i);
        for (int k = 0; k < 2; k++) {
            numbers[k] = malloc((size_t)a.count * sizeof(double));
            NEED(hy_model_read_activation(m[k], i, numbers[k]));
        }
        check(!memcmp(numbers[0], numbers[1], (size_t)a.count * sizeof(double)), "%s: recompute: %s differs", variant,
              a.name);
        free(numbers[0]), free(numbers[1]);
    }
    for (int what = 0; what < 4; what++) {
        static const char *const names[] = {"gradient", "sum of gradients", "weights", "weights after evaluation"};
        for (int i = 0; i < 2; i++) {
            double sum = 0;
            int64_t counted = 0;
            if (what == 1) loss_of(m[i], &b2, stateful ? keep : NULL);
            if (what < 2) NEED(hy_model_backward(m[i], what));
            for (int step = 0; what >= 2 && step < 3; step++) {
                if (what == 3) NEED(hy_model_eval(m[i], b1.tokens, b1.targets, &sum, &counted));
                NEED(hy_model_train(m[i], step ? b1.tokens : b2.tokens, step ? b1.targets : b2.targets,
                                    stateful ? keep : NULL, &adam));
            }
            numbers[i] = read_all(m[i], what < 2 ? HY_GRADIENT : HY_VALUE, &n);
        }
        check(!memcmp(numbers[0], numbers[1], (size_t)n * sizeof(double)) && squares(numbers[0], n) > 0,
              "%s %s%s: recompute: the %s differ", be->name, variant, stateful ? ", stateful" : "", names[what]);
        free(numbers[0]), free(numbers[1]);
    }
    double *x = malloc((size_t)hy_model_activation(m[1], 0).count * sizeof *x);
    /* after a call that the device may replay, the model must refuse to recompute layers */
    NEED(hy_model_infer(m[1], b1.tokens));
    check_refusal(hy_model_read_activation(m[1], 0, x), "recompute: the activations of layer 0");
    free(x);
    free_batch(&b1);
    free_batch(&b2);
    hy_model_destroy(m[0]);
    hy_model_destroy(m[1]);
}

/* ---- which operators are one call ------------------------------------------------------------ */

/* A model with wkv_ssm and a model with conv_ssd must have the same loss, gradients and weights, bit for bit.  With
 * conv_ssd the model needs no memory for convolved rows. */
static void test_fuse(const char *variant, int stateful) {
    enum { V = 11, B = 2, T = 9, LAYERS = 3, D = 2 * 32 + 2 * 64 };
    const int32_t keep[B] = {1, 0};
    hy_config c = small_config(variant, 32, LAYERS, 2, stateful);
    double *numbers[2][2], loss[2];
    hy_plan plan[2];
    int64_t n;
    seed = 23;
    batch b = new_batch(V, B * T, 1);
    for (int i = 0; i < 2; i++) {
        hy_model *m;
        c.fuse = i ? HY_CONV_SSD : HY_WKV_SSM;
        NEED(hy_model_plan(be32, &c, V, B, T, &plan[i]));
        NEED(hy_model_create(be32, &c, V, B, T, 1, &m));
        seed = 24;
        shake(m, 0.1);
        loss_of(m, &b, NULL);
        loss[i] = loss_of(m, &b, stateful ? keep : NULL);
        NEED(hy_model_backward(m, 0));
        numbers[i][0] = read_all(m, HY_GRADIENT, &n);
        for (int step = 0; step < 3; step++)
            NEED(hy_model_train(m, b.tokens, b.targets, stateful ? keep : NULL, &adam));
        numbers[i][1] = read_all(m, HY_VALUE, &n);
        hy_model_destroy(m);
    }
    check(loss[0] == loss[1], "%s: the loss is %.17g with wkv_ssm, %.17g with conv_ssd", variant, loss[0], loss[1]);
    for (int what = 0; what < 2; what++) {
        check(squares(numbers[0][what], n) > 0 &&
                  !memcmp(numbers[0][what], numbers[1][what], (size_t)n * sizeof(double)),
              "%s%s: the %s of wkv_ssm and conv_ssd differ", variant, stateful ? ", stateful" : "",
              what ? "weights" : "gradients");
        free(numbers[0][what]), free(numbers[1][what]);
    }
    const size_t rows = (B * T - 1) * D * sizeof(float), rounding = LAYERS * 256;
    check(plan[0].activations - plan[1].activations + rounding >= LAYERS * rows &&
              plan[0].activations - plan[1].activations <= LAYERS * rows + rounding &&
              plan[0].parameters == plan[1].parameters && plan[0].states == plan[1].states,
          "%s: activations take %zu bytes with wkv_ssm, but %zu with conv_ssd: must take fewer with conv_ssd", variant,
          plan[0].activations, plan[1].activations);
    free_batch(&b);
}

/* ---- layers without FFN, and an untied head ------------------------------------------------- */

/* The index of the parameter with this name; -1: there is none. */
static int param_of(const hy_model *m, const char *name) {
    for (int i = 0; i < hy_model_param_count(m); i++)
        if (!strcmp(hy_model_param(m, i)->name, name)) return i;
    return -1;
}

static double *read_param(hy_model *m, hy_value what, const char *name) {
    const int i = param_of(m, name);
    if (!check(i >= 0, "there is no parameter %s", name)) return calloc(1, sizeof(double));
    double *x = malloc((size_t)hy_model_param(m, i)->count * sizeof *x);
    NEED(hy_model_read(m, what, i, x));
    return x;
}

/* Copies the parameters that both models have.  The parameters of `to` whose names end with `other` get the numbers of
 * `name`, or zeros if `name` is NULL. */
static void copy_params(hy_model *from, hy_model *to, const char *other, const char *name) {
    for (int i = 0; i < hy_model_param_count(to); i++) {
        const hy_param *p = hy_model_param(to, i);
        const int is_other =
            strlen(p->name) >= strlen(other) && !strcmp(p->name + strlen(p->name) - strlen(other), other);
        const char *source = is_other ? name : p->name;
        double *x = source && param_of(from, source) >= 0 ? read_param(from, HY_VALUE, source) : NULL;
        if (!x && !is_other) continue; /* parameters of an FFN, which do not matter because its last product is 0 */
        if (!x) x = calloc((size_t)p->count, sizeof *x);
        NEED(hy_model_write(to, i, x));
        free(x);
    }
}

/* Checks that both models have the same loss, and the same gradients of the parameters that both have, except
 * `other`. */
static void same_gradients(hy_model *a, hy_model *b, const char *variant, const char *other) {
    enum { V = 11, B = 2, T = 6 };
    batch text = new_batch(V, B * T, 1);
    const double loss = loss_of(a, &text, NULL), same = loss_of(b, &text, NULL);
    check(loss == same && loss > 0, "%s: the loss is %.17g, not %.17g", variant, loss, same);
    NEED(hy_model_backward(a, 0));
    NEED(hy_model_backward(b, 0));
    for (int i = 0; i < hy_model_param_count(a); i++) {
        const hy_param *p = hy_model_param(a, i);
        if (!strcmp(p->name, other) || param_of(b, p->name) < 0) continue;
        double *x = read_param(a, HY_GRADIENT, p->name), *y = read_param(b, HY_GRADIENT, p->name);
        check(!memcmp(x, y, (size_t)p->count * sizeof *x) && squares(x, p->count) > 0, "%s: the gradients of %s differ",
              variant, p->name);
        free(x), free(y);
    }
    free_batch(&text);
}

/* A layer without FFN must equal a layer whose FFN ends with a product by zero weights. */
static void test_bare(const char *variant, const char *bare) {
    enum { V = 11, B = 2, T = 6, LAYERS = 2 };
    hy_config c = small_config(bare, 16, LAYERS, 2, 0), with_ffn = small_config(variant, 16, LAYERS, 2, 0);
    hy_model *m, *full;
    seed = 17;
    NEED(hy_model_create(be64, &c, V, B, T, 1, &m));
    NEED(hy_model_create(be64, &with_ffn, V, B, T, 1, &full));
    shake(m, 0.1);
    copy_params(m, full, "ffn.down", NULL);
    check(hy_model_param_count(full) == hy_model_param_count(m) + 3 * LAYERS, "%s: %d parameters, %d with FFN", bare,
          hy_model_param_count(m), hy_model_param_count(full));
    same_gradients(m, full, bare, "");
    hy_model_destroy(m);
    hy_model_destroy(full);
}

/* An untied head with the numbers of the embedding must give the same loss as a tied head.  The gradient of the tied
 * head must be the sum of the gradients of head and embedding. */
static void test_untied(const char *variant, const char *untied) {
    enum { V = 11, B = 2, T = 6 };
    hy_config c = small_config(untied, 16, 2, 2, 0), tied = small_config(variant, 16, 2, 2, 0);
    hy_model *m, *one;
    hy_plan plan;
    seed = 18;
    NEED(hy_model_create(be64, &c, V, B, T, 1, &m));
    NEED(hy_model_create(be64, &tied, V, B, T, 1, &one));
    double *own = read_param(m, HY_VALUE, "head"), *embedding = read_param(m, HY_VALUE, "embedding");
    const int64_t n = hy_model_param(m, param_of(m, "embedding"))->count;
    check(distance(own, embedding, n) > 0.5, "%s: a new head is not independent of the embedding", untied);
    free(own), free(embedding);
    shake(one, 0.1);
    copy_params(one, m, "head", "embedding");
    check(param_of(one, "head") < 0, "%s: a tied model has a head", variant);
    same_gradients(m, one, untied, "embedding");
    double *sum = read_param(one, HY_GRADIENT, "embedding");
    own = read_param(m, HY_GRADIENT, "head"), embedding = read_param(m, HY_GRADIENT, "embedding");
    check(squares(own, n) > 0 && squares(embedding, n) > 0, "%s: a gradient is zero", untied);
    for (int64_t i = 0; i < n; i++) own[i] += embedding[i];
    check(distance(own, sum, n) < 1e-14, "%s: the gradients of head and embedding do not add up", untied);
    NEED(hy_model_plan(be32, &c, V, B, T, &plan));
    check(plan.group[0] == 2 * n && plan.non_embedding == plan.parameters - 2 * n, "%s: the plan has no head", untied);
    free(sum), free(own), free(embedding);
    hy_model_destroy(m);
    hy_model_destroy(one);
}

/* ---- errors -------------------------------------------------------------------------------- */

static void test_errors(void) {
    enum { V = 9, B = 2, T = 4 };
    hy_config good = small_config("HY", 32, 1, 0, 0), c;
    hy_model *m;
    hy_plan plan;
    double numbers[V], loss = 0;
    int64_t counted = 0;
    batch b = new_batch(V, B * T, 0);
    c = good, c.hidden = 40;
    check_refusal(hy_model_create(be32, &c, V, B, T, 1, &m), "hidden");
    check(m == NULL, "a failed hy_model_create leaves a model");
    c = good, c.layers = 0;
    check_refusal(hy_model_plan(be32, &c, V, B, T, &plan), "layers");
    c = good, c.heads = 3;
    check_refusal(hy_model_create(be32, &c, V, B, T, 1, &m), "heads");
    c = good, c.state = 12;
    check_refusal(hy_model_create(be32, &c, V, B, T, 1, &m), "d-state");
    c = good, c.expand = 9;
    check_refusal(hy_model_create(be32, &c, V, B, T, 1, &m), "expand");
    c = good, c.mamba_head = 48;
    check_refusal(hy_model_create(be32, &c, V, B, T, 1, &m), "mamba-head");
    c = good, c.conv = 5;
    check_refusal(hy_model_create(be32, &c, V, B, T, 1, &m), "d-conv");
    c = good, c.ffn = 17;
    check_refusal(hy_model_create(be32, &c, V, B, T, 1, &m), "ffn");
    c = good, c.ffn = -2;
    check_refusal(hy_model_create(be32, &c, V, B, T, 1, &m), "ffn");
    c = good, c.untied = 2;
    check_refusal(hy_model_create(be32, &c, V, B, T, 1, &m), "untied");
    c = good, c.hidden = 512, c.heads = 1;
    check_refusal(hy_model_create(be32, &c, V, B, T, 1, &m), "heads of 512 channels");
    c = good, c.inference = 2;
    check_refusal(hy_model_create(be32, &c, V, B, T, 1, &m), "inference");
    c = good, c.int8 = 2, c.inference = 1;
    check_refusal(hy_model_create(be32, &c, V, B, T, 1, &m), "int8 = 2: must be 0 to 1");
    c.int8 = 1, c.inference = 0;
    check_refusal(hy_model_create(be32, &c, V, B, T, 1, &m), "int8 = 1: only a model for inference");
    c.inference = 1, c.samples = 65;
    check_refusal(hy_model_create(be32, &c, V, 65, T, 1, &m), "samples = 65: int8 weights decode at most 64");
    c = good, c.recompute = 2;
    check_refusal(hy_model_create(be32, &c, V, B, T, 1, &m), "recompute");
    c = good, c.fuse = (hy_fuse)2;
    check_refusal(hy_model_create(be32, &c, V, B, T, 1, &m), "fuse");
    c = good, c.share = 1;
    check_refusal(hy_model_create(be32, &c, V, B, T, 1, &m), "share");
    check_refusal(hy_model_create(be32, &good, 0, B, T, 1, &m), "vocab");
    check_refusal(hy_model_create(be32, &good, V, 0, T, 1, &m), "batch");
    check_refusal(hy_model_create(be32, &good, V, B, 0, 1, &m), "seq");
    NEED(hy_model_create(be32, &good, V, B, T, 1, &m));
    check_refusal(hy_model_backward(m, 0), "hy_model_forward");
    b.tokens[3] = V;
    check_refusal(hy_model_forward(m, b.tokens, b.targets, NULL), "tokens[3]");
    check_refusal(hy_model_feed(m, b.tokens, B * T, numbers), "tokens[3]");
    b.tokens[3] = 0;
    b.targets[1] = V;
    check_refusal(hy_model_eval(m, b.tokens, b.targets, &loss, &counted), "targets[1]");
    check_refusal(hy_model_read(m, HY_VALUE, 1000, numbers), "parameter");
    b.targets[1] = 0;
    NEED(hy_model_forward(m, b.tokens, b.targets, NULL));
    NEED(hy_model_feed(m, b.tokens, 1, numbers));
    /* decoding has overwritten the activations of hy_model_forward */
    check_refusal(hy_model_backward(m, 0), "hy_model_forward");
    NEED(hy_model_forward(m, b.tokens, b.targets, NULL));
    NEED(hy_model_infer(m, NULL));
    check_refusal(hy_model_backward(m, 0), "hy_model_forward");
    free_batch(&b);
    hy_model_destroy(m);
    hy_model_destroy(NULL);
}

int main(int argc, char **argv) {
    static const char *const names[] = {"1M", "5M", "8M", "HY-M1", "RWKV-6", "Mamba-2", "Mamba-1"};
    is_short = argc > 1 && !strcmp(argv[1], "short");
    hy_backend_cpu(&be32);
    hy_backend_cpu64(&be64);
#ifdef _OPENMP
    omp_set_num_threads(1);
#endif
    for (int i = 0; i < VARIANTS; i++) {
        test_gradient(variants[i], i % 2);
        test_gradient_sums(variants[i]);
        if (!is_short || i % 4 == 0) test_parts(variants[i]);
        test_inference(be32, variants[i]);
        test_inference_only(be32, variants[i]);
        test_inference_only(be64, variants[i]);
        test_decoding(be64, variants[i], 1e-11);
        test_decoding(be32, variants[i], 1e-4);
        test_samples(be64, variants[i], 1e-11);
        test_samples(be32, variants[i], 1e-4);
        test_replayed_steps(i % 2 ? be64 : be32, variants[i], 0);
        test_replayed_steps(i % 2 ? be32 : be64, variants[i], 1);
        test_int8(be64, variants[i], 1e-11);
        test_int8(be32, variants[i], 1e-4);
        test_carried_states(variants[i]);
        if (!is_short || i % 2 == 0) test_recompute(be32, variants[i], i / 2 % 2);
        if (!is_short) test_recompute(be32, variants[i], 1 - i / 2 % 2);
        if (!is_short || i % 2 == 1) test_recompute(be64, variants[i], i / 2 % 2);
        test_overfit(variants[i]);
    }
    test_gradient("HY", 1);
    static const char *const dropped[] = {"HY dropout", "CP dropout", "HY-M1 dropout", "Mamba-2 dropout"};
    for (int i = 0; i < 4; i++)
        test_gradient(dropped[i], i % 2), test_recompute(be64, dropped[i], i % 2), test_parts(dropped[i]);
    for (int i = 0; i < 6; i++) test_fuse(variants[i], i % 2); /* the first six have both branches, and Mamba-2 */
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) test_untrained(names[i]);
    static const char *const of_parts[] = {"HY", "Mamba-2", "Mamba-1", "RWKV-6"};
    for (int i = 0; i < 4; i++) {
        char name[32];
        snprintf(name, sizeof name, "%s bare", of_parts[i]);
        test_bare(of_parts[i], name);
        snprintf(name, sizeof name, "%s untied", of_parts[i]);
        test_untied(of_parts[i], name);
    }
    test_repeat();
    test_loss_scale();
    test_skipped_step();
    test_errors();
    be32->close(be32);
    be64->close(be64);
    return test_finish();
}
