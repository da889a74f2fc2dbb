/* gt_test - one harness for every operator, driven by the operators' own tables.
 *
 * A test_case is an operator, its argument struct without pointers, and how its inputs are drawn
 * and laid out in memory.  The values of all its tensors are packed double arrays (test_values):
 * inputs already rounded to the dtype they will be stored in, so that the double twin sees the very
 * same numbers.  test_run places them into one block of memory as the case's layout asks, lets a
 * test_runner execute a pass on it, proves that nothing but the elements of the outputs was
 * written, and returns the outputs as packed double arrays again.  The rest is comparing arrays:
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

/* The sequences of a packed call; args.seq_capacity says that it is one. */
typedef struct test_packed {
    int64_t count;
    const int64_t *lengths; /* NULL: random, some of them 0, of nearly all tokens together */
} test_packed;

/* Which arrays of speculative decoding a step has. */
enum { TEST_TOKENS = 1, TEST_COMMIT = 2 };

typedef struct test_case {
    const char *op, *name;
    const char *absent; /* names of tensors whose pointers are NULL, separated by spaces */
    test_fill fill[4];  /* instead of the defaults */
    uint64_t seed;
    test_level level;
    test_layout layout;
    int64_t row;       /* elements in a row of the slices' buffers if they suffice; 0 = just enough:
                          TEST_SLICES odd, TEST_ALIGNED so that all rows are aligned */
    int in_place;      /* outputs that may equal an input do */
    int no_difference; /* has no derivative somewhere: not for difference quotients */
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
    double terms[4];       /* what may be added for parameter gradients, relative to their terms */
    int rounds_factors;    /* products are formed of rounded factors: where they cancel, an error is
                              small beside them, but not beside the output.  2: what one stage hands to
                              another is rounded, too, which few numbers show */
} test_tolerance;

/* ---- rows of the bench ---- */

enum { TEST_F32 = 1 << GT_F32, TEST_BF16 = 1 << GT_BF16, TEST_F16 = 1 << GT_F16 };

/* A row with at most 16 tokens is one of the step function; the others are one of forward, one of backward, and where
 * forward saves something, one of forward without that (inf).  A row with pieces is one of each pass in pieces.  The
 * name tells what the sizes do not. */
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

/* Of a large call the double reference is run on a sample, cut along these indices. */
typedef struct test_bench_cut {
    const char *letters;
    int64_t count; /* of the positions kept along the first letter; along B it is 1 */
} test_bench_cut;

/* ---- arguments that the operators' tables do not list ---- */

typedef struct test_field {
    const char *name; /* NULL ends a list */
    size_t offset;
    char kind;    /* 'i' switch, 'g' divisor of another size, 'v' size with a default, 's' segments, 'f' float */
    char of;      /* which size a divisor divides */
    double usual; /* of a float */
} test_field;

/* A field of type int, int64_t (l) or float. */
typedef struct test_value {
    size_t offset;
    char type; /* i l f; 0: no more */
    double value;
} test_value;

/* The message of the refusal holds the text; all that is not set is in order. */
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

/* A case and what its inputs hold, as the formulas see them. */
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

