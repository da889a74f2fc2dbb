/* The harness of gt_test.h, for tests and bench.  It looks up cases and tables, draws the values of a case, and places
 * its tensors in one block of memory (place_tensors, write_memory).  test_run runs a case, and test_compare judges its
 * outputs. */
#include "gt_test.h"
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* in bytes: tensors and the block are aligned to ALIGNMENT; at least GUARD bytes lie before and after each tensor */
enum { ALIGNMENT = 256, GUARD = 256 };
/* the values of guard bytes; 0xff... is a NaN in every float dtype, so a stray read shows in the results */
enum { INPUT_GUARD = 0xff, OUTPUT_GUARD = 0xa5 };

/* PARALLEL_FOR runs the next loop over `count` elements in several threads; its iterations are independent.  Loops of
 * at most MANY elements stay in one thread, because waking threads takes longer than so little work. */
enum { MANY = 1 << 14 };
#ifdef _OPENMP
#define PARALLEL_FOR _Pragma("omp parallel for if (count > MANY)")
#define PARALLEL_FOR_FIRST _Pragma("omp parallel for reduction(min : first) if (count > MANY)")
#else
#define PARALLEL_FOR
#define PARALLEL_FOR_FIRST
#endif

static void *allocate(size_t bytes) {
    void *p = malloc(bytes > 0 ? bytes : 1);
    if (p) return p;
    fprintf(stderr, "out of memory (%zu bytes)\n", bytes);
    exit(2);
}

/* ---- case and table look-ups ----------------------------------------------------------------- */

const gt_op *test_table(const test_case *c) { return test_op_of(c->op)->table(); }

int test_is_word_of(const char *list, const char *word) {
    size_t n = strlen(word);
    for (const char *found = list; found && (found = strstr(found, word)); found += n)
        if ((found == list || found[-1] == ' ') && (found[n] == ' ' || found[n] == 0)) return 1;
    return 0;
}

/* Whether the case lacks a state that a step needs. */
static int lacks_state_out(const test_case *c) {
    for (const gt_tensor *t = test_table(c)->tensors; t->name; t++)
        if (gt_use(t, GT_STEP) == 's' && test_is_word_of(c->absent, t->name)) return 1;
    return 0;
}

int test_has_pass(const test_case *c, gt_pass pass) {
    const test_op *top = test_op_of(c->op);
    const size_t shared = test_table(c)->fields.state_in_shared;
    if (!top->twin[pass]) return 0;
    if (pass == GT_SEGMENT) return !test_is_word_of(c->absent, "state_out");
    if (pass == GT_SEGMENT_BACKWARD) return !test_is_word_of(c->absent, "dstate_in") && !test_get_flag(c, shared);
    if (gt_is_join(pass)) return !test_is_packed(c);
    if (pass == GT_STEP && !test_is_over_time(top)) return test_get_size(c, 'M') <= TEST_STEP_ROWS;
    return pass != GT_STEP ||
           (test_get_size(c, 'T') <= 16 && !test_is_packed(c) && !test_get_flag(c, shared) && !lacks_state_out(c));
}

int test_find(const gt_op *op, const char *tensor) {
    for (int i = 0; op->tensors[i].name; i++)
        if (!strcmp(op->tensors[i].name, tensor)) return i;
    return -1;
}

const char *test_plain_name(const gt_tensor *t) {
    const char *dot = strrchr(t->name, '.');
    return dot ? dot + 1 : !strncmp(t->name, "conv_", 5) ? t->name + 5 : t->name;
}

int test_is(const gt_tensor *t, const char *plain_name) { return !strcmp(test_plain_name(t), plain_name); }

int test_beside(const gt_op *op, int i, const char *plain_name) {
    const gt_tensor *t = &op->tensors[i];
    const size_t prefix = (size_t)(test_plain_name(t) - t->name);
    char name[64];
    snprintf(name, sizeof name, "%s", t->name);
    if (prefix < sizeof name) snprintf(name + prefix, sizeof name - prefix, "%s", plain_name);
    return test_find(op, name);
}

int test_gradient_of(const gt_op *op, int i) {
    char name[64];
    snprintf(name, sizeof name, "d%s", test_plain_name(&op->tensors[i]));
    const int gradient = test_beside(op, i, name);
    if (gradient >= 0 || !test_is(&op->tensors[i], "residual")) return gradient;
    return test_find(op, "dy") >= 0 ? test_find(op, "dy") : test_find(op, "dmixed");
}

int test_is_over_time(const test_op *op) { return op->table()->sizes[0].letter == 'B'; }

static int64_t capacity_at(const test_case *c, size_t offset) {
    int64_t n = 0;
    if (offset) memcpy(&n, (const char *)&c->args + offset, sizeof n);
    return n;
}

static int64_t slot_capacity(const test_case *c) { return capacity_at(c, test_table(c)->fields.slot_capacity); }

int test_takes_packed(const test_op *op) { return test_find(op->table(), "cu_seqlens") >= 0; }

int test_is_packed(const test_case *c) { return capacity_at(c, test_table(c)->fields.seq_capacity) > 0; }

int test_is_absent(const test_case *c, const gt_tensor *t) {
    if (!strcmp(t->name, "slots")) return slot_capacity(c) == 0;
    if (!strcmp(t->name, "starts_zero")) return 1; /* only test_pools_agree sets this array */
    if (!strcmp(t->name, "tokens")) return !(c->drafts & TEST_TOKENS);
    if (!strcmp(t->name, "commit")) return !(c->drafts & TEST_COMMIT);
    if (!strcmp(t->name, "places")) return !(c->drafts & TEST_PLACES);
    if (!strncmp(t->name, "rounding_", 9)) return !(c->drafts & TEST_ROUNDING);
    if (!strcmp(t->name, "state_scale")) return test_get_flag(c, test_table(c)->of_steps.state) != GT_INT8;
    if (t->kind == 'i' && !test_is_packed(c)) return 1;
    return test_is_word_of(c->absent, t->name);
}

int test_is_state(const gt_tensor *t) { return t->shape[0] == 'S' || t->shape[0] == 'Q'; }
int test_is_input(const gt_tensor *t, gt_pass pass) { return strchr("Iis", gt_use(t, pass)) != NULL; }
int test_is_output(const gt_tensor *t, gt_pass pass) { return strchr("Oogs", gt_use(t, pass)) != NULL; }

int test_get_flag(const test_case *c, size_t offset) {
    int value = 0;
    if (offset) memcpy(&value, (const char *)&c->args + offset, sizeof value);
    return value;
}

void test_set_flag(test_case *c, size_t offset, int value) { memcpy((char *)&c->args + offset, &value, sizeof value); }

int test_accumulates(const test_case *c, const gt_tensor *t) {
    if (!test_get_flag(c, test_table(c)->accumulate_offset)) return 0;
    return t->use[GT_BACKWARD] == 'g' ||
           (test_is(t, "dstate_in") && test_get_flag(c, test_table(c)->fields.state_in_shared));
}

int test_axis(const test_case *c, const gt_tensor *t, char letter) {
    const char *at;
    if (letter == 'B' && t->shape[0] == 'Q') return 0;
    if (letter == 'B' && t->shape[0] == 'S') return test_get_flag(c, test_table(c)->fields.state_in_shared) ? -1 : 0;
    if (letter == 'B' && test_is_packed(c)) return -1;
    if (letter == 'B' && t->shape[0] == 'L') return 0;
    at = strchr(t->shape, letter);
    return at ? (int)(at - t->shape) : -1;
}

static const gt_size *find_size(const test_case *c, char letter) {
    for (const gt_size *s = test_table(c)->sizes; s->letter; s++)
        if (s->letter == letter) return s;
    return NULL;
}

int64_t test_get_size(const test_case *c, char letter) {
    const gt_size *s = find_size(c, letter);
    int64_t n = 0;
    if (s) memcpy(&n, (const char *)&c->args + s->offset, sizeof n);
    return n;
}

void test_set_size(test_case *c, char letter, int64_t n) {
    memcpy((char *)&c->args + find_size(c, letter)->offset, &n, sizeof n);
}

