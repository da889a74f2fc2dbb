#include "hybrid_config.h"
#include "hybrid_data.h"
#include "hybrid_screen.h"
#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

typedef enum kind {
    SECTION, /* a heading of --help */
    FLAG,    /* yes or no */
    WHOLE,   /* a whole number, a multiple of `multiple` if that is set */
    NUMBER,
    PATH,
    STRING, /* a text; the escapes \n, \t, \f, \r, \\ and \xNN stand for bytes */
    LIST,   /* whole numbers with commas between them */
    CHOICE, /* one of `choices` */
    MODEL   /* one of hy_model_list */
} kind;

typedef struct row {
    const char *name;
    kind kind;
    size_t offset;
    const char *argument;   /* name of the value in --help */
    const char *cpu, *cuda; /* default on each device; cuda NULL: the same as cpu */
    double min, max, multiple;
    const char *const *choices; /* ends with NULL.  A WHOLE may have one word here, which means HY_AUTO */
    const char *help;
} row;

#define AT(field) offsetof(hy_options, field)
#define BIG 1e9
#define SEED_MAX 9007199254740991.0 /* 2^53 - 1 */
static const char *const devices[] = {"auto", "cuda", "cpu", NULL};
static const char *const fallbacks[] = {"none", "cpu", NULL};
static const char *const nccl_uses[] = {"auto", "on", "off", NULL};
static const char *const dtypes[] = {"f32", "bf16", "f16", NULL};
static const char *const token_kinds[] = {"bytes", "uint16", "uint32", NULL};
static const char *const fused[] = {"wkv_ssm", "conv_ssd", NULL};
static const char *const automatic[] = {"auto", NULL};
static const char *const none[] = {"none", NULL};
static const char *const schedules[] = {"cosine", "constant", "wsd", NULL};
static const char *const splits[] = {"tail", "tracks", NULL};
static const char *const weight_kinds[] = {"model", "int8", NULL};
static const char *const answers[] = {"yes", "no", "true", "false", "on", "off", "1", "0", NULL};
static const row rows[] = {
    {"Data", .kind = SECTION},
    {"data", PATH, AT(data), "FILE", "",
     .help = "the text to train on, read as bytes; a folder means all its files, in the order of their names; A,B "
             "means several files or folders, one after the other; default: the fables in examples/data"},
    {"shuffle", FLAG, AT(shuffle), NULL, "no",
     .help = "read the files of --data in a random order, which depends on --seed"},
    {"val", PATH, AT(val), "FILE", "",
     .help = "hold out this text, which may be files or a folder as in --data, and train on all of --data; with "
             "--eval: evaluate this text"},
    {"held-out", NUMBER, AT(held_out), "X", "0.1", NULL, 1e-6, 0.9, 0, NULL,
     "share of the text to hold out if there is no --val"},
    {"separator", STRING, AT(separator), "TEXT", "",
     .help = "the text that ends a document, for --stateful and --end-symbol; empty: two or more blank lines, or a "
             "form feed"},
    {"end-symbol", FLAG, AT(end_symbol), NULL, "no",
     .help = "represent the end of a document by an extra symbol, which the model learns like any other symbol"},
    {"tokens", CHOICE, AT(tokens), "KIND", "bytes", NULL, 0, 0, 0, token_kinds,
     "what --data contains: bytes, or tokens as little-endian numbers of 16 bits (uint16) or 32 bits (uint32)"},
    {"vocab", WHOLE, AT(vocab), "N", "0", NULL, 0, HY_VOCAB_MAX, 1, NULL,
     "number of different tokens, for --tokens uint16 or uint32; 0: the largest token in the file plus 1"},
    {"end-token", WHOLE, AT(end_token), "N", "-1", NULL, -1, HY_VOCAB_MAX, 1, NULL,
     "the token that ends a document, for --tokens uint16 or uint32; -1: there is none"},
    {"split", CHOICE, AT(split), "KIND", "tail", NULL, 0, 0, 0, splits,
     "what to hold out: the end of the text (tail), or cut the text into --batch tracks and hold out the end of each "
     "(tracks)"},
    {"table", PATH, AT(table), "FILE", "",
     .help = "the text of each token, for --tokens uint16 or uint32; tools/tokenize_text.py writes this file; samples "
             "then print as text, and losses also in bits per byte"},

    {"Model", .kind = SECTION},
    {"model", MODEL, AT(model), "NAME", "1M", "HY", .help = "see --list-models"},
    {"hidden", WHOLE, AT(hidden), "N", "0", NULL, 0, 8192, 16, NULL, "channels, a multiple of 16; 0: those of --model"},
    {"layers", WHOLE, AT(layers), "N", "0", NULL, 0, HY_MAX_LAYERS, 1, NULL, "layers; 0: those of --model"},
    {"heads", WHOLE, AT(heads), "N", "0", NULL, 0, 4096, 1, NULL,
     "heads of RWKV, a divisor of the channels; 0: those of --model, or heads of 32 channels if --hidden is given"},
    {"head-size", WHOLE, AT(head_size), "N", "0", NULL, 0, 256, 1, NULL,
     "channels of a head of RWKV; another way to choose --heads"},
    {"d-state", WHOLE, AT(d_state), "N", "0", NULL, 0, 256, 8, NULL,
     "state size of Mamba, a multiple of 8; 0: 64, or 16 in Mamba-1"},
    {"expand", WHOLE, AT(expand), "N", "0", NULL, 0, 8, 1, NULL,
     "inner channels of Mamba, as a multiple of --hidden; 0: 2"},
    {"d-conv", WHOLE, AT(d_conv), "N", "0", NULL, 0, 4, 1, NULL, "width of Mamba's convolution, 2 to 4; 0: 4"},
    {"mamba-head", WHOLE, AT(mamba_head), "N", "0", NULL, 0, 256, 1, NULL,
     "channels of a head of Mamba-2; 0: 64, or 32 or 16 if 64 does not divide the inner channels"},
    {"ffn", WHOLE, AT(ffn), "N|none", "0", NULL, 0, 16, 1, none,
     "inner channels of the FFN, as a multiple of --hidden; 0: 4; none: the layers have no FFN"},
    {"untied", FLAG, AT(untied), NULL, "no",
     .help = "give the output head its own weights; otherwise it uses the weights of the embedding"},

    {"Training", .kind = SECTION},
    {"steps", WHOLE, AT(steps), "N", "400", "300", 1, BIG, 1, NULL, "optimiser steps"},
    {"batch", WHOLE, AT(batch), "N", "8", "16", 1, 65536, 1, NULL,
     "windows per step, of all ranks together; with --generate: number of samples, by default 1"},
    {"seq", WHOLE, AT(seq), "N", "64", "128", 1, 1048576, 1, NULL, "tokens per window"},
    {"lr", NUMBER, AT(lr), "X", "0.004", "0.002", 0, 10, 0, NULL, "highest learning rate"},
    {"micro-batch", WHOLE, AT(micro_batch), "N|auto", "0", NULL, 0, 65536, 1, automatic,
     "windows in memory at once, a divisor of the windows of a rank; the gradients of all parts are added up; 0: all "
     "windows; auto: as many as fit"},
    {"schedule", CHOICE, AT(schedule), "NAME", "cosine", NULL, 0, 0, 0, schedules,
     "course of the learning rate after the warm-up: cosine, constant, or wsd (constant, then linear to --min-lr)"},
    {"decay-steps", WHOLE, AT(decay_steps), "N", "steps / 5", NULL, 1, BIG, 1, NULL,
     "with --schedule wsd: the number of last steps in which the learning rate falls"},
    {"min-lr", NUMBER, AT(min_lr), "X", "lr / 10", NULL, 0, 10, 0, NULL,
     "final learning rate, unless --schedule is constant"},
    {"warmup", WHOLE, AT(warmup), "N", "steps / 20", NULL, 0, BIG, 1, NULL,
     "steps in which the learning rate rises from 0"},
    {"weight-decay", NUMBER, AT(weight_decay), "X", "0.1", NULL, 0, 10, 0, NULL,
     "weight decay of AdamW, for matrices only"},
    {"beta1", NUMBER, AT(beta1), "X", "0.9", NULL, 0, 0.999999, 0, NULL, "beta1 of AdamW"},
    {"beta2", NUMBER, AT(beta2), "X", "0.95", NULL, 0, 0.999999, 0, NULL, "beta2 of AdamW"},
    {"eps", NUMBER, AT(eps), "X", "1e-8", NULL, 1e-30, 1, 0, NULL, "epsilon of AdamW"},
    {"dropout", NUMBER, AT(dropout), "X", "0", NULL, 0, 0.95, 0, NULL,
     "share of numbers that training sets to 0 in the embedding, both branches and the FFN"},
    {"ema", NUMBER, AT(ema), "X", "0", NULL, 0, 0.999999, 0, NULL,
     "factor of a moving average of the weights, which evaluations and samples use; 0: no average"},
    {"clip", NUMBER, AT(clip), "X", "1", NULL, 0, BIG, 0, NULL, "largest gradient norm; 0: no clipping"},
    {"seed", WHOLE, AT(seed), "N", "1", NULL, 0, SEED_MAX, 1, NULL, "seed of the weights, the batches and the sample"},
    {"stateful", FLAG, AT(stateful), NULL, "no",
     .help = "cut the text into one track per window of the batch; each batch continues where the last one ended, with "
             "its states; the end of a document resets them"},
    {"recompute", FLAG, AT(recompute), NULL, "no",
     .help = "keep only the input of each layer, and compute the layer again in backward: this needs a fraction of the "
             "memory and more time; the numbers stay the same"},
    {"fuse", CHOICE, AT(fuse), "NAME", "wkv_ssm", NULL, 0, 0, 0, fused,
     "which operators one call computes in models with RWKV-6 and Mamba-2: wkv_ssm (both recurrences), or conv_ssd "
     "(the convolution and the recurrence of Mamba-2), which needs less memory; the numbers are the same"},

    {"Model files", .kind = SECTION},
    {"save", PATH, AT(save), "FILE", "",
     .help = "write the model and the state of the run to FILE: every --save-every steps, at the end, and when a "
             "signal (Ctrl-C, SIGTERM, SIGHUP) ends the run; a second signal, at least two seconds after the first, "
             "ends the run at once; an older FILE is renamed to FILE.1, or to the first free number, unless --resume "
             "names the same file"},
    {"save-every", WHOLE, AT(save_every), "N", "100", "1000", 0, BIG, 1, NULL,
     "steps between two writes of --save; 0: write only at the end"},
    {"keep-best", FLAG, AT(keep_best), NULL, "no",
     .help = "also write the model with the lowest loss on the held-out curve, to FILE.best if --save names FILE"},
    {"resume", PATH, AT(resume), "FILE", "",
     .help = "continue the run that saved FILE, with its options; a larger --steps makes the run longer"},
    {"init", PATH, AT(init), "FILE", "", .help = "start a new run from FILE's weights"},
    {"eval", PATH, AT(eval), "FILE", "", .help = "no training: print the held-out loss of FILE's model on --data"},
    {"score", PATH, AT(score), "FILE", "",
     .help = "with --eval: instead of the loss, print the share of right answers by length and depth; FILE lists the "
             "questions in the text; see tools/needle.py"},
    {"generate", PATH, AT(generate), "FILE", "",
     .help = "no training: print --sample bytes of text from FILE's model, after --prompt; --batch N prints N samples, "
             "with the seeds --seed, --seed + 1 and so on"},
    {"weights", CHOICE, AT(weights), "KIND", "model", NULL, 0, 0, 0, weight_kinds,
     "of --generate and --bench-generate: model keeps the weights as they are; int8 rounds the large matrices to int8, "
     "and --generate then prints the cost in bits per byte of held-out text"},

    {"Device", .kind = SECTION},
    {"device", CHOICE, AT(device), "NAME", "auto", NULL, 0, 0, 0, devices,
     "auto, cuda or cpu; auto takes CUDA if it works"},
    {"fallback", CHOICE, AT(fallback), "NAME", "none", NULL, 0, 0, 0, fallbacks,
     "if the device fails: none ends the run; cpu continues from the file that was last saved, in a new process on the "
     "CPU"},
    {"nccl", CHOICE, AT(nccl), "USE", "auto", NULL, 0, 0, 0, nccl_uses,
     "how ranks with GPUs add up their gradients: auto uses NCCL if it can be loaded and every rank has its own GPU, "
     "else MPI; on requires NCCL, even for one rank; off uses MPI"},
    {"dtype", CHOICE, AT(dtype), "NAME", "f32", "bf16", 0, 0, 0, dtypes,
     "type of the activations: f32, bf16 or f16; the CPU supports only f32"},
    {"check", FLAG, AT(check), NULL, "no",
     .help = "no training: run one step (forward, backward, AdamW) on the device and on the CPU, and compare every "
             "tensor; exit status 4 if they differ by more than rounding"},
    {"bench", LIST, AT(bench), "T,T,...", "", NULL, 1, 1048576, 1,
     .help = "no training: time inference, forward, forward and backward, and whole steps, with --batch windows (by "
             "default 8) of T tokens; print CSV"},
    {"bench-batch", LIST, AT(bench_batch), "B,B,...", "", NULL, 1, 65536, 1,
     .help = "batch sizes for --bench, instead of --batch"},
    {"bench-runs", WHOLE, AT(bench_runs), "N", "100", NULL, 1, 1000000, 1, NULL,
     "timed runs of each pass of --bench; a tenth as many untimed runs come first"},
    {"bench-steps", WHOLE, AT(bench_steps), "N", "0", NULL, 0, 1000000, 1, NULL,
     "--bench also trains N steps, at the constant learning rate --lr"},
    {"bench-cpu", FLAG, AT(bench_cpu), NULL, "no",
     .help = "--bench also runs inference on the CPU, and reports how much slower it is and the largest difference"},
    {"bench-generate", FLAG, AT(bench_generate), NULL, "no",
     .help = "--bench times only generation, of T tokens in each of B samples at once, and reports the byte floor of a "
             "token, the time of a copy of the bytes that it needs"},
    {"profile", FLAG, AT(profile), NULL, "no",
     .help = "no training: print, as CSV, the time, graph nodes, bytes and share of each part, operator and pass of a "
             "step"},
    {"synchronize", FLAG, AT(synchronize), NULL, "no",
     .help = "wait for the device after every call, so that an error names the call that failed; slow"},
    {"watch", FLAG, AT(watch), NULL, "no",
     .help = "also log the GPU's utilisation, temperature, power and memory, and warn above 80 degrees Celsius"},
    {"plan", LIST, AT(plan), "B,B,...", "", NULL, 1, 65536, 1,
     .help = "no training: print, as CSV, the memory that each model needs on a CUDA device, with B windows of --seq "
             "tokens; no device is needed; options such as --model or --hidden choose one model"},

    {"Report", .kind = SECTION},
    {"eval-every", WHOLE, AT(eval_every), "N", "steps / 6", NULL, 0, BIG, 1, NULL,
     "steps between two evaluations of the held-out loss; 0: evaluate only at the end"},
    {"eval-tokens", WHOLE, AT(eval_tokens), "N", "4096", "0", 0, BIG, 1, NULL,
     "number of held-out tokens for each point of the held-out curve; 0: all"},
    {"final-eval-tokens", WHOLE, AT(final_eval_tokens), "N", "0", NULL, 0, 1e15, 1, NULL,
     "number of held-out tokens for the final loss and for --eval; 0: all"},
    {"log-every", WHOLE, AT(log_every), "N", "steps / 20", NULL, 1, BIG, 1, NULL,
     "steps between two lines of progress, if the output is not a terminal"},
    {"csv", PATH, AT(csv), "FILE", "",
     .help = "write a row per step to FILE; an older FILE is renamed to FILE.1, or to the first free number; --log is "
             "the same"},
    {"sample", WHOLE, AT(sample), "N", "300", NULL, 0, 1000000, 1, NULL, "bytes of text to generate at the end"},
    {"sample-every", WHOLE, AT(sample_every), "N", "0", NULL, 0, BIG, 1, NULL,
     "also generate text every N steps; 0: no"},
    {"prompt", STRING, AT(prompt), "TEXT", "", .help = "start of the sample; empty: the first byte of the text"},
    {"temperature", NUMBER, AT(temperature), "X", "0.8", NULL, 0, 100, 0, NULL,
     "temperature of the sample; 0: always take the likeliest byte"},
    {"top-k", WHOLE, AT(top_k), "N", "0", NULL, 0, HY_VOCAB_MAX, 1, NULL,
     "draw each byte of the sample from the N likeliest; 0: from all"},
    {"top-p", NUMBER, AT(top_p), "X", "1", NULL, 1e-6, 1, 0, NULL,
     "draw from the smallest set of likeliest bytes that together have at least this probability; 1: from all"},
    {"repetition-penalty", NUMBER, AT(repetition_penalty), "X", "1", NULL, 0.01, 100, 0, NULL,
     "make tokens that already occurred less likely: divide a positive logit by X, multiply a negative one; 1: off"},
    {"stop", STRING, AT(stop), "TEXT", "",
     .help = "end a sample after this text; with --tokens uint16 or uint32 and no --table: after these tokens"},
    {"prompt-file", PATH, AT(prompt_file), "FILE", "",
     .help = "with --generate: read the prompt from FILE, without escapes; -: from standard input"},
    {"quiet", FLAG, AT(quiet), NULL, "no", .help = "print only the gates that fail"},
    {"stall-timeout", WHOLE, AT(stall_timeout), "S", "0", NULL, 0, 1e6, 1, NULL,
     "end the run, with exit status 1, if it makes no progress for S seconds: no step, no batch of an evaluation, no "
     "file; 0: never"},
    {"gates-strict", FLAG, AT(gates_strict), NULL, "no",
     .help = "end the run at the first gate that fails, with exit status 3"},
    {"list-models", FLAG, AT(list_models), NULL, "no", .help = "print the models and their sizes"},
    {"version", FLAG, AT(version), NULL, "no", .help = "print the version"},
    {"help", FLAG, AT(help), NULL, "no", .help = "print the common options"},
    {"help-all", FLAG, AT(help_all), NULL, "no", .help = "print all options"},
};
/* The options that --help lists, in few words, so that the list fits one screen. */
static const struct {
    const char *name, *help;
} common[] = {{"data", "a text, files A,B or a folder; default: the fables"},
              {"val", "hold out this text instead of the end of --data"},
              {"model", "see --list-models"},
              {"hidden", "channels, a multiple of 16"},
              {"layers", "layers"},
              {"steps", "optimiser steps"},
              {"batch", "windows per step, or samples to generate"},
              {"seq", "tokens per window"},
              {"lr", "highest learning rate"},
              {"seed", "seed of the weights, the batches and the sample"},
              {"save", "write the model and the run to FILE"},
              {"resume", "continue the run that saved FILE"},
              {"eval", "no training: held-out loss of FILE's model"},
              {"generate", "no training: generate text from FILE's model"},
              {"prompt", "start of the text"},
              {"sample", "bytes of text at the end"},
              {"temperature", "temperature of the text; 0: the likeliest byte"},
              {"device", "auto, cuda or cpu"},
              {"csv", "write a row per step to FILE"},
              {"list-models", "the models and their sizes"},
              {"help-all", "all options"}};
