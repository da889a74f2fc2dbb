/* Tests of the trainer's operators, examples/hybrid_ops.h.
 *
 * A case lists its arrays and runs one operator on them; the code here does the rest.  It compares gradients in double
 * with central differences, element by element, and the results in float with those in double.  Before a call, outputs
 * are filled with NaN and surrounded by guard bytes.  Further checks: `accumulate`, and that a second run and other
 * thread counts give the same bits.  This file compiles hybrid_ops.c a second time, in double.
 *
 * With TEST_DEVICE, the same cases run on hy_backend_cuda in all three dtypes, and are compared with double; then whole
 * models run.  The program is linked with the backend of a GPU, or with the emulated one.  Argument "short": one dtype
 * only.  Argument "few": two models in one dtype, and no larger cases in the other dtypes. */
#include "ref64.h"
#define HY_REAL double
#define HY_BACKEND_CPU hy_backend_cpu64
#define HY_TWIN(name) gt_ref64_##name
#include "../examples/hybrid_ops.c"
#include "gt_test.h"
#include "hybrid_check.h"
#include "gpu_present.h"
#include <float.h>

#define check test_check

static int is_few;
static hy_backend *be32, *be64, *device; /* device: the backend hy_backend_cuda, or NULL in the tests on the CPU */

static test_random drawn = {1};

/* ---- cases --------------------------------------------------------------------------------- */

enum { ARRAYS = 16 };

/* The arrays of a case.  use:
 *     'x' float input                     'i' int32 input
 *     'y' output of forward               's' another output of forward, which backward may use
 *     'e' as 's', with an absolute error  'd' gradient of output `of`
 *     'g' gradient of input `of`          'p' gradient of parameter `of`, which accumulates
 */
typedef struct array {
    const char *name;
    char use;
    int of;
    int64_t count;
    /* float: standard deviation.  int32: values are below |spread|, and at least 0, or -1 if spread is negative */
    double spread;
    int is_act; /* ACT: the array has the dtype of activations */
} array;
enum { FP32, ACT };

typedef struct op_case op_case;
struct op_case {
    const char *name;
    gt_status (*run)(hy_backend *be, const op_case *c, void **p, int backward, int accumulate);
    array arrays[ARRAYS]; /* the list ends with name NULL */
    int64_t size[5];
    int flag;
};

/* The memory of one array on a backend.  Guard bytes lie before and after the array, which starts `shift` elements
 * after an aligned address. */
typedef struct block {
    hy_backend *be;
    void *memory, *data;
    size_t before, bytes;
} block;
enum { GUARD = 256 };
static size_t shift;

static block new_block(hy_backend *be, size_t count, size_t element) {
    block b = {be, NULL, NULL, GUARD + shift * element, count * element};
    size_t all = b.before + b.bytes + GUARD;
    unsigned char *guards = malloc(all);
    memset(guards, 0xa5, all);
    if (be->alloc(be, &b.memory, all) != GT_OK || be->upload(be, b.memory, guards, all) != GT_OK) {
        printf("%s\n", hy_last_error());
        exit(1);
    }
    free(guards);
    b.data = (char *)b.memory + b.before;
    return b;
}

static void free_block(block *b) { b->be->release(b->be, b->memory); }

static int is_fenced(const block *b) {
    size_t all = b->before + b->bytes + GUARD;
    unsigned char *bytes = malloc(all);
    int ok = b->be->download(b->be, bytes, b->memory, all) == GT_OK;
    for (size_t i = 0; i < all; i++)
        if (i < b->before || i >= b->before + b->bytes) ok &= bytes[i] == 0xa5;
    free(bytes);
    return ok;
}

/* Copies `n` numbers to new memory of the backend, as fp32. */
static block block_of(hy_backend *be, const double *numbers, int64_t n) {
    block b = new_block(be, (size_t)n, be->fp32_bytes);
    be->write(be, b.data, GT_F32, numbers, n);
    return b;
}
static block block_of_bytes(hy_backend *be, const void *bytes, size_t n) {
    block b = new_block(be, 1, n);
    be->upload(be, b.data, bytes, n);
    return b;
}

static size_t size_of(const hy_backend *be, gt_dtype dtype) { return dtype == GT_F32 ? be->fp32_bytes : 2; }

static int array_count(const op_case *c) {
    int n = 0;
    while (c->arrays[n].name) n++;
    return n;
}

static int is_output(const array *a) { return strchr("ygpse", a->use) != NULL; }

/* Draws all inputs.  float holds their numbers exactly; `dtype` holds those of activations exactly.  Outputs become
 * NaN. */
static void draw(const op_case *c, gt_dtype dtype, double **values, int32_t **ints) {
    for (int i = 0; c->arrays[i].name; i++) {
        const array *a = &c->arrays[i];
        values[i] = malloc((size_t)a->count * sizeof(double) + 1);
        ints[i] = malloc((size_t)a->count * sizeof(int32_t) + 1);
        for (int64_t k = 0; k < a->count; k++) {
            double x = a->spread * test_normal(&drawn);
            values[i][k] = is_output(a) ? NAN : test_round(x, a->is_act ? dtype : GT_F32);
            int least = a->spread < 0 ? -1 : 0, most = (int)fabs(a->spread);
            ints[i][k] = least + (int)(test_uniform(&drawn) * (most - least));
        }
    }
}

static void free_values(double **values, int32_t **ints, int n) {
    for (int i = 0; i < n; i++) {
        free(values[i]);
        free(ints[i]);
    }
}

/* Runs forward, and if asked backward, on one backend.  The results replace the outputs in `values`.  If `before` is
 * not NULL, gradients that accumulate start from it. */
static gt_status run_case(hy_backend *be, const op_case *c, double **values, int32_t **ints, int backward,
                          double **before) {
    int n = array_count(c);
    block blocks[ARRAYS];
    void *pointers[ARRAYS] = {0};
    gt_dtype dtypes[ARRAYS];
    for (int i = 0; i < n; i++) {
        const array *a = &c->arrays[i];
        dtypes[i] = a->is_act ? be->dtype : GT_F32;
        blocks[i] = new_block(be, (size_t)a->count, a->use == 'i' ? sizeof(int32_t) : size_of(be, dtypes[i]));
        pointers[i] = blocks[i].data;
        if (a->use == 'i')
            be->upload(be, pointers[i], ints[i], blocks[i].bytes);
        else
            be->write(be, pointers[i], dtypes[i], before && a->use == 'p' ? before[i] : values[i], a->count);
    }
    gt_status status = c->run(be, c, pointers, 0, 0);
    if (status == GT_OK && backward) status = c->run(be, c, pointers, 1, before != NULL);
    for (int i = 0; i < n; i++) {
        const array *a = &c->arrays[i];
        check(is_fenced(&blocks[i]), "%s %s: %s: wrote outside of the array", be->name, c->name, a->name);
        if (is_output(a)) be->read(be, values[i], pointers[i], dtypes[i], a->count);
        if (a->use == 'x' || a->use == 'd') {
            double *after = malloc((size_t)a->count * sizeof *after + 1);
            be->read(be, after, pointers[i], dtypes[i], a->count);
            check(!memcmp(after, values[i], (size_t)a->count * sizeof *after), "%s: the input %s was changed", c->name,
                  a->name);
            free(after);
        }
        free_block(&blocks[i]);
    }
    return status;
}

/* The loss: the sum of <y, dy> over all outputs. */
static double loss_of(const op_case *c, double **values) {
    double loss = 0;
    for (int i = 0; c->arrays[i].name; i++)
        for (int64_t k = 0; c->arrays[i].use == 'd' && k < c->arrays[i].count; k++)
            loss += values[i][k] * values[c->arrays[i].of][k];
    return loss;
}

/* Returns |a - b| / |b| in l2, or NaN if any number is NaN. */
static double distance(const double *a, const double *b, int64_t n) {
    double d = 0, s = 0;
    for (int64_t i = 0; i < n; i++) {
        d += (a[i] - b[i]) * (a[i] - b[i]);
        s += b[i] * b[i];
    }
    return d == 0 ? 0 : sqrt(d / (s > 0 ? s : 1e-300));
}

static double squares(const double *x, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += x[i] * x[i];
    return sum;
}

static void check_differences(const op_case *c, double **values, int32_t **ints) {
    const double h = 1e-5;
    for (int i = 0; c->arrays[i].name; i++) {
        const array *g = &c->arrays[i];
        if (g->use != 'g' && g->use != 'p') continue;
        double *x = values[g->of], *analytic = malloc((size_t)g->count * sizeof *analytic);
        double *numeric = malloc((size_t)g->count * sizeof *numeric);
        memcpy(analytic, values[i], (size_t)g->count * sizeof *analytic);
        for (int64_t k = 0; k < g->count; k++) {
            double at = x[k], up, down;
            x[k] = at + h;
            run_case(be64, c, values, ints, 0, NULL);
            up = loss_of(c, values);
            x[k] = at - h;
            run_case(be64, c, values, ints, 0, NULL);
            down = loss_of(c, values);
            x[k] = at;
            numeric[k] = (up - down) / (2 * h);
        }
        double error = distance(analytic, numeric, g->count);
        check(error < 1e-6, "%s: %s differs from central differences by %.3g", c->name, g->name, error);
        memcpy(values[i], analytic, (size_t)g->count * sizeof *analytic);
        free(analytic);
        free(numeric);
    }
}

static double **copy_values(const op_case *c, double **values) {
    double **copy = calloc(ARRAYS, sizeof *copy);
    for (int i = 0; c->arrays[i].name; i++) {
        copy[i] = malloc((size_t)c->arrays[i].count * sizeof(double) + 1);
        memcpy(copy[i], values[i], (size_t)c->arrays[i].count * sizeof(double));
    }
    return copy;
}

static void free_copy(double **copy) {
    for (int i = 0; i < ARRAYS; i++) free(copy[i]);
    free(copy);
}

