/* Shared by the tests of hard numbers: runners of the kernels, with and without `saved`. */
#ifndef TEST_HARD_H
#define TEST_HARD_H

#include "test_kernels.h"

/* Runs the kernels on machine memory that holds NaN.  context: a machine_mode.  With `saved`, it first runs the forward
 * call that fills it, and then backward. */
gt_status hard_run(const test_runner *r, const test_op *op, gt_pass pass, const void *args, char *memory, size_t bytes);

extern machine_mode hard_plain, hard_saved; /* contexts */

double *hard_array(const test_case *c, const test_values *values, const char *tensor); /* NULL: there is none */

#endif
