/* reference/gt_ref.h - shared by the CPU twins: the number type, element access, scratch memory, OpenMP.
 *
 * The twins are written once and compiled twice.  With `real` = float they are the public gt_ref_... functions.  The
 * tests compile the same sources with GT_REAL = double, as gt_ref64_... functions, whose results count as the truth.
 * In this double build every array of the argument struct holds doubles, whatever its dtype field says. */
#ifndef GT_REF_H
#define GT_REF_H

#include "gt/base/op.h"
#include "gt/recurrence/rounding.h"

#include <stdlib.h>
#include <string.h>
#include <tgmath.h>

#ifdef GT_REAL
#define GT_REF(name) gt_ref64_##name
#else
#define GT_REAL float
#define GT_REAL_IS_FLOAT
#ifndef GT_REF /* a program may compile its own copies under other names */
#define GT_REF(name) gt_ref_##name
#endif
#endif
typedef GT_REAL real;

/* Runs the next loop in parallel.  Its iterations are independent, so the result does not depend on the number of
 * threads. */
#ifdef _OPENMP
#define GT_PARALLEL_FOR _Pragma("omp parallel for")
#else
#define GT_PARALLEL_FOR
#endif

/* Lets the compiler vectorise the next loop.  The loop's iterations are independent, or they add to the named sums.
 * The number of lanes of a sum is fixed by the build, so results repeat. */
#ifdef _OPENMP
#define GT_PRAGMA(text) _Pragma(#text)
#define GT_SIMD GT_PRAGMA(omp simd)
#define GT_SIMD_SUM(...) GT_PRAGMA(omp simd reduction(+ : __VA_ARGS__))
#else
#define GT_SIMD
#define GT_SIMD_SUM(...)
#endif

/* Returns element i of an activation array. */
static inline real ref_load(const void *data, gt_dtype dtype, int64_t i) {
#ifdef GT_REAL_IS_FLOAT
    if (dtype == GT_BF16) return gt_bf16_to_f32(((const uint16_t *)data)[i]);
    if (dtype == GT_F16) return gt_f16_to_f32(((const uint16_t *)data)[i]);
#else
    (void)dtype;
#endif
    return ((const real *)data)[i];
}

static inline void ref_store(void *data, gt_dtype dtype, int64_t i, real value) {
#ifdef GT_REAL_IS_FLOAT
    if (dtype == GT_BF16) {
        ((uint16_t *)data)[i] = gt_f32_to_bf16(value);
        return;
    }
    if (dtype == GT_F16) {
        ((uint16_t *)data)[i] = gt_f32_to_f16(value);
        return;
    }
#else
    (void)dtype;
#endif
    ((real *)data)[i] = value;
}

/* Rounds x to dtype, as kernels store it.  The double build also rounds only once, not first to float. */
static inline real ref_rounded(real x, gt_dtype dtype) {
    if (dtype != GT_BF16 && dtype != GT_F16) return x;
#ifdef GT_REAL_IS_FLOAT
    return dtype == GT_BF16 ? gt_bf16_to_f32(gt_f32_to_bf16(x)) : gt_f16_to_f32(gt_f32_to_f16(x));
#else
    const int bits = dtype == GT_BF16 ? 8 : 11, lowest = dtype == GT_BF16 ? -133 : -24; /* exponent of the lowest bit */
    int exponent;
    if (!isfinite(x) || x == 0) return x;
    frexp(x, &exponent);
    exponent = exponent - bits < lowest ? lowest : exponent - bits;
    const real rounded = ldexp(rint(ldexp(x, -exponent)), exponent);
    return fabs(rounded) > (dtype == GT_BF16 ? 0x1.fep127 : 65504) ? copysign((real)INFINITY, x) : rounded;
#endif
}

/* Loads n adjacent elements, from element `at` on. */
static inline void ref_load_row(real *to, const void *data, gt_dtype dtype, int64_t at, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = ref_load(data, dtype, at + i);
}
static inline void ref_store_row(void *data, gt_dtype dtype, int64_t at, const real *from, int64_t n) {
    for (int64_t i = 0; i < n; i++) ref_store(data, dtype, at + i, from[i]);
}

/* Stores rows of a batch element's state, from element `at` of `data` on, as a step stores them.  first: index of the
 * first of these rows in the state.  seed: the seed of stochastic rounding, or NULL.  The double build does not
 * round. */
