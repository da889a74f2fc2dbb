/* gt/wkv6/operands.cuh - helpers of the kernels on tensor cores: numbers as two tf32 terms, rows of f16 with a power of
 * two, pairs of elements, vectors in memory, sums over lanes.
 * In all kernels here, c_t is -log2 of the product of the decays before token t of a sub-chunk.  c_16 is -log2 of the
 * decay of all 16 tokens of the sub-chunk. */
#ifndef GT_WKV6_OPERANDS_CUH
#define GT_WKV6_OPERANDS_CUH

#include "problem.cuh"

namespace gt {
namespace wkv6 {

constexpr float STRONG_DECAY_LIMIT = 64.0f; /* limit of c_16; leaves a range of 2^63 in fp32 for |k v| and for sums */

/* A power of two and its inverse.  The power scales the largest number of a row close to 2^15, so that f16 can hold the
 * row. */
struct RowScale {
    float scale, inverse;
};

GT_DEV RowScale row_scale_f16(float largest) {
    int exponent = (int)(as_uint(largest) >> 23) - 127 - 14;
    if (exponent < -126) exponent = -126;
    return {as_float((uint32_t)(127 - exponent) << 23), as_float((uint32_t)(exponent + 127) << 23)};
}

/* Two adjacent elements as loaded from memory. */
template <class T>
struct Pair {
    uint32_t bits;
    GT_METHOD float lo() const { return Element<T>::lo(bits); }
    GT_METHOD float hi() const { return Element<T>::hi(bits); }
};
template <>
struct Pair<float> {
    float2 value;
    GT_METHOD float lo() const { return value.x; }
    GT_METHOD float hi() const { return value.y; }
};

/* Returns -log2 of a raw decay exp(-exp(w)). */
GT_DEV float bits_of_raw(float w) {
    constexpr float LOG2_LOG2_E = 0.52876637f;
    return ex2_approx(fma_rn(w, LOG2_E, LOG2_LOG2_E));
}

/* Returns 2^-bits.  The result must be accurate near 1, because it multiplies a state in every sub-chunk. */
GT_DEV float sub_chunk_decay(float bits) {
    return bits < 1.0f && bits > -0.1f ? 1.0f + expm1_neg(-bits * LN_2) : ex2_approx(-bits);
}

/* x = tf32_hi(x) + tf32_lo(x), exactly.  tf32_hi(x) is the part of x that a tensor core reads. */
GT_DEV float tf32_hi(float x) { return as_float(as_uint(x) & 0xffffe000u); }
GT_DEV float tf32_lo(float x) { return x - tf32_hi(x); }

/* Returns x as stored for an operand in shared memory: rounded to tf32, or unchanged if its readers split it
 * (TF32X3). */
template <class C>
GT_DEV float stored_operand(float x) {
    return C::TF32X3 ? x : round_tf32(x);
}

template <bool TF32X3, int COUNT>
GT_DEV void set_lo(const float (&x)[COUNT], float (&lo)[COUNT]) {
    GT_UNROLL
    for (int i = 0; TF32X3 && i < COUNT; i++) lo[i] = tf32_lo(x[i]);
}

/* c += a b.  With TF32X3 this takes three products; the two small ones go to `low`.  So tensor cores, which round
 * towards zero, round c less often, and two chains of products run in parallel. */
template <bool TF32X3>
GT_DEV void mma_3xtf32(float (&c)[4], float (&low)[4], const float (&a)[4], const float (&a_lo)[4], float b0,
                       float b1) {
    mma_tf32(c, a, b0, b1);
    if constexpr (TF32X3) {
        mma_tf32(low, a_lo, b0, b1);
        mma_tf32(low, a, tf32_lo(b0), tf32_lo(b1));
    }
}

/* Returns the exclusive prefix sum over the 4 lanes that share a pair of channels; they are 8 lanes apart.  *total gets
 * the sum. */
GT_DEV float scan_quads(float x, int quad, float* total) {
    float y = shfl_up(x, 8);
    float sum = quad >= 1 ? x + y : x;
    y = shfl_up(sum, 16);
    sum = quad >= 2 ? sum + y : sum;
    *total = shfl_idx(sum, 24 + lane_id() % 8);
    y = shfl_up(sum, 8);
    return quad >= 1 ? y : 0.0f;
}

/* Returns the sum over the later ones of the 4 lanes that share a pair of channels.  The function never subtracts,
 * because x may be infinite. */
GT_DEV float sum_later_quads(float x, int quad) {
    float y = shfl_down(x, 8);
    float suffix = quad <= 2 ? x + y : x;
    y = shfl_down(suffix, 16);
    suffix = quad <= 1 ? suffix + y : suffix;
    y = shfl_down(suffix, 8);
    return quad <= 2 ? y : 0.0f;
}

/* Loads COUNT adjacent words of shared memory; COUNT is even. */
template <class Word, int COUNT>
GT_DEV void lds_words(Word (&words)[COUNT], uint32_t addr) {
    struct alignas(16) Four {
        Word word[4];
    };
    struct alignas(8) Two {
        Word word[2];
    };
    GT_UNROLL
    for (int i = 0; i < COUNT / 4; i++) {
        const Four x = lds<Four>(addr + 16 * i);
        for (int e = 0; e < 4; e++) words[4 * i + e] = x.word[e];
    }
    if constexpr (COUNT % 4) {
        const Two x = lds<Two>(addr + 4 * (COUNT / 4 * 4));
        words[COUNT - 2] = x.word[0];
        words[COUNT - 1] = x.word[1];
    }
}

/* Stores 2 TILES adjacent elements of a state, in pieces of up to 16 bytes. */
template <int TILES, class T>
GT_DEV void store_row(T* to, const float (&x)[2 * TILES]) {
    if constexpr (sizeof(T) == 2) {
        Vec<T, 2 * TILES> packed;
        packed.set(x);
        stg<Vec<T, 2 * TILES>>(to, packed);
    } else if constexpr (TILES == 1) {
        stg<float2>(to, {x[0], x[1]});
    } else {
        GT_UNROLL
        for (int i = 0; i < TILES / 2; i++)
            stg<float4>(to + 4 * i, {x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]});
    }
}

/* One step of a reduction over two lanes, lane and lane ^ bit.  Each has 2 * LEFT numbers in x.  The lane whose number
 * has `bit` adds up the upper halves of both, the other lane the lower halves.  The LEFT sums go to x[0] ... x[LEFT -
 * 1]. */
template <int LEFT, int COUNT>
GT_DEV void halve_sums(float (&x)[COUNT], int bit) {
    const bool upper = lane_id() & bit;
    GT_UNROLL
    for (int i = 0; i < LEFT; i++) {
        const float own = upper ? x[LEFT + i] : x[i], other = upper ? x[i] : x[LEFT + i];
        x[i] = own + shfl_xor(other, bit);
    }
}

} /* namespace wkv6 */
} /* namespace gt */

#endif
