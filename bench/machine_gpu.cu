/* bench/machine_gpu.cu - the bench's machines that run kernels on the current GPU. */
#include "bench.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#ifdef GT_WITH_CUBLASLT
#include <cublasLt.h>
#endif
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

namespace {

constexpr size_t FLUSH_BYTES = size_t(256) << 20; /* more than any L2 holds */
constexpr int FLUSHES = 6; /* 0.5 ms on an H200; the host takes up to 0.25 ms to launch a call, see time_run */
constexpr int BLOCKS = 2048, THREADS = 256;

/* Ends the program if a CUDA call of the bench failed, or if a kernel left an error behind. */
void must(cudaError_t error, const char *what) {
    if (error == cudaSuccess) return;
    fflush(stdout);
    fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
    exit(2);
}

/* ---- facts ---------------------------------------------------------------------------------- */

/* Finds the driver's version, for example "580.65.06": the first word with a dot between digits. */
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
        else if (dtype == GT_INT8)
            static_cast<signed char *>(array)[i] = bench_integer(x);
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
                : region.dtype == GT_INT8 ? static_cast<float>(*reinterpret_cast<const signed char *>(at))
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
    void *flush; /* writing to this memory empties the L2 */
};

Clock &the_clock() {
    static Clock clock = {};
    if (clock.flush) return clock;
    must(cudaEventCreate(&clock.start), "cudaEventCreate");
    must(cudaEventCreate(&clock.stop), "cudaEventCreate");
    clock.flush = allocate(FLUSH_BYTES);
    return clock;
}

void flush(const Clock &clock) {
    for (int i = 0; i < FLUSHES; i++) must(cudaMemsetAsync(clock.flush, 0, FLUSH_BYTES), "cudaMemset");
}

double elapsed_ms(const Clock &clock) {
    float ms;
    must(cudaEventSynchronize(clock.stop), "a kernel");
    must(cudaGetLastError(), "a kernel");
    must(cudaEventElapsedTime(&ms, clock.start, clock.stop), "cudaEventElapsedTime");
    return ms;
}

/* Clears the CUDA error of a launch that failed.  Returns the status, so that the bench can report it and continue. */
gt_status refused(gt_status status) {
    cudaGetLastError();
    return status;
}

/* ---- calls that are captured ------------------------------------------------------------------ */

/* The call that was captured last, as a graph. */
struct Captured {
    cudaGraphExec_t graph;
    const test_op *op;
    gt_pass pass;
    test_args args;
};

/* Captures a call as a graph, unless it is the same as the last one.  enqueue(stream) makes the call. */
template <class Enqueue>
gt_status captured(const test_op *op, gt_pass pass, const void *args, const Enqueue &enqueue, cudaGraphExec_t *graph) {
    static Captured last = {};
    static cudaStream_t stream;
    const size_t bytes = op->table()->args_bytes;
    cudaGraph_t nodes;
    if (!stream) must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    if (!last.graph || op != last.op || pass != last.pass || memcmp(args, &last.args, bytes)) {
        if (last.graph) must(cudaGraphExecDestroy(last.graph), "cudaGraphExecDestroy");
        last.graph = nullptr, last.op = op, last.pass = pass;
        memcpy(&last.args, args, bytes);
        must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
        const gt_status status = enqueue(stream);
        must(cudaStreamEndCapture(stream, &nodes), "cudaStreamEndCapture");
        if (status == GT_OK) must(cudaGraphInstantiate(&last.graph, nodes, 0), "cudaGraphInstantiate");
        must(cudaGraphDestroy(nodes), "cudaGraphDestroy");
        if (status != GT_OK) return refused(status);
    }
    *graph = last.graph;
    return GT_OK;
}

double time_graph(cudaGraphExec_t graph) {
    const Clock &clock = the_clock();
    flush(clock);
    must(cudaEventRecord(clock.start), "cudaEventRecord");
    must(cudaGraphLaunch(graph, nullptr), "cudaGraphLaunch");
    must(cudaEventRecord(clock.stop), "cudaEventRecord");
    return elapsed_ms(clock);
}