void test_set_slots(test_case *c, int64_t capacity) {
    memcpy((char *)&c->args + test_table(c)->fields.slot_capacity, &capacity, sizeof capacity);
}

void test_set_pieces(test_case *c, int64_t pieces) {
    memcpy((char *)&c->args + test_table(c)->fields.pieces, &pieces, sizeof pieces);
}

int64_t test_get_pieces(const test_case *c) {
    const size_t offset = test_table(c)->fields.pieces;
    int64_t pieces = 0;
    if (offset) memcpy(&pieces, (const char *)&c->args + offset, sizeof pieces);
    return pieces;
}

void test_set_sequences(test_case *c, int64_t count, int64_t capacity) {
    size_t offset = test_table(c)->fields.seq_capacity;
    c->packed.count = count;
    c->packed.lengths = NULL;
    if (offset) memcpy((char *)&c->args + offset, &capacity, sizeof capacity);
}

void test_set_dtype(test_case *c, gt_dtype dtype, gt_dtype companion) {
    const gt_op *op = test_table(c);
    memcpy((char *)&c->args + op->dtype_offset, &dtype, sizeof dtype);
    if (op->companion_offset) memcpy((char *)&c->args + op->companion_offset, &companion, sizeof companion);
    if (op->second.name) memcpy((char *)&c->args + op->second.offset, &companion, sizeof companion);
}

static gt_dtype dtype_at(const test_case *c, size_t offset, gt_dtype missing) {
    gt_dtype dtype = GT_DTYPE_DEFAULT;
    if (offset) memcpy(&dtype, (const char *)&c->args + offset, sizeof dtype);
    return dtype == GT_DTYPE_DEFAULT ? missing : dtype;
}

gt_dtype test_dtype_of(const test_case *c, const gt_tensor *t) {
    const gt_op *op = test_table(c);
    gt_dtype dtype = dtype_at(c, op->dtype_offset, GT_F32);
    return strchr("xXwd", t->kind) ? dtype_at(c, gt_dtype_field(op, t), dtype)
                                   : dtype_at(c, gt_dtype_field(op, t), GT_F32);
}

int test_shape(const test_case *c, gt_pass pass, const gt_tensor *t, int64_t size[4]) {
    test_args filled;
    gt_dims dims;
    int rank = (int)strlen(t->shape);
    if (gt_prepare(test_table(c), GT_QUERY, GT_HOST, &c->args, &filled, &dims) != GT_OK) {
        fprintf(stderr, "%s: this case is no valid call: %s\n", c->name, gt_last_error());
        exit(2);
    }
    if (pass == GT_STEP && slot_capacity(c)) dims.n['Q' - 'A'] = slot_capacity(c);
    for (int i = 0; i < rank; i++) size[i] = dims.n[t->shape[i] - 'A'];
    return rank;
}

size_t test_workspace_of(const gt_workspace *need, gt_pass pass) {
    switch (pass) {
    case GT_FORWARD: return need->forward;
    case GT_BACKWARD: return need->backward;
    case GT_STEP: return need->step;
    case GT_SEGMENT:
    case GT_SEGMENT_BACKWARD: return need->segment;
    default: return 0;
    }
}

int64_t test_count(const test_case *c, gt_pass pass, const gt_tensor *t) {
    int64_t size[4], count = 1;
    int rank = test_shape(c, pass, t, size);
    for (int i = 0; i < rank; i++) count *= size[i];
    return count;
}

/* ---- values ---------------------------------------------------------------------------------- */

#define SPLITMIX_STEP 0x9e3779b97f4a7c15u

