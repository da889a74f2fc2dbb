/* gt_common.cuh - the one place where kernels meet the machine.
 *
 * Every kernel of this library is written on the primitives below and on plain C++, so that the
 * same source runs on a GPU (PTX bodies here) and, with GT_EMU defined, on the CPU, compiled by an
 * ordinary C++ compiler without the CUDA Toolkit (bodies in tests/emu.h, which also check for
 * races, bounds, alignment and barrier use).  The rules that make this possible:
 *
 *   - Kernels touch shared memory only through the primitives, by 32-bit shared address.
 *   - Shared memory is dynamic only (no static __shared__), carved up by offsets from smem_base(),
 *     the one base address.  It starts with undefined contents.
 *   - No PTX, no intrinsic and no threadIdx-like variable outside this file.
 *   - A kernel takes one trivially copyable struct of parameters by value; its blocks are a whole
 *     number of warps; no thread returns while others of its warp still meet at a primitive.
 *   - Collective primitives (marked W below) are executed by all 32 lanes of a warp together.
 *
 *   struct ScaleParams { const float* x; float* y; float factor; int n; };
 *
 *   GT_KERNEL(128, 1) scale_kernel(const GT_GRID_CONSTANT ScaleParams p) {
 *       const int i = block_x() * block_threads() + thread_id();
 *       const uint32_t cell = smem_base() + 4 * thread_id();
 *       sts<float>(cell, i < p.n ? p.x[i] : 0.0f);
 *       sync_threads();
 *       if (i < p.n) p.y[i] = p.factor * lds<float>(cell);
 *   }
 *
 *   cudaError_t error = gt::launch(scale_kernel, {blocks}, 128, 128 * 4, stream, params);
 *
 * CONTENTS
 *   declarations   GT_KERNEL GT_GRID_CONSTANT GT_DEV GT_HD GT_METHOD GT_UNROLL GT_NO_UNROLL
 *   numbers        as_float as_uint, conversions of bf16, f16 and tf32, Element<T>
 *   functions      fma_rn ex2_approx rcp_approx rsqrt_approx exp_fast exp_accurate expm1_neg
 *                  log1p_unit softplus sigmoid sigmoid_fast silu silu_derivative
 *   indices        thread_id lane_id warp_id block_x.. grid_x.. block_threads
 *   shared memory  smem_base lds sts cp_async cp_async_commit cp_async_wait ldmatrix_x1.. (W)
 *   global memory  ldg stg global_pointer
 *   ordering       sync_warp (W) sync_threads bar_sync (W) mbarrier_init mbarrier_arrive (W)
 *                  mbarrier_wait (W) wait_for_chain
 *   warp           shfl_xor shfl_up shfl_down shfl_idx warp_sum warp_any movmatrix_trans (W)
 *   tensor cores   mma_bf16 mma_f16 mma<T> mma_tf32 (W)
 *   warpgroups     wgmma_operand wgmma_tf32 wgmma_fence wgmma_commit wgmma_wait
 *                  fence_async_proxy (all W)
 *   host           Grid launch; report current_device has_sm90a Arena check_workspace check_saved
 *                  Chain run
 *   vectors        Vec
 *   run-time dtype load_as store_as load_column
 *   reduce_rows    a kernel that the operators share
 *
 * Compiles for sm_75 and newer.  What sm_75 lacks is replaced (cp.async by a plain copy,
 * conversions by integer arithmetic, the f16 mma by two half-size ones) or traps (mma_bf16,
 * mma_tf32, mbarriers).  The primitives of warpgroups need sm_90a (GT_SM90A) and trap elsewhere.
 */
#ifndef GT_COMMON_CUH
#define GT_COMMON_CUH

#ifndef GT_KERNELS_INTERNAL_H /* else gt_kernels.h is including this file */
#ifndef GT_KERNELS_INTERNAL
#define GT_KERNELS_INTERNAL
#endif
#include "gt_kernels.h"
#endif

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <atomic>
#include <type_traits>

#if defined(GT_EMU)
#include "emu.h"
#elif defined(__CUDACC__)
#include <cuda_runtime.h>
#else
#error "gt_common.cuh needs nvcc, or a C++17 compiler with GT_EMU defined"
#endif

/* ---- declarations ---------------------------------------------------------------------------- */

/* GT_DEV     device function, in namespace scope or as static member
 * GT_DEV_CALL the same, called and not inlined: for what is rare
 * GT_HD      the same for host and device
 * GT_METHOD  device member function that uses `this`
 * GT_KERNEL(threads, min_blocks) name(params): kernel launched with `threads` threads, compiled so
 *            that `min_blocks` blocks fit on a multiprocessor; may follow template <...> */
#ifdef GT_EMU
#define GT_DEV [[maybe_unused]] static inline
#define GT_DEV_CALL [[maybe_unused]] static
#define GT_HD [[maybe_unused]] static inline
#define GT_METHOD inline
#define GT_KERNEL(threads, min_blocks) [[maybe_unused]] static void
#define GT_GRID_CONSTANT
#define GT_UNROLL
#define GT_NO_UNROLL
#else
#define GT_DEV static __device__ __forceinline__
#define GT_DEV_CALL [[maybe_unused]] static __device__ __noinline__
#define GT_HD static __host__ __device__ __forceinline__
#define GT_METHOD __device__ __forceinline__
#define GT_KERNEL(threads, min_blocks) \
    [[maybe_unused]] static __global__ void __launch_bounds__(threads, min_blocks)
#define GT_GRID_CONSTANT __grid_constant__
#define GT_UNROLL _Pragma("unroll")
#define GT_NO_UNROLL _Pragma("unroll 1")
#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define GT_SM80 1
#else
#define GT_SM80 0
#endif

