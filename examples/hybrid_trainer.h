/* The state of a run of hybrid_train, and the functions that its files call of each other.
 *
 * | file             | holds                                                             |
 * |------------------|-------------------------------------------------------------------|
 * | hybrid_setup.c   | work before the first step: device, model file, text, model       |
 * | hybrid_loop.c    | the training run: signals, steps, gates, saving the model         |
 * | hybrid_report.c  | all printed tables and lines                                      |
 * | hybrid_instead.c | modes other than training                                         |
 * | hybrid_score.c   | --score: questions that a model answers                           |
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

enum { SPEED_FROM = 100, SPEED_TO = 500 }; /* the report's speed is measured between these steps */
enum { GATES_MAX = 16 };
#define MIB (1024.0 * 1024.0)

/* A mean loss, and the number of tokens that it averages; 0 tokens: not measured. */
typedef struct hy_loss {
    double mean;
    int64_t tokens, bytes; /* bytes: number of bytes that the tokens stand for; 0: not known */
} hy_loss;

typedef struct trainer {
    hy_options options;
    hy_ranks ranks;   /* only rank 0 prints and writes */
    const char *mode; /* "train", or the option that selects another mode: "resume", "init", "eval" ... */
    hy_text text;
    int32_t first_token;    /* first token of the text */
    int prompt_tokens;      /* number of tokens in the prompt of a sample */
    char *prompt;           /* contents of --prompt-file; NULL: use the prompt of the options */
    char data[HY_TEXT_MAX]; /* path of the text */
    hy_paths files, val;    /* files of --data (or the fables that come with the program), and of --val */
    hy_file file;           /* the model file to read; file.path = NULL: none */
    int data_is_files;      /* 1: the model file gave the path of the text */
    hy_backend *backend;
    char why[256];       /* reason for the choice of device */
    char transport[256]; /* how several ranks on GPUs add up gradients; "": one rank, or ranks on CPUs */
    hy_config config;
    hy_plan plan;
    hy_model *model;
    hy_batch batch, first; /* this rank's share of the current batch; and of the first batch, if the run is new */
    hy_tracks tracks;      /* tracks of all ranks */
    double *states;        /* with several ranks: states of all tracks when the run was last saved ... */
    int64_t states_step;   /* ... and the step of that save */
    uint64_t random;       /* state of the random generator that places windows ... */
    uint64_t before;       /* ... and its value before the current batch */
    hy_log log;
    hy_screen screen;
    hy_gpu_watch watch;  /* with --watch */
    double start, shown; /* times of the first step and of the last progress line, in seconds of hy_now */
    double earlier;      /* seconds that the run took before it was resumed */

    hy_recent recent;
    int64_t steps, tokens;     /* steps done, tokens trained on */
    double train_seconds;      /* training time without evaluations and samples */
    double aside;              /* seconds spent on evaluations and samples */
    double speed_start, speed; /* speed: tokens/s between steps SPEED_FROM and SPEED_TO; 0: not reached */
    int64_t speed_tokens;
    double waited, waited_of; /* NCCL: seconds for which the GPU waited for sums; seconds of these steps in all */
    int64_t replayed;         /* steps of this process so far; `waited` leaves out the first two, which record graphs */
    double loss_scale;        /* loss scale of fp16; 1 for other types */
    int64_t scale_steps;      /* steps without overflow since the scale last changed */
    double first_loss, held_out;  /* held_out: latest point of the held-out curve; below 0: none yet */
    hy_loss final;                /* result of the final evaluation, or of --eval */
    double best;                  /* with --keep-best: the lowest point of the held-out curve ... */
    int64_t best_step;            /* ... and its step; 0: none yet */
    int64_t rows;                 /* windows in memory at once; 0: this rank's share of the batch */
    int64_t saved;                /* step of the last model file; 0: none yet */
    double last_loss;             /* resumed run: loss of the step before it resumed; NAN: not known */
    int64_t resumed;              /* resumed run: step of the model file that --resume names */
    char older[HY_PATH_MAX + 16]; /* new name of an older file at the path of --save; "": there was none */
    int has_lost_device;          /* 1: the run ended because its device failed */
    char not_saved[640];          /* why the latest attempt to save failed; "": it succeeded */
    char text_sum[65];            /* SHA-256 of the text; computed if the run saves, resumes or has several ranks */
    char file_sum[80];            /* checksum of the model file that was read */
    hy_gate gates[GATES_MAX];
    int gate_count, gates_at_start;
    hy_probe probe; /* latest measurements for the gates ... */
    double ratio;   /* ... and the RWKV / Mamba ratio of the gradient norms at that step */
} trainer;

