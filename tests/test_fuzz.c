/* Hostile and valid calls of every operator: random and extreme sizes, strides, dtypes, flags and numbers, and pointers
 * that are NULL, misaligned, overlapping or invalid.
 *
 *     test_fuzz [--seed S] [--calls N] [--only I] [OP ...]
 *
 * Each tensor lies in a buffer of exactly its size, between guard bytes that a sanitizer poisons.  A refused call must
 * change nothing, and its message must name function and field.  An accepted call must write all elements of its
 * outputs and nothing else, and its results must agree with the double twin.  A call without elements must be accepted
 * if each size is in its range and no tensor has more than 2^48 elements.  The test also makes a workspace query for
 * every call.
 *
 * There are two programs: one for the CPU twins, and one for the emulated kernels (FUZZ_KERNELS).  Call I of seed S is
 * always the same. */
#include "gt_test.h"
#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>
#ifdef FUZZ_KERNELS
#include "test_kernels.h"
#endif

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define FORBID(at, bytes) ASAN_POISON_MEMORY_REGION(at, bytes)
#define ALLOW(at, bytes) ASAN_UNPOISON_MEMORY_REGION(at, bytes)
/* Makes the sanitizer's malloc return NULL for sizes that are too large, as other mallocs do. */
const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "allocator_may_return_null=1"; }
#else
#define FORBID(at, bytes) ((void)(at), (void)(bytes))
#define ALLOW(at, bytes) ((void)(at), (void)(bytes))
#endif

#ifdef FUZZ_KERNELS
enum { CALLS = 300, IS_KERNEL = 1 };
#else
enum { CALLS = 20000, IS_KERNEL = 0 };
#endif
enum { GUARD = 64, MEMORY = 1 << 24, MOST_BYTES = 1 << 18, MOST_SCRATCH = 1 << 23, SECONDS = 60 };

/* ---- one call -------------------------------------------------------------------------------- */

/* The library must accept VALID and EMPTY calls.  In an EMPTY call one size is 0, and others are as large as possible.
 * HOSTILE calls may have any fault. */
typedef enum kind { VALID, EMPTY, HOSTILE } kind;

/* A buffer of exactly the size of one tensor, as an offset and a number of bytes in `memory`. */
typedef struct place {
    int64_t at, bytes;
} place;

typedef struct fuzz {
    const char *name;
    const test_op *top;
    const gt_op *op;
    uint64_t seed;
    int64_t number;
    gt_pass pass;
    kind kind;
    int is_spoiled; /* the test changed a field, and the new value may be invalid */
    test_random random;
    test_args args, filled;
    gt_dims dims;
    place places[TEST_TENSORS + 2];
    int place_count;
    int64_t used;          /* used bytes of `memory` */
    char *memory, *before; /* the memory of the call, and its expected contents; MEMORY bytes each */
    double *drawn[TEST_TENSORS];
    int64_t accepted, refused, ran, compared, queried;
} fuzz;

static int64_t below(fuzz *f, int64_t n) { return (int64_t)(test_next(&f->random) % (uint64_t)n); }
static int one_in(fuzz *f, int64_t n) { return below(f, n) == 0; }

static void put(fuzz *f, size_t offset, const void *value, size_t bytes) {
    memcpy((char *)&f->args + offset, value, bytes);
}
static void put_int(fuzz *f, size_t offset, int value) { put(f, offset, &value, sizeof value); }
static void put_size(fuzz *f, size_t offset, int64_t value) { put(f, offset, &value, sizeof value); }
static void put_pointer(fuzz *f, const gt_tensor *t, const char *p) { put(f, t->offset, &p, sizeof p); }
static int64_t size_at(const void *args, size_t offset) {
    int64_t value;
    memcpy(&value, (const char *)args + offset, sizeof value);
    return value;
}
static int flag_at(const fuzz *f, size_t offset) { /* 0 if the operator lacks the field */
    int value = 0;
    if (offset) memcpy(&value, (const char *)&f->args + offset, sizeof value);
    return value;
}
static char *pointer_of(const void *args, const gt_tensor *t) {
    char *p;
    memcpy(&p, (const char *)args + t->offset, sizeof p);
    return p;
}

static int is_packed(const fuzz *f) {
    return f->op->fields.seq_capacity && size_at(&f->args, f->op->fields.seq_capacity) > 0;
}

static const char *const pass_names[] = {"forward",          "backward", "step",          "segment",
                                         "segment_backward", "join",     "join_backward", "workspace"};

static int expect(const fuzz *f, int ok, const char *what) {
    return test_check(ok,
                      "%s_%s, call %" PRId64 ": %s; last error: %s\n"
                      "        again: --seed %" PRIu64 " --only %" PRId64 " %s",
                      f->name, pass_names[f->pass], f->number, what, gt_last_error(), f->seed, f->number, f->name);
}

/* ---- sizes and flags ------------------------------------------------------------------------- */

/* A size near a power of 2, so that products of sizes overflow. */
static int64_t extreme(fuzz *f) {
    static const int64_t others[] = {-1, INT64_MIN, INT64_MAX, 0, 17, -((int64_t)1 << 40)};
    const int64_t power = (int64_t)1 << below(f, 63);
    if (one_in(f, 4)) return others[below(f, 6)];
    return power + (one_in(f, 2) ? 0 : below(f, 3) - 1) * (one_in(f, 2) ? 1 : 67 * 64);
}

/* A size near a power of 2 that is valid: between min and 2^40. */
static int64_t extreme_in_range(fuzz *f, int64_t min) {
    int64_t n = ((int64_t)1 << below(f, 41)) - (one_in(f, 2) ? 0 : below(f, 2) * 67 * 64);
    return n < min ? min : n;
}

static int64_t small_size(fuzz *f, char letter) {
    switch (letter) {
    case 'B': return one_in(f, 20) ? 0 : 1 + below(f, 3);
    case 'T':
        if (f->pass == GT_STEP) return one_in(f, 20) ? 0 : 1 + below(f, 16);
        return one_in(f, 20) ? 0 : one_in(f, 40) ? 60 + below(f, 75) : 1 + below(f, 5);
    case 'M': return one_in(f, 20) ? 0 : one_in(f, 40) ? 60 + below(f, f->pass == GT_STEP ? 5 : 75) : 1 + below(f, 5);
    case 'W': return 2 + below(f, 3);
    case 'H':
    case 'h': return 1 + below(f, 3);
    case 'D':
    case 'O': return one_in(f, 20) ? 16 + below(f, 60) : 1 + below(f, 6);
    default: /* N, V, P: also sizes for which the operator has specialised kernels */
        if (one_in(f, IS_KERNEL ? 3 : 40)) return (int64_t)16 << below(f, IS_KERNEL ? 3 : 2);
        return one_in(f, 20) ? 9 + below(f, 12) : 1 + below(f, 4);
    }
}

