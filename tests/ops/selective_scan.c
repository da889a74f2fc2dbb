/* selective_scan: test cases, a formula independent of the twin, and rows of the bench. */
#include "formula.h"

TEST_TWINS_OVER_TIME(selective_scan)

/* ---- arguments ------------------------------------------------------------------------------- */

static const test_field fields[] = {TEST_DIVISOR(selective_scan, G, 'D'),
                                    TEST_FIELD(selective_scan, softplus, 'i'),
                                    TEST_FIELD(selective_scan, state_in_shared, 'i'),
                                    TEST_FIELD(selective_scan, segments, 's'),
                                    {NULL, 0, 0, 0, 0}};

static const test_bad_value bad_values[] = {BAD_SIZE(selective_scan, G),
                                            BAD_DIVISOR(selective_scan, G, 3),
                                            BAD_SWITCH(selective_scan, softplus, 2),
                                            {NULL, GT_OK, {{0, 0, 0}}}};

/* ---- how inputs are drawn -------------------------------------------------------------------- */

static void set_fill(const test_case *c, const gt_tensor *t, test_fill *f, test_map *map) {
    test_fill_ssm(c->args.selective_scan.softplus, t, f, map);
}

/* ---- cases ----------------------------------------------------------------------------------- */

#define SCAN(...) .op = "selective_scan", .args.selective_scan = {__VA_ARGS__}
#define PACKED(...) .args.selective_scan = {.B = 1, __VA_ARGS__}, .op = "selective_scan"