/* What a kernel needs that is empty for other devices, which never get it: mma of bf16 and tf32, and mbarriers, of
 * compute capability 8.0 on; the instructions that only 9.0 has. */
#if defined(GT_EMU) || GT_SM80
#define GT_SM80_KERNELS 1
#else
#define GT_SM80_KERNELS 0
#endif
#if defined(GT_EMU) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define GT_SM90A 1
#else
#define GT_SM90A 0
#endif

namespace gt {

/* ---- numbers --------------------------------------------------------------------------------- */

/* Reinterprets 32 bits. */
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
    return bits;
#endif
}

/* x, and what is made of it is made here: not earlier, out of a loop, where it would have to be kept. */
GT_HD float made_here(float x) {
#ifdef __CUDA_ARCH__
    asm volatile("" : "+f"(x));
#endif
    return x;
}

/* 16-bit element types.  They are storage only; arithmetic is fp32.  All conversions to them round
 * to nearest even; every NaN becomes 0x7fff.  A packed pair keeps the element of the lower address
 * (`lo`) in the lower half of 32 bits. */
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
    if (u < 0x38800000u) { /* the last bit of 0.5 is a subnormal's, so adding it rounds */
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

/* Rounds to tf32 (10 stored mantissa bits), ties away from zero, as cvt.rna.tf32.f32.  Infinities
 * and NaN are truncated: a NaN stays one if an upper mantissa bit is set, as in all computed ones.
 * mma_tf32 ignores the 13 bits below, which truncates an operand that was not rounded. */
GT_HD float round_tf32(float value) {
#if GT_SM80
    uint32_t bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
    return as_float(bits);
#else
    const uint32_t u = as_uint(value);
    const bool finite = (u & 0x7f800000u) != 0x7f800000u;
    return as_float((finite ? u + 0x1000u : u) & 0xffffe000u);
#endif
}

/* Element<T> for T = float, bf16, f16: reads and writes single elements as float; for the 16-bit
 * types also packed pairs. */
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

/* ---- functions ------------------------------------------------------------------------------- */

/* Errors are relative and hold unless the true result is subnormal, which may come out as 0.  NaN
 * stays NaN.
 *
 * | function          | is                | error           | domain                             |
 * |-------------------|-------------------|-----------------|------------------------------------|
 * | fma_rn(a, b, c)   | a b + c           | rounded once    | all                                |
 * | ex2_approx(x)     | 2^x               | 2^-22           | all                                |
 * | rcp_approx(x)     | 1 / x             | 2^-23           | all                                |
 * | rsqrt_approx(x)   | 1 / sqrt(x)       | 2^-22           | x > 0                              |
 * | exp_fast(x)       | e^x               | (2.4 + 0.6|x|)e-7 | all; two instructions            |
 * | exp_accurate(x)   | e^x               | 3.6e-7          | all; seven instructions            |
 * | expm1_neg(x)      | e^x - 1           | 4e-7            | x <= 0                             |
 * | log1p_unit(x)     | log(1 + x)        | 4e-7            | 0 <= x <= 1                        |
 * | softplus(x)       | log(1 + e^x)      | 6e-7            | all                                |
 * | sigmoid(x)        | 1 / (1 + e^-x)    | 6e-7            | all                                |
 * | sigmoid_fast(x)   | 1 / (1 + e^-x)    | (3 + 0.6|x|)e-7 | all; four instructions             |
 * | silu(x)           | x sigmoid(x)      | 7e-7            | all                                |
 */
GT_HD float fma_rn(float a, float b, float c) {
#ifdef __CUDA_ARCH__
    return __fmaf_rn(a, b, c);
#else
    return fmaf(a, b, c);
#endif
}

/* Subnormal results of the approximations are flushed to zero on the device, so on the host too. */
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
    const float rest = fma_rn(x, LOG2_E_LOW, fma_rn(x, LOG2_E, -t)); /* x log2(e) - t */
    const float y = ex2_approx(t);
    /* Outside, y is 0, infinity or NaN already, and the correction could turn it into NaN. */
    return fabsf(t) < 128.0f ? fma_rn(y, rest * LN_2, y) : y;
}

