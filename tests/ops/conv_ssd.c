/* conv_ssd: test cases, a formula independent of the twin, and rows of the bench.  c is the output of the convolution,
 * which ssd reads as x, Bm and Cm; dc is the gradient of c. */
#include "formula.h"

#include <stdlib.h>

TEST_TWINS_OVER_TIME(conv_ssd)

/* ---- arguments ------------------------------------------------------------------------------- */

static const test_field fields[] = {TEST_DIVISOR(conv_ssd, G, 'H'),
                                    TEST_FIELD(conv_ssd, softplus, 'i'),
                                    TEST_FIELD(conv_ssd, dt_limit, 'i'),
                                    TEST_FLOAT(conv_ssd, dt_min, 0.2),
                                    TEST_FLOAT(conv_ssd, dt_max, 0.6),
                                    TEST_FIELD(conv_ssd, Dskip_per_channel, 'i'),
                                    TEST_FIELD(conv_ssd, state_in_shared, 'i'),
                                    TEST_FIELD(conv_ssd, reads_y, 'i'),
                                    TEST_FIELD(conv_ssd, segments, 's'),
                                    {NULL, 0, 0, 0, 0}};

#define BAD_LIMITS(text, min, max)                                                                                     \
    {                                                                                                                  \
        text, GT_ERROR_VALUE, {                                                                                        \
            {AT(conv_ssd, dt_limit), 'i', 1}, {AT(conv_ssd, dt_min), 'f', min}, { AT(conv_ssd, dt_max), 'f', max }     \
        }                                                                                                              \
    }
static const test_bad_value bad_values[] = {BAD_SIZE(conv_ssd, G),
                                            BAD_DIVISOR(conv_ssd, G, 3),
                                            BAD(conv_ssd, W, 'l', 1, GT_ERROR_SIZE, "W = 1"),
                                            BAD(conv_ssd, W, 'l', 5, GT_ERROR_SIZE, "W = 5"),
                                            BAD_SWITCH(conv_ssd, softplus, 2),
                                            BAD_SWITCH(conv_ssd, dt_limit, 2),
                                            BAD_SWITCH(conv_ssd, Dskip_per_channel, 2),
                                            BAD_SWITCH(conv_ssd, reads_y, 2),
                                            BAD_LIMITS("dt_min = 2", 2, 1),
                                            BAD_LIMITS("dt_min is NaN", NAN, 1),
                                            BAD_LIMITS("dt_max is NaN", 0, NAN),
                                            {NULL, GT_OK, {{0, 0, 0}}}};

/* ---- how inputs are drawn -------------------------------------------------------------------- */

static void set_fill(const test_case *c, const gt_tensor *t, test_fill *f, test_map *map) {
    test_fill_ssm(c->args.conv_ssd.softplus, t, f, map);
    if (!strcmp(t->name, "weight")) f->spread = 0.4; /* the convolution's output stays in the range of xBC */
    if (!strcmp(t->name, "bias")) f->spread = 0.3;
}

/* Whether c = silu(sum) rounds to the same 16-bit number, in whichever order fp32 adds the terms of the sum.  size: the
 * sum of the terms' magnitudes.  Also 1 if fp32's error is a quarter of the last bit of c or more, because other inputs
 * would hardly help. */
static int is_sure(double sum, double size, gt_dtype dtype) {
    const double gate = 1 / (1 + exp(-sum)), c = sum * gate, slope = gate * (1 + sum * (1 - gate));
    const double loss = 0x1p-21 * (fabs(slope) * size + (1 + fabs(sum)) * fabs(c));
    const double unit = fabs(c) * (dtype == GT_BF16 ? 0x1p-8 : 0x1p-11);
    return !(unit > 4 * loss) || test_round(c - loss, dtype) == test_round(c + loss, dtype);
}

/* Settles the inputs of channel d, tokens first ... end-1.  state: the inputs before token `first`; NULL: they are
 * 0. */
static void settle_channel(const test_case *c, test_values *in, const double *state, int64_t first, int64_t end,
                           int64_t d, int64_t D) {
    const gt_conv_ssd_args *a = &c->args.conv_ssd;
    const double *w = *test_array_of(in, c, "weight") + d * a->W, *bias = *test_array_of(in, c, "bias");
    double *x = *test_array_of(in, c, "xBC") + d;
    for (int64_t t = first; t < end; t++) {
        const double drawn = x[t * D];
        double sum = bias ? bias[d] : 0, size = fabs(sum);
        for (int64_t j = 0; j < a->W - 1; j++) {
            const int64_t from = t - (a->W - 1) + j;
            const double e = from >= first ? x[from * D] : state ? state[from - first + a->W - 1] : 0;
            sum += w[j] * e, size += fabs(w[j] * e);
        }
        for (int k = 0; k < 16; k++) {
            x[t * D] = test_round(drawn + k * (drawn == 0 ? 1 : fabs(drawn)) * 0x1p-7, a->dtype);
            const double last = w[a->W - 1] * x[t * D];
            if (is_sure(sum + last, size + fabs(last), a->dtype)) break;
        }
    }
}

/* c is an fp32 sum that is rounded to 16 bits.  If the sum lies between two 16-bit numbers, kernels and twin may round
 * it differently, and both are right.  But where a result of ssd sums few numbers, these two numbers may give very
 * different results. So this function changes an input with an unsure c to the next number whose c rounds the same in
 * any order.  Then the tolerances need no room for such cases. */
static void settle(const test_case *c, test_values *in) {
    const gt_conv_ssd_args *a = &c->args.conv_ssd;
    const int64_t D = a->H * a->P + 2 * (a->G ? a->G : 1) * a->N, J = a->W - 1;
    const double *pool = *test_array_of(in, c, "conv_state_out"),
                 *slots = *test_array_of(in, c, "slots"); /* only a step has slots */
    const double *states = pool ? pool : *test_array_of(in, c, "conv_state_in");
    if ((a->dtype != GT_BF16 && a->dtype != GT_F16) || !*test_array_of(in, c, "xBC")) return;
    const int64_t count = test_is_packed(c) ? test_sequences(c, in) : a->B;
    for (int64_t s = 0; s < count; s++) {
        const int64_t first = test_is_packed(c) ? test_sequence_at(c, in, s) : s * a->T;
        const int64_t end = test_is_packed(c) ? test_sequence_at(c, in, s + 1) : first + a->T;
        const int64_t row = a->state_in_shared ? 0 : slots ? (int64_t)slots[s] : s;
        if (slots && (row < 0 || row >= a->slot_capacity)) continue;
        const double *state = states ? states + row * D * J : NULL;
        for (int64_t d = 0; d < D; d++) settle_channel(c, in, state ? state + d * J : NULL, first, end, d, D);
    }
}

