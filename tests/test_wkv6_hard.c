/* Tests wkv6 with numbers that are hard to compute with.  Compares the kernels, forward and backward, with and without
 * `saved`, with the double twin on the same rounded inputs.  There are two programs: on a GPU (kernels_gpu.cu), and in
 * the emulation (kernels_emu.cpp), which runs fewer and smaller cases. */
#include "hard.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

/* The documented limits: of activations and dw, and of states and du, which are fp32.  In 16-bit calls, the products of
 * states and du have factors of 11 bits. */
#define LIMITS                                                                                                         \
    { {0, 1e-5, 2.5e-3, 1e-3}, {0, 1e-5, 5e-4, 5e-4}, {0, 1e-5, 2.5e-3, 1e-3}, {0}, 1 }
static const test_runner runners[] = {{"the kernel", hard_run, &hard_plain, 0, LIMITS, 0},
                                      {"the kernel, with saved", hard_run, &hard_saved, 0, LIMITS, 0}};

/* ---- cases ----------------------------------------------------------------------------------- */

/* The log of the decay of token t, head h, channel n. */
typedef double log_decay(test_random *random, int t, int h, int n);

typedef struct hard_case {
    test_case c;
    log_decay *decay; /* NULL: w has the values that the case draws */
    double loss;      /* factor of dy and dstate_out; 0: 1 */
    int by_channel;   /* also judges each channel of dr, dk and dw alone */
    int in_detail;    /* also judges rows and elements, by test_compare */
} hard_case;

static void set_decays(const hard_case *k, test_values *in) {
    const test_case *c = &k->c;
    const gt_wkv6_args *a = &c->args.wkv6;
    const gt_tensor *w = &test_table(c)->tensors[test_find(test_table(c), "w")];
    double *values = hard_array(c, in, "w");
    test_random random = {test_seed(c)};
    for (int64_t i = 0; i < a->B * a->T * a->H * a->N; i++) {
        const int64_t n = i % a->N, h = i / a->N % a->H, t = i / (a->N * a->H) % a->T;
        const double decay = k->decay(&random, (int)t, (int)h, (int)n);
        /* a raw w of 200 gives a decay of 0 */
        values[i] = a->decay == GT_DECAY_LOG ? decay : fmin(log(-decay), 200);
        values[i] = test_round(values[i], test_dtype_of(c, w));
    }
}

static void scale(const test_case *c, test_values *in, const char *tensor, double factor) {
    const gt_tensor *t = &test_table(c)->tensors[test_find(test_table(c), tensor)];
    const int64_t count = test_count(c, GT_BACKWARD, t);
    double *values = hard_array(c, in, tensor);
    for (int64_t i = 0; values && i < count; i++) values[i] = test_round(values[i] * factor, test_dtype_of(c, t));
}

static void draw_inputs(const hard_case *k, gt_pass pass, test_values *in) {
    test_inputs(&k->c, pass, in);
    if (k->decay) set_decays(k, in);
    if (pass == GT_FORWARD || k->loss == 0) return;
    scale(&k->c, in, "dy", k->loss);
    scale(&k->c, in, "dstate_out", k->loss);
}

/* ---- judging --------------------------------------------------------------------------------- */

/* Checks the relative l2 error over all elements, or over one channel.  A NaN fails.  fp16 rounds subnormal numbers
 * more coarsely, so it has a larger floor. */
static void check_elements(const test_runner *r, const test_case *c, gt_pass pass, const gt_tensor *t,
                           const double *got, const double *truth, int64_t first, int64_t step, double limit) {
    const double floor = test_dtype_of(c, t) == GT_F16 ? 0x1p-14 : 0x1p-126;
    const int64_t count = test_count(c, pass, t);
    double squares = 0, truth_squares = 0, error;
    for (int64_t i = first; i < count; i += step) {
        squares += (got[i] - truth[i]) * (got[i] - truth[i]);
        truth_squares += truth[i] * truth[i] + floor * floor;
    }
    error = sqrt(squares / truth_squares);
    test_check(error <= limit, "%s: %s of %s, %s %lld: relative error %.2e, at most %.1e", test_describe(c, pass),
               t->name, r->name, step > 1 ? "channel" : "all from", (long long)first, error, limit);
}

