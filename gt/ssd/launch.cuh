/* gt/ssd/launch.cuh - ssd on the current GPU: makes the launches of a plan.  choose() has set the family of kernels for
 * each launch (any/launch.cuh, mma/launch.cuh, sm90/launch.cuh).  The file also defines the struct through which the
 * driver calls ssd.  gt/recurrence/driver.cuh has the order of the launches and the C functions. */
#ifndef GT_SSD_LAUNCH_CUH
#define GT_SSD_LAUNCH_CUH

#include "any/launch.cuh"
#include "mma/launch.cuh"
#include "segment.cuh"
#include "sm90/launch.cuh"
#include "step.cuh"
#include "table.h"

namespace gt {
namespace ssd {

/* ---- states ----------------------------------------------------------------------------------------------------- */

template <bool REVERSE>
static gt_status launch_states_once(const StatesParams& all, const StatesChoice& choice, const Device& device,
                                    Chain& chain) {
    const int64_t strands = strands_of(all.in, choice, device), blocks = strands * all.in.G * group_pairs(all.in);
    const bool is_fp32 = all.in.dtype == GT_F32;
    return each_slab(all, [&](const StatesParams& p, int) {
        if (choice.family == Family::SM90)
            return is_fp32 ? launch_states_fp32_hopper<REVERSE>(p, choice.units, strands, chain)
                           : launch_states_hopper<REVERSE>(p, choice.units, strands, chain);
        return is_fp32 ? launch_states_fp32<REVERSE>(p, blocks, chain)
                       : launch_states_tensor<REVERSE>(p, blocks, chain);
    });
}

/* If sequences have several segments, computes the segments' first states and stores them in segments.states. */
template <bool REVERSE>
static gt_status start_segments(const Problem& in, const float* state_in, int state_in_shared,
                                const StatesChoice& choice, const Device& device, Chain& chain) {
    if (in.segments.count == 1) return GT_OK;
    StatesParams local = {};
    local.in = in;
    local.is_local = ALL_BUT_LAST;
    const gt_status status = launch_states_once<REVERSE>(local, choice, device, chain);
    if (status != GT_OK) return status;
    return scan_segments<REVERSE>("ssd scan_segments_kernel", scan_of(in, state_in, state_in_shared), device, chain);
}

/* Makes checkpoints of h from the initial states p.state_in.  With REVERSE, makes checkpoints of G and dstate_in;
 * p.state_in is then dstate_out.  p.state_sum has a row for each of the strands_of() strands. */
template <bool REVERSE>
static gt_status launch_states(const StatesParams& p, const StatesChoice& choice, const Device& device, Chain& chain) {
    const gt_status status = start_segments<REVERSE>(p.in, p.state_in, p.state_in_shared, choice, device, chain);
    return status != GT_OK ? status : launch_states_once<REVERSE>(p, choice, device, chain);
}

/* ---- forward ---------------------------------------------------------------------------------------------------- */

/* Launches forward on tensor cores, or the pass of backward that computes dz. */
static inline gt_status launch_forward_units(const TensorParams& all, const ForwardChoice& choice, const Device& device,
                                             Chain& chain) {
    const gt_status status =
        start_segments<false>(all.in, all.state_in, all.state_in_shared, choice.local, device, chain);
    if (status != GT_OK) return status;
    if (choice.units) return launch_forward_hopper_units(all, choice, device, chain);
    const int64_t blocks = strands_of_units(all.in, 2, 2, device) * all.in.G * group_pairs(all.in);
    return each_slab(all, [&](const TensorParams& p, int) {
        if (choice.family == Family::SM90) return launch_forward_fp32_hopper(p, device, chain);
        return p.in.dtype == GT_F32 ? launch_forward_fp32(p, blocks, chain) : launch_forward_tensor(p, blocks, chain);
    });
}

inline gt_status ForwardPlan::pass(const Device& device, Chain& chain) const {
    /* kernels for any size do not call wait_for_chain(), so they are launched on the plain stream */
    if (!choice.on_tensor_cores) return launch_forward(any, device, chain.stream);
    return launch_forward_units(tensor, choice.forward, device, chain);
}

/* ---- backward --------------------------------------------------------------------------------------------------- */

inline gt_status TensorBackwardPlan::make_dz(const Device& device, Chain& chain) const {
    return launch_forward_units(gate, choice.gate, device, chain);
}

inline gt_status TensorBackwardPlan::make_states(const Device& device, Chain& chain) const {
    if (makes_dz && !choice.gates_rows) return make_dz(device, chain);
    const gt_status status = choice.gates_rows ? gate_rows(gated, g, gradient, device, chain) : GT_OK;
    return status == GT_OK && makes_h ? launch_states<false>(forward, choice.states, device, chain) : status;
}

inline gt_status TensorBackwardPlan::make_gradients(const Device& device, Chain& chain) const {
    return makes_G ? launch_states<true>(reverse, choice.reverse, device, chain) : GT_OK;
}

inline gt_status TensorBackwardPlan::make_chunks(const Device& device, Chain& chain) const {
    const bool on_sm90 = choice.chunks == Family::SM90;
    if (chunks.in.dtype == GT_F32) {
        const gt_status status = each_slab(split, [&](const SplitGradientParams& p, int) {
            return on_sm90 ? launch_split_hopper_chunks(p, chain) : launch_split_chunks(p, chain);
        });
        return status == GT_OK && times.da ? launch_split_times(times, chain) : status;
    }
    gt_status status = on_sm90 ? launch_chunk_factors(tokens, device, chain) : GT_OK;
    if (status == GT_OK)
        status = each_slab(chunks, [&](const ChunkGradientParams& p, int slab) {
            return on_sm90 ? launch_hopper_chunks(p, tokens, slab, choice, device, chain)
                           : launch_slab_chunks(p, choice.chunk_stages, chain);
        });
    return status == GT_OK && on_sm90 ? launch_chunk_times(tokens, device, chain) : status;
}

inline gt_status TensorBackwardPlan::finish_chunks(const Device& device, Chain& chain) const {
    const gt_status status = make_chunks(device, chain);
    if (status != GT_OK || !makes_dz || !choice.gates_rows) return status;
    return choice.gates_by_y ? make_lost_rows(gated, gradient, chunks.h, device, chain) : make_dz(device, chain);
}

inline gt_status BackwardPlan::make_states(const Device& device, Chain& chain) const {
    return on_tensor_cores ? tensor.make_states(device, chain) : launch_forward(any.states, device, chain.stream);
}

inline gt_status BackwardPlan::make_gradients(const Device& device, Chain& chain) const {
    return on_tensor_cores ? tensor.make_gradients(device, chain) : any.make_gradients(device, chain.stream);
}

inline gt_status BackwardPlan::finish_chunks(const Device& device, Chain& chain) const {
    return on_tensor_cores ? tensor.finish_chunks(device, chain) : any.finish_chunks(chain.stream);
}

/* ---- pieces ----------------------------------------------------------------------------------------------------- */

template <bool REVERSE>
gt_status SegmentPlan<REVERSE>::run_local(const Device& device, Chain& stream) const {
    if (choice.on_tensor_cores) {
        StatesParams p = {};
        p.in = in;
        if (REVERSE && choice.gates_rows) {
            const gt_status status = gate_rows(in, g, GateGradient(), device, stream);
            if (status != GT_OK) return status;
            p.in = with_gated_rows(in, g);
        }
        p.is_local = ALL_SEGMENTS;
        return launch_states_once<REVERSE>(p, REVERSE ? choice.reverse : choice.states, device, stream);
    }
    if (!REVERSE) {
        ForwardParams p = {};
        p.in = in;
        p.is_local = ALL_SEGMENTS;
        return launch_forward_once(p, device, stream.stream);
    }
    BackwardParams p = {};
    p.in = in;
    p.all_segments = 1;
    return launch_reverse_states(p, pass_blocks(in, device), stream.stream);
}

/* ---- the operator ----------------------------------------------------------------------------------------------- */

struct Operator {
    using Args = gt_ssd_args;
    using Stream = Chain;
    static const gt_op* table() { return gt_op_ssd(); }
    static gt_status check(const Args& a) {
        const gt_status status = check_size("P", a.P, MAX_SIZE);
        return status != GT_OK ? status : check_size("N", a.N, MAX_SIZE);
    }
    using States = WideStates<Args>;
    using Snapshots = WideSnapshots<Args>;
    static StateShape state_shape(const Args& a) { return {a.H * a.P, a.N}; }
    static constexpr bool HAS_PIECES = true;
    static constexpr const char* JOIN = "ssd join_kernel";
    static int64_t rows(const Args& a) { return a.H; }
    static int64_t columns(const Args& a) { return a.P * a.N; }
    using Choice = ssd::Choice;
    static Choice choose(const Args& a, gt_pass pass, const Device& device) {
        if (pass == GT_BACKWARD) return ssd::choose(backward_args(a), pass, device);
        if (pass == GT_SEGMENT) return ssd::choose(segment_args<false>(a), pass, device);
        if (pass == GT_SEGMENT_BACKWARD) return ssd::choose(segment_args<true>(a), pass, device);
        return ssd::choose(a, pass, device);
    }
    static constexpr auto plan_forward = ssd::plan_forward;
    static constexpr auto plan_backward = ssd::plan_backward;
    static gt_status step(const Args& a, const Device& device, Chain& chain) { return launch_step(a, device, chain); }
    template <bool REVERSE>
    static SegmentPlan<REVERSE> plan_segment(const Args& a, const Choice& choice, const Device&) {
        return ssd::plan_segment<REVERSE>(a, choice);
    }
};

} /* namespace ssd */
} /* namespace gt */

#endif