/* ---- cases ----------------------------------------------------------------------------------- */

#define CONV_SSD(...) .op = "conv_ssd", .args.conv_ssd = {__VA_ARGS__}
#define PACKED(...) .args.conv_ssd = {.B = 1, __VA_ARGS__}, .op = "conv_ssd"
#define LIMITS .dt_limit = 1, .dt_min = 0.1875f, .dt_max = 0.375f
#undef NO_STATES
#define NO_STATES "state_in state_out dstate_in dstate_out conv_state_in conv_state_out conv_dstate_in conv_dstate_out"

static const test_case cases[] = {
    {CONV_SSD(.B = 1, .T = 1, .H = 1, .P = 1, .N = 1, .W = 2), .name = "one number"},
    {CONV_SSD(.B = 2, .T = 5, .H = 2, .P = 2, .N = 3, .W = 4, .softplus = 1), .name = "softplus"},
    {CONV_SSD(.B = 2, .T = 4, .H = 2, .P = 3, .N = 2, .W = 3), .name = "no softplus"},
    {CONV_SSD(.B = 2, .T = 4, .H = 4, .P = 1, .N = 2, .W = 2, .G = 2, .softplus = 1), .name = "two groups"},
    {CONV_SSD(.B = 2, .T = 2, .H = 3, .P = 2, .N = 1, .W = 4, .G = 3), .name = "a group per head"},
    {CONV_SSD(.B = 2, .T = 4, .H = 4, .P = 1, .N = 2, .W = 2, LIMITS), .name = "limits",
     .fill = {{"dt", -1.4, 0.05, 0.02, 0.4}, {"dt_bias", -5, 0.1, 0.5, 0.4}}},
    {CONV_SSD(.B = 2, .T = 3, .H = 2, .P = 3, .N = 2, .W = 3, .softplus = 1, .Dskip_per_channel = 1),
     .name = "skip per channel"},
    {CONV_SSD(.B = 2, .T = 4, .H = 2, .P = 2, .N = 2, .W = 4, .softplus = 1), .name = "no gate", .absent = "z dz"},
    {CONV_SSD(.B = 2, .T = 4, .H = 2, .P = 2, .N = 2, .W = 3), .name = "nothing optional",
     .absent = "z dz bias dbias Dskip dt_bias " NO_STATES},
    {CONV_SSD(.B = 2, .T = 4, .H = 2, .P = 2, .N = 2, .W = 4), .name = "only the parameters of ssd",
     .absent = "dxBC dweight dbias conv_dstate_in"},
    {CONV_SSD(.B = 2, .T = 4, .H = 2, .P = 2, .N = 2, .W = 4), .name = "one state of two",
     .absent = "conv_state_in state_out conv_dstate_in dstate_out"},
    {CONV_SSD(.B = 3, .T = 2, .H = 2, .P = 2, .N = 2, .W = 4, .softplus = 1, .state_in_shared = 1),
     .name = "shared states"},
    {CONV_SSD(.B = 2, .T = 3, .H = 2, .P = 2, .N = 2, .W = 3), .name = "final states only",
     .fill = {{"dy", 0, 0, 0, 0}}},
    {CONV_SSD(.B = 2, .T = 4, .H = 4, .P = 2, .N = 2, .W = 2), .name = "decay to zero",
     .fill = {{"A", 0, 0.5, -10000, 0.5}}},
    {CONV_SSD(.B = 1, .T = 5, .H = 2, .P = 8, .N = 16, .W = 4, .softplus = 1), .name = "8 by 16"},
    {CONV_SSD(.B = 1, .T = 4, .H = 2, .P = 8, .N = 16, .W = 3, .softplus = 1), .name = "8 by 16, no gate",
     .absent = "z dz"},
    {CONV_SSD(.B = 2, .T = 0, .H = 2, .P = 2, .N = 3, .W = 4), .name = "no time"},
    {CONV_SSD(.B = 2, .T = 0, .H = 2, .P = 2, .N = 3, .W = 3, .state_in_shared = 1), .name = "no time, shared states"},
    {CONV_SSD(.B = 0, .T = 3, .H = 2, .P = 2, .N = 3, .W = 2), .name = "no batch"},
    {CONV_SSD(.B = 2, .T = 70, .H = 4, .P = 2, .N = 3, .W = 4, .G = 2, .softplus = 1), .name = "two chunks",
     .level = TEST_SMALL},
    {CONV_SSD(.B = 2, .T = 130, .H = 2, .P = 2, .N = 2, .W = 4, .softplus = 1, .Dskip_per_channel = 1,
              .state_in_shared = 1),
     .name = "three chunks, shared states", .level = TEST_SMALL, .absent = "z dz"},
    {CONV_SSD(.B = 2, .T = 65, .H = 2, .P = 64, .N = 64, .W = 4, .softplus = 1), .name = "64 by 64",
     .level = TEST_MEDIUM},
    {CONV_SSD(.B = 1, .T = 70, .H = 2, .P = 64, .N = 128, .W = 4, .softplus = 1, .Dskip_per_channel = 1),
     .name = "64 by 128, slices of 1290", .level = TEST_MEDIUM, .layout = TEST_SLICES, .row = 1290},
    {CONV_SSD(.B = 1, .T = 150, .H = 4, .P = 128, .N = 96, .W = 3, .G = 2, .softplus = 1),
     .name = "128 by 96, slices of 1296", .level = TEST_MEDIUM, .layout = TEST_SLICES, .row = 1296},
    {CONV_SSD(.B = 1, .T = 100, .H = 3, .P = 80, .N = 16, .W = 3, .G = 3, .softplus = 1), .name = "80 by 16",
     .level = TEST_MEDIUM, .layout = TEST_GAPS},
    {CONV_SSD(.B = 2, .T = 60, .H = 2, .P = 8, .N = 16, .W = 4, .softplus = 1), .name = "8 by 16, time last",
     .level = TEST_MEDIUM, .layout = TEST_TIME_LAST},
    {CONV_SSD(.B = 1, .T = 300, .H = 2, .P = 16, .N = 16, .W = 4), .name = "fast beside slow", .level = TEST_MEDIUM,
     .fill = {{"dt", -8, 0.5, 8, 0.05}}},
    {CONV_SSD(.B = 1, .T = 150, .H = 2, .P = 16, .N = 16, .W = 4, .softplus = 1), .name = "closed convolutions",
     .level = TEST_MEDIUM, .absent = "state_in dstate_in", .fill = {{"bias", 0, 0.3, -1e4, 0.2}}},
    /* a nearly closed channel only has the rest of its first state; with few tokens, kernels round that state just
     * once */
    {CONV_SSD(.B = 1, .T = 30, .H = 2, .P = 16, .N = 16, .W = 4, .softplus = 1), .name = "closed and open convolutions",
     .level = TEST_MEDIUM, .fill = {{"bias", 0, 10, -1e4, 0.2}}},
    {CONV_SSD(.B = 2, .T = 1000, .H = 4, .P = 64, .N = 128, .W = 4, .softplus = 1), .name = "64 by 128, long",
     .level = TEST_LARGE},
    {CONV_SSD(.B = 1, .T = 4099, .H = 2, .P = 64, .N = 64, .W = 4, .softplus = 1),
     .name = "64 by 64, one long sequence", .level = TEST_LARGE},
    {.op = NULL}};

