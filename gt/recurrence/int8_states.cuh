/* gt/recurrence/int8_states.cuh - gt_quantize_states and gt_dequantize_states: states from fp32 to int8 and back.
 *
 * A warp takes one group of columns that share a scale.  To quantize, the warp reads the group twice: to find the
 * largest magnitude, and to round.
 * bytes: 4 (fp32) and 1 (int8) for each number; the second read of a group comes from the L1 cache. */
#ifndef GT_RECURRENCE_INT8_STATES_CUH
#define GT_RECURRENCE_INT8_STATES_CUH

#include "int8_states.h"

#if defined(__CUDACC__) || defined(GT_EMU)

#include "../base/launch.cuh"
#include "step_states.cuh"

namespace gt {

constexpr int INT8_WARPS = 4;

struct Int8StatesParams {
    gt_int8_states_args a;
    int64_t groups; /* groups of a row */
    int is_from_int8;
};

GT_KERNEL(32 * INT8_WARPS, 1)
int8_states_kernel(const GT_GRID_CONSTANT Int8StatesParams p) {
    const gt_int8_states_args& a = p.a;
    const int64_t of_state = a.rows * p.groups, stride = (int64_t)grid_x() * INT8_WARPS;
    for (int64_t i = (int64_t)block_x() * INT8_WARPS + warp_id(); i < a.B * of_state; i += stride) {
        const int64_t b = i / of_state, group = i % of_state, slot = a.slots ? a.slots[b] : b;
        const int64_t row = group / p.groups, column = group % p.groups * a.group;
        if (slot < 0 || slot >= a.slot_capacity) continue;
        const int64_t count = a.columns - column < a.group ? a.columns - column : a.group;
        float* const state = a.state + (b * a.rows + row) * a.columns + column;
        int8_t* const integers = static_cast<int8_t*>(a.int8) + slot * a.int8_stride + row * a.columns + column;
        float* const scale = a.scale + slot * a.scale_stride + group;
        if (p.is_from_int8) {
            for (int64_t k = lane_id(); k < count; k += 32) state[k] = product_alone((float)integers[k], *scale);
            continue;
        }
        float most = 0.0f;
        for (int64_t k = lane_id(); k < count; k += 32) most = larger_or_nan(most, state[k]);
        for (int mask = 16; mask > 0; mask >>= 1) most = larger_or_nan(most, shfl_xor(most, mask));
        const gt_row_scale of = gt_scale_of_row(most);
        for (int64_t k = lane_id(); k < count; k += 32) {
            const float x[4] = {state[k], 0.0f, 0.0f, 0.0f};
            integers[k] = (int8_t)pack_int8(x, of.inverse, nullptr);
        }
        if (lane_id() == 0) *scale = of.scale;
    }
}

static inline gt_status convert_int8_states(const char* function, const gt_int8_states_args* args, bool is_from_int8,
                                            gt_stream stream) {
    Int8StatesParams p = {};
    const gt_status status = gt_prepare_int8_states(GT_DEVICE, function, args, &p.a);
    if (status != GT_OK || p.a.B == 0 || p.a.slot_capacity == 0) return status;
    p.groups = (p.a.columns - 1) / p.a.group + 1;
    p.is_from_int8 = is_from_int8;
    const int64_t warps = p.a.B * p.a.rows * p.groups, blocks = (warps + INT8_WARPS - 1) / INT8_WARPS;
    return run("int8_states_kernel", int8_states_kernel, blocks < INT32_MAX ? blocks : INT32_MAX, 32 * INT8_WARPS, 0,
               stream, p);
}

} /* namespace gt */

extern "C" {
GT_API gt_status gt_quantize_states(const gt_int8_states_args* args, gt_stream stream) {
    return gt::convert_int8_states("quantize_states", args, false, stream);
}
GT_API gt_status gt_dequantize_states(const gt_int8_states_args* args, gt_stream stream) {
    return gt::convert_int8_states("dequantize_states", args, true, stream);
}
}

#else

#ifdef __cplusplus
extern "C" {
#endif
GT_API gt_status gt_quantize_states(const gt_int8_states_args *args, gt_stream stream) {
    (void)args, (void)stream;
    gt_enter_function(GT_DEVICE, "quantize_states");
    return gt_fail(GT_ERROR_NO_CUDA, "built without CUDA");
}
GT_API gt_status gt_dequantize_states(const gt_int8_states_args *args, gt_stream stream) {
    (void)args, (void)stream;
    gt_enter_function(GT_DEVICE, "dequantize_states");
    return gt_fail(GT_ERROR_NO_CUDA, "built without CUDA");
}
#ifdef __cplusplus
}
#endif

#endif

#endif
