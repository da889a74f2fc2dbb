/* wkv6: test cases, a formula independent of the twin, and rows of the bench. */
#include "formula.h"

TEST_TWINS_IN_PIECES(wkv6)

/* ---- arguments ------------------------------------------------------------------------------- */

static const test_field fields[] = {TEST_FIELD(wkv6, V, 'v'),
                                    TEST_FIELD(wkv6, decay, 'i'),
                                    TEST_FLOAT(wkv6, scale, 0.3),
                                    TEST_FIELD(wkv6, state_in_shared, 'i'),
                                    TEST_FIELD(wkv6, segments, 's'),
                                    TEST_FIELD(wkv6, pieces, 's'),
                                    {NULL, 0, 0, 0, 0}};

static const test_bad_value bad_values[] = {BAD_SIZE(wkv6, pieces),
                                            BAD_SIZE(wkv6, V),
                                            BAD_SWITCH(wkv6, decay, 2),
                                            BAD(wkv6, scale, 'f', -1, GT_ERROR_VALUE, "scale = -1"),
                                            BAD(wkv6, scale, 'f', NAN, GT_ERROR_VALUE, "scale = nan"),
                                            BAD(wkv6, scale, 'f', INFINITY, GT_ERROR_VALUE, "scale = inf"),
                                            BAD(wkv6, scale, 'f', 1e-10, GT_ERROR_VALUE, "scale = 1e-10"),
                                            BAD(wkv6, scale, 'f', 1e10, GT_ERROR_VALUE, "scale = 1e+10"),
                                            {NULL, GT_OK, {{0, 0, 0}}}};

/* ---- how inputs are drawn -------------------------------------------------------------------- */

static void set_fill(const test_case *c, const gt_tensor *t, test_fill *f, test_map *map) {
    if (strcmp(t->name, "w")) return;
    f->mean = -3;
    if (c->args.wkv6.decay == GT_DECAY_LOG) *map = TEST_NEGATIVE_EXP;
}

/* ---- cases ----------------------------------------------------------------------------------- */

#define WKV6(...) .op = "wkv6", .args.wkv6 = {__VA_ARGS__}
#define PACKED(...) .args.wkv6 = {.B = 1, __VA_ARGS__}, .op = "wkv6"

