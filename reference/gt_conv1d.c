/* reference/gt_conv1d.c - causal depthwise convolution on the CPU, the twin of gt_conv1d.cuh.  Let e be the W-1 inputs
 * before the first token, followed by x_0 ... x_{T-1}:
 *
 *     pre_t = bias + sum_{j<W} weight[j] e_{t+j}     y_t = act(pre_t)     state_out = last W-1 of e
 *
 * Backward, with q_t = dy_t act'(pre_t):
 *
 *     de_{t+j} += weight[j] q_t     dweight[j] += e_{t+j} q_t     dbias += q_t
 *
 * Source: Gu and Dao 2023, arXiv:2312.00752.  Each thread takes channels.  It processes the sequences of a channel
 * (batch elements or packed sequences) in order, so sums over them have a fixed order. */
#include "gt_ref.h"

/* ---- one channel ----------------------------------------------------------------------------- */

/* A sequence is processed in chunks of tokens, so that inner loops run over arrays.  e holds the J = W-1 elements
 * before the chunk, then the chunk's own elements. */
enum { CONV1D_MAX_W = 4, CONV1D_CHUNK = 64, CONV1D_E = CONV1D_CHUNK + CONV1D_MAX_W - 1 };

static int64_t conv1d_chunk(const ref_sequence *s, int64_t first) {
    int64_t left = s->last - s->first - first;
    return left < CONV1D_CHUNK ? left : CONV1D_CHUNK;
}

/* Loads tokens first ... first + n - 1 of channel d, counted from the sequence's first token. */
static void conv1d_load(real *to, const gt_conv1d_args *a, const void *data, gt_stride stride, const ref_sequence *s,
                        int64_t first, int64_t d, int64_t n) {
    int64_t at = ref_at(stride, s->b, s->first + first, d);
    for (int64_t i = 0; i < n; i++) to[i] = ref_load(data, a->dtype, at + i * stride.t);
}
static void conv1d_store(const real *from, const gt_conv1d_args *a, void *data, gt_stride stride, const ref_sequence *s,
                         int64_t first, int64_t d, int64_t n) {
    int64_t at = ref_at(stride, s->b, s->first + first, d);
    for (int64_t i = 0; i < n; i++) ref_store(data, a->dtype, at + i * stride.t, from[i]);
}

/* The parameters of channel d. */
typedef struct conv1d_channel {
    int64_t d;
    real weight[CONV1D_MAX_W], bias;
} conv1d_channel;

/* Gradients of the parameters.  They are doubles, because sums over batch and time may have any number of terms. */
typedef struct conv1d_sums {
    double weight[CONV1D_MAX_W], bias;
} conv1d_sums;

static conv1d_channel conv1d_load_channel(const gt_conv1d_args *a, int64_t d) {
    conv1d_channel c = {.d = d, .bias = ref_parameter(a->bias, a->weight_dtype, d)};
    for (int j = 0; j < a->W; j++) c.weight[j] = ref_parameter(a->weight, a->weight_dtype, d * a->W + j);
    return c;
}

/* Computes pre of the n tokens of a chunk. */
static void conv1d_sum(const gt_conv1d_args *a, const conv1d_channel *c, const real *restrict e, int64_t n,
                       real *restrict pre) {
    for (int64_t i = 0; i < n; i++) pre[i] = c->bias;
    for (int j = 0; j < a->W; j++)
        for (int64_t i = 0; i < n; i++) pre[i] += c->weight[j] * e[i + j];
}

/* ---- forward and step ------------------------------------------------------------------------ */

/* The state of a channel, as a step keeps it in memory: S inputs, either in order of time or as a ring. */
typedef struct conv1d_columns {
    int64_t first, step, S; /* index of column 0; stride of columns; number of columns */
    int64_t place;          /* ring: column of the next input; otherwise S */
} conv1d_columns;

static conv1d_columns conv1d_columns_of(const gt_conv1d_args *a, int64_t row, int64_t b, int64_t d) {
    const gt_stride s = a->state_out_stride;
    conv1d_columns c = {row * s.b + d * s.t, s.h, a->state_columns, a->state_columns};
    if (a->places) c.place = ((int64_t)a->places[b] % c.S + c.S) % c.S;
    return c;
}

