/* The CUDA backend.  On one stream it runs the kernels of gt_kernels.h and of hybrid_ops.cuh, and matrix products of
 * cuBLASLt.  NCCL adds up gradients on a second stream at the same time.  The backend records steps as CUDA graphs.
 *
 * Results repeat bit for bit.  cuBLASLt may only choose algorithms with a fixed order of addition, so none that adds
 * partial sums by atomics.  The choice depends only on the shape, and the backend keeps it. */
#include "hybrid_nccl.h"
#include "hybrid_ops.cuh"

#include <cublasLt.h>
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <thread>
#include <vector>

namespace hy {

constexpr size_t STAGING_BYTES = 4 << 20;

/* The key of a cuBLASLt plan.  memcmp compares keys, so padding bytes must be zero. */
struct PlanKey {
    int64_t M, N, K, lda, ldb, ldc, count, a_step, b_step, c_step;
    int32_t trans_a, trans_b, dtype, c_dtype;
    uint32_t a_alignment, b_alignment, c_alignment, reads_c;
};

struct Plan {
    PlanKey key;
    bool found; /* false: cuBLASLt has no algorithm for this key */
    cublasLtMatmulDesc_t product;
    cublasLtMatrixLayout_t a, b, c;
    cublasLtMatmulAlgo_t algorithm;
};

/* The sequence of calls that belongs to a slot of hy_backend.run.  The first run makes the calls; later runs replay
 * a graph. */
struct Recording {
    int slot;
    void* arg;
    cudaGraphExec_t graph; /* NULL: the calls have run only once so far */
};

struct CudaMachine : Machine {
    cublasLtHandle_t cublas;
    cudaEvent_t start, stop;         /* for start_clock and stop_clock */
    std::vector<cudaEvent_t> events; /* for mark */
    size_t events_used;
    cudaStream_t sums_stream;            /* for NCCL */
    cudaEvent_t fork, joined;            /* make one stream wait for the other */
    cudaEvent_t before_join, after_join; /* for waited */
    std::vector<Plan> plans;
    std::vector<Recording> recordings;
    char* staging; /* pinned memory; its first staging_used bytes are in use */
    size_t staging_used;
};

static CudaMachine& cuda(hy_backend* be) { return *static_cast<CudaMachine*>(be); }

static gt_status check(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return GT_OK;
    (void)cudaGetLastError();
    return hy_fail(error == cudaErrorMemoryAllocation ? GT_ERROR_MEMORY : GT_ERROR_CUDA, "%s: %s", what,
                   cudaGetErrorString(error));
}

static gt_status check(cublasStatus_t status, const char* what) {
    if (status == CUBLAS_STATUS_SUCCESS) return GT_OK;
    return hy_fail(GT_ERROR_CUDA, "%s: %s", what, cublasLtGetStatusString(status));
}

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        const gt_status status_ = (call);                                                                              \
        if (status_ != GT_OK) return status_;                                                                          \
    } while (0)
#define TRY_CUDA(call) TRY(check(call, #call))

/* ---- memory -----------------------------------------------------------------------------------
 * Copies from and to host memory pass through the pinned staging buffer, so the caller can continue while an upload
 * runs. */

static gt_status poll_stream(void* stream, int* is_done) {
    const cudaError_t error = cudaStreamQuery(static_cast<cudaStream_t>(stream));
    *is_done = error == cudaSuccess;
    return error == cudaErrorNotReady ? GT_OK : check(error, "a kernel");
}

/* Waits for the stream.  With NCCL a kernel may wait for a rank that has failed, so the function also polls for such
 * failures. */
static gt_status synchronize(hy_backend* be) {
    CudaMachine& m = cuda(be);
    m.staging_used = 0;
    if (m.nccl) return hy_nccl_wait(m.nccl, poll_stream, m.stream);
    return check(cudaStreamSynchronize(m.stream), "a kernel");
}

/* Uploads `bytes` bytes in pieces that fit the staging buffer.  Each piece except the last is a multiple of 256
 * bytes.  fill(piece, first, n) writes bytes first ... first + n - 1 of the data to the buffer. */
