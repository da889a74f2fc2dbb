/* The chunked form of wkv6 in double precision, for one head.  The code follows the tensor-core kernels of gt/wkv6 step
 * by step, in the order of docs/wkv6.md. */
#ifndef WKV6_CHUNKED_H
#define WKV6_CHUNKED_H

#include "gt_kernels.h"

/* The largest sizes.  All arrays have these sizes, so that indices are simple.  N is a multiple of 16. */
enum { CHUNKED_T = 320, CHUNKED_N = 64, CHUNKED_V = 32 };

/* Options in which the kernels differ from each other. */
typedef struct wkv6_form {
    int step;          /* tokens that a pass over states processes in one step: 16 or 32 */
    int defers_decay;  /* forward defers decays, as on compute capability 9.0 with N = 128 */
    int bf16_states;   /* S and G are rounded to bf16 between the kernels of backward */
    int no_correction; /* leaves out the correction of dg for the rounding of S and G */
    double strong;     /* for raw decays: a token is strong if its h exceeds `strong` (8; in fp32 5), */
    /* and the h of the other tokens add up to less than this share of it (1/64; in fp32 1/8) */
    double strong_share;
    int always_strong; /* all sub-chunks and chunks take the strong-decay path */
} wkv6_form;

/* Counts how often each path was taken: in forward by groups of 16 channels of a sub-chunk, in backward by chunks. */
typedef struct wkv6_paths {
    int usual, strong;
} wkv6_paths;

/* Computes the results of gt_wkv6_forward and gt_wkv6_backward with B = H = 1.  Arrays hold packed doubles, and V must
 * be set.  u, state_in and dstate_out may be NULL. */
wkv6_paths wkv6_chunked_forward(const gt_wkv6_args *a, const wkv6_form *form);
wkv6_paths wkv6_chunked_backward(const gt_wkv6_args *a, const wkv6_form *form);

#endif
