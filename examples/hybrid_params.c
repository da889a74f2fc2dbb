/* Configurations, the list of parameters with their initial values, and the contents of a model file. */
#include "hybrid_inside.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const double matrix_gain = 0.5; /* weights start with a standard deviation (std) of 0.5 / sqrt(inputs) */
/* Root mean square of SiLU(g) in a new model, as measured.  There g is normal with a std of 0.4 to 0.5. */
static const double gate_rms = 0.22;

const char *const hy_group_names[HY_GROUPS] = {"embed", "norm", "rwkv", "mamba", "mix", "ffn"};

/* ---- configurations ------------------------------------------------------------------------ */

/* The arguments are: name, description, mix, initial weight of RWKV, channels, layers, RWKV heads, Mamba version. */
#define MODEL(a, b, c, d, e, f, g, h)                                                                                  \
    { .name = a, .about = b, .mix = c, .share = d, .hidden = e, .layers = f, .heads = g, .mamba = h }
static const hy_config configs[] = {
    MODEL("HY", "per-channel gains on the normalised branches", HY_MIX_NORM, 0.5f, 128, 8, 4, 2),
    MODEL("GF", "gated: one sigmoid gate per token", HY_MIX_GATE, 0.5f, 128, 8, 4, 2),
    MODEL("GF-RH", "GF that starts RWKV-heavy, gate 0.7", HY_MIX_GATE, 0.7f, 128, 8, 4, 2),
    MODEL("GF-MH", "GF that starts Mamba-heavy, gate 0.3", HY_MIX_GATE, 0.3f, 128, 8, 4, 2),
    MODEL("WS", "weighted sum: one number per layer", HY_MIX_SCALAR, 0.5f, 128, 8, 4, 2),
    MODEL("RF", "RWKV plus a projection of Mamba", HY_MIX_RESIDUAL, 0.5f, 128, 8, 4, 2),
    MODEL("CP", "projection of both, concatenated", HY_MIX_CONCAT, 0.5f, 128, 8, 4, 2),
    MODEL("1M", "HY, 64 wide, 4 layers", HY_MIX_NORM, 0.5f, 64, 4, 4, 2),
    MODEL("5M", "HY, 128 wide, 8 layers", HY_MIX_NORM, 0.5f, 128, 8, 4, 2),
    MODEL("8M", "GF-MH, 192 wide, 8 layers", HY_MIX_GATE, 0.3f, 192, 8, 6, 2),
    MODEL("HY-M1", "HY with Mamba-1 instead of Mamba-2", HY_MIX_NORM, 0.5f, 128, 8, 4, 1),
    MODEL("RWKV-6", "RWKV-6 alone", HY_MIX_RWKV, 0.5f, 128, 8, 4, 2),
    MODEL("Mamba-2", "Mamba-2 alone", HY_MIX_MAMBA, 0.5f, 128, 8, 4, 2),
    MODEL("Mamba-1", "Mamba-1 alone", HY_MIX_MAMBA, 0.5f, 128, 8, 4, 1),
};
#undef MODEL

const hy_config *hy_model_list(int *count) {
    *count = (int)(sizeof configs / sizeof configs[0]);
    return configs;
}

/* Fills in the default sizes of the Mamba branch and of the FFN, and checks these sizes. */
static gt_status resolve_mamba(hy_config *c) {
    if (!c->mamba) c->mamba = 2;
    TRY(check_number("mamba", c->mamba, 1, 2));
    if (!c->state) c->state = c->mamba == 1 ? 16 : 64;
    TRY(check_number("d-state", c->state, 8, 256));
    if (c->state % 8) return hy_fail(GT_ERROR_VALUE, "d-state = %d: must be a multiple of 8", c->state);
    if (!c->expand) c->expand = 2;
    TRY(check_number("expand", c->expand, 1, 8));
    const int inner = c->expand * c->hidden;
    if (!c->mamba_head) c->mamba_head = c->mamba == 1 ? 1 : inner % 64 == 0 ? 64 : inner % 32 == 0 ? 32 : 16;
    if (c->mamba == 1 && c->mamba_head != 1)
        return hy_fail(GT_ERROR_VALUE, "mamba-head = %d: Mamba-1 has no heads; leave it out", c->mamba_head);
    TRY(check_number("mamba-head", c->mamba_head, 1, 256));
    if (inner % c->mamba_head)
        return hy_fail(GT_ERROR_VALUE, "mamba-head = %d: must divide expand x hidden = %d", c->mamba_head, inner);
    if (!c->conv) c->conv = 4;
    TRY(check_number("d-conv", c->conv, 2, 4));
    if (!c->ffn) c->ffn = 4;
    return c->ffn == HY_NO_FFN ? GT_OK : check_number("ffn", c->ffn, 1, 16);
}

