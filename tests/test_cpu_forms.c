/* Tests the forms of the trainer's CPU backend: a form is the code for a set of features, AVX2 and BLAS.  For every
 * form that this build and processor support, the test compares exp and the twins with double, and trains with 1, 2 and
 * 3 threads.
 *
 *     test_cpu_forms [short]       short: fewer drawn cases; trains only one model, with 1 thread and with 2 or 3
 *
 * The test skips unsupported forms.  If GT_TEST_STRICT is set, a missing OpenBLAS is a failure. */
#include "gt_invariants.h"
#include "hybrid_cpu.h"
#include "hybrid_model.h"
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

enum { FORMS = (HY_CPU_AVX2 | HY_CPU_BLAS) + 1 };
static int is_short;

static const char *form_name(int features) {
    static const char *const names[FORMS] = {"base", "AVX2", "BLAS", "AVX2 and BLAS"};
    return names[features];
}

static int is_here(int features) { return !(features & ~hy_cpu_features()); }

static void set_threads(int n) {
#ifdef _OPENMP
    omp_set_num_threads(n);
#else
    (void)n;
#endif
}

static hy_backend *open_form(int features) {
    hy_backend *be = NULL;
    if (hy_backend_cpu_with(&be, features) == GT_OK) return be;
    printf("%s: %s\n", form_name(features), hy_last_error());
    exit(1);
}

/* ---- exp ------------------------------------------------------------------------------------- */

/* The difference between y and the truth in units in the last place.  The truth must be finite and not too small. */
static double units(float y, double truth) {
    int exponent;
    frexp(truth, &exponent);
    return fabs(y - truth) / ldexp(1, exponent - 24 < -149 ? -149 : exponent - 24);
}

/* Tests -exp(x) for floats of all sizes: takes every 3989th bit pattern. */
static void check_exp(int features) {
    enum { N = 4096 };
    static float x[N], y[N];
    hy_backend *be = open_form(features);
    double worst = 0, at = 0;
    int64_t bad = 0;
    for (uint64_t pattern = 0; pattern <= UINT32_MAX;) {
        for (int i = 0; i < N; i++, pattern += 3989) x[i] = gt_bits_float((uint32_t)pattern);
        hy_map_args a = {.n = N, .function = HY_NEG_EXP, .x = x, .y = y};
        test_check(be->map_forward(be, &a) == GT_OK, "%s", hy_last_error());
        for (int i = 0; i < N; i++) {
            double truth = exp((double)x[i]);
            if (isnan(truth))
                bad += !isnan(y[i]);
            else if (truth > FLT_MAX || truth < 0x1p-150)
                bad += -y[i] != (float)truth;
            else if (!(units(-y[i], truth) <= worst))
                worst = units(-y[i], truth), at = x[i];
        }
    }
    test_check(!bad, "exp, %s: %lld values beyond the ends of the range", form_name(features), (long long)bad);
    test_check(worst <= 1.1, "exp, %s: exp(%.9g) is off by %.3f units in the last place", form_name(features), at,
               worst);
    be->close(be);
}

/* ---- the twins ------------------------------------------------------------------------------- */

#define PASS(op, pass)                                                                                                 \
    gt_status hy_base_##op##_##pass(const gt_##op##_args *args);                                                       \
    gt_status hy_avx2_##op##_##pass(const gt_##op##_args *args);                                                       \
    static gt_status op##_##pass(const test_runner *r, const void *args) {                                             \
        return RUN(hy_base_##op##_##pass, hy_avx2_##op##_##pass);                                                      \
    }
#ifdef HY_AVX2
#define RUN(base, avx2) (*(const int *)r->context ? avx2 : base)(args)
#else
#define RUN(base, avx2) ((void)r, base(args))
#endif

#define ROWS(op) PASS(op, forward) PASS(op, backward)
#define STEPS(op) ROWS(op) PASS(op, step)
#define PIECES(op) PASS(op, segment) PASS(op, segment_backward) PASS(op, join) PASS(op, join_backward)
HY_OPERATORS(STEPS, ROWS, STEPS)
PIECES(wkv6)
PIECES(ssd)

typedef gt_status twin(const test_runner *r, const void *args);

