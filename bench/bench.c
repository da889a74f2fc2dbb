/* bench/bench.c - times every operator and pass, and checks the timed run itself.  It compares the outputs, or a sample
 * of them, with the double reference on the same inputs.  If the check fails, it prints FAIL and no time.  See --help.
 * This file has the options, the loop over the rows of ops/OP.c, and the printing.  call.c makes one call.
 * machine_host.c and machine_gpu.cu run the call.
 *
 * With BENCH_PTX this file makes gt_bench_ptx, whose wkv6, ssd and selective_scan have only PTX and no machine code.
 * With BENCH_CUBLASLT it makes gt_bench_cublaslt, which gives rmsnorm_linear a cuBLASLt handle.  That program also
 * times only the products of rmsnorm_linear, by cuBLASLt. */
#define _POSIX_C_SOURCE 200809L
#include "bench.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* only_ops: names of operators, with a space before and after each; empty: all operators */
#ifdef BENCH_PTX
static const char gpu_impl[] = "gt_ptx", only_ops[] = " wkv6 ssd selective_scan ";
enum { HAS_HOST_ROWS = 0 };
#elif defined BENCH_CUBLASLT
static const char gpu_impl[] = "gt_cublaslt", only_ops[] = " rmsnorm_linear ";
enum { HAS_HOST_ROWS = 0 };
#else
static const char gpu_impl[] = "gt", only_ops[] = "";
enum { HAS_HOST_ROWS = 1 };
#endif

#define COUNT(array) ((int)(sizeof array / sizeof *array))

/* ---- files ----------------------------------------------------------------------------------- */

/* Gives a closed standard stream a descriptor with which its use fails.  Otherwise its output would go to the next file
 * that is opened.  Also ignores SIGXFSZ, so that a file at its size limit (ulimit -f) gives an ordinary error. */
static void open_streams(void) {
    signal(SIGXFSZ, SIG_IGN);
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY) < 0) exit(1);
}

/* Ends the program with an error if output was lost. */
static void check_written(FILE *f, const char *name) {
    errno = 0;
    if (!fflush(f) && !ferror(f)) return;
    fprintf(stderr, "cannot write %s: %s\n", name, errno ? strerror(errno) : "a part of the output was lost");
    exit(1);
}

static void close_file(FILE *f, const char *name) {
    check_written(f, name);
    errno = 0;
    if (!fclose(f)) return;
    fprintf(stderr, "cannot write %s: %s\n", name, strerror(errno));
    exit(1);
}

static int is_same_file(const char *a, const char *b) {
    struct stat one, two;
    return !stat(a, &one) && !stat(b, &two) && one.st_dev == two.st_dev && one.st_ino == two.st_ino;
}

static FILE *open_file(const char *name, const char *mode) {
    FILE *f = fopen(name, mode);
    if (f) return f;
    perror(name);
    exit(2);
}

/* ---- options --------------------------------------------------------------------------------- */

