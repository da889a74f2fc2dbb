/* hybrid_train: trains an RWKV-6 + Mamba-2 language model on a text, on a GPU or on the CPU.
 *
 * From here: hybrid_config (options), hybrid_data (text and batches), hybrid_model (the model),
 * hybrid_ops (what it computes with), hybrid_gates (health checks), hybrid_check (GPU against CPU),
 * hybrid_bench (measurements), hybrid_plan (memory on a GPU that is not there),
 * hybrid_log (streams and the log), hybrid_screen (what is shown), hybrid_save (model files),
 * hybrid_generate (text from a model).
 * main is at the end. */
#define _XOPEN_SOURCE 700 /* sigaction, clock_gettime, getrusage */
#include "hybrid_bench.h"
#include "hybrid_check.h"
#include "hybrid_config.h"
#include "hybrid_data.h"
#include "hybrid_gates.h"
#include "hybrid_generate.h"
#include "hybrid_log.h"
#include "hybrid_plan.h"
#include "hybrid_save.h"
#include "hybrid_screen.h"
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { EXIT_BAD_OPTION = 2, EXIT_GATE = 3, EXIT_CHECK = 4, EXIT_SIGNAL = 128 };
enum { G3_STEPS = 1000 };                  /* gate G3 looks at the training after this many steps */
enum { SPEED_FROM = 100, SPEED_TO = 500 }; /* steps between which the speed is measured */
/* The loss scale of fp16 starts at about so much per token, as the gradient is that of a mean over
 * tokens; it halves when the gradient overflows and doubles after so many good steps. */
enum { SCALE_PER_TOKEN = 4, SCALE_STEPS = 1000, SCALE_MAX = 1 << 24 };
enum { GATES_MAX = 16 };
#define MIB (1024.0 * 1024.0)

typedef struct trainer {
    hy_options options;
    hy_text text;
    int32_t first_token;    /* of the text */
    char data[HY_TEXT_MAX]; /* its path */
    hy_file file;           /* the model file that is read; no path: none */
    int data_is_files;      /* 1: it says where the text is */
    hy_backend *backend;
    char why[256]; /* why this device */
    hy_config config;
    hy_plan plan;
    hy_model *model;
    hy_batch batch, first; /* the one at hand; the run's first, unless it is resumed */
    hy_tracks tracks;
    uint64_t random; /* state of the generator that places windows ... */
    uint64_t before; /* ... and what it was before the batch at hand */
    hy_log log;
    hy_screen screen;
    double start, shown; /* times of the first step and of the last progress line, in seconds */
    double earlier;      /* seconds of the run before it was resumed */

    hy_recent recent;
    int64_t steps, tokens;     /* done */
    double train_seconds;      /* without evaluations and samples */
    double aside;              /* seconds spent on these */
    double speed_start, speed; /* between SPEED_FROM and SPEED_TO, tokens/s; 0: not reached */
    int64_t speed_tokens;
    double loss_scale;   /* of fp16, else 1 */
    int64_t scale_steps; /* good steps at this scale */
    double first_loss, held_out;
    int64_t saved;                /* step of the last model file; 0: none yet */
    int64_t resumed;              /* step of the file of --resume */
    char older[HY_PATH_MAX + 16]; /* name that the file got that was there before; "": none */
    char not_saved[640];          /* why the last attempt failed; "": it did not */
    char text_sum[65];            /* SHA-256 of the text, if model files are written or resumed */
    hy_gate gates[GATES_MAX];
    int gate_count, gates_at_start;
    hy_probe probe; /* the latest for the gates ... */
    double ratio;   /* ... and the gradient ratio beside it */
} trainer;

static const int stop_signals[] = {SIGINT, SIGTERM, SIGHUP};
enum { STOP_SIGNALS = sizeof stop_signals / sizeof stop_signals[0] };
enum { PATIENCE = 2 };                    /* seconds until another signal is another request */
static volatile sig_atomic_t interrupted; /* 0, or the first signal */
static struct timespec interrupted_at;    /* by the first signal */

/* One request to stop often comes as several signals: timeout signals its child and then the
 * group, a closing terminal hangs up twice.  So only a later one ends the program, by itself: it is
 * blocked until this returns. */
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

/* What is ignored, as by nohup, stays so, but for Ctrl-C. */
static void catch_signals(void) {
    struct sigaction action, before;
    memset(&action, 0, sizeof action);
    sigemptyset(&action.sa_mask);
    action.sa_handler = on_interrupt;
    action.sa_flags = SA_RESTART; /* a write goes on, and does not fail */
    for (int i = 0; i < STOP_SIGNALS; i++) sigaddset(&action.sa_mask, stop_signals[i]);
    for (int i = 0; i < STOP_SIGNALS; i++)
        if (stop_signals[i] == SIGINT ||
            (sigaction(stop_signals[i], NULL, &before) == 0 && before.sa_handler != SIG_IGN))
            sigaction(stop_signals[i], &action, NULL);
    signal(SIGPIPE, SIG_IGN); /* a reader of the report that has gone is an error as any other */
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* All that is printed is out. */
static gt_status flush_report(void) { return hy_flush(stdout, "standard output"); }

/* ---- numbers as text ------------------------------------------------------------------------ */

typedef struct number {
    char text[64];
} number;

/* 1234567 as 1,234,567 */
static number grouped(int64_t n) {
    char digits[32];
    number out;
    int length = snprintf(digits, sizeof digits, "%lld", (long long)n), at = 0;
    for (int i = 0; i < length; i++) {
        if (i > 0 && (length - i) % 3 == 0) out.text[at++] = ',';
        out.text[at++] = digits[i];
    }
    out.text[at] = 0;
    return out;
}

/* Memory in use, in MiB: on the CPU the largest the process has been, else what the model took. */
static double memory_mib(const trainer *t) {
    return strcmp(t->backend->name, "cpu") ? (double)t->plan.total / MIB : hy_peak_of_process();
}

/* ---- recent steps --------------------------------------------------------------------------- */

static void recent_add(hy_recent *r, const hy_result *result, double seconds) {
    int i = (int)(r->steps++ % HY_RECENT);
    r->loss[i] = result->loss;
    r->norm[i] = result->norm[HY_GROUPS];
    r->ratio[i] = result->ratio;
    r->tokens[i] = result->targets;
    r->seconds[i] = seconds;
}

static int recent_count(const hy_recent *r) { return r->steps < HY_RECENT ? (int)r->steps : HY_RECENT; }

static double recent_mean(const hy_recent *r, const double *values) {
    double sum = 0;
    for (int i = 0; i < recent_count(r); i++) sum += values[i];
    return recent_count(r) ? sum / recent_count(r) : (double)NAN;
}

static double recent_speed(const hy_recent *r) { /* tokens per second */
    int64_t tokens = 0;
    double seconds = 0;
    for (int i = 0; i < recent_count(r); i++) tokens += r->tokens[i], seconds += r->seconds[i];
    return (double)tokens / seconds;
}

/* ---- generated text ------------------------------------------------------------------------- */

static gt_status generate(trainer *t, hy_printer *printer) {
    const hy_options *o = &t->options;
    const hy_sampling sampling = {.prompt = o->prompt,
                                  .first = t->first_token,
                                  .count = o->sample,
                                  .temperature = o->temperature,
                                  .top_k = o->top_k,
                                  .seed = (uint64_t)o->seed + 1};
    return hy_generate(t->model, &t->text, &sampling, printer);
}

/* A sample, between lines. */
static gt_status print_sample(trainer *t) {
    hy_printer printer = {.out = stdout};
    puts("sample");
    puts("----------------------------------------------------------------");
    gt_status status = generate(t, &printer);
    puts("\n----------------------------------------------------------------\n");
    return status == GT_OK ? flush_report() : status;
}

/* ---- what is printed before the first step -------------------------------------------------- */

static void print_models(const trainer *t) {
    const hy_screen *s = &t->screen;
    int count;
    const hy_config *list = hy_model_list(&count);
    hy_screen_entry(s, 0, "", "width x layers, parameters with the %d symbols of %s, and without the embedding",
                    t->text.vocab, t->data);
    puts("");
    for (int i = 0; i < count; i++) {
        char sizes[128];
        hy_plan plan;
        if (hy_model_plan(t->backend, list + i, t->text.vocab, 1, 1, &plan) != GT_OK) continue;
        int length = snprintf(sizes, sizeof sizes, "  %-7s %3d x %d %10s %10s  ", list[i].name, list[i].hidden,
                              list[i].layers, grouped(plan.parameters).text, grouped(plan.non_embedding).text);
        hy_screen_entry(s, length, sizes, "%s", list[i].about);
    }
}

enum { START = 12, FINAL = 15 }; /* where the entries of the first and the last table begin */

static void print_memory_plan(const hy_screen *s, const hy_plan *p) {
    const struct {
        const char *name;
        size_t bytes;
    } parts[] = {{"weights", p->weights},         {"gradients", p->gradients}, {"optimiser", p->optimizer},
                 {"activations", p->activations}, {"backward", p->backward},   {"states", p->states},
                 {"workspace", p->workspace}};
    char text[512] = "";
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        size_t used = strlen(text);
        snprintf(text + used, sizeof text - used, "%s%s %.1f", i ? ", " : "", parts[i].name,
                 (double)parts[i].bytes / MIB);
    }
    hy_screen_entry(s, START, "memory", "%.1f MiB: %s", (double)p->total / MIB, text);
}