static const test_case cases[] = {
    {SCAN(.B = 1, .T = 1, .D = 1, .N = 1), .name = "one number"},
    {SCAN(.B = 2, .T = 3, .D = 2, .N = 3, .softplus = 1), .name = "softplus"},
    {SCAN(.B = 2, .T = 3, .D = 3, .N = 2), .name = "no softplus"},
    {SCAN(.B = 2, .T = 3, .D = 4, .N = 2, .G = 2, .softplus = 1), .name = "two groups"},
    {SCAN(.B = 2, .T = 3, .D = 3, .N = 2, .G = 3), .name = "a group per channel"},
    {SCAN(.B = 2, .T = 3, .D = 2, .N = 2, .softplus = 1), .name = "no gate", .absent = "z dz"},
    {SCAN(.B = 2, .T = 3, .D = 2, .N = 2), .name = "nothing optional", .absent = "z dz Dskip dt_bias " NO_STATES},
    {SCAN(.B = 2, .T = 3, .D = 2, .N = 2), .name = "zero skip, bias and state", .absent = "Dskip dt_bias state_in"},
    {SCAN(.B = 3, .T = 2, .D = 3, .N = 2, .softplus = 1, .state_in_shared = 1), .name = "shared state"},
    {SCAN(.B = 2, .T = 3, .D = 2, .N = 2), .name = "final state only", .fill = {{"dy", 0, 0, 0, 0}}},
    {SCAN(.B = 2, .T = 4, .D = 3, .N = 2), .name = "A and dt of zero", .absent = "dt_bias",
     .fill = {{"A", 0, 0.5, 0, 0.5}, {"dt", -2, 0.7, 0, 0.4}}},
    {SCAN(.B = 2, .T = 4, .D = 3, .N = 2), .name = "decay to zero", .fill = {{"A", 0, 0.5, -10000, 0.5}}},
    {SCAN(.B = 2, .T = 4, .D = 3, .N = 2), .name = "growing states", .fill = {{"A", 0, 0.5, 0.75, 0.5}}},
    {SCAN(.B = 2, .T = 4, .D = 3, .N = 2), .name = "negative Delta", .absent = "dt_bias", .seed = 1,
     .fill = {{"dt", -1, 0.7, -0.5, 0.5}}},
    {SCAN(.B = 2, .T = 4, .D = 2, .N = 2), .name = "closed gates", .fill = {{"z", 0, 1, -INFINITY, 0.2}}},
    {SCAN(.B = 2, .T = 0, .D = 2, .N = 3), .name = "no time"},
    {SCAN(.B = 2, .T = 0, .D = 2, .N = 3, .state_in_shared = 1), .name = "no time, shared state"},
    {SCAN(.B = 0, .T = 3, .D = 2, .N = 3), .name = "no batch"},
    {SCAN(.B = 2, .T = 70, .D = 4, .N = 3, .G = 2, .softplus = 1), .name = "two chunks", .level = TEST_SMALL},
    {SCAN(.B = 2, .T = 130, .D = 2, .N = 4, .state_in_shared = 1), .name = "three chunks, shared state",
     .level = TEST_SMALL, .absent = "z dz"},
    {SCAN(.B = 6, .T = 16, .D = 6, .N = 4, .softplus = 1, .slot_capacity = 9), .name = "slots", .level = TEST_SMALL},
    {SCAN(.B = 2, .T = 70, .D = 5, .N = 4, .softplus = 1), .name = "far ends of softplus", .level = TEST_SMALL,
     .no_difference = 1, .fill = {{"dt", 0, 15, 120, 0.1}, {"dt_bias", 0, 5, 0, 0}, {"A", -2, 1, 0, 0}}},
    {SCAN(.B = 2, .T = 65, .D = 64, .N = 16, .softplus = 1), .name = "64 by 16", .level = TEST_MEDIUM},
    {SCAN(.B = 1, .T = 70, .D = 90, .N = 8, .softplus = 1), .name = "90 by 8, slices of 386", .level = TEST_MEDIUM,
     .layout = TEST_SLICES, .row = 386},
    {SCAN(.B = 2, .T = 33, .D = 40, .N = 64, .G = 4, .softplus = 1), .name = "40 by 64, time last",
     .level = TEST_MEDIUM, .layout = TEST_TIME_LAST},
    {SCAN(.B = 1, .T = 300, .D = 33, .N = 3), .name = "fast beside slow", .level = TEST_MEDIUM, .layout = TEST_GAPS,
     .fill = {{"dt", -8, 0.5, 8, 0.05}}},
    {SCAN(.B = 1, .T = 500, .D = 16, .N = 16, .softplus = 1), .name = "large states", .level = TEST_MEDIUM,
     .fill = {{"A", -8, 1, 0, 0}, {"u", 1, 2, 0, 0}, {"Bm", 1, 2, 0, 0}}},
    {SCAN(.B = 1, .T = 100, .D = 20, .N = 8), .name = "growth by e^40 in 64 tokens", .level = TEST_MEDIUM,
     .absent = ("dt_bias " NO_STATES),
     .fill = {{"A", 0, 0, 1.25, 1}, {"dt", -0.6931472, 0, 0, 0}, {"u", 0, 1e-16, 0, 0}, {"dy", 0, 1e-16, 0, 0}}},
    {SCAN(.B = 1, .T = 20, .D = 3, .N = 20), .name = "growth by e^100 in a token", .level = TEST_SMALL,
     .no_difference = 1, .absent = ("dt_bias " NO_STATES), .seed = 3,
     .fill = {{"A", 0, 0, 1, 1}, {"dt", -4, 0.5, 100, 0.04}, {"u", 0, 1e-25, 0, 0}, {"dy", 0, 1e-22, 0, 0}}},
    {SCAN(.B = 1, .T = 400, .D = 20, .N = 8, .segments = 3), .name = "a sum of logarithms beyond fp32",
     .level = TEST_MEDIUM, .fill = {{"A", 0, 0, -1e37, 1}}},
    {SCAN(.B = 1, .T = 200, .D = 20, .N = 8, .softplus = 1), .name = "states that grow all the time",
     .level = TEST_MEDIUM, .fill = {{"A", 0, 0, 0.03, 1}}},
    {SCAN(.B = 1, .T = 37, .D = 133, .N = 128, .softplus = 1), .name = "133 by 128", .level = TEST_MEDIUM},
    {SCAN(.B = 2, .T = 19, .D = 13, .N = 256), .name = "13 by 256", .level = TEST_MEDIUM},
    {SCAN(.B = 1, .T = 45, .D = 66, .N = 31, .G = 2, .softplus = 1), .name = "66 by 31", .level = TEST_MEDIUM},
    {SCAN(.B = 2, .T = 140, .D = 150, .N = 16, .softplus = 1), .name = "all decay fast", .level = TEST_MEDIUM,
     .fill = {{"A", 2, 0.3, 0, 0}, {"dt", 0, 0.5, 0, 0}}},
    {SCAN(.B = 1, .T = 3000, .D = 5, .N = 16, .softplus = 1), .name = "all decay slowly", .level = TEST_MEDIUM,
     .fill = {{"A", -6, 0.3, 0, 0}, {"dt", -3, 0.5, 0, 0}}},
    {SCAN(.B = 1, .T = 300, .D = 40, .N = 12, .softplus = 1), .name = "tokens that decay fast among slow ones",
     .level = TEST_MEDIUM, .fill = {{"A", 1, 0.5, 0, 0}, {"dt", -12, 1, 3, 0.02}}},
    {SCAN(.B = 2, .T = 1000, .D = 300, .N = 16, .softplus = 1), .name = "300 by 16, long", .level = TEST_LARGE},
    {SCAN(.B = 1, .T = 4099, .D = 64, .N = 16, .softplus = 1), .name = "64 by 16, one long sequence",
     .level = TEST_LARGE},
    {.op = NULL}};

