/* An exp in fp32 for the trainer's CPU path, which compilers can vectorise. */
#ifndef HYBRID_MATH_H
#define HYBRID_MATH_H

#include <stdint.h>

/* Computes exp(x) within 1.1 units in the last place.  Like exp, it underflows to subnormal numbers and 0, overflows
 * to infinity, and returns NaN for NaN.
 *
 * Method: x = n ln2 + f.  Adding 1.5 * 2^23 to x / ln2 rounds the sum to an integer and leaves n in its low bits.
 * ln2 is split into two parts, so that the first part times n is exact.  The code multiplies by 2^n in two steps,
 * because at both ends of the range 2^n is not a normal number. */
static inline float hy_exp(float x) {
    union {
        float f;
        int32_t i;
    } n, low, high;
    float f, p;
    x = x > 89.0f ? 89.0f : x;
    x = x < -104.0f ? -104.0f : x;
    n.f = x * 1.44269504f + 12582912.0f;
    low.i = (n.i - 0x4b400000) >> 1;
    high.i = (n.i - 0x4b400000) - low.i;
    low.i = (int32_t)((uint32_t)(low.i + 127) << 23);
    high.i = (int32_t)((uint32_t)(high.i + 127) << 23);
    n.f -= 12582912.0f;
    f = x - n.f * 0.693359375f;
    f = f + n.f * 2.12194440e-4f;
    p = 1.39261818e-3f;
    p = p * f + 8.36317763e-3f;
    p = p * f + 4.16665546e-2f;
    p = p * f + 1.6666577e-1f;
    p = p * f + 5.0e-1f;
    p = p * (f * f) + f;
    return (p + 1.0f) * low.f * high.f;
}

#endif
