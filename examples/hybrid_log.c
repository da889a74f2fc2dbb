#define _XOPEN_SOURCE 700 /* realpath, getline, clock_gettime */
#include "hybrid_log.h"
#include "hybrid_ops.h"
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

double hy_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- streams -------------------------------------------------------------------------------- */

gt_status hy_streams_open(void) {
    signal(SIGXFSZ, SIG_IGN);
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++) {
        if (fcntl(fd, F_GETFD) >= 0) continue;
        /* open() takes the lowest free descriptor, which is fd.  The access mode is wrong on purpose, so that every use
         * of fd fails. */
        if (open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY) < 0)
            return hy_fail(HY_ERROR_WRITE, "/dev/null: %s", strerror(errno));
    }
    return GT_OK;
}

/* The first error of each stream.  A stream that failed reports its failure again later, but not the reason. */
static struct {
    const FILE *file;
    int number; /* errno */
} lost[4];

/* Makes the error message of a stream that failed.  `number` is errno if the stream failed just now, and 0 if it
 * failed earlier. */
static gt_status write_error(const FILE *file, const char *name, int number) {
    size_t slot = 0, last = sizeof lost / sizeof lost[0] - 1;
    while (slot < last && lost[slot].file && lost[slot].file != file) slot++;
    if (lost[slot].file != file) lost[slot].file = file, lost[slot].number = number;
    return hy_fail(HY_ERROR_WRITE, "cannot write %s: %s", name,
                   lost[slot].number ? strerror(lost[slot].number) : "a part of the output was lost");
}

gt_status hy_flush(FILE *file, const char *name) {
    errno = 0;
    int failed = fflush(file), number = failed ? errno : 0;
    return failed || ferror(file) ? write_error(file, name, number) : GT_OK;
}

gt_status hy_close(FILE *file, const char *name) {
    gt_status status = hy_flush(file, name);
    errno = 0;
    if (fclose(file) && status == GT_OK) status = hy_fail(HY_ERROR_WRITE, "cannot write %s: %s", name, strerror(errno));
    for (size_t i = 0; i < sizeof lost / sizeof lost[0]; i++)
        if (lost[i].file == file) lost[i].file = NULL; /* a later stream may get this address */
    return status;
}

/* ---- files that must stay ------------------------------------------------------------------- */

/* Resolves the links of a path.  If the file does not exist, it resolves the folder and appends the file's name.  If
 * the folder does not exist either, it returns NULL.  The caller frees the result. */
static char *resolve(const char *path) {
    char *whole = realpath(path, NULL);
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    if (whole) return whole;
    char folder[HY_TEXT_MAX] = ".";
    if (slash) snprintf(folder, sizeof folder, "%.*s", (int)(slash - path) + 1, path);
    char *parent = realpath(folder, NULL);
    if (!parent) return NULL;
    size_t size = strlen(parent) + strlen(name) + 2;
    whole = malloc(size);
    if (whole) snprintf(whole, size, "%s/%s", parent, name);
    free(parent);
    return whole;
}

int hy_same_file(const char *a, const char *b) {
    struct stat one, two;
    int found = !stat(a, &one) + !stat(b, &two);
    if (found == 2) return one.st_dev == two.st_dev && one.st_ino == two.st_ino;
    if (found == 1) return 0;
    char *first = resolve(a), *second = resolve(b);
    int same = first && second && !strcmp(first, second);
    free(first);
    free(second);
    return same;
}

gt_status hy_keep_apart(const char *option, const char *path, const char *what, const char *other) {
    if (!*path || !*other || !hy_same_file(path, other)) return GT_OK;
    return hy_fail(GT_ERROR_VALUE, "%s: %s would overwrite %s; give another name", option, path, what);
}

/* ---- the log -------------------------------------------------------------------------------- */

