/* Functions that the second formulas in ops/OP.c share: see ops/formula.h. */
#include "ops/formula.h"

double formula_value(const formula *f, const char *tensor, int64_t i, int64_t j, int64_t k, int64_t l) {
    const int which = test_find(test_table(f->c), tensor);
    const gt_tensor *t = &test_table(f->c)->tensors[which];
    const int64_t index[4] = {i, j, k, l};
    int64_t size[4], offset = 0;
    const int rank = test_shape(f->c, GT_FORWARD, t, size);
    if (!f->in->of[which]) return test_constant(tensor);
    for (int d = 0; d < rank; d++) offset = offset * size[d] + (size[d] == 1 ? 0 : index[d]);
    return f->in->of[which][offset];
}

int formula_has(const formula *f, const char *tensor) { return f->in->of[test_find(test_table(f->c), tensor)] != NULL; }

double formula_silu(double x) { return x == -INFINITY ? 0 : x / (1 + exp(-x)); }

/* ---- sequences ------------------------------------------------------------------------------- */

int formula_has_sequence(const formula *f, int64_t row) {
    return !test_is_packed(f->c) || row < test_sequences(f->c, f->in);
}

formula_sequence formula_sequence_of_row(const formula *f, int64_t row) {
    formula_sequence q = {row, row, 0, test_get_size(f->c, 'T')};
    if (!test_is_packed(f->c)) return q;
    q.b = 0;
    q.first = test_sequence_at(f->c, f->in, row);
    q.last = test_sequence_at(f->c, f->in, row + 1);
    return q;
}

formula_sequence formula_sequence_of_token(const formula *f, int64_t b, int64_t t) {
    const formula_sequence none = {0, -1, 0, 0};
    if (!test_is_packed(f->c)) return formula_sequence_of_row(f, b);
    for (int64_t s = 0; s < test_sequences(f->c, f->in); s++)
        if (t >= test_sequence_at(f->c, f->in, s) && t < test_sequence_at(f->c, f->in, s + 1))
            return formula_sequence_of_row(f, s);
    return none;
}

/* ---- ssd and selective_scan ------------------------------------------------------------------ */

static double ssm_state(const formula *f, const formula_ssm *s, formula_sequence q, int64_t last, int64_t h, int64_t p,
                        int64_t n) {
    const int64_t g = h / (s->heads / (s->groups ? s->groups : 1));
    const double A = formula_value(f, "A", h, n, 0, 0);
    double elapsed = 0, S = 0;
    for (int64_t t = last - 1; t >= q.first; t--) {
        const double delta = s->delta(f, q.b, t, h);
        S += exp(elapsed * A) * delta * s->x(f, q.b, t, h, p) * formula_value(f, "Bm", q.b, t, g, n);
        elapsed += delta;
    }
    return S + exp(elapsed * A) * s->state_in(f, q.row, h, p, n);
}

double formula_ssm_y(const formula *f, const formula_ssm *s, int64_t b, int64_t t, int64_t h, int64_t p, double skip,
                     double z) {
    const formula_sequence q = formula_sequence_of_token(f, b, t);
    const int64_t g = h / (s->heads / (s->groups ? s->groups : 1));
    double y = skip * s->x(f, b, t, h, p);
    if (q.row < 0) return 0;
    for (int64_t n = 0; n < s->N; n++) y += ssm_state(f, s, q, t + 1, h, p, n) * formula_value(f, "Cm", b, t, g, n);
    return formula_has(f, "z") ? y * formula_silu(z) : y;
}

double formula_ssm_state_out(const formula *f, const formula_ssm *s, int64_t row, int64_t h, int64_t p, int64_t n) {
    if (!formula_has_sequence(f, row)) return 0;
    const formula_sequence q = formula_sequence_of_row(f, row);
    return ssm_state(f, s, q, q.last, h, p, n);
}

/* ---- norms ----------------------------------------------------------------------------------- */

double formula_norm(const formula *f, formula_of_row *x, int64_t m, int64_t d, int64_t n, gt_norm kind, float eps) {
    const int64_t first = d / n * n;
    double mean = 0, square = 0;
    for (int64_t i = first; i < first + n && kind == GT_NORM_LAYER; i++) mean += x(f, m, i) / (double)n;
    for (int64_t i = first; i < first + n; i++) square += pow(x(f, m, i) - mean, 2) / (double)n;
    return (x(f, m, d) - mean) / sqrt(square + (eps ? eps : 1e-5f));
}
