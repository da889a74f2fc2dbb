/* Shared by the files of the model: its memory, its sizes, and how the layers are run.
 *
 * | file              | holds                                                               |
 * |-------------------|---------------------------------------------------------------------|
 * | hybrid_params.c   | configurations; parameters and their first values; tensors of files |
 * | hybrid_memory.c   | layout and size of memory; creation                                 |
 * | hybrid_args.h     | the operators' arguments, one function per operator                 |
 * | hybrid_layer.c    | forward and backward of a layer                                     |
 * | hybrid_model.c    | forward and backward of the model; the optimiser; decoding          |
 * | hybrid_probe.c    | results of forward, and numbers for the gates                       | */
#ifndef HYBRID_INSIDE_H
#define HYBRID_INSIDE_H

#include "hybrid_model.h"

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        gt_status status_ = (call);                                                                                    \
        if (status_ != GT_OK) return status_;                                                                          \
    } while (0)

static inline gt_status check_number(const char *name, int64_t value, int64_t min, int64_t max) {
    if (value >= min && value <= max) return GT_OK;
    return hy_fail(GT_ERROR_VALUE, "%s = %lld: must be %lld to %lld", name, (long long)value, (long long)min,
                   (long long)max);
}

/* Sizes that do not depend on the width C of the model. */
enum {
    MIX_RANK = 32,  /* rank of the projections that compute the lerps' offsets */
    DECAY_RANK = 64 /* rank of the projections that compute the decay */
};
enum { MIXES = 5 }; /* number of the token shift's lerps, in the order w, k, v, r, g */
enum { KEY, VALUE, RECEPTANCE, GATE, PROJECTIONS };

/* ---- the model ----------------------------------------------------------------------------- */

/* Indices of a layer's parameters, with their shapes; -1: the model has no such parameter. */
typedef struct layer_params {
    int norm;                                          /* [C] */
    int mu_x, mu;                                      /* [C] [5,C] */
    int mix_down, mix_up;                              /* [5*32,C] [5,C,32] */
    int decay_base, decay_down, decay_up;              /* [C] [64,C] [C,64] */
    int bonus, projections;                            /* [C] [4,C,C]: k v r g */
    int head_gamma, head_beta, rwkv_out;               /* [C] [C] [C,C] */
    int in, conv_weight, conv_bias;                    /* [2I+2S+Hm,C] [I+2S,W] [I+2S] */
    int dt_bias, A_log, Dskip, mamba_norm, mamba_out;  /* [Hm] [Hm] [Hm] [I] [C,I] */
    int select, dt;                                    /* only Mamba-1: [2S+R,I] [I,R].  Its other shapes: in [2I,C],
                                                          conv_... [I,W] [I], dt_bias [I], A_log [I,S], Dskip [I] */
    int gain_a, gain_b, gate_weight, gate_bias, joint; /* [C] [C] [2,C] [1] [C,C] or [C,2C] */
    int ffn_norm, up, down;                            /* [C] [F,C] [C,F]; -1 without FFN */
} layer_params;
enum { LAYER_PARAMS = sizeof(layer_params) / sizeof(int) };

/* Arrays of one layer that forward writes and backward reads.  Each has M rows.  void * arrays have the dtype of
 * activations. */
typedef struct layer_acts {
    void *x;               /* [M,C] input of the layer */
    void *norm;            /* [M,C] */
    void *shifted;         /* [M,C] input of the two low-rank projections that compute the lerps' offsets */
    void *lora;            /* [M,5*32] the values between the two projections */
    void *offsets;         /* [5,M,C] output of the second projection */
    void *mixed;           /* [5,M,C] the five lerps: w, k, v, r, g */
    void *decay_lora;      /* [M,64] */
    float *decay;          /* [M,C] input w of wkv6, fp32 */
    void *kvrg;            /* [4,M,C] */
    void *wkv, *wkv_gated; /* [M,C] */
    void *in;              /* [M,2I+2S+Hm]: z, x, B, C, dt; row stride in_row.  Mamba-1: [M,2I]: z, x */
    float *A;              /* [Hm]; Mamba-1: [I,S] */
    void *conv;            /* [M,I+2S]: x, B, C.  Mamba-1: [M,I]: x.  With conv_ssd only steps use it: [samples,I+2S] */
    void *select, *dt;     /* Mamba-1: [M,2S+R]: B, C and the low-rank input of dt; [M,I] */
    void *ssd, *ssd_gated; /* [M,I]; Mamba-1 has only ssd_gated */
    void *branches;        /* branch outputs a and b; branch_b below explains their layout */
    float *gate;           /* [M] */
    void *middle;          /* [M,C] after the mix */
    void *up, *act;        /* [M,F] */
    void *wkv_saved, *ssd_saved, *up_saved; /* `saved` of the operators; wkv_ssm saves both recurrences in wkv_saved */
} layer_acts;

