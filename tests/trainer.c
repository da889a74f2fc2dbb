#define _XOPEN_SOURCE 700
#include "trainer.h"
#include "hybrid_data.h"
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

char program[4096], folder[64];
static int case_failed, passed, failed;

int check(int ok, const char *file, int line, const char *condition) {
    if (!ok) {
        const char *slash = strrchr(file, '/');
        printf("  %s:%d: %s\n", slash ? slash + 1 : file, line, condition);
        case_failed = 1;
    }
    return ok;
}

void run_case(const char *name, void (*test)(void)) {
    const char *only = getenv("GT_TEST_CASE");
    case_failed = 0;
    if (only && !strstr(name, only)) return;
    test();
    printf("%s %s\n", case_failed ? "FAIL" : "ok  ", name);
    fflush(stdout);
    if (case_failed)
        failed++;
    else
        passed++;
}

const char *write_file(const char *name, const void *bytes, size_t size) {
    FILE *file = fopen(name, "wb");
    if (CHECK(file != NULL)) {
        CHECK(fwrite(bytes, 1, size, file) == size);
        fclose(file);
    }
    return name;
}

const char *write_string(const char *name, const char *text) { return write_file(name, text, strlen(text)); }

char *read_string(const char *path) {
    FILE *file = fopen(path, "rb");
    size_t size = 1 << 20, used = 0;
    char *text = calloc(1, size);
    if (!text) abort();
    if (file) used = fread(text, 1, size - 1, file);
    text[used] = 0;
    if (file) fclose(file);
    return text;
}

int split(char *line, char **argv) {
    int argc = 0;
    for (char *word = strtok(line, " "); word; word = strtok(NULL, " ")) argv[argc++] = word;
    argv[argc] = NULL;
    return argc;
}

pid_t start_program(const char *line) {
    static char copy[4096];
    char *argv[ARGUMENTS_MAX] = {program};
    snprintf(copy, sizeof copy, "%s", line);
    split(copy, argv + 1);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        int file = open("out.txt", O_WRONLY | O_CREAT | O_TRUNC, 0600);
        if (file < 0 || dup2(file, 1) < 0 || dup2(file, 2) < 0) _exit(126);
        execv(program, argv);
        _exit(127);
    }
    if (child < 0) abort();
    return child;
}

int wait_for(pid_t child) {
    int status;
    if (waitpid(child, &status, 0) < 0) return -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

int run_program(char **out, const char *format, ...) {
    char line[4096];
    va_list list;
    va_start(list, format);
    vsnprintf(line, sizeof line, format, list);
    va_end(list);
    int status = wait_for(start_program(line));
    *out = read_string("out.txt");
    return status;
}

int says(int status, const char *line, const char *text1, const char *text2) {
    char *out;
    int got = run_program(&out, "%s", line);
    int ok = got == status && strstr(out, text1) && strstr(out, text2);
    if (!ok) printf("  hybrid_train %s\n  exits with %d and says:\n%s\n", line, got, out);
    free(out);
    return ok;
}

/* Writes a text of Greek words in UTF-8, so that tests have another alphabet and bytes above 127. */
static void write_greek(void) {
    static const char *const words[] = {"λόγος", "θάλασσα", "φως", "νύχτα",  "δέντρο", "και",
                                        "πουλί", "ουρανός", "γη",  "ποτάμι", "ένα",    "βουνό"};
    static char text[12000];
    uint64_t seed = 7;
    size_t used = 0;
    while (used + 64 < sizeof text) {
        const char *word = words[hy_random(&seed) % 12];
        const char *after = hy_random(&seed) % 7 ? " " : hy_random(&seed) % 5 ? ".\n" : ".\n\n\n";
        used += (size_t)snprintf(text + used, sizeof text - used, "%s%s", word, after);
    }
    write_file("greek.txt", text, used);
    write_file("short_greek.txt", text, 3000);
}

double final_loss(const char *out) {
    size_t end = strlen(out);
    double loss;
    int used = 0;
    if (!end || out[end - 1] != '\n') return NAN;
    size_t start = end - 1;
    while (start > 0 && out[start - 1] != '\n') start--;
    if (sscanf(out + start, "held-out loss %lf%n", &loss, &used) != 1) return NAN;
    return start + (size_t)used + 1 == end ? loss : NAN;
}

double unigram(const char *out) {
    const char *at = strstr(out, "in the training part, ");
    return at ? atof(at + strlen("in the training part, ")) : NAN;
}

char *numbers_of(const char *path, int *rows) {
    char *text = read_string(path), *kept = calloc(1, strlen(text) + 1), *save;
    *rows = 0;
    for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        int commas = 0;
        size_t length = 0;
        while (line[length] && (commas += line[length] == ',') < 8) length++;
        strncat(kept, line, length);
        strcat(kept, "\n");
        ++*rows;
    }
    free(text);
    return kept;
}

int wait_for_lines(const char *path, int lines) {
    for (int i = 0; i < 3000; i++) {
        int count = 0;
        char *text = read_string(path);
        for (const char *p = text; *p; p++) count += *p == '\n';
        free(text);
        if (count >= lines) return 1;
        nanosleep(&(struct timespec){0, 20000000}, NULL);
    }
    return 0;
}

int begin_tests(const char *path) {
    snprintf(folder, sizeof folder, "/tmp/test_train.XXXXXX");
    if (!path || !realpath(path, program) || access(program, X_OK) || !mkdtemp(folder) || chdir(folder)) {
        fprintf(stderr, "usage: PROGRAM_OF_TESTS HYBRID_TRAIN [device | short]\n");
        return 2;
    }
    /* a signal may be ignored here, as under nohup or in the background of a shell; the tested programs would inherit
     * that */
    static const int sent[] = {SIGHUP, SIGINT, SIGQUIT, SIGTERM};
    for (size_t i = 0; i < sizeof sent / sizeof sent[0]; i++) signal(sent[i], SIG_DFL);
    write_greek();
    return 0;
}

int end_tests(void) {
    char command[128];
    snprintf(command, sizeof command, "cd / && rm -rf %s", folder);
    if (system(command)) printf("cannot remove %s\n", folder);
    printf("%d passed, %d failed\n", passed, failed);
    return failed > 0;
}
