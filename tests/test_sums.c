/* Tests parameter gradients of the twins that are long sums: over half a million tokens, rows or batch elements.  A
 * running fp32 sum loses digits with its length; up to 5e-3 of a sum was wrong.  The twins compute these sums in
 * double, so only the rounding of the single terms remains.
 *
 *     test_sums [short] [OP]       short: each case in fp32 or in bf16, in turn, and a quarter as long.  The limit is
 *                                  still far below the error of a running sum
 */
#include "gt_test.h"
#include <string.h>

/* The limit is a few roundings of one fp32 number.  16-bit calls have the same limit, because the double twin reads the
 * same rounded inputs. */
static void check_case(test_case c, gt_dtype dtype, int accumulate) {
    const gt_op *op = test_table(&c);
    test_runner twin = test_twin;
    test_values in, truth, got;
    uint64_t wanted = 0;
    for (int i = 0; op->tensors[i].name; i++)
        if (test_accumulates(&c, &op->tensors[i]) || op->tensors[i].use[GT_BACKWARD] == 'g') wanted |= (uint64_t)1 << i;
    for (int i = 0; i < 4; i++) twin.tolerance.parameters[i] = 5e-7;
    test_set_dtype(&c, dtype, GT_DTYPE_DEFAULT);
    test_set_flag(&c, op->accumulate_offset, accumulate);
    test_inputs(&c, GT_BACKWARD, &in);
    test_run(&test_truth, &c, GT_BACKWARD, &in, wanted, &truth);
    test_run(&twin, &c, GT_BACKWARD, &in, wanted, &got);
    test_compare(&twin, &c, GT_BACKWARD, &got, &truth, NULL);
    test_free(&in), test_free(&truth), test_free(&got);
}

static test_case quarter_of(test_case c) {
    for (const gt_size *s = test_table(&c)->sizes; s->letter; s++) {
        const int64_t n = test_get_size(&c, s->letter);
        if (n > 100000) test_set_size(&c, s->letter, n / 4);
    }
    return c;
}

int main(int argc, char **argv) {
    const int is_short = argc > 1 && !strcmp(argv[1], "short");
    int turn = 0;
    argc -= is_short, argv += is_short;
    for (int i = 0; test_ops[i]; i++) {
        const test_op *op = test_ops[i];
        if (argc > 1 && strcmp(argv[1], op->name)) continue;
        for (const test_case *c = op->sums; c->op; c++) {
            const test_case sum = is_short ? quarter_of(*c) : *c;
            if (!is_short || turn % 2 == 0) check_case(sum, GT_F32, 0);
            if (!is_short || turn % 2 == 1) check_case(sum, GT_BF16, 1);
            turn++;
        }
        test_group(op->name, "long sums");
    }
    return test_finish();
}