enum { ROWS = sizeof rows / sizeof rows[0] };
enum { COST_TOKENS = 1 << 16 };    /* most held-out tokens on which --generate measures the cost of int8 weights */
enum { BY_USER = 1, BY_FILE = 2 }; /* source of an option: the user (command line, config file), or a model file */
_Static_assert(sizeof rows / sizeof rows[0] <= HY_OPTIONS_MAX, "hy_options.given is too short");

/* ---- the nearest word ----------------------------------------------------------------------- */

static int least(int a, int b) { return a < b ? a : b; }

static int same_letter(char a, char b) { return tolower((unsigned char)a) == tolower((unsigned char)b); }

/* Returns the smallest number of insertions, deletions, replacements and swaps of neighbours that turn a into b.
 * Ignores case. */
static int edit_distance(const char *a, const char *b) {
    enum { LONGEST = 64 };
    int d[3][LONGEST + 1], n = least((int)strlen(a), LONGEST), m = least((int)strlen(b), LONGEST);
    for (int j = 0; j <= m; j++) d[0][j] = j;
    for (int i = 1; i <= n; i++) {
        int *here = d[i % 3], *above = d[(i + 2) % 3], *above2 = d[(i + 1) % 3];
        here[0] = i;
        for (int j = 1; j <= m; j++) {
            here[j] = least(least(above[j], here[j - 1]) + 1, above[j - 1] + !same_letter(a[i - 1], b[j - 1]));
            if (i > 1 && j > 1 && same_letter(a[i - 1], b[j - 2]) && same_letter(a[i - 2], b[j - 1]))
                here[j] = least(here[j], above2[j - 2] + 1);
        }
    }
    return d[n % 3][m];
}