static const test_case packed[] = {
    {PACKED(.T = 6, .H = 2, .P = 2, .N = 2, .W = 4, .seq_capacity = 3), .name = "three", LENGTHS(3, 1, 2)},
    {PACKED(.T = 5, .H = 4, .P = 1, .N = 2, .W = 3, .G = 2, .seq_capacity = 7, .softplus = 1), .name = "empty ones",
     LENGTHS(0, 2, 0, 0, 1, 2, 0)},
    {PACKED(.T = 6, .H = 2, .P = 2, .N = 2, .W = 4, .seq_capacity = 5, .Dskip_per_channel = 1),
     .name = "below the capacities", LENGTHS(2, 0, 2)},
    {PACKED(.T = 4, .H = 2, .P = 2, .N = 2, .W = 2, .seq_capacity = 4, .softplus = 1, LIMITS), .name = "all in use",
     .absent = "seq_count", LENGTHS(1, 0, 2, 1)},
    {PACKED(.T = 5, .H = 1, .P = 8, .N = 16, .W = 4, .seq_capacity = 3, .softplus = 1), .name = "8 by 16",
     LENGTHS(1, 3)},
    {PACKED(.T = 3, .H = 2, .P = 2, .N = 2, .W = 4, .seq_capacity = 2), .name = "none", .packed = {0, NULL}},
    {PACKED(.T = 0, .H = 2, .P = 2, .N = 2, .W = 3, .seq_capacity = 2), .name = "no tokens", LENGTHS(0, 0)},
    {PACKED(.T = 5, .H = 1, .P = 2, .N = 3, .W = 4, .seq_capacity = 3, .softplus = 1), .name = "no states",
     .absent = "Dskip bias " NO_STATES, LENGTHS(2, 3)},
    {PACKED(.T = 5, .H = 2, .P = 2, .N = 2, .W = 4, .seq_capacity = 4, .state_in_shared = 1), .name = "shared states",
     LENGTHS(2, 0, 2)},
    {PACKED(.T = 205, .H = 2, .P = 2, .N = 3, .W = 4, .seq_capacity = 6, .softplus = 1), .name = "around chunks",
     .level = TEST_SMALL, LENGTHS(63, 1, 64, 0, 65)},
    {PACKED(.T = 90, .H = 2, .P = 2, .N = 2, .W = 4, .seq_capacity = 40, .softplus = 1), .name = "many",
     .level = TEST_SMALL, RANDOM_LENGTHS(37)},
    {PACKED(.T = 420, .H = 2, .P = 64, .N = 32, .W = 4, .seq_capacity = 12, .softplus = 1), .name = "64 by 32",
     .level = TEST_MEDIUM, LENGTHS(1, 15, 0, 16, 17, 63, 0, 0, 128, 129)},
    {PACKED(.T = 420, .H = 8, .P = 64, .N = 128, .W = 3, .seq_capacity = 4, .softplus = 1), .name = "64 by 128",
     .level = TEST_MEDIUM, LENGTHS(2, 130, 64, 200)},
    {PACKED(.T = 3000, .H = 1, .P = 64, .N = 128, .W = 4, .seq_capacity = 5, .softplus = 1),
     .name = "128, long beside short", .level = TEST_LARGE, LENGTHS(1, 2047, 16, 900)},
    {.op = NULL}};

/* Sizes for which the operator has specialised kernels, and sizes for general kernels.  With --few, test_kernels.c runs
 * the second size in bf16 and packed rows, so that it launches conv_ssd::forward_kernel. */
static const test_case sizes[] = {
    {CONV_SSD(.H = 2, .P = 64, .N = 128, .W = 4, .G = 2, .softplus = 1, .Dskip_per_channel = 1), .name = "sweep"},
    {CONV_SSD(.H = 4, .P = 64, .N = 64, .W = 4, .softplus = 1), .name = "sweep"},
    {CONV_SSD(.H = 4, .P = 32, .N = 32, .W = 2, .G = 2, .softplus = 1, .state_in_shared = 1), .name = "sweep"},
    {CONV_SSD(.H = 3, .P = 20, .N = 36, .W = 3, .softplus = 1), .name = "sweep"},
    {CONV_SSD(.H = 1, .P = 64, .N = 256, .W = 4, .softplus = 1), .name = "sweep", .absent = "z dz"},
    {CONV_SSD(.H = 2, .P = 64, .N = 256, .W = 4, .softplus = 1), .name = "sweep"},
    {CONV_SSD(.H = 5, .P = 64, .N = 128, .W = 4, .softplus = 1), .name = "sweep", .absent = "z dz"},
    {CONV_SSD(.H = 8, .P = 72, .N = 64, .W = 3, .G = 2, .softplus = 1), .name = "sweep", .absent = "z dz"},
    {CONV_SSD(.H = 2, .P = 64, .N = 112, .W = 4, .softplus = 1), .name = "sweep", .absent = "z dz"},
    {.op = NULL}};

/* Sizes for the step kernels, as in ssd.c: both sides of every limit of columns, rows that fill warps and blocks or
 * not, and widths 2 to 4.  Some threads have several tokens, some several channels, and some no channel to convolve. */