#define COLUMNS                                                                                                        \
    "step,tokens,loss,held_out,grad_norm,rwkv_norm,mamba_norm,lr,tokens_per_s,memory_mib,seconds,grad_ratio,"          \
    "branch_cosine,rwkv_rms,mamba_rms,rwkv_gain,mamba_gain"
/* The headings that a log can have.  Older versions of the program wrote OLDER; this version writes PLAIN, or
 * WATCHED with --watch. */
enum { OLDER, PLAIN, WATCHED, HEADERS };
static const char *const headers[HEADERS] = {COLUMNS "\n", COLUMNS ",final_loss,final_tokens\n",
                                             COLUMNS
                                             ",final_loss,final_tokens,gpu_percent,gpu_celsius,gpu_watts,gpu_mib\n"};

/* Returns the index of the heading that a line contains; -1: the line is no heading. */
static int header_of(const char *line) {
    for (int i = 0; i < HEADERS; i++)
        if (!strcmp(line, headers[i])) return i;
    return -1;
}

/* Gives the file the first free name of PATH.1, PATH.2, ...  With `stays` = 1 the file also keeps its old name, if
 * the file system has hard links. */
static gt_status keep_aside(const char *option, const char *path, int stays, char *kept, size_t size) {
    struct stat found;
    for (int n = 1;; n++) {
        snprintf(kept, size, "%s.%d", path, n);
        if (!link(path, kept)) { /* link never replaces a file, unlike rename */
            if (stays || !unlink(path)) return GT_OK;
            break;
        }
        if (errno == EEXIST || !lstat(kept, &found)) continue;
        if (errno == ENOENT && !rename(path, kept)) return GT_OK; /* the file system has no hard links */
        break;
    }
    return hy_fail(GT_ERROR_VALUE, "%s %s: cannot rename the older file to %s: %s", option, path, kept,
                   strerror(errno));
}

/* The results of read_log. */
typedef struct old_log {
    int is_log, columns;   /* columns: index of the log's heading */
    int64_t kept, dropped; /* number of rows to keep, and number of rows to drop */
    int is_ours, is_whole; /* is_ours: the last kept row is from this run; is_whole: no complete row is dropped */
    long long size;        /* bytes to keep */
} old_log;

/* Returns whether a row has the step and the tokens of `at`, and also its loss if that is known. */
static int is_row_of(const char *row, const hy_log_point *at) {
    char expected[96];
    int length = snprintf(expected, sizeof expected, "%lld,%lld,", (long long)at->step, (long long)at->tokens);
    if (!isnan(at->loss)) length += snprintf(expected + length, sizeof expected - (size_t)length, "%.9g,", at->loss);
    return !strncmp(row, expected, (size_t)length);
}

/* Reads an old log, and decides which rows to keep: all rows before the first row that is later than from->step. */
static gt_status read_log(const char *path, const hy_log_point *from, old_log *old) {
    FILE *file = fopen(path, "r");
    char *line = NULL;
    size_t room = 0;
    ssize_t length;
    *old = (old_log){.is_ours = 1, .is_whole = 1};
    if (!file) return hy_fail(GT_ERROR_VALUE, "csv %s: %s", path, strerror(errno));
    while ((length = getline(&line, &room, file)) > 0) {
        char *end;
        long long step = strtoll(line, &end, 10);
        int is_row = end != line && *end == ',', is_whole = line[length - 1] == '\n';
        if (!old->size) old->columns = header_of(line);
        if (!old->size && !(old->is_log = old->columns >= 0)) break;
        if (old->dropped || !is_whole || (is_row && step > from->step)) {
            old->dropped++;
            old->is_whole &= !is_whole;
            continue;
        }
        old->kept += is_row;
        if (is_row) old->is_ours = is_row_of(line, from);
        old->size += length;
    }
    int failed = ferror(file);
    old->is_ours &= old->kept || old->is_whole; /* without a kept row the dropped rows may be from another run */
    free(line);
    fclose(file);
    return failed ? hy_fail(GT_ERROR_VALUE, "csv %s: %s", path, strerror(EIO)) : GT_OK;
}

