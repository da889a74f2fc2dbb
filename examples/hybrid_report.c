/* Prints the report of hybrid_train: its start, progress, gates, samples and end. */
#include "hybrid_bench.h"
#include "hybrid_trainer.h"
#include <math.h>
#include <string.h>

int hy_count_gates(const trainer *t, hy_verdict verdict) {
    int count = 0;
    for (int i = 0; i < t->gate_count; i++) count += t->gates[i].verdict == verdict;
    return count;
}

gt_status hy_flush_report(void) { return hy_flush(stdout, "standard output"); }

/* ---- numbers as text ------------------------------------------------------------------------ */

hy_phrase hy_grouped(int64_t n) {
    char digits[32];
    hy_phrase out;
    int length = snprintf(digits, sizeof digits, "%lld", (long long)n), at = 0;
    for (int i = 0; i < length; i++) {
        if (i > 0 && (length - i) % 3 == 0) out.text[at++] = ',';
        out.text[at++] = digits[i];
    }
    out.text[at] = 0;
    return out;
}

/* Returns the memory in use, in MiB: the peak of the process on the CPU, the model's memory on a GPU. */
static double memory_mib(const trainer *t) {
    return strcmp(t->backend->name, "cpu") ? (double)t->plan.total / MIB : hy_peak_of_process();
}

/* ---- recent steps --------------------------------------------------------------------------- */

int hy_recent_count(const hy_recent *r) { return r->steps < HY_RECENT ? (int)r->steps : HY_RECENT; }

double hy_recent_mean(const hy_recent *r, const double *values) {
    double sum = 0;
    for (int i = 0; i < hy_recent_count(r); i++) sum += values[i];
    return hy_recent_count(r) ? sum / hy_recent_count(r) : (double)NAN;
}

static double recent_speed(const hy_recent *r) { /* in tokens per second */
    int64_t tokens = 0;
    double seconds = 0;
    for (int i = 0; i < hy_recent_count(r); i++) tokens += r->tokens[i], seconds += r->seconds[i];
    return (double)tokens / seconds;
}

/* ---- generated text ------------------------------------------------------------------------- */

static gt_status generate(trainer *t, hy_printer *printer, hy_pace *pace) {
    const hy_options *o = &t->options;
    const hy_sampling sampling = {.prompt = t->prompt ? t->prompt : o->prompt,
                                  .first = t->first_token,
                                  .count = o->sample,
                                  .temperature = o->temperature,
                                  .top_k = o->top_k,
                                  .top_p = o->top_p,
                                  .penalty = o->repetition_penalty,
                                  .stop = o->stop,
                                  .seed = (uint64_t)o->seed + 1};
    return hy_generate(t->model, &t->text, &sampling, printer, pace);
}

/* Prints the speed of decoding, and compares it with the byte floor.  The byte floor is the time in which this
 * device copies as many bytes as the decoding of one token must move. */
static void print_pace(const trainer *t, const hy_pace *pace) {
    const int samples = hy_model_config(t->model)->samples;
    const double seconds = pace->seconds / (double)pace->steps, bytes = hy_model_token_bytes(t->model);
    double bytes_per_s;
    char floor[128] = "";
    if (hy_copy_speed(t->backend, &bytes_per_s) == GT_OK)
        snprintf(floor, sizeof floor, "; byte floor %.4f ms (%.1f MiB; a copy runs at %.0f GB/s)",
                 bytes / bytes_per_s * 1e3, bytes / MIB, bytes_per_s * 1e-9);
    hy_screen_entry(&t->screen, FINAL, "speed", "%s tokens/s of %d sample%s, %.4f ms per token%s",
                    hy_grouped((int64_t)(samples / seconds)).text, samples, samples == 1 ? "" : "s", seconds * 1e3,
                    floor);
}

/* Prints a sample between two lines. */
gt_status hy_print_sample(trainer *t) {
    hy_printer printer = {.out = stdout};
    puts("sample");
    puts("----------------------------------------------------------------");
    gt_status status = generate(t, &printer, NULL);
    puts("\n----------------------------------------------------------------\n");
    return status == GT_OK ? hy_flush_report() : status;
}

/* Prints the text of --generate.  On a terminal it prints each token as soon as it is drawn, and escapes bytes that
 * a terminal should not get.  To a file or a pipe it prints all bytes unchanged, and for a single sample nothing
 * else. */
