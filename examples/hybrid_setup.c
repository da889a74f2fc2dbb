/* Does all work before the first step: opens the device, reads the model file and the text, and creates the model. */
#define _XOPEN_SOURCE 700 /* sysconf */
#include "hybrid_trainer.h"
#include "hybrid_calls.h"
#include "hybrid_cpu.h"
#include "hybrid_limit.h"
#include "hybrid_nccl.h"
#include "hybrid_plan.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The loss scale of fp16 starts at about SCALE_PER_TOKEN times the tokens of a batch, since the loss is a mean over
 * tokens.  It halves when the gradient overflows, and doubles after SCALE_STEPS steps without overflow, up to
 * SCALE_MAX. */
enum { SCALE_PER_TOKEN = 4, SCALE_STEPS = 1000, SCALE_MAX = 1 << 24 };
enum { COST_WINDOWS = 8 }; /* windows in memory at once, when --generate measures the cost of int8 weights */

const char *const hy_dtype_names[] = {[GT_F32] = "f32", [GT_BF16] = "bf16", [GT_F16] = "f16"};

/* ---- setting up ------------------------------------------------------------------------------ */

static gt_dtype dtype_of(const char *name) {
    return !strcmp(name, "f32") ? GT_F32 : !strcmp(name, "f16") ? GT_F16 : GT_BF16;
}

/* Opens the device `wanted`; if it is CUDA, activations get the dtype `on_cuda`.  Stores the reason for the choice
 * in t->why. */
static gt_status open_device(trainer *t, const char *wanted, const char *on_cuda) {
    const char *dtype = t->options.dtype; /* the user's choice */
    gt_status status;
    if (t->options.plan.count && strcmp(wanted, "cuda")) {
        snprintf(t->why, sizeof t->why, "a plan needs no device");
        return hy_backend_plan(&t->backend, *dtype ? dtype_of(dtype) : GT_BF16);
    }
    if (!strcmp(wanted, "cpu")) {
        if (*dtype && dtype_of(dtype) != GT_F32)
            return hy_fail(GT_ERROR_VALUE, "dtype: '%s': the CPU computes only in f32; leave --dtype out", dtype);
        snprintf(t->why, sizeof t->why, "chosen by --device");
        return hy_backend_cpu(&t->backend);
    }
    status = hy_backend_cuda(&t->backend, dtype_of(on_cuda), t->ranks.size > 1 ? t->ranks.local_rank : -1);
    if (status == GT_OK) {
        snprintf(t->why, sizeof t->why, "CUDA works here");
        return GT_OK;
    }
    if (!strcmp(wanted, "cuda")) return hy_fail(status, "device cuda: %s", hy_last_error());
    if (*dtype && dtype_of(dtype) != GT_F32)
        return hy_fail(
            GT_ERROR_VALUE,
            "dtype: '%s' needs a GPU, but there is no CUDA (%s); leave --dtype out to compute in f32 on the CPU", dtype,
            hy_last_error());
    snprintf(t->why, sizeof t->why, "no CUDA (%s)", hy_last_error());
    return hy_backend_cpu(&t->backend);
}

/* Finds the text that comes with the program.  It may lie in the source tree, near the program, or near the current
 * directory. */
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

/* Fails if `path`, which an option wants to write, is a file of the text. */
static gt_status keep_texts(const trainer *t, const char *option, const char *path) {
    gt_status status = GT_OK;
    for (int64_t i = 0; i < t->files.count && status == GT_OK; i++)
        status = hy_keep_apart(option, path, "the text of --data", t->files.path[i]);
    for (int64_t i = 0; i < t->val.count && status == GT_OK; i++)
        status = hy_keep_apart(option, path, "the text of --val", t->val.path[i]);
    if (status == GT_OK) status = hy_keep_apart(option, path, "the table", t->options.table);
    return status;
}

/* Fails if the run would write a file that it also reads. */
static gt_status check_files(const trainer *t) {
    const hy_options *o = &t->options;
    gt_status status = keep_texts(t, "csv", o->csv);
    if (status == GT_OK && o->config) status = hy_keep_apart("csv", o->csv, "the config file", o->config);
    if (status == GT_OK && t->file.path) status = hy_keep_apart("csv", o->csv, "the model file", t->file.path);
    if (status == GT_OK && *o->csv && hy_is_model(o->csv))
        status = hy_fail(GT_ERROR_VALUE, "csv: %s is a model file; give another name", o->csv);
    return status;
}

