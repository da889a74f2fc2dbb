/* gt_test - one harness for every operator, driven by the operators' own tables.
 *
 * A test_case names an operator.  It holds the argument struct without pointers, and it says how to draw the inputs and
 * how to lay them out in memory.  test_values holds all tensors of a call as packed arrays of doubles.  Its inputs are
 * already rounded to their stored dtype, so that the double twin sees the same numbers as the kernel.
 *
 * test_run places the values in one block of memory, in the layout of the case, and lets a test_runner execute a pass.
 * Then it checks that the pass wrote only elements of outputs, and returns the outputs as packed arrays of doubles.
 * The test then compares arrays:
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

enum { TEST_TENSORS = 48 }; /* no operator has as many tensors */
#define TEST_ALL (~(uint64_t)0)

/* ---- cases ----------------------------------------------------------------------------------- */

typedef enum test_layout {
    TEST_PACKED,
    TEST_SHIFTED,   /* packed, but every array starts one element off its alignment */
    TEST_TIME_LAST, /* time is the last index: [B,H,T,N], [B,G,N,T] if strides allow it, [B,D,T]; rows [M,D] stay
                       packed */
    TEST_GAPS,      /* every stride is larger than needed, all differ; arrays are off by one element */
    TEST_SLICES,    /* inputs are columns of one buffer, outputs of another; off by one element */
    TEST_ALIGNED    /* as TEST_SLICES, but the first row of every array is aligned to 16 bytes */
} test_layout;

typedef enum test_level {
    TEST_TINY,   /* a difference quotient checks the gradient of every element */
    TEST_SMALL,  /* difference quotients check the gradients along random directions */
    TEST_MEDIUM, /* only the double twin checks the results */
    TEST_LARGE   /* too slow on a CPU: for GPUs */
} test_level;

/* The distribution of a tensor's values: normal(mean, spread), mapped by a test_map.  With probability `share` a value
 * is `special` instead. */
typedef struct test_fill {
    const char *tensor;
    double mean, spread, special, share;
} test_fill;

typedef union test_args {
#define TEST_ARGS(op) gt_##op##_args op;
    TEST_OPERATORS(TEST_ARGS)
#undef TEST_ARGS
} test_args;

/* The most rows of a step, of an operator over rows that has one. */
#define TEST_STEP_ROWS 64

/* The sequences of a packed call.  args.seq_capacity is their upper bound. */
typedef struct test_packed {
    int64_t count;
    const int64_t *lengths; /* NULL: random lengths, some of them 0; together they take nearly all tokens */
} test_packed;

/* Optional arrays of a step.  TOKENS and COMMIT are for speculative decoding, PLACES is for states that are rings,
 * ROUNDING is for the seed and the step of stochastic rounding. */
enum { TEST_TOKENS = 1, TEST_COMMIT = 2, TEST_PLACES = 4, TEST_ROUNDING = 8 };

typedef struct test_case {
    const char *op, *name;
    const char *absent; /* names of tensors whose pointers are NULL, separated by spaces */
    test_fill fill[4];  /* instead of the defaults */
    uint64_t seed;
    test_level level;
    test_layout layout;
    int64_t row;       /* elements in a row of the shared buffers, if they suffice.  0: as few as possible, with
                          an odd row in TEST_SLICES and aligned rows in TEST_ALIGNED */
    int in_place;      /* an output takes the memory of the input that it may equal */
    int no_difference; /* the function has a point without derivative, so difference quotients skip the case */
    int rounds_states; /* a state rounds so much that tests which cut the time cannot compare within their tolerances */
    test_packed packed;
    int drafts;     /* TEST_TOKENS, TEST_COMMIT or both */
    test_args args; /* sizes and flags; the harness sets pointers, strides and dtypes */
} test_case;

/* Packed doubles for each tensor of the operator's table, in its order; NULL = absent. */
typedef struct test_values {
    double *of[TEST_TENSORS];
} test_values;

typedef struct test_random {
    uint64_t state;
} test_random;

