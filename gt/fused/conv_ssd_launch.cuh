/* gt/fused/conv_ssd_launch.cuh - conv_ssd on the current GPU: which kernels, and where the convolved rows lie.
 *
 * c, the convolved rows [B,T,D] in dtype, is scratch of one call: forward makes it by conv1d's kernels and ssd's read
 * it; backward makes it again, then ssd's backward writes its gradient dc beside it, which conv1d's takes.  Sums and
 * states are those of the two operators, and so is their determinism.
 *
 *     bytes of a row, 16-bit      forward                              backward
 *     conv1d                      2 D read, 2 D written                twice that, and 2 D read, 2 D read, 2 D written
 *     ssd                         its own, with D - 2 G N of x         its own
 *     kept from forward           what ssd saves: states every 128 tokens.  Two calls keep c, 2 D, beside it */
#ifndef GT_FUSED_CONV_SSD_LAUNCH_CUH
#define GT_FUSED_CONV_SSD_LAUNCH_CUH

#include "../base/launch.cuh"
#include "conv_ssd.h"

namespace gt {
namespace conv_ssd {

constexpr int64_t MOST = 256; /* of P and N: what ssd's kernels take */

static inline int64_t size_of(gt_dtype dtype) { return dtype == GT_F32 ? 4 : 2; }

/* Prepares the arguments and checks what only the GPU limits. */
static inline gt_status prepare(gt_pass pass, const gt_conv_ssd_args* args, gt_conv_ssd_args* a, Device* device) {
    gt_dims dims;
    const gt_status status = gt_prepare(gt_op_conv_ssd(), pass, GT_DEVICE, args, a, &dims);
    if (status != GT_OK) return status;
    if (a->B == 0) { /* neither tokens nor states, of packed sequences either */
        a->seq_capacity = 0;
        a->cu_seqlens = a->seq_count = nullptr;
    }
    if (a->P > MOST) return gt_fail(GT_ERROR_UNSUPPORTED, "P = %lld: at most %d", (long long)a->P, (int)MOST);
    if (a->N > MOST) return gt_fail(GT_ERROR_UNSUPPORTED, "N = %lld: at most %d", (long long)a->N, (int)MOST);
    return current_device(device);
}

/* The two calls of a pass, and the pieces of its workspace. */
struct Plan {
    gt_conv1d_args conv;
    gt_ssd_args ssd;
    bool has_channels; /* without tokens those that nothing lies in may be more than conv1d takes */
    size_t saved, bytes;
};

/* c, dc, and behind them what either call needs: they follow one another.  If there is no workspace, any address will
 * do to ask for sizes. */
static inline gt_status plan_call(const gt_conv_ssd_args& a, gt_pass pass, Plan* plan) {
    Arena arena(a.workspace ? a.workspace : reinterpret_cast<void*>((uintptr_t)256));
    const bool is_backward = pass == GT_BACKWARD, has_tokens = a.B > 0 && a.T > 0;
    const int64_t bytes = has_tokens ? a.B * a.T * gt_conv_ssd_channels(&a) * size_of(a.dtype) : 0;
    char* const c = has_tokens ? arena.take<char>(bytes) : nullptr;
    char* const dc = has_tokens && is_backward && gt_conv_ssd_wants_dc(&a) ? arena.take<char>(bytes) : nullptr;
    gt_workspace of_ssd = {}, of_conv = {};
    plan->conv = gt_conv_ssd_conv(&a, c, dc);
    plan->ssd = gt_conv_ssd_ssd(&a, c, dc, size_of(a.dtype));
    plan->has_channels = has_tokens || gt_conv_ssd_channels(&a) <= GT_MAX_SIZE;
    gt_status status = gt_ssd_workspace(&plan->ssd, &of_ssd);
    if (status == GT_OK && plan->has_channels) status = gt_conv1d_workspace(&plan->conv, &of_conv);
    if (status != GT_OK) return status;
    gt_enter(GT_DEVICE, "conv_ssd", pass); /* messages name this call again */
    const size_t for_ssd = is_backward ? of_ssd.backward : of_ssd.forward;
    const size_t for_conv = is_backward ? of_conv.backward : of_conv.forward;
    const size_t most = for_ssd > for_conv ? for_ssd : for_conv;
    plan->ssd.workspace = plan->conv.workspace = most ? arena.take<char>((int64_t)most) : nullptr;
    plan->ssd.workspace_bytes = plan->conv.workspace_bytes = most;
    plan->saved = of_ssd.saved;
    plan->bytes = arena.bytes();
    return GT_OK;
}

static inline gt_status begin(gt_pass pass, const gt_conv_ssd_args* args, Plan* plan) {
    gt_conv_ssd_args a;
    Device device;
    gt_status status = prepare(pass, args, &a, &device);
    if (status == GT_OK) status = plan_call(a, pass, plan);
    if (status == GT_OK) status = check_saved(a.saved, a.saved_bytes, plan->saved);
    return status != GT_OK ? status : check_workspace(a.workspace, a.workspace_bytes, plan->bytes);
}

static inline gt_status forward(const gt_conv_ssd_args* args, gt_stream stream) {
    Plan plan = {};
    gt_status status = begin(GT_FORWARD, args, &plan);
    if (status == GT_OK && plan.has_channels) status = gt_conv1d_forward(&plan.conv, stream);
    return status != GT_OK ? status : gt_ssd_forward(&plan.ssd, stream);
}

static inline gt_status backward(const gt_conv_ssd_args* args, gt_stream stream) {
    Plan plan = {};
    gt_status status = begin(GT_BACKWARD, args, &plan);
    if (status != GT_OK) return status;
    gt_conv1d_args again = plan.conv;
    again.state_out = nullptr;
    if (again.y) status = gt_conv1d_forward(&again, stream);
    if (status == GT_OK) status = gt_ssd_backward(&plan.ssd, stream);
    const bool is_wanted = plan.conv.dy || !plan.conv.y; /* without tokens there are states and zeros */
    return status == GT_OK && plan.has_channels && is_wanted ? gt_conv1d_backward(&plan.conv, stream) : status;
}

static inline gt_status workspace(const gt_conv_ssd_args* args, gt_workspace* need) {
    gt_conv_ssd_args a;
    Device device;
    Plan of_forward = {}, of_backward = {};
    gt_status status = prepare(GT_QUERY, args, &a, &device);
    if (status != GT_OK) return status;
    if (!need) return gt_fail(GT_ERROR_NULL, "need is NULL");
    gt_workspace sizes = {0, 0, 0, 0, 0};
    a.workspace = nullptr;
    if ((status = plan_call(a, GT_FORWARD, &of_forward)) != GT_OK ||
        (status = plan_call(a, GT_BACKWARD, &of_backward)) != GT_OK)
        return status;
    sizes.forward = of_forward.bytes;
    sizes.backward = of_backward.bytes;
    sizes.saved = of_forward.saved;
    *need = sizes;
    return GT_OK;
}

} /* namespace conv_ssd */
} /* namespace gt */

#endif
