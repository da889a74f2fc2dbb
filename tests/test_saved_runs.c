/* Tests of hybrid_train with model files: runs that are resumed, killed, or cannot write, and runs that take weights,
 * losses or text from a file.
 *
 *     test_saved_runs PROGRAM [short]     PROGRAM is the built hybrid_train; short: fewer steps and kills
 *     test_saved_runs PROGRAM device      only tests with --device cuda, which may be emulated
 *     test_saved_runs PROGRAM python      Python reads the program's files.  The interpreter is GT_TEST_PYTHON, or
 *                                         python3.  Without numpy and safetensors the test is skipped, or fails if
 *                                         GT_TEST_STRICT is set
 */
#define _XOPEN_SOURCE 700
#include "gpu_present.h"
#include "hybrid_save.h"
#include "trainer.h"
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int is_short;

/* A model so small that it trains some hundred steps a second. */
#define SMALL "--device cpu --hidden 16 --layers 1 --batch 2 --seq 16 --data greek.txt "
/* A small model with sizes that differ from the defaults. */
#define SMALL_SIZES SMALL "--model HY-M1 --stateful --d-state 8 --expand 1 --d-conv 3 --ffn 2 --head-size 8 "

static int exists(const char *path) { return !access(path, F_OK); }

static void rest(int milliseconds) {
    nanosleep(&(struct timespec){milliseconds / 1000, milliseconds % 1000 * 1000000L}, NULL);
}

static double seconds_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int wait_for_file(const char *path) {
    for (int i = 0; i < 6000 && !exists(path); i++) rest(10);
    return exists(path);
}

/* Runs a shell command and returns its exit status.  The output goes to out.txt.  $T is the program. */
static int shell(const char *command) {
    char line[2048];
    fflush(stdout);
    snprintf(line, sizeof line, "exec >out.txt 2>&1; %s", command);
    setenv("T", program, 1);
    int status = system(line);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static int has(const char *path, const char *text) {
    char *all = read_string(path);
    int found = strstr(all, text) != NULL;
    free(all);
    return found;
}

/* ---- comparing files ----------------------------------------------------------------------- */

static int same_text(const hy_file *a, const hy_file *b, const char *key) {
    const char *x = hy_file_text_of(a, key), *y = hy_file_text_of(b, key);
    if (x && y && !strcmp(x, y)) return 1;
    printf("  %s: '%s' and '%s'\n", key, x, y);
    return 0;
}

static int same_tensor(hy_file *a, hy_file *b, const hy_file_tensor *t) {
    const hy_file_tensor *u = hy_file_tensor_of(b, t->name);
    size_t size = (size_t)(t->end - t->begin);
    void *x = malloc(size), *y = malloc(size);
    int same = u && u->rank == t->rank && u->end - u->begin == t->end - t->begin &&
               !memcmp(t->shape, u->shape, sizeof t->shape) && hy_file_read(a, t, x) == GT_OK &&
               hy_file_read(b, u, y) == GT_OK && !memcmp(x, y, size);
    free(x), free(y);
    return same;
}

/* Counts the tensors with this prefix that differ between two files.  -1: a file cannot be read. */
static int differences(const char *path_a, const char *path_b, const char *prefix) {
    hy_file a, b = {.path = NULL};
    int count = -1;
    if (hy_saved_open(&a, path_a) != GT_OK || hy_saved_open(&b, path_b) != GT_OK) {
        puts(hy_last_error());
    } else {
        count = a.tensor_count != b.tensor_count;
        for (int i = 0; i < a.tensor_count; i++)
            if (!strncmp(a.tensors[i].name, prefix, strlen(prefix))) count += !same_tensor(&a, &b, a.tensors + i);
    }
    hy_file_close(&a);
    hy_file_close(&b);
    return count;
}

/* Whether two files contain the same run: tensors and numbers must be equal bit for bit. */
static int same_runs(const char *path_a, const char *path_b) {
    static const char *const keys[] = {"run.steps",        "run.tokens",      "run.random", "run.loss_scale",
                                       "run.recent_ratio", "run.recent_loss", "option.lr",  "run.optimizer_steps"};
    int same = differences(path_a, path_b, "") == 0;
    hy_file a, b;
    if (!same) return 0;
    CHECK(hy_saved_open(&a, path_a) == GT_OK && hy_saved_open(&b, path_b) == GT_OK);
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) same &= same_text(&a, &b, keys[i]);
    hy_file_close(&a);
    hy_file_close(&b);
    return same;
}

/* Returns a number from a file's metadata, or -1 if it cannot be read. */
static long long number_of(const char *path, const char *key) {
    hy_file file;
    long long number = -1;
    if (hy_saved_open(&file, path) == GT_OK && hy_file_text_of(&file, key))
        number = atoll(hy_file_text_of(&file, key));
    else
        puts(hy_last_error());
    hy_file_close(&file);
    return number;
}

/* The columns of a log that depend neither on time nor on where a run ended.  This leaves out the held-out loss. */
static char *columns_of(const char *path) {
    int rows;
    char *text = numbers_of(path, &rows), *to = text;
    int column = 0;
    for (const char *from = text; *from; from++) {
        if (*from == '\n') column = 0;
        if (*from == ',') column++;
        if (column != 3) *to++ = *from;
    }
    *to = 0;
    return text;
}

static int same_logs(const char *path_a, const char *path_b) {
    char *a = columns_of(path_a), *b = columns_of(path_b);
    int same = !strcmp(a, b);
    free(a), free(b);
    return same;
}

/* ---- runs that go on ----------------------------------------------------------------------- */

/* Starts a run, and sends it a signal once its log has `lines` lines.  Returns the exit status. */
static int interrupt(const char *line, const char *log, int lines, int number) {
    pid_t child = start_program(line);
    CHECK(wait_for_lines(log, lines));
    CHECK(kill(child, number) == 0);
    return wait_for(child);
}

/* A run that was interrupted twice and resumed must equal a run without interruption. */
static void check_resume(const char *options) {
    static const char *const temporary[] = {"a.st", "b.st", "a.csv", "b.csv"};
    char line[512], *whole, *out;
    for (int i = 0; i < 4; i++) remove(temporary[i]);
    CHECK(run_program(&whole, "%s --sample 40 --save a.st --csv a.csv", options) == 0);
    snprintf(line, sizeof line, "%s --sample 40 --save b.st --csv b.csv", options);
    CHECK(interrupt(line, "b.csv", 5, SIGTERM) == 143);
    CHECK(has("out.txt", "interrupted") && has("out.txt", "held-out loss "));
    long long first = number_of("b.st", "run.steps");
    CHECK(first >= 4 && first < number_of("a.st", "run.steps"));
    CHECK(interrupt("--resume b.st --save b.st --csv b.csv", "b.csv", (int)first + 6, SIGINT) == 130);
    long long second = number_of("b.st", "run.steps");
    CHECK(second > first && second < number_of("a.st", "run.steps"));
    if (!CHECK(run_program(&out, "--resume b.st --save b.st --csv b.csv") == 0)) puts(out);
    CHECK(final_loss(out) == final_loss(whole) && strstr(out, "resumed     after step "));
    CHECK(same_runs("a.st", "b.st") && same_logs("a.csv", "b.csv"));
    const char *sample[2] = {strstr(whole, "\nsample\n"), strstr(out, "\nsample\n")};
    if (CHECK(sample[0] && sample[1])) {
        size_t length = (size_t)(strstr(sample[0], "\nsteps ") - sample[0]);
        CHECK(!strncmp(sample[0], sample[1], length));
    }
    free(whole);
    /* resuming a complete run must not change its file */
    CHECK(says(0, "--resume b.st --save b.st", "b.st: the run is complete", "larger --steps"));
    CHECK(same_runs("a.st", "b.st"));
    free(out);
    /* resuming a complete run must change no log, neither its own nor another, and must begin none */
    write_string("other.csv", "of somebody else\n");
    remove("new.csv");
    char *before = read_string("b.csv");
    static const char *const logs[] = {"b.csv", "other.csv", "new.csv"};
    for (int i = 0; i < 3; i++) {
        snprintf(line, sizeof line, "--resume b.st --csv %s", logs[i]);
        CHECK(says(0, line, "b.st: the run is complete", ""));
    }
    char *after = read_string("b.csv");
    CHECK(!strcmp(before, after) && has("other.csv", "of somebody else") && !exists("other.csv.1") &&
          !exists("new.csv"));
    free(before), free(after);
}

