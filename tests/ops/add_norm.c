/* add_norm: test cases, a formula independent of the twin, and rows of the bench. */
#include "formula.h"
#include <string.h>

TEST_TWINS_OF_ROWS(add_norm)

/* ---- arguments ------------------------------------------------------------------------------- */

static const test_field fields[] = {TEST_FIELD(add_norm, norm, 'i'),
                                    TEST_FIELD(add_norm, reads_sum, 'i'),
                                    TEST_FLOAT(add_norm, eps, 1e-05),
                                    {NULL, 0, 0, 0, 0}};

static const test_bad_value bad_values[] = {
    BAD_SWITCH(add_norm, norm, 2), BAD_SWITCH(add_norm, reads_sum, 2), BAD_EPS(add_norm), {NULL, GT_OK, {{0, 0, 0}}}};

/* ---- cases ----------------------------------------------------------------------------------- */

#define ADD(...) .op = "add_norm", .args.add_norm = {__VA_ARGS__}
#define NO_ADDITION "residual dresidual"

static const test_case cases[] = {
    {ADD(.M = 1, .D = 2), .name = "two numbers"},
    {ADD(.M = 3, .D = 4), .name = "rms"},
    {ADD(.M = 3, .D = 4, .norm = GT_NORM_LAYER), .name = "layer"},
    {ADD(.M = 2, .D = 1), .name = "one number"},
    {ADD(.M = 3, .D = 5), .name = "no residual", .absent = NO_ADDITION},
    {ADD(.M = 3, .D = 5, .norm = GT_NORM_LAYER), .name = "nothing optional",
     .absent = NO_ADDITION " gamma beta dsum dgamma dbeta"},
    {ADD(.M = 2, .D = 6, .eps = 0.1f), .name = "no gamma, no beta", .absent = "gamma beta"},
    {ADD(.M = 2, .D = 6), .name = "dx alone", .absent = "dresidual dgamma dbeta"},
    {ADD(.M = 2, .D = 6), .name = "dresidual alone", .absent = "dx"},
    {ADD(.M = 0, .D = 3), .name = "no rows"},
    {ADD(.M = 70, .D = 12, .norm = GT_NORM_LAYER), .name = "70 rows", .level = TEST_SMALL},
    {ADD(.M = 65, .D = 256), .name = "256", .level = TEST_MEDIUM},
    {ADD(.M = 33, .D = 193), .name = "193, slices of 644", .level = TEST_MEDIUM, .layout = TEST_SLICES, .row = 644},
    {ADD(.M = 33, .D = 192), .name = "192, slices of 648", .level = TEST_MEDIUM, .layout = TEST_SLICES, .row = 648},
    {ADD(.M = 300, .D = 64, .norm = GT_NORM_LAYER), .name = "64", .level = TEST_MEDIUM, .layout = TEST_GAPS},
    {ADD(.M = 9, .D = 64, .norm = GT_NORM_LAYER), .name = "equal numbers in a row", .level = TEST_MEDIUM,
     .fill = {{"x", 2, 0, 0, 0}, {"residual", 1, 0, 0, 0}}},
    /* rows that fill a thread's one or two groups of 8 elements or not, and rows too long for registers, which are read
     * twice */
    {ADD(.M = 300, .D = 2048), .name = "2048", .level = TEST_SMALL},
    {ADD(.M = 5, .D = 4096, .norm = GT_NORM_LAYER), .name = "4096", .level = TEST_SMALL},
    /* lean kernels, in 16 bits */
    {ADD(.M = 3, .D = 8), .name = "8, no beta", .absent = "beta dbeta dsum"},
    {ADD(.M = 300, .D = 2048), .name = "2048, no beta", .level = TEST_SMALL, .absent = "beta dbeta"},
    {ADD(.M = 5, .D = 4096), .name = "4096, no gamma, no beta", .level = TEST_SMALL,
     .absent = "gamma dgamma beta dbeta"},
    {ADD(.M = 5, .D = 5120), .name = "5120", .level = TEST_SMALL},
    {ADD(.M = 3, .D = 8192, .norm = GT_NORM_LAYER), .name = "8192", .level = TEST_SMALL},
    {ADD(.M = 3, .D = 9000), .name = "9000", .level = TEST_SMALL},
    {ADD(.M = 3, .D = 9001, .norm = GT_NORM_LAYER), .name = "9001", .level = TEST_SMALL},
    {ADD(.M = 3, .D = 16384), .name = "16384", .level = TEST_SMALL},
    {ADD(.M = 3, .D = 20480), .name = "20480", .level = TEST_SMALL},
    {ADD(.M = 5000, .D = 512), .name = "512", .level = TEST_LARGE},
    {.op = NULL}};

/* Sizes for which the operator has specialised kernels, and sizes for general kernels. */
static const test_case sizes[] = {{ADD(.D = 256), .name = "sweep"},
                                  {ADD(.D = 264), .name = "sweep", .absent = "beta dbeta"},
                                  {ADD(.D = 193, .norm = GT_NORM_LAYER), .name = "sweep"},
                                  {ADD(.D = 1024, .norm = GT_NORM_LAYER), .name = "sweep"},
                                  {ADD(.D = 3), .name = "sweep"},
                                  {.op = NULL}};

