/* reference/gt_wkv6.c - WKV6 on the CPU, the twin of gt_wkv6.cuh.  It computes the same mathematics, token by token.
 *
 *     y_t = scale (S^T r_t + (sum_n r_t[n] u[n] k_t[n]) v_t)       reads S [N,V] before token t
 *     S  <- diag(d_t) S + k_t v_t^T                                d_t = exp(-exp(w_t)), or exp(w_t)
 *
 * Source: Peng et al. 2024, arXiv:2404.05892.
 *
 * Backward, with S before the token, G = dL/dS after it, dy times scale, and b = <dy, v>:
 *     dr = S dy + b u . k          dk = G v + b u . r          dv = G^T k + (sum_n r u k) dy
 *     dd[n] = sum_j G[n,j] S[n,j]  du = sum b r . k            G <- diag(d) G + r dy^T
 *
 * Each thread takes heads.  It processes the sequences of a head (batch elements or packed sequences) in order, so sums
 * over them have a fixed order. */
#include "gt_ref.h"

/* Tokens of a chunk.  Backward keeps the state before every chunk, and recomputes the states inside a chunk from it. */
enum { WKV6_CHUNK = 64 };

/* ---- one token of one head ------------------------------------------------------------------- */

/* Returns the decay d = exp(-exp(w)), or exp(w) if w is the log of the decay. */
static real wkv6_decay(const gt_wkv6_args *a, real w) { return ref_exp(a->decay == GT_DECAY_LOG ? w : -ref_exp(w)); }

/* Returns dL/dw, from dd = dL/dd.  The test avoids 0 * inf for a decay of exactly 0. */
static real wkv6_decay_gradient(const gt_wkv6_args *a, real w, real d, real dd) {
    if (d == 0) return 0;
    return a->decay == GT_DECAY_LOG ? dd * d : -dd * d * ref_exp(w);
}

/* Values of one token of one head.  r, k, w and the decay d have N elements; v, dy and dv have V.  Only backward uses
 * dv; forward stores y in dy. */
typedef struct wkv6_token {
    real *r, *k, *w, *d, *v, *dy, *dv;
} wkv6_token;

/* Returns how many numbers of scratch a token needs. */
static int64_t wkv6_token_count(const gt_wkv6_args *a) { return 4 * a->N + 3 * a->V; }

static wkv6_token wkv6_token_in(const gt_wkv6_args *a, real *scratch) {
    wkv6_token x;
    x.r = scratch;
    x.k = x.r + a->N;
    x.w = x.k + a->N;
    x.d = x.w + a->N;
    x.v = x.d + a->N;
    x.dy = x.v + a->V;
    x.dv = x.dy + a->V;
    return x;
}

/* Loads the inputs of token t of head h, except dy, which backward loads itself. */
static void wkv6_load(const gt_wkv6_args *a, int64_t b, int64_t t, int64_t h, wkv6_token *x) {
    ref_load_row(x->r, a->r, a->dtype, ref_at(a->r_stride, b, t, h), a->N);
    ref_load_row(x->k, a->k, a->dtype, ref_at(a->k_stride, b, t, h), a->N);
    ref_load_row(x->w, a->w, a->w_dtype, ref_at(a->w_stride, b, t, h), a->N);
    ref_load_row(x->v, a->v, a->dtype, ref_at(a->v_stride, b, t, h), a->V);
    for (int64_t n = 0; n < a->N; n++) x->d[n] = wkv6_decay(a, x->w[n]);
}

/* Returns sum_n r u k. */
static real wkv6_bonus(const gt_wkv6_args *a, int64_t h, const wkv6_token *x) {
    real sum = 0;
    for (int64_t n = 0; n < a->N; n++) sum += x->r[n] * ref_parameter(a->u, a->parameter_dtype, h * a->N + n) * x->k[n];
    return sum;
}

