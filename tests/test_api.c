/* Tests of bad arguments.  Every bad argument must get the right status, and a message that names function, field and
 * value.  A refused call must write nothing.  The operators' tables (gt_op) give most bad arguments, so they cover all
 * operators and passes.  bad_values in ops/OP.c adds bad arguments of one operator.  A fuzz test draws calls with
 * overlapping memory.  It compares the result of gt_prepare with a search for overlaps among all elements. */
#include "gt_test.h"

#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- counting -------------------------------------------------------------------------------- */

#define check test_check

/* random numbers: splitmix64 */
static uint64_t random_state;
static uint64_t random_bits(void) {
    uint64_t z = (random_state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}
static int64_t random_below(int64_t n) { return (int64_t)(random_bits() % (uint64_t)n); }
static int one_in(int64_t n) { return random_below(n) == 0; }

#define AT(op, field) offsetof(gt_##op##_args, field)

static int kernels_built; /* 0: the build has no kernels, so that the functions gt_OP_... are stubs */

/* ---- fields by offset ------------------------------------------------------------------------ */

static void set_int(void *args, size_t offset, int value) { memcpy((char *)args + offset, &value, sizeof value); }
static void set_int64(void *args, size_t offset, int64_t value) { memcpy((char *)args + offset, &value, sizeof value); }
static void set_pointer(void *args, size_t offset, const void *value) {
    memcpy((char *)args + offset, &value, sizeof value);
}
static void set_field(void *args, test_value x) {
    float f = (float)x.value;
    if (x.type == 'i') set_int(args, x.offset, (int)x.value);
    if (x.type == 'l') set_int64(args, x.offset, (int64_t)x.value);
    if (x.type == 'f') memcpy((char *)args + x.offset, &f, sizeof f);
}
/* Whether the pass uses the tensor's strides.  A state has strides only in a step and in pools: see
 * test_pool_strides. */
static int has_strides(gt_pass pass, const gt_tensor *t) {
    const int moves_columns = gt_stride_count(t) == 3 && pass == GT_STEP && t->shape[0] == 'Q';
    return t->stride_offset && (!test_is_state(t) || moves_columns);
}
/* Whether a tensor can be columns of a shared buffer.  A state cannot, because the buffer has a row for each token. */
static int is_slice(const gt_tensor *t) { return t->stride_offset && !test_is_state(t); }
static void set_stride(void *args, const gt_tensor *t, gt_stride s) {
    if (t->shape[0] == 'M')
        set_int64(args, t->stride_offset, s.t);
    else
        memcpy((char *)args + t->stride_offset, &s, sizeof s);
}
/* Sets the stride of the last index in a gt_stride4. */
static void set_last_stride(void *args, const gt_tensor *t, int64_t n) {
    set_int64(args, t->stride_offset + offsetof(gt_stride4, n), n);
}
static int64_t get_int64(const void *args, size_t offset) {
    int64_t value;
    memcpy(&value, (const char *)args + offset, sizeof value);
    return value;
}
static char *get_pointer(const void *args, const gt_tensor *t) {
    char *value;
    memcpy(&value, (const char *)args + t->offset, sizeof value);
    return value;
}
static int is_output(const gt_tensor *t, gt_pass pass) { return strchr("Oogs", gt_use(t, pass)) != NULL; }
static int is_used(const gt_tensor *t, gt_pass pass) { return gt_use(t, pass) != '-'; }
/* Whether the pass requires the tensor.  A packed call also requires cu_seqlens, and no other call may have it. */
static int is_required(const gt_tensor *t, gt_pass pass) {
    return strchr("IOs", gt_use(t, pass)) != NULL || !strcmp(t->name, "cu_seqlens");
}
static const gt_tensor *find_tensor(const gt_op *op, const char *name) {
    const gt_tensor *t = op->tensors;
    while (t->name && strcmp(t->name, name)) t++;
    return t->name ? t : NULL;
}

/* ---- one valid call, to be spoiled ----------------------------------------------------------- */

enum { ARGS_BYTES = 2048, PLACE = 2048, MAX_TENSORS = 48 };

typedef struct call {
    const test_op *e;
    const gt_op *op;
    gt_pass pass;
    int is_packed;
    _Alignas(16) char args[ARGS_BYTES], good[ARGS_BYTES];
    _Alignas(16) char filled[ARGS_BYTES]; /* the valid call, as gt_prepare fills it in */
    gt_dims dims;
    /* tensor i owns PLACE bytes at i * PLACE, and starts in the middle of them */
    _Alignas(16) char memory[MAX_TENSORS * PLACE], before[MAX_TENSORS * PLACE];
} call;

static const char *const pass_names[] = {"forward",          "backward", "step",          "segment",
                                         "segment_backward", "join",     "join_backward", "workspace"};

static int64_t sample_size(char letter) {
    static const char letters[] = "BTHNPDWMOhp";
    static const int64_t sizes[] = {2, 3, 4, 3, 2, 4, 3, 3, 5, 4, 3}; /* H N = h p, as wkv_ssm mixes them */
    const char *at = strchr(letters, letter);
    return at ? sizes[at - letters] : 3;
}

static size_t offset_of(const call *c, const char *tensor) { return find_tensor(c->op, tensor)->offset; }

static char *place_of(call *c, const gt_tensor *t) { return c->memory + (t - c->op->tensors) * PLACE + PLACE / 2; }

/* The number of bytes from the start of the first element to the end of the last. */
static int64_t span(const gt_view *v) {
    int64_t bytes = v->element;
    for (int i = 0; i < v->rank; i++) bytes += (v->size[i] - 1) * v->stride[i];
    return bytes;
}

static gt_view view_in(call *c, const gt_tensor *t) { return gt_view_of(c->op, t, c->filled, &c->dims); }

/* Fills memory with 16-bit patterns that form small numbers in every dtype. */
static void fill_small(char *memory, size_t bytes) {
    for (size_t i = 0; i + 2 <= bytes; i += 2) {
        uint16_t bits = (uint16_t)(0x3e00u | (random_bits() & 0xffu));
        memcpy(memory + i, &bits, 2);
    }
}

static int takes_packed(const gt_op *op) { return find_tensor(op, "cu_seqlens") != NULL; }

/* The number of elements of a tensor in the valid call.  If the call is not packed, cu_seqlens and seq_count have 0. */
static int64_t count_in(call *c, const gt_tensor *t) { return view_in(c, t).count; }

/* Whether the valid call gives the tensor. */
static int is_in_call(call *c, const gt_tensor *t) {
    const int is_of_pool = c->pass == GT_FORWARD && test_is_word_of("slots starts_zero", t->name); /* see test_pool */
    const int is_of_rounding = !strncmp(t->name, "rounding_", 9); /* see test_rounding */
    return is_used(t, c->pass) && count_in(c, t) > 0 && !is_of_pool && !is_of_rounding;
}

/* Fills in the integers 0, 1, 2 and so on.  They are valid as slots, tokens and commit, and as cu_seqlens of sequences
 * of one token. */
static void fill_integers(char *memory, int64_t count) {
    for (int32_t i = 0; i < count; i++) memcpy(memory + 4 * i, &i, 4);
}

/* Builds a valid call.  variant 0: a plain call.  variant 1: bf16, with w or dt in fp32, and with the optional size
 * set. variant 2: packed sequences. */
static void build_call(call *c, const test_op *e, gt_pass pass, int variant) {
    c->e = e;
    c->op = e->table();
    c->pass = pass;
    memset(c->args, 0, ARGS_BYTES);
    for (const gt_size *s = c->op->sizes; s->letter; s++) set_int64(c->args, s->offset, sample_size(s->letter));
    if (variant == 1) {
        set_int(c->args, c->op->dtype_offset, GT_BF16);
        if (c->op->companion_offset) set_int(c->args, c->op->companion_offset, GT_F32);
        if (c->op->second.name) set_int(c->args, c->op->second.offset, GT_F32);
        if (e->optional_size.offset) set_int64(c->args, e->optional_size.offset, e->optional_size.value);
    }
    if (e->reads_y) set_int(c->args, e->reads_y, 1);
    c->is_packed = variant == 2;
    if (c->is_packed) {
        set_int64(c->args, c->op->sizes[0].offset, 1);
        set_int64(c->args, c->op->fields.seq_capacity, 2);
    }
    gt_status status = gt_prepare(c->op, GT_QUERY, GT_HOST, c->args, c->filled, &c->dims);
    check(status == GT_OK, "%s: sample sizes refused: %s", c->op->name, gt_last_error());
    fill_small(c->memory, sizeof c->memory);
    check(c->op->args_bytes <= ARGS_BYTES, "%s: ARGS_BYTES is too small", c->op->name);
    for (const gt_tensor *t = c->op->tensors; t->name; t++) {
        gt_view v = view_in(c, t);
        check(t - c->op->tensors < MAX_TENSORS, "%s: MAX_TENSORS is too small", c->op->name);
        check(v.count > 0 || strpbrk(t->shape, "CEIU"), "%s: a letter of the shape of %s has no size", c->op->name,
              t->name);
        check(span(&v) <= PLACE / 4, "%s: %s is too large for its place", c->op->name, t->name);
        if (!is_in_call(c, t)) continue;
        set_pointer(c->args, t->offset, place_of(c, t));
        if (t->kind == 'i') fill_integers(place_of(c, t), v.count);
    }
    if (c->is_packed) memcpy(place_of(c, find_tensor(c->op, "seq_count")), &(int32_t){2}, 4);
    memcpy(c->good, c->args, ARGS_BYTES);
    memcpy(c->before, c->memory, sizeof c->memory);
}

static void expect_accepted(call *c, const char *what) {
    gt_status status = c->e->twin[c->pass](c->args);
    check(status == GT_OK, "%s %s, %s: refused: %s", c->op->name, pass_names[c->pass], what, gt_last_error());
    memcpy(c->args, c->good, ARGS_BYTES);
    memcpy(c->memory, c->before, sizeof c->memory);
}

/* Calls gt_prepare as every call of a kernel does. */
static gt_status prepare(call *c, gt_pass pass) {
    _Alignas(16) char filled[ARGS_BYTES];
    gt_dims dims;
    return gt_prepare(c->op, pass, GT_DEVICE, c->args, filled, &dims);
}

/* Checks the status and the message of a refused call. */
static void check_refusal(call *c, gt_target target, gt_pass pass, gt_status got, gt_status want, const char *text) {
    char function[64];
    const char *message = gt_last_error();
    snprintf(function, sizeof function, "gt_%s%s_%s: ", target == GT_HOST ? "ref_" : "", c->op->name, pass_names[pass]);
    check(got == want, "%s'%s' expected: status %d instead of %d (%s)", function, text, got, want, message);
    check(!strncmp(message, function, strlen(function)) && strstr(message, text) != NULL && strlen(message) < 400,
          "%s'%s' expected in: %s", function, text, message);
}

/* Calls the twin and the kernels (without kernels: their argument check).  Both must return `want`, with a message that
 * contains the formatted text.  Memory and arguments must not change. */
static void expect_refused(call *c, gt_status want, const char *format, ...) {
    char text[200], args[ARGS_BYTES];
    int unchanged;
    gt_status status;
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    memcpy(args, c->args, ARGS_BYTES);
    status = c->e->twin[c->pass](c->args);
    check_refusal(c, GT_HOST, c->pass, status, want, text);
    status = kernels_built ? c->op->calls.pass[c->pass](c->args, NULL) : prepare(c, c->pass);
    check_refusal(c, GT_DEVICE, c->pass, status, want, text);
    check(!memcmp(args, c->args, ARGS_BYTES), "%s: '%s': args changed", c->op->name, text);
    unchanged = !memcmp(c->memory, c->before, sizeof c->memory);
    if (!check(unchanged, "%s %s: '%s': memory changed", c->op->name, pass_names[c->pass], text))
        memcpy(c->memory, c->before, sizeof c->memory);
    memcpy(c->args, c->good, ARGS_BYTES);
}

/* Does the same as expect_refused, for calls that the workspace query must refuse, too. */
static void expect_refused_always(call *c, gt_status want, const char *text) {
    check_refusal(c, GT_DEVICE, GT_QUERY, prepare(c, GT_QUERY), want, text);
    expect_refused(c, want, "%s", text);
}

/* ---- pointers -------------------------------------------------------------------------------- */

static void test_null_args(call *c) {
    gt_status status = c->e->twin[c->pass](NULL);
    check_refusal(c, GT_HOST, c->pass, status, GT_ERROR_NULL, "args is NULL");
    _Alignas(16) char filled[ARGS_BYTES];
    gt_dims dims;
    status = gt_prepare(c->op, GT_QUERY, GT_DEVICE, NULL, filled, &dims);
    check_refusal(c, GT_DEVICE, GT_QUERY, status, GT_ERROR_NULL, "args is NULL");
}

static void test_null_pointers(call *c) {
    const gt_tensor *dz;
    for (const gt_tensor *t = c->op->tensors; t->name; t++) {
        if (!is_in_call(c, t)) continue;
        set_pointer(c->args, t->offset, NULL);
        if (test_is(t, "z") && (dz = &c->op->tensors[test_gradient_of(c->op, (int)(t - c->op->tensors))])->name) {
            if (c->pass == GT_BACKWARD) {
                expect_refused(c, GT_ERROR_NULL, "z is NULL");
                set_pointer(c->args, t->offset, NULL);
            }
            set_pointer(c->args, dz->offset, NULL);
        }
        const char *of_gain = strcmp(t->name, "wkv6.y") ? strcmp(t->name, "ssd.y") ? "" : "dgain_ssm" : "dgain_wkv";
        const gt_tensor *dgain = c->pass == GT_BACKWARD ? find_tensor(c->op, of_gain) : NULL;
        if (dgain) { /* the gradient of a gain needs the y that it multiplies */
            expect_refused(c, GT_ERROR_NULL, "%s is NULL, but %s is set", t->name, of_gain);
            set_pointer(c->args, t->offset, NULL);
            set_pointer(c->args, dgain->offset, NULL);
        }
        if (is_required(t, c->pass))
            expect_refused(c, GT_ERROR_NULL, "%s is NULL", t->name);
        else
            expect_accepted(c, t->name);
    }
    for (const gt_tensor *t = c->op->tensors; t->name; t++)
        if (!is_required(t, c->pass)) set_pointer(c->args, t->offset, NULL);
    expect_accepted(c, "all optional pointers NULL");
}

static void test_alignment(call *c) {
    for (const gt_tensor *t = c->op->tensors; t->name; t++) {
        char text[100];
        if (!is_in_call(c, t) || t->kind == 'b') continue;
        snprintf(text, sizeof text, "%s = %p", t->name, (void *)(place_of(c, t) + 1));
        set_pointer(c->args, t->offset, place_of(c, t) + 1);
        expect_refused(c, GT_ERROR_ALIGNMENT, "%s", text);
    }
}

/* ---- sizes, dtypes, flags -------------------------------------------------------------------- */

static void test_sizes(call *c) {
    const int64_t bad[] = {-1, INT64_MIN, GT_MAX_SIZE + 1, INT64_MAX};
    for (const gt_size *s = c->op->sizes; s->letter; s++) {
        char text[100];
        for (int i = 0; i < 4; i++) {
            set_int64(c->args, s->offset, bad[i]);
            snprintf(text, sizeof text, "%s = %lld", s->name, (long long)bad[i]);
            expect_refused_always(c, GT_ERROR_SIZE, text);
        }
        if (s->min == 0) continue;
        set_int64(c->args, s->offset, s->min - 1);
        snprintf(text, sizeof text, "%s = %lld: must be at least %lld", s->name, (long long)s->min - 1,
                 (long long)s->min);
        expect_refused_always(c, GT_ERROR_SIZE, text);
    }
}

/* Tests pairs of sizes that are valid each, but whose product is too large. */
static void test_huge_sizes(call *c) {
    for (const gt_size *s = c->op->sizes; s->letter; s++) {
        for (const gt_size *other = c->op->sizes; other < s; other++) {
            if (s->letter == 'W' || other->letter == 'W') continue;
            if (gt_is_join(c->pass) && (s->letter == 'T' || other->letter == 'T')) continue; /* a join does not use T */
            /* sizes that belong to different ones of two joined operators: no tensor has both */
            if (s->letter >= 'a' && other->letter < 'a' && !strchr("BT", other->letter)) continue;
            set_int64(c->args, s->offset, GT_MAX_SIZE);
            set_int64(c->args, other->offset, GT_MAX_SIZE);
            gt_status status = c->e->twin[c->pass](c->args);
            memcpy(c->args, c->good, ARGS_BYTES);
            check(status == GT_ERROR_SIZE || (status == GT_ERROR_UNSUPPORTED && c->pass == GT_STEP),
                  "%s %s, %s and %s = 2^40: status %d (%s)", c->op->name, pass_names[c->pass], s->name, other->name,
                  status, gt_last_error());
        }
    }
}

/* ---- int8 weights ---- */

static void expect_no_weight(const void *weight, gt_dtype dtype, int64_t O, int64_t D, gt_status want,
                             const char *text) {
    int8_t q[8], before[8];
    float scale[2] = {7, 7};
    memset(q, 55, sizeof q), memcpy(before, q, sizeof q);
    const gt_status status = gt_quantize_int8(weight, dtype, O, D, q, scale);
    check(status == want && !strncmp(gt_last_error(), "gt_quantize_int8: ", 18) && strstr(gt_last_error(), text),
          "'%s' expected: %d, %s", text, status, gt_last_error());
    check(!memcmp(q, before, sizeof q) && scale[0] == 7 && scale[1] == 7, "%s: the call writes", text);
}

static void test_quantize(void) {
    const float infinite[] = {1, 2, 3, 4, 5, INFINITY, 7, 8}, not_a_number[] = {1, NAN};
    const uint16_t half[] = {0x3f80, 0x7f80}; /* 1 and infinity in bf16 */
    /* the largest number 127 gives the scale 1, so the other numbers show rounding: ties go to even */
    const float ties[] = {127, 0.5f, 1.5f, -2.5f, 126.5f, -126.5f, -127, 3.49f};
    const int8_t even[] = {127, 0, 2, -2, 126, -126, -127, 3};
    /* a row of zeros, and a row whose scale would be below 2^-126 */
    const float rows[] = {0, -0.0f, 0, 0, 1e-40f, -1e-40f, 0, 0};
    const int8_t zeros[8] = {0};
    int8_t q[512];
    float scale[512], weight[512];
    check(gt_quantize_int8(ties, GT_F32, 1, 8, q, scale) == GT_OK && !memcmp(q, even, 8) && scale[0] == 1, "ties: %s",
          gt_last_error());
    memset(q, 55, sizeof q);
    check(gt_quantize_int8(rows, GT_DTYPE_DEFAULT, 2, 4, q, scale) == GT_OK && !memcmp(q, zeros, 8) && scale[0] == 0 &&
              scale[1] == 0,
          "a row of zeros has the scale %g", scale[0]);
    for (int dtype = GT_F32; dtype <= GT_F16; dtype++) {
        uint16_t bits[512];
        double worst = 0;
        for (int i = 0; i < 512; i++) {
            const float x = (float)(1 + i / 8) * ((float)random_below(2001) - 1000) * 1e-3f;
            bits[i] = dtype == GT_BF16 ? gt_f32_to_bf16(x) : gt_f32_to_f16(x);
            weight[i] = dtype == GT_F32 ? x : dtype == GT_BF16 ? gt_bf16_to_f32(bits[i]) : gt_f16_to_f32(bits[i]);
        }
        const void *const data = dtype == GT_F32 ? (const void *)weight : bits;
        check(gt_quantize_int8(data, (gt_dtype)dtype, 64, 8, q, scale) == GT_OK, "dtype %d: %s", dtype,
              gt_last_error());
        for (int i = 0; i < 512; i++) {
            const double error = fabs((double)q[i] * scale[i / 8] - weight[i]) / scale[i / 8];
            worst = error > worst ? error : worst;
            float largest = 0;
            for (int k = i / 8 * 8; k < i / 8 * 8 + 8; k++) largest = fmaxf(largest, fabsf(weight[k]));
            check(scale[i / 8] == largest / 127.0f, "row %d: the scale %g is not %g", i / 8, scale[i / 8],
                  largest / 127.0f);
        }
        check(worst <= 0.50001 && worst > 0.45, "dtype %d: an error of %g steps", dtype, worst);
    }
    expect_no_weight(infinite, GT_F32, 2, 4, GT_ERROR_VALUE, "weight[1][1] is infinite or NaN");
    expect_no_weight(not_a_number, GT_F32, 1, 2, GT_ERROR_VALUE, "weight[0][1] is infinite or NaN");
    expect_no_weight(half, GT_BF16, 2, 1, GT_ERROR_VALUE, "weight[1][0] is infinite or NaN");
    expect_no_weight(ties, (gt_dtype)4, 1, 8, GT_ERROR_DTYPE, "dtype = 4: must be");
    expect_no_weight(ties, GT_F32, 0, 8, GT_ERROR_SIZE, "O = 0: must be at least 1");
    expect_no_weight(ties, GT_F32, 1, -1, GT_ERROR_SIZE, "D = -1: must be at least 1");
    expect_no_weight(ties, GT_F32, (int64_t)1 << 40, 1 << 10, GT_ERROR_SIZE, "weight has more than 2^48 elements");
    expect_no_weight(NULL, GT_F32, 1, 8, GT_ERROR_NULL, "weight is NULL");
    check(gt_quantize_int8(ties, GT_F32, 1, 8, NULL, scale) == GT_ERROR_NULL &&
              strstr(gt_last_error(), "weight_int8 is NULL"),
          "%s", gt_last_error());
    check(gt_quantize_int8(ties, GT_F32, 1, 8, q, NULL) == GT_ERROR_NULL &&
              strstr(gt_last_error(), "weight_scale is NULL"),
          "%s", gt_last_error());
    /* a step takes at most 64 rows, and the other passes do not take an int8 weight */
    gt_rmsnorm_linear_args a = {.M = 65, .D = 8, .O = 1, .x = weight, .y = scale, .dy = scale};
    a.weight_int8 = q, a.weight_scale = scale;
    check(gt_ref_rmsnorm_linear_step(&a) == GT_ERROR_SIZE && strstr(gt_last_error(), "M = 65: must be 0 to 64"), "%s",
          gt_last_error());
    check(gt_ref_rmsnorm_linear_forward(&a) == GT_ERROR_NULL &&
              strstr(gt_last_error(), "only the step function reads weight_int8"),
          "%s", gt_last_error());
    check(gt_ref_rmsnorm_linear_backward(&a) == GT_ERROR_NULL &&
              strstr(gt_last_error(), "only the step function reads weight_int8"),
          "%s", gt_last_error());
}

/* ---- calls without tokens: each size must be in its range, but products of sizes have no limit --- */

enum { MANY = 1 << 29 };
/* `in` lies directly before `out`.  If a function wrongly takes `in` for a larger array, its check of overlaps finds
 * that `in` reaches into `out`, and the call fails. */
static struct { float in[4], out[4]; } no_tokens = {{1, 2, 3, 4}, {0}};
static const int64_t NEARLY_ALL = GT_MAX_SIZE - 67 * 64;

static void expect_ok(gt_status status, const char *what) {
    check(status == GT_OK, "no tokens: %s: %s", what, gt_last_error());
}

/* Checks the status, and that the call wrote n numbers (1 or 2) to `out`: `first` and `second`.  The other numbers must
 * still be 9.  Then sets all numbers to 9 again. */
static void expect_numbers(gt_status status, const char *what, int n, float first, float second) {
    expect_ok(status, what);
    check(no_tokens.out[0] == first && no_tokens.out[1] == (n > 1 ? second : 9) && no_tokens.out[2] == 9,
          "no tokens: %s: %g, %g, %g", what, no_tokens.out[0], no_tokens.out[1], no_tokens.out[2]);
    for (int i = 0; i < 4; i++) no_tokens.out[i] = 9;
}

static void test_no_tokens_wkv6(void) {
    gt_wkv6_args a = {.T = NEARLY_ALL, .H = 1, .N = 1 << 14, .V = 1 << 14};
    expect_ok(gt_ref_wkv6_forward(&a), "wkv6");
    expect_ok(gt_ref_wkv6_backward(&a), "wkv6, gradients");
    a.T = a.N = a.V = MANY;
    expect_ok(gt_ref_wkv6_forward(&a), "wkv6, 2^29");
    expect_ok(gt_ref_wkv6_backward(&a), "wkv6, 2^29, gradients");
    a.T = a.H = a.N = a.V = GT_MAX_SIZE;
    expect_ok(gt_ref_wkv6_forward(&a), "wkv6, 2^40");
    expect_ok(gt_ref_wkv6_backward(&a), "wkv6, 2^40, gradients");
    a.T = 0, a.B = GT_MAX_SIZE;
    expect_ok(gt_ref_wkv6_forward(&a), "wkv6, no time");
    expect_ok(gt_ref_wkv6_backward(&a), "wkv6, no time, gradients");
    a = (gt_wkv6_args){.B = 2, .H = 1, .N = 1, .state_in = no_tokens.in, .state_out = no_tokens.out};
    expect_numbers(gt_ref_wkv6_forward(&a), "states of wkv6", 2, 1, 2);
    a.state_in_shared = 1;
    expect_numbers(gt_ref_wkv6_forward(&a), "a shared state of wkv6", 2, 1, 1);
    a.dstate_out = no_tokens.in, a.dstate_in = no_tokens.out, a.accumulate = 1;
    expect_numbers(gt_ref_wkv6_backward(&a), "gradient of a shared state of wkv6", 1, 9 + 1 + 2, 0);
    a = (gt_wkv6_args){.T = GT_MAX_SIZE, .H = 1, .N = 2, .du = no_tokens.out};
    expect_numbers(gt_ref_wkv6_backward(&a), "du", 2, 0, 0);
}

static void test_no_tokens_ssm(void) {
    gt_ssd_args a = {.T = NEARLY_ALL, .H = 2, .P = GT_MAX_SIZE, .N = 1 << 14, .A = no_tokens.in};
    gt_selective_scan_args s = {.T = NEARLY_ALL, .D = 1 << 14, .N = 1 << 14, .A = no_tokens.in};
    expect_ok(gt_ref_ssd_forward(&a), "ssd");
    a.dA = no_tokens.out;
    expect_numbers(gt_ref_ssd_backward(&a), "dA of ssd", 2, 0, 0);
    a = (gt_ssd_args){
        .B = 2, .H = 1, .P = 1, .N = 1, .A = no_tokens.in, .dstate_out = no_tokens.in, .dstate_in = no_tokens.out};
    expect_numbers(gt_ref_ssd_backward(&a), "gradients of states of ssd", 2, 1, 2);
    expect_ok(gt_ref_selective_scan_forward(&s), "selective_scan");
    s.dDskip = no_tokens.out, s.D = s.N = 2;
    expect_numbers(gt_ref_selective_scan_backward(&s), "dDskip of selective_scan", 2, 0, 0);
}

static void test_no_tokens_rows(void) {
    gt_conv1d_args c = {.T = NEARLY_ALL, .D = GT_MAX_SIZE, .W = 4, .weight = no_tokens.in};
    gt_rmsnorm_linear_args l = {.D = GT_MAX_SIZE, .O = 1 << 8, .weight = no_tokens.in};
    gt_norm_mix_args m = {.D = GT_MAX_SIZE};
    gt_norm_gate_args g = {.D = GT_MAX_SIZE};
    expect_ok(gt_ref_conv1d_forward(&c), "conv1d");
    expect_ok(gt_ref_conv1d_backward(&c), "conv1d, gradients");
    expect_ok(gt_ref_rmsnorm_linear_forward(&l), "rmsnorm_linear");
    expect_ok(gt_ref_rmsnorm_linear_backward(&l), "rmsnorm_linear, gradients");
    expect_ok(gt_ref_norm_mix_forward(&m), "norm_mix");
    expect_ok(gt_ref_norm_mix_backward(&m), "norm_mix, gradients");
    expect_ok(gt_ref_norm_gate_forward(&g), "norm_gate");
    expect_ok(gt_ref_norm_gate_backward(&g), "norm_gate, gradients");
    l.D = l.O = 2, l.dgamma = no_tokens.out;
    expect_numbers(gt_ref_rmsnorm_linear_backward(&l), "dgamma", 2, 0, 0);
    m.D = 2, m.dgain_b = no_tokens.out;
    expect_numbers(gt_ref_norm_mix_backward(&m), "dgain_b", 2, 0, 0);
    g.D = 2, g.dbeta = no_tokens.out;
    expect_numbers(gt_ref_norm_gate_backward(&g), "dbeta", 2, 0, 0);
    c.D = 1, c.dbias = no_tokens.out;
    expect_numbers(gt_ref_conv1d_backward(&c), "dbias of conv1d", 1, 0, 0);
}

/* ---- how many elements a tensor may have ---- */

/* Checks that the sizes in *args are accepted, and refused if `field` is larger by one. */
static void check_limit_in(const gt_op *op, gt_pass pass, const void *args, size_t field, const char *text) {
    _Alignas(16) char larger[ARGS_BYTES], filled[ARGS_BYTES];
    gt_dims dims;
    memcpy(larger, args, op->args_bytes);
    gt_status status = gt_prepare(op, pass, GT_DEVICE, larger, filled, &dims);
    check(status == (pass == GT_QUERY ? GT_OK : GT_ERROR_NULL), "%s: the call before '%s': status %d (%s)", op->name,
          text, status, gt_last_error());
    set_int64(larger, field, get_int64(larger, field) + 1);
    status = gt_prepare(op, pass, GT_DEVICE, larger, filled, &dims);
    check(status == GT_ERROR_SIZE && strstr(gt_last_error(), text), "'%s' expected: status %d (%s)", text, status,
          gt_last_error());
}

/* Calls check_limit_in for the query, forward and backward. */
static void check_limit(const gt_op *op, const void *args, size_t field, const char *text) {
    check_limit_in(op, GT_QUERY, args, field, text);
    check_limit_in(op, GT_FORWARD, args, field, text);
    check_limit_in(op, GT_BACKWARD, args, field, text);
}

#define CHECK_LIMIT(op, field, text, ...) check_limit(gt_op_##op(), &(gt_##op##_args){__VA_ARGS__}, AT(op, field), text)
#define K(n) ((int64_t)1 << (n))

static const int32_t any_borders[2];
#define PACKED(capacity) .cu_seqlens = any_borders, .seq_capacity = (capacity)

static void test_limits_wkv6(void) {
    CHECK_LIMIT(wkv6, B, "B = 1025, T = 1048576, H = 1024, N = 256: r has more than 2^48 elements", .B = K(10),
                .T = K(20), .H = K(10), .N = 256, .V = 1);
    CHECK_LIMIT(wkv6, H, "B = 1, T = 1099511627776, H = 2, N = 256: r has", .B = 1, .T = K(40), .H = 1, .N = 256);
    CHECK_LIMIT(wkv6, V, "B = 1024, T = 1048576, H = 1024, V = 257: v has", .B = K(10), .T = K(20), .H = K(10), .N = 1,
                .V = 256);
    CHECK_LIMIT(wkv6, seq_capacity, "seq_capacity = 65537, H = 65536, N = 256, V = 256: state_in has", .B = 1,
                .T = K(16), .H = K(16), .N = 256, PACKED(K(16)));
    CHECK_LIMIT(wkv6, H, "seq_capacity = 2147483646, H = 33, N = 64, V = 64: state_in has", .B = 1, .T = INT32_MAX,
                .H = 32, .N = 64, PACKED(INT32_MAX - 1));
    gt_wkv6_args a = {.B = 1, .T = 1, .H = 32, .N = 64, .slots = any_borders, .slot_capacity = K(31)};
    check_limit_in(gt_op_wkv6(), GT_STEP, &a, AT(wkv6, slot_capacity),
                   "slot_capacity = 2147483649, H = 32, N = 64, V = 64: state_out has");
    /* 2^16 sequences of 2^31 tokens are allowed in a join, because a join reads no tensor over tokens */
    a = (gt_wkv6_args){.B = K(16), .T = K(31), .H = 32, .N = 64, .pieces = K(15)};
    check_limit_in(gt_op_wkv6(), GT_JOIN, &a, AT(wkv6, pieces),
                   "pieces = 32769, B = 65536, size = 2048, V = 64: piece_states has");
    /* in a call without tokens, only tensors that the caller gives are counted */
    a = (gt_wkv6_args){.H = K(20), .N = K(20), .V = K(20), .state_in_shared = 1, .state_in = no_tokens.in};
    check(gt_ref_wkv6_forward(&a) == GT_ERROR_SIZE &&
              strstr(gt_last_error(),
                     "B = 1, H = 1048576, N = 1048576, V = 1048576: state_in has more than 2^48 elements"),
          "message: %s", gt_last_error());
}

static void test_limits_ssm(void) {
    CHECK_LIMIT(ssd, T, "B = 1, T = 4294967297, H = 256, P = 256: x has", .B = 1, .T = K(32), .H = 256, .P = 256,
                .N = 1);
    CHECK_LIMIT(ssd, N, "B = 1, T = 4294967296, G = 256, N = 257: Bm has", .B = 1, .T = K(32), .H = 256, .P = 1,
                .G = 256, .N = 256);
    CHECK_LIMIT(ssd, seq_capacity, "seq_capacity = 131073, H = 32768, P = 256, N = 256: state_in has", .B = 1,
                .T = K(16), .H = K(15), .P = 256, .N = 256, PACKED(K(17)));
    CHECK_LIMIT(selective_scan, T, "B = 1, T = 68719476737, D = 4096: u has", .B = 1, .T = K(36), .D = K(12), .N = 1);
    CHECK_LIMIT(selective_scan, N, "B = 1, T = 68719476736, G = 256, N = 17: Bm has", .B = 1, .T = K(36), .D = 256,
                .G = 256, .N = 16);
    CHECK_LIMIT(selective_scan, N, "seq_capacity = 2147483646, D = 8192, N = 17: state_in has", .B = 1, .T = INT32_MAX,
                .D = K(13), .N = 16, PACKED(INT32_MAX - 1));
}

static void test_limits_others(void) {
    CHECK_LIMIT(conv1d, B, "B = 257, T = 1099511627776, D = 1: x has", .B = 256, .T = K(40), .D = 1, .W = 4);
    CHECK_LIMIT(conv1d, D, "seq_capacity = 2147483646, D = 131073, W - 1 = 1: state_out has", .B = 1, .T = 2,
                .D = K(17), .W = 2, PACKED(INT32_MAX - 1));
    CHECK_LIMIT(conv_ssd, T, "B = 1, T = 16777217, H P + 2 G N = 16777216: xBC has", .B = 1, .T = K(24), .H = 1,
                .P = K(24) - 2, .N = 1, .W = 4);
    CHECK_LIMIT(conv_ssd, P, "H = 1, P = 1099511627775, G = 1, N = 1: H P + 2 G N is more than 2^40", .B = 1, .T = 1,
                .H = 1, .P = K(40) - 2, .N = 1, .W = 4);
    CHECK_LIMIT(conv_ssd, seq_capacity, "seq_capacity = 131073, H = 32768, P = 256, N = 256: state_in has", .B = 1,
                .T = K(16), .H = K(15), .P = 256, .N = 256, .W = 2, PACKED(K(17)));
    CHECK_LIMIT(wkv_ssm, wkv6.H, "B = 1, T = 1048576, wkv6.H = 1048577, wkv6.N = 256: wkv6.r has", .B = 1, .T = K(20),
                .wkv6 = {.H = K(20), .N = 256, .V = 1}, .ssd = {.H = K(20), .P = 256, .N = 1});
    CHECK_LIMIT(wkv_ssm, ssd.N, "seq_capacity = 65536, ssd.H = 65536, ssd.P = 256, ssd.N = 257: ssd.state_in has",
                .B = 1, .T = K(16), .wkv6 = {.H = 32, .N = 64}, .ssd = {.H = K(16), .P = 256, .N = 256}, PACKED(K(16)));
    CHECK_LIMIT(rmsnorm_linear, M, "M = 16777217, D = 16777216: x has", .M = K(24), .D = K(24), .O = 1);
    CHECK_LIMIT(rmsnorm_linear, O, "M = 16777216, O = 16777217: y has", .M = K(24), .D = 1, .O = K(24));
    CHECK_LIMIT(rmsnorm_linear, O, "O = 16777217, D = 16777216: weight has", .M = 1, .D = K(24), .O = K(24));
    CHECK_LIMIT(norm_mix, M, "M = 16777217, D = 16777216: a has", .M = K(24), .D = K(24));
    CHECK_LIMIT(norm_gate, D, "M = 16777216, D = 16777217: x has", .M = K(24), .D = K(24));
}

static void test_no_tokens(void) {
    for (int i = 0; i < 4; i++) no_tokens.out[i] = 9;
    test_no_tokens_wkv6();
    test_no_tokens_ssm();
    test_no_tokens_rows();
    test_limits_wkv6();
    test_limits_ssm();
    test_limits_others();
}

static void test_empty(call *c) {
    for (const gt_size *s = c->op->sizes; s->letter; s++) {
        if (s->min > 0 || (c->is_packed && s->letter == 'B')) continue;
        set_int64(c->args, s->offset, 0);
        if (c->is_packed) memset(place_of(c, find_tensor(c->op, "cu_seqlens")), 0, 3 * 4);
        for (const gt_tensor *t = c->op->tensors; t->name; t++)
            if (strchr(t->shape, s->letter) || (s->letter == 'B' && strpbrk(t->shape, "SQ")))
                set_pointer(c->args, t->offset, NULL);
        expect_accepted(c, s->name);
    }
}

static void test_companion(call *c, const char *name, size_t offset) {
    const int bad[] = {-1, 4, 99};
    char text[100];
    for (int i = 0; i < 3; i++) {
        set_int(c->args, offset, bad[i]);
        snprintf(text, sizeof text, "%s = %d", name, bad[i]);
        expect_refused_always(c, GT_ERROR_DTYPE, text);
    }
    for (int dtype = GT_F32; dtype <= GT_F16; dtype++) {
        for (int companion = GT_BF16; companion <= GT_F16; companion++) {
            if (companion == dtype) continue;
            set_int(c->args, c->op->dtype_offset, dtype);
            set_int(c->args, offset, companion);
            snprintf(text, sizeof text, "%s = %d", name, companion);
            expect_refused_always(c, GT_ERROR_DTYPE, text);
        }
    }
}

/* Tests a dtype field that only a step may set. */
static void test_dtype_of_steps(call *c, const char *name, size_t offset) {
    const int takes_int8 = c->op->of_steps.scale && offset == c->op->of_steps.state; /* see test_scale */
    const int bad[] = {-1, takes_int8 ? 5 : 4, 99};
    char text[100];
    for (int i = 0; i < 3; i++) {
        set_int(c->args, offset, bad[i]);
        snprintf(text, sizeof text, "%s = %d: must be 0, GT_F32, GT_BF16 or GT_F16%s", name, bad[i],
                 takes_int8 ? ", or GT_INT8" : "");
        expect_refused_always(c, GT_ERROR_DTYPE, text);
    }
    for (int dtype = GT_F32; dtype <= GT_F16; dtype++) {
        set_int(c->args, offset, dtype);
        const int is_state = offset != c->op->of_steps.parameter;
        const gt_state_passes passes = is_state ? c->op->of_steps.passes : GT_STATES_OF_STEP;
        const int in_step = passes != GT_STATES_OF_FORWARD, in_forward = passes != GT_STATES_OF_STEP;
        if (dtype == GT_F32 || (c->pass == GT_STEP && in_step) || (c->pass == GT_FORWARD && in_forward))
            expect_accepted(c, name);
        else
            expect_refused(c, GT_ERROR_DTYPE, "%s = %d: must be 0 or GT_F32; only %s", name, dtype,
                           !in_step     ? "forward takes 16 bits"
                           : in_forward ? "forward and the step function take 16 bits"
                                        : "the step function takes 16 bits");
    }
}

static void test_dtypes(call *c) {
    const int bad[] = {-1, 4, 99};
    char text[100];
    for (int i = 0; i < 3; i++) {
        set_int(c->args, c->op->dtype_offset, bad[i]);
        snprintf(text, sizeof text, "dtype = %d", bad[i]);
        expect_refused_always(c, GT_ERROR_DTYPE, text);
    }
    if (c->op->companion_offset) test_companion(c, c->op->companion_name, c->op->companion_offset);
    if (c->op->second.name) test_companion(c, c->op->second.name, c->op->second.offset);
    if (c->op->of_steps.state) test_dtype_of_steps(c, "state_dtype", c->op->of_steps.state);
    if (c->op->of_steps.conv_state) test_dtype_of_steps(c, "conv_state_dtype", c->op->of_steps.conv_state);
    if (c->op->of_steps.parameter) test_dtype_of_steps(c, c->op->of_steps.parameter_name, c->op->of_steps.parameter);
}

static void test_bad_values(call *c) {
    set_int(c->args, c->op->accumulate_offset, -1);
    expect_refused_always(c, GT_ERROR_VALUE, "accumulate = -1");
    set_int(c->args, c->op->accumulate_offset, 2);
    expect_refused_always(c, GT_ERROR_VALUE, "accumulate = 2");
    for (const test_bad_value *bad = c->e->bad_values; bad->text; bad++) {
        for (const test_value *x = bad->set; x < bad->set + 3 && x->type; x++) set_field(c->args, *x);
        expect_refused_always(c, bad->status, bad->text);
    }
}

/* ---- strides --------------------------------------------------------------------------------- */

static void refuse_stride(call *c, const gt_tensor *t, gt_stride s) {
    char text[200];
    if (t->shape[0] == 'M')
        snprintf(text, sizeof text, "%s_stride = %lld:", t->name, (long long)s.t);
    else
        snprintf(text, sizeof text, "%s_stride = {%lld, %lld, %lld%s}:", t->name, (long long)s.b, (long long)s.t,
                 (long long)s.h, gt_stride_count(t) == 4 ? ", 0" : "");
    set_stride(c->args, t, s);
    expect_refused_always(c, GT_ERROR_STRIDE, text);
}

static void test_bad_strides(call *c) {
    const int64_t bad[] = {-1, INT64_MIN, INT64_MAX, (int64_t)1 << 57};
    if (gt_is_join(c->pass)) return; /* no tensor of a join has strides */
    for (const gt_tensor *t = c->op->tensors; t->name; t++) {
        if (!has_strides(c->pass, t)) continue;
        for (int i = 0; i < 4; i++) {
            refuse_stride(c, t, (gt_stride){0, bad[i], 0});
            if (t->shape[0] == 'M') continue;
            refuse_stride(c, t, (gt_stride){bad[i], 0, 0});
            refuse_stride(c, t, (gt_stride){0, 0, bad[i]});
        }
        if (t->shape[0] == 'M') continue;
        /* the given stride is allowed, but makes the default of another stride too large */
        refuse_stride(c, t, (gt_stride){0, 0, (int64_t)1 << 55});
        refuse_stride(c, t, (gt_stride){0, (int64_t)1 << 55, 0});
    }
}

/* Tests the stride of the last index, for tensors that have this stride. */
static void test_last_strides(call *c) {
    const int64_t bad[] = {-1, INT64_MIN, INT64_MAX, (int64_t)1 << 57};
    for (const gt_tensor *t = c->op->tensors; t->name; t++) {
        const int64_t T = c->dims.n['T' - 'A'];
        if (gt_stride_count(t) != 4) continue;
        for (int i = 0; i < 4; i++) {
            char text[100];
            snprintf(text, sizeof text, "%s_stride = {0, 0, 0, %lld}:", t->name, (long long)bad[i]);
            set_last_stride(c->args, t, bad[i]);
            expect_refused_always(c, GT_ERROR_STRIDE, text);
        }
        /* too large for the last index, and for h, whose default follows from this stride */
        set_last_stride(c->args, t, (int64_t)1 << 55);
        expect_refused_always(c, GT_ERROR_STRIDE, "_stride = {0, 0, 0, 36028797018963968}:");
        if (!is_in_call(c, t)) continue;
        for (int is_short = 0; is_short < 2; is_short++) {
            set_stride(c->args, t, (gt_stride){0, 1, 0});
            set_last_stride(c->args, t, T - is_short);
            if (is_short && is_output(t, c->pass))
                expect_refused(c, GT_ERROR_STRIDE, "%s_stride = ", t->name);
            else
                expect_accepted(c, t->name);
        }
    }
}

/* Tests strides with which elements of a tensor overlap each other.  A pass may read such a tensor, but not write
 * it. */
static void test_self_overlap(call *c) {
    for (const gt_tensor *t = c->op->tensors; t->name; t++) {
        static const gt_stride shifted[] = {{0, 1, 0}, {1, 0, 0}, {0, 0, 1}};
        if (!has_strides(c->pass, t) || !is_in_call(c, t)) continue;
        for (int i = 0; i < (t->shape[0] == 'M' ? 1 : 3); i++) {
            if (i == 2 && !t->shape[3]) continue; /* {.h = 1} is the default of a tensor without a fourth index */
            if (i > 0 && c->dims.n[t->shape[i == 1 ? 0 : 2] - 'A'] == 1) continue;
            set_stride(c->args, t, shifted[i]);
            if (is_output(t, c->pass))
                expect_refused(c, GT_ERROR_STRIDE, "%s_stride = ", t->name);
            else
                expect_accepted(c, t->name);
        }
    }
}

/* ---- overlap --------------------------------------------------------------------------------- */

/* Expects a refusal because two tensors overlap.  The message must name first the output that comes first in the
 * table. */
static void expect_overlap(call *c, const gt_tensor *out, const gt_tensor *other) {
    if (is_output(other, c->pass) && other < out)
        expect_refused(c, GT_ERROR_OVERLAP, "%s overlaps %s", other->name, out->name);
    else
        expect_refused(c, GT_ERROR_OVERLAP, "%s overlaps %s", out->name, other->name);
}

static char *align_down(char *p, int64_t bytes) { return p - (uintptr_t)p % (uintptr_t)bytes; }

/* Places `out` on the first byte of `other`, on its last byte, and next to it on either side. */
static void test_overlap_pair(call *c, const gt_tensor *out, const gt_tensor *other) {
    gt_view v = view_in(c, out), w = view_in(c, other);
    char *at = place_of(c, other);
    int may_equal = out->may_equal && !strcmp(out->may_equal, other->name);
    set_pointer(c->args, out->offset, at);
    if (may_equal)
        expect_accepted(c, out->name);
    else
        expect_overlap(c, out, other);
    set_pointer(c->args, out->offset, align_down(at + span(&w) - 1, v.element));
    expect_overlap(c, out, other);
    set_pointer(c->args, out->offset, at - span(&v) + v.element);
    expect_overlap(c, out, other);
    set_pointer(c->args, out->offset, align_down(at + span(&w) - 1, v.element) + v.element);
    expect_accepted(c, out->name);
    set_pointer(c->args, out->offset, at - span(&v));
    expect_accepted(c, out->name);
}

static int64_t round_up4(int64_t bytes) { return (bytes + 3) / 4 * 4; }

/* The number of bytes in one row of a tensor [B,T,...] or [M,...]. */
static int64_t row_bytes(const call *c, const gt_tensor *t, int element) {
    int64_t n = element;
    for (const char *s = t->shape + (t->shape[0] == 'M' ? 1 : 2); *s; s++) n *= c->dims.n[*s - 'A'];
    return n;
}

/* Makes both tensors columns of one buffer.  after: 1 if `out` comes after `other`, 0 if `out` comes first.  Moves
 * `out` by `shift` elements to the right, so that it overlaps `other` unless shift is 0. */
static void set_columns(call *c, const gt_tensor *out, const gt_tensor *other, int after, int shift) {
    int el = view_in(c, out).element, other_el = view_in(c, other).element;
    int64_t n = round_up4(row_bytes(c, out, el)), slack = n - row_bytes(c, out, el);
    int64_t other_n = round_up4(row_bytes(c, other, other_el));
    char *at = place_of(c, out);
    set_pointer(c->args, out->offset, at + (after ? other_n : 0) + (shift > 0 ? slack : 0) + shift * el);
    set_pointer(c->args, other->offset, at + (after ? 0 : n));
    set_stride(c->args, out, (gt_stride){0, (n + other_n) / el, 0});
    set_stride(c->args, other, (gt_stride){0, (n + other_n) / other_el, 0});
}

static void test_column_pair(call *c, const gt_tensor *out, const gt_tensor *other) {
    for (int after = 0; after < 2; after++) {
        set_columns(c, out, other, after, 0);
        expect_accepted(c, out->name);
        set_columns(c, out, other, after, 1);
        expect_overlap(c, out, other);
        if (row_bytes(c, other, view_in(c, other).element) % 4) continue;
        set_columns(c, out, other, after, -1);
        expect_overlap(c, out, other);
    }
}

/* Tests two tensors [B,T,H,*] that share one buffer in which their heads alternate. */
static void test_head_pair(call *c, const gt_tensor *out, const gt_tensor *other) {
    int64_t n = c->dims.n[out->shape[3] - 'A'], other_n = c->dims.n[other->shape[3] - 'A'];
    for (int shift = 0; shift < 2; shift++) {
        char *at = place_of(c, out);
        set_pointer(c->args, out->offset, at);
        set_pointer(c->args, other->offset, at + (n - shift) * view_in(c, out).element);
        set_stride(c->args, out, (gt_stride){0, 0, n + other_n});
        set_stride(c->args, other, (gt_stride){0, 0, n + other_n});
        if (shift)
            expect_overlap(c, out, other);
        else
            expect_accepted(c, out->name);
    }
}

static void test_overlap(call *c) {
    for (const gt_tensor *out = c->op->tensors; out->name; out++) {
        for (const gt_tensor *other = c->op->tensors; other->name; other++) {
            if (out == other || !is_output(out, c->pass) || !is_in_call(c, out) || !is_in_call(c, other)) continue;
            test_overlap_pair(c, out, other);
            if (!is_slice(out) || !is_slice(other)) continue;
            test_column_pair(c, out, other);
            if (out->shape[0] == 'B' && out->shape[3] && other->shape[3] && out->shape[2] == other->shape[2] &&
                view_in(c, out).element == view_in(c, other).element)
                test_head_pair(c, out, other);
        }
    }
}

/* ---- checks shared by the recurrent operators ------------------------------------------------------ */

static void test_recurrent(call *c) {
    const gt_fields at = c->op->fields;
    if (!at.state_in_shared) return;
    set_int(c->args, at.state_in_shared, -1);
    expect_refused_always(c, GT_ERROR_VALUE, "state_in_shared = -1");
    set_int(c->args, at.state_in_shared, 2);
    expect_refused_always(c, GT_ERROR_VALUE, "state_in_shared = 2");
    if (!at.segments) return;
    set_int64(c->args, at.segments, -1);
    expect_refused_always(c, GT_ERROR_VALUE, "segments = -1");
}

static void test_no_packed(call *c) {
    const gt_fields at = c->op->fields;
    set_pointer(c->args, offset_of(c, "cu_seqlens"), c->memory);
    expect_refused_always(c, GT_ERROR_SIZE, "cu_seqlens is set");
    set_pointer(c->args, offset_of(c, "seq_count"), c->memory);
    expect_refused_always(c, GT_ERROR_SIZE, "seq_count is set");
    set_int64(c->args, at.seq_capacity, 1);
    if (c->pass == GT_STEP)
        expect_refused(c, GT_ERROR_VALUE, "seq_capacity = 1: must be 0, because a step has no");
    else if (gt_is_join(c->pass))
        expect_refused(c, GT_ERROR_VALUE, "seq_capacity = 1: must be 0; B gives the number of states");
    else
        expect_refused_always(c, GT_ERROR_SIZE, "B = 2: must be 1 with packed");
}

/* Checks that the twin refuses these contents of cu_seqlens and seq_count.  Kernels do not check contents. */
static void expect_contents_refused(call *c, int32_t cu0, int32_t cu1, int32_t cu2, int32_t count, const char *text) {
    const int32_t cu[] = {cu0, cu1, cu2};
    char before[sizeof c->memory];
    memcpy(place_of(c, find_tensor(c->op, "cu_seqlens")), cu, sizeof cu);
    memcpy(place_of(c, find_tensor(c->op, "seq_count")), &count, sizeof count);
    memcpy(before, c->memory, sizeof before);
    check_refusal(c, GT_HOST, c->pass, c->e->twin[c->pass](c->args), GT_ERROR_VALUE, text);
    check(!memcmp(c->memory, before, sizeof before), "'%s': memory changed", text);
    memcpy(c->memory, c->before, sizeof c->memory);
}

static void test_packed_fields(call *c) {
    const gt_fields at = c->op->fields;
    const gt_size *B = &c->op->sizes[0], *T = &c->op->sizes[1];
    set_int64(c->args, at.seq_capacity, -1);
    expect_refused_always(c, GT_ERROR_SIZE, "seq_capacity = -1");
    set_int64(c->args, at.seq_capacity, INT32_MAX);
    expect_refused_always(c, GT_ERROR_SIZE, "seq_capacity = 2147483647");
    set_int64(c->args, at.seq_capacity, INT64_MIN);
    expect_refused_always(c, GT_ERROR_SIZE, "seq_capacity = -9223372036854775808");
    set_pointer(c->args, offset_of(c, "cu_seqlens"), NULL);
    expect_refused(c, GT_ERROR_NULL, "cu_seqlens is NULL, but seq_capacity = 2");
    set_pointer(c->args, offset_of(c, "cu_seqlens"), NULL); /* the workspace query needs no pointers */
    check(prepare(c, GT_QUERY) == GT_OK, "workspace of a packed call: %s", gt_last_error());
    memcpy(c->args, c->good, ARGS_BYTES);
    set_int64(c->args, B->offset, 0);
    expect_refused_always(c, GT_ERROR_SIZE, "B = 0: must be 1");
    set_int64(c->args, B->offset, 2);
    expect_refused_always(c, GT_ERROR_SIZE, "B = 2: must be 1");
    set_int64(c->args, T->offset, (int64_t)INT32_MAX + 1);
    expect_refused_always(c, GT_ERROR_SIZE, "T = 2147483648: must be at most 2147483647");
    expect_contents_refused(c, 1, 1, 2, 2, "cu_seqlens[0] = 1: must be 0");
    expect_contents_refused(c, -1, 1, 2, 2, "cu_seqlens[0] = -1: must be 0");
    expect_contents_refused(c, 1, 1, 2, 0, "cu_seqlens[0] = 1: must be 0");
    expect_contents_refused(c, 0, -1, 2, 2, "cu_seqlens[1] = -1: must be 0 ");
    expect_contents_refused(c, 0, 2, 1, 2, "cu_seqlens[2] = 1: must be 2 ");
    expect_contents_refused(c, 0, 1, 4, 2, "cu_seqlens[2] = 4: must be 1 (the one before) to T (3)");
    expect_contents_refused(c, 0, INT32_MAX, 2, 1, "cu_seqlens[1] = 2147483647: must be 0 ");
    expect_contents_refused(c, 0, 1, 2, -1, "*seq_count = -1: must be 0 to seq_capacity (2)");
    expect_contents_refused(c, 0, 1, 2, 3, "*seq_count = 3: must be 0 to seq_capacity (2)");
    set_pointer(c->args, offset_of(c, "seq_count"), NULL);
    expect_contents_refused(c, 0, 1, 4, 0, "cu_seqlens[2] = 4");
    memcpy(c->args, c->good, ARGS_BYTES);
    /* entries of cu_seqlens beyond the last sequence may hold anything */
    memset(place_of(c, find_tensor(c->op, "cu_seqlens")) + 8, 0xff, 4);
    memcpy(place_of(c, find_tensor(c->op, "seq_count")), &(int32_t){1}, 4);
    expect_accepted(c, "two numbers of cu_seqlens in use");
}

/* ---- chunks of packed sequences -------------------------------------------------------------- */

/* Checks that gt_chunk_at gives the right sequence and tokens for the slot of every chunk, and no sequence for all
 * other slots. */
static void check_chunks(const int32_t *cu_seqlens, int64_t count, int64_t capacity, int64_t T, int64_t size) {
    int64_t places = gt_chunk_slots(T, capacity, size), found = 0, expected = 0;
    int ok = 1;
    for (int64_t place = 0; place < places; place++) found += gt_chunk_at(cu_seqlens, count, size, place).sequence >= 0;
    for (int64_t s = 0; s < count; s++) {
        int64_t first = cu_seqlens[s], n = cu_seqlens[s + 1] - first;
        for (int64_t c = 0; c * size < n; c++, expected++) {
            int64_t place = gt_chunk_slot(cu_seqlens, size, s, c);
            gt_chunk at = gt_chunk_at(cu_seqlens, count, size, place);
            int64_t last = (c + 1) * size < n ? (c + 1) * size : n;
            ok &= place < places && at.sequence == s && at.first == first + c * size && at.last == first + last;
        }
    }
    check(ok && found == expected, "%lld chunks of %lld tokens have places, %lld of %lld sequences have %lld",
          (long long)found, (long long)size, (long long)count, (long long)capacity, (long long)expected);
}

static void test_chunks(void) {
    static const int64_t sizes[] = {1, 2, 3, 64, 128};
    random_state = 7;
    for (int i = 0; i < 2000; i++) {
        int32_t cu_seqlens[41] = {0};
        int64_t count = random_below(41), size = sizes[i % 5];
        int64_t longest = 1 + random_below(3 * size + 1);
        for (int64_t s = 0; s < count; s++)
            cu_seqlens[s + 1] = cu_seqlens[s] + (int32_t)(one_in(3) ? 0 : random_below(longest));
        for (int64_t unused = 0; unused < 2; unused++)
            check_chunks(cu_seqlens, count, count + unused, cu_seqlens[count] + unused, size);
    }
}

static int has_pools(call *c) { return c->pass == GT_FORWARD && find_tensor(c->op, "starts_zero"); }

/* Tests the strides between rows of states, which only a step and forward with slots may have. */
static void test_pool_strides(call *c) {
    for (const gt_tensor *t = c->op->tensors; t->name; t++) {
        char text[100];
        if (t->shape[0] != 'Q' || gt_stride_count(t) != 1 || gt_is_join(c->pass)) continue;
        if (!strcmp(t->name, "state_scale")) continue; /* tested in test_scale */
        snprintf(text, sizeof text, "%s_stride = ", t->name);
        set_int64(c->args, t->stride_offset, 200);
        if (c->pass == GT_STEP)
            expect_accepted(c, "rows of states apart");
        else
            expect_refused(c, GT_ERROR_STRIDE, "%s200: only the step function and forward with slots", text);
        for (int i = 0; c->pass == GT_STEP && i < 3; i++) {
            const int64_t bad[] = {-1, 1, INT64_MAX};
            set_int64(c->args, t->stride_offset, bad[i]);
            expect_refused(c, GT_ERROR_STRIDE, "%s%lld: ", text, (long long)bad[i]);
        }
    }
}

/* Tests the arguments of stochastic rounding.  A pass that can take states of 16 bits also takes a seed and step
 * numbers, but only if its states have 16 bits. */
static void test_rounding(call *c) {
    if (!find_tensor(c->op, "rounding_seed")) return;
    const size_t seed = offset_of(c, "rounding_seed"), steps = offset_of(c, "rounding_steps");
    const int is_of_forward = c->op->of_steps.passes == GT_STATES_OF_FORWARD;
    const int is_used = (c->pass == GT_STEP && !is_of_forward) || c->pass == GT_FORWARD;
    for (int i = 0; i < 2 && !is_used; i++) {
        set_pointer(c->args, i ? steps : seed, c->memory);
        expect_refused(c, GT_ERROR_VALUE, "%s is set: only forward%s", i ? "rounding_steps" : "rounding_seed",
                       is_of_forward ? " uses it" : " and the step function use it");
    }
    if (!is_used) return;
    set_pointer(c->args, seed, c->memory);
    expect_refused(c, GT_ERROR_NULL, "rounding_steps is NULL, but rounding_seed is set");
    set_pointer(c->args, steps, c->memory);
    expect_refused(c, GT_ERROR_NULL, "rounding_seed is NULL, but rounding_steps is set");
    set_pointer(c->args, seed, c->memory), set_pointer(c->args, steps, c->memory);
    expect_refused(c, GT_ERROR_DTYPE, "rounding_seed is set, but state_dtype = 1");
    for (int dtype = GT_BF16; dtype <= GT_F16; dtype++) {
        set_pointer(c->args, seed, c->memory), set_pointer(c->args, steps, c->memory);
        set_int(c->args, c->op->of_steps.state, dtype);
        expect_accepted(c, "stochastic rounding");
    }
}

/* Sets T = 256, and pointers that are far apart.  Only checks of arguments may get this call. */
static void set_apart(call *c) {
    uintptr_t at = 0;
    set_int64(c->args, c->op->sizes[1].offset, 256);
    for (const gt_tensor *t = c->op->tensors; t->name; t++) {
        at += (uintptr_t)1 << 32;
        if (is_in_call(c, t) || gt_is_snapshots(t))
            set_pointer(c->args, t->offset, (char *)at); /* NOLINT: no such memory */
    }
}

/* Tests snapshots.  Only forward writes snapshots, and they need snapshot_every, a multiple of 128. */
static void test_snapshots(call *c) {
    static const int64_t bad[] = {-128, -1, 1, 64, 127, 129, 200};
    static const int bad_dtypes[] = {-1, 4, 99};
    const size_t every = c->op->of_steps.snapshot_every, dtype = c->op->of_steps.snapshot;
    char text[100];
    if (!every) return;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        set_int64(c->args, every, bad[i]);
        snprintf(text, sizeof text, "snapshot_every = %d: must be 0 or a positive multiple of 128", (int)bad[i]);
        expect_refused_always(c, GT_ERROR_VALUE, text);
    }
    for (int i = 0; i < 3; i++) {
        set_int(c->args, dtype, bad_dtypes[i]);
        snprintf(text, sizeof text, "snapshot_dtype = %d: must be 0, GT_F32, GT_BF16 or GT_F16", bad_dtypes[i]);
        expect_refused_always(c, GT_ERROR_DTYPE, text);
    }
    if (c->pass != GT_FORWARD) {
        set_int64(c->args, every, 256);
        expect_refused(c, GT_ERROR_VALUE, "snapshot_every = 256: only forward uses it");
        return;
    }
    for (const gt_tensor *t = c->op->tensors; t->name; t++) {
        if (!gt_is_snapshots(t)) continue;
        set_pointer(c->args, t->offset, c->memory);
        expect_refused(c, GT_ERROR_VALUE, "snapshot_every = 0: must be positive, because %s is set", t->name);
        for (int type = GT_DTYPE_DEFAULT; type <= GT_F16; type++) { /* 128 tokens are more than the call has */
            const size_t own = gt_dtype_field(c->op, t); /* conv_snapshots have the dtype of conv_state_out */
            set_pointer(c->args, t->offset, c->memory), set_int64(c->args, every, 128), set_int(c->args, own, type);
            expect_accepted(c, t->name);
            if (c->is_packed) continue;
            set_apart(c), set_int64(c->args, every, 128), set_int(c->args, own, type);
            check(prepare(c, GT_FORWARD) == GT_OK, "%s forward, %s: refused: %s", c->op->name, t->name,
                  gt_last_error());
            set_pointer(c->args, t->offset, (char *)(uintptr_t)4097); /* NOLINT: no such memory */
            check_refusal(c, GT_DEVICE, GT_FORWARD, prepare(c, GT_FORWARD), GT_ERROR_ALIGNMENT, t->name);
            set_pointer(c->args, t->offset, get_pointer(c->args, find_tensor(c->op, "y")));
            check_refusal(c, GT_DEVICE, GT_FORWARD, prepare(c, GT_FORWARD), GT_ERROR_OVERLAP, t->name);
            memcpy(c->args, c->good, ARGS_BYTES);
        }
    }
}