template <class Fill>
static gt_status upload_pieces(hy_backend* be, void* to, size_t bytes, Fill fill) {
    CudaMachine& m = cuda(be);
    for (size_t done = 0, n; done < bytes; done += n) {
        if (STAGING_BYTES - m.staging_used < 256) TRY(synchronize(be));
        n = std::min(bytes - done, STAGING_BYTES - m.staging_used);
        char* piece = m.staging + m.staging_used;
        fill(piece, done, n);
        m.staging_used += (n + 255) / 256 * 256;
        TRY_CUDA(cudaMemcpyAsync(static_cast<char*>(to) + done, piece, n, cudaMemcpyHostToDevice, m.stream));
    }
    return GT_OK;
}

template <class Take>
static gt_status download_pieces(hy_backend* be, const void* from, size_t bytes, Take take) {
    CudaMachine& m = cuda(be);
    for (size_t done = 0, n; done < bytes; done += n) {
        if (STAGING_BYTES - m.staging_used < 256) TRY(synchronize(be));
        n = std::min(bytes - done, STAGING_BYTES - m.staging_used);
        char* piece = m.staging + m.staging_used; /* behind unfinished uploads, so one wait covers them and this copy */
        TRY_CUDA(cudaMemcpyAsync(piece, static_cast<const char*>(from) + done, n, cudaMemcpyDeviceToHost, m.stream));
        TRY(synchronize(be));
        take(piece, done, n);
    }
    return GT_OK;
}

static gt_status upload(hy_backend* be, void* to, const void* host, size_t bytes) {
    return upload_pieces(be, to, bytes, [&](char* piece, size_t first, size_t n) {
        memcpy(piece, static_cast<const char*>(host) + first, n);
    });
}

static gt_status download(hy_backend* be, void* host, const void* from, size_t bytes) {
    return download_pieces(be, from, bytes, [&](const char* piece, size_t first, size_t n) {
        memcpy(static_cast<char*>(host) + first, piece, n);
    });
}

static gt_status write(hy_backend* be, void* to, gt_dtype dtype, const double* host, int64_t n) {
    const size_t size = size_of(dtype);
    return upload_pieces(be, to, (size_t)n * size, [&](char* piece, size_t first, size_t bytes) {
        for (size_t i = 0; i < bytes / size; i++) put_number(piece, dtype, (int64_t)i, host[first / size + i]);
    });
}

static gt_status read(hy_backend* be, double* host, const void* from, gt_dtype dtype, int64_t n) {
    const size_t size = size_of(dtype);
    const auto take = [&](const char* piece, size_t first, size_t bytes) {
        for (size_t i = 0; i < bytes / size; i++) host[first / size + i] = get_number(piece, dtype, (int64_t)i);
    };
    return download_pieces(be, from, (size_t)n * size, take);
}

static gt_status copy(hy_backend* be, void* to, const void* from, size_t bytes) {
    if (!bytes) return GT_OK;
    return check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, cuda(be).stream), "copy");
}

static gt_status zero(hy_backend* be, void* to, size_t bytes) {
    if (!bytes) return GT_OK;
    return check(cudaMemsetAsync(to, 0, bytes, cuda(be).stream), "zero");
}

static void forget_recordings(CudaMachine& m) {
    for (const Recording& r : m.recordings)
        if (r.graph) (void)cudaGraphExecDestroy(r.graph);
    m.recordings.clear();
}

static gt_status alloc(hy_backend* be, void** memory, size_t bytes) {
    char what[64];
    (void)be;
    snprintf(what, sizeof what, "%.1f MiB", (double)bytes / 1048576.0);
    return check(cudaMalloc(memory, bytes), what);
}

/* Releases memory.  Recordings contain addresses, so this drops all recordings. */
static void release(hy_backend* be, void* memory) {
    if (!memory) return;
    (void)synchronize(be);
    forget_recordings(cuda(be));
    (void)cudaFree(memory);
}

