/* Tests ssd with numbers that are hard to compute with.  Compares the kernels, forward and backward, with and without
 * `saved`, with the double twin on the same rounded inputs.  Errors must be within the documented limits.  There are
 * two programs: on a GPU (kernels_gpu.cu), and in the emulation (kernels_emu.cpp).  The emulation runs fewer and
 * smaller cases, on the device that --device names. */
#include "hard.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

static const test_runner runners[] = {
    {.name = "the kernel", .run = hard_run, .context = &hard_plain},
    {.name = "the kernel, with saved", .run = hard_run, .context = &hard_saved, .reads_y = 1}};

/* ---- limits ---------------------------------------------------------------------------------- */

/* The documented relative l2 errors, by dtype: of a tensor (tensor_limit); of a single head with 256 tokens or more
 * (head_limit); of a sum over tokens, relative to the sum of its terms' magnitudes (sum_limit); of a state
 * (state_limit). */
static const double tensor_limit[] = {[GT_F32] = 1e-5, [GT_BF16] = 2.5e-3, [GT_F16] = 1e-3};
static const double head_limit[] = {[GT_F32] = 1e-5, [GT_BF16] = 3.5e-3, [GT_F16] = 1.5e-3};
static const double sum_limit[] = {[GT_F32] = 1e-5, [GT_BF16] = 1e-3, [GT_F16] = 1e-3};
static const double state_limit[] = {[GT_F32] = 1e-5, [GT_BF16] = 5e-4, [GT_F16] = 5e-4};
/* The documented error of a column of dB or dC that comes from a single quiet token: see make_lone. */
static const double column_limit[] = {[GT_F32] = 1e-5, [GT_BF16] = 3.5e-3, [GT_F16] = 1.5e-3};

/* ---- cases ----------------------------------------------------------------------------------- */

typedef struct hard_case {
    test_case c;
    /* NULL, or a function that changes the drawn inputs.  bias and huge are its arguments */
    void (*change)(const struct hard_case *k, test_values *in);
    double bias;
    const char *huge;
    int good_heads;     /* number of the first head that is also judged alone, as are all later heads */
    int good_tokens;    /* number of head 0's first tokens that are also judged alone, in forward */
    int lone_column;    /* 0, or the column of make_lone, which is also judged alone in dB and dC */
    double fp32_states; /* 0, or a limit for states in fp32 that is lower than the documented one */
} hard_case;

/* In inputs of make_lone, only B of token LONE_B and C of token LONE_C are not 0 in the lone column. */
enum { LONE_B = 10, LONE_C = 200 };

/* Sums the squares of errors and of true values, over indices from `first` to below `end`. */
static void add_up(const double *got, const double *truth, const int64_t size[4], const int64_t first[4],
                   const int64_t end[4], double *error, double *sum) {
    *error = *sum = 0;
    for (int64_t i = first[0]; i < end[0]; i++)
        for (int64_t j = first[1]; j < end[1]; j++)
            for (int64_t k = first[2]; k < end[2]; k++)
                for (int64_t l = first[3]; l < end[3]; l++) {
                    const int64_t at = ((i * size[1] + j) * size[2] + k) * size[3] + l;
                    const double e = got[at] - truth[at];
                    *error += e * e;
                    *sum += truth[at] * truth[at];
                }
}

static void check_part(const hard_case *k, const test_runner *r, gt_pass pass, const gt_tensor *t, const double *got,
                       const double *truth, const int64_t size[4], const int64_t first[4], const int64_t end[4],
                       const char *what, double limit) {
    double error, sum;
    add_up(got, truth, size, first, end, &error, &sum);
    error = sqrt(error), sum = sqrt(sum);
    test_check(error <= limit * sum, "%s: %s of %s, %s: error %.2e, size %.2e, ratio %.2e, limit of the ratio %.1e",
               test_describe(&k->c, pass), t->name, r->name, what, error, sum, error / sum, limit);
}