static const test_case cases[] = {
    {WKV6(.B = 1, .T = 1, .H = 1, .N = 1), .name = "one number"},
    {WKV6(.B = 2, .T = 3, .H = 2, .N = 3), .name = "raw decay"},
    {WKV6(.B = 2, .T = 3, .H = 2, .N = 3, .decay = GT_DECAY_LOG), .name = "log decay"},
    {WKV6(.B = 2, .T = 4, .H = 1, .N = 2, .V = 3), .name = "wide values"},
    {WKV6(.B = 2, .T = 4, .H = 2, .N = 3, .scale = 0.57735027f), .name = "scaled"},
    {WKV6(.B = 2, .T = 3, .H = 1, .N = 2, .V = 3, .scale = 3, .decay = GT_DECAY_LOG, .state_in_shared = 1),
     .name = "scaled up, shared state"},
    {WKV6(.B = 1, .T = 4, .H = 2, .N = 3, .V = 1, .decay = GT_DECAY_LOG), .name = "narrow values"},
    {WKV6(.B = 3, .T = 2, .H = 2, .N = 2, .state_in_shared = 1), .name = "shared state"},
    {WKV6(.B = 2, .T = 3, .H = 1, .N = 2), .name = "no u, no states", .absent = "u " NO_STATES},
    {WKV6(.B = 2, .T = 3, .H = 1, .N = 2), .name = "zero u and state", .absent = "u state_in"},
    {WKV6(.B = 2, .T = 3, .H = 2, .N = 2), .name = "final state only", .fill = {{"dy", 0, 0, 0, 0}}},
    {WKV6(.B = 2, .T = 4, .H = 1, .N = 3), .name = "strong decay", .fill = {{"w", 1.5, 1, 0, 0}}},
    {WKV6(.B = 2, .T = 4, .H = 1, .N = 3), .name = "hardly any decay", .fill = {{"w", -10, 1, 0, 0}}},
    {WKV6(.B = 2, .T = 5, .H = 1, .N = 3), .name = "zero decays", .fill = {{"w", -3, 1, 200, 0.3}}},
    {WKV6(.B = 2, .T = 5, .H = 1, .N = 3, .decay = GT_DECAY_LOG), .name = "zero log decays",
     .fill = {{"w", -3, 1, -INFINITY, 0.3}}},
    {WKV6(.B = 2, .T = 0, .H = 2, .N = 3), .name = "no time"},
    {WKV6(.B = 2, .T = 0, .H = 2, .N = 3, .state_in_shared = 1), .name = "no time, shared state"},
    {WKV6(.B = 0, .T = 3, .H = 2, .N = 3), .name = "no batch"},
    {WKV6(.B = 0, .T = 70, .H = 2, .N = 64), .name = "no batch, a size of tensor cores"},
    {WKV6(.B = 0, .T = 3, .H = 2, .N = 3, .state_in_shared = 1), .name = "no batch, shared state"},
    {WKV6(.B = 2, .T = 70, .H = 2, .N = 4, .V = 3), .name = "two chunks", .level = TEST_SMALL},
    {WKV6(.B = 2, .T = 130, .H = 1, .N = 3, .decay = GT_DECAY_LOG, .state_in_shared = 1),
     .name = "three chunks, shared state", .level = TEST_SMALL},
    {WKV6(.B = 1, .T = 70, .H = 2, .N = 4), .name = "two chunks, zero decays", .level = TEST_SMALL,
     .fill = {{"w", -3, 1, 200, 0.1}}},
    {WKV6(.B = 6, .T = 16, .H = 2, .N = 4, .V = 6, .slot_capacity = 9), .name = "slots", .level = TEST_SMALL},
    {WKV6(.B = 2, .T = 65, .H = 2, .N = 64), .name = "64", .level = TEST_MEDIUM},
    {WKV6(.B = 2, .T = 33, .H = 2, .N = 64, .decay = GT_DECAY_LOG), .name = "64, slices of 644", .level = TEST_MEDIUM,
     .layout = TEST_SLICES, .row = 644},
    {WKV6(.B = 1, .T = 129, .H = 3, .N = 16, .V = 40), .name = "16 by 40, strong decay", .level = TEST_MEDIUM,
     .fill = {{"w", 1.5, 1, 0, 0}}},
    {WKV6(.B = 1, .T = 100, .H = 1, .N = 60, .V = 100), .name = "60 by 100, shared state", .level = TEST_MEDIUM,
     .layout = TEST_GAPS},
    {WKV6(.B = 1, .T = 17, .H = 1, .N = 128), .name = "128", .level = TEST_MEDIUM},
    {WKV6(.B = 1, .T = 150, .H = 3, .N = 32, .scale = 0.17677669f), .name = "32, scaled", .level = TEST_MEDIUM},
    {WKV6(.B = 1, .T = 150, .H = 2, .N = 64, .scale = 0.3f, .segments = 2), .name = "64, scaled, hard resets",
     .level = TEST_MEDIUM, .fill = {{"w", -3, 1, 3, 0.02}}},
    {WKV6(.B = 1, .T = 200, .H = 1, .N = 128, .segments = 2), .name = "128, segments, hard resets",
     .level = TEST_MEDIUM, .fill = {{"w", -3, 1, 3, 0.02}}},
    /* dstate_out as large as the part of G from dy; "dw of single heads" in docs/performance.md has the case without
     * dstate_out */
    {WKV6(.B = 1, .T = 81, .H = 1, .N = 128, .scale = 0.08838835f), .name = "128, scaled", .level = TEST_MEDIUM,
     .fill = {{"dstate_out", 0, 0.08838835, 0, 0}}},
    {WKV6(.B = 1, .T = 81, .H = 1, .N = 40, .V = 24, .scale = 5), .name = "40 by 24, scaled up", .level = TEST_MEDIUM},
    {WKV6(.B = 1, .T = 300, .H = 2, .N = 16), .name = "hard resets", .level = TEST_MEDIUM,
     .fill = {{"w", -9, 0.5, 5, 0.03}}},
    {WKV6(.B = 1, .T = 300, .H = 1, .N = 32), .name = "fast beside slow", .level = TEST_MEDIUM,
     .fill = {{"w", -6, 0.5, 4, 0.5}}},
    {WKV6(.B = 1, .T = 500, .H = 1, .N = 16), .name = "large states, hardly any decay", .level = TEST_MEDIUM,
     .fill = {{"w", -12, 1, 0, 0}, {"k", 2, 4, 0, 0}, {"v", 2, 4, 0, 0}}},
    {WKV6(.B = 2, .T = 1000, .H = 4, .N = 64), .name = "64, long", .level = TEST_LARGE},
    {WKV6(.B = 1, .T = 500, .H = 2, .N = 128, .V = 64), .name = "128 by 64", .level = TEST_LARGE},
    {WKV6(.B = 1, .T = 4099, .H = 1, .N = 64), .name = "64, one long sequence", .level = TEST_LARGE},
    {.op = NULL}};

