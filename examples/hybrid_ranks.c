/* Implements hybrid_ranks.h with MPI.
 *
 * Every rank sends its status to rank 0, and rank 0 sends a verdict back.  So rank 0 can name a rank that does not
 * arrive.  MPI calls are nonblocking, and a loop waits for them.  The loop checks the time limit, and sleeps so that
 * ranks can share cores. */
#define _DEFAULT_SOURCE /* usleep */
#include "hybrid_ranks.h"
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#ifdef HY_MPI
#include <mpi.h>
#endif

/* ---- a run that hangs --------------------------------------------------------------------------- */

/* Seconds that a rank which only waits adds to the time limit, so that the rank that hangs reports first. */
enum { GRACE = 2 };
static int watched; /* time limit in seconds; 0: none */
static int watched_rank, watched_size = 1;
static char doing[128] = "setting up";
static char hung[256]; /* the message in its final form, since a signal handler may not format it */

static void on_alarm(int number) {
    (void)number;
    _exit(write(STDERR_FILENO, hung, strlen(hung)) < 0 ? 2 : 1);
}

static void describe_hang(void) {
    char who[32] = "";
    if (watched_size > 1) snprintf(who, sizeof who, "rank %d: ", watched_rank);
    snprintf(hung, sizeof hung, "hybrid_train: %sno progress for %d s; last progress: %s\n", who, watched, doing);
}

static void rearm(void) {
    if (watched) alarm((unsigned)watched);
}

void hy_limit_stall(int seconds) {
    watched = seconds;
    alarm(0);
    if (!seconds) return;
    describe_hang();
    signal(SIGALRM, on_alarm);
    rearm();
}

void hy_ranks_deadline(const char *what) {
    alarm(0);
    describe_hang();
    rearm();
    if (!what) return;
    snprintf(hung, sizeof hung, "hybrid_train: rank %d: %s\n", watched_rank, what);
    signal(SIGALRM, on_alarm);
    alarm(HY_RANKS_PATIENCE);
}

void hy_alive(const char *format, ...) {
    va_list list;
    if (!watched) return;
    alarm(0); /* stops the alarm first, since its handler reads the message */
    va_start(list, format);
    vsnprintf(doing, sizeof doing, format, list);
    va_end(list);
    describe_hang();
    rearm();
}

/* ---- launchers ---------------------------------------------------------------------------------- */