/* Judges all tensors of a pass.  A NaN fails. */
static void check_tensors(const hard_case *k, const test_runner *r, gt_pass pass, const test_values *got,
                          const test_values *truth, const test_values *magnitudes) {
    const test_case *c = &k->c;
    for (int i = 0; test_table(c)->tensors[i].name; i++) {
        const gt_tensor *t = &test_table(c)->tensors[i];
        const gt_dtype dtype = c->args.ssd.dtype;
        const double *x = got->of[i], *y = truth->of[i];
        int64_t size[4] = {1, 1, 1, 1}, first[4] = {0, 0, 0, 0}, end[4];
        char head[32];
        if (!x || !y) continue;
        test_shape(c, pass, t, size);
        memcpy(end, size, sizeof end);
        if (t->use[GT_BACKWARD] == 'g') {
            const double *terms = magnitudes->of[i];
            for (int64_t h = 0; h < size[0] * size[1]; h++)
                test_check(
                    fabs(x[h] - y[h]) <= sum_limit[dtype] * fabs(terms[h]) + 0x1p-126,
                    "%s: %s of %s: element %lld is %.9g, but should be %.9g; the sum of its terms' magnitudes is %.9g",
                    test_describe(c, pass), t->name, r->name, (long long)h, x[h], y[h], terms[h]);
            continue;
        }
        const int is_over_time = t->stride_offset && !test_is_state(t);
        const double of_states = dtype == GT_F32 && k->fp32_states > 0 ? k->fp32_states : state_limit[dtype];
        const double limit =
            test_limit_of(r, test_op_of(c->op), t, dtype, y, test_count(c, pass, t), tensor_limit[dtype]);
        check_part(k, r, pass, t, x, y, size, first, end, "all", is_over_time ? limit : of_states);
        const int axis = test_axis(c, t, 'H');
        for (int64_t h = k->good_heads; is_over_time && axis >= 0 && size[1] >= 256 && h < size[axis]; h++) {
            first[axis] = h, end[axis] = h + 1;
            snprintf(head, sizeof head, "head %d", (int)h);
            check_part(k, r, pass, t, x, y, size, first, end, head, head_limit[dtype]);
        }
        const int is_dB = !strcmp(t->name, "dBm"), is_dC = !strcmp(t->name, "dCm");
        const int64_t chunks = is_dB ? LONE_C / 64 : is_dC ? size[1] / 64 : 0;
        for (int64_t chunk = is_dC; k->lone_column && chunk < chunks; chunk++) {
            first[1] = 64 * chunk, end[1] = first[1] + 64;
            first[2] = 0, end[2] = size[2], first[3] = k->lone_column, end[3] = first[3] + 1;
            snprintf(head, sizeof head, "a lone column, chunk %d", (int)chunk);
            check_part(k, r, pass, t, x, y, size, first, end, head, column_limit[dtype]);
        }
        if (pass != GT_FORWARD || !k->good_tokens || !is_over_time) continue;
        first[axis] = 0, end[axis] = 1, end[1] = k->good_tokens;
        check_part(k, r, pass, t, x, y, size, first, end, "the first tokens", head_limit[dtype]);
    }
}

static int is_short; /* fewer and smaller cases: in the emulation, or with --short for racecheck */
static int turn;     /* counts cases; with is_short, it decides whether a pass runs with `saved` */
static int is_third; /* --third: runs every third case */

