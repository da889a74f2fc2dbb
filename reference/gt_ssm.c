/* reference/gt_ssm.c - Mamba-2 (ssd) and Mamba-1 (selective_scan) on the CPU, the twins of gt_ssm.cuh.  They compute
 * the same mathematics, token by token.
 *
 *     h_t = exp(Delta_t A) h_{t-1} + Delta_t x_t Bm_t^T       h [P,N], read after the update
 *     y_t = (h_t Cm_t + Dskip . x_t) . silu(z_t)
 *
 * Sources: Dao and Gu 2024, arXiv:2405.21060; Gu and Dao 2023, arXiv:2312.00752.  The selective scan is the same
 * recurrence: every channel is a head with P = 1, and every state element has its own A.  So both operators use the
 * code below; scan_as_ssd converts a scan call to an ssd call.
 *
 * Backward: G is dL/dh_t after the addition of dy_t Cm_t^T, and dy is the gradient of y before the gate.
 *     dCm = sum dy_t h_t            dBm = sum Delta x_t G      (sums over the heads of a group)
 *     dx  = Delta G Bm + Dskip dy   da  = <G, exp(Delta A) h_{t-1}>
 *     dDelta = <x, G Bm> + A da     dA  = sum Delta da         G <- exp(Delta A) G
 *
 * Each thread takes heads.  Sums over heads or over the batch are in index order. */
#include "gt_ref.h"

/* Tokens of a chunk.  Backward keeps the state before every chunk, and recomputes the states inside a chunk from it. */
enum { SSM_CHUNK = 64 };

/* A call of either operator, with checked arguments.  For the selective scan H = D, P = 1, x is u, and A and dA are
 * [H,N]. */
typedef struct ssm_call {
    gt_ssd_args a;
    int A_per_state;                  /* 0: A and dA are [H], as in ssd; 1: [H,N] */
    int64_t Bm_n, Cm_n, dBm_n, dCm_n; /* strides of the last index */
    ref_sequences all;
} ssm_call;

static gt_status ssm_sequences(ssm_call *c) {
    const gt_ssd_args *a = &c->a;
    const gt_status status = ref_find_sequences(a->B, a->T, a->cu_seqlens, a->seq_count, a->seq_capacity, &c->all);
    ref_use_pool(&c->all, a->slots, a->starts_zero, a->slot_capacity);
    return status;
}

/* ---- one token of one head ------------------------------------------------------------------- */

typedef struct ssm_token {
    real *x, *z, *y;     /* [P]; y holds dy in backward */
    real *B, *C, *decay; /* [N]; decay is exp(Delta A) from ref_decay */
    real *da;            /* [N]; backward: the gradient of Delta A */
    /* Some decay is a growth that may exceed a real.  For it ref_decay returns a negative number. */
    int grows_far;
    real delta, slope; /* Delta and its derivative with respect to dt */
} ssm_token;

/* Returns how many numbers of scratch a token needs. */
static int64_t ssm_token_count(const gt_ssd_args *a) { return 3 * a->P + 4 * a->N; }

static ssm_token ssm_token_in(const gt_ssd_args *a, real *scratch) {
    ssm_token x;
    x.x = scratch;
    x.z = x.x + a->P;
    x.y = x.z + a->P;
    x.B = x.y + a->P;
    x.C = x.B + a->N;
    x.decay = x.C + a->N;
    x.da = x.decay + a->N;
    x.delta = x.slope = 0;
    x.grows_far = 0;
    return x;
}

/* Computes Delta and its slope.  Forward and backward share this code, so that they agree on every limit. */
static void ssm_load_delta(const gt_ssd_args *a, int64_t b, int64_t t, int64_t h, ssm_token *x) {
    real v =
        ref_load(a->dt, a->dt_dtype, ref_at(a->dt_stride, b, t, h)) + ref_parameter(a->dt_bias, a->parameter_dtype, h);
    x->delta = v;
    x->slope = 1;
    if (a->softplus) {
        x->delta = ref_softplus(v);
        x->slope = v > 20 ? 1 : ref_sigmoid(v);
    }
    if (a->dt_limit && (x->delta < a->dt_min || x->delta > a->dt_max)) {
        x->delta = x->delta < a->dt_min ? a->dt_min : a->dt_max;
        x->slope = 0;
    }
}

static real ssm_A(const ssm_call *c, int64_t h, int64_t n) {
    return ((const real *)c->a.A)[c->A_per_state ? h * c->a.N + n : h];
}

