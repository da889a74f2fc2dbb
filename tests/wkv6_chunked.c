/* The chunked form of wkv6, step by step as the tensor-core kernels compute it.  A number in brackets, such as [2], is
 * a section of docs/wkv6.md, which has the same formulas.  Section 10 of that file names the functions of gt/wkv6 for
 * each step.
 *
 * Terms: S is the state and G its gradient.  A chunk has 64 tokens, in four sub-chunks of 16.  Most functions compute
 * one channel n.  In the kernels, channels are rows of matrices: S[n] is a row of S, and R and K are matrices of tokens
 * by channels.  The loops over channels and tokens are matrix products in the kernels. */
#include "wkv6_chunked.h"
#include "gt_test.h"
#include <math.h>
#include <string.h>

/* ---- [1] sizes and decays -------------------------------------------------------------------- */

enum { SUB_CHUNK = 16, CHUNK = 64, SUB_CHUNKS = CHUNK / SUB_CHUNK, GROUP = 16, CHUNKS = CHUNKED_T / CHUNK };

#define LOG2_E 1.4426950408889634074
#define LN_2 0.69314718055994530942

/* limits of c_16, the sum of h over a sub-chunk, and of a deferred decay */
static const double STRONG_DECAY_LIMIT = 64, DEFERRED_LIMIT = 16;

typedef double state[CHUNKED_N][CHUNKED_V];

/* The inputs of a head.  For backward, r is multiplied by the scale of y.  The last chunk is filled up with tokens of
 * zeros that do not decay. */
typedef struct head {
    int T, N, V, chunks, is_raw;
    double scale;                                                                     /* factor of y */
    double r[CHUNKED_T][CHUNKED_N], k[CHUNKED_T][CHUNKED_N], h[CHUNKED_T][CHUNKED_N]; /* h = -log2 d */
    double v[CHUNKED_T][CHUNKED_V], dy[CHUNKED_T][CHUNKED_V], u[CHUNKED_N];
} head;

static void load_head(const gt_wkv6_args *a, int is_backward, head *x) {
    const double *r = a->r, *k = a->k, *w = a->w, *v = a->v, *dy = a->dy, *u = (const double *)a->u;
    memset(x, 0, sizeof *x);
    x->T = (int)a->T, x->N = (int)a->N, x->V = (int)a->V;
    x->chunks = (x->T + CHUNK - 1) / CHUNK;
    x->is_raw = a->decay == GT_DECAY_RAW;
    x->scale = a->scale == 0 ? 1 : a->scale;
    for (int t = 0; t < x->T; t++) {
        for (int n = 0; n < x->N; n++) {
            x->r[t][n] = r[t * x->N + n] * (is_backward ? x->scale : 1);
            x->k[t][n] = k[t * x->N + n];
            x->h[t][n] = LOG2_E * (x->is_raw ? exp(w[t * x->N + n]) : -w[t * x->N + n]);
        }
        for (int j = 0; j < x->V; j++) {
            x->v[t][j] = v[t * x->V + j];
            if (is_backward) x->dy[t][j] = dy[t * x->V + j];
        }
    }
    for (int n = 0; u && n < x->N; n++) x->u[n] = u[n];
}

static void load_state(const head *x, state S, const float *from) {
    for (int n = 0; n < x->N; n++)
        for (int j = 0; j < x->V; j++) S[n][j] = from ? ((const double *)from)[n * x->V + j] : 0;
}

static void store_state(const head *x, state S, float *to) {
    for (int n = 0; n < x->N; n++)
        for (int j = 0; j < x->V; j++) ((double *)to)[n * x->V + j] = S[n][j];
}

/* Writes c[t], the sum of h over the tokens before token t of a run of tokens.  c[tokens] is the sum over the run. */
static void sums_before(const head *x, int first, int n, int tokens, double *c) {
    c[0] = 0;
    for (int t = 0; t < tokens; t++) c[t + 1] = c[t] + x->h[first + t][n];
}

/* Writes after[t], the sum of h over the tokens after token t.  The sums are computed by additions only, because h may
 * be infinite. */