static const char help_text[] =
    "usage: gt_bench [--filter TEXT] [--quick] [--csv FILE] [--peers FILE] [--list] [--help]\n"
    "       gt_bench_ptx, with the same options, times wkv6, ssd and selective_scan, as gt_ptx\n"
    "  --filter TEXT  only rows that hold every word of TEXT, for example 'wkv6 bwd gt' or 'bf16 T4096'\n"
    "  --quick        one timed run per row\n"
    "  --csv FILE     write the rows to FILE too\n"
    "  --peers FILE   compare with the rows of FILE, written by bench/peers.py\n"
    "  --list         print the rows for GPUs as CSV and run none\n"
    "columns:\n"
    "  pass      fwd: forward with `saved` for bwd; inf: forward without it; seg, segb, join, joinb:\n"
    "            gt_OP_segment, gt_OP_join, of 8 pieces, and their backward\n"
    "  impl      gt: the kernels on the GPU; ref: the CPU twin, plain C; gt_ptx: the kernels as\n"
    "            the driver compiles them from PTX of compute_80, for GPUs newer than the\n"
    "            architectures of the build\n"
    "  ms        median of repeated runs after warm-ups; on the GPU with its L2 flushed.  A step is\n"
    "            captured in a CUDA graph; the time is of a replay\n"
    "  GB/s      compulsory bytes (each input read once, each output written once) per time\n"
    "  floor     ms of a memory copy of as many bytes; on a CPU a cache may be faster\n"
    "  x floor   ms over floor\n"
    "  TFLOP/s   of the formulas' own operations, if these are products\n"
    "  MiB       saved and workspace\n"
    "  error     largest relative error (l2) of the timed run's outputs against the double twin\n"
    "  x ref     speed-up per token over the CPU twin on a small batch of the same sizes: 8 of\n"
    "            32 tokens, or 128 rows\n"
    "  x peer    speed-up over the best peer, and its name\n";

typedef struct options {
    const char *filter, *csv, *peers;
    int quick, list;
} options;

static options parse_options(int argc, char **argv) {
    options o = {.filter = ""};
    for (int i = 1; i < argc; i++) {
        int has_value = i + 1 < argc;
        if (!strcmp(argv[i], "--help")) {
            fputs(help_text, stdout);
            close_file(stdout, "standard output");
            exit(0);
        } else if (!strcmp(argv[i], "--quick")) {
            o.quick = 1;
        } else if (!strcmp(argv[i], "--list")) {
            o.list = 1;
        } else if (!strcmp(argv[i], "--filter") && has_value) {
            o.filter = argv[++i];
        } else if (!strcmp(argv[i], "--csv") && has_value) {
            o.csv = argv[++i];
        } else if (!strcmp(argv[i], "--peers") && has_value) {
            o.peers = argv[++i];
        } else {
            fprintf(stderr, "%s: unknown option or missing value\n%s", argv[i], help_text);
            exit(2);
        }
    }
    return o;
}

/* ---- times to compare with ------------------------------------------------------------------- */

/* A known time of a peer or of the CPU twin.  key: "op,pass,dtype,shape". */
typedef struct known_time {
    char key[240], impl[40];
    double ms;
} known_time;

typedef struct known_times {
    known_time *of;
    int count;
} known_times;

static void learn(known_times *k, const char *key, const char *impl, double ms) {
    known_time *more = realloc(k->of, (size_t)(k->count + 1) * sizeof *more);
    if (!more) {
        fputs("out of memory\n", stderr);
        exit(2);
    }
    k->of = more;
    known_time *t = &k->of[k->count++];
    snprintf(t->key, sizeof t->key, "%s", key);
    snprintf(t->impl, sizeof t->impl, "%s", impl);
    t->ms = ms;
}

/* Returns the shortest time for a key, or NULL. */
static const known_time *recall(const known_times *k, const char *key) {
    const known_time *best = NULL;
    for (int i = 0; i < k->count; i++)
        if (!strcmp(k->of[i].key, key) && (!best || k->of[i].ms < best->ms)) best = &k->of[i];
    return best;
}

/* Reads lines of the form op,pass,impl,dtype,shape,ms,...  Skips other lines and lines without a time. */
static void read_peers(known_times *k, const char *name) {
    char line[240], key[sizeof line];
    FILE *f = open_file(name, "r");
    while (fgets(line, sizeof line, f)) {
        char *field[6], *next = line, *end;
        int n = 0;
        while (n < COUNT(field) && next) {
            field[n++] = next;
            next = strchr(next, ',');
            if (next) *next++ = 0;
        }
        if (n < COUNT(field) || !strncmp(field[2], "gt", 2)) continue; /* gt is no peer, but this library */
        double ms = strtod(field[5], &end);
        if (end == field[5] || !(ms > 0)) continue;
        int length = snprintf(key, sizeof key, "%s,%s,%s,%s", field[0], field[1], field[3], field[4]);
        if (length > 0 && length < (int)sizeof key) learn(k, key, field[2], ms);
    }
    fclose(f);
    if (k->count) return;
    fprintf(stderr, "%s: no rows\n", name);
    exit(2);
}

