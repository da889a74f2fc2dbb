/* gt/fused/wkv_ssm.cuh - wkv6 and ssd of one hybrid block.  All arguments are checked first, then both operators are
 * enqueued in one chain.
 *
 * This file has no kernels.  It launches the stages of gt/wkv6/ and gt/ssd/ in turn (gt/recurrence/stages.cuh).  The
 * operators share the buffer `saved` and the buffer `workspace`; wkv6's part comes first in each.
 *
 * MIXED CALLS.  Forward and a step launch ssd before wkv6, and wkv6's kernel adds ssd's y to its own.  A call that does
 * not want y of wkv6 moves 3 tensors [B,T,H,V]: it writes y of ssd, reads it, and writes the sum.  Two calls and an
 * addition move 5.  With gains, backward first launches unmix_kernel (wkv_ssm_mix.cuh), outside of the chain, because
 * the producer warps of wkv6 read dy without waiting for earlier kernels of the chain.  Its memory comes first in the
 * workspace.
 *
 * ONE CHAIN (see Chain).  Every kernel but the first may start before the previous kernel ends.  Its blocks start when
 * all blocks of the previous kernel have called wait_for_chain() or ended, and there is room.  They wait for the end of
 * that kernel before they touch memory that kernels of the chain write.  G is the gradient of the states.
 *     forward    1. for packed sequences, wkv6 and then ssd clear the elements outside all sequences
 *                2. wkv6's pass, then ssd's pass
 *     backward   1. as in forward
 *                2. wkv6's states, then ssd's, unless they are saved; with z, ssd also gates dy or computes dz
 *                3. wkv6's G, then ssd's G
 *                4. ssd's gradients of the chunks, and dz if it is not computed yet; then wkv6's
 *                5. the partial sums of both: one launch, or two if there are more than four sums
 *     step       ssd's kernel, then wkv6's.  Both run side by side.  wkv6's kernel waits for ssd's before it ends, so
 *                that later work of the stream waits for both
 *
 * Two calls with the same segments give the same results, bit for bit. */
#ifndef GT_FUSED_WKV_SSM_CUH
#define GT_FUSED_WKV_SSM_CUH

#include "../base/path.cuh"
#include "../recurrence/stages.cuh"
#include "wkv_ssm_mix.cuh"
#include "wkv_ssm_table.h"

namespace gt {
namespace wkv_ssm {

/* Checks the sizes that wkv6 or ssd would refuse, since their own messages would name wkv6 or ssd. */
static inline gt_status check_sizes(const gt_wkv_ssm_args& a) {
    const struct {
        const char* name;
        int64_t value;
    } sizes[] = {{"wkv6.N", a.wkv6.N}, {"wkv6.V", a.wkv6.V}, {"ssd.P", a.ssd.P}, {"ssd.N", a.ssd.N}};
    for (const auto& size : sizes)
        if (size.value > 256)
            return gt_fail(GT_ERROR_UNSUPPORTED, "%s = %lld: at most 256", size.name, (long long)size.value);
    return GT_OK;
}

/* The planned passes of both operators, and in backward of a mixed call the kernel before them. */
struct Both {
    bool mixes;
    Unmix unmix;
    PassPlan wkv6, ssd;