static void sums_after(const head *x, int first, int n, int tokens, double *after) {
    after[tokens - 1] = 0;
    for (int t = tokens - 1; t > 0; t--) after[t - 1] = after[t] + x->h[first + t][n];
}

static double decay(double h) { return exp2(-h); }

static double dot(const double *first, const double *second, int count) {
    double sum = 0;
    for (int i = 0; i < count; i++) sum += first[i] * second[i];
    return sum;
}

/* ---- [2] forward ----------------------------------------------------------------------------- */

/* Computes y of the sub-chunk that starts at token `first`, and moves S to the end of the sub-chunk.  deferred[n] is
 * the decay, as -log2, that channel n of S still lacks; it is 0 unless the form defers decays.  is_last: whether this
 * is the last sub-chunk of its chunk. */
static void forward_sub_chunk(const head *x, int first, int is_last, const wkv6_form *form, double *deferred, state S,
                              double (*y)[CHUNKED_V], wkv6_paths *paths) {
    double A[SUB_CHUNK][SUB_CHUNK] = {{0}};
    for (int group = 0; group < x->N; group += GROUP) {
        double c[GROUP][SUB_CHUNK + 1], after[SUB_CHUNK], end[GROUP];
        int is_strong = form->always_strong, is_scaled = !form->defers_decay || is_last || form->always_strong;
        for (int i = 0; i < GROUP; i++) {
            sums_before(x, first, group + i, SUB_CHUNK, c[i]);
            end[i] = deferred[group + i] + c[i][SUB_CHUNK];
            is_strong |= !(fabs(end[i]) < STRONG_DECAY_LIMIT);
            is_scaled |= !(fabs(end[i]) < DEFERRED_LIMIT);
        }
        paths->strong += is_strong, paths->usual += !is_strong;
        for (int i = 0; i < GROUP; i++) {
            const int n = group + i;
            double R[SUB_CHUNK], K[SUB_CHUNK];
            sums_after(x, first, n, SUB_CHUNK, after);
            for (int t = 0; t < SUB_CHUNK; t++) {
                R[t] = x->r[first + t][n] * decay(deferred[n] + c[i][t]);
                K[t] = x->k[first + t][n] * (is_strong ? decay(after[t]) : exp2(deferred[n] + c[i][t + 1]));
                for (int j = 0; j < x->V; j++) y[first + t][j] += R[t] * S[n][j];
            }
            for (int t = 0; t < SUB_CHUNK; t++) { /* A = tril(R K^T) + diag(bonus) */
                double product = x->r[first + t][n];
                A[t][t] += product * x->u[n] * x->k[first + t][n];
                for (int s = t - 1; s >= 0; s--) {
                    A[t][s] += is_strong ? product * x->k[first + s][n] : R[t] * K[s];
                    product *= decay(x->h[first + s][n]);
                }
            }
            const double E = is_scaled ? decay(end[i]) : 1;
            for (int j = 0; j < x->V; j++) {
                double added = 0;
                for (int t = 0; t < SUB_CHUNK; t++) added += K[t] * x->v[first + t][j];
                S[n][j] = is_strong ? E * S[n][j] + added : E * (S[n][j] + added);
            }
            deferred[n] = is_scaled ? 0 : end[i];
        }
    }
    for (int t = 0; t < SUB_CHUNK; t++)
        for (int s = 0; s <= t; s++)
            for (int j = 0; j < x->V; j++) y[first + t][j] += A[t][s] * x->v[first + s][j];
}

/* ---- [3] states only ------------------------------------------------------------------------- */

/* Moves S forwards over a run of tokens or, with is_reverse, G backwards. */
static void states_step(const head *x, int first, int tokens, int is_reverse, state S) {
    for (int n = 0; n < x->N; n++) {
        double c[2 * SUB_CHUNK + 1], after[2 * SUB_CHUNK];
        sums_before(x, first, n, tokens, c);
        sums_after(x, first, n, tokens, after);
        for (int j = 0; j < x->V; j++) {
            double added = 0;
            for (int t = first; t < first + tokens; t++)
                added += is_reverse ? x->r[t][n] * decay(c[t - first]) * x->dy[t][j]
                                    : x->k[t][n] * decay(after[t - first]) * x->v[t][j];
            S[n][j] = decay(c[tokens]) * S[n][j] + added;
        }
    }
}