static const gt_size *find_size(const fuzz *f, char letter) {
    const gt_size *s = f->op->sizes;
    while (s->letter && s->letter != letter) s++;
    return s->letter ? s : NULL;
}

static void draw_sizes(fuzz *f) {
    /* the size that is 0 in an EMPTY call; for a step not T, because a step without tokens still needs its states */
    const char *const zero = !test_is_over_time(f->top) ? "M" : f->pass == GT_STEP || one_in(f, 2) ? "B" : "T";
    for (const gt_size *s = f->op->sizes; s->letter; s++) {
        int64_t n = small_size(f, s->letter);
        if (f->kind == EMPTY && one_in(f, 2) && s->letter != 'W') n = extreme_in_range(f, s->min);
        if (f->pass == GT_STEP && f->kind == EMPTY && s->letter == 'T') n = below(f, 17);
        if (f->kind == EMPTY && s->letter == *zero) n = 0;
        if (f->kind == HOSTILE && one_in(f, 4)) n = extreme(f);
        put_size(f, s->offset, n);
    }
}

static void draw_float(fuzz *f, size_t offset, float usual) {
    static const float others[] = {0, -1, 1e30f, -1e30f, INFINITY, -INFINITY, NAN, FLT_MIN, 1e-45f};
    const float value = f->kind == HOSTILE && one_in(f, 3) ? others[below(f, 9)] : usual;
    put(f, offset, &value, sizeof value);
}

/* Draws a size that must divide another size, and changes the other size to a multiple. */
static void draw_divisor(fuzz *f, const test_field *x) {
    const gt_size *of = find_size(f, x->of);
    int64_t n = size_at(&f->args, of->offset), g = 1 + below(f, 4);
    if (one_in(f, 2)) return;
    if (f->kind == HOSTILE && one_in(f, 4)) g = extreme(f);
    if (f->kind != HOSTILE && n > 1 << 20) g = n % g ? n : g;
    put_size(f, x->offset, g);
    if (f->kind != HOSTILE && n <= 1 << 20) put_size(f, of->offset, g * (1 + below(f, 4)));
}

static void draw_fields(fuzz *f) {
    const int dtype = f->kind == HOSTILE && one_in(f, 8) ? (int)extreme(f) : (int)below(f, 4);
    put_int(f, f->op->dtype_offset, dtype);
    if (f->op->companion_offset && one_in(f, 2))
        put_int(f, f->op->companion_offset, f->kind == HOSTILE && one_in(f, 4) ? (int)extreme(f) : GT_F32);
    if (f->op->second.name && one_in(f, 2))
        put_int(f, f->op->second.offset, f->kind == HOSTILE && one_in(f, 4) ? (int)extreme(f) : GT_F32);
    const size_t of_steps[] = {f->op->of_steps.state, f->op->of_steps.parameter, f->op->of_steps.conv_state};
    const gt_state_passes passes = f->op->of_steps.passes;
    const int takes[] = {(f->pass == GT_STEP && passes != GT_STATES_OF_FORWARD) ||
                             (f->pass == GT_FORWARD && passes != GT_STATES_OF_STEP),
                         f->pass == GT_STEP, f->pass == GT_FORWARD};
    for (int i = 0; i < 3; i++)
        if (of_steps[i] && one_in(f, 2) && (f->kind == HOSTILE || takes[i]))
            put_int(f, of_steps[i],
                    f->kind == HOSTILE && one_in(f, 4)
                        ? (int)extreme(f)
                        : (int)below(f, i == 0 && f->op->of_steps.scale && f->pass != GT_FORWARD ? 5 : 4));
    if (f->op->of_steps.snapshot && one_in(f, 2) && (f->pass == GT_FORWARD || f->kind == HOSTILE)) {
        const int is_hostile = f->kind == HOSTILE && one_in(f, 4);
        put_int(f, f->op->of_steps.snapshot, is_hostile ? (int)extreme(f) : (int)below(f, 4));
        put_size(f, f->op->of_steps.snapshot_every, is_hostile ? extreme(f) : GT_SNAPSHOT_TOKENS * (1 + below(f, 2)));
        if (f->kind != HOSTILE && f->kind != EMPTY && one_in(f, 8))
            put_size(f, find_size(f, 'T')->offset, GT_SNAPSHOT_TOKENS + below(f, 5));
    }
    put_int(f, f->op->accumulate_offset, f->kind == HOSTILE && one_in(f, 8) ? (int)extreme(f) : one_in(f, 4));
    for (const test_field *x = f->top->fields; x->name; x++) {
        const int is_hostile = f->kind == HOSTILE && one_in(f, 8);
        if (x->kind == 'i') put_int(f, x->offset, is_hostile ? (int)extreme(f) : one_in(f, 3));
        if (x->kind == 'v' && one_in(f, 2)) put_size(f, x->offset, is_hostile ? extreme(f) : small_size(f, 'V'));
        if (x->kind == 'g') draw_divisor(f, x);
        if (x->kind == 's' && one_in(f, 3)) put_size(f, x->offset, is_hostile ? extreme(f) : below(f, 5));
        if (x->kind == 'f') draw_float(f, x->offset, (float)x->usual);
        if (x->kind == 'c' && f->pass == GT_STEP && one_in(f, 2)) {
            const int64_t W = size_at(&f->args, find_size(f, 'W')->offset);
            put_size(f, x->offset, is_hostile || W < 1 || W > 9 ? extreme(f) : W - 1 + below(f, 5));
        }
    }
    if (f->op->fields.state_in_shared && (f->pass == GT_STEP || f->pass == GT_SEGMENT_BACKWARD) && f->kind != HOSTILE)
        put_int(f, f->op->fields.state_in_shared, 0);
}

/* Draws the capacity of packed sequences, or the number of rows of a pool of states. */
static void draw_rows(fuzz *f) {
    const int64_t B = size_at(&f->args, f->op->sizes[0].offset);
    const int has_pool = f->op->fields.slot_capacity && f->pass == GT_STEP;
    if (has_pool && one_in(f, 2) && B >= 0 && B < INT64_MAX - 8 && f->kind != EMPTY)
        put_size(f, f->op->fields.slot_capacity, f->kind == HOSTILE && one_in(f, 4) ? extreme(f) : B + below(f, 4));
    if (f->pass == GT_STEP || gt_is_join(f->pass) || !test_takes_packed(f->top) || !one_in(f, 4)) return;
    put_size(f, f->op->fields.seq_capacity, f->kind == HOSTILE && one_in(f, 4) ? extreme(f) : 1 + below(f, 4));
    if (f->kind != HOSTILE || one_in(f, 2)) put_size(f, f->op->sizes[0].offset, 1);
    if (f->kind == EMPTY) put_size(f, find_size(f, 'T')->offset, 0);
}

/* ---- strides --------------------------------------------------------------------------------- */