/* Returns the only one of `words` that begins with `word`.  Returns NULL if there is no such word, if there are
 * several, or if `word` has less than three letters. */
static const char *only_beginning(const char *word, const char *const *words, int count) {
    const char *found = NULL;
    size_t length = strlen(word);
    for (int i = 0; i < count && length >= 3; i++) {
        if (strncmp(word, words[i], length)) continue;
        if (found) return NULL;
        found = words[i];
    }
    return found;
}

const char *hy_nearest(const char *word, const char *const *words, int count) {
    const char *best = NULL;
    int best_distance = 0;
    for (int i = 0; i < count; i++) {
        int length = (int)strlen(strlen(word) < strlen(words[i]) ? words[i] : word);
        int distance = edit_distance(word, words[i]);
        if (distance > length / 4) continue;
        if (!best || distance < best_distance) best = words[i], best_distance = distance;
    }
    return best ? best : only_beginning(word, words, count);
}

typedef struct hint {
    char text[96];
} hint;

/* Makes the text "; the nearest is WORD", or "" if no word is similar. */
static hint hint_at(const char *word, const char *const *words, int count) {
    const char *nearest = hy_nearest(word, words, count);
    hint out = {""};
    if (nearest) snprintf(out.text, sizeof out.text, "; the nearest is %s", nearest);
    return out;
}