    size_t bytes() const { return unmix.bytes + wkv6.bytes + ssd.bytes; }
    size_t saved() const { return wkv6.saved + ssd.saved; }
};

/* Checks the arguments and fills in the inner structs. */
static inline gt_status prepare(gt_pass pass, const gt_wkv_ssm_args* args, gt_wkv_ssm_args* a) {
    gt_dims dims;
    Device device;
    gt_status status = gt_prepare(gt_op_of_wkv_ssm(args, pass), pass, GT_DEVICE, args, a, &dims);
    if (status != GT_OK || (status = check_sizes(*a)) != GT_OK || (status = current_device(&device)) != GT_OK)
        return status;
    const int64_t width = gt_times(a->wkv6.H, a->wkv6.V);
    if (gt_wkv_ssm_mixes(a, pass) && width > INT32_MAX) /* kernels number channels by int */
        return gt_fail(GT_ERROR_UNSUPPORTED, "wkv6.H = %lld, wkv6.V = %lld: H V is at most 2^31 - 1 in a mixed call",
                       (long long)a->wkv6.H, (long long)a->wkv6.V);
    if (a->B == 0) { /* neither tokens nor states, not even of packed sequences */
        a->seq_capacity = 0;
        a->cu_seqlens = a->seq_count = nullptr;
    }
    gt_wkv_ssm_share(a);
    return GT_OK;
}

/* Returns the part of the caller's buffer from byte `offset` on.  NULL stays NULL. */
static inline char* behind(void* buffer, size_t offset) {
    return buffer ? static_cast<char*>(buffer) + offset : nullptr;
}

static inline size_t left_of(size_t bytes, size_t offset) { return bytes > offset ? bytes - offset : 0; }

/* Plans both passes.  In each buffer ssd's part follows wkv6's part, whose size is in wkv6's plan. */
static inline gt_status plan(gt_pass pass, bool is_query, bool mixes, const gt_wkv_ssm_args& args, Both* both) {
    gt_wkv_ssm_args a = args;
    Device device;
    gt_status status = current_device(&device);
    if (status != GT_OK) return status;
    both->mixes = mixes;
    both->unmix = {};
    if (is_query) a.workspace = nullptr;
    if (mixes && pass == GT_BACKWARD && !share_dmixed(&a)) both->unmix = plan_unmix(&a, device);
    size_t used = both->unmix.bytes;
    a.wkv6.saved = a.saved, a.wkv6.saved_bytes = a.saved ? a.saved_bytes : 0;
    a.wkv6.workspace = behind(a.workspace, used), a.wkv6.workspace_bytes = left_of(a.workspace_bytes, used);
    if (mixes && pass == GT_FORWARD) {
        const gt_mix mix = gt_wkv_ssm_mix_of(&a);
        a.wkv6.y = a.mixed, a.wkv6.y_stride = a.mixed_stride;
        status = gt_wkv6_plan_mixed(is_query, &a.wkv6, &mix, &both->wkv6);
    } else {
        status = gt_wkv6_plan(pass, is_query, &a.wkv6, &both->wkv6);
    }
    if (status != GT_OK) return status;
    used += both->wkv6.bytes;
    a.ssd.saved = behind(a.saved, both->wkv6.saved);
    a.ssd.saved_bytes = a.saved ? left_of(a.saved_bytes, both->wkv6.saved) : 0;
    a.ssd.workspace = behind(a.workspace, used);
    a.ssd.workspace_bytes = left_of(a.workspace_bytes, used);
    status = gt_ssd_plan(pass, is_query, &a.ssd, &both->ssd);
    gt_enter(GT_DEVICE, gt_op_wkv_ssm()->name, pass); /* messages name wkv_ssm again */
    return status;
}

/* Adds the partial sums of both operators, in one launch if there are at most RowSums::MOST. */
static inline gt_status add_up(const PassPlan& wkv6, const PassPlan& ssd, Chain& chain) {
    RowSums all = *wkv6.sums;
    if (all.count + ssd.sums->count > RowSums::MOST) {
        const gt_status status = reduce_rows(all, wkv6.accumulate, chain);
        return status != GT_OK ? status : reduce_rows(*ssd.sums, ssd.accumulate, chain);
    }
    for (int i = 0; i < ssd.sums->count; i++) all.sums[all.count++] = ssd.sums->sums[i];
    return reduce_rows(all, wkv6.accumulate, chain);
}

/* Enqueues the stages of a pass.  In backward ssd's CHUNKS come before wkv6's, because their blocks take longer. */
static inline gt_status enqueue(gt_pass pass, const Both& both, gt_stream stream) {
    Chain chain = {stream};
    gt_status status = both.mixes && pass == GT_BACKWARD ? both.unmix.run_on(stream) : GT_OK;
    const auto wkv6 = [&](Stage stage) {
        if (status == GT_OK) status = gt_wkv6_run(&both.wkv6, (int)stage, &chain);
    };
    const auto ssd = [&](Stage stage) {
        if (status == GT_OK) status = gt_ssd_run(&both.ssd, (int)stage, &chain);
    };
    wkv6(Stage::CLEAR), ssd(Stage::CLEAR);
    if (pass == GT_FORWARD && both.mixes) {
        ssd(Stage::PASS), wkv6(Stage::PASS);
        return status;
    }
    if (pass == GT_FORWARD) {
        wkv6(Stage::PASS), ssd(Stage::PASS);
        return status;
    }
    wkv6(Stage::STATES), ssd(Stage::STATES);
    wkv6(Stage::GRADIENTS), ssd(Stage::GRADIENTS);
    ssd(Stage::CHUNKS), wkv6(Stage::CHUNKS);
    if (status == GT_OK) status = add_up(both.wkv6, both.ssd, chain);
    return status != GT_OK ? status : reduce_rows(both.unmix.sums, both.wkv6.accumulate, chain);
}

static inline gt_status call(gt_pass pass, const gt_wkv_ssm_args* args, gt_stream stream) {
    gt_wkv_ssm_args a;
    Both both;
    gt_status status = prepare(pass, args, &a);
    if (status != GT_OK) return status;
    const bool mixes = gt_wkv_ssm_mixes(&a, pass);
    if (mixes && pass == GT_BACKWARD) { /* dy lies in workspace, so workspace is checked first */
        status = plan(pass, true, mixes, a, &both);
        if (status == GT_OK) status = check_workspace(a.workspace, a.workspace_bytes, both.bytes());
    }
    if (status == GT_OK) status = plan(pass, false, mixes, a, &both);
    if (status == GT_OK) status = check_saved(a.saved, a.saved_bytes, both.saved());
    if (status == GT_OK) status = check_workspace(a.workspace, a.workspace_bytes, both.bytes());
    return status != GT_OK ? status : enqueue(pass, both, stream);
}

/* Checks the grid before any launch, so that the last launch does not fail when the first already runs. */
static inline gt_status check_grid(const gt_wkv_ssm_args& a) {
    const int64_t blocks = gt_times(gt_times(a.B, a.wkv6.H), (a.wkv6.V + 63) / 64);
    if (blocks <= INT32_MAX) return GT_OK;
    return gt_fail(GT_ERROR_SIZE, "B = %lld, wkv6.H = %lld: %lld blocks are too many for a grid", (long long)a.B,
                   (long long)a.wkv6.H, (long long)blocks);
}

/* Runs a step.  The two kernels run side by side.  ssd's starts first, because it takes longer in models. */
static inline gt_status step(const gt_wkv_ssm_args* args, gt_stream stream) {
    gt_wkv_ssm_args a;
    Chain chain = {stream};
    gt_status status = prepare(GT_STEP, args, &a);
    if (status == GT_OK) status = check_grid(a);
    if (status == GT_OK) status = gt_ssd_step_in(&a.ssd, &chain);
    if (status == GT_OK && gt_wkv_ssm_mixes(&a, GT_STEP)) {
        const gt_mix mix = gt_wkv_ssm_mix_of(&a);
        a.wkv6.y = a.mixed, a.wkv6.y_stride = a.mixed_stride;
        status = gt_wkv6_step_mixed(&a.wkv6, &mix, &chain);
    } else if (status == GT_OK) {
        status = gt_wkv6_step_in(&a.wkv6, &chain);
    }
    gt_enter(GT_DEVICE, gt_op_wkv_ssm()->name, GT_STEP); /* messages name wkv_ssm again */
    return status;
}

static inline gt_status query(const gt_wkv_ssm_args* args, gt_workspace* need) {
    gt_wkv_ssm_args a;
    Both forward, backward;
    gt_status status = prepare(GT_QUERY, args, &a);
    if (status != GT_OK) return status;
    const bool mixes = gt_wkv_ssm_mixes(&a, GT_QUERY);
    if ((status = plan(GT_FORWARD, true, mixes, a, &forward)) != GT_OK ||
        (status = plan(GT_BACKWARD, true, mixes, a, &backward)) != GT_OK)
        return status;
    if (!need) return gt_fail(GT_ERROR_NULL, "need is NULL");
    need->forward = forward.bytes();
    need->backward = backward.bytes();
    need->saved = forward.saved();
    return GT_OK;
}

/* Writes the names of the kernels of a mixed pass, in the order of their launches. */
static inline gt_status add_mixed_path(gt_pass pass, const gt_wkv_ssm_args& a, PathText& text) {
    Both both;
    KernelList kernels = {};
    gt_status status = plan(pass, true, true, a, &both);
    if (status != GT_OK) return status;
    *gt_noted_kernels() = &kernels;
    status = enqueue(pass, both, nullptr);
    *gt_noted_kernels() = nullptr;
    text.add(pass == GT_FORWARD ? "forward: " : "; backward: ");
    for (int i = 0; i < kernels.count; i++) text.add(i ? ", " : ""), text.add(kernels.names[i]);
    if (!kernels.count) text.add("no kernels");
    return status;
}

static inline gt_status path(const gt_wkv_ssm_args* args, char* text, size_t bytes) {
    static const struct {
        gt_pass pass;
        const char* name;
    } passes[] = {{GT_FORWARD, "forward: wkv6 "}, {GT_BACKWARD, "; backward: wkv6 "}};
    gt_wkv_ssm_args a;
    char words[1024];
    gt_no_text(text, bytes);
    gt_status status = prepare(GT_PATH, args, &a);
    if (status == GT_OK && (!text || !bytes))
        status = gt_fail(GT_ERROR_NULL, text ? "bytes = 0: must be at least 1" : "text is NULL");
    if (status != GT_OK) return status;
    a.wkv6.saved = a.ssd.saved = a.saved;
    a.wkv6.slots = a.wkv6.tokens = a.wkv6.commit = nullptr;
    a.ssd.slots = a.ssd.tokens = a.ssd.commit = nullptr;
    a.wkv6.slot_capacity = a.ssd.slot_capacity = 0;
    PathText to(text, bytes);
    const bool mixes = gt_wkv_ssm_mixes(&a, GT_PATH);
    for (const auto& p : passes) {
        if (mixes) {
            if ((status = add_mixed_path(p.pass, a, to)) != GT_OK) return status;
            continue;
        }
        if ((status = gt_wkv6_pass_path(p.pass, &a.wkv6, words, sizeof words)) != GT_OK) return status;
        to.add(p.name), to.add(words);
        if ((status = gt_ssd_pass_path(p.pass, &a.ssd, words, sizeof words)) != GT_OK) return status;
        to.add(", ssd "), to.add(words);
    }
    if (!is_path_of_step(a)) return GT_OK;
    a.wkv6.state_in = a.ssd.state_in = nullptr;
    if ((status = gt_ssd_pass_path(GT_STEP, &a.ssd, words, sizeof words)) != GT_OK) return status;
    to.add("; step: ssd "), to.add(words);
    if ((status = gt_wkv6_pass_path(GT_STEP, &a.wkv6, words, sizeof words)) != GT_OK) return status;
    to.add(", wkv6 "), to.add(words);
    return GT_OK;
}

} /* namespace wkv_ssm */
} /* namespace gt */

#endif
