/* gt/base/reduce.cuh - sums over rows, by a kernel that the operators share.  This file also implements
 * gt_device_supported, which asks the driver about this kernel: one kernel stands for all. */
#ifndef GT_BASE_REDUCE_CUH
#define GT_BASE_REDUCE_CUH

#include "launch.cuh"
#include "warp.cuh"

namespace gt {

/* ---- reduce_rows: the second half of every sum over batch and time --------------------------------
 * out[c] (+)= sum_r in[r][c].  Each row of `in` holds partial sums that earlier kernels stored.  One launch computes up
 * to four such sums.
 * grid: ceil(columns/32) blocks for every sum.
 * block: 512 threads = 16 warps.  Warp w adds rows w, w + 16, ... of 32 columns.
 * registers: 18 loaded elements and one sum per thread.
 * shared: 2 KB for the warps' sums.
 * bytes: reads rows*columns*4 bytes once.
 * A warp adds its rows in order; then one warp adds the warps' sums in order.  So results are deterministic. */
constexpr int REDUCED_ROWS = 16; /* rows that a block reads at a time: one per warp */

/* The number of rows that a call with packed sequences has filled; only the device knows it.  There are `each` rows for
 * every sequence or, if chunk is not 0, for every chunk slot (see gt_chunk_slot).  The kernel does not read rows beyond
 * them.
 * cu_seqlens = NULL: all rows are filled. */
struct PackedRows {
    const int32_t *cu_seqlens, *seq_count;
    int64_t capacity;
    int chunk, each;
};

GT_DEV int64_t row_count(const PackedRows& q, int64_t most) {
    if (!q.cu_seqlens) return most;
    const int64_t sequences = q.seq_count ? *q.seq_count : q.capacity;
    return (q.chunk ? gt_chunk_slot(q.cu_seqlens, q.chunk, sequences, 0) : sequences) * q.each;
}

/* The sums of one launch. */
struct RowSums {
    static constexpr int MOST = 4;
    struct Sum {
        const float* in;
        float* out;
        int64_t rows, columns;
        PackedRows packed;
    } sums[MOST];
    int count = 0;

    void add(const float* in, float* out, int64_t rows, int64_t columns, const PackedRows& packed = {}) {
        sums[count++] = {in, out, rows, columns, packed};
    }
    /* Adds a sum, takes memory for its rows from the arena, and returns that memory.  If out is NULL, the caller does
     * not want the sum: the function adds nothing and returns NULL. */
    float* take(Arena& arena, float* out, int64_t rows, int64_t columns, const PackedRows& packed = {}) {
        if (!out) return nullptr;
        float* in = arena.take<float>(rows * columns);
        add(in, out, rows, columns, packed);
        return in;
    }
};

struct ReduceRowsParams {
    RowSums::Sum sums[RowSums::MOST];
    int64_t end[RowSums::MOST]; /* blocks end[i - 1] ... end[i] - 1 compute sum i */
    int accumulate;
};

GT_KERNEL(32 * REDUCED_ROWS, 1) reduce_rows_kernel(const GT_GRID_CONSTANT ReduceRowsParams params) {
    /* Loads in flight per thread.  16 warps with 18 loads each cover 288 rows in one batch.  288 rows are two rows from
     * each of 144 multiprocessors. */
    constexpr int BATCH = 18;
    RowSums::Sum p = params.sums[0];
    int64_t block = block_x();
    GT_UNROLL
    for (int i = 1; i < RowSums::MOST; i++) {
        if (block_x() < params.end[i - 1]) continue;
        p = params.sums[i];
        block = block_x() - params.end[i - 1];
    }
    wait_for_chain();
    const int64_t c = block * 32 + lane_id(), rows = row_count(p.packed, p.rows);
    float sum = 0.0f;
    for (int64_t r = warp_id(); c < p.columns && r < rows; r += BATCH * REDUCED_ROWS) {
        float x[BATCH];
        load_column(x, p.in, GT_F32, r * p.columns + c, REDUCED_ROWS * p.columns,
                    (rows - r + REDUCED_ROWS - 1) / REDUCED_ROWS);
        GT_UNROLL
        for (int i = 0; i < BATCH; i++) sum += x[i];
    }
    const uint32_t values = smem_base();
    sts<float>(values + 4 * thread_id(), sum);
    sync_threads();
    if (warp_id() == 0 && c < p.columns) {
        sum = 0.0f;
        for (int i = 0; i < REDUCED_ROWS; i++) sum += lds<float>(values + 4 * (32 * i + lane_id()));
        p.out[c] = params.accumulate ? p.out[c] + sum : sum;
    }
}

/* gt_device_supported: returns whether this build's kernels run on `device` (-1: the current device). */
static inline gt_status device_supported(int device) {
#ifdef GT_EMU
    return device <= 0 ? GT_OK : gt_fail(GT_ERROR_VALUE, "device = %d: must be -1 or 0", device);
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
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (error == cudaSuccess && 10 * major + minor < 75)
        return gt_fail(GT_ERROR_ARCH, "device %d has compute capability %d.%d: must be 7.5 or newer", device, major,
                       minor);
    /* One kernel stands for all, since all are compiled for the same architectures. */
    cudaFuncAttributes attributes;
    if (error == cudaSuccess && device != current) error = cudaSetDevice(device);
    if (error == cudaSuccess) {
        error = cudaFuncGetAttributes(&attributes, (const void*)reduce_rows_kernel);
        if (device != current) (void)cudaSetDevice(current);
    }
    return report(error, "kernels");
#endif
}

/* Launches reduce_rows_kernel, unless there are no sums.  stream: a gt_stream, or a Chain. */
template <class Stream>
static inline gt_status reduce_rows(const RowSums& sums, int accumulate, Stream& stream) {
    if (sums.count == 0) return GT_OK;
    ReduceRowsParams params = {};
    int64_t blocks = 0;
    for (int i = 0; i < RowSums::MOST; i++) {
        if (i < sums.count) {
            params.sums[i] = sums.sums[i];
            blocks += (sums.sums[i].columns + 31) / 32;
        }
        params.end[i] = i + 1 < sums.count ? blocks : INT64_MAX; /* the last sum has all remaining blocks */
    }
    params.accumulate = accumulate;
    return run("reduce_rows", reduce_rows_kernel, blocks, 32 * REDUCED_ROWS, 4 * 32 * REDUCED_ROWS, stream, params);
}

/* Launches reduce_rows_kernel for one sum. */
template <class Stream>
static inline gt_status reduce_rows(const float* in, float* out, int64_t rows, int64_t columns, int accumulate,
                                    Stream& stream) {
    RowSums sums;
    sums.add(in, out, rows, columns);
    return reduce_rows(sums, accumulate, stream);
}

} /* namespace gt */

#endif