/* More than 65535 rows, the largest size of some dimensions of a grid. */
static const test_case many[] = {{ADD(.M = 140000, .D = 4), .name = "many"}, {.op = NULL}};

/* Sums over many rows.  The means of the terms are not 0, so that the sums grow with their length. */
static const test_case sums[] = {
    {ADD(.M = 500000, .D = 3), .name = "long", .fill = {{"x", 0.5, 1, 0, 0}, {"dy", 0.5, 1, 0, 0}}}, {.op = NULL}};

static void draw(test_random *r, int64_t most, test_case *c) {
    static const char *const absent[] = {"", NO_ADDITION, "gamma dsum", "gamma beta dx", "beta dbeta"};
    gt_add_norm_args *a = &c->args.add_norm;
    a->D = 3 + test_pick(r, most);
    if (test_pick(r, 2)) a->D = (a->D + 7) / 8 * 8;
    a->norm = (gt_norm)test_pick(r, 2);
    a->eps = 0.01f;
    c->absent = test_pick_absent(r, absent);
}

/* Rounds x and residual such that every dtype holds their sum exactly.  Then a backward that reads the stored sum
 * computes from the same numbers as the double twin.  Numbers of 8 and more stay as they are. */
static void settle(const test_case *c, test_values *in) {
    static const char *const names[] = {"x", "residual"};
    for (int i = 0; i < 2; i++) {
        double *x = *test_array_of(in, c, names[i]);
        if (!x) continue;
        const int64_t count = test_count(c, GT_FORWARD, test_tensor_of(c, names[i]));
        for (int64_t k = 0; k < count; k++)
            if (fabs(x[k]) < 8) x[k] = 0x1p-4 * rint(0x1p4 * x[k]) + 0.0; /* + 0.0 turns -0 into 0 */
    }
}

/* ---- the formula, written out a second way ---------------------------------------------------- */

static double total(const formula *f, int64_t m, int64_t d) {
    return formula_value(f, "x", m, d, 0, 0) +
           (formula_has(f, "residual") ? formula_value(f, "residual", m, d, 0, 0) : 0);
}

static double sum(const formula *f, int64_t m, int64_t d, int64_t i, int64_t j) {
    (void)i, (void)j;
    return total(f, m, d);
}

static double y(const formula *f, int64_t m, int64_t d, int64_t i, int64_t j) {
    const gt_add_norm_args *a = &f->c->args.add_norm;
    (void)i, (void)j;
    return formula_norm(f, total, m, d, a->D, a->norm, a->eps) * formula_value(f, "gamma", d, 0, 0, 0) +
           formula_value(f, "beta", d, 0, 0, 0);
}

static void huge_rows_hold(const test_runner *r, const test_case *c, double tolerance) {
    (void)tolerance;
    test_huge_rows_hold(r, c, "x");
}

static const test_property properties[] = {{"rows whose squares exceed fp32", TEST_SMALL, huge_rows_hold},
                                           {NULL, TEST_TINY, NULL}};

static const test_formula formulas[] = {{"sum", sum}, {"y", y}, {NULL, NULL}};

/* ---- rows of the bench ----------------------------------------------------------------------- */

#define NAMED_ROW(types, text, ...)                                                                                    \
    { {ADD(__VA_ARGS__), .name = text, .absent = "beta dbeta dresidual"}, types }
/* Backward reads the sum x + residual that forward stored, as users call it.  In rows named "inputs", backward reads x
 * and residual instead. */
#define ROW(types, ...) NAMED_ROW(types, "", .reads_sum = 1, __VA_ARGS__)

static const test_bench_row host_rows[] = {ROW(TEST_F32 | TEST_BF16, .M = 2048, .D = 128),
                                           NAMED_ROW(TEST_F32, "inputs", .M = 2048, .D = 128),
                                           {{.op = NULL}, 0}};

static const test_bench_row gpu_rows[] = {ROW(TEST_BF16, .M = 16384, .D = 128),
                                          ROW(TEST_BF16, .M = 65536, .D = 512),
                                          ROW(TEST_F32 | TEST_BF16 | TEST_F16, .M = 32768, .D = 1024),
                                          ROW(TEST_BF16, .M = 32768, .D = 2048),
                                          ROW(TEST_F32 | TEST_BF16, .M = 32768, .D = 4096),
                                          ROW(TEST_BF16, .M = 32768, .D = 5120),
                                          NAMED_ROW(TEST_BF16, "inputs", .M = 32768, .D = 4096),
                                          {{.op = NULL}, 0}};

static const test_bench_draw draws[] = {{"gamma", {0, 1, 0.3f}}, {NULL, {0, 0, 0}}};

/* ---- the operator ---------------------------------------------------------------------------- */

const test_op test_op_add_norm = {
    TEST_OVER_ROWS(add_norm),
    .large = {ADD(.M = 1, .D = 512)},
    .kernels = {TEST_ACTIVATIONS, TEST_IN_FP32, TEST_IN_FP32, TEST_IN_FP32, 0},
    .settle = settle,
    .reads_y = AT(add_norm, reads_sum),
    .unread_with_y = "x residual",
    .properties = properties,
    .bench_draws = draws,
};
