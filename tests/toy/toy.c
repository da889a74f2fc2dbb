/* The toy operator: test cases, a formula independent of the twin, and rows of the bench. */
#include "../ops/formula.h"

TEST_TWINS_OF_ROWS(toy)

static const test_field fields[] = {TEST_FLOAT(toy, shift, 0.5), TEST_FIELD(toy, negate, 'i'), {NULL, 0, 0, 0, 0}};

static const test_bad_value bad_values[] = {BAD_SWITCH(toy, negate, 2),
                                            BAD(toy, shift, 'f', INFINITY, GT_ERROR_VALUE, "shift = inf"),
                                            {NULL, GT_OK, {{0, 0, 0}}}};

#define TOY(...) .op = "toy", .args.toy = {__VA_ARGS__}

static const test_case cases[] = {
    {TOY(.M = 1, .D = 1), .name = "one number"},
    {TOY(.M = 3, .D = 4, .shift = 1), .name = "some"},
    {TOY(.M = 3, .D = 4, .negate = 1), .name = "negated"},
    {TOY(.M = 2, .D = 3), .name = "no gamma", .absent = "gamma"},
    {TOY(.M = 0, .D = 3), .name = "no rows"},
    {TOY(.M = 70, .D = 12), .name = "70 rows", .level = TEST_SMALL},
    {TOY(.M = 33, .D = 300), .name = "300, slices of 644", .level = TEST_MEDIUM, .layout = TEST_SLICES, .row = 644},
    {.op = NULL}};
static const test_case sizes[] = {{TOY(.D = 300), .name = "sweep"}, {TOY(.D = 7), .name = "sweep"}, {.op = NULL}};
static const test_case many[] = {{TOY(.M = 140000, .D = 4), .name = "many"}, {.op = NULL}};
static const test_case sums[] = {{TOY(.M = 500000, .D = 2), .name = "long", .fill = {{"dy", 0.5, 1, 0, 0}}},
                                 {.op = NULL}};

static void draw(test_random *r, int64_t most, test_case *c) {
    static const char *const absent[] = {"", "gamma", "", "gamma"};
    c->args.toy.D = 1 + test_pick(r, 2 * most);
    c->args.toy.negate = (int)test_pick(r, 2);
    c->absent = test_pick_absent(r, absent);
}

static double y(const formula *f, int64_t m, int64_t d, int64_t i, int64_t j) {
    const double gamma = formula_value(f, "gamma", d, 0, 0, 0);
    (void)i, (void)j;
    return (f->c->args.toy.negate ? -gamma : gamma) * pow(formula_value(f, "x", m, d, 0, 0), 2) + f->c->args.toy.shift;
}

static const test_formula formulas[] = {{"y", y}, {NULL, NULL}};

static const test_bench_row host_rows[] = {{{TOY(.M = 256, .D = 64), .name = ""}, TEST_F32 | TEST_BF16},
                                           {{.op = NULL}, 0}};
static const test_bench_row gpu_rows[] = {{{TOY(.M = 65536, .D = 512), .name = ""}, TEST_BF16}, {{.op = NULL}, 0}};

const test_op test_op_toy = {
    TEST_OVER_ROWS(toy),
    .kernels = {TEST_ACTIVATIONS, TEST_IN_FP32, TEST_IN_FP32, TEST_IN_FP32, 0},
};
