/* gt_kernels 0.1.0 - CUDA kernels for RWKV-6 / Mamba-2 hybrid models, forward and backward, each
 * beside a plain-C twin that proves it.  Header-only, MIT licence, needs the CUDA Toolkit alone.
 *
 *   Use it from C (C99 or newer) or C++ (C++11 or newer), no CUDA header needed:
 *
 *       #include "gt_kernels.h"
 *       gt_wkv6_args a = {.B = 8, .T = 512, .H = 4, .N = 64, .dtype = GT_BF16,
 *                         .r = r, .k = k, .v = v, .w = w, .u = u, .y = y};
 *       if (gt_wkv6_forward(&a, stream) != GT_OK) puts(gt_last_error());
 *
 *   Make the kernels: exactly one file of the program, say gt_impl.cu, holds the code:
 *
 *       #define GT_KERNELS_IMPLEMENTATION
 *       #include "gt_kernels.h"                          nvcc -std=c++17 -c gt_impl.cu
 *
 *   The same two lines in a .c file give stubs that answer GT_ERROR_NO_CUDA, so the same program
 *   links on a machine without nvcc.  gt_ref_... are the CPU twins: add reference/gt_*.c to use them.
 *   To compile in parallel, define GT_CORE_IMPLEMENTATION in one file and GT_WKV6_, GT_SSM_,
 *   GT_CONV1D_, GT_FUSED_IMPLEMENTATION each in a file of its own instead.
 *
 *   | operator       | passes                   | what it is                                      |
 *   |----------------|--------------------------|-------------------------------------------------|
 *   | wkv6           | forward, backward, step  | RWKV-6 time mixing                              |
 *   | ssd            | forward, backward, step  | Mamba-2 state space duality                     |
 *   | selective_scan | forward, backward, step  | Mamba-1 scan                                    |
 *   | conv1d         | forward, backward, step  | causal depthwise convolution, width 2 to 4      |
 *   | rmsnorm_linear | forward, backward        | RMSNorm or LayerNorm, then a projection         |
 *   | norm_mix       | forward, backward        | residual + g_a RMSNorm(a) + g_b RMSNorm(b)      |
 *   | norm_gate      | forward, backward        | gated RMSNorm, group norm + gate                |
 *   Reserved names: gt_conv_ssd_..., gt_wkv_ssm_... .
 *
 * CONVENTIONS, true for every function
 *   Arguments   one struct per operator serves all its functions; a zero field means the default
 *               stated beside it.  Pointers are device memory for gt_OP_..., host for gt_ref_OP_... .
 *   Sizes       B batch, T time, H heads, N key or state size, V value size, P head size, G groups,
 *               D channels, W conv width, M rows, O outputs.  B, T and M may be 0.
 *   dtype       of the activations: GT_F32 (default), GT_BF16, GT_F16.  w and dt (with dw and ddt)
 *               may stay fp32 beside 16-bit activations.  States, parameters other than a projection
 *               weight, and all parameter gradients are fp32.  Accumulation is fp32.
 *   Layout      packed, last index fastest, as written in brackets: [B,T,H,N].  A gt_stride beside a
 *               tensor moves it, in elements: [B,H,T,N] or a slice of a wider projection.  16-byte
 *               alignment of pointers and rows is fast, element alignment is enough.
 *   NULL        tensors without elements may be NULL; an optional input that is NULL counts as the
 *               constant stated; an output or gradient that is NULL is not computed.
 *   Outputs     are written, whatever they held.  accumulate = 1 adds into parameter gradients (marked
 *               "accumulates") instead.  No output may overlap an input or another output, except
 *               where "may equal" is stated; slices that interleave in one buffer, with rows of the same
 *               length, do not overlap.
 *   saved       optional buffer that forward fills and backward reads to save time; its contents are
 *               opaque, its size comes from gt_OP_workspace.  Give it to both passes or to none.
 *   workspace   scratch memory; contents undefined before and after, any alignment is right.
 *               gt_OP_workspace gives an upper bound from sizes, strides, flags and the current device,
 *               for tensors as well aligned as those given; one that is still NULL counts as aligned.
 *   segments    number of pieces the time axis is cut into and computed in parallel; 0 = chosen from
 *               sizes and device only.  With segments fixed a batch element's result does not depend
 *               on B or on its neighbours, nor that of a packed sequence on the others.
 *   cu_seqlens  packed sequences: one call for sequences of different lengths, without padding; see
 *               gt_wkv6_args.  Of the other operators reserved, must be NULL.
 *   Errors      are returned as gt_status; gt_last_error() names function, field and value.  Bad
 *               arguments are found before anything is launched or written.  The library never
 *               prints, exits, throws, allocates device memory, synchronises, or uses a stream it was
 *               not given.  CUDA errors pending before the call are neither cleared nor reported.
 *   Streams     work is enqueued on the stream given; every function but _workspace may be called
 *               inside a stream capture, even as the first call of the process.
 *   Threads     all functions may be called from several threads and on several devices at once.
 *   Results     repeat bit for bit on the same device and library version; no float atomics.
 *
 * Licence: MIT, see LICENSE. */
#ifndef GT_KERNELS_H
#define GT_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#define GT_VERSION_MAJOR 0
#define GT_VERSION_MINOR 1
#define GT_VERSION_PATCH 0
#define GT_VERSION (GT_VERSION_MAJOR * 10000 + GT_VERSION_MINOR * 100 + GT_VERSION_PATCH)

/* Linkage of every function.  Hidden by default, so that two libraries of one process may each embed a
 * copy.  Define GT_API yourself to export the functions, or as `static` to use them in one file alone.
 * GT_REF_API is the same for the CPU twins, which live in files of their own. */
#ifndef GT_API
#if defined(__GNUC__)
#define GT_API extern __attribute__((visibility("hidden")))
#else
#define GT_API extern
#endif
#endif
#ifndef GT_REF_API
#if defined(__GNUC__)
#define GT_REF_API extern __attribute__((visibility("hidden")))
#else
#define GT_REF_API extern
#endif
#endif

/* Linker symbols carry the version: a program and an implementation that were built from different
 * headers do not link ("undefined reference to gt_wkv6_forward_v0_1_0") instead of misreading each
 * other's structs.  Source code uses the plain names. */
#define GT_SYMBOL(name) gt_##name##_v0_1_0
#define gt_version GT_SYMBOL(version)
#define gt_status_string GT_SYMBOL(status_string)
#define gt_last_error GT_SYMBOL(last_error)
#define gt_device_supported GT_SYMBOL(device_supported)
#define gt_wkv6_workspace GT_SYMBOL(wkv6_workspace)
#define gt_wkv6_forward GT_SYMBOL(wkv6_forward)
#define gt_wkv6_backward GT_SYMBOL(wkv6_backward)
#define gt_wkv6_step GT_SYMBOL(wkv6_step)
#define gt_ssd_workspace GT_SYMBOL(ssd_workspace)
#define gt_ssd_forward GT_SYMBOL(ssd_forward)
#define gt_ssd_backward GT_SYMBOL(ssd_backward)
#define gt_ssd_step GT_SYMBOL(ssd_step)
#define gt_selective_scan_workspace GT_SYMBOL(selective_scan_workspace)
#define gt_selective_scan_forward GT_SYMBOL(selective_scan_forward)
#define gt_selective_scan_backward GT_SYMBOL(selective_scan_backward)
#define gt_selective_scan_step GT_SYMBOL(selective_scan_step)
#define gt_conv1d_workspace GT_SYMBOL(conv1d_workspace)
#define gt_conv1d_forward GT_SYMBOL(conv1d_forward)
#define gt_conv1d_backward GT_SYMBOL(conv1d_backward)
#define gt_conv1d_step GT_SYMBOL(conv1d_step)
#define gt_rmsnorm_linear_workspace GT_SYMBOL(rmsnorm_linear_workspace)
#define gt_rmsnorm_linear_forward GT_SYMBOL(rmsnorm_linear_forward)
#define gt_rmsnorm_linear_backward GT_SYMBOL(rmsnorm_linear_backward)
#define gt_norm_mix_workspace GT_SYMBOL(norm_mix_workspace)
#define gt_norm_mix_forward GT_SYMBOL(norm_mix_forward)
#define gt_norm_mix_backward GT_SYMBOL(norm_mix_backward)
#define gt_norm_gate_workspace GT_SYMBOL(norm_gate_workspace)
#define gt_norm_gate_forward GT_SYMBOL(norm_gate_forward)
#define gt_norm_gate_backward GT_SYMBOL(norm_gate_backward)
#define gt_ref_wkv6_forward GT_SYMBOL(ref_wkv6_forward)
#define gt_ref_wkv6_backward GT_SYMBOL(ref_wkv6_backward)
#define gt_ref_wkv6_step GT_SYMBOL(ref_wkv6_step)
#define gt_ref_ssd_forward GT_SYMBOL(ref_ssd_forward)
#define gt_ref_ssd_backward GT_SYMBOL(ref_ssd_backward)
#define gt_ref_ssd_step GT_SYMBOL(ref_ssd_step)
#define gt_ref_selective_scan_forward GT_SYMBOL(ref_selective_scan_forward)
#define gt_ref_selective_scan_backward GT_SYMBOL(ref_selective_scan_backward)
#define gt_ref_selective_scan_step GT_SYMBOL(ref_selective_scan_step)
#define gt_ref_conv1d_forward GT_SYMBOL(ref_conv1d_forward)
#define gt_ref_conv1d_backward GT_SYMBOL(ref_conv1d_backward)
#define gt_ref_conv1d_step GT_SYMBOL(ref_conv1d_step)
#define gt_ref_rmsnorm_linear_forward GT_SYMBOL(ref_rmsnorm_linear_forward)
#define gt_ref_rmsnorm_linear_backward GT_SYMBOL(ref_rmsnorm_linear_backward)
#define gt_ref_norm_mix_forward GT_SYMBOL(ref_norm_mix_forward)
#define gt_ref_norm_mix_backward GT_SYMBOL(ref_norm_mix_backward)
#define gt_ref_norm_gate_forward GT_SYMBOL(ref_norm_gate_forward)
#define gt_ref_norm_gate_backward GT_SYMBOL(ref_norm_gate_backward)

