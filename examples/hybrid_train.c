/* hybrid_train: trains an RWKV-6 + Mamba-2 language model on a text, on a GPU or on the CPU.
 *
 * From here: hybrid_trainer.h (the state of a run, and the files that work on it), hybrid_config (options), hybrid_data
 * (text and batches), hybrid_model (the model), hybrid_ops (what it computes with), hybrid_gates (health checks),
 * hybrid_check (GPU against CPU), hybrid_bench (measurements), hybrid_calls and hybrid_profile (where a step goes),
 * hybrid_plan (memory on a GPU that is not there),
 * hybrid_log (streams and the log), hybrid_screen (what is shown), hybrid_save (model files), hybrid_limit (memory of a
 * container), hybrid_generate (text from a model). */
#define _XOPEN_SOURCE 700 /* setenv, execvp */
#include "hybrid_trainer.h"
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { EXIT_BAD_OPTION = 2, EXIT_GATE = 3, EXIT_CHECK = 4, EXIT_SIGNAL = 128 };

static void clean_up(trainer *t) {
    hy_model_destroy(t->model);
    if (t->backend) t->backend->close(t->backend);
    hy_batch_free(&t->batch);
    hy_batch_free(&t->first);
    hy_tracks_free(&t->tracks);
    hy_file_close(&t->file);
    hy_text_free(&t->text);
}

/* Prints the last error, once: a stream that cannot be written says so again as it is closed. */
static int tell(int status) {
    static char told[640];
    char message[sizeof told];
    snprintf(message, sizeof message, "%s", hy_last_error());
    hy_make_plain(message);
    if (strcmp(told, message)) fprintf(stderr, "hybrid_train: %s\n", message);
    memcpy(told, message, sizeof told);
    return status;
}

/* Prints the error behind the report.  Call it only while standard output is open. */
static int fail(int status) {
    char message[640];
    snprintf(message, sizeof message, "%s", hy_last_error());
    hy_flush_report(); /* finish looks whether that worked */
    hy_fail(GT_ERROR_VALUE, "%s", message);
    return tell(status);
}

/* Closes the log and the report; the exit status, which is 1 if a part of them is lost. */
static int finish(trainer *t, int status) {
    int bad = status == EXIT_BAD_OPTION;
    if (hy_log_close(&t->log) != GT_OK) status = fail(EXIT_FAILURE);
    if (hy_close(stdout, "standard output") != GT_OK) status = tell(EXIT_FAILURE);
    return bad ? EXIT_BAD_OPTION : status;
}

/* Idle OpenMP threads spin by default, which slows the program down many times over when it has to
 * share the cores.  Not at all is no better: loops here are short, and to sleep and wake at each took
 * 40 % of the time on two free cores.  So GNU's OpenMP spins for some microseconds, others not.
 * OpenMP reads its settings before main: set them and start again. */
static void stop_spinning(char **argv) {
#ifdef _OPENMP
    if (!getenv("OMP_WAIT_POLICY") && !setenv("GOMP_SPINCOUNT", "1000", 0) && !setenv("OMP_WAIT_POLICY", "passive", 1))
        execvp(argv[0], argv); /* if it fails the program just goes on */
#else
    (void)argv;
#endif
}

/* A run that has no step left.  Its log may lack the last held-out loss. */
static int show_complete(trainer *t) {
    printf("%s: the run is complete, step %lld of %lld; a larger --steps makes it longer\n", t->options.resume,
           (long long)t->steps, (long long)t->options.steps);
    if (!*t->options.csv) return 0;
    if (!t->log.file) {
        printf("%s: not written: a complete run adds no row\n", t->options.csv);
        return 0;
    }
    if (hy_flush_report() != GT_OK || hy_complete_log(t) != GT_OK) return fail(EXIT_FAILURE);
    printf("%s: its last row has the held-out loss now, %.4f\n", t->options.csv, t->held_out);
    return 0;
}

/* Runs the mode that the options name, after set_up.  Returns the exit status. */
static int act(trainer *t) {
    int differences = 0;
    if (t->options.list_models) {
        hy_print_models(t);
        return 0;
    }
    if (t->options.check) {
        if (hy_check_device(t, &differences) != GT_OK) return fail(EXIT_FAILURE);
        return differences ? EXIT_CHECK : 0;
    }
    if (t->options.plan.count) return hy_plan_models(t) == GT_OK ? 0 : fail(EXIT_FAILURE);
    if (t->options.bench.count) return hy_bench_models(t) == GT_OK ? 0 : fail(EXIT_FAILURE);
    if (t->options.profile) return hy_profile_step(t) == GT_OK ? 0 : fail(EXIT_FAILURE);
    if (*t->options.generate) return hy_print_text(t) == GT_OK ? 0 : fail(EXIT_FAILURE);
    if (*t->options.eval) return hy_print_held_out(t) == GT_OK ? 0 : fail(EXIT_FAILURE);
    if (t->steps >= t->options.steps) return show_complete(t);
    if (hy_run_training(t) != GT_OK) return fail(EXIT_FAILURE);
    if (*t->not_saved) {
        hy_fail(GT_ERROR_VALUE, "%s", t->not_saved);
        return fail(EXIT_FAILURE);
    }
    if (hy_interrupted()) return EXIT_SIGNAL + hy_interrupted();
    return t->options.gates_strict && hy_count_gates(t, HY_FAIL) ? EXIT_GATE : 0;
}

int main(int argc, char **argv) {
    static trainer t;
    int status;
    stop_spinning(argv);
    if (hy_streams_open() != GT_OK) return fail(EXIT_FAILURE);
    if (hy_options_parse(&t.options, argc, argv) != GT_OK) return finish(&t, fail(EXIT_BAD_OPTION));
    if (t.options.help) {
        hy_options_help(stdout);
        return finish(&t, 0);
    }
    if (t.options.version) {
        printf("hybrid_train %d.%d.%d\n", GT_VERSION_MAJOR, GT_VERSION_MINOR, GT_VERSION_PATCH);
        return finish(&t, 0);
    }
    hy_screen_open(&t.screen, stdout);
    gt_status error = hy_set_up(&t, argv[0]);
    if (error != GT_OK)
        status = fail(error < GT_ERROR_UNSUPPORTED ? EXIT_BAD_OPTION : EXIT_FAILURE);
    else
        status = act(&t);
    status = finish(&t, status);
    clean_up(&t);
    return status;
}
