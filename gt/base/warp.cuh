/* gt/base/warp.cuh - reductions over a warp; loads and stores of vectors and elements. */
#ifndef GT_BASE_WARP_CUH
#define GT_BASE_WARP_CUH

#include "device.cuh"
#include "op.h"

namespace gt {

GT_DEV float warp_sum(float value) {
    GT_UNROLL
    for (int mask = 16; mask > 0; mask >>= 1) value += shfl_xor(value, mask);
    return value;
}

/* Returns 0 from an asm statement.  Only ptxas can see that the value is 0; the compiler before ptxas cannot. */
GT_DEV int hidden_zero() {
    int zero = 0;
#ifndef GT_EMU
    asm("mov.b32 %0, 0;" : "=r"(zero));
#endif
    return zero;
}

/* Returns true in every lane if the condition holds in one lane (vote.any). */
GT_DEV bool warp_any(bool condition) {
#ifdef GT_EMU
    uint32_t any = condition;
    for (int mask = 16; mask > 0; mask >>= 1) any |= shfl_xor(any, mask);
    return any != 0;
#else
    return __any_sync(0xffffffffu, condition);
#endif
}

/* ---- vectors --------------------------------------------------------------------------------- */

/* N adjacent elements in memory, aligned so that one instruction loads or stores them. */
template <class T, int N>
struct alignas(N * sizeof(T)) Vec {
    static constexpr bool PAIRS = sizeof(T) == 2 && N % 2 == 0;
    typename std::conditional<PAIRS, uint32_t, T>::type word[PAIRS ? N / 2 : N];

    GT_METHOD float get(int i) const {
        if constexpr (PAIRS)
            return i % 2 ? Element<T>::hi(word[i / 2]) : Element<T>::lo(word[i / 2]);
        else
            return Element<T>::load(word, i);
    }

    GT_METHOD void set(const float (&x)[N]) {
        if constexpr (PAIRS) {
            GT_UNROLL
            for (int i = 0; i < N / 2; i++) word[i] = Element<T>::pack(x[2 * i], x[2 * i + 1]);
        } else {
            GT_UNROLL
            for (int i = 0; i < N; i++) Element<T>::store(word, i, x[i]);
        }
    }
};

/* ---- elements of a dtype known at run time --------------------------------------------------- */

GT_DEV float load_as(const void* data, gt_dtype dtype, int64_t i) {
    if (dtype == GT_BF16) return Element<bf16>::load(static_cast<const bf16*>(data), i);
    if (dtype == GT_F16) return Element<f16>::load(static_cast<const f16*>(data), i);
    return static_cast<const float*>(data)[i];
}

GT_DEV void store_as(void* data, gt_dtype dtype, int64_t i, float value) {
    if (dtype == GT_BF16)
        Element<bf16>::store(static_cast<bf16*>(data), i, value);
    else if (dtype == GT_F16)
        Element<f16>::store(static_cast<f16*>(data), i, value);
    else
        static_cast<float*>(data)[i] = value;
}

/* Loads element index + i * step into x[i] for i < valid, and 0 into the other x[i].  load_column() branches on the
 * dtype once, before the loads, so that all loads are in flight together. */
template <class T, int COUNT>
GT_DEV void load_column_of(float (&x)[COUNT], const void* data, int64_t index, int64_t step, int valid) {
    const T* from = static_cast<const T*>(data) + index;
    T raw[COUNT];
    GT_UNROLL
    for (int i = 0; i < COUNT; i++) raw[i] = from[(i < valid ? i : 0) * step];
    GT_UNROLL
    for (int i = 0; i < COUNT; i++) x[i] = i < valid ? Element<T>::load(raw, i) : 0.0f;
}

template <int COUNT>
GT_DEV void load_column(float (&x)[COUNT], const void* data, gt_dtype dtype, int64_t index, int64_t step,
                        int64_t valid) {
    if (valid <= 0) {
        GT_UNROLL
        for (int i = 0; i < COUNT; i++) x[i] = 0.0f;
        return;
    }
    const int count = valid < COUNT ? (int)valid : COUNT;
    if (dtype == GT_BF16)
        load_column_of<bf16>(x, data, index, step, count);
    else if (dtype == GT_F16)
        load_column_of<f16>(x, data, index, step, count);
    else
        load_column_of<float>(x, data, index, step, count);
}

} /* namespace gt */

#endif
