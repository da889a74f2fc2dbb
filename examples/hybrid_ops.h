/* The backend: a table of functions that runs the model on a CPU or a GPU.  This file also defines the operators of
 * a hybrid model that gt_kernels.h lacks.
 *
 * hybrid_ops.c is the CPU backend.  hybrid_ops.cu is the CUDA backend, with its kernels in hybrid_ops.cuh.
 *
 * The conventions of gt_kernels.h apply here, too.  Forward and backward of an operator use the same argument
 * struct.  The last index is fastest.  A gradient whose pointer is NULL is not computed.  accumulate = 1 adds to
 * parameter gradients.  Results repeat bit for bit.  void * arrays have the struct's dtype, float * arrays are
 * always fp32.  Arrays without a stride are packed. */
#ifndef HYBRID_OPS_H
#define HYBRID_OPS_H

#include "gt_kernels.h"

/* Marks a function that both the host compiler and the device compiler compile. */
#ifdef __CUDACC__
#define HY_SHARED static inline __host__ __device__
#else
#define HY_SHARED static inline
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- gemm -------------------------------------------------------------------------------------
 *     c = alpha op(a) op(b) + beta c            op(x) = x or its transpose
 * | array | as stored            | row stride |
 * |-------|----------------------|------------|
 * | a     | [M,K], trans_a [K,M] | lda        |
 * | b     | [K,N], trans_b [N,K] | ldb        |
 * | c     | [M,N]                | ldc        |
 * Backward uses two more products: da = dc op(b)^T, db = op(a)^T dc.  With beta = 0 the operator does not read c. */
typedef struct hy_gemm_args {
    int64_t M, N, K;
    int trans_a, trans_b;
    gt_dtype dtype;                 /* a and b */
    gt_dtype c_dtype;               /* 0 = dtype, or GT_F32 */
    float alpha, beta;              /* have no defaults: 0 means 0 */
    const void *a, *b;              /* in */
    void *c;                        /* in and out; overlaps neither a nor b */
    int64_t lda, ldb, ldc;          /* 0 = packed */
    int64_t count;                  /* number of independent products, 0 = 1 */
    int64_t a_step, b_step, c_step; /* elements from one product's array to the next product's */
} hy_gemm_args;

/* ---- rmsnorm_linear without its norm ----------------------------------------------------------
 * gt_rmsnorm_linear_step always normalises the rows of x, but most projections follow no norm.  With this eps the mean
 * square of a row vanishes beside eps, so RMSNorm only divides the row by 2^50.  gamma = 2^50 in every column undoes
 * this division.  The root mean square of a row must be below 2^37. */
#define HY_PLAIN_EPS 0x1p100f
#define HY_PLAIN_GAMMA 0x1p50f

/* ---- embedding --------------------------------------------------------------------------------
 *     y[m] = table[token[m]]                    dtable[v] += sum over m with token[m] = v of dy[m]
 * The operator does not check its tokens: the caller must ensure 0 <= token < V. */
typedef struct hy_embedding_args {
    int64_t M, V, D;
    gt_dtype dtype; /* table y dy */
    int accumulate;
    const int32_t *token; /* in  [M] */
    const void *table;    /* in  [V,D] */
    void *y;              /* out [M,D] */
    const void *dy;       /* in  [M,D] */
    float *dtable;        /* out [V,D], accumulates */
} hy_embedding_args;

/* ---- lerp: token shift, with data-dependent weights -------------------------------------------
 *     e_t = x_{t-1} - x_t                       x_{-1} = state_in
 *     y_i = x + e . (mu_i + m_i)                i < count; m = NULL: y_i = x + e . mu_i
 * Source: Peng et al. 2024, arXiv:2404.05892, section 4.2 (ddlerp).
 * Backward, with g_i = dy_i: dm_i = g_i . e, dmu_i = sum over rows of g_i . e,
 *     dx_t = sum_i g_i . (1 - mu_i - m_i) at t + sum_i g_i . (mu_i + m_i) at t+1.
 * state_in counts as a constant, so it gets no gradient. */
