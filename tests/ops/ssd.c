/* ssd: test cases, a formula independent of the twin, and rows of the bench. */
#include "formula.h"

TEST_TWINS_IN_PIECES(ssd)

/* ---- arguments ------------------------------------------------------------------------------- */

static const test_field fields[] = {TEST_DIVISOR(ssd, G, 'H'),
                                    TEST_FIELD(ssd, softplus, 'i'),
                                    TEST_FIELD(ssd, dt_limit, 'i'),
                                    TEST_FLOAT(ssd, dt_min, 0.2),
                                    TEST_FLOAT(ssd, dt_max, 0.6),
                                    TEST_FIELD(ssd, Dskip_per_channel, 'i'),
                                    TEST_FIELD(ssd, state_in_shared, 'i'),
                                    TEST_FIELD(ssd, reads_y, 'i'),
                                    TEST_FIELD(ssd, segments, 's'),
                                    TEST_FIELD(ssd, pieces, 's'),
                                    {NULL, 0, 0, 0, 0}};

#define BAD_LIMITS(text, min, max)                                                                                     \
    {                                                                                                                  \
        text, GT_ERROR_VALUE, {                                                                                        \
            {AT(ssd, dt_limit), 'i', 1}, {AT(ssd, dt_min), 'f', min}, { AT(ssd, dt_max), 'f', max }                    \
        }                                                                                                              \
    }
static const test_bad_value bad_values[] = {BAD_SIZE(ssd, pieces),
                                            BAD_SIZE(ssd, G),
                                            BAD_DIVISOR(ssd, G, 3),
                                            BAD_SWITCH(ssd, softplus, 2),
                                            BAD_SWITCH(ssd, dt_limit, 2),
                                            BAD_SWITCH(ssd, Dskip_per_channel, 2),
                                            BAD_SWITCH(ssd, reads_y, 2),
                                            BAD_LIMITS("dt_min = 2", 2, 1),
                                            BAD_LIMITS("dt_min is NaN", NAN, 1),
                                            BAD_LIMITS("dt_max is NaN", 0, NAN),
                                            {NULL, GT_OK, {{0, 0, 0}}}};

/* ---- how inputs are drawn -------------------------------------------------------------------- */

static void set_fill(const test_case *c, const gt_tensor *t, test_fill *f, test_map *map) {
    test_fill_ssm(c->args.ssd.softplus, t, f, map);
}

/* ---- cases ----------------------------------------------------------------------------------- */

#define SSD(...) .op = "ssd", .args.ssd = {__VA_ARGS__}
#define PACKED(...) .args.ssd = {.B = 1, __VA_ARGS__}, .op = "ssd"
#define LIMITS .dt_limit = 1, .dt_min = 0.1875f, .dt_max = 0.375f