/* Loads the inputs of token t of head h, except dy, which backward loads itself. */
static void ssm_load(const ssm_call *c, int64_t b, int64_t t, int64_t h, ssm_token *x) {
    const gt_ssd_args *a = &c->a;
    int64_t g = h / (a->H / a->G);
    ref_load_row(x->x, a->x, a->dtype, ref_at(a->x_stride, b, t, h), a->P);
    for (int64_t n = 0; n < a->N; n++) {
        x->B[n] = ref_load(a->Bm, a->dtype, ref_at(a->Bm_stride, b, t, g) + n * c->Bm_n);
        x->C[n] = ref_load(a->Cm, a->dtype, ref_at(a->Cm_stride, b, t, g) + n * c->Cm_n);
    }
    if (a->z) ref_load_row(x->z, a->z, a->dtype, ref_at(a->z_stride, b, t, h), a->P);
    ssm_load_delta(a, b, t, h, x);
    x->grows_far = 0;
    for (int64_t n = 0; n < a->N; n++) {
        x->decay[n] = n && !c->A_per_state ? x->decay[0] : ref_decay(x->delta * ssm_A(c, h, n));
        x->grows_far |= x->decay[n] < 0;
    }
}

static real ssm_skip(const gt_ssd_args *a, int64_t h, int64_t p) {
    return ref_parameter(a->Dskip, a->parameter_dtype, a->Dskip_per_channel ? h * a->P + p : h);
}

/* Computes h <- exp(Delta A) h + Delta x Bm^T. */
static void ssm_advance(const gt_ssd_args *a, const ssm_token *x, real *state) {
    const real *restrict B = x->B, *restrict decay = x->decay;
    for (int64_t p = 0; p < a->P; p++) {
        real *restrict S = state + p * a->N, w = x->delta * x->x[p];
        if (x->grows_far) {
            for (int64_t n = 0; n < a->N; n++) S[n] = ref_carry(decay[n], S[n]) + w * B[n];
            continue;
        }
        GT_SIMD
        for (int64_t n = 0; n < a->N; n++) S[n] = decay[n] * S[n] + w * B[n];
    }
}

/* Stores y = (h Cm + Dskip . x) . silu(z) in x->y. */
static void ssm_output(const gt_ssd_args *a, int64_t h, const real *state, ssm_token *x) {
    const real *restrict C = x->C;
    for (int64_t p = 0; p < a->P; p++) {
        const real *restrict S = state + p * a->N;
        real y = 0;
        GT_SIMD_SUM(y)
        for (int64_t n = 0; n < a->N; n++) y += S[n] * C[n];
        y += ssm_skip(a, h, p) * x->x[p];
        x->y[p] = a->z ? y * ref_silu(x->z[p]) : y;
    }
}

/* ---- forward and step ------------------------------------------------------------------------ */

static int ssm_has_tokens(const gt_ssd_args *a) { return a->B > 0 && a->T > 0; }

/* Runs forward, or a step, which updates the states of slots in place. */
static gt_status ssm_run(const ssm_call *c, int step) {
    const gt_ssd_args *a = &c->a;
    int64_t PN = gt_times(a->P, a->N), per_head = gt_plus(PN, ssm_token_count(a));
    real *scratch;
    gt_status status;
    if (!ssm_has_tokens(a)) {
        if (!step)
            ref_pass_rows(&c->all, a->state_out, a->state_in, a->state_dtype, a->state_in_shared, gt_times(a->H, PN),
                          a->state_out_stride);
        return GT_OK;
    }
    status = ref_scratch(&scratch, gt_times(a->H, per_head));
    if (status != GT_OK) return status;
    GT_PARALLEL_FOR
    for (int64_t h = 0; h < a->H; h++) {
        real *S = scratch + h * per_head;
        ssm_token x = ssm_token_in(a, S + PN);
        for (int64_t s = 0; s < c->all.count; s++) {
            const ref_sequence q = step ? ref_step_element(s, a->T, a->slots, a->slot_capacity, a->tokens, a->commit)
                                        : ref_sequence_at(&c->all, s);
            const int64_t row_in = a->state_in_shared ? 0 : q.row;
            const float *const from = step ? a->state_out : q.starts_zero ? NULL : a->state_in;
            ref_clear(q.b, ref_first_cleared(&q), step ? a->T : q.last, h, a->y, a->dtype, a->y_stride, a->P);
            if (q.row < 0) continue;
            const int is_int8 = step && a->state_dtype == GT_INT8;
            const ref_int8_rows int8 = {a->state_out,
                                        a->state_scale,
                                        q.row * a->state_out_stride + h * PN,
                                        q.row * a->state_scale_stride + h * a->P,
                                        a->P,
                                        a->N,
                                        a->N};
            if (is_int8)
                ref_load_int8(S, &int8);
            else
                ref_load_state(S, from, a->state_dtype, row_in * a->state_out_stride + h * PN, PN);
            for (int64_t t = q.first;; t++) {
                if (is_int8 && t == q.commit && t > q.first)
                    ref_store_int8(&int8, S, h * a->P, a->rounding_seed, a->rounding_steps ? a->rounding_steps[s] : 0);
                if (!is_int8 && t == q.commit && a->state_out)
                    ref_store_state(a->state_out, a->state_dtype, q.row * a->state_out_stride + h * PN, S, h * a->P,
                                    a->P, a->N, a->rounding_seed, a->rounding_steps ? a->rounding_steps[s] : 0);
                const int64_t snapshot = ref_snapshot_row(a->snapshot_every, a->T, q.b, q.first, t);
                if (a->snapshots && snapshot >= 0)
                    ref_store_row(a->snapshots, a->snapshot_dtype, (snapshot * a->H + h) * PN, S, PN);
                if (t == q.last) break;
                ssm_load(c, q.b, t, h, &x);
                ssm_advance(a, &x, S);
                ssm_output(a, h, S, &x);
                ref_store_row(a->y, a->dtype, ref_at(a->y_stride, q.b, t, h), x.y, a->P);
            }
        }
        ref_clear_unused(&c->all, h, a->y, a->dtype, a->y_stride, a->P);
    }
    free(scratch);
    return GT_OK;
}

