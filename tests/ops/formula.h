/* Helpers for formulas that are independent of the twins.  Such a formula computes an output of forward as a plain sum
 * over everything that the output depends on, without a recurrence.  test_formula.c compares the double twins with
 * these formulas. */
#ifndef TEST_OPS_FORMULA_H
#define TEST_OPS_FORMULA_H

#include "ops.h"

/* An element of an input.  If the input is absent, returns its constant (test_constant).  An index of size 1 always
 * selects element 0. */
double formula_value(const formula *f, const char *tensor, int64_t i, int64_t j, int64_t k, int64_t l);
int formula_has(const formula *f, const char *tensor);
double formula_silu(double x);

/* ---- operators over time --------------------------------------------------------------------- */

/* A sequence: tokens first ... last-1 of batch element b.  Its states lie in row `row`. */
typedef struct formula_sequence {
    int64_t b, row, first, last;
} formula_sequence;

/* whether the row belongs to a sequence; if not, formulas give 0 */
int formula_has_sequence(const formula *f, int64_t row);
formula_sequence formula_sequence_of_row(const formula *f, int64_t row);
/* result.row is -1 if no sequence has the token */
formula_sequence formula_sequence_of_token(const formula *f, int64_t b, int64_t t);

/* The sizes and inputs of ssd and selective_scan under common names.  A channel of selective_scan is a head with one
 * row. */
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

/* Returns norm(x)[m,d], normalised over the slice of n numbers that contains d. */
typedef double formula_of_row(const formula *f, int64_t m, int64_t d);
double formula_norm(const formula *f, formula_of_row *x, int64_t m, int64_t d, int64_t n, gt_norm kind, float eps);

#endif