static const test_case packed[] = {
    {PACKED(.T = 6, .H = 2, .N = 3, .seq_capacity = 3), .name = "three", LENGTHS(3, 1, 2)},
    {PACKED(.T = 5, .H = 1, .N = 2, .seq_capacity = 1), .name = "one", LENGTHS(5)},
    {PACKED(.T = 5, .H = 2, .N = 3, .V = 2, .seq_capacity = 7, .decay = GT_DECAY_LOG), .name = "empty ones",
     LENGTHS(0, 2, 0, 0, 1, 2, 0)},
    {PACKED(.T = 6, .H = 2, .N = 2, .seq_capacity = 5), .name = "below the capacities", LENGTHS(2, 0, 2)},
    {PACKED(.T = 4, .H = 2, .N = 2, .seq_capacity = 4), .name = "all in use", .absent = "seq_count",
     LENGTHS(1, 0, 2, 1)},
    {PACKED(.T = 4, .H = 1, .N = 2, .V = 3, .seq_capacity = 3), .name = "room for tokens", .absent = "seq_count",
     LENGTHS(1, 1, 0)},
    {PACKED(.T = 3, .H = 2, .N = 2, .seq_capacity = 2), .name = "none", .packed = {0, NULL}},
    {PACKED(.T = 0, .H = 2, .N = 2, .seq_capacity = 2), .name = "no tokens", LENGTHS(0, 0)},
    {PACKED(.T = 5, .H = 1, .N = 3, .seq_capacity = 3), .name = "no u, no states", .absent = "u " NO_STATES,
     LENGTHS(2, 3)},
    {PACKED(.T = 5, .H = 2, .N = 2, .seq_capacity = 4, .state_in_shared = 1), .name = "shared state", LENGTHS(2, 0, 2)},
    {PACKED(.T = 3, .H = 2, .N = 2, .seq_capacity = 2, .state_in_shared = 1), .name = "none, shared state",
     .packed = {0, NULL}},
    {PACKED(.T = 6, .H = 1, .N = 3, .seq_capacity = 2), .name = "zero decays", LENGTHS(3, 3),
     .fill = {{"w", -3, 1, 200, 0.3}}},
    {PACKED(.T = 205, .H = 2, .N = 3, .V = 2, .seq_capacity = 6), .name = "around chunks", .level = TEST_SMALL,
     LENGTHS(63, 1, 64, 0, 65)},
    {PACKED(.T = 300, .H = 1, .N = 4, .seq_capacity = 3, .state_in_shared = 1),
     .name = "around more chunks, shared state", .level = TEST_SMALL, LENGTHS(129, 1, 128)},
    {PACKED(.T = 90, .H = 2, .N = 2, .seq_capacity = 40), .name = "many", .level = TEST_SMALL, RANDOM_LENGTHS(37)},
    {PACKED(.T = 260, .H = 2, .N = 64, .seq_capacity = 12), .name = "64", .level = TEST_MEDIUM,
     LENGTHS(1, 15, 0, 16, 17, 63, 0, 0, 64, 65)},
    {PACKED(.T = 500, .H = 1, .N = 16, .V = 40, .seq_capacity = 300, .decay = GT_DECAY_LOG),
     .name = "16 by 40, hundreds", .level = TEST_MEDIUM, .layout = TEST_GAPS, RANDOM_LENGTHS(299)},
    {PACKED(.T = 400, .H = 2, .N = 32, .seq_capacity = 9), .name = "32, hard resets, slices of 331",
     .level = TEST_MEDIUM, .layout = TEST_SLICES, .row = 331, .fill = {{"w", -9, 0.5, 5, 0.03}}, RANDOM_LENGTHS(8)},
    {PACKED(.T = 90, .H = 2, .N = 32, .seq_capacity = 700), .name = "32, far below the capacity", .level = TEST_MEDIUM,
     RANDOM_LENGTHS(40)},
    {PACKED(.T = 300, .H = 1, .N = 64, .seq_capacity = 400, .segments = 2), .name = "64, far below the capacity",
     .level = TEST_MEDIUM, RANDOM_LENGTHS(30)},
    {PACKED(.T = 60, .H = 1, .N = 128, .seq_capacity = 90, .state_in_shared = 1), .name = "128, far below the capacity",
     .level = TEST_MEDIUM, RANDOM_LENGTHS(20)},
    {PACKED(.T = 6000, .H = 2, .N = 64, .seq_capacity = 300), .name = "64, hundreds", .level = TEST_LARGE,
     RANDOM_LENGTHS(290)},
    {PACKED(.T = 3000, .H = 1, .N = 128, .seq_capacity = 5), .name = "128, long beside short", .level = TEST_LARGE,
     LENGTHS(1, 2047, 16, 900)},
    {.op = NULL}};

