/* The functions of hybrid_model.h that concern the whole model: forward to the loss, backward, the optimiser,
 * decoding.  hybrid_inside.h lists the files that hold the other functions. */
#include "hybrid_args.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

const hy_config *hy_model_config(const hy_model *m) { return &m->config; }

/* Adds the number of the layer to the error message. */
static gt_status in_layer(gt_status status, int l) {
    return status == GT_OK ? GT_OK : hy_fail(status, "layer %d: %s", l, hy_last_error());
}

/* Runs forward from the uploaded tokens to the output of the last layer. */
static gt_status forward_layers(hy_model *m, const pass *p) {
    hy_embedding_args embedding = embedding_of(m, p);
    m->latest = *p, m->held = -1;
    m->be->window = p->in == &m->decoding ? 0 : p->T;
    m->be->at = (hy_place){"forward", "embedding"};
    TRY(m->be->embedding_forward(m->be, &embedding));
    TRY(hy_dropout(m, p, 0, m->acts[0].x, m->C));
    for (int l = 0; l < m->L; l++)
        TRY(in_layer(hy_layer_forward(m, l, p, l + 1 < m->L ? m->acts[l + 1].x : m->x_last), l));
    m->held = (int)m->L - 1;
    return GT_OK;
}

/* Runs forward_layers, then the head and the loss. */
gt_status hy_forward(hy_model *m, const pass *p) {
    gt_rmsnorm_linear_args head = head_of(m, p);
    hy_cross_entropy_args loss = cross_entropy_of(m, p);
    TRY(forward_layers(m, p));
    m->be->at.part = "head";
    TRY(m->be->rmsnorm_linear_forward(m->be, &head));
    return m->be->cross_entropy_forward(m->be, &loss);
}

