/* reference/gt_wkv4.c - RWKV-4 time mixing on the CPU, the twin of gt_wkv4.cuh.  With the log decay g, A = a exp(p) and
 * B = b exp(p):
 *
 *     y_t = (A_{t-1} + exp(u + k_t) v_t) / (B_{t-1} + exp(u + k_t))
 *     A_t = exp(g) A_{t-1} + exp(k_t) v_t        B_t = exp(g) B_{t-1} + exp(k_t)
 *
 * Backward uses the mean m = A / B and l = log B.  M and L are the gradients of m and l.  The shares of token t are
 * p = exp(k_t) / B_t and r = exp(u + k_t) / (B_{t-1} + exp(u + k_t)).  With e = v_t - m_{t-1}:
 *
 *     dv = r dy + p M        dk = r (1 - r) e dy + p (1 - p) e M + p L        du += r (1 - r) e dy
 *     M <- (1 - p) M + (1 - r) dy                    dg += (1 - p) L - p (1 - p) e M
 *     L <- (1 - p) L - p (1 - p) e M - r (1 - r) e dy
 *
 * Source: Peng et al. 2023, arXiv:2305.13048.  Each thread takes channels, and processes the sequences of a channel in
 * order.  States and shares are doubles in both builds (gt_ref.h), since dw and du are long sums of small
 * differences. */
#include "gt_ref.h"

#include <float.h>

/* Tokens of a chunk.  Backward keeps the state before every chunk, and recomputes the states inside a chunk from it. */
enum { WKV4_CHUNK = 64 };

/* A = a exp(p), B = b exp(p) */
typedef struct wkv4_state {
    double a, b, p;
} wkv4_state;

/* The parameters of a channel. */
typedef struct wkv4_channel {
    int64_t d;
    double g, slope; /* slope: derivative of g with respect to w */
    double u;
} wkv4_channel;

/* A token that follows a state.  a and b are the decayed state and `weight` is the token's weight in it, all in units
 * of exp(p).  y = share v + rest.  The weights in y are in units of exp(q): `others` is the weight of the state, `sum`
 * the sum of all weights. */
typedef struct wkv4_token {
    double a, b, p, weight;
    double share, rest, others, sum, down; /* down: exp(p before the token - q) */
} wkv4_token;

static double wkv4_bounded(double x) { return x > 1e30 ? 1e30 : x < -1e30 ? -1e30 : x; }
static double wkv4_larger(double x, double y) { return x > y ? x : y; }

static wkv4_channel wkv4_load_channel(const gt_wkv4_args *a, int64_t d) {
    const double w = ((const real *)a->w)[d];
    wkv4_channel c = {.d = d, .u = wkv4_bounded(ref_param(a->u, d, 0))};
    c.g = wkv4_bounded(a->decay == GT_DECAY_LOG ? w : -exp(w));
    c.slope = a->decay == GT_DECAY_LOG ? 1 : c.g;
    return c;
}

/* Returns whether a decay is strong, so that it is added to p: as a factor it would make a and b vanish.  Other decays
 * multiply a and b, so that p is not rounded at every token. */
static int wkv4_is_strong(double g) { return g < -2 || g > 2; }

static wkv4_token wkv4_meet(const wkv4_state *s, const wkv4_channel *c, double k) {
    wkv4_token x;
    const double decayed = wkv4_is_strong(c->g) ? s->p + c->g : s->p;
    x.p = wkv4_larger(decayed, k);
    const double keep = exp(decayed - x.p), less = wkv4_is_strong(c->g) ? 0 : expm1(c->g);
    x.a = keep * s->a, x.b = keep * s->b;
    x.a += less * x.a, x.b += less * x.b;
    x.weight = exp(k - x.p);
    const double above = (k - s->p) + c->u, own = exp(above > 0 ? 0 : above); /* q is the larger of p and k + u */
    x.down = exp(above > 0 ? -above : 0);
    x.others = x.down * s->b;
    x.sum = x.others + own;
    x.share = x.sum != 0 ? own / x.sum : 0;
    x.rest = x.sum != 0 ? x.down * s->a / x.sum : 0;
    return x;
}

/* Returns the state after the token.  Rescales it so that b stays near 1; otherwise b would vanish if one key is far
 * above later keys. */