typedef enum test_map { TEST_AS_IS, TEST_EXP, TEST_NEGATIVE_EXP } test_map;

/* The largest relative errors (l2) that a test accepts, by dtype. */
typedef struct test_tolerance {
    double activations[4]; /* outputs stored as bf16, fp16 */
    double parameters[4];  /* fp32 outputs of a call with that dtype: states and parameter gradients;
                              in an fp32 call also activations */
    double companions[4];  /* fp32 dw and ddt in a call whose activations have that dtype */
    double terms[4];       /* added for parameter gradients, relative to the sum of their terms' magnitudes */
    int rounds_factors;    /* 1: kernels round the factors of products.  Where products cancel, the error is small
                              beside them, but large beside the output.  2: kernels also round results between stages,
                              which shows in small tensors */
} test_tolerance;

/* ---- rows of the bench ---- */

enum { TEST_F32 = 1 << GT_F32, TEST_BF16 = 1 << GT_BF16, TEST_F16 = 1 << GT_F16 };

/* A row with at most 16 tokens, or with as few rows as a step takes, times the step function.  Any other row times
 * forward and backward.  If forward saves something, the row also times forward without `saved` (inf).  A row with
 * pieces times each pass in pieces.  The name of a row adds flags that its sizes do not show. */
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

/* The double reference computes only a sample of a large call.  The sample is cut along these indices. */
typedef struct test_bench_cut {
    const char *letters;
    int64_t count; /* how many positions it keeps along the first letter; along B it keeps 1 */
} test_bench_cut;

/* ---- arguments that the operators' tables do not list ---- */

typedef struct test_field {
    const char *name; /* NULL ends a list */
    size_t offset;
    char kind;    /* 'i' switch, 'g' divisor of another size, 'v' size with a default, 's' segments, 'f' float,
                     'c' number of columns of a state, in a step only */
    char of;      /* which size a divisor divides */
    double usual; /* of a float */
} test_field;

/* A field of type int, int64_t (l) or float. */
typedef struct test_value {
    size_t offset;
    char type; /* i l f; 0: no more */
    double value;
} test_value;

/* A value that the call must refuse with a message that contains the text.  All other fields are valid. */
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

/* A case and its inputs; a formula reads them. */
typedef struct formula {
    const test_case *c;
    const test_values *in;
} formula;

