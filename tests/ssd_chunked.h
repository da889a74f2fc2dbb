/* The chunked form of ssd in double precision, for one batch element.  It follows the tensor-core kernels of gt/ssd
 * step by step.  docs/ssd.md has the mathematics in the same order. */
#ifndef SSD_CHUNKED_H
#define SSD_CHUNKED_H

#include "gt_kernels.h"

/* The largest sizes, which give arrays plain indices. */
enum { CHUNKED_T = 448, CHUNKED_H = 4, CHUNKED_P = 12, CHUNKED_N = 20 };

/* As gt_ssd_forward and gt_ssd_backward with B = 1, but arrays hold packed doubles, and G and segments are at least 1.
 * Dskip, z, dt_bias, state_in and dstate_out may be NULL.  dz may be NULL if z is. */
void ssd_chunked_forward(const gt_ssd_args *a);
void ssd_chunked_backward(const gt_ssd_args *a);

#endif