/* ---- calls ------------------------------------------------------------------------------------ */

gt_status run(const test_op *op, gt_pass pass, const void *args) {
    const gt_status status = op->table()->calls.pass[pass](args, nullptr);
    if (status != GT_OK) return refused(status);
    must(cudaDeviceSynchronize(), "a kernel");
    return GT_OK;
}

/* Times a step as servers run it: as a graph that is captured once and replayed. */
gt_status time_step(const test_op *op, const void *args, double *ms) {
    const auto enqueue = [&](cudaStream_t stream) { return op->table()->calls.pass[GT_STEP](args, stream); };
    cudaGraphExec_t graph;
    const gt_status status = captured(op, GT_STEP, args, enqueue, &graph);
    if (status == GT_OK) *ms = time_graph(graph);
    return status;
}

/* Times a call.  The host enqueues it while the device still executes the flush, so the time does not include the
 * host's launches. */
gt_status time_run(const test_op *op, gt_pass pass, const void *args, double *ms) {
    if (pass == GT_STEP) return time_step(op, args, ms);
    const Clock &clock = the_clock();
    flush(clock);
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

bench_machine gpu = {"",   1,      0,        nullptr,        1,         nullptr,  4,
                     10,   200,    describe, copy_bandwidth, available, allocate, release,
                     fill, poison, copy,     gather,         run,       time_run};

/* ---- wkv_ssm as two calls on two streams ------------------------------------------------------ */

template <class Part>
void give_shared(const gt_wkv_ssm_args &all, Part *one) {
    one->B = all.B, one->T = all.T, one->dtype = all.dtype;
    one->state_in_shared = all.state_in_shared, one->accumulate = all.accumulate, one->segments = all.segments;
    one->cu_seqlens = all.cu_seqlens, one->seq_count = all.seq_count, one->seq_capacity = all.seq_capacity;
    one->saved = all.saved;
}

template <class Part>
size_t give_buffers(gt_pass pass, const gt_workspace &need, char *workspace, char *saved, Part *one) {
    one->workspace = workspace, one->workspace_bytes = test_workspace_of(&need, pass);
    one->saved = saved, one->saved_bytes = saved ? need.saved : 0;
    return one->workspace_bytes;
}

/* Makes the arguments of the two calls.  They share the buffers of wkv_ssm, which needs as much as both calls. */
gt_status split(gt_pass pass, const gt_wkv_ssm_args &all, gt_wkv6_args *wkv6, gt_ssd_args *ssd) {
    gt_workspace of_wkv6, of_ssd;
    *wkv6 = all.wkv6, *ssd = all.ssd;
    give_shared(all, wkv6), give_shared(all, ssd);
    gt_status status = gt_wkv6_workspace(wkv6, &of_wkv6);
    if (status != GT_OK || (status = gt_ssd_workspace(ssd, &of_ssd)) != GT_OK) return status;
    char *const workspace = static_cast<char *>(all.workspace), *const saved = static_cast<char *>(all.saved);
    const size_t bytes = give_buffers(pass, of_wkv6, workspace, saved, wkv6);
    give_buffers(pass, of_ssd, workspace + bytes, saved ? saved + of_wkv6.saved : nullptr, ssd);
    return GT_OK;
}

/* Enqueues wkv6 on the first stream and ssd on a second stream.  Two events fork and join the streams. */
gt_status enqueue_both(gt_pass pass, const gt_wkv_ssm_args &all, cudaStream_t first) {
    static cudaStream_t second;
    static cudaEvent_t fork, join;
    gt_wkv6_args wkv6;
    gt_ssd_args ssd;
    if (!second) {
        must(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking), "cudaStreamCreate");
        must(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming), "cudaEventCreate");
        must(cudaEventCreateWithFlags(&join, cudaEventDisableTiming), "cudaEventCreate");
    }
    gt_status status = split(pass, all, &wkv6, &ssd);
    if (status != GT_OK) return status;
    must(cudaEventRecord(fork, first), "cudaEventRecord");
    must(cudaStreamWaitEvent(second, fork), "cudaStreamWaitEvent");
    gt_status (*const of_wkv6[])(const gt_wkv6_args *, gt_stream) = {gt_wkv6_forward, gt_wkv6_backward, gt_wkv6_step};
    gt_status (*const of_ssd[])(const gt_ssd_args *, gt_stream) = {gt_ssd_forward, gt_ssd_backward, gt_ssd_step};
    status = of_wkv6[pass](&wkv6, first);
    if (status == GT_OK) status = of_ssd[pass](&ssd, second);
    must(cudaEventRecord(join, second), "cudaEventRecord");
    must(cudaStreamWaitEvent(first, join), "cudaStreamWaitEvent");
    return status;
}