/* ---- measurements ---------------------------------------------------------------------------- */

static gt_status start_clock(hy_backend* be) {
    CudaMachine& m = cuda(be);
    return check(cudaEventRecord(m.start, m.stream), "cudaEventRecord");
}

static gt_status stop_clock(hy_backend* be, double* seconds) {
    CudaMachine& m = cuda(be);
    float ms;
    TRY_CUDA(cudaEventRecord(m.stop, m.stream));
    TRY(synchronize(be));
    TRY_CUDA(cudaEventElapsedTime(&ms, m.start, m.stop));
    *seconds = 1e-3 * ms;
    return GT_OK;
}

static gt_status memory_taken(hy_backend* be, size_t* bytes) {
    size_t free, total;
    TRY_CUDA(cudaMemGetInfo(&free, &total));
    *bytes = be->memory_free > free ? be->memory_free - free : 0;
    return GT_OK;
}

static gt_status mark(hy_backend* be) {
    CudaMachine& m = cuda(be);
    if (m.events_used == m.events.size()) {
        cudaEvent_t event;
        TRY_CUDA(cudaEventCreate(&event));
        m.events.push_back(event);
    }
    return check(cudaEventRecord(m.events[m.events_used++], m.stream), "cudaEventRecord");
}

static gt_status marks(hy_backend* be, double* seconds, int64_t count) {
    CudaMachine& m = cuda(be);
    const size_t used = m.events_used;
    m.events_used = 0;
    TRY(synchronize(be));
    for (int64_t i = 0; i < count && (size_t)i + 1 < used; i++) {
        float ms;
        TRY_CUDA(cudaEventElapsedTime(&ms, m.events[i], m.events[i + 1]));
        seconds[i] = 1e-3 * ms;
    }
    return GT_OK;
}

/* A host function of the stream.  A thread of the driver sleeps, and the stream waits for it. */
static void CUDART_CB sleep_for(void* microseconds) {
    std::this_thread::sleep_for(std::chrono::microseconds((intptr_t)microseconds));
}

static gt_status delay(hy_backend* be, double seconds) {
    void* microseconds = reinterpret_cast<void*>((intptr_t)(1e6 * seconds));
    return check(cudaLaunchHostFunc(cuda(be).stream, sleep_for, microseconds), "cudaLaunchHostFunc");
}

/* ---- recordings ------------------------------------------------------------------------------ */

static gt_status capture(CudaMachine& m, cudaGraph_t* graph, gt_status (*record)(void* arg), void* arg) {
    *graph = nullptr;
    TRY_CUDA(cudaStreamBeginCapture(m.stream, cudaStreamCaptureModeThreadLocal));
    const gt_status recorded = record(arg);
    const cudaError_t ended = cudaStreamEndCapture(m.stream, graph);
    return recorded == GT_OK ? check(ended, "recording a graph") : recorded;
}

static gt_status record_graph(CudaMachine& m, cudaGraphExec_t* exec, gt_status (*record)(void* arg), void* arg) {
    cudaGraph_t graph;
    gt_status status = capture(m, &graph, record, arg);
    if (status == GT_OK) status = check(cudaGraphInstantiate(exec, graph, 0), "making a graph");
    if (graph) (void)cudaGraphDestroy(graph);
    return status;
}

static gt_status nodes(hy_backend* be, gt_status (*record)(void* arg), void* arg, int64_t* count) {
    cudaGraph_t graph;
    size_t nodes = 0;
    gt_status status = capture(cuda(be), &graph, record, arg);
    if (status == GT_OK) status = check(cudaGraphGetNodes(graph, nullptr, &nodes), "cudaGraphGetNodes");
    if (graph) (void)cudaGraphDestroy(graph);
    *count = (int64_t)nodes;
    return status;
}

/* Runs or replays a slot.  The first run makes the calls without recording them; it chooses cuBLASLt's plans and
 * loads all kernels.  The second run records a graph. */