static const test_case packed[] = {
    {PACKED(.T = 6, .D = 2, .N = 3, .seq_capacity = 3), .name = "three", LENGTHS(3, 1, 2)},
    {PACKED(.T = 5, .D = 4, .N = 2, .G = 2, .seq_capacity = 7, .softplus = 1), .name = "empty ones",
     LENGTHS(0, 2, 0, 0, 1, 2, 0)},
    {PACKED(.T = 6, .D = 3, .N = 2, .seq_capacity = 5), .name = "below the capacities", LENGTHS(2, 0, 2)},
    {PACKED(.T = 4, .D = 2, .N = 2, .seq_capacity = 3, .softplus = 1), .name = "room for tokens",
     .absent = "seq_count z dz", LENGTHS(1, 1, 0)},
    {PACKED(.T = 3, .D = 2, .N = 2, .seq_capacity = 2), .name = "none", .packed = {0, NULL}},
    {PACKED(.T = 0, .D = 2, .N = 2, .seq_capacity = 2), .name = "no tokens", LENGTHS(0, 0)},
    {PACKED(.T = 5, .D = 2, .N = 2, .seq_capacity = 4, .state_in_shared = 1), .name = "shared state", LENGTHS(2, 0, 2)},
    {PACKED(.T = 3, .D = 2, .N = 2, .seq_capacity = 2, .state_in_shared = 1), .name = "none, shared state",
     .packed = {0, NULL}},
    {PACKED(.T = 300, .D = 4, .N = 3, .seq_capacity = 4, .softplus = 1), .name = "around chunks", .level = TEST_SMALL,
     LENGTHS(129, 1, 0, 128)},
    {PACKED(.T = 90, .D = 3, .N = 2, .seq_capacity = 40, .softplus = 1), .name = "many", .level = TEST_SMALL,
     RANDOM_LENGTHS(37)},
    {PACKED(.T = 420, .D = 40, .N = 16, .seq_capacity = 12, .softplus = 1), .name = "40 channels", .level = TEST_MEDIUM,
     LENGTHS(1, 15, 0, 16, 17, 63, 0, 0, 128, 129)},
    {PACKED(.T = 500, .D = 34, .N = 20, .G = 2, .seq_capacity = 300, .softplus = 1), .name = "20 states, hundreds",
     .level = TEST_MEDIUM, .layout = TEST_GAPS, RANDOM_LENGTHS(299)},
    {PACKED(.T = 3000, .D = 64, .N = 16, .seq_capacity = 5, .softplus = 1), .name = "16, long beside short",
     .level = TEST_LARGE, LENGTHS(1, 2047, 16, 900)},
    {.op = NULL}};