/* ---- pieces of sequences ---------------------------------------------------------------------- */

/* Computes the state after a piece that starts from a state of zeros, and the log of the piece's decay.  is_reverse:
 * instead computes the gradient of the state before a piece, from dy of the piece alone.  In that case the token's x
 * holds dy, and its B holds C. */
static gt_status ssd_segment(const ssm_call *c, int is_reverse) {
    const gt_ssd_args *a = &c->a;
    const int64_t PN = gt_times(a->P, a->N), per_head = gt_plus(PN, ssm_token_count(a));
    float *out = is_reverse ? a->dstate_in : a->state_out;
    real *scratch;
    gt_status status;
    if (!ssm_has_tokens(a)) {
        ref_pass_states(out, NULL, 0, c->all.count, gt_times(a->H, PN));
        ref_pass_states(a->decay_out, NULL, 0, c->all.count, a->H);
        return GT_OK;
    }
    status = ref_scratch(&scratch, gt_times(a->H, per_head));
    if (status != GT_OK) return status;
    GT_PARALLEL_FOR
    for (int64_t h = 0; h < a->H; h++) {
        const int64_t g = h / (a->H / a->G);
        real *S = scratch + h * per_head;
        ssm_token x = ssm_token_in(a, S + PN);
        for (int64_t s = 0; s < c->all.count; s++) {
            const ref_sequence q = ref_sequence_at(&c->all, s);
            double log_decay = 0;
            memset(S, 0, (size_t)PN * sizeof(real));
            for (int64_t i = 0; i < q.last - q.first; i++) {
                const int64_t t = is_reverse ? q.last - 1 - i : q.first + i;
                const gt_stride left = is_reverse ? a->dy_stride : a->x_stride;
                const gt_stride right = is_reverse ? a->Cm_stride : a->Bm_stride;
                real decay;
                ssm_load_delta(a, q.b, t, h, &x);
                ref_load_row(x.x, is_reverse ? a->dy : a->x, a->dtype, ref_at(left, q.b, t, h), a->P);
                ref_load_row(x.B, is_reverse ? a->Cm : a->Bm, a->dtype, ref_at(right, q.b, t, g), a->N);
                if (is_reverse && a->z) ref_load_row(x.z, a->z, a->dtype, ref_at(a->z_stride, q.b, t, h), a->P);
                decay = ref_decay(x.delta * ssm_A(c, h, 0));
                log_decay += (double)x.delta * (double)ssm_A(c, h, 0);
                for (int64_t p = 0; p < a->P; p++) {
                    const real w = is_reverse ? (a->z ? x.x[p] * ref_silu(x.z[p]) : x.x[p]) : x.delta * x.x[p];
                    for (int64_t n = 0; n < a->N; n++) { /* forward decays before it adds, reverse decays after */
                        real *element = S + p * a->N + n;
                        *element = is_reverse ? ref_carry(decay, *element + w * x.B[n])
                                              : ref_carry(decay, *element) + w * x.B[n];
                    }
                }
            }
            memcpy((real *)out + (q.row * a->H + h) * PN, S, (size_t)PN * sizeof(real));
            if (a->decay_out) ((real *)a->decay_out)[q.row * a->H + h] = (real)log_decay;
        }
    }
    free(scratch);
    return GT_OK;
}

/* ---- backward -------------------------------------------------------------------------------- */

