/* Tests of files that hybrid_train writes.  The program must notice every failed write, and must not overwrite a file
 * that somebody needs.
 *
 *     test_train_files PROGRAM      PROGRAM is the built hybrid_train
 */
#define _XOPEN_SOURCE 700
#include "hybrid_log.h"
#include "trainer.h"
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define SHORT TINY_GREEK "--steps 4 --sample 0 "

/* Runs a shell command and returns its exit status.  $T is the program.  Its standard error goes to err.txt. */
static int shell(const char *command) {
    char line[2048];
    fflush(stdout);
    snprintf(line, sizeof line, "exec 2>err.txt; %s", command);
    setenv("T", program, 1);
    int status = system(line);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* Whether the command ends with `status`, and standard error has text1 once, and text2. */
static int fails(int status, const char *command, const char *text1, const char *text2) {
    int got = shell(command);
    char *out = read_string("err.txt"), *at = strstr(out, text1);
    int ok = got == status && at && strstr(out, text2) && !strstr(at + 1, text1);
    if (!ok) printf("  %s\n  exits with %d and says:\n%s\n", command, got, out);
    free(out);
    return ok;
}

static int has(const char *path, const char *text) {
    char *all = read_string(path);
    int found = strstr(all, text) != NULL;
    free(all);
    return found;
}

static int is(const char *path, const char *text) {
    char *all = read_string(path);
    int same = !strcmp(all, text);
    free(all);
    return same;
}

static int exists(const char *path) { return !access(path, F_OK); }

/* ---- writes that fail ----------------------------------------------------------------------- */

static void test_full_output(void) {
    const char *what = "hybrid_train: cannot write standard output: ", *full = "No space left";
    if (!exists("/dev/full")) return;
    CHECK(fails(1, "$T " SHORT ">/dev/full", what, full));
    CHECK(fails(1, "$T --help >/dev/full", what, full));
    CHECK(fails(1, "$T --list-models >/dev/full", what, full));
    CHECK(fails(1, "$T --device cpu --hidden 32 --layers 2 --data greek.txt --bench 8 >/dev/full", what, full));
    CHECK(shell("$T " SHORT "--save m.safetensors >out.txt") == 0);
    CHECK(fails(1, "$T --generate m.safetensors >/dev/full", what, full));
    CHECK(fails(1, "$T --eval m.safetensors --data greek.txt >/dev/full", what, full));
    /* the program must still report other errors, and exit with their status */
    CHECK(fails(2, "$T --steps 0 >/dev/full", "steps: '0'", "nearest"));
    CHECK(fails(1, "$T " SHORT ">&-", what, "Bad file descriptor"));
    CHECK(fails(1, "$T " SHORT "--csv run.csv <&- >&- 2>>err.txt", what, "Bad file descriptor"));
    /* the reader of the output ends early */
    CHECK(fails(0, "{ $T " SHORT "--steps 100000; echo $? >status.txt; } | head -1 >head.txt", what, "Broken pipe"));
    CHECK(is("status.txt", "1\n"));
}

static void test_full_log(void) {
    const char *what = "hybrid_train: cannot write ";
    if (exists("/dev/full")) CHECK(fails(1, "$T " SHORT "--csv /dev/full >out.txt", what, "/dev/full: No space left"));
    /* the disk is full after some rows of the log: the run must end, and these rows must stay */
    remove("run.csv");
    CHECK(fails(1, "(ulimit -f 1; exec $T " SHORT "--steps 1000 --csv run.csv) | cat >out.txt; exit 1", what,
                "run.csv: File too large"));
    CHECK(has("run.csv", "\n4,512,") && !has("out.txt", "held-out loss "));
    CHECK(fails(1, "ulimit -f 1; $T " SHORT "--steps 1000 --log-every 1 >long.txt",
                "hybrid_train: cannot write standard output: ", "File too large"));
}

/* If a standard stream is closed, the log must not get the descriptor of that stream: reports would go into the log. */
static void test_closed_streams(void) {
    char *header, *end;
    remove("run.csv");
    CHECK(shell("$T " SHORT "--csv run.csv <&- >&- 2>&-") == 1);
    header = read_string("run.csv");
    CHECK((end = strchr(header, '\n')) && !strncmp(header, "step,tokens,", 12));
    CHECK(!strstr(header, "model") && !strstr(header, "hybrid_train"));
    free(header);
    CHECK(shell("$T " SHORT "--csv run.csv <&- >out.txt 2>&-") == 0);
    CHECK(has("out.txt", "held-out loss ") && !has("run.csv", "held-out loss "));
}

/* ---- files that must stay ------------------------------------------------------------------- */

static void test_inputs_stay(void) {
    const char *text = "ab ba abba, ab ba abba; ab ba abba, abba ba\n";
    const char *yaml = "steps: 2\nsample: 0\n";
    char absolute[256], line[512];
    write_string("text.txt", text);
    write_string("run.yaml", yaml);
    CHECK(!symlink("text.txt", "link.txt") && !link("text.txt", "hard.txt"));
    CHECK(!symlink("run.yaml", "link.yaml"));
    snprintf(absolute, sizeof absolute, "%s/./text.txt", folder);
    const char *names[] = {"text.txt", "link.txt", "hard.txt", "./text.txt", absolute};
    for (int i = 0; i < 5; i++) {
        for (int k = 0; k < 3; k++) {
            snprintf(line, sizeof line, TINY "--seq 4 --data %s --csv %s", names[k], names[i]);
            CHECK(says(2, line, "hybrid_train: csv: ", "would overwrite the text of --data"));
        }
    }
    CHECK(says(2, TINY_GREEK "run.yaml --csv run.yaml", "csv: run.yaml", "the config file"));
    CHECK(says(2, TINY_GREEK "run.yaml --csv link.yaml", "csv: link.yaml", "the config file"));
    CHECK(says(2, TINY_GREEK "link.yaml --csv ./run.yaml", "csv: ./run.yaml", "the config file"));
    CHECK(fails(2, "$T " TINY "--seq 4 --data /dev/stdin --csv text.txt <text.txt", "csv: text.txt",
                "the text of --data"));
    CHECK(fails(2, "$T " SHORT "--csv here.txt >here.txt", "csv: here.txt", "already receives the report"));
    CHECK(fails(2, "$T " SHORT "--csv /dev/stdout >here.txt", "csv: /dev/stdout", "already receives the report"));
    /* a log must not replace a model file, whether the file is complete or cut off */
    CHECK(says(0, SHORT "--save model.st", "held-out loss ", ""));
    CHECK(says(2, SHORT "--csv model.st", "csv: model.st is a model file; give another name", ""));
    CHECK(!shell("head -c 100 model.st >cut.st") && !exists("model.st.1"));
    CHECK(says(2, SHORT "--csv cut.st", "csv: cut.st is a model file", ""));
    /* --save first writes a temporary file; if another file has its name, the program must say what to do */
    write_string("way.st.tmp", "mine");
    CHECK(says(2, SHORT "--save way.st", "its temporary file, way.st.tmp, already exists; remove it or", ""));
    CHECK(is("way.st.tmp", "mine") && !mkdir("dir.st.tmp", 0700));
    CHECK(says(2, SHORT "--save dir.st",
               "dir.st.tmp, exists and cannot be opened (Is a directory); remove it or give another name", ""));
    /* the log must not have the name of this temporary file */
    CHECK(says(2, SHORT "--save new.st --csv new.st.tmp",
               "csv: new.st.tmp would overwrite the temporary file of --save", "give another name"));
    CHECK(!symlink("model.st", "link.st") && !exists("model.st.tmp"));
    CHECK(says(2, SHORT "--save link.st --csv ./model.st.tmp", "csv: ./model.st.tmp would overwrite", ""));
    CHECK(!exists("new.st.tmp") && !exists("model.st.tmp") && !exists("new.st"));
    CHECK(is("text.txt", text) && is("run.yaml", yaml) && !exists("text.txt.1"));
}

/* An older log must be kept under the first free number.  A run that does not start must not touch the log. */
static void test_older_log(void) {
    remove("mine.csv");
    write_string("mine.csv", "first\n");
    CHECK(says(2, SHORT "--csv mine.csv --seq 1000000", "too short", ""));
    CHECK(is("mine.csv", "first\n"));
    CHECK(says(0, SHORT "--csv mine.csv", "log         mine.csv: ", "is now mine.csv.1\n"));
    CHECK(is("mine.csv.1", "first\n") && has("mine.csv", "\n4,512,"));
    write_string("mine.csv", "second\n");
    write_string("mine.csv.3", "another\n");
    CHECK(says(0, SHORT "--csv mine.csv", "is now mine.csv.2\n", ""));
    CHECK(says(0, SHORT "--csv mine.csv", "is now mine.csv.4\n", ""));
    CHECK(is("mine.csv.1", "first\n") && is("mine.csv.2", "second\n") && is("mine.csv.3", "another\n"));
    CHECK(has("mine.csv.4", "\n4,512,"));
    /* an empty file need not be kept; if the log is a link, the file behind it must be kept */
    write_string("empty.csv", "");
    CHECK(says(0, SHORT "--csv empty.csv", "log         empty.csv\n", ""));
    CHECK(!exists("empty.csv.1"));
    write_string("target.csv", "third\n");
    CHECK(!symlink("target.csv", "link.csv"));
    CHECK(says(0, SHORT "--csv link.csv", "target.csv.1\n", ""));
    CHECK(is("target.csv.1", "third\n") && has("target.csv", "\n4,512,") && !exists("link.csv.1"));
    CHECK(says(0, SHORT "--csv /dev/null", "log         /dev/null\n", ""));
}

/* ---- a log that is continued ---------------------------------------------------------------- */

#define HEADER                                                                                                         \
    "step,tokens,loss,held_out,grad_norm,rwkv_norm,mamba_norm,lr,tokens_per_s,memory_mib,"                             \
    "seconds,grad_ratio,branch_cosine,rwkv_rms,mamba_rms,rwkv_gain,mamba_gain,final_loss,final_tokens\n"
#define OLDER_HEADER                                                                                                   \
    "step,tokens,loss,held_out,grad_norm,rwkv_norm,mamba_norm,lr,tokens_per_s,memory_mib,"                             \
    "seconds,grad_ratio,branch_cosine,rwkv_rms,mamba_rms,rwkv_gain,mamba_gain\n"
#define WATCHED_HEADER                                                                                                 \
    "step,tokens,loss,held_out,grad_norm,rwkv_norm,mamba_norm,lr,tokens_per_s,memory_mib,"                             \
    "seconds,grad_ratio,branch_cosine,rwkv_rms,mamba_rms,rwkv_gain,mamba_gain,final_loss,final_tokens,"                \
    "gpu_percent,gpu_celsius,gpu_watts,gpu_mib\n"
#define WATCHED_ROW(n) START(n) ",,,,,,,,93,71,,10240.5\n"
#define START(n) #n ",64,2.5,,1,1,1,0.001,1000,10.0,0.500,1"
#define ROW(n) START(n) ",,,,,,,\n"
#define OLDER_ROW(n) START(n) ",,,,,\n"

/* Writes `content` to old.csv, continues this log after step `from`, and adds row 7.  Whether the log is then as
 * expected. */
static int continues_as(int is_watched, const char *content, hy_log_point from, const char *expected,
                        const char *note) {
    hy_log log;
    const hy_log_row row = {.step = 7,
                            .tokens = 64,
                            .loss = 2.5,
                            .held_out = NAN,
                            .grad_norm = 1,
                            .rwkv_norm = 1,
                            .mamba_norm = 1,
                            .ratio = 1,
                            .lr = 0.001,
                            .tokens_per_s = 1000,
                            .memory_mib = 10,
                            .seconds = 0.5,
                            .gpu = {93, 71, NAN, 10240.5}};
    write_string("old.csv", content);
    int ok = hy_log_open(&log, "old.csv", &from, is_watched) == GT_OK && strstr(log.note, note);
    ok &= hy_log_write(&log, &row) == GT_OK && hy_log_close(&log) == GT_OK;
    ok &= is("old.csv", expected);
    if (!ok) printf("  %s (%s)\n", log.note, hy_last_error());
    return ok;
}

static int continues(const char *content, hy_log_point from, const char *expected, const char *note) {
    return continues_as(0, content, from, expected, note);
}

static void test_continued_log(void) {
    hy_log log;
    const hy_log_point six = {6, 64, 2.5};
    CHECK(continues(HEADER ROW(5) ROW(6), six, HEADER ROW(5) ROW(6) ROW(7), "rows kept: 2, later ones dropped: 0"));
    CHECK(continues(HEADER ROW(6) "7,64,2.", six, HEADER ROW(6) ROW(7), "rows kept: 1, later ones dropped: 1"));
    CHECK(continues(HEADER "# a note\n", six, HEADER "# a note\n" ROW(7), "rows kept: 0, later ones dropped: 0"));
    CHECK(continues(HEADER ROW(6), ((hy_log_point){6, 64, (double)NAN}), HEADER ROW(6) ROW(7), "rows kept: 1"));
    /* the log of an older program must keep its columns */
    CHECK(continues(OLDER_HEADER OLDER_ROW(6), six, OLDER_HEADER OLDER_ROW(6) OLDER_ROW(7), "rows kept: 1"));
    CHECK(continues_as(1, OLDER_HEADER OLDER_ROW(6), six, OLDER_HEADER OLDER_ROW(6) OLDER_ROW(7), "rows kept: 1"));
    /* a log must keep its columns, whether the continued run watches the GPU or not */
    CHECK(continues_as(1, "", six, WATCHED_HEADER WATCHED_ROW(7), ""));
    CHECK(continues(WATCHED_HEADER WATCHED_ROW(6), six, WATCHED_HEADER WATCHED_ROW(6) WATCHED_ROW(7), "rows kept: 1"));
    CHECK(continues_as(1, HEADER ROW(6), six, HEADER ROW(6) ROW(7), "rows kept: 1"));
    CHECK(continues("", six, HEADER ROW(7), ""));
    CHECK(!exists("old.csv.1"));
    /* if the program drops whole rows, it must keep a copy of the log */
    CHECK(continues(HEADER ROW(6) ROW(7) ROW(8), six, HEADER ROW(6) ROW(7), "dropped: 2; the whole log is kept as "));
    CHECK(is("old.csv.1", HEADER ROW(6) ROW(7) ROW(8)));
    CHECK(continues(HEADER "# a note\n" ROW(6) ROW(9), six, HEADER "# a note\n" ROW(6) ROW(7), "old.csv.2"));
    CHECK(is("old.csv.2", HEADER "# a note\n" ROW(6) ROW(9)));
    /* the log of another run must be kept under another name */
    static const hy_log_point others[] = {{6, 65, 2.5}, {6, 64, 2.5000001}, {5, 64, 2.5}, {7, 64, 2.5}};
    for (int i = 0; i < 4; i++) {
        char kept[32];
        snprintf(kept, sizeof kept, "old.csv.%d", i + 3);
        CHECK(continues(HEADER ROW(6), others[i], HEADER ROW(7), "the log of another run is now "));
        CHECK(is(kept, HEADER ROW(6)));
    }
    /* a file that is no log must be kept under another name */
    CHECK(continues("6,my own numbers\n", six, HEADER ROW(7), "the older file is now old.csv.7"));
    CHECK(is("old.csv.7", "6,my own numbers\n"));
    remove("none.csv");
    CHECK(hy_log_open(&log, "none.csv", &six, 0) == GT_OK && hy_log_close(&log) == GT_OK);
    CHECK(is("none.csv", HEADER));
    CHECK(hy_log_open(&log, folder, &six, 0) == GT_ERROR_VALUE && !log.file);
    CHECK(hy_log_open(&log, "", &six, 0) == GT_OK && !log.file);
    CHECK(hy_log_write(&log, &(hy_log_row){.step = 1}) == GT_OK && hy_log_close(&log) == GT_OK);
}

/* The program adds the held-out loss to the last row of a log later, in place.  If this fails, the row must stay as it
 * was. */
static void test_completed_log(void) {
    static const hy_probe probe = {.has = {1, 1}, .branch_cosine = 0.5, .branch_rms = {2, 3}, .branch_gain = {4, 5}};
    const hy_log_row row = {7, 64, 2.5, NAN, 1, 1, 1, 1, 0.001, 1000, 10, 0.5, NULL, 0, 0, {93, 71, NAN, 10240.5}};
    const hy_log_point six = {6, 64, 2.5}, seven = {7, 64, 2.5}, other = {7, 64, 2.25};
    static const char whole[] = HEADER ROW(6) "7,64,2.5,1.25,1,1,1,0.001,1000,10.0,0.500,1,0.5,2,3,4,5,1.75,64\n";
    hy_log log;
    write_string("old.csv", HEADER ROW(6));
    CHECK(hy_log_open(&log, "old.csv", &six, 0) == GT_OK && log.is_regular && hy_log_write(&log, &row) == GT_OK);
    CHECK(is("old.csv", HEADER ROW(6) ROW(7)));
    CHECK(hy_log_complete(&log, 1.25, 1.75, 64, &probe) == GT_OK && is("old.csv", whole) &&
          hy_log_close(&log) == GT_OK);
    /* another process may complete the row */
    write_string("old.csv", HEADER ROW(6) ROW(7));
    CHECK(hy_log_reopen(&log, "old.csv", &seven) == GT_OK && log.file);
    CHECK(hy_log_complete(&log, 1.25, 1.75, 64, &probe) == GT_OK && hy_log_close(&log) == GT_OK &&
          is("old.csv", whole));
    /* logs of other versions: with fewer columns, and with columns for the GPU.  An evaluation that ended early adds no
     * point of the curve */
    write_string("old.csv", OLDER_HEADER OLDER_ROW(7));
    CHECK(hy_log_reopen(&log, "old.csv", &seven) == GT_OK && log.file);
    CHECK(hy_log_complete(&log, 1.25, 1.75, 64, &probe) == GT_OK && hy_log_close(&log) == GT_OK);
    CHECK(is("old.csv", OLDER_HEADER "7,64,2.5,1.25,1,1,1,0.001,1000,10.0,0.500,1,0.5,2,3,4,5\n"));
    write_string("old.csv", WATCHED_HEADER WATCHED_ROW(7));
    CHECK(hy_log_reopen(&log, "old.csv", &seven) == GT_OK && log.file);
    CHECK(hy_log_complete(&log, 1.25, 1.75, 64, &probe) == GT_OK && hy_log_close(&log) == GT_OK);
    CHECK(is("old.csv",
             WATCHED_HEADER "7,64,2.5,1.25,1,1,1,0.001,1000,10.0,0.500,1,0.5,2,3,4,5,1.75,64,93,71,,10240.5\n"));
    CHECK(hy_log_reopen(&log, "old.csv", &seven) == GT_OK && !log.file);
    write_string("old.csv", HEADER ROW(7));
    CHECK(hy_log_reopen(&log, "old.csv", &seven) == GT_OK && log.file);
    CHECK(hy_log_complete(&log, NAN, 1.75, 64, &probe) == GT_OK && hy_log_close(&log) == GT_OK);
    CHECK(is("old.csv", HEADER START(7) ",0.5,2,3,4,5,1.75,64\n"));
    /* the program must change no row of another step, and no row that is complete, cut off or followed by others */
    static const char *const texts[] = {HEADER ROW(6) ROW(7), whole,  HEADER ROW(6) "7,64,2.5,,1,1,1",
                                        HEADER ROW(7) ROW(8), ROW(7), ""};
    for (int i = 0; i < 6; i++) {
        write_string("old.csv", texts[i]);
        CHECK(hy_log_reopen(&log, "old.csv", i ? &seven : &other) == GT_OK && !log.file && is("old.csv", texts[i]));
    }
    CHECK(hy_log_reopen(&log, "none/none.csv", &seven) == GT_OK && !log.file);
    /* there is no room for a longer row, because the limit of file sizes is the size of the file */
    write_string("old.csv", HEADER ROW(6) ROW(7));
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        const rlim_t size = strlen(HEADER ROW(6) ROW(7));
        signal(SIGXFSZ, SIG_IGN);
        if (setrlimit(RLIMIT_FSIZE, &(struct rlimit){size, size})) _exit(2);
        if (hy_log_reopen(&log, "old.csv", &seven) != GT_OK) _exit(3);
        _exit(hy_log_complete(&log, 1.25, 1.75, 64, &probe) == HY_ERROR_WRITE && !strstr(hy_last_error(), "damaged")
                  ? 0
                  : 4);
    }
    CHECK(wait_for(child) == 0 && is("old.csv", HEADER ROW(6) ROW(7)));
}

