/* One step on two backends, tensor by tensor. */
#ifndef HYBRID_CHECK_H
#define HYBRID_CHECK_H

#include "hybrid_model.h"
#include <stdio.h>

/* Builds the same model on both and makes one step with the batch: tokens and targets [B,T].
 * Prints, for every activation that hybrid_model.h names, the gradient of every parameter and how
 * AdamW changed it, the relative L2 error of `device` against `truth` and the limit that rounding
 * explains, and marks what is over it; *failures counts those.  `out` NULL: prints only those. */
gt_status hy_check(hy_backend *device, hy_backend *truth, const hy_config *config, int vocab, int B, int T,
                   uint64_t seed, const int32_t *tokens, const int32_t *targets, FILE *out, int *failures);

#endif
