/* Parameter gradients of the fp32 twins where the sums are long: over half a million tokens, rows or batch elements.
 * A running fp32 sum loses digits with its length (up to 5e-3 of it was wrong); the twins take these sums in double,
 * so what remains is the rounding of the single terms.
 *
 *     test_sums [OP] */
#include "gt_test.h"
#include <string.h>

/* Means away from 0, so that sums grow with their length. */
#define WKV6_FILL .fill = {{"r", 0.5, 1, 0, 0}, {"k", 0.5, 1, 0, 0}, {"v", 0.5, 1, 0, 0}, {"dy", 0.5, 1, 0, 0}}
#define SSM_FILL(x) .fill = {{x, 0.5, 1, 0, 0}, {"Bm", 0.5, 1, 0, 0}, {"Cm", 0.5, 1, 0, 0}, {"dy", 0.5, 1, 0, 0}}
#define FILL .fill = {{"x", 0.5, 1, 0, 0}, {"dy", 0.5, 1, 0, 0}, {"dstate_out", 0.5, 1, 0, 0}}

static const test_case cases[] = {
    {.op = "wkv6", .name = "long", WKV6_FILL, .args.wkv6 = {.B = 1, .T = 500000, .H = 1, .N = 2}},
    {.op = "wkv6",
     .name = "many",
     .fill = {{"dstate_out", 0.5, 1, 0, 0}, {"dy", 0.5, 1, 0, 0}},
     .args.wkv6 = {.B = 500000, .T = 1, .H = 1, .N = 2, .state_in_shared = 1}},
    {.op = "ssd",
     .name = "long",
     SSM_FILL("x"),
     .args.ssd = {.B = 1, .T = 500000, .H = 1, .P = 2, .N = 2, .softplus = 1}},
    {.op = "ssd",
     .name = "many, a skip for each channel",
     .fill = {{"dstate_out", 0.5, 1, 0, 0}, {"x", 0.5, 1, 0, 0}, {"dy", 0.5, 1, 0, 0}},
     .args.ssd = {.B = 300000, .T = 1, .H = 1, .P = 2, .N = 2, .Dskip_per_channel = 1, .state_in_shared = 1}},
    {.op = "selective_scan",
     .name = "long",
     SSM_FILL("u"),
     .args.selective_scan = {.B = 1, .T = 500000, .D = 1, .N = 3, .softplus = 1}},
    {.op = "selective_scan",
     .name = "many",
     .fill = {{"dstate_out", 0.5, 1, 0, 0}, {"u", 0.5, 1, 0, 0}, {"dy", 0.5, 1, 0, 0}},
     .args.selective_scan = {.B = 300000, .T = 1, .D = 1, .N = 3, .state_in_shared = 1}},
    {.op = "conv1d", .name = "long", FILL, .args.conv1d = {.B = 1, .T = 500000, .D = 2, .W = 4}},
    {.op = "conv1d", .name = "many", FILL, .args.conv1d = {.B = 300000, .T = 1, .D = 1, .W = 4, .state_in_shared = 1}},
    {.op = "rmsnorm_linear", .name = "long", FILL, .args.rmsnorm_linear = {.M = 1000000, .D = 3, .O = 2}},
    {.op = "norm_mix",
     .name = "long",
     .fill = {{"a", 0.5, 1, 0, 0}, {"b", 0.5, 1, 0, 0}, {"dy", 0.5, 1, 0, 0}},
     .args.norm_mix = {.M = 500000, .D = 3}},
    {.op = "norm_gate", .name = "long", FILL, .args.norm_gate = {.M = 500000, .D = 3}},
};

/* The limit is some roundings of one number.  Of 16-bit calls, too: their inputs are rounded alike. */
static void check_case(test_case c, gt_dtype dtype, int accumulate) {
    const gt_op *op = test_table(&c);
    test_runner twin = test_twin;
    test_values in, truth, got;
    uint32_t wanted = 0;
    for (int i = 0; op->tensors[i].name; i++)
        if (test_accumulates(&c, &op->tensors[i]) || op->tensors[i].use[GT_BACKWARD] == 'g') wanted |= 1u << i;
    for (int i = 0; i < 4; i++) twin.tolerance.parameters[i] = 5e-7;
    test_set_dtype(&c, dtype, GT_DTYPE_DEFAULT);
    test_set_flag(&c, op->accumulate_offset, accumulate);
    test_inputs(&c, GT_BACKWARD, &in);
    test_run(&test_truth, &c, GT_BACKWARD, &in, wanted, &truth);
    test_run(&twin, &c, GT_BACKWARD, &in, wanted, &got);
    test_compare(&twin, &c, GT_BACKWARD, &got, &truth, NULL);
    test_free(&in), test_free(&truth), test_free(&got);
}

int main(int argc, char **argv) {
    for (int o = 0; test_op_names[o]; o++) {
        const char *op = test_op_names[o];
        if (argc > 1 && strcmp(argv[1], op)) continue;
        for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
            if (strcmp(cases[i].op, op)) continue;
            check_case(cases[i], GT_F32, 0);
            check_case(cases[i], GT_BF16, 1);
        }
        test_group(op, "long sums");
    }
    return test_finish();
}
