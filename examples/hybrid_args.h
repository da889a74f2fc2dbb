/* Builds the argument struct of each operator call of the model.  Forward, backward and step of an operator use the
 * same struct, so each operator has one function here. */
#ifndef HYBRID_ARGS_H
#define HYBRID_ARGS_H

#include "hybrid_inside.h"

static const float model_eps = 1e-5f;
static const float head_norm_eps = 64e-5f; /* as in RWKV-6: 1e-5 * 8^2 */

/* clang-format is off, because it would put every struct field on its own line.  The fields have the order of the
 * structs in gt_kernels.h and hybrid_ops.h. */
/* clang-format off */

/* A projection y = x weight^T.  With `count`, the struct describes `count` projections.  x_step and y_step are the
 * distances, in elements, from one projection's array to the next one's. */
typedef struct linear {
    int64_t inputs, outputs;
    int weight;               /* parameter [count,outputs,inputs] */
    const void *x;
    int64_t x_row;            /* row stride in elements, 0 = packed */
    void *y;
    int64_t y_row;
    gt_dtype y_dtype;         /* 0 = the dtype of activations */
    int64_t count, x_step, y_step;
} linear;

static inline linear mix_down_of(const hy_model *m, int l) {
    return (linear){.inputs = m->C, .outputs = MIXES * MIX_RANK, .weight = m->layer[l].mix_down,
                    .x = m->acts[l].shifted, .y = m->acts[l].lora};
}
static inline linear mix_up_of(const hy_model *m, int l, const pass *p) {
    return (linear){.inputs = MIX_RANK, .outputs = m->C, .weight = m->layer[l].mix_up,
                    .x = m->acts[l].lora, .x_row = MIXES * MIX_RANK, .x_step = MIX_RANK,
                    .y = m->acts[l].offsets, .y_step = p->M * m->C, .count = MIXES};
}
static inline linear decay_down_of(const hy_model *m, int l) {
    return (linear){.inputs = m->C, .outputs = DECAY_RANK, .weight = m->layer[l].decay_down,
                    .x = m->acts[l].mixed, .y = m->acts[l].decay_lora};
}
static inline linear decay_up_of(const hy_model *m, int l) {
    return (linear){.inputs = DECAY_RANK, .outputs = m->C, .weight = m->layer[l].decay_up,
                    .x = m->acts[l].decay_lora, .y = m->acts[l].decay, .y_dtype = GT_F32};
}
static inline linear projections_of(const hy_model *m, int l, const pass *p) {
    int64_t MC = p->M * m->C;
    return (linear){.inputs = m->C, .outputs = m->C, .weight = m->layer[l].projections,
                    .x = act_at(m, m->acts[l].mixed, MC), .x_step = MC, .y = m->acts[l].kvrg,
                    .y_step = MC, .count = PROJECTIONS};
}
static inline linear rwkv_out_of(const hy_model *m, int l) {
    return (linear){.inputs = m->C, .outputs = m->C, .weight = m->layer[l].rwkv_out,
                    .x = m->acts[l].wkv_gated, .y = m->acts[l].branches, .y_row = branch_row(m)};
}
static inline linear mamba_in_of(const hy_model *m, int l) {
    return (linear){.inputs = m->C, .outputs = in_rows(m), .weight = m->layer[l].in,
                    .x = m->acts[l].norm, .y = m->acts[l].in, .y_row = in_row(m)};
}
static inline linear mamba_out_of(const hy_model *m, int l, const pass *p) {
    return (linear){.inputs = m->I, .outputs = m->C, .weight = m->layer[l].mamba_out,
                    .x = m->acts[l].ssd_gated, .y = branch_b(m, p, m->acts[l].branches),
                    .y_row = branch_row(m)};
}
/* Mamba-1: projects the convolved x to B, C and the low-rank input of dt. */
static inline linear select_of(const hy_model *m, int l) {
    return (linear){.inputs = m->I, .outputs = select_row(m), .weight = m->layer[l].select,
                    .x = m->acts[l].conv, .y = m->acts[l].select};
}
static inline linear dt_of(const hy_model *m, int l) {
    return (linear){.inputs = m->R, .outputs = m->I, .weight = m->layer[l].dt,
                    .x = act_at(m, m->acts[l].select, 2 * m->S), .x_row = select_row(m),
                    .y = m->acts[l].dt};
}
/* The projection P of the two mixes that have one (see hy_mix).  RF projects b; CP projects the rows [a; b]. */
static inline linear joint_of(const hy_model *m, int l, const pass *p) {
    int both = m->config.mix == HY_MIX_CONCAT;
    void *branches = m->acts[l].branches;
    return (linear){.inputs = branch_row(m), .outputs = m->C, .weight = m->layer[l].joint,
                    .x = both ? branches : branch_b(m, p, branches), .y = m->acts[l].middle};
}
static inline linear ffn_down_of(const hy_model *m, int l, void *y) {
    return (linear){.inputs = m->F, .outputs = m->C, .weight = m->layer[l].down,
                    .x = m->acts[l].act, .y = y};
}