static const test_case steps[] = {
    {CONV_SSD(.B = 4, .H = 2, .P = 8, .N = 4, .W = 4, .softplus = 1), .name = "steps"},
    {CONV_SSD(.B = 2, .H = 3, .P = 5, .N = 1, .W = 2), .name = "steps", .absent = "bias"},
    {CONV_SSD(.B = 3, .H = 4, .P = 68, .N = 16, .W = 4, .G = 2, .softplus = 1, .Dskip_per_channel = 1),
     .name = "steps"},
    {CONV_SSD(.B = 3, .H = 2, .P = 7, .N = 15, .W = 3, .softplus = 1), .name = "steps"},
    {CONV_SSD(.B = 3, .H = 2, .P = 36, .N = 20, .W = 4, .softplus = 1, LIMITS), .name = "steps"},
    {CONV_SSD(.B = 2, .H = 2, .P = 33, .N = 31, .W = 4, .G = 2), .name = "steps", .absent = "z"},
    {CONV_SSD(.B = 3, .H = 4, .P = 24, .N = 64, .W = 4, .G = 2, .softplus = 1), .name = "steps"},
    {CONV_SSD(.B = 2, .H = 2, .P = 17, .N = 50, .W = 2, .softplus = 1), .name = "steps",
     .absent = "Dskip dt_bias bias"},
    {CONV_SSD(.B = 3, .H = 2, .P = 80, .N = 128, .W = 4, .softplus = 1), .name = "steps"},
    {CONV_SSD(.B = 3, .H = 6, .P = 32, .N = 128, .W = 4, .G = 3, .softplus = 1, .Dskip_per_channel = 1),
     .name = "steps", .absent = "z"},
    {CONV_SSD(.B = 2, .H = 1, .P = 9, .N = 127, .W = 3, .softplus = 1), .name = "steps"},
    {CONV_SSD(.B = 2, .H = 2, .P = 64, .N = 256, .W = 4, .G = 2, .softplus = 1), .name = "steps"},
    {CONV_SSD(.B = 2, .H = 2, .P = 4, .N = 132, .W = 4, .softplus = 1), .name = "steps"},
    {CONV_SSD(.B = 2, .H = 1, .P = 6, .N = 250, .W = 4, .softplus = 1), .name = "steps"},
    {.op = NULL}};

#define STEP_KERNELS(type)                                                                                             \
    "conv_ssd::step_kernel<" type ", 4, 1, 8>", "conv_ssd::step_kernel<" type ", 8, 1, 8>",                            \
        "conv_ssd::step_kernel<" type ", 16, 1, 8>", "conv_ssd::step_kernel<" type ", 16, 2, 4>",                      \
        "conv_ssd::step_kernel<" type ", 32, 2, 4>", "conv_ssd::columns_kernel<" type ">"
#define WIDE_STEP_KERNELS(type) "conv_ssd::step_kernel<" type ", 16, 2, 8>", "conv_ssd::step_kernel<" type ", 32, 2, 8>"
static const char *const step_kernels[] = {STEP_KERNELS("float"),        STEP_KERNELS("gt::bf16"),
                                           STEP_KERNELS("gt::f16"),      STEP_KERNELS("gt::ssm::AnyType"),
                                           WIDE_STEP_KERNELS("float"),   WIDE_STEP_KERNELS("gt::bf16"),
                                           WIDE_STEP_KERNELS("gt::f16"), NULL};

static const test_case spoilt[] = {
    {CONV_SSD(.H = 2, .P = 16, .N = 16, .W = 4, .softplus = 1, .dtype = GT_BF16), .name = "spoilt"},
    {CONV_SSD(.H = 2, .P = 16, .N = 16, .W = 2, .softplus = 1, .dtype = GT_F16), .name = "spoilt", .absent = "z dz"},
    {.op = NULL}};

/* More than 65535 items along one axis of a grid. */
static const test_case many[] = {{CONV_SSD(.B = 70000, .T = 2, .H = 1, .P = 2, .N = 2, .W = 3), .name = "many"},
                                 {.op = NULL}};

/* Sums over many tokens or batch elements.  The means of the terms are not 0, so that the sums grow with their
 * length. */
static const test_case sums[] = {
    {.op = "conv_ssd",
     .name = "long",
     .fill = {{"xBC", 0.5, 1, 0, 0}, {"weight", 0.5, 0.3, 0, 0}, {"dy", 0.5, 1, 0, 0}},
     .args.conv_ssd = {.B = 1, .T = 300000, .H = 1, .P = 2, .N = 2, .W = 4, .softplus = 1}},
    {.op = NULL}};

static void draw(test_random *r, int64_t most, test_case *c) {
    static const char *const absent[] = {"", "z dz", "state_in dt_bias", "Dskip bias " NO_STATES};
    gt_conv_ssd_args *a = &c->args.conv_ssd;
    a->G = 1 + test_pick(r, 3);
    a->H = a->G * (1 + test_pick(r, 3));
    a->P = 1 + test_pick(r, most);
    a->N = 1 + test_pick(r, most);
    a->W = 2 + test_pick(r, 3);
    a->softplus = (int)test_pick(r, 2);
    a->Dskip_per_channel = (int)test_pick(r, 2);
    a->state_in_shared = (int)test_pick(r, 2);
    c->absent = test_pick_absent(r, absent);
}

/* ---- properties of only this operator ---------------------------------------------------------- */

/* Copies the columns first ... first + n - 1 of `count` rows of D numbers. */
static double *columns_of(const double *all, int64_t count, int64_t D, int64_t first, int64_t n) {
    double *part = test_array(count * n, 0);
    for (int64_t i = 0; i < count * n; i++) part[i] = all[i / n * D + first + i % n];
    return part;
}

/* Copies tensor `as` of the whole call (*from) to tensor `name` of a call of conv1d or ssd (*to). */
static void give(const test_case *part, test_values *to, const char *name, gt_pass pass, const test_case *whole,
                 test_values *from, const char *as) {
    const gt_tensor *t = test_tensor_of(whole, as);
    const double *array = *test_array_of(from, whole, as);
    const int64_t count = array ? test_count(whole, pass, t) : 0;
    double *copy = array ? test_array(count, 0) : NULL;
    for (int64_t i = 0; i < count; i++) copy[i] = array[i];
    test_set_array(to, part, name, copy);
}

static void take(const test_case *part, test_values *from, const char *name, const test_case *whole, test_values *to,
                 const char *as) {
    double **at = test_array_of(from, part, name), *array = *at;
    *at = NULL;
    test_set_array(to, whole, as, array);
}

static test_case conv_case(const test_case *c) {
    const gt_conv_ssd_args *a = &c->args.conv_ssd;
    const int64_t G = a->G ? a->G : 1;
    const gt_conv1d_args conv = {.B = a->B,
                                 .T = a->T,
                                 .D = a->H * a->P + 2 * G * a->N,
                                 .W = a->W,
                                 .dtype = a->dtype,
                                 .activation = GT_ACT_SILU,
                                 .state_in_shared = a->state_in_shared,
                                 .seq_capacity = a->seq_capacity,
                                 .slot_capacity = a->slot_capacity};
    const test_case made = {
        .op = "conv1d", .name = c->name, .packed = c->packed, .drafts = c->drafts, .args.conv1d = conv};
    return made;
}

/* The tensors that the call of ssd lacks.  Without the gate z there is no dz. */
static const char *ssd_absent(const test_case *c) { return test_is_word_of(c->absent, "z") ? "z dz" : NULL; }

