/* The chunked form of ssd, step by step as the tensor-core kernels compute it.  A number in brackets, such as [2], is a
 * section of docs/ssd.md, which has the same formulas.  Section 8 of that file names the functions of gt/ssd for each
 * step.
 *
 * Terms: h is the state and G its gradient.  A chunk has 64 tokens, and a slot has two chunks.  Each head is computed
 * alone, as in the kernels; only dB and dC are sums over the heads of a group.  The loops over tokens, rows p and
 * columns n are matrix products in the kernels. */
#include "ssd_chunked.h"
#include <math.h>
#include <string.h>

/* ---- [1] sizes and decays -------------------------------------------------------------------- */

enum { HALF = 8, BLOCK = 16, CHUNK = 64, CHECKPOINT = 128, SLOTS = (CHUNKED_T + CHECKPOINT - 1) / CHECKPOINT };

typedef double state[CHUNKED_P][CHUNKED_N];

/* The inputs of a head.  The last slot is filled up with tokens of zeros with Delta = 0, which change nothing. */
typedef struct head {
    int T, P, N, slots;
    double A, skip[CHUNKED_P];
    double delta[SLOTS * CHECKPOINT], slope[SLOTS * CHECKPOINT]; /* slope: dDelta / ddt */
    double a[SLOTS * CHECKPOINT];                                /* Delta A */
    double x[SLOTS * CHECKPOINT][CHUNKED_P];
    double gate[SLOTS * CHECKPOINT][CHUNKED_P];   /* silu(z); 1 without z */
    double dgate[SLOTS * CHECKPOINT][CHUNKED_P];  /* silu'(z) */
    double dy[SLOTS * CHECKPOINT][CHUNKED_P];     /* gradient of the gated y, the input dy */
    double dinner[SLOTS * CHECKPOINT][CHUNKED_P]; /* gradient of y before the gate: dy silu(z) */
    double B[SLOTS * CHECKPOINT][CHUNKED_N], C[SLOTS * CHECKPOINT][CHUNKED_N];
} head;

static double parameter(const float *array, int i) { return array ? ((const double *)array)[i] : 0; }

static void load_delta(const gt_ssd_args *a, int t, int h, head *x) {
    const double v = ((const double *)a->dt)[t * a->H + h] + parameter(a->dt_bias, h);
    x->delta[t] = a->softplus ? (v > 0 ? v + log1p(exp(-v)) : log1p(exp(v))) : v;
    x->slope[t] = a->softplus ? 1 / (1 + exp(-v)) : 1;
    if (a->dt_limit && (x->delta[t] < a->dt_min || x->delta[t] > a->dt_max)) {
        x->delta[t] = x->delta[t] < a->dt_min ? a->dt_min : a->dt_max;
        x->slope[t] = 0;
    }
    x->a[t] = x->delta[t] * x->A;
}

static void load_head(const gt_ssd_args *a, int h, int is_backward, head *x) {
    const int g = h / (int)(a->H / a->G);
    memset(x, 0, sizeof *x);
    x->T = (int)a->T, x->P = (int)a->P, x->N = (int)a->N;
    x->slots = (x->T + CHECKPOINT - 1) / CHECKPOINT;
    x->A = ((const double *)a->A)[h];
    for (int p = 0; p < x->P; p++) x->skip[p] = parameter(a->Dskip, a->Dskip_per_channel ? h * x->P + p : h);
    for (int t = 0; t < x->T; t++) {
        load_delta(a, t, h, x);
        for (int p = 0; p < x->P; p++) {
            const int64_t i = (t * a->H + h) * a->P + p;
            const double z = a->z ? ((const double *)a->z)[i] : 0, sigmoid = 1 / (1 + exp(-z));
            x->x[t][p] = ((const double *)a->x)[i];
            x->gate[t][p] = a->z ? z * sigmoid : 1;
            x->dgate[t][p] = a->z ? sigmoid * (1 + z * (1 - sigmoid)) : 0;
            if (!is_backward) continue;
            x->dy[t][p] = ((const double *)a->dy)[i];
            x->dinner[t][p] = x->dy[t][p] * x->gate[t][p];
        }
        for (int n = 0; n < x->N; n++) {
            x->B[t][n] = ((const double *)a->Bm)[(t * a->G + g) * a->N + n];
            x->C[t][n] = ((const double *)a->Cm)[(t * a->G + g) * a->N + n];
        }
    }
}