/* Sizes for which the operator has specialised kernels, and sizes for general kernels. */
static const test_case sizes[] = {{SCAN(.D = 256, .N = 16, .softplus = 1), .name = "sweep"},
                                  {SCAN(.D = 96, .N = 64, .G = 2, .softplus = 1), .name = "sweep"},
                                  {SCAN(.D = 33, .N = 8, .G = 33), .name = "sweep"},
                                  {SCAN(.D = 100, .N = 3, .softplus = 1, .state_in_shared = 1), .name = "sweep"},
                                  {.op = NULL}};

/* Sizes for the step kernels: N on both sides of 16, 32, 64 and 128, divisible by four or not, and channels that fill
 * warps and blocks or not.  With more than 32 or 128 batch elements, a warp processes several elements in turn. */
static const test_case steps[] = {
    {SCAN(.B = 4, .D = 70, .N = 16, .softplus = 1), .name = "steps"},
    {SCAN(.B = 3, .D = 32, .N = 4), .name = "steps", .absent = "z"},
    {SCAN(.B = 3, .D = 5, .N = 1, .softplus = 1), .name = "steps"},
    {SCAN(.B = 3, .D = 40, .N = 15, .G = 2, .softplus = 1), .name = "steps"},
    {SCAN(.B = 2, .D = 66, .N = 32, .G = 2, .softplus = 1), .name = "steps"},
    {SCAN(.B = 2, .D = 19, .N = 21), .name = "steps", .absent = "Dskip dt_bias"},
    {SCAN(.B = 3, .D = 20, .N = 64, .G = 4, .softplus = 1), .name = "steps"},
    {SCAN(.B = 2, .D = 9, .N = 50, .softplus = 1), .name = "steps"},
    {SCAN(.B = 3, .D = 10, .N = 128, .softplus = 1), .name = "steps"},
    {SCAN(.B = 2, .D = 7, .N = 127, .G = 7, .softplus = 1), .name = "steps"},
    {SCAN(.B = 3, .D = 6, .N = 256, .G = 2, .softplus = 1), .name = "steps"},
    {SCAN(.B = 2, .D = 3, .N = 250, .softplus = 1), .name = "steps"},
    {SCAN(.B = 35, .D = 12, .N = 8, .softplus = 1), .name = "steps"},
    {SCAN(.B = 131, .D = 3, .N = 4, .softplus = 1), .name = "steps"},
    {SCAN(.B = 2, .D = 40, .N = 16), .name = "slow steps", .fill = {{"A", -7, 1, 0, 0}, {"dt", -4, 1, 0, 0}}},
    {SCAN(.B = 2, .D = 40, .N = 16, .softplus = 1), .name = "fast steps", .fill = {{"A", 2, 0.3, 0, 0}}},
    {.op = NULL}};

#define STEP_KERNELS(type, exact, mixed)                                                                               \
    "scan::step_kernel<" type ", 4, 1, " exact ", " mixed ">",                                                         \
        "scan::step_kernel<" type ", 8, 1, " exact ", " mixed ">",                                                     \
        "scan::step_kernel<" type ", 16, 1, " exact ", " mixed ">",                                                    \
        "scan::step_kernel<" type ", 32, 1, " exact ", " mixed ">",                                                    \
        "scan::step_kernel<" type ", 32, 2, " exact ", " mixed ">"
