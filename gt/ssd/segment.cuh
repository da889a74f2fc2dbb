/* gt/ssd/segment.cuh - gt_ssd_segment and gt_ssd_segment_backward: what a piece of a sequence makes of a zero state, or
 * of a zero gradient, and the log of its decay: the local pass over segments, and a scan for the end.  And ssd as the
 * driver sees it. */
#ifndef GT_SSD_SEGMENT_CUH
#define GT_SSD_SEGMENT_CUH

#include "../recurrence/pieces.cuh"
#include "launch.cuh"
#include "step.cuh"

namespace gt {
namespace ssd {

/* The arguments without what the pass does not read or write, which must not keep it from tensor cores. */
template <bool REVERSE>
static inline gt_ssd_args segment_args(gt_ssd_args a) {
    a.y = a.dx = a.dz = a.ddt = a.dBm = a.dCm = nullptr;
    a.dA = a.dDskip = a.ddt_bias = nullptr;
    a.Dskip = a.state_in = a.dstate_out = nullptr;
    a.saved = nullptr;
    if (REVERSE) {
        a.x = a.Bm = nullptr;
        a.state_out = nullptr;
    } else {
        a.Cm = a.z = a.dy = nullptr;
        a.dstate_in = nullptr;
    }
    return a;
}

template <bool REVERSE>
struct SegmentPlan {
    Problem in;
    Choice choice;
    float *state_out, *decay_out;
    GatedRows g; /* of a reverse pass, where choice.gates_rows */
    size_t bytes;

    gt_status run_local(const Device& device, Chain& stream) const {
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

    gt_status run(const Device& device, Chain& stream) const {
        const gt_status status = run_local(device, stream);
        if (status != GT_OK) return status;
        ScanParams scan = scan_of(in, nullptr, 0);
        scan.ends = state_out, scan.decays = decay_out;
        if (choice.on_tensor_cores)
            return scan_segments<REVERSE, true>("ssd scan_segments_kernel", scan, device, stream);
        return scan_segments<REVERSE, true>("ssd scan_segments_kernel", scan, device, stream.stream);
    }
};

template <bool REVERSE>
static inline SegmentPlan<REVERSE> plan_segment(const gt_ssd_args& args, const Choice& choice) {
    const gt_ssd_args a = segment_args<REVERSE>(args);
    SegmentPlan<REVERSE> plan = {};
    Arena arena(a.workspace);
    plan.choice = choice;
    plan.in = problem_of(a);
    plan.in.segments = take_segments(arena, a, choice.on_tensor_cores ? choice.segments : choice.any_segments, true);
    if (REVERSE && choice.on_tensor_cores && choice.gates_rows) plan.g = take_gated_rows(arena, a, nullptr, {});
    plan.bytes = arena.bytes();
    plan.state_out = REVERSE ? a.dstate_in : a.state_out;
    plan.decay_out = a.decay_out;
    return plan;
}

struct Operator {
    using Args = gt_ssd_args;
    using Stream = Chain;
    static const gt_op* table() { return gt_op_ssd(); }
    static gt_status check(const Args& a) {
        const gt_status status = check_size("P", a.P, MAX_SIZE);
        return status != GT_OK ? status : check_size("N", a.N, MAX_SIZE);
    }
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
