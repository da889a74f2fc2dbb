/* The toy's table, kernels and stubs.
 *
 * forward, backward: each thread has one element, in blocks of 256, without shared memory.  The kernels read x and dy
 * once, and write y and dx once.  dgamma: there are up to GROUPS groups of rows.  In each group a thread sums one
 * column in the order of the rows, and the group leaves a row of sums in the workspace.  reduce_rows adds these rows in
 * a fixed order, so the result is deterministic. */
#ifndef GT_TOY_CUH
#define GT_TOY_CUH

#include "toy.h"

#ifdef __cplusplus
extern "C" {
#endif

static gt_status gt_toy_resolve(void *filled, gt_pass pass, gt_dims *dims) {
    const gt_toy_args *a = (const gt_toy_args *)filled;
    (void)pass, (void)dims;
    if ((gt_float_bits(a->shift) & 0x7f800000u) == 0x7f800000u)
        return gt_fail(GT_ERROR_VALUE, "shift = %g: must be finite", (double)a->shift);
    return gt_check_range(GT_ERROR_VALUE, "negate", a->negate, 0, 1);
}

GT_WRAP_CALLS(toy)

#define GT_AT(field) offsetof(gt_toy_args, field)
GT_API const gt_op *gt_op_toy(void) {
    static const gt_size sizes[] = {{'M', "M", GT_AT(M), 0}, {'D', "D", GT_AT(D), 1}, {0, NULL, 0, 0}};
    static const gt_tensor tensors[] = {{"x", GT_AT(x), GT_AT(x_stride), "MD", 'x', "II-", NULL},
                                        {"gamma", GT_AT(gamma), 0, "D", 'f', "ii-", NULL},
                                        {"y", GT_AT(y), GT_AT(y_stride), "MD", 'x', "O--", NULL},
                                        {"dy", GT_AT(dy), GT_AT(dy_stride), "MD", 'x', "-I-", NULL},
                                        {"dx", GT_AT(dx), GT_AT(dx_stride), "MD", 'x', "-o-", NULL},
                                        {"dgamma", GT_AT(dgamma), 0, "D", 'f', "-g-", NULL},
                                        {NULL, 0, 0, NULL, 0, NULL, NULL}};
    static const gt_op op = {"toy",
                             sizeof(gt_toy_args),
                             GT_AT(dtype),
                             0,
                             NULL,
                             GT_AT(accumulate),
                             sizes,
                             tensors,
                             gt_toy_resolve,
                             GT_CALLS(toy, NULL),
                             {GT_AT(workspace), GT_AT(workspace_bytes), 0, 0, 0, 0, 0, 0, 0},
                             GT_NO_SECOND,
                             GT_NO_STEP_DTYPES};
    return &op;
}
#undef GT_AT

#ifdef __cplusplus
}
#endif

#if defined(__CUDACC__) || defined(GT_EMU)

#include "gt/base/path.cuh"
#include "gt/base/reduce.cuh"

namespace toy {

constexpr int THREADS = 256, GROUPS = 8;

struct Params {
    gt_toy_args a;
    int64_t rows;    /* of a group */
    float *partials; /* [groups, D] */
};

GT_DEV float gamma_of(const gt_toy_args &a, int64_t d) {
    const float gamma = a.gamma ? a.gamma[d] : 1.0f;
    return a.negate ? -gamma : gamma;
}

/* Finds a thread's element; false for threads beyond the last element. */
GT_DEV bool find_element(const gt_toy_args &a, int64_t *m, int64_t *d) {
    const int64_t i = (int64_t)gt::block_x() * THREADS + gt::thread_id();
    *m = i / a.D, *d = i % a.D;
    return i < a.M * a.D;
}

GT_KERNEL(THREADS, 1) forward_kernel(const GT_GRID_CONSTANT Params p) {
    int64_t m, d;
    if (!find_element(p.a, &m, &d)) return;
    const float x = gt::load_as(p.a.x, p.a.dtype, m * p.a.x_stride + d);
    gt::store_as(p.a.y, p.a.dtype, m * p.a.y_stride + d, gamma_of(p.a, d) * x * x + p.a.shift);
}

GT_KERNEL(THREADS, 1) backward_kernel(const GT_GRID_CONSTANT Params p) {
    int64_t m, d;
    if (!find_element(p.a, &m, &d)) return;
    const float x = gt::load_as(p.a.x, p.a.dtype, m * p.a.x_stride + d);
    const float dy = gt::load_as(p.a.dy, p.a.dtype, m * p.a.dy_stride + d);
    gt::store_as(p.a.dx, p.a.dtype, m * p.a.dx_stride + d, 2 * gamma_of(p.a, d) * x * dy);
}

/* The blocks of one group have consecutive indices. */
GT_KERNEL(THREADS, 1) gamma_kernel(const GT_GRID_CONSTANT Params p) {
    const int64_t blocks = (p.a.D + THREADS - 1) / THREADS, group = gt::block_x() / blocks;
    const int64_t d = gt::block_x() % blocks * THREADS + gt::thread_id();
    gt::wait_for_chain();
    if (d >= p.a.D) return;
    const int64_t first = group * p.rows, last = first + p.rows < p.a.M ? first + p.rows : p.a.M;
    float sum = 0.0f;
    for (int64_t m = first; m < last; m++) {
        const float x = gt::load_as(p.a.x, p.a.dtype, m * p.a.x_stride + d);
        sum += x * x * gt::load_as(p.a.dy, p.a.dtype, m * p.a.dy_stride + d);
    }
    p.partials[group * p.a.D + d] = p.a.negate ? -sum : sum;
}

struct Groups {
    int64_t count, rows;
};

static inline Groups groups_of(const gt_toy_args &a) {
    const int64_t rows = (a.M + GROUPS - 1) / GROUPS;
    return {rows ? (a.M + rows - 1) / rows : 0, rows};
}

static inline size_t backward_bytes(const gt_toy_args &a) {
    size_t bytes;
    gt::floats_in(nullptr, a.dgamma ? groups_of(a).count * a.D : 0, &bytes);
    return bytes;
}

static inline gt_status prepare(gt_pass pass, const gt_toy_args *args, gt_toy_args *a) {
    gt_dims dims;
    gt::Device device;
    const gt_status status = gt_prepare(gt_op_toy(), pass, GT_DEVICE, args, a, &dims);
    return status != GT_OK ? status : gt::current_device(&device);
}

} /* namespace toy */