static inline void ref_store_state(void *data, gt_dtype dtype, int64_t at, const real *from, int64_t first,
                                   int64_t rows, int64_t columns, const int32_t *seed, int32_t step) {
#ifdef GT_REAL_IS_FLOAT
    for (int64_t row = 0; seed && row < rows; row++)
        for (int64_t i = 0; i < columns; i++) {
            const int64_t group = (first + row) * gt_row_groups(columns) + i / 4, k = row * columns + i;
            const uint32_t random = gt_random_of_group(seed, step, group).word[i % 4];
            ((uint16_t *)data)[at + k] = (uint16_t)gt_round_to_half(gt_float_bits(from[k]), random, dtype);
        }
    if (seed) return;
#else
    (void)first, (void)seed, (void)step;
#endif
    ref_store_row(data, dtype, at, from, rows * columns);
}

/* Returns the row of the snapshot after token t - 1 of a sequence, or -1 if there is none.  T: tokens of a batch
 * element.  b, first: the sequence's batch element and first token; packed sequences have b = 0. */
static inline int64_t ref_snapshot_row(int64_t every, int64_t T, int64_t b, int64_t first, int64_t t) {
    if (!every || t == first || (t - first) % every) return -1;
    return b * (T / every) + first / every + (t - first) / every - 1;
}

/* Rows of an int8 state, from element `at` of `data` on.  Every group of `group` adjacent numbers of a row shares a
 * scale.  The scales begin at element `scale_at` of `scale`. */
typedef struct ref_int8_rows {
    void *data;
    float *scale;
    int64_t at, scale_at, rows, columns, group;
} ref_int8_rows;

static inline void ref_load_int8(real *to, const ref_int8_rows *s) {
    const int64_t groups = (s->columns + s->group - 1) / s->group;
    for (int64_t i = 0; i < s->rows * s->columns; i++) {
        const real scale = ((const real *)s->scale)[s->scale_at + i / s->columns * groups + i % s->columns / s->group];
#ifdef GT_REAL_IS_FLOAT
        to[i] = (real)((const int8_t *)s->data)[s->at + i] * scale;
#else
        to[i] = ((const real *)s->data)[s->at + i] * scale;
#endif
    }
}

/* Stores n numbers that share scale number k.  For stochastic rounding every 4 numbers form a group with random words
 * of its own; first: number of the first of these groups. */
static inline void ref_store_int8_group(const ref_int8_rows *s, int64_t k, int64_t at, const real *from, int64_t n,
                                        const int32_t *seed, int32_t step, int64_t first) {
#ifdef GT_REAL_IS_FLOAT
    int8_t *const to = (int8_t *)s->data + at;
    float most = 0;
    for (int64_t i = 0; i < n; i++) most = most > fabsf(from[i]) || most != most ? most : fabsf(from[i]);
    const gt_row_scale row = gt_scale_of_row(most);
    for (int64_t i = 0; i < n; i++) {
        if (!seed) {
            to[i] = (int8_t)(gt_float_bits(fmaf(from[i], row.inverse, GT_INT8_NEAREST)) & 0xff);
        } else {
            const uint32_t random = gt_random_of_group(seed, step, first + i / 4).word[i % 4];
            const int q = (int)gt_round_to_int8(gt_float_bits(from[i] * row.inverse), random);
            to[i] = (int8_t)(from[i] < 0 ? -q : q);
        }
        if (row.inverse == 0) to[i] = 0;
    }
    s->scale[k] = row.scale;
#else
    real most = 0;
    (void)seed, (void)step, (void)first;
    for (int64_t i = 0; i < n; i++) most = most > fabs(from[i]) || most != most ? most : fabs(from[i]);
    ((real *)s->scale)[k] = most >= 0x1p-100 && !isinf(most) ? most / 127 : most != most || isinf(most) ? NAN : 0;
    for (int64_t i = 0; i < n; i++)
        ((real *)s->data)[at + i] = most >= 0x1p-100 && !isinf(most) ? from[i] * 127 / most : 0;
#endif
}

/* Stores rows of an int8 state.  first: index of the first of these rows in the batch element's state. */
static inline void ref_store_int8(const ref_int8_rows *s, const real *from, int64_t first, const int32_t *seed,
                                  int32_t step) {
    const int64_t groups = (s->columns + s->group - 1) / s->group;
    for (int64_t row = 0; row < s->rows; row++)
        for (int64_t g = 0; g < groups; g++) {
            const int64_t i = g * s->group, left = s->columns - i, k = row * s->columns + i;
            ref_store_int8_group(s, s->scale_at + row * groups + g, s->at + k, from + k,
                                 left < s->group ? left : s->group, seed, step,
                                 (first + row) * gt_row_groups(s->columns) + i / 4);
        }
}