static void check_tensors(const test_runner *r, const hard_case *k, gt_pass pass, const test_values *got,
                          const test_values *truth) {
    const test_case *c = &k->c;
    const gt_wkv6_args *a = &c->args.wkv6;
    for (int i = 0; test_table(c)->tensors[i].name; i++) {
        const gt_tensor *t = &test_table(c)->tensors[i];
        const double limit =
            strchr("fSP", t->kind) ? r->tolerance.parameters[a->dtype] : r->tolerance.activations[a->dtype];
        if (!got->of[i]) continue;
        check_elements(r, c, pass, t, got->of[i], truth->of[i], 0, 1, limit);
        if (!k->by_channel || !strstr("dr dk dw", t->name)) continue;
        for (int64_t n = 0; n < a->H * a->N; n++)
            check_elements(r, c, pass, t, got->of[i], truth->of[i], n, a->H * a->N, 2 * limit);
    }
}

static int is_short; /* fewer and smaller cases: in the emulation, or with --short for racecheck */
static int is_third; /* --third: runs every third case */
static int turn;     /* counts cases; with is_short, it decides whether a pass runs with `saved` */

/* Runs the check.  In the emulation, cases with N = 128 also run on a device with less shared memory than 9.0, which
 * uses other kernels. */
static void check_on_devices(const hard_case *k, void (*check)(const hard_case *k)) {
    if (is_third && turn % 3) {
        turn++;
        return;
    }
    check(k);
    if (k->c.args.wkv6.N == 128 && k->c.args.wkv6.dtype != GT_F32 && machine_choose(turn / 2 % 2 ? "sm_80" : "sm_86")) {
        check(k);
        machine_choose("sm_90");
    }
    turn++;
}

static void check_passes(const hard_case *k) {
    for (int pass = GT_FORWARD; pass <= GT_BACKWARD; pass++) {
        test_values in, truth, got;
        draw_inputs(k, (gt_pass)pass, &in);
        test_run(&test_truth, &k->c, (gt_pass)pass, &in, TEST_ALL, &truth);
        for (int i = 0; i < 2; i++) {
            if (is_short && i != (turn + pass) % 2) continue;
            if (test_run(&runners[i], &k->c, (gt_pass)pass, &in, TEST_ALL, &got))
                check_tensors(&runners[i], k, (gt_pass)pass, &got, &truth);
            if (k->in_detail) test_compare(&runners[i], &k->c, (gt_pass)pass, &got, &truth, NULL);
            test_free(&got);
        }
        test_free(&in), test_free(&truth);
    }
}

static void check_case(const hard_case *k) { check_on_devices(k, check_passes); }

/* ---- variants -------------------------------------------------------------------------------- */

/* Sets the dtype of activations and w.  The kind of decay (raw or log) and the number of segments depend on `turn`. */
static void set_variant(hard_case *k, gt_dtype dtype, int turn) {
    static const int64_t segments[] = {0, 1, 3};
    test_set_dtype(&k->c, dtype, GT_DTYPE_DEFAULT);
    k->c.seed = (uint64_t)turn;
    k->c.args.wkv6.decay = turn % 2 ? GT_DECAY_RAW : GT_DECAY_LOG;
    k->c.args.wkv6.segments = segments[turn % 3];
}

/* Runs the check in every dtype.  With is_short, runs it only in dtype number `turn` modulo 3. */
static void check_dtypes(const hard_case *given, int turn) {
    static const gt_dtype dtypes[] = {GT_BF16, GT_F16, GT_F32};
    for (int i = 0; i < 3; i++) {
        hard_case k = *given;
        if (is_short && i != turn % 3) continue;
        set_variant(&k, dtypes[i], turn + i);
        check_case(&k);
    }
}