/* Tests int8 states and their scales.  Only a step takes int8 states and scales, and it needs both. */
static void test_scale(call *c) {
    if (!c->op->of_steps.scale || gt_is_join(c->pass)) return;
    const gt_tensor *t = find_tensor(c->op, "state_scale");
    const size_t dtype = c->op->of_steps.state;
    char *const place = place_of(c, t);
    if (c->pass != GT_STEP) {
        set_int(c->args, dtype, GT_INT8);
        expect_refused(c, GT_ERROR_DTYPE, "state_dtype = 4: must be 0 or GT_F32; only the step function takes int8");
        set_int64(c->args, t->stride_offset, 200);
        expect_refused(c, GT_ERROR_STRIDE, "state_scale_stride = 200: only a step with states of GT_INT8 uses it");
        return;
    }
    for (int other = GT_DTYPE_DEFAULT; other <= GT_F16; other++) {
        set_int(c->args, dtype, other), set_pointer(c->args, t->offset, place);
        expect_refused(c, GT_ERROR_VALUE, "state_scale is set, but state_dtype = %d", other ? other : GT_F32);
        set_int(c->args, dtype, other), set_int64(c->args, t->stride_offset, 200);
        expect_refused(c, GT_ERROR_STRIDE, "state_scale_stride = 200: only a step with states of GT_INT8 uses it");
    }
    set_int(c->args, dtype, GT_INT8);
    expect_refused(c, GT_ERROR_NULL, "state_scale is NULL");
    set_int(c->args, dtype, GT_INT8), set_pointer(c->args, t->offset, place + 2);
    expect_refused(c, GT_ERROR_ALIGNMENT, "state_scale = ");
    set_int(c->args, dtype, GT_INT8), set_pointer(c->args, t->offset, place_of(c, find_tensor(c->op, "y")));
    expect_refused(c, GT_ERROR_OVERLAP, "y overlaps state_scale");
    const int64_t strides[] = {0, 200, -1, 1, INT64_MAX};
    for (int i = 0; i < 5; i++) {
        set_int(c->args, dtype, GT_INT8), set_pointer(c->args, t->offset, place);
        set_int64(c->args, t->stride_offset, strides[i]);
        if (i < 2)
            expect_accepted(c, "states of int8");
        else
            expect_refused(c, GT_ERROR_STRIDE, "state_scale_stride = %lld: ", (long long)strides[i]);
    }
}