static void compare_outputs(const op_case *c, const char *what, double **got, double **truth, double tolerance) {
    for (int i = 0; c->arrays[i].name; i++) {
        if (!is_output(&c->arrays[i])) continue;
        double error = distance(got[i], truth[i], c->arrays[i].count);
        if (c->arrays[i].use == 'e') error *= sqrt(squares(truth[i], c->arrays[i].count));
        check(error <= tolerance, "%s: %s: %s differs by %.3g (allowed %.3g)", c->name, c->arrays[i].name, what, error,
              tolerance);
    }
}

/* Checks that gradients that accumulate end as their first values plus the gradient. */
static void check_accumulate(const op_case *c, double **values, int32_t **ints) {
    double **before = copy_values(c, values), **after = copy_values(c, values);
    for (int i = 0; c->arrays[i].name; i++)
        for (int64_t k = 0; k < c->arrays[i].count; k++) before[i][k] = test_normal(&drawn);
    check(run_case(be64, c, after, ints, 1, before) == GT_OK, "%s: %s", c->name, hy_last_error());
    for (int i = 0; c->arrays[i].name; i++)
        for (int64_t k = 0; c->arrays[i].use == 'p' && k < c->arrays[i].count; k++) after[i][k] -= before[i][k];
    compare_outputs(c, "accumulated, less what was there,", after, values, 1e-12);
    free_copy(before);
    free_copy(after);
}

static void set_threads(int n) {
#ifdef _OPENMP
    omp_set_num_threads(n);
#else
    (void)n;
#endif
}

/* ---- a case on the device ------------------------------------------------------------------ */

/* Tolerances for activations: for the rounding of results, and of arrays that forward passes to backward. */
static const double act_tolerance[] = {[GT_F32] = 1e-5, [GT_BF16] = 4e-3, [GT_F16] = 6e-4};

static void compare_on_device(const op_case *c, const char *what, double **got, double **truth) {
    for (int i = 0; c->arrays[i].name; i++) {
        const array *a = &c->arrays[i];
        double error, allowed = a->is_act ? act_tolerance[device->dtype] : 1e-5;
        if (!is_output(a)) continue;
        error = distance(got[i], truth[i], a->count);
        if (a->use == 'e') error *= sqrt(squares(truth[i], a->count));
        check(error <= allowed, "%s in %s: %s: %s differs by %.3g (allowed %.3g)", c->name, device->device, a->name,
              what, error, allowed);
    }
}

/* Runs a case on the device with the given inputs, and compares its results with double. */
static void compare_with_device(const op_case *c, double **inputs, int32_t **ints) {
    double **truth = copy_values(c, inputs), **got = copy_values(c, inputs);
    double **again = copy_values(c, inputs), **sum = copy_values(c, inputs);
    double **before = copy_values(c, inputs);
    run_case(be64, c, truth, ints, 1, NULL);
    if (check(run_case(device, c, got, ints, 1, NULL) == GT_OK, "%s: %s", c->name, hy_last_error())) {
        compare_on_device(c, "the result", got, truth);
        run_case(device, c, again, ints, 1, NULL);
        compare_outputs(c, "the second time", again, got, 0);
        shift = 1;
        run_case(device, c, again, ints, 1, NULL);
        shift = 0;
        compare_on_device(c, "the result off its alignment", again, truth);
        for (int i = 0; c->arrays[i].name; i++)
            for (int64_t k = 0; c->arrays[i].use == 'p' && k < c->arrays[i].count; k++) {
                before[i][k] = test_round(test_normal(&drawn), c->arrays[i].is_act ? device->dtype : GT_F32);
                truth[i][k] += before[i][k];
            }
        run_case(device, c, sum, ints, 1, before);
        compare_on_device(c, "the sum", sum, truth);
    }
    free_copy(truth), free_copy(got), free_copy(again), free_copy(sum), free_copy(before);
}

static void test_on_device(const op_case *c) {
    double *values[ARRAYS] = {0};
    int32_t *ints[ARRAYS] = {0};
    drawn.state = 1;
    draw(c, device->dtype, values, ints);
    compare_with_device(c, values, ints);
    free_values(values, ints, array_count(c));
}

static void check_case(const op_case *c, int differences, double tolerance) {
    if (device) {
        test_on_device(c);
        return;
    }
    double *values[ARRAYS] = {0};
    int32_t *ints[ARRAYS] = {0};
    int n = array_count(c);
    drawn.state = 1;
    draw(c, GT_F32, values, ints);
    double **fast = copy_values(c, values), **again = copy_values(c, values);
    if (check(run_case(be64, c, values, ints, 1, NULL) == GT_OK, "%s: %s", c->name, hy_last_error())) {
        if (differences) check_differences(c, values, ints);
        run_case(be64, c, values, ints, 1, NULL);
        check_accumulate(c, values, ints);
        run_case(be32, c, fast, ints, 1, NULL);
        compare_outputs(c, "float against double", fast, values, tolerance);
        set_threads(3);
        run_case(be32, c, again, ints, 1, NULL);
        set_threads(1);
        compare_outputs(c, "with other threads", again, fast, 0);
    }
    free_copy(fast);
    free_copy(again);
    free_values(values, ints, n);
}

/* ---- embedding ----------------------------------------------------------------------------- */

enum { EMBED_TOKEN, EMBED_TABLE, EMBED_Y, EMBED_DY, EMBED_DTABLE };

static gt_status run_embedding(hy_backend *be, const op_case *c, void **p, int backward, int accumulate) {
    hy_embedding_args a = {.dtype = be->dtype,
                           .M = c->size[0],
                           .V = c->size[1],
                           .D = c->size[2],
                           .accumulate = accumulate,
                           .token = p[EMBED_TOKEN],
                           .table = p[EMBED_TABLE],
                           .y = p[EMBED_Y],
                           .dy = p[EMBED_DY],
                           .dtable = p[EMBED_DTABLE]};
    return backward ? be->embedding_backward(be, &a) : be->embedding_forward(be, &a);
}

static void test_embedding(int64_t M, int64_t V, int64_t D, int differences) {
    op_case c = {.name = "embedding",
                 .run = run_embedding,
                 .size = {M, V, D},
                 .arrays = {{"token", 'i', 0, M, (double)V, 0},
                            {"table", 'x', 0, V * D, 1, ACT},
                            {"y", 'y', 0, M * D, 0, ACT},
                            {"dy", 'd', EMBED_Y, M * D, 1, ACT},
                            {"dtable", 'p', EMBED_TABLE, V * D, 0, FP32}}};
    check_case(&c, differences, 1e-6);
}

/* ---- lerp ---------------------------------------------------------------------------------- */

enum { LERP_X, LERP_STATE, LERP_MU, LERP_M, LERP_Y, LERP_DY, LERP_DX, LERP_DMU, LERP_DM, LERP_LAST };
enum { LERP_NO_STATE = 1, LERP_NO_M = 2, LERP_ADD_DX = 4 };

static gt_status run_lerp(hy_backend *be, const op_case *c, void **p, int backward, int accumulate) {
    hy_lerp_args a = {.dtype = be->dtype,
                      .B = c->size[0],
                      .T = c->size[1],
                      .D = c->size[2],
                      .count = c->size[3],
                      .accumulate = accumulate,
                      .x = p[LERP_X],
                      .state_in = p[LERP_STATE],
                      .mu = p[LERP_MU],
                      .m = p[LERP_M],
                      .y = p[LERP_Y],
                      .state_out = p[LERP_LAST],
                      .dy = p[LERP_DY],
                      .dx = p[LERP_DX],
                      .dmu = p[LERP_DMU],
                      .dm = p[LERP_DM]};
    if (c->flag & LERP_NO_STATE) a.state_in = NULL;
    if (c->flag & LERP_NO_M) a.m = NULL, a.dm = NULL;
    if (!backward) return be->lerp_forward(be, &a);
    if (c->flag & LERP_ADD_DX) { /* dx starts from 0 and accumulates in one call; a second call computes dmu alone */
        be->zero(be, p[LERP_DX], (size_t)(a.B * a.T * a.D) * size_of(be, be->dtype));
        a.accumulate_dx = 1;
        a.dmu = NULL;
    }
    gt_status status = be->lerp_backward(be, &a);
    a.dmu = p[LERP_DMU];
    a.dx = NULL;
    return status == GT_OK && (c->flag & LERP_ADD_DX) ? be->lerp_backward(be, &a) : status;
}

static void test_lerp(int64_t B, int64_t T, int64_t D, int64_t count, int flag, int differences) {
    int64_t M = B * T, m = flag & LERP_NO_M ? 0 : count * M * D;
    op_case c = {.name = "lerp",
                 .run = run_lerp,
                 .size = {B, T, D, count},
                 .flag = flag,
                 .arrays = {{"x", 'x', 0, M * D, 1, ACT},
                            {"state_in", 'x', 0, B * D, 1, FP32},
                            {"mu", 'x', 0, count * D, 1, FP32},
                            {"m", 'x', 0, m, 1, ACT},
                            {"y", 'y', 0, count * M * D, 0, ACT},
                            {"dy", 'd', LERP_Y, count * M * D, 1, ACT},
                            {"dx", 'g', LERP_X, M * D, 0, ACT},
                            {"dmu", 'p', LERP_MU, count * D, 0, FP32},
                            {"dm", 'g', LERP_M, m, 0, ACT},
                            {"state_out", 's', 0, B * D, 0, FP32}}};
    check_case(&c, differences, 1e-6);
}

/* ---- map ----------------------------------------------------------------------------------- */

enum { MAP_X, MAP_Y, MAP_DY, MAP_DX };

static gt_status run_map(hy_backend *be, const op_case *c, void **p, int backward, int accumulate) {
    hy_map_args a = {.dtype = be->dtype,
                     .n = c->size[0],
                     .function = (hy_function)c->flag,
                     .accumulate = accumulate,
                     .x = p[MAP_X],
                     .y = p[MAP_Y],
                     .dy = p[MAP_DY],
                     .dx = p[MAP_DX]};
    return backward ? be->map_backward(be, &a) : be->map_forward(be, &a);
}