gt_status hy_config_resolve(hy_config *c) {
    TRY(check_number("hidden", c->hidden, 16, 1 << 16));
    if (c->hidden % 16) return hy_fail(GT_ERROR_VALUE, "hidden = %d: must be a multiple of 16", c->hidden);
    TRY(check_number("layers", c->layers, 1, HY_MAX_LAYERS));
    if (c->heads == 0) c->heads = c->hidden % 32 ? c->hidden / 16 : c->hidden / 32;
    TRY(check_number("heads", c->heads, 1, c->hidden));
    if (c->hidden % c->heads)
        return hy_fail(GT_ERROR_VALUE, "heads = %d: must divide hidden = %d", c->heads, c->hidden);
    if (c->hidden / c->heads > 256)
        return hy_fail(GT_ERROR_VALUE, "heads = %d: makes heads of %d channels; a head may have at most 256", c->heads,
                       c->hidden / c->heads);
    TRY(check_number("mix", c->mix, HY_MIX_NORM, HY_MIX_MAMBA));
    TRY(check_number("stateful", c->stateful, 0, 1));
    TRY(check_number("inference", c->inference, 0, 1));
    TRY(check_number("recompute", c->recompute, 0, 1));
    TRY(check_number("untied", c->untied, 0, 1));
    TRY(check_number("int8", c->int8, 0, 1));
    if (c->int8 && !c->inference)
        return hy_fail(GT_ERROR_VALUE, "int8 = 1: only a model for inference has int8 weights");
    if (!(c->dropout >= 0 && c->dropout < 1))
        return hy_fail(GT_ERROR_VALUE, "dropout = %g: must be at least 0 and below 1", (double)c->dropout);
    if (!c->samples) c->samples = 1;
    if (c->int8 && c->samples > HY_INT8_SAMPLES)
        return hy_fail(GT_ERROR_VALUE, "samples = %d: int8 weights decode at most %d at once", c->samples,
                       HY_INT8_SAMPLES);
    TRY(check_number("fuse", (int64_t)c->fuse, HY_WKV_SSM, HY_CONV_SSD));
    if (!(c->share > 0 && c->share < 1))
        return hy_fail(GT_ERROR_VALUE, "share = %g: must be between 0 and 1", c->share);
    return resolve_mamba(c);
}

/* ---- parameters ---------------------------------------------------------------------------- */

struct random_state {
    uint64_t state;
};

#define RANDOM_STEP 0x9e3779b97f4a7c15u

/* The random generator splitmix64.  A call adds RANDOM_STEP to the state, so any later number can be computed alone. */
static uint64_t random_next(random_state *r) {
    uint64_t z = r->state += RANDOM_STEP;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}
static double random_uniform(random_state *r) { /* a random number, uniform in (0,1) */
    return ((double)(random_next(r) >> 11) + 0.5) / 9007199254740992.0;
}
static double random_normal(random_state *r) {
    double radius = sqrt(-2 * log(random_uniform(r)));
    return radius * cos(6.283185307179586 * random_uniform(r));
}

static void init_constant(const hy_model *m, const param_info *p, random_state *r, double *x) {
    (void)m, (void)r;
    for (int64_t i = 0; i < p->shown.count; i++) x[i] = p->a;
}

static void init_normal(const hy_model *m, const param_info *p, random_state *r, double *x) {
    (void)m;
    const uint64_t first = r->state;
    /* the large parameters; each number takes two calls of random_next */
#pragma omp parallel for if (p->shown.count > 20000)
    for (int64_t i = 0; i < p->shown.count; i++) {
        random_state at = {first + 2 * (uint64_t)i * RANDOM_STEP};
        x[i] = p->a * random_normal(&at);
    }
    r->state = first + 2 * (uint64_t)p->shown.count * RANDOM_STEP;
}