#ifdef __cplusplus
extern "C" {
#endif

/* ---- types ----------------------------------------------------------------------------------- */

typedef enum gt_status {
    GT_OK = 0,
    /* 100s: a bad argument; fix the call */
    GT_ERROR_NULL = 100,      /* a required pointer is NULL */
    GT_ERROR_SIZE = 101,      /* a size is negative, too large or inconsistent with another */
    GT_ERROR_STRIDE = 102,    /* a stride is negative or makes an output overlap itself */
    GT_ERROR_DTYPE = 103,     /* a dtype is out of range or not allowed there */
    GT_ERROR_VALUE = 104,     /* a flag, enum or number is out of range */
    GT_ERROR_ALIGNMENT = 105, /* a pointer is not aligned to its element size */
    GT_ERROR_OVERLAP = 106,   /* an output overlaps another tensor */
    /* 200s: valid, but not supported by this build, version or device */
    GT_ERROR_UNSUPPORTED = 200, /* reserved field or a size beyond a documented limit */
    GT_ERROR_NO_CUDA = 201,     /* the implementation was compiled without nvcc */
    GT_ERROR_ARCH = 202,        /* the device is older than sm_75, or has no kernel image in this build */
    /* 300s: resources */
    GT_ERROR_NO_DEVICE = 300, /* no CUDA device or no usable driver */
    GT_ERROR_WORKSPACE = 301, /* workspace is NULL or too small; the message gives the bytes needed */
    GT_ERROR_SAVED = 302,     /* saved is too small; the message gives the bytes needed */
    GT_ERROR_MEMORY = 303,    /* a CPU twin could not allocate host memory */
    /* 400s: CUDA */
    GT_ERROR_CUDA = 400 /* a CUDA call failed; the message holds CUDA's own text */
} gt_status;

typedef enum gt_dtype {
    GT_DTYPE_DEFAULT = 0, /* dtype: GT_F32; w_dtype, dt_dtype: as dtype */
    GT_F32 = 1,
    GT_BF16 = 2,
    GT_F16 = 3
} gt_dtype;

typedef enum gt_decay {
    GT_DECAY_RAW = 0, /* w holds x, decay = exp(-exp(x)), as RWKV-6 trains it */
    GT_DECAY_LOG = 1  /* w holds g <= 0, decay = exp(g) */
} gt_decay;

typedef enum gt_activation { GT_ACT_NONE = 0, GT_ACT_SILU = 1 } gt_activation;
typedef enum gt_norm { GT_NORM_RMS = 0, GT_NORM_LAYER = 1 } gt_norm;

typedef struct CUstream_st *gt_stream; /* the very type cudaStream_t; NULL is the default stream */

/* Strides in elements of a tensor [B,T,H,*] or [B,T,D]; h is that of the head, group or channel index.
 * The last index of a four-index tensor is always contiguous.  A zero component takes its default:
 *     h = size of the contiguous part (1 for three-index tensors),  t = H*h,  b = max(T*t, H*h).
 * Packed [B,T,H,N]: all zero.  [B,H,T,N]: {.t = N, .h = T*N}.  [B,D,T]: {.t = 1, .h = T}.  A slice of
 * a projection with rows of R elements: {.t = R}. */
typedef struct gt_stride {
    int64_t b, t, h;
} gt_stride;

/* Bytes asked for by gt_OP_workspace: workspace of each pass, and the optional `saved` buffer. */
typedef struct gt_workspace {
    size_t forward, backward, step, saved;
} gt_workspace;

/* ---- library --------------------------------------------------------------------------------- */

/* GT_VERSION of the compiled implementation. */
GT_API int gt_version(void);

/* A fixed sentence for a status; never NULL, also for values that are no status. */
GT_API const char *gt_status_string(gt_status status);

/* What the last failing gt_ call of this thread reported: function, field, value.  "" if none failed.
 * The text stays valid until the next failing call of the same thread. */
GT_API const char *gt_last_error(void);

/* GT_OK if kernels of this build run on `device` (-1: the current one); else GT_ERROR_NO_CUDA,
 * GT_ERROR_NO_DEVICE, GT_ERROR_ARCH or GT_ERROR_VALUE (no such device). */
GT_API gt_status gt_device_supported(int device);

/* Host conversions, round to nearest even; NaN stays NaN, overflow gives infinity. */
static inline uint16_t gt_f32_to_bf16(float value);
static inline float gt_bf16_to_f32(uint16_t bits);
static inline uint16_t gt_f32_to_f16(float value);
static inline float gt_f16_to_f32(uint16_t bits);

/* ---- wkv6: RWKV-6 time mixing ------------------------------------------------------------------
 * Per batch element and head, with decay d_t = exp(-exp(w_t)) (raw) or exp(w_t) (log), in [0,1]:
 *     y_t = S_{t-1}^T r_t + (sum_n r_t[n] u[n] k_t[n]) v_t          reads the state before token t
 *     S_t = diag(d_t) S_{t-1} + k_t v_t^T                           S_0 = state_in, S_T = state_out
 * Source: Peng et al. 2024, "Eagle and Finch", arXiv:2404.05892, section 4.1 (with u = time_faaaa).
 * Backward, G_t = dL/dS_t with G_T = dstate_out, and b_t = <dy_t, v_t>:
 *     dr_t = S_{t-1} dy_t + b_t u.k_t               dk_t = G_t v_t + b_t u.r_t
 *     dv_t = G_t^T k_t + (sum_n r u k) dy_t          du  = sum_{b,t} b_t r_t.k_t
 *     dw_t = dL/dw as given: log: d_t . rowsum(G_t . S_{t-1}); raw: that times -exp(w_t), and 0 where
 *            d_t is 0                                G_{t-1} = diag(d_t) G_t + r_t dy_t^T
 * Any decay is right, exact zeros included; nothing is clamped.  No tokens: the state is copied.
 * The kernels take N and V up to 256 (else GT_ERROR_UNSUPPORTED), the CPU twins any.
 * Workspace of backward given `saved`, where N = V is 32, 64 or 128.  dv (N = 128: dk, too) is scratch
 * memory if it is given and its rows are aligned to 16 bytes, but with N = 128 not in fp32, nor where a block
 * may have less than 163 KB of shared memory.  Then it is 1/8, 1/4 or 7/16 of the bytes of r in bf16 with N =
 * 32, 64 or 128, else 1/6, or less, and a state for each head (packed: of each sequence).  Without scratch it
 * is at most the bytes of r from T = 1024 on (N = 128: 2048) if segments are 1, or 0 and r has 128 KB or more
 * for each multiprocessor; otherwise more, as in fp32 with N = 128 and less than 163 KB.  Both without the
 * states of segments, those of a shared dstate_in, and what more sequences than T / 1024 add.
 * A query without dv is answered for the second case, which is always enough; one with dv for a call that
 * has it. */
typedef struct gt_wkv6_args {
    int64_t B, T, H, N;
    int64_t V;             /* value size, 0 = N */
    gt_dtype dtype;        /* r k v y and their gradients */
    gt_dtype w_dtype;      /* w dw: 0 = dtype, or GT_F32 */
    gt_decay decay;        /* what w holds */
    int state_in_shared;   /* 1: state_in and dstate_in are [H,N,V], one for the whole batch */
    int accumulate;        /* 1: du, and dstate_in if shared, are added to */
    int64_t segments;      /* 0 = automatic */
    const void *r, *k, *w; /* in  [B,T,H,N] */
    const void *v;         /* in  [B,T,H,V] */
    const float *u;        /* in  [H,N], NULL = 0 */
    const float *state_in; /* in  [B,H,N,V], NULL = 0 */
    void *y;               /* out [B,T,H,V]          forward, step */
    float *state_out;      /* out [B,H,N,V]          forward, step; may equal state_in if not shared */
    const void *dy;        /* in  [B,T,H,V]          backward */
    const float *dstate_out;            /* in  [B,H,N,V], NULL = 0 */
    void *dr, *dk, *dw;                 /* out [B,T,H,N] */
    void *dv;                           /* out [B,T,H,V] */
    float *du;                          /* out [H,N], accumulates */
    float *dstate_in;                   /* out [B,H,N,V], may equal dstate_out if not shared; shared:
                                           [H,N,V], summed over the batch, accumulates */
    gt_stride r_stride, k_stride, w_stride, v_stride, y_stride;
    gt_stride dy_stride, dr_stride, dk_stride, dw_stride, dv_stride;
    /* Packed sequences, forward and backward.  With seq_capacity > 0, B is 1 and sequence s has the
     * tokens cu_seqlens[s] to cu_seqlens[s+1]-1, for s below *seq_count; cu_seqlens starts with 0
     * and never falls, so that sequences follow one another and may be empty.  States are
     * [seq_capacity,H,N,V], one for each sequence, or shared by all; du is summed over all;
     * segments are pieces of each.
     * T and seq_capacity are capacities, for which saved and workspace are sized.  What is used of
     * them stands in device memory that the host never reads: a captured graph may be replayed for
     * other lengths.  Tokens from cu_seqlens[*seq_count] on belong to no sequence: they are not
     * read, and y and the gradients are 0 there.  States from row *seq_count on are neither read
     * nor written.  The CPU twin checks the contents of the two arrays, the kernels trust them. */
    const int32_t *cu_seqlens; /* in  [seq_capacity+1], of which *seq_count+1 are read */
    const int32_t *seq_count;  /* in  [1], 0 to seq_capacity; NULL = seq_capacity */
    int64_t seq_capacity;      /* 0 = not packed */
    /* step only: states live in a pool of slot_capacity rows (0 = B), batch element b uses row
     * slots[b] (NULL: row b).  A row outside the pool skips the element: its y is 0.  Two elements
     * must not use the same row. */
    const int32_t *slots; /* in  [B] */
    int64_t slot_capacity;
    void *saved;
    size_t saved_bytes;
    void *workspace;
    size_t workspace_bytes;
} gt_wkv6_args;

/* Writes y and, unless NULL, state_out (and saved).  Required: r k v w y. */
GT_API gt_status gt_wkv6_forward(const gt_wkv6_args *args, gt_stream stream);
/* Writes the gradients that are not NULL.  Required: r k v w dy; u and state_in as given to forward. */
GT_API gt_status gt_wkv6_backward(const gt_wkv6_args *args, gt_stream stream);
/* 1 to 16 new tokens per batch element; state_out is read and updated in place (state_in: NULL or the
 * same pointer).  Equals forward on the same tokens up to rounding.  Not for packed sequences. */
GT_API gt_status gt_wkv6_step(const gt_wkv6_args *args, gt_stream stream);
/* Needs sizes, strides, capacities, dtypes, flags and segments; of the pointers only whether they are NULL
 * and how they are aligned matters. */
GT_API gt_status gt_wkv6_workspace(const gt_wkv6_args *args, gt_workspace *need);
GT_REF_API gt_status gt_ref_wkv6_forward(const gt_wkv6_args *args);
GT_REF_API gt_status gt_ref_wkv6_backward(const gt_wkv6_args *args);
GT_REF_API gt_status gt_ref_wkv6_step(const gt_wkv6_args *args);

/* ---- ssd: Mamba-2 -------------------------------------------------------------------------------
 * Per batch element and head h (group g = h / (H/G)), s = dt + dt_bias, softplus(s) if asked, clamped
 * to [dt_min, dt_max] if asked, gives Delta_t:
 *     h_t = exp(Delta_t A) h_{t-1} + Delta_t x_t Bm_t^T              h [P,N], h_0 = state_in
 *     y_t = (h_t Cm_t + Dskip . x_t) . silu(z_t)                      without z: no gate
 * Source: Dao and Gu 2024, "Transformers are SSMs", arXiv:2405.21060, section 6; softplus, limits,
 * gate and skip as in the Mamba-2 block.
 * Backward: gradients of all of it; at a clamp limit exactly reached the gradient passes.  With z
 * the ungated y is recomputed.
 * The kernels take P and N up to 256 (else GT_ERROR_UNSUPPORTED), the CPU twins any. */
typedef struct gt_ssd_args {
    int64_t B, T, H, P, N;
    int64_t G;               /* groups that share Bm and Cm, divides H; 0 = 1 */
    gt_dtype dtype;          /* x Bm Cm z y and their gradients */
    gt_dtype dt_dtype;       /* dt ddt: 0 = dtype, or GT_F32 */
    int softplus;            /* 1: softplus(dt + dt_bias) */
    int dt_limit;            /* 1: then clamp to [dt_min, dt_max] */
    float dt_min, dt_max;
    int Dskip_per_channel;   /* 1: Dskip and dDskip are [H,P] */
    int state_in_shared;     /* 1: state_in and dstate_in are [H,P,N] */
    int accumulate;          /* 1: dA dDskip ddt_bias, and dstate_in if shared, are added to */
    int64_t segments;        /* 0 = automatic */
    const void *x;           /* in  [B,T,H,P] */
    const void *dt;          /* in  [B,T,H] */
    const float *A;          /* in  [H] */
    const void *Bm, *Cm;     /* in  [B,T,G,N] */
    const float *Dskip;      /* in  [H], NULL = 0 */
    const void *z;           /* in  [B,T,H,P], NULL = no gate */
    const float *dt_bias;    /* in  [H], NULL = 0 */
    const float *state_in;   /* in  [B,H,P,N], NULL = 0 */
    void *y;                 /* out [B,T,H,P]        forward, step */
    float *state_out;        /* out [B,H,P,N]        forward, step; may equal state_in if not shared */
    const void *dy;          /* in  [B,T,H,P]        backward: gradient of the gated y */
    const float *dstate_out; /* in  [B,H,P,N], NULL = 0 */
    void *dx, *dz;           /* out [B,T,H,P] */
    void *ddt;               /* out [B,T,H] */
    void *dBm, *dCm;         /* out [B,T,G,N] */
    float *dA, *ddt_bias;    /* out [H], accumulate */
    float *dDskip;           /* out [H] or [H,P], accumulates */
    float *dstate_in;        /* out [B,H,P,N], may equal dstate_out if not shared; shared: [H,P,N],
                                summed over the batch, accumulates */
    gt_stride x_stride, dt_stride, Bm_stride, Cm_stride, z_stride, y_stride;
    gt_stride dy_stride, dx_stride, ddt_stride, dBm_stride, dCm_stride, dz_stride;
    const int32_t *cu_seqlens, *seq_count; /* reserved, as in gt_wkv6_args */
    int64_t seq_capacity;
    const int32_t *slots; /* step only, as in gt_wkv6_args */
    int64_t slot_capacity;
    void *saved;
    size_t saved_bytes;
    void *workspace;
    size_t workspace_bytes;
} gt_ssd_args;

/* Writes y and, unless NULL, state_out (and saved).  Required: x dt A Bm Cm y. */
GT_API gt_status gt_ssd_forward(const gt_ssd_args *args, gt_stream stream);
/* Writes the gradients that are not NULL.  Required: x dt A Bm Cm dy; the optional inputs as given to
 * forward.  dz needs z. */
GT_API gt_status gt_ssd_backward(const gt_ssd_args *args, gt_stream stream);
/* 1 to 16 new tokens; state_out is updated in place, as gt_wkv6_step. */
GT_API gt_status gt_ssd_step(const gt_ssd_args *args, gt_stream stream);
GT_API gt_status gt_ssd_workspace(const gt_ssd_args *args, gt_workspace *need);
GT_REF_API gt_status gt_ref_ssd_forward(const gt_ssd_args *args);
GT_REF_API gt_status gt_ref_ssd_backward(const gt_ssd_args *args);
GT_REF_API gt_status gt_ref_ssd_step(const gt_ssd_args *args);

/* ---- selective_scan: Mamba-1 --------------------------------------------------------------------
 * Per batch element and channel d (group g = d / (D/G)), Delta_t = dt + dt_bias, softplus if asked:
 *     h_t[n] = exp(Delta_t A[d,n]) h_{t-1}[n] + Delta_t u_t Bm_t[n]     h_0 = state_in
 *     y_t    = (sum_n h_t[n] Cm_t[n] + Dskip u_t) silu(z_t)              without z: no gate
 * Source: Gu and Dao 2023, "Mamba", arXiv:2312.00752, section 3.2 and algorithm 2.
 * The kernels take N up to 256 (else GT_ERROR_UNSUPPORTED), the CPU twins any. */
typedef struct gt_selective_scan_args {
    int64_t B, T, D, N;
    int64_t G;               /* groups that share Bm and Cm, divides D; 0 = 1 */
    gt_dtype dtype;          /* u Bm Cm z y and their gradients */
    gt_dtype dt_dtype;       /* dt ddt: 0 = dtype, or GT_F32 */
    int softplus;            /* 1: softplus(dt + dt_bias) */
    int state_in_shared;     /* 1: state_in and dstate_in are [D,N] */
    int accumulate;          /* 1: dA dDskip ddt_bias, and dstate_in if shared, are added to */
    int64_t segments;        /* 0 = automatic */
    const void *u, *dt;      /* in  [B,T,D] */
    const float *A;          /* in  [D,N] */
    const void *Bm, *Cm;     /* in  [B,T,G,N] */
    const float *Dskip;      /* in  [D], NULL = 0 */
    const void *z;           /* in  [B,T,D], NULL = no gate */
    const float *dt_bias;    /* in  [D], NULL = 0 */
    const float *state_in;   /* in  [B,D,N], NULL = 0 */
    void *y;                 /* out [B,T,D]          forward, step */
    float *state_out;        /* out [B,D,N]          forward, step; may equal state_in if not shared */
    const void *dy;          /* in  [B,T,D]          backward: gradient of the gated y */
    const float *dstate_out; /* in  [B,D,N], NULL = 0 */
    void *du, *ddt, *dz;     /* out [B,T,D] */
    void *dBm, *dCm;         /* out [B,T,G,N] */
    float *dA;               /* out [D,N], accumulates */
    float *dDskip, *ddt_bias; /* out [D], accumulate */
    float *dstate_in;        /* out [B,D,N], may equal dstate_out if not shared; shared: [D,N], summed
                                over the batch, accumulates */
    gt_stride u_stride, dt_stride, Bm_stride, Cm_stride, z_stride, y_stride;
    gt_stride dy_stride, du_stride, ddt_stride, dBm_stride, dCm_stride, dz_stride;
    const int32_t *cu_seqlens, *seq_count; /* reserved, as in gt_wkv6_args */
    int64_t seq_capacity;
    const int32_t *slots; /* step only, as in gt_wkv6_args */
    int64_t slot_capacity;
    void *saved;
    size_t saved_bytes;
    void *workspace;
    size_t workspace_bytes;
} gt_selective_scan_args;

/* Writes y and, unless NULL, state_out (and saved).  Required: u dt A Bm Cm y. */
GT_API gt_status gt_selective_scan_forward(const gt_selective_scan_args *args, gt_stream stream);
/* Writes the gradients that are not NULL.  Required: u dt A Bm Cm dy.  dz needs z. */
GT_API gt_status gt_selective_scan_backward(const gt_selective_scan_args *args, gt_stream stream);
/* 1 to 16 new tokens; state_out is updated in place, as gt_wkv6_step. */
GT_API gt_status gt_selective_scan_step(const gt_selective_scan_args *args, gt_stream stream);
GT_API gt_status gt_selective_scan_workspace(const gt_selective_scan_args *args, gt_workspace *need);
GT_REF_API gt_status gt_ref_selective_scan_forward(const gt_selective_scan_args *args);
GT_REF_API gt_status gt_ref_selective_scan_backward(const gt_selective_scan_args *args);
GT_REF_API gt_status gt_ref_selective_scan_step(const gt_selective_scan_args *args);

/* ---- conv1d: causal depthwise convolution --------------------------------------------------------
 * Per batch element and channel, e = [the W-1 inputs before the first; x_0 ... x_{T-1}]:
 *     y_t = act(bias + sum_{j<W} weight[j] e_{t+j})        weight[W-1] meets the current token
 *     state_out = the last W-1 of e, oldest first           (rows of state_in if T < W-1)
 * Source: Gu and Dao 2023, arXiv:2312.00752, figure 3 (the convolution before the scan). */
typedef struct gt_conv1d_args {
    int64_t B, T, D;
    int64_t W;                /* 2, 3 or 4 */
    gt_dtype dtype;           /* x y dy dx */
    gt_activation activation; /* applied to the sum */
    int state_in_shared;      /* 1: state_in and dstate_in are [D,W-1] */
    int accumulate;           /* 1: dweight dbias, and dstate_in if shared, are added to */
    const void *x;            /* in  [B,T,D]; [B,D,T] with x_stride = {.t = 1, .h = T} */
    const float *weight;      /* in  [D,W] */
    const float *bias;        /* in  [D], NULL = 0 */
    const float *state_in;    /* in  [B,D,W-1], NULL = 0 */
    void *y;                  /* out [B,T,D]         forward, step */
    float *state_out;         /* out [B,D,W-1]       forward, step; may equal state_in if not shared */
    const void *dy;           /* in  [B,T,D]         backward */
    const float *dstate_out;  /* in  [B,D,W-1], NULL = 0 */
    void *dx;                 /* out [B,T,D] */
    float *dweight;           /* out [D,W], accumulates */
    float *dbias;             /* out [D], accumulates */
    float *dstate_in;         /* out [B,D,W-1], may equal dstate_out if not shared; shared: [D,W-1],
                                 summed over the batch, accumulates */
    gt_stride x_stride, y_stride, dy_stride, dx_stride;
    const int32_t *cu_seqlens, *seq_count; /* reserved, as in gt_wkv6_args */
    int64_t seq_capacity;
    const int32_t *slots; /* step only, as in gt_wkv6_args */
    int64_t slot_capacity;
    void *workspace;
    size_t workspace_bytes;
} gt_conv1d_args;

/* Writes y and, unless NULL, state_out.  Required: x weight y. */
GT_API gt_status gt_conv1d_forward(const gt_conv1d_args *args, gt_stream stream);
/* Writes the gradients that are not NULL.  Required: x weight dy. */
GT_API gt_status gt_conv1d_backward(const gt_conv1d_args *args, gt_stream stream);
/* 1 to 16 new tokens; state_out is updated in place, as gt_wkv6_step. */
GT_API gt_status gt_conv1d_step(const gt_conv1d_args *args, gt_stream stream);
GT_API gt_status gt_conv1d_workspace(const gt_conv1d_args *args, gt_workspace *need);
GT_REF_API gt_status gt_ref_conv1d_forward(const gt_conv1d_args *args);
GT_REF_API gt_status gt_ref_conv1d_backward(const gt_conv1d_args *args);
GT_REF_API gt_status gt_ref_conv1d_step(const gt_conv1d_args *args);

/* ---- rmsnorm_linear: norm, then projection ----------------------------------------------------------
 * Per row, mean = 0 (RMS) or mean(x) (LAYER), rstd = 1/sqrt(mean((x - mean)^2) + eps):
 *     n = (x - mean) rstd . gamma + beta                y = weight n + bias
 * Sources: Zhang and Sennrich 2019, arXiv:1910.07467; Ba et al. 2016, arXiv:1607.06450.  The row
 * factor rstd commutes with the projection: y = rstd (weight diag(gamma)) x + ... . */
typedef struct gt_rmsnorm_linear_args {
    int64_t M, D, O;
    gt_dtype dtype;     /* x weight y dy dx */
    gt_norm norm;       /* GT_NORM_RMS or GT_NORM_LAYER */
    float eps;          /* 0 = 1e-5 */
    int accumulate;     /* 1: dweight dgamma dbeta dbias are added to */
    const void *x;      /* in  [M,D] */
    const void *weight; /* in  [O,D] */
    const float *gamma; /* in  [D], NULL = 1 */
    const float *beta;  /* in  [D], NULL = 0 */
    const float *bias;  /* in  [O], NULL = 0 */
    void *y;            /* out [M,O]                 forward */
    const void *dy;     /* in  [M,O]                 backward */
    void *dx;           /* out [M,D] */
    float *dweight;     /* out [O,D], accumulates */
    float *dgamma, *dbeta; /* out [D], accumulate */
    float *dbias;       /* out [O], accumulates */
    int64_t x_stride, y_stride, dy_stride, dx_stride; /* elements from row to row, 0 = packed */
    void *cublaslt; /* cublasLtHandle_t that may be used if built with GT_WITH_CUBLASLT, or NULL */
    void *saved;
    size_t saved_bytes;
    void *workspace;
    size_t workspace_bytes;
} gt_rmsnorm_linear_args;

/* Writes y (and saved).  Required: x weight y. */
GT_API gt_status gt_rmsnorm_linear_forward(const gt_rmsnorm_linear_args *args, gt_stream stream);
/* Writes the gradients that are not NULL.  Required: x weight dy. */
GT_API gt_status gt_rmsnorm_linear_backward(const gt_rmsnorm_linear_args *args, gt_stream stream);
GT_API gt_status gt_rmsnorm_linear_workspace(const gt_rmsnorm_linear_args *args, gt_workspace *need);
GT_REF_API gt_status gt_ref_rmsnorm_linear_forward(const gt_rmsnorm_linear_args *args);
GT_REF_API gt_status gt_ref_rmsnorm_linear_backward(const gt_rmsnorm_linear_args *args);

/* ---- norm_mix: two normalised branches and a residual -------------------------------------------------
 *     y = residual + gain_a . RMSNorm(a) + gain_b . RMSNorm(b)
 * The mean square is taken over the whole row, or over each of H equal slices (heads) of it.
 * Source: the branch norms of Hymba (Dong et al. 2024, arXiv:2411.13676, section 2.1), summed. */
typedef struct gt_norm_mix_args {
    int64_t M, D;
    int64_t H;             /* slices per row, divides D; 0 = 1 */
    gt_dtype dtype;        /* a b residual y and their gradients */
    float eps;             /* 0 = 1e-5 */
    int accumulate;        /* 1: dgain_a dgain_b are added to */
    const void *a, *b;     /* in  [M,D] */
    const float *gain_a, *gain_b; /* in [D], NULL = 1 */
    const void *residual;  /* in  [M,D], NULL = 0 */
    void *y;               /* out [M,D]              forward; may equal residual */
    const void *dy;        /* in  [M,D]              backward; also the gradient of residual */
    void *da, *db;         /* out [M,D] */
    float *dgain_a, *dgain_b; /* out [D], accumulate */
    int64_t a_stride, b_stride, residual_stride, y_stride; /* elements from row to row, 0 = packed */
    int64_t dy_stride, da_stride, db_stride;
    void *workspace;
    size_t workspace_bytes;
} gt_norm_mix_args;

/* Writes y.  Required: a b y. */
GT_API gt_status gt_norm_mix_forward(const gt_norm_mix_args *args, gt_stream stream);
/* Writes the gradients that are not NULL.  Required: a b dy. */
GT_API gt_status gt_norm_mix_backward(const gt_norm_mix_args *args, gt_stream stream);
GT_API gt_status gt_norm_mix_workspace(const gt_norm_mix_args *args, gt_workspace *need);
GT_REF_API gt_status gt_ref_norm_mix_forward(const gt_norm_mix_args *args);
GT_REF_API gt_status gt_ref_norm_mix_backward(const gt_norm_mix_args *args);

/* ---- norm_gate: gated RMSNorm (Mamba-2), group norm + gate (RWKV-6) -----------------------------------
 * Per row and each of H equal slices, norm as in rmsnorm_linear over the slice:
 *     norm first:  y = (norm(x) . gamma + beta) . silu(z)
 *     gate first:  y = norm(x . silu(z)) . gamma + beta
 * Mamba-2: GT_NORM_RMS, gate_first = 1.  RWKV-6: GT_NORM_LAYER, H heads, eps = 64e-5 (gate z before SiLU).
 * Sources: as rmsnorm_linear; Wu and He 2018, arXiv:1803.08494; the gate as in arXiv:2405.21060. */
typedef struct gt_norm_gate_args {
    int64_t M, D;
    int64_t H;          /* slices per row, divides D; 0 = 1 */
    gt_dtype dtype;     /* x z y and their gradients */
    gt_norm norm;       /* GT_NORM_RMS or GT_NORM_LAYER */
    int gate_first;     /* 1: the gate acts before the norm */
    float eps;          /* 0 = 1e-5 */
    int accumulate;     /* 1: dgamma dbeta are added to */
    const void *x;      /* in  [M,D] */
    const void *z;      /* in  [M,D], NULL = no gate */
    const float *gamma; /* in  [D], NULL = 1 */
    const float *beta;  /* in  [D], NULL = 0 */
    void *y;            /* out [M,D]                 forward */
    const void *dy;     /* in  [M,D]                 backward */
    void *dx, *dz;      /* out [M,D] */
    float *dgamma, *dbeta; /* out [D], accumulate */
    int64_t x_stride, z_stride, y_stride; /* elements from row to row, 0 = packed */
    int64_t dy_stride, dx_stride, dz_stride;
    void *workspace;
    size_t workspace_bytes;
} gt_norm_gate_args;

/* Writes y.  Required: x y. */
GT_API gt_status gt_norm_gate_forward(const gt_norm_gate_args *args, gt_stream stream);
/* Writes the gradients that are not NULL.  Required: x dy.  dz needs z. */
GT_API gt_status gt_norm_gate_backward(const gt_norm_gate_args *args, gt_stream stream);
GT_API gt_status gt_norm_gate_workspace(const gt_norm_gate_args *args, gt_workspace *need);
GT_REF_API gt_status gt_ref_norm_gate_forward(const gt_norm_gate_args *args);
GT_REF_API gt_status gt_ref_norm_gate_backward(const gt_norm_gate_args *args);

/* ---- host conversions --------------------------------------------------------------------------- */

static inline uint32_t gt_float_bits(float value) {
    union {
        float f;
        uint32_t u;
    } x;
    x.f = value;
    return x.u;
}

static inline float gt_bits_float(uint32_t bits) {
    union {
        uint32_t u;
        float f;
    } x;
    x.u = bits;
    return x.f;
}

static inline uint16_t gt_f32_to_bf16(float value) {
    uint32_t u = gt_float_bits(value);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40u); /* quiet NaN */
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

static inline float gt_bf16_to_f32(uint16_t bits) { return gt_bits_float((uint32_t)bits << 16); }

static inline uint16_t gt_f32_to_f16(float value) {
    uint32_t u = gt_float_bits(value), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu, m, shift;
    if (a > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);  /* NaN */
    if (a >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* rounds to 65536 or more */
    if (a >= 0x38800000u) {                                  /* normal: rebias the exponent by 112 */
        a -= 0x38000000u;
        return (uint16_t)(sign | ((a + 0xfffu + ((a >> 13) & 1u)) >> 13));
    }
    if (a < 0x33000000u) return (uint16_t)sign; /* under half of the smallest subnormal */
    shift = 126u - (a >> 23);                   /* subnormal: count units of 2^-24 */
    m = (a & 0x7fffffu) | 0x800000u;
    return (uint16_t)(sign | ((m + ((1u << (shift - 1)) - 1u) + ((m >> shift) & 1u)) >> shift));
}

static inline float gt_f16_to_f32(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000u) << 16, e = (bits >> 10) & 31u, m = bits & 0x3ffu;
    if (e == 31u) return gt_bits_float(sign | 0x7f800000u | (m << 13));
    if (e == 0u) { /* zero or subnormal: m * 2^-24 is exact */
        float a = (float)m * (1.0f / 16777216.0f);
        return sign ? -a : a;
    }
    return gt_bits_float(sign | ((e + 112u) << 23) | (m << 13));
}

#ifdef __cplusplus
} /* extern "C" */
#endif
#endif /* GT_KERNELS_H */

