/* Plans the layout and size of a model's memory, and creates models. */
#include "hybrid_args.h"
#include <stdlib.h>
#include <string.h>

/* An arena, which hands out pieces of one allocation.  If only the size is wanted, the base is a made-up address
 * that nobody reads or writes. */
typedef struct arena {
    char *base;
    size_t used;
} arena;

static void *take(arena *a, size_t bytes) {
    void *piece = a->base + a->used;
    a->used += (bytes + 255) / 256 * 256;
    return piece;
}
static void *take_acts(arena *a, const hy_model *m, int64_t n) { return take(a, (size_t)n * act_bytes(m)); }
static float *take_fp32(arena *a, const hy_model *m, int64_t n) {
    return (float *)take(a, (size_t)n * m->be->fp32_bytes);
}

static void take_rwkv(arena *a, hy_model *m, layer_acts *x) {
    int64_t M = m->M, MC = m->M * m->C;
    x->shifted = take_acts(a, m, MC);
    x->lora = take_acts(a, m, M * MIXES * MIX_RANK);
    x->offsets = take_acts(a, m, MIXES * MC);
    x->mixed = take_acts(a, m, MIXES * MC);
    x->decay_lora = take_acts(a, m, M * DECAY_RANK);
    x->decay = take_fp32(a, m, MC);
    x->kvrg = take_acts(a, m, PROJECTIONS * MC);
    x->wkv = take_acts(a, m, MC);
    x->wkv_gated = take_acts(a, m, MC);
    x->wkv_saved = take(a, m->wkv_saved_bytes);
}

static void take_mamba(arena *a, hy_model *m, layer_acts *x) {
    int64_t M = m->M;
    x->in = take_acts(a, m, M * in_row(m));
    x->A = take_fp32(a, m, A_numbers(m));
    x->conv = take_acts(a, m, (has_conv1d(m) ? M : m->config.samples) * conv_rows(m));
    if (is_mamba1(m)) {
        x->select = take_acts(a, m, M * select_row(m));
        x->dt = take_acts(a, m, M * m->I);
    } else {
        x->ssd = take_acts(a, m, M * m->I);
    }
    x->ssd_gated = take_acts(a, m, M * m->I);
    x->ssd_saved = take(a, m->ssd_saved_bytes);
}

static void take_layer(arena *a, hy_model *m, layer_acts *x) {
    int64_t M = m->M, MC = m->M * m->C;
    x->x = take_acts(a, m, MC);
    x->norm = take_acts(a, m, MC);
    if (has_rwkv(m)) take_rwkv(a, m, x);
    if (has_mamba(m)) take_mamba(a, m, x);
    x->branches = take_acts(a, m, M * branch_columns(m));
    x->gate = take_fp32(a, m, M);
    x->middle = take_acts(a, m, MC);
    x->up = take_acts(a, m, M * m->F);
    x->act = take_acts(a, m, M * m->F);
    x->up_saved = take(a, m->up_saved_bytes);
}

static void take_activations(arena *a, hy_model *m) {
    m->tokens = take(a, (size_t)m->M * sizeof *m->tokens);
    m->targets = take(a, (size_t)m->M * sizeof *m->targets);
    m->keep = take(a, (size_t)m->B * sizeof *m->keep);
    take_layer(a, m, &m->acts[0]);
    for (int l = 1; l < m->L; l++) {
        if (m->config.inference || recomputes(m)) /* in inference a layer may overwrite its input with its output */
            m->acts[l] = m->acts[0];
        else
            take_layer(a, m, &m->acts[l]);
        if (recomputes(m)) m->acts[l].x = take_acts(a, m, m->M * m->C);
    }
    m->x_last = m->config.inference ? m->acts[0].x : take_acts(a, m, m->M * m->C);
    m->logits = take_acts(a, m, m->M * m->V);
    m->logits_saved = take(a, m->logits_saved_bytes);
    m->lse = take_fp32(a, m, m->M);
    m->loss = take_fp32(a, m, m->M);
    m->entropy = take_fp32(a, m, m->M);
}