static const char *const step_kernels[] = {STEP_KERNELS("float", "true", "false"),
                                           STEP_KERNELS("float", "true", "true"),
                                           STEP_KERNELS("gt::bf16", "false", "false"),
                                           STEP_KERNELS("gt::bf16", "false", "true"),
                                           STEP_KERNELS("gt::f16", "false", "false"),
                                           STEP_KERNELS("gt::f16", "false", "true"),
                                           STEP_KERNELS("gt::ssm::AnyType", "true", "true"),
                                           STEP_KERNELS("gt::ssm::AnyType", "false", "true"),
                                           NULL};

/* More than 65535 items along one axis of a grid. */
static const test_case many[] = {{SCAN(.B = 70000, .T = 2, .D = 2, .N = 2), .name = "many"},
                                 {SCAN(.B = 1, .T = 2, .D = 140000, .N = 2, .G = 70000), .name = "many"},
                                 {.op = NULL}};

/* Sums over many tokens or batch elements.  The means of the terms are not 0, so that the sums grow with their
 * length. */
static const test_case sums[] = {
    {.op = "selective_scan",
     .name = "long",
     .fill = {{"u", 0.5, 1, 0, 0}, {"Bm", 0.5, 1, 0, 0}, {"Cm", 0.5, 1, 0, 0}, {"dy", 0.5, 1, 0, 0}},
     .args.selective_scan = {.B = 1, .T = 500000, .D = 1, .N = 3, .softplus = 1}},
    {.op = "selective_scan",
     .name = "many",
     .fill = {{"dstate_out", 0.5, 1, 0, 0}, {"u", 0.5, 1, 0, 0}, {"dy", 0.5, 1, 0, 0}},
     .args.selective_scan = {.B = 300000, .T = 1, .D = 1, .N = 3, .state_in_shared = 1}},
    {.op = NULL}};

static void draw(test_random *r, int64_t most, test_case *c) {
    gt_selective_scan_args *a = &c->args.selective_scan;
    a->G = 1 + test_pick(r, 3);
    a->D = a->G * (1 + test_pick(r, most));
    a->N = 1 + test_pick(r, most);
    a->softplus = (int)test_pick(r, 2);
    a->state_in_shared = (int)test_pick(r, 2);
    c->absent = test_pick_absent(r, test_ssm_absent);
}

/* ---- the formula, written out a second way ---------------------------------------------------- */

static double delta(const formula *f, int64_t b, int64_t t, int64_t d) {
    const double s = formula_value(f, "dt", b, t, d, 0) + formula_value(f, "dt_bias", d, 0, 0, 0);
    return f->c->args.selective_scan.softplus ? log(1 + exp(s)) : s;
}

static double u(const formula *f, int64_t b, int64_t t, int64_t d, int64_t unused) {
    (void)unused;
    return formula_value(f, "u", b, t, d, 0);
}

static double state_in(const formula *f, int64_t row, int64_t d, int64_t unused, int64_t n) {
    (void)unused;
    return formula_value(f, "state_in", row, d, n, 0);
}

static formula_ssm ssm_of(const formula *f) {
    const gt_selective_scan_args *a = &f->c->args.selective_scan;
    return (formula_ssm){a->D, a->G, a->N, delta, u, state_in};
}

static double y(const formula *f, int64_t b, int64_t t, int64_t d, int64_t unused) {
    const formula_ssm s = ssm_of(f);
    (void)unused;
    return formula_ssm_y(f, &s, b, t, d, 0, formula_value(f, "Dskip", d, 0, 0, 0), formula_value(f, "z", b, t, d, 0));
}

static double state_out(const formula *f, int64_t row, int64_t d, int64_t n, int64_t unused) {
    const formula_ssm s = ssm_of(f);
    (void)unused;
    return formula_ssm_state_out(f, &s, row, d, 0, n);
}

static const test_formula formulas[] = {{"y", y}, {"state_out", state_out}, {NULL, NULL}};

