/* Compares the double twins' gradients with difference quotients of their forward passes.
 *
 *     test_grad [short] [OP]       short: fewer drawn cases and fewer directions.  Of the gradients of tiny cases, one
 *                                  in three is checked element by element.  The others are checked along random
 *                                  directions, where an error of any element shows
 *
 * The loss is <y, dy> + <state_out, dstate_out> with random dy and dstate_out.  The gradient of the input "X" is the
 * tensor "dX" that backward writes.  In tiny cases, the test changes every element of every input.  In small cases, it
 * changes an input along random directions. */
#include "gt_test.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DRAWN_SIZE = 3 };
static int directions = 4, one_in = 1, turn;
static uint64_t drawn = 30;

/* The limit of the relative error.  Measured errors are at most 1e-9; they come from rounding and from truncating the
 * quotients' series. */
static const double tolerance = 1e-8;

typedef struct grad_case {
    const test_case *c;
    const gt_op *op;
    test_values forward, backward; /* inputs of the two passes */
    test_values gradient;
} grad_case;

/* Computes forward's outputs at x = base + step * direction. */
static void evaluate(const grad_case *g, double *x, const double *base, const double *direction, int64_t count,
                     double step, test_values *out) {
    for (int64_t i = 0; i < count; i++) x[i] = base[i] + step * direction[i];
    test_run(&test_truth, g->c, GT_FORWARD, &g->forward, TEST_ALL, out);
}

/* Computes d loss / d step at step 0, for x = base + step * direction.  Two central differences together have an error
 * of order h^4.  The code takes differences of each output element and not of the loss, because in the loss large
 * elements that do not change would cancel digits. */
static double difference_quotient(const grad_case *g, double *x, const double *base, const double *direction,
                                  int64_t count) {
    const double h = 1e-4;
    test_values out[4];
    double sum = 0;
    for (int k = 0; k < 4; k++) evaluate(g, x, base, direction, count, h * (k < 2 ? k - 2 : k - 1), &out[k]);
    for (int i = 0; g->op->tensors[i].name; i++) {
        int dout = test_gradient_of(g->op, i);
        int64_t n = test_count(g->c, GT_FORWARD, &g->op->tensors[i]);
        if (dout < 0 || !out[0].of[i] || !g->backward.of[dout]) continue; /* y of a branch of a mixed call has none */
        for (int64_t j = 0; j < n; j++) {
            double wide = out[3].of[i][j] - out[0].of[i][j];
            double narrow = out[2].of[i][j] - out[1].of[i][j];
            sum += g->backward.of[dout][j] * (8 * narrow - wide) / (12 * h);
        }
    }
    for (int k = 0; k < 4; k++) test_free(&out[k]);
    memcpy(x, base, (size_t)count * sizeof *x);
    return sum;
}

/* The size of a step for x: proportional to x if |x| > 1. */
static double scale_of(double x) { return isfinite(x) && fabs(x) > 1 ? fabs(x) : 1; }

static void check_elements(const grad_case *g, const char *name, const double *gradient, double *x, const double *base,
                           int64_t count) {
    double *direction = test_array(count, 0), error = 0, norm = 0;
    double worst_error = -1, worst_value = 0;
    int64_t worst = 0;
    for (int64_t i = 0; i < count; i++) {
        double quotient;
        direction[i] = scale_of(base[i]);
        quotient = difference_quotient(g, x, base, direction, count) / direction[i];
        direction[i] = 0;
        error += (quotient - gradient[i]) * (quotient - gradient[i]);
        norm += gradient[i] * gradient[i];
        if (!(fabs(quotient - gradient[i]) <= worst_error)) {
            worst_error = fabs(quotient - gradient[i]);
            worst_value = quotient;
            worst = i;
        }
    }
    test_check(sqrt(error) <= tolerance * sqrt(norm),
               "%s: %s: error %.2e, size of the gradient %.2e; worst element [%lld] is %.12g, but its difference "
               "quotient is %.12g",
               test_describe(g->c, GT_BACKWARD), name, sqrt(error), sqrt(norm), (long long)worst, gradient[worst],
               worst_value);
    free(direction);
}

static void check_directions(const grad_case *g, const char *name, const double *gradient, double *x,
                             const double *base, int64_t count) {
    double *direction = test_array(count, 0);
    test_random r = {test_seed(g->c)};
    for (int k = 0; k < directions; k++) {
        double along = 0, norm = 0, quotient;
        for (int64_t i = 0; i < count; i++) {
            direction[i] = test_normal(&r) * scale_of(base[i]);
            along += gradient[i] * direction[i];
            norm += gradient[i] * direction[i] * gradient[i] * direction[i];
        }
        quotient = difference_quotient(g, x, base, direction, count);
        test_check(fabs(quotient - along) <= tolerance * (fabs(along) + sqrt(norm)),
                   "%s: %s: the gradient along random direction %d is %.12g, but the difference quotient is %.12g",
                   test_describe(g->c, GT_BACKWARD), name, k, along, quotient);
    }
    free(direction);
}