static const test_case cases[] = {
    {SSD(.B = 1, .T = 1, .H = 1, .P = 1, .N = 1), .name = "one number"},
    {SSD(.B = 2, .T = 3, .H = 2, .P = 2, .N = 3, .softplus = 1), .name = "softplus"},
    {SSD(.B = 2, .T = 3, .H = 2, .P = 3, .N = 2), .name = "no softplus"},
    /* some dt are below the limits and some are above, but none is near a limit, where rounding would decide */
    {SSD(.B = 2, .T = 4, .H = 4, .P = 2, .N = 1, .softplus = 1, LIMITS), .name = "softplus, limits",
     .fill = {{"dt", -1.2, 0.05, -4, 0.4}, {"dt_bias", 0, 0.05, 3, 0.4}}},
    {SSD(.B = 2, .T = 4, .H = 4, .P = 1, .N = 2, LIMITS), .name = "limits",
     .fill = {{"dt", -1.4, 0.05, 0.02, 0.4}, {"dt_bias", -5, 0.1, 0.5, 0.4}}},
    {SSD(.B = 2, .T = 3, .H = 4, .P = 2, .N = 2, .G = 2, .softplus = 1), .name = "two groups"},
    {SSD(.B = 2, .T = 2, .H = 3, .P = 2, .N = 2, .G = 3), .name = "a group per head"},
    {SSD(.B = 2, .T = 3, .H = 2, .P = 3, .N = 2, .softplus = 1, .Dskip_per_channel = 1), .name = "skip per channel"},
    {SSD(.B = 2, .T = 3, .H = 2, .P = 2, .N = 2, .softplus = 1), .name = "no gate", .absent = "z dz"},
    {SSD(.B = 2, .T = 3, .H = 2, .P = 2, .N = 2), .name = "nothing optional",
     .absent = "z dz Dskip dt_bias " NO_STATES},
    {SSD(.B = 2, .T = 3, .H = 2, .P = 2, .N = 2), .name = "zero skip, bias and state",
     .absent = "Dskip dt_bias state_in"},
    {SSD(.B = 3, .T = 2, .H = 2, .P = 2, .N = 2, .softplus = 1, .state_in_shared = 1), .name = "shared state"},
    {SSD(.B = 2, .T = 3, .H = 2, .P = 2, .N = 2), .name = "final state only", .fill = {{"dy", 0, 0, 0, 0}}},
    {SSD(.B = 2, .T = 4, .H = 2, .P = 2, .N = 2), .name = "A and dt of zero", .absent = "dt_bias",
     .fill = {{"A", 0, 0.5, 0, 0.5}, {"dt", -2, 0.7, 0, 0.4}}},
    {SSD(.B = 2, .T = 4, .H = 4, .P = 2, .N = 2), .name = "decay to zero", .fill = {{"A", 0, 0.5, -10000, 0.5}}},
    {SSD(.B = 2, .T = 4, .H = 4, .P = 2, .N = 2), .name = "growing states", .fill = {{"A", 0, 0.5, 0.75, 0.5}}},
    {SSD(.B = 2, .T = 4, .H = 2, .P = 2, .N = 2), .name = "closed gates", .fill = {{"z", 0, 1, -INFINITY, 0.2}}},
    {SSD(.B = 2, .T = 0, .H = 2, .P = 2, .N = 3), .name = "no time"},
    {SSD(.B = 2, .T = 0, .H = 2, .P = 2, .N = 3, .state_in_shared = 1), .name = "no time, shared state"},
    {SSD(.B = 0, .T = 3, .H = 2, .P = 2, .N = 3), .name = "no batch"},
    {SSD(.B = 2, .T = 70, .H = 4, .P = 2, .N = 3, .G = 2, .softplus = 1), .name = "two chunks", .level = TEST_SMALL},
    {SSD(.B = 2, .T = 130, .H = 2, .P = 2, .N = 2, .softplus = 1, .Dskip_per_channel = 1, .state_in_shared = 1),
     .name = "three chunks, shared state", .level = TEST_SMALL, .absent = "z dz"},
    {SSD(.B = 6, .T = 16, .H = 2, .P = 4, .N = 6, .softplus = 1, .slot_capacity = 9), .name = "slots",
     .level = TEST_SMALL},
    {SSD(.B = 3, .T = 5, .H = 4, .P = 3, .N = 5, .G = 2, .softplus = 1, LIMITS), .name = "limits, two groups",
     .level = TEST_SMALL, .no_difference = 1},
    {SSD(.B = 2, .T = 70, .H = 2, .P = 3, .N = 4, .softplus = 1), .name = "far ends of softplus", .level = TEST_SMALL,
     .no_difference = 1, .fill = {{"dt", 0, 15, 120, 0.1}, {"dt_bias", 0, 5, 0, 0}, {"A", -2, 1, 0, 0}}},
    {SSD(.B = 2, .T = 40, .H = 2, .P = 3, .N = 4, LIMITS), .name = "at the limits", .level = TEST_SMALL,
     .no_difference = 1, .absent = "dt_bias", .fill = {{"dt", -1.5, 0.7, 0.375, 0.5}}},
    {SSD(.B = 1, .T = 1300, .H = 2, .P = 8, .N = 16, .softplus = 1, .segments = 10), .name = "ten segments",
     .level = TEST_SMALL},
    {SSD(.B = 2, .T = 65, .H = 2, .P = 64, .N = 64, .softplus = 1), .name = "64 by 64", .level = TEST_MEDIUM},
    {SSD(.B = 1, .T = 70, .H = 2, .P = 16, .N = 16, .softplus = 1), .name = "closed gates, 16 by 16",
     .level = TEST_SMALL, .no_difference = 1, .fill = {{"z", 0, 1, -INFINITY, 0.2}}},
    /* some gates are exactly 0, so that backward cannot compute the value before the gate from y */
    {SSD(.B = 2, .T = 140, .H = 4, .P = 64, .N = 64, .softplus = 1), .name = "gates of zero", .level = TEST_MEDIUM,
     .no_difference = 1, .fill = {{"z", 0, 1, 0, 0.001}}},
    {SSD(.B = 1, .T = 70, .H = 2, .P = 64, .N = 128, .softplus = 1, .Dskip_per_channel = 1),
     .name = "64 by 128, slices of 902", .level = TEST_MEDIUM, .layout = TEST_SLICES, .row = 902},
    {SSD(.B = 1, .T = 100, .H = 3, .P = 80, .N = 16, .G = 3, .softplus = 1), .name = "80 by 16", .level = TEST_MEDIUM,
     .layout = TEST_GAPS},
    {SSD(.B = 1, .T = 300, .H = 2, .P = 16, .N = 16), .name = "fast beside slow", .level = TEST_MEDIUM,
     .fill = {{"dt", -8, 0.5, 8, 0.05}}},
    {SSD(.B = 1, .T = 400, .H = 2, .P = 8, .N = 16, .segments = 3), .name = "a sum of logarithms beyond fp32",
     .level = TEST_MEDIUM, .fill = {{"A", 0, 0, -1e37, 1}}},
    {SSD(.B = 1, .T = 200, .H = 2, .P = 8, .N = 16, .softplus = 1), .name = "states that grow all the time",
     .level = TEST_MEDIUM, .fill = {{"A", 0, 0, 0.03, 1}}},
    {SSD(.B = 1, .T = 500, .H = 2, .P = 8, .N = 16, .softplus = 1), .name = "large states", .level = TEST_MEDIUM,
     .fill = {{"A", -8, 1, 0, 0}, {"x", 1, 2, 0, 0}, {"Bm", 1, 2, 0, 0}}},
    {SSD(.B = 2, .T = 1000, .H = 4, .P = 64, .N = 128, .softplus = 1), .name = "64 by 128, long", .level = TEST_LARGE},
    {SSD(.B = 1, .T = 500, .H = 8, .P = 128, .N = 64, .G = 2, .softplus = 1, LIMITS), .name = "128 by 64, two groups",
     .level = TEST_LARGE},
    {SSD(.B = 1, .T = 700, .H = 4, .P = 64, .N = 128, .softplus = 1), .name = "64 by 128, short segments",
     .level = TEST_LARGE},
    {SSD(.B = 1, .T = 4099, .H = 2, .P = 64, .N = 64, .softplus = 1), .name = "64 by 64, one long sequence",
     .level = TEST_LARGE},
    {.op = NULL}};

