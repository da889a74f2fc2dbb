#include "hybrid_profile.h"
#include "hybrid_calls.h"
#include "hybrid_log.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        gt_status status_ = (call);                                                                                    \
        if (status_ != GT_OK) return status_;                                                                          \
    } while (0)

enum { WARM_UP = 3, STEPS = 20, RUNS = 10, CPU_RUNS = 3, ROWS = 128 };
/* The device idles for this many seconds at the start of a step.  Meanwhile the host launches calls in advance, so
 * the measured times contain no launch overhead. */
static const double head_start = 5e-3;

typedef struct row {
    const char *pass, *part, *name;
    int64_t calls, nodes;
    double bytes, seconds;
} row;

typedef struct profile {
    hy_backend *backend;
    hy_model *model;
    const int32_t *tokens, *targets, *keep;
    double loss_scale;
    row rows[ROWS];
    int row_count, is_timing, is_inside;
    int *row_of;          /* for each call of a step, in order: the index of its row ... */
    double *least;        /* ... and its shortest time so far, in seconds */
    double *now;          /* room for the times of one step */
    int64_t count, room;  /* number of calls in a step; number of calls that the arrays have room for */
    int64_t at;           /* number of calls that the current step has made */
    const hy_call *taken; /* the call whose nodes are being counted */
} profile;

static gt_status step(profile *p) {
    const hy_optimizer still = {
        .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .max_norm = 1, .loss_scale = (float)p->loss_scale};
    p->at = 0;
    return hy_model_train(p->model, p->tokens, p->targets, p->keep, &still);
}

/* Measures the time of whole steps, as training runs them.  The backend replays its recordings if it makes any, and
 * each step is followed by a wait. */
static gt_status time_steps(profile *p, double *seconds) {
    double start = 0;
    for (int i = 0; i < WARM_UP + STEPS; i++) {
        if (i == WARM_UP) start = hy_now();
        TRY(step(p));
        TRY(p->backend->synchronize(p->backend));
    }
    *seconds = (hy_now() - start) / STEPS;
    return GT_OK;
}

/* ---- calls -------------------------------------------------------------------------------------- */

static row *find_row(profile *p, const hy_call *call) {
    const hy_place at = p->backend->at;
    for (int i = 0; i < p->row_count; i++) {
        row *r = &p->rows[i];
        if (!strcmp(r->pass, at.pass) && !strcmp(r->part, at.part) && !strcmp(r->name, call->name)) return r;
    }
    if (p->row_count == ROWS) return NULL;
    p->rows[p->row_count] = (row){.pass = at.pass, .part = at.part, .name = call->name};
    return &p->rows[p->row_count++];
}

static gt_status make_taken(void *argument) {
    const profile *p = argument;
    return p->taken->make(p->backend, p->taken->args);
}

static gt_status more_room(profile *p) {
    const int64_t room = p->room ? 2 * p->room : 1024;
    int *rows = realloc(p->row_of, (size_t)room * sizeof *rows);
    if (rows) p->row_of = rows;
    double *least = realloc(p->least, (size_t)room * sizeof *least);
    if (least) p->least = least;
    double *now = realloc(p->now, (size_t)room * sizeof *now);
    if (now) p->now = now;
    if (!rows || !least || !now) return hy_fail(GT_ERROR_MEMORY, "no memory for %lld calls", (long long)room);
    p->room = room;
    return GT_OK;
}

/* In the first step: stores which calls a step makes. */
static gt_status note(profile *p, const hy_call *call) {
    hy_backend *be = p->backend;
    row *r = find_row(p, call);
    int64_t nodes = 0;
    if (!r) return hy_fail(GT_ERROR_SIZE, "profile: more than %d different calls", ROWS);
    if (p->count == p->room) TRY(more_room(p));
    p->taken = call;
    if (be->nodes) TRY(be->nodes(be, make_taken, p, &nodes));
    p->row_of[p->count] = (int)(r - p->rows);
    p->least[p->count++] = 1e30;
    r->calls++, r->nodes += nodes, r->bytes += call->bytes;
    return call->make(be, call->args);
}

static gt_status time_call(profile *p, const hy_call *call) {
    hy_backend *be = p->backend;
    if (p->at == p->count) return hy_fail(GT_ERROR_UNSUPPORTED, "profile: two steps made different calls");
    if (be->mark) {
        if (p->at == 0) TRY(be->delay(be, head_start));
        if (p->at == 0) TRY(be->mark(be));
        TRY(call->make(be, call->args));
        p->at++;
        return be->mark(be);
    }
    TRY(be->synchronize(be));
    const double start = hy_now();
    TRY(call->make(be, call->args));
    TRY(be->synchronize(be));
    p->now[p->at++] = hy_now() - start;
    return GT_OK;
}