static void load_state(const head *x, int h, state to, const float *from) {
    for (int p = 0; p < x->P; p++)
        for (int n = 0; n < x->N; n++) to[p][n] = parameter(from, (h * x->P + p) * x->N + n);
}

static void store_state(const head *x, int h, state from, float *to) {
    for (int p = 0; to && p < x->P; p++)
        for (int n = 0; n < x->N; n++) ((double *)to)[(h * x->P + p) * x->N + n] = from[p][n];
}

/* The decay factors of a chunk.  Each is exp of a sum of a's.  The sums are added up, not computed as differences
 * of other sums. */
typedef struct factors {
    double pre[CHUNK], suf[CHUNK], E;
    double L[CHUNK][CHUNK]; /* decay from token s to token t */
} factors;

/* Returns exp of the sum of a[first ... last - 1]. */
static double decay(const double *a, int first, int last) {
    double sum = 0;
    for (int m = first; m < last; m++) sum += a[m];
    return exp(sum);
}

/* L of a pair of tokens s <= t.  If both lie in one half of a block, L is a single exponential.  Otherwise L is a
 * product of exponentials: for the part of the span in t's block, for the whole blocks in between, and for the part in
 * s's block. */
static double pair_decay(const double *a, int t, int s) {
    const int t_half = t / HALF * HALF, s_half = s / HALF * HALF, t_block = t / BLOCK * BLOCK,
              s_block = s / BLOCK * BLOCK;
    if (t_half == s_half) return decay(a, s + 1, t + 1);
    if (t_block == s_block) return decay(a, t_half, t + 1) * decay(a, s + 1, s_half + HALF);
    return decay(a, t_block, t + 1) * decay(a, s_block + BLOCK, t_block) * decay(a, s + 1, s_block + BLOCK);
}

static void make_factors(const double *a, factors *f) {
    f->E = decay(a, 0, CHUNK);
    for (int t = 0; t < CHUNK; t++) {
        f->pre[t] = decay(a, 0, t + 1);
        f->suf[t] = decay(a, t + 1, CHUNK);
        for (int s = 0; s < CHUNK; s++) f->L[t][s] = s <= t ? pair_decay(a, t, s) : 0;
    }
}

static double dot(const double *a, const double *b, int count) {
    double sum = 0;
    for (int i = 0; i < count; i++) sum += a[i] * b[i];
    return sum;
}

/* ---- [2] forward of a chunk ------------------------------------------------------------------- */

/* Computes y without the gate, for the chunk that begins with token `first`.  h: the state before the chunk. */
static void make_y(const head *x, int first, const factors *f, state h, double y[CHUNK][CHUNKED_P]) {
    for (int t = 0; t < CHUNK; t++) {
        double M[CHUNK];
        for (int s = 0; s <= t; s++)
            M[s] = dot(x->C[first + t], x->B[first + s], x->N) * f->L[t][s] * x->delta[first + s];
        for (int p = 0; p < x->P; p++) {
            y[t][p] = f->pre[t] * dot(x->C[first + t], h[p], x->N) + x->skip[p] * x->x[first + t][p];
            for (int s = 0; s <= t; s++) y[t][p] += M[s] * x->x[first + s][p];
        }
    }
}

/* ---- [3] passes over states ------------------------------------------------------------------- */