static const test_case packed[] = {
    {PACKED(.T = 6, .H = 2, .P = 2, .N = 3, .seq_capacity = 3), .name = "three", LENGTHS(3, 1, 2)},
    {PACKED(.T = 5, .H = 4, .P = 1, .N = 2, .G = 2, .seq_capacity = 7, .softplus = 1), .name = "empty ones",
     LENGTHS(0, 2, 0, 0, 1, 2, 0)},
    {PACKED(.T = 6, .H = 2, .P = 2, .N = 2, .seq_capacity = 5, .Dskip_per_channel = 1), .name = "below the capacities",
     LENGTHS(2, 0, 2)},
    {PACKED(.T = 4, .H = 2, .P = 2, .N = 2, .seq_capacity = 4, .softplus = 1, LIMITS), .name = "all in use",
     .absent = "seq_count", LENGTHS(1, 0, 2, 1)},
    {PACKED(.T = 4, .H = 1, .P = 2, .N = 3, .seq_capacity = 3), .name = "room for tokens", .absent = "seq_count z dz",
     LENGTHS(1, 1, 0)},
    {PACKED(.T = 3, .H = 2, .P = 2, .N = 2, .seq_capacity = 2), .name = "none", .packed = {0, NULL}},
    {PACKED(.T = 0, .H = 2, .P = 2, .N = 2, .seq_capacity = 2), .name = "no tokens", LENGTHS(0, 0)},
    {PACKED(.T = 5, .H = 1, .P = 2, .N = 3, .seq_capacity = 3, .softplus = 1), .name = "no states",
     .absent = "Dskip " NO_STATES, LENGTHS(2, 3)},
    {PACKED(.T = 5, .H = 2, .P = 2, .N = 2, .seq_capacity = 4, .state_in_shared = 1), .name = "shared state",
     LENGTHS(2, 0, 2)},
    {PACKED(.T = 3, .H = 2, .P = 2, .N = 2, .seq_capacity = 2, .state_in_shared = 1), .name = "none, shared state",
     .packed = {0, NULL}},
    {PACKED(.T = 205, .H = 2, .P = 2, .N = 3, .seq_capacity = 6, .softplus = 1), .name = "around chunks",
     .level = TEST_SMALL, LENGTHS(63, 1, 64, 0, 65)},
    {PACKED(.T = 300, .H = 1, .P = 4, .N = 3, .seq_capacity = 3, .state_in_shared = 1, .softplus = 1),
     .name = "around more chunks, shared state", .level = TEST_SMALL, LENGTHS(129, 1, 128)},
    {PACKED(.T = 90, .H = 2, .P = 2, .N = 2, .seq_capacity = 40, .softplus = 1), .name = "many", .level = TEST_SMALL,
     RANDOM_LENGTHS(37)},
    {PACKED(.T = 420, .H = 2, .P = 64, .N = 32, .seq_capacity = 12, .softplus = 1), .name = "64 by 32",
     .level = TEST_MEDIUM, LENGTHS(1, 15, 0, 16, 17, 63, 0, 0, 128, 129)},
    {PACKED(.T = 500, .H = 2, .P = 24, .N = 40, .G = 2, .seq_capacity = 300, .softplus = 1),
     .name = "24 by 40, hundreds", .level = TEST_MEDIUM, .layout = TEST_GAPS, RANDOM_LENGTHS(299)},
    {PACKED(.T = 2000, .H = 2, .P = 64, .N = 64, .seq_capacity = 60, .softplus = 1), .name = "64, dozens",
     .level = TEST_LARGE, RANDOM_LENGTHS(50)},
    {PACKED(.T = 3000, .H = 1, .P = 64, .N = 128, .seq_capacity = 5, .softplus = 1), .name = "128, long beside short",
     .level = TEST_LARGE, LENGTHS(1, 2047, 16, 900)},
    {.op = NULL}};