#define WKV6(...) .op = "wkv6", .args.wkv6 = {.B = 1, __VA_ARGS__}
#define NORMAL(tensor, mean, spread)                                                                                   \
    { tensor, mean, spread, 0, 0 }

/* ---- resets ---- */

/* The distance between resets, in tokens.  After 64 resets at this distance, every position of a chunk of 64 has had
 * one. */
static int reset_interval(void) { return is_short ? 17 : 65; }

/* Resets all channels of head 0, and some channels of head 1. */
static double resetting(test_random *random, int t, int h, int n) {
    const double decay = -exp(-3 + test_normal(random));
    const int at_reset = t % reset_interval() == 0, count = t / reset_interval();
    const int is_reset = at_reset && (h == 0 || (n + count) % 5 < 2);
    return is_reset ? -INFINITY : decay;
}

/* Decays of exactly 0: all decays of head 0, and half of the decays of head 1. */
static double forgetting(test_random *random, int t, int h, int n) {
    const double decay = -exp(-3 + test_normal(random));
    (void)t, (void)n;
    return h == 0 || test_uniform(random) < 0.5 ? -INFINITY : decay;
}

static void check_resets(void) {
    const hard_case resets = {
        .c = {WKV6(.T = 64 * reset_interval(), .H = 2, .N = 64), .name = "resets"}, .decay = resetting, .in_detail = 1};
    hard_case zeros = resets;
    zeros.c.name = "zeros", zeros.c.args.wkv6.T = 130, zeros.decay = forgetting;
    check_dtypes(&resets, 0);
    if (is_short) check_dtypes(&resets, 2);
    for (int turn = 0; turn < 3; turn++) check_dtypes(&zeros, turn);
    test_group("wkv6", "resets at every position of a chunk");
}

/* ---- decays near 1 ---- */

/* k v^T has a mean above 0, so the state grows with every token, up to 16384. */
static void check_accumulation(void) {
    const int64_t T = is_short ? 600 : 65536;
    const hard_case k = {
        .c = {WKV6(.T = T, .H = 1, .N = 64), .name = "accumulates",
              .fill = {NORMAL("k", 0.5, 0.5), NORMAL("v", 0.5, 0.5), NORMAL("r", 0, 0.05), NORMAL("w", log(1e-6), 0)}},
        .loss = 0.05};
    check_dtypes(&k, 0);
    if (is_short) check_dtypes(&k, 1);
    test_group("wkv6", "decays of 1 - 1e-6");
}

/* ---- channels of different speed ---- */

static double all_speeds(test_random *random, int t, int h, int n) {
    const double speeds[] = {-INFINITY, -20, -3, log(0.5), log(0.99), -1e-6};
    (void)t, (void)h;
    return speeds[n % 6] * (0.9 + 0.1 * test_uniform(random));
}

/* The fastest channel decays by nearly 2^62 in 16 tokens.  Kernels compute faster decays on another path. */
static double mild_speeds(test_random *random, int t, int h, int n) {
    const double speeds[] = {-2.7, -1.5, log(0.5), log(0.99), -1e-6};
    (void)t, (void)h;
    return speeds[n % 5] * (0.9 + 0.1 * test_uniform(random));
}

/* Each channel changes its speed during the sequence. */
static double changing_speeds(test_random *random, int t, int h, int n) {
    return (t + 3 * n) % 50 < 40 ? mild_speeds(random, t, h, n + t / 50) : all_speeds(random, t, h, n + t / 50);
}

/* Almost no decay, and strong decays at a few tokens.  Decays of exactly 0 would not do: there dw would show the
 * rounding of larger sums. */
static double nearly_resetting(test_random *random, int t, int h, int n) {
    static const double strong[] = {-70, -30, -9};
    (void)random, (void)h;
    return (t + 7 * n) % 23 == 0 ? strong[n % 3] : -1e-5;
}

/* Tests channels of different speeds.  dw of a slow channel hardly changes from token to token.  With inputs of mean 0,
 * all of such a channel may be small by chance, so only cases with another mean are judged by channel. */