/* A formula for one element of an output, written independently of the twin: see ops/formula.h. */
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
    /* one function a pass; NULL if the operator lacks the pass */
    gt_status (*twin[GT_PASSES])(const void *args);
    gt_status (*twin64[GT_PASSES])(const void *args);

    /* Arguments: fields that the table does not list, bad values, and the size that may be 0, with a value to test. */
    const test_field *fields;
    const test_bad_value *bad_values;
    struct {
        size_t offset; /* 0: there is none */
        int64_t value;
    } optional_size;

    /* Lists of cases end with an entry whose op is NULL. */
    const test_case *cases;
    const test_case *packed;         /* cases of packed sequences, if the operator takes them */
    const test_case *sizes;          /* without time, batch or rows: the kernel tests run each with many of these */
    const test_case *steps;          /* NULL, or sizes for the kernels of steps, without time: they take both sides of
                                        every branch */
    const char *const *step_kernels; /* NULL, or the names of these kernels with template arguments; ends with NULL */
    void (*check_step)(const test_runner *r, const test_case *c); /* NULL, or one more check of each step */
    /* For test_rounding_agrees.  NULL: the operator has no stochastic rounding. */
    struct {
        const char *zero, *one;
        void (*set)(test_case *c); /* sets the flags that make the sums of a step exact */
    } exact;
    const test_case *many; /* a case with more than 65535 items along one axis of a grid */
    const test_case *sums; /* cases for parameter gradients, with long sums */
    test_case large;       /* one batch element or one row; test_large.c repeats it as often as it needs */
    /* Draws random sizes up to about `most`, flags and absent tensors. */
    void (*draw)(test_random *r, int64_t most, test_case *c);
    /* NULL, or functions: set_fill sets the distribution of a tensor if the tensor's name alone does not decide it.
     * set_regime chooses the n-th of several regimes of decays. */
    void (*set_fill)(const test_case *c, const gt_tensor *t, test_fill *f, test_map *map);
    void (*set_regime)(test_case *c, int n);
    /* NULL, or a function that moves drawn inputs away from points where rounding decides the result. */
    void (*settle)(const test_case *c, test_values *in);
    test_tolerance kernels; /* the allowed errors of kernels */
    /* NULL, or names of fp32 outputs that are sums of a few numbers of the call's dtype.  Tests allow these outputs the
     * errors of activations. */
    const char *sums_of_few;
    /* NULL, or by pass the names of outputs whose elements are differences of much larger terms.  One element may have
     * 16 times the tensor's error if the kernel rounds the factors, and 8 times in all other cases. */
    const char *differences[GT_PASSES];
    /* NULL, or a function that returns the magnitudes of an output's terms.  A kernel may compute the terms from a
     * number that it rounds and the double twin does not.  Where these terms cancel, a channel may be small beside
     * them.  The function returns NULL for other outputs. */
    double *(*terms)(const test_case *c, gt_pass pass, const gt_tensor *t);
    const test_formula *formulas; /* of every output of forward */
    /* Properties of this operator alone: NULL, or a list that ends with `what` NULL. */
    const test_property *properties;
    /* The difference that the twins may have, by dtype, if the time is cut in two.  0: none. */
    double split_tolerance[4];
    /* The same, if steps take the tokens.  0: none, since the states keep everything that a call knows. */
    double step_tolerance[4];
    /* NULL, or further times for the sizes, ending with -1.  `launched` lists the kernels that these times must launch;
     * it ends with NULL. */
    const int64_t *more_times;
    const char *const *launched;
    /* NULL, or cases for the emulation.  Each is named after the kernel, with template arguments, that its forward
     * launches. */
    const test_case *launching;
    /* The length in tokens of the chunk that a NaN or infinity may spoil in the kernels, in forward and in backward:
     * gt_kernels.h states it under NON-FINITE NUMBERS.  0: kernels spoil no more than the twin.  wkv_ssm has the larger
     * length of its two operators. */
    int64_t reach[2];
    const test_case *spoilt; /* NULL, or sizes, without time, whose kernels spoil that whole chunk */
    int has_exact_prefill;   /* forward cut at multiples of 128 tokens gives the bits of one call, with segments = 1 */
    int bounds_pairs;        /* some infinities become large numbers, as NON-FINITE NUMBERS states */
    size_t handle;           /* offset of the field for a cuBLASLt handle; 0: no such field */
    size_t reads_y;          /* offset of the switch that lets backward read forward's y; 0: no such switch */
    const char *unread_with_y; /* NULL, or names of inputs that backward then only checks */

    /* Rows of the bench.  host_rows time the CPU twins, in the trainer's calls with a small batch.  gpu_rows time a
     * GPU, in the same calls with the trainer's own batch and in the sizes of larger models.  The lists end with op
     * NULL, tensors NULL and letters NULL. */
    const test_bench_row *host_rows, *gpu_rows;
    const test_bench_draw *bench_draws; /* inputs as in a model; other inputs are normal(0, 1).  May be NULL */
    const test_bench_cut *bench_cuts;   /* NULL: the bench compares every call as a whole */
    /* Operations for each product of these sizes; an addition and a multiplication count as two.  Recurrences count the
     * formulas of single tokens, though a faster form may do more.  letters NULL: hardly any products. */
    struct {
        const char *letters;
        double forward, backward;
    } operations;
} test_op;

extern const test_op *const test_ops[];      /* ends with NULL */
const test_op *test_op_of(const char *name); /* NULL: there is none */
/* Draws a case: random sizes up to about `most`, flags, absent tensors and layout. */
void test_draw_case(const test_op *op, uint64_t seed, int64_t most, test_case *c);
/* Draws a case with packed sequences; only for operators that take them. */
void test_draw_packed(const test_op *op, uint64_t seed, int64_t most, test_case *c);