/* Sizes for which the operator has specialised kernels, and sizes for general kernels. */
static const test_case sizes[] = {
    {SSD(.H = 4, .P = 64, .N = 64, .softplus = 1), .name = "sweep"},
    {SSD(.H = 2, .P = 64, .N = 128, .G = 2, .softplus = 1, .Dskip_per_channel = 1), .name = "sweep"},
    {SSD(.H = 1, .P = 128, .N = 64), .name = "sweep"},
    {SSD(.H = 3, .P = 16, .N = 16, .G = 3, .softplus = 1), .name = "sweep"},
    {SSD(.H = 4, .P = 32, .N = 32, .G = 2, .softplus = 1, .state_in_shared = 1), .name = "sweep"},
    {SSD(.H = 3, .P = 20, .N = 36, .softplus = 1), .name = "sweep"},
    {SSD(.H = 1, .P = 64, .N = 256, .softplus = 1), .name = "sweep"},
    {SSD(.H = 2, .P = 24, .N = 144, .G = 2, .state_in_shared = 1), .name = "sweep"},
    {SSD(.H = 2, .P = 72, .N = 32, .softplus = 1, .Dskip_per_channel = 1), .name = "sweep"},
    {SSD(.H = 4, .P = 64, .N = 128, .G = 2, .softplus = 1, .Dskip_per_channel = 1), .name = "sweep", .absent = "z dz"},
    {SSD(.H = 2, .P = 80, .N = 64, .softplus = 1, .state_in_shared = 1), .name = "sweep", .absent = "z dz"},
    {SSD(.H = 3, .P = 128, .N = 32, .softplus = 1), .name = "sweep", .absent = "z dz"},
    {SSD(.H = 2, .P = 24, .N = 16, .G = 2), .name = "sweep", .absent = "z dz"},
    {SSD(.H = 1, .P = 64, .N = 112, .softplus = 1), .name = "sweep", .absent = "z dz"},
    {SSD(.H = 4, .P = 32, .N = 240, .G = 2, .softplus = 1, .Dskip_per_channel = 1), .name = "sweep", .absent = "z dz"},
    {SSD(.H = 2, .P = 72, .N = 160, .softplus = 1), .name = "sweep", .absent = "z dz"},
    {SSD(.H = 5, .P = 64, .N = 128, .softplus = 1), .name = "sweep", .absent = "z dz"},
    {SSD(.H = 8, .P = 72, .N = 64, .G = 2, .softplus = 1, .Dskip_per_channel = 1), .name = "sweep"},
    {SSD(.H = 6, .P = 40, .N = 16, .softplus = 1), .name = "sweep", .absent = "z dz"},
    {SSD(.H = 3, .P = 64, .N = 128, .softplus = 1, .state_in_shared = 1), .name = "sweep"},
    {SSD(.H = 2, .P = 40, .N = 208, .softplus = 1), .name = "sweep"},
    {SSD(.H = 6, .P = 40, .N = 16, .softplus = 1), .name = "sweep"},
    {SSD(.H = 5, .P = 64, .N = 128, .softplus = 1, .Dskip_per_channel = 1), .name = "sweep"},
    {SSD(.H = 4, .P = 72, .N = 48, .G = 2, .softplus = 1), .name = "sweep", .absent = "dz"},
    {SSD(.H = 3, .P = 16, .N = 144, .softplus = 1), .name = "sweep", .absent = "dz"},
    {SSD(.H = 2, .P = 16, .N = 16, .softplus = 1), .name = "sweep"},
    /* N > 128 is computed in several launches, which pass dx on; without dx, they pass nothing on */
    {SSD(.H = 2, .P = 64, .N = 192, .softplus = 1), .name = "sweep", .absent = "z dz dx"},
    {SSD(.H = 1, .P = 64, .N = 256, .softplus = 1), .name = "sweep", .absent = "dx"},
    {.op = NULL}};

static const test_case spoilt[] = {
    {SSD(.H = 2, .P = 16, .N = 16, .softplus = 1, .dtype = GT_BF16), .name = "spoilt"},
    {SSD(.H = 2, .P = 16, .N = 48, .softplus = 1, .dtype = GT_F16), .name = "spoilt", .absent = "z dz"},
    {SSD(.H = 2, .P = 16, .N = 32, .softplus = 1, .dtype = GT_F32), .name = "spoilt", .absent = "z dz"},
    {.op = NULL}};

/* Sizes for the step kernels: N on both sides of 16, 32, 64 and 128, divisible by four or not, and rows that fill warps
 * and blocks or not.  Some cases have enough rows for the kernels that process several rows at a time. */
static const test_case steps[] = {
    {SSD(.B = 4, .H = 2, .P = 8, .N = 4, .softplus = 1), .name = "steps"},
    {SSD(.B = 2, .H = 3, .P = 5, .N = 1), .name = "steps"},
    {SSD(.B = 3, .H = 4, .P = 68, .N = 16, .G = 2, .softplus = 1, .Dskip_per_channel = 1), .name = "steps"},
    {SSD(.B = 3, .H = 2, .P = 7, .N = 15, .softplus = 1), .name = "steps"},
    {SSD(.B = 3, .H = 2, .P = 36, .N = 20, .softplus = 1, LIMITS), .name = "steps"},
    {SSD(.B = 2, .H = 2, .P = 33, .N = 31, .G = 2), .name = "steps", .absent = "z"},
    {SSD(.B = 3, .H = 4, .P = 24, .N = 64, .G = 2, .softplus = 1), .name = "steps"},
    {SSD(.B = 2, .H = 2, .P = 17, .N = 50, .softplus = 1), .name = "steps", .absent = "Dskip dt_bias"},
    {SSD(.B = 4, .H = 2, .P = 80, .N = 128, .G = 2, .softplus = 1), .name = "steps"},
    {SSD(.B = 3, .H = 6, .P = 32, .N = 128, .G = 3, .softplus = 1, .Dskip_per_channel = 1), .name = "steps",
     .absent = "z"},
    {SSD(.B = 2, .H = 1, .P = 12, .N = 100, .softplus = 1), .name = "steps"},
    {SSD(.B = 2, .H = 2, .P = 9, .N = 127, .softplus = 1), .name = "steps"},
    {SSD(.B = 3, .H = 2, .P = 64, .N = 256, .G = 2, .softplus = 1), .name = "steps"},
    {SSD(.B = 2, .H = 2, .P = 4, .N = 132, .softplus = 1), .name = "steps"},
    {SSD(.B = 2, .H = 1, .P = 6, .N = 250, .softplus = 1, .Dskip_per_channel = 1), .name = "steps"},
    /* decays near 1, and decays that forget the state at once */
    {SSD(.B = 2, .H = 4, .P = 8, .N = 128), .name = "slow steps", .fill = {{"A", -7, 1, 0, 0}}},
    {SSD(.B = 2, .H = 4, .P = 8, .N = 20), .name = "steps that forget", .fill = {{"A", 0, 0.5, -10000, 0.5}}},
    /* int8 states: warps that take several tiles of a head, and several heads */
    {SSD(.B = 2, .H = 16, .P = 28, .N = 256, .softplus = 1), .name = "steps"},
    {SSD(.B = 4, .H = 32, .P = 32, .N = 112, .G = 2, .softplus = 1, .Dskip_per_channel = 1), .name = "steps"},
    {SSD(.B = 4, .H = 16, .P = 64, .N = 64, .G = 4, .softplus = 1), .name = "steps", .absent = "z"},
    {SSD(.B = 5, .H = 32, .P = 8, .N = 256, .softplus = 1), .name = "steps", .fill = {{"A", -7, 1, 0, 0}}},
    {.op = NULL}};

