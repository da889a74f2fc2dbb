/* gt/base/number.cuh - number formats and mathematical functions, for the host and for kernels.
 *
 * CONTENTS
 *   numbers    as_float as_uint, conversions of bf16, f16, tf32 and int8, Element<T>
 *   functions  fma_rn ex2_approx rcp_approx rsqrt_approx exp_fast exp_accurate expm1_neg
 *              log1p_unit softplus sigmoid sigmoid_fast silu silu_derivative */
#ifndef GT_BASE_NUMBER_CUH
#define GT_BASE_NUMBER_CUH

#include "compiler.cuh"

namespace gt {

/* ---- numbers --------------------------------------------------------------------------------- */

/* Reinterpret 32 bits.  A GPU's arithmetic gives every NaN the bits 0x7fffffff; as_uint imitates this on the host. */
GT_HD float as_float(uint32_t bits) {
#ifdef __CUDA_ARCH__
    return __uint_as_float(bits);
#else
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
#endif
}

GT_HD uint32_t as_uint(float value) {
#ifdef __CUDA_ARCH__
    return __float_as_uint(value);
#else
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return value == value ? bits : 0x7fffffffu;
#endif
}

/* Tells the compiler that it may assume a condition. */
#if defined(__CUDA_ARCH__)
#define GT_ASSUME(condition) __builtin_assume(condition)
#else
#define GT_ASSUME(condition) ((void)0)
#endif

/* Returns x.  The empty asm stops the compiler from hoisting computations with the result out of a loop, where they
 * would occupy registers. */
GT_HD float made_here(float x) {
#ifdef __CUDA_ARCH__
    asm volatile("" : "+f"(x));
#endif
    return x;
}
GT_HD int made_here(int x) {
#ifdef __CUDA_ARCH__
    asm volatile("" : "+r"(x));
#endif
    return x;
}

/* 16-bit element types, for storage only; arithmetic is fp32.  All conversions to them round to nearest even, and every
 * NaN becomes 0x7fff.  A packed pair keeps the element of the lower address (`lo`) in the lower half of 32 bits. */
struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

GT_HD float bf16_to_f32(uint16_t bits) { return as_float((uint32_t)bits << 16); }

GT_HD float unpack_bf16_lo(uint32_t pair) { return as_float(pair << 16); }
GT_HD float unpack_bf16_hi(uint32_t pair) { return as_float(pair & 0xffff0000u); }

GT_HD uint16_t f32_to_bf16(float value) {
#if GT_SM80
    uint16_t bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#else
    const uint32_t u = as_uint(value);
    if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
#endif
}

GT_HD uint32_t pack_bf16(float lo, float hi) {
#if GT_SM80
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
    return pair;
#else
    return (uint32_t)f32_to_bf16(lo) | (uint32_t)f32_to_bf16(hi) << 16;
#endif
}

GT_HD float f16_to_f32(uint16_t bits) {
#ifdef __CUDA_ARCH__
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#else
    /* The product with 2^112 moves the exponent and normalises subnormals in one exact step. */
    const float magnitude = as_float((uint32_t)(bits & 0x7fff) << 13) * 0x1p112f;
    const uint32_t special = (bits & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u;
    return as_float(as_uint(magnitude) | special | (uint32_t)(bits & 0x8000) << 16);
#endif
}

GT_HD float unpack_f16_lo(uint32_t pair) { return f16_to_f32((uint16_t)pair); }
GT_HD float unpack_f16_hi(uint32_t pair) { return f16_to_f32((uint16_t)(pair >> 16)); }

GT_HD uint16_t f32_to_f16(float value) {
#ifdef __CUDA_ARCH__
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#else
    const uint32_t sign = (as_uint(value) >> 16) & 0x8000u;
    const uint32_t u = as_uint(value) & 0x7fffffffu;
    if (u > 0x7f800000u) return 0x7fff;
    if (u >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* 65520 and more round to infinity */
    if (u < 0x38800000u) { /* adding 0.5 rounds: its last bit is a subnormal's last bit */
        return (uint16_t)(sign | (as_uint(as_float(u) + 0.5f) - as_uint(0.5f)));
    }
    return (uint16_t)(sign | ((u - 0x38000000u + 0xfffu + ((u >> 13) & 1u)) >> 13));
#endif
}

GT_HD uint32_t pack_f16(float lo, float hi) {
#if GT_SM80
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
    return pair;
#else
    return (uint32_t)f32_to_f16(lo) | (uint32_t)f32_to_f16(hi) << 16;
#endif
}

/* For each half of a pair of T: returns the larger of `most` and the magnitude of `pair`.  The sign bits of `most` are
 * 0.  If one of the two values is NaN, the result may be either of them. */
template <class T>
GT_HD uint32_t larger_magnitudes(uint32_t most, uint32_t pair) {
#if GT_SM80
    uint32_t larger;
    if constexpr (std::is_same<T, bf16>::value)
        asm("{ .reg .b32 m; abs.bf16x2 m, %2; max.bf16x2 %0, %1, m; }" : "=r"(larger) : "r"(most), "r"(pair));
    else
        asm("{ .reg .b32 m; and.b32 m, %2, 0x7fff7fff; max.f16x2 %0, %1, m; }" : "=r"(larger) : "r"(most), "r"(pair));
    return larger;
#else
    const uint32_t hi = pair & 0x7fff0000u, lo = pair & 0x7fffu, most_hi = most & 0xffff0000u, most_lo = most & 0xffffu;
    return (hi > most_hi ? hi : most_hi) | (lo > most_lo ? lo : most_lo);
#endif
}

/* Returns a pair of bf16 times a pair of powers of two.  The result is exact unless it underflows in bf16. */
GT_HD uint32_t times_power_bf16(uint32_t pair, uint32_t powers) {
#if GT_SM80
    uint32_t product; /* adding minus 0 keeps the sign of a zero */
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(pair), "r"(powers), "r"(0x80008000u));
    return product;
#else
    return pack_bf16(unpack_bf16_lo(pair) * unpack_bf16_lo(powers), unpack_bf16_hi(pair) * unpack_bf16_hi(powers));
#endif
}

/* Returns the products of two pairs of f16.  Each product is rounded once. */
GT_HD uint32_t multiply_f16(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
    uint32_t pair;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    return pair;
#else
    return pack_f16(unpack_f16_lo(a) * unpack_f16_lo(b), unpack_f16_hi(a) * unpack_f16_hi(b));
#endif
}

/* Rounds to the nearest tf32 (10 stored mantissa bits).  Ties go to even; on devices before compute capability 9.0 they
 * go away from zero.  Infinity and NaN stay.  mma_tf32 ignores the lowest 13 bits of an operand, so without this
 * function it would truncate. */
GT_HD float round_tf32(float value) {
#if GT_SM90
    uint32_t bits;
    asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
    return as_float(bits);
#elif GT_SM80
    uint32_t bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
    return as_float(bits);
#else
    const uint32_t u = as_uint(value);
    const bool finite = (u & 0x7f800000u) != 0x7f800000u;
    return as_float((finite ? u + 0xfffu + (u >> 13 & 1u) : u) & 0xffffe000u);
#endif
}

/* Element<T>, for T = float, bf16 or f16, loads and stores single elements as float.  For the 16-bit types it also
 * unpacks and packs pairs. */
template <class T>
struct Element;

template <>
struct Element<float> {
    GT_HD float load(const float* data, int64_t i) { return data[i]; }
    GT_HD void store(float* data, int64_t i, float value) { data[i] = value; }
};

template <>
struct Element<bf16> {
    GT_HD float load(const bf16* data, int64_t i) { return bf16_to_f32(data[i].bits); }
    GT_HD void store(bf16* data, int64_t i, float value) { data[i].bits = f32_to_bf16(value); }
    GT_HD float lo(uint32_t pair) { return unpack_bf16_lo(pair); }
    GT_HD float hi(uint32_t pair) { return unpack_bf16_hi(pair); }
    GT_HD uint32_t pack(float lo, float hi) { return pack_bf16(lo, hi); }
};

template <>
struct Element<f16> {
    GT_HD float load(const f16* data, int64_t i) { return f16_to_f32(data[i].bits); }
    GT_HD void store(f16* data, int64_t i, float value) { data[i].bits = f32_to_f16(value); }
    GT_HD float lo(uint32_t pair) { return unpack_f16_lo(pair); }
    GT_HD float hi(uint32_t pair) { return unpack_f16_hi(pair); }
    GT_HD uint32_t pack(float lo, float hi) { return pack_f16(lo, hi); }
};

#if GT_SM80
/* (w & mask) | bits and (w & mask) ^ bits, in one instruction each.  From the C expressions ptxas makes two
 * instructions. */
GT_HD uint32_t and_or(uint32_t w, uint32_t mask, uint32_t bits) {
    uint32_t result;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(result) : "r"(w), "r"(mask), "r"(bits));
    return result;
}

GT_HD uint32_t and_xor(uint32_t w, uint32_t mask, uint32_t bits) {
    uint32_t result;
    asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(result) : "r"(w), "r"(mask), "r"(bits));
    return result;
}
#endif

