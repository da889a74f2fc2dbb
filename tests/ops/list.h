/* The operators under test, in the order of tests and bench.  The build reads the names from this list, too.  ops/OP.c
 * has the cases of operator OP. */
#include "gt_kernels.h"

#define TEST_OPERATORS(X)                                                                                              \
    X(wkv6)                                                                                                            \
    X(ssd)                                                                                                             \
    X(selective_scan)                                                                                                  \
    X(conv1d)                                                                                                          \
    X(rmsnorm_linear)                                                                                                  \
    X(norm_mix)                                                                                                        \
    X(norm_gate)                                                                                                       \
    X(add_norm)                                                                                                        \
    X(wkv_ssm)                                                                                                         \
    X(conv_ssd)                                                                                                        \
    X(wkv4)

/* Operators whose argument struct is that of another operator, and which are described in its file. */
#define TEST_VARIANTS(X) X(wkv_ssm_mixed)