typedef struct hy_lerp_args {
    int64_t B, T, D, count;
    gt_dtype dtype;        /* x m y and their gradients */
    int accumulate;        /* 1: adds to dmu */
    int accumulate_dx;     /* 1: adds to dx */
    const void *x;         /* in  [B,T,D] */
    const float *state_in; /* in  [B,D], NULL = 0 */
    const float *mu;       /* in  [count,D] */
    const void *m;         /* in  [count,B,T,D], NULL = 0 */
    void *y;               /* out [count,B,T,D] */
    float *state_out;      /* out [B,D], x of the last token; may equal state_in */
    const void *dy;        /* in  [count,B,T,D] */
    void *dx;              /* out [B,T,D], see accumulate_dx */
    void *dm;              /* out [count,B,T,D] */
    float *dmu;            /* out [count,D], accumulates */
} hy_lerp_args;

/* ---- map: y = f(x), element by element --------------------------------------------------------
 * | function   | f                                             | backward reads |
 * |------------|-----------------------------------------------|----------------|
 * | HY_TANH    | tanh(x)                                       | y              |
 * | HY_GELU    | x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) | x              |
 * | HY_NEG_EXP | -exp(x)                                       | y              |
 * Source of GELU: Hendrycks and Gimpel 2016, arXiv:1606.08415, the tanh form. */
typedef enum hy_function { HY_TANH, HY_GELU, HY_NEG_EXP } hy_function;
typedef struct hy_map_args {
    int64_t n;
    gt_dtype dtype;
    hy_function function;
    int accumulate; /* 1: adds to dx, since x may be a parameter */
    const void *x;  /* in  [n] */
    void *y;        /* out [n], may equal x; backward reads y where the table says so */
    const void *dy; /* in  [n] */
    void *dx;       /* out [n], may equal dy */
} hy_map_args;

/* ---- bias: y[m] += bias -------------------------------------------------------------------- */
typedef struct hy_bias_args {
    int64_t M, D;
    gt_dtype dtype; /* y dy */
    int accumulate;
    const float *bias; /* in  [D] */
    void *y;           /* in and out [M,D] */
    const void *dy;    /* in  [M,D] */
    float *dbias;      /* out [D], accumulates: the sum of dy over rows */
} hy_bias_args;

/* ---- gate_mix: mixes two branches with one gate per row ---------------------------------------
 *     g = sigmoid(weight . [a; b] + bias)       weight = NULL: g = bias, without the sigmoid
 *     y = residual + g a + (1 - g) b
 * Backward, with s = <dy, a - b>, q = s g (1 - g): da = g dy + q weight_a, db = (1 - g) dy + q weight_b,
 *     dweight = sum over rows of q [a; b], dbias = sum of q; weight = NULL: dbias = sum of s. */
typedef struct hy_gate_mix_args {
    int64_t M, D;
    gt_dtype dtype; /* a b residual y and their gradients */
    int accumulate;
    const void *a, *b;    /* in  [M,D] */
    const void *residual; /* in  [M,D], NULL = 0 */
    const float *weight;  /* in  [2,D], NULL: g = bias */
    const float *bias;    /* in  [1] */
    void *y;              /* out [M,D], may equal residual */
    float *gate;          /* out [M]: forward writes g; backward reads g and overwrites it with q (weight = NULL: s) */
    const void *dy;       /* in  [M,D]; the gradient of residual equals dy */
    void *da, *db;        /* out [M,D] */
    float *dweight;       /* out [2,D], accumulates */
    float *dbias;         /* out [1], accumulates */
} hy_gate_mix_args;

/* ---- cross_entropy ----------------------------------------------------------------------------
 *     lse[m] = log sum_v exp(logits[m,v])       loss[m] = lse[m] - logits[m, target[m]]
 *     total = {sum of loss, rows counted, sum of the entropies of softmax(logits[m])}
 * A row with target < 0 adds to no total, and its gradient is 0.  Backward overwrites the logits with the gradient of
 * scale[0] times the mean loss:
 *     (softmax(logits[m]) - onehot(target[m])) scale[0] / max(total[1], 1) */
