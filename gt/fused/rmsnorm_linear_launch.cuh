/* gt/fused/rmsnorm_linear_launch.cuh - rmsnorm_linear on the current GPU: checks arguments and chooses kernels. */
#ifndef GT_FUSED_RMSNORM_LINEAR_LAUNCH_CUH
#define GT_FUSED_RMSNORM_LINEAR_LAUNCH_CUH

#include "rmsnorm_linear_launch_any.cuh"
#include "rmsnorm_linear_launch_tiles.cuh"
#include "table.h"

namespace gt {
namespace rmsnorm_linear {

/* ---- rmsnorm_linear: dispatch and checks ----------------------------------------------------- */

static inline gt_status prepare(gt_pass pass, const gt_rmsnorm_linear_args* args, gt_rmsnorm_linear_args* a,
                                Device* device) {
    gt_dims dims;
    const gt_status status = gt_prepare(gt_op_rmsnorm_linear(), pass, GT_DEVICE, args, a, &dims);
    return status != GT_OK ? status : current_device(device);
}

/* Returns where the moments of all rows lie in `buffer`, or NULL without a buffer.  *bytes gets the size they need. */
static inline Moments* moments_in(void* buffer, const gt_rmsnorm_linear_args& a, size_t* bytes) {
    Arena arena(buffer);
    Moments* moments = arena.take<Moments>(a.M);
    *bytes = arena.bytes();
    return moments;
}

static inline gt_status forward(const gt_rmsnorm_linear_args& a, const Device& device, gt_stream stream) {
    size_t bytes;
    Moments* saved = moments_in(a.saved, a, &bytes);
    const ForwardPlan plan = plan_forward(a, choose(a, device));
    gt_status status = check_saved(a.saved, a.saved_bytes, bytes);
    if (status == GT_OK) status = check_workspace(a.workspace, a.workspace_bytes, plan.bytes);
    if (status != GT_OK) return status;
    const Input in = input_of(a, saved ? saved : plan.moments);
    if (plan.form != Form::ANY) return launch_forward_tiles(a, in, plan, device, stream);
    status = launch_moments(in, stream);
    return status != GT_OK ? status : launch_output(a, in, device, stream);
}

static inline gt_status backward(const gt_rmsnorm_linear_args& a, const Device& device, gt_stream stream) {
    size_t bytes;
    Moments* saved = moments_in(a.saved, a, &bytes);
    gt_status status = check_saved(a.saved, a.saved_bytes, bytes);
    if (status != GT_OK) return status;
    const Choice choice = choose(a, device);
    if (choice.backward != Form::ANY) {
        const BackwardTiles plan = plan_backward_tiles(a, choice, device);
        status = check_workspace(a.workspace, a.workspace_bytes, plan.bytes);
        return status != GT_OK ? status : launch_backward_tiles(a, plan, saved, device, stream);
    }
    const BackwardPlan plan = plan_backward(a, device);
    status = check_workspace(a.workspace, a.workspace_bytes, plan.bytes);
    return status != GT_OK ? status : launch_backward(a, plan, saved, device, stream);
}

/* Returns the sizes of the buffers.  It assumes that tensors which are NULL in `a` are NULL in the calls, too. */
static inline gt_workspace workspace_of(gt_rmsnorm_linear_args a, const Device& device) {
    gt_workspace sizes = {0, 0, 0, 0, 0};
    a.workspace = nullptr;
    moments_in(nullptr, a, &sizes.saved);
    const Choice choice = choose(a, device);
    sizes.forward = plan_forward(a, choice).bytes;
    sizes.backward =
        choice.backward != Form::ANY ? plan_backward_tiles(a, choice, device).bytes : plan_backward(a, device).bytes;
    return sizes;
}

} /* namespace rmsnorm_linear */
} /* namespace gt */

#endif