test_fill test_fill_of(const test_case *c, const gt_tensor *t, test_map *map); /* the distribution of a tensor's values
                                                                                  in a case */
/* The constant, 0 or 1, that replaces an absent optional input.  NaN: the tensor has no such constant. */
double test_constant(const char *tensor);

/* ---- case and table look-ups ----------------------------------------------------------------- */

int test_is_word_of(const char *list, const char *word); /* words between spaces */
const gt_op *test_table(const test_case *c);
int test_has_pass(const test_case *c, gt_pass pass);
int test_find(const gt_op *op, const char *tensor); /* index in the table, -1 = none */
/* The name without its struct: "y" for "wkv6.y", a field of a struct within the argument struct.  Rules that depend on
 * a tensor's name use this name. */
const char *test_plain_name(const gt_tensor *t);
int test_is(const gt_tensor *t, const char *plain_name);
/* The tensor with that plain name in the same struct as tensor i; -1 = none. */
int test_beside(const gt_op *op, int i, const char *plain_name);
int test_gradient_of(const gt_op *op, int i); /* the gradient of tensor i (dy for a residual); -1 = none */
int test_is_over_time(const test_op *op);     /* else over rows */
int test_is_absent(const test_case *c, const gt_tensor *t);
int test_is_input(const gt_tensor *t, gt_pass pass);  /* read, 's' included */
int test_is_output(const gt_tensor *t, gt_pass pass); /* written, 's' included */
int test_accumulates(const test_case *c, const gt_tensor *t);
int test_is_state(const gt_tensor *t);    /* whether it has a row for each batch element or sequence */
int test_takes_packed(const test_op *op); /* whether the operator takes packed sequences */
int test_is_packed(const test_case *c);
/* The place of the index `letter` in the tensor's shape, or -1.  'B' also finds the batch index of states; in a packed
 * case it finds nothing else. */
int test_axis(const test_case *c, const gt_tensor *t, char letter);

int64_t test_get_size(const test_case *c, char letter);
void test_set_size(test_case *c, char letter, int64_t n);
int test_get_flag(const test_case *c, size_t offset); /* 0 if the operator lacks the field */
void test_set_flag(test_case *c, size_t offset, int value);
void test_set_slots(test_case *c, int64_t capacity);
void test_set_pieces(test_case *c, int64_t pieces);
int64_t test_get_pieces(const test_case *c);                            /* 0 if the operator has no pieces */
void test_set_sequences(test_case *c, int64_t count, int64_t capacity); /* 0, 0: not packed */
void test_set_dtype(test_case *c, gt_dtype dtype, gt_dtype companion);  /* DEFAULT: as dtype */
gt_dtype test_dtype_of(const test_case *c, const gt_tensor *t);         /* of its elements */

/* Writes the sizes of the tensor's indices; returns the rank. */
int test_shape(const test_case *c, gt_pass pass, const gt_tensor *t, int64_t size[4]);
int64_t test_count(const test_case *c, gt_pass pass, const gt_tensor *t);
/* Picks the bytes of workspace that a call of the pass needs from the answer to a query. */
size_t test_workspace_of(const gt_workspace *need, gt_pass pass);

/* ---- values ---------------------------------------------------------------------------------- */

uint64_t test_next(test_random *r);
double test_uniform(test_random *r); /* in [0,1) */
double test_normal(test_random *r);

double test_round(double value, gt_dtype dtype);

/* The case's seed plus the value of the environment variable GT_TEST_SEED. */
uint64_t test_seed(const test_case *c);

/* Draws all tensors that `pass` reads: inputs, and the old contents of outputs that accumulate or are in place.  In a
 * packed case, elements outside all sequences are 0 in *in and NaN in the memory of test_run. */