static real conv1d_column(const gt_conv1d_args *a, const conv1d_columns *c, int64_t column) {
    return ref_load(a->state_out, a->state_dtype, c->first + column * c->step);
}

/* Loads the last W - 1 inputs. */
static void conv1d_load_columns(const gt_conv1d_args *a, const conv1d_columns *c, real *state) {
    for (int64_t j = 0; j < a->W - 1; j++) {
        const int64_t column = c->place - (a->W - 1) + j;
        state[j] = conv1d_column(a, c, column < 0 ? column + c->S : column);
    }
}

/* Stores the committed tokens of a step in the state.  In a ring the kept inputs stay where they are; otherwise they
 * move to the front. */
static void conv1d_store_columns(const gt_conv1d_args *a, const conv1d_columns *c, const ref_sequence *s, int64_t d) {
    const int64_t n = s->commit - s->first, lost = n > c->S ? n - c->S : 0;
    for (int64_t j = 0; c->place == c->S && n > 0 && j + n < c->S; j++)
        ref_store(a->state_out, a->state_dtype, c->first + j * c->step, conv1d_column(a, c, j + n));
    for (int64_t i = lost; i < n; i++) {
        const int64_t column = c->place == c->S ? c->S - n + i : (c->place + i) % c->S;
        ref_store(a->state_out, a->state_dtype, c->first + column * c->step,
                  ref_load(a->x, a->dtype, ref_at(a->x_stride, s->b, s->first + i, d)));
    }
}

/* Computes y of one sequence of one channel.  On entry `state` holds the inputs before the first token; on return the
 * inputs before token s->commit. */
static void conv1d_sequence(const gt_conv1d_args *a, const ref_sequence *s, const conv1d_channel *c, real *state) {
    int64_t J = a->W - 1;
    real e[CONV1D_E], y[CONV1D_CHUNK];
    memcpy(e, state, (size_t)J * sizeof(real));
    for (int64_t first = 0; first < s->last - s->first; first += CONV1D_CHUNK) {
        int64_t n = conv1d_chunk(s, first);
        conv1d_load(e + J, a, a->x, a->x_stride, s, first, c->d, n);
        conv1d_sum(a, c, e, n, y);
        if (a->activation == GT_ACT_SILU)
            for (int64_t i = 0; i < n; i++) y[i] = ref_silu(y[i]);
        conv1d_store(y, a, a->y, a->y_stride, s, first, c->d, n);
        const int64_t commit = s->commit - s->first - first;
        if (commit >= 0 && commit <= n) memcpy(state, e + commit, (size_t)J * sizeof(real));
        memmove(e, e + n, (size_t)J * sizeof(real));
    }
}

static gt_status conv1d_sequences(const gt_conv1d_args *a, ref_sequences *q) {
    return ref_find_sequences(a->B, a->T, a->cu_seqlens, a->seq_count, a->seq_capacity, q);
}

/* In forward: loads the inputs before a sequence, oldest first. */
static void conv1d_start(const gt_conv1d_args *a, const ref_sequence *s, int64_t d, real *state) {
    const gt_stride at = a->state_out_stride;
    const float *const from = s->starts_zero ? NULL : a->state_in;
    const int64_t first = (a->state_in_shared ? 0 : s->row) * at.b + d * at.t;
    for (int64_t j = 0; j < a->W - 1; j++) state[j] = ref_parameter(from, a->state_dtype, first + j * at.h);
}

/* Stores the last inputs, if the caller wants them. */
static void conv1d_end(const gt_conv1d_args *a, const ref_sequence *s, int64_t d, const real *state) {
    const gt_stride at = a->state_out_stride;
    for (int64_t j = 0; a->state_out && j < a->W - 1; j++)
        ref_store(a->state_out, a->state_dtype, s->row * at.b + d * at.t + j * at.h, state[j]);
}

/* Forward without tokens: copies the states. */
static void conv1d_pass_states(const gt_conv1d_args *a, const ref_sequences *all) {
    for (int64_t i = 0; a->state_out && i < all->count; i++) {
        const ref_sequence s = ref_sequence_at(all, i);
        for (int64_t d = 0; s.row >= 0 && d < a->D; d++) {
            real state[CONV1D_MAX_W];
            conv1d_start(a, &s, d, state);
            conv1d_end(a, &s, d, state);
        }
    }
}

