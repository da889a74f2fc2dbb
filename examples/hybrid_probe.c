/* Reads the results of a forward pass: every activation for comparisons, and measurements for the gates. */
#include "hybrid_inside.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- what forward computed ----------------------------------------------------------------- */

typedef struct activation {
    const char *name;
    const void *data;
    int64_t columns;
    gt_dtype dtype; /* 0 = the dtype of activations */
} activation;

/* Lists the activations of one layer in the order of their computation.  Returns their number. */
enum { LAYER_ACTIVATIONS = 16 };
static int layer_activations(const hy_model *m, int l, activation *list) {
    const layer_acts *a = &m->acts[l];
    int64_t C = m->C;
    const int rwkv = has_rwkv(m), ssd = has_mamba(m) && !is_mamba1(m), scan = has_mamba(m) && is_mamba1(m);
    const struct {
        int is_there;
        activation shown;
    } all[LAYER_ACTIVATIONS] = {
        {1, {"norm", a->norm, C, 0}},
        {rwkv, {"rwkv.offsets", a->offsets, MIXES * C, 0}},
        {rwkv, {"rwkv.mixed_wkvrg", a->mixed, MIXES * C, 0}},
        {rwkv, {"rwkv.decay", a->decay, C, GT_F32}},
        {rwkv, {"rwkv.kvrg", a->kvrg, PROJECTIONS * C, 0}},
        {rwkv, {"rwkv.wkv", a->wkv, C, 0}},
        {rwkv, {"rwkv.gated", a->wkv_gated, C, 0}},
        {scan, {"mamba.conv", a->conv, conv_rows(m), 0}},
        {scan, {"mamba.select", a->select, select_row(m), 0}},
        {scan, {"mamba.dt", a->dt, m->I, 0}},
        {ssd, {"mamba.ssd", a->ssd, m->I, 0}},
        {has_mamba(m), {"mamba.gated", a->ssd_gated, m->I, 0}},
        {1, {"branches", a->branches, branch_columns(m), 0}},
        {1, {"mix", a->middle, C, 0}},
        {has_ffn(m), {"ffn.up", a->up, m->F, 0}},
        {1, {"output", l + 1 < m->L ? m->acts[l + 1].x : m->x_last, C, 0}},
    };
    int count = 0;
    for (int i = 0; i < LAYER_ACTIVATIONS; i++)
        if (all[i].is_there) list[count++] = all[i].shown;
    return count;
}

static int layer_activation_count(const hy_model *m) {
    activation list[LAYER_ACTIVATIONS];
    return layer_activations(m, 0, list);
}

int hy_model_activation_count(const hy_model *m) { return (int)m->L * layer_activation_count(m) + 1; }

hy_activation hy_model_activation(const hy_model *m, int i) {
    activation list[LAYER_ACTIVATIONS], a = {"logits", m->logits, m->V, 0};
    hy_activation shown;
    const int count = layer_activations(m, 0, list), l = i / count;
    if (l < m->L) {
        layer_activations(m, l, list);
        a = list[i % count];
        snprintf(shown.name, sizeof shown.name, "layers.%d.%s", l, a.name);
    } else {
        snprintf(shown.name, sizeof shown.name, "%s", a.name);
    }
    shown.data = a.data;
    shown.count = m->M * a.columns;
    shown.dtype = a.dtype ? a.dtype : m->be->dtype;
    return shown;
}

gt_status hy_model_read_activation(hy_model *m, int i, double *numbers) {
    TRY(check_number("activation", i, 0, hy_model_activation_count(m) - 1));
    hy_activation a = hy_model_activation(m, i);
    if (i < hy_model_activation_count(m) - 1) TRY(hy_layer_restore(m, i / layer_activation_count(m)));
    return m->be->read(m->be, numbers, a.data, a.dtype, a.count);
}

/* ---- the probe ----------------------------------------------------------------------------- */

