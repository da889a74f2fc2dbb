/* Tests of the output of hybrid_train: on terminals of several widths, on terminals that change their width, on
 * terminals without escape sequences, and in a pipe.
 *
 *     test_train_screen PROGRAM     PROGRAM is the built hybrid_train
 */
#define _DEFAULT_SOURCE /* TIOCSWINSZ */
#define _XOPEN_SOURCE 700
#define _DARWIN_C_SOURCE
#include "hybrid_screen.h"
#include "trainer.h"
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

/* ---- a terminal ------------------------------------------------------------------------------ */

enum { LINES_MAX = 2000, LINE_SIZE = 512, RAW_MAX = 1 << 20 };

/* A terminal with a program's output, as a list of lines.  The program writes to the last line. */
typedef struct terminal {
    int master, columns;
    char raw[RAW_MAX]; /* all bytes of the output */
    int raw_length;
    char line[LINES_MAX][LINE_SIZE];
    int lines, at;     /* number of the last line; column of the cursor */
    int overflows;     /* number of characters beyond the last column */
    int unknown;       /* number of escape sequences that this terminal does not know */
    char escape[16];   /* an incomplete escape sequence */
    int escape_length; /* its length; 0: there is none */
} terminal;

static terminal tty;

static void set_width(int columns) {
    struct winsize size = {.ws_row = 24, .ws_col = (unsigned short)columns};
    tty.columns = columns;
    CHECK(ioctl(tty.master, TIOCSWINSZ, &size) == 0);
}

static void take_escape(void) {
    char last = tty.escape[tty.escape_length - 1];
    if (tty.escape_length < 3 || (last >= '0' && last <= '9') || last == ';' || last == '?') {
        if (tty.escape_length == (int)sizeof tty.escape - 1) tty.unknown++, tty.escape_length = 0;
        return;
    }
    if (last == 'K')
        memset(tty.line[tty.lines] + tty.at, 0, (size_t)(LINE_SIZE - tty.at));
    else if (last != 'm')
        tty.unknown++;
    tty.escape_length = 0;
}

static void take_byte(char c) {
    char *line = tty.line[tty.lines];
    if (tty.raw_length < RAW_MAX - 1) tty.raw[tty.raw_length++] = c;
    if (tty.escape_length || c == '\033') {
        tty.escape[tty.escape_length++] = c;
        take_escape();
    } else if (c == '\r') {
        tty.at = 0;
    } else if (c == '\n') {
        if (tty.lines + 1 < LINES_MAX) tty.lines++;
    } else if ((c & 0xc0) != 0x80 && tty.at + 1 < LINE_SIZE) {
        tty.overflows += tty.at >= tty.columns;
        line[tty.at++] = c;
    }
}

/* Starts `hybrid_train COMMAND` on a new terminal.  Returns 0 if the system gives no terminal. */
static pid_t start(const char *command, int columns, const char *term) {
    static char copy[4096];
    char *argv[ARGUMENTS_MAX] = {program};
    memset(&tty, 0, sizeof tty);
    tty.master = posix_openpt(O_RDWR | O_NOCTTY);
    if (!CHECK(tty.master >= 0 && grantpt(tty.master) == 0 && unlockpt(tty.master) == 0)) return 0;
    snprintf(copy, sizeof copy, "%s", command);
    split(copy, argv + 1);
    fflush(stdout);
    int slave = open(ptsname(tty.master), O_RDWR | O_NOCTTY);
    set_width(columns);
    pid_t child = fork();
    if (child == 0) {
        setenv("TERM", term, 1);
        if (slave < 0 || dup2(slave, 1) < 0 || dup2(slave, 2) < 0) _exit(126);
        close(slave);
        close(tty.master);
        execv(program, argv);
        _exit(127);
    }
    close(slave);
    return child;
}

/* Reads output that comes within a fifth of a second.  Returns 0 after the program has closed its output. */
static int read_some(void) {
    char bytes[4096];
    struct pollfd wait = {.fd = tty.master, .events = POLLIN};
    if (poll(&wait, 1, 200) <= 0) return 1;
    ssize_t n = read(tty.master, bytes, sizeof bytes);
    for (ssize_t i = 0; i < n; i++) take_byte(bytes[i]);
    return n > 0;
}

/* Runs the program on a terminal until it ends.  Returns its exit status. */
static int run_on_terminal(const char *command, int columns, const char *term) {
    pid_t child = start(command, columns, term);
    if (!child) return -1;
    while (read_some()) continue;
    int status = wait_for(child);
    close(tty.master);
    return status;
}

