/* gt/emu/runtime.h - stand-ins for the part of the CUDA runtime that the library uses. */
#ifndef GT_EMU_RUNTIME_H
#define GT_EMU_RUNTIME_H

#include <cxxabi.h>
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <string>
#include <type_traits>
#include <vector>

#ifdef __linux__
#include <elf.h>
#include <link.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#define EMU_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define EMU_ASAN 1
#endif
#endif
#ifdef EMU_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

/* Marks functions that read variables of kernels as registers.  The variables may be out of scope, so AddressSanitizer
 * must not check these functions. */
#ifdef EMU_ASAN
#define EMU_UNCHECKED __attribute__((no_sanitize("address")))
#else
#define EMU_UNCHECKED
#endif

/* Define EMU_UCONTEXT to switch fibers by ucontext on x86-64, too.  A switch is then slower: it makes system calls. */
#if !defined(__x86_64__) && !defined(EMU_UCONTEXT)
#define EMU_UCONTEXT 1
#endif
#ifdef EMU_UCONTEXT
#include <ucontext.h>
#endif

/* ---- stand-ins for the CUDA runtime, with its names and numbers ------------------------------ */

struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

typedef struct CUstream_st* cudaStream_t;

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorInvalidConfiguration = 9,
};

enum cudaDeviceAttr {
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};

namespace emu {

/* The device that launchers see; tests may change it.  It has few multiprocessors, so that small cases keep them
 * busy. */
struct Device {
    int multiprocessors = 4;
    int capability_major = 9, capability_minor = 0;
    int smem_per_multiprocessor = 228 * 1024;
    int smem_per_block = 227 * 1024;
};
inline Device device;

} /* namespace emu */

inline const char* cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    }
    return "unrecognized error code";
}

inline cudaError_t cudaGetDevice(int* index) {
    *index = 0;
    return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int /*device*/) {
    switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = emu::device.multiprocessors; break;
    case cudaDevAttrComputeCapabilityMajor: *value = emu::device.capability_major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = emu::device.capability_minor; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = emu::device.smem_per_multiprocessor; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = emu::device.smem_per_block; break;
    }
    return cudaSuccess;
}

inline cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t) {
    if (bytes) memset(data, value, bytes);
    return cudaSuccess;
}

#endif