#define STEP_KERNELS(type, mixed)                                                                                      \
    "ssd::step_kernel<" type ", 4, 1, 8, " mixed ">", "ssd::step_kernel<" type ", 8, 1, 8, " mixed ">",                \
        "ssd::step_kernel<" type ", 16, 1, 8, " mixed ">", "ssd::step_kernel<" type ", 16, 2, 4, " mixed ">",          \
        "ssd::step_kernel<" type ", 32, 2, 4, " mixed ">"
#define WIDE_STEP_KERNELS(type, mixed)                                                                                 \
    "ssd::step_kernel<" type ", 16, 2, 8, " mixed ">", "ssd::step_kernel<" type ", 32, 2, 8, " mixed ">"
#define ALL_STEP_KERNELS(type)                                                                                         \
    STEP_KERNELS(type, "false"), STEP_KERNELS(type, "true"), WIDE_STEP_KERNELS(type, "false"),                         \
        WIDE_STEP_KERNELS(type, "true")
#define SOME_INT8_STEP_KERNELS(type, random)                                                                           \
    "ssd::step_int8_kernel<" type ", 4, " random ">", "ssd::step_int8_kernel<" type ", 8, " random ">",                \
        "ssd::step_int8_kernel<" type ", 16, " random ">"
#define INT8_STEP_KERNELS(type) SOME_INT8_STEP_KERNELS(type, "false"), SOME_INT8_STEP_KERNELS(type, "true")
static const char *const step_kernels[] = {INT8_STEP_KERNELS("float"),
                                           INT8_STEP_KERNELS("gt::bf16"),
                                           INT8_STEP_KERNELS("gt::f16"),
                                           INT8_STEP_KERNELS("gt::ssm::AnyType"),
                                           ALL_STEP_KERNELS("float"),
                                           ALL_STEP_KERNELS("gt::bf16"),
                                           ALL_STEP_KERNELS("gt::f16"),
                                           STEP_KERNELS("gt::ssm::AnyType", "true"),
                                           NULL};

/* More than 65535 batch elements or heads, the largest size of some dimensions of a grid. */
static const test_case many[] = {{SSD(.B = 70000, .T = 2, .H = 1, .P = 2, .N = 2), .name = "many"},
                                 {SSD(.B = 1, .T = 2, .H = 70000, .P = 2, .N = 2, .G = 70000), .name = "many"},
                                 {.op = NULL}};

/* Sums over many tokens or batch elements.  The means of the terms are not 0, so that the sums grow with their
 * length. */
static const test_case sums[] = {
    {.op = "ssd",
     .name = "long",
     .fill = {{"x", 0.5, 1, 0, 0}, {"Bm", 0.5, 1, 0, 0}, {"Cm", 0.5, 1, 0, 0}, {"dy", 0.5, 1, 0, 0}},
     .args.ssd = {.B = 1, .T = 500000, .H = 1, .P = 2, .N = 2, .softplus = 1}},
    {.op = "ssd",
     .name = "many, a skip for each channel",
     .fill = {{"dstate_out", 0.5, 1, 0, 0}, {"x", 0.5, 1, 0, 0}, {"dy", 0.5, 1, 0, 0}},
     .args.ssd = {.B = 300000, .T = 1, .H = 1, .P = 2, .N = 2, .Dskip_per_channel = 1, .state_in_shared = 1}},
    {.op = NULL}};

static void draw(test_random *r, int64_t most, test_case *c) {
    gt_ssd_args *a = &c->args.ssd;
    a->G = 1 + test_pick(r, 3);
    a->H = a->G * (1 + test_pick(r, 3));
    a->P = 1 + test_pick(r, most);
    a->N = 1 + test_pick(r, most);
    a->softplus = (int)test_pick(r, 2);
    a->Dskip_per_channel = (int)test_pick(r, 2);
    a->state_in_shared = (int)test_pick(r, 2);
    a->pieces = test_pick(r, 12);
    c->absent = test_pick_absent(r, test_ssm_absent);
}

/* ---- properties of only this operator ---------------------------------------------------------- */

