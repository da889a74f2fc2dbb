/* gt/wkv6/segment.cuh - gt_wkv6_segment and gt_wkv6_segment_backward, for a piece of a sequence.  Both compute the log
 * of the piece's decay.  gt_wkv6_segment computes the state after the piece, from a zero state before it.
 * gt_wkv6_segment_backward computes the gradient before the piece, from a zero gradient after it.
 * On tensor cores they run the local pass over segments, and a scan (recurrence/segments.cuh).  Otherwise they run
 * token_kernel (generic.cuh) and decay_kernel, below. */
#ifndef GT_WKV6_SEGMENT_CUH
#define GT_WKV6_SEGMENT_CUH

#include "../recurrence/pieces.cuh"
#include "launch.cuh"

namespace gt {
namespace wkv6 {

/* ---- the log of a decay, any size ---------------------------------------------------------------------------------
 * out[sequence,h,n] = sum over the sequence's tokens of log d.
 * grid: at most sequences*H*ceil(N/32).  block: 8 warps.  A lane takes a channel, a warp every eighth token.
 * bytes: w once.
 * A sum keeps its rounding errors in a second term.  One warp adds the eight sums in order, so results are
 * deterministic. */
struct DecayParams {
    Problem in;
    float* out;
};

GT_KERNEL(256, 1) decay_kernel(const GT_GRID_CONSTANT DecayParams p) {
    wait_for_chain();
    const Problem& in = p.in;
    const int64_t tiles = (in.N + 31) / 32, work_count = sequence_count(in.sequences) * in.H * tiles;
    const uint32_t addresses = smem_base() + 8 * lane_id();
    for (int64_t work = block_x(); work < work_count; work += grid_x()) {
        const int64_t head = work / tiles, h = head % in.H;
        const int n = (int)(work % tiles) * 32 + lane_id();
        const Sequence seq = sequence_at(in.sequences, CHECKPOINT, head / in.H);
        TwoTermSum sum;
        for (int64_t t = warp_id(); n < in.N && t < seq.tokens; t += 8)
            sum.add(log_decay(in, load_as(in.w, in.w_dtype, offset_of(in.w_stride, seq.b, seq.first + t, h) + n)));
        sts<float2>(addresses + 256 * warp_id(), {sum.hi, sum.lo});
        sync_threads();
        for (int i = 1; warp_id() == 0 && i < 8; i++) {
            const float2 other = lds<float2>(addresses + 256 * i);
            sum.add(other.x);
            sum.lo += other.y;
        }
        if (warp_id() == 0 && n < in.N) p.out[head * in.N + n] = sum.value();
        sync_threads();
    }
}

/* ---- plans and launches ------------------------------------------------------------------------------------------ */

/* Returns the arguments without the tensors that the pass does not use.  Otherwise the alignment of an unused tensor
 * could keep the pass from tensor cores. */
template <bool REVERSE>
static inline gt_wkv6_args segment_args(gt_wkv6_args a) {
    a.u = a.state_in = a.dstate_out = nullptr;
    a.y = a.dr = a.dk = a.dw = a.dv = nullptr;
    a.du = nullptr;
    a.saved = nullptr;
    if (REVERSE) {
        a.k = a.r, a.k_stride = a.r_stride;
        a.v = a.dy, a.v_stride = a.dy_stride;
        a.state_out = nullptr;
    } else {
        a.r = a.k, a.r_stride = a.k_stride;
        a.dy = a.v, a.dy_stride = a.v_stride;
        a.dstate_in = nullptr;
    }
    a.y_stride = a.dv_stride = a.v_stride;
    a.dr_stride = a.dk_stride = a.k_stride;
    a.dw_stride = a.w_stride;
    return a;
}

template <bool REVERSE>
struct SegmentPlan {
    Pass states;
    float *state_out, *decay_out;
    size_t bytes;

    gt_status run(const Device& device, Chain& stream) const {
        return states.choice.on_tensor_cores ? run_tensor(device, stream) : run_any(device, stream);
    }

    gt_status run_tensor(const Device& device, Chain& stream) const {
        const gt_status status = launch_tensor<REVERSE>(states.tensor, states.choice, device, stream);
        if (status != GT_OK) return status;
        ScanParams scan = scan_of(states.tensor);
        scan.ends = state_out, scan.decays = decay_out;
        return scan_segments<REVERSE, true>("wkv6 scan_segments_kernel", scan, device, stream);
    }

