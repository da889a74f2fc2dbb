/* conv1d: test cases, a formula independent of the twin, and rows of the bench. */
#include "formula.h"

TEST_TWINS_OVER_TIME(conv1d)

/* ---- arguments ------------------------------------------------------------------------------- */

static const test_field fields[] = {TEST_FIELD(conv1d, activation, 'i'),
                                    TEST_FIELD(conv1d, state_in_shared, 'i'),
                                    TEST_FIELD(conv1d, state_columns, 'c'),
                                    {NULL, 0, 0, 0, 0}};

static const test_bad_value bad_values[] = {BAD(conv1d, W, 'l', 1, GT_ERROR_SIZE, "W = 1"),
                                            BAD(conv1d, W, 'l', 5, GT_ERROR_SIZE, "W = 5"),
                                            BAD_SWITCH(conv1d, activation, 2),
                                            {NULL, GT_OK, {{0, 0, 0}}}};

/* ---- cases ----------------------------------------------------------------------------------- */

#define CONV1D(...) .op = "conv1d", .args.conv1d = {__VA_ARGS__}
#define PACKED(...) .args.conv1d = {.B = 1, __VA_ARGS__}, .op = "conv1d"
#define SILU .activation = GT_ACT_SILU

static const test_case cases[] = {
    {CONV1D(.B = 1, .T = 1, .D = 1, .W = 2), .name = "one number"},
    {CONV1D(.B = 2, .T = 5, .D = 3, .W = 2), .name = "width 2"},
    {CONV1D(.B = 2, .T = 5, .D = 3, .W = 3), .name = "width 3"},
    {CONV1D(.B = 2, .T = 5, .D = 3, .W = 4), .name = "width 4"},
    {CONV1D(.B = 2, .T = 5, .D = 2, .W = 2, .activation = GT_ACT_SILU), .name = "width 2, SiLU"},
    {CONV1D(.B = 2, .T = 6, .D = 2, .W = 3, .activation = GT_ACT_SILU), .name = "width 3, SiLU"},
    {CONV1D(.B = 2, .T = 7, .D = 2, .W = 4, .activation = GT_ACT_SILU), .name = "width 4, SiLU"},
    {CONV1D(.B = 2, .T = 1, .D = 2, .W = 4, .activation = GT_ACT_SILU), .name = "one token"},
    {CONV1D(.B = 2, .T = 2, .D = 2, .W = 4), .name = "two tokens"},
    {CONV1D(.B = 2, .T = 3, .D = 2, .W = 4), .name = "three tokens"},
    {CONV1D(.B = 2, .T = 5, .D = 2, .W = 4), .name = "nothing optional", .absent = "bias " NO_STATES},
    {CONV1D(.B = 2, .T = 5, .D = 2, .W = 4, .activation = GT_ACT_SILU), .name = "zero bias and state",
     .absent = "bias state_in"},
    {CONV1D(.B = 3, .T = 5, .D = 2, .W = 4, .activation = GT_ACT_SILU, .state_in_shared = 1), .name = "shared state"},
    {CONV1D(.B = 3, .T = 1, .D = 2, .W = 4, .state_in_shared = 1), .name = "one token, shared state"},
    {CONV1D(.B = 2, .T = 0, .D = 2, .W = 3), .name = "no time"},
    {CONV1D(.B = 2, .T = 0, .D = 2, .W = 3, .state_in_shared = 1), .name = "no time, shared state"},
    {CONV1D(.B = 0, .T = 3, .D = 2, .W = 3), .name = "no batch"},
    {CONV1D(.B = 2, .T = 70, .D = 5, .W = 4, .activation = GT_ACT_SILU), .name = "70 tokens", .level = TEST_SMALL},
    {CONV1D(.B = 6, .T = 16, .D = 5, .W = 4, .activation = GT_ACT_SILU, .slot_capacity = 9), .name = "slots",
     .level = TEST_SMALL},
    {CONV1D(.B = 4, .T = 2, .D = 5, .W = 4, .slot_capacity = 5), .name = "slots, two tokens", .level = TEST_SMALL},
    {CONV1D(.B = 2, .T = 65, .D = 256, .W = 4, .activation = GT_ACT_SILU), .name = "256 channels",
     .level = TEST_MEDIUM},
    {CONV1D(.B = 2, .T = 129, .D = 161, .W = 4, .activation = GT_ACT_SILU), .name = "161 channels, slices of 644",
     .level = TEST_MEDIUM, .layout = TEST_SLICES, .row = 644},
    {CONV1D(.B = 2, .T = 300, .D = 33, .W = 3), .name = "33 channels, time last", .level = TEST_MEDIUM,
     .layout = TEST_TIME_LAST},
    {CONV1D(.B = 2, .T = 8, .D = 3, .W = 4), .name = "8 tokens, time last", .layout = TEST_TIME_LAST},
    {CONV1D(.B = 3, .T = 40, .D = 5, .W = 3, .activation = GT_ACT_SILU, .state_in_shared = 1),
     .name = "40 tokens, time last", .level = TEST_SMALL, .layout = TEST_TIME_LAST},
    {CONV1D(.B = 2, .T = 1320, .D = 3, .W = 4, .activation = GT_ACT_SILU), .name = "whole rows of 1320, time last",
     .level = TEST_SMALL, .layout = TEST_TIME_LAST},
    {CONV1D(.B = 2, .T = 1032, .D = 110, .W = 4, .activation = GT_ACT_SILU, .state_in_shared = 1),
     .name = "220 whole rows of 1032, time last", .level = TEST_SMALL, .layout = TEST_TIME_LAST},
    {CONV1D(.B = 1, .T = 10240, .D = 2, .W = 2), .name = "whole rows of 10240, time last", .level = TEST_MEDIUM,
     .layout = TEST_TIME_LAST},
    {CONV1D(.B = 2, .T = 1325, .D = 5, .W = 4, .activation = GT_ACT_SILU), .name = "rows of 1325, time last",
     .level = TEST_SMALL, .layout = TEST_TIME_LAST},
    {CONV1D(.B = 3, .T = 1027, .D = 3, .W = 3, .activation = GT_ACT_SILU, .state_in_shared = 1),
     .name = "rows of 1027, time last", .level = TEST_SMALL, .layout = TEST_TIME_LAST},
    {CONV1D(.B = 1, .T = 1025, .D = 9, .W = 4), .name = "rows of 1025, time last", .level = TEST_SMALL,
     .layout = TEST_TIME_LAST},
    {CONV1D(.B = 1, .T = 10241, .D = 3, .W = 2), .name = "rows of 10241, time last", .level = TEST_MEDIUM,
     .layout = TEST_TIME_LAST},
    {CONV1D(.B = 2, .T = 530, .D = 264, .W = 4, .activation = GT_ACT_SILU), .name = "264 channels",
     .level = TEST_MEDIUM},
    {CONV1D(.B = 2, .T = 257, .D = 3, .W = 2, .activation = GT_ACT_SILU), .name = "large inputs", .level = TEST_MEDIUM,
     .layout = TEST_GAPS, .fill = {{"x", 0, 100, 0, 0}}},
    {CONV1D(.B = 2, .T = 4099, .D = 768, .W = 4, .activation = GT_ACT_SILU), .name = "768 channels",
     .level = TEST_LARGE},
    {.op = NULL}};