/* If dt equals a limit exactly, the gradient passes through; beyond the limit, the gradient is 0. */
static void limits_hold(const test_runner *r, const test_case *c, double tolerance) {
    static const double inside[] = {0.25, 0.3125, 0.5}, outside[] = {0.125, 0.75, 0.25 - 0x1p-8};
    test_case limited = *c, free_case = *c;
    limited.args.ssd.softplus = free_case.args.ssd.softplus = free_case.args.ssd.dt_limit = 0;
    limited.args.ssd.dt_limit = 1;
    limited.args.ssd.dt_min = 0.25f;
    limited.args.ssd.dt_max = 0.5f;
    for (int pass = GT_FORWARD; pass <= GT_BACKWARD; pass++) {
        for (int is_outside = 0; is_outside < 2; is_outside++) {
            const gt_tensor *t = test_tensor_of(c, "dt");
            int64_t count = test_count(c, (gt_pass)pass, t);
            test_values in, got, expected;
            double *dt, *ddt, *ddt_bias;
            test_inputs(c, (gt_pass)pass, &in);
            test_set_array(&in, c, "dt_bias", NULL);
            dt = *test_array_of(&in, c, "dt");
            for (int64_t i = 0; i < count; i++) dt[i] = (is_outside ? outside : inside)[i % 3];
            test_run(r, &limited, (gt_pass)pass, &in, TEST_ALL, &got);
            for (int64_t i = 0; i < count; i++) dt[i] = fmin(fmax(dt[i], 0.25), 0.5);
            test_run(r, &free_case, (gt_pass)pass, &in, TEST_ALL, &expected);
            ddt = *test_array_of(&expected, c, "ddt");
            ddt_bias = *test_array_of(&expected, c, "ddt_bias");
            for (int64_t i = 0; ddt && is_outside && i < count; i++) ddt[i] = 0;
            for (int64_t h = 0; ddt_bias && is_outside && h < c->args.ssd.H; h++) ddt_bias[h] = 0;
            test_same(r, &limited, (gt_pass)pass, is_outside ? "beyond the limits" : "at the limits", &got, &expected,
                      tolerance);
            test_free(&in), test_free(&got), test_free(&expected);
        }
    }
}

static const test_property properties[] = {{"dt at and beyond its limits", TEST_TINY, limits_hold},
                                           {NULL, TEST_TINY, NULL}};

/* Numbers of tokens beyond one chunk (64 tokens) and one slot (128 tokens) of the tensor-core kernels.  `launched`
 * lists the kernels that calls with these times must launch. */
static const int64_t more_times[] = {100, 130, 200, 300, 600, -1};
static const char *const launched[] = {"forward_tensor_kernel",
                                       "forward_fp32_kernel",
                                       "forward_fp32_hopper_kernel",
                                       "states_fp32_kernel",
                                       "states_fp32_hopper_kernel",
                                       "ssd::forward_hopper_kernel",
                                       "ssd::states_tensor_kernel",
                                       "ssd::states_hopper_kernel",
                                       "ssd::gate_kernel",
                                       "gate_lost_kernel",
                                       "chunk_gradient_kernel",
                                       "chunk_gradient_hopper_kernel",
                                       "chunk_gradient_fp32_kernel",
                                       "chunk_gradient_fp32_hopper_kernel",
                                       "chunk_times_fp32_kernel",
                                       "chunk_factors_kernel",
                                       "chunk_times_kernel",
                                       "reduce_rows_kernel",
                                       NULL};

/* Cases for forward_maps_kernel, which needs many heads that share B and C. */
#define MANY_HEADS(tokens, heads) SSD(.B = 1, .T = tokens, .H = heads, .P = 64, .N = 80, .softplus = 1
static const test_case launching[] = {
    {MANY_HEADS(130, 16), .dtype = GT_BF16), .name = "ssd::forward_maps_kernel<gt::bf16, 128, 4, 1>"},
    {MANY_HEADS(260, 16), .segments = 2, .dtype = GT_F16), .name = "ssd::forward_maps_kernel<gt::f16, 128, 4, 1>"},
    {MANY_HEADS(130, 48), .dtype = GT_BF16), .name = "ssd::forward_maps_kernel<gt::bf16, 128, 4, 0>", .absent = "z dz"},
    {MANY_HEADS(130, 48), .dtype = GT_F16), .name = "ssd::forward_maps_kernel<gt::f16, 128, 4, 0>", .absent = "z dz"},
    {.op = NULL}};

/* ---- the formula, written out a second way ---------------------------------------------------- */

static double delta(const formula *f, int64_t b, int64_t t, int64_t h) {
    const gt_ssd_args *a = &f->c->args.ssd;
    double s = formula_value(f, "dt", b, t, h, 0) + formula_value(f, "dt_bias", h, 0, 0, 0);
    if (a->softplus) s = log(1 + exp(s));
    return a->dt_limit ? fmin(fmax(s, a->dt_min), a->dt_max) : s;
}

static double x(const formula *f, int64_t b, int64_t t, int64_t h, int64_t p) {
    return formula_value(f, "x", b, t, h, p);
}

static double state_in(const formula *f, int64_t row, int64_t h, int64_t p, int64_t n) {
    return formula_value(f, "state_in", row, h, p, n);
}

static formula_ssm ssm_of(const formula *f) {
    const gt_ssd_args *a = &f->c->args.ssd;
    return (formula_ssm){a->H, a->G, a->N, delta, x, state_in};
}

static double y(const formula *f, int64_t b, int64_t t, int64_t h, int64_t p) {
    const formula_ssm s = ssm_of(f);
    return formula_ssm_y(f, &s, b, t, h, p, formula_value(f, "Dskip", h, p, 0, 0), formula_value(f, "z", b, t, h, p));
}

static double state_out(const formula *f, int64_t row, int64_t h, int64_t p, int64_t n) {
    const formula_ssm s = ssm_of(f);
    return formula_ssm_state_out(f, &s, row, h, p, n);
}