/* ==== the rest is for the implementation, the CPU twins and the tests, not for users ============== */

#ifdef GT_KERNELS_IMPLEMENTATION
#define GT_CORE_IMPLEMENTATION
#define GT_WKV6_IMPLEMENTATION
#define GT_SSM_IMPLEMENTATION
#define GT_CONV1D_IMPLEMENTATION
#define GT_FUSED_IMPLEMENTATION
#endif
#if defined(GT_CORE_IMPLEMENTATION) || defined(GT_WKV6_IMPLEMENTATION) ||                             \
    defined(GT_SSM_IMPLEMENTATION) || defined(GT_CONV1D_IMPLEMENTATION) ||                            \
    defined(GT_FUSED_IMPLEMENTATION)
#ifndef GT_KERNELS_INTERNAL
#define GT_KERNELS_INTERNAL
#endif
#endif

#if defined(GT_KERNELS_INTERNAL) && !defined(GT_KERNELS_INTERNAL_H)
#define GT_KERNELS_INTERNAL_H

/* Each operator describes its argument struct once, as a table; gt_prepare reads it to fill in
 * defaults and to find every bad argument before anything is launched, for the GPU and for the CPU
 * twin alike.  The tests walk the same tables.
 *
 * A size is a letter; a tensor's shape is a word of letters: "BTHN".  A letter without a field (S:
 * states read, Q: states written, ...) is set by the operator's resolve function. */

