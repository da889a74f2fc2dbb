/* gt_kernels 0.2.0 - CUDA kernels for RWKV-6 / Mamba-2 hybrid models, forward and backward.  Each
 * operator has a CPU twin, a plain C function that states its mathematics; tests compare the kernels with the twin.
 * Header-only (this file, the .cuh files and the folder gt/).  MIT: see LICENSE.  It needs only the CUDA Toolkit.
 *
 *   Use it from C (C99 or newer) or C++ (C++11 or newer), no CUDA header needed:
 *
 *       #include "gt_kernels.h"
 *       gt_wkv6_args a = {.B = 8, .T = 512, .H = 4, .N = 64, .dtype = GT_BF16,
 *                         .r = r, .k = k, .w = w, .v = v, .u = u, .y = y};
 *       if (gt_wkv6_forward(&a, stream) != GT_OK) puts(gt_last_error());
 *
 *   Compile the kernels in exactly one file of the program, say gt_impl.cu:
 *
 *       #define GT_KERNELS_IMPLEMENTATION
 *       #include "gt_kernels.h"                          nvcc -std=c++17 -c gt_impl.cu
 *
 *   The same two lines in a .c file compile stubs, which return GT_ERROR_NO_CUDA.  So the same program also links on a
 *   machine without nvcc.  The CPU twins are the functions gt_ref_...: add reference/gt_*.c to use them.
 *   To compile in parallel, use several files instead of the one above.  Define GT_CORE_IMPLEMENTATION in the first,
 *   and one of GT_WKV6_IMPLEMENTATION, GT_SSM_, GT_CONV1D_, GT_WKV4_ and GT_FUSED_IMPLEMENTATION in each other file.
 *
 *   Less to compile: kernels for one dtype or head size, such as those for tensor cores, take most of the compile time.
 *   Macros leave them out; define the macros where the implementation is compiled.  GT_WITHOUT_F32, GT_WITHOUT_BF16 and
 *   GT_WITHOUT_F16 leave out kernels for activations of that dtype.  GT_WITHOUT_N32, _N64 and _N128 leave out kernels
 *   of wkv6 for heads of 32, 64 or 128, and of ssd, conv_ssd and selective_scan for N up to 32, 33 to 64, and above 64.
 *   A call whose kernels are left out runs the kernels for any size, which are slower.  selective_scan, conv1d and wkv4
 *   lack kernels for any size: for a dtype that is left out they return GT_ERROR_UNSUPPORTED.  Norms keep all kernels.
 *
 *   | operator       | passes                   | what it is                                      |
 *   |----------------|--------------------------|-------------------------------------------------|
 *   | wkv6           | forward, backward, step  | RWKV-6 time mixing                              |
 *   | ssd            | forward, backward, step  | Mamba-2 state space duality                     |
 *   | selective_scan | forward, backward, step  | Mamba-1 scan                                    |
 *   | conv1d         | forward, backward, step  | causal depthwise convolution, width 2 to 4      |
 *   | rmsnorm_linear | forward, backward, step  | RMSNorm or LayerNorm, then a projection         |
 *   | norm_mix       | forward, backward        | residual + g_a RMSNorm(a) + g_b RMSNorm(b)      |
 *   | norm_gate      | forward, backward        | gated RMSNorm, group norm + gate                |
 *   | add_norm       | forward, backward        | x + residual, then RMSNorm or LayerNorm         |
 *   | wkv_ssm        | forward, backward, step  | wkv6 and ssd of one hybrid block, one call      |
 *   | conv_ssd       | forward, backward, step  | conv1d with SiLU, then ssd, as in Mamba-2       |
 *   | wkv4           | forward, backward, step  | RWKV-4 time mixing, with log-sum-exp            |
 *   wkv6 and ssd can also process one sequence in independent pieces: gt_OP_segment, gt_OP_join and their backward.
 *
 * CONVENTIONS, true for every function
 *   Arguments   all functions of an operator take the same struct.  A field that is 0 has the default stated beside it.
 *               Pointers are device memory for gt_OP_..., host memory for gt_ref_OP_... .
 *   Sizes       B batch, T time, H heads, N key or state size, V value size, P head size, G groups,
 *               D channels, W conv width, M rows, O outputs.  Each is at most 2^40.  No tensor has more than
 *               2^48 elements.  A call with tokens or rows checks this for every tensor of the operator, even for one
 *               that is NULL.  States have a row for each of seq_capacity sequences, so seq_capacity times the size of
 *               a state is limited, too.  No index spans more than 2^56 elements by its stride.
 *               B, T and M may be 0: then a call copies the states, and gradients are 0.  A call of this kind, and
 *               gt_OP_join, check the 2^48 only for tensors that are given or required.
 *   dtype       type of the activations: GT_F32 (default), GT_BF16, GT_F16.  w and dt (with dw and ddt) may be fp32
 *               beside 16-bit activations.  States, all parameters except a projection weight, and all parameter
 *               gradients are fp32.  But a step also takes 16-bit states and parameters (state_dtype,
 *               parameter_dtype), and some steps take states of int8.  Forward of wkv6, ssd, selective_scan, conv1d
 *               and conv_ssd takes 16-bit states.  Kernels accumulate sums in fp32.
 *   Layout      packed by default, in the order of the brackets, last index fastest: [B,T,H,N].  A gt_stride, in
 *               elements, describes any other layout, such as [B,H,T,N] or a slice of a wider projection.  Pointers and
 *               rows must be aligned to their element; calls are faster if they are aligned to 16 bytes.
 *   NULL        tensors without elements may be NULL.  An optional input that is NULL has the constant value stated
 *               beside it.  An output or gradient that is NULL is not computed.
 *   Outputs     are overwritten.  With accumulate = 1, parameter gradients (marked "accumulates") are added to instead.
 *               An output must not overlap an input or another output, unless "may equal" is stated.  Slices that
 *               interleave in one buffer, with rows of the same length, do not overlap.
 *   saved       optional buffer that forward fills and backward reads, which saves time.  Its contents are opaque.
 *               gt_OP_workspace gives its size.  Pass it to both forward and backward, or to neither.
 *   workspace   scratch memory of one call, of any alignment.  Its contents are undefined before and after the call.
 *               gt_OP_workspace gives an upper bound, from sizes, strides, flags, the alignment of the pointers and
 *               the current device.  A pointer that is still NULL counts as aligned.
 *   segments    number of parts of the time axis that are computed in parallel.  0 = chosen by sizes and device alone.
 *               With a fixed number, the result of a batch element or packed sequence depends neither on B nor on its
 *               neighbours.  Packed sequences are cut into at most 2^31 / seq_capacity segments.
 *               Forward may take a sequence in several calls, one for each part of it.  With segments = 1 and on the
 *               same device, the results then equal a single call bit for bit.  Three conditions hold for the parts.
 *               Each part but the last has a multiple of 128 tokens, each starts from the fp32 state of the part
 *               before, and each has the alignment of the whole.  Operators: wkv6 ssd selective_scan conv1d conv_ssd.
 *   cu_seqlens  packed sequences: one call for sequences of different lengths, without padding.  See gt_wkv6_args.
 *   Errors      are returned as gt_status; gt_last_error() names function, field and value.  A call checks its
 *               arguments before it launches or writes anything.  The library never prints, exits, throws, allocates
 *               device memory or synchronises, and it uses no other stream than the caller's.  It neither clears nor
 *               reports CUDA errors that were pending before the call.
 *   Streams     a call enqueues its work on the given stream.  Every function except gt_OP_workspace may be called
 *               during a stream capture, even as the first call of the process.
 *   Threads     all functions may be called from several threads and on several devices at once.
 *   Results     repeat bit for bit on the same device and library version; no float atomics.
 *
 * NON-FINITE NUMBERS: how far a NaN or infinity in an input spreads
 *   The twins compute the formulas: a NaN or infinity spoils every output that depends on it, and no other.  The
 *   kernels compute chunks of tokens by matrix products.  A product has a 0 where a formula has no term, and 0 times
 *   NaN is NaN.  So in the kernels the number also spoils the rest of its own chunk, but no other chunk.  Sizes:
 *       operator         forward            backward, dstate_in included
 *       wkv6             16 tokens          64 tokens
 *       ssd, conv_ssd    64 tokens          64 tokens
 *       wkv_ssm          as wkv6 and ssd    as wkv6 and ssd
 *       all others       as the twins       as the twins
 *   Chunks   are counted from the first token of a sequence, or of a piece in gt_OP_segment.  Forward may spoil y from
 *            the chunk's first token on; backward may spoil the gradients of all tokens of the chunk.
 *            In conv_ssd the convolution first spreads a number at token t of xBC to the tokens t ... t+W-1, also dxBC.
 *   Spoilt   outputs are NaN, infinite, or finite and wrong.  Where the twins spoil one channel of a token and head, or
 *            one channel of a state, the kernels may spoil all channels.  In `mixed`, a number of ssd has ssd's heads.
 *   Sums     such as parameter gradients are spoilt for the head, group or channel of the number.
 *   Never    spoilt: other batch elements, packed sequences and rows, and heads that do not share the number.  All
 *            heads of a group share B and C, and dB and dC are sums over these heads.
 *   Hidden   a NaN of an input makes a kernel's output NaN or infinite wherever it makes the twin's so.  One exception:
 *            where a decay becomes 0 in fp32, kernels may drop a NaN before that token.  The twins compute 0 NaN there.
 *   Large    kernels of ssd, wkv_ssm and conv_ssd may turn an infinite dt into a finite number above 10^30, and in fp32
 *            any infinity: see gt_ssd_args. */
#ifndef GT_KERNELS_H
#define GT_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#define GT_VERSION_MAJOR 0
#define GT_VERSION_MINOR 2
#define GT_VERSION_PATCH 0
#define GT_VERSION (GT_VERSION_MAJOR * 10000 + GT_VERSION_MINOR * 100 + GT_VERSION_PATCH)

/* Linkage of every function.  The default is hidden, so that two libraries of one process can each embed a copy.
 * Define GT_API yourself to export the functions, or as `static` to use them in only one file.  GT_REF_API does the
 * same for the CPU twins, which have their own source files. */
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

/* A declaration with that linkage.  `unused` avoids warnings if GT_API is static and a program calls few functions. */
#if defined(__GNUC__)
#define GT_FUNCTION __attribute__((unused)) GT_API
#define GT_REF_FUNCTION __attribute__((unused)) GT_REF_API
#else
#define GT_FUNCTION GT_API
#define GT_REF_FUNCTION GT_REF_API
#endif

/* Linker symbols contain the version.  So a program and an implementation that were built from different headers do
 * not link ("undefined reference to gt_wkv6_forward_v0_2_0"); otherwise they would misread each other's structs.
 * Source code uses the plain names. */
