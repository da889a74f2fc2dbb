/* The model of hybrid_model.h, as calls of a hy_backend.
 *
 * Order: configurations; the list of parameters and their initial values; the layout of memory; one
 * function per operator that fills its argument struct, which forward and backward share; forward;
 * backward; the optimiser; decoding; the probe. */
#include "hybrid_model.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        gt_status status_ = (call);                                                                                    \
        if (status_ != GT_OK) return status_;                                                                          \
    } while (0)

/* Sizes that the two papers' models share, whatever the width. */
enum {
    MIX_RANK = 32,  /* of the five data-dependent lerps */
    DECAY_RANK = 64 /* of the decay */
};
enum { MIXES = 5 }; /* what the token shift feeds: w, then k v r g */
enum { KEY, VALUE, RECEPTANCE, GATE, PROJECTIONS };
static const double matrix_gain = 0.5; /* weights start with std 0.5 / sqrt(inputs) */
/* Root mean square of SiLU(g) as it starts, measured: g is normal with a std of 0.4 to 0.5. */
static const double gate_rms = 0.22;
static const float model_eps = 1e-5f;
static const float head_norm_eps = 64e-5f; /* as RWKV-6: 1e-5 times 8^2 */

const char *const hy_group_names[HY_GROUPS] = {"embed", "norm", "rwkv", "mamba", "mix", "ffn"};

/* ---- configurations ------------------------------------------------------------------------ */

/* NAME, what it is, mix, initial weight of RWKV, channels, layers, RWKV heads, which Mamba */
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
    MODEL("HY-M1", "HY with Mamba-1 in the place of Mamba-2", HY_MIX_NORM, 0.5f, 128, 8, 4, 1),
    MODEL("RWKV-6", "RWKV-6 alone", HY_MIX_RWKV, 0.5f, 128, 8, 4, 2),
    MODEL("Mamba-2", "Mamba-2 alone", HY_MIX_MAMBA, 0.5f, 128, 8, 4, 2),
    MODEL("Mamba-1", "Mamba-1 alone", HY_MIX_MAMBA, 0.5f, 128, 8, 4, 1),
};
#undef MODEL

const hy_config *hy_model_list(int *count) {
    *count = (int)(sizeof configs / sizeof configs[0]);
    return configs;
}

static gt_status check_number(const char *name, int64_t value, int64_t min, int64_t max) {
    if (value >= min && value <= max) return GT_OK;
    return hy_fail(GT_ERROR_VALUE, "%s = %lld: must be %lld to %lld", name, (long long)value, (long long)min,
                   (long long)max);
}

/* Sizes of the Mamba branch and of the FFN. */
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
        return hy_fail(GT_ERROR_VALUE, "mamba-head = %d: Mamba-1 has a state per channel, no heads", c->mamba_head);
    TRY(check_number("mamba-head", c->mamba_head, 1, 256));
    if (inner % c->mamba_head)
        return hy_fail(GT_ERROR_VALUE, "mamba-head = %d: must divide expand x hidden = %d", c->mamba_head, inner);
    if (!c->conv) c->conv = 4;
    TRY(check_number("d-conv", c->conv, 2, 4));
    if (!c->ffn) c->ffn = 4;
    return check_number("ffn", c->ffn, 1, 16);
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
        return hy_fail(GT_ERROR_VALUE, "heads = %d: heads of %d channels; at most 256 are possible", c->heads,
                       c->hidden / c->heads);
    TRY(check_number("mix", c->mix, HY_MIX_NORM, HY_MIX_MAMBA));
    TRY(check_number("stateful", c->stateful, 0, 1));
    TRY(check_number("inference", c->inference, 0, 1));
    if (!(c->share > 0 && c->share < 1))
        return hy_fail(GT_ERROR_VALUE, "share = %g: must be between 0 and 1", c->share);
    return resolve_mamba(c);
}

/* ---- the model ----------------------------------------------------------------------------- */

/* Indices of a layer's parameters; -1 where the variant has none. */
typedef struct layer_params {
    int norm;                                          /* [C] */
    int mu_x, mu;                                      /* [C] [5,C] */
    int mix_down, mix_up;                              /* [5*32,C] [5,C,32] */
    int decay_base, decay_down, decay_up;              /* [C] [64,C] [C,64] */
    int bonus, projections;                            /* [C] [4,C,C]: k v r g */
    int head_gamma, head_beta, rwkv_out;               /* [C] [C] [C,C] */
    int in, conv_weight, conv_bias;                    /* [2I+2S+Hm,C] [I+2S,W] [I+2S] */
    int dt_bias, A_log, Dskip, mamba_norm, mamba_out;  /* [Hm] [Hm] [Hm] [I] [C,I] */
    int select, dt;                                    /* Mamba-1: [2S+R,I] [I,R], and in [2I,C], conv_... [I,W] [I],
                                                          dt_bias [I], A_log [I,S], Dskip [I], no norm */
    int gain_a, gain_b, gate_weight, gate_bias, joint; /* [C] [C] [2,C] [1] [C,C] or [C,2C] */
    int ffn_norm, up, down;                            /* [C] [F,C] [C,F] */
} layer_params;
enum { LAYER_PARAMS = sizeof(layer_params) / sizeof(int) };

/* What forward keeps of one layer.  M rows; activations unless said otherwise. */
typedef struct layer_acts {
    void *x;               /* [M,C] what enters the layer */
    void *norm;            /* [M,C] */
    void *shifted;         /* [M,C] input of the lerps' low-rank pair, whose inner ... */
    void *lora;            /* [M,5*32] ... and outer values are */
    void *offsets;         /* [5,M,C] */
    void *mixed;           /* [5,M,C] the five lerps: w, k, v, r, g */
    void *decay_lora;      /* [M,64] */
    float *decay;          /* [M,C] raw decay, fp32 */
    void *kvrg;            /* [4,M,C] */
    void *wkv, *wkv_gated; /* [M,C] */
    void *in;              /* [M,2I+2S+Hm]: z, x, B, C, dt; rows of in_row.  Mamba-1: [M,2I]: z, x */
    float *A;              /* [Hm]; Mamba-1: [I,S] */
    void *conv;            /* [M,I+2S]: x, B, C; Mamba-1: [M,I]: x */
    void *select, *dt;     /* Mamba-1: [M,2S+R]: B, C, and what dt is made from; [M,I] */
    void *ssd, *ssd_gated; /* [M,I]; Mamba-1 has the latter alone */
    void *branches;        /* a and b, see branch_b */
    float *gate;           /* [M] */
    void *middle;          /* [M,C] after the mix */
    void *up, *act;        /* [M,F] */
    void *wkv_saved, *ssd_saved, *up_saved;
} layer_acts;

/* Gradients of activations, for one layer at a time. */
typedef struct grad_acts {
    void *x, *part;        /* [M,C] of the residual stream; of one contribution to it */
    void *branches, *norm; /* as in layer_acts */
    void *act;             /* [M,F] */
    void *wkv_gated, *wkv; /* [M,C] */
    void *kvrg;            /* [4,M,C] */
    float *decay;          /* [M,C] fp32 */
    void *decay_cast;      /* [M,C] the same as an activation */
    void *decay_lora;      /* [M,64] */
    void *mixed, *offsets; /* [5,M,C] */
    void *lora, *shifted;  /* [M,5*32] [M,C] */
    void *ssd_gated, *ssd; /* [M,I] */
    void *conv, *in;       /* as in layer_acts */
    void *select, *dt;
    float *A;
} grad_acts;

/* Recurrent states of B sequences, all layers; fp32. */
typedef struct state_set {
    int64_t B;
    float *wkv;   /* [L,B,H,N,N] */
    float *ssd;   /* [L,B,Hm,P,S]; Mamba-1: [L,B,I,S] */
    float *conv;  /* [L,B,conv_rows,W-1] */
    float *shift; /* [L,B,C] */
} state_set;

/* How the layers are run. */
typedef struct pass {
    int64_t B, T, M;           /* M = B T */
    const state_set *in, *out; /* NULL = from zero, and not wanted */
    int keep_saved;            /* 1: a backward pass follows */
    int step;                  /* 1: one token, states updated in place */
} pass;

typedef struct param_info param_info;

struct hy_model {
    hy_backend *be;
    hy_config config;
    int64_t V, B, T, M; /* vocabulary; batch as planned */
    int64_t C, L, H, N; /* hidden, layers, RWKV heads and their size */
    int64_t I, Hm, P;   /* Mamba inner width, heads and their size */
    int64_t S, R, W;    /* Mamba state size; Mamba-1: rank of dt; width of the convolution */
    int64_t F;          /* width of the FFN */
    uint64_t seed;

    param_info *params;
    int param_count;
    int64_t param_total;
    int embedding, final_norm;
    layer_params layer[HY_MAX_LAYERS];

