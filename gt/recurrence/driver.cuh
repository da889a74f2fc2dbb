/* gt/recurrence/driver.cuh - runs the stages of a recurrent operator's call, in order.
 *
 *     forward    1. Clear the outputs of tokens that belong to no sequence.
 *                2. Run the pass.
 *                3. With a pool of states, clear the outputs of sequences that have no row in the pool.
 *     backward   1. Clear as in forward.
 *                2. Compute the states before all chunks, unless forward has saved them.
 *                3. Compute G, the gradients of the states after all chunks.
 *                4. Compute the gradients of all chunks.
 *                5. Add up the partial sums of the chunks.
 *     a pass     One launch.  If sequences are cut into segments, three launches: every segment from a zero state; the
 *                scan over segments; every segment again, from the start state that the scan has computed.
 *
 * An operator describes itself in a struct `Operator` with these members:
 *     Args             its argument struct.
 *     Stream           gt_stream, or Chain if its kernels call wait_for_chain().
 *     table()          its gt_op.
 *     check(a)         returns an error if a size is too large for the kernels.
 *     States           WideStates if forward takes 16-bit states, otherwise SameStates (small_states.cuh).
 *     Snapshots        WideSnapshots if forward stores snapshots, otherwise SameStates.
 *     state_shape(a)   the StateShape of a sequence's state.
 *     Choice           says which kernels a pass takes; choose(a, pass, device) returns it.
 *     plan_forward(a, choice, device), plan_backward(a, choice, device)
 *     step(a, device, stream)  the launch of gt_OP_step; `stream` is a Stream.
 *
 * A call makes one choice and then one plan.  The plan does not change afterwards.  It contains all that its launches
 * need:
 *     sequences           the call's Sequences.
 *     unused              the tensors that clear_unused() clears; CLEAR names the launch.
 *     bytes, saved        the sizes of workspace and of `saved`, which forward writes for backward.  A size query makes
 *                         a plan to get them.
 *     forward:   pass(device, stream).
 *     backward:  has_states (forward has saved the states), accumulate, sums (a RowSums);
 *                make_states(device, stream), make_gradients(device, stream), finish_chunks(device, stream).
 * make_gradients() computes G, and finish_chunks() computes the chunks' gradients from G.  If one kernel computes both,
 * as in scan, make_gradients() launches that kernel, and finish_chunks() adds up its partial sums.
 *
 * HAS_PIECES: whether the operator has plan_segment<REVERSE>(a, choice, device), for pieces of sequences (pieces.cuh).
 * It returns a plan with `bytes` and run(device, stream). */
#ifndef GT_RECURRENCE_DRIVER_CUH
#define GT_RECURRENCE_DRIVER_CUH

#include "../base/reduce.cuh"
#include "segments.cuh"
#include "small_states.cuh"
#include "stages.cuh"