/* What tests and bench must know of an operator beyond its table: ops/OP.c. */
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
    const test_case *packed; /* of packed sequences, if the operator takes them */
    const test_case *sizes;  /* without time, batch or rows: kernels are tested in each with many of these */
    const test_case *steps;  /* NULL, or: without time, for kernels of steps: both sides of all that they branch on */
    const char *const *step_kernels; /* NULL, or: names of those, template arguments and all, ending with NULL */
    void (*check_step)(const test_runner *r, const test_case *c); /* NULL, or: what must hold of each of these steps */
    const test_case *many;                                        /* more than 65535 of what a grid may count */
    const test_case *sums;                                        /* for parameter gradients over long sums */
    test_case large; /* one batch element, or one row, of which test_large.c takes as many as it needs */
    /* Random sizes up to about `most`, flags and absent tensors. */
    void (*draw)(test_random *r, int64_t most, test_case *c);
    /* NULL, or: how inputs are drawn that are not as others of their name; the n-th of the regimes of decays. */
    void (*set_fill)(const test_case *c, const gt_tensor *t, test_fill *f, test_map *map);
    void (*set_regime)(test_case *c, int n);
    /* NULL, or: moves what was drawn from where no result is sure. */
    void (*settle)(const test_case *c, test_values *in);
    test_tolerance kernels; /* what the kernels may lose */
    /* NULL, or: fp32 outputs that are sums of a few numbers of the call's dtype, by name: they may lose what activations
     * may. */
    const char *sums_of_few;
    /* NULL, or: the magnitudes of what an output is summed of, by numbers that were rounded before (one that the double
     * twin does not make); of other outputs NULL.  Where they cancel, a channel may be small beside them. */
    double *(*terms)(const test_case *c, gt_pass pass, const gt_tensor *t);
    const test_formula *formulas; /* of every output of forward */
    /* What must hold of this operator alone; NULL or a list that ends with what NULL. */
    const test_property *properties;
    /* By dtype: what the time cut in two may change in the twins.  0: nothing. */
    double split_tolerance[4];
    /* NULL, or: further times for the sizes, ending with -1, and kernels that must have been launched then, with NULL. */
    const int64_t *more_times;
    const char *const *launched;
    /* NULL, or: cases whose forward pass launches the kernels that name them, template arguments and all.  Emulated. */
    const test_case *launching;
    /* Tokens of the chunk that a NaN or infinity may spoil in the kernels, in forward and in backward, as gt_kernels.h
     * states under NON-FINITE NUMBERS.  0: no more than in the twin.  wkv_ssm: the larger one of its two operators'. */
    int64_t reach[2];
    const test_case *spoilt; /* NULL, or sizes without time, for which kernels spoil all of that chunk */
    int bounds_pairs;        /* some infinity comes out as a large number, as stated there */
    size_t handle;           /* of the field for a handle of cuBLASLt; 0: there is none */
    size_t reads_y;          /* of the field that says that backward finds forward's y; 0: there is none */

    /* Rows of the bench: of the CPU twins, as the trainer calls them, a small batch; and of a GPU, the same at the
     * trainer's own batch and the sizes of larger models.  The lists end with op NULL, tensors NULL, letters NULL. */
    const test_bench_row *host_rows, *gpu_rows;
    const test_bench_draw *bench_draws; /* inputs as a model has them; others are normal(0, 1).  May be NULL */
    const test_bench_cut *bench_cuts;   /* NULL: all calls are compared whole */
    /* Operations: per product of these sizes, adds and multiplies counted apart.  For the recurrences those that a
     * token's own formulas have: a faster form may do more.  letters NULL: no products to speak of. */
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
/* What an absent optional input stands for: 0 or 1; NaN if it stands for no constant. */
double test_constant(const char *tensor);

/* ---- case and table look-ups ----------------------------------------------------------------- */

int test_is_word_of(const char *list, const char *word); /* words between spaces */
const gt_op *test_table(const test_case *c);
int test_has_pass(const test_case *c, gt_pass pass);
int test_find(const gt_op *op, const char *tensor); /* index in the table, -1 = none */
/* "y" of "wkv6.y", a field of a struct within the argument struct: whatever goes by a tensor's name goes by this one. */
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
int test_takes_packed(const test_op *op); /* whether the operator takes packed sequences */
int test_is_packed(const test_case *c);
/* Which of the tensor's indices `letter` is, -1 = none; 'B' is that of the states, too, and in a
 * packed case of the states alone. */
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
/* What a call of the pass needs, of the answer to a query. */
size_t test_workspace_of(const gt_workspace *need, gt_pass pass);

/* ---- values ---------------------------------------------------------------------------------- */