/* Sets carried_in to carried_out for tracks with keep = 1, and to 0 for other tracks. */
static gt_status carry_states(const hy_model *m) {
    m->be->at = (hy_place){"forward", "states"};
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

gt_status hy_batch_upload(hy_model *m, const int32_t *tokens, const int32_t *targets) {
    TRY(upload_tokens(m, tokens));
    TRY(check_tokens(m, "targets", targets, m->M, INT32_MIN));
    return m->be->upload(m->be, m->targets, targets, (size_t)m->M * sizeof *targets);
}

static gt_status upload_keep(hy_model *m, const int32_t *keep) {
    size_t bytes = (size_t)m->B * sizeof *keep;
    if (!m->config.stateful) return GT_OK;
    return keep ? m->be->upload(m->be, m->keep, keep, bytes) : m->be->zero(m->be, m->keep, bytes);
}

/* Runs forward on the uploaded training batch. */
static gt_status forward_training(hy_model *m) {
    if (m->config.inference)
        return hy_fail(GT_ERROR_UNSUPPORTED, "the model was made for inference: it keeps nothing for backward");
    m->trained = training_pass(m);
    if (m->config.stateful) TRY(carry_states(m));
    return hy_forward(m, &m->trained);
}

gt_status hy_model_forward(hy_model *m, const int32_t *tokens, const int32_t *targets, const int32_t *keep) {
    TRY(hy_batch_upload(m, tokens, targets));
    TRY(upload_keep(m, keep));
    return forward_training(m);
}

gt_status hy_model_eval(hy_model *m, const int32_t *tokens, const int32_t *targets, double *loss_sum,
                        int64_t *targets_counted) {
    pass p = evaluation_pass(m);
    double total[3];
    TRY(hy_batch_upload(m, tokens, targets));
    m->trained.M = 0; /* the forward pass below overwrites its activations */
    m->has_sums = 0;
    TRY(hy_forward(m, &p));
    TRY(m->be->read(m->be, total, m->total, GT_F32, 3));
    *loss_sum += total[0];
    *targets_counted += (int64_t)total[1];
    return GT_OK;
}

/* ---- backward ------------------------------------------------------------------------------ */

/* The least number of elements in a bucket.  GPUs of several ranks add up the gradient in buckets, while backward
 * computes the rest of the gradient.  Backward goes from the last layer to the first, and so from the end of the
 * gradient's array to its start.  A bucket holds whole layers.
 *
 * Smaller buckets would mostly cost latency: over NVLink, 4 MiB take about as long as NCCL needs to start. */
enum { BUCKET = 1 << 20 };

/* Sums elements start ... *end - 1 of the gradient over the ranks, if they fill a bucket or if is_last is set. */
static gt_status sum_bucket(const hy_model *m, int64_t start, int64_t *end, int is_last) {
    const int64_t n = *end - start;
    if (n < BUCKET && !is_last) return GT_OK;
    *end = start;
    return m->be->sum(m->be, fp32_at(m, m->grads, start), n);
}

/* Runs backward for the whole model.  With is_summed = 1 the GPUs of all ranks also add up their gradients. */
static gt_status backward(hy_model *m, int accumulate, int is_summed) {
    int64_t end = m->param_total;
    if (!m->trained.M) return hy_fail(GT_ERROR_VALUE, "hy_model_backward: call hy_model_forward first");
    m->accumulate = accumulate;
    m->be->window = m->trained.T;
    gt_rmsnorm_linear_args head = head_of(m, &m->trained);
    hy_cross_entropy_args loss = cross_entropy_of(m, &m->trained);
    hy_embedding_args embedding = embedding_of(m, &m->trained);
    m->be->at = (hy_place){"backward", "head"};
    TRY(m->be->cross_entropy_backward(m->be, &loss));
    TRY(m->be->rmsnorm_linear_backward(m->be, &head));
    for (int l = (int)m->L - 1; l >= 0; l--) {
        m->be->at.pass = "recompute";
        TRY(in_layer(hy_layer_restore(m, l), l));
        m->be->at.pass = "backward";
        TRY(in_layer(hy_layer_backward(m, l), l));
        if (is_summed) TRY(sum_bucket(m, m->params[m->layer[l].norm].shown.offset, &end, 0));
    }
    TRY(hy_dropout(m, &m->trained, 0, m->grad.x, m->C));
    m->trained.M = m->latest.M = 0; /* backward has overwritten forward's results */
    m->be->at.part = "embedding";
    TRY(m->be->embedding_backward(m->be, &embedding));
    if (!is_summed) return GT_OK;
    TRY(sum_bucket(m, 0, &end, 1));
    return m->be->join(m->be);
}

gt_status hy_model_backward(hy_model *m, int accumulate) { return backward(m, accumulate, 0); }

/* ---- the optimiser ------------------------------------------------------------------------- */

/* Makes random bits for dropout from a seed, with splitmix64. */
static uint64_t drop_bits(uint64_t seed) {
    uint64_t x = seed + 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* Uploads the control numbers of step m->steps.  `window` is the index of this pass's first window in the whole
 * batch. */
static gt_status upload_control(hy_model *m, const hy_optimizer *o, double loss_scale, int64_t window) {
    const double t = (double)m->steps;
    const uint64_t drop = drop_bits(o->drop);
    const double control[HY_CONTROLS] = {[HY_LR] = o->lr,
                                         [HY_BETA1] = o->beta1,
                                         [HY_BETA2] = o->beta2,
                                         [HY_EPS] = o->eps,
                                         [HY_CORRECTION1] = 1 / (1 - pow(o->beta1, t)),
                                         [HY_CORRECTION2] = 1 / (1 - pow(o->beta2, t)),
                                         [HY_WEIGHT_DECAY] = o->weight_decay,
                                         [HY_MAX_NORM] = o->max_norm,
                                         [HY_LOSS_SCALE] = loss_scale,
                                         [HY_DROP_LOW] = (double)(drop & 0xffffff),
                                         [HY_DROP_HIGH] = (double)(drop >> 24 & 0xffffff),
                                         [HY_DROP_WINDOW] = (double)window};
    return m->be->write(m->be, m->control, GT_F32, control, HY_CONTROLS);
}

static gt_status grad_norm(hy_model *m) {
    m->be->at = (hy_place){"update", "optimiser"};
    hy_grad_norm_args norm = {
        .segments = m->segments, .grad = m->grads, .control = m->control, .partial = m->partial, .norm = m->norms};
    return m->be->grad_norm(m->be, &norm);
}

gt_status hy_model_grad_norm(hy_model *m) {
    if (m->config.inference)
        return hy_fail(GT_ERROR_UNSUPPORTED, "the model was made for inference: it has no gradients");
    m->judged = 1; /* these norms do not belong to a step */
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
    m->steps++, m->judged = 0;
    TRY(upload_control(m, optimizer, m->loss_scale, 0));
    return update_params(m);
}

gt_status hy_model_average(hy_model *m, double decay) {
    hy_average_args average = {.n = m->param_total, .decay = (float)decay, .w = m->values, .average = m->average};
    if (!m->average || m->config.inference)
        return hy_fail(GT_ERROR_UNSUPPORTED, "the model was made without an average of its weights");
    m->be->at = (hy_place){"update", "optimiser"};
    return m->be->average(m->be, &average);
}

gt_status hy_model_exchange(hy_model *m) {
    TRY(hy_model_average(m, -1));
    return hy_params_round(m);
}

/* Slots for hy_backend.run: one for each sequence of calls that a backend may record. */
enum {
    SLOT_GRADIENT,
    SLOT_TRAIN,
    SLOT_INFER,
    SLOT_LOSS,
    SLOT_STEP,
    SLOT_STEP_INT8,
    SLOT_ADD,
    SLOT_SUM,
    SLOT_ADD_AND_SUM
};

static gt_status loss_uploaded(void *model) { return forward_training(model); }

static gt_status infer_uploaded(void *model) {
    hy_model *m = model;
    pass p = evaluation_pass(m);
    gt_rmsnorm_linear_args head = head_of(m, &p);
    TRY(forward_layers(m, &p));
    m->be->at.part = "head";
    return m->be->rmsnorm_linear_forward(m->be, &head);
}

static gt_status gradient_uploaded(void *model) {
    hy_model *m = model;
    TRY(forward_training(m));
    return hy_model_backward(m, 0);
}

/* Does what gradient_uploaded does, but adds to the current gradient. */
static gt_status add_uploaded(void *model) {
    hy_model *m = model;
    TRY(forward_training(m));
    return hy_model_backward(m, 1);
}

/* The next two functions also sum the gradient over all ranks. */
static gt_status sum_uploaded(void *model) {
    TRY(forward_training(model));
    return backward(model, 0, 1);
}

static gt_status add_and_sum_uploaded(void *model) {
    TRY(forward_training(model));
    return backward(model, 1, 1);
}

static gt_status train_uploaded(void *model) {
    ((hy_model *)model)->weights = UNTOUCHED;
    TRY(gradient_uploaded(model));
    return update_params(model);
}

/* Returns whether NCCL sums the gradient while backward runs. */
static int has_gpu_sums(const hy_model *m, const hy_optimizer *o) { return o->ranks && m->be->nccl; }

/* Runs a slot.  A replay does not run record(m), so this function sets the host fields that record(m) would set. */
static gt_status run_uploaded(hy_model *m, int slot, gt_status (*record)(void *)) {
    m->accumulate = 0, m->has_sums = 0;
    gt_status status = m->be->run(m->be, slot, record, m);
    m->trained.M = m->latest.M = 0, m->held = -1;
    return status;
}

gt_status hy_model_gradient(hy_model *m, const int32_t *tokens, const int32_t *targets, const int32_t *keep) {
    if (tokens) TRY(hy_batch_upload(m, tokens, targets));
    TRY(upload_keep(m, keep));
    return run_uploaded(m, SLOT_GRADIENT, gradient_uploaded);
}

gt_status hy_model_loss(hy_model *m, const int32_t *tokens, const int32_t *targets, const int32_t *keep) {
    if (tokens) TRY(hy_batch_upload(m, tokens, targets));
    TRY(upload_keep(m, keep));
    return run_uploaded(m, SLOT_LOSS, loss_uploaded);
}

gt_status hy_model_infer(hy_model *m, const int32_t *tokens) {
    if (tokens) TRY(upload_tokens(m, tokens));
    m->trained.M = 0; /* the forward pass below overwrites its activations */
    return run_uploaded(m, SLOT_INFER, infer_uploaded);
}

/* Waits for the latest part of a step, and adds its loss, targets and entropy to the sums of the step. */
static gt_status add_totals(hy_model *m) {
    double total[3];
    TRY(m->be->read(m->be, total, m->total, GT_F32, 3));
    for (int i = 0; i < 3; i++) m->sums[i] += total[i];
    return GT_OK;
}

/* Runs a part of a step.  If GPUs sum the gradient, they do so in the last part.  A rank that fails before this part
 * must not leave the GPUs of other ranks waiting, so the ranks first exchange statuses. */
static gt_status run_part(hy_model *m, const hy_optimizer *o, int part, int is_last) {
    if (!is_last || !has_gpu_sums(m, o))
        return run_uploaded(m, part ? SLOT_ADD : SLOT_GRADIENT, part ? add_uploaded : gradient_uploaded);
    TRY(hy_ranks_meet(o->ranks, GT_OK));
    return run_uploaded(m, part ? SLOT_ADD_AND_SUM : SLOT_SUM, part ? add_and_sum_uploaded : sum_uploaded);
}

/* Computes the gradient of the mean loss over all parts and ranks.  Each part adds the gradient of its own mean
 * loss, weighted by its number of targets.  If GPUs sum the gradient, the function does not wait for the last part. */
static gt_status add_parts(hy_model *m, const int32_t *tokens, const int32_t *targets, const int32_t *keep,
                           const hy_optimizer *o) {
    const int parts = o->parts > 1 ? o->parts : 1;
    int64_t counted = o->ranks ? o->targets : 0;
    memset(m->sums, 0, sizeof m->sums);
    for (int64_t i = 0; i < parts * m->M && !o->ranks; i++) counted += targets[i] >= 0;
    for (int part = 0; part < parts; part++) {
        const int32_t *own = targets + part * m->M;
        int64_t count = 0;
        for (int64_t i = 0; i < m->M; i++) count += own[i] >= 0;
        TRY(hy_batch_upload(m, tokens + part * m->M, own));
        TRY(upload_keep(m, keep));
        TRY(upload_control(m, o, m->loss_scale * (double)count / (double)(counted ? counted : 1),
                           o->window + part * m->B));
        TRY(run_part(m, o, part, part == parts - 1));
        if (part < parts - 1 || !has_gpu_sums(m, o)) TRY(add_totals(m));
    }
    return GT_OK;
}

/* Sums a gradient on a device over all ranks: copies it through host memory, in pieces.  Every rank makes the same
 * calls, also after an error. */
static gt_status sum_through_host(hy_model *m, hy_ranks *ranks, gt_status own) {
    enum { PIECE = 1 << 22 };
    const int64_t most = m->param_total < PIECE ? m->param_total : PIECE;
    float *numbers = malloc((size_t)most * sizeof *numbers);
    if (!numbers && own == GT_OK)
        own = hy_fail(GT_ERROR_MEMORY, "no memory for %lld gradients of a device", (long long)most);
    for (int64_t done = 0, n; done < m->param_total; done += n) {
        float *there = fp32_at(m, m->grads, done);
        n = m->param_total - done < PIECE ? m->param_total - done : PIECE;
        if (own == GT_OK) own = m->be->download(m->be, numbers, there, (size_t)n * sizeof *numbers);
        if ((own = hy_ranks_sum(ranks, own, numbers, n)) != GT_OK) break;
        own = m->be->upload(m->be, there, numbers, (size_t)n * sizeof *numbers);
    }
    free(numbers);
    return own;
}

/* Replaces this rank's gradient and sums by the totals over all ranks.  Other ranks wait in this exchange, so a
 * failed rank calls it, too, and passes its error as `own`. */
static gt_status sum_over_ranks(hy_model *m, const hy_optimizer *o, gt_status own) {
    if (strcmp(m->be->name, "cpu"))
        own = sum_through_host(m, o->ranks, own);
    else
        own = hy_ranks_sum(o->ranks, own, m->grads, m->param_total);
    return hy_ranks_add(o->ranks, own, m->sums, 3);
}

/* Runs a step that has several parts or ranks. */
static gt_status train_in_parts(hy_model *m, const int32_t *tokens, const int32_t *targets, const int32_t *keep,
                                const hy_optimizer *o) {
    if (m->config.stateful && o->parts > 1)
        return hy_fail(GT_ERROR_UNSUPPORTED, "parts = %d: must be 1 for a stateful model", o->parts);
    m->loss_scale = o->loss_scale > 0 ? o->loss_scale : 1;
    m->steps++, m->judged = 0;
    m->weights = UNTOUCHED;
    gt_status status = add_parts(m, tokens, targets, keep, o);
    const int on_gpus = has_gpu_sums(m, o);
    if (o->ranks && !on_gpus) status = sum_over_ranks(m, o, status);
    if (status == GT_OK) status = upload_control(m, o, m->loss_scale, o->window);
    if (status == GT_OK) status = update_params(m);
    if (status == GT_OK && on_gpus) status = add_totals(m);
    if (on_gpus) status = hy_ranks_add(o->ranks, status, m->sums, 3);
    m->has_sums = status == GT_OK;
    return status;
}

gt_status hy_model_train(hy_model *m, const int32_t *tokens, const int32_t *targets, const int32_t *keep,
                         const hy_optimizer *optimizer) {
    if (optimizer->parts > 1 || optimizer->ranks) return train_in_parts(m, tokens, targets, keep, optimizer);
    TRY(hy_batch_upload(m, tokens, targets));
    TRY(upload_keep(m, keep));
    m->loss_scale = optimizer->loss_scale > 0 ? optimizer->loss_scale : 1;
    m->steps++, m->judged = 0;
    TRY(upload_control(m, optimizer, m->loss_scale, optimizer->window));
    m->weights = UNKNOWN; /* if a replay fails, nobody knows how far it came */
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
    if (m->has_sums) memcpy(total, m->sums, sizeof total);
    r->targets = (int64_t)total[1];
    r->loss = total[1] > 0 ? total[0] / total[1] : 0;
    r->entropy = total[1] > 0 ? total[2] / total[1] : 0;
    r->skipped = !isfinite(r->norm[HY_GROUPS]);
    if (is_single(m))
        r->ratio = (double)NAN;
    else if (r->norm[HY_RWKV] == 0)
        r->ratio = 0; /* comes first, so 0 / 0 gives 0, too */
    else
        r->ratio = r->norm[HY_RWKV] / r->norm[HY_MAMBA];
    if (r->skipped && !m->judged) m->steps--; /* AdamW counts only the steps that changed the weights */
    m->judged = 1;
    m->weights = UNTOUCHED;
    return GT_OK;
}

int64_t hy_model_steps(const hy_model *m) { return m->steps; }

void hy_model_set_steps(hy_model *m, int64_t steps) { m->steps = steps; }

/* ---- decoding ------------------------------------------------------------------------------ */

gt_status hy_model_reset(hy_model *m) { return hy_states_zero(m, &m->decoding); }

/* Uploads tokens first ... first + T - 1 of each sequence.  Each sequence has n tokens in `tokens`. */
static gt_status upload_piece(hy_model *m, const int32_t *tokens, int64_t n, int64_t first, int64_t T) {
    const int64_t pieces = T == n ? 1 : m->config.samples, length = m->config.samples / pieces * T;
    for (int64_t i = 0; i < pieces; i++)
        TRY(m->be->upload(m->be, m->tokens + i * length, tokens + i * n + first, (size_t)length * sizeof *tokens));
    return GT_OK;
}

/* Runs the layers, and also the head if is_last is set. */
static gt_status decode(hy_model *m, const pass *p, int is_last) {
    gt_rmsnorm_linear_args head = last_head_of(m, p);
    TRY(forward_layers(m, p));
    if (!is_last) return GT_OK;
    m->be->at.part = "head";
    if (takes_int8(m, p, m->head)) return m->be->rmsnorm_linear_step(m->be, &head);
    return m->be->rmsnorm_linear_forward(m->be, &head);
}

static gt_status step_uploaded(void *model) {
    hy_model *m = model;
    pass p = decoding_pass(m, 1);
    return decode(m, &p, 1);
}

gt_status hy_model_feed(hy_model *m, const int32_t *tokens, int n, double *logits) {
    const int64_t samples = m->config.samples;
    const int slot = m->has_int8 ? SLOT_STEP_INT8 : SLOT_STEP;
    TRY(check_number("n", n, 1, INT32_MAX));
    TRY(check_tokens(m, "tokens", tokens, samples * n, 0));
    m->trained.M = 0;
    for (int64_t done = 0, T; done < n; done += T) {
        T = n - done < m->T ? n - done : m->T;
        pass p = decoding_pass(m, T);
        TRY(upload_piece(m, tokens, n, done, T));
        TRY(p.step ? run_uploaded(m, slot, step_uploaded) : decode(m, &p, done + T == n));
    }
    return m->be->read(m->be, logits, m->logits, m->be->dtype, samples * m->V);
}

double hy_model_token_bytes(const hy_model *m) {
    const int64_t states = wkv_numbers(m) + ssm_numbers(m) + conv_numbers(m) + shift_numbers(m);
    double bytes = 2 * (double)(m->config.samples * m->L * states) * (double)m->be->fp32_bytes;
    for (int i = 0; i < m->param_count; i++) {
        const hy_param *p = &m->params[i].shown;
        const int is_int8 = m->has_int8 && m->params[i].int8_at >= 0;
        /* If the head has its own weight, a step reads only the rows of its tokens from the embedding. */
        const int is_rows = i == m->embedding && (m->config.untied || is_int8);
        const int64_t count = is_rows ? m->config.samples * m->C : p->count;
        if (is_int8) bytes += (double)(p->count + matrix_rows(m, i) * (int64_t)m->be->fp32_bytes);
        /* Parameters with weight decay are the projections, which a step reads in the dtype of activations. */
        if (!is_int8 || is_rows) bytes += (double)count * (double)(p->decay ? act_bytes(m) : m->be->fp32_bytes);
    }
    return bytes;
}