static const test_formula formulas[] = {{"y", y}, {"state_out", state_out}, {NULL, NULL}};

/* ---- rows of the bench ----------------------------------------------------------------------- */

#define ROW(types, label, missing, ...)                                                                                \
    { {.op = "ssd", .name = label, .absent = missing, .args.ssd = {.softplus = 1, __VA_ARGS__}}, types }

static const test_bench_row host_rows[] = {
    ROW(TEST_F32 | TEST_BF16, "", "z dz " NO_STATES, .B = 8, .T = 256, .H = 4, .P = 64, .N = 64),
    ROW(TEST_F32 | TEST_BF16, "", "z dz", .B = 8, .T = 1, .H = 4, .P = 64, .N = 64),
    {{.op = NULL}, 0}};

/* 64 packed sequences of 64 to 2,048 tokens each, with 32,768 tokens in all. */
static const int64_t packed_lengths[] = {341, 66,  720, 93,   1375, 193,  64,  431, 70,  883,  113,  1639, 247,
                                         64,  540, 77,  1074, 141,  1939, 315, 65,  671, 88,   1294, 178,  64,
                                         399, 68,  826, 106,  1547, 227,  64,  501, 74,  1007, 130,  1835, 290,
                                         65,  625, 84,  1217, 165,  64,   369, 67,  771, 99,   1459, 210,  64,
                                         465, 72,  959, 121,  1735, 268,  65,  581, 80,  1144, 152,  2048};

/* The dtypes of state and parameters with which a bf16 model runs a step. */
#define SMALL_STATE .state_dtype = GT_BF16, .parameter_dtype = GT_BF16
#define INT8_STATE .state_dtype = GT_INT8, .parameter_dtype = GT_BF16

static const test_bench_row gpu_rows[] = {
    ROW(TEST_F32 | TEST_BF16 | TEST_F16, "", "z dz " NO_STATES, .B = 64, .T = 256, .H = 4, .P = 64, .N = 64),
    ROW(TEST_BF16, "", "z dz " NO_STATES, .B = 64, .T = 256, .H = 8, .P = 64, .N = 64),
    ROW(TEST_BF16, "", "z dz " NO_STATES, .B = 8, .T = 1024, .H = 64, .P = 64, .N = 128),
    ROW(TEST_BF16, "", "z dz " NO_STATES, .B = 8, .T = 2048, .H = 64, .P = 64, .N = 128),
    ROW(TEST_F32 | TEST_BF16, "", "z dz " NO_STATES, .B = 8, .T = 4096, .H = 64, .P = 64, .N = 128),
    ROW(TEST_BF16, "G8", "z dz " NO_STATES, .B = 8, .T = 4096, .H = 64, .P = 64, .N = 128, .G = 8),
    ROW(TEST_BF16, "", "z dz " NO_STATES, .B = 1, .T = 32768, .H = 64, .P = 64, .N = 128),
    ROW(TEST_BF16, "", "z dz " NO_STATES, .B = 1, .T = 16384, .H = 8, .P = 64, .N = 128),
    ROW(TEST_BF16, "", "z dz " NO_STATES, .B = 8, .T = 4096, .H = 64, .P = 64, .N = 64),
    ROW(TEST_BF16, "", "z dz " NO_STATES, .B = 8, .T = 4096, .H = 128, .P = 64, .N = 16),
    ROW(TEST_BF16, "", "z dz " NO_STATES, .B = 8, .T = 4096, .H = 32, .P = 128, .N = 128),
    ROW(TEST_BF16, "", "z dz " NO_STATES, .B = 8, .T = 4096, .H = 32, .P = 80, .N = 128),
    ROW(TEST_BF16, "", "z dz " NO_STATES, .B = 8, .T = 4096, .H = 32, .P = 32, .N = 128),
    ROW(TEST_BF16, "", "z dz " NO_STATES, .B = 8, .T = 4096, .H = 64, .P = 64, .N = 256),
    ROW(TEST_BF16, "G64", "z dz " NO_STATES, .B = 8, .T = 4096, .H = 64, .P = 64, .N = 64, .G = 64),
    {{.op = "ssd",
      .name = "64 packed",
      .absent = "z dz " NO_STATES,
      .packed = {64, packed_lengths},
      .args.ssd = {.softplus = 1, .B = 1, .T = 32768, .H = 64, .P = 64, .N = 128, .seq_capacity = 64}},
     TEST_BF16},
    ROW(TEST_BF16, "z", NO_STATES, .B = 64, .T = 256, .H = 8, .P = 64, .N = 64),
    ROW(TEST_BF16, "z", NO_STATES, .B = 8, .T = 1024, .H = 64, .P = 64, .N = 128),
    ROW(TEST_BF16, "z", NO_STATES, .B = 8, .T = 2048, .H = 64, .P = 64, .N = 128),
    ROW(TEST_BF16, "z", NO_STATES, .B = 8, .T = 4096, .H = 64, .P = 64, .N = 128),
    ROW(TEST_BF16, "G8 z", NO_STATES, .B = 8, .T = 4096, .H = 64, .P = 64, .N = 128, .G = 8),
    ROW(TEST_BF16, "z", NO_STATES, .B = 1, .T = 32768, .H = 64, .P = 64, .N = 128),
    ROW(TEST_BF16, "z", NO_STATES, .B = 1, .T = 16384, .H = 8, .P = 64, .N = 128),
    ROW(TEST_BF16, "z", NO_STATES, .B = 8, .T = 4096, .H = 64, .P = 64, .N = 64),
    ROW(TEST_BF16, "z", NO_STATES, .B = 8, .T = 3750, .H = 8, .P = 64, .N = 64),
    ROW(TEST_F32 | TEST_BF16, "", "z dz", .B = 8, .T = 1, .H = 4, .P = 64, .N = 64),
    ROW(TEST_BF16, "G8", "z dz", .B = 1, .T = 1, .H = 128, .P = 64, .N = 128, .G = 8),
    ROW(TEST_BF16, "G8", "z dz", .B = 8, .T = 1, .H = 128, .P = 64, .N = 128, .G = 8),
    ROW(TEST_BF16, "G8", "z dz", .B = 64, .T = 1, .H = 128, .P = 64, .N = 128, .G = 8),
    ROW(TEST_BF16, "G8", "z dz", .B = 64, .T = 4, .H = 128, .P = 64, .N = 128, .G = 8),
    ROW(TEST_BF16, "G8", "z dz", .B = 64, .T = 16, .H = 128, .P = 64, .N = 128, .G = 8),
    ROW(TEST_BF16, "G8", "z dz", .B = 256, .T = 1, .H = 128, .P = 64, .N = 128, .G = 8),
    ROW(TEST_BF16, "G8", "z dz", .B = 64, .T = 1, .H = 128, .P = 80, .N = 128, .G = 8),
    ROW(TEST_BF16, "G8 small", "z dz", .B = 1, .T = 1, .H = 128, .P = 64, .N = 128, .G = 8, SMALL_STATE),
    ROW(TEST_BF16, "G8 small", "z dz", .B = 64, .T = 1, .H = 128, .P = 64, .N = 128, .G = 8, SMALL_STATE),
    ROW(TEST_BF16, "G8 small", "z dz", .B = 256, .T = 1, .H = 128, .P = 64, .N = 128, .G = 8, SMALL_STATE),
    ROW(TEST_BF16, "G8 int8", "z dz", .B = 1, .T = 1, .H = 128, .P = 64, .N = 128, .G = 8, INT8_STATE),
    ROW(TEST_BF16, "G8 int8", "z dz", .B = 64, .T = 1, .H = 128, .P = 64, .N = 128, .G = 8, INT8_STATE),
    ROW(TEST_BF16, "G8 int8", "z dz", .B = 256, .T = 1, .H = 128, .P = 64, .N = 128, .G = 8, INT8_STATE),
    ROW(TEST_BF16, "G2", "z dz", .B = 64, .T = 1, .H = 32, .P = 128, .N = 256, .G = 2),
    ROW(TEST_BF16, "", "z dz", .B = 64, .T = 1, .H = 64, .P = 128, .N = 64),
    TEST_PACKED_ROWS(ssd, "z dz " NO_STATES, .softplus = 1, .H = 8, .P = 64, .N = 128),
    ROW(TEST_BF16, "", "z dz", .B = 8, .T = 4096, .H = 64, .P = 64, .N = 128, .pieces = 8),
    ROW(TEST_BF16, "", "z dz", .B = 1, .T = 16384, .H = 8, .P = 64, .N = 128, .pieces = 8),
    ROW(TEST_BF16, "", "z dz", .B = 8, .T = 2048, .H = 32, .P = 64, .N = 64, .pieces = 8),
    {{.op = NULL}, 0}};