/* Memory of all heads, one head after another: see ssm_head_in. */
typedef struct ssm_scratch {
    double *sums;  /* ssm_sums_count() for each head */
    real *numbers; /* ssm_head_count() for each head */
} ssm_scratch;

/* Backward's memory of one head. */
typedef struct ssm_head {
    double *dA, *dDskip; /* [N], [P]: sums over batch and time */
    double *ddt_bias;    /* [1]: sum over batch and time */
    double *G_sum;       /* [P,N]: for a shared state_in, the sum of G over sequences */
    real *states;        /* [chunks,P,N]: the state before every chunk */
    real *replay;        /* [SSM_CHUNK,P,N]: the state before every token of one chunk */
    real *G;             /* [P,N]: gradient of the state */
    real *dB, *dC;       /* [SSM_CHUNK,N]: what this head adds to the gradients of a chunk */
    ssm_token x;
} ssm_head;

static int64_t ssm_chunks(const gt_ssd_args *a) { return (a->T + SSM_CHUNK - 1) / SSM_CHUNK; }

static int64_t ssm_sums_count(const gt_ssd_args *a) {
    return gt_plus(a->N + a->P + 1, a->state_in_shared ? gt_times(a->P, a->N) : 0);
}

static int64_t ssm_head_count(const gt_ssd_args *a) {
    int64_t states = ssm_chunks(a) + 1 + SSM_CHUNK + 1;
    return gt_plus(gt_times(states, gt_times(a->P, a->N)), 2 * SSM_CHUNK * a->N + ssm_token_count(a));
}

static ssm_head ssm_head_in(const gt_ssd_args *a, const ssm_scratch *scratch, int64_t h) {
    int64_t PN = a->P * a->N;
    ssm_head k;
    k.dA = scratch->sums + h * ssm_sums_count(a);
    k.dDskip = k.dA + a->N;
    k.ddt_bias = k.dDskip + a->P;
    k.G_sum = k.ddt_bias + 1;
    k.states = scratch->numbers + h * ssm_head_count(a);
    k.replay = k.states + (ssm_chunks(a) + 1) * PN;
    k.G = k.replay + SSM_CHUNK * PN;
    k.dB = k.G + PN;
    k.dC = k.dB + SSM_CHUNK * a->N;
    k.x = ssm_token_in(a, k.dC + SSM_CHUNK * a->N);
    return k;
}

/* Backward of one token for one row of the state.  S is the row before the token.  G is the gradient of the row after
 * the token on entry, and of the row before the token on return.  For this row, w = Delta x, and dy is the gradient of
 * y before the gate.  Adds to x->da, dB and dC.  Sets *hC = <h, C> and *GB = <G, B>. */
static void ssm_row_backward(const ssm_token *x, int64_t N, real w, real dy, const real *restrict S, real *restrict G,
                             real *restrict dB, real *restrict dC, real *hC, real *GB) {
    const real *restrict B = x->B, *restrict C = x->C, *restrict decay = x->decay;
    real *restrict da = x->da, sum_hC = 0, sum_GB = 0;
    for (int64_t n = 0; x->grows_far && n < N; n++) {
        real kept = ref_carry(decay[n], S[n]), h = kept + w * B[n], g = G[n] + dy * C[n];
        sum_hC += h * C[n];
        sum_GB += g * B[n];
        da[n] += g * kept;
        dB[n] += w * g;
        dC[n] += dy * h;
        G[n] = ref_carry(decay[n], g);
    }
    if (x->grows_far) {
        *hC = sum_hC;
        *GB = sum_GB;
        return;
    }
    GT_SIMD_SUM(sum_hC, sum_GB)
    for (int64_t n = 0; n < N; n++) {
        real kept = decay[n] * S[n], h = kept + w * B[n], g = G[n] + dy * C[n];
        sum_hC += h * C[n];
        sum_GB += g * B[n];
        da[n] += g * kept;
        dB[n] += w * g;
        dC[n] += dy * h;
        G[n] = decay[n] * g;
    }
    *hC = sum_hC;
    *GB = sum_GB;
}

/* Adds to dA and ddt_bias, and computes ddt, from xGB = <x, G B> and x->da.  Each term is multiplied by the slope
 * before the terms are added, since their plain sum may overflow.  A test excludes 0 * inf, because beyond a limit of
 * dt the slope is 0. */
static void ssm_delta_backward(const ssm_call *c, int64_t b, int64_t t, int64_t h, real xGB, ssm_head *k) {
    const gt_ssd_args *a = &c->a;
    const ssm_token *x = &k->x;
    real ddt = x->slope * xGB;
    for (int64_t n = 0; n < a->N; n++) {
        ddt += x->slope * ssm_A(c, h, n) * x->da[n];
        k->dA[n] += x->delta * x->da[n];
    }
    if (x->slope == 0) ddt = 0;
    k->ddt_bias[0] += ddt;
    if (a->ddt) ref_store(a->ddt, a->dt_dtype, ref_at(a->ddt_stride, b, t, h), ddt);
}