static void check_map(const char *name, hy_function function, int64_t n, int differences) {
    op_case c = {.name = name,
                 .run = run_map,
                 .size = {n},
                 .flag = (int)function,
                 .arrays = {{"x", 'x', 0, n, 2, ACT},
                            {"y", 'y', 0, n, 0, ACT},
                            {"dy", 'd', MAP_Y, n, 1, ACT},
                            {"dx", 'p', MAP_X, n, 0, ACT}}};
    check_case(&c, differences, 1e-6);
}

/* Forward and backward in place must give the results of separate arrays. */
static void test_map_in_place(hy_function function) {
    enum { N = 37 };
    float x[N], y[N], dy[N], dx[N];
    for (int i = 0; i < N; i++) x[i] = (float)test_normal(&drawn), dy[i] = (float)test_normal(&drawn);
    hy_map_args a = {.n = N, .function = function, .x = x, .y = y, .dy = dy, .dx = dx};
    be32->map_forward(be32, &a);
    be32->map_backward(be32, &a);
    a.dx = dy;
    be32->map_backward(be32, &a);
    check(!memcmp(dx, dy, sizeof dx), "map %d: backward in place differs", (int)function);
    a.y = x;
    be32->map_forward(be32, &a);
    check(!memcmp(x, y, sizeof x), "map %d: forward in place differs", (int)function);
}

/* Checks the relative error of the float functions over their whole range.  Where the true value is smaller than
 * `floor`, the error is relative to `floor`.  GELU needs a floor: near -10, float holds the argument of its sigmoid
 * only to 1e-6. */
static void test_map_accuracy(hy_function function, double range, double floor) {
    double worst = 0, worst_at = 0;
    for (int i = -20000; i <= 20000; i++) {
        float x = (float)(range * i / 20000), y;
        hy_map_args a = {.n = 1, .function = function, .x = &x, .y = &y};
        be32->map_forward(be32, &a);
        double c = 0.7978845608028654 * (x + 0.044715 * x * x * x);
        double truth = function == HY_TANH   ? tanh((double)x)
                       : function == HY_GELU ? x / (1 + exp(-2 * c))
                                             : -exp((double)x);
        double error = fabs(y - truth) / fmax(fabs(truth), floor);
        if (!(error <= worst)) worst = error, worst_at = x;
    }
    check(worst < 1e-6, "map %d: relative error %.3g at %.6g", (int)function, worst, worst_at);
}

/* Computes the function and its derivative at n numbers, in fp32. */
static void apply_map(hy_backend *be, int function, int n, const float *x, float *y, float *dx) {
    size_t bytes = (size_t)n * sizeof(float);
    block in = block_of_bytes(be, x, bytes), out = block_of_bytes(be, x, bytes);
    block slope = block_of_bytes(be, x, bytes);
    for (int i = 0; i < n; i++) dx[i] = 1;
    be->upload(be, slope.data, dx, bytes);
    hy_map_args a = {.n = n,
                     .dtype = GT_F32,
                     .function = (hy_function)function,
                     .x = in.data,
                     .y = out.data,
                     .dy = slope.data,
                     .dx = slope.data};
    check(be->map_forward(be, &a) == GT_OK && be->map_backward(be, &a) == GT_OK, "%s", hy_last_error());
    be->download(be, y, out.data, bytes);
    be->download(be, dx, slope.data, bytes);
    free_block(&in), free_block(&out), free_block(&slope);
}

static void test_map_extremes(hy_backend *be) {
    const float x[] = {0, -0.0f, 1e-30f, -1e-30f, 90, -90, 1e20f, -1e20f, FLT_MAX, -FLT_MAX, INFINITY, NAN};
    enum { N = sizeof x / sizeof x[0] };
    float y[N], dx[N];
    for (int f = HY_TANH; f <= HY_GELU; f++) {
        apply_map(be, f, N, x, y, dx);
        for (int i = 0; i < N - 1; i++) {
            double truth = f == HY_TANH ? tanh((double)x[i]) : x[i] > 0 ? x[i] : 0;
            if (fabsf(x[i]) < 1) truth = f == HY_TANH ? x[i] : 0.5 * x[i];
            double slope = f == HY_TANH ? 1 - truth * truth : x[i] > 0;
            if (fabsf(x[i]) < 1) slope = f == HY_TANH ? 1 : 0.5;
            check(y[i] == truth || fabs(y[i] - truth) <= 1e-6 * fabs(truth) + 1e-36, "map %d: f(%g) = %g, not %g", f,
                  x[i], y[i], truth);
            check(fabs(dx[i] - slope) <= 1e-6, "map %d: f'(%g) = %g, not %g", f, x[i], dx[i], slope);
        }
        check(isnan(y[N - 1]), "map %d: f(NaN) = %g", f, y[N - 1]);
    }
}

/* ---- bias ---------------------------------------------------------------------------------- */

enum { BIAS_X, BIAS_BIAS, BIAS_Y, BIAS_DY, BIAS_DBIAS };

static gt_status run_bias(hy_backend *be, const op_case *c, void **p, int backward, int accumulate) {
    hy_bias_args a = {.dtype = be->dtype,
                      .M = c->size[0],
                      .D = c->size[1],
                      .accumulate = accumulate,
                      .bias = p[BIAS_BIAS],
                      .y = p[BIAS_Y],
                      .dy = p[BIAS_DY],
                      .dbias = p[BIAS_DBIAS]};
    if (backward) return be->bias_backward(be, &a);
    be->copy(be, p[BIAS_Y], p[BIAS_X], (size_t)(a.M * a.D) * size_of(be, be->dtype));
    return be->bias_forward(be, &a);
}

static void test_bias(int64_t M, int64_t D, int differences) {
    op_case c = {.name = "bias",
                 .run = run_bias,
                 .size = {M, D},
                 .arrays = {{"x", 'x', 0, M * D, 1, ACT},
                            {"bias", 'x', 0, D, 1, FP32},
                            {"y", 'y', 0, M * D, 0, ACT},
                            {"dy", 'd', BIAS_Y, M * D, 1, ACT},
                            {"dbias", 'p', BIAS_BIAS, D, 0, FP32}}};
    check_case(&c, differences, 1e-6);
}

/* ---- gate_mix ------------------------------------------------------------------------------ */

enum {
    MIX_A,
    MIX_B,
    MIX_RESIDUAL,
    MIX_WEIGHT,
    MIX_BIAS,
    MIX_Y,
    MIX_DY,
    MIX_DA,
    MIX_DB,
    MIX_DWEIGHT,
    MIX_DBIAS,
    MIX_GATE_OUT
};
enum { MIX_NO_WEIGHT = 1, MIX_NO_RESIDUAL = 2 };

static gt_status run_gate_mix(hy_backend *be, const op_case *c, void **p, int backward, int accumulate) {
    int gated = !(c->flag & MIX_NO_WEIGHT);
    hy_gate_mix_args a = {.dtype = be->dtype,
                          .M = c->size[0],
                          .D = c->size[1],
                          .accumulate = accumulate,
                          .a = p[MIX_A],
                          .b = p[MIX_B],
                          .weight = gated ? p[MIX_WEIGHT] : NULL,
                          .residual = c->flag & MIX_NO_RESIDUAL ? NULL : p[MIX_RESIDUAL],
                          .bias = p[MIX_BIAS],
                          .y = p[MIX_Y],
                          .gate = p[MIX_GATE_OUT],
                          .dy = p[MIX_DY],
                          .da = p[MIX_DA],
                          .db = p[MIX_DB],
                          .dweight = gated ? p[MIX_DWEIGHT] : NULL,
                          .dbias = p[MIX_DBIAS]};
    return backward ? be->gate_mix_backward(be, &a) : be->gate_mix_forward(be, &a);
}

static void test_gate_mix(int64_t M, int64_t D, int flag, int differences) {
    int64_t weights = flag & MIX_NO_WEIGHT ? 0 : 2 * D;
    op_case c = {.name = "gate_mix",
                 .run = run_gate_mix,
                 .size = {M, D},
                 .flag = flag,
                 .arrays = {{"a", 'x', 0, M * D, 1, ACT},
                            {"b", 'x', 0, M * D, 1, ACT},
                            {"residual", 'x', 0, M * D, 1, ACT},
                            {"weight", 'x', 0, weights, 0.3, FP32},
                            {"bias", 'x', 0, 1, 1, FP32},
                            {"y", 'y', 0, M * D, 0, ACT},
                            {"dy", 'd', MIX_Y, M * D, 1, ACT},
                            {"da", 'g', MIX_A, M * D, 0, ACT},
                            {"db", 'g', MIX_B, M * D, 0, ACT},
                            {"dweight", 'p', MIX_WEIGHT, weights, 0, FP32},
                            {"dbias", 'p', MIX_BIAS, 1, 0, FP32},
                            {"gate", 's', 0, M, 0, FP32}}};
    check_case(&c, differences, 1e-5);
}

/* ---- cross_entropy ------------------------------------------------------------------------- */

enum { CE_TARGET, CE_LOGITS, CE_SCALE, CE_TOTAL, CE_DTOTAL, CE_DLOGITS, CE_LSE, CE_LOSS, CE_ENTROPY };

/* The loss of the difference quotients is <total, dtotal>.  With dtotal = {scale / number of counted rows, 0, 0} it is
 * the scaled mean loss. */
static gt_status run_cross_entropy(hy_backend *be, const op_case *c, void **p, int backward, int accumulate) {
    hy_cross_entropy_args a = {.dtype = be->dtype,
                               .M = c->size[0],
                               .V = c->size[1],
                               .target = p[CE_TARGET],
                               .logits = p[CE_DLOGITS],
                               .lse = p[CE_LSE],
                               .loss = p[CE_LOSS],
                               .entropy = p[CE_ENTROPY],
                               .total = p[CE_TOTAL],
                               .scale = p[CE_SCALE]};
    (void)accumulate;
    if (backward) return be->cross_entropy_backward(be, &a);
    be->copy(be, p[CE_DLOGITS], p[CE_LOGITS], (size_t)(a.M * a.V) * size_of(be, be->dtype));
    return be->cross_entropy_forward(be, &a);
}