/* Checks that the text has room for the longest window. */
static gt_status check_lengths(const trainer *t) {
    const hy_lengths *bench = &t->options.bench;
    gt_status status = bench->count || t->options.plan.count ? GT_OK : hy_text_fits(&t->text, t->options.seq);
    for (int i = 0; i < bench->count && status == GT_OK; i++) status = hy_text_fits(&t->text, bench->of[i]);
    return status;
}

/* Opens the device.  A resumed run uses the same kind of device as before, if possible.  On CUDA the dtype comes
 * from the model file, if there is one. */
static gt_status open_backend(trainer *t) {
    const hy_options *o = &t->options;
    const char *saved = NULL, *wanted = o->device, *dtype = o->dtype;
    if (o->list_models) wanted = "cpu"; /* any device will do */
    int on_cpu = !strcmp(wanted, "cpu");
    if (t->file.path && !*o->init) saved = hy_file_text_of(&t->file, "option.dtype");
    if (*o->resume && !hy_options_given(o, "device")) {
        const char *device = hy_file_text_of(&t->file, "device");
        on_cpu = device && !strcmp(device, "cpu");
        wanted = on_cpu ? "cpu" : "auto";
    }
    if (saved && *o->resume && *dtype && strcmp(saved, dtype) && !(on_cpu && dtype_of(dtype) == GT_F32))
        return hy_fail(GT_ERROR_VALUE, "dtype: %s differs from %.20s, the value in %s; leave it out", dtype, saved,
                       o->resume);
    if (saved && !*dtype && !on_cpu) dtype = saved;
    gt_status status = open_device(t, wanted, dtype);
    if (status == GT_OK && wanted != o->device && on_cpu)
        snprintf(t->why, sizeof t->why, "the device of the resumed run");
    return status;
}

/* Sets all options that neither the user nor a model file has set; they get their defaults. */
static gt_status fill_options(trainer *t) {
    gt_status status = hy_options_default(&t->options, strcmp(t->backend->name, "cpu"));
    strcpy(t->options.dtype, hy_dtype_names[t->backend->dtype]);
    return status == GT_OK ? hy_options_fit_together(&t->options, t->mode) : status;
}

/* ---- reading model files --------------------------------------------------------------------- */

/* Finds the option that selects a mode other than a new run.  *mode becomes the option's name, or "train" if there
 * is no such option.  Fails if there are several, or if other options contradict the mode. */
static gt_status find_mode(const hy_options *o, int ranks, const char **mode) {
    const struct {
        const char *name;
        int is_given, trains, has_ranks;
    } modes[] = {{"resume", *o->resume, 1, 1},          {"init", *o->init, 1, 1},      {"eval", *o->eval, 0, 1},
                 {"generate", *o->generate, 0, 0},      {"check", o->check, 0, 0},     {"bench", o->bench.count, 0, 0},
                 {"list-models", o->list_models, 0, 1}, {"plan", o->plan.count, 0, 1}, {"profile", o->profile, 0, 0}};
    int has_mode = 0;
    *mode = "train";
    for (size_t i = 0; i < sizeof modes / sizeof modes[0]; i++) {
        if (!modes[i].is_given) continue;
        if (has_mode)
            return hy_fail(GT_ERROR_VALUE, "--%s and --%s: only one of them can be given", *mode, modes[i].name);
        *mode = modes[i].name, has_mode = 1;
        if (ranks > 1 && !modes[i].has_ranks)
            return hy_fail(GT_ERROR_VALUE, "--%s runs in one process, but there are %d ranks; start it without mpirun",
                           *mode, ranks);
        if (!modes[i].trains && (*o->save || *o->csv))
            return hy_fail(GT_ERROR_VALUE, "--%s does not train; leave --%s out", *mode, *o->save ? "save" : "csv");
    }
    if (ranks > 1 && !strcmp(o->fallback, "cpu"))
        return hy_fail(GT_ERROR_VALUE, "fallback: cpu works only in one process, but there are %d ranks; leave it out",
                       ranks);
    return hy_options_fit(o, *mode);
}

