/* norm_gate: test cases, a formula independent of the twin, and rows of the bench. */
#include "formula.h"

TEST_TWINS_OF_ROWS(norm_gate)

/* ---- arguments ------------------------------------------------------------------------------- */

static const test_field fields[] = {TEST_DIVISOR(norm_gate, H, 'D'),
                                    TEST_FIELD(norm_gate, norm, 'i'),
                                    TEST_FIELD(norm_gate, gate_first, 'i'),
                                    TEST_FLOAT(norm_gate, eps, 1e-05),
                                    {NULL, 0, 0, 0, 0}};

static const test_bad_value bad_values[] = {BAD_SIZE(norm_gate, H),
                                            BAD_DIVISOR(norm_gate, H, 3),
                                            BAD_SWITCH(norm_gate, norm, 2),
                                            BAD_SWITCH(norm_gate, gate_first, 2),
                                            BAD_EPS(norm_gate),
                                            {NULL, GT_OK, {{0, 0, 0}}}};

/* ---- cases ----------------------------------------------------------------------------------- */

#define GATE(...) .op = "norm_gate", .args.norm_gate = {__VA_ARGS__}

static const test_case cases[] = {
    {GATE(.M = 1, .D = 2), .name = "two numbers"},
    {GATE(.M = 3, .D = 4), .name = "rms"},
    {GATE(.M = 3, .D = 4, .norm = GT_NORM_LAYER), .name = "layer"},
    {GATE(.M = 3, .D = 4, .gate_first = 1), .name = "gate, then rms"},
    {GATE(.M = 3, .D = 4, .gate_first = 1, .norm = GT_NORM_LAYER), .name = "gate, then layer"},
    {GATE(.M = 2, .D = 6, .H = 2, .norm = GT_NORM_LAYER, .eps = 64e-5f), .name = "two slices, layer"},
    {GATE(.M = 2, .D = 6, .H = 3, .gate_first = 1), .name = "three slices, gate first"},
    {GATE(.M = 2, .D = 3, .H = 3, .gate_first = 1, .eps = 0.1f), .name = "slices of one"},
    {GATE(.M = 3, .D = 4), .name = "no gate", .absent = "z dz"},
    {GATE(.M = 3, .D = 4, .gate_first = 1, .norm = GT_NORM_LAYER), .name = "nothing optional",
     .absent = "z dz gamma beta"},
    {GATE(.M = 3, .D = 4), .name = "closed gates", .fill = {{"z", 0, 1, -INFINITY, 0.2}}},
    {GATE(.M = 3, .D = 4, .gate_first = 1), .name = "closed gates first", .fill = {{"z", 0, 1, -INFINITY, 0.2}}},
    {GATE(.M = 2, .D = 4), .name = "no gamma, no beta", .absent = "gamma beta"},
    {GATE(.M = 0, .D = 3), .name = "no rows"},
    {GATE(.M = 70, .D = 12, .H = 2, .norm = GT_NORM_LAYER), .name = "70 rows", .level = TEST_SMALL},
    {GATE(.M = 70, .D = 12, .gate_first = 1), .name = "70 rows, gate first", .level = TEST_SMALL},
    {GATE(.M = 65, .D = 256, .H = 4, .norm = GT_NORM_LAYER, .eps = 64e-5f), .name = "256", .level = TEST_MEDIUM},
    {GATE(.M = 33, .D = 193, .gate_first = 1), .name = "193, slices of 644", .level = TEST_MEDIUM,
     .layout = TEST_SLICES, .row = 644},
    {GATE(.M = 300, .D = 60, .H = 5, .gate_first = 1, .norm = GT_NORM_LAYER), .name = "60", .level = TEST_MEDIUM,
     .layout = TEST_GAPS},
    {GATE(.M = 9, .D = 48, .H = 24, .norm = GT_NORM_LAYER), .name = "slices of two", .level = TEST_MEDIUM},
    {GATE(.M = 9, .D = 64), .name = "large inputs, closed and open gates", .level = TEST_MEDIUM,
     .fill = {{"x", 0, 1000, 0, 0}, {"z", 0, 30, 0, 0}}},
    {GATE(.M = 9, .D = 64, .norm = GT_NORM_LAYER), .name = "equal numbers in a row", .level = TEST_MEDIUM,
     .fill = {{"x", 2, 0, 0, 0}}},
    /* rows that a warp keeps in longer vectors, and rows that a block must read more than once; in every dtype */
    {GATE(.M = 9, .D = 512), .name = "512, a row", .level = TEST_SMALL},
    {GATE(.M = 5, .D = 2048, .norm = GT_NORM_LAYER), .name = "2048", .level = TEST_SMALL},
    {GATE(.M = 3, .D = 1027, .gate_first = 1), .name = "1027", .level = TEST_SMALL},
    {GATE(.M = 5, .D = 2056, .gate_first = 1), .name = "2056", .level = TEST_SMALL},
    {GATE(.M = 3, .D = 1029, .norm = GT_NORM_LAYER), .name = "1029", .level = TEST_SMALL},
    {GATE(.M = 9, .D = 504, .gate_first = 1), .name = "504, a row", .level = TEST_SMALL},
    {GATE(.M = 3, .D = 9001), .name = "9001", .level = TEST_SMALL},
    {GATE(.M = 9, .D = 1024, .H = 2, .norm = GT_NORM_LAYER), .name = "two slices of 512", .level = TEST_SMALL},
    {GATE(.M = 3, .D = 20480, .gate_first = 1, .norm = GT_NORM_LAYER), .name = "20480", .level = TEST_SMALL},
    {GATE(.M = 5000, .D = 512, .H = 8, .norm = GT_NORM_LAYER), .name = "512", .level = TEST_LARGE},
    {.op = NULL}};

