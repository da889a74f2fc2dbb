/* A backend that only plans the memory of a model for a CUDA device.  No device has to be present. */
#ifndef HYBRID_PLAN_H
#define HYBRID_PLAN_H

#include "hybrid_ops.h"

/* Makes the backend; only hy_model_plan can use it.  Its sizes of weights, gradients, optimiser and activations are
 * exact.  The operators' `saved` and workspace depend on the device, so they are estimates. */
gt_status hy_backend_plan(hy_backend **backend, gt_dtype dtype);

#endif