static const test_case packed[] = {
    {PACKED(.T = 6, .D = 3, .W = 2, .seq_capacity = 3), .name = "three, width 2", LENGTHS(3, 1, 2)},
    {PACKED(.T = 6, .D = 2, .W = 3, .seq_capacity = 3, SILU), .name = "three, width 3", LENGTHS(2, 1, 3)},
    {PACKED(.T = 9, .D = 2, .W = 4, .seq_capacity = 3, SILU), .name = "three, width 4", LENGTHS(4, 2, 3)},
    {PACKED(.T = 5, .D = 1, .W = 3, .seq_capacity = 1), .name = "one", LENGTHS(5)},
    {PACKED(.T = 5, .D = 2, .W = 4, .seq_capacity = 7, SILU), .name = "empty ones", LENGTHS(0, 2, 0, 0, 1, 2, 0)},
    {PACKED(.T = 6, .D = 2, .W = 3, .seq_capacity = 5), .name = "below the capacities", LENGTHS(2, 0, 2)},
    {PACKED(.T = 4, .D = 2, .W = 2, .seq_capacity = 4, SILU), .name = "all in use", .absent = "seq_count",
     LENGTHS(1, 0, 2, 1)},
    {PACKED(.T = 4, .D = 3, .W = 4, .seq_capacity = 3, SILU), .name = "room for tokens", .absent = "seq_count",
     LENGTHS(1, 1, 0)},
    {PACKED(.T = 3, .D = 2, .W = 4, .seq_capacity = 2), .name = "none", .packed = {0, NULL}},
    {PACKED(.T = 0, .D = 2, .W = 3, .seq_capacity = 2), .name = "no tokens", LENGTHS(0, 0)},
    {PACKED(.T = 6, .D = 3, .W = 4, .seq_capacity = 3, SILU), .name = "no bias, no states", .absent = "bias " NO_STATES,
     LENGTHS(1, 4)},
    {PACKED(.T = 6, .D = 2, .W = 3, .seq_capacity = 3), .name = "zero bias and state", .absent = "bias state_in",
     LENGTHS(1, 0, 4)},
    {PACKED(.T = 7, .D = 2, .W = 4, .seq_capacity = 5, SILU, .state_in_shared = 1), .name = "shared state",
     LENGTHS(2, 0, 4, 1)},
    {PACKED(.T = 3, .D = 2, .W = 3, .seq_capacity = 2, .state_in_shared = 1), .name = "none, shared state",
     .packed = {0, NULL}},
    {PACKED(.T = 16, .D = 2, .W = 2, .seq_capacity = 7, SILU), .name = "0 to 5 tokens, width 2", .level = TEST_SMALL,
     LENGTHS(5, 0, 1, 3, 2, 4, 0)},
    {PACKED(.T = 18, .D = 3, .W = 3, .seq_capacity = 8, SILU), .name = "0 to 5 tokens, width 3", .level = TEST_SMALL,
     LENGTHS(0, 4, 2, 1, 0, 3, 5)},
    {PACKED(.T = 15, .D = 2, .W = 4, .seq_capacity = 6, SILU), .name = "0 to 5 tokens, width 4", .level = TEST_SMALL,
     LENGTHS(0, 1, 2, 3, 4, 5)},
    {PACKED(.T = 80, .D = 4, .W = 4, .seq_capacity = 9, SILU, .state_in_shared = 1), .name = "around runs",
     .level = TEST_SMALL, LENGTHS(7, 1, 8, 0, 9, 14, 2, 30)},
    {PACKED(.T = 90, .D = 3, .W = 3, .seq_capacity = 40, SILU), .name = "many", .level = TEST_SMALL,
     RANDOM_LENGTHS(37)},
    {PACKED(.T = 420, .D = 72, .W = 4, .seq_capacity = 12, SILU), .name = "72 channels", .level = TEST_MEDIUM,
     LENGTHS(1, 15, 0, 16, 17, 63, 0, 0, 128, 129)},
    {PACKED(.T = 500, .D = 34, .W = 3, .seq_capacity = 300, SILU), .name = "34 channels, hundreds",
     .level = TEST_MEDIUM, .layout = TEST_GAPS, RANDOM_LENGTHS(299)},
    {PACKED(.T = 400, .D = 161, .W = 4, .seq_capacity = 9, SILU), .name = "161 channels, slices of 644",
     .level = TEST_MEDIUM, .layout = TEST_SLICES, .row = 644, RANDOM_LENGTHS(8)},
    {PACKED(.T = 300, .D = 33, .W = 2, .seq_capacity = 90), .name = "33 channels, time last", .level = TEST_MEDIUM,
     .layout = TEST_TIME_LAST, RANDOM_LENGTHS(80)},
    {PACKED(.T = 1104, .D = 40, .W = 4, .seq_capacity = 9, SILU), .name = "around units, time last",
     .level = TEST_MEDIUM, .layout = TEST_TIME_LAST, LENGTHS(256, 0, 1, 7, 500, 64, 2, 262)},
    {PACKED(.T = 1107, .D = 6, .W = 4, .seq_capacity = 12, SILU), .name = "rows of 1107, time last",
     .level = TEST_SMALL, .layout = TEST_TIME_LAST, LENGTHS(0, 3, 249, 1, 1, 2, 256, 8, 511, 66)},
    {PACKED(.T = 1361, .D = 3, .W = 3, .seq_capacity = 900, SILU, .state_in_shared = 1),
     .name = "hundreds in rows of 1361, time last", .level = TEST_SMALL, .layout = TEST_TIME_LAST, RANDOM_LENGTHS(700)},
    {PACKED(.T = 1056, .D = 5, .W = 2, .seq_capacity = 300), .name = "hundreds in whole rows, time last",
     .level = TEST_SMALL, .layout = TEST_TIME_LAST, RANDOM_LENGTHS(299)},
    {PACKED(.T = 1064, .D = 5, .W = 4, .seq_capacity = 200), .name = "whole rows, no states, time last",
     .level = TEST_SMALL, .layout = TEST_TIME_LAST, .absent = "bias " NO_STATES, RANDOM_LENGTHS(199)},
    {PACKED(.T = 1045, .D = 6, .W = 3, .seq_capacity = 200, SILU), .name = "rows of 1045, no states, time last",
     .level = TEST_SMALL, .layout = TEST_TIME_LAST, .absent = NO_STATES, RANDOM_LENGTHS(199)},
    {PACKED(.T = 2072, .D = 7, .W = 4, .seq_capacity = 9, SILU, .state_in_shared = 1),
     .name = "around pieces, time last", .level = TEST_SMALL, .layout = TEST_TIME_LAST,
     LENGTHS(255, 1, 255, 2, 511, 0, 1023, 3, 22)},
    {PACKED(.T = 1040, .D = 2, .W = 3, .seq_capacity = 6), .name = "whole rows, few tokens in use, time last",
     .level = TEST_SMALL, .layout = TEST_TIME_LAST, LENGTHS(2, 0, 4, 1)},
    {PACKED(.T = 1033, .D = 5, .W = 4, .seq_capacity = 2, SILU), .name = "none in rows of 1033, time last",
     .level = TEST_SMALL, .layout = TEST_TIME_LAST, .packed = {0, NULL}},
    {PACKED(.T = 10240, .D = 3, .W = 4, .seq_capacity = 90, SILU), .name = "no states in rows of 10240, time last",
     .level = TEST_MEDIUM, .layout = TEST_TIME_LAST, .absent = NO_STATES, RANDOM_LENGTHS(80)},
    {PACKED(.T = 10241, .D = 5, .W = 4, .seq_capacity = 90, SILU), .name = "rows of 10241, time last",
     .level = TEST_MEDIUM, .layout = TEST_TIME_LAST, RANDOM_LENGTHS(80)},
    {PACKED(.T = 1104, .D = 136, .W = 4, .seq_capacity = 9, SILU), .name = "around units", .level = TEST_MEDIUM,
     LENGTHS(256, 0, 1, 7, 500, 64, 2, 262)},
    {PACKED(.T = 2000, .D = 5, .W = 4, .seq_capacity = 1500, SILU, .state_in_shared = 1),
     .name = "thousands, shared state", .level = TEST_MEDIUM, RANDOM_LENGTHS(1400)},
    {PACKED(.T = 3000, .D = 768, .W = 4, .seq_capacity = 5, SILU), .name = "768, long beside short",
     .level = TEST_LARGE, LENGTHS(1, 2047, 16, 900)},
    {.op = NULL}};

