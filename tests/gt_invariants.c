#include "gt_invariants.h"
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int is_recurrent(const test_case *c) { return test_is_over_time(test_op_of(c->op)); }

static int is_shared(const test_case *c) { return test_get_flag(c, test_table(c)->fields.state_in_shared); }

/* The operator's n-th tensor of a plain name, or NULL: one that is two operators in one call has two of state_in. */
static const gt_tensor *nth_tensor(const test_case *c, const char *plain_name, int n) {
    for (const gt_tensor *t = test_table(c)->tensors; t->name; t++)
        if (test_is(t, plain_name) && n-- == 0) return t;
    return NULL;
}

/* Whether the case lacks one of them. */
static int lacks(const test_case *c, const char *plain_name) {
    const gt_tensor *t;
    for (int n = 0; (t = nth_tensor(c, plain_name, n)); n++)
        if (test_is_absent(c, t)) return 1;
    return 0;
}

/* Takes an array out of `from`. */
static double *take_array(test_values *from, const test_case *c, const char *tensor) {
    double **at = test_array_of(from, c, tensor), *array = *at;
    *at = NULL;
    return array;
}

/* ---- one run against another ----------------------------------------------------------------- */

void test_truth_holds(const test_runner *r, const test_case *c) {
    for (int pass = GT_FORWARD; pass < GT_PASSES; pass++) {
        test_values in, truth, got, magnitudes = {{NULL}};
        if (!test_has_pass(c, (gt_pass)pass)) continue;
        test_inputs(c, (gt_pass)pass, &in);
        test_run(&test_truth, c, (gt_pass)pass, &in, TEST_ALL, &truth);
        test_run(r, c, (gt_pass)pass, &in, TEST_ALL, &got);
        if (pass == GT_BACKWARD) test_magnitudes(c, &in, &magnitudes);
        test_compare(r, c, (gt_pass)pass, &got, &truth, &magnitudes);
        test_free(&in), test_free(&truth), test_free(&got), test_free(&magnitudes);
    }
}

static int has_same_bits(const test_case *c, gt_pass pass, const test_values *a, const test_values *b) {
    for (int i = 0; test_table(c)->tensors[i].name; i++) {
        const size_t count = (size_t)test_count(c, pass, &test_table(c)->tensors[i]);
        if (a->of[i] && b->of[i] && memcmp(a->of[i], b->of[i], count * sizeof(double))) return 0;
    }
    return 1;
}

/* Every pass of `other`, a case with tensors of the same shapes, gives the bits of `c`.  Where other kernels may take it,
 * with within_tolerance, it may give other bits, which agree with the double twin as those of `c` have to. */
static void check_cases_agree(const test_runner *r, const test_case *c, const test_case *other, const char *what,
                              int within_tolerance) {
    for (int pass = GT_FORWARD; pass <= GT_STEP; pass++) {
        test_values in, a, b, truth, magnitudes = {{NULL}};
        if (!test_has_pass(c, (gt_pass)pass)) continue;
        test_inputs(c, (gt_pass)pass, &in);
        test_run(r, c, (gt_pass)pass, &in, TEST_ALL, &a);
        test_run(r, other, (gt_pass)pass, &in, TEST_ALL, &b);
        if (!within_tolerance || has_same_bits(c, (gt_pass)pass, &a, &b)) {
            test_same(r, other, (gt_pass)pass, what, &b, &a, 0);
        } else {
            test_run(&test_truth, c, (gt_pass)pass, &in, TEST_ALL, &truth);
            if (pass == GT_BACKWARD) test_magnitudes(c, &in, &magnitudes);
            test_compare(r, other, (gt_pass)pass, &b, &truth, &magnitudes);
            test_free(&truth), test_free(&magnitudes);
        }
        test_free(&in), test_free(&a), test_free(&b);
    }
}

void test_repeats(const test_runner *r, const test_case *c) { check_cases_agree(r, c, c, "second run", 0); }

void test_layouts_agree(const test_runner *r, const test_case *c, int within_tolerance) {
    test_case packed = *c, other = *c;
    packed.layout = TEST_PACKED;
    for (int layout = TEST_SHIFTED; layout <= TEST_ALIGNED; layout++) {
        other.layout = (test_layout)layout;
        check_cases_agree(r, &packed, &other, "layout instead of packed", within_tolerance);
    }
}

void test_in_place_agrees(const test_runner *r, const test_case *c, int within_tolerance) {
    test_case apart = *c, in_place = *c;
    apart.in_place = 0;
    in_place.in_place = 1;
    check_cases_agree(r, &apart, &in_place, "in place", within_tolerance);
    in_place.layout = TEST_GAPS;
    check_cases_agree(r, &apart, &in_place, "in place, with gaps", within_tolerance);
}

void test_alone_agrees(const test_runner *r, const test_case *c, double tolerance) {
    const gt_op *op = test_table(c);
    for (int pass = GT_FORWARD; pass <= GT_BACKWARD; pass++) {
        test_values in, all, alone;
        uint64_t required = 0;
        for (int i = 0; op->tensors[i].name; i++)
            if (gt_use(&op->tensors[i], pass) == 'O') required |= (uint64_t)1 << i;
        test_inputs(c, (gt_pass)pass, &in);
        test_run(r, c, (gt_pass)pass, &in, TEST_ALL, &all);
        for (int i = 0; op->tensors[i].name; i++) { /* an i that is no output: none at all */
            uint64_t wanted = required | (all.of[i] ? (uint64_t)1 << i : 0);
            test_run(r, c, (gt_pass)pass, &in, wanted, &alone);
            test_same(r, c, (gt_pass)pass, "asked for alone", &alone, &all, tolerance);
            test_free(&alone);
        }
        test_free(&in), test_free(&all);
    }
}

