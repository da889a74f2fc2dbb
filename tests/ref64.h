/* The double twins: the CPU twins compiled with doubles.  Tests take their results as the truth.  Every array of the
 * argument struct holds doubles, whatever its dtype says; only int32 arrays stay int32. */
#ifndef GT_REF64_H
#define GT_REF64_H

#ifndef TEST_LIST
#define TEST_LIST "ops/list.h"
#endif
#include TEST_LIST

#ifdef __cplusplus
extern "C" {
#endif

/* Declares all passes, although some operators lack the step and the passes of pieces. */
#define TEST_REF64(op)                                                                                                 \
    gt_status gt_ref64_##op##_forward(const gt_##op##_args *args);                                                     \
    gt_status gt_ref64_##op##_backward(const gt_##op##_args *args);                                                    \
    gt_status gt_ref64_##op##_step(const gt_##op##_args *args);                                                        \
    gt_status gt_ref64_##op##_segment(const gt_##op##_args *args);                                                     \
    gt_status gt_ref64_##op##_segment_backward(const gt_##op##_args *args);                                            \
    gt_status gt_ref64_##op##_join(const gt_##op##_args *args);                                                        \
    gt_status gt_ref64_##op##_join_backward(const gt_##op##_args *args);
TEST_OPERATORS(TEST_REF64)

#ifdef __cplusplus
}
#endif
#endif