/* The i-th projection of k in a step, from int8 weights.  No norm precedes these projections. */
static inline gt_rmsnorm_linear_args int8_linear_of(const hy_model *m, const pass *p, const linear *k, int64_t i) {
    return (gt_rmsnorm_linear_args){.M = p->M, .D = k->inputs, .O = k->outputs, .dtype = m->be->dtype,
                                    .eps = HY_PLAIN_EPS, .x = act_at(m, (void *)k->x, i * k->x_step),
                                    .gamma = m->plain_gamma, .y = act_at(m, k->y, i * k->y_step),
                                    .x_stride = k->x_row, .y_stride = k->y_row,
                                    .weight_int8 = int8_of(m, k->weight, i * k->outputs * k->inputs),
                                    .weight_scale = fp32_at(m, scale_of(m, k->weight), i * k->outputs)};
}

static inline gt_norm_gate_args norm_of(const hy_model *m, int l, const pass *p) {
    const layer_acts *a = &m->acts[l];
    return (gt_norm_gate_args){.M = p->M, .D = m->C, .dtype = m->be->dtype, .eps = model_eps,
                               .accumulate = m->accumulate, .x = a->x,
                               .gamma = value_of(m, m->layer[l].norm), .y = a->norm,
                               .dy = m->grad.norm, .dx = m->grad.part,
                               .dgamma = grad_of(m, m->layer[l].norm),
                               .workspace = m->workspace, .workspace_bytes = m->workspace_bytes};
}

/* The token shift before the two low-rank projections that compute the offsets of the five lerps. */
static inline hy_lerp_args shift_of(const hy_model *m, int l, const pass *p) {
    const layer_acts *a = &m->acts[l];
    return (hy_lerp_args){.B = p->B, .T = p->T, .D = m->C, .count = 1, .dtype = m->be->dtype,
                          .accumulate = m->accumulate, .accumulate_dx = 1, .x = a->norm,
                          .state_in = shift_state(m, p->in, l),
                          .mu = value_of(m, m->layer[l].mu_x), .y = a->shifted,
                          .dy = m->grad.shifted, .dx = m->grad.norm,
                          .dmu = grad_of(m, m->layer[l].mu_x)};
}

/* The five data-dependent lerps.  shift_of reads the same state before them, so only this later call writes the new
 * state. */
static inline hy_lerp_args lerps_of(const hy_model *m, int l, const pass *p) {
    const layer_acts *a = &m->acts[l];
    return (hy_lerp_args){.B = p->B, .T = p->T, .D = m->C, .count = MIXES, .dtype = m->be->dtype,
                          .accumulate = m->accumulate, .x = a->norm,
                          .state_in = shift_state(m, p->in, l), .mu = value_of(m, m->layer[l].mu),
                          .m = a->offsets, .y = a->mixed, .state_out = shift_state(m, p->out, l),
                          .dy = m->grad.mixed, .dx = m->grad.norm, .dm = m->grad.offsets,
                          .dmu = grad_of(m, m->layer[l].mu)};
}

static inline gt_wkv6_args wkv6_of(const hy_model *m, int l, const pass *p) {
    const layer_acts *a = &m->acts[l];
    int64_t MC = p->M * m->C;
    return (gt_wkv6_args){.B = p->B, .T = p->T, .H = m->H, .N = m->N, .dtype = m->be->dtype,
                          .w_dtype = GT_F32, .accumulate = m->accumulate,
                          .r = act_at(m, a->kvrg, RECEPTANCE * MC), .k = a->kvrg, .w = a->decay,
                          .v = act_at(m, a->kvrg, VALUE * MC),
                          .u = value_of(m, m->layer[l].bonus), .state_in = wkv_state(m, p->in, l),
                          .y = a->wkv, .state_out = wkv_state(m, p->out, l), .dy = m->grad.wkv,
                          .dr = act_at(m, m->grad.kvrg, RECEPTANCE * MC), .dk = m->grad.kvrg,
                          .dw = m->grad.decay, .dv = act_at(m, m->grad.kvrg, VALUE * MC),
                          .du = grad_of(m, m->layer[l].bonus),
                          .saved = p->keep_saved ? a->wkv_saved : NULL,
                          .saved_bytes = p->keep_saved ? m->wkv_saved_bytes : 0,
                          .workspace = m->workspace, .workspace_bytes = m->workspace_bytes};
}

