/* A training run: signals, steps, gates, and writing the model file. */
#define _XOPEN_SOURCE 700 /* sigaction, clock_gettime */
#include "hybrid_trainer.h"
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { G3_STEPS = 1000 };                         /* gate G3 judges the training after this many steps */
enum { SCALE_STEPS = 1000, SCALE_MAX = 1 << 24 }; /* of fp16's loss scale, see hybrid_setup.c */

/* ---- signals --------------------------------------------------------------------------------- */

static const int stop_signals[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1}; /* mpirun passes SIGUSR1 to its ranks */
enum { STOP_SIGNALS = sizeof stop_signals / sizeof stop_signals[0] };
enum { PATIENCE = 2 };                    /* a signal counts as a new request after this many seconds */
static volatile sig_atomic_t interrupted; /* the first signal; 0: none yet */
static struct timespec interrupted_at;    /* time of the first signal */

/* Handles the signals that ask the run to end.  The first signal asks the run to end.  A signal that comes PATIENCE
 * seconds later or more ends the program: the handler restores the default action and raises the signal again.  The
 * raised signal takes effect when the handler returns.
 *
 * Signals in between are ignored, because one request often comes as several signals.  For example, timeout signals
 * its child and then the process group, and a closing terminal hangs up twice. */
static void on_interrupt(int number) {
    int error = errno;
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    if (!interrupted) {
        interrupted_at = t;
        interrupted = number;
    } else if ((double)(t.tv_sec - interrupted_at.tv_sec) + 1e-9 * (double)(t.tv_nsec - interrupted_at.tv_nsec) >=
               PATIENCE) {
        signal(number, SIG_DFL);
        raise(number);
    }
    errno = error;
}

static int own_signal(void) { return interrupted; }

/* Installs the handler.  Signals that the parent process ignores, as nohup does, stay ignored, except Ctrl-C. */
void hy_catch_signals(trainer *t) {
    struct sigaction action, before;
    memset(&action, 0, sizeof action);
    sigemptyset(&action.sa_mask);
    action.sa_handler = on_interrupt;
    action.sa_flags = SA_RESTART; /* so a signal does not make a write fail */
    for (int i = 0; i < STOP_SIGNALS; i++) sigaddset(&action.sa_mask, stop_signals[i]);
    for (int i = 0; i < STOP_SIGNALS; i++)
        if (stop_signals[i] == SIGINT ||
            (sigaction(stop_signals[i], NULL, &before) == 0 && before.sa_handler != SIG_IGN))
            sigaction(stop_signals[i], &action, NULL);
    signal(SIGPIPE, SIG_IGN); /* so a write fails with an ordinary error if the reader of the report has ended */
    t->ranks.asked = own_signal;
}

int hy_interrupted(const trainer *t) { return t->ranks.size > 1 ? t->ranks.signal : interrupted; }

/* ---- training ------------------------------------------------------------------------------- */

static void recent_add(hy_recent *r, const hy_result *result, double seconds) {
    int i = (int)(r->steps++ % HY_RECENT);
    r->loss[i] = result->loss;
    r->norm[i] = result->norm[HY_GROUPS];
    r->ratio[i] = result->ratio;
    r->tokens[i] = result->targets;
    r->seconds[i] = seconds;
}

/* Returns the number of windows that the model processes at once. */
static int64_t rows_of(const trainer *t) { return t->rows ? t->rows : t->batch.rows; }

/* Creates the batch that holds this rank's share of the held-out windows. */
static gt_status create_held_out(const trainer *t, hy_batch *batch) {
    gt_status status = hy_batch_create(batch, rows_of(t), t->batch.length);
    hy_batch_share(batch, t->ranks.rank, t->ranks.size);
    return status;
}

/* With --ema, swaps the weights and their moving average.  Evaluations and samples use the average, so call this
 * function before and after them. */
static gt_status exchange(const trainer *t) {
    return t->options.ema > 0 && !t->config.inference ? hy_model_exchange(t->model) : GT_OK;
}