/* Moves h from the start of the chunk to its end. */
static void advance(const head *x, int first, const factors *f, state h) {
    for (int p = 0; p < x->P; p++)
        for (int n = 0; n < x->N; n++) {
            double sum = 0;
            for (int s = 0; s < CHUNK; s++)
                sum += x->delta[first + s] * f->suf[s] * x->x[first + s][p] * x->B[first + s][n];
            h[p][n] = f->E * h[p][n] + sum;
        }
}

/* Moves G from the end of the chunk to its start. */
static void retreat(const head *x, int first, const factors *f, state G) {
    for (int p = 0; p < x->P; p++)
        for (int n = 0; n < x->N; n++) {
            double sum = 0;
            for (int t = 0; t < CHUNK; t++) sum += f->pre[t] * x->dinner[first + t][p] * x->C[first + t][n];
            G[p][n] = f->E * G[p][n] + sum;
        }
}

static void pass_slot(const head *x, int slot, int is_reverse, state S) {
    for (int i = 0; i < CHECKPOINT / CHUNK; i++) {
        const int first = slot * CHECKPOINT + (is_reverse ? CHECKPOINT - CHUNK * (i + 1) : CHUNK * i);
        factors f;
        make_factors(x->a + first, &f);
        if (is_reverse)
            retreat(x, first, &f, S);
        else
            advance(x, first, &f, S);
    }
}

/* ---- [4] segments ------------------------------------------------------------------------------ */

static int segment_slots(const head *x, int64_t segments) {
    const int each = (int)((x->slots + segments - 1) / segments);
    return each > 0 ? each : 1;
}

/* Computes states[slot] from `outer`: h at the start of every slot or, with is_reverse, G at the end of every slot.
 * Also computes `end`, the state after the last segment.  Takes the same three steps as the kernels.  local: passes
 * over a segment from a zero state.  scan: computes the start states of all segments from these results.  final: passes
 * over each segment from its start state. */
static void pass_states(const head *x, int64_t segments, int is_reverse, state outer, state states[SLOTS], state end) {
    const int each = segment_slots(x, segments);
    static state start, now;
    memcpy(start, outer, sizeof start);
    for (int first = 0; first < x->slots; first += each) { /* segments in the order of the pass */
        const int last = first + each < x->slots ? first + each : x->slots;
        double log_decay = 0;
        memcpy(now, start, sizeof now);
        for (int i = first; i < last; i++) { /* final */
            const int slot = is_reverse ? x->slots - 1 - i : i;
            memcpy(states[slot], now, sizeof now);
            pass_slot(x, slot, is_reverse, now);
        }
        memcpy(end, now, sizeof now);
        memset(now, 0, sizeof now);
        for (int i = first; i < last; i++) { /* local */
            const int slot = is_reverse ? x->slots - 1 - i : i;
            pass_slot(x, slot, is_reverse, now);
            for (int t = 0; t < CHECKPOINT; t++) log_decay += x->a[slot * CHECKPOINT + t];
        }
        for (int p = 0; p < x->P; p++) /* scan: the start state of the next segment */
            for (int n = 0; n < x->N; n++) start[p][n] = exp(log_decay) * start[p][n] + now[p][n];
    }
}

void ssd_chunked_forward(const gt_ssd_args *a) {
    static head x;
    static state outer, h[SLOTS], now, end;
    for (int i = 0; i < a->H; i++) {
        load_head(a, i, 0, &x);
        load_state(&x, i, outer, a->state_in);
        memcpy(end, outer, sizeof end); /* the result if there are no tokens */
        pass_states(&x, a->segments, 0, outer, h, end);
        store_state(&x, i, end, a->state_out);
        for (int first = 0; first < x.T; first += CHUNK) {
            static double y[CHUNK][CHUNKED_P];
            factors f;
            if (first % CHECKPOINT == 0) memcpy(now, h[first / CHECKPOINT], sizeof now);
            make_factors(x.a + first, &f);
            make_y(&x, first, &f, now, y);
            advance(&x, first, &f, now);
            for (int t = first; t < x.T && t < first + CHUNK; t++)
                for (int p = 0; p < x.P; p++)
                    ((double *)a->y)[(t * a->H + i) * a->P + p] = y[t - first][p] * x.gate[t][p];
        }
    }
}