static void check_case(const hard_case *k) {
    if (is_third && turn % 3) {
        turn++;
        return;
    }
    for (int pass = GT_FORWARD; pass <= GT_BACKWARD; pass++) {
        test_values in, truth, got, magnitudes = {{NULL}};
        test_inputs(&k->c, (gt_pass)pass, &in);
        if (k->change) k->change(k, &in);
        for (int i = 0; test_table(&k->c)->tensors[i].name; i++) {
            const gt_tensor *t = &test_table(&k->c)->tensors[i];
            const int64_t count = test_count(&k->c, (gt_pass)pass, t);
            for (int64_t j = 0; in.of[i] && t->kind != 'i' && j < count; j++)
                in.of[i][j] = test_round(in.of[i][j], test_dtype_of(&k->c, t));
        }
        test_run(&test_truth, &k->c, (gt_pass)pass, &in, TEST_ALL, &truth);
        if (pass == GT_BACKWARD) test_magnitudes(&k->c, &in, &magnitudes);
        for (int i = 0; i < 2; i++) {
            if (is_short && i != (turn + pass) % 2) continue;
            if (test_run(&runners[i], &k->c, (gt_pass)pass, &in, TEST_ALL, &got))
                check_tensors(k, &runners[i], (gt_pass)pass, &got, &truth, &magnitudes);
            test_free(&got);
        }
        test_free(&in), test_free(&truth), test_free(&magnitudes);
    }
    turn++;
}

#define SSD(...) .op = "ssd", .args.ssd = {.B = 1, .softplus = 1, __VA_ARGS__}

/* With this number of tokens in one segment, one kernel computes dy silu(z), dz and G.  The last slot has only one
 * chunk. */
enum { WHOLE = 540 };

static void check_dtype(hard_case k, gt_dtype dtype) {
    test_set_dtype(&k.c, dtype, GT_DTYPE_DEFAULT);
    check_case(&k);
}

/* ---- decays ---------------------------------------------------------------------------------- */

/* Gives the heads decays from none to very fast. */
static void set_speeds(const hard_case *k, test_values *in) {
    const test_case *c = &k->c;
    static const double A[] = {-1, -256, 0, -16};
    for (int64_t h = 0; h < c->args.ssd.H; h++) {
        hard_array(c, in, "A")[h] = A[h % 4];
        hard_array(c, in, "dt_bias")[h] = k->bias;
    }
}

static void check_decays(void) {
    static const struct {
        int P, N, G;
        const char *absent;
    } sizes[] = {{64, 128, 1, NULL},   {64, 64, 1, "z dz"}, {64, 256, 1, "z dz"}, {32, 16, 1, NULL},
                 {64, 128, 1, "z dz"}, {64, 256, 1, NULL},  {64, 64, 4, NULL},    {64, 128, 4, "z dz"}};
    int n = 0;
    for (double bias = -8; bias <= 4; bias += 4) {
        for (int i = 0; i < 8; i++, n++) {
            if (is_short && i % 4 != n / 8) continue;
            const hard_case k = {
                .c = {SSD(.T = is_short && i % 3 ? 260
                               : is_short        ? WHOLE
                                                 : 1000,
                          .H = 4, .P = sizes[i].P, .N = sizes[i].N, .G = sizes[i].G, .segments = i % 3 == 0),
                      .name = "decays", .absent = sizes[i].absent, .seed = (uint64_t)n},
                .change = set_speeds,
                .bias = bias};
            check_dtype(k, GT_BF16);
            if (!is_short || i % 2) check_dtype(k, GT_F16);
            check_dtype(k, GT_F32);
        }
    }
    test_group("ssd", "A from 0 to -256, dt_bias from -8 to 4");
}

/* ---- scales ---------------------------------------------------------------------------------- */

/* Eight tokens of each chunk decay fast, and the others hardly at all. */
static void mix_scales(const hard_case *k, test_values *in) {
    const test_case *c = &k->c;
    const gt_ssd_args *a = &c->args.ssd;
    for (int64_t i = 0; i < a->T * a->H; i++) {
        const int64_t t = i / a->H, h = i % a->H;
        hard_array(c, in, "dt")[i] = (t + 16 * h) % 64 < 8 ? 4 : -9;
        hard_array(c, in, "dt_bias")[h] = 0;
        hard_array(c, in, "A")[h] = h % 2 ? -1000 : -1;
    }
}

static void check_scales(void) {
    for (int G = 1; G <= 2; G++) {
        const hard_case k = {.c = {SSD(.T = 300, .H = 2, .P = 64, .N = 64, .G = G), .name = "mixed scales"},
                             .change = mix_scales};
        check_dtype(k, GT_BF16);
        check_dtype(k, GT_F16);
        check_dtype(k, GT_F32);
    }
    test_group("ssd", "fast tokens among slow ones in a chunk");
}

