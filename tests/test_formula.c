/* The double twins' forward passes against the formulas of gt_kernels.h, written out a second way:
 * every output as a plain sum over all that it depends on, without a recurrence.
 *
 *     test_formula [OP] */
#include "gt_test.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DRAWN = 60, DRAWN_SIZE = 4 };

typedef struct formula {
    const test_case *c;
    const test_values *in;
} formula;

/* An element of an input; an absent one is its constant, an index of size 1 is the same for all. */
static double value(const formula *f, const char *name, int64_t i, int64_t j, int64_t k, int64_t l) {
    int at = test_find(test_table(f->c), name);
    const gt_tensor *t = &test_table(f->c)->tensors[at];
    int64_t index[4] = {i, j, k, l}, size[4], offset = 0;
    int rank = test_shape(f->c, GT_FORWARD, t, size);
    if (!f->in->of[at]) return test_constant(name);
    for (int d = 0; d < rank; d++) offset = offset * size[d] + (size[d] == 1 ? 0 : index[d]);
    return f->in->of[at][offset];
}

static int has(const formula *f, const char *name) { return f->in->of[test_find(test_table(f->c), name)] != NULL; }

static double silu(double x) { return x == -INFINITY ? 0 : x / (1 + exp(-x)); }

/* ---- sequences ------------------------------------------------------------------------------- */

/* Where a sequence lies: tokens first ... last-1 of batch element b, its states in `row`. */
typedef struct sequence {
    int64_t b, row, first, last;
} sequence;

/* The harness sees states that belong to no sequence as 0. */
static int has_sequence(const formula *f, int64_t row) {
    return !test_is_packed(f->c) || row < test_sequences(f->c, f->in);
}

static sequence sequence_at(const formula *f, int64_t row) {
    sequence q = {row, row, 0, test_get_size(f->c, 'T')};
    if (!test_is_packed(f->c)) return q;
    q.b = 0;
    q.first = test_sequence_at(f->c, f->in, row);
    q.last = test_sequence_at(f->c, f->in, row + 1);
    return q;
}

/* The sequence of a token; -1 as its row: none. */
static sequence sequence_of(const formula *f, int64_t b, int64_t t) {
    const sequence none = {0, -1, 0, 0};
    if (!test_is_packed(f->c)) return sequence_at(f, b);
    for (int64_t s = 0; s < test_sequences(f->c, f->in); s++)
        if (t >= test_sequence_at(f->c, f->in, s) && t < test_sequence_at(f->c, f->in, s + 1)) return sequence_at(f, s);
    return none;
}

/* ---- wkv6 ------------------------------------------------------------------------------------ */

/* prod_{first <= m < last} d_m */
static double wkv6_decay(const formula *f, int64_t b, int64_t first, int64_t last, int64_t h, int64_t n) {
    double log_decay = 0;
    for (int64_t m = first; m < last; m++) {
        double w = value(f, "w", b, m, h, n);
        log_decay += f->c->args.wkv6.decay == GT_DECAY_LOG ? w : -exp(w);
    }
    return exp(log_decay);
}

/* Element [n,j] of the state before token t. */
static double wkv6_state(const formula *f, sequence q, int64_t t, int64_t h, int64_t n, int64_t j) {
    double S = wkv6_decay(f, q.b, q.first, t, h, n) * value(f, "state_in", q.row, h, n, j);
    for (int64_t s = q.first; s < t; s++)
        S += wkv6_decay(f, q.b, s + 1, t, h, n) * value(f, "k", q.b, s, h, n) * value(f, "v", q.b, s, h, j);
    return S;
}

