/* Tests the CPU twins through their public functions, in fp32, bf16 and fp16.  Compares them with the double twins on
 * the same rounded inputs, and checks properties that hold for any numbers.
 *
 *     test_cpu [short] [OP]
 *
 * With `short` the test makes fewer checks.  Each case runs with only one combination of dtypes, the next in turn, and
 * with two of the four numbers of pieces.  Fewer random cases run.  Results of one thread are compared only with
 * results of five threads. */
#include "gt_invariants.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

static const gt_dtype dtypes[][2] = {
    /* dtypes of activations, and of w or dt; 0: the same */
    {GT_F32, 0},
    {GT_BF16, 0},
    {GT_BF16, GT_F32},
    {GT_F16, 0},
    {GT_F16, GT_F32}};
enum { DTYPES = sizeof dtypes / sizeof dtypes[0], DRAWN = 100, DRAWN_SHORT = 10, DRAWN_SIZE = 20 };

static int is_short;

/* Sets the d-th combination of dtypes.  Returns 0 if the operator does not take it. */
static int set_dtypes(test_case *c, int d) {
    if (dtypes[d][1] && !test_table(c)->companion_offset) return 0;
    test_set_dtype(c, dtypes[d][0], dtypes[d][1]);
    return 1;
}

/* Calls check(case) for the cases of a table up to a level, with the d-th dtypes.  d = -1: each case has the next
 * dtypes that the operator takes. */
static void for_table(const test_case *table, test_level level, int d, void (*check)(const test_case *c)) {
    static int turn;
    for (const test_case *at = table; at && at->op; at++) {
        test_case c = *at;
        if (c.level > level) continue;
        if (d < 0)
            while (!set_dtypes(&c, turn++ % DTYPES)) continue;
        else if (!set_dtypes(&c, d))
            continue;
        check(&c);
    }
}

/* Calls check(case) for the operator's plain and packed cases. */
static void for_cases(const test_op *op, test_level level, int d, void (*check)(const test_case *c)) {
    for_table(op->cases, level, d, check);
    for_table(op->packed, level, d, check);
}

static void for_all_dtypes(const test_op *op, test_level level, void (*check)(const test_case *c)) {
    for (int d = is_short ? -1 : 0; d < (is_short ? 0 : DTYPES); d++) for_cases(op, level, d, check);
}

static void truth_holds(const test_case *c) { test_truth_holds(&test_twin, c); }
static void repeats(const test_case *c) { test_repeats(&test_twin, c); }
static void layouts_agree(const test_case *c) { test_layouts_agree(&test_twin, c, 0); }
static void in_place_agrees(const test_case *c) { test_in_place_agrees(&test_twin, c, 0); }
static void alone_agrees(const test_case *c) { test_alone_agrees(&test_twin, c, 0); }
static void null_agrees(const test_case *c) { test_null_agrees(&test_twin, c, 0); }
static void accumulate_adds(const test_case *c) { test_accumulate_adds(&test_twin, c); }
static void shared_agrees(const test_case *c) { test_shared_agrees(&test_twin, c, 0); }
static void pools_agree(const test_case *c) {
    for (int kind = 0; kind < 3; kind++) test_pools_agree(&test_twin, c, kind);
}
static void small_states_agree(const test_case *c) {
    for (int kind = 0; kind < 4 + 20 * test_is_packed(c); kind++) test_small_states_agree(&test_twin, c, kind);
}
static void snapshots_agree(const test_case *c) {
    static int turn;
    for (int kind = is_short ? turn++ % 2 : 0; kind < 12; kind += is_short ? 2 : 1) {
        test_case one = *c;
        test_suit_snapshots(&one, kind < 6 && kind % 2 ? 2 : 0);
        test_snapshots_agree(&test_twin, &one, kind, 0);
    }
}
static void batch_splits(const test_case *c) { test_batch_splits(&test_twin, c, 0); }
/* The tolerance of the twin's steps against its forward. */
static double step_tolerance(const test_case *c) {
    return test_op_of(c->op)->step_tolerance[test_dtype_of(c, &test_table(c)->tensors[0])];
}

