/* wkv4: test cases, a formula independent of the twin, and rows of the bench. */
#include "formula.h"

#include <stdlib.h>

TEST_TWINS_OVER_TIME(wkv4)

/* ---- arguments ------------------------------------------------------------------------------- */

static const test_field fields[] = {TEST_FIELD(wkv4, decay, 'i'),
                                    TEST_FIELD(wkv4, state_in_shared, 'i'),
                                    TEST_FIELD(wkv4, segments, 's'),
                                    {NULL, 0, 0, 0, 0}};

static const test_bad_value bad_values[] = {
    BAD_SWITCH(wkv4, decay, 2), BAD_RESERVED(wkv4, state_dtype), {NULL, GT_OK, {{0, 0, 0}}}};

/* ---- how inputs are drawn -------------------------------------------------------------------- */

/* Draws states as exp of a normal number: the sum of the weights must be positive, and the mean, a quotient of two
 * states, then has the size of the values. */
static void set_fill(const test_case *c, const gt_tensor *t, test_fill *f, test_map *map) {
    if (!strcmp(t->name, "state_in") || !strcmp(t->name, "state_out")) *map = TEST_EXP, f->spread = 0.5;
    if (strcmp(t->name, "w")) return;
    f->mean = -2;
    if (c->args.wkv4.decay == GT_DECAY_LOG) *map = TEST_NEGATIVE_EXP;
}

/* Mild decays, strong decays, hardly any decay, and resets: about half of the channels forget their state at once. */
static void set_regime(test_case *c, int n) {
    static const test_fill regimes[] = {
        {"w", -2, 1, 0, 0}, {"w", 1, 0.5, 0, 0}, {"w", -8, 1, 0, 0}, {"w", -3, 1, 6, 0.5}};
    c->fill[0] = regimes[n % 4];
}

/* ---- cases ----------------------------------------------------------------------------------- */

#define WKV4(...) .op = "wkv4", .args.wkv4 = {__VA_ARGS__}
#define PACKED(...) .args.wkv4 = {.B = 1, __VA_ARGS__}, .op = "wkv4"
#define LOG .decay = GT_DECAY_LOG