static void print_groups(const hy_screen *s, const hy_plan *p) {
    char text[256] = "";
    for (int g = 0; g < HY_GROUPS; g++) {
        size_t used = strlen(text);
        if (g == HY_EMBED) continue;
        snprintf(text + used, sizeof text - used, "%s%s %s", used ? ", " : "", hy_group_names[g],
                 grouped(p->group[g]).text);
    }
    hy_screen_entry(s, START, "parameters", "%s, without the embedding %s: %s", grouped(p->parameters).text,
                    grouped(p->non_embedding).text, text);
}

static void print_saving(const trainer *t) {
    const hy_screen *s = &t->screen;
    const hy_options *o = &t->options;
    if (!*o->save)
        hy_screen_entry(s, START, "model file", "none: --save FILE keeps what is learnt");
    else if (o->save_every)
        hy_screen_entry(s, START, "model file", "%s, every %s steps and at the end", o->save,
                        grouped(o->save_every).text);
    else
        hy_screen_entry(s, START, "model file", "%s, at the end", o->save);
    if (*t->older) hy_screen_entry(s, START, "", "the file that was there is kept as %s", t->older);
}

/* The sizes of a model, in words. */
static struct sizes { char text[256]; } sizes_of(const hy_config *c) {
    struct sizes out;
    char rwkv[64] = "", mamba[128] = "";
    if (c->mix != HY_MIX_MAMBA) snprintf(rwkv, sizeof rwkv, ", RWKV heads %d x %d", c->heads, c->hidden / c->heads);
    if (c->mix != HY_MIX_RWKV && c->mamba == 1)
        snprintf(mamba, sizeof mamba, ", Mamba channels %d, state %d, convolution %d", c->expand * c->hidden, c->state,
                 c->conv);
    else if (c->mix != HY_MIX_RWKV)
        snprintf(mamba, sizeof mamba, ", Mamba heads %d x %d, state %d, convolution %d",
                 c->expand * c->hidden / c->mamba_head, c->mamba_head, c->state, c->conv);
    snprintf(out.text, sizeof out.text, "%d channels, %d layers%s%s, FFN %d", c->hidden, c->layers, rwkv, mamba,
             c->ffn * c->hidden);
    return out;
}

/* Which part of a text is held out. */
static number part_of(const hy_text *x) {
    number out;
    if (x->pieces > 1)
        snprintf(out.text, sizeof out.text, "the last tenth of %lld tracks", (long long)x->pieces);
    else
        snprintf(out.text, sizeof out.text, "the last tenth");
    return out;
}

static void print_start(const trainer *t) {
    const hy_options *o = &t->options;
    const hy_text *x = &t->text;
    const hy_screen *s = &t->screen;
    const hy_config *c = hy_model_config(t->model);
    hy_screen_entry(s, START, "model", "%s: %s; %s", c->name, c->about, sizes_of(c).text);
    print_groups(s, &t->plan);
    hy_screen_entry(s, START, "device", "%s: %s", t->backend->device, t->why);
    print_memory_plan(s, &t->plan);
    if (x->is_numbers || x->end_symbol >= 0)
        hy_screen_entry(s, START, "data", "%s: %s tokens, vocabulary %d, %s documents", t->data, grouped(x->size).text,
                        x->vocab, grouped(x->documents).text);
    else
        hy_screen_entry(s, START, "data", "%s: %s bytes, %d different ones, %s documents", t->data,
                        grouped(x->size).text, x->vocab, grouped(x->documents).text);
    hy_screen_entry(s, START, "", "training %s, held out %s (%s)", grouped(x->train).text,
                    grouped(x->size - x->train).text, part_of(x).text);
    hy_screen_entry(s, START, "", "unigram entropy %.4f nats, of the held-out part %.4f", x->entropy_train,
                    x->entropy_held_out);
    hy_screen_entry(s, START, "training",
                    "%s steps of %lld %s of %lld tokens, learning rate %g to %g, %lld warm-up, "
                    "seed %lld",
                    grouped(o->steps).text, (long long)o->batch, o->stateful ? "tracks" : "windows", (long long)o->seq,
                    o->lr, o->min_lr, (long long)o->warmup, (long long)o->seed);
    if (t->steps) hy_screen_entry(s, START, "going on", "after step %s of %s", grouped(t->steps).text, o->resume);
    if (*o->init) hy_screen_entry(s, START, "weights", "from %s", o->init);
    print_saving(t);
    if (t->log.file) hy_screen_entry(s, START, "log", "%s%s%s", t->log.path, *t->log.note ? ": " : "", t->log.note);
    puts("");
}

/* ---- progress ------------------------------------------------------------------------------- */

/* held_out: of this step, NAN if it was not measured.  A line with it stays on the screen. */
static gt_status print_progress(trainer *t, double held_out) {
    const hy_recent *r = &t->recent;
    int stays = !isnan(held_out);
    double per_step = (now() - t->start) / (double)t->steps; /* evaluations included */
    if (t->screen.is_live && t->held_out >= 0) held_out = t->held_out;
    t->shown = now();
    hy_screen_progress(&t->screen,
                       &(hy_screen_row){.step = t->steps,
                                        .steps = t->options.steps,
                                        .loss = recent_mean(r, r->loss),
                                        .held_out = held_out,
                                        .grad_norm = recent_mean(r, r->norm),
                                        .ratio = recent_mean(r, r->ratio),
                                        .tokens_per_s = recent_speed(r),
                                        .memory_mib = memory_mib(t),
                                        .seconds_left = per_step * (double)(t->options.steps - t->steps)},
                       stays);
    return flush_report();
}

/* Ends the line that is refreshed in place: something else will be printed. */
static void end_progress(trainer *t) { hy_screen_leave(&t->screen); }

