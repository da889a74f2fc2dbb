/* The kernels on the current GPU. */
#include "bench.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

namespace {

constexpr size_t FLUSH_BYTES = size_t(256) << 20; /* more than any L2 holds */
constexpr int BLOCKS = 2048, THREADS = 256;

/* A CUDA call of the bench itself, or an error that a kernel left behind. */
void must(cudaError_t error, const char *what) {
    if (error == cudaSuccess) return;
    fflush(stdout);
    fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
    exit(2);
}

/* ---- facts ---------------------------------------------------------------------------------- */

/* "580.65.06": the first word of NVIDIA's line that holds a dot between digits. */
void driver_version(char *text, size_t bytes) {
    char line[256] = "";
    FILE *f = fopen("/proc/driver/nvidia/version", "r");
    if (f && !fgets(line, sizeof line, f)) line[0] = 0;
    if (f) fclose(f);
    snprintf(text, bytes, "unknown");
    for (char *word = strtok(line, " \t\n"); word; word = strtok(nullptr, " \t\n")) {
        const char *dot = strchr(word, '.');
        if (!dot || word[0] < '0' || word[0] > '9' || dot[1] < '0' || dot[1] > '9') continue;
        snprintf(text, bytes, "%s", word);
        return;
    }
}

void describe(char *text, size_t bytes) {
    int device, knows;
    char driver[64];
    cudaDeviceProp p;
    must(cudaGetDevice(&device), "cudaGetDevice");
    must(cudaGetDeviceProperties(&p, device), "cudaGetDeviceProperties");
    must(cudaDriverGetVersion(&knows), "cudaDriverGetVersion");
    driver_version(driver, sizeof driver);
    snprintf(text, bytes, "%s, sm_%d%d, %d SMs, %.0f GiB; driver %s (CUDA %d.%d), built with CUDA %d.%d", p.name,
             p.major, p.minor, p.multiProcessorCount, static_cast<double>(p.totalGlobalMem) / (1 << 30), driver,
             knows / 1000, knows % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
}

size_t available() {
    size_t now, total;
    must(cudaMemGetInfo(&now, &total), "cudaMemGetInfo");
    return now;
}

/* ---- memory --------------------------------------------------------------------------------- */

void *allocate(size_t bytes) {
    void *memory;
    must(cudaMalloc(&memory, bytes > 0 ? bytes : 1), "cudaMalloc");
    return memory;
}

void release(void *memory) { must(cudaFree(memory), "cudaFree"); }

void poison(void *memory, size_t bytes) { must(cudaMemsetAsync(memory, 0xff, bytes), "cudaMemset"); }

void copy(void *to, const void *from, size_t bytes) {
    must(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault), "cudaMemcpy");
}

__global__ void fill_kernel(void *array, gt_dtype dtype, int64_t count, bench_draw how, uint64_t seed) {
    const int64_t first = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
    for (int64_t i = first; i < count; i += int64_t(gridDim.x) * blockDim.x) {
        const float x = bench_number(how, seed, i);
        if (dtype == GT_F32)
            static_cast<float *>(array)[i] = x;
        else if (dtype == GT_BF16)
            static_cast<__nv_bfloat16 *>(array)[i] = __float2bfloat16_rn(x);
        else
            static_cast<__half *>(array)[i] = __float2half_rn(x);
    }
}

void fill(void *array, gt_dtype dtype, int64_t count, bench_draw how, uint64_t seed) {
    fill_kernel<<<BLOCKS, THREADS>>>(array, dtype, count, how, seed);
    must(cudaGetLastError(), "fill_kernel");
}

__global__ void gather_kernel(float *to, const void *array, bench_region region, int64_t count) {
    const int64_t first = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
    for (int64_t i = first; i < count; i += int64_t(gridDim.x) * blockDim.x) {
        const char *at = static_cast<const char *>(array) + bench_offset(&region, i);
        to[i] = region.dtype == GT_F32    ? *reinterpret_cast<const float *>(at)
                : region.dtype == GT_BF16 ? __bfloat162float(*reinterpret_cast<const __nv_bfloat16 *>(at))
                                          : __half2float(*reinterpret_cast<const __half *>(at));
    }
}

void gather(float *host, const void *array, const bench_region *region) {
    const int64_t count = bench_count(region);
    const size_t bytes = static_cast<size_t>(count) * sizeof(float);
    float *packed = static_cast<float *>(allocate(bytes));
    gather_kernel<<<BLOCKS, THREADS>>>(packed, array, *region, count);
    must(cudaGetLastError(), "gather_kernel");
    must(cudaMemcpy(host, packed, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
    release(packed);
}

/* ---- time ----------------------------------------------------------------------------------- */

struct Clock {
    cudaEvent_t start, stop;
    void *flush; /* memory that is written to empty the L2 */
};

Clock &the_clock() {
    static Clock clock = {};
    if (clock.flush) return clock;
    must(cudaEventCreate(&clock.start), "cudaEventCreate");
    must(cudaEventCreate(&clock.stop), "cudaEventCreate");
    clock.flush = allocate(FLUSH_BYTES);
    return clock;
}

double elapsed_ms(const Clock &clock) {
    float ms;
    must(cudaEventSynchronize(clock.stop), "a kernel");
    must(cudaGetLastError(), "a kernel");
    must(cudaEventElapsedTime(&ms, clock.start, clock.stop), "cudaEventElapsedTime");
    return ms;
}

/* The status is reported, so that an error that a launch left behind need not end the program. */
gt_status refused(gt_status status) {
    cudaGetLastError();
    return status;
}

gt_status run(const test_op *op, gt_pass pass, const void *args) {
    const gt_status status = op->table()->calls.pass[pass](args, nullptr);
    if (status != GT_OK) return refused(status);
    must(cudaDeviceSynchronize(), "a kernel");
    return GT_OK;
}

/* The host enqueues the call while the device still writes the flush: its launches cost no time. */
gt_status time_run(const test_op *op, gt_pass pass, const void *args, double *ms) {
    const Clock &clock = the_clock();
    must(cudaMemsetAsync(clock.flush, 0, FLUSH_BYTES), "cudaMemset");
    must(cudaEventRecord(clock.start), "cudaEventRecord");
    const gt_status status = op->table()->calls.pass[pass](args, nullptr);
    if (status != GT_OK) return refused(status);
    must(cudaEventRecord(clock.stop), "cudaEventRecord");
    *ms = elapsed_ms(clock);
    return GT_OK;
}

double copy_bandwidth() {
    enum { WARM_UPS = 3, RUNS = 11 };
    const Clock &clock = the_clock();
    size_t bytes = size_t(1) << 30;
    while (bytes > available() / 4) bytes /= 2;
    char *from = static_cast<char *>(allocate(bytes)), *to = static_cast<char *>(allocate(bytes));
    double ms[RUNS];
    poison(from, bytes);
    for (int run = -WARM_UPS; run < RUNS; run++) {
        must(cudaEventRecord(clock.start), "cudaEventRecord");
        copy(to, from, bytes);
        must(cudaEventRecord(clock.stop), "cudaEventRecord");
        const double time = elapsed_ms(clock);
        if (run >= 0) ms[run] = time;
    }
    release(from);
    release(to);
    return 2.0 * static_cast<double>(bytes) / bench_median(ms, RUNS);
}

bench_machine gpu = {"",       1,       1,    4,      10,   200,    describe, copy_bandwidth, available,
                     allocate, release, fill, poison, copy, gather, run,      time_run};

} /* namespace */

const bench_machine *bench_gpu(const char *impl, const char **reason) {
    int devices = 0;
    cudaError_t error = cudaGetDeviceCount(&devices);
    if (error == cudaSuccess && devices == 0) error = cudaErrorNoDevice;
    gpu.impl = impl;
    if (error == cudaSuccess) return &gpu;
    *reason = cudaGetErrorString(error);
    cudaGetLastError(); /* it has been dealt with */
    return nullptr;
}