GT_HD float expm1_neg(float x) {
    /* Near zero 2^t - 1 cancels: there x + x^2 p(x), p of degree 5 for [-0.75, 0]. */
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

GT_HD float sigmoid(float x) {
    const float e = exp_accurate(-fabsf(x));
    const float y = rcp_approx(1.0f + e);
    return x < 0.0f ? e * y : y;
}

/* The exponential of a positive number overflows to infinity, whose reciprocal is the 0 wanted. */
GT_HD float sigmoid_fast(float x) { return rcp_approx(1.0f + exp_fast(-x)); }

/* Far out the factor x is bounded, so that infinity meets no 0; NaN stays NaN. */
GT_HD float silu_of_sigmoid(float x, float sigmoid_x) {
    return (x < -200.0f ? -200.0f : x) * sigmoid_x;
}

GT_HD float silu(float x) { return silu_of_sigmoid(x, sigmoid(x)); }

GT_HD float silu_derivative(float x, float sigmoid_x) {
    const float bounded = x < -200.0f ? -200.0f : x > 200.0f ? 200.0f : x;
    return sigmoid_x * fma_rn(bounded, 1.0f - sigmoid_x, 1.0f);
}

/* ---- tensor core fragments ------------------------------------------------------------------- */

/* With g = lane / 4 and j = lane % 4, a lane holds of a product C[16][8] += A[16][K] B[K][8]:
 *
 *   m16n8k16, 16-bit operands (mma_bf16, mma_f16); a register holds two elements, lower index in
 *   the lower half:
 *     | a[0]            | a[1]              | a[2]              | a[3]                |
 *     | A[g][2j,2j+1]   | A[g+8][2j,2j+1]   | A[g][2j+8,2j+9]   | A[g+8][2j+8,2j+9]   |
 *     | b0              | b1                |
 *     | B[2j,2j+1][g]   | B[2j+8,2j+9][g]   |
 *
 *   m16n8k8, tf32 operands (mma_tf32):
 *     | a[0]            | a[1]              | a[2]              | a[3]                |
 *     | A[g][j]         | A[g+8][j]         | A[g][j+4]         | A[g+8][j+4]         |
 *     | b0              | b1                |
 *     | B[j][g]         | B[j+4][g]         |
 *
 *   both, fp32 accumulators:
 *     | c[0]            | c[1]              | c[2]              | c[3]                |
 *     | C[g][2j]        | C[g][2j+1]        | C[g+8][2j]        | C[g+8][2j+1]        |
 *
 * ldmatrix reads matrices of 8 rows of 8 16-bit elements, 16 bytes a row, each row at a 16-byte
 * aligned address of its own.  Lane 8m + i gives the address of row i of matrix m (lanes beyond the
 * last matrix give any value), and register m receives
 *
 *     ldmatrix          M_m[g][2j,2j+1]            ldmatrix ..._trans          M_m[2j,2j+1][g]
 *
 * so from A stored by rows, x4 with M_0 = A[0..7][0..7], M_1 = A[8..15][0..7],
 * M_2 = A[0..7][8..15], M_3 = A[8..15][8..15] is the A fragment; from B stored as B[k][n] x2_trans,
 * and from B stored as B^T[n][k] x2, with the two halves of k, is the B fragment.
 * movmatrix_trans turns a register that holds M[g][2j,2j+1] into M[2j,2j+1][g].
 *
 * | primitive                                  | PTX                                              |
 * |--------------------------------------------|--------------------------------------------------|
 * | mma_bf16(c, a, b0, b1)                     | mma.sync.aligned.m16n8k16.row.col.f32.bf16...    |
 * | mma_f16(c, a, b0, b1)                      | mma.sync.aligned.m16n8k16.row.col.f32.f16...     |
 * | mma<T>(c, a, b0, b1)                       | one of these, for T = bf16, f16                  |
 * | mma_tf32(c, a, b0, b1)                     | mma.sync.aligned.m16n8k8.row.col.f32.tf32...     |
 * | ldmatrix_x1(r, addr), _x2, _x4; ..._trans  | ldmatrix.sync.aligned.m8n8.x1[.trans].shared.b16 |
 * | movmatrix_trans(r)                         | movmatrix.sync.aligned.m8n8.trans.b16            |
 *
 * A warpgroup, of 4 warps from a multiple of 4 on, multiplies as one: C[64][128] += A[64][8] B[8][128],
 * of tf32.  A warp has rows 16 (warp % 4) ... + 15 of A and C, in the registers of mma_tf32: c[i] are
 * columns 8i ... 8i + 7.  B lies in shared memory as B^T[n][k]: 8 rows of 4 neighbours, 16 bytes a
 * row, are 128 bytes side by side, at a multiple of 16; the next 4 of k are k_bytes further, the next
 * 8 of n n_bytes, both multiples of 16.
 *
 * | primitive                              | PTX                                                  |
 * |----------------------------------------|------------------------------------------------------|
 * | wgmma_operand(addr, k_bytes, n_bytes)  | a matrix descriptor without swizzle                  |
 * | wgmma_tf32(c, a, b)                    | wgmma.mma_async.sync.aligned.m64n128k8.f32.tf32.tf32 |
 * | wgmma_fence(), wgmma_commit()          | wgmma.fence, wgmma.commit_group                      |
 * | wgmma_wait<N>()                        | wgmma.wait_group: at most the N latest groups run on |
 * | fence_async_proxy()                    | fence.proxy.async.shared::cta                        |
 *
 * wgmma_tf32 only starts the product.  Until a wgmma_wait ends its group, c and a are neither read nor
 * written, but as c of further products, nor is B written.  A wgmma_fence comes between what was done
 * with c and a before and the product.  Who writes B calls fence_async_proxy before the barrier that
 * hands it over.
 */

/* ---- memory, ordering and warp primitives ---------------------------------------------------- */

/* | primitive                          | semantics (PTX)                                          |
 * |------------------------------------|----------------------------------------------------------|
 * | smem_base()                        | shared address of the dynamic shared memory, a multiple  |
 * |                                    | of 128                                                   |
 * | lds<T>(addr), sts<T>(addr, v)      | ld.shared, st.shared; T trivially copyable of 2, 4, 8 or |
 * |                                    | 16 bytes; addr aligned to sizeof(T)                      |
 * | ldg<T>(p), stg<T>(p, v)            | ld.global, st.global of a vector; p aligned to sizeof(T) |
 * | cp_async<BYTES>(addr, p, n)        | cp.async of 4, 8 or 16 bytes, global to shared: copies n |
 * |                                    | bytes (even, 0 to BYTES, default all) and zero-fills the |
 * |                                    | rest; addr and p aligned to BYTES, even where n is 0     |
 * | cp_async_commit()                  | closes the calling thread's group of copies              |
 * | cp_async_wait<N>()                 | waits until at most the N latest groups of the calling   |
 * |                                    | thread are in flight; other threads see the data only    |
 * |                                    | after a barrier that follows                             |
 * | sync_warp()                        | bar.warp.sync: orders memory between the lanes of a warp |
 * | sync_threads()                     | bar.sync 0 for the whole block                           |
 * | bar_sync(id, n)                    | bar.sync: waits until n threads, whole warps, have come  |
 * |                                    | to barrier id (0 to 15; 0 is sync_threads')              |
 * | mbarrier_init(addr, n)             | mbarrier.init: a barrier of 8 aligned bytes for n        |
 * |                                    | arriving threads, whole warps; a sync_threads comes      |
 * |                                    | before its use.  Its phases have parities 0, 1, 0 ...    |
 * | mbarrier_arrive(addr)              | mbarrier.arrive: the n-th thread completes the phase and |
 * |                                    | begins the next.  Each thread of the warp counts: with   |
 * |                                    | one for all, behind sync_warp, racecheck sees hazards    |
 * | mbarrier_wait(addr, parity)        | mbarrier.try_wait.parity until the latest phase of that  |
 * |                                    | parity is complete; that before the first, of parity 1,  |
 * |                                    | counts as complete                                       |
 * | wait_for_chain()                   | griddepcontrol: waits until the kernels before this one  |
 * |                                    | in its Chain are complete and what they wrote is         |
 * |                                    | visible, then lets blocks of the next take free places.  |
 * |                                    | Nothing before sm_90 and where no kernel runs ahead      |
 * | shfl_xor(v, mask), shfl_idx(v, l)  | value of lane (lane ^ mask), of lane l                   |
 * | shfl_up(v, d), shfl_down(v, d)     | value of lane - d, lane + d; own value past the ends     |
 * | warp_sum(v)                        | sum over the warp, the same bits in every lane           |
 * | warp_any(c)                        | whether c holds in any lane                              |
 *
 * Only sync_warp and the barriers order one lane's memory accesses before another's: an arrival
 * those before it, for whoever waits for its phase. */

#ifndef GT_EMU

GT_DEV int thread_id() { return (int)threadIdx.x; }
GT_DEV int lane_id() { return (int)(threadIdx.x & 31); }
GT_DEV int warp_id() { return (int)(threadIdx.x >> 5); }
GT_DEV int block_threads() { return (int)blockDim.x; }
GT_DEV int block_x() { return (int)blockIdx.x; }
GT_DEV int block_y() { return (int)blockIdx.y; }
GT_DEV int block_z() { return (int)blockIdx.z; }
GT_DEV int grid_x() { return (int)gridDim.x; }
GT_DEV int grid_y() { return (int)gridDim.y; }
GT_DEV int grid_z() { return (int)gridDim.z; }

GT_DEV uint32_t smem_base() {
    extern __shared__ __align__(128) unsigned char gt_dynamic_smem[];
    return (uint32_t)__cvta_generic_to_shared(gt_dynamic_smem);
}

template <class T>
GT_DEV T lds(uint32_t addr) {
    static_assert(std::is_trivially_copyable<T>::value, "lds moves plain data");
    T value;
    if constexpr (sizeof(T) == 2) {
        uint16_t bits;
        asm volatile("ld.shared.b16 %0, [%1];" : "=h"(bits) : "r"(addr) : "memory");
        memcpy(&value, &bits, sizeof value);
    } else if constexpr (sizeof(T) == 4) {
        uint32_t bits;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(bits) : "r"(addr) : "memory");
        memcpy(&value, &bits, sizeof value);
    } else if constexpr (sizeof(T) == 8) {
        uint32_t bits[2];
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                     : "=r"(bits[0]), "=r"(bits[1])
                     : "r"(addr)
                     : "memory");
        memcpy(&value, bits, sizeof value);
    } else {
        static_assert(sizeof(T) == 16, "lds moves 2, 4, 8 or 16 bytes");
        uint32_t bits[4];
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(bits[0]), "=r"(bits[1]), "=r"(bits[2]), "=r"(bits[3])
                     : "r"(addr)
                     : "memory");
        memcpy(&value, bits, sizeof value);
    }
    return value;
}

