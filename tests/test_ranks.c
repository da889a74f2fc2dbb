/* Tests of hybrid_train under mpirun: compares runs with two and four ranks with one process, and ends runs early.
 *
 *     test_ranks HYBRID_TRAIN MPIRUN [short | long | nccl FOLDER [few]]
 *
 * short: without the comparisons, which take most of the time.  long: 200 steps, and kills at random moments.  nccl:
 * HYBRID_TRAIN has a device in host memory, and FOLDER contains the library of tests/fake_nccl.c.  few: only one test,
 * for a slow device. */
#define _XOPEN_SOURCE 700
#include "trainer.h"
#include "hybrid_file.h"
#include <signal.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { IN_TIME = 90 }; /* after one rank fails, all ranks must end within so many seconds; a quiet machine needs one */

static char mpirun[4096], hybrid_train[4096];

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void pause_for(double seconds) {
    nanosleep(&(struct timespec){(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)}, NULL);
}

/* ---- runs ----------------------------------------------------------------------------------- */

/* Starts mpirun with arguments such as "-n 2 ./rank --steps 3". */
static pid_t start_mpirun(const char *line) {
    snprintf(program, sizeof program, "%s", mpirun);
    const pid_t child = start_program(line);
    snprintf(program, sizeof program, "%s", hybrid_train);
    return child;
}

/* Runs hybrid_train with this line on `ranks` ranks; 0: without mpirun.  The exit status must be `status`.  Returns the
 * output. */
static char *run(int ranks, int status, const char *format, ...) {
    char line[3000], whole[4000];
    va_list list;
    va_start(list, format);
    vsnprintf(line, sizeof line, format, list);
    va_end(list);
    if (ranks)
        snprintf(whole, sizeof whole, "-n %d ./rank %s", ranks, line);
    else
        snprintf(whole, sizeof whole, "%s", line);
    const int got = wait_for(ranks ? start_mpirun(whole) : start_program(whole));
    char *out = read_string("out.txt");
    if (!CHECK(got == status)) printf("  %d ranks: %s\n  exit with %d and say:\n%s\n", ranks, line, got, out);
    return out;
}

static void run_quietly(int ranks, const char *line, const char *more) { free(run(ranks, 0, "%s %s", line, more)); }

/* Runs mpirun, which must exit within IN_TIME with `status` and print both texts.  status 0 accepts any failure,
 * because ranks may exit with different statuses. */
static int ranks_say(int status, const char *line, const char *text1, const char *text2) {
    const double start = now();
    const int got = wait_for(start_mpirun(line)), is_in_time = now() - start < IN_TIME;
    char *out = read_string("out.txt");
    const int ok = (status ? got == status : got > 0) && is_in_time && strstr(out, text1) && strstr(out, text2);
    if (!ok) printf("  mpirun %s\n  exits with %d, in time: %d, and says:\n%s\n", line, got, is_in_time, out);
    free(out);
    return ok;
}

/* Returns the process id that ./rank writes for a rank, or 0 if it does not appear. */
static pid_t process_of(int rank) {
    char name[32];
    snprintf(name, sizeof name, "pid.%d", rank);
    if (!CHECK(wait_for_lines(name, 1))) return 0;
    char *text = read_string(name);
    const pid_t process = (pid_t)atoi(text);
    free(text);
    return process;
}

/* ---- model files and logs ------------------------------------------------------------------- */

static float *read_floats(hy_file *file, const hy_file_tensor *t) {
    float *numbers = malloc((size_t)t->count * sizeof(float) + 1);
    if (!numbers || hy_file_read(file, t, numbers) != GT_OK) abort();
    return numbers;
}

/* Returns the relative l2 difference of all tensors whose names begin with the prefix.  0: equal bits; -1: the files
 * have different tensors. */
