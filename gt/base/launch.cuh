/* gt/base/launch.cuh - what the host side of the operators is made of: launches, the current device, workspace.
 *
 * CONTENTS
 *   launch     Grid launch
 *   operators  report current_device has_sm90a Arena floats_in check_workspace check_saved Chain run
 *   division   Divider divide_by divide */
#ifndef GT_BASE_LAUNCH_CUH
#define GT_BASE_LAUNCH_CUH

#include "device.cuh"
#include "op.h"

#include <string.h>

#include <atomic>

namespace gt {

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
    return cudaKernelSetAttributeForDevice(handle, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes, device);
#else
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
#endif
}

/* Whether a kernel waits in wait_for_chain(); all that were compiled beside it do likewise.  Code that the driver makes
 * from PTX of an architecture before sm_90 does not, on any GPU.  Also no with CUDA before 12.3, which cannot capture
 * launches that run ahead. */
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

/* Most threads that a block of a kernel may have.  The question may load the kernel, which a capture of the stream
 * allows in relaxed mode alone. */
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
static inline cudaError_t launch(void (*kernel)(Params), Grid grid, unsigned threads, size_t smem_bytes,
                                 cudaStream_t stream, const Params& params, bool runs_ahead = false) {
    static_assert(std::is_trivially_copyable<Params>::value, "parameters are copied bit by bit");
    const void* function = reinterpret_cast<const void*>(kernel);
    if (smem_bytes > 48 * 1024) {
        const cudaError_t error = allow_smem(function, smem_bytes);
        if (error != cudaSuccess) return error;
    }
    void* arguments[] = {const_cast<void*>(static_cast<const void*>(&params))};
    if (!runs_ahead)
        return cudaLaunchKernel(function, dim3(grid.x, grid.y, grid.z), dim3(threads), arguments, smem_bytes, stream);
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
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, id);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, id);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&device->multiprocessors, cudaDevAttrMultiProcessorCount, id);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&device->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, id);
#ifdef GT_SHARED_LIMIT /* tests: what devices with less than this one get */
    if (device->shared_bytes > GT_SHARED_LIMIT) device->shared_bytes = GT_SHARED_LIMIT;
#endif
    device->compute_capability = 10 * major + minor;
    if (error != cudaSuccess) return report(error, "device");
    if (device->compute_capability < 75)
        return gt_fail(GT_ERROR_ARCH, "device %d has compute capability %d.%d: 7.5 or newer needed", id, major, minor);
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
    if (!workspace) return gt_fail(GT_ERROR_WORKSPACE, "workspace is NULL: %zu bytes needed", need);
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
    const void* first = nullptr;               /* kernel, once it is launched */
    bool is_known = false, runs_ahead = false; /* how those after it are launched */
};

/* Names of kernels, in the order of their launches; neighbours of one name are one. */
struct KernelList {
    const char* names[32];
    int times[32], count;
    void add(const char* name) {
        if (count > 0 && !strcmp(names[count - 1], name)) {
            times[count - 1]++;
        } else if (count < 32) {
            names[count] = name;
            times[count++] = 1;
        }
    }
};

/* Where run() notes kernels of this thread instead of launching them: see path.cuh.  NULL: it launches them. */
static inline KernelList* noted_kernels() { return static_cast<KernelList*>(*gt_noted_kernels()); }

/* Launches a kernel on `blocks` blocks; none are launched for 0. */
template <class Params>
static inline gt_status run(const char* name, void (*kernel)(Params), int64_t blocks, unsigned threads,
                            size_t smem_bytes, Chain& chain, const Params& params) {
    if (blocks == 0) return GT_OK;
    if (blocks > INT32_MAX) return gt_fail(GT_ERROR_SIZE, "%s: %lld blocks exceed a grid", name, (long long)blocks);
    if (KernelList* list = noted_kernels()) {
        list->add(name);
        return GT_OK;
    }
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
static inline gt_status run(const char* name, void (*kernel)(Params), int64_t blocks, unsigned threads,
                            size_t smem_bytes, gt_stream stream, const Params& params) {
    Chain alone = {stream};
    return run(name, kernel, blocks, threads, smem_bytes, alone, params);
}

/* ---- division by a number that the host knows ------------------------------------------------ */

/* (x + the upper half of x times magic) >> shift, for x < 2^31. */
struct Divider {
    uint32_t magic, shift;
    int divisor;
};

/* divisor < 1, of an empty size for which nothing is launched, counts as 1. */
static inline Divider divide_by(int divisor) {
    if (divisor < 1) divisor = 1;
    uint32_t shift = 0;
    while ((int64_t)1 << shift < divisor) shift++;
    const uint64_t rest = ((uint64_t)1 << shift) - (uint64_t)divisor;
    return {(uint32_t)((rest << 32) / (uint64_t)divisor + 1), shift, divisor};
}

GT_DEV int divide(int x, const Divider& by, int* remainder) {
    const uint32_t high = (uint32_t)((uint64_t)(uint32_t)x * by.magic >> 32);
    const int quotient = (int)((high + (uint32_t)x) >> by.shift);
    *remainder = x - quotient * by.divisor;
    return quotient;
}

} /* namespace gt */

#endif