/* Computes the gradients of token t, number i of its chunk, from the state before the token.  k->G is the gradient of
 * the state after the token on entry, and of the state before the token on return. */
static void ssm_token_backward(const ssm_call *c, int64_t b, int64_t t, int64_t i, int64_t h, ssm_head *k) {
    const gt_ssd_args *a = &c->a;
    int64_t PN = a->P * a->N;
    real *dB = k->dB + i * a->N, *dC = k->dC + i * a->N, xGB = 0;
    ssm_token *x = &k->x;
    ssm_load(c, b, t, h, x);
    ref_load_row(x->y, a->dy, a->dtype, ref_at(a->dy_stride, b, t, h), a->P);
    memset(dB, 0, (size_t)a->N * sizeof(real));
    memset(dC, 0, (size_t)a->N * sizeof(real));
    memset(x->da, 0, (size_t)a->N * sizeof(real));
    for (int64_t p = 0; p < a->P; p++) {
        real skip = ssm_skip(a, h, p), w = x->delta * x->x[p], hC, GB;
        real dy = a->z ? x->y[p] * ref_silu(x->z[p]) : x->y[p];
        ssm_row_backward(x, a->N, w, dy, k->replay + i * PN + p * a->N, k->G + p * a->N, dB, dC, &hC, &GB);
        xGB += x->x[p] * GB;
        k->dDskip[p] += dy * x->x[p];
        if (a->dx) ref_store(a->dx, a->dtype, ref_at(a->dx_stride, b, t, h) + p, x->delta * GB + skip * dy);
        if (a->dz)
            ref_store(a->dz, a->dtype, ref_at(a->dz_stride, b, t, h) + p,
                      x->y[p] * (hC + skip * x->x[p]) * ref_dsilu(x->z[p]));
    }
    ssm_delta_backward(c, b, t, h, xGB, k);
}

static int64_t ssm_chunks_of(const ref_sequence *q) { return (q->last - q->first + SSM_CHUNK - 1) / SSM_CHUNK; }

/* Fills k->states, and sets k->G to the gradient of the sequence's last state. */
static void ssm_checkpoints(const ssm_call *c, const ref_sequence *q, int64_t h, ssm_head *k) {
    const gt_ssd_args *a = &c->a;
    int64_t PN = a->P * a->N, row_in = a->state_in_shared ? 0 : q->row;
    ref_copy_state(k->states, a->state_in, (row_in * a->H + h) * PN, PN);
    for (int64_t i = 1; i < ssm_chunks_of(q); i++) {
        int64_t end = q->first + i * SSM_CHUNK;
        real *S = k->states + i * PN;
        memcpy(S, S - PN, (size_t)PN * sizeof(real));
        for (int64_t t = end - SSM_CHUNK; t < end; t++) {
            ssm_load(c, q->b, t, h, &k->x);
            ssm_advance(a, &k->x, S);
        }
    }
    ref_copy_state(k->G, a->dstate_out, (q->row * a->H + h) * PN, PN);
}

/* Computes the gradients of chunk i of a sequence, tokens first ... last-1. */
static void ssm_chunk_backward(const ssm_call *c, int64_t b, int64_t i, int64_t first, int64_t last, int64_t h,
                               ssm_head *k) {
    const gt_ssd_args *a = &c->a;
    int64_t PN = a->P * a->N;
    memcpy(k->replay, k->states + i * PN, (size_t)PN * sizeof(real));
    for (int64_t t = first; t + 1 < last; t++) {
        real *S = k->replay + (t + 1 - first) * PN;
        memcpy(S, S - PN, (size_t)PN * sizeof(real));
        ssm_load(c, b, t, h, &k->x);
        ssm_advance(a, &k->x, S);
    }
    for (int64_t t = last - 1; t >= first; t--) ssm_token_backward(c, b, t, t - first, h, k);
}

/* Stores n values to elements first, first + step, ... of `data`, unless `data` is NULL. */
static void ssm_store_strided(void *data, gt_dtype dtype, int64_t first, int64_t step, const real *from, int64_t n) {
    for (int64_t i = 0; data && i < n; i++) ref_store(data, dtype, first + i * step, from[i]);
}

/* Computes dBm and dCm of one group for token t, number i of its chunk.  The sums over the group's heads go to the
 * memory of the first head. */
