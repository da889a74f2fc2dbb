/* A backend that only plans how much memory a model needs on a CUDA device; no such device must be present. */
#ifndef HYBRID_PLAN_H
#define HYBRID_PLAN_H

#include "hybrid_ops.h"

/* Makes the backend; only hy_model_plan can use it.  The planned sizes of weights, gradients, optimiser and
 * activations are exact.  The sizes of the operators' `saved` and workspace are estimates, because they depend on
 * the device. */
gt_status hy_backend_plan(hy_backend **backend, gt_dtype dtype);

#endif