/* Sizes for which the operator has specialised kernels, and sizes for general kernels. */
static const test_case sizes[] = {{CONV1D(.D = 256, .W = 4, .activation = GT_ACT_SILU), .name = "sweep"},
                                  {CONV1D(.D = 64, .W = 3, .state_in_shared = 1), .name = "sweep"},
                                  {CONV1D(.D = 161, .W = 4, .activation = GT_ACT_SILU), .name = "sweep"},
                                  {CONV1D(.D = 8, .W = 2), .name = "sweep"},
                                  {.op = NULL}};

/* Sizes for the step kernels: channels divisible by four or not, full and partial warps of 128 channels, full and
 * partial blocks of 8 batch elements. */
#define STEPS(...)                                                                                                     \
    { CONV1D(__VA_ARGS__, .activation = GT_ACT_SILU), .name = "steps" }
static const test_case steps[] = {STEPS(.B = 9, .D = 132, .W = 4),
                                  STEPS(.B = 3, .D = 132, .W = 3),
                                  STEPS(.B = 2, .D = 132, .W = 2),
                                  STEPS(.B = 17, .D = 4, .W = 2),
                                  STEPS(.B = 8, .D = 128, .W = 4),
                                  STEPS(.B = 7, .D = 260, .W = 3),
                                  {CONV1D(.B = 5, .D = 36, .W = 3), .name = "steps", .absent = "bias"},
                                  {CONV1D(.B = 5, .D = 20, .W = 2), .name = "steps"},
                                  {CONV1D(.B = 1, .D = 64, .W = 4), .name = "steps", .absent = "bias"},
                                  STEPS(.B = 3, .D = 5, .W = 4),
                                  STEPS(.B = 3, .D = 131, .W = 3),
                                  STEPS(.B = 3, .D = 1, .W = 2),
                                  STEPS(.B = 4, .D = 36, .W = 4, .state_columns = 4),
                                  STEPS(.B = 3, .D = 7, .W = 3, .state_columns = 9),
                                  STEPS(.B = 2, .D = 5, .W = 2, .state_columns = 20),
                                  {.op = NULL}};