/* Computes y_t = scale (S^T r_t + (sum_n r u k) v_t). */
static void wkv6_output(const gt_wkv6_args *a, int64_t h, const wkv6_token *x, const real *S, real *y) {
    real ruk = wkv6_bonus(a, h, x);
    for (int64_t j = 0; j < a->V; j++) y[j] = ruk * x->v[j];
    for (int64_t n = 0; n < a->N; n++) {
        GT_SIMD
        for (int64_t j = 0; j < a->V; j++) y[j] += x->r[n] * S[n * a->V + j];
    }
    for (int64_t j = 0; j < a->V; j++) y[j] *= a->scale;
}

/* Computes S <- diag(d_t) S + k_t v_t^T. */
static void wkv6_advance(const gt_wkv6_args *a, const wkv6_token *x, real *S) {
    for (int64_t n = 0; n < a->N; n++) {
        GT_SIMD
        for (int64_t j = 0; j < a->V; j++) S[n * a->V + j] = x->d[n] * S[n * a->V + j] + x->k[n] * x->v[j];
    }
}

/* Stores y of a token or, in a mixed call, the sum that takes its place.  Even the double build rounds y of ssd to the
 * values that kernels store and read, so that comparisons show the errors of the sum. */
static void wkv6_store_output(const gt_wkv6_args *a, const gt_mix *mix, int64_t b, int64_t t, int64_t h, real *y) {
    if (mix && mix->y) ref_store_row(mix->y, a->dtype, ref_at(mix->y_stride, b, t, h), y, a->V);
    for (int64_t j = 0; mix && j < a->V; j++) {
        const int64_t c = h * a->V + j;
        const int64_t at = ref_at(mix->ssm_stride, b, t, c / mix->P) + c % mix->P;
        const real ssm = ref_rounded(ref_load(mix->ssm, a->dtype, at), a->dtype);
        const real rest = ref_parameter(mix->residual, a->dtype, ref_at(mix->residual_stride, b, t, h) + j);
        y[j] = ref_param(mix->gain_wkv, c, 1) * y[j] + (ref_param(mix->gain_ssm, c, 1) * ssm + rest);
    }
    ref_store_row(a->y, a->dtype, ref_at(a->y_stride, b, t, h), y, a->V);
}

static gt_status wkv6_sequences(const gt_wkv6_args *a, ref_sequences *q) {
    return ref_find_sequences(a->B, a->T, a->cu_seqlens, a->seq_count, a->seq_capacity, q);
}

/* ---- forward and step ------------------------------------------------------------------------ */

static int wkv6_has_tokens(const gt_wkv6_args *a) { return a->B > 0 && a->T > 0; }

/* Runs forward, or a step, which updates the states of slots in place.  `a` holds checked arguments.  mix: NULL, or
 * what a mixed call adds to y. */
