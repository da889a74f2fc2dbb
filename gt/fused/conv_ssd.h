/* gt/fused/conv_ssd.h - converts a call of conv_ssd to calls of conv1d and ssd (plain C, shared with the CPU twin). */
#ifndef GT_FUSED_CONV_SSD_H
#define GT_FUSED_CONV_SSD_H

#include "../base/op.h"

#include <string.h>

/* Number of channels of the convolution: a token of xBC holds x [H,P], Bm [G,N] and Cm [G,N]. */
static inline int64_t gt_conv_ssd_channels(const gt_conv_ssd_args *a) {
    return gt_plus(gt_times(a->H, a->P), gt_times(2, gt_times(a->G, a->N)));
}

/* Returns whether conv1d or ssd must get the stride of its states, because states lie in slots or are not packed.
 * packed: number of elements of a state. */
static inline int gt_conv_ssd_has_rows(const gt_conv_ssd_args *a, int64_t stride, int64_t packed) {
    return a->slots || stride != packed;
}

/* Returns the arguments of conv1d for a prepared call of conv_ssd.  c: the output of conv1d; dc: the gradient of c. */
static inline gt_conv1d_args gt_conv_ssd_conv(const gt_conv_ssd_args *a, void *c, const void *dc) {
    gt_conv1d_args v;
    memset(&v, 0, sizeof v);
    v.B = a->B, v.T = a->T, v.D = gt_conv_ssd_channels(a), v.W = a->W;
    v.dtype = a->dtype;
    v.state_dtype = a->conv_state_dtype;
    v.activation = GT_ACT_SILU;
    v.state_in_shared = a->state_in_shared, v.accumulate = a->accumulate;
    v.x = a->xBC, v.weight = a->weight, v.bias = a->bias;
    v.state_in = a->conv_state_in, v.state_out = a->conv_state_out;
    v.y = c, v.dy = dc;
    v.dstate_out = a->conv_dstate_out, v.dstate_in = a->conv_dstate_in;
    v.dx = a->dxBC, v.dweight = a->dweight, v.dbias = a->dbias;
    v.x_stride = a->xBC_stride, v.dx_stride = a->dxBC_stride;
    v.cu_seqlens = a->cu_seqlens, v.seq_count = a->seq_count, v.seq_capacity = a->seq_capacity;
    v.slots = a->slots, v.slot_capacity = a->slot_capacity, v.tokens = a->tokens, v.commit = a->commit;
    v.starts_zero = a->starts_zero;
    if (gt_conv_ssd_has_rows(a, a->conv_state_out_stride, gt_times(v.D, v.W - 1)))
        v.state_out_stride.b = a->conv_state_out_stride, v.state_out_stride.t = v.W - 1, v.state_out_stride.h = 1;
    return v;
}

/* Returns whether backward needs the gradient of c. */
static inline int gt_conv_ssd_wants_dc(const gt_conv_ssd_args *a) {
    return a->dxBC || a->dweight || a->dbias || a->conv_dstate_in;
}

/* Returns the arguments of ssd.  ssd reads x, Bm and Cm as columns of c, whose rows have one element for each channel.
 * ssd writes their gradients to dc, unless dc is NULL.  element: bytes of an element. */
static inline gt_ssd_args gt_conv_ssd_ssd(const gt_conv_ssd_args *a, const void *c, void *dc, int64_t element) {
    gt_stride rows;
    gt_ssd_args s;
    memset(&rows, 0, sizeof rows);
    memset(&s, 0, sizeof s);
    if (c) rows.t = gt_conv_ssd_channels(a); /* without tokens there are no rows */
    s.B = a->B, s.T = a->T, s.H = a->H, s.P = a->P, s.N = a->N, s.G = a->G;
    s.dtype = a->dtype, s.dt_dtype = a->dt_dtype, s.state_dtype = a->state_dtype;
    s.rounding_seed = a->rounding_seed, s.rounding_steps = a->rounding_steps;
    s.softplus = a->softplus, s.dt_limit = a->dt_limit, s.dt_min = a->dt_min, s.dt_max = a->dt_max;
    s.Dskip_per_channel = a->Dskip_per_channel, s.state_in_shared = a->state_in_shared, s.accumulate = a->accumulate;
    s.reads_y = a->reads_y;
    s.segments = a->segments;
    if (c) {
        s.x = c;
        s.Bm = (const char *)c + a->H * a->P * element;
        s.Cm = (const char *)s.Bm + a->G * a->N * element;
    }
    if (dc) {
        s.dx = dc;
        s.dBm = (char *)dc + a->H * a->P * element;
        s.dCm = (char *)s.dBm + a->G * a->N * element;
    }
    s.x_stride = s.Bm_stride = s.Cm_stride = s.dx_stride = s.dBm_stride = s.dCm_stride = rows;
    s.dt = a->dt, s.A = a->A, s.Dskip = a->Dskip, s.z = a->z, s.dt_bias = a->dt_bias;
    s.state_in = a->state_in, s.state_out = a->state_out, s.y = a->y;
    s.dy = a->dy, s.dstate_out = a->dstate_out, s.dstate_in = a->dstate_in;
    s.dz = a->dz, s.ddt = a->ddt, s.dA = a->dA, s.ddt_bias = a->ddt_bias, s.dDskip = a->dDskip;
    s.dt_stride = a->dt_stride, s.z_stride = a->z_stride, s.y_stride = a->y_stride, s.dy_stride = a->dy_stride;
    s.ddt_stride = a->ddt_stride, s.dz_stride = a->dz_stride;
    s.cu_seqlens = a->cu_seqlens, s.seq_count = a->seq_count, s.seq_capacity = a->seq_capacity;
    s.slots = a->slots, s.slot_capacity = a->slot_capacity, s.tokens = a->tokens, s.commit = a->commit;
    s.starts_zero = a->starts_zero;
    if (gt_conv_ssd_has_rows(a, a->state_out_stride, gt_times(a->H, gt_times(a->P, a->N))))
        s.state_out_stride = a->state_out_stride;
    s.snapshots = a->snapshots, s.snapshot_every = a->snapshot_every, s.snapshot_dtype = a->snapshot_dtype;
    s.saved = a->saved, s.saved_bytes = a->saved_bytes;
    return s;
}

#endif
