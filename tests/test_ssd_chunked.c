/* Compares the chunked form of ssd (ssd_chunked.c, docs/ssd.md) with the double twin, which computes token by token.
 * Both must compute the same function.
 *
 *     test_ssd_chunked
 */
#include "gt_test.h"
#include "ref64.h"
#include "ssd_chunked.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

enum {
    ROWS = CHUNKED_T * CHUNKED_H * CHUNKED_P,
    COLUMNS = CHUNKED_T * CHUNKED_H * CHUNKED_N,
    STATE = CHUNKED_H * CHUNKED_P * CHUNKED_N
};

typedef struct arrays {
    double x[ROWS], dt[CHUNKED_T * CHUNKED_H], A[CHUNKED_H], Bm[COLUMNS], Cm[COLUMNS], Dskip[CHUNKED_H * CHUNKED_P];
    double z[ROWS], dt_bias[CHUNKED_H], state_in[STATE], dy[ROWS], dstate_out[STATE];
} arrays;

typedef struct results {
    double y[ROWS], state_out[STATE], dx[ROWS], dz[ROWS], ddt[CHUNKED_T * CHUNKED_H], dBm[COLUMNS], dCm[COLUMNS];
    double dA[CHUNKED_H], ddt_bias[CHUNKED_H], dDskip[CHUNKED_H * CHUNKED_P], dstate_in[STATE];
} results;

/* Distributions of dt and A. */
typedef struct regime {
    const char *name;
    /* dt, spread: mean and deviation of a normal distribution; A: of head 0, up to twice as large in other heads */
    double dt, spread, A;
    int softplus, limit;
} regime;

static const regime regimes[] = {
    {"trained", -3, 1.5, -1, 1, 0},          /* Delta is about 0.05, A is -1 to -2 */
    {"slow decay", -9, 1, -0.5, 1, 0},       /* states remember thousands of tokens */
    {"strong decay", 2, 2, -8, 1, 0},        /* a token forgets the tokens before it */
    {"limits", 0, 1, -1, 1, 1},              /* both limits clamp Delta of some tokens */
    {"growth", -4, 1, 0.2, 1, 0},            /* A is positive */
    {"delta of any sign", 0, 0.02, -1, 0, 0} /* without softplus some tokens make the state grow */
};

static void draw(double *x, int count, double mean, double deviation, test_random *random) {
    for (int i = 0; i < count; i++) x[i] = mean + deviation * test_normal(random);
}

static void draw_inputs(const regime *how, uint64_t seed, arrays *in) {
    test_random random = {seed};
    draw(in->x, ROWS, 0, 1, &random);
    draw(in->dt, CHUNKED_T * CHUNKED_H, how->dt, how->spread, &random);
    draw(in->Bm, COLUMNS, 0, 1, &random);
    draw(in->Cm, COLUMNS, 0, 1, &random);
    draw(in->Dskip, CHUNKED_H * CHUNKED_P, 0, 1, &random);
    draw(in->z, ROWS, 0, 1, &random);
    draw(in->dt_bias, CHUNKED_H, 0, 0.1, &random);
    draw(in->state_in, STATE, 0, 1, &random);
    draw(in->dy, ROWS, 0, 1, &random);
    draw(in->dstate_out, STATE, 0, 1, &random);
    for (int h = 0; h < CHUNKED_H; h++) in->A[h] = how->A * (1 + h / (double)CHUNKED_H);
}

static void set_arrays(gt_ssd_args *a, const arrays *in, int number, results *out) {
    a->x = in->x, a->dt = in->dt, a->A = (const float *)in->A, a->Bm = in->Bm, a->Cm = in->Cm, a->dy = in->dy;
    a->Dskip = number % 5 == 1 ? NULL : (const float *)in->Dskip;
    a->z = number % 2 ? in->z : NULL;
    a->dt_bias = number % 5 == 2 ? NULL : (const float *)in->dt_bias;
    a->state_in = number % 5 == 3 ? NULL : (const float *)in->state_in;
    a->dstate_out = number % 5 == 4 ? NULL : (const float *)in->dstate_out;
    a->y = out->y, a->state_out = (float *)out->state_out;
    a->dx = out->dx, a->ddt = out->ddt, a->dBm = out->dBm, a->dCm = out->dCm, a->dz = a->z ? out->dz : NULL;
    a->dA = (float *)out->dA, a->ddt_bias = (float *)out->ddt_bias, a->dDskip = (float *)out->dDskip;
    a->dstate_in = (float *)out->dstate_in;
}