/* Returns element i of an int8 array.  In the double build the array holds doubles. */
static inline real ref_int8(const int8_t *data, int64_t i) {
#ifdef GT_REAL_IS_FLOAT
    return data[i];
#else
    return ((const real *)(const void *)data)[i];
#endif
}

/* Returns element i of an array that is fp32 in the public struct, or `missing` if the array is NULL. */
static inline real ref_param(const float *data, int64_t i, real missing) {
    return data ? ((const real *)data)[i] : missing;
}

/* Returns element i of an array whose dtype a step may choose, or 0 if the array is NULL. */
static inline real ref_parameter(const void *data, gt_dtype dtype, int64_t i) {
    return data ? ref_load(data, dtype, i) : 0;
}

/* Writes or accumulates element i of a parameter gradient, if the caller wants the gradient.  `value` is a double,
 * because a sum over batch and time may have any number of terms. */
static inline void ref_grad(float *data, int64_t i, double value, int accumulate) {
    if (!data) return;
    real *d = (real *)data + i;
    *d = accumulate ? *d + (real)value : (real)value;
}

/* Returns the offset of element [b, t, h, 0]. */
static inline int64_t ref_at(gt_stride s, int64_t b, int64_t t, int64_t h) { return b * s.b + t * s.t + h * s.h; }

/* Loads n elements of a state of any dtype.  If `from` is NULL, the elements are 0. */
static inline void ref_load_state(real *to, const void *from, gt_dtype dtype, int64_t at, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = ref_parameter(from, dtype, at + i);
}

/* Copies n elements of a state.  If `from` is NULL, the elements are 0. */
static inline void ref_copy_state(real *to, const float *from, int64_t offset, int64_t n) {
    if (from)
        memcpy(to, (const real *)from + offset, (size_t)n * sizeof(real));
    else
        memset(to, 0, (size_t)n * sizeof(real));
}

/* wkv6's forward, or with `step` its step, in a mixed call of wkv_ssm: args->y is the sum (gt_mix). */
#define gt_ref_wkv6_mixed GT_SYMBOL(ref_wkv6_mixed)
GT_REF_FUNCTION gt_status GT_REF(wkv6_mixed)(const gt_wkv6_args *args, const gt_mix *mix, int step);

/* ---- calls without tokens --------------------------------------------------------------------
 * In a call without tokens the other sizes may have any value, so no memory and no loop depends on them.  The functions
 * write only states and gradients that the caller gives. */

/* Copies `rows` states of n numbers.  A shared state goes to every row. */
static inline void ref_pass_states(float *to, const float *from, int is_shared, int64_t rows, int64_t n) {
    if (!to || (to == from && !is_shared)) return;
    for (int64_t row = 0; row < rows; row++) ref_copy_state((real *)to + row * n, from, is_shared ? 0 : row * n, n);
}

/* Computes the gradient of a state that `rows` sequences share: the sum of the sequences' gradients. */
static inline void ref_sum_states(float *to, const float *from, int64_t rows, int64_t n, int accumulate) {
    for (int64_t i = 0; to && i < n; i++) {
        double sum = 0;
        for (int64_t row = 0; from && row < rows; row++) sum += ((const real *)from)[row * n + i];
        ref_grad(to, i, sum, accumulate);
    }
}

/* Computes the gradient of the first states from the gradient of the last states. */
static inline void ref_pass_gradients(float *to, const float *from, int is_shared, int64_t rows, int64_t n,
                                      int accumulate) {
    if (is_shared)
        ref_sum_states(to, from, rows, n, accumulate);
    else
        ref_pass_states(to, from, 0, rows, n);
}

static inline void ref_no_grad(float *data, int64_t n, int accumulate) {
    for (int64_t i = 0; data && i < n; i++) ref_grad(data, i, 0, accumulate);
}

/* Checks cu_seqlens and seq_count, which the kernels trust, and gets the number of sequences. */
static inline gt_status ref_check_sequences(const int32_t *cu_seqlens, const int32_t *seq_count, int64_t capacity,
                                            int64_t T, int64_t *count) {
    *count = seq_count ? *seq_count : capacity;
    if (*count < 0 || *count > capacity)
        return gt_fail(GT_ERROR_VALUE, "*seq_count = %lld: must be 0 to seq_capacity (%lld)", (long long)*count,
                       (long long)capacity);
    if (cu_seqlens[0] != 0) return gt_fail(GT_ERROR_VALUE, "cu_seqlens[0] = %d: must be 0", (int)cu_seqlens[0]);
    for (int64_t s = 1; s <= *count; s++)
        if (cu_seqlens[s] < cu_seqlens[s - 1] || cu_seqlens[s] > T)
            return gt_fail(GT_ERROR_VALUE, "cu_seqlens[%lld] = %d: must be %d (the one before) to T (%lld)",
                           (long long)s, (int)cu_seqlens[s], (int)cu_seqlens[s - 1], (long long)T);
    return GT_OK;
}