void test_null_agrees(const test_runner *r, const test_case *c, double tolerance) {
    const gt_op *op = test_table(c);
    for (int pass = GT_FORWARD; pass <= GT_STEP; pass++) {
        test_values in, null, constant;
        if (!test_has_pass(c, (gt_pass)pass)) continue;
        for (int i = 0; op->tensors[i].name; i++) {
            const gt_tensor *t = &op->tensors[i];
            double value = test_constant(test_plain_name(t));
            if (gt_use(t, pass) != 'i' || isnan(value)) continue;
            test_inputs(c, (gt_pass)pass, &in);
            test_set_array(&in, c, t->name, NULL);
            test_run(r, c, (gt_pass)pass, &in, TEST_ALL, &null);
            test_set_array(&in, c, t->name, test_array(test_count(c, (gt_pass)pass, t), value));
            test_run(r, c, (gt_pass)pass, &in, TEST_ALL, &constant);
            test_same(r, c, (gt_pass)pass, t->name, &null, &constant, tolerance);
            test_free(&in), test_free(&null), test_free(&constant);
        }
    }
}

/* ---- sums ------------------------------------------------------------------------------------ */

/* Makes a case add to its parameter gradients, or not. */
static test_case with_accumulate(const test_case *c, int accumulate) {
    test_case other = *c;
    test_set_flag(&other, test_table(c)->accumulate_offset, accumulate);
    return other;
}

void test_accumulate_adds(const test_runner *r, const test_case *c) {
    const gt_op *op = test_table(c);
    test_case add = with_accumulate(c, 1), write = with_accumulate(c, 0);
    test_values in, added, written;
    test_inputs(&add, GT_BACKWARD, &in);
    test_run(r, &add, GT_BACKWARD, &in, TEST_ALL, &added);
    for (int i = 0; op->tensors[i].name; i++) /* the write must not see what was there */
        if (test_accumulates(&add, &op->tensors[i]))
            test_set_array(&in, c, op->tensors[i].name, test_array(test_count(c, GT_BACKWARD, &op->tensors[i]), NAN));
    test_run(r, &write, GT_BACKWARD, &in, TEST_ALL, &written);
    test_free(&in);
    test_inputs(&add, GT_BACKWARD, &in);
    for (int i = 0; op->tensors[i].name; i++) {
        if (!written.of[i] || !test_accumulates(&add, &op->tensors[i])) continue;
        for (int64_t j = 0; j < test_count(c, GT_BACKWARD, &op->tensors[i]); j++)
            written.of[i][j] = test_round(in.of[i][j] + written.of[i][j], r->is_double ? GT_DTYPE_DEFAULT : GT_F32);
    }
    test_same(r, &add, GT_BACKWARD, "accumulate", &added, &written, 0);
    test_free(&in), test_free(&added), test_free(&written);
}

/* Adds what is summed over parts to *sums: parameter gradients, and over the batch the gradient of
 * a shared state. */
static void add_part(const test_case *part, const test_values *from, char letter, test_values *sums) {
    const gt_op *op = test_table(part);
    for (int i = 0; op->tensors[i].name; i++) {
        const gt_tensor *t = &op->tensors[i];
        int64_t count = test_count(part, GT_BACKWARD, t);
        int is_sum = t->use[GT_BACKWARD] == 'g' || (letter == 'B' && is_shared(part) && test_is(t, "dstate_in"));
        if (!from->of[i] || !is_sum) continue;
        if (!sums->of[i]) sums->of[i] = test_array(count, 0);
        for (int64_t j = 0; j < count; j++) sums->of[i][j] += from->of[i][j];
    }
}

static void check_sums(const test_runner *r, const test_case *c, gt_pass pass, const test_values *in,
                       const test_values *sums, const test_values *whole) {
    test_values magnitudes;
    if (pass != GT_BACKWARD) return;
    test_magnitudes(c, in, &magnitudes);
    test_compare(r, c, pass, sums, whole, &magnitudes);
    test_free(&magnitudes);
}

/* ---- pieces ---------------------------------------------------------------------------------- */

static void split_batch(const test_runner *r, const test_case *c, double tolerance) {
    char letter = is_recurrent(c) ? 'B' : 'M';
    test_case whole = with_accumulate(c, 0), one = whole;
    int64_t batch = test_get_size(c, letter);
    test_set_size(&one, letter, 1);
    for (int pass = GT_FORWARD; pass <= GT_BACKWARD; pass++) {
        test_values in, out, joined = {{NULL}}, sums = {{NULL}};
        test_inputs(&whole, (gt_pass)pass, &in);
        test_run(r, &whole, (gt_pass)pass, &in, TEST_ALL, &out);
        for (int64_t b = 0; b < batch; b++) {
            test_values part_in, part_out;
            test_cut(&whole, (gt_pass)pass, &in, letter, b, 1, &part_in);
            test_run(r, &one, (gt_pass)pass, &part_in, TEST_ALL, &part_out);
            test_paste(&one, &whole, (gt_pass)pass, &part_out, letter, b, &joined);
            add_part(&one, &part_out, letter, &sums);
            test_free(&part_in), test_free(&part_out);
        }
        test_same(r, &whole, (gt_pass)pass, "one by one", &joined, &out, tolerance);
        check_sums(r, &whole, (gt_pass)pass, &in, &sums, &out);
        test_free(&in), test_free(&out), test_free(&joined), test_free(&sums);
    }
}

/* Sequence s of a packed case, whose arrays are *in, as a batch of one: its case, and its arrays in
 * *alone. */
static test_case cut_sequence(const test_case *c, gt_pass pass, const test_values *in, int64_t s, test_values *alone) {
    int64_t first = test_sequence_at(c, in, s), n = test_sequence_at(c, in, s + 1) - first;
    test_case one = *c;
    test_values cut;
    test_cut(c, pass, in, 'T', first, n, &cut);
    test_set_size(&one, 'T', n);
    test_cut(&one, pass, &cut, 'B', s, 1, alone);
    test_set_array(alone, c, "cu_seqlens", NULL);
    test_set_array(alone, c, "seq_count", NULL);
    test_set_sequences(&one, 0, 0);
    test_free(&cut);
    return one;
}