static void init_uniform(const hy_model *m, const param_info *p, random_state *r, double *x) {
    (void)m;
    for (int64_t i = 0; i < p->shown.count; i++) x[i] = p->a + (p->b - p->a) * random_uniform(r);
}

/* The initial values of RWKV-6 depend on the layer.  `depth` rises from 0 in the first layer to 1 in the last;
 * `left` falls from 1 to 1/L. */
static double init_depth(const hy_model *m, const param_info *p) {
    return m->L > 1 ? (double)p->layer / (double)(m->L - 1) : 0;
}
static double init_left(const hy_model *m, const param_info *p) { return 1 - (double)p->layer / (double)m->L; }

/* Token-shift weights fall from 1 to 0 over the channels.  The parameter has the five rows w k v r g, or the single
 * row of mu_x. */
static void init_mu(const hy_model *m, const param_info *p, random_state *r, double *x) {
    static const double power[MIXES] = {1, 1, 1, 0.5, 0.5}, depth_share[MIXES] = {0, 0, 0.3, 0, 0};
    (void)r;
    for (int64_t i = 0; i < p->shown.count; i++) {
        int64_t row = i / m->C;
        double ramp = pow((double)(i % m->C) / (double)m->C, power[row] * init_left(m, p));
        x[i] = 1 - ramp - depth_share[row] * init_depth(m, p);
    }
}

/* The raw decay rises from -6 to -1 over the channels, so the decay per token falls from 0.998 to 0.69. */
static void init_decay(const hy_model *m, const param_info *p, random_state *r, double *x) {
    (void)r;
    for (int64_t i = 0; i < m->C; i++)
        x[i] = -6 + 5 * pow((double)i / (double)(m->C - 1), 0.7 + 1.3 * init_depth(m, p));
}

static void init_bonus(const hy_model *m, const param_info *p, random_state *r, double *x) {
    (void)r;
    for (int64_t i = 0; i < m->C; i++)
        x[i] = init_depth(m, p) * (1 - (double)i / (double)(m->C - 1)) + 0.1 * (double)((i + 1) % 3 - 1);
}

/* Makes softplus(dt_bias) log-uniform in [a, b]. */
static void init_dt_bias(const hy_model *m, const param_info *p, random_state *r, double *x) {
    (void)m;
    for (int64_t i = 0; i < p->shown.count; i++) {
        double dt = exp(log(p->a) + (log(p->b) - log(p->a)) * random_uniform(r));
        x[i] = dt + log(-expm1(-dt)); /* the inverse of softplus */
    }
}

/* Sets A_log to log A, with A uniform in [a, b]. */
static void init_A_log(const hy_model *m, const param_info *p, random_state *r, double *x) {
    (void)m;
    for (int64_t i = 0; i < p->shown.count; i++) x[i] = log(p->a + (p->b - p->a) * random_uniform(r));
}

/* Sets every row to log 1, log 2, ... log S. */
static void init_A_log_rows(const hy_model *m, const param_info *p, random_state *r, double *x) {
    (void)r;
    for (int64_t i = 0; i < p->shown.count; i++) x[i] = log((double)(i % m->S + 1));
}

/* Sets the projection of a mix to identity matrices side by side, multiplied by a and b. */
static void init_joint(const hy_model *m, const param_info *p, random_state *r, double *x) {
    int64_t columns = p->shown.shape[1];
    (void)r;
    for (int64_t i = 0; i < p->shown.count; i++) {
        int64_t row = i / columns, column = i % columns;
        x[i] = column % m->C == row ? (column < m->C ? p->a : p->b) : 0;
    }
}

/* Appends a parameter to the list.  Its shape ends at the first 0 of n0, n1, n2; layer = -1 means that it belongs to
 * no layer. */