/* Returns the number of processes that the launcher started.  0: there is no launcher; 1: the launcher does not say. */
static int launched(void) {
    static const char *const sizes[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"};
    for (int i = 0; i < 2; i++)
        if (getenv(sizes[i])) return atoi(getenv(sizes[i]));
    if (!getenv("PMIX_RANK") && !getenv("PMI_RANK")) return 0;
    return getenv("SLURM_STEP_NUM_TASKS") ? atoi(getenv("SLURM_STEP_NUM_TASKS")) : 1;
}

/* ---- messages of the exchange ------------------------------------------------------------------- */

/* The collective call that a rank is in.  Ranks in different calls would wait for each other forever. */
enum { MEET, SUM, ADD, SHARE, GATHER, CLOSE };

/* A message of the exchange.  Every rank sends one to rank 0, and gets the verdict of rank 0 in the same form. */
typedef struct message {
    int call, status, signal, follows;
    char text[640]; /* the error message */
} message;

/* A rank that waits for a step on GPUs yields its core this many times before it sleeps.  These yields take longer than
 * a step, because a sleep would lengthen the step by some per cent. */
enum { YIELDS = 20000 };

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#ifdef HY_MPI
/* ---- MPI ---------------------------------------------------------------------------------------- */

enum { TO_0 = 1, FROM_0, NOTICE }; /* tags of messages; NOTICE: the sender has failed */
static const char *const call_names[] = {"meet", "sum", "add", "share", "gather", "close"};
static message *inbox;        /* [size] the message of every rank, on rank 0 */
static MPI_Request *requests; /* [size + 1] requests of the call in progress */
enum { BUCKET = 1 << 20 };    /* numbers in one sum of MPI; few, since MPI needs as much memory again */

/* Ends every rank, because some ranks did not arrive for `seconds`.  Request i, with i < n, belongs to rank i + 1.
 * `failure` is the error of this rank, or NULL. */
static void give_up(const hy_ranks *r, int n, int seconds, const char *failure) {
    char missing[128] = "";
    for (int i = 0; i < n; i++) {
        int is_there = 0;
        const size_t used = strlen(missing);
        MPI_Request_get_status(requests[i], &is_there, MPI_STATUS_IGNORE);
        if (!is_there) snprintf(missing + used, sizeof missing - used, "%s %d", used ? "," : " rank", i + 1);
    }
    if (failure)
        fprintf(stderr, "hybrid_train: rank %d: %s\n", r->rank, failure);
    else
        fprintf(stderr, "hybrid_train: rank %d: no progress for %d s: it waits for%s; last progress: %s\n", r->rank,
                seconds, *missing ? missing : " other ranks", doing);
    /* With Open MPI exiting is enough: its mpirun then ends every rank, and MPI_Abort may crash in its release 4.1. */
    if (!getenv("OMPI_COMM_WORLD_SIZE")) MPI_Abort(MPI_COMM_WORLD, 1);
    _exit(1);
}

/* Returns how many seconds a rank waits before it gives up; `seconds` is the limit.  Only one rank should give up:
 * the lowest that waits.  That is usually rank 0, which knows which ranks are missing.  So every rank waits GRACE
 * seconds longer than the rank before it.  A failed rank knows the reason itself, so it adds at most 2 * GRACE
 * seconds. */
static int patience_of(const hy_ranks *r, int seconds, int has_failed) {
    const int most = has_failed ? 2 : 30;
    return seconds + GRACE * (r->rank < most ? r->rank : most) - (has_failed && r->rank >= most);
}

/* Waits for n requests.  is_by_rank = 1: request i belongs to rank i + 1, as in give_up. */
static void await(const hy_ranks *r, int n, int is_by_rank, const char *failure) {
    const int most = failure ? patience_of(r, HY_RANKS_PATIENCE, 1) : watched ? patience_of(r, watched + GRACE, 0) : 0;
    const int yields = r->waits_on_gpu ? YIELDS : 100; /* few on CPUs, where ranks need each other's cores */
    const double start = now();
    int is_done = 0;
    alarm(0); /* a rank that waits for other ranks does not hang itself */
    for (int spins = 0; MPI_Testall(n, requests, &is_done, MPI_STATUSES_IGNORE), !is_done; spins++) {
        if (spins < yields)
            sched_yield();
        else
            usleep(spins < yields + 900 ? 20 : 500);
        if (most > 0 && now() - start > most) give_up(r, is_by_rank ? n : 0, most, failure);
    }
    rearm();
}

/* Notifies the other ranks that this rank has failed.  The message is empty, so MPI needs no buffer for it. */
static void notify_all(const hy_ranks *r) {
    for (int i = 0; i < r->size; i++) {
        MPI_Request request;
        if (i == r->rank) continue;
        MPI_Isend(NULL, 0, MPI_BYTE, i, NOTICE, MPI_COMM_WORLD, &request);
        MPI_Request_free(&request);
    }
}

static int has_notice(void) {
    int is_there = 0;
    MPI_Iprobe(MPI_ANY_SOURCE, NOTICE, MPI_COMM_WORLD, &is_there, MPI_STATUS_IGNORE);
    return is_there;
}

static void send(const message *m, int to, int tag, MPI_Request *request) {
    const int bytes = (int)offsetof(message, text) + (m->status == GT_OK ? 0 : (int)strlen(m->text) + 1);
    MPI_Isend(m, bytes, MPI_BYTE, to, tag, MPI_COMM_WORLD, request);
}

/* Makes the verdict on the messages of all ranks.  It is the failure of the lowest rank that has a failure of its
 * own.  Without such a rank it is an error if the ranks are in different calls. */
static message judge(const hy_ranks *r) {
    message all = inbox[0];
    int failures = 0, first = 0;
    for (int i = r->size - 1; i >= 0; i--) {
        if (inbox[i].signal) all.signal = inbox[i].signal;
        if (inbox[i].status != GT_OK && !inbox[i].follows) failures++, first = i;
    }
    for (int i = 0; i < r->size && !failures; i++)
        if (inbox[i].status != GT_OK) failures++, first = i;
    all.status = inbox[first].status;
    if (failures == r->size) return all;
    if (failures) snprintf(all.text, sizeof all.text, "rank %d: %.600s", first, inbox[first].text);
    for (int i = 1; i < r->size && !failures; i++) {
        if (inbox[i].call == all.call) continue;
        all.status = GT_ERROR_VALUE;
        snprintf(all.text, sizeof all.text, "ranks are not at the same point: rank 0 is at '%s', rank %d at '%s'",
                 call_names[all.call], i, call_names[inbox[i].call]);
    }
    return all;
}

/* Exchanges messages, and replaces this rank's message by the verdict. */
static void exchange_all(const hy_ranks *r, message *m) {
    const message mine = *m;
    const char *failure = mine.status == GT_OK ? NULL : mine.text;
    if (r->rank) {
        send(&mine, 0, TO_0, requests);
        MPI_Irecv(m, sizeof *m, MPI_BYTE, 0, FROM_0, MPI_COMM_WORLD, requests + 1);
        await(r, 2, 0, failure);
        return;
    }
    inbox[0] = mine;
    for (int i = 1; i < r->size; i++)
        MPI_Irecv(inbox + i, sizeof *inbox, MPI_BYTE, i, TO_0, MPI_COMM_WORLD, requests + i - 1);
    await(r, r->size - 1, 1, failure);
    *m = judge(r);
    for (int i = 1; i < r->size; i++) send(m, i, FROM_0, requests + i - 1);
    await(r, r->size - 1, 1, failure);
}

static void sum(const hy_ranks *r, float *numbers, int64_t n) {
    for (int64_t done = 0, count; done < n; done += count) {
        count = n - done < BUCKET ? n - done : BUCKET;
        MPI_Iallreduce(MPI_IN_PLACE, numbers + done, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, requests);
        await(r, 1, 0, NULL);
    }
}

static void broadcast(const hy_ranks *r, void *bytes, size_t count) {
    MPI_Ibcast(bytes, (int)count, MPI_BYTE, 0, MPI_COMM_WORLD, requests);
    await(r, 1, 0, NULL);
}

/* Gathers the numbers of all ranks on rank 0, or on every rank if to_all is set. */
static void gather(const hy_ranks *r, const double *numbers, double *all, int n, int to_all) {
    if (to_all)
        MPI_Iallgather(numbers, n, MPI_DOUBLE, all, n, MPI_DOUBLE, MPI_COMM_WORLD, requests);
    else
        MPI_Igather(numbers, n, MPI_DOUBLE, all, n, MPI_DOUBLE, 0, MPI_COMM_WORLD, requests);
    await(r, 1, 0, NULL);
}

/* Sets the rank, the number of ranks, and this rank's place among the ranks of this machine. */
static gt_status join(hy_ranks *r) {
    int provided, length;
    char version[MPI_MAX_LIBRARY_VERSION_STRING];
    MPI_Comm machine;
    if (MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided) != MPI_SUCCESS)
        return hy_fail(GT_ERROR_UNSUPPORTED, "MPI does not start");
    MPI_Comm_rank(MPI_COMM_WORLD, &r->rank);
    MPI_Comm_size(MPI_COMM_WORLD, &r->size);
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &machine);
    MPI_Comm_size(machine, &r->local);
    MPI_Comm_rank(machine, &r->local_rank);
    r->machine = r->rank;
    MPI_Bcast(&r->machine, 1, MPI_INT, 0, machine);
    MPI_Comm_free(&machine);
    MPI_Get_library_version(version, &length);
    snprintf(r->library, sizeof r->library, "%.*s", (int)strcspn(version, ",\n"), version);
    inbox = calloc((size_t)r->size, sizeof *inbox);
    requests = calloc((size_t)r->size + 1, sizeof *requests);
    return inbox && requests ? GT_OK : hy_fail(GT_ERROR_MEMORY, "no memory for %d ranks", r->size);
}

