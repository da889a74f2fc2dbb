/* What the files of this folder share.  Each has one operator: its functions, how its inputs are drawn, its cases and
 * its rows of the bench, put together at its end in a test_op. */
#ifndef TEST_OPS_H
#define TEST_OPS_H

#include "gt_test.h"
#include "ref64.h"

#include <math.h>
#include <string.h>

/* ---- functions, by void pointers ------------------------------------------------------------- */

#define TEST_PASS(op, pass)                                                                                            \
    static gt_status op##_##pass(const void *args) { return gt_ref_##op##_##pass((const gt_##op##_args *)args); }      \
    static gt_status op##_##pass##64(const void *args) {                                                               \
        return gt_ref64_##op##_##pass((const gt_##op##_args *)args);                                                   \
    }                                                                                                                  \
    static gt_status op##_##pass##_device(const void *args, gt_stream stream) {                                        \
        return gt_##op##_##pass((const gt_##op##_args *)args, stream);                                                 \
    }
#define TEST_ROWWISE_FUNCTIONS(op)                                                                                     \
    TEST_PASS(op, forward)                                                                                             \
    TEST_PASS(op, backward)                                                                                            \
    static gt_status op##_need(const void *args, gt_workspace *need) {                                                 \
        return gt_##op##_workspace((const gt_##op##_args *)args, need);                                                \
    }
#define TEST_RECURRENT_FUNCTIONS(op) TEST_ROWWISE_FUNCTIONS(op) TEST_PASS(op, step)

#define AT(op, field) offsetof(gt_##op##_args, field)
#define TEST_RECURRENT(op, segments_at, saved_at, saved_bytes_at)                                                      \
    .name = #op, .table = gt_op_##op, .twin = {op##_forward, op##_backward, op##_step},                                \
    .twin64 = {op##_forward64, op##_backward64, op##_step64},                                                          \
    .device = {op##_forward_device, op##_backward_device, op##_step_device}, .workspace = op##_need,                   \
    .state_in_shared = AT(op, state_in_shared), .slot_capacity = AT(op, slot_capacity),                                \
    .seq_capacity = AT(op, seq_capacity), .segments = segments_at, .saved = saved_at, .saved_bytes = saved_bytes_at,   \
    .workspace_at = AT(op, workspace), .workspace_bytes = AT(op, workspace_bytes)
#define TEST_ROWWISE(op, saved_at, saved_bytes_at)                                                                     \
    .name = #op, .table = gt_op_##op, .twin = {op##_forward, op##_backward, NULL},                                     \
    .twin64 = {op##_forward64, op##_backward64, NULL}, .device = {op##_forward_device, op##_backward_device, NULL},    \
    .workspace = op##_need, .saved = saved_at, .saved_bytes = saved_bytes_at, .workspace_at = AT(op, workspace),       \
    .workspace_bytes = AT(op, workspace_bytes)

/* ---- cases ----------------------------------------------------------------------------------- */

#define NO_STATES "state_in state_out dstate_in dstate_out"
#define LENGTHS(...) .packed = {sizeof(int64_t[]){__VA_ARGS__} / sizeof(int64_t), (const int64_t[]){__VA_ARGS__}}
#define RANDOM_LENGTHS(count) .packed = {count, NULL}

int64_t test_pick(test_random *r, int64_t n); /* of 0 ... n-1 */
const char *test_pick_absent(test_random *r, const char *const list[4]);

/* What ssd and selective_scan share. */
extern const char *const test_ssm_absent[4];
void test_fill_ssm(int softplus, const gt_tensor *t, test_fill *f, test_map *map);
void test_set_ssm_regime(test_case *c, int n);

/* ---- tolerances of kernels ------------------------------------------------------------------- */

/* Of an output that is stored as bf16 or fp16 rounding takes at most 2^-8 or 2^-11, and 0.4 of that
 * on average; the largest seen is 0.9 of the limit, where few elements make up most of a tensor. */
#define TEST_ACTIVATIONS                                                                                               \
    { 0, 1e-5, 3e-3, 7e-4 }
/* From 16-bit numbers, which fp32 holds exactly, fp32 arithmetic takes as little as from fp32. */
#define TEST_IN_FP32                                                                                                   \
    { 0, 1e-5, 1e-5, 1e-5 }

/* ---- rows of the bench ----------------------------------------------------------------------- */

#define TEST_SSM_DRAWS                                                                                                 \
    {"A", {1, -8.5f, 7.5f}}, {"dt", {0, 0, 0.5f}}, {"dt_bias", {0, -4, 0.2f}}, {                                       \
        "Dskip", { 0, 1, 0.3f }                                                                                        \
    }

#endif