uint64_t test_next(test_random *r) { /* splitmix64 */
    uint64_t z = r->state += SPLITMIX_STEP;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

double test_uniform(test_random *r) { return (double)(test_next(r) >> 11) * 0x1p-53; }

double test_normal(test_random *r) { /* Box-Muller */
    double radius = sqrt(-2 * log(1 - test_uniform(r)));
    return radius * cos(6.283185307179586 * test_uniform(r));
}

double test_round(double value, gt_dtype dtype) {
    if (dtype == GT_BF16) return gt_bf16_to_f32(gt_f32_to_bf16((float)value));
    if (dtype == GT_F16) return gt_f16_to_f32(gt_f32_to_f16((float)value));
    if (dtype == GT_INT8) return value > 127 ? 127 : value < -127 ? -127 : rint(value) + 0.0; /* integers have no -0 */
    return (float)value;
}

uint64_t test_seed(const test_case *c) {
    const char *text = getenv("GT_TEST_SEED");
    return c->seed + (text ? strtoull(text, NULL, 0) : 0);
}

double *test_array(int64_t count, double value) {
    double *v = (double *)allocate((size_t)count * sizeof *v);
    for (int64_t i = 0; i < count; i++) v[i] = value;
    return v;
}

/* The random generator of a tensor.  Its seed depends on case and tensor name only, so every pass draws the same
 * values. */
static test_random random_of(const test_case *c, const gt_tensor *t) {
    test_random r = {test_seed(c) * 0x100000001b3u + 0xcbf29ce484222325u};
    for (const char *ch = t->name; *ch; ch++) r.state = (r.state ^ (uint64_t)(unsigned char)*ch) * 0x100000001b3u;
    test_next(&r);
    return r;
}

/* Fills a tensor with random numbers from its distribution.  Each element uses its own part of the random sequence, so
 * that threads can share the work. */
static void fill_numbers(const test_case *c, const gt_tensor *t, int64_t count, double *v) {
    const test_random start = random_of(c, t);
    const gt_dtype dtype = test_dtype_of(c, t);
    test_map map;
    const test_fill f = test_fill_of(c, t, &map);
    const uint64_t draws = f.share > 0 ? 3 : 2;
    const double unit = dtype == GT_INT8 ? 40 : 1; /* int8 holds integers up to 127 */
    PARALLEL_FOR
    for (int64_t i = 0; i < count; i++) {
        test_random r = {start.state + (uint64_t)i * draws * SPLITMIX_STEP};
        double x = f.mean + f.spread * test_normal(&r);
        if (map != TEST_AS_IS) x = map == TEST_EXP ? exp(x) : -exp(x);
        if (f.share > 0 && test_uniform(&r) < f.share) x = f.special;
        v[i] = t->kind == 'b' ? floor(256 * test_uniform(&r)) - 128 : test_round(unit * x, dtype);
    }
}

/* ---- packed sequences ---- */

int64_t test_sequences(const test_case *c, const test_values *in) {
    const double *count = in->of[test_find(test_table(c), "seq_count")];
    return count ? (int64_t)count[0] : capacity_at(c, test_table(c)->fields.seq_capacity);
}

int64_t test_sequence_at(const test_case *c, const test_values *in, int64_t s) {
    return (int64_t)in->of[test_find(test_table(c), "cu_seqlens")][s];
}

/* Fills cu_seqlens with the starts of all sequences and the end of the last one.  Entries beyond are -1, and no pass
 * may read them. */
static void fill_sequences(const test_case *c, const gt_tensor *t, int64_t count, double *v) {
    test_random r = random_of(c, t);
    int64_t left = test_get_size(c, 'T');
    for (int64_t s = 0; s < count; s++) v[s] = s ? -1 : 0;
    for (int64_t s = 0; s < c->packed.count; s++) {
        int64_t most = 2 * left / (c->packed.count - s);
        int64_t n = test_next(&r) % 4 ? (int64_t)(test_next(&r) % (uint64_t)(most + 1)) : 0;
        if (n > left) n = left;
        if (c->packed.lengths) n = c->packed.lengths[s];
        v[s + 1] = v[s] + (double)n;
        left -= n;
    }
}

/* Returns how many of a tensor's `rows` rows belong to sequences. */
static int64_t rows_used(const test_case *c, const gt_tensor *t, int64_t rows) {
    if (!test_is_packed(c) || strncmp(t->shape, "BT", 2)) return rows;
    const gt_tensor *sequences = test_tensor_of(c, "cu_seqlens");
    const int64_t count = test_count(c, GT_FORWARD, sequences);
    double *starts = test_array(count, 0);
    fill_sequences(c, sequences, count, starts);
    rows = (int64_t)starts[c->packed.count];
    free(starts);
    return rows;
}

/* Returns how many of a tensor's elements belong to sequences.  These elements come first, in tensors over tokens and
 * in states. */
static int64_t count_used(const test_case *c, gt_pass pass, const gt_tensor *t, const test_values *in) {
    int64_t size[4], count = test_count(c, pass, t), sequences;
    if (!test_is_packed(c) || t->kind == 'i' || !count) return count;
    test_shape(c, pass, t, size);
    sequences = test_sequences(c, in);
    if (!strncmp(t->shape, "BT", 2)) return count / size[1] * test_sequence_at(c, in, sequences);
    return test_axis(c, t, 'B') == 0 ? count / size[0] * sequences : count;
}

/* ---- inputs ---- */

/* Fills in different pool rows in random order.  Every third batch element gets a row out of range, so that the step
 * skips this element. */
static void fill_slots(const test_case *c, const gt_tensor *t, int64_t count, double *v) {
    test_random r = random_of(c, t);
    int64_t rows = slot_capacity(c);
    double *row = test_array(rows, 0);
    for (int64_t i = 0; i < rows; i++) {
        int64_t j = (int64_t)(test_next(&r) % (uint64_t)(i + 1));
        row[i] = row[j];
        row[j] = (double)i;
    }
    for (int64_t b = 0; b < count; b++) {
        v[b] = b < rows ? row[b] : -1;
        if (b % 3 == 2) v[b] = b % 2 ? (double)rows : -1;
    }
    free(row);
}

/* Fills in `tokens` or `commit`: for each batch element the number of tokens, or how many of them enter its state.
 * Numbers are at most most[b], or T if `most` is NULL.  Many are 0 or the largest number, and some are out of range. */
static void fill_drafts(const test_case *c, const gt_tensor *t, int64_t count, const double *most, double *v) {
    static const double outside[] = {-1, INT32_MIN, INT32_MAX};
    const double T = (double)test_get_size(c, 'T');
    test_random r = random_of(c, t);
    for (int64_t b = 0; b < count; b++) {
        const double limit = most && most[b] >= 0 && most[b] <= T ? most[b] : T;
        const int kind = (int)(test_next(&r) % 8), i = (int)(test_next(&r) % 4);
        v[b] = kind == 0 ? 0 : kind < 3 ? limit : floor(test_uniform(&r) * (limit + 1));
        if (kind == 3) v[b] = i < 3 ? outside[i] : limit + 1;
    }
}

/* Fills in arbitrary integers: seeds, step numbers, or the next columns of states that are rings. */
static void fill_places(const test_case *c, const gt_tensor *t, int64_t count, double *v) {
    test_random r = random_of(c, t);
    for (int64_t b = 0; b < count; b++) v[b] = floor(test_uniform(&r) * 20) - 6;
}

void test_inputs(const test_case *c, gt_pass pass, test_values *in) {
    const gt_op *op = test_table(c);
    memset(in, 0, sizeof *in);
    for (int i = 0; op->tensors[i].name; i++) {
        const gt_tensor *t = &op->tensors[i];
        int is_read = test_is_input(t, pass) || (pass == GT_BACKWARD && test_accumulates(c, t));
        int64_t count = test_count(c, pass, t);
        /* outside of steps, only test_pools_agree sets slots */
        const int is_other = pass != GT_STEP && !strcmp(t->name, "slots");
        if (!is_read || is_other || test_is_absent(c, t)) continue;
        in->of[i] = test_array(count, 0);
        if (!strcmp(t->name, "places") || !strncmp(t->name, "rounding_", 9))
            fill_places(c, t, count, in->of[i]);
        else if (!strcmp(t->name, "slots"))
            fill_slots(c, t, count, in->of[i]);
        else if (!strcmp(t->name, "tokens") || !strcmp(t->name, "commit"))
            fill_drafts(c, t, count, !strcmp(t->name, "commit") ? *test_array_of(in, c, "tokens") : NULL, in->of[i]);
        else if (!strcmp(t->name, "cu_seqlens"))
            fill_sequences(c, t, count, in->of[i]);
        else if (!strcmp(t->name, "seq_count"))
            in->of[i][0] = (double)c->packed.count;
        else
            fill_numbers(c, t, count, in->of[i]);
    }
    for (int i = 0; op->tensors[i].name && test_is_packed(c); i++) {
        int64_t count = test_count(c, pass, &op->tensors[i]);
        for (int64_t j = count_used(c, pass, &op->tensors[i], in); in->of[i] && j < count; j++) in->of[i][j] = 0;
    }
    if (test_op_of(c->op)->settle) test_op_of(c->op)->settle(c, in);
}

void test_copy(const test_case *c, gt_pass pass, const test_values *from, test_values *to) {
    const gt_op *op = test_table(c);
    memset(to, 0, sizeof *to);
    for (int i = 0; op->tensors[i].name; i++) {
        if (!from->of[i]) continue;
        size_t bytes = (size_t)test_count(c, pass, &op->tensors[i]) * sizeof(double);
        to->of[i] = (double *)allocate(bytes);
        memcpy(to->of[i], from->of[i], bytes);
    }
}

void test_free(test_values *v) {
    for (int i = 0; i < TEST_TENSORS; i++) free(v->of[i]);
    memset(v, 0, sizeof *v);
}

double **test_array_of(test_values *v, const test_case *c, const char *tensor) {
    return &v->of[test_find(test_table(c), tensor)];
}

/* Replaces a tensor's array by another array, which may be NULL. */
void test_set_array(test_values *v, const test_case *c, const char *tensor, double *array) {
    double **at = test_array_of(v, c, tensor);
    free(*at);
    *at = array;
}

const gt_tensor *test_tensor_of(const test_case *c, const char *name) {
    return &test_table(c)->tensors[test_find(test_table(c), name)];
}

/* Copies n positions along one index of a tensor.  The index has from_n positions in `from` and to_n in `to`.  outer
 * and inner: the numbers of elements along the indices before and after this index. */
static void copy_range(const double *from, int64_t from_n, int64_t from_at, double *to, int64_t to_n, int64_t to_at,
                       int64_t n, int64_t outer, int64_t inner) {
    for (int64_t i = 0; i < outer; i++)
        memcpy(to + (i * to_n + to_at) * inner, from + (i * from_n + from_at) * inner,
               (size_t)(n * inner) * sizeof(double));
}

static void split_shape(const int64_t *size, int rank, int axis, int64_t *outer, int64_t *inner) {
    *outer = *inner = 1;
    for (int i = 0; i < axis; i++) *outer *= size[i];
    for (int i = axis + 1; i < rank; i++) *inner *= size[i];
}

void test_cut(const test_case *c, gt_pass pass, const test_values *from, char letter, int64_t at, int64_t n,
              test_values *to) {
    const gt_op *op = test_table(c);
    test_copy(c, pass, from, to);
    for (int i = 0; op->tensors[i].name; i++) {
        int64_t size[4], outer, inner;
        int axis = test_axis(c, &op->tensors[i], letter);
        int rank = test_shape(c, pass, &op->tensors[i], size);
        if (!to->of[i] || axis < 0) continue;
        split_shape(size, rank, axis, &outer, &inner);
        copy_range(from->of[i], size[axis], at, to->of[i], n, 0, n, outer, inner);
    }
}

void test_paste(const test_case *part, const test_case *c, gt_pass pass, const test_values *from, char letter,
                int64_t at, test_values *to) {
    const gt_op *op = test_table(c);
    for (int i = 0; op->tensors[i].name; i++) {
        int64_t size[4], part_size[4], outer, inner;
        int axis = test_axis(c, &op->tensors[i], letter);
        int rank = test_shape(c, pass, &op->tensors[i], size);
        if (!from->of[i] || axis < 0) continue;
        if (!to->of[i]) to->of[i] = test_array(test_count(c, pass, &op->tensors[i]), NAN);
        test_shape(part, pass, &op->tensors[i], part_size);
        split_shape(size, rank, axis, &outer, &inner);
        copy_range(from->of[i], part_size[axis], 0, to->of[i], size[axis], at, part_size[axis], outer, inner);
    }
}

/* ---- placing tensors in memory --------------------------------------------------------------- */

typedef enum format { AS_INT32, AS_DOUBLE, AS_F32, AS_BF16, AS_F16, AS_INT8 } format;

/* The place of one tensor in memory. */
typedef struct place {
    format format;
    int is_used, rank, element;        /* element: bytes of one element */
    int64_t count, size[4], stride[4]; /* strides in elements */
    /* number of elements that belong to sequences; all elements if the case is not packed */
    int64_t sequences;
    int64_t written; /* number of elements that the pass writes, if the tensor is an output */
    size_t at;       /* byte offset of the first element in the block */
} place;

/* One call, and the block of memory that holds all its tensors. */
typedef struct call {
    test_args args;
    place of[TEST_TENSORS];
    size_t bytes;
    char *memory, *expected; /* expected: the memory as the pass must leave it, except for its outputs */
} call;

/* A buffer that several tensors share: each tensor is a range of its columns.  A call has four such buffers: inputs
 * have one for elements of 2 bytes and one for elements of other sizes, and so have outputs. */
typedef struct columns {
    int64_t rows, row, used; /* number of rows; elements of a row; elements of a row that have a tensor */
    int element;             /* bytes of one element */
    size_t at;
} columns;

static int64_t extent(const place *p) { /* elements in memory from the first to the last, gaps included */
    int64_t n = 1;
    for (int i = 0; i < p->rank; i++) n += (p->size[i] - 1) * p->stride[i];
    return p->count ? n : 0;
}

static int64_t row_elements(const gt_tensor *t, const place *p) {
    return t->shape[0] == 'M' ? p->size[1] : p->size[2] * (p->rank == 4 ? p->size[3] : 1);
}

/* Whether a tensor can be columns of a shared buffer.  A state cannot, because the buffer has a row for each token. */
static int is_slice(const gt_tensor *t) { return t->stride_offset && !test_is_state(t); }

static int has_slices(test_layout layout) { return layout == TEST_SLICES || layout == TEST_ALIGNED; }

/* The number of columns that a tensor takes in a shared buffer.  TEST_ALIGNED rounds up to a multiple of 8 elements,
 * which is a multiple of 16 bytes. */
static int64_t columns_for(const gt_tensor *t, const place *p, test_layout layout) {
    int64_t n = row_elements(t, p);
    return layout == TEST_ALIGNED ? (n + 7) / 8 * 8 : n;
}

/* Sets a tensor's strides for the layout, in *args and in *p.  A stride of 0 in *args means its default.  *p gets the
 * values of these defaults, computed here without the library, so that the library's defaults are tested.  row:
 * elements in a row of the shared buffer.  TEST_GAPS has other gaps in every tensor. */
static void set_strides(const test_case *c, gt_pass pass, const gt_tensor *t, test_layout layout, int64_t row,
                        test_args *args, place *p) {
    int64_t packed = 1, gap = 1 + (t - test_table(c)->tensors);
    for (int i = p->rank - 1; i >= 0; i--) {
        p->stride[i] = packed;
        packed *= p->size[i];
    }
    if (!t->stride_offset || (test_is_state(t) && pass != GT_STEP)) return;
    if (test_is_state(t) && gt_stride_count(t) == 1) {
        const int64_t n = p->stride[0], s = layout == TEST_GAPS ? n + gap : layout == TEST_ALIGNED ? n + 8 : 0;
        memcpy((char *)args + t->stride_offset, &s, sizeof s);
        if (s) p->stride[0] = s;
    } else if (test_is_state(t)) { /* indices of a ring: pool rows, channels, columns */
        const int64_t D = p->size[1], S = p->size[2];
        gt_stride s = {0, 0, 0};
        if (layout == TEST_TIME_LAST) s.t = 1, s.h = D;
        if (layout == TEST_GAPS) s.h = 2, s.t = 2 * S + gap, s.b = D * s.t + gap;
        memcpy((char *)args + t->stride_offset, &s, sizeof s);
        if (s.t) p->stride[2] = s.h, p->stride[1] = s.t, p->stride[0] = s.b ? s.b : D * S;
    } else if (t->shape[0] == 'M') {
        int64_t s = layout == TEST_GAPS ? p->size[1] + gap : has_slices(layout) ? row : 0;
        memcpy((char *)args + t->stride_offset, &s, sizeof s);
        if (s) p->stride[0] = s;
    } else {
        int64_t T = test_get_size(c, 'T'), H = p->size[2], inner = p->rank == 4 ? p->size[3] : 1;
        gt_stride4 s = {0, 0, 0, 0};
        const int has_n = gt_stride_count(t) == 4;
        if (layout == TEST_TIME_LAST && has_n) s.t = 1, s.n = T > 0 ? T : 1;
        if (layout == TEST_TIME_LAST && !has_n) s.t = inner, s.h = T * inner;
        if (layout == TEST_GAPS && has_n) s.n = 3;
        if (layout == TEST_GAPS) s.h = inner * (s.n ? s.n : 1) + gap, s.t = H * s.h + gap, s.b = T * s.t + gap;
        if (has_slices(layout)) s.t = row;
        memcpy((char *)args + t->stride_offset, &s, (size_t)gt_stride_count(t) * sizeof s.b);
        if (has_n) p->stride[3] = s.n ? s.n : 1;
        p->stride[2] = s.h ? s.h : inner * (s.n ? s.n : 1);
        p->stride[1] = s.t ? s.t : H * p->stride[2];
        p->stride[0] = T * p->stride[1] > H * p->stride[2] ? T * p->stride[1] : H * p->stride[2];
        if (s.b) p->stride[0] = s.b;
    }
}

/* Reserves bytes with guards before and after.  Returns their offset in the block. */
static size_t reserve(call *k, size_t bytes, size_t shift) {
    size_t at = k->bytes + GUARD + shift;
    k->bytes = (at + bytes + GUARD + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return at;
}

/* The shared buffer for a tensor, in layouts with slices. */
static columns *columns_of(columns all[4], const gt_tensor *t, const place *p, gt_pass pass) {
    return &all[2 * (p->element == 2) + test_is_output(t, pass)];
}

/* The input whose memory output i reuses; -1 = none. */
static int shared_with(const test_case *c, gt_pass pass, const call *k, int i) {
    const gt_op *op = test_table(c);
    int other = op->tensors[i].may_equal ? test_find(op, op->tensors[i].may_equal) : -1;
    if (!c->in_place || other < 0 || pass == GT_STEP || !k->of[other].is_used ||
        !test_is_output(&op->tensors[i], pass) || test_get_flag(c, test_table(c)->fields.state_in_shared))
        return -1;
    return memcmp(k->of[i].size, k->of[other].size, sizeof k->of[i].size) ? -1 : other;
}

/* Sets the strides and the byte offset of every tensor of a call. */
static void place_tensors(const test_case *c, gt_pass pass, test_layout layout, call *k) {
    const gt_op *op = test_table(c);
    const int is_aligned = layout == TEST_PACKED || layout == TEST_TIME_LAST || layout == TEST_ALIGNED;
    columns all[4];
    memset(all, 0, sizeof all);
    for (int i = 0; op->tensors[i].name && has_slices(layout); i++) {
        const gt_tensor *t = &op->tensors[i];
        place *p = &k->of[i];
        if (!p->is_used || !p->count || !is_slice(t) || shared_with(c, pass, k, i) >= 0) continue;
        columns *shared = columns_of(all, t, p, pass);
        shared->element = p->element;
        shared->row += columns_for(t, p, layout);
        shared->rows = p->count / row_elements(t, p);
    }
    for (int i = 0; i < 4; i++) {
        if (!all[i].row) continue;
        if (all[i].row <= c->row)
            all[i].row = c->row;
        else
            all[i].row = layout == TEST_ALIGNED ? all[i].row + 8 : all[i].row | 1;
        all[i].at =
            reserve(k, (size_t)(all[i].rows * all[i].row * all[i].element), is_aligned ? 0 : (size_t)all[i].element);
    }
    for (int i = 0; op->tensors[i].name; i++) {
        const gt_tensor *t = &op->tensors[i];
        place *p = &k->of[i];
        size_t shift = is_aligned ? 0 : (size_t)p->element;
        if (!p->is_used || !p->count || shared_with(c, pass, k, i) >= 0) continue;
        if (has_slices(layout) && is_slice(t)) {
            columns *shared = columns_of(all, t, p, pass);
            set_strides(c, pass, t, layout, shared->row, &k->args, p);
            p->at = shared->at + (size_t)(shared->used * p->element);
            shared->used += columns_for(t, p, layout);
        } else {
            set_strides(c, pass, t, layout, 0, &k->args, p);
            p->at = reserve(k, (size_t)(extent(p) * p->element), shift);
        }
    }
    for (int i = 0; op->tensors[i].name; i++) {
        int other = k->of[i].is_used ? shared_with(c, pass, k, i) : -1;
        if (other < 0) continue;
        memcpy(k->of[i].stride, k->of[other].stride, sizeof k->of[i].stride);
        k->of[i].at = k->of[other].at;
        if (op->tensors[i].stride_offset && op->tensors[other].stride_offset)
            memcpy((char *)&k->args + op->tensors[i].stride_offset, (char *)&k->args + op->tensors[other].stride_offset,
                   (size_t)gt_stride_count(&op->tensors[i]) * sizeof(int64_t));
    }
}

/* The byte offset of the i-th element in packed order. */
static size_t offset_of(const place *p, int64_t i) {
    int64_t at = 0;
    for (int d = p->rank - 1; d >= 0; d--) {
        at += i % p->size[d] * p->stride[d];
        i /= p->size[d];
    }
    return p->at + (size_t)(at * p->element);
}

static int64_t row_length(const place *p) { return p->size[p->rank - 1]; }

/* Returns the address of a row of elements.  at: the index, in packed order, of the row's first element.  *step: the
 * distance in bytes from element to element of this row. */
static char *row_at(const place *p, char *memory, int64_t at, size_t *step) {
    *step = (size_t)(p->stride[p->rank - 1] * p->element);
    return memory + offset_of(p, at);
}

static void store(char *to, format format, double value) {
    int32_t i;
    float f;
    uint16_t h;
    switch (format) {
    case AS_INT32: i = (int32_t)value, memcpy(to, &i, sizeof i); break;
    case AS_DOUBLE: memcpy(to, &value, sizeof value); break;
    case AS_F32: f = (float)value, memcpy(to, &f, sizeof f); break;
    case AS_BF16: h = gt_f32_to_bf16((float)value), memcpy(to, &h, sizeof h); break;
    case AS_F16: h = gt_f32_to_f16((float)value), memcpy(to, &h, sizeof h); break;
    case AS_INT8: *(int8_t *)to = (int8_t)value; break;
    }
}

static double load(const char *from, format format) {
    int32_t i;
    double d = 0;
    float f;
    uint16_t h;
    switch (format) {
    case AS_INT32: memcpy(&i, from, sizeof i), d = i; break;
    case AS_DOUBLE: memcpy(&d, from, sizeof d); break;
    case AS_F32: memcpy(&f, from, sizeof f), d = f; break;
    case AS_BF16: memcpy(&h, from, sizeof h), d = gt_bf16_to_f32(h); break;
    case AS_F16: memcpy(&h, from, sizeof h), d = gt_f16_to_f32(h); break;
    case AS_INT8: d = *(const int8_t *)from; break;
    }
    return d;
}

/* Fills a row with 0xff bytes, which are NaN in every float dtype. */
static void erase_row(char *to, size_t step, size_t element, int64_t n) {
    if (step == element) memset(to, 0xff, (size_t)n * element);
    for (int64_t i = 0; i < n && step != element; i++, to += step) memset(to, 0xff, element);
}

static void copy_row(char *to, const char *from, size_t step, size_t element, int64_t n) {
    if (step == element) memcpy(to, from, (size_t)n * element);
    for (int64_t i = 0; i < n && step != element; i++, to += step, from += step) memcpy(to, from, element);
}

/* ---- running --------------------------------------------------------------------------------- */

static format format_of(const test_case *c, const gt_tensor *t, int is_double) {
    gt_dtype dtype = test_dtype_of(c, t);
    if (t->kind == 'i') return AS_INT32;
    if (is_double) return AS_DOUBLE;
    if (t->kind == 'b') return AS_INT8;
    return dtype == GT_F32 ? AS_F32 : dtype == GT_BF16 ? AS_BF16 : dtype == GT_INT8 ? AS_INT8 : AS_F16;
}

/* Writes a tensor's values.  If `values` is NULL, all elements become NaN; elements outside of sequences always do. */
static void write_tensor(const place *p, const double *values, char *memory) {
    const int64_t count = p->count, n = row_length(p);
    PARALLEL_FOR
    for (int64_t i = 0; i < count; i += n) {
        size_t step;
        char *to = row_at(p, memory, i, &step);
        if (!values || i >= p->sequences)
            erase_row(to, step, (size_t)p->element, n);
        else
            for (int64_t j = 0; j < n; j++, to += step) store(to, p->format, values[i + j]);
    }
}

/* Reads an output into values, with 0 for elements that the pass does not write.  Also copies the output to `expected`:
 * if memory and `expected` then still differ, the pass wrote outside of its outputs. */
static void read_tensor(const place *p, char *memory, char *expected, double *values) {
    const int64_t count = p->count, n = row_length(p);
    PARALLEL_FOR
    for (int64_t i = 0; i < count; i += n) {
        size_t step;
        const char *from = row_at(p, memory, i, &step);
        if (i >= p->written) {
            for (int64_t j = 0; j < n; j++) values[i + j] = 0;
            continue;
        }
        copy_row(row_at(p, expected, i, &step), from, step, (size_t)p->element, n);
        for (int64_t j = 0; j < n; j++, from += step) values[i + j] = load(from, p->format);
    }
}

/* Allocates the block and fills it: with guard bytes, NaN in the outputs, and the values of the inputs. */
static void write_memory(const test_case *c, gt_pass pass, const test_values *in, call *k) {
    const gt_op *op = test_table(c);
    k->memory = (char *)aligned_alloc(ALIGNMENT, k->bytes);
    k->expected = (char *)allocate(k->bytes);
    if (!k->memory) exit(2);
    memset(k->memory, INPUT_GUARD, k->bytes);
    for (int i = 0; op->tensors[i].name; i++) {
        const place *p = &k->of[i];
        if (p->is_used && p->count && test_is_output(&op->tensors[i], pass))
            memset(k->memory + p->at - GUARD, OUTPUT_GUARD, (size_t)(extent(p) * p->element) + 2 * GUARD);
    }
    for (int i = 0; op->tensors[i].name; i++) {
        const place *p = &k->of[i];
        if (p->is_used && p->count && (in->of[i] || shared_with(c, pass, k, i) < 0))
            write_tensor(p, in->of[i], k->memory);
    }
    memcpy(k->expected, k->memory, k->bytes);
}

/* Sets the pointers in the argument struct.  A pointer that the pass does not use points to guard bytes, so that a use
 * of it shows.  Pointers to snapshots are NULL instead, because tests also call forward with the arguments of backward.
 * A step's state_in is NULL, or equals state_out if the case is in place. */
static void set_pointers(const test_case *c, gt_pass pass, call *k) {
    const gt_op *op = test_table(c);
    for (int i = 0; op->tensors[i].name; i++) {
        const gt_tensor *t = &op->tensors[i];
        int from = pass == GT_STEP && test_is(t, "state_in") ? test_beside(op, i, "state_out") : i;
        const place *place = &k->of[from];
        char *p = NULL;
        if (place->is_used && place->count && (from == i || c->in_place)) p = k->memory + place->at;
        if (gt_use(t, pass) == '-' && t->kind != 'i' && !gt_is_snapshots(t) && from == i) p = k->memory;
        memcpy((char *)&k->args + t->offset, &p, sizeof p);
    }
}

/* Checks that the pass wrote only to its outputs. */
static int check_untouched(const test_runner *r, const test_case *c, gt_pass pass, const call *k) {
    const gt_op *op = test_table(c);
    size_t at = 0, nearest = k->bytes;
    const char *name = "";
    if (!memcmp(k->memory, k->expected, k->bytes)) return 1;
    while (k->memory[at] == k->expected[at]) at++;
    for (int i = 0; op->tensors[i].name; i++) {
        const place *p = &k->of[i];
        size_t end = p->at + (size_t)(extent(p) * p->element);
        size_t distance = at < p->at ? p->at - at : at >= end ? at - end + 1 : 0;
        if (!p->is_used || !p->count || distance >= nearest) continue;
        nearest = distance;
        name = op->tensors[i].name;
    }
    return test_failed("%s: %s wrote outside of the elements of its outputs, near %s", test_describe(c, pass), r->name,
                       name);
}

int test_run(const test_runner *r, const test_case *c, gt_pass pass, const test_values *in, uint64_t want,
             test_values *out) {
    const test_op *top = test_op_of(c->op);
    const gt_op *op = top->table();
    call k;
    int ok;
    gt_status status;
    memset(&k, 0, sizeof k);
    memset(out, 0, sizeof *out);
    k.args = c->args;
    k.bytes = ALIGNMENT; /* unused pointers point to these guard bytes */
    if (pass != GT_STEP && op->fields.slot_capacity)
        memset((char *)&k.args + op->fields.slot_capacity, 0, sizeof(int64_t));
    for (int i = 0; op->tensors[i].name; i++) {
        const gt_tensor *t = &op->tensors[i];
        place *p = &k.of[i];
        int is_output = test_is_output(t, pass) && (want >> i & 1) && !test_is_absent(c, t);
        p->rank = test_shape(c, pass, t, p->size);
        p->count = test_count(c, pass, t);
        p->is_used = is_output || (test_is_input(t, pass) && in->of[i]);
        if (gt_is_snapshots(t) && !p->count) p->is_used = 0;
        p->sequences = count_used(c, pass, t, in);
        /* the pass writes 0 to y and gradients of tokens outside all sequences, but does not write their states */
        p->written = strncmp(t->shape, "BT", 2) ? p->sequences : p->count;
        p->format = format_of(c, t, r->is_double);
        p->element = p->format == AS_DOUBLE ? 8 : p->format == AS_INT8 ? 1 : p->format < AS_BF16 ? 4 : 2;
    }
    place_tensors(c, pass, r->is_double ? TEST_PACKED : c->layout, &k);
    write_memory(c, pass, in, &k);
    set_pointers(c, pass, &k);
    status = r->run(r, top, pass, &k.args, k.memory, k.bytes);
    ok = status == GT_OK ||
         test_failed("%s: %s returned %d: %s", test_describe(c, pass), r->name, (int)status, gt_last_error());
    for (int i = 0; op->tensors[i].name; i++) {
        const place *p = &k.of[i];
        if (!p->is_used || !test_is_output(&op->tensors[i], pass)) continue;
        out->of[i] = (double *)allocate((size_t)p->count * sizeof(double));
        if (p->count) read_tensor(p, k.memory, k.expected, out->of[i]);
    }
    ok &= check_untouched(r, c, pass, &k);
    free(k.memory), free(k.expected);
    return ok;
}

void test_relocate(const gt_op *op, void *args, const char *from, size_t bytes, char *to) {
    for (const gt_tensor *t = op->tensors; t->name; t++) {
        char *p;
        memcpy(&p, (char *)args + t->offset, sizeof p);
        if (!p || p < from || p >= from + bytes) continue;
        p = to + (p - from);
        memcpy((char *)args + t->offset, &p, sizeof p);
    }
}

static gt_status run_twin(const test_runner *r, const test_op *op, gt_pass pass, const void *args, char *memory,
                          size_t bytes) {
    (void)memory, (void)bytes;
    return (r->is_double ? op->twin64 : op->twin)[pass](args);
}

/* The twins compute in fp32, so most of an output's error comes from rounding to its dtype: at most 2^-8 (bf16) or
 * 2^-11 (fp16) of the value, and 0.4 times this on average.  States and parameter gradients are fp32. */
const test_runner test_truth = {"the double twin", run_twin, NULL, 1, {{0}, {0}, {0}, {0}, 0}, 0};
const test_runner test_twin = {
    "the twin",
    run_twin,
    NULL,
    0,
    {{0, 1e-5, 3e-3, 7e-4}, {0, 1e-5, 1e-5, 1e-5}, {0, 1e-5, 1e-5, 1e-5}, {0, 0x1p-22, 0x1p-22, 0x1p-22}, 0},
    0};

/* ---- judging --------------------------------------------------------------------------------- */

static int passed, failed, group_passed, group_failed;

int test_passed(void) {
    group_passed++;
    return 1;
}

int test_failed(const char *format, ...) {
    group_failed++;
    va_list list;
    va_start(list, format);
    printf("FAILED: ");
    vprintf(format, list);
    putchar('\n');
    va_end(list);
    return 0;
}

void test_group(const char *op, const char *what) {
    printf("%-4s %-14s %-48s %7d checks\n", group_failed ? "FAIL" : "ok", op, what, group_passed + group_failed);
    fflush(stdout);
    passed += group_passed;
    failed += group_failed;
    group_passed = group_failed = 0;
}

int test_finish(void) {
    passed += group_passed;
    failed += group_failed;
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0 || passed == 0;
}

const char *test_describe(const test_case *c, gt_pass pass) {
    static const char *const passes[GT_PASSES] = {"forward",          "backward", "step",         "segment",
                                                  "segment_backward", "join",     "join_backward"};
    static const char *const dtypes[] = {"", "f32", "bf16", "f16"};
    static const char *const layouts[] = {"packed", "shifted", "time last", "gaps", "slices", "aligned slices"};
    static char text[512];
    const gt_op *op = test_table(c);
    gt_dtype dtype = dtype_at(c, op->dtype_offset, GT_F32);
    gt_dtype companion = dtype_at(c, op->companion_offset, dtype);
    size_t n = (size_t)snprintf(text, sizeof text, "%s_%s \"%s\" (", c->op, passes[pass], c->name);
    for (const gt_size *s = op->sizes; s->letter; s++)
        n += (size_t)snprintf(text + n, sizeof text - n, "%s=%lld ", s->name, (long long)test_get_size(c, s->letter));
    n += (size_t)snprintf(text + n, sizeof text - n, "%s", dtypes[dtype]);
    if (op->companion_offset)
        n += (size_t)snprintf(text + n, sizeof text - n, " %s=%s", op->companion_name, dtypes[companion]);
    if (test_is_packed(c))
        n += (size_t)snprintf(text + n, sizeof text - n, " sequences=%lld of %lld", (long long)c->packed.count,
                              (long long)capacity_at(c, test_table(c)->fields.seq_capacity));
    snprintf(text + n, sizeof text - n, " %s%s seed=%llu)", layouts[c->layout], c->in_place ? " in place" : "",
             (unsigned long long)test_seed(c));
    return text;
}

/* The text "[b,t,h,n]" with the indices of the i-th element. */
static const char *index_text(const int64_t *size, int rank, int64_t i) {
    static char text[128];
    int64_t at[4];
    int n = 0;
    for (int d = rank - 1; d >= 0; d--) {
        at[d] = i % size[d];
        i /= size[d];
    }
    for (int d = 0; d < rank; d++)
        n += snprintf(text + n, sizeof text - (size_t)n, "%c%lld", d ? ',' : '[', (long long)at[d]);
    snprintf(text + n, sizeof text - (size_t)n, "]");
    return text;
}

/* Whether `error` is larger than `than`.  NaN is larger than any number. */
static int is_worse(double error, double than) { return !isnan(than) && !(error <= than); }

/* Groups of elements, each judged as a whole.  Runs of `run` consecutive elements belong to groups 0, 1, ... groups-1,
 * and then to group 0 again. */
typedef struct grouping {
    const char *kind;
    int64_t groups, run;
    double tolerance, floor; /* a group passes if |got - truth| <= tolerance (|truth| + floor), in l2 norms */
    const double *terms;     /* NULL, or magnitudes of the elements' terms (see test_op.terms) */
    double of_terms;         /* this fraction of the terms' l2 norm is added to the allowed error */
} grouping;

/* Adds the squares of n errors to *error, and the squares of the n true values to *size. */
static void add_squares(const double *got, const double *truth, int64_t n, double *error, double *size) {
    double e = 0, s = 0;
    for (int64_t i = 0; i < n; i++) {
        e += (got[i] - truth[i]) * (got[i] - truth[i]);
        s += truth[i] * truth[i];
    }
    *error += e;
    *size += s;
}

static int is_close(const grouping *g, int64_t group, int64_t count, double error, double size) {
    const double n = (double)(count / g->groups);
    double none = 0, terms = 0;
    for (int64_t i = group * g->run; g->terms && i < count; i += g->groups * g->run)
        add_squares(g->terms + i, g->terms + i, g->run, &none, &terms);
    return sqrt(error) <= g->tolerance * (sqrt(size) + g->floor * sqrt(n)) + g->of_terms * sqrt(terms);
}

/* Sums the squares of one group's errors and of its true values. */
static void sum_group(const grouping *g, const double *got, const double *truth, int64_t count, int64_t group,
                      double *error, double *size) {
    *error = *size = 0;
    for (int64_t i = group * g->run; i < count; i += g->groups * g->run)
        add_squares(got + i, truth + i, g->run, error, size);
}

/* Returns the index of the first group that fails, or the number of groups.  If a group has several runs, the code
 * reads the arrays only once, in order. */
static int64_t first_bad(const grouping *g, const double *got, const double *truth, int64_t count) {
    int64_t first = g->groups;
    if (count == g->groups * g->run) {
        PARALLEL_FOR_FIRST
        for (int64_t group = 0; group < g->groups; group++) {
            double error, size;
            sum_group(g, got, truth, count, group, &error, &size);
            if (!is_close(g, group, count, error, size) && group < first) first = group;
        }
        return first;
    }
    double *error = test_array(2 * g->groups, 0), *size = error + g->groups;
    for (int64_t i = 0; i < count; i += g->groups * g->run)
        for (int64_t k = 0; k < g->groups; k++)
            add_squares(got + i + k * g->run, truth + i + k * g->run, g->run, &error[k], &size[k]);
    for (first = 0; first < g->groups; first++)
        if (!is_close(g, first, count, error[first], size[first])) break;
    free(error);
    return first;
}

/* Judges every group.  Reports the worst element of the first group that fails. */
static int compare_groups(const test_runner *r, const test_case *c, gt_pass pass, const gt_tensor *t, const double *got,
                          const double *truth, const grouping *g) {
    int64_t shape[4], count = test_count(c, pass, t), bad = first_bad(g, got, truth, count);
    int64_t worst = bad * g->run;
    int rank = test_shape(c, pass, t, shape);
    double error, size;
    if (bad == g->groups) return test_passed();
    for (int64_t i = bad * g->run; i < count; i += g->groups * g->run)
        for (int64_t j = i; j < i + g->run; j++)
            if (is_worse(fabs(got[j] - truth[j]), fabs(got[worst] - truth[worst]))) worst = j;
    sum_group(g, got, truth, count, bad, &error, &size);
    return test_failed("%s: %s of %s, %s: error %.2e, size %.2e, limit of their ratio %.1e; worst element %s is %.9g, "
                       "but should be %.9g",
                       test_describe(c, pass), t->name, r->name, g->kind, sqrt(error), sqrt(size), g->tolerance,
                       index_text(shape, rank, worst), got[worst], truth[worst]);
}

static double rms(const double *v, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += v[i] * v[i];
    return n ? sqrt(sum / (double)n) : 0;
}

void test_magnitudes(const test_case *c, const test_values *in, test_values *magnitudes) {
    const gt_op *op = test_table(c);
    test_values absolute;
    uint64_t wanted = 0;
    test_copy(c, GT_BACKWARD, in, &absolute);
    for (int i = 0; op->tensors[i].name; i++) {
        const gt_tensor *t = &op->tensors[i];
        int64_t count = test_count(c, GT_BACKWARD, t);
        if (t->use[GT_BACKWARD] == 'g') wanted |= (uint64_t)1 << i;
        if (!absolute.of[i] || test_is_word_of("w A dt dt_bias", test_plain_name(t))) continue;
        for (int64_t j = 0; j < count; j++)
            if (isfinite(absolute.of[i][j])) absolute.of[i][j] = fabs(absolute.of[i][j]);
    }
    test_run(&test_truth, c, GT_BACKWARD, &absolute, wanted, magnitudes);
    test_free(&absolute);
}

/* The largest relative change of a number by rounding to the dtype. */
static const double half_unit[] = {[GT_F32] = 0x1p-24, [GT_BF16] = 0x1p-8, [GT_F16] = 0x1p-11, [GT_INT8] = 0x1p-8};

/* Whether the tensor is a dz that backward may compute from y. */
static int is_of_y(const test_runner *r, const test_op *op, const gt_tensor *t, gt_dtype dtype) {
    return r->reads_y && op->reads_y && dtype == GT_BF16 && !strcmp(test_plain_name(t), "dz");
}

double test_limit_of(const test_runner *r, const test_op *op, const gt_tensor *t, gt_dtype dtype, const double *truth,
                     int64_t count, double limit) {
    double squares = 0, fourths = 0;
    if (!is_of_y(r, op, t, dtype)) return limit;
    for (int64_t i = 0; i < count; i++) {
        const double square = isfinite(truth[i]) ? truth[i] * truth[i] : 0;
        squares += square, fourths += square * square;
    }
    return squares > 0 ? sqrt(limit * limit + 2.25 * half_unit[dtype] * half_unit[dtype] * sqrt(fourths) / squares)
                       : limit;
}

static double tolerance_of(const test_runner *r, const test_op *op, const gt_tensor *t, gt_dtype dtype,
                           gt_dtype call_dtype, const double *truth, int64_t count) {
    /* test_compare adds the error of rounding to int8; this limit is for a few numbers that round the other way */
    if (dtype == GT_INT8) return 1e-3;
    if (dtype != GT_F32) return test_limit_of(r, op, t, dtype, truth, count, r->tolerance.activations[dtype]);
    if (r->tolerance.rounds_factors && op->sums_of_few && test_is_word_of(op->sums_of_few, t->name))
        return r->tolerance.activations[call_dtype];
    return (strchr("wd", t->kind) ? r->tolerance.companions : r->tolerance.parameters)[call_dtype];
}

/* The limits of a channel.  Each channel is judged alone, because a channel may be small beside the others.
 *
 * If one element makes up most of a channel, its own rounding may exceed the tensor's tolerance, so the limit is at
 * least this rounding.  If kernels round factors of products, the limit is 1.5 times as large: the emulation measured
 * an error of 1.72 tolerances in a call with one row.  Such kernels also compute fp32 gradients from a state in the
 * call's dtype.  For a slowly decaying channel they round this state once in 64 tokens; a GPU measured 1.81 tolerances.
 *
 * A channel of up to 32 elements may be small by chance, because its terms cancel.  Its error is then compared with an
 * eighth of a typical element or, with rounded factors, with a whole typical element.  A GPU measured 1.8 tolerances,
 * in 32 elements of dw in fp16.  rows: the number of rows that belong to sequences.  twice_rounded: elements are
 * computed from a number that was rounded before. */
static grouping channel_of(const test_runner *r, gt_dtype call_dtype, gt_dtype dtype, int64_t channels, int64_t rows,
                           double tolerance, double floor, double typical, int twice_rounded) {
    const int rounds = r->tolerance.rounds_factors && call_dtype != GT_F32;
    const double unit = 1.05 * half_unit[rounds ? call_dtype : dtype], by = rounds ? 1.5 : 1;
    const double limit = twice_rounded ? fmax(by * tolerance, 2 * unit) : by * fmax(tolerance, unit);
    grouping g = {"channel", channels, 1, limit, floor, NULL, 0};
    if (rows <= 32) g.floor = r->tolerance.rounds_factors ? typical : floor + (typical - floor) / 8;
    return g;
}

/* Returns a copy of logs of decays, bounded to [-256, 256].  Beyond these bounds exp is 0 or infinity in fp32, so
 * differences there do not matter.  Returns NULL for other tensors, which are judged as they are. */
static double *bounded_logs(const gt_tensor *t, const double *v, int64_t count) {
    if (strcmp(t->name, "decay_out")) return NULL;
    double *logs = test_array(count, 0);
    for (int64_t i = 0; i < count; i++) logs[i] = v[i] < -256 ? -256 : v[i] > 256 ? 256 : v[i];
    return logs;
}

/* The relative l2 error of a tensor from rounding to its dtype alone.  This error may be as large as half a unit in the
 * last place, if the tensor has few numbers or few large ones. */
static double own_rounding(const double *y, int64_t count, gt_dtype dtype) {
    double error = 0, size = 0;
    for (int64_t i = 0; i < count; i++) {
        const double rounded = test_round(y[i], dtype);
        if (!isfinite(rounded)) continue;
        error += (rounded - y[i]) * (rounded - y[i]), size += y[i] * y[i];
    }
    return size > 0 ? sqrt(error / size) : 0;
}

/* The number of rows that are not all 0.  A step writes rows of 0 for tokens that a batch element lacks. */
static int64_t rows_with_numbers(const double *y, int64_t rows, int64_t row) {
    int64_t count = 0;
    for (int64_t i = 0; i < rows; i++) {
        int64_t j = 0;
        while (j < row && y[i * row + j] == 0) j++;
        count += j < row;
    }
    return count;
}

int test_compare(const test_runner *r, const test_case *c, gt_pass pass, const test_values *got,
                 const test_values *truth, const test_values *magnitudes) {
    static const double smallest_normal[] = {0, 0x1p-126, 0x1p-126, 0x1p-14, 0};
    const test_op *op_of = test_op_of(c->op);
    const gt_op *op = op_of->table();
    gt_dtype call_dtype = dtype_at(c, op->dtype_offset, GT_F32);
    int ok = 1;
    for (int i = 0; op->tensors[i].name; i++) {
        const gt_tensor *t = &op->tensors[i];
        const double *x = got->of[i], *y = truth->of[i];
        int64_t size[4], count = test_count(c, pass, t), rows, row;
        int rank = test_shape(c, pass, t, size);
        gt_dtype dtype = test_dtype_of(c, t);
        double floor = smallest_normal[dtype], typical, tolerance;
        if (!x || !y || !count) continue;
        double *x_logs = bounded_logs(t, x, count), *y_logs = bounded_logs(t, y, count);
        if (x_logs) x = x_logs, y = y_logs;
        tolerance = tolerance_of(r, op_of, t, dtype, call_dtype, y, count);
        /* Rounding to the dtype alone makes a relative l2 error of 0.43 half units, if many numbers have similar sizes.
         * Other errors are independent of the rounding, and may take half of the tolerance. */
        tolerance = fmax(tolerance, hypot(own_rounding(y, count, dtype), tolerance / 2));
        /* in a small tensor all rounding errors may be large at once, also those between two stages */
        const double between = r->tolerance.rounds_factors == 2 ? half_unit[call_dtype] : 0;
        if (count < 64) tolerance = fmax(tolerance, 1.05 * (half_unit[dtype] + between));
        if (magnitudes && magnitudes->of[i])
            floor += r->tolerance.terms[call_dtype] / tolerance * rms(magnitudes->of[i], count);
        typical = floor + rms(y, count);
        row = size[rank - 1];
        grouping all = {"all", 1, count, tolerance, floor, NULL, 0};
        grouping each_row = {"row", count / row, row, 4 * tolerance, typical, NULL, 0};
        const int is_difference = r->tolerance.rounds_factors && op_of->differences[pass] &&
                                  test_is_word_of(op_of->differences[pass], t->name);
        grouping element = {"element", count, 1, (is_difference ? 16 : 8) * tolerance, typical, NULL, 0};
        ok &= compare_groups(r, c, pass, t, x, y, &all);
        ok &= compare_groups(r, c, pass, t, x, y, &each_row);
        ok &= compare_groups(r, c, pass, t, x, y, &element);
        free(x_logs), free(y_logs);
        if (!is_slice(t)) continue; /* a channel is judged over tokens or rows, which states lack */
        rows = t->shape[0] == 'M' ? size[0] : size[0] * size[1];
        const int64_t used = pass == GT_STEP ? rows_with_numbers(y, rows, count / rows) : rows_used(c, t, rows);
        grouping channel = channel_of(r, call_dtype, dtype, count / rows, used, tolerance, floor, typical,
                                      is_of_y(r, op_of, t, dtype));
        double *terms = NULL;
        if (op_of->terms && first_bad(&channel, x, y, count) < channel.groups) {
            channel.terms = terms = op_of->terms(c, pass, t);
            channel.of_terms = 0.43 * half_unit[call_dtype];
        }
        ok &= compare_groups(r, c, pass, t, x, y, &channel);
        free(terms);
    }
    return ok;
}

void test_huge_rows_hold(const test_runner *r, const test_case *c, const char *tensor) {
    const gt_tensor *t = &test_table(c)->tensors[test_find(test_table(c), tensor)];
    for (int pass = GT_FORWARD; pass <= GT_BACKWARD; pass++) {
        test_values in, got, truth, magnitudes = {{NULL}};
        test_inputs(c, (gt_pass)pass, &in);
        double *x = *test_array_of(&in, c, tensor);
        const int64_t count = x ? test_count(c, (gt_pass)pass, t) : 0, D = test_get_size(c, 'D');
        if (count > 0 && test_dtype_of(c, t) != GT_F16) {
            for (int64_t i = 0; i < count; i++)
                if (i / D % 2) x[i] = test_round(x[i] * 1e25, test_dtype_of(c, t));
            test_run(&test_truth, c, (gt_pass)pass, &in, TEST_ALL, &truth);
            if (pass == GT_BACKWARD) test_magnitudes(c, &in, &magnitudes);
            if (test_run(r, c, (gt_pass)pass, &in, TEST_ALL, &got))
                test_compare(r, c, (gt_pass)pass, &got, &truth, &magnitudes);
            test_free(&got), test_free(&truth), test_free(&magnitudes);
        }
        test_free(&in);
    }
}

int test_same(const test_runner *r, const test_case *c, gt_pass pass, const char *what, const test_values *got,
              const test_values *other, double tolerance) {
    const gt_op *op = test_table(c);
    int all_ok = 1;
    for (int i = 0; op->tensors[i].name; i++) {
        const gt_tensor *t = &op->tensors[i];
        const double *a = got->of[i], *b = other->of[i];
        int64_t size[4], count = test_count(c, pass, t), worst = 0;
        int rank = test_shape(c, pass, t, size), ok = 1;
        if (!a || !b) continue;
        ok = !memcmp(a, b, (size_t)count * sizeof *a); /* bits are compared, so 0 and -0 differ */
        if (!ok && tolerance > 0) {
            double error = 0, size = 0;
            add_squares(a, b, count, &error, &size);
            ok = sqrt(error) <= tolerance * sqrt(size);
        }
        for (int64_t j = 0; j < count && !ok; j++)
            if (is_worse(fabs(a[j] - b[j]), fabs(a[worst] - b[worst]))) worst = j;
        all_ok &=
            test_check(ok, "%s: %s of %s, %s: %s: %.9g, other %.9g", test_describe(c, pass), t->name, r->name, what,
                       count ? index_text(size, rank, worst) : "", count ? a[worst] : 0, count ? b[worst] : 0);
    }
    return all_ok;
}