static void test_resume(void) {
    char line[512];
    int steps = is_short ? 400 : 1500; /* fewer steps, because sanitizers make each step slow */
    snprintf(line, sizeof line, SMALL "--lr 0.01 --steps %d", steps);
    check_resume(line);
    snprintf(line, sizeof line, SMALL "--stateful --model GF --clip 0 --steps %d", steps);
    check_resume(line);
    snprintf(line, sizeof line, SMALL_SIZES "--lr 0.002 --steps %d", steps);
    check_resume(line);
    snprintf(line, sizeof line, SMALL "--model Mamba-2 --ffn none --untied --stateful --steps %d", steps);
    check_resume(line);
}

/* A file must hold the state of all training options, so that such runs resume bit for bit. */
static void test_resume_training(void) {
    char line[512];
    snprintf(line, sizeof line,
             SMALL
             "--lr 0.01 --steps %d --batch 4 --micro-batch 2 --schedule wsd --decay-steps 20 --dropout 0.1 --ema 0.9 "
             "--beta1 0.8 --beta2 0.99 --eps 1e-6 --keep-best --eval-every 7 --recompute",
             is_short ? 120 : 600);
    check_resume(line);
    CHECK(!differences("a.st", "b.st", "ema."));
    CHECK(differences("a.st.best", "b.st.best", "") == 0);
    /* evaluation and generation use the averaged weights of --ema, which differ from the trained weights */
    char *trained, *out;
    CHECK(run_program(&trained, "%s --save a.st", line) == 0);
    CHECK(run_program(&out, "--eval a.st") == 0 && final_loss(out) == final_loss(trained));
    free(out), free(trained);
    CHECK(says(2, "--resume a.st --ema 0.8 --steps 700", "ema: 0.8 differs from 0.9, the value in a.st", ""));
    CHECK(says(2, "--resume a.st --dropout 0 --steps 700", "dropout: 0 differs from 0.1, the value in a.st", ""));
    CHECK(says(2, "--resume a.st --schedule cosine --steps 700", "schedule: cosine differs from wsd, the value in a.st",
               ""));
}

/* The file of --keep-best must hold the model at the lowest point of the curve.  A new run must keep an older file. */
static void test_keep_best(void) {
    char *log, *out;
    double best = 1e9;
    long long best_step = 0;
    static const char *const temporary[] = {"k.st", "k.st.best", "k.st.best.1", "k.csv"};
    for (int i = 0; i < 4; i++) remove(temporary[i]);
    /* the held-out text is the text reversed: the model first learns the letters, and then its held-out loss grows
     * again */
    char *greek = read_string("greek.txt");
    for (size_t i = 0; i < 1500; i++) {
        const char c = greek[i];
        greek[i] = greek[2999 - i], greek[2999 - i] = c;
    }
    write_file("back.txt", greek, 3000);
    free(greek);
    CHECK(run_program(&out,
                      SMALL "--val back.txt --steps 60 --lr 0.05 --warmup 5 --schedule constant --eval-every 5 "
                            "--eval-tokens 500 --sample 0 --save k.st --save-every 0 --keep-best --csv k.csv") == 0);
    log = read_string("k.csv");
    for (char *row = strchr(log, '\n'); row && row[1]; row = strchr(row + 1, '\n')) {
        double step = atof(row + 1), held_out;
        char *field = row;
        for (int i = 0; i < 3; i++) field = strchr(field + 1, ',');
        if (field[1] == ',') continue;
        held_out = atof(field + 1);
        if (held_out < best) best = held_out, best_step = (long long)step;
    }
    CHECK(best_step > 0 && best_step < 60 && number_of("k.st.best", "run.steps") == best_step);
    CHECK(number_of("k.st.best", "run.best_step") == best_step && number_of("k.st", "run.steps") == 60);
    CHECK(strstr(out, "best           ") && strstr(out, ", in k.st.best"));
    free(out), free(log);
    CHECK(says(0, SMALL "--steps 4 --eval-every 2 --sample 0 --save k.st --keep-best",
               "k.st.best has the model with the lowest", ""));
    CHECK(number_of("k.st.best.1", "run.steps") == best_step);
    write_string("text.st.best", "no model");
    CHECK(says(2, SMALL "--steps 4 --eval-every 2 --save text.st --keep-best",
               "it would replace a file that is not a model file", ""));
    CHECK(says(2, SMALL "--steps 4 --keep-best", "keep-best: has no effect without --save", ""));
}

/* A model file must restore the sizes of its model, whatever options set them. */
static void test_sizes(void) {
    static const char *const models[] = {"--model 1M",
                                         "--model 8M --layers 1",
                                         "--model RWKV-6 --hidden 32 --head-size 8",
                                         "--model Mamba-2 --hidden 32 --mamba-head 16 --expand 3 --d-conv 2",
                                         "--model Mamba-1 --hidden 32 --d-state 24 --ffn 1 --stateful",
                                         "--model HY-M1 --hidden 48 --heads 6 --d-conv 3",
                                         "--model Mamba-2 --hidden 32 --ffn none --untied --ema 0.5"};
    for (size_t i = 0; i < sizeof models / sizeof models[0]; i++) {
        char *out;
        remove("m.st");
        if (!CHECK(run_program(&out,
                               "--device cpu --data greek.txt --batch 2 --seq 8 --eval-tokens 8 --steps 2 "
                               "--sample 3 --save m.st %s",
                               models[i]) == 0))
            puts(out);
        CHECK((strstr(models[i], "none") != NULL) == (strstr(out, ", no FFN, untied") != NULL));
        free(out);
        if (!CHECK(run_program(&out, "--resume m.st --steps 3") == 0)) puts(out);
        CHECK(strstr(out, "after step 2 of m.st") && !isnan(final_loss(out)));
        free(out);
        if (!CHECK(run_program(&out, "--init m.st --data greek.txt --steps 1 --sample 0 %s",
                               is_short ? "--batch 2 --seq 8 --eval-tokens 8" : "") == 0))
            puts(out);
        free(out);
        if (!CHECK(run_program(&out, "--eval m.st") == 0)) puts(out);
        free(out);
        if (!CHECK(run_program(&out, "--generate m.st --sample 4") == 0)) puts(out);
        free(out);
    }
}

/* If a run resumes with a larger --steps, its warm-up stays the same, and the cosine ends at the new number. */
static void test_longer(void) {
    char *out, *text, *save;
    CHECK(run_program(&out, SMALL "--steps 10 --warmup 4 --lr 0.01 --save a.st --csv a.csv") == 0);
    free(out);
    CHECK(run_program(&out, "--resume a.st --steps 25 --save b.st --csv a.csv") == 0);
    CHECK(number_of("a.st", "run.steps") == 10 && number_of("b.st", "run.steps") == 25);
    free(out);
    text = read_string("a.csv");
    char *row = strtok_r(text, "\n", &save);
    for (int step = 1; step <= 25; step++) {
        double x[8] = {0}, steps = step <= 10 ? 10 : 25, lr = 0.01 * step / 4;
        row = strtok_r(NULL, "\n", &save);
        if (!CHECK(row != NULL)) break;
        for (int i = 0; i < 8; i++, row += strcspn(row, ",") + 1) x[i] = atof(row);
        if (step > 4) lr = 0.001 + 0.009 * 0.5 * (1 + cos(acos(-1) * (step - 4) / (steps - 4)));
        CHECK(x[0] == step && fabs(x[7] / lr - 1) < 1e-6);
    }
    CHECK(strtok_r(NULL, "\n", &save) == NULL);
    free(text);
}

/* A file does not fix --recompute and --fuse, so both may change when a run resumes, without changing results. */
static void test_recompute(void) {
    static const char *const first[] = {"", "--recompute", "--recompute --fuse conv_ssd"},
                             *const then[] = {"--recompute", "", "--recompute=no --fuse wkv_ssm"};
    const char *options = SMALL "--layers 3 --stateful --lr 0.01 --min-lr 0.01 --warmup 1 --sample 0";
    char *out;
    remove("a.st");
    CHECK(run_program(&out, "%s --steps 9 --save a.st", options) == 0);
    free(out);
    for (int i = 0; i < 3; i++) {
        remove("b.st");
        CHECK(run_program(&out, "%s --steps 4 --save b.st %s", options, first[i]) == 0);
        free(out);
        if (!CHECK(run_program(&out, "--resume b.st --save b.st --steps 9 %s", then[i]) == 0)) puts(out);
        CHECK(differences("a.st", "b.st", "") == 0);
        CHECK((strstr(out, "backward computes the") != NULL) == (i < 2));
        free(out);
    }
}

