/* Runs forward and backward of a layer, as calls of a hy_backend. */
#include "hybrid_args.h"

/* ---- forward ------------------------------------------------------------------------------- */

/* Computes y = x weight^T from int8 weights. */
static gt_status int8_forward(const hy_model *m, const pass *p, const linear *k) {
    for (int64_t i = 0; i < (k->count ? k->count : 1); i++) {
        gt_rmsnorm_linear_args step = int8_linear_of(m, p, k, i);
        TRY(m->be->rmsnorm_linear_step(m->be, &step));
    }
    return GT_OK;
}

/* Computes y = x weight^T + beta y.  From int8 weights beta must be 0. */
/* clang-format off */
static gt_status linear_forward(const hy_model *m, const pass *p, linear k, float beta) {
    if (takes_int8(m, p, k.weight)) return int8_forward(m, p, &k);
    hy_gemm_args g = {.M = p->M, .N = k.outputs, .K = k.inputs, .trans_b = 1,
                      .dtype = m->be->dtype, .c_dtype = k.y_dtype, .alpha = 1, .beta = beta,
                      .a = k.x, .b = weight_of(m, k.weight), .c = k.y, .lda = k.x_row,
                      .ldc = k.y_row, .count = k.count, .a_step = k.x_step,
                      .b_step = k.outputs * k.inputs, .c_step = k.y_step};
    return m->be->gemm(m->be, &g);
}
/* clang-format on */

static gt_status add_rows(const hy_model *m, const pass *p, const void *x, void *y) {
    hy_add_args add = {.n = p->M * m->C, .dtype = m->be->dtype, .x = x, .y = y};
    return m->be->add(m->be, &add);
}

static gt_status copy_rows(const hy_model *m, const pass *p, const void *from, void *to) {
    return m->be->copy(m->be, to, from, (size_t)(p->M * m->C) * act_bytes(m));
}

/* Runs the RWKV time mix up to the inputs of wkv6 (w, k, v, r) and the gate. */
static gt_status forward_rwkv_in(const hy_model *m, int l, const pass *p) {
    hy_backend *be = m->be;
    const layer_acts *a = &m->acts[l];
    hy_lerp_args shift = shift_of(m, l, p), lerps = lerps_of(m, l, p);
    hy_map_args tanh_lora = tanh_of(m, p->M * MIXES * MIX_RANK, a->lora, NULL);
    hy_map_args tanh_decay = tanh_of(m, p->M * DECAY_RANK, a->decay_lora, NULL);
    hy_bias_args decay_base = decay_base_of(m, l, p);
    be->at.part = "rwkv";
    TRY(be->lerp_forward(be, &shift));
    TRY(linear_forward(m, p, mix_down_of(m, l), 0));
    TRY(be->map_forward(be, &tanh_lora));
    TRY(linear_forward(m, p, mix_up_of(m, l, p), 0));
    TRY(be->lerp_forward(be, &lerps));
    TRY(linear_forward(m, p, projections_of(m, l, p), 0));
    TRY(linear_forward(m, p, decay_down_of(m, l), 0));
    TRY(be->map_forward(be, &tanh_decay));
    TRY(linear_forward(m, p, decay_up_of(m, l), 0));
    return be->bias_forward(be, &decay_base);
}

static gt_status forward_wkv6(const hy_model *m, int l, const pass *p) {
    gt_wkv6_args wkv6 = wkv6_of(m, l, p);
    return p->step ? m->be->wkv6_step(m->be, &wkv6) : m->be->wkv6_forward(m->be, &wkv6);
}

static gt_status forward_rwkv_out(const hy_model *m, int l, const pass *p) {
    gt_norm_gate_args head_norm = head_norm_of(m, l, p);
    m->be->at.part = "rwkv";
    TRY(m->be->norm_gate_forward(m->be, &head_norm));
    return linear_forward(m, p, rwkv_out_of(m, l), 0);
}

static gt_status forward_mamba_in(const hy_model *m, int l, const pass *p) {
    hy_map_args A = A_of(m, l);
    m->be->at.part = "mamba";
    TRY(linear_forward(m, p, mamba_in_of(m, l), 0));
    return m->be->map_forward(m->be, &A);
}

static gt_status forward_conv1d(const hy_model *m, int l, const pass *p) {
    gt_conv1d_args conv1d = conv1d_of(m, l, p);
    return p->step ? m->be->conv1d_step(m->be, &conv1d) : m->be->conv1d_forward(m->be, &conv1d);
}