static void put_stride4(fuzz *f, const gt_tensor *t, int64_t b, int64_t step, int64_t h, int64_t n) {
    const gt_stride4 s = {b, step, h, n};
    if (t->shape[0] == 'M')
        put_size(f, t->stride_offset, step);
    else
        put(f, t->stride_offset, &s, (size_t)gt_stride_count(t) * sizeof s.b);
}

static void put_stride(fuzz *f, const gt_tensor *t, int64_t b, int64_t step, int64_t h) {
    put_stride4(f, t, b, step, h, 0);
}

static void hostile_stride(fuzz *f, const gt_tensor *t) {
    put_stride4(f, t, one_in(f, 2) ? extreme(f) : below(f, 40), one_in(f, 2) ? extreme(f) : below(f, 40),
                one_in(f, 2) ? extreme(f) : below(f, 40), one_in(f, 2) ? extreme(f) : below(f, 40));
}

static int64_t size_of(const fuzz *f, char letter) { return letter ? f->dims.n[letter - 'A'] : 1; }

/* Whether all tensors are so small that the test may choose strides with gaps. */
static int is_small(const fuzz *f) {
    for (const gt_tensor *t = f->op->tensors; t->name; t++) {
        int64_t count = 1;
        for (const char *c = t->shape; *c; c++) {
            const int64_t n = size_of(f, *c);
            if (n > MOST_BYTES / 8 || (count *= n > 0 ? n : 1) > MOST_BYTES / 8) return 0;
        }
    }
    return 1;
}

/* Draws the strides of all tensors.  Needs f->dims. */
static void draw_strides(fuzz *f) {
    const int64_t layout = below(f, 8);
    for (const gt_tensor *t = f->op->tensors; t->name; t++) {
        int64_t inner, T, H, h, step;
        if (!t->stride_offset || (test_is_state(t) && !(f->pass == GT_STEP && gt_stride_count(t) == 3))) continue;
        if (f->kind == HOSTILE && one_in(f, 8)) hostile_stride(f, t);
        if (!is_small(f)) continue;
        if (t->shape[0] == 'M') {
            if (layout < 4) put_size(f, t->stride_offset, size_of(f, t->shape[1]) + below(f, 4));
            continue;
        }
        inner = size_of(f, t->shape[3]), T = size_of(f, t->shape[1]), H = size_of(f, t->shape[2]);
        h = inner + below(f, 3), step = H * h + below(f, 3);
        if (layout == 0) put_stride(f, t, T * step + below(f, 3), step, h);                      /* gaps */
        if (layout == 1) put_stride(f, t, 0, inner, T * inner);                                  /* time last */
        if (layout == 3 && gt_stride_count(t) == 4) put_stride4(f, t, 0, 1, 0, T + below(f, 3)); /* time last */
        if (layout == 2) put_stride(f, t, one_in(f, 2) ? 0 : T * step, step, one_in(f, 2) ? 0 : h);
    }
}

/* ---- memory ---------------------------------------------------------------------------------- */

static int is_used(const fuzz *f, const gt_tensor *t) { return gt_use(t, f->pass) != '-'; }

/* The number of bytes from the start of the first element to the end of the last. */
static int64_t extent(const gt_view *v) {
    int64_t bytes = v->count ? v->element : 0;
    for (int i = 0; i < v->rank && v->count; i++) bytes += (v->size[i] - 1) * v->stride[i];
    return bytes;
}

static char *element_at(const gt_view *v, int64_t i) {
    char *at = v->data;
    for (int d = v->rank - 1; d >= 0; d--) {
        at += i % v->size[d] * v->stride[d];
        i /= v->size[d];
    }
    return at;
}

/* Reserves a place that is aligned to `align` bytes.  Returns NULL if the memory is full. */
static char *reserve(fuzz *f, int64_t bytes, int64_t align) {
    int64_t at = (f->used + GUARD + 15) / 16 * 16 + align * below(f, 16 / align);
    if (at + bytes + GUARD > MEMORY) return NULL;
    f->places[f->place_count++] = (place){at, bytes};
    f->used = at + bytes;
    return f->memory + at;
}

/* A pointer to no memory: any access through it faults. */
static const char *wild(fuzz *f) {
    static const uintptr_t pages[] = {16, 4096, (uintptr_t)1 << 46, UINTPTR_MAX / 16 * 8, UINTPTR_MAX - 15};
    return (const char *)pages[below(f, 5)]; /* NOLINT: the address is invalid on purpose */
}

static int is_array_of_steps(const gt_tensor *t) { return test_is_word_of("slots tokens commit places", t->name); }

static int is_left_out(fuzz *f, const gt_tensor *t) {
    return strcmp(t->name, "slots") ? one_in(f, 2) : size_at(&f->args, f->op->fields.slot_capacity) == 0;
}

/* Gives every tensor of the pass a place, or leaves an optional tensor out. */
static void draw_pointers(fuzz *f) {
    for (const gt_tensor *t = f->op->tensors; t->name; t++) {
        gt_view v;
        if (!is_used(f, t)) {
            if (t->kind != 'i' && !test_is(t, "state_in") && one_in(f, 2)) put_pointer(f, t, wild(f));
            continue;
        }
        if (f->pass == GT_FORWARD && test_is_word_of("slots starts_zero", t->name)) continue;
        if (!strncmp(t->name, "rounding_", 9)) continue;
        if (is_array_of_steps(t) ? is_left_out(f, t) : t->kind == 'i' && !is_packed(f)) continue;
        if (!strcmp(t->name, "seq_count") && one_in(f, 2)) continue;
        if (f->pass == GT_STEP && !strcmp(t->name, "state_in")) continue;
        v = gt_view_of(f->op, t, &f->filled, &f->dims);
        const int is_optional = strchr("iog", gt_use(t, f->pass)) && strcmp(t->name, "cu_seqlens");
        if (is_optional && one_in(f, 4)) continue;
        const int is_refused = !strcmp(t->name, "state_scale") ||
                               (gt_is_snapshots(t) && size_at(&f->args, f->op->of_steps.snapshot_every) == 0);
        if (v.count == 0)
            put_pointer(f, t, one_in(f, 2) || is_refused ? NULL : wild(f));
        else if (v.count <= MOST_BYTES && extent(&v) <= MOST_BYTES)
            put_pointer(f, t, reserve(f, extent(&v), v.element));
        else if (!is_optional) {
            /* this place is too small, so the test does not run the call even if the library accepts it */
            put_pointer(f, t, reserve(f, 16, 16));
            f->is_spoiled = 1;
        }
    }
    for (int z = 0; f->op->tensors[z].name && f->pass == GT_BACKWARD && f->kind != HOSTILE; z++)
        if (test_is(&f->op->tensors[z], "z") && !pointer_of(&f->args, &f->op->tensors[z]))
            put_pointer(f, &f->op->tensors[test_gradient_of(f->op, z)], NULL);
    for (int i = 0; i < 2 && f->pass == GT_BACKWARD && f->kind != HOSTILE; i++) { /* dgain needs y */
        const int gain = test_find(f->op, i ? "dgain_ssm" : "dgain_wkv");
        const int y = test_find(f->op, i ? "ssd.y" : "wkv6.y");
        if (gain >= 0 && !pointer_of(&f->args, &f->op->tensors[y])) put_pointer(f, &f->op->tensors[gain], NULL);
    }
}

