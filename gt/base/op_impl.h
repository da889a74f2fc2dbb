/* gt/base/op_impl.h - the core of the library (plain C): version, messages, and gt_prepare.  gt_prepare checks the
 * arguments of every operator against the operator's table (op.h), for GPU functions and CPU twins.  Exactly one object
 * of a program contains this code. */
#ifndef GT_BASE_OP_IMPL_H
#define GT_BASE_OP_IMPL_H

#include "op.h"

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

static GT_THREAD_LOCAL char gt_function_name[64];        /* the public function that this thread is in */
static GT_THREAD_LOCAL const char *gt_field_prefix = ""; /* stands before names of fields in messages: see
                                                          * gt_enter_part */
static GT_THREAD_LOCAL char gt_error_text[512];
static GT_THREAD_LOCAL void *gt_noted_list; /* a KernelList of launch.cuh, or NULL */

GT_API int gt_version(void) { return GT_VERSION; }
GT_API size_t gt_int8_states_args_size(void) { return sizeof(gt_int8_states_args); }
GT_API void **gt_noted_kernels(void) { return &gt_noted_list; }

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

GT_API void gt_enter(gt_target target, const char *op, gt_pass pass) {
    static const char *const passes[] = {"forward", "backward",      "step",      "segment", "segment_backward",
                                         "join",    "join_backward", "workspace", "path",    "register"};
    snprintf(gt_function_name, sizeof gt_function_name, "gt_%s%s_%s", target == GT_HOST ? "ref_" : "", op,
             passes[pass]);
    gt_field_prefix = "";
}

GT_API void gt_enter_function(gt_target target, const char *name) {
    snprintf(gt_function_name, sizeof gt_function_name, "gt_%s%s", target == GT_HOST ? "ref_" : "", name);
    gt_field_prefix = "";
}

GT_API void gt_enter_part(const char *part) { gt_field_prefix = part; }