/* ---- [5] backward: the states that a chunk starts from ------------------------------------------- */

/* Computes h at the start and G at the end of the chunk at `first`.  Input: h at the start and G at the end of the
 * slot.  For the second chunk of a slot, h is moved through the first chunk; for the first chunk, G through the
 * second. */
static void chunk_states(const head *x, int first, state h, state G) {
    const int is_second = first % CHECKPOINT != 0, neighbour = is_second ? first - CHUNK : first + CHUNK;
    factors f;
    make_factors(x->a + neighbour, &f);
    if (is_second)
        advance(x, neighbour, &f, h);
    else
        retreat(x, neighbour, &f, G);
}

/* ---- [6] backward of a chunk and head ------------------------------------------------------------ */

/* Sums over the heads of a group: dB and dC for the tokens of a chunk, W for their pairs. */
typedef struct group_sums {
    double dB[CHUNK][CHUNKED_N], dC[CHUNK][CHUNKED_N], W[CHUNK][CHUNK];
} group_sums;

/* Sums over all tokens of a head. */
typedef struct head_sums {
    double dA, dbias, dskip[CHUNKED_P];
} head_sums;

/* Computes da_k, the gradient of a_k = Delta_k A.  It is the sum of all terms that contain the decay of token k,
 * computed by additions only. */
static void make_da(const double Gamma[CHUNK][CHUNK], const double *from_h, const double *to_G, double through,
                    double *da) {
    for (int k = 0; k < CHUNK; k++) {
        da[k] = through;
        for (int t = k; t < CHUNK; t++) {
            da[k] += from_h[t];
            for (int s = 0; s < k; s++) da[k] += Gamma[t][s];
        }
        for (int s = 0; s < k; s++) da[k] += to_G[s];
    }
}

static void chunk_gradients(const gt_ssd_args *a, const head *x, int i, int first, state h, state G, group_sums *group,
                            head_sums *sums) {
    static double S[CHUNK][CHUNK], w[CHUNK][CHUNK], Gamma[CHUNK][CHUNK], U[CHUNK][CHUNKED_P];
    double E[CHUNK], F[CHUNK], Z = 0, da[CHUNK];
    factors f;
    make_factors(x->a + first, &f);
    for (int t = 0; t < CHUNK; t++)
        for (int s = 0; s < CHUNK; s++) {
            const double dS = dot(x->dinner[first + t], x->x[first + s], x->P);
            S[t][s] = dot(x->C[first + t], x->B[first + s], x->N);
            w[t][s] = dS * f.L[t][s] * x->delta[first + s];
            group->W[t][s] += w[t][s];
            Gamma[t][s] = w[t][s] * S[t][s];
        }
    for (int t = 0; t < CHUNK; t++) {
        E[t] = F[t] = 0;
        for (int n = 0; n < x->N; n++) { /* terms with h or G, which come from outside the chunk */
            double of_h = 0, of_G = 0;
            for (int p = 0; p < x->P; p++) {
                of_h += f.pre[t] * h[p][n] * x->dinner[first + t][p];
                of_G += x->delta[first + t] * f.suf[t] * G[p][n] * x->x[first + t][p];
            }
            group->dC[t][n] += of_h;
            group->dB[t][n] += of_G;
            E[t] += x->C[first + t][n] * of_h;
            F[t] += x->B[first + t][n] * of_G;
        }
        for (int p = 0; p < x->P; p++) {
            U[t][p] = f.suf[t] * dot(G[p], x->B[first + t], x->N);
            for (int later = t; later < CHUNK; later++)
                U[t][p] += S[later][t] * f.L[later][t] * x->dinner[first + later][p];
        }
    }
    for (int p = 0; p < x->P; p++) Z += f.E * dot(G[p], h[p], x->N);
    make_da((const double(*)[CHUNK])Gamma, E, F, Z, da);
    for (int t = first; t < x->T && t < first + CHUNK; t++) {
        const double *u = U[t - first], direct = dot(x->x[t], u, x->P);
        const double ddt = x->slope[t] * (direct + x->A * da[t - first]);
        ((double *)a->ddt)[t * a->H + i] = ddt;
        sums->dA += x->delta[t] * da[t - first];
        sums->dbias += ddt;
        for (int p = 0; p < x->P; p++) {
            ((double *)a->dx)[(t * a->H + i) * a->P + p] = x->delta[t] * u[p] + x->skip[p] * x->dinner[t][p];
            sums->dskip[p] += x->dinner[t][p] * x->x[t][p];
        }
    }
}