static inline gt_norm_gate_args head_norm_of(const hy_model *m, int l, const pass *p) {
    const layer_acts *a = &m->acts[l];
    int64_t MC = p->M * m->C;
    return (gt_norm_gate_args){.M = p->M, .D = m->C, .H = m->H, .dtype = m->be->dtype,
                               .norm = GT_NORM_LAYER, .eps = head_norm_eps,
                               .accumulate = m->accumulate, .x = a->wkv,
                               .z = act_at(m, a->kvrg, GATE * MC),
                               .gamma = value_of(m, m->layer[l].head_gamma),
                               .beta = value_of(m, m->layer[l].head_beta), .y = a->wkv_gated,
                               .dy = m->grad.wkv_gated, .dx = m->grad.wkv,
                               .dz = act_at(m, m->grad.kvrg, GATE * MC),
                               .dgamma = grad_of(m, m->layer[l].head_gamma),
                               .dbeta = grad_of(m, m->layer[l].head_beta),
                               .workspace = m->workspace, .workspace_bytes = m->workspace_bytes};
}

/* A row of the in-projection's output holds z [I], x B C [I+2S] and dt [Hm]; the convolution's channels are x B C.
 * With Mamba-1 a row holds z [I] and x [I].  Models that use conv_ssd call conv1d only for single tokens. */
static inline gt_conv1d_args conv1d_of(const hy_model *m, int l, const pass *p) {
    const layer_acts *a = &m->acts[l];
    return (gt_conv1d_args){.B = p->B, .T = p->T, .D = conv_rows(m), .W = m->W,
                            .dtype = m->be->dtype, .activation = GT_ACT_SILU,
                            .accumulate = m->accumulate, .x = act_at(m, a->in, m->I),
                            .weight = value_of(m, m->layer[l].conv_weight),
                            .bias = value_of(m, m->layer[l].conv_bias),
                            .state_in = conv_state(m, p->in, l), .y = a->conv,
                            .state_out = conv_state(m, p->out, l), .dy = m->grad.conv,
                            .dx = act_at(m, m->grad.in, m->I),
                            .dweight = grad_of(m, m->layer[l].conv_weight),
                            .dbias = grad_of(m, m->layer[l].conv_bias),
                            .x_stride = {.t = in_row(m)}, .dx_stride = {.t = in_row(m)},
                            .workspace = m->workspace, .workspace_bytes = m->workspace_bytes};
}

static inline hy_map_args A_of(const hy_model *m, int l) {
    return (hy_map_args){.n = A_numbers(m), .dtype = GT_F32, .function = HY_NEG_EXP,
                         .accumulate = m->accumulate, .x = value_of(m, m->layer[l].A_log),
                         .y = m->acts[l].A, .dy = m->grad.A, .dx = grad_of(m, m->layer[l].A_log)};
}

/* conv1d and ssd in one call: ssd reads the convolved x, B and C.  Forward and backward use this call; a step for
 * one token does not. */
