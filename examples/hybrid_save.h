/* Model files of hybrid_train.  docs/training.md lists their contents; hybrid_file.h describes the file format. */
#ifndef HYBRID_SAVE_H
#define HYBRID_SAVE_H

#include "hybrid_config.h"
#include "hybrid_data.h"
#include "hybrid_file.h"
#include "hybrid_model.h"

enum { HY_RECENT = 20 }; /* hybrid_train prints and judges averages over so many steps */

/* Numbers of the last steps, in ring buffers: step i is at index i % HY_RECENT. */
typedef struct hy_recent {
    double loss[HY_RECENT], norm[HY_RECENT], ratio[HY_RECENT], seconds[HY_RECENT];
    int64_t tokens[HY_RECENT], steps;
} hy_recent;

/* How far a run has come. */
typedef struct hy_progress {
    int64_t steps, tokens;
    uint64_t random; /* state of the random generator that places windows */
    double loss_scale;
    int64_t scale_steps;
    double first_loss, held_out;          /* held_out below 0: not measured yet */
    double seconds, train_seconds, aside; /* as in the trainer */
    double best; /* with --keep-best: the lowest point of the held-out curve, and its step; step 0: none */
    int64_t best_step;
    hy_recent recent;
} hy_progress;

typedef struct hy_run {
    hy_model *model;
    const hy_options *options; /* the options of the run, with all defaults set */
    const hy_text *text;       /* the text, for its vocabulary */
    char text_sum[65];         /* SHA-256 of the text */
    hy_tracks *tracks;         /* NULL: not stateful */
    const char *device;        /* name of the backend */
    int rank, ranks;           /* this rank, and the number of ranks that share the tracks; 0 means 1 */
    const double *states;      /* with several ranks hy_save needs the states of all, from hy_states_gather */
    hy_progress progress;
} hy_run;

/* SHA-256 of a text's bytes. */
void hy_text_sum(const hy_text *text, char hex[65]);

/* Collects the carried states of all ranks on rank 0, as an array for hy_run.states that the caller frees. */
gt_status hy_states_gather(hy_ranks *ranks, hy_model *model, double **states);

/* Writes the model file.  Fails if writing fails or if a number is not finite; an older file then stays as it is. */
gt_status hy_save(const hy_run *run, const char *path);

/* Checks whether hy_save may write to `path`, and changes no file.  Fails if `path` cannot be written or holds
 * something other than a model file.  Also fails if the temporary file of hy_save would overwrite the model file
 * `reads` ("": no file). */
gt_status hy_save_fits(const char *path, const char *reads);

/* Opens a model file.  Refuses other files, and model files that are cut off. */
gt_status hy_saved_open(hy_file *file, const char *path);

/* Gives the vocabulary size of a model that was trained on numbers; *vocab = 0 for a model of bytes. */
gt_status hy_saved_numbers(const hy_file *file, int *vocab);
/* For a model of numbers: the first token of its training text. */
gt_status hy_saved_first_token(const hy_file *file, int32_t *token);

/* For a model of bytes: the vocabulary bytes[256] in the order of the tokens, and its size. */
gt_status hy_saved_vocabulary(const hy_file *file, uint8_t *bytes, int *count);
/* For a model of bytes: the first byte of its training text. */
gt_status hy_saved_first_byte(const hy_file *file, uint8_t *byte);

/* Sets the options that the user did not give to the values of the file.  If the user gave a different value for an
 * option of the model's shape, it is refused, since the weights fit only the file's value.  With STRICTLY every
 * different value that changes the result is refused, see hy_options_take.  Other values of the user stay.  dtype and
 * device do not change. */
typedef enum hy_take {
    HY_TAKE_MODEL, /* only options of the model's shape */
    HY_TAKE_ALL,
    HY_TAKE_STRICTLY
} hy_take;
gt_status hy_saved_options(const hy_file *file, hy_take take, hy_options *options);

/* hy_load_weights reads the weights into a model, or their moving average if the file has one.  hy_load_run reads the
 * whole run into `run`, whose model, text, text_sum and tracks are already set. */
gt_status hy_load_weights(hy_file *file, hy_model *model);
gt_status hy_load_run(hy_file *file, hy_run *run);

#endif