static void step_agrees(const test_case *c) { test_step_agrees(&test_twin, c, step_tolerance(c)); }

static void server_agrees(const test_case *c) { test_server_agrees(&test_twin, c, 12); }

static void nonfinite_stays(const test_case *c) {
    const int64_t middle = test_get_size(c, 'T') / 2, at[2] = {middle, middle};
    test_nonfinite_stays(&test_twin, c, at, 0, 1, 0);
}

static void pieces_agree(const test_case *c) {
    static const int64_t counts[] = {1, 2, 3, 8};
    test_runner exact = test_truth;
    for (int i = 1; i < 4; i++) exact.tolerance.activations[i] = exact.tolerance.parameters[i] = 1e-11;
    for (int i = 1; i < 4; i++) exact.tolerance.companions[i] = 1e-11, exact.tolerance.terms[i] = 1e-13;
    static int turn;
    const int first = is_short ? turn++ % 2 : 0, step = is_short ? 2 : 1;
    for (int i = first; i < 4; i += step)
        test_pieces_agree(&test_twin, c, counts[i]), test_pieces_agree(&exact, c, counts[i]);
}

static void time_splits(const test_case *c) {
    int64_t T = test_get_size(c, 'T');
    double tolerance = test_op_of(c->op)->split_tolerance[test_dtype_of(c, &test_table(c)->tensors[0])];
    for (int64_t at = 0; at <= T; at += T > 20 ? 21 : 1) test_time_splits(&test_twin, c, at, tolerance);
    test_time_splits(&test_twin, c, 64, tolerance);
}

/* Tests prefill and steps with every split of a short sequence, and with some splits of a long one. */
static void steps_agree(const test_case *c) {
    int64_t T = test_get_size(c, 'T'), stride = T > 20 ? 21 : 1;
    double tolerance = step_tolerance(c);
    for (int64_t at = 0; at <= T; at += stride) {
        test_steps_agree(&test_twin, c, at, 1 + at / stride % 3, tolerance);
        test_steps_agree(&test_twin, c, at, 16, tolerance);
    }
}

#ifdef _OPENMP
static void check_threads(const test_case *c) {
    for (int pass = GT_FORWARD; pass < GT_PASSES; pass++) {
        test_values in, one, many;
        if (!test_has_pass(c, (gt_pass)pass)) continue;
        test_inputs(c, (gt_pass)pass, &in);
        omp_set_num_threads(1);
        test_run(&test_twin, c, (gt_pass)pass, &in, TEST_ALL, &one);
        for (int threads = is_short ? 5 : 2; threads <= 5; threads += 3) {
            omp_set_num_threads(threads);
            test_run(&test_twin, c, (gt_pass)pass, &in, TEST_ALL, &many);
            test_same(&test_twin, c, (gt_pass)pass, "more threads", &many, &one, 0);
            test_free(&many);
        }
        test_free(&in), test_free(&one);
    }
    omp_set_num_threads(omp_get_num_procs());
}
#endif

/* ---- host conversions ------------------------------------------------------------------------ */

/* A 16-bit format: `fraction` bits after the leading bit, and exponents from `lowest` to `highest`. */
typedef struct format {
    const char *name;
    int fraction, lowest, highest;
    float (*to_f32)(uint16_t bits);
    uint16_t (*from_f32)(float value);
} format;

static const format formats[] = {{"bf16", 7, -126, 127, gt_bf16_to_f32, gt_f32_to_bf16},
                                 {"fp16", 10, -14, 15, gt_f16_to_f32, gt_f32_to_f16}};

/* The value of a bit pattern, computed from its sign, exponent and fraction. */
static double decode(const format *f, uint32_t bits) {
    int one = 1 << f->fraction, exponent = (int)(bits & 0x7fff) >> f->fraction;
    int significand = (int)(bits & 0x7fff) & (one - 1), top = f->highest - f->lowest + 2;
    double x = exponent ? ldexp(one + significand, f->lowest - f->fraction + exponent - 1)
                        : ldexp(significand, f->lowest - f->fraction);
    if (exponent == top) x = significand ? NAN : INFINITY;
    return bits & 0x8000 ? -x : x;
}

