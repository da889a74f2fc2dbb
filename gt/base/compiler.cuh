/* gt/base/compiler.cuh - macros with which nvcc or, with GT_EMU defined, an ordinary C++ compiler compiles the kernels.
 * Other macros describe the target architecture. */
#ifndef GT_BASE_COMPILER_CUH
#define GT_BASE_COMPILER_CUH

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <type_traits>

#if defined(GT_EMU)
/* The emulation, gt/emu/, stands in for the CUDA runtime. */
#elif defined(__CUDACC__)
#include <cuda_runtime.h>
#else
#error "kernels need nvcc, or a C++17 compiler with GT_EMU defined"
#endif

/* GT_DEV      a device function, in namespace scope or a static member
 * GT_DEV_CALL a device function that is called, not inlined: for rare paths
 * GT_HD       a function for host and device
 * GT_METHOD   a device member function that uses `this`
 * GT_KERNEL(threads, min_blocks) name(params): a kernel that is launched with `threads` threads.  It is compiled so
 *            that `min_blocks` blocks fit on a multiprocessor.  It may follow template <...> */
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
#define GT_KERNEL(threads, min_blocks) [[maybe_unused]] static __global__ void __launch_bounds__(threads, min_blocks)
#define GT_GRID_CONSTANT __grid_constant__
#define GT_UNROLL _Pragma("unroll")
#define GT_NO_UNROLL _Pragma("unroll 1")
#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define GT_SM80 1
#else
#define GT_SM80 0
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define GT_SM90 1
#else
#define GT_SM90 0
#endif

/* Whether to compile the bodies of kernels that need newer instructions.  GT_SM80_KERNELS: mma of bf16 and tf32, and
 * mbarriers, which need compute capability 8.0.  GT_SM90A: instructions that exist on 9.0 alone.  For other targets a
 * body is empty, and the host never launches the kernel. */
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

/* Shared memory of a multiprocessor in KB, as far as the compiler can know it.  The driver may also compile PTX for 8.0
 * on newer devices, so 8.0 gets the largest value. */
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ / 100 == 12)
#define GT_SHARED_KB 100
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 870
#define GT_SHARED_KB 164
#else
#define GT_SHARED_KB 228
#endif

#endif