#define gt_enter GT_SYMBOL(enter)
#define gt_fail GT_SYMBOL(fail)
#define gt_no_cuda GT_SYMBOL(no_cuda)
#define gt_check_range GT_SYMBOL(check_range)
#define gt_resolve_recurrent GT_SYMBOL(resolve_recurrent)
#define gt_resolve_packed GT_SYMBOL(resolve_packed)
#define gt_prepare GT_SYMBOL(prepare)
#define gt_view_of GT_SYMBOL(view_of)
#define gt_op_wkv6 GT_SYMBOL(op_wkv6)
#define gt_op_ssd GT_SYMBOL(op_ssd)
#define gt_op_selective_scan GT_SYMBOL(op_selective_scan)
#define gt_op_conv1d GT_SYMBOL(op_conv1d)
#define gt_op_rmsnorm_linear GT_SYMBOL(op_rmsnorm_linear)
#define gt_op_norm_mix GT_SYMBOL(op_norm_mix)
#define gt_op_norm_gate GT_SYMBOL(op_norm_gate)

/* A function for the host and for kernels. */
#ifdef __CUDACC__
#define GT_INLINE static __host__ __device__ inline
#else
#define GT_INLINE static inline
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum gt_pass { GT_FORWARD = 0, GT_BACKWARD = 1, GT_STEP = 2, GT_QUERY = 3 } gt_pass;
typedef enum gt_place { GT_HOST = 0, GT_DEVICE = 1 } gt_place;