static const struct {
    const char *op;
    twin *run[GT_PASSES];
} twins[] = {
#define ROWS_ENTRY(op) {#op, {op##_forward, op##_backward}},
#define STEPS_ENTRY(op) {#op, {op##_forward, op##_backward, op##_step}},
    HY_OPERATORS(STEPS_ENTRY, ROWS_ENTRY, STEPS_ENTRY)};
enum { TWINS = sizeof twins / sizeof twins[0], DRAWN_SIZE = 20 };
static uint64_t drawn = 40;

/* The twins of the passes for pieces, which models do not use. */
static twin *piece_of(const char *op, gt_pass pass) {
    static const struct {
        const char *op;
        twin *run[4];
    } known[] = {{"wkv6", {wkv6_segment, wkv6_segment_backward, wkv6_join, wkv6_join_backward}},
                 {"ssd", {ssd_segment, ssd_segment_backward, ssd_join, ssd_join_backward}}};
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (!strcmp(known[i].op, op) && pass >= GT_SEGMENT) return known[i].run[pass - GT_SEGMENT];
    return NULL;
}

static gt_status run_twin(const test_runner *r, const test_op *op, gt_pass pass, const void *args, char *memory,
                          size_t bytes) {
    const char *name = op->table()->name;
    twin *run = piece_of(name, pass);
    (void)memory, (void)bytes;
    for (int i = 0; i < TWINS && !run; i++)
        if (!strcmp(twins[i].op, name)) run = twins[i].run[pass];
    return run ? run(r, args) : GT_ERROR_UNSUPPORTED;
}

static void check_twins(const char *op, int features) {
    test_runner r = test_twin;
    r.name = form_name(features);
    r.run = run_twin;
    r.context = &features;
    for (const test_case *c = test_op_of(op)->cases; c->op; c++)
        if (c->level <= TEST_MEDIUM) test_truth_holds(&r, c);
    /* wkv_ssm calls the twins of wkv6 and ssd, and drawn cases test these twins already */
    if (!strcmp(op, "wkv_ssm")) return;
    for (uint64_t seed = 1; seed <= drawn; seed++) {
        test_case c;
        test_draw_case(test_op_of(op), seed, DRAWN_SIZE, &c);
        test_truth_holds(&r, &c);
    }
}

/* ---- training -------------------------------------------------------------------------------- */

enum { VOCAB = 40, BATCH = 4, SEQ = 70, STEPS = 12 };

/* The results of a training run: the losses, and the gradients of the first step for all parameters, in one array. */
typedef struct training {
    double loss[STEPS], *gradient;
    int64_t parameters;
} training;

static void need(gt_status status, const char *call) {
    if (status == GT_OK) return;
    printf("%s: %s\n", call, hy_last_error());
    exit(1);
}
#define NEED(call) need(call, #call)

static hy_config small_model(const char *name) {
    int count;
    const hy_config *list = hy_model_list(&count);
    for (int i = 0; i < count; i++)
        if (!strcmp(list[i].name, name)) {
            hy_config c = list[i];
            c.hidden = 80, c.heads = 5, c.layers = 2; /* a size that does not fill the blocks of matrix products */
            return c;
        }
    printf("no model %s\n", name);
    exit(1);
}

static training train(const char *model, int features, int threads) {
    const hy_optimizer adam = {.lr = 4e-3f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .max_norm = 1};
    hy_backend *be = open_form(features);
    hy_config c = small_model(model);
    hy_model *m;
    training t = {{0}, NULL, 0};
    int32_t tokens[BATCH * SEQ], targets[BATCH * SEQ];
    test_random r = {7};
    set_threads(threads);
    NEED(hy_model_create(be, &c, VOCAB, BATCH, SEQ, 3, &m));
    for (int i = 0; i < hy_model_param_count(m); i++) t.parameters += hy_model_param(m, i)->count;
    t.gradient = test_array(t.parameters, 0);
    for (int step = 0; step < STEPS; step++) {
        hy_result result;
        for (int i = 0; i < BATCH * SEQ; i++) {
            tokens[i] = (int32_t)(VOCAB * test_uniform(&r) * test_uniform(&r));
            targets[i] = (tokens[i] * 3 + 1) % VOCAB;
        }
        NEED(hy_model_train(m, tokens, targets, NULL, &adam));
        NEED(hy_model_result(m, &result));
        t.loss[step] = result.loss;
        double *at = t.gradient;
        for (int i = 0; step == 0 && i < hy_model_param_count(m); i++) {
            NEED(hy_model_read(m, HY_GRADIENT, i, at));
            at += hy_model_param(m, i)->count;
        }
    }
    hy_model_destroy(m);
    be->close(be);
    return t;
}

