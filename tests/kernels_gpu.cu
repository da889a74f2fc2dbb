/* The machine of test_kernels.h on a GPU: runs the kernels on the current device. */
#include "test_kernels.h"
#include "gpu_present.h"

#include <cuda_runtime.h>
#ifdef GT_WITH_CUBLASLT
#include <cublasLt.h>
#endif
#include <stdio.h>
#include <stdlib.h>

#include <vector>

const int machine_is_slow = 0;

const machine_mode machine_modes[] = {{"captured in a graph", 0, 0, 0, 1, 0},
                                      {"captured, with saved", 0, 1, 0, 1, 0},
                                      {"on two streams at once", 0, 1, 2, 0, 0},
                                      {"with an error pending", 0, 0, 0, 0, 1},
                                      {}};

/* Ends the test if one of its own CUDA calls fails. */
static void must(cudaError_t error, const char *what) {
    if (error == cudaSuccess) return;
    printf("FAILED: %s: %s\n", what, cudaGetErrorString(error));
    exit(1);
}

/* Blocks of filled memory are kept for reuse, because cudaMalloc and cudaFree take long. */
struct Block {
    char *memory;
    size_t bytes;
    bool is_free;
};
static std::vector<Block> blocks;

static void free_blocks(void) {
    for (Block &block : blocks) must(cudaFree(block.memory), "cudaFree");
}

int machine_start(void) {
    int devices = 0;
    const cudaError_t error = cudaGetDeviceCount(&devices);
    if ((error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver) && !gpu_is_present()) {
        printf("SKIP: %s\n", cudaGetErrorString(error));
        return 77;
    }
    must(error, "cudaGetDeviceCount");
    atexit(free_blocks);
    return 0;
}

int machine_choose(const char *) { return 0; }

void machine_report(void) {}

int machine_launched(const char *) { return 1; }

int64_t machine_blocks(void) { return 0; }

static char *allocate(size_t bytes) {
    void *memory;
    must(cudaMalloc(&memory, bytes), "cudaMalloc");
    return static_cast<char *>(memory);
}

char *machine_allocate(size_t bytes, int is_filled) {
    if (!is_filled) return allocate(bytes);
    Block *best = nullptr;
    for (Block &block : blocks)
        if (block.is_free && block.bytes >= bytes && (!best || block.bytes < best->bytes)) best = &block;
    if (!best) {
        size_t size = 1 << 16;
        while (size < bytes) size *= 2;
        blocks.push_back({allocate(size), size, true});
        best = &blocks.back();
    }
    best->is_free = false;
    machine_poison(best->memory, bytes);
    return best->memory;
}

void machine_release(char *memory) {
    for (Block &block : blocks)
        if (block.memory == memory) {
            block.is_free = true;
            return;
        }
    must(cudaFree(memory), "cudaFree");
}

void machine_copy(void *to, const void *from, size_t bytes) {
    must(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "cudaMemcpy");
}

void machine_poison(char *memory, size_t bytes) { must(cudaMemset(memory, 0xff, bytes), "cudaMemset"); }

size_t machine_memory(size_t *total) {
    size_t available;
    must(cudaMemGetInfo(&available, total), "cudaMemGetInfo");
    return available;
}

static gt_status enqueue(const machine_job *job, cudaStream_t stream) {
    gt_status status = GT_OK;
    for (int k = 0; k < job->passes && status == GT_OK; k++) status = job->pass[k](&job->args[k], stream);
    return status;
}

/* Runs the calls while a CUDA error of the caller is pending.  The calls must succeed and leave that error pending. */
static gt_status enqueue_with_pending_error(const machine_job *job) {
    const cudaError_t pending = cudaSetDevice(-1);
    const gt_status status = enqueue(job, nullptr);
    const cudaError_t found = cudaGetLastError();
    if (pending == cudaSuccess) return gt_fail(GT_ERROR_CUDA, "this test could not cause an error");
    if (status == GT_OK && found != pending)
        return gt_fail(GT_ERROR_CUDA, "pending error %d became %d", (int)pending, (int)found);
    return status;
}

/* Halves all numbers in cu_seqlens and seq_count of a packed call.  This gives half as many sequences, each of half the
 * length. */
static void halve_sequences(const machine_job *job) {
    for (int i = 0; i < 2; i++) {
        std::vector<int32_t> numbers((size_t)job->sequence_counts[i]);
        machine_copy(numbers.data(), job->sequences[i], numbers.size() * 4);
        for (int32_t &number : numbers) number /= 2;
        machine_copy(job->sequences[i], numbers.data(), numbers.size() * 4);
    }
}

/* Records the call as a CUDA graph and replays the graph twice.  Before the first replay, packed sequences get other
 * lengths than in the recorded call.  The second replay starts with `saved` and workspace as the first replay left
 * them. */
static gt_status capture(const machine_job *job, cudaStream_t stream) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec;
    char *before = machine_allocate(job->bytes, 1);
    machine_copy(before, job->block, job->bytes);
    must(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
    const gt_status status = enqueue(job, stream);
    const cudaError_t error = cudaStreamEndCapture(stream, &graph);
    if (status == GT_OK) {
        must(error, "cudaStreamEndCapture");
        must(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
        halve_sequences(job);
        must(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
        must(cudaGraphLaunch(exec, stream), "cudaGraphLaunch");
        must(cudaStreamSynchronize(stream), "replay of a graph");
        machine_copy(job->block, before, job->bytes);
        must(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
        must(cudaGraphLaunch(exec, stream), "cudaGraphLaunch");
        must(cudaStreamSynchronize(stream), "second replay of a graph");
        must(cudaGraphExecDestroy(exec), "cudaGraphExecDestroy");
    }
    if (graph) must(cudaGraphDestroy(graph), "cudaGraphDestroy");
    machine_release(before);
    return status;
}

void *machine_cublaslt(void) {
#ifdef GT_WITH_CUBLASLT
    static cublasLtHandle_t handle;
    if (!handle && cublasLtCreate(&handle) != CUBLAS_STATUS_SUCCESS) {
        printf("FAILED: cublasLtCreate\n");
        exit(1);
    }
    return handle;
#else
    return nullptr;
#endif
}

gt_status machine_run(machine_job *jobs, int count, const machine_mode *mode) {
    static cudaStream_t streams[2];
    const bool needs_streams = mode->is_captured || count > 1;
    gt_status status = GT_OK;
    for (cudaStream_t &stream : streams)
        if (needs_streams && !stream)
            must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    /* the streams do not wait for the default stream, where copies may still run */
    if (needs_streams) must(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    for (int i = 0; i < count && status == GT_OK; i++)
        status = mode->is_captured         ? capture(&jobs[i], streams[i])
                 : mode->has_pending_error ? enqueue_with_pending_error(&jobs[i])
                                           : enqueue(&jobs[i], needs_streams ? streams[i] : nullptr);
    must(cudaDeviceSynchronize(), "a kernel");
    must(cudaGetLastError(), "an error that no call returned");
    return status;
}
