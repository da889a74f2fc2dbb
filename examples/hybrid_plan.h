/* A backend that only plans: the memory of a model on a CUDA device that need not be there. */
#ifndef HYBRID_PLAN_H
#define HYBRID_PLAN_H

#include "hybrid_ops.h"

/* Fit for hy_model_plan alone.  Weights, gradients, optimiser and activations are exact; `saved` and workspace of the
 * operators depend on the device and are estimated. */
gt_status hy_backend_plan(hy_backend **backend, gt_dtype dtype);

#endif
