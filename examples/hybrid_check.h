/* One step on two backends, tensor by tensor. */
#ifndef HYBRID_CHECK_H
#define HYBRID_CHECK_H

#include "hybrid_model.h"
#include <stdio.h>

/* Builds the same model on both and makes one step with the batch: tokens and targets [B,T].
 * For every activation that hybrid_model.h names, every parameter's gradient and its change by AdamW, prints the
 * relative L2 error of `device` against `truth` and the limit that rounding explains.  Marks errors over the limit and
 * counts them in *failures.  `out` NULL: prints only these. */
gt_status hy_check(hy_backend *device, hy_backend *truth, const hy_config *config, int vocab, int B, int T,
                   uint64_t seed, const int32_t *tokens, const int32_t *targets, FILE *out, int *failures);

#endif