static gt_status print_sample(trainer *t) {
    if (t->ranks.rank) return GT_OK;
    hy_alive("a sample after step %lld", (long long)t->steps);
    gt_status status = exchange(t);
    if (status == GT_OK) status = hy_print_sample(t);
    const gt_status back = exchange(t);
    return status == GT_OK ? back : status;
}

/* Evaluates a batch, and adds its loss, summed over all ranks, to *sum. */
static gt_status add_loss(trainer *t, const hy_batch *batch, hy_loss *sum) {
    double numbers[3] = {0, 0, 0}; /* sums of the loss, tokens and bytes */
    int64_t tokens = 0;
    gt_status status = hy_model_eval(t->model, batch->input, batch->target, &numbers[0], &tokens);
    for (int64_t i = 0; i < batch->rows * batch->length; i++)
        if (batch->target[i] >= 0) numbers[2] += (double)hy_token_bytes(&t->text, batch->target[i]);
    numbers[1] = (double)tokens;
    status = hy_ranks_add(&t->ranks, status, numbers, 3);
    sum->mean += numbers[0], sum->tokens += (int64_t)numbers[1], sum->bytes += (int64_t)numbers[2];
    return status;
}

/* Evaluates the next batch of the held-out part.  *is_left is 0 if there was no batch left. */
static gt_status evaluate_batch(trainer *t, hy_batch *batch, int64_t *next, hy_loss *sum, int *is_left) {
    if (!(*is_left = hy_batch_held_out(batch, &t->text, next))) return GT_OK;
    hy_alive("evaluation after step %lld, window %lld", (long long)t->steps, (long long)*next);
    gt_status status = add_loss(t, batch, sum);
    if (status == GT_OK && !isfinite(sum->mean))
        status = hy_fail(GT_ERROR_VALUE, "step %lld: the held-out loss is not finite (%g)", (long long)t->steps,
                         sum->mean / (double)sum->tokens);
    return status;
}

static hy_loss mean_of(hy_loss sum) { return (hy_loss){sum.mean / (double)sum.tokens, sum.tokens, sum.bytes}; }

gt_status hy_evaluate_first(trainer *t, int64_t limit, hy_loss *loss) {
    hy_batch batch;
    hy_loss sum = {0, 0, 0};
    int64_t next = 0;
    int is_left = 1;
    gt_status status = create_held_out(t, &batch);
    while (status == GT_OK && is_left && (!limit || sum.tokens < limit))
        status = evaluate_batch(t, &batch, &next, &sum, &is_left);
    hy_batch_free(&batch);
    *loss = mean_of(sum);
    if (status != GT_OK) loss->mean = (double)NAN; /* the mean covers too few tokens */
    return status;
}

/* Measures a point of the held-out curve. */
static gt_status evaluate_point(trainer *t, int64_t limit, double *point) {
    hy_loss loss;
    const gt_status status = hy_evaluate_first(t, limit, &loss);
    *point = loss.mean;
    return status;
}

gt_status hy_evaluate(trainer *t, int64_t limit, double *point) {
    const int64_t all = hy_held_out_tokens(&t->text), wanted = t->options.final_eval_tokens;
    const int64_t last = wanted && wanted < all ? wanted : all, first = limit ? limit : last;
    const int64_t longest = point && first > last ? first : last;
    const int before = hy_interrupted(t);
    const double start = hy_now();
    hy_batch batch;
    hy_loss sum = {0, 0, 0};
    int64_t next = 0;
    int is_left = 1, has_point = !point;
    gt_status status = create_held_out(t, &batch);
    t->final = (hy_loss){0, 0, 0};
    if (!t->screen.is_live) t->shown = start; /* so that a short evaluation prints no progress */
    if (point) *point = (double)NAN;
    while (status == GT_OK && is_left && (!has_point || !t->final.tokens)) {
        if ((status = evaluate_batch(t, &batch, &next, &sum, &is_left)) != GT_OK) break;
        const int is_stopped = !before && hy_interrupted(t);
        if (!has_point && (sum.tokens >= first || !is_left)) *point = mean_of(sum).mean, has_point = 1;
        if (!t->final.tokens && (sum.tokens >= last || !is_left || is_stopped)) t->final = mean_of(sum);
        status = hy_print_evaluation(t, &sum, longest, hy_now() - start);
        has_point |= is_stopped;
    }
    hy_batch_free(&batch);
    if (t->screen.is_live) hy_screen_status(&t->screen, ""); /* removes the evaluation's progress line */
    return status;
}

