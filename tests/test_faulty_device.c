/* Tests hybrid_train on a device that fails.  The program must report where the device failed, save all data that is
 * still valid, and say how to continue.
 *
 *     test_faulty_device PROGRAM FOLDER     PROGRAM: hybrid_train with tests/faulty_device.c instead of CUDA.
 *                                           FOLDER: contains the library of tests/fake_nvml.c
 */
#define _XOPEN_SOURCE 700
#include "trainer.h"
#include <unistd.h>

static const char *libraries = "."; /* folder of the library of tests/fake_nvml.c */

#define RUN "--hidden 16 --layers 1 --batch 2 --seq 16 --data greek.txt --sample 0 --steps 20 --eval-every 7 "

static int exists(const char *path) { return !access(path, F_OK); }

/* Runs the program on a device that fails at `at` (HY_FAULT).  Returns 1 if the run ends with status 1 and prints both
 * texts. */
static int fails(const char *at, const char *line, const char *text1, const char *text2) {
    setenv("HY_FAULT", at, 1);
    int ok = says(1, line, text1, text2);
    unsetenv("HY_FAULT");
    return ok;
}

/* The final loss of an uninterrupted run with the same options, on a device that works. */
static double whole_loss(const char *options) {
    char *out;
    if (!CHECK(run_program(&out, RUN "%s --device cuda", options) == 0)) puts(out);
    double loss = final_loss(out);
    free(out);
    return loss;
}

/* A failed step leaves the weights unchanged, so the program saves them.  The resumed run must end with the loss of a
 * run without failure. */
static void test_saves(void) {
    char *out;
    double loss = whole_loss("");
    remove("a.st");
    CHECK(fails("gemm 1000", RUN "--save a.st --save-every 0",
                " on a device that fails: layer 0: cublasLtMatmul: an illegal", "use --resume a.st, which has step "));
    CHECK(exists("a.st"));
    if (!CHECK(run_program(&out, "--resume a.st --device cpu") == 0)) puts(out);
    CHECK(strstr(out, "resumed") && final_loss(out) == loss);
    free(out);
    /* the device fails in an evaluation, after a step */
    remove("e.st");
    CHECK(fails("gemm 420", RUN "--save e.st --save-every 0 --eval-every 2",
                "on a device that fails: ", "and --device cpu for the CPU"));
    if (!CHECK(run_program(&out, "--resume e.st --device cpu") == 0)) puts(out);
    CHECK(final_loss(out) == loss);
    free(out);
}

/* A device that is lost for good cannot be read, so the program keeps the file that it saved last, if any. */
static void test_lost(void) {
    char *out;
    double loss = whole_loss("");
    remove("b.st");
    CHECK(fails("gemm 1000 for good", RUN "--save b.st --save-every 2", "use --resume b.st, which has step ",
                "and --device cpu for the CPU"));
    if (!CHECK(run_program(&out, "--resume b.st --device cpu") == 0)) puts(out);
    CHECK(final_loss(out) == loss);
    free(out);
    remove("c.st");
    CHECK(fails("gemm 1000 for good", RUN "--save c.st --save-every 0", "nothing is saved yet",
                "; use --device cpu to run on the CPU"));
    CHECK(!exists("c.st"));
    CHECK(fails("gemm 1000", RUN, "cublasLtMatmul: an illegal", "; use --device cpu to run on the CPU"));
    CHECK(fails("gemm 2", RUN, "cublasLtMatmul: an illegal", "; use --device cpu to run on the CPU"));
}

/* If the device fails in the middle of an update, the weights belong to no step, so the program does not save them.
 * With --stateful, the carried states belong to no step after a failure in any call. */
static void test_not_whole(void) {
    remove("d.st");
    CHECK(fails("adamw 9", RUN "--save d.st --save-every 0", "step 9 on a device that fails: cuda adamw: an illegal",
                ""));
    CHECK(!exists("d.st"));
    CHECK(fails("adamw 9", RUN "--save d.st --save-every 4", "use --resume d.st, which has step 8", "cuda adamw"));
    remove("d.st");
    CHECK(fails("gemm 1000", RUN "--stateful --save d.st --save-every 0", "cublasLtMatmul: an illegal", ""));
    CHECK(!exists("d.st"));
}

/* Whether the rows of a continued run's log equal those of an uninterrupted run.  At most one row may lack the held-out
 * loss, because an evaluation in which the device fails gives none. */
static int continues(char *log, char *whole) {
    int good = 1, missing = 0;
    for (int row = 0; row < 21 && good; row++) {
        const size_t length = strcspn(log, "\n"), other = strcspn(whole, "\n");
        char *field = log, *rest = whole;
        for (int i = 0; i < 3; i++) field = strchr(field, ',') + 1, rest = strchr(rest, ',') + 1;
        missing += *field == ',' && *rest != ',';
        good = !strncmp(log, whole, (size_t)(field - log));
        if (*field == ',') rest += strcspn(rest, ",");
        good &= log + length - field == whole + other - rest && !strncmp(field, rest, (size_t)(log + length - field));
        log += length + 1, whole += other + 1;
    }
    return good && missing <= 1;
}

/* With --fallback cpu, a new process continues on the CPU from the file that was saved last.  It reaches the same
 * numbers and continues the same log. */