static gt_status run(hy_backend* be, int slot, gt_status (*record)(void* arg), void* arg) {
    CudaMachine& m = cuda(be);
    for (Recording& r : m.recordings) {
        if (r.slot != slot || r.arg != arg) continue;
        if (!r.graph) TRY(record_graph(m, &r.graph, record, arg));
        return check(cudaGraphLaunch(r.graph, m.stream), "launching a graph");
    }
    m.recordings.push_back({slot, arg, nullptr});
    return record(arg);
}

/* ---- sums over ranks -------------------------------------------------------------------------
 * The second stream waits for the first before each sum, and the first waits for the second once, at the join.  A
 * recording captures both streams. */

static void connect(hy_backend* be, hy_nccl* nccl) { be->nccl = nccl; }

static gt_status sum(hy_backend* be, float* numbers, int64_t n) {
    CudaMachine& m = cuda(be);
    if (!n) return GT_OK;
    TRY_CUDA(cudaEventRecord(m.fork, m.stream));
    TRY_CUDA(cudaStreamWaitEvent(m.sums_stream, m.fork, 0));
    return hy_nccl_sum(m.nccl, numbers, n, m.sums_stream);
}

/* Records an event whose time the host can read.  In a graph such an event is a node of its own. */
static gt_status record_time(CudaMachine& m, cudaEvent_t event) {
    cudaStreamCaptureStatus capture;
    TRY_CUDA(cudaStreamIsCapturing(m.stream, &capture));
    const bool is_captured = capture == cudaStreamCaptureStatusActive;
    const unsigned flags = is_captured ? cudaEventRecordExternal : cudaEventRecordDefault;
    return check(cudaEventRecordWithFlags(event, m.stream, flags), "cudaEventRecordWithFlags");
}

static gt_status join(hy_backend* be) {
    CudaMachine& m = cuda(be);
    TRY_CUDA(cudaEventRecord(m.joined, m.sums_stream));
    TRY(record_time(m, m.before_join));
    TRY_CUDA(cudaStreamWaitEvent(m.stream, m.joined, 0));
    return record_time(m, m.after_join);
}

static gt_status waited(hy_backend* be, double* seconds) {
    CudaMachine& m = cuda(be);
    float ms;
    TRY(synchronize(be));
    TRY_CUDA(cudaEventElapsedTime(&ms, m.before_join, m.after_join));
    *seconds = 1e-3 * ms;
    return GT_OK;
}

/* ---- gemm -------------------------------------------------------------------------------------
 * cuBLASLt stores matrices by columns, so it takes a matrix that is stored by rows for its transpose.  The backend
 * therefore asks for c^T = op(b)^T op(a)^T, with b as the first matrix and a as the second. */

static cudaDataType_t data_type(gt_dtype dtype) {
    return dtype == GT_BF16 ? CUDA_R_16BF : dtype == GT_F16 ? CUDA_R_16F : CUDA_R_32F;
}

/* Returns the alignment of an operand, in bytes.  It is the largest power of two, at most 256, that divides the
 * addresses of its matrices in all products. */
static uint32_t alignment_of(const void* matrix, int64_t step, int64_t count, gt_dtype dtype) {
    uint64_t bits = (uintptr_t)matrix | 256;
    if (count > 1) bits |= (uint64_t)step * size_of(dtype);
    return (uint32_t)(bits & (~bits + 1));
}

static PlanKey plan_key(const hy_gemm_args& g) {
    PlanKey key;
    memset(&key, 0, sizeof key);
    key.M = g.M, key.N = g.N, key.K = g.K;
    key.lda = g.lda, key.ldb = g.ldb, key.ldc = g.ldc, key.count = g.count;
    if (g.count > 1) key.a_step = g.a_step, key.b_step = g.b_step, key.c_step = g.c_step;
    key.trans_a = g.trans_a, key.trans_b = g.trans_b;
    key.dtype = g.dtype, key.c_dtype = g.c_dtype;
    key.a_alignment = alignment_of(g.a, g.a_step, g.count, g.dtype);
    key.b_alignment = alignment_of(g.b, g.b_step, g.count, g.dtype);
    key.c_alignment = alignment_of(g.c, g.c_step, g.count, g.c_dtype);
    key.reads_c = g.beta != 0.0f;
    return key;
}