/* Returns the learning rate of a step (steps count from 1): a linear warm-up, then the schedule. */
static double learning_rate(const hy_options *o, int64_t step) {
    const int64_t left = o->steps - step;
    if (step <= o->warmup) return o->lr * (double)step / (double)o->warmup;
    if (!strcmp(o->schedule, "constant") || (!strcmp(o->schedule, "wsd") && left >= o->decay_steps)) return o->lr;
    if (!strcmp(o->schedule, "wsd")) return o->min_lr + (o->lr - o->min_lr) * (double)left / (double)o->decay_steps;
    double done = (double)(step - o->warmup) / (double)(o->steps - o->warmup);
    return o->min_lr + (o->lr - o->min_lr) * 0.5 * (1 + cos(acos(-1) * done));
}

static void next_batch(trainer *t) {
    t->before = t->random;
    if (t->options.stateful)
        hy_batch_tracks(&t->batch, &t->text, &t->tracks);
    else
        hy_batch_random(&t->batch, &t->text, &t->random);
}

/* Fails if the loss or the gradient is not finite.  In fp16 a gradient that overflows is no error: the step is
 * skipped, and the loss scale halves. */
static gt_status judge_step(trainer *t, const hy_result *result) {
    int scaled = t->backend->dtype == GT_F16;
    if (!isfinite(result->loss))
        return hy_fail(GT_ERROR_VALUE, "step %lld: the loss is not finite (%g); a smaller lr may help",
                       (long long)t->steps, result->loss);
    if (result->skipped && (!scaled || t->loss_scale <= 1))
        return hy_fail(GT_ERROR_VALUE, "step %lld: the gradient is not finite (loss %g); a smaller lr may help",
                       (long long)t->steps, result->loss);
    if (result->skipped) {
        t->loss_scale /= 2;
        t->scale_steps = 0;
    } else if (scaled && ++t->scale_steps == SCALE_STEPS && t->loss_scale < SCALE_MAX) {
        t->loss_scale *= 2;
        t->scale_steps = 0;
    }
    return GT_OK;
}

/* Measures the speed in wall-clock time from step SPEED_FROM to step SPEED_TO.  Evaluations and samples do not
 * count. */
static void measure_speed(trainer *t) {
    if (t->steps == SPEED_FROM) {
        t->speed_start = hy_now() - t->aside;
        t->speed_tokens = t->tokens;
    } else if (t->steps == SPEED_TO && t->speed_start > 0) { /* 0: the run was resumed at a step after SPEED_FROM */
        t->speed = (double)(t->tokens - t->speed_tokens) / (hy_now() - t->aside - t->speed_start);
    }
}

/* Adds up how long the GPU waited for sums of NCCL in the latest step.  That step took step_seconds in all. */
static gt_status measure_wait(trainer *t, double step_seconds) {
    double seconds;
    if (!t->backend->nccl || t->replayed++ < 2) return GT_OK;
    gt_status status = t->backend->waited(t->backend, &seconds);
    if (status == GT_OK) t->waited += seconds, t->waited_of += step_seconds;
    return status;
}

