/* Before the first step: the device, the model file that is read, the text, the model. */
#define _XOPEN_SOURCE 700 /* sysconf */
#include "hybrid_trainer.h"
#include "hybrid_calls.h"
#include "hybrid_limit.h"
#include "hybrid_plan.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The loss scale of fp16 starts at about so much per token, as the gradient is that of a mean over
 * tokens; it halves when the gradient overflows and doubles after so many good steps. */
enum { SCALE_PER_TOKEN = 4, SCALE_STEPS = 1000, SCALE_MAX = 1 << 24 };

const char *const hy_dtype_names[] = {[GT_F32] = "f32", [GT_BF16] = "bf16", [GT_F16] = "f16"};

/* ---- setting up ------------------------------------------------------------------------------ */

static gt_dtype dtype_of(const char *name) {
    return !strcmp(name, "f32") ? GT_F32 : !strcmp(name, "f16") ? GT_F16 : GT_BF16;
}

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
    if (status == GT_OK && *o->csv && hy_is_model(o->csv))
        status = hy_fail(GT_ERROR_VALUE, "csv: %s is a model file; give another name", o->csv);
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
    if (o->list_models) wanted = "cpu"; /* any will do */
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
    strcpy(t->options.dtype, hy_dtype_names[t->backend->dtype]);
    return status == GT_OK ? hy_options_fit_together(&t->options, t->mode) : status;
}

/* ---- model files that are read --------------------------------------------------------------- */

/* At most one option says what to do instead of a new run, and goes with the others.  *mode: its name, or "train". */
static gt_status find_mode(const hy_options *o, const char **mode) {
    const struct {
        const char *name;
        int is_given, trains;
    } modes[] = {{"resume", *o->resume, 1},          {"init", *o->init, 1},      {"eval", *o->eval, 0},
                 {"generate", *o->generate, 0},      {"check", o->check, 0},     {"bench", o->bench.count, 0},
                 {"list-models", o->list_models, 0}, {"plan", o->plan.count, 0}, {"profile", o->profile, 0}};
    int has_mode = 0;
    *mode = "train";
    for (size_t i = 0; i < sizeof modes / sizeof modes[0]; i++) {
        if (!modes[i].is_given) continue;
        if (has_mode)
            return hy_fail(GT_ERROR_VALUE, "--%s and --%s: only one of them can be given", *mode, modes[i].name);
        *mode = modes[i].name, has_mode = 1;
        if (!modes[i].trains && (*o->save || *o->csv))
            return hy_fail(GT_ERROR_VALUE, "--%s trains nothing: no --%s with it", *mode, *o->save ? "save" : "csv");
    }
    return hy_options_fit(o, *mode);
}

/* Opens the model file that is to be read, if there is one, and takes the options that it sets. */
static gt_status open_file(trainer *t) {
    const hy_options *o = &t->options;
    gt_status status = find_mode(o, &t->mode);
    const char *path = *o->resume ? o->resume : *o->init ? o->init : *o->eval ? o->eval : o->generate;
    if (status != GT_OK || !*path) return status;
    status = hy_saved_open(&t->file, path);
    if (status != GT_OK) return hy_fail(status, "%s: %s", t->mode, hy_last_error());
    t->data_is_files = !*o->init && !hy_options_given(o, "data");
    return hy_saved_options(&t->file,
                            *o->resume ? HY_TAKE_STRICTLY
                            : *o->init ? HY_TAKE_MODEL
                                       : HY_TAKE_ALL,
                            &t->options);
}

static gt_status check_prompt(trainer *t) {
    int32_t token[HY_TEXT_MAX];
    int count;
    if (hy_text_encode(&t->text, t->options.prompt, token, &count, t->file.path != NULL) == GT_OK) {
        t->prompt_tokens = count ? count : 1; /* the first token of the text, if it is empty */
        return GT_OK;
    }
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
    gt_status status = *t->options.resume ? hy_resume_run(t) : hy_load_weights(&t->file, t->model);
    if (status == GT_OK) hy_file_close(&t->file);
    return status;
}