static void check_speeds(void) {
    static log_decay *const decays[] = {all_speeds, mild_speeds, changing_speeds, nearly_resetting};
    static const int64_t sizes[] = {64, 32, 128};
    static const test_fill with_mean[] = {NORMAL("r", 0.5, 0.5), NORMAL("k", 0.5, 0.5), NORMAL("v", 0.5, 0.5),
                                          NORMAL("dy", 0.5, 0.5)};
    for (int i = 0; i < 12; i++) {
        /* judged as a whole; several heads, since a few slow channels make up dw, and share one error in each chunk */
        hard_case k = {.c = {WKV6(.T = is_short ? 200 : 600, .H = 3, .N = sizes[i / 4]), .name = "speeds"},
                       .decay = decays[i % 4]};
        check_dtypes(&k, i / 4 + i % 4);
        memcpy(k.c.fill, with_mean, sizeof with_mean);
        k.c.name = "speeds, by channel", k.c.args.wkv6.H = 1, k.loss = 0.01, k.by_channel = 1;
        check_dtypes(&k, i / 4 + i % 4);
    }
    test_group("wkv6", "fast and slow channels");
}

/* The decays with the largest error of dw in bf16: all tokens of a slow channel's chunk share one error of S, and
 * errors of G add up. */
static double slowest(test_random *random, int t, int h, int n) {
    (void)t, (void)h, (void)n;
    return -exp(-8 + 0.5 * test_normal(random));
}

/* As `slowest`, except for one fast channel, for which the kernels take another path for the whole head. */
static double slowest_but_one(test_random *random, int t, int h, int n) {
    return n == 5 ? -12 : slowest(random, t, h, n);
}

static void check_slow_heads(void) {
    static log_decay *const decays[] = {slowest, slowest_but_one};
    const int heads = is_short ? 1 : 4;
    for (int i = 0; i < 12 * heads; i++) {
        const int is_long = i / 3 % 2;
        hard_case k = {.c = {WKV6(.T = !is_long   ? 128
                                       : is_short ? 200
                                                  : 600,
                                  .H = 1, .N = 32 << i % 3),
                             .name = "slow", .absent = "state_in state_out dstate_in dstate_out"},
                       .decay = decays[i / 6 % 2]};
        if (is_short && is_long && k.c.args.wkv6.N == 128) continue;
        set_variant(&k, GT_BF16, i + i / 12);
        check_case(&k);
    }
    test_group("wkv6", "heads that are slow in every channel, or all but one");
}

/* ---- the loss ---- */

static void check_final_state(void) {
    const int64_t T = is_short ? 130 : 1000;
    const hard_case k = {
        .c = {WKV6(.T = T, .H = 2, .N = 64), .name = "final state", .fill = {NORMAL("dy", 0, 0), NORMAL("w", -5, 1)}}};
    for (int turn = 0; turn < 3; turn++) check_dtypes(&k, turn);
    test_group("wkv6", "loss on the final state alone");
}

/* ---- large states ---- */

static double slowly(test_random *random, int t, int h, int n) {
    (void)t, (void)h, (void)n;
    return -exp(-5 + test_normal(random));
}

static void check_large_states(void) {
    static log_decay *const decays[] = {slowly, mild_speeds, resetting};
    for (int64_t N = 32; N <= 128; N *= 2) {
        for (int i = 0; i < 3; i++) {
            hard_case k = {.c = {WKV6(.T = is_short ? 130 : 1000, .H = 1, .N = N), .name = "large states",
                                 .fill = {NORMAL("k", 0, 300), NORMAL("v", 0, 300), NORMAL("r", 0, 1e-4),
                                          NORMAL("state_in", 0, 3e6)}},
                           .decay = decays[i],
                           .loss = 1e-4};
            if (is_short && N == 128 && i > 0) continue;
            set_variant(&k, GT_F16, i);
            check_case(&k);
        }
    }
    test_group("wkv6", "fp16 beside states of up to 1e7");
}

/* ---- anything that has a finite truth ---- */

