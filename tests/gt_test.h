/* gt_test - one harness for every operator, driven by the operators' own tables (gt_op).
 *
 * A test_case names an operator.  It holds the argument struct without pointers, and says how to draw the inputs and
 * how to lay them out in memory.  test_values holds all tensors of a call as packed arrays of doubles.  The inputs in
 * test_values are already rounded to their stored dtype, so that the double twin reads the same numbers as the kernel.
 *
 * test_run places the values in one block of memory, in the layout of the case, and calls a test_runner for one pass.
 * Then test_run checks that the pass wrote only elements of outputs, and returns the outputs as packed arrays of
 * doubles. The test compares these arrays:
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

enum { TEST_TENSORS = 56 }; /* the largest number of tensors of an operator */
#define TEST_ALL (~(uint64_t)0)

/* ---- cases ----------------------------------------------------------------------------------- */

typedef enum test_layout {
    TEST_PACKED,
    TEST_SHIFTED, /* packed, but every array starts one element after an aligned address */
    /* time is the last index: [B,H,T,N], [B,G,N,T] if strides allow it, [B,D,T]; rows [M,D] are packed */
    TEST_TIME_LAST,
    /* every stride is larger than needed, and all differ; arrays start one element after an aligned address */
    TEST_GAPS,
    TEST_SLICES, /* inputs are columns of one buffer, outputs of another; both start one element off */
    TEST_ALIGNED /* as TEST_SLICES, but the first row of every array starts at a multiple of 16 bytes */
} test_layout;

typedef enum test_level {
    TEST_TINY,   /* difference quotients check each element of every gradient */
    TEST_SMALL,  /* difference quotients check gradients along random directions */
    TEST_MEDIUM, /* only the double twin checks the results */
    TEST_LARGE   /* only for GPUs, because a CPU takes too long */
} test_level;

/* The distribution of a tensor's values.  A value is drawn from normal(mean, spread), and mapped by a test_map.  With
 * probability `share` the value is `special` instead. */
typedef struct test_fill {
    const char *tensor;
    double mean, spread, special, share;
} test_fill;

typedef union test_args {
#define TEST_ARGS(op) gt_##op##_args op;
    TEST_OPERATORS(TEST_ARGS)
#undef TEST_ARGS
} test_args;

/* The most rows in a step of an operator over rows. */
#define TEST_STEP_ROWS 64

/* The sequences of a packed call.  `count` is at most args.seq_capacity. */
typedef struct test_packed {
    int64_t count;
    const int64_t *lengths; /* NULL: random lengths, some of them 0, that together take nearly all tokens */
} test_packed;

/* Optional arrays of a step: for speculative decoding (TOKENS, COMMIT), for states that are rings of columns (PLACES),
 * and for stochastic rounding (ROUNDING: the seed and the steps). */
enum { TEST_TOKENS = 1, TEST_COMMIT = 2, TEST_PLACES = 4, TEST_ROUNDING = 8 };

typedef struct test_case {
    const char *op, *name;
    const char *absent; /* tensors whose pointers are NULL: names separated by spaces */
    test_fill fill[4];  /* these replace the default distributions */
    uint64_t seed;
    test_level level;
    test_layout layout;
    int64_t row;       /* elements in a row of the shared buffers, if the tensors fit; 0: as few as possible */
    int in_place;      /* an output takes the memory of the input that it may equal (gt_tensor.may_equal) */
    int no_difference; /* difference quotients skip the case, because the function has a point without derivative */
    int rounds_states; /* tests that cut the time skip the case, because a state rounds by more than their tolerances */
    test_packed packed;
    int drafts;     /* the optional arrays of a step: TEST_TOKENS and so on */
    test_args args; /* sizes and flags; the harness sets pointers, strides and dtypes */
} test_case;

/* One packed array of doubles for each tensor of the operator's table, in the table's order.  NULL: absent. */
typedef struct test_values {
    double *of[TEST_TENSORS];
} test_values;