template <class T>
GT_DEV void sts(uint32_t addr, T value) {
    static_assert(std::is_trivially_copyable<T>::value, "sts moves plain data");
    if constexpr (sizeof(T) == 2) {
        uint16_t bits;
        memcpy(&bits, &value, sizeof value);
        asm volatile("st.shared.b16 [%0], %1;" ::"r"(addr), "h"(bits) : "memory");
    } else if constexpr (sizeof(T) == 4) {
        uint32_t bits;
        memcpy(&bits, &value, sizeof value);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(addr), "r"(bits) : "memory");
    } else if constexpr (sizeof(T) == 8) {
        uint32_t bits[2];
        memcpy(bits, &value, sizeof value);
        asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(addr), "r"(bits[0]), "r"(bits[1])
                     : "memory");
    } else {
        static_assert(sizeof(T) == 16, "sts moves 2, 4, 8 or 16 bytes");
        uint32_t bits[4];
        memcpy(bits, &value, sizeof value);
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(bits[0]),
                     "r"(bits[1]), "r"(bits[2]), "r"(bits[3])
                     : "memory");
    }
}

template <class T>
GT_DEV T ldg(const void* source) {
    return *static_cast<const T*>(source);
}

template <class T>
GT_DEV void stg(void* target, T value) {
    if constexpr (sizeof(T) == 16) { /* left to the compiler, it may fall apart into four stores */
        uint32_t bits[4];
        memcpy(bits, &value, sizeof value);
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(target)),
                     "r"(bits[0]), "r"(bits[1]), "r"(bits[2]), "r"(bits[3])
                     : "memory");
    } else {
        *static_cast<T*>(target) = value;
    }
}