/* Converts four int8 numbers to pairs of T, bf16 or f16, exactly.  `even` gets bytes 0 and 2, `odd` bytes 1 and 3. */
template <class T>
GT_HD void int8_pairs(uint32_t word, uint32_t& even, uint32_t& odd) {
#if GT_SM80
    uint32_t* const pairs[2] = {&even, &odd};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t w = word >> 8 * i;
        if constexpr (std::is_same<T, bf16>::value) {
            /* A byte with sign bit s and the 7 bits u below it is the number u - 128 s.  In bf16, 0x4300 | u is 128 +
             * u, and 0xc300 | s << 7 is -128 - 128 s.  The sum of the two is the number, exactly. */
            const uint32_t u = and_or(w, 0x007f007fu, 0x43004300u), s = and_or(w, 0x00800080u, 0xc300c300u);
            asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(*pairs[i]) : "r"(u), "r"(0x3f803f80u), "r"(s));
        } else {
            /* byte ^ 0x80 is the number + 128, without a sign.  In f16, 0x6400 | (byte ^ 0x80) is 1024 + 128 + the
             * number.  0x6480 is 1152. */
            const uint32_t sum = and_xor(w, 0x00ff00ffu, 0x64806480u);
            asm("sub.f16x2 %0, %1, %2;" : "=r"(*pairs[i]) : "r"(sum), "r"(0x64806480u));
        }
    }