/* ---- one row --------------------------------------------------------------------------------- */

typedef struct report {
    options o;
    FILE *csv;
    known_times peers, twins; /* the twins' times are in ms per token; their keys have the sizes of the small batch */
    const bench_machine *machine;
    double bandwidth; /* the machine's bandwidth in bytes per ms */
    const char *op;   /* operator of the last row */
    int failed;
} report;

typedef struct measurement {
    gt_status status;
    int is_right;
    double ms, error;
} measurement;

static const char *const dtype_names[] = {"", "f32", "bf16", "f16"};

static const char *pass_name(const bench_call *c) {
    static const char *const names[GT_PASSES] = {"fwd", "bwd", "step", "seg", "segb", "join", "joinb"};
    return c->is_inference ? "inf" : names[c->pass];
}

static double tokens(const bench_call *c) {
    const int64_t *n = c->dims.n;
    return n['M' - 'A'] ? (double)n['M' - 'A'] : (double)(n['B' - 'A'] * n['T' - 'A']);
}

static double tera_flops(const bench_call *c, double ms) {
    const test_op *op = c->functions;
    if (c->pass >= GT_SEGMENT) return 0;
    double n = c->pass == GT_BACKWARD ? op->operations.backward : op->operations.forward;
    for (const char *l = op->operations.letters; l && *l; l++) n *= (double)c->dims.n[*l - 'A'];
    return n / ms * 1e-9;
}

static int is_unsupported(gt_status status) { return status >= GT_ERROR_UNSUPPORTED && status < GT_ERROR_NO_DEVICE; }

/* Measures the median time of as many runs as the budget allows.  Before the last run the outputs are set to NaN, so
 * that a check after it finds outputs that were not written. */
static gt_status time_call(bench_call *c, int is_quick, double *ms) {
    enum { MOST_RUNS = 101 };
    const bench_machine *m = c->machine;
    double all[MOST_RUNS], last = 0;
    int warm_ups = is_quick ? 1 : m->warm_ups, runs = 1;
    gt_status status = GT_OK;
    for (int i = 0; i < warm_ups && status == GT_OK; i++) {
        bench_restore(c);
        status = m->time(c->functions, c->pass, &c->args, &last);
    }
    if (!is_quick) runs = (int)fmin(fmax(m->budget_ms / last, m->least_runs), MOST_RUNS);
    for (int i = 0; i < runs && status == GT_OK; i++) {
        bench_restore(c);
        if (i == runs - 1) bench_poison(c);
        status = m->time(c->functions, c->pass, &c->args, &all[i]);
    }
    if (status == GT_OK) *ms = bench_median(all, runs);
    return status;
}

/* Allocates, times and checks one call. */
static measurement measure(bench_call *c, int is_quick) {
    measurement m = {.is_right = 1, .error = NAN};
    m.status = bench_allocate(c);
    if (m.status == GT_OK) m.status = time_call(c, is_quick, &m.ms);
    if (m.status == GT_OK && !c->machine->is_partial) m.is_right = bench_check(c, &m.error);
    if (m.status != GT_OK && !is_unsupported(m.status)) {
        snprintf(c->complaint, sizeof c->complaint, "%s", gt_last_error());
        m.is_right = 0;
    }
    bench_close(c);
    return m;
}

/* ---- printing -------------------------------------------------------------------------------- */

static void print_fact(report *r, const char *name, const char *format, ...) {
    char text[300];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    printf("%-10s %s\n", name, text);
    if (r->csv) fprintf(r->csv, "# %s: %s\n", name, text);
}