static gt_status copy_start(const char *from, const char *to, long long size) {
    FILE *in = fopen(from, "rb"), *out = fopen(to, "wb");
    int c = 0;
    while (in && out && size-- && (c = getc(in)) != EOF) putc(c, out);
    int bad = !in || !out || c == EOF || ferror(in);
    if (in) fclose(in);
    gt_status status = out ? hy_close(out, to) : GT_OK;
    return bad ? hy_fail(GT_ERROR_VALUE, "csv %s: cannot copy the rows of %s into it", to, from) : status;
}

/* Cuts an old log after from->step, or renames it.  *mode is the mode in which the caller opens the file. */
static gt_status prepare(hy_log *log, const char *target, const hy_log_point *from, const char **mode) {
    char kept[HY_PATH_MAX + 16];
    old_log old = {.is_log = 0};
    gt_status status = from ? read_log(target, from, &old) : GT_OK;
    if (status != GT_OK) return status;
    if (!old.is_log || !old.is_ours) {
        status = keep_aside("csv", target, 0, kept, sizeof kept);
        snprintf(log->note, sizeof log->note, "the %s is now %s", old.is_log ? "log of another run" : "older file",
                 kept);
        return status;
    }
    if (!old.is_whole) {
        status = keep_aside("csv", target, 0, kept, sizeof kept);
        if (status == GT_OK) status = copy_start(kept, target, old.size);
        if (status != GT_OK) return status;
    } else if (truncate(target, (off_t)old.size))
        return hy_fail(GT_ERROR_VALUE, "csv %s: %s", log->path, strerror(errno));
    *mode = "r+";
    log->columns = old.columns;
    snprintf(log->note, sizeof log->note, "continued; rows kept: %lld, later ones dropped: %lld%s%s",
             (long long)old.kept, (long long)old.dropped, old.is_whole ? "" : "; the whole log is kept as ",
             old.is_whole ? "" : kept);
    return GT_OK;
}

int hy_is_standard(const char *path) {
    struct stat standard, file;
    if (stat(path, &file) || !S_ISREG(file.st_mode)) return 0;
    for (int fd = STDOUT_FILENO; fd <= STDERR_FILENO; fd++)
        if (!fstat(fd, &standard) && standard.st_dev == file.st_dev && standard.st_ino == file.st_ino) return 1;
    return 0;
}

/* Stores in `target` the file that the link `path` leads to, or `path` itself if it is no link. */
static void follow_link(const char *path, char *target) {
    struct stat found;
    char *whole = !lstat(path, &found) && S_ISLNK(found.st_mode) ? realpath(path, NULL) : NULL;
    const char *from = whole ? whole : path;
    size_t length = strlen(from);
    if (length >= HY_PATH_MAX) length = HY_PATH_MAX - 1;
    memcpy(target, from, length);
    target[length] = 0;
    free(whole);
}

gt_status hy_keep_older(const char *option, const char *path, char *kept, size_t size) {
    char target[HY_PATH_MAX];
    struct stat found;
    *kept = 0;
    if (stat(path, &found) || !S_ISREG(found.st_mode) || !found.st_size) return GT_OK;
    follow_link(path, target);
    return keep_aside(option, target, 1, kept, size);
}

gt_status hy_log_open(hy_log *log, const char *path, const hy_log_point *from, int watched) {
    struct stat found;
    const char *mode = "w";
    gt_status status = GT_OK;
    *log = (hy_log){.columns = watched ? WATCHED : PLAIN};
    if (!*path) return GT_OK;
    char target[HY_PATH_MAX];
    snprintf(log->path, sizeof log->path, "%s", path);
    follow_link(path, target);
    if (!stat(path, &found) && S_ISREG(found.st_mode)) {
        if (hy_is_standard(path))
            return hy_fail(GT_ERROR_VALUE, "csv: %s already receives the report; give another name", path);
        if (found.st_size) status = prepare(log, target, from, &mode);
    }
    if (status != GT_OK) return status;
    log->file = fopen(target, mode);
    if (!log->file) return hy_fail(GT_ERROR_VALUE, "csv %s: %s", path, strerror(errno));
    log->is_regular = !fstat(fileno(log->file), &found) && S_ISREG(found.st_mode);
    if (*mode == 'w')
        fputs(headers[log->columns], log->file);
    else if (fseeko(log->file, 0, SEEK_END))
        return hy_fail(GT_ERROR_VALUE, "csv %s: %s", path, strerror(errno));
    return hy_flush(log->file, log->path);
}

