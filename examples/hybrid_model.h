/* The RWKV-6 + Mamba-2 hybrid language model: parameters, forward, backward, optimiser step, decoding.
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
 *               x = x + GELU(RMSNorm(x) W_up) W_down  the FFN, 4 C wide by default; some models have none
 *   logits = RMSNorm(x) head^T                        head = embedding, unless config.untied is set
 *
 * Sources: Peng et al. 2024, arXiv:2404.05892 (RWKV-6 "Finch"); Dao and Gu 2024, arXiv:2405.21060
 * (Mamba-2); Gu and Dao 2023, arXiv:2312.00752 (Mamba-1; here the rank of dt is rounded up to a multiple of 8).
 *
 * The code runs on any hy_backend.  hy_model_create allocates all memory, in one piece.  Functions return a gt_status;
 * after a failure hy_last_error() gives the reason.  Array arguments are host memory. */
#ifndef HYBRID_MODEL_H
#define HYBRID_MODEL_H

#include "hybrid_ops.h"
#include "hybrid_ranks.h"

/* ---- configuration ------------------------------------------------------------------------- */

/* How a layer mixes the outputs a (RWKV) and b (Mamba) of its two branches.  Each comment begins with the mix's name
 * in the model list. */
typedef enum hy_mix {
    HY_MIX_NORM,     /* HY: gain_a . RMSNorm(a) + gain_b . RMSNorm(b), gains per channel */
    HY_MIX_GATE,     /* GF: g a + (1-g) b, g = sigmoid(weight . [a; b] + bias) per token */
    HY_MIX_SCALAR,   /* WS: alpha a + (1-alpha) b, one number per layer */
    HY_MIX_RESIDUAL, /* RF: a + P b, P [C,C] */
    HY_MIX_CONCAT,   /* CP: P [a; b], P [C,2C] */
    HY_MIX_RWKV,     /* RWKV-6: a alone */
    HY_MIX_MAMBA     /* Mamba-1, Mamba-2: b alone */
} hy_mix;

/* Which operators a layer with an RWKV and a Mamba-2 branch runs as one fused call.  The results are the same.  A
 * layer with Mamba-2 alone always uses conv_ssd. */
typedef enum hy_fuse {
    HY_WKV_SSM, /* training fuses wkv6 and ssd; conv1d is a separate call, and every layer keeps conv1d's output */
    HY_CONV_SSD /* fuses conv1d and ssd; this takes less memory, since backward computes the convolution again */
} hy_fuse;

typedef struct hy_config {
    const char *name;  /* "HY", "GF", ... */
    const char *about; /* one line for people */
    hy_mix mix;
    int hidden;   /* C, a multiple of 16 */
    int layers;   /* 1 to HY_MAX_LAYERS */
    int heads;    /* number of RWKV heads, each of hidden / heads channels; 0 = chosen from hidden */
    float share;  /* initial weight of the RWKV branch, in (0,1); Mamba gets 1 - share */
    int stateful; /* 1: states are carried from batch to batch, see `keep` below */
    /* In all fields below 0 means the default; the comments end with it. */
    int mamba;      /* Mamba version: 2, or 1, which uses selective_scan instead of ssd.  Default 2 */
    int state;      /* Mamba state size, a multiple of 8 up to 256.  Default 64; Mamba-1: 16 */
    int expand;     /* Mamba inner width divided by hidden, 1 to 8.  Default 2 */
    int mamba_head; /* channels of a Mamba-2 head.  Default 64; 32 or 16 if 64 does not divide the inner width */
    int conv;       /* width of the convolution, 2 to 4.  Default 4 */
    int ffn;        /* FFN width divided by hidden, 1 to 16, or HY_NO_FFN.  Default 4 */
    int untied;     /* 1: the output head has a weight of its own.  Default: its weight is the embedding */
    int inference;  /* 1: forward only.  No gradients, no optimiser; all layers share one set of activations */
    int samples;    /* sequences that decode at once, at most the batch.  Default 1 */
    hy_fuse fuse;
    float dropout; /* share of the outputs of embedding, branches and FFN that training sets to 0; 0: no dropout */
    int average;   /* 1: keep a moving average of the weights, see hy_model_average */
    int int8;      /* 1: has room for the weights of hy_model_quantise.  Needs inference, and at most HY_INT8_SAMPLES */
    int recompute; /* 1: forward keeps only each layer's input, and backward runs the layer again.  Same results */
} hy_config;