static double file_distance(const char *one, const char *two, const char *prefix) {
    hy_file a, b;
    double difference = 0, norm = 0;
    int count = 0;
    if (!CHECK(hy_file_open(&a, one) == GT_OK && hy_file_open(&b, two) == GT_OK)) {
        printf("  %s\n", hy_last_error());
        return -1;
    }
    for (int i = 0; i < a.tensor_count; i++) {
        const hy_file_tensor *t = a.tensors + i, *u = hy_file_tensor_of(&b, t->name);
        if (strncmp(t->name, prefix, strlen(prefix)) || t->dtype != HY_FILE_F32) continue;
        if (!u || u->count != t->count) return -1;
        float *x = read_floats(&a, t), *y = read_floats(&b, u);
        for (int64_t k = 0; k < t->count; k++) {
            difference += ((double)x[k] - y[k]) * ((double)x[k] - y[k]);
            norm += (double)x[k] * x[k];
        }
        count++;
        free(x), free(y);
    }
    hy_file_close(&a), hy_file_close(&b);
    return count && norm > 0 ? sqrt(difference / norm) : -1;
}

static int within(const char *one, const char *two, const char *prefix, double bound) {
    const double distance = file_distance(one, two, prefix);
    const int ok = distance >= 0 && distance <= bound;
    if (!ok) printf("  %s and %s: %s... differ by %.3g, more than %.3g\n", one, two, prefix, distance, bound);
    return ok;
}

/* Returns the largest difference in one column of two logs, or -1 if the logs have different rows. */
static double log_distance(const char *one, const char *two, int column) {
    double most = 0;
    char *text[2] = {read_string(one), read_string(two)}, *save[2], *line[2];
    int rows = 0;
    for (int i = 0; i < 2; i++) line[i] = strtok_r(text[i], "\n", &save[i]);
    for (; line[0] && line[1]; rows++) {
        double x[2];
        for (int i = 0; i < 2; i++) {
            const char *at = line[i];
            for (int k = 0; k < column && at; k++) at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL;
            x[i] = at ? atof(at) : NAN;
            line[i] = strtok_r(NULL, "\n", &save[i]);
        }
        if (!(fabs(x[0] - x[1]) <= most)) most = fabs(x[0] - x[1]);
    }
    const int is_whole = rows > 1 && !line[0] && !line[1];
    free(text[0]), free(text[1]);
    return is_whole ? most : -1;
}

enum { LOSS = 2, HELD_OUT, GRADIENT };

static int logs_within(const char *one, const char *two, int column, double bound) {
    const double distance = log_distance(one, two, column);
    const int ok = distance >= 0 && distance <= bound;
    if (!ok) printf("  %s and %s: column %d differs by %.3g, more than %.3g\n", one, two, column, distance, bound);
    return ok;
}

static const char *name_of(const char *format, int ranks) {
    static char names[8][32];
    static int last;
    last = (last + 1) % 8;
    snprintf(names[last], sizeof names[last], format, ranks);
    return names[last];
}

/* ---- agreement with one process ------------------------------------------------------------- */

#define SHORT " --sample 0 --quiet --eval-every 0 --final-eval-tokens 128 "
#define LITTLE TINY SHORT

/* The prefix of AdamW's first moment.  After one step it is (1 - beta1) times the gradient, so it shows the
 * gradient. */
static const char gradient[] = "optimizer.exp_avg.";

static void same_gradient(const char *options, double bound) {
    char more[512];
    for (int n = 0; n <= 4; n += 2) {
        snprintf(more, sizeof more, "%s --steps 1 --clip 0 --save g%d.st", n ? "" : "--device cpu", n);
        run_quietly(n, options, more);
    }
    CHECK(within("g0.st", "g2.st", gradient, bound));
    CHECK(within("g0.st", "g4.st", gradient, bound));
    if (system("rm g?.st")) abort();
}

/* Tests that ranks compute the gradient of one process.  The first models have windows that do not fit OpenBLAS's
 * blocks of products.  The others test all options that depend on windows. */
