/* Shared by the tests of hard numbers (test_wkv6_hard.c, test_ssd_hard.c): runs the kernels with and without
 * `saved`. */
#ifndef TEST_HARD_H
#define TEST_HARD_H

#include "test_kernels.h"

/* Runs the kernels on memory of the machine (see test_kernels.h), which holds NaN before.  context: a machine_mode.
 * For backward with `saved`, first runs the forward call that fills `saved`. */
gt_status hard_run(const test_runner *r, const test_op *op, gt_pass pass, const void *args, char *memory, size_t bytes);

extern machine_mode hard_plain, hard_saved; /* values for test_runner.context */

double *hard_array(const test_case *c, const test_values *values, const char *tensor); /* the tensor's array, or NULL */

#endif
