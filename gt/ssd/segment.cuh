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
    bool on_tensor_cores;
    int units; /* see states_units() */
    float *state_out, *decay_out;
    GatedRows g; /* rows NULL: it is not made */
    size_t bytes;

    gt_status run_local(const Device& device, Chain& stream) const {
        if (on_tensor_cores) {
            StatesParams p = {};
            p.in = in;
            if (g.rows) {
                const gt_status status = gate_rows(in, g, GateGradient(), device, stream);
                if (status != GT_OK) return status;
                p.in = with_gated_rows(in, g);
            }
            p.is_local = ALL_SEGMENTS;
            return launch_states_once<REVERSE>(p, units, device, stream);
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
        if (on_tensor_cores) return scan_segments<REVERSE, true>("ssd scan_segments_kernel", scan, device, stream);
        return scan_segments<REVERSE, true>("ssd scan_segments_kernel", scan, device, stream.stream);
    }
};

template <bool REVERSE>
static inline SegmentPlan<REVERSE> plan_segment(const gt_ssd_args& args, const Device& device) {
    const gt_ssd_args a = segment_args<REVERSE>(args);
    SegmentPlan<REVERSE> plan = {};
    Arena arena(a.workspace);
    plan.on_tensor_cores = takes_tensor_cores(a, device);
    plan.units = plan.on_tensor_cores ? states_units(a, device) : 0;
    plan.in = problem_of(a);
    const auto take = [&](Arena& to, int units) {
        plan.in.segments = take_segments(to, a, segments_by_units(a, units, device), true);
        plan.g = units && REVERSE && may_gate_rows(a, device) ? take_gated_rows(to, a, nullptr, {}) : GatedRows();
    };
    if (plan.on_tensor_cores) {
        plan.bytes = either_workspace(a, device, take);
        take(arena, plan.units);
    } else {
        plan.in.segments = take_segments(arena, a, segments_for(a, device), true);
        plan.bytes = arena.bytes();
    }
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
    static constexpr auto plan_forward = ssd::plan_forward;
    static constexpr auto plan_backward = ssd::plan_backward;
    static gt_status step(const Args& a, const Device& device, gt_stream stream) {
        return launch_step(a, device, stream);
    }
    template <bool REVERSE>
    static SegmentPlan<REVERSE> plan_segment(const Args& a, const Device& device) {
        return ssd::plan_segment<REVERSE>(a, device);
    }
};

} /* namespace ssd */
} /* namespace gt */

#endif