static int add_param(hy_model *m, int layer, const char *name, int group, int decay, int64_t n0, int64_t n1, int64_t n2,
                     param_init *init, double a, double b) {
    param_info p = {.shown = {.group = group,
                              .decay = decay,
                              .rank = 1 + (n1 > 0) + (n2 > 0),
                              .shape = {n0, n1, n2},
                              .offset = m->param_total},
                    .init = init,
                    .a = a,
                    .b = b,
                    .layer = layer,
                    .int8_at = -1,
                    .scale_at = -1};
    p.shown.count = n0 * (n1 ? n1 : 1) * (n2 ? n2 : 1);
    if (layer < 0)
        snprintf(p.shown.name, sizeof p.shown.name, "%s", name);
    else
        snprintf(p.shown.name, sizeof p.shown.name, "layers.%d.%s", layer, name);
    m->params[m->param_count] = p;
    /* every tensor starts at a multiple of 64 elements, aligned for any dtype */
    m->param_total += (p.shown.count + 63) / 64 * 64;
    return m->param_count++;
}

/* Appends a projection, whose initial weights are normal with std gain / sqrt(inputs). */
static int add_matrix(hy_model *m, int layer, const char *name, int group, int64_t outputs, int64_t inputs,
                      double gain) {
    return add_param(m, layer, name, group, 1, outputs, inputs, 0, init_normal, gain / sqrt((double)inputs), 0);
}
static int add_vector(hy_model *m, int layer, const char *name, int group, int64_t n, double value) {
    return add_param(m, layer, name, group, 0, n, 0, 0, init_constant, value, 0);
}

/* Returns the initial head_gamma, the gain after RWKV's norm.  Both branches must start with outputs of the same
 * size, unless the mix normalises them.  Otherwise one branch hardly learns, since the gradient of an out-projection
 * grows with the rows that it reads.
 *
 * Mamba normalises after the gate, so its rows have I elements of mean square 1.  RWKV normalises before the gate,
 * so its rows have C elements of mean square gate_rms^2, the mean square of SiLU(g).  The sum of squares of an RWKV
 * row is a fortieth of the sum of a Mamba row.  head_gamma scales RWKV's rows up to the same sum of squares.  The
 * RWKV projection then starts with the std of Mamba's projection, and both outputs have the same size. */
static double first_head_gamma(const hy_model *m) {
    return m->config.mix == HY_MIX_NORM ? 1 : sqrt((double)m->I / (double)m->C) / gate_rms;
}
static double first_rwkv_out(const hy_model *m, double out_gain) {
    return m->config.mix == HY_MIX_NORM ? out_gain : out_gain * sqrt((double)m->C / (double)m->I);
}

static void add_rwkv_params(hy_model *m, int l, layer_params *p, double out_gain) {
    int64_t C = m->C;
    p->mu_x = add_param(m, l, "rwkv.mu_x", HY_RWKV, 0, C, 0, 0, init_mu, 0, 0);
    p->mu = add_param(m, l, "rwkv.mu_wkvrg", HY_RWKV, 0, MIXES, C, 0, init_mu, 0, 0);
    p->mix_down = add_matrix(m, l, "rwkv.mix_down", HY_RWKV, MIXES * MIX_RANK, C, 0);
    p->mix_up = add_param(m, l, "rwkv.mix_up", HY_RWKV, 1, MIXES, C, MIX_RANK, init_uniform, -0.01, 0.01);
    p->decay_base = add_param(m, l, "rwkv.decay_base", HY_RWKV, 0, C, 0, 0, init_decay, 0, 0);
    p->decay_down = add_matrix(m, l, "rwkv.decay_down", HY_RWKV, DECAY_RANK, C, 0);
    p->decay_up = add_param(m, l, "rwkv.decay_up", HY_RWKV, 1, C, DECAY_RANK, 0, init_uniform, -0.01, 0.01);
    p->bonus = add_param(m, l, "rwkv.bonus", HY_RWKV, 0, m->H, m->N, 0, init_bonus, 0, 0);
    p->projections = add_param(m, l, "rwkv.projections_kvrg", HY_RWKV, 1, PROJECTIONS, C, C, init_normal,
                               matrix_gain / sqrt((double)C), 0);
    p->head_gamma = add_vector(m, l, "rwkv.head_gamma", HY_RWKV, C, first_head_gamma(m));
    p->head_beta = add_vector(m, l, "rwkv.head_beta", HY_RWKV, C, 0);
    p->rwkv_out = add_matrix(m, l, "rwkv.out", HY_RWKV, C, C, first_rwkv_out(m, out_gain));
}

