/* gt/ssd/launch.cuh - ssd on the current GPU: its plans, by the kernels that a call takes (launch_any.cuh,
 * launch_tensor.cuh, launch_sm90.cuh, launch_backward_tensor.cuh).  The order of launches, and the C functions, are
 * gt/recurrence/driver.cuh's. */
#ifndef GT_SSD_LAUNCH_CUH
#define GT_SSD_LAUNCH_CUH

#include "launch_backward_tensor.cuh"
#include "launch_sm90.cuh"
#include "table.h"

namespace gt {
namespace ssd {

/* ---- forward ------------------------------------------------------------------------------------------ */

inline gt_status ForwardPlan::pass(const Device& device, Chain& chain) const {
    if (!on_tensor_cores) return launch_forward(any, device, chain.stream); /* they do not wait for a chain */
    return launch_forward_units(tensor, units, states, device, chain);
}

/* Enough for any kind of kernels: which there are may not be known yet (see has_sm90a). */
static inline size_t forward_workspace(const gt_ssd_args& a, const Device& device) {
    size_t most = 0;
    for (const int64_t count : {segments_for(a, device), segments_by_units(a, 0, device),
                                segments_by_units(a, units_by_sizes(a, device), device)}) {
        Arena arena(nullptr);
        take_segments(arena, a, count);
        if (has_tensor_sizes(a)) {
            const int units = units_by_sizes(a, device);
            take_share(arena, a), take_order(arena, a, units);
            take_groups(arena, a, forward_units(a, units));
        }
        if (arena.bytes() > most) most = arena.bytes();
    }
    return most;
}

static inline ForwardPlan plan_forward(const gt_ssd_args& a, bool, const Device& device) {
    ForwardPlan plan = {};
    const bool saves = saves_states(a, device);
    Arena arena(a.workspace), saved(saves ? a.saved : nullptr);
    const Checkpoints checkpoints = saves ? take_checkpoints(saved, a) : Checkpoints();
    plan.sequences = sequences_of(a);
    add_output(plan.unused, a.y, a.y_stride, a.dtype, a.H, a.P);
    plan.on_tensor_cores = takes_tensor_cores(a, device);
    if (plan.on_tensor_cores) {
        TensorParams& p = plan.tensor;
        plan.states = states_units(a, device), plan.units = forward_units(a, plan.states);
        p.in = problem_of(a);
        p.in.segments = take_segments(arena, a, segments_by_units(a, plan.units, device));
        p.share = take_share(arena, a);
        plan.unused.order = take_order(arena, a, plan.units);
        p.in.order = plan.unused.order;
        p.groups = take_groups(arena, a, plan.units);
        p.y = a.y, p.y_stride = a.y_stride;
        p.state_in = a.state_in, p.state_in_shared = a.state_in_shared;
        p.state_out = a.state_out;
        p.checkpoints = checkpoints;
    } else {
        ForwardParams& p = plan.any;
        p.in = problem_of(a);
        p.in.segments = take_segments(arena, a, segments_for(a, device));
        p.y = a.y, p.y_stride = a.y_stride;
        p.state_in = a.state_in, p.state_in_shared = a.state_in_shared;
        p.state_out = a.state_out;
        p.keeps_checkpoints = saves && a.saved;
        p.checkpoints = checkpoints;
    }
    plan.bytes = forward_workspace(a, device), plan.saved = saved.bytes();
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

static inline BackwardPlan plan_backward(const gt_ssd_args& args, const Device& device) {
    BackwardPlan plan = {};
    gt_ssd_args a = args;
    if (!a.reads_y || !a.z || !a.dz) a.y = nullptr; /* in a query, too: forward's may lie otherwise */
    const bool saves = saves_states(a, device);
    if (!saves) a.saved = nullptr;
    Arena arena(a.workspace), saved(const_cast<void*>(static_cast<const void*>(a.saved)));
    const Checkpoints states = saves ? take_checkpoints(saved, a) : Checkpoints();
    plan.sequences = sequences_of(a);
    plan.accumulate = a.accumulate;
    plan.on_tensor_cores = takes_tensor_cores(a, device);
    add_output(plan.unused, a.dx, a.dx_stride, a.dtype, a.H, a.P);
    add_output(plan.unused, a.dz, a.dz_stride, a.dtype, a.H, a.P);
    if (plan.on_tensor_cores) {
        plan.tensor = plan_tensor_backward(a, arena, states, plan.sums, states_units(a, device), device);
        plan.has_states = !plan.tensor.has_first();
        plan.unused.order = plan.tensor.order;
        add_output(plan.unused, a.ddt, a.ddt_stride, a.dt_dtype, a.H, 1);
        add_output(plan.unused, a.dBm, a.dBm_stride, a.dtype, a.G, a.N);
        add_output(plan.unused, a.dCm, a.dCm_stride, a.dtype, a.G, a.N);
    } else {
        plan.any = plan_any_backward(a, arena, states, plan.sums, device);
        plan.has_states = a.saved;
    }
    plan.bytes = arena.bytes(), plan.saved = saved.bytes();
    if (!plan.on_tensor_cores) return plan;
    plan.bytes = either_workspace(a, device, [&](Arena& other, int units) {
        RowSums unused;
        plan_tensor_backward(a, other, states, unused, units, device);
    });
    return plan;
}

} /* namespace ssd */
} /* namespace gt */

#endif