/* ---- [4] segments ---------------------------------------------------------------------------- */

/* The number of chunks of a segment. */
static int segment_chunks(const head *x, int64_t segments) {
    const int count = segments > 1 ? (int)segments : 1, tokens = (x->T + count - 1) / count;
    return tokens > CHUNK ? (tokens + CHUNK - 1) / CHUNK : 1;
}

/* Computes the start state of each segment, in the order of the pass: forwards or backwards in time.  start[0] is
 * given.  As in the kernels, a local pass runs every segment but the last from a zero state, and a scan joins the
 * results. */
static void start_states(const head *x, int each, int is_reverse, const wkv6_form *form, state start[CHUNKS]) {
    const int segments = (x->chunks + each - 1) / each;
    for (int i = 0; i + 1 < segments; i++) {
        const int segment = is_reverse ? segments - 1 - i : i, first = segment * each * CHUNK;
        const int end = first + each * CHUNK < x->chunks * CHUNK ? first + each * CHUNK : x->chunks * CHUNK;
        static state local;
        memset(local, 0, sizeof local);
        for (int t = 0; t < end - first; t += form->step)
            states_step(x, is_reverse ? end - t - form->step : first + t, form->step, is_reverse, local);
        for (int n = 0; n < x->N; n++) {
            double bits = 0;
            for (int t = first; t < end; t++) bits += x->h[t][n];
            for (int j = 0; j < x->V; j++) start[i + 1][n][j] = decay(bits) * start[i][n][j] + local[n][j];
        }
    }
}

/* ---- [2] forward, of all tokens: y, the state at the end, and S before every chunk ------------- */

static void forward(const head *x, const gt_wkv6_args *a, const wkv6_form *form, double (*y)[CHUNKED_V],
                    state checkpoints[CHUNKS], state S, wkv6_paths *paths) {
    static state start[CHUNKS];
    const int each = segment_chunks(x, a->segments);
    load_state(x, start[0], a->state_in);
    start_states(x, each, 0, form, start);
    memcpy(S, start[0], sizeof(state)); /* the result if there are no tokens */
    for (int chunk = 0; chunk < x->chunks; chunk++) {
        double deferred[CHUNKED_N] = {0};
        if (chunk % each == 0) memcpy(S, start[chunk / each], sizeof(state));
        memcpy(checkpoints[chunk], S, sizeof(state));
        for (int first = CHUNK * chunk; first < CHUNK * (chunk + 1); first += SUB_CHUNK)
            forward_sub_chunk(x, first, first % CHUNK == CHUNK - SUB_CHUNK, form, deferred, S, y, paths);
    }
}

wkv6_paths wkv6_chunked_forward(const gt_wkv6_args *a, const wkv6_form *form) {
    static head x;
    static state checkpoints[CHUNKS], S;
    static double y[CHUNKED_T][CHUNKED_V];
    wkv6_paths paths = {0, 0};
    load_head(a, 0, &x);
    memset(y, 0, sizeof y);
    forward(&x, a, form, y, checkpoints, S, &paths);
    for (int t = 0; t < x.T; t++)
        for (int j = 0; j < x.V; j++) ((double *)a->y)[t * x.V + j] = x.scale * y[t][j];
    store_state(&x, S, a->state_out);
    return paths;
}

/* ---- [5] the reverse pass: G after every chunk, and the sums that go with it ------------------- */

/* Sums of a chunk, one for each channel.  G is the gradient state after the chunk, and "kept G" is G as rounded in
 * memory. "S before" and "S after" are the states before and after the chunk.  rowsum adds up the elements of a
 * channel's row.
 *
 *     before = rowsum(S before . G)               after = rowsum(S after . G)
 *     change = rowsum((G - kept G) . (S after - S before))
 *
 * For the last chunk, the pass does not know "S after", so `change` and `after` are 0.  `after` is also 0 if "S before"
 * is zero. */
typedef struct rowsums {
    double before[CHUNKED_N], change[CHUNKED_N], after[CHUNKED_N];
} rowsums;

static double as_kept(const wkv6_form *form, double value) {
    return form->bf16_states ? test_round(value, GT_BF16) : value;
}