/* Opens the model file that the run reads, if there is one, and takes its options. */
static gt_status open_file(trainer *t) {
    const hy_options *o = &t->options;
    gt_status status = find_mode(o, t->ranks.size, &t->mode);
    const char *path = *o->resume ? o->resume : *o->init ? o->init : *o->eval ? o->eval : o->generate;
    if (status != GT_OK || !*path) return status;
    status = hy_saved_open(&t->file, path);
    if (status != GT_OK) return hy_fail(status, "%s: %s", t->mode, hy_last_error());
    t->data_is_files = !*o->init && !hy_options_given(o, "data") && !hy_options_given(o, "val");
    const hy_take take = *o->resume ? HY_TAKE_STRICTLY : *o->init ? HY_TAKE_MODEL : HY_TAKE_ALL;
    status = hy_saved_options(&t->file, take, &t->options);
    if ((*o->eval || *o->generate) && hy_options_given(o, "data") && !hy_options_given(o, "val"))
        t->options.val[0] = 0; /* if the user gives a new --data, its own end is held out */
    return status;
}

/* Reads the file of --prompt-file, if there is one. */
static gt_status read_prompt(trainer *t) {
    const char *path = t->options.prompt_file;
    hy_span file;
    if (!*path) return GT_OK;
    gt_status status = hy_span_load(&file, strcmp(path, "-") ? path : "/dev/stdin", 0);
    if (status != GT_OK) return hy_fail(status, "prompt-file: %s", hy_last_error());
    if (memchr(file.bytes, 0, (size_t)file.size))
        status = hy_fail(GT_ERROR_VALUE, "prompt-file: %s contains a NUL byte, which a prompt cannot have", path);
    else if (!(t->prompt = malloc((size_t)file.size + 1)))
        status = hy_fail(GT_ERROR_MEMORY, "prompt-file: no memory");
    if (status == GT_OK) memcpy(t->prompt, file.bytes, (size_t)file.size), t->prompt[file.size] = 0;
    hy_span_free(&file);
    return status;
}

static gt_status check_prompt(trainer *t) {
    int count = 0;
    gt_status status = read_prompt(t);
    if (status != GT_OK) return status;
    const char *prompt = t->prompt ? t->prompt : t->options.prompt;
    int32_t *token = malloc((strlen(prompt) + 1) * sizeof *token);
    if (!token) return hy_fail(GT_ERROR_MEMORY, "prompt: no memory");
    status = hy_text_encode(&t->text, prompt, token, &count, t->file.path != NULL);
    free(token);
    t->prompt_tokens = count ? count : 1; /* an empty prompt stands for the first token of the text */
    return status == GT_OK ? GT_OK : hy_fail(GT_ERROR_VALUE, "prompt: %s", hy_last_error());
}

/* Takes the vocabulary from the model file.  The mode --generate needs this unless it reads a text. */
static gt_status read_vocabulary(trainer *t) {
    uint8_t bytes[256];
    int count;
    gt_status status = hy_saved_numbers(&t->file, &count);
    if (status != GT_OK) return status;
    if (count) {
        t->text.is_numbers = 1, t->text.end_symbol = -1, t->text.vocab = count;
        return *t->options.table ? hy_text_table(&t->text, t->options.table) : GT_OK;
    }
    status = hy_saved_vocabulary(&t->file, bytes, &count);
    if (status != GT_OK) return status;
    if (*t->options.table)
        return hy_fail(GT_ERROR_VALUE, "table: has no effect without --tokens uint16 or uint32; leave it out");
    hy_text_vocabulary(&t->text, bytes, count, t->options.end_symbol);
    snprintf(t->text.end_text, sizeof t->text.end_text, "%s", *t->options.separator ? t->options.separator : "\n\n\n");
    return GT_OK;
}

/* Takes the first token of the training text from the model file. */
static gt_status read_first_token(trainer *t) {
    uint8_t first;
    gt_status status;
    if (t->text.is_numbers) {
        status = hy_saved_first_token(&t->file, &t->first_token);
        if (status != GT_OK || t->first_token < t->text.vocab) return status;
        return hy_fail(GT_ERROR_VALUE, "%s: damaged: first_token is not in the vocabulary", t->file.path);
    }
    if ((status = hy_saved_first_byte(&t->file, &first)) != GT_OK) return status;
    t->first_token = t->text.token_of[first];
    if (t->first_token < 0 && t->options.end_symbol && first == (uint8_t)t->text.end_text[0])
        t->first_token = t->text.end_symbol; /* the training text began with an end symbol */
    if (t->first_token >= 0) return GT_OK;
    return hy_fail(GT_ERROR_VALUE, "%s: damaged: first_byte is not in the vocabulary", t->file.path);
}

/* Gives the text the vocabulary of the model file, if the run reads a model file. */
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
    return hy_fail(status, "data %s: %s (model file %s)", t->data, hy_last_error(), t->file.path);
}

