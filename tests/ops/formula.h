/* For the second formulas of the operators.  They compute every output of forward as a plain sum over everything that
 * the output depends on, without a recurrence.  test_formula.c compares the double twins with them. */
#ifndef TEST_OPS_FORMULA_H
#define TEST_OPS_FORMULA_H

#include "ops.h"

/* An element of an input.  An absent input has its constant, and an index of size 1 always reads element 0. */
double formula_value(const formula *f, const char *tensor, int64_t i, int64_t j, int64_t k, int64_t l);
int formula_has(const formula *f, const char *tensor);
double formula_silu(double x);

/* ---- operators over time --------------------------------------------------------------------- */

/* Tokens first ... last-1 of batch element b, whose states lie in row `row`. */
typedef struct formula_sequence {
    int64_t b, row, first, last;
} formula_sequence;

int formula_has_sequence(const formula *f, int64_t row); /* 0: the harness takes its state for 0 */
formula_sequence formula_sequence_of_row(const formula *f, int64_t row);
formula_sequence formula_sequence_of_token(const formula *f, int64_t b, int64_t t); /* row -1: in no sequence */

/* The fields of ssd and selective_scan under common names.  Heads of selective_scan are channels, with one row each. */
typedef struct formula_ssm {
    int64_t heads, groups, N;
    double (*delta)(const formula *f, int64_t b, int64_t t, int64_t h);
    double (*x)(const formula *f, int64_t b, int64_t t, int64_t h, int64_t p);
    double (*state_in)(const formula *f, int64_t row, int64_t h, int64_t p, int64_t n);
} formula_ssm;

double formula_ssm_y(const formula *f, const formula_ssm *s, int64_t b, int64_t t, int64_t h, int64_t p, double skip,
                     double z);
double formula_ssm_state_out(const formula *f, const formula_ssm *s, int64_t row, int64_t h, int64_t p, int64_t n);

/* ---- operators over rows --------------------------------------------------------------------- */

/* norm(x)[m,d]: the norm over the slice of n numbers that contains d. */
typedef double formula_of_row(const formula *f, int64_t m, int64_t d);
double formula_norm(const formula *f, formula_of_row *x, int64_t m, int64_t d, int64_t n, gt_norm kind, float eps);

#endif