/* Conversions of states: every bad field is refused by its name. */
static void test_int8_states(void) {
    static float state[2 * 3 * 4], scale[2 * 3 * 2];
    static _Alignas(16) int8_t int8[2 * 3 * 4];
    static const int32_t slots[] = {0, 1};
    const gt_int8_states_args good = {
        .B = 2, .rows = 3, .columns = 4, .group = 2, .state = state, .int8 = int8, .scale = scale};
    gt_int8_states_args bad[18];
    static const struct {
        gt_status status;
        const char *text;
    } expected[18] = {{GT_ERROR_SIZE, "B = -1"},
                      {GT_ERROR_SIZE, "rows = 0"},
                      {GT_ERROR_SIZE, "columns = 0"},
                      {GT_ERROR_SIZE, "group = -1"},
                      {GT_ERROR_SIZE, "slot_capacity = 1"},
                      {GT_ERROR_SIZE, "slot_capacity = -1"},
                      {GT_ERROR_SIZE, "more than 2^48 elements"},
                      {GT_ERROR_STRIDE, "int8_stride = 11"},
                      {GT_ERROR_STRIDE, "scale_stride = 5"},
                      {GT_ERROR_STRIDE, "int8_stride = 9223372036854775807"},
                      {GT_ERROR_NULL, "state is NULL"},
                      {GT_ERROR_NULL, "int8 is NULL"},
                      {GT_ERROR_NULL, "scale is NULL"},
                      {GT_ERROR_ALIGNMENT, "state = "},
                      {GT_ERROR_ALIGNMENT, "scale = "},
                      {GT_ERROR_ALIGNMENT, "slots = "},
                      {GT_ERROR_OVERLAP, "state overlaps int8"},
                      {GT_ERROR_OVERLAP, "int8 overlaps scale"}};
    check(gt_int8_states_args_size() == sizeof good, "gt_int8_states_args_size() is %zu", gt_int8_states_args_size());
    for (int i = 0; i < 18; i++) bad[i] = good;
    bad[0].B = -1, bad[1].rows = 0, bad[2].columns = 0, bad[3].group = -1, bad[4].slot_capacity = 1;
    bad[5].slots = slots, bad[5].slot_capacity = -1, bad[6].columns = (int64_t)1 << 40, bad[6].rows = 1 << 10;
    bad[7].int8_stride = 11, bad[8].scale_stride = 5, bad[9].int8_stride = INT64_MAX;
    bad[10].state = NULL, bad[11].int8 = NULL, bad[12].scale = NULL;
    bad[13].state = (float *)(void *)((char *)state + 1), bad[14].scale = (float *)(void *)((char *)scale + 2);
    bad[15].slots = (const int32_t *)(const void *)((const char *)slots + 1);
    bad[16].int8 = (char *)state + 4, bad[17].scale = (float *)(void *)int8;
    for (int i = 0; i < 18; i++) {
        const gt_status back = gt_ref_dequantize_states(&bad[i]), to = gt_ref_quantize_states(&bad[i]);
        check(to == expected[i].status && back == to && strstr(gt_last_error(), expected[i].text),
              "conversion of states: '%s' expected in: %s", expected[i].text, gt_last_error());
    }
    check(gt_ref_quantize_states(NULL) == GT_ERROR_NULL &&
              strstr(gt_last_error(), "gt_ref_quantize_states: args is NULL"),
          "NULL: %s", gt_last_error());
    gt_int8_states_args none = {.rows = 1, .columns = 1};
    check(gt_ref_quantize_states(&none) == GT_OK && gt_ref_quantize_states(&good) == GT_OK,
          "a good conversion is refused: %s", gt_last_error());
}