#define STEP_KERNELS(type, width)                                                                                      \
    "conv1d::step_rows_kernel<" type ", " width ", 1>", "conv1d::step_rows_kernel<" type ", " width ", 4>",            \
        "conv1d::step_kernel<" type ", " width ">"
#define FOURS_KERNELS(type) "conv1d::step_fours_kernel<" type ", 1>", "conv1d::step_fours_kernel<" type ", 4>"
static const char *const step_kernels[] = {STEP_KERNELS("float", "2"),
                                           STEP_KERNELS("float", "3"),
                                           STEP_KERNELS("float", "4"),
                                           STEP_KERNELS("gt::bf16", "2"),
                                           STEP_KERNELS("gt::bf16", "3"),
                                           STEP_KERNELS("gt::bf16", "4"),
                                           STEP_KERNELS("gt::f16", "2"),
                                           STEP_KERNELS("gt::f16", "3"),
                                           STEP_KERNELS("gt::f16", "4"),
                                           FOURS_KERNELS("float"),
                                           FOURS_KERNELS("gt::bf16"),
                                           FOURS_KERNELS("gt::f16"),
                                           NULL};

/* More than 65535 items along one axis of a grid. */
static const test_case many[] = {{CONV1D(.B = 70000, .T = 3, .D = 2, .W = 4), .name = "many"},
                                 {CONV1D(.B = 1, .T = 3, .D = 140000, .W = 4), .name = "many"},
                                 {CONV1D(.B = 1, .T = 140000, .D = 2, .W = 4), .name = "many"},
                                 {.op = NULL}};