typedef struct hy_cross_entropy_args {
    int64_t M, V;
    gt_dtype dtype;        /* logits */
    const int32_t *target; /* in  [M], below V */
    void *logits;          /* in  [M,V]; backward: in and out */
    float *lse;            /* out [M] of forward, in of backward */
    float *loss;           /* out [M] */
    float *entropy;        /* out [M] */
    float *total;          /* out [3] of forward, in of backward */
    const float *scale;    /* in  [1] of backward, NULL = 1 */
} hy_cross_entropy_args;

/* ---- parameters as one array: gradient norm and AdamW -----------------------------------------
 * All parameters lie in one fp32 array of n elements.  A segment is the part of the array that holds one tensor.  The
 * arrays of this struct are memory of the backend. */
enum { HY_GROUPS = 6 }; /* parameter groups, named in hybrid_model.h */
typedef struct hy_segments {
    int64_t count;
    const int64_t *start; /* [count + 1] index of each segment's first element, then n */
    const int32_t *group; /* [count] the segment's parameter group, 0 to HY_GROUPS - 1 */
    const float *decay;   /* [count] 1: weight decay applies to the segment, 0: it does not */
} hy_segments;

/* Indices into the array `control`, which holds numbers that change from step to step.  The array is memory of the
 * backend, so a replayed recording of a step reads the new numbers. */
enum {
    HY_LR, /* learning rate */
    HY_BETA1,
    HY_BETA2,
    HY_EPS,
    HY_CORRECTION1,  /* 1 / (1 - beta1^step) */
    HY_CORRECTION2,  /* 1 / (1 - beta2^step) */
    HY_WEIGHT_DECAY, /* decoupled: w -= lr weight_decay w */
    HY_MAX_NORM,     /* a gradient with a larger norm is scaled down to this norm; 0 = never */
    HY_LOSS_SCALE,   /* factor by which the stored gradients exceed the true ones; 1 without loss scaling */
    HY_DROP_LOW,     /* low and high 24 bits of the seed that chooses which numbers dropout sets to 0 */
    HY_DROP_HIGH,
    HY_DROP_WINDOW, /* index of this pass's first window in the step's whole batch; with it several passes or ranks
                       drop the same elements as one pass over the whole batch */
    HY_CONTROLS
};

/* norm[g] = 2-norm of the gradient of parameter group g; norm[HY_GROUPS] = 2-norm of the whole gradient.  Both are
 * divided by the loss scale.  The operator sums the squares of each segment in fp64, then adds up the segments in
 * order. */
typedef struct hy_grad_norm_args {
    hy_segments segments;
    const float *grad;    /* in  [n] */
    const float *control; /* in  [HY_CONTROLS] */
    double *partial;      /* scratch [segments.count] */
    float *norm;          /* out [HY_GROUPS + 1] */
} hy_grad_norm_args;

/* AdamW: Loshchilov and Hutter 2017, arXiv:1711.05101.  With g = grad / loss_scale * min(1, max_norm / norm):
 *     m = beta1 m + (1 - beta1) g               v = beta2 v + (1 - beta2) g^2
 *     w -= lr (m correction1 / (sqrt(v correction2) + eps) + weight_decay decay[segment] w)
 * If norm[HY_GROUPS] is not finite, nothing changes. */
typedef struct hy_adamw_args {
    hy_segments segments;
    const float *control; /* in  [HY_CONTROLS] */
    const float *norm;    /* in  [HY_GROUPS + 1], from grad_norm */
    const float *grad;    /* in  [n] */
    float *w, *m, *v;     /* in and out [n] */
    gt_dtype copy_dtype;  /* dtype of copy: GT_BF16 or GT_F16 */
    void *copy;           /* out [n], w rounded to copy_dtype; NULL = not wanted */
} hy_adamw_args;

