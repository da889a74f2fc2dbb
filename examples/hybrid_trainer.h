/* The files of hybrid_train share the state of a run and call these functions of each other.
 *
 * | file             | holds                                                             |
 * |------------------|-------------------------------------------------------------------|
 * | hybrid_setup.c   | before the first step: device, model file, text, model            |
 * | hybrid_loop.c    | signals, steps, gates, the model file that is written             |
 * | hybrid_report.c  | what is printed                                                   |
 * | hybrid_instead.c | modes other than training                                         |
 * | hybrid_train.c   | main                                                              | */
#ifndef HYBRID_TRAINER_H
#define HYBRID_TRAINER_H

#include "hybrid_config.h"
#include "hybrid_data.h"
#include "hybrid_gates.h"
#include "hybrid_generate.h"
#include "hybrid_log.h"
#include "hybrid_save.h"
#include "hybrid_screen.h"
#include "hybrid_watch.h"

enum { SPEED_FROM = 100, SPEED_TO = 500 }; /* steps between which the speed is measured */
enum { GATES_MAX = 16 };
#define MIB (1024.0 * 1024.0)

/* A mean loss and the number of tokens behind it; 0 tokens: it was not measured. */
typedef struct hy_loss {
    double mean;
    int64_t tokens, bytes; /* bytes: that these stand for, 0 = not known */
} hy_loss;

typedef struct trainer {
    hy_options options;
    hy_ranks ranks;   /* with several, rank 0 alone prints and writes */
    const char *mode; /* "train", or the option that says what to do: "resume", "init", "eval" ... */
    hy_text text;
    int32_t first_token;    /* of the text */
    int prompt_tokens;      /* that a sample starts with */
    char *prompt;           /* of --prompt-file; NULL: the prompt of the options */
    char data[HY_TEXT_MAX]; /* its path */
    hy_paths files, val;    /* of --data, or of the fables, and of --val */
    hy_file file;           /* the model file that is read; no path: none */
    int data_is_files;      /* 1: it says where the text is */
    hy_backend *backend;
    char why[256]; /* why this device */
    hy_config config;
    hy_plan plan;
    hy_model *model;
    hy_batch batch, first; /* the one at hand, this rank's share; the run's first, unless it is resumed */
    hy_tracks tracks;      /* of all ranks */
    double *states;        /* that the tracks of all ranks carried at the latest saving, with several ranks ... */
    int64_t states_step;   /* ... and its step */
    uint64_t random;       /* state of the generator that places windows ... */
    uint64_t before;       /* ... and its value before the current batch */
    hy_log log;
    hy_screen screen;
    hy_gpu_watch watch;  /* with --watch */
    double start, shown; /* times of the first step and of the last progress line, in seconds */
    double earlier;      /* seconds of the run before it was resumed */

    hy_recent recent;
    int64_t steps, tokens;     /* done */
    double train_seconds;      /* without evaluations and samples */
    double aside;              /* seconds spent on these */
    double speed_start, speed; /* between SPEED_FROM and SPEED_TO, tokens/s; 0: not reached */
    int64_t speed_tokens;
    double loss_scale;            /* of fp16, else 1 */
    int64_t scale_steps;          /* good steps at this scale */
    double first_loss, held_out;  /* held_out: the curve's latest point; below 0: none yet */
    hy_loss final;                /* of the final evaluation, or of --eval */
    double best;                  /* the lowest point of the held-out curve, with --keep-best ... */
    int64_t best_step;            /* ... and its step; 0: none yet */
    int64_t rows;                 /* windows that are in memory at once; 0: this rank's share of the batch */
    int64_t saved;                /* step of the last model file; 0: none yet */
    double last_loss;             /* of the step before the run is resumed; NAN: not known */
    int64_t resumed;              /* step of the file of --resume */
    char older[HY_PATH_MAX + 16]; /* name that the file got that was there before; "": none */
    int has_lost_device;          /* 1: the run ended since its device failed */
    char not_saved[640];          /* why the last attempt failed; "": it did not */
    char text_sum[65];            /* SHA-256 of the text, if model files are written or resumed, or with ranks */
    char file_sum[80];            /* checksum of the model file that was read */
    hy_gate gates[GATES_MAX];
    int gate_count, gates_at_start;
    hy_probe probe; /* the latest for the gates ... */
    double ratio;   /* ... and the gradient ratio beside it */
} trainer;