static void ssm_group_backward(const ssm_call *c, int64_t b, int64_t t, int64_t i, int64_t g,
                               const ssm_scratch *scratch) {
    const gt_ssd_args *a = &c->a;
    int64_t R = a->H / a->G, row = i * a->N;
    ssm_head sum = ssm_head_in(a, scratch, g * R);
    for (int64_t h = g * R + 1; h < (g + 1) * R; h++) {
        ssm_head k = ssm_head_in(a, scratch, h);
        for (int64_t n = row; n < row + a->N; n++) {
            sum.dB[n] += k.dB[n];
            sum.dC[n] += k.dC[n];
        }
    }
    ssm_store_strided(a->dBm, a->dtype, ref_at(a->dBm_stride, b, t, g), c->dBm_n, sum.dB + row, a->N);
    ssm_store_strided(a->dCm, a->dtype, ref_at(a->dCm_stride, b, t, g), c->dCm_n, sum.dC + row, a->N);
}

/* Computes the gradients of one sequence, from its last chunk to its first.  At the end G of each head is the gradient
 * of the sequence's first state. */
static void ssm_sequence_backward(const ssm_call *c, const ref_sequence *q, const ssm_scratch *scratch) {
    const gt_ssd_args *a = &c->a;
    GT_PARALLEL_FOR
    for (int64_t h = 0; h < a->H; h++) {
        ssm_head k = ssm_head_in(a, scratch, h);
        ssm_checkpoints(c, q, h, &k);
    }
    for (int64_t i = ssm_chunks_of(q) - 1; i >= 0; i--) {
        int64_t first = q->first + i * SSM_CHUNK;
        int64_t last = first + SSM_CHUNK < q->last ? first + SSM_CHUNK : q->last;
        GT_PARALLEL_FOR
        for (int64_t h = 0; h < a->H; h++) {
            ssm_head k = ssm_head_in(a, scratch, h);
            ssm_chunk_backward(c, q->b, i, first, last, h, &k);
        }
        GT_PARALLEL_FOR
        for (int64_t j = 0; j < (last - first) * a->G; j++)
            ssm_group_backward(c, q->b, first + j / a->G, j / a->G, j % a->G, scratch);
    }
}

/* Returns the address of element i, or NULL if `data` is NULL. */
static void *ssm_element(void *data, gt_dtype dtype, int64_t i) {
#ifdef GT_REAL_IS_FLOAT
    const size_t bytes = dtype == GT_F32 ? 4 : 2;
#else
    const size_t bytes = sizeof(real);
    (void)dtype;
#endif
    return data ? (char *)data + (size_t)i * bytes : NULL;
}

/* Clears the gradients of tokens that belong to no sequence. */
static void ssm_clear_unused(const ssm_call *c) {
    const gt_ssd_args *a = &c->a;
    for (int64_t h = 0; h < a->H; h++) {
        ref_clear_unused(&c->all, h, a->dx, a->dtype, a->dx_stride, a->P);
        ref_clear_unused(&c->all, h, a->dz, a->dtype, a->dz_stride, a->P);
        ref_clear_unused(&c->all, h, a->ddt, a->dt_dtype, a->ddt_stride, 1);
    }
    for (int64_t g = 0; g < a->G; g++) {
        for (int64_t n = 0; n < a->N; n++) {
            ref_clear_unused(&c->all, g, ssm_element(a->dBm, a->dtype, n * c->dBm_n), a->dtype, a->dBm_stride, 1);
            ref_clear_unused(&c->all, g, ssm_element(a->dCm, a->dtype, n * c->dCm_n), a->dtype, a->dCm_stride, 1);
        }
    }
}

/* Stores dstate_in of one sequence, or adds it to the sum over all sequences. */
static void ssm_state_backward(const gt_ssd_args *a, int64_t row, int64_t h, ssm_head *k) {
    int64_t PN = a->P * a->N;
    if (a->state_in_shared)
        for (int64_t i = 0; i < PN; i++) k->G_sum[i] += k->G[i];
    else if (a->dstate_in)
        memcpy((real *)a->dstate_in + (row * a->H + h) * PN, k->G, (size_t)PN * sizeof(real));
}

static double ssm_sum(const double *values, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += values[i];
    return sum;
}