/* Reads the model file into the new model.  A resumed run reads everything, any other run only the weights. */
static gt_status load_file(trainer *t) {
    if (!t->file.path) return GT_OK;
    const char *sum = hy_file_text_of(&t->file, "checksum");
    snprintf(t->file_sum, sizeof t->file_sum, "%s", sum ? sum : "none");
    gt_status status = *t->options.resume ? hy_resume_run(t) : hy_load_weights(&t->file, t->model);
    if (status == GT_OK) hy_file_close(&t->file);
    return status;
}

/* Fails if the log has the name FILE.tmp, since the writer of the model file FILE first writes FILE.tmp. */
static gt_status keep_from_draft(const hy_options *o) {
    char draft[HY_PATH_MAX + 8];
    char *place = realpath(o->save, NULL); /* follows links */
    snprintf(draft, sizeof draft, "%.*s.tmp", HY_PATH_MAX, place ? place : o->save);
    free(place);
    return hy_keep_apart("csv", o->csv, "the temporary file of --save", draft);
}

/* Checks that the model file can be written. */
static gt_status check_save(const trainer *t) {
    const hy_options *o = &t->options;
    if (!*o->save) return GT_OK;
    if (hy_is_standard(o->save))
        return hy_fail(GT_ERROR_VALUE, "save: %s already receives the report; give another name", o->save);
    gt_status status = keep_texts(t, "save", o->save);
    if (status == GT_OK && o->config) status = hy_keep_apart("save", o->save, "the config file", o->config);
    if (status == GT_OK) status = hy_keep_apart("save", o->save, "the log", o->csv);
    if (status == GT_OK) status = keep_from_draft(o);
    if (status != GT_OK) return status;
    status = hy_save_fits(o->save, *o->resume ? o->resume : o->init);
    if (status == GT_OK && o->keep_best) {
        char best[HY_TEXT_MAX + 8];
        hy_best_path(o, best);
        status = hy_save_fits(best, "");
        if (status == GT_OK) status = hy_keep_apart("keep-best", best, "the log", o->csv);
    }
    return status == GT_OK ? status : hy_fail(status, "save: %s", hy_last_error());
}

/* Returns the number of tracks that --split tracks cuts the text into, which is the batch of the training.  The batch
 * of --generate is its number of samples. */
static int64_t tracks_of(const trainer *t) {
    const char *saved = *t->options.generate ? hy_file_text_of(&t->file, "option.batch") : NULL;
    return saved ? strtoll(saved, NULL, 10) : t->options.batch;
}

/* Makes the description of the text from the options. */
static hy_source source_of(const trainer *t) {
    const hy_options *o = &t->options;
    return (hy_source){.separator = o->separator,
                       .end_symbol = o->end_symbol,
                       .width = !strcmp(o->tokens, "uint16")   ? 2
                                : !strcmp(o->tokens, "uint32") ? 4
                                                               : 0,
                       .vocab = o->vocab,
                       .end_token = o->end_token,
                       .tracks = !strcmp(o->split, "tracks") && !*o->val ? tracks_of(t) : 0,
                       .held_out = llround(o->held_out * 1e6),
                       .sum = *o->save || *o->resume || t->ranks.size > 1};
}

/* Fails if an option for texts of bytes is given with a text of numbers, or the other way round. */
static gt_status check_source(const hy_options *o) {
    const int is_bytes = !strcmp(o->tokens, "bytes");
    const char *wrong = is_bytes ? (o->vocab            ? "vocab"
                                    : o->end_token >= 0 ? "end-token"
                                                        : NULL)
                                 : (o->end_symbol   ? "end-symbol"
                                    : *o->separator ? "separator"
                                                    : NULL);
    if (is_bytes && *o->table) wrong = "table";
    if (!is_bytes && !*o->data && !*o->val)
        return hy_fail(GT_ERROR_VALUE, "tokens: the fables are bytes; use --data to name a file of tokens");
    if (!wrong) return GT_OK;
    return hy_fail(GT_ERROR_VALUE, "%s: has no effect without --tokens %s; leave it out", wrong,
                   is_bytes ? "uint16 or uint32" : "bytes");
}

/* Escapes a text as the command line expects it.  Bytes other than printable ASCII become \n, \t or \xNN. */
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

/* Fails if the user gave a separator or an end token that does not occur in the text. */
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