/* Appends text to a row. */
static void add(char *row, const char *format, ...) {
    size_t used = strlen(row);
    va_list list;
    va_start(list, format);
    vsnprintf(row + used, HY_ROW_MAX - used, format, list);
    va_end(list);
}

/* Appends further columns to a row.  A number that is not finite leaves its column empty. */
static void add_numbers(char *row, const double *numbers, int count) {
    for (int i = 0; i < count; i++)
        if (isfinite(numbers[i]))
            add(row, ",%.6g", numbers[i]);
        else
            add(row, ",");
}

/* Appends the last columns and the line end to a row.  The columns of a missing branch stay empty. */
static void add_end(const hy_log *log, char *row, const hy_probe *p, double final_loss, int64_t final_tokens,
                    const hy_gpu *gpu) {
    double numbers[5] = {(double)NAN, (double)NAN, (double)NAN, (double)NAN, (double)NAN};
    if (p && p->has[0] && p->has[1]) numbers[0] = p->branch_cosine;
    for (int k = 0; p && k < 2; k++)
        if (p->has[k]) numbers[1 + k] = p->branch_rms[k], numbers[3 + k] = p->branch_gain[k];
    add_numbers(row, numbers, 5);
    if (log->columns >= PLAIN && final_tokens)
        add(row, ",%.9g,%lld", final_loss, (long long)final_tokens);
    else if (log->columns >= PLAIN)
        add(row, ",,");
    if (log->columns == WATCHED)
        add_numbers(row, (const double[]){gpu->percent, gpu->celsius, gpu->watts, gpu->mib}, 4);
    add(row, "\n");
}

/* Returns the beginning of column `index` of a row, counted from 0; NULL if the row has fewer columns. */
static const char *column(const char *row, int index) {
    for (; row && index > 0; index--)
        if ((row = strchr(row, ','))) row++;
    return row;
}

enum { HELD_OUT = 3, BRANCHES = 12, GPU = 19 }; /* indices of columns in a row */

/* Reads the GPU's numbers from the last row; an empty column gives NAN. */
static hy_gpu gpu_of(const hy_log *log) {
    double number[4] = {(double)NAN, (double)NAN, (double)NAN, (double)NAN};
    for (int i = 0; i < 4 && log->columns == WATCHED; i++) {
        const char *field = column(log->row, GPU + i);
        if (field && *field != ',' && *field != '\n') number[i] = strtod(field, NULL);
    }
    return (hy_gpu){number[0], number[1], number[2], number[3]};
}

/* Returns 1 if the last row is complete but has no held-out loss and no branches. */
static int is_incomplete(const hy_log *log) {
    const char *held_out = column(log->row, HELD_OUT), *branches = column(log->row, BRANCHES);
    const size_t empty = log->columns == OLDER ? 4 : 6; /* number of commas between the empty columns */
    return held_out && *held_out == ',' && branches && strspn(branches, ",") >= empty && strchr(branches, '\n') &&
           (log->columns == WATCHED || branches[empty] == '\n');
}

