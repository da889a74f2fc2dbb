/* gt/ssd/segment.cuh - plans of gt_ssd_segment and gt_ssd_segment_backward.  Both take a piece of a sequence: one makes
 * a state from a zero state, the other a gradient from a zero gradient, and each makes the log of the piece's decay.
 * The local pass runs over segments; then a scan finds the piece's end. */
#ifndef GT_SSD_SEGMENT_CUH
#define GT_SSD_SEGMENT_CUH

#include "../recurrence/pieces.cuh"
#include "plan.cuh"

namespace gt {
namespace ssd {

/* The arguments, with NULL for every tensor that the pass does not touch, because alignment of such a tensor must not
 * matter. */
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

    gt_status run_local(const Device& device, Chain& stream) const; /* launch.cuh */
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

} /* namespace ssd */
} /* namespace gt */

#endif
