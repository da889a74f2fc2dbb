/* gt/base/op.h - descriptions of operators for the argument checks of GPU and CPU; not for users.
 *
 * Each operator describes its argument struct once, in a table (gt_op).  gt_prepare reads the table to fill in defaults
 * and to find every bad argument before anything is launched.  The GPU function and its CPU twin (the same operator in
 * plain C) both call gt_prepare.  The tests use the same tables.
 *
 * A letter stands for a size, and a word of letters for a tensor's shape: "BTHN".  Most sizes are fields of the
 * argument struct.  The operator's resolve function sets the others, for example S (states read) and Q (states
 * written). */
#ifndef GT_BASE_OP_H
#define GT_BASE_OP_H

#define GT_DECLARATIONS_ONLY /* excludes the implementation, which needs this file first */
#include "../../gt_kernels.h"
#undef GT_DECLARATIONS_ONLY

#define gt_enter GT_SYMBOL(enter)
#define gt_fail GT_SYMBOL(fail)
#define gt_no_cuda GT_SYMBOL(no_cuda)
#define gt_check_range GT_SYMBOL(check_range)
#define gt_bad_stride GT_SYMBOL(bad_stride)
#define gt_check_reserved GT_SYMBOL(check_reserved)
#define gt_resolve_recurrent GT_SYMBOL(resolve_recurrent)
#define gt_resolve_row_stride GT_SYMBOL(resolve_row_stride)
#define gt_resolve_rounding GT_SYMBOL(resolve_rounding)
#define gt_resolve_scale GT_SYMBOL(resolve_scale)
#define gt_resolve_pieces GT_SYMBOL(resolve_pieces)
#define gt_resolve_snapshots GT_SYMBOL(resolve_snapshots)
#define gt_prepare GT_SYMBOL(prepare)
#define gt_view_of GT_SYMBOL(view_of)
#define gt_op_wkv6 GT_SYMBOL(op_wkv6)
#define gt_op_ssd GT_SYMBOL(op_ssd)
#define gt_op_selective_scan GT_SYMBOL(op_selective_scan)
#define gt_op_conv1d GT_SYMBOL(op_conv1d)
#define gt_op_rmsnorm_linear GT_SYMBOL(op_rmsnorm_linear)
#define gt_op_norm_mix GT_SYMBOL(op_norm_mix)
#define gt_op_norm_gate GT_SYMBOL(op_norm_gate)
#define gt_op_add_norm GT_SYMBOL(op_add_norm)
#define gt_op_wkv_ssm GT_SYMBOL(op_wkv_ssm)
#define gt_op_wkv_ssm_mixed GT_SYMBOL(op_wkv_ssm_mixed)
#define gt_op_conv_ssd GT_SYMBOL(op_conv_ssd)
#define gt_op_wkv4 GT_SYMBOL(op_wkv4)
#define gt_enter_part GT_SYMBOL(enter_part)
#define gt_enter_function GT_SYMBOL(enter_function)
#define gt_noted_kernels GT_SYMBOL(noted_kernels)
#define gt_wkv6_plan GT_SYMBOL(wkv6_plan)
#define gt_wkv6_run GT_SYMBOL(wkv6_run)
#define gt_wkv6_step_in GT_SYMBOL(wkv6_step_in)
#define gt_wkv6_plan_mixed GT_SYMBOL(wkv6_plan_mixed)
#define gt_wkv6_step_mixed GT_SYMBOL(wkv6_step_mixed)
#define gt_wkv6_pass_path GT_SYMBOL(wkv6_pass_path)
#define gt_ssd_plan GT_SYMBOL(ssd_plan)
#define gt_ssd_run GT_SYMBOL(ssd_run)
#define gt_ssd_step_in GT_SYMBOL(ssd_step_in)
#define gt_ssd_pass_path GT_SYMBOL(ssd_pass_path)