static void round_state(const head *x, const wkv6_form *form, state S) {
    for (int n = 0; n < x->N; n++)
        for (int j = 0; j < x->V; j++) S[n][j] = as_kept(form, S[n][j]);
}

/* Computes the sums of a chunk.  S_before and S_after are the states as rounded in memory; S_after is NULL for the last
 * chunk. */
static void sum_rows(const head *x, const wkv6_form *form, state G, state S_before, state S_after, int is_zero_before,
                     rowsums *sums) {
    memset(sums, 0, sizeof *sums);
    for (int n = 0; n < x->N; n++) {
        sums->before[n] = dot(S_before[n], G[n], x->V);
        for (int j = 0; S_after && j < x->V; j++)
            sums->change[n] += (G[n][j] - as_kept(form, G[n][j])) * (S_after[n][j] - S_before[n][j]);
        if (S_after && !is_zero_before) sums->after[n] = dot(S_after[n], G[n], x->V);
    }
}

/* The reverse pass.  S: the states before every chunk, as rounded in memory.  Writes G after every chunk, as rounded in
 * memory, the sums of every chunk, and dstate_in. */
static void reverse_pass(const head *x, const gt_wkv6_args *a, const wkv6_form *form, state S[CHUNKS], state G[CHUNKS],
                         rowsums sums[CHUNKS]) {
    static state start[CHUNKS], now;
    const int each = segment_chunks(x, a->segments), segments = (x->chunks + each - 1) / each;
    load_state(x, start[0], a->dstate_out);
    start_states(x, each, 1, form, start);
    memcpy(now, start[0], sizeof now); /* the result if there are no tokens */
    for (int chunk = x->chunks - 1; chunk >= 0; chunk--) {
        const int is_last = chunk == x->chunks - 1;
        if (is_last || chunk % each == each - 1) memcpy(now, start[segments - 1 - chunk / each], sizeof now);
        sum_rows(x, form, now, S[chunk], is_last ? NULL : S[chunk + 1], chunk == 0 && !a->state_in, &sums[chunk]);
        memcpy(G[chunk], now, sizeof now);
        round_state(x, form, G[chunk]);
        for (int first = CHUNK * (chunk + 1) - form->step; first >= CHUNK * chunk; first -= form->step)
            states_step(x, first, form->step, 1, now);
    }
    store_state(x, now, a->dstate_in);
}

/* ---- [6] backward of a chunk: a channel ------------------------------------------------------ */

/* One channel of one chunk.  c and after: sums of h before and after a token, within its sub-chunk. */
typedef struct channel {
    double r[CHUNK], k[CHUNK], h[CHUNK], R[CHUNK], K[CHUNK];
    double c[SUB_CHUNKS][SUB_CHUNK + 1], after[SUB_CHUNKS][SUB_CHUNK];
    double E[SUB_CHUNKS], growth[SUB_CHUNKS]; /* 2^-c_16 and 2^c_16; only the usual path uses growth */
    double Sdy[CHUNK], Gv[CHUNK];             /* elements of this channel in S dy_i and G v_j */
} channel;

static void prepare_channel(const head *x, int first, int n, state S, state G, channel *q) {
    for (int a = 0; a < SUB_CHUNKS; a++) {
        sums_before(x, first + SUB_CHUNK * a, n, SUB_CHUNK, q->c[a]);
        sums_after(x, first + SUB_CHUNK * a, n, SUB_CHUNK, q->after[a]);
        q->E[a] = decay(q->c[a][SUB_CHUNK]);
        q->growth[a] = exp2(q->c[a][SUB_CHUNK]);
    }
    for (int t = 0; t < CHUNK; t++) {
        const int a = t / SUB_CHUNK, i = t % SUB_CHUNK;
        q->r[t] = x->r[first + t][n];
        q->k[t] = x->k[first + t][n];
        q->h[t] = x->h[first + t][n];
        q->R[t] = q->r[t] * decay(q->c[a][i]);     /* r, decayed from the start of the sub-chunk */
        q->K[t] = q->k[t] * decay(q->after[a][i]); /* k, decayed to the end of the sub-chunk */
        q->Sdy[t] = dot(S[n], x->dy[first + t], x->V);
        q->Gv[t] = dot(G[n], x->v[first + t], x->V);
    }
}