/* held_out: NAN if there was no evaluation after this step. */
static gt_status write_log(trainer *t, const hy_result *result, double held_out, double lr, const hy_probe *probe) {
    return hy_log_write(&t->log, &(hy_log_row){.step = t->steps,
                                               .tokens = t->tokens,
                                               .loss = result->loss,
                                               .held_out = held_out,
                                               .grad_norm = result->norm[HY_GROUPS],
                                               .rwkv_norm = result->norm[HY_RWKV],
                                               .mamba_norm = result->norm[HY_MAMBA],
                                               .ratio = result->ratio,
                                               .lr = lr,
                                               .tokens_per_s = recent_speed(&t->recent),
                                               .memory_mib = memory_mib(t),
                                               .seconds = now() - t->start,
                                               .probe = probe});
}

/* ---- training ------------------------------------------------------------------------------- */

/* Linear warm-up, then a cosine from lr to min_lr; step counts from 1. */
static double learning_rate(const hy_options *o, int64_t step) {
    if (step <= o->warmup) return o->lr * (double)step / (double)o->warmup;
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

/* The held-out loss, last, and what it means. */
static void print_loss(const trainer *t) {
    const hy_screen *s = &t->screen;
    hy_screen_entry(s, FINAL, "unigram", "%.4f on the held-out part; the model is %.4f nats %s",
                    t->text.entropy_held_out, fabs(t->text.entropy_held_out - t->held_out),
                    t->held_out < t->text.entropy_held_out ? "better" : "worse");
    hy_screen_entry(s, FINAL, "held-out", "all %s tokens: %.4f bits per %s, perplexity %.4f",
                    grouped(t->text.size - t->text.train).text, t->held_out / log(2),
                    t->text.is_numbers || t->text.end_symbol >= 0 ? "token" : "byte", exp(t->held_out));
    printf("held-out loss %.4f\n", t->held_out);
}

/* Mean loss over the held-out part, or over its first `limit` tokens (0: all) in whole windows. */
static gt_status evaluate(trainer *t, int64_t limit, double *loss) {
    hy_batch batch;
    double sum = 0;
    int64_t count = 0, next = 0;
    gt_status status = hy_batch_create(&batch, t->batch.rows, t->batch.length);
    while (status == GT_OK && (!limit || count < limit) && hy_batch_held_out(&batch, &t->text, &next))
        status = hy_model_eval(t->model, batch.input, batch.target, &sum, &count);
    hy_batch_free(&batch);
    *loss = sum / (double)count;
    if (status == GT_OK && !isfinite(*loss))
        status = hy_fail(GT_ERROR_VALUE, "step %lld: the held-out loss is not finite (%g)", (long long)t->steps, *loss);
    return status;
}

/* Refuses a step that went wrong, but for gradients that overflow in fp16: these are left out, and
 * the loss scale follows. */
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

/* Wall clock from step SPEED_FROM to SPEED_TO, without evaluations and samples. */
static void measure_speed(trainer *t) {
    if (t->steps == SPEED_FROM) {
        t->speed_start = now() - t->aside;
        t->speed_tokens = t->tokens;
    } else if (t->steps == SPEED_TO && t->speed_start > 0) { /* 0: resumed in between */
        t->speed = (double)(t->tokens - t->speed_tokens) / (now() - t->aside - t->speed_start);
    }
}

/* One optimiser step on the batch at hand. */
static gt_status train_step(trainer *t, double lr, hy_result *result) {
    const hy_options *o = &t->options;
    const hy_optimizer optimizer = {.lr = (float)lr,
                                    .beta1 = 0.9f,
                                    .beta2 = 0.95f,
                                    .eps = 1e-8f,
                                    .weight_decay = (float)o->weight_decay,
                                    .max_norm = (float)o->clip,
                                    .loss_scale = (float)t->loss_scale};
    const int32_t *keep = o->stateful ? t->batch.keep : NULL;
    double start = now();
    gt_status status = hy_model_train(t->model, t->batch.input, t->batch.target, keep, &optimizer);
    if (status == GT_OK) status = hy_model_result(t->model, result);
    if (status != GT_OK) return status;
    t->steps++;
    t->tokens += result->targets;
    t->train_seconds += now() - start;
    measure_speed(t);
    if ((status = judge_step(t, result)) != GT_OK) return status;
    if (!result->skipped) recent_add(&t->recent, result, now() - start);
    if (t->steps == 1) t->first_loss = result->loss;
    return GT_OK;
}

static void add_gate(trainer *t, hy_gate gate) { t->gates[t->gate_count++] = gate; }

static int count_gates(const trainer *t, hy_verdict verdict) {
    int count = 0;
    for (int i = 0; i < t->gate_count; i++) count += t->gates[i].verdict == verdict;
    return count;
}

/* RWKV / Mamba ratio of the gradient's norms on the batch at hand, without an update.  fp16: at the
 * first loss scale, from the run's downwards, that overflows nowhere. */
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

/* What the branches do; it follows the gates. */
static void print_branches(const trainer *t) {
    const hy_probe *p = &t->probe;
    if (!p->has[0] || !p->has[1]) {
        hy_screen_entry(&t->screen, START, "branches", "%s alone: RMS %.3g", p->has[0] ? "RWKV" : "Mamba",
                        p->branch_rms[p->has[0] ? 0 : 1]);
        return;
    }
    hy_screen_entry(&t->screen, START, "branches",
                    "RWKV, Mamba: RMS before the mix %.3g, %.3g; gains %.3f, %.3f; gradient ratio "
                    "%.3f; cosine %.3f (independent under 0.3)",
                    p->branch_rms[0], p->branch_rms[1], p->branch_gain[0], p->branch_gain[1], t->ratio,
                    p->branch_cosine);
}

/* The gates that look at the model before its first step. */
static gt_status gates_before(trainer *t) {
    double sum = 0;
    int64_t counted = 0;
    gt_status status = hy_model_eval(t->model, t->batch.input, t->batch.target, &sum, &counted);
    add_gate(t, hy_gate_operators(t->backend));
    if (status == GT_OK) status = hy_model_probe(t->model, t->batch.input, t->batch.target, &t->probe);
    if (status == GT_OK) status = first_ratio(t, &t->ratio);
    if (status != GT_OK) return status;
    add_gate(t, hy_gate_forward(&t->probe, counted, t->batch.targets));
    if (!*t->options.init) /* else it has learnt something */
        add_gate(t, hy_gate_entropy(t->probe.entropy, t->text.vocab));
    add_gate(t, hy_gate_states(&t->probe));
    add_gate(t, hy_gate_balance(&t->probe, t->ratio));
    return GT_OK;
}

static gt_status print_gates(const trainer *t, const char *when, int first) {
    hy_screen_entry(&t->screen, 0, "", "gates %s: verdict, gate, value, bounds", when);
    hy_gates_print(&t->screen, t->gates + first, t->gate_count - first);
    print_branches(t);
    puts("");
    return flush_report();
}

/* Keeps the first batch, for G3 of a run that turns out short. */
static gt_status keep_first(trainer *t) {
    const size_t bytes = (size_t)(t->batch.rows * t->batch.length) * sizeof(int32_t);
    gt_status status = hy_batch_create(&t->first, t->batch.rows, t->batch.length);
    if (status != GT_OK) return status;
    memcpy(t->first.input, t->batch.input, bytes);
    memcpy(t->first.target, t->batch.target, bytes);
    return GT_OK;
}

/* G3 of a run whose recent steps are not all after the first: on the first batch, again. */
static gt_status add_short_training_gate(trainer *t) {
    double sum = 0;
    int64_t counted = 0;
    gt_status status = hy_model_eval(t->model, t->first.input, t->first.target, &sum, &counted);
    if (status == GT_OK)
        add_gate(t, hy_gate_short_training(t->steps, t->first_loss, sum / (double)counted,
                                           recent_mean(&t->recent, t->recent.norm)));
    return status;
}

/* G3 judges the recent steps, and so does G4. */
static gt_status add_training_gate(trainer *t) {
    const hy_recent *r = &t->recent;
    if (r->steps <= HY_RECENT && t->first.input) return add_short_training_gate(t);
    add_gate(t, hy_gate_training(r->steps, t->first_loss, recent_mean(r, r->loss), recent_mean(r, r->norm)));
    return GT_OK;
}

/* The gates that look at the trained model; they probe it with the last batch. */
static gt_status gates_after(trainer *t) {
    gt_status status = hy_model_probe(t->model, t->batch.input, t->batch.target, &t->probe);
    if (status != GT_OK) return status;
    if (t->steps < G3_STEPS && (status = add_training_gate(t)) != GT_OK) return status;
    add_gate(t, hy_gate_states(&t->probe));
    t->ratio = recent_mean(&t->recent, t->recent.ratio);
    add_gate(t, hy_gate_balance(&t->probe, t->ratio));
    return GT_OK;
}

static int due(int64_t step, int64_t every) { return every > 0 && step % every == 0; }

/* All that a model file gets. */
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
    options->ffn = c->ffn;
    hy_run run = {.model = t->model,
                  .options = options,
                  .text = &t->text,
                  .tracks = options->stateful ? &t->tracks : NULL,
                  .device = t->backend->name,
                  .progress = {.steps = t->steps,
                               .tokens = t->tokens,
                               .random = t->random,
                               .loss_scale = t->loss_scale,
                               .scale_steps = t->scale_steps,
                               .first_loss = t->first_loss,
                               .held_out = t->held_out,
                               .seconds = now() - t->start,
                               .train_seconds = t->train_seconds,
                               .aside = t->aside,
                               .recent = t->recent}};
    memcpy(run.text_sum, t->text_sum, sizeof run.text_sum);
    return run;
}