static void take_rwkv_backward(arena *a, hy_model *m) {
    grad_acts *g = &m->grad;
    int64_t M = m->M, MC = m->M * m->C;
    g->wkv_gated = take_acts(a, m, MC);
    g->wkv = take_acts(a, m, MC);
    g->kvrg = take_acts(a, m, PROJECTIONS * MC);
    g->decay = take_fp32(a, m, MC);
    g->decay_cast = m->be->dtype == GT_F32 ? g->decay : take_acts(a, m, MC);
    g->decay_lora = take_acts(a, m, M * DECAY_RANK);
    g->mixed = take_acts(a, m, MIXES * MC);
    g->offsets = take_acts(a, m, MIXES * MC);
    g->lora = take_acts(a, m, M * MIXES * MIX_RANK);
    g->shifted = take_acts(a, m, MC);
}

static void take_mamba_backward(arena *a, hy_model *m) {
    grad_acts *g = &m->grad;
    int64_t M = m->M;
    g->ssd_gated = take_acts(a, m, M * m->I);
    if (has_conv1d(m)) g->conv = take_acts(a, m, M * conv_rows(m));
    if (is_mamba1(m)) {
        g->select = take_acts(a, m, M * select_row(m));
        g->dt = take_acts(a, m, M * m->I);
    } else {
        g->ssd = take_acts(a, m, M * m->I);
    }
    g->in = take_acts(a, m, M * in_row(m));
    g->A = take_fp32(a, m, A_numbers(m));
}

static void take_backward(arena *a, hy_model *m) {
    grad_acts *g = &m->grad;
    int64_t M = m->M, MC = m->M * m->C;
    g->x = take_acts(a, m, MC);
    g->part = take_acts(a, m, MC);
    g->branches = take_acts(a, m, M * branch_columns(m));
    g->norm = take_acts(a, m, MC);
    g->act = take_acts(a, m, M * m->F);
    if (has_rwkv(m)) take_rwkv_backward(a, m);
    if (has_mamba(m)) take_mamba_backward(a, m);
}

static void take_states(arena *a, const hy_model *m, state_set *s, int64_t B) {
    int64_t LB = m->L * B;
    s->B = B;
    s->wkv = take_fp32(a, m, LB * wkv_numbers(m));
    s->ssd = take_fp32(a, m, LB * ssm_numbers(m));
    s->conv = take_fp32(a, m, LB * conv_numbers(m));
    s->shift = take_fp32(a, m, LB * shift_numbers(m));
}

static void take_weights(arena *a, hy_model *m) {
    m->values = take_fp32(a, m, m->param_total);
    m->copies = m->be->dtype == GT_F32 ? NULL : take_acts(a, m, m->param_total);
    if (m->config.int8) {
        m->int8 = take(a, (size_t)(m->int8_total * int8_bytes(m)));
        m->scales = take_fp32(a, m, m->scale_total);
        m->plain_gamma = take_fp32(a, m, m->plain_total);
    }
    m->segments.count = m->param_count;
    m->segments.start = take(a, (size_t)(m->param_count + 1) * sizeof(int64_t));
    m->segments.group = take(a, (size_t)m->param_count * sizeof(int32_t));
    m->segments.decay = take_fp32(a, m, m->param_count);
    m->control = take_fp32(a, m, HY_CONTROLS);
    m->norms = take_fp32(a, m, HY_GROUPS + 1);
    m->total = take_fp32(a, m, 3);
    m->partial = take(a, (size_t)m->param_count * sizeof(double));
}

/* Returns the number of columns of the widest array of activations. */
static int64_t widest(const hy_model *m) {
    int64_t most = m->F > m->C ? m->F : m->C;
    if (has_mamba(m) && most < in_rows(m)) most = in_rows(m);
    return most < m->V ? m->V : most;
}