/* Checks the gradient of tensor i, which is an input of forward. */
static void check_gradient(grad_case *g, int i) {
    const gt_tensor *t = &g->op->tensors[i];
    int64_t count = test_count(g->c, GT_FORWARD, t);
    int k = test_gradient_of(g->op, i);
    const double *gradient;
    double *x, *base;
    if (t->kind == 'i') return;
    if (!test_check(k >= 0, "%s has no gradient of %s", g->c->op, t->name)) return;
    gradient = g->gradient.of[k] ? g->gradient.of[k] : g->backward.of[k];
    if (!count || !gradient) return;
    if (!g->forward.of[i]) g->forward.of[i] = test_array(count, test_constant(t->name));
    x = g->forward.of[i];
    base = test_array(count, 0);
    memcpy(base, x, (size_t)count * sizeof *base);
    const int by_element = g->c->level == TEST_TINY && turn++ % one_in == 0;
    (by_element ? check_elements : check_directions)(g, g->op->tensors[k].name, gradient, x, base, count);
    free(base);
}

/* Checks that a gradient has the same bits if the call asks for no other gradient. */
static void check_alone(const grad_case *g, int i) {
    test_values alone;
    test_run(&test_truth, g->c, GT_BACKWARD, &g->backward, (uint64_t)1 << i, &alone);
    test_same(&test_truth, g->c, GT_BACKWARD, "asked for alone", &alone, &g->gradient, 0);
    test_free(&alone);
}

static void check_case(const test_case *c, int alone) {
    grad_case g = {.c = c, .op = test_table(c)};
    test_inputs(c, GT_FORWARD, &g.forward);
    test_inputs(c, GT_BACKWARD, &g.backward);
    test_run(&test_truth, c, GT_BACKWARD, &g.backward, TEST_ALL, &g.gradient);
    for (int i = 0; g.op->tensors[i].name; i++) {
        if (alone && g.gradient.of[i]) check_alone(&g, i);
        if (!alone && test_is_input(&g.op->tensors[i], GT_FORWARD)) check_gradient(&g, i);
    }
    test_free(&g.forward), test_free(&g.backward), test_free(&g.gradient);
}

/* Checks that every gradient of backward belongs to an input.  Then the test has checked all gradients. */
static void check_table(const test_op *top) {
    const gt_op *op = top->table();
    for (int i = 0; op->tensors[i].name; i++) {
        const gt_tensor *t = &op->tensors[i];
        const char *plain = test_plain_name(t);
        int input = plain[0] == 'd' ? test_beside(op, i, plain + 1) : -1;
        if (!test_is_output(t, GT_BACKWARD)) continue;
        test_check(input >= 0 && test_is_input(&op->tensors[input], GT_FORWARD), "%s: no input has the gradient %s",
                   top->name, t->name);
    }
    test_group(top->name, "a gradient for every input");
}

static void check_level(const test_op *op, const test_case *cases, test_level level, int alone, const char *what) {
    for (const test_case *c = cases; c->op; c++)
        if (c->level == level && (alone || !c->no_difference)) check_case(c, alone);
    test_group(op->name, what);
}

static void check_drawn(const test_op *op) {
    for (uint64_t seed = 1; seed <= drawn; seed++) {
        test_case c;
        test_draw_case(op, seed, DRAWN_SIZE, &c);
        check_case(&c, 0);
    }
    test_group(op->name, "every element, random cases");
}

static void check_packed(const test_op *op) {
    check_level(op, op->packed, TEST_TINY, 0, "packed: every element");
    check_level(op, op->packed, TEST_SMALL, 0, "packed: along random directions");
    for (uint64_t seed = 1; seed <= drawn; seed++) {
        test_case c;
        test_draw_packed(op, seed, DRAWN_SIZE, &c);
        check_case(&c, 0);
    }
    test_group(op->name, "packed: every element, random cases");
    check_level(op, op->packed, TEST_TINY, 1, "packed: each asked for alone");
}

int main(int argc, char **argv) {
    const int is_short = argc > 1 && !strcmp(argv[1], "short");
    if (is_short) directions = 1, drawn = 3, one_in = 3;
    argc -= is_short, argv += is_short;
    for (int i = 0; test_ops[i]; i++) {
        const test_op *op = test_ops[i];
        if (argc > 1 && strcmp(argv[1], op->name)) continue;
        check_table(op);
        check_level(op, op->cases, TEST_TINY, 0, "every element of every gradient");
        check_level(op, op->cases, TEST_SMALL, 0, "gradients along random directions");
        check_drawn(op);
        check_level(op, op->cases, TEST_TINY, 1, "each gradient asked for alone");
        check_level(op, op->cases, TEST_SMALL, 1, "the same, several chunks");
        if (test_takes_packed(op)) check_packed(op);
    }
    return test_finish();
}
