/* The chunked form of ssd in double precision, for one batch element.  The code follows the tensor-core kernels of
 * gt/ssd step by step, in the order of docs/ssd.md. */
#ifndef SSD_CHUNKED_H
#define SSD_CHUNKED_H

#include "gt_kernels.h"

/* The largest sizes.  All arrays have these sizes, so that indices are simple. */
enum { CHUNKED_T = 448, CHUNKED_H = 4, CHUNKED_P = 12, CHUNKED_N = 20 };

/* Computes the results of gt_ssd_forward and gt_ssd_backward with B = 1.  Arrays hold packed doubles.  G and segments
 * must be at least 1.  Dskip, z, dt_bias, state_in and dstate_out may be NULL.  Without z, dz must be NULL. */
void ssd_chunked_forward(const gt_ssd_args *a);
void ssd_chunked_backward(const gt_ssd_args *a);

#endif
