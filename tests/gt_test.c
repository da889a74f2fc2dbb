#include "gt_test.h"
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* in bytes; a guard is at least that long */
enum { ALIGNMENT = 256, GUARD = 256 };
/* 0xffff... is a NaN in every dtype, so that a stray read shows, too */
enum { INPUT_GUARD = 0xff, OUTPUT_GUARD = 0xa5 };

static void *allocate(size_t bytes) {
    void *p = malloc(bytes > 0 ? bytes : 1);
    if (p) return p;
    fprintf(stderr, "out of memory (%zu bytes)\n", bytes);
    exit(2);
}

/* ---- case and table look-ups ----------------------------------------------------------------- */

const gt_op *test_table(const test_case *c) { return test_op_of(c->op)->table(); }

static int is_word_of(const char *list, const char *word) {
    size_t n = strlen(word);
    for (const char *at = list; at && (at = strstr(at, word)); at += n)
        if ((at == list || at[-1] == ' ') && (at[n] == ' ' || at[n] == 0)) return 1;
    return 0;
}

int test_has_pass(const test_case *c, gt_pass pass) {
    const test_op *top = test_op_of(c->op);
    if (pass != GT_STEP) return top->twin[pass] != NULL;
    return top->twin[pass] && test_get_size(c, 'T') <= 16 &&
           !test_get_flag(c, top->state_in_shared) && !is_word_of(c->absent, "state_out");
}

int test_find(const gt_op *op, const char *tensor) {
    for (int i = 0; op->tensors[i].name; i++)
        if (!strcmp(op->tensors[i].name, tensor)) return i;
    return -1;
}

int test_is_absent(const test_case *c, const gt_tensor *t) {
    if (t->kind == 'i')
        return test_op_of(c->op)->slot_capacity == 0 ||
               test_get_flag(c, test_op_of(c->op)->slot_capacity) == 0;
    return is_word_of(c->absent, t->name);
}

int test_is_input(const gt_tensor *t, gt_pass pass) { return strchr("Iis", t->use[pass]) != NULL; }
int test_is_output(const gt_tensor *t, gt_pass pass) {
    return strchr("Oogs", t->use[pass]) != NULL;
}

int test_get_flag(const test_case *c, size_t offset) {
    int value = 0;
    if (offset) memcpy(&value, (const char *)&c->args + offset, sizeof value);
    return value;
}

void test_set_flag(test_case *c, size_t offset, int value) {
    memcpy((char *)&c->args + offset, &value, sizeof value);
}

int test_accumulates(const test_case *c, const gt_tensor *t) {
    if (!test_get_flag(c, test_table(c)->accumulate_offset)) return 0;
    return t->use[GT_BACKWARD] == 'g' ||
           (!strcmp(t->name, "dstate_in") && test_get_flag(c, test_op_of(c->op)->state_in_shared));
}

