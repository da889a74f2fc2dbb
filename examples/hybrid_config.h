/* The options of hybrid_train: one table describes the command line, the config file and --help. */
#ifndef HYBRID_CONFIG_H
#define HYBRID_CONFIG_H

#include "hybrid_model.h"
#include <stdio.h>

#define HY_TEXT_MAX 1024
#define HY_OPTIONS_MAX 160

#define HY_LENGTHS_MAX 64

enum { HY_AUTO = -1 }; /* of a whole number that may be 'auto' */

typedef struct hy_lengths {
    int count;
    int64_t of[HY_LENGTHS_MAX];
} hy_lengths;

typedef struct hy_options {
    char data[HY_TEXT_MAX];                    /* "" = the text that comes with the program */
    char val[HY_TEXT_MAX], table[HY_TEXT_MAX]; /* "" = none */
    double held_out;
    int shuffle;
    char separator[HY_TEXT_MAX];
    char tokens[HY_TEXT_MAX], split[HY_TEXT_MAX];
    int64_t vocab, end_token; /* of numbers; vocab 0 = by the largest, end_token -1 = none */
    int end_symbol;
    char model[HY_TEXT_MAX];
    /* 0 in these: as the model says, or the default that goes with the others */
    int64_t hidden, layers, heads, head_size, d_state, expand, d_conv, mamba_head, ffn;
    int64_t steps, batch, seq, warmup, seed;
    double lr, min_lr, weight_decay, clip, beta1, beta2, eps, dropout, ema;
    char schedule[HY_TEXT_MAX];
    int64_t decay_steps, micro_batch; /* micro_batch: 0 = batch, HY_AUTO = by memory */
    int keep_best;
    int stateful, recompute;
    char fuse[HY_TEXT_MAX];
    char device[HY_TEXT_MAX], fallback[HY_TEXT_MAX];
    char dtype[HY_TEXT_MAX];
    int check;
    hy_lengths bench;       /* none: no benchmark */
    hy_lengths bench_batch; /* none: batch */
    int64_t bench_runs;     /* that a pass of the benchmark is timed */
    int64_t bench_steps;    /* 0: no training in the benchmark */
    int bench_cpu, bench_generate, profile, synchronize, watch;
    hy_lengths plan;        /* batches; none: no plan */
    char save[HY_TEXT_MAX]; /* these five: "" = not wanted */
    char resume[HY_TEXT_MAX], init[HY_TEXT_MAX];
    char eval[HY_TEXT_MAX], generate[HY_TEXT_MAX];
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
    unsigned char given[HY_OPTIONS_MAX]; /* per row of the table: 1 by the user, 2 by a model file */
} hy_options;

/* Reads the command line, and before it the config file that it may name, so that the command line
 * wins.  On failure hy_last_error() names the faulty key or value, and the nearest right one if
 * there is one. */
gt_status hy_options_parse(hy_options *options, int argc, char *const *argv);

/* Gives every option that the user left out its default, which may depend on the device. */
gt_status hy_options_default(hy_options *options, int cuda);

void hy_options_help(FILE *out); /* the common options, on one screen */
void hy_options_help_all(FILE *out);

/* The i-th option of one value; NULL after the last. */
const char *hy_options_name(int i);
/* The options that a model file keeps, by name: the i-th, NULL after the last.  dtype is among
 * them, device is not. */
const char *hy_options_kept(int i);
/* The value of an option as a text, in any bytes but NUL. */
void hy_options_text(const hy_options *options, const char *name, char text[HY_TEXT_MAX]);
/* Sets an option that the user left out to such a text, which came from `file`.  If the user gave
 * another value it stays; but with `strict` an option that changes the result is refused, unless it
 * is steps and larger. */
gt_status hy_options_take(hy_options *options, const char *name, const char *text, const char *file, int strict);
/* Whether an option belongs to the model that the weights are of, and so can be no other with them. */
int hy_options_of_model(const char *name);
/* Fails if the user gave an option that has no effect in a mode: "train", "resume", "init", or an option that trains
 * nothing, such as "eval". */
gt_status hy_options_fit(const hy_options *options, const char *mode);
/* The same for options whose effect depends on the values of others.  Call it when all options have their values. */
gt_status hy_options_fit_together(const hy_options *options, const char *mode);
/* Whether the user gave this option, on the command line or in a config file. */
int hy_options_given(const hy_options *options, const char *name);

/* The one of `words` with the smallest edit distance to `word`, in any case; the first of them on a
 * tie.  NULL if more than a quarter of the letters would have to change, unless `word` is the
 * beginning of one alone. */
const char *hy_nearest(const char *word, const char *const *words, int count);

#endif