typedef struct test_random {
    uint64_t state;
} test_random;

typedef enum test_map { TEST_AS_IS, TEST_EXP, TEST_NEGATIVE_EXP } test_map;

/* The largest relative l2 errors that a test accepts.  Each array is indexed by the call's dtype. */
typedef struct test_tolerance {
    double activations[4]; /* outputs in bf16 or fp16 */
    double parameters[4];  /* fp32 outputs: states, parameter gradients and, in an fp32 call, activations */
    double companions[4];  /* dw and ddt in fp32, if the activations have the call's dtype */
    double terms[4];       /* added for parameter gradients, relative to the sum of the magnitudes of their terms */
    /* 1: kernels round the factors of products.  Where products cancel, the error may be large beside the output. 2:
     * kernels also round results between stages, which matters in small tensors. */
    int rounds_factors;
} test_tolerance;

/* ---- rows of the bench ---- */

enum { TEST_F32 = 1 << GT_F32, TEST_BF16 = 1 << GT_BF16, TEST_F16 = 1 << GT_F16 };

/* A row of the bench.  A row with at most 16 tokens, or with at most TEST_STEP_ROWS rows if the operator has a step
 * over rows, times the step.  A row with pieces times each pass of the computation in pieces.  Any other row times
 * forward and backward; if forward can save something for backward, the row also times forward without `saved` ("inf").
 * The case's name tells flags that the sizes do not show. */
typedef struct test_bench_row {
    test_case c;
    int dtypes;
} test_bench_row;

/* A distribution: uniform in [mean - spread, mean + spread], or normal. */
typedef struct bench_draw {
    int is_uniform;
    float mean, spread;
} bench_draw;

typedef struct test_bench_draw {
    const char *tensors; /* names separated by spaces */
    bench_draw how;
} test_bench_draw;

/* In a large call, the double reference computes only a sample: the part of the call that is cut along these
 * indices. */
typedef struct test_bench_cut {
    const char *letters;
    int64_t count; /* positions that the sample keeps along the first letter; along B it keeps 1 */
} test_bench_cut;

/* ---- arguments that the operators' tables do not list ---- */

typedef struct test_field {
    const char *name; /* NULL ends a list */
    size_t offset;
    /* 'i' switch, 'g' divisor of another size, 'v' size with a default, 's' segments, 'f' float, 'c' number of columns
     * of a state, in a step only */
    char kind;
    char of;      /* letter of the size that a divisor divides */
    double usual; /* the valid value of a float field */
} test_field;

/* A value for one field.  type: 'i' int, 'l' int64_t, 'f' float. */
typedef struct test_value {
    size_t offset;
    char type; /* 0 ends a list */
    double value;
} test_value;

/* Values that the call must refuse, with a message that contains `text`.  All other fields are valid. */
typedef struct test_bad_value {
    const char *text; /* NULL ends a list */
    gt_status status;
    test_value set[3];
} test_bad_value;

typedef struct test_runner test_runner;

typedef struct test_property {
    const char *what;
    test_level level; /* the highest level of the cases that run this check */
    void (*check)(const test_runner *r, const test_case *c, double tolerance);
} test_property;

/* A case and its inputs, as formulas read them. */
typedef struct formula {
    const test_case *c;
    const test_values *in;
} formula;

/* A formula for element [i,j,k,l] of an output, written independently of the twin: see ops/formula.h. */
typedef struct test_formula {
    const char *tensor; /* NULL ends a list */
    double (*of)(const formula *f, int64_t i, int64_t j, int64_t k, int64_t l);
} test_formula;

/* ---- operators ------------------------------------------------------------------------------- */