/* The largest error divided by the largest number, or NaN if any number is NaN. */
static double error_of(const double *got, const double *truth, int64_t count) {
    double largest = 0, error = 0;
    for (int64_t i = 0; i < count; i++) {
        const double difference = fabs(got[i] - truth[i]);
        largest = fmax(largest, fabs(truth[i]));
        if (isnan(difference)) return difference;
        error = fmax(error, difference);
    }
    return error == 0 ? 0 : error / largest;
}

static void check(const char *name, const char *what, const gt_ssd_args *a, const double *got, const double *truth,
                  int64_t count) {
    const double error = error_of(got, truth, count);
    test_check(error <= 1e-12, "%s, T %lld H %lld G %lld P %lld N %lld, %lld segments: %s is off by %.2e", name,
               (long long)a->T, (long long)a->H, (long long)a->G, (long long)a->P, (long long)a->N,
               (long long)a->segments, what, error);
}

static void check_regime(const regime *how, int64_t T, int number) {
    static arrays in;
    static results truth, got;
    gt_ssd_args a = {.B = 1, .T = T, .H = number % 3 ? CHUNKED_H : 3, .P = CHUNKED_P - number % 4, .N = CHUNKED_N};
    a.N -= number % 7;
    a.G = a.H == 3 ? 3 : 1 + number % 2;
    a.segments = 1 + number % 4;
    a.softplus = how->softplus, a.dt_limit = how->limit, a.dt_min = 0.3f, a.dt_max = 1.2f;
    a.Dskip_per_channel = number / 2 % 2;
    draw_inputs(how, (uint64_t)(1000 * T + number), &in);
    memset(&truth, 0, sizeof truth);
    memset(&got, 0x7f, sizeof got); /* a bit pattern that no result has, so a missing write shows */
    set_arrays(&a, &in, number, &truth);
    test_check(gt_ref64_ssd_forward(&a) == GT_OK && gt_ref64_ssd_backward(&a) == GT_OK, "twin: %s", gt_last_error());
    set_arrays(&a, &in, number, &got);
    ssd_chunked_forward(&a);
    ssd_chunked_backward(&a);
    const int64_t rows = T * a.H * a.P, columns = T * a.G * a.N, state = a.H * a.P * a.N;
    check(how->name, "y", &a, got.y, truth.y, rows);
    check(how->name, "state_out", &a, got.state_out, truth.state_out, state);
    check(how->name, "dx", &a, got.dx, truth.dx, rows);
    if (a.z) check(how->name, "dz", &a, got.dz, truth.dz, rows);
    check(how->name, "ddt", &a, got.ddt, truth.ddt, T * a.H);
    check(how->name, "dBm", &a, got.dBm, truth.dBm, columns);
    check(how->name, "dCm", &a, got.dCm, truth.dCm, columns);
    check(how->name, "dA", &a, got.dA, truth.dA, a.H);
    check(how->name, "ddt_bias", &a, got.ddt_bias, truth.ddt_bias, a.H);
    check(how->name, "dDskip", &a, got.dDskip, truth.dDskip, a.H * (a.Dskip_per_channel ? a.P : 1));
    check(how->name, "dstate_in", &a, got.dstate_in, truth.dstate_in, state);
}

int main(void) {
    static const int lengths[] = {1, 7, 16, 63, 64, 65, 127, 128, 129, 200, 257, CHUNKED_T};
    int number = 0;
    for (size_t i = 0; i < sizeof regimes / sizeof *regimes; i++) {
        for (size_t t = 0; t < sizeof lengths / sizeof *lengths; t++, number++)
            check_regime(&regimes[i], lengths[t], number);
        test_group("ssd", regimes[i].name);
    }
    return test_finish();
}