/* [8] Whether the channel needs the strong-decay path. */
static int is_strong(const head *x, const wkv6_form *form, const channel *q) {
    for (int a = 0; a < SUB_CHUNKS; a++) {
        double most = 0, others = 0;
        if (!(fabs(q->c[a][SUB_CHUNK]) < STRONG_DECAY_LIMIT)) return 1;
        for (int t = SUB_CHUNK * a; x->is_raw && t < SUB_CHUNK * (a + 1); t++) {
            most = fmax(most, q->h[t]);
            others += q->h[t] > form->strong ? 0 : q->h[t];
        }
        if (most > form->strong && others < most * form->strong_share) return 1;
    }
    return 0;
}

/* Parts of dg: sums over pairs of tokens, where a pair begins at the token of k and ends at the token of r.  ends[a][c]
 * sums the pairs that begin before sub-chunk a, or in S, and end in sub-chunk c >= a, without the decays of sub-chunks
 * a to c-1.  begins[b] sums the pairs that begin in sub-chunk b and end in G, without the decays after b. */
typedef struct crossings {
    double ends[SUB_CHUNKS][SUB_CHUNKS], begins[SUB_CHUNKS];
} crossings;

/* Computes X of every token i: the terms of dr_i from S and from the tokens before i-1.  Uses Horner's rule: for every
 * sub-chunk before the token's own, multiplies by its E and adds its tokens.  The usual path does this also for the
 * token's own sub-chunk; the strong-decay path stops at its start. */
static void make_X(const channel *q, double C[CHUNK][CHUNK], int strong, double *X, crossings *sums) {
    for (int i = 0; i < CHUNK; i++) {
        const int a = i / SUB_CHUNK;
        double sum = q->Sdy[i];
        for (int b = 0; b <= a; b++) {
            if (i > 0) sums->ends[b][a] += q->R[i] * sum; /* at the first token of the chunk, S has not decayed yet */
            if (strong && b == a) break;
            sum *= q->E[b];
            for (int j = SUB_CHUNK * b; j < SUB_CHUNK * (b + 1) && j < i - 1; j++) sum += C[i][j] * q->K[j];
        }
        X[i] = sum;
    }
}

/* Computes Z of every token j: the terms of dk_j from G and from the tokens after j+1, by the same rule. */
static void make_Z(const channel *q, double C[CHUNK][CHUNK], int strong, double *Z, crossings *sums) {
    for (int j = 0; j < CHUNK; j++) {
        const int b = j / SUB_CHUNK;
        double sum = q->Gv[j];
        sums->begins[b] += q->K[j] * sum;
        for (int a = SUB_CHUNKS - 1; a >= b; a--) {
            if (strong && a == b) break;
            sum *= q->E[a];
            for (int i = SUB_CHUNK * a; i < SUB_CHUNK * (a + 1); i++)
                if (i > j + 1) sum += C[i][j] * q->R[i];
        }
        Z[j] = sum;
    }
}

/* The gradients of a channel, for each token.  dr and dk lack the pairs of tokens without a decay in between.  dg is
 * dL/d(log d). */
typedef struct channel_gradients {
    double dr[CHUNK], dk[CHUNK], dg[CHUNK];
} channel_gradients;

/* [7] The correction of dg_t for the rounding of S and G: slope * t + offset.  Without rounding both are 0.  E is the
 * decay of the whole chunk.  dg_end is dg of the token after the chunk, computed from this chunk; its true value is
 * rowsum(S after . G). */
typedef struct correction {
    double slope, offset;
} correction;

static correction correct(const wkv6_form *form, const rowsums *sums, int n, double E, double dg_end) {
    const double lost = E * sums->change[n];
    correction x = {lost / CHUNK, sums->after[n] != 0 ? 0.5 * E * (sums->after[n] - lost - dg_end) : 0};
    if (form->no_correction) x.slope = x.offset = 0;
    return x;
}

/* The usual path.  From one token to the next, dg loses the pairs that end at the token, and gains the pairs that begin
 * there. */