/* The nearest number of the format.  It is a multiple of the unit in the last place; ties go to the even multiple. */
static double nearest(const format *f, double x) {
    int exponent;
    double unit, y;
    frexp(x, &exponent);
    exponent = exponent - 1 < f->lowest ? f->lowest : exponent - 1;
    unit = ldexp(1, exponent - f->fraction);
    y = isfinite(x) ? rint(x / unit) * unit : x;
    return fabs(y) >= ldexp(1, f->highest + 1) ? copysign(INFINITY, y) : y;
}

static int same(double a, double b) { return isnan(a) ? isnan(b) : a == b && !signbit(a) == !signbit(b); }

static int rounds(const format *f, float x) { return same(f->to_f32(f->from_f32(x)), isnan(x) ? NAN : nearest(f, x)); }

static void check_format(const format *f) {
    int64_t bad_value = 0, bad_return = 0, bad_tie = 0, bad_random = 0;
    test_random r = {1};
    for (uint32_t bits = 0; bits < 0x10000; bits++) {
        double x = decode(f, bits);
        float y = f->to_f32((uint16_t)bits);
        bad_value += !same(y, x);
        bad_return += isnan(y) ? !isnan(f->to_f32(f->from_f32(y))) : f->from_f32(y) != bits;
    }
    /* numbers in the middle between two neighbours of the format, and the fp32 numbers next to the middle */
    for (uint32_t bits = 0; bits < 0x8000; bits++) {
        double low = decode(f, bits), high = decode(f, bits + 1);
        float tie = (float)(isfinite(high) ? (low + high) / 2 : low);
        if (!isfinite(low)) break;
        for (int sign = -1; sign <= 1; sign += 2)
            bad_tie += !rounds(f, (float)sign * tie) + !rounds(f, (float)sign * nextafterf(tie, 0)) +
                       !rounds(f, (float)sign * nextafterf(tie, INFINITY));
    }
    for (int i = 0; i < 1000000; i++) {
        uint32_t bits = (uint32_t)test_next(&r);
        /* gives every second pattern an exponent near fp16's range */
        if (i % 2) bits = (bits & 0x807fffff) | (90 + (bits >> 23) % 60) << 23;
        bad_random += !rounds(f, gt_bits_float(bits));
    }
    test_check(!bad_value, "%s: %lld patterns have wrong values", f->name, (long long)bad_value);
    test_check(!bad_return, "%s: %lld patterns do not return", f->name, (long long)bad_return);
    test_check(!bad_tie, "%s: %lld halfway values are rounded wrongly", f->name, (long long)bad_tie);
    test_check(!bad_random, "%s: %lld random values are rounded wrongly", f->name, (long long)bad_random);
    test_check(rounds(f, 65519.996f) && rounds(f, 65520) && rounds(f, 3.3953e38f) && rounds(f, INFINITY) &&
                   rounds(f, -INFINITY) && rounds(f, 3.4028234e38f),
               "%s: the largest numbers are rounded wrongly", f->name);
    test_group(f->name, "host conversions");
}

/* ---- the twins ------------------------------------------------------------------------------- */

static void check_property(const test_op *op, const test_property *p) {
    for (int d = 0; d < DTYPES; d++)
        for (int packed = 0; packed < 2; packed++)
            for (const test_case *at = packed ? op->packed : op->cases; at && at->op; at++) {
                test_case c = *at;
                if (is_short && (at - (packed ? op->packed : op->cases)) % DTYPES != d) continue;
                if (c.level <= p->level && set_dtypes(&c, d)) p->check(&test_twin, &c, 0);
            }
    test_group(op->name, p->what);
}