/* Returns whether --val is the only text, as with --eval --val and no --data.  Then all of this text is held out.
 * Of --generate this concerns the text that measures the cost of int8 weights. */
static int has_val_alone(const trainer *t) {
    const hy_options *o = &t->options;
    return (*o->eval || *o->generate) && hy_options_given(o, "val") && !hy_options_given(o, "data");
}

static gt_status find_files(trainer *t, const char *program) {
    const hy_options *o = &t->options;
    const uint64_t seed = (uint64_t)o->seed;
    gt_status status = *o->val ? hy_paths_expand(&t->val, o->val, NULL) : GT_OK;
    if (status != GT_OK) return hy_fail(status, "val: %s", hy_last_error());
    if (has_val_alone(t)) {
        memcpy(t->data, o->val, sizeof t->data);
        return GT_OK;
    }
    if (*o->data)
        memcpy(t->data, o->data, sizeof t->data);
    else
        find_fables(t->data, program);
    status = hy_paths_expand(&t->files, t->data, o->shuffle ? &seed : NULL);
    if (status == GT_OK && hy_options_given(o, "shuffle") && o->shuffle && t->files.count < 2)
        status = hy_fail(GT_ERROR_VALUE, "shuffle: has no effect on %.300s, which is one file; leave it out", t->data);
    return status;
}

static gt_status load_text(trainer *t, const char *program) {
    gt_status status = find_files(t, program);
    if (status == GT_OK) status = check_files(t);
    const hy_source source = source_of(t);
    if (status == GT_OK) status = check_source(&t->options);
    if (status == GT_OK) status = hy_text_load(&t->text, &t->files, &t->val, &source);
    if (status == GT_OK) status = check_ends(t);
    if (status != GT_OK && t->data_is_files)
        hy_fail(status, "%s (%s names this text; if it is elsewhere, use --data)", hy_last_error(), t->file.path);
    if (status != GT_OK || t->options.list_models) return status;
    if (source.sum) hy_text_sum(&t->text, t->text_sum);
    status = use_vocabulary(t);
    if (status == GT_OK && *t->options.table) status = hy_text_table(&t->text, t->options.table);
    if (status != GT_OK || *t->options.eval || *t->options.generate) return status;
    status = check_lengths(t);
    return status == GT_OK ? check_prompt(t) : status;
}

/* Fails if the user gave a size of a branch that the model does not have.  Also fails if the user chose fused calls
 * that do not apply to the model. */
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

/* Chooses the model's configuration, with the sizes that the options set. */
static gt_status choose_config(trainer *t) {
    const hy_options *o = &t->options;
    hy_config *c = &t->config;
    /* Reports a size of a missing branch first, since its value does not matter. */
    const gt_status sizes = hy_options_config(o, c), branches = check_branches(o, c);
    if (sizes != GT_OK || branches != GT_OK) return branches != GT_OK ? branches : sizes;
    c->stateful = o->stateful, c->recompute = o->recompute;
    c->fuse = strcmp(o->fuse, "conv_ssd") ? HY_WKV_SSM : HY_CONV_SSD;
    return hy_config_resolve(c);
}

/* Returns the bytes of memory that a model may take; 0: not known.  On the CPU this is the memory of the computer,
 * or the limit of the container (*is_limited = 1).  A container kills a process that takes more.  The ranks on one
 * computer share its memory. */
static size_t available_memory(const trainer *t, int *is_limited) {
    long pages = sysconf(_SC_PHYS_PAGES), bytes = sysconf(_SC_PAGESIZE);
    *is_limited = 0;
    if (strcmp(t->backend->name, "cpu")) return t->backend->memory_free;
    const size_t there = pages > 0 && bytes > 0 ? (size_t)pages * (size_t)bytes : 0, limit = hy_memory_limit("");
    *is_limited = limit && (!there || limit < there);
    return (*is_limited ? limit : there) / (size_t)t->ranks.local;
}

/* Lists options with which the run needs less memory.  A resumed run cannot change its batch and seq, and the model
 * of a file cannot change its size. */
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
        const char *before = i == 0 ? "; it needs less with " : i + 1 < ways ? ", " : " or ";
        const size_t used = strlen(advice);
        snprintf(advice + used, size - used, "%s%s", before, way[i]);
    }
}

/* Fails with a message that says how much memory the model needs.  `there` is the number of bytes available, or 0 if
 * that is not known. */
