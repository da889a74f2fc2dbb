/* Shared by the files of this folder.  Each file ops/OP.c describes the operator OP for tests and bench: its fields,
 * the distribution of its inputs, cases, formulas as plain sums, and rows of the bench.  The file ends with the
 * operator's test_op.  OP.spills, if present, lists the kernels that may spill registers: see check_resources.sh. */
#ifndef TEST_OPS_H
#define TEST_OPS_H

#include "gt_test.h"
#include "ref64.h"

#include <math.h>
#include <string.h>

/* ---- functions ------------------------------------------------------------------------------- */

/* Wraps the twins as functions of a void pointer, as test_op needs them. */
#define TEST_TWIN(op, pass)                                                                                            \
    static gt_status op##_##pass(const void *args) { return gt_ref_##op##_##pass((const gt_##op##_args *)args); }      \
    static gt_status op##_##pass##64(const void *args) { return gt_ref64_##op##_##pass((const gt_##op##_args *)args); }
#define TEST_TWINS_OF_ROWS(op) TEST_TWIN(op, forward) TEST_TWIN(op, backward)
#define TEST_TWINS_OVER_TIME(op) TEST_TWINS_OF_ROWS(op) TEST_TWIN(op, step)

#define TEST_TWINS_IN_PIECES(op)                                                                                       \
    TEST_TWINS_OVER_TIME(op)                                                                                           \
    TEST_TWIN(op, segment) TEST_TWIN(op, segment_backward) TEST_TWIN(op, join) TEST_TWIN(op, join_backward)

/* Sets the common fields of a test_op.  Each ops/OP.c defines arrays and functions with these names. */
#define TEST_OP(op)                                                                                                    \
    .name = #op, .table = gt_op_##op, .args_size = gt_##op##_args_size, .args_bytes = sizeof(gt_##op##_args),          \
    .fields = fields, .bad_values = bad_values, .cases = cases, .sizes = sizes, .many = many, .sums = sums,            \
    .draw = draw, .formulas = formulas, .host_rows = host_rows, .gpu_rows = gpu_rows