/* Sums over many tokens or batch elements.  The means of the terms are not 0, so that the sums grow with their
 * length. */
static const test_case sums[] = {{.op = "conv1d",
                                  .name = "long",
                                  .fill = {{"x", 0.5, 1, 0, 0}, {"dy", 0.5, 1, 0, 0}, {"dstate_out", 0.5, 1, 0, 0}},
                                  .args.conv1d = {.B = 1, .T = 500000, .D = 2, .W = 4}},
                                 {.op = "conv1d",
                                  .name = "many",
                                  .fill = {{"x", 0.5, 1, 0, 0}, {"dy", 0.5, 1, 0, 0}, {"dstate_out", 0.5, 1, 0, 0}},
                                  .args.conv1d = {.B = 300000, .T = 1, .D = 1, .W = 4, .state_in_shared = 1}},
                                 {.op = NULL}};

static void draw(test_random *r, int64_t most, test_case *c) {
    static const char *const absent[] = {"", "bias", "state_in", NO_STATES};
    gt_conv1d_args *a = &c->args.conv1d;
    a->D = 1 + test_pick(r, 2 * most);
    a->W = 2 + test_pick(r, 3);
    a->activation = (gt_activation)test_pick(r, 2);
    a->state_in_shared = (int)test_pick(r, 2);
    c->absent = test_pick_absent(r, absent);
}

