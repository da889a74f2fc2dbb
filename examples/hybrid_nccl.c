#include "hybrid_nccl.h"
#include "hybrid_ranks.h"
#ifdef HY_NCCL
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct hy_nccl {
    void *comm;
    hy_ranks *ranks;
    int op; /* operation: the sum, or for a single rank a multiplication by 1 */
    int is_dead;
};

static const char library_name[] = "libnccl.so.2";
static hy_nccl_functions functions; /* GetVersion = NULL: the library is not loaded */
static char version[32];

static gt_status check(int error, const char *call) {
    if (error == HY_NCCL_SUCCESS) return GT_OK;
    return hy_fail(GT_ERROR_CUDA, "%s: %s", call, functions.GetErrorString(error));
}

/* ---- loading ------------------------------------------------------------------------------------ */

gt_status hy_nccl_load(void) {
    hy_nccl_functions f;
    int number;
    const struct {
        const char *name;
        void *function;
    } names[] = {{"ncclGetVersion", &f.GetVersion},
                 {"ncclGetUniqueId", &f.GetUniqueId},
                 {"ncclCommInitRank", &f.CommInitRank},
                 {"ncclCommDestroy", &f.CommDestroy},
                 {"ncclCommAbort", &f.CommAbort},
                 {"ncclCommGetAsyncError", &f.CommGetAsyncError},
                 {"ncclRedOpCreatePreMulSum", &f.RedOpCreatePreMulSum},
                 {"ncclAllReduce", &f.AllReduce},
                 {"ncclGetErrorString", &f.GetErrorString}};
    if (functions.GetVersion) return GT_OK;
    void *library = dlopen(library_name, RTLD_NOW | RTLD_LOCAL); /* stays loaded, like CUDA's libraries */
    if (!library) return hy_fail(GT_ERROR_UNSUPPORTED, "%s", dlerror());
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        void *found = dlsym(library, names[i].name);
        if (!found) return hy_fail(GT_ERROR_UNSUPPORTED, "%s has no %s", library_name, names[i].name);
        memcpy(names[i].function, &found, sizeof found); /* ISO C has no cast from an object to a function pointer */
    }
    const int error = f.GetVersion(&number);
    if (error != HY_NCCL_SUCCESS)
        return hy_fail(GT_ERROR_UNSUPPORTED, "%s: ncclGetVersion: %s", library_name, f.GetErrorString(error));
    if (number < 21100) /* ncclRedOpCreatePreMulSum came with 2.11 */
        return hy_fail(GT_ERROR_UNSUPPORTED, "%s: version code %d is older than NCCL 2.11", library_name, number);
    snprintf(version, sizeof version, "%d.%d.%d", number / 10000, number / 100 % 100, number % 100);
    functions = f;
    return GT_OK;
}

const char *hy_nccl_version(void) { return version; }

/* ---- communicators ------------------------------------------------------------------------------ */

gt_status hy_nccl_new_id(hy_nccl_id *id) { return check(functions.GetUniqueId(id), "ncclGetUniqueId"); }

static gt_status abort_comm(hy_nccl *c, gt_status status) {
    if (c->is_dead) return status;
    c->is_dead = 1;
    hy_ranks_deadline("ncclCommAbort does not return");
    functions.CommAbort(c->comm);
    hy_ranks_deadline(NULL);
    return status;
}

int hy_nccl_stop(hy_nccl *c) {
    if (c->comm && c->ranks->failed != GT_OK) abort_comm(c, GT_OK);
    return c->is_dead;
}

void hy_nccl_close(hy_nccl *c) {
    if (c && c->comm && !hy_nccl_stop(c)) functions.CommDestroy(c->comm);
    free(c);
}

