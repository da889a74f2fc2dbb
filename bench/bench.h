/* bench/bench.h - shared by the files of gt_bench.  bench.c has the options, the loop over the rows and the printing.
 * call.c has the memory of one call and the check of its outputs.  A machine is code that runs calls: on the CPU
 * (machine_host.c), or on a GPU (machine_gpu.cu). */
#ifndef GT_BENCH_H
#define GT_BENCH_H

#include "gt_test.h"

#include <math.h>
#include <stdlib.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- numbers --------------------------------------------------------------------------------- */

#ifdef __CUDACC__
#define BENCH_INLINE static inline __host__ __device__
#else
#define BENCH_INLINE static inline
#endif

/* Returns random number i of a seed, by splitmix64 and Box-Muller. */
BENCH_INLINE float bench_number(bench_draw how, uint64_t seed, int64_t i) {
    uint64_t z = (seed << 40) + ((uint64_t)i + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    float a = ((float)(z >> 40) + 0.5f) * 0x1p-24f; /* in (0, 1) */
    float b = ((float)(z & 0xffffff) + 0.5f) * 0x1p-24f;
    if (how.is_uniform) return how.mean + how.spread * (2 * a - 1);
    return how.mean + how.spread * sqrtf(-2 * logf(a)) * cosf(6.2831853f * b);
}

/* Converts a random number x to an element of an int8 state.  40 times x spreads over most of -127 ... 127. */
BENCH_INLINE signed char bench_integer(float x) {
    const float scaled = 40 * x;
    return (signed char)(scaled > 127 ? 127 : scaled < -127 ? -127 : scaled);
}

/* A block of elements of an array, with up to four indices. */
typedef struct bench_region {
    gt_dtype dtype;
    int rank;
    int64_t offset;             /* bytes */
    int64_t size[4], stride[4]; /* strides in bytes */
} bench_region;

BENCH_INLINE int64_t bench_count(const bench_region *r) {
    int64_t count = 1;
    for (int k = 0; k < r->rank; k++) count *= r->size[k];
    return count;
}

/* Returns the offset in bytes of element i of the region. */
BENCH_INLINE int64_t bench_offset(const bench_region *r, int64_t i) {
    int64_t offset = r->offset;
    for (int k = r->rank - 1; k >= 0; k--) {
        offset += i % r->size[k] * r->stride[k];
        i /= r->size[k];
    }
    return offset;
}

static inline int bench_by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Returns the median.  Sorts the values. */
static inline double bench_median(double *values, int count) {
    qsort(values, (size_t)count, sizeof *values, bench_by_value);
    return values[count / 2];
}

/* ---- machines -------------------------------------------------------------------------------- */

/* A machine that runs calls.  Its functions return the status of a call.  If the machine itself fails, they end the
 * program. */
typedef struct bench_machine {
    const char *impl; /* name of the implementation: "ref" for the CPU twins, "gt..." for the kernels */
    int has_saved;    /* calls use `saved` and a workspace */
    int is_partial;   /* computes only a part of the operator, so results are not compared */
    const char *only; /* the only operator that it runs, or NULL */
    int is_mixed;     /* with 16-bit operands, values on the way to fp32 outputs are rounded to 16 bits */
    void *cublaslt;   /* handle for rmsnorm_linear, or NULL */
    int warm_ups, least_runs;
    double budget_ms; /* how long the timed runs of a row may take */

    void (*describe)(char *text, size_t bytes);
    double (*copy_bandwidth)(void); /* bytes read plus bytes written, per ms */
    size_t (*available)(void);      /* bytes */

    void *(*allocate)(size_t bytes);
    void (*release)(void *memory);
    void (*fill)(void *array, gt_dtype dtype, int64_t count, bench_draw how, uint64_t seed);
    void (*poison)(void *memory, size_t bytes);             /* NaN in every dtype */
    void (*copy)(void *to, const void *from, size_t bytes); /* copies within its memory, or from or to host memory */
    void (*gather)(float *host, const void *array, const bench_region *region);

    gt_status (*run)(const test_op *op, gt_pass pass, const void *args);
    /* times the call; first flushes caches if the machine can */
    gt_status (*time)(const test_op *op, gt_pass pass, const void *args, double *ms);
} bench_machine;

extern const bench_machine bench_host;
/* Returns NULL and sets *reason if this computer or this build has no GPU machine. */
const bench_machine *bench_gpu(const char *impl, const char **reason);
/* Runs only the products of rmsnorm_linear, by cuBLASLt.  NULL in programs other than gt_bench_cublaslt. */
const bench_machine *bench_products(void);
/* Runs wkv_ssm as calls of wkv6 and ssd on two streams, captured in a graph.  NULL in programs without a GPU. */
const bench_machine *bench_two_streams(void);

/* ---- one call -------------------------------------------------------------------------------- */

typedef struct bench_call {
    const bench_machine *machine;
    const test_op *functions;
    const gt_op *op;
    test_case row; /* has the dtype of the call */
    gt_pass pass;
    int is_inference; /* forward without `saved` */
    gt_dims dims;
    test_args args, filled;     /* pointers to the machine's memory; filled: with defaults */
    void *before[TEST_TENSORS]; /* copies of tensors that a call updates in place, made before the run */
    void *saved, *workspace;
    size_t scratch_bytes; /* bytes of both */
    char shape[64], complaint[200];
} bench_call;

/* Sets the sizes of a call.  Allocates nothing. */
void bench_open(bench_call *c, const bench_machine *machine, const test_case *row, gt_dtype dtype, gt_pass pass,
                int is_inference);
/* Asks how much memory the call needs.  Returns the status of the query, and sets *need. */
gt_status bench_ask(const bench_call *c, gt_workspace *need);
/* Allocates all arrays and draws the inputs.  For backward, also runs the forward call that fills `saved`. */
gt_status bench_allocate(bench_call *c);
void bench_close(bench_call *c);

/* Two functions prepare a run.  bench_restore resets tensors that a call updates in place.  bench_poison writes NaN to
 * the outputs. */
void bench_restore(bench_call *c);
void bench_poison(bench_call *c);

gt_dtype bench_dtype(const bench_call *c);
double bench_array_bytes(const bench_call *c); /* bytes of all arrays */
double bench_compulsory_bytes(const bench_call *c);

/* Compares the outputs, or a sample of them, with the double reference on the same inputs.  *worst receives the largest
 * relative error (l2).  Returns 1 if all errors are within their tolerance; otherwise c->complaint names an output. */
int bench_check(bench_call *c, double *worst);

#ifdef __cplusplus
}
#endif
#endif
