#define _XOPEN_SOURCE 700 /* getrusage */
#include "hybrid_bench.h"
#include "hybrid_generate.h"
#include "hybrid_log.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        gt_status status_ = (call);                                                                                    \
        if (status_ != GT_OK) return status_;                                                                          \
    } while (0)
#define MIB (1024.0 * 1024.0)

enum { CPU_RUNS = 3 }; /* timed runs on the CPU, after one warm-up run; few, because the CPU is far slower */

double hy_peak_of_process(void) {
    struct rusage usage;
    if (getrusage(RUSAGE_SELF, &usage)) return 0;
#ifdef __APPLE__
    return (double)usage.ru_maxrss / MIB; /* bytes */
#else
    return (double)usage.ru_maxrss / 1024; /* KiB */
#endif
}

/* ---- the timed calls ---------------------------------------------------------------------------- */

/* A model on a device, whose calls are timed on its latest batch. */
typedef struct subject {
    hy_backend *backend;
    hy_model *model;
    hy_plan plan;
    hy_batch batch;
    double loss_scale;
    const hy_bench *bench; /* used only by run_generate */
} subject;

/* With NULL these calls use the model's latest batch, so the measured time contains no upload. */
static gt_status run_infer(subject *s) { return hy_model_infer(s->model, NULL); }
static gt_status run_loss(subject *s) { return hy_model_loss(s->model, NULL, NULL, NULL); }
static gt_status run_gradient(subject *s) { return hy_model_gradient(s->model, NULL, NULL, NULL); }

/* A whole training step, including the upload of the batch and of the optimiser's numbers.  With a learning rate of
 * 0 the step does all its work, but leaves the weights unchanged. */
static gt_status run_step(subject *s) {
    const hy_optimizer still = {
        .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .max_norm = 1, .loss_scale = (float)s->loss_scale};
    return hy_model_train(s->model, s->batch.input, s->batch.target, NULL, &still);
}

/* Generates text as --generate does, but prints nothing.  The host draws the tokens. */
static gt_status run_generate(subject *s) {
    const hy_options *o = &s->bench->options;
    const hy_sampling sampling = {.prompt = "",
                                  .first = hy_token(s->bench->text, 0),
                                  .count = o->seq,
                                  .temperature = o->temperature,
                                  .top_k = o->top_k,
                                  .seed = (uint64_t)o->seed + 1};
    return hy_generate(s->model, s->bench->text, &sampling, NULL, NULL);
}

typedef struct timed_pass {
    const char *name;
    gt_status (*run)(subject *s);
} timed_pass;

static const timed_pass inference = {"inf", run_infer};
static const timed_pass generation = {"generate", run_generate}, int8_generation = {"generate-int8", run_generate};
static const timed_pass training[] = {{"fwd", run_loss}, {"fwd+bwd", run_gradient}, {"step", run_step}};

/* start_timing and stop_timing measure the time of the calls between them; stop_timing waits for these calls.  They
 * use the device's clock, or wall-clock time if the device has none. */
static gt_status start_timing(hy_backend *be, double *start) {
    *start = hy_now();
    return be->start_clock ? be->start_clock(be) : GT_OK;
}
static gt_status stop_timing(hy_backend *be, double start, double *seconds) {
    if (be->stop_clock) return be->stop_clock(be, seconds);
    TRY(be->synchronize(be));
    *seconds = hy_now() - start;
    return GT_OK;
}

static gt_status time_run(subject *s, const timed_pass *pass, double *seconds) {
    double start;
    TRY(start_timing(s->backend, &start));
    TRY(pass->run(s));
    return stop_timing(s->backend, start, seconds);
}

typedef struct timing {
    double mean, deviation; /* seconds */
} timing;

static gt_status time_pass(subject *s, const timed_pass *pass, int64_t warm_up, int64_t runs, timing *t) {
    double seconds, sum = 0, squares = 0;
    for (int64_t run = 0; run < warm_up + runs; run++) {
        TRY(time_run(s, pass, &seconds));
        if (run < warm_up) continue;
        sum += seconds;
        squares += seconds * seconds;
    }
    t->mean = sum / (double)runs;
    t->deviation = sqrt(fmax(0, squares / (double)runs - t->mean * t->mean));
    return GT_OK;
}