/* Writes the model file, if one is wanted.  If that fails the run goes on, and ends with status 1
 * unless a later attempt succeeds. */
static void save(trainer *t) {
    static hy_options options;
    double start = now();
    if (!*t->options.save || t->saved == t->steps) return;
    hy_run run = run_of(t, &options);
    if (hy_save(&run, t->options.save) == GT_OK) {
        t->saved = t->steps;
        t->not_saved[0] = 0;
    } else {
        snprintf(t->not_saved, sizeof t->not_saved, "save: %.600s", hy_last_error());
        hy_make_plain(t->not_saved);
        end_progress(t);
        fprintf(stderr, "hybrid_train: step %lld: %s; ", (long long)t->steps, t->not_saved);
        if (t->saved)
            fprintf(stderr, "the file of step %lld stays\n", (long long)t->saved);
        else
            fprintf(stderr, "nothing is saved yet\n");
    }
    t->aside += now() - start;
}

/* Sets the trainer to where the file's run was. */
static gt_status load_run(trainer *t) {
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
    t->recent = p->recent;
    if (strcmp(t->options.save, t->options.resume)) t->saved = 0;
    return GT_OK;
}

/* What follows a step: gates, held-out loss, log, progress line, sample. */
static gt_status report_step(trainer *t, const hy_result *result, double lr, int last) {
    const hy_options *o = &t->options;
    double held_out = NAN, start = now();
    gt_status status = GT_OK;
    hy_probe probe;
    int probed = 0;
    if (t->steps == G3_STEPS) status = add_training_gate(t);
    if (last) save(t); /* before anything that takes time or can fail */
    start = now();
    if (status == GT_OK && (last || due(t->steps, o->eval_every))) {
        status = evaluate(t, last ? 0 : o->eval_tokens, &held_out);
        t->held_out = held_out;
        t->aside += now() - start;
    }
    if (status == GT_OK && t->log.file && !isnan(held_out)) {
        start = now();
        status = hy_model_probe(t->model, t->batch.input, t->batch.target, &probe);
        probed = status == GT_OK;
        t->aside += now() - start;
    }
    gt_status written = write_log(t, result, held_out, lr, probed ? &probe : NULL);
    if (status == GT_OK) status = written;
    int show = t->screen.is_live ? now() - t->shown > 0.1 : due(t->steps, o->log_every);
    if (status == GT_OK && (show || !isnan(held_out))) status = print_progress(t, held_out);
    if (status == GT_OK && !last && due(t->steps, o->save_every)) save(t);
    if (status == GT_OK && !last && due(t->steps, o->sample_every) && o->sample) {
        end_progress(t);
        start = now();
        status = print_sample(t);
        t->aside += now() - start;
    }
    return status;
}

/* A device that failed: what there is to go on with.  in_step: the step after t->steps was begun. */
static gt_status lose_device(trainer *t, gt_status status, int in_step) {
    const hy_options *o = &t->options;
    char reason[480], way[HY_TEXT_MAX + 64] = "";
    if (status != GT_ERROR_CUDA) return status;
    snprintf(reason, sizeof reason, "%s", hy_last_error());
    end_progress(t);
    if (t->steps && hy_model_take_back(t->model)) {
        if (in_step) t->random = t->before;
        save(t);
    }
    const char *file = t->saved ? o->save : o->resume;
    if (*file)
        snprintf(way, sizeof way, "; %s goes on from step %lld%s", file, (long long)(t->saved ? t->saved : t->resumed),
                 strcmp(o->device, "auto") ? "" : ", on the CPU with --device cpu --resume");
    else if (!strcmp(o->device, "auto"))
        snprintf(way, sizeof way, "; --device cpu runs on the CPU");
    return hy_fail(status, "step %lld on %.60s: %.300s%.250s", (long long)t->steps + in_step, t->backend->device,
                   reason, way);
}

static gt_status train(trainer *t) {
    const hy_options *o = &t->options;
    hy_result result;
    gt_status status = GT_OK;
    if (t->steps) t->start = now() - t->earlier;
    if (t->steps == 0) {
        next_batch(t);
        status = keep_first(t);
        if (status == GT_OK) status = lose_device(t, gates_before(t), 1);
        if (status == GT_OK) status = print_gates(t, "before training, on the first batch", 0);
        t->gates_at_start = t->gate_count;
        if (status != GT_OK || (o->gates_strict && count_gates(t, HY_FAIL))) return status;
        t->start = now();
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
        last = t->steps == o->steps || interrupted || (o->gates_strict && count_gates(t, HY_FAIL) > 0);
        status = lose_device(t, report_step(t, &result, lr, last), 0);
    }
    end_progress(t);
    return status;
}

/* ---- setting up ------------------------------------------------------------------------------ */

static gt_dtype dtype_of(const char *name) {
    return !strcmp(name, "f32") ? GT_F32 : !strcmp(name, "f16") ? GT_F16 : GT_BF16;
}

static const char *const dtype_names[] = {[GT_F32] = "f32", [GT_BF16] = "bf16", [GT_F16] = "f16"};