static void leave(void) {
    while (has_notice()) MPI_Recv(NULL, 0, MPI_BYTE, MPI_ANY_SOURCE, NOTICE, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    MPI_Finalize();
    free(inbox);
    free(requests);
}

#else
static void exchange_all(const hy_ranks *r, message *m) { (void)r, (void)m; }
static void notify_all(const hy_ranks *r) { (void)r; }
static int has_notice(void) { return 0; }
static int patience_of(const hy_ranks *r, int seconds, int has_failed) { return (void)r, (void)has_failed, seconds; }
static void give_up(const hy_ranks *r, int n, int seconds, const char *failure) {
    (void)r, (void)n, (void)seconds, (void)failure;
}
static void sum(const hy_ranks *r, float *numbers, int64_t n) { (void)r, (void)numbers, (void)n; }
static void broadcast(const hy_ranks *r, void *bytes, size_t count) { (void)r, (void)bytes, (void)count; }
static void gather(const hy_ranks *r, const double *numbers, double *all, int n, int to_all) {
    (void)r, (void)numbers, (void)all, (void)n, (void)to_all;
}
static gt_status join(hy_ranks *r) {
    snprintf(r->library, sizeof r->library, "none; configure the build with -Dmpi=enabled");
    return GT_OK;
}
static void leave(void) {}
#endif

/* ---- opening and closing ------------------------------------------------------------------------ */

gt_status hy_ranks_open(hy_ranks *r) {
    const int expected = launched();
    *r = (hy_ranks){.size = 1, .local = 1}; /* the first and only rank of its machine */
    if (!expected) return GT_OK;
    gt_status status = join(r);
    watched_rank = r->rank, watched_size = r->size;
    if (status == GT_OK && r->size == 1 && expected > 1)
        return hy_fail(GT_ERROR_UNSUPPORTED,
                       "%d processes were started, but they cannot reach each other; MPI of this build: %s", expected,
                       r->library);
    if (status == GT_OK && r->rank && !freopen("/dev/null", "w", stdout))
        return hy_fail(GT_ERROR_VALUE, "/dev/null cannot be opened");
    return status;
}

static gt_status exchange(hy_ranks *r, int call, gt_status own) {
    message m = {.call = call, .status = (int)own, .signal = r->asked ? r->asked() : 0, .follows = r->follows};
    if (r->failed != GT_OK) return r->failed;
    if (own != GT_OK) snprintf(m.text, sizeof m.text, "%s", hy_last_error());
    if (own != GT_OK && r->waits_on_gpu && !r->follows) notify_all(r);
    if (r->size > 1) exchange_all(r, &m);
    rearm();
    r->signal = m.signal;
    r->failed = (gt_status)m.status;
    return m.status == GT_OK || r->size == 1 ? r->failed : hy_fail(r->failed, "%s", m.text);
}

gt_status hy_ranks_close(hy_ranks *r, gt_status own) {
    const gt_status status = exchange(r, CLOSE, own);
    alarm(0);
    if (*r->library) leave();
    *r->library = 0;
    return status;
}

/* ---- waiting for a device ----------------------------------------------------------------------- */

/* A single rank relies on the alarm of the time limit.  With several ranks, a rank that waits gives up later than a
 * rank that hangs. */
gt_status hy_ranks_await(hy_ranks *r, gt_status (*poll)(void *arg, int *is_done), void *arg) {
    const int most = watched && r->size > 1 ? patience_of(r, watched + GRACE, 0) : 0;
    const double start = now();
    gt_status status = GT_OK;
    int is_done = 0;
    if (r->size > 1) alarm(0);
    for (int spins = 0; status == GT_OK; spins += spins < YIELDS) {
        status = poll(arg, &is_done);
        if (status != GT_OK || is_done) break;
        if (r->size > 1 && has_notice()) {
            r->follows = 1;
            status = hy_fail(GT_ERROR_CUDA, "another rank has failed");
        }
        if (most && now() - start > most) give_up(r, 0, most, NULL);
        if (spins < YIELDS)
            sched_yield();
        else
            usleep(50);
    }
    if (r->size > 1) rearm();
    return status;
}

/* ---- collective calls --------------------------------------------------------------------------- */

gt_status hy_ranks_meet(hy_ranks *r, gt_status own) { return exchange(r, MEET, own); }

gt_status hy_ranks_sum(hy_ranks *r, gt_status own, float *numbers, int64_t n) {
    const gt_status status = exchange(r, SUM, own);
    if (status == GT_OK && r->size > 1) sum(r, numbers, n);
    return status;
}

gt_status hy_ranks_add(hy_ranks *r, gt_status own, double *numbers, int n) {
    double *all = calloc((size_t)r->size * (size_t)n, sizeof *all);
    if (!all && own == GT_OK) own = hy_fail(GT_ERROR_MEMORY, "no memory to add %d numbers of %d ranks", n, r->size);
    const gt_status status = exchange(r, ADD, own);
    if (status == GT_OK && r->size > 1) {
        gather(r, numbers, all, n, 1);
        for (int k = 0; k < n; k++) {
            numbers[k] = all[k];
            for (int i = 1; i < r->size; i++) numbers[k] += all[i * n + k];
        }
    }
    free(all);
    return status;
}

gt_status hy_ranks_share(hy_ranks *r, gt_status own, void *bytes, size_t count) {
    const gt_status status = exchange(r, SHARE, own);
    if (status == GT_OK && r->size > 1) broadcast(r, bytes, count);
    return status;
}

gt_status hy_ranks_gather(hy_ranks *r, gt_status own, const double *numbers, double *all, int64_t n) {
    if (n > INT32_MAX && own == GT_OK)
        own = hy_fail(GT_ERROR_UNSUPPORTED, "%lld numbers are too many for MPI", (long long)n);
    const gt_status status = exchange(r, GATHER, own);
    if (status == GT_OK && r->size > 1) gather(r, numbers, all, (int)n, 0);
    if (status == GT_OK && r->size == 1) memcpy(all, numbers, (size_t)n * sizeof *all);
    return status;
}

/* Returns the value of this name in `pairs`; NULL if there is none. */
static const char *value_of(const char *pairs, size_t bytes, const char *name) {
    for (const char *at = pairs; at < pairs + bytes;) {
        const char *value = at + strlen(at) + 1;
        if (!strcmp(at, name)) return value;
        at = value + strlen(value) + 1;
    }
    return NULL;
}

static gt_status compare(const char *own, size_t own_bytes, const char *first, size_t bytes) {
    for (const char *at = first; at < first + bytes;) {
        const char *value = at + strlen(at) + 1, *other = value_of(own, own_bytes, at);
        if (!other || strcmp(value, other))
            return hy_fail(GT_ERROR_VALUE, "%s: '%.200s' here, '%.200s' on rank 0; give all ranks the same value", at,
                           other ? other : "", value);
        at = value + strlen(value) + 1;
    }
    return GT_OK;
}

gt_status hy_ranks_agree(hy_ranks *r, gt_status own, const char *pairs, size_t bytes) {
    int64_t count = (int64_t)bytes;
    gt_status status = hy_ranks_share(r, own, &count, sizeof count);
    if (status != GT_OK || r->size == 1) return status;
    char *first = malloc((size_t)count + 1);
    if (first && !r->rank) memcpy(first, pairs, bytes);
    status = hy_ranks_share(r, first ? GT_OK : hy_fail(GT_ERROR_MEMORY, "no memory to compare options"), first,
                            (size_t)count);
    if (status == GT_OK) status = compare(pairs, bytes, first, (size_t)count);
    status = hy_ranks_meet(r, status);
    free(first);
    return status;
}
