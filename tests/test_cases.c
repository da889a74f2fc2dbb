/* The list of operators under test, and parts that the files ops/OP.c share: distributions of inputs, and random
 * cases. */
#include "ops/ops.h"

/* ---- operators ------------------------------------------------------------------------------- */

#define DECLARE(op) extern const test_op test_op_##op;
TEST_OPERATORS(DECLARE)
#ifndef TEST_VARIANTS
#define TEST_VARIANTS(X)
#endif
TEST_VARIANTS(DECLARE)

#define ADDRESS(op) &test_op_##op,
const test_op *const test_ops[] = {TEST_OPERATORS(ADDRESS) TEST_VARIANTS(ADDRESS) NULL};

const test_op *test_op_of(const char *name) {
    for (int i = 0; test_ops[i]; i++)
        if (!strcmp(test_ops[i]->name, name)) return test_ops[i];
    return NULL;
}

/* ---- how inputs are drawn -------------------------------------------------------------------- */

static int is(const char *a, const char *b) { return !strcmp(a, b); }

double test_constant(const char *tensor) {
    static const char *const none[] = {"z",           "slots",      "starts_zero", "tokens",        "commit",
                                       "places",      "cu_seqlens", "seq_count",   "rounding_seed", "rounding_steps",
                                       "state_scale", "y"};
    if (is(tensor, "gamma") || is(tensor, "gain_a") || is(tensor, "gain_b") || is(tensor, "gain_wkv") ||
        is(tensor, "gain_ssm"))
        return 1;
    for (size_t i = 0; i < sizeof none / sizeof none[0]; i++)
        if (is(tensor, none[i])) return NAN;
    return 0;
}

/* The default distribution of a tensor, roughly as in a trained model.  The operator's set_fill may replace it, and the
 * case may replace both. */
test_fill test_fill_of(const test_case *c, const gt_tensor *t, test_map *map) {
    const test_op *op = test_op_of(c->op);
    test_fill f = {t->name, test_constant(test_plain_name(t)) == 1, 1, 0, 0};
    *map = TEST_AS_IS;
    if (f.mean == 1) f.spread = 0.3;
    if (t->shape[0] == 'M') f.mean = 0.3; /* a mean that LayerNorm has to subtract */
    if (is(t->name, "piece_decays")) *map = TEST_NEGATIVE_EXP;
    if (is(t->name, "state_scale")) f.mean = -4, *map = TEST_EXP;
    if (op->set_fill) op->set_fill(c, t, &f, map);
    for (size_t i = 0; i < sizeof c->fill / sizeof c->fill[0]; i++)
        if (c->fill[i].tensor && is(c->fill[i].tensor, t->name)) f = c->fill[i];
    return f;
}

/* For ssd and selective_scan: A and, without softplus, dt are exp of a normal number. */
void test_fill_ssm(int softplus, const gt_tensor *t, test_fill *f, test_map *map) {
    if (test_is(t, "A")) {
        f->spread = 0.5;
        *map = TEST_NEGATIVE_EXP;
    } else if (test_is(t, "dt") || test_is(t, "dt_bias")) {
        f->mean = test_is(t, "dt") ? (softplus ? -1 : -2) : softplus ? 0 : -3;
        f->spread = 0.7;
        if (!softplus) *map = TEST_EXP;
    }
}

/* For ssd and selective_scan: mild decays, fast decays, hardly any decay, and resets of half the states at once. */
void test_set_ssm_regime(test_case *c, int n) {
    static const test_fill regimes[] = {
        {"A", 0, 0.5, 0, 0}, {"A", 3, 0.5, 0, 0}, {"A", -8, 1, 0, 0}, {"A", 0, 0.5, -10000, 0.5}};
    c->fill[0] = regimes[n % 4];
}

/* ---- random cases ---------------------------------------------------------------------------- */

const char *const test_ssm_absent[4] = {"", "z dz", "state_in dt_bias", ("Dskip " NO_STATES)};

int64_t test_pick(test_random *r, int64_t n) { return (int64_t)(test_next(r) % (uint64_t)n); }

const char *test_pick_absent(test_random *r, const char *const list[4]) { return list[test_pick(r, 4)]; }

void test_draw_case(const test_op *op, uint64_t seed, int64_t most, test_case *c) {
    test_random r = {seed};
    memset(c, 0, sizeof *c);
    c->op = op->name;
    c->name = "drawn";
    c->seed = seed;
    c->layout = (test_layout)test_pick(&r, TEST_SLICES + 1);
    c->in_place = (int)test_pick(&r, 2);
    op->draw(&r, most, c);
    if (test_is_over_time(op)) {
        test_set_size(c, 'B', 1 + test_pick(&r, 3));
        test_set_size(c, 'T', test_pick(&r, 2 * most + 1));
    } else {
        test_set_size(c, 'M', 1 + test_pick(&r, 2 * most));
    }
}

void test_draw_packed(const test_op *op, uint64_t seed, int64_t most, test_case *c) {
    test_random r = {seed};
    int64_t count = test_pick(&r, 6), unused = test_pick(&r, 3);
    test_draw_case(op, seed, most, c);
    c->name = "drawn, packed";
    test_set_size(c, 'B', 1);
    test_set_size(c, 'T', test_pick(&r, 4 * most + 1));
    test_set_sequences(c, count, count + unused ? count + unused : 1);
    if (count && !unused && !*c->absent) c->absent = "seq_count";
}