static gt_status forward_scan(const hy_model *m, int l, const pass *p) {
    gt_selective_scan_args scan = scan_of(m, l, p);
    TRY(forward_conv1d(m, l, p));
    TRY(linear_forward(m, p, select_of(m, l), 0));
    TRY(linear_forward(m, p, dt_of(m, l), 0));
    return p->step ? m->be->selective_scan_step(m->be, &scan) : m->be->selective_scan_forward(m->be, &scan);
}

static gt_status forward_ssd(const hy_model *m, int l, const pass *p) {
    gt_ssd_args ssd = ssd_of(m, l, p);
    gt_conv_ssd_args conv_ssd = conv_ssd_of(m, l, p);
    if (!p->step) return m->be->conv_ssd_forward(m->be, &conv_ssd);
    TRY(forward_conv1d(m, l, p));
    return m->be->ssd_step(m->be, &ssd);
}

static gt_status forward_mamba_out(const hy_model *m, int l, const pass *p) {
    gt_norm_gate_args norm = mamba_norm_of(m, l, p);
    m->be->at.part = "mamba";
    if (!is_mamba1(m)) TRY(m->be->norm_gate_forward(m->be, &norm));
    return linear_forward(m, p, mamba_out_of(m, l, p), 0);
}

/* Runs both branches; one call runs both recurrences. */
static gt_status forward_both(const hy_model *m, int l, const pass *p) {
    gt_wkv_ssm_args wkv_ssm = wkv_ssm_of(m, l, p);
    TRY(forward_rwkv_in(m, l, p));
    TRY(forward_mamba_in(m, l, p));
    TRY(forward_conv1d(m, l, p));
    m->be->at.part = "branches";
    TRY(m->be->wkv_ssm_forward(m->be, &wkv_ssm));
    TRY(forward_rwkv_out(m, l, p));
    return forward_mamba_out(m, l, p);
}

static gt_status forward_branches(const hy_model *m, int l, const pass *p) {
    if (takes_wkv_ssm(m, p)) return forward_both(m, l, p);
    if (has_rwkv(m)) {
        TRY(forward_rwkv_in(m, l, p));
        TRY(forward_wkv6(m, l, p));
        TRY(forward_rwkv_out(m, l, p));
    }
    if (!has_mamba(m)) return GT_OK;
    TRY(forward_mamba_in(m, l, p));
    TRY(is_mamba1(m) ? forward_scan(m, l, p) : forward_ssd(m, l, p));
    return forward_mamba_out(m, l, p);
}

/* Applies dropout, in training only.  Backward calls it on the gradient, so the same elements become 0 there. */
gt_status hy_dropout(const hy_model *m, const pass *p, int site, void *x, int64_t columns) {
    const hy_dropout_args drop = {.n = p->M * columns,
                                  .window = p->T * columns,
                                  .dtype = m->be->dtype,
                                  .rate = m->config.dropout,
                                  .site = site,
                                  .control = m->control,
                                  .x = x};
    return p->keep_saved && m->config.dropout > 0 ? m->be->dropout(m->be, &drop) : GT_OK;
}

static int branches_site(int l) { return 3 * l + 1; }
static int ffn_site(int l) { return 3 * l + 3; }

/* Applies dropout to the outputs of both branches.  Unless they lie side by side they are two arrays.  Each array
 * needs its own call, because dropout counts windows within an array. */
static gt_status drop_of_branches(const hy_model *m, int l, const pass *p, void *branches) {
    const int64_t columns = branch_row(m);
    TRY(hy_dropout(m, p, branches_site(l), branches, columns));
    if (columns == branch_columns(m)) return GT_OK;
    return hy_dropout(m, p, branches_site(l) + 1, branch_b(m, p, branches), columns);
}