/* Sizes for which the operator has specialised kernels, and sizes for general kernels. */
static const test_case sizes[] = {
    {WKV6(.H = 3, .N = 32), .name = "sweep"},
    {WKV6(.H = 1, .N = 64, .decay = GT_DECAY_LOG), .name = "sweep"},
    {WKV6(.H = 1, .N = 128), .name = "sweep"},
    {WKV6(.H = 3, .N = 16), .name = "sweep"},
    {WKV6(.H = 3, .N = 64, .V = 32, .decay = GT_DECAY_LOG, .state_in_shared = 1), .name = "sweep"},
    {WKV6(.H = 1, .N = 20, .V = 52), .name = "sweep"},
    {WKV6(.H = 1, .N = 256), .name = "sweep"},
    {.op = NULL}};

static const test_case spoilt[] = {{WKV6(.H = 2, .N = 32, .dtype = GT_BF16), .name = "spoilt"},
                                   {WKV6(.H = 1, .N = 64, .dtype = GT_F16), .name = "spoilt"},
                                   {WKV6(.H = 1, .N = 32, .dtype = GT_F32), .name = "spoilt"},
                                   {WKV6(.H = 1, .N = 128, .dtype = GT_BF16), .name = "spoilt"},
                                   {.op = NULL}};

/* Sizes for the step kernels: N on both sides of 32, 64 and 128, V on both sides of 32 and divisible by four or not, in
 * one tile of columns or several. */