    void *memory;                  /* all of the following, of the backend */
    float *values, *grads, *m, *v; /* [param_total] */
    void *copies;                  /* [param_total] 16-bit weights; fp32: none */
    hy_segments segments;
    float *control, *norms, *total;   /* [HY_CONTROLS] [HY_GROUPS+1] [3] */
    double *partial;                  /* [param_count] */
    int32_t *tokens, *targets, *keep; /* [M] [M] [B] */
    layer_acts acts[HY_MAX_LAYERS];
    void *x_last, *logits; /* [M,C] [M,V] */
    void *logits_saved;
    float *lse, *loss, *entropy; /* [M] */
    grad_acts grad;
    state_set carried_in, carried_out, decoding;
    void *workspace;
    size_t workspace_bytes;
    size_t wkv_saved_bytes, ssd_saved_bytes, up_saved_bytes, logits_saved_bytes;
    void *scratch; /* the backend's own */
    size_t scratch_bytes;

    pass trained;   /* forward whose backward is still to come; M = 0: none */
    int accumulate; /* of that backward */
    float loss_scale;
    int64_t steps;
    int judged;                                   /* 1: hy_model_result has seen the last step */
    enum { UNTOUCHED, TOUCHED, UNKNOWN } weights; /* since then */
};

const hy_config *hy_model_config(const hy_model *m) { return &m->config; }

static int has_rwkv(const hy_model *m) { return m->config.mix != HY_MIX_MAMBA; }
static int has_mamba(const hy_model *m) { return m->config.mix != HY_MIX_RWKV; }
static int is_mamba1(const hy_model *m) { return m->config.mamba == 1; }
static int is_single(const hy_model *m) { return !has_rwkv(m) || !has_mamba(m); }

static int64_t in_rows(const hy_model *m) { return 2 * m->I + (is_mamba1(m) ? 0 : 2 * m->S + m->Hm); }
/* Their length in memory: padded, so that each begins at a multiple of 16 bytes. */
static int64_t in_row(const hy_model *m) { return (in_rows(m) + 7) / 8 * 8; }
static int64_t conv_rows(const hy_model *m) { return m->I + (is_mamba1(m) ? 0 : 2 * m->S); }
static int64_t select_row(const hy_model *m) { return 2 * m->S + m->R; }
/* A and its logarithm. */
static int64_t A_numbers(const hy_model *m) { return is_mamba1(m) ? m->I * m->S : m->Hm; }

/* Numbers of a sequence's states in one layer. */
static int64_t wkv_numbers(const hy_model *m) { return has_rwkv(m) ? m->H * m->N * m->N : 0; }
static int64_t ssm_numbers(const hy_model *m) { return has_mamba(m) ? m->I * m->S : 0; }
static int64_t conv_numbers(const hy_model *m) { return has_mamba(m) ? conv_rows(m) * (m->W - 1) : 0; }
static int64_t shift_numbers(const hy_model *m) { return has_rwkv(m) ? m->C : 0; }

static size_t act_bytes(const hy_model *m) { return m->be->dtype == GT_F32 ? m->be->fp32_bytes : 2; }

/* Element `i` of an array of activations or of fp32 numbers. */
static void *act_at(const hy_model *m, void *acts, int64_t i) { return (char *)acts + i * (int64_t)act_bytes(m); }
static float *fp32_at(const hy_model *m, float *numbers, int64_t i) {
    return (float *)(void *)((char *)numbers + i * (int64_t)m->be->fp32_bytes);
}

/* The two branch outputs lie side by side in rows of 2C where one projection reads both, else one
 * after the other.  A branch alone has them for itself. */
static int64_t branch_row(const hy_model *m) { return m->config.mix == HY_MIX_CONCAT ? 2 * m->C : m->C; }
static void *branch_b(const hy_model *m, const pass *p, void *branches) {
    if (!has_rwkv(m)) return branches;
    return act_at(m, branches, m->config.mix == HY_MIX_CONCAT ? m->C : p->M * m->C);
}
static int64_t branch_columns(const hy_model *m) { return is_single(m) ? m->C : 2 * m->C; }

/* ---- parameters ---------------------------------------------------------------------------- */

typedef struct random_state {
    uint64_t state;
} random_state;

/* splitmix64 */
static uint64_t random_next(random_state *r) {
    uint64_t z = r->state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}
static double random_uniform(random_state *r) { /* in (0,1) */
    return ((double)(random_next(r) >> 11) + 0.5) / 9007199254740992.0;
}
static double random_normal(random_state *r) {
    double radius = sqrt(-2 * log(random_uniform(r)));
    return radius * cos(6.283185307179586 * random_uniform(r));
}

/* Initial values of one parameter. */
typedef void param_init(const hy_model *m, const param_info *p, random_state *r, double *x);
struct param_info {
    hy_param shown;
    param_init *init;
    double a, b; /* of init */
    int layer;
};

static void init_constant(const hy_model *m, const param_info *p, random_state *r, double *x) {
    (void)m, (void)r;
    for (int64_t i = 0; i < p->shown.count; i++) x[i] = p->a;
}

static void init_normal(const hy_model *m, const param_info *p, random_state *r, double *x) {
    (void)m;
    for (int64_t i = 0; i < p->shown.count; i++) x[i] = p->a * random_normal(r);
}

static void init_uniform(const hy_model *m, const param_info *p, random_state *r, double *x) {
    (void)m;
    for (int64_t i = 0; i < p->shown.count; i++) x[i] = p->a + (p->b - p->a) * random_uniform(r);
}

/* The RWKV-6 initialisation depends on depth: `depth` runs from 0 in the first layer to 1 in the
 * last, `left` from 1 down to 1/L. */
static double init_depth(const hy_model *m, const param_info *p) {
    return m->L > 1 ? (double)p->layer / (double)(m->L - 1) : 0;
}
static double init_left(const hy_model *m, const param_info *p) { return 1 - (double)p->layer / (double)m->L; }

/* Token-shift weights ramp from 1 to 0 over the channels: rows w k v r g, or x alone. */
static void init_mu(const hy_model *m, const param_info *p, random_state *r, double *x) {
    static const double power[MIXES] = {1, 1, 1, 0.5, 0.5}, depth_share[MIXES] = {0, 0, 0.3, 0, 0};
    (void)r;
    for (int64_t i = 0; i < p->shown.count; i++) {
        int64_t row = i / m->C;
        double ramp = pow((double)(i % m->C) / (double)m->C, power[row] * init_left(m, p));
        x[i] = 1 - ramp - depth_share[row] * init_depth(m, p);
    }
}

/* -6 to -1 over the channels: decays from 0.998 to 0.69 per token */
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

/* softplus(dt_bias) log-uniform in [a, b] */
static void init_dt_bias(const hy_model *m, const param_info *p, random_state *r, double *x) {
    (void)m;
    for (int64_t i = 0; i < p->shown.count; i++) {
        double dt = exp(log(p->a) + (log(p->b) - log(p->a)) * random_uniform(r));
        x[i] = dt + log(-expm1(-dt)); /* the inverse of softplus */
    }
}

/* log A, A uniform in [a, b] */
static void init_A_log(const hy_model *m, const param_info *p, random_state *r, double *x) {
    (void)m;
    for (int64_t i = 0; i < p->shown.count; i++) x[i] = log(p->a + (p->b - p->a) * random_uniform(r));
}

/* log 1 to log S in every row */
static void init_A_log_rows(const hy_model *m, const param_info *p, random_state *r, double *x) {
    (void)r;
    for (int64_t i = 0; i < p->shown.count; i++) x[i] = log((double)(i % m->S + 1));
}

/* Identity blocks side by side, times a and b. */
static void init_joint(const hy_model *m, const param_info *p, random_state *r, double *x) {
    int64_t columns = p->shown.shape[1];
    (void)r;
    for (int64_t i = 0; i < p->shown.count; i++) {
        int64_t row = i / columns, column = i % columns;
        x[i] = column % m->C == row ? (column < m->C ? p->a : p->b) : 0;
    }
}

/* Appends a parameter; shape ends at the first 0.  layer -1: not in a layer. */
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
                    .layer = layer};
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

/* A projection: normal with std gain / sqrt(inputs). */
static int add_matrix(hy_model *m, int layer, const char *name, int group, int64_t outputs, int64_t inputs,
                      double gain) {
    return add_param(m, layer, name, group, 1, outputs, inputs, 0, init_normal, gain / sqrt((double)inputs), 0);
}
static int add_vector(hy_model *m, int layer, const char *name, int group, int64_t n, double value) {
    return add_param(m, layer, name, group, 0, n, 0, 0, init_constant, value, 0);
}