/* Writes the parameter gradients of one head. */
static void ssm_parameters_backward(const ssm_call *c, int64_t h, const ssm_head *k) {
    const gt_ssd_args *a = &c->a;
    int64_t PN = a->P * a->N;
    ref_grad(a->ddt_bias, h, k->ddt_bias[0], a->accumulate);
    if (!c->A_per_state) ref_grad(a->dA, h, ssm_sum(k->dA, a->N), a->accumulate);
    for (int64_t n = 0; c->A_per_state && n < a->N; n++) ref_grad(a->dA, h * a->N + n, k->dA[n], a->accumulate);
    if (!a->Dskip_per_channel) ref_grad(a->dDskip, h, ssm_sum(k->dDskip, a->P), a->accumulate);
    for (int64_t p = 0; a->Dskip_per_channel && p < a->P; p++)
        ref_grad(a->dDskip, h * a->P + p, k->dDskip[p], a->accumulate);
    for (int64_t i = 0; a->state_in_shared && i < PN; i++)
        ref_grad(a->dstate_in, h * PN + i, k->G_sum[i], a->accumulate);
}

/* Writes the gradients of a call without tokens. */
static void ssm_no_gradients(const ssm_call *c) {
    const gt_ssd_args *a = &c->a;
    ref_no_grad(a->dA, c->A_per_state ? gt_times(a->H, a->N) : a->H, a->accumulate);
    ref_no_grad(a->ddt_bias, a->H, a->accumulate);
    ref_no_grad(a->dDskip, a->Dskip_per_channel ? gt_times(a->H, a->P) : a->H, a->accumulate);
    ref_pass_gradients(a->dstate_in, a->dstate_out, a->state_in_shared, c->all.count,
                       gt_times(a->H, gt_times(a->P, a->N)), a->accumulate);
}

static gt_status ssm_backward(const ssm_call *c) {
    const gt_ssd_args *a = &c->a;
    ssm_scratch scratch = {NULL, NULL};
    gt_status status;
    if (!ssm_has_tokens(a)) {
        ssm_no_gradients(c);
        return GT_OK;
    }
    status = ref_sums(&scratch.sums, gt_times(a->H, ssm_sums_count(a)));
    if (status == GT_OK) status = ref_scratch(&scratch.numbers, gt_times(a->H, ssm_head_count(a)));
    for (int64_t s = 0; status == GT_OK && s < c->all.count; s++) {
        ref_sequence q = ref_sequence_at(&c->all, s);
        ssm_sequence_backward(c, &q, &scratch);
        for (int64_t h = 0; h < a->H; h++) {
            ssm_head k = ssm_head_in(a, &scratch, h);
            ssm_state_backward(a, q.row, h, &k);
        }
    }
    if (status == GT_OK) ssm_clear_unused(c);
    for (int64_t h = 0; status == GT_OK && h < a->H; h++) {
        ssm_head k = ssm_head_in(a, &scratch, h);
        ssm_parameters_backward(c, h, &k);
    }
    free(scratch.numbers);
    free(scratch.sums);
    return status;
}

/* ---- ssd ------------------------------------------------------------------------------------- */

static gt_status ssd_prepare(const gt_ssd_args *args, gt_pass pass, ssm_call *c) {
    gt_dims dims;
    gt_status status = gt_prepare(gt_op_ssd(), pass, GT_HOST, args, &c->a, &dims);
    c->A_per_state = 0;
    c->Bm_n = c->Cm_n = c->dBm_n = c->dCm_n = 1;
    return status != GT_OK ? status : ssm_sequences(c);
}

gt_status GT_REF(ssd_forward)(const gt_ssd_args *args) {
    ssm_call c;
    gt_status status = ssd_prepare(args, GT_FORWARD, &c);
    return status != GT_OK ? status : ssm_run(&c, 0);
}

gt_status GT_REF(ssd_step)(const gt_ssd_args *args) {
    ssm_call c;
    gt_status status = ssd_prepare(args, GT_STEP, &c);
    return status != GT_OK ? status : ssm_run(&c, 1);
}

gt_status GT_REF(ssd_backward)(const gt_ssd_args *args) {
    ssm_call c;
    gt_status status = ssd_prepare(args, GT_BACKWARD, &c);
    return status != GT_OK ? status : ssm_backward(&c);
}

gt_status GT_REF(ssd_segment)(const gt_ssd_args *args) {
    ssm_call c;
    gt_status status = ssd_prepare(args, GT_SEGMENT, &c);
    return status != GT_OK ? status : ssd_segment(&c, 0);
}

gt_status GT_REF(ssd_segment_backward)(const gt_ssd_args *args) {
    ssm_call c;
    gt_status status = ssd_prepare(args, GT_SEGMENT_BACKWARD, &c);
    return status != GT_OK ? status : ssd_segment(&c, 1);
}

