/* A toy operator, defined only by the files of this folder.  It tests that a new operator needs nothing but such files
 * and a line in a list: argument checks, tests of the twin, gradients, fuzz, emulation and rows of the bench then work.
 *
 *     y = gamma x^2 + shift     dx = 2 gamma x dy     dgamma = sum over rows of x^2 dy
 *
 *   toy.h    the argument struct and the functions      toy_ref.c  the twin
 *   toy.cuh  table, kernels, stubs                      toy.c      cases and rows of the bench
 *   list.h   the list of operators, which has only this one
 */
#ifndef GT_TOY_H
#define GT_TOY_H

#include "gt/base/op.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gt_toy_args {
    int64_t M, D;
    gt_dtype dtype;
    float shift; /* must be finite */
    int negate;  /* 0 or 1; 1: -gamma takes the place of gamma */
    const void *x;
    int64_t x_stride;
    const float *gamma; /* [D]; NULL: all are 1 */
    void *y;
    int64_t y_stride;
    const void *dy;
    int64_t dy_stride;
    void *dx;
    int64_t dx_stride;
    float *dgamma; /* [D] */
    int accumulate;
    void *workspace;
    size_t workspace_bytes;
} gt_toy_args;

size_t gt_toy_args_size(void);
gt_status gt_toy_forward(const gt_toy_args *args, gt_stream stream);
gt_status gt_toy_backward(const gt_toy_args *args, gt_stream stream);
gt_status gt_toy_workspace(const gt_toy_args *args, gt_workspace *need);
gt_status gt_toy_path(const gt_toy_args *args, char *text, size_t bytes);
gt_status gt_ref_toy_forward(const gt_toy_args *args);
gt_status gt_ref_toy_backward(const gt_toy_args *args);
const gt_op *gt_op_toy(void);

#ifdef __cplusplus
}
#endif

#endif