#define GT_SYMBOL(name) gt_##name##_v0_2_0
#define gt_version GT_SYMBOL(version)
#define gt_status_string GT_SYMBOL(status_string)
#define gt_last_error GT_SYMBOL(last_error)
#define gt_device_supported GT_SYMBOL(device_supported)
#define gt_quantize_int8 GT_SYMBOL(quantize_int8)
#define gt_int8_states_args_size GT_SYMBOL(int8_states_args_size)
#define gt_quantize_states GT_SYMBOL(quantize_states)
#define gt_dequantize_states GT_SYMBOL(dequantize_states)
#define gt_ref_quantize_states GT_SYMBOL(ref_quantize_states)
#define gt_ref_dequantize_states GT_SYMBOL(ref_dequantize_states)
#define gt_wkv6_args_size GT_SYMBOL(wkv6_args_size)
#define gt_wkv6_workspace GT_SYMBOL(wkv6_workspace)
#define gt_wkv6_path GT_SYMBOL(wkv6_path)
#define gt_wkv6_forward GT_SYMBOL(wkv6_forward)
#define gt_wkv6_backward GT_SYMBOL(wkv6_backward)
#define gt_wkv6_step GT_SYMBOL(wkv6_step)
#define gt_wkv6_segment GT_SYMBOL(wkv6_segment)
#define gt_wkv6_segment_backward GT_SYMBOL(wkv6_segment_backward)
#define gt_wkv6_join GT_SYMBOL(wkv6_join)
#define gt_wkv6_join_backward GT_SYMBOL(wkv6_join_backward)
#define gt_ssd_args_size GT_SYMBOL(ssd_args_size)
#define gt_ssd_workspace GT_SYMBOL(ssd_workspace)
#define gt_ssd_path GT_SYMBOL(ssd_path)
#define gt_ssd_forward GT_SYMBOL(ssd_forward)
#define gt_ssd_backward GT_SYMBOL(ssd_backward)
#define gt_ssd_step GT_SYMBOL(ssd_step)
#define gt_ssd_segment GT_SYMBOL(ssd_segment)
#define gt_ssd_segment_backward GT_SYMBOL(ssd_segment_backward)
#define gt_ssd_join GT_SYMBOL(ssd_join)
#define gt_ssd_join_backward GT_SYMBOL(ssd_join_backward)
#define gt_selective_scan_args_size GT_SYMBOL(selective_scan_args_size)
#define gt_selective_scan_workspace GT_SYMBOL(selective_scan_workspace)
#define gt_selective_scan_path GT_SYMBOL(selective_scan_path)
#define gt_selective_scan_forward GT_SYMBOL(selective_scan_forward)
#define gt_selective_scan_backward GT_SYMBOL(selective_scan_backward)
#define gt_selective_scan_step GT_SYMBOL(selective_scan_step)
#define gt_conv1d_args_size GT_SYMBOL(conv1d_args_size)
#define gt_conv1d_workspace GT_SYMBOL(conv1d_workspace)
#define gt_conv1d_path GT_SYMBOL(conv1d_path)
#define gt_conv1d_forward GT_SYMBOL(conv1d_forward)
#define gt_conv1d_backward GT_SYMBOL(conv1d_backward)
#define gt_conv1d_step GT_SYMBOL(conv1d_step)
#define gt_rmsnorm_linear_args_size GT_SYMBOL(rmsnorm_linear_args_size)
#define gt_rmsnorm_linear_workspace GT_SYMBOL(rmsnorm_linear_workspace)
#define gt_rmsnorm_linear_path GT_SYMBOL(rmsnorm_linear_path)
#define gt_rmsnorm_linear_forward GT_SYMBOL(rmsnorm_linear_forward)
#define gt_rmsnorm_linear_backward GT_SYMBOL(rmsnorm_linear_backward)
#define gt_rmsnorm_linear_step GT_SYMBOL(rmsnorm_linear_step)
#define gt_norm_mix_args_size GT_SYMBOL(norm_mix_args_size)
#define gt_norm_mix_workspace GT_SYMBOL(norm_mix_workspace)
#define gt_norm_mix_path GT_SYMBOL(norm_mix_path)
#define gt_norm_mix_forward GT_SYMBOL(norm_mix_forward)
#define gt_norm_mix_backward GT_SYMBOL(norm_mix_backward)
#define gt_norm_gate_args_size GT_SYMBOL(norm_gate_args_size)
#define gt_norm_gate_workspace GT_SYMBOL(norm_gate_workspace)
#define gt_norm_gate_path GT_SYMBOL(norm_gate_path)
#define gt_norm_gate_forward GT_SYMBOL(norm_gate_forward)
#define gt_norm_gate_backward GT_SYMBOL(norm_gate_backward)
#define gt_add_norm_args_size GT_SYMBOL(add_norm_args_size)
#define gt_add_norm_workspace GT_SYMBOL(add_norm_workspace)
#define gt_add_norm_path GT_SYMBOL(add_norm_path)
#define gt_add_norm_forward GT_SYMBOL(add_norm_forward)
#define gt_add_norm_backward GT_SYMBOL(add_norm_backward)
#define gt_wkv_ssm_args_size GT_SYMBOL(wkv_ssm_args_size)
#define gt_wkv_ssm_workspace GT_SYMBOL(wkv_ssm_workspace)
#define gt_wkv_ssm_path GT_SYMBOL(wkv_ssm_path)
#define gt_wkv_ssm_forward GT_SYMBOL(wkv_ssm_forward)
#define gt_wkv_ssm_backward GT_SYMBOL(wkv_ssm_backward)
#define gt_wkv_ssm_step GT_SYMBOL(wkv_ssm_step)
#define gt_conv_ssd_args_size GT_SYMBOL(conv_ssd_args_size)
#define gt_conv_ssd_workspace GT_SYMBOL(conv_ssd_workspace)
#define gt_conv_ssd_path GT_SYMBOL(conv_ssd_path)
#define gt_conv_ssd_forward GT_SYMBOL(conv_ssd_forward)
#define gt_conv_ssd_backward GT_SYMBOL(conv_ssd_backward)
#define gt_conv_ssd_step GT_SYMBOL(conv_ssd_step)
#define gt_xla_handlers GT_SYMBOL(xla_handlers)
#define gt_xla_register GT_SYMBOL(xla_register)
#define gt_wkv4_args_size GT_SYMBOL(wkv4_args_size)
#define gt_wkv4_workspace GT_SYMBOL(wkv4_workspace)
#define gt_wkv4_path GT_SYMBOL(wkv4_path)
#define gt_wkv4_forward GT_SYMBOL(wkv4_forward)
#define gt_wkv4_backward GT_SYMBOL(wkv4_backward)
#define gt_wkv4_step GT_SYMBOL(wkv4_step)
#define gt_ref_wkv6_forward GT_SYMBOL(ref_wkv6_forward)
#define gt_ref_wkv6_backward GT_SYMBOL(ref_wkv6_backward)
#define gt_ref_wkv6_step GT_SYMBOL(ref_wkv6_step)
#define gt_ref_wkv6_segment GT_SYMBOL(ref_wkv6_segment)
#define gt_ref_wkv6_segment_backward GT_SYMBOL(ref_wkv6_segment_backward)
#define gt_ref_wkv6_join GT_SYMBOL(ref_wkv6_join)
#define gt_ref_wkv6_join_backward GT_SYMBOL(ref_wkv6_join_backward)
#define gt_ref_ssd_forward GT_SYMBOL(ref_ssd_forward)
#define gt_ref_ssd_backward GT_SYMBOL(ref_ssd_backward)
#define gt_ref_ssd_step GT_SYMBOL(ref_ssd_step)
#define gt_ref_ssd_segment GT_SYMBOL(ref_ssd_segment)
#define gt_ref_ssd_segment_backward GT_SYMBOL(ref_ssd_segment_backward)
#define gt_ref_ssd_join GT_SYMBOL(ref_ssd_join)
#define gt_ref_ssd_join_backward GT_SYMBOL(ref_ssd_join_backward)
#define gt_ref_selective_scan_forward GT_SYMBOL(ref_selective_scan_forward)
#define gt_ref_selective_scan_backward GT_SYMBOL(ref_selective_scan_backward)
#define gt_ref_selective_scan_step GT_SYMBOL(ref_selective_scan_step)
#define gt_ref_conv1d_forward GT_SYMBOL(ref_conv1d_forward)
#define gt_ref_conv1d_backward GT_SYMBOL(ref_conv1d_backward)
#define gt_ref_conv1d_step GT_SYMBOL(ref_conv1d_step)
#define gt_ref_rmsnorm_linear_forward GT_SYMBOL(ref_rmsnorm_linear_forward)
#define gt_ref_rmsnorm_linear_backward GT_SYMBOL(ref_rmsnorm_linear_backward)
#define gt_ref_rmsnorm_linear_step GT_SYMBOL(ref_rmsnorm_linear_step)
#define gt_ref_norm_mix_forward GT_SYMBOL(ref_norm_mix_forward)
#define gt_ref_norm_mix_backward GT_SYMBOL(ref_norm_mix_backward)
#define gt_ref_norm_gate_forward GT_SYMBOL(ref_norm_gate_forward)
#define gt_ref_norm_gate_backward GT_SYMBOL(ref_norm_gate_backward)
#define gt_ref_add_norm_forward GT_SYMBOL(ref_add_norm_forward)
#define gt_ref_add_norm_backward GT_SYMBOL(ref_add_norm_backward)
#define gt_ref_wkv_ssm_forward GT_SYMBOL(ref_wkv_ssm_forward)
#define gt_ref_wkv_ssm_backward GT_SYMBOL(ref_wkv_ssm_backward)
#define gt_ref_wkv_ssm_step GT_SYMBOL(ref_wkv_ssm_step)
#define gt_ref_conv_ssd_forward GT_SYMBOL(ref_conv_ssd_forward)
#define gt_ref_conv_ssd_backward GT_SYMBOL(ref_conv_ssd_backward)
#define gt_ref_conv_ssd_step GT_SYMBOL(ref_conv_ssd_step)
#define gt_ref_wkv4_forward GT_SYMBOL(ref_wkv4_forward)
#define gt_ref_wkv4_backward GT_SYMBOL(ref_wkv4_backward)
#define gt_ref_wkv4_step GT_SYMBOL(ref_wkv4_step)

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
    GT_F16 = 3,
    GT_INT8 = 4 /* state_dtype alone: see state_scale of gt_wkv6_args */
} gt_dtype;

typedef enum gt_decay {
    GT_DECAY_RAW = 0, /* w holds x, decay = exp(-exp(x)), as RWKV-6 trains it */
    GT_DECAY_LOG = 1  /* w holds g <= 0, decay = exp(g) */
} gt_decay;

typedef enum gt_activation { GT_ACT_NONE = 0, GT_ACT_SILU = 1 } gt_activation;
typedef enum gt_norm { GT_NORM_RMS = 0, GT_NORM_LAYER = 1 } gt_norm;

typedef struct CUstream_st *gt_stream; /* the same type as cudaStream_t; NULL is the default stream */

/* Strides of a tensor [B,T,H,*] or [B,T,D], in elements; h is the stride of the head, group or channel index.
 * The last index of a four-index tensor is contiguous (but see gt_stride4).  A component that is 0 has its default:
 *     h = size of the contiguous part (1 for three-index tensors),  t = H*h,  b = max(T*t, H*h).
 * Examples: packed [B,T,H,N]: all 0.  [B,H,T,N]: {.t = N, .h = T*N}.  [B,D,T]: {.t = 1, .h = T}.  A slice of a
 * projection whose rows have R elements: {.t = R}. */
typedef struct gt_stride {
    int64_t b, t, h;
} gt_stride;

/* As gt_stride, with n, the stride of the last index (0 = 1).  The default of h is n * the size of the last index.
 * Example: the layout [B,G,N,T] of a tensor [B,T,G,N] is {.t = 1, .n = T}. */
typedef struct gt_stride4 {
    int64_t b, t, h, n;
} gt_stride4;

/* The answer of gt_OP_workspace in bytes: the workspace of each pass, and the size of the optional `saved` buffer.
 * segment is the workspace of gt_OP_segment, and equally of gt_OP_segment_backward; gt_OP_join needs none. */
typedef struct gt_workspace {
    size_t forward, backward, step, saved, segment;
} gt_workspace;

/* ---- library --------------------------------------------------------------------------------- */

/* GT_VERSION of the compiled implementation. */
GT_FUNCTION int gt_version(void);

/* A fixed sentence for a status.  Never NULL, even for a value that is no status. */
GT_FUNCTION const char *gt_status_string(gt_status status);

/* The error text of the last gt_ call that failed in this thread: function, field, value.  "" if none failed.
 * The text stays valid until the next failing call of the same thread. */
GT_FUNCTION const char *gt_last_error(void);