static int same_bits(const training *a, const training *b) {
    return !memcmp(a->loss, b->loss, sizeof a->loss) &&
           !memcmp(a->gradient, b->gradient, (size_t)a->parameters * sizeof *a->gradient);
}

/* Returns |a - b| / |b| in l2. */
static double distance(const double *a, const double *b, int64_t n) {
    double difference = 0, size = 0;
    for (int64_t i = 0; i < n; i++) {
        difference += (a[i] - b[i]) * (a[i] - b[i]);
        size += b[i] * b[i];
    }
    return sqrt(difference / size);
}

static void check_training(const char *model) {
    training base = train(model, 0, 1);
    test_check(base.loss[STEPS - 1] < 0.8 * base.loss[0], "%s: the loss stays at %g", model, base.loss[STEPS - 1]);
    for (int features = 0; features < FORMS; features++) {
        const int least = is_short ? 2 + features % 2 : 2, most = is_short ? least : 3;
        const char *name = form_name(features);
        if (!is_here(features)) continue;
        training one = train(model, features, 1);
        for (int threads = least; threads <= most; threads++) {
            training more = train(model, features, threads);
            test_check(same_bits(&more, &one), "%s, %s: %d threads give other bits than one thread", model, name,
                       threads);
            free(more.gradient);
        }
        double first = distance(one.loss, base.loss, 1), last = distance(one.loss, base.loss, STEPS);
        double gradient = distance(one.gradient, base.gradient, base.parameters);
        printf("%s, %s: against base: first loss %.1e, gradient %.1e, %d losses %.1e\n", model, name, first, gradient,
               STEPS, last);
        test_check(first < 1e-6 && gradient < 1e-5 && last < 1e-3,
                   "%s, %s: differs from the form base by more than rounding", model, name);
        free(one.gradient);
    }
    free(base.gradient);
}

/* ---------------------------------------------------------------------------------------------- */

static void check_choice(void) {
    hy_backend *be;
    NEED(hy_backend_cpu(&be));
    printf("%s\n", be->device);
    test_check(!strstr(be->device, "AVX2") == !(hy_cpu_features() & HY_CPU_AVX2) &&
                   !strstr(be->device, "OpenBLAS") == !(hy_cpu_features() & HY_CPU_BLAS),
               "the backend is called '%s'", be->device);
    be->close(be);
    for (int features = 0; features < FORMS; features++)
        if (!is_here(features)) {
            printf("not here: %s\n", form_name(features));
            test_check(hy_backend_cpu_with(&be, features) == GT_ERROR_UNSUPPORTED,
                       "%s opens, although this processor or build does not have it", form_name(features));
        }
    if (getenv("GT_TEST_STRICT")) test_check((hy_cpu_features() & HY_CPU_BLAS) != 0, "OpenBLAS is missing");
    test_group("forms", "the best is taken, others are refused");
}

int main(int argc, char **argv) {
    is_short = argc > 1 && !strcmp(argv[1], "short");
    if (is_short) drawn = 10;
    check_choice();
    for (int features = 0; features <= HY_CPU_AVX2; features++)
        if (is_here(features)) check_exp(features);
    test_group("exp", "all ranges, NaN and infinities");
    for (int i = 0; i < TWINS; i++) {
        for (int features = 0; features <= HY_CPU_AVX2; features++)
            if (is_here(features)) check_twins(twins[i].op, features);
        test_group(twins[i].op, "fp32 against the truth");
    }
    check_training("HY");
    if (!is_short) check_training("CP");
    test_group("training", "the same bits with 1, 2 and 3 threads, all forms agree");
    return test_finish();
}