/* Arrays of 0 for the outputs of *out that are no sums. */
static void make_joined(const test_case *c, gt_pass pass, const test_values *out, test_values *joined) {
    const gt_op *op = test_table(c);
    memset(joined, 0, sizeof *joined);
    for (int i = 0; op->tensors[i].name; i++)
        if (out->of[i] && (test_axis(c, &op->tensors[i], 'T') >= 0 || test_axis(c, &op->tensors[i], 'B') >= 0))
            joined->of[i] = test_array(test_count(c, pass, &op->tensors[i]), 0);
}

static void split_packed(const test_runner *r, const test_case *c, double tolerance) {
    test_case whole = with_accumulate(c, 0);
    for (int pass = GT_FORWARD; pass <= GT_BACKWARD; pass++) {
        test_values in, out, joined, sums = {{NULL}};
        test_inputs(&whole, (gt_pass)pass, &in);
        test_run(r, &whole, (gt_pass)pass, &in, TEST_ALL, &out);
        make_joined(&whole, (gt_pass)pass, &out, &joined);
        for (int64_t s = 0; s < test_sequences(&whole, &in); s++) {
            test_values one_in, one_out;
            test_case one = cut_sequence(&whole, (gt_pass)pass, &in, s, &one_in);
            test_run(r, &one, (gt_pass)pass, &one_in, TEST_ALL, &one_out);
            test_paste(&one, &whole, (gt_pass)pass, &one_out, 'T', test_sequence_at(c, &in, s), &joined);
            test_paste(&one, &whole, (gt_pass)pass, &one_out, 'B', s, &joined);
            add_part(&one, &one_out, 'B', &sums);
            test_free(&one_in), test_free(&one_out);
        }
        test_same(r, &whole, (gt_pass)pass, "each alone", &joined, &out, tolerance);
        check_sums(r, &whole, (gt_pass)pass, &in, &sums, &out);
        test_free(&in), test_free(&out), test_free(&joined), test_free(&sums);
    }
}

void test_batch_splits(const test_runner *r, const test_case *c, double tolerance) {
    (test_is_packed(c) ? split_packed : split_batch)(r, c, tolerance);
}

/* A shared state of each becomes one for every batch element. */
static void spread_states(const test_case *shared, const test_case *each, gt_pass pass, test_values *in) {
    const gt_tensor *t;
    for (int k = 0; (t = nth_tensor(shared, "state_in", k)); k++) {
        const int64_t n = test_count(shared, pass, t), count = test_count(each, pass, t);
        double *all = test_array(count, 0), *one = *test_array_of(in, shared, t->name);
        for (int64_t i = 0; i < count; i++) all[i] = one[i % n];
        test_set_array(in, shared, t->name, all);
    }
}

/* Takes the gradients of states out of *out_each, and adds them up over the batch. */
static void sum_states(const test_case *shared, const test_case *each, gt_pass pass, test_values *out_each,
                       test_values *sums) {
    const gt_tensor *t;
    for (int k = 0; (t = nth_tensor(shared, "dstate_in", k)); k++) {
        const int64_t n = test_count(shared, pass, t), count = test_count(each, pass, t);
        double *dstate = take_array(out_each, shared, t->name);
        if (!dstate) continue;
        test_set_array(sums, shared, t->name, test_array(n, 0));
        for (int64_t i = 0; i < count; i++) (*test_array_of(sums, shared, t->name))[i % n] += dstate[i];
        free(dstate);
    }
}

void test_shared_agrees(const test_runner *r, const test_case *c, double tolerance) {
    test_case shared = with_accumulate(c, 0), each;
    if (!is_recurrent(c) || lacks(c, "state_in")) return;
    each = shared;
    test_set_flag(&shared, test_table(c)->fields.state_in_shared, 1);
    test_set_flag(&each, test_table(c)->fields.state_in_shared, 0);
    for (int pass = GT_FORWARD; pass <= GT_BACKWARD; pass++) {
        test_values in, out_shared, out_each, sums = {{NULL}};
        test_inputs(&shared, (gt_pass)pass, &in);
        test_run(r, &shared, (gt_pass)pass, &in, TEST_ALL, &out_shared);
        spread_states(&shared, &each, (gt_pass)pass, &in);
        test_run(r, &each, (gt_pass)pass, &in, TEST_ALL, &out_each);
        sum_states(&shared, &each, (gt_pass)pass, &out_each, &sums);
        test_same(r, &shared, (gt_pass)pass, "a state for each", &out_shared, &out_each, tolerance);
        test_compare(r, &shared, (gt_pass)pass, &out_shared, &sums, NULL);
        test_free(&in), test_free(&out_shared), test_free(&out_each), test_free(&sums);
    }
}

/* A case cut in two along the time. */
typedef struct time_split {
    test_case whole, part[2];
    int64_t at[2];
} time_split;

static void join(const time_split *s, gt_pass pass, test_values out[2], test_values *joined) {
    memset(joined, 0, sizeof *joined);
    for (int k = 0; k < 2; k++) test_paste(&s->part[k], &s->whole, pass, &out[k], 'T', s->at[k], joined);
}

/* Moves every array of plain name `out_name` to the tensor beside it of name `in_name`. */
static void move_arrays(const test_case *c, test_values *from, const char *out_name, test_values *to,
                        const char *in_name) {
    const gt_op *op = test_table(c);
    const gt_tensor *t;
    for (int k = 0; (t = nth_tensor(c, out_name, k)); k++) {
        const gt_tensor *other = &op->tensors[test_beside(op, (int)(t - op->tensors), in_name)];
        test_set_array(to, c, other->name, take_array(from, c, t->name));
    }
}