/* Returns the number of the first line, from line `from` on, that begins with the text after spaces; -1: none. */
static int line_with(const char *text, int from) {
    for (int i = from; i <= tty.lines; i++) {
        const char *line = tty.line[i] + strspn(tty.line[i], " ");
        if (!strncmp(line, text, strlen(text))) return i;
    }
    return -1;
}

/* ---- tests ----------------------------------------------------------------------------------- */

#define RUN TINY_GREEK "--steps 12 --eval-every 3 --eval-tokens 64 --sample 0 "

/* Whether there is one line for every evaluation under a heading with these fields, and no line is wider than the
 * terminal. */
static int shows_table(const char *heading) {
    int found = 0, fields = 1, head = line_with("step ", 0), at = head + 1;
    char words[256] = "", copy[LINE_SIZE];
    if (head < 0) return 0;
    snprintf(copy, sizeof copy, "%s", tty.line[head]);
    for (char *w = strtok(copy, " "); w; w = strtok(NULL, " "))
        snprintf(words + strlen(words), sizeof words - strlen(words), "%s%s", *words ? " " : "", w);
    for (const char *p = words; *p; p++) fields += *p == ' ';
    for (int step = 3; step <= 12; step += 3) {
        char label[16];
        int count = 0;
        snprintf(label, sizeof label, tty.columns && tty.columns < 60 ? "%d " : "%d/12 ", step);
        if ((at = line_with(label, at)) < 0) break;
        snprintf(copy, sizeof copy, "%s", tty.line[at]);
        for (char *w = strtok(copy, " "); w; w = strtok(NULL, " ")) count += strcmp(w, "-") != 0;
        found += count == fields && strlen(tty.line[at]) == strlen(tty.line[head]);
    }
    int good = !strcmp(words, heading) && found == 4 && !tty.overflows && !tty.unknown &&
               at == head + 4; /* the lines between evaluations are overwritten, so none of them may remain */
    if (!good) {
        printf("  heading '%s', %d rows, %d characters too many\n", words, found, tty.overflows);
        for (int i = 0; i <= tty.lines; i++) printf("  |%s\n", tty.line[i]);
    }
    return good;
}

static void test_widths(void) {
    static const struct {
        int columns;
        const char *heading;
    } widths[] = {{200, "step loss held-out grad R/M tok/s MiB eta"},
                  {80, "step loss held-out grad R/M tok/s MiB eta"},
                  {60, "step loss held-out grad tok/s MiB eta"},
                  {50, "step loss held-out tok/s MiB eta"},
                  {40, "step loss held-out eta"},
                  {25, "step loss held-out"}};
    for (size_t i = 0; i < sizeof widths / sizeof widths[0]; i++) {
        CHECK(run_on_terminal(RUN, widths[i].columns, "xterm") == 0);
        tty.overflows *= widths[i].columns >= 40; /* other parts of the report need at least 40 columns */
        CHECK(shows_table(widths[i].heading));
        CHECK(line_with("held-out loss ", 0) > 0);
    }
    /* a terminal of unknown width counts as 80 columns; on a terminal that is too narrow, the line of a step is cut */
    CHECK(run_on_terminal(RUN, 0, "xterm") == 0);
    tty.overflows = 0;
    CHECK(shows_table(widths[1].heading));
    CHECK(run_on_terminal(RUN, 6, "xterm") == 0 && line_with("12", 0) > 0);
}

/* Whether the output since byte `from` contains the text. */
static int came(const char *text, int from) {
    tty.raw[tty.raw_length] = 0;
    return strstr(tty.raw + from, text) != NULL;
}

/* Lines must fit even if their numbers are as large as possible. */
static void test_long_run(void) {
    int tries = 300;
    pid_t child = start(TINY_GREEK "--steps 999999999 --eval-every 0 --sample 0", 80, "xterm");
    if (!child) return;
    while (!came("/999999999", 0) && tries-- > 0 && read_some()) continue;
    for (int from = tty.raw_length; tty.raw_length < from + 200 && tries-- > 0 && read_some();) continue;
    kill(child, SIGKILL);
    while (read_some()) continue;
    CHECK(wait_for(child) == 128 + SIGKILL);
    close(tty.master);
    int head = line_with("step ", 0);
    CHECK(!tty.overflows && head > 0 && strstr(tty.line[head], "  eta"));
    if (!CHECK(strlen(tty.line[tty.lines]) == strlen(tty.line[head]))) puts(tty.line[tty.lines]);
}