static void check_operator(const test_op *op) {
    const uint64_t drawn = is_short ? DRAWN_SHORT : DRAWN;
    for_cases(op, is_short ? TEST_SMALL : TEST_MEDIUM, 0, truth_holds);
    test_group(op->name, "fp32 against the truth");
    for (int d = is_short ? -1 : 1; d < (is_short ? 0 : DTYPES); d++) for_cases(op, TEST_MEDIUM, d, truth_holds);
    test_group(op->name, "bf16 and fp16 against the truth");
    for (uint64_t seed = 1; seed <= drawn; seed++) {
        test_case c;
        test_draw_case(op, seed, DRAWN_SIZE, &c);
        test_set_dtype(&c, dtypes[seed % DTYPES][0], dtypes[seed % DTYPES][1]);
        truth_holds(&c);
    }
    for (uint64_t seed = 1; test_takes_packed(op) && seed <= drawn; seed++) {
        test_case c;
        test_draw_packed(op, seed, DRAWN_SIZE, &c);
        test_set_dtype(&c, dtypes[seed % DTYPES][0], dtypes[seed % DTYPES][1]);
        truth_holds(&c);
        batch_splits(&c);
    }
    test_group(op->name, "random cases against the truth");
    const test_level medium = is_short ? TEST_SMALL : TEST_MEDIUM, small = is_short ? TEST_TINY : TEST_SMALL;
    for_all_dtypes(op, medium, repeats);
    test_group(op->name, "a second run gives the same bits");
    for_all_dtypes(op, small, layouts_agree);
    test_group(op->name, "every layout gives the same bits");
    for_all_dtypes(op, small, in_place_agrees);
    test_group(op->name, "in place gives the same bits");
    for_all_dtypes(op, small, alone_agrees);
    test_group(op->name, "each output asked for alone");
    for_all_dtypes(op, small, null_agrees);
    test_group(op->name, "NULL is the constant stated");
    for_cases(op, small, 0, accumulate_adds);
    test_group(op->name, "accumulate adds");
    for_all_dtypes(op, small, batch_splits);
    test_group(op->name, "batch elements and packed sequences, one by one");
    if (test_is_over_time(op)) {
        for_all_dtypes(op, small, shared_agrees);
        test_group(op->name, "a shared state is one for each");
        for_cases(op, small, 0, time_splits);
        for_cases(op, small, 1, time_splits);
        test_group(op->name, "the time cut in two");
        for_all_dtypes(op, small, pools_agree);
        test_group(op->name, "states in pools");
        if (op->table()->of_steps.passes != GT_STATES_OF_STEP) {
            for_all_dtypes(op, small, small_states_agree);
            test_group(op->name, "forward with states of 16 bits");
        }
    }
    if (op->table()->of_steps.snapshot) {
        for_all_dtypes(op, TEST_TINY, snapshots_agree);
        test_group(op->name, "snapshots are states of prefixes");
    }
    if (op->twin[GT_STEP] && test_is_over_time(op)) {
        for_all_dtypes(op, small, step_agrees);
        test_group(op->name, "a step is a forward");
        for_all_dtypes(op, small, steps_agree);
        test_group(op->name, "prefill at any split, then steps");
        for (int d = is_short ? -1 : 0; d < (is_short ? 0 : DTYPES); d++)
            for_table(op->steps, TEST_TINY, d, server_agrees);
        test_group(op->name, "a server of speculative decoding");
    }
    if (op->table()->fields.pieces) {
        for_all_dtypes(op, small, pieces_agree);
        for_cases(op, medium, 0, pieces_agree);
        test_group(op->name, "a sequence in pieces");
    }
    for_cases(op, TEST_TINY, -1, nonfinite_stays);
    test_group(op->name, "a NaN or infinity reaches what depends on it");
    for (const test_property *p = op->properties; p && p->what; p++) check_property(op, p);
#ifdef _OPENMP
    for_cases(op, medium, 0, check_threads);
    test_group(op->name, "any number of threads gives the same bits");
#endif
}

int main(int argc, char **argv) {
    is_short = argc > 1 && !strcmp(argv[1], "short");
    argc -= is_short, argv += is_short;
    for (int i = 0; i < 2 && argc < 2; i++) check_format(&formats[i]);
    for (int i = 0; test_ops[i]; i++)
        if (argc < 2 || !strcmp(argv[1], test_ops[i]->name)) check_operator(test_ops[i]);
    return test_finish();
}