/* An operator's data for tests and bench that its table does not have.  Each ops/OP.c defines one. */
typedef struct test_op {
    const char *name;
    const gt_op *(*table)(void);
    size_t (*args_size)(void); /* the library's function: the size of the argument struct in the library */
    size_t args_bytes;         /* the size of the argument struct in the test */
    /* one function for each pass; NULL if the operator lacks the pass */
    gt_status (*twin[GT_PASSES])(const void *args);
    gt_status (*twin64[GT_PASSES])(const void *args);

    /* Arguments: fields that the table does not list, values that a call must refuse, and the size that may be 0. */
    const test_field *fields;
    const test_bad_value *bad_values;
    struct {
        size_t offset; /* 0: no such size */
        int64_t value;
    } optional_size;

    /* Lists of cases.  Each ends with an entry whose op is NULL. */
    const test_case *cases;
    const test_case *packed; /* cases of packed sequences; NULL: the operator does not take them */
    /* sizes without time, batch or rows: the kernel tests run each with many times or rows */
    const test_case *sizes;
    /* NULL, or sizes without time for the step kernels.  Together they take both sides of every branch */
    const test_case *steps;
    /* NULL, or the names of the step kernels with template arguments; ends with NULL */
    const char *const *step_kernels;
    void (*check_step)(const test_runner *r, const test_case *c); /* NULL, or one more check for each case of a step */
    /* Arguments of test_rounding_agrees.  NULL: the operator has no stochastic rounding. */
    struct {
        const char *zero, *one;
        void (*set)(test_case *c); /* sets flags such that the sums of a step are exact */
    } exact;
    const test_case *many; /* a case with more than 65535 items along one axis of a grid */
    const test_case *sums; /* cases whose parameter gradients are long sums */
    /* one batch element or one row; test_large.c repeats it until a tensor has more than 2^31 elements */
    test_case large;
    /* Draws random sizes up to about `most`, random flags and absent tensors. */
    void (*draw)(test_random *r, int64_t most, test_case *c);
    void (*fit)(test_args *args); /* NULL, or makes drawn sizes agree that a call needs equal */
    /* NULL, or the table by which the library checks a call.  It may be another one than `table` if a required pointer
     * is NULL. */
    const gt_op *(*table_of)(const test_args *args, gt_pass pass);
    /* set_fill, if not NULL, sets the distribution of a tensor if the name alone does not decide it.  set_regime, if
     * not NULL, chooses the n-th of several regimes of decays. */
    void (*set_fill)(const test_case *c, const gt_tensor *t, test_fill *f, test_map *map);
    void (*set_regime)(test_case *c, int n);
    /* NULL, or a function that moves drawn inputs away from points where rounding alone decides the result. */
    void (*settle)(const test_case *c, test_values *in);
    test_tolerance kernels; /* the errors that kernels may have */
    /* NULL, or names of fp32 outputs that are sums of a few numbers of the call's dtype.  These outputs may have the
     * errors of activations. */
    const char *sums_of_few;
    /* NULL or, for each pass, names of outputs whose elements are differences of much larger terms.  If the kernel
     * rounds factors, one element may have 16 times the tensor's error.  Without rounding, and in other outputs, the
     * limit is 8 times. */
    const char *differences[GT_PASSES];
    /* NULL, or a function that returns the magnitudes of an output's terms (NULL for other outputs).  If a kernel
     * computes these terms from a rounded number, and they cancel, a channel of the output may be small beside the
     * rounding errors. */
    double *(*terms)(const test_case *c, gt_pass pass, const gt_tensor *t);
    const test_formula *formulas; /* formulas for every output of forward */
    /* Properties of only this operator; ends with `what` NULL.  NULL: none. */
    const test_property *properties;
    /* By dtype: how far the results of the twins may differ if the time is cut in two.  0: they have the same bits. */
    double split_tolerance[4];
    /* The same for steps.  0 is possible if the states keep everything that one call keeps between tokens. */
    double step_tolerance[4];
    /* more_times: NULL, or more numbers of tokens for `sizes`; ends with -1.  launched: the kernels that calls with
     * these times must launch; ends with NULL. */
    const int64_t *more_times;
    const char *const *launched;
    /* NULL, or cases for the emulation.  Each case is named after the kernel, with template arguments, that its forward
     * must launch. */
    const test_case *launching;
    /* The reach in forward and in backward: the length in tokens of the chunk that a NaN or infinity may spoil in the
     * kernels.  See NON-FINITE NUMBERS in gt_kernels.h.  0: kernels spoil no more than the twin.  For wkv_ssm it is the
     * larger reach of wkv6 and ssd. */
    int64_t reach[2];
    const test_case *spoilt; /* NULL, or sizes without time, for which kernels spoil the whole chunk of `reach` */
    /* with segments = 1, forward in parts of multiples of 128 tokens gives the bits of one call */
    int has_exact_prefill;
    int bounds_pairs;          /* kernels turn some infinities into large numbers, as NON-FINITE NUMBERS states */
    size_t handle;             /* offset of the field for a cuBLASLt handle; 0: none */
    size_t reads_y;            /* offset of the switch that lets backward read forward's y; 0: none */
    const char *unread_with_y; /* NULL, or inputs that backward checks but does not read if it reads y */

    /* Rows of the bench.  host_rows time the CPU twins, in the trainer's calls with a small batch.  gpu_rows time a
     * GPU, in the trainer's calls with its own batch and in sizes of larger models.  These lists end with an entry
     * whose op, tensors or letters is NULL. */
    const test_bench_row *host_rows, *gpu_rows;
    /* distributions of inputs, as in a model; other inputs are normal(0, 1).  May be NULL */
    const test_bench_draw *bench_draws;
    const test_bench_cut *bench_cuts; /* NULL: the double reference computes every call as a whole */
    /* Floating-point operations per product of the sizes `letters`, where a multiply-add counts as two.  For
     * recurrences this is the formula of single tokens, although faster forms may do more.  letters NULL: too few
     * operations to count. */
    struct {
        const char *letters;
        double forward, backward;
    } operations;
} test_op;