/* Takes all arrays of the model from the arena, and computes the bytes of each purpose. */
static gt_status take_all(arena *a, hy_model *m, hy_plan *plan) {
    const hy_limits limits = {.M = m->M, .D = widest(m), .n = m->param_total};
    size_t before = a->used, scratch;
    take_weights(a, m);
    plan->weights = a->used - before, before = a->used;
    arena unused = {a->base, 0}; /* in inference it gives addresses for arrays that nobody reads or writes */
    arena *const training = m->config.inference ? &unused : a;
    m->grads = take_fp32(training, m, m->param_total);
    plan->gradients = a->used - before, before = a->used;
    m->m = take_fp32(training, m, m->param_total);
    m->v = take_fp32(training, m, m->param_total);
    if (m->config.average) m->average = take_fp32(training, m, m->param_total);
    plan->optimizer = a->used - before, before = a->used;
    take_activations(a, m);
    plan->activations = a->used - before, before = a->used;
    take_backward(training, m);
    plan->backward = a->used - before, before = a->used;
    take_states(a, m, &m->decoding, m->config.samples);
    if (m->config.stateful) {
        take_states(a, m, &m->carried_in, m->B);
        take_states(a, m, &m->carried_out, m->B);
    }
    plan->states = a->used - before, before = a->used;
    m->workspace = take(a, m->workspace_bytes);
    TRY(m->be->scratch(m->be, &limits, NULL, &scratch));
    m->scratch = take(a, scratch);
    m->scratch_bytes = scratch;
    plan->workspace = a->used - before;
    plan->total = a->used;
    return GT_OK;
}

/* Enlarges the workspace to the needs of an operator.  Also sets *saved, if this pass keeps what backward needs. */
static void note_need(hy_model *m, const pass *p, const gt_workspace *need, size_t *saved) {
    const size_t passes[] = {need->forward, p->keep_saved ? need->backward : 0, need->step};
    for (int i = 0; i < 3; i++)
        if (m->workspace_bytes < passes[i]) m->workspace_bytes = passes[i];
    if (saved && p->keep_saved) *saved = need->saved;
}

static gt_status ask_norm(hy_model *m, const pass *p, gt_norm_gate_args norm) {
    gt_workspace need;
    TRY(m->be->norm_gate_workspace(m->be, &norm, &need));
    note_need(m, p, &need, NULL);
    return GT_OK;
}

static gt_status ask_wkv6(hy_model *m, const pass *p) {
    gt_wkv6_args wkv6 = wkv6_of(m, 0, p);
    gt_workspace need;
    TRY(m->be->wkv6_workspace(m->be, &wkv6, &need));
    note_need(m, p, &need, &m->wkv_saved_bytes);
    return GT_OK;
}

static gt_status ask_conv1d(hy_model *m, const pass *p) {
    gt_conv1d_args conv1d = conv1d_of(m, 0, p);
    gt_workspace need;
    TRY(m->be->conv1d_workspace(m->be, &conv1d, &need));
    note_need(m, p, &need, NULL);
    return GT_OK;
}

static gt_status ask_scan(hy_model *m, const pass *p) {
    gt_selective_scan_args scan = scan_of(m, 0, p);
    gt_workspace need;
    TRY(ask_conv1d(m, p));
    TRY(m->be->selective_scan_workspace(m->be, &scan, &need));
    note_need(m, p, &need, &m->ssd_saved_bytes);
    return GT_OK;
}

static gt_status ask_ssd(hy_model *m, const pass *p) {
    gt_ssd_args ssd = ssd_of(m, 0, p);
    gt_conv_ssd_args conv_ssd = conv_ssd_of(m, 0, p);
    gt_workspace need;
    if (p->step) {
        TRY(ask_conv1d(m, p));
        TRY(m->be->ssd_workspace(m->be, &ssd, &need));
    } else {
        TRY(m->be->conv_ssd_workspace(m->be, &conv_ssd, &need));
    }
    note_need(m, p, &need, &m->ssd_saved_bytes);
    return GT_OK;
}

static gt_status ask_both(hy_model *m, const pass *p) {
    gt_wkv_ssm_args wkv_ssm = wkv_ssm_of(m, 0, p);
    gt_workspace need;
    TRY(ask_conv1d(m, p));
    TRY(m->be->wkv_ssm_workspace(m->be, &wkv_ssm, &need));
    note_need(m, p, &need, &m->wkv_saved_bytes);
    return GT_OK;
}