static double wkv6_y(const formula *f, int64_t b, int64_t t, int64_t h, int64_t j) {
    const sequence q = sequence_of(f, b, t);
    double y = 0;
    for (int64_t n = 0; n < f->c->args.wkv6.N && q.row >= 0; n++)
        y += value(f, "r", b, t, h, n) *
             (wkv6_state(f, q, t, h, n, j) +
              value(f, "u", h, n, 0, 0) * value(f, "k", b, t, h, n) * value(f, "v", b, t, h, j));
    return f->c->args.wkv6.scale ? f->c->args.wkv6.scale * y : y;
}

static double wkv6_state_out(const formula *f, int64_t row, int64_t h, int64_t n, int64_t j) {
    if (!has_sequence(f, row)) return 0;
    const sequence q = sequence_at(f, row);
    return wkv6_state(f, q, q.last, h, n, j);
}

/* ---- ssd and selective_scan ------------------------------------------------------------------ */

static double ssm_delta(const formula *f, int64_t b, int64_t t, int64_t h) {
    const gt_ssd_args *a = &f->c->args.ssd;
    int is_ssd = !strcmp(f->c->op, "ssd");
    double s = value(f, "dt", b, t, h, 0) + value(f, "dt_bias", h, 0, 0, 0);
    if (is_ssd ? a->softplus : f->c->args.selective_scan.softplus) s = log(1 + exp(s));
    return is_ssd && a->dt_limit ? fmin(fmax(s, a->dt_min), a->dt_max) : s;
}

/* The state before token `last`, element n of row p of head h; for the selective scan h is the
 * channel and there is one row. */
static double ssm_state(const formula *f, sequence q, int64_t last, int64_t h, int64_t p, int64_t n) {
    int is_ssd = !strcmp(f->c->op, "ssd");
    int64_t heads = is_ssd ? f->c->args.ssd.H : f->c->args.selective_scan.D;
    int64_t groups = is_ssd ? f->c->args.ssd.G : f->c->args.selective_scan.G;
    int64_t g = h / (heads / (groups ? groups : 1));
    double A = value(f, "A", h, n, 0, 0), elapsed = 0, S = 0;
    for (int64_t s = last - 1; s >= q.first; s--) {
        double delta = ssm_delta(f, q.b, s, h);
        double x = is_ssd ? value(f, "x", q.b, s, h, p) : value(f, "u", q.b, s, h, 0);
        S += exp(elapsed * A) * delta * x * value(f, "Bm", q.b, s, g, n);
        elapsed += delta;
    }
    return S +
           exp(elapsed * A) * (is_ssd ? value(f, "state_in", q.row, h, p, n) : value(f, "state_in", q.row, h, n, 0));
}

static double ssm_output(const formula *f, int64_t b, int64_t t, int64_t h, int64_t g, int64_t p, int64_t N, double x,
                         double skip, double z) {
    const sequence q = sequence_of(f, b, t);
    double y = skip * x;
    if (q.row < 0) return 0;
    for (int64_t n = 0; n < N; n++) y += ssm_state(f, q, t + 1, h, p, n) * value(f, "Cm", b, t, g, n);
    return has(f, "z") ? y * silu(z) : y;
}

static double ssd_y(const formula *f, int64_t b, int64_t t, int64_t h, int64_t p) {
    const gt_ssd_args *a = &f->c->args.ssd;
    return ssm_output(f, b, t, h, h / (a->H / (a->G ? a->G : 1)), p, a->N, value(f, "x", b, t, h, p),
                      value(f, "Dskip", h, p, 0, 0), value(f, "z", b, t, h, p));
}

static double ssd_state_out(const formula *f, int64_t row, int64_t h, int64_t p, int64_t n) {
    if (!has_sequence(f, row)) return 0;
    const sequence q = sequence_at(f, row);
    return ssm_state(f, q, q.last, h, p, n);
}

static double scan_y(const formula *f, int64_t b, int64_t t, int64_t d, int64_t unused) {
    const gt_selective_scan_args *a = &f->c->args.selective_scan;
    (void)unused;
    return ssm_output(f, b, t, d, d / (a->D / (a->G ? a->G : 1)), 0, a->N, value(f, "u", b, t, d, 0),
                      value(f, "Dskip", d, 0, 0, 0), value(f, "z", b, t, d, 0));
}

