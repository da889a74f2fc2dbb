/* A fake libnccl.so.2 for the trainer's tests.  The ranks are processes on one machine, and sum arrays of host memory
 * through a shared memory file.  A stream is an int that counts unfinished sums.  A thread computes the sums in order,
 * as a GPU would.
 *
 * HY_NCCL="CALL RANK N" makes the N-th call of a function fail on one rank:
 *     ncclCommInitRank 1 1     the first call on rank 1 returns ncclSystemError; so do other functions, by their name
 *     async 1 5                the fifth sum never ends, and ncclCommGetAsyncError returns ncclRemoteError
 *     hang 1 5                 the fifth sum never ends
 *     stop 1 5                 the process sends itself SIGSTOP at its fifth sum
 *     die 1 5                  the process sends itself SIGKILL at its fifth sum
 * ncclCommAbort writes the file aborted.RANK into the current directory, and ncclCommDestroy the file sums.RANK.  Both
 * files hold the number of sums and the number of summed floats. */
#define _GNU_SOURCE
#include "hybrid_nccl.h"
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, REMOTE_ERROR = 6 };
enum { RANKS = 8, SLOT = 1 << 16, PRE_MUL_SUM = 5, QUEUE = 256 };

/* The memory that all ranks share. */
typedef struct board {
    _Atomic int arrived; /* number of ranks that wait at the current barrier */
    _Atomic int barrier; /* number of the current barrier */
    float slot[RANKS][SLOT];
} board;

typedef struct sum_call {
    float *numbers;
    size_t n;
    int *stream;
} sum_call;

typedef struct comm {
    int rank, size;
    float factor; /* with one rank, sums are multiplied by this factor */
    board *shared;
    pthread_t thread;
    _Atomic int is_aborted, error, wants_end;
    _Atomic long queued, done;
    sum_call queue[QUEUE];
    long floats;
} comm;

static long calls; /* number of calls so far of the function that HY_NCCL names */

/* Counts the call if HY_NCCL names its function and rank.  Returns whether this is the call that must fail. */
static int is_at_fault(const char *call, int rank) {
    char name[64];
    int at_rank;
    long n;
    const char *text = getenv("HY_NCCL");
    if (!text || sscanf(text, "%63s %d %ld", name, &at_rank, &n) != 3 || strcmp(name, call)) return 0;
    return at_rank == rank && ++calls == n;
}

static void note(const char *name, const comm *c) {
    char path[64];
    snprintf(path, sizeof path, "%s.%d", name, c->rank);
    FILE *file = fopen(path, "w");
    if (!file) return;
    fprintf(file, "%ld sums, %ld floats\n", (long)c->done, c->floats);
    fclose(file);
}

/* ---- sums ----------------------------------------------------------------------------------------- */

/* Waits for all ranks.  Returns 0 if the communicator is aborted before all have arrived. */
static int meet(comm *c) {
    board *b = c->shared;
    const int number = b->barrier;
    if (atomic_fetch_add(&b->arrived, 1) + 1 == c->size) {
        b->arrived = 0;
        b->barrier = number + 1;
    }
    while (b->barrier == number && !c->is_aborted) usleep(20);
    return !c->is_aborted;
}

static void add_up(comm *c, const sum_call *s) {
    for (size_t done = 0, n; done < s->n; done += n) {
        n = s->n - done < SLOT ? s->n - done : SLOT;
        memcpy(c->shared->slot[c->rank], s->numbers + done, n * sizeof(float));
        if (!meet(c)) return;
        for (size_t i = 0; i < n; i++) {
            float sum = c->shared->slot[0][i] * c->factor;
            for (int k = 1; k < c->size; k++) sum += c->shared->slot[k][i];
            s->numbers[done + i] = sum;
        }
        if (!meet(c)) return;
    }
}

static void *work(void *argument) {
    comm *c = argument;
    while (!c->wants_end && !c->is_aborted) {
        if (c->done == c->queued) {
            usleep(20);
            continue;
        }
        const sum_call *s = c->queue + c->done % QUEUE;
        if (is_at_fault("die", c->rank)) kill(getpid(), SIGKILL);
        if (is_at_fault("stop", c->rank)) kill(getpid(), SIGSTOP);
        const int fails = is_at_fault("async", c->rank);
        if (fails) c->error = REMOTE_ERROR;
        if (fails || is_at_fault("hang", c->rank))
            while (!c->is_aborted) usleep(20);
        if (!c->is_aborted) add_up(c, s);
        c->done++;
        __atomic_fetch_sub(s->stream, 1, __ATOMIC_RELEASE);
    }
    for (; c->done < c->queued; c->done++) __atomic_fetch_sub(c->queue[c->done % QUEUE].stream, 1, __ATOMIC_RELEASE);
    return NULL;
}

