/* Compares the double twins with the formulas of gt_kernels.h: forward, and steps of operators over rows.  ops/OP.c has
 * the formulas, written independently of the twins: every output is a plain sum over all its terms, without a
 * recurrence.
 *
 *     test_formula [short] [OP]       short: fewer drawn cases
 */
#include "gt_test.h"
#include <string.h>

enum { DRAWN_SIZE = 4 };
static uint64_t drawn = 60;

static const test_formula *formula_of(const test_op *op, const char *tensor) {
    for (const test_formula *o = op->formulas; o && o->tensor; o++)
        if (!strcmp(o->tensor, tensor)) return o;
    return NULL;
}

static void check_pass(const test_op *op, const test_case *c, gt_pass pass) {
    test_values in, out, expected = {{NULL}};
    const formula f = {c, &in};
    test_inputs(c, pass, &in);
    test_run(&test_truth, c, pass, &in, TEST_ALL, &out);
    for (int i = 0; op->table()->tensors[i].name; i++) {
        const gt_tensor *t = &op->table()->tensors[i];
        const test_formula *o = formula_of(op, t->name);
        const int64_t count = test_count(c, pass, t);
        int64_t size[4] = {1, 1, 1, 1};
        if (!out.of[i]) continue;
        test_check(o != NULL, "%s: ops/%s.c has no formula for %s", test_describe(c, pass), op->name, t->name);
        if (!o) continue;
        for (int d = test_shape(c, pass, t, size); d < 4; d++) size[d] = 1;
        expected.of[i] = test_array(count, 0);
        for (int64_t j = 0; j < count; j++)
            expected.of[i][j] = o->of(&f, j / (size[1] * size[2] * size[3]), j / (size[2] * size[3]) % size[1],
                                      j / size[3] % size[2], j % size[3]);
    }
    test_same(&test_truth, c, pass, "the formula", &out, &expected, 1e-13);
    test_free(&in), test_free(&out), test_free(&expected);
}

/* Checks forward, and a step over rows.  Other tests compare steps over time with forward. */
static void check_case(const test_op *op, const test_case *c) {
    check_pass(op, c, GT_FORWARD);
    if (!test_is_over_time(op) && test_has_pass(c, GT_STEP)) check_pass(op, c, GT_STEP);
}

static void check_tiny(const test_op *op, const test_case *cases) {
    for (const test_case *c = cases; c->op; c++)
        if (c->level == TEST_TINY) check_case(op, c);
}

static void check_drawn(const test_op *op, void (*draw)(const test_op *, uint64_t, int64_t, test_case *)) {
    for (uint64_t seed = 1; seed <= drawn; seed++) {
        test_case c;
        draw(op, seed, DRAWN_SIZE, &c);
        check_case(op, &c);
    }
}

static void check_operator(const test_op *op) {
    check_tiny(op, op->cases);
    test_group(op->name, "the formula");
    check_drawn(op, test_draw_case);
    test_group(op->name, "the formula, random cases");
    if (!test_takes_packed(op)) return;
    check_tiny(op, op->packed);
    check_drawn(op, test_draw_packed);
    test_group(op->name, "the formula, packed sequences");
}

int main(int argc, char **argv) {
    const int is_short = argc > 1 && !strcmp(argv[1], "short");
    if (is_short) drawn = 20;
    argc -= is_short, argv += is_short;
    for (int i = 0; test_ops[i]; i++)
        if (argc < 2 || !strcmp(argv[1], test_ops[i]->name)) check_operator(test_ops[i]);
    return test_finish();
}
