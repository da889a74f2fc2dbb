#include "hybrid_save.h"
#include "hybrid_sha256.h"
#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        gt_status status_ = (call);                                                                                    \
        if (status_ != GT_OK) return status_;                                                                          \
    } while (0)

/* Files of format 1 have no options for the model's sizes, which followed from the width at that time.  Files of
 * format 2 lack some newer options and numbers; their defaults repeat the behaviour of that time. */
static const char format_key[] = "hybrid_train_format", format[] = "3", second_format[] = "2", older_format[] = "1";
static const char positions[] = "run.track_positions"; /* int64 tensor [batch] */
enum { VALUE_MAX = 4 * HY_TEXT_MAX };                  /* longest metadata text that this program writes */

/* The numbers of hy_progress, with their names.  The file stores each number under the key "run.NAME". */
static const struct number {
    const char *name;
    int is_whole;
    size_t offset;
    int count;
} numbers[] = {
#define WHOLES(name, field, count)                                                                                     \
    { name, 1, offsetof(hy_progress, field), count }
#define REALS(name, field, count)                                                                                      \
    { name, 0, offsetof(hy_progress, field), count }
    WHOLES("steps", steps, 1),
    WHOLES("tokens", tokens, 1),
    WHOLES("random", random, 1),
    REALS("loss_scale", loss_scale, 1),
    WHOLES("loss_scale_steps", scale_steps, 1),
    REALS("first_loss", first_loss, 1),
    REALS("held_out", held_out, 1),
    REALS("seconds", seconds, 1),
    REALS("train_seconds", train_seconds, 1),
    REALS("aside_seconds", aside, 1),
    WHOLES("recent_steps", recent.steps, 1),
    REALS("recent_loss", recent.loss, HY_RECENT),
    REALS("recent_norm", recent.norm, HY_RECENT),
    REALS("recent_ratio", recent.ratio, HY_RECENT),
    REALS("recent_seconds", recent.seconds, HY_RECENT),
    WHOLES("recent_tokens", recent.tokens, HY_RECENT),
    REALS("best", best, 1),
    WHOLES("best_step", best_step, 1),
};
enum { NUMBERS = sizeof numbers / sizeof numbers[0], LATER_NUMBERS = 2 }; /* format 2 may lack the last two */

/* ---- texts --------------------------------------------------------------------------------- */

/* Encodes any bytes as ASCII.  Control characters, the backslash and bytes beyond ASCII become \xNN. */
static void to_ascii(char *to, const char *from) {
    for (; *from; from++) {
        unsigned char byte = (unsigned char)*from;
        to += sprintf(to, byte < 32 || byte > 126 || byte == '\\' ? "\\x%02x" : "%c", byte);
    }
    *to = 0;
}

/* Returns the byte that two hexadecimal digits stand for; 0 if they are not digits. */
static unsigned char byte_of(const char *digits) {
    const char two[] = {digits[0], digits[0] ? digits[1] : 0, 0};
    if (!isxdigit((unsigned char)two[0]) || !isxdigit((unsigned char)two[1])) return 0;
    return (unsigned char)strtoul(two, NULL, 16);
}

/* Decodes a text that to_ascii has encoded.  Returns 0 if the text has another form or more than HY_TEXT_MAX - 1
 * bytes. */
static int from_ascii(char *to, const char *from) {
    for (int n = 0; *from; n++) {
        if (n == HY_TEXT_MAX - 1) return 0;
        if (*from != '\\') {
            *to++ = *from++;
        } else if (from[1] == 'x' && byte_of(from + 2)) {
            *to++ = (char)byte_of(from + 2);
            from += 4;
        } else {
            return 0;
        }
    }
    *to = 0;
    return 1;
}

void hy_text_sum(const hy_text *text, char hex[65]) { memcpy(hex, text->sum, sizeof text->sum); }

/* ---- writing ------------------------------------------------------------------------------- */

static gt_status add_whole(hy_file_writer *w, const char *key, int64_t value) {
    char text[32];
    snprintf(text, sizeof text, "%lld", (long long)value);
    return hy_writer_text(w, key, text);
}

