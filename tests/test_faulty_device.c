/* What hybrid_train does when its device fails: it says where, saves what is still whole, and how to go on.
 *
 *     test_faulty_device PROGRAM     hybrid_train with tests/faulty_device.c in the place of CUDA */
#define _XOPEN_SOURCE 700
#include "trainer.h"
#include <unistd.h>

#define RUN "--hidden 16 --layers 1 --batch 2 --seq 16 --data greek.txt --sample 0 --steps 20 --eval-every 7 "

static int exists(const char *path) { return !access(path, F_OK); }

/* A run whose device fails; 1 if it ends with status 1 and says both texts. */
static int fails(const char *at, const char *line, const char *text1, const char *text2) {
    setenv("HY_FAULT", at, 1);
    int ok = says(1, line, text1, text2);
    unsetenv("HY_FAULT");
    return ok;
}

/* The loss of a whole run of the same options, on a device that works. */
static double whole_loss(const char *options) {
    char *out;
    if (!CHECK(run_program(&out, RUN "%s --device cuda", options) == 0)) puts(out);
    double loss = final_loss(out);
    free(out);
    return loss;
}

/* The step that failed left the weights alone: they are saved, and the run that goes on is as one that never failed. */
static void test_saves(void) {
    char *out;
    double loss = whole_loss("");
    remove("a.st");
    CHECK(fails("gemm 1000", RUN "--save a.st --save-every 0",
                " on a device that fails: layer 0: cublasLtMatmul: an illegal", "a.st goes on from step "));
    CHECK(exists("a.st"));
    if (!CHECK(run_program(&out, "--resume a.st --device cpu") == 0)) puts(out);
    CHECK(strstr(out, "going on") && final_loss(out) == loss);
    free(out);
    /* in an evaluation, after a step */
    remove("e.st");
    CHECK(fails("gemm 420", RUN "--save e.st --save-every 0 --eval-every 2",
                "on a device that fails: ", "on the CPU with --device cpu --resume"));
    if (!CHECK(run_program(&out, "--resume e.st --device cpu") == 0)) puts(out);
    CHECK(final_loss(out) == loss);
    free(out);
}

/* A device that is lost for good cannot be read: the last file stays, or there is none. */
static void test_lost(void) {
    char *out;
    double loss = whole_loss("");
    remove("b.st");
    CHECK(fails("gemm 1000 for good", RUN "--save b.st --save-every 2", "b.st goes on from step ",
                "on the CPU with --device cpu --resume"));
    if (!CHECK(run_program(&out, "--resume b.st --device cpu") == 0)) puts(out);
    CHECK(final_loss(out) == loss);
    free(out);
    remove("c.st");
    CHECK(fails("gemm 1000 for good", RUN "--save c.st --save-every 0", "nothing is saved yet",
                "; --device cpu runs on the CPU"));
    CHECK(!exists("c.st"));
    CHECK(fails("gemm 1000", RUN, "cublasLtMatmul: an illegal", "; --device cpu runs on the CPU"));
    CHECK(fails("gemm 2", RUN, "cublasLtMatmul: an illegal", "; --device cpu runs on the CPU"));
}

/* In the middle of an update the weights are those of no step, and of tracks the states are: neither is saved. */
static void test_not_whole(void) {
    remove("d.st");
    CHECK(fails("adamw 9", RUN "--save d.st --save-every 0", "step 9 on a device that fails: cuda adamw: an illegal",
                ""));
    CHECK(!exists("d.st"));
    CHECK(fails("adamw 9", RUN "--save d.st --save-every 4", "d.st goes on from step 8", "cuda adamw"));
    remove("d.st");
    CHECK(fails("gemm 1000", RUN "--stateful --save d.st --save-every 0", "cublasLtMatmul: an illegal", ""));
    CHECK(!exists("d.st"));
}

/* Who asked for the device by name is not sent to the CPU. */
static void test_by_name(void) {
    char *out;
    setenv("HY_FAULT", "gemm 1000", 1);
    CHECK(run_program(&out, RUN "--device cuda") == 1);
    unsetenv("HY_FAULT");
    CHECK(strstr(out, "cublasLtMatmul: an illegal") && !strstr(out, "--device cpu"));
    free(out);
}

/* What a device tells late is of some call before; whoever waits for each knows which. */
static void test_late(void) {
    const char *late = "; --synchronize names the call",
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

int main(int argc, char **argv) {
    int status = begin_tests(argc > 1 ? argv[1] : NULL);
    if (status) return status;
    run_case("faults: what is whole is saved", test_saves);
    run_case("faults: a lost device", test_lost);
    run_case("faults: what is not whole", test_not_whole);
    run_case("faults: by name", test_by_name);
    run_case("faults: told late", test_late);
    return end_tests();
}