/* Both parts forward; *handed_over gets the states between them. */
static void split_forward(const test_runner *r, const time_split *s, double tolerance, test_values *handed_over) {
    test_values in, whole, part_in[2], out[2], joined;
    test_inputs(&s->whole, GT_FORWARD, &in);
    test_run(r, &s->whole, GT_FORWARD, &in, TEST_ALL, &whole);
    for (int k = 0; k < 2; k++) {
        test_cut(&s->whole, GT_FORWARD, &in, 'T', s->at[k], test_get_size(&s->part[k], 'T'), &part_in[k]);
        if (k == 1) move_arrays(&s->whole, &out[0], "state_out", &part_in[1], "state_in");
        test_run(r, &s->part[k], GT_FORWARD, &part_in[k], TEST_ALL, &out[k]);
    }
    join(s, GT_FORWARD, out, &joined);
    move_arrays(&s->whole, &out[1], "state_out", &joined, "state_out");
    test_same(r, &s->whole, GT_FORWARD, "in two parts", &joined, &whole, tolerance);
    move_arrays(&s->whole, &part_in[1], "state_in", handed_over, "state_in");
    test_free(&in), test_free(&whole), test_free(&joined);
    for (int k = 0; k < 2; k++) test_free(&part_in[k]), test_free(&out[k]);
}

static void split_backward(const test_runner *r, const time_split *s, double tolerance, test_values *handed_over) {
    test_values in, whole, part_in[2], out[2], joined, sums = {{NULL}};
    test_inputs(&s->whole, GT_BACKWARD, &in);
    test_run(r, &s->whole, GT_BACKWARD, &in, TEST_ALL, &whole);
    for (int k = 1; k >= 0; k--) {
        test_cut(&s->whole, GT_BACKWARD, &in, 'T', s->at[k], test_get_size(&s->part[k], 'T'), &part_in[k]);
        if (k == 1) move_arrays(&s->whole, handed_over, "state_in", &part_in[1], "state_in");
        if (k == 0) move_arrays(&s->whole, &out[1], "dstate_in", &part_in[0], "dstate_out");
        test_run(r, &s->part[k], GT_BACKWARD, &part_in[k], TEST_ALL, &out[k]);
    }
    join(s, GT_BACKWARD, out, &joined);
    move_arrays(&s->whole, &out[0], "dstate_in", &joined, "dstate_in");
    for (int k = 0; k < 2; k++) add_part(&s->part[k], &out[k], 'T', &sums);
    test_same(r, &s->whole, GT_BACKWARD, "in two parts", &joined, &whole, tolerance);
    check_sums(r, &s->whole, GT_BACKWARD, &in, &sums, &whole);
    test_free(&in), test_free(&whole), test_free(&joined), test_free(&sums);
    for (int k = 0; k < 2; k++) test_free(&part_in[k]), test_free(&out[k]);
}

void test_time_splits(const test_runner *r, const test_case *c, int64_t at, double tolerance) {
    time_split s = {.whole = with_accumulate(c, 0), .at = {0, at}};
    test_values handed_over = {{NULL}};
    if (!is_recurrent(c) || test_is_packed(c) || at > test_get_size(c, 'T') || lacks(c, "state_out") ||
        lacks(c, "dstate_in"))
        return;
    s.part[0] = s.part[1] = s.whole;
    test_set_size(&s.part[0], 'T', at);
    test_set_size(&s.part[1], 'T', test_get_size(c, 'T') - at);
    test_set_flag(&s.part[1], test_table(c)->fields.state_in_shared, 0);
    split_forward(r, &s, tolerance, &handed_over);
    split_backward(r, &s, tolerance, &handed_over);
    test_free(&handed_over);
}

/* ---- pieces ---------------------------------------------------------------------------------- */

enum { MOST_PIECES = 8 };

/* A sequence in pieces that know nothing of each other.  The pieces' cases do not share a first state. */
typedef struct pieces {
    test_case whole, part[MOST_PIECES];
    int64_t count, at[MOST_PIECES + 1];
    double *decays; /* [count,...] */
} pieces;

/* In lengths that are odd, and some of which may be 0. */
static void cut_pieces(const test_case *c, int64_t count, pieces *p) {
    const int64_t T = test_get_size(c, 'T');
    memset(p, 0, sizeof *p);
    p->whole = with_accumulate(c, 0);
    p->count = count;
    for (int64_t k = 1; k <= count; k++) {
        p->at[k] = k == count ? T : T * k / count * (k % 2 ? 17 : 16) / 17;
        if (p->at[k] < p->at[k - 1]) p->at[k] = p->at[k - 1];
    }
    for (int64_t k = 0; k < count; k++) {
        p->part[k] = p->whole;
        test_set_size(&p->part[k], 'T', p->at[k + 1] - p->at[k]);
        test_set_flag(&p->part[k], test_table(c)->fields.state_in_shared, 0);
    }
}

/* Appends the k-th of `count` arrays to that of all. */
static void gather(double **all, const double *one, int64_t n, int64_t count, int64_t k) {
    if (!*all) *all = test_array(count * n, 0);
    memcpy(*all + k * n, one, (size_t)n * sizeof *one);
}

/* What every piece starts from, [count,...]; reverse: the gradient of what it ends with.  first: a state or gradient, or
 * NULL. */