/* ---- rows ------------------------------------------------------------------------------------- */

/* Columns that only some rows of the output fill; NAN: the column stays empty. */
typedef struct further {
    double cpu_speedup, difference, first_loss, last_loss, gradient, floor_ms;
} further;
static const further nothing = {NAN, NAN, NAN, NAN, NAN, NAN};

static void print_further(double x) {
    if (isnan(x))
        putchar(',');
    else
        printf(",%.6g", x);
}

/* Prints a rate.  Small rates get four digits, since a step may take a second on some machines. */
static void print_rate(double x) { printf(x < 1000 ? ",%.4g" : ",%.0f", x); }

/* Gives the memory in use: the device memory that the backend took, or the peak of the process on the CPU. */
static gt_status peak_mib(const subject *s, double *mib) {
    size_t bytes;
    *mib = hy_peak_of_process();
    if (!s->backend->memory_taken) return GT_OK;
    TRY(s->backend->memory_taken(s->backend, &bytes));
    *mib = (double)bytes / MIB;
    return GT_OK;
}

static gt_status print_row(const hy_bench *b, const subject *s, const char *pass, timing t, further more) {
    static const char *const dtypes[] = {"f32", "f32", "bf16", "f16"};
    const hy_options *o = &b->options;
    const int64_t tokens_of_run = o->bench_generate ? o->batch : o->batch * o->seq;
    const double tokens = (double)tokens_of_run, parameters = (double)s->plan.parameters;
    double mib;
    TRY(peak_mib(s, &mib));
    printf("%s,%s,%s,%s,%lld,%lld,%lld", b->config->name, s->backend->name, dtypes[s->backend->dtype], pass,
           (long long)o->batch, (long long)o->seq, (long long)s->plan.parameters);
    print_rate(tokens / t.mean);
    printf(",%.6g,%.4f,%.1f,%.3f", tokens / t.mean / parameters, t.mean * 1e3, mib, mib * 1024 / tokens);
    print_rate(1e3 * tokens / t.mean / parameters);
    printf(",%.4f,%.1f,%.3f", t.deviation * 1e3, (double)s->plan.total / MIB, (double)s->plan.total / 1024 / tokens);
    print_further(more.cpu_speedup);
    print_further(more.difference);
    print_further(more.first_loss);
    print_further(more.last_loss);
    print_further(more.gradient);
    print_further(more.floor_ms);
    putchar('\n');
    return hy_flush(stdout, "standard output");
}

static gt_status open_subject(hy_bench *b, subject *s, int is_inference) {
    hy_config config = *b->config;
    config.inference = is_inference;
    s->backend = b->backend;
    s->loss_scale = 1;
    TRY(b->create(b, &config, &s->model, &s->plan));
    TRY(hy_batch_create(&s->batch, b->options.batch, b->options.seq));
    hy_batch_random(&s->batch, b->text, b->random);
    return GT_OK;
}

static void close_subject(subject *s) {
    hy_model_destroy(s->model);
    hy_batch_free(&s->batch);
    memset(s, 0, sizeof *s);
}

/* Reads the logits of the model's last forward pass. */
static gt_status read_logits(subject *s, double **logits, int64_t *count) {
    const int last = hy_model_activation_count(s->model) - 1;
    *count = hy_model_activation(s->model, last).count;
    *logits = malloc((size_t)*count * sizeof **logits);
    if (!*logits) return hy_fail(GT_ERROR_MEMORY, "no memory for %lld logits", (long long)*count);
    return hy_model_read_activation(s->model, last, *logits);
}

/* Runs the same weights and tokens on the CPU.  Stores how many times slower the CPU is, and the largest difference
 * between two logits. */