/* Opens the device that is wanted, with this dtype if it is CUDA, and says why it is this one. */
static gt_status open_device(trainer *t, const char *wanted, const char *on_cuda) {
    const char *dtype = t->options.dtype; /* as the user wants it */
    gt_status status;
    if (t->options.plan.count && strcmp(wanted, "cuda")) {
        snprintf(t->why, sizeof t->why, "a plan needs none");
        return hy_backend_plan(&t->backend, *dtype ? dtype_of(dtype) : GT_BF16);
    }
    if (!strcmp(wanted, "cpu")) {
        if (*dtype && dtype_of(dtype) != GT_F32)
            return hy_fail(GT_ERROR_VALUE, "dtype: '%s': the CPU computes in f32 alone; leave --dtype out", dtype);
        snprintf(t->why, sizeof t->why, "as --device says");
        return hy_backend_cpu(&t->backend);
    }
    status = hy_backend_cuda(&t->backend, dtype_of(on_cuda));
    if (status == GT_OK) {
        snprintf(t->why, sizeof t->why, "CUDA works here");
        return GT_OK;
    }
    if (!strcmp(wanted, "cuda")) return hy_fail(status, "device cuda: %s", hy_last_error());
    if (*dtype && dtype_of(dtype) != GT_F32)
        return hy_fail(GT_ERROR_VALUE,
                       "dtype: '%s' needs a GPU, but there is no CUDA (%s); the CPU computes in f32 "
                       "alone: leave --dtype out",
                       dtype, hy_last_error());
    snprintf(t->why, sizeof t->why, "no CUDA (%s)", hy_last_error());
    return hy_backend_cpu(&t->backend);
}

/* Finds the text that comes with the program: in the source tree, or near the program, or near the
 * current directory. */
static void find_fables(char *path, const char *program) {
    const char *slash = strrchr(program, '/');
    int directory = slash ? (int)(slash - program) + 1 : 0;
    const char *places[] = {"", "../", "../examples/", "../../examples/", "examples/"};
#ifdef HY_DATA_DIR
    snprintf(path, HY_TEXT_MAX, "%s/fables.txt", HY_DATA_DIR);
    if (!access(path, R_OK)) return;
#endif
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
        snprintf(path, HY_TEXT_MAX, "%.*s%sdata/fables.txt", directory, program, places[i]);
        if (!access(path, R_OK)) return;
        snprintf(path, HY_TEXT_MAX, "%sdata/fables.txt", places[i]);
        if (!access(path, R_OK)) return;
    }
}

/* Nothing that is read may be written. */
static gt_status check_files(const trainer *t) {
    const hy_options *o = &t->options;
    gt_status status = hy_keep_apart("csv", o->csv, "the text of --data", t->data);
    if (status == GT_OK && o->config) status = hy_keep_apart("csv", o->csv, "the config file", o->config);
    if (status == GT_OK && t->file.path) status = hy_keep_apart("csv", o->csv, "the model file", t->file.path);
    return status;
}

/* Every window that will be asked for fits into the text. */
static gt_status check_lengths(const trainer *t) {
    const hy_lengths *bench = &t->options.bench;
    gt_status status = bench->count || t->options.plan.count ? GT_OK : hy_text_fits(&t->text, t->options.seq);
    for (int i = 0; i < bench->count && status == GT_OK; i++) status = hy_text_fits(&t->text, bench->of[i]);
    return status;
}

/* Opens the device, a resumed run's being of the kind that it had if that is possible.  Its dtype
 * is the file's, if there is one, but for the CPU. */
static gt_status open_backend(trainer *t) {
    const hy_options *o = &t->options;
    const char *saved = NULL, *wanted = o->device, *dtype = o->dtype;
    int on_cpu = !strcmp(wanted, "cpu");
    if (t->file.path && !*o->init) saved = hy_file_text_of(&t->file, "option.dtype");
    if (*o->resume && !hy_options_given(o, "device")) {
        const char *device = hy_file_text_of(&t->file, "device");
        on_cpu = device && !strcmp(device, "cpu");
        wanted = on_cpu ? "cpu" : "auto";
    }
    if (saved && *o->resume && *dtype && strcmp(saved, dtype) && !(on_cpu && dtype_of(dtype) == GT_F32))
        return hy_fail(GT_ERROR_VALUE, "dtype: %s is not the %.20s of %s", dtype, saved, o->resume);
    if (saved && !*dtype && !on_cpu) dtype = saved;
    gt_status status = open_device(t, wanted, dtype);
    if (status == GT_OK && wanted != o->device && on_cpu) snprintf(t->why, sizeof t->why, "as the run that goes on");
    return status;
}

/* Defaults of what neither the user nor a model file set. */
static gt_status fill_options(trainer *t) {
    gt_status status = hy_options_default(&t->options, strcmp(t->backend->name, "cpu"));
    strcpy(t->options.dtype, dtype_names[t->backend->dtype]);
    return status;
}

/* ---- model files that are read --------------------------------------------------------------- */

/* At most one option says what to do instead of a new run, and goes with the others.  *mode: its
 * name, or NULL. */
static gt_status find_mode(const hy_options *o, const char **mode) {
    const struct {
        const char *name;
        int is_given, trains;
    } modes[] = {{"resume", *o->resume, 1},          {"init", *o->init, 1},     {"eval", *o->eval, 0},
                 {"generate", *o->generate, 0},      {"check", o->check, 0},    {"bench", o->bench.count, 0},
                 {"list-models", o->list_models, 0}, {"plan", o->plan.count, 0}};
    *mode = NULL;
    for (size_t i = 0; i < sizeof modes / sizeof modes[0]; i++) {
        if (!modes[i].is_given) continue;
        if (*mode) return hy_fail(GT_ERROR_VALUE, "--%s and --%s: only one of them can be given", *mode, modes[i].name);
        *mode = modes[i].name;
        if (!modes[i].trains && (*o->save || *o->csv))
            return hy_fail(GT_ERROR_VALUE, "--%s trains nothing: no --%s with it", *mode, *o->save ? "save" : "csv");
    }
    return GT_OK;
}

/* Opens the model file that is to be read, if there is one, and takes the options that it sets. */
static gt_status open_file(trainer *t) {
    const hy_options *o = &t->options;
    const char *mode;
    gt_status status = find_mode(o, &mode);
    const char *path = *o->resume ? o->resume : *o->init ? o->init : *o->eval ? o->eval : o->generate;
    if (status != GT_OK || !*path) return status;
    status = hy_saved_open(&t->file, path);
    if (status != GT_OK) return hy_fail(status, "%s: %s", mode, hy_last_error());
    t->data_is_files = !*o->init && !hy_options_given(o, "data");
    return hy_saved_options(&t->file,
                            *o->resume ? HY_TAKE_STRICTLY
                            : *o->init ? HY_TAKE_MODEL
                                       : HY_TAKE_ALL,
                            &t->options);
}

static gt_status check_prompt(const trainer *t) {
    int32_t token[HY_TEXT_MAX];
    int count;
    if (hy_text_encode(&t->text, t->options.prompt, token, &count, t->file.path != NULL) == GT_OK) return GT_OK;
    return hy_fail(GT_ERROR_VALUE, "prompt: %s", hy_last_error());
}

/* For --generate: there is no text, but what the file says of the one that it was trained on. */
static gt_status read_vocabulary(trainer *t) {
    uint8_t bytes[256], first;
    int count;
    gt_status status = hy_saved_numbers(&t->file, &count);
    if (status != GT_OK) return status;
    if (count) {
        t->text.is_numbers = 1, t->text.end_symbol = -1, t->text.vocab = count;
        status = hy_saved_first_token(&t->file, &t->first_token);
        if (status == GT_OK && t->first_token >= count)
            status = hy_fail(GT_ERROR_VALUE, "%s: damaged: first_token is not in the vocabulary", t->file.path);
        return status == GT_OK ? check_prompt(t) : status;
    }
    status = hy_saved_vocabulary(&t->file, bytes, &count);
    if (status == GT_OK) status = hy_saved_first_byte(&t->file, &first);
    if (status != GT_OK) return status;
    hy_text_vocabulary(&t->text, bytes, count, t->options.end_symbol);
    snprintf(t->text.end_text, sizeof t->text.end_text, "%s", *t->options.separator ? t->options.separator : "\n\n\n");
    t->first_token = t->text.token_of[first];
    if (t->first_token < 0 && t->options.end_symbol && first == (uint8_t)t->text.end_text[0])
        t->first_token = t->text.end_symbol; /* the text began with one */
    if (t->first_token >= 0) return check_prompt(t);
    return hy_fail(GT_ERROR_VALUE, "%s: damaged: first_byte is not in the vocabulary", t->file.path);
}

