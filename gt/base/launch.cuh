/* gt/base/launch.cuh - host code that the operators share: launches, the current device, workspace.  The only kernel
 * here is a probe that is never launched.
 *
 * CONTENTS
 *   launch     Grid launch waits_for_chain ask_most_threads: calls of the CUDA runtime
 *   operators  report Device current_device   Arena floats_in check_workspace check_saved
 *              Chain run: launches a kernel, or notes its name for gt_OP_path (KernelList)
 *   division   Divider divide_by divide: kernels divide by a number that the host knows */
#ifndef GT_BASE_LAUNCH_CUH
#define GT_BASE_LAUNCH_CUH

#include "device.cuh"
#include "op.h"

#ifndef GT_EMU
#include <cuda.h>
#endif

#include <string.h>

#include <atomic>

namespace gt {

/* ---- launch ---------------------------------------------------------------------------------- */

#ifndef GT_EMU

/* Blocks in each dimension: x up to 2^31 - 1, y and z up to 65535. */
struct Grid {
    unsigned x, y = 1, z = 1;
};

/* Allows a kernel more dynamic shared memory than the default 48 KB. */
static inline cudaError_t allow_smem(const void* kernel, size_t bytes) {
#if CUDART_VERSION >= 12060
    /* Unlike cudaFuncSetAttribute, this call leaves an older pending error pending. */
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

/* Returns whether wait_for_chain() really waits in a kernel; the answer holds for all kernels of the same object.  Code
 * that the driver compiles from PTX older than sm_90 does not wait, on any GPU.  CUDA before 12.3 cannot capture
 * launches that run ahead, so the function returns false there. */
static inline bool waits_for_chain(const void* kernel) {
#if CUDART_VERSION >= 12030
    int driver = 0;
    cudaFuncAttributes attributes;
    if (cudaPeekAtLastError() != cudaSuccess) return false; /* the queries below could clear a pending error */
    if (cudaDriverGetVersion(&driver) == cudaSuccess && driver >= 12030 &&
        cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess)
        return attributes.ptxVersion >= 90;
    (void)cudaGetLastError(); /* the launch reports the error */
#endif
    (void)kernel;
    return false;
}

/* Finds a function of the driver by name.  The CUDA runtime looks it up, so programs need not link the driver's
 * library.
 * since: the CUDA version that introduced the function.  known: keeps the address for later calls. */
static inline cudaError_t find_in_driver(const char* name, int since, std::atomic<void*>& known, void** function) {
    *function = known.load();
    if (*function) return cudaSuccess;
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion(name, function, (unsigned)since, cudaEnableDefault, &found);
#else
    (void)since;
    const cudaError_t error = cudaGetDriverEntryPoint(name, function, cudaEnableDefault, &found);
#endif
    if (error != cudaSuccess) return error;
    if (found != cudaDriverEntryPointSuccess || !*function) return cudaErrorNotSupported;
    known.store(*function);
    return cudaSuccess;
}

/* Gets the maximum block size of a kernel, in threads, on the current device, `id`.  A pending error is neither cleared
 * nor returned.  cudaFuncGetAttributes might clear or return the error, so while an error is pending the function asks
 * the driver. */
static inline cudaError_t ask_threads(const void* kernel, [[maybe_unused]] int id, int* most) {
#if CUDART_VERSION >= 12060
    if (cudaPeekAtLastError() != cudaSuccess) {
        typedef CUresult (*GetAttribute)(int*, CUfunction_attribute, CUkernel, CUdevice);
        static std::atomic<void*> known{nullptr};
        void* function;
        GetAttribute get;
        cudaKernel_t handle;
        cudaError_t error = find_in_driver("cuKernelGetAttribute", 12000, known, &function);
        if (error == cudaSuccess) error = cudaGetKernel(&handle, kernel);
        if (error != cudaSuccess) return error;
        memcpy(&get, &function, sizeof get);
        const CUresult result = get(most, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, handle, id);
        return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidDeviceFunction;
    }
#endif
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error == cudaSuccess) *most = attributes.maxThreadsPerBlock;
    return error;
}

/* ask_threads() for the current device, also during a stream capture.  The query may load the kernel, and during a
 * capture a thread may load kernels only in relaxed mode. */
static inline cudaError_t ask_most_threads(const void* kernel, int* most) {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    int id;
    cudaError_t error = cudaGetDevice(&id);
    if (error == cudaSuccess) error = cudaThreadExchangeStreamCaptureMode(&mode);
    if (error != cudaSuccess) return error;
    error = ask_threads(kernel, id, most);
    const cudaError_t back = cudaThreadExchangeStreamCaptureMode(&mode);
    return error == cudaSuccess ? back : error;
}

/* Enqueues a kernel on a stream and returns the launch's own error.  Errors that were pending before are neither
 * cleared nor returned.  This may be the program's first CUDA call, even inside a capture.
 * runs_ahead: blocks may start before the stream's previous kernel is complete. */
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

/* Returns the status for an error of a CUDA call, and sets the message.  If the same error is pending, the function
 * clears it, so that the caller's next cudaGetLastError does not report it again.  A different pending error stays. */
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

/* The properties of the current device that decide how kernels are launched. */
struct Device {
    int multiprocessors, compute_capability; /* 90 for 9.0 */
    int shared_bytes;                        /* shared memory that a block may have */
    bool runs_sm90a;                         /* compute capability 9.0, and this object has code for 9.0a */
};

struct ProbeParams {};

constexpr int PROBE_THREADS = 256;

/* This kernel is never launched: ask_sm90a() only queries its attributes.  Every object of a program has its own copy,
 * since objects may be compiled for different architectures. */
GT_KERNEL(GT_SM90A ? PROBE_THREADS : 32, 1) probe_kernel(const GT_GRID_CONSTANT ProbeParams) {}

/* Gets whether this object has code for 9.0a.  `id` is the current device, of compute capability 9.0.  In code for
 * other architectures, including PTX that the driver compiles, the launch bound of probe_kernel is one warp.  So the
 * maximum block size of probe_kernel gives the answer; the function asks for it once per device. */
static inline cudaError_t ask_sm90a(int id, bool* runs) {
#ifdef GT_EMU
    (void)id;
    *runs = true;
#else
    static std::atomic<signed char> answers[64] = {}; /* 0: not asked yet; otherwise 1 + the answer */
    void (*const probe)(ProbeParams) = probe_kernel;
    const bool is_kept = id >= 0 && id < 64;
    int most = 0;
    if (is_kept && answers[id]) {
        *runs = answers[id] == 2;
        return cudaSuccess;
    }
    const cudaError_t error = ask_most_threads(reinterpret_cast<const void*>(probe), &most);
    if (error != cudaSuccess) return error;
    *runs = most >= PROBE_THREADS;
    if (is_kept) answers[id] = (signed char)(1 + *runs);
#endif
    return cudaSuccess;
}

/* Gets the current device.  If the driver reports an error, the function returns it.  A guess would be dangerous: the
 * call could choose other kernels, and need more workspace, than the size query reported. */
static inline gt_status current_device(Device* device) {
    int id = 0, major = 0, minor = 0;
    cudaError_t error = cudaGetDevice(&id);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, id);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, id);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&device->multiprocessors, cudaDevAttrMultiProcessorCount, id);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&device->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, id);