static gt_status ask_branches(hy_model *m, const pass *p) {
    if (has_rwkv(m)) TRY(ask_norm(m, p, head_norm_of(m, 0, p)));
    if (has_mamba(m) && !is_mamba1(m)) TRY(ask_norm(m, p, mamba_norm_of(m, 0, p)));
    if (takes_wkv_ssm(m, p)) return ask_both(m, p);
    if (has_rwkv(m)) TRY(ask_wkv6(m, p));
    if (!has_mamba(m)) return GT_OK;
    return is_mamba1(m) ? ask_scan(m, p) : ask_ssd(m, p);
}

/* Asks all operators how much workspace they need in the pass p. */
static gt_status ask_workspace(hy_model *m, const pass *p) {
    hy_backend *be = m->be;
    gt_rmsnorm_linear_args head = head_of(m, p);
    gt_workspace need;
    TRY(ask_norm(m, p, norm_of(m, 0, p)));
    if (m->config.mix == HY_MIX_NORM) {
        gt_norm_mix_args mix = norm_mix_of(m, 0, p);
        TRY(be->norm_mix_workspace(be, &mix, &need));
        note_need(m, p, &need, NULL);
    }
    TRY(ask_branches(m, p));
    if (has_ffn(m)) {
        gt_rmsnorm_linear_args up = up_of(m, 0, p);
        TRY(be->rmsnorm_linear_workspace(be, &up, &need));
        note_need(m, p, &need, &m->up_saved_bytes);
    }
    TRY(be->rmsnorm_linear_workspace(be, &head, &need));
    note_need(m, p, &need, &m->logits_saved_bytes);
    return GT_OK;
}

static gt_status plan_memory(hy_model *m, hy_plan *plan) {
    char *const made_up = (char *)4096;
    pass train = training_pass(m), evaluate = evaluation_pass(m);
    pass prompt = decoding_pass(m, m->T), step = decoding_pass(m, 1);
    arena a = {made_up, 0};
    TRY(take_all(&a, m, plan)); /* comes first, since an operator's needs depend on which pointers are NULL */
    if (!m->config.inference) TRY(ask_workspace(m, &train));
    TRY(ask_workspace(m, &evaluate));
    TRY(ask_workspace(m, &prompt));
    TRY(ask_workspace(m, &step));
    a = (arena){made_up, 0};
    memset(plan, 0, sizeof *plan);
    TRY(take_all(&a, m, plan));
    for (int i = 0; i < m->param_count; i++) {
        plan->parameters += m->params[i].shown.count;
        plan->group[m->params[i].shown.group] += m->params[i].shown.count;
    }
    plan->non_embedding = plan->parameters - plan->group[HY_EMBED];
    return GT_OK;
}

/* Makes a model without memory of the backend. */
static gt_status make_model(hy_backend *be, const hy_config *config, int vocab, int B, int T, uint64_t seed,
                            hy_model **model) {
    hy_config c = *config;
    TRY(hy_config_resolve(&c));
    TRY(check_number("vocab", vocab, 1, 1 << 20));
    TRY(check_number("batch", B, 1, 1 << 20));
    TRY(check_number("seq", T, 1, 1 << 20));
    TRY(check_number("samples", c.samples, 1, B));
    hy_model *m = calloc(1, sizeof *m);
    if (!m) return hy_fail(GT_ERROR_MEMORY, "no memory for a model");
    m->be = be, m->config = c, m->seed = seed, m->loss_scale = 1, m->held = -1;
    m->V = vocab, m->B = B, m->T = T, m->M = (int64_t)B * T;
    m->C = c.hidden, m->L = c.layers, m->H = c.heads, m->N = m->C / m->H;
    m->I = c.expand * m->C, m->P = c.mamba_head, m->Hm = m->I / m->P;
    m->S = c.state, m->R = (m->C / 16 + 7) / 8 * 8, m->W = c.conv, m->F = c.ffn == HY_NO_FFN ? 0 : c.ffn * m->C;
    m->params = calloc((size_t)(m->L * LAYER_PARAMS + 3), sizeof *m->params);
    if (!m->params) {
        free(m);
        return hy_fail(GT_ERROR_MEMORY, "no memory for a model");
    }
    hy_params_add(m);
    *model = m;
    return GT_OK;
}