static void print_facts(report *r) {
    const char *commit = getenv("GT_COMMIT");
    print_fact(r, "version", "gt_kernels %d.%d.%d", GT_VERSION_MAJOR, GT_VERSION_MINOR, GT_VERSION_PATCH);
    if (commit) print_fact(r, "commit", "%s", commit);
#if defined(__clang__)
    print_fact(r, "compiler", "%s", __VERSION__);
#elif defined(__GNUC__)
    print_fact(r, "compiler", "gcc %s", __VERSION__);
#endif
}

static void print_machine(report *r, const char *name) {
    char text[256];
    r->machine->describe(text, sizeof text);
    r->bandwidth = r->machine->copy_bandwidth();
    print_fact(r, name, "%s; copies %.1f GB/s, read + written", text, r->bandwidth * 1e-6);
}

static void print_start(report *r, const bench_call *c) {
    if (!r->op || strcmp(r->op, c->row.op))
        printf("\n%s\n%-5s %-6s %-5s %-26s %10s %11s %8s %8s %8s %7s %8s %8s %8s %7s\n", c->row.op, "pass", "impl",
               "dtype", "shape", "ms", "tokens/s", "GB/s", "floor", "x floor", "TFLOP/s", "MiB", "error", "x ref",
               "x peer");
    r->op = c->row.op;
    printf("%-5s %-6s %-5s %-26s ", pass_name(c), c->machine->impl, dtype_names[bench_dtype(c)], c->shape);
}

/* Returns the time of the CPU twin in ms per token, or 0 if the twin cannot run the call.  The first request times the
 * twin, on a small batch with the call's other sizes. */
static double twin_ms(report *r, const bench_call *c) {
    static const struct {
        char letter;
        int64_t most;
    } limits[] = {{'B', 8}, {'T', 32}, {'M', 128}};
    char key[120];
    bench_call twin;
    test_case row = c->row;
    double ms = 0;
    for (int i = 0; i < COUNT(limits); i++)
        if (test_get_size(&row, limits[i].letter) > limits[i].most)
            test_set_size(&row, limits[i].letter, limits[i].most);
    bench_open(&twin, &bench_host, &row, bench_dtype(c), c->pass, 0);
    snprintf(key, sizeof key, "%s,%s,%s,%s", row.op, pass_name(&twin), dtype_names[bench_dtype(c)], twin.shape);
    const known_time *known = recall(&r->twins, key);
    if (known) return known->ms;
    if (bench_allocate(&twin) != GT_OK || time_call(&twin, r->o.quick, &ms) != GT_OK) ms = 0;
    ms /= tokens(&twin);
    bench_close(&twin);
    learn(&r->twins, key, bench_host.impl, ms);
    return ms;
}

/* Prints the speed-ups over the CPU twin, per token, and over the fastest peer. */
static void print_ratios(report *r, const bench_call *c, double ms) {
    char key[120];
    if (c->machine == &bench_host) return;
    printf(" %8.0f", twin_ms(r, c) * tokens(c) / ms);
    snprintf(key, sizeof key, "%s,%s,%s,%s", c->row.op, pass_name(c), dtype_names[bench_dtype(c)], c->shape);
    const known_time *other = recall(&r->peers, key);
    if (other) printf(" %7.2f %s", other->ms / ms, other->impl);
}