static double extreme(test_random *random, int t, int h, int n) {
    static const double decays[] = {0, -1e-40, -1e-6, -1e-3, -0.7, -4.3, -20, -87, -104, -1e4, -1e37, -INFINITY};
    /* blocks of 16 tokens x 16 channels: slow (0), mixed (1) or fast (2) */
    const int group = (t / 16 + n / 16 + h) % 3;
    const int first = group == 2 ? 6 : 0, count = group == 1 ? 12 : 6;
    return decays[first + (int)(test_uniform(random) * count)];
}

/* Tests small and large factors.  The last case has large products, and channels that decay as in `mild_speeds`. */
static void check_extremes(void) {
    static const double sizes[][2] = {{1e-3, 1e6}, {1, 1e3}, {1e3, 1}, {1e6, 1e-3}, {1e5, 1e5}};
    for (int i = 0; i < 5; i++) {
        hard_case k = {
            .c = {WKV6(.T = 130, .H = 1, .N = 64), .name = "extremes", .absent = "dstate_out",
                  .fill = {NORMAL("k", 0, sizes[i][0]), NORMAL("v", 0, sizes[i][1]), NORMAL("r", 0, sizes[i][0])}},
            .decay = i < 4 ? extreme : mild_speeds,
            .loss = 1e-3};
        set_variant(&k, GT_BF16, i);
        check_case(&k);
        set_variant(&k, GT_F32, i);
        if (!is_short || i == 0) check_case(&k);
    }
    test_group("wkv6", "extreme decays and factors");
}

/* ---- neighbours ---- */

/* Sets the inputs of all batch elements except b to NaN. */
static void spoil_neighbours(const test_case *c, gt_pass pass, int64_t b, test_values *in) {
    const gt_op *op = test_table(c);
    for (int i = 0; op->tensors[i].name; i++) {
        const gt_tensor *t = &op->tensors[i];
        const int64_t count = test_count(c, pass, t), each = count / c->args.wkv6.B;
        if (!in->of[i] || test_axis(c, t, 'B') != 0) continue;
        for (int64_t j = 0; j < count; j++)
            if (j / each != b) in->of[i][j] = NAN;
    }
}

/* A batch element must give the same bits whether the other elements are NaN or clean.  With a fixed number of
 * segments, it must also give these bits in a call without other elements. */
static void check_neighbours_in(const hard_case *k, const test_runner *r, gt_pass pass) {
    const int64_t b = 1, first = k->c.args.wkv6.segments ? b : 0; /* b: the middle batch element */
    test_case clean = k->c;
    test_values in, part, out, got, expected;
    if (first == b) clean.args.wkv6.B = 1;
    draw_inputs(k, pass, &in);
    test_cut(&k->c, pass, &in, 'B', first, clean.args.wkv6.B, &part);
    test_run(r, &clean, pass, &part, TEST_ALL, &out);
    test_cut(&clean, pass, &out, 'B', b - first, 1, &expected);
    test_free(&part), test_free(&out);

    spoil_neighbours(&k->c, pass, b, &in);
    test_run(r, &k->c, pass, &in, TEST_ALL, &out);
    test_cut(&k->c, pass, &out, 'B', b, 1, &got);
    clean.args.wkv6.B = 1;
    test_same(r, &clean, pass, "beside NaN", &got, &expected, 0);
    test_free(&in), test_free(&out), test_free(&got), test_free(&expected);
}

static void check_neighbours_of(const hard_case *k) {
    for (int saved = 0; saved < 2; saved++) {
        if (is_short && saved != turn % 2) continue;
        check_neighbours_in(k, &runners[saved], GT_FORWARD);
        check_neighbours_in(k, &runners[saved], GT_BACKWARD);
    }
}

/* Tests that a batch element does not depend on its neighbours.  The cases lack du, which sums over the batch. */
static void check_neighbours(void) {
    static const gt_dtype dtypes[] = {GT_BF16, GT_F32, GT_F16};
    for (int i = 0; i < (is_short ? 6 : 27); i++) {
        hard_case k = {.c = {WKV6(.T = 130, .H = 1, .N = 32 << i % 3), .name = "neighbours", .absent = "du"},
                       .decay = changing_speeds};
        set_variant(&k, dtypes[(i + i / 9) % 3], i / 3);
        k.c.args.wkv6.B = 3;
        check_on_devices(&k, check_neighbours_of);
    }
    test_group("wkv6", "bits that neighbours do not change");
}

