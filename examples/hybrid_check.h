/* Compares one training step on two backends, tensor by tensor. */
#ifndef HYBRID_CHECK_H
#define HYBRID_CHECK_H

#include "hybrid_model.h"
#include <stdio.h>

/* Builds the same model on two backends and runs one step on the same batch of tokens and targets [B,T].
 *
 * Compares every activation that hybrid_model.h names, the gradient of every parameter, and the parameter's change
 * by AdamW.  Prints the relative error of `device` against `truth` in the 2-norm, and the limit that rounding
 * explains.  Marks errors over the limit and counts them in *failures.  With `out` = NULL, prints only the errors
 * over the limit. */
gt_status hy_check(hy_backend *device, hy_backend *truth, const hy_config *config, int vocab, int B, int T,
                   uint64_t seed, const int32_t *tokens, const int32_t *targets, FILE *out, int *failures);

#endif