static wkv4_state wkv4_after(const wkv4_token *x, double v) {
    wkv4_state s = {x->a + x->weight * v, x->b + x->weight, x->p};
    if (!(s.b > 0) || !isfinite(s.b) || (s.b > 0x1p-20 && s.b < 0x1p20)) return s;
    const double p = s.p + log(s.b), factor = fabs(s.p) < 1e6 ? exp(s.p - p) : 1 / s.b;
    s.a *= factor, s.b *= factor, s.p = p;
    return s;
}

/* ---- states of callers, [row][3][D] ------------------------------------------------------------- */

static wkv4_state wkv4_load_three(const gt_wkv4_args *a, const float *states, int64_t row, int64_t d) {
    const real *from = (const real *)states + row * 3 * a->D + d;
    return states ? (wkv4_state){from[0], from[a->D], from[2 * a->D]} : (wkv4_state){0, 0, 0};
}

static void wkv4_store_three(const gt_wkv4_args *a, float *states, int64_t row, int64_t d, wkv4_state x) {
    real *to = (real *)states + row * 3 * a->D + d;
    if (states) to[0] = (real)x.a, to[a->D] = (real)x.b, to[2 * a->D] = (real)x.p;
}

/* Returns a state of the caller.  A state without weight becomes the neutral state, which any key replaces. */
static wkv4_state wkv4_of_caller(wkv4_state s) {
    if (s.a == 0 && s.b == 0) s.p = -FLT_MAX;
    return s;
}

static wkv4_state wkv4_to_caller(wkv4_state s) {
    return s.b == 0 ? (wkv4_state){0, 0, 0} : (wkv4_state){(real)(s.a / s.b), 1, (real)(s.p + log(s.b))};
}

/* ---- forward and step ------------------------------------------------------------------------ */

/* Computes y of one sequence of a channel, and returns the state before token s->commit.  A step rounds the state after
 * every token, as stored states are rounded.  So a step of T tokens gives the same bits as T steps of one token. */
static wkv4_state wkv4_sequence(const gt_wkv4_args *a, const ref_sequence *s, const wkv4_channel *c, wkv4_state given,
                                int step) {
    wkv4_state state = wkv4_of_caller(given), kept = given;
    for (int64_t t = s->first; t < s->last; t++) {
        const double k = ref_load(a->k, a->dtype, ref_at(a->k_stride, s->b, t, c->d));
        const double v = ref_load(a->v, a->dtype, ref_at(a->v_stride, s->b, t, c->d));
        const wkv4_token x = wkv4_meet(&state, c, k);
        ref_store(a->y, a->dtype, ref_at(a->y_stride, s->b, t, c->d), (real)(x.share * v + x.rest));
        state = wkv4_after(&x, v);
        const wkv4_state after = step || t + 1 == s->commit ? wkv4_to_caller(state) : state;
        if (t + 1 == s->commit) kept = after;
        if (step) state = wkv4_of_caller(after);
    }
    return kept;
}

static gt_status wkv4_sequences(const gt_wkv4_args *a, ref_sequences *q) {
    return ref_find_sequences(a->B, a->T, a->cu_seqlens, a->seq_count, a->seq_capacity, q);
}

/* Runs all channels.  `a` holds checked arguments with defaults filled in. */
static gt_status wkv4_run(const gt_wkv4_args *a, int step) {
    ref_sequences all;
    const gt_status status = wkv4_sequences(a, &all);
    if (status != GT_OK) return status;
    if (a->B == 0 || a->T == 0) {
        if (!step) ref_pass_states(a->state_out, a->state_in, a->state_in_shared, all.count, 3 * a->D);
        return GT_OK;
    }
    GT_PARALLEL_FOR
    for (int64_t d = 0; d < a->D; d++) {
        const wkv4_channel c = wkv4_load_channel(a, d);
        for (int64_t i = 0; i < all.count; i++) {
            const ref_sequence s = step ? ref_step_element(i, a->T, a->slots, a->slot_capacity, a->tokens, a->commit)
                                        : ref_sequence_at(&all, i);
            if (step) ref_clear(s.b, s.last, a->T, d, a->y, a->dtype, a->y_stride, 1);
            if (s.row < 0) continue;
            const int64_t row_in = a->state_in_shared ? 0 : s.row;
            const wkv4_state given = wkv4_load_three(a, step ? a->state_out : a->state_in, row_in, d);
            wkv4_store_three(a, a->state_out, s.row, d, wkv4_sequence(a, &s, &c, given, step));
        }
        ref_clear_unused(&all, d, a->y, a->dtype, a->y_stride, 1);
    }
    return GT_OK;
}