gt_status capture_both(const test_op *op, gt_pass pass, const void *args, cudaGraphExec_t *graph) {
    const gt_wkv_ssm_args &all = *static_cast<const gt_wkv_ssm_args *>(args);
    return captured(
        op, pass, args, [&](cudaStream_t stream) { return enqueue_both(pass, all, stream); }, graph);
}

gt_status run_two_streams(const test_op *op, gt_pass pass, const void *args) {
    cudaGraphExec_t graph;
    const gt_status status = capture_both(op, pass, args, &graph);
    if (status != GT_OK) return status;
    must(cudaGraphLaunch(graph, nullptr), "cudaGraphLaunch");
    must(cudaDeviceSynchronize(), "a kernel");
    return GT_OK;
}

gt_status time_two_streams(const test_op *op, gt_pass pass, const void *args, double *ms) {
    cudaGraphExec_t graph;
    const gt_status status = capture_both(op, pass, args, &graph);
    if (status == GT_OK) *ms = time_graph(graph);
    return status;
}

/* ---- only the products of rmsnorm_linear ------------------------------------------------------ */

#ifdef GT_WITH_CUBLASLT
constexpr size_t PRODUCT_BYTES = size_t(32) << 20;

void must(cublasStatus_t status, const char *what) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    fflush(stdout);
    fprintf(stderr, "%s: %s\n", what, cublasLtGetStatusString(status));
    exit(2);
}

cublasLtHandle_t the_handle() {
    static cublasLtHandle_t handle;
    if (!handle) must(cublasLtCreate(&handle), "cublasLtCreate");
    return handle;
}

/* A matrix for cuBLASLt, in column-major order. */
struct Factor {
    const void *data;
    int64_t rows, columns;
    bool is_transposed;
};

/* C [rows, columns] = A B in column-major order, and the heuristic's first algorithm for it. */
struct Multiplication {
    cublasLtMatmulDescOpaque_t product;
    cublasLtMatrixLayoutOpaque_t a, b, c;
    cublasLtMatmulHeuristicResult_t found;
    const void *a_data, *b_data;
    void *c_data, *workspace;
};

