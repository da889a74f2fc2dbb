/* Profile of a training step as CSV: time, graph nodes and bytes of every operator in every part of the model. */
#ifndef HYBRID_PROFILE_H
#define HYBRID_PROFILE_H

#include "hybrid_model.h"

/* Runs steps on one batch, and prints the profile to standard output.  The learning rate is 0, so the weights stay
 * as they are.  `keep` has the meaning of hy_model_train's argument. */
gt_status hy_profile(hy_backend *backend, hy_model *model, int64_t parameters, const int32_t *tokens,
                     const int32_t *targets, const int32_t *keep, double loss_scale);

#endif
