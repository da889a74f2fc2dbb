/* gt/recurrence/int8_states.h - checks of gt_quantize_states and gt_dequantize_states (plain C, shared with the stubs
 * and the CPU twins). */
#ifndef GT_RECURRENCE_INT8_STATES_H
#define GT_RECURRENCE_INT8_STATES_H

#include "../base/op.h"

/* Checks that an array is given, and that its address is a multiple of `element`, the size of its elements. */
static inline gt_status gt_check_int8_array(const char *name, const void *data, size_t element) {
    if (!data) return gt_fail(GT_ERROR_NULL, "%s is NULL", name);
    if ((uintptr_t)data % element)
        return gt_fail(GT_ERROR_ALIGNMENT, "%s = %p: not aligned to its %d-byte elements", name, data, (int)element);
    return GT_OK;
}

static inline gt_status gt_check_int8_stride(const char *name, int64_t *stride, int64_t of_row, int64_t rows) {
    if (*stride == 0) *stride = of_row;
    if (*stride < of_row)
        return gt_fail(GT_ERROR_STRIDE, "%s = %lld: must be 0, or at least the %lld elements of a row of the pool",
                       name, (long long)*stride, (long long)of_row);
    if (*stride > GT_MAX_SPAN || (rows > 0 && *stride > GT_MAX_SPAN / rows))
        return gt_fail(GT_ERROR_STRIDE, "%s = %lld: spans more than 2^56 elements", name, (long long)*stride);
    return GT_OK;
}

static inline gt_status gt_check_int8_apart(const char *name, const void *data, int64_t bytes, const char *other,
                                            const void *other_data, int64_t other_bytes) {
    const uintptr_t a = (uintptr_t)data, b = (uintptr_t)other_data;
    if (a + (uintptr_t)bytes <= b || b + (uintptr_t)other_bytes <= a) return GT_OK;
    return gt_fail(GT_ERROR_OVERLAP, "%s overlaps %s", name, other);
}

/* Copies *args to *a, fills in defaults, and checks everything.  With B = 0 there is nothing to convert, so pointers
 * are not checked. */
static inline gt_status gt_prepare_int8_states(gt_target target, const char *function, const gt_int8_states_args *args,
                                               gt_int8_states_args *a) {
    gt_status status;
    int64_t numbers, scales;
    gt_enter_function(target, function);
    if (!args) return gt_fail(GT_ERROR_NULL, "args is NULL");
    *a = *args;
    if ((status = gt_check_range(GT_ERROR_SIZE, "B", a->B, 0, GT_MAX_SIZE)) ||
        (status = gt_check_range(GT_ERROR_SIZE, "rows", a->rows, 1, GT_MAX_SIZE)) ||
        (status = gt_check_range(GT_ERROR_SIZE, "columns", a->columns, 1, GT_MAX_SIZE)) ||
        (status = gt_check_range(GT_ERROR_SIZE, "group", a->group, 0, GT_MAX_SIZE)))
        return status;
    if (a->group == 0) a->group = a->columns;
    if (a->slot_capacity == 0) a->slot_capacity = a->B;
    if ((status = gt_check_range(GT_ERROR_SIZE, "slot_capacity", a->slot_capacity, a->slots ? 0 : a->B, GT_MAX_SIZE)))
        return status;
    numbers = gt_times(a->rows, a->columns);
    scales = gt_times(a->rows, (a->columns - 1) / a->group + 1);
    if (gt_times(numbers, a->B) > GT_MAX_COUNT || gt_times(numbers, a->slot_capacity) > GT_MAX_COUNT)
        return gt_fail(GT_ERROR_SIZE,
                       "B = %lld, slot_capacity = %lld, rows = %lld, columns = %lld: more than 2^48 elements",
                       (long long)a->B, (long long)a->slot_capacity, (long long)a->rows, (long long)a->columns);
    if ((status = gt_check_int8_stride("int8_stride", &a->int8_stride, numbers, a->slot_capacity)) ||
        (status = gt_check_int8_stride("scale_stride", &a->scale_stride, scales, a->slot_capacity)))
        return status;
    if (a->B == 0) return GT_OK;
    if ((status = gt_check_int8_array("state", a->state, 4))) return status;
    if (a->slots && (status = gt_check_int8_array("slots", a->slots, 4))) return status;
    if (a->slot_capacity == 0) return GT_OK; /* every state is skipped */
    if ((status = gt_check_int8_array("int8", a->int8, 1)) || (status = gt_check_int8_array("scale", a->scale, 4)))
        return status;
    const int64_t state_bytes = 4 * a->B * numbers, int8_bytes = (a->slot_capacity - 1) * a->int8_stride + numbers;
    const int64_t scale_bytes = 4 * ((a->slot_capacity - 1) * a->scale_stride + scales);
    if ((status = gt_check_int8_apart("state", a->state, state_bytes, "int8", a->int8, int8_bytes)) ||
        (status = gt_check_int8_apart("state", a->state, state_bytes, "scale", a->scale, scale_bytes)))
        return status;
    return gt_check_int8_apart("int8", a->int8, int8_bytes, "scale", a->scale, scale_bytes);
}

#endif