static double *join_pieces(const test_runner *r, pieces *p, const double *first, int is_reverse) {
    const gt_pass pass = is_reverse ? GT_SEGMENT_BACKWARD : GT_SEGMENT;
    const gt_pass joins = is_reverse ? GT_JOIN_BACKWARD : GT_JOIN;
    test_case all = p->whole;
    test_values in, out, gathered = {{NULL}};
    double *starts;
    if (is_reverse) test_set_flag(&all, test_table(&all)->fields.state_in_shared, 0);
    test_inputs(&all, pass, &in);
    for (int64_t k = 0; k < p->count; k++) {
        const test_case *part = &p->part[k];
        const gt_tensor *state = test_tensor_of(part, is_reverse ? "dstate_in" : "state_out");
        const gt_tensor *decay = test_tensor_of(part, "decay_out");
        test_values part_in, made;
        test_cut(&all, pass, &in, 'T', p->at[k], p->at[k + 1] - p->at[k], &part_in);
        test_run(r, part, pass, &part_in, TEST_ALL, &made);
        gather(test_array_of(&gathered, part, "piece_states"), *test_array_of(&made, part, state->name),
               test_count(part, pass, state), p->count, k);
        if (!is_reverse)
            gather(&p->decays, *test_array_of(&made, part, "decay_out"), test_count(part, pass, decay), p->count, k);
        test_free(&part_in), test_free(&made);
    }
    test_set_pieces(&all, p->count);
    const gt_tensor *t = test_tensor_of(&all, is_reverse ? "dstate_out" : "state_in");
    if (first) gather(test_array_of(&gathered, &all, t->name), first, test_count(&all, joins, t), 1, 0);
    t = test_tensor_of(&all, "piece_decays");
    gather(test_array_of(&gathered, &all, t->name), p->decays, test_count(&all, joins, t), 1, 0);
    test_run(r, &all, joins, &gathered, TEST_ALL, &out);
    starts = take_array(&out, &all, "piece_starts");
    test_free(&in), test_free(&gathered), test_free(&out);
    return starts;
}

/* The k-th of the arrays of pieces. */
static double *piece_of(const pieces *p, const double *all, int64_t k) {
    const int64_t n = test_count(&p->part[0], GT_FORWARD, test_tensor_of(&p->whole, "state_out"));
    double *one = test_array(n, 0);
    memcpy(one, all + k * n, (size_t)n * sizeof *one);
    return one;
}

/* dstate_in of the whole from that of the first piece: a shared state has the sum over the batch. */
static double *first_gradient(const pieces *p, double *of_piece) {
    const gt_tensor *t = test_tensor_of(&p->whole, "dstate_in");
    const int64_t n = test_count(&p->whole, GT_BACKWARD, t), all = test_count(&p->part[0], GT_BACKWARD, t);
    if (!is_shared(&p->whole)) return of_piece;
    double *sum = test_array(n, 0);
    for (int64_t i = 0; i < all; i++) sum[i % n] += of_piece[i];
    free(of_piece);
    return sum;
}

void test_pieces_agree(const test_runner *r, const test_case *c, int64_t count) {
    pieces p;
    test_values in, truth, out, joined = {{NULL}}, sums = {{NULL}}, magnitudes;
    double *starts, *ends, *dstate_in = NULL;
    if (!test_table(c)->fields.pieces || test_is_packed(c) || !test_get_size(c, 'B') ||
        test_is_absent(c, test_tensor_of(c, "state_out")) || test_is_absent(c, test_tensor_of(c, "dstate_in")))
        return;
    cut_pieces(c, count, &p);
    test_inputs(&p.whole, GT_FORWARD, &in);
    starts = join_pieces(r, &p, *test_array_of(&in, c, "state_in"), 0);
    for (int64_t k = 0; k < count; k++) {
        test_values part_in;
        test_cut(&p.whole, GT_FORWARD, &in, 'T', p.at[k], p.at[k + 1] - p.at[k], &part_in);
        test_set_array(&part_in, c, "state_in", piece_of(&p, starts, k));
        test_run(r, &p.part[k], GT_FORWARD, &part_in, TEST_ALL, &out);
        test_paste(&p.part[k], &p.whole, GT_FORWARD, &out, 'T', p.at[k], &joined);
        if (k == count - 1) test_set_array(&joined, c, "state_out", take_array(&out, c, "state_out"));
        test_free(&part_in), test_free(&out);
    }
    test_run(&test_truth, &p.whole, GT_FORWARD, &in, TEST_ALL, &truth);
    test_compare(r, &p.whole, GT_FORWARD, &joined, &truth, NULL);
    test_free(&in), test_free(&truth), test_free(&joined);

    test_inputs(&p.whole, GT_BACKWARD, &in);
    ends = join_pieces(r, &p, *test_array_of(&in, c, "dstate_out"), 1);
    for (int64_t k = 0; k < count; k++) {
        test_values part_in;
        test_cut(&p.whole, GT_BACKWARD, &in, 'T', p.at[k], p.at[k + 1] - p.at[k], &part_in);
        test_set_array(&part_in, c, "state_in", piece_of(&p, starts, k));
        test_set_array(&part_in, c, "dstate_out", piece_of(&p, ends, k));
        test_run(r, &p.part[k], GT_BACKWARD, &part_in, TEST_ALL, &out);
        if (k == 0) dstate_in = first_gradient(&p, take_array(&out, c, "dstate_in"));
        test_paste(&p.part[k], &p.whole, GT_BACKWARD, &out, 'T', p.at[k], &joined);
        add_part(&p.part[k], &out, 'T', &sums);
        test_free(&part_in), test_free(&out);
    }
    test_set_array(&joined, c, "dstate_in", dstate_in);
    for (int i = 0; i < TEST_TENSORS; i++)
        if (sums.of[i] && !joined.of[i]) joined.of[i] = sums.of[i], sums.of[i] = NULL;
    test_run(&test_truth, &p.whole, GT_BACKWARD, &in, TEST_ALL, &truth);
    test_magnitudes(&p.whole, &in, &magnitudes);
    test_compare(r, &p.whole, GT_BACKWARD, &joined, &truth, &magnitudes);
    test_free(&in), test_free(&truth), test_free(&joined), test_free(&sums), test_free(&magnitudes);
    free(starts), free(ends), free(p.decays);
}

/* ---- step ------------------------------------------------------------------------------------ */

/* The pool row of batch element b, -1 = skipped. */
static int64_t row_of(const test_case *c, const test_values *in, int64_t rows, int64_t b) {
    const double *slots = in->of[test_find(test_table(c), "slots")];
    int64_t row = slots ? (int64_t)slots[b] : b;
    return row < rows ? row : -1;
}