/* Marks a function that both the host and kernels call. */
#ifdef __CUDACC__
#define GT_INLINE static __host__ __device__ inline
#else
#define GT_INLINE static inline
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum gt_pass {
    GT_FORWARD = 0,
    GT_BACKWARD = 1,
    GT_STEP = 2,
    GT_SEGMENT = 3,
    GT_SEGMENT_BACKWARD = 4,
    GT_JOIN = 5,
    GT_JOIN_BACKWARD = 6,
    GT_PASSES = 7, /* number of passes that read or write tensors; the values below are not among them */
    GT_QUERY = 7,
    GT_PATH = 8,
    GT_REGISTER = 9 /* gt_xla_register; only gt_enter takes it */
} gt_pass;
typedef enum gt_target { GT_HOST = 0, GT_DEVICE = 1 } gt_target; /* GT_HOST is the CPU twin */

typedef struct gt_tensor {
    const char *name;
    size_t offset;        /* offset of the pointer in the struct */
    size_t stride_offset; /* offset of the strides in the struct, see gt_stride_count; 0: always packed */
    const char *shape;    /* letters of the sizes, slowest first */
    /* Which dtype the tensor has:
     *     'x'  the dtype of activations               'S'  the dtype of states      (gt_step_dtypes)
     *     'X'  the same, with a gt_stride4            'P'  the dtype of parameters  (gt_step_dtypes)
     *     'w'  the companion dtype, `dtype` or fp32   'f'  fp32
     *     'd'  the second companion dtype             'i'  int32     'b'  int8
     *     'n'  the dtype of snapshots  (gt_step_dtypes)
     *     'c'  the dtype of states of a convolution beside those of kind 'S'  (gt_step_dtypes) */
    char kind;
    /* How each pass uses the tensor, one letter per pass; missing letters at the end count as '-':
     *     '-'  unused          'O'  required output        'g'  parameter gradient: optional, accumulates
     *     'I'  required input  'o'  optional output        's'  required, updated in place
     *     'i'  optional input */
    const char *use;
    const char *may_equal; /* name of the tensor that this output may coincide with, or NULL */
} gt_tensor;

/* Returns whether a tensor has a single stride, from row to row.  Tensors [M,*] and states do, except states of conv1d:
 * they have three strides. */
static inline int gt_has_row_stride(const gt_tensor *t) {
    const int is_state = t->shape[0] == 'S' || t->shape[0] == 'Q';
    return t->shape[0] == 'M' || (is_state && (t->kind != 'S' || t->shape[3]));
}

/* Returns whether the tensor has snapshots, whose rows the letter U counts. */
static inline int gt_is_snapshots(const gt_tensor *t) { return t->shape[0] == 'U'; }

/* Returns how many int64_t values the struct has at stride_offset: 1 for rows, 3 for a gt_stride, 4 for a
 * gt_stride4. */
static inline int gt_stride_count(const gt_tensor *t) {
    return !t->stride_offset ? 0 : gt_has_row_stride(t) ? 1 : t->kind == 'X' ? 4 : 3;
}

/* Returns how a pass uses the tensor, as a letter of `use`. */
static inline char gt_use(const gt_tensor *t, gt_pass pass) {
    for (int i = 0; i < (int)pass; i++)
        if (!t->use[i]) return '-';
    return pass < GT_PASSES && t->use[pass] ? t->use[pass] : '-';
}

typedef struct gt_size {
    char letter;
    const char *name;
    size_t offset;
    int64_t min;
} gt_size;

/* Sizes by letter: size B is n['B' - 'A'].  An operator that runs two others in one call uses small letters for the
 * sizes of the second one. */
typedef struct gt_dims {
    int64_t n['z' - 'A' + 1];
} gt_dims;

/* The functions of an operator. */
typedef struct gt_calls {
    gt_status (*pass[GT_PASSES])(const void *args, gt_stream stream); /* NULL: the operator lacks the pass */
    gt_status (*workspace)(const void *args, gt_workspace *need);
    gt_status (*path)(const void *args, char *text, size_t bytes);
} gt_calls;

/* Offsets of the struct's fields that are neither a size nor a tensor.  0 means that the operator lacks the field. */
typedef struct gt_fields {
    size_t workspace, workspace_bytes, saved, saved_bytes;
    size_t segments, seq_capacity, slot_capacity, state_in_shared, pieces;
} gt_fields;