/* ---- hybrid_setup.c -------------------------------------------------------------------------- */

/* "f32", "bf16", "f16" */
extern const char *const hy_dtype_names[];

/* Everything before the first step; program: argv[0]. */
gt_status hy_set_up(trainer *t, const char *program);

/* Makes a model from the options, in t->model.  The error of missing memory says how much it needs. */
gt_status hy_create_model(trainer *t, const hy_config *config);

/* ---- hybrid_loop.c --------------------------------------------------------------------------- */

/* The file of --keep-best, in HY_TEXT_MAX + 8 bytes. */
void hy_best_path(const hy_options *options, char *path);

/* Trains, then evaluates and saves. */
gt_status hy_run_training(trainer *t);

/* Evaluates a complete run, and adds that to the last row of its log.  The log is open: see hy_log_reopen. */
gt_status hy_complete_log(trainer *t);

/* The first signal that asked the run to end; 0: none.  With ranks, as of the latest exchange. */
int hy_interrupted(const trainer *t);

/* Sets the trainer to where the file's run was. */
gt_status hy_resume_run(trainer *t);

/* From here on the first signal asks the run to end. */
void hy_catch_signals(trainer *t);

/* Measures t->final over the first tokens of the held-out part (--final-eval-tokens, 0: all) in whole batches, with a
 * line
 * of progress.  The first signal ends it, with the result so far.  point, unless NULL, gets the mean over the first
 * `limit` tokens (0: as many as t->final); NAN if a signal came before. */
gt_status hy_evaluate(trainer *t, int64_t limit, double *point);

/* ---- hybrid_report.c -------------------------------------------------------------------------- */

int hy_count_gates(const trainer *t, hy_verdict verdict);

typedef struct hy_phrase {
    char text[64];
} hy_phrase;

hy_phrase hy_grouped(int64_t n);        /* 1234567 as 1,234,567 */
hy_phrase hy_part_of(const trainer *t); /* which part of the text is held out */
int hy_recent_count(const hy_recent *r);
double hy_recent_mean(const hy_recent *r, const double *values);
gt_status hy_flush_report(void); /* all that is printed is out */

enum { START = 12, FINAL = 15 }; /* where the entries of the first and the last table begin */

void hy_print_models(const trainer *t);
void hy_print_start(const trainer *t);
gt_status hy_print_progress(trainer *t, double held_out); /* of this step, NAN if it was not measured */
void hy_end_progress(trainer *t);                         /* something else will be printed */
gt_status hy_print_evaluation(trainer *t, const hy_loss *so_far, int64_t tokens, double seconds); /* of so many */
gt_status hy_write_log(trainer *t, const hy_result *result, double held_out, double lr, const hy_probe *probe);
gt_status hy_print_gates(const trainer *t, const char *when, int first);
gt_status hy_print_sample(trainer *t);
gt_status hy_print_text(trainer *t); /* of --generate */
void hy_print_loss(const trainer *t);
void hy_print_final(const trainer *t);

/* ---- hybrid_instead.c -------------------------------------------------------------------------- */

/* One step on the device and on the CPU; *failures counts the tensors that differ. */
gt_status hy_check_device(trainer *t, int *failures);
gt_status hy_bench_models(trainer *t);
gt_status hy_plan_models(trainer *t); /* of the model that the options describe, or else of all */
gt_status hy_profile_step(trainer *t);
gt_status hy_print_held_out(trainer *t);

#endif