/* GT_OK if the kernels of this build run on `device` (-1: the current device).  Otherwise GT_ERROR_NO_CUDA,
 * GT_ERROR_NO_DEVICE, GT_ERROR_ARCH, or GT_ERROR_VALUE if there is no such device. */
GT_FUNCTION gt_status gt_device_supported(int device);

/* sizeof(gt_OP_args) in the compiled implementation.  A binding from another language compares it with its own size. */
GT_FUNCTION size_t gt_wkv6_args_size(void);
GT_FUNCTION size_t gt_ssd_args_size(void);
GT_FUNCTION size_t gt_selective_scan_args_size(void);
GT_FUNCTION size_t gt_conv1d_args_size(void);
GT_FUNCTION size_t gt_rmsnorm_linear_args_size(void);
GT_FUNCTION size_t gt_norm_mix_args_size(void);
GT_FUNCTION size_t gt_norm_gate_args_size(void);
GT_FUNCTION size_t gt_add_norm_args_size(void);
GT_FUNCTION size_t gt_wkv_ssm_args_size(void);
GT_FUNCTION size_t gt_conv_ssd_args_size(void);
GT_FUNCTION size_t gt_wkv4_args_size(void);
GT_FUNCTION size_t gt_int8_states_args_size(void);

/* Conversions on the host.  They round to nearest even.  A NaN stays NaN, and overflow gives infinity. */
static inline uint16_t gt_f32_to_bf16(float value);
static inline float gt_bf16_to_f32(uint16_t bits);
static inline uint16_t gt_f32_to_f16(float value);
static inline float gt_f16_to_f32(uint16_t bits);

/* ---- wkv6: RWKV-6 time mixing ------------------------------------------------------------------
 * Per batch element and head, with decay d_t = exp(-exp(w_t)) (raw) or exp(w_t) (log), in [0,1].  A dot multiplies
 * element by element.
 *     y_t = scale (S_{t-1}^T r_t + (sum_n r_t[n] u[n] k_t[n]) v_t)  reads the state before token t
 *     S_t = diag(d_t) S_{t-1} + k_t v_t^T                           S_0 = state_in, S_T = state_out
 * Source: Peng et al. 2024, "Eagle and Finch", arXiv:2404.05892, section 4.1 (with u = time_faaaa).
 * Backward, with G_t = dL/dS_t, G_T = dstate_out, b_t = <dy_t, v_t>, and dy_t already multiplied by scale:
 *     dr_t = S_{t-1} dy_t + b_t u.k_t               dk_t = G_t v_t + b_t u.r_t
 *     dv_t = G_t^T k_t + (sum_n r u k) dy_t          du  = sum_{b,t} b_t r_t.k_t
 *     G_{t-1} = diag(d_t) G_t + r_t dy_t^T
 *     dw_t = dL/dw_t.  For log decays d_t . rowsum(G_t . S_{t-1}); for raw decays that times -exp(w_t); 0 if d_t = 0
 * Every decay is valid, including an exact 0; nothing is clamped.  With T = 0 the state is copied.
 * The kernels take N and V up to 256 (else GT_ERROR_UNSUPPORTED), the CPU twins any.
 * Backward needs the least workspace if `saved` is given and rows of dv (N = 128: also of dk) are aligned to 16 bytes,
 * because G then lies in these outputs.  If the pointers are NULL in a query, the answer is enough in both cases. */
typedef struct gt_wkv6_args {
    int64_t B, T, H, N;
    int64_t V;                /* value size, 0 = N */
    gt_dtype dtype;           /* r k v y and their gradients */
    gt_dtype w_dtype;         /* w dw: 0 = dtype, or GT_F32 */
    gt_dtype state_dtype;     /* of state_in and state_out in forward and step: 0 = GT_F32, GT_BF16 or GT_F16; in step
                                also GT_INT8.  They round such a state when they store it, to nearest or as
                                rounding_seed says.  Cast the pointer to float *.  Forward then needs workspace for fp32
                                states: 4 bytes for each of their numbers.  All other functions: fp32 */
    gt_dtype parameter_dtype; /* of u in step: 0 = GT_F32, or any, with the same cast.  All other functions: fp32 */
    gt_decay decay;           /* what w holds */
    float scale;              /* of y: 0 = 1, else 2^-32 to 2^32 */
    int state_in_shared;      /* 1: state_in and dstate_in are [H,N,V], one for the whole batch */
    int accumulate;           /* 1: adds to du, and to dstate_in if shared */
    int64_t segments;         /* 0 = automatic */
    const void *r, *k, *w;    /* in  [B,T,H,N] */
    const void *v;            /* in  [B,T,H,V] */
    const float *u;           /* in  [H,N], NULL = 0 */
    const float *state_in;    /* in  [B,H,N,V], NULL = 0 */
    void *y;                  /* out [B,T,H,V]          forward, step */
    float *state_out;         /* out [B,H,N,V]          forward, step; may equal state_in if not shared */
    const void *dy;           /* in  [B,T,H,V]          backward */
    const float *dstate_out;  /* in  [B,H,N,V], NULL = 0 */
    void *dr, *dk, *dw;       /* out [B,T,H,N] */
    void *dv;                 /* out [B,T,H,V] */
    float *du;                /* out [H,N], accumulates */
    float *dstate_in;         /* out [B,H,N,V], may equal dstate_out if not shared; shared:
                                           [H,N,V], summed over the batch, accumulates */
    gt_stride r_stride, k_stride, w_stride, v_stride, y_stride;
    gt_stride dy_stride, dr_stride, dk_stride, dw_stride, dv_stride;
    /* Packed sequences, for forward and backward.  seq_capacity > 0 selects them; B is then 1.  For s below
     * *seq_count, sequence s has the tokens cu_seqlens[s] to cu_seqlens[s+1]-1.  cu_seqlens starts with 0 and never
     * falls: sequences follow one another and may be empty.  States are [seq_capacity,H,N,V], one for each sequence, or
     * one that all share.  du is summed over all sequences.  `segments` cuts each sequence.
     * T and seq_capacity are capacities, and determine the sizes of saved and workspace.  Both hold states: one for
     * every 64 tokens (ssd, selective_scan: 128; wkv4: 32), and one for each sequence, but no more than T of the
     * latter: T / 64 + min(T, seq_capacity).  Backward with a shared state has seq_capacity more.  Other scratch memory
     * grows by 4 bytes a sequence.
     * The lengths and their number lie in device memory.  The host never reads them, so a captured graph may be
     * replayed for other lengths.  Tokens from cu_seqlens[*seq_count] on belong to no sequence: they are not read, and
     * their y and gradients are 0.  States from row *seq_count on are neither read nor written.  The CPU twin checks
     * the contents of both arrays; the kernels trust them. */
    const int32_t *cu_seqlens; /* in  [seq_capacity+1]; the first *seq_count+1 are read */
    const int32_t *seq_count;  /* in  [1], 0 to seq_capacity; NULL = seq_capacity */
    int64_t seq_capacity;      /* 0 = not packed */
    /* Pools of states.  In step, states are rows of a pool of slot_capacity rows (0 = B), and batch element b uses row
     * slots[b] (NULL: row b).  An element whose row lies outside the pool is skipped: its y is 0.  Two elements must
     * not use the same row; otherwise the row and both y are undefined.
     * In forward, packed sequence s uses row slots[s], likewise; slot_capacity = 0 means seq_capacity.  state_in and
     * state_out are pools of slot_capacity rows, and may be the same pool.  A sequence starts from its row of state_in.
     * It starts from zero if state_in is NULL or starts_zero[s] is not 0.  Its last state goes to its row of state_out.
     * No other row is read or written.  Results equal a call without slots bit for bit.  state_in is not shared. */
    const int32_t *slots; /* in  [B]; forward: [seq_capacity], the first *seq_count are read */
    int64_t slot_capacity;
    const int32_t *starts_zero; /* in  [seq_capacity], forward with slots; NULL = all 0 */
    int64_t state_out_stride;   /* step, and forward with slots: elements from row to row of state_out and of state_in;
                                   0 = packed.  Rows that are aligned to 16 bytes are faster */
    /* step only, for speculative decoding.  Batch element b has the first tokens[b] of the T tokens (NULL: all T).  The
     * first commit[b] of these enter its state (NULL: all of them); the others are drafts.  The step writes y for all
     * tokens of the element.  y of the remaining tokens is 0, and their inputs are not used.  The stored state is the
     * state after commit[b] tokens, with the bits of a step of these tokens alone; commit[b] = 0 leaves the row
     * unchanged.  So a call first commits the tokens that were accepted since the last call, then tries new drafts.
     * The caller sends an accepted draft again.  An element is skipped, like one whose row lies outside the pool,
     * unless 0 <= commit[b] <= tokens[b] <= T. */
    const int32_t *tokens, *commit; /* in  [B] */
    /* step and forward, with states of 16 bits or int8: stochastic rounding.  With rounding_seed a call rounds a state
     * up or down at random, with the right mean, instead of to nearest.  So small changes of the state add up over many
     * tokens instead of being lost.  The random numbers are Philox4x32-10 of three things: the seed, the batch
     * element's rounding_steps[b], and the place of the number in the state (see gt/recurrence/rounding.h).  They do
     * not depend on the batch, the pool row or the kernel.  So a sequence's results repeat if its step is the number of
     * tokens so far.  Elements with the same step share random numbers, and so do layers with the same seed: give each
     * layer its own seed.  Both arrays lie in device memory, so a replayed graph reads new values.  Both or none. */
    const int32_t *rounding_seed;  /* in  [2] */
    const int32_t *rounding_steps; /* in  [B]; packed: [seq_capacity], the first *seq_count are read */
    /* step only, with states of int8, which need it.  A row of a state has one fp32 scale: a number of the state is q
     * scale, for its integer q of -127 to 127.  A step computes y and the new state in fp32.  Then each row gets scale
     * = m / 127, where m is its largest magnitude, and q is number / scale, rounded as rounding_seed says.  ssd: a row
     * of the state [P,N] has N numbers.  wkv6: each 64 columns of a row of the state [N,V] count as a row, and the last
     * of these may have fewer columns.  A row with m below 2^-100 becomes 0.  A row with a NaN or infinity becomes NaN.
     * gt_quantize_states and gt_dequantize_states convert states for other functions. */
    float *state_scale;         /* in, out [B,H,N,ceil(V/64)], in slots as state_out: a pool of slot_capacity rows */
    int64_t state_scale_stride; /* elements from row to row of this pool; 0 = packed */
    /* forward only, for prefix caches: the state after every snapshot_every tokens of a sequence, a multiple of 128.
     * Snapshot i of batch element b, after (i + 1) snapshot_every tokens, is snapshots[b,i].  Snapshot i of packed
     * sequence s is row floor(cu_seqlens[s] / snapshot_every) + i; no other row is written.  A sequence without a row
     * in the pool has no snapshots.  With segments = 1 a snapshot has the bits of state_out of a call of these tokens
     * alone, rounded to nearest.  In 16 bits forward needs workspace: 4 bytes for each number of the snapshots. */
    void *snapshots;         /* out [B,floor(T/snapshot_every),H,N,V] */
    int64_t snapshot_every;  /* 0: no snapshots */
    gt_dtype snapshot_dtype; /* 0 = GT_F32, GT_BF16 or GT_F16 */
    /* Pieces of sequences, for segment, segment_backward, join and join_backward only: see gt_wkv6_segment. */
    float *decay_out;          /* out [B,H,N]          segment; segment_backward: may be NULL */
    int64_t pieces;            /* R, 0 = 1             join, join_backward */
    const float *piece_states; /* in  [R,B,H,N,V]      state_out of every piece; join_backward: dstate_in of each */
    const float *piece_decays; /* in  [R,B,H,N]        decay_out of every piece */
    float *piece_starts;       /* out [R,B,H,N,V]      state_in for every piece; join_backward: dstate_out for each;
                                                       may equal piece_states */
    void *saved;
    size_t saved_bytes;
    void *workspace;
    size_t workspace_bytes;
} gt_wkv6_args;