static void add_mamba_params(hy_model *m, int l, layer_params *p, double out_gain) {
    p->in = add_matrix(m, l, "mamba.in", HY_MAMBA, in_rows(m), m->C, matrix_gain);
    p->conv_weight = add_param(m, l, "mamba.conv_weight", HY_MAMBA, 0, conv_rows(m), m->W, 0, init_uniform, -0.5, 0.5);
    p->conv_bias = add_vector(m, l, "mamba.conv_bias", HY_MAMBA, conv_rows(m), 0);
    p->dt_bias = add_param(m, l, "mamba.dt_bias", HY_MAMBA, 0, m->Hm, 0, 0, init_dt_bias, 1e-3, 1e-1);
    if (is_mamba1(m)) {
        const double rank = 1 / sqrt((double)m->R);
        p->select = add_matrix(m, l, "mamba.select", HY_MAMBA, select_row(m), m->I, matrix_gain);
        p->dt = add_param(m, l, "mamba.dt", HY_MAMBA, 1, m->I, m->R, 0, init_uniform, -rank, rank);
        p->A_log = add_param(m, l, "mamba.A_log", HY_MAMBA, 0, m->I, m->S, 0, init_A_log_rows, 0, 0);
    } else {
        p->A_log = add_param(m, l, "mamba.A_log", HY_MAMBA, 0, m->Hm, 0, 0, init_A_log, 1, 16);
    }
    p->Dskip = add_vector(m, l, "mamba.Dskip", HY_MAMBA, m->Hm, 1);
    if (!is_mamba1(m)) p->mamba_norm = add_vector(m, l, "mamba.norm", HY_MAMBA, m->I, 1);
    p->mamba_out = add_matrix(m, l, "mamba.out", HY_MAMBA, m->C, m->I, out_gain);
}

static void add_mix_params(hy_model *m, int l, layer_params *p) {
    double share = m->config.share;
    p->gain_a = p->gain_b = p->gate_weight = p->gate_bias = p->joint = -1;
    switch (m->config.mix) {
    case HY_MIX_NORM:
        p->gain_a = add_vector(m, l, "mix.gain_rwkv", HY_MIXING, m->C, share);
        p->gain_b = add_vector(m, l, "mix.gain_mamba", HY_MIXING, m->C, 1 - share);
        break;
    case HY_MIX_GATE:
        p->gate_weight = add_param(m, l, "mix.gate_weight", HY_MIXING, 0, 2, m->C, 0, init_constant, 0, 0);
        p->gate_bias = add_vector(m, l, "mix.gate_bias", HY_MIXING, 1, log(share / (1 - share)));
        break;
    case HY_MIX_SCALAR: p->gate_bias = add_vector(m, l, "mix.alpha", HY_MIXING, 1, share); break;
    case HY_MIX_RESIDUAL:
        p->joint = add_param(m, l, "mix.projection", HY_MIXING, 1, m->C, m->C, 0, init_joint, 1, 1);
        break;
    case HY_MIX_CONCAT:
        p->joint = add_param(m, l, "mix.projection", HY_MIXING, 1, m->C, 2 * m->C, 0, init_joint, share, 1 - share);
        break;
    case HY_MIX_RWKV:
    case HY_MIX_MAMBA: break;
    }
}

/* Makes room for the int8 weights of a parameter.  Each tensor starts at a multiple of 64 bytes, as its weight does. */
static void add_int8(hy_model *m, int param) {
    param_info *p = &m->params[param];
    const int64_t inputs = p->shown.shape[p->shown.rank - 1];
    p->int8_at = m->int8_total, p->scale_at = m->scale_total;
    m->int8_total += (p->shown.count + 63) / 64 * 64;
    m->scale_total += (matrix_rows(m, param) + 63) / 64 * 64;
    if (m->plain_total < inputs) m->plain_total = inputs;
}

static void add_all_int8(hy_model *m) {
    for (int l = 0; l < m->L; l++) {
        const layer_params *p = &m->layer[l];
        if (has_rwkv(m)) add_int8(m, p->projections), add_int8(m, p->rwkv_out);
        if (has_mamba(m)) add_int8(m, p->in), add_int8(m, p->mamba_out);
        if (p->joint >= 0) add_int8(m, p->joint);
        if (has_ffn(m)) add_int8(m, p->up), add_int8(m, p->down);
    }
    add_int8(m, m->head);
}