static gt_status add_numbers(hy_file_writer *w, const struct number *n, const hy_progress *p) {
    char key[64], text[32 * HY_RECENT];
    int used = 0;
    snprintf(key, sizeof key, "run.%s", n->name);
    for (int i = 0; i < n->count; i++) {
        const char *at = (const char *)p + n->offset + 8 * i, *space = i ? " " : "";
        if (n->is_whole)
            used += snprintf(text + used, sizeof text - (size_t)used, "%s%lld", space, (long long)*(const int64_t *)at);
        else
            used += snprintf(text + used, sizeof text - (size_t)used, "%s%.17g", space, *(const double *)at);
    }
    return hy_writer_text(w, key, text);
}

static gt_status add_vocabulary(hy_file_writer *w, const hy_text *x) {
    char text[4 * 256 + 1] = "";
    int used = 0;
    if (x->is_numbers) {
        TRY(add_whole(w, "vocabulary_size", x->vocab));
        return add_whole(w, "first_token", hy_token(x, 0));
    }
    for (int v = 0; v < x->vocab - (x->end_symbol >= 0); v++)
        used += snprintf(text + used, sizeof text - (size_t)used, v ? " %d" : "%d", x->byte_of[v]);
    TRY(hy_writer_text(w, "vocabulary", text));
    const int32_t first = hy_token(x, 0);
    return add_whole(w, "first_byte", first == x->end_symbol ? (uint8_t)x->end_text[0] : x->byte_of[first]);
}

/* A model with a tied head stores no option.untied.  So a program that does not know this option can read its file. */
static const char untied[] = "untied", tied[] = "no";
static int is_tied(const char *option, const char *text) { return !strcmp(option, untied) && !strcmp(text, tied); }

static gt_status add_texts(hy_file_writer *w, const hy_run *run) {
    TRY(hy_writer_text(w, format_key, format));
    TRY(add_vocabulary(w, run->text));
    TRY(hy_writer_text(w, "data_sha256", run->text_sum));
    TRY(hy_writer_text(w, "device", run->device));
    for (int i = 0; hy_options_kept(i); i++) {
        char key[64], text[HY_TEXT_MAX], ascii[VALUE_MAX];
        snprintf(key, sizeof key, "option.%s", hy_options_kept(i));
        hy_options_text(run->options, hy_options_kept(i), text);
        if (is_tied(hy_options_kept(i), text)) continue;
        to_ascii(ascii, text);
        TRY(hy_writer_text(w, key, ascii));
    }
    for (int i = 0; i < NUMBERS; i++) TRY(add_numbers(w, &numbers[i], &run->progress));
    return add_whole(w, "run.optimizer_steps", hy_model_steps(run->model));
}

/* Writes n numbers as floats.  It converts them in place, so the floats overwrite the doubles in `numbers`. */
static gt_status write_floats(hy_file_writer *w, double *numbers, int64_t n, const char *name, const char *path) {
    float *floats = (float *)numbers;
    for (int64_t i = 0; i < n; i++) {
        double x = numbers[i];
        if (!isfinite(x))
            return hy_fail(GT_ERROR_VALUE, "%s: not written: %s contains a number that is not finite", path, name);
        float y = (float)x; /* overwrites half of numbers[i / 2], which has been read */
        memcpy(floats + i, &y, sizeof y);
    }
    return hy_writer_data(w, floats, (size_t)n * sizeof(float));
}

static int64_t largest(const hy_tensor *list, int count) {
    int64_t most = 0;
    for (int i = 0; i < count; i++) most = most < list[i].count ? list[i].count : most;
    return most;
}

static int64_t count_states(const hy_tensor *list, int count) {
    int64_t n = 0;
    for (int i = 0; i < count; i++) n += list[i].kind == HY_STATE ? list[i].count : 0;
    return n;
}

gt_status hy_states_gather(hy_ranks *ranks, hy_model *model, double **states) {
    int count = 0;
    hy_tensor *list = hy_model_tensors(model, &count);
    const int64_t n = list ? count_states(list, count) : 0;
    double *own = malloc((size_t)n * sizeof *own + 1), *at = own;
    *states = ranks->rank ? NULL : malloc((size_t)(ranks->size * n) * sizeof **states + 1);
    gt_status status =
        list && own && (ranks->rank || *states) ? GT_OK : hy_fail(GT_ERROR_MEMORY, "no memory for states");
    for (int i = 0; i < count && status == GT_OK; i++)
        if (list[i].kind == HY_STATE) status = hy_model_read_tensor(model, list + i, at), at += list[i].count;
    status = hy_ranks_gather(ranks, status, own, *states, n);
    free(own);
    free(list);
    return status;
}