/* Receives every call from hy_calls_see.  An operator that calls others, as rmsnorm_linear does on the CPU, counts
 * as one call. */
static gt_status see(void *seer, hy_backend *be, const hy_call *call) {
    profile *p = seer;
    if (p->is_inside) return call->make(be, call->args);
    p->is_inside = 1;
    gt_status status = p->is_timing ? time_call(p, call) : note(p, call);
    p->is_inside = 0;
    return status;
}

static gt_status see_steps(profile *p) {
    hy_backend *be = p->backend;
    const int runs = be->mark ? RUNS : CPU_RUNS;
    TRY(step(p));
    TRY(be->synchronize(be));
    p->is_timing = 1;
    for (int run = 0; run < runs; run++) {
        TRY(step(p));
        if (be->mark) TRY(be->marks(be, p->now, p->at));
        TRY(be->synchronize(be));
        for (int64_t i = 0; i < p->at; i++)
            if (p->now[i] < p->least[i]) p->least[i] = p->now[i];
    }
    for (int64_t i = 0; i < p->count; i++) p->rows[p->row_of[i]].seconds += p->least[i];
    return GT_OK;
}

/* ---- printing ---------------------------------------------------------------------------- */

/* Prints a row of the profile.  `all` is the time of all calls, in seconds. */
static void print_row(const profile *p, const row *r, double all) {
    static const char *const ends[] = {"_forward", "_backward", "_step"};
    size_t length = strlen(r->name);
    for (int i = 0; i < 3; i++) {
        const size_t end = strlen(ends[i]);
        if (length > end && !strcmp(r->name + length - end, ends[i])) length -= end;
    }
    printf("%s,%.*s,%s,%lld,", r->part, (int)length, r->name, r->pass, (long long)r->calls);
    if (p->backend->nodes) printf("%lld", (long long)r->nodes);
    printf(",%.4f,%.3f,%.2f,%.1f\n", r->seconds * 1e3, r->bytes / 1048576, 100 * r->seconds / all,
           r->seconds > 0 ? r->bytes / r->seconds * 1e-9 : 0);
}

static void add_row(row *sum, const row *r) {
    sum->calls += r->calls, sum->nodes += r->nodes, sum->bytes += r->bytes, sum->seconds += r->seconds;
}

/* Prints the parts of the model in the order of their first call, each followed by the rows of its operators. */
static gt_status print_all(const profile *p, double seconds) {
    row all = {.pass = "all", .part = "all", .name = "all"}, whole = all;
    for (int i = 0; i < p->row_count; i++) add_row(&all, &p->rows[i]);
    printf("# where the time of a step goes, on %s; ms is the shortest of %d runs of each call, by %s; the last row is "
           "a whole step of training\npart,operator,pass,calls,nodes,ms,mib,share,gb_per_s\n",
           p->backend->device, p->backend->mark ? RUNS : CPU_RUNS,
           p->backend->mark ? "the device's clock" : "the wall clock");
    for (int i = 0; i < p->row_count; i++) {
        row part = {.pass = "all", .part = p->rows[i].part, .name = "all"};
        int is_first = 1;
        for (int k = 0; k < i; k++) is_first &= strcmp(p->rows[k].part, part.part) != 0;
        for (int k = i; k < p->row_count && is_first; k++)
            if (!strcmp(p->rows[k].part, part.part)) add_row(&part, &p->rows[k]);
        if (is_first) print_row(p, &part, all.seconds);
        for (int k = i; k < p->row_count && is_first; k++)
            if (!strcmp(p->rows[k].part, part.part)) print_row(p, &p->rows[k], all.seconds);
    }
    print_row(p, &all, all.seconds);
    add_row(&whole, &all);
    whole.part = "step", whole.seconds = seconds;
    print_row(p, &whole, all.seconds);
    return hy_flush(stdout, "standard output");
}

gt_status hy_profile(hy_backend *be, hy_model *model, int64_t parameters, const int32_t *tokens, const int32_t *targets,
                     const int32_t *keep, double loss_scale) {
    profile p = {
        .backend = be, .model = model, .tokens = tokens, .targets = targets, .keep = keep, .loss_scale = loss_scale};
    double seconds;
    gt_status status = time_steps(&p, &seconds);
    if (status != GT_OK) return status;
    hy_calls_parameters(parameters);
    hy_calls_see(be, see, &p);
    status = see_steps(&p);
    hy_calls_leave(be);
    if (status == GT_OK) status = print_all(&p, seconds);
    free(p.row_of);
    free(p.least);
    free(p.now);
    return status;
}
