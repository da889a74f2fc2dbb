/* Tests the rounding of states to int8, and stochastic rounding.  Compares Philox4x32-10 with the known answers of
 * Random123 (its file kat_vectors).  Checks to which neighbours numbers round, and with which probabilities. */
#include "gt_test.h"

#include "gt/recurrence/rounding.h"

#include <math.h>
#include <string.h>

static void check_philox(void) {
    static const uint32_t pi[] = {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0};
    static const uint32_t answers[3][4] = {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
                                           {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
                                           {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}};
    for (int i = 0; i < 3; i++) {
        uint32_t c[6];
        for (int k = 0; k < 6; k++) c[k] = i == 0 ? 0 : i == 1 ? UINT32_MAX : pi[k];
        const gt_random r = gt_philox(c[0], c[1], c[2], c[3], c[4], c[5]);
        for (int k = 0; k < 4; k++)
            test_check(r.word[k] == answers[i][k], "Philox4x32-10: word %d of answer %d is %08x, not %08x", k, i,
                       r.word[k], answers[i][k]);
    }
    const int32_t seed[] = {(int32_t)0xa4093822, 0x299f31d0};
    const gt_random a = gt_random_of_group(seed, -5, ((int64_t)7 << 32) + 3);
    const gt_random b = gt_philox(3, 7, (uint32_t)-5, 0, 0xa4093822, 0x299f31d0);
    test_check(!memcmp(&a, &b, sizeof a), "a group's counter is not {group, group >> 32, step, 0}");
    test_group("rounding", "known answers of Philox4x32-10");
}

static double value_of(uint32_t half, gt_dtype dtype) {
    return dtype == GT_BF16 ? gt_bf16_to_f32((uint16_t)half) : gt_f16_to_f32((uint16_t)half);
}

/* Checks that x rounds to its neighbours a and b among the 16-bit numbers, where a is nearer to 0.  With fraction = (x
 * - a) / (b - a), x must round to b for random words below 2^32 fraction, and to a for all others. */
static void check_number(float x, gt_dtype dtype) {
    const uint32_t bits = gt_float_bits(x), low = gt_round_to_half(bits, UINT32_MAX, dtype);
    const double a = value_of(low, dtype), b = value_of(low + 1, dtype);
    const double fraction =
        (x - a) / (isinf(b) ? (dtype == GT_BF16 ? ldexp(copysign(1, x), 120) : copysign(32, x)) : b - a);
    const uint32_t limit = (uint32_t)floor(fraction * 0x1p32);
    int ok = fabs(a) <= fabs((double)x) && (fabs((double)x) < fabs(b)) && !signbit(a) == !signbit(x);
    ok &= fraction >= 0 && fraction < 1 && gt_round_to_half(bits, limit, dtype) == low;
    if (limit > 0) ok &= gt_round_to_half(bits, limit - 1, dtype) == low + 1;
    test_check(ok, "%a to %s: %a, %a with probability %g", (double)x, dtype == GT_BF16 ? "bf16" : "f16", a, b,
               fraction);
}

static void check_dtype(gt_dtype dtype, const char *name) {
    const float most = dtype == GT_BF16 ? 0x1.ffp127f : 65536;
    test_random r = {1};
    for (int i = 0; i < 100000; i++) {
        const float x = gt_bits_float((uint32_t)test_next(&r));
        if (isfinite(x) && fabsf(x) < most) check_number(x, dtype);
        const float near_one = (float)test_normal(&r) * ldexpf(1, (int)(test_next(&r) % 36) - 28);
        check_number(near_one, dtype);
    }
    const float exact[] = {0, -0.0f, 1, -3.5f, 0x1p-24f, -0x1p-14f, 0x1.8p-20f, 65280};
    for (size_t i = 0; i < sizeof exact / sizeof exact[0]; i++)
        test_check(value_of(gt_round_to_half(gt_float_bits(exact[i]), 0, dtype), dtype) == (double)exact[i],
                   "%a changes, although it is exact", (double)exact[i]);
    test_check(isinf(value_of(gt_round_to_half(0x7f800000u, 0, dtype), dtype)) &&
                   isinf(value_of(gt_round_to_half(0xff800000u, 0, dtype), dtype)) &&
                   isnan(value_of(gt_round_to_half(0x7f800001u, 0, dtype), dtype)) &&
                   isnan(value_of(gt_round_to_half(0xffffffffu, 0, dtype), dtype)),
               "infinity or NaN does not stay one");
    test_group("rounding", name);
}

/* Rounds a number of a row to the nearest int8, as the twin and the kernels do. */
static int nearest_int8(float x, gt_row_scale row) {
    return (int8_t)(gt_float_bits(fmaf(x, row.inverse, GT_INT8_NEAREST)) & 0xff);
}

/* Checks rows of random numbers.  Nearest rounding must give the nearest integer to number / scale.  Stochastic
 * rounding must give one of the two neighbours; the probability of the larger one is the distance from the smaller
 * one. */
static void check_int8(void) {
    test_random r = {7};
    for (int i = 0; i < 200000; i++) {
        const float most = ldexpf((float)(1 + test_uniform(&r)), (int)(test_next(&r) % 220) - 99);
        const float x = i % 4 ? (float)(test_uniform(&r) * 2 - 1) * most : i % 8 ? most : -most;
        const gt_row_scale row = gt_scale_of_row(most);
        const float product = x * row.inverse;
        const double exact = (double)x / (double)row.scale, low = floor(fabs((double)product));
        const uint32_t bits = gt_float_bits(product), whole = gt_round_to_int8(bits, UINT32_MAX);
        const double fraction = fabs((double)product) - low;
        /* the product is exact, because the fraction has 24 bits */
        const uint32_t limit = (uint32_t)(fraction * 0x1p32);
        test_check(fabs((double)row.scale * 127 / (double)most - 1) < 0x1p-22, "scale %a of %a", (double)row.scale,
                   (double)most);
        test_check(fabs(nearest_int8(x, row) - exact) <= 0.5 + 1e-4, "%a of a row up to %a: nearest %d, exact %g",
                   (double)x, (double)most, nearest_int8(x, row), exact);
        test_check(whole == (low > 127 ? 127 : (uint32_t)low) && gt_round_to_int8(bits, limit) == whole &&
                       (limit == 0 || whole == 127 || gt_round_to_int8(bits, limit - 1) == whole + 1),
                   "%a of a row up to %a: %u, the next with probability %g", (double)x, (double)most, whole, fraction);
    }
    const gt_row_scale zero = gt_scale_of_row(0), tiny = gt_scale_of_row(0x1.fffffep-101f),
                       least = gt_scale_of_row(0x1p-100f), largest = gt_scale_of_row(0x1.fffffep127f),
                       infinite = gt_scale_of_row(INFINITY), nan = gt_scale_of_row(NAN);
    test_check(zero.scale == 0 && zero.inverse == 0 && tiny.scale == 0 && tiny.inverse == 0, "a row near 0 is not 0");
    test_check(least.scale > 0 && nearest_int8(0x1p-100f, least) == 127, "2^-100 is lost");
    test_check(nearest_int8(-0x1.fffffep127f, largest) == -127 && isfinite(largest.scale), "the largest row is lost");
    test_check(isnan(infinite.scale) && isnan(nan.scale) && infinite.inverse == 0 && nan.inverse == 0,
               "a row with a NaN or infinity is not NaN");
    test_group("rounding", "int8: scales, neighbours and probabilities");
}

int main(void) {
    check_philox();
    check_dtype(GT_BF16, "neighbours and probabilities of bf16");
    check_dtype(GT_F16, "neighbours and probabilities of f16");
    check_int8();
    return test_finish();
}