void test_step_agrees(const test_runner *r, const test_case *c, double tolerance) {
    test_values in, in_forward, out, expected;
    int64_t size[4], batch, n = 1, y_count;
    double *pool, *state, *y;
    int rank;
    if (!test_has_pass(c, GT_STEP)) return;
    rank = test_shape(c, GT_STEP, test_tensor_of(c, "state_out"), size);
    for (int i = 1; i < rank; i++) n *= size[i];
    batch = test_get_size(c, 'B');
    test_inputs(c, GT_STEP, &in);
    test_inputs(c, GT_FORWARD, &in_forward);
    pool = *test_array_of(&in, c, "state_out");
    state = test_array(batch * n, 0);
    for (int64_t b = 0; b < batch; b++)
        if (row_of(c, &in, size[0], b) >= 0)
            memcpy(state + b * n, pool + row_of(c, &in, size[0], b) * n, (size_t)n * sizeof *state);
    test_set_array(&in_forward, c, "state_in", state);
    test_run(r, c, GT_FORWARD, &in_forward, TEST_ALL, &expected);

    /* what the step should leave: the pool with the rows that were used, zeros where skipped */
    state = take_array(&expected, c, "state_out");
    test_set_array(&expected, c, "state_out", test_array(size[0] * n, 0));
    memcpy(*test_array_of(&expected, c, "state_out"), pool, (size_t)(size[0] * n) * sizeof *pool);
    y = *test_array_of(&expected, c, "y");
    y_count = batch ? test_count(c, GT_STEP, test_tensor_of(c, "y")) / batch : 0;
    for (int64_t b = 0; b < batch; b++) {
        int64_t row = row_of(c, &in, size[0], b);
        if (row >= 0)
            memcpy(*test_array_of(&expected, c, "state_out") + row * n, state + b * n, (size_t)n * sizeof *state);
        else
            memset(y + b * y_count, 0, (size_t)y_count * sizeof *y);
    }
    free(state);
    test_run(r, c, GT_STEP, &in, TEST_ALL, &out);
    test_same(r, c, GT_STEP, "forward", &out, &expected, tolerance);
    test_free(&in), test_free(&in_forward), test_free(&out), test_free(&expected);
}

/* Batch element b as a batch of one.  Its state is row `row` of the pool, and its y goes into *joined. */
static void step_alone(const test_runner *r, const test_case *c, const test_values *in, int64_t b, int64_t most,
                       double *row, int64_t n, test_values *joined) {
    test_case one = *c;
    test_values cut, all, y = {{NULL}};
    const int64_t T = test_get_size(c, 'T');
    double *state = test_array(n, 0);
    memcpy(state, row, (size_t)n * sizeof *state);
    test_copy(c, GT_STEP, in, &cut);
    test_set_array(&cut, c, "slots", NULL);
    test_set_array(&cut, c, "state_out", NULL);
    test_cut(c, GT_STEP, &cut, 'B', b, 1, &all);
    test_set_slots(&one, 0);
    test_set_size(&one, 'B', 1);
    one.layout = c->layout == TEST_PACKED ? TEST_SHIFTED : TEST_PACKED;
    for (int64_t t = 0; t < T; t += most) {
        test_case few = one;
        test_values tokens, out;
        test_set_size(&few, 'T', T - t < most ? T - t : most);
        test_cut(&one, GT_STEP, &all, 'T', t, test_get_size(&few, 'T'), &tokens);
        test_set_array(&tokens, &few, "state_out", state);
        test_run(r, &few, GT_STEP, &tokens, TEST_ALL, &out);
        state = take_array(&out, &few, "state_out");
        test_paste(&few, &one, GT_STEP, &out, 'T', t, &y);
        test_free(&tokens), test_free(&out);
    }
    memcpy(row, state, (size_t)n * sizeof *state);
    test_paste(&one, c, GT_STEP, &y, 'B', b, joined);
    free(state);
    test_free(&cut), test_free(&all), test_free(&y);
}

void test_step_is_alone(const test_runner *r, const test_case *c, int64_t most) {
    test_values in, out, joined = {{NULL}};
    int64_t size[4], n = 1;
    double *pool;
    if (!test_has_pass(c, GT_STEP)) return;
    const int rank = test_shape(c, GT_STEP, test_tensor_of(c, "state_out"), size);
    for (int i = 1; i < rank; i++) n *= size[i];
    const int64_t count = test_count(c, GT_STEP, test_tensor_of(c, "y"));
    test_inputs(c, GT_STEP, &in);
    test_run(r, c, GT_STEP, &in, TEST_ALL, &out);
    pool = test_array(size[0] * n, 0);
    memcpy(pool, *test_array_of(&in, c, "state_out"), (size_t)(size[0] * n) * sizeof *pool);
    test_set_array(&joined, c, "state_out", pool);
    test_set_array(&joined, c, "y", test_array(count, 0));
    for (int64_t b = 0; b < test_get_size(c, 'B'); b++) {
        const int64_t row = row_of(c, &in, size[0], b);
        if (row >= 0) step_alone(r, c, &in, b, most, pool + row * n, n, &joined);
    }
    test_same(r, c, GT_STEP, "each alone", &joined, &out, 0);
    test_free(&in), test_free(&out), test_free(&joined);
}

/* A step of n tokens from token `at` on: y into *joined, the state into *state. */
static void take_step(const test_runner *r, const test_case *c, const test_values *all, int64_t at, int64_t n,
                      double **state, test_values *joined) {
    test_case step = *c;
    test_values in, out;
    test_cut(c, GT_FORWARD, all, 'T', at, n, &in);
    test_set_size(&step, 'T', n);
    test_set_array(&in, c, "state_in", NULL);
    test_set_array(&in, c, "state_out", *state);
    test_run(r, &step, GT_STEP, &in, TEST_ALL, &out);
    *state = take_array(&out, c, "state_out");
    test_paste(&step, c, GT_FORWARD, &out, 'T', at, joined);
    test_free(&in), test_free(&out);
}