/* A resumed run must refuse options that change its result, and accept all others. */
static void test_other_options(void) {
    static const char *const refused[][2] = {
        {"--batch 3", "batch: 3 differs from 2, the value in a.st"},
        {"--seq 8", "seq: 8 differs from 16, the value in a.st"},
        {"--lr 0.1", "lr: 0.1 differs from 0.004, the value in a.st"},
        {"--min-lr 0.001", "min-lr: 0.001 differs from 0.0004, the value in a.st"},
        {"--warmup 3", "warmup: 3 differs from 50, the value in a.st"},
        {"--weight-decay 0.2", "weight-decay: 0.2 differs from 0.1, the value in a.st"},
        {"--clip 2", "clip: 2 differs from 1, the value in a.st"},
        {"--seed 2", "seed: 2 differs from 1, the value in a.st"},
        {"--stateful", "stateful: yes differs from no, the value in a.st"},
        {"--separator x", "separator: x differs from , the value in a.st"},
        {"--model GF", "model: GF differs from 1M, the value in a.st"},
        {"--hidden 32", "hidden: 32 differs from 16, the value in a.st"},
        {"--layers 2", "layers: 2 differs from 1, the value in a.st"},
        {"--heads 2", "heads: 2 differs from 1, the value in a.st"},
        {"--head-size 8", "head-size: 8 times heads = 1 is not hidden = 16"},
        {"--d-state 8", "d-state: 8 differs from 64, the value in a.st"},
        {"--expand 3", "expand: 3 differs from 2, the value in a.st"},
        {"--d-conv 2", "d-conv: 2 differs from 4, the value in a.st"},
        {"--mamba-head 8", "mamba-head: 8 differs from 32, the value in a.st"},
        {"--ffn 8", "ffn: 8 differs from 4, the value in a.st"},
        {"--ffn none", "ffn: none differs from 4, the value in a.st"},
        {"--untied", "untied: yes differs from no, the value in a.st"},
        {"--steps 999", "steps: 999 is less than 1000, the value in a.st"},
        {"--dtype bf16", "dtype: bf16 differs from f32, the value in a.st"},
        {"--data short_greek.txt", "data: not the text that a.st was trained on"},
        {"--init a.st", "--resume and --init: only one of them"},
        {"--bench 8", "--resume and --bench: only one of them"},
        {"--save greek.txt", "save: greek.txt would overwrite the text of --data"},
        {"--csv a.st", "csv: "},
    };
    char line[256], *out, *text;
    remove("a.csv");
    CHECK(interrupt(SMALL "--steps 1000 --save a.st --csv a.csv --sample 5", "a.csv", 3, SIGTERM) == 143);
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
        snprintf(line, sizeof line, "--resume a.st %s", refused[i][0]);
        CHECK(says(2, line, "hybrid_train: ", refused[i][1]));
    }
    /* accepted: the same text in another place, options with the file's values, and options of the report */
    text = read_string("greek.txt");
    write_string("moved.txt", text);
    CHECK(rename("greek.txt", "gone.txt") == 0);
    CHECK(says(2, "--resume a.st", "greek.txt: No such file", "a.st names this text; if it is elsewhere, use --data"));
    CHECK(run_program(&out, "--resume a.st --data moved.txt --batch 2 --lr 4e-3 --hidden 0 "
                            "--sample 7 --eval-every 900 --log-every 1") == 0);
    CHECK(strstr(out, "moved.txt") && strstr(out, "\n 999/1000 ") && !isnan(final_loss(out)));
    CHECK(number_of("a.st", "run.steps") < 1000); /* without --save, the file must not change */
    CHECK(rename("gone.txt", "greek.txt") == 0);
    free(text);
    free(out);
}

/* ---- weights, losses and text from a file -----------------------------------------------------
 */

static void test_init(void) {
    char *out;
    CHECK(run_program(&out, SMALL "--steps 5 --save a.st --lr 0.01") == 0);
    free(out);
    /* with a learning rate of 0 nothing is learnt, so the saved weights must equal those of a.st */
    CHECK(run_program(&out, SMALL "--init a.st --steps 3 --lr 0 --seed 8 --batch 3 --save b.st") == 0);
    CHECK(strstr(out, "weights     from a.st") && number_of("b.st", "run.steps") == 3);
    CHECK(differences("a.st", "b.st", "layers.") == 0 && differences("a.st", "b.st", "embed") == 0);
    CHECK(differences("a.st", "b.st", "optimizer.") > 0);
    free(out);
    CHECK(run_program(&out, "--device cpu --data greek.txt --init a.st --steps 1 --save b.st") == 0);
    CHECK(number_of("b.st", "option.hidden") == 16 && number_of("b.st", "option.batch") == 8);
    free(out);
    /* another text may lack some bytes of the file's vocabulary, but must have no others */
    write_string("less.txt", "και και φως και γη και φως φως γη και γη και φως και γη και και και "
                             "και και φως και γη και φως φως γη και γη και φως και γη και και και ");
    CHECK(says(0, SMALL "--init a.st --data less.txt --steps 1 --prompt ποτάμι", "less.txt", "held-out loss "));
    write_string("more.txt", "και φως και γη και φως φως γη και γη και φως και γη και x");
    CHECK(says(2, SMALL "--init a.st --data more.txt", "data more.txt: 'x'",
               "not in the model's vocabulary (model file a.st)"));
    CHECK(says(2, SMALL "--init a.st --layers 2", "layers: 2 differs from 1, the value in a.st", ""));
    CHECK(says(2, SMALL "--init missing.st", "init: missing.st: No such file", ""));
}

static void test_eval(void) {
    char *out, *trained;
    CHECK(run_program(&trained, SMALL "--steps 30 --save a.st --lr 0.01") == 0);
    CHECK(run_program(&out, "--eval a.st --device cpu") == 0);
    CHECK(final_loss(out) == final_loss(trained) && strstr(out, "greek.txt"));
    free(out);
    CHECK(run_program(&out, "--eval a.st --device cpu --data short_greek.txt") == 0);
    CHECK(!isnan(final_loss(out)) && final_loss(out) != final_loss(trained));
    free(out);
    write_string("one.txt", "x");
    CHECK(says(2, "--eval a.st --data one.txt --device cpu", "one.txt", ""));
    CHECK(says(2, "--eval a.st --save b.st", "--eval does not train; leave --save out", ""));
    CHECK(says(2, "--eval a.st --generate a.st", "--eval and --generate: only one", ""));
    CHECK(says(2, "--check --save b.st", "--check does not train; leave --save out", ""));
    CHECK(says(1, "--eval a.st --batch 65536 --seq 8000", "MiB of memory, ",
               "; it needs less with a smaller --batch (65536) or a smaller --seq (8000)\n"));
    CHECK(says(2, "--eval greek.txt", "eval: greek.txt: not a safetensors file", ""));
    free(trained);
}

static void test_generate(void) {
    char *sample, *out, *other;
    write_string("plain.txt", "the cat sat on the mat and the dog sat on the cat. the end of the mat "
                              "and the cat and the dog and the mat.\n");
    CHECK(run_program(&sample, SMALL "--data plain.txt --steps 40 --lr 0.01 --save a.st --prompt the "
                                     "--sample 60 --temperature 0.9") == 0);
    remove("plain.txt"); /* generating needs no training text */
    CHECK(run_program(&out, "--generate a.st --device cpu") == 0);
    CHECK(strlen(out) == 63 && !strncmp(out, "the", 3) && strstr(sample, out));
    CHECK(run_program(&other, "--generate a.st --device cpu --seed 2") == 0);
    CHECK(strlen(other) == 63 && strcmp(out, other));
    free(out), free(other);
    CHECK(run_program(&out, "--generate a.st --device cpu --sample 200 --temperature 0") == 0);
    CHECK(run_program(&other, "--generate a.st --device cpu --sample 200 --top-k 1 --seed 9") == 0);
    CHECK(strlen(out) == 203 && !strcmp(out, other));
    free(out), free(other);
    CHECK(run_program(&out, "--generate a.st --device cpu --sample 0 --prompt cat") == 0);
    CHECK(!strcmp(out, "cat"));
    free(out);
    CHECK(says(2, "--generate a.st --device cpu --prompt CAT", "prompt: ", "'C' is not in the model's vocabulary"));
    CHECK(says(2, "--generate a.st --model GF", "model: GF differs from 1M, the value in a.st", ""));
    CHECK(says(2, "--generate a.st --top-k 2000000", "top-k: '2000000'", ""));
    CHECK(shell("$T --generate a.st --device cpu >/dev/full") == 1);
    free(sample);
}