static void test_fallback(void) {
    char *out, *whole, *log;
    int rows;
    remove("f.st"), remove("f.csv"), remove("w.csv");
    CHECK(run_program(&whole, RUN "--device cuda --csv w.csv") == 0);
    static const char *const faults[] = {"gemm 1000", "gemm 1000 for good"};
    for (int i = 0; i < 2; i++) {
        remove("f.st"), remove("f.csv");
        setenv("HY_FAULT", faults[i], 1);
        CHECK(run_program(&out, RUN "--save f.st --save-every 2 --fallback cpu --csv f.csv") == 0);
        unsetenv("HY_FAULT");
        if (!CHECK(strstr(out, "cublasLtMatmul: ") && strstr(out, "continuing on the CPU from step ") &&
                   strstr(out, "device      CPU") && final_loss(out) == final_loss(whole)))
            puts(out);
        free(out);
        log = numbers_of("f.csv", &rows), out = numbers_of("w.csv", &rows);
        CHECK(rows == 21 && continues(log, out));
        free(log), free(out);
    }
    /* without a saved file, the program cannot continue */
    remove("g.st");
    CHECK(fails("gemm 1000 for good", RUN "--save g.st --save-every 0 --fallback cpu", "an illegal",
                "fallback: no model file was saved, so the run cannot continue"));
    CHECK(says(2, RUN "--fallback cpu", "fallback: cpu has no effect without --save", ""));
    free(whole);
}

/* A run with --device cuda does not fall back to the CPU. */
static void test_by_name(void) {
    char *out;
    setenv("HY_FAULT", "gemm 1000", 1);
    CHECK(run_program(&out, RUN "--device cuda") == 1);
    unsetenv("HY_FAULT");
    CHECK(strstr(out, "cublasLtMatmul: an illegal") && !strstr(out, "--device cpu"));
    free(out);
}

/* An error that a later call reports does not tell which call failed.  With --synchronize the program waits after each
 * call, and so names the failed call. */
static void test_late(void) {
    const char *late = "; run again with --synchronize to see which call failed",
               *named = ": layer 0: backward, branches: wkv_ssm_backward: a kernel: an illegal";
    char *out;
    double loss = whole_loss("");
    setenv("HY_FAULT", "late 9", 1);
    CHECK(run_program(&out, RUN "--device cuda") == 1);
    CHECK(strstr(out, " on a device that fails: a kernel: an illegal") && strstr(out, late) && !strstr(out, "layer 0"));
    free(out);
    CHECK(run_program(&out, RUN "--device cuda --synchronize") == 1);
    CHECK(strstr(out, named) && !strstr(out, late));
    free(out);
    unsetenv("HY_FAULT");
    if (!CHECK(run_program(&out, RUN "--device cuda --synchronize") == 0 && final_loss(out) == loss)) puts(out);
    free(out);
}

/* Returns the last line of a file, without its newline.  The caller frees it. */
static char *last_line(const char *path) {
    char *text = read_string(path), *end = text + strlen(text);
    while (end > text && end[-1] == '\n') *--end = 0;
    char *start = strrchr(text, '\n'), *line = strdup(start ? start + 1 : text);
    free(text);
    return line;
}

/* --watch logs temperature, load and memory from NVML, summarises them at the end, and warns of heat. */
static void test_watch(void) {
    char *out, *line;
    remove("h.csv"), remove("h.st");
    unsetenv("LD_LIBRARY_PATH");
    CHECK(says(1, RUN "--device cuda --watch", "watch: libnvidia-ml.so.1: ", ""));
    setenv("LD_LIBRARY_PATH", libraries, 1);
    setenv("HY_NVML", "no driver", 1);
    CHECK(says(1, RUN "--device cuda --watch", "watch: nvmlInit_v2: Driver Not Loaded", ""));
    setenv("HY_NVML", "no GPU", 1);
    CHECK(says(1, RUN "--device cuda --watch", "watch: the GPU at 0000:0A:00.0: Not Found", ""));
    setenv("HY_NVML", "81", 1);
    if (!CHECK(run_program(&out, RUN "--device cuda --watch --csv h.csv --save h.st") == 0)) puts(out);
    char *warning = strstr(out, "the GPU has a temperature of 81 degrees Celsius, above 80");
    CHECK(warning && !strstr(warning + 40, "degrees Celsius"));
    CHECK(strstr(out, "GPU            93 % used, at most 81 degrees, at most 10240 MiB of its"));
    free(out);
    line = last_line("h.csv");
    CHECK(strlen(line) > 14 && !strcmp(line + strlen(line) - 13, ",93,81,,10240"));
    free(line);
    setenv("HY_NVML", "80", 1);
    CHECK(run_program(&out, "--resume h.st --steps 22 --device cuda --watch --csv h.csv") == 0);
    CHECK(!strstr(out, "degrees Celsius"));
    free(out);
    line = last_line("h.csv");
    CHECK(!strncmp(line, "22,", 3) && !strcmp(line + strlen(line) - 13, ",93,80,,10240"));
    free(line);
    unsetenv("LD_LIBRARY_PATH"), unsetenv("HY_NVML");
}

int main(int argc, char **argv) {
    int status = begin_tests(argc > 1 ? argv[1] : NULL);
    if (argc > 2) libraries = argv[2];
    if (status) return status;
    run_case("faults: what is whole is saved", test_saves);
    run_case("faults: a lost device", test_lost);
    run_case("faults: what is not whole", test_not_whole);
    run_case("faults: fallback", test_fallback);
    run_case("faults: by name", test_by_name);
    run_case("faults: told late", test_late);
    run_case("watch", test_watch);
    return end_tests();
}
