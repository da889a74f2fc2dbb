/* gt/ssd/any/launch.cuh - launches the kernels of ssd for any size. */
#ifndef GT_SSD_ANY_LAUNCH_CUH
#define GT_SSD_ANY_LAUNCH_CUH

#include "../plan.cuh"
#include "forward.cuh"
#include "gradients.cuh"

namespace gt {
namespace ssd {

static inline gt_status launch_forward_once(const ForwardParams& p, const Device& device, gt_stream stream) {
    return dispatch_size(p.in.N, [&](auto traits) {
        using C = decltype(traits);
        return run("ssd forward_kernel", forward_kernel<C::RN, C::WARPS>, pass_blocks(p.in, device), C::THREADS,
                   4 * C::FORWARD_END, stream, p);
    });
}

static inline gt_status launch_forward(const ForwardParams& p, const Device& device, gt_stream stream) {
    const ScanParams scan = scan_of(p.in, p.state_in, p.state_in_shared);
    return run_pass<false>("ssd scan_segments_kernel", scan, device, stream, [&](bool is_local) {
        ForwardParams once = p;
        if (is_local) {
            once.is_local = ALL_BUT_LAST;
            once.y = nullptr;
            once.keeps_checkpoints = 0;
            once.snapshots = {};
        }
        return launch_forward_once(once, device, stream);
    });
}

/* Launches the local pass of backward: for each segment, the gradient of the state before it, from a zero gradient
 * after it. */
static inline gt_status launch_reverse_states(const BackwardParams& p, int64_t blocks, gt_stream stream) {
    return dispatch_size(p.in.N, [&](auto traits) {
        using C = decltype(traits);
        return run("ssd reverse_states_kernel", reverse_states_kernel<C::RN, C::WARPS>, blocks, C::THREADS,
                   4 * C::BACKWARD_END, stream, p);
    });
}

/* ---- backward --------------------------------------------------------------------------------------------------- */

inline gt_status AnyBackwardPlan::make_gradients(const Device& device, gt_stream stream) const {
    const BackwardParams& p = params;
    const ScanParams scan = scan_of(p.in, p.dstate_out, 0);
    return run_pass<true>("ssd scan_segments_kernel", scan, device, stream, [&](bool is_local) {
        if (is_local) return launch_reverse_states(p, blocks, stream);
        return dispatch_size(p.in.N, [&](auto traits) {
            using C = decltype(traits);
            return run("ssd backward_kernel", backward_kernel<C::RN, C::WARPS>, blocks, C::THREADS, 4 * C::BACKWARD_END,
                       stream, p);
        });
    });
}

inline gt_status AnyBackwardPlan::finish_chunks(gt_stream stream) const {
    gt_status status = GT_OK;
    if (dB.out) status = group_sum("ssd dBm", dB, stream);
    if (dC.out && status == GT_OK) status = group_sum("ssd dCm", dC, stream);
    if (status != GT_OK) return status;
    return run("ssd backward_delta_kernel", backward_delta_kernel, windows * ((params.in.H + 31) / 32), 256, 2048,
               stream, delta);
}

} /* namespace ssd */
} /* namespace gt */

#endif