enum { HY_MAX_LAYERS = 128 };
enum { HY_NO_FFN = -1 };
enum { HY_INT8_SAMPLES = 64 }; /* most samples that decode with int8 weights: the rows of gt_rmsnorm_linear_step */

/* Fills in the defaults and checks every field. */
gt_status hy_config_resolve(hy_config *config);

/* The models that --model can name; *count is their number. */
const hy_config *hy_model_list(int *count);

/* ---- parameters and memory ----------------------------------------------------------------- */

/* Parameter groups; hy_result has a gradient norm for each.  HY_EMBED holds the embedding and an untied head.
 * HY_MIXING holds the gains, gates and projections that join the branches. */
enum { HY_EMBED, HY_NORM, HY_RWKV, HY_MAMBA, HY_MIXING, HY_FFN };
extern const char *const hy_group_names[HY_GROUPS]; /* "embed", "norm", "rwkv", ... */

typedef struct hy_param {
    char name[48]; /* "layers.0.rwkv.receptance" */
    int group;     /* HY_EMBED or another group */
    int decay;     /* 1: weight decay applies */
    int rank;      /* 1 to 3 */
    int64_t shape[3];
    int64_t offset; /* first element in the array of all parameters */
    int64_t count;  /* elements */
} hy_param;

/* Parameter counts, and bytes of backend memory by purpose. */
typedef struct hy_plan {
    int64_t parameters, non_embedding; /* number of parameters in all, and without embedding and head */
    int64_t group[HY_GROUPS];          /* number of parameters in each group */
    size_t weights;                    /* fp32 parameters, their 16-bit copies and int8 weights, if there are any */
    size_t gradients, optimizer;
    size_t activations; /* kept for backward */
    size_t backward;    /* gradients of activations; all layers share them */
    size_t states;      /* recurrent states of carried tracks and of decoding */
    size_t workspace;   /* scratch of the operators */
    size_t total;
} hy_plan;

typedef struct hy_model hy_model;

/* Computes the memory that hy_model_create would need, without allocating any.  A batch has B tracks of T tokens. */
gt_status hy_model_plan(hy_backend *backend, const hy_config *config, int vocab, int B, int T, hy_plan *plan);

/* Creates a model with initial parameters, which are the same on every backend.  The backend must outlive the model. */
gt_status hy_model_create(hy_backend *backend, const hy_config *config, int vocab, int B, int T, uint64_t seed,
                          hy_model **model);
void hy_model_destroy(hy_model *model); /* model may be NULL */

/* The configuration with all defaults filled in. */
const hy_config *hy_model_config(const hy_model *model);

int hy_model_param_count(const hy_model *model); /* number of tensors */
const hy_param *hy_model_param(const hy_model *model, int i);

typedef enum hy_value { HY_VALUE, HY_GRADIENT } hy_value;
gt_status hy_model_read(hy_model *model, hy_value what, int i, double *numbers);
gt_status hy_model_write(hy_model *model, int i, const double *numbers); /* writes HY_VALUE, the weights */

/* ---- training ------------------------------------------------------------------------------ */

typedef struct hy_optimizer {
    float lr, beta1, beta2, eps, weight_decay;
    float max_norm;   /* gradient clipping, 0 = none */
    float loss_scale; /* for fp16 activations; 0 means 1; only hy_model_train reads it */
    int parts;        /* number of batches whose gradients hy_model_train adds up; 0 means 1 */
    uint64_t drop;    /* seed of this step's dropout */
    hy_ranks *ranks;  /* hy_model_train adds up the gradients of all ranks; NULL: there is one rank */
    int64_t window;   /* index of this rank's first window in the whole batch; 0 without ranks */
    int64_t targets;  /* number of targets >= 0 of all ranks together; read only if `ranks` is set */
} hy_optimizer;