extern const test_op *const test_ops[];      /* all operators; ends with NULL */
const test_op *test_op_of(const char *name); /* NULL: no such operator */
/* Draws a case with random sizes up to about `most`, random flags, absent tensors and layout. */
void test_draw_case(const test_op *op, uint64_t seed, int64_t most, test_case *c);
/* Draws a case with packed sequences.  Only for operators that take them. */
void test_draw_packed(const test_op *op, uint64_t seed, int64_t most, test_case *c);

/* The distribution of a tensor's values in a case. */
test_fill test_fill_of(const test_case *c, const gt_tensor *t, test_map *map);
/* The constant (0 or 1) that an operator uses for an optional input that is NULL.  NaN: there is no such constant. */
double test_constant(const char *tensor);

/* ---- case and table look-ups ----------------------------------------------------------------- */

int test_is_word_of(const char *list, const char *word); /* `list` has words between spaces */
const gt_op *test_table(const test_case *c);
int test_has_pass(const test_case *c, gt_pass pass);
int test_find(const gt_op *op, const char *tensor); /* the tensor's index in the table; -1 = none */
/* The plain name of a tensor is its name without the inner struct: "y" for "wkv6.y".  Rules that depend on a tensor's
 * name use the plain name. */
const char *test_plain_name(const gt_tensor *t);
int test_is(const gt_tensor *t, const char *plain_name);
/* The index of the tensor with this plain name in the same struct as tensor i; -1 = none. */
int test_beside(const gt_op *op, int i, const char *plain_name);
int test_gradient_of(const gt_op *op, int i); /* index of the gradient of tensor i (dy for a residual); -1 = none */
int test_is_over_time(const test_op *op);     /* 0: the operator works on rows */
int test_is_absent(const test_case *c, const gt_tensor *t);
int test_is_input(const gt_tensor *t, gt_pass pass);  /* the pass reads the tensor; true for a step's states */
int test_is_output(const gt_tensor *t, gt_pass pass); /* the pass writes the tensor; true for a step's states */
int test_accumulates(const test_case *c, const gt_tensor *t);
int test_is_state(const gt_tensor *t);    /* the tensor has a row for each batch element or sequence */
int test_takes_packed(const test_op *op); /* the operator takes packed sequences */
int test_is_packed(const test_case *c);
/* The position of the index `letter` in the tensor's shape, or -1.  'B' also finds the batch index of a state.  In a
 * packed case 'B' finds only this index, because only states have one row for each sequence. */