/* Tests forward with slots: states in a pool. */
static void test_pool(call *c) {
    const size_t slots = offset_of(c, "slots"), zeros = offset_of(c, "starts_zero"), rows = c->op->fields.slot_capacity;
    set_pointer(c->args, zeros, c->memory);
    expect_refused(c, GT_ERROR_VALUE, "starts_zero is set: only forward with slots uses it");
    set_pointer(c->args, slots, c->memory);
    if (!c->is_packed) {
        expect_refused(c, GT_ERROR_VALUE, "slots is set: forward uses it only with packed sequences");
        return;
    }
    fill_integers(c->memory, 4);
    memcpy(c->before, c->memory, sizeof c->memory);
    expect_accepted(c, "forward with slots");
    set_pointer(c->args, slots, c->memory), set_pointer(c->args, zeros, c->memory);
    expect_accepted(c, "forward with slots and starts_zero");
    set_pointer(c->args, slots, c->memory), set_int64(c->args, rows, 1);
    expect_accepted(c, "slots outside the pool are skipped");
    set_int64(c->args, rows, 2);
    expect_refused(c, GT_ERROR_VALUE, "slot_capacity is set: forward uses it only with slots");
    set_pointer(c->args, slots, c->memory), set_int64(c->args, rows, -1);
    expect_refused(c, GT_ERROR_SIZE, "slot_capacity = -1");
    set_pointer(c->args, slots, c->memory), set_int(c->args, c->op->fields.state_in_shared, 1);
    expect_refused(c, GT_ERROR_VALUE, "state_in_shared = 1: must be 0 with slots");
    for (const gt_tensor *t = c->op->tensors; t->name; t++) {
        if (t->shape[0] != 'Q' || gt_use(t, GT_FORWARD) == '-') continue;
        set_pointer(c->args, slots, c->memory), set_int64(c->args, t->stride_offset, 1);
        expect_refused(c, GT_ERROR_STRIDE, "%s_stride = ", t->name);
        set_pointer(c->args, slots, c->memory), set_int64(c->args, t->stride_offset, -1);
        expect_refused(c, GT_ERROR_STRIDE, "%s_stride = ", t->name);
    }
}