typedef struct hy_result {
    double loss;                /* mean over the targets that count */
    double entropy;             /* mean entropy of the predicted distributions */
    int64_t targets;            /* number of targets that counted */
    double norm[HY_GROUPS + 1]; /* 2-norm of the gradient before clipping: by group, then of all groups */
    double ratio;               /* RWKV norm divided by Mamba norm; NAN if the model has only one branch */
    int skipped;                /* 1: the gradient was not finite, so the parameters did not change */
} hy_result;

/* One training step: forward, backward, AdamW.  May return before the work is done.
 *
 * tokens, targets  [B,T]; a target below 0 does not count.
 *                  With optimizer->parts [parts,B,T]: one step on parts * B tracks, in the memory that B tracks need.
 *                  Stateful models cannot use parts.
 *                  With optimizer->ranks every rank passes its own windows; hy_model_result covers all ranks.
 * keep             [B], for stateful models.  0: the track starts from zero states.  Other values: the track continues
 *                  from the states after its previous training batch.  NULL: every track starts from zero. */
gt_status hy_model_train(hy_model *model, const int32_t *tokens, const int32_t *targets, const int32_t *keep,
                         const hy_optimizer *optimizer);

/* Says whether a failed step left the model unchanged; call it after hy_model_train failed.  Returns 1 if the step
 * changed neither the weights nor AdamW's moments; the model is then in its state before the step.  Returns 0 if
 * that is not known, or if states are carried. */
int hy_model_take_back(hy_model *model);

/* Waits for the last step or forward pass, and gives its results.  The norms belong to the last step.  The other
 * fields belong to the last call that computed a loss: a step, an evaluation or a probe. */
gt_status hy_model_result(hy_model *model, hy_result *result);

/* The three parts of a step, for gradient accumulation and for tests.  hy_model_backward computes the gradient of
 * the last forward's mean loss.  It overwrites the stored gradient; accumulate = 1 adds to the stored gradient
 * instead.  It also overwrites activations, so each forward allows one backward. */
gt_status hy_model_forward(hy_model *model, const int32_t *tokens, const int32_t *targets, const int32_t *keep);
gt_status hy_model_backward(hy_model *model, int accumulate);
gt_status hy_model_update(hy_model *model, const hy_optimizer *optimizer);

/* Runs the forward pass of training, for timing.  It keeps what backward needs, but no backward may follow.  tokens
 * = NULL uses the tokens and targets of the previous call. */
gt_status hy_model_loss(hy_model *model, const int32_t *tokens, const int32_t *targets, const int32_t *keep);

/* Runs forward and backward in one call, as hy_model_train does.  tokens = NULL uses the tokens and targets of the
 * previous call. */
gt_status hy_model_gradient(hy_model *model, const int32_t *tokens, const int32_t *targets, const int32_t *keep);

/* Computes the norms of the current gradient for hy_model_result, without an update.  The caller must already have
 * called hy_model_result for the last step. */
gt_status hy_model_grad_norm(hy_model *model);

/* Sets the loss scale of hy_model_backward until the next hy_model_train or hy_model_update.  The scale starts as 1. */
gt_status hy_model_scale_loss(hy_model *model, float scale);

/* Computes the loss of a batch from zero states, without gradients.  Carried states and parameters do not change.
 * Adds to *loss_sum and *targets_counted, so that batches of different sizes average correctly. */
gt_status hy_model_eval(hy_model *model, const int32_t *tokens, const int32_t *targets, double *loss_sum,
                        int64_t *targets_counted);

/* Runs forward from zero states to the logits, and keeps nothing for backward.  tokens = NULL uses the tokens of the
 * previous call.  May return before the work is done. */
gt_status hy_model_infer(hy_model *model, const int32_t *tokens);

/* Updates the moving average of the weights: average = decay * average + (1 - decay) * weights.  The model needs
 * config.average. */
gt_status hy_model_average(hy_model *model, double decay);
/* Swaps the weights and their moving average. */
gt_status hy_model_exchange(hy_model *model);

/* ---- the contents of a model file ------------------------------------------------------------
 * A model file holds the parameters and AdamW's two moments.  It also holds the moving average of the weights if the
 * model keeps one.  For stateful models it holds the states after the last training batch.  One parameter may become
 * several tensors of the file, for example one per projection. */
typedef enum hy_kind { HY_WEIGHT, HY_MOMENT, HY_AVERAGE, HY_STATE } hy_kind;