/* ---- the interface ---------------------------------------------------------------------------------- */

#define EXPORT __attribute__((visibility("default")))

EXPORT int ncclGetVersion(int *version) {
    *version = 22809;
    return SUCCESS;
}

EXPORT const char *ncclGetErrorString(int error) {
    static const char *const texts[] = {"no error",
                                        "unhandled cuda error",
                                        "unhandled system error",
                                        "internal error",
                                        "invalid argument",
                                        "invalid usage",
                                        "a remote process exited or there was a network error"};
    return error >= 0 && error <= REMOTE_ERROR ? texts[error] : "unknown result code";
}

EXPORT int ncclGetUniqueId(hy_nccl_id *id) {
    if (is_at_fault("ncclGetUniqueId", 0)) return SYSTEM_ERROR;
    /* ncclCommInitRank checks the last byte: it shows that the whole identifier arrived, not only the text */
    memset(id, 0x5a, sizeof *id);
    snprintf(id->bytes, sizeof id->bytes, "/fake-nccl-%ld", (long)getpid());
    return SUCCESS;
}

EXPORT int ncclCommInitRank(void **result, int size, hy_nccl_id id, int rank) {
    *result = NULL;
    if (is_at_fault("ncclCommInitRank", rank)) return SYSTEM_ERROR;
    if (size > RANKS || id.bytes[HY_NCCL_ID_BYTES - 1] != 0x5a) return INVALID_ARGUMENT;
    comm *c = calloc(1, sizeof *c);
    const int file = shm_open(id.bytes, O_CREAT | O_RDWR, 0600);
    if (!c || file < 0 || ftruncate(file, sizeof(board))) return SYSTEM_ERROR;
    c->shared = mmap(NULL, sizeof(board), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (c->shared == MAP_FAILED) return SYSTEM_ERROR;
    c->rank = rank, c->size = size, c->factor = 1;
    meet(c);
    if (!rank) shm_unlink(id.bytes);
    if (pthread_create(&c->thread, NULL, work, c)) return SYSTEM_ERROR;
    *result = c;
    return SUCCESS;
}

EXPORT int ncclRedOpCreatePreMulSum(int *op, void *factor, int type, int place, void *communicator) {
    comm *c = communicator;
    if (type != HY_NCCL_FLOAT32 || place != HY_NCCL_HOST_NUMBER) return INVALID_ARGUMENT;
    c->factor = *(float *)factor;
    *op = PRE_MUL_SUM;
    return SUCCESS;
}

EXPORT int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, void *communicator, void *stream) {
    comm *c = communicator;
    if (is_at_fault("ncclAllReduce", c->rank)) return SYSTEM_ERROR;
    if (from != to || !count || type != HY_NCCL_FLOAT32 || op != (c->size == 1 ? PRE_MUL_SUM : HY_NCCL_SUM) || !stream)
        return INVALID_ARGUMENT;
    while (c->queued - c->done == QUEUE) usleep(20);
    c->queue[c->queued % QUEUE] = (sum_call){to, count, stream};
    c->floats += (long)count;
    __atomic_fetch_add((int *)stream, 1, __ATOMIC_ACQUIRE);
    c->queued++;
    return SUCCESS;
}

EXPORT int ncclCommGetAsyncError(void *communicator, int *error) {
    *error = ((comm *)communicator)->error;
    return SUCCESS;
}

static int end(comm *c) {
    pthread_join(c->thread, NULL);
    munmap(c->shared, sizeof(board));
    free(c);
    return SUCCESS;
}

EXPORT int ncclCommAbort(void *communicator) {
    comm *c = communicator;
    c->is_aborted = 1;
    note("aborted", c);
    return end(c);
}

EXPORT int ncclCommDestroy(void *communicator) {
    comm *c = communicator;
    while (c->done != c->queued) usleep(20);
    note("sums", c);
    c->wants_end = 1;
    return end(c);
}
