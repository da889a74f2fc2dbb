/* hybrid_train: trains an RWKV-6 + Mamba-2 language model on a text, on a GPU or on the CPU.
 *
 * Files:
 *     hybrid_trainer.h                  the state of a run, and the files that work on it
 *     hybrid_config                     options
 *     hybrid_data, hybrid_files         text and batches
 *     hybrid_model, hybrid_ops          the model, and the backend that computes it
 *     hybrid_gates, hybrid_check        health checks; comparison of the GPU with the CPU
 *     hybrid_bench                      measurements
 *     hybrid_calls, hybrid_profile      the time of each call of a step
 *     hybrid_plan                       memory on a GPU that need not be present
 *     hybrid_ranks, hybrid_nccl         several processes; sums of gradients over their GPUs
 *     hybrid_log, hybrid_screen         output streams and the log; tables on a screen
 *     hybrid_save, hybrid_limit         model files; the memory limit of a container
 *     hybrid_generate                   text from a model */
#define _XOPEN_SOURCE 700 /* setenv, execvp */
#include "hybrid_trainer.h"
#include <errno.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { EXIT_BAD_OPTION = 2, EXIT_GATE = 3, EXIT_CHECK = 4, EXIT_SIGNAL = 128 };

static void clean_up(trainer *t) {
    hy_model_destroy(t->model);
    if (t->backend) t->backend->close(t->backend);
    hy_watch_close(&t->watch);
    hy_batch_free(&t->batch);
    hy_batch_free(&t->first);
    hy_tracks_free(&t->tracks);
    hy_file_close(&t->file);
    hy_text_free(&t->text);
    free(t->prompt);
    free(t->states);
    hy_paths_free(&t->files);
    hy_paths_free(&t->val);
}

/* Prints the last error, but only once.  Closing a stream that cannot be written would report the failure again,
 * without the rank. */
static int tell(int status) {
    static char told[640];
    char message[sizeof told];
    snprintf(message, sizeof message, "%s", hy_last_error());
    hy_make_plain(message);
    if (!strstr(told, message)) fprintf(stderr, "hybrid_train: %s\n", message);
    memcpy(told, message, sizeof told);
    return status;
}

/* Prints the error after the report.  Call it only while standard output is open.  Rank 0 prints the errors of all
 * ranks. */
static int fail(trainer *t, int status) {
    char message[640];
    hy_ranks_meet(&t->ranks, GT_ERROR_VALUE);
    snprintf(message, sizeof message, "%s", hy_last_error());
    hy_flush_report(); /* finish checks whether this worked */
    hy_fail(GT_ERROR_VALUE, "%s", message);
    return t->ranks.rank ? status : tell(status);
}

/* Closes the log and the report.  Returns the exit status, which is 1 if a part of them could not be written. */
static int finish(trainer *t, int status) {
    int bad = status == EXIT_BAD_OPTION;
    if (hy_log_close(&t->log) != GT_OK) status = fail(t, EXIT_FAILURE);
    const gt_status closed = hy_close(stdout, "standard output");
    if (closed != GT_OK) status = tell(EXIT_FAILURE);
    if (hy_ranks_close(&t->ranks, closed) != GT_OK && !status)
        status = t->ranks.rank ? EXIT_FAILURE : tell(EXIT_FAILURE);
    return bad ? EXIT_BAD_OPTION : status;
}

/* Limits how long idle OpenMP threads spin.  By default they spin long, which slows the program down many times if
 * it shares its cores.  No spinning is bad, too: the loops are short, and sleeping and waking took 40 % of the time
 * on two free cores.  So GNU's OpenMP spins for some microseconds; other implementations do not spin.
 *
 * OpenMP reads its settings before main, so this function sets them and starts the program again. */
static void stop_spinning(char **argv) {
#ifdef _OPENMP
    if (!getenv("OMP_WAIT_POLICY") && !setenv("GOMP_SPINCOUNT", "1000", 0) && !setenv("OMP_WAIT_POLICY", "passive", 1))
        execvp(argv[0], argv); /* if execvp fails, the program continues with the default */
#else
    (void)argv;
#endif
}

/* Divides the cores of a computer among its ranks, unless the user has set the number of threads. */
static void share_cores(const hy_ranks *ranks) {
#ifdef _OPENMP
    const int threads = omp_get_num_procs() / ranks->local;
    if (ranks->local > 1 && !getenv("OMP_NUM_THREADS")) omp_set_num_threads(threads ? threads : 1);
#else
    (void)ranks;
#endif
}

/* Handles --resume of a run that has no step left.  The last row of its log may still lack the held-out loss. */
static int show_complete(trainer *t) {
    printf("%s: the run is complete, step %lld of %lld; a larger --steps makes it longer\n", t->options.resume,
           (long long)t->steps, (long long)t->options.steps);
    if (!*t->options.csv) return 0;
    int has_log = t->log.file != NULL; /* only rank 0 has one */
    if (hy_ranks_share(&t->ranks, GT_OK, &has_log, sizeof has_log) != GT_OK) return fail(t, EXIT_FAILURE);
    if (!has_log) {
        printf("%s: not written: a complete run adds no row\n", t->options.csv);
        return 0;
    }
    if (hy_flush_report() != GT_OK || hy_complete_log(t) != GT_OK) return fail(t, EXIT_FAILURE);
    printf("%s: the last row now has the held-out loss, %.4f\n", t->options.csv, t->final.mean);
    return 0;
}

