/* The operators of hybrid_ops.h as CUDA kernels, and their entries in a backend's table.
 *
 * | file               | holds                                                         |
 * |--------------------|---------------------------------------------------------------|
 * | hybrid_machine.cuh | the device, launches, parts that kernels share                |
 * | hybrid_tokens.cuh  | embedding, lerp                                               |
 * | hybrid_rows.cuh    | map, bias, gate_mix, add, cast, carry, dropout, average       |
 * | hybrid_loss.cuh    | cross_entropy, the norm of the gradient, AdamW                |
 * | this file          | the plain product, the calls of gt_kernels.h, the table       |
 *
 * All kernels use the primitives of gt/base, so they also run in the emulation of gt/emu.  The file that includes
 * this one provides memory, the order of calls, and the matrix product.  That is hybrid_ops.cu, or the emulation in
 * the tests. */
#ifndef HYBRID_OPS_CUH
#define HYBRID_OPS_CUH

#include "hybrid_loss.cuh"
#include "hybrid_rows.cuh"
#include "hybrid_tokens.cuh"

namespace hy {

/* ---- gemm: the plain product ------------------------------------------------------------------
 * A simple kernel for products for which cuBLASLt has no algorithm.  A thread computes one element of c, and adds up k
 * in rising order.  The grid has ceil(M N / 256) x count blocks. */
struct ProductParams {
    hy_gemm_args g;
};

GT_KERNEL(THREADS, 1) product_kernel(const GT_GRID_CONSTANT ProductParams p) {
    const hy_gemm_args& g = p.g;
    const int64_t i = (int64_t)block_x() * THREADS + thread_id();
    if (i >= g.M * g.N) return;
    const int64_t row = i / g.N, column = i % g.N;
    const int64_t a_first = block_y() * g.a_step + row * (g.trans_a ? 1 : g.lda);
    const int64_t b_first = block_y() * g.b_step + column * (g.trans_b ? g.ldb : 1);
    const int64_t a_next = g.trans_a ? g.lda : 1, b_next = g.trans_b ? 1 : g.ldb;
    const int64_t c = block_y() * g.c_step + row * g.ldc + column;
    float sum = 0.0f;
    for (int64_t k = 0; k < g.K; k++)
        sum = fma_rn(load_as(g.a, g.dtype, a_first + k * a_next), load_as(g.b, g.dtype, b_first + k * b_next), sum);
    sum *= g.alpha;
    if (g.beta != 0.0f) sum = fma_rn(g.beta, load_as(g.c, g.c_dtype, c), sum);
    store_as(g.c, g.c_dtype, c, sum);
}

/* Returns the arguments with all defaults filled in. */
static hy_gemm_args resolve_gemm(const hy_gemm_args* args) {
    hy_gemm_args g = *args;
    if (g.dtype == GT_DTYPE_DEFAULT) g.dtype = GT_F32;
    if (g.c_dtype == GT_DTYPE_DEFAULT) g.c_dtype = g.dtype;
    if (!g.lda) g.lda = g.trans_a ? g.M : g.K;
    if (!g.ldb) g.ldb = g.trans_b ? g.K : g.N;
    if (!g.ldc) g.ldc = g.N;
    if (!g.count) g.count = 1;
    return g;
}

static gt_status plain_product(const Machine& m, const hy_gemm_args& g) {
    const ProductParams p = {g};
    return enqueue(m, "gemm", product_kernel, ceil_div(g.M * g.N, THREADS), g.count, 0, p);
}

/* ---- the operators of gt_kernels.h ----------------------------------------------------------- */

#define HY_DEVICE_OP(name, op)                                                                                         \
    static gt_status name(hy_backend* be, const gt_##op##_args* a) {                                                   \
        const gt_status status = gt_##name(a, machine(be).stream);                                                     \
        return status == GT_OK ? GT_OK : hy_fail(status, "%s", gt_last_error());                                       \
    }
#define HY_DEVICE_WORKSPACE(op)                                                                                        \
    static gt_status op##_workspace(hy_backend*, const gt_##op##_args* a, gt_workspace* need) {                        \
        const gt_status status = gt_##op##_workspace(a, need);                                                         \
        return status == GT_OK ? GT_OK : hy_fail(status, "%s", gt_last_error());                                       \
    }