typedef struct gt_tensor {
    const char *name;
    size_t offset;        /* of the pointer in the struct */
    size_t stride_offset; /* of its gt_stride ([M,*]: int64_t); 0 = always packed */
    const char *shape;    /* size letters, slowest first */
    char kind;            /* 'x' activations, 'w' their companion dtype, 'f' fp32, 'i' int32 */
    const char *use;      /* per pass forward, backward, step: '-' unused, 'I' required input, 'i'
                             optional input, 'O' required output, 'o' optional output, 'g' parameter
                             gradient (optional, accumulates), 's' updated in place, required */
    const char *may_equal; /* tensor that an output may equal exactly, or NULL */
} gt_tensor;

typedef struct gt_size {
    char letter;
    const char *name;
    size_t offset;
    int64_t min;
} gt_size;

typedef struct gt_dims { /* by letter: n['B' - 'A'] */
    int64_t n[26];
} gt_dims;

typedef struct gt_op {
    const char *name;
    size_t args_bytes;
    size_t dtype_offset, companion_offset; /* companion: of w_dtype or dt_dtype; 0 = none */
    const char *companion_name;
    size_t accumulate_offset;
    const gt_size *sizes;     /* ends with letter 0 */
    const gt_tensor *tensors; /* ends with name NULL */
    /* fills the operator's own defaults into *args, sets derived letters, checks its own fields */
    gt_status (*resolve)(void *args, gt_pass pass, gt_dims *dims);
} gt_op;