/* If the terminal changes its width, the table must follow: with a new heading, and with rows that fit. */
static void test_resize(void) {
    static const int widths[] = {80, 40, 60, 20, 100};
    static const char *const headings[] = {
        "grad    R/M   tok/s     MiB       eta\033[K\r\n", "held-out       eta\033[K\r\n",
        "held-out   tok/s     MiB       eta\033[K\r\n", "loss\033[K\r\n", "grad    R/M   tok/s"};
    pid_t child = start(TINY_GREEK "--steps 20000 --eval-every 0 --sample 0", 80, "xterm");
    if (!child) return;
    for (int i = 0; i < 5; i++) {
        int from = tty.raw_length, tries = 300, row;
        set_width(widths[i]);
        while (!came(headings[i], from) && tries-- > 0 && read_some()) continue;
        if (!CHECK(came(headings[i], from))) {
            printf("  at %d columns: %.300s\n", widths[i], tty.raw + from);
            continue;
        }
        /* the rows after the heading must be refreshed in place and fit; the line before the change may have been
         * wider */
        row = tty.lines;
        tty.overflows = 0;
        for (from = tty.raw_length; tty.raw_length < from + 200 && tries-- > 0 && read_some();) continue;
        CHECK(tty.lines <= row + 1 && !tty.overflows && strlen(tty.line[tty.lines]) > 10);
    }
    CHECK(kill(child, SIGINT) == 0);
    while (read_some()) continue;
    CHECK(wait_for(child) == 130);
    CHECK(line_with("interrupted", 0) > 0 && line_with("held-out loss ", 0) > 0);
    close(tty.master);
}

/* A terminal without escape sequences must get whole lines, as a pipe does. */
static void test_dumb(void) {
    static const char *const terms[] = {"dumb", ""};
    for (int i = 0; i < 2; i++) {
        CHECK(run_on_terminal(RUN "--log-every 3", 80, terms[i]) == 0);
        CHECK(!memchr(tty.raw, '\033', (size_t)tty.raw_length));
        /* the only carriage returns are those that the terminal adds before newlines */
        for (int k = 0; k < tty.raw_length; k++) CHECK(tty.raw[k] != '\r' || tty.raw[k + 1] == '\n');
        CHECK(shows_table("step loss held-out grad R/M tok/s MiB eta"));
    }
}

static void test_colour(void) {
    unsetenv("NO_COLOR");
    CHECK(run_on_terminal(RUN, 80, "xterm") == 0 && came("\033[32mPASS\033[0m", 0));
    setenv("NO_COLOR", "", 1); /* an empty NO_COLOR counts as not set */
    CHECK(run_on_terminal(RUN, 80, "xterm") == 0 && came("\033[32mPASS\033[0m", 0));
    setenv("NO_COLOR", "1", 1);
    CHECK(run_on_terminal(RUN, 80, "xterm") == 0 && !came("\033[3", 0) && came("  PASS  G0 ", 0));
    unsetenv("NO_COLOR");
}

/* Whether no line is wider than 80 columns. */
static int is_narrow(const char *out) {
    int widest = 0;
    for (const char *line = out; *line; line += strcspn(line, "\n") + 1) {
        int columns = 0;
        for (const char *p = line; *p && *p != '\n'; p++) columns += (*p & 0xc0) != 0x80;
        if (columns > 80) printf("  %d columns: %.*s\n", columns, (int)strcspn(line, "\n"), line);
        if (columns > widest) widest = columns;
        if (!line[strcspn(line, "\n")]) break;
    }
    return widest <= 80;
}

static void test_pipe(void) {
    static const char *const lines[] = {RUN, "--data greek.txt --list-models", "--help-all",
                                        TINY_GREEK "--steps 3 --model GF-RH --sample 0 --stateful"};
    for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++) {
        char *out;
        CHECK(run_program(&out, "%s", lines[i]) == 0);
        CHECK(is_narrow(out) && !strchr(out, '\033') && !strchr(out, '\r'));
        free(out);
    }
    /* in 80 columns a gate takes three lines: the bounds and the fault stand below the values */
    CHECK(says(0, RUN, "\n  PASS  G4    RWKV",
               "\n              0.3 to 3 (FAIL <0.1, >10)\n              against a branch that hardly learns while the "
               "other does\n"));
    CHECK(run_on_terminal(RUN, 120, "xterm") == 0);
    CHECK(line_with("PASS  G4 ", 0) > 0 && strstr(tty.line[line_with("PASS  G4 ", 0)], "0.3 to 3 ("));
}