static const gt_tensor *any_tensor(fuzz *f) {
    int n = 0;
    while (f->op->tensors[n].name) n++;
    return &f->op->tensors[below(f, n)];
}

/* Changes one pointer to an address that may be invalid. */
static void spoil_pointer(fuzz *f) {
    const gt_tensor *t = any_tensor(f), *other = any_tensor(f);
    char *p = pointer_of(&f->args, t), *q = pointer_of(&f->args, other);
    f->is_spoiled = 1;
    switch (below(f, 5)) {
    case 0: put_pointer(f, t, NULL); break;
    case 1: put_pointer(f, t, (char *)((uintptr_t)p + 1 + (uintptr_t)below(f, 3))); break;
    case 2: put_pointer(f, t, q); break;
    case 3: put_pointer(f, t, (char *)((uintptr_t)q + 4 * (uintptr_t)below(f, 9))); break;
    default: put_pointer(f, t, wild(f));
    }
}

/* Places an output on the input whose memory it may share. */
static void draw_in_place(fuzz *f) {
    for (const gt_tensor *t = f->op->tensors; t->name; t++) {
        const int in = t->may_equal ? test_find(f->op, t->may_equal) : -1;
        const char *p = in >= 0 ? pointer_of(&f->args, &f->op->tensors[in]) : NULL;
        if (!p || !test_is_output(t, f->pass) || !is_used(f, &f->op->tensors[in]) || !one_in(f, 2)) continue;
        if (flag_at(f, f->op->fields.state_in_shared)) continue;
        if (t->stride_offset && f->op->tensors[in].stride_offset) {
            char stride[sizeof(gt_stride4)];
            const size_t bytes = (size_t)gt_stride_count(t) * sizeof(int64_t);
            memcpy(stride, (char *)&f->args + f->op->tensors[in].stride_offset, bytes);
            put(f, t->stride_offset, stride, bytes);
        }
        put_pointer(f, t, p);
    }
}

/* ---- numbers --------------------------------------------------------------------------------- */

static int is_output(const fuzz *f, const gt_tensor *t) { return test_is_output(t, f->pass); }

static int is_read(const fuzz *f, const gt_tensor *t) {
    if (test_is_input(t, f->pass)) return 1;
    if (!is_output(f, t) || !flag_at(f, f->op->accumulate_offset)) return 0;
    return t->use[f->pass] == 'g' || (test_is(t, "dstate_in") && flag_at(f, f->op->fields.state_in_shared));
}

static gt_dtype dtype_of(const fuzz *f, const gt_tensor *t) {
    gt_dtype dtype = GT_F32;
    const size_t offset = gt_dtype_field(f->op, t);
    if (offset) memcpy(&dtype, (const char *)&f->filled + offset, sizeof dtype);
    return dtype;
}

static double load(const fuzz *f, const gt_tensor *t, const char *from) {
    const gt_dtype dtype = dtype_of(f, t);
    uint16_t half;
    float x;
    int32_t i;
    if (t->kind == 'i') return memcpy(&i, from, sizeof i), i;
    if (t->kind == 'b') return *(const int8_t *)from;
    if (dtype == GT_F32) return memcpy(&x, from, sizeof x), x;
    if (dtype == GT_INT8) return *(const int8_t *)from;
    memcpy(&half, from, sizeof half);
    return dtype == GT_BF16 ? gt_bf16_to_f32(half) : gt_f16_to_f32(half);
}

static double store(const fuzz *f, const gt_tensor *t, double value, char *to) {
    const gt_dtype dtype = dtype_of(f, t);
    const float x = (float)value;
    const int32_t i = t->kind == 'i' ? (int32_t)value : 0;
    const uint16_t half = dtype == GT_BF16 ? gt_f32_to_bf16(x) : gt_f32_to_f16(x);
    if (t->kind == 'i')
        memcpy(to, &i, sizeof i);
    else if (t->kind == 'b')
        *(int8_t *)to = isnan(value) ? 0 : (int8_t)value;
    else if (dtype == GT_F32)
        memcpy(to, &x, sizeof x);
    else if (dtype == GT_INT8)
        *(int8_t *)to = (int8_t)test_round(40 * value, GT_INT8);
    else
        memcpy(to, &half, sizeof half);
    return load(f, t, to);
}

static double draw_number(fuzz *f, const gt_tensor *t) {
    const test_case c = {.op = f->name, .args = f->args};
    test_map map;
    const test_fill fill = test_fill_of(&c, t, &map);
    if (t->kind == 'b') return (double)below(f, 256) - 128;
    const double x = fill.mean + fill.spread * test_normal(&f->random);
    return map == TEST_AS_IS ? x : map == TEST_EXP ? exp(x) : -exp(x);
}

/* Draws the pool row of batch element i.  No row is drawn twice, and some are out of range. */
static double draw_slot(fuzz *f, int64_t i, int64_t first) {
    static const int32_t outside[] = {-1, INT32_MIN, INT32_MAX};
    const int64_t rows = size_at(&f->args, f->op->fields.slot_capacity);
    if (rows == 0 || one_in(f, 5)) return outside[below(f, 3)];
    return i < rows ? (double)((i + first) % rows) : (double)rows;
}

/* Draws how many tokens a batch element has, or commits.  Some numbers are out of range. */
static double draw_draft(fuzz *f, int64_t T) {
    static const int32_t outside[] = {-1, INT32_MIN, INT32_MAX};
    if (one_in(f, 8)) return one_in(f, 2) ? (double)(T + 1) : outside[below(f, 3)];
    return (double)(one_in(f, 2) ? T : below(f, T + 1));
}

/* Writes random numbers to a tensor that the pass reads, and NaN to other outputs. */
static void draw_tensor(fuzz *f, const gt_tensor *t, const gt_view *v, double *drawn) {
    const int64_t T = f->dims.n['T' - 'A'], first = below(f, 8);
    double at = 0;
    for (int64_t i = 0; i < v->count; i++) {
        double x = is_read(f, t) && t->kind != 'i' ? draw_number(f, t) : NAN;
        if (!strcmp(t->name, "slots")) x = draw_slot(f, i, first);
        if (!strcmp(t->name, "tokens") || !strcmp(t->name, "commit")) x = draw_draft(f, T);
        if (!strcmp(t->name, "places")) x = one_in(f, 8) ? (double)(int32_t)extreme(f) : (double)below(f, 9) - 3;
        if (!strcmp(t->name, "cu_seqlens")) {
            at += i ? (double)below(f, T - (int64_t)at + 1) : 0;
            x = at;
            if (!IS_KERNEL && one_in(f, 100)) x = (double)(int32_t)extreme(f), f->is_spoiled = 1;
        }
        if (!strcmp(t->name, "seq_count")) {
            x = (double)below(f, size_at(&f->args, f->op->fields.seq_capacity) + 1);
            if (!IS_KERNEL && one_in(f, 50)) x = (double)(int32_t)extreme(f), f->is_spoiled = 1;
        }
        drawn[i] = store(f, t, x, element_at(v, i));
    }
}