static gt_status new_numbers(double **x, int64_t n) {
    *x = malloc((size_t)n * sizeof **x);
    return *x ? GT_OK : hy_fail(GT_ERROR_MEMORY, "no memory for %lld numbers", (long long)n);
}

static double dot(const double *x, const double *y, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += x[i] * y[i];
    return sum;
}

/* Returns the cosine of the angle between x and y; 0 if one of them is zero. */
static double cosine(const double *x, const double *y, int64_t n) {
    double norms = sqrt(dot(x, x, n)) * sqrt(dot(y, y, n));
    return norms > 0 ? dot(x, y, n) / norms : 0;
}

static double variance(const double *x, int64_t n) {
    double mean = 0, sum = 0;
    for (int64_t i = 0; i < n; i++) mean += x[i] / (double)n;
    for (int64_t i = 0; i < n; i++) sum += (x[i] - mean) * (x[i] - mean);
    return sum / (double)n;
}

/* Measures layer l after the last forward pass.  x has room for 2 M C numbers. */
static gt_status probe_layer(const hy_model *m, int l, double *x, hy_probe *probe) {
    int64_t C = m->C, MC = m->M * C, row = branch_row(m);
    const double *a = x, *b = is_single(m) ? x : x + (row == C ? MC : C);
    double v, squares[2] = {0};
    TRY(m->be->read(m->be, x, l + 1 < m->L ? m->acts[l + 1].x : m->x_last, m->be->dtype, MC));
    v = variance(x, MC);
    if (!isfinite(v)) probe->finite = 0;
    if (l == 0 || v < probe->activation_variance) probe->activation_variance = v;
    TRY(m->be->read(m->be, x, m->acts[l].branches, m->be->dtype, m->M * branch_columns(m)));
    for (int64_t i = 0; i < m->M; i++, a += row, b += row) {
        if (has_rwkv(m)) squares[0] += dot(a, a, C);
        if (has_mamba(m)) squares[1] += dot(b, b, C);
        if (!is_single(m)) probe->branch_cosine += cosine(a, b, C) / (double)(m->M * m->L);
    }
    for (int k = 0; k < 2; k++) probe->branch_rms[k] += sqrt(squares[k] / (double)MC) / (double)m->L;
    return GT_OK;
}

/* Computes |x| / sqrt(n) for a part x of a parameter.  The parameter has rows of `row` elements; x is columns first
 * to first + C - 1 of all rows. */
static gt_status param_size(hy_model *m, int param, int64_t first, int64_t row, double *x, double n, double *size) {
    double sum = 0;
    TRY(hy_model_read(m, HY_VALUE, param, x));
    for (int64_t i = 0; i < m->params[param].shown.count; i += row) sum += dot(x + i + first, x + i + first, m->C);
    *size = sqrt(sum / n);
    return GT_OK;
}

/* Computes the gains that the mix of layer l gives to the branches.  x has room for 2 C C + M numbers. */
static gt_status layer_gains(hy_model *m, int l, double *x, double *gain) {
    const layer_params *p = &m->layer[l];
    const int64_t C = m->C;
    gain[0] = gain[1] = 0;
    switch (m->config.mix) {
    case HY_MIX_NORM:
        TRY(param_size(m, p->gain_a, 0, C, x, (double)C, gain));
        return param_size(m, p->gain_b, 0, C, x, (double)C, gain + 1);
    case HY_MIX_GATE:
        TRY(m->be->read(m->be, x, m->acts[l].gate, GT_F32, m->M));
        for (int64_t i = 0; i < m->M; i++) gain[0] += x[i] / (double)m->M;
        gain[1] = 1 - gain[0];
        return GT_OK;
    case HY_MIX_SCALAR:
        TRY(hy_model_read(m, HY_VALUE, p->gate_bias, gain));
        gain[1] = 1 - gain[0];
        return GT_OK;
    case HY_MIX_RESIDUAL: gain[0] = 1; return param_size(m, p->joint, 0, C, x, (double)C, gain + 1);
    case HY_MIX_CONCAT:
        TRY(param_size(m, p->joint, 0, 2 * C, x, (double)C, gain));
        return param_size(m, p->joint, C, 2 * C, x, (double)C, gain + 1);
    case HY_MIX_RWKV: gain[0] = 1; return GT_OK;
    case HY_MIX_MAMBA: gain[1] = 1; return GT_OK;
    }
    return GT_OK;
}