GT_API gt_status gt_fail(gt_status status, const char *format, ...) {
    int used = snprintf(gt_error_text, sizeof gt_error_text, "%s: %s", gt_function_name, gt_field_prefix);
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

GT_API gt_status gt_check_range(gt_status status, const char *field, int64_t value, int64_t min, int64_t max) {
    if (value >= min && value <= max) return GT_OK;
    if (max == GT_MAX_SIZE && value < min)
        return gt_fail(status, "%s = %lld: must be at least %lld", field, (long long)value, (long long)min);
    return gt_fail(status, "%s = %lld: must be %lld to %lld", field, (long long)value, (long long)min, (long long)max);
}

GT_API gt_status gt_check_reserved(const char *field, int64_t value) {
    if (value == 0) return GT_OK;
    return gt_fail(GT_ERROR_UNSUPPORTED, "%s = %lld: reserved, must be 0", field, (long long)value);
}

/* Sets the sizes Q and S of a forward pass whose states are rows of a pool.  field: the argument that asks for the
 * pool; messages name it. */
static gt_status gt_resolve_pool(const gt_recurrence *f, const char *field, gt_dims *dims) {
    if (f->seq_capacity == 0)
        return gt_fail(GT_ERROR_VALUE, "%s is set: forward uses it only with packed sequences, but seq_capacity = 0",
                       field);
    if (!f->slots)
        return gt_fail(GT_ERROR_VALUE, "%s is set: forward uses it only with slots, but slots is NULL", field);
    if (f->state_in_shared)
        return gt_fail(GT_ERROR_VALUE,
                       "state_in_shared = 1: must be 0 with slots, because every sequence has its own state");
    dims->n['Q' - 'A'] = dims->n['S' - 'A'] = f->slot_capacity ? f->slot_capacity : f->seq_capacity;
    return gt_check_range(GT_ERROR_SIZE, "slot_capacity", f->slot_capacity, 0, GT_MAX_SIZE);
}

/* Sets the sizes Q and S, the rows of states that a call writes and reads.  Checks that the pass accepts the given
 * states and the fields that belong to steps. */
static gt_status gt_resolve_states(const gt_recurrence *f, gt_pass pass, gt_dims *dims) {
    int64_t *S = &dims->n['S' - 'A'], *Q = &dims->n['Q' - 'A'];
    gt_status status;
    if ((status = gt_check_range(GT_ERROR_VALUE, "segments", f->segments, 0, GT_MAX_SIZE)) ||
        (status = gt_check_range(GT_ERROR_VALUE, "state_in_shared", f->state_in_shared, 0, 1)))
        return status;
    *Q = f->seq_capacity ? f->seq_capacity : f->B;
    *S = f->state_in_shared ? 1 : *Q;
    if (pass == GT_QUERY) return GT_OK;
    if (pass == GT_SEGMENT_BACKWARD && f->state_in_shared)
        return gt_fail(GT_ERROR_VALUE, "state_in_shared = 1: must be 0, because dstate_in of a piece is not shared");
    if (f->starts_zero && !(pass == GT_FORWARD && f->slots))
        return gt_fail(GT_ERROR_VALUE, "starts_zero is set: only forward with slots uses it");
    if (pass != GT_STEP) {
        const int has_pool = f->has_pools && pass == GT_FORWARD;
        const char *of_pools = f->slots ? "slots" : f->slot_capacity ? "slot_capacity" : NULL;
        const char *of_steps = f->tokens ? "tokens" : f->commit ? "commit" : has_pool ? NULL : of_pools;
        if (of_steps) return gt_fail(GT_ERROR_VALUE, "%s is set: only the step function uses it", of_steps);
        return of_pools ? gt_resolve_pool(f, of_pools, dims) : GT_OK;
    }
    if (f->state_in_shared)
        return gt_fail(GT_ERROR_VALUE,
                       "state_in_shared = 1: must be 0, because a step updates one state per batch element");
    if (f->state_in && f->state_in != f->state_out)
        return gt_fail(GT_ERROR_VALUE,
                       "state_in = %p: must be NULL or equal state_out, which is "
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
    gt_status status = gt_check_range(GT_ERROR_SIZE, "seq_capacity", f->seq_capacity, 0, INT32_MAX - 1);
    if (status != GT_OK) return status;
    dims->n['L' - 'A'] = f->seq_capacity ? f->seq_capacity : f->B;
    if (f->seq_capacity == 0) {
        if (f->cu_seqlens || f->seq_count)
            return gt_fail(GT_ERROR_SIZE, "seq_capacity = 0: %s is set, so it must be at least 1", gt_packed_field(f));
        return gt_resolve_states(f, pass, dims);
    }
    if (pass == GT_STEP)
        return gt_fail(GT_ERROR_VALUE, "seq_capacity = %lld: must be 0, because a step has no packed sequences",
                       (long long)f->seq_capacity);
    if (gt_is_join(pass))
        return gt_fail(GT_ERROR_VALUE, "seq_capacity = %lld: must be 0; B gives the number of states",
                       (long long)f->seq_capacity);
    if (f->B != 1) return gt_fail(GT_ERROR_SIZE, "B = %lld: must be 1 with packed sequences", (long long)f->B);
    if (f->T > INT32_MAX)
        return gt_fail(GT_ERROR_SIZE, "T = %lld: must be at most %lld with packed sequences", (long long)f->T,
                       (long long)INT32_MAX);
    if (pass != GT_QUERY && !f->cu_seqlens)
        return gt_fail(GT_ERROR_NULL, "cu_seqlens is NULL, but seq_capacity = %lld", (long long)f->seq_capacity);
    if ((status = gt_resolve_states(f, pass, dims)) != GT_OK) return status;
    dims->n['C' - 'A'] = f->seq_capacity + 1;
    dims->n['E' - 'A'] = 1;
    return GT_OK;
}

GT_API gt_status gt_resolve_row_stride(const char *name, int64_t stride, const gt_recurrence *f, gt_pass pass,
                                       const gt_dims *dims) {
    const int64_t rows = dims->n['Q' - 'A'];
    if (stride == 0) return GT_OK;
    if (pass != GT_STEP && pass != GT_QUERY && !(pass == GT_FORWARD && f->slots))
        return gt_fail(GT_ERROR_STRIDE, "%s = %lld: only the step function and forward with slots use it", name,
                       (long long)stride);
    if (stride < 0) return gt_fail(GT_ERROR_STRIDE, "%s = %lld: must not be negative", name, (long long)stride);
    if (stride > GT_MAX_SPAN || (rows > 0 && stride > GT_MAX_SPAN / rows))
        return gt_fail(GT_ERROR_STRIDE, "%s = %lld: spans more than 2^56 elements", name, (long long)stride);
    return GT_OK;
}

GT_API gt_status gt_resolve_rounding(const int32_t *seed, const int32_t *steps, gt_dtype state_dtype, gt_pass pass,
                                     gt_dims *dims) {
    const char *const given = seed ? "rounding_seed" : "rounding_steps", *const other =
                                                                             seed ? "rounding_steps" : "rounding_seed";
    dims->n['Y' - 'A'] = 2;
    if (pass == GT_QUERY || (!seed && !steps)) return GT_OK;
    if (pass != GT_STEP && pass != GT_FORWARD)
        return gt_fail(GT_ERROR_VALUE, "%s is set: only forward and the step function use it", given);
    if (!seed || !steps) return gt_fail(GT_ERROR_NULL, "%s is NULL, but %s is set", other, given);
    if (state_dtype == GT_F32)
        return gt_fail(GT_ERROR_DTYPE, "rounding_seed is set, but state_dtype = %d: states in fp32 are not rounded",
                       (int)state_dtype);
    return GT_OK;
}

GT_API gt_status gt_resolve_scale(const float *scale, int64_t stride, gt_dtype state_dtype, int64_t of_row,
                                  gt_pass pass, gt_dims *dims) {
    const int64_t rows = dims->n['Q' - 'A'];
    dims->n['I' - 'A'] = state_dtype == GT_INT8 ? of_row : 0;
    if (pass == GT_QUERY) return GT_OK;
    if (pass == GT_STEP && scale && state_dtype != GT_INT8)
        return gt_fail(GT_ERROR_VALUE, "state_scale is set, but state_dtype = %d: only states of GT_INT8 have scales",
                       (int)state_dtype);
    if (stride == 0) return GT_OK;
    if (state_dtype != GT_INT8)
        return gt_fail(GT_ERROR_STRIDE, "state_scale_stride = %lld: only a step with states of GT_INT8 uses it",
                       (long long)stride);
    if (stride < 0)
        return gt_fail(GT_ERROR_STRIDE, "state_scale_stride = %lld: must not be negative", (long long)stride);
    if (stride > GT_MAX_SPAN || (rows > 0 && stride > GT_MAX_SPAN / rows))
        return gt_fail(GT_ERROR_STRIDE, "state_scale_stride = %lld: spans more than 2^56 elements", (long long)stride);
    return GT_OK;
}

GT_API gt_status gt_resolve_snapshots(const char *name, int is_set, int64_t every, gt_pass pass, gt_dims *dims) {
    dims->n['U' - 'A'] = 0;
    if (every < 0 || every % GT_SNAPSHOT_TOKENS)
        return gt_fail(GT_ERROR_VALUE, "snapshot_every = %lld: must be 0 or a positive multiple of %d",
                       (long long)every, GT_SNAPSHOT_TOKENS);
    if (pass != GT_FORWARD && pass != GT_QUERY)
        return every ? gt_fail(GT_ERROR_VALUE, "snapshot_every = %lld: only forward uses it", (long long)every) : GT_OK;
    if (is_set && !every && pass == GT_FORWARD) /* a query does not know the pass yet */
        return gt_fail(GT_ERROR_VALUE, "snapshot_every = 0: must be positive, because %s is set", name);
    if (every) dims->n['U' - 'A'] = gt_times(dims->n['B' - 'A'], dims->n['T' - 'A'] / every);
    return GT_OK;
}

GT_API gt_status gt_resolve_pieces(int64_t *pieces, int64_t *T, gt_pass pass, gt_dims *dims) {
    if (*pieces == 0) *pieces = 1;
    dims->n['R' - 'A'] = *pieces;
    if (gt_is_join(pass) && *T == 0) *T = dims->n['T' - 'A'] = 1;
    return gt_check_range(GT_ERROR_SIZE, "pieces", *pieces, 1, GT_MAX_SIZE);
}

static int64_t gt_larger(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t gt_smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* ---- views and overlap ---- */

static int gt_used(const gt_tensor *t, gt_pass pass) { return gt_use(t, pass) != '-'; }

static int gt_written(const gt_tensor *t, gt_pass pass) {
    const char use = gt_use(t, pass);
    return use == 'O' || use == 'o' || use == 'g' || use == 's';
}

static void *gt_pointer(const gt_tensor *t, const void *filled) {
    void *p;
    memcpy(&p, (const char *)filled + t->offset, sizeof p);
    return p;
}

static int gt_element_size(const gt_op *op, const gt_tensor *t, const void *filled) {
    gt_dtype dtype;
    const size_t offset = gt_dtype_field(op, t);
    if (!offset) return t->kind == 'b' ? 1 : 4;
    memcpy(&dtype, (const char *)filled + offset, sizeof dtype);
    return gt_dtype_bytes(dtype);
}

/* Gets the strides of all indices in elements, slowest first.  Indices without a stride in the struct are packed. */
static void gt_element_strides(const gt_tensor *t, const void *filled, const int64_t *size, int rank, int64_t *stride) {
    int64_t packed = 1;
    for (int i = rank - 1; i >= 0; i--) {
        stride[i] = gt_smaller(packed, GT_MAX_SPAN);
        packed = gt_times(packed, size[i]);
    }
    memcpy(stride, (const char *)filled + t->stride_offset, (size_t)gt_stride_count(t) * sizeof stride[0]);
}

GT_API gt_view gt_view_of(const gt_op *op, const gt_tensor *t, const void *filled, const gt_dims *dims) {
    gt_view v;
    int rank = (int)strlen(t->shape);
    int64_t size[4], stride[4];
    memset(&v, 0, sizeof v);
    v.data = (char *)gt_pointer(t, filled);
    v.element = gt_element_size(op, t, filled);
    v.count = 1;
    for (int i = 0; i < rank; i++) {
        size[i] = dims->n[t->shape[i] - 'A'];
        v.count = gt_times(v.count, size[i]);
    }
    gt_element_strides(t, filled, size, rank, stride);
    for (int i = 0; i < rank; i++) {
        if (size[i] == 1) continue;
        v.size[v.rank] = size[i];
        v.stride[v.rank++] = stride[i] * v.element;
    }
    return v;
}

/* Returns the bytes from the start of the first element to the end of the last one.  The function counts only indices
 * with stride < limit. */
static int64_t gt_extent(const gt_view *v, int64_t limit) {
    int64_t bytes = v->element;
    for (int i = 0; i < v->rank; i++)
        if (v->stride[i] < limit) bytes += (v->size[i] - 1) * v->stride[i];
    return bytes;
}

/* Returns whether all strides of m bytes or more are multiples of m. */
static int gt_multiples(const gt_view *v, int64_t m) {
    for (int i = 0; i < v->rank; i++)
        if (v->stride[i] >= m && v->stride[i] % m) return 0;
    return 1;
}

/* Returns whether two elements of one tensor may share memory.  The function accepts nested strides only: every stride
 * must be at least the extent of all indices with smaller strides. */
static int gt_overlaps_itself(const gt_view *v) {
    for (int i = 0; i < v->rank; i++) {
        if (v->stride[i] < gt_extent(v, v->stride[i])) return 1;
        for (int j = 0; j < i; j++)
            if (v->stride[i] == v->stride[j]) return 1;
    }
    return 0;
}

/* Returns whether two tensors are separate columns of one buffer.  The function tries every stride m of `a` as the
 * length of the buffer's rows.  Within a row each tensor covers one range of bytes, and the two ranges must not
 * meet. */
static int gt_interleaved(const gt_view *a, const gt_view *b) {
    uintptr_t pa = (uintptr_t)a->data, pb = (uintptr_t)b->data;
    for (int i = 0; i < a->rank; i++) {
        int64_t m = a->stride[i], in_row_a, in_row_b, d;
        if (!gt_multiples(a, m) || !gt_multiples(b, m)) continue;
        in_row_a = gt_extent(a, m);
        in_row_b = gt_extent(b, m);
        d = pb >= pa ? (int64_t)((pb - pa) % (uint64_t)m) : (m - (int64_t)((pa - pb) % (uint64_t)m)) % m;
        if (d >= in_row_a && d + in_row_b <= m) return 1;
    }
    return 0;
}

static int gt_disjoint(const gt_view *a, const gt_view *b) {
    uintptr_t pa = (uintptr_t)a->data, pb = (uintptr_t)b->data;
    return pa + (uint64_t)gt_extent(a, INT64_MAX) <= pb || pb + (uint64_t)gt_extent(b, INT64_MAX) <= pa ||
           gt_interleaved(a, b) || gt_interleaved(b, a);
}

static int gt_same_view(const gt_view *a, const gt_view *b) {
    return a->data == b->data && a->element == b->element && a->rank == b->rank &&
           !memcmp(a->size, b->size, sizeof a->size) && !memcmp(a->stride, b->stride, sizeof a->stride);
}

/* ---- the steps of gt_prepare ---- */

/* Checks and fills `field`, a companion dtype: the dtype of some inputs, either fp32 or `dtype`.  `name` is the field's
 * name. */
static gt_status gt_fill_companion(const char *name, gt_dtype dtype, char *field) {
    gt_dtype companion;
    memcpy(&companion, field, sizeof companion);
    if (companion == GT_DTYPE_DEFAULT) companion = dtype;
    if (companion != dtype && companion != GT_F32)
        return gt_fail(GT_ERROR_DTYPE, "%s = %d: must be 0, GT_F32 or equal dtype (%d)", name, (int)companion,
                       (int)dtype);
    memcpy(field, &companion, sizeof companion);
    return GT_OK;
}

/* Checks and fills `field`, the dtype of states or of a step's parameters.  `name` is the field's name.
 * passes: those that take 16-bit types.  takes_int8: a step also takes int8. */
static gt_status gt_fill_dtype_of_steps(const char *name, gt_state_passes passes, int takes_int8, gt_pass pass,
                                        char *field) {
    const int in_forward = passes != GT_STATES_OF_STEP, in_step = passes != GT_STATES_OF_FORWARD;
    gt_dtype dtype;
    memcpy(&dtype, field, sizeof dtype);
    if ((int)dtype < GT_DTYPE_DEFAULT || (int)dtype > (takes_int8 ? GT_INT8 : GT_F16))
        return gt_fail(GT_ERROR_DTYPE, "%s = %d: must be 0, GT_F32, GT_BF16 or GT_F16%s", name, (int)dtype,
                       takes_int8 ? ", or GT_INT8" : "");
    if (dtype == GT_DTYPE_DEFAULT) dtype = GT_F32;
    if (dtype != GT_F32 && !(in_step && pass == GT_STEP) && pass != GT_QUERY &&
        !(in_forward && pass == GT_FORWARD && dtype != GT_INT8))
        return gt_fail(GT_ERROR_DTYPE, "%s = %d: must be 0 or GT_F32; only %s %s", name, (int)dtype,
                       !in_step                         ? "forward takes"
                       : in_forward && dtype != GT_INT8 ? "forward and the step function take"
                                                        : "the step function takes",
                       dtype == GT_INT8 ? "int8" : "16 bits");
    memcpy(field, &dtype, sizeof dtype);
    return GT_OK;
}

static gt_status gt_fill_dtypes(const gt_op *op, gt_pass pass, char *filled) {
    gt_dtype dtype;
    gt_status status = GT_OK;
    memcpy(&dtype, filled + op->dtype_offset, sizeof dtype);
    if ((int)dtype < GT_DTYPE_DEFAULT || (int)dtype > GT_F16)
        return gt_fail(GT_ERROR_DTYPE, "dtype = %d: must be GT_F32, GT_BF16 or GT_F16", (int)dtype);
    if (dtype == GT_DTYPE_DEFAULT) dtype = GT_F32;
    memcpy(filled + op->dtype_offset, &dtype, sizeof dtype);
    if (op->companion_offset) status = gt_fill_companion(op->companion_name, dtype, filled + op->companion_offset);
    if (status == GT_OK && op->second.name)
        status = gt_fill_companion(op->second.name, dtype, filled + op->second.offset);
    if (status == GT_OK && op->of_steps.state)
        status = gt_fill_dtype_of_steps("state_dtype", op->of_steps.passes, op->of_steps.scale != 0, pass,
                                        filled + op->of_steps.state);
    if (status == GT_OK && op->of_steps.conv_state)
        status =
            gt_fill_dtype_of_steps("conv_state_dtype", op->of_steps.passes, 0, pass, filled + op->of_steps.conv_state);
    if (status == GT_OK && op->of_steps.parameter)
        status = gt_fill_dtype_of_steps(op->of_steps.parameter_name, GT_STATES_OF_STEP, 0, pass,
                                        filled + op->of_steps.parameter);
    if (status == GT_OK && op->of_steps.snapshot)
        status =
            gt_fill_dtype_of_steps("snapshot_dtype", GT_STATES_OF_STEP, 0, GT_QUERY, filled + op->of_steps.snapshot);
    return status;
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

/* Returns whether no size is 0. */
static int gt_has_tokens(const gt_op *op, const gt_dims *dims) {
    for (const gt_size *s = op->sizes; s->letter; s++)
        if (dims->n[s->letter - 'A'] == 0) return 0;
    return 1;
}

/* Returns whether a call has states, or gradients of states, for each batch element or sequence.  If so, the call has
 * work to do for B batch elements even without tokens.  A state that all sequences share does not count. */
static int gt_has_states(const gt_op *op, gt_pass pass, const void *filled, const gt_dims *dims) {
    const int S_is_each = dims->n['S' - 'A'] > 1 || dims->n['B' - 'A'] == 1;
    for (const gt_tensor *t = op->tensors; t->name; t++) {
        const int is_used = pass == GT_QUERY ? t->kind != 'i' : gt_used(t, pass);
        const int is_each = t->shape[0] == 'Q' || (t->shape[0] == 'S' && S_is_each);
        if (is_each && is_used && dims->n[t->shape[0] - 'A'] > 0 && gt_pointer(t, filled)) return 1;
    }
    return 0;
}

/* Appends a name and a value to `text`, a buffer of 128 bytes. */
static void gt_append(char *text, const char *format, const char *name, int64_t value) {
    size_t used = strlen(text);
    snprintf(text + used, 128 - used, format, name, (long long)value);
}

/* Returns whether gt_check_count applies the limit of 2^48 elements to this tensor.  In a call with tokens the limit
 * also applies to tensors whose pointer is NULL, since the sizes of scratch memory follow from all shapes.  In a join,
 * or in a call without tokens, the limit applies only to tensors that are given or required. */
static int gt_is_counted(const gt_op *op, const gt_tensor *t, gt_pass pass, const void *filled, const gt_dims *dims) {
    if (!gt_is_join(pass) && gt_has_tokens(op, dims)) return t->shape[0] != 'R';
    if (pass == GT_QUERY) /* a query does not know the pass yet */
        return strchr("IO", t->use[GT_FORWARD]) || strchr("IO", gt_use(t, GT_BACKWARD)) || gt_pointer(t, filled);
    return gt_used(t, pass) && (strchr("IOs", gt_use(t, pass)) || gt_pointer(t, filled));
}

/* Returns the name of the field that sets the size `letter`, for messages. */
static const char *gt_size_field(const gt_op *op, char letter, gt_pass pass, const gt_dims *dims) {
    static const struct {
        char letter;
        const char *name;
    } others[] = {{'V', "V"},
                  {'G', "G"},
                  {'g', "ssd.G"},
                  {'R', "pieces"},
                  {'D', "H P + 2 G N"},
                  {'J', "W - 1"},
                  {'U', "B T / snapshot_every"}};
    for (const gt_size *s = op->sizes; s->letter; s++)
        if (s->letter == letter) return s->name;
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++)
        if (others[i].letter == letter) return others[i].name;
    if (letter == 'Q' || letter == 'S')
        return dims->n['C' - 'A'] ? "seq_capacity" : pass == GT_STEP ? "slot_capacity" : "B";
    return "size"; /* the size comes from several fields */
}

/* Fails if a tensor has more than 2^48 elements. */
static gt_status gt_check_count(const gt_op *op, const gt_tensor *t, gt_pass pass, const void *filled,
                                const gt_dims *dims) {
    char text[128] = "";
    int64_t count = gt_is_counted(op, t, pass, filled, dims);
    for (const char *c = t->shape; *c; c++) count = gt_times(count, dims->n[*c - 'A']);
    if (count <= GT_MAX_COUNT) return GT_OK;
    for (const char *c = t->shape; *c; c++)
        gt_append(text, c == t->shape ? "%s = %lld" : ", %s = %lld", gt_size_field(op, *c, pass, dims),
                  dims->n[*c - 'A']);
    return gt_fail(GT_ERROR_SIZE, "%s: %s has more than 2^48 elements", text, t->name);
}

GT_API gt_status gt_bad_stride(const gt_tensor *t, const void *args, const char *why) {
    int64_t s[4];
    const int count = gt_stride_count(t);
    char text[128] = "";
    memcpy(s, (const char *)args + t->stride_offset, (size_t)count * sizeof s[0]);
    if (count == 1) return gt_fail(GT_ERROR_STRIDE, "%s_stride = %lld: %s", t->name, (long long)s[0], why);
    for (int i = 0; i < count; i++) gt_append(text, i ? ", %s%lld" : "%s%lld", "", s[i]);
    return gt_fail(GT_ERROR_STRIDE, "%s_stride = {%s}: %s", t->name, text, why);
}

/* Replaces zero strides in *filled by their defaults.  No index may span more than 2^56 elements, so that sums of byte
 * offsets fit in 64 bits.  In a call without tokens these tensors have no elements.  Then the function limits only the
 * stride itself, not its product with a size. */
static gt_status gt_fill_stride(const gt_op *op, const gt_tensor *t, char *filled, const gt_dims *dims) {
    const int64_t limit = GT_MAX_SPAN;
    const int has_tokens = gt_has_tokens(op, dims);
    char *strides = filled + t->stride_offset;
    const char *shape = t->shape; /* [M,*], [B,T,H] or [B,T,H,N]; below, B, T, H, N are sizes by position */
    const int64_t B = dims->n[shape[0] - 'A'], T = dims->n[shape[1] - 'A'];
    if (gt_has_row_stride(t) && shape[0] != 'M') { /* gt_resolve_row_stride has checked these strides */
        int64_t row, packed = 1;
        memcpy(&row, strides, sizeof row);
        for (const char *c = shape + 1; *c; c++) packed = gt_times(packed, dims->n[*c - 'A']);
        if (row == 0) row = gt_smaller(packed, limit);
        memcpy(strides, &row, sizeof row);
    } else if (shape[0] == 'M') {
        int64_t row;
        memcpy(&row, strides, sizeof row);
        if (row < 0) return gt_bad_stride(t, filled, "must not be negative");
        if (row == 0) row = T;
        if (row > limit || (has_tokens && row > limit / B))
            return gt_bad_stride(t, filled, "spans more than 2^56 elements");
        memcpy(strides, &row, sizeof row);
    } else {
        const int64_t H = dims->n[shape[2] - 'A'], N = shape[3] ? dims->n[shape[3] - 'A'] : 1;
        const size_t bytes = (size_t)gt_stride_count(t) * sizeof(int64_t);
        gt_stride4 s = {0, 0, 0, 0};
        memcpy(&s, strides, bytes);
        if (s.b < 0 || s.t < 0 || s.h < 0 || s.n < 0) return gt_bad_stride(t, filled, "must not be negative");
        if (s.n > limit || s.h > limit || s.t > limit || s.b > limit)
            return gt_bad_stride(t, filled, "spans more than 2^56 elements");
        if (s.n == 0) s.n = 1;
        if (s.h == 0) s.h = gt_times(N, s.n);
        if (s.t == 0) s.t = gt_times(H, s.h);
        if (s.b == 0) s.b = gt_larger(gt_times(T, s.t), gt_times(H, s.h));
        if (has_tokens && (s.n > limit / N || s.h > limit / H || s.t > limit / T || s.b > limit / B))
            return gt_bad_stride(t, filled, "spans more than 2^56 elements");
        s.h = gt_smaller(s.h, limit);
        s.t = gt_smaller(s.t, limit);
        s.b = gt_smaller(s.b, limit);
        memcpy(strides, &s, bytes);
    }
    return GT_OK;
}

static gt_status gt_check_pointer(const gt_op *op, const gt_tensor *t, gt_pass pass, const void *filled,
                                  const gt_dims *dims) {
    gt_view v = gt_view_of(op, t, filled, dims);
    char use = gt_use(t, pass);
    if (v.count == 0) return GT_OK;
    if (!v.data) return use == 'I' || use == 'O' || use == 's' ? gt_fail(GT_ERROR_NULL, "%s is NULL", t->name) : GT_OK;
    if ((uintptr_t)v.data % (uintptr_t)v.element)
        return gt_fail(GT_ERROR_ALIGNMENT, "%s = %p: not aligned to its %d-byte elements", t->name, (void *)v.data,
                       v.element);
    if (gt_written(t, pass) && gt_overlaps_itself(&v))
        return gt_bad_stride(t, filled, "elements of this output overlap");
    return GT_OK;
}

static gt_status gt_check_overlap(const gt_op *op, const gt_tensor *out, gt_pass pass, const void *filled,
                                  const gt_dims *dims) {
    gt_view v = gt_view_of(op, out, filled, dims);
    if (!v.data || v.count == 0) return GT_OK;
    for (const gt_tensor *t = op->tensors; t->name; t++) {
        gt_view other = gt_view_of(op, t, filled, dims);
        if (t == out || !gt_used(t, pass) || !other.data || other.count == 0) continue;
        if (out->may_equal && !strcmp(out->may_equal, t->name) && gt_same_view(&v, &other)) continue;
        if (!gt_disjoint(&v, &other)) return gt_fail(GT_ERROR_OVERLAP, "%s overlaps %s", out->name, t->name);
    }
    return GT_OK;
}

/* For the GPU functions, in a call without tokens: sets every size that may be 0 to 0, so that no size causes blocks or
 * scratch memory.  B stays if the call has states. */
static void gt_clear_tokens(const gt_op *op, gt_pass pass, char *filled, gt_dims *dims) {
    const int keeps_batch = gt_has_states(op, pass, filled, dims);
    const int64_t none = 0;
    for (const gt_size *s = op->sizes; s->letter; s++) {
        if (s->min > 0 || (s->letter == 'B' && keeps_batch)) continue;
        memcpy(filled + s->offset, &none, sizeof none);
        dims->n[s->letter - 'A'] = 0;
    }
    if (keeps_batch) return;
    dims->n['Q' - 'A'] = 0;
    if (dims->n['S' - 'A'] > 1) dims->n['S' - 'A'] = 0;
}

GT_API gt_status gt_prepare(const gt_op *op, gt_pass pass, gt_target target, const void *args, void *filled,
                            gt_dims *dims) {
    const gt_tensor *t;
    gt_status status;
    int accumulate;
    gt_enter(target, op->name, pass);
    if (!args) return gt_fail(GT_ERROR_NULL, "args is NULL");
    if (pass == GT_PATH) pass = GT_QUERY;
    memcpy(filled, args, op->args_bytes);
    memcpy(&accumulate, (char *)filled + op->accumulate_offset, sizeof accumulate);
    if ((status = gt_fill_dtypes(op, pass, (char *)filled)) != GT_OK) return status;
    if ((status = gt_fill_sizes(op, (char *)filled, dims)) != GT_OK) return status;
    status = gt_check_range(GT_ERROR_VALUE, "accumulate", accumulate, 0, 1);
    if (status != GT_OK) return status;
    if ((status = op->resolve(filled, pass, dims)) != GT_OK) return status;
    for (t = op->tensors; t->name; t++) {
        if ((status = gt_check_count(op, t, pass, filled, dims)) != GT_OK) return status;
        if (!t->stride_offset) continue;
        /* A join does not read other strides, so their fields may hold any value. */
        if (gt_is_join(pass) && !gt_has_row_stride(t))
            memset((char *)filled + t->stride_offset, 0, (size_t)gt_stride_count(t) * sizeof(int64_t));
        else if ((status = gt_fill_stride(op, t, (char *)filled, dims)) != GT_OK)
            return status;
    }
    for (t = op->tensors; t->name; t++)
        if (gt_used(t, pass) && (status = gt_check_pointer(op, t, pass, filled, dims)) != GT_OK) return status;
    for (t = op->tensors; t->name; t++)
        if (gt_used(t, pass) && gt_written(t, pass) && (status = gt_check_overlap(op, t, pass, filled, dims)) != GT_OK)
            return status;
    if (target == GT_DEVICE && !gt_has_tokens(op, dims)) gt_clear_tokens(op, pass, (char *)filled, dims);
    return GT_OK;
}

/* ---- int8 weights ---- */

static float gt_element_of(const void *data, gt_dtype dtype, int64_t i) {
    if (dtype == GT_BF16) return gt_bf16_to_f32(((const uint16_t *)data)[i]);
    if (dtype == GT_F16) return gt_f16_to_f32(((const uint16_t *)data)[i]);
    return ((const float *)data)[i];
}

/* Rounds |value| <= 2^22 to the nearest integer, ties to even.  A sum near 1.5 * 2^23 has no bits for fractions, so the
 * addition rounds. */
static int gt_nearest(float value) {
    volatile float sum = value + 12582912.0f; /* volatile: no wider register, and no simplification by -ffast-math */
    return (int)gt_float_bits(sum) - (int)gt_float_bits(12582912.0f);
}

GT_API gt_status gt_quantize_int8(const void *weight, gt_dtype dtype, int64_t O, int64_t D, int8_t *weight_int8,
                                  float *weight_scale) {
    const uint32_t infinity = 0x7f800000u;
    gt_status status;
    snprintf(gt_function_name, sizeof gt_function_name, "gt_quantize_int8");
    gt_field_prefix = "";
    if (dtype == GT_DTYPE_DEFAULT) dtype = GT_F32;
    if ((int)dtype < GT_F32 || (int)dtype > GT_F16)
        return gt_fail(GT_ERROR_DTYPE, "dtype = %d: must be GT_F32, GT_BF16 or GT_F16", (int)dtype);
    if ((status = gt_check_range(GT_ERROR_SIZE, "O", O, 1, GT_MAX_SIZE)) != GT_OK) return status;
    if ((status = gt_check_range(GT_ERROR_SIZE, "D", D, 1, GT_MAX_SIZE)) != GT_OK) return status;
    if (O > GT_MAX_COUNT / D)
        return gt_fail(GT_ERROR_SIZE, "O = %lld, D = %lld: weight has more than 2^48 elements", (long long)O,
                       (long long)D);
    if (!weight || !weight_int8 || !weight_scale)
        return gt_fail(GT_ERROR_NULL, "%s is NULL", !weight ? "weight" : !weight_int8 ? "weight_int8" : "weight_scale");
    for (int64_t i = 0; i < O * D; i++)
        if ((gt_float_bits(gt_element_of(weight, dtype, i)) & infinity) == infinity)
            return gt_fail(GT_ERROR_VALUE, "weight[%lld][%lld] is infinite or NaN", (long long)(i / D),
                           (long long)(i % D));
    for (int64_t o = 0; o < O; o++) {
        uint32_t largest = 0; /* bits of the largest magnitude: larger positive floats have larger bits */
        for (int64_t d = 0; d < D; d++) {
            const uint32_t bits = gt_float_bits(gt_element_of(weight, dtype, o * D + d)) & 0x7fffffffu;
            if (bits > largest) largest = bits;
        }
        float scale = gt_bits_float(largest) / 127.0f;
        if (gt_float_bits(scale) < 0x00800000u) scale = 0;
        for (int64_t d = 0; d < D; d++) {
            const float value = gt_element_of(weight, dtype, o * D + d);
            weight_int8[o * D + d] = (int8_t)(gt_float_bits(scale) ? gt_nearest(value / scale) : 0);
        }
        weight_scale[o] = scale;
    }
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
#include "reduce.cuh"

extern "C" {
GT_API gt_status gt_device_supported(int device) {
    snprintf(gt_function_name, sizeof gt_function_name, "gt_device_supported");
    return gt::device_supported(device);
}
}
#endif

#endif
