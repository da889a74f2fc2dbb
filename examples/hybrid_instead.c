/* The modes other than training: check the device against the CPU, measure, plan memory, evaluate a saved model. */
#include "hybrid_bench.h"
#include "hybrid_check.h"
#include "hybrid_profile.h"
#include "hybrid_trainer.h"
#include <math.h>
#include <string.h>

/* ---- instead of training --------------------------------------------------------------------- */

gt_status hy_check_device(trainer *t, int *failures) {
    const hy_options *o = &t->options;
    hy_backend *cpu;
    if (!strcmp(t->backend->name, "cpu"))
        return hy_fail(GT_ERROR_NO_DEVICE, "check: there is no device to compare with the CPU: %s", t->why);
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

/* Implements hy_bench.create. */
static gt_status create_for_bench(hy_bench *b, const hy_config *config, hy_model **model, hy_plan *plan) {
    trainer *t = b->trainer;
    t->options.batch = b->options.batch;
    t->options.seq = b->options.seq;
    gt_status status = hy_create_model(t, config);
    *model = t->model;
    *plan = t->plan;
    t->model = NULL; /* the benchmark owns the model now */
    return status;
}

gt_status hy_bench_models(trainer *t) {
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

/* Prints a row of the plan: the memory that one model needs for one batch, in training and in inference. */
static gt_status plan_row(const trainer *t, const hy_config *model, int64_t batch) {
    const int64_t share = batch / t->ranks.size; /* windows per rank */
    const double tokens = (double)(share * t->options.seq);
    hy_config lean = *model, again = *model;
    hy_plan p, inference, recompute;
    const struct {
        const hy_config *config;
        hy_plan *plan;
    } plans[] = {{model, &p}, {&lean, &inference}, {&again, &recompute}};
    lean.inference = 1, again.recompute = 1;
    for (size_t i = 0; i < sizeof plans / sizeof plans[0]; i++) {
        gt_status status =
            hy_model_plan(t->backend, plans[i].config, t->text.vocab, (int)share, (int)t->options.seq, plans[i].plan);
        if (status != GT_OK) return status;
    }
    printf("%s,%s,%d,%d,%d,%lld,%lld,%lld", model->name, hy_dtype_names[t->backend->dtype], model->hidden,
           model->layers, t->text.vocab, (long long)p.parameters, (long long)batch, (long long)t->options.seq);
    const size_t parts[] = {p.weights, p.gradients, p.optimizer, p.activations,  p.backward,
                            p.states,  p.workspace, p.total,     inference.total};
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) printf(",%.1f", (double)parts[i] / MIB);
    printf(",%.3f,%.3f,%.1f\n", (double)p.total / 1024 / tokens, (double)inference.total / 1024 / tokens,
           (double)recompute.total / MIB);
    return hy_flush_report();
}

gt_status hy_plan_models(trainer *t) {
    static const char *const sizes[] = {"model",  "hidden",     "layers", "heads", "head-size", "d-state",
                                        "expand", "mamba-head", "d-conv", "ffn",   "untied"};
    const hy_lengths *batches = &t->options.plan;
    int is_one = 0, count;
    const hy_config *list = hy_model_list(&count);
    gt_status status = GT_OK;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) is_one |= hy_options_given(&t->options, sizes[i]);
    char of_ranks[64] = "";
    if (*t->transport) printf("# gradients are added up by %s\n", t->transport);
    if (t->ranks.size > 1)
        snprintf(of_ranks, sizeof of_ranks, " on each of %d ranks, which share a batch,", t->ranks.size);
    printf("# MiB%s on %s; weights, gradients, optimiser and activations are exact, the kernels' own memory %s%s\n"
           "model,dtype,hidden,layers,vocab,parameters,batch,seq,weights,gradients,optimizer,activations,backward,"
           "states,workspace,training,inference,training_kib_per_token,inference_kib_per_token,training_recompute\n",
           of_ranks, t->backend->device, strcmp(t->backend->name, "plan") ? "too" : "is estimated",
           t->config.recompute ? "; backward computes the layers again" : "");
    for (int i = 0; i < (is_one ? 1 : count); i++)
        for (int k = 0; k < batches->count && status == GT_OK; k++) {
            hy_config model = is_one ? t->config : list[i];
            model.recompute = t->config.recompute, model.fuse = t->config.fuse;
            status = plan_row(t, &model, batches->of[k]);
        }
    return status;
}

gt_status hy_profile_step(trainer *t) {
    if (t->options.stateful)
        hy_batch_tracks(&t->batch, &t->text, &t->tracks);
    else
        hy_batch_random(&t->batch, &t->text, &t->random);
    return hy_profile(t->backend, t->model, t->plan.parameters, t->batch.input, t->batch.target,
                      t->options.stateful ? t->batch.keep : NULL, t->loss_scale);
}

/* ---- a saved model --------------------------------------------------------------------------- */

/* Prints to standard error, because standard output may hold nothing but the text. */
gt_status hy_round_weights(trainer *t) {
    const int64_t tokens = t->options.final_eval_tokens;
    hy_loss before, after;
    gt_status status = hy_evaluate_first(t, tokens, &before);
    if (status == GT_OK) status = hy_model_quantise(t->model);
    if (status == GT_OK) status = hy_evaluate_first(t, tokens, &after);
    if (status != GT_OK) return status;
    const int is_table = t->text.table.start != NULL, is_bytes = is_table || before.bytes > 0;
    const double bits = (is_table ? (double)before.tokens / (double)before.bytes : 1) / log(2);
    fprintf(stderr, "int8: %.4f bits per %s (%+.5f), before %.4f; %s held-out tokens\n", after.mean * bits,
            is_bytes ? "byte" : "token", (after.mean - before.mean) * bits, before.mean * bits,
            hy_grouped(before.tokens).text);
    return GT_OK;
}

gt_status hy_print_held_out(trainer *t) {
    const hy_config *c = hy_model_config(t->model);
    const hy_text *x = &t->text;
    hy_catch_signals(t);
    gt_status status = hy_evaluate(t, 0, NULL);
    if (status != GT_OK) return status;
    const hy_screen *s = &t->screen;
    hy_screen_entry(s, FINAL, "model", "%s: %s, %d channels, %d layers", t->options.eval, c->name, c->hidden,
                    c->layers);
    hy_screen_entry(s, FINAL, "device", "%s: %s", t->backend->device, t->why);
    hy_screen_entry(s, FINAL, "data", "%s: %s %s; %s of them are held out (%s)", t->data, hy_grouped(x->size).text,
                    x->is_numbers || x->end_symbol >= 0 ? "tokens" : "bytes", hy_grouped(hy_held_out_tokens(x)).text,
                    hy_part_of(t).text);
    if (hy_interrupted(t)) puts("interrupted");
    hy_print_loss(t);
    return hy_flush_report();
}