static int place_of(const fuzz *f, const gt_view *v) {
    /* an address outside `memory` gives a large number */
    const uintptr_t at = (uintptr_t)v->data - (uintptr_t)f->memory;
    for (int i = 0; i < f->place_count; i++) {
        const uintptr_t first = (uintptr_t)f->places[i].at, end = first + (uintptr_t)f->places[i].bytes;
        if (at >= first && at <= end && (uintptr_t)extent(v) <= end - at) return i;
    }
    return -1;
}

/* Whether all elements of a prepared call lie in places that the test reserved for them. */
static int is_honest(const fuzz *f) {
    for (const gt_tensor *t = f->op->tensors; t->name; t++) {
        const gt_view v = gt_view_of(f->op, t, &f->filled, &f->dims);
        if (!is_used(f, t) || !v.data || !v.count) continue;
        if (v.count > MOST_BYTES || extent(&v) > MOST_BYTES || place_of(f, &v) < 0) return 0;
    }
    return 1;
}

/* ---- the double twin -------------------------------------------------------------------------- */

/* A call of the double twin: its arrays are packed doubles. */
typedef struct truth {
    test_args args;
    double *of[TEST_TENSORS];
} truth;

/* Runs the double twin on the inputs `in`.  Multiplies each input by a random factor between 1 - change and 1 +
 * change. */
static gt_status run_truth(fuzz *f, double *const *in, double change, truth *x) {
    x->args = f->args;
    for (int i = 0; f->op->tensors[i].name; i++) {
        const gt_tensor *t = &f->op->tensors[i];
        const gt_view v = gt_view_of(f->op, t, &f->filled, &f->dims);
        const gt_stride4 packed = {0, 0, 0, 0};
        x->of[i] = NULL;
        if (t->stride_offset)
            memcpy((char *)&x->args + t->stride_offset, &packed, (size_t)gt_stride_count(t) * sizeof packed.b);
        if (!is_used(f, t) || !v.data || !v.count || t->kind == 'i') continue;
        x->of[i] = test_array(v.count, NAN);
        for (int64_t j = 0; j < v.count && is_read(f, t); j++)
            x->of[i][j] = in[i][j] * (1 + change * (2 * test_uniform(&f->random) - 1));
        memcpy((char *)&x->args + t->offset, &x->of[i], sizeof x->of[i]);
    }
    for (int i = 0; f->op->tensors[i].name && f->pass == GT_STEP;
         i++) { /* a step's state_in may be NULL or state_out; here it is state_out */
        char name[32];
        const int n = snprintf(name, sizeof name, "%s", f->op->tensors[i].name);
        if (n < 8 || n >= (int)sizeof name - 1 || strcmp(name + n - 8, "state_in")) continue;
        memcpy(name + n - 2, "out", 4);
        memcpy((char *)&x->args + f->op->tensors[i].offset, &x->of[test_find(f->op, name)], sizeof(double *));
    }
    return f->top->twin64[f->pass](&x->args);
}

static void free_truth(truth *x) {
    for (int i = 0; i < TEST_TENSORS; i++) free(x->of[i]);
}

/* The relative error that rounding makes in numbers inside the call.  Kernels round factors of 16-bit products. */
static double rounding(const fuzz *f) {
    static const double twin[] = {0, 0x1p-22, 0x1p-22, 0x1p-22}, kernel[] = {0, 0x1p-18, 0x1p-8, 0x1p-11};
    gt_dtype dtype;
    memcpy(&dtype, (const char *)&f->filled + f->op->dtype_offset, sizeof dtype);
    /* operators with settle() also round between stages in the twin, and the double twin may round the other way */
    return (IS_KERNEL || f->top->settle ? kernel : twin)[dtype];
}

/* The number of runs with changed inputs, which show how sensitive the outputs are.  With only two runs, a tensor of a
 * few numbers may happen to change little. */
enum { CHANGES = 4 };

static void compare_tensor(const fuzz *f, const gt_tensor *t, const gt_view *v, const double *exact,
                           const double *const *changed) {
    static const double half_unit[] = {0, 0x1p-24, 0x1p-8, 0x1p-11, 0},
                        least[] = {0, 0x1p-126, 0x1p-126, 0x1p-24, 0.51};
    const gt_dtype dtype = dtype_of(f, t);
    double square = 0, typical;
    char what[256];
    for (int64_t i = 0; i < v->count; i++)
        for (int k = 0; k < CHANGES; k++) square += (changed[k][i] - exact[i]) * (changed[k][i] - exact[i]);
    typical = sqrt(square * 2 / CHANGES / (double)v->count);
    for (int64_t i = 0; i < v->count; i++) {
        const double got = load(f, t, element_at(v, i)), error = fabs(got - exact[i]);
        /* the element belongs to no sequence, so the call does not write it */
        if (isnan(exact[i])) continue;
        /* the element rounds to infinity or nearly so */
        if (!(fabs(exact[i]) <= (dtype == GT_F16 ? 6e4 : 1e38))) continue;
        double change = 0;
        for (int k = 0; k < CHANGES; k++) change = fmax(change, fabs(changed[k][i] - exact[i]));
        const double most = 1.01 * half_unit[dtype] * fabs(exact[i]) + 16 * fmax(change, typical) + least[dtype];
        if (error <= most || got == (double)(float)exact[i]) continue;
        snprintf(what, sizeof what, "%s[%" PRId64 "] = %.9g, truth %.9g, at most %.2e apart", t->name, i, got, exact[i],
                 most);
        expect(f, 0, what);
        return;
    }
    expect(f, 1, "");
}

/* Compares the outputs of a call with those of the double twin for the inputs `in`. */
static void compare(fuzz *f, double *const *in) {
    truth exact = {.of = {NULL}}, changed[CHANGES] = {{.of = {NULL}}};
    int ok = run_truth(f, in, 0, &exact) == GT_OK;
    for (int k = 0; k < CHANGES; k++) ok = run_truth(f, in, rounding(f), &changed[k]) == GT_OK && ok;
    expect(f, ok, "the double twin refuses what the twin accepts");
    for (int i = 0; f->op->tensors[i].name && ok; i++) {
        const gt_tensor *t = &f->op->tensors[i];
        const gt_view v = gt_view_of(f->op, t, &f->filled, &f->dims);
        const double *of[CHANGES];
        if (!exact.of[i] || !is_output(f, t)) continue;
        /* here y is random, so backward cannot compute dz from it; test_kernels.c tests calls with forward's y */
        if (f->top->reads_y && flag_at(f, f->top->reads_y) && !strcmp(test_plain_name(t), "dz")) continue;
        for (int k = 0; k < CHANGES; k++) of[k] = changed[k].of[i];
        compare_tensor(f, t, &v, exact.of[i], of);
    }
    f->compared += ok;
    free_truth(&exact);
    for (int k = 0; k < CHANGES; k++) free_truth(&changed[k]);
}