static gt_status needs_memory(const trainer *t, size_t there, int is_limited) {
    char how_much[64] = "they could not be allocated", advice[320];
    if (there)
        snprintf(how_much, sizeof how_much,
                 is_limited ? "the limit of this container is %.0f MiB" : "%.0f MiB are available",
                 (double)there / MIB);
    advise_on_memory(t, advice, sizeof advice);
    return hy_fail(GT_ERROR_MEMORY, "the model needs %.0f MiB of memory, but %s%s", (double)t->plan.total / MIB,
                   how_much, advice);
}

/* Finds how many windows the model can process at once, with at most four fifths of the memory.  The number is the
 * largest possible divisor of the rank's share, or 1 if no divisor fits. */
static gt_status fit_rows(trainer *t, int64_t share, int64_t *rows) {
    const hy_options *o = &t->options;
    hy_plan plan;
    int is_limited;
    const size_t there = available_memory(t, &is_limited);
    for (*rows = share; *rows > 1; --*rows) {
        if (share % *rows) continue;
        gt_status status = hy_model_plan(t->backend, &t->config, t->text.vocab, (int)*rows, (int)o->seq, &plan);
        if (status != GT_OK || !there || plan.total <= there / 5 * 4) return status;
    }
    return GT_OK;
}

/* Returns the number of windows of a batch that this rank processes. */
static int64_t share_of(const trainer *t) { return t->options.batch / t->ranks.size; }

static gt_status check_share(const trainer *t, int64_t batch) {
    const int64_t size = t->ranks.size, least = batch / size * size;
    if (batch % size == 0) return GT_OK;
    return hy_fail(GT_ERROR_VALUE, "batch: %lld windows are not a multiple of %lld ranks; the nearest is %lld",
                   (long long)batch, (long long)size,
                   (long long)(least && 2 * (batch - least) < size ? least : least + size));
}

/* Sets t->rows.  The micro-batch in a model file may not divide the share of this run, because the saved run may
 * have had another number of ranks. */
static gt_status choose_rows(trainer *t) {
    const hy_options *o = &t->options;
    const int64_t wanted = o->micro_batch, share = share_of(t);
    char whole[48] = "batch";
    if (t->ranks.size > 1) snprintf(whole, sizeof whole, "the windows of each of %d ranks", t->ranks.size);
    t->rows = wanted > 0 ? wanted : share;
    if (wanted == HY_AUTO && !o->stateful) return fit_rows(t, share, &t->rows);
    int64_t nearest = t->rows < share ? t->rows : share;
    while (share % nearest) nearest--;
    if (*o->resume && !hy_options_given(o, "micro-batch")) t->rows = nearest;
    if (t->rows != nearest)
        return hy_fail(GT_ERROR_VALUE, "micro-batch: %lld does not divide %s = %lld; the nearest is %lld",
                       (long long)wanted, whole, (long long)share, (long long)nearest);
    if (o->stateful && t->rows < share)
        return hy_fail(
            GT_ERROR_VALUE,
            "micro-batch: %lld cannot be used with --stateful, which needs all tracks in one batch; leave it out",
            (long long)wanted);
    return GT_OK;
}

gt_status hy_create_model(trainer *t, const hy_config *config) {
    const hy_options *o = &t->options;
    const int rows = (int)(t->rows ? t->rows : share_of(t));
    gt_status status = hy_model_plan(t->backend, config, t->text.vocab, rows, (int)o->seq, &t->plan);
    if (status != GT_OK) return status;
    int is_limited;
    const size_t there = available_memory(t, &is_limited);
    if (there && t->plan.total > there) return needs_memory(t, there, is_limited);
    status = hy_model_create(t->backend, config, t->text.vocab, rows, (int)o->seq, (uint64_t)o->seed, &t->model);
    return status == GT_ERROR_MEMORY ? needs_memory(t, 0, 0) : status;
}

/* Starts to watch the GPU of the run, for --watch. */
static gt_status watch(trainer *t) {
    if (!*t->backend->pci)
        return hy_fail(GT_ERROR_VALUE, "watch: there is no GPU to watch: the run is on the CPU; leave it out");
    return hy_watch_open(&t->watch, t->backend->pci);
}

/* ---- ranks ----------------------------------------------------------------------------------- */

static void add_pair(char **at, const char *name, const char *value) {
    *at += sprintf(*at, "%s", name) + 1;
    *at += sprintf(*at, "%s", value) + 1;
}

/* Checks that all ranks have the same options, program, text and model file.  It compares the bytes of the text,
 * since the path may differ. */