static void test_gradient(void) {
    same_gradient("--device cpu" SHORT, 1e-6);
    same_gradient("--device cpu --model GF --batch 4 --seq 33" SHORT, 1e-6);
    same_gradient(LITTLE "--model GF --batch 8 --dropout 0.2 --ema 0.9", 1e-6);
    same_gradient(LITTLE "--model CP --batch 8 --micro-batch 2 --dropout 0.2", 1e-6);
    same_gradient(LITTLE "--stateful --split tracks --seq 50", 1e-6);
}

/* Compares the losses of three steps, the curve and the final loss.  Two runs with four ranks must have the same bits.
 * A mean over only 128 held-out tokens could not be compared: ranks have other batches, and so other windows. */
static void test_losses(void) {
    const char *line =
        TINY "--sample 0 --steps 3 --batch 8 --micro-batch 2 --eval-every 1 --eval-tokens 512 --keep-best";
    for (int n = 0; n <= 5; n = n == 4 ? 5 : n == 5 ? 6 : n + 2) {
        char more[128];
        snprintf(more, sizeof more, "--save l%d.st --csv l%d.csv", n, n);
        run_quietly(n == 5 ? 4 : n, line, more);
    }
    for (int n = 2; n <= 4; n += 2) {
        CHECK(logs_within("l0.csv", name_of("l%d.csv", n), LOSS, 1e-5));
        CHECK(logs_within("l0.csv", name_of("l%d.csv", n), HELD_OUT, 1e-5));
        CHECK(within("l0.st.best", name_of("l%d.st.best", n), "", 1e-4));
    }
    int rows;
    char *first = numbers_of("l4.csv", &rows), *again = numbers_of("l5.csv", &rows);
    CHECK(rows == 4 && !strcmp(first, again));
    free(first), free(again);
    CHECK(within("l4.st", "l5.st", "", 0));
    /* only one rank writes files */
    CHECK(!access("l4.st", R_OK) && access("l4.st.1", F_OK) && access("l4.csv.1", F_OK));
}

/* A run that resumes with the same number of ranks must equal a run without interruption.  With another number of ranks
 * it must stay close. */
static void test_resume(void) {
    const char *line = LITTLE "--schedule constant --stateful --split tracks --ema 0.9 --save-every 0";
    run_quietly(2, line, "--steps 4 --save whole.st --csv whole.csv");
    run_quietly(2, line, "--steps 2 --save half.st --csv r2.csv");
    for (int n = 0; n <= 4; n += 2) {
        char more[256];
        if (n != 2 && system(n ? "cp r2.csv.all r4.csv" : "cp r2.csv r2.csv.all && cp r2.csv r0.csv")) abort();
        snprintf(more, sizeof more, "--sample 0 --quiet --steps 4 --save r%d.st --csv r%d.csv", n, n);
        run_quietly(n, "--resume half.st", more);
    }
    CHECK(logs_within("whole.csv", "r2.csv", LOSS, 0) && logs_within("whole.csv", "r2.csv", GRADIENT, 0));
    CHECK(within("whole.st", "r2.st", "", 0));
    for (int n = 0; n <= 4; n += 4) {
        CHECK(logs_within("whole.csv", name_of("r%d.csv", n), LOSS, 1e-5));
        CHECK(within("whole.st", name_of("r%d.st", n), "", 1e-5));
        CHECK(within("whole.st", name_of("r%d.st", n), "state.", 1e-5));
    }
    /* several ranks can complete the log of a complete run; with --eval they share the held-out part */
    free(run(2, 0, "--resume r2.st --csv r2.csv"));
    char *one = run(0, 0, "--eval r2.st"), *two = run(4, 0, "--eval r2.st");
    CHECK(strstr(one, "held-out loss ") && strstr(two, "held-out loss "));
    CHECK(!strncmp(strstr(one, "held-out loss "), strstr(two, "held-out loss "), strlen("held-out loss 1.2345")));
    free(one), free(two);
}