/* Returns the number of ranks that share the tracks of a run. */
static int ranks_of(const hy_run *run) { return run->ranks ? run->ranks : 1; }

/* Returns the description of a tensor in the file; t describes this rank's tensor.  The two differ for states: the
 * file has the tracks of all ranks, one rank after the other. */
static hy_tensor of_all_ranks(const hy_run *run, const hy_tensor *t) {
    hy_tensor all = *t;
    if (t->kind == HY_STATE) all.shape[0] *= ranks_of(run), all.count *= ranks_of(run);
    return all;
}

/* Writes a tensor's data.  For several ranks a state's data is in run->states, which holds all_states numbers per
 * rank.  The tensor begins after `before` of these numbers. */
static gt_status add_data(hy_file_writer *w, const hy_run *run, const hy_tensor *t, int64_t before, int64_t all_states,
                          double *room, const char *path) {
    if (t->kind != HY_STATE || ranks_of(run) == 1) {
        TRY(hy_model_read_tensor(run->model, t, room));
        return write_floats(w, room, t->count, t->name, path);
    }
    for (int rank = 0; rank < run->ranks; rank++) {
        memcpy(room, run->states + rank * all_states + before, (size_t)t->count * sizeof *room);
        TRY(write_floats(w, room, t->count, t->name, path));
    }
    return GT_OK;
}

static gt_status write_run(hy_file_writer *w, const hy_run *run, const hy_tensor *list, int count, double *room,
                           const char *path) {
    const int64_t states = count_states(list, count);
    int64_t before = 0;
    TRY(add_texts(w, run));
    if (run->tracks) TRY(hy_writer_tensor(w, positions, HY_FILE_I64, 1, &run->tracks->rows));
    for (int i = 0; i < count; i++) {
        const hy_tensor t = of_all_ranks(run, list + i);
        TRY(hy_writer_tensor(w, t.name, HY_FILE_F32, t.rank, t.shape));
    }
    TRY(hy_writer_begin(w));
    if (run->tracks) TRY(hy_writer_data(w, run->tracks->next, (size_t)run->tracks->rows * sizeof(int64_t)));
    for (int i = 0; i < count; i++) {
        TRY(add_data(w, run, list + i, before, states, room, path));
        before += list[i].kind == HY_STATE ? list[i].count : 0;
    }
    return GT_OK;
}

gt_status hy_save(const hy_run *run, const char *path) {
    hy_file_writer *writer;
    int count;
    TRY(hy_writer_open(&writer, path));
    hy_tensor *list = hy_model_tensors(run->model, &count);
    double *room = list ? malloc((size_t)largest(list, count) * sizeof *room) : NULL;
    gt_status status = room ? write_run(writer, run, list, count, room, path)
                            : hy_fail(GT_ERROR_MEMORY, "%s: no memory to write it", path);
    free(room);
    free(list);
    return hy_writer_end(writer, status);
}

gt_status hy_save_fits(const char *path, const char *reads) {
    struct stat about;
    if (stat(path, &about) == 0 && S_ISREG(about.st_mode) && about.st_size) {
        hy_file file;
        gt_status status = hy_saved_open(&file, path);
        hy_file_close(&file);
        if (status != GT_OK)
            return hy_fail(status, "it would replace a file that is not a model file: %s", hy_last_error());
    }
    return hy_writer_fits(path, reads);
}

/* ---- reading ------------------------------------------------------------------------------- */

static gt_status damaged(const hy_file *f, const char *key) {
    const char *text = hy_file_text_of(f, key);
    return hy_fail(GT_ERROR_VALUE,
                   text ? "%s: damaged: key %s has the value '%.60s'" : "%s: damaged: key %s is missing", f->path, key,
                   text);
}