static gt_status make_layout(cublasLtMatrixLayout_t* layout, gt_dtype dtype, int64_t rows, int64_t columns, int64_t ld,
                             int64_t count, int64_t step) {
    const int32_t batch = (int32_t)count;
    TRY(check(cublasLtMatrixLayoutCreate(layout, data_type(dtype), (uint64_t)rows, (uint64_t)columns, ld),
              "cublasLtMatrixLayoutCreate"));
    if (count == 1) return GT_OK;
    TRY(check(cublasLtMatrixLayoutSetAttribute(*layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof batch),
              "CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT"));
    return check(
        cublasLtMatrixLayoutSetAttribute(*layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &step, sizeof step),
        "CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET");
}

static gt_status describe(Plan* plan) {
    const PlanKey& k = plan->key;
    const cublasOperation_t first = k.trans_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t second = k.trans_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    const gt_dtype dtype = (gt_dtype)k.dtype;
    TRY(check(cublasLtMatmulDescCreate(&plan->product, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate"));
    TRY(check(cublasLtMatmulDescSetAttribute(plan->product, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first),
              "CUBLASLT_MATMUL_DESC_TRANSA"));
    TRY(check(cublasLtMatmulDescSetAttribute(plan->product, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second),
              "CUBLASLT_MATMUL_DESC_TRANSB"));
    TRY(make_layout(&plan->b, dtype, k.trans_b ? k.K : k.N, k.trans_b ? k.N : k.K, k.ldb, k.count, k.b_step));
    TRY(make_layout(&plan->a, dtype, k.trans_a ? k.M : k.K, k.trans_a ? k.K : k.M, k.lda, k.count, k.a_step));
    return make_layout(&plan->c, (gt_dtype)k.c_dtype, k.N, k.M, k.ldc, k.count, k.c_step);
}

/* Sets the limits for cuBLASLt's choice.  It may add up partial sums of several blocks only in a separate step,
 * since atomics would not repeat bit for bit. */
static gt_status set_preference(cublasLtMatmulPreference_t preference, const PlanKey& k, size_t workspace_bytes) {
    const uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    const uint64_t bytes = workspace_bytes;
    const struct {
        cublasLtMatmulPreferenceAttributes_t name;
        const void* value;
        size_t size;
    } attributes[] = {
        {CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes},
        {CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes, sizeof schemes},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &k.b_alignment, sizeof k.b_alignment},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &k.a_alignment, sizeof k.a_alignment},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &k.c_alignment, sizeof k.c_alignment},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &k.c_alignment, sizeof k.c_alignment},
    };
    for (const auto& a : attributes)
        TRY(check(cublasLtMatmulPreferenceSetAttribute(preference, a.name, a.value, a.size),
                  "cublasLtMatmulPreferenceSetAttribute"));
    return GT_OK;
}

