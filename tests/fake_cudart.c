/* A CUDA runtime without a GPU: the functions of the runtime that the library calls.  It pretends to have one device,
 * runs no kernel, and notes each launch with its block size and dynamic shared memory.  The linker takes these
 * functions instead of those in the runtime's own library. */
#include "launches.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct { int capability, multiprocessors, block_bytes, bytes; } device;

/* A kernel, and the different launches of it.  `host` is the function that stands for the kernel on the host. */
typedef struct kernel {
    const void *host;
    const char *name;
    int launches;
    struct {
        unsigned threads;
        size_t bytes;
    } launch[64];
} kernel;

/* A hash table with open addressing. */
enum { KERNELS = 1 << 14 };
static kernel kernels[KERNELS];

static void end(const char *why) {
    fprintf(stderr, "%s\n", why);
    exit(2);
}

/* Returns the kernel's entry, or the free entry for it. */
static kernel *find_kernel(const void *host) {
    size_t at = (size_t)host / 16 * 40503 % KERNELS;
    for (int i = 0; i < KERNELS; i++, at = (at + 1) % KERNELS)
        if (!kernels[at].host || kernels[at].host == host) return &kernels[at];
    end("too many kernels");
    return NULL;
}

int fake_device(int capability, int multiprocessors) {
    static const int known[][2] = {{75, 64}, {80, 163}, {86, 99}, {89, 99}, {90, 227}, {100, 227}, {120, 99}};
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        if (known[i][0] != capability) continue;
        device.capability = capability;
        device.multiprocessors = multiprocessors;
        device.block_bytes = known[i][1] << 10;
        device.bytes = (known[i][1] + (capability > 75)) << 10;
        return 1;
    }
    return 0;
}

void fake_print_launches(void) {
    for (int k = 0; k < KERNELS; k++)
        for (int i = 0; i < kernels[k].launches; i++)
            printf("%s %u %zu\n", kernels[k].name, kernels[k].launch[i].threads, kernels[k].launch[i].bytes);
}

static cudaError_t note(const void *host, dim3 block, size_t bytes) {
    kernel *k = find_kernel(host);
    const unsigned threads = block.x * block.y * block.z;
    if (!k->host) end("a kernel without a name was launched");
    for (int i = 0; i < k->launches; i++)
        if (k->launch[i].threads == threads && k->launch[i].bytes == bytes) return cudaSuccess;
    if (k->launches == sizeof k->launch / sizeof k->launch[0]) end("too many different launches of a kernel");
    k->launch[k->launches].threads = threads;
    k->launch[k->launches++].bytes = bytes;
    return cudaSuccess;
}

/* ---- what nvcc's code for the host calls ------------------------------------------------------------------------- */

void **__cudaRegisterFatBinary(void *binary);
void __cudaRegisterFatBinaryEnd(void **handle);
void __cudaUnregisterFatBinary(void **handle);
void __cudaRegisterFunction(void **handle, const char *host, char *stub, const char *name, int threads, uint3 *a,
                            uint3 *b, dim3 *c, dim3 *d, int *e);
char __cudaInitModule(void **handle);
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *bytes, void *stream);
cudaError_t __cudaGetKernel(void *handle, const void *host);
cudaError_t __cudaLaunchKernel(void *handle, dim3 grid, dim3 block, void **args, size_t bytes, cudaStream_t stream);

void **__cudaRegisterFatBinary(void *binary) {
    static void *handle;
    (void)binary;
    return &handle;
}
void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
void __cudaRegisterFunction(void **handle, const char *host, char *stub, const char *name, int threads, uint3 *a,
                            uint3 *b, dim3 *c, dim3 *d, int *e) {
    kernel *k = find_kernel(host);
    (void)handle, (void)stub, (void)threads, (void)a, (void)b, (void)c, (void)d, (void)e;
    k->host = host;
    k->name = name;
}

char __cudaInitModule(void **handle) { return (void)handle, 1; }

/* Launches with <<<...>>>, which the library does not use. */
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *bytes, void *stream) {
    (void)grid, (void)block, (void)bytes, (void)stream;
    return cudaErrorNotSupported;
}
cudaError_t __cudaGetKernel(void *handle, const void *host) {
    (void)handle, (void)host;
    return cudaErrorNotSupported;
}
cudaError_t __cudaLaunchKernel(void *handle, dim3 grid, dim3 block, void **args, size_t bytes, cudaStream_t stream) {
    (void)handle, (void)grid, (void)block, (void)args, (void)bytes, (void)stream;
    return cudaErrorNotSupported;
}

/* ---- what the library calls -------------------------------------------------------------------------------------- */

cudaError_t cudaLaunchKernel(const void *host, dim3 grid, dim3 block, void **args, size_t bytes, cudaStream_t stream) {
    (void)grid, (void)args, (void)stream;
    return note(host, block, bytes);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *host, void **args) {
    (void)args;
    return note(host, config->blockDim, config->dynamicSmemBytes);
}

cudaError_t cudaGetDevice(int *id) { return *id = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int id) { return id ? cudaErrorInvalidDevice : cudaSuccess; }
cudaError_t cudaGetDeviceCount(int *count) { return *count = 1, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int id) {
    (void)id;
    switch ((int)attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = device.capability / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = device.capability % 10; break;
    case cudaDevAttrMultiProcessorCount: *value = device.multiprocessors; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = device.block_bytes; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = device.bytes; break;
    default: end("the fake device lacks an attribute that the library asks for");
    }
    return cudaSuccess;
}

/* As for machine code of the device: kernels have their launch bounds, and launches may run ahead. */
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *host) {
    (void)host;
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->ptxVersion = attributes->binaryVersion = device.capability;
    return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *host, enum cudaFuncAttribute attribute, int value) {
    (void)host, (void)attribute, (void)value;
    return cudaSuccess;
}
#if CUDART_VERSION >= 12060
cudaError_t cudaGetKernel(cudaKernel_t *handle, const void *host) {
    memcpy(handle, &host, sizeof *handle);
    return cudaSuccess;
}
cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t handle, enum cudaFuncAttribute attribute, int value, int id) {
    (void)handle, (void)attribute, (void)value, (void)id;
    return cudaSuccess;
}
#endif

/* The driver's function that makes descriptions of tensors.  The library finds it by name. */
static CUresult encode_tensor_map(void) { return CUDA_SUCCESS; }

static cudaError_t find(const char *name, void **function, enum cudaDriverEntryPointQueryResult *found) {
    CUresult (*const known)(void) = encode_tensor_map;
    *function = NULL;
    *found = cudaDriverEntryPointSymbolNotFound;
    if (strcmp(name, "cuTensorMapEncodeTiled")) return cudaSuccess;
    memcpy(function, &known, sizeof known);
    *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
#if CUDART_VERSION >= 12050
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *found) {
    (void)version, (void)flags;
    return find(name, function, found);
}
#else
cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult *found) {
    (void)flags;
    return find(name, function, found);
}
#endif

cudaError_t cudaDriverGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    (void)mode;
    return cudaSuccess;
}
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
cudaError_t cudaPeekAtLastError(void) { return cudaSuccess; }
const char *cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : "an error"; }
