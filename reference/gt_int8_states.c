/* reference/gt_int8_states.c - the CPU twins of gt_quantize_states and gt_dequantize_states. */
#include "gt_ref.h"

#include "gt/recurrence/int8_states.h"

#ifdef GT_REAL_IS_FLOAT /* the double build has only the operators */
static gt_status convert(const char *function, const gt_int8_states_args *args, int is_from_int8) {
    gt_int8_states_args a = {0};
    const gt_status status = gt_prepare_int8_states(GT_HOST, function, args, &a);
    if (status != GT_OK) return status;
    for (int64_t b = 0; b < a.B; b++) {
        const int64_t slot = a.slots ? a.slots[b] : b;
        const ref_int8_rows rows = {a.int8,    a.scale, slot * a.int8_stride, slot * a.scale_stride, a.rows,
                                    a.columns, a.group};
        if (slot < 0 || slot >= a.slot_capacity) continue;
        if (is_from_int8)
            ref_load_int8(a.state + b * a.rows * a.columns, &rows);
        else
            ref_store_int8(&rows, a.state + b * a.rows * a.columns, 0, NULL, 0);
    }
    return GT_OK;
}

gt_status gt_ref_quantize_states(const gt_int8_states_args *args) { return convert("quantize_states", args, 0); }
gt_status gt_ref_dequantize_states(const gt_int8_states_args *args) { return convert("dequantize_states", args, 1); }
#endif