/* Each rank must need the memory of a single process with the rank's share of the batch. */
static void test_plan(void) {
    char *one = run(0, 0, "--plan 4 --model HY"), *four = run(4, 0, "--plan 16 --model HY");
    const char *a = strstr(one, "\nHY,"), *b = strstr(four, "\nHY,");
    CHECK(strstr(four, "on each of 4 ranks") && a && b);
    for (int i = 0; i < 8 && a && b; i++) a = strchr(a, ',') + 1, b = strchr(b, ',') + 1;
    CHECK(a && b && !strncmp(a, b, 40));
    free(one), free(four);
}

/* ---- refusals ------------------------------------------------------------------------------- */

static void test_refusals(void) {
    char *greek = read_string("greek.txt");
    greek[4000] ^= 1;
    write_file("other.txt", greek, strlen(greek));
    free(greek);
    run_quietly(0, LITTLE "--steps 1", "--save m.st");
    write_string("kept.csv", "kept\n");
    static const struct {
        const char *line, *text1, *text2;
    } cases[] = {
        {"-n 3 ./rank " LITTLE "--steps 1", "batch: 4 windows are not a multiple of 3 ranks; the nearest is 3", ""},
        {"-n 2 ./rank " LITTLE "--batch 8 --micro-batch 3", "micro-batch: 3 does not divide the windows of each of 2",
         "4"},
        {"-n 2 ./rank --generate m.st", "--generate runs in one process, but there are 2 ranks", ""},
        {"-n 2 ./rank --no-option 1", "unknown option 'no-option'", ""},
        {"-n 1 ./rank " LITTLE "--lr 0.01 : -n 1 ./rank " LITTLE "--lr 0.02",
         "rank 1: lr: '0.02' here, '0.01' on rank 0", ""},
        {"-n 1 ./rank " LITTLE "--csv kept.csv : -n 1 ./rank " LITTLE "--csv x.csv",
         "rank 1: csv: 'x.csv' here, 'kept.csv'", ""},
        {"-n 1 ./rank " LITTLE "--data greek.txt : -n 1 ./rank " LITTLE "--data other.txt",
         "rank 1: SHA-256 of the text: '", "' on rank 0"},
        {"-n 1 ./rank " LITTLE "--data greek.txt : -n 1 ./rank " LITTLE "--data none.txt",
         "rank 1: data file none.txt: No such file", ""},
        {"-n 1 ./rank " LITTLE ": -n 1 ./rank --version",
         "ranks are not at the same point: rank 0 is at 'share', rank 1 at", ""}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        CHECK(ranks_say(strstr(cases[i].text1, "at the same point") ? 0 : 2, cases[i].line, cases[i].text1,
                        cases[i].text2));
    char *kept = read_string("kept.csv");
    CHECK(!strcmp(kept, "kept\n") && access("x.csv", F_OK) && access("kept.csv.1", F_OK));
    free(kept);
    setenv("PMI_SIZE", "2", 1), setenv("PMI_RANK", "0", 1);
    CHECK(says(1, LITTLE "--steps 1", "2 processes were started, but they cannot reach each other", ""));
    unsetenv("PMI_SIZE"), unsetenv("PMI_RANK");
}

/* ---- runs that end early -------------------------------------------------------------------- */

#define ENDLESS LITTLE "--steps 1000000 --log-every 1000000 --save-every 1 --save e.st --csv e.csv "

static void remove_run(void) {
    if (system("rm -f e.* pid.*")) abort();
}

/* After a run has ended, its model file and its log must be complete: the file loads, and the log has its first
 * step. */
static void check_files(int ranks) {
    char *out = run(ranks, 0, "--eval e.st");
    CHECK(strstr(out, "held-out loss "));
    free(out);
    char *log = read_string("e.csv");
    CHECK(strlen(log) > 2 && strchr(log, '\n')[1] == '1');
    free(log);
}

/* Sends a signal to rank 1 after some steps.  All ranks must end in time, and print both texts. */
static void end_by(int ranks, int sent, int status, const char *options, const char *text1, const char *text2) {
    char line[1024];
    snprintf(line, sizeof line, "-n %d ./rank " ENDLESS "%s", ranks, options);
    remove_run();
    const pid_t child = start_mpirun(line);
    const pid_t process = process_of(1);
    if (!CHECK(wait_for_lines("e.csv", 4) && process > 1 && !kill(process, sent))) kill(child, SIGTERM);
    const double start = now();
    const int got = wait_for(child);
    const double seconds = now() - start;
    char *out = read_string("out.txt");
    if (!CHECK(seconds < IN_TIME && got == status && strstr(out, text1) && strstr(out, text2)))
        printf("  mpirun %s\n  exits with %d after %.0f s and says:\n%s\n", line, got, seconds, out);
    free(out);
    check_files(0);
}

static void test_ends(void) {
    end_by(2, SIGKILL, 128 + SIGKILL, "", "rank 1", "signal 9 (Killed)");
    end_by(4, SIGSTOP, 1, "--stall-timeout 6", "rank 0: no progress for 8 s: it waits for ", "step ");
    end_by(2, SIGUSR1, 128 + SIGUSR1, "", "interrupted", "held-out loss ");
    remove_run();
    CHECK(ranks_say(1, "-n 2 ./rank " LITTLE "--steps 2 --csv /dev/full", "rank 0: cannot write /dev/full: No space",
                    ""));
    /* a single process whose log goes to a pipe that nobody reads */
    if (mkfifo("e.csv", 0600)) abort();
    CHECK(says(1, LITTLE "--steps 2 --csv e.csv --stall-timeout 6",
               "no progress for 6 s; last progress: ", "the log comes next"));
    remove_run();
}

/* ---- long ----------------------------------------------------------------------------------- */

static void test_two_hundred_steps(void) {
    /* at the default rate 0.004, rounding alone changes this loss by more, as --micro-batch in one process shows */
    const char *line = "--device cpu --sample 0 --quiet --steps 200 --lr 0.001";
    double loss[3];
    for (int i = 0; i < 3; i++) {
        char *out = run(2 * i, 0, "%s", line);
        loss[i] = strstr(out, "\nheld-out loss ") ? atof(strstr(out, "\nheld-out loss ") + 15) : NAN;
        free(out);
    }
    printf("  held-out loss after 200 steps: %.4f, with 2 ranks %.4f, with 4 %.4f\n", loss[0], loss[1], loss[2]);
    CHECK(fabs(loss[1] - loss[0]) < 0.01 && fabs(loss[2] - loss[0]) < 0.01);
}

/* A run that is killed many times and resumed must end like a run that is never killed. */
static void test_kills(void) {
    enum { KILLS = 15 };
    const char *line =
        LITTLE "--steps 400 --log-every 1000 --save-every 1 --keep-best --eval-every 7 --eval-tokens 128";
    char whole[1024];
    remove_run();
    run_quietly(2, line, "--save w.st --csv w.csv");
    srand(1);
    snprintf(whole, sizeof whole, "-n 2 ./rank %s --save e.st --csv e.csv", line);
    for (int i = 0; i < KILLS; i++) {
        if (system("rm -f pid.*")) abort();
        const pid_t child = start_mpirun(whole);
        const pid_t process = process_of(i % 2);
        pause_for(1 + rand() % 1000 * 0.001);
        kill(process, SIGKILL); /* fails if the process has ended, which does no harm */
        const double start = now();
        wait_for(child);
        CHECK(now() - start < IN_TIME);
        if (!access("e.st", R_OK))
            snprintf(whole, sizeof whole, "-n 2 ./rank --resume e.st --save e.st --csv e.csv --sample 0 --quiet");
    }
    CHECK(wait_for(start_mpirun(whole)) == 0);
    CHECK(within("w.st", "e.st", "", 0) && within("w.st.best", "e.st.best", "", 0));
    int rows, all;
    char *one = numbers_of("w.csv", &all), *two = numbers_of("e.csv", &rows);
    CHECK(all == 401 && rows == all && !strcmp(one, two));
    free(one), free(two);
    remove_run();
}

/* ---- NCCL ----------------------------------------------------------------------------------- */

#define ON_GPU "--model HY --hidden 32 --layers 2 --batch 4 --seq 32 --device cuda" SHORT
#define BUCKETS ON_GPU "--hidden 160 --layers 5 --batch 2 --seq 8 "
enum { NCCL_IN_TIME = 20 }; /* seconds for a run with a failing rank; the longest run takes 10 on a quiet machine */

/* Runs the same steps with NCCL and with MPI, and if repeats > 0 with NCCL again.  With two ranks, a sum has two terms,
 * so MPI and NCCL give the same bits.  With more ranks they may add in another order. */
static void same_sums(int ranks, const char *options, int repeats, double bound) {
    static const char *const uses[] = {"on", "off", "on"};
    for (int i = 0; i < 2 + repeats; i++) {
        char more[160];
        snprintf(more, sizeof more, "--device cuda --nccl %s --steps 3 --save n%d.st --csv n%d.csv", uses[i], i, i);
        run_quietly(ranks, options, more);
    }
    CHECK(within("n0.st", "n1.st", "", bound) && logs_within("n0.csv", "n1.csv", LOSS, bound));
    if (repeats) CHECK(within("n0.st", "n2.st", "", 0) && logs_within("n0.csv", "n2.csv", GRADIENT, 0));
    if (system("rm n?.st n?.csv")) abort();
}

static void test_nccl_sums(void) {
    same_sums(2, ON_GPU "--model CP --batch 8 --micro-batch 2 --dropout 0.2", 0, 0);
    same_sums(2, ON_GPU "--stateful --split tracks --ema 0.9", 0, 0);
    same_sums(4, ON_GPU, 1, 1e-6);
    same_sums(0, ON_GPU, 0, 0); /* ranks = 0: a single process, without mpirun */
    /* ranks on GPUs and ranks on CPUs must compute the same */
    run_quietly(2, ON_GPU, "--steps 2 --lr 0.001 --save g.st");
    run_quietly(2, LITTLE, "--steps 2 --lr 0.001 --save c.st");
    CHECK(within("g.st", "c.st", "", 0));
}

static void test_nccl_slow(void) { same_sums(2, ON_GPU "--seq 16", 0, 0); }

/* Sums a gradient in several buckets.  Every number must be summed once in each step. */
static void test_nccl_buckets(void) {
    long sums, floats, parameters = 0;
    same_sums(2, BUCKETS, 0, 0);
    char *text = read_string("sums.1"), *plan = run(0, 0, "--plan 2 --model HY --hidden 160 --layers 5");
    CHECK(sscanf(text, "%ld sums, %ld floats", &sums, &floats) == 2);
    const char *at = strstr(plan, "\nHY,");
    for (int i = 0; i < 5 && at; i++) at = strchr(at + 1, ',');
    if (at) parameters = atol(at + 1);
    /* each tensor is padded to a multiple of 64 numbers, so the gradient has a few more numbers than the parameters */
    if (!CHECK(sums >= 3 * 3 && sums % 3 == 0 && floats >= 3 * parameters && floats < 3.1 * (double)parameters))
        printf("  %ld sums of %ld floats in 3 steps, %ld parameters\n", sums, floats, parameters);
    free(text), free(plan);
}

static void test_nccl_choice(void) {
    static const struct {
        const char *gpus, *line, *text1, *text2;
        int status;
    } cases[] = {
        {"2", "-n 2 ./rank " ON_GPU "--steps 4", "added up by NCCL 2.28.9, on the GPUs", "waiting", 0},
        {"3", "-n 4 ./rank " ON_GPU "--steps 1", "through host memory; NCCL is not used: ranks 0 and", "the same GPU",
         0},
        {"1", "-n 2 ./rank " ON_GPU "--nccl on", "nccl: ranks 0 and 1 have the same GPU, which NCCL refuses", "", 1},
        {"2", "-n 1 ./rank " ON_GPU "--steps 1 : -n 1 env LD_LIBRARY_PATH=. ./rank " ON_GPU "--steps 1",
         "through host memory; NCCL is not used: 1 of", "", 0},
        {"2", "-n 1 ./rank " ON_GPU "--nccl on : -n 1 env LD_LIBRARY_PATH=. ./rank " ON_GPU "--nccl on",
         "nccl: rank 1: ", "libnccl.so.2: ", 1},
        {"2", "-n 2 ./rank --plan 16 --model HY", "# gradients are added up by NCCL 2.28.9", "on each of 2 ranks", 0},
        {"2", "-n 2 ./rank " LITTLE "--nccl on", "nccl: on has no effect with --device cpu", "", 2},
        {"2", "-n 2 ./rank --eval g.st --nccl on", "nccl: has no effect with --eval; leave it out", "", 2},
        {"2", "-n 2 ./rank --eval g.st --device cuda", "held-out loss ", "", 0},
        {"2", "-n 2 ./rank " ON_GPU "--save x.st --fallback cpu",
         "fallback: cpu works only in one process, but there are 2", "", 2},
    };
    write_string("libnccl.so.2", "this is no library, and it is longer than an ELF header, of 64 bytes, would be\n");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        setenv("HY_GPUS", cases[i].gpus, 1);
        const int got = wait_for(start_mpirun(cases[i].line));
        char *out = read_string("out.txt");
        if (!CHECK(got == cases[i].status && strstr(out, cases[i].text1) && strstr(out, cases[i].text2)))
            printf("  mpirun %s\n  exits with %d and says:\n%s\n", cases[i].line, got, out);
        free(out);
    }
    setenv("HY_GPUS", "8", 1);
}