static void finish_channel(const wkv6_form *form, const channel *q, const double *X, const double *Z,
                           const crossings *cross, const rowsums *sums, int n, channel_gradients *out) {
    double dg = sums->before[n], E = 1;
    for (int a = SUB_CHUNKS - 1; a >= 0; a--) { /* computes dg of the first token of the chunk by Horner's rule */
        dg = dg * q->E[a] + cross->ends[0][a];
        E *= q->E[a];
    }
    for (int t = 0; t < CHUNK; t++) {
        const int a = t / SUB_CHUNK, i = t % SUB_CHUNK;
        out->dr[t] = exp2(q->c[a][SUB_CHUNK] - q->c[a][i]) * X[t];
        out->dk[t] = exp2(q->c[a][i + 1]) * Z[t];
        if (t > 0) dg -= q->R[t] * q->growth[a] * X[t];
        out->dg[t] = dg;
        dg += q->K[t] * q->growth[a] * Z[t];
    }
    const correction x = correct(form, sums, n, E, dg);
    for (int t = 0; t < CHUNK; t++) out->dg[t] += x.slope * t + x.offset;
}

/* [8] The strong-decay path.  For pairs within a sub-chunk, it multiplies the decays one by one.  It computes dg by
 * additions only. */
static void finish_strong_channel(const wkv6_form *form, const channel *q, double C[CHUNK][CHUNK], const double *X,
                                  const double *Z, const crossings *cross, const rowsums *sums, int n,
                                  channel_gradients *out) {
    double E = 1, dg_end = 0;
    for (int b = SUB_CHUNKS - 1; b >= 0; b--) {
        dg_end += E * cross->begins[b];
        E *= q->E[b];
    }
    const correction x = correct(form, sums, n, E, dg_end + E * sums->before[n]);
    for (int a = 0; a < SUB_CHUNKS; a++) {
        const int start = SUB_CHUNK * a, end = start + SUB_CHUNK;
        double crossing = E * sums->before[n], between = 1;
        for (int c = a + 1; c < SUB_CHUNKS; c++) {
            between *= q->E[c - 1];
            crossing += between * cross->ends[a][c];
        }
        between = 1;
        for (int b = SUB_CHUNKS - 1; b >= 0; b--) {
            if (b < a) crossing += between * cross->begins[b];
            between *= q->E[b];
        }
        for (int t = start; t < end; t++) out->dg[t] = crossing + x.slope * start + x.offset;
        for (int i = start; i < end; i++) { /* pairs that begin before this sub-chunk, and pairs that end after it */
            out->dr[i] = decay(q->c[a][i - start]) * X[i];
            out->dk[i] = decay(q->after[a][i - start]) * Z[i];
            for (int t = start; t < i; t++) out->dg[t] += q->r[i] * out->dr[i];
            for (int t = i + 1; t < end; t++) out->dg[t] += q->k[i] * out->dk[i];
        }
        for (int i = start; i < end; i++) { /* pairs within this sub-chunk */
            double product = 1;
            for (int j = i - 2; j >= start; j--) {
                product *= decay(q->h[j + 1]);
                const double e = product * C[i][j];
                out->dr[i] += e * q->k[j];
                out->dk[j] += e * q->r[i];
                for (int t = j + 1; t < i; t++) out->dg[t] += e * q->r[i] * q->k[j];
            }
        }
    }
}

/* ---- [6] backward of a chunk ----------------------------------------------------------------- */

/* Adds a channel's part of dv of the chunk: A times dy, and K, decayed to the end of the chunk, times G. */
static void add_dv(const head *x, int first, int n, state G, const channel *q, int strong, double (*dv)[CHUNKED_V]) {
    for (int j = 0; j < CHUNK; j++) {
        const int b = j / SUB_CHUNK;
        /* products of decays: of the whole sub-chunks in between, and of the tokens in between */
        double between = 1, product = 1;
        for (int i = j; i < CHUNK; i++) {
            const int a = i / SUB_CHUNK;
            if (i % SUB_CHUNK == 0 && a > b + 1) between *= q->E[a - 1];
            double A = q->R[i] * (a == b ? q->growth[b] : between) * q->K[j];
            if (a == b && strong) A = q->r[i] * product * q->k[j];
            if (i == j) A = q->r[i] * x->u[n] * q->k[j];
            if (i > j) product *= decay(q->h[i]);
            for (int m = 0; m < x->V; m++) dv[first + j][m] += A * x->dy[first + i][m];
        }
        if (b < SUB_CHUNKS - 1) between *= q->E[SUB_CHUNKS - 1];
        for (int m = 0; m < x->V; m++) dv[first + j][m] += between * q->K[j] * G[n][m];
    }
}