/* Where the mix does not normalise the branches, both have to start alike, or one hardly learns:
 * the gradient of an out-projection grows with the rows that it reads.  Mamba's are normalised
 * behind the gate, I numbers of mean square 1; RWKV's before it, so that SiLU(g) leaves C numbers of
 * mean square gate_rms^2, a fortieth of the square sum.  head_gamma makes up for that.  With as many
 * inputs in effect the projection starts as Mamba's, and gives as large an output. */
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

static void add_all_params(hy_model *m) {
    double out_gain = matrix_gain / sqrt(2.0 * (double)m->L); /* 2L outputs add up in the stream */
    m->embedding = add_param(m, -1, "embedding", HY_EMBED, 1, m->V, m->C, 0, init_normal, 0.02, 0);
    for (int l = 0; l < m->L; l++) {
        layer_params *p = &m->layer[l];
        p->norm = add_vector(m, l, "norm", HY_NORM, m->C, 1);
        if (has_rwkv(m)) add_rwkv_params(m, l, p, out_gain);
        if (has_mamba(m)) add_mamba_params(m, l, p, out_gain);
        add_mix_params(m, l, p);
        p->ffn_norm = add_vector(m, l, "ffn.norm", HY_NORM, m->C, 1);
        p->up = add_matrix(m, l, "ffn.up", HY_FFN, m->F, m->C, matrix_gain);
        p->down = add_matrix(m, l, "ffn.down", HY_FFN, m->C, m->F, out_gain);
    }
    m->final_norm = add_vector(m, -1, "final_norm", HY_NORM, m->C, 1);
}

int hy_model_param_count(const hy_model *m) { return m->param_count; }
const hy_param *hy_model_param(const hy_model *m, int i) { return &m->params[i].shown; }

static float *value_of(const hy_model *m, int param) { return fp32_at(m, m->values, m->params[param].shown.offset); }
static float *grad_of(const hy_model *m, int param) { return fp32_at(m, m->grads, m->params[param].shown.offset); }
/* A projection weight, in the dtype of the activations. */
static void *weight_of(const hy_model *m, int param) {
    if (m->be->dtype == GT_F32) return value_of(m, param);
    return act_at(m, m->copies, m->params[param].shown.offset);
}

/* Rounds the fp32 parameters to the copies that the projections read. */
static gt_status refresh_copies(hy_model *m) {
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
    return refresh_copies(m);
}

/* A parameter's random numbers depend on the seed and its name alone. */
static gt_status init_params(hy_model *m) {
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
    return refresh_copies(m);
}

/* struct fields in the order of the headers, several to a line */
/* clang-format off */

/* ---- the operators' arguments -----------------------------------------------------------------
 * One function per operator fills in what forward, backward and step read. */

/* A plain projection y = x weight^T, or `count` of them at equal steps. */
typedef struct linear {
    int64_t inputs, outputs;
    int weight;               /* parameter [count,outputs,inputs] */
    const void *x;
    int64_t x_row;            /* elements from row to row, 0 = packed */
    void *y;
    int64_t y_row;
    gt_dtype y_dtype;         /* 0 = of the activations */
    int64_t count, x_step, y_step;
} linear;

static linear mix_down_of(const hy_model *m, int l) {
    return (linear){.inputs = m->C, .outputs = MIXES * MIX_RANK, .weight = m->layer[l].mix_down,
                    .x = m->acts[l].shifted, .y = m->acts[l].lora};
}
static linear mix_up_of(const hy_model *m, int l, const pass *p) {
    return (linear){.inputs = MIX_RANK, .outputs = m->C, .weight = m->layer[l].mix_up,
                    .x = m->acts[l].lora, .x_row = MIXES * MIX_RANK, .x_step = MIX_RANK,
                    .y = m->acts[l].offsets, .y_step = p->M * m->C, .count = MIXES};
}
static linear decay_down_of(const hy_model *m, int l) {
    return (linear){.inputs = m->C, .outputs = DECAY_RANK, .weight = m->layer[l].decay_down,
                    .x = m->acts[l].mixed, .y = m->acts[l].decay_lora};
}
static linear decay_up_of(const hy_model *m, int l) {
    return (linear){.inputs = DECAY_RANK, .outputs = m->C, .weight = m->layer[l].decay_up,
                    .x = m->acts[l].decay_lora, .y = m->acts[l].decay, .y_dtype = GT_F32};
}
static linear projections_of(const hy_model *m, int l, const pass *p) {
    int64_t MC = p->M * m->C;
    return (linear){.inputs = m->C, .outputs = m->C, .weight = m->layer[l].projections,
                    .x = act_at(m, m->acts[l].mixed, MC), .x_step = MC, .y = m->acts[l].kvrg,
                    .y_step = MC, .count = PROJECTIONS};
}
static linear rwkv_out_of(const hy_model *m, int l) {
    return (linear){.inputs = m->C, .outputs = m->C, .weight = m->layer[l].rwkv_out,
                    .x = m->acts[l].wkv_gated, .y = m->acts[l].branches, .y_row = branch_row(m)};
}
static linear mamba_in_of(const hy_model *m, int l) {
    return (linear){.inputs = m->C, .outputs = in_rows(m), .weight = m->layer[l].in,
                    .x = m->acts[l].norm, .y = m->acts[l].in, .y_row = in_row(m)};
}
static linear mamba_out_of(const hy_model *m, int l, const pass *p) {
    return (linear){.inputs = m->I, .outputs = m->C, .weight = m->layer[l].mamba_out,
                    .x = m->acts[l].ssd_gated, .y = branch_b(m, p, m->acts[l].branches),
                    .y_row = branch_row(m)};
}
/* Mamba-1: B, C and what dt is made from, of x behind the convolution */
static linear select_of(const hy_model *m, int l) {
    return (linear){.inputs = m->I, .outputs = select_row(m), .weight = m->layer[l].select,
                    .x = m->acts[l].conv, .y = m->acts[l].select};
}
static linear dt_of(const hy_model *m, int l) {
    return (linear){.inputs = m->R, .outputs = m->I, .weight = m->layer[l].dt,
                    .x = act_at(m, m->acts[l].select, 2 * m->S), .x_row = select_row(m),
                    .y = m->acts[l].dt};
}
/* RF: reads b; CP: reads the rows [a; b] */
static linear joint_of(const hy_model *m, int l, const pass *p) {
    int both = m->config.mix == HY_MIX_CONCAT;
    void *branches = m->acts[l].branches;
    return (linear){.inputs = branch_row(m), .outputs = m->C, .weight = m->layer[l].joint,
                    .x = both ? branches : branch_b(m, p, branches), .y = m->acts[l].middle};
}
static linear ffn_down_of(const hy_model *m, int l, void *y) {
    return (linear){.inputs = m->F, .outputs = m->C, .weight = m->layer[l].down,
                    .x = m->acts[l].act, .y = y};
}

/* y = x weight^T + beta y */
static gt_status linear_forward(const hy_model *m, const pass *p, linear k, float beta) {
    hy_gemm_args g = {.M = p->M, .N = k.outputs, .K = k.inputs, .trans_b = 1,
                      .dtype = m->be->dtype, .c_dtype = k.y_dtype, .alpha = 1, .beta = beta,
                      .a = k.x, .b = weight_of(m, k.weight), .c = k.y, .lda = k.x_row,
                      .ldc = k.y_row, .count = k.count, .a_step = k.x_step,
                      .b_step = k.outputs * k.inputs, .c_step = k.y_step};
    return m->be->gemm(m->be, &g);
}

/* dx = dy weight + beta dx, and the gradient of the weight; dy and dx lie as y and x. */
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

/* State of layer l in a set; NULL without a set. */
static float *wkv_state(const hy_model *m, const state_set *s, int l) {
    return s ? fp32_at(m, s->wkv, l * s->B * wkv_numbers(m)) : NULL;
}
static float *ssd_state(const hy_model *m, const state_set *s, int l) {
    return s ? fp32_at(m, s->ssd, l * s->B * ssm_numbers(m)) : NULL;
}
static float *conv_state(const hy_model *m, const state_set *s, int l) {
    return s ? fp32_at(m, s->conv, l * s->B * conv_numbers(m)) : NULL;
}
static float *shift_state(const hy_model *m, const state_set *s, int l) {
    return s ? fp32_at(m, s->shift, l * s->B * shift_numbers(m)) : NULL;
}

static gt_norm_gate_args norm_of(const hy_model *m, int l, const pass *p) {
    const layer_acts *a = &m->acts[l];
    return (gt_norm_gate_args){.M = p->M, .D = m->C, .dtype = m->be->dtype, .eps = model_eps,
                               .accumulate = m->accumulate, .x = a->x,
                               .gamma = value_of(m, m->layer[l].norm), .y = a->norm,
                               .dy = m->grad.norm, .dx = m->grad.part,
                               .dgamma = grad_of(m, m->layer[l].norm),
                               .workspace = m->workspace, .workspace_bytes = m->workspace_bytes};
}

