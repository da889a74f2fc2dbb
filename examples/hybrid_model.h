/* The RWKV-6 + Mamba-2 hybrid language model: parameters, forward, backward, optimiser step,
 * decoding.
 *
 *   x = embedding[token]
 *   per layer:  n = RMSNorm(x)
 *               a = RWKV-6 time mix of n              token shift with ddlerp, decay LoRA, wkv6,
 *                                                     norm per head . SiLU(g), projection
 *               b = Mamba-2 mixer of n                in-projection to z,x,B,C,dt, conv1d, ssd,
 *                                                     gated RMSNorm, out-projection
 *               or Mamba-1 of n                       in-projection to z,x, conv1d, projections to
 *                                                     B,C,dt, selective_scan, out-projection
 *               x = x + mix(a, b)                     one of seven ways, see hy_mix
 *               x = x + GELU(RMSNorm(x) W_up) W_down  4 times the width, unless said otherwise
 *   logits = RMSNorm(x) embedding^T
 *
 * Sources: Peng et al. 2024, arXiv:2404.05892 (RWKV-6 "Finch"); Dao and Gu 2024, arXiv:2405.21060
 * (Mamba-2); Gu and Dao 2023, arXiv:2312.00752 (Mamba-1; the rank of dt is rounded up to 8).  The code runs on any
 * hy_backend.  All memory is allocated by hy_model_create, in one piece.  Functions return a gt_status; the reason of a
 * failure is in hy_last_error().  Arrays in these signatures are host memory. */
#ifndef HYBRID_MODEL_H
#define HYBRID_MODEL_H

#include "hybrid_ops.h"
#include "hybrid_ranks.h"

/* ---- configuration ------------------------------------------------------------------------- */

/* How the two branches are mixed; the registry's names for it. */
typedef enum hy_mix {
    HY_MIX_NORM,     /* HY: gain_a . RMSNorm(a) + gain_b . RMSNorm(b), gains per channel */
    HY_MIX_GATE,     /* GF: g a + (1-g) b, g = sigmoid(weight . [a; b] + bias) per token */
    HY_MIX_SCALAR,   /* WS: alpha a + (1-alpha) b, one number per layer */
    HY_MIX_RESIDUAL, /* RF: a + P b, P [C,C] */
    HY_MIX_CONCAT,   /* CP: P [a; b], P [C,2C] */
    HY_MIX_RWKV,     /* RWKV-6: a alone */
    HY_MIX_MAMBA     /* Mamba-1, Mamba-2: b alone */
} hy_mix;

/* Which operators of a layer with both branches, the second of them Mamba-2, are one call.  The numbers are the same.
 * Mamba-2 alone takes conv_ssd in any case. */
typedef enum hy_fuse {
    HY_WKV_SSM, /* in training wkv6 and ssd; conv1d is a call of its own, whose output every layer keeps */
    HY_CONV_SSD /* conv1d and ssd: less memory; backward convolves again */
} hy_fuse;

typedef struct hy_config {
    const char *name;  /* "HY", "GF", ... */
    const char *about; /* one line for people */
    hy_mix mix;
    int hidden;   /* C, a multiple of 16 */
    int layers;   /* 1 to HY_MAX_LAYERS */
    int heads;    /* RWKV heads, of hidden / heads channels; 0 = chosen from hidden */
    float share;  /* initial weight of the RWKV branch, in (0,1); Mamba gets 1 - share */
    int stateful; /* 1: states are carried from batch to batch, see `keep` below */
    /* 0 in all that follow: the default */
    int mamba;      /* 2, or 1: the selective scan in the place of ssd */
    int state;      /* Mamba state size, a multiple of 8 up to 256: 64, of Mamba-1 16 */
    int expand;     /* Mamba inner width over hidden, 1 to 8: 2 */
    int mamba_head; /* channels of a Mamba-2 head: 64, or 32 or 16 where that does not divide */
    int conv;       /* width of the convolution, 2 to 4: 4 */
    int ffn;        /* FFN width over hidden, 1 to 16: 4 */
    int inference;  /* 1: no gradients and no optimiser, and all layers share their activations: forward alone */
    int samples;    /* sequences that decode at once, at most the batch: 1 */
    hy_fuse fuse;
    float dropout; /* share of numbers that training leaves out: of the embedding, the branches and the FFN; 0: none */
    int average;   /* 1: keep a moving average of the weights, see hy_model_average */
    int recompute; /* 1: forward keeps each layer's input alone; backward runs the layer again.  The same numbers */
} hy_config;