static gt_status wkv6_run(const gt_wkv6_args *a, const gt_mix *mix, int step) {
    int64_t NV = gt_times(a->N, a->V), per_head = gt_plus(NV, wkv6_token_count(a));
    ref_sequences all;
    real *scratch;
    gt_status status = wkv6_sequences(a, &all);
    ref_use_pool(&all, a->slots, a->starts_zero, a->slot_capacity);
    if (status == GT_OK && !wkv6_has_tokens(a)) {
        if (!step)
            ref_pass_rows(&all, a->state_out, a->state_in, a->state_dtype, a->state_in_shared, gt_times(a->H, NV),
                          a->state_out_stride);
        return GT_OK;
    }
    if (status != GT_OK || (status = ref_scratch(&scratch, gt_times(a->H, per_head))) != GT_OK) return status;
    GT_PARALLEL_FOR
    for (int64_t h = 0; h < a->H; h++) {
        real *S = scratch + h * per_head;
        wkv6_token x = wkv6_token_in(a, S + NV);
        for (int64_t s = 0; s < all.count; s++) {
            const ref_sequence q = step ? ref_step_element(s, a->T, a->slots, a->slot_capacity, a->tokens, a->commit)
                                        : ref_sequence_at(&all, s);
            const int64_t row_in = a->state_in_shared ? 0 : q.row;
            const float *const from = step ? a->state_out : q.starts_zero ? NULL : a->state_in;
            ref_clear(q.b, ref_first_cleared(&q), step ? a->T : q.last, h, a->y, a->dtype, a->y_stride, a->V);
            if (mix && mix->y)
                ref_clear(q.b, ref_first_cleared(&q), step ? a->T : q.last, h, mix->y, a->dtype, mix->y_stride, a->V);
            if (q.row < 0) continue;
            const int is_int8 = step && a->state_dtype == GT_INT8;
            const ref_int8_rows int8 = {a->state_out,
                                        a->state_scale,
                                        q.row * a->state_out_stride + h * NV,
                                        q.row * a->state_scale_stride +
                                            h * a->N * ((a->V + GT_INT8_COLUMNS - 1) / GT_INT8_COLUMNS),
                                        a->N,
                                        a->V,
                                        GT_INT8_COLUMNS};
            if (is_int8)
                ref_load_int8(S, &int8);
            else
                ref_load_state(S, from, a->state_dtype, row_in * a->state_out_stride + h * NV, NV);
            for (int64_t t = q.first;; t++) {
                if (is_int8 && t == q.commit && t > q.first)
                    ref_store_int8(&int8, S, h * a->N, a->rounding_seed, a->rounding_steps ? a->rounding_steps[s] : 0);
                if (!is_int8 && t == q.commit && a->state_out)
                    ref_store_state(a->state_out, a->state_dtype, q.row * a->state_out_stride + h * NV, S, h * a->N,
                                    a->N, a->V, a->rounding_seed, a->rounding_steps ? a->rounding_steps[s] : 0);
                const int64_t snapshot = ref_snapshot_row(a->snapshot_every, a->T, q.b, q.first, t);
                if (a->snapshots && snapshot >= 0)
                    ref_store_row(a->snapshots, a->snapshot_dtype, (snapshot * a->H + h) * NV, S, NV);
                if (t == q.last) break;
                wkv6_load(a, q.b, t, h, &x);
                wkv6_output(a, h, &x, S, x.dy);
                wkv6_store_output(a, mix, q.b, t, h, x.dy);
                wkv6_advance(a, &x, S);
            }
        }
        ref_clear_unused(&all, h, a->y, a->dtype, a->y_stride, a->V);
        if (mix && mix->y) ref_clear_unused(&all, h, mix->y, a->dtype, mix->y_stride, a->V);
    }
    free(scratch);
    return GT_OK;
}

/* ---- pieces of sequences ---------------------------------------------------------------------- */

/* Computes the state after a piece that starts from a state of zeros, and the log of the piece's decay.  is_reverse:
 * instead computes the gradient of the state before a piece, from dy of the piece alone.  In that case the token's k
 * holds scale r, and its v holds dy, so that wkv6_advance computes G. */