static const test_case cases[] = {
    {WKV4(.B = 1, .T = 1, .D = 1), .name = "one number"},
    {WKV4(.B = 2, .T = 4, .D = 3), .name = "raw decay"},
    {WKV4(.B = 2, .T = 4, .D = 3, LOG), .name = "log decay"},
    {WKV4(.B = 2, .T = 4, .D = 3), .name = "no u, no states", .absent = "u " NO_STATES},
    {WKV4(.B = 2, .T = 4, .D = 3), .name = "zero u and state", .absent = "u state_in"},
    {WKV4(.B = 3, .T = 3, .D = 2, .state_in_shared = 1), .name = "shared state"},
    {WKV4(.B = 3, .T = 3, .D = 2, .state_in_shared = 1), .name = "shared zero state", .absent = "state_in"},
    {WKV4(.B = 2, .T = 4, .D = 3), .name = "final state only", .fill = {{"dy", 0, 0, 0, 0}}},
    {WKV4(.B = 2, .T = 5, .D = 3), .name = "strong decay", .fill = {{"w", 1, 0.5, 0, 0}}},
    {WKV4(.B = 2, .T = 5, .D = 6), .name = "decay to zero", .fill = {{"w", -2, 1, 6, 0.3}}},
    {WKV4(.B = 2, .T = 5, .D = 3), .name = "hardly any decay", .fill = {{"w", -10, 1, 0, 0}}},
    {WKV4(.B = 2, .T = 5, .D = 3), .name = "large bonus", .fill = {{"u", 0, 3, 45, 0.4}}},
    {WKV4(.B = 2, .T = 5, .D = 3), .name = "hardly any bonus", .fill = {{"u", 0, 3, -45, 0.4}}},
    {WKV4(.B = 2, .T = 6, .D = 3), .name = "keys far apart", .fill = {{"k", 0, 8, 0, 0}}},
    {WKV4(.B = 2, .T = 6, .D = 3), .name = "keys without weight", .fill = {{"k", 0, 1, -INFINITY, 0.4}}},
    {WKV4(.B = 2, .T = 4, .D = 3), .name = "equal keys", .fill = {{"k", 7, 0, 0, 0}}},
    {WKV4(.B = 2, .T = 0, .D = 3), .name = "no time"},
    {WKV4(.B = 2, .T = 0, .D = 3, .state_in_shared = 1), .name = "no time, shared state"},
    {WKV4(.B = 0, .T = 3, .D = 3), .name = "no batch"},
    {WKV4(.B = 2, .T = 70, .D = 4), .name = "three chunks", .level = TEST_SMALL},
    {WKV4(.B = 2, .T = 130, .D = 3, LOG, .state_in_shared = 1), .name = "five chunks, shared state",
     .level = TEST_SMALL},
    {WKV4(.B = 6, .T = 16, .D = 5, .slot_capacity = 9), .name = "slots", .level = TEST_SMALL},
    {WKV4(.B = 1, .T = 200, .D = 40), .name = "a key far above those behind it", .level = TEST_MEDIUM,
     .fill = {{"k", 0, 1, 90, 0.01}, {"w", 0, 0.3, 0, 0}}},
    {WKV4(.B = 1, .T = 300, .D = 40, .segments = 3), .name = "keys that fall and rise by hundreds", .level = TEST_SMALL,
     .no_difference = 1, .fill = {{"k", 0, 200, 0, 0}}},
    {WKV4(.B = 1, .T = 100, .D = 70, .segments = 2), .name = "keys of +-60000 and above", .level = TEST_SMALL,
     .no_difference = 1, .rounds_states = 1, .fill = {{"k", 60000, 1, -60000, 0.5}, {"w", -1, 0.5, 0, 0}}},
    {WKV4(.B = 2, .T = 150, .D = 64, .segments = 2), .name = "equal keys of 60000", .level = TEST_MEDIUM,
     .no_difference = 1, .rounds_states = 1, .fill = {{"k", 60000, 0, 0, 0}}},
    {WKV4(.B = 1, .T = 70, .D = 40, .segments = 2), .name = "keys of -1e38", .level = TEST_MEDIUM, .no_difference = 1,
     .rounds_states = 1, .fill = {{"k", 0, 1, -1e38, 0.5}}},
    {WKV4(.B = 2, .T = 65, .D = 64), .name = "64 channels", .level = TEST_MEDIUM},
    {WKV4(.B = 2, .T = 100, .D = 161), .name = "161 channels, slices of 644", .level = TEST_MEDIUM,
     .layout = TEST_SLICES, .row = 644},
    {WKV4(.B = 2, .T = 300, .D = 33), .name = "33 channels, time last", .level = TEST_MEDIUM, .layout = TEST_TIME_LAST},
    {WKV4(.B = 1, .T = 500, .D = 40, .segments = 5), .name = "40 channels, five segments", .level = TEST_MEDIUM},
    {WKV4(.B = 1, .T = 3000, .D = 9), .name = "hardly any decay, long", .level = TEST_MEDIUM,
     .fill = {{"w", -7, 1, 0, 0}}},
    {WKV4(.B = 1, .T = 400, .D = 40, LOG), .name = "states that grow", .level = TEST_MEDIUM,
     .fill = {{"w", 0.05, 0.02, 0, 0}}},
    {WKV4(.B = 2, .T = 1000, .D = 300), .name = "300 channels, long", .level = TEST_LARGE},
    {WKV4(.B = 1, .T = 4099, .D = 64), .name = "64 channels, one long sequence", .level = TEST_LARGE},
    {.op = NULL}};

static const test_case packed[] = {
    {PACKED(.T = 6, .D = 3, .seq_capacity = 3), .name = "three", LENGTHS(3, 1, 2)},
    {PACKED(.T = 5, .D = 2, .seq_capacity = 7, LOG), .name = "empty ones", LENGTHS(0, 2, 0, 0, 1, 2, 0)},
    {PACKED(.T = 6, .D = 3, .seq_capacity = 5), .name = "below the capacities", LENGTHS(2, 0, 2)},
    {PACKED(.T = 4, .D = 2, .seq_capacity = 3), .name = "room for tokens", .absent = "seq_count", LENGTHS(1, 1, 0)},
    {PACKED(.T = 3, .D = 2, .seq_capacity = 2), .name = "none", .packed = {0, NULL}},
    {PACKED(.T = 0, .D = 2, .seq_capacity = 2), .name = "no tokens", LENGTHS(0, 0)},
    {PACKED(.T = 5, .D = 2, .seq_capacity = 4, .state_in_shared = 1), .name = "shared state", LENGTHS(2, 0, 2)},
    {PACKED(.T = 3, .D = 2, .seq_capacity = 2, .state_in_shared = 1), .name = "none, shared state",
     .packed = {0, NULL}},
    {PACKED(.T = 70, .D = 4, .seq_capacity = 4), .name = "around chunks", .level = TEST_SMALL, LENGTHS(33, 1, 0, 32)},
    {PACKED(.T = 90, .D = 3, .seq_capacity = 40), .name = "many", .level = TEST_SMALL, RANDOM_LENGTHS(37)},
    {PACKED(.T = 420, .D = 40, .seq_capacity = 12), .name = "40 channels", .level = TEST_MEDIUM,
     LENGTHS(1, 15, 0, 16, 17, 63, 0, 0, 128, 129)},
    {PACKED(.T = 500, .D = 34, .seq_capacity = 300), .name = "34 channels, hundreds", .level = TEST_MEDIUM,
     .layout = TEST_GAPS, RANDOM_LENGTHS(299)},
    {PACKED(.T = 3000, .D = 64, .seq_capacity = 5), .name = "64 channels, long beside short", .level = TEST_LARGE,
     LENGTHS(1, 2047, 16, 900)},
    {.op = NULL}};