template <int BYTES>
GT_DEV void cp_async(uint32_t addr, const void* source, int copied = BYTES) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async moves 4, 8 or 16 bytes");
#if GT_SM80
    const size_t global = __cvta_generic_to_global(source);
    if constexpr (BYTES == 16) { /* .cg keeps the stream out of the first-level cache */
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(addr), "l"(global),
                     "r"(copied)
                     : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(addr), "l"(global),
                     "n"(BYTES), "r"(copied)
                     : "memory");
    }
#else
    const uint32_t* words = static_cast<const uint32_t*>(source);
    GT_UNROLL
    for (int i = 0; i < BYTES / 4; i++) {
        uint32_t word = 0;
        if (copied >= 4 * i + 4) {
            word = words[i];
        } else if (copied >= 4 * i + 2) {
            word = reinterpret_cast<const uint16_t*>(words)[2 * i];
        }
        sts<uint32_t>(addr + 4 * i, word);
    }
#endif
}

/* A pointer that was kept in shared memory, known again to be one to global memory. */
template <class T>
GT_DEV T* global_pointer(void* pointer) {
    __builtin_assume(__isGlobal(pointer));
    return static_cast<T*>(pointer);
}

GT_DEV void cp_async_commit() {
#if GT_SM80
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int N>
GT_DEV void cp_async_wait() {
#if GT_SM80
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

GT_DEV void sync_warp() { __syncwarp(); }
GT_DEV void sync_threads() { __syncthreads(); }

GT_DEV void bar_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

GT_DEV void mbarrier_init(uint32_t addr, int threads) {
#if GT_SM80
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(addr), "r"(threads) : "memory");
#else
    __trap();
#endif
}

GT_DEV void mbarrier_arrive(uint32_t addr) {
#if GT_SM80
    asm volatile(
        "{ .reg .b64 state;\n"
        "mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(addr)
        : "memory");
#else
    __trap();
#endif
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define GT_MBARRIER_WAIT "mbarrier.try_wait.parity" /* sleeps a while */
#else
#define GT_MBARRIER_WAIT "mbarrier.test_wait.parity"
#endif

GT_DEV void mbarrier_wait(uint32_t addr, int parity) {
#if GT_SM80
    asm volatile(
        "{ .reg .pred complete;\n"
        "AGAIN: " GT_MBARRIER_WAIT ".shared.b64 complete, [%0], %1;\n"
        "@!complete bra AGAIN; }" ::"r"(addr),
        "r"(parity)
        : "memory");
#else
    __trap();
#endif
}

/* T is float, int32_t or uint32_t. */
template <class T>
GT_DEV T shfl_xor(T value, int mask) {
    return __shfl_xor_sync(0xffffffffu, value, mask);
}
template <class T>
GT_DEV T shfl_up(T value, int distance) {
    return __shfl_up_sync(0xffffffffu, value, distance);
}
template <class T>
GT_DEV T shfl_down(T value, int distance) {
    return __shfl_down_sync(0xffffffffu, value, distance);
}
template <class T>
GT_DEV T shfl_idx(T value, int lane) {
    return __shfl_sync(0xffffffffu, value, lane);
}

GT_DEV void ldmatrix_x1(uint32_t& r, uint32_t addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
                 : "=r"(r)
                 : "r"(addr)
                 : "memory");
}

GT_DEV void ldmatrix_x1_trans(uint32_t& r, uint32_t addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
                 : "=r"(r)
                 : "r"(addr)
                 : "memory");
}

GT_DEV void ldmatrix_x2(uint32_t (&r)[2], uint32_t addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(addr)
                 : "memory");
}

GT_DEV void ldmatrix_x2_trans(uint32_t (&r)[2], uint32_t addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(addr)
                 : "memory");
}

GT_DEV void ldmatrix_x4(uint32_t (&r)[4], uint32_t addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr)
                 : "memory");
}

GT_DEV void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr)
                 : "memory");
}

GT_DEV uint32_t movmatrix_trans(uint32_t r) {
    uint32_t transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(r));
    return transposed;
}

GT_DEV void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if GT_SM80
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    __trap();
#endif
}

GT_DEV void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if GT_SM80
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

GT_DEV void mma_tf32(float (&c)[4], const float (&a)[4], float b0, float b1) {
#if GT_SM80
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(as_uint(a[0])), "r"(as_uint(a[1])), "r"(as_uint(a[2])), "r"(as_uint(a[3])),
          "r"(as_uint(b0)), "r"(as_uint(b1)));
#else
    __trap();
#endif
}

GT_DEV uint64_t wgmma_operand(uint32_t addr, uint32_t k_bytes, uint32_t n_bytes) {
    return (uint64_t)(addr >> 4) | (uint64_t)(k_bytes >> 4) << 16 | (uint64_t)(n_bytes >> 4) << 32;
}

GT_DEV void wgmma_fence() {
#if GT_SM90A
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#else
    __trap();
#endif
}

GT_DEV void wgmma_commit() {
#if GT_SM90A
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#else
    __trap();
#endif
}

template <int N>
GT_DEV void wgmma_wait() {
#if GT_SM90A
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
#else
    __trap();
#endif
}

GT_DEV void fence_async_proxy() {
#if GT_SM90A
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#else
    __trap();
#endif
}