static const test_bench_draw draws[] = {
    TEST_SSM_DRAWS, {"piece_decays", {0, -3, 1}}, {"state_scale", {1, 0.02f, 0.01f}}, {NULL, {0, 0, 0}}};
static const test_bench_cut cuts[] = {{"H", 2}, {"NB", 2}, {NULL, 0}};

/* ---- the operator ---------------------------------------------------------------------------- */

static void set_exact(test_case *c) {
    c->args.ssd.softplus = c->args.ssd.dt_limit = 0;
    c->absent = "Dskip dt_bias";
}

const test_op test_op_ssd = {
    TEST_IN_PIECES(ssd),
    .reads_y = AT(ssd, reads_y),
    .optional_size = {AT(ssd, G), 2},
    .large = {SSD(.B = 1, .T = 130, .H = 5, .P = 64, .N = 32, .softplus = 1, .segments = 1)},
    .set_fill = set_fill,
    .set_regime = test_set_ssm_regime,
    .reach = {64, 64},
    .has_exact_prefill = 1,
    .spoilt = spoilt,
    .bounds_pairs = 1,
    /* the documented errors: kernels round the factors of products, and the terms of ddt, to fp16 with its 11 bits */
    .kernels = {{0, 1e-5, 2.5e-3, 1e-3}, {0, 1e-5, 5e-4, 5e-4}, {0, 1e-5, 2.5e-3, 1e-3}, {0, 1e-5, 1e-3, 1e-3}, 1},
    /* dstate_in of one piece lacks the gradient of the state after the piece.  Only its sums over tokens remain, with
     * terms of both signs, so an element may be much smaller than its terms. */
    .differences = {[GT_SEGMENT_BACKWARD] = "dstate_in"},
    .properties = properties,
    .steps = steps,
    .exact = {"A", "dt", set_exact},
    .step_kernels = step_kernels,
    .more_times = more_times,
    .launched = launched,
    .launching = launching,
    .bench_draws = draws,
    .bench_cuts = cuts,
    .operations = {"BTHPN", 4, 12},
};