#else
    const auto byte = [word](int i) { return (float)(int8_t)(word >> 8 * i & 0xff); };
    even = Element<T>::pack(byte(0), byte(2));
    odd = Element<T>::pack(byte(1), byte(3));
#endif
}

/* ---- functions ------------------------------------------------------------------------------- */

/* Errors are relative.  They hold unless the true result is subnormal; then the result may be 0.  NaN stays NaN.
 *
 * | function          | is                | error           | domain                             |
 * |-------------------|-------------------|-----------------|------------------------------------|
 * | fma_rn(a, b, c)   | a b + c           | rounded once    | all                                |
 * | ex2_approx(x)     | 2^x               | 2^-22           | all                                |
 * | rcp_approx(x)     | 1 / x             | 2^-23           | all                                |
 * | rsqrt_approx(x)   | 1 / sqrt(x)       | 2^-22           | x > 0                              |
 * | exp_fast(x)       | e^x               | (2.4 + 0.6|x|)e-7 | all; two instructions            |
 * | exp_accurate(x)   | e^x               | 3.6e-7          | all; seven instructions            |
 * | expm1_neg(x)      | e^x - 1           | 4e-7            | x <= 0.05                          |
 * | log1p_unit(x)     | log(1 + x)        | 4e-7            | 0 <= x <= 1                        |
 * | softplus(x)       | log(1 + e^x)      | 6e-7            | all                                |
 * | sigmoid(x)        | 1 / (1 + e^-x)    | 6e-7            | all                                |
 * | sigmoid_fast(x)   | 1 / (1 + e^-x)    | (3 + 0.6|x|)e-7 | all; four instructions             |
 * | silu(x)           | x sigmoid(x)      | 7e-7            | all                                |
 * | softplus_fast(x)  | log(1 + e^x)      | (6 + 0.6|x|)e-7 | all; 14 instructions               |
 * | silu_fast(x)      | x sigmoid(x)      | (4 + 0.6|x|)e-7 | all                                |
 */