void test_inputs(const test_case *c, gt_pass pass, test_values *in);
/* The number of sequences of a packed case.  test_sequence_at returns the first token of sequence s. */
int64_t test_sequences(const test_case *c, const test_values *in);
int64_t test_sequence_at(const test_case *c, const test_values *in, int64_t s);
double *test_array(int64_t count, double value);
void test_copy(const test_case *c, gt_pass pass, const test_values *from, test_values *to);
void test_free(test_values *v);
/* These functions find a tensor by its name.  test_set_array frees the old array; the new one may be NULL. */
const gt_tensor *test_tensor_of(const test_case *c, const char *name);
double **test_array_of(test_values *v, const test_case *c, const char *tensor);
void test_set_array(test_values *v, const test_case *c, const char *tensor, double *array);

/* Copies positions at, at+1, ... at+n-1 along the index `letter`.  Tensors without that index are copied whole. */
void test_cut(const test_case *c, gt_pass pass, const test_values *from, char letter, int64_t at, int64_t n,
              test_values *to);
/* The reverse of test_cut, for tensors that have the index.  Allocates arrays that *to lacks. */
void test_paste(const test_case *part, const test_case *c, gt_pass pass, const test_values *from, char letter,
                int64_t at, test_values *to);

/* ---- running --------------------------------------------------------------------------------- */

struct test_runner {
    const char *name;
    /* Executes a pass.  All pointers in *args lie in memory[0..bytes), which is aligned to 256 bytes. */
    gt_status (*run)(const test_runner *r, const test_op *op, gt_pass pass, const void *args, char *memory,
                     size_t bytes);
    void *context;
    int is_double; /* arrays hold doubles, packed */
    test_tolerance tolerance;
    int reads_y; /* backward gets forward's y, if the operator may read it */
};

/* The limit for an activation's error.  The limit is larger for a dz that backward computes from y (reads_y), since y
 * was rounded to bf16 before.  With many numbers, two roundings make an error of 2.35e-3 of the norm.  The square of a
 * number's relative error varies by 0.45 squares of half a unit around its mean.  So with n numbers the square of the
 * limit grows by five times that over sqrt(n). */
double test_limit_of(const test_runner *r, const test_op *op, const gt_tensor *t, gt_dtype dtype, const double *truth,
                     int64_t count, double limit);

extern const test_runner test_truth; /* the double twins */
extern const test_runner test_twin;  /* the twins with their public functions */

/* Runs `pass` on `in`.  Bit i of `want` asks for tensor i of the table, and *out receives these outputs, except absent
 * ones.  Returns 1 if the pass succeeded and changed nothing else. */
int test_run(const test_runner *r, const test_case *c, gt_pass pass, const test_values *in, uint64_t want,
             test_values *out);

/* Moves every pointer of *args that lies in from[0..bytes) to the same place of `to`. */
void test_relocate(const gt_op *op, void *args, const char *from, size_t bytes, char *to);

/* ---- judging --------------------------------------------------------------------------------- */

/* Bounds the sum of the magnitudes of the terms of every parameter gradient.  The bounds are the double twin's results
 * for the absolute values of all inputs, except inputs that set the decay. */
void test_magnitudes(const test_case *c, const test_values *in, test_values *magnitudes);
/* Compares every array of `got` with `truth`: whole, by channel, by row and by element.  magnitudes: NULL if there are
 * no parameter gradients. */
int test_compare(const test_runner *r, const test_case *c, gt_pass pass, const test_values *got,
                 const test_values *truth, const test_values *magnitudes);
/* Compares every array of `got` with the same array of `other`.  Tolerance 0 asks for the same bits, any other
 * tolerance is relative, in l2. */
int test_same(const test_runner *r, const test_case *c, gt_pass pass, const char *what, const test_values *got,
              const test_values *other, double tolerance);

/* Multiplies every second row of a tensor by 1e25.  The results are finite, so forward and backward of the norms must
 * stay within their limits.  f16 cannot hold these numbers. */
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