static void print_result(report *r, const bench_call *c, const measurement *m) {
    double bytes = bench_compulsory_bytes(c), floor_ms = bytes / r->bandwidth;
    double mib = (double)c->scratch_bytes / 1048576, flops = tera_flops(c, m->ms);
    char ms[32] = "FAIL", products[32] = "";
    if (flops >= 0.01) snprintf(products, sizeof products, "%.2f", flops);
    if (m->is_right) {
        snprintf(ms, sizeof ms, "%.4f", m->ms);
        printf("%10s %11.0f %8.2f %8.4f %8.1f %7s %8.1f %8.1e", ms, tokens(c) / m->ms * 1e3, bytes / m->ms * 1e-6,
               floor_ms, m->ms / floor_ms, products, mib, m->error);
        print_ratios(r, c, m->ms);
    } else {
        printf("%10s %62s %8.1e  %s", ms, "", m->error, c->complaint);
    }
    putchar('\n');
    if (r->csv)
        fprintf(r->csv, "%s,%s,%s,%s,%s,%s,%.6f,%.3e,%.3f\n", c->row.op, pass_name(c), c->machine->impl,
                dtype_names[bench_dtype(c)], c->shape, ms, floor_ms, m->error, mib);
}

/* Prints a row that was not run, and the reason.  This is no failure. */
static void print_reason(report *r, const bench_call *c, const char *reason) {
    printf("%10s %s\n", "-", reason);
    if (r->csv)
        fprintf(r->csv, "# not run: %s,%s,%s,%s,%s: %s\n", c->row.op, pass_name(c), c->machine->impl,
                dtype_names[bench_dtype(c)], c->shape, reason);
}

/* Ends the program with an error if any output so far was not written. */
static void check_report(const report *r) {
    check_written(stdout, "standard output");
    if (r->csv) check_written(r->csv, r->o.csv);
}

/* ---- all rows -------------------------------------------------------------------------------- */

/* Returns whether every word of `words` is also in `text`, which begins and ends with a space. */
static int has_words(const char *text, const char *words) {
    while (*(words += strspn(words, " "))) {
        char word[160];
        const int length = (int)strcspn(words, " ");
        if (snprintf(word, sizeof word, " %.*s ", length, words) >= (int)sizeof word || !strstr(text, word)) return 0;
        words += length;
    }
    return 1;
}

static int is_wanted(const report *r, const bench_call *c) {
    char text[160];
    snprintf(text, sizeof text, " %s %s %s %s %s ", c->row.op, pass_name(c), c->machine->impl,
             dtype_names[bench_dtype(c)], c->shape);
    return has_words(text, r->o.filter) && (!*only_ops || has_words(only_ops, c->row.op));
}

/* Returns whether memory can hold the arrays, the scratch, and copies of samples for the comparison.  If not, writes
 * the reason. */
static int fits(const bench_call *c, const gt_workspace *need, char *reason, size_t bytes) {
    double wanted = bench_array_bytes(c) * 1.25;
    wanted += (double)(need->saved + (need->forward > need->backward ? need->forward : need->backward));
    if (wanted < (double)c->machine->available()) return 1;
    snprintf(reason, bytes, "needs %.0f MiB of memory", wanted / 1048576);
    return 0;
}

/* Runs and prints one row, unless the filter excludes it.  If the row cannot run, prints the reason. */
static void run_row(report *r, const test_case *row, gt_dtype dtype, gt_pass pass, int is_inference) {
    bench_call c;
    gt_workspace need;
    char reason[80];
    bench_open(&c, r->machine, row, dtype, pass, is_inference);
    if (!is_wanted(r, &c)) return;
    gt_status status = bench_ask(&c, &need);
    if (status == GT_OK && is_inference && !need.saved) return; /* without `saved`, inf is the same as fwd */
    print_start(r, &c);
    if (is_unsupported(status)) {
        print_reason(r, &c, gt_status_string(status));
    } else if (!fits(&c, &need, reason, sizeof reason)) {
        print_reason(r, &c, reason);
    } else {
        check_report(r);
        measurement m = measure(&c, r->o.quick);
        if (is_unsupported(m.status))
            print_reason(r, &c, gt_status_string(m.status));
        else
            print_result(r, &c, &m);
        r->failed += !m.is_right;
    }
    check_report(r);
}