/* Gives the text the vocabulary of the file, if there is one. */
static gt_status use_vocabulary(trainer *t) {
    uint8_t bytes[256];
    int count;
    gt_status status = GT_OK;
    if (t->file.path) {
        status = hy_saved_numbers(&t->file, &count);
        if (status == GT_OK && !count) status = hy_saved_vocabulary(&t->file, bytes, &count);
        if (status != GT_OK) return status;
        status = t->text.is_numbers ? hy_text_resize(&t->text, count) : hy_text_recode(&t->text, bytes, count);
    }
    t->first_token = hy_token(&t->text, 0);
    if (status == GT_OK) return status;
    return hy_fail(status, "data %s: %s, %s", t->data, hy_last_error(), t->file.path);
}

/* After the model was created: weights, or all of the run that goes on. */
static gt_status load_file(trainer *t) {
    if (!t->file.path) return GT_OK;
    gt_status status = *t->options.resume ? load_run(t) : hy_load_weights(&t->file, t->model);
    if (status == GT_OK) hy_file_close(&t->file);
    return status;
}

/* A finished model stays when another run gets its name. */
static gt_status keep_older(trainer *t) {
    const hy_options *o = &t->options;
    if (!*o->save || (*o->resume && hy_same_file(o->save, o->resume))) return GT_OK;
    return hy_keep_older("save", o->save, t->older, sizeof t->older);
}

/* The file that is to be written can be. */
static gt_status check_save(const trainer *t) {
    const hy_options *o = &t->options;
    if (!*o->save) return GT_OK;
    if (hy_is_standard(o->save))
        return hy_fail(GT_ERROR_VALUE, "save: %s is where the report goes; give another name", o->save);
    gt_status status = hy_keep_apart("save", o->save, "the text of --data", t->data);
    if (status == GT_OK && o->config) status = hy_keep_apart("save", o->save, "the config file", o->config);
    if (status == GT_OK) status = hy_keep_apart("save", o->save, "the log", o->csv);
    if (status != GT_OK) return status;
    status = hy_save_fits(o->save, *o->resume ? o->resume : o->init);
    return status == GT_OK ? status : hy_fail(status, "save: %s", hy_last_error());
}

/* What the options say of the text. */
static hy_source source_of(const hy_options *o) {
    return (hy_source){.separator = o->separator,
                       .end_symbol = o->end_symbol,
                       .width = !strcmp(o->tokens, "uint16")   ? 2
                                : !strcmp(o->tokens, "uint32") ? 4
                                                               : 0,
                       .vocab = o->vocab,
                       .end_token = o->end_token,
                       .tracks = !strcmp(o->split, "tracks") ? o->batch : 0,
                       .sum = *o->save || *o->resume};
}

/* Options that go with bytes, or with numbers, alone. */
static gt_status check_source(const hy_options *o) {
    const int is_bytes = !strcmp(o->tokens, "bytes");
    const char *wrong = is_bytes ? (o->vocab            ? "vocab"
                                    : o->end_token >= 0 ? "end-token"
                                                        : NULL)
                                 : (o->end_symbol   ? "end-symbol"
                                    : *o->separator ? "separator"
                                                    : NULL);
    if (!is_bytes && !*o->data) return hy_fail(GT_ERROR_VALUE, "tokens: the fables are bytes; --data names a file");
    if (!wrong) return GT_OK;
    return hy_fail(GT_ERROR_VALUE, "%s: goes with %s alone", wrong, is_bytes ? "--tokens uint16 or uint32" : "bytes");
}

static gt_status load_text(trainer *t, const char *program) {
    if (*t->options.data)
        memcpy(t->data, t->options.data, sizeof t->data);
    else
        find_fables(t->data, program);
    gt_status status = check_files(t);
    const hy_source source = source_of(&t->options);
    if (status == GT_OK) status = check_source(&t->options);
    if (status == GT_OK) status = hy_text_load(&t->text, t->data, &source);
    if (status != GT_OK && t->data_is_files)
        hy_fail(status, "%s (so says %s; --data names another place)", hy_last_error(), t->file.path);
    if (status != GT_OK || t->options.list_models) return status;
    if (*t->options.save || *t->options.resume) hy_text_sum(&t->text, t->text_sum);
    status = use_vocabulary(t);
    if (status != GT_OK || *t->options.eval) return status;
    status = check_lengths(t);
    return status == GT_OK ? check_prompt(t) : status;
}

/* The model's configuration, with what the options say of its sizes. */
static gt_status choose_config(trainer *t) {
    const hy_options *o = &t->options;
    hy_config *c = &t->config;
    int count;
    const hy_config *list = hy_model_list(&count);
    for (int i = 0; i < count; i++)
        if (!strcmp(list[i].name, o->model)) *c = list[i];
    if (o->hidden && o->hidden != c->hidden) c->hidden = (int)o->hidden, c->heads = 0;
    if (o->layers) c->layers = (int)o->layers;
    if (o->heads) c->heads = (int)o->heads;
    if (o->head_size && o->heads && o->heads * o->head_size != c->hidden)
        return hy_fail(GT_ERROR_VALUE, "head-size: %lld does not fit %lld heads of %d channels",
                       (long long)o->head_size, (long long)o->heads, c->hidden);
    if (o->head_size && c->hidden % o->head_size)
        return hy_fail(GT_ERROR_VALUE, "head-size: %lld does not divide hidden = %d", (long long)o->head_size,
                       c->hidden);
    if (o->head_size) c->heads = c->hidden / (int)o->head_size;
    if (o->d_state) c->state = (int)o->d_state;
    if (o->expand) c->expand = (int)o->expand;
    if (o->d_conv) c->conv = (int)o->d_conv;
    if (o->mamba_head) c->mamba_head = (int)o->mamba_head;
    if (o->ffn) c->ffn = (int)o->ffn;
    c->stateful = o->stateful;
    return hy_config_resolve(c);
}

/* Bytes that a model can have; 0 if that is not known.  On the CPU, what the computer has. */
static size_t available_memory(const trainer *t) {
    long pages = sysconf(_SC_PHYS_PAGES), bytes = sysconf(_SC_PAGESIZE);
    if (strcmp(t->backend->name, "cpu")) return t->backend->memory_free;
    return pages > 0 && bytes > 0 ? (size_t)pages * (size_t)bytes : 0;
}

/* What the user can do about it: a run that goes on keeps its batch and seq, the model of a file is
 * as it is, and --generate has a batch of one. */
static void advise_on_memory(const trainer *t, char *advice, size_t size) {
    const hy_options *o = &t->options;
    char batch[64] = "", length[64] = "";
    if (o->batch > 1 && !*o->resume && !*o->generate)
        snprintf(batch, sizeof batch, "a smaller --batch (%lld)", (long long)o->batch);
    if (o->bench.count && o->seq > 1)
        snprintf(length, sizeof length, "shorter lengths than %lld in --bench", (long long)o->seq);
    else if (o->seq > 1 && !*o->resume)
        snprintf(length, sizeof length, "a smaller --seq (%lld)", (long long)o->seq);
    if (*batch || *length)
        snprintf(advice, size, "; less is needed with %s%s%s", batch, *batch && *length ? " or " : "", length);
    else if (!*o->resume && !*o->init && !*o->eval && !*o->generate)
        snprintf(advice, size, "; less is needed with a smaller --model");
    else
        *advice = 0;
}

