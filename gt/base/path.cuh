/* gt/base/path.cuh - gt_OP_path: says which kernels a call would launch.  The code of the call's passes runs unchanged,
 * but run() records each kernel's name instead of launching the kernel.  So the answer always agrees with the
 * launches. */
#ifndef GT_BASE_PATH_CUH
#define GT_BASE_PATH_CUH

#include "launch.cuh"

#include <stdio.h>
#include <string.h>

namespace gt {

/* The text of an answer, cut off at the end of the caller's buffer. */
class PathText {
  public:
    PathText(char* text, size_t bytes) : text_(text), bytes_(bytes) { text_[0] = 0; }
    void add(const char* words) {
        const size_t length = strlen(words), room = bytes_ - 1 - used_, n = length < room ? length : room;
        memcpy(text_ + used_, words, n);
        used_ += n;
        text_[used_] = 0;
    }

  private:
    char* text_;
    size_t bytes_, used_ = 0;
};

/* Returns a made-up address for a tensor whose pointer is NULL.  These addresses are aligned, and so far apart that no
 * two tensors overlap, whatever their strides. */
static inline void* path_address(const gt_op* op, const gt_tensor* t) {
    return reinterpret_cast<void*>((uintptr_t)(t - op->tensors + 1) << 58);
}

/* Returns a made-up address for workspace.  No tensor gets this address, since an operator has fewer than 62
 * tensors. */
static inline void* path_workspace(const gt_op* op) { return path_address(op, op->tensors + 61); }

static inline bool path_is_output(const gt_tensor* t, gt_pass pass) {
    return strchr("Oogs", gt_use(t, pass)) != nullptr;
}

/* Fills in the pointers that a pass requires and *args lacks.  If *args has no output at all, fills in every output,
 * except dz if z is NULL. */
static inline void fill_path_pointers(const gt_op* op, gt_pass pass, const gt_dims& dims, char* args) {
    const auto pointer = [&](const gt_tensor* t) {
        void* p;
        memcpy(&p, args + t->offset, sizeof p);
        return p;
    };
    bool has_outputs = false, has_gate = true;
    for (const gt_tensor* t = op->tensors; t->name; t++) {
        has_outputs |= path_is_output(t, pass) && pointer(t);
        if (!strcmp(t->name, "z")) has_gate = pointer(t);
    }
    for (const gt_tensor* t = op->tensors; t->name; t++) {
        const bool is_required = strchr("IOs", gt_use(t, pass)) || t->shape[0] == 'C';
        const bool is_wanted = path_is_output(t, pass) && !has_outputs && (has_gate || strcmp(t->name, "dz"));
        void* const address = path_address(op, t);
        int64_t count = gt_use(t, pass) != '-';
        for (const char* c = t->shape; *c; c++) count = gt_times(count, dims.n[*c - 'A']);
        if (count && !pointer(t) && (is_required || is_wanted)) memcpy(args + t->offset, &address, sizeof address);
    }
}

/* A function that says why the call does not take faster kernels than those in `kernels`.  It returns NULL if there are
 * no faster kernels. */
template <class Args>
using PathReason = const char* (*)(const Args& prepared, gt_pass pass, const KernelList& kernels, const Device& device,
                                   char (&room)[128]);

template <class Args>
struct PathPasses {
    gt_status (*call[5])(const Args*, gt_stream); /* by gt_pass, up to GT_SEGMENT_BACKWARD; NULL: no such pass */
    PathReason<Args> why;                         /* NULL: the operator gives no reasons */
};

/* Writes the names of a pass's kernels, and the reason why the call does not take faster kernels. */
template <class Args>
static gt_status add_kernels(const gt_op* op, gt_pass pass, const PathPasses<Args>& passes, Args args,
                             const Args& prepared, const gt_dims& dims, PathText& text) {
    KernelList kernels = {};
    Device device;
    char number[32], room[128];
    gt_status status = current_device(&device);
    if (status != GT_OK) return status;
    fill_path_pointers(op, pass, dims, reinterpret_cast<char*>(&args));
    *gt_noted_kernels() = &kernels;
    status = passes.call[pass](&args, nullptr);
    *gt_noted_kernels() = nullptr;
    if (status != GT_OK) return status;
    for (int i = 0; i < kernels.count; i++) {
        const char* space = strchr(kernels.names[i], ' ');
        text.add(i ? ", " : "");
        text.add(space ? space + 1 : kernels.names[i]);
        snprintf(number, sizeof number, " (%d times)", kernels.times[i]);
        if (kernels.times[i] > 1) text.add(number);
    }
    if (kernels.count == 0) text.add("no kernels");
    if (const char* why = passes.why ? passes.why(prepared, pass, kernels, device, room) : nullptr) {
        text.add(" (");
        text.add(why);
        text.add(")");
    }
    return GT_OK;
}

template <class Args>
static gt_status add_path(const gt_op* op, gt_pass pass, const PathPasses<Args>& passes, const Args& args,
                          const Args& prepared, const gt_dims& dims, PathText& text) {
    static const char* const names[] = {"forward: ", "; backward: ", "; step: ", "; segment: ", "; segment backward: "};
    text.add(names[pass]);
    return add_kernels(op, pass, passes, args, prepared, dims, text);
}

/* Returns whether the arguments fit a step. */
template <class Args>
static bool is_path_of_step(const Args& a) {
    return a.T >= 1 && a.T <= 16 && a.seq_capacity == 0 && !a.state_in_shared;
}

/* Clears the fields of stochastic rounding. */
static inline void clear_rounding(const gt_op* op, void* args) {
    for (const gt_tensor* t = op->tensors; t->name; t++)
        if (!strncmp(t->name, "rounding_", 9)) memset(static_cast<char*>(args) + t->offset, 0, sizeof(void*));
}

/* Sets the dtypes of states to fp32, without stochastic rounding, where the pass does not take 16 bits. */
static inline void suit_states(const gt_op* op, gt_pass pass, void* args) {
    const gt_state_passes passes = op->of_steps.passes;
    const gt_dtype fp32 = GT_F32;
    char* const a = static_cast<char*>(args);
    if (pass == GT_FORWARD && passes != GT_STATES_OF_STEP) return;
    if (pass == GT_STEP && passes != GT_STATES_OF_FORWARD) return;
    if (op->of_steps.state) memcpy(a + op->of_steps.state, &fp32, sizeof fp32);
    if (op->of_steps.conv_state) memcpy(a + op->of_steps.conv_state, &fp32, sizeof fp32);
    clear_rounding(op, args);
}

/* Sets the dtypes of states and parameters to fp32 where the pass does not take other dtypes.  Clears snapshot_every
 * where the pass does not take it. */
static inline void suit_dtypes(const gt_op* op, gt_pass pass, void* args) {
    const gt_dtype fp32 = GT_F32;
    char* const a = static_cast<char*>(args);
    if (op->of_steps.parameter) memcpy(a + op->of_steps.parameter, &fp32, sizeof fp32);
    suit_states(op, pass, args);
    if (op->of_steps.snapshot_every && pass != GT_FORWARD) memset(a + op->of_steps.snapshot_every, 0, sizeof(int64_t));
}

/* Writes the paths of forward and backward. */
template <class Args>
static gt_status path_of_two(const gt_op* op, const PathPasses<Args>& passes, Args a, const Args& prepared,
                             const gt_dims& dims, PathText& text) {
    gt_status status = GT_OK;
    a.workspace = path_workspace(op);
    a.workspace_bytes = SIZE_MAX;
    for (int pass = GT_FORWARD; pass <= GT_BACKWARD && status == GT_OK; pass++) {
        suit_dtypes(op, (gt_pass)pass, &a);
        status = add_path(op, (gt_pass)pass, passes, a, prepared, dims, text);
    }
    return status;
}

template <class Args>
static gt_status path_begin(const gt_op* op, const Args* args, char* text, size_t bytes, Args* prepared,
                            gt_dims* dims) {
    if (text && bytes) text[0] = 0;
    const gt_status status = gt_prepare(op, GT_PATH, GT_DEVICE, args, prepared, dims);
    if (status != GT_OK) return status;
    return text && bytes ? GT_OK : gt_fail(GT_ERROR_NULL, text ? "bytes = 0: must be at least 1" : "text is NULL");
}

/* Writes the path of an operator on rows [M,*], without a time axis.  step_rows: the largest number of rows of its
 * step, or 0 if it has no step. */
template <class Args>
static gt_status path_of_rows(const gt_op* op, const PathPasses<Args>& passes, const Args* args, char* text,
                              size_t bytes, int64_t step_rows = 0) {
    Args prepared;
    gt_dims dims;
    gt_status status = path_begin(op, args, text, bytes, &prepared, &dims);
    if (status != GT_OK) return status;
    PathText to(text, bytes);
    status = path_of_two(op, passes, *args, prepared, dims, to);
    if (status != GT_OK || args->M < 1 || args->M > step_rows) return status;
    return add_path(op, GT_STEP, passes, *args, prepared, dims, to);
}

/* Writes the path of one pass, forward or backward, without the name of the pass. */
template <class Args>
static gt_status path_of_pass(const gt_op* op, const PathPasses<Args>& passes, gt_pass pass, const Args* args,
                              char* text, size_t bytes) {
    Args prepared;
    gt_dims dims;
    const gt_status status = path_begin(op, args, text, bytes, &prepared, &dims);
    if (status != GT_OK) return status;
    PathText to(text, bytes);
    Args a = *args;
    a.workspace = path_workspace(op);
    a.workspace_bytes = SIZE_MAX;
    return add_kernels(op, pass, passes, a, prepared, dims, to);
}

/* Writes the paths of segment and segment_backward, if the call sets decay_out. */
template <class Args>
static gt_status path_of_segments(const gt_op* op, const PathPasses<Args>& passes, const Args& a, const Args& prepared,
                                  const gt_dims& dims, PathText& text) {
    gt_status status = GT_OK;
    if (a.decay_out) status = add_path(op, GT_SEGMENT, passes, a, prepared, dims, text);
    if (status != GT_OK || !a.decay_out || a.state_in_shared) return status;
    return add_path(op, GT_SEGMENT_BACKWARD, passes, a, prepared, dims, text);
}

/* Clears the fields of state pools and of stochastic rounding, which some passes refuse. */
static inline void clear_pool(const gt_op* op, void* args) {
    clear_rounding(op, args);
    for (const gt_tensor* t = op->tensors; t->name; t++) {
        char* const a = static_cast<char*>(args);
        if (!strcmp(t->name, "starts_zero")) memset(a + t->offset, 0, sizeof(void*));
        if ((t->shape[0] == 'S' || t->shape[0] == 'Q') && t->stride_offset)
            memset(a + t->stride_offset, 0, (size_t)gt_stride_count(t) * sizeof(int64_t));
    }
}

/* Writes the path of an operator over time.  If the arguments fit a step, adds the step's path. */
template <bool HAS_PIECES = false, class Args>
static gt_status path_over_time(const gt_op* op, const PathPasses<Args>& passes, const Args* args, char* text,
                                size_t bytes) {
    Args prepared;
    gt_dims dims;
    gt_status status = path_begin(op, args, text, bytes, &prepared, &dims);
    if (status != GT_OK) return status;
    PathText to(text, bytes);
    Args a = *args;
    a.slots = a.tokens = a.commit = nullptr;
    a.slot_capacity = 0;
    Args step = a;
    step.state_in = nullptr;
    suit_states(op, GT_STEP, &step);
    if (op->of_steps.snapshot_every)
        memset(reinterpret_cast<char*>(&step) + op->of_steps.snapshot_every, 0, sizeof(int64_t));
    clear_pool(op, &a);
    if ((status = path_of_two(op, passes, a, prepared, dims, to)) != GT_OK) return status;
    if (is_path_of_step(a)) {
        if ((status = add_path(op, GT_STEP, passes, step, prepared, dims, to)) != GT_OK) return status;
    }
    if constexpr (HAS_PIECES) {
        a.workspace = path_workspace(op);
        a.workspace_bytes = SIZE_MAX;
        suit_dtypes(op, GT_SEGMENT, &a);
        return path_of_segments(op, passes, a, prepared, dims, to);
    }
    return GT_OK;
}

} /* namespace gt */

#endif