static gt_status wkv6_segment(const gt_wkv6_args *a, int is_reverse) {
    const int64_t NV = gt_times(a->N, a->V), per_head = gt_plus(NV, wkv6_token_count(a));
    float *out = is_reverse ? a->dstate_in : a->state_out;
    ref_sequences all;
    real *scratch = NULL;
    double *sums = NULL;
    gt_status status = wkv6_sequences(a, &all);
    if (status != GT_OK) return status;
    if (!wkv6_has_tokens(a)) {
        ref_pass_states(out, NULL, 0, all.count, gt_times(a->H, NV));
        ref_pass_states(a->decay_out, NULL, 0, all.count, gt_times(a->H, a->N));
        return GT_OK;
    }
    status = ref_sums(&sums, gt_times(a->H, a->N));
    if (status == GT_OK) status = ref_scratch(&scratch, gt_times(a->H, per_head));
    if (status != GT_OK) {
        free(sums);
        return status;
    }
    GT_PARALLEL_FOR
    for (int64_t h = 0; h < a->H; h++) {
        real *S = scratch + h * per_head;
        double *log_decay = sums + h * a->N;
        wkv6_token x = wkv6_token_in(a, S + NV);
        for (int64_t s = 0; s < all.count; s++) {
            const ref_sequence q = ref_sequence_at(&all, s);
            memset(S, 0, (size_t)NV * sizeof(real));
            for (int64_t n = 0; n < a->N; n++) log_decay[n] = 0;
            for (int64_t i = 0; i < q.last - q.first; i++) {
                const int64_t t = is_reverse ? q.last - 1 - i : q.first + i;
                const gt_stride left = is_reverse ? a->r_stride : a->k_stride;
                const gt_stride right = is_reverse ? a->dy_stride : a->v_stride;
                ref_load_row(x.k, is_reverse ? a->r : a->k, a->dtype, ref_at(left, q.b, t, h), a->N);
                ref_load_row(x.v, is_reverse ? a->dy : a->v, a->dtype, ref_at(right, q.b, t, h), a->V);
                ref_load_row(x.w, a->w, a->w_dtype, ref_at(a->w_stride, q.b, t, h), a->N);
                for (int64_t n = 0; n < a->N; n++) {
                    x.d[n] = wkv6_decay(a, x.w[n]);
                    log_decay[n] += a->decay == GT_DECAY_LOG ? x.w[n] : -ref_exp(x.w[n]);
                    if (is_reverse) x.k[n] *= a->scale;
                }
                wkv6_advance(a, &x, S);
            }
            memcpy((real *)out + (q.row * a->H + h) * NV, S, (size_t)NV * sizeof(real));
            for (int64_t n = 0; a->decay_out && n < a->N; n++)
                ((real *)a->decay_out)[(q.row * a->H + h) * a->N + n] = (real)log_decay[n];
        }
    }
    free(scratch);
    free(sums);
    return GT_OK;
}

static gt_status wkv6_join(const gt_wkv6_args *args, int is_reverse) {
    gt_wkv6_args a;
    gt_dims dims;
    gt_status status = gt_prepare(gt_op_wkv6(), is_reverse ? GT_JOIN_BACKWARD : GT_JOIN, GT_HOST, args, &a, &dims);
    if (status != GT_OK) return status;
    const ref_pieces x = {a.pieces,
                          a.B,
                          gt_times(a.H, a.N),
                          a.V,
                          a.piece_states,
                          a.piece_decays,
                          is_reverse ? a.dstate_out : a.state_in,
                          !is_reverse && a.state_in_shared,
                          is_reverse,
                          a.piece_starts};
    ref_join(&x);
    return GT_OK;
}

/* ---- backward -------------------------------------------------------------------------------- */

/* Computes the gradients of token t from the state S before it and the gradient G of the state after it.  On return G
 * is the gradient of the state before the token.  Adds to du[n]. */
static void wkv6_token_backward(const gt_wkv6_args *a, int64_t b, int64_t t, int64_t h, const real *S,
                                const wkv6_token *x, real *G, double *du) {
    real vdy = 0, ruk = wkv6_bonus(a, h, x); /* vdy: b = <dy, v> */
    ref_load_row(x->dy, a->dy, a->dtype, ref_at(a->dy_stride, b, t, h), a->V);
    for (int64_t j = 0; j < a->V; j++) x->dy[j] *= a->scale;
    for (int64_t j = 0; j < a->V; j++) vdy += x->v[j] * x->dy[j];
    for (int64_t j = 0; j < a->V; j++) x->dv[j] = ruk * x->dy[j];
    for (int64_t n = 0; n < a->N; n++) {
        real u = ref_param(a->u, h * a->N + n, 0);
        real dr = vdy * u * x->k[n], dk = vdy * u * x->r[n], dd = 0;
        GT_SIMD_SUM(dr, dk, dd)
        for (int64_t j = 0; j < a->V; j++) {
            real g = G[n * a->V + j], s = S[n * a->V + j];
            dr += s * x->dy[j];
            dk += g * x->v[j];
            dd += g * s;
            x->dv[j] += g * x->k[n];
            G[n * a->V + j] = x->d[n] * g + x->r[n] * x->dy[j];
        }
        du[n] += vdy * x->r[n] * x->k[n];
        if (a->dr) ref_store(a->dr, a->dtype, ref_at(a->dr_stride, b, t, h) + n, dr);
        if (a->dk) ref_store(a->dk, a->dtype, ref_at(a->dk_stride, b, t, h) + n, dk);
        if (a->dw)
            ref_store(a->dw, a->w_dtype, ref_at(a->dw_stride, b, t, h) + n,
                      wkv6_decay_gradient(a, x->w[n], x->d[n], dd));
    }
    if (a->dv) ref_store_row(a->dv, a->dtype, ref_at(a->dv_stride, b, t, h), x->dv, a->V);
}