/* ---- making the call ------------------------------------------------------------------------- */

static void forbid_guards(fuzz *f, int is_forbidden) {
    int64_t at = 0;
    for (int i = 0; i <= f->place_count; i++) {
        const int64_t end = i < f->place_count ? f->places[i].at : MEMORY;
        if (is_forbidden)
            FORBID(f->memory + at, (size_t)(end - at));
        else
            ALLOW(f->memory + at, (size_t)(end - at));
        if (i < f->place_count) at = end + f->places[i].bytes;
    }
}

static gt_status make_call(fuzz *f) {
    gt_status status;
    forbid_guards(f, 1);
#ifdef FUZZ_KERNELS
    const machine_mode plain = {.schedule = f->seed + (uint64_t)f->number};
    machine_job job = {.pass = {f->op->calls.pass[f->pass]}, .args = {f->args}, .passes = 1};
    status = machine_run(&job, 1, &plain);
    test_args after = job.args[0];
#else
    test_args after = f->args;
    status = f->top->twin[f->pass](&after);
#endif
    forbid_guards(f, 0);
    expect(f, !memcmp(&after, &f->args, sizeof after), "the argument struct was changed");
    return status;
}

/* Checks that the call changed only elements of its outputs. */
static void check_memory(fuzz *f, gt_status status) {
    for (const gt_tensor *t = f->op->tensors; t->name && status == GT_OK; t++) {
        const gt_view v = gt_view_of(f->op, t, &f->filled, &f->dims);
        if (!is_used(f, t) || !is_output(f, t) || !v.data) continue;
        for (int64_t i = 0; i < v.count; i++) {
            char *at = element_at(&v, i);
            memcpy(f->before + (at - f->memory), at, (size_t)v.element);
        }
    }
    /* a call may also change its workspace */
    for (int i = 0; IS_KERNEL && i < f->place_count && status == GT_OK; i++) {
        const int64_t at = f->places[i].at;
        const char *p = f->memory + at;
        if (p == (char *)(uintptr_t)size_at(&f->args, f->op->fields.workspace))
            memcpy(f->before + at, p, (size_t)f->places[i].bytes);
    }
    expect(f, !memcmp(f->memory, f->before, (size_t)f->used + GUARD),
           status == GT_OK ? "wrote outside of the elements of its outputs" : "wrote although it was refused");
}

static void check_message(const fuzz *f, gt_status status, gt_pass pass) {
    char function[64];
    const char *text = gt_last_error();
    const int is_query = pass == GT_QUERY;
    snprintf(function, sizeof function, "gt_%s%s_%s: ", IS_KERNEL || is_query ? "" : "ref_", f->op->name,
             pass_names[pass]);
    expect(f, !strncmp(text, function, strlen(function)) && strlen(text) < 400,
           "the message does not start with the function's name");
    expect(f, status >= GT_ERROR_NULL && strcmp(gt_status_string(status), gt_status_string((gt_status)-1)),
           "an unknown status");
}

/* If a size is out of range, checks that the library refuses the call and names the first such size. */
static void check_sizes(const fuzz *f, gt_status status) {
    char text[64];
    int dtype;
    memcpy(&dtype, (const char *)&f->args + f->op->dtype_offset, sizeof dtype);
    if (status == GT_ERROR_DTYPE) return;
    for (const gt_size *s = f->op->sizes; s->letter; s++) {
        const int64_t n = size_at(&f->args, s->offset);
        if (n >= s->min && n <= GT_MAX_SIZE) continue;
        snprintf(text, sizeof text, ": %s = %" PRId64 ": ", s->name, n);
        expect(f, status == GT_ERROR_SIZE && strstr(gt_last_error(), text),
               "the message does not name the size that is beyond its limit");
        return;
    }
}

static int is_unsupported(gt_status status) { return IS_KERNEL && status == GT_ERROR_UNSUPPORTED; }

/* Whether the status is allowed: a VALID or EMPTY call that was not spoiled must succeed. */
static int is_fine(const fuzz *f, gt_status status) {
    return status == GT_OK || is_unsupported(status) || f->is_spoiled || f->kind == HOSTILE;
}

/* ---- workspace ------------------------------------------------------------------------------- */

static int is_zero(const gt_workspace *w) {
    return !w->forward && !w->backward && !w->step && !w->saved && !w->segment;
}

static gt_status query(fuzz *f, const test_args *args, gt_workspace *need) {
    memset(need, 0xa5, sizeof *need);
    const gt_status status = f->op->calls.workspace(args, need);
    f->queried++;
    if (status != GT_OK) {
        check_message(f, status, GT_QUERY);
        expect(f, is_zero(need), "the answer to a query that failed is not zero");
    }
    return status;
}

static int is_about(size_t less, size_t more) { return less <= more || less - more <= less / 2; }

/* Checks that a call with twice the tokens or rows needs at least about as many bytes.  A sum of bytes that overflows
 * would be smaller. */
static void check_query(fuzz *f) {
    gt_workspace need, twice;
    test_args more = f->args;
    const gt_size *s = find_size(f, test_is_over_time(f->top) ? one_in(f, 2) ? 'B' : 'T' : 'M');
    const int64_t n = size_at(&more, s->offset);
    if (query(f, &f->args, &need) != GT_OK) return;
    if (n < 1 << 16 || n > GT_MAX_SIZE / 2) return; /* for fewer tokens, the number of segments may change the bytes */
    put_size(f, s->offset, 2 * n);
    more = f->args;
    put_size(f, s->offset, n);
    if (query(f, &more, &twice) != GT_OK) return;
    expect(f,
           is_about(need.forward, twice.forward) && is_about(need.backward, twice.backward) &&
               is_about(need.step, twice.step) && is_about(need.saved, twice.saved) &&
               is_about(need.segment, twice.segment),
           "twice the size needs less memory");
}

/* Draws a call with sizes of up to 2^40 and with every tensor.  Lengths of rows are powers of 2, as the fast kernels
 * need them.  Numbers of rows are not, so that a product that overflows is rarely 0. */