static const test_case steps[] = {
    {WKV6(.B = 4, .H = 2, .N = 8, .V = 12), .name = "steps"},
    {WKV6(.B = 3, .H = 2, .N = 31, .V = 5, .decay = GT_DECAY_LOG), .name = "steps"},
    {WKV6(.B = 3, .H = 3, .N = 1, .V = 1), .name = "steps"},
    {WKV6(.B = 2, .H = 2, .N = 32, .scale = 0.17677669f), .name = "steps"},
    {WKV6(.B = 3, .H = 2, .N = 20, .V = 36, .decay = GT_DECAY_LOG), .name = "steps"},
    {WKV6(.B = 2, .H = 1, .N = 3, .V = 70), .name = "steps", .absent = "u"},
    {WKV6(.B = 4, .H = 2, .N = 64), .name = "steps"},
    {WKV6(.B = 2, .H = 2, .N = 33, .V = 67, .scale = 3), .name = "steps"},
    {WKV6(.B = 3, .H = 2, .N = 50, .V = 32), .name = "steps"},
    {WKV6(.B = 2, .H = 1, .N = 63, .V = 9, .decay = GT_DECAY_LOG), .name = "steps", .absent = "u"},
    {WKV6(.B = 3, .H = 1, .N = 128), .name = "steps"},
    {WKV6(.B = 2, .H = 2, .N = 127, .V = 65), .name = "steps"},
    {WKV6(.B = 3, .H = 2, .N = 100, .V = 24, .decay = GT_DECAY_LOG), .name = "steps"},
    {WKV6(.B = 2, .H = 2, .N = 65, .V = 3), .name = "steps"},
    {WKV6(.B = 2, .H = 1, .N = 256), .name = "steps"},
    {WKV6(.B = 2, .H = 1, .N = 129, .V = 33), .name = "steps"},
    {WKV6(.B = 3, .H = 1, .N = 250, .V = 20), .name = "steps"},
    {WKV6(.B = 2, .H = 1, .N = 200, .V = 1, .decay = GT_DECAY_LOG), .name = "steps", .absent = "u"},
    {.op = NULL}};

#define STEP_KERNELS(lanes, rows)                                                                                      \
    "wkv6::step_kernel<gt::wkv6::StepTraits<" lanes ", " rows ", 1>, true, false>",                                    \
        "wkv6::step_kernel<gt::wkv6::StepTraits<" lanes ", " rows ", 1>, true, true>",                                 \
        "wkv6::step_kernel<gt::wkv6::StepTraits<" lanes ", " rows ", 4>, true, false>",                                \
        "wkv6::step_kernel<gt::wkv6::StepTraits<" lanes ", " rows ", 4>, true, true>",                                 \
        "wkv6::step_kernel<gt::wkv6::StepTraits<" lanes ", " rows ", 4>, false, true>",                                \
        "wkv6::step_int8_kernel<gt::wkv6::StepTraits<" lanes ", " rows ", 1>, true>",                                  \
        "wkv6::step_int8_kernel<gt::wkv6::StepTraits<" lanes ", " rows ", 4>, true>",                                  \
        "wkv6::step_int8_kernel<gt::wkv6::StepTraits<" lanes ", " rows ", 4>, false>"
static const char *const step_kernels[] = {
    STEP_KERNELS("8", "32"),   STEP_KERNELS("8", "64"),   STEP_KERNELS("8", "128"),
    STEP_KERNELS("8", "256"),  STEP_KERNELS("16", "32"),  STEP_KERNELS("16", "64"),
    STEP_KERNELS("16", "128"), STEP_KERNELS("16", "256"), NULL};

/* More than 65535 items along one axis of a grid. */
static const test_case many[] = {{WKV6(.B = 70000, .T = 2, .H = 1, .N = 2), .name = "many"},
                                 {WKV6(.B = 1, .T = 2, .H = 70000, .N = 2), .name = "many"},
                                 {.op = NULL}};

/* Sums over many tokens or batch elements.  The means of the terms are not 0, so that the sums grow with their
 * length. */
