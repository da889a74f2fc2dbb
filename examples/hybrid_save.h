/* Model files of hybrid_train.  docs/training.md lists their contents, hybrid_file.h defines their bytes. */
#ifndef HYBRID_SAVE_H
#define HYBRID_SAVE_H

#include "hybrid_config.h"
#include "hybrid_data.h"
#include "hybrid_file.h"
#include "hybrid_model.h"

enum { HY_RECENT = 20 }; /* steps behind the averages that hybrid_train prints and judges */

/* Numbers of the last steps: rings, step i at i % HY_RECENT. */
typedef struct hy_recent {
    double loss[HY_RECENT], norm[HY_RECENT], ratio[HY_RECENT], seconds[HY_RECENT];
    int64_t tokens[HY_RECENT], steps;
} hy_recent;

/* How far a run has come. */
typedef struct hy_progress {
    int64_t steps, tokens;
    uint64_t random; /* state of the generator that places windows */
    double loss_scale;
    int64_t scale_steps;
    double first_loss, held_out;          /* held_out below 0: not measured yet */
    double seconds, train_seconds, aside; /* as in the trainer */
    double best; /* the lowest point of the held-out curve that --keep-best saw, and its step; step 0: none */
    int64_t best_step;
    hy_recent recent;
} hy_progress;

typedef struct hy_run {
    hy_model *model;
    const hy_options *options; /* as the run uses them: no default left open */
    const hy_text *text;       /* its vocabulary */
    char text_sum[65];         /* SHA-256 of the text */
    hy_tracks *tracks;         /* NULL: not stateful */
    const char *device;        /* name of the backend */
    int rank, ranks;           /* that share the tracks; 0 ranks: one */
    const double *states;      /* with several, hy_save wants those of all ranks: see hy_states_gather */
    hy_progress progress;
} hy_run;

/* SHA-256 of a text's bytes. */
void hy_text_sum(const hy_text *text, char hex[65]);

/* Rank 0 gets the states that tracks carry, of all ranks, in an array for hy_run that the caller frees. */
gt_status hy_states_gather(hy_ranks *ranks, hy_model *model, double **states);

/* Writes the file.  Fails, with an older one untouched, if that cannot be done or if a number is
 * not finite. */
gt_status hy_save(const hy_run *run, const char *path);

/* Fails if hy_save could not write there, or would replace something else than a model file, or, on
 * its way, the model file `reads` ("": none).  Every file stays as it is. */
gt_status hy_save_fits(const char *path, const char *reads);

/* Opens a model file; refuses a file that is none or is not whole. */
gt_status hy_saved_open(hy_file *file, const char *path);

/* The number of tokens of a model whose tokens are numbers; 0 in *vocab: they are bytes. */
gt_status hy_saved_numbers(const hy_file *file, int *vocab);
/* The first of them in the text that the model was trained on. */
gt_status hy_saved_first_token(const hy_file *file, int32_t *token);

/* The vocabulary of bytes: bytes[256] in the order of the tokens, and their number. */
gt_status hy_saved_vocabulary(const hy_file *file, uint8_t *bytes, int *count);
/* The first byte of the text that the model was trained on. */
gt_status hy_saved_first_byte(const hy_file *file, uint8_t *byte);

/* Sets options as the file has them where the user gave none.  Where the user gave another value:
 * the model's are refused, since the weights fit no other; so are all that change the result if
 * taken STRICTLY (see hy_options_take); else the user's stays.  dtype and device are left alone. */
typedef enum hy_take {
    HY_TAKE_MODEL, /* the model's alone */
    HY_TAKE_ALL,
    HY_TAKE_STRICTLY
} hy_take;
gt_status hy_saved_options(const hy_file *file, hy_take take, hy_options *options);

/* Reads the weights into a model, or their moving average if the file has one; or all of a run into `run`, which has
 * its model, its text with
 * text_sum, and its tracks. */
gt_status hy_load_weights(hy_file *file, hy_model *model);
gt_status hy_load_run(hy_file *file, hy_run *run);

#endif
