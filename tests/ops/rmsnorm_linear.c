/* rmsnorm_linear: test cases, a formula independent of the twin, and rows of the bench. */
#include "formula.h"

TEST_TWINS_OVER_TIME(rmsnorm_linear)

/* ---- arguments ------------------------------------------------------------------------------- */

static const test_field fields[] = {
    TEST_FIELD(rmsnorm_linear, norm, 'i'), TEST_FLOAT(rmsnorm_linear, eps, 1e-05), {NULL, 0, 0, 0, 0}};

static const test_bad_value bad_values[] = {
    BAD_SWITCH(rmsnorm_linear, norm, 2), BAD_EPS(rmsnorm_linear), {NULL, GT_OK, {{0, 0, 0}}}};

/* ---- cases ----------------------------------------------------------------------------------- */

#define LINEAR(...) .op = "rmsnorm_linear", .args.rmsnorm_linear = {__VA_ARGS__}

static const test_case cases[] = {
    {LINEAR(.M = 1, .D = 2, .O = 1), .name = "two numbers"},
    {LINEAR(.M = 3, .D = 4, .O = 3), .name = "rms"},
    {LINEAR(.M = 3, .D = 4, .O = 3, .norm = GT_NORM_LAYER), .name = "layer"},
    {LINEAR(.M = 2, .D = 3, .O = 5, .norm = GT_NORM_LAYER, .eps = 0.1f), .name = "large eps"},
    {LINEAR(.M = 2, .D = 5, .O = 2), .name = "nothing optional", .absent = "gamma beta bias"},
    {LINEAR(.M = 2, .D = 5, .O = 2, .norm = GT_NORM_LAYER), .name = "layer, nothing optional",
     .absent = "gamma beta bias"},
    {LINEAR(.M = 2, .D = 3, .O = 2, .eps = 1e-3f), .name = "small inputs", .fill = {{"x", 0, 0.01, 0, 0}}},
    {LINEAR(.M = 0, .D = 3, .O = 2), .name = "no rows"},
    {LINEAR(.M = 40, .D = 17, .O = 9, .norm = GT_NORM_LAYER), .name = "40 rows", .level = TEST_SMALL},
    {LINEAR(.M = 33, .D = 32, .O = 40), .name = "32 to 40", .level = TEST_SMALL},
    {LINEAR(.M = 300, .D = 264, .O = 520, .norm = GT_NORM_LAYER), .name = "264 to 520", .level = TEST_SMALL},
    {LINEAR(.M = 300, .D = 584, .O = 520), .name = "584 to 520", .level = TEST_SMALL, .no_difference = 1},
    {LINEAR(.M = 40, .D = 64, .O = 64), .name = "dn below fp16", .level = TEST_SMALL,
     .fill = {{"dy", 0, 1e-3, 0, 0}, {"weight", 0, 1e-3, 0, 0}, {"gamma", 100, 10, 0, 0}}},
    {LINEAR(.M = 129, .D = 72, .O = 136), .name = "72 to 136", .level = TEST_SMALL},
    {LINEAR(.M = 260, .D = 136, .O = 264), .name = "136 to 264", .level = TEST_SMALL,
     .absent = "beta dbeta bias dbias"},
    {LINEAR(.M = 40, .D = 40, .O = 32, .eps = 1e-14f), .name = "mean square below 2^-40", .level = TEST_SMALL,
     .no_difference = 1, .fill = {{"x", 0, 2e-7, 0, 0}, {"dy", 0, 1e-5, 0, 0}}},
    {LINEAR(.M = 150, .D = 136, .O = 72), .name = "136 to 72", .level = TEST_SMALL},
    {LINEAR(.M = 300, .D = 72, .O = 264), .name = "72 to 264", .level = TEST_SMALL, .absent = "beta dbeta bias dbias"},
    {LINEAR(.M = 17100, .D = 64, .O = 40), .name = "rows of more blocks than there are", .level = TEST_MEDIUM,
     .no_difference = 1},
    {LINEAR(.M = 9, .D = 64, .O = 1032), .name = "64 to 1032", .level = TEST_SMALL, .no_difference = 1},
    {LINEAR(.M = 9, .D = 64, .O = 1024), .name = "64 to 1024", .level = TEST_SMALL, .no_difference = 1},
    {LINEAR(.M = 9, .D = 32, .O = 1096), .name = "32 to 1096", .level = TEST_SMALL},
    {LINEAR(.M = 9, .D = 40, .O = 2104), .name = "40 to 2104", .level = TEST_SMALL},
    {LINEAR(.M = 40, .D = 64, .O = 64), .name = "dn beyond fp16", .level = TEST_SMALL,
     .fill = {{"dy", 0, 1000, 0, 0}, {"weight", 0, 100, 0, 0}, {"x", 0, 10000, 0, 0}}},
    {LINEAR(.M = 128, .D = 8192, .O = 32), .name = "8192 to 32", .level = TEST_SMALL, .no_difference = 1},
    {LINEAR(.M = 127, .D = 64, .O = 64, .norm = GT_NORM_LAYER), .name = "127 rows", .level = TEST_SMALL,
     .no_difference = 1},
    {LINEAR(.M = 128, .D = 32, .O = 24), .name = "32 to 24", .level = TEST_SMALL, .no_difference = 1},
    {LINEAR(.M = 128, .D = 24, .O = 32), .name = "24 to 32", .level = TEST_SMALL, .no_difference = 1},
    {LINEAR(.M = 9, .D = 64, .O = 1, .norm = GT_NORM_LAYER), .name = "one output of terms that cancel",
     .level = TEST_SMALL, .absent = "gamma dgamma beta dbeta bias dbias dx", .no_difference = 1,
     .fill = {{"x", 50, 1, 0, 0}, {"weight", 1, 3e-3, 0, 0}}},
    {LINEAR(.M = 530, .D = 512, .O = 136), .name = "512 to 136", .level = TEST_SMALL, .no_difference = 1},
    {LINEAR(.M = 650, .D = 136, .O = 264, .norm = GT_NORM_LAYER), .name = "136 to 264, rows of six blocks",
     .level = TEST_SMALL, .no_difference = 1},
    {LINEAR(.M = 520, .D = 64, .O = 136, .norm = GT_NORM_LAYER), .name = "64 to 136, far from zero",
     .level = TEST_SMALL, .no_difference = 1, .fill = {{"x", 50, 1, 0, 0}}},
    {LINEAR(.M = 65, .D = 128, .O = 200), .name = "128 to 200", .level = TEST_MEDIUM},
    {LINEAR(.M = 33, .D = 386, .O = 65, .norm = GT_NORM_LAYER), .name = "386 to 65, slices", .level = TEST_MEDIUM,
     .layout = TEST_SLICES, .row = 386},
    {LINEAR(.M = 300, .D = 61, .O = 64, .norm = GT_NORM_LAYER), .name = "61 to 64", .level = TEST_MEDIUM,
     .layout = TEST_GAPS},
    {LINEAR(.M = 9, .D = 64, .O = 32, .norm = GT_NORM_LAYER), .name = "equal numbers in a row", .level = TEST_MEDIUM,
     .fill = {{"x", 2, 0, 0, 0}}},
    {LINEAR(.M = 9, .D = 64, .O = 32, .norm = GT_NORM_LAYER), .name = "far from zero", .level = TEST_MEDIUM,
     .fill = {{"x", 50, 1, 0, 0}}},
    {LINEAR(.M = 9, .D = 64, .O = 32), .name = "large inputs", .level = TEST_MEDIUM, .fill = {{"x", 0, 10000, 0, 0}}},
    {LINEAR(.M = 9, .D = 64, .O = 32), .name = "small inputs, below eps", .level = TEST_MEDIUM,
     .fill = {{"x", 0, 1e-3, 0, 0}}},
    {LINEAR(.M = 1000, .D = 512, .O = 1500), .name = "512 to 1500", .level = TEST_LARGE},
    {.op = NULL}};