/* there: bytes that can be had, 0 if that is not known. */
static gt_status needs_memory(const trainer *t, size_t there) {
    char how_much[64] = "which cannot be had", advice[192];
    if (there) snprintf(how_much, sizeof how_much, "%.0f are there", (double)there / MIB);
    advise_on_memory(t, advice, sizeof advice);
    return hy_fail(GT_ERROR_MEMORY, "the model needs %.0f MiB of memory, %s%s", (double)t->plan.total / MIB, how_much,
                   advice);
}

static gt_status create_model(trainer *t, const hy_config *config) {
    const hy_options *o = &t->options;
    gt_status status = hy_model_plan(t->backend, config, t->text.vocab, (int)o->batch, (int)o->seq, &t->plan);
    if (status != GT_OK) return status;
    const size_t there = available_memory(t);
    if (there && t->plan.total > there) return needs_memory(t, there);
    status =
        hy_model_create(t->backend, config, t->text.vocab, (int)o->batch, (int)o->seq, (uint64_t)o->seed, &t->model);
    return status == GT_ERROR_MEMORY ? needs_memory(t, 0) : status;
}

/* ---- instead of training --------------------------------------------------------------------- */

/* One step on the device and on the CPU; *failures counts the tensors that differ. */
static gt_status check_device(trainer *t, int *failures) {
    const hy_options *o = &t->options;
    hy_backend *cpu;
    if (!strcmp(t->backend->name, "cpu"))
        return hy_fail(GT_ERROR_NO_DEVICE, "check: there is no other device than the CPU: %s", t->why);
    gt_status status = hy_backend_cpu(&cpu);
    if (status != GT_OK) return status;
    status = hy_batch_create(&t->batch, o->batch, o->seq);
    if (status == GT_OK) {
        hy_batch_random(&t->batch, &t->text, &t->random);
        status = hy_check(t->backend, cpu, &t->config, t->text.vocab, (int)o->batch, (int)o->seq, (uint64_t)o->seed,
                          t->batch.input, t->batch.target, stdout, failures);
    }
    cpu->close(cpu);
    return status;
}

/* For hy_bench_run. */
static gt_status create_for_bench(hy_bench *b, const hy_config *config, hy_model **model, hy_plan *plan) {
    trainer *t = b->trainer;
    t->options.batch = b->options.batch;
    t->options.seq = b->options.seq;
    gt_status status = create_model(t, config);
    *model = t->model;
    *plan = t->plan;
    t->model = NULL; /* it is the bench's */
    return status;
}

static gt_status bench(trainer *t) {
    hy_bench b = {.backend = t->backend,
                  .config = &t->config,
                  .text = &t->text,
                  .options = t->options,
                  .random = &t->random,
                  .create = create_for_bench,
                  .trainer = t};
    gt_status status = t->options.bench_cpu ? hy_backend_cpu(&b.cpu) : GT_OK;
    if (status == GT_OK) status = hy_bench_run(&b);
    if (b.cpu) b.cpu->close(b.cpu);
    return status;
}

/* A row of a plan: one model, one batch, for training and for inference. */
static gt_status plan_row(const trainer *t, const hy_config *model, int64_t batch) {
    const double tokens = (double)(batch * t->options.seq);
    hy_config lean = *model;
    hy_plan p, inference;
    lean.inference = 1;
    gt_status status = hy_model_plan(t->backend, model, t->text.vocab, (int)batch, (int)t->options.seq, &p);
    if (status == GT_OK)
        status = hy_model_plan(t->backend, &lean, t->text.vocab, (int)batch, (int)t->options.seq, &inference);
    if (status != GT_OK) return status;
    printf("%s,%s,%d,%d,%d,%lld,%lld,%lld", model->name, dtype_names[t->backend->dtype], model->hidden, model->layers,
           t->text.vocab, (long long)p.parameters, (long long)batch, (long long)t->options.seq);
    const size_t parts[] = {p.weights, p.gradients, p.optimizer, p.activations,  p.backward,
                            p.states,  p.workspace, p.total,     inference.total};
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) printf(",%.1f", (double)parts[i] / MIB);
    printf(",%.3f,%.3f\n", (double)p.total / 1024 / tokens, (double)inference.total / 1024 / tokens);
    return flush_report();
}

/* Of the model that the options describe, or else of all. */
static gt_status plan_models(trainer *t) {
    static const char *const sizes[] = {"model",   "hidden", "layers",     "heads",  "head-size",
                                        "d-state", "expand", "mamba-head", "d-conv", "ffn"};
    const hy_lengths *batches = &t->options.plan;
    int is_one = 0, count;
    const hy_config *list = hy_model_list(&count);
    gt_status status = GT_OK;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) is_one |= hy_options_given(&t->options, sizes[i]);
    printf("# MiB on %s; weights, gradients, optimiser and activations are exact, the kernels' own memory %s\n"
           "model,dtype,hidden,layers,vocab,parameters,batch,seq,weights,gradients,optimizer,activations,backward,"
           "states,workspace,training,inference,training_kib_per_token,inference_kib_per_token\n",
           t->backend->device, strcmp(t->backend->name, "plan") ? "too" : "is estimated");
    for (int i = 0; i < (is_one ? 1 : count); i++)
        for (int k = 0; k < batches->count && status == GT_OK; k++)
            status = plan_row(t, is_one ? &t->config : &list[i], batches->of[k]);
    return status;
}

/* ---- a saved model --------------------------------------------------------------------------- */

/* On a terminal as it is made and with nothing that a terminal should not get, else byte for byte.
 */
static gt_status write_text(trainer *t) {
    hy_printer printer = {.out = stdout, .raw = !t->screen.is_terminal};
    if (t->screen.is_terminal) setvbuf(stdout, NULL, _IONBF, 0);
    gt_status status = generate(t, &printer);
    if (t->screen.is_terminal) puts("");
    return status == GT_OK ? flush_report() : status;
}

static gt_status print_held_out(trainer *t) {
    const hy_config *c = hy_model_config(t->model);
    const hy_text *x = &t->text;
    gt_status status = evaluate(t, 0, &t->held_out);
    if (status != GT_OK) return status;
    const hy_screen *s = &t->screen;
    hy_screen_entry(s, FINAL, "model", "%s: %s, %d channels, %d layers", t->options.eval, c->name, c->hidden,
                    c->layers);
    hy_screen_entry(s, FINAL, "device", "%s: %s", t->backend->device, t->why);
    hy_screen_entry(s, FINAL, "data", "%s: %s %s, of which held out %s (%s)", t->data, grouped(x->size).text,
                    x->is_numbers || x->end_symbol >= 0 ? "tokens" : "bytes", grouped(x->size - x->train).text,
                    part_of(x).text);
    print_loss(t);
    return flush_report();
}

/* ---- main ----------------------------------------------------------------------------------- */