static gt_status ssd_join(const gt_ssd_args *args, int is_reverse) {
    ssm_call c;
    gt_status status = ssd_prepare(args, is_reverse ? GT_JOIN_BACKWARD : GT_JOIN, &c);
    const gt_ssd_args *a = &c.a;
    if (status != GT_OK) return status;
    const ref_pieces x = {a->pieces,
                          a->B,
                          a->H,
                          gt_times(a->P, a->N),
                          a->piece_states,
                          a->piece_decays,
                          is_reverse ? a->dstate_out : a->state_in,
                          !is_reverse && a->state_in_shared,
                          is_reverse,
                          a->piece_starts};
    ref_join(&x);
    return GT_OK;
}

gt_status GT_REF(ssd_join)(const gt_ssd_args *args) { return ssd_join(args, 0); }
gt_status GT_REF(ssd_join_backward)(const gt_ssd_args *args) { return ssd_join(args, 1); }

/* ---- selective_scan -------------------------------------------------------------------------- */

static gt_stride scan_stride(gt_stride4 s) { return (gt_stride){s.b, s.t, s.h}; }

/* Converts a selective_scan call to an ssd call. */
static ssm_call scan_as_ssd(const gt_selective_scan_args *s) {
    ssm_call c = {.A_per_state = 1,
                  .Bm_n = s->Bm_stride.n,
                  .Cm_n = s->Cm_stride.n,
                  .dBm_n = s->dBm_stride.n,
                  .dCm_n = s->dCm_stride.n};
    c.a = (gt_ssd_args){.B = s->B,
                        .T = s->T,
                        .H = s->D,
                        .P = 1,
                        .N = s->N,
                        .G = s->G,
                        .dtype = s->dtype,
                        .dt_dtype = s->dt_dtype,
                        .state_dtype = s->state_dtype,
                        .parameter_dtype = s->parameter_dtype,
                        .softplus = s->softplus,
                        .state_in_shared = s->state_in_shared,
                        .accumulate = s->accumulate,
                        .x = s->u,
                        .dt = s->dt,
                        .A = s->A,
                        .Bm = s->Bm,
                        .Cm = s->Cm,
                        .Dskip = s->Dskip,
                        .z = s->z,
                        .dt_bias = s->dt_bias,
                        .state_in = s->state_in,
                        .y = s->y,
                        .state_out = s->state_out,
                        .dy = s->dy,
                        .dstate_out = s->dstate_out,
                        .dx = s->du,
                        .dz = s->dz,
                        .ddt = s->ddt,
                        .dBm = s->dBm,
                        .dCm = s->dCm,
                        .dA = s->dA,
                        .ddt_bias = s->ddt_bias,
                        .dDskip = s->dDskip,
                        .dstate_in = s->dstate_in,
                        .x_stride = s->u_stride,
                        .dt_stride = s->dt_stride,
                        .Bm_stride = scan_stride(s->Bm_stride),
                        .Cm_stride = scan_stride(s->Cm_stride),
                        .z_stride = s->z_stride,
                        .y_stride = s->y_stride,
                        .dy_stride = s->dy_stride,
                        .dx_stride = s->du_stride,
                        .ddt_stride = s->ddt_stride,
                        .dBm_stride = scan_stride(s->dBm_stride),
                        .dCm_stride = scan_stride(s->dCm_stride),
                        .dz_stride = s->dz_stride,
                        .cu_seqlens = s->cu_seqlens,
                        .seq_count = s->seq_count,
                        .seq_capacity = s->seq_capacity,
                        .slots = s->slots,
                        .slot_capacity = s->slot_capacity,
                        .state_out_stride = gt_times(s->D, s->N),
                        .rounding_seed = s->rounding_seed,
                        .rounding_steps = s->rounding_steps,
                        .tokens = s->tokens,
                        .commit = s->commit};
    return c;
}

static gt_status scan_prepare(const gt_selective_scan_args *args, gt_pass pass, ssm_call *c) {
    gt_selective_scan_args filled;
    gt_dims dims;
    gt_status status = gt_prepare(gt_op_selective_scan(), pass, GT_HOST, args, &filled, &dims);
    if (status != GT_OK) return status;
    *c = scan_as_ssd(&filled);
    return ssm_sequences(c);
}

gt_status GT_REF(selective_scan_forward)(const gt_selective_scan_args *args) {
    ssm_call c;
    gt_status status = scan_prepare(args, GT_FORWARD, &c);
    return status != GT_OK ? status : ssm_run(&c, 0);
}

gt_status GT_REF(selective_scan_step)(const gt_selective_scan_args *args) {
    ssm_call c;
    gt_status status = scan_prepare(args, GT_STEP, &c);
    return status != GT_OK ? status : ssm_run(&c, 1);
}

gt_status GT_REF(selective_scan_backward)(const gt_selective_scan_args *args) {
    ssm_call c;
    gt_status status = scan_prepare(args, GT_BACKWARD, &c);
    return status != GT_OK ? status : ssm_backward(&c);
}