typedef struct hy_tensor {
    char name[80]; /* "layers.0.rwkv.key", "optimizer.exp_avg.layers.0.rwkv.key" */
    hy_kind kind;
    int rank;
    int64_t shape[5], count;
    float *data; /* memory of the backend */
} hy_tensor;

/* Lists all tensors of a model file, weights first; *count is their number.  The caller frees the list.  Returns
 * NULL if memory is short. */
hy_tensor *hy_model_tensors(const hy_model *model, int *count);

gt_status hy_model_read_tensor(hy_model *model, const hy_tensor *tensor, double *numbers);
/* Writes one tensor of the model.  Call hy_model_written after the last weight. */
gt_status hy_model_write_tensor(hy_model *model, const hy_tensor *tensor, const double *numbers);
gt_status hy_model_written(hy_model *model);

/* Returns the number of steps that AdamW took.  The caller must already have called hy_model_result for the last
 * step. */
int64_t hy_model_steps(const hy_model *model);
void hy_model_set_steps(hy_model *model, int64_t steps);

/* ---- what forward computed ---------------------------------------------------------------------
 * The activations of the last forward.  They are valid until backward, which overwrites them. */
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
 * The model decodes config.samples sequences, with states separate from training.  The cost of a token does not depend
 * on the number of tokens before it. */

/* Starts new sequences: sets the decoding states to zero. */
gt_status hy_model_reset(hy_model *model);

/* Appends n >= 1 tokens to each sequence, and gives the logits after the last of them.  tokens is [samples, n],
 * logits is [samples, vocab].  For n = 1 a backend may record the work and replay it for later tokens. */
gt_status hy_model_feed(hy_model *model, const int32_t *tokens, int n, double *logits);

/* Rounds the large matrices to int8, with one fp32 scale for each row, as gt_quantize_int8 defines it.  From then on a
 * decoding step of one token reads these int8 weights.  All other passes, prompts included, read the same rounded
 * weights in the dtype of activations.  The embedding is rounded, too, if the head is tied to it.  The low-rank
 * projections keep their weights: those of the token shift and of the decay, and those to B, C and dt in Mamba-1.
 *
 * The model needs config.int8.  A model whose weights are written later decodes with these until the next call.  A
 * failed call may have rounded some of the weights. */
gt_status hy_model_quantise(hy_model *model);

/* The smallest number of bytes that one decoding step of all sequences can move.  The step reads each weight once,
 * and reads and writes each state once. */
double hy_model_token_bytes(const hy_model *model);

/* ---- gates --------------------------------------------------------------------------------- */

/* Measurements for the gates (health checks of a model), taken on one batch from zero states. */
typedef struct hy_probe {
    double loss, entropy;       /* as in hy_result */
    int finite;                 /* 1: every activation that the probe read is finite */
    int has[2];                 /* 1: the model has this branch; 0: the branch's other entries are 0.
                                   Index 0 is RWKV and index 1 is Mamba, here and in all arrays below */
    double state_rms[2];        /* root mean square of the states after the first window, the smallest over layers */
    int state_tokens;           /* tokens in the second half of the first window: 0 if the window has one token */
    double state_cosine[2];     /* cosine between the states after half of the first window and after all of it,
                                   the largest over layers; 1 means that the state stopped changing */
    double activation_variance; /* variance of the layer outputs, the smallest over layers */
    double branch_rms[2];       /* root mean square of the branch output, mean over layers */
    double branch_cosine;       /* cosine of the branch outputs a and b, mean over tokens and layers */
    double branch_gain[2];      /* gain that the mix gives to the branch, mean over layers.
                                   HY: root mean square of the gains.  GF: mean over tokens of g and 1-g.
                                   WS: alpha and 1-alpha.  RF and CP: Frobenius norm of P divided by sqrt(C),
                                   which is 1 for the identity; RF has 1 for RWKV */
} hy_probe;

/* Measures the model on one batch.  It overwrites the decoding states, so config.samples must be 1, and
 * hy_model_reset must follow. */
gt_status hy_model_probe(hy_model *model, const int32_t *tokens, const int32_t *targets, hy_probe *probe);

#endif