/* If a model has only one branch, the columns of the other branch must be empty. */
static void test_single_branch(void) {
    static const struct {
        hy_probe probe;
        const char *end;
    } cases[] = {
        {{.has = {1, 0}, .branch_rms = {2, 0}, .branch_gain = {1, 0}}, ",,,2,,1,,,\n"},
        {{.has = {0, 1}, .branch_rms = {0, 3}, .branch_gain = {0, 1}}, ",,,,3,,1,,\n"},
        {{.has = {1, 1}, .branch_cosine = 0.5, .branch_rms = {2, 3}, .branch_gain = {4, 5}}, ",,0.5,2,3,4,5,,\n"}};
    for (int i = 0; i < 3; i++) {
        hy_log log;
        const hy_log_row row = {.step = 1, .ratio = NAN, .held_out = NAN, .probe = &cases[i].probe};
        remove("one.csv");
        CHECK(hy_log_open(&log, "one.csv", NULL, 0) == GT_OK && hy_log_write(&log, &row) == GT_OK);
        CHECK(hy_log_close(&log) == GT_OK && has("one.csv", cases[i].end));
    }
}

static void test_same_file(void) {
    write_string("a.txt", "a");
    write_string("b.txt", "a");
    CHECK(!mkdir("sub", 0700) && !symlink("sub", "way"));
    CHECK(hy_same_file("a.txt", "./a.txt") && !hy_same_file("a.txt", "b.txt"));
    CHECK(hy_same_file("new.txt", "sub/../new.txt") && !hy_same_file("new.txt", "newer.txt"));
    CHECK(hy_same_file("sub/new.txt", "way/new.txt") && !hy_same_file("new.txt", "sub/new.txt"));
    CHECK(!hy_same_file("a.txt", "new.txt") && !hy_same_file("no/new.txt", "no/new2.txt"));
    CHECK(hy_keep_apart("csv", "", "the text", "a.txt") == GT_OK);
    CHECK(hy_keep_apart("csv", "a.txt", "the text", "") == GT_OK);
    CHECK(hy_keep_apart("csv", "a.txt", "the text", "a.txt") == GT_ERROR_VALUE);
}

int main(int argc, char **argv) {
    int status = begin_tests(argc > 1 ? argv[1] : getenv("HYBRID_TRAIN"));
    if (status) return status;
    run_case("writes: full output", test_full_output);
    run_case("writes: full log", test_full_log);
    run_case("writes: closed streams", test_closed_streams);
    run_case("files: inputs stay", test_inputs_stay);
    run_case("files: older log", test_older_log);
    run_case("files: continued log", test_continued_log);
    run_case("files: completed log", test_completed_log);
    run_case("files: one branch", test_single_branch);
    run_case("files: the same", test_same_file);
    return end_tests();
}