extern "C" {

GT_API gt_status gt_toy_forward(const gt_toy_args *args, gt_stream stream) {
    toy::Params p = {};
    const gt_status status = toy::prepare(GT_FORWARD, args, &p.a);
    if (status != GT_OK) return status;
    return gt::run("toy forward_kernel", toy::forward_kernel, (p.a.M * p.a.D + toy::THREADS - 1) / toy::THREADS,
                   toy::THREADS, 0, stream, p);
}

GT_API gt_status gt_toy_backward(const gt_toy_args *args, gt_stream stream) {
    toy::Params p = {};
    gt_status status = toy::prepare(GT_BACKWARD, args, &p.a);
    if (status != GT_OK) return status;
    const toy::Groups groups = toy::groups_of(p.a);
    size_t bytes;
    p.rows = groups.rows;
    p.partials = gt::floats_in(p.a.workspace, groups.count * p.a.D, &bytes);
    status = gt::check_workspace(p.a.workspace, p.a.workspace_bytes, toy::backward_bytes(p.a));
    gt::Chain chain = {stream};
    const int64_t blocks = (p.a.M * p.a.D + toy::THREADS - 1) / toy::THREADS;
    if (status == GT_OK && p.a.dx)
        status = gt::run("toy backward_kernel", toy::backward_kernel, blocks, toy::THREADS, 0, stream, p);
    if (status != GT_OK || !p.a.dgamma) return status;
    status = gt::run("toy gamma_kernel", toy::gamma_kernel, groups.count * ((p.a.D + toy::THREADS - 1) / toy::THREADS),
                     toy::THREADS, 0, chain, p);
    if (status != GT_OK) return status;
    return gt::reduce_rows(p.partials, p.a.dgamma, groups.count, p.a.D, p.a.accumulate, chain);
}

GT_API gt_status gt_toy_workspace(const gt_toy_args *args, gt_workspace *need) {
    gt_no_answer(need);
    gt_toy_args a;
    const gt_status status = toy::prepare(GT_QUERY, args, &a);
    if (status != GT_OK) return status;
    if (!need) return gt_fail(GT_ERROR_NULL, "need is NULL");
    need->backward = toy::backward_bytes(a);
    return GT_OK;
}

GT_API gt_status gt_toy_path(const gt_toy_args *args, char *text, size_t bytes) {
    const gt::PathPasses<gt_toy_args> passes = {{gt_toy_forward, gt_toy_backward, nullptr}, nullptr};
    return gt::path_of_rows(gt_op_toy(), passes, args, text, bytes);
}

} /* extern "C" */

#else

GT_API gt_status gt_toy_forward(const gt_toy_args *args, gt_stream stream) {
    (void)args, (void)stream;
    return gt_no_cuda(gt_op_toy(), GT_FORWARD);
}
GT_API gt_status gt_toy_backward(const gt_toy_args *args, gt_stream stream) {
    (void)args, (void)stream;
    return gt_no_cuda(gt_op_toy(), GT_BACKWARD);
}
GT_API gt_status gt_toy_workspace(const gt_toy_args *args, gt_workspace *need) {
    (void)args;
    gt_no_answer(need);
    return gt_no_cuda(gt_op_toy(), GT_QUERY);
}
GT_API gt_status gt_toy_path(const gt_toy_args *args, char *text, size_t bytes) {
    (void)args;
    gt_no_text(text, bytes);
    return gt_no_cuda(gt_op_toy(), GT_PATH);
}

#endif

#endif