static test_case ssd_case(const test_case *c) {
    const gt_conv_ssd_args *a = &c->args.conv_ssd;
    const gt_ssd_args ssd = {.B = a->B,
                             .T = a->T,
                             .H = a->H,
                             .P = a->P,
                             .N = a->N,
                             .G = a->G,
                             .dtype = a->dtype,
                             .dt_dtype = a->dt_dtype,
                             .softplus = a->softplus,
                             .dt_limit = a->dt_limit,
                             .dt_min = a->dt_min,
                             .dt_max = a->dt_max,
                             .Dskip_per_channel = a->Dskip_per_channel,
                             .state_in_shared = a->state_in_shared,
                             .segments = a->segments,
                             .seq_capacity = a->seq_capacity,
                             .slot_capacity = a->slot_capacity};
    const test_case made = {.op = "ssd",
                            .name = c->name,
                            .packed = c->packed,
                            .drafts = c->drafts,
                            .args.ssd = ssd,
                            .absent = ssd_absent(c)};
    return made;
}

/* Copies the inputs of the conv1d call from the whole call.  names: pairs of names in conv1d and in conv_ssd. */
static void give_conv(const test_case *conv, test_values *to, gt_pass pass, const test_case *c, test_values *in) {
    static const char *const names[][2] = {{"x", "xBC"},
                                           {"weight", "weight"},
                                           {"bias", "bias"},
                                           {"state_in", "conv_state_in"},
                                           {"cu_seqlens", "cu_seqlens"},
                                           {"seq_count", "seq_count"},
                                           {"slots", "slots"},
                                           {"tokens", "tokens"},
                                           {"commit", "commit"},
                                           {"state_out", "conv_state_out"},
                                           {"dstate_out", "conv_dstate_out"}};
    memset(to, 0, sizeof *to);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (test_is_input(test_tensor_of(conv, names[i][0]), pass))
            give(conv, to, names[i][0], pass, c, in, names[i][1]);
}

static void give_ssd(const test_case *ssd, test_values *to, gt_pass pass, const test_case *c, test_values *in,
                     const double *rows) {
    static const char *const names[] = {"dt",       "z",          "A",         "Dskip",      "dt_bias",
                                        "state_in", "cu_seqlens", "seq_count", "slots",      "tokens",
                                        "commit",   "state_out",  "dy",        "dstate_out", NULL};
    const gt_ssd_args *a = &ssd->args.ssd;
    const int64_t G = a->G ? a->G : 1, x = a->H * a->P, B = G * a->N, count = a->B * a->T;
    memset(to, 0, sizeof *to);
    for (int i = 0; names[i]; i++)
        if (test_is_input(test_tensor_of(ssd, names[i]), pass)) give(ssd, to, names[i], pass, c, in, names[i]);
    test_set_array(to, ssd, "x", columns_of(rows, count, x + 2 * B, 0, x));
    test_set_array(to, ssd, "Bm", columns_of(rows, count, x + 2 * B, x, B));
    test_set_array(to, ssd, "Cm", columns_of(rows, count, x + 2 * B, x + B, B));
}

/* Joins dc from the gradients of its three parts: dx, dBm and dCm. */
static double *joined_rows(const test_case *ssd, test_values *from) {
    static const char *const names[] = {"dx", "dBm", "dCm"};
    const gt_ssd_args *a = &ssd->args.ssd;
    const int64_t G = a->G ? a->G : 1, B = G * a->N, D = a->H * a->P + 2 * B, count = a->B * a->T;
    double *rows = test_array(count * D, 0);
    for (int64_t k = 0, first = 0; k < 3; k++) {
        const double *part = *test_array_of(from, ssd, names[k]);
        const int64_t n = k ? B : a->H * a->P;
        for (int64_t i = 0; i < count * n; i++) rows[i / n * D + first + i % n] = part[i];
        first += n;
    }
    return rows;
}

/* The magnitudes of the terms of dz: |dy silu'(z)| (sum_n |C h| + |Dskip x|).  Backward rounds h, the state, to 16
 * bits. */
static double *terms_of_dz(const test_case *c, test_values *in) {
    static const char *const factors[] = {"x", "Bm", "Cm", "state_in", "Dskip"};
    test_case conv = conv_case(c), ssd = ssd_case(c);
    test_values conv_in, conv_out, ssd_in, ssd_out;
    give_conv(&conv, &conv_in, GT_FORWARD, c, in);
    test_run(&test_truth, &conv, GT_FORWARD, &conv_in, TEST_ALL, &conv_out);
    ssd.absent = "z dz";
    give_ssd(&ssd, &ssd_in, GT_FORWARD, c, in, *test_array_of(&conv_out, &conv, "y"));
    test_set_array(&ssd_in, &ssd, "z", NULL);
    for (size_t k = 0; k < sizeof factors / sizeof factors[0]; k++) {
        double *x = *test_array_of(&ssd_in, &ssd, factors[k]);
        const int64_t count = x ? test_count(&ssd, GT_FORWARD, test_tensor_of(&ssd, factors[k])) : 0;
        for (int64_t i = 0; i < count; i++) x[i] = fabs(x[i]);
    }
    test_run(&test_truth, &ssd, GT_FORWARD, &ssd_in, TEST_ALL, &ssd_out);
    double **const y = test_array_of(&ssd_out, &ssd, "y"), *const of_dz = *y;
    const double *z = *test_array_of(in, c, "z"), *dy = *test_array_of(in, c, "dy");
    const int64_t count = test_count(c, GT_BACKWARD, test_tensor_of(c, "z"));
    for (int64_t i = 0; i < count; i++) {
        const double s = 1 / (1 + exp(-z[i]));
        of_dz[i] *= dy[i] * s * (1 + z[i] * (1 - s));
    }
    *y = NULL;
    test_free(&conv_in), test_free(&conv_out), test_free(&ssd_in), test_free(&ssd_out);
    return of_dz;
}

/* The magnitudes of the terms of dz or dxBC.  A number of xBC enters up to W tokens; for dxBC the magnitudes are the
 * sum over these tokens of |weight[d,w]| |silu'(sum) dc|, where `sum` is the input of silu.  Kernels round dc to 16
 * bits. */
