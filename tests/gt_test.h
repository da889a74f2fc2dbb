/* gt_test - one harness for every operator, driven by the operators' own tables.
 *
 * A test_case is an operator, its argument struct without pointers, and how its inputs are drawn
 * and laid out in memory.  The values of all its tensors are packed double arrays (test_values):
 * inputs already rounded to their stored dtype, so that the double twin sees the very same numbers.  test_run places
 * them into one block of memory as the case's layout asks, lets a test_runner execute a pass on it, proves that nothing
 * but the elements of the outputs was written, and returns the outputs as packed double arrays again.  The rest is
 * comparing arrays:
 *
 *     test_values in, truth, got;
 *     test_inputs(c, GT_FORWARD, &in);
 *     test_run(&test_truth, c, GT_FORWARD, &in, TEST_ALL, &truth);
 *     test_run(&my_runner, c, GT_FORWARD, &in, TEST_ALL, &got);
 *     test_compare(&my_runner, c, GT_FORWARD, &got, &truth, NULL);
 *     test_free(&in), test_free(&truth), test_free(&got);
 */
#ifndef GT_TEST_H
#define GT_TEST_H

#include "gt/base/op.h"

#ifndef TEST_LIST
#define TEST_LIST "ops/list.h"
#endif
#include TEST_LIST