static gt_status compare(hy_bench *b, subject *s, timing t, further *more) {
    hy_config config = *b->config;
    subject cpu = {.backend = b->cpu, .loss_scale = 1};
    const hy_options *o = &b->options;
    double *ours = NULL, *theirs = NULL;
    int64_t count;
    timing cpu_time;
    config.inference = 1;
    gt_status status = read_logits(s, &ours, &count);
    if (status == GT_OK)
        status =
            hy_model_create(b->cpu, &config, b->text->vocab, (int)o->batch, (int)o->seq, (uint64_t)o->seed, &cpu.model);
    if (status == GT_OK) status = hy_model_infer(cpu.model, s->batch.input);
    if (status == GT_OK) status = time_pass(&cpu, &inference, 0, CPU_RUNS, &cpu_time);
    if (status == GT_OK) status = read_logits(&cpu, &theirs, &count);
    if (status == GT_OK) {
        more->cpu_speedup = cpu_time.mean / t.mean;
        more->difference = 0;
        for (int64_t i = 0; i < count; i++) {
            const double d = fabs(ours[i] - theirs[i]);
            if (!(d <= more->difference)) more->difference = isnan(d) ? INFINITY : d;
        }
    }
    free(ours);
    free(theirs);
    hy_model_destroy(cpu.model);
    return status;
}

/* Number of warm-up runs: a tenth of the timed runs, rounded up. */
static int64_t warm_up_of(const hy_bench *b) { return (b->options.bench_runs + 9) / 10; }

static gt_status bench_inference(hy_bench *b, subject *s) {
    further more = nothing;
    timing t;
    TRY(open_subject(b, s, 1));
    TRY(hy_model_infer(s->model, s->batch.input));
    TRY(time_pass(s, &inference, warm_up_of(b), b->options.bench_runs, &t));
    if (b->cpu) TRY(compare(b, s, t, &more));
    return print_row(b, s, inference.name, t, more);
}

static gt_status bench_training(hy_bench *b, subject *s) {
    TRY(open_subject(b, s, 0));
    TRY(hy_model_gradient(s->model, s->batch.input, s->batch.target, NULL));
    for (size_t i = 0; i < sizeof training / sizeof training[0]; i++) {
        timing t;
        TRY(time_pass(s, &training[i], warm_up_of(b), b->options.bench_runs, &t));
        TRY(print_row(b, s, training[i].name, t, nothing));
    }
    return GT_OK;
}

/* Trains a new model on random windows with a constant learning rate.  Measures wall-clock time, which covers all
 * work of a step.  In fp16 a gradient that overflows halves the loss scale, and the loss of that step does not count
 * in the mean. */
static gt_status bench_steps(hy_bench *b, subject *s) {
    const hy_options *o = &b->options;
    further more = nothing;
    hy_result r;
    double norms = 0, seconds = 0, squares = 0;
    int64_t counted = 0;
    TRY(open_subject(b, s, 0));
    if (s->backend->dtype == GT_F16) s->loss_scale = exp2(floor(log2(4.0 * (double)(o->batch * o->seq))));
    for (int64_t step = 0; step < o->bench_steps; step++) {
        const hy_optimizer adam = {.lr = (float)o->lr,
                                   .beta1 = 0.9f,
                                   .beta2 = 0.95f,
                                   .eps = 1e-8f,
                                   .weight_decay = (float)o->weight_decay,
                                   .max_norm = (float)o->clip,
                                   .loss_scale = (float)s->loss_scale};
        const double start = hy_now();
        hy_batch_random(&s->batch, b->text, b->random);
        TRY(hy_model_train(s->model, s->batch.input, s->batch.target, NULL, &adam));
        TRY(hy_model_result(s->model, &r));
        const double taken = hy_now() - start;
        seconds += taken, squares += taken * taken;
        if (step == 0) more.first_loss = r.loss;
        if (r.skipped && s->loss_scale > 1)
            s->loss_scale /= 2;
        else
            norms += r.norm[HY_GROUPS], counted++;
    }
    more.last_loss = r.loss;
    more.gradient = norms / (double)counted;
    timing t = {.mean = seconds / (double)o->bench_steps};
    t.deviation = sqrt(fmax(0, squares / (double)o->bench_steps - t.mean * t.mean));
    return print_row(b, s, "train", t, more);
}

/* Generates options.seq tokens for each of options.batch samples, from zero states.  The row gives the time in which
 * every sample gets one token. */
