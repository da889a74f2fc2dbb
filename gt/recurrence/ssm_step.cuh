/* gt/recurrence/ssm_step.cuh - code that the step kernels of ssd and selective_scan share: loads and stores of adjacent
 * numbers, aligned or not.
 *
 * A step kernel exists for each dtype, with vector loads, and once for AnyType, with one load per number.  Both kinds
 * give a number to the same lane and add in the same order.  So alignment does not change a bit of the results. */
#ifndef GT_RECURRENCE_SSM_STEP_CUH
#define GT_RECURRENCE_SSM_STEP_CUH

#include "../base/built.cuh"
#include "ssm.cuh"
#include "step_states.cuh"

namespace gt {
namespace ssm {

/* Stands for an element type that is known only at run time, with any alignment and any stride. */
struct AnyType {};

/* A lane's address in a tensor, which advances from token to token. */
template <class T>
struct TokenCursor {
    T* at;
    /* If data is NULL, pass index = 0; then nothing is loaded.  The last parameter, the distance between adjacent
     * numbers in elements, is 1 here. */
    GT_METHOD TokenCursor(const void* data, gt_dtype, int64_t index, int64_t = 1)
        : at(static_cast<T*>(const_cast<void*>(data)) + index) {}
    GT_METHOD void move(int64_t count) { at += count; }
    GT_METHOD void store(int i, float value) const { Element<T>::store(at, i, value); }
};

template <>
struct TokenCursor<AnyType> {
    void* data;
    gt_dtype dtype;
    int64_t index, step;
    GT_METHOD TokenCursor(const void* data_, gt_dtype dtype_, int64_t index_, int64_t step_ = 1)
        : data(const_cast<void*>(data_)), dtype(dtype_), index(index_), step(step_) {}
    GT_METHOD void move(int64_t count) { index += count; }
    GT_METHOD void store(int i, float value) const { store_as(data, dtype, index + i, value); }
};

/* COUNT adjacent elements, as loaded.  get() converts them, so the warp waits for the load only at the first use. */
template <class T, int COUNT>
struct Piece {
    Vec<T, COUNT> bits = {};
    /* offset: from the cursor to the first element.  valid: COUNT if the elements exist, else 0.  All loads into one
     * Piece must pass the same `valid`, since missing elements keep the initial zeros. */
    GT_METHOD void load(const TokenCursor<T>& from, int offset, int valid) {
        if (valid > 0) bits = ldg<Vec<T, COUNT>>(from.at + offset);
    }
    GT_METHOD float get(int i) const { return bits.get(i); }
};

/* The same for AnyType.  Here `valid`, how many of the elements exist, may be any number. */
template <int COUNT>
struct Piece<AnyType, COUNT> {
    float x[COUNT];
    GT_METHOD void load(const TokenCursor<AnyType>& from, int offset, int valid) {
        load_column(x, from.data, from.dtype, from.index + offset * from.step, from.step, valid);
    }
    GT_METHOD float get(int i) const { return x[i]; }
};

/* Returns whether every row of a tensor begins at an address where one instruction can load four elements. */
static inline bool has_fours(const void* data, const gt_stride& s, gt_dtype dtype) {
    return (uintptr_t)data % (dtype == GT_F32 ? 16 : 8) == 0 && s.b % 4 == 0 && s.t % 4 == 0 && s.h % 4 == 0;
}

/* Calls launch(T()) with the type of a dtype, or launch(AnyType()) if this build has no kernels for that type. */
template <class Launch>
static inline gt_status with_activations(gt_dtype dtype, const Launch& launch) {
    if constexpr (BUILT_BF16)
        if (dtype == GT_BF16) return launch(bf16());
    if constexpr (BUILT_F16)
        if (dtype == GT_F16) return launch(f16());
    if constexpr (BUILT_F32)
        if (dtype == GT_F32) return launch(float());
    return launch(AnyType());
}

} /* namespace ssm */
} /* namespace gt */

#endif