/* Writes y and, unless NULL, state_out (and saved).  Required: r k v w y. */
GT_FUNCTION gt_status gt_wkv6_forward(const gt_wkv6_args *args, gt_stream stream);
/* Writes the gradients that are not NULL.  Required: r k v w dy; u and state_in as given to forward. */
GT_FUNCTION gt_status gt_wkv6_backward(const gt_wkv6_args *args, gt_stream stream);
/* Processes 1 to 16 new tokens per batch element.  Reads state_out and updates it in place; state_in is NULL or the
 * same pointer.  The results equal forward on the same tokens, up to rounding.  Not for packed sequences. */
GT_FUNCTION gt_status gt_wkv6_step(const gt_wkv6_args *args, gt_stream stream);
/* One sequence in R independent pieces of any lengths, for example on several devices.  For each piece let
 *     E = the product of its d_t       L = its state_out if it starts from a zero state
 *     X = its dstate_in from its own dy, with dstate_out = 0
 * The states between the pieces, and their gradients, then follow from two short recurrences over p = 0 ... R-1:
 *     S_0 = the sequence's state_in            S_{p+1} = diag(E_p) S_p + L_p          S_p is the state_in of piece p
 *     G_{R-1} = the sequence's dstate_out      G_{p-1} = diag(E_p) G_p + X_p          G_p is the dstate_out of piece p
 * gt_wkv6_segment writes L and log E of a piece, segment_backward writes X (and log E).  join writes all S_p,
 * join_backward all G_p.  The order of calls:
 *     forward    segment for each piece; gather all L and log E; join; then forward for each piece, from S_p
 *     backward   segment_backward for each piece; gather all X; join_backward; then backward for each piece, with the
 *                state_in of its forward and dstate_out = G_p
 * With S_p and G_p, gt_wkv6_backward writes the gradients of the whole sequence.  The caller sums du over the pieces.
 * The dstate_in of piece 0 is the dstate_in of the sequence.  (Both recurrences are the formulas of tokens above, with
 * a piece in the place of a token: Blelloch 1990, CMU-CS-90-190.)
 *
 * Writes state_out and decay_out.  Required: k v w state_out decay_out.  Reads neither r, u nor state_in, and writes
 * no y.  decay_out is the natural logarithm of E.  It is at most 0.  Where E is 0 it is minus infinity or less than
 * -10^30.  Each packed sequence has its own outputs: [seq_capacity,H,N,V] and [seq_capacity,H,N]. */
GT_FUNCTION gt_status gt_wkv6_segment(const gt_wkv6_args *args, gt_stream stream);
/* Writes dstate_in and, unless NULL, decay_out.  Required: r w dy dstate_in.  Not for a shared state_in. */
GT_FUNCTION gt_status gt_wkv6_segment_backward(const gt_wkv6_args *args, gt_stream stream);
/* Writes piece_starts.  Required: piece_states piece_decays piece_starts.  Also reads state_in, which may be shared.
 * T and segments are not used.  For packed sequences, B is the seq_capacity of the pieces, and seq_capacity is 0. */
GT_FUNCTION gt_status gt_wkv6_join(const gt_wkv6_args *args, gt_stream stream);
/* The same in reverse: starts from dstate_out and goes from the last piece to the first. */
GT_FUNCTION gt_status gt_wkv6_join_backward(const gt_wkv6_args *args, gt_stream stream);
/* Reads sizes, strides, capacities, dtypes, flags, segments and, of a pointer, whether it is NULL and its alignment. */
GT_FUNCTION gt_status gt_wkv6_workspace(const gt_wkv6_args *args, gt_workspace *need);
/* Writes a text that names the kernels of a call with these arguments on the current device, and the reason against
 * faster ones: "forward: token_kernel (any-size kernels: rows of k are not aligned to 16 bytes); backward: ...".
 * Writes at most bytes - 1 characters and a 0, and launches nothing.  The contents of the tensors do not matter.  A
 * required pointer that is still NULL counts as aligned.  If all outputs of a pass are NULL, the text describes a pass
 * that writes all of them.  The text includes step if a step can have these arguments, and both passes of a segment if
 * decay_out is not NULL.  It is for people and logs: its words may change in any version. */
GT_FUNCTION gt_status gt_wkv6_path(const gt_wkv6_args *args, char *text, size_t bytes);
GT_REF_FUNCTION gt_status gt_ref_wkv6_forward(const gt_wkv6_args *args);
GT_REF_FUNCTION gt_status gt_ref_wkv6_backward(const gt_wkv6_args *args);
GT_REF_FUNCTION gt_status gt_ref_wkv6_step(const gt_wkv6_args *args);
GT_REF_FUNCTION gt_status gt_ref_wkv6_segment(const gt_wkv6_args *args);
GT_REF_FUNCTION gt_status gt_ref_wkv6_segment_backward(const gt_wkv6_args *args);
GT_REF_FUNCTION gt_status gt_ref_wkv6_join(const gt_wkv6_args *args);
GT_REF_FUNCTION gt_status gt_ref_wkv6_join_backward(const gt_wkv6_args *args);

/* ---- ssd: Mamba-2 -------------------------------------------------------------------------------
 * Per batch element and head h, which is in group g = h / (H/G).  Delta_t is dt + dt_bias; then softplus of this sum,
 * if `softplus` is set; then clamped to [dt_min, dt_max], if `dt_limit` is set:
 *     h_t = exp(Delta_t A) h_{t-1} + Delta_t x_t Bm_t^T              h [P,N], h_0 = state_in
 *     y_t = (h_t Cm_t + Dskip . x_t) . silu(z_t)                      without z: no gate
 * Source: Dao and Gu 2024, "Transformers are SSMs", arXiv:2405.21060, section 6; softplus, limits,
 * gate and skip as in the Mamba-2 block.
 * Backward writes the gradients of all inputs.  A Delta_t exactly at a limit passes its gradient on.  dz needs y before
 * the gate, and backward computes it again.  With reads_y, where that is faster (compute capability 9.0, bf16), it
 * takes y / silu(z) instead.  dz then contains the rounding of y, too: its error is 2.4e-3 of its norm instead of
 * 1.7e-3.  The division fails where z is 0, within 2^-59 of 0 or below -40, or where y is not finite.  If dy is not 0
 * there, backward computes y before the gate for each such element by itself, since they are few.
 * The kernels limit exp(Delta_t A) to 2^128, and in fp32 also products of two tokens, because an infinity times a 0
 * would give NaN.  So for an infinite dt, and in fp32 for any infinity, they may give a finite number above 10^30 where
 * the twins give NaN or infinity.
 * The kernels take P and N up to 256 (else GT_ERROR_UNSUPPORTED), the CPU twins any. */
typedef struct gt_ssd_args {
    int64_t B, T, H, P, N;
    int64_t G;                /* groups that share Bm and Cm, divides H; 0 = 1 */
    gt_dtype dtype;           /* x Bm Cm z y and their gradients */
    gt_dtype dt_dtype;        /* dt ddt: 0 = dtype, or GT_F32 */
    gt_dtype state_dtype;     /* of state_in and state_out in forward and step, as in gt_wkv6_args */
    gt_dtype parameter_dtype; /* of Dskip dt_bias in step: 0 = GT_F32, or any; fp32 elsewhere */
    int softplus;             /* 1: softplus(dt + dt_bias) */
    int dt_limit;             /* 1: then clamp to [dt_min, dt_max] */
    float dt_min, dt_max;
    int Dskip_per_channel;   /* 1: Dskip and dDskip are [H,P] */
    int state_in_shared;     /* 1: state_in and dstate_in are [H,P,N] */
    int accumulate;          /* 1: adds to dA dDskip ddt_bias, and to dstate_in if shared */
    int reads_y;             /* 1: y, if not NULL, still holds forward's output in backward, and may be used for dz */
    int64_t segments;        /* 0 = automatic */
    const void *x;           /* in  [B,T,H,P] */
    const void *dt;          /* in  [B,T,H] */
    const float *A;          /* in  [H] */
    const void *Bm, *Cm;     /* in  [B,T,G,N] */
    const float *Dskip;      /* in  [H], NULL = 0 */
    const void *z;           /* in  [B,T,H,P], NULL = no gate */
    const float *dt_bias;    /* in  [H], NULL = 0 */
    const float *state_in;   /* in  [B,H,P,N], NULL = 0 */
    void *y;                 /* out [B,T,H,P]        forward, step; backward reads it if reads_y */
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
    const int32_t *cu_seqlens, *seq_count; /* packed sequences, as in gt_wkv6_args */
    int64_t seq_capacity;
    const int32_t *slots; /* step and forward, as in gt_wkv6_args, and so are the next three */
    int64_t slot_capacity;
    const int32_t *starts_zero;
    int64_t state_out_stride;
    const int32_t *tokens, *commit;                /* step only, as in gt_wkv6_args */
    const int32_t *rounding_seed, *rounding_steps; /* step and forward, as in gt_wkv6_args */
    float *state_scale;                            /* in, out [B,H,P], step with states of int8, as in gt_wkv6_args */
    int64_t state_scale_stride;                    /* likewise */
    void *snapshots; /* out [B,floor(T/snapshot_every),H,P,N], forward only, as are the next two: see gt_wkv6_args */
    int64_t snapshot_every;
    gt_dtype snapshot_dtype;
    /* segment, segment_backward, join and join_backward only, as in gt_wkv6_args */
    float *decay_out;          /* out [B,H] */
    int64_t pieces;            /* R, 0 = 1 */
    const float *piece_states; /* in  [R,B,H,P,N] */
    const float *piece_decays; /* in  [R,B,H] */
    float *piece_starts;       /* out [R,B,H,P,N], may equal piece_states */
    void *saved;
    size_t saved_bytes;
    void *workspace;
    size_t workspace_bytes;
} gt_ssd_args;

/* Writes y and, unless NULL, state_out (and saved).  Required: x dt A Bm Cm y. */
GT_FUNCTION gt_status gt_ssd_forward(const gt_ssd_args *args, gt_stream stream);
/* Writes the gradients that are not NULL.  Required: x dt A Bm Cm dy; optional inputs as in forward.  dz needs z. */
GT_FUNCTION gt_status gt_ssd_backward(const gt_ssd_args *args, gt_stream stream);
/* Processes 1 to 16 new tokens and updates state_out in place, as gt_wkv6_step does. */
GT_FUNCTION gt_status gt_ssd_step(const gt_ssd_args *args, gt_stream stream);
/* One sequence in R independent pieces, as for gt_wkv6_segment, with E = exp(sum of Delta_t A) over a piece.  X is
 * computed from dy silu(z).  decay_out, the natural logarithm of E, may be above 0.  The caller sums dA, dDskip and
 * ddt_bias over the pieces.  segment reads x dt A Bm dt_bias and writes state_out and decay_out.  It reads neither Cm
 * nor z, and writes no y.  Required: x dt A Bm state_out decay_out. */
GT_FUNCTION gt_status gt_ssd_segment(const gt_ssd_args *args, gt_stream stream);
/* Reads dy z dt A Cm dt_bias; writes dstate_in and, unless NULL, decay_out.  Required: dt A Cm dy dstate_in; z as given
 * to forward.  Not for a shared state_in. */