gt_status hy_print_text(trainer *t) {
    const int is_terminal = t->screen.is_terminal, is_alone = !is_terminal && t->options.batch == 1;
    hy_printer printer = {.out = stdout, .raw = !is_terminal, .streams = 1};
    hy_pace pace;
    if (is_terminal) setvbuf(stdout, NULL, _IONBF, 0);
    gt_status status = generate(t, &printer, &pace);
    if (is_terminal && t->options.batch == 1) puts("");
    if (status == GT_OK && !is_alone && pace.steps) print_pace(t, &pace);
    return status == GT_OK ? hy_flush_report() : status;
}

/* ---- printed before the first step -------------------------------------------------- */

void hy_print_models(const trainer *t) {
    const hy_screen *s = &t->screen;
    int count;
    const hy_config *list = hy_model_list(&count);
    hy_screen_entry(s, 0, "",
                    "name, width x layers, parameters with the %d symbols of %s, parameters without the embedding",
                    t->text.vocab, t->data);
    puts("");
    for (int i = 0; i < count; i++) {
        char sizes[128];
        hy_plan plan;
        if (hy_model_plan(t->backend, list + i, t->text.vocab, 1, 1, &plan) != GT_OK) continue;
        int length = snprintf(sizes, sizeof sizes, "  %-7s %3d x %d %10s %10s  ", list[i].name, list[i].hidden,
                              list[i].layers, hy_grouped(plan.parameters).text, hy_grouped(plan.non_embedding).text);
        hy_screen_entry(s, length, sizes, "%s", list[i].about);
    }
}

static void print_memory_plan(const hy_screen *s, const hy_plan *p, int recompute) {
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
    hy_screen_entry(s, START, "memory", "%.1f MiB: %s%s", (double)p->total / MIB, text,
                    recompute ? "; backward computes the layers again" : "");
}

static void print_groups(const hy_screen *s, const hy_plan *p, int untied) {
    char text[256] = "";
    for (int g = 0; g < HY_GROUPS; g++) {
        size_t used = strlen(text);
        if (g == HY_EMBED) continue;
        snprintf(text + used, sizeof text - used, "%s%s %s", used ? ", " : "", hy_group_names[g],
                 hy_grouped(p->group[g]).text);
    }
    hy_screen_entry(s, START, "parameters", "%s, without the embedding%s %s: %s", hy_grouped(p->parameters).text,
                    untied ? " and the head" : "", hy_grouped(p->non_embedding).text, text);
}

static void print_saving(const trainer *t) {
    const hy_screen *s = &t->screen;
    const hy_options *o = &t->options;
    if (!*o->save)
        hy_screen_entry(s, START, "model file", "none: give --save FILE to keep the model");
    else if (o->save_every)
        hy_screen_entry(s, START, "model file", "%s, every %s steps and at the end", o->save,
                        hy_grouped(o->save_every).text);
    else
        hy_screen_entry(s, START, "model file", "%s, at the end", o->save);
    if (*o->save && o->keep_best)
        hy_screen_entry(s, START, "", "%s.best has the model with the lowest loss on the held-out curve", o->save);
    if (*t->older) hy_screen_entry(s, START, "", "the older file is now %s", t->older);
}

/* Describes the sizes of a model in words. */
static struct sizes { char text[320]; } sizes_of(const hy_config *c) {
    struct sizes out;
    char rwkv[64] = "", mamba[128] = "", ffn[32] = "no FFN";
    if (c->mix != HY_MIX_MAMBA) snprintf(rwkv, sizeof rwkv, ", RWKV heads %d x %d", c->heads, c->hidden / c->heads);
    if (c->mix != HY_MIX_RWKV && c->mamba == 1)
        snprintf(mamba, sizeof mamba, ", Mamba channels %d, state %d, convolution %d", c->expand * c->hidden, c->state,
                 c->conv);
    else if (c->mix != HY_MIX_RWKV)
        snprintf(mamba, sizeof mamba, ", Mamba heads %d x %d, state %d, convolution %d",
                 c->expand * c->hidden / c->mamba_head, c->mamba_head, c->state, c->conv);
    if (c->ffn != HY_NO_FFN) snprintf(ffn, sizeof ffn, "FFN %d", c->ffn * c->hidden);
    snprintf(out.text, sizeof out.text, "%d channels, %d layers%s%s, %s%s", c->hidden, c->layers, rwkv, mamba, ffn,
             c->untied ? ", untied output head" : "");
    return out;
}

