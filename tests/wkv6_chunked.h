/* The chunked form of wkv6 in double precision, for one head.  It follows the tensor-core kernels of gt/wkv6 step by
 * step. docs/wkv6.md has the mathematics in the same order. */
#ifndef WKV6_CHUNKED_H
#define WKV6_CHUNKED_H

#include "gt_kernels.h"

/* The largest sizes, which give arrays plain indices.  N is a multiple of 16. */
enum { CHUNKED_T = 320, CHUNKED_N = 64, CHUNKED_V = 32 };

/* The differences between the kernels. */
typedef struct wkv6_form {
    int step;            /* tokens that a pass over states takes at once: 16 or 32 */
    int defers_decay;    /* forward as on compute capability 9.0 with N = 128 */
    int bf16_states;     /* S and G are bf16 between the kernels of backward */
    int no_correction;   /* no correction of dg for the rounding of S and G */
    double strong;       /* raw decays: a token is strong if its h exceeds this: 8, in fp32 5, */
    double strong_share; /* and if the other tokens have less than this share of it: 1/64, in fp32 1/8 */
    int always_strong;   /* every sub-chunk and chunk takes the strong-decay path */
} wkv6_form;

/* Counts how often each path was taken: in forward by a group of 16 channels in a sub-chunk, in backward by a chunk. */
typedef struct wkv6_paths {
    int usual, strong;
} wkv6_paths;

/* As gt_wkv6_forward and gt_wkv6_backward with B = H = 1, but arrays hold packed doubles, and V is given.  u, state_in
 * and dstate_out may be NULL. */
wkv6_paths wkv6_chunked_forward(const gt_wkv6_args *a, const wkv6_form *form);
wkv6_paths wkv6_chunked_backward(const gt_wkv6_args *a, const wkv6_form *form);

#endif
