/* gt/emu/tensor.h - products of tensor cores. */
#ifndef GT_EMU_TENSOR_H
#define GT_EMU_TENSOR_H

#include "machine.h"

namespace emu {

inline float float_from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

inline float decode_bf16(uint32_t half) { return float_from_bits(half << 16); }

inline float decode_f16(uint32_t half) {
    const uint32_t exponent = half >> 10 & 31, mantissa = half & 1023;
    float magnitude;
    if (exponent == 0) {
        magnitude = (float)mantissa * 0x1p-24f;
    } else {
        magnitude = float_from_bits((exponent == 31 ? 255 : exponent + 112) << 23 | mantissa << 13);
    }
    return half >> 15 ? -magnitude : magnitude;
}

inline float decode_tf32(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return float_from_bits(bits & 0xffffe000u);
}

/* C[16][8] += A[16][K] B[K][8] in fp32, in ascending order of k. */
template <int K>
struct Product {
    typedef float Quad __attribute__((vector_size(16)));

    float a[16][K];
    alignas(16) float b[K][8];
    alignas(16) float c[16][8];

    void exchange_c(int lane, float* registers, bool to_lane) {
        for (int i = 0; i < 4; i++) {
            float& element = c[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2];
            if (to_lane) {
                registers[i] = element;
            } else {
                element = registers[i];
            }
        }
    }

    void multiply() {
        for (int row = 0; row < 16; row++) {
            Quad sum[2], factor[2];
            memcpy(sum, c[row], sizeof sum);
            for (int k = 0; k < K; k++) {
                memcpy(factor, b[k], sizeof factor);
                sum[0] += a[row][k] * factor[0];
                sum[1] += a[row][k] * factor[1];
            }
            memcpy(c[row], sum, sizeof sum);
        }
    }
};

struct Mma16 {
    float* c;
    const uint32_t* a;
    uint32_t b[2];
};

template <class Decode>
void perform_mma16(Mma16** lanes, Decode decode) {
    Product<16> p;
    for (int lane = 0; lane < LANES; lane++) {
        const int g = lane / 4, j = lane % 4;
        for (int i = 0; i < 4; i++) {
            float* element = &p.a[g + 8 * (i % 2)][2 * j + 8 * (i / 2)];
            element[0] = decode(lanes[lane]->a[i] & 0xffff);
            element[1] = decode(lanes[lane]->a[i] >> 16);
        }
        for (int i = 0; i < 2; i++) {
            p.b[2 * j + 8 * i][g] = decode(lanes[lane]->b[i] & 0xffff);
            p.b[2 * j + 8 * i + 1][g] = decode(lanes[lane]->b[i] >> 16);
        }
        p.exchange_c(lane, lanes[lane]->c, false);
    }
    p.multiply();
    for (int lane = 0; lane < LANES; lane++) p.exchange_c(lane, lanes[lane]->c, true);
}

struct Mma8 {
    float* c;
    const float* a;
    float b[2];
};

inline void perform_mma_tf32(Mma8** lanes) {
    Product<8> p;
    for (int lane = 0; lane < LANES; lane++) {
        const int g = lane / 4, j = lane % 4;
        for (int i = 0; i < 4; i++) {
            p.a[g + 8 * (i % 2)][j + 4 * (i / 2)] = decode_tf32(lanes[lane]->a[i]);
        }
        for (int i = 0; i < 2; i++) p.b[j + 4 * i][g] = decode_tf32(lanes[lane]->b[i]);
        p.exchange_c(lane, lanes[lane]->c, false);
    }
    p.multiply();
    for (int lane = 0; lane < LANES; lane++) p.exchange_c(lane, lanes[lane]->c, true);
}

} /* namespace emu */

#endif
