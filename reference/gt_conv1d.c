/* Causal depthwise convolution on the CPU, the twin of gt_conv1d.cuh.  With e = [the W-1 inputs
 * before the first; x_0 ... x_{T-1}]:
 *
 *     pre_t = bias + sum_{j<W} weight[j] e_{t+j}     y_t = act(pre_t)     state_out = last W-1 of e
 *
 * and backward, with q_t = dy_t act'(pre_t):
 *
 *     de_{t+j} += weight[j] q_t     dweight[j] += e_{t+j} q_t     dbias += q_t
 *
 * Gu and Dao 2023, arXiv:2312.00752.  Each channel slides a window over e, so no sequence is too
 * short.  Work is split over channels; inside one the batch is walked in order, so sums over it
 * have one fixed order. */
#include "gt_ref.h"

enum { CONV1D_MAX_W = 4 };

/* What belongs to one channel. */
typedef struct conv1d_channel {
    int64_t d;
    real weight[CONV1D_MAX_W], bias;
} conv1d_channel;

/* Sums over batch and time, in double: their length has no limit. */
typedef struct conv1d_sums {
    double weight[CONV1D_MAX_W], bias;
} conv1d_sums;

static conv1d_channel conv1d_load_channel(const gt_conv1d_args *a, int64_t d) {
    conv1d_channel c = {.d = d, .bias = ref_param(a->bias, d, 0)};
    for (int j = 0; j < a->W; j++) c.weight[j] = ref_param(a->weight, d * a->W + j, 0);
    return c;
}

/* bias + sum_j weight[j] window[j] */
static real conv1d_sum(const gt_conv1d_args *a, const conv1d_channel *c, const real *window) {
    real sum = c->bias;
    for (int j = 0; j < a->W; j++) sum += c->weight[j] * window[j];
    return sum;
}

/* Drops the oldest of W. */
static void conv1d_shift(const gt_conv1d_args *a, real *window) {
    for (int j = 0; j + 1 < a->W; j++) window[j] = window[j + 1];
}

/* One sequence of one channel.  The first W-1 of `window` hold the state, before and after. */
static void conv1d_sequence(const gt_conv1d_args *a, int64_t b, const conv1d_channel *c,
                            real *window) {
    for (int64_t t = 0; t < a->T; t++) {
        window[a->W - 1] = ref_load(a->x, a->dtype, ref_at(a->x_stride, b, t, c->d));
        real sum = conv1d_sum(a, c, window);
        real y = a->activation == GT_ACT_SILU ? ref_silu(sum) : sum;
        ref_store(a->y, a->dtype, ref_at(a->y_stride, b, t, c->d), y);
        conv1d_shift(a, window);
    }
}

/* Forward and step of all channels; `a` is prepared. */
static void conv1d_run(const gt_conv1d_args *a, int step) {
    int64_t J = a->W - 1;
    GT_PARALLEL_FOR
    for (int64_t d = 0; d < a->D; d++) {
        conv1d_channel c = conv1d_load_channel(a, d);
        for (int64_t b = 0; b < a->B; b++) {
            int64_t row = step && a->slots ? a->slots[b] : b;
            if (step && (row < 0 || row >= a->slot_capacity)) {
                for (int64_t t = 0; t < a->T; t++)
                    ref_store(a->y, a->dtype, ref_at(a->y_stride, b, t, d), 0);
                continue;
            }
            real window[CONV1D_MAX_W];
            int64_t row_in = a->state_in_shared ? 0 : row;
            ref_copy_state(window, step ? a->state_out : a->state_in, (row_in * a->D + d) * J, J);
            conv1d_sequence(a, b, &c, window);
            if (a->state_out)
                memcpy((real *)a->state_out + (row * a->D + d) * J, window,
                       (size_t)J * sizeof(real));
        }
    }
}

/* q_t = dy_t act'(pre_t), the window being at t */
static real conv1d_dsum(const gt_conv1d_args *a, int64_t b, int64_t t, const conv1d_channel *c,
                        const real *window) {
    real dy = ref_load(a->dy, a->dtype, ref_at(a->dy_stride, b, t, c->d));
    return a->activation == GT_ACT_SILU ? dy * ref_dsilu(conv1d_sum(a, c, window)) : dy;
}