void test_steps_agree(const test_runner *r, const test_case *c, int64_t at, int64_t most, double tolerance) {
    test_case whole = *c, prefill;
    int64_t T = test_get_size(c, 'T');
    test_values in, in_prefill, out, joined = {{NULL}}, expected;
    double *state;
    if (!is_recurrent(c) || test_is_packed(c) || at > T || test_get_flag(c, test_table(c)->fields.state_in_shared) ||
        test_is_absent(c, test_tensor_of(c, "state_out")))
        return;
    test_set_slots(&whole, 0);
    prefill = whole;
    test_set_size(&prefill, 'T', at);
    test_inputs(&whole, GT_FORWARD, &in);
    test_run(r, &whole, GT_FORWARD, &in, TEST_ALL, &expected);
    test_cut(&whole, GT_FORWARD, &in, 'T', 0, at, &in_prefill);
    test_run(r, &prefill, GT_FORWARD, &in_prefill, TEST_ALL, &out);
    test_paste(&prefill, &whole, GT_FORWARD, &out, 'T', 0, &joined);
    state = take_array(&out, c, "state_out");
    for (int64_t n; at < T; at += n) {
        n = T - at < most ? T - at : most;
        take_step(r, &whole, &in, at, n, &state, &joined);
    }
    test_set_array(&joined, c, "state_out", state);
    test_same(r, &whole, GT_FORWARD, "prefill and steps", &joined, &expected, tolerance);
    test_free(&in), test_free(&in_prefill), test_free(&out);
    test_free(&joined), test_free(&expected);
}

/* ---- numbers that are not finite ------------------------------------------------------------- */

/* The place of a NaN or infinity.  Of a tensor over rows, batch is the row and token the column. */
typedef struct spot {
    const gt_tensor *tensor;
    int64_t batch, token, head, element, of_heads;
    int64_t first, last; /* its sequence has the tokens first ... last-1 */
} spot;

static int has_tokens(const gt_tensor *t) { return !strncmp(t->shape, "BT", 2); }
static int is_activation(const gt_tensor *t) { return has_tokens(t) || t->shape[0] == 'M'; }

static void spoil(const test_case *c, gt_pass pass, const spot *s, double value, test_values *in) {
    int64_t size[4] = {1, 1, 1, 1};
    test_shape(c, pass, s->tensor, size);
    (*test_array_of(
        in, c, s->tensor->name))[((s->batch * size[1] + s->token) * size[2] + s->head) * size[3] + s->element] = value;
}

/* Whether a chunk of `reach` tokens holds both the token and the spot.  A convolution spreads either over W tokens. */
static int in_chunk_of(const test_case *c, const spot *s, int64_t token, int64_t reach) {
    const int64_t W = test_get_size(c, 'W'), after = W ? W - 1 : 0;
    const int64_t first = (s->token - s->first) / reach, last = (s->token + after - s->first) / reach;
    if (token + after < s->first || token >= s->last) return 0;
    return (token + after - s->first) / reach >= first && (token - s->first) / reach <= last;
}

/* Whether the kernels may change element j of a tensor where the twin does not: an element of the same sequence, chunk
 * and head, or of a group that shares the head's input.  A parameter's gradient is a sum over chunks. */
static int is_in_reach(const test_case *c, gt_pass pass, const gt_tensor *t, int64_t j, const spot *s, int64_t reach) {
    int64_t size[4] = {1, 1, 1, 1};
    test_shape(c, pass, t, size);
    const int is_sum = t->use[GT_BACKWARD] == 'g', at = is_sum ? 0 : 2;
    if (!reach) return 0;
    if (!strcmp(t->name, "conv_dstate_in")) return in_chunk_of(c, s, s->first, reach);
    if (!has_tokens(t) && !is_sum) return 0;
    const int64_t columns = is_sum ? size[1] * size[2] * size[3] : size[3], head = j / columns % size[at];
    const int64_t many = size[at] > s->of_heads ? size[at] : s->of_heads;
    const int64_t few = size[at] > s->of_heads ? s->of_heads : size[at];
    if (many % few == 0 && !test_get_size(c, 'W') && head * few / size[at] != s->head * few / s->of_heads) return 0;
    if (is_sum) return 1;
    if (j / columns / size[2] / size[1] != s->batch) return 0;
    return in_chunk_of(c, s, j / columns / size[2] % size[1], reach);
}

/* Whether the twin changes any channel of the token, or state, and head that element j belongs to.  A row of xBC holds x
 * of the heads, then B and C of the groups. */
static int changes_beside(const test_case *c, gt_pass pass, const gt_tensor *t, int64_t j, const double *a,
                          const double *b) {
    int64_t size[4] = {1, 1, 1, 1}, n = 1;
    const int rank = test_shape(c, pass, t, size);
    const int heads = has_tokens(t) ? 3 : rank > 2 ? 2 : 1;
    for (int i = heads; i < rank; i++) n *= size[i];
    int64_t first = j / n * n;
    if (has_tokens(t) && strstr(t->name, "xBC")) {
        const int64_t column = j % size[2], P = test_get_size(c, 'P'), of_x = P * test_get_size(c, 'H');
        const int64_t at = column < of_x ? 0 : of_x;
        n = at ? test_get_size(c, 'N') : P;
        first = j - (column - at) % n;
    }
    for (int64_t i = first; i < first + n; i++)
        if (memcmp(&a[i], &b[i], sizeof *a)) return 1;
    return 0;
}

/* Kernels of ssd bound decays, and in fp32 products of pairs, so that some infinity comes out as a large number. */
static int may_be_large(const test_case *c, const spot *s, double value) {
    if (!isinf(value) || !test_op_of(c->op)->bounds_pairs) return 0;
    return test_is(s->tensor, "dt") || test_dtype_of(c, s->tensor) == GT_F32;
}