/* Computes middle = x + mix(a, b). */
static gt_status forward_mix(const hy_model *m, int l, const pass *p) {
    hy_backend *be = m->be;
    const layer_acts *a = &m->acts[l];
    be->at.part = "mix";
    if (m->config.mix == HY_MIX_NORM) {
        gt_norm_mix_args mix = norm_mix_of(m, l, p);
        return be->norm_mix_forward(be, &mix);
    }
    if (m->config.mix == HY_MIX_GATE || m->config.mix == HY_MIX_SCALAR) {
        hy_gate_mix_args mix = gate_mix_of(m, l, p);
        return be->gate_mix_forward(be, &mix);
    }
    const int is_first = !is_single(m) && takes_int8(m, p, m->layer[l].joint); /* an int8 projection cannot add */
    if (is_first) {
        TRY(linear_forward(m, p, joint_of(m, l, p), 0));
        TRY(add_rows(m, p, a->x, a->middle));
    } else {
        TRY(copy_rows(m, p, a->x, a->middle));
    }
    if (m->config.mix == HY_MIX_RESIDUAL || is_single(m)) TRY(add_rows(m, p, a->branches, a->middle));
    if (is_first || is_single(m)) return GT_OK;
    return linear_forward(m, p, joint_of(m, l, p), 1);
}

/* Runs the FFN up to the input of its last matrix product. */
static gt_status forward_ffn_up(const hy_model *m, int l, const pass *p) {
    hy_backend *be = m->be;
    gt_rmsnorm_linear_args up = up_of(m, l, p);
    hy_map_args gelu = gelu_of(m, l, p);
    be->at.part = "ffn";
    TRY(takes_int8(m, p, m->layer[l].up) ? be->rmsnorm_linear_step(be, &up) : be->rmsnorm_linear_forward(be, &up));
    TRY(be->map_forward(be, &gelu));
    return hy_dropout(m, p, ffn_site(l), m->acts[l].act, m->F);
}

/* Computes out = middle + act down^T. */
static gt_status forward_ffn_down(const hy_model *m, int l, const pass *p, void *out) {
    const linear down = ffn_down_of(m, l, out);
    if (takes_int8(m, p, down.weight)) {
        TRY(linear_forward(m, p, down, 0));
        return add_rows(m, p, m->acts[l].middle, out);
    }
    TRY(copy_rows(m, p, m->acts[l].middle, out));
    return linear_forward(m, p, down, 1);
}

gt_status hy_layer_forward(const hy_model *m, int l, const pass *p, void *out) {
    hy_backend *be = m->be;
    const layer_acts *a = &m->acts[l];
    gt_norm_gate_args norm = norm_of(m, l, p);
    be->at.part = "norm";
    TRY(be->norm_gate_forward(be, &norm));
    TRY(forward_branches(m, l, p));
    TRY(drop_of_branches(m, l, p, a->branches));
    TRY(forward_mix(m, l, p));
    if (has_ffn(m)) TRY(forward_ffn_up(m, l, p));
    if (!out) return GT_OK;
    return has_ffn(m) ? forward_ffn_down(m, l, p, out) : copy_rows(m, p, a->middle, out);
}

/* Runs the layer again with the calls and arguments of the forward pass, so all bits are the same.  It cannot repeat
 * a pass that updates its states in place, such as a decoding step. */
gt_status hy_layer_restore(hy_model *m, int l) {
    if (!recomputes(m) || m->held == l) return GT_OK;
    if (!m->latest.M || m->latest.in == &m->decoding)
        return hy_fail(
            GT_ERROR_UNSUPPORTED,
            "recompute: the activations of layer %d were not kept, because the last pass was a decoding step", l);
    m->held = -1;
    TRY(hy_layer_forward(m, l, &m->latest, NULL));
    m->held = l;
    return GT_OK;
}

/* ---- backward ---------------------------------------------------------------------------------
 * grad.x is the gradient of the residual stream.  Backward starts with the gradient of the last layer's output and ends
 * with that of the embedding.  Each function below adds the contribution of its part of a layer. */

/* Computes dx = dy weight + beta dx, and the gradient of the weight.  dy has the layout of y, and dx the layout of
 * x. */
/* clang-format off */
static gt_status linear_backward(const hy_model *m, linear k, const void *dy, void *dx, float beta) {
    int64_t M = m->trained.M;
    hy_gemm_args weight = {.M = k.outputs, .N = k.inputs, .K = M, .trans_a = 1,
                           .dtype = m->be->dtype, .c_dtype = GT_F32, .alpha = 1,
                           .beta = (float)m->accumulate, .a = dy, .b = k.x,
                           .c = grad_of(m, k.weight), .lda = k.y_row, .ldb = k.x_row,
                           .count = k.count, .a_step = k.y_step, .b_step = k.x_step,
                           .c_step = k.outputs * k.inputs};
    hy_gemm_args input = {.M = M, .N = k.inputs, .K = k.outputs, .dtype = m->be->dtype, .alpha = 1,
                          .beta = beta, .a = dy, .b = weight_of(m, k.weight), .c = dx,
                          .lda = k.y_row, .ldc = k.x_row, .count = k.count, .a_step = k.y_step,
                          .b_step = k.outputs * k.inputs, .c_step = k.x_step};
    TRY(m->be->gemm(m->be, &weight));
    return m->be->gemm(m->be, &input);
}
/* clang-format on */