/* Sizes for which the operator has specialised kernels, and sizes for general kernels. */
static const test_case sizes[] = {{LINEAR(.D = 128, .O = 512), .name = "sweep"},
                                  {LINEAR(.D = 128, .O = 520), .name = "sweep"},
                                  {LINEAR(.D = 256, .O = 128, .norm = GT_NORM_LAYER), .name = "sweep"},
                                  {LINEAR(.D = 64, .O = 64), .name = "sweep"},
                                  {LINEAR(.D = 386, .O = 65, .norm = GT_NORM_LAYER), .name = "sweep"},
                                  {LINEAR(.D = 100, .O = 17), .name = "sweep"},
                                  {.op = NULL}};

static const int64_t more_times[] = {130, 300, -1};
static const char *const launched[] = {
    "product_kernel",      "hopper_split_kernel", "hopper_tiles_kernel", "hopper_whole_kernel",
    "hopper_small_kernel", "hopper_dx_kernel",    "normalise_kernel",    NULL};

/* Draws positive scales for int8 weights, so small that y stays below 2^15, as fp16 needs it. */
static void set_fill(const test_case *c, const gt_tensor *t, test_fill *f, test_map *map) {
    (void)c, (void)map;
    if (!strcmp(t->name, "weight_scale")) f->mean = 0.01, f->spread = 0.003;
}

/* More than 65535 items along one axis of a grid. */
static const test_case many[] = {{LINEAR(.M = 140000, .D = 4, .O = 2), .name = "many"},
                                 {LINEAR(.M = 2, .D = 4, .O = 140000), .name = "many"},
                                 {.op = NULL}};