/* Returns the metadata text of a key.  If the key is missing, returns NULL and sets the error. */
static const char *text_of(const hy_file *f, const char *key) {
    const char *text = hy_file_text_of(f, key);
    if (!text) damaged(f, key);
    return text;
}

static gt_status read_whole(const hy_file *f, const char *key, int64_t least, int64_t most, int64_t *number) {
    const char *text = text_of(f, key);
    char *end;
    if (!text) return GT_ERROR_VALUE;
    errno = 0;
    *number = strtoll(text, &end, 10);
    if (errno || end == text || *end || *number < least || *number > most) return damaged(f, key);
    return GT_OK;
}

static gt_status read_numbers(const hy_file *f, const struct number *n, hy_progress *p) {
    char key[64], *end = NULL;
    snprintf(key, sizeof key, "run.%s", n->name);
    const char *text = text_of(f, key);
    if (!text) return GT_ERROR_VALUE;
    for (int i = 0; i < n->count; i++, text = end) {
        char *at = (char *)p + n->offset + 8 * i;
        errno = 0;
        if (n->is_whole)
            *(int64_t *)at = strtoll(text, &end, 10);
        else
            *(double *)at = strtod(text, &end);
        if (end == text || (n->is_whole && errno)) return damaged(f, key);
    }
    return *end ? damaged(f, key) : GT_OK;
}

/* Checks the ranges of the numbers that the trainer relies on. */
static gt_status check_progress(const hy_file *f, const hy_progress *p) {
    const struct {
        const char *key;
        int good;
    } checks[] = {{"run.steps", p->steps > 0},
                  {"run.tokens", p->tokens >= 0},
                  {"run.loss_scale", p->loss_scale >= 1 && isfinite(p->loss_scale)},
                  {"run.loss_scale_steps", p->scale_steps >= 0},
                  {"run.first_loss", isfinite(p->first_loss)},
                  {"run.held_out", isfinite(p->held_out)},
                  {"run.seconds", p->seconds >= 0 && isfinite(p->seconds)},
                  {"run.train_seconds", p->train_seconds >= 0 && isfinite(p->train_seconds)},
                  {"run.aside_seconds", p->aside >= 0 && isfinite(p->aside)},
                  {"run.best_step", p->best_step >= 0 && p->best_step <= p->steps},
                  {"run.recent_steps", p->recent.steps >= 0 && p->recent.steps <= p->steps}};
    for (size_t i = 0; i < sizeof checks / sizeof checks[0]; i++)
        if (!checks[i].good) return damaged(f, checks[i].key);
    return GT_OK;
}

/* Returns whether a file may have this key.  A file with another key is refused, since the key may be a damaged one. */
static int is_key(const char *key) {
    static const char *const others[] = {"checksum",        format_key,    "vocabulary",          "first_byte",
                                         "device",          "data_sha256", "run.optimizer_steps", "format",
                                         "vocabulary_size", "first_token"};
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++)
        if (!strcmp(key, others[i])) return 1;
    if (!strncmp(key, "user.", 5)) return 1;
    for (int i = 0; !strncmp(key, "option.", 7) && hy_options_kept(i); i++)
        if (!strcmp(key + 7, hy_options_kept(i))) return 1;
    for (int i = 0; !strncmp(key, "run.", 4) && i < NUMBERS; i++)
        if (!strcmp(key + 4, numbers[i].name)) return 1;
    return 0;
}

static gt_status check_keys(const hy_file *f) {
    const char *version = hy_file_text_of(f, format_key);
    if (!version)
        return hy_fail(GT_ERROR_VALUE,
                       "%s: a safetensors file, but not a model file of hybrid_train: it has no key '%s'", f->path,
                       format_key);
    if (strcmp(version, format) && strcmp(version, second_format) && strcmp(version, older_format))
        return hy_fail(GT_ERROR_VALUE, "%s: its format is '%.20s', but this program knows only '%s', '%s' and '%s'",
                       f->path, version, older_format, second_format, format);
    for (int i = 0; i < f->text_count; i++)
        if (!is_key(f->texts[i].key))
            return hy_fail(GT_ERROR_VALUE, "%s: damaged: unknown key '%.60s' (your own keys must begin with 'user.')",
                           f->path, f->texts[i].key);
    return GT_OK;
}