/* ---- backward -------------------------------------------------------------------------------- */

/* Sums over batch and time.  They are doubles, because they may have any number of terms. */
typedef struct wkv4_sums {
    double g, u, dstate[3];
} wkv4_sums;

/* Values of a token that the reverse pass needs. */
typedef struct wkv4_shares {
    double p, not_p, r, not_r, e;
} wkv4_shares;

/* Returns the mean of a state, or 0 if the state has no weight.  Without weight the mean has no gradient. */
static double wkv4_mean(const wkv4_state *s) { return s->b != 0 ? s->a / s->b : 0; }

static double wkv4_load(const gt_wkv4_args *a, const void *data, gt_stride stride, const ref_sequence *s, int64_t t,
                        int64_t d) {
    return ref_load(data, a->dtype, ref_at(stride, s->b, t, d));
}

/* Returns the state after tokens first ... last-1.  `shares` gets the shares of each token, unless it is NULL. */
static wkv4_state wkv4_advance(const gt_wkv4_args *a, const ref_sequence *s, const wkv4_channel *c, int64_t first,
                               int64_t last, wkv4_state state, wkv4_shares *shares) {
    for (int64_t t = first; t < last; t++) {
        const double v = wkv4_load(a, a->v, a->v_stride, s, t, c->d), mean = wkv4_mean(&state);
        const wkv4_token x = wkv4_meet(&state, c, wkv4_load(a, a->k, a->k_stride, s, t, c->d));
        const double sum = x.b + x.weight;
        if (shares) {
            const int has_weight = sum != 0;
            shares[t - first] = (wkv4_shares){has_weight ? x.weight / sum : 0, has_weight ? x.b / sum : 0, x.share,
                                              x.sum != 0 ? x.others / x.sum : 0, v - mean};
        }
        state = wkv4_after(&x, v);
    }
    return state;
}

/* Computes the gradient of state_in from M and L after the first token.  Without weight m of state_in is undefined, but
 * A and B still have gradients, which follow from the token's values. */
static wkv4_state wkv4_first_gradient(const gt_wkv4_args *a, const ref_sequence *s, const wkv4_channel *c,
                                      wkv4_state given, double M, double L) {
    const wkv4_state state = wkv4_of_caller(given);
    const double v = wkv4_load(a, a->v, a->v_stride, s, s->first, c->d),
                 dy = wkv4_load(a, a->dy, a->dy_stride, s, s->first, c->d);
    const double k = wkv4_load(a, a->k, a->k_stride, s, s->first, c->d);
    const wkv4_token x = wkv4_meet(&state, c, k);
    const int has_weight = state.a != 0 || state.b != 0; /* without weight q is k + u, and p before the token has no
                                                          * effect */
    const double a_after = x.a + x.weight * v, b_after = x.b + x.weight, y = x.share * v + x.rest;
    const double scale = b_after != 0 ? exp(given.p - x.p + c->g) / b_after : 0;
    const double of_y = x.sum != 0 ? (has_weight ? x.down : exp((given.p - k) - c->u)) * dy / x.sum : 0;
    const double mean = b_after != 0 ? a_after / b_after : 0;
    const double da = scale * M + of_y, db = scale * (L - mean * M) - of_y * y;
    return (wkv4_state){da, db, (given.a != 0 ? given.a * da : 0) + (given.b != 0 ? given.b * db : 0)};
}