hy_phrase hy_part_of(const trainer *t) {
    hy_phrase out;
    const double share = t->options.held_out;
    char part[32] = "the last tenth";
    if (share != 0.1) snprintf(part, sizeof part, "the last %.4g %%", 100 * share);
    if (*t->options.val)
        snprintf(out.text, sizeof out.text, "all of --val");
    else if (t->text.pieces > 1)
        snprintf(out.text, sizeof out.text, "%s of %lld tracks", part, (long long)t->text.pieces);
    else
        snprintf(out.text, sizeof out.text, "%s", part);
    return out;
}

void hy_print_start(const trainer *t) {
    const hy_options *o = &t->options;
    const hy_text *x = &t->text;
    const hy_screen *s = &t->screen;
    const hy_config *c = hy_model_config(t->model);
    hy_screen_entry(s, START, "model", "%s: %s; %s", c->name, c->about, sizes_of(c).text);
    print_groups(s, &t->plan, t->config.untied);
    hy_screen_entry(s, START, "device", "%s: %s", t->backend->device, t->why);
    print_memory_plan(s, &t->plan, c->recompute);
    if (x->is_numbers || x->end_symbol >= 0)
        hy_screen_entry(s, START, "data", "%s: %s tokens, vocabulary %d, %s documents", t->data,
                        hy_grouped(x->size).text, x->vocab, hy_grouped(x->documents).text);
    else
        hy_screen_entry(s, START, "data", "%s: %s bytes, %d different ones, %s documents", t->data,
                        hy_grouped(x->size).text, x->vocab, hy_grouped(x->documents).text);
    if (t->files.count > 1)
        hy_screen_entry(s, START, "", "%s files; the first is %s", hy_grouped(t->files.count).text, t->files.path[0]);
    if (x->span) hy_screen_entry(s, START, "", "the files are mapped: the system reads only the parts in use");
    hy_screen_entry(s, START, "", "training %s, held out %s (%s)", hy_grouped(x->train).text,
                    hy_grouped(hy_held_out_tokens(x)).text, hy_part_of(t).text);
    hy_screen_entry(s, START, "", "unigram entropy: %.4f nats in the training part, %.4f in the held-out part",
                    x->entropy_train, x->entropy_held_out);
    hy_screen_entry(s, START, "training",
                    "%s steps of %lld %s of %lld tokens, learning rate %g to %g, %lld warm-up, "
                    "seed %lld",
                    hy_grouped(o->steps).text, (long long)o->batch, o->stateful ? "tracks" : "windows",
                    (long long)o->seq, o->lr, strcmp(o->schedule, "constant") ? o->min_lr : o->lr, (long long)o->warmup,
                    (long long)o->seed);
    if (!strcmp(o->schedule, "wsd"))
        hy_screen_entry(s, START, "", "learning rate constant, then linear in the last %s steps",
                        hy_grouped(o->decay_steps).text);
    if (o->beta1 != 0.9 || o->beta2 != 0.95 || o->eps != 1e-8)
        hy_screen_entry(s, START, "", "AdamW with betas %g and %g, eps %g", o->beta1, o->beta2, o->eps);
    if (t->rows && t->rows < t->batch.rows)
        hy_screen_entry(s, START, "", "%lld windows are in memory at once; the gradients of all parts are added up",
                        (long long)t->rows);
    if (t->ranks.size > 1)
        hy_screen_entry(s, START, "ranks",
                        "%d; each processes %lld of the %lld windows, and needs the memory above; %s", t->ranks.size,
                        (long long)t->batch.rows, (long long)o->batch, t->ranks.library);
    if (*t->transport) hy_screen_entry(s, START, "gradients", "added up by %s", t->transport);
    if (o->dropout > 0) hy_screen_entry(s, START, "", "dropout %g", o->dropout);
    if (o->ema > 0)
        hy_screen_entry(s, START, "", "evaluations and samples use a moving average of the weights, with factor %g",
                        o->ema);
    if (t->steps) hy_screen_entry(s, START, "resumed", "after step %s of %s", hy_grouped(t->steps).text, o->resume);
    if (*o->init) hy_screen_entry(s, START, "weights", "from %s", o->init);
    print_saving(t);
    if (t->log.file) hy_screen_entry(s, START, "log", "%s%s%s", t->log.path, *t->log.note ? ": " : "", t->log.note);
    puts("");
}

/* ---- progress ------------------------------------------------------------------------------- */

/* Prints a line of progress.  held_out is the held-out loss after this step, or NAN if it was not measured.  A line
 * with a held-out loss stays on the screen. */
