/* gt/wkv6/launch.cuh - wkv6 on the current GPU: arguments checked, kernels chosen. */
#ifndef GT_WKV6_LAUNCH_CUH
#define GT_WKV6_LAUNCH_CUH

#include "launch_backward.cuh"
#include "table.h"

namespace gt {
namespace wkv6 {

/* Prepares the arguments and checks what only the GPU limits. */
static inline gt_status prepare(gt_pass pass, const gt_wkv6_args* args, gt_wkv6_args* a,
                                Device* device) {
    gt_dims dims;
    gt_status status = gt_prepare(gt_op_wkv6(), pass, GT_DEVICE, args, a, &dims);
    if (status != GT_OK) return status;
    if (a->N > MAX_SIZE)
        return gt_fail(GT_ERROR_UNSUPPORTED, "N = %lld: at most %d", (long long)a->N, MAX_SIZE);
    if (a->V > MAX_SIZE)
        return gt_fail(GT_ERROR_UNSUPPORTED, "V = %lld: at most %d", (long long)a->V, MAX_SIZE);
    if (a->B == 0) { /* neither tokens nor states, of packed sequences either */
        a->seq_capacity = 0;
        a->cu_seqlens = a->seq_count = nullptr;
    }
    return current_device(device);
}

static inline gt_status forward(const gt_wkv6_args& a, bool is_step, const Device& device,
                                Chain& stream) {
    size_t bytes;
    void* checkpoints = is_step ? nullptr : checkpoints_in(a.saved, a, &bytes);
    ClearParams rest = {};
    add_output(rest, a.y, a.y_stride, a.dtype, a.V);
    const gt_status status = clear_rest(a, rest, device, stream);
    if (status != GT_OK) return status;
    if (!is_step && forward_fits(a, device)) return launch_tensor(a, device, checkpoints, stream);
    ForwardParams p = {};
    p.in = problem_of(a);
    p.y = a.y;
    p.y_at = a.y_stride;
    p.state_in = is_step ? a.state_out : a.state_in;
    p.state_out = a.state_out;
    p.checkpoints = checkpoints;
    p.places = places_of(a);
    p.checkpoint_dtype = state_dtype(a.dtype, a.N, a.V);
    p.rest = rest_at(a);
    p.state_in_shared = a.state_in_shared;
    p.is_step = is_step;
    p.slots = a.slots;
    p.slot_capacity = a.slot_capacity;
    return launch_tokens<false>(p, stream);
}

} /* namespace wkv6 */
} /* namespace gt */

#endif