static const test_case sums[] = {
    {.op = "wkv6",
     .name = "long",
     .fill = {{"r", 0.5, 1, 0, 0}, {"k", 0.5, 1, 0, 0}, {"v", 0.5, 1, 0, 0}, {"dy", 0.5, 1, 0, 0}},
     .args.wkv6 = {.B = 1, .T = 500000, .H = 1, .N = 2}},
    {.op = "wkv6",
     .name = "many",
     .fill = {{"dstate_out", 0.5, 1, 0, 0}, {"dy", 0.5, 1, 0, 0}},
     .args.wkv6 = {.B = 500000, .T = 1, .H = 1, .N = 2, .state_in_shared = 1}},
    {.op = NULL}};

/* Mild decays, strong decays, hardly any decay, and some decays of exactly 0, which reset the state. */
static void set_regime(test_case *c, int n) {
    static const test_fill regimes[] = {
        {"w", -3, 1, 0, 0}, {"w", 1.5, 1, 0, 0}, {"w", -10, 1, 0, 0}, {"w", -3, 1, 200, 0.1}};
    c->fill[0] = regimes[n % 4];
    if (c->args.wkv6.decay == GT_DECAY_LOG && c->fill[0].share > 0) c->fill[0].special = -INFINITY;
}

static void draw(test_random *r, int64_t most, test_case *c) {
    static const char *const absent[] = {"", "u", "state_in", ("u " NO_STATES)};
    gt_wkv6_args *a = &c->args.wkv6;
    a->H = 1 + test_pick(r, 3);
    a->N = 1 + test_pick(r, most);
    a->V = test_pick(r, most + 1);
    a->decay = (gt_decay)test_pick(r, 2);
    a->state_in_shared = (int)test_pick(r, 2);
    a->pieces = test_pick(r, 12);
    c->absent = test_pick_absent(r, absent);
    a->scale = test_pick(r, 2) ? (float)(0.25 + test_uniform(r)) : 0;
}

/* ---- properties of only this operator ---------------------------------------------------------- */

/* Where the decay is exactly 0, dw is 0. */
static void zero_decay_is_flat(const test_runner *r, const test_case *c, double tolerance) {
    test_values in, out;
    int64_t count, zeros = 0, flat = 0;
    const double *w, *dw;
    (void)tolerance;
    count = test_count(c, GT_BACKWARD, test_tensor_of(c, "w"));
    test_inputs(c, GT_BACKWARD, &in);
    test_run(r, c, GT_BACKWARD, &in, TEST_ALL, &out);
    w = *test_array_of(&in, c, "w");
    dw = *test_array_of(&out, c, "dw");
    for (int64_t i = 0; i < count; i++) {
        float decay = (float)exp(c->args.wkv6.decay == GT_DECAY_LOG ? w[i] : -exp(w[i]));
        zeros += decay == 0;
        flat += decay == 0 && dw[i] == 0;
    }
    test_check(flat == zeros, "%s: dw of %s is not 0 at %lld of %lld zero decays", test_describe(c, GT_BACKWARD),
               r->name, (long long)(zeros - flat), (long long)zeros);
    test_free(&in), test_free(&out);
}

static const test_property properties[] = {{"dw is 0 where the decay is", TEST_MEDIUM, zero_decay_is_flat},
                                           {NULL, TEST_TINY, NULL}};

/* ---- the formula, written out a second way ---------------------------------------------------- */

/* The product of the decays of tokens first ... last-1. */
static double decay_between(const formula *f, int64_t b, int64_t first, int64_t last, int64_t h, int64_t n) {
    double log_decay = 0;
    for (int64_t m = first; m < last; m++) {
        const double w = formula_value(f, "w", b, m, h, n);
        log_decay += f->c->args.wkv6.decay == GT_DECAY_LOG ? w : -exp(w);
    }
    return exp(log_decay);
}

/* Element [n,j] of the state before token t. */
static double state_before(const formula *f, formula_sequence q, int64_t t, int64_t h, int64_t n, int64_t j) {
    double S = decay_between(f, q.b, q.first, t, h, n) * formula_value(f, "state_in", q.row, h, n, j);
    for (int64_t s = q.first; s < t; s++)
        S += decay_between(f, q.b, s + 1, t, h, n) * formula_value(f, "k", q.b, s, h, n) *
             formula_value(f, "v", q.b, s, h, j);
    return S;
}