/* ---- one value ------------------------------------------------------------------------------ */

static int hex_digit(char c) {
    const char *digits = "0123456789abcdef", *at = strchr(digits, c >= 'A' && c <= 'F' ? c + 32 : c);
    return c && at ? (int)(at - digits) : -1;
}

/* Copies a text and replaces each escape by its byte.  The text cannot contain NUL. */
static gt_status unescape(char *to, const char *from, const row *r, const char *where) {
    static const char code[] = "ntfr\\", byte[] = "\n\t\f\r\\";
    while (*from) {
        const char *known = from[0] == '\\' && from[1] ? strchr(code, from[1]) : NULL;
        if (known) {
            *to++ = byte[known - code];
            from += 2;
        } else if (from[0] == '\\' && from[1] == 'x' && hex_digit(from[2]) >= 0 && hex_digit(from[3]) >= 0 &&
                   (from[2] != '0' || from[3] != '0')) {
            *to++ = (char)(hex_digit(from[2]) * 16 + hex_digit(from[3]));
            from += 4;
        } else if (*from == '\\') {
            return hy_fail(GT_ERROR_VALUE,
                           "%s%s: unknown escape '%.*s'; use \\n \\t \\f \\r, \\xNN (a byte from 01 to ff), or \\\\ "
                           "for a backslash",
                           where, r->name, from[1] == 'x' ? 4 : 2, from);
        } else {
            *to++ = *from++;
        }
    }
    *to = 0;
    return GT_OK;
}

/* Returns the number at the start of `value`, limited to the range of the option; NAN if there is no number.  *exact
 * is 1 if `value` as a whole is a valid number. */
static double nearest_number(const row *r, const char *value, int *exact) {
    char *end;
    double given = strtod(value, &end), x = given;
    *exact = 0;
    if (end == value || isnan(given)) return NAN;
    if (isfinite(x) && r->kind == WHOLE) x = r->multiple * round(x / r->multiple);
    x = x < r->min ? r->min : x > r->max ? r->max : x;
    *exact = !*end && x == given;
    return x;
}

/* Sets a number option.  `where` is the prefix of the error message: "" or "file:line: ". */
static gt_status set_number(hy_options *o, const row *r, const char *value, const char *where) {
    int exact;
    if (r->choices && !strcmp(value, r->choices[0])) {
        *(int64_t *)((char *)o + r->offset) = HY_AUTO;
        return GT_OK;
    }
    char advice[96], steps[32] = "";
    if (r->multiple > 1) snprintf(steps, sizeof steps, " in steps of %g", r->multiple);
    double x = nearest_number(r, value, &exact);
    if (!isnan(x))
        snprintf(advice, sizeof advice, "the nearest is %.16g", x);
    else
        snprintf(advice, sizeof advice, "the default is %s%s%s", r->cpu, r->cuda ? ", on CUDA " : "",
                 r->cuda ? r->cuda : "");
    if (!exact)
        return hy_fail(GT_ERROR_VALUE, "%s%s: '%s' is not a %snumber from %.16g to %.16g%s%s%s; %s", where, r->name,
                       value, r->kind == WHOLE ? "whole " : "", r->min, r->max, steps, r->choices ? " or " : "",
                       r->choices ? r->choices[0] : "", advice);
    if (r->kind == WHOLE)
        *(int64_t *)((char *)o + r->offset) = (int64_t)x;
    else
        *(double *)((char *)o + r->offset) = x;
    return GT_OK;
}

/* Reads a list of numbers that consist of digits only, such as 256,512. */
static gt_status set_list(hy_lengths *list, const row *r, const char *value, const char *where) {
    const char *at = value;
    list->count = 0;
    while (isdigit((unsigned char)*at) && list->count < HY_LENGTHS_MAX) {
        char *end;
        double x = strtod(at, &end);
        if (strspn(at, "0123456789") != (size_t)(end - at) || x < r->min || x > r->max) break;
        list->of[list->count++] = (int64_t)x;
        if (!*end) return GT_OK;
        if (*end != ',') break;
        at = end + 1;
    }
    return hy_fail(GT_ERROR_VALUE,
                   "%s%s: '%s' is not a list of at most %d whole numbers from %.16g to %.16g such "
                   "as 256,512",
                   where, r->name, value, HY_LENGTHS_MAX, r->min, r->max);
}

/* Finds `value` in a list of words that ends with NULL, and stores its index in *index. */
static gt_status find_word(const char *const *words, const char *value, const row *r, const char *where, int *index) {
    char list[256] = "";
    int count = 0;
    for (; words[count]; count++) {
        if (!strcmp(words[count], value)) {
            *index = count;
            return GT_OK;
        }
        snprintf(list + strlen(list), sizeof list - strlen(list), " %s", words[count]);
    }
    return hy_fail(GT_ERROR_VALUE, "%s%s: '%s' is none of:%s%s", where, r->name, value, list,
                   hint_at(value, words, count).text);
}

static gt_status check_model(const char *value, const row *r, const char *where) {
    enum { MODELS = 32 };
    const char *names[MODELS + 1] = {NULL};
    int count, index;
    const hy_config *list = hy_model_list(&count);
    for (int i = 0; i < count && i < MODELS; i++) names[i] = list[i].name;
    return find_word(names, value, r, where, &index);
}

static gt_status set_value(hy_options *o, const row *r, const char *value, const char *where) {
    void *field = (char *)o + r->offset;
    gt_status status = GT_OK;
    int index = 0;
    if (r->kind == WHOLE || r->kind == NUMBER) {
        status = set_number(o, r, value, where);
    } else if (r->kind == FLAG) {
        status = find_word(answers, value, r, where, &index);
        *(int *)field = index % 2 == 0;
    } else if (strlen(value) >= HY_TEXT_MAX) {
        status = hy_fail(GT_ERROR_VALUE, "%s%s: the value is longer than %d bytes", where, r->name, HY_TEXT_MAX - 1);
    } else if (r->kind == STRING) {
        status = unescape(field, value, r, where);
    } else if (r->kind == LIST) {
        status = set_list(field, r, value, where);
    } else {
        if (r->kind == CHOICE) status = find_word(r->choices, value, r, where, &index);
        if (r->kind == MODEL) status = check_model(value, r, where);
        memcpy(field, value, strlen(value) + 1);
    }
    o->given[r - rows] = BY_USER;
    return status;
}

/* ---- config file and command line ----------------------------------------------------------- */

/* Options that users may know by another name. */
static const struct alias {
    const char *name, *option;
} aliases[] = {{"log", "csv"}, {"max-steps", "steps"}, {"batch-size", "batch"}, {"seq-len", "seq"}};

/* Finds the row of the option `key`; the characters - and _ count as equal.  If there is none, returns NULL and sets
 * the error. */
