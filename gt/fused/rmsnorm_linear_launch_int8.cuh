/* gt/fused/rmsnorm_linear_launch_int8.cuh - the step of rmsnorm_linear on the current GPU: choice, plan and launch. */
#ifndef GT_FUSED_RMSNORM_LINEAR_LAUNCH_INT8_CUH
#define GT_FUSED_RMSNORM_LINEAR_LAUNCH_INT8_CUH

#include "rmsnorm_linear_int8.cuh"
#include "rmsnorm_linear_launch_any.cuh"

namespace gt {
namespace rmsnorm_linear {

constexpr int64_t STEP_MOST = 1 << 30; /* largest D and O for tensor cores: steps and groups fit an int */

/* Returns whether tensor cores compute the step.  They need rows of 16-byte pieces, and sums of many elements of n: see
 * uses_tensor_cores. */
static inline bool step_uses_tensor_cores(const gt_rmsnorm_linear_args& a, const Device& device) {
    if (device.compute_capability < 80 || a.D < 32 || a.O < 32 || !is_built(a.dtype)) return false;
    if (a.D % 16 || a.D > STEP_MOST || a.O > STEP_MOST) return false;
    return is_aligned(a.x, a.x_stride, size_of(a.dtype), 16) && is_aligned(a.weight_int8, 0, 1, 16) &&
           is_aligned(a.gamma, 0, 4, 16) && is_aligned(a.beta, 0, 4, 16);
}

/* Divides a block's shared memory between the ring of weights and the slab of n.  The ring has 8 stages in two cases:
 * if all steps of n fit beside 8 stages, or if at least 8 steps fit beside 8 stages and not all fit beside 4.
 * Otherwise it has 4 stages.  Returns false if not even one step fits beside 4 stages. */
template <class C>
static bool plan_slab(StepParams* p, const Device& device) {
    const auto steps_beside = [&](int stages) {
        const int left = device.shared_bytes - C::bytes(stages, 0);
        return left < 0 ? 0 : left / (C::bytes(0, 1) - C::bytes(0, 0));
    };
    const bool takes_8 = steps_beside(8) >= p->steps || (steps_beside(8) >= 8 && steps_beside(4) < p->steps);
    p->stages = takes_8 ? 8 : 4;
    const int fits = steps_beside(p->stages);
    if (fits == 0) return false;
    p->slab_steps = (int)ceil_div(p->steps, ceil_div(p->steps, fits));
    return true;
}

static inline gt_status launch_step_any(const StepParams& p, const Device& device, gt_stream stream) {
    const int64_t wanted = ceil_div(p.O, ROW_WARPS), most = 8 * (int64_t)device.multiprocessors;
    return run("rmsnorm_linear step_any_kernel", step_any_kernel,
               p.in.M == 0     ? 0
               : wanted < most ? wanted
                               : most,
               32 * ROW_WARPS, 16 * (size_t)p.in.M, stream, p);
}

template <class C>
static gt_status launch_step_tensor(StepParams p, const Device& device, gt_stream stream) {
    const int64_t units = ceil_div(p.O, STEP_OUTPUTS), blocks = device.multiprocessors;
    const int64_t rounds = ceil_div(units, STEP_UNITS * blocks);
    p.units = (int)ceil_div(units, rounds * blocks);
    p.groups = (int)ceil_div(units, p.units);
    p.steps = (int)ceil_div(p.in.D, STEP_COLUMNS);
    p.parts = C::WARPS / p.units < p.steps ? C::WARPS / p.units : p.steps;
    for (p.row_warps = C::WARPS; p.row_warps > 1 && p.row_warps * p.in.M > C::WARPS;) p.row_warps /= 2;
    if (!plan_slab<C>(&p, device)) return launch_step_any(p, device, stream);
    return run("rmsnorm_linear step_tensor_kernel", step_tensor_kernel<C>, p.groups < blocks ? p.groups : blocks,
               C::THREADS, (size_t)C::bytes(p.stages, p.slab_steps), stream, p);
}

template <class T>
static gt_status launch_step_of(const StepParams& p, const Device& device, gt_stream stream) {
    if constexpr (is_built_for<T>()) {
        if (p.in.M <= 8) return launch_step_tensor<StepTraits<T, 1>>(p, device, stream);
        if (p.in.M <= 16) return launch_step_tensor<StepTraits<T, 2>>(p, device, stream);
        if (p.in.M <= 32) return launch_step_tensor<StepTraits<T, 4>>(p, device, stream);
        return launch_step_tensor<StepTraits<T, 8>>(p, device, stream);
    } else {
        return launch_step_any(p, device, stream);
    }
}

static inline gt_status launch_step(const gt_rmsnorm_linear_args& a, const Device& device, gt_stream stream) {
    StepParams p = {};
    p.in = input_of(a, nullptr);
    p.weight = a.weight_int8;
    p.scale = a.weight_scale, p.bias = a.bias;
    p.y = a.y, p.y_stride = a.y_stride;
    p.O = a.O;
    if (a.M == 0 || !step_uses_tensor_cores(a, device)) return launch_step_any(p, device, stream);
    if (a.dtype == GT_BF16) return launch_step_of<bf16>(p, device, stream);
    if (a.dtype == GT_F16) return launch_step_of<f16>(p, device, stream);
    return launch_step_of<float>(p, device, stream);
}

} /* namespace rmsnorm_linear */
} /* namespace gt */

#endif