/* The final evaluation must show its progress.  The first Ctrl-C must end it with the result so far. */
static void test_evaluation(void) {
    char *greek = read_string("greek.txt"), *text = calloc(1, 40 * strlen(greek) + 1), *log, *last;
    for (int i = 0; i < 40; i++) strcat(text + strlen(text), greek);
    write_string("long.txt", text);
    free(greek), free(text);
    static const char *const lines[] = {
        "--device cpu --model HY --hidden 16 --layers 1 --data long.txt --batch 1 --seq 2 --steps 2 --sample 0 "
        "--eval-every 1 --eval-tokens 8 --save m.st --csv run.csv",
        "--eval m.st"};
    for (int i = 0; i < 2; i++) {
        int tries = 300;
        pid_t child = start(lines[i], 80, "xterm");
        while (!(came(" tokens, loss ", 0) && came(", eta ", 0)) && tries-- > 0 && read_some()) continue;
        CHECK(kill(child, SIGINT) == 0);
        while (read_some()) continue;
        CHECK(wait_for(child) == 130);
        close(tty.master);
        CHECK(line_with("evaluation: ", 0) < 0 && !tty.overflows && line_with("interrupted", 0) > 0);
        CHECK(line_with("held-out       the first ", 0) > 0 && line_with("held-out loss ", 0) > 0);
    }
    /* the row of the last step must have the last point of the curve, over 8 tokens, and the final loss so far */
    log = read_string("run.csv"), last = strstr(log, "\n2,");
    double fields[19] = {0};
    for (int i = 0; i < 19 && CHECK(last); i++) fields[i] = atof(last + 1), last = strchr(last + 1, ',');
    CHECK(fields[3] > 1 && fields[17] > 1 && fields[17] != fields[3] && fields[18] >= 8 && fields[18] < 48000);
    free(log);
}

static int wraps(const char *text, int column, int indent, int width, const char *expected) {
    write_string("wrapped.txt", "");
    FILE *out = fopen("wrapped.txt", "w");
    if (!CHECK(out != NULL)) return 0;
    hy_print_wrapped(out, text, column, indent, width);
    fclose(out);
    char *got = read_string("wrapped.txt");
    int same = !strcmp(got, expected);
    if (!same) printf("  got: %s", got);
    free(got);
    return same;
}

static void test_text(void) {
    CHECK(wraps("one two three", 0, 2, 7, "one two\n  three\n"));
    CHECK(wraps("one two three", 0, 2, 6, "one\n  two\n  three\n"));
    CHECK(wraps("averylongword b", 4, 4, 10, "averylongword\n    b\n"));
    CHECK(wraps("", 0, 0, 10, "\n") && wraps("a  b ", 0, 0, 10, "a b\n"));
    CHECK(wraps("θάλασσα φως", 0, 0, 11, "θάλασσα φως\n"));
    static const struct {
        double x;
        const char *text;
    } numbers[] = {{0, "0"},           {9999.4, "9999"},   {9999.6, "10.0k"}, {12345, "12.3k"},
                   {123456, "123k"},   {999499, "999k"},   {999501, "1.00M"}, {1.234e6, "1.23M"},
                   {9.994e6, "9.99M"}, {9.996e6, "10.0M"}, {2.5e10, "25.0G"}, {NAN, "nan"}};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        if (!CHECK(!strcmp(hy_short_number(numbers[i].x).text, numbers[i].text)))
            printf("  %g: %s\n", numbers[i].x, hy_short_number(numbers[i].x).text);
    CHECK(!strcmp(hy_duration(59.6).text, "1:00") && !strcmp(hy_duration(3723).text, "1:02:03"));
    CHECK(!strcmp(hy_duration(-1).text, "0:00") && !strcmp(hy_duration(NAN).text, "0:00"));
}

/* The program must replace control characters in texts from files, and not send them to the terminal. */
static void test_control_characters(void) {
    char text[] = "a\033[31mb\x7f\r\n\xc2\x9bz \xce\xb1\xc2\xa0", *out;
    hy_make_plain(text);
    CHECK(!strcmp(text, "a?[31mb??\?"
                        "??z \xce\xb1\xc2\xa0"));
    CHECK(run_program(&out, "--resume no\033[31m.st") == 2 && strstr(out, "resume: no?[31m.st: No such file") &&
          !strchr(out, '\033'));
    free(out);
    CHECK(run_program(&out,
                      "--device cpu --data greek.txt --hidden 16 --layers 1 --batch 1 --seq 8 --steps 1 --sample 0 "
                      "--save odd\033.st") == 0 &&
          strstr(out, "odd?.st") && !strchr(out, '\033'));
    free(out);
}

int main(int argc, char **argv) {
    int status = begin_tests(argc > 1 ? argv[1] : getenv("HYBRID_TRAIN"));
    if (status) return status;
    run_case("screen: text", test_text);
    run_case("screen: widths", test_widths);
    run_case("screen: long run", test_long_run);
    run_case("screen: resize", test_resize);
    run_case("screen: no escapes", test_dumb);
    run_case("screen: colour", test_colour);
    run_case("screen: pipe", test_pipe);
    run_case("screen: evaluation", test_evaluation);
    run_case("screen: control characters", test_control_characters);
    return end_tests();
}
