/* The twin of the toy operator: columns run in parallel, and the rows of a column in order. */
#include "toy.h"

#include "../../reference/gt_ref.h"

gt_status GT_REF(toy_forward)(const gt_toy_args *args);
gt_status GT_REF(toy_backward)(const gt_toy_args *args);

static real toy_gamma(const gt_toy_args *a, int64_t d) {
    const real gamma = ref_param(a->gamma, d, 1);
    return a->negate ? -gamma : gamma;
}

gt_status GT_REF(toy_forward)(const gt_toy_args *args) {
    gt_toy_args a;
    gt_dims dims;
    const gt_status status = gt_prepare(gt_op_toy(), GT_FORWARD, GT_HOST, args, &a, &dims);
    if (status != GT_OK || !a.M) return status;
    GT_PARALLEL_FOR
    for (int64_t d = 0; d < a.D; d++)
        for (int64_t m = 0; m < a.M; m++) {
            const real x = ref_load(a.x, a.dtype, m * a.x_stride + d);
            ref_store(a.y, a.dtype, m * a.y_stride + d, toy_gamma(&a, d) * x * x + (real)a.shift);
        }
    return GT_OK;
}

gt_status GT_REF(toy_backward)(const gt_toy_args *args) {
    gt_toy_args a;
    gt_dims dims;
    const gt_status status = gt_prepare(gt_op_toy(), GT_BACKWARD, GT_HOST, args, &a, &dims);
    if (status != GT_OK || (!a.M && !a.dgamma)) return status;
    GT_PARALLEL_FOR
    for (int64_t d = 0; d < a.D; d++) {
        double sum = 0;
        for (int64_t m = 0; m < a.M; m++) {
            const real x = ref_load(a.x, a.dtype, m * a.x_stride + d);
            const real dy = ref_load(a.dy, a.dtype, m * a.dy_stride + d);
            sum += (double)x * x * dy;
            if (a.dx) ref_store(a.dx, a.dtype, m * a.dx_stride + d, 2 * toy_gamma(&a, d) * x * dy);
        }
        ref_grad(a.dgamma, d, a.negate ? -sum : sum, a.accumulate);
    }
    return GT_OK;
}