static double y(const formula *f, int64_t b, int64_t t, int64_t h, int64_t j) {
    const formula_sequence q = formula_sequence_of_token(f, b, t);
    double sum = 0;
    for (int64_t n = 0; n < f->c->args.wkv6.N && q.row >= 0; n++)
        sum += formula_value(f, "r", b, t, h, n) *
               (state_before(f, q, t, h, n, j) + formula_value(f, "u", h, n, 0, 0) * formula_value(f, "k", b, t, h, n) *
                                                     formula_value(f, "v", b, t, h, j));
    return f->c->args.wkv6.scale ? f->c->args.wkv6.scale * sum : sum;
}

static double state_out(const formula *f, int64_t row, int64_t h, int64_t n, int64_t j) {
    if (!formula_has_sequence(f, row)) return 0;
    const formula_sequence q = formula_sequence_of_row(f, row);
    return state_before(f, q, q.last, h, n, j);
}

static const test_formula formulas[] = {{"y", y}, {"state_out", state_out}, {NULL, NULL}};

/* Kernels on tensor cores that the cases must launch. */
static const char *const launched[] = {"forward_tensor_kernel", "forward_hopper_kernel",  "states_tensor_kernel",
                                       "states_hopper_kernel",  "backward_tensor_kernel", NULL};

/* ---- rows of the bench ----------------------------------------------------------------------- */

#define ROW_NAMED(types, label, missing, ...)                                                                          \
    { {.op = "wkv6", .name = label, .absent = missing, .args.wkv6 = {__VA_ARGS__}}, types }
#define ROW(types, missing, ...) ROW_NAMED(types, "", missing, __VA_ARGS__)

static const test_bench_row host_rows[] = {ROW(TEST_F32 | TEST_BF16, NO_STATES, .B = 8, .T = 256, .H = 4, .N = 32),
                                           ROW(TEST_F32 | TEST_BF16, "", .B = 8, .T = 1, .H = 4, .N = 32),
                                           {{.op = NULL}, 0}};

static const test_bench_row gpu_rows[] = {
    ROW(TEST_F32 | TEST_BF16 | TEST_F16, NO_STATES, .B = 64, .T = 256, .H = 4, .N = 32),
    ROW(TEST_BF16, NO_STATES, .B = 64, .T = 256, .H = 4, .N = 64),
    ROW(TEST_BF16, NO_STATES, .B = 8, .T = 1024, .H = 32, .N = 64),
    ROW(TEST_BF16, NO_STATES, .B = 1, .T = 2048, .H = 32, .N = 64),
    ROW(TEST_BF16, NO_STATES, .B = 8, .T = 2048, .H = 32, .N = 64),
    ROW(TEST_F32 | TEST_BF16 | TEST_F16, NO_STATES, .B = 8, .T = 4096, .H = 32, .N = 64),
    ROW(TEST_BF16, NO_STATES, .B = 1, .T = 32768, .H = 32, .N = 64),
    ROW(TEST_BF16, NO_STATES, .B = 1, .T = 16384, .H = 4, .N = 64),
    ROW(TEST_BF16, NO_STATES, .B = 8, .T = 4096, .H = 16, .N = 128),
    ROW(TEST_BF16, NO_STATES, .B = 8, .T = 4096, .H = 64, .N = 32),
    ROW(TEST_BF16, NO_STATES, .B = 8, .T = 3750, .H = 4, .N = 64),
    ROW(TEST_F32 | TEST_BF16, "", .B = 8, .T = 1, .H = 4, .N = 32),
    ROW(TEST_BF16, "", .B = 1, .T = 1, .H = 32, .N = 64),
    ROW(TEST_BF16, "", .B = 8, .T = 1, .H = 32, .N = 64),
    ROW(TEST_BF16, "", .B = 64, .T = 1, .H = 32, .N = 64),
    ROW(TEST_BF16, "", .B = 256, .T = 1, .H = 32, .N = 64),
    ROW_NAMED(TEST_BF16, "int8", "", .B = 64, .T = 1, .H = 32, .N = 64, .state_dtype = GT_INT8,
              .parameter_dtype = GT_BF16),
    ROW_NAMED(TEST_BF16, "small", "", .B = 64, .T = 1, .H = 32, .N = 64, .state_dtype = GT_BF16,
              .parameter_dtype = GT_BF16),
    ROW(TEST_BF16, "", .B = 64, .T = 4, .H = 32, .N = 64),
    ROW(TEST_BF16, "", .B = 64, .T = 16, .H = 32, .N = 64),
    ROW(TEST_BF16, "", .B = 1, .T = 1, .H = 64, .N = 64),
    ROW(TEST_BF16, "", .B = 64, .T = 1, .H = 64, .N = 64),
    TEST_PACKED_ROWS(wkv6, NO_STATES, .H = 4, .N = 64),
    ROW(TEST_BF16, "", .B = 8, .T = 4096, .H = 32, .N = 64, .pieces = 8),
    ROW(TEST_BF16, "", .B = 1, .T = 16384, .H = 4, .N = 64, .pieces = 8),
    ROW(TEST_BF16, "", .B = 1, .T = 32768, .H = 64, .N = 64, .pieces = 8),
    ROW(TEST_BF16, "", .B = 8, .T = 4096, .H = 64, .N = 32, .pieces = 8),
    ROW(TEST_BF16, "", .B = 8, .T = 4096, .H = 16, .N = 128, .pieces = 8),
    {{.op = NULL}, 0}};