/* Channels that fill blocks of one warp or not.  A row of channels is a multiple of 16 bytes or not. */
static const test_case sizes[] = {{WKV4(.D = 96), .name = "sweep"},
                                  {WKV4(.D = 72, LOG), .name = "sweep"},
                                  {WKV4(.D = 13, .state_in_shared = 1), .name = "sweep"},
                                  {.op = NULL}};

/* Channels that fill blocks or not.  The kernels multiply by exp(bonus) if it is in range, so some bonuses are too
 * large. */
static const test_case steps[] = {{WKV4(.B = 3, .D = 128), .name = "steps"},
                                  {WKV4(.B = 2, .D = 200, LOG), .name = "steps"},
                                  {WKV4(.B = 35, .D = 5), .name = "steps", .absent = "u"},
                                  {WKV4(.B = 2, .D = 70), .name = "steps", .fill = {{"u", 0, 3, 45, 0.5}}},
                                  {WKV4(.B = 2, .D = 70), .name = "steps", .fill = {{"w", 1, 0.5, 0, 0}}},
                                  {.op = NULL}};
static const char *const step_kernels[] = {"wkv4::step_kernel<float>", "wkv4::step_kernel<gt::bf16>",
                                           "wkv4::step_kernel<gt::f16>", NULL};

/* More than 65535 batch elements, and more than 65535 blocks of channels: the largest size of a grid's second
 * dimension. */
static const test_case many[] = {{WKV4(.B = 70000, .T = 2, .D = 2), .name = "many"},
                                 {WKV4(.B = 1, .T = 2, .D = 2200000), .name = "many"},
                                 {.op = NULL}};

/* Sums over many tokens or batch elements.  The means of the terms are not 0, so that the sums grow with their
 * length. */
static const test_case sums[] = {{.op = "wkv4",
                                  .name = "long",
                                  .fill = {{"v", 0.5, 1, 0, 0}, {"dy", 0.5, 1, 0, 0}},
                                  .args.wkv4 = {.B = 1, .T = 500000, .D = 1}},
                                 {.op = "wkv4",
                                  .name = "many",
                                  .fill = {{"dstate_out", 0.5, 1, 0, 0}, {"v", 0.5, 1, 0, 0}, {"dy", 0.5, 1, 0, 0}},
                                  .args.wkv4 = {.B = 300000, .T = 1, .D = 1, .state_in_shared = 1}},
                                 {.op = NULL}};

static void draw(test_random *r, int64_t most, test_case *c) {
    static const char *const absent[] = {"", "u", "state_in", "u " NO_STATES};
    gt_wkv4_args *a = &c->args.wkv4;
    a->D = 1 + test_pick(r, 3 * most);
    a->decay = (gt_decay)test_pick(r, 2);
    a->state_in_shared = (int)test_pick(r, 2);
    c->absent = test_pick_absent(r, absent);
}

/* ---- the formula, written out a second way ---------------------------------------------------- */

static double log_decay(const formula *f, int64_t d) {
    const double w = formula_value(f, "w", d, 0, 0, 0);
    return f->c->args.wkv4.decay == GT_DECAY_LOG ? w : -exp(w);
}

/* The weighted mean of values of a sequence, and the log of the sum of the weights. */
typedef struct weighted {
    double mean, log;
} weighted;

/* Averages the values of the tokens before `last` and of the first state.  own: also averages this token, with its
 * bonus u; -1 = none.  The weights are exp(x + y), where x is a key and y the decay since its token, or the bonus.
 * Subtracts the largest x first: large x of similar size then cancel before y is added. */