/* One tensor of one call: where its elements lie. */
typedef struct gt_view {
    char *data;
    int rank; /* without the indices of size 1 */
    int64_t size[4], stride[4]; /* strides in bytes */
    int64_t count;              /* elements */
    int element;                /* bytes of one */
} gt_view;

/* Names the public function that this thread is in, for gt_fail: "gt_" or "gt_ref_", operator, pass. */
GT_API void gt_enter(gt_place place, const char *op, gt_pass pass);

/* Records "<function>: <text>" as this thread's last error and returns `status`. */
GT_API gt_status gt_fail(gt_status status, const char *format, ...);

/* What every stub returns. */
GT_API gt_status gt_no_cuda(const gt_op *op, gt_pass pass);

/* Fails with `status` unless min <= value <= max. */
#define GT_MAX_SIZE ((int64_t)1 << 40)
GT_API gt_status gt_check_range(gt_status status, const char *field, int64_t value, int64_t min,
                                int64_t max);

/* The fields that the recurrent operators share: sets S (states read) and Q (states written), refuses
 * what is reserved or belongs to another pass.  gt_resolve_packed takes packed sequences, too, and
 * sets C and E, the lengths of cu_seqlens and seq_count: 0 if the call is not packed. */
typedef struct gt_recurrence {
    int64_t B, T, segments, seq_capacity, slot_capacity;
    int state_in_shared;
    const float *state_in, *state_out;
    const int32_t *cu_seqlens, *seq_count, *slots;
} gt_recurrence;
GT_API gt_status gt_resolve_recurrent(const gt_recurrence *fields, gt_pass pass, gt_dims *dims);
GT_API gt_status gt_resolve_packed(const gt_recurrence *fields, gt_pass pass, gt_dims *dims);

/* Copies *args to *filled, replaces every default by its value (sizes, dtypes, strides), checks all
 * of it for `pass`, and sets *dims.  GT_QUERY checks sizes and flags but no pointers. */
GT_API gt_status gt_prepare(const gt_op *op, gt_pass pass, gt_place place, const void *args,
                            void *filled, gt_dims *dims);

/* The view of one tensor in a prepared struct. */
GT_API gt_view gt_view_of(const gt_op *op, const gt_tensor *tensor, const void *filled,
                          const gt_dims *dims);

/* Every packed sequence is cut into chunks of `size` tokens, the last of them shorter.  In arrays
 * of one entry per chunk, chunk c of sequence s has place cu_seqlens[s] / size + s + c.  No two
 * chunks share a place and all places are below T / size + seq_capacity, because from s to s + 1
 * the sum cu_seqlens[s] / size + s grows by at least the number of chunks of s.  So the host, which
 * knows the capacities only, can size the arrays and start a block per place, and the block finds
 * by gt_chunk_at which chunk it has, if any. */
typedef struct gt_chunk {
    int64_t sequence;    /* -1 = none has this place */
    int64_t first, last; /* tokens first ... last-1 */
} gt_chunk;

GT_INLINE int64_t gt_chunk_places(int64_t T, int64_t seq_capacity, int64_t size) {
    return T / size + seq_capacity;
}

GT_INLINE int64_t gt_chunk_place(const int32_t *cu_seqlens, int64_t size, int64_t sequence,
                                 int64_t chunk) {
    return cu_seqlens[sequence] / size + sequence + chunk;
}

GT_INLINE gt_chunk gt_chunk_at(const int32_t *cu_seqlens, int64_t count, int64_t size,
                               int64_t place) {
    gt_chunk c = {-1, 0, 0};
    int64_t low = 0, high = count; /* the last sequence whose first place is at most `place` */
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (gt_chunk_place(cu_seqlens, size, middle, 0) <= place)
            low = middle;
        else
            high = middle;
    }
    if (low == count) return c;
    c.first = cu_seqlens[low] + (place - gt_chunk_place(cu_seqlens, size, low, 0)) * size;
    if (c.first >= cu_seqlens[low + 1]) return c;
    c.sequence = low;
    c.last = c.first + size < cu_seqlens[low + 1] ? c.first + size : cu_seqlens[low + 1];
    return c;
}

GT_API const gt_op *gt_op_wkv6(void);
GT_API const gt_op *gt_op_ssd(void);
GT_API const gt_op *gt_op_selective_scan(void);
GT_API const gt_op *gt_op_conv1d(void);
GT_API const gt_op *gt_op_rmsnorm_linear(void);
GT_API const gt_op *gt_op_norm_mix(void);
GT_API const gt_op *gt_op_norm_gate(void);

#ifdef __cplusplus
}
#endif
#endif /* GT_KERNELS_INTERNAL_H */

/* ---- core: status, errors, argument checks ----------------------------------------------------- */

#if defined(GT_CORE_IMPLEMENTATION) && !defined(GT_CORE_IMPLEMENTED)
#define GT_CORE_IMPLEMENTED

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#if defined(__cplusplus)
#define GT_THREAD_LOCAL thread_local
#elif defined(_MSC_VER)
#define GT_THREAD_LOCAL __declspec(thread)
#elif defined(__STDC_VERSION__) && __STDC_VERSION__ >= 201112L
#define GT_THREAD_LOCAL _Thread_local
#else
#define GT_THREAD_LOCAL __thread
#endif

