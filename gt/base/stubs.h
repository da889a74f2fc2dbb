/* gt/base/stubs.h - stubs of an operator's C functions, for files that are compiled without nvcc.  Every stub returns
 * GT_ERROR_NO_CUDA. */
#ifndef GT_BASE_STUBS_H
#define GT_BASE_STUBS_H

#include "op.h"

#define GT_STUB(op, name, pass)                                                                                        \
    GT_API gt_status gt_##op##_##name(const gt_##op##_args *args, gt_stream stream) {                                  \
        (void)args, (void)stream;                                                                                      \
        return gt_no_cuda(gt_op_##op(), pass);                                                                         \
    }

/* Stubs of the functions that every operator has.  An operator with steps also needs GT_STUB(op, step, GT_STEP). */
#define GT_STUBS(op)                                                                                                   \
    GT_STUB(op, forward, GT_FORWARD)                                                                                   \
    GT_STUB(op, backward, GT_BACKWARD)                                                                                 \
    GT_API gt_status gt_##op##_workspace(const gt_##op##_args *args, gt_workspace *need) {                             \
        (void)args;                                                                                                    \
        gt_no_answer(need);                                                                                            \
        return gt_no_cuda(gt_op_##op(), GT_QUERY);                                                                     \
    }                                                                                                                  \
    GT_API gt_status gt_##op##_path(const gt_##op##_args *args, char *text, size_t bytes) {                            \
        (void)args;                                                                                                    \
        gt_no_text(text, bytes);                                                                                       \
        return gt_no_cuda(gt_op_##op(), GT_PATH);                                                                      \
    }

/* Stubs for an operator with segment and join: both functions and their backward passes.  Also stubs of the functions
 * that another operator calls to enqueue this operator's passes (op.h). */
#define GT_STUBS_IN_PARTS(op)                                                                                          \
    GT_STUB(op, segment, GT_SEGMENT)                                                                                   \
    GT_STUB(op, segment_backward, GT_SEGMENT_BACKWARD)                                                                 \
    GT_STUB(op, join, GT_JOIN)                                                                                         \
    GT_STUB(op, join_backward, GT_JOIN_BACKWARD)                                                                       \
    GT_API gt_status gt_##op##_plan(gt_pass pass, int is_query, const gt_##op##_args *args, void *plan) {              \
        (void)is_query, (void)args, (void)plan;                                                                        \
        return gt_no_cuda(gt_op_##op(), pass);                                                                         \
    }                                                                                                                  \
    GT_API gt_status gt_##op##_run(const void *plan, int stage, void *chain) {                                         \
        (void)plan, (void)stage, (void)chain;                                                                          \
        return gt_no_cuda(gt_op_##op(), GT_FORWARD);                                                                   \
    }                                                                                                                  \
    GT_API gt_status gt_##op##_step_in(const gt_##op##_args *args, void *chain) {                                      \
        (void)args, (void)chain;                                                                                       \
        return gt_no_cuda(gt_op_##op(), GT_STEP);                                                                      \
    }                                                                                                                  \
    GT_API gt_status gt_##op##_pass_path(gt_pass pass, const gt_##op##_args *args, char *text, size_t bytes) {         \
        (void)args;                                                                                                    \
        gt_no_text(text, bytes);                                                                                       \
        return gt_no_cuda(gt_op_##op(), pass);                                                                         \
    }

#endif