static gt_status agree(trainer *t, gt_status own) {
    static char pairs[HY_OPTIONS_MAX * (HY_TEXT_MAX + 64)];
    char *at = pairs, value[HY_TEXT_MAX];
    snprintf(value, sizeof value, "%d", GT_VERSION);
    add_pair(&at, "the program's version", value);
    add_pair(&at, "instructions of the CPU", hy_cpu_features() & HY_CPU_AVX2 ? "AVX2" : "base");
    for (int i = 0; hy_options_name(i); i++) {
        const char *name = hy_options_name(i);
        if (!strcmp(name, "data") || !strcmp(name, "val")) continue;
        hy_options_text(&t->options, name, value);
        add_pair(&at, name, value);
    }
    add_pair(&at, "SHA-256 of the text", t->text_sum);
    add_pair(&at, "checksum of the model file", t->file_sum);
    return hy_ranks_agree(&t->ranks, own, pairs, (size_t)(at - pairs));
}

/* ---- sums of gradients over GPUs ----------------------------------------------------------------- */

/* Converts the address of a GPU, such as 0000:0A:00.0, to a number; -1: the address is not known. */
static double pci_number(const char *pci) {
    unsigned domain, bus, device;
    if (sscanf(pci, "%x:%x:%x", &domain, &bus, &device) != 3) return -1;
    return (domain * 256.0 + bus) * 256 + device;
}

/* Finds two ranks that use the same GPU; pair[0] = -1: there are none. */
static gt_status find_shared_gpu(trainer *t, int pair[2]) {
    const int size = t->ranks.size;
    const double own[2] = {t->ranks.machine, pci_number(t->backend->pci)};
    double *all = t->ranks.rank ? NULL : malloc((size_t)size * sizeof own);
    gt_status status = t->ranks.rank || all ? GT_OK : hy_fail(GT_ERROR_MEMORY, "no memory to compare GPUs");
    status = hy_ranks_gather(&t->ranks, status, own, all, 2);
    pair[0] = pair[1] = -1;
    for (int i = 0; i < size && all && status == GT_OK; i++)
        for (int k = 0; k < i && all[2 * i + 1] >= 0; k++)
            if (all[2 * i] == all[2 * k] && all[2 * i + 1] == all[2 * k + 1]) pair[0] = k, pair[1] = i;
    free(all);
    return hy_ranks_share(&t->ranks, status, pair, 2 * sizeof *pair);
}

/* Decides whether the ranks use NCCL, and sets t->transport. */
static gt_status choose_transport(trainer *t, int *takes_nccl) {
    const int is_demanded = !strcmp(t->options.nccl, "on");
    char reason[160] = "";
    int pair[2] = {-1, -1};
    *takes_nccl = 0;
    if (is_demanded && !strcmp(t->backend->name, "cpu"))
        return hy_fail(GT_ERROR_VALUE, "nccl: on has no effect on the CPU; leave it out");
    if (!strcmp(t->backend->name, "cpu") || (t->ranks.size == 1 && !is_demanded)) return GT_OK;
    if (!strcmp(t->options.nccl, "off")) {
        snprintf(t->transport, sizeof t->transport, "MPI, through host memory");
        return GT_OK;
    }
    gt_status status = hy_nccl_load();
    double lacking = status != GT_OK;
    if (status != GT_OK) snprintf(reason, sizeof reason, "%s", hy_last_error());
    if (is_demanded) status = hy_ranks_meet(&t->ranks, status); /* the message then names a rank */
    if (is_demanded && status != GT_OK) return hy_fail(status, "nccl: %s", hy_last_error());
    if ((status = hy_ranks_add(&t->ranks, GT_OK, &lacking, 1)) != GT_OK) return status;
    if (lacking > 0 && !*reason) snprintf(reason, sizeof reason, "%.0f of the ranks cannot load it", lacking);
    if (!*reason && (status = find_shared_gpu(t, pair)) != GT_OK) return status;
    if (pair[0] >= 0) snprintf(reason, sizeof reason, "ranks %d and %d have the same GPU", pair[0], pair[1]);
    if (is_demanded && *reason) return hy_fail(GT_ERROR_UNSUPPORTED, "nccl: %s, which NCCL refuses", reason);
    *takes_nccl = !*reason;
    if (*takes_nccl)
        snprintf(t->transport, sizeof t->transport, "NCCL %s, on the GPUs, while backward runs", hy_nccl_version());
    else
        snprintf(t->transport, sizeof t->transport, "MPI, through host memory; NCCL is not used: %s", reason);
    return GT_OK;
}