static void draw_large_sizes(fuzz *f) {
    memset(&f->args, 0, sizeof f->args);
    for (const gt_size *s = f->op->sizes; s->letter; s++) {
        int64_t n = (int64_t)1 << below(f, 41);
        if (strchr("BTMHh", s->letter)) n -= below(f, n / 2 + 1);
        put_size(f, s->offset, s->letter == 'W' ? 2 + below(f, 3) : n);
    }
    put_int(f, f->op->dtype_offset, (int)below(f, 4));
    for (const test_field *x = f->top->fields; x->name; x++) {
        if (x->kind == 'i') put_int(f, x->offset, one_in(f, 2));
        if (x->kind == 's' && one_in(f, 2)) put_size(f, x->offset, (int64_t)1 << below(f, 41));
    }
    if (test_takes_packed(f->top) && one_in(f, 2)) {
        put_size(f, f->op->sizes[0].offset, 1);
        put_size(f, find_size(f, 'T')->offset, (int64_t)1 << below(f, 31));
        put_size(f, f->op->fields.seq_capacity, (int64_t)1 << below(f, 31));
    }
    for (const gt_tensor *t = f->op->tensors; t->name; t++)
        if (t->kind != 'i' || is_packed(f)) put_pointer(f, t, (const char *)(uintptr_t)4096);
}

static int is_below(const gt_workspace *w, size_t limit) {
    return w->forward < limit && w->backward < limit && w->step < limit && w->saved < limit && w->segment < limit;
}

/* Queries a call, and halves its sizes in turn until the query is accepted.  The largest tensors then have about 2^48
 * elements.  No answer may overflow: a correct number of bytes is less than 2^62. */
static void check_large_query(fuzz *f) {
    gt_workspace need;
    int count = 0;
    while (f->op->sizes[count].letter) count++;
    draw_large_sizes(f);
    if (f->top->fit) f->top->fit(&f->args);
    for (int i = 0; query(f, &f->args, &need) != GT_OK; i++) {
        const gt_size *s = &f->op->sizes[below(f, count)];
        const int64_t n = size_at(&f->args, s->offset);
        if (n > 4) put_size(f, s->offset, n / 2);
        if (f->top->fit) f->top->fit(&f->args);
        if (i < 1000) continue;
        expect(f, 0, "no sizes are small enough for a query");
        return;
    }
    expect(f, is_below(&need, (size_t)1 << 62), "a call needs 2^62 bytes or more");
}

/* Gives the call a workspace of the size that it needs, or sometimes of one byte less, and then sets *is_short. */
static void give_memory(fuzz *f, int *is_short) {
    gt_workspace need;
    size_t bytes;
    char *p;
    *is_short = 0;
    if (query(f, &f->args, &need) != GT_OK) return;
    bytes = test_workspace_of(&need, f->pass);
    if (bytes && one_in(f, 8)) bytes--, *is_short = 1;
    p = bytes <= MOST_SCRATCH ? reserve(f, (int64_t)bytes, 1) : NULL;
    if (!p) bytes = 0;
    put(f, f->op->fields.workspace, &p, sizeof p);
    put(f, f->op->fields.workspace_bytes, &bytes, sizeof bytes);
}

/* Sets workspace and `saved` to invalid memory, which the twins must ignore. */
static void give_nonsense(fuzz *f) {
    const char *p = wild(f);
    const size_t bytes = (size_t)test_next(&f->random);
    put(f, f->op->fields.workspace, &p, sizeof p);
    put(f, f->op->fields.workspace_bytes, &bytes, sizeof bytes);
    if (!f->op->fields.saved) return;
    put(f, f->op->fields.saved, &p, sizeof p);
    put(f, f->op->fields.saved_bytes, &bytes, sizeof bytes);
}

/* ---- one call from its start to its end ------------------------------------------------------ */

static void start(fuzz *f, int64_t number) {
    f->number = number;
    f->random.state = f->seed + (uint64_t)number * 0x9e3779b97f4a7c15u;
    for (const char *c = f->name; *c; c++) f->random.state = (f->random.state ^ (uint64_t)*c) * 0x100000001b3u;
    test_next(&f->random);
    do f->pass = (gt_pass)below(f, GT_PASSES);
    while (!f->top->twin[f->pass]);
    f->kind = one_in(f, 4) ? HOSTILE : one_in(f, 5) ? EMPTY : VALID;
    f->is_spoiled = 0;
    f->place_count = 0;
    f->used = 0;
    memset(&f->args, 0, sizeof f->args);
    f->op = f->top->table();
    draw_sizes(f);
    draw_fields(f);
    if (f->top->fit && f->kind != HOSTILE) f->top->fit(&f->args);
    draw_rows(f);
}

/* Whether the limit of 2^48 elements applies to a tensor, by the section 'Sizes' of gt_kernels.h.  In a call with
 * tokens the limit applies to every tensor.  In a call without tokens, and in a join, it applies only to tensors that
 * are given or required. */
static int counts(const fuzz *f, const gt_tensor *t) {
    const int has_tokens = size_of(f, f->op->sizes[0].letter) && (!test_is_over_time(f->top) || size_of(f, 'T'));
    const int is_of_pieces = t->shape[0] == 'R';
    if (has_tokens && !gt_is_join(f->pass)) return !is_of_pieces;
    return is_used(f, t) && (pointer_of(&f->args, t) || strchr("IOs", gt_use(t, f->pass)));
}

static int is_too_large(const fuzz *f) {
    for (const gt_tensor *t = f->op->tensors; t->name; t++) {
        double count = 1;
        for (const char *c = t->shape; *c; c++) count *= (double)size_of(f, *c);
        if (count > 0x1p48 && counts(f, t)) return 1;
    }
    return 0;
}

/* Checks that the library applies this limit as the test does.  promised: the status of gt_prepare. */
static void check_counts(const fuzz *f, gt_status promised, int is_large) {
    const int is_refused = promised == GT_ERROR_SIZE && strstr(gt_last_error(), "more than 2^48 elements");
    if (promised == GT_OK) expect(f, !is_large, "a tensor of more than 2^48 elements is accepted");
    if (is_refused) expect(f, is_large, "refused for more than 2^48 elements, but no tensor has so many");
}

/* Reserves places and sets pointers.  If the library refuses the sizes or flags, tensors get no places. */
static void furnish(fuzz *f, int *is_short) {
    *is_short = 0;
    if (gt_prepare(f->op, GT_QUERY, GT_HOST, &f->args, &f->filled, &f->dims) == GT_OK) {
        draw_strides(f);
        if (gt_prepare(f->op, GT_QUERY, GT_HOST, &f->args, &f->filled, &f->dims) == GT_OK) {
            const size_t pool = f->op->fields.slot_capacity;
            const int64_t rows = pool && f->pass == GT_STEP ? size_at(&f->args, pool) : 0;
            if (rows > 0) f->dims.n['Q' - 'A'] = rows;
            draw_pointers(f);
        }
    }
    /* for example, a call without tokens may have parameters larger than any memory */
    f->is_spoiled |= is_too_large(f);
    if (f->kind != HOSTILE && one_in(f, 3)) draw_in_place(f);
    for (int64_t n = f->kind == HOSTILE ? below(f, 4) : one_in(f, 5); n > 0; n--) spoil_pointer(f);
    if (IS_KERNEL)
        give_memory(f, is_short);
    else
        give_nonsense(f);
}