/* Sums over many rows.  The means of the terms are not 0, so that the sums grow with their length. */
static const test_case sums[] = {{.op = "rmsnorm_linear",
                                  .name = "long",
                                  .fill = {{"x", 0.5, 1, 0, 0}, {"dy", 0.5, 1, 0, 0}, {"dstate_out", 0.5, 1, 0, 0}},
                                  .args.rmsnorm_linear = {.M = 1000000, .D = 3, .O = 2}},
                                 {.op = NULL}};

static void draw(test_random *r, int64_t most, test_case *c) {
    static const char *const absent[] = {"", "gamma", "beta bias", "gamma beta bias"};
    gt_rmsnorm_linear_args *a = &c->args.rmsnorm_linear;
    a->D = 3 + test_pick(r, 2 * most);
    a->O = 1 + test_pick(r, 2 * most);
    a->eps = 0.01f;
    a->norm = (gt_norm)test_pick(r, 2);
    c->absent = test_pick_absent(r, absent);
}

/* ---- the formula, written out a second way ---------------------------------------------------- */

static double x(const formula *f, int64_t m, int64_t d) { return formula_value(f, "x", m, d, 0, 0); }

static double weight(const formula *f, int64_t o, int64_t d) {
    if (!formula_has(f, "weight_int8")) return formula_value(f, "weight", o, d, 0, 0);
    return formula_value(f, "weight_scale", o, 0, 0, 0) * formula_value(f, "weight_int8", o, d, 0, 0);
}

static double y(const formula *f, int64_t m, int64_t o, int64_t i, int64_t j) {
    const gt_rmsnorm_linear_args *a = &f->c->args.rmsnorm_linear;
    double sum = formula_value(f, "bias", o, 0, 0, 0);
    (void)i, (void)j;
    for (int64_t d = 0; d < a->D; d++)
        sum +=
            weight(f, o, d) * (formula_norm(f, x, m, d, a->D, a->norm, a->eps) * formula_value(f, "gamma", d, 0, 0, 0) +
                               formula_value(f, "beta", d, 0, 0, 0));
    return sum;
}

static void huge_rows_hold(const test_runner *r, const test_case *c, double tolerance) {
    (void)tolerance;
    test_huge_rows_hold(r, c, "x");
}

/* Sizes on both sides of every branch of the step kernels.  These kernels work on groups of up to 8 units of 16
 * outputs. The emulated device has 4 multiprocessors. */
static const test_case steps[] = {
    {LINEAR(.M = 1, .D = 1040, .O = 200), .name = "a last step of 16 columns"},
    {LINEAR(.M = 3, .D = 64, .O = 1096), .name = "12 groups"},
    {LINEAR(.M = 8, .D = 512, .O = 40, .norm = GT_NORM_LAYER), .name = "8 rows", .absent = "bias"},
    {LINEAR(.M = 16, .D = 2064, .O = 40, .norm = GT_NORM_LAYER), .name = "slabs of fp32", .absent = "gamma"},
    {LINEAR(.M = 15, .D = 4096, .O = 33), .name = "slabs of 16 bits", .absent = "beta"},
    {LINEAR(.M = 17, .D = 272, .O = 100), .name = "17 rows", .absent = "gamma beta bias"},
    {LINEAR(.M = 64, .D = 1104, .O = 600), .name = "8 groups, slabs"},
    {LINEAR(.M = 33, .D = 32, .O = 32, .norm = GT_NORM_LAYER), .name = "one step"},
    {LINEAR(.M = 13, .D = 72, .O = 100, .norm = GT_NORM_LAYER), .name = "no whole pieces"},
    {LINEAR(.M = 2, .D = 64, .O = 100), .name = "rows apart", .layout = TEST_SHIFTED},
    {LINEAR(.M = 5, .D = 128, .O = 100), .name = "aligned rows apart", .layout = TEST_ALIGNED},
    {LINEAR(.M = 5, .D = 96, .O = 64), .name = "rows whose squares exceed fp32", .fill = {{"x", 0, 1e25, 0, 0}}},
    {.op = NULL}};

/* Runs all cases of `steps` with the dtype of *c.  Only the operator's first case and the first size of the sweep do
 * so, since one run for each dtype is enough. */
static void steps_agree(const test_runner *r, const test_case *c, double tolerance) {
    const gt_dtype dtype = c->args.rmsnorm_linear.dtype;
    (void)tolerance;
    if (c->name != cases[0].name && (c->args.rmsnorm_linear.O != 512 || strcmp(c->name, "sweep"))) return;
    for (const test_case *step = steps; step->op; step++) {
        test_values in, truth, got;
        test_case own = *step;
        if (own.fill[0].spread > 1e5 && dtype == GT_F16) continue; /* fp16 cannot hold these numbers */
        test_set_dtype(&own, dtype, GT_DTYPE_DEFAULT);
        test_inputs(&own, GT_STEP, &in);
        test_run(&test_truth, &own, GT_STEP, &in, TEST_ALL, &truth);
        test_run(r, &own, GT_STEP, &in, TEST_ALL, &got);
        test_compare(r, &own, GT_STEP, &got, &truth, NULL);
        test_free(&in), test_free(&truth), test_free(&got);
    }
}

