/* gt/wkv6/path.cuh - chooses the kernels of a wkv6 call.  A call takes kernels on tensor cores unless an obstacle
 * forbids them; gt_wkv6_path names the obstacle. */
#ifndef GT_WKV6_PATH_CUH
#define GT_WKV6_PATH_CUH

#include "../base/built.cuh"
#include "../base/path.cuh"
#include "pass.cuh"

namespace gt {
namespace wkv6 {

/* N = 128: returns the channels of a slice in backward (backward.cuh), which depend on the shared memory that a block
 * may have.  0 means that no kernel fits. */
static inline int slice_channels(gt_dtype dtype, const Device& device) {
    if (dtype == GT_BF16 && device.shared_bytes >= HOPPER_KB * 1024) return 128;
    if (device.shared_bytes >= AMPERE_KB * 1024) return 64;
    return dtype == GT_F32 ? 0 : 32;
}

/* Returns the caller's number of segments or, if that is 0, enough segments to fill every multiprocessor. */
static inline int64_t segments_for(const gt_wkv6_args& a, const Device& device) {
    const int64_t heads = a.N == 32 ? 4 : a.N == 64 ? 2 : 1; /* that fit on a multiprocessor at once */
    return choose_segments(sequences_of(a), a.segments, a.H, heads * device.multiprocessors, 4 * CHECKPOINT,
                           CHECKPOINT);
}

/* Requirements for a tensor of kernels on tensor cores: rows start at multiples of `bytes`, and rows of neighbouring
 * tokens are less than 2^24 elements apart. */
struct RowRule {
    const char* name;
    const void* data;
    gt_stride stride;
    gt_dtype dtype;
    int bytes;