/* ---- last chunks ---- */

/* Without dstate_out, the kernels compute the last chunk of a sequence, whole or partial, beside the reverse pass and
 * not in it. */
static void check_last_chunks(void) {
    for (int i = 0; i < 6; i++) {
        hard_case k = {.c = {WKV6(.T = i % 2 ? 128 : 150, .H = 2, .N = 32 << i / 2), .name = "last",
                             .absent = i / 2 == 1 ? "state_in state_out dstate_in dstate_out" : "dstate_out"},
                       .in_detail = 1};
        k.c.args.wkv6.B = 2;
        set_variant(&k, GT_BF16, i);
        k.c.args.wkv6.segments = 1;
        turn = 0; /* runs backward with `saved` */
        check_case(&k);
    }
    test_group("wkv6", "last chunks beside the sweep");
}

/* ---- long sequences ---- */

/* Checks the size of backward's workspace.  If dv serves as scratch memory, the workspace is at most as large as r.
 * Otherwise it is at most 1/2 + N / 64 times as large.  The size counts chunks, and each packed sequence may add one
 * chunk.  A query without saved, dk and dv must not give a smaller answer. */
static void check_room(const test_case *c) {
    static _Alignas(16) char any[16];
    gt_wkv6_args a = c->args.wkv6;
    gt_workspace need;
    const int64_t elements = a.B * a.T * a.H * a.N, size = elements * (a.dtype == GT_F32 ? 4 : 2);
    const int64_t chunks = a.T / 64 + a.seq_capacity; /* T is a multiple of 64, so the division is exact */
    /* with N = 128, dv serves as scratch memory only if a block can have 163 KB of shared memory, as on the emulated
     * device */
    const int is_scratch = !c->absent && (a.N < 128 || (a.dtype != GT_F32 && machine_is_slow));
    const int64_t most = is_scratch ? size : (size / 2 + size * a.N / 64) * chunks / (a.T / 64);
    a.r = a.k = a.w = a.v = a.dy = a.dr = a.dk = a.dw = a.dv = a.saved = any;
    a.u = a.du = (float *)any;
    if (test_is_packed(c)) a.cu_seqlens = (int32_t *)any;
    if (c->absent) a.dv = NULL;
    const gt_status status = gt_wkv6_workspace(&a, &need);
    test_check(status == GT_OK && (int64_t)need.backward <= most,
               "%s: %s, or the workspace has too many bytes: %zu, where r has %lld", test_describe(c, GT_BACKWARD),
               gt_status_string(status), need.backward, (long long)size);
    gt_workspace enough;
    a.saved = a.dk = a.dv = NULL;
    test_check(gt_wkv6_workspace(&a, &enough) == GT_OK && enough.backward >= need.backward,
               "%s: a query without saved, dk and dv answers %zu bytes: must be at least %zu, the answer with them",
               test_describe(c, GT_BACKWARD), enough.backward, need.backward);
}