/* ---- small helpers ------------------------------------------------------------------------- */

/* y += x */
typedef struct hy_add_args {
    int64_t n;
    gt_dtype dtype;
    const void *x; /* in [n] */
    void *y;       /* in and out [n] */
} hy_add_args;

/* to = from, in another dtype */
typedef struct hy_cast_args {
    int64_t n;
    gt_dtype from_dtype, to_dtype;
    const void *from; /* in  [n] */
    void *to;         /* out [n] */
} hy_cast_args;

/* Dropout: Srivastava et al. 2014, JMLR 15:1929.  Sets x[i] to 0 with probability `rate`, else to x[i] / (1 -
 * rate).  The choice depends only on control, site and i.  So backward makes the same call on the gradient.  The
 * index i counts from the first window of the step's whole batch. */
typedef struct hy_dropout_args {
    int64_t n, window; /* elements of x, and elements per window */
    gt_dtype dtype;
    float rate;           /* 0 to below 1 */
    int32_t site;         /* index of this dropout's place in the model */
    const float *control; /* in  [HY_CONTROLS] */
    void *x;              /* in and out [n] */
} hy_dropout_args;

/* Returns whether dropout keeps element i; limit is rate * 2^32.  It hashes the index with two rounds of a 32-bit
 * mixer.  So it needs no state and gives the same answer on every device. */
HY_SHARED int hy_stays(uint32_t low, uint32_t high, uint32_t site, int64_t i, uint32_t limit) {
    uint32_t h = (uint32_t)i * 0x9e3779b1u ^ (uint32_t)((uint64_t)i >> 32) ^ low ^ site << 24;
    h = (h ^ h >> 16) * 0x7feb352du, h = (h ^ h >> 15) * 0x846ca68bu;
    h ^= h >> 16 ^ high ^ site * 0x85ebca6bu;
    h = (h ^ h >> 16) * 0x7feb352du, h = (h ^ h >> 15) * 0x846ca68bu;
    return (h ^ h >> 16) >= limit;
}

/* Moving average of the parameters.  With decay in [0, 1]: average = decay * average + (1 - decay) * w.  With decay
 * < 0: swaps average and w. */
typedef struct hy_average_args {
    int64_t n;
    float decay;
    float *w;       /* in [n]; in and out for a swap */
    float *average; /* in and out [n] */
} hy_average_args;

/* to[i,b] = keep[b] ? from[i,b] : 0.  Carries states from one batch to the next; a sequence with keep = 0 starts
 * from zero states. */
typedef struct hy_carry_args {
    int64_t count, B, n;
    const int32_t *keep; /* in  [B] */
    const float *from;   /* in  [count,B,n] */
    float *to;           /* out [count,B,n] */
} hy_carry_args;

/* ---- backend ----------------------------------------------------------------------------------
 * The model does all its work through this table, and never reads the backend's memory directly.  The backend works in
 * the order of the calls.  Functions may return before their work is done; only read, download and synchronize wait.
 * Only alloc allocates.  A function that fails returns its status and leaves the reason in hy_last_error. */
typedef struct hy_backend hy_backend;

/* The current place in the model, for profiles and error messages. */
typedef struct hy_place {
    const char *pass; /* "forward", "recompute", "backward", "update"; NULL: no pass has begun */
    const char *part; /* "embedding", "norm", "rwkv", "mamba", "branches" (both in one call), "mix", "ffn", "head",
                         "states", "optimiser" */
} hy_place;

/* The largest sizes that later calls will have. */
typedef struct hy_limits {
    int64_t M; /* rows of activations */
    int64_t D; /* columns of any array of activations */
    int64_t n; /* parameters */
} hy_limits;

/* The operators of gt_kernels.h that models use.  Every other list of these operators expands this macro.
 *
 * STEPS(op) stands for an operator that also has a step for new tokens.
 * PRODUCT(op) stands for an operator with a step and with a matrix product, which the CPU backend computes itself.
 * ROWS(op) stands for every other operator. */