/* Gradients of activations.  All layers share these arrays, one layer after the other. */
typedef struct grad_acts {
    void *x, *part;        /* [M,C] gradient of the residual stream; one contribution to that gradient */
    void *branches, *norm; /* as in layer_acts */
    void *act;             /* [M,F] */
    void *wkv_gated, *wkv; /* [M,C] */
    void *kvrg;            /* [4,M,C] */
    float *decay;          /* [M,C] fp32 */
    void *decay_cast;      /* [M,C] `decay` rounded to the dtype of activations */
    void *decay_lora;      /* [M,64] */
    void *mixed, *offsets; /* [5,M,C] */
    void *lora, *shifted;  /* [M,5*32] [M,C] */
    void *ssd_gated, *ssd; /* [M,I] */
    void *in;              /* as in layer_acts */
    void *conv;            /* as in layer_acts; conv_ssd needs none */
    void *select, *dt;
    float *A;
} grad_acts;

/* Recurrent states of B sequences in all layers, in fp32. */
typedef struct state_set {
    int64_t B;
    float *wkv;   /* [L,B,H,N,N] */
    float *ssd;   /* [L,B,Hm,P,S]; Mamba-1: [L,B,I,S] */
    float *conv;  /* [L,B,conv_rows,W-1] */
    float *shift; /* [L,B,C] */
} state_set;

/* One run of all layers: its sizes and its states. */
typedef struct pass {
    int64_t B, T, M;           /* sequences, tokens of each, and rows M = B T */
    const state_set *in, *out; /* in = NULL: starts from zero states; out = NULL: writes no final states */
    int keep_saved;            /* 1: forward writes the operators' `saved`, which backward needs */
    int step;                  /* 1: one token per sequence, and states are updated in place */
} pass;

/* A parameter and the function that computes its initial values. */
typedef struct param_info param_info;
typedef struct random_state random_state;
typedef void param_init(const hy_model *m, const param_info *p, random_state *r, double *x);
struct param_info {
    hy_param shown;
    param_init *init;
    double a, b; /* arguments of init */
    int layer;
    int64_t int8_at, scale_at; /* where its int8 weights and their scales begin; -1: it has none */
};

struct hy_model {
    hy_backend *be;
    hy_config config;
    int64_t V, B, T, M; /* vocabulary; rows, length and tokens of a batch */
    int64_t C, L, H, N; /* hidden, layers, RWKV heads and their size */
    int64_t I, Hm, P;   /* Mamba inner width, heads and their size */
    int64_t S, R, W;    /* Mamba state size; Mamba-1: rank of dt; width of the convolution */
    int64_t F;          /* width of the FFN; 0: layers have none */
    uint64_t seed;

    param_info *params;
    int param_count;
    int64_t param_total;
    int64_t int8_total, scale_total, plain_total;
    int embedding, final_norm, head; /* head [V,C]; the same index as embedding unless config.untied */
    layer_params layer[HY_MAX_LAYERS];

    void *memory;                  /* one allocation of the backend; it holds all arrays below */
    float *values, *grads, *m, *v; /* [param_total] */
    float *average;                /* [param_total], with config.average */
    void *copies;                  /* [param_total] 16-bit weights; fp32: none */
    int8_t *int8;                  /* [int8_total] with config.int8, as the two arrays below */
    float *scales;                 /* [scale_total] */
    float *plain_gamma;            /* [plain_total] HY_PLAIN_GAMMA */
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
    void *scratch; /* for hy_backend.scratch */
    size_t scratch_bytes;

    pass trained;   /* the latest forward pass, as long as its backward has not run; M = 0: none */
    pass latest;    /* config.recompute: the forward pass whose layer inputs are in memory; M = 0: not known */
    int held;       /* config.recompute: the layer whose activations are in memory; -1: not known */
    int accumulate; /* argument `accumulate` of the next backward */
    float loss_scale;
    double sums[3]; /* `total`, added up over the parts of the last step ... */
    int has_sums;   /* ... 1 if the step had several parts */
    int64_t steps;
    int judged;                                   /* 1: hy_model_result has been called for the last step */
    enum { UNTOUCHED, TOUCHED, UNKNOWN } weights; /* whether the last step has changed the weights */
    int has_int8;                                 /* 1: `int8` and `scales` have the current weights */
};