static void test_cross_entropy(int64_t M, int64_t V, double spread) {
    op_case c = {.name = "cross_entropy",
                 .run = run_cross_entropy,
                 .size = {M, V},
                 .arrays = {{"target", 'i', 0, M, -(double)V, 0},
                            {"logits", 'x', 0, M * V, spread, ACT},
                            {"scale", 'x', 0, 1, 1, FP32},
                            {"total", 'y', 0, 3, 0, FP32},
                            {"dtotal", 'd', CE_TOTAL, 3, 1, FP32},
                            {"dlogits", 'g', CE_LOGITS, M * V, 0, ACT},
                            {"lse", 's', 0, M, 0, FP32},
                            {"loss", 's', 0, M, 0, FP32},
                            {"entropy", 'e', 0, M, 0, FP32}}};
    double *values[ARRAYS] = {0};
    int32_t *ints[ARRAYS] = {0};
    int counted = 0;
    drawn.state = 1;
    draw(&c, device ? device->dtype : GT_F32, values, ints);
    ints[CE_TARGET][0] = (int32_t)V - 1;
    for (int64_t m = 0; m < M; m++) counted += ints[CE_TARGET][m] >= 0;
    values[CE_SCALE][0] = 2 * counted; /* so that dtotal[0] = scale / counted is exact in float */
    values[CE_DTOTAL][0] = 2;
    values[CE_DTOTAL][1] = values[CE_DTOTAL][2] = 0;
    if (device) {
        compare_with_device(&c, values, ints);
        free_values(values, ints, array_count(&c));
        return;
    }
    double **fast = copy_values(&c, values);
    if (check(run_case(be64, &c, values, ints, 1, NULL) == GT_OK, "%s", hy_last_error())) {
        check(values[CE_TOTAL][1] == counted, "cross_entropy: %g rows counted, not %d", values[CE_TOTAL][1], counted);
        double loss = 0, entropy = 0;
        for (int64_t m = 0; m < M; m++) {
            const double *z = values[CE_LOGITS] + m * V;
            double sum = 0, most = z[0];
            for (int64_t v = 1; v < V; v++) most = fmax(most, z[v]);
            for (int64_t v = 0; v < V; v++) sum += exp(z[v] - most);
            if (ints[CE_TARGET][m] < 0) continue;
            loss -= z[ints[CE_TARGET][m]] - most - log(sum);
            for (int64_t v = 0; v < V; v++) {
                double p = exp(z[v] - most) / sum;
                if (p > 0) entropy -= p * log(p);
            }
        }
        check(fabs(values[CE_TOTAL][0] - loss) <= 1e-12 * fabs(loss),
              "cross_entropy: loss %.15g, "
              "not %.15g",
              values[CE_TOTAL][0], loss);
        check(fabs(values[CE_TOTAL][2] - entropy) <= 1e-9 * (1 + entropy),
              "cross_entropy: entropy "
              "%.15g, not %.15g",
              values[CE_TOTAL][2], entropy);
        check_differences(&c, values, ints);
        run_case(be64, &c, values, ints, 1, NULL);
        run_case(be32, &c, fast, ints, 1, NULL);
        compare_outputs(&c, "float against double", fast, values, 1e-5);
    }
    free_copy(fast);
    free_values(values, ints, array_count(&c));
}

/* Tests logits that are far apart, and a call in which no row has a target. */
static void test_cross_entropy_extremes(hy_backend *be) {
    const int32_t target[] = {0, 1, 2}, nothing[] = {-1, -1, -1};
    const float logits[] = {1e4f, 0, -1e4f, -3e38f, 3e38f, 0, 80, 80, -3e38f};
    float z[9], out[4][3];
    block targets = block_of_bytes(be, target, sizeof target);
    block values = block_of_bytes(be, logits, sizeof logits), rows[4];
    for (int i = 0; i < 4; i++) rows[i] = block_of_bytes(be, out[i], sizeof out[i]);
    hy_cross_entropy_args a = {.M = 3,
                               .V = 3,
                               .dtype = GT_F32,
                               .target = targets.data,
                               .logits = values.data,
                               .lse = rows[0].data,
                               .loss = rows[1].data,
                               .entropy = rows[2].data,
                               .total = rows[3].data};
    for (int counted = 1; counted >= 0; counted--) {
        be->upload(be, targets.data, counted ? target : nothing, sizeof target);
        be->upload(be, values.data, logits, sizeof logits);
        check(be->cross_entropy_forward(be, &a) == GT_OK && be->cross_entropy_backward(be, &a) == GT_OK, "%s",
              hy_last_error());
        for (int i = 0; i < 4; i++) be->download(be, out[i], rows[i].data, sizeof out[i]);
        be->download(be, z, values.data, sizeof z);
        const float *loss = out[1], *entropy = out[2], *total = out[3];
        check(!counted || (loss[0] == 0 && loss[1] == 0 && loss[2] > 1e38f && isfinite(loss[2])),
              "cross_entropy: losses %g %g %g: must be 0, 0 and more than 1e38", loss[0], loss[1], loss[2]);
        check(!counted ||
                  (fabsf(entropy[0]) < 1e-6f && fabsf(entropy[1]) < 1e-6f && fabsf(entropy[2] - 0.6931472f) < 1e-6f),
              "cross_entropy: entropies %g %g %g: must be 0, 0 and ln 2", entropy[0], entropy[1], entropy[2]);
        check(counted || (total[0] == 0 && total[1] == 0), "cross_entropy: loss %g of %g rows: both must be 0",
              total[0], total[1]);
        for (int i = 0; i < 9; i++)
            check(counted ? isfinite(z[i]) : z[i] == 0,
                  "cross_entropy: gradient %d is %g: must be 0 in rows that do not count, else finite", i, z[i]);
    }
    free_block(&targets), free_block(&values);
    for (int i = 0; i < 4; i++) free_block(&rows[i]);
}

/* ---- gemm ---------------------------------------------------------------------------------- */

static void naive_gemm(const hy_gemm_args *g, const double *a, const double *b, double *c) {
    for (int64_t i = 0; i < g->M; i++)
        for (int64_t j = 0; j < g->N; j++) {
            double sum = 0;
            for (int64_t k = 0; k < g->K; k++)
                sum += (g->trans_a ? a[k * g->lda + i] : a[i * g->lda + k]) *
                       (g->trans_b ? b[j * g->ldb + k] : b[k * g->ldb + j]);
            double *to = c + i * g->ldc + j;
            *to = (double)g->alpha * sum + (g->beta == 0 ? 0 : (double)g->beta * *to);
        }
}

static double *random_numbers(int64_t n) {
    double *x = malloc((size_t)n * sizeof *x + 1);
    for (int64_t i = 0; i < n; i++) x[i] = (float)test_normal(&drawn);
    return x;
}

/* Compares one product on one backend with the naive product.  The call must not write to gaps between rows. */
static void test_gemm(hy_backend *be, hy_gemm_args g, double tolerance) {
    int64_t count = g.count ? g.count : 1;
    int64_t a_size = (g.trans_a ? g.K : g.M) * g.lda, b_size = (g.trans_b ? g.N : g.K) * g.ldb;
    int64_t c_size = g.M * g.ldc;
    g.a_step = a_size + 3, g.b_step = b_size + 5, g.c_step = c_size + 7;
    int64_t sizes[3] = {count * g.a_step, count * g.b_step, count * g.c_step};
    gt_dtype c_dtype = g.c_dtype ? g.c_dtype : be->dtype;
    gt_dtype dtypes[3] = {be->dtype, be->dtype, c_dtype};
    double *numbers[3], *truth = malloc((size_t)sizes[2] * sizeof *truth);
    block blocks[3];
    g.dtype = be->dtype;
    for (int i = 0; i < 3; i++) {
        numbers[i] = random_numbers(sizes[i]);
        for (int64_t k = 0; k < sizes[i]; k++) numbers[i][k] = test_round(numbers[i][k], dtypes[i]);
    }
    if (g.beta == 0)
        for (int64_t p = 0; p < count; p++)
            for (int64_t i = 0; i < g.M; i++)
                for (int64_t j = 0; j < g.N; j++) numbers[2][p * g.c_step + i * g.ldc + j] = NAN;
    memcpy(truth, numbers[2], (size_t)sizes[2] * sizeof *truth);
    for (int64_t p = 0; p < count; p++)
        naive_gemm(&g, numbers[0] + p * g.a_step, numbers[1] + p * g.b_step, truth + p * g.c_step);
    for (int i = 0; i < 3; i++) {
        blocks[i] = new_block(be, (size_t)sizes[i], size_of(be, dtypes[i]));
        be->write(be, blocks[i].data, dtypes[i], numbers[i], sizes[i]);
    }
    g.a = blocks[0].data, g.b = blocks[1].data, g.c = blocks[2].data;
    gt_status status = be->gemm(be, &g);
    if (status != GT_OK) printf("%s\n", hy_last_error());
    be->read(be, numbers[2], g.c, c_dtype, sizes[2]);
    double error = distance(numbers[2], truth, sizes[2]);
    check(status == GT_OK && error <= tolerance && is_fenced(&blocks[2]),
          "gemm %s dtype %d, %s%s %lldx%lldx%lld beta %g count %lld: error %.3g (allowed %.3g)",
          be == be64 ? "double" : be->name, (int)be->dtype, g.trans_a ? "T" : "N", g.trans_b ? "T" : "N",
          (long long)g.M, (long long)g.N, (long long)g.K, g.beta, (long long)count, error, tolerance);
    for (int i = 0; i < 3; i++) {
        free_block(&blocks[i]);
        free(numbers[i]);
    }
    free(truth);
}