/* A second companion dtype.  If the name is NULL, the operator has none. */
typedef struct gt_companion {
    const char *name;
    size_t offset;
} gt_companion;

/* Which passes take states of 16 bits, if any do.  Only a step takes int8. */
typedef enum gt_state_passes { GT_STATES_OF_STEP = 0, GT_STATES_OF_BOTH = 1, GT_STATES_OF_FORWARD = 2 } gt_state_passes;

/* The fields in which the caller chooses the dtype of states (kind 'S') and of a step's parameters (kind 'P'). */
typedef struct gt_step_dtypes {
    size_t state, parameter; /* offsets of the fields in the struct; 0: no such field */
    const char *parameter_name;
    gt_state_passes passes; /* the passes that take states of 16 bits */
    size_t scale;           /* offset of state_scale; 0: the operator has no int8 states */
    /* offsets of snapshot_dtype and snapshot_every, which only forward takes; 0: the operator has no snapshots */
    size_t snapshot, snapshot_every;
    size_t conv_state; /* offset of conv_state_dtype, the dtype of states of kind 'c' and their snapshots; 0: none */
} gt_step_dtypes;

/* Bytes of an element. */
static inline int gt_dtype_bytes(gt_dtype dtype) { return dtype == GT_F32 ? 4 : dtype == GT_INT8 ? 1 : 2; }

typedef struct gt_op {
    const char *name;
    size_t args_bytes;
    size_t dtype_offset, companion_offset; /* companion_offset: offset of w_dtype or dt_dtype; 0: no such field */
    const char *companion_name;
    size_t accumulate_offset;
    const gt_size *sizes;     /* ends with letter 0 */
    const gt_tensor *tensors; /* ends with name NULL */
    /* Fills the operator's own defaults into *args, sets the sizes that are not fields, and checks the operator's own
     * fields. */
    gt_status (*resolve)(void *args, gt_pass pass, gt_dims *dims);
    gt_calls calls;
    gt_fields fields;
    gt_companion second;
    gt_step_dtypes of_steps;
} gt_op;

/* Returns the offset of the field that holds the dtype of a tensor.  0 means that the tensor is fp32, int32 or int8. */
static inline size_t gt_dtype_field(const gt_op *op, const gt_tensor *t) {
    switch (t->kind) {
    case 'x':
    case 'X': return op->dtype_offset;
    case 'w': return op->companion_offset;
    case 'd': return op->second.offset;
    case 'S': return op->of_steps.state;
    case 'P': return op->of_steps.parameter;
    case 'n': return op->of_steps.snapshot;
    case 'c': return op->of_steps.conv_state;
    default: return 0;
    }
}

#define GT_NO_SECOND                                                                                                   \
    { NULL, 0 }
#define GT_NO_STEP_DTYPES                                                                                              \
    { 0, 0, NULL, GT_STATES_OF_STEP, 0, 0, 0, 0 }

/* Macros that define the functions in an operator's table.  These functions take void pointers instead of the
 * operator's struct.  GT_WRAP_CALLS also defines gt_OP_args_size. */
#define GT_WRAP_PASS(op, pass)                                                                                         \
    static gt_status gt_call_##op##_##pass(const void *args, gt_stream stream) {                                       \
        return gt_##op##_##pass((const gt_##op##_args *)args, stream);                                                 \
    }
#define GT_WRAP_CALLS(op)                                                                                              \
    GT_WRAP_PASS(op, forward)                                                                                          \
    GT_WRAP_PASS(op, backward)                                                                                         \
    static gt_status gt_call_##op##_workspace(const void *args, gt_workspace *need) {                                  \
        return gt_##op##_workspace((const gt_##op##_args *)args, need);                                                \
    }                                                                                                                  \
    static gt_status gt_call_##op##_path(const void *args, char *text, size_t bytes) {                                 \
        return gt_##op##_path((const gt_##op##_args *)args, text, bytes);                                              \
    }                                                                                                                  \
    GT_API size_t gt_##op##_args_size(void) { return sizeof(gt_##op##_args); }