static inline int has_rwkv(const hy_model *m) { return m->config.mix != HY_MIX_MAMBA; }
static inline int has_mamba(const hy_model *m) { return m->config.mix != HY_MIX_RWKV; }
static inline int has_ffn(const hy_model *m) { return m->F > 0; }
static inline int is_mamba1(const hy_model *m) { return m->config.mamba == 1; }
/* With config.recompute all layers share one set of activations, and each layer keeps only its input. */
static inline int recomputes(const hy_model *m) { return m->config.recompute && !m->config.inference; }
static inline int is_single(const hy_model *m) { return !has_rwkv(m) || !has_mamba(m); }

/* Training may run both recurrences of a layer in one call.  Without a backward pass two separate calls take less
 * time and memory. */
static inline int has_wkv_ssm(const hy_model *m) {
    return !is_single(m) && !is_mamba1(m) && m->config.fuse == HY_WKV_SSM && !m->config.inference;
}
static inline int takes_wkv_ssm(const hy_model *m, const pass *p) { return has_wkv_ssm(m) && p->keep_saved; }
/* Returns whether training runs conv1d as a separate call.  A step for a single token always does. */
static inline int has_conv1d(const hy_model *m) { return has_mamba(m) && (is_mamba1(m) || has_wkv_ssm(m)); }

static inline int64_t in_rows(const hy_model *m) { return 2 * m->I + (is_mamba1(m) ? 0 : 2 * m->S + m->Hm); }
/* Row stride of the in-projection's output, in elements.  It is padded, so that each row begins at a multiple of 16
 * bytes. */
static inline int64_t in_row(const hy_model *m) { return (in_rows(m) + 7) / 8 * 8; }
static inline int64_t conv_rows(const hy_model *m) { return m->I + (is_mamba1(m) ? 0 : 2 * m->S); }
static inline int64_t select_row(const hy_model *m) { return 2 * m->S + m->R; }
/* Number of elements of A, and of the parameter A_log. */
static inline int64_t A_numbers(const hy_model *m) { return is_mamba1(m) ? m->I * m->S : m->Hm; }

/* Number of elements of one sequence's state in one layer. */
static inline int64_t wkv_numbers(const hy_model *m) { return has_rwkv(m) ? m->H * m->N * m->N : 0; }
static inline int64_t ssm_numbers(const hy_model *m) { return has_mamba(m) ? m->I * m->S : 0; }
static inline int64_t conv_numbers(const hy_model *m) { return has_mamba(m) ? conv_rows(m) * (m->W - 1) : 0; }
static inline int64_t shift_numbers(const hy_model *m) { return has_rwkv(m) ? m->C : 0; }

static inline size_t act_bytes(const hy_model *m) { return m->be->dtype == GT_F32 ? m->be->fp32_bytes : 2; }

/* The address of element `i` in an array of activations or of fp32 numbers. */
static inline void *act_at(const hy_model *m, void *acts, int64_t i) {
    return (char *)acts + i * (int64_t)act_bytes(m);
}
static inline float *fp32_at(const hy_model *m, float *numbers, int64_t i) {
    return (float *)(void *)((char *)numbers + i * (int64_t)m->be->fp32_bytes);
}

/* Layout of the two branch outputs.  The projection of the mix CP reads both, so they lie side by side in rows of 2C
 * elements.  Other mixes store all rows of a, then all rows of b.  A single branch has the array to itself. */
static inline int64_t branch_row(const hy_model *m) { return m->config.mix == HY_MIX_CONCAT ? 2 * m->C : m->C; }
static inline void *branch_b(const hy_model *m, const pass *p, void *branches) {
    if (!has_rwkv(m)) return branches;
    return act_at(m, branches, m->config.mix == HY_MIX_CONCAT ? m->C : p->M * m->C);
}
static inline int64_t branch_columns(const hy_model *m) { return is_single(m) ? m->C : 2 * m->C; }

/* ---- addresses of parameters and states ----------------------------------------------------- */

static inline float *value_of(const hy_model *m, int param) {
    return fp32_at(m, m->values, m->params[param].shown.offset);
}

static inline float *grad_of(const hy_model *m, int param) {
    return fp32_at(m, m->grads, m->params[param].shown.offset);
}

