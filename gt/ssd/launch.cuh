/* gt/ssd/launch.cuh - ssd on the current GPU: its plans, by the kernels that a call takes (any/launch.cuh,
 * mma/launch.cuh, sm90/launch.cuh, mma/launch_gradients.cuh).  The order of launches, and the C functions, are
 * gt/recurrence/driver.cuh's. */
#ifndef GT_SSD_LAUNCH_CUH
#define GT_SSD_LAUNCH_CUH

#include "mma/launch_gradients.cuh"
#include "sm90/launch.cuh"
#include "table.h"

namespace gt {
namespace ssd {

/* ---- forward ----------------------------------------------------------------------------------------------------- */

inline gt_status ForwardPlan::pass(const Device& device, Chain& chain) const {
    /* the kernels for any size do not wait for a chain */
    if (!choice.on_tensor_cores) return launch_forward(any, device, chain.stream);
    return launch_forward_units(tensor, choice.forward, device, chain);
}

/* The scratch of forward on tensor cores. */
static inline void take_forward(Arena& arena, const gt_ssd_args& a, const Choice& choice, TensorParams& p) {
    p.in = problem_of(a);
    p.in.segments = take_segments(arena, a, choice.segments);
    p.share = take_share(arena, a);
    p.in.order = take_order(arena, a, choice);
    p.groups = take_groups(arena, a, p.in, choice.forward.units);
}

/* Enough for tensors of any alignment: a query may not have them yet. */
static inline size_t forward_workspace(const gt_ssd_args& a, const Choice& choice) {
    Arena of_any(nullptr), of_tensor(nullptr);
    TensorParams unused;
    take_segments(of_any, a, choice.any_segments);
    if (choice.has_tensor_sizes) take_forward(of_tensor, a, choice, unused);
    return of_any.bytes() > of_tensor.bytes() ? of_any.bytes() : of_tensor.bytes();
}

static inline ForwardPlan plan_forward(const gt_ssd_args& a, const Choice& choice, const Device&) {
    ForwardPlan plan = {};
    Arena arena(a.workspace), saved(choice.saves_states ? a.saved : nullptr);
    const Checkpoints checkpoints = choice.saves_states ? take_checkpoints(saved, a) : Checkpoints();
    plan.choice = choice;
    plan.sequences = sequences_of(a);
    add_output(plan.unused, a.y, a.y_stride, a.dtype, a.H, a.P);
    if (choice.on_tensor_cores) {
        TensorParams& p = plan.tensor;
        take_forward(arena, a, choice, p);
        plan.unused.order = const_cast<int32_t*>(p.in.order);
        p.y = a.y, p.y_stride = a.y_stride;
        p.state_in = a.state_in, p.state_in_shared = a.state_in_shared;
        p.state_out = a.state_out;
        p.checkpoints = checkpoints;
    } else {
        ForwardParams& p = plan.any;
        p.in = problem_of(a);
        p.in.segments = take_segments(arena, a, choice.any_segments);
        p.y = a.y, p.y_stride = a.y_stride;
        p.state_in = a.state_in, p.state_in_shared = a.state_in_shared;
        p.state_out = a.state_out;
        p.keeps_checkpoints = choice.saves_states && a.saved;
        p.checkpoints = checkpoints;
    }
    plan.bytes = forward_workspace(a, choice), plan.saved = saved.bytes();
    return plan;
}

/* ---- backward -------------------------------------------------------------------------------------------------- */

struct BackwardPlan {
    static constexpr const char* CLEAR = "ssd clear_unused_kernel";
    Sequences sequences;
    ClearParams unused;
    bool has_states, on_tensor_cores;
    TensorBackwardPlan tensor;
    AnyBackwardPlan any;
    RowSums sums;
    int accumulate;
    size_t bytes, saved;

    gt_status make_states(const Device& device, Chain& chain) const {
        return on_tensor_cores ? tensor.make_states(device, chain) : launch_forward(any.states, device, chain.stream);
    }
    gt_status make_gradients(const Device& device, Chain& chain) const {
        return on_tensor_cores ? tensor.make_gradients(device, chain) : any.make_gradients(device, chain.stream);
    }
    gt_status finish_chunks(const Device& device, Chain& chain) const {
        return on_tensor_cores ? tensor.finish_chunks(device, chain) : any.finish_chunks(chain.stream);
    }
};

/* The arguments as backward takes them: without what it does not read. */
static inline gt_ssd_args backward_args(gt_ssd_args a) {
    if (!a.reads_y || !a.z || !a.dz) a.y = nullptr; /* in a query, too: forward's may lie otherwise */
    return a;
}

static inline BackwardPlan plan_backward(const gt_ssd_args& args, const Choice& choice, const Device& device) {
    BackwardPlan plan = {};
    gt_ssd_args a = backward_args(args);
    if (!choice.saves_states) a.saved = nullptr;
    Arena arena(a.workspace), saved(const_cast<void*>(static_cast<const void*>(a.saved)));
    const Checkpoints states = choice.saves_states ? take_checkpoints(saved, a) : Checkpoints();
    plan.sequences = sequences_of(a);
    plan.accumulate = a.accumulate;
    plan.on_tensor_cores = choice.on_tensor_cores;
    add_output(plan.unused, a.dx, a.dx_stride, a.dtype, a.H, a.P);
    add_output(plan.unused, a.dz, a.dz_stride, a.dtype, a.H, a.P);
    if (plan.on_tensor_cores) {
        plan.tensor = plan_tensor_backward(a, arena, states, plan.sums, choice, device);
        plan.has_states = !plan.tensor.has_first();
        plan.unused.order = plan.tensor.order;
        add_output(plan.unused, a.ddt, a.ddt_stride, a.dt_dtype, a.H, 1);
        add_output(plan.unused, a.dBm, a.dBm_stride, a.dtype, a.G, a.N);
        add_output(plan.unused, a.dCm, a.dCm_stride, a.dtype, a.G, a.N);
    } else {
        plan.any = plan_any_backward(a, arena, states, plan.sums, choice, device);
        plan.has_states = a.saved;
    }
    plan.bytes = arena.bytes(), plan.saved = saved.bytes();
    return plan;
}

} /* namespace ssd */
} /* namespace gt */

#endif