/* Adds the parts of W to the group's sums, after the last head of the group: dC += W B, dB += W^T C. */
static void finish_group(const gt_ssd_args *a, const head *x, int g, int first, const group_sums *group) {
    for (int t = 0; t < CHUNK && first + t < x->T; t++)
        for (int n = 0; n < x->N; n++) {
            double dB = group->dB[t][n], dC = group->dC[t][n];
            for (int s = 0; s < CHUNK; s++) {
                dC += group->W[t][s] * x->B[first + s][n];
                dB += group->W[s][t] * x->C[first + s][n];
            }
            ((double *)a->dBm)[((first + t) * a->G + g) * a->N + n] = dB;
            ((double *)a->dCm)[((first + t) * a->G + g) * a->N + n] = dC;
        }
}

/* Computes dz of a chunk, for which it computes y again as in forward. */
static void make_dz(const gt_ssd_args *a, const head *x, int i, int first, state h) {
    static double y[CHUNK][CHUNKED_P];
    factors f;
    make_factors(x->a + first, &f);
    make_y(x, first, &f, h, y);
    for (int t = first; t < x->T && t < first + CHUNK; t++)
        for (int p = 0; p < x->P; p++)
            ((double *)a->dz)[(t * a->H + i) * a->P + p] = x->dy[t][p] * y[t - first][p] * x->dgate[t][p];
}

static void store_sums(const gt_ssd_args *a, int i, const head_sums *sums) {
    double *dskip = (double *)a->dDskip, all = 0;
    ((double *)a->dA)[i] = sums->dA;
    ((double *)a->ddt_bias)[i] = sums->dbias;
    for (int p = 0; p < a->P; p++) {
        all += sums->dskip[p];
        if (a->Dskip_per_channel) dskip[i * a->P + p] = sums->dskip[p];
    }
    if (!a->Dskip_per_channel) dskip[i] = all;
}

void ssd_chunked_backward(const gt_ssd_args *a) {
    static head x;
    static state outer, end, h[SLOTS], G[SLOTS], before, after;
    static group_sums group[SLOTS * CHECKPOINT / CHUNK];
    const int heads = (int)(a->H / a->G);
    for (int i = 0; i < a->H; i++) {
        head_sums sums = {0};
        if (i % heads == 0) memset(group, 0, sizeof group);
        load_head(a, i, 1, &x);
        load_state(&x, i, outer, a->state_in);
        pass_states(&x, a->segments, 0, outer, h, end);
        load_state(&x, i, outer, a->dstate_out);
        memcpy(end, outer, sizeof end); /* the result if there are no tokens */
        pass_states(&x, a->segments, 1, outer, G, end);
        store_state(&x, i, end, a->dstate_in);
        for (int first = 0; first < x.T; first += CHUNK) {
            memcpy(before, h[first / CHECKPOINT], sizeof before);
            memcpy(after, G[first / CHECKPOINT], sizeof after);
            chunk_states(&x, first, before, after);
            chunk_gradients(a, &x, i, first, before, after, &group[first / CHUNK], &sums);
            if (i % heads == heads - 1) finish_group(a, &x, i / heads, first, &group[first / CHUNK]);
            if (a->dz) make_dz(a, &x, i, first, before);
        }
        store_sums(a, i, &sums);
    }
}
