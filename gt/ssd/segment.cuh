/* gt/ssd/segment.cuh - plans of gt_ssd_segment and gt_ssd_segment_backward.  Both run over a piece of a sequence.  The
 * first computes the state after the piece, from a zero state.  The second computes the gradient of the state before
 * the piece, from a zero gradient.  Both compute the log of the piece's decay.  The piece is cut into segments: the
 * local pass runs over each of them, and a scan joins them. */
#ifndef GT_SSD_SEGMENT_CUH
#define GT_SSD_SEGMENT_CUH

#include "../recurrence/pieces.cuh"
#include "plan.cuh"

namespace gt {
namespace ssd {

/* Sets every tensor that the pass does not touch to NULL, because the alignment of these tensors must not influence the
 * choice. */
template <bool REVERSE>
static inline gt_ssd_args segment_args(gt_ssd_args a) {
    a.y = a.dx = a.dz = a.ddt = a.dBm = a.dCm = nullptr;
    a.dA = a.dDskip = a.ddt_bias = nullptr;
    a.Dskip = a.state_in = a.dstate_out = nullptr;
    a.saved = nullptr;
    a.snapshots = nullptr;
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
    GatedRows g; /* in a reverse pass with choice.gates_rows */
    size_t bytes;

    gt_status run_local(const Device& device, Chain& stream) const; /* defined in launch.cuh */
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