GT_DEV void wgmma_tf32(float (&c)[16][4], const float (&a)[4], uint64_t b) {
#if GT_SM90A
#define GT_TILE(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k8.f32.tf32.tf32 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, 1, 1, 1;"
        : GT_TILE(0), GT_TILE(1), GT_TILE(2), GT_TILE(3), GT_TILE(4), GT_TILE(5), GT_TILE(6),
          GT_TILE(7), GT_TILE(8), GT_TILE(9), GT_TILE(10), GT_TILE(11), GT_TILE(12), GT_TILE(13),
          GT_TILE(14), GT_TILE(15)
        : "r"(as_uint(a[0])), "r"(as_uint(a[1])), "r"(as_uint(a[2])), "r"(as_uint(a[3])), "l"(b));
#undef GT_TILE
#else
    __trap();
#endif
}

#endif /* GT_EMU */

template <class T>
GT_DEV void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    static_assert(std::is_same<T, bf16>::value || std::is_same<T, f16>::value, "16-bit operands");
    if constexpr (std::is_same<T, bf16>::value) {
        mma_bf16(c, a, b0, b1);
    } else {
        mma_f16(c, a, b0, b1);
    }
}

GT_DEV float warp_sum(float value) {
    GT_UNROLL
    for (int mask = 16; mask > 0; mask >>= 1) value += shfl_xor(value, mask);
    return value;
}

/* True in every lane if it is in one (vote.any). */
GT_DEV bool warp_any(bool condition) {
#ifdef GT_EMU
    uint32_t any = condition;
    for (int mask = 16; mask > 0; mask >>= 1) any |= shfl_xor(any, mask);
    return any != 0;
#else
    return __any_sync(0xffffffffu, condition);
#endif
}

#ifndef GT_EMU
GT_DEV void wait_for_chain() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
#endif

/* ---- launch ---------------------------------------------------------------------------------- */

#ifndef GT_EMU

/* Blocks in each dimension: x up to 2^31 - 1, y and z up to 65535. */
struct Grid {
    unsigned x, y = 1, z = 1;
};

/* Lets a kernel use more dynamic shared memory than the 48 KB that need no asking. */
static inline cudaError_t allow_smem(const void* kernel, size_t bytes) {
#if CUDART_VERSION >= 12060
    /* Unlike cudaFuncSetAttribute, this leaves an error that was pending before as it is. */
    cudaKernel_t handle;
    int device;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaGetKernel(&handle, kernel);
    if (error != cudaSuccess) return error;
    return cudaKernelSetAttributeForDevice(handle, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           (int)bytes, device);
#else
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
#endif
}

/* Whether a kernel, and with it all that were compiled beside it, has the wait of wait_for_chain: not what the
 * driver makes of the PTX of an older architecture than sm_90, whatever the GPU.  CUDA before 12.3 cannot
 * capture launches that need it: no, too. */
static inline bool waits_for_chain(const void* kernel) {
#if CUDART_VERSION >= 12030
    int driver = 0;
    cudaFuncAttributes attributes;
    if (cudaPeekAtLastError() != cudaSuccess) return false; /* pending: the questions could clear it */
    if (cudaDriverGetVersion(&driver) == cudaSuccess && driver >= 12030 &&
        cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess)
        return attributes.ptxVersion >= 90;
    (void)cudaGetLastError(); /* the launch will say what is wrong */
#endif
    (void)kernel;
    return false;
}

/* Most threads that a block of a kernel may have.  It may have to be loaded, inside a capture too. */
static inline cudaError_t ask_most_threads(const void* kernel, int* most) {
    cudaFuncAttributes attributes;
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaError_t error = cudaThreadExchangeStreamCaptureMode(&mode);
    if (error != cudaSuccess) return error;
    error = cudaFuncGetAttributes(&attributes, kernel);
    if (error == cudaSuccess) *most = attributes.maxThreadsPerBlock;
    const cudaError_t back = cudaThreadExchangeStreamCaptureMode(&mode);
    return error == cudaSuccess ? back : error;
}

/* Enqueues a kernel on a stream and returns the launch's own error; errors that were pending before
 * are neither cleared nor returned.  May be the first CUDA call ever, also inside a capture.
 * runs_ahead: its blocks may start before the kernel before it on the stream is complete. */
template <class Params>
static inline cudaError_t launch(void (*kernel)(Params), Grid grid, unsigned threads,
                                 size_t smem_bytes, cudaStream_t stream, const Params& params,
                                 bool runs_ahead = false) {
    static_assert(std::is_trivially_copyable<Params>::value, "parameters are copied bit by bit");
    const void* function = reinterpret_cast<const void*>(kernel);
    if (smem_bytes > 48 * 1024) {
        const cudaError_t error = allow_smem(function, smem_bytes);
        if (error != cudaSuccess) return error;
    }
    void* arguments[] = {const_cast<void*>(static_cast<const void*>(&params))};
    if (!runs_ahead)
        return cudaLaunchKernel(function, dim3(grid.x, grid.y, grid.z), dim3(threads), arguments,
                                smem_bytes, stream);
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(grid.x, grid.y, grid.z);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = smem_bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaLaunchKernelExC(&config, function, arguments);
}

#endif /* GT_EMU */

/* ---- host side of the operators -------------------------------------------------------------- */

/* CUDA calls of the library clear the error that they cause themselves, so that it is reported once,
 * here, and not again by the caller's next cudaGetLastError; an older pending error stays. */
static inline gt_status report(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return GT_OK;
#ifndef GT_EMU
    if (cudaPeekAtLastError() == error) (void)cudaGetLastError();
    if (error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver)
        return gt_fail(GT_ERROR_NO_DEVICE, "%s: %s", what, cudaGetErrorString(error));
    if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction)
        return gt_fail(GT_ERROR_ARCH, "%s: %s", what, cudaGetErrorString(error));
    return gt_fail(GT_ERROR_CUDA, "%s: %s", what, cudaGetErrorString(error));