namespace gt {

/* ---- a pass ------------------------------------------------------------------------------------------------------ */

/* Runs a pass through launch().  launch(true) is the local pass: it starts from zero states and writes only
 * segments.states and segments.decays.  launch(false) is the final pass, which starts from the states that the scan has
 * stored.  With one segment the final pass alone is enough. */
template <bool REVERSE, class Stream, class Launch>
static inline gt_status run_pass(const char* scan_name, const ScanParams& scan, const Device& device, Stream& stream,
                                 const Launch& launch) {
    gt_status status;
    if (scan.segments.count > 1 && ((status = launch(true)) != GT_OK ||
                                    (status = scan_segments<REVERSE>(scan_name, scan, device, stream)) != GT_OK))
        return status;
    return launch(false);
}

/* ---- forward, step and backward ---------------------------------------------------------------------------------- */

template <class Plan, class Stream>
static inline gt_status run_pass_of(const Plan& plan, const Device& device, Stream& stream) {
    const gt_status status = plan.pass(device, stream);
    if (status != GT_OK) return status;
    return clear_skipped("recurrence clear_skipped_kernel", plan.unused, plan.sequences, device, stream);
}

template <class Plan, class Stream>
static inline gt_status run_forward(const Plan& plan, const Device& device, Stream& stream) {
    const gt_status status = clear_unused(Plan::CLEAR, plan.unused, plan.sequences, device, stream);
    return status != GT_OK ? status : run_pass_of(plan, device, stream);
}

template <class Plan, class Stream>
static inline gt_status run_backward(const Plan& plan, const Device& device, Stream& stream) {
    gt_status status;
    if ((status = clear_unused(Plan::CLEAR, plan.unused, plan.sequences, device, stream)) != GT_OK ||
        (!plan.has_states && (status = plan.make_states(device, stream)) != GT_OK) ||
        (status = plan.make_gradients(device, stream)) != GT_OK ||
        (status = plan.finish_chunks(device, stream)) != GT_OK)
        return status;
    return reduce_rows(plan.sums, plan.accumulate, stream);
}

/* ---- the C functions --------------------------------------------------------------------------------------------- */

/* Prepares the arguments and checks the GPU's own limits. */
template <class Operator>
static inline gt_status prepare(gt_pass pass, const typename Operator::Args* args, typename Operator::Args* a,
                                Device* device) {
    gt_dims dims;
    if (args) *a = *args; /* what Args has beyond the struct of the table */
    gt_status status = gt_prepare(Operator::table(), pass, GT_DEVICE, args, a, &dims);
    if (status != GT_OK || (status = Operator::check(*a)) != GT_OK) return status;
    if (a->B == 0) { /* there are neither tokens nor states, nor packed sequences */
        a->seq_capacity = 0;
        a->cu_seqlens = a->seq_count = a->slots = nullptr;
    }
    return current_device(device);
}

/* Refuses a size that is larger than the kernels take. */
static inline gt_status check_size(const char* name, int64_t size, int most) {
    if (size <= most) return GT_OK;
    return gt_fail(GT_ERROR_UNSUPPORTED, "%s = %lld: at most %d", name, (long long)size, most);
}

/* more: bytes of workspace that the call needs in addition to the plan's. */
template <class Args, class Plan>
static inline gt_status check_buffers(const Args& a, const Plan& plan, size_t more = 0) {
    const gt_status status = check_saved(a.saved, a.saved_bytes, plan.saved);
    return status != GT_OK ? status : check_workspace(a.workspace, a.workspace_bytes, plan.bytes + more);
}

template <class Operator>
static inline gt_status call_forward(const typename Operator::Args* args, gt_stream stream) {
    typename Operator::Args a;
    typename Operator::Stream on = {stream};
    Device device;
    gt_status status = prepare<Operator>(GT_FORWARD, args, &a, &device);
    if (status != GT_OK) return status;
    const typename Operator::States states(a, Operator::state_shape(a));
    const typename Operator::Snapshots snapshots(states.args, Operator::state_shape(a));
    const auto plan =
        Operator::plan_forward(snapshots.args, Operator::choose(snapshots.args, GT_FORWARD, device), device);
    if ((status = check_buffers(a, plan, states.bytes + snapshots.bytes)) != GT_OK ||
        (status = states.load(device, stream)) != GT_OK || (status = run_forward(plan, device, on)) != GT_OK ||
        (status = snapshots.store(device, stream)) != GT_OK)
        return status;
    return states.store(device, stream);
}

/* A step needs neither workspace nor `saved`. */
template <class Operator>
static inline gt_status call_step_on(const typename Operator::Args* args, typename Operator::Stream& stream) {
    typename Operator::Args a;
    Device device;
    const gt_status status = prepare<Operator>(GT_STEP, args, &a, &device);
    return status != GT_OK ? status : Operator::step(a, device, stream);
}

template <class Operator>
static inline gt_status call_step(const typename Operator::Args* args, gt_stream stream) {
    typename Operator::Stream on = {stream};
    return call_step_on<Operator>(args, on);
}

template <class Operator>
static inline gt_status call_backward(const typename Operator::Args* args, gt_stream stream) {
    typename Operator::Args a;
    typename Operator::Stream on = {stream};
    Device device;
    gt_status status = prepare<Operator>(GT_BACKWARD, args, &a, &device);
    if (status != GT_OK) return status;
    const auto plan = Operator::plan_backward(a, Operator::choose(a, GT_BACKWARD, device), device);
    return (status = check_buffers(a, plan)) != GT_OK ? status : run_backward(plan, device, on);
}

/* ---- passes that another operator enqueues: see stages.cuh ---- */

template <class Plan>
static gt_status run_forward_stage(const PassPlan& me, Stage stage, Chain& chain) {
    const Plan& plan = me.plan<Plan>();
    return stage == Stage::CLEAR ? clear_unused(Plan::CLEAR, plan.unused, plan.sequences, me.device, chain)
                                 : run_pass_of(plan, me.device, chain);
}

template <class Plan>
static gt_status run_backward_stage(const PassPlan& me, Stage stage, Chain& chain) {
    const Plan& plan = me.plan<Plan>();
    switch (stage) {
    case Stage::CLEAR: return clear_unused(Plan::CLEAR, plan.unused, plan.sequences, me.device, chain);
    case Stage::STATES: return plan.has_states ? GT_OK : plan.make_states(me.device, chain);
    case Stage::GRADIENTS: return plan.make_gradients(me.device, chain);
    default: return plan.finish_chunks(me.device, chain);
    }
}

/* Checks, chooses and plans as call_forward() and call_backward() do.  is_query: pointers may be NULL, as in a size
 * query.  The caller checks the sizes of buffers. */
template <class Operator>
static inline gt_status plan_pass(gt_pass pass, bool is_query, const typename Operator::Args* args, void* plan) {
    typename Operator::Args a;
    PassPlan* const me = static_cast<PassPlan*>(plan);
    const gt_status status = prepare<Operator>(is_query ? GT_QUERY : pass, args, &a, &me->device);
    if (status != GT_OK) return status;
    const auto choice = Operator::choose(a, pass, me->device);
    if (is_query) a.workspace = nullptr;
    me->pass = pass;
    if (pass == GT_FORWARD)
        me->hold(Operator::plan_forward(a, choice, me->device));
    else
        me->hold(Operator::plan_backward(a, choice, me->device));
    return GT_OK;
}

/* Launches a stage of a planned pass. */
template <class Operator>
static inline gt_status run_stage(const void* plan, int number, void* user_chain) {
    const PassPlan& me = *static_cast<const PassPlan*>(plan);
    const Stage stage = static_cast<Stage>(number);
    Chain& chain = *static_cast<Chain*>(user_chain);
    using Forward = decltype(Operator::plan_forward(typename Operator::Args(), typename Operator::Choice(), Device()));
    using Backward =
        decltype(Operator::plan_backward(typename Operator::Args(), typename Operator::Choice(), Device()));
    return me.pass == GT_FORWARD ? run_forward_stage<Forward>(me, stage, chain)
                                 : run_backward_stage<Backward>(me, stage, chain);
}

/* ---- pieces of sequences: see gt_wkv6_segment in gt_kernels.h ---- */

/* The choices of gt_OP_segment and gt_OP_segment_backward.  `bytes` is the larger of their two workspaces, because a
 * size query does not know which function the caller will use. */
template <class Operator>
struct SegmentChoice {
    typename Operator::Choice forward, backward;
    size_t bytes;