void hy_params_add(hy_model *m) {
    /* the residual stream adds up 2L outputs of branches and FFNs, or L outputs without FFN */
    double out_gain = matrix_gain / sqrt((has_ffn(m) ? 2.0 : 1.0) * (double)m->L);
    m->embedding = add_param(m, -1, "embedding", HY_EMBED, 1, m->V, m->C, 0, init_normal, 0.02, 0);
    for (int l = 0; l < m->L; l++) {
        layer_params *p = &m->layer[l];
        p->norm = add_vector(m, l, "norm", HY_NORM, m->C, 1);
        if (has_rwkv(m)) add_rwkv_params(m, l, p, out_gain);
        if (has_mamba(m)) add_mamba_params(m, l, p, out_gain);
        add_mix_params(m, l, p);
        p->ffn_norm = p->up = p->down = -1;
        if (!has_ffn(m)) continue;
        p->ffn_norm = add_vector(m, l, "ffn.norm", HY_NORM, m->C, 1);
        p->up = add_matrix(m, l, "ffn.up", HY_FFN, m->F, m->C, matrix_gain);
        p->down = add_matrix(m, l, "ffn.down", HY_FFN, m->C, m->F, out_gain);
    }
    m->final_norm = add_vector(m, -1, "final_norm", HY_NORM, m->C, 1);
    m->head = m->embedding;
    if (m->config.untied) m->head = add_param(m, -1, "head", HY_EMBED, 1, m->V, m->C, 0, init_normal, 0.02, 0);
    if (m->config.int8) add_all_int8(m);
}

int hy_model_param_count(const hy_model *m) { return m->param_count; }
const hy_param *hy_model_param(const hy_model *m, int i) { return &m->params[i].shown; }

gt_status hy_params_round(hy_model *m) {
    m->has_int8 = 0;
    if (m->be->dtype == GT_F32) return GT_OK;
    hy_cast_args cast = {
        .n = m->param_total, .from_dtype = GT_F32, .to_dtype = m->be->dtype, .from = m->values, .to = m->copies};
    return m->be->cast(m->be, &cast);
}

gt_status hy_model_read(hy_model *m, hy_value what, int i, double *numbers) {
    TRY(check_number("parameter", i, 0, m->param_count - 1));
    if (what == HY_GRADIENT && m->config.inference)
        return hy_fail(GT_ERROR_UNSUPPORTED, "the model was made for inference: it has no gradients");
    int64_t n = m->params[i].shown.count;
    TRY(m->be->read(m->be, numbers, what == HY_VALUE ? value_of(m, i) : grad_of(m, i), GT_F32, n));
    for (int64_t k = 0; what == HY_GRADIENT && k < n; k++) numbers[k] /= m->loss_scale;
    return GT_OK;
}

gt_status hy_model_write(hy_model *m, int i, const double *numbers) {
    TRY(check_number("parameter", i, 0, m->param_count - 1));
    TRY(m->be->write(m->be, value_of(m, i), GT_F32, numbers, m->params[i].shown.count));
    return hy_params_round(m);
}

/* Rounds parameter i to int8.  `numbers` and `values` have room for the parameter and its scales, q for the parameter
 * alone. */
static gt_status quantise(hy_model *m, int i, double *numbers, float *values, int8_t *q) {
    const hy_param *p = &m->params[i].shown;
    const int64_t rows = matrix_rows(m, i), inputs = p->count / rows;
    double *scales = numbers + p->count;
    float *scale = values + p->count;
    TRY(m->be->read(m->be, numbers, value_of(m, i), GT_F32, p->count));
    for (int64_t k = 0; k < p->count; k++) values[k] = (float)numbers[k];
    const gt_status status = gt_quantize_int8(values, GT_F32, rows, inputs, q, scale);
    if (status != GT_OK) return hy_fail(status, "%s: %s", p->name, gt_last_error());
    for (int64_t k = 0; k < rows; k++) scales[k] = scale[k];
    for (int64_t k = 0; k < p->count; k++) numbers[k] = scales[k / inputs] * q[k];
    TRY(m->be->write(m->be, value_of(m, i), GT_F32, numbers, p->count));
    TRY(m->be->write(m->be, scale_of(m, i), GT_F32, scales, rows));
    if (int8_bytes(m) == 1) return m->be->upload(m->be, int8_of(m, i, 0), q, (size_t)p->count);
    for (int64_t k = 0; k < p->count; k++) numbers[k] = q[k];
    return m->be->write(m->be, int8_of(m, i, 0), GT_F32, numbers, p->count);
}