static void test_gemms(void) {
    static const int sizes[][3] = {{1, 1, 1},     {3, 5, 7},      {4, 16, 8},     {1, 33, 65},  {17, 1, 9},
                                   {65, 129, 33}, {64, 128, 256}, {67, 131, 259}, {5, 19, 515}, {130, 15, 3},
                                   {0, 4, 4},     {4, 0, 4},      {6, 17, 0}};
    static const float betas[] = {0, 1, -0.5f};
    for (unsigned s = 0; s < sizeof sizes / sizeof sizes[0]; s++)
        for (int trans = 0; trans < 4; trans++)
            for (int b = 0; b < 3; b++) {
                hy_gemm_args g = {.M = sizes[s][0],
                                  .N = sizes[s][1],
                                  .K = sizes[s][2],
                                  .trans_a = trans & 1,
                                  .trans_b = trans >> 1,
                                  .alpha = b ? 1 : 0.7f,
                                  .beta = betas[b]};
                int gap = trans == 3 ? 0 : trans == 0 ? 8 : 3;
                g.lda = (g.trans_a ? g.M : g.K) + gap;
                g.ldb = (g.trans_b ? g.K : g.N) + gap;
                g.ldc = g.N + gap;
                g.count = s % 3;
                if (device) {
                    test_gemm(device, g, act_tolerance[device->dtype]);
                    /* the sums of products of 16-bit numbers stay in fp32, so their errors are small */
                    g.c_dtype = GT_F32;
                    test_gemm(device, g, 1e-5);
                } else {
                    test_gemm(be32, g, 2e-6);
                    test_gemm(be64, g, 1e-14);
                }
            }
}

/* A leading dimension of 0 means a packed matrix.  The number of threads must not change a bit of the result. */
static void test_gemm_defaults(void) {
    enum { M = 70, N = 150, K = 300 };
    double *numbers = random_numbers(M * K + K * N);
    float *a = malloc(sizeof(float) * (M * K + K * N + 3 * M * N)), *b = a + M * K, *c = b + K * N;
    for (int i = 0; i < M * K + K * N; i++) a[i] = (float)numbers[i];
    hy_gemm_args g = {.M = M, .N = N, .K = K, .alpha = 1, .a = a, .b = b, .c = c};
    be32->gemm(be32, &g);
    g.c = c + M * N, g.lda = K, g.ldb = N, g.ldc = N;
    be32->gemm(be32, &g);
    check(!memcmp(c, c + M * N, sizeof(float) * M * N), "gemm: packed strides differ from 0");
    set_threads(3);
    g.c = c + 2 * M * N;
    be32->gemm(be32, &g);
    set_threads(1);
    check(!memcmp(c, c + 2 * M * N, sizeof(float) * M * N), "gemm: threads change the result");
    free(a);
    free(numbers);
}

/* ---- rmsnorm_linear: the CPU backend has its own code, compared with the twin -------------- */

enum { RL_X, RL_WEIGHT, RL_GAMMA, RL_BETA, RL_Y, RL_DY, RL_DX, RL_DWEIGHT, RL_DGAMMA, RL_DBETA };

static gt_status run_rmsnorm_linear(hy_backend *be, const op_case *c, void **p, int backward, int accumulate) {
    int layer = c->flag == GT_NORM_LAYER;
    gt_rmsnorm_linear_args a = {.M = c->size[0],
                                .D = c->size[1],
                                .O = c->size[2],
                                .norm = (gt_norm)c->flag,
                                .accumulate = accumulate,
                                .x = p[RL_X],
                                .weight = p[RL_WEIGHT],
                                .gamma = p[RL_GAMMA],
                                .beta = layer ? p[RL_BETA] : NULL,
                                .y = p[RL_Y],
                                .dy = p[RL_DY],
                                .dx = p[RL_DX],
                                .dweight = p[RL_DWEIGHT],
                                .dgamma = p[RL_DGAMMA],
                                .dbeta = layer ? p[RL_DBETA] : NULL};
    gt_workspace need;
    if (c->size[3]) /* computes the case by the double twin */
        return backward ? gt_ref64_rmsnorm_linear_backward(&a) : gt_ref64_rmsnorm_linear_forward(&a);
    be->rmsnorm_linear_workspace(be, &a, &need);
    a.workspace_bytes = backward ? need.backward : need.forward;
    a.workspace = malloc(a.workspace_bytes);
    gt_status status = backward ? be->rmsnorm_linear_backward(be, &a) : be->rmsnorm_linear_forward(be, &a);
    free(a.workspace);
    return status;
}

static void test_rmsnorm_linear(int64_t M, int64_t D, int64_t O, gt_norm norm, int differences) {
    int64_t betas = norm == GT_NORM_LAYER ? D : 0;
    op_case c = {.name = "rmsnorm_linear",
                 .run = run_rmsnorm_linear,
                 .size = {M, D, O},
                 .flag = (int)norm,
                 .arrays = {{"x", 'x', 0, M * D, 1, FP32},
                            {"weight", 'x', 0, O * D, 1, FP32},
                            {"gamma", 'x', 0, D, 1, FP32},
                            {"beta", 'x', 0, betas, 1, FP32},
                            {"y", 'y', 0, M * O, 0, FP32},
                            {"dy", 'd', RL_Y, M * O, 1, FP32},
                            {"dx", 'g', RL_X, M * D, 0, FP32},
                            {"dweight", 'p', RL_WEIGHT, O * D, 0, FP32},
                            {"dgamma", 'p', RL_GAMMA, D, 0, FP32},
                            {"dbeta", 'p', RL_BETA, betas, 0, FP32}}};
    check_case(&c, differences, 1e-5);
    op_case twin = c;
    twin.size[3] = 1;
    double *values[ARRAYS] = {0};
    int32_t *ints[ARRAYS] = {0};
    draw(&c, GT_F32, values, ints);
    double **truth = copy_values(&c, values);
    run_case(be64, &c, values, ints, 1, NULL);
    run_case(be64, &twin, truth, ints, 1, NULL);
    compare_outputs(&c, "against the twin", values, truth, 1e-12);
    free_copy(truth);
    free_values(values, ints, array_count(&c));
}

/* ---- rmsnorm_linear: its step as a product without a norm ---------------------------------------
 * Models decode from int8 weights this way. */

static void test_int8_linear(hy_backend *be, int64_t M, int64_t D, int64_t O, double spread) {
    const int64_t columns = D + 8; /* row stride of x; its rows begin at a multiple of 16 bytes */
    double *x = malloc((size_t)(M * columns) * sizeof *x), *scale = malloc((size_t)O * sizeof *scale);
    double *y = malloc((size_t)(M * O) * sizeof *y), *truth = malloc((size_t)(M * O) * sizeof *truth);
    double *gamma = malloc((size_t)D * sizeof *gamma);
    int8_t *q = malloc((size_t)(O * D));
    drawn.state = 5;
    for (int64_t i = 0; i < M * columns; i++) x[i] = test_round(spread * test_normal(&drawn), be->dtype);
    for (int64_t i = 0; i < O * D; i++) q[i] = (int8_t)(floor(255 * test_uniform(&drawn)) - 127);
    for (int64_t o = 0; o < O; o++) scale[o] = test_round(0.01 * (0.5 + test_uniform(&drawn)), GT_F32);
    for (int64_t d = 0; d < D; d++) gamma[d] = HY_PLAIN_GAMMA;
    for (int64_t i = 0; i < M * O; i++) {
        truth[i] = 0;
        for (int64_t d = 0; d < D; d++) truth[i] += scale[i % O] * q[i % O * D + d] * x[i / O * columns + d];
    }
    block of_x = new_block(be, (size_t)(M * columns), size_of(be, be->dtype)), of_scale = block_of(be, scale, O);
    block of_y = new_block(be, (size_t)(M * O), size_of(be, be->dtype)), of_gamma = block_of(be, gamma, D);
    block of_q = block_of_bytes(be, q, (size_t)(O * D));
    be->write(be, of_x.data, be->dtype, x, M * columns);
    const gt_rmsnorm_linear_args a = {.M = M,
                                      .D = D,
                                      .O = O,
                                      .dtype = be->dtype,
                                      .eps = HY_PLAIN_EPS,
                                      .x = of_x.data,
                                      .x_stride = columns,
                                      .gamma = of_gamma.data,
                                      .y = of_y.data,
                                      .weight_int8 = of_q.data,
                                      .weight_scale = of_scale.data};
    const gt_status status = be->rmsnorm_linear_step(be, &a);
    if (check(status == GT_OK, "%s: a step without a norm: %s", be->device, hy_last_error())) {
        be->read(be, y, of_y.data, be->dtype, M * O);
        const double error = distance(y, truth, M * O), allowed = act_tolerance[be->dtype];
        check(error <= allowed, "%s: a step without a norm, M %d, D %d, O %d, spread %g: error %.3g (allowed %.3g)",
              be->device, (int)M, (int)D, (int)O, spread, error, allowed);
        check(is_fenced(&of_y), "%s: a step without a norm wrote outside of y", be->device);
    }
    free_block(&of_x), free_block(&of_scale), free_block(&of_y), free_block(&of_gamma), free_block(&of_q);
    free(x), free(scale), free(y), free(truth), free(gamma), free(q);
}

static void test_int8_linears(hy_backend *be) {
    test_int8_linear(be, 1, 64, 48, 1);
    test_int8_linear(be, 3, 256, 20, be->dtype == GT_F16 ? 10 : 1e4); /* y must not overflow */
    test_int8_linear(be, 9, 40, 33, 1);                               /* D is no multiple of 16 */
    if (be->dtype != GT_F16) test_int8_linear(be, 2, 64, 48, 1e-6);
    if (!is_few) test_int8_linear(be, 64, 96, 130, 1);
}

/* ---- gradient norm and AdamW --------------------------------------------------------------- */

enum { PARAMS = 300, SEGMENTS = 4 };

typedef struct optimizer_test {
    int64_t start[SEGMENTS + 1];
    int32_t group[SEGMENTS];
    double decay[SEGMENTS], control[HY_CONTROLS];
    double grad[PARAMS], w[PARAMS], m[PARAMS], v[PARAMS], norm[HY_GROUPS + 1];
} optimizer_test;