static inline gt_conv_ssd_args conv_ssd_of(const hy_model *m, int l, const pass *p) {
    const layer_acts *a = &m->acts[l];
    int64_t dt = m->I + conv_rows(m);
    return (gt_conv_ssd_args){.B = p->B, .T = p->T, .H = m->Hm, .P = m->P, .N = m->S, .W = m->W,
                              .dtype = m->be->dtype, .softplus = 1, .accumulate = m->accumulate,
                              .xBC = act_at(m, a->in, m->I), .dt = act_at(m, a->in, dt),
                              .weight = value_of(m, m->layer[l].conv_weight),
                              .bias = value_of(m, m->layer[l].conv_bias), .A = a->A,
                              .Dskip = value_of(m, m->layer[l].Dskip),
                              .dt_bias = value_of(m, m->layer[l].dt_bias),
                              .conv_state_in = conv_state(m, p->in, l), .state_in = ssd_state(m, p->in, l),
                              .y = a->ssd, .conv_state_out = conv_state(m, p->out, l),
                              .state_out = ssd_state(m, p->out, l), .dy = m->grad.ssd,
                              .dxBC = act_at(m, m->grad.in, m->I), .ddt = act_at(m, m->grad.in, dt),
                              .dweight = grad_of(m, m->layer[l].conv_weight),
                              .dbias = grad_of(m, m->layer[l].conv_bias), .dA = m->grad.A,
                              .ddt_bias = grad_of(m, m->layer[l].dt_bias),
                              .dDskip = grad_of(m, m->layer[l].Dskip), .xBC_stride = {.t = in_row(m)},
                              .dt_stride = {.t = in_row(m)}, .dxBC_stride = {.t = in_row(m)},
                              .ddt_stride = {.t = in_row(m)}, .saved = p->keep_saved ? a->ssd_saved : NULL,
                              .saved_bytes = p->keep_saved ? m->ssd_saved_bytes : 0,
                              .workspace = m->workspace, .workspace_bytes = m->workspace_bytes};
}

/* Arguments of ssd after a separate conv1d.  Steps for one token use them, and those of wkv_ssm contain them. */
static inline gt_ssd_args ssd_of(const hy_model *m, int l, const pass *p) {
    const layer_acts *a = &m->acts[l];
    int64_t conv = conv_rows(m), B = m->I, C = m->I + m->S, dt = m->I + conv;
    return (gt_ssd_args){.B = p->B, .T = p->T, .H = m->Hm, .P = m->P, .N = m->S, .dtype = m->be->dtype,
                         .softplus = 1, .accumulate = m->accumulate, .x = a->conv, .dt = act_at(m, a->in, dt),
                         .A = a->A, .Bm = act_at(m, a->conv, B), .Cm = act_at(m, a->conv, C),
                         .Dskip = value_of(m, m->layer[l].Dskip),
                         .dt_bias = value_of(m, m->layer[l].dt_bias),
                         .state_in = ssd_state(m, p->in, l), .y = a->ssd,
                         .state_out = ssd_state(m, p->out, l), .dy = m->grad.ssd, .dx = m->grad.conv,
                         .ddt = act_at(m, m->grad.in, dt), .dBm = act_at(m, m->grad.conv, B),
                         .dCm = act_at(m, m->grad.conv, C), .dA = m->grad.A,
                         .dDskip = grad_of(m, m->layer[l].Dskip),
                         .ddt_bias = grad_of(m, m->layer[l].dt_bias), .x_stride = {.t = conv},
                         .dt_stride = {.t = in_row(m)}, .Bm_stride = {.t = conv}, .Cm_stride = {.t = conv},
                         .dx_stride = {.t = conv}, .ddt_stride = {.t = in_row(m)},
                         .dBm_stride = {.t = conv}, .dCm_stride = {.t = conv}, .workspace = m->workspace,
                         .workspace_bytes = m->workspace_bytes};
}

/* Both recurrences of a layer in one call.  Only the outer struct holds the fields that both recurrences share. */
static inline gt_wkv_ssm_args wkv_ssm_of(const hy_model *m, int l, const pass *p) {
    gt_wkv6_args wkv6 = wkv6_of(m, l, p);
    gt_ssd_args ssd = ssd_of(m, l, p);
    gt_wkv_ssm_args both = {.B = p->B, .T = p->T, .dtype = m->be->dtype, .accumulate = m->accumulate,
                            .saved = wkv6.saved, .saved_bytes = wkv6.saved_bytes, .workspace = m->workspace,
                            .workspace_bytes = m->workspace_bytes};
    wkv6.B = wkv6.T = ssd.B = ssd.T = 0;
    wkv6.dtype = ssd.dtype = GT_DTYPE_DEFAULT, wkv6.accumulate = ssd.accumulate = 0;
    wkv6.saved = wkv6.workspace = ssd.workspace = NULL;
    wkv6.saved_bytes = wkv6.workspace_bytes = ssd.workspace_bytes = 0;
    both.wkv6 = wkv6, both.ssd = ssd;
    return both;
}