static gt_status bench_generation(hy_bench *b, subject *s) {
    const int64_t seq = b->options.seq;
    hy_config config = *b->config;
    further more = nothing;
    timing t;
    const timed_pass *pass = hy_options_int8(&b->options) ? &int8_generation : &generation;
    config.inference = 1, config.samples = (int)b->options.batch, config.int8 = pass == &int8_generation;
    s->bench = b, s->backend = b->backend;
    b->options.seq = 1; /* a step processes one token per sample */
    gt_status status = b->create(b, &config, &s->model, &s->plan);
    b->options.seq = seq;
    if (status != GT_OK) return status;
    if (config.int8) TRY(hy_model_quantise(s->model));
    TRY(time_pass(s, pass, warm_up_of(b), b->options.bench_runs, &t));
    t.mean /= (double)seq, t.deviation /= (double)seq;
    more.floor_ms = 1e3 * hy_model_token_bytes(s->model) / b->copy_speed;
    return print_row(b, s, pass->name, t, more);
}

static gt_status bench_part(hy_bench *b, gt_status (*part)(hy_bench *, subject *)) {
    subject s = {.model = NULL};
    gt_status status = part(b, &s);
    close_subject(&s);
    return status;
}

/* Prints all rows for one length and one batch.  Each row uses a new model. */
static gt_status bench_size(hy_bench *b) {
    if (b->options.bench_generate) return bench_part(b, bench_generation);
    TRY(bench_part(b, bench_inference));
    TRY(bench_part(b, bench_training));
    return b->options.bench_steps > 0 ? bench_part(b, bench_steps) : GT_OK;
}

gt_status hy_copy_speed(hy_backend *be, double *bytes_per_s) {
    enum { RUNS = 10 };
    const size_t bytes = (size_t)(be->memory_taken ? 256 : 16) << 20; /* a GPU copies far more than its caches hold */
    void *memory;
    double best = INFINITY;
    TRY(be->alloc(be, &memory, 2 * bytes));
    gt_status status = be->zero(be, memory, 2 * bytes);
    for (int run = 0; run < RUNS && status == GT_OK; run++) {
        double start, seconds = INFINITY;
        status = start_timing(be, &start);
        if (status == GT_OK) status = be->copy(be, (char *)memory + bytes, memory, bytes);
        if (status == GT_OK) status = stop_timing(be, start, &seconds);
        best = fmin(best, seconds);
    }
    be->release(be, memory);
    *bytes_per_s = 2 * (double)bytes / best;
    return status;
}

gt_status hy_bench_run(hy_bench *b) {
    const hy_lengths *lengths = &b->options.bench, *batches = &b->options.bench_batch;
    const int64_t batch = b->options.batch;
    const char *commit = getenv("GT_COMMIT");
    char copies[64] = "";
    if (b->options.bench_generate) {
        TRY(hy_copy_speed(b->backend, &b->copy_speed));
        snprintf(copies, sizeof copies, "copies %.0f GB/s, read and written; ", b->copy_speed * 1e-9);
    }
    printf("# %s; %s%s%smean of %lld runs after %lld untimed ones, by %s%s%s\n", b->backend->device,
           b->backend->software, *b->backend->software ? "; " : "", copies, (long long)b->options.bench_runs,
           (long long)warm_up_of(b), b->backend->stop_clock ? "the device's clock" : "the wall clock",
           commit ? "; commit " : "", commit ? commit : "");
    puts("model,device,dtype,pass,batch,seq,parameters,tokens_per_s,tokens_per_s_per_parameter,latency_ms,peak_mib,"
         "kb_per_token,tokens_per_s_per_1000_parameters,deviation_ms,model_mib,model_kib_per_token,cpu_speedup,"
         "max_difference,first_loss,last_loss,mean_gradient,floor_ms");
    for (int i = 0; i < lengths->count; i++)
        for (int k = 0; k < (batches->count ? batches->count : 1); k++) {
            b->options.seq = lengths->of[i];
            b->options.batch = batches->count ? batches->of[k] : batch;
            TRY(bench_size(b));
        }
    return GT_OK;
}