int test_axis(const test_case *c, const gt_tensor *t, char letter) {
    const char *at;
    if (letter == 'B' && t->shape[0] == 'Q') return 0;
    if (letter == 'B' && t->shape[0] == 'S')
        return test_get_flag(c, test_op_of(c->op)->state_in_shared) ? -1 : 0;
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

static int64_t slot_capacity(const test_case *c) {
    size_t offset = test_op_of(c->op)->slot_capacity;
    int64_t n = 0;
    if (offset) memcpy(&n, (const char *)&c->args + offset, sizeof n);
    return n;
}

void test_set_slots(test_case *c, int64_t capacity) {
    memcpy((char *)&c->args + test_op_of(c->op)->slot_capacity, &capacity, sizeof capacity);
}

void test_set_dtype(test_case *c, gt_dtype dtype, gt_dtype companion) {
    const gt_op *op = test_table(c);
    memcpy((char *)&c->args + op->dtype_offset, &dtype, sizeof dtype);
    if (op->companion_offset)
        memcpy((char *)&c->args + op->companion_offset, &companion, sizeof companion);
}

static gt_dtype dtype_at(const test_case *c, size_t offset, gt_dtype missing) {
    gt_dtype dtype = GT_DTYPE_DEFAULT;
    if (offset) memcpy(&dtype, (const char *)&c->args + offset, sizeof dtype);
    return dtype == GT_DTYPE_DEFAULT ? missing : dtype;
}

gt_dtype test_dtype_of(const test_case *c, const gt_tensor *t) {
    const gt_op *op = test_table(c);
    gt_dtype dtype = dtype_at(c, op->dtype_offset, GT_F32);
    if (t->kind == 'w') return dtype_at(c, op->companion_offset, dtype);
    return t->kind == 'x' ? dtype : GT_F32;
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

int64_t test_count(const test_case *c, gt_pass pass, const gt_tensor *t) {
    int64_t size[4], count = 1;
    int rank = test_shape(c, pass, t, size);
    for (int i = 0; i < rank; i++) count *= size[i];
    return count;
}

/* ---- values ---------------------------------------------------------------------------------- */

uint64_t test_next(test_random *r) { /* splitmix64 */
    uint64_t z = r->state += 0x9e3779b97f4a7c15u;
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

/* The generator of one tensor: by its name, so that it draws the same values in every pass. */
static test_random random_of(const test_case *c, const gt_tensor *t) {
    test_random r = {test_seed(c) * 0x100000001b3u + 0xcbf29ce484222325u};
    for (const char *ch = t->name; *ch; ch++)
        r.state = (r.state ^ (uint64_t)(unsigned char)*ch) * 0x100000001b3u;
    test_next(&r);
    return r;
}

static void fill_numbers(const test_case *c, const gt_tensor *t, int64_t count, double *v) {
    test_random r = random_of(c, t);
    test_map map;
    test_fill f = test_fill_of(c, t, &map);
    for (int64_t i = 0; i < count; i++) {
        double x = f.mean + f.spread * test_normal(&r);
        if (map != TEST_AS_IS) x = map == TEST_EXP ? exp(x) : -exp(x);
        if (f.share > 0 && test_uniform(&r) < f.share) x = f.special;
        v[i] = test_round(x, test_dtype_of(c, t));
    }
}

/* Distinct rows in random order; every third batch element is skipped. */
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

void test_inputs(const test_case *c, gt_pass pass, test_values *in) {
    const gt_op *op = test_table(c);
    memset(in, 0, sizeof *in);
    for (int i = 0; op->tensors[i].name; i++) {
        const gt_tensor *t = &op->tensors[i];
        int is_read = test_is_input(t, pass) || (pass == GT_BACKWARD && test_accumulates(c, t));
        int64_t count = test_count(c, pass, t);
        if (!is_read || test_is_absent(c, t)) continue;
        in->of[i] = test_array(count, 0);
        (t->kind == 'i' ? fill_slots : fill_numbers)(c, t, count, in->of[i]);
    }
}

void test_copy(const test_case *c, gt_pass pass, const test_values *from, test_values *to) {
    const gt_op *op = test_table(c);
    memset(to, 0, sizeof *to);
    for (int i = 0; op->tensors[i].name; i++) {
        if (!from->of[i]) continue;
        int64_t count = test_count(c, pass, &op->tensors[i]);
        to->of[i] = test_array(count, 0);
        memcpy(to->of[i], from->of[i], (size_t)count * sizeof(double));
    }
}

void test_free(test_values *v) {
    for (int i = 0; i < TEST_TENSORS; i++) free(v->of[i]);
    memset(v, 0, sizeof *v);
}

/* Copies n positions along an index, of which `from` has from_n and `to` has to_n. */
static void copy_range(const double *from, int64_t from_n, int64_t from_at, double *to,
                       int64_t to_n, int64_t to_at, int64_t n, int64_t outer, int64_t inner) {
    for (int64_t i = 0; i < outer; i++)
        memcpy(to + (i * to_n + to_at) * inner, from + (i * from_n + from_at) * inner,
               (size_t)(n * inner) * sizeof(double));
}

static void split_shape(const int64_t *size, int rank, int axis, int64_t *outer, int64_t *inner) {
    *outer = *inner = 1;
    for (int i = 0; i < axis; i++) *outer *= size[i];
    for (int i = axis + 1; i < rank; i++) *inner *= size[i];
}

void test_cut(const test_case *c, gt_pass pass, const test_values *from, char letter, int64_t at,
              int64_t n, test_values *to) {
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

void test_paste(const test_case *part, const test_case *c, gt_pass pass, const test_values *from,
                char letter, int64_t at, test_values *to) {
    const gt_op *op = test_table(c);
    for (int i = 0; op->tensors[i].name; i++) {
        int64_t size[4], part_size[4], outer, inner;
        int axis = test_axis(c, &op->tensors[i], letter);
        int rank = test_shape(c, pass, &op->tensors[i], size);
        if (!from->of[i] || axis < 0) continue;
        if (!to->of[i]) to->of[i] = test_array(test_count(c, pass, &op->tensors[i]), NAN);
        test_shape(part, pass, &op->tensors[i], part_size);
        split_shape(size, rank, axis, &outer, &inner);
        copy_range(from->of[i], part_size[axis], 0, to->of[i], size[axis], at, part_size[axis],
                   outer, inner);
    }
}

/* ---- placing tensors in memory --------------------------------------------------------------- */

/* Where the elements of one tensor lie. */
typedef struct place {
    int is_used, rank, element;        /* element: bytes of one */
    int64_t count, size[4], stride[4]; /* stride in elements */
    size_t at;                         /* of the first element, in bytes from the start of memory */
} place;

/* One call: the block of memory with all its tensors. */
typedef struct call {
    test_args args;
    place of[TEST_TENSORS];
    size_t bytes;
    char *memory, *before;
    unsigned char *writable; /* per byte */
} call;

/* A buffer that several tensors share as columns: per element size, inputs and outputs. */
typedef struct columns {
    int64_t rows, used, row; /* elements; `used` grows while tensors are placed */
    int element;
    size_t at;
} columns;

static int64_t extent(const place *p) { /* elements from the first to the last */
    int64_t n = 1;
    for (int i = 0; i < p->rank; i++) n += (p->size[i] - 1) * p->stride[i];
    return p->count ? n : 0;
}

static int64_t row_elements(const gt_tensor *t, const place *p) {
    return t->shape[0] == 'M' ? p->size[1] : p->size[2] * (p->rank == 4 ? p->size[3] : 1);
}

/* Sets a tensor's strides in the argument struct as the layout asks, and in the place what they
 * mean: the defaults of gt_stride, written out once more.  Gaps differ from tensor to tensor. */
static void set_strides(const test_case *c, const gt_tensor *t, test_layout layout, int64_t row,
                        test_args *args, place *p) {
    int64_t packed = 1, gap = 1 + (t - test_table(c)->tensors);
    for (int i = p->rank - 1; i >= 0; i--) {
        p->stride[i] = packed;
        packed *= p->size[i];
    }
    if (!t->stride_offset) return;
    if (t->shape[0] == 'M') {
        int64_t s = layout == TEST_GAPS ? p->size[1] + gap : layout == TEST_SLICES ? row : 0;
        memcpy((char *)args + t->stride_offset, &s, sizeof s);
        if (s) p->stride[0] = s;
    } else {
        int64_t T = test_get_size(c, 'T'), H = p->size[2], inner = p->rank == 4 ? p->size[3] : 1;
        gt_stride s = {0, 0, 0};
        if (layout == TEST_TIME_LAST) s.t = inner, s.h = T * inner;
        if (layout == TEST_GAPS) s.h = inner + gap, s.t = H * s.h + gap, s.b = T * s.t + gap;
        if (layout == TEST_SLICES) s.t = row;
        memcpy((char *)args + t->stride_offset, &s, sizeof s);
        p->stride[2] = s.h ? s.h : inner;
        p->stride[1] = s.t ? s.t : H * p->stride[2];
        p->stride[0] = T * p->stride[1] > H * p->stride[2] ? T * p->stride[1] : H * p->stride[2];
        if (s.b) p->stride[0] = s.b;
    }
}

/* Reserves bytes with guards before and after; returns where they start. */
static size_t reserve(call *k, size_t bytes, size_t shift) {
    size_t at = k->bytes + GUARD + shift;
    k->bytes = (at + bytes + GUARD + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return at;
}

/* The shared buffer of a tensor in TEST_SLICES. */
static columns *columns_of(columns all[4], const gt_tensor *t, const place *p, gt_pass pass) {
    return &all[2 * (p->element == 2) + test_is_output(t, pass)];
}

/* The tensor whose memory an output takes over, -1 = none. */
static int shared_with(const test_case *c, gt_pass pass, const call *k, int i) {
    const gt_op *op = test_table(c);
    int other = op->tensors[i].may_equal ? test_find(op, op->tensors[i].may_equal) : -1;
    if (!c->in_place || other < 0 || pass == GT_STEP || !k->of[other].is_used ||
        test_get_flag(c, test_op_of(c->op)->state_in_shared))
        return -1;
    return memcmp(k->of[i].size, k->of[other].size, sizeof k->of[i].size) ? -1 : other;
}

static void place_tensors(const test_case *c, gt_pass pass, test_layout layout, call *k) {
    const gt_op *op = test_table(c);
    columns all[4];
    memset(all, 0, sizeof all);
    for (int i = 0; op->tensors[i].name && layout == TEST_SLICES; i++) {
        const gt_tensor *t = &op->tensors[i];
        place *p = &k->of[i];
        if (!p->is_used || !p->count || !t->stride_offset || shared_with(c, pass, k, i) >= 0)
            continue;
        columns *shared = columns_of(all, t, p, pass);
        shared->element = p->element;
        shared->row += row_elements(t, p);
        shared->rows = p->count / row_elements(t, p);
    }
    for (int i = 0; i < 4; i++) {
        if (!all[i].row) continue;
        all[i].row = all[i].row < c->row ? c->row : all[i].row | 1;
        all[i].at =
            reserve(k, (size_t)(all[i].rows * all[i].row * all[i].element), (size_t)all[i].element);
    }
    for (int i = 0; op->tensors[i].name; i++) {
        const gt_tensor *t = &op->tensors[i];
        place *p = &k->of[i];
        size_t shift = layout == TEST_PACKED || layout == TEST_TIME_LAST ? 0 : (size_t)p->element;
        if (!p->is_used || !p->count || shared_with(c, pass, k, i) >= 0) continue;
        if (layout == TEST_SLICES && t->stride_offset) {
            columns *shared = columns_of(all, t, p, pass);
            set_strides(c, t, layout, shared->row, &k->args, p);
            p->at = shared->at + (size_t)(shared->used * p->element);
            shared->used += row_elements(t, p);
        } else {
            set_strides(c, t, layout, 0, &k->args, p);
            p->at = reserve(k, (size_t)(extent(p) * p->element), shift);
        }
    }
    for (int i = 0; op->tensors[i].name; i++) {
        int other = k->of[i].is_used ? shared_with(c, pass, k, i) : -1;
        if (other < 0) continue;
        memcpy(k->of[i].stride, k->of[other].stride, sizeof k->of[i].stride);
        k->of[i].at = k->of[other].at;
        if (op->tensors[i].stride_offset)
            memcpy((char *)&k->args + op->tensors[i].stride_offset,
                   (char *)&k->args + op->tensors[other].stride_offset,
                   op->tensors[i].shape[0] == 'M' ? sizeof(int64_t) : sizeof(gt_stride));
    }
}

/* Byte offset of the i-th element in packed order. */
static size_t offset_of(const place *p, int64_t i) {
    int64_t at = 0;
    for (int d = p->rank - 1; d >= 0; d--) {
        at += i % p->size[d] * p->stride[d];
        i /= p->size[d];
    }
    return p->at + (size_t)(at * p->element);
}

static void store(char *to, const gt_tensor *t, gt_dtype dtype, int is_double, double value) {
    int32_t i = (int32_t)value;
    float f = (float)value;
    uint16_t h = dtype == GT_BF16 ? gt_f32_to_bf16(f) : gt_f32_to_f16(f);
    if (t->kind == 'i')
        memcpy(to, &i, sizeof i);
    else if (is_double)
        memcpy(to, &value, sizeof value);
    else if (dtype == GT_F32)
        memcpy(to, &f, sizeof f);
    else
        memcpy(to, &h, sizeof h);
}

static double load(const char *from, const gt_tensor *t, gt_dtype dtype, int is_double) {
    int32_t i;
    double d;
    float f;
    uint16_t h;
    if (t->kind == 'i') return memcpy(&i, from, sizeof i), i;
    if (is_double) return memcpy(&d, from, sizeof d), d;
    if (dtype == GT_F32) return memcpy(&f, from, sizeof f), f;
    memcpy(&h, from, sizeof h);
    return dtype == GT_BF16 ? gt_bf16_to_f32(h) : gt_f16_to_f32(h);
}

/* ---- running --------------------------------------------------------------------------------- */

static int element_bytes(const test_case *c, const gt_tensor *t, int is_double) {
    if (t->kind == 'i') return 4;
    return is_double ? 8 : test_dtype_of(c, t) == GT_F32 ? 4 : 2;
}

/* Fills memory: guards, NaN in the outputs, the values of the inputs. */
static void write_memory(const test_runner *r, const test_case *c, gt_pass pass,
                         const test_values *in, call *k) {
    const gt_op *op = test_table(c);
    k->memory = (char *)aligned_alloc(ALIGNMENT, k->bytes);
    k->before = (char *)allocate(k->bytes);
    k->writable = (unsigned char *)allocate(k->bytes);
    if (!k->memory) exit(2);
    memset(k->memory, INPUT_GUARD, k->bytes);
    memset(k->writable, 0, k->bytes);
    for (int i = 0; op->tensors[i].name; i++) {
        const place *p = &k->of[i];
        if (p->is_used && p->count && test_is_output(&op->tensors[i], pass))
            memset(k->memory + p->at - GUARD, OUTPUT_GUARD,
                   (size_t)(extent(p) * p->element) + 2 * GUARD);
    }
    for (int i = 0; op->tensors[i].name; i++) {
        const gt_tensor *t = &op->tensors[i];
        const place *p = &k->of[i];
        int is_output = test_is_output(t, pass);
        if (!p->is_used) continue;
        for (int64_t j = 0; j < p->count; j++) {
            char *at = k->memory + offset_of(p, j);
            if (is_output) memset(k->writable + (at - k->memory), 1, (size_t)p->element);
            if (in->of[i])
                store(at, t, test_dtype_of(c, t), r->is_double, in->of[i][j]);
            else if (shared_with(c, pass, k, i) < 0)
                memset(at, 0xff, (size_t)p->element);
        }
    }
    memcpy(k->before, k->memory, k->bytes);
}

/* Pointers that the pass does not use lead to guard bytes, so that using them shows; the state_in
 * of a step must be NULL or state_out. */
static void set_pointers(const test_case *c, gt_pass pass, call *k) {
    const gt_op *op = test_table(c);
    for (int i = 0; op->tensors[i].name; i++) {
        const gt_tensor *t = &op->tensors[i];
        int from = pass == GT_STEP && !strcmp(t->name, "state_in") ? test_find(op, "state_out") : i;
        const place *place = &k->of[from];
        char *p = NULL;
        if (place->is_used && place->count && (from == i || c->in_place)) p = k->memory + place->at;
        if (t->use[pass] == '-' && t->kind != 'i' && from == i) p = k->memory;
        memcpy((char *)&k->args + t->offset, &p, sizeof p);
    }
}

static int check_untouched(const test_runner *r, const test_case *c, gt_pass pass, const call *k) {
    const gt_op *op = test_table(c);
    size_t at = 0, nearest = k->bytes;
    const char *name = "";
    while (at < k->bytes && (k->writable[at] || k->memory[at] == k->before[at])) at++;
    for (int i = 0; at < k->bytes && op->tensors[i].name; i++) {
        const place *p = &k->of[i];
        size_t end = p->at + (size_t)(extent(p) * p->element);
        size_t distance = at < p->at ? p->at - at : at >= end ? at - end + 1 : 0;
        if (!p->is_used || !p->count || distance >= nearest) continue;
        nearest = distance;
        name = op->tensors[i].name;
    }
    return at == k->bytes ||
           test_check(0, "%s: %s wrote outside of the elements of its outputs, near %s",
                      test_describe(c, pass), r->name, name);
}

int test_run(const test_runner *r, const test_case *c, gt_pass pass, const test_values *in,
             uint32_t want, test_values *out) {
    const test_op *top = test_op_of(c->op);
    const gt_op *op = top->table();
    call k;
    int ok;
    gt_status status;
    memset(&k, 0, sizeof k);
    memset(out, 0, sizeof *out);
    k.args = c->args;
    k.bytes = ALIGNMENT; /* for pointers that are not used */
    if (pass != GT_STEP && top->slot_capacity)
        memset((char *)&k.args + top->slot_capacity, 0, sizeof(int64_t));
    for (int i = 0; op->tensors[i].name; i++) {
        const gt_tensor *t = &op->tensors[i];
        place *p = &k.of[i];
        int is_output = test_is_output(t, pass) && (want >> i & 1) && !test_is_absent(c, t);
        p->is_used = is_output || (test_is_input(t, pass) && in->of[i]);
        p->rank = test_shape(c, pass, t, p->size);
        p->count = test_count(c, pass, t);
        p->element = element_bytes(c, t, r->is_double);
    }
    place_tensors(c, pass, r->is_double ? TEST_PACKED : c->layout, &k);
    write_memory(r, c, pass, in, &k);
    set_pointers(c, pass, &k);
    status = r->run(r, top, pass, &k.args, k.memory, k.bytes);
    ok = status == GT_OK || test_check(0, "%s: %s returned %d: %s", test_describe(c, pass), r->name,
                                       (int)status, gt_last_error());
    ok &= check_untouched(r, c, pass, &k);
    for (int i = 0; op->tensors[i].name; i++) {
        const gt_tensor *t = &op->tensors[i];
        if (!k.of[i].is_used || !test_is_output(t, pass)) continue;
        out->of[i] = test_array(k.of[i].count, 0);
        for (int64_t j = 0; j < k.of[i].count; j++)
            out->of[i][j] =
                load(k.memory + offset_of(&k.of[i], j), t, test_dtype_of(c, t), r->is_double);
    }
    free(k.memory), free(k.before), free(k.writable);
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

static gt_status run_twin(const test_runner *r, const test_op *op, gt_pass pass, const void *args,
                          char *memory, size_t bytes) {
    (void)memory, (void)bytes;
    return (r->is_double ? op->twin64 : op->twin)[pass](args);
}

/* The twins compute in fp32, so an output's error is little more than its rounding: at most 2^-8
 * (bf16) or 2^-11 (fp16), 0.4 of that on average.  States and parameter gradients are fp32. */
const test_runner test_truth = {"the double twin", run_twin, NULL, 1, {{0}, {0}, {0}}};
const test_runner test_twin = {
    "the twin",
    run_twin,
    NULL,
    0,
    {{0, 1e-5, 3e-3, 1e-3}, {0, 1e-5, 1e-5, 1e-5}, {0, 0x1p-22, 0x1p-22, 0x1p-22}}};

/* ---- judging --------------------------------------------------------------------------------- */

static int passed, failed, group_passed, group_failed;

int test_check(int ok, const char *format, ...) {
    if (ok) {
        group_passed++;
        return 1;
    }
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
    printf("%-4s %-14s %-48s %7d checks\n", group_failed ? "FAIL" : "ok", op, what,
           group_passed + group_failed);
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
    static const char *const passes[] = {"forward", "backward", "step"};
    static const char *const dtypes[] = {"", "f32", "bf16", "f16"};
    static const char *const layouts[] = {"packed", "shifted", "time last", "gaps", "slices"};
    static char text[512];
    const gt_op *op = test_table(c);
    gt_dtype dtype = dtype_at(c, op->dtype_offset, GT_F32);
    gt_dtype companion = dtype_at(c, op->companion_offset, dtype);
    size_t n = (size_t)snprintf(text, sizeof text, "%s_%s \"%s\" (", c->op, passes[pass], c->name);
    for (const gt_size *s = op->sizes; s->letter; s++)
        n += (size_t)snprintf(text + n, sizeof text - n, "%s=%lld ", s->name,
                              (long long)test_get_size(c, s->letter));
    n += (size_t)snprintf(text + n, sizeof text - n, "%s", dtypes[dtype]);
    if (op->companion_offset)
        n += (size_t)snprintf(text + n, sizeof text - n, " %s=%s", op->companion_name,
                              dtypes[companion]);
    snprintf(text + n, sizeof text - n, " %s%s seed=%llu)", layouts[c->layout],
             c->in_place ? " in place" : "", (unsigned long long)test_seed(c));
    return text;
}

/* "[b,t,h,n]" of the i-th element */
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

/* Whether `error` is larger than `than`; NaN is larger than all else. */
static int is_worse(double error, double than) { return !isnan(than) && !(error <= than); }

/* Sums of squares over a group of elements. */
typedef struct group_error {
    double error, truth;
    int64_t n;
} group_error;

/* The elements i with equal (i / step) % groups form a group. */
static group_error *sum_groups(const double *got, const double *truth, int64_t count, int64_t step,
                               int64_t groups) {
    group_error *g = (group_error *)allocate((size_t)groups * sizeof *g);
    memset(g, 0, (size_t)groups * sizeof *g);
    for (int64_t i = 0; i < count; i++) {
        group_error *at = &g[i / step % groups];
        at->error += (got[i] - truth[i]) * (got[i] - truth[i]);
        at->truth += truth[i] * truth[i];
        at->n++;
    }
    return g;
}

/* Judges every group; reports the worst element of the first that fails. */
static int compare_groups(const test_runner *r, const test_case *c, gt_pass pass,
                          const gt_tensor *t, const char *kind, const double *got,
                          const double *truth, int64_t step, int64_t groups, double tolerance,
                          double floor) {
    int64_t size[4], count = test_count(c, pass, t), bad = 0, worst = -1;
    int rank = test_shape(c, pass, t, size), ok;
    group_error *g = sum_groups(got, truth, count, step, groups);
    for (; bad < groups; bad++)
        if (!(sqrt(g[bad].error) <=
              tolerance * (sqrt(g[bad].truth) + floor * sqrt((double)g[bad].n))))
            break;
    for (int64_t i = 0; i < count && bad < groups; i++)
        if (i / step % groups == bad &&
            (worst < 0 || is_worse(fabs(got[i] - truth[i]), fabs(got[worst] - truth[worst]))))
            worst = i;
    ok = worst < 0 ? test_check(1, "%s", t->name)
                   : test_check(0,
                                "%s: %s of %s, %s: error %.2e of %.2e, at most %.1e; worst %s: "
                                "%.9g, truth %.9g",
                                test_describe(c, pass), t->name, r->name, kind, sqrt(g[bad].error),
                                sqrt(g[bad].truth), tolerance, index_text(size, rank, worst),
                                got[worst], truth[worst]);
    free(g);
    return ok;
}

static double rms(const double *v, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += v[i] * v[i];
    return n ? sqrt(sum / (double)n) : 0;
}

void test_magnitudes(const test_case *c, const test_values *in, test_values *magnitudes) {
    const gt_op *op = test_table(c);
    test_values absolute;
    uint32_t wanted = 0;
    test_copy(c, GT_BACKWARD, in, &absolute);
    for (int i = 0; op->tensors[i].name; i++) {
        const gt_tensor *t = &op->tensors[i];
        int64_t count = test_count(c, GT_BACKWARD, t);
        if (t->use[GT_BACKWARD] == 'g') wanted |= (uint32_t)1 << i;
        if (!absolute.of[i] || is_word_of("w A dt dt_bias", t->name)) continue;
        for (int64_t j = 0; j < count; j++)
            if (isfinite(absolute.of[i][j])) absolute.of[i][j] = fabs(absolute.of[i][j]);
    }
    test_run(&test_truth, c, GT_BACKWARD, &absolute, wanted, magnitudes);
    test_free(&absolute);
}

int test_compare(const test_runner *r, const test_case *c, gt_pass pass, const test_values *got,
                 const test_values *truth, const test_values *magnitudes) {
    static const double smallest_normal[] = {0, 0x1p-126, 0x1p-126, 0x1p-14};
    static const double half_unit[] = {0, 0x1p-24, 0x1p-8, 0x1p-11};
    const gt_op *op = test_table(c);
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
        tolerance = dtype == GT_F32 ? r->tolerance.parameters[call_dtype]
                                    : r->tolerance.activations[dtype];
        /* in a small tensor the rounding errors may all be large */
        if (count < 64) tolerance = fmax(tolerance, 1.05 * half_unit[dtype]);
        if (magnitudes && magnitudes->of[i])
            floor += r->tolerance.terms[call_dtype] / tolerance * rms(magnitudes->of[i], count);
        typical = floor + rms(y, count);
        row = size[rank - 1];
        ok &= compare_groups(r, c, pass, t, "all", x, y, count, 1, tolerance, floor);
        ok &= compare_groups(r, c, pass, t, "row", x, y, row, count / row, 4 * tolerance, typical);
        ok &= compare_groups(r, c, pass, t, "element", x, y, 1, count, 8 * tolerance, typical);
        if (!t->stride_offset) continue;
        rows = t->shape[0] == 'M' ? size[0] : size[0] * size[1];
        if (rows < 32) floor = typical; /* a channel of few elements may be small by chance */
        ok &= compare_groups(r, c, pass, t, "channel", x, y, 1, count / rows, 2 * tolerance, floor);
    }
    return ok;
}

int test_same(const test_runner *r, const test_case *c, gt_pass pass, const char *what,
              const test_values *got, const test_values *other, double tolerance) {
    const gt_op *op = test_table(c);
    int all_ok = 1;
    for (int i = 0; op->tensors[i].name; i++) {
        const gt_tensor *t = &op->tensors[i];
        const double *a = got->of[i], *b = other->of[i];
        int64_t size[4], count = test_count(c, pass, t), worst = 0;
        int rank = test_shape(c, pass, t, size), ok = 1;
        double error = 0;
        if (!a || !b) continue;
        for (int64_t j = 0; j < count; j++) {
            ok &= a[j] == b[j];
            error += (a[j] - b[j]) * (a[j] - b[j]);
            if (is_worse(fabs(a[j] - b[j]), fabs(a[worst] - b[worst]))) worst = j;
        }
        if (tolerance > 0) ok = sqrt(error) <= tolerance * sqrt((double)count) * rms(b, count);
        all_ok &= test_check(ok, "%s: %s of %s, %s: %s: %.9g, other %.9g", test_describe(c, pass),
                             t->name, r->name, what, count ? index_text(size, rank, worst) : "",
                             count ? a[worst] : 0, count ? b[worst] : 0);
    }
    return all_ok;
}