/* Takes one optimiser step on the current batch. */
static gt_status train_step(trainer *t, double lr, hy_result *result) {
    const hy_options *o = &t->options;
    const hy_optimizer optimizer = {.lr = (float)lr,
                                    .beta1 = (float)o->beta1,
                                    .beta2 = (float)o->beta2,
                                    .eps = (float)o->eps,
                                    .parts = (int)(t->batch.rows / rows_of(t)),
                                    .ranks = t->ranks.size > 1 || t->backend->nccl ? &t->ranks : NULL,
                                    .window = t->batch.first,
                                    .targets = t->batch.all_targets,
                                    .drop = (uint64_t)o->seed ^ (uint64_t)(t->steps + 1) << 32,
                                    .weight_decay = (float)o->weight_decay,
                                    .max_norm = (float)o->clip,
                                    .loss_scale = (float)t->loss_scale};
    const int32_t *keep = o->stateful ? t->batch.keep : NULL;
    double start = hy_now();
    hy_alive("step %lld", (long long)t->steps + 1);
    gt_status status = hy_model_train(t->model, t->batch.input, t->batch.target, keep, &optimizer);
    if (status == GT_OK) status = hy_model_result(t->model, result);
    /* The decay is smaller in the first steps, so that the average soon forgets the random initial weights. */
    const double young = (1 + (double)t->steps) / (10 + (double)t->steps);
    if (status == GT_OK && o->ema > 0 && !result->skipped)
        status = hy_model_average(t->model, o->ema < young ? o->ema : young);
    if (status == GT_OK) status = measure_wait(t, hy_now() - start);
    if (status != GT_OK) return status;
    t->steps++;
    t->tokens += result->targets;
    t->train_seconds += hy_now() - start;
    measure_speed(t);
    if ((status = judge_step(t, result)) != GT_OK) return status;
    if (!result->skipped) recent_add(&t->recent, result, hy_now() - start);
    if (t->steps == 1) t->first_loss = result->loss;
    return GT_OK;
}

static void add_gate(trainer *t, hy_gate gate) { t->gates[t->gate_count++] = gate; }

/* Computes the RWKV / Mamba ratio of the gradient norms on the current batch, without an update.  In fp16 it starts
 * with the run's loss scale, and halves the scale until the gradient does not overflow. */
static gt_status first_ratio(trainer *t, double *ratio) {
    const int32_t *keep = t->options.stateful ? t->batch.keep : NULL;
    hy_result result = {.skipped = 1};
    gt_status status = GT_OK;
    for (double scale = t->loss_scale; scale >= 1 && result.skipped && status == GT_OK; scale /= 2) {
        status = hy_model_scale_loss(t->model, (float)scale);
        if (status == GT_OK) status = hy_model_gradient(t->model, t->batch.input, t->batch.target, keep);
        if (status == GT_OK) status = hy_model_grad_norm(t->model);
        if (status == GT_OK) status = hy_model_result(t->model, &result);
    }
    *ratio = result.ratio;
    return status;
}

/* Copies the verdicts of rank 0 to every rank, so that --gates-strict ends all ranks together. */
static gt_status share_verdicts(trainer *t, gt_status own) {
    hy_verdict verdicts[GATES_MAX];
    for (int i = 0; i < t->gate_count; i++) verdicts[i] = t->gates[i].verdict;
    gt_status status = hy_ranks_share(&t->ranks, own, verdicts, (size_t)t->gate_count * sizeof *verdicts);
    for (int i = 0; i < t->gate_count && status == GT_OK; i++) t->gates[i].verdict = verdicts[i];
    return status;
}

/* Runs the gates that judge the model before its first step.  Every rank uses its own windows. */
static gt_status gates_before(trainer *t) {
    hy_alive("the gates before training");
    double sum = 0;
    int64_t counted = 0;
    gt_status status = hy_model_eval(t->model, t->batch.input, t->batch.target, &sum, &counted);
    add_gate(t, hy_gate_operators(t->backend));
    hy_alive("the gates before training");
    if (status == GT_OK) status = hy_model_probe(t->model, t->batch.input, t->batch.target, &t->probe);
    if (status == GT_OK) status = first_ratio(t, &t->ratio);
    if (status != GT_OK) return status;
    add_gate(t, hy_gate_forward(&t->probe, counted, t->batch.targets * rows_of(t) / t->batch.rows));
    if (!*t->options.init) /* G2 judges untrained weights, but --init loads trained ones */
        add_gate(t, hy_gate_entropy(t->probe.entropy, t->text.vocab));
    add_gate(t, hy_gate_states(&t->probe));
    add_gate(t, hy_gate_balance(&t->probe, t->ratio));
    return GT_OK;
}