/* The address of a projection's weight in the dtype of activations: fp32, or the 16-bit copy. */
static inline void *weight_of(const hy_model *m, int param) {
    if (m->be->dtype == GT_F32) return value_of(m, param);
    return act_at(m, m->copies, m->params[param].shown.offset);
}

/* Bytes of an int8 weight.  The twins in double, which only tests run, read int8 weights as doubles, too. */
static inline int64_t int8_bytes(const hy_model *m) { return m->be->fp32_bytes == 4 ? 1 : (int64_t)m->be->fp32_bytes; }
/* The address of int8 weight i of a parameter, and its scales; NULL if it has none. */
static inline int8_t *int8_of(const hy_model *m, int param, int64_t i) {
    return m->params[param].int8_at < 0 ? NULL : m->int8 + (m->params[param].int8_at + i) * int8_bytes(m);
}
static inline float *scale_of(const hy_model *m, int param) {
    return m->params[param].scale_at < 0 ? NULL : fp32_at(m, m->scales, m->params[param].scale_at);
}
/* The number of rows of a matrix, and of its scales.  A parameter of several matrices has the rows of all. */
static inline int64_t matrix_rows(const hy_model *m, int param) {
    const hy_param *p = &m->params[param].shown;
    return p->count / p->shape[p->rank - 1];
}
/* Returns whether the pass p reads the int8 weights of a parameter. */
static inline int takes_int8(const hy_model *m, const pass *p, int param) {
    return p->step && m->has_int8 && m->params[param].int8_at >= 0;
}

/* The state of layer l in the set s; NULL if s is NULL. */
static inline float *wkv_state(const hy_model *m, const state_set *s, int l) {
    return s ? fp32_at(m, s->wkv, l * s->B * wkv_numbers(m)) : NULL;
}
static inline float *ssd_state(const hy_model *m, const state_set *s, int l) {
    return s ? fp32_at(m, s->ssd, l * s->B * ssm_numbers(m)) : NULL;
}
static inline float *conv_state(const hy_model *m, const state_set *s, int l) {
    return s ? fp32_at(m, s->conv, l * s->B * conv_numbers(m)) : NULL;
}
static inline float *shift_state(const hy_model *m, const state_set *s, int l) {
    return s ? fp32_at(m, s->shift, l * s->B * shift_numbers(m)) : NULL;
}

/* ---- ways of running the layers ------------------------------------------------------------- */

static inline pass training_pass(const hy_model *m) {
    int stateful = m->config.stateful;
    return (pass){.B = m->B,
                  .T = m->T,
                  .M = m->M,
                  .in = stateful ? &m->carried_in : NULL,
                  .out = stateful ? &m->carried_out : NULL,
                  .keep_saved = 1};
}
static inline pass evaluation_pass(const hy_model *m) { return (pass){.B = m->B, .T = m->T, .M = m->M}; }
static inline pass decoding_pass(const hy_model *m, int64_t T) {
    const int64_t B = m->config.samples;
    return (pass){.B = B, .T = T, .M = B * T, .in = &m->decoding, .out = &m->decoding, .step = T == 1};
}

/* ---- functions between the files ------------------------------------------------------- */

/* hybrid_params.c.  hy_params_round writes the 16-bit copies of the fp32 parameters, which the projections read.  It
 * also notes that the int8 weights are out of date. */
void hy_params_add(hy_model *m);
gt_status hy_params_init(hy_model *m);
gt_status hy_params_round(hy_model *m);

/* hybrid_memory.c */
gt_status hy_states_zero(const hy_model *m, const state_set *s);

/* hybrid_layer.c.  out [M,C] is the layer's output; out = NULL skips the layer's last product. */
gt_status hy_layer_forward(const hy_model *m, int l, const pass *p, void *out);
gt_status hy_layer_backward(const hy_model *m, int l);
/* Applies dropout to x [M,columns].  `site` numbers the places of dropout in the model; site 0 is the embedding. */
gt_status hy_dropout(const hy_model *m, const pass *p, int site, void *x, int64_t columns);
/* Runs layer l of the latest forward pass again, unless its activations are in memory. */
gt_status hy_layer_restore(hy_model *m, int l);

/* hybrid_model.c.  hy_forward runs all work from the uploaded tokens to the loss. */
gt_status hy_batch_upload(hy_model *m, const int32_t *tokens, const int32_t *targets);
gt_status hy_forward(hy_model *m, const pass *p);

#endif