/* Measures all layers.  x has enough room for probe_layer and for layer_gains. */
static gt_status probe_layers(hy_model *m, double *x, hy_probe *probe) {
    for (int l = 0; l < m->L; l++) {
        double gain[2];
        TRY(hy_layer_restore(m, l));
        TRY(probe_layer(m, l, x, probe));
        TRY(layer_gains(m, l, x, gain));
        for (int k = 0; k < 2; k++) probe->branch_gain[k] += gain[k] / (double)m->L;
    }
    return GT_OK;
}

/* Reads the decoding states into x: first the wkv states of all layers, then their ssd states. */
static gt_status read_states(const hy_model *m, double *x) {
    const int64_t wkv = m->L * wkv_numbers(m), ssd = m->L * ssm_numbers(m);
    TRY(m->be->read(m->be, x, m->decoding.wkv, GT_F32, wkv));
    return m->be->read(m->be, x + wkv, m->decoding.ssd, GT_F32, ssd);
}

/* Measures the states after half of the window and after all of it.  `early` and `late` each have room for all
 * states. */
static gt_status probe_states(hy_model *m, const int32_t *tokens, double *early, double *late, double *logits,
                              hy_probe *probe) {
    int half = (int)(m->T + 1) / 2, rest = (int)m->T - half;
    const int64_t sizes[2] = {wkv_numbers(m), ssm_numbers(m)};
    TRY(hy_model_reset(m));
    TRY(hy_model_feed(m, tokens, half, logits));
    TRY(read_states(m, early));
    if (rest > 0) TRY(hy_model_feed(m, tokens + half, rest, logits));
    TRY(read_states(m, late));
    probe->state_tokens = rest;
    int64_t at = 0;
    for (int kind = 0; kind < 2; kind++)
        for (int l = 0; l < m->L && sizes[kind]; l++, at += sizes[kind]) {
            double c = cosine(early + at, late + at, sizes[kind]);
            double rms = sqrt(dot(late + at, late + at, sizes[kind]) / (double)sizes[kind]);
            if (l == 0 || c > probe->state_cosine[kind]) probe->state_cosine[kind] = c;
            if (l == 0 || rms < probe->state_rms[kind]) probe->state_rms[kind] = rms;
        }
    return GT_OK;
}

gt_status hy_model_probe(hy_model *m, const int32_t *tokens, const int32_t *targets, hy_probe *probe) {
    int64_t MC = m->M * m->C, states = m->L * (wkv_numbers(m) + ssm_numbers(m));
    int64_t room = 2 * MC > 2 * states ? 2 * MC : 2 * states;
    if (room < 2 * m->C * m->C) room = 2 * m->C * m->C;
    pass p = evaluation_pass(m);
    double *x, total[3];
    memset(probe, 0, sizeof *probe);
    probe->finite = 1;
    probe->has[0] = has_rwkv(m), probe->has[1] = has_mamba(m);
    TRY(check_number("samples", m->config.samples, 1, 1));
    TRY(hy_batch_upload(m, tokens, targets));
    m->trained.M = 0;
    TRY(hy_forward(m, &p));
    TRY(m->be->read(m->be, total, m->total, GT_F32, 3));
    probe->loss = total[1] > 0 ? total[0] / total[1] : 0;
    probe->entropy = total[1] > 0 ? total[2] / total[1] : 0;
    if (!isfinite(probe->loss)) probe->finite = 0;
    TRY(new_numbers(&x, room + m->V));
    gt_status status = probe_layers(m, x, probe);
    if (status == GT_OK) status = probe_states(m, tokens, x, x + states, x + room, probe);
    free(x);
    return status;
}