static const test_property properties[] = {{"rows whose squares exceed fp32", TEST_SMALL, huge_rows_hold},
                                           {"steps of every size", TEST_TINY, steps_agree},
                                           {NULL, TEST_TINY, NULL}};

static const test_formula formulas[] = {{"y", y}, {NULL, NULL}};

/* ---- rows of the bench ----------------------------------------------------------------------- */

#define ROW(types, ...) NAMED_ROW(types, "", __VA_ARGS__)
#define NAMED_ROW(types, text, ...)                                                                                    \
    {                                                                                                                  \
        {.op = "rmsnorm_linear",                                                                                       \
         .name = text,                                                                                                 \
         .absent = "beta dbeta bias dbias",                                                                            \
         .args.rmsnorm_linear = {__VA_ARGS__}},                                                                        \
            types                                                                                                      \
    }

static const test_bench_row host_rows[] = {ROW(TEST_F32 | TEST_BF16, .M = 2048, .D = 128, .O = 512),
                                           ROW(TEST_BF16, .M = 1, .D = 128, .O = 512),
                                           {{.op = NULL}, 0}};

static const test_bench_row gpu_rows[] = {
    ROW(TEST_F32 | TEST_BF16 | TEST_F16, .M = 16384, .D = 128, .O = 512),
    ROW(TEST_BF16 | TEST_F16, .M = 16384, .D = 256, .O = 1024),
    ROW(TEST_BF16, .M = 30000, .D = 256, .O = 1024),
    ROW(TEST_F32 | TEST_BF16 | TEST_F16, .M = 65536, .D = 512, .O = 2048),
    ROW(TEST_BF16, .M = 32768, .D = 1024, .O = 4096),
    ROW(TEST_BF16, .M = 32768, .D = 2048, .O = 2048),
    ROW(TEST_BF16, .M = 32768, .D = 2048, .O = 8192),
    ROW(TEST_BF16, .M = 16384, .D = 4096, .O = 11008),
    ROW(TEST_BF16, .M = 1, .D = 4096, .O = 14336), /* these three rows time the step */
    ROW(TEST_BF16, .M = 16, .D = 4096, .O = 14336),
    ROW(TEST_BF16, .M = 64, .D = 4096, .O = 14336),
    NAMED_ROW(TEST_BF16, "layer", .M = 16384, .D = 128, .O = 512, .norm = GT_NORM_LAYER),
    NAMED_ROW(TEST_BF16, "layer", .M = 16384, .D = 256, .O = 1024, .norm = GT_NORM_LAYER),
    NAMED_ROW(TEST_BF16, "layer", .M = 65536, .D = 512, .O = 2048, .norm = GT_NORM_LAYER),
    NAMED_ROW(TEST_BF16, "layer", .M = 32768, .D = 1024, .O = 4096, .norm = GT_NORM_LAYER),
    NAMED_ROW(TEST_BF16, "layer", .M = 32768, .D = 2048, .O = 8192, .norm = GT_NORM_LAYER),
    NAMED_ROW(TEST_BF16, "layer", .M = 16384, .D = 4096, .O = 11008, .norm = GT_NORM_LAYER),
    {{.op = NULL}, 0}};

static const test_bench_draw draws[] = {
    {"weight", {0, 0, 0.03f}}, {"weight_scale", {1, 4e-4f, 2e-4f}}, {"gamma", {0, 1, 0.3f}}, {NULL, {0, 0, 0}}};
static const test_bench_cut cuts[] = {{"M", 8}, {"O", 4}, {NULL, 0}};

/* ---- the operator ---------------------------------------------------------------------------- */

const test_op test_op_rmsnorm_linear = {
    TEST_ROWS_AND_STEP(rmsnorm_linear),
    .set_fill = set_fill,
    .large = {LINEAR(.M = 1, .D = 512, .O = 512)},
    /* dweight is computed from normalised rows in 16 bits; measured errors are 9e-4 (bf16) and 1e-4 (fp16) */
    .kernels = {TEST_ACTIVATIONS, {0, 1e-5, 1.5e-3, 3e-4}, TEST_IN_FP32, {0, 1e-5, 1.5e-3, 3e-4}, 1},
    .properties = properties,
    .more_times = more_times,
    .launched = launched,
    .handle = AT(rmsnorm_linear, cublaslt),
    .bench_draws = draws,
    .bench_cuts = cuts,
    .operations = {"MDO", 2, 4},
};