#define TEST_OVER_ROWS(op)                                                                                             \
    TEST_OP(op), .twin = {op##_forward, op##_backward, NULL}, .twin64 = {op##_forward64, op##_backward64, NULL}
#define TEST_ROWS_AND_STEP(op)                                                                                         \
    TEST_OP(op), .twin = {op##_forward, op##_backward, op##_step},                                                     \
                 .twin64 = {op##_forward64, op##_backward64, op##_step64}
#define TEST_OVER_TIME(op)                                                                                             \
    TEST_OP(op), .packed = packed, .twin = {op##_forward, op##_backward, op##_step},                                   \
                 .twin64 = {op##_forward64, op##_backward64, op##_step64}

#define TEST_PASSES_IN_PIECES(op, kind)                                                                                \
    {                                                                                                                  \
        op##_forward##kind, op##_backward##kind, op##_step##kind, op##_segment##kind, op##_segment_backward##kind,     \
            op##_join##kind, op##_join_backward##kind                                                                  \
    }
#define TEST_IN_PIECES(op)                                                                                             \
    TEST_OP(op), .packed = packed, .twin = TEST_PASSES_IN_PIECES(op, ), .twin64 = TEST_PASSES_IN_PIECES(op, 64)

/* ---- arguments ------------------------------------------------------------------------------- */

#define TEST_PIECES_FUNCTIONS(op)                                                                                      \
    TEST_RECURRENT_FUNCTIONS(op)                                                                                       \
    TEST_PASS(op, segment) TEST_PASS(op, segment_backward) TEST_PASS(op, join) TEST_PASS(op, join_backward)

#define AT(op, field) offsetof(gt_##op##_args, field)
#define TEST_FIELD(op, name, kind)                                                                                     \
    { #name, AT(op, name), kind, 0, 0 }
#define TEST_DIVISOR(op, name, of)                                                                                     \
    { #name, AT(op, name), 'g', of, 0 }
#define TEST_FLOAT(op, name, usual)                                                                                    \
    { #name, AT(op, name), 'f', 0, usual }

#define BAD(op, field, kind, value, status, text)                                                                      \
    {                                                                                                                  \
        text, status, {                                                                                                \
            { AT(op, field), kind, value }                                                                             \
        }                                                                                                              \
    }
#define BAD_SWITCH(op, field, above)                                                                                   \
    BAD(op, field, 'i', -1, GT_ERROR_VALUE, #field " = -1"),                                                           \
        BAD(op, field, 'i', above, GT_ERROR_VALUE, #field " = " #above)
#define BAD_SIZE(op, field)                                                                                            \
    BAD(op, field, 'l', -1, GT_ERROR_SIZE, #field " = -1"),                                                            \
        BAD(op, field, 'l', 0x1p41, GT_ERROR_SIZE, #field " = 2199023255552")
#define BAD_DIVISOR(op, field, value) BAD(op, field, 'l', value, GT_ERROR_SIZE, #field " = " #value)
#define BAD_EPS(op)                                                                                                    \
    BAD(op, eps, 'f', -1, GT_ERROR_VALUE, "eps = -1"), BAD(op, eps, 'f', NAN, GT_ERROR_VALUE, "eps = nan"),            \
        BAD(op, eps, 'f', INFINITY, GT_ERROR_VALUE, "eps = inf")
/* Values of a reserved field: the call refuses them even if they are the default. */
#define BAD_RESERVED(op, field)                                                                                        \
    BAD(op, field, 'i', GT_F32, GT_ERROR_UNSUPPORTED, #field " = 1: reserved"),                                        \
        BAD(op, field, 'i', GT_BF16, GT_ERROR_UNSUPPORTED, #field " = 2: reserved")

/* ---- cases ----------------------------------------------------------------------------------- */

#define NO_STATES "state_in state_out dstate_in dstate_out"
#define LENGTHS(...) .packed = {sizeof(int64_t[]){__VA_ARGS__} / sizeof(int64_t), (const int64_t[]){__VA_ARGS__}}
#define RANDOM_LENGTHS(count) .packed = {count, NULL}

int64_t test_pick(test_random *r, int64_t n); /* returns a random number of 0 ... n-1 */
const char *test_pick_absent(test_random *r, const char *const list[4]);

/* Shared by ssd and selective_scan. */
extern const char *const test_ssm_absent[4];
void test_fill_ssm(int softplus, const gt_tensor *t, test_fill *f, test_map *map);
void test_set_ssm_regime(test_case *c, int n);

/* ---- tolerances of kernels ------------------------------------------------------------------- */

/* Errors of outputs that kernels compute in fp32.  Rounding to bf16 or fp16 makes an error of at most 2^-8 or 2^-11,
 * and 0.4 times this on average.  The largest measured error is 0.9 of the limit, in a tensor in which few elements
 * make up most of the size. */
#define TEST_ACTIVATIONS                                                                                               \
    { 0, 1e-5, 3e-3, 7e-4 }
/* Errors of fp32 outputs: the same for all dtypes of inputs, because fp32 holds 16-bit numbers exactly. */
#define TEST_IN_FP32                                                                                                   \
    { 0, 1e-5, 1e-5, 1e-5 }

/* ---- rows of the bench ----------------------------------------------------------------------- */

#define TEST_SSM_DRAWS                                                                                                 \
    {"A", {1, -8.5f, 7.5f}}, {"dt", {0, 0, 0.5f}}, {"dt_bias", {0, -4, 0.2f}}, {                                       \
        "Dskip", { 0, 1, 0.3f }                                                                                        \
    }

/* Rows of the bench with 64 packed sequences of 1024 tokens.  In one row the capacity is 64.  In the other row the
 * capacity is 65536, and the call must take no longer. */
#define TEST_EIGHT(x) x, x, x, x, x, x, x, x
#define TEST_PACKED_ROW(op_name, missing, capacity, ...)                                                               \
    {                                                                                                                  \
        {.op = #op_name,                                                                                               \
         .name = "packed c" #capacity,                                                                                 \
         .absent = missing,                                                                                            \
         .packed = {64, (const int64_t[]){TEST_EIGHT(TEST_EIGHT(1024))}},                                              \
         .args.op_name = {.B = 1, .T = 65536, .seq_capacity = capacity, __VA_ARGS__}},                                 \
            TEST_BF16                                                                                                  \
    }
#define TEST_PACKED_ROWS(op_name, missing, ...)                                                                        \
    TEST_PACKED_ROW(op_name, missing, 64, __VA_ARGS__), TEST_PACKED_ROW(op_name, missing, 65536, __VA_ARGS__)

#endif
