/* gt/fused/wkv_ssm.cuh - wkv6 and ssd of one hybrid block: both checked, then both enqueued, in one chain.
 *
 * The kernels are those of gt/wkv6/ and gt/ssd/, which the program has once: this file launches the stages of the two
 * operators by turns (gt/recurrence/stages.cuh).  saved and workspace of both lie in one buffer each: that of wkv6
 * first.
 *
 * ONE CHAIN (see Chain).  Every kernel that takes it, but the first, is launched ahead: its blocks come when all of the
 * kernel before have called wait_for_chain() or ended, and there is room.  They wait for that kernel's end before they
 * touch what kernels of the chain write.
 *     both        of packed sequences: what no sequence has, of wkv6, of ssd
 *     forward     wkv6's pass; ssd's pass
 *     backward    wkv6's states and ssd's, unless they are saved, and what ssd makes of z; wkv6's G; ssd's G; ssd's
 *                 chunks, and dz where it comes last; wkv6's chunks; one launch for the sums of both, or two where they
 *                 are more than four
 * Results are those of the two calls, bit for bit with the same segments. */
#ifndef GT_FUSED_WKV_SSM_CUH
#define GT_FUSED_WKV_SSM_CUH

#include "../base/path.cuh"
#include "../recurrence/stages.cuh"
#include "wkv_ssm_table.h"

namespace gt {
namespace wkv_ssm {

/* What the two calls need, each. */
struct Needs {
    gt_workspace wkv6, ssd;
};

/* Queries are of the two operators, and would name them in messages: what they refuse, which is sizes beyond what the
 * kernels take, is refused here. */
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

/* With `saved` there is less to ask for. */
static inline gt_status ask(gt_wkv_ssm_args* a, Needs* needs) {
    a->wkv6.saved = a->ssd.saved = a->saved;
    const gt_status status = gt_wkv6_workspace(&a->wkv6, &needs->wkv6);
    return status != GT_OK ? status : gt_ssd_workspace(&a->ssd, &needs->ssd);
}

/* *a: with inner structs that the two operators take. */
static inline gt_status prepare(gt_pass pass, const gt_wkv_ssm_args* args, gt_wkv_ssm_args* a, Needs* needs) {
    gt_dims dims;
    Device device;
    gt_status status = gt_prepare(gt_op_wkv_ssm(), pass, GT_DEVICE, args, a, &dims);
    if (status != GT_OK || (status = check_sizes(*a)) != GT_OK || (status = current_device(&device)) != GT_OK)
        return status;
    if (a->B == 0) { /* neither tokens nor states, of packed sequences either */
        a->seq_capacity = 0;
        a->cu_seqlens = a->seq_count = nullptr;
    }
    gt_wkv_ssm_share(a);
    if ((status = ask(a, needs)) != GT_OK) return status;
    gt_enter(GT_DEVICE, gt_op_wkv_ssm()->name, pass);
    return GT_OK;
}

template <class Part>
static inline void give(Part* part, size_t bytes, void* workspace, size_t saved_bytes, void* saved) {
    part->workspace = bytes ? workspace : nullptr, part->workspace_bytes = bytes;
    part->saved = saved_bytes ? saved : nullptr, part->saved_bytes = saved ? saved_bytes : 0;
}

/* Cuts the caller's two buffers in two.  NULL stays NULL. */
static inline gt_status give_buffers(gt_wkv_ssm_args* a, const Needs& needs, size_t wkv6, size_t ssd) {
    const size_t saved = needs.wkv6.saved + needs.ssd.saved;
    const gt_status status = check_saved(a->saved, a->saved_bytes, saved);
    char* const workspace_at = static_cast<char*>(a->workspace);
    char* const saved_at = static_cast<char*>(a->saved);
    give(&a->wkv6, wkv6, workspace_at, needs.wkv6.saved, saved_at);
    give(&a->ssd, ssd, workspace_at ? workspace_at + wkv6 : nullptr, needs.ssd.saved,
         saved_at ? saved_at + needs.wkv6.saved : nullptr);
    return status != GT_OK ? status : check_workspace(a->workspace, a->workspace_bytes, wkv6 + ssd);
}

/* A pass of both operators, checked. */
struct Both {
    gt_pass pass;
    const gt_wkv_ssm_args* args;
    gt_stream stream;
    const Stages* wkv6;
};

/* Sums over rows in one launch, where it has room for them. */
static inline gt_status add_up(const Stages& wkv6, const Stages& ssd, Chain& chain) {
    RowSums all = *wkv6.sums;
    if (all.count + ssd.sums->count > RowSums::MOST) {
        const gt_status status = reduce_rows(all, wkv6.accumulate, chain);
        return status != GT_OK ? status : reduce_rows(*ssd.sums, ssd.accumulate, chain);
    }
    for (int i = 0; i < ssd.sums->count; i++) all.sums[all.count++] = ssd.sums->sums[i];
    return reduce_rows(all, wkv6.accumulate, chain);
}

/* Stage after stage.  Of the chunks' kernels ssd's comes first: its blocks are longer. */
static inline gt_status enqueue(const Stages& ssd, const void* context) {
    const Both& both = *static_cast<const Both*>(context);
    const Stages& wkv6 = *both.wkv6;
    Chain chain = {both.stream};
    gt_status status = GT_OK;
    const auto run = [&](const Stages& of, Stage stage) {
        if (status == GT_OK) status = of.run(of, stage, chain);
    };
    run(wkv6, Stage::CLEAR), run(ssd, Stage::CLEAR);
    if (both.pass == GT_FORWARD) {
        run(wkv6, Stage::PASS), run(ssd, Stage::PASS);
        return status;
    }
    run(wkv6, Stage::STATES), run(ssd, Stage::STATES);
    run(wkv6, Stage::GRADIENTS), run(ssd, Stage::GRADIENTS);
    run(ssd, Stage::CHUNKS), run(wkv6, Stage::CHUNKS);
    return status != GT_OK ? status : add_up(wkv6, ssd, chain);
}

static inline gt_status check_ssd(const Stages& wkv6, const void* context) {
    Both both = *static_cast<const Both*>(context);
    both.wkv6 = &wkv6;
    const StagesUser user = {enqueue, &both};
    return gt_ssd_stages(both.pass, &both.args->ssd, &user);
}

static inline gt_status call(gt_pass pass, const gt_wkv_ssm_args* args, gt_stream stream) {
    gt_wkv_ssm_args a;
    Needs needs;
    gt_status status = prepare(pass, args, &a, &needs);
    if (status != GT_OK) return status;
    const bool is_forward = pass == GT_FORWARD;
    status = give_buffers(&a, needs, is_forward ? needs.wkv6.forward : needs.wkv6.backward,
                          is_forward ? needs.ssd.forward : needs.ssd.backward);
    if (status != GT_OK) return status;
    const Both both = {pass, &a, stream, nullptr};
    const StagesUser user = {check_ssd, &both};
    return gt_wkv6_stages(pass, &a.wkv6, &user);
}

static inline gt_status query(const gt_wkv_ssm_args* args, gt_workspace* need) {
    gt_wkv_ssm_args a;
    Needs needs;
    const gt_status status = prepare(GT_QUERY, args, &a, &needs);
    if (status != GT_OK) return status;
    if (!need) return gt_fail(GT_ERROR_NULL, "need is NULL");
    need->forward = needs.wkv6.forward + needs.ssd.forward;
    need->backward = needs.wkv6.backward + needs.ssd.backward;
    need->saved = needs.wkv6.saved + needs.ssd.saved;
    return GT_OK;
}

/* What one operator says of its forward and its backward pass. */
struct PartPath {
    char words[1024];
    const char *forward, *backward;