static void list_row(report *r, const test_case *row, gt_dtype dtype, gt_pass pass, int is_inference) {
    bench_call c;
    bench_open(&c, r->machine, row, dtype, pass, is_inference);
    if (is_wanted(r, &c)) printf("%s,%s,%s,%s,%s\n", c.row.op, pass_name(&c), gpu_impl, dtype_names[dtype], c.shape);
}

/* The type of run_row and list_row. */
typedef void row_action(report *r, const test_case *row, gt_dtype dtype, gt_pass pass, int is_inference);

static void for_rows(report *r, const test_op *op, const test_bench_row *rows, row_action *action) {
    for (const test_bench_row *row = rows; row->c.op; row++) {
        int64_t T = test_get_size(&row->c, 'T');
        int is_step = test_is_over_time(op) ? T > 0 && T <= 16 : test_has_pass(&row->c, GT_STEP);
        int can_save = r->machine->has_saved && op->table()->fields.saved != 0;
        for (int i = GT_F32; i <= GT_F16; i++) {
            gt_dtype dtype = (gt_dtype)i;
            if (!(row->dtypes & (1 << dtype))) continue;
            if (test_get_pieces(&row->c)) {
                for (int pass = GT_SEGMENT; pass <= GT_JOIN_BACKWARD; pass++)
                    action(r, &row->c, dtype, (gt_pass)pass, 0);
                continue;
            }
            if (is_step) {
                action(r, &row->c, dtype, GT_STEP, 0);
                continue;
            }
            action(r, &row->c, dtype, GT_FORWARD, 0);
            if (can_save) action(r, &row->c, dtype, GT_FORWARD, 1);
            action(r, &row->c, dtype, GT_BACKWARD, 0);
        }
    }
}

static void run_rows(report *r, const bench_machine *machine, const char *name) {
    r->machine = machine;
    r->op = NULL;
    print_machine(r, name);
    for (int i = 0; test_ops[i]; i++)
        if (!machine->only || !strcmp(machine->only, test_ops[i]->name))
            for_rows(r, test_ops[i], machine == &bench_host ? test_ops[i]->host_rows : test_ops[i]->gpu_rows, run_row);
    putchar('\n');
}

int main(int argc, char **argv) {
    open_streams();
    report r = {.o = parse_options(argc, argv)};
    const char *reason = "";
    if (r.o.list) {
        bench_machine any_gpu = {.impl = gpu_impl, .has_saved = 1};
        r.machine = &any_gpu;
        puts("op,pass,impl,dtype,shape");
        for (int i = 0; test_ops[i]; i++) for_rows(&r, test_ops[i], test_ops[i]->gpu_rows, list_row);
        close_file(stdout, "standard output");
        return 0;
    }
    if (r.o.csv && r.o.peers && is_same_file(r.o.csv, r.o.peers)) {
        fprintf(stderr, "--csv %s would overwrite the file of --peers\n", r.o.csv);
        return 2;
    }
    if (r.o.peers) read_peers(&r.peers, r.o.peers);
    if (r.o.csv) r.csv = open_file(r.o.csv, "w");
    print_facts(&r);
    const bench_machine *gpu = bench_gpu(gpu_impl, &reason);
    if (!gpu) print_fact(&r, "gpu", "not measured: %s", reason);
    if (r.csv) fprintf(r.csv, "op,pass,impl,dtype,shape,ms,floor_ms,rel_err,mem_mib\n");
    if (HAS_HOST_ROWS) run_rows(&r, &bench_host, "cpu");
    if (gpu) run_rows(&r, gpu, "gpu");
    if (gpu && bench_products()) run_rows(&r, bench_products(), "gpu, products alone");
    if (gpu) run_rows(&r, bench_two_streams(), "gpu, wkv6 and ssd on two streams");
    free(r.peers.of);
    free(r.twins.of);
    if (r.failed) printf("%d rows failed\n", r.failed);
    if (r.csv) close_file(r.csv, r.o.csv);
    close_file(stdout, "standard output");
    return r.failed != 0;
}