static const row *find_row(const char *key, const char *where) {
    const char *names[ROWS];
    char name[64];
    int count = 0;
    snprintf(name, sizeof name, "%s", key);
    for (char *p = name; *p; p++)
        if (*p == '_') *p = '-';
    for (size_t i = 0; i < sizeof aliases / sizeof aliases[0]; i++)
        if (!strcmp(name, aliases[i].name)) snprintf(name, sizeof name, "%s", aliases[i].option);
    for (int i = 0; i < ROWS; i++) {
        if (rows[i].kind == SECTION) continue;
        if (!strcmp(rows[i].name, name)) return rows + i;
        names[count++] = rows[i].name;
    }
    hy_fail(GT_ERROR_VALUE, "%sunknown option '%s'%s (--help-all lists all)", where, key,
            hint_at(name, names, count).text);
    return NULL;
}

/* Removes white space at both ends. */
static char *trim(char *text) {
    size_t n;
    while (*text && strchr(" \t\r\n", *text)) text++;
    for (n = strlen(text); n && strchr(" \t\r\n", text[n - 1]); n--) text[n - 1] = 0;
    return text;
}

/* Removes a comment, which begins with # at the start of the text or after white space. */
static void strip_comment(char *text) {
    for (char *p = text; *p; p++)
        if (*p == '#' && (p == text || p[-1] == ' ' || p[-1] == '\t')) *p = 0;
}

/* Reads the value after a colon, and removes its quotes and any comment.  Quotes have a meaning only at the start of
 * a value. */
static gt_status read_value(char *text, const char *name, const char *where, char **value) {
    text += strspn(text, " \t\r\n");
    *value = text + 1;
    char *end = *text == '"' || *text == '\'' ? strchr(text + 1, *text) : NULL;
    if (*text != '"' && *text != '\'') {
        strip_comment(text);
        *value = trim(text);
        return GT_OK;
    }
    if (!end) return hy_fail(GT_ERROR_VALUE, "%s%s: the quote %c is not closed", where, name, *text);
    *end++ = 0;
    strip_comment(end);
    end = trim(end);
    return *end ? hy_fail(GT_ERROR_VALUE, "%s%s: '%s' follows the closing quote", where, name, end) : GT_OK;
}

static gt_status read_line(hy_options *o, char *line, const char *where) {
    line = trim(line);
    if (!*line || *line == '#') return GT_OK;
    char *colon = strchr(line, ':');
    if (!colon) return hy_fail(GT_ERROR_VALUE, "%s'%s' is not of the form 'key: value'", where, line);
    *colon = 0;
    const row *r = find_row(trim(line), where);
    if (!r) return GT_ERROR_VALUE;
    if (o->given[r - rows]) return hy_fail(GT_ERROR_VALUE, "%s%s: is given twice in this file", where, r->name);
    char *value;
    gt_status status = read_value(colon + 1, r->name, where, &value);
    return status == GT_OK ? set_value(o, r, value, where) : status;
}

/* Reads a line including its line end.  Returns its length, at most size - 1; 0 at the end of the file. */
static size_t next_line(FILE *file, char *line, size_t size) {
    size_t length = 0;
    for (int c; length + 1 < size && (c = getc(file)) != EOF;) {
        line[length++] = (char)c;
        if (c == '\n') break;
    }
    line[length] = 0;
    return length;
}

/* Fails if the line cannot be part of a plain text file in UTF-8. */
static gt_status check_line(const char *line, size_t length, size_t size, int number, const char *where) {
    static const char save[] = "save it as UTF-8 without a byte-order mark";
    if (number == 1 && (!strncmp(line, "\xff\xfe", 2) || !strncmp(line, "\xfe\xff", 2)))
        return hy_fail(GT_ERROR_VALUE, "%sthe file is UTF-16; %s", where, save);
    if (number == 1 && !strncmp(line, "\xef\xbb\xbf", 3))
        return hy_fail(GT_ERROR_VALUE, "%sthe file begins with a byte-order mark; %s", where, save);
    if (memchr(line, 0, length))
        return hy_fail(GT_ERROR_VALUE, "%sthe line has a NUL byte; a config file is plain text, in UTF-8", where);
    if (length + 1 == size) return hy_fail(GT_ERROR_VALUE, "%sthe line is longer than %zu bytes", where, size - 2);
    return GT_OK;
}

static gt_status read_file(hy_options *o, const char *path) {
    char line[2 * HY_TEXT_MAX], where[256];
    FILE *file = fopen(path, "r");
    gt_status status = GT_OK;
    size_t length;
    if (!file) return hy_fail(GT_ERROR_VALUE, "config file %s: %s", path, strerror(errno));
    for (int n = 1; status == GT_OK && (length = next_line(file, line, sizeof line)) > 0; n++) {
        snprintf(where, sizeof where, "%.200s:%d: ", path, n);
        status = check_line(line, length, sizeof line, n, where);
        if (status == GT_OK) status = read_line(o, line, where);
    }
    if (status == GT_OK && ferror(file)) status = hy_fail(GT_ERROR_VALUE, "config file %s: %s", path, strerror(errno));
    fclose(file);
    return status;
}

/* Sets the option of argument **at, which begins with two dashes, and reads the next argument if that is its value.
 * Moves *at to the last argument used. */
static gt_status read_argument(hy_options *o, char *const **at) {
    const char *name = **at + 2, *equals = strchr(name, '=');
    char key[64];
    snprintf(key, sizeof key, "%.*s", (int)(equals ? equals - name : (long)strlen(name)), name);
    const row *r = find_row(key, "");
    if (!r) return GT_ERROR_VALUE;
    if (equals) return set_value(o, r, equals + 1, "");
    if (r->kind == FLAG) return set_value(o, r, "yes", "");
    if (!(*at)[1]) return hy_fail(GT_ERROR_VALUE, "%s: the value is missing (--%s %s)", key, r->name, r->argument);
    const char *next = (*at)[1];
    if (!strncmp(next, "--", 2) && next[2]) /* this is probably an option, not a value that begins with -- */
        return hy_fail(GT_ERROR_VALUE, "--%s: the value is missing; if it is '%s', write --%s=%s", key, next, key,
                       next);
    return set_value(o, r, *++*at, "");
}

/* Sets the options that the command line gives, and stores the name of the config file in *file. */
static gt_status read_arguments(hy_options *o, char *const *argv, const char **file) {
    gt_status status = GT_OK;
    *file = NULL;
    for (char *const *at = argv; *at && status == GT_OK; at++) {
        const char *path = !strncmp(*at, "--config=", 9) ? *at + 9 : *at;
        int is_named = path != *at || !strcmp(*at, "--config");
        if (path == *at && is_named) path = at[1] ? *++at : "";
        if (is_named && (!*path || !strncmp(path, "--", 2)))
            status = hy_fail(GT_ERROR_VALUE, "--config: the value is missing (--config FILE)");
        else if (!is_named && !strncmp(*at, "--", 2) && (*at)[2])
            status = read_argument(o, &at);
        else if (!is_named && !strcmp(*at, "-h"))
            status = set_value(o, find_row("help", ""), "yes", "");
        else if (!is_named && **at == '-')
            status = hy_fail(GT_ERROR_VALUE,
                             "unknown option '%s'; options begin with two dashes "
                             "(--help-all lists all)",
                             *at);
        else if (*file)
            status = hy_fail(GT_ERROR_VALUE, "'%s' and '%s': only one config file is read", *file, path);
        else
            *file = path;
    }
    return status;
}