gt_status hy_model_quantise(hy_model *m) {
    int64_t most = 0;
    if (!m->config.int8) return hy_fail(GT_ERROR_UNSUPPORTED, "the model was made without room for int8 weights");
    for (int i = 0; i < m->param_count; i++)
        if (m->params[i].int8_at >= 0 && most < m->params[i].shown.count) most = m->params[i].shown.count;
    double *numbers = malloc(2 * (size_t)most * sizeof *numbers);
    float *values = malloc(2 * (size_t)most * sizeof *values);
    int8_t *q = malloc((size_t)most);
    gt_status status = numbers && values && q
                           ? GT_OK
                           : hy_fail(GT_ERROR_MEMORY, "no memory to round %lld weights to int8", (long long)most);
    for (int i = 0; i < m->param_count && status == GT_OK; i++)
        if (m->params[i].int8_at >= 0) status = quantise(m, i, numbers, values, q);
    for (int64_t i = 0; i < m->plain_total && status == GT_OK; i++) numbers[i] = HY_PLAIN_GAMMA;
    if (status == GT_OK) status = m->be->write(m->be, m->plain_gamma, GT_F32, numbers, m->plain_total);
    free(numbers);
    free(values);
    free(q);
    TRY(status);
    TRY(hy_params_round(m));
    m->has_int8 = 1;
    return GT_OK;
}

/* Initialises all parameters.  The random numbers of a parameter depend only on the seed and on the parameter's
 * name. */
gt_status hy_params_init(hy_model *m) {
    TRY(m->be->zero(m->be, m->values, (size_t)m->param_total * m->be->fp32_bytes));
    for (int i = 0; i < m->param_count; i++) {
        const param_info *p = &m->params[i];
        random_state r = {m->seed};
        for (const char *c = p->shown.name; *c; c++) r.state = random_next(&r) ^ (uint64_t)*c;
        double *numbers = malloc((size_t)p->shown.count * sizeof *numbers);
        if (!numbers) return hy_fail(GT_ERROR_MEMORY, "no memory to initialise %s", p->shown.name);
        p->init(m, p, &r, numbers);
        gt_status status = m->be->write(m->be, value_of(m, i), GT_F32, numbers, p->shown.count);
        free(numbers);
        TRY(status);
    }
    return hy_model_written(m);
}

/* ---- the contents of a model file ------------------------------------------------------------ */

/* Parameters that a model file stores as several tensors.  The file cuts the first dimension of such a parameter
 * into `count` equal slices.  `parts` has the last part of each tensor's name, in the order of the slices. */
enum { PARTS = MIXES };
static const struct split {
    const char *param;
    int count;
    const char *parts[PARTS];
} splits[] = {
    {"rwkv.mu_wkvrg", MIXES, {"rwkv.mu_w", "rwkv.mu_k", "rwkv.mu_v", "rwkv.mu_r", "rwkv.mu_g"}},
    {"rwkv.mix_down",
     MIXES,
     {"rwkv.mix_down_w", "rwkv.mix_down_k", "rwkv.mix_down_v", "rwkv.mix_down_r", "rwkv.mix_down_g"}},
    {"rwkv.mix_up", MIXES, {"rwkv.mix_up_w", "rwkv.mix_up_k", "rwkv.mix_up_v", "rwkv.mix_up_r", "rwkv.mix_up_g"}},
    {"rwkv.projections_kvrg", PROJECTIONS, {"rwkv.key", "rwkv.value", "rwkv.receptance", "rwkv.gate"}},
    {"mix.gate_weight", 2, {"mix.gate_rwkv", "mix.gate_mamba"}},
};

static const struct split *split_of(const param_info *p) {
    const char *name = p->shown.name;
    if (p->layer < 0) return NULL;
    name = strchr(strchr(name, '.') + 1, '.') + 1; /* skips "layers.0." */
    for (size_t i = 0; i < sizeof splits / sizeof splits[0]; i++)
        if (!strcmp(name, splits[i].param)) return &splits[i];
    return NULL;
}