/* The token shift that feeds the low-rank pair. */
static hy_lerp_args shift_of(const hy_model *m, int l, const pass *p) {
    const layer_acts *a = &m->acts[l];
    return (hy_lerp_args){.B = p->B, .T = p->T, .D = m->C, .count = 1, .dtype = m->be->dtype,
                          .accumulate = m->accumulate, .accumulate_dx = 1, .x = a->norm,
                          .state_in = shift_state(m, p->in, l),
                          .mu = value_of(m, m->layer[l].mu_x), .y = a->shifted,
                          .dy = m->grad.shifted, .dx = m->grad.norm,
                          .dmu = grad_of(m, m->layer[l].mu_x)};
}

/* The five data-dependent lerps; they come last and so move the state on. */
static hy_lerp_args lerps_of(const hy_model *m, int l, const pass *p) {
    const layer_acts *a = &m->acts[l];
    return (hy_lerp_args){.B = p->B, .T = p->T, .D = m->C, .count = MIXES, .dtype = m->be->dtype,
                          .accumulate = m->accumulate, .x = a->norm,
                          .state_in = shift_state(m, p->in, l), .mu = value_of(m, m->layer[l].mu),
                          .m = a->offsets, .y = a->mixed, .state_out = shift_state(m, p->out, l),
                          .dy = m->grad.mixed, .dx = m->grad.norm, .dm = m->grad.offsets,
                          .dmu = grad_of(m, m->layer[l].mu)};
}