/* Runs `ranks` ranks with a fault.  All must end in time, and they must print both texts.  is_aborted: all must call
 * ncclCommAbort. */
static void nccl_fails(const char *fault, int ranks, const char *options, const char *text1, const char *text2,
                       int is_aborted) {
    char line[1024], name[32];
    if (system("rm -f aborted.*")) abort();
    snprintf(line, sizeof line, "-n %d ./rank " ON_GPU "--steps 1000000 %s", ranks, options);
    setenv("HY_NCCL", fault, 1);
    const double start = now();
    CHECK(ranks_say(0, line, text1, text2));
    if (!CHECK(now() - start < NCCL_IN_TIME)) printf("  %s: %.1f s\n", fault, now() - start);
    unsetenv("HY_NCCL");
    for (int i = 0; i < ranks && is_aborted; i++) {
        snprintf(name, sizeof name, "aborted.%d", i);
        if (!CHECK(!access(name, F_OK))) printf("  %s: no %s\n", fault, name);
    }
}

static void test_nccl_faults(void) {
    nccl_fails("ncclCommInitRank 1 1", 2, "", "rank 1: ncclCommInitRank: unhandled system error", "", 0);
    nccl_fails("ncclAllReduce 1 5", 2, "", "step 5 on a device that fails: rank 1: ncclAllReduce: unhandled system", "",
               1);
    nccl_fails("async 3 2", 4, "", "step 2 on a device that fails: rank 3: ncclCommGetAsyncError: a remote process", "",
               1);
    nccl_fails("async 0 2", 2, "--save f.st --save-every 1",
               "rank 0: ncclCommGetAsyncError: ", "use --resume f.st, which has step 1", 1);
    nccl_fails("stop 1 4", 2, "--stall-timeout 2", "rank 0: no progress for 4 s: it waits for ",
               "last progress: step 4", 0);
    nccl_fails("die 1 4", 2, "", "rank 1", "signal 9 (Killed)", 0);
    /* The device of one rank fails in a matrix product, while the other rank waits for its sum. */
    const double start = now();
    CHECK(ranks_say(0,
                    "-n 1 ./rank " ON_GPU "--steps 1000 : -n 1 env HY_FAULT=gemm\t1000 ./rank " ON_GPU "--steps 1000",
                    " on a device that fails: rank 1: layer ", "cublasLtMatmul: an illegal"));
    CHECK(now() - start < NCCL_IN_TIME && !access("aborted.0", F_OK));
    /* Rank 0 fails after the sum of one bucket.  It saves the weights, since no rank has changed them in this step. */
    remove("f.st"), remove("aborted.0");
    CHECK(ranks_say(0,
                    "-n 1 env HY_FAULT=gemm\t960 ./rank " BUCKETS "--save f.st --save-every 0 : -n 1 ./rank " BUCKETS
                    "--save f.st --save-every 0",
                    " on a device that fails: rank 0: layer 0: cublasLtMatmul: an illegal",
                    "use --resume f.st, which has step "));
    CHECK(!access("aborted.0", F_OK) && !access("f.st", R_OK));
    /* A single process has no other rank to notice the stall, so its own alarm ends it. */
    setenv("HY_NCCL", "hang 0 4", 1);
    CHECK(
        says(1, ON_GPU "--nccl on --stall-timeout 8", "hybrid_train: no progress for 8 s; last progress: step 4", ""));
    unsetenv("HY_NCCL");
}