/* Keeps a copy of the first batch, since gate G3 of a short run evaluates this batch again. */
static gt_status keep_first(trainer *t) {
    const size_t bytes = (size_t)(t->batch.rows * t->batch.length) * sizeof(int32_t);
    gt_status status = hy_batch_create(&t->first, t->batch.rows, t->batch.length);
    if (status != GT_OK) return status;
    hy_batch_share(&t->first, t->ranks.rank, t->ranks.size);
    memcpy(t->first.input, t->batch.input, bytes);
    memcpy(t->first.target, t->batch.target, bytes);
    return GT_OK;
}

/* Adds gate G3 of a short run: evaluates the first batch again.  A run is short if the recent steps include its
 * first step. */
static gt_status add_short_training_gate(trainer *t) {
    hy_loss sum = {0, 0, 0};
    gt_status status = add_loss(t, &t->first, &sum);
    if (status == GT_OK)
        add_gate(t, hy_gate_short_training(t->steps, t->first_loss, mean_of(sum).mean,
                                           hy_recent_mean(&t->recent, t->recent.norm)));
    return status;
}

/* Adds gate G3 on the recent steps, in its form for short runs or for long runs. */
static gt_status add_training_gate(trainer *t) {
    const hy_recent *r = &t->recent;
    if (r->steps <= HY_RECENT && t->first.input) return add_short_training_gate(t);
    add_gate(t, hy_gate_training(r->steps, t->first_loss, hy_recent_mean(r, r->loss), hy_recent_mean(r, r->norm)));
    return GT_OK;
}

/* Runs the gates that judge the trained model.  They probe the model with the last batch. */
static gt_status gates_after(trainer *t) {
    hy_alive("the gates after training");
    gt_status status = hy_model_probe(t->model, t->batch.input, t->batch.target, &t->probe);
    if (status != GT_OK) return status;
    if (t->steps < G3_STEPS && (status = add_training_gate(t)) != GT_OK) return status;
    add_gate(t, hy_gate_states(&t->probe));
    t->ratio = hy_recent_mean(&t->recent, t->recent.ratio);
    add_gate(t, hy_gate_balance(&t->probe, t->ratio));
    return GT_OK;
}

static int due(int64_t step, int64_t every) { return every > 0 && step % every == 0; }

/* Collects all values that a model file stores. */
static hy_run run_of(trainer *t, hy_options *options) {
    const hy_config *c = hy_model_config(t->model);
    *options = t->options;
    options->hidden = c->hidden;
    options->layers = c->layers;
    options->heads = c->heads;
    options->d_state = c->state;
    options->expand = c->expand;
    options->d_conv = c->conv;
    options->mamba_head = c->mamba_head;
    options->ffn = c->ffn; /* HY_NO_FFN and HY_AUTO are the same number */
    if (t->rows) options->micro_batch = t->rows == t->batch.rows ? 0 : t->rows;
    hy_run run = {.model = t->model,
                  .options = options,
                  .text = &t->text,
                  .tracks = options->stateful ? &t->tracks : NULL,
                  .device = t->backend->name,
                  .rank = t->ranks.rank,
                  .ranks = t->ranks.size,
                  .states = t->states,
                  .progress = {.steps = t->steps,
                               .tokens = t->tokens,
                               .random = t->random,
                               .loss_scale = t->loss_scale,
                               .scale_steps = t->scale_steps,
                               .first_loss = t->first_loss,
                               .held_out = t->held_out,
                               .seconds = hy_now() - t->start,
                               .train_seconds = t->train_seconds,
                               .aside = t->aside,
                               .best = t->best,
                               .best_step = t->best_step,
                               .recent = t->recent}};
    memcpy(run.text_sum, t->text_sum, sizeof run.text_sum);
    return run;
}

/* Writes a model file.  Returns 0 if writing fails.  The run then continues, and ends with status 1 unless a later
 * attempt succeeds. */
static int write_model(trainer *t, const char *path) {
    static hy_options options;
    hy_run run = run_of(t, &options);
    if (hy_save(&run, path) == GT_OK) {
        t->not_saved[0] = 0;
        return 1;
    }
    snprintf(t->not_saved, sizeof t->not_saved, "save: %.600s", hy_last_error());
    hy_make_plain(t->not_saved);
    hy_end_progress(t);
    fprintf(stderr, "hybrid_train: step %lld: %s; ", (long long)t->steps, t->not_saved);
    return 0;
}