/* Tests the places of G: in dk and dv; without dv, and in fp32 with N = 128, in the workspace. */
static void check_long(void) {
    static const struct {
        gt_dtype dtype;
        int64_t B, H, N, segments;
        const char *absent;
    } calls[] = {{GT_BF16, 2, 1, 64, 1, "dv"},  {GT_BF16, 1, 4, 64, 0, "dv"},  {GT_F16, 1, 2, 32, 1, NULL},
                 {GT_F16, 1, 1, 64, 1, NULL},   {GT_BF16, 1, 1, 128, 1, "dv"}, {GT_F32, 1, 2, 64, 0, "dv"},
                 {GT_F16, 1, 1, 128, 1, NULL},  {GT_F16, 1, 1, 64, 1, "dv"},   {GT_F16, 1, 2, 64, 0, "dv"},
                 {GT_F32, 1, 1, 64, 1, "dv"},   {GT_BF16, 2, 1, 64, 1, NULL},  {GT_BF16, 1, 2, 64, 0, NULL},
                 {GT_BF16, 1, 1, 128, 1, NULL}, {GT_F32, 1, 1, 64, 1, NULL},   {GT_F32, 1, 1, 128, 1, NULL}};
    static const int64_t lengths[] = {300, 0, 500, 64, 200, 0}, two_lengths[] = {480, 570};
    for (int i = 0; i < (int)(sizeof calls / sizeof *calls); i++) {
        for (int is_packed = 0; is_packed < (is_short && i % 3 == 0 ? 1 : 2); is_packed++) {
            hard_case k = {.c = {WKV6(.T = 1088, .H = calls[i].H, .N = calls[i].N), .name = "long"},
                           .decay = slowly,
                           .in_detail = 1};
            const int sequences = calls[i].segments == 1 ? 6 : 2;
            set_variant(&k, calls[i].dtype, i);
            k.c.absent = calls[i].absent;
            k.c.args.wkv6.B = is_packed ? 1 : calls[i].B;
            k.c.args.wkv6.segments = calls[i].segments;
            if (is_packed) {
                test_set_sequences(&k.c, sequences, sequences);
                k.c.packed.lengths = sequences == 6 ? lengths : two_lengths;
            }
            if (calls[i].segments == 1) check_room(&k.c);
            check_case(&k);
        }
    }
    test_group("wkv6", "G in gradients, or in workspace");
}

/* ---- capacities ---- */

/* Tests capacities far above the number of sequences.  There are more work items than blocks, so a block takes several
 * items in turn.  Ten times the capacity may add at most a tenth to the number of blocks. */
static void check_capacities(void) {
    enum { MOST = 600 };
    static const struct {
        gt_dtype dtype;
        int64_t H, N, segments;
    } calls[] = {{GT_BF16, 3, 32, 0},  {GT_F32, 1, 64, 0}, {GT_F16, 1, 128, 0},
                 {GT_BF16, 1, 64, 3},  {GT_F16, 2, 32, 0}, {GT_F32, 1, 128, 0},
                 {GT_BF16, 1, 128, 0}, {GT_F16, 2, 64, 0}, {GT_F32, 2, 32, 2}};
    static int64_t lengths[MOST];
    const int count = is_short ? 30 : MOST;
    for (int i = 0; i < count; i++) lengths[i] = i % 11 == 5 ? 65 : i % 4;
    for (int i = 0; i < (int)(sizeof calls / sizeof *calls); i++) {
        int64_t blocks[2];
        const int first_turn = turn;
        for (int is_large = 0; is_large < 2; is_large++) {
            hard_case k = {.c = {WKV6(.T = 8 * count + 3, .H = calls[i].H, .N = calls[i].N), .name = "capacity"},
                           .decay = slowly,
                           .in_detail = 1};
            set_variant(&k, calls[i].dtype, i);
            k.c.args.wkv6.segments = calls[i].segments;
            test_set_sequences(&k.c, count, is_large && is_short ? 10 * count : count + is_large);
            k.c.packed.lengths = lengths;
            turn = first_turn;
            blocks[is_large] = -machine_blocks();
            check_case(&k);
            blocks[is_large] += machine_blocks();
        }
        test_check(blocks[1] <= blocks[0] + blocks[0] / 10,
                   "N = %lld: %lld blocks, but %lld blocks with ten times the capacity", (long long)calls[i].N,
                   (long long)blocks[0], (long long)blocks[1]);
    }
    test_group("wkv6", "capacities");
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
        } else {
            fprintf(stderr, "unknown option %s\n", argv[i]);
            return 2;
        }
    }
    check_resets();
    check_accumulation();
    check_speeds();
    check_slow_heads();
    check_final_state();
    check_large_states();
    check_extremes();
    check_neighbours();
    check_last_chunks();
    check_long();
    check_capacities();
    return test_finish();
}
