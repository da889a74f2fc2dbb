/* gt/recurrence/rounding.h - rounding of states to int8, and stochastic rounding to 16 bits (plain C).  Kernels and CPU
 * twins share it, so that both round the same number to the same bits.
 *
 * Stochastic rounding: a number x lies between two neighbouring 16-bit numbers a < b.  It becomes b with probability (x
 * - a) / (b - a), and a otherwise.  So the mean over many steps is right.  Rounding to nearest would lose every change
 * below half of b - a.
 *
 * Philox4x32-10 makes the random words (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"):
 *
 *     key      the seed, two words.
 *     counter  four words: the group's number, low and high 32 bits; the step number of the batch element; 0.
 * A group is four adjacent numbers in a row of a state, columns 4 g ... 4 g + 3.  The four random words of Philox serve
 * its four numbers.  Groups are numbered row by row within one batch element's state, ceil(columns / 4) in each row.
 * So a random word does not depend on the batch, the row in the pool, the tile or the alignment. */
#ifndef GT_RECURRENCE_ROUNDING_H
#define GT_RECURRENCE_ROUNDING_H

#include "../base/op.h"

typedef struct gt_random {
    uint32_t word[4];
} gt_random;

GT_INLINE gt_random gt_philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
    gt_random r;
    for (int round = 0; round < 10; round++) {
        const uint64_t p0 = (uint64_t)0xd2511f53u * c0, p1 = (uint64_t)0xcd9e8d57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    r.word[0] = c0, r.word[1] = c1, r.word[2] = c2, r.word[3] = c3;
    return r;
}

/* Returns the random words of a group.  seed: two words, low bits first. */
GT_INLINE gt_random gt_random_of_group(const int32_t *seed, int32_t step, int64_t group) {
    return gt_philox((uint32_t)group, (uint32_t)((uint64_t)group >> 32), (uint32_t)step, 0, (uint32_t)seed[0],
                     (uint32_t)seed[1]);
}

/* Returns the number of groups in a row of `columns` columns. */
GT_INLINE int64_t gt_row_groups(int64_t columns) { return (columns + 3) / 4; }

/* Round an fp32 number, given by its bits, with a random word.  Infinity and NaN stay; the largest numbers may round to
 * infinity. */
GT_INLINE uint32_t gt_round_to_bf16(uint32_t bits, uint32_t random) {
    if ((bits & 0x7fffffffu) > 0x7f800000u) return bits >> 16 | 0x40u;
    return (bits >> 16) + (random < bits << 16);
}

GT_INLINE uint32_t gt_round_to_f16(uint32_t bits, uint32_t random) {
    const uint32_t sign = bits >> 16 & 0x8000u, a = bits & 0x7fffffffu;
    uint32_t shift, m, fraction; /* fraction: the part below the last bit of f16, times 2^32 */
    if (a > 0x7f800000u) return sign | 0x7e00u;
    if (a >= 0x47800000u) return sign | 0x7c00u;                                          /* 65536 or more */
    if (a >= 0x38800000u) return sign | (((a - 0x38000000u) >> 13) + (random < a << 19)); /* normal */
    shift = 126u - (a >> 23); /* subnormal: in units of 2^-24; shift is at least 14 */
    m = (a & 0x7fffffu) | 0x800000u;
    if (shift > 55) return sign; /* below 2^-32 of the last bit */
    fraction = shift <= 32 ? m << (32 - shift) : m >> (shift - 32);
    return sign | ((shift < 24 ? m >> shift : 0) + (random < fraction));
}

GT_INLINE uint32_t gt_round_to_half(uint32_t bits, uint32_t random, gt_dtype dtype) {
    return dtype == GT_BF16 ? gt_round_to_bf16(bits, random) : gt_round_to_f16(bits, random);
}

/* ---- int8 --------------------------------------------------------------------------------------------------------
 * A row of numbers becomes integers -127 ... 127 and one fp32 scale.  `inverse` is about 1 / scale.  In two cases all
 * integers and `inverse` are 0: a row near 0 has scale 0, and a row with a NaN or infinity has scale NaN. */
typedef struct gt_row_scale {
    float scale, inverse;
} gt_row_scale;

#define GT_INT8_COLUMNS 64 /* columns of a row of wkv6's state that share a scale */

/* most: the largest magnitude of the row; NaN if the row has a NaN. */
GT_INLINE gt_row_scale gt_scale_of_row(float most) {
    gt_row_scale row = {0.0f, 0.0f};
    if (!(most <= 0x1.fffffep127f)) {
        row.scale = most - most; /* NaN */
    } else if (most >= 0x1p-100f) {
        row.scale = most * 0x1.020408p-7f; /* the fp32 number nearest 1 / 127 */
#ifdef __CUDA_ARCH__
        row.inverse = __fdiv_rn(127.0f, most); /* exact even if the caller compiles with fast division */
#else
        row.inverse = 127.0f / most;
#endif
    }
    return row;
}

/* 1.5 * 2^23.  The sum x * inverse + GT_INT8_NEAREST, rounded once, has the nearest integer in its low byte. */
#define GT_INT8_NEAREST 12582912.0f

/* Rounds a magnitude at random to an integer.  `bits` are the bits of the number times `inverse`.  This product may be
 * just above 127; the result is at most 127. */
GT_INLINE uint32_t gt_round_to_int8(uint32_t bits, uint32_t random) {
    const uint32_t a = bits & 0x7fffffffu, m = (a & 0x7fffffu) | 0x800000u, shift = 150u - (a >> 23);
    uint32_t whole, fraction; /* integer part; fraction times 2^32 */
    if (a >= 0x42fe0000u) return 127;
    if (shift > 55) return 0; /* below 2^-32 */
    whole = shift < 24 ? m >> shift : 0;
    fraction = shift <= 32 ? m << (32 - shift) : m >> (shift - 32);
    return whole + (random < fraction);
}

#endif