enum { HY_MAX_LAYERS = 128 };

/* Fills in the defaults and checks all. */
gt_status hy_config_resolve(hy_config *config);

/* The models that --model can name, *count of them. */
const hy_config *hy_model_list(int *count);

/* ---- parameters and memory ----------------------------------------------------------------- */

/* Groups for gradient norms.  mix: gains, gates and projections that join the branches. */
enum { HY_EMBED, HY_NORM, HY_RWKV, HY_MAMBA, HY_MIXING, HY_FFN };
extern const char *const hy_group_names[HY_GROUPS]; /* "embed", "norm", "rwkv", ... */

typedef struct hy_param {
    char name[48]; /* "layers.0.rwkv.receptance" */
    int group;     /* HY_EMBED ... */
    int decay;     /* 1: weight decay applies */
    int rank;      /* 1 to 3 */
    int64_t shape[3];
    int64_t offset; /* first element in the array of all parameters */
    int64_t count;  /* elements */
} hy_param;

/* Bytes of backend memory by purpose, and parameter counts. */
typedef struct hy_plan {
    int64_t parameters, non_embedding; /* counts */
    int64_t group[HY_GROUPS];          /* parameters by group */
    size_t weights;                    /* fp32 parameters and, with 16-bit activations, their copies */
    size_t gradients, optimizer;
    size_t activations; /* kept for backward */
    size_t backward;    /* gradients of activations, one layer's worth */
    size_t states;      /* recurrent states: carried tracks, decoding */
    size_t workspace;   /* scratch of the operators */
    size_t total;
} hy_plan;

typedef struct hy_model hy_model;

/* The memory that hy_model_create would need; allocates nothing.  B tracks of T tokens per batch. */
gt_status hy_model_plan(hy_backend *backend, const hy_config *config, int vocab, int B, int T, hy_plan *plan);

/* A model with freshly initialised parameters, the same for every backend.  The backend must
 * outlive the model. */
gt_status hy_model_create(hy_backend *backend, const hy_config *config, int vocab, int B, int T, uint64_t seed,
                          hy_model **model);
void hy_model_destroy(hy_model *model); /* NULL is fine */

/* The configuration with all defaults filled in. */
const hy_config *hy_model_config(const hy_model *model);

int hy_model_param_count(const hy_model *model); /* number of tensors */
const hy_param *hy_model_param(const hy_model *model, int i);

typedef enum hy_value { HY_VALUE, HY_GRADIENT } hy_value;
gt_status hy_model_read(hy_model *model, hy_value what, int i, double *numbers);
gt_status hy_model_write(hy_model *model, int i, const double *numbers); /* values only */

/* ---- training ------------------------------------------------------------------------------ */

typedef struct hy_optimizer {
    float lr, beta1, beta2, eps, weight_decay;
    float max_norm;   /* gradient clipping, 0 = none */
    float loss_scale; /* for fp16 activations; 0 = 1.  hy_model_train only */
    int parts;        /* batches whose gradients hy_model_train adds up; 0 = 1 */
    uint64_t drop;    /* chooses what dropout leaves out in this step */
    hy_ranks *ranks;  /* hy_model_train adds up the gradients of all ranks; NULL: there is one */
    int64_t window;   /* the first window of this rank among those of all ... */
    int64_t targets;  /* ... and how many targets of all ranks count; with ranks alone */
} hy_optimizer;