GT_FUNCTION gt_status gt_ssd_segment_backward(const gt_ssd_args *args, gt_stream stream);
/* As gt_wkv6_join and gt_wkv6_join_backward. */
GT_FUNCTION gt_status gt_ssd_join(const gt_ssd_args *args, gt_stream stream);
GT_FUNCTION gt_status gt_ssd_join_backward(const gt_ssd_args *args, gt_stream stream);
/* The workspace of backward depends on the kernels of the call, and so on the alignment of the tensors.  A NULL pointer
 * counts as aligned: set unaligned pointers before the query, or the answer may be too small.  The workspace also
 * depends on z and dx.  With z, some kernels first compute dy silu(z), which has as many bytes as y.  They keep it in
 * the memory of dx, which they write last.  Without dx, with few tokens and in segment_backward they use workspace. */
GT_FUNCTION gt_status gt_ssd_workspace(const gt_ssd_args *args, gt_workspace *need);
GT_FUNCTION gt_status gt_ssd_path(const gt_ssd_args *args, char *text, size_t bytes);
GT_REF_FUNCTION gt_status gt_ref_ssd_forward(const gt_ssd_args *args);
GT_REF_FUNCTION gt_status gt_ref_ssd_backward(const gt_ssd_args *args);
GT_REF_FUNCTION gt_status gt_ref_ssd_step(const gt_ssd_args *args);
GT_REF_FUNCTION gt_status gt_ref_ssd_segment(const gt_ssd_args *args);
GT_REF_FUNCTION gt_status gt_ref_ssd_segment_backward(const gt_ssd_args *args);
GT_REF_FUNCTION gt_status gt_ref_ssd_join(const gt_ssd_args *args);
GT_REF_FUNCTION gt_status gt_ref_ssd_join_backward(const gt_ssd_args *args);

/* ---- selective_scan: Mamba-1 --------------------------------------------------------------------
 * Per batch element and channel d, which is in group g = d / (D/G).  Delta_t is dt + dt_bias, or softplus of this sum:
 *     h_t[n] = exp(Delta_t A[d,n]) h_{t-1}[n] + Delta_t u_t Bm_t[n]     h_0 = state_in
 *     y_t    = (sum_n h_t[n] Cm_t[n] + Dskip u_t) silu(z_t)              without z: no gate
 * Delta A may be above 0 (A > 0, or Delta < 0 without softplus): then the state grows.  Results are accurate while the
 * sum of Delta A over any 64 tokens is at most 40.  Beyond that, a result may be infinite, but not NaN if it fits fp32.
 * Source: Gu and Dao 2023, "Mamba", arXiv:2312.00752, section 3.2 and algorithm 2.
 * The kernels take N up to 256 (else GT_ERROR_UNSUPPORTED), the CPU twins any. */
typedef struct gt_selective_scan_args {
    int64_t B, T, D, N;
    int64_t G;                /* groups that share Bm and Cm, divides D; 0 = 1 */
    gt_dtype dtype;           /* u Bm Cm z y and their gradients */
    gt_dtype dt_dtype;        /* dt ddt: 0 = dtype, or GT_F32 */
    gt_dtype state_dtype;     /* of state_in and state_out in forward and step, as in gt_wkv6_args, but not GT_INT8 */
    gt_dtype parameter_dtype; /* of Dskip dt_bias in step: 0 = GT_F32, or any; fp32 elsewhere */
    int softplus;             /* 1: softplus(dt + dt_bias) */
    int state_in_shared;      /* 1: state_in and dstate_in are [D,N] */
    int accumulate;           /* 1: adds to dA dDskip ddt_bias, and to dstate_in if shared */
    int64_t segments;         /* 0 = automatic */
    const void *u, *dt;       /* in  [B,T,D] */
    const float *A;           /* in  [D,N] */
    const void *Bm, *Cm;      /* in  [B,T,G,N] */
    const float *Dskip;       /* in  [D], NULL = 0 */
    const void *z;            /* in  [B,T,D], NULL = no gate */
    const float *dt_bias;     /* in  [D], NULL = 0 */
    const float *state_in;    /* in  [B,D,N], NULL = 0 */
    void *y;                  /* out [B,T,D]          forward, step */
    float *state_out;         /* out [B,D,N]          forward, step; may equal state_in if not shared */
    const void *dy;           /* in  [B,T,D]          backward: gradient of the gated y */
    const float *dstate_out;  /* in  [B,D,N], NULL = 0 */
    void *du, *ddt, *dz;      /* out [B,T,D] */
    void *dBm, *dCm;          /* out [B,T,G,N] */
    float *dA;                /* out [D,N], accumulates */
    float *dDskip, *ddt_bias; /* out [D], accumulate */
    float *dstate_in;         /* out [B,D,N], may equal dstate_out if not shared; shared: [D,N], summed
                                over the batch, accumulates */
    gt_stride u_stride, dt_stride, z_stride, y_stride, dy_stride, du_stride, ddt_stride, dz_stride;
    gt_stride4 Bm_stride, Cm_stride, dBm_stride, dCm_stride;
    const int32_t *cu_seqlens, *seq_count; /* packed sequences, as in gt_wkv6_args */
    int64_t seq_capacity;
    const int32_t *slots; /* step only, as in gt_wkv6_args */
    int64_t slot_capacity;
    const int32_t *tokens, *commit;                /* step only, as in gt_wkv6_args */
    const int32_t *rounding_seed, *rounding_steps; /* step and forward, as in gt_wkv6_args */
    void *saved;
    size_t saved_bytes;
    void *workspace;
    size_t workspace_bytes;
} gt_selective_scan_args;

/* Writes y and, unless NULL, state_out (and saved).  Required: u dt A Bm Cm y. */
GT_FUNCTION gt_status gt_selective_scan_forward(const gt_selective_scan_args *args, gt_stream stream);
/* Writes the gradients that are not NULL.  Required: u dt A Bm Cm dy.  dz needs z. */
GT_FUNCTION gt_status gt_selective_scan_backward(const gt_selective_scan_args *args, gt_stream stream);
/* Processes 1 to 16 new tokens and updates state_out in place, as gt_wkv6_step does. */
GT_FUNCTION gt_status gt_selective_scan_step(const gt_selective_scan_args *args, gt_stream stream);
GT_FUNCTION gt_status gt_selective_scan_workspace(const gt_selective_scan_args *args, gt_workspace *need);
GT_FUNCTION gt_status gt_selective_scan_path(const gt_selective_scan_args *args, char *text, size_t bytes);
GT_REF_FUNCTION gt_status gt_ref_selective_scan_forward(const gt_selective_scan_args *args);
GT_REF_FUNCTION gt_status gt_ref_selective_scan_backward(const gt_selective_scan_args *args);
GT_REF_FUNCTION gt_status gt_ref_selective_scan_step(const gt_selective_scan_args *args);

/* ---- conv1d: causal depthwise convolution --------------------------------------------------------
 * Per batch element and channel, with e = the W-1 inputs before the first token (state_in), then x_0 ... x_{T-1}:
 *     y_t = act(bias + sum_{j<W} weight[j] e_{t+j})        weight[W-1] multiplies the current token
 *     state_out = the last W-1 of e, oldest first          (if T < W-1, some of them are inputs of state_in)
 * Source: Gu and Dao 2023, arXiv:2312.00752, figure 3 (the convolution before the scan). */
typedef struct gt_conv1d_args {
    int64_t B, T, D;
    int64_t W;                /* 2, 3 or 4 */
    gt_dtype dtype;           /* x y dy dx */
    gt_dtype weight_dtype;    /* of weight, bias in step: 0 = GT_F32, or any.  Elsewhere fp32, like their gradients */
    gt_dtype state_dtype;     /* of states in forward and step: 0 = GT_F32, or any but GT_INT8, rounded to nearest */
    int64_t state_columns;    /* S, step only: number of inputs that a state holds, at least W-1; 0 = W-1 */
    gt_activation activation; /* applied to the sum */
    int state_in_shared;      /* 1: state_in and dstate_in are [D,W-1] */
    int accumulate;           /* 1: adds to dweight dbias, and to dstate_in if shared */
    const void *x;            /* in  [B,T,D]; [B,D,T] with x_stride = {.t = 1, .h = T} */
    const float *weight;      /* in  [D,W] */
    const float *bias;        /* in  [D], NULL = 0 */
    const float *state_in;    /* in  [B,D,W-1], NULL = 0 */
    void *y;                  /* out [B,T,D]         forward, step */
    float *state_out;         /* out [B,D,W-1]       forward, may equal state_in if not shared; step [B,D,S] */
    const void *dy;           /* in  [B,T,D]         backward */
    const float *dstate_out;  /* in  [B,D,W-1], NULL = 0 */
    void *dx;                 /* out [B,T,D] */
    float *dweight;           /* out [D,W], accumulates */
    float *dbias;             /* out [D], accumulates */
    float *dstate_in;         /* out [B,D,W-1], may equal dstate_out if not shared; shared: [D,W-1],
                                 summed over the batch, accumulates */
    gt_stride x_stride, y_stride, dy_stride, dx_stride;
    const int32_t *cu_seqlens, *seq_count; /* packed sequences, as in gt_wkv6_args; y, dx and states of a sequence have
                                              the same bits as in a call of their own */
    int64_t seq_capacity;
    const int32_t *slots; /* step and forward, as in gt_wkv6_args, and so are the next two */
    int64_t slot_capacity;
    const int32_t *starts_zero;
    const int32_t *tokens, *commit; /* step only, as in gt_wkv6_args */
    gt_stride state_out_stride;     /* step, and forward with slots: strides of state_out and state_in from row to row
                                       (.b), channel to channel (.t), column to column (.h); 0 = packed */
    const int32_t *places;          /* step only, in [B]: a state is a ring, and its next input goes to column places[b]
                                   modulo S.  NULL: columns are in order of time, the newest input last */
    void *workspace;
    size_t workspace_bytes;
} gt_conv1d_args;

/* Writes y and, unless NULL, state_out.  Required: x weight y. */
GT_FUNCTION gt_status gt_conv1d_forward(const gt_conv1d_args *args, gt_stream stream);
/* Writes the gradients that are not NULL.  Required: x weight dy. */
GT_FUNCTION gt_status gt_conv1d_backward(const gt_conv1d_args *args, gt_stream stream);
/* Processes 1 to 16 new tokens and updates state_out in place, as gt_wkv6_step does. */
GT_FUNCTION gt_status gt_conv1d_step(const gt_conv1d_args *args, gt_stream stream);
GT_FUNCTION gt_status gt_conv1d_workspace(const gt_conv1d_args *args, gt_workspace *need);
GT_FUNCTION gt_status gt_conv1d_path(const gt_conv1d_args *args, char *text, size_t bytes);
GT_REF_FUNCTION gt_status gt_ref_conv1d_forward(const gt_conv1d_args *args);
GT_REF_FUNCTION gt_status gt_ref_conv1d_backward(const gt_conv1d_args *args);
GT_REF_FUNCTION gt_status gt_ref_conv1d_step(const gt_conv1d_args *args);

/* ---- rmsnorm_linear: norm, then projection ----------------------------------------------------------
 * Per row, mean = 0 (RMS) or mean(x) (LAYER), rstd = 1/sqrt(mean((x - mean)^2) + eps):
 *     n = (x - mean) rstd . gamma + beta                y = weight n + bias
 * Sources: Zhang and Sennrich 2019, arXiv:1910.07467; Ba et al. 2016, arXiv:1607.06450. */