/* Sizes for which the operator has specialised kernels, and sizes for general kernels. */
static const test_case sizes[] = {{GATE(.D = 256, .gate_first = 1), .name = "sweep"},
                                  {GATE(.D = 128, .H = 4, .norm = GT_NORM_LAYER, .eps = 64e-5f), .name = "sweep"},
                                  {GATE(.D = 193, .norm = GT_NORM_LAYER, .gate_first = 1), .name = "sweep"},
                                  {GATE(.D = 1024, .H = 8), .name = "sweep"},
                                  {GATE(.D = 60, .H = 3, .norm = GT_NORM_LAYER), .name = "sweep"},
                                  {.op = NULL}};

/* More than 65535 items along one axis of a grid. */
static const test_case many[] = {{GATE(.M = 140000, .D = 4), .name = "many"}, {.op = NULL}};

/* Sums over many rows.  The means of the terms are not 0, so that the sums grow with their length. */
static const test_case sums[] = {{.op = "norm_gate",
                                  .name = "long",
                                  .fill = {{"x", 0.5, 1, 0, 0}, {"dy", 0.5, 1, 0, 0}, {"dstate_out", 0.5, 1, 0, 0}},
                                  .args.norm_gate = {.M = 500000, .D = 3}},
                                 {.op = NULL}};

static void draw(test_random *r, int64_t most, test_case *c) {
    static const char *const absent[] = {"", "z dz", "gamma", "z dz gamma beta"};
    gt_norm_gate_args *a = &c->args.norm_gate;
    a->H = 1 + test_pick(r, 3);
    a->D = a->H * (3 + test_pick(r, most));
    a->norm = (gt_norm)test_pick(r, 2);
    a->gate_first = (int)test_pick(r, 2);
    a->eps = 0.01f;
    c->absent = test_pick_absent(r, absent);
}

/* ---- the formula, written out a second way ---------------------------------------------------- */

static double silu_of_z(const formula *f, int64_t m, int64_t d) {
    return formula_has(f, "z") ? formula_silu(formula_value(f, "z", m, d, 0, 0)) : 1;
}