static void test_no_slots(call *c) {
    static const char *const arrays[] = {"slots", "tokens", "commit", "places"};
    for (int i = has_pools(c); i < 4; i++) {
        if (test_find(c->op, arrays[i]) < 0) continue;
        set_pointer(c->args, offset_of(c, arrays[i]), c->memory);
        expect_refused(c, GT_ERROR_VALUE, "%s is set: only the step function uses it", arrays[i]);
    }
    set_int64(c->args, c->op->fields.slot_capacity, 2);
    expect_refused(c, GT_ERROR_VALUE, "slot_capacity is set");
}

/* Tests that a state that the batch shares cannot be updated in place. */
static void test_shared_alias(call *c, const gt_tensor *o, const gt_tensor *i) {
    set_int(c->args, c->op->fields.state_in_shared, 1);
    expect_accepted(c, "state_in_shared");
    set_int(c->args, c->op->fields.state_in_shared, 1);
    set_pointer(c->args, o->offset, place_of(c, i));
    expect_overlap(c, o, i);
}

/* Tests all states with these plain names.  An operator that joins two operators has two of each. */
static void test_shared_aliases(call *c, const char *out, const char *in) {
    for (int i = 0; c->op->tensors[i].name; i++)
        if (test_is(&c->op->tensors[i], out))
            test_shared_alias(c, &c->op->tensors[i], &c->op->tensors[test_beside(c->op, i, in)]);
}