/* ---- rows of the bench ----------------------------------------------------------------------- */

#define ROW(types, label, missing, ...)                                                                                \
    {                                                                                                                  \
        {.op = "selective_scan",                                                                                       \
         .name = label,                                                                                                \
         .absent = missing,                                                                                            \
         .args.selective_scan = {.softplus = 1, __VA_ARGS__}},                                                         \
            types                                                                                                      \
    }

static const test_bench_row host_rows[] = {
    ROW(TEST_F32 | TEST_BF16, "z", NO_STATES, .B = 8, .T = 256, .D = 256, .N = 16),
    ROW(TEST_F32 | TEST_BF16, "z", "", .B = 8, .T = 1, .D = 256, .N = 16),
    {{.op = NULL}, 0}};

static const test_bench_row gpu_rows[] = {
    ROW(TEST_F32 | TEST_BF16, "z", NO_STATES, .B = 64, .T = 256, .D = 256, .N = 16),
    ROW(TEST_F32 | TEST_BF16, "", "z dz " NO_STATES, .B = 64, .T = 256, .D = 512, .N = 16),
    ROW(TEST_F32 | TEST_BF16, "", "z dz " NO_STATES, .B = 8, .T = 2048, .D = 1024, .N = 16),
    ROW(TEST_F32 | TEST_BF16, "", "z dz " NO_STATES, .B = 8, .T = 2048, .D = 4096, .N = 16),
    ROW(TEST_F32 | TEST_BF16, "", "z dz " NO_STATES, .B = 8, .T = 4096, .D = 4096, .N = 16),
    ROW(TEST_F32 | TEST_BF16, "", "z dz " NO_STATES, .B = 1, .T = 32768, .D = 2048, .N = 16),
    ROW(TEST_BF16, "z", NO_STATES, .B = 8, .T = 3750, .D = 512, .N = 16),
    ROW(TEST_F32 | TEST_BF16, "z", "", .B = 8, .T = 1, .D = 256, .N = 16),
    ROW(TEST_BF16, "", "z dz", .B = 1, .T = 1, .D = 8192, .N = 16),
    ROW(TEST_BF16, "", "z dz", .B = 64, .T = 1, .D = 8192, .N = 16),
    ROW(TEST_BF16, "", "z dz", .B = 256, .T = 1, .D = 8192, .N = 16),
    ROW(TEST_BF16, "small", "z dz", .B = 64, .T = 1, .D = 8192, .N = 16, .state_dtype = GT_BF16,
        .parameter_dtype = GT_BF16),
    TEST_PACKED_ROWS(selective_scan, "z dz " NO_STATES, .softplus = 1, .D = 1024, .N = 16),
    {{.op = NULL}, 0}};

static const test_bench_draw draws[] = {TEST_SSM_DRAWS, {NULL, {0, 0, 0}}};
static const test_bench_cut cuts[] = {{"D", 4}, {"NB", 2}, {NULL, 0}};

/* ---- the operator ---------------------------------------------------------------------------- */

static void set_exact(test_case *c) {
    c->args.selective_scan.softplus = 0;
    c->absent = "Dskip dt_bias";
}

const test_op test_op_selective_scan = {
    TEST_OVER_TIME(selective_scan),
    .optional_size = {AT(selective_scan, G), 2},
    .large = {SCAN(.B = 1, .T = 130, .D = 320, .N = 8, .softplus = 1, .segments = 1)},
    .set_fill = set_fill,
    .set_regime = test_set_ssm_regime,
    .kernels = {TEST_ACTIVATIONS, TEST_IN_FP32, TEST_IN_FP32, TEST_IN_FP32, 0},
    .steps = steps,
    .exact = {"A", "dt", set_exact},
    .step_kernels = step_kernels,
    .has_exact_prefill = 1,
    .bench_draws = draws,
    .bench_cuts = cuts,
};