#else
    return gt_fail(GT_ERROR_CUDA, "%s: emulated launch failed", what);
#endif
}

/* What launchers need to know of the current device. */
struct Device {
    int multiprocessors, compute_capability; /* 90 for 9.0 */
    int shared_bytes;                        /* that a block may have */
};

static inline gt_status current_device(Device* device) {
    int id = 0, major = 0, minor = 0;
    cudaError_t error = cudaGetDevice(&id);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, id);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, id);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&device->multiprocessors, cudaDevAttrMultiProcessorCount, id);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&device->shared_bytes,
                                       cudaDevAttrMaxSharedMemoryPerBlockOptin, id);
#ifdef GT_SHARED_LIMIT /* tests: what devices with less than this one get */
    if (device->shared_bytes > GT_SHARED_LIMIT) device->shared_bytes = GT_SHARED_LIMIT;
#endif
    device->compute_capability = 10 * major + minor;
    if (error != cudaSuccess) return report(error, "device");
    if (device->compute_capability < 75)
        return gt_fail(GT_ERROR_ARCH, "device %d has compute capability %d.%d: 7.5 or newer needed",
                       id, major, minor);
    return GT_OK;
}

/* What is known of a kernel, by device: 0, or 1 + whether it runs there. */
typedef std::atomic<signed char> Answers[64];

/* Whether a kernel that only compute capability 9.0 has, in blocks of `threads`, runs on the current
 * device.  What other architectures get under its name, also from PTX by the driver, is bounded to
 * blocks of one warp.  The driver is asked once, but not while an error is pending, which the question
 * could clear: until it is known, the answer is no. */
static inline bool has_sm90a(const void* kernel, int threads, Answers& known) {
    Device device;
#ifdef GT_EMU
    (void)kernel, (void)threads, (void)known;
    return current_device(&device) == GT_OK && device.compute_capability == 90;
#else
    int id = 0, most = 0;
    if (cudaGetDevice(&id) != cudaSuccess || id >= 64) return false;
    if (known[id] == 0 && cudaPeekAtLastError() == cudaSuccess) {
        if (current_device(&device) == GT_OK &&
            (device.compute_capability != 90 || ask_most_threads(kernel, &most) == cudaSuccess))
            known[id] = (signed char)(1 + (most >= threads));
        else
            (void)cudaGetLastError(); /* the launch will say what is wrong */
    }
    return known[id] == 2;
#endif
}

/* Hands out pieces of a caller's buffer, each aligned to 256 bytes; with no buffer it only counts.
 * bytes() includes the slack for a buffer that is not aligned itself. */
class Arena {
public:
    explicit Arena(void* buffer) : base_((uintptr_t)buffer) {}
    template <class T>
    T* take(int64_t count) {
        const uintptr_t start = (base_ + 255) / 256 * 256 + used_;
        used_ += ((size_t)count * sizeof(T) + 255) / 256 * 256;
        return base_ ? reinterpret_cast<T*>(start) : nullptr;
    }
    size_t bytes() const { return used_ ? used_ + 256 : 0; }

private:
    uintptr_t base_;
    size_t used_ = 0;
};

/* `count` floats in a caller's buffer of any alignment; *bytes is what such a buffer must have. */
static inline float* floats_in(const void* buffer, int64_t count, size_t* bytes) {
    Arena arena(const_cast<void*>(buffer));
    float* floats = arena.take<float>(count);
    *bytes = arena.bytes();
    return floats;
}

static inline gt_status check_workspace(const void* workspace, size_t bytes, size_t need) {
    if (need == 0 || (workspace && bytes >= need)) return GT_OK;
    if (!workspace)
        return gt_fail(GT_ERROR_WORKSPACE, "workspace is NULL: %zu bytes needed", need);
    return gt_fail(GT_ERROR_WORKSPACE, "workspace_bytes = %zu: %zu needed", bytes, need);
}

static inline gt_status check_saved(const void* saved, size_t bytes, size_t need) {
    if (!saved || bytes >= need) return GT_OK;
    return gt_fail(GT_ERROR_SAVED, "saved_bytes = %zu: %zu needed", bytes, need);
}

/* The kernels that one call enqueues, one after another.  From sm_90 on, blocks of each but the first take
 * their places while the kernel before still runs (programmatic dependent launch), which hides the time that a
 * launch takes.  So threads call wait_for_chain() before they read what another kernel of the chain writes, or write
 * what it reads or writes; inputs of the call are there, since the first kernel waits, as any does, for all that was
 * on the stream before.  Blocks that share nothing need not wait, but some block of every kernel must, or the kernels
 * after it would not wait for those before it.  The emulation checks both. */
struct Chain {
    gt_stream stream;
    const void* first = nullptr; /* kernel, once it is launched */
    bool is_known = false, runs_ahead = false; /* how those after it are launched */
};

/* Launches a kernel on `blocks` blocks; none are launched for 0. */
template <class Params>
static inline gt_status run(const char* name, void (*kernel)(Params), int64_t blocks,
                            unsigned threads, size_t smem_bytes, Chain& chain, const Params& params) {
    if (blocks == 0) return GT_OK;
    if (blocks > INT32_MAX)
        return gt_fail(GT_ERROR_SIZE, "%s: %lld blocks exceed a grid", name, (long long)blocks);
    Grid grid = {};
    grid.x = (unsigned)blocks;
    grid.y = grid.z = 1;
    const cudaStream_t stream = (cudaStream_t)chain.stream;
#ifdef GT_EMU
    const bool follows = chain.first;
    chain.first = reinterpret_cast<const void*>(kernel);
    return report(launch(kernel, grid, threads, smem_bytes, stream, params, follows), name);
#else
    if (!chain.first) {
        chain.first = reinterpret_cast<const void*>(kernel);
    } else if (!chain.is_known) { /* the first is loaded by now, also inside a capture */
        chain.runs_ahead = waits_for_chain(chain.first);
        chain.is_known = true;
    }
    return report(launch(kernel, grid, threads, smem_bytes, stream, params, chain.runs_ahead), name);
#endif
}