gt_status hy_saved_open(hy_file *f, const char *path) {
    TRY(hy_file_open(f, path));
    return check_keys(f);
}

gt_status hy_saved_numbers(const hy_file *f, int *vocab) {
    int64_t number = 0;
    *vocab = 0;
    if (!hy_file_text_of(f, "vocabulary_size")) return GT_OK;
    TRY(read_whole(f, "vocabulary_size", 2, HY_VOCAB_MAX, &number));
    *vocab = (int)number;
    return GT_OK;
}

gt_status hy_saved_first_token(const hy_file *f, int32_t *token) {
    int64_t number;
    TRY(read_whole(f, "first_token", 0, HY_VOCAB_MAX - 1, &number));
    *token = (int32_t)number;
    return GT_OK;
}

gt_status hy_saved_vocabulary(const hy_file *f, uint8_t *bytes, int *count) {
    const char *text = text_of(f, "vocabulary");
    if (!text) return GT_ERROR_VALUE;
    *count = 0;
    do {
        char *end;
        long byte = strtol(text, &end, 10);
        if (end == text || (*end && *end != ' ') || byte < 0 || byte > 255 || *count == 256 ||
            (*count && byte <= bytes[*count - 1]))
            return damaged(f, "vocabulary");
        bytes[(*count)++] = (uint8_t)byte;
        text = end + (*end == ' ');
    } while (*text);
    return *count > 1 ? GT_OK : damaged(f, "vocabulary");
}

gt_status hy_saved_first_byte(const hy_file *f, uint8_t *byte) {
    int64_t number;
    TRY(read_whole(f, "first_byte", 0, 255, &number));
    *byte = (uint8_t)number;
    return GT_OK;
}

/* ---- tensors ------------------------------------------------------------------------------- */

