/* The options of hybrid_train: one table describes the command line, the config file and --help. */
#ifndef HYBRID_CONFIG_H
#define HYBRID_CONFIG_H

#include "hybrid_model.h"
#include <stdio.h>

#define HY_TEXT_MAX 1024
#define HY_OPTIONS_MAX 160

#define HY_LENGTHS_MAX 64

enum { HY_AUTO = -1 }; /* value of a whole-number option that the user set to 'auto' or 'none' */

typedef struct hy_lengths {
    int count;
    int64_t of[HY_LENGTHS_MAX];
} hy_lengths;

typedef struct hy_options {
    char data[HY_TEXT_MAX];                    /* "": the text that comes with the program */
    char val[HY_TEXT_MAX], table[HY_TEXT_MAX]; /* "" = none */
    double held_out;
    int shuffle;
    char separator[HY_TEXT_MAX];
    char tokens[HY_TEXT_MAX], split[HY_TEXT_MAX];
    int64_t vocab, end_token; /* for tokens that are numbers.  vocab 0: the largest number + 1; end_token -1: none */
    int end_symbol;
    char model[HY_TEXT_MAX];
    /* 0: the size of the named model, or the default if that model leaves the size open */
    int64_t hidden, layers, heads, head_size, d_state, expand, d_conv, mamba_head, ffn; /* ffn HY_AUTO: no FFN */
    int untied;
    int64_t steps, batch, seq, warmup, seed;
    double lr, min_lr, weight_decay, clip, beta1, beta2, eps, dropout, ema;
    char schedule[HY_TEXT_MAX];
    int64_t decay_steps, micro_batch; /* micro_batch: 0 = batch, HY_AUTO = as many windows as fit */
    int keep_best;
    int stateful, recompute;
    char fuse[HY_TEXT_MAX];
    char device[HY_TEXT_MAX], fallback[HY_TEXT_MAX], nccl[HY_TEXT_MAX];
    char dtype[HY_TEXT_MAX];
    int check;
    hy_lengths bench;       /* lengths of the benchmark; none: no benchmark */
    hy_lengths bench_batch; /* batches of the benchmark; none: `batch` alone */
    int64_t bench_runs;     /* how often the benchmark times each pass */
    int64_t bench_steps;    /* training steps of the benchmark; 0: none */
    int bench_cpu, bench_generate, profile, synchronize, watch;
    hy_lengths plan;        /* batches to plan for; none: no plan */
    char save[HY_TEXT_MAX]; /* save, resume, init, eval, score: "" = off */
    char resume[HY_TEXT_MAX], init[HY_TEXT_MAX];
    char eval[HY_TEXT_MAX], score[HY_TEXT_MAX], generate[HY_TEXT_MAX];
    char weights[HY_TEXT_MAX]; /* "model" or "int8", for generate and bench_generate */
    int64_t save_every;
    int64_t eval_every, eval_tokens, final_eval_tokens, log_every;
    char csv[HY_TEXT_MAX];
    int64_t sample, sample_every;
    char prompt[HY_TEXT_MAX];
    char prompt_file[HY_TEXT_MAX], stop[HY_TEXT_MAX];
    double temperature, top_p, repetition_penalty;
    int64_t top_k;
    int quiet;
    int64_t stall_timeout; /* seconds; 0: none */
    int gates_strict;
    int help, help_all, version, list_models;
    const char *config;                  /* the config file, as in argv; NULL = none */
    unsigned char given[HY_OPTIONS_MAX]; /* for each row of the table 1: user set it, 2: model file set it, 0: unset */
} hy_options;

/* Reads the config file, if the command line names one, and then the command line.  So the command line overrides
 * the config file.  On failure hy_last_error() names the wrong key or value, and the most similar valid one if there
 * is one. */
gt_status hy_options_parse(hy_options *options, int argc, char *const *argv);

/* Sets every option that the user left out to its default.  Some defaults depend on the device. */
gt_status hy_options_default(hy_options *options, int cuda);

void hy_options_help(FILE *out); /* the common options, on one screen */
void hy_options_help_all(FILE *out);

/* The name of the i-th option that takes one value; NULL after the last. */
const char *hy_options_name(int i);
/* The name of the i-th option that a model file stores; NULL after the last.  dtype is stored, device is not. */
const char *hy_options_kept(int i);
/* Writes the value of an option as text.  The text may contain any byte except NUL. */
void hy_options_text(const hy_options *options, const char *name, char text[HY_TEXT_MAX]);
/* Gives an option the value `text` from the model file `file`; `text` is in the form of hy_options_text.  An option
 * that the user set keeps the user's value.  With `strict` the function fails if that value differs from the file's
 * and the option changes the result.  Only `steps` may then have a larger value. */
gt_status hy_options_take(hy_options *options, const char *name, const char *text, const char *file, int strict);
/* Gives the configuration of the model that the option `model` names, with the sizes that the user set.  The caller
 * must still call hy_config_resolve. */
gt_status hy_options_config(const hy_options *options, hy_config *config);
/* Returns whether an option is part of the model's shape.  Existing weights fit only one value of such an option. */
int hy_options_of_model(const char *name);
/* Fails if the user gave an option that has no effect in this mode.  mode is "train", "resume", "init", or the name
 * of the option that selects another mode, such as "eval". */
gt_status hy_options_fit(const hy_options *options, const char *mode);
/* Fails if the user gave an option that has no effect because of the values of other options.  Call it after all
 * options have their values. */
gt_status hy_options_fit_together(const hy_options *options, const char *mode);
/* Returns whether decoding reads int8 weights. */
int hy_options_int8(const hy_options *options);
/* Returns whether the user gave this option, on the command line or in a config file. */
int hy_options_given(const hy_options *options, const char *name);

/* Finds the word in `words` that is most similar to `word`: the one with the smallest edit distance, ignoring case.
 * If several words have this distance, it returns the first.  It returns NULL if more than a quarter of the letters
 * would have to change.  Exception: if `word` is the beginning of exactly one of `words`, it returns that one. */
const char *hy_nearest(const char *word, const char *const *words, int count);

#endif