/* In head 0 or group 0 only: multiplies token 100 by 1e30, and all other tokens by 1e-30. */
static void make_huge(const hard_case *k, test_values *in) {
    const test_case *c = &k->c;
    const gt_ssd_args *a = &c->args.ssd;
    const int is_group = !strcmp(k->huge, "Bm");
    const int64_t heads = is_group ? a->G : a->H, width = is_group ? a->N : a->P;
    double *values = hard_array(c, in, k->huge);
    for (int64_t i = 0; values && i < a->T * heads * width; i++)
        if (i / width % heads == 0) values[i] *= i / (width * heads) == 100 ? 1e30 : 1e-30;
}

static void check_huge(void) {
    static const char *const tensors[] = {"x", "dy", "Bm"};
    for (int i = 0; i < 3; i++) {
        const int has_groups = i == 2;
        hard_case k = {.c = {SSD(.T = 260, .H = 2, .P = 64, .N = 64, .G = has_groups ? 2 : 1), .name = "a huge token",
                             .absent = "z dz state_in dstate_out"},
                       .change = make_huge,
                       .huge = tensors[i],
                       .good_heads = 1,
                       .good_tokens = 64};
        check_dtype(k, GT_BF16);
        check_dtype(k, GT_F32);
    }
    test_group("ssd", "one huge token among tiny ones");
}

/* Scales dy of head 0: by 1e-30 before token 100, and by 1e12 from there on.  Nothing decays fast.  So dx of the first
 * chunk comes almost only from later tokens: they weigh 1e42 times as much as the chunk's own tokens. */
static void make_quiet(const hard_case *k, test_values *in) {
    const test_case *c = &k->c;
    const gt_ssd_args *a = &c->args.ssd;
    double *dy = hard_array(c, in, "dy");
    for (int64_t i = 0; dy && i < a->T * a->H * a->P; i++)
        if (i / a->P % a->H == 0) dy[i] *= i / (a->P * a->H) < 100 ? 1e-30 : 1e12;
    hard_array(c, in, "A")[0] = -0.01;
}

static void check_quiet(void) {
    for (int i = 0; i < 4; i++) {
        const hard_case k = {
            .c = {SSD(.T = i < 2 ? 260 : WHOLE, .H = 2, .P = 64, .N = i % 2 ? 128 : 64, .segments = i >= 2),
                  .name = "a quiet chunk", .absent = "state_in dstate_out"},
            .change = make_quiet};
        check_dtype(k, GT_BF16);
        check_dtype(k, GT_F32);
    }
    test_group("ssd", "a quiet chunk before a loud one");
}

/* Sets one column of B to 0 except in one token of the first chunk, and the same column of C except in one token of the
 * fourth chunk.  Scales x and dy of these tokens by 1e-4.  So one quiet token alone makes this column of the states:
 * its contribution is 2^-20 of the sum over a chunk's 64 tokens. */
static void make_lone(const hard_case *k, test_values *in) {
    const test_case *c = &k->c;
    const gt_ssd_args *a = &c->args.ssd;
    for (int i = 0; i < 2; i++) {
        const int64_t alone = i ? LONE_C : LONE_B;
        double *group = hard_array(c, in, i ? "Cm" : "Bm"), *head = hard_array(c, in, i ? "dy" : "x");
        for (int64_t j = 0; j < a->T * a->G; j++)
            if (j / a->G != alone) group[j * a->N + k->lone_column] = 0;
        for (int64_t j = 0; head && j < a->H * a->P; j++) head[alone * a->H * a->P + j] *= 1e-4;
    }
    for (int64_t h = 0; h < a->H; h++) hard_array(c, in, "A")[h] = -0.01;
}

