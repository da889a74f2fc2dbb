#include "gt_invariants.h"
#include "../gt/recurrence/rounding.h"
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int is_recurrent(const test_case *c) { return test_is_over_time(test_op_of(c->op)); }

static int is_shared(const test_case *c) { return test_get_flag(c, test_table(c)->fields.state_in_shared); }

/* The n-th tensor with this plain name, counted from 0, or NULL.  An operator that joins two operators has two tensors
 * with the plain name state_in. */
static const gt_tensor *nth_tensor(const test_case *c, const char *plain_name, int n) {
    for (const gt_tensor *t = test_table(c)->tensors; t->name; t++)
        if (test_is(t, plain_name) && n-- == 0) return t;
    return NULL;
}

/* Whether the case lacks a tensor of this plain name. */
static int lacks(const test_case *c, const char *plain_name) {
    const gt_tensor *t;
    for (int n = 0; (t = nth_tensor(c, plain_name, n)); n++)
        if (test_is_absent(c, t)) return 1;
    return 0;
}

/* Moves an array from *from to the caller.  *from holds NULL in its place. */
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

/* `other` is a case with tensors of the same shapes.  Every pass of `other` must give the bits of the same pass of `c`.
 * If `other` may run on other kernels, the caller sets within_tolerance: its results must then agree with the double
 * twin within the runner's tolerances. */
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
        /* if tensor i is no output, the call asks for the required outputs only */
        for (int i = 0; op->tensors[i].name; i++) {
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

/* A copy of the case with the given `accumulate`: whether parameter gradients add to their old contents. */
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
    /* with accumulate = 0, a call must not read the old contents of the gradients */
    for (int i = 0; op->tensors[i].name; i++)
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

/* Adds the gradients of a part of the case to *sums, if the gradient of the whole case is the sum over its parts.  This
 * holds for parameter gradients and, if the batch is cut, for the gradient of a shared state. */
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

/* ---- parts ----------------------------------------------------------------------------------- */

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

/* Cuts sequence s out of a packed case with the arrays *in.  Returns the case of this sequence alone, with batch size
 * 1; *alone receives the arrays of this case. */
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

/* Allocates zeroed arrays in *joined for all outputs of *out that are not sums over the parts. */
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

/* Gives every batch element its own copy of each shared state. */
static void spread_states(const test_case *shared, const test_case *each, gt_pass pass, test_values *in) {
    const gt_tensor *t;
    for (int k = 0; (t = nth_tensor(shared, "state_in", k)); k++) {
        const int64_t n = test_count(shared, pass, t), count = test_count(each, pass, t);
        double *all = test_array(count, 0), *one = *test_array_of(in, shared, t->name);
        for (int64_t i = 0; i < count; i++) all[i] = one[i % n];
        test_set_array(in, shared, t->name, all);
    }
}

/* Sums the gradients of first states over the batch into *sums, and removes them from *out_each. */
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

/* A case that is cut along the time into two parts. */
typedef struct time_split {
    test_case whole, part[2];
    int64_t at[2];
} time_split;

static void join(const time_split *s, gt_pass pass, test_values out[2], test_values *joined) {
    memset(joined, 0, sizeof *joined);
    for (int k = 0; k < 2; k++) test_paste(&s->part[k], &s->whole, pass, &out[k], 'T', s->at[k], joined);
}

/* Moves the array of every tensor with plain name `out_name` to the tensor `in_name` of the same struct. */
static void move_arrays(const test_case *c, test_values *from, const char *out_name, test_values *to,
                        const char *in_name) {
    const gt_op *op = test_table(c);
    const gt_tensor *t;
    for (int k = 0; (t = nth_tensor(c, out_name, k)); k++) {
        const gt_tensor *other = &op->tensors[test_beside(op, (int)(t - op->tensors), in_name)];
        test_set_array(to, c, other->name, take_array(from, c, t->name));
    }
}

/* Runs forward of both parts.  *handed_over receives the states at the cut. */
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

/* Cuts the case into two parts before token `at`.  Returns 0 if the case cannot be cut there. */
static int split_time(const test_case *c, int64_t at, time_split *s) {
    *s = (time_split){.whole = with_accumulate(c, 0), .at = {0, at}};
    if (!is_recurrent(c) || test_is_packed(c) || at > test_get_size(c, 'T') || lacks(c, "state_out") ||
        lacks(c, "dstate_in") || c->rounds_states)
        return 0;
    s->part[0] = s->part[1] = s->whole;
    test_set_size(&s->part[0], 'T', at);
    test_set_size(&s->part[1], 'T', test_get_size(c, 'T') - at);
    test_set_flag(&s->part[1], test_table(c)->fields.state_in_shared, 0);
    return 1;
}

void test_time_splits(const test_runner *r, const test_case *c, int64_t at, double tolerance) {
    time_split s;
    test_values handed_over = {{NULL}};
    if (!split_time(c, at, &s)) return;
    split_forward(r, &s, tolerance, &handed_over);
    split_backward(r, &s, tolerance, &handed_over);
    test_free(&handed_over);
}

void test_prefill_splits(const test_runner *r, const test_case *c, int64_t at) {
    time_split s;
    test_values handed_over = {{NULL}};
    if (!split_time(c, at, &s)) return;
    split_forward(r, &s, 0, &handed_over);
    test_free(&handed_over);
}

/* ---- independent pieces ---------------------------------------------------------------------- */

enum { MOST_PIECES = 8 };

/* A case that is cut along the time into independent pieces.  Even if the batch shares the first state, the batch
 * elements of a piece have separate states. */
typedef struct pieces {
    test_case whole, part[MOST_PIECES];
    int64_t count, at[MOST_PIECES + 1];
    double *decays; /* the pieces' products of decays, [count,...] */
} pieces;

/* Cuts the time into pieces of unequal lengths.  A length may be 0. */
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

/* Copies `one` to its place in *all: array k of `count` arrays of n numbers. */
static void gather(double **all, const double *one, int64_t n, int64_t count, int64_t k) {
    if (!*all) *all = test_array(count * n, 0);
    memcpy(*all + k * n, one, (size_t)n * sizeof *one);
}

/* Joins the pieces.  Returns the start state of every piece, [count,...].  With is_reverse it returns the gradient of
 * every piece's end state instead.  first: the state before the first piece or, with is_reverse, the gradient of the
 * state after the last piece; may be NULL. */
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

/* Copies the state of piece k from the states of all pieces. */
static double *piece_of(const pieces *p, const double *all, int64_t k) {
    const int64_t n = test_count(&p->part[0], GT_FORWARD, test_tensor_of(&p->whole, "state_out"));
    double *one = test_array(n, 0);
    memcpy(one, all + k * n, (size_t)n * sizeof *one);
    return one;
}

/* Makes dstate_in of the whole case from dstate_in of the first piece: the same array or, if the batch shares the first
 * state, the sum over the batch. */
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

/* ---- pools ----------------------------------------------------------------------------------- */

/* Layouts of a pool of states of packed sequences: see test_pools_agree. */
enum { POOL_PACKED, POOL_ALIGNED, POOL_STRIDED, POOL_KINDS };

typedef struct pool_context {
    const test_runner *inner;
    int kind;
} pool_context;

/* The pool's row for sequence s.  Every third sequence gets an index out of range, and thus no row. */
static int32_t pool_slot(int64_t s, int64_t rows) {
    if (s % 3 == 2) return s % 2 ? (int32_t)rows : INT32_MIN;
    return (int32_t)(rows - 1 - (s + 1) % rows);
}

static int is_without_row(int64_t s) { return s % 3 == 2; }
static int starts_from_zero(int64_t s) { return s % 4 == 1; }

/* The first and last states of one state tensor of a call.  The caller has them in packed arrays; run_in_pools moves
 * them to pools in a block of its own. */
typedef struct pool_states {
    const gt_tensor *in, *out;
    /* sizes of a state; strides of rows and of the state's indices, in elements; elements of a state */
    int64_t size[3], stride[4], numbers;
    char *from, *to; /* the caller's arrays of first and of last states, or NULL */
    /* byte offsets of the two pools in the block, equal if one pool serves both; bytes of a pool, of an element */
    size_t in_pool, out_pool, bytes, element;
} pool_states;

static char *pointer_at(const void *args, size_t offset) {
    char *p;
    memcpy(&p, (const char *)args + offset, sizeof p);
    return p;
}

static void put_pointer_at(void *args, size_t offset, const void *p) { memcpy((char *)args + offset, &p, sizeof p); }

/* The distance in elements from the start of the pool to element i of the state in `row`. */
static int64_t element_of(const pool_states *x, int64_t row, int64_t i) {
    const int64_t k = i % x->size[2], j = i / x->size[2] % x->size[1], at = i / x->size[2] / x->size[1];
    return row * x->stride[0] + at * x->stride[1] + j * x->stride[2] + k * x->stride[3];
}

/* Sets the sizes and strides in *x, and the strides in *args.  POOL_STRIDED also transposes a state [D,J] of conv1d. */
static void shape_pool(const gt_dims *dims, int kind, void *args, pool_states *x) {
    const char *shape = x->out->shape + 1;
    const int is_flat = !shape[2];
    for (int i = 0; i < 3; i++) x->size[i] = i == 2 && is_flat ? 1 : dims->n[shape[i] - 'A'];
    x->numbers = x->size[0] * x->size[1] * x->size[2];
    x->stride[3] = 1, x->stride[2] = x->size[2], x->stride[1] = x->size[1] * x->size[2];
    x->stride[0] = kind == POOL_PACKED    ? x->numbers
                   : kind == POOL_ALIGNED ? (x->numbers + 3) / 4 * 4 + 4
                                          : (x->numbers | 1) + 2;
    const int is_transposed = kind == POOL_STRIDED && gt_stride_count(x->out) == 3;
    if (is_transposed) x->stride[1] = 1, x->stride[2] = x->size[0];
    if (kind != POOL_PACKED)
        memcpy((char *)args + x->out->stride_offset, x->stride, gt_stride_count(x->out) * sizeof x->stride[0]);
}

static void fill_pool(const pool_states *x, char *block, const int32_t *slots, const int32_t *zeros, int64_t count) {
    const int64_t element = (int64_t)x->element;
    memset(block + x->in_pool, 0xff, x->bytes); /* NaN, in rows that no kernel may read */
    memset(block + x->out_pool, 0xff, x->bytes);
    for (int64_t s = 0; x->from && s < count; s++)
        for (int64_t i = 0; !is_without_row(s) && !zeros[s] && i < x->numbers; i++)
            memcpy(block + x->in_pool + element_of(x, slots[s], i) * element, x->from + (s * x->numbers + i) * element,
                   (size_t)element);
}

/* Copies the last states from the pool to the caller.  Returns whether the call left all other bytes of the pools as
 * they are in `before`, a copy of the pools from before the call. */
static int empty_pool(const pool_states *x, char *block, char *before, const int32_t *slots, int64_t count) {
    const int64_t element = (int64_t)x->element;
    for (int64_t s = 0; x->to && s < count; s++)
        for (int64_t i = 0; i < x->numbers; i++) {
            char *const to = x->to + (s * x->numbers + i) * element;
            memset(to, 0, (size_t)element);
            if (is_without_row(s)) continue;
            const size_t at = x->out_pool + (size_t)(element_of(x, slots[s], i) * element);
            memcpy(to, block + at, (size_t)element);
            memcpy(before + at, block + at, (size_t)element);
        }
    return !memcmp(block + x->in_pool, before + x->in_pool, x->bytes) &&
           !memcmp(block + x->out_pool, before + x->out_pool, x->bytes);
}

static size_t take_bytes(size_t *used, size_t bytes, size_t shift) {
    const size_t at = (*used + 255) / 256 * 256 + shift;
    *used = at + bytes;
    return at;
}

/* Runs forward of packed sequences through the inner runner, with the states in pools.  The caller's memory then holds
 * the results of a call without pools, except that states of sequences without a pool row are zeros. */
static gt_status run_in_pools(const test_runner *r, const test_op *top, gt_pass pass, const void *args, char *memory,
                              size_t bytes) {
    const pool_context *context = (const pool_context *)r->context;
    const gt_op *op = top->table();
    pool_states states[2];
    test_args pooled, filled;
    gt_dims dims;
    size_t used = bytes, slots_at, zeros_at;
    int64_t capacity, count;
    int pairs = 0, is_intact = 1;
    gt_status status = gt_prepare(op, GT_QUERY, GT_HOST, args, &filled, &dims);
    if (status != GT_OK || pass != GT_FORWARD) return status;
    memcpy(&pooled, args, op->args_bytes);
    memcpy(&capacity, (const char *)args + op->fields.seq_capacity, sizeof capacity);
    const char *of_count = pointer_at(args, op->tensors[test_find(op, "seq_count")].offset);
    int32_t given;
    if (of_count) memcpy(&given, of_count, sizeof given);
    count = of_count ? given : capacity;
    const int64_t rows = capacity + 3;
    memcpy((char *)&pooled + op->fields.slot_capacity, &rows, sizeof rows);
    slots_at = take_bytes(&used, (size_t)capacity * sizeof(int32_t), 4);
    zeros_at = take_bytes(&used, (size_t)capacity * sizeof(int32_t), 4);
    for (const gt_tensor *t = op->tensors; t->name; t++) {
        if (t->shape[0] != 'Q' || gt_use(t, pass) == '-') continue;
        pool_states *x = &states[pairs++];
        x->out = t, x->in = &op->tensors[test_find(op, t->may_equal)];
        x->from = pointer_at(args, x->in->offset), x->to = pointer_at(args, t->offset);
        shape_pool(&dims, context->kind, &pooled, x);
        gt_dtype dtype = GT_F32;
        if (gt_dtype_field(op, t)) memcpy(&dtype, (const char *)args + gt_dtype_field(op, t), sizeof dtype);
        x->element = r->is_double ? 8 : dtype > GT_F32 ? 2 : 4;
        x->bytes = (size_t)((rows - 1) * x->stride[0] + x->numbers) * x->element;
        const char *const like = x->to ? x->to : x->from ? x->from : memory;
        x->out_pool = x->in_pool = take_bytes(&used, x->bytes, (size_t)(like - memory) % 256);
        if (context->kind == POOL_ALIGNED) x->in_pool = take_bytes(&used, x->bytes, (size_t)(like - memory) % 256);
    }
    used = (used + 255) / 256 * 256;
    char *const block = (char *)aligned_alloc(256, used), *const before = (char *)malloc(used);
    if (!block || !before) exit(2);
    memset(block, 0, used);
    memcpy(block, memory, bytes);
    int32_t *const slots = (int32_t *)(block + slots_at), *const zeros = (int32_t *)(block + zeros_at);
    for (int64_t s = 0; s < capacity; s++)
        slots[s] = s < count ? pool_slot(s, rows) : 0, zeros[s] = s < count && starts_from_zero(s);
    test_relocate(op, &pooled, memory, bytes, block);
    put_pointer_at(&pooled, op->tensors[test_find(op, "slots")].offset, slots);
    put_pointer_at(&pooled, op->tensors[test_find(op, "starts_zero")].offset, zeros);
    for (int i = 0; i < pairs; i++) {
        const pool_states *x = &states[i];
        fill_pool(x, block, slots, zeros, count);
        put_pointer_at(&pooled, x->in->offset, x->from ? block + x->in_pool : NULL);
        put_pointer_at(&pooled, x->out->offset, x->to ? block + x->out_pool : NULL);
    }
    memcpy(before, block, used);
    status = context->inner->run(context->inner, top, pass, &pooled, block, used);
    memcpy(memory, block, bytes);
    for (int i = 0; i < pairs; i++) is_intact &= empty_pool(&states[i], block, before, slots, count);
    free(block), free(before);
    return status != GT_OK || is_intact ? status
                                        : gt_fail(GT_ERROR_VALUE, "wrote to another row of a pool, or between rows");
}

/* Sets expected outputs of sequences without a pool row to 0, as forward does. */
static void clear_without_row(const test_case *c, const test_values *in, test_values *out) {
    const gt_op *op = test_table(c);
    for (int i = 0; op->tensors[i].name; i++) {
        const gt_tensor *t = &op->tensors[i];
        int64_t size[4];
        test_shape(c, GT_FORWARD, t, size);
        const int64_t count = test_count(c, GT_FORWARD, t), rows = t->shape[0] == 'Q' ? size[0] : size[1];
        for (int64_t s = 0; out->of[i] && count && s < test_sequences(c, in); s++) {
            const int64_t first = t->shape[0] == 'Q' ? s : test_sequence_at(c, in, s);
            const int64_t end = t->shape[0] == 'Q' ? s + 1 : test_sequence_at(c, in, s + 1);
            for (int64_t k = first * (count / rows); is_without_row(s) && k < end * (count / rows); k++)
                out->of[i][k] = 0;
        }
    }
}

/* Sets the first states of sequences to 0 where starts_zero is set. */
static void clear_starts(const test_case *c, test_values *in) {
    const gt_op *op = test_table(c);
    for (int i = 0; op->tensors[i].name; i++) {
        const int64_t count = test_count(c, GT_FORWARD, &op->tensors[i]);
        int64_t size[4];
        test_shape(c, GT_FORWARD, &op->tensors[i], size);
        for (int64_t k = 0; op->tensors[i].shape[0] == 'S' && in->of[i] && k < count; k++)
            if (starts_from_zero(k / (count / size[0]))) in->of[i][k] = 0;
    }
}

void test_pools_agree(const test_runner *r, const test_case *c, int kind) {
    test_values in, got, expected;
    if (!test_is_packed(c) || test_find(test_table(c), "starts_zero") < 0 || is_shared(c)) return;
    pool_context context = {r, kind % POOL_KINDS};
    test_runner pools = *r;
    pools.run = run_in_pools, pools.context = &context;
    test_inputs(c, GT_FORWARD, &in);
    test_run(&pools, c, GT_FORWARD, &in, TEST_ALL, &got);
    clear_starts(c, &in);
    const int is_other = context.kind == POOL_STRIDED; /* with strided rows, other kernels may run the call */
    test_run(is_other ? &test_truth : r, c, GT_FORWARD, &in, TEST_ALL, &expected);
    clear_without_row(c, &in, &expected);
    if (is_other)
        test_compare(r, c, GT_FORWARD, &got, &expected, NULL);
    else
        test_same(r, c, GT_FORWARD, "states in rows of their own", &got, &expected, 0);
    test_free(&in), test_free(&got), test_free(&expected);
}

/* ---- states of 16 bits in forward ------------------------------------------------------------ */

/* Rounds last states of a forward pass to their dtype, as rounding.h describes.  in: seed and steps of stochastic
 * rounding, or none.  States of a convolution are rounded to nearest. */
static void round_states(const test_case *c, const test_values *in, const gt_tensor *t, double *states) {
    const gt_op *op = test_table(c);
    const gt_dtype dtype = test_dtype_of(c, t);
    const int seed_at = t->kind == 'c' ? -1 : test_find(op, "rounding_seed"); /* conv1d has no such tensor */
    const double *given = seed_at < 0 ? NULL : in->of[seed_at];
    const double *steps = seed_at < 0 ? NULL : in->of[test_find(op, "rounding_steps")];
    int64_t size[4];
    const int rank = test_shape(c, GT_FORWARD, t, size);
    const int64_t columns = size[rank - 1], count = test_count(c, GT_FORWARD, t), n = size[0] ? count / size[0] : 0;
    for (int64_t i = 0; i < count && dtype != GT_F32; i++) {
        if (!given) {
            states[i] = test_round(states[i], dtype);
            continue;
        }
        const int32_t seed[2] = {(int32_t)given[0], (int32_t)given[1]};
        const int64_t row = i % n / columns, column = i % columns, group = row * gt_row_groups(columns) + column / 4;
        const gt_random r = gt_random_of_group(seed, (int32_t)steps[i / n], group);
        const float x = (float)states[i];
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        const uint32_t half = gt_round_to_half(bits, r.word[column % 4], dtype);
        states[i] = dtype == GT_BF16 ? gt_bf16_to_f32((uint16_t)half) : gt_f16_to_f32((uint16_t)half);
    }
}

static void check_small_states(const test_runner *r, const test_case *c, int kind) {
    static const char *const arrays[] = {"rounding_seed", "rounding_steps"};
    const gt_op *op = test_table(c);
    const size_t of_conv = op->of_steps.conv_state;
    const gt_dtype dtype = of_conv && kind % 8 == 3 ? GT_F32 : kind % 2 ? GT_BF16 : GT_F16;
    const gt_dtype conv_dtype = (gt_dtype)(GT_F32 + (dtype == GT_F32 ? 1 + kind % 2 : kind % 3));
    const int has_pool = kind / 4 % 2 && test_is_packed(c) && test_find(op, "starts_zero") >= 0 && !is_shared(c);
    const int has_rounding = test_find(op, "rounding_seed") >= 0 && dtype != GT_F32;
    test_case small = *c, wide = *c;
    test_values in, rounding = {{NULL}}, got, expected;
    pool_context context = {r, kind / 8 % POOL_KINDS};
    test_runner pools = *r;
    if (op->of_steps.passes == GT_STATES_OF_STEP) return;
    pools.run = run_in_pools, pools.context = &context;
    test_set_flag(&small, op->of_steps.state, dtype);
    if (of_conv) test_set_flag(&small, of_conv, conv_dtype);
    /* with B = 0, the array of steps is empty and its pointer NULL, so the call cannot ask for stochastic rounding */
    small.drafts = has_rounding && kind / 2 % 2 && test_get_size(c, 'B') ? TEST_ROUNDING : 0;
    test_inputs(&small, GT_FORWARD, &in);
    test_run(has_pool ? &pools : r, &small, GT_FORWARD, &in, TEST_ALL, &got);
    for (int i = 0; has_rounding && i < 2; i++) test_set_array(&rounding, c, arrays[i], take_array(&in, c, arrays[i]));
    test_set_flag(&wide, op->of_steps.state, GT_F32);
    if (of_conv) test_set_flag(&wide, of_conv, GT_F32);
    wide.drafts = 0;
    if (has_pool) clear_starts(c, &in);
    test_run(r, &wide, GT_FORWARD, &in, TEST_ALL, &expected);
    for (int i = 0; op->tensors[i].name; i++)
        if (op->tensors[i].shape[0] == 'Q' && expected.of[i] && gt_use(&op->tensors[i], GT_FORWARD) != '-')
            round_states(&small, &rounding, &op->tensors[i], expected.of[i]);
    if (has_pool) clear_without_row(c, &in, &expected);
    test_same(r, &small, GT_FORWARD, "forward with fp32 states, rounded", &got, &expected, 0);
    test_free(&in), test_free(&rounding), test_free(&got), test_free(&expected);
}

/* Checks the case.  If it is packed, also checks a call with room for one sequence, but without a sequence: this call
 * may write no state. */
void test_small_states_agree(const test_runner *r, const test_case *c, int kind) {
    const int64_t capacity = 1;
    test_case none = *c;
    check_small_states(r, c, kind);
    if (!test_is_packed(c) || lacks(c, "seq_count")) return;
    memcpy((char *)&none.args + test_table(c)->fields.seq_capacity, &capacity, sizeof capacity);
    none.packed.count = 0, none.packed.lengths = NULL;
    check_small_states(r, &none, kind);
}

/* ---- snapshots ------------------------------------------------------------------------------- */

/* An element of an output that the pass did not write: all of its bits are set. */
static double unwritten(gt_dtype dtype, int is_double) {
    double number;
    memset(&number, 0xff, sizeof number);
    if (is_double) return number;
    return dtype == GT_BF16  ? gt_bf16_to_f32(0xffff)
           : dtype == GT_F16 ? gt_f16_to_f32(0xffff)
                             : gt_bits_float(0xffffffffu);
}

/* Runs forward on the first `tokens` tokens of sequence s.  Copies the last states, rounded, to a row of the expected
 * snapshots.  without: the case without snapshots. */
static void expect_snapshot(const test_runner *r, const test_case *with, const test_case *without,
                            const test_values *in, int64_t s, int64_t tokens, int64_t row, test_values *expected) {
    const gt_op *op = test_table(without);
    test_case one = *without;
    test_values alone, prefix, out;
    if (test_is_packed(without))
        one = cut_sequence(without, GT_FORWARD, in, s, &alone);
    else
        test_cut(without, GT_FORWARD, in, 'B', s, 1, &alone), test_set_size(&one, 'B', 1);
    test_cut(&one, GT_FORWARD, &alone, 'T', 0, tokens, &prefix);
    test_set_size(&one, 'T', tokens);
    test_run(r, &one, GT_FORWARD, &prefix, TEST_ALL, &out);
    for (int i = 0; op->tensors[i].name; i++) {
        if (!test_is(&op->tensors[i], "snapshots")) continue;
        const int state = test_beside(op, i, "state_out");
        const int64_t size = test_count(&one, GT_FORWARD, &op->tensors[state]);
        const gt_dtype dtype = test_dtype_of(with, &op->tensors[i]);
        for (int64_t k = 0; expected->of[i] && k < size; k++)
            expected->of[i][row * size + k] = r->is_double ? out.of[state][k] : test_round(out.of[state][k], dtype);
    }
    test_free(&alone), test_free(&prefix), test_free(&out);
}

void test_suit_snapshots(test_case *c, int64_t B) {
    static const int64_t lengths[] = {130, 0, 128, 1}, segments = 1;
    test_set_size(c, 'B', B ? B : 1);
    test_set_size(c, 'T', B ? 257 : 261);
    test_set_sequences(c, B ? 0 : 4, B ? 0 : lacks(c, "seq_count") ? 4 : 5);
    if (!B) c->packed.lengths = lengths;
    memcpy((char *)&c->args + test_table(c)->fields.segments, &segments, sizeof segments);
}

void test_snapshots_agree(const test_runner *r, const test_case *c, int kind, double tolerance) {
    const gt_op *op = test_table(c);
    const gt_dtype dtype = (gt_dtype)(GT_F32 + kind % 3);
    const int64_t every = GT_SNAPSHOT_TOKENS * (1 + kind / 3 % 2), T = test_get_size(c, 'T');
    const int has_pool = kind / 6 % 2 && test_is_packed(c) && !is_shared(c);
    test_case with = *c;
    test_values in, got, expected, none = {{NULL}};
    pool_context context = {r, POOL_ALIGNED};
    test_runner pools = *r;
    if (!op->of_steps.snapshot || lacks(c, "state_out")) return;
    pools.run = run_in_pools, pools.context = &context;
    memcpy((char *)&with.args + op->of_steps.snapshot_every, &every, sizeof every);
    test_set_flag(&with, op->of_steps.snapshot, dtype);
    if (op->of_steps.conv_state) test_set_flag(&with, op->of_steps.conv_state, GT_F32 + kind / 2 % 3);
    test_inputs(&with, GT_FORWARD, &in);
    test_run(has_pool ? &pools : r, &with, GT_FORWARD, &in, TEST_ALL, &got);
    if (has_pool) clear_starts(c, &in);
    test_run(r, c, GT_FORWARD, &in, TEST_ALL, &expected);
    const int conv_state = test_find(op, "conv_state_out");
    if (conv_state >= 0 && expected.of[conv_state])
        round_states(&with, &none, &op->tensors[conv_state], expected.of[conv_state]);
    if (has_pool) clear_without_row(c, &in, &expected);
    for (int i = 0; op->tensors[i].name; i++) {
        if (!test_is(&op->tensors[i], "snapshots")) continue;
        free(expected.of[i]);
        expected.of[i] = test_array(test_count(&with, GT_FORWARD, &op->tensors[i]),
                                    unwritten(test_dtype_of(&with, &op->tensors[i]), r->is_double));
    }
    const int64_t count = test_is_packed(c) ? test_sequences(c, &in) : test_get_size(c, 'B');
    for (int64_t s = 0; s < count; s++) {
        const int64_t first = test_is_packed(c) ? test_sequence_at(c, &in, s) : 0;
        const int64_t end = test_is_packed(c) ? test_sequence_at(c, &in, s + 1) : T;
        const int64_t row = test_is_packed(c) ? first / every : s * (T / every);
        for (int64_t i = 0; (i + 1) * every <= end - first && !(has_pool && is_without_row(s)); i++)
            expect_snapshot(r, &with, c, &in, s, (i + 1) * every, row + i, &expected);
    }
    test_same(r, &with, GT_FORWARD, "calls on prefixes", &got, &expected, tolerance);
    test_free(&in), test_free(&got), test_free(&expected);
}

/* ---- step ------------------------------------------------------------------------------------ */

static test_case without_drafts(const test_case *c) {
    test_case all_tokens = *c;
    all_tokens.drafts &= TEST_ROUNDING;
    return all_tokens;
}

/* The n-th tensor that a step updates in place: a state, or the scales of int8 states. */
static const gt_tensor *nth_state(const test_case *c, int n) {
    const gt_tensor *t = test_table(c)->tensors;
    for (; t->name; t++)
        if (gt_use(t, GT_STEP) == 's' && !test_is_absent(c, t) && n-- == 0) return t;
    return NULL;
}

/* The pool row of batch element b; -1 if the step skips the element. */
static int64_t row_of(const test_case *c, const test_values *in, int64_t rows, int64_t b) {
    const double *slots = in->of[test_find(test_table(c), "slots")];
    int64_t row = slots ? (int64_t)slots[b] : b;
    return row < rows ? row : -1;
}

/* Returns the number of elements of one state.  *rows receives the number of states in the pool. */
static int64_t state_size(const test_case *c, const gt_tensor *state, int64_t *rows) {
    int64_t size[4], n = 1;
    const int rank = test_shape(c, GT_STEP, state, size);
    for (int i = 1; i < rank; i++) n *= size[i];
    *rows = size[0];
    return n;
}

/* The name of the first state (state_in) that belongs to the last state `out` (state_out). */
static const char *start_of(const test_case *c, const gt_tensor *out) {
    const gt_op *op = test_table(c);
    return op->tensors[test_beside(op, (int)(out - op->tensors), "state_in")].name;
}

/* Replaces forward's last states in *expected by the pool that a step must leave.  This is the old pool with forward's
 * last states in the rows that the step uses. */
static void expect_pool(const test_case *c, const test_values *in, const gt_tensor *t, test_values *expected) {
    int64_t rows;
    const int64_t n = state_size(c, t, &rows), batch = test_get_size(c, 'B');
    double *state = take_array(expected, c, t->name), *pool = test_array(rows * n, 0);
    memcpy(pool, in->of[t - test_table(c)->tensors], (size_t)(rows * n) * sizeof *pool);
    for (int64_t b = 0; b < batch; b++) {
        const int64_t row = row_of(c, in, rows, b);
        if (row >= 0) memcpy(pool + row * n, state + b * n, (size_t)n * sizeof *state);
    }
    free(state);
    test_set_array(expected, c, t->name, pool);
}

/* The n-th output over tokens that a step of the case writes: y of each operator and, in a mixed call, the sum. */
static const gt_tensor *nth_output(const test_case *c, int n) {
    for (const gt_tensor *t = test_table(c)->tensors; t->name; t++)
        if (strchr("Oo", gt_use(t, GT_STEP)) && !strncmp(t->shape, "BT", 2) && !test_is_absent(c, t) && n-- == 0)
            return t;
    return NULL;
}

/* Sets an output of skipped batch elements to 0, as the step does. */
static void clear_skipped(const test_case *c, const test_values *in, const gt_tensor *t, test_values *expected) {
    const int64_t batch = test_get_size(c, 'B'), n = batch ? test_count(c, GT_STEP, t) / batch : 0;
    int64_t rows;
    state_size(c, nth_tensor(c, "state_out", 0), &rows);
    for (int64_t b = 0; b < batch; b++)
        if (row_of(c, in, rows, b) < 0)
            memset(expected->of[t - test_table(c)->tensors] + b * n, 0, (size_t)n * sizeof(double));
}

void test_step_agrees(const test_runner *r, const test_case *drafts, double tolerance) {
    const test_case all_tokens = without_drafts(drafts), *const c = &all_tokens;
    test_values in, in_forward, out, expected;
    const gt_tensor *t;
    if (!test_has_pass(c, GT_STEP)) return;
    test_inputs(c, GT_STEP, &in);
    test_copy(c, GT_STEP, &in, &in_forward);
    test_set_array(&in_forward, c, "slots", NULL);
    for (int k = 0; (t = nth_tensor(c, "state_out", k)); k++) {
        test_set_array(&in_forward, c, t->name, NULL);
        int64_t rows;
        const int64_t n = state_size(c, t, &rows), batch = test_get_size(c, 'B');
        const double *pool = *test_array_of(&in, c, t->name);
        double *state = test_array(batch * n, 0);
        for (int64_t b = 0; b < batch; b++) {
            const int64_t row = row_of(c, &in, rows, b);
            if (row >= 0) memcpy(state + b * n, pool + row * n, (size_t)n * sizeof *state);
        }
        test_set_array(&in_forward, c, start_of(c, t), state);
    }
    test_run(r, c, GT_FORWARD, &in_forward, TEST_ALL, &expected);
    for (int k = 0; (t = nth_tensor(c, "state_out", k)); k++) expect_pool(c, &in, t, &expected);
    for (int k = 0; (t = nth_output(c, k)); k++) clear_skipped(c, &in, t, &expected);
    test_run(r, c, GT_STEP, &in, TEST_ALL, &out);
    test_same(r, c, GT_STEP, "forward", &out, &expected, tolerance);
    test_free(&in), test_free(&in_forward), test_free(&out), test_free(&expected);
}

/* Runs batch element b as a batch of one, in steps of at most `most` tokens.  Updates row `row` of the pools in
 * *joined, and writes the element's y to *joined. */
static void step_alone(const test_runner *r, const test_case *c, const test_values *in, int64_t b, int64_t row,
                       int64_t most, test_values *joined) {
    test_case one = *c;
    test_values cut, all, y = {{NULL}}, states = {{NULL}};
    const int64_t T = test_get_size(c, 'T');
    const gt_tensor *t;
    int64_t rows;
    test_copy(c, GT_STEP, in, &cut);
    test_set_array(&cut, c, "slots", NULL);
    for (int k = 0; (t = nth_state(c, k)); k++) {
        const int64_t n = state_size(c, t, &rows);
        test_set_array(&cut, c, t->name, NULL);
        test_set_array(&states, c, t->name, test_array(n, 0));
        memcpy(*test_array_of(&states, c, t->name), *test_array_of(joined, c, t->name) + row * n,
               (size_t)n * sizeof(double));
    }
    test_cut(c, GT_STEP, &cut, 'B', b, 1, &all);
    test_set_slots(&one, 0);
    test_set_size(&one, 'B', 1);
    one.layout = c->layout == TEST_PACKED ? TEST_SHIFTED : TEST_PACKED;
    for (int64_t at = 0; at < T; at += most) {
        test_case few = one;
        test_values tokens, out;
        test_set_size(&few, 'T', T - at < most ? T - at : most);
        test_cut(&one, GT_STEP, &all, 'T', at, test_get_size(&few, 'T'), &tokens);
        for (int k = 0; (t = nth_state(c, k)); k++)
            test_set_array(&tokens, &few, t->name, take_array(&states, c, t->name));
        test_run(r, &few, GT_STEP, &tokens, TEST_ALL, &out);
        for (int k = 0; (t = nth_state(c, k)); k++)
            test_set_array(&states, c, t->name, take_array(&out, &few, t->name));
        test_paste(&few, &one, GT_STEP, &out, 'T', at, &y);
        test_free(&tokens), test_free(&out);
    }
    for (int k = 0; (t = nth_state(c, k)); k++) {
        const int64_t n = state_size(c, t, &rows);
        memcpy(*test_array_of(joined, c, t->name) + row * n, *test_array_of(&states, c, t->name),
               (size_t)n * sizeof(double));
    }
    test_paste(&one, c, GT_STEP, &y, 'B', b, joined);
    test_free(&cut), test_free(&all), test_free(&y), test_free(&states);
}

void test_step_is_alone(const test_runner *r, const test_case *drafts, int64_t most) {
    const test_case all_tokens = without_drafts(drafts), *const c = &all_tokens;
    test_values in, out, joined = {{NULL}};
    const gt_tensor *t;
    int64_t rows = 0;
    if (!test_has_pass(c, GT_STEP)) return;
    test_inputs(c, GT_STEP, &in);
    test_run(r, c, GT_STEP, &in, TEST_ALL, &out);
    for (int k = 0; (t = nth_state(c, k)); k++) {
        const int64_t count = state_size(c, t, &rows) * rows;
        test_set_array(&joined, c, t->name, test_array(count, 0));
        memcpy(*test_array_of(&joined, c, t->name), *test_array_of(&in, c, t->name), (size_t)count * sizeof(double));
    }
    for (int k = 0; (t = nth_output(c, k)); k++)
        test_set_array(&joined, c, t->name, test_array(test_count(c, GT_STEP, t), 0));
    for (int64_t b = 0; b < test_get_size(c, 'B'); b++) {
        const int64_t row = row_of(c, &in, rows, b);
        if (row >= 0) step_alone(r, c, &in, b, row, most, &joined);
    }
    test_same(r, c, GT_STEP, "each alone", &joined, &out, 0);
    test_free(&in), test_free(&out), test_free(&joined);
}

static void fill_array(test_values *in, const test_case *c, const char *tensor, double value) {
    const int64_t count = test_count(c, GT_STEP, test_tensor_of(c, tensor));
    for (int64_t i = 0; i < count; i++) (*test_array_of(in, c, tensor))[i] = value;
}

/* Returns the states after a step, followed by their scales if there are any.  *bytes receives the size of both.
 * Unless `integers` is NULL, the first number of the step's array `integers` is `added` larger than in *in. */
static double *state_of_step(const test_runner *r, const test_case *c, const test_values *in, const char *integers,
                             double added, size_t *bytes) {
    test_values other, out;
    test_copy(c, GT_STEP, in, &other);
    if (integers) (*test_array_of(&other, c, integers))[0] += added;
    test_run(r, c, GT_STEP, &other, TEST_ALL, &out);
    int64_t count = 0;
    const gt_tensor *t;
    for (int k = 0; (t = nth_state(c, k)); k++) count += test_count(c, GT_STEP, t);
    double *const states = test_array(count, 0), *to = states;
    for (int k = 0; (t = nth_state(c, k)); k++) {
        const int64_t n = test_count(c, GT_STEP, t);
        memcpy(to, *test_array_of(&out, c, t->name), (size_t)n * sizeof *to);
        to += n;
    }
    test_free(&other), test_free(&out);
    *bytes = (size_t)count * sizeof *to;
    return states;
}

void test_rounding_agrees(const test_runner *r, const test_case *c, const char *zero, const char *one) {
    test_case rounded = *c;
    test_values in;
    const size_t dtype = test_table(c)->of_steps.state;
    if (test_get_size(c, 'T') == 0 || test_get_size(c, 'B') == 0) return;
    rounded.drafts = TEST_ROUNDING;
    if (test_get_flag(c, dtype) <= GT_F32) test_set_flag(&rounded, dtype, c->seed % 2 ? GT_BF16 : GT_F16);
    test_step_is_alone(r, &rounded, 16);
    /* fp32 holds products of two 16-bit numbers exactly */
    test_set_dtype(&rounded, c->seed / 2 % 2 ? GT_BF16 : GT_F16, GT_DTYPE_DEFAULT);
    test_set_size(&rounded, 'T', 1);
    test_inputs(&rounded, GT_STEP, &in);
    fill_array(&in, &rounded, zero, 0);
    if (one) fill_array(&in, &rounded, one, 1);
    size_t bytes;
    double *const expected = state_of_step(&test_twin, &rounded, &in, NULL, 0, &bytes);
    double *const got = state_of_step(r, &rounded, &in, NULL, 0, &bytes);
    test_check(!memcmp(got, expected, bytes), "%s: %s rounds to other bits than the twin",
               test_describe(&rounded, GT_STEP), r->name);
    /* In a small state, other random bits may round all numbers alike, so this check skips small states.  It also skips
     * int8 states with rows of one number: the row's scale holds that number exactly. */
    int64_t size[4];
    const int rank = test_shape(&rounded, GT_STEP, test_tensor_of(c, "state_out"), size);
    const int is_in_scale = test_get_flag(&rounded, dtype) == GT_INT8 && size[rank - 1] == 1;
    for (int i = 0; i < 3 && bytes > 4096 && !is_in_scale; i++) {
        if (i == 2) /* without a seed, numbers round to nearest */
            test_set_array(&in, c, "rounding_seed", NULL), test_set_array(&in, c, "rounding_steps", NULL);
        const char *const changed = i == 0 ? "rounding_seed" : i == 1 ? "rounding_steps" : NULL;
        double *const other = state_of_step(r, &rounded, &in, changed, 1, &bytes);
        test_check(memcmp(got, other, bytes) != 0,
                   "%s: %s rounds to the same bits with another seed, another step, or no seed",
                   test_describe(&rounded, GT_STEP), r->name);
        free(other);
    }
    free(expected), free(got);
    test_set_array(&in, c, "rounding_seed", NULL), test_set_array(&in, c, "rounding_steps", NULL);
    double *const nearest = state_of_step(&test_twin, &rounded, &in, NULL, 0, &bytes);
    double *const same = state_of_step(r, &rounded, &in, NULL, 0, &bytes);
    test_check(!memcmp(same, nearest, bytes), "%s: %s rounds to nearest, but to other bits than the twin",
               test_describe(&rounded, GT_STEP), r->name);
    free(nearest), free(same);
    test_free(&in);
}

/* Moves the last states of a pass from *from to *states. */
static void take_states(const test_case *c, test_values *from, test_values *states) {
    const gt_tensor *t;
    for (int k = 0; (t = nth_tensor(c, "state_out", k)); k++)
        test_set_array(states, c, t->name, take_array(from, c, t->name));
}

/* Runs a step of n tokens from token `at` on.  Writes the step's y to *joined and updates *states. */
static void take_step(const test_runner *r, const test_case *c, const test_values *all, int64_t at, int64_t n,
                      test_values *states, test_values *joined) {
    test_case step = *c;
    test_values in, out;
    const gt_tensor *t;
    test_cut(c, GT_FORWARD, all, 'T', at, n, &in);
    test_set_size(&step, 'T', n);
    for (int k = 0; (t = nth_tensor(c, "state_out", k)); k++) {
        test_set_array(&in, c, start_of(c, t), NULL);
        test_set_array(&in, c, t->name, take_array(states, c, t->name));
    }
    test_run(r, &step, GT_STEP, &in, TEST_ALL, &out);
    take_states(c, &out, states);
    test_paste(&step, c, GT_FORWARD, &out, 'T', at, joined);
    test_free(&in), test_free(&out);
}

void test_steps_agree(const test_runner *r, const test_case *c, int64_t at, int64_t most, double tolerance) {
    test_case whole = *c, prefill;
    int64_t T = test_get_size(c, 'T');
    test_values in, in_prefill, out, joined = {{NULL}}, states = {{NULL}}, expected;
    if (!is_recurrent(c) || test_is_packed(c) || at > T || test_get_flag(c, test_table(c)->fields.state_in_shared) ||
        lacks(c, "state_out") || c->rounds_states)
        return;
    test_set_slots(&whole, 0);
    prefill = whole;
    test_set_size(&prefill, 'T', at);
    test_inputs(&whole, GT_FORWARD, &in);
    test_run(r, &whole, GT_FORWARD, &in, TEST_ALL, &expected);
    test_cut(&whole, GT_FORWARD, &in, 'T', 0, at, &in_prefill);
    test_run(r, &prefill, GT_FORWARD, &in_prefill, TEST_ALL, &out);
    test_paste(&prefill, &whole, GT_FORWARD, &out, 'T', 0, &joined);
    take_states(c, &out, &states);
    for (int64_t n; at < T; at += n) {
        n = T - at < most ? T - at : most;
        take_step(r, &whole, &in, at, n, &states, &joined);
    }
    take_states(c, &states, &joined);
    test_same(r, &whole, GT_FORWARD, "prefill and steps", &joined, &expected, tolerance);
    test_free(&in), test_free(&in_prefill), test_free(&out);
    test_free(&joined), test_free(&states), test_free(&expected);
}

/* ---- speculative decoding -------------------------------------------------------------------- */

/* The sequences that a simulated server decodes.  Each sequence has a row in a pool of states, and expected results
 * from steps of one token.  See test_server_agrees. */
typedef struct served {
    const test_runner *r;
    test_case all; /* all sequences as one call: B is their number, T their length */
    test_values in;
    int64_t rows, length, batch;
    test_values states[25]; /* states[n]: all sequences' states after n tokens */
    test_values y;
    int64_t *at;      /* number of tokens that each sequence has committed */
    test_values pool; /* all sequences' states after their committed tokens */
    test_random random;
} served;

static int64_t below(served *s, int64_t n) { return (int64_t)(test_next(&s->random) % (uint64_t)n); }

static double *copy_of(const double *from, int64_t count) {
    double *to = test_array(count, 0);
    memcpy(to, from, (size_t)count * sizeof *to);
    return to;
}

/* Copies the states from *from to *to. */
static void copy_states(const test_case *c, const test_values *from, test_values *to) {
    const gt_tensor *t;
    int64_t rows;
    for (int k = 0; (t = nth_tensor(c, "state_out", k)); k++) {
        const int64_t count = state_size(c, t, &rows) * rows;
        test_set_array(to, c, t->name, copy_of(from->of[t - test_table(c)->tensors], count));
    }
}

static void serve_one_by_one(served *s) {
    test_case one = s->all;
    const gt_tensor *t;
    test_set_size(&one, 'T', 1);
    copy_states(&one, &s->pool, &s->states[0]);
    for (int64_t at = 0; at < s->length; at++) {
        test_values in, out;
        test_cut(&s->all, GT_STEP, &s->in, 'T', at, 1, &in);
        copy_states(&one, &s->states[at], &in);
        test_run(s->r, &one, GT_STEP, &in, TEST_ALL, &out);
        copy_states(&one, &out, &s->states[at + 1]);
        for (int k = 0; (t = nth_tensor(&one, "state_out", k)); k++) test_set_array(&out, &one, t->name, NULL);
        test_paste(&one, &s->all, GT_STEP, &out, 'T', at, &s->y);
        test_free(&in), test_free(&out);
    }
}

/* The work of one batch element in a round, which is one step of the server. */
typedef struct draft {
    int64_t row;
    double slot, tokens, commit;
    int is_skipped;
} draft;

/* Draws different sequences for the next round, with at most k tokens each.  `order` is a permutation of all sequences;
 * the drawn sequences move to its front. */
static void draw_drafts(served *s, int drafts, int64_t k, int64_t *order, draft *of) {
    for (int64_t b = 0; b < s->batch; b++) {
        const int64_t other = b + below(s, s->rows - b), row = order[other], left = s->length - s->at[row];
        const int64_t tokens = drafts & TEST_TOKENS ? below(s, (left < k ? left : k) + 1) : k;
        const int64_t commit = drafts & TEST_COMMIT ? below(s, tokens + 1) : tokens;
        order[other] = order[b], order[b] = row;
        of[b] = (draft){row, (double)row, (double)tokens, (double)commit, 0};
        of[b].is_skipped = below(s, 6) == 0;
        if (!of[b].is_skipped) continue;
        const int64_t array = below(s, 3), is_low = below(s, 2);
        if (array == 0 && drafts & TEST_TOKENS)
            of[b].tokens = is_low ? -1 : (double)k + 1;
        else if (array == 1 && drafts & TEST_COMMIT)
            of[b].commit = is_low ? -1 : (double)tokens + 1;
        else
            of[b].slot = is_low ? -1 : (double)s->rows;
    }
}

/* Gathers the inputs of a round.  Inputs beyond an element's tokens are NaN, because no kernel may read them. */
static void gather_round(const served *s, const test_case *round, const draft *of, test_values *in) {
    const int64_t k = test_get_size(round, 'T');
    memset(in, 0, sizeof *in);
    for (int i = 0; test_table(round)->tensors[i].name; i++) {
        const gt_tensor *t = &test_table(round)->tensors[i];
        const double *from = s->in.of[i];
        if (!from) continue;
        if (strncmp(t->shape, "BT", 2)) {
            in->of[i] = copy_of(from, test_count(round, GT_STEP, t));
            continue;
        }
        const int64_t each = test_count(&s->all, GT_STEP, t) / (s->rows * s->length);
        in->of[i] = test_array(s->batch * k * each, NAN);
        for (int64_t b = 0; b < s->batch; b++)
            if (!of[b].is_skipped)
                memcpy(in->of[i] + b * k * each, from + (of[b].row * s->length + s->at[of[b].row]) * each,
                       (size_t)((int64_t)of[b].tokens * each) * sizeof *from);
    }
    copy_states(round, &s->pool, in);
    test_set_array(in, round, "slots", test_array(s->batch, 0));
    if (round->drafts & TEST_TOKENS) test_set_array(in, round, "tokens", test_array(s->batch, 0));
    if (round->drafts & TEST_COMMIT) test_set_array(in, round, "commit", test_array(s->batch, 0));
    for (int64_t b = 0; b < s->batch; b++) {
        (*test_array_of(in, round, "slots"))[b] = of[b].slot;
        if (round->drafts & TEST_TOKENS) (*test_array_of(in, round, "tokens"))[b] = of[b].tokens;
        if (round->drafts & TEST_COMMIT) (*test_array_of(in, round, "commit"))[b] = of[b].commit;
    }
}

/* Makes the expected results of a round, and commits tokens of its sequences. */
static void expect_round(served *s, const test_case *round, const draft *of, test_values *expected) {
    const gt_tensor *t;
    const int64_t k = test_get_size(round, 'T');
    for (int i = 0; (t = nth_output(round, i)); i++) {
        const int64_t n = test_count(&s->all, GT_STEP, t) / (s->rows * s->length);
        const double *const from = *test_array_of(&s->y, round, t->name);
        double *const y = test_array(s->batch * k * n, 0);
        for (int64_t b = 0; b < s->batch; b++)
            if (!of[b].is_skipped)
                memcpy(y + b * k * n, from + (of[b].row * s->length + s->at[of[b].row]) * n,
                       (size_t)((int64_t)of[b].tokens * n) * sizeof *y);
        test_set_array(expected, round, t->name, y);
    }
    for (int64_t b = 0; b < s->batch; b++) {
        int64_t *at = &s->at[of[b].row], rows;
        if (of[b].is_skipped) continue;
        *at += (int64_t)of[b].commit;
        for (int i = 0; (t = nth_tensor(round, "state_out", i)); i++) {
            const int64_t n = state_size(round, t, &rows);
            memcpy(*test_array_of(&s->pool, round, t->name) + of[b].row * n,
                   *test_array_of(&s->states[*at], round, t->name) + of[b].row * n, (size_t)n * sizeof(double));
        }
    }
    copy_states(round, &s->pool, expected);
}

/* Runs one round of up to 16 tokens for each batch element, and compares its results with the expected ones. */
static void serve_round(served *s, const test_case *c, int64_t *order, draft *of) {
    test_case round = *c;
    test_values in, out, expected = {{NULL}};
    int64_t k = 1 + below(s, 16), fewest = s->length;
    for (int64_t row = 0; row < s->rows; row++)
        if (s->length - s->at[row] < fewest) fewest = s->length - s->at[row];
    round.drafts = fewest ? (int)below(s, 4) : TEST_TOKENS | TEST_COMMIT;
    if (!(round.drafts & TEST_TOKENS) && k > fewest) k = fewest;
    round.layout = (test_layout)below(s, TEST_ALIGNED + 1);
    test_set_size(&round, 'T', k);
    test_set_slots(&round, s->rows);
    draw_drafts(s, round.drafts, k, order, of);
    gather_round(s, &round, of, &in);
    expect_round(s, &round, of, &expected);
    test_run(s->r, &round, GT_STEP, &in, TEST_ALL, &out);
    test_same(s->r, &round, GT_STEP, "a server", &out, &expected, 0);
    test_free(&in), test_free(&out), test_free(&expected);
}

void test_server_agrees(const test_runner *r, const test_case *c, int rounds) {
    served s = {
        .r = r, .all = without_drafts(c), .length = 24, .batch = test_get_size(c, 'B'), .random = {test_seed(c)}};
    s.rows = s.batch + 2;
    test_set_slots(&s.all, 0);
    test_set_size(&s.all, 'B', s.rows);
    test_set_size(&s.all, 'T', s.length);
    test_inputs(&s.all, GT_STEP, &s.in);
    take_states(&s.all, &s.in, &s.pool);
    s.at = (int64_t *)calloc((size_t)s.rows, sizeof *s.at);
    int64_t *order = (int64_t *)calloc((size_t)s.rows, sizeof *order);
    draft *of = (draft *)calloc((size_t)s.batch, sizeof *of);
    for (int64_t row = 0; row < s.rows; row++) order[row] = row;
    serve_one_by_one(&s);
    for (int i = 0; i < rounds; i++) serve_round(&s, c, order, of);
    test_free(&s.in);
    for (int64_t t = 0; t <= s.length; t++) test_free(&s.states[t]);
    test_free(&s.pool), test_free(&s.y);
    free(s.at), free(order), free(of);
}

/* ---- numbers that are not finite ------------------------------------------------------------- */

/* The place of a NaN or infinity in an input.  In a tensor over rows, `batch` is the row and `token` is the column. */
typedef struct spot {
    const gt_tensor *tensor;
    int64_t batch, token, head, element, of_heads;
    int64_t first, last; /* the sequence of the token: tokens first ... last-1 */
    int64_t reach;       /* length in tokens of the chunk that this number may spoil; 0: no chunk */
} spot;

static int has_tokens(const gt_tensor *t) { return !strncmp(t->shape, "BT", 2); }
static int is_activation(const gt_tensor *t) { return has_tokens(t) || t->shape[0] == 'M'; }

static void spoil(const test_case *c, gt_pass pass, const spot *s, double value, test_values *in) {
    int64_t size[4] = {1, 1, 1, 1};
    test_shape(c, pass, s->tensor, size);
    (*test_array_of(
        in, c, s->tensor->name))[((s->batch * size[1] + s->token) * size[2] + s->head) * size[3] + s->element] = value;
}

/* The argument struct of an operator that joins two operators has their argument structs as fields.  Returns the length
 * of the name of the field that holds the tensor: 4 for "wkv6.r", 0 if the outer struct itself holds it. */
static size_t struct_of(const gt_tensor *t) {
    const char *dot = strchr(t->name, '.');
    return dot ? (size_t)(dot - t->name) : 0;
}

/* The reach (test_op.reach) of the operator whose argument struct holds the tensor. */
static int64_t reach_of(const test_case *c, const gt_tensor *t, int is_backward) {
    char name[16] = "";
    const size_t n = struct_of(t);
    if (n && n < sizeof name) memcpy(name, t->name, n);
    return test_op_of(name[0] ? name : c->op)->reach[is_backward];
}

/* The number of later tokens whose outputs an element of the tensor enters directly: W - 1 for the input of a
 * convolution, else 0. */
static int64_t spread_of(const test_case *c, const gt_tensor *t) {
    return test_is(t, "xBC") || test_is(t, "dxBC") ? test_get_size(c, 'W') - 1 : 0;
}

/* Whether `token` of tensor t and the spot lie in one chunk. */
static int in_chunk_of(const test_case *c, const spot *s, const gt_tensor *t, int64_t token) {
    const int64_t after = spread_of(c, t), reach = s->reach;
    const int64_t first = (s->token - s->first) / reach, last = (s->token + spread_of(c, s->tensor) - s->first) / reach;
    if (token + after < s->first || token >= s->last) return 0;
    return (token + after - s->first) / reach >= first && (token - s->first) / reach <= last;
}

/* Whether the kernels may change element j of a tensor, even if the twin does not.  They may if the element belongs to
 * the spot's sequence, chunk and head.  A group belongs to all heads that share its inputs.  They may change any
 * element of a parameter's gradient, since the gradient sums over all chunks. */
static int is_in_reach(const test_case *c, gt_pass pass, const gt_tensor *t, int64_t j, const spot *s) {
    int64_t size[4] = {1, 1, 1, 1};
    test_shape(c, pass, t, size);
    const int is_sum = t->use[GT_BACKWARD] == 'g', at = is_sum ? 0 : 2;
    const int is_of_other = struct_of(s->tensor) && strncmp(t->name, s->tensor->name, struct_of(t));
    if (!s->reach || is_of_other) return 0;
    if (!strcmp(t->name, "conv_dstate_in")) return in_chunk_of(c, s, t, s->first);
    if (!has_tokens(t) && !is_sum) return 0;
    const int64_t columns = is_sum ? size[1] * size[2] * size[3] : size[3], head = j / columns % size[at];
    const int64_t many = size[at] > s->of_heads ? size[at] : s->of_heads;
    const int64_t few = size[at] > s->of_heads ? s->of_heads : size[at];
    if (many % few == 0 && !test_get_size(c, 'W') && head * few / size[at] != s->head * few / s->of_heads) return 0;
    if (is_sum) return 1;
    if (j / columns / size[2] / size[1] != s->batch) return 0;
    return in_chunk_of(c, s, t, j / columns / size[2] % size[1]);
}

/* Whether the twin changes any channel of the head of element j, in the same token or state.  a and b: the twin's
 * tensor with and without the NaN or infinity. */
static int changes_beside(const test_case *c, gt_pass pass, const gt_tensor *t, int64_t j, const spot *s,
                          const double *a, const double *b) {
    int64_t size[4] = {1, 1, 1, 1}, n = 1;
    const int rank = test_shape(c, pass, t, size);
    const int heads = has_tokens(t) ? 3 : rank > 2 ? 2 : 1;
    for (int i = heads; i < rank; i++) n *= size[i];
    /* The sum of two operators has the heads of one.  A number of the other spoils channels of a head of its own. */
    const int64_t channels = size[2] * size[3];
    if (has_tokens(t) && rank == 4 && !struct_of(t) && struct_of(s->tensor) && channels % s->of_heads == 0)
        n = channels / s->of_heads;
    int64_t first = j / n * n;
    /* a row of xBC holds x of all heads, then Bm and Cm of all groups */
    if (has_tokens(t) && rank == 3 && test_get_size(c, 'W') && test_get_size(c, 'N')) {
        const int64_t x = test_get_size(c, 'H') * test_get_size(c, 'P'), at = j % size[2];
        n = test_get_size(c, at < x ? 'P' : 'N');
        first = j - (at < x ? at : at - x) % n;
    }
    for (int64_t i = first; i < first + n; i++)
        if (memcmp(&a[i], &b[i], sizeof *a)) return 1;
    return 0;
}

/* Whether the kernels may write a large number instead of an infinity.  Kernels of ssd bound the decays and, in fp32,
 * the products of pairs of tokens. */
static int may_be_large(const test_case *c, const spot *s, double value) {
    if (!isinf(value) || !test_op_of(c->op)->bounds_pairs) return 0;
    return test_is(s->tensor, "dt") || test_dtype_of(c, s->tensor) == GT_F32;
}

static void check_spoilt(const test_runner *r, const test_case *c, gt_pass pass, const spot *s, double value,
                         const test_values *clean, const test_values *truth, const test_values *in, int may_vanish) {
    const gt_op *op = test_table(c);
    const double largest = may_be_large(c, s, value) ? 1e30 : DBL_MAX;
    test_values spoilt_in, bad, bad_truth, bad_twin;
    test_copy(c, pass, in, &spoilt_in);
    spoil(c, pass, s, value, &spoilt_in);
    test_run(&test_truth, c, pass, &spoilt_in, TEST_ALL, &bad_truth);
    /* in the fp32 twin, decays underflow where they do in the kernels; in the double twin they do not */
    test_run(&test_twin, c, pass, &spoilt_in, TEST_ALL, &bad_twin);
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
                } else if (memcmp(&a, &b, sizeof a) && !is_in_reach(c, pass, t, j, s) &&
                           !changes_beside(c, pass, t, j, s, bad_truth.of[i], truth->of[i])) {
                    spread = spread < 0 ? j : spread, spreads++;
                }
            }
            test_check(hidden < 0,
                       "%s: with %g in %s at token %lld of head %lld, %s of %s is %g at %lld; the twin has %g; %lld "
                       "more differ so",
                       test_describe(c, pass), value, s->tensor->name, (long long)s->token, (long long)s->head, t->name,
                       r->name, hidden < 0 ? 0 : bad.of[i][hidden], (long long)hidden,
                       hidden < 0 ? 0 : bad_twin.of[i][hidden], (long long)hiddens - 1);
            test_check(spread < 0,
                       "%s: with %g in %s at token %lld of head %lld, %s of %s changes at %lld, and at %lld more",
                       test_describe(c, pass), value, s->tensor->name, (long long)s->token, (long long)s->head, t->name,
                       r->name, (long long)spread, (long long)spreads - 1);
        }
    }
    test_free(&spoilt_in), test_free(&bad), test_free(&bad_truth), test_free(&bad_twin);
}