/* ---- hybrid_setup.c -------------------------------------------------------------------------- */

/* "f32", "bf16", "f16" */
extern const char *const hy_dtype_names[];

/* Does all work before the first step.  `program` is argv[0], which helps to find the fables. */
gt_status hy_set_up(trainer *t, const char *program);

/* Makes a model from the options and stores it in t->model.  If memory is short, the error says how much the model
 * needs. */
gt_status hy_create_model(trainer *t, const hy_config *config);

/* ---- hybrid_loop.c --------------------------------------------------------------------------- */

/* Gives the path of the file that --keep-best writes; `path` has HY_TEXT_MAX + 8 bytes. */
void hy_best_path(const hy_options *options, char *path);

/* Trains, saves and evaluates. */
gt_status hy_run_training(trainer *t);

/* Evaluates a complete run and adds the result to the last row of its log, which hy_log_reopen has opened. */
gt_status hy_complete_log(trainer *t);

/* Returns the first signal that asked the run to end; 0: none.  With several ranks it is a signal that any rank had
 * reported at the latest exchange. */
int hy_interrupted(const trainer *t);

/* Restores the run that the model file stores. */
gt_status hy_resume_run(trainer *t);

/* Installs signal handlers: the first signal asks the run to end. */
void hy_catch_signals(trainer *t);

/* Measures the final held-out loss, t->final, and shows the progress.  It uses whole batches with at least
 * --final-eval-tokens held-out tokens (0: all tokens).  The first signal ends the evaluation with the result so far.
 *
 * *point, if point is not NULL, gets the mean over whole batches with at least `limit` tokens (0: the same tokens as
 * t->final).  It is NAN if a signal came before that. */
gt_status hy_evaluate(trainer *t, int64_t limit, double *point);

/* Measures the mean loss over whole batches with at least `limit` held-out tokens (0: all tokens), and prints
 * nothing. */
gt_status hy_evaluate_first(trainer *t, int64_t limit, hy_loss *loss);

/* ---- hybrid_report.c -------------------------------------------------------------------------- */

int hy_count_gates(const trainer *t, hy_verdict verdict);

typedef struct hy_phrase {
    char text[64];
} hy_phrase;

hy_phrase hy_grouped(int64_t n);        /* formats 1234567 as 1,234,567 */
hy_phrase hy_part_of(const trainer *t); /* says which part of the text is held out */
int hy_recent_count(const hy_recent *r);
double hy_recent_mean(const hy_recent *r, const double *values);
gt_status hy_flush_report(void); /* flushes standard output */

enum { START = 12, FINAL = 15 }; /* columns where the texts of the first and of the last table begin */

void hy_print_models(const trainer *t);
void hy_print_start(const trainer *t);
gt_status hy_print_progress(trainer *t, double held_out); /* held-out loss after this step; NAN: not measured */
void hy_end_progress(trainer *t);                         /* ends the table, since other text follows */
gt_status hy_print_evaluation(trainer *t, const hy_loss *so_far, int64_t tokens, double seconds); /* tokens: in all */
gt_status hy_write_log(trainer *t, const hy_result *result, double held_out, double lr, const hy_probe *probe);
gt_status hy_print_gates(const trainer *t, const char *when, int first);
gt_status hy_print_sample(trainer *t);
gt_status hy_print_text(trainer *t); /* prints the text of --generate */
void hy_print_loss(const trainer *t);
void hy_print_final(const trainer *t);

/* ---- hybrid_instead.c -------------------------------------------------------------------------- */

/* Compares one training step on the device with the same step on the CPU.  *failures counts the tensors that differ. */
gt_status hy_check_device(trainer *t, int *failures);
gt_status hy_bench_models(trainer *t);
gt_status hy_plan_models(trainer *t); /* plans the model that the options describe, or all models */
gt_status hy_profile_step(trainer *t);
gt_status hy_print_held_out(trainer *t);

/* Rounds the weights of --generate to int8.  Measures the held-out loss before and after, and prints both. */
gt_status hy_round_weights(trainer *t);

/* ---- hybrid_score.c ---------------------------------------------------------------------------- */

gt_status hy_print_score(trainer *t); /* asks the questions of --score */

#endif