/* Starts the program with its output in a pipe.  Returns the size of the first read from this pipe, and kills the
 * program. */
static ssize_t first_read(const char *line, char *bytes, size_t size) {
    int ends[2];
    char copy[512], *argv[ARGUMENTS_MAX] = {program};
    snprintf(copy, sizeof copy, "%s", line);
    split(copy, argv + 1);
    if (pipe(ends)) return -1;
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], 1), close(ends[0]), close(ends[1]);
        execv(program, argv);
        _exit(127);
    }
    close(ends[1]);
    ssize_t n = read(ends[0], bytes, size);
    kill(child, SIGKILL);
    close(ends[0]);
    wait_for(child);
    return n;
}

/* Tests stop texts, penalties, prompts from files and from standard input, and that output appears byte by byte. */
static void test_generate_more(void) {
    char *all, *out, *other, bytes[65536];
    write_string("plain.txt", "the cat sat on the mat and the dog sat on the cat. the end of the mat "
                              "and the cat and the dog and the mat.\n");
    CHECK(run_program(&all, SMALL "--data plain.txt --steps 40 --lr 0.01 --save a.st --prompt the --sample 300") == 0);
    free(all);
    CHECK(run_program(&all, "--generate a.st") == 0 && strlen(all) == 303);
    /* a sample must end after the stop text, at the same place alone as among other samples */
    char *stop = strstr(all + 3, "a");
    if (!CHECK(stop != NULL)) return;
    CHECK(run_program(&out, "--generate a.st --stop a") == 0 && !strncmp(all, out, (size_t)(stop + 1 - all)));
    CHECK(strlen(out) == (size_t)(stop + 1 - all));
    snprintf(bytes, sizeof bytes, "==> sample 1 of 2 <==\n%s\n==> sample 2", out);
    CHECK(run_program(&other, "--generate a.st --stop a --batch 2") == 0 && !strncmp(other, bytes, strlen(bytes)));
    free(other);
    char two[3] = {stop[-1], 'a', 0}, *place = strstr(all + 2, two);
    free(out);
    if (!strchr(" \n", two[0])) {
        CHECK(run_program(&out, "--generate a.st --stop %s", two) == 0);
        CHECK(strlen(out) == (size_t)(place + 2 - all) && !strncmp(all, out, strlen(out)));
        free(out);
    }
    CHECK(run_program(&out, "--generate a.st --stop=the --sample 5") == 0 &&
          strlen(out) > 3); /* a stop text in the prompt ends nothing */
    free(out);
    /* a huge repetition penalty must change the sample */
    CHECK(run_program(&out, "--generate a.st --repetition-penalty 1e2 --temperature 0 --sample 9") == 0);
    CHECK(run_program(&other, "--generate a.st --temperature 0 --sample 9") == 0 && strcmp(out, other));
    free(out), free(other);
    /* prompts */
    write_string("prompt.txt", "the dog");
    CHECK(run_program(&out, "--generate a.st --prompt-file prompt.txt") == 0 && !strncmp(out, "the dog", 7));
    CHECK(shell("printf 'the dog' | $T --generate a.st --prompt-file - >piped.txt") == 0);
    other = read_string("piped.txt");
    CHECK(!strcmp(out, other));
    free(out), free(other);
    CHECK(says(2, "--generate a.st --prompt-file none.txt", "prompt-file: data file none.txt: No such file", "") ||
          says(2, "--generate a.st --prompt-file none.txt", "none.txt: No such file", ""));
    write_file("prompt.txt", "a\0b", 3);
    CHECK(says(2, "--generate a.st --prompt-file prompt.txt", "prompt-file: prompt.txt contains a NUL byte", ""));
    write_string("prompt.txt", "the CAT");
    CHECK(says(2, "--generate a.st --prompt-file prompt.txt", "'C' is not in the model's vocabulary", ""));
    /* the program must write each byte to a pipe as soon as it is drawn */
    const ssize_t n = first_read("--generate a.st --sample 100000", bytes, sizeof bytes);
    if (!CHECK(n > 0 && n < 1000)) printf("  %ld bytes at first\n", (long)n);
    free(all);
}

/* Checks the output of several samples at once.  Each must follow a line with its number, and the speed must come
 * last. */
static void check_samples(const char *options, int count, int first_seed) {
    char *out, *one, expected[4096] = "";
    CHECK(run_program(&out, "--generate a.st %s --batch %d --seed %d", options, count, first_seed) == 0);
    for (int i = 0; i < count; i++) {
        const size_t used = strlen(expected);
        CHECK(run_program(&one, "--generate a.st %s --seed %d", options, first_seed + i) == 0);
        snprintf(expected + used, sizeof expected - used, "==> sample %d of %d <==\n%s\n", i + 1, count, one);
        free(one);
    }
    if (!CHECK(!strncmp(out, expected, strlen(expected)))) printf("%s\n%s: %s\n", expected, options, out);
    const char *speed = strncmp(out, expected, strlen(expected)) ? "" : out + strlen(expected);
    CHECK(!strncmp(speed, "speed  ", 7) && strstr(speed, " tokens/s of ") && strstr(speed, "byte floor"));
    free(out);
}

/* Several samples at once must equal single runs with the same seeds, whatever batch the training had. */
static void test_generate_batch(void) {
    char *out;
    CHECK(run_program(&out, SMALL "--steps 30 --batch 5 --lr 0.01 --stateful --save a.st --sample 40") == 0);
    free(out);
    check_samples("--device cpu", 3, 7);
    /* this prompt is longer than --seq, so it takes several pieces */
    check_samples("--device cpu --prompt ποτάμι --seq 4 --top-k 3", 2, 1);
    CHECK(shell("$T --generate a.st --device cpu --batch 2 --sample 3 >/dev/full") == 1);
    CHECK(says(2, "--generate a.st --batch 0", "batch: '0'", ""));
    CHECK(run_program(&out, "--generate a.st --device cpu --batch 2 --sample 0 --prompt φως") == 0);
    CHECK(!strcmp(out, "==> sample 1 of 2 <==\nφως\n==> sample 2 of 2 <==\nφως\n"));
    free(out);
}

/* The number before `unit` on the line that has `start`; NAN if there is none.  `start` may begin with a line end. */
static double number_before(const char *out, const char *start, const char *unit) {
    const char *line = strstr(out, start), *at = line ? strstr(line += *line == '\n', unit) : NULL;
    if (!at || at > line + strcspn(line, "\n")) return NAN;
    while (at > line && strchr("0123456789.", at[-1])) at--;
    return atof(at);
}

/* Checks the cost of int8 weights, which the program prints to standard error.  The loss before the rounding must be
 * the loss that --eval measures.  `unit`: " bits per byte" or " bits per token".  `line`: the line of --eval that has
 * it. */
static void check_cost(const char *options, const char *unit, const char *line) {
    char *out, *text, *eval;
    CHECK(run_program(&eval, "--eval a.st --device cpu %s", options) == 0);
    CHECK(run_program(&out, "--generate a.st --device cpu --weights int8 --sample 20 %s", options) == 0);
    char command[512];
    snprintf(command, sizeof command,
             "$T --generate a.st --device cpu --weights int8 --sample 20 %s 2>cost.txt >text.txt", options);
    CHECK(shell(command) == 0);
    char *cost = read_string("cost.txt");
    text = read_string("text.txt");
    const double after = number_before(cost, "int8: ", unit), expected = number_before(eval, line, unit);
    const double before = number_before(cost, "int8: ", "; "), cost_of = after - before;
    const char *bracket = strchr(cost, '(');
    const double told = bracket ? atof(bracket + 1) : NAN;
    const double tokens = number_before(cost, "int8: ", " held-out tokens\n");
    const size_t length = strlen(cost);
    if (!CHECK(length > 40 && strchr(cost, '\n') == cost + length - 1 && strlen(text) > 20 && length < 81) ||
        !CHECK(fabs(before - expected) < 1.5e-4 && fabs(told - cost_of) < 1.5e-4 && (told != 0 || *options) &&
               fabs(told) < 0.05) ||
        !CHECK(tokens > 0 && !strncmp(out, cost, length) && !strcmp(out + length, text)))
        printf("%s: %s%s%s", options, cost, text, eval);
    free(out), free(text), free(eval), free(cost);
}