/* Computes the gradients of one sequence of one head.  On return G is the gradient of the sequence's first state.
 * states: room for the state before every chunk.  replay: room for the state before every token of one chunk. */
static void wkv6_sequence_backward(const gt_wkv6_args *a, const ref_sequence *q, int64_t h, wkv6_token *x, real *states,
                                   real *replay, real *G, double *du) {
    int64_t NV = a->N * a->V, chunks = (q->last - q->first + WKV6_CHUNK - 1) / WKV6_CHUNK;
    int64_t row_in = a->state_in_shared ? 0 : q->row;
    ref_copy_state(states, a->state_in, (row_in * a->H + h) * NV, NV);
    for (int64_t c = 1; c < chunks; c++) {
        int64_t end = q->first + c * WKV6_CHUNK;
        memcpy(states + c * NV, states + (c - 1) * NV, (size_t)NV * sizeof(real));
        for (int64_t t = end - WKV6_CHUNK; t < end; t++) {
            wkv6_load(a, q->b, t, h, x);
            wkv6_advance(a, x, states + c * NV);
        }
    }
    ref_copy_state(G, a->dstate_out, (q->row * a->H + h) * NV, NV);
    for (int64_t c = chunks - 1; c >= 0; c--) {
        int64_t first = q->first + c * WKV6_CHUNK;
        int64_t last = first + WKV6_CHUNK < q->last ? first + WKV6_CHUNK : q->last;
        memcpy(replay, states + c * NV, (size_t)NV * sizeof(real));
        for (int64_t t = first; t + 1 < last; t++) {
            real *S = replay + (t + 1 - first) * NV;
            memcpy(S, S - NV, (size_t)NV * sizeof(real));
            wkv6_load(a, q->b, t, h, x);
            wkv6_advance(a, x, S);
        }
        for (int64_t t = last - 1; t >= first; t--) {
            wkv6_load(a, q->b, t, h, x);
            wkv6_token_backward(a, q->b, t, h, replay + (t - first) * NV, x, G, du);
        }
    }
}

/* ---- the C functions ------------------------------------------------------------------------- */

gt_status GT_REF(wkv6_forward)(const gt_wkv6_args *args) {
    gt_wkv6_args a;
    gt_dims dims;
    gt_status status = gt_prepare(gt_op_wkv6(), GT_FORWARD, GT_HOST, args, &a, &dims);
    return status != GT_OK ? status : wkv6_run(&a, NULL, 0);
}

gt_status GT_REF(wkv6_step)(const gt_wkv6_args *args) {
    gt_wkv6_args a;
    gt_dims dims;
    gt_status status = gt_prepare(gt_op_wkv6(), GT_STEP, GT_HOST, args, &a, &dims);
    return status != GT_OK ? status : wkv6_run(&a, NULL, 1);
}

gt_status GT_REF(wkv6_mixed)(const gt_wkv6_args *args, const gt_mix *mix, int step) {
    gt_wkv6_args a;
    gt_dims dims;
    const gt_status status = gt_prepare(gt_op_wkv6(), step ? GT_STEP : GT_FORWARD, GT_HOST, args, &a, &dims);
    return status != GT_OK ? status : wkv6_run(&a, mix, step);
}

gt_status GT_REF(wkv6_segment)(const gt_wkv6_args *args) {
    gt_wkv6_args a;
    gt_dims dims;
    gt_status status = gt_prepare(gt_op_wkv6(), GT_SEGMENT, GT_HOST, args, &a, &dims);
    return status != GT_OK ? status : wkv6_segment(&a, 0);
}