static double scan_state_out(const formula *f, int64_t row, int64_t d, int64_t n, int64_t unused) {
    (void)unused;
    if (!has_sequence(f, row)) return 0;
    const sequence q = sequence_at(f, row);
    return ssm_state(f, q, q.last, d, 0, n);
}

/* ---- conv1d ---------------------------------------------------------------------------------- */

/* e_i of a sequence, i = 0 being the oldest input before its first token */
static double conv1d_e(const formula *f, sequence q, int64_t i, int64_t d) {
    int64_t J = f->c->args.conv1d.W - 1;
    return i < J ? value(f, "state_in", q.row, d, i, 0) : value(f, "x", q.b, q.first + i - J, d, 0);
}

static double conv1d_y(const formula *f, int64_t b, int64_t t, int64_t d, int64_t unused) {
    const sequence q = sequence_of(f, b, t);
    double sum = value(f, "bias", d, 0, 0, 0);
    (void)unused;
    if (q.row < 0) return 0;
    for (int64_t j = 0; j < f->c->args.conv1d.W; j++)
        sum += value(f, "weight", d, j, 0, 0) * conv1d_e(f, q, t - q.first + j, d);
    return f->c->args.conv1d.activation == GT_ACT_SILU ? silu(sum) : sum;
}

static double conv1d_state_out(const formula *f, int64_t row, int64_t d, int64_t j, int64_t unused) {
    (void)unused;
    if (!has_sequence(f, row)) return 0;
    const sequence q = sequence_at(f, row);
    return conv1d_e(f, q, q.last - q.first + j, d);
}

/* ---- norms ----------------------------------------------------------------------------------- */

/* The number that is normalised: x, or x silu(z) if the gate is first. */
static double norm_input(const formula *f, const char *x, int64_t m, int64_t d) {
    int gated = !strcmp(f->c->op, "norm_gate") && f->c->args.norm_gate.gate_first && has(f, "z");
    return value(f, x, m, d, 0, 0) * (gated ? silu(value(f, "z", m, d, 0, 0)) : 1);
}

/* norm(x)[d] over the slice of n that holds d */
static double norm(const formula *f, const char *x, int64_t m, int64_t d, int64_t n, gt_norm kind, float eps) {
    int64_t first = d / n * n;
    double mean = 0, square = 0;
    for (int64_t i = first; i < first + n && kind == GT_NORM_LAYER; i++) mean += norm_input(f, x, m, i) / (double)n;
    for (int64_t i = first; i < first + n; i++) square += pow(norm_input(f, x, m, i) - mean, 2) / (double)n;
    return (norm_input(f, x, m, d) - mean) / sqrt(square + (eps ? eps : 1e-5f));
}

static double linear_y(const formula *f, int64_t m, int64_t o, int64_t i, int64_t j) {
    const gt_rmsnorm_linear_args *a = &f->c->args.rmsnorm_linear;
    double y = value(f, "bias", o, 0, 0, 0);
    (void)i, (void)j;
    for (int64_t d = 0; d < a->D; d++)
        y += value(f, "weight", o, d, 0, 0) *
             (norm(f, "x", m, d, a->D, a->norm, a->eps) * value(f, "gamma", d, 0, 0, 0) + value(f, "beta", d, 0, 0, 0));
    return y;
}

static double mix_y(const formula *f, int64_t m, int64_t d, int64_t i, int64_t j) {
    const gt_norm_mix_args *a = &f->c->args.norm_mix;
    int64_t n = a->D / (a->H ? a->H : 1);
    (void)i, (void)j;
    return value(f, "residual", m, d, 0, 0) +
           value(f, "gain_a", d, 0, 0, 0) * norm(f, "a", m, d, n, GT_NORM_RMS, a->eps) +
           value(f, "gain_b", d, 0, 0, 0) * norm(f, "b", m, d, n, GT_NORM_RMS, a->eps);
}