gt_status hy_log_reopen(hy_log *log, const char *path, const hy_log_point *last) {
    char target[HY_PATH_MAX], line[HY_ROW_MAX];
    struct stat found;
    *log = (hy_log){.file = NULL};
    if (!*path || stat(path, &found) || !S_ISREG(found.st_mode) || hy_is_standard(path)) return GT_OK;
    snprintf(log->path, sizeof log->path, "%s", path);
    follow_link(path, target);
    FILE *file = fopen(target, "r");
    if (!file) return hy_fail(GT_ERROR_VALUE, "csv %s: %s", path, strerror(errno));
    int is_log = fgets(line, sizeof line, file) && (log->columns = header_of(line)) >= 0;
    for (off_t at = ftello(file); is_log && fgets(line, sizeof line, file); at = ftello(file)) {
        strcpy(log->row, line);
        log->at = (long long)at;
    }
    int failed = ferror(file);
    fclose(file);
    if (failed) return hy_fail(GT_ERROR_VALUE, "csv %s: %s", path, strerror(EIO));
    if (!is_log || !is_row_of(log->row, last) || !is_incomplete(log)) return GT_OK;
    log->file = fopen(target, "r+");
    log->is_regular = 1;
    return log->file ? GT_OK : hy_fail(GT_ERROR_VALUE, "csv %s: %s", path, strerror(errno));
}

gt_status hy_log_write(hy_log *log, const hy_log_row *r) {
    char *row = log->row;
    if (!log->file) return GT_OK;
    *row = 0;
    add(row, "%lld,%lld,%.9g,", (long long)r->step, (long long)r->tokens, r->loss);
    if (!isnan(r->held_out)) add(row, "%.9g", r->held_out);
    add(row, ",%.9g,%.9g,%.9g,%.9g,%.0f,%.1f,%.3f", r->grad_norm, r->rwkv_norm, r->mamba_norm, r->lr, r->tokens_per_s,
        r->memory_mib, r->seconds);
    add_numbers(row, &r->ratio, 1);
    add_end(log, row, r->probe, r->final_loss, r->final_tokens, &r->gpu);
    log->at = log->is_regular ? (long long)ftello(log->file) : 0;
    fputs(row, log->file);
    return hy_flush(log->file, log->path);
}

/* Overwrites the last row in the file.  Returns 0, or errno after a failure. */
static int put_row(const hy_log *log, const char *row) {
    size_t length = strlen(row);
    errno = 0;
    ssize_t written = pwrite(fileno(log->file), row, length, (off_t)log->at);
    return written == (ssize_t)length ? 0 : errno ? errno : ENOSPC;
}

gt_status hy_log_complete(hy_log *log, double held_out, double final_loss, int64_t final_tokens,
                          const hy_probe *probe) {
    char row[HY_ROW_MAX] = "", number_text[32] = "";
    if (!log->file) return GT_OK;
    const char *field = column(log->row, HELD_OUT), *branches = column(log->row, BRANCHES);
    if (!isnan(held_out)) snprintf(number_text, sizeof number_text, "%.9g", held_out);
    add(row, "%.*s%s%.*s", (int)(field - log->row), log->row, number_text, (int)(branches - 1 - field), field);
    const hy_gpu gpu = gpu_of(log);
    add_end(log, row, probe, final_loss, final_tokens, &gpu);
    const int number = put_row(log, row); /* the new row is longer, so it covers the old one */
    if (number) {
        const off_t end = (off_t)log->at + (off_t)strlen(log->row);
        const int is_back = !put_row(log, log->row) && !ftruncate(fileno(log->file), end);
        return hy_fail(HY_ERROR_WRITE, "cannot write %s: %s%s", log->path, strerror(number),
                       is_back ? "" : "; the last row of the file is now damaged");
    }
    memcpy(log->row, row, sizeof row);
    return fseeko(log->file, 0, SEEK_END) ? hy_fail(HY_ERROR_WRITE, "cannot write %s: %s", log->path, strerror(errno))
                                          : GT_OK;
}

gt_status hy_log_close(hy_log *log) {
    FILE *file = log->file;
    log->file = NULL;
    return file ? hy_close(file, log->path) : GT_OK;
}