#define HY_OPERATORS(STEPS, ROWS, PRODUCT)                                                                             \
    STEPS(wkv6)                                                                                                        \
    STEPS(ssd)                                                                                                         \
    STEPS(selective_scan)                                                                                              \
    STEPS(conv1d)                                                                                                      \
    STEPS(conv_ssd)                                                                                                    \
    STEPS(wkv_ssm)                                                                                                     \
    PRODUCT(rmsnorm_linear)                                                                                            \
    ROWS(norm_mix)                                                                                                     \
    ROWS(norm_gate)

struct hy_backend {
    const char *name;   /* "cpu", "cuda" */
    char device[128];   /* description of the device for people */
    char pci[32];       /* GPU: its address on the PCI bus, as cudaDeviceGetPCIBusId gives it; else "" */
    char software[128]; /* versions of the installed driver and toolkit; "" if there are none */
    gt_dtype dtype;     /* type of activations and of the copies of projection weights */
    size_t fp32_bytes;  /* bytes of a number in a float * array: 4; 8 in the tests that run in double */
    size_t memory_free; /* bytes that alloc can still allocate; 0 = not known */
    hy_place at;        /* the current place; the model sets it */
    int64_t window;     /* rows of a window, set by the model; 0: not known.  If a backend computes products window by
                           window, the result of a row does not depend on the number of windows */

    void (*close)(hy_backend *);

    gt_status (*alloc)(hy_backend *, void **memory, size_t bytes); /* 256-byte aligned */
    void (*release)(hy_backend *, void *memory);
    gt_status (*upload)(hy_backend *, void *to, const void *host, size_t bytes);
    gt_status (*download)(hy_backend *, void *host, const void *from, size_t bytes);
    gt_status (*write)(hy_backend *, void *to, gt_dtype, const double *host, int64_t n);  /* rounds to the dtype */
    gt_status (*read)(hy_backend *, double *host, const void *from, gt_dtype, int64_t n); /* converts to double */
    gt_status (*copy)(hy_backend *, void *to, const void *from, size_t bytes);
    gt_status (*zero)(hy_backend *, void *to, size_t bytes);
    gt_status (*synchronize)(hy_backend *);

    /* Sums over the GPUs of all ranks.  NULL: the backend cannot sum, and hy_ranks_sum adds up the gradients.
     * connect gives the backend a communicator, which `close` closes.  nccl = NULL: there is none yet.
     * sum replaces numbers [n] by their sum over all ranks, after all earlier work and beside later work.
     * join makes later work wait for all sums.
     * waited gives the seconds for which the latest join delayed the device, and waits for the device. */
    struct hy_nccl *nccl;
    void (*connect)(hy_backend *, struct hy_nccl *);
    gt_status (*sum)(hy_backend *, float *numbers, int64_t n);
    gt_status (*join)(hy_backend *);
    gt_status (*waited)(hy_backend *, double *seconds);

    /* For measurements.  NULL: the backend has no device clock and no memory of its own.
     * stop_clock waits, and gives the seconds that the device spent on the work enqueued since start_clock.
     * memory_taken gives the bytes of device memory taken since the backend was opened.  They include the code of
     * kernels and recordings. */
    gt_status (*start_clock)(hy_backend *);
    gt_status (*stop_clock)(hy_backend *, double *seconds);
    gt_status (*memory_taken)(hy_backend *, size_t *bytes);

    /* For profiles; NULL if the functions above are NULL.
     * mark enqueues a mark: the device notes the time when it reaches this point of its work.
     * marks waits, gives the `count` times in seconds from each mark to the next, and clears the marks.
     * delay makes the device idle for the given number of seconds.
     * nodes counts the graph nodes that a recording of record(arg) would have, and does none of the work. */
    gt_status (*mark)(hy_backend *);
    gt_status (*marks)(hy_backend *, double *seconds, int64_t count);
    gt_status (*delay)(hy_backend *, double seconds);
    gt_status (*nodes)(hy_backend *, gt_status (*record)(void *arg), void *arg, int64_t *count);