static optimizer_test new_optimizer_test(void) {
    optimizer_test t = {.start = {0, 7, 150, 151, PARAMS}, .group = {0, 3, 3, 5}, .decay = {0, 1, 0, 1}};
    const double control[HY_CONTROLS] = {
        [HY_LR] = 0.01,       [HY_BETA1] = 0.9,        [HY_BETA2] = 0.95, [HY_EPS] = 1e-8,    [HY_CORRECTION1] = 2,
        [HY_CORRECTION2] = 3, [HY_WEIGHT_DECAY] = 0.1, [HY_MAX_NORM] = 1, [HY_LOSS_SCALE] = 4};
    for (int i = 0; i < HY_CONTROLS; i++) t.control[i] = (float)control[i];
    for (int i = 0; i < PARAMS; i++) {
        t.grad[i] = (float)test_normal(&drawn), t.w[i] = (float)test_normal(&drawn);
        t.m[i] = (float)test_normal(&drawn), t.v[i] = (float)fabs(test_normal(&drawn));
    }
    return t;
}

/* AdamW by the formulas of the papers, number by number. */
static void plain_step(optimizer_test *t) {
    const double *c = t->control;
    double sum[HY_GROUPS] = {0}, all = 0;
    for (int s = 0; s < SEGMENTS; s++)
        for (int64_t i = t->start[s]; i < t->start[s + 1]; i++) sum[t->group[s]] += t->grad[i] * t->grad[i];
    for (int g = 0; g < HY_GROUPS; g++) {
        t->norm[g] = sqrt(sum[g]) / c[HY_LOSS_SCALE];
        all += sum[g];
    }
    t->norm[HY_GROUPS] = sqrt(all) / c[HY_LOSS_SCALE];
    if (!isfinite(t->norm[HY_GROUPS])) return;
    double clip = c[HY_MAX_NORM] > 0 ? fmin(1, c[HY_MAX_NORM] / t->norm[HY_GROUPS]) : 1;
    for (int s = 0; s < SEGMENTS; s++)
        for (int64_t i = t->start[s]; i < t->start[s + 1]; i++) {
            double g = t->grad[i] / c[HY_LOSS_SCALE] * clip;
            t->m[i] = c[HY_BETA1] * t->m[i] + (1 - c[HY_BETA1]) * g;
            t->v[i] = c[HY_BETA2] * t->v[i] + (1 - c[HY_BETA2]) * g * g;
            double step = t->m[i] * c[HY_CORRECTION1] / (sqrt(t->v[i] * c[HY_CORRECTION2]) + c[HY_EPS]);
            t->w[i] -= c[HY_LR] * (step + c[HY_WEIGHT_DECAY] * t->decay[s] * t->w[i]);
        }
}

static void backend_step(hy_backend *be, optimizer_test *t) {
    enum { GRAD, W, M, V, DECAY, CONTROL, NORM, START, GROUP, PARTIAL, COPY, BLOCKS };
    double nothing[PARAMS] = {0}, copy[PARAMS];
    block b[BLOCKS] = {[GRAD] = block_of(be, t->grad, PARAMS),
                       [W] = block_of(be, t->w, PARAMS),
                       [M] = block_of(be, t->m, PARAMS),
                       [V] = block_of(be, t->v, PARAMS),
                       [DECAY] = block_of(be, t->decay, SEGMENTS),
                       [CONTROL] = block_of(be, t->control, HY_CONTROLS),
                       [NORM] = block_of(be, nothing, HY_GROUPS + 1),
                       [START] = block_of_bytes(be, t->start, sizeof t->start),
                       [GROUP] = block_of_bytes(be, t->group, sizeof t->group),
                       [PARTIAL] = block_of_bytes(be, nothing, SEGMENTS * sizeof(double)),
                       [COPY] = block_of(be, t->w, PARAMS)};
    int copies = be->dtype != GT_F32;
    hy_segments segments = {SEGMENTS, b[START].data, b[GROUP].data, b[DECAY].data};
    hy_grad_norm_args n = {.segments = segments,
                           .grad = b[GRAD].data,
                           .control = b[CONTROL].data,
                           .partial = b[PARTIAL].data,
                           .norm = b[NORM].data};
    hy_adamw_args a = {.segments = segments,
                       .control = n.control,
                       .norm = n.norm,
                       .grad = n.grad,
                       .w = b[W].data,
                       .m = b[M].data,
                       .v = b[V].data,
                       .copy_dtype = be->dtype,
                       .copy = copies ? b[COPY].data : NULL};
    check(be->grad_norm(be, &n) == GT_OK && be->adamw(be, &a) == GT_OK, "adamw: %s", hy_last_error());
    be->read(be, t->w, a.w, GT_F32, PARAMS);
    be->read(be, t->m, a.m, GT_F32, PARAMS);
    be->read(be, t->v, a.v, GT_F32, PARAMS);
    be->read(be, t->norm, n.norm, GT_F32, HY_GROUPS + 1);
    if (copies) be->read(be, copy, a.copy, be->dtype, PARAMS);
    for (int i = 0; copies && isfinite(t->norm[HY_GROUPS]) && i < PARAMS; i++)
        check(copy[i] == test_round(t->w[i], be->dtype), "adamw: the copy of %.9g is %.9g", t->w[i], copy[i]);
    for (int i = 0; i < BLOCKS; i++) {
        check(is_fenced(&b[i]), "adamw: wrote outside of array %d", i);
        free_block(&b[i]);
    }
}

static void compare_optimizers(const char *what, const optimizer_test *got, const optimizer_test *truth,
                               double tolerance) {
    check(distance(got->w, truth->w, PARAMS) <= tolerance, "adamw %s: w differs by %.3g", what,
          distance(got->w, truth->w, PARAMS));
    check(distance(got->m, truth->m, PARAMS) <= tolerance, "adamw %s: m differs", what);
    check(distance(got->v, truth->v, PARAMS) <= tolerance, "adamw %s: v differs", what);
    for (int g = 0; g <= HY_GROUPS; g++)
        check(fabs(got->norm[g] - truth->norm[g]) <= tolerance * truth->norm[g],
              "grad_norm %s: group %d: %.9g, not %.9g", what, g, got->norm[g], truth->norm[g]);
}

static void test_optimizer(void) {
    optimizer_test start = new_optimizer_test(), truth, got;
    hy_backend *fp32 = device ? device : be32;
    static const double limits[] = {0, 1, 1000}; /* no clipping; a limit that clips; a limit that is never reached */
    for (int i = 0; i < 3; i++) {
        start.control[HY_MAX_NORM] = limits[i];
        truth = got = start;
        plain_step(&truth);
        backend_step(be64, &got);
        compare_optimizers("double", &got, &truth, 1e-13);
        got = start;
        backend_step(fp32, &got);
        compare_optimizers("float", &got, &truth, 1e-6);
    }
    start.grad[200] = INFINITY;
    got = start;
    backend_step(fp32, &got);
    check(!memcmp(got.w, start.w, sizeof got.w) && !memcmp(got.m, start.m, sizeof got.m) &&
              !isfinite(got.norm[HY_GROUPS]),
          "adamw: a gradient that is not finite moves the parameters");
}

/* ---- small helpers, errors ----------------------------------------------------------------- */

static void test_helpers(hy_backend *be) {
    enum { N = 70 };
    static const gt_dtype dtypes[] = {GT_F32, GT_BF16, GT_F16};
    const int32_t keep[2] = {1, 0};
    double x[2 * N], y[2 * N], got[2 * N];
    for (int i = 0; i < 2 * N; i++) x[i] = i + 1, y[i] = 3 * i - 100; /* integers that are exact in every dtype */
    block from = new_block(be, 2 * N, size_of(be, GT_F32));
    block to = new_block(be, 2 * N, size_of(be, GT_F32));
    block kept = block_of_bytes(be, keep, sizeof keep);
    be->write(be, from.data, be->dtype, x, N);
    be->write(be, to.data, be->dtype, y, N);
    hy_add_args add = {.n = N, .dtype = be->dtype, .x = from.data, .y = to.data};
    check(be->add(be, &add) == GT_OK, "add: %s", hy_last_error());
    be->read(be, got, to.data, be->dtype, N);
    for (int i = 0; i < N; i++) {
        check(got[i] == x[i] + y[i], "add: y[%d] = %g, not %g", i, got[i], x[i] + y[i]);
    }
    be->write(be, from.data, GT_F32, x, 2 * N);
    hy_carry_args carry = {.count = 2, .B = 2, .n = N / 2, .keep = kept.data, .from = from.data, .to = to.data};
    check(be->carry(be, &carry) == GT_OK, "carry: %s", hy_last_error());
    be->read(be, got, to.data, GT_F32, 2 * N);
    for (int i = 0; i < 2 * N; i++) check(got[i] == (i / (N / 2) % 2 ? 0 : x[i]), "carry: to[%d] = %g", i, got[i]);
    for (int k = 0; k < (be == device ? 9 : 1); k++) {
        /* lengths that are a multiple of the vector width, and lengths that are not */
        hy_cast_args cast = {
            .n = N - k % 2, .from_dtype = dtypes[k / 3], .to_dtype = dtypes[k % 3], .from = from.data, .to = to.data};
        for (int i = 0; i < N; i++) x[i] = test_round(exp(0.1 * i) - 3, cast.from_dtype);
        be->write(be, from.data, cast.from_dtype, x, cast.n);
        check(be->cast(be, &cast) == GT_OK, "cast: %s", hy_last_error());
        be->read(be, got, to.data, cast.to_dtype, cast.n);
        for (int i = 0; i < cast.n; i++)
            check(got[i] == test_round(x[i], cast.to_dtype), "cast %d to %d: %g wrongly becomes %g",
                  (int)cast.from_dtype, (int)cast.to_dtype, x[i], got[i]);
    }
    check(is_fenced(&to), "a helper wrote outside of the array");
    free_block(&from), free_block(&to), free_block(&kept);
}

