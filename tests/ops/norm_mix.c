/* norm_mix: test cases, a formula independent of the twin, and rows of the bench. */
#include "formula.h"

TEST_TWINS_OF_ROWS(norm_mix)

/* ---- arguments ------------------------------------------------------------------------------- */

static const test_field fields[] = {
    TEST_DIVISOR(norm_mix, H, 'D'), TEST_FLOAT(norm_mix, eps, 1e-05), {NULL, 0, 0, 0, 0}};

static const test_bad_value bad_values[] = {
    BAD_SIZE(norm_mix, H), BAD_DIVISOR(norm_mix, H, 3), BAD_EPS(norm_mix), {NULL, GT_OK, {{0, 0, 0}}}};

/* ---- cases ----------------------------------------------------------------------------------- */

#define MIX(...) .op = "norm_mix", .args.norm_mix = {__VA_ARGS__}

static const test_case cases[] = {
    {MIX(.M = 1, .D = 2), .name = "two numbers"},
    {MIX(.M = 3, .D = 4), .name = "whole rows"},
    {MIX(.M = 3, .D = 6, .H = 3, .eps = 0.01f), .name = "three slices"},
    {MIX(.M = 2, .D = 3, .H = 3, .eps = 0.1f), .name = "slices of one"},
    {MIX(.M = 2, .D = 6, .H = 2), .name = "nothing optional", .absent = "gain_a gain_b residual"},
    {MIX(.M = 2, .D = 3), .name = "one gain", .absent = "gain_b"},
    {MIX(.M = 0, .D = 3), .name = "no rows"},
    {MIX(.M = 70, .D = 12, .H = 2), .name = "70 rows", .level = TEST_SMALL},
    {MIX(.M = 65, .D = 256, .H = 4), .name = "256", .level = TEST_MEDIUM},
    {MIX(.M = 33, .D = 193), .name = "193, slices of 644", .level = TEST_MEDIUM, .layout = TEST_SLICES, .row = 644},
    {MIX(.M = 300, .D = 60, .H = 5), .name = "60", .level = TEST_MEDIUM, .layout = TEST_GAPS},
    {MIX(.M = 9, .D = 48, .H = 24), .name = "slices of two", .level = TEST_MEDIUM},
    {MIX(.M = 9, .D = 64), .name = "large inputs", .level = TEST_MEDIUM,
     .fill = {{"a", 0, 10000, 0, 0}, {"b", 0, 1e-3, 0, 0}}},
    /* rows that a warp keeps in longer vectors, and rows that a block must read more than once; in every dtype */
    {MIX(.M = 9, .D = 512), .name = "512, a row", .level = TEST_SMALL},
    {MIX(.M = 5, .D = 2048), .name = "2048", .level = TEST_SMALL},
    {MIX(.M = 3, .D = 1027), .name = "1027", .level = TEST_SMALL},
    {MIX(.M = 5, .D = 2056), .name = "2056", .level = TEST_SMALL},
    {MIX(.M = 3, .D = 1029), .name = "1029", .level = TEST_SMALL},
    {MIX(.M = 9, .D = 504), .name = "504, a row", .level = TEST_SMALL},
    {MIX(.M = 3, .D = 9001), .name = "9001", .level = TEST_SMALL},
    {MIX(.M = 9, .D = 1024, .H = 2), .name = "two slices of 512", .level = TEST_SMALL},
    {MIX(.M = 3, .D = 20480), .name = "20480", .level = TEST_SMALL},
    {MIX(.M = 5000, .D = 512, .H = 8), .name = "512", .level = TEST_LARGE},
    {.op = NULL}};

/* Sizes for which the operator has specialised kernels, and sizes for general kernels. */
static const test_case sizes[] = {{MIX(.D = 128), .name = "sweep"},        {MIX(.D = 256, .H = 4), .name = "sweep"},
                                  {MIX(.D = 193), .name = "sweep"},        {MIX(.D = 1024, .H = 8), .name = "sweep"},
                                  {MIX(.D = 60, .H = 3), .name = "sweep"}, {.op = NULL}};