/* Decoding from int8 weights must print what they cost, and the text alone to standard output.  Options that measure
 * the cost need --weights int8. */
static void test_generate_int8(void) {
    char *out, *one;
    uint16_t numbers[3000];
    CHECK(run_program(&out, SMALL "--steps 60 --lr 0.01 --batch 5 --split tracks --untied --save a.st") == 0);
    free(out);
    check_cost("", " bits per byte", "\nheld-out  ");
    check_cost("--data short_greek.txt --split tail", " bits per byte", "\nheld-out  ");
    check_cost("--val short_greek.txt --seq 7", " bits per byte", "\nheld-out  ");
    CHECK(run_program(&out, "--generate a.st --weights int8 --final-eval-tokens 100 --sample 0 --prompt φως") == 0);
    CHECK(number_before(out, "int8: ", " held-out tokens\n") == 128 && strstr(out, "\nφως"));
    free(out);
    /* a sample does not depend on the number of samples */
    CHECK(shell("$T --generate a.st --device cpu --weights int8 --batch 64 --sample 9 2>cost.txt >text.txt") == 0);
    CHECK(shell("$T --generate a.st --device cpu --weights int8 --seed 2 --sample 9 2>cost.txt >one.txt") == 0);
    out = read_string("text.txt"), one = read_string("one.txt");
    const char *second = strstr(out, "==> sample 2 of 64 <==\n");
    CHECK(strlen(one) > 8 && second && !strncmp(second + 23, one, strlen(one)));
    free(out), free(one);
    CHECK(shell("mv greek.txt away.txt") == 0);
    CHECK(says(2, "--generate a.st --weights int8", "greek.txt: No such file",
               "a.st names this text; if it is elsewhere, use --data"));
    CHECK(says(0, "--generate a.st --weights model", "", ""));
    CHECK(says(0, "--generate a.st --weights int8 --val short_greek.txt", "int8: ", " held-out tokens"));
    CHECK(shell("mv away.txt greek.txt") == 0);
    CHECK(says(2, "--generate a.st --weights int8 --batch 65",
               "batch: 65 samples at once are too many for --weights int8", "; the nearest is 64"));
    CHECK(says(2, "--generate a.st --weights int4", "weights: 'int4' is none of: model int8; the nearest is int8", ""));
    CHECK(
        says(2, "--generate a.st --data greek.txt", "data: has no effect with --generate without --weights int8", ""));
    CHECK(says(2, "--eval a.st --weights int8", "weights: has no effect with --eval", ""));
    CHECK(says(2, "--resume a.st --weights int8", "weights: has no effect with --resume", ""));
    CHECK(says(2, SMALL "--weights int8", "weights: has no effect without --generate", ""));
    CHECK(
        says(2, "--generate a.st --weights int8 --steps 5", "steps: has no effect with --generate; leave it out", ""));
    CHECK(
        says(2, "--generate a.st --weights int8 --val short_greek.txt --held-out 0.2", "held-out: has no effect", ""));
    /* tokens that are numbers, without and with a table */
    for (int i = 0; i < 3000; i++) numbers[i] = (uint16_t)(i * i / 7 % 41);
    write_file("n.u16", numbers, sizeof numbers);
    FILE *table = fopen("n.table", "w");
    for (int i = 0; i < 41 && CHECK(table != NULL); i++) fprintf(table, "<%d>\n", i);
    if (table) fclose(table);
    CHECK(run_program(&out, SMALL "--data n.u16 --tokens uint16 --steps 60 --lr 0.01 --save a.st") == 0);
    free(out);
    check_cost("", " bits per token", "\nheld-out  ");
    check_cost("--table n.table", " bits per byte", "\nbytes  ");
    /* documents that end with a symbol */
    CHECK(run_program(&out, SMALL "--end-symbol --separator=\\n --steps 60 --lr 0.01 --save a.st") == 0);
    free(out);
    check_cost("", " bits per token", "\nheld-out  ");
}

/* Without a prompt, generated text must start with the first byte of the training text.  The program must write bytes
 * unchanged. */
static void test_generate_bytes(void) {
    static uint8_t bytes[2000];
    char *out;
    for (int i = 0; i < 2000; i++) bytes[i] = (uint8_t)(i % 3 ? 0xff : 0xe0);
    write_file("bytes.bin", bytes, sizeof bytes);
    CHECK(run_program(&out, SMALL "--data bytes.bin --steps 40 --lr 0.02 --save a.st") == 0);
    free(out);
    CHECK(run_program(&out, "--generate a.st --device cpu --sample 29 --temperature 0") == 0);
    CHECK(strlen(out) == 30 && !memcmp(out, bytes, 30));
    free(out);
}

/* ---- files that are damaged, disks that are full, kills ---------------------------------------
 */

static void test_damaged(void) {
    char *out, line[128];
    static const char *const uses[] = {"resume", "init", "eval", "generate"};
    CHECK(run_program(&out, SMALL "--steps 3 --save a.st") == 0);
    free(out);
    for (int i = 0; i < 4; i++) {
        for (int k = 0; k < 2; k++) {
            CHECK(shell(k ? "cp a.st b.st && printf x | dd of=b.st bs=1 seek=30000 conv=notrunc"
                          : "head -c 30000 a.st >b.st") == 0);
            snprintf(line, sizeof line, "--%s b.st", uses[i]);
            CHECK(says(2, line, uses[i], k ? "b.st: damaged" : "b.st: cut short"));
        }
        snprintf(line, sizeof line, "--save b.st --data greek.txt");
        CHECK(says(2, line, "save: it would replace a file that is not a model file", "b.st"));
    }
    /* a file without a checksum, as after an edit, can give weights but not resume */
    CHECK(shell("sed 's/\"checksum\"/\"user.sum\"/' a.st >b.st") == 0);
    CHECK(says(2, "--resume b.st", "b.st: cannot be resumed, because it has no checksum", ""));
    CHECK(says(0, "--eval b.st --device cpu", "b.st", "held-out loss "));
    CHECK(says(0, SMALL "--init b.st --steps 1", "b.st", "held-out loss "));
    CHECK(run_program(&out, "--generate b.st --device cpu --sample 9 --prompt γη") == 0);
    CHECK(!strncmp(out, "γη", 4));
    free(out);
}

/* On a full disk a run must go on, report the failure and end with status 1.  An older file must stay. */
static void test_full_disk(void) {
    char *out;
    remove("full.st");
    CHECK(shell("ulimit -f 16; $T " SMALL "--steps 4 --save-every 2 --save full.st") == 1);
    CHECK(has("out.txt", "step 2: save: ") && has("out.txt", "File too large; nothing is saved yet"));
    CHECK(has("out.txt", "step 4: save: ") && has("out.txt", "held-out loss "));
    CHECK(!exists("full.st") && !exists("full.st.tmp"));
    CHECK(run_program(&out, SMALL "--steps 3 --save full.st") == 0);
    free(out);
    CHECK(shell("ulimit -f 16; $T " SMALL "--steps 4 --save full.st") == 1);
    CHECK(number_of("full.st", "run.steps") == 3 && !exists("full.st.tmp"));
}

/* If the file cannot be written, the program must report an error before the first step. */
static void test_wrong_place(void) {
    CHECK(says(2, SMALL "--save no/such/folder.st", "save: ", "No such file"));
    CHECK(says(2, SMALL "--save /dev/null", "save: ", "not a regular file"));
    CHECK(says(2, SMALL "--save .", "save: ", "not a regular file"));
}

/* A killed program may leave FILE.tmp, which may be the only copy of its model.  A run that fails to start must keep
 * this file.  A run that reads this file must not overwrite it. */
static void test_left_over(void) {
    char *out;
    remove("m.st");
    CHECK(run_program(&out, SMALL "--steps 3 --save a.st") == 0);
    free(out);
    CHECK(shell("cp a.st m.st.tmp") == 0);
    CHECK(says(2, "--resume m.st.tmp --steps 5 --save m.st",
               "save: ", "its temporary file, m.st.tmp, is the model file that is read"));
    CHECK(says(2, SMALL "--init m.st.tmp --steps 5 --save m.st", "save: ", "is read"));
    CHECK(says(2, SMALL "--steps 5 --save m.st --csv no/such/folder.csv", "csv ", "No such file"));
    CHECK(shell("cmp a.st m.st.tmp") == 0 && !exists("m.st"));
    CHECK(says(0, "--resume m.st.tmp --steps 5 --save n.st", "resumed     after step 3", ""));
    CHECK(!exists("n.st.tmp") && number_of("n.st", "run.steps") == 5);
    CHECK(says(0, SMALL "--steps 5 --save m.st", "held-out loss ", ""));
    CHECK(!exists("m.st.tmp") && number_of("m.st", "run.steps") == 5);
}

