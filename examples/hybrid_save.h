/* Model files of hybrid_train.  docs/training.md lists their contents; hybrid_file.h describes the file format. */
#ifndef HYBRID_SAVE_H
#define HYBRID_SAVE_H

#include "hybrid_config.h"
#include "hybrid_data.h"
#include "hybrid_file.h"
#include "hybrid_model.h"

enum { HY_RECENT = 20 }; /* number of last steps that hybrid_train averages, for its printed values and for gates */

/* Numbers of the last HY_RECENT steps, in ring buffers.  Step i is at index i % HY_RECENT. */
typedef struct hy_recent {
    double loss[HY_RECENT], norm[HY_RECENT], ratio[HY_RECENT], seconds[HY_RECENT];
    int64_t tokens[HY_RECENT], steps;
} hy_recent;

/* The progress of a run: the numbers that a resumed run continues from. */
typedef struct hy_progress {
    int64_t steps, tokens;
    uint64_t random; /* state of the random generator that places windows */
    double loss_scale;
    int64_t scale_steps;
    double first_loss, held_out;          /* held_out below 0: not measured yet */
    double seconds, train_seconds, aside; /* see the trainer struct in hybrid_trainer.h */
    double best; /* with --keep-best: the lowest held-out loss, and its step in best_step; step 0: none */
    int64_t best_step;
    hy_recent recent;
} hy_progress;

typedef struct hy_run {
    hy_model *model;
    const hy_options *options; /* the options of the run, with all defaults set */
    const hy_text *text;       /* hy_save needs the vocabulary of the text */
    char text_sum[65];         /* SHA-256 of the text */
    hy_tracks *tracks;         /* NULL: not stateful */
    const char *device;        /* name of the backend */
    int rank, ranks;           /* index of this rank; number of ranks that share the tracks, where 0 means 1 */
    const double *states;      /* with several ranks: the states of all ranks, from hy_states_gather */
    hy_progress progress;
} hy_run;

/* SHA-256 of a text's bytes. */
void hy_text_sum(const hy_text *text, char hex[65]);

/* Collects the carried states of all ranks on rank 0.  The caller stores the array in hy_run.states, and frees it
 * later. */
gt_status hy_states_gather(hy_ranks *ranks, hy_model *model, double **states);

/* Writes the model file.  Fails if writing fails or if a number is not finite.  After a failure an older file stays
 * as it is. */
gt_status hy_save(const hy_run *run, const char *path);

/* Checks whether hy_save may write to `path`, without changing any file.  Fails if `path` cannot be written, or if
 * it holds something other than a model file.  Also fails if the temporary file of hy_save would overwrite the model
 * file `reads`; reads = "" means no file. */
gt_status hy_save_fits(const char *path, const char *reads);

/* Opens a model file.  Fails if the file is no model file, or is cut off. */
gt_status hy_saved_open(hy_file *file, const char *path);

/* Gives the vocabulary size of a model that was trained on numbers.  For a model of bytes *vocab is 0. */
gt_status hy_saved_numbers(const hy_file *file, int *vocab);
/* Gives the first token of the training text, for a model of numbers. */
gt_status hy_saved_first_token(const hy_file *file, int32_t *token);

/* Gives the vocabulary of a model of bytes: its bytes in the order of the tokens, in bytes[256], and their number. */
gt_status hy_saved_vocabulary(const hy_file *file, uint8_t *bytes, int *count);
/* Gives the first byte of the training text, for a model of bytes. */
gt_status hy_saved_first_byte(const hy_file *file, uint8_t *byte);

/* Sets the options that the user did not give to the values of the file; dtype and device do not change.  Fails if
 * the user gave a different value for an option of the model's shape, since the weights fit only the file's value.
 * HY_TAKE_STRICTLY also fails for any other option that changes the result, see hy_options_take.  All other values
 * of the user stay. */
typedef enum hy_take {
    HY_TAKE_MODEL, /* only options of the model's shape */
    HY_TAKE_ALL,
    HY_TAKE_STRICTLY
} hy_take;
gt_status hy_saved_options(const hy_file *file, hy_take take, hy_options *options);

/* hy_load_weights reads the weights into a model.  If the file has their moving average, it reads that instead.
 * hy_load_run reads the whole run into `run`, whose model, text, text_sum and tracks are already set. */
gt_status hy_load_weights(hy_file *file, hy_model *model);
gt_status hy_load_run(hy_file *file, hy_run *run);

#endif