/* Returns whether a model file needs states of other ranks. */
static int has_shared_states(const trainer *t) { return t->options.stateful && t->ranks.size > 1; }

/* Writes the model file, if the user asked for one. */
static void save(trainer *t) {
    double start = hy_now();
    if (!*t->options.save || t->saved == t->steps) return;
    if (has_shared_states(t) && t->states_step != t->steps) return; /* after a failure: no states to gather */
    if (t->ranks.rank) {                                            /* only rank 0 writes */
        t->saved = t->steps;
        return;
    }
    hy_alive("the model file of step %lld", (long long)t->steps);
    if (write_model(t, t->options.save))
        t->saved = t->steps;
    else if (t->saved)
        fprintf(stderr, "the file of step %lld is kept\n", (long long)t->saved);
    else
        fprintf(stderr, "nothing is saved yet\n");
    t->aside += hy_now() - start;
}

void hy_best_path(const hy_options *o, char *path) { snprintf(path, HY_TEXT_MAX + 8, "%s.best", o->save); }

/* Saves the model if the held-out curve has a new lowest point.  The evaluation of an interrupted run does not
 * count, since it covers fewer tokens. */
static void keep_best(trainer *t, double held_out, int last) {
    char path[HY_TEXT_MAX + 8];
    const double start = hy_now(), before = t->best;
    const int64_t step_before = t->best_step;
    if (!t->options.keep_best || !*t->options.save || isnan(held_out) || (last && t->steps < t->options.steps)) return;
    if (t->best_step && !(held_out < t->best)) return;
    t->best = held_out, t->best_step = t->steps;
    hy_best_path(&t->options, path);
    hy_alive("the best model's file, of step %lld", (long long)t->steps);
    if (!t->ranks.rank && !write_model(t, path)) {
        t->best = before, t->best_step = step_before;
        fprintf(stderr, "the older best file is kept\n");
    }
    t->aside += hy_now() - start;
}

gt_status hy_resume_run(trainer *t) {
    static hy_options options;
    hy_run run = run_of(t, &options);
    gt_status status = hy_load_run(&t->file, &run);
    const hy_progress *p = &run.progress;
    if (status != GT_OK) return status;
    t->steps = t->saved = t->resumed = p->steps;
    t->tokens = p->tokens;
    t->random = p->random;
    t->loss_scale = t->backend->dtype == GT_F16 ? p->loss_scale : 1;
    t->scale_steps = p->scale_steps;
    t->first_loss = p->first_loss;
    t->held_out = p->held_out;
    t->earlier = p->seconds;
    t->train_seconds = p->train_seconds;
    t->aside = p->aside;
    t->best = p->best;
    t->best_step = p->best_step;
    t->recent = p->recent;
    /* In fp16 a skipped step resets scale_steps, and the recent steps do not include it. */
    const char *dtype = hy_file_text_of(&t->file, "option.dtype");
    const int is_known = p->recent.steps && !(dtype && !strcmp(dtype, "f16") && !p->scale_steps);
    t->last_loss = is_known ? p->recent.loss[(p->recent.steps - 1) % HY_RECENT] : (double)NAN;
    if (strcmp(t->options.save, t->options.resume)) t->saved = 0;
    return GT_OK;
}

/* Evaluates the held-out part, and probes the model for the log.  *probed is 1 if the probe was made.
 *
 * The last point of the held-out curve uses the same tokens as all other points.  The final evaluation continues
 * after these tokens. */
static gt_status evaluate_step(trainer *t, int last, double *held_out, hy_probe *probe, int *probed) {
    const int64_t limit = t->options.eval_every ? t->options.eval_tokens : 0;
    double start = hy_now();
    gt_status status = exchange(t);
    if (status == GT_OK) status = last ? hy_evaluate(t, limit, held_out) : evaluate_point(t, limit, held_out);
    if (!isnan(*held_out)) t->held_out = *held_out;
    if (status == GT_OK && t->log.file) {
        status = hy_model_probe(t->model, t->batch.input, t->batch.target, probe);
        *probed = status == GT_OK;
    }
    const gt_status back = exchange(t);
    if (status == GT_OK) status = back;
    t->aside += hy_now() - start;
    return status;
}