gt_status GT_REF(wkv6_segment_backward)(const gt_wkv6_args *args) {
    gt_wkv6_args a;
    gt_dims dims;
    gt_status status = gt_prepare(gt_op_wkv6(), GT_SEGMENT_BACKWARD, GT_HOST, args, &a, &dims);
    return status != GT_OK ? status : wkv6_segment(&a, 1);
}

gt_status GT_REF(wkv6_join)(const gt_wkv6_args *args) { return wkv6_join(args, 0); }
gt_status GT_REF(wkv6_join_backward)(const gt_wkv6_args *args) { return wkv6_join(args, 1); }

gt_status GT_REF(wkv6_backward)(const gt_wkv6_args *args) {
    gt_wkv6_args a;
    gt_dims dims;
    gt_status status = gt_prepare(gt_op_wkv6(), GT_BACKWARD, GT_HOST, args, &a, &dims);
    ref_sequences all;
    if (status != GT_OK || (status = wkv6_sequences(&a, &all)) != GT_OK) return status;
    /* Scratch of a head: the states before all chunks, the states before the tokens of one chunk, G, and one token.
     * Sums of a head: du and, for a shared state_in, G summed over sequences. */
    int64_t NV = gt_times(a.N, a.V), chunks = (a.T + WKV6_CHUNK - 1) / WKV6_CHUNK + 1;
    int64_t per_head = gt_plus(gt_times(chunks + WKV6_CHUNK + 1, NV), wkv6_token_count(&a));
    int64_t sums_per_head = gt_plus(a.N, a.state_in_shared ? NV : 0);
    real *scratch = NULL;
    double *sums = NULL;
    if (!wkv6_has_tokens(&a)) {
        ref_no_grad(a.du, gt_times(a.H, a.N), a.accumulate);
        ref_pass_gradients(a.dstate_in, a.dstate_out, a.state_in_shared, all.count, gt_times(a.H, NV), a.accumulate);
        return GT_OK;
    }
    status = ref_sums(&sums, gt_times(a.H, sums_per_head));
    if (status == GT_OK) status = ref_scratch(&scratch, gt_times(a.H, per_head));
    if (status != GT_OK) {
        free(sums);
        return status;
    }
    GT_PARALLEL_FOR
    for (int64_t h = 0; h < a.H; h++) {
        real *states = scratch + h * per_head, *replay = states + chunks * NV;
        real *G = replay + WKV6_CHUNK * NV;
        double *du = sums + h * sums_per_head, *G_sum = du + a.N;
        wkv6_token x = wkv6_token_in(&a, G + NV);
        for (int64_t s = 0; s < all.count; s++) {
            ref_sequence q = ref_sequence_at(&all, s);
            wkv6_sequence_backward(&a, &q, h, &x, states, replay, G, du);
            if (a.dstate_in && !a.state_in_shared)
                memcpy((real *)a.dstate_in + (s * a.H + h) * NV, G, (size_t)NV * sizeof(real));
            for (int64_t i = 0; a.state_in_shared && i < NV; i++) G_sum[i] += G[i];
        }
        ref_clear_unused(&all, h, a.dr, a.dtype, a.dr_stride, a.N);
        ref_clear_unused(&all, h, a.dk, a.dtype, a.dk_stride, a.N);
        ref_clear_unused(&all, h, a.dw, a.w_dtype, a.dw_stride, a.N);
        ref_clear_unused(&all, h, a.dv, a.dtype, a.dv_stride, a.V);
        for (int64_t n = 0; n < a.N; n++) ref_grad(a.du, h * a.N + n, du[n], a.accumulate);
        if (a.state_in_shared)
            for (int64_t i = 0; i < NV; i++) ref_grad(a.dstate_in, h * NV + i, G_sum[i], a.accumulate);
    }
    free(scratch);
    free(sums);
    return GT_OK;
}