gt_status hy_print_progress(trainer *t, double held_out) {
    const hy_recent *r = &t->recent;
    int stays = !isnan(held_out);
    double per_step = (hy_now() - t->start) / (double)t->steps; /* in seconds, including evaluations */
    if (t->screen.is_live && t->held_out >= 0) held_out = t->held_out;
    t->shown = hy_now();
    hy_screen_progress(&t->screen,
                       &(hy_screen_row){.step = t->steps,
                                        .steps = t->options.steps,
                                        .loss = hy_recent_mean(r, r->loss),
                                        .held_out = held_out,
                                        .grad_norm = hy_recent_mean(r, r->norm),
                                        .ratio = hy_recent_mean(r, r->ratio),
                                        .tokens_per_s = recent_speed(r),
                                        .memory_mib = memory_mib(t),
                                        .seconds_left = per_step * (double)(t->options.steps - t->steps)},
                       stays);
    return hy_flush_report();
}

/* Ends the line that is refreshed in place; call it before printing other text. */
void hy_end_progress(trainer *t) { hy_screen_leave(&t->screen); }

/* Seconds between progress lines of an evaluation, on a screen that cannot refresh its last line. */
enum { EVALUATION_LINES = 30 };

/* Prints the progress of an evaluation.  so_far holds the sums of the losses and of the tokens so far; `tokens` is
 * the number of all tokens.  On a screen that cannot refresh its last line, a short evaluation prints nothing. */
gt_status hy_print_evaluation(trainer *t, const hy_loss *so_far, int64_t tokens, double seconds) {
    char line[512];
    const double left = seconds / (double)so_far->tokens * (double)(tokens - so_far->tokens);
    if (hy_now() - t->shown < (t->screen.is_live ? 0.1 : EVALUATION_LINES) || so_far->tokens >= tokens) return GT_OK;
    t->shown = hy_now();
    snprintf(line, sizeof line, "evaluation: %s of %s tokens, loss %.4f, eta %s", hy_grouped(so_far->tokens).text,
             hy_grouped(tokens).text, so_far->mean / (double)so_far->tokens, hy_duration(left).text);
    hy_screen_status(&t->screen, line);
    return hy_flush_report();
}

/* Writes a row of the log.  held_out is NAN if the held-out loss was not measured after this step. */
gt_status hy_write_log(trainer *t, const hy_result *result, double held_out, double lr, const hy_probe *probe) {
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
                                               .seconds = hy_now() - t->start,
                                               .probe = probe,
                                               .final_loss = t->final.mean,
                                               .final_tokens = t->final.tokens,
                                               .gpu = t->watch.nvml ? t->watch.now : (hy_gpu){NAN, NAN, NAN, NAN}});
}

/* ---- gates and results ----------------------------------------------------------------------- */

/* Prints the table of the branches, which follows the gates. */
static void print_branches(const trainer *t) {
    const hy_probe *p = &t->probe;
    if (!p->has[0] || !p->has[1]) {
        hy_screen_entry(&t->screen, START, "branches", "only %s: RMS %.3g", p->has[0] ? "RWKV" : "Mamba",
                        p->branch_rms[p->has[0] ? 0 : 1]);
        return;
    }
    hy_screen_entry(&t->screen, START, "branches",
                    "RWKV, Mamba: RMS before the mix %.3g, %.3g; gains %.3f, %.3f; gradient ratio "
                    "%.3f; cosine %.3f (independent under 0.3)",
                    p->branch_rms[0], p->branch_rms[1], p->branch_gain[0], p->branch_gain[1], t->ratio,
                    p->branch_cosine);
}

gt_status hy_print_gates(const trainer *t, const char *when, int first) {
    int failed = 0;
    for (int i = first; i < t->gate_count && t->options.quiet; i++)
        if (t->gates[i].verdict == HY_FAIL) hy_gates_print(&t->screen, t->gates + i, 1), failed++;
    if (failed) puts("");
    if (t->options.quiet) return hy_flush_report();
    hy_screen_entry(&t->screen, 0, "", "gates %s: verdict, gate, value, bounds", when);
    hy_gates_print(&t->screen, t->gates + first, t->gate_count - first);
    print_branches(t);
    puts("");
    return hy_flush_report();
}