static weighted mean_of(const formula *f, formula_sequence q, int64_t last, int64_t d, int64_t own) {
    const double g = log_decay(f, d), u = formula_value(f, "u", d, 0, 0, 0);
    const int64_t count = last - q.first + 2;
    const double a = formula_value(f, "state_in", q.row, 0, d, 0), b = formula_value(f, "state_in", q.row, 1, d, 0);
    double *x = test_array(count, -INFINITY), *y = test_array(count, 0), *v = test_array(count, 0),
           *weight = test_array(count, 1), base = -INFINITY, top = -INFINITY, sum = 0, mean = 0;
    for (int64_t t = q.first; t < last; t++) {
        x[t - q.first] = formula_value(f, "k", q.b, t, d, 0), y[t - q.first] = (double)(last - 1 - t) * g;
        v[t - q.first] = formula_value(f, "v", q.b, t, d, 0);
    }
    if (own >= 0) {
        x[count - 2] = formula_value(f, "k", q.b, own, d, 0), y[count - 2] = u;
        v[count - 2] = formula_value(f, "v", q.b, own, d, 0);
    }
    if (b > 0) {
        x[count - 1] = formula_value(f, "state_in", q.row, 2, d, 0), y[count - 1] = (double)(last - q.first) * g;
        v[count - 1] = a / b, weight[count - 1] = b;
    }
    for (int64_t i = 0; i < count; i++) base = fmax(base, x[i]);
    for (int64_t i = 0; i < count && base > -INFINITY; i++) top = fmax(top, x[i] - base + y[i]);
    for (int64_t i = 0; i < count && base > -INFINITY; i++) sum += weight[i] * exp(x[i] - base + y[i] - top);
    for (int64_t i = 0; i < count && sum > 0; i++) mean += weight[i] * exp(x[i] - base + y[i] - top) / sum * v[i];
    free(x), free(y), free(v), free(weight);
    return (weighted){mean, sum > 0 ? base + top + log(sum) : 0};
}

static double y(const formula *f, int64_t b, int64_t t, int64_t d, int64_t unused) {
    const formula_sequence q = formula_sequence_of_token(f, b, t);
    (void)unused;
    return q.row < 0 ? 0 : mean_of(f, q, t, d, t).mean;
}

static double state_out(const formula *f, int64_t row, int64_t i, int64_t d, int64_t unused) {
    (void)unused;
    if (!formula_has_sequence(f, row)) return 0;
    const formula_sequence q = formula_sequence_of_row(f, row);
    if (q.first == q.last) return formula_value(f, "state_in", row, i, d, 0);
    const weighted all = mean_of(f, q, q.last, d, -1);
    return i == 0 ? all.mean : i == 1 ? all.log != 0 : all.log;
}

static const test_formula formulas[] = {{"y", y}, {"state_out", state_out}, {NULL, NULL}};

/* ---- rows of the bench ----------------------------------------------------------------------- */

#define ROW(types, missing, ...)                                                                                       \
    { {.op = "wkv4", .name = "", .absent = missing, .args.wkv4 = {__VA_ARGS__}}, types }

static const test_bench_row host_rows[] = {ROW(TEST_F32 | TEST_BF16, NO_STATES, .B = 8, .T = 256, .D = 256),
                                           ROW(TEST_F32 | TEST_BF16, "", .B = 8, .T = 1, .D = 256),
                                           {{.op = NULL}, 0}};

static const test_bench_row gpu_rows[] = {ROW(TEST_F32 | TEST_BF16 | TEST_F16, NO_STATES, .B = 64, .T = 256, .D = 256),
                                          ROW(TEST_F32 | TEST_BF16, NO_STATES, .B = 8, .T = 3750, .D = 256),
                                          ROW(TEST_F32 | TEST_BF16, NO_STATES, .B = 8, .T = 4096, .D = 2048),
                                          ROW(TEST_BF16, NO_STATES, .B = 1, .T = 32768, .D = 2048),
                                          ROW(TEST_BF16, "", .B = 1, .T = 1, .D = 4096),
                                          ROW(TEST_BF16, "", .B = 64, .T = 1, .D = 4096),
                                          ROW(TEST_BF16, "", .B = 256, .T = 1, .D = 4096),
                                          TEST_PACKED_ROWS(wkv4, NO_STATES, .D = 256),
                                          {{.op = NULL}, 0}};

/* w = -5 gives the decay exp(-exp(-5)) = 0.9933 */
static const test_bench_draw draws[] = {{"state_in state_out", {1, 1, 0.5}}, {"w", {0, -5, 1}}, {NULL, {0, 0, 0}}};
static const test_bench_cut cuts[] = {{"D", 4}, {NULL, 0}};

/* ---- the operator ---------------------------------------------------------------------------- */

const test_op test_op_wkv4 = {
    TEST_OVER_TIME(wkv4),
    .large = {WKV4(.B = 1, .T = 130, .D = 640, .segments = 1)},
    .set_fill = set_fill,
    .set_regime = set_regime,
    .kernels = {TEST_ACTIVATIONS, TEST_IN_FP32, TEST_IN_FP32, TEST_IN_FP32, 0},
    /* a state that is passed on is scaled to b = 1, which rounds a and p once more */
    .split_tolerance = {[GT_F32] = 1e-6, [GT_BF16] = 0x1p-8, [GT_F16] = 0x1p-8},
    .step_tolerance = {[GT_F32] = 1e-6, [GT_BF16] = 0x1p-8, [GT_F16] = 0x1p-8},
    .steps = steps,
    .step_kernels = step_kernels,
    .bench_draws = draws,
    .bench_cuts = cuts,
};