/* Runs all channels.  `a` holds checked arguments with defaults filled in. */
static gt_status conv1d_run(const gt_conv1d_args *a, int step) {
    ref_sequences all;
    gt_status status = conv1d_sequences(a, &all);
    if (status != GT_OK) return status;
    ref_use_pool(&all, a->slots, a->starts_zero, a->slot_capacity);
    if (a->B == 0 || a->T == 0) {
        if (!step) conv1d_pass_states(a, &all);
        return GT_OK;
    }
    GT_PARALLEL_FOR
    for (int64_t d = 0; d < a->D; d++) {
        conv1d_channel c = conv1d_load_channel(a, d);
        for (int64_t i = 0; i < all.count; i++) {
            const ref_sequence s = step ? ref_step_element(i, a->T, a->slots, a->slot_capacity, a->tokens, a->commit)
                                        : ref_sequence_at(&all, i);
            real state[CONV1D_MAX_W];
            ref_clear(s.b, ref_first_cleared(&s), step ? a->T : s.last, d, a->y, a->dtype, a->y_stride, 1);
            if (s.row < 0) continue;
            if (step) {
                const conv1d_columns columns = conv1d_columns_of(a, s.row, s.b, d);
                conv1d_load_columns(a, &columns, state);
                conv1d_sequence(a, &s, &c, state);
                conv1d_store_columns(a, &columns, &s, d);
                continue;
            }
            conv1d_start(a, &s, d, state);
            conv1d_sequence(a, &s, &c, state);
            conv1d_end(a, &s, d, state);
        }
        ref_clear_unused(&all, d, a->y, a->dtype, a->y_stride, 1);
    }
    return GT_OK;
}

/* ---- backward -------------------------------------------------------------------------------- */

/* Computes q of the n tokens of a chunk. */
static void conv1d_slope(const gt_conv1d_args *a, const conv1d_channel *c, const real *e, const ref_sequence *s,
                         int64_t first, int64_t n, real *restrict q) {
    real pre[CONV1D_CHUNK];
    conv1d_load(q, a, a->dy, a->dy_stride, s, first, c->d, n);
    if (a->activation != GT_ACT_SILU) return;
    conv1d_sum(a, c, e, n, pre);
    for (int64_t i = 0; i < n; i++) q[i] *= ref_dsilu(pre[i]);
}

static void conv1d_add_to_sums(const gt_conv1d_args *a, const real *e, const real *q, int64_t n, conv1d_sums *sums) {
    for (int j = 0; j < a->W; j++) {
        double sum = 0;
        GT_SIMD_SUM(sum)
        for (int64_t i = 0; i < n; i++) sum += (double)e[i + j] * q[i];
        sums->weight[j] += sum;
    }
    for (int64_t i = 0; i < n; i++) sums->bias += q[i];
}

/* Stores elements first ... first + n - 1 of de.  The first J elements of de are the gradient of state_in, the others
 * the gradient of x. */
static void conv1d_store_de(const gt_conv1d_args *a, const conv1d_channel *c, const ref_sequence *s, int64_t first,
                            int64_t n, const real *de, real *dstate_in) {
    int64_t J = a->W - 1, i = 0;
    for (; i < n && first + i < J; i++) dstate_in[first + i] = de[i];
    if (a->dx) conv1d_store(de + i, a, a->dx, a->dx_stride, s, first + i - J, c->d, n - i);
}

/* Computes the gradients of one sequence of one channel.  `dstate` is the gradient of state_out on entry, and of
 * state_in on return.  The parameter gradients are added to `sums`. */