/* The input of the norm: x, or x times the gate if the gate comes first. */
static double input(const formula *f, int64_t m, int64_t d) {
    return formula_value(f, "x", m, d, 0, 0) * (f->c->args.norm_gate.gate_first ? silu_of_z(f, m, d) : 1);
}

static double y(const formula *f, int64_t m, int64_t d, int64_t i, int64_t j) {
    const gt_norm_gate_args *a = &f->c->args.norm_gate;
    const double normalised = formula_norm(f, input, m, d, a->D / (a->H ? a->H : 1), a->norm, a->eps) *
                                  formula_value(f, "gamma", d, 0, 0, 0) +
                              formula_value(f, "beta", d, 0, 0, 0);
    (void)i, (void)j;
    return normalised * (a->gate_first ? 1 : silu_of_z(f, m, d));
}

static void huge_rows_hold(const test_runner *r, const test_case *c, double tolerance) {
    (void)tolerance;
    test_huge_rows_hold(r, c, "x");
}

static const test_property properties[] = {{"rows whose squares exceed fp32", TEST_SMALL, huge_rows_hold},
                                           {NULL, TEST_TINY, NULL}};

static const test_formula formulas[] = {{"y", y}, {NULL, NULL}};

/* ---- rows of the bench ----------------------------------------------------------------------- */

#define ROW_RMS(types, ...)                                                                                            \
    {                                                                                                                  \
        {.op = "norm_gate", .name = "RMS", .absent = "beta dbeta", .args.norm_gate = {.gate_first = 1, __VA_ARGS__}},  \
            types                                                                                                      \
    }
#define ROW_HEADS(types, label, ...)                                                                                   \
    { {.op = "norm_gate", .name = label, .args.norm_gate = {.norm = GT_NORM_LAYER, .eps = 64e-5f, __VA_ARGS__}}, types }

static const test_bench_row host_rows[] = {ROW_RMS(TEST_F32 | TEST_BF16, .M = 2048, .D = 128),
                                           ROW_HEADS(TEST_F32 | TEST_BF16, "heads of 32", .M = 2048, .D = 128, .H = 4),
                                           {{.op = NULL}, 0}};

static const test_bench_row gpu_rows[] = {ROW_RMS(TEST_F32 | TEST_BF16 | TEST_F16, .M = 16384, .D = 128),
                                          ROW_RMS(TEST_BF16, .M = 30000, .D = 512),
                                          ROW_RMS(TEST_BF16, .M = 65536, .D = 512),
                                          ROW_HEADS(TEST_F32 | TEST_BF16, "heads of 32", .M = 16384, .D = 128, .H = 4),
                                          ROW_HEADS(TEST_BF16, "heads of 64", .M = 30000, .D = 256, .H = 4),
                                          ROW_HEADS(TEST_BF16, "heads of 64", .M = 65536, .D = 512, .H = 8),
                                          ROW_RMS(TEST_BF16, .M = 32768, .D = 1024),
                                          ROW_RMS(TEST_BF16, .M = 32768, .D = 2048),
                                          ROW_RMS(TEST_BF16, .M = 32768, .D = 4096),
                                          ROW_HEADS(TEST_BF16, "heads of 64", .M = 32768, .D = 2048, .H = 32),
                                          {{.op = NULL}, 0}};

static const test_bench_draw draws[] = {{"gamma", {0, 1, 0.3f}}, {NULL, {0, 0, 0}}};

/* ---- the operator ---------------------------------------------------------------------------- */

const test_op test_op_norm_gate = {
    TEST_OVER_ROWS(norm_gate),         .optional_size = {AT(norm_gate, H), 2},
    .large = {GATE(.M = 1, .D = 512)}, .kernels = {TEST_ACTIVATIONS, TEST_IN_FP32, TEST_IN_FP32, TEST_IN_FP32, 0},
    .properties = properties,          .bench_draws = draws,
};