/* Computes the gradients of one sequence of a channel.  checkpoints: room for the state before every chunk. */
static wkv4_state wkv4_sequence_backward(const gt_wkv4_args *a, const ref_sequence *s, const wkv4_channel *c,
                                         wkv4_state *checkpoints, wkv4_sums *sums) {
    const wkv4_state given = wkv4_load_three(a, a->state_in, a->state_in_shared ? 0 : s->row, c->d);
    const wkv4_state last = wkv4_load_three(a, a->dstate_out, s->row, c->d);
    const int64_t chunks = (s->last - s->first + WKV4_CHUNK - 1) / WKV4_CHUNK;
    wkv4_shares shares[WKV4_CHUNK];
    double M = last.a, L = last.p;
    if (chunks == 0) return last;
    checkpoints[0] = wkv4_of_caller(given);
    for (int64_t i = 1; i < chunks; i++) {
        const int64_t first = s->first + (i - 1) * WKV4_CHUNK;
        checkpoints[i] = wkv4_advance(a, s, c, first, first + WKV4_CHUNK, checkpoints[i - 1], NULL);
    }
    wkv4_state gradient = {0, 0, 0};
    for (int64_t i = chunks - 1; i >= 0; i--) {
        const int64_t first = s->first + i * WKV4_CHUNK,
                      end = s->last - first < WKV4_CHUNK ? s->last : first + WKV4_CHUNK;
        wkv4_advance(a, s, c, first, end, checkpoints[i], shares);
        for (int64_t t = end - 1; t >= first; t--) {
            const wkv4_shares x = shares[t - first];
            const double dy = wkv4_load(a, a->dy, a->dy_stride, s, t, c->d);
            const double of_r = x.r * x.not_r * x.e * dy, of_p = x.p * x.not_p * x.e * M;
            if (t == s->first) gradient = wkv4_first_gradient(a, s, c, given, M, L);
            if (a->dv) ref_store(a->dv, a->dtype, ref_at(a->dv_stride, s->b, t, c->d), (real)(x.r * dy + x.p * M));
            if (a->dk) ref_store(a->dk, a->dtype, ref_at(a->dk_stride, s->b, t, c->d), (real)(of_r + of_p + x.p * L));
            sums->u += of_r;
            sums->g += x.not_p * L - of_p;
            L = x.not_p * L - of_p - of_r;
            M = x.not_p * M + x.not_r * dy;
        }
    }
    return gradient;
}

/* ---- the C functions ------------------------------------------------------------------------- */

gt_status GT_REF(wkv4_forward)(const gt_wkv4_args *args) {
    gt_wkv4_args a;
    gt_dims dims;
    const gt_status status = gt_prepare(gt_op_wkv4(), GT_FORWARD, GT_HOST, args, &a, &dims);
    return status != GT_OK ? status : wkv4_run(&a, 0);
}

gt_status GT_REF(wkv4_step)(const gt_wkv4_args *args) {
    gt_wkv4_args a;
    gt_dims dims;
    const gt_status status = gt_prepare(gt_op_wkv4(), GT_STEP, GT_HOST, args, &a, &dims);
    return status != GT_OK ? status : wkv4_run(&a, 1);
}

gt_status GT_REF(wkv4_backward)(const gt_wkv4_args *args) {
    gt_wkv4_args a;
    gt_dims dims;
    gt_status status = gt_prepare(gt_op_wkv4(), GT_BACKWARD, GT_HOST, args, &a, &dims);
    ref_sequences all;
    double *scratch;
    if (status != GT_OK || (status = wkv4_sequences(&a, &all)) != GT_OK) return status;
    if (a.B == 0 || a.T == 0) {
        ref_no_grad(a.dw, a.D, a.accumulate);
        ref_no_grad(a.du, a.D, a.accumulate);
        ref_pass_gradients(a.dstate_in, a.dstate_out, a.state_in_shared, all.count, 3 * a.D, a.accumulate);
        return GT_OK;
    }
    const int64_t chunks = a.T / WKV4_CHUNK + 1;
    if ((status = ref_sums(&scratch, gt_times(3 * a.D, chunks))) != GT_OK) return status;
    GT_PARALLEL_FOR
    for (int64_t d = 0; d < a.D; d++) {
        const wkv4_channel c = wkv4_load_channel(&a, d);
        wkv4_sums sums = {0, 0, {0, 0, 0}};
        for (int64_t i = 0; i < all.count; i++) {
            const ref_sequence s = ref_sequence_at(&all, i);
            const wkv4_state x =
                wkv4_sequence_backward(&a, &s, &c, (wkv4_state *)(void *)(scratch + 3 * d * chunks), &sums);
            if (!a.state_in_shared) wkv4_store_three(&a, a.dstate_in, s.row, d, x);
            sums.dstate[0] += x.a, sums.dstate[1] += x.b, sums.dstate[2] += x.p;
        }
        ref_clear_unused(&all, d, a.dk, a.dtype, a.dk_stride, 1);
        ref_clear_unused(&all, d, a.dv, a.dtype, a.dv_stride, 1);
        ref_grad(a.dw, d, c.slope * sums.g, a.accumulate);
        ref_grad(a.du, d, sums.u, a.accumulate);
        for (int64_t i = 0; i < 3 && a.state_in_shared; i++)
            ref_grad(a.dstate_in, i * a.D + d, sums.dstate[i], a.accumulate);
    }
    free(scratch);
    return GT_OK;
}