int test_axis(const test_case *c, const gt_tensor *t, char letter);

int64_t test_get_size(const test_case *c, char letter);
void test_set_size(test_case *c, char letter, int64_t n);
int test_get_flag(const test_case *c, size_t offset); /* 0 if the operator lacks this field */
void test_set_flag(test_case *c, size_t offset, int value);
void test_set_slots(test_case *c, int64_t capacity);
void test_set_pieces(test_case *c, int64_t pieces);
int64_t test_get_pieces(const test_case *c);                            /* 0 if the operator cannot run in pieces */
void test_set_sequences(test_case *c, int64_t count, int64_t capacity); /* count = capacity = 0: not packed */
/* companion: of w and dt; GT_DTYPE_DEFAULT: equal to dtype */
void test_set_dtype(test_case *c, gt_dtype dtype, gt_dtype companion);
gt_dtype test_dtype_of(const test_case *c, const gt_tensor *t); /* the dtype of the tensor's elements */

/* Writes the sizes of the tensor's indices to `size`, and returns the number of indices. */
int test_shape(const test_case *c, gt_pass pass, const gt_tensor *t, int64_t size[4]);
int64_t test_count(const test_case *c, gt_pass pass, const gt_tensor *t);
/* The bytes of workspace that the pass needs, taken from the result of a workspace query. */
size_t test_workspace_of(const gt_workspace *need, gt_pass pass);

/* ---- values ---------------------------------------------------------------------------------- */

uint64_t test_next(test_random *r);
double test_uniform(test_random *r); /* in [0,1) */
double test_normal(test_random *r);

double test_round(double value, gt_dtype dtype);

/* The case's seed plus the number in the environment variable GT_TEST_SEED. */
uint64_t test_seed(const test_case *c);

/* Draws all tensors that `pass` reads: inputs, and the old contents of outputs that accumulate or are updated in place.
 * In a packed case, elements outside all sequences are 0 in *in; test_run writes them to memory as NaN. */
void test_inputs(const test_case *c, gt_pass pass, test_values *in);
/* The number of sequences of a packed case.  test_sequence_at returns the first token of sequence s. */
int64_t test_sequences(const test_case *c, const test_values *in);
int64_t test_sequence_at(const test_case *c, const test_values *in, int64_t s);
double *test_array(int64_t count, double value);
void test_copy(const test_case *c, gt_pass pass, const test_values *from, test_values *to);
void test_free(test_values *v);
/* The next functions find a tensor by its name.  test_set_array frees the old array; the new array may be NULL. */
const gt_tensor *test_tensor_of(const test_case *c, const char *name);
double **test_array_of(test_values *v, const test_case *c, const char *tensor);
void test_set_array(test_values *v, const test_case *c, const char *tensor, double *array);

/* Copies a part of all tensors: positions at, at+1, ... at+n-1 along the index `letter`.  Tensors without this index
 * are copied whole. */
void test_cut(const test_case *c, gt_pass pass, const test_values *from, char letter, int64_t at, int64_t n,
              test_values *to);
/* The reverse of test_cut: copies the tensors that have the index to their part of *to.  Allocates arrays that *to
 * lacks. */
void test_paste(const test_case *part, const test_case *c, gt_pass pass, const test_values *from, char letter,
                int64_t at, test_values *to);