#ifdef __cplusplus
extern "C" {
#endif

static GT_THREAD_LOCAL char gt_function_name[64];
static GT_THREAD_LOCAL char gt_error_text[512];

GT_API int gt_version(void) { return GT_VERSION; }

GT_API const char *gt_last_error(void) { return gt_error_text; }

GT_API const char *gt_status_string(gt_status status) {
    switch (status) {
    case GT_OK: return "success";
    case GT_ERROR_NULL: return "a required pointer is NULL";
    case GT_ERROR_SIZE: return "a size is out of range or inconsistent";
    case GT_ERROR_STRIDE: return "a stride is out of range";
    case GT_ERROR_DTYPE: return "a dtype is not allowed here";
    case GT_ERROR_VALUE: return "a flag or number is out of range";
    case GT_ERROR_ALIGNMENT: return "a pointer is not aligned to its element size";
    case GT_ERROR_OVERLAP: return "an output overlaps another tensor";
    case GT_ERROR_UNSUPPORTED: return "valid, but not supported by this version";
    case GT_ERROR_NO_CUDA: return "the implementation was built without CUDA";
    case GT_ERROR_ARCH: return "this build has no kernel for the device";
    case GT_ERROR_NO_DEVICE: return "no CUDA device or no usable driver";
    case GT_ERROR_WORKSPACE: return "workspace is missing or too small";
    case GT_ERROR_SAVED: return "saved is too small";
    case GT_ERROR_MEMORY: return "out of host memory";
    case GT_ERROR_CUDA: return "a CUDA call failed";
    }
    return "not a status of gt_kernels";
}

GT_API void gt_enter(gt_place place, const char *op, gt_pass pass) {
    static const char *const passes[] = {"forward", "backward", "step", "workspace"};
    snprintf(gt_function_name, sizeof gt_function_name, "gt_%s%s_%s",
             place == GT_HOST ? "ref_" : "", op, passes[pass]);
}

GT_API gt_status gt_fail(gt_status status, const char *format, ...) {
    int used = snprintf(gt_error_text, sizeof gt_error_text, "%s: ", gt_function_name);
    va_list list;
    va_start(list, format);
    vsnprintf(gt_error_text + used, sizeof gt_error_text - (size_t)used, format, list);
    va_end(list);
    return status;
}

GT_API gt_status gt_no_cuda(const gt_op *op, gt_pass pass) {
    gt_enter(GT_DEVICE, op->name, pass);
    return gt_fail(GT_ERROR_NO_CUDA, "built without CUDA: compile the file that defines "
                                     "GT_KERNELS_IMPLEMENTATION with nvcc");
}

GT_API gt_status gt_check_range(gt_status status, const char *field, int64_t value, int64_t min,
                                int64_t max) {
    if (value >= min && value <= max) return GT_OK;
    if (max == GT_MAX_SIZE && value < min)
        return gt_fail(status, "%s = %lld: must be at least %lld", field, (long long)value,
                       (long long)min);
    return gt_fail(status, "%s = %lld: must be %lld to %lld", field, (long long)value,
                   (long long)min, (long long)max);
}

/* Of a batch. */
static gt_status gt_resolve_states(const gt_recurrence *f, gt_pass pass, gt_dims *dims) {
    int64_t *S = &dims->n['S' - 'A'], *Q = &dims->n['Q' - 'A'];
    gt_status status;
    if ((status = gt_check_range(GT_ERROR_VALUE, "segments", f->segments, 0, GT_MAX_SIZE)) ||
        (status = gt_check_range(GT_ERROR_VALUE, "state_in_shared", f->state_in_shared, 0, 1)))
        return status;
    *Q = f->B;
    *S = f->state_in_shared ? 1 : f->B;
    if (pass == GT_QUERY) return GT_OK;
    if (pass != GT_STEP) {
        if (f->slots || f->slot_capacity)
            return gt_fail(GT_ERROR_VALUE, "%s is set: only the step function uses slots",
                           f->slots ? "slots" : "slot_capacity");
        return GT_OK;
    }
    if (f->state_in_shared)
        return gt_fail(GT_ERROR_VALUE, "state_in_shared = 1: a step updates a state per element");
    if (f->state_in && f->state_in != f->state_out)
        return gt_fail(GT_ERROR_VALUE, "state_in = %p: must be NULL or equal state_out, which is "
                                       "updated in place",
                       (const void *)f->state_in);
    if ((status = gt_check_range(GT_ERROR_SIZE, "T", f->T, 0, 16))) return status;
    *Q = f->slot_capacity ? f->slot_capacity : f->B;
    return gt_check_range(GT_ERROR_SIZE, "slot_capacity", *Q, f->slots ? 0 : f->B, GT_MAX_SIZE);
}

static const char *gt_packed_field(const gt_recurrence *f) {
    return f->cu_seqlens ? "cu_seqlens" : f->seq_count ? "seq_count" : "seq_capacity";
}

GT_API gt_status gt_resolve_recurrent(const gt_recurrence *f, gt_pass pass, gt_dims *dims) {
    if (f->cu_seqlens || f->seq_count || f->seq_capacity)
        return gt_fail(GT_ERROR_UNSUPPORTED,
                       "%s is set: packed sequences are reserved, not yet implemented",
                       gt_packed_field(f));
    return gt_resolve_states(f, pass, dims);
}

GT_API gt_status gt_resolve_packed(const gt_recurrence *f, gt_pass pass, gt_dims *dims) {
    gt_status status =
        gt_check_range(GT_ERROR_SIZE, "seq_capacity", f->seq_capacity, 0, INT32_MAX - 1);
    if (status != GT_OK) return status;
    if (f->seq_capacity == 0) {
        if (f->cu_seqlens || f->seq_count)
            return gt_fail(GT_ERROR_SIZE, "seq_capacity = 0: %s is set, so it must be at least 1",
                           gt_packed_field(f));
        return gt_resolve_states(f, pass, dims);
    }
    if (pass == GT_STEP)
        return gt_fail(GT_ERROR_VALUE, "seq_capacity = %lld: a step has no packed sequences",
                       (long long)f->seq_capacity);
    if (f->B != 1)
        return gt_fail(GT_ERROR_SIZE, "B = %lld: must be 1 with packed sequences", (long long)f->B);
    if (f->T > INT32_MAX)
        return gt_fail(GT_ERROR_SIZE, "T = %lld: at most %lld tokens with packed sequences",
                       (long long)f->T, (long long)INT32_MAX);
    if (pass != GT_QUERY && !f->cu_seqlens)
        return gt_fail(GT_ERROR_NULL, "cu_seqlens is NULL, but seq_capacity = %lld",
                       (long long)f->seq_capacity);
    if ((status = gt_resolve_states(f, pass, dims)) != GT_OK) return status;
    dims->n['Q' - 'A'] = f->seq_capacity;
    dims->n['S' - 'A'] = f->state_in_shared ? 1 : f->seq_capacity;
    dims->n['C' - 'A'] = f->seq_capacity + 1;
    dims->n['E' - 'A'] = 1;
    return GT_OK;
}

/* ---- views and overlap ---- */

static int gt_used(const gt_tensor *t, gt_pass pass) {
    return pass <= GT_STEP && t->use[pass] != '-';
}

static int gt_written(const gt_tensor *t, gt_pass pass) {
    return t->use[pass] == 'O' || t->use[pass] == 'o' || t->use[pass] == 'g' ||
           t->use[pass] == 's';
}

static void *gt_pointer(const gt_tensor *t, const void *filled) {
    void *p;
    memcpy(&p, (const char *)filled + t->offset, sizeof p);
    return p;
}

static int gt_element_size(const gt_op *op, const gt_tensor *t, const void *filled) {
    gt_dtype dtype;
    if (t->kind == 'f' || t->kind == 'i') return 4;
    memcpy(&dtype, (const char *)filled + (t->kind == 'w' ? op->companion_offset : op->dtype_offset),
           sizeof dtype);
    return dtype == GT_F32 ? 4 : 2;
}

/* Strides of all indices in elements, slowest first, from the filled struct. */
static void gt_element_strides(const gt_tensor *t, const void *filled, const int64_t *size, int rank,
                               int64_t *stride) {
    const char *at = (const char *)filled + t->stride_offset;
    int64_t packed = 1;
    for (int i = rank - 1; i >= 0; i--) {
        stride[i] = packed;
        packed *= size[i];
    }
    if (!t->stride_offset) return;
    if (t->shape[0] == 'M') {
        memcpy(stride, at, sizeof stride[0]);
    } else {
        gt_stride s;
        memcpy(&s, at, sizeof s);
        stride[0] = s.b;
        stride[1] = s.t;
        stride[2] = s.h;
    }
}

GT_API gt_view gt_view_of(const gt_op *op, const gt_tensor *t, const void *filled,
                          const gt_dims *dims) {
    gt_view v;
    int rank = (int)strlen(t->shape);
    int64_t size[4], stride[4];
    memset(&v, 0, sizeof v);
    v.data = (char *)gt_pointer(t, filled);
    v.element = gt_element_size(op, t, filled);
    v.count = 1;
    for (int i = 0; i < rank; i++) {
        size[i] = dims->n[t->shape[i] - 'A'];
        v.count *= size[i];
    }
    gt_element_strides(t, filled, size, rank, stride);
    for (int i = 0; i < rank; i++) {
        if (size[i] == 1) continue;
        v.size[v.rank] = size[i];
        v.stride[v.rank++] = stride[i] * v.element;
    }
    return v;
}

/* Bytes from the first to the end of the last element, over the indices with stride < limit. */
static int64_t gt_extent(const gt_view *v, int64_t limit) {
    int64_t bytes = v->element;
    for (int i = 0; i < v->rank; i++)
        if (v->stride[i] < limit) bytes += (v->size[i] - 1) * v->stride[i];
    return bytes;
}

static int gt_multiples(const gt_view *v, int64_t m) {
    for (int i = 0; i < v->rank; i++)
        if (v->stride[i] >= m && v->stride[i] % m) return 0;
    return 1;
}

/* Whether two elements of one tensor share memory, judged for nested strides: sorted by stride, each
 * index must step over all that the smaller ones reach. */
static int gt_overlaps_itself(const gt_view *v) {
    for (int i = 0; i < v->rank; i++) {
        if (v->stride[i] < gt_extent(v, v->stride[i])) return 1;
        for (int j = 0; j < i; j++)
            if (v->stride[i] == v->stride[j]) return 1;
    }
    return 0;
}

/* Columns of one buffer: for some row length m, a stride of `a`, both reach only a part of a row, and
 * the parts do not meet. */
static int gt_interleaved(const gt_view *a, const gt_view *b) {
    uintptr_t pa = (uintptr_t)a->data, pb = (uintptr_t)b->data;
    for (int i = 0; i < a->rank; i++) {
        int64_t m = a->stride[i], in_row_a, in_row_b, d;
        if (!gt_multiples(a, m) || !gt_multiples(b, m)) continue;
        in_row_a = gt_extent(a, m);
        in_row_b = gt_extent(b, m);
        d = pb >= pa ? (int64_t)((pb - pa) % (uint64_t)m)
                     : (m - (int64_t)((pa - pb) % (uint64_t)m)) % m;
        if (d >= in_row_a && d + in_row_b <= m) return 1;
    }
    return 0;
}

static int gt_disjoint(const gt_view *a, const gt_view *b) {
    uintptr_t pa = (uintptr_t)a->data, pb = (uintptr_t)b->data;
    return pa + (uint64_t)gt_extent(a, INT64_MAX) <= pb ||
           pb + (uint64_t)gt_extent(b, INT64_MAX) <= pa || gt_interleaved(a, b) ||
           gt_interleaved(b, a);
}

static int gt_same_view(const gt_view *a, const gt_view *b) {
    return a->data == b->data && a->element == b->element && a->rank == b->rank &&
           !memcmp(a->size, b->size, sizeof a->size) &&
           !memcmp(a->stride, b->stride, sizeof a->stride);
}

/* ---- the steps of gt_prepare ---- */

static gt_status gt_fill_dtypes(const gt_op *op, char *filled) {
    gt_dtype dtype, companion;
    memcpy(&dtype, filled + op->dtype_offset, sizeof dtype);
    if ((int)dtype < GT_DTYPE_DEFAULT || (int)dtype > GT_F16)
        return gt_fail(GT_ERROR_DTYPE, "dtype = %d: must be GT_F32, GT_BF16 or GT_F16", (int)dtype);
    if (dtype == GT_DTYPE_DEFAULT) dtype = GT_F32;
    memcpy(filled + op->dtype_offset, &dtype, sizeof dtype);
    if (!op->companion_offset) return GT_OK;
    memcpy(&companion, filled + op->companion_offset, sizeof companion);
    if (companion == GT_DTYPE_DEFAULT) companion = dtype;
    if (companion != dtype && companion != GT_F32)
        return gt_fail(GT_ERROR_DTYPE, "%s = %d: must be 0, GT_F32 or equal dtype (%d)",
                       op->companion_name, (int)companion, (int)dtype);
    memcpy(filled + op->companion_offset, &companion, sizeof companion);
    return GT_OK;
}

static gt_status gt_fill_sizes(const gt_op *op, const char *filled, gt_dims *dims) {
    memset(dims, 0, sizeof *dims);
    for (const gt_size *s = op->sizes; s->letter; s++) {
        int64_t n;
        gt_status status;
        memcpy(&n, filled + s->offset, sizeof n);
        status = gt_check_range(GT_ERROR_SIZE, s->name, n, s->min, GT_MAX_SIZE);
        if (status != GT_OK) return status;
        dims->n[s->letter - 'A'] = n;
    }
    return GT_OK;
}

static int64_t gt_larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* Every tensor must be addressable with 64-bit byte offsets.  A size of 0 counts as 1, so that products
 * of the others do not overflow either. */
static gt_status gt_check_shape(const gt_tensor *t, const gt_dims *dims) {
    int64_t count = 1;
    for (const char *c = t->shape; *c; c++) {
        int64_t n = gt_larger(dims->n[*c - 'A'], 1);
        if (count > ((int64_t)1 << 58) / n)
            return gt_fail(GT_ERROR_SIZE, "%s: more than 2^58 elements", t->name);
        count *= n;
    }
    return GT_OK;
}

static gt_status gt_bad_stride(const gt_tensor *t, const void *args, const char *why) {
    const char *at = (const char *)args + t->stride_offset;
    gt_stride s;
    if (t->shape[0] == 'M') {
        int64_t row;
        memcpy(&row, at, sizeof row);
        return gt_fail(GT_ERROR_STRIDE, "%s_stride = %lld: %s", t->name, (long long)row, why);
    }
    memcpy(&s, at, sizeof s);
    return gt_fail(GT_ERROR_STRIDE, "%s_stride = {%lld, %lld, %lld}: %s", t->name, (long long)s.b,
                   (long long)s.t, (long long)s.h, why);
}

/* Replaces zero strides by their defaults, in place.  No index may span more than 2^56 elements, so
 * that sums of byte offsets fit in 64 bits. */
static gt_status gt_fill_stride(const gt_tensor *t, char *filled, const gt_dims *dims) {
    const int64_t limit = (int64_t)1 << 56;
    char *at = filled + t->stride_offset;
    const char *shape = t->shape;
    if (shape[0] == 'M') {
        int64_t row;
        memcpy(&row, at, sizeof row);
        if (row < 0) return gt_bad_stride(t, filled, "must not be negative");
        if (row == 0) row = dims->n[shape[1] - 'A'];
        if (row > limit / gt_larger(dims->n['M' - 'A'], 1))
            return gt_bad_stride(t, filled, "spans more than 2^56 elements");
        memcpy(at, &row, sizeof row);
    } else {
        int64_t B = gt_larger(dims->n[shape[0] - 'A'], 1), T = gt_larger(dims->n[shape[1] - 'A'], 1);
        int64_t H = gt_larger(dims->n[shape[2] - 'A'], 1);
        gt_stride s;
        memcpy(&s, at, sizeof s);
        if (s.b < 0 || s.t < 0 || s.h < 0)
            return gt_bad_stride(t, filled, "must not be negative");
        if (s.h == 0) s.h = shape[3] ? dims->n[shape[3] - 'A'] : 1;
        if (s.t == 0 && s.h <= limit / H) s.t = H * s.h;
        if (s.b == 0 && s.h <= limit / H && s.t <= limit / T) s.b = gt_larger(T * s.t, H * s.h);
        if (s.h > limit / H || s.t > limit / T || s.b > limit / B)
            return gt_bad_stride(t, filled, "spans more than 2^56 elements");
        memcpy(at, &s, sizeof s);
    }
    return GT_OK;
}

static gt_status gt_check_pointer(const gt_op *op, const gt_tensor *t, gt_pass pass,
                                  const void *filled, const gt_dims *dims) {
    gt_view v = gt_view_of(op, t, filled, dims);
    char use = t->use[pass];
    if (v.count == 0) return GT_OK;
    if (!v.data)
        return use == 'I' || use == 'O' || use == 's' ? gt_fail(GT_ERROR_NULL, "%s is NULL", t->name)
                                                      : GT_OK;
    if ((uintptr_t)v.data % (uintptr_t)v.element)
        return gt_fail(GT_ERROR_ALIGNMENT, "%s = %p: not aligned to its %d-byte elements", t->name,
                       (void *)v.data, v.element);
    if (gt_written(t, pass) && gt_overlaps_itself(&v))
        return gt_bad_stride(t, filled, "elements of this output overlap");
    return GT_OK;
}

static gt_status gt_check_overlap(const gt_op *op, const gt_tensor *out, gt_pass pass,
                                  const void *filled, const gt_dims *dims) {
    gt_view v = gt_view_of(op, out, filled, dims);
    if (!v.data || v.count == 0) return GT_OK;
    for (const gt_tensor *t = op->tensors; t->name; t++) {
        gt_view other = gt_view_of(op, t, filled, dims);
        if (t == out || !gt_used(t, pass) || !other.data || other.count == 0) continue;
        if (out->may_equal && !strcmp(out->may_equal, t->name) && gt_same_view(&v, &other)) continue;
        if (!gt_disjoint(&v, &other))
            return gt_fail(GT_ERROR_OVERLAP, "%s overlaps %s", out->name, t->name);
    }
    return GT_OK;
}

GT_API gt_status gt_prepare(const gt_op *op, gt_pass pass, gt_place place, const void *args,
                            void *filled, gt_dims *dims) {
    const gt_tensor *t;
    gt_status status;
    int accumulate;
    gt_enter(place, op->name, pass);
    if (!args) return gt_fail(GT_ERROR_NULL, "args is NULL");
    memcpy(filled, args, op->args_bytes);
    memcpy(&accumulate, (char *)filled + op->accumulate_offset, sizeof accumulate);
    if ((status = gt_fill_dtypes(op, (char *)filled)) != GT_OK) return status;
    if ((status = gt_fill_sizes(op, (char *)filled, dims)) != GT_OK) return status;
    status = gt_check_range(GT_ERROR_VALUE, "accumulate", accumulate, 0, 1);
    if (status != GT_OK) return status;
    if ((status = op->resolve(filled, pass, dims)) != GT_OK) return status;
    for (t = op->tensors; t->name; t++) {
        if ((status = gt_check_shape(t, dims)) != GT_OK) return status;
        if (t->stride_offset && (status = gt_fill_stride(t, (char *)filled, dims)) != GT_OK)
            return status;
    }
    for (t = op->tensors; t->name; t++)
        if (gt_used(t, pass) && (status = gt_check_pointer(op, t, pass, filled, dims)) != GT_OK)
            return status;
    for (t = op->tensors; t->name; t++)
        if (gt_used(t, pass) && gt_written(t, pass) &&
            (status = gt_check_overlap(op, t, pass, filled, dims)) != GT_OK)
            return status;
    return GT_OK;
}

#if !defined(__CUDACC__) && !defined(GT_EMU)
GT_API gt_status gt_device_supported(int device) {
    (void)device;
    snprintf(gt_function_name, sizeof gt_function_name, "gt_device_supported");
    return gt_fail(GT_ERROR_NO_CUDA, "built without CUDA");
}
#endif

#ifdef __cplusplus
}
#endif

#if defined(__CUDACC__) || defined(GT_EMU)
#include "gt_common.cuh"

extern "C" {
GT_API gt_status gt_device_supported(int device) {
    snprintf(gt_function_name, sizeof gt_function_name, "gt_device_supported");
    return gt::device_supported(device);
}
}
#endif
#endif /* GT_CORE_IMPLEMENTATION */

/* ---- operators ----------------------------------------------------------------------------------- */

#ifdef GT_WKV6_IMPLEMENTATION
#include "gt_wkv6.cuh"
#endif
#ifdef GT_SSM_IMPLEMENTATION
#include "gt_ssm.cuh"
#endif
#ifdef GT_CONV1D_IMPLEMENTATION
#include "gt_conv1d.cuh"
#endif
#ifdef GT_FUSED_IMPLEMENTATION
#include "gt_fused.cuh"
#endif