typedef struct gt_rmsnorm_linear_args {
    int64_t M, D, O;
    gt_dtype dtype;                                   /* x weight y dy dx */
    gt_norm norm;                                     /* GT_NORM_RMS or GT_NORM_LAYER */
    float eps;                                        /* 0 = 1e-5 */
    int accumulate;                                   /* 1: adds to dweight dgamma dbeta dbias */
    const void *x;                                    /* in  [M,D] */
    const void *weight;                               /* in  [O,D] */
    const float *gamma;                               /* in  [D], NULL = 1 */
    const float *beta;                                /* in  [D], NULL = 0 */
    const float *bias;                                /* in  [O], NULL = 0 */
    void *y;                                          /* out [M,O]                 forward */
    const void *dy;                                   /* in  [M,O]                 backward */
    void *dx;                                         /* out [M,D] */
    float *dweight;                                   /* out [O,D], accumulates */
    float *dgamma, *dbeta;                            /* out [D], accumulate */
    float *dbias;                                     /* out [O], accumulates */
    int64_t x_stride, y_stride, dy_stride, dx_stride; /* elements from row to row, 0 = packed */
    void *cublaslt; /* cublasLtHandle_t, or NULL.  cuBLASLt then computes the products of 16-bit calls: y without a
                       bias, dweight, and in bf16 dx.  Read only if GT_WITH_CUBLASLT was defined where the
                       implementation was compiled, which then needs cublasLt.h and its library */
    void *saved;
    size_t saved_bytes;
    void *workspace;
    size_t workspace_bytes;
    const int8_t *weight_int8; /* in  [O,D]                 step */
    const float *weight_scale; /* in  [O]                   step */
} gt_rmsnorm_linear_args;

/* Writes y (and saved).  Required: x weight y. */
GT_FUNCTION gt_status gt_rmsnorm_linear_forward(const gt_rmsnorm_linear_args *args, gt_stream stream);
/* Writes the gradients that are not NULL.  Required: x weight dy. */
GT_FUNCTION gt_status gt_rmsnorm_linear_backward(const gt_rmsnorm_linear_args *args, gt_stream stream);
/* For decoding: writes y of at most 64 rows, with an int8 weight: weight[o][d] = weight_scale[o] weight_int8[o][d].
 * gt_quantize_int8 makes both.  Other passes do not read them.  Calls are faster if D is a multiple of 16.  No
 * workspace.  Required: x weight_int8 weight_scale y. */
GT_FUNCTION gt_status gt_rmsnorm_linear_step(const gt_rmsnorm_linear_args *args, gt_stream stream);
GT_FUNCTION gt_status gt_rmsnorm_linear_workspace(const gt_rmsnorm_linear_args *args, gt_workspace *need);
GT_FUNCTION gt_status gt_rmsnorm_linear_path(const gt_rmsnorm_linear_args *args, char *text, size_t bytes);
GT_REF_FUNCTION gt_status gt_ref_rmsnorm_linear_forward(const gt_rmsnorm_linear_args *args);
GT_REF_FUNCTION gt_status gt_ref_rmsnorm_linear_backward(const gt_rmsnorm_linear_args *args);
GT_REF_FUNCTION gt_status gt_ref_rmsnorm_linear_step(const gt_rmsnorm_linear_args *args);

/* Quantises a packed weight [O,D] of `dtype` in host memory, for gt_rmsnorm_linear_step.  For each row o:
 *     weight_scale[o] = max|weight[o]| / 127      weight_int8[o][d] = weight[o][d] / weight_scale[o], nearest even
 * A row of zeros gets zeros and the scale 0, and so does a row whose scale would be below 2^-126.  The function refuses
 * a weight that is infinite or NaN, and writes nothing then. */
GT_FUNCTION gt_status gt_quantize_int8(const void *weight, gt_dtype dtype, int64_t O, int64_t D, int8_t *weight_int8,
                                       float *weight_scale);

/* ---- norm_mix: two normalised branches and a residual -------------------------------------------------
 *     y = residual + gain_a . RMSNorm(a) + gain_b . RMSNorm(b)
 * RMSNorm takes the mean square over the whole row, or over each of H equal slices (heads) of the row.
 * Source: the branch norms of Hymba (Dong et al. 2024, arXiv:2411.13676, section 2.1), summed. */
typedef struct gt_norm_mix_args {
    int64_t M, D;
    int64_t H;                    /* slices per row, divides D; 0 = 1 */
    gt_dtype dtype;               /* a b residual y and their gradients */
    float eps;                    /* 0 = 1e-5 */
    int accumulate;               /* 1: adds to dgain_a dgain_b */
    const void *a, *b;            /* in  [M,D] */
    const float *gain_a, *gain_b; /* in [D], NULL = 1 */
    const void *residual;         /* in  [M,D], NULL = 0 */
    void *y;                      /* out [M,D]              forward; may equal residual */
    const void *dy;               /* in  [M,D]              backward; also the gradient of residual */
    void *da, *db;                /* out [M,D] */
    float *dgain_a, *dgain_b;     /* out [D], accumulate */
    int64_t a_stride, b_stride, residual_stride, y_stride; /* elements from row to row, 0 = packed */
    int64_t dy_stride, da_stride, db_stride;
    void *workspace;
    size_t workspace_bytes;
} gt_norm_mix_args;

/* Writes y.  Required: a b y. */
GT_FUNCTION gt_status gt_norm_mix_forward(const gt_norm_mix_args *args, gt_stream stream);
/* Writes the gradients that are not NULL.  Required: a b dy. */
GT_FUNCTION gt_status gt_norm_mix_backward(const gt_norm_mix_args *args, gt_stream stream);
GT_FUNCTION gt_status gt_norm_mix_workspace(const gt_norm_mix_args *args, gt_workspace *need);
GT_FUNCTION gt_status gt_norm_mix_path(const gt_norm_mix_args *args, char *text, size_t bytes);
GT_REF_FUNCTION gt_status gt_ref_norm_mix_forward(const gt_norm_mix_args *args);
GT_REF_FUNCTION gt_status gt_ref_norm_mix_backward(const gt_norm_mix_args *args);

/* ---- norm_gate: gated RMSNorm (Mamba-2), group norm + gate (RWKV-6) -----------------------------------
 * Per row, for each of its H equal slices; norm is defined as in rmsnorm_linear, over the slice:
 *     norm first:  y = (norm(x) . gamma + beta) . silu(z)
 *     gate first:  y = norm(x . silu(z)) . gamma + beta
 * Mamba-2: GT_NORM_RMS, gate_first = 1.  RWKV-6: GT_NORM_LAYER, H heads, eps = 64e-5; z is the gate before SiLU.
 * Sources: as rmsnorm_linear; Wu and He 2018, arXiv:1803.08494; the gate as in arXiv:2405.21060. */
typedef struct gt_norm_gate_args {
    int64_t M, D;
    int64_t H;                            /* slices per row, divides D; 0 = 1 */
    gt_dtype dtype;                       /* x z y and their gradients */
    gt_norm norm;                         /* GT_NORM_RMS or GT_NORM_LAYER */
    int gate_first;                       /* 1: the gate acts before the norm */
    float eps;                            /* 0 = 1e-5 */
    int accumulate;                       /* 1: adds to dgamma dbeta */
    const void *x;                        /* in  [M,D] */
    const void *z;                        /* in  [M,D], NULL = no gate */
    const float *gamma;                   /* in  [D], NULL = 1 */
    const float *beta;                    /* in  [D], NULL = 0 */
    void *y;                              /* out [M,D]                 forward */
    const void *dy;                       /* in  [M,D]                 backward */
    void *dx, *dz;                        /* out [M,D] */
    float *dgamma, *dbeta;                /* out [D], accumulate */
    int64_t x_stride, z_stride, y_stride; /* elements from row to row, 0 = packed */
    int64_t dy_stride, dx_stride, dz_stride;
    void *workspace;
    size_t workspace_bytes;
} gt_norm_gate_args;

/* Writes y.  Required: x y. */
GT_FUNCTION gt_status gt_norm_gate_forward(const gt_norm_gate_args *args, gt_stream stream);
/* Writes the gradients that are not NULL.  Required: x dy.  dz needs z. */
GT_FUNCTION gt_status gt_norm_gate_backward(const gt_norm_gate_args *args, gt_stream stream);
GT_FUNCTION gt_status gt_norm_gate_workspace(const gt_norm_gate_args *args, gt_workspace *need);
GT_FUNCTION gt_status gt_norm_gate_path(const gt_norm_gate_args *args, char *text, size_t bytes);
GT_REF_FUNCTION gt_status gt_ref_norm_gate_forward(const gt_norm_gate_args *args);
GT_REF_FUNCTION gt_status gt_ref_norm_gate_backward(const gt_norm_gate_args *args);

/* ---- add_norm: the residual stream of a layer, and its norm -------------------------------------------
 * Per row: sum = x + residual, y = norm(sum) . gamma + beta, with the norm of rmsnorm_linear.  The norm reads the sum
 * before it is rounded to sum_dtype.  Backward: dx = dresidual = dsum + the gradient of dy through the norm.  Backward
 * reads x and residual, or with reads_sum only the sum that forward wrote, which has half of their bytes.
 * Sources: Zhang and Sennrich 2019, arXiv:1910.07467; Ba et al. 2016, arXiv:1607.06450. */
typedef struct gt_add_norm_args {
    int64_t M, D;
    gt_dtype dtype;        /* x y dy dx */
    gt_dtype sum_dtype;    /* residual sum dsum dresidual: dtype (0) or GT_F32 */
    gt_norm norm;          /* GT_NORM_RMS or GT_NORM_LAYER */
    float eps;             /* 0 = 1e-5 */
    int accumulate;        /* 1: adds to dgamma dbeta */
    int reads_sum;         /* 1: backward reads sum if it is not NULL, and only checks x and residual */
    const void *x;         /* in  [M,D] */
    const void *residual;  /* in  [M,D], NULL = 0 */
    const float *gamma;    /* in  [D], NULL = 1 */
    const float *beta;     /* in  [D], NULL = 0         forward */
    void *sum;             /* out [M,D] forward, may be residual; in backward with reads_sum */
    void *y;               /* out [M,D]                 forward */
    const void *dy;        /* in  [M,D]                 backward */
    const void *dsum;      /* in  [M,D], NULL = 0 */
    void *dx;              /* out [M,D] */
    void *dresidual;       /* out [M,D], may be dsum */
    float *dgamma, *dbeta; /* out [D], accumulate */
    int64_t x_stride, residual_stride, sum_stride, y_stride; /* elements from row to row, 0 = packed */
    int64_t dy_stride, dsum_stride, dx_stride, dresidual_stride;
    void *workspace;
    size_t workspace_bytes;
} gt_add_norm_args;

/* Writes sum and y.  Required: x sum y.  No workspace. */
GT_FUNCTION gt_status gt_add_norm_forward(const gt_add_norm_args *args, gt_stream stream);
/* Writes the gradients that are not NULL.  Required: x dy.  Results repeat bit for bit. */
GT_FUNCTION gt_status gt_add_norm_backward(const gt_add_norm_args *args, gt_stream stream);
GT_FUNCTION gt_status gt_add_norm_workspace(const gt_add_norm_args *args, gt_workspace *need);
GT_FUNCTION gt_status gt_add_norm_path(const gt_add_norm_args *args, char *text, size_t bytes);
GT_REF_FUNCTION gt_status gt_ref_add_norm_forward(const gt_add_norm_args *args);
GT_REF_FUNCTION gt_status gt_ref_add_norm_backward(const gt_add_norm_args *args);

/* ---- wkv_ssm: wkv6 and ssd of one hybrid block ----------------------------------------------------------
 * The two recurrences of a block that runs both branches on the same tokens (Hymba, Dong et al. 2024,
 * arXiv:2411.13676, section 2.1).  With equal `segments` results equal gt_wkv6_... and gt_ssd_... bit for bit.
 *
 * Fill wkv6 and ssd as for the two separate calls.  Fields that both share are in this struct and stay 0 in those:
 * B, T, dtype, state_in_shared, accumulate, segments, cu_seqlens, seq_count, seq_capacity, slots, slot_capacity,
 * tokens, commit, saved, workspace and their bytes.  The fields of pieces (decay_out, pieces, piece_...) also stay 0.
 *
 * Mixed    if `mixed` is set, the call also adds the branches; wkv6.H wkv6.V must then equal ssd.H ssd.P:
 *              mixed = residual + gain_wkv . wkv6.y + gain_ssm . ssd.y
 *          Gains are per channel.  wkv6's kernel adds its own y in fp32 and ssd.y as stored, and rounds once.  It
 *          stores wkv6.y unless NULL.  Backward takes dmixed in place of both dy: they are gain . dmixed, rounded to
 *          dtype.  It reads both y only for dgain_wkv and dgain_ssm.  Set gains and dgains before a query: without
 *          them both dy are dmixed itself, and take no workspace.
 * A caller has one query, one workspace and one saved buffer; all arguments are checked before any launch.  The kernels
 * of both form one chain on the given stream: a kernel that can wait for its predecessor starts before that ends.
 * Backward adds rows of both operators in one launch, if there are at most four such sums.  All other kernels belong to
 * one operator, as in calls of it alone.  A step is two launches; the kernels of both branches run side by side. */