/* The program must not overwrite a finished model of the same name, a file without write permission, or the report. */
static void test_older_model(void) {
    remove("m.st");
    CHECK(says(0, SMALL "--steps 2 --save m.st", "model file  m.st, every 100 steps", ""));
    CHECK(!exists("m.st.1") && number_of("m.st", "run.steps") == 2);
    CHECK(says(0, SMALL "--steps 3 --save m.st", "the older file is now m.st.1", ""));
    CHECK(number_of("m.st", "run.steps") == 3 && number_of("m.st.1", "run.steps") == 2);
    CHECK(says(0, SMALL "--init m.st --steps 4 --save m.st", "is now m.st.2", ""));
    CHECK(says(0, "--resume m.st --steps 5 --save m.st", "held-out loss ", ""));
    CHECK(!has("out.txt", "the older file is now ") && !exists("m.st.3"));
    CHECK(number_of("m.st", "run.steps") == 5 && number_of("m.st.2", "run.steps") == 3);
    CHECK(shell("mkdir -p far && mv m.st far/m.st && ln -sf far/m.st m.st") == 0);
    CHECK(says(0, SMALL "--steps 6 --save m.st", "far/m.st.1", ""));
    CHECK(number_of("far/m.st", "run.steps") == 6 && number_of("far/m.st.1", "run.steps") == 5);
    CHECK(!exists("m.st.3") && shell("rm m.st; mv far/m.st m.st; rm -r far; cp m.st n.st") == 0);
    /* a file without write permission */
    CHECK(chmod("m.st", 0444) == 0);
    if (geteuid() != 0) /* root may write every file */
        CHECK(says(2, SMALL "--save m.st", "save: m.st: cannot be written: Permission", ""));
    CHECK(shell("cmp m.st n.st") == 0 && chmod("m.st", 0644) == 0);
    /* here the shell has made m.st the program's output, so m.st receives the report */
    CHECK(shell("$T " SMALL "--steps 2 --save m.st >m.st") == 2);
    CHECK(has("out.txt", "save: m.st already receives the report; give another name"));
    CHECK(shell("$T " SMALL "--steps 2 --save m.st 2>m.st") == 2);
    CHECK(has("m.st", "save: m.st already receives the report; give another name"));
    remove("m.st");
}

/* If saving fails once, the next attempt must save the file, and the run must succeed. */
static void test_disk_recovers(void) {
    remove("r.st");
    pid_t child = start_program(SMALL "--steps 1000000 --save r.st --save-every 1 --sample 0");
    CHECK(wait_for_file("r.st"));
    for (int i = 0; i < 100000 && mkdir("r.st.tmp", 0700); i++) rest(0);
    for (int i = 0; i < 600 && !has("out.txt", " is kept\n"); i++) rest(100);
    CHECK(has("out.txt", "r.st.tmp, exists and cannot be opened") && has("out.txt", " is kept\n"));
    long long before = number_of("r.st", "run.steps");
    CHECK(rmdir("r.st.tmp") == 0);
    for (int i = 0; i < 600 && number_of("r.st", "run.steps") == before; i++) rest(100);
    CHECK(kill(child, SIGTERM) == 0 && wait_for(child) == 143);
    CHECK(before > 0 && number_of("r.st", "run.steps") > before);
}

/* If the reader of the report closes the pipe, the run must save its weights and end. */
static void test_closed_report(void) {
    remove("p.st");
    CHECK(shell("$T " SMALL "--steps 1000000 --log-every 1 --save p.st --save-every 0 | head -n 60") == 0);
    CHECK(wait_for_file("p.st") && number_of("p.st", "run.steps") > 0);
}

static void test_signals(void) {
    static const int numbers[] = {SIGINT, SIGTERM, SIGHUP};
    for (int i = 0; i < 3; i++) {
        remove("s.st");
        remove("s.csv");
        CHECK(interrupt(SMALL "--steps 1000000 --save s.st --save-every 0 --csv s.csv", "s.csv", 3, numbers[i]) ==
              128 + numbers[i]);
        CHECK(number_of("s.st", "run.steps") >= 2);
    }
    /* a second signal must end the program at once */
    remove("s.csv");
    pid_t child = start_program(SMALL "--steps 1000000 --sample 1000000 --save s.st --csv s.csv");
    CHECK(wait_for_lines("s.csv", 3) && kill(child, SIGTERM) == 0);
    int status = 0;
    for (int i = 0; i < 3000 && waitpid(child, &status, WNOHANG) == 0; i++) {
        kill(child, SIGTERM);
        rest(20);
    }
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM);
}

/* Signals in quick succession count as one request: the run must save and end as after one signal. */
static void test_repeated_signals(void) {
    int status = 0;
    remove("s.st");
    remove("s.csv");
    pid_t child = start_program(SMALL "--steps 1000000 --sample 20000 --save s.st --save-every 0 "
                                      "--csv s.csv");
    CHECK(wait_for_lines("s.csv", 3));
    /* sends signals for at most half a second: a signal two seconds after the first counts as a second request, and on
     * a busy machine twenty pauses of 5 ms may take so long */
    const double start = seconds_now();
    for (int i = 0; i < 20 && seconds_now() - start < 0.5; i++) {
        /* if both signals are pending, SIGHUP is delivered first, because it has the lower number */
        CHECK(kill(child, i % 2 ? SIGTERM : SIGHUP) == 0);
        rest(5);
    }
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 128 + SIGHUP);
    CHECK(number_of("s.st", "run.steps") >= 2 && has("out.txt", "held-out loss "));
}

/* Returns a number that changes if another file takes the place of a file, or 0 if there is no file. */
static long long identity(const char *path) {
    struct stat about;
    if (stat(path, &about)) return 0;
    return (long long)about.st_ino * 1000003 + about.st_mtim.tv_sec * 1000000007 + about.st_mtim.tv_nsec;
}

/* Whenever the program is killed, its file must load, and the next run must continue from it. */
static void test_kills(void) {
    int kills = is_short ? 10 : 50, halfway = 0;
    long long before = 0;
    uint64_t random = (uint64_t)time(NULL);
    printf("  seed %llu\n", (unsigned long long)random);
    remove("k.st");
    remove("k.csv");
    for (int i = 0; i < kills; i++) {
        long long older = identity("k.st");
        pid_t child = start_program(i ? "--resume k.st --save k.st"
                                      : SMALL "--stateful --steps 1000000 --save k.st --save-every 1");
        for (int k = 0; k < 30000 && identity("k.st") == older; k++) rest(2);
        rest((int)(hy_random(&random) % 60));
        CHECK(kill(child, SIGKILL) == 0);
        if (!CHECK(wait_for(child) == 128 + SIGKILL)) puts(read_string("out.txt"));
        halfway += exists("k.st.tmp");
        long long now = number_of("k.st", "run.steps");
        CHECK(now > before);
        before = now;
    }
    printf("  %d kills, %d of them while it was writing; %lld steps\n", kills, halfway, before);
    pid_t child = start_program("--resume k.st --save k.st --sample 0 --csv k.csv");
    CHECK(wait_for_lines("k.csv", 3) && kill(child, SIGTERM) == 0 && wait_for(child) == 143);
    CHECK(number_of("k.st", "run.steps") > before && !exists("k.st.tmp"));
}

/* Returns a log without the columns that depend on time: tokens_per_s, memory_mib and seconds. */
static char *without_times(const char *path) {
    char *text = read_string(path), *to = text;
    int column = 0;
    for (const char *from = text; *from; from++) {
        column = *from == '\n' ? 0 : column + (*from == ',');
        if (column < 8 || column > 10) *to++ = *from;
    }
    *to = 0;
    return text;
}

/* Kills a run during its final evaluation.  This evaluation begins when the model file appears, and reads 8,000 tokens.
 * The last row of the log then lacks the held-out loss.  --resume must add the loss, and the log must then equal the
 * log of a run that was not killed. */