gt_status hy_nccl_open(hy_nccl **nccl, hy_ranks *ranks, const hy_nccl_id *id) {
    float one = 1;
    hy_nccl *c = calloc(1, sizeof *c);
    *nccl = c;
    if (!c) return hy_fail(GT_ERROR_MEMORY, "no memory for a communicator");
    c->ranks = ranks, c->op = HY_NCCL_SUM;
    gt_status status = check(functions.CommInitRank(&c->comm, ranks->size, *id, ranks->rank), "ncclCommInitRank");
    if (status == GT_OK && ranks->size == 1)
        status = check(functions.RedOpCreatePreMulSum(&c->op, &one, HY_NCCL_FLOAT32, HY_NCCL_HOST_NUMBER, c->comm),
                       "ncclRedOpCreatePreMulSum");
    if (status == GT_OK) return GT_OK;
    hy_nccl_close(c);
    *nccl = NULL;
    return status;
}

/* ---- work --------------------------------------------------------------------------------------- */

gt_status hy_nccl_sum(hy_nccl *c, float *numbers, int64_t n, void *stream) {
    if (c->is_dead) return hy_fail(GT_ERROR_CUDA, "NCCL was aborted after an earlier error");
    const int error = functions.AllReduce(numbers, numbers, (size_t)n, HY_NCCL_FLOAT32, c->op, c->comm, stream);
    return error == HY_NCCL_SUCCESS ? GT_OK : abort_comm(c, check(error, "ncclAllReduce"));
}

typedef struct waiting {
    hy_nccl *nccl;
    gt_status (*poll)(void *arg, int *is_done);
    void *arg;
} waiting;

/* Polls NCCL and the device.  It asks NCCL first, because a device may report an error of NCCL as its own error. */
static gt_status poll_both(void *arg, int *is_done) {
    const waiting *w = arg;
    int error = HY_NCCL_SUCCESS;
    const int asked = functions.CommGetAsyncError(w->nccl->comm, &error);
    if (asked != HY_NCCL_SUCCESS) error = asked;
    if (error != HY_NCCL_IN_PROGRESS && error != HY_NCCL_SUCCESS) return check(error, "ncclCommGetAsyncError");
    return w->poll(w->arg, is_done);
}

/* Waits for the device after the communicator was aborted.  No kernel waits for other ranks any more, so the device
 * finishes soon.  Weights that the failed step has not changed can then be saved. */
static gt_status wait_after_abort(gt_status (*poll)(void *arg, int *is_done), void *arg) {
    gt_status status = GT_OK;
    hy_ranks_deadline("the device does not finish its work after an error");
    for (int is_done = 0; status == GT_OK && !is_done;) status = poll(arg, &is_done);
    hy_ranks_deadline(NULL);
    return status;
}

gt_status hy_nccl_wait(hy_nccl *c, gt_status (*poll)(void *arg, int *is_done), void *arg) {
    waiting w = {c, poll, arg};
    if (hy_nccl_stop(c)) return wait_after_abort(poll, arg);
    const gt_status status = hy_ranks_await(c->ranks, poll_both, &w);
    return status == GT_OK ? GT_OK : abort_comm(c, status);
}

#else
gt_status hy_nccl_load(void) { return hy_fail(GT_ERROR_UNSUPPORTED, "this program was built without NCCL"); }
const char *hy_nccl_version(void) { return ""; }
gt_status hy_nccl_new_id(hy_nccl_id *id) { return (void)id, hy_nccl_load(); }
gt_status hy_nccl_open(hy_nccl **nccl, hy_ranks *ranks, const hy_nccl_id *id) {
    (void)ranks, (void)id;
    *nccl = NULL;
    return hy_nccl_load();
}
void hy_nccl_close(hy_nccl *nccl) { (void)nccl; }
int hy_nccl_stop(hy_nccl *nccl) { return (void)nccl, 0; }
gt_status hy_nccl_sum(hy_nccl *nccl, float *numbers, int64_t n, void *stream) {
    (void)nccl, (void)numbers, (void)n, (void)stream;
    return hy_nccl_load();
}
gt_status hy_nccl_wait(hy_nccl *nccl, gt_status (*poll)(void *arg, int *is_done), void *arg) {
    (void)nccl, (void)poll, (void)arg;
    return hy_nccl_load();
}
#endif