#ifdef GT_SHARED_LIMIT /* tests: imitates a device with less shared memory */
    if (device->shared_bytes > GT_SHARED_LIMIT) device->shared_bytes = GT_SHARED_LIMIT;
#endif
    device->compute_capability = 10 * major + minor;
    device->runs_sm90a = false;
    if (error == cudaSuccess && device->compute_capability == 90) error = ask_sm90a(id, &device->runs_sm90a);
    if (error != cudaSuccess) return report(error, "device");
    if (device->compute_capability < 75)
        return gt_fail(GT_ERROR_ARCH, "device %d has compute capability %d.%d: must be 7.5 or newer", id, major, minor);
    return GT_OK;
}

/* Cuts a caller's buffer into pieces, each aligned to 256 bytes.  If the buffer is NULL, take() only counts bytes and
 * returns NULL.  bytes() is the size that the buffer needs, including 256 bytes for alignment. */
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

/* Returns room for `count` floats in a caller's buffer of any alignment. *bytes gets the size that the buffer needs. */
static inline float* floats_in(const void* buffer, int64_t count, size_t* bytes) {
    Arena arena(const_cast<void*>(buffer));
    float* floats = arena.take<float>(count);
    *bytes = arena.bytes();
    return floats;
}

static inline gt_status check_workspace(const void* workspace, size_t bytes, size_t need) {
    if (need == 0 || (workspace && bytes >= need)) return GT_OK;
    if (!workspace) return gt_fail(GT_ERROR_WORKSPACE, "workspace is NULL: %zu bytes are needed", need);
    return gt_fail(GT_ERROR_WORKSPACE, "workspace_bytes = %zu: must be at least %zu", bytes, need);
}