/* More than 65535 items along one axis of a grid. */
static const test_case many[] = {{MIX(.M = 140000, .D = 4), .name = "many"}, {.op = NULL}};

/* Sums over many rows.  The means of the terms are not 0, so that the sums grow with their length. */
static const test_case sums[] = {{.op = "norm_mix",
                                  .name = "long",
                                  .fill = {{"a", 0.5, 1, 0, 0}, {"b", 0.5, 1, 0, 0}, {"dy", 0.5, 1, 0, 0}},
                                  .args.norm_mix = {.M = 500000, .D = 3}},
                                 {.op = NULL}};

static void draw(test_random *r, int64_t most, test_case *c) {
    static const char *const absent[] = {"", "gain_a", "residual", "gain_a gain_b residual"};
    gt_norm_mix_args *a = &c->args.norm_mix;
    a->eps = 0.01f;
    a->H = 1 + test_pick(r, 3);
    a->D = a->H * (3 + test_pick(r, most));
    c->absent = test_pick_absent(r, absent);
}

/* ---- the formula, written out a second way ---------------------------------------------------- */

static double a(const formula *f, int64_t m, int64_t d) { return formula_value(f, "a", m, d, 0, 0); }
static double b(const formula *f, int64_t m, int64_t d) { return formula_value(f, "b", m, d, 0, 0); }

static double y(const formula *f, int64_t m, int64_t d, int64_t i, int64_t j) {
    const gt_norm_mix_args *args = &f->c->args.norm_mix;
    const int64_t n = args->D / (args->H ? args->H : 1);
    (void)i, (void)j;
    return formula_value(f, "residual", m, d, 0, 0) +
           formula_value(f, "gain_a", d, 0, 0, 0) * formula_norm(f, a, m, d, n, GT_NORM_RMS, args->eps) +
           formula_value(f, "gain_b", d, 0, 0, 0) * formula_norm(f, b, m, d, n, GT_NORM_RMS, args->eps);
}

static void huge_rows_hold(const test_runner *r, const test_case *c, double tolerance) {
    (void)tolerance;
    test_huge_rows_hold(r, c, "a");
    test_huge_rows_hold(r, c, "b");
}

static const test_property properties[] = {{"rows whose squares exceed fp32", TEST_SMALL, huge_rows_hold},
                                           {NULL, TEST_TINY, NULL}};

static const test_formula formulas[] = {{"y", y}, {NULL, NULL}};

/* ---- rows of the bench ----------------------------------------------------------------------- */

#define ROW(types, ...)                                                                                                \
    { {.op = "norm_mix", .name = "", .args.norm_mix = {__VA_ARGS__}}, types }

static const test_bench_row host_rows[] = {ROW(TEST_F32 | TEST_BF16, .M = 2048, .D = 128), {{.op = NULL}, 0}};

static const test_bench_row gpu_rows[] = {ROW(TEST_F32 | TEST_BF16 | TEST_F16, .M = 16384, .D = 128),
                                          ROW(TEST_BF16, .M = 30000, .D = 256),
                                          ROW(TEST_BF16, .M = 65536, .D = 512),
                                          ROW(TEST_BF16, .M = 32768, .D = 1024),
                                          ROW(TEST_BF16, .M = 32768, .D = 2048),
                                          ROW(TEST_BF16, .M = 32768, .D = 4096),
                                          {{.op = NULL}, 0}};

static const test_bench_draw draws[] = {{"gain_a gain_b", {0, 1, 0.3f}}, {NULL, {0, 0, 0}}};

/* ---- the operator ---------------------------------------------------------------------------- */

const test_op test_op_norm_mix = {
    TEST_OVER_ROWS(norm_mix),         .optional_size = {AT(norm_mix, H), 2},
    .large = {MIX(.M = 1, .D = 512)}, .kernels = {TEST_ACTIVATIONS, TEST_IN_FP32, TEST_IN_FP32, TEST_IN_FP32, 0},
    .properties = properties,         .bench_draws = draws,
};