/* Sets the sequence of the spot's token.  Returns 0 if the token belongs to no sequence. */
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

/* Checks one pass.  only: spoils one input, which this number chooses; -1 spoils every input in turn. */
static void check_nonfinite_pass(const test_runner *r, const test_case *c, gt_pass pass, int is_backward,
                                 const int64_t at[2], int has_chunks, int only, int may_vanish) {
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
        if (r->reads_y && pass == GT_BACKWARD && test_is_output(t, GT_FORWARD)) continue; /* forward writes it again */
        if (only >= 0 && turn++ != only % inputs) continue;
        test_shape(c, pass, t, size);
        spot s = {t, size[0] - 1, has_tokens(t) ? at[is_backward] : size[1] / 3, size[2] / 2, size[3] / 3, size[2],
                  0, 0,           has_chunks ? reach_of(c, t, is_backward) : 0};
        if (find_sequence(c, &in, &s)) check_spoilt(r, c, pass, &s, value, &clean, &truth, &in, may_vanish);
    }
    test_free(&in), test_free(&clean), test_free(&truth);
}

void test_nonfinite_stays(const test_runner *r, const test_case *c, const int64_t at[2], int has_chunks, int every,
                          int may_vanish) {
    static const struct {
        gt_pass pass;
        int is_backward;
    } list[] = {{GT_FORWARD, 0}, {GT_BACKWARD, 1}, {GT_SEGMENT, 0}, {GT_SEGMENT_BACKWARD, 1}, {GT_STEP, 0}};
    enum { COUNT = sizeof list / sizeof list[0] };
    uint64_t count = 0;
    for (int i = 0; i < COUNT; i++) count += (uint64_t)test_has_pass(c, list[i].pass);
    for (uint64_t i = 0, turn = 0; i < COUNT; i++) {
        if (!test_has_pass(c, list[i].pass) || (turn++ != c->seed % count && !every)) continue;
        check_nonfinite_pass(r, c, list[i].pass, list[i].is_backward, at, has_chunks,
                             every ? -1 : (int)(c->seed / count % 64), may_vanish);
    }
}