/* The recurrence of Mamba-1, which also applies the gate. */
static inline gt_selective_scan_args scan_of(const hy_model *m, int l, const pass *p) {
    const layer_acts *a = &m->acts[l];
    const gt_stride4 rows = {.t = select_row(m)};
    return (gt_selective_scan_args){.B = p->B, .T = p->T, .D = m->I, .N = m->S, .dtype = m->be->dtype,
                                    .softplus = 1, .accumulate = m->accumulate, .u = a->conv, .dt = a->dt,
                                    .A = a->A, .Bm = a->select, .Cm = act_at(m, a->select, m->S),
                                    .Dskip = value_of(m, m->layer[l].Dskip), .z = a->in,
                                    .dt_bias = value_of(m, m->layer[l].dt_bias),
                                    .state_in = ssd_state(m, p->in, l), .y = a->ssd_gated,
                                    .state_out = ssd_state(m, p->out, l), .dy = m->grad.ssd_gated,
                                    .du = m->grad.conv, .ddt = m->grad.dt, .dz = m->grad.in,
                                    .dBm = m->grad.select, .dCm = act_at(m, m->grad.select, m->S),
                                    .dA = m->grad.A, .dDskip = grad_of(m, m->layer[l].Dskip),
                                    .ddt_bias = grad_of(m, m->layer[l].dt_bias),
                                    .z_stride = {.t = in_row(m)}, .dz_stride = {.t = in_row(m)},
                                    .Bm_stride = rows, .Cm_stride = rows, .dBm_stride = rows, .dCm_stride = rows,
                                    .saved = p->keep_saved ? a->ssd_saved : NULL,
                                    .saved_bytes = p->keep_saved ? m->ssd_saved_bytes : 0,
                                    .workspace = m->workspace, .workspace_bytes = m->workspace_bytes};
}

static inline gt_norm_gate_args mamba_norm_of(const hy_model *m, int l, const pass *p) {
    const layer_acts *a = &m->acts[l];
    return (gt_norm_gate_args){.M = p->M, .D = m->I, .dtype = m->be->dtype, .gate_first = 1,
                               .eps = model_eps, .accumulate = m->accumulate, .x = a->ssd,
                               .z = a->in, .gamma = value_of(m, m->layer[l].mamba_norm),
                               .y = a->ssd_gated, .dy = m->grad.ssd_gated, .dx = m->grad.ssd,
                               .dz = m->grad.in, .dgamma = grad_of(m, m->layer[l].mamba_norm),
                               .z_stride = in_row(m), .dz_stride = in_row(m),
                               .workspace = m->workspace, .workspace_bytes = m->workspace_bytes};
}

static inline gt_norm_mix_args norm_mix_of(const hy_model *m, int l, const pass *p) {
    const layer_acts *a = &m->acts[l];
    return (gt_norm_mix_args){.M = p->M, .D = m->C, .dtype = m->be->dtype, .eps = model_eps,
                              .accumulate = m->accumulate, .a = a->branches,
                              .b = branch_b(m, p, a->branches),
                              .gain_a = value_of(m, m->layer[l].gain_a),
                              .gain_b = value_of(m, m->layer[l].gain_b), .residual = a->x,
                              .y = a->middle, .dy = m->grad.x, .da = m->grad.branches,
                              .db = branch_b(m, p, m->grad.branches),
                              .dgain_a = grad_of(m, m->layer[l].gain_a),
                              .dgain_b = grad_of(m, m->layer[l].gain_b),
                              .workspace = m->workspace, .workspace_bytes = m->workspace_bytes};
}

static inline hy_gate_mix_args gate_mix_of(const hy_model *m, int l, const pass *p) {
    const layer_acts *a = &m->acts[l];
    int weight = m->layer[l].gate_weight, bias = m->layer[l].gate_bias;
    return (hy_gate_mix_args){.M = p->M, .D = m->C, .dtype = m->be->dtype,
                              .accumulate = m->accumulate, .a = a->branches,
                              .b = branch_b(m, p, a->branches), .residual = a->x,
                              .weight = weight < 0 ? NULL : value_of(m, weight),
                              .bias = value_of(m, bias), .y = a->middle, .gate = a->gate,
                              .dy = m->grad.x, .da = m->grad.branches,
                              .db = branch_b(m, p, m->grad.branches),
                              .dweight = weight < 0 ? NULL : grad_of(m, weight),
                              .dbias = grad_of(m, bias)};
}