static gt_status add_part(const hy_model *m) {
    hy_add_args add = {.n = m->trained.M * m->C, .dtype = m->be->dtype, .x = m->grad.part, .y = m->grad.x};
    return m->be->add(m->be, &add);
}

static gt_status backward_ffn(const hy_model *m, int l) {
    hy_backend *be = m->be;
    gt_rmsnorm_linear_args up = up_of(m, l, &m->trained);
    hy_map_args gelu = gelu_of(m, l, &m->trained);
    be->at.part = "ffn";
    TRY(linear_backward(m, ffn_down_of(m, l, NULL), m->grad.x, m->grad.act, 0));
    TRY(hy_dropout(m, &m->trained, ffn_site(l), m->grad.act, m->F));
    TRY(be->map_backward(be, &gelu));
    TRY(be->rmsnorm_linear_backward(be, &up));
    return add_part(m);
}

/* Computes the gradients of a and b from grad.x, the gradient of `middle`. */
static gt_status backward_mix(const hy_model *m, int l) {
    hy_backend *be = m->be;
    const pass *p = &m->trained;
    be->at.part = "mix";
    switch (m->config.mix) {
    case HY_MIX_NORM: {
        gt_norm_mix_args mix = norm_mix_of(m, l, p);
        return be->norm_mix_backward(be, &mix);
    }
    case HY_MIX_GATE:
    case HY_MIX_SCALAR: {
        hy_gate_mix_args mix = gate_mix_of(m, l, p);
        return be->gate_mix_backward(be, &mix);
    }
    case HY_MIX_CONCAT: return linear_backward(m, joint_of(m, l, p), m->grad.x, m->grad.branches, 0);
    case HY_MIX_RESIDUAL:
        TRY(linear_backward(m, joint_of(m, l, p), m->grad.x, branch_b(m, p, m->grad.branches), 0));
        break;
    case HY_MIX_RWKV:
    case HY_MIX_MAMBA: break;
    }
    /* RF and models of one branch add a branch unchanged, so the gradient of that branch is a copy of grad.x. */
    return be->copy(be, m->grad.branches, m->grad.x, (size_t)(p->M * m->C) * act_bytes(m));
}

/* Computes the gradient of wkv6's output from the gradient of the branch output. */
static gt_status backward_rwkv_out(const hy_model *m, int l) {
    gt_norm_gate_args head_norm = head_norm_of(m, l, &m->trained);
    m->be->at.part = "rwkv";
    TRY(linear_backward(m, rwkv_out_of(m, l), m->grad.branches, m->grad.wkv_gated, 0));
    return m->be->norm_gate_backward(m->be, &head_norm);
}

static gt_status backward_wkv6(const hy_model *m, int l) {
    gt_wkv6_args wkv6 = wkv6_of(m, l, &m->trained);
    return m->be->wkv6_backward(m->be, &wkv6);
}

/* Computes the gradient of the RWKV branch's input, grad.norm, and overwrites grad.norm. */
static gt_status backward_rwkv_in(const hy_model *m, int l) {
    hy_backend *be = m->be;
    const pass *p = &m->trained;
    const layer_acts *a = &m->acts[l];
    const grad_acts *g = &m->grad;
    hy_lerp_args shift = shift_of(m, l, p), lerps = lerps_of(m, l, p);
    hy_map_args tanh_lora = tanh_of(m, p->M * MIXES * MIX_RANK, a->lora, g->lora);
    hy_map_args tanh_decay = tanh_of(m, p->M * DECAY_RANK, a->decay_lora, g->decay_lora);
    hy_bias_args decay_base = decay_base_of(m, l, p);
    hy_cast_args cast = {
        .n = p->M * m->C, .from_dtype = GT_F32, .to_dtype = be->dtype, .from = g->decay, .to = g->decay_cast};
    be->at.part = "rwkv";
    TRY(be->bias_backward(be, &decay_base));
    if (cast.to != cast.from) TRY(be->cast(be, &cast));
    TRY(linear_backward(m, decay_up_of(m, l), g->decay_cast, g->decay_lora, 0));
    TRY(be->map_backward(be, &tanh_decay));
    TRY(linear_backward(m, decay_down_of(m, l), g->decay_lora, g->mixed, 0));
    TRY(linear_backward(m, projections_of(m, l, p), g->kvrg, act_at(m, g->mixed, p->M * m->C), 0));
    TRY(be->lerp_backward(be, &lerps));
    TRY(linear_backward(m, mix_up_of(m, l, p), g->offsets, g->lora, 0));
    TRY(be->map_backward(be, &tanh_lora));
    TRY(linear_backward(m, mix_down_of(m, l), g->lora, g->shifted, 0));
    return be->lerp_backward(be, &shift);
}