static void check_lone(void) {
    for (int i = 0; i < 4; i++) {
        const hard_case k = {.c = {SSD(.T = 260, .H = 4, .P = 64, .N = 16 << i, .G = 1 + i % 2), .name = "a lone token",
                                   .absent = "z dz state_in dstate_out"},
                             .change = make_lone,
                             .lone_column = 5};
        check_dtype(k, GT_BF16);
        check_dtype(k, GT_F16);
        check_dtype(k, GT_F32);
    }
    test_group("ssd", "elements of a state that one quiet token makes");
}

/* Without softplus: of five tokens, two have Delta = 0 and one has Delta = 1e-9.  Their ddt is not 0, because a larger
 * Delta would change the loss. */
static void set_still(const hard_case *k, test_values *in) {
    const test_case *c = &k->c;
    const gt_ssd_args *a = &c->args.ssd;
    for (int64_t i = 0; i < a->T * a->H; i++) {
        const int64_t of_five = i / a->H % 5;
        hard_array(c, in, "dt")[i] = of_five < 2 ? 0 : of_five == 2 ? 1e-9 : 0.125;
    }
    for (int64_t h = 0; h < a->H; h++) hard_array(c, in, "A")[h] = -0.5 - h;
}

static void check_still(void) {
    for (int i = 0; i < 4; i++) {
        const hard_case k = {.c = {.op = "ssd",
                                   .args.ssd = {.B = 1, .T = 260, .H = 2, .P = 64, .N = i % 2 ? 128 : 64, .G = 1},
                                   .name = "still tokens",
                                   .absent = i < 2 ? "dt_bias ddt_bias z dz" : "dt_bias ddt_bias"},
                             .change = set_still};
        check_dtype(k, GT_BF16);
        check_dtype(k, GT_F16);
        check_dtype(k, GT_F32);
    }
    test_group("ssd", "tokens whose Delta is 0 or all but 0");
}

/* ---- growth ---------------------------------------------------------------------------------- */

/* In head 0: x and dy are tiny, and the sum of Delta A over 64 tokens is `bias`, so that the state grows. */
static void set_growth(const hard_case *k, test_values *in) {
    const test_case *c = &k->c;
    const gt_ssd_args *a = &c->args.ssd;
    for (int64_t i = 0; i < a->T * a->H; i++)
        if (i % a->H == 0) hard_array(c, in, "dt")[i] = 0;
    hard_array(c, in, "dt_bias")[0] = 0; /* Delta = softplus(0) = log 2 */
    hard_array(c, in, "A")[0] = k->bias / 64 / log(2);
    for (int i = 0; i < 2; i++) {
        double *values = hard_array(c, in, i ? "dy" : "x");
        for (int64_t j = 0; values && j < a->T * a->H * a->P; j++)
            if (j / a->P % a->H == 0) values[j] *= 1e-15;
    }
}

static void check_growth(void) {
    static const struct { int P, N, G; } sizes[] = {{64, 64, 1}, {16, 24, 1}, {64, 128, 1}, {64, 64, 2}};
    for (int i = 0; i < 4; i++) {
        const hard_case k = {.c = {SSD(.T = 100, .H = 2, .P = sizes[i].P, .N = sizes[i].N, .G = sizes[i].G),
                                   .name = "growth",
                                   .absent = i == 2 ? "z dz state_in dstate_out" : "state_in dstate_out"},
                             .change = set_growth,
                             .bias = 40};
        check_dtype(k, GT_BF16);
        check_dtype(k, GT_F32);
    }
    test_group("ssd", "growth by e^40 in 64 tokens");
}

/* Tests gates that are nearly closed: far below 0, silu(z) is tiny compared with z.  Also tests gates of exactly 0,
 * where y does not tell its value before the gate. */