/* A sequence: tokens first ... last-1 of batch element b.  `row` is the sequence's row in the states, or -1 if the call
 * skips the sequence. */
typedef struct ref_sequence {
    int64_t b, first, last, row;
    int64_t commit;  /* the state before this token is stored */
    int starts_zero; /* 1: starts from zeros, not from its row */
} ref_sequence;

/* The sequences of a call.  If capacity is 0, they are the batch elements, otherwise packed sequences. */
typedef struct ref_sequences {
    int64_t B, T, capacity, count; /* count: number of sequences */
    const int32_t *cu_seqlens;
    const int32_t *slots, *starts_zero; /* without slots sequence s has row s */
    int64_t rows;
} ref_sequences;

static inline gt_status ref_find_sequences(int64_t B, int64_t T, const int32_t *cu_seqlens, const int32_t *seq_count,
                                           int64_t capacity, ref_sequences *q) {
    q->B = B;
    q->T = T;
    q->capacity = capacity;
    q->count = B;
    q->cu_seqlens = cu_seqlens;
    q->slots = q->starts_zero = NULL;
    q->rows = 0;
    return capacity == 0 ? GT_OK : ref_check_sequences(cu_seqlens, seq_count, capacity, T, &q->count);
}

static inline ref_sequence ref_sequence_at(const ref_sequences *q, int64_t s) {
    ref_sequence batch = {s, 0, q->T, s, q->T, 0};
    if (q->capacity == 0) return batch;
    const int64_t end = q->cu_seqlens[s + 1], slot = q->slots ? q->slots[s] : s;
    const int is_skipped = q->slots && (slot < 0 || slot >= q->rows);
    return (ref_sequence){0, q->cu_seqlens[s], end, is_skipped ? -1 : slot, end, q->starts_zero && q->starts_zero[s]};
}

/* Makes forward use a pool of states for packed sequences, if the caller gives `slots`. */
static inline void ref_use_pool(ref_sequences *q, const int32_t *slots, const int32_t *starts_zero, int64_t rows) {
    if (q->capacity == 0) return;
    q->slots = slots;
    q->starts_zero = starts_zero;
    q->rows = rows;
}

/* Returns batch element b of a step as a sequence.  A skipped element has row -1 and no tokens. */
static inline ref_sequence ref_step_element(int64_t b, int64_t T, const int32_t *slots, int64_t slot_capacity,
                                            const int32_t *tokens, const int32_t *commit) {
    const ref_sequence skipped = {b, 0, 0, -1, 0, 0};
    ref_sequence e = {b, 0, tokens ? tokens[b] : T, slots ? slots[b] : b, 0, 0};
    e.commit = commit ? commit[b] : e.last;
    if (e.row < 0 || e.row >= slot_capacity || e.last < 0 || e.last > T || e.commit < 0 || e.commit > e.last)
        return skipped;
    return e;
}

/* Forward without tokens: copies states of n numbers as ref_pass_states does, but not for skipped sequences.  `stride`
 * is the distance of two rows. */
static inline void ref_pass_rows(const ref_sequences *all, float *to, const float *from, gt_dtype dtype, int is_shared,
                                 int64_t n, int64_t stride) {
    for (int64_t s = 0; to && s < all->count; s++) {
        const ref_sequence q = ref_sequence_at(all, s);
        if (q.row < 0 || (to == from && !is_shared && !q.starts_zero)) continue;
        for (int64_t i = 0; i < n; i++)
            ref_store(to, dtype, q.row * stride + i,
                      ref_parameter(q.starts_zero ? NULL : from, dtype, (is_shared ? 0 : q.row * stride) + i));
    }
}

/* Returns the first token whose y is set to 0: the first after the tokens that a step processes, or the first of all if
 * the sequence is skipped. */
static inline int64_t ref_first_cleared(const ref_sequence *q) { return q->row < 0 ? q->first : q->last; }

/* Clears n adjacent elements of each of the tokens t ... T-1 of batch element b. */
static inline void ref_clear(int64_t b, int64_t t, int64_t T, int64_t h, void *data, gt_dtype dtype, gt_stride stride,
                             int64_t n) {
    for (; t < T; t++)
        for (int64_t i = 0; i < n; i++) ref_store(data, dtype, ref_at(stride, b, t, h) + i, 0);
}