static void test_state_of_step(call *c, const gt_tensor *state_in, const gt_tensor *state_out) {
    set_pointer(c->args, state_in->offset, place_of(c, state_in));
    expect_refused(c, GT_ERROR_VALUE, "%s = %p", state_in->name, (void *)place_of(c, state_in));
    set_pointer(c->args, state_in->offset, place_of(c, state_out));
    expect_accepted(c, "state_in = state_out");
}

static void test_step(call *c) {
    const gt_fields at = c->op->fields;
    const size_t slots = offset_of(c, "slots");
    size_t T = c->op->sizes[1].offset;
    set_int64(c->args, T, 17);
    expect_refused(c, GT_ERROR_SIZE, "T = 17");
    for (int i = 0; c->op->tensors[i].name; i++)
        if (test_is(&c->op->tensors[i], "state_out"))
            test_state_of_step(c, &c->op->tensors[test_beside(c->op, i, "state_in")], &c->op->tensors[i]);
    set_int(c->args, at.state_in_shared, 1);
    expect_refused(c, GT_ERROR_VALUE, "state_in_shared = 1");
    set_int64(c->args, at.slot_capacity, -1);
    expect_refused(c, GT_ERROR_SIZE, "slot_capacity = -1");
    set_int64(c->args, at.slot_capacity, INT64_MAX);
    expect_refused(c, GT_ERROR_SIZE, "slot_capacity = %lld", (long long)INT64_MAX);
    set_int64(c->args, at.slot_capacity, 1);
    expect_accepted(c, "slots outside the pool are skipped");
    set_int64(c->args, at.slot_capacity, 1);
    set_pointer(c->args, slots, NULL);
    expect_refused(c, GT_ERROR_SIZE, "slot_capacity = 1");
    set_int64(c->args, at.slot_capacity, 2);
    set_pointer(c->args, slots, NULL);
    expect_accepted(c, "slot_capacity without slots");
    set_pointer(c->args, offset_of(c, "tokens"), NULL);
    expect_accepted(c, "commit without tokens");
    set_pointer(c->args, offset_of(c, "commit"), NULL);
    expect_accepted(c, "tokens without commit");
}

static void test_segment_backward(call *c) {
    set_int(c->args, c->op->fields.state_in_shared, 1);
    expect_refused(c, GT_ERROR_VALUE, "state_in_shared = 1: must be 0, because dstate_in of a piece is not shared");
}

/* Tests a join with T = 0, since a join does not use T. */
static void test_join(call *c) {
    set_int64(c->args, c->op->sizes[1].offset, 0);
    set_pointer(c->args, find_tensor(c->op, "piece_starts")->offset, NULL);
    expect_refused(c, GT_ERROR_NULL, "piece_starts is NULL");
    set_int64(c->args, c->op->sizes[1].offset, 0);
    expect_accepted(c, "a join with T = 0");
}

/* ---- the stubs ------------------------------------------------------------------------------- */

static gt_status call_stub(const call *c, gt_pass pass, const void *args) {
    gt_workspace need;
    return pass == GT_QUERY ? c->op->calls.workspace(args, &need) : c->op->calls.pass[pass](args, NULL);
}

static void check_stub(call *c, gt_pass pass) {
    check_refusal(c, GT_DEVICE, pass, call_stub(c, pass, c->args), GT_ERROR_NO_CUDA, "built without CUDA");
    check_refusal(c, GT_DEVICE, pass, call_stub(c, pass, NULL), GT_ERROR_NO_CUDA, "built without CUDA");
    check(!memcmp(c->memory, c->before, sizeof c->memory), "the stub of %s %s writes", c->op->name, pass_names[pass]);
}

static void test_call(call *c) {
    expect_accepted(c, "valid call");
    test_null_args(c);
    test_null_pointers(c);
    test_alignment(c);
    test_sizes(c);
    test_huge_sizes(c);
    test_empty(c);
    test_dtypes(c);
    test_bad_values(c);
    test_bad_strides(c);
    test_last_strides(c);
    test_self_overlap(c);
    test_overlap(c);
    test_recurrent(c);
    if (c->is_packed)
        test_packed_fields(c);
    else if (c->op->fields.slot_capacity)
        test_no_packed(c);
    if (c->op->fields.slot_capacity && c->pass != GT_STEP) test_no_slots(c);
    if (has_pools(c)) test_pool(c);
    test_pool_strides(c);
    test_rounding(c);
    test_scale(c);
    test_snapshots(c);
    if (c->op->fields.slot_capacity && c->pass == GT_FORWARD) test_shared_aliases(c, "state_out", "state_in");
    if (c->op->fields.slot_capacity && c->pass == GT_BACKWARD) test_shared_aliases(c, "dstate_in", "dstate_out");
    if (c->pass == GT_STEP && c->op->fields.slot_capacity) test_step(c);
    if (c->pass == GT_SEGMENT_BACKWARD) test_segment_backward(c);
    if (gt_is_join(c->pass)) test_join(c);
    if (kernels_built) return;
    check_stub(c, c->pass);
    check_stub(c, GT_QUERY);
}