GT_HD float fma_rn(float a, float b, float c) {
#ifdef __CUDA_ARCH__
    return __fmaf_rn(a, b, c);
#else
    return fmaf(a, b, c);
#endif
}

/* The device's approximations flush subnormal results to zero, so the host does, too. */
GT_HD float flush_subnormal(float value) { return fabsf(value) < 0x1p-126f ? 0.0f : value; }

GT_HD float ex2_approx(float x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return flush_subnormal(exp2f(x));
#endif
}

GT_HD float rcp_approx(float x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return flush_subnormal(1.0f / x);
#endif
}

GT_HD float rsqrt_approx(float x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return 1.0f / sqrtf(x);
#endif
}

/* log2(e) as a sum of two floats, and ln(2). */
constexpr float LOG2_E = 0x1.715476p+0f;
constexpr float LOG2_E_LOW = 0x1.4ae0cp-26f;
constexpr float LN_2 = 0x1.62e43p-1f;

GT_HD float exp_fast(float x) { return ex2_approx(x * LOG2_E); }

GT_HD float exp_accurate(float x) {
    const float t = x * LOG2_E;
    const float remainder = fma_rn(x, LOG2_E_LOW, fma_rn(x, LOG2_E, -t)); /* x log2(e) - t */
    const float y = ex2_approx(t);
    /* For larger t, y is already 0, infinity or NaN, and the correction could turn it into NaN. */
    return fabsf(t) < 128.0f ? fma_rn(y, remainder * LN_2, y) : y;
}

GT_HD float expm1_neg(float x) {
    /* Near zero 2^t - 1 cancels.  There the result is x + x^2 p(x), with p of degree 5 for [-0.75, 0]. */
    float p = 1.50423751e-4f;
    p = fma_rn(p, x, 1.3504181e-3f);
    p = fma_rn(p, x, 8.31872942e-3f);
    p = fma_rn(p, x, 4.16641318e-2f);
    p = fma_rn(p, x, 1.66666505e-1f);
    p = fma_rn(p, x, 0.5f);
    const float near_zero = fma_rn(x * x, p, x);
    return x > -0.75f ? near_zero : exp_fast(x) - 1.0f;
}

GT_HD float log1p_unit(float x) {
    /* log(1 + x) = 2 atanh(s), s = x / (2 + x) <= 1/3, by a polynomial in s^2. */
    const float s = x * rcp_approx(2.0f + x);
    const float z = s * s;
    float p = 0.26851498f;
    p = fma_rn(p, z, 0.282366198f);
    p = fma_rn(p, z, 0.400075606f);
    p = fma_rn(p, z, 0.666666403f);
    return fma_rn(s * z, p, 2.0f * s);
}

GT_HD float softplus(float x) {
    const float tail = log1p_unit(exp_accurate(-fabsf(x)));
    return x > 0.0f ? x + tail : tail;
}

GT_HD float softplus_fast(float x) { return fmaxf(x, 0.0f) + log1p_unit(exp_fast(-fabsf(x))); }

GT_HD float sigmoid(float x) {
    const float e = exp_accurate(-fabsf(x));
    const float y = rcp_approx(1.0f + e);
    return x < 0.0f ? e * y : y;
}

/* For large negative x the exponential overflows to infinity; its reciprocal is 0, which is the right result. */
GT_HD float sigmoid_fast(float x) { return rcp_approx(1.0f + exp_fast(-x)); }

/* Raises x to at least -200, so that -infinity times 0 cannot occur.  fmaxf replaces a NaN x by a number; the result is
 * still NaN, because sigmoid_x is. */
GT_HD float silu_of_sigmoid(float x, float sigmoid_x) { return fmaxf(x, -200.0f) * sigmoid_x; }

GT_HD float silu(float x) { return silu_of_sigmoid(x, sigmoid(x)); }

GT_HD float silu_fast(float x) { return silu_of_sigmoid(x, sigmoid_fast(x)); }

GT_HD float silu_derivative(float x, float sigmoid_x) {
    const float bounded = fminf(fmaxf(x, -200.0f), 200.0f);
    return sigmoid_x * fma_rn(bounded, 1.0f - sigmoid_x, 1.0f);
}

} /* namespace gt */

#endif