/* Connects the GPUs of all ranks, if NCCL sums their gradients. */
static gt_status connect_gpus(trainer *t) {
    int takes_nccl;
    hy_nccl_id id = {{0}};
    hy_nccl *nccl = NULL;
    gt_status status = choose_transport(t, &takes_nccl);
    if (status != GT_OK || !takes_nccl) return status;
    if (!t->ranks.rank) status = hy_nccl_new_id(&id);
    if ((status = hy_ranks_share(&t->ranks, status, &id, sizeof id)) != GT_OK) return status;
    hy_alive("NCCL began to connect the GPUs of all ranks");
    t->ranks.waits_on_gpu = 1;
    status = hy_nccl_open(&nccl, &t->ranks, &id);
    if (status == GT_OK) t->backend->connect(t->backend, nccl);
    return hy_ranks_meet(&t->ranks, status);
}

gt_status hy_set_up(trainer *t, const char *program) {
    const hy_options *o = &t->options;
    hy_limit_stall((int)o->stall_timeout);
    gt_status status = open_file(t);
    if (status == GT_OK) status = open_backend(t);
    if (status == GT_OK && o->synchronize) hy_calls_wait(t->backend);
    if (status == GT_OK) status = fill_options(t);
    if (status == GT_OK && o->watch) status = watch(t);
    const int is_int8 = *o->generate && hy_options_int8(o);
    if (status == GT_OK) status = *o->generate && !is_int8 ? read_vocabulary(t) : load_text(t, program);
    if (status == GT_OK && *o->generate) status = read_first_token(t);
    if (status == GT_OK && *o->generate) status = check_prompt(t);
    if (status != GT_OK) return status;
    hy_alive("the text was read; the model comes next");
    if ((status = choose_config(t)) != GT_OK) return status;
    t->random = (uint64_t)o->seed;
    t->loss_scale = 1;
    if (t->backend->dtype == GT_F16) t->loss_scale = exp2(floor(log2((double)(SCALE_PER_TOKEN * o->batch * o->seq))));
    t->held_out = -1;
    for (int i = 0; i < o->plan.count && status == GT_OK; i++) status = check_share(t, o->plan.of[i]);
    int takes_nccl;
    if (status == GT_OK && o->plan.count) status = choose_transport(t, &takes_nccl);
    if (status != GT_OK || o->list_models || o->check || o->bench.count || o->plan.count) return status;
    if (*o->generate) {
        t->config.samples = (int)o->batch, t->config.stateful = 0, t->config.int8 = is_int8;
        if (is_int8) /* evaluations take several windows of --seq tokens at once */
            t->rows = o->batch < COST_WINDOWS ? COST_WINDOWS : o->batch;
        else if (t->options.seq > t->prompt_tokens) /* the batch only holds the prompt */
            t->options.seq = t->prompt_tokens;
    }
    t->config.inference = *o->eval || *o->generate;
    if ((status = check_share(t, o->batch)) != GT_OK) return status;
    if (!t->config.inference && !o->profile) {
        t->config.dropout = (float)o->dropout, t->config.average = o->ema > 0;
        if ((status = choose_rows(t)) != GT_OK) return status;
    }
    status = hy_create_model(t, &t->config);
    if (status == GT_OK) status = hy_batch_create(&t->batch, share_of(t), o->seq);
    hy_batch_share(&t->batch, t->ranks.rank, t->ranks.size);
    if (status == GT_OK && o->stateful && !*o->generate && !*o->eval)
        status = hy_tracks_create(&t->tracks, &t->text, o->batch);
    if (status == GT_OK) status = load_file(t);
    if (status == GT_OK && !t->ranks.rank) status = check_save(t);
    if (t->ranks.size > 1) status = agree(t, status); /* comes before any rank writes a file */
    if (status == GT_OK && !t->config.inference && !o->profile) status = connect_gpus(t);
    if (status != GT_OK) return status;
    hy_alive("the model was created; the log comes next");
    if (t->ranks.rank) return GT_OK; /* only rank 0 writes a log */
    const hy_log_point end = {t->steps, t->tokens, t->last_loss};
    if (*o->resume && t->steps >= o->steps) return hy_log_reopen(&t->log, o->csv, &end); /* keeps all its rows */
    return hy_log_open(&t->log, o->csv, *o->resume ? &end : NULL, o->watch);
}