static void warn_of_heat(trainer *t) {
    hy_end_progress(t);
    fprintf(stderr,
            "hybrid_train: step %lld: the GPU has a temperature of %.0f degrees Celsius, above %d; it may slow down\n",
            (long long)t->steps, t->watch.now.celsius, HY_TOO_HOT);
}

/* Checks and reports a step: gates, held-out loss, log, progress line, sample.
 *
 * The last row of a log that is a regular file is written before the model file, without the held-out loss.  So a
 * run that is killed during the final evaluation loses no row, and --resume completes the row. */
static gt_status report_step(trainer *t, const hy_result *result, double lr, int last) {
    const hy_options *o = &t->options;
    const int is_early = last && t->log.file && t->log.is_regular;
    double held_out = NAN, start;
    gt_status status = GT_OK, written = GT_OK;
    hy_probe probe;
    int probed = 0;
    if (hy_watch_read(&t->watch) && !t->ranks.rank) warn_of_heat(t);
    const int is_saving =
        *o->save && (last || due(t->steps, o->save_every) || (o->keep_best && due(t->steps, o->eval_every)));
    if (is_saving && has_shared_states(t)) {
        free(t->states);
        t->states = NULL;
        status = hy_states_gather(&t->ranks, t->model, &t->states);
        t->states_step = t->steps;
    }
    if (status == GT_OK && t->steps == G3_STEPS) status = add_training_gate(t);
    if (is_early) written = hy_write_log(t, result, NAN, lr, NULL);
    if (last) save(t); /* saves first, since everything after this takes time or can fail */
    if (status == GT_OK) status = written;
    if (last) status = hy_ranks_meet(&t->ranks, status); /* here and below, other ranks wait while rank 0 writes */
    if (status == GT_OK && (last || due(t->steps, o->eval_every)))
        status = evaluate_step(t, last, &held_out, &probe, &probed);
    if (!is_early)
        written = hy_write_log(t, result, held_out, lr, probed ? &probe : NULL);
    else if (status == GT_OK)
        written = hy_log_complete(&t->log, held_out, t->final.mean, t->final.tokens, probed ? &probe : NULL);
    if (status == GT_OK) status = written;
    int show = t->screen.is_live ? hy_now() - t->shown > 0.1 : due(t->steps, o->log_every);
    if (status == GT_OK && (show || last || !isnan(held_out))) status = hy_print_progress(t, held_out);
    if (status == GT_OK) keep_best(t, held_out, last);
    if (!isnan(held_out)) status = hy_ranks_meet(&t->ranks, status);
    if (!last && due(t->steps, o->save_every)) {
        if (status == GT_OK) save(t);
        status = hy_ranks_meet(&t->ranks, status);
    }
    if (status == GT_OK && !last && due(t->steps, o->sample_every) && o->sample) {
        hy_end_progress(t);
        start = hy_now();
        status = hy_ranks_meet(&t->ranks, print_sample(t));
        t->aside += hy_now() - start;
    }
    return status;
}

/* Handles a failed device.  Saves the model if its weights are still known, and says how to resume the run.  in_step
 * is 1 if the step after t->steps had begun. */
static gt_status lose_device(trainer *t, gt_status status, int in_step) {
    const hy_options *o = &t->options;
    char reason[480], way[HY_TEXT_MAX + 128] = "";
    if (status != GT_ERROR_CUDA) return status;
    t->has_lost_device = 1;
    snprintf(reason, sizeof reason, "%s", hy_last_error());
    hy_end_progress(t);
    if (t->steps && hy_model_take_back(t->model)) {
        if (in_step) t->random = t->before;
        save(t);
    }
    const char *file = t->saved ? o->save : o->resume;
    if (strstr(reason, "a kernel: ") && !o->synchronize)
        snprintf(reason + strlen(reason), sizeof reason - strlen(reason),
                 "; run again with --synchronize to see which call failed");
    if (*file)
        snprintf(way, sizeof way, "; to continue, use --resume %s, which has step %lld%s", file,
                 (long long)(t->saved ? t->saved : t->resumed),
                 strcmp(o->device, "auto") ? "" : ", and --device cpu for the CPU");
    else if (!strcmp(o->device, "auto"))
        snprintf(way, sizeof way, "; use --device cpu to run on the CPU");
    return hy_fail(status, "step %lld on %.60s: %.300s%.250s", (long long)t->steps + in_step, t->backend->device,
                   reason, way);
}