int main(int argc, char **argv) {
    const int is_nccl = argc > 4 && !strcmp(argv[3], "nccl");
    const int is_long = argc > 3 && !strcmp(argv[3], "long"), is_short = argc > 3 && !strcmp(argv[3], "short");
    char script[8192];
    if (argc < 3 || !realpath(argv[2], mpirun))
        return fprintf(stderr, "usage: test_ranks HYBRID_TRAIN MPIRUN [short | long | nccl FOLDER [few]]\n"), 2;
    /* keeps the path as given: if it is a link, programs may behave by the name of the link */
    snprintf(mpirun, sizeof mpirun, "%s", argv[2]);
    const int status = begin_tests(argv[1]);
    if (status) return status;
    memcpy(hybrid_train, program, sizeof hybrid_train);
    /* MPI leaks memory, partly in libraries that it unloads, so suppressions cannot name them; the script turns leak
     * checks off */
    snprintf(script, sizeof script,
             "#!/bin/sh\necho $$ >pid.${OMPI_COMM_WORLD_RANK:-$PMI_RANK}\n"
             "export ASAN_OPTIONS=\"${ASAN_OPTIONS-}:detect_leaks=0\"\nexec %s \"$@\"\n",
             program);
    write_string("rank", script);
    if (chmod("rank", 0755)) abort();
    /* allows more ranks than cores, and root, as tests in containers need it */
    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1), setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
    setenv("OMPI_MCA_rmaps_base_oversubscribe", "1", 1), setenv("OMPI_MCA_btl_vader_single_copy_mechanism", "none", 1);
    if (is_nccl) {
        setenv("LD_LIBRARY_PATH", argv[4], 1), setenv("HY_GPUS", "8", 1);
        if (argc > 5) {
            run_case("nccl: a slow device", test_nccl_slow);
            return end_tests();
        }
        run_case("nccl: sums", test_nccl_sums);
        run_case("nccl: buckets", test_nccl_buckets);
        run_case("nccl: choice", test_nccl_choice);
        run_case("nccl: faults", test_nccl_faults);
    } else if (is_long) {
        run_case("two hundred steps", test_two_hundred_steps);
        run_case("kills", test_kills);
    } else {
        if (!is_short) run_case("gradient", test_gradient);
        if (!is_short) run_case("losses", test_losses);
        run_case("resume", test_resume);
        run_case("plan", test_plan);
        run_case("refusals", test_refusals);
        run_case("ends", test_ends);
    }
    return end_tests();
}