void hy_model_destroy(hy_model *m) {
    if (!m) return;
    if (m->memory) m->be->release(m->be, m->memory);
    free(m->params);
    free(m);
}

gt_status hy_model_plan(hy_backend *be, const hy_config *config, int vocab, int B, int T, hy_plan *plan) {
    hy_model *m = NULL;
    TRY(make_model(be, config, vocab, B, T, 0, &m));
    gt_status status = plan_memory(m, plan);
    hy_model_destroy(m);
    return status;
}

/* Writes the table of segments, and the control numbers that a model has before its first step. */
static gt_status write_tables(hy_model *m) {
    const hy_segments *s = &m->segments;
    double control[HY_CONTROLS] = {[HY_LOSS_SCALE] = 1};
    TRY(m->be->write(m->be, m->control, GT_F32, control, HY_CONTROLS));
    TRY(m->be->zero(m->be, m->norms, (HY_GROUPS + 1) * m->be->fp32_bytes));
    for (int i = 0; i <= m->param_count; i++) {
        int64_t start = i < m->param_count ? m->params[i].shown.offset : m->param_total;
        TRY(m->be->upload(m->be, (char *)s->start + i * sizeof start, &start, sizeof start));
    }
    for (int i = 0; i < m->param_count; i++) {
        int32_t group = m->params[i].shown.group;
        double decay = m->params[i].shown.decay;
        TRY(m->be->upload(m->be, (char *)s->group + i * sizeof group, &group, sizeof group));
        TRY(m->be->write(m->be, (char *)s->decay + i * m->be->fp32_bytes, GT_F32, &decay, 1));
    }
    return GT_OK;
}

gt_status hy_states_zero(const hy_model *m, const state_set *s) {
    int64_t LB = m->L * s->B;
    size_t fp32 = m->be->fp32_bytes;
    TRY(m->be->zero(m->be, s->wkv, (size_t)(LB * wkv_numbers(m)) * fp32));
    TRY(m->be->zero(m->be, s->ssd, (size_t)(LB * ssm_numbers(m)) * fp32));
    TRY(m->be->zero(m->be, s->conv, (size_t)(LB * conv_numbers(m)) * fp32));
    return m->be->zero(m->be, s->shift, (size_t)(LB * shift_numbers(m)) * fp32);
}

static gt_status clear_training(const hy_model *m) {
    const size_t numbers = (size_t)m->param_total * m->be->fp32_bytes;
    TRY(m->be->zero(m->be, m->grads, numbers)); /* the gaps between tensors stay zero */
    /* The rows of grad.in are padded, and libraries that read 16 bytes at a time also read the padding. */
    if (has_mamba(m)) TRY(m->be->zero(m->be, m->grad.in, (size_t)(m->M * in_row(m)) * act_bytes(m)));
    TRY(m->be->zero(m->be, m->m, numbers));
    return m->be->zero(m->be, m->v, numbers);
}

/* Allocates the memory of a planned model, and writes its tables and initial values. */
static gt_status fill_model(hy_model *m) {
    hy_plan plan;
    TRY(plan_memory(m, &plan));
    TRY(m->be->alloc(m->be, &m->memory, plan.total));
    arena a = {m->memory, 0};
    TRY(take_all(&a, m, &plan));
    TRY(m->be->scratch(m->be, &(hy_limits){m->M, widest(m), m->param_total}, m->scratch, &m->scratch_bytes));
    if (!m->config.inference) TRY(clear_training(m));
    TRY(write_tables(m));
    TRY(hy_params_init(m));
    if (m->config.stateful) TRY(hy_states_zero(m, &m->carried_out));
    return hy_states_zero(m, &m->decoding);
}

gt_status hy_model_create(hy_backend *be, const hy_config *config, int vocab, int B, int T, uint64_t seed,
                          hy_model **model) {
    hy_model *m = NULL;
    *model = NULL;
    TRY(make_model(be, config, vocab, B, T, seed, &m));
    gt_status status = fill_model(m);
    if (status != GT_OK) {
        hy_model_destroy(m);
        return status;
    }
    *model = m;
    return GT_OK;
}