/* Writes random numbers to the places, and reads all inputs back.  Returns whether the inputs are unchanged: they
 * differ if they share memory. */
static int write_numbers(fuzz *f, double **in) {
    int is_tame = 1;
    memset(f->memory, 0xa5, (size_t)f->used + GUARD);
    /* inputs are written last, so that memory that an output shares holds the input */
    for (int is_late = 0; is_late < 2; is_late++)
        for (int i = 0; f->op->tensors[i].name; i++) {
            const gt_tensor *t = &f->op->tensors[i];
            const gt_view v = gt_view_of(f->op, t, &f->filled, &f->dims);
            if (!is_used(f, t) || !v.data || !v.count || is_late != is_read(f, t)) continue;
            in[i] = test_array(v.count, 0);
            draw_tensor(f, t, &v, in[i]);
        }
    for (int i = 0; f->op->tensors[i].name; i++) {
        const gt_view v = gt_view_of(f->op, &f->op->tensors[i], &f->filled, &f->dims);
        for (int64_t j = 0; in[i] && is_read(f, &f->op->tensors[i]) && j < v.count; j++) {
            const double x = load(f, &f->op->tensors[i], element_at(&v, j));
            is_tame &= x == in[i][j];
        }
    }
    memcpy(f->before, f->memory, (size_t)f->used + GUARD);
    return is_tame;
}

static void fuzz_once(fuzz *f, int64_t number) {
    double *in[TEST_TENSORS] = {NULL};
    gt_status promised, status;
    int is_short, is_tame;
    char promise[512];
    start(f, number);
    furnish(f, &is_short);
    check_query(f);
    if (f->top->table_of) f->op = f->top->table_of(&f->args, f->pass);
    gt_prepare(f->op, f->pass, GT_HOST, &f->args, &f->filled, &f->dims); /* sets f->dims */
    const int is_large = is_too_large(f);
    promised = gt_prepare(f->op, f->pass, IS_KERNEL ? GT_DEVICE : GT_HOST, &f->args, &f->filled, &f->dims);
    check_counts(f, promised, is_large);
    snprintf(promise, sizeof promise, "%s", gt_last_error());
    expect(f, is_fine(f, promised), "a valid call is refused");
    check_sizes(f, promised);
    if (promised == GT_OK && !is_honest(f)) return;
    is_tame = promised == GT_OK && write_numbers(f, in);
    if (promised != GT_OK) {
        memset(f->memory, 0xa5, (size_t)f->used + GUARD);
        memset(f->before, 0xa5, (size_t)f->used + GUARD);
    }
    status = make_call(f);
    if (status != GT_OK) check_message(f, status, f->pass);
    if (promised != GT_OK)
        expect(f, status == promised && !strcmp(promise, gt_last_error()),
               "refused, but with another error than gt_prepare's");
    else
        expect(f, is_fine(f, status) || (is_short && status == GT_ERROR_WORKSPACE), "a valid call fails");
    if (is_short) expect(f, status != GT_OK, "less workspace than needed is accepted");
    check_memory(f, status);
    f->ran += status == GT_OK;
    f->refused += status != GT_OK;
    if (status == GT_OK && is_tame && f->kind != HOSTILE) compare(f, in);
    for (int i = 0; i < TEST_TENSORS; i++) free(in[i]);
    if (IS_KERNEL) check_large_query(f);
}

/* ---- all of them ----------------------------------------------------------------------------- */

static const fuzz *volatile running;

/* Ends the program if a call takes more than `seconds` of processor time.  0: no limit.  This is not wall-clock time,
 * because a correct call may take a minute on a busy machine.  Meson's time limit ends calls that wait for ever. */
static void set_limit(int seconds) {
    const struct itimerval timer = {.it_value = {seconds, 0}};
    setitimer(ITIMER_PROF, &timer, NULL);
}

static void on_alarm(int signal) {
    static const char text[] = "FAILED: a call takes too long; its operator and number:\n";
    char number[32];
    int n = sizeof number;
    (void)signal;
    number[--n] = '\n';
    for (int64_t i = running->number; n > 0; i /= 10) {
        number[--n] = (char)('0' + i % 10);
        if (i < 10) break;
    }
    if (write(1, text, sizeof text - 1) < 0 || write(1, running->name, strlen(running->name)) < 0 ||
        write(1, " ", 1) < 0 || write(1, number + n, sizeof number - (size_t)n) < 0)
        _exit(3);
    _exit(1);
}

static void fuzz_operator(const test_op *op, uint64_t seed, int64_t calls, int64_t only) {
    fuzz f = {.name = op->name, .top = op, .seed = seed};
    f.op = f.top->table();
    f.memory = (char *)malloc(MEMORY);
    f.before = (char *)malloc(MEMORY);
    if (!f.memory || !f.before) exit(2);
    running = &f;
    for (int64_t i = 0; i < calls; i++) {
        if (only >= 0 && i != only) continue;
        set_limit(SECONDS);
        fuzz_once(&f, i);
    }
    set_limit(0);
    printf("     %" PRId64 " calls: %" PRId64 " ran, %" PRId64 " of them compared, %" PRId64 " refused; %" PRId64
           " queries\n",
           calls, f.ran, f.compared, f.refused, f.queried);
    if (only < 0)
        test_check(f.ran * 3 > calls && f.compared * 4 > calls && f.refused * 10 > calls,
                   "%s: the test runs or refuses too few calls", op->name);
    test_group(op->name, IS_KERNEL ? "hostile and valid calls of the kernels" : "hostile and valid calls of the twin");
    free(f.memory), free(f.before);
}

static int64_t number_of(const char *text, const char *option) {
    char *end;
    const long long n = strtoll(text ? text : "", &end, 0);
    if (text && *text && !*end && n >= 0) return n;
    fprintf(stderr, "%s needs a number\n", option);
    exit(2);
}

int main(int argc, char **argv) {
    uint64_t seed = 1;
    int64_t calls = CALLS, only = -1;
    int named = 0, known = 0;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--seed"))
            seed = (uint64_t)number_of(argv[++i], "--seed");
        else if (!strcmp(argv[i], "--calls"))
            calls = number_of(argv[++i], "--calls");
        else if (!strcmp(argv[i], "--only"))
            only = number_of(argv[++i], "--only");
        else
            argv[named++] = argv[i];
    }
    if (only >= calls) calls = only + 1;
    printf("seed %" PRIu64 "\n", seed);
    signal(SIGPROF, on_alarm);
    for (int o = 0; test_ops[o]; o++)
        for (int i = 0, found = 0; i < named + !named && !found; i++)
            if (!named || (found = !strcmp(argv[i], test_ops[o]->name)))
                known++, fuzz_operator(test_ops[o], seed, calls, only);
    if (named && known < named) {
        fprintf(stderr, "no such operator\n");
        return 2;
    }
    return test_finish();
}