static gt_status train(trainer *t) {
    const hy_options *o = &t->options;
    hy_result result;
    gt_status status = GT_OK;
    if (t->steps) t->start = hy_now() - t->earlier;
    if (t->steps == 0) {
        next_batch(t);
        status = keep_first(t);
        if (status == GT_OK) status = lose_device(t, gates_before(t), 1);
        status = share_verdicts(t, status);
        if (status == GT_OK) status = hy_print_gates(t, "before training, on the first batch", 0);
        t->gates_at_start = t->gate_count;
        if (status != GT_OK || (o->gates_strict && hy_count_gates(t, HY_FAIL))) return status;
        t->start = hy_now();
    }
    for (int last = 0; !last && status == GT_OK;) {
        double lr = learning_rate(o, t->steps + 1);
        if (t->steps) next_batch(t);
        const int64_t done = t->steps;
        status = train_step(t, lr, &result);
        if (status != GT_OK) {
            status = lose_device(t, status, t->steps == done);
            break;
        }
        last = t->steps == o->steps || hy_interrupted(t) || (o->gates_strict && hy_count_gates(t, HY_FAIL) > 0);
        status = lose_device(t, report_step(t, &result, lr, last), 0);
    }
    hy_end_progress(t);
    return status;
}

/* Renames an older model file at the path of --save, so that a new run does not overwrite a finished model. */
static gt_status keep_older(trainer *t) {
    const hy_options *o = &t->options;
    if (!*o->save || t->ranks.rank || (*o->resume && hy_same_file(o->save, o->resume))) return GT_OK;
    gt_status status = hy_keep_older("save", o->save, t->older, sizeof t->older);
    if (status != GT_OK || !o->keep_best) return status;
    char best[HY_TEXT_MAX + 8], older[HY_PATH_MAX + 16];
    hy_best_path(o, best);
    return hy_keep_older("keep-best", best, older, sizeof older);
}

/* Sets t->batch to the batch of the last step.  To get there, it draws all batches of the run again. */
static gt_status draw_again(trainer *t) {
    gt_status status = GT_OK;
    t->random = (uint64_t)t->options.seed;
    if (t->options.stateful) {
        hy_tracks_free(&t->tracks);
        status = hy_tracks_create(&t->tracks, &t->text, t->options.batch);
    }
    for (int64_t i = 0; i < t->steps && status == GT_OK; i++) next_batch(t);
    return status;
}

gt_status hy_complete_log(trainer *t) {
    hy_probe probe;
    int probed = 0;
    double held_out;
    gt_status status = draw_again(t);
    if (status == GT_OK) status = evaluate_step(t, 1, &held_out, &probe, &probed);
    return status == GT_OK ? hy_log_complete(&t->log, held_out, t->final.mean, t->final.tokens, &probe) : status;
}

gt_status hy_run_training(trainer *t) {
    hy_catch_signals(t);
    gt_status status = keep_older(t);
    if (status != GT_OK) return status;
    hy_print_start(t);
    status = hy_flush_report();
    if (status == GT_OK) status = train(t);
    if (status == HY_ERROR_WRITE) save(t); /* only the report failed, so the model is still worth saving */
    if (status != GT_OK) return status;
    if (!t->steps) {
        puts("ended by a gate, before the first update");
        return hy_flush_report();
    }
    if (hy_interrupted(t)) puts("interrupted");
    puts("");
    if ((status = gates_after(t)) != GT_OK) return status;
    status = hy_print_gates(t, "after training, on the last batch and the last steps", t->gates_at_start);
    if (status == GT_OK && t->options.sample) status = print_sample(t);
    if (status != GT_OK) return status;
    hy_print_final(t);
    return GT_OK;
}