static inline gt_status check_saved(const void* saved, size_t bytes, size_t need) {
    if (!saved || bytes >= need) return GT_OK;
    return gt_fail(GT_ERROR_SAVED, "saved_bytes = %zu: must be at least %zu", bytes, need);
}

/* The kernels that one call enqueues, one after another.  From sm_90 on, blocks of every kernel except the first may
 * start while the previous kernel still runs (programmatic dependent launch).  This hides the time that a launch takes.
 *   - A thread calls wait_for_chain() before it reads data that an earlier kernel of the chain writes, and before it
 *     writes data that an earlier kernel reads or writes.
 *   - Inputs of the call need no wait.  The first kernel waits for all earlier work of the stream, as any launch does.
 *   - Blocks that share nothing with other kernels need not wait.  But at least one block of every kernel must wait;
 *     otherwise later kernels would not wait for earlier ones.
 *   - A kernel may call release_chain() before it waits.  Then the next kernel overlaps earlier kernels, too.
 * The emulation checks these rules. */
struct Chain {
    gt_stream stream;
    const void* first = nullptr; /* the chain's first kernel, after its launch */
    bool is_known = false;       /* whether runs_ahead has been set */
    bool runs_ahead = false;     /* whether kernels after the first are launched ahead */
};

/* Names of kernels, in launch order.  Consecutive launches of the same name share one entry. */
struct KernelList {
    const char* names[32];
    int times[32], count; /* launches of each entry; number of entries */
    void add(const char* name) {
        if (count > 0 && !strcmp(names[count - 1], name)) {
            times[count - 1]++;
        } else if (count < 32) {
            names[count] = name;
            times[count++] = 1;
        }
    }
};

/* Returns the list in which run() records the names of this thread's kernels for gt_OP_path (path.cuh).  If the list is
 * NULL, run() launches the kernels. */
static inline KernelList* noted_kernels() { return static_cast<KernelList*>(*gt_noted_kernels()); }

/* Launches a kernel of a chain; launches nothing if blocks = 0. */
template <class Params>
static inline gt_status run(const char* name, void (*kernel)(Params), int64_t blocks, unsigned threads,
                            size_t smem_bytes, Chain& chain, const Params& params) {
    if (blocks == 0) return GT_OK;
    if (blocks > INT32_MAX)
        return gt_fail(GT_ERROR_SIZE, "%s: %lld blocks are too many for a grid", name, (long long)blocks);
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
    } else if (!chain.is_known) { /* the first kernel is loaded by now, also inside a capture */
        chain.runs_ahead = waits_for_chain(chain.first);
        chain.is_known = true;
    }
    return report(launch(kernel, grid, threads, smem_bytes, stream, params, chain.runs_ahead), name);
#endif
}

/* Launches a kernel outside of a chain. */
template <class Params>
static inline gt_status run(const char* name, void (*kernel)(Params), int64_t blocks, unsigned threads,
                            size_t smem_bytes, gt_stream stream, const Params& params) {
    Chain alone = {stream};
    return run(name, kernel, blocks, threads, smem_bytes, alone, params);
}

/* ---- division by a number that the host knows ------------------------------------------------ */

/* x / divisor = (x + upper 32 bits of x * magic) >> shift, for 0 <= x < 2^31. */
struct Divider {
    uint32_t magic, shift;
    int divisor;
};

/* A divisor below 1 counts as 1.  It comes from a size of 0, for which no kernel is launched. */
static inline Divider divide_by(int divisor) {
    if (divisor < 1) divisor = 1;
    uint32_t shift = 0;
    while ((int64_t)1 << shift < divisor) shift++;
    const uint64_t excess = ((uint64_t)1 << shift) - (uint64_t)divisor; /* the power of two minus the divisor */
    return {(uint32_t)((excess << 32) / (uint64_t)divisor + 1), shift, divisor};
}

GT_DEV int divide(int x, const Divider& by, int* remainder) {
    const uint32_t high = (uint32_t)((uint64_t)(uint32_t)x * by.magic >> 32);
    const int quotient = (int)((high + (uint32_t)x) >> by.shift);
    *remainder = x - quotient * by.divisor;
    return quotient;
}

} /* namespace gt */

#endif