    bool is_aligned() const {
        const int n = bytes / size_of(dtype);
        return (uintptr_t)data % (uintptr_t)bytes == 0 && stride.b % n == 0 && stride.t % n == 0 && stride.h % n == 0;
    }
    bool is_near() const { return stride.t < (int64_t)1 << 24; }
};

/* Why kernels on tensor cores cannot take the call, as parts of a message such as "rows of k are not aligned to 16
 * bytes".  If reason is NULL, they can take the call. */
struct Obstacle {
    const char *reason, *rows = nullptr, *whole = nullptr; /* rows, whole: name of a tensor, or NULL */
    int bytes = 0;
};

/* Returns the number of segments or the number of chunk slots, each over all heads, whichever is larger.  Kernels on
 * tensor cores number both by int. */
static inline int64_t most_parts(const gt_wkv6_args& a, const Device& device) {
    const int64_t segments = gt_times(most_sequences(sequences_of(a)) * a.H, segments_for(a, device));
    const int64_t chunks = gt_times(a.B * chunk_slots(sequences_of(a), CHECKPOINT), a.H);
    return segments > chunks ? segments : chunks;
}

/* Returns the first obstacle that is found, if any.  pass: forward or backward.  mix: NULL, or what forward adds. */
static inline Obstacle obstacle_of(const gt_wkv6_args& a, gt_pass pass, const Device& device,
                                   const gt_mix* mix = nullptr) {
    const gt_dtype x = a.dtype, w = a.w_dtype;
    const int size = size_of(x), w_size = size_of(w);
    const RowRule in[] = {{"r", a.r, a.r_stride, x, 16},
                          {"k", a.k, a.k_stride, x, 16},
                          {"w", a.w, a.w_stride, w, 16},
                          {"v", a.v, a.v_stride, x, 16}};
    const RowRule y = {"y", a.y, a.y_stride, x, 16};
    const RowRule gradients[] = {{"dy", a.dy, a.dy_stride, x, 16},
                                 {"dr", a.dr, a.dr_stride, x, 8},
                                 {"dk", a.dk, a.dk_stride, x, 8},
                                 {"dw", a.dw, a.dw_stride, w, 2 * w_size},
                                 {"dv", a.dv, a.dv_stride, x, 2 * size}};
    if (device.compute_capability < 80) return {"the device is older than sm_80"};
    if (a.N != a.V) return {"N and V differ"};
    if (a.N != 32 && a.N != 64 && a.N != 128) return {"N is not 32, 64 or 128"};
    if (!is_built(x)) return {"this build has no other kernels for the dtype"};
    if (!is_built_head(a.N)) return {"this build has no other kernels for N"};
    if (a.T >= INT32_MAX / 2) return {"T is 2^30 or more"};
    if (most_parts(a, device) >= INT32_MAX / 2) return {"segments or chunks of heads are 2^30 or more"};
    Obstacle found = {nullptr};
    const auto check = [&found](const RowRule& rule) {
        if (found.reason) return;
        if (!rule.is_aligned())
            found = {"are not aligned to", rule.name, nullptr, rule.bytes};
        else if (!rule.is_near())
            found = {"are 2^24 elements apart", rule.name};
    };
    const auto check_whole = [&found](const char* name, const void* data) {
        if (!found.reason && (uintptr_t)data % 16) found = {"is not aligned to", nullptr, name, 16};
    };
    for (const RowRule& rule : in) check(rule);
    if (pass == GT_BACKWARD) {
        for (const RowRule& rule : gradients) check(rule);
        check_whole("u", a.u);
        check_whole("dstate_in", a.dstate_in);
    } else {
        check(y);
        check_whole("state_out", a.state_out);
        if (pass == GT_FORWARD && a.snapshot_every && a.snapshot_dtype <= GT_F32) /* kernels store fp32 */
            check_whole("snapshots", a.snapshots);
        if (mix) {
            const RowRule added[] = {{"ssd.y", mix->ssm, mix->ssm_stride, x, 4 * size},
                                     {"residual", mix->residual, mix->residual_stride, x, 4 * size},
                                     {"wkv6.y", mix->y, mix->y_stride, x, 4 * size}};
            for (const RowRule& rule : added)
                if (rule.data) check(rule);
            check_whole("gain_wkv", mix->gain_wkv);
            check_whole("gain_ssm", mix->gain_ssm);
            if (!found.reason && mix->P % 8) found = {"ssd.P is not a multiple of 8"}; /* a lane's channels */
        }
        if (!found.reason && a.slots && a.state_out_stride % 4)
            found = {"are not aligned to", "state_out", nullptr, 16};
    }
    if (found.reason || a.N < 128) return found;
    if ((x == GT_F32 && device.shared_bytes < TensorTraits<float, float, 128>::SMEM) ||
        (pass == GT_BACKWARD && slice_channels(x, device) == 0))
        found = {"the device allows a block too little shared memory"};
    return found;
}

static inline bool fits_tensor_cores(const gt_wkv6_args& a, gt_pass pass, const Device& device, const gt_mix* mix) {
    return !obstacle_of(a, pass, device, mix).reason;
}

/* Returns whether G fits in the memory of the gradients dv and dk, and the caller wants these gradients. */
static inline bool outputs_hold_G(const gt_wkv6_args& a, const Device& device) {
    if (a.N == 128 && (a.dtype == GT_F32 || slice_channels(a.dtype, device) < 64)) return false; /* G_IN_OUTPUTS */
    const RowRule dv = {"dv", a.dv, a.dv_stride, a.dtype, 16}, dk = {"dk", a.dk, a.dk_stride, a.dtype, 16};
    return a.dv && dv.is_aligned() && (a.N < 128 || (a.dk && dk.is_aligned()));
}

/* ---- the choice ------------------------------------------------------------------------------------------------- */

/* Which kernels a pass takes, and where G lies.  A call decides this once, before it makes a plan. */
struct Choice {
    bool on_tensor_cores;
    bool on_sm90;      /* passes forward in time take the kernels of forward_sm90.cuh */
    int64_t segments;  /* segments of a sequence */
    bool last_first;   /* backward: see BackwardParams::last_first */
    bool G_in_outputs; /* backward: see TensorParams::G_rows */
};

/* pass: forward or backward.  a: prepared arguments; NULL pointers count as aligned.  mix: NULL, or what forward
 * adds. */
static inline Choice choose(const gt_wkv6_args& a, gt_pass pass, const Device& device, const gt_mix* mix = nullptr) {
    Choice c = {};
    c.segments = 1;
    c.on_tensor_cores = fits_tensor_cores(a, pass, device, mix);
    if (!c.on_tensor_cores) return c;
    c.segments = segments_for(a, device);
    c.on_sm90 = a.N == 128 && a.dtype != GT_F32 && device.runs_sm90a;
    if (pass != GT_BACKWARD) return c;
    const int64_t slots = chunk_slots_of(a);
    c.last_first = state_dtype(a.dtype, a.N, a.V) == GT_BF16 && a.saved && !a.dstate_out && !a.seq_capacity &&
                   slots > 1 && c.segments == 1;
    /* G lies in the gradients, but G of last chunks may need workspace.  If that workspace would be larger than for G
     * of all chunks, all G lies in workspace. */
    const bool needs_ends = c.last_first || a.seq_capacity || a.T % CHECKPOINT;
    c.G_in_outputs = outputs_hold_G(a, device) && (!needs_ends || most_sequences(sequences_of(a)) <= a.B * slots);
    return c;
}

/* For gt_wkv6_path: returns why the call takes kernels for any size.  A step has no faster kernels, so the result is
 * NULL. */
static inline const char* why_not_faster(const gt_wkv6_args& a, gt_pass pass, const KernelList& kernels,
                                         const Device& device, char (&room)[128]) {
    bool takes_any_size = false;
    for (int i = 0; i < kernels.count; i++) takes_any_size |= !strcmp(kernels.names[i], "wkv6 token_kernel");
    if (!takes_any_size || pass == GT_STEP) return nullptr;
    const Obstacle x = obstacle_of(a, pass, device);
    const char *of = x.rows ? "rows of " : "", *tensor = x.rows ? x.rows : x.whole ? x.whole : "";
    const int length = snprintf(room, sizeof room, "any-size kernels: %s%s%s%s", of, tensor, *tensor ? " " : "",
                                x.reason ? x.reason : "");
    if (x.bytes) snprintf(room + length, sizeof room - (size_t)length, " %d bytes", x.bytes);
    return room;
}

} /* namespace wkv6 */
} /* namespace gt */

#endif