typedef struct gt_wkv_ssm_args {
    int64_t B, T;                          /* of both operators, as all fields here except the two structs */
    gt_dtype dtype;                        /* wkv6.w_dtype and ssd.dt_dtype may differ */
    int state_in_shared;                   /* 1: both state_in and dstate_in are one for the whole batch */
    int accumulate;                        /* 1: adds to all parameter gradients */
    int64_t segments;                      /* 0 = each operator's own choice */
    const int32_t *cu_seqlens, *seq_count; /* packed sequences, as in gt_wkv6_args */
    int64_t seq_capacity;
    const int32_t *slots; /* step only, as in gt_wkv6_args: one row for the states of both */
    int64_t slot_capacity;
    const int32_t *tokens, *commit; /* step only, as in gt_wkv6_args */
    gt_wkv6_args wkv6;
    gt_ssd_args ssd;
    const float *gain_wkv, *gain_ssm; /* in  [wkv6.H,V] and [ssd.H,P], NULL = 1 */
    const void *residual, *dmixed;    /* in  [B,T,wkv6.H,V]; NULL = 0; dmixed: backward, also residual's gradient */
    void *mixed;                      /* out [B,T,wkv6.H,V]  forward, step; may equal residual */
    float *dgain_wkv, *dgain_ssm;     /* out, shapes of the gains, accumulate */
    gt_stride residual_stride, mixed_stride, dmixed_stride;
    void *saved;
    size_t saved_bytes;
    void *workspace;
    size_t workspace_bytes;
} gt_wkv_ssm_args;

/* Writes both y and, unless NULL, both state_out (and saved).  Required: wkv6: r k v w y; ssd: x dt A Bm Cm y. */
GT_FUNCTION gt_status gt_wkv_ssm_forward(const gt_wkv_ssm_args *args, gt_stream stream);
/* Writes the gradients that are not NULL.  Required: wkv6: r k v w dy; ssd: x dt A Bm Cm dy. */
GT_FUNCTION gt_status gt_wkv_ssm_backward(const gt_wkv_ssm_args *args, gt_stream stream);
/* Processes 1 to 16 new tokens per batch element, as gt_wkv6_step and gt_ssd_step do, bit for bit: writes both y and
 * updates both state_out in place.  No workspace.  Required: as forward, and both state_out. */
GT_FUNCTION gt_status gt_wkv_ssm_step(const gt_wkv_ssm_args *args, gt_stream stream);
GT_FUNCTION gt_status gt_wkv_ssm_workspace(const gt_wkv_ssm_args *args, gt_workspace *need);
/* Writes "forward: wkv6 ..., ssd ...; backward: wkv6 ..., ssd ...", with the texts of the two calls.  If a step can
 * have these arguments, "; step: ssd ..., wkv6 ..." follows. */
GT_FUNCTION gt_status gt_wkv_ssm_path(const gt_wkv_ssm_args *args, char *text, size_t bytes);
GT_REF_FUNCTION gt_status gt_ref_wkv_ssm_forward(const gt_wkv_ssm_args *args);
GT_REF_FUNCTION gt_status gt_ref_wkv_ssm_backward(const gt_wkv_ssm_args *args);
GT_REF_FUNCTION gt_status gt_ref_wkv_ssm_step(const gt_wkv_ssm_args *args);

/* ---- conv_ssd: convolution, SiLU, then ssd ------------------------------------------------------------
 * The part of a Mamba-2 block between its projections.  Each row of xBC holds x [H,P], Bm [G,N] and Cm [G,N], in
 * the order of the in-projection's output: D = H P + 2 G N channels.  With conv1d and ssd as above:
 *     c = conv1d(xBC; weight, bias, conv_state_in) with SiLU, rounded to dtype      x, Bm, Cm = the slices of c
 *     y = ssd(x, Bm, Cm, dt, z; A, Dskip, dt_bias, state_in)
 * With `segments` fixed, the results equal the two calls bit for bit.  The gradient of c is rounded to dtype, too.
 * c is never kept: `saved` does not hold it, and backward computes it again in its workspace.  So a model needs memory
 * for c and its gradient once, instead of once a layer.
 * On compute capability 9.0, forward in bf16 does not store c at all if P is a multiple of 64 and N a multiple of 16,
 * at least 32.  Its kernel convolves x as it loads it for the recurrence.  There are three exceptions: a group with a
 * single head of 64, a sequence cut into segments, and xBC or z that is not aligned to 16 bytes.
 * A step does not store c either: two launches convolve, update both states in place and write y.
 * Sources: arXiv:2312.00752, figure 3; Dao and Gu 2024, arXiv:2405.21060, section 6, figure 6 (the sequential block).
 * The kernels take P and N up to 256 (else GT_ERROR_UNSUPPORTED), the CPU twins any. */
typedef struct gt_conv_ssd_args {
    int64_t B, T, H, P, N;
    int64_t G;            /* groups that share Bm and Cm, divides H; 0 = 1 */
    int64_t W;            /* of the convolution: 2, 3 or 4 */
    gt_dtype dtype;       /* xBC z y and their gradients */
    gt_dtype dt_dtype;    /* dt ddt: 0 = dtype, or GT_F32 */
    gt_dtype state_dtype; /* of state_in and state_out in forward, as in gt_wkv6_args; fp32 in all other functions */
    gt_dtype
        conv_state_dtype; /* of conv_state_in, conv_state_out and conv_snapshots, likewise, but without workspace */
    int softplus;         /* 1: softplus(dt + dt_bias) */
    int dt_limit;         /* 1: then clamp to [dt_min, dt_max] */
    float dt_min, dt_max;
    int Dskip_per_channel;      /* 1: Dskip and dDskip are [H,P] */
    int state_in_shared;        /* 1: the whole batch shares one state_in and one conv_state_in, and their gradients */
    int accumulate;             /* 1: adds to dweight dbias dA dDskip ddt_bias, and to gradients of shared states */
    int reads_y;                /* as in gt_ssd_args */
    int64_t segments;           /* of ssd; 0 = automatic */
    const void *xBC;            /* in  [B,T,D] */
    const void *dt;             /* in  [B,T,H] */
    const void *z;              /* in  [B,T,H,P], NULL = no gate */
    const float *weight;        /* in  [D,W], weight[W-1] multiplies the current token */
    const float *bias;          /* in  [D], NULL = 0 */
    const float *A;             /* in  [H] */
    const float *Dskip;         /* in  [H], NULL = 0 */
    const float *dt_bias;       /* in  [H], NULL = 0 */
    const float *conv_state_in; /* in  [B,D,W-1], NULL = 0 */
    const float *state_in;      /* in  [B,H,P,N], NULL = 0 */
    void *y;                    /* out [B,T,H,P]        forward, step; backward reads it if reads_y */
    float *conv_state_out;      /* out [B,D,W-1]        forward, step; may equal conv_state_in if not shared */
    float *state_out;           /* out [B,H,P,N]        forward, step; may equal state_in if not shared */
    const void *dy;             /* in  [B,T,H,P]        backward: gradient of the gated y */
    const float *conv_dstate_out; /* in  [B,D,W-1], NULL = 0 */
    const float *dstate_out;      /* in  [B,H,P,N], NULL = 0 */
    void *dxBC;                   /* out [B,T,D] */
    void *ddt;                    /* out [B,T,H] */
    void *dz;                     /* out [B,T,H,P] */
    float *dweight, *dbias;       /* out [D,W], [D], accumulate */
    float *dA, *ddt_bias;         /* out [H], accumulate */
    float *dDskip;                /* out [H] or [H,P], accumulates */
    float *conv_dstate_in; /* out [B,D,W-1], may equal conv_dstate_out if not shared, as dstate_in of gt_conv1d_args */
    float *dstate_in;      /* out [B,H,P,N], likewise */
    gt_stride xBC_stride, dt_stride, z_stride, y_stride;
    gt_stride dy_stride, dxBC_stride, ddt_stride, dz_stride;
    const int32_t *cu_seqlens, *seq_count; /* packed sequences, as in gt_wkv6_args */
    int64_t seq_capacity;
    const int32_t *slots; /* step and forward, as in gt_wkv6_args: one row for both states */
    int64_t slot_capacity;
    const int32_t *starts_zero;                      /* as in gt_wkv6_args, for both states */
    int64_t conv_state_out_stride, state_out_stride; /* as in gt_wkv6_args */
    const int32_t *tokens, *commit;                  /* step only, as in gt_wkv6_args */
    const int32_t *rounding_seed, *rounding_steps;   /* forward only, as in gt_wkv6_args, of state_out alone */
    void *conv_snapshots;    /* out [B,floor(T/snapshot_every),D,W-1], forward only: as snapshots, of conv_state_out */
    void *snapshots;         /* out [B,floor(T/snapshot_every),H,P,N], forward only, as in gt_wkv6_args */
    int64_t snapshot_every;  /* likewise, for both */
    gt_dtype snapshot_dtype; /* likewise, of snapshots alone */
    void *saved;
    size_t saved_bytes;
    void *workspace;
    size_t workspace_bytes;
} gt_conv_ssd_args;

/* Writes y and, unless NULL, both states (and saved).  Required: xBC dt weight A y. */
GT_FUNCTION gt_status gt_conv_ssd_forward(const gt_conv_ssd_args *args, gt_stream stream);
/* Writes the gradients that are not NULL.  Required: xBC dt weight A dy; optional inputs as in forward.  dz needs z. */
GT_FUNCTION gt_status gt_conv_ssd_backward(const gt_conv_ssd_args *args, gt_stream stream);
/* Processes 1 to 16 new tokens per batch element.  Updates conv_state_out and state_out in place; conv_state_in and
 * state_in are NULL or the same pointers.  The results equal gt_conv1d_step with SiLU, then gt_ssd_step on the slices
 * of its output, bit for bit.  No workspace.  Not packed.  Required: xBC dt weight A y conv_state_out state_out. */
GT_FUNCTION gt_status gt_conv_ssd_step(const gt_conv_ssd_args *args, gt_stream stream);
/* Forward needs memory for c.  Where gt_conv_ssd_path names conv_ssd forward_kernel (compute capability 9.0) it needs
 * memory for Bm and Cm alone.  That depends on the alignment of tensors, as in gt_ssd_workspace. */
GT_FUNCTION gt_status gt_conv_ssd_workspace(const gt_conv_ssd_args *args, gt_workspace *need);
GT_FUNCTION gt_status gt_conv_ssd_path(const gt_conv_ssd_args *args, char *text, size_t bytes);
GT_REF_FUNCTION gt_status gt_ref_conv_ssd_forward(const gt_conv_ssd_args *args);
GT_REF_FUNCTION gt_status gt_ref_conv_ssd_backward(const gt_conv_ssd_args *args);
GT_REF_FUNCTION gt_status gt_ref_conv_ssd_step(const gt_conv_ssd_args *args);

