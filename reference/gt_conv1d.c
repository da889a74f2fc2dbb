/* Causal depthwise convolution on the CPU, the twin of gt_conv1d.cuh.  With e = [the W-1 inputs
 * before the first; x_0 ... x_{T-1}]:
 *
 *     pre_t = bias + sum_{j<W} weight[j] e_{t+j}     y_t = act(pre_t)     state_out = last W-1 of e
 *
 * and backward, with q_t = dy_t act'(pre_t):
 *
 *     de_{t+j} += weight[j] q_t     dweight[j] += e_{t+j} q_t     dbias += q_t
 *
 * Gu and Dao 2023, arXiv:2312.00752.  Work is split over channels; inside one the batch is walked
 * in order, so sums over it have one fixed order. */
#include "gt_ref.h"

/* ---- one channel ----------------------------------------------------------------------------- */

/* Only W elements of e, or of de, are needed at a time: element i lies in slot i mod 4. */
enum { CONV1D_MAX_W = 4 };
static inline int conv1d_slot(int64_t i) { return (int)((uint64_t)i % CONV1D_MAX_W); }

/* The parameters of channel d. */
typedef struct conv1d_channel {
    int64_t d;
    real weight[CONV1D_MAX_W], bias;
} conv1d_channel;

/* Their gradients: sums over batch and time, in double, for there is no limit to their length. */
typedef struct conv1d_sums {
    double weight[CONV1D_MAX_W], bias;
} conv1d_sums;

static conv1d_channel conv1d_load_channel(const gt_conv1d_args *a, int64_t d) {
    conv1d_channel c = {.d = d, .bias = ref_param(a->bias, d, 0)};
    for (int j = 0; j < a->W; j++) c.weight[j] = ref_param(a->weight, d * a->W + j, 0);
    return c;
}

/* pre_t, from the slots of e */
static real conv1d_sum(const gt_conv1d_args *a, const conv1d_channel *c, const real *e, int64_t t) {
    real sum = c->bias;
    for (int j = 0; j < a->W; j++) sum += c->weight[j] * e[conv1d_slot(t + j)];
    return sum;
}

/* ---- forward and step ------------------------------------------------------------------------ */

/* One sequence of one channel.  `state` goes from the inputs before the first to the last ones. */
static void conv1d_sequence(const gt_conv1d_args *a, int64_t b, const conv1d_channel *c,
                            real *state) {
    int64_t J = a->W - 1;
    real e[CONV1D_MAX_W];
    memcpy(e, state, (size_t)J * sizeof(real));
    for (int64_t t = 0; t < a->T; t++) {
        e[conv1d_slot(t + J)] = ref_load(a->x, a->dtype, ref_at(a->x_stride, b, t, c->d));
        real pre = conv1d_sum(a, c, e, t);
        real y = a->activation == GT_ACT_SILU ? ref_silu(pre) : pre;
        ref_store(a->y, a->dtype, ref_at(a->y_stride, b, t, c->d), y);
    }
    for (int64_t j = 0; j < J; j++) state[j] = e[conv1d_slot(a->T + j)];
}

/* Of all channels; `a` is prepared. */
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
            real state[CONV1D_MAX_W];
            int64_t row_in = a->state_in_shared ? 0 : row;
            ref_copy_state(state, step ? a->state_out : a->state_in, (row_in * a->D + d) * J, J);
            conv1d_sequence(a, b, &c, state);
            if (a->state_out)
                memcpy((real *)a->state_out + (row * a->D + d) * J, state,
                       (size_t)J * sizeof(real));
        }
    }
}

/* ---- backward -------------------------------------------------------------------------------- */

/* One sequence of one channel.  `dstate` goes from the gradient of state_out to that of state_in;
 * parameter gradients are added to `sums`. */
static void conv1d_sequence_backward(const gt_conv1d_args *a, int64_t b, const conv1d_channel *c,
                                     real *dstate, conv1d_sums *sums) {
    int64_t J = a->W - 1, row_in = a->state_in_shared ? 0 : b;
    real e[CONV1D_MAX_W], de[CONV1D_MAX_W] = {0}, dstate_in[CONV1D_MAX_W];
    ref_copy_state(e, a->state_in, (row_in * a->D + c->d) * J, J);
    for (int64_t t = 0; t < a->T + J; t++) {
        if (t < a->T) {
            e[conv1d_slot(t + J)] = ref_load(a->x, a->dtype, ref_at(a->x_stride, b, t, c->d));
            real q = ref_load(a->dy, a->dtype, ref_at(a->dy_stride, b, t, c->d));
            if (a->activation == GT_ACT_SILU) q *= ref_dsilu(conv1d_sum(a, c, e, t));
            for (int j = 0; j < a->W; j++) {
                de[conv1d_slot(t + j)] += c->weight[j] * q;
                sums->weight[j] += (double)e[conv1d_slot(t + j)] * q;
            }
            sums->bias += q;
        } else if (t == a->T) {
            for (int64_t j = 0; j < J; j++) de[conv1d_slot(t + j)] += dstate[j];
        }
        /* de_t is complete: nothing later in time reads e_t */
        if (t < J)
            dstate_in[t] = de[conv1d_slot(t)];
        else if (a->dx)
            ref_store(a->dx, a->dtype, ref_at(a->dx_stride, b, t - J, c->d), de[conv1d_slot(t)]);
        de[conv1d_slot(t)] = 0;
    }
    memcpy(dstate, dstate_in, (size_t)J * sizeof(real));
}

/* ---- the C functions ------------------------------------------------------------------------- */

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
            real dstate[CONV1D_MAX_W];
            ref_copy_state(dstate, a.dstate_out, (b * a.D + d) * J, J);
            conv1d_sequence_backward(&a, b, &c, dstate, &sums);
            if (a.dstate_in && !a.state_in_shared)
                memcpy((real *)a.dstate_in + (b * a.D + d) * J, dstate, (size_t)J * sizeof(real));
            for (int64_t j = 0; j < J; j++) dstate_sum[j] += dstate[j];
        }
        for (int64_t j = 0; j < a.W; j++)
            ref_grad(a.dweight, d * a.W + j, sums.weight[j], a.accumulate);
        ref_grad(a.dbias, d, sums.bias, a.accumulate);
        if (a.state_in_shared)
            for (int64_t j = 0; j < J; j++)
                ref_grad(a.dstate_in, d * J + j, dstate_sum[j], a.accumulate);
    }
    return GT_OK;
}