static void conv1d_sequence_backward(const gt_conv1d_args *a, const ref_sequence *s, const conv1d_channel *c,
                                     real *dstate, conv1d_sums *sums) {
    int64_t J = a->W - 1, T = s->last - s->first, row_in = a->state_in_shared ? 0 : s->row;
    real e[CONV1D_E], q[CONV1D_CHUNK], de[CONV1D_E] = {0}, dstate_in[CONV1D_MAX_W];
    ref_copy_state(e, a->state_in, (row_in * a->D + c->d) * J, J);
    for (int64_t first = 0; first < T; first += CONV1D_CHUNK) {
        int64_t n = conv1d_chunk(s, first);
        conv1d_load(e + J, a, a->x, a->x_stride, s, first, c->d, n);
        conv1d_slope(a, c, e, s, first, n, q);
        conv1d_add_to_sums(a, e, q, n, sums);
        for (int j = 0; j < a->W; j++)
            for (int64_t i = 0; i < n; i++) de[i + j] += c->weight[j] * q[i];
        /* The first n elements of de are complete: no later token reads these elements of e. */
        conv1d_store_de(a, c, s, first, n, de, dstate_in);
        memmove(de, de + n, (size_t)J * sizeof(real));
        memset(de + J, 0, CONV1D_CHUNK * sizeof(real));
        memmove(e, e + n, (size_t)J * sizeof(real));
    }
    for (int64_t j = 0; j < J; j++) de[j] += dstate[j];
    conv1d_store_de(a, c, s, T, J, de, dstate_in);
    memcpy(dstate, dstate_in, (size_t)J * sizeof(real));
}

/* ---- the C functions ------------------------------------------------------------------------- */

gt_status GT_REF(conv1d_forward)(const gt_conv1d_args *args) {
    gt_conv1d_args a;
    gt_dims dims;
    gt_status status = gt_prepare(gt_op_conv1d(), GT_FORWARD, GT_HOST, args, &a, &dims);
    return status != GT_OK ? status : conv1d_run(&a, 0);
}

gt_status GT_REF(conv1d_step)(const gt_conv1d_args *args) {
    gt_conv1d_args a;
    gt_dims dims;
    gt_status status = gt_prepare(gt_op_conv1d(), GT_STEP, GT_HOST, args, &a, &dims);
    return status != GT_OK ? status : conv1d_run(&a, 1);
}

gt_status GT_REF(conv1d_backward)(const gt_conv1d_args *args) {
    gt_conv1d_args a;
    gt_dims dims;
    gt_status status = gt_prepare(gt_op_conv1d(), GT_BACKWARD, GT_HOST, args, &a, &dims);
    ref_sequences all;
    if (status != GT_OK || (status = conv1d_sequences(&a, &all)) != GT_OK) return status;
    int64_t J = a.W - 1;
    if (a.B == 0 || a.T == 0) {
        ref_no_grad(a.dweight, a.D * a.W, a.accumulate);
        ref_no_grad(a.dbias, a.D, a.accumulate);
        ref_pass_gradients(a.dstate_in, a.dstate_out, a.state_in_shared, all.count, a.D * J, a.accumulate);
        return GT_OK;
    }
    GT_PARALLEL_FOR
    for (int64_t d = 0; d < a.D; d++) {
        conv1d_channel c = conv1d_load_channel(&a, d);
        conv1d_sums sums = {{0}, 0};
        double dstate_sum[CONV1D_MAX_W] = {0};
        for (int64_t i = 0; i < all.count; i++) {
            ref_sequence s = ref_sequence_at(&all, i);
            real dstate[CONV1D_MAX_W];
            ref_copy_state(dstate, a.dstate_out, (s.row * a.D + d) * J, J);
            conv1d_sequence_backward(&a, &s, &c, dstate, &sums);
            if (a.dstate_in && !a.state_in_shared)
                memcpy((real *)a.dstate_in + (s.row * a.D + d) * J, dstate, (size_t)J * sizeof(real));
            for (int64_t j = 0; j < J; j++) dstate_sum[j] += dstate[j];
        }
        ref_clear_unused(&all, d, a.dx, a.dtype, a.dx_stride, 1);
        for (int64_t j = 0; j < a.W; j++) ref_grad(a.dweight, d * a.W + j, sums.weight[j], a.accumulate);
        ref_grad(a.dbias, d, sums.bias, a.accumulate);
        if (a.state_in_shared)
            for (int64_t j = 0; j < J; j++) ref_grad(a.dstate_in, d * J + j, dstate_sum[j], a.accumulate);
    }
    return GT_OK;
}