static double *terms(const test_case *given, gt_pass pass, const gt_tensor *t) {
    test_case c = *given;
    const int is_dz = !strcmp(t->name, "dz");
    if (pass != GT_BACKWARD || (!is_dz && strcmp(t->name, "dxBC"))) return NULL;
    c.layout = TEST_PACKED;
    c.in_place = c.args.conv_ssd.accumulate = 0;
    const int64_t count = test_count(&c, GT_BACKWARD, t);
    test_case conv = conv_case(&c), ssd = ssd_case(&c);
    test_values in, conv_in, conv_out, ssd_in, ssd_out;
    conv.args.conv1d.activation = GT_ACT_NONE;
    test_inputs(&c, GT_BACKWARD, &in);
    if (is_dz) {
        double *const of_dz = terms_of_dz(&c, &in);
        test_free(&in);
        return of_dz;
    }
    give_conv(&conv, &conv_in, GT_FORWARD, &c, &in);
    test_run(&test_truth, &conv, GT_FORWARD, &conv_in, TEST_ALL, &conv_out);
    double *const before = *test_array_of(&conv_out, &conv, "y"), *rows = test_array(count, 0);
    for (int64_t i = 0; i < count; i++) rows[i] = before[i] / (1 + exp(-before[i]));
    give_ssd(&ssd, &ssd_in, GT_BACKWARD, &c, &in, rows);
    free(rows);
    test_run(&test_truth, &ssd, GT_BACKWARD, &ssd_in, TEST_ALL, &ssd_out);
    rows = joined_rows(&ssd, &ssd_out);
    for (int64_t i = 0; i < count; i++) {
        const double s = 1 / (1 + exp(-before[i]));
        rows[i] = fabs(rows[i] * s * (1 + before[i] * (1 - s)));
    }
    test_free(&conv_in), test_free(&conv_out);
    give_conv(&conv, &conv_in, GT_BACKWARD, &c, &in);
    test_set_array(&conv_in, &conv, "dy", rows);
    double *const weight = *test_array_of(&conv_in, &conv, "weight");
    for (int64_t i = 0; i < conv.args.conv1d.D * conv.args.conv1d.W; i++) weight[i] = fabs(weight[i]);
    test_set_array(&conv_in, &conv, "dstate_out", NULL);
    test_run(&test_truth, &conv, GT_BACKWARD, &conv_in, TEST_ALL, &conv_out);
    double **const dx = test_array_of(&conv_out, &conv, "dx"), *const of_dx = *dx;
    *dx = NULL;
    test_free(&in), test_free(&conv_in), test_free(&conv_out), test_free(&ssd_in), test_free(&ssd_out);
    return of_dx;
}

/* The results have the bits of the two separate calls, because the kernels round c and dc as these calls do.  In
 * backward the 16-bit twin does not round dc, so only its forward is checked. */
static void two_calls_agree(const test_runner *r, const test_case *given, double tolerance) {
    test_case c = *given;
    (void)tolerance;
    if (c.args.conv_ssd.B * c.args.conv_ssd.T == 0) return;
    c.layout = TEST_PACKED;
    c.in_place = c.args.conv_ssd.accumulate = 0;
    const test_case conv = conv_case(&c), ssd = ssd_case(&c);
    const gt_pass last = r == &test_twin && c.args.conv_ssd.dtype != GT_F32 ? GT_FORWARD : GT_BACKWARD;
    for (int pass = GT_FORWARD; pass <= (int)last; pass++) {
        static const char *const of_ssd[][6] = {{"y", "state_out", NULL},
                                                {"ddt", "dz", "dA", "ddt_bias", "dDskip", "dstate_in"}};
        test_values in, whole, conv_in, conv_out, ssd_in, ssd_out, expected = {{NULL}};
        test_inputs(&c, (gt_pass)pass, &in);
        test_run(r, &c, (gt_pass)pass, &in, TEST_ALL, &whole);
        give_conv(&conv, &conv_in, GT_FORWARD, &c, &in);
        test_run(r, &conv, GT_FORWARD, &conv_in, TEST_ALL, &conv_out);
        give_ssd(&ssd, &ssd_in, (gt_pass)pass, &c, &in, *test_array_of(&conv_out, &conv, "y"));
        test_run(r, &ssd, (gt_pass)pass, &ssd_in, TEST_ALL, &ssd_out);
        if (pass == GT_FORWARD) {
            take(&conv, &conv_out, "state_out", &c, &expected, "conv_state_out");
        } else {
            static const char *const of_conv[][2] = {
                {"dx", "dxBC"}, {"dweight", "dweight"}, {"dbias", "dbias"}, {"dstate_in", "conv_dstate_in"}};
            double *rows = joined_rows(&ssd, &ssd_out);
            test_free(&conv_in), test_free(&conv_out);
            give_conv(&conv, &conv_in, GT_BACKWARD, &c, &in);
            test_set_array(&conv_in, &conv, "dy", rows);
            test_run(r, &conv, GT_BACKWARD, &conv_in, TEST_ALL, &conv_out);
            for (int i = 0; i < 4; i++) take(&conv, &conv_out, of_conv[i][0], &c, &expected, of_conv[i][1]);
        }
        for (int i = 0; i < 6 && of_ssd[pass][i]; i++)
            take(&ssd, &ssd_out, of_ssd[pass][i], &c, &expected, of_ssd[pass][i]);
        for (int i = 0; i < TEST_TENSORS; i++)
            if (!whole.of[i]) free(expected.of[i]), expected.of[i] = NULL;
        test_same(r, &c, (gt_pass)pass, "the two calls", &whole, &expected, 0);
        test_free(&in), test_free(&whole), test_free(&expected);
        test_free(&conv_in), test_free(&conv_out), test_free(&ssd_in), test_free(&ssd_out);
    }
}

/* Runs the first half of the tokens as one call, and the rest as steps of conv1d and of ssd from the call's last
 * states. The results agree with one call for all tokens. */