/* Everything before the first step. */
static gt_status set_up(trainer *t, const char *program) {
    const hy_options *o = &t->options;
    gt_status status = open_file(t);
    if (status == GT_OK) status = open_backend(t);
    if (status == GT_OK) status = fill_options(t);
    if (status == GT_OK) status = *o->generate ? read_vocabulary(t) : load_text(t, program);
    if (status != GT_OK) return status;
    if ((status = choose_config(t)) != GT_OK) return status;
    t->random = (uint64_t)o->seed;
    t->loss_scale = 1;
    if (t->backend->dtype == GT_F16) t->loss_scale = exp2(floor(log2((double)(SCALE_PER_TOKEN * o->batch * o->seq))));
    t->held_out = -1;
    if (o->list_models || o->check || o->bench.count || o->plan.count) return GT_OK;
    if (*o->generate) t->options.batch = 1; /* there is one sequence */
    t->config.inference = *o->eval || *o->generate;
    status = create_model(t, &t->config);
    if (status == GT_OK) status = hy_batch_create(&t->batch, o->batch, o->seq);
    if (status == GT_OK && o->stateful && !*o->generate && !*o->eval)
        status = hy_tracks_create(&t->tracks, &t->text, o->batch);
    if (status == GT_OK) status = load_file(t);
    if (status == GT_OK) status = check_save(t);
    if (status == GT_OK) status = hy_log_open(&t->log, o->csv, *o->resume ? t->steps : -1);
    return status;
}

static void print_final(const trainer *t) {
    const hy_recent *r = &t->recent;
    const hy_screen *s = &t->screen;
    hy_screen_entry(s, FINAL, "steps", "%s of %s, %s tokens, %.2f times the training part", grouped(t->steps).text,
                    grouped(t->options.steps).text, grouped(t->tokens).text, (double)t->tokens / (double)t->text.train);
    hy_screen_entry(s, FINAL, "time", "%s, of which training %.1f s: %s tokens/s", hy_duration(now() - t->start).text,
                    t->train_seconds, grouped((int64_t)((double)t->tokens / t->train_seconds)).text);
    if (t->speed > 0)
        hy_screen_entry(s, FINAL, "speed", "steps %d to %d: %s tokens/s by the clock, evaluations left out", SPEED_FROM,
                        SPEED_TO, grouped((int64_t)t->speed).text);
    hy_screen_entry(s, FINAL, "memory", "%.1f MiB", memory_mib(t));
    hy_screen_entry(s, FINAL, "gates", "%d PASS, %d WARN, %d FAIL", count_gates(t, HY_PASS), count_gates(t, HY_WARN),
                    count_gates(t, HY_FAIL));
    hy_screen_entry(s, FINAL, "training loss", "%.4f, mean of the last %d steps", recent_mean(r, r->loss),
                    recent_count(r));
    print_loss(t);
}

/* Training and what comes after it. */
static gt_status run(trainer *t) {
    catch_signals();
    gt_status status = keep_older(t);
    if (status != GT_OK) return status;
    print_start(t);
    status = flush_report();
    if (status == GT_OK) status = train(t);
    if (status == HY_ERROR_WRITE) save(t); /* the model is right, though nobody is told */
    if (status != GT_OK) return status;
    if (!t->steps) {
        puts("ended by a gate, before the first update");
        return flush_report();
    }
    if (interrupted) puts("interrupted");
    puts("");
    if ((status = gates_after(t)) != GT_OK) return status;
    status = print_gates(t, "after training, on the last batch and the last steps", t->gates_at_start);
    if (status == GT_OK && t->options.sample) status = print_sample(t);
    if (status != GT_OK) return status;
    print_final(t);
    return GT_OK;
}

static void clean_up(trainer *t) {
    hy_model_destroy(t->model);
    if (t->backend) t->backend->close(t->backend);
    hy_batch_free(&t->batch);
    hy_batch_free(&t->first);
    hy_tracks_free(&t->tracks);
    hy_file_close(&t->file);
    hy_text_free(&t->text);
}

/* Prints the last error, once: a stream that cannot be written says so again as it is closed. */
static int tell(int status) {
    static char told[640];
    char message[sizeof told];
    snprintf(message, sizeof message, "%s", hy_last_error());
    hy_make_plain(message);
    if (strcmp(told, message)) fprintf(stderr, "hybrid_train: %s\n", message);
    memcpy(told, message, sizeof told);
    return status;
}

/* The same, after what the report has so far.  Not once standard output is closed. */
static int fail(int status) {
    char message[640];
    snprintf(message, sizeof message, "%s", hy_last_error());
    flush_report(); /* finish looks whether that worked */
    hy_fail(GT_ERROR_VALUE, "%s", message);
    return tell(status);
}

/* Closes the log and the report; the exit status, which is 1 if a part of them is lost. */
static int finish(trainer *t, int status) {
    int bad = status == EXIT_BAD_OPTION;
    if (hy_log_close(&t->log) != GT_OK) status = fail(EXIT_FAILURE);
    if (hy_close(stdout, "standard output") != GT_OK) status = tell(EXIT_FAILURE);
    return bad ? EXIT_BAD_OPTION : status;
}

/* Idle OpenMP threads spin by default, which slows the program down many times over when it has to
 * share the cores.  Not at all is no better: loops here are short, and to sleep and wake at each took
 * 40 % of the time on two free cores.  So GNU's OpenMP spins for some microseconds, others not.
 * OpenMP reads its settings before main: set them and start again. */
static void stop_spinning(char **argv) {
#ifdef _OPENMP
    if (!getenv("OMP_WAIT_POLICY") && !setenv("GOMP_SPINCOUNT", "1000", 0) && !setenv("OMP_WAIT_POLICY", "passive", 1))
        execvp(argv[0], argv); /* if it fails the program just goes on */
#else
    (void)argv;
#endif
}

/* What the options ask for, after set_up; the exit status. */
static int act(trainer *t) {
    int differences = 0;
    if (t->options.list_models) {
        print_models(t);
        return 0;
    }
    if (t->options.check) {
        if (check_device(t, &differences) != GT_OK) return fail(EXIT_FAILURE);
        return differences ? EXIT_CHECK : 0;
    }
    if (t->options.plan.count) return plan_models(t) == GT_OK ? 0 : fail(EXIT_FAILURE);
    if (t->options.bench.count) return bench(t) == GT_OK ? 0 : fail(EXIT_FAILURE);
    if (*t->options.generate) return write_text(t) == GT_OK ? 0 : fail(EXIT_FAILURE);
    if (*t->options.eval) return print_held_out(t) == GT_OK ? 0 : fail(EXIT_FAILURE);
    if (t->steps >= t->options.steps) {
        printf("%s: the run is complete, step %lld of %lld; a larger --steps makes it longer\n", t->options.resume,
               (long long)t->steps, (long long)t->options.steps);
        return 0;
    }
    if (run(t) != GT_OK) return fail(EXIT_FAILURE);
    if (*t->not_saved) {
        hy_fail(GT_ERROR_VALUE, "%s", t->not_saved);
        return fail(EXIT_FAILURE);
    }
    if (interrupted) return EXIT_SIGNAL + interrupted;
    return t->options.gates_strict && count_gates(t, HY_FAIL) ? EXIT_GATE : 0;
}

int main(int argc, char **argv) {
    static trainer t;
    int status;
    stop_spinning(argv);
    if (hy_streams_open() != GT_OK) return fail(EXIT_FAILURE);
    if (hy_options_parse(&t.options, argc, argv) != GT_OK) return finish(&t, fail(EXIT_BAD_OPTION));
    if (t.options.help) {
        hy_options_help(stdout);
        return finish(&t, 0);
    }
    hy_screen_open(&t.screen, stdout);
    gt_status error = set_up(&t, argv[0]);
    if (error != GT_OK)
        status = fail(error < GT_ERROR_UNSUPPORTED ? EXIT_BAD_OPTION : EXIT_FAILURE);
    else
        status = act(&t);
    status = finish(&t, status);
    clean_up(&t);
    return status;
}