static void check_killed_evaluation(const char *options) {
    static const char *const temporary[] = {"a.st", "b.st", "a.csv", "b.csv", "b.csv.1"};
    char line[512], *out;
    int is_cut = 0;
    CHECK(run_program(&out, "%s --save a.st --csv a.csv", options) == 0);
    free(out);
    for (int i = 0; i < 20 && !is_cut; i++) { /* tries again if the evaluation ended before the kill */
        for (int k = 1; k < 5; k += k == 1 ? 2 : 1) remove(temporary[k]);
        snprintf(line, sizeof line, "%s --save b.st --csv b.csv", options);
        pid_t child = start_program(line);
        for (int k = 0; k < 60000 && !exists("b.st"); k++) rest(1);
        kill(child, SIGKILL);
        is_cut = wait_for(child) == 128 + SIGKILL && !has("out.txt", "held-out loss ");
        char *log = read_string("b.csv"), *last = strstr(log, "\n6,");
        is_cut &= last && strstr(last, ",,,,,\n");
        free(log);
    }
    CHECK(is_cut);
    char *before = read_string("b.csv"), *whole = without_times("a.csv");
    CHECK(says(0, "--resume b.st --csv b.csv", "b.st: the run is complete",
               "b.csv: the last row now has the held-out loss"));
    char *after = read_string("b.csv"), *completed = without_times("b.csv");
    if (!CHECK(!strcmp(whole, completed))) printf("%s\n%s", whole, completed);
    size_t same = strlen(before) - 1; /* every byte of the old log must stay, except empty fields at its end */
    while (same && before[same - 1] == ',') same--;
    CHECK(strlen(after) > strlen(before) && strstr(after, ",,") && !exists("b.csv.1"));
    const char *rest_of_row = strstr(strstr(before, "\n6,"), ",,") + 1; /* the last row from its empty field on */
    char *kept = calloc(1, strlen(before) + 1);
    memcpy(kept, rest_of_row, (size_t)(before + same - rest_of_row));
    CHECK(strstr(after, kept) && !strncmp(before, after, (size_t)(rest_of_row - before)));
    /* a second --resume must not add the loss again */
    CHECK(says(0, "--resume b.st --csv b.csv", "b.csv: not written: a complete run adds no row", ""));
    char *again = read_string("b.csv");
    CHECK(!strcmp(after, again));
    /* the log of another run must not change */
    write_string("b.csv", before);
    CHECK(says(0, SMALL "--steps 6 --seed 9 --save c.st", "held-out loss ", ""));
    CHECK(says(0, "--resume c.st --csv b.csv", "b.csv: not written", "") && !exists("b.csv.1"));
    free(again), again = read_string("b.csv");
    CHECK(!strcmp(before, again));
    free(before), free(after), free(again), free(whole), free(completed), free(kept);
}

static void test_killed_evaluation(void) {
    char *greek = read_string("greek.txt"), *text = calloc(1, 7 * strlen(greek) + 1);
    for (int i = 0; i < 7; i++) strcat(text + strlen(text), greek);
    write_string("long.txt", text);
    check_killed_evaluation(SMALL "--data long.txt --steps 6 --save-every 0 --eval-every 0 --sample 0 --warmup 1");
    check_killed_evaluation(SMALL "--data long.txt --steps 6 --save-every 0 --eval-every 0 --sample 0 --stateful "
                                  "--model RWKV-6");
    free(greek), free(text);
}

/* A pipe or a device cannot change a row that was written, so the program must write the last row once, when it is
 * complete. */
static void test_log_in_pipe(void) {
    remove("pipe.csv");
    CHECK(shell("mkfifo pipe.csv; cat pipe.csv >read.csv & $T " SMALL "--steps 3 --sample 0 --eval-every 0 "
                "--csv pipe.csv; status=$?; wait; exit $status") == 0);
    char *log = read_string("read.csv"), *last = strstr(log, "\n3,");
    int rows = 0;
    for (const char *p = log; *p; p++) rows += *p == '\n';
    CHECK(rows == 4 && last && !strstr(last, ",,"));
    free(log);
}

/* ---- on a device --------------------------------------------------------------------------- */

#define DEVICE "--device cuda --data short_greek.txt --hidden 32 --layers 1 --batch 2 --seq 16 "

static int device_steps; /* so many steps that a signal can interrupt the run */

/* Whether there is no GPU, so that the tests are skipped.  If the program fails to start for another reason, tests
 * fail. */
static int device_is_absent(void) {
    char *out;
    int status = run_program(&out, DEVICE "--steps 1");
    int absent = status == 1 && !gpu_is_present() &&
                 (strstr(out, "no CUDA-capable device") || strstr(out, "driver version is insufficient"));
    if (absent) printf("SKIP: %s", out);
    device_steps = strstr(out, "emulating a GPU") ? 16 : 2000;
    free(out);
    return absent;
}

/* Returns the held-out loss of a file's model, computed on this device. */
static double loss_on(const char *device, const char *path) {
    char *out;
    if (!CHECK(run_program(&out, "--eval %s --device %s", path, device) == 0)) puts(out);
    double loss = final_loss(out);
    free(out);
    return loss;
}

static void check_device_resume(const char *dtype, const char *options, double tolerance) {
    static const char *const temporary[] = {"a.st", "b.st", "c.st", "a.csv", "b.csv", "c.csv"};
    char line[512], *out;
    for (int i = 0; i < 6; i++) remove(temporary[i]);
    snprintf(line, sizeof line, DEVICE "--dtype %s --steps %d --sample 0 --eval-every 0 %s", dtype, device_steps,
             options);
    CHECK(run_program(&out, "%s --save a.st --csv a.csv", line) == 0);
    double loss = final_loss(out);
    free(out);
    strcat(line, " --save b.st --csv b.csv");
    CHECK(interrupt(line, "b.csv", 4, SIGTERM) == 143);
    CHECK(number_of("b.st", "run.steps") < device_steps && shell("cp b.st c.st") == 0);
    if (!CHECK(run_program(&out, "--resume b.st --save b.st --csv b.csv") == 0)) puts(out);
    CHECK(final_loss(out) == loss && loss_on("cuda", "b.st") == loss);
    CHECK(same_runs("a.st", "b.st") && same_logs("a.csv", "b.csv"));
    free(out);
    /* the CPU must load the file, and resume the run */
    double here = loss_on("cpu", "b.st");
    printf("  %s: held-out loss %.4f, on the CPU %.4f\n", dtype, loss, here);
    CHECK(fabs(here - loss) < tolerance);
    strcpy(line, "--resume c.st --device cpu --save c.st --csv c.csv");
    int status = interrupt(line, "c.csv", 3, SIGTERM); /* status 0: the run ended before the signal */
    CHECK((status == 143 || status == 0) && has("out.txt", "held-out loss "));
    CHECK(number_of("c.st", "run.steps") > 4);
    CHECK(says(2, "--resume b.st --seed 4", "seed: 4 differs from 1, the value in b.st", ""));
    snprintf(line, sizeof line, "--resume b.st --dtype %s --device cuda", strcmp(dtype, "f16") ? "f16" : "bf16");
    CHECK(says(2, line, "dtype: ", "the value in b.st"));
}

/* A run on the device must resume bit for bit in every dtype.  The CPU must be able to resume it, too. */
static void test_device_resume(void) {
    check_device_resume("f32", "", 1e-3);
    check_device_resume("bf16", "--stateful", 0.05);
    check_device_resume("f16", "", 0.01);
}

/* Steps that the device records and replays must give the tokens of single calls, which --synchronize makes. */
static void check_graphs(const char *line) {
    char *graph, *calls, *end;
    CHECK(run_program(&graph, "--generate %s", line) == 0);
    CHECK(run_program(&calls, "--generate %s --synchronize", line) == 0);
    if ((end = strstr(graph, "\nspeed  "))) *end = 0;
    if ((end = strstr(calls, "\nspeed  "))) *end = 0;
    if (!CHECK(strlen(graph) > 16 && !strcmp(graph, calls))) printf("%s: %s\n%s\n", line, graph, calls);
    free(graph), free(calls);
}