static gt_status backward_mamba_out(const hy_model *m, int l) {
    hy_backend *be = m->be;
    const pass *p = &m->trained;
    const grad_acts *g = &m->grad;
    gt_norm_gate_args norm = mamba_norm_of(m, l, p);
    be->at.part = "mamba";
    TRY(linear_backward(m, mamba_out_of(m, l, p), branch_b(m, p, g->branches), g->ssd_gated, 0));
    TRY(be->zero(be, g->A, (size_t)A_numbers(m) * be->fp32_bytes)); /* A is no parameter: its gradient starts at 0 */
    return is_mamba1(m) ? GT_OK : be->norm_gate_backward(be, &norm);
}

static gt_status backward_conv1d(const hy_model *m, int l) {
    gt_conv1d_args conv1d = conv1d_of(m, l, &m->trained);
    m->be->at.part = "mamba";
    return m->be->conv1d_backward(m->be, &conv1d);
}

static gt_status backward_scan(const hy_model *m, int l) {
    const grad_acts *g = &m->grad;
    gt_selective_scan_args scan = scan_of(m, l, &m->trained);
    TRY(m->be->selective_scan_backward(m->be, &scan));
    TRY(linear_backward(m, dt_of(m, l), g->dt, act_at(m, g->select, 2 * m->S), 0));
    TRY(linear_backward(m, select_of(m, l), g->select, g->conv, 1));
    return backward_conv1d(m, l);
}

static gt_status backward_ssd(const hy_model *m, int l) {
    gt_conv_ssd_args conv_ssd = conv_ssd_of(m, l, &m->trained);
    return m->be->conv_ssd_backward(m->be, &conv_ssd);
}

/* Computes the gradient of the Mamba branch's input.  Adds it to grad.norm if an RWKV branch has written grad.norm
 * before, else overwrites grad.norm. */
static gt_status backward_mamba_in(const hy_model *m, int l) {
    hy_map_args A = A_of(m, l);
    TRY(m->be->map_backward(m->be, &A));
    return linear_backward(m, mamba_in_of(m, l), m->grad.in, m->grad.norm, has_rwkv(m) ? 1 : 0);
}

/* Runs backward of both branches; one call runs both recurrences. */
static gt_status backward_both(const hy_model *m, int l) {
    gt_wkv_ssm_args wkv_ssm = wkv_ssm_of(m, l, &m->trained);
    TRY(backward_rwkv_out(m, l));
    TRY(backward_mamba_out(m, l));
    m->be->at.part = "branches";
    TRY(m->be->wkv_ssm_backward(m->be, &wkv_ssm));
    TRY(backward_rwkv_in(m, l));
    TRY(backward_conv1d(m, l));
    return backward_mamba_in(m, l);
}

static gt_status backward_branches(const hy_model *m, int l) {
    if (has_wkv_ssm(m)) return backward_both(m, l);
    if (has_rwkv(m)) {
        TRY(backward_rwkv_out(m, l));
        TRY(backward_wkv6(m, l));
        TRY(backward_rwkv_in(m, l));
    }
    if (!has_mamba(m)) return GT_OK;
    TRY(backward_mamba_out(m, l));
    TRY(is_mamba1(m) ? backward_scan(m, l) : backward_ssd(m, l));
    return backward_mamba_in(m, l);
}

gt_status hy_layer_backward(const hy_model *m, int l) {
    gt_norm_gate_args norm = norm_of(m, l, &m->trained);
    if (has_ffn(m)) TRY(backward_ffn(m, l));
    TRY(backward_mix(m, l));
    TRY(drop_of_branches(m, l, &m->trained, m->grad.branches));
    TRY(backward_branches(m, l));
    m->be->at.part = "norm";
    TRY(m->be->norm_gate_backward(m->be, &norm));
    return add_part(m);
}