typedef struct hy_result {
    double loss;                /* mean over the targets that count */
    double entropy;             /* mean entropy of the predicted distributions */
    int64_t targets;            /* how many counted */
    double norm[HY_GROUPS + 1]; /* 2-norm of the gradient by group, then of all; before clipping */
    double ratio;               /* RWKV / Mamba of these norms; NAN if the model has one of them alone */
    int skipped;                /* 1: the gradient was not finite, the parameters did not change */
} hy_result;

/* One training step: forward, backward, AdamW.  tokens and targets [B,T]; a target below 0 does not
 * count.  With optimizer->parts, [parts,B,T]: a step of one batch of parts B tracks, in the memory of B; not for
 * stateful models.  With optimizer->ranks every rank passes its own windows; hy_model_result tells the numbers of all.
 * keep [B], for stateful models: 0 starts the track from zero states, else it goes on where
 * its previous training batch ended; NULL = all from zero.  May return before the work is done. */
gt_status hy_model_train(hy_model *model, const int32_t *tokens, const int32_t *targets, const int32_t *keep,
                         const hy_optimizer *optimizer);

/* After hy_model_train failed: 1 if the weights and AdamW's moments are still from the step before; then the model is
 * as if it had not been called.  0 if that is not known, or if states are carried. */
int hy_model_take_back(hy_model *model);

/* Waits for the last step, or forward, and tells its numbers (the norms: of the last step).  An
 * evaluation or probe in between overwrites all but the norms. */
gt_status hy_model_result(hy_model *model, hy_result *result);

/* The three parts of a step, for gradient accumulation and for tests.  backward writes the gradient
 * of the mean loss of the last forward, or adds it with accumulate = 1, and uses up the
 * activations: one backward per forward. */
gt_status hy_model_forward(hy_model *model, const int32_t *tokens, const int32_t *targets, const int32_t *keep);
gt_status hy_model_backward(hy_model *model, int accumulate);
gt_status hy_model_update(hy_model *model, const hy_optimizer *optimizer);

/* Forward to the loss with all that a backward would need, which may not follow.  tokens NULL: as for
 * hy_model_gradient. */
gt_status hy_model_loss(hy_model *model, const int32_t *tokens, const int32_t *targets, const int32_t *keep);

/* Forward and backward in one, the way hy_model_train does them.  tokens NULL: those, and the
 * targets, that the model was last given. */
gt_status hy_model_gradient(hy_model *model, const int32_t *tokens, const int32_t *targets, const int32_t *keep);

/* Computes the norms of the gradient at hand for hy_model_result, without an update.  The result of
 * the last step has to be known. */
gt_status hy_model_grad_norm(hy_model *model);

/* The loss scale of backward until the next hy_model_train or hy_model_update; at first it is 1. */
gt_status hy_model_scale_loss(hy_model *model, float scale);

/* Loss of a batch from zero states, without gradients; carried states and parameters do not change.
 * Adds to *loss_sum and *targets_counted, so that unequal batches average correctly. */
gt_status hy_model_eval(hy_model *model, const int32_t *tokens, const int32_t *targets, double *loss_sum,
                        int64_t *targets_counted);

/* Forward to the logits alone, from zero states, keeping nothing for backward.  tokens NULL: as for
 * hy_model_gradient.  May return before the work is done. */
gt_status hy_model_infer(hy_model *model, const int32_t *tokens);

/* average = decay average + (1 - decay) weights; config.average. */
gt_status hy_model_average(hy_model *model, double decay);
/* The weights and their average change places. */
gt_status hy_model_exchange(hy_model *model);

/* ---- the contents of a model file ------------------------------------------------------------
 * Its parameters, which here may be cut into several tensors, such as one per projection; AdamW's
 * two moments of each; their average, if one is kept; and, if stateful, the states that the last training batch left.
 * */