static void decoding_agrees(const test_runner *r, const test_case *given, double tolerance) {
    test_case c = *given;
    const int64_t T = c.args.conv_ssd.T, first = T / 2;
    if (c.args.conv_ssd.seq_capacity || c.args.conv_ssd.state_in_shared || !c.args.conv_ssd.B || T < 2 ||
        T - first > 16 || test_is_word_of(c.absent, "state_out"))
        return;
    c.layout = TEST_PACKED;
    c.in_place = 0;
    test_case prefill = c, rest = c;
    prefill.args.conv_ssd.T = first;
    rest.args.conv_ssd.T = T - first;
    test_case conv = conv_case(&rest), ssd = ssd_case(&rest);
    test_values in, whole, part, out, conv_in, conv_out, ssd_in, ssd_out, last = {{NULL}}, joined = {{NULL}};
    test_inputs(&c, GT_FORWARD, &in);
    test_run(r, &c, GT_FORWARD, &in, TEST_ALL, &whole);
    test_cut(&c, GT_FORWARD, &in, 'T', 0, first, &part);
    test_run(r, &prefill, GT_FORWARD, &part, TEST_ALL, &out);
    test_paste(&prefill, &c, GT_FORWARD, &out, 'T', 0, &joined);
    test_free(&part);
    test_cut(&c, GT_FORWARD, &in, 'T', first, T - first, &part);
    give_conv(&conv, &conv_in, GT_FORWARD, &rest, &part);
    test_set_array(&conv_in, &conv, "state_in", NULL);
    take(&c, &out, "conv_state_out", &conv, &conv_in, "state_out");
    test_run(r, &conv, GT_STEP, &conv_in, TEST_ALL, &conv_out);
    give_ssd(&ssd, &ssd_in, GT_FORWARD, &rest, &part, *test_array_of(&conv_out, &conv, "y"));
    test_set_array(&ssd_in, &ssd, "state_in", NULL);
    take(&c, &out, "state_out", &ssd, &ssd_in, "state_out");
    test_run(r, &ssd, GT_STEP, &ssd_in, TEST_ALL, &ssd_out);
    take(&ssd, &ssd_out, "y", &rest, &last, "y");
    test_paste(&rest, &c, GT_FORWARD, &last, 'T', first, &joined);
    take(&ssd, &ssd_out, "state_out", &c, &joined, "state_out");
    take(&conv, &conv_out, "state_out", &c, &joined, "conv_state_out");
    test_same(r, &c, GT_FORWARD, "a call, then steps", &joined, &whole, tolerance);
    test_free(&in), test_free(&whole), test_free(&part), test_free(&out), test_free(&last), test_free(&joined);
    test_free(&conv_in), test_free(&conv_out), test_free(&ssd_in), test_free(&ssd_out);
}

/* A step of conv_ssd, in any layout, gives the bits of a step of conv1d and a step of ssd on packed arrays. */
static void step_agrees(const test_runner *r, const test_case *c) {
    test_case packed_case = *c;
    packed_case.layout = TEST_PACKED;
    packed_case.in_place = 0;
    const test_case conv = conv_case(&packed_case), ssd = ssd_case(&packed_case);
    test_values in, whole, conv_in, conv_out, ssd_in, ssd_out, expected = {{NULL}};
    test_inputs(c, GT_STEP, &in);
    test_run(r, c, GT_STEP, &in, TEST_ALL, &whole);
    give_conv(&conv, &conv_in, GT_STEP, c, &in);
    test_run(r, &conv, GT_STEP, &conv_in, TEST_ALL, &conv_out);
    give_ssd(&ssd, &ssd_in, GT_STEP, c, &in, *test_array_of(&conv_out, &conv, "y"));
    test_run(r, &ssd, GT_STEP, &ssd_in, TEST_ALL, &ssd_out);
    take(&conv, &conv_out, "state_out", c, &expected, "conv_state_out");
    take(&ssd, &ssd_out, "y", c, &expected, "y");
    take(&ssd, &ssd_out, "state_out", c, &expected, "state_out");
    test_same(r, c, GT_STEP, "steps of conv1d and ssd", &whole, &expected, 0);
    test_free(&in), test_free(&whole), test_free(&expected);
    test_free(&conv_in), test_free(&conv_out), test_free(&ssd_in), test_free(&ssd_out);
}

static const test_property properties[] = {{"the bits of the two calls", TEST_MEDIUM, two_calls_agree},
                                           {"a call, then steps of the two operators", TEST_MEDIUM, decoding_agrees},
                                           {NULL, TEST_TINY, NULL}};

static const int64_t more_times[] = {100, 130, 200, 300, -1};
static const char *const launched[] = {
    "forward_tensor_kernel", "ssd::forward_hopper_kernel",   "conv_ssd::groups_kernel", "conv_ssd::forward_kernel",
    "chunk_gradient_kernel", "chunk_gradient_hopper_kernel", "reduce_rows_kernel",      NULL};

/* Kernels with four units in a block need more tokens or heads than the sizes above have.  They read B and C from ssd's
 * workspace. */
#define FOUR_UNITS CONV_SSD(.B = 1, .T = 1040, .H = 4, .P = 64, .W = 4, .segments = 1, .dtype = GT_BF16
static const test_case launching[] = {
    {CONV_SSD(.B = 1, .T = 130, .H = 16, .P = 64, .N = 80, .W = 4, .dtype = GT_BF16),
     .name = "conv_ssd::forward_kernel<gt::bf16, 128, 4, 1>"},
    {FOUR_UNITS, .N = 80), .name = "conv_ssd::forward_kernel<gt::bf16, 128, 4, 0>", .absent = "z dz"},
    {FOUR_UNITS, .N = 32), .name = "conv_ssd::forward_kernel<gt::bf16, 64, 4, 1>"},
    {FOUR_UNITS, .N = 32), .name = "conv_ssd::forward_kernel<gt::bf16, 64, 4, 0>", .absent = "z dz"},
    {CONV_SSD(.B = 1, .T = 256, .H = 4, .P = 64, .N = 144, .W = 4, .segments = 1, .dtype = GT_BF16),
     .name = "conv_ssd::forward_kernel<gt::bf16, 256, 2, 1>"},
    {CONV_SSD(.B = 1, .T = 256, .H = 4, .P = 64, .N = 144, .W = 4, .segments = 1, .dtype = GT_BF16),
     .name = "conv_ssd::forward_kernel<gt::bf16, 256, 2, 0>", .absent = "z dz"},
    {.op = NULL}};

/* ---- the formula, written out a second way ---------------------------------------------------- */

/* Input e_i of channel d of a sequence.  e_0 is the oldest input before the first token. */
static double input_of(const formula *f, formula_sequence q, int64_t i, int64_t d) {
    const int64_t J = f->c->args.conv_ssd.W - 1;
    return i < J ? formula_value(f, "conv_state_in", q.row, d, i, 0)
                 : formula_value(f, "xBC", q.b, q.first + i - J, d, 0);
}

/* Channel d of token t after the convolution. */
static double convolved(const formula *f, formula_sequence q, int64_t t, int64_t d) {
    double sum = formula_value(f, "bias", d, 0, 0, 0);
    for (int64_t j = 0; j < f->c->args.conv_ssd.W; j++)
        sum += formula_value(f, "weight", d, j, 0, 0) * input_of(f, q, t - q.first + j, d);
    return formula_silu(sum);
}

static double delta(const formula *f, int64_t b, int64_t t, int64_t h) {
    const gt_conv_ssd_args *a = &f->c->args.conv_ssd;
    double s = formula_value(f, "dt", b, t, h, 0) + formula_value(f, "dt_bias", h, 0, 0, 0);
    if (a->softplus) s = log(1 + exp(s));
    return a->dt_limit ? fmin(fmax(s, a->dt_min), a->dt_max) : s;
}

/* The channel of xBC that is element n of Bm (which = 0) or Cm (which = 1), in the group of head h. */
static int64_t group_channel(const gt_conv_ssd_args *a, int which, int64_t h, int64_t n) {
    const int64_t G = a->G ? a->G : 1;
    return a->H * a->P + (which * G + h / (a->H / G)) * a->N + n;
}