    gt_status run_any(const Device& device, Chain& stream) const {
        const Problem& in = states.any.in;
        const gt_status status = launch_tokens<REVERSE>(states.any, device, stream);
        if (status != GT_OK || !decay_out) return status;
        return gt::run("wkv6 decay_kernel", decay_kernel, pass_blocks(in, (in.N + 31) / 32, device), 256, 8 * 256,
                       stream, DecayParams{in, decay_out});
    }
};

template <bool REVERSE>
static inline SegmentPlan<REVERSE> plan_segment(const gt_wkv6_args& args, const Choice& choice) {
    const gt_wkv6_args a = segment_args<REVERSE>(args);
    SegmentPlan<REVERSE> plan = {};
    Arena arena(a.workspace);
    Segments cut = {1, nullptr, nullptr};
    if (choice.on_tensor_cores) cut = take_segments(arena, a, choice, true);
    plan.states = pass_of<REVERSE>(a, choice, cut, nullptr);
    plan.states.tensor.local = ALL_SEGMENTS;
    plan.state_out = REVERSE ? a.dstate_in : a.state_out;
    plan.decay_out = a.decay_out;
    plan.states.any.state_out = plan.state_out;
    plan.bytes = arena.bytes();
    return plan;
}

/* why_not_faster() for all passes, for gt_wkv6_path. */
static inline const char* why_no_pass_is_faster(const gt_wkv6_args& a, gt_pass pass, const KernelList& kernels,
                                                const Device& device, char (&room)[128]) {
    if (pass == GT_SEGMENT) return why_not_faster(segment_args<false>(a), GT_FORWARD, kernels, device, room);
    if (pass == GT_SEGMENT_BACKWARD) return why_not_faster(segment_args<true>(a), GT_BACKWARD, kernels, device, room);
    return why_not_faster(a, pass, kernels, device, room);
}

struct Operator {
    using Args = gt_wkv6_args;
    using Stream = Chain;
    static const gt_op* table() { return gt_op_wkv6(); }
    static gt_status check(const Args& a) {
        const gt_status status = check_size("N", a.N, MAX_SIZE);
        return status != GT_OK ? status : check_size("V", a.V, MAX_SIZE);
    }
    using States = WideStates<Args>;
    using Snapshots = WideSnapshots<Args>;
    static StateShape state_shape(const Args& a) { return {a.H * a.N, a.V}; }
    static constexpr bool HAS_PIECES = true;
    static constexpr const char* JOIN = "wkv6 join_kernel";
    static int64_t rows(const Args& a) { return a.H * a.N; }
    static int64_t columns(const Args& a) { return a.V; }
    using Choice = wkv6::Choice;
    static Choice choose(const Args& a, gt_pass pass, const Device& device) {
        if (pass == GT_SEGMENT) return wkv6::choose(segment_args<false>(a), GT_FORWARD, device);
        if (pass == GT_SEGMENT_BACKWARD) return wkv6::choose(segment_args<true>(a), GT_BACKWARD, device);
        return wkv6::choose(a, pass, device);
    }
    static constexpr auto plan_forward = wkv6::plan_forward;
    static constexpr auto plan_backward = wkv6::plan_backward;
    static gt_status step(const Args& a, const Device&, Chain& chain) { return launch_step(a, chain); }
    template <bool REVERSE>
    static SegmentPlan<REVERSE> plan_segment(const Args& a, const Choice& choice, const Device&) {
        return wkv6::plan_segment<REVERSE>(a, choice);
    }
};

/* The operator in a mixed call of wkv_ssm: its y is the sum. */
struct MixedArgs : gt_wkv6_args {
    gt_mix mix;
};

struct MixedOperator : Operator {
    using Args = MixedArgs;
    static gt_status check(const Args& a) {
        const int64_t width = gt_times(a.H, a.V); /* channels are numbered by int */
        if (width > INT32_MAX)
            return gt_fail(GT_ERROR_UNSUPPORTED, "H = %lld, V = %lld: H V is at most 2^31 - 1 in a mixed call",
                           (long long)a.H, (long long)a.V);
        return Operator::check(a);
    }
    static Choice choose(const Args& a, gt_pass pass, const Device& device) {
        return wkv6::choose(a, pass, device, &a.mix);
    }
    static ForwardPlan plan_forward(const Args& a, const Choice& choice, const Device& device) {
        ForwardPlan plan = wkv6::plan_forward(a, choice, device);
        plan.states.tensor.mix = plan.states.any.mix = mix_of(a.mix);
        add_output(plan.unused, a.mix.y, a.mix.y_stride, a.dtype, a.H, a.V);
        return plan;
    }
    static gt_status step(const Args& a, const Device&, Chain& chain) { return launch_step(a, chain, mix_of(a.mix)); }
};

} /* namespace wkv6 */
} /* namespace gt */

#endif