static double gate_y(const formula *f, int64_t m, int64_t d, int64_t i, int64_t j) {
    const gt_norm_gate_args *a = &f->c->args.norm_gate;
    double y = norm(f, "x", m, d, a->D / (a->H ? a->H : 1), a->norm, a->eps) * value(f, "gamma", d, 0, 0, 0) +
               value(f, "beta", d, 0, 0, 0);
    (void)i, (void)j;
    return has(f, "z") && !a->gate_first ? y * silu(value(f, "z", m, d, 0, 0)) : y;
}

/* ---- checks ---------------------------------------------------------------------------------- */

typedef struct op_formulas {
    const char *op;
    double (*y)(const formula *f, int64_t i, int64_t j, int64_t k, int64_t l);
    double (*state_out)(const formula *f, int64_t i, int64_t j, int64_t k, int64_t l);
} op_formulas;

static const op_formulas formulas[] = {{"wkv6", wkv6_y, wkv6_state_out},
                                       {"ssd", ssd_y, ssd_state_out},
                                       {"selective_scan", scan_y, scan_state_out},
                                       {"conv1d", conv1d_y, conv1d_state_out},
                                       {"rmsnorm_linear", linear_y, NULL},
                                       {"norm_mix", mix_y, NULL},
                                       {"norm_gate", gate_y, NULL}};

static void check_case(const test_case *c, const op_formulas *o) {
    const gt_op *op = test_table(c);
    test_values in, out, expected = {{NULL}};
    formula f = {c, &in};
    test_inputs(c, GT_FORWARD, &in);
    test_run(&test_truth, c, GT_FORWARD, &in, TEST_ALL, &out);
    for (int i = 0; op->tensors[i].name; i++) {
        int64_t size[4] = {1, 1, 1, 1}, count = test_count(c, GT_FORWARD, &op->tensors[i]);
        if (!out.of[i]) continue;
        for (int d = test_shape(c, GT_FORWARD, &op->tensors[i], size); d < 4; d++) size[d] = 1;
        expected.of[i] = test_array(count, 0);
        for (int64_t j = 0; j < count; j++)
            expected.of[i][j] = (strcmp(op->tensors[i].name, "y") ? o->state_out : o->y)(
                &f, j / (size[1] * size[2] * size[3]), j / (size[2] * size[3]) % size[1], j / size[3] % size[2],
                j % size[3]);
    }
    test_same(&test_truth, c, GT_FORWARD, "the formula", &out, &expected, 1e-13);
    test_free(&in), test_free(&out), test_free(&expected);
}

static void check_operator(const op_formulas *o) {
    const test_op *op = test_op_of(o->op);
    for (const test_case *c = op->cases; c->op; c++)
        if (c->level == TEST_TINY) check_case(c, o);
    test_group(o->op, "the formula");
    for (uint64_t seed = 1; seed <= DRAWN; seed++) {
        test_case c;
        test_draw_case(op, seed, DRAWN_SIZE, &c);
        check_case(&c, o);
    }
    test_group(o->op, "the formula, random cases");
    if (!test_takes_packed(op)) return;
    for (const test_case *c = op->packed; c->op; c++)
        if (c->level == TEST_TINY) check_case(c, o);
    for (uint64_t seed = 1; seed <= DRAWN; seed++) {
        test_case c;
        test_draw_packed(op, seed, DRAWN_SIZE, &c);
        check_case(&c, o);
    }
    test_group(o->op, "the formula, packed sequences");
}

int main(int argc, char **argv) {
    for (size_t i = 0; i < sizeof formulas / sizeof formulas[0]; i++)
        if (argc < 2 || !strcmp(argv[1], formulas[i].op)) check_operator(&formulas[i]);
    return test_finish();
}