/* Prints a shape like [4,3]. */
static void print_shape(char *text, size_t size, int rank, const int64_t *shape) {
    size_t used = (size_t)snprintf(text, size, "[");
    for (int i = 0; i < rank; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%lld", i ? "," : "", (long long)shape[i]);
    snprintf(text + used, size - used, "]");
}

/* Finds the file's tensor with this name and this shape.  If there is none, returns NULL and sets the error. */
static const hy_file_tensor *find_tensor(const hy_file *f, const char *name, hy_file_dtype dtype, int rank,
                                         const int64_t *shape) {
    const hy_file_tensor *t = hy_file_tensor_of(f, name);
    char has[192], needs[192];
    if (!t) {
        hy_fail(GT_ERROR_VALUE, "%s: does not fit: it has no tensor %s", f->path, name);
    } else if (t->dtype != dtype) {
        hy_fail(GT_ERROR_VALUE, "%s: does not fit: tensor %s does not have the dtype %s", f->path, name,
                dtype == HY_FILE_F32 ? "F32" : "I64");
    } else if (t->rank != rank || memcmp(t->shape, shape, (size_t)rank * sizeof *shape)) {
        print_shape(has, sizeof has, t->rank, t->shape);
        print_shape(needs, sizeof needs, rank, shape);
        hy_fail(GT_ERROR_VALUE, "%s: does not fit: tensor %s has the shape %s, but the model needs %s", f->path, name,
                has, needs);
    } else {
        return t;
    }
    return NULL;
}

/* Fails if the file's options contradict the sizes of its weights.  This check comes before a model of these sizes
 * is created. */
static gt_status check_size(const hy_file *f, const hy_options *o) {
    uint8_t bytes[256];
    int vocab;
    char name[64];
    TRY(hy_saved_numbers(f, &vocab));
    if (!vocab) {
        TRY(hy_saved_vocabulary(f, bytes, &vocab));
        vocab += o->end_symbol;
    }
    const int64_t shape[2] = {vocab, o->hidden};
    if (!find_tensor(f, "embedding", HY_FILE_F32, 2, shape)) return GT_ERROR_VALUE;
    for (int past = 0; past < 2; past++) {
        snprintf(name, sizeof name, "layers.%lld.norm", (long long)o->layers - 1 + past);
        if ((hy_file_tensor_of(f, name) == NULL) != past)
            return hy_fail(GT_ERROR_VALUE,
                           "%s: damaged: option.layers is %lld, but the file has another number of layers", f->path,
                           (long long)o->layers);
    }
    return GT_OK;
}

/* ---- options ------------------------------------------------------------------------------- */

/* Returns whether files of format 1 lack this option. */
static int is_newer(const char *option) {
    static const char *const newer[] = {"heads",  "d-state",    "expand", "d-conv",    "mamba-head", "ffn",
                                        "tokens", "end-symbol", "vocab",  "end-token", "split"};
    for (size_t i = 0; i < sizeof newer / sizeof newer[0]; i++)
        if (!strcmp(option, newer[i])) return 1;
    return 0;
}

/* Returns whether a file of format 1 or 2 may lack this option. */
static int came_later(const char *option) {
    static const char *const later[] = {
        "recompute", "fuse",     "final-eval-tokens", "val",       "table", "held-out",
        "shuffle",   "schedule", "decay-steps",       "beta1",     "beta2", "eps",
        "dropout",   "ema",      "micro-batch",       "keep-best", "top-p", "repetition-penalty",
        "stop"};
    for (size_t i = 0; i < sizeof later / sizeof later[0]; i++)
        if (!strcmp(option, later[i])) return 1;
    return 0;
}

/* Finds the number of heads of a model in a file of format 1.  The shape of a tensor gives this number, since the
 * options do not contain it. */
static gt_status take_heads(const hy_file *f, hy_options *o) {
    const hy_file_tensor *bonus = hy_file_tensor_of(f, "layers.0.rwkv.bonus");
    char text[32];
    if (!bonus || bonus->rank != 2)
        return hy_fail(GT_ERROR_VALUE, "%s: does not fit: tensor layers.0.rwkv.bonus is missing, or not a matrix",
                       f->path);
    snprintf(text, sizeof text, "%lld", (long long)bonus->shape[0]);
    return hy_options_take(o, "heads", text, f->path, 1);
}

gt_status hy_saved_options(const hy_file *f, hy_take take, hy_options *o) {
    const int is_older = !strcmp(hy_file_text_of(f, format_key), older_format);
    for (int i = 0; hy_options_kept(i); i++) {
        const char *name = hy_options_kept(i);
        char key[64], value[HY_TEXT_MAX];
        snprintf(key, sizeof key, "option.%s", name);
        if (!strcmp(name, "dtype") || (take == HY_TAKE_MODEL && !hy_options_of_model(name))) continue;
        if (is_older && is_newer(name)) continue;
        if (came_later(name) && strcmp(hy_file_text_of(f, format_key), format) && !hy_file_text_of(f, key)) continue;
        const char *text = hy_file_text_of(f, key);
        if (!text && !strcmp(name, untied)) text = tied;
        if (!text && f->checksum_at < 0 && !hy_options_of_model(name)) continue; /* another program wrote the file */
        if (!text) return damaged(f, key);
        if (!from_ascii(value, text)) return damaged(f, key);
        TRY(hy_options_take(o, name, value, f->path, take == HY_TAKE_STRICTLY || hy_options_of_model(name)));
    }
    if (is_older) TRY(take_heads(f, o));
    return check_size(f, o);
}

/* ---- loading ------------------------------------------------------------------------------- */

/* Loads one tensor.  `room` has room for this tensor's doubles of all ranks. */
static gt_status load_tensor(hy_file *f, const hy_run *run, const hy_tensor *own, const char *prefix, double *room) {
    const hy_tensor all = of_all_ranks(run, own), *t = &all;
    char name[2 * sizeof t->name];
    snprintf(name, sizeof name, "%s%s", prefix, t->name);
    const hy_file_tensor *from = find_tensor(f, name, HY_FILE_F32, t->rank, t->shape);
    const float *floats = (const float *)room;
    if (!from) return GT_ERROR_VALUE;
    TRY(hy_file_read(f, from, room));
    for (int64_t i = t->count - 1; i >= 0; i--) { /* starts at the end, because room[i] overlaps floats[2 i] */
        float x;
        memcpy(&x, floats + i, sizeof x);
        room[i] = x;
        if (!isfinite(x))
            return hy_fail(GT_ERROR_VALUE, "%s: damaged: %s contains a number that is not finite", f->path, t->name);
    }
    return hy_model_write_tensor(run->model, own, t->count > own->count ? room + run->rank * own->count : room);
}

/* Loads the tensors of the kinds `first` to `last`.  In the file their names begin with `prefix`. */
static gt_status load_kinds(hy_file *f, const hy_run *run, hy_kind first, hy_kind last, const char *prefix) {
    int count;
    hy_tensor *list = hy_model_tensors(run->model, &count);
    double *room = list ? malloc((size_t)(ranks_of(run) * largest(list, count)) * sizeof *room) : NULL;
    gt_status status = room ? GT_OK : hy_fail(GT_ERROR_MEMORY, "%s: no memory to read it", f->path);
    for (int i = 0; i < count && status == GT_OK; i++)
        if (list[i].kind >= first && list[i].kind <= last) status = load_tensor(f, run, list + i, prefix, room);
    free(room);
    free(list);
    return status;
}

/* Fails if the file has more weights than the model, since it then belongs to another model. */
static gt_status check_no_others(const hy_file *f, const hy_model *model) {
    int count, weights = 0, there = 0;
    hy_tensor *list = hy_model_tensors(model, &count);
    if (!list) return hy_fail(GT_ERROR_MEMORY, "%s: no memory to read it", f->path);
    for (int i = 0; i < count; i++) weights += list[i].kind == HY_WEIGHT;
    free(list);
    for (int i = 0; i < f->tensor_count; i++) {
        const char *name = f->tensors[i].name;
        there += strncmp(name, "optimizer.", 10) && strncmp(name, "state.", 6) && strncmp(name, "run.", 4) &&
                 strncmp(name, "ema.", 4);
    }
    if (there == weights) return GT_OK;
    return hy_fail(GT_ERROR_VALUE, "%s: does not fit: it has %d tensors of weights, but the model needs %d", f->path,
                   there, weights);
}

static gt_status load_weights(hy_file *f, hy_model *model, const char *prefix) {
    const hy_run run = {.model = model};
    TRY(load_kinds(f, &run, HY_WEIGHT, HY_WEIGHT, prefix));
    TRY(check_no_others(f, model));
    return hy_model_written(model);
}

gt_status hy_load_weights(hy_file *f, hy_model *model) {
    return load_weights(f, model, hy_file_tensor_of(f, "ema.embedding") ? "ema." : "");
}

static gt_status load_tracks(hy_file *f, const hy_run *run) {
    const hy_file_tensor *from = find_tensor(f, positions, HY_FILE_I64, 1, &run->tracks->rows);
    if (!from) return GT_ERROR_VALUE;
    TRY(hy_file_read(f, from, run->tracks->next));
    if (hy_tracks_moved(run->tracks, run->text)) return GT_OK;
    return hy_fail(GT_ERROR_VALUE, "%s: damaged: a position in %s is outside of its track", f->path, positions);
}

gt_status hy_load_run(hy_file *f, hy_run *run) {
    const char *sum = text_of(f, "data_sha256");
    int64_t steps;
    if (!sum) return GT_ERROR_VALUE;
    if (f->checksum_at < 0)
        return hy_fail(GT_ERROR_VALUE,
                       "%s: cannot be resumed, because it has no checksum; use it with --init, --eval or --generate",
                       f->path);
    if (strcmp(sum, run->text_sum))
        return hy_fail(GT_ERROR_VALUE, "%s: not the text that %s was trained on; that text has the SHA-256 %.64s",
                       *run->options->val ? "data and val" : "data", f->path, sum);
    const int lacks = strcmp(hy_file_text_of(f, format_key), format) ? LATER_NUMBERS : 0;
    for (int i = 0; i < NUMBERS - lacks; i++) TRY(read_numbers(f, &numbers[i], &run->progress));
    if (lacks) run->progress.best = 0, run->progress.best_step = 0;
    TRY(check_progress(f, &run->progress));
    TRY(read_whole(f, "run.optimizer_steps", 0, run->progress.steps, &steps));
    TRY(load_weights(f, run->model, ""));
    TRY(load_kinds(f, run, HY_MOMENT, HY_STATE, ""));
    if (run->tracks) TRY(load_tracks(f, run));
    hy_model_set_steps(run->model, steps);
    return GT_OK;
}