#ifdef __cplusplus
extern "C" {
#endif

enum { TEST_TENSORS = 48 }; /* more than any operator's table has */
#define TEST_ALL (~(uint64_t)0)

/* ---- cases ----------------------------------------------------------------------------------- */

typedef enum test_layout {
    TEST_PACKED,
    TEST_SHIFTED,   /* packed, every array off its alignment by one element */
    TEST_TIME_LAST, /* [B,H,T,N], [B,G,N,T] where there is a stride for that, and [B,D,T]; rows [M,D] stay packed */
    TEST_GAPS,      /* every stride larger than needed and its own, arrays off by one element */
    TEST_SLICES,    /* inputs are columns of one buffer, outputs of another; off by one element */
    TEST_ALIGNED    /* the same, but the first row of every array is aligned to 16 bytes */
} test_layout;

typedef enum test_level {
    TEST_TINY,   /* gradient of every element is differenced */
    TEST_SMALL,  /* gradients are differenced along random directions */
    TEST_MEDIUM, /* compared with the double twin only */
    TEST_LARGE   /* too slow for the CPU suites; for GPUs */
} test_level;

/* Values of one tensor: normal(mean, spread), mapped; with probability `share` just `special`. */
typedef struct test_fill {
    const char *tensor;
    double mean, spread, special, share;
} test_fill;

typedef union test_args {
#define TEST_ARGS(op) gt_##op##_args op;
    TEST_OPERATORS(TEST_ARGS)
#undef TEST_ARGS
} test_args;

/* The sequences of a packed call, which has args.seq_capacity. */
typedef struct test_packed {
    int64_t count;
    const int64_t *lengths; /* NULL: random lengths, some of them 0, that take nearly all tokens */
} test_packed;

/* Optional arrays of a step: two for speculative decoding, one for the places of ring states, and two for stochastic
 * rounding. */
enum { TEST_TOKENS = 1, TEST_COMMIT = 2, TEST_PLACES = 4, TEST_ROUNDING = 8 };

typedef struct test_case {
    const char *op, *name;
    const char *absent; /* names of tensors whose pointers are NULL, separated by spaces */
    test_fill fill[4];  /* instead of the defaults */
    uint64_t seed;
    test_level level;
    test_layout layout;
    int64_t row;       /* elements in a row of the slices' buffers if they suffice; 0 = just enough:
                          TEST_SLICES odd, TEST_ALIGNED so that all rows are aligned */
    int in_place;      /* outputs share memory with the input that they may equal */
    int no_difference; /* has no derivative somewhere: not for difference quotients */
    int rounds_states; /* handing a state on loses more than the tolerances of tests that cut the time allow */
    test_packed packed;
    int drafts;     /* TEST_TOKENS, TEST_COMMIT or both */
    test_args args; /* sizes and flags; the harness sets pointers, strides and dtypes */
} test_case;

/* Packed doubles per tensor of the operator's table; NULL = absent. */
typedef struct test_values {
    double *of[TEST_TENSORS];
} test_values;

typedef struct test_random {
    uint64_t state;
} test_random;

typedef enum test_map { TEST_AS_IS, TEST_EXP, TEST_NEGATIVE_EXP } test_map;

/* Largest relative errors (l2), by dtype. */
typedef struct test_tolerance {
    double activations[4]; /* outputs stored as bf16, fp16 */
    double parameters[4];  /* fp32 outputs of a call with that dtype: states, parameter gradients,
                              in an fp32 call also activations */
    double companions[4];  /* fp32 dw and ddt beside activations of that dtype */
    double terms[4];       /* added for parameter gradients, relative to their terms */
    int rounds_factors;    /* products are formed of rounded factors: where they cancel, an error is
                              small beside them, but not beside the output.  2: results between stages are rounded, too,
                              which shows in small tensors */
} test_tolerance;

/* ---- rows of the bench ---- */

enum { TEST_F32 = 1 << GT_F32, TEST_BF16 = 1 << GT_BF16, TEST_F16 = 1 << GT_F16 };

/* A row with at most 16 tokens times the step function.  Any other row times forward, backward and, if forward saves
 * something, forward without `saved` (inf).  A row with pieces times each pass in pieces.  The name adds flags that the
 * sizes do not show. */
typedef struct test_bench_row {
    test_case c;
    int dtypes;
} test_bench_row;

/* Uniform in [mean - spread, mean + spread], or normal. */
typedef struct bench_draw {
    int is_uniform;
    float mean, spread;
} bench_draw;

typedef struct test_bench_draw {
    const char *tensors; /* separated by spaces */
    bench_draw how;
} test_bench_draw;

/* For a large call the double reference computes a sample, cut along these indices. */
typedef struct test_bench_cut {
    const char *letters;
    int64_t count; /* of the positions kept along the first letter; along B it is 1 */
} test_bench_cut;

/* ---- arguments that the operators' tables do not list ---- */

typedef struct test_field {
    const char *name; /* NULL ends a list */
    size_t offset;
    char kind;    /* 'i' switch, 'g' divisor of another size, 'v' size with a default, 's' segments, 'f' float, 'c'
                     columns of a state, of a step alone */
    char of;      /* which size a divisor divides */
    double usual; /* of a float */
} test_field;

/* A field of type int, int64_t (l) or float. */
typedef struct test_value {
    size_t offset;
    char type; /* i l f; 0: no more */
    double value;
} test_value;

/* The error message must contain the text; all other fields are valid. */
typedef struct test_bad_value {
    const char *text; /* NULL ends a list */
    gt_status status;
    test_value set[3];
} test_bad_value;

typedef struct test_runner test_runner;

typedef struct test_property {
    const char *what;
    test_level level; /* of the cases */
    void (*check)(const test_runner *r, const test_case *c, double tolerance);
} test_property;

/* A case and its inputs, for formulas. */
typedef struct formula {
    const test_case *c;
    const test_values *in;
} formula;

/* An element of an output, written out a second way: see ops/formula.h. */
typedef struct test_formula {
    const char *tensor; /* NULL ends a list */
    double (*of)(const formula *f, int64_t i, int64_t j, int64_t k, int64_t l);
} test_formula;

/* ---- operators ------------------------------------------------------------------------------- */

/* An operator's data for tests and bench, beyond its table: ops/OP.c. */
typedef struct test_op {
    const char *name;
    const gt_op *(*table)(void);
    size_t (*args_size)(void); /* as the library says */
    size_t args_bytes;         /* sizeof */
    /* per pass; NULL where the operator has none */
    gt_status (*twin[GT_PASSES])(const void *args);
    gt_status (*twin64[GT_PASSES])(const void *args);

    /* Arguments: fields that the table does not list, bad values, and a size that may be 0 with a value to try. */
    const test_field *fields;
    const test_bad_value *bad_values;
    struct {
        size_t offset; /* 0: there is none */
        int64_t value;
    } optional_size;

    /* Lists of cases end with op NULL. */
    const test_case *cases;
    const test_case *packed;         /* of packed sequences, if the operator takes them */
    const test_case *sizes;          /* without time, batch or rows: kernels are tested in each with many of these */
    const test_case *steps;          /* NULL, or: without time, for kernels of steps: both sides of every branch */
    const char *const *step_kernels; /* NULL, or: names of these kernels with template arguments, ending with NULL */
    void (*check_step)(const test_runner *r, const test_case *c); /* NULL, or: a check of each of these steps */
    /* For test_rounding_agrees.  NULL: the operator does not round at random. */
    struct {
        const char *zero, *one;
        void (*set)(test_case *c); /* flags of a step with exact sums */
    } exact;
    const test_case *many; /* more than 65535 items along one axis of a grid */
    const test_case *sums; /* for parameter gradients over long sums */
    test_case large;       /* one batch element, or one row; test_large.c repeats it as often as it needs */
    /* Random sizes up to about `most`, flags and absent tensors. */
    void (*draw)(test_random *r, int64_t most, test_case *c);
    /* NULL, or: set_fill sets the distribution of a tensor if its name alone does not decide it; set_regime chooses the
     * n-th of several regimes of decays. */
    void (*set_fill)(const test_case *c, const gt_tensor *t, test_fill *f, test_map *map);
    void (*set_regime)(test_case *c, int n);
    /* NULL, or: moves drawn inputs away from points where rounding decides the result. */
    void (*settle)(const test_case *c, test_values *in);
    test_tolerance kernels; /* the allowed errors of kernels */
    /* NULL, or names of fp32 outputs that are sums of a few numbers of the call's dtype: activations' errors are
     * allowed for them. */
    const char *sums_of_few;
    /* NULL, or by pass, by name: outputs with elements that are differences of much larger terms.  If their factors are
     * rounded, one element may have 16 times the tensor's error; in all other cases 8 times. */
    const char *differences[GT_PASSES];
    /* NULL, or: magnitudes of the terms of an output, if a kernel makes them from a rounded number that the double twin
     * does not make; NULL for other outputs.  Where terms cancel, a channel may be small beside them. */
    double *(*terms)(const test_case *c, gt_pass pass, const gt_tensor *t);
    const test_formula *formulas; /* of every output of forward */
    /* Properties of this operator alone; NULL or a list that ends with `what` NULL. */
    const test_property *properties;
    /* By dtype: the difference that a cut of the time in two may make in the twins.  0: none. */
    double split_tolerance[4];
    /* The same for tokens taken by steps.  0: no difference, since states keep everything that a call knows. */
    double step_tolerance[4];
    /* NULL, or: further times for the sizes, ending with -1, and kernels that must have been launched then, with
     * NULL. */
    const int64_t *more_times;
    const char *const *launched;
    /* NULL, or: cases named after kernels, with template arguments, that their forward pass launches.  Emulated. */
    const test_case *launching;
    /* Tokens of the chunk that a NaN or infinity may spoil in the kernels, in forward and in backward, as gt_kernels.h
     * states under NON-FINITE NUMBERS.  0: no more than in the twin.  wkv_ssm: the larger of its two operators'. */
    int64_t reach[2];
    const test_case *spoilt; /* NULL, or sizes without time, for which kernels spoil all of that chunk */
    int has_exact_prefill;   /* forward cut at multiples of 128 tokens has the bits of one call, with segments = 1 */
    int bounds_pairs;        /* some infinities become large numbers, as stated there */
    size_t handle;           /* offset of the field for a handle of cuBLASLt; 0: there is none */
    size_t reads_y;          /* offset of the switch for backward to read forward's y; 0: there is none */

    /* Rows of the bench: for the CPU twins the trainer's calls with a small batch; for a GPU the same with the
     * trainer's own batch, and the sizes of larger models.  The lists end with op NULL, tensors NULL, letters NULL. */
    const test_bench_row *host_rows, *gpu_rows;
    const test_bench_draw *bench_draws; /* inputs as a model has them; others are normal(0, 1).  May be NULL */
    const test_bench_cut *bench_cuts;   /* NULL: all calls are compared whole */
    /* Operations: per product of these sizes, adds and multiplies counted apart.  Recurrences count the formulas of
     * single tokens: a faster form may do more.  letters NULL: hardly any products. */
    struct {
        const char *letters;
        double forward, backward;
    } operations;
} test_op;

extern const test_op *const test_ops[];      /* ends with NULL */
const test_op *test_op_of(const char *name); /* NULL: there is none */
/* A case with random sizes up to about `most`, flags, absent tensors and layout. */
void test_draw_case(const test_op *op, uint64_t seed, int64_t most, test_case *c);
/* The same with packed sequences; only for operators that take them. */
void test_draw_packed(const test_op *op, uint64_t seed, int64_t most, test_case *c);

test_fill test_fill_of(const test_case *c, const gt_tensor *t, test_map *map); /* how a case draws a tensor */
/* The constant that an absent optional input stands for: 0 or 1; NaN if there is none. */
double test_constant(const char *tensor);

/* ---- case and table look-ups ----------------------------------------------------------------- */

int test_is_word_of(const char *list, const char *word); /* words between spaces */
const gt_op *test_table(const test_case *c);
int test_has_pass(const test_case *c, gt_pass pass);
int test_find(const gt_op *op, const char *tensor); /* index in the table, -1 = none */
/* "y" of "wkv6.y", a field of a struct within the argument struct.  Rules that depend on a tensor's name use this
 * name. */
const char *test_plain_name(const gt_tensor *t);
int test_is(const gt_tensor *t, const char *plain_name);
/* The tensor of a plain name that is a field of the same struct as the i-th one, -1 = none. */
int test_beside(const gt_op *op, int i, const char *plain_name);
int test_gradient_of(const gt_op *op, int i); /* of the i-th tensor; a residual's is dy; -1 = none */
int test_is_over_time(const test_op *op);     /* else over rows */
int test_is_absent(const test_case *c, const gt_tensor *t);
int test_is_input(const gt_tensor *t, gt_pass pass);  /* read, 's' included */
int test_is_output(const gt_tensor *t, gt_pass pass); /* written, 's' included */
int test_accumulates(const test_case *c, const gt_tensor *t);
int test_is_state(const gt_tensor *t);    /* a row for each batch element or sequence */
int test_takes_packed(const test_op *op); /* whether the operator takes packed sequences */
int test_is_packed(const test_case *c);
/* The place of index `letter` in the tensor's shape, or -1.  'B' is also the batch index of states; in a packed case it
 * is that index alone. */
int test_axis(const test_case *c, const gt_tensor *t, char letter);

int64_t test_get_size(const test_case *c, char letter);
void test_set_size(test_case *c, char letter, int64_t n);
int test_get_flag(const test_case *c, size_t offset); /* 0 if the operator has no such field */
void test_set_flag(test_case *c, size_t offset, int value);
void test_set_slots(test_case *c, int64_t capacity);
void test_set_pieces(test_case *c, int64_t pieces);
int64_t test_get_pieces(const test_case *c);                            /* 0 where the operator has none */
void test_set_sequences(test_case *c, int64_t count, int64_t capacity); /* 0, 0: not packed */
void test_set_dtype(test_case *c, gt_dtype dtype, gt_dtype companion);  /* DEFAULT: as dtype */
gt_dtype test_dtype_of(const test_case *c, const gt_tensor *t);         /* of its elements */

/* Sizes of the tensor's indices; returns the rank. */
int test_shape(const test_case *c, gt_pass pass, const gt_tensor *t, int64_t size[4]);
int64_t test_count(const test_case *c, gt_pass pass, const gt_tensor *t);
/* The bytes of workspace that a call of the pass needs, from the answer to a query. */
size_t test_workspace_of(const gt_workspace *need, gt_pass pass);

/* ---- values ---------------------------------------------------------------------------------- */

uint64_t test_next(test_random *r);
double test_uniform(test_random *r); /* in [0,1) */
double test_normal(test_random *r);

double test_round(double value, gt_dtype dtype);

/* The case's seed plus the value of the environment variable GT_TEST_SEED. */
uint64_t test_seed(const test_case *c);

/* Draws everything that `pass` reads: its inputs, and the old contents of accumulating and in-place outputs.  In a
 * packed case elements outside of all sequences are 0 in *in, and NaN in test_run's memory. */
void test_inputs(const test_case *c, gt_pass pass, test_values *in);
/* The number of sequences of a packed case, and where sequence s starts. */
int64_t test_sequences(const test_case *c, const test_values *in);
int64_t test_sequence_at(const test_case *c, const test_values *in, int64_t s);
double *test_array(int64_t count, double value);
void test_copy(const test_case *c, gt_pass pass, const test_values *from, test_values *to);
void test_free(test_values *v);
/* Look-ups by a tensor's name.  test_set_array frees the old array; the new one may be NULL. */
const gt_tensor *test_tensor_of(const test_case *c, const char *name);
double **test_array_of(test_values *v, const test_case *c, const char *tensor);
void test_set_array(test_values *v, const test_case *c, const char *tensor, double *array);

/* Positions at, at+1, ... at+n-1 along the index `letter`; tensors without it are copied. */
void test_cut(const test_case *c, gt_pass pass, const test_values *from, char letter, int64_t at, int64_t n,
              test_values *to);
/* The reverse of test_cut, for tensors that have the index; makes arrays that *to lacks. */
void test_paste(const test_case *part, const test_case *c, gt_pass pass, const test_values *from, char letter,
                int64_t at, test_values *to);

/* ---- running --------------------------------------------------------------------------------- */

struct test_runner {
    const char *name;
    /* Executes a pass.  All pointers in *args lie in memory[0..bytes), 256-byte aligned. */
    gt_status (*run)(const test_runner *r, const test_op *op, gt_pass pass, const void *args, char *memory,
                     size_t bytes);
    void *context;
    int is_double; /* arrays hold doubles, packed */
    test_tolerance tolerance;
    int reads_y; /* backward is given forward's y, if the operator may read it */
};

/* The limit of an activation.  dz made from y (reads_y) has a larger one, since y was rounded to bf16, too.  Two
 * roundings are 2.35e-3 of the norm if many numbers count.  The square of a number's relative error varies by 0.45
 * squares of half a unit around its mean: with n numbers, five times that over sqrt(n) is added to the square of the
 * limit. */
double test_limit_of(const test_runner *r, const test_op *op, const gt_tensor *t, gt_dtype dtype, const double *truth,
                     int64_t count, double limit);

extern const test_runner test_truth; /* the double twins */
extern const test_runner test_twin;  /* the twins as users have them */

/* Runs `pass` on `in`.  *out receives the outputs whose bit in `want` is set (bit: the place in the table), except
 * absent ones.  Returns 1 if the pass succeeded and left
 * everything else alone. */
int test_run(const test_runner *r, const test_case *c, gt_pass pass, const test_values *in, uint64_t want,
             test_values *out);

/* Points every tensor of *args that lies in from[0..bytes) to the same place of `to`. */
void test_relocate(const gt_op *op, void *args, const char *from, size_t bytes, char *to);

/* ---- judging --------------------------------------------------------------------------------- */

/* Bounds for the sums of magnitudes of the parameter gradients' terms: the double twin's results for the absolute
 * values of all inputs that do not set the decay. */
void test_magnitudes(const test_case *c, const test_values *in, test_values *magnitudes);
/* Compares every array of `got` with `truth`: whole, by channel, by row, by element.  magnitudes: NULL if there are no
 * parameter gradients. */
int test_compare(const test_runner *r, const test_case *c, gt_pass pass, const test_values *got,
                 const test_values *truth, const test_values *magnitudes);
/* Compares every array of `got` with the one of `other`: the same bits if tolerance is 0, else in relative l2. */
int test_same(const test_runner *r, const test_case *c, gt_pass pass, const char *what, const test_values *got,
              const test_values *other, double tolerance);

/* Multiplies every second row of a tensor by 1e25.  The norms' forward and backward must keep their limits, since the
 * results are finite.  f16 cannot hold these numbers. */
void test_huge_rows_hold(const test_runner *r, const test_case *c, const char *tensor);

/* Counts one check; prints the text if it failed: test_check(ok, format, ...).  A macro formats the text only if it is
 * printed: most texts take longer than their checks. */
#define test_check(ok, ...) ((ok) ? test_passed() : test_failed(__VA_ARGS__))
int test_passed(void); /* 1 */
#if defined(__GNUC__)
__attribute__((format(printf, 1, 2)))
#endif
int test_failed(const char *format, ...); /* 0 */
/* Prints "operator case (sizes, dtype, layout, seed)" for a message of a failed check. */
const char *test_describe(const test_case *c, gt_pass pass);

/* One line for the checks since the last call. */
void test_group(const char *op, const char *what);
/* The summary line; returns the exit code. */
int test_finish(void);

#ifdef __cplusplus
}
#endif
#endif