static inline gt_rmsnorm_linear_args up_of(const hy_model *m, int l, const pass *p) {
    const layer_acts *a = &m->acts[l];
    return (gt_rmsnorm_linear_args){.M = p->M, .D = m->C, .O = m->F, .dtype = m->be->dtype,
                                    .eps = model_eps, .accumulate = m->accumulate, .x = a->middle,
                                    .weight = weight_of(m, m->layer[l].up),
                                    .gamma = value_of(m, m->layer[l].ffn_norm), .y = a->up,
                                    .dy = m->grad.act, .dx = m->grad.part,
                                    .dweight = grad_of(m, m->layer[l].up),
                                    .dgamma = grad_of(m, m->layer[l].ffn_norm),
                                    .saved = p->keep_saved ? a->up_saved : NULL,
                                    .saved_bytes = p->keep_saved ? m->up_saved_bytes : 0,
                                    .workspace = m->workspace,
                                    .workspace_bytes = m->workspace_bytes,
                                    .weight_int8 = int8_of(m, m->layer[l].up, 0),
                                    .weight_scale = scale_of(m, m->layer[l].up)};
}

static inline hy_map_args gelu_of(const hy_model *m, int l, const pass *p) {
    return (hy_map_args){.n = p->M * m->F, .dtype = m->be->dtype, .function = HY_GELU,
                         .x = m->acts[l].up, .y = m->acts[l].act, .dy = m->grad.act,
                         .dx = m->grad.act};
}

static inline hy_map_args tanh_of(const hy_model *m, int64_t n, void *y, void *dy) {
    return (hy_map_args){.n = n, .dtype = m->be->dtype, .function = HY_TANH, .x = y, .y = y,
                         .dy = dy, .dx = dy};
}

static inline hy_bias_args decay_base_of(const hy_model *m, int l, const pass *p) {
    return (hy_bias_args){.M = p->M, .D = m->C, .dtype = GT_F32, .accumulate = m->accumulate,
                          .bias = value_of(m, m->layer[l].decay_base), .y = m->acts[l].decay,
                          .dy = m->grad.decay, .dbias = grad_of(m, m->layer[l].decay_base)};
}

/* The output head.  Its weight is the embedding unless the model is untied. */
static inline gt_rmsnorm_linear_args head_of(const hy_model *m, const pass *p) {
    return (gt_rmsnorm_linear_args){.M = p->M, .D = m->C, .O = m->V,
                                    .dtype = m->be->dtype, .eps = model_eps,
                                    .accumulate = m->accumulate,
                                    .x = m->x_last,
                                    .weight = weight_of(m, m->head),
                                    .gamma = value_of(m, m->final_norm), .y = m->logits,
                                    .dy = m->logits, .dx = m->grad.x,
                                    .dweight = grad_of(m, m->head),
                                    .dgamma = grad_of(m, m->final_norm),
                                    .saved = p->keep_saved ? m->logits_saved : NULL,
                                    .saved_bytes = p->keep_saved ? m->logits_saved_bytes : 0,
                                    .workspace = m->workspace,
                                    .workspace_bytes = m->workspace_bytes,
                                    .weight_int8 = int8_of(m, m->head, 0), .weight_scale = scale_of(m, m->head)};
}

/* The output head for the last token of each sequence only. */
static inline gt_rmsnorm_linear_args last_head_of(const hy_model *m, const pass *p) {
    gt_rmsnorm_linear_args head = head_of(m, p);
    head.M = p->B, head.x_stride = p->T * m->C;
    head.x = act_at(m, m->x_last, head.x_stride - m->C);
    return head;
}

static inline hy_embedding_args embedding_of(const hy_model *m, const pass *p) {
    return (hy_embedding_args){.M = p->M, .V = m->V, .D = m->C, .dtype = m->be->dtype,
                               /* a tied head has already written its part of this gradient */
                               .accumulate = m->config.untied ? m->accumulate : 1,
                               .token = m->tokens, .table = weight_of(m, m->embedding),
                               .y = m->acts[0].x, .dy = m->grad.x,
                               .dtable = grad_of(m, m->embedding)};
}

static inline hy_cross_entropy_args cross_entropy_of(const hy_model *m, const pass *p) {
    return (hy_cross_entropy_args){.M = p->M, .V = m->V, .dtype = m->be->dtype,
                                   .target = m->targets, .logits = m->logits, .lse = m->lse,
                                   .loss = m->loss, .entropy = m->entropy, .total = m->total,
                                   .scale = fp32_at(m, m->control, HY_LOSS_SCALE)};
}

/* clang-format on */

#endif