/* Prints the final held-out loss, and other losses to compare it with. */
void hy_print_loss(const trainer *t) {
    const hy_screen *s = &t->screen;
    const double loss = t->final.mean;
    const int64_t all = hy_held_out_tokens(&t->text);
    char part[160];
    const int counts_bytes = t->final.bytes > 0;
    if (t->text.train) /* a text without a training part has no frequencies */
        hy_screen_entry(s, FINAL, "unigram", "%.4f on the held-out part; the model is %.4f nats %s",
                        t->text.entropy_held_out, fabs(t->text.entropy_held_out - loss),
                        loss < t->text.entropy_held_out ? "better" : "worse");
    snprintf(part, sizeof part, "all %s", hy_grouped(all).text);
    if (t->final.tokens < all)
        snprintf(part, sizeof part, "the first %s of %s", hy_grouped(t->final.tokens).text, hy_grouped(all).text);
    if (t->text.table.start)
        hy_screen_entry(s, FINAL, "bytes", "%.4f bits per byte: these tokens stand for %s bytes",
                        loss / log(2) * (double)t->final.tokens / (double)t->final.bytes,
                        hy_grouped(t->final.bytes).text);
    hy_screen_entry(s, FINAL, "held-out", "%s tokens: %.4f bits per %s, perplexity %.4f", part, loss / log(2),
                    counts_bytes && !t->text.table.start ? "byte" : "token", exp(loss));
    printf("held-out loss %.4f\n", loss);
}

/* With --watch: prints the numbers that NVML reported. */
static void print_watch(const trainer *t) {
    const hy_gpu_watch *w = &t->watch;
    char text[256] = "";
    const struct {
        const char *format;
        double value;
        long long known;
    } parts[] = {{"%.0f %% used", w->mean.percent, w->known[0]},
                 {"at most %.0f degrees", w->most.celsius, w->known[1]},
                 {"%.0f W", w->mean.watts, w->known[2]},
                 {"at most %.0f MiB of its memory, all programs", w->most.mib, w->known[3]}};
    if (!w->nvml) return;
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        size_t used = strlen(text);
        if (!parts[i].known) continue;
        used += (size_t)snprintf(text + used, sizeof text - used, "%s", used ? ", " : "");
        snprintf(text + used, sizeof text - used, parts[i].format, parts[i].value);
    }
    hy_screen_entry(&t->screen, FINAL, "GPU", "%s", *text ? text : "NVML reports nothing about it");
}

void hy_print_final(const trainer *t) {
    const hy_recent *r = &t->recent;
    const hy_screen *s = &t->screen;
    hy_screen_entry(s, FINAL, "steps", "%s of %s, %s tokens, %.2f times the training part", hy_grouped(t->steps).text,
                    hy_grouped(t->options.steps).text, hy_grouped(t->tokens).text,
                    (double)t->tokens / (double)t->text.train);
    hy_screen_entry(s, FINAL, "time", "%s; training took %.1f s of it: %s tokens/s",
                    hy_duration(hy_now() - t->start).text, t->train_seconds,
                    hy_grouped((int64_t)((double)t->tokens / t->train_seconds)).text);
    if (t->best_step && t->options.keep_best)
        hy_screen_entry(s, FINAL, "best", "%.4f at step %s, in %s.best", t->best, hy_grouped(t->best_step).text,
                        t->options.save);
    if (t->speed > 0)
        hy_screen_entry(s, FINAL, "speed", "steps %d to %d: %s tokens/s by the clock, evaluations left out", SPEED_FROM,
                        SPEED_TO, hy_grouped((int64_t)t->speed).text);
    if (t->waited_of > 0)
        hy_screen_entry(s, FINAL, "waiting", "%.2f %% of the time of all steps, for NCCL to add up the gradients",
                        100 * t->waited / t->waited_of);
    hy_screen_entry(s, FINAL, "memory", "%.1f MiB", memory_mib(t));
    print_watch(t);
    hy_screen_entry(s, FINAL, "gates", "%d PASS, %d WARN, %d FAIL", hy_count_gates(t, HY_PASS),
                    hy_count_gates(t, HY_WARN), hy_count_gates(t, HY_FAIL));
    hy_screen_entry(s, FINAL, "training loss", "%.4f, mean of the last %d steps", hy_recent_mean(r, r->loss),
                    hy_recent_count(r));
    if (t->options.eval_every && t->options.eval_tokens && t->held_out >= 0)
        hy_screen_entry(s, FINAL, "curve", "last point %.4f; every point is the loss of the first %s held-out tokens",
                        t->held_out, hy_grouped(t->options.eval_tokens).text);
    hy_print_loss(t);
}