/* ---- the formula, written out a second way ---------------------------------------------------- */

/* Input i of a sequence.  Inputs 0 ... W-2 lie before the first token and come from the state, oldest first. */
static double input(const formula *f, formula_sequence q, int64_t i, int64_t d) {
    const int64_t before = f->c->args.conv1d.W - 1;
    return i < before ? formula_value(f, "state_in", q.row, d, i, 0)
                      : formula_value(f, "x", q.b, q.first + i - before, d, 0);
}

static double y(const formula *f, int64_t b, int64_t t, int64_t d, int64_t unused) {
    const formula_sequence q = formula_sequence_of_token(f, b, t);
    double sum = formula_value(f, "bias", d, 0, 0, 0);
    (void)unused;
    if (q.row < 0) return 0;
    for (int64_t j = 0; j < f->c->args.conv1d.W; j++)
        sum += formula_value(f, "weight", d, j, 0, 0) * input(f, q, t - q.first + j, d);
    return f->c->args.conv1d.activation == GT_ACT_SILU ? formula_silu(sum) : sum;
}

static double state_out(const formula *f, int64_t row, int64_t d, int64_t j, int64_t unused) {
    (void)unused;
    if (!formula_has_sequence(f, row)) return 0;
    const formula_sequence q = formula_sequence_of_row(f, row);
    return input(f, q, q.last - q.first + j, d);
}

static const test_formula formulas[] = {{"y", y}, {"state_out", state_out}, {NULL, NULL}};

/* ---- rows of the bench ----------------------------------------------------------------------- */

#define ROW(types, label, missing, ...)                                                                                \
    {                                                                                                                  \
        {.op = "conv1d",                                                                                               \
         .name = label,                                                                                                \
         .absent = missing,                                                                                            \
         .args.conv1d = {.W = 4, .activation = GT_ACT_SILU, __VA_ARGS__}},                                             \
            types                                                                                                      \
    }
#define BDT(field, T) .field##_stride = {.t = 1, .h = T}
#define ROW_BOTH(types, b, t, d)                                                                                       \
    ROW(types, "silu BTD", NO_STATES, .B = b, .T = t, .D = d),                                                         \
        ROW(types, "silu BDT", NO_STATES, .B = b, .T = t, .D = d, BDT(x, t), BDT(y, t), BDT(dx, t), BDT(dy, t))

/* Packed sequences of equal length, 32,768 tokens in all, in both layouts (BTD and BDT). */
#define SIXTY_FOUR(x) TEST_EIGHT(TEST_EIGHT(x))
static const int64_t lengths_256[] = {SIXTY_FOUR(256), SIXTY_FOUR(256)};
static const int64_t lengths_1000[] = {TEST_EIGHT(1000), TEST_EIGHT(1000), TEST_EIGHT(1000), TEST_EIGHT(1000), 768};
static const int64_t lengths_77[] = {SIXTY_FOUR(77),
                                     SIXTY_FOUR(77),
                                     SIXTY_FOUR(77),
                                     SIXTY_FOUR(77),
                                     SIXTY_FOUR(77),
                                     SIXTY_FOUR(77),
                                     TEST_EIGHT(77),
                                     TEST_EIGHT(77),
                                     TEST_EIGHT(77),
                                     TEST_EIGHT(77),
                                     TEST_EIGHT(77),
                                     77,
                                     43};
