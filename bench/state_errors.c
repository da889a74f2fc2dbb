/* bench/state_errors.c - measures the errors of 16-bit and int8 states over long sequences:
 * build/bench/state_errors >bench/results/state_errors.csv
 *
 * The CPU twin of ssd decodes TOKENS tokens, one token per step, so that the state is rounded after every token, as in
 * a server.  Each head has a different decay per token, exp(-1 / memory).  Activations are fp32, so that only the state
 * causes errors.  The column `error` is |y - truth| / |truth| in l2, over the last WINDOW tokens of a head.  The truth
 * is the recurrence in float64.  The program takes about a minute. */
#include "gt_kernels.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HEADS = 5, P = 32, N = 16, TOKENS = 100000, WINDOW = 32 };
static const int memory[HEADS] = {10, 100, 1000, 10000, 100000};
static const int marks[] = {1, 1000, TOKENS};

typedef struct token {
    float x[HEADS * P], B[N], C[N];
} token;

/* Draws a normal number that bf16 holds exactly. */
static float draw(uint64_t *state) {
    double sum = 0;
    for (int i = 0; i < 12; i++) {
        *state = *state * 6364136223846793005u + 1442695040888963407u;
        sum += (double)(*state >> 40) * 0x1p-24;
    }
    return gt_bf16_to_f32(gt_f32_to_bf16((float)(sum - 6)));
}

static void draw_token(int64_t t, token *k) {
    uint64_t state = (uint64_t)t * 0x9e3779b97f4a7c15u + 1;
    for (int i = 0; i < HEADS * P; i++) k->x[i] = draw(&state);
    for (int n = 0; n < N; n++) k->B[n] = draw(&state), k->C[n] = draw(&state);
}

/* Runs one step in float64 and writes y of all heads. */
static void step_truth(const token *k, double *h, double *y) {
    for (int head = 0; head < HEADS; head++) {
        const double decay = exp((double)(-1.0f / (float)memory[head]));
        for (int p = 0; p < P; p++) {
            double *const row = h + (head * P + p) * N, x = k->x[head * P + p];
            y[head * P + p] = 0;
            for (int n = 0; n < N; n++) {
                row[n] = decay * row[n] + x * k->B[n];
                y[head * P + p] += row[n] * k->C[n];
            }
        }
    }
}

/* Decodes all tokens with states of a dtype, and prints the errors at the marks. */
static int run(gt_dtype dtype, const char *name, int is_random) {
    static float state[HEADS * P * N], scale[HEADS * P];
    static double h[HEADS * P * N], error[WINDOW][HEADS], size[WINDOW][HEADS];
    const float dt[HEADS] = {1, 1, 1, 1, 1};
    const int32_t seed[] = {1, 2};
    float A[HEADS], y[HEADS * P];
    int mark = 0;
    for (int head = 0; head < HEADS; head++) A[head] = -1.0f / (float)memory[head];
    memset(state, 0, sizeof state), memset(scale, 0, sizeof scale), memset(h, 0, sizeof h),
        memset(error, 0, sizeof error), memset(size, 0, sizeof size);
    for (int32_t t = 0; t < TOKENS; t++) {
        token k;
        double truth[HEADS * P];
        gt_ssd_args a;
        draw_token(t, &k);
        memset(&a, 0, sizeof a);
        a.B = a.T = 1, a.H = HEADS, a.P = P, a.N = N, a.state_dtype = dtype;
        a.x = k.x, a.dt = dt, a.A = A, a.Bm = k.B, a.Cm = k.C, a.y = y, a.state_out = state;
        if (dtype == GT_INT8) a.state_scale = scale;
        if (is_random) a.rounding_seed = seed, a.rounding_steps = &t;
        if (gt_ref_ssd_step(&a) != GT_OK) return fprintf(stderr, "%s\n", gt_last_error()), 1;
        step_truth(&k, h, truth);
        for (int head = 0; head < HEADS; head++) {
            double *const e = &error[t % WINDOW][head], *const s = &size[t % WINDOW][head];
            *e = *s = 0;
            for (int i = head * P; i < (head + 1) * P; i++) {
                *e += (y[i] - truth[i]) * (y[i] - truth[i]);
                *s += truth[i] * truth[i];
            }
        }
        if (t + 1 != marks[mark]) continue;
        for (int head = 0; head < HEADS; head++) {
            double e = 0, s = 0;
            for (int i = 0; i < WINDOW; i++) e += error[i][head], s += size[i][head];
            printf("%s,%s,%d,%d,%.2e\n", name, is_random ? "stochastic" : "nearest", memory[head], marks[mark],
                   sqrt(e / s));
        }
        mark++;
    }
    return 0;
}

int main(void) {
    printf("state,rounding,memory,tokens,error\n");
    return run(GT_F32, "fp32", 0) || run(GT_BF16, "bf16", 0) || run(GT_BF16, "bf16", 1) || run(GT_F16, "fp16", 0) ||
           run(GT_F16, "fp16", 1) || run(GT_INT8, "int8", 0) || run(GT_INT8, "int8", 1);
}