gt_status hy_options_parse(hy_options *o, int argc, char *const *argv) {
    hy_options scratch = {.help = 0}; /* first pass over the command line: finds the config file ... */
    const char *file = NULL;
    gt_status status = GT_OK;
    memset(o, 0, sizeof *o);
    if (argc > 1) status = read_arguments(&scratch, argv + 1, &file);
    if (status == GT_OK && file) status = read_file(o, file);
    if (status == GT_OK && argc > 1) /* ... second pass: overrides the config file */
        status = read_arguments(o, argv + 1, &file);
    o->config = file;
    return status;
}

static int given(const hy_options *o, size_t offset) {
    for (int i = 0; i < ROWS; i++)
        if (rows[i].kind != SECTION && rows[i].offset == offset) return o->given[i];
    return 0;
}

gt_status hy_options_default(hy_options *o, int cuda) {
    for (int i = 0; i < ROWS; i++) {
        const char *value = cuda && rows[i].cuda ? rows[i].cuda : rows[i].cpu;
        if (o->given[i] || rows[i].kind == SECTION || rows[i].kind == LIST || strchr(value, '/')) continue;
        gt_status status = set_value(o, rows + i, value, "default of ");
        if (status != GT_OK) return status;
        o->given[i] = 0;
    }
    if (o->bench.count && !given(o, AT(batch))) o->batch = 8;
    if (*o->generate && !hy_options_given(o, "batch")) o->batch = 1; /* the batch in the model file is for training */
    if (*o->generate && !hy_options_given(o, "final-eval-tokens")) o->final_eval_tokens = COST_TOKENS;
    if (!given(o, AT(min_lr))) o->min_lr = o->lr / 10;
    if (!given(o, AT(warmup))) o->warmup = o->steps / 20;
    if (!given(o, AT(decay_steps))) o->decay_steps = o->steps < 5 ? 1 : o->steps / 5;
    if (!given(o, AT(eval_every))) o->eval_every = o->steps / 6;
    if (!given(o, AT(log_every))) o->log_every = o->steps < 20 ? 1 : o->steps / 20;
    if (o->min_lr > o->lr)
        return hy_fail(GT_ERROR_VALUE, "min-lr: %g is above lr; give at most lr = %g", o->min_lr, o->lr);
    if (o->warmup > o->steps)
        return hy_fail(GT_ERROR_VALUE,
                       "warmup: %lld steps are longer than the run, which has %lld%s; give at most "
                       "%lld, or more --steps",
                       (long long)o->warmup, (long long)o->steps, given(o, AT(steps)) ? "" : " (the default)",
                       (long long)o->steps);
    const int64_t room = o->steps - o->warmup;
    if (strcmp(o->schedule, "wsd") || !given(o, AT(decay_steps)) || o->decay_steps <= room) return GT_OK;
    if (!room)
        return hy_fail(
            GT_ERROR_VALUE,
            "decay-steps: %lld steps do not fit after the warm-up, which takes all %lld steps; give a smaller --warmup",
            (long long)o->decay_steps, (long long)o->steps);
    return hy_fail(GT_ERROR_VALUE, "decay-steps: %lld steps do not fit after the warm-up; give at most %lld",
                   (long long)o->decay_steps, (long long)room);
}

/* ---- options in a model file ---------------------------------------------------------------- */

/* The options that a model file stores.  Options that change the result come first.  `data` is not among these: the
 * text is compared by its bytes, not by its name. */
static const char *const kept[] = {
    /* the model's shape */
    "model", "hidden", "layers", "heads", "d-state", "expand", "d-conv", "mamba-head", "ffn", "untied", "tokens",
    "end-symbol",
    /* other options that change the result */
    "vocab", "end-token", "split", "held-out", "shuffle", "schedule", "decay-steps", "beta1", "beta2", "eps", "dropout",
    "ema", "batch", "seq", "steps", "lr", "min-lr", "warmup", "clip", "seed", "weight-decay", "stateful", "separator",
    /* options that do not change the result */
    "dtype", "data", "eval-every", "eval-tokens", "log-every", "sample", "sample-every", "prompt", "temperature",
    "top-k", "gates-strict", "save-every", "recompute", "fuse", "final-eval-tokens", "val", "table", "micro-batch",
    "keep-best", NULL};
enum { OF_MODEL = 12, OF_RESULT = 35 };

const char *hy_options_name(int i) {
    for (int k = 0; k < ROWS; k++)
        if (rows[k].kind != SECTION && rows[k].kind != LIST && i-- == 0) return rows[k].name;
    return NULL;
}

const char *hy_options_kept(int i) { return kept[i]; }

