/* The backend hy_backend_cuda, emulated on the CPU: runs the GPU backend's kernels on host memory.  A plain product
 * replaces cuBLASLt.  After a copy, a read or a synchronize, the backend reports the faults that the emulation has
 * found. */
#include "../examples/hybrid_ops.cuh"
#include "fake_stream.h"

#include <stdio.h>
#include <string.h>

#include <new>

namespace hy {

static gt_status faults_of(gt_status status) {
    if (!emu::faults()) return status;
    for (const std::string& message : emu::messages()) printf("%s\n", message.c_str());
    status = hy_fail(GT_ERROR_CUDA, "%s", emu::messages()[0].c_str());
    emu::reset();
    return status;
}

static void emu_close(hy_backend* be) { delete &machine(be); }

/* Fills new memory with 0xff bytes, which are NaN in every float dtype. */
static gt_status emu_alloc(hy_backend*, void** memory, size_t bytes) {
    *memory = operator new(bytes, std::align_val_t(256));
    memset(*memory, 0xff, bytes);
    return GT_OK;
}

static void emu_release(hy_backend*, void* memory) { operator delete(memory, std::align_val_t(256)); }

static gt_status emu_copy(hy_backend*, void* to, const void* from, size_t bytes) {
    if (bytes) memcpy(to, from, bytes);
    return faults_of(GT_OK);
}

static gt_status emu_zero(hy_backend*, void* to, size_t bytes) {
    if (bytes) memset(to, 0, bytes);
    return GT_OK;
}

static gt_status emu_write(hy_backend*, void* to, gt_dtype dtype, const double* host, int64_t n) {
    for (int64_t i = 0; i < n; i++) put_number(to, dtype, i, host[i]);
    return GT_OK;
}

static gt_status emu_read(hy_backend*, double* host, const void* from, gt_dtype dtype, int64_t n) {
    for (int64_t i = 0; i < n; i++) host[i] = get_number(from, dtype, i);
    return faults_of(GT_OK);
}

static gt_status emu_synchronize(hy_backend*) { return faults_of(GT_OK); }

static gt_status emu_run(hy_backend*, int, gt_status (*record)(void* arg), void* arg) { return record(arg); }

static gt_status emu_gemm(hy_backend* be, const hy_gemm_args* args) {
    return plain_product(machine(be), resolve_gemm(args));
}

} /* namespace hy */

extern "C" gt_status hy_backend_cuda(hy_backend** backend, gt_dtype dtype, int rank) {
    hy::Machine* m = new hy::Machine();
    m->name = "emulated";
    snprintf(m->device, sizeof m->device, "the CPU, emulating a GPU");
    m->dtype = dtype;
    /* a model then allocates as much workspace as on a GPU; the plain product does not use it */
    m->workspace_want = hy::WORKSPACE_BYTES;
    hy::set_operators(m);
    m->close = hy::emu_close;
    m->alloc = hy::emu_alloc;
    m->release = hy::emu_release;
    m->upload = m->download = m->copy = hy::emu_copy;
    m->write = hy::emu_write;
    m->read = hy::emu_read;
    m->zero = hy::emu_zero;
    m->synchronize = hy::emu_synchronize;
    m->run = hy::emu_run;
    m->gemm = hy::emu_gemm;
    fake_stream_open(m);
    fake_stream_address(m, rank);
    emu::set_seed((uint64_t)dtype); /* the warps run in another order for each dtype */
    *backend = m;
    return GT_OK;
}