static gt_wkv6_args wkv6_of(const hy_model *m, int l, const pass *p) {
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

static gt_norm_gate_args head_norm_of(const hy_model *m, int l, const pass *p) {
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

/* The in-projection's row is z [I], x B C [I+2S] (the convolution's channels), dt [Hm]. */
static gt_conv1d_args conv1d_of(const hy_model *m, int l, const pass *p) {
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

static hy_map_args A_of(const hy_model *m, int l) {
    return (hy_map_args){.n = A_numbers(m), .dtype = GT_F32, .function = HY_NEG_EXP,
                         .accumulate = m->accumulate, .x = value_of(m, m->layer[l].A_log),
                         .y = m->acts[l].A, .dy = m->grad.A, .dx = grad_of(m, m->layer[l].A_log)};
}

static gt_ssd_args ssd_of(const hy_model *m, int l, const pass *p) {
    const layer_acts *a = &m->acts[l];
    int64_t conv = conv_rows(m), B = m->I, C = m->I + m->S, dt = m->I + conv;
    return (gt_ssd_args){.B = p->B, .T = p->T, .H = m->Hm, .P = m->P, .N = m->S,
                         .dtype = m->be->dtype, .softplus = 1, .accumulate = m->accumulate, .x = a->conv,
                         .dt = act_at(m, a->in, dt), .A = a->A, .Bm = act_at(m, a->conv, B),
                         .Cm = act_at(m, a->conv, C), .Dskip = value_of(m, m->layer[l].Dskip),
                         .dt_bias = value_of(m, m->layer[l].dt_bias),
                         .state_in = ssd_state(m, p->in, l), .y = a->ssd,
                         .state_out = ssd_state(m, p->out, l), .dy = m->grad.ssd,
                         .dx = m->grad.conv, .ddt = act_at(m, m->grad.in, dt),
                         .dBm = act_at(m, m->grad.conv, B), .dCm = act_at(m, m->grad.conv, C),
                         .dA = m->grad.A, .ddt_bias = grad_of(m, m->layer[l].dt_bias),
                         .dDskip = grad_of(m, m->layer[l].Dskip), .x_stride = {.t = conv},
                         .dt_stride = {.t = in_row(m)}, .Bm_stride = {.t = conv},
                         .Cm_stride = {.t = conv}, .dx_stride = {.t = conv},
                         .ddt_stride = {.t = in_row(m)}, .dBm_stride = {.t = conv},
                         .dCm_stride = {.t = conv}, .saved = p->keep_saved ? a->ssd_saved : NULL,
                         .saved_bytes = p->keep_saved ? m->ssd_saved_bytes : 0,
                         .workspace = m->workspace, .workspace_bytes = m->workspace_bytes};
}

/* Mamba-1: the gate is part of the scan. */
static gt_selective_scan_args scan_of(const hy_model *m, int l, const pass *p) {
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

static gt_norm_gate_args mamba_norm_of(const hy_model *m, int l, const pass *p) {
    const layer_acts *a = &m->acts[l];
    return (gt_norm_gate_args){.M = p->M, .D = m->I, .dtype = m->be->dtype, .gate_first = 1,
                               .eps = model_eps, .accumulate = m->accumulate, .x = a->ssd,
                               .z = a->in, .gamma = value_of(m, m->layer[l].mamba_norm),
                               .y = a->ssd_gated, .dy = m->grad.ssd_gated, .dx = m->grad.ssd,
                               .dz = m->grad.in, .dgamma = grad_of(m, m->layer[l].mamba_norm),
                               .z_stride = in_row(m), .dz_stride = in_row(m),
                               .workspace = m->workspace, .workspace_bytes = m->workspace_bytes};
}

static gt_norm_mix_args norm_mix_of(const hy_model *m, int l, const pass *p) {
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

static hy_gate_mix_args gate_mix_of(const hy_model *m, int l, const pass *p) {
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

static gt_rmsnorm_linear_args up_of(const hy_model *m, int l, const pass *p) {
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
                                    .workspace_bytes = m->workspace_bytes};
}

static hy_map_args gelu_of(const hy_model *m, int l, const pass *p) {
    return (hy_map_args){.n = p->M * m->F, .dtype = m->be->dtype, .function = HY_GELU,
                         .x = m->acts[l].up, .y = m->acts[l].act, .dy = m->grad.act,
                         .dx = m->grad.act};
}

static hy_map_args tanh_of(const hy_model *m, int64_t n, void *y, void *dy) {
    return (hy_map_args){.n = n, .dtype = m->be->dtype, .function = HY_TANH, .x = y, .y = y,
                         .dy = dy, .dx = dy};
}

static hy_bias_args decay_base_of(const hy_model *m, int l, const pass *p) {
    return (hy_bias_args){.M = p->M, .D = m->C, .dtype = GT_F32, .accumulate = m->accumulate,
                          .bias = value_of(m, m->layer[l].decay_base), .y = m->acts[l].decay,
                          .dy = m->grad.decay, .dbias = grad_of(m, m->layer[l].decay_base)};
}

/* The head on rows `first` ... of the last residual stream; the weight is the embedding. */
static gt_rmsnorm_linear_args head_of(const hy_model *m, const pass *p, int64_t first) {
    return (gt_rmsnorm_linear_args){.M = p->M - first, .D = m->C, .O = m->V,
                                    .dtype = m->be->dtype, .eps = model_eps,
                                    .accumulate = m->accumulate,
                                    .x = act_at(m, m->x_last, first * m->C),
                                    .weight = weight_of(m, m->embedding),
                                    .gamma = value_of(m, m->final_norm), .y = m->logits,
                                    .dy = m->logits, .dx = m->grad.x,
                                    .dweight = grad_of(m, m->embedding),
                                    .dgamma = grad_of(m, m->final_norm),
                                    .saved = p->keep_saved ? m->logits_saved : NULL,
                                    .saved_bytes = p->keep_saved ? m->logits_saved_bytes : 0,
                                    .workspace = m->workspace,
                                    .workspace_bytes = m->workspace_bytes};
}

static hy_embedding_args embedding_of(const hy_model *m, const pass *p) {
    return (hy_embedding_args){.M = p->M, .V = m->V, .D = m->C, .dtype = m->be->dtype,
                               .accumulate = 1, /* the head wrote its share */
                               .token = m->tokens, .table = weight_of(m, m->embedding),
                               .y = m->acts[0].x, .dy = m->grad.x,
                               .dtable = grad_of(m, m->embedding)};
}

static hy_cross_entropy_args cross_entropy_of(const hy_model *m, const pass *p) {
    return (hy_cross_entropy_args){.M = p->M, .V = m->V, .dtype = m->be->dtype,
                                   .target = m->targets, .logits = m->logits, .lse = m->lse,
                                   .loss = m->loss, .entropy = m->entropy, .total = m->total,
                                   .scale = fp32_at(m, m->control, HY_LOSS_SCALE)};
}

/* clang-format on */

/* ---- memory -------------------------------------------------------------------------------- */

/* Hands out pieces of one allocation.  While only the size is wanted it starts at a made-up
 * address, which nobody reads. */
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
    x->conv = take_acts(a, m, M * conv_rows(m));
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
    for (int l = 1; l < m->L; l++) /* a layer that is done with its input may write its output there */
        if (m->config.inference)
            m->acts[l] = m->acts[0];
        else
            take_layer(a, m, &m->acts[l]);
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
    if (is_mamba1(m)) {
        g->select = take_acts(a, m, M * select_row(m));
        g->dt = take_acts(a, m, M * m->I);
    } else {
        g->ssd = take_acts(a, m, M * m->I);
    }
    g->conv = take_acts(a, m, M * conv_rows(m));
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
    m->segments.count = m->param_count;
    m->segments.start = take(a, (size_t)(m->param_count + 1) * sizeof(int64_t));
    m->segments.group = take(a, (size_t)m->param_count * sizeof(int32_t));
    m->segments.decay = take_fp32(a, m, m->param_count);
    m->control = take_fp32(a, m, HY_CONTROLS);
    m->norms = take_fp32(a, m, HY_GROUPS + 1);
    m->total = take_fp32(a, m, 3);
    m->partial = take(a, (size_t)m->param_count * sizeof(double));
}

/* Columns of the widest array of activations. */
static int64_t widest(const hy_model *m) {
    int64_t most = m->F > m->C ? m->F : m->C;
    if (has_mamba(m) && most < in_rows(m)) most = in_rows(m);
    return most < m->V ? m->V : most;
}

/* Points everything into the arena and notes what each purpose takes. */
static gt_status take_all(arena *a, hy_model *m, hy_plan *plan) {
    const hy_limits limits = {.M = m->M, .D = widest(m), .n = m->param_total};
    size_t before = a->used, scratch;
    take_weights(a, m);
    plan->weights = a->used - before, before = a->used;
    arena unused = {a->base, 0}; /* inference: places that nobody reads or writes */
    arena *const training = m->config.inference ? &unused : a;
    m->grads = take_fp32(training, m, m->param_total);
    plan->gradients = a->used - before, before = a->used;
    m->m = take_fp32(training, m, m->param_total);
    m->v = take_fp32(training, m, m->param_total);
    plan->optimizer = a->used - before, before = a->used;
    take_activations(a, m);
    plan->activations = a->used - before, before = a->used;
    take_backward(training, m);
    plan->backward = a->used - before, before = a->used;
    take_states(a, m, &m->decoding, 1);
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

/* Workspace for an operator; and how much it saves, if this pass keeps that. */
static void note_need(hy_model *m, const pass *p, const gt_workspace *need, size_t *saved) {
    const size_t passes[] = {need->forward, m->config.inference ? 0 : need->backward, need->step};
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

static gt_status ask_rwkv(hy_model *m, const pass *p) {
    gt_wkv6_args wkv6 = wkv6_of(m, 0, p);
    gt_workspace need;
    TRY(ask_norm(m, p, head_norm_of(m, 0, p)));
    TRY(m->be->wkv6_workspace(m->be, &wkv6, &need));
    note_need(m, p, &need, &m->wkv_saved_bytes);
    return GT_OK;
}

static gt_status ask_mamba(hy_model *m, const pass *p) {
    gt_conv1d_args conv1d = conv1d_of(m, 0, p);
    gt_workspace need;
    TRY(m->be->conv1d_workspace(m->be, &conv1d, &need));
    note_need(m, p, &need, NULL);
    if (is_mamba1(m)) {
        gt_selective_scan_args scan = scan_of(m, 0, p);
        TRY(m->be->selective_scan_workspace(m->be, &scan, &need));
    } else {
        gt_ssd_args ssd = ssd_of(m, 0, p);
        TRY(ask_norm(m, p, mamba_norm_of(m, 0, p)));
        TRY(m->be->ssd_workspace(m->be, &ssd, &need));
    }
    note_need(m, p, &need, &m->ssd_saved_bytes);
    return GT_OK;
}

/* Asks all operators for one way of running the layers. */
static gt_status ask_workspace(hy_model *m, const pass *p) {
    hy_backend *be = m->be;
    gt_rmsnorm_linear_args up = up_of(m, 0, p), head = head_of(m, p, 0);
    gt_workspace need;
    TRY(ask_norm(m, p, norm_of(m, 0, p)));
    if (m->config.mix == HY_MIX_NORM) {
        gt_norm_mix_args mix = norm_mix_of(m, 0, p);
        TRY(be->norm_mix_workspace(be, &mix, &need));
        note_need(m, p, &need, NULL);
    }
    if (has_rwkv(m)) TRY(ask_rwkv(m, p));
    if (has_mamba(m)) TRY(ask_mamba(m, p));
    TRY(be->rmsnorm_linear_workspace(be, &up, &need));
    note_need(m, p, &need, &m->up_saved_bytes);
    TRY(be->rmsnorm_linear_workspace(be, &head, &need));
    note_need(m, p, &need, &m->logits_saved_bytes);
    return GT_OK;
}

static pass training_pass(const hy_model *m) {
    int stateful = m->config.stateful;
    return (pass){.B = m->B,
                  .T = m->T,
                  .M = m->M,
                  .in = stateful ? &m->carried_in : NULL,
                  .out = stateful ? &m->carried_out : NULL,
                  .keep_saved = 1};
}
static pass evaluation_pass(const hy_model *m) { return (pass){.B = m->B, .T = m->T, .M = m->M}; }
static pass decoding_pass(const hy_model *m, int64_t T) {
    return (pass){.B = 1, .T = T, .M = T, .in = &m->decoding, .out = &m->decoding, .step = T == 1};
}

static gt_status plan_memory(hy_model *m, hy_plan *plan) {
    char *const made_up = (char *)4096;
    pass train = training_pass(m), evaluate = evaluation_pass(m);
    pass prompt = decoding_pass(m, m->T), step = decoding_pass(m, 1);
    arena a = {made_up, 0};
    TRY(take_all(&a, m, plan)); /* operators may ask which pointers are NULL */
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

/* A model without memory of the backend. */
static gt_status make_model(hy_backend *be, const hy_config *config, int vocab, int B, int T, uint64_t seed,
                            hy_model **model) {
    hy_config c = *config;
    TRY(hy_config_resolve(&c));
    TRY(check_number("vocab", vocab, 1, 1 << 20));
    TRY(check_number("batch", B, 1, 1 << 20));
    TRY(check_number("seq", T, 1, 1 << 20));
    hy_model *m = calloc(1, sizeof *m);
    if (!m) return hy_fail(GT_ERROR_MEMORY, "no memory for a model");
    m->be = be, m->config = c, m->seed = seed, m->loss_scale = 1;
    m->V = vocab, m->B = B, m->T = T, m->M = (int64_t)B * T;
    m->C = c.hidden, m->L = c.layers, m->H = c.heads, m->N = m->C / m->H;
    m->I = c.expand * m->C, m->P = c.mamba_head, m->Hm = m->I / m->P;
    m->S = c.state, m->R = (m->C / 16 + 7) / 8 * 8, m->W = c.conv, m->F = c.ffn * m->C;
    m->params = calloc((size_t)(m->L * LAYER_PARAMS + 2), sizeof *m->params);
    if (!m->params) {
        free(m);
        return hy_fail(GT_ERROR_MEMORY, "no memory for a model");
    }
    add_all_params(m);
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

/* The table of segments, and the control numbers of a model that never took a step. */
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

static gt_status zero_states(const hy_model *m, const state_set *s) {
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
    /* rows are padded, and libraries that read 16 bytes at a time read the padding, too */
    if (has_mamba(m)) TRY(m->be->zero(m->be, m->grad.in, (size_t)(m->M * in_row(m)) * act_bytes(m)));
    TRY(m->be->zero(m->be, m->m, numbers));
    return m->be->zero(m->be, m->v, numbers);
}

/* Memory, tables and initial values of a planned model. */
static gt_status fill_model(hy_model *m) {
    hy_plan plan;
    TRY(plan_memory(m, &plan));
    TRY(m->be->alloc(m->be, &m->memory, plan.total));
    arena a = {m->memory, 0};
    TRY(take_all(&a, m, &plan));
    TRY(m->be->scratch(m->be, &(hy_limits){m->M, widest(m), m->param_total}, m->scratch, &m->scratch_bytes));
    if (!m->config.inference) TRY(clear_training(m));
    TRY(write_tables(m));
    TRY(init_params(m));
    if (m->config.stateful) TRY(zero_states(m, &m->carried_out));
    return zero_states(m, &m->decoding);
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

/* ---- forward ------------------------------------------------------------------------------- */

static gt_status forward_rwkv(const hy_model *m, int l, const pass *p) {
    hy_backend *be = m->be;
    const layer_acts *a = &m->acts[l];
    hy_lerp_args shift = shift_of(m, l, p), lerps = lerps_of(m, l, p);
    hy_map_args tanh_lora = tanh_of(m, p->M * MIXES * MIX_RANK, a->lora, NULL);
    hy_map_args tanh_decay = tanh_of(m, p->M * DECAY_RANK, a->decay_lora, NULL);
    hy_bias_args decay_base = decay_base_of(m, l, p);
    gt_wkv6_args wkv6 = wkv6_of(m, l, p);
    gt_norm_gate_args head_norm = head_norm_of(m, l, p);
    TRY(be->lerp_forward(be, &shift));
    TRY(linear_forward(m, p, mix_down_of(m, l), 0));
    TRY(be->map_forward(be, &tanh_lora));
    TRY(linear_forward(m, p, mix_up_of(m, l, p), 0));
    TRY(be->lerp_forward(be, &lerps));
    TRY(linear_forward(m, p, projections_of(m, l, p), 0));
    TRY(linear_forward(m, p, decay_down_of(m, l), 0));
    TRY(be->map_forward(be, &tanh_decay));
    TRY(linear_forward(m, p, decay_up_of(m, l), 0));
    TRY(be->bias_forward(be, &decay_base));
    TRY(p->step ? be->wkv6_step(be, &wkv6) : be->wkv6_forward(be, &wkv6));
    TRY(be->norm_gate_forward(be, &head_norm));
    return linear_forward(m, p, rwkv_out_of(m, l), 0);
}

static gt_status forward_scan(const hy_model *m, int l, const pass *p) {
    gt_selective_scan_args scan = scan_of(m, l, p);
    TRY(linear_forward(m, p, select_of(m, l), 0));
    TRY(linear_forward(m, p, dt_of(m, l), 0));
    return p->step ? m->be->selective_scan_step(m->be, &scan) : m->be->selective_scan_forward(m->be, &scan);
}

static gt_status forward_ssd(const hy_model *m, int l, const pass *p) {
    gt_ssd_args ssd = ssd_of(m, l, p);
    gt_norm_gate_args norm = mamba_norm_of(m, l, p);
    TRY(p->step ? m->be->ssd_step(m->be, &ssd) : m->be->ssd_forward(m->be, &ssd));
    return m->be->norm_gate_forward(m->be, &norm);
}

static gt_status forward_mamba(const hy_model *m, int l, const pass *p) {
    hy_backend *be = m->be;
    hy_map_args A = A_of(m, l);
    gt_conv1d_args conv1d = conv1d_of(m, l, p);
    TRY(linear_forward(m, p, mamba_in_of(m, l), 0));
    TRY(p->step ? be->conv1d_step(be, &conv1d) : be->conv1d_forward(be, &conv1d));
    TRY(be->map_forward(be, &A));
    TRY(is_mamba1(m) ? forward_scan(m, l, p) : forward_ssd(m, l, p));
    return linear_forward(m, p, mamba_out_of(m, l, p), 0);
}

/* middle = x + mix(a, b) */
static gt_status forward_mix(const hy_model *m, int l, const pass *p) {
    hy_backend *be = m->be;
    const layer_acts *a = &m->acts[l];
    if (m->config.mix == HY_MIX_NORM) {
        gt_norm_mix_args mix = norm_mix_of(m, l, p);
        return be->norm_mix_forward(be, &mix);
    }
    if (m->config.mix == HY_MIX_GATE || m->config.mix == HY_MIX_SCALAR) {
        hy_gate_mix_args mix = gate_mix_of(m, l, p);
        return be->gate_mix_forward(be, &mix);
    }
    TRY(be->copy(be, a->middle, a->x, (size_t)(p->M * m->C) * act_bytes(m)));
    if (m->config.mix == HY_MIX_RESIDUAL || is_single(m)) {
        hy_add_args add = {.n = p->M * m->C, .dtype = be->dtype, .x = a->branches, .y = a->middle};
        TRY(be->add(be, &add));
    }
    if (is_single(m)) return GT_OK;
    return linear_forward(m, p, joint_of(m, l, p), 1);
}

static gt_status forward_layer(const hy_model *m, int l, const pass *p, void *out) {
    hy_backend *be = m->be;
    const layer_acts *a = &m->acts[l];
    gt_norm_gate_args norm = norm_of(m, l, p);
    gt_rmsnorm_linear_args up = up_of(m, l, p);
    hy_map_args gelu = gelu_of(m, l, p);
    TRY(be->norm_gate_forward(be, &norm));
    if (has_rwkv(m)) TRY(forward_rwkv(m, l, p));
    if (has_mamba(m)) TRY(forward_mamba(m, l, p));
    TRY(forward_mix(m, l, p));
    TRY(be->rmsnorm_linear_forward(be, &up));
    TRY(be->map_forward(be, &gelu));
    TRY(be->copy(be, out, a->middle, (size_t)(p->M * m->C) * act_bytes(m)));
    return linear_forward(m, p, ffn_down_of(m, l, out), 1);
}

/* Names the layer in the text of a failure. */
static gt_status in_layer(gt_status status, int l) {
    return status == GT_OK ? GT_OK : hy_fail(status, "layer %d: %s", l, hy_last_error());
}

/* From the uploaded tokens to the last residual stream. */
static gt_status forward_layers(const hy_model *m, const pass *p) {
    hy_embedding_args embedding = embedding_of(m, p);
    TRY(m->be->embedding_forward(m->be, &embedding));
    for (int l = 0; l < m->L; l++)
        TRY(in_layer(forward_layer(m, l, p, l + 1 < m->L ? m->acts[l + 1].x : m->x_last), l));
    return GT_OK;
}

/* ... and to the loss. */
static gt_status forward_all(const hy_model *m, const pass *p) {
    gt_rmsnorm_linear_args head = head_of(m, p, 0);
    hy_cross_entropy_args loss = cross_entropy_of(m, p);
    TRY(forward_layers(m, p));
    TRY(m->be->rmsnorm_linear_forward(m->be, &head));
    return m->be->cross_entropy_forward(m->be, &loss);
}

/* carried_in = what the tracks that are kept left in carried_out */
static gt_status carry_states(const hy_model *m) {
    const state_set *from = &m->carried_out, *to = &m->carried_in;
    const struct {
        float *from, *to;
        int64_t n;
    } kinds[] = {{from->wkv, to->wkv, wkv_numbers(m)},
                 {from->ssd, to->ssd, ssm_numbers(m)},
                 {from->conv, to->conv, conv_numbers(m)},
                 {from->shift, to->shift, shift_numbers(m)}};
    for (int i = 0; i < 4; i++) {
        if (!kinds[i].n) continue;
        hy_carry_args carry = {
            .count = m->L, .B = m->B, .n = kinds[i].n, .keep = m->keep, .from = kinds[i].from, .to = kinds[i].to};
        TRY(m->be->carry(m->be, &carry));
    }
    return GT_OK;
}

static gt_status check_tokens(const hy_model *m, const char *name, const int32_t *tokens, int64_t n, int32_t least) {
    for (int64_t i = 0; i < n; i++)
        if (tokens[i] < least || tokens[i] >= m->V)
            return hy_fail(GT_ERROR_VALUE, "%s[%lld] = %d: must be %s%lld", name, (long long)i, (int)tokens[i],
                           least == 0 ? "0 to " : "at most ", (long long)m->V - 1);
    return GT_OK;
}

static gt_status upload_tokens(hy_model *m, const int32_t *tokens) {
    TRY(check_tokens(m, "tokens", tokens, m->M, 0));
    return m->be->upload(m->be, m->tokens, tokens, (size_t)m->M * sizeof *tokens);
}

static gt_status upload_batch(hy_model *m, const int32_t *tokens, const int32_t *targets) {
    TRY(upload_tokens(m, tokens));
    TRY(check_tokens(m, "targets", targets, m->M, INT32_MIN));
    return m->be->upload(m->be, m->targets, targets, (size_t)m->M * sizeof *targets);
}

static gt_status upload_keep(hy_model *m, const int32_t *keep) {
    size_t bytes = (size_t)m->B * sizeof *keep;
    if (!m->config.stateful) return GT_OK;
    return keep ? m->be->upload(m->be, m->keep, keep, bytes) : m->be->zero(m->be, m->keep, bytes);
}

/* Forward of a training batch that was uploaded. */
static gt_status forward_training(hy_model *m) {
    if (m->config.inference)
        return hy_fail(GT_ERROR_UNSUPPORTED, "the model was made for inference: it keeps nothing for backward");
    m->trained = training_pass(m);
    if (m->config.stateful) TRY(carry_states(m));
    return forward_all(m, &m->trained);
}

gt_status hy_model_forward(hy_model *m, const int32_t *tokens, const int32_t *targets, const int32_t *keep) {
    TRY(upload_batch(m, tokens, targets));
    TRY(upload_keep(m, keep));
    return forward_training(m);
}

gt_status hy_model_eval(hy_model *m, const int32_t *tokens, const int32_t *targets, double *loss_sum,
                        int64_t *targets_counted) {
    pass p = evaluation_pass(m);
    double total[3];
    TRY(upload_batch(m, tokens, targets));
    m->trained.M = 0; /* its activations are overwritten */
    TRY(forward_all(m, &p));
    TRY(m->be->read(m->be, total, m->total, GT_F32, 3));
    *loss_sum += total[0];
    *targets_counted += (int64_t)total[1];
    return GT_OK;
}

/* ---- backward ---------------------------------------------------------------------------------
 * grad.x is the gradient of the residual stream, from the last layer's output back to the
 * embedding.  Each function adds what its part of the layer contributes, in the reverse order of
 * forward. */

static gt_status add_part(const hy_model *m) {
    hy_add_args add = {.n = m->trained.M * m->C, .dtype = m->be->dtype, .x = m->grad.part, .y = m->grad.x};
    return m->be->add(m->be, &add);
}

static gt_status backward_ffn(const hy_model *m, int l) {
    hy_backend *be = m->be;
    gt_rmsnorm_linear_args up = up_of(m, l, &m->trained);
    hy_map_args gelu = gelu_of(m, l, &m->trained);
    TRY(linear_backward(m, ffn_down_of(m, l, NULL), m->grad.x, m->grad.act, 0));
    TRY(be->map_backward(be, &gelu));
    TRY(be->rmsnorm_linear_backward(be, &up));
    return add_part(m);
}

/* Gradients of a and b from that of `middle`, which is grad.x. */
static gt_status backward_mix(const hy_model *m, int l) {
    hy_backend *be = m->be;
    const pass *p = &m->trained;
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
    /* the branch that is added as it is */
    return be->copy(be, m->grad.branches, m->grad.x, (size_t)(p->M * m->C) * act_bytes(m));
}

static gt_status backward_scan(const hy_model *m, int l) {
    const grad_acts *g = &m->grad;
    gt_selective_scan_args scan = scan_of(m, l, &m->trained);
    TRY(m->be->selective_scan_backward(m->be, &scan));
    TRY(linear_backward(m, dt_of(m, l), g->dt, act_at(m, g->select, 2 * m->S), 0));
    return linear_backward(m, select_of(m, l), g->select, g->conv, 1);
}

static gt_status backward_ssd(const hy_model *m, int l) {
    gt_ssd_args ssd = ssd_of(m, l, &m->trained);
    gt_norm_gate_args norm = mamba_norm_of(m, l, &m->trained);
    TRY(m->be->norm_gate_backward(m->be, &norm));
    return m->be->ssd_backward(m->be, &ssd);
}

/* Writes grad.norm. */
static gt_status backward_rwkv(const hy_model *m, int l) {
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
    gt_wkv6_args wkv6 = wkv6_of(m, l, p);
    gt_norm_gate_args head_norm = head_norm_of(m, l, p);
    TRY(linear_backward(m, rwkv_out_of(m, l), g->branches, g->wkv_gated, 0));
    TRY(be->norm_gate_backward(be, &head_norm));
    TRY(be->wkv6_backward(be, &wkv6));
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

/* Adds to grad.norm what RWKV's has written. */
static gt_status backward_mamba(const hy_model *m, int l) {
    hy_backend *be = m->be;
    const pass *p = &m->trained;
    const grad_acts *g = &m->grad;
    hy_map_args A = A_of(m, l);
    gt_conv1d_args conv1d = conv1d_of(m, l, p);
    TRY(linear_backward(m, mamba_out_of(m, l, p), branch_b(m, p, g->branches), g->ssd_gated, 0));
    TRY(be->zero(be, g->A, (size_t)A_numbers(m) * be->fp32_bytes)); /* not a parameter, never added up */
    TRY(is_mamba1(m) ? backward_scan(m, l) : backward_ssd(m, l));
    TRY(be->map_backward(be, &A));
    TRY(be->conv1d_backward(be, &conv1d));
    return linear_backward(m, mamba_in_of(m, l), g->in, g->norm, has_rwkv(m) ? 1 : 0);
}

static gt_status backward_layer(const hy_model *m, int l) {
    gt_norm_gate_args norm = norm_of(m, l, &m->trained);
    TRY(backward_ffn(m, l));
    TRY(backward_mix(m, l));
    if (has_rwkv(m)) TRY(backward_rwkv(m, l));
    if (has_mamba(m)) TRY(backward_mamba(m, l));
    TRY(m->be->norm_gate_backward(m->be, &norm));
    return add_part(m);
}

gt_status hy_model_backward(hy_model *m, int accumulate) {
    if (!m->trained.M) return hy_fail(GT_ERROR_VALUE, "hy_model_backward: no hy_model_forward came before");
    m->accumulate = accumulate;
    gt_rmsnorm_linear_args head = head_of(m, &m->trained, 0);
    hy_cross_entropy_args loss = cross_entropy_of(m, &m->trained);
    hy_embedding_args embedding = embedding_of(m, &m->trained);
    TRY(m->be->cross_entropy_backward(m->be, &loss));
    TRY(m->be->rmsnorm_linear_backward(m->be, &head));
    for (int l = (int)m->L - 1; l >= 0; l--) TRY(in_layer(backward_layer(m, l), l));
    m->trained.M = 0;
    return m->be->embedding_backward(m->be, &embedding);
}

/* ---- the optimiser ------------------------------------------------------------------------- */

static gt_status upload_control(hy_model *m, const hy_optimizer *o) {
    double t = (double)++m->steps;
    m->judged = 0;
    const double control[HY_CONTROLS] = {[HY_LR] = o->lr,
                                         [HY_BETA1] = o->beta1,
                                         [HY_BETA2] = o->beta2,
                                         [HY_EPS] = o->eps,
                                         [HY_CORRECTION1] = 1 / (1 - pow(o->beta1, t)),
                                         [HY_CORRECTION2] = 1 / (1 - pow(o->beta2, t)),
                                         [HY_WEIGHT_DECAY] = o->weight_decay,
                                         [HY_MAX_NORM] = o->max_norm,
                                         [HY_LOSS_SCALE] = m->loss_scale};
    return m->be->write(m->be, m->control, GT_F32, control, HY_CONTROLS);
}

static gt_status grad_norm(hy_model *m) {
    hy_grad_norm_args norm = {
        .segments = m->segments, .grad = m->grads, .control = m->control, .partial = m->partial, .norm = m->norms};
    return m->be->grad_norm(m->be, &norm);
}

gt_status hy_model_grad_norm(hy_model *m) {
    if (m->config.inference)
        return hy_fail(GT_ERROR_UNSUPPORTED, "the model was made for inference: it has no gradients");
    m->judged = 1; /* there is no step behind these norms */
    return grad_norm(m);
}

static gt_status update_params(hy_model *m) {
    hy_adamw_args adamw = {.segments = m->segments,
                           .control = m->control,
                           .norm = m->norms,
                           .grad = m->grads,
                           .w = m->values,
                           .m = m->m,
                           .v = m->v,
                           .copy_dtype = m->be->dtype,
                           .copy = m->copies};
    TRY(grad_norm(m));
    m->weights = TOUCHED;
    return m->be->adamw(m->be, &adamw);
}

gt_status hy_model_scale_loss(hy_model *m, float scale) {
    const double number = scale;
    m->loss_scale = scale;
    return m->be->write(m->be, fp32_at(m, m->control, HY_LOSS_SCALE), GT_F32, &number, 1);
}

gt_status hy_model_update(hy_model *m, const hy_optimizer *optimizer) {
    if (m->config.inference)
        return hy_fail(GT_ERROR_UNSUPPORTED, "the model was made for inference: it has no optimiser");
    TRY(upload_control(m, optimizer));
    return update_params(m);
}

enum { SLOT_GRADIENT, SLOT_TRAIN, SLOT_INFER, SLOT_LOSS }; /* of hy_backend.run */

static gt_status loss_uploaded(void *model) { return forward_training(model); }

static gt_status infer_uploaded(void *model) {
    const hy_model *m = model;
    pass p = evaluation_pass(m);
    gt_rmsnorm_linear_args head = head_of(m, &p, 0);
    TRY(forward_layers(m, &p));
    return m->be->rmsnorm_linear_forward(m->be, &head);
}

static gt_status gradient_uploaded(void *model) {
    hy_model *m = model;
    TRY(forward_training(m));
    return hy_model_backward(m, 0);
}

static gt_status train_uploaded(void *model) {
    ((hy_model *)model)->weights = UNTOUCHED;
    TRY(gradient_uploaded(model));
    return update_params(model);
}

/* What a recorded run leaves on the host is the same every time, but is not left by a replay. */
static gt_status run_uploaded(hy_model *m, int slot, gt_status (*record)(void *)) {
    m->accumulate = 0;
    gt_status status = m->be->run(m->be, slot, record, m);
    m->trained.M = 0;
    return status;
}

gt_status hy_model_gradient(hy_model *m, const int32_t *tokens, const int32_t *targets, const int32_t *keep) {
    if (tokens) TRY(upload_batch(m, tokens, targets));
    TRY(upload_keep(m, keep));
    return run_uploaded(m, SLOT_GRADIENT, gradient_uploaded);
}

gt_status hy_model_loss(hy_model *m, const int32_t *tokens, const int32_t *targets, const int32_t *keep) {
    if (tokens) TRY(upload_batch(m, tokens, targets));
    TRY(upload_keep(m, keep));
    return run_uploaded(m, SLOT_LOSS, loss_uploaded);
}

gt_status hy_model_infer(hy_model *m, const int32_t *tokens) {
    if (tokens) TRY(upload_tokens(m, tokens));
    m->trained.M = 0; /* its activations are overwritten */
    return run_uploaded(m, SLOT_INFER, infer_uploaded);
}

gt_status hy_model_train(hy_model *m, const int32_t *tokens, const int32_t *targets, const int32_t *keep,
                         const hy_optimizer *optimizer) {
    TRY(upload_batch(m, tokens, targets));
    TRY(upload_keep(m, keep));
    m->loss_scale = optimizer->loss_scale > 0 ? optimizer->loss_scale : 1;
    TRY(upload_control(m, optimizer));
    m->weights = UNKNOWN; /* as a replay does not tell how far it came */
    return run_uploaded(m, SLOT_TRAIN, train_uploaded);
}

int hy_model_take_back(hy_model *m) {
    if (m->weights != UNTOUCHED || m->config.stateful) return 0;
    m->steps -= !m->judged;
    m->judged = 1;
    return 1;
}

gt_status hy_model_result(hy_model *m, hy_result *r) {
    double total[3];
    TRY(m->be->read(m->be, total, m->total, GT_F32, 3));
    TRY(m->be->read(m->be, r->norm, m->norms, GT_F32, HY_GROUPS + 1));
    r->targets = (int64_t)total[1];
    r->loss = total[1] > 0 ? total[0] / total[1] : 0;
    r->entropy = total[1] > 0 ? total[2] / total[1] : 0;
    r->skipped = !isfinite(r->norm[HY_GROUPS]);
    if (is_single(m))
        r->ratio = (double)NAN;
    else if (r->norm[HY_RWKV] == 0)
        r->ratio = 0; /* also if Mamba's is 0 */
    else
        r->ratio = r->norm[HY_RWKV] / r->norm[HY_MAMBA];
    if (r->skipped && !m->judged) m->steps--; /* AdamW counts the steps that it took */
    m->judged = 1;
    m->weights = UNTOUCHED;
    return GT_OK;
}

/* ---- what a file of the model holds ---------------------------------------------------------- */

/* Parameters that are several tensors, one after the other: which, as their names in a layer end.
 */
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
    name = strchr(strchr(name, '.') + 1, '.') + 1; /* after "layers.0." */
    for (size_t i = 0; i < sizeof splits / sizeof splits[0]; i++)
        if (!strcmp(name, splits[i].param)) return &splits[i];
    return NULL;
}

/* Appends a parameter's tensors, their numbers being in `array`, to the list. */
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
    hy_tensor *list = malloc((size_t)(3 * PARTS * (int64_t)m->param_count + 4 * m->L) * sizeof(hy_tensor));
    *count = 0;
    if (!list) return NULL;
    for (int i = 0; i < m->param_count; i++) list_param(m, m->params + i, HY_WEIGHT, "", m->values, list, count);
    for (int i = 0; i < m->param_count && !m->config.inference; i++)
        list_param(m, m->params + i, HY_MOMENT, "optimizer.exp_avg.", m->m, list, count);
    for (int i = 0; i < m->param_count && !m->config.inference; i++)
        list_param(m, m->params + i, HY_MOMENT, "optimizer.exp_avg_sq.", m->v, list, count);
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

gt_status hy_model_written(hy_model *m) { return refresh_copies(m); }

int64_t hy_model_steps(const hy_model *m) { return m->steps; }

void hy_model_set_steps(hy_model *m, int64_t steps) { m->steps = steps; }

/* ---- what forward computed ----------------------------------------------------------------- */

typedef struct activation {
    const char *name;
    const void *data;
    int64_t columns;
    gt_dtype dtype; /* 0 = of the activations */
} activation;

/* Of one layer, in the order of their computation; how many. */
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
        {has_mamba(m), {"mamba.conv", a->conv, conv_rows(m), 0}},
        {scan, {"mamba.select", a->select, select_row(m), 0}},
        {scan, {"mamba.dt", a->dt, m->I, 0}},
        {ssd, {"mamba.ssd", a->ssd, m->I, 0}},
        {has_mamba(m), {"mamba.gated", a->ssd_gated, m->I, 0}},
        {1, {"branches", a->branches, branch_columns(m), 0}},
        {1, {"mix", a->middle, C, 0}},
        {1, {"ffn.up", a->up, m->F, 0}},
        {1, {"output", l + 1 < m->L ? m->acts[l + 1].x : m->x_last, C, 0}},
    };
    int count = 0;
    for (int i = 0; i < LAYER_ACTIVATIONS; i++)
        if (all[i].is_there) list[count++] = all[i].shown;
    return count;
}

int hy_model_activation_count(const hy_model *m) {
    activation list[LAYER_ACTIVATIONS];
    return (int)m->L * layer_activations(m, 0, list) + 1;
}

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
    return m->be->read(m->be, numbers, a.data, a.dtype, a.count);
}

/* ---- decoding ------------------------------------------------------------------------------ */

gt_status hy_model_reset(hy_model *m) { return zero_states(m, &m->decoding); }

gt_status hy_model_feed(hy_model *m, const int32_t *tokens, int n, double *logits) {
    TRY(check_number("n", n, 1, INT32_MAX));
    TRY(check_tokens(m, "tokens", tokens, n, 0));
    m->trained.M = 0;
    for (int64_t done = 0, T; done < n; done += T) {
        T = n - done < m->T ? n - done : m->T;
        pass p = decoding_pass(m, T);
        gt_rmsnorm_linear_args head = head_of(m, &p, T - 1);
        TRY(m->be->upload(m->be, m->tokens, tokens + done, (size_t)T * sizeof *tokens));
        TRY(forward_layers(m, &p));
        if (done + T == n) TRY(m->be->rmsnorm_linear_forward(m->be, &head));
    }
    return m->be->read(m->be, logits, m->logits, m->be->dtype, m->V);
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

/* 0 if one of the two is zero. */
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

/* What the last forward left of layer l; x: room for 2 M C numbers. */
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

/* |x| / sqrt(n), of a parameter's elements at columns first ... first + C - 1 of rows of `row`. */
static gt_status param_size(hy_model *m, int param, int64_t first, int64_t row, double *x, double n, double *size) {
    double sum = 0;
    TRY(hy_model_read(m, HY_VALUE, param, x));
    for (int64_t i = 0; i < m->params[param].shown.count; i += row) sum += dot(x + i + first, x + i + first, m->C);
    *size = sqrt(sum / n);
    return GT_OK;
}

/* What the mix of layer l multiplies the branches by; x: room for 2 C C numbers and M. */
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

static gt_status probe_gains(hy_model *m, double *x, hy_probe *probe) {
    for (int l = 0; l < m->L; l++) {
        double gain[2];
        TRY(layer_gains(m, l, x, gain));
        for (int k = 0; k < 2; k++) probe->branch_gain[k] += gain[k] / (double)m->L;
    }
    return GT_OK;
}

/* The decoding states: wkv of all layers, then ssd of all layers. */
static gt_status read_states(const hy_model *m, double *x) {
    const int64_t wkv = m->L * wkv_numbers(m), ssd = m->L * ssm_numbers(m);
    TRY(m->be->read(m->be, x, m->decoding.wkv, GT_F32, wkv));
    return m->be->read(m->be, x + wkv, m->decoding.ssd, GT_F32, ssd);
}

/* early and late: room for the states. */
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
    TRY(upload_batch(m, tokens, targets));
    m->trained.M = 0;
    TRY(forward_all(m, &p));
    TRY(m->be->read(m->be, total, m->total, GT_F32, 3));
    probe->loss = total[1] > 0 ? total[0] / total[1] : 0;
    probe->entropy = total[1] > 0 ? total[2] / total[1] : 0;
    if (!isfinite(probe->loss)) probe->finite = 0;
    TRY(new_numbers(&x, room + m->V));
    gt_status status = GT_OK;
    for (int l = 0; l < m->L && status == GT_OK; l++) status = probe_layer(m, l, x, probe);
    if (status == GT_OK) status = probe_gains(m, x, probe);
    if (status == GT_OK) status = probe_states(m, tokens, x, x + states, x + room, probe);
    free(x);
    return status;
}