    /* Gives the operators below their scratch memory.  memory = NULL sets *bytes to the size needed.  Otherwise the
     * backend uses these *bytes of memory until another call replaces them. */
    gt_status (*scratch)(hy_backend *, const hy_limits *, void *memory, size_t *bytes);

    /* Does the work of record(arg), and may record the work at the first run and replay it later.  So for one slot
     * record(arg) must always make the same calls with the same arguments. */
    gt_status (*run)(hy_backend *, int slot, gt_status (*record)(void *arg), void *arg);

#define HY_FIELD(op, function) gt_status (*op##_##function)(hy_backend *, const gt_##op##_args *);
#define HY_FIELDS(op)                                                                                                  \
    gt_status (*op##_workspace)(hy_backend *, const gt_##op##_args *, gt_workspace *);                                 \
    HY_FIELD(op, forward)                                                                                              \
    HY_FIELD(op, backward)
#define HY_FIELDS_AND_STEP(op) HY_FIELDS(op) HY_FIELD(op, step)
    HY_OPERATORS(HY_FIELDS_AND_STEP, HY_FIELDS, HY_FIELDS_AND_STEP)
#undef HY_FIELDS_AND_STEP
#undef HY_FIELDS
#undef HY_FIELD

    gt_status (*gemm)(hy_backend *, const hy_gemm_args *);
    gt_status (*embedding_forward)(hy_backend *, const hy_embedding_args *);
    gt_status (*embedding_backward)(hy_backend *, const hy_embedding_args *);
    gt_status (*lerp_forward)(hy_backend *, const hy_lerp_args *);
    gt_status (*lerp_backward)(hy_backend *, const hy_lerp_args *);
    gt_status (*map_forward)(hy_backend *, const hy_map_args *);
    gt_status (*map_backward)(hy_backend *, const hy_map_args *);
    gt_status (*bias_forward)(hy_backend *, const hy_bias_args *);
    gt_status (*bias_backward)(hy_backend *, const hy_bias_args *);
    gt_status (*gate_mix_forward)(hy_backend *, const hy_gate_mix_args *);
    gt_status (*gate_mix_backward)(hy_backend *, const hy_gate_mix_args *);
    gt_status (*cross_entropy_forward)(hy_backend *, const hy_cross_entropy_args *);
    gt_status (*cross_entropy_backward)(hy_backend *, const hy_cross_entropy_args *);
    gt_status (*grad_norm)(hy_backend *, const hy_grad_norm_args *);
    gt_status (*adamw)(hy_backend *, const hy_adamw_args *);
    gt_status (*add)(hy_backend *, const hy_add_args *);
    gt_status (*cast)(hy_backend *, const hy_cast_args *);
    gt_status (*carry)(hy_backend *, const hy_carry_args *);
    gt_status (*dropout)(hy_backend *, const hy_dropout_args *);
    gt_status (*average)(hy_backend *, const hy_average_args *);
};

/* Opens the CPU backend, with activations in fp32.  It uses the fastest variant of the build that this processor can
 * run.  Close it with (*backend)->close(*backend). */
gt_status hy_backend_cpu(hy_backend **backend);

/* Opens a backend on a CUDA device, with activations of `dtype`.  rank >= 0 selects the device with this number,
 * modulo the number of devices.  rank < 0 selects the current device.  Returns GT_ERROR_NO_CUDA in a build without
 * CUDA. */
gt_status hy_backend_cuda(hy_backend **backend, gt_dtype dtype, int rank);

/* Stores the text as this thread's last error, and returns `status`.  Backends and the model use it. */
gt_status hy_fail(gt_status status, const char *format, ...);

/* The reason for the last failure of a backend or model function in this thread; "" if none failed. */
const char *hy_last_error(void);

#ifdef __cplusplus
}
#endif
#endif
