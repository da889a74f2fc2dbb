/* gt/base/built.cuh - the dtypes and head sizes for which this build has specialised kernels: see "Less to compile" in
 * gt_kernels.h.  For other sizes every operator has general kernels. */
#ifndef GT_BASE_BUILT_CUH
#define GT_BASE_BUILT_CUH

#include "number.cuh"
#include "op.h"

namespace gt {

#ifdef GT_WITHOUT_F32
constexpr bool BUILT_F32 = false;
#else
constexpr bool BUILT_F32 = true;
#endif
#ifdef GT_WITHOUT_BF16
constexpr bool BUILT_BF16 = false;
#else
constexpr bool BUILT_BF16 = true;
#endif
#ifdef GT_WITHOUT_F16
constexpr bool BUILT_F16 = false;
#else
constexpr bool BUILT_F16 = true;
#endif
#ifdef GT_WITHOUT_N32
constexpr bool BUILT_N32 = false;
#else
constexpr bool BUILT_N32 = true;
#endif
#ifdef GT_WITHOUT_N64
constexpr bool BUILT_N64 = false;
#else
constexpr bool BUILT_N64 = true;
#endif
#ifdef GT_WITHOUT_N128
constexpr bool BUILT_N128 = false;
#else
constexpr bool BUILT_N128 = true;
#endif

static inline bool is_built(gt_dtype dtype) {
    return dtype == GT_F32 ? BUILT_F32 : dtype == GT_BF16 ? BUILT_BF16 : BUILT_F16;
}

/* Returns whether this build has kernels for N, one of the head sizes 32, 64 and 128. */
static inline bool is_built_head(int64_t N) { return N == 32 ? BUILT_N32 : N == 64 ? BUILT_N64 : BUILT_N128; }

/* Returns whether this build has kernels for N columns of a state.  BUILT_N32 covers up to 32 columns, BUILT_N64 33 to
 * 64 columns, and BUILT_N128 more columns. */
static inline bool is_built_columns(int64_t N) { return N <= 32 ? BUILT_N32 : N <= 64 ? BUILT_N64 : BUILT_N128; }

/* Returns whether this build needs the kernel for FROM + 1 to TO columns: it does if is_built_columns(N) holds for one
 * N in that range. */
template <int FROM, int TO>
constexpr bool is_built_columns() {
    return (FROM < 32 && BUILT_N32) || (FROM < 64 && TO > 32 && BUILT_N64) || (TO > 64 && BUILT_N128);
}

/* Return whether this build has kernels for activations of type T; the second function also for heads of size N. */
template <class T>
constexpr bool is_built_for() {
    return std::is_same<T, float>::value ? BUILT_F32 : std::is_same<T, bf16>::value ? BUILT_BF16 : BUILT_F16;
}
template <class T, int N>
constexpr bool is_built_for() {
    return is_built_for<T>() && (N == 32 ? BUILT_N32 : N == 64 ? BUILT_N64 : BUILT_N128);
}

/* ---- from values to types ---- */

/* Returns an error if this build lacks the dtype.  For operators that have no general kernels for any dtype. */
static inline gt_status check_built(gt_dtype dtype) {
    if (is_built(dtype)) return GT_OK;
    return gt_fail(GT_ERROR_UNSUPPORTED, "dtype = %d: this build has no kernels for it", (int)dtype);
}

/* Calls launch(T()) if this build has kernels for activations of type T; otherwise returns an error. */
template <class T, class Launch>
static inline gt_status with_built([[maybe_unused]] const Launch& launch) {
    if constexpr (is_built_for<T>())
        return launch(T());
    else
        return check_built(std::is_same<T, float>::value ? GT_F32 : std::is_same<T, bf16>::value ? GT_BF16 : GT_F16);
}

/* The types and the head size of one kernel: activations of type T, w of type W, heads of size N. */
template <class T_, class W_, int N_>
struct KernelTypes {
    using T = T_;
    using W = W_;
    static constexpr int N = N_;
};

template <class T, class W, class Launch>
static gt_status dispatch_head(int64_t N, [[maybe_unused]] const Launch& launch) {
    if constexpr (is_built_for<T, 32>())
        if (N == 32) return launch(KernelTypes<T, W, 32>());
    if constexpr (is_built_for<T, 64>())
        if (N == 64) return launch(KernelTypes<T, W, 64>());
    if constexpr (is_built_for<T, 128>())
        if (N == 128) return launch(KernelTypes<T, W, 128>());
    return gt_fail(GT_ERROR_UNSUPPORTED, "N = %lld: this build has no kernel for it", (long long)N);
}

/* Calls launch(KernelTypes<T, W, N>()) for activations of `dtype` and for w of w_dtype, which is `dtype` or fp32. */
template <class Launch>
static gt_status dispatch(gt_dtype dtype, gt_dtype w_dtype, int64_t N, const Launch& launch) {
    if (dtype == GT_F32) return dispatch_head<float, float>(N, launch);
    if (dtype == GT_BF16)
        return w_dtype == GT_F32 ? dispatch_head<bf16, float>(N, launch) : dispatch_head<bf16, bf16>(N, launch);
    return w_dtype == GT_F32 ? dispatch_head<f16, float>(N, launch) : dispatch_head<f16, f16>(N, launch);
}

} /* namespace gt */

#endif