static void check_closed(void) {
    static const struct {
        int T, P, N;
        double mean, zeros;
    } sizes[] = {{300, 64, 128, -25, 0},   {300, 64, 128, 0, 0.001}, {WHOLE, 64, 128, -25, 0},
                 {WHOLE, 64, 128, 0, 0.2}, {300, 80, 48, 0, 0.01},   {200, 64, 256, 0, 0.01}};
    for (int i = 0; i < 6; i++) {
        const hard_case k = {
            .c = {SSD(.T = sizes[i].T, .H = 2, .P = sizes[i].P, .N = sizes[i].N, .segments = sizes[i].T == WHOLE),
                  .name = "closed gates", .fill = {{"z", sizes[i].mean, 1, 0, sizes[i].zeros}}}};
        turn = 0; /* runs backward with `saved`, and thus with y */
        check_dtype(k, GT_BF16);
        if (i == 0) check_dtype(k, GT_F32);
    }
    test_group("ssd", "gates that are nearly closed, or zero");
}

/* Tests blocks of four units, which need enough tokens for all multiprocessors.  The cases cover every dtype, z with
 * zeros and no z, one segment and several, and both ways to compute dz. */
static void check_units(void) {
    for (int i = 0; i < 4; i++) {
        const hard_case k = {
            .c = {SSD(.T = machine_is_slow ? 1040 : 35000, .H = 4, .P = 16, .N = i == 3 ? 16 : 80, .segments = i / 2),
                  .name = "four units", .absent = i % 2 ? "z dz" : NULL, .seed = (uint64_t)i,
                  .fill = {{"z", 0, 1, 0, 0.001}}}};
        for (int saved = 0; saved < 2; saved++) {
            turn = saved;
            check_dtype(k, GT_BF16);
            turn = saved;
            check_dtype(k, GT_F16);
            if (!is_short) break; /* without is_short, check_case has run both with and without `saved` */
        }
        if (i == 1) check_dtype(k, GT_F32);
    }
    test_group("ssd", "blocks of four units");
}

/* ---- accumulation ---------------------------------------------------------------------------- */

static void set_flat(const hard_case *k, test_values *in) {
    const test_case *c = &k->c;
    for (int64_t h = 0; h < c->args.ssd.H; h++) {
        hard_array(c, in, "A")[h] = 0;
        hard_array(c, in, "dt_bias")[h] = -6;
    }
}

/* Tests long sums: nothing decays, and nearly all numbers have one sign.  Tensor cores round sums towards zero, so a
 * state that they accumulate in place would become more and more too small.  The error of fp32 sums grows with the root
 * of the number of terms, to 1.4e-5 for a million tokens added one by one.  The limit for states grows in the same way,
 * so that the emulation finds the fault with fewer tokens. */
static void check_accumulation(void) {
    const int64_t T = is_short ? 20000 : 1 << 20;
    for (int N = 16; N <= 20; N += 4) { /* N = 16: on tensor cores; N = 20: by the any-size kernels */
        const hard_case k = {
            .c = {SSD(.T = T, .H = 1, .P = 8, .N = N, .segments = 1), .name = "accumulation", .absent = "z dz",
                  .fill = {{"x", 1, 0.3, 0, 0}, {"Bm", 1, 0.3, 0, 0}, {"Cm", 1, 0.3, 0, 0}, {"dy", 1, 0.3, 0, 0}}},
            .change = set_flat,
            .fp32_states = 1e-5 * sqrt((double)T / (1 << 20))};
        if (N == 16) check_dtype(k, GT_BF16);
        check_dtype(k, GT_F32);
    }
    test_group("ssd", "A = 0 over a long time");
}

int main(int argc, char **argv) {
    const int status = machine_start();
    if (status) return status;
    is_short = machine_is_slow;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--short")) {
            is_short = 1;
        } else if (!strcmp(argv[i], "--third")) {
            is_third = 1;
        } else if (!strcmp(argv[i], "--device") && i + 1 < argc) {
            if (machine_choose(argv[++i])) continue;
            fprintf(stderr, "no device %s here\n", argv[i]);
            return 2;
        } else {
            fprintf(stderr, "unknown option %s\n", argv[i]);
            return 2;
        }
    }
    check_growth();
    check_decays();
    check_scales();
    check_huge();
    check_quiet();
    check_lone();
    check_still();
    check_closed();
    check_units();
    check_accumulation();
    return test_finish();
}