/* Clears the tokens of a packed call that belong to no sequence. */
static inline void ref_clear_unused(const ref_sequences *q, int64_t h, void *data, gt_dtype dtype, gt_stride stride,
                                    int64_t n) {
    if (q->capacity && data) ref_clear(0, q->cu_seqlens[q->count], q->T, h, data, dtype, stride, n);
}

/* More numbers than any memory holds.  Saturated results of gt_times and gt_plus are larger. */
#define REF_MOST_NUMBERS ((int64_t)(PTRDIFF_MAX / sizeof(double)))

/* Allocates scratch for `count` numbers.  On success the pointer is never NULL, even if count is 0. */
static inline gt_status ref_scratch(real **scratch, int64_t count) {
    *scratch = NULL;
    if (count <= REF_MOST_NUMBERS) *scratch = (real *)malloc((size_t)(count > 0 ? count : 1) * sizeof(real));
    return *scratch ? GT_OK : gt_fail(GT_ERROR_MEMORY, "no host memory for %lld numbers of scratch", (long long)count);
}

/* Allocates `count` sums that start at 0.  On success the pointer is never NULL. */
static inline gt_status ref_sums(double **sums, int64_t count) {
    *sums = NULL;
    if (count <= REF_MOST_NUMBERS) *sums = (double *)calloc((size_t)(count > 0 ? count : 1), sizeof(double));
    return *sums ? GT_OK : gt_fail(GT_ERROR_MEMORY, "no host memory for %lld sums", (long long)count);
}

/* A program that compiles its own copies may also replace exp of a real number. */
#ifndef GT_REF_EXP
#define GT_REF_EXP exp
#endif
static inline real ref_exp(real x) { return GT_REF_EXP(x); }

/* Returns exp(a).  For a large a, exp(a) may overflow the type `real` although its product with a small state does not.
 * So above a limit the function returns -exp(a / 4), and ref_carry multiplies the state by exp(a / 4) four times.  This
 * factor is finite, so a state of 0 stays 0. */
static inline real ref_decay(real a) {
    real d;
    if (!(a > (sizeof(real) == sizeof(float) ? 80 : 700))) return ref_exp(a);
    d = ref_exp(a / 4);
    return -(isinf(d) ? nextafter(d, (real)0) : d);
}

static inline real ref_carry(real decay, real x) { return decay < 0 ? x * decay * decay * decay * decay : decay * x; }

/* ---- pieces of sequences ----------------------------------------------------------------------
 * gt_OP_join computes the start states of pieces.  Each piece has `states` states of `rows` rows with `n` numbers, and
 * a decay for each row: S_0 = first, S_{p+1} = exp(decay_p) S_p + state_p.  is_reverse: goes from the last piece to the
 * first.  `starts` may be the memory of `state`. */
typedef struct ref_pieces {
    int64_t pieces, states, rows, n;
    const float *state, *decay, *first;
    int first_is_shared, is_reverse;
    float *starts;
} ref_pieces;

static inline void ref_join(const ref_pieces *x) {
    const int64_t rows = x->states * x->rows;
    GT_PARALLEL_FOR
    for (int64_t row = 0; row < rows; row++) {
        const int64_t from = x->first_is_shared ? row % x->rows : row;
        for (int64_t i = 0; i < x->n; i++) {
            real S = ref_param(x->first, from * x->n + i, 0);
            for (int64_t k = 0; k < x->pieces; k++) {
                const int64_t at = (x->is_reverse ? x->pieces - 1 - k : k) * rows + row;
                const real added = ((const real *)x->state)[at * x->n + i];
                ((real *)x->starts)[at * x->n + i] = S;
                S = ref_carry(ref_decay(((const real *)x->decay)[at]), S) + added;
            }
        }
    }
}

/* Returns 1 / (1 + exp(-x)).  The argument of exp is never positive, so exp cannot overflow. */
static inline real ref_sigmoid(real x) {
    real e = ref_exp(x < 0 ? x : -x);
    return (x < 0 ? e : 1) / (1 + e);
}
/* Bounds x, so that silu of -infinity is its limit -0, instead of infinity times 0.  The derivative is 0 at -infinity
 * and 1 at infinity.  At the bounds the sigmoid is 0 or 1 in both builds. */
static inline real ref_bounded(real x) { return x < -1000 ? -1000 : x > 1000 ? 1000 : x; }
static inline real ref_silu(real x) { return (x < 0 ? ref_bounded(x) : x) * ref_sigmoid(x); }
static inline real ref_dsilu(real x) {
    real s = ref_sigmoid(x);
    return s * (1 + ref_bounded(x) * (1 - s));
}
static inline real ref_softplus(real x) { return x > 20 ? x : log1p(exp(x)); }

#endif