/* Dropout must drop its share of the numbers, and the same numbers for the same site and control.  `average` must move
 * the average of the weights, and exchange it with the weights. */
static void test_training_helpers(hy_backend *be) {
    enum { N = 3000 };
    double control[HY_CONTROLS] = {[HY_DROP_LOW] = 0xabcdef, [HY_DROP_HIGH] = 0x123456}, ones[N], first[N], other[N];
    block x = new_block(be, N, size_of(be, be->dtype)), w = new_block(be, N, size_of(be, GT_F32));
    block average = new_block(be, N, size_of(be, GT_F32)), c = new_block(be, HY_CONTROLS, size_of(be, GT_F32));
    for (int i = 0; i < N; i++) ones[i] = 1;
    be->write(be, c.data, GT_F32, control, HY_CONTROLS);
    for (int k = 0; k < 4; k++) {
        double *got = k == 0 ? first : other;
        hy_dropout_args a = {.n = N, .dtype = be->dtype, .rate = 0.25f, .site = k == 2, .control = c.data, .x = x.data};
        if (k == 3) { /* the control of another step */
            control[HY_DROP_LOW]++;
            be->write(be, c.data, GT_F32, control, HY_CONTROLS);
        }
        be->write(be, x.data, be->dtype, ones, N);
        check(be->dropout(be, &a) == GT_OK, "dropout: %s", hy_last_error());
        be->read(be, got, x.data, be->dtype, N);
        int zeros = 0, same = 0;
        for (int i = 0; i < N; i++) {
            zeros += got[i] == 0, same += got[i] == first[i];
            check(got[i] == 0 || got[i] == test_round(1 / 0.75, be->dtype) || fabs(got[i] - 1 / 0.75) < 1e-6,
                  "dropout: x[%d] = %.9g", i, got[i]);
        }
        check(zeros > N * 0.21 && zeros < N * 0.29,
              "dropout %d: %d of %d numbers are set to 0: must be about a quarter", k, zeros, N);
        check(k == 2 || k == 3 ? same < N * 0.7 : same == N,
              "dropout %d: %d of %d numbers are the same as in the first call", k, same, N);
        if (k == 0) /* numbers at any distance are dropped together as often as by chance, so there is no pattern */
            for (int step = 1; step < 64; step++) {
                int both = 0;
                for (int i = step; i < N; i++) both += got[i] == 0 && got[i - step] == 0;
                check(both > N * 0.035 && both < N * 0.095,
                      "dropout: %d pairs of zeros at a distance of %d: more or fewer than by chance", both, step);
            }
    }
    /* the second of two windows must lose the same numbers alone as together with the first */
    double pair[N];
    for (int window = 0; window < 2; window++) {
        double *got = window ? other : pair;
        const int64_t n = window ? N / 2 : N;
        const hy_dropout_args a = {
            .n = n, .window = N / 2, .dtype = be->dtype, .rate = 0.25f, .control = c.data, .x = x.data};
        control[HY_DROP_WINDOW] = window;
        be->write(be, c.data, GT_F32, control, HY_CONTROLS);
        be->write(be, x.data, be->dtype, ones, N);
        check(be->dropout(be, &a) == GT_OK, "dropout: %s", hy_last_error());
        be->read(be, got, x.data, be->dtype, n);
    }
    check(!memcmp(other, pair + N / 2, N / 2 * sizeof *pair), "dropout: a window depends on those before it");
    for (int i = 0; i < N; i++) first[i] = i, other[i] = 4 * i;
    be->write(be, w.data, GT_F32, first, N), be->write(be, average.data, GT_F32, other, N);
    hy_average_args a = {.n = N, .decay = 0.75f, .w = w.data, .average = average.data};
    check(be->average(be, &a) == GT_OK, "average: %s", hy_last_error());
    a.decay = -1;
    check(be->average(be, &a) == GT_OK, "average: %s", hy_last_error());
    be->read(be, ones, w.data, GT_F32, N), be->read(be, other, average.data, GT_F32, N);
    for (int i = 0; i < N; i++)
        check(ones[i] == 3.25 * i && other[i] == i, "average: weight %g and average %g at index %d are not exchanged",
              ones[i], other[i], i);
    check(is_fenced(&x) && is_fenced(&w) && is_fenced(&average), "dropout or average wrote outside of the array");
    free_block(&x), free_block(&w), free_block(&average), free_block(&c);
}

static void check_refusal(const char *what, gt_status status, gt_status expected, const char *word) {
    check(status == expected, "%s: status %d, not %d", what, (int)status, (int)expected);
    check(strstr(hy_last_error(), word) != NULL, "%s: \"%s\" does not name %s", what, hy_last_error(), word);
}

static void test_errors(void) {
    float x[4] = {1, 2, 3, 4}, y[4];
    hy_map_args map = {.n = 4, .function = (hy_function)7, .x = x, .y = y};
    hy_gemm_args gemm = {.M = 1, .N = 1, .K = 1, .dtype = GT_BF16, .alpha = 1, .a = x, .b = x, .c = y};
    gt_rmsnorm_linear_args head = {.M = 2, .D = 2, .O = 1, .x = x, .weight = x, .y = y};
    gt_wkv6_args wkv6 = {.B = 1, .T = 1, .H = 1, .N = 0};
    check_refusal("map", be32->map_forward(be32, &map), GT_ERROR_VALUE, "function");
    check_refusal("gemm", be32->gemm(be32, &gemm), GT_ERROR_UNSUPPORTED, "dtype");
    check_refusal("rmsnorm_linear", be32->rmsnorm_linear_forward(be32, &head), GT_ERROR_WORKSPACE, "workspace_bytes");
    check_refusal("wkv6", be32->wkv6_forward(be32, &wkv6), GT_ERROR_SIZE, "gt_ref_wkv6_forward: N");
    hy_backend *cuda = be32;
    if (hy_backend_cuda(&cuda, GT_BF16, -1) == GT_ERROR_NO_CUDA)
        check(cuda == NULL && strstr(hy_last_error(), "built without"), "hy_backend_cuda: \"%s\"", hy_last_error());
    else if (cuda)
        cuda->close(cuda);
}

/* ---- whole models on the device ------------------------------------------------------------ */

static hy_config config_of(const char *name, int hidden, int layers, int stateful) {
    int count;
    const hy_config *list = hy_model_list(&count);
    hy_config c = list[0];
    for (int i = 0; i < count; i++)
        if (!strcmp(list[i].name, name)) c = list[i];
    c.hidden = hidden, c.layers = layers, c.heads = 0, c.stateful = stateful;
    return c;
}

static int32_t *random_tokens(int n, int vocab) {
    int32_t *tokens = malloc((size_t)n * sizeof *tokens);
    for (int i = 0; i < n; i++) tokens[i] = (int32_t)(test_uniform(&drawn) * vocab);
    return tokens;
}

static void test_model(const char *name, int hidden, int layers, int B, int T) {
    enum { VOCAB = 61 };
    hy_config c = config_of(name, hidden, layers, 0);
    int failures = 1;
    drawn.state = 3;
    int32_t *tokens = random_tokens(B * T, VOCAB), *targets = random_tokens(B * T, VOCAB);
    targets[2] = -1;
    gt_status status = hy_check(device, be32, &c, VOCAB, B, T, 1, tokens, targets, NULL, &failures);
    check(status == GT_OK && failures == 0, "%s in %s: %d tensors differ %s", name, device->device, failures,
          status == GT_OK ? "" : hy_last_error());
    free(tokens);
    free(targets);
}

/* Decodes the same tokens with three models: int8 weights on the device, and the same rounded weights on the device and
 * on the CPU.  The error of int8 weights must not exceed the error of ordinary weights much. */
static void test_int8_model(const char *name) {
    enum { VOCAB = 61, S = 2, TOKENS = 5, N = S * VOCAB, LARGEST = 1 << 16 };
    hy_config c = config_of(name, 64, 1, 0), ordinary;
    static double x[LARGEST];
    double logits[3][N];
    hy_model *m[3] = {NULL, NULL, NULL};
    drawn.state = 6;
    int32_t *tokens = random_tokens(S * (3 + TOKENS), VOCAB);
    c.inference = 1, c.samples = S;
    ordinary = c, c.int8 = 1;
    gt_status status = hy_model_create(device, &c, VOCAB, S, 3, 1, &m[0]);
    if (status == GT_OK) status = hy_model_create(device, &ordinary, VOCAB, S, 3, 1, &m[1]);
    if (status == GT_OK) status = hy_model_create(be32, &ordinary, VOCAB, S, 3, 1, &m[2]);
    if (status == GT_OK) status = hy_model_quantise(m[0]);
    for (int i = 0; status == GT_OK && i < hy_model_param_count(m[0]); i++) {
        if (!check(hy_model_param(m[0], i)->count <= LARGEST, "%s is too large", hy_model_param(m[0], i)->name)) break;
        status = hy_model_read(m[0], HY_VALUE, i, x);
        for (int k = 1; k < 3 && status == GT_OK; k++) status = hy_model_write(m[k], i, x);
    }
    for (int t = 0; t <= TOKENS && status == GT_OK; t++) {
        for (int k = 0; k < 3 && status == GT_OK; k++)
            status = hy_model_feed(m[k], t ? tokens + S * (2 + t) : tokens, t ? 1 : 3, logits[k]);
        const double error = distance(logits[0], logits[2], N), other = distance(logits[1], logits[2], N);
        if (status == GT_OK)
            check(error <= 3 * other + act_tolerance[device->dtype] && (t || error == other),
                  "%s in %s: token %d: logits differ from fp32's by %.3g (int8 weights) and %.3g (ordinary)", name,
                  device->device, t, error, other);
    }
    check(status == GT_OK, "%s: int8 weights: %s", name, hy_last_error());
    for (int k = 0; k < 3; k++) hy_model_destroy(m[k]);
    free(tokens);
}