    /* "forward: A; backward: B", and perhaps "; step: C" */
    void split() {
        static const char first[] = "forward: ", second[] = "; backward: ";
        if (char* step = strstr(words, "; step: ")) *step = 0;
        char* const border = strstr(words, second);
        forward = words + strlen(first);
        backward = border ? border + strlen(second) : "";
        if (border) *border = 0;
    }
};

static inline gt_status path(const gt_wkv_ssm_args* args, char* text, size_t bytes) {
    gt_wkv_ssm_args a;
    Needs needs;
    PartPath wkv6, ssd;
    gt_no_text(text, bytes);
    gt_status status = prepare(GT_PATH, args, &a, &needs);
    if (status != GT_OK) return status;
    if (!text || !bytes) return gt_fail(GT_ERROR_NULL, text ? "bytes = 0: no room for a text" : "text is NULL");
    give(&a.wkv6, 0, nullptr, needs.wkv6.saved, a.saved);
    give(&a.ssd, 0, nullptr, needs.ssd.saved, a.saved);
    if ((status = gt_wkv6_path(&a.wkv6, wkv6.words, sizeof wkv6.words)) != GT_OK ||
        (status = gt_ssd_path(&a.ssd, ssd.words, sizeof ssd.words)) != GT_OK)
        return status;
    wkv6.split(), ssd.split();
    PathText to(text, bytes);
    for (const char* words : {"forward: wkv6 ", wkv6.forward, ", ssd ", ssd.forward, "; backward: wkv6 ", wkv6.backward,
                              ", ssd ", ssd.backward})
        to.add(words);
    return GT_OK;
}

} /* namespace wkv_ssm */
} /* namespace gt */

#endif