/* The state before token `last`. */
static double state_before(const formula *f, formula_sequence q, int64_t last, int64_t h, int64_t p, int64_t n) {
    const gt_conv_ssd_args *a = &f->c->args.conv_ssd;
    const double A = formula_value(f, "A", h, 0, 0, 0);
    double elapsed = 0, S = 0;
    for (int64_t t = last - 1; t >= q.first; t--) {
        const double d = delta(f, q.b, t, h);
        S += exp(elapsed * A) * d * convolved(f, q, t, h * a->P + p) * convolved(f, q, t, group_channel(a, 0, h, n));
        elapsed += d;
    }
    return S + exp(elapsed * A) * formula_value(f, "state_in", q.row, h, p, n);
}

static double y(const formula *f, int64_t b, int64_t t, int64_t h, int64_t p) {
    const gt_conv_ssd_args *a = &f->c->args.conv_ssd;
    const formula_sequence q = formula_sequence_of_token(f, b, t);
    if (q.row < 0) return 0;
    double sum = formula_value(f, "Dskip", h, p, 0, 0) * convolved(f, q, t, h * a->P + p);
    for (int64_t n = 0; n < a->N; n++)
        sum += state_before(f, q, t + 1, h, p, n) * convolved(f, q, t, group_channel(a, 1, h, n));
    return formula_has(f, "z") ? sum * formula_silu(formula_value(f, "z", b, t, h, p)) : sum;
}

static double state_out(const formula *f, int64_t row, int64_t h, int64_t p, int64_t n) {
    if (!formula_has_sequence(f, row)) return 0;
    const formula_sequence q = formula_sequence_of_row(f, row);
    return state_before(f, q, q.last, h, p, n);
}

static double conv_state_out(const formula *f, int64_t row, int64_t d, int64_t j, int64_t unused) {
    (void)unused;
    if (!formula_has_sequence(f, row)) return 0;
    const formula_sequence q = formula_sequence_of_row(f, row);
    return input_of(f, q, q.last - q.first + j, d);
}

static const test_formula formulas[] = {
    {"y", y}, {"state_out", state_out}, {"conv_state_out", conv_state_out}, {NULL, NULL}};

/* ---- rows of the bench ----------------------------------------------------------------------- */

#define ROW(types, label, missing, ...)                                                                                \
    {                                                                                                                  \
        {.op = "conv_ssd", .name = label, .absent = missing, .args.conv_ssd = {.softplus = 1, .W = 4, __VA_ARGS__}},   \
            types                                                                                                      \
    }

static const test_bench_row host_rows[] = {
    ROW(TEST_F32 | TEST_BF16, "", "z dz " NO_STATES, .B = 8, .T = 256, .H = 4, .P = 64, .N = 64), {{.op = NULL}, 0}};

static const test_bench_row gpu_rows[] = {
    ROW(TEST_F32 | TEST_BF16, "", "z dz " NO_STATES, .B = 64, .T = 256, .H = 4, .P = 64, .N = 64),
    ROW(TEST_BF16, "", "z dz " NO_STATES, .B = 8, .T = 2048, .H = 64, .P = 64, .N = 128),
    ROW(TEST_BF16, "", "z dz " NO_STATES, .B = 8, .T = 4096, .H = 64, .P = 64, .N = 128),
    ROW(TEST_BF16, "z", NO_STATES, .B = 8, .T = 4096, .H = 64, .P = 64, .N = 128),
    ROW(TEST_BF16, "z", NO_STATES, .B = 64, .T = 256, .H = 8, .P = 64, .N = 64),
    ROW(TEST_BF16, "G8", "z dz", .B = 1, .T = 1, .H = 128, .P = 64, .N = 128, .G = 8),
    ROW(TEST_BF16, "G8", "z dz", .B = 8, .T = 1, .H = 128, .P = 64, .N = 128, .G = 8),
    ROW(TEST_BF16, "G8", "z dz", .B = 64, .T = 1, .H = 128, .P = 64, .N = 128, .G = 8),
    ROW(TEST_BF16, "G8", "z dz", .B = 256, .T = 1, .H = 128, .P = 64, .N = 128, .G = 8),
    {{.op = NULL}, 0}};

static const test_bench_draw draws[] = {TEST_SSM_DRAWS, {"weight", {0, 0, 0.5f}}, {NULL, {0, 0, 0}}};
static const test_bench_cut cuts[] = {{"B", 1}, {NULL, 0}};

/* ---- the operator ---------------------------------------------------------------------------- */

const test_op test_op_conv_ssd = {
    TEST_OVER_TIME(conv_ssd),
    .reads_y = AT(conv_ssd, reads_y),
    .terms = terms,
    .optional_size = {AT(conv_ssd, G), 2},
    .large = {CONV_SSD(.B = 1, .T = 130, .H = 5, .P = 64, .N = 32, .W = 4, .softplus = 1, .segments = 1)},
    .set_fill = set_fill,
    .set_regime = test_set_ssm_regime,
    .reach = {64, 64},
    .spoilt = spoilt,
    .bounds_pairs = 1,
    .settle = settle,
    /* The twin rounds c as the kernels do, so where only c matters the limits are ssd's.  But only the kernels round
     * dc.  This adds half a unit in the last place of each number of dc to the errors of dxBC and conv_dstate_in, and
     * of the terms of dweight and dbias.  The error of dxBC also includes its own rounding.  conv_dstate_in sums at
     * most three numbers of dc, and a few of its elements may make up most of its size. */
    .kernels = {{0, 1e-5, 3.2e-3, 1e-3}, {0, 1e-5, 2.5e-3, 5e-4}, {0, 1e-5, 2.5e-3, 1e-3}, {0, 1e-5, 4e-3, 1e-3}, 2},
    .sums_of_few = "conv_dstate_in",
    /* An element of dxBC sums up to four numbers of dc, each rounded alone, times weights of both signs.  Where they
     * cancel, the element is much smaller than its terms. */
    .differences = {[GT_BACKWARD] = "dxBC"},
    .properties = properties,
    .steps = steps,
    .step_kernels = step_kernels,
    .check_step = step_agrees,
    /* two calls add the terms of a gradient near the cut in another order than one call, as in conv1d.c */
    .split_tolerance = {[GT_F32] = 1e-6, [GT_BF16] = 0x1p-8, [GT_F16] = 0x1p-8},
    .has_exact_prefill = 1,
    .more_times = more_times,
    .launched = launched,
    .launching = launching,
    .bench_draws = draws,
    .bench_cuts = cuts,
    .operations = {"BTHPN", 4, 12},
};