/* Returns all parameters after some steps.  in_one: a step is one call, which a GPU records and replays; otherwise a
 * step is three calls. */
static double *trained(hy_config c, int steps, int in_one, int64_t *count) {
    enum { VOCAB = 61, B = 3, T = 20 };
    const int32_t keep[B] = {1, 0, 1};
    const hy_optimizer o = {.lr = 1e-2f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.1f};
    hy_model *m;
    *count = 0;
    gt_status status = hy_model_create(device, &c, VOCAB, B, T, 1, &m);
    if (!check(status == GT_OK, "training: %s", hy_last_error())) return calloc(1, sizeof(double));
    drawn.state = 4;
    for (int step = 0; step < steps && status == GT_OK; step++) {
        int32_t *tokens = random_tokens(B * T, VOCAB), *targets = random_tokens(B * T, VOCAB);
        if (in_one) {
            status = hy_model_train(m, tokens, targets, step ? keep : NULL, &o);
        } else {
            status = hy_model_forward(m, tokens, targets, step ? keep : NULL);
            if (status == GT_OK) status = hy_model_backward(m, 0);
            if (status == GT_OK) status = hy_model_update(m, &o);
        }
        free(tokens);
        free(targets);
    }
    for (int i = 0; i < hy_model_param_count(m); i++) *count += hy_model_param(m, i)->count;
    double *x = malloc((size_t)*count * sizeof *x), *at = x;
    for (int i = 0; i < hy_model_param_count(m) && status == GT_OK; i++) {
        status = hy_model_read(m, HY_VALUE, i, at);
        at += hy_model_param(m, i)->count;
    }
    check(status == GT_OK, "training: %s", hy_last_error());
    hy_model_destroy(m);
    return x;
}

static void test_training(void) {
    const hy_config c = config_of("HY", 64, 1, 1);
    int64_t n;
    double *first = trained(c, 4, 1, &n), *second = trained(c, 4, 1, &n), *parts = trained(c, 4, 0, &n);
    check(!memcmp(first, second, (size_t)n * sizeof *first), "%s: a second training differs", device->device);
    check(!memcmp(first, parts, (size_t)n * sizeof *first), "%s: a step in parts differs", device->device);
    for (int64_t i = 0; i < n; i++)
        if (!check(isfinite(first[i]), "%s: a parameter is %g", device->device, first[i])) break;
    free(first), free(second), free(parts);
}

/* Every model must reach the same weights if it recomputes layers for backward.  There are three steps, because a GPU
 * replays the third. */
static void test_recompute(void) {
    int count;
    const hy_config *list = hy_model_list(&count);
    for (int i = 0; i < count; i++) {
        hy_config c = config_of(list[i].name, 32, 2, 1), again = c;
        int64_t n;
        again.recompute = 1;
        double *kept = trained(c, 3, 1, &n), *recomputed = trained(again, 3, 1, &n);
        check(n > 0 && !memcmp(kept, recomputed, (size_t)n * sizeof *kept), "%s: %s: recompute differs", device->device,
              list[i].name);
        free(kept), free(recomputed);
    }
}

/* A model with both branches must reach the same weights with wkv_ssm as with conv_ssd, also if it recomputes
 * layers. */
static void test_fuse(void) {
    int count;
    const hy_config *list = hy_model_list(&count);
    for (int i = 0; i < count; i++) {
        if (list[i].mix >= HY_MIX_RWKV || list[i].mamba != 2) continue;
        hy_config c = config_of(list[i].name, 64, 2, 1);
        int64_t n;
        double *both = trained(c, 3, 1, &n);
        c.fuse = HY_CONV_SSD;
        for (int again = 0; again < 2; again++) {
            c.recompute = again;
            double *other = trained(c, 3, 1, &n);
            check(n > 0 && !memcmp(both, other, (size_t)n * sizeof *both), "%s: %s%s: wkv_ssm and conv_ssd differ",
                  device->device, list[i].name, again ? ", recomputed" : "");
            free(other);
        }
        free(both);
    }
}

/* ---- main ---------------------------------------------------------------------------------- */

static void test_cases(void) {
    test_embedding(5, 4, 3, 1);
    test_embedding(700, 65, 64, 0);
    test_lerp(2, 3, 5, 1, LERP_NO_M, 1);
    test_lerp(2, 4, 19, 5, 0, 1);
    test_lerp(1, 1, 17, 2, LERP_NO_STATE, 1);
    test_lerp(2, 3, 4, 3, LERP_ADD_DX, 1);
    test_lerp(3, 70, 70, 5, 0, 0);
    check_map("tanh", HY_TANH, 50, 1);
    check_map("gelu", HY_GELU, 50, 1);
    check_map("neg_exp", HY_NEG_EXP, 50, 1);
    test_bias(4, 5, 1);
    test_bias(300, 64, 0);
    test_gate_mix(4, 6, 0, 1);
    test_gate_mix(3, 5, MIX_NO_RESIDUAL, 1);
    test_gate_mix(4, 6, MIX_NO_WEIGHT, 1);
    test_gate_mix(500, 64, 0, 0);
    test_cross_entropy(6, 7, 2);
    test_cross_entropy(1, 65, 10);
    test_gemms();
    test_optimizer();
}

/* Gives the operators scratch memory of the size that a model needs. */
static block give_scratch(void) {
    const hy_limits limits = {1 << 16, 1024, 1 << 20};
    size_t bytes = 0;
    device->scratch(device, &limits, NULL, &bytes);
    block b = new_block(device, bytes, 1);
    device->scratch(device, &limits, b.data, &bytes);
    return b;
}

/* Runs sizes that need several thread blocks, and sizes whose rows can be read four elements at a time. */
static void test_device_cases(void) {
    test_embedding(3000, 70, 132, 0);
    test_embedding(100, 300, 8, 0);
    test_embedding(0, 5, 8, 0);
    test_lerp(3, 100, 132, 5, 0, 0);
    test_lerp(2, 65, 64, 1, LERP_NO_M | LERP_ADD_DX, 0);
    test_lerp(0, 5, 8, 5, 0, 0);
    check_map("tanh", HY_TANH, 4096, 0);
    check_map("gelu", HY_GELU, 4100, 0);
    test_bias(2000, 260, 0);
    test_gate_mix(700, 192, MIX_NO_RESIDUAL, 0);
    test_gate_mix(100, 128, MIX_NO_WEIGHT, 0);
    test_cross_entropy(300, 256, 3);
    test_cross_entropy(9, 1000, 30);
}

static void test_dtype(gt_dtype dtype) {
    static const char *const variants[] = {"HY", "GF", "WS", "RF", "CP"};
    gt_status status = hy_backend_cuda(&device, dtype, -1);
    if (status == GT_ERROR_NO_DEVICE && !gpu_is_present()) {
        printf("SKIP: %s\n", hy_last_error());
        exit(77);
    }
    if (!check(status == GT_OK, "hy_backend_cuda: %s", hy_last_error())) return;
    const int all_models = !is_few, all_cases = !is_few || dtype == GT_BF16;
    block memory = give_scratch();
    test_cases();
    if (all_cases) test_device_cases();
    test_helpers(device);
    test_training_helpers(device);
    test_map_extremes(device);
    test_cross_entropy_extremes(device);
    check(device->synchronize(device) == GT_OK, "%s", hy_last_error());
    check(is_fenced(&memory), "%s: wrote outside of the scratch memory", device->device);
    for (int i = 0; i < 5; i++)
        if (all_models || (all_cases && i < 2)) test_model(variants[i], 64, 1, 2, 17);
    if (all_models) test_model("HY", 64, 2, 1, 33);
    test_int8_linears(device);
    for (int i = 0; i < 5; i++)
        if (all_models || i == 4) test_int8_model(variants[i]);
    if (all_models) test_int8_model("Mamba-1");
    if (all_cases) test_training();
    if (all_models) test_recompute();
    if (all_models) test_fuse();
    free_block(&memory);
    test_group("trainer", device->device);
    device->close(device);
}

static void test_cpu(void) {
    test_cases();
    check_map("tanh", HY_TANH, 100003, 0);
    check_map("gelu", HY_GELU, 100003, 0);
    for (int f = HY_TANH; f <= HY_NEG_EXP; f++)
        if (f != HY_GELU) test_map_in_place((hy_function)f);
    test_map_accuracy(HY_TANH, 12, 0);
    test_map_accuracy(HY_TANH, 0.3, 0);
    test_map_accuracy(HY_GELU, 12, 1e-2);
    test_map_accuracy(HY_NEG_EXP, 20, 0);
    test_map_extremes(be32);
    test_cross_entropy_extremes(be32);
    test_gemm_defaults();
    test_rmsnorm_linear(4, 6, 5, GT_NORM_RMS, 1);
    test_rmsnorm_linear(3, 5, 7, GT_NORM_LAYER, 1);
    test_rmsnorm_linear(200, 64, 100, GT_NORM_RMS, 0);
    test_int8_linears(be32);
    test_helpers(be32);
    test_training_helpers(be32);
    test_errors();
    test_group("trainer", be32->device);
}

int main(int argc, char **argv) {
    hy_backend_cpu(&be32);
    hy_backend_cpu64(&be64);
    set_threads(1);
    if (argc > 1 && !strcmp(argv[1], "device")) { /* arguments: device [short | few] */
        is_few = argc > 2 && !strcmp(argv[2], "few");
        const int is_short = argc > 2 && !strcmp(argv[2], "short");
        test_dtype(GT_BF16);
        if (!is_short) test_dtype(GT_F32);
        if (!is_short) test_dtype(GT_F16);
    } else {
        test_cpu();
        /* runs the tests for each smaller set of CPU features */
        for (int features = 0; features < hy_cpu_features(); features++) {
            if (features & ~hy_cpu_features()) continue;
            be32->close(be32);
            check(hy_backend_cpu_with(&be32, features) == GT_OK, "%s", hy_last_error());
            test_cpu();
        }
    }
    be32->close(be32);
    be64->close(be64);
    return test_finish();
}