static void check_spoilt(const test_runner *r, const test_case *c, gt_pass pass, const spot *s, double value,
                         const test_values *clean, const test_values *truth, const test_values *in, int64_t reach,
                         int may_vanish) {
    const gt_op *op = test_table(c);
    const double largest = may_be_large(c, s, value) ? 1e30 : DBL_MAX;
    test_values spoilt_in, bad, bad_truth, bad_twin;
    test_copy(c, pass, in, &spoilt_in);
    spoil(c, pass, s, value, &spoilt_in);
    test_run(&test_truth, c, pass, &spoilt_in, TEST_ALL, &bad_truth);
    test_run(&test_twin, c, pass, &spoilt_in, TEST_ALL, &bad_twin); /* its decays underflow where the kernels' do */
    if (test_run(r, c, pass, &spoilt_in, TEST_ALL, &bad)) {
        for (int i = 0; op->tensors[i].name; i++) {
            const gt_tensor *t = &op->tensors[i];
            const int64_t count = bad.of[i] ? test_count(c, pass, t) : 0;
            int64_t spread = -1, hidden = -1, spreads = 0, hiddens = 0;
            for (int64_t j = 0; j < count; j++) {
                const double a = bad.of[i][j], b = clean->of[i][j];
                const int is_lost = isfinite(a) && fabs(a) < largest;
                if (!may_vanish && is_lost && isfinite(truth->of[i][j]) && !isfinite(bad_twin.of[i][j])) {
                    hidden = hidden < 0 ? j : hidden, hiddens++;
                } else if (memcmp(&a, &b, sizeof a) && !is_in_reach(c, pass, t, j, s, reach) &&
                           !changes_beside(c, pass, t, j, bad_truth.of[i], truth->of[i])) {
                    spread = spread < 0 ? j : spread, spreads++;
                }
            }
            test_check(
                hidden < 0,
                "%s: %g in %s at token %lld of head %lld: %s of %s is %g at %lld, the twin's %g, and %lld others",
                test_describe(c, pass), value, s->tensor->name, (long long)s->token, (long long)s->head, t->name,
                r->name, hidden < 0 ? 0 : bad.of[i][hidden], (long long)hidden, hidden < 0 ? 0 : bad_twin.of[i][hidden],
                (long long)hiddens - 1);
            test_check(spread < 0, "%s: %g in %s at token %lld of head %lld changes %s of %s at %lld and %lld others",
                       test_describe(c, pass), value, s->tensor->name, (long long)s->token, (long long)s->head, t->name,
                       r->name, (long long)spread, (long long)spreads - 1);
        }
    }
    test_free(&spoilt_in), test_free(&bad), test_free(&bad_truth), test_free(&bad_twin);
}

/* The sequence of a token; 0 if the token belongs to none. */
static int find_sequence(const test_case *c, const test_values *in, spot *s) {
    s->first = 0, s->last = test_get_size(c, 'T');
    if (!is_recurrent(c)) return 1;
    if (!test_is_packed(c)) return s->token < s->last;
    for (int64_t q = 0; q < test_sequences(c, in); q++) {
        s->first = test_sequence_at(c, in, q), s->last = test_sequence_at(c, in, q + 1);
        if (s->first <= s->token && s->token < s->last) return 1;
    }
    return 0;
}

/* One pass; only: the number of the one input that is spoilt, -1 = each in its turn. */
static void check_nonfinite_pass(const test_runner *r, const test_case *c, gt_pass pass, int64_t at, int64_t reach,
                                 int only, int may_vanish) {
    const gt_op *op = test_table(c);
    test_values in, clean, truth;
    int turn = 0, inputs = 0;
    test_inputs(c, pass, &in);
    test_run(&test_truth, c, pass, &in, TEST_ALL, &truth);
    test_run(r, c, pass, &in, TEST_ALL, &clean);
    for (int i = 0; op->tensors[i].name; i++)
        inputs += in.of[i] && is_activation(&op->tensors[i]) && test_is_input(&op->tensors[i], pass);
    for (int i = 0; op->tensors[i].name; i++) {
        const gt_tensor *t = &op->tensors[i];
        const double value = ((uint64_t)i + c->seed) % 3 ? NAN : c->seed % 2 ? INFINITY : -INFINITY;
        int64_t size[4] = {1, 1, 1, 1};
        if (!in.of[i] || !is_activation(t) || !test_is_input(t, pass)) continue;
        if (!test_count(c, pass, t)) continue;
        if (only >= 0 && turn++ != only % inputs) continue;
        test_shape(c, pass, t, size);
        spot s = {t, size[0] - 1, has_tokens(t) ? at : size[1] / 3, size[2] / 2, size[3] / 3, size[2], 0, 0};
        if (find_sequence(c, &in, &s)) check_spoilt(r, c, pass, &s, value, &clean, &truth, &in, reach, may_vanish);
    }
    test_free(&in), test_free(&clean), test_free(&truth);
}

void test_nonfinite_stays(const test_runner *r, const test_case *c, const int64_t at[2], const int64_t reach[2],
                          int every, int may_vanish) {
    static const struct {
        gt_pass pass;
        int is_backward;
    } list[] = {{GT_FORWARD, 0}, {GT_BACKWARD, 1}, {GT_SEGMENT, 0}, {GT_SEGMENT_BACKWARD, 1}, {GT_STEP, 0}};
    enum { COUNT = sizeof list / sizeof list[0] };
    uint64_t count = 0;
    for (int i = 0; i < COUNT; i++) count += (uint64_t)test_has_pass(c, list[i].pass);
    for (uint64_t i = 0, turn = 0; i < COUNT; i++) {
        if (!test_has_pass(c, list[i].pass) || (turn++ != c->seed % count && !every)) continue;
        check_nonfinite_pass(r, c, list[i].pass, at[list[i].is_backward], reach[list[i].is_backward],
                             every ? -1 : (int)(c->seed / count % 64), may_vanish);
    }
}