typedef enum hy_kind { HY_WEIGHT, HY_MOMENT, HY_AVERAGE, HY_STATE } hy_kind;

typedef struct hy_tensor {
    char name[80]; /* "layers.0.rwkv.key", "optimizer.exp_avg.layers.0.rwkv.key" */
    hy_kind kind;
    int rank;
    int64_t shape[5], count;
    float *data; /* memory of the backend */
} hy_tensor;

/* All tensors, *count of them, weights first, in a list that the caller frees; NULL: no memory. */
hy_tensor *hy_model_tensors(const hy_model *model, int *count);

gt_status hy_model_read_tensor(hy_model *model, const hy_tensor *tensor, double *numbers);
/* After weights were written, hy_model_written is due. */
gt_status hy_model_write_tensor(hy_model *model, const hy_tensor *tensor, const double *numbers);
gt_status hy_model_written(hy_model *model);

/* Steps that AdamW took; the last result has to be known. */
int64_t hy_model_steps(const hy_model *model);
void hy_model_set_steps(hy_model *model, int64_t steps);

/* ---- what forward computed ---------------------------------------------------------------------
 * The activations of the last forward, up to the backward that uses them up. */
typedef struct hy_activation {
    char name[48]; /* "layers.0.rwkv.wkv" */
    int64_t count;
    const void *data; /* memory of the backend */
    gt_dtype dtype;
} hy_activation;

int hy_model_activation_count(const hy_model *model);
hy_activation hy_model_activation(const hy_model *model, int i); /* 0 to count - 1 */
gt_status hy_model_read_activation(hy_model *model, int i, double *numbers);

/* ---- decoding ---------------------------------------------------------------------------------
 * config.samples sequences with states of their own.  The cost of a token does not depend on how many came before.
 */

/* Starts new sequences. */
gt_status hy_model_reset(hy_model *model);

/* Appends n >= 1 tokens to each sequence, tokens [samples, n], and gives the logits [samples, vocab] after the last
 * one.  A backend may record the work of a single token, and replay it for later ones. */
gt_status hy_model_feed(hy_model *model, const int32_t *tokens, int n, double *logits);

/* Bytes that one more token of all sequences moves at least: each weight is read once, each state read and written. */
double hy_model_token_bytes(const hy_model *model);

/* ---- gates --------------------------------------------------------------------------------- */

/* Numbers for the health checks of a model, on one batch from zero states. */
typedef struct hy_probe {
    double loss, entropy;       /* as in hy_result */
    int finite;                 /* 1: every activation looked at is finite */
    int has[2];                 /* RWKV, Mamba: the model has this branch; of another all is 0 */
    double state_rms[2];        /* RWKV, Mamba: root mean square of that track's states after all of
                                   the window, the smallest over layers */
    int state_tokens;           /* in the second half of the window: 0 if it has one token only */
    double state_cosine[2];     /* RWKV, Mamba: cosine of the states after half and all of the first
                                   track, the largest over layers: 1 = a state that stopped changing */
    double activation_variance; /* variance of the layer outputs, the smallest over layers */
    double branch_rms[2];       /* RWKV, Mamba: root mean square of the branch output, mean of layers */
    double branch_cosine;       /* mean over tokens and layers of the cosine of a and b */
    double branch_gain[2];      /* RWKV, Mamba: the mix's gain of the branch, mean of layers.
                              HY: root mean square of the gains; GF: mean over tokens of g and 1-g;
                              WS: alpha and 1-alpha; RF and CP: |P| / sqrt(C) in the 2-norm of its
                              numbers, which is 1 for the identity; RF: 1 for RWKV */
} hy_probe;

/* Uses the decoding sequence, which has to be the only one: reset it afterwards. */
gt_status hy_model_probe(hy_model *model, const int32_t *tokens, const int32_t *targets, hy_probe *probe);

#endif