/* One sequence of one channel.  de[j] collects dL/de_{t+j}.  Once token t is done de[0] is complete,
 * the gradient of a row of state_in while t < W-1, of the input W-1 tokens ago after that.
 * Parameter gradients are added to `sums`. */
static void conv1d_sequence_backward(const gt_conv1d_args *a, int64_t b, const conv1d_channel *c,
                                     real *dstate_in, conv1d_sums *sums) {
    int64_t J = a->W - 1, row_in = a->state_in_shared ? 0 : b;
    real window[CONV1D_MAX_W], dstate_out[CONV1D_MAX_W], de[CONV1D_MAX_W] = {0};
    ref_copy_state(window, a->state_in, (row_in * a->D + c->d) * J, J);
    ref_copy_state(dstate_out, a->dstate_out, (b * a->D + c->d) * J, J);
    for (int64_t t = 0; t < a->T + J; t++) {
        if (t < a->T) {
            window[J] = ref_load(a->x, a->dtype, ref_at(a->x_stride, b, t, c->d));
            real q = conv1d_dsum(a, b, t, c, window);
            for (int j = 0; j < a->W; j++) {
                de[j] += c->weight[j] * q;
                sums->weight[j] += (double)window[j] * q;
            }
            sums->bias += q;
            conv1d_shift(a, window);
        } else if (t == a->T) {
            for (int j = 0; j < J; j++) de[j] += dstate_out[j];
        }
        if (t < J)
            dstate_in[t] = de[0];
        else if (a->dx)
            ref_store(a->dx, a->dtype, ref_at(a->dx_stride, b, t - J, c->d), de[0]);
        conv1d_shift(a, de);
        de[J] = 0;
    }
}

gt_status GT_REF(conv1d_forward)(const gt_conv1d_args *args) {
    gt_conv1d_args a;
    gt_dims dims;
    gt_status status = gt_prepare(gt_op_conv1d(), GT_FORWARD, GT_HOST, args, &a, &dims);
    if (status == GT_OK) conv1d_run(&a, 0);
    return status;
}

gt_status GT_REF(conv1d_step)(const gt_conv1d_args *args) {
    gt_conv1d_args a;
    gt_dims dims;
    gt_status status = gt_prepare(gt_op_conv1d(), GT_STEP, GT_HOST, args, &a, &dims);
    if (status == GT_OK) conv1d_run(&a, 1);
    return status;
}

gt_status GT_REF(conv1d_backward)(const gt_conv1d_args *args) {
    gt_conv1d_args a;
    gt_dims dims;
    gt_status status = gt_prepare(gt_op_conv1d(), GT_BACKWARD, GT_HOST, args, &a, &dims);
    if (status != GT_OK) return status;
    int64_t J = a.W - 1;
    GT_PARALLEL_FOR
    for (int64_t d = 0; d < a.D; d++) {
        conv1d_channel c = conv1d_load_channel(&a, d);
        conv1d_sums sums = {{0}, 0};
        double dstate_sum[CONV1D_MAX_W] = {0};
        for (int64_t b = 0; b < a.B; b++) {
            real dstate_in[CONV1D_MAX_W];
            conv1d_sequence_backward(&a, b, &c, dstate_in, &sums);
            if (a.dstate_in && !a.state_in_shared)
                memcpy((real *)a.dstate_in + (b * a.D + d) * J, dstate_in,
                       (size_t)J * sizeof(real));
            for (int j = 0; j < J; j++) dstate_sum[j] += dstate_in[j];
        }
        for (int j = 0; j < a.W; j++)
            ref_grad(a.dweight, d * a.W + j, sums.weight[j], a.accumulate);
        ref_grad(a.dbias, d, sums.bias, a.accumulate);
        if (a.state_in_shared)
            for (int j = 0; j < J; j++)
                ref_grad(a.dstate_in, d * J + j, dstate_sum[j], a.accumulate);
    }
    return GT_OK;
}