/* Continues on the CPU from the last model file.  It starts a new process, because the failed device may have left
 * this process in any state.  Returns only if there is no model file or the start fails. */
static gt_status fall_back(trainer *t, char *program) {
    hy_options *o = &t->options;
    char *argv[20] = {program};
    int argc = 1;
    if (!t->saved && !*o->resume)
        return hy_fail(GT_ERROR_VALUE, "fallback: no model file was saved, so the run cannot continue");
    char steps[32], seconds[32];
    snprintf(steps, sizeof steps, "%lld", (long long)o->steps);
    snprintf(seconds, sizeof seconds, "%lld", (long long)o->stall_timeout);
    argv[argc++] = "--resume", argv[argc++] = t->saved ? o->save : o->resume;
    argv[argc++] = "--save", argv[argc++] = o->save;
    argv[argc++] = "--steps", argv[argc++] = steps;
    argv[argc++] = "--device", argv[argc++] = "cpu";
    if (*o->csv) argv[argc++] = "--csv", argv[argc++] = o->csv;
    if (o->quiet) argv[argc++] = "--quiet";
    if (o->stall_timeout) argv[argc++] = "--stall-timeout", argv[argc++] = seconds;
    printf("continuing on the CPU from step %lld of %s\n\n", (long long)(t->saved ? t->saved : t->resumed),
           t->saved ? o->save : o->resume);
    gt_status status = hy_flush_report();
    if (status == GT_OK) status = hy_log_close(&t->log);
    if (status != GT_OK) return status;
    hy_limit_stall(0); /* a pending alarm would survive in the new program */
    execvp(program, argv);
    return hy_fail(GT_ERROR_VALUE, "fallback: cannot start %s again: %s", program, strerror(errno));
}

/* Runs the mode that the options select; hy_set_up has done all work before it.  Returns the exit status. */
static int act(trainer *t, char *program) {
    int differences = 0;
    if (t->options.list_models) {
        hy_print_models(t);
        return 0;
    }
    if (t->options.check) {
        if (hy_check_device(t, &differences) != GT_OK) return fail(t, EXIT_FAILURE);
        return differences ? EXIT_CHECK : 0;
    }
    if (t->options.plan.count) return hy_plan_models(t) == GT_OK ? 0 : fail(t, EXIT_FAILURE);
    if (t->options.bench.count) return hy_bench_models(t) == GT_OK ? 0 : fail(t, EXIT_FAILURE);
    if (t->options.profile) return hy_profile_step(t) == GT_OK ? 0 : fail(t, EXIT_FAILURE);
    if (*t->options.generate && hy_options_int8(&t->options) && hy_round_weights(t) != GT_OK)
        return fail(t, EXIT_FAILURE);
    if (*t->options.generate) return hy_print_text(t) == GT_OK ? 0 : fail(t, EXIT_FAILURE);
    if (*t->options.eval && (*t->options.score ? hy_print_score(t) : hy_print_held_out(t)) != GT_OK)
        return fail(t, EXIT_FAILURE);
    if (*t->options.eval) return hy_interrupted(t) ? EXIT_SIGNAL + hy_interrupted(t) : 0;
    if (t->steps >= t->options.steps) return show_complete(t);
    if (hy_run_training(t) != GT_OK) {
        const int status = fail(t, EXIT_FAILURE);
        if (!t->has_lost_device || strcmp(t->options.fallback, "cpu")) return status;
        fall_back(t, program);
        return fail(t, EXIT_FAILURE);
    }
    if (*t->not_saved) {
        hy_fail(GT_ERROR_VALUE, "%s", t->not_saved);
        return fail(t, EXIT_FAILURE);
    }
    if (hy_interrupted(t)) return EXIT_SIGNAL + hy_interrupted(t);
    return t->options.gates_strict && hy_count_gates(t, HY_FAIL) ? EXIT_GATE : 0;
}

int main(int argc, char **argv) {
    static trainer t;
    int status;
    stop_spinning(argv);
    t.ranks.size = 1;
    if (hy_streams_open() != GT_OK) return fail(&t, EXIT_FAILURE);
    if (hy_ranks_open(&t.ranks) != GT_OK) return fail(&t, EXIT_FAILURE);
    share_cores(&t.ranks);
    if (hy_options_parse(&t.options, argc, argv) != GT_OK) return finish(&t, fail(&t, EXIT_BAD_OPTION));
    if (t.options.help || t.options.help_all) {
        t.options.help_all ? hy_options_help_all(stdout) : hy_options_help(stdout);
        return finish(&t, 0);
    }
    if (t.options.version) {
        printf("hybrid_train %d.%d.%d\n", GT_VERSION_MAJOR, GT_VERSION_MINOR, GT_VERSION_PATCH);
        return finish(&t, 0);
    }
    hy_screen_open(&t.screen, stdout);
    if (t.ranks.size > 1)
        t.screen.is_terminal = t.screen.is_live = t.screen.has_colour = 0; /* mpirun's terminal, not the user's */
    gt_status error = hy_set_up(&t, argv[0]);
    if (error != GT_OK)
        status = fail(&t, error < GT_ERROR_UNSUPPORTED ? EXIT_BAD_OPTION : EXIT_FAILURE);
    else
        status = act(&t, argv[0]);
    status = finish(&t, status);
    clean_up(&t);
    return status;
}