/* ---- wkv4: RWKV-4 time mixing --------------------------------------------------------------------------
 * Per batch element and channel, each y is a weighted mean of the values so far.  The log decay is g = -exp(w) (raw, as
 * RWKV-4 trains it) or g = w (log, as RWKV-4's own kernel takes it):
 *     y_t = (A_{t-1} + exp(u + k_t) v_t) / (B_{t-1} + exp(u + k_t))
 *     A_t = exp(g) A_{t-1} + exp(k_t) v_t        B_t = exp(g) B_{t-1} + exp(k_t)
 * Source: Peng et al. 2023, "RWKV", arXiv:2305.13048, section 3.2 and appendix D.
 * A and B are kept as a exp(p) and b exp(p), so that no exponential overflows for any finite keys.  A key of minus
 * infinity has no weight; if no token has weight, y is 0.  u and g end at +-1e30.  With g > 0 old tokens gain weight.
 * A state is three rows of D numbers, a, b and p, as in RWKV-4.  Any state with b >= 0 is valid.  b = 0 means that
 * there is no token yet, as in a state of zeros.  state_out has b = 1: a is the mean of the values, p the log of the
 * sum of their weights; if no token has weight, all three are 0.  So state_out is a smooth function of the inputs, and
 * the gradient of its b is not read.
 * p of state_out is rounded to fp32, by up to 2^-24 of itself.  With keys of 60000, weights are then 0.2 % off in the
 * steps and calls that follow.  Inside a call there is no such loss.
 * dstate_in: with dA = dL/dA and dB = dL/dB of the first state,
 *     da = exp(p) dA      db = exp(p) dB      dp = a da + b db
 * With T = 0 the state is copied, and so is its gradient. */
typedef struct gt_wkv4_args {
    int64_t B, T, D;
    gt_dtype dtype;          /* k v y and their gradients */
    gt_dtype state_dtype;    /* reserved, 0: states are fp32 */
    gt_decay decay;          /* what w holds */
    int state_in_shared;     /* 1: state_in and dstate_in are [3,D], one for the whole batch */
    int accumulate;          /* 1: adds to dw du, and to dstate_in if shared */
    int64_t segments;        /* 0 = automatic */
    const void *k, *v;       /* in  [B,T,D] */
    const float *w;          /* in  [D] */
    const float *u;          /* in  [D], NULL = 0 */
    const float *state_in;   /* in  [B,3,D], NULL = 0 */
    void *y;                 /* out [B,T,D]          forward, step */
    float *state_out;        /* out [B,3,D]          forward, step; may equal state_in if not shared */
    const void *dy;          /* in  [B,T,D]          backward */
    const float *dstate_out; /* in  [B,3,D], NULL = 0 */
    void *dk, *dv;           /* out [B,T,D] */
    float *dw, *du;          /* out [D], accumulate; dw is dL/dw of w as given */
    float *dstate_in;        /* out [B,3,D], may equal dstate_out if not shared; shared: [3,D], summed over the batch,
                                accumulates */
    gt_stride k_stride, v_stride, y_stride, dy_stride, dk_stride, dv_stride;
    const int32_t *cu_seqlens, *seq_count; /* packed sequences, as in gt_wkv6_args */
    int64_t seq_capacity;
    const int32_t *slots; /* step only, as in gt_wkv6_args */
    int64_t slot_capacity;
    const int32_t *tokens, *commit; /* step only, as in gt_wkv6_args */
    void *saved;
    size_t saved_bytes;
    void *workspace;
    size_t workspace_bytes;
} gt_wkv4_args;

/* Writes y and, unless NULL, state_out (and saved).  Required: k v w y. */
GT_FUNCTION gt_status gt_wkv4_forward(const gt_wkv4_args *args, gt_stream stream);
/* Writes the gradients that are not NULL.  Required: k v w dy; u and state_in as given to forward. */
GT_FUNCTION gt_status gt_wkv4_backward(const gt_wkv4_args *args, gt_stream stream);
/* Processes 1 to 16 new tokens and updates state_out in place, as gt_wkv6_step does. */
GT_FUNCTION gt_status gt_wkv4_step(const gt_wkv4_args *args, gt_stream stream);
GT_FUNCTION gt_status gt_wkv4_workspace(const gt_wkv4_args *args, gt_workspace *need);
GT_FUNCTION gt_status gt_wkv4_path(const gt_wkv4_args *args, char *text, size_t bytes);
GT_REF_FUNCTION gt_status gt_ref_wkv4_forward(const gt_wkv4_args *args);
GT_REF_FUNCTION gt_status gt_ref_wkv4_backward(const gt_wkv4_args *args);
GT_REF_FUNCTION gt_status gt_ref_wkv4_step(const gt_wkv4_args *args);

/* ---- states of int8 -----------------------------------------------------------------------------------------
 * A step of wkv6 and ssd takes states of int8, no other function does.  gt_quantize_states converts B states of fp32
 * to int8 and scales, as a step stores them, rounded to nearest.  gt_dequantize_states converts them back.  The fp32
 * states are packed.  The int8 states and their scales are rows of pools, as state_out and state_scale of a step. */
typedef struct gt_int8_states_args {
    int64_t B;             /* states to convert */
    int64_t rows, columns; /* of a state.  ssd: H P and N; wkv6: H N and V */
    int64_t group;         /* columns that share a scale, 0 = all.  ssd: 0; wkv6: 64 */
    float *state;          /* [B,rows,columns] */
    void *int8;            /* [slot_capacity,rows,columns], of int8_t */
    float *scale;          /* [slot_capacity,rows,ceil(columns/group)] */
    const int32_t *slots; /* in  [B]: state b is row slots[b] of the pools, NULL: row b.  A state whose row lies outside
                              the pools is skipped.  Two states must not have the same row */
    int64_t slot_capacity;             /* 0 = B */
    int64_t int8_stride, scale_stride; /* elements from row to row of the pools; 0 = packed */
} gt_int8_states_args;

GT_FUNCTION gt_status gt_quantize_states(const gt_int8_states_args *args, gt_stream stream);
GT_FUNCTION gt_status gt_dequantize_states(const gt_int8_states_args *args, gt_stream stream);
GT_REF_FUNCTION gt_status gt_ref_quantize_states(const gt_int8_states_args *args);
GT_REF_FUNCTION gt_status gt_ref_dequantize_states(const gt_int8_states_args *args);

/* ---- handlers for XLA --------------------------------------------------------------------------------------
 * gt_OP_forward, gt_OP_backward and gt_OP_step of all operators, as handlers of XLA's foreign function
 * interface.  Only gt_rmsnorm_linear_step has no handler.  JAX and other hosts of XLA call them as docs/xla.md says.
 * They need no file of XLA.  To compile them, one file of the program defines GT_XLA_IMPLEMENTATION before it includes
 * this header.  Handlers for the platform "Host" need the twins, reference/gt_*.c. */
typedef void *(*gt_xla_function)(void *frame); /* an XLA_FFI_Handler */
typedef struct gt_xla_handler {
    const char *name;     /* "gt_xla_ssd_forward", the same on both platforms */
    const char *platform; /* "Host": the twin; "CUDA": the kernels, on the stream of the call */
    gt_xla_function call;
} gt_xla_handler;

/* If GT_API is static, only the file that defines the handlers can call these functions. */
#ifdef GT_XLA_IMPLEMENTATION
#define GT_XLA_FUNCTION GT_FUNCTION
#else
#define GT_XLA_FUNCTION extern
#endif

/* An array of all handlers; a name that is NULL ends it. */
GT_XLA_FUNCTION const gt_xla_handler *gt_xla_handlers(void);
/* Registers all handlers with a host of XLA.  `api` is the host's const XLA_FFI_Api *, version 0.1 or later.  Fails
 * with GT_ERROR_NULL, or with GT_ERROR_UNSUPPORTED and the host's own text. */
GT_XLA_FUNCTION gt_status gt_xla_register(const void *api);

/* ---- host conversions --------------------------------------------------------------------------- */

#ifdef __cplusplus
#define GT_CAST(type, value) static_cast<type>(value)
#else
#define GT_CAST(type, value) ((type)(value))
#endif

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
    if ((u & 0x7fffffffu) > 0x7f800000u) return GT_CAST(uint16_t, (u >> 16) | 0x40u); /* quiet NaN */
    return GT_CAST(uint16_t, (u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
static inline float gt_bf16_to_f32(uint16_t bits) { return gt_bits_float(GT_CAST(uint32_t, bits) << 16); }
static inline uint16_t gt_f32_to_f16(float value) {
    uint32_t u = gt_float_bits(value), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu, m, shift;
    if (a > 0x7f800000u) return GT_CAST(uint16_t, sign | 0x7e00u);  /* NaN */
    if (a >= 0x477ff000u) return GT_CAST(uint16_t, sign | 0x7c00u); /* rounds to 65536 or more */
    if (a >= 0x38800000u) {                                         /* normal: rebias the exponent by 112 */
        a -= 0x38000000u;
        return GT_CAST(uint16_t, sign | ((a + 0xfffu + ((a >> 13) & 1u)) >> 13));
    }
    if (a < 0x33000000u) return GT_CAST(uint16_t, sign); /* under half of the smallest subnormal */
    shift = 126u - (a >> 23);                            /* subnormal: count units of 2^-24 */
    m = (a & 0x7fffffu) | 0x800000u;
    return GT_CAST(uint16_t, sign | ((m + ((1u << (shift - 1)) - 1u) + ((m >> shift) & 1u)) >> shift));
}

static inline float gt_f16_to_f32(uint16_t bits) {
    uint32_t sign = (bits & 0x8000u) << 16, e = (bits >> 10) & 31u, m = bits & 0x3ffu;
    if (e == 31u) return gt_bits_float(sign | 0x7f800000u | (m << 13));
    if (e == 0u) { /* zero or subnormal: m * 2^-24 is exact */
        float a = GT_CAST(float, m) * (1.0f / 16777216.0f);
        return sign ? -a : a;
    }
    return gt_bits_float(sign | ((e + 112u) << 23) | (m << 13));
}
#undef GT_CAST

#ifdef __cplusplus
} /* extern "C" */
#endif
#endif /* GT_KERNELS_H */

/* ==== the implementation, for the one file of a program that asks for it ========================== */

#ifndef GT_DECLARATIONS_ONLY
#if defined(__cplusplus) && defined(__GNUC__) && !defined(__CUDACC__)
#define GT_QUIET /* stubs are C, also in a C++ file with other rules */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wold-style-cast"
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wuseless-cast"
#endif
#endif
#ifdef GT_KERNELS_IMPLEMENTATION
#define GT_CORE_IMPLEMENTATION
#define GT_WKV6_IMPLEMENTATION
#define GT_SSM_IMPLEMENTATION
#define GT_CONV1D_IMPLEMENTATION
#define GT_WKV4_IMPLEMENTATION
#define GT_FUSED_IMPLEMENTATION
#endif
#ifdef GT_CORE_IMPLEMENTATION
#include "gt/base/op_impl.h"
#include "gt/recurrence/int8_states.cuh"
#endif
#ifdef GT_WKV6_IMPLEMENTATION
#include "gt_wkv6.cuh"
#endif
#ifdef GT_SSM_IMPLEMENTATION
#include "gt_ssm.cuh"
#endif
#ifdef GT_CONV1D_IMPLEMENTATION
#include "gt_conv1d.cuh"
#endif
#ifdef GT_WKV4_IMPLEMENTATION
#include "gt_wkv4.cuh"
#endif
#ifdef GT_FUSED_IMPLEMENTATION
#include "gt/fused/conv_ssd_calls.cuh"
#include "gt/fused/wkv_ssm_calls.cuh"
#include "gt_fused.cuh"
#endif
#ifdef GT_XLA_IMPLEMENTATION
#include "gt/xla/handlers.h"
#endif
#ifdef GT_QUIET
#undef GT_QUIET
#pragma GCC diagnostic pop
#endif
#endif