    SegmentChoice(const typename Operator::Args& a, const Device& device)
        : forward(Operator::choose(a, GT_SEGMENT, device)), backward(Operator::choose(a, GT_SEGMENT_BACKWARD, device)) {
        const size_t of_forward = Operator::template plan_segment<false>(a, forward, device).bytes;
        const size_t of_backward = Operator::template plan_segment<true>(a, backward, device).bytes;
        bytes = of_forward > of_backward ? of_forward : of_backward;
    }
};

template <class Operator, bool REVERSE>
static inline gt_status call_segment(const typename Operator::Args* args, gt_stream stream) {
    typename Operator::Args a;
    typename Operator::Stream on = {stream};
    Device device;
    gt_status status = prepare<Operator>(REVERSE ? GT_SEGMENT_BACKWARD : GT_SEGMENT, args, &a, &device);
    if (status != GT_OK) return status;
    const SegmentChoice<Operator> choice(a, device);
    if ((status = check_workspace(a.workspace, a.workspace_bytes, choice.bytes)) != GT_OK) return status;
    return Operator::template plan_segment<REVERSE>(a, REVERSE ? choice.backward : choice.forward, device)
        .run(device, on);
}

template <class Operator>
static inline gt_status call_workspace(const typename Operator::Args* args, gt_workspace* need) {
    gt_no_answer(need);
    typename Operator::Args a;
    Device device;
    const gt_status status = prepare<Operator>(GT_QUERY, args, &a, &device);
    if (status != GT_OK) return status;
    if (!need) return gt_fail(GT_ERROR_NULL, "need is NULL");
    a.workspace = nullptr;
    const typename Operator::States states(a, Operator::state_shape(a));
    const typename Operator::Snapshots snapshots(states.args, Operator::state_shape(a));
    const auto forward =
        Operator::plan_forward(snapshots.args, Operator::choose(snapshots.args, GT_FORWARD, device), device);
    gt_workspace sizes = {0, 0, 0, 0, 0};
    sizes.forward = forward.bytes + states.bytes + snapshots.bytes;
    sizes.backward = Operator::plan_backward(a, Operator::choose(a, GT_BACKWARD, device), device).bytes;
    sizes.saved = forward.saved;
    if constexpr (Operator::HAS_PIECES) sizes.segment = SegmentChoice<Operator>(a, device).bytes;
    *need = sizes;
    return GT_OK;
}

} /* namespace gt */

#endif /* GT_RECURRENCE_DRIVER_CUH */