#define HY_DEVICE_ROWS(op) HY_DEVICE_WORKSPACE(op) HY_DEVICE_OP(op##_forward, op) HY_DEVICE_OP(op##_backward, op)
#define HY_DEVICE_STEPS(op) HY_DEVICE_ROWS(op) HY_DEVICE_OP(op##_step, op)
HY_OPERATORS(HY_DEVICE_STEPS, HY_DEVICE_ROWS, HY_DEVICE_STEPS)
#undef HY_DEVICE_STEPS
#undef HY_DEVICE_ROWS
#undef HY_DEVICE_OP
#undef HY_DEVICE_WORKSPACE

/* ---- the table ------------------------------------------------------------------------------- */

/* Scratch memory holds the partial sums, then the workspace of matrix products.  It has room for rows of twice as
 * many columns as the widest array. */
static gt_status scratch(hy_backend* be, const hy_limits* limits, void* memory, size_t* bytes) {
    Machine& m = machine(be);
    const int64_t sums = PARTS * (2 * limits->D + 64);
    if (!memory) {
        *bytes = (size_t)sums * sizeof(float) + m.workspace_want;
        return GT_OK;
    }
    m.sums = static_cast<float*>(memory);
    m.sums_count = sums;
    m.workspace = m.sums + sums;
    m.workspace_bytes = m.workspace_want;
    return GT_OK;
}

static void set_operators(hy_backend* be) {
    be->fp32_bytes = sizeof(float);
    be->scratch = scratch;
#define HY_SET_ROWS(op)                                                                                                \
    be->op##_workspace = op##_workspace, be->op##_forward = op##_forward, be->op##_backward = op##_backward;
#define HY_SET_STEPS(op) HY_SET_ROWS(op) be->op##_step = op##_step;
    HY_OPERATORS(HY_SET_STEPS, HY_SET_ROWS, HY_SET_STEPS)
#undef HY_SET_STEPS
#undef HY_SET_ROWS
    be->embedding_forward = embedding_forward;
    be->embedding_backward = embedding_backward;
    be->lerp_forward = lerp_forward;
    be->lerp_backward = lerp_backward;
    be->map_forward = map_forward;
    be->map_backward = map_backward;
    be->bias_forward = bias_forward;
    be->bias_backward = bias_backward;
    be->gate_mix_forward = gate_mix_forward;
    be->gate_mix_backward = gate_mix_backward;
    be->cross_entropy_forward = cross_entropy_forward;
    be->cross_entropy_backward = cross_entropy_backward;
    be->grad_norm = grad_norm;
    be->adamw = adamw;
    be->add = add;
    be->cast = cast;
    be->carry = carry;
    be->dropout = dropout;
    be->average = average;
}

/* ---- numbers between device and host --------------------------------------------------------- */

static void put_number(void* to, gt_dtype dtype, int64_t i, double x) {
    if (dtype == GT_BF16)
        static_cast<uint16_t*>(to)[i] = gt_f32_to_bf16((float)x);
    else if (dtype == GT_F16)
        static_cast<uint16_t*>(to)[i] = gt_f32_to_f16((float)x);
    else
        static_cast<float*>(to)[i] = (float)x;
}

static double get_number(const void* from, gt_dtype dtype, int64_t i) {
    if (dtype == GT_BF16) return gt_bf16_to_f32(static_cast<const uint16_t*>(from)[i]);
    if (dtype == GT_F16) return gt_f16_to_f32(static_cast<const uint16_t*>(from)[i]);
    return static_cast<const float*>(from)[i];
}

} /* namespace hy */

#endif