gt_status hy_options_config(const hy_options *o, hy_config *c) {
    int count;
    const hy_config *list = hy_model_list(&count);
    _Static_assert((int)HY_AUTO == (int)HY_NO_FFN, "--ffn none has the value of a model without FFN");
    for (int i = 0; i < count; i++)
        if (!strcmp(list[i].name, o->model)) *c = list[i];
    if (o->hidden && o->hidden != c->hidden) c->hidden = (int)o->hidden, c->heads = 0;
    if (o->layers) c->layers = (int)o->layers;
    if (o->heads) c->heads = (int)o->heads;
    if (o->head_size && o->heads && o->heads * o->head_size != c->hidden)
        return hy_fail(GT_ERROR_VALUE, "head-size: %lld times heads = %lld is not hidden = %d; leave one of them out",
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
    c->untied = o->untied;
    return GT_OK;
}

int hy_options_of_model(const char *name) {
    for (int i = 0; i < OF_MODEL; i++)
        if (!strcmp(kept[i], name)) return 1;
    return 0;
}

/* The options that each mode other than training reads, with spaces around each.  Training reads all options except
 * those that only another mode reads. */
#define SIZES " hidden layers heads head-size d-state expand d-conv mamba-head ffn untied "
static const struct {
    const char *mode, *reads;
} uses[] = {
    {"eval", " data val held-out shuffle table separator end-symbol tokens split model batch seq device dtype "
             "synchronize eval final-eval-tokens score" SIZES},
    {"generate",
     " table separator end-symbol tokens model batch seq seed device dtype synchronize generate sample prompt "
     "temperature top-k top-p repetition-penalty stop prompt-file weights" SIZES},
    {"weights int8", " data val held-out shuffle split final-eval-tokens "}, /* --generate reads these, too */
    {"check", " data separator end-symbol tokens vocab split model batch seq seed stateful recompute fuse device dtype "
              "synchronize check" SIZES},
    {"bench",
     " data separator end-symbol tokens vocab split model batch lr weight-decay clip seed stateful recompute "
     "fuse device dtype synchronize bench bench-batch bench-runs bench-steps bench-cpu bench-generate weights" SIZES},
    {"list-models", " data separator end-symbol tokens vocab list-models "},
    {"plan", " data separator end-symbol tokens vocab model seq stateful recompute fuse device nccl dtype plan" SIZES},
    {"profile", " data separator end-symbol tokens vocab end-token split model batch seq seed stateful recompute fuse "
                "device dtype synchronize profile" SIZES},
};

static int reads(const char *mode, const char *option) {
    char word[64];
    snprintf(word, sizeof word, " %s ", option);
    for (size_t i = 0; i < sizeof uses / sizeof uses[0]; i++)
        if (!strcmp(uses[i].mode, mode)) return strstr(uses[i].reads, word) != NULL;
    return strncmp(option, "bench-", 6) != 0 && strcmp(option, "prompt-file") != 0 && strcmp(option, "score") != 0 &&
           strcmp(option, "weights") != 0;
}

int hy_options_int8(const hy_options *o) { return !strcmp(o->weights, "int8"); }

gt_status hy_options_fit(const hy_options *o, const char *mode) {
    for (int i = 0; i < ROWS; i++) {
        if (!o->given[i] || reads(mode, rows[i].name)) continue;
        const int is_of_bench = !strncmp(rows[i].name, "bench-", 6), is_of_eval = !strcmp(rows[i].name, "score");
        const int is_of_int8 = !strcmp(mode, "generate") && reads("weights int8", rows[i].name);
        if (is_of_int8 && hy_options_int8(o)) continue;
        if (is_of_int8)
            return hy_fail(GT_ERROR_VALUE, "%s: has no effect with --generate without --weights int8", rows[i].name);
        if (!strcmp(mode, "train"))
            return hy_fail(GT_ERROR_VALUE, "%s: has no effect without --%s", rows[i].name,
                           is_of_bench  ? "bench"
                           : is_of_eval ? "eval"
                                        : "generate");
        return hy_fail(GT_ERROR_VALUE, "%s: has no effect with --%s; %s", rows[i].name, mode,
                       is_of_bench ? "use it with --bench" : "leave it out");
    }
    if (o->bench.count && o->bench_batch.count && hy_options_given(o, "batch"))
        return hy_fail(GT_ERROR_VALUE, "batch: has no effect with --bench-batch; leave it out");
    if (o->bench.count && !o->bench_generate && hy_options_given(o, "weights"))
        return hy_fail(GT_ERROR_VALUE,
                       "weights: has no effect with --bench unless --bench-generate is given; leave it out");
    for (int i = 0; o->bench.count && !o->bench_steps && i < 3; i++) {
        static const char *const of_steps[] = {"lr", "weight-decay", "clip"};
        if (hy_options_given(o, of_steps[i]))
            return hy_fail(GT_ERROR_VALUE, "%s: has no effect with --bench unless --bench-steps is given; leave it out",
                           of_steps[i]);
    }
    if (!*o->save && hy_options_given(o, "save-every"))
        return hy_fail(GT_ERROR_VALUE, "save-every: has no effect without --save; leave it out");
    if (o->plan.count && !strcmp(o->device, "cpu"))
        return hy_fail(GT_ERROR_VALUE,
                       "device: cpu has no effect with --plan, which plans for a CUDA device; leave it out");
    return GT_OK;
}

/* Fails if the user gave one of the options in `names`, which ends with "". */
static gt_status refuse(const hy_options *o, const char *const *names, const char *why) {
    for (; **names; names++)
        if (hy_options_given(o, *names))
            return hy_fail(GT_ERROR_VALUE, "%s: has no effect with %s; leave it out", *names, why);
    return GT_OK;
}

static int is_word_of(const char *word, const char *const *words) {
    while (**words && strcmp(word, *words)) words++;
    return **words != 0;
}

/* Fails if more samples decode at once than int8 weights serve. */
static gt_status check_samples(const hy_options *o) {
    const int has_list = o->bench.count && o->bench_batch.count;
    for (int i = 0; i < (has_list ? o->bench_batch.count : 1) && hy_options_int8(o); i++) {
        const int64_t samples = has_list ? o->bench_batch.of[i] : o->batch;
        if (samples > HY_INT8_SAMPLES)
            return hy_fail(GT_ERROR_VALUE,
                           "%s: %lld samples at once are too many for --weights int8; the nearest is %d",
                           has_list ? "bench-batch" : "batch", (long long)samples, HY_INT8_SAMPLES);
    }
    return GT_OK;
}

gt_status hy_options_fit_together(const hy_options *o, const char *mode) {
    static const char *const training[] = {"train", "resume", "init", ""}, *const generating[] = {"generate", ""};
    static const char *const of_samples[] = {"prompt", "temperature",  "top-k", "top-p", "repetition-penalty",
                                             "stop",   "sample-every", ""};
    static const char *const of_drawing[] = {"temperature", "top-k", "top-p", "repetition-penalty", "stop", "seed", ""};
    static const char *const of_top[] = {"top-k", "top-p", ""}, *const of_evaluations[] = {"eval-tokens", ""};
    static const char *const of_ends[] = {"min-lr", "decay-steps", ""};
    static const char *const of_tails[] = {"held-out", "split", ""};
    static const char *const of_passes[] = {"stateful", "recompute", "fuse", "bench-steps", "bench-cpu", ""};
    static const char *const of_texts[] = {"separator", ""}, *const of_numbers[] = {"end-token", ""};
    const int trains = is_word_of(mode, training), generates = is_word_of(mode, generating);
    const int reads_documents = trains || (o->profile && o->stateful);
    char why[96];
    gt_status status = GT_OK;
    if ((trains || generates) && !o->sample)
        status = refuse(o, trains ? of_samples : of_drawing, "--sample 0");
    else if ((trains || generates) && o->temperature == 0)
        status = refuse(o, of_top, "--temperature 0");
    if (status == GT_OK && *o->prompt_file && hy_options_given(o, "prompt"))
        status = hy_fail(GT_ERROR_VALUE, "prompt: has no effect with --prompt-file; leave it out");
    if (status == GT_OK && trains && !o->eval_every && given(o, AT(eval_every)))
        status = refuse(o, of_evaluations, "--eval-every 0");
    if (status == GT_OK && trains && !strcmp(o->schedule, "constant"))
        status = refuse(o, of_ends, "--schedule constant");
    if (status == GT_OK && trains && strcmp(o->schedule, "wsd") && hy_options_given(o, "decay-steps"))
        status = hy_fail(GT_ERROR_VALUE, "decay-steps: has no effect without --schedule wsd; leave it out");
    if (status == GT_OK && trains && !strcmp(o->fallback, "cpu") && !*o->save)
        status = hy_fail(GT_ERROR_VALUE, "fallback: cpu has no effect without --save; leave it out");
    if (status == GT_OK && trains && !strcmp(o->fallback, "cpu") && !strcmp(o->device, "cpu"))
        status = hy_fail(GT_ERROR_VALUE, "fallback: cpu has no effect with --device cpu; leave it out");
    if (status == GT_OK && !strcmp(o->nccl, "on") && !strcmp(o->device, "cpu"))
        status = hy_fail(GT_ERROR_VALUE, "nccl: on has no effect with --device cpu; leave it out");
    if (status == GT_OK && trains && o->watch && !strcmp(o->device, "cpu"))
        status = hy_fail(GT_ERROR_VALUE, "watch: has no effect with --device cpu; leave it out");
    if (status == GT_OK && trains && o->keep_best && !*o->save && hy_options_given(o, "keep-best"))
        status = hy_fail(GT_ERROR_VALUE, "keep-best: has no effect without --save; leave it out");
    if (status == GT_OK && trains && o->keep_best && !o->eval_every && hy_options_given(o, "keep-best"))
        status = hy_fail(GT_ERROR_VALUE, "keep-best: has no effect with --eval-every 0; leave it out");
    if (status == GT_OK && *o->val) status = refuse(o, of_tails, "--val");
    if (status == GT_OK && o->bench_generate) status = refuse(o, of_passes, "--bench-generate");
    if (status == GT_OK) status = check_samples(o);
    if (status != GT_OK || reads_documents) return status;
    snprintf(why, sizeof why, "--%s unless --end-symbol%s is given", mode, o->profile ? " or --stateful" : "");
    if (!o->end_symbol) status = refuse(o, of_texts, why);
    if (status == GT_OK) status = refuse(o, of_numbers, "--profile unless --stateful is given");
    return status;
}

int hy_options_given(const hy_options *o, const char *name) { return o->given[find_row(name, "") - rows] == BY_USER; }

/* Prints x with the smallest number of digits that gives the same number when it is read. */
static void print_number(char text[HY_TEXT_MAX], double x) {
    for (int digits = 6; digits <= 17; digits++) {
        snprintf(text, HY_TEXT_MAX, "%.*g", digits, x);
        if (strtod(text, NULL) == x) return;
    }
}

void hy_options_text(const hy_options *o, const char *name, char text[HY_TEXT_MAX]) {
    const row *r = find_row(name, "");
    const void *field = (const char *)o + r->offset;
    if (r->kind == FLAG)
        snprintf(text, HY_TEXT_MAX, "%s", *(const int *)field ? "yes" : "no");
    else if (r->kind == WHOLE && r->choices && *(const int64_t *)field == HY_AUTO)
        snprintf(text, HY_TEXT_MAX, "%s", r->choices[0]);
    else if (r->kind == WHOLE)
        snprintf(text, HY_TEXT_MAX, "%lld", (long long)*(const int64_t *)field);
    else if (r->kind == NUMBER)
        print_number(text, *(const double *)field);
    else
        snprintf(text, HY_TEXT_MAX, "%s", (const char *)field);
}

/* Sets an option to a text from a model file.  Unlike on the command line, a STRING has no escapes there. */
static gt_status set_kept(hy_options *o, const row *r, const char *text, const char *file) {
    char where[256];
    snprintf(where, sizeof where, "%.200s: damaged: option ", file);
    if (r->kind != STRING) {
        gt_status status = set_value(o, r, text, where);
        o->given[r - rows] = BY_FILE;
        return status;
    }
    snprintf((char *)o + r->offset, HY_TEXT_MAX, "%s", text);
    o->given[r - rows] = BY_FILE;
    return GT_OK;
}

/* Returns whether an option has no value yet.  A model's size of 0 counts as no value, because it means the size of
 * the named model. */
static int is_open(const hy_options *o, const row *r) {
    if (!o->given[r - rows]) return 1;
    return r->kind == WHOLE && hy_options_of_model(r->name) && *(const int64_t *)((const char *)o + r->offset) == 0;
}

gt_status hy_options_take(hy_options *o, const char *name, const char *text, const char *file, int strict) {
    const row *r = find_row(name, "");
    hy_options theirs = {.help = 0};
    char own[HY_TEXT_MAX], other[HY_TEXT_MAX];
    int of_result = 0;
    gt_status status = set_kept(&theirs, r, text, file);
    if (status != GT_OK) return status;
    if (is_open(o, r)) return set_kept(o, r, text, file);
    for (int i = 0; i < OF_RESULT; i++) of_result |= !strcmp(kept[i], name);
    hy_options_text(o, name, own);
    hy_options_text(&theirs, name, other);
    if (!strict || !of_result || !strcmp(own, other)) return GT_OK;
    if (r->offset == AT(steps) && o->steps > theirs.steps) return GT_OK;
    return hy_fail(GT_ERROR_VALUE, "%s: %.100s %s %.100s, the value in %s; leave it out", name, own,
                   r->offset == AT(steps) ? "is less than" : "differs from", other, file);
}

/* ---- help ----------------------------------------------------------------------------------- */

enum { HELP = 23, WIDTH = 79 }; /* column where the descriptions begin; column where lines end */

static void print_option(FILE *out, const row *r, const char *help) {
    char left[64], text[512], standard[96] = "";
    snprintf(left, sizeof left, "--%s%s%s", r->name, r->argument ? " " : "", r->argument ? r->argument : "");
    if (r->cuda)
        snprintf(standard, sizeof standard, " [%s; on CUDA %s]", r->cpu, r->cuda);
    else if (r->kind != FLAG && *r->cpu)
        snprintf(standard, sizeof standard, " [%s]", r->cpu);
    snprintf(text, sizeof text, "%s%s", help, standard);
    fprintf(out, "  %-*s ", HELP - 3, left);
    hy_print_wrapped(out, text, HELP, HELP, WIDTH);
}

static void print_paragraph(FILE *out, const char *text) { hy_print_wrapped(out, text, 0, 0, WIDTH); }

static const char title[] = "hybrid_train: trains an RWKV-6 + Mamba-2 language model on a text\n";
static const char usage[] = "  hybrid_train [CONFIG] [--option value | --option=value | --flag]...\n";

/* Prints at most 23 lines, so that a terminal of 24 lines shows all of them above its prompt. */
void hy_options_help(FILE *out) {
    fprintf(out, "%s%s", title, usage);
    for (size_t i = 0; i < sizeof common / sizeof common[0]; i++)
        print_option(out, find_row(common[i].name, ""), common[i].help);
}

void hy_options_help_all(FILE *out) {
    fprintf(out, "%s\n%s\n", title, usage);
    print_paragraph(out, "CONFIG is a file of lines 'option: value' (# begins a comment, flags take yes or no). The "
                         "command line overrides it. --config CONFIG means the same. Defaults are in brackets.");
    char names[256] = "Other names:";
    for (size_t i = 0; i < sizeof aliases / sizeof aliases[0]; i++)
        snprintf(names + strlen(names), sizeof names - strlen(names), "%s --%s for --%s", i ? "," : "", aliases[i].name,
                 aliases[i].option);
    snprintf(names + strlen(names), sizeof names - strlen(names), ", -h for --help.");
    print_paragraph(out, names);
    for (int i = 0; i < ROWS; i++) {
        if (rows[i].kind == SECTION)
            fprintf(out, "\n%s\n", rows[i].name);
        else
            print_option(out, rows + i, rows[i].help);
    }
    fputc('\n', out);
    print_paragraph(
        out, "Ctrl-C (exit status 130), SIGTERM (143) and SIGUSR1 (138), which mpirun passes on, end the run after the "
             "current step. The run then writes the model file, and prints the final loss and table. A second signal "
             "ends it at once. A signal during the final evaluation, or during --eval, ends the evaluation with the "
             "result so far. OMP_NUM_THREADS sets the number of CPU threads; the results do not depend on it.");
    print_paragraph(
        out, "Under mpirun or srun the processes share the windows of a batch. Only rank 0 prints, and writes files.");
    print_paragraph(out, "NO_COLOR turns off colours; TERM=dumb turns off all escape sequences.");
    print_paragraph(out, "Exit status: 0 done, 1 the run failed, 2 bad option or file, 3 a gate failed with "
                         "--gates-strict, 4 --check found a difference; 130, 138 and 143: a signal ended the run.");
}