/* ---- running --------------------------------------------------------------------------------- */

struct test_runner {
    const char *name;
    /* Runs a pass.  All pointers in *args lie in memory[0..bytes), which is aligned to 256 bytes. */
    gt_status (*run)(const test_runner *r, const test_op *op, gt_pass pass, const void *args, char *memory,
                     size_t bytes);
    void *context;
    int is_double; /* arrays are packed and hold doubles */
    test_tolerance tolerance;
    int reads_y; /* backward gets forward's y, if the operator can read y */
};

/* The limit for an activation's relative l2 error.  For most tensors this is `limit`.  A dz that backward computes from
 * y (reads_y) has a larger limit, because y was rounded to bf16 before.  With many numbers, the two roundings make an
 * error of 2.35e-3.  With n numbers, the squared error varies around its mean: its standard deviation is 0.45 / sqrt(n)
 * squared half units.  The squared limit is larger by five such deviations. */
double test_limit_of(const test_runner *r, const test_op *op, const gt_tensor *t, gt_dtype dtype, const double *truth,
                     int64_t count, double limit);

extern const test_runner test_truth; /* the runner of the double twins: its results are the truth */
extern const test_runner test_twin;  /* the runner of the public functions of the twins */

/* Runs `pass` on `in`.  Bit i of `want` asks for tensor i of the table.  *out receives the outputs that `want` asks
 * for, except absent ones.  Returns 1 if the pass succeeded and wrote only to its outputs. */
int test_run(const test_runner *r, const test_case *c, gt_pass pass, const test_values *in, uint64_t want,
             test_values *out);

/* Changes every pointer of *args that points into from[0..bytes) to the same offset in `to`. */
void test_relocate(const gt_op *op, void *args, const char *from, size_t bytes, char *to);

/* ---- judging --------------------------------------------------------------------------------- */

/* Computes upper bounds for the sums of the magnitudes of the terms of every parameter gradient.  The bounds are the
 * double twin's gradients for the absolute values of all inputs, except inputs that set the decay. */
void test_magnitudes(const test_case *c, const test_values *in, test_values *magnitudes);
/* Compares every array of `got` with `truth`: as a whole, by channel, by row and by element.  magnitudes: from
 * test_magnitudes, or NULL without parameter gradients. */
int test_compare(const test_runner *r, const test_case *c, gt_pass pass, const test_values *got,
                 const test_values *truth, const test_values *magnitudes);
/* Compares every array of `got` with the same array of `other`.  Tolerance 0 asks for the same bits; any other
 * tolerance limits the relative l2 difference. */
int test_same(const test_runner *r, const test_case *c, gt_pass pass, const char *what, const test_values *got,
              const test_values *other, double tolerance);

/* Multiplies every second row of a tensor by 1e25, whose square fp32 cannot hold.  Forward and backward of the norms
 * must still give finite results within their limits.  Skips fp16, which cannot hold such numbers. */
void test_huge_rows_hold(const test_runner *r, const test_case *c, const char *tensor);

/* test_check(ok, format, ...) counts one check, and prints the text if the check failed.  It is a macro, so that texts
 * are only formatted if they are printed: most texts take longer than their checks. */
#define test_check(ok, ...) ((ok) ? test_passed() : test_failed(__VA_ARGS__))
int test_passed(void); /* returns 1 */
#if defined(__GNUC__)
__attribute__((format(printf, 1, 2)))
#endif
int test_failed(const char *format, ...); /* returns 0 */
/* The text "operator case (sizes, dtype, layout, seed)", for the message of a failed check. */
const char *test_describe(const test_case *c, gt_pass pass);

/* Prints one line for the checks since the last call. */
void test_group(const char *op, const char *what);
/* Prints the summary line.  Returns the exit code. */
int test_finish(void);

#ifdef __cplusplus
}
#endif
#endif