#define GT_WRAP_PIECES(op)                                                                                             \
    GT_WRAP_PASS(op, segment)                                                                                          \
    GT_WRAP_PASS(op, segment_backward)                                                                                 \
    GT_WRAP_PASS(op, join)                                                                                             \
    GT_WRAP_PASS(op, join_backward)
#define GT_STEP_AND_PIECES(op)                                                                                         \
    gt_call_##op##_step, gt_call_##op##_segment, gt_call_##op##_segment_backward, gt_call_##op##_join,                 \
        gt_call_##op##_join_backward
/* The variable arguments are the passes beyond forward and backward: gt_call_OP_step, GT_STEP_AND_PIECES(OP), or
 * NULL. */
#define GT_CALLS(op, ...)                                                                                              \
    { {gt_call_##op##_forward, gt_call_##op##_backward, __VA_ARGS__}, gt_call_##op##_workspace, gt_call_##op##_path }

/* The layout of one tensor's elements in one call. */
typedef struct gt_view {
    char *data;
    int rank;                   /* number of indices whose size is not 1 */
    int64_t size[4], stride[4]; /* strides in bytes */
    int64_t count;              /* number of elements */
    int element;                /* bytes of an element */
} gt_view;

/* Records the public function that this thread has entered, for messages of gt_fail: "gt_OP_PASS" or, for a CPU twin,
 * "gt_ref_OP_PASS". */
GT_FUNCTION void gt_enter(gt_target target, const char *op, gt_pass pass);
/* The same for a function that belongs to no operator: "gt_" or "gt_ref_", followed by `name`. */
GT_FUNCTION void gt_enter_function(gt_target target, const char *name);

/* Records "<function>: <text>" as this thread's last error and returns `status`. */
GT_FUNCTION gt_status gt_fail(gt_status status, const char *format, ...);

/* Puts `part` before the field's name in messages of gt_fail, until the next gt_enter.  `part` is "ssd." for fields of
 * the struct ssd inside the argument struct, and "" for the argument struct's own fields. */
GT_FUNCTION void gt_enter_part(const char *part);

/* Returns the address of this thread's pointer to a KernelList (launch.cuh).  All objects of the program share this
 * pointer.  If it is not NULL, launches are recorded in the list instead of run on the GPU. */
GT_FUNCTION void **gt_noted_kernels(void);

/* What wkv6 adds to its output in a mixed call of wkv_ssm (wkv_ssm_table.h).  Its y is then
 *     residual + gain_wkv . y + gain_ssm . ssm
 * Channel c of ssm, the output of ssd, is [c / P, c % P]. */
typedef struct gt_mix {
    void *y; /* NULL, or memory for y alone */
    const void *ssm, *residual;
    const float *gain_wkv, *gain_ssm;
    gt_stride y_stride, ssm_stride, residual_stride;
    int64_t P;
} gt_mix;

/* Functions with which one operator enqueues a pass of another among its own launches: see gt/recurrence/stages.cuh.
 * gt_OP_plan checks the arguments and makes the plan, a PassPlan.  The caller compares the plan's `bytes` and `saved`
 * with its buffers.  If is_query is 1, pointers may be NULL, as in a size query.
 * gt_OP_run launches one stage of the plan.  `stage` is a Stage, `chain` points to a Chain.
 * gt_OP_step_in is gt_OP_step inside the caller's Chain.
 * gt_OP_pass_path writes the part of gt_OP_path that describes one pass.
 * gt_wkv6_plan_mixed and gt_wkv6_step_mixed are gt_wkv6_plan of forward and gt_wkv6_step_in, with a gt_mix. */
GT_FUNCTION gt_status gt_wkv6_plan(gt_pass pass, int is_query, const gt_wkv6_args *args, void *plan);
GT_FUNCTION gt_status gt_wkv6_run(const void *plan, int stage, void *chain);
GT_FUNCTION gt_status gt_wkv6_step_in(const gt_wkv6_args *args, void *chain);
GT_FUNCTION gt_status gt_wkv6_plan_mixed(int is_query, const gt_wkv6_args *args, const gt_mix *mix, void *plan);
GT_FUNCTION gt_status gt_wkv6_step_mixed(const gt_wkv6_args *args, const gt_mix *mix, void *chain);
GT_FUNCTION gt_status gt_wkv6_pass_path(gt_pass pass, const gt_wkv6_args *args, char *text, size_t bytes);
GT_FUNCTION gt_status gt_ssd_plan(gt_pass pass, int is_query, const gt_ssd_args *args, void *plan);
GT_FUNCTION gt_status gt_ssd_run(const void *plan, int stage, void *chain);
GT_FUNCTION gt_status gt_ssd_step_in(const gt_ssd_args *args, void *chain);
GT_FUNCTION gt_status gt_ssd_pass_path(gt_pass pass, const gt_ssd_args *args, char *text, size_t bytes);

/* Sets a query's answer to zeros.  Every query starts with this, so that a failed query still has an answer. */
static inline void gt_no_answer(gt_workspace *need) {
    const gt_workspace none = {0, 0, 0, 0, 0};
    if (need) *need = none;
}

/* Sets the text of gt_OP_path to "", so that a failed call still leaves a text. */
static inline void gt_no_text(char *text, size_t bytes) {
    if (text && bytes > 0) text[0] = 0;
}

/* Records and returns the error of every stub: this build has no CUDA part. */
GT_FUNCTION gt_status gt_no_cuda(const gt_op *op, gt_pass pass);

/* The largest size; the largest number of elements of a tensor; the largest number of elements that one index spans.
 * Within these limits no operator's count of elements or bytes overflows 64 bits.  An array of scratch memory has at
 * most 2^12 times the elements of the largest tensor.  Example: a state of up to 256 columns for every token and
 * head. */
#define GT_MAX_SIZE ((int64_t)1 << 40)
#define GT_MAX_COUNT ((int64_t)1 << 48)
#define GT_MAX_SPAN ((int64_t)1 << 56)

/* a * b and a + b for a, b >= 0, or INT64_MAX if the result does not fit. */
GT_INLINE int64_t gt_times(int64_t a, int64_t b) { return b > 0 && a > INT64_MAX / b ? INT64_MAX : a * b; }
GT_INLINE int64_t gt_plus(int64_t a, int64_t b) { return a > INT64_MAX - b ? INT64_MAX : a + b; }

/* Fails with `status` unless min <= value <= max. */
GT_FUNCTION gt_status gt_check_range(gt_status status, const char *field, int64_t value, int64_t min, int64_t max);

/* Fails with GT_ERROR_STRIDE.  The message quotes the tensor's strides in the struct. */
GT_FUNCTION gt_status gt_bad_stride(const gt_tensor *t, const void *args, const char *why);

/* Fails unless a reserved field is 0. */
GT_FUNCTION gt_status gt_check_reserved(const char *field, int64_t value);

/* The fields that all recurrent operators share.  gt_resolve_recurrent sets the sizes S (states read), Q (states
 * written) and L (entries of `slots`).  In a packed call it also sets C and E, the lengths of cu_seqlens and seq_count;
 * otherwise they stay 0.  The function refuses arguments that belong to another pass. */
typedef struct gt_recurrence {
    int64_t B, T, segments, seq_capacity, slot_capacity;
    int state_in_shared;
    const float *state_in, *state_out;
    const int32_t *cu_seqlens, *seq_count, *slots, *tokens, *commit;
    int has_pools; /* forward takes slots */
    const int32_t *starts_zero;
} gt_recurrence;
GT_FUNCTION gt_status gt_resolve_recurrent(const gt_recurrence *fields, gt_pass pass, gt_dims *dims);

/* Checks `stride`, the distance between the rows of states in a pool.  `name` is the field's name.  In a pass without a
 * pool the stride must be 0.  Call this function after gt_resolve_recurrent. */
GT_FUNCTION gt_status gt_resolve_row_stride(const char *name, int64_t stride, const gt_recurrence *fields, gt_pass pass,
                                            const gt_dims *dims);

/* Initialises a gt_recurrence from an argument struct.  The states are separate macro arguments, since wkv_ssm keeps
 * them in inner structs.  `segments` is separate, too, since conv1d has no such field. */
#define GT_RECURRENCE(a, segments, state_in, state_out)                                                                \
    {                                                                                                                  \
        (a)->B, (a)->T, segments, (a)->seq_capacity, (a)->slot_capacity, (a)->state_in_shared, state_in, state_out,    \
            (a)->cu_seqlens, (a)->seq_count, (a)->slots, (a)->tokens, (a)->commit, 0, NULL                             \
    }
/* Marks an operator whose forward also takes slots. */
#define GT_TAKE_POOLS(recurrence, a) ((recurrence).has_pools = 1, (recurrence).starts_zero = (a)->starts_zero)
/* Entries of an operator's table: the tensors of steps, the tensors of packed sequences, and the gt_fields.  They use
 * GT_AT, which the table's file defines. */
#define GT_INT32_TENSOR(x, shape, use)                                                                                 \
    { #x, GT_AT(x), 0, shape, 'i', use, NULL }
#define GT_STEP_TENSORS                                                                                                \
    GT_INT32_TENSOR(slots, "B", "--i"), GT_INT32_TENSOR(tokens, "B", "--i"), GT_INT32_TENSOR(commit, "B", "--i")
/* The tensors of steps for an operator whose forward also takes slots. */
#define GT_POOL_TENSORS                                                                                                \
    GT_INT32_TENSOR(slots, "L", "i-i"), GT_INT32_TENSOR(starts_zero, "L", "i"), GT_INT32_TENSOR(tokens, "B", "--i"),   \
        GT_INT32_TENSOR(commit, "B", "--i")
#define GT_SEQUENCE_TENSORS(use) GT_INT32_TENSOR(cu_seqlens, "C", use), GT_INT32_TENSOR(seq_count, "E", use)
#define GT_RECURRENT_FIELDS(pieces)                                                                                    \
    {                                                                                                                  \
        GT_AT(workspace), GT_AT(workspace_bytes), GT_AT(saved), GT_AT(saved_bytes), GT_AT(segments),                   \
            GT_AT(seq_capacity), GT_AT(slot_capacity), GT_AT(state_in_shared), pieces                                  \
    }

static inline int gt_is_join(gt_pass pass) { return pass == GT_JOIN || pass == GT_JOIN_BACKWARD; }

/* Checks the fields of stochastic rounding, and sets the size Y, the number of words of a seed.  Call this function
 * after the dtypes are filled in. */
GT_FUNCTION gt_status gt_resolve_rounding(const int32_t *seed, const int32_t *steps, gt_dtype state_dtype, gt_pass pass,
                                          gt_dims *dims);
#define GT_ROUNDING_TENSORS GT_INT32_TENSOR(rounding_seed, "Y", "i-i"), GT_INT32_TENSOR(rounding_steps, "L", "i-i")

/* Checks the scales of int8 states.  Sets the size I, the number of scales of a row of a state.  I is `of_row` for
 * int8.  For other dtypes I is 0, so that state_scale has no elements.  Call this function after the dtypes are filled
 * in, and S and Q are set. */
GT_FUNCTION gt_status gt_resolve_scale(const float *scale, int64_t stride, gt_dtype state_dtype, int64_t of_row,
                                       gt_pass pass, gt_dims *dims);
#define GT_SCALE_TENSOR(shape)                                                                                         \
    { "state_scale", GT_AT(state_scale), GT_AT(state_scale_stride), shape, 'f', "--s", NULL }

/* Checks the fields of snapshots, and sets the size U, the number of rows of snapshots of all batch elements.
 * name: the tensor of snapshots.  is_set: whether its pointer is set. */
GT_FUNCTION gt_status gt_resolve_snapshots(const char *name, int is_set, int64_t every, gt_pass pass, gt_dims *dims);
/* snapshot_every is a multiple of this. */
#define GT_SNAPSHOT_TOKENS 128
#define GT_SNAPSHOT_TENSOR(x, shape)                                                                                   \
    { #x, GT_AT(x), 0, shape, 'n', "o", NULL }

/* Sets the size R, the number of pieces.  A join has no tokens, so the function turns T = 0 into 1; otherwise the call
 * would count as empty. */
GT_FUNCTION gt_status gt_resolve_pieces(int64_t *pieces, int64_t *T, gt_pass pass, gt_dims *dims);

/* Copies *args to *filled, where it replaces default sizes, dtypes and strides by their values.  Then checks everything
 * that `pass` uses, and sets *dims.  GT_QUERY and GT_PATH check sizes and flags but no pointers. */
GT_FUNCTION gt_status gt_prepare(const gt_op *op, gt_pass pass, gt_target target, const void *args, void *filled,
                                 gt_dims *dims);

/* Returns the view of one tensor of a prepared struct. */
GT_FUNCTION gt_view gt_view_of(const gt_op *op, const gt_tensor *tensor, const void *filled, const gt_dims *dims);

/* Chunk slots.  A packed sequence is cut into chunks of `size` tokens; its last chunk may be shorter.  In arrays with
 * one entry per chunk, chunk c of sequence s has slot
 *     cu_seqlens[s] / size + min(s, cu_seqlens[s]) + c.
 * No two chunks share a slot: from s to s + 1 the first two terms together grow by at least the number of chunks of s.
 * All slots are below T / size + min(T, seq_capacity).  So the host, which knows only the capacities, can size the
 * arrays and start a block per slot.  The block finds its chunk, if there is one, by gt_chunk_at. */
typedef struct gt_chunk {
    int64_t sequence;    /* -1: no chunk has this slot */
    int64_t first, last; /* tokens first ... last-1 */
} gt_chunk;

GT_INLINE int64_t gt_chunk_slots(int64_t T, int64_t seq_capacity, int64_t size) {
    return T / size + (T < seq_capacity ? T : seq_capacity);
}

GT_INLINE int64_t gt_chunk_slot(const int32_t *cu_seqlens, int64_t size, int64_t sequence, int64_t chunk) {
    const int64_t first = cu_seqlens[sequence];
    return first / size + (first < sequence ? first : sequence) + chunk;
}

GT_INLINE gt_chunk gt_chunk_at(const int32_t *cu_seqlens, int64_t count, int64_t size, int64_t slot) {
    gt_chunk c = {-1, 0, 0};
    int64_t low = 0, high = count; /* search for the last sequence whose first slot is at most `slot` */
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (gt_chunk_slot(cu_seqlens, size, middle, 0) <= slot)
            low = middle;
        else
            high = middle;
    }
    if (low == count) return c;
    c.first = cu_seqlens[low] + (slot - gt_chunk_slot(cu_seqlens, size, low, 0)) * size;
    if (c.first >= cu_seqlens[low + 1]) return c;
    c.sequence = low;
    c.last = c.first + size < cu_seqlens[low + 1] ? c.first + size : cu_seqlens[low + 1];
    return c;
}

GT_FUNCTION const gt_op *gt_op_wkv6(void);
GT_FUNCTION const gt_op *gt_op_ssd(void);
GT_FUNCTION const gt_op *gt_op_selective_scan(void);
GT_FUNCTION const gt_op *gt_op_conv1d(void);
GT_FUNCTION const gt_op *gt_op_rmsnorm_linear(void);
GT_FUNCTION const gt_op *gt_op_norm_mix(void);
GT_FUNCTION const gt_op *gt_op_norm_gate(void);
GT_FUNCTION const gt_op *gt_op_add_norm(void);
GT_FUNCTION const gt_op *gt_op_wkv_ssm(void);
GT_FUNCTION const gt_op *gt_op_wkv_ssm_mixed(void);
GT_FUNCTION const gt_op *gt_op_conv_ssd(void);
GT_FUNCTION const gt_op *gt_op_wkv4(void);

#ifdef __cplusplus
}
#endif

#endif