/* The device must be able to evaluate, to generate from, and to resume a file of the CPU. */
static void test_device_loads(void) {
    char *out, *here;
    remove("a.csv");
    CHECK(interrupt(DEVICE "--device cpu --steps 1000 --save a.st --csv a.csv", "a.csv", 4, SIGTERM) == 143);
    CHECK(shell("cp a.st b.st") == 0);
    CHECK(run_program(&here, "--resume a.st --steps 1005 --save a.st") == 0);
    if (!CHECK(run_program(&out, "--eval a.st --device cuda") == 0)) puts(out);
    printf("  held-out loss %.4f, on the device %.4f\n", final_loss(here), final_loss(out));
    CHECK(fabs(final_loss(out) - final_loss(here)) < 1e-3);
    free(here), free(out);
    CHECK(run_program(&here, "--generate a.st --device cpu --sample 40 --temperature 0") == 0);
    CHECK(run_program(&out, "--generate a.st --device cuda --sample 40 --temperature 0") == 0);
    CHECK(strlen(out) >= 41 && !strcmp(here, out));
    free(here), free(out);
    CHECK(shell("$T --generate a.st --device cpu --sample 40 --temperature 0 --weights int8 >a.txt 2>cost.txt") == 0);
    CHECK(shell("$T --generate a.st --device cuda --sample 40 --temperature 0 --weights int8 >b.txt 2>cost.txt") == 0);
    here = read_string("a.txt"), out = read_string("b.txt");
    CHECK(strlen(out) >= 41 && !strcmp(here, out) && has("cost.txt", " bits per byte ("));
    free(here), free(out);
    check_graphs("a.st --device cuda --sample 16 --weights int8 --batch 3");
    check_graphs("a.st --device cuda --sample 16");
    check_graphs("a.st --device cuda --sample 16 --prompt φως --batch 5");
    if (CHECK(run_program(&out, DEVICE "--init b.st --steps 2 --dtype bf16 --save c.st") == 0))
        CHECK(run_program(&here, "--resume c.st --steps 3") == 0);
    check_graphs("c.st --device cuda --sample 16 --batch 5");
    check_graphs("c.st --device cuda --sample 16 --weights int8");
    free(here), free(out);
}

/* ---- in Python ----------------------------------------------------------------------------- */

static const char script[] = "import hashlib, re, sys\n"
                             "import numpy\n"
                             "from safetensors import safe_open\n"
                             "from safetensors.numpy import load_file, save_file\n"
                             "tensors = load_file('a.st')\n"
                             "with safe_open('a.st', framework='numpy') as file:\n"
                             "    about = file.metadata()\n"
                             "    assert set(file.keys()) == set(tensors)\n"
                             "raw = open('a.st', 'rb').read()\n"
                             "zeros = re.sub(rb'sha256:[0-9a-f]{64}', b'sha256:' + 64 * b'0', raw, count=1)\n"
                             "assert about['checksum'] == 'sha256:' + hashlib.sha256(zeros).hexdigest()\n"
                             "text = open('greek.txt', 'rb').read()\n"
                             "assert about['data_sha256'] == hashlib.sha256(text).hexdigest()\n"
                             "vocabulary = bytes(map(int, about['vocabulary'].split()))\n"
                             "assert vocabulary == bytes(sorted(set(text)))\n"
                             "assert about['hybrid_train_format'] == '3' and about['run.steps'] == '5'\n"
                             "assert about['option.lr'] == '0.01' and about['option.stateful'] == 'yes'\n"
                             "shapes = {'embedding': (len(vocabulary), 16), 'final_norm': (16,),\n"
                             "          'layers.0.rwkv.receptance': (16, 16), 'layers.0.rwkv.mu_w': (16,),\n"
                             "          'layers.0.rwkv.mix_down_k': (32, 16), 'layers.0.rwkv.mix_up_k': (16, 32),\n"
                             "          'layers.0.rwkv.decay_down': (64, 16), 'layers.0.rwkv.decay_up': (16, 64),\n"
                             "          'layers.0.rwkv.bonus': (1, 16), 'layers.0.mamba.conv_weight': (160, 4),\n"
                             "          'layers.0.mamba.out': (16, 32), 'layers.0.ffn.up': (64, 16),\n"
                             "          'state.layers.0.rwkv.wkv': (2, 1, 16, 16)}\n"
                             "for name, shape in shapes.items():\n"
                             "    assert tensors[name].shape == shape, (name, tensors[name].shape)\n"
                             "assert tensors['run.track_positions'].dtype == numpy.int64\n"
                             "weights = {n: t for n, t in tensors.items() if n.split('.')[0] not in\n"
                             "           ('optimizer', 'state', 'run')}\n"
                             "for name, tensor in weights.items():\n"
                             "    assert tensor.dtype == numpy.float32 and numpy.isfinite(tensor).all()\n"
                             "    for moment in 'exp_avg', 'exp_avg_sq':\n"
                             "        assert tensors[f'optimizer.{moment}.{name}'].shape == tensor.shape\n"
                             "    assert (tensors['optimizer.exp_avg_sq.' + name] >= 0).all()\n"
                             "kept = {k: v for k, v in about.items() if k != 'checksum' and not k.startswith('run.')}\n"
                             "save_file(weights, 'b.st', metadata=kept | {'user.note': 'weights alone'})\n"
                             "weights['layers.0.ffn.up'] *= 0\n"
                             "save_file(weights, 'c.st', metadata=kept)\n"
                             "save_file(weights, 'd.st', metadata=about)\n"
                             "save_file(weights, 'e.st')\n";

static const char *python(void) {
    const char *path = getenv("GT_TEST_PYTHON");
    return path && *path ? path : "python3";
}

static int python_is_absent(void) {
    char command[512];
    const char *strict = getenv("GT_TEST_STRICT");
    int is_strict = strict && *strict;
    snprintf(command, sizeof command, "%s -c 'import numpy, safetensors'", python());
    if (shell(command) == 0) return 0;
    printf("%s: %s has no numpy and safetensors\n", is_strict ? "FAIL" : "SKIP", python());
    return is_strict ? 1 : 77;
}

/* Python must read the program's files, and the program must read files that Python wrote. */
static void test_python(void) {
    char command[512], *out, *trained;
    CHECK(run_program(&trained, SMALL "--stateful --steps 5 --lr 0.01 --save a.st") == 0);
    write_string("script.py", script);
    snprintf(command, sizeof command, "%s script.py", python());
    if (!CHECK(shell(command) == 0)) puts(read_string("out.txt"));
    CHECK(run_program(&out, "--eval b.st --device cpu") == 0 && final_loss(out) == final_loss(trained));
    free(out);
    CHECK(run_program(&out, "--eval c.st --device cpu") == 0 && final_loss(out) != final_loss(trained) &&
          !isnan(final_loss(out)));
    free(out);
    CHECK(says(2, "--eval d.st", "d.st: damaged: its checksum is wrong", ""));
    CHECK(says(2, "--eval e.st", "e.st: a safetensors file, but not a model file of hybrid_train", ""));
    CHECK(says(2, "--resume b.st", "cannot be resumed, because it has no checksum", ""));
    free(trained);
}

/* -------------------------------------------------------------------------------------------- */

static void test_all(void) {
    run_case("runs: resumed", test_resume);
    run_case("runs: all of training", test_resume_training);
    run_case("runs: the best", test_keep_best);
    run_case("runs: sizes", test_sizes);
    run_case("runs: made longer", test_longer);
    run_case("runs: recompute", test_recompute);
    run_case("runs: other options", test_other_options);
    run_case("files: init", test_init);
    run_case("files: eval", test_eval);
    run_case("files: generate", test_generate);
    run_case("files: generate more", test_generate_more);
    run_case("files: generate several", test_generate_batch);
    run_case("files: generate any bytes", test_generate_bytes);
    run_case("files: generate from int8 weights", test_generate_int8);
    run_case("files: damaged", test_damaged);
    run_case("saving: full disk", test_full_disk);
    run_case("saving: wrong place", test_wrong_place);
    run_case("saving: file that was left", test_left_over);
    run_case("saving: older model", test_older_model);
    run_case("saving: disk recovers", test_disk_recovers);
    run_case("saving: closed report", test_closed_report);
    run_case("saving: signals", test_signals);
    run_case("saving: repeated signals", test_repeated_signals);
    run_case("saving: kills", test_kills);
    run_case("saving: kill during the final evaluation", test_killed_evaluation);
    run_case("saving: log in a pipe", test_log_in_pipe);
}

static void test_all_on_device(void) {
    run_case("device: runs resumed", test_device_resume);
    run_case("device: loads the CPU's", test_device_loads);
}

int main(int argc, char **argv) {
    const char *mode = argc > 2 ? argv[2] : "";
    int status = begin_tests(argc > 1 ? argv[1] : NULL), absent = 0;
    if (status) return status;
    is_short = !strcmp(mode, "short");
    if (!strcmp(mode, "device")) {
        if (!(absent = device_is_absent() ? 77 : 0)) test_all_on_device();
    } else if (!strcmp(mode, "python")) {
        if (!(absent = python_is_absent())) run_case("files: in Python", test_python);
    } else {
        test_all();
    }
    status = end_tests();
    return absent ? absent : status;
}