#define ROW_PACKED(length, layout, ...)                                                                                \
    {                                                                                                                  \
        {.op = "conv1d",                                                                                               \
         .name = "silu packed " #length " " layout,                                                                    \
         .absent = NO_STATES,                                                                                          \
         .packed = {(int64_t)(sizeof lengths_##length / sizeof *lengths_##length), lengths_##length},                  \
         .args.conv1d = {.B = 1, .T = 32768, .D = 4352, .activation = GT_ACT_SILU, .seq_capacity = 512, __VA_ARGS__}}, \
            TEST_BF16                                                                                                  \
    }
#define ROW_PACKED_BOTH(length)                                                                                        \
    ROW_PACKED(length, "BTD", .W = 4),                                                                                 \
        ROW_PACKED(length, "BDT", .W = 4, BDT(x, 32768), BDT(y, 32768), BDT(dx, 32768), BDT(dy, 32768))

static const test_bench_row host_rows[] = {ROW_BOTH(TEST_F32 | TEST_BF16, 8, 256, 640),
                                           ROW(TEST_F32 | TEST_BF16, "silu", "", .B = 8, .T = 1, .D = 640),
                                           {{.op = NULL}, 0}};

/* The dtypes and the state size with which a bf16 model calls causal_conv1d_update. */
#define SMALL_STATE .state_columns = 4, .state_dtype = GT_BF16, .weight_dtype = GT_BF16

static const test_bench_row gpu_rows[] = {
    ROW_BOTH(TEST_F32 | TEST_BF16, 64, 256, 640),
    ROW_BOTH(TEST_BF16, 8, 2048, 4352),
    ROW_BOTH(TEST_BF16, 8, 4096, 4352),
    ROW_BOTH(TEST_BF16, 1, 32768, 4352),
    ROW_BOTH(TEST_BF16, 8, 3750, 640),
    ROW(TEST_F32 | TEST_BF16, "silu", "", .B = 8, .T = 1, .D = 640),
    ROW(TEST_BF16, "silu", "", .B = 1, .T = 1, .D = 10240),
    ROW(TEST_BF16, "silu", "", .B = 64, .T = 1, .D = 10240),
    ROW(TEST_BF16, "silu", "", .B = 256, .T = 1, .D = 10240),
    ROW(TEST_BF16, "silu", "", .B = 64, .T = 4, .D = 10240),
    ROW(TEST_BF16, "silu small", "", .B = 1, .T = 1, .D = 10240, SMALL_STATE),
    ROW(TEST_BF16, "silu small", "", .B = 64, .T = 1, .D = 10240, SMALL_STATE),
    ROW(TEST_BF16, "silu small", "", .B = 256, .T = 1, .D = 10240, SMALL_STATE),
    TEST_PACKED_ROWS(conv1d, NO_STATES, .D = 640, .W = 4, .activation = GT_ACT_SILU),
    ROW_PACKED_BOTH(256),
    ROW_PACKED_BOTH(1000),
    ROW_PACKED_BOTH(77),
    {{.op = NULL}, 0}};

static const test_bench_cut cuts[] = {{"D", 4}, {NULL, 0}};

/* ---- the operator ---------------------------------------------------------------------------- */

const test_op test_op_conv1d = {
    TEST_OVER_TIME(conv1d),
    .large = {CONV1D(.B = 1, .T = 300, .D = 256, .W = 4, .activation = GT_ACT_SILU)},
    .kernels = {TEST_ACTIVATIONS, TEST_IN_FP32, TEST_IN_FP32, TEST_IN_FP32, 0},
    /* A gradient near the cut is a sum with terms from both parts.  Two calls add the second part's terms last, through
     * the gradient of the state; one call adds the terms in the order of the tokens.  So the sums round differently. */
    .split_tolerance = {[GT_F32] = 1e-6, [GT_BF16] = 0x1p-8, [GT_F16] = 0x1p-8},
    .has_exact_prefill = 1,
    .steps = steps,
    .step_kernels = step_kernels,
    .bench_cuts = cuts,
};