/* Appends the tensors of a parameter to the list.  `array` holds the elements of all parameters: their weights,
 * moments or averages. */
static void list_param(const hy_model *m, const param_info *p, hy_kind kind, const char *prefix, float *array,
                       hy_tensor *list, int *count) {
    const struct split *split = split_of(p);
    int parts = split ? split->count : 1;
    for (int part = 0; part < parts; part++) {
        hy_tensor *t = &list[(*count)++];
        *t = (hy_tensor){.kind = kind, .rank = p->shown.rank, .count = p->shown.count / parts};
        memcpy(t->shape, p->shown.shape, sizeof p->shown.shape);
        t->shape[0] /= parts;
        if (split && t->shape[0] == 1) memmove(t->shape, t->shape + 1, --t->rank * sizeof *t->shape);
        t->data = fp32_at(m, array, p->shown.offset + part * t->count);
        if (split)
            snprintf(t->name, sizeof t->name, "%slayers.%d.%s", prefix, p->layer, split->parts[part]);
        else
            snprintf(t->name, sizeof t->name, "%s%s", prefix, p->shown.name);
    }
}

static void list_state(const char *name, int l, float *data, int64_t n0, int64_t n1, int64_t n2, int64_t n3,
                       hy_tensor *list, int *count) {
    hy_tensor *t = &list[(*count)++];
    *t = (hy_tensor){.kind = HY_STATE, .rank = 2 + (n2 > 0) + (n3 > 0), .shape = {n0, n1, n2, n3}};
    t->count = n0 * n1 * (n2 ? n2 : 1) * (n3 ? n3 : 1);
    t->data = data;
    snprintf(t->name, sizeof t->name, "state.layers.%d.%s", l, name);
}

hy_tensor *hy_model_tensors(const hy_model *m, int *count) {
    const state_set *s = &m->carried_out;
    hy_tensor *list = malloc((size_t)(4 * PARTS * (int64_t)m->param_count + 4 * m->L) * sizeof(hy_tensor));
    *count = 0;
    if (!list) return NULL;
    for (int i = 0; i < m->param_count; i++) list_param(m, m->params + i, HY_WEIGHT, "", m->values, list, count);
    for (int i = 0; i < m->param_count && !m->config.inference; i++)
        list_param(m, m->params + i, HY_MOMENT, "optimizer.exp_avg.", m->m, list, count);
    for (int i = 0; i < m->param_count && !m->config.inference; i++)
        list_param(m, m->params + i, HY_MOMENT, "optimizer.exp_avg_sq.", m->v, list, count);
    for (int i = 0; i < m->param_count && m->average && !m->config.inference; i++)
        list_param(m, m->params + i, HY_AVERAGE, "ema.", m->average, list, count);
    for (int l = 0; m->config.stateful && l < m->L; l++) {
        if (has_rwkv(m)) {
            list_state("rwkv.wkv", l, wkv_state(m, s, l), m->B, m->H, m->N, m->N, list, count);
            list_state("rwkv.shift", l, shift_state(m, s, l), m->B, m->C, 0, 0, list, count);
        }
        if (has_mamba(m) && is_mamba1(m))
            list_state("mamba.scan", l, ssd_state(m, s, l), m->B, m->I, m->S, 0, list, count);
        else if (has_mamba(m))
            list_state("mamba.ssd", l, ssd_state(m, s, l), m->B, m->Hm, m->P, m->S, list, count);
        if (has_mamba(m))
            list_state("mamba.conv", l, conv_state(m, s, l), m->B, conv_rows(m), m->W - 1, 0, list, count);
    }
    return list;
}

gt_status hy_model_read_tensor(hy_model *m, const hy_tensor *t, double *numbers) {
    return m->be->read(m->be, numbers, t->data, GT_F32, t->count);
}

gt_status hy_model_write_tensor(hy_model *m, const hy_tensor *t, const double *numbers) {
    return m->be->write(m->be, t->data, GT_F32, numbers, t->count);
}

gt_status hy_model_written(hy_model *m) {
    const size_t bytes = (size_t)m->param_total * m->be->fp32_bytes;
    if (m->average && !m->config.inference) TRY(m->be->copy(m->be, m->average, m->values, bytes));
    return hy_params_round(m);
}