Multiplication find(cudaDataType_t type, Factor a, Factor b, void *c, cudaDataType_t c_type, int64_t rows,
                    int64_t columns) {
    const cublasOperation_t operations[] = {CUBLAS_OP_N, CUBLAS_OP_T};
    const size_t bytes = PRODUCT_BYTES;
    static void *workspace = allocate(bytes);
    Multiplication m = {};
    cublasLtMatmulPreferenceOpaque_t wishes = {};
    int count = 0;
    m.a_data = a.data, m.b_data = b.data, m.c_data = c, m.workspace = workspace;
    must(cublasLtMatmulDescInit(&m.product, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescInit");
    must(cublasLtMatmulDescSetAttribute(&m.product, CUBLASLT_MATMUL_DESC_TRANSA, &operations[a.is_transposed],
                                        sizeof *operations),
         "cublasLtMatmulDescSetAttribute");
    must(cublasLtMatmulDescSetAttribute(&m.product, CUBLASLT_MATMUL_DESC_TRANSB, &operations[b.is_transposed],
                                        sizeof *operations),
         "cublasLtMatmulDescSetAttribute");
    must(cublasLtMatrixLayoutInit(&m.a, type, uint64_t(a.rows), uint64_t(a.columns), a.rows),
         "cublasLtMatrixLayoutInit");
    must(cublasLtMatrixLayoutInit(&m.b, type, uint64_t(b.rows), uint64_t(b.columns), b.rows),
         "cublasLtMatrixLayoutInit");
    must(cublasLtMatrixLayoutInit(&m.c, c_type, uint64_t(rows), uint64_t(columns), rows), "cublasLtMatrixLayoutInit");
    must(cublasLtMatmulPreferenceInit(&wishes), "cublasLtMatmulPreferenceInit");
    must(cublasLtMatmulPreferenceSetAttribute(&wishes, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes),
         "cublasLtMatmulPreferenceSetAttribute");
    must(cublasLtMatmulAlgoGetHeuristic(the_handle(), &m.product, &m.a, &m.b, &m.c, &m.c, &wishes, 1, &m.found, &count),
         "cublasLtMatmulAlgoGetHeuristic");
    return m;
}

void multiply(Multiplication &m) {
    const float one = 1, zero = 0;
    must(cublasLtMatmul(the_handle(), &m.product, &one, m.a_data, &m.a, m.b_data, &m.b, &zero, m.c_data, &m.c, m.c_data,
                        &m.c, &m.found.algo, m.workspace, PRODUCT_BYTES, nullptr),
         "cublasLtMatmul");
}

/* Times only the products, with x in place of n: y = x weight^T, or dx = dy weight and dweight = dy^T x.  The search
 * for algorithms ends before the clock starts. */
gt_status time_products(const test_op *, gt_pass pass, const void *args, double *ms) {
    const Clock &clock = the_clock();
    const gt_rmsnorm_linear_args &a = *static_cast<const gt_rmsnorm_linear_args *>(args);
    const cudaDataType_t type = a.dtype == GT_F32 ? CUDA_R_32F : a.dtype == GT_BF16 ? CUDA_R_16BF : CUDA_R_16F;
    Multiplication products[2];
    int count = 0;
    if (pass == GT_FORWARD) {
        products[count++] = find(type, {a.weight, a.D, a.O, true}, {a.x, a.D, a.M, false}, a.y, type, a.O, a.M);
    } else {
        products[count++] = find(type, {a.weight, a.D, a.O, false}, {a.dy, a.O, a.M, false}, a.dx, type, a.D, a.M);
        products[count++] = find(type, {a.x, a.D, a.M, false}, {a.dy, a.O, a.M, true}, a.dweight, CUDA_R_32F, a.D, a.O);
    }
    flush(clock);
    must(cudaEventRecord(clock.start), "cudaEventRecord");
    for (int i = 0; i < count; i++) multiply(products[i]);
    must(cudaEventRecord(clock.stop), "cudaEventRecord");
    *ms = elapsed_ms(clock);
    return GT_OK;
}
#endif

} /* namespace */

const bench_machine *bench_two_streams(void) {
    static bench_machine two = gpu;
    two.impl = "streams";
    two.only = "wkv_ssm";
    two.run = run_two_streams;
    two.time = time_two_streams;
    return &two;
}

const bench_machine *bench_products(void) {
#ifdef GT_WITH_CUBLASLT
    static bench_machine products = gpu;
    products.impl = "cublaslt";
    products.has_saved = 0;
    products.is_partial = 1;
    products.cublaslt = nullptr;
    products.time = time_products;
    return &products;
#else
    return nullptr;
#endif
}

const bench_machine *bench_gpu(const char *impl, const char **reason) {
    int devices = 0;
    cudaError_t error = cudaGetDeviceCount(&devices);
    if (error == cudaSuccess && devices == 0) error = cudaErrorNoDevice;
    gpu.impl = impl;
#ifdef GT_WITH_CUBLASLT
    if (error == cudaSuccess) gpu.cublaslt = the_handle();
#endif
    if (error == cudaSuccess) return &gpu;
    *reason = cudaGetErrorString(error);
    cudaGetLastError(); /* clears the error, which *reason reports */
    return nullptr;
}