/* The log may not have the name FILE.tmp, as which the model file is written first. */
static gt_status keep_from_draft(const hy_options *o) {
    char draft[HY_PATH_MAX + 8];
    char *place = realpath(o->save, NULL); /* a link is followed */
    snprintf(draft, sizeof draft, "%.*s.tmp", HY_PATH_MAX, place ? place : o->save);
    free(place);
    return hy_keep_apart("csv", o->csv, "the file as which --save writes first", draft);
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
    if (status == GT_OK) status = keep_from_draft(o);
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

/* Text as the command line takes it: a byte that is not printable ASCII becomes \n, \t or \xNN. */
static void escape(const char *from, char *to, size_t size) {
    for (; *from && size > 4; from++) {
        const unsigned char c = (unsigned char)*from;
        const int n = c == '\\'           ? snprintf(to, size, "\\\\")
                      : c == '\n'         ? snprintf(to, size, "\\n")
                      : c == '\t'         ? snprintf(to, size, "\\t")
                      : c < 32 || c > 126 ? snprintf(to, size, "\\x%02x", c)
                                          : snprintf(to, size, "%c", c);
        to += n, size -= (size_t)n;
    }
    *to = 0;
}

/* A separator or end token that the user gave has to occur in the text. */
static gt_status check_ends(const trainer *t) {
    const hy_options *o = &t->options;
    char value[64];
    if (t->text.ends) return GT_OK;
    if (*o->separator && hy_options_given(o, "separator")) {
        escape(o->separator, value, sizeof value);
        return hy_fail(GT_ERROR_VALUE, "separator: '%s' does not occur in %.300s", value, t->data);
    }
    if (o->end_token >= 0 && hy_options_given(o, "end-token"))
        return hy_fail(GT_ERROR_VALUE, "end-token: %lld does not occur in %.300s", (long long)o->end_token, t->data);
    return GT_OK;
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
    if (status == GT_OK) status = check_ends(t);
    if (status != GT_OK && t->data_is_files)
        hy_fail(status, "%s (so says %s; --data names another place)", hy_last_error(), t->file.path);
    if (status != GT_OK || t->options.list_models) return status;
    if (*t->options.save || *t->options.resume) hy_text_sum(&t->text, t->text_sum);
    status = use_vocabulary(t);
    if (status != GT_OK || *t->options.eval) return status;
    status = check_lengths(t);
    return status == GT_OK ? check_prompt(t) : status;
}

/* Refuses sizes of a branch that the model lacks, and a choice of calls that it does not have. */
static gt_status check_branches(const hy_options *o, const hy_config *c) {
    const int no_rwkv = c->mix == HY_MIX_MAMBA, no_mamba = c->mix == HY_MIX_RWKV, no_second = no_mamba || c->mamba == 1;
    const struct {
        const char *option;
        int is_lacking;
        const char *lacks;
    } rows[] = {{"heads", no_rwkv, "RWKV branch"},          {"head-size", no_rwkv, "RWKV branch"},
                {"d-state", no_mamba, "Mamba branch"},      {"expand", no_mamba, "Mamba branch"},
                {"d-conv", no_mamba, "Mamba branch"},       {"mamba-head", no_second, "Mamba-2 branch"},
                {"fuse", no_second, "Mamba-2 beside RWKV"}, {"fuse", no_rwkv, "Mamba-2 beside RWKV"}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char value[HY_TEXT_MAX];
        hy_options_text(o, rows[i].option, value);
        if (!rows[i].is_lacking || !hy_options_given(o, rows[i].option) || !strcmp(value, "0")) continue;
        return hy_fail(GT_ERROR_VALUE, "%s: %.60s has no effect on --model %s, which has no %s; leave it out",
                       rows[i].option, value, c->name, rows[i].lacks);
    }
    return GT_OK;
}

/* The model's configuration, with what the options say of its sizes. */
static gt_status choose_config(trainer *t) {
    const hy_options *o = &t->options;
    hy_config *c = &t->config;
    int count;
    const hy_config *list = hy_model_list(&count);
    for (int i = 0; i < count; i++)
        if (!strcmp(list[i].name, o->model)) *c = list[i];
    gt_status status = check_branches(o, c);
    if (status != GT_OK) return status;
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
    c->stateful = o->stateful, c->recompute = o->recompute;
    c->fuse = strcmp(o->fuse, "conv_ssd") ? HY_WKV_SSM : HY_CONV_SSD;
    return hy_config_resolve(c);
}

/* Bytes that a model can have; 0 if that is not known.  On the CPU, the memory of the computer, or of the container
 * (*is_limited), which ends a process that takes more. */
static size_t available_memory(const trainer *t, int *is_limited) {
    long pages = sysconf(_SC_PHYS_PAGES), bytes = sysconf(_SC_PAGESIZE);
    *is_limited = 0;
    if (strcmp(t->backend->name, "cpu")) return t->backend->memory_free;
    const size_t there = pages > 0 && bytes > 0 ? (size_t)pages * (size_t)bytes : 0, limit = hy_memory_limit("");
    *is_limited = limit && (!there || limit < there);
    return *is_limited ? limit : there;
}

/* What the user can do about it: a run that goes on keeps its batch and seq, and the model of a file is as it is. */
static void advise_on_memory(const trainer *t, char *advice, size_t size) {
    const hy_options *o = &t->options;
    char way[3][64];
    int ways = 0;
    if (o->batch > 1 && !*o->resume)
        snprintf(way[ways++], sizeof way[0], "a smaller --batch (%lld)", (long long)o->batch);
    if (o->bench.count && o->seq > 1)
        snprintf(way[ways++], sizeof way[0], "shorter lengths than %lld in --bench", (long long)o->seq);
    else if (o->seq > 1 && !*o->resume)
        snprintf(way[ways++], sizeof way[0], "a smaller --seq (%lld)", (long long)o->seq);
    if (!o->recompute && !t->config.inference && t->config.layers > 1 && t->plan.activations > t->plan.total / 2)
        snprintf(way[ways++], sizeof way[0], "--recompute");
    if (!ways && !*o->resume && !*o->init && !*o->eval && !*o->generate)
        snprintf(way[ways++], sizeof way[0], "a smaller --model");
    *advice = 0;
    for (int i = 0; i < ways; i++) {
        const char *before = i == 0 ? "; less is needed with " : i + 1 < ways ? ", " : " or ";
        const size_t used = strlen(advice);
        snprintf(advice + used, size - used, "%s%s", before, way[i]);
    }
}

/* there: bytes that can be had, 0 if that is not known. */
static gt_status needs_memory(const trainer *t, size_t there, int is_limited) {
    char how_much[64] = "which cannot be had", advice[320];
    if (there)
        snprintf(how_much, sizeof how_much, is_limited ? "the limit of this container is %.0f" : "%.0f are there",
                 (double)there / MIB);
    advise_on_memory(t, advice, sizeof advice);
    return hy_fail(GT_ERROR_MEMORY, "the model needs %.0f MiB of memory, %s%s", (double)t->plan.total / MIB, how_much,
                   advice);
}

gt_status hy_create_model(trainer *t, const hy_config *config) {
    const hy_options *o = &t->options;
    gt_status status = hy_model_plan(t->backend, config, t->text.vocab, (int)o->batch, (int)o->seq, &t->plan);
    if (status != GT_OK) return status;
    int is_limited;
    const size_t there = available_memory(t, &is_limited);
    if (there && t->plan.total > there) return needs_memory(t, there, is_limited);
    status =
        hy_model_create(t->backend, config, t->text.vocab, (int)o->batch, (int)o->seq, (uint64_t)o->seed, &t->model);
    return status == GT_ERROR_MEMORY ? needs_memory(t, 0, 0) : status;
}

gt_status hy_set_up(trainer *t, const char *program) {
    const hy_options *o = &t->options;
    gt_status status = open_file(t);
    if (status == GT_OK) status = open_backend(t);
    if (status == GT_OK && o->synchronize) hy_calls_wait(t->backend);
    if (status == GT_OK) status = fill_options(t);
    if (status == GT_OK) status = *o->generate ? read_vocabulary(t) : load_text(t, program);
    if (status != GT_OK) return status;
    if ((status = choose_config(t)) != GT_OK) return status;
    t->random = (uint64_t)o->seed;
    t->loss_scale = 1;
    if (t->backend->dtype == GT_F16) t->loss_scale = exp2(floor(log2((double)(SCALE_PER_TOKEN * o->batch * o->seq))));
    t->held_out = -1;
    if (o->list_models || o->check || o->bench.count || o->plan.count) return GT_OK;
    if (*o->generate) { /* no rows but those of the prompt */
        t->config.samples = (int)o->batch, t->config.stateful = 0;
        if (t->options.seq > t->prompt_tokens) t->options.seq = t->prompt_tokens;
    }
    t->config.inference = *o->eval || *o->generate;
    status = hy_create_model(t, &t->config);
    if (status == GT_OK) status = hy_batch_create(&t->batch, o->batch, o->seq);
    if (status == GT_OK && o->stateful && !*o->generate && !*o->eval)
        status = hy_tracks_create(&t->tracks, &t->text, o->batch);
    if (status == GT_OK) status = load_file(t);
    if (status == GT_OK) status = check_save(t);
    if (status != GT_OK) return status;
    const hy_log_point end = {t->steps, t->tokens, t->last_loss};
    if (*o->resume && t->steps >= o->steps) return hy_log_reopen(&t->log, o->csv, &end); /* no log is begun or cut */
    return hy_log_open(&t->log, o->csv, *o->resume ? &end : NULL);
}