/* w = -6 gives the decay exp(-exp(-6)) = 0.9975 */
static const test_bench_draw draws[] = {{"w", {0, -6, 1}},
                                        {"r k v u", {0, 0, 0.5f}},
                                        {"piece_decays", {0, -3, 1}},
                                        {"state_scale", {1, 0.02f, 0.01f}},
                                        {NULL, {0, 0, 0}}};
static const test_bench_cut cuts[] = {{"H", 2}, {NULL, 0}};

/* ---- the operator ---------------------------------------------------------------------------- */

static void set_exact(test_case *c) { c->args.wkv6.decay = GT_DECAY_LOG; }

const test_op test_op_wkv6 = {
    TEST_IN_PIECES(wkv6),
    .optional_size = {AT(wkv6, V), 5},
    .large = {WKV6(.B = 1, .T = 130, .H = 5, .N = 64, .segments = 1)},
    .set_fill = set_fill,
    .set_regime = set_regime,
    .reach = {16, 64},
    .has_exact_prefill = 1,
    .spoilt = spoilt,
    /* States are sums of products of tf32 numbers, which round to 2^-11 like fp16 (measured error: 2.2e-4).  The
     * factors of dv in fp16 round likewise (7.2e-4).  dw sums products of 16-bit states and 16-bit gradients of states
     * (1.7e-3, and 2.7e-3 in a channel). */
    .kernels = {{0, 1e-5, 3e-3, 1e-3}, {0, 1e-5, 5e-4, 5e-4}, {0, 1e-5, 3e-3, 1e-3}, {0, 1e-5, 5e-4, 5e-4}, 1},
    /* States are sums over tokens, and dw sums products of a state and its gradient; both have terms of both signs.  So
     * in a large channel, one element may be much smaller than its terms (measured error: 8.6 tolerances). */
    .differences = {[GT_FORWARD] = "state_out",
                    [GT_BACKWARD] = "dstate_in dw",
                    [GT_SEGMENT] = "state_out",
                    [GT_SEGMENT_BACKWARD] = "dstate_in"},
    .properties = properties,
    .launched = launched,
    .steps = steps,
    .exact = {"w", NULL, set_exact},
    .step_kernels = step_kernels,
    .bench_draws = draws,
    .bench_cuts = cuts,
    .operations = {"BTHNV", 4, 12},
};