static gt_status choose_algorithm(const CudaMachine& m, Plan* plan) {
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t result;
    int count = 0;
    TRY(check(cublasLtMatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate"));
    gt_status status = set_preference(preference, plan->key, m.workspace_bytes);
    if (status == GT_OK) {
        const cublasStatus_t found = cublasLtMatmulAlgoGetHeuristic(m.cublas, plan->product, plan->b, plan->a, plan->c,
                                                                    plan->c, preference, 1, &result, &count);
        plan->found = found == CUBLAS_STATUS_SUCCESS && count > 0;
        if (plan->found) plan->algorithm = result.algo;
        if (found != CUBLAS_STATUS_SUCCESS && found != CUBLAS_STATUS_NOT_SUPPORTED)
            status = check(found, "cublasLtMatmulAlgoGetHeuristic");
    }
    (void)cublasLtMatmulPreferenceDestroy(preference);
    return status;
}

static void free_plan(const Plan& plan) {
    if (plan.product) (void)cublasLtMatmulDescDestroy(plan.product);
    for (cublasLtMatrixLayout_t layout : {plan.a, plan.b, plan.c})
        if (layout) (void)cublasLtMatrixLayoutDestroy(layout);
}

static void forget_plans(CudaMachine& m) {
    for (const Plan& plan : m.plans) free_plan(plan);
    m.plans.clear();
}

static gt_status find_plan(CudaMachine& m, const PlanKey& key, const Plan** plan) {
    for (const Plan& known : m.plans)
        if (!memcmp(&known.key, &key, sizeof key)) {
            *plan = &known;
            return GT_OK;
        }
    Plan made = {};
    made.key = key;
    gt_status status = describe(&made);
    if (status == GT_OK) status = choose_algorithm(m, &made);
    if (status != GT_OK) {
        free_plan(made);
        return status;
    }
    m.plans.push_back(made);
    *plan = &m.plans.back();
    return GT_OK;
}

static gt_status gemm(hy_backend* be, const hy_gemm_args* args) {
    CudaMachine& m = cuda(be);
    const hy_gemm_args g = resolve_gemm(args);
    const Plan* plan;
    if (g.M == 0 || g.N == 0) return GT_OK;
    if (g.K == 0) return plain_product(m, g); /* this computes beta c */
    TRY(find_plan(m, plan_key(g), &plan));
    if (!plan->found) return plain_product(m, g);
    return check(cublasLtMatmul(m.cublas, plan->product, &g.alpha, g.b, plan->b, g.a, plan->a, &g.beta, g.c, plan->c,
                                g.c, plan->c, &plan->algorithm, m.workspace, m.workspace_bytes, m.stream),
                 "cublasLtMatmul");
}

/* Sets the scratch memory.  Plans and recordings depend on the workspace, so new scratch memory drops both. */
static gt_status cuda_scratch(hy_backend* be, const hy_limits* limits, void* memory, size_t* bytes) {
    if (memory) {
        forget_plans(cuda(be));
        forget_recordings(cuda(be));
    }
    return scratch(be, limits, memory, bytes);
}

/* ---- opening and closing --------------------------------------------------------------------- */

static void close(hy_backend* be) {
    CudaMachine& m = cuda(be);
    const bool is_stopped = m.nccl && hy_nccl_stop(m.nccl);
    if (m.stream && !is_stopped) (void)cudaStreamSynchronize(m.stream);
    forget_recordings(m); /* comes before the communicator, which recordings use */
    hy_nccl_close(m.nccl);
    forget_plans(m);
    if (m.cublas) (void)cublasLtDestroy(m.cublas);
    if (m.staging) (void)cudaFreeHost(m.staging);
    if (m.start) (void)cudaEventDestroy(m.start);
    for (cudaEvent_t event : {m.stop, m.fork, m.joined, m.before_join, m.after_join})
        if (event) (void)cudaEventDestroy(event);
    for (cudaEvent_t event : m.events) (void)cudaEventDestroy(event);
    if (m.sums_stream) (void)cudaStreamDestroy(m.sums_stream);
    if (m.stream) (void)cudaStreamDestroy(m.stream);
    delete &m;
}

/* Finds the driver's version, such as "580.65.06"; "" if there is none.  It is the first word in the driver's
 * version line that has a dot between digits. */
static void driver_version(char* text, size_t size) {
    char line[256] = "";
    FILE* file = fopen("/proc/driver/nvidia/version", "r");
    if (file && !fgets(line, sizeof line, file)) line[0] = 0;
    if (file) fclose(file);
    text[0] = 0;
    for (char* word = strtok(line, " \t\n"); word; word = strtok(nullptr, " \t\n")) {
        const char* dot = strchr(word, '.');
        if (!dot || word[0] < '0' || word[0] > '9' || dot[1] < '0' || dot[1] > '9') continue;
        snprintf(text, size, "%s", word);
        return;
    }
}

static gt_status describe_software(CudaMachine& m) {
    char driver[32];
    int knows, runtime;
    TRY_CUDA(cudaDriverGetVersion(&knows));
    TRY_CUDA(cudaRuntimeGetVersion(&runtime));
    driver_version(driver, sizeof driver);
    snprintf(m.software, sizeof m.software, "driver %s (CUDA %d.%d), CUDA %d.%d", *driver ? driver : "unknown",
             knows / 1000, knows % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    return GT_OK;
}

static gt_status describe_device(CudaMachine& m) {
    static const char* const names[] = {"fp32", "fp32", "bf16", "fp16"};
    int id;
    cudaDeviceProp properties;
    size_t total;
    TRY_CUDA(cudaGetDevice(&id));
    TRY_CUDA(cudaGetDeviceProperties(&properties, id));
    TRY_CUDA(cudaDeviceGetPCIBusId(m.pci, sizeof m.pci, id));
    TRY_CUDA(cudaMemGetInfo(&m.memory_free, &total));
    snprintf(m.device, sizeof m.device, "%.80s, sm_%d%d, %s", properties.name, properties.major, properties.minor,
             names[m.dtype]);
    return describe_software(m);
}

static gt_status open(CudaMachine& m) {
    TRY_CUDA(cudaStreamCreateWithFlags(&m.stream, cudaStreamNonBlocking));
    TRY_CUDA(cudaStreamCreateWithFlags(&m.sums_stream, cudaStreamNonBlocking));
    TRY_CUDA(cudaEventCreateWithFlags(&m.fork, cudaEventDisableTiming));
    TRY_CUDA(cudaEventCreateWithFlags(&m.joined, cudaEventDisableTiming));
    TRY_CUDA(cudaEventCreate(&m.before_join));
    TRY_CUDA(cudaEventCreate(&m.after_join));
    TRY_CUDA(cudaMallocHost(reinterpret_cast<void**>(&m.staging), STAGING_BYTES));
    TRY_CUDA(cudaEventCreate(&m.start));
    TRY_CUDA(cudaEventCreate(&m.stop));
    TRY(check(cublasLtCreate(&m.cublas), "cublasLtCreate"));
    return describe_device(m);
}

static void set_machine(CudaMachine& m) {
    m.name = "cuda";
    m.workspace_want = WORKSPACE_BYTES;
    set_operators(&m);
    m.close = close;
    m.alloc = alloc;
    m.release = release;
    m.upload = upload;
    m.download = download;
    m.write = write;
    m.read = read;
    m.copy = copy;
    m.zero = zero;
    m.synchronize = synchronize;
    m.connect = connect;
    m.sum = sum;
    m.join = join;
    m.waited = waited;
    m.start_clock = start_clock;
    m.stop_clock = stop_clock;
    m.memory_taken = memory_taken;
    m.mark = mark;
    m.marks = marks;
    m.delay = delay;
    m.nodes = nodes;
    m.scratch = cuda_scratch;
    m.run = run;
    m.gemm = gemm;
}

} /* namespace hy */

extern "C" gt_status hy_backend_cuda(hy_backend** backend, gt_dtype dtype, int rank) {
    int count = 0;
    *backend = nullptr;
    if (rank >= 0 && cudaGetDeviceCount(&count) == cudaSuccess && count > 0)
        if (const cudaError_t error = cudaSetDevice(rank % count))
            return hy_fail(GT_ERROR_CUDA, "cudaSetDevice(%d): %s", rank % count, cudaGetErrorString(error));
    gt_status status = gt_device_supported(-1);
    if (status != GT_OK) return hy_fail(status, "%s", gt_last_error());
    hy::CudaMachine* m = new (std::nothrow) hy::CudaMachine();
    if (!m) return hy_fail(GT_ERROR_MEMORY, "no memory for a backend");
    m->dtype = dtype == GT_DTYPE_DEFAULT ? GT_F32 : dtype;
    hy::set_machine(*m);
    status = hy::open(*m);
    if (status != GT_OK) {
        hy::close(m);
        return status;
    }
    *backend = m;
    return GT_OK;
}