/* The gradients of a head, in packed arrays. */
typedef struct gradients {
    double *dr, *dk, *dw, *dv, *du;
} gradients;

static void backward_chunk(const head *x, int first, const wkv6_form *form, state S, state G, const rowsums *sums,
                           const gradients *out, wkv6_paths *paths) {
    static double C[CHUNK][CHUNK], dv[CHUNKED_T][CHUNKED_V];
    static channel q[CHUNKED_N];
    const int tokens = x->T - first < CHUNK ? x->T - first : CHUNK;
    int strong = form->always_strong;
    for (int i = 0; i < CHUNK; i++)
        for (int j = 0; j <= i; j++) C[i][j] = dot(x->dy[first + i], x->v[first + j], x->V);
    for (int n = 0; n < x->N; n++) {
        prepare_channel(x, first, n, S, G, &q[n]);
        strong |= is_strong(x, form, &q[n]);
    }
    paths->strong += strong, paths->usual += !strong;
    memset(dv, 0, sizeof dv);
    for (int n = 0; n < x->N; n++) {
        double X[CHUNK], Z[CHUNK];
        crossings cross = {{{0}}, {0}};
        channel_gradients d;
        make_X(&q[n], C, strong, X, &cross);
        make_Z(&q[n], C, strong, Z, &cross);
        if (strong) {
            finish_strong_channel(form, &q[n], C, X, Z, &cross, sums, n, &d);
        } else {
            finish_channel(form, &q[n], X, Z, &cross, sums, n, &d);
        }
        add_dv(x, first, n, G, &q[n], strong, dv);
        /* adds the pairs without a decay in between: neighbours, and a token with itself */
        for (int t = 0; t < tokens; t++) {
            const int at = (first + t) * x->N + n;
            const double k_before = t > 0 ? C[t][t - 1] * q[n].k[t - 1] : 0;
            const double r_next = t < CHUNK - 1 ? C[t + 1][t] * q[n].r[t + 1] : 0;
            out->dr[at] = x->scale * (d.dr[t] + k_before + x->u[n] * q[n].k[t] * C[t][t]);
            out->dk[at] = d.dk[t] + r_next + x->u[n] * q[n].r[t] * C[t][t];
            out->du[n] += C[t][t] * q[n].r[t] * q[n].k[t];
            out->dw[at] = !x->is_raw ? d.dg[t] : -LN_2 * q[n].h[t] * d.dg[t];
            if (decay(q[n].h[t]) == 0) out->dw[at] = 0; /* h may be infinite, and the product NaN */
        }
    }
    for (int t = first; t < first + tokens; t++) memcpy(out->dv + t * x->V, dv[t], (size_t)x->V * sizeof(double));
}

wkv6_paths wkv6_chunked_backward(const gt_wkv6_args *a, const wkv6_form *form) {
    static head x;
    static state S[CHUNKS], G[CHUNKS], last;
    static rowsums sums[CHUNKS];
    static double y[CHUNKED_T][CHUNKED_V];
    const gradients out = {a->dr, a->dk, a->dw, a->dv, (double *)a->du};
    wkv6_paths paths = {0, 0}, of_forward = {0, 0};
    load_head(a, 1, &x);
    forward(&x, a, form, y, S, last, &of_forward); /* computes the states before every chunk */
    for (int chunk = 0; chunk < x.chunks; chunk++) round_state(&x, form, S[chunk]);
    reverse_pass(&x, a, form, S, G, sums);
    memset(out.du, 0, (size_t)x.N * sizeof(double));
    for (int chunk = 0; chunk < x.chunks; chunk++)
        backward_chunk(&x, CHUNK * chunk, form, S[chunk], G[chunk], &sums[chunk], &out, &paths);
    return paths;
}