/* ---- defaults -------------------------------------------------------------------------------- */

typedef struct stride_case {
    gt_stride given, filled;
} stride_case;

/* Checks the strides of tensor `name` after gt_prepare. */
static void check_strides(const gt_op *op, const char *name, const void *sizes, const stride_case *s, size_t count) {
    for (size_t i = 0; i < count; i++) {
        const gt_tensor *t = find_tensor(op, name);
        _Alignas(16) char args[ARGS_BYTES] = {0}, filled[ARGS_BYTES];
        gt_dims dims;
        gt_stride got = {0, 0, 0};
        memcpy(args, sizes, op->args_bytes);
        set_stride(args, t, s[i].given);
        check(gt_prepare(op, GT_QUERY, GT_HOST, args, filled, &dims) == GT_OK, "%s", gt_last_error());
        if (t->shape[0] == 'M')
            memcpy(&got.t, filled + t->stride_offset, sizeof got.t);
        else
            memcpy(&got, filled + t->stride_offset, sizeof got);
        check(!memcmp(&got, &s[i].filled, sizeof got), "%s.%s_stride {%lld, %lld, %lld} filled as {%lld, %lld, %lld}",
              op->name, name, (long long)s[i].given.b, (long long)s[i].given.t, (long long)s[i].given.h,
              (long long)got.b, (long long)got.t, (long long)got.h);
    }
}

static void test_default_strides(void) {
    const gt_wkv6_args wkv6 = {.B = 2, .T = 3, .H = 4, .N = 5, .V = 7};
    const gt_conv1d_args conv1d = {.B = 2, .T = 3, .D = 4, .W = 4};
    const gt_norm_mix_args norm_mix = {.M = 3, .D = 4};
    const stride_case four[] = {
        {{0, 0, 0}, {60, 20, 5}},         /* packed [B,T,H,N] */
        {{0, 5, 15}, {60, 5, 15}},        /* [B,H,T,N] */
        {{0, 100, 0}, {300, 100, 5}},     /* a slice of each row of 100 elements */
        {{0, 0, 9}, {108, 36, 9}},        /* heads further apart */
        {{1000, 0, 0}, {1000, 20, 5}},    /* batches further apart */
        {{0, 644, 161}, {1932, 644, 161}} /* each head is a slice of a row */
    };
    const stride_case three[] = {
        {{0, 0, 0}, {12, 4, 1}},      /* packed [B,T,D] */
        {{0, 1, 3}, {12, 1, 3}},      /* [B,D,T] */
        {{0, 386, 0}, {1158, 386, 1}} /* a slice of each row of 386 elements */
    };
    const stride_case rows[] = {{{0, 0, 0}, {0, 4, 0}}, {{0, 902, 0}, {0, 902, 0}}};
    const stride_case value[] = {{{0, 0, 0}, {84, 28, 7}}};
    const gt_selective_scan_args scan = {.B = 2, .T = 3, .D = 4, .N = 5, .G = 2, .Bm_stride.n = 3};
    const stride_case last[] = {{{0, 1, 0}, {30, 1, 15}}, {{0, 0, 0}, {90, 30, 15}}};
    check_strides(gt_op_wkv6(), "r", &wkv6, four, 6);
    check_strides(gt_op_wkv6(), "v", &wkv6, value, 1);
    check_strides(gt_op_selective_scan(), "Bm", &scan, last, 2);
    check_strides(gt_op_conv1d(), "x", &conv1d, three, 3);
    check_strides(gt_op_norm_mix(), "a", &norm_mix, rows, 2);
}

static void check_filled(const gt_op *op, const void *args, size_t offset, int64_t want) {
    _Alignas(16) char filled[ARGS_BYTES];
    gt_dims dims;
    gt_status status = gt_prepare(op, GT_QUERY, GT_HOST, args, filled, &dims);
    check(status == GT_OK && get_int64(filled, offset) == want, "%s: default size: %lld instead of %lld (%s)", op->name,
          (long long)get_int64(filled, offset), (long long)want, gt_last_error());
}

static void check_dtypes(const void *args, gt_dtype dtype, gt_dtype w_dtype) {
    gt_wkv6_args filled = {0};
    gt_dims dims;
    check(gt_prepare(gt_op_wkv6(), GT_QUERY, GT_HOST, args, &filled, &dims) == GT_OK && filled.dtype == dtype &&
              filled.w_dtype == w_dtype,
          "dtypes filled as %d and %d", filled.dtype, filled.w_dtype);
}

static void test_defaults(void) {
    const gt_wkv6_args wkv6 = {.B = 2, .T = 3, .H = 4, .N = 5};
    const gt_wkv6_args wkv6_bf16 = {.B = 2, .T = 3, .H = 4, .N = 5, .dtype = GT_BF16};
    const gt_wkv6_args wkv6_mixed = {.B = 2, .T = 3, .H = 4, .N = 5, .dtype = GT_F16, .w_dtype = GT_F32};
    const gt_ssd_args ssd = {.B = 2, .T = 3, .H = 4, .P = 5, .N = 6};
    const gt_selective_scan_args scan = {.B = 2, .T = 3, .D = 4, .N = 6};
    const gt_norm_mix_args norm_mix = {.M = 3, .D = 4};
    const gt_norm_gate_args norm_gate = {.M = 3, .D = 4};
    test_default_strides();
    check_filled(gt_op_wkv6(), &wkv6, AT(wkv6, V), 5);
    check_filled(gt_op_ssd(), &ssd, AT(ssd, G), 1);
    check_filled(gt_op_selective_scan(), &scan, AT(selective_scan, G), 1);
    check_filled(gt_op_norm_mix(), &norm_mix, AT(norm_mix, H), 1);
    check_filled(gt_op_norm_gate(), &norm_gate, AT(norm_gate, H), 1);
    check_dtypes(&wkv6, GT_F32, GT_F32);
    check_dtypes(&wkv6_bf16, GT_BF16, GT_BF16);
    check_dtypes(&wkv6_mixed, GT_F16, GT_F32);
}

/* ---- status, messages, version --------------------------------------------------------------- */

static void test_status_strings(void) {
    static const int known[] = {0, 100, 101, 102, 103, 104, 105, 106, 200, 201, 202, 300, 301, 302, 303, 400};
    static const int unknown[] = {-1, 1, 99, 107, 203, 304, 401, 1 << 30};
    const char *no_status = gt_status_string((gt_status)-1);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        const char *text = gt_status_string((gt_status)known[i]);
        check(text && *text && strcmp(text, no_status), "status %d has no text", known[i]);
        for (size_t j = 0; j < i; j++)
            check(strcmp(text, gt_status_string((gt_status)known[j])) != 0, "statuses %d and %d have the same text",
                  known[i], known[j]);
    }
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++)
        check(!strcmp(gt_status_string((gt_status)unknown[i]), no_status), "status %d is unknown", unknown[i]);
}

#define TEXT_OF(symbol) #symbol
#define EXPANDED(symbol) TEXT_OF(symbol)

static void test_version(void) {
    char symbol[64];
    snprintf(symbol, sizeof symbol, "gt_version_v%d_%d_%d", GT_VERSION_MAJOR, GT_VERSION_MINOR, GT_VERSION_PATCH);
    check(gt_version() == GT_VERSION, "gt_version() is %d, GT_VERSION %d", gt_version(), GT_VERSION);
    check(!strcmp(symbol, EXPANDED(gt_version)), "GT_SYMBOL makes %s of version %s", EXPANDED(gt_version), symbol);
}

/* Tests the functions that return struct sizes.  Callers that define the structs themselves compare sizes with them. */
static void test_args_size(void) {
    for (int i = 0; test_ops[i]; i++) {
        const test_op *e = test_ops[i];
        check(e->args_size() == e->args_bytes && e->args_bytes == e->table()->args_bytes,
              "gt_%s_args_size() is %zu, but sizeof(gt_%s_args) is %zu", e->name, e->args_size(), e->name,
              e->args_bytes);
    }
}

static void test_path_stub(void) {
    char text[] = "before";
    check(gt_norm_mix_path(NULL, text, sizeof text) == GT_ERROR_NO_CUDA && !*text &&
              !strncmp(gt_last_error(), "gt_norm_mix_path: built without CUDA", 36),
          "'%s', %s", text, gt_last_error());
}

/* A thread that makes an error of its own: neither of two threads may see the message of the other. */
static void *other_thread(void *result) {
    int *ok = result;
    *ok = !strcmp(gt_last_error(), "");
    gt_ref_norm_mix_forward(NULL);
    *ok = *ok && !strcmp(gt_last_error(), "gt_ref_norm_mix_forward: args is NULL");
    return NULL;
}

static void test_last_error(void) {
    float x = 1, y = 0;
    gt_norm_mix_args args = {.M = 1, .D = 1, .a = &x, .b = &x, .y = &y};
    pthread_t thread;
    int ok = 0;
    const char *expected = "gt_ref_wkv6_forward: args is NULL";
    gt_ref_wkv6_forward(NULL);
    check(!strcmp(gt_last_error(), expected), "message: %s", gt_last_error());
    check(gt_ref_norm_mix_forward(&args) == GT_OK && !strcmp(gt_last_error(), expected),
          "a successful call changed the message: %s", gt_last_error());
    check(pthread_create(&thread, NULL, other_thread, &ok) == 0 && pthread_join(thread, NULL) == 0, "no second thread");
    check(ok, "a second thread starts without an error and gets its own");
    check(!strcmp(gt_last_error(), expected), "another thread changed the message: %s", gt_last_error());
    gt_ref_norm_mix_backward(NULL);
    check(!strcmp(gt_last_error(), "gt_ref_norm_mix_backward: args is NULL"), "message: %s", gt_last_error());
}

/* ---- fuzz ------------------------------------------------------------------------------------ */

enum { FUZZ_CALLS = 20000, FUZZ_MEMORY = 1 << 16, FUZZ_ELEMENTS = 4096 };

typedef struct element {
    uintptr_t at;
    int bytes, written;
} element;

typedef struct fuzz {
    const test_op *e;
    const gt_op *op;
    gt_pass pass;
    gt_dims dims;
    _Alignas(16) char args[ARGS_BYTES], filled[ARGS_BYTES];
    _Alignas(16) char memory[FUZZ_MEMORY], before[FUZZ_MEMORY];
    element elements[FUZZ_ELEMENTS];
    int count; /* number of elements; -1: more than FUZZ_ELEMENTS */
    int accepted, run, refused, refused_wrongly, too_large;
} fuzz;

static int64_t random_size(const gt_size *s) {
    static const int64_t extremes[] = {-1, INT64_MIN, INT64_MAX, GT_MAX_SIZE, GT_MAX_SIZE + 1, (int64_t)1 << 31, 17, 0};
    if (one_in(100)) return extremes[random_below(8)];
    if (s && s->letter == 'W') return 2 + random_below(3);
    if (s && s->min == 0 && one_in(10)) return 0;
    return 1 + random_below(3);
}

static int64_t random_stride(void) {
    static const int64_t extremes[] = {-1, INT64_MIN, INT64_MAX, (int64_t)1 << 40, (int64_t)1 << 56};
    if (one_in(200)) return extremes[random_below(5)];
    return one_in(2) ? 0 : 1 + random_below(24);
}

static void make_packed(fuzz *f) {
    set_int64(f->args, f->op->fields.seq_capacity, one_in(50) ? -1 : 1 + random_below(3));
    if (!one_in(50)) set_int64(f->args, f->op->sizes[0].offset, 1);
}

static int is_packed(const fuzz *f) {
    return f->op->fields.seq_capacity && get_int64(f->args, f->op->fields.seq_capacity) > 0;
}

static int has_scales(const fuzz *f) {
    int dtype = 0;
    if (f->op->of_steps.scale) memcpy(&dtype, f->args + f->op->of_steps.state, sizeof dtype);
    return dtype == GT_INT8;
}

static void random_fields(fuzz *f) {
    static const double numbers[] = {0, 1, 2, -1, 0.5};
    for (const test_bad_value *bad = f->e->bad_values; bad->text; bad++) {
        for (int i = 0; i < 3 && bad->set[i].type; i++) {
            test_value x = bad->set[i];
            /* random_call draws the sizes of the table */
            if (x.type == 'l' && x.offset != f->e->optional_size.offset) continue;
            /* calls that set reserved fields are refused, so they are rare */
            if (bad->status == GT_ERROR_UNSUPPORTED && !one_in(100)) continue;
            x.value = one_in(100) ? x.value : numbers[random_below(x.type == 'f' ? 5 : 2)];
            if (x.type == 'l') x.value = one_in(2) ? 0 : (double)(1 + random_below(3));
            set_field(f->args, x);
        }
    }
    if (f->op->fields.state_in_shared) {
        if (one_in(4)) set_int(f->args, f->op->fields.state_in_shared, 1);
        if (one_in(takes_packed(f->op) ? 3 : 100)) make_packed(f);
        if (f->op->fields.segments) set_int64(f->args, f->op->fields.segments, random_below(3));
        if (f->pass == GT_STEP && one_in(2)) set_int64(f->args, f->op->fields.slot_capacity, random_below(5));
    }
    if (f->op->of_steps.scale && f->pass == GT_STEP && one_in(4)) set_int(f->args, f->op->of_steps.state, GT_INT8);
    if (f->op->of_steps.snapshot_every && f->pass == GT_FORWARD)
        set_int64(f->args, f->op->of_steps.snapshot_every, GT_SNAPSHOT_TOKENS);
    if (one_in(3)) set_int(f->args, f->op->accumulate_offset, 1);
    /* without reads_y, backward does not read y */
    if (f->e->reads_y && !one_in(100)) set_int(f->args, f->e->reads_y, 1);
}