/* The same outside of a chain. */
template <class Params>
static inline gt_status run(const char* name, void (*kernel)(Params), int64_t blocks,
                            unsigned threads, size_t smem_bytes, gt_stream stream,
                            const Params& params) {
    Chain alone = {stream};
    return run(name, kernel, blocks, threads, smem_bytes, alone, params);
}

/* ---- vectors --------------------------------------------------------------------------------- */

/* N neighbouring elements as they lie in memory, aligned together: what one load moves. */
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

/* x[i] = element index + i * step for i < valid, 0 beyond.  All loads are in flight together: one branch
 * on the dtype, none between them. */
template <class T, int COUNT>
GT_DEV void load_column_of(float (&x)[COUNT], const void* data, int64_t index, int64_t step,
                           int valid) {
    const T* from = static_cast<const T*>(data) + index;
    T raw[COUNT];
    GT_UNROLL
    for (int i = 0; i < COUNT; i++) raw[i] = from[(i < valid ? i : 0) * step];
    GT_UNROLL
    for (int i = 0; i < COUNT; i++) x[i] = i < valid ? Element<T>::load(raw, i) : 0.0f;
}

template <int COUNT>
GT_DEV void load_column(float (&x)[COUNT], const void* data, gt_dtype dtype, int64_t index,
                        int64_t step, int64_t valid) {
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

/* ---- reduce_rows: the second half of every sum over batch and time --------------------------------
 * out[c] (+)= sum_r in[r][c], r ascending within each of 16 interleaved partial sums, which are then
 * added in a fixed order: the result depends on the shape alone.
 * grid ceil(columns/32), block 512 = 16 rows x 32 columns; 2 KB of shared memory; reads
 * rows*columns*4 bytes once. */
constexpr int REDUCED_ROWS = 16; /* at a time */

struct ReduceRowsParams {
    const float* in;
    float* out;
    int64_t rows, columns;
    int accumulate;
};

GT_KERNEL(32 * REDUCED_ROWS, 1) reduce_rows_kernel(const GT_GRID_CONSTANT ReduceRowsParams p) {
    constexpr int BATCH = 16; /* loads in flight */
    wait_for_chain();
    const int64_t c = (int64_t)block_x() * 32 + lane_id();
    float sum = 0.0f;
    for (int64_t r = warp_id(); c < p.columns && r < p.rows; r += BATCH * REDUCED_ROWS) {
        float x[BATCH];
        load_column(x, p.in, GT_F32, r * p.columns + c, REDUCED_ROWS * p.columns,
                    (p.rows - r + REDUCED_ROWS - 1) / REDUCED_ROWS);
        GT_UNROLL
        for (int i = 0; i < BATCH; i++) sum += x[i];
    }
    const uint32_t cells = smem_base();
    sts<float>(cells + 4 * thread_id(), sum);
    sync_threads();
    if (warp_id() == 0 && c < p.columns) {
        sum = 0.0f;
        for (int i = 0; i < REDUCED_ROWS; i++) sum += lds<float>(cells + 4 * (32 * i + lane_id()));
        p.out[c] = p.accumulate ? p.out[c] + sum : sum;
    }
}

/* gt_device_supported: whether this build's kernels run on `device` (-1: the current one). */
static inline gt_status device_supported(int device) {
#ifdef GT_EMU
    return device <= 0 ? GT_OK : gt_fail(GT_ERROR_VALUE, "device = %d: there is one", device);
#else
    int count = 0, current = 0, major = 0, minor = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error == cudaSuccess && count == 0) error = cudaErrorNoDevice;
    if (error == cudaSuccess) error = cudaGetDevice(&current);
    if (error != cudaSuccess) return report(error, "device");
    if (device < -1 || device >= count)
        return gt_fail(GT_ERROR_VALUE, "device = %d: must be -1 to %d", device, count - 1);
    if (device == -1) device = current;
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (error == cudaSuccess && 10 * major + minor < 75)
        return gt_fail(GT_ERROR_ARCH, "device %d has compute capability %d.%d: 7.5 or newer needed",
                       device, major, minor);
    /* a kernel stands for all: they are compiled for the same architectures */
    cudaFuncAttributes attributes;
    if (error == cudaSuccess && device != current) error = cudaSetDevice(device);
    if (error == cudaSuccess) {
        error = cudaFuncGetAttributes(&attributes, (const void*)reduce_rows_kernel);
        if (device != current) (void)cudaSetDevice(current);
    }
    return report(error, "kernels");
#endif
}

/* stream: a gt_stream, or a Chain. */
template <class Stream>
static inline gt_status reduce_rows(const float* in, float* out, int64_t rows, int64_t columns,
                                    int accumulate, Stream& stream) {
    const ReduceRowsParams params = {in, out, rows, columns, accumulate};
    return run("reduce_rows", reduce_rows_kernel, (columns + 31) / 32,
               32 * REDUCED_ROWS, 4 * 32 * REDUCED_ROWS, stream, params);
}

} /* namespace gt */

#endif /* GT_COMMON_CUH */