uint64_t test_next(test_random *r);
double test_uniform(test_random *r); /* in [0,1) */
double test_normal(test_random *r);

double test_round(double value, gt_dtype dtype);

/* The case's seed plus that of the environment variable GT_TEST_SEED. */
uint64_t test_seed(const test_case *c);

/* All that `pass` reads: its inputs, and what accumulating and in-place outputs hold before.  Of a
 * packed case, what belongs to no sequence is 0 in *in; in memory test_run makes it NaN. */
void test_inputs(const test_case *c, gt_pass pass, test_values *in);
/* The number of sequences of a packed case, and where sequence s starts. */
int64_t test_sequences(const test_case *c, const test_values *in);
int64_t test_sequence_at(const test_case *c, const test_values *in, int64_t s);
double *test_array(int64_t count, double value);
void test_copy(const test_case *c, gt_pass pass, const test_values *from, test_values *to);
void test_free(test_values *v);
/* By a tensor's name; test_set_array frees the array that it replaces by another, which may be NULL. */
const gt_tensor *test_tensor_of(const test_case *c, const char *name);
double **test_array_of(test_values *v, const test_case *c, const char *tensor);
void test_set_array(test_values *v, const test_case *c, const char *tensor, double *array);

/* Positions at, at+1, ... at+n-1 along the index `letter`; tensors without it are copied. */
void test_cut(const test_case *c, gt_pass pass, const test_values *from, char letter, int64_t at, int64_t n,
              test_values *to);
/* Its reverse, for tensors that have the index; arrays that *to lacks are made. */
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

/* The limit of an activation, or more: of dz that is made of y (reads_y), which was rounded to bf16, too.  Two roundings
 * are 2.35e-3 of the norm where many numbers count.  The square of a number's own relative error varies by 0.45 squares of
 * half a unit around its mean: where n numbers count, five times that over sqrt(n) comes to the square of the limit. */
double test_limit_of(const test_runner *r, const test_op *op, const gt_tensor *t, gt_dtype dtype, const double *truth,
                     int64_t count, double limit);

extern const test_runner test_truth; /* the double twins */
extern const test_runner test_twin;  /* the twins as users have them */

/* Runs `pass` on `in` and returns in *out the outputs whose bit (of their place in the table) is in
 * `want`, but for those that the case names absent.  Returns 1 if the pass succeeded and left
 * everything else alone. */
int test_run(const test_runner *r, const test_case *c, gt_pass pass, const test_values *in, uint64_t want,
             test_values *out);

/* Points every tensor of *args that lies in from[0..bytes) to the same place of `to`. */
void test_relocate(const gt_op *op, void *args, const char *from, size_t bytes, char *to);

/* ---- judging --------------------------------------------------------------------------------- */

/* The sums of the magnitudes of the terms that make up the parameter gradients, as far as signs go:
 * what the double twin gives for the absolute values of all that does not set the decay. */
void test_magnitudes(const test_case *c, const test_values *in, test_values *magnitudes);
/* Every array of `got` against `truth`: whole, by channel, by row, by element.  magnitudes: NULL if
 * there are no parameter gradients. */
int test_compare(const test_runner *r, const test_case *c, gt_pass pass, const test_values *got,
                 const test_values *truth, const test_values *magnitudes);
/* Every array of `got` against that of `other`: the same bits if tolerance is 0, else in relative
 * l2. */
int test_same(const test_runner *r, const test_case *c, gt_pass pass, const char *what, const test_values *got,
              const test_values *other, double tolerance);

/* Every second row of a tensor is 1e25 times what it was: of norms forward and backward hold the limits, since what they
 * give is finite.  Of f16 there are no such numbers. */
void test_huge_rows_hold(const test_runner *r, const test_case *c, const char *tensor);

/* Counts one check; prints the text if it failed: test_check(ok, format, ...).  A macro, so that a text is only made
 * where it is printed: most texts take longer than what they describe. */
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