/* Draws the place and strides of a tensor: anywhere in a window, or columns of a buffer with rows of `row` bytes. */
static void random_tensor(fuzz *f, const gt_tensor *t, int64_t window, int64_t row) {
    int columns = is_slice(t) && row && !one_in(5);
    int64_t at = random_below(columns ? row : window) / 4 * 4;
    if (one_in(40)) at += random_below(4);
    if (one_in(3) && !is_required(t, f->pass)) return;
    if (one_in(100) || (t->kind == 'i' && !is_used(t, f->pass))) return;
    if (strpbrk(t->shape, "CE") && !is_packed(f)) return;
    if (strchr(t->shape, 'I') && !has_scales(f)) return;
    set_pointer(f->args, t->offset, f->memory + FUZZ_MEMORY / 4 + at);
    if (!has_strides(f->pass, t)) return;
    if (columns) {
        int dtype;
        memcpy(&dtype, f->args + f->op->dtype_offset, sizeof dtype);
        set_stride(f->args, t, (gt_stride){0, row / (dtype == GT_BF16 ? 2 : 4), 0});
    } else if (one_in(2)) {
        set_stride(f->args, t, (gt_stride){random_stride(), random_stride(), random_stride()});
        if (gt_stride_count(t) == 4) set_last_stride(f->args, t, random_stride());
    }
}

static void random_call(fuzz *f) {
    int count = 0;
    while (test_ops[count]) count++;
    f->e = test_ops[random_below(count)];
    f->op = f->e->table();
    do f->pass = (gt_pass)random_below(GT_PASSES);
    while (!f->e->twin[f->pass]);
    memset(f->args, 0, ARGS_BYTES);
    set_int(f->args, f->op->dtype_offset, one_in(100) ? 4 : (int)random_below(3));
    if (f->op->companion_offset && one_in(8)) set_int(f->args, f->op->companion_offset, (int)random_below(4));
    for (const gt_size *s = f->op->sizes; s->letter; s++) set_int64(f->args, s->offset, random_size(s));
    random_fields(f);
    int64_t window = (int64_t)64 << random_below(9);
    int64_t row = one_in(2) ? 4 + 4 * random_below(160) : 0;
    for (const gt_tensor *t = f->op->tensors; t->name; t++) random_tensor(f, t, window, row);
}

/* The address of element i, computed from the definition of strides in gt_kernels.h. */
static uintptr_t element_address(const fuzz *f, const gt_tensor *t, int64_t i, int bytes) {
    int64_t offset = 0, packed = 1;
    gt_stride4 s = {0, 0, 0, 0};
    if (t->stride_offset && gt_stride_count(t) > 1)
        memcpy(&s, f->filled + t->stride_offset, (size_t)gt_stride_count(t) * sizeof s.b);
    for (int k = (int)strlen(t->shape) - 1; k >= 0; k--) {
        int64_t n = f->dims.n[t->shape[k] - 'A'], stride = packed;
        if (gt_stride_count(t) == 1 && k == 0) stride = get_int64(f->filled, t->stride_offset);
        if (gt_stride_count(t) > 1 && k < 3) stride = k == 0 ? s.b : k == 1 ? s.t : s.h;
        if (k == 3 && gt_stride_count(t) == 4) stride = s.n;
        offset += i % n * stride;
        i /= n;
        packed *= n;
    }
    return (uintptr_t)get_pointer(f->filled, t) + (uint64_t)offset * (uint64_t)bytes;
}

static int64_t element_count(const fuzz *f, const gt_tensor *t) {
    int64_t count = get_pointer(f->filled, t) != NULL && is_used(t, f->pass);
    for (const char *s = t->shape; *s && count; s++) {
        int64_t n = f->dims.n[*s - 'A'];
        count = n > FUZZ_ELEMENTS ? FUZZ_ELEMENTS + 1 : count * n;
        if (count > FUZZ_ELEMENTS) return FUZZ_ELEMENTS + 1;
    }
    return count;
}

static int element_bytes(const fuzz *f, const gt_tensor *t) {
    const size_t offset = gt_dtype_field(f->op, t);
    int dtype;
    if (!offset) return t->kind == 'b' ? 1 : 4;
    memcpy(&dtype, f->filled + offset, sizeof dtype);
    return gt_dtype_bytes((gt_dtype)dtype);
}

/* Whether an output that may equal `in` has the same address as `in` in every element. */
static int is_legal_alias(const fuzz *f, const gt_tensor *in) {
    for (const gt_tensor *t = f->op->tensors; t->name; t++) {
        int64_t n = element_count(f, t);
        int bytes = element_bytes(f, t), same = n > 0;
        if (!is_output(t, f->pass) || !t->may_equal || strcmp(t->may_equal, in->name)) continue;
        if (n != element_count(f, in) || bytes != element_bytes(f, in)) continue;
        for (int64_t i = 0; i < n; i++) same &= element_address(f, t, i, bytes) == element_address(f, in, i, bytes);
        if (same) return 1;
    }
    return 0;
}

static int by_address(const void *a, const void *b) {
    const element *x = a, *y = b;
    return (x->at > y->at) - (x->at < y->at);
}

static void enumerate(fuzz *f) {
    f->count = 0;
    for (const gt_tensor *t = f->op->tensors; t->name; t++) {
        int64_t n = element_count(f, t);
        int bytes = element_bytes(f, t);
        if (n > FUZZ_ELEMENTS - f->count) {
            f->count = -1;
            return;
        }
        if (is_legal_alias(f, t)) continue;
        for (int64_t i = 0; i < n; i++)
            f->elements[f->count++] = (element){element_address(f, t, i, bytes), bytes, is_output(t, f->pass)};
    }
    qsort(f->elements, (size_t)f->count, sizeof(element), by_address);
}

/* Whether an element that the call writes shares a byte with another element. */
static int elements_overlap(const fuzz *f) {
    uintptr_t end = 0, end_written = 0;
    for (int i = 0; i < f->count; i++) {
        const element *x = &f->elements[i];
        if (x->at < (x->written ? end : end_written)) return 1;
        if (x->at + (uintptr_t)x->bytes > end) end = x->at + (uintptr_t)x->bytes;
        if (x->written) end_written = x->at + (uintptr_t)x->bytes;
    }
    return 0;
}

/* Writes valid numbers to cu_seqlens (0, 1, ... up to T) and seq_count, even if the two share memory.  `saved` receives
 * the old contents. */
static void write_sequences(fuzz *f, int32_t saved[8]) {
    char *cu_seqlens = get_pointer(f->args, find_tensor(f->op, "cu_seqlens"));
    char *seq_count = get_pointer(f->args, find_tensor(f->op, "seq_count"));
    int64_t capacity = get_int64(f->args, f->op->fields.seq_capacity), T = f->dims.n['T' - 'A'];
    memcpy(saved, cu_seqlens, (size_t)(capacity + 1) * 4);
    if (seq_count) memcpy(&saved[7], seq_count, 4);
    if (seq_count) memcpy(seq_count, &(int32_t){(int32_t)capacity}, 4);
    for (int32_t i = 0; i <= capacity; i++) memcpy(cu_seqlens + 4 * i, &(int32_t){i < T ? i : (int32_t)T}, 4);
}

static void restore_sequences(fuzz *f, const int32_t saved[8]) {
    char *cu_seqlens = get_pointer(f->args, find_tensor(f->op, "cu_seqlens"));
    char *seq_count = get_pointer(f->args, find_tensor(f->op, "seq_count"));
    memcpy(cu_seqlens, saved, (size_t)(get_int64(f->args, f->op->fields.seq_capacity) + 1) * 4);
    if (seq_count) memcpy(seq_count, &saved[7], 4);
}

/* Runs the twin if all elements lie in f->memory.  Only elements of outputs may change. */
static void run_accepted(fuzz *f, int number) {
    uintptr_t first = (uintptr_t)f->memory, end = first + FUZZ_MEMORY;
    int changed = 0;
    int32_t saved[8];
    for (const gt_size *s = f->op->sizes; s->letter; s++)
        if (f->dims.n[s->letter - 'A'] > 64) return;
    for (int i = 0; i < f->count; i++)
        if (f->elements[i].at < first || f->elements[i].at + (uintptr_t)f->elements[i].bytes > end) return;
    f->run++;
    if (is_packed(f)) write_sequences(f, saved);
    check(f->e->twin[f->pass](f->args) == GT_OK, "fuzz %d: %s", number, gt_last_error());
    if (is_packed(f)) restore_sequences(f, saved);
    for (int i = 0; i < f->count; i++)
        if (f->elements[i].written)
            memcpy(f->memory + (f->elements[i].at - first), f->before + (f->elements[i].at - first),
                   (size_t)f->elements[i].bytes);
    changed = memcmp(f->memory, f->before, FUZZ_MEMORY) != 0;
    if (!check(!changed, "fuzz %d: %s %s writes outside its outputs", number, f->op->name, pass_names[f->pass]))
        memcpy(f->memory, f->before, FUZZ_MEMORY);
}

static void fuzz_once(fuzz *f, int number) {
    char function[64];
    random_call(f);
    gt_status status = gt_prepare(f->op, f->pass, GT_HOST, f->args, f->filled, &f->dims);
    const char *message = gt_last_error();
    int overlap =
        status == GT_ERROR_OVERLAP || (status == GT_ERROR_STRIDE && strstr(message, "elements of this output overlap"));
    snprintf(function, sizeof function, "gt_ref_%s_%s: ", f->op->name, pass_names[f->pass]);
    if (status != GT_OK)
        check(((status >= GT_ERROR_NULL && status <= GT_ERROR_OVERLAP) || status == GT_ERROR_UNSUPPORTED) &&
                  !strncmp(message, function, strlen(function)) && strlen(message) < 400,
              "fuzz %d: status %d, message: %s", number, status, message);
    if (status != GT_OK && !overlap) return;
    f->accepted += !overlap;
    f->refused += overlap;
    enumerate(f);
    if (f->count < 0) {
        f->too_large++;
        return;
    }
    if (overlap)
        f->refused_wrongly += !elements_overlap(f);
    else if (check(!elements_overlap(f), "fuzz %d: %s %s: overlapping outputs accepted", number, f->op->name,
                   pass_names[f->pass]))
        run_accepted(f, number);
}

/* The library must refuse every overlap.  The library may also refuse some calls without overlap: tensors with
 * different row lengths that interleave, and strides that are not nested.  Such calls must be rare. */
static void test_fuzz(void) {
    fuzz *f = calloc(1, sizeof *f);
    if (!check(f != NULL, "no memory")) return;
    random_state = 20240501;
    fill_small(f->memory, FUZZ_MEMORY);
    memcpy(f->before, f->memory, FUZZ_MEMORY);
    for (int i = 0; i < FUZZ_CALLS; i++) fuzz_once(f, i);
    printf("fuzz: %d calls, %d accepted (%d run, %d too large), %d refused for overlap (%d of them "
           "needlessly)\n",
           FUZZ_CALLS, f->accepted, f->run, f->too_large, f->refused, f->refused_wrongly);
    check(f->accepted > FUZZ_CALLS / 20 && f->run > FUZZ_CALLS / 20 && f->refused > FUZZ_CALLS / 20,
          "the fuzz test runs or refuses too few calls");
    check(f->refused_wrongly * 20 <= f->refused, "more than 5 %% of the refusals are needless");
    free(f);
}

int main(void) {
    static call c;
    check(!strcmp(gt_last_error(), ""), "a message before the first error: %s", gt_last_error());
    kernels_built = gt_device_supported(-1) != GT_ERROR_NO_CUDA;
    if (!kernels_built)
        check(!strncmp(gt_last_error(), "gt_device_supported: built without CUDA", 39), "message: %s", gt_last_error());
    test_version();
    test_args_size();
    if (!kernels_built) test_path_stub();
    test_status_strings();
    test_last_error();
    test_defaults();
    for (int i = 0; test_ops[i]; i++) {
        const test_op *e = test_ops[i];
        for (int pass = GT_FORWARD; pass < GT_PASSES; pass++) {
            int variants = takes_packed(e->table()) && pass != GT_STEP && !gt_is_join((gt_pass)pass) ? 3 : 2;
            for (int variant = 0; e->twin[pass] && variant < variants; variant++) {
                build_call(&c, e, (gt_pass)pass, variant);
                test_call(&c);
            }
        }
    }
    test_chunks();
    test_quantize();
    test_int8_states();
    test_no_tokens();
    test_fuzz();
    return test_finish();
}
