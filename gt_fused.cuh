/* gt_fused.cuh - fused operators: normalisation with its neighbours (rmsnorm_linear, norm_mix, norm_gate, add_norm),
 * wkv6 with ssd (wkv_ssm), and conv1d with ssd (conv_ssd).
 *
 * The normalising operators divide x into slices v of n elements: rows of x, or the heads of a row.
 *     xhat = (v - mean(v)) rstd             rstd = 1 / sqrt(mean((v - mean(v))^2) + eps)
 *     dv = rstd (d - mean(d) - xhat mean(d . xhat))                   d = the gradient of xhat
 * RMSNorm leaves out mean(v) and mean(d).
 *   rmsnorm_linear, v = x:
 *     n = xhat . gamma + beta    y = n weight^T + bias
 *     dn = dy weight             d = dn . gamma             dgamma = sum_m dn . xhat
 *     dbeta = sum_m dn           dweight = dy^T n           dbias = sum_m dy
 *   norm_mix, for both branches alike, v = a or b:
 *     y = residual + gain . xhat + ...      d = dy . gain   dgain = sum_m dy . xhat
 *   norm_gate, with n = xhat . gamma + beta and s = silu(z):
 *     norm first, v = x:      y = n . s     dn = dy . s     dx = dv         ds = dy . n
 *     gate first, v = x . s:  y = n         dn = dy         dx = dv . s     ds = dv . x
 *     d = dn . gamma             dgamma = sum_m dn . xhat   dbeta = sum_m dn
 * wkv_ssm calls wkv6 and ssd, and conv_ssd calls conv1d and ssd.  The files of the called operators state their
 * mathematics.
 *
 * NUMERICAL HAZARDS, and the remedies
 *   - x^2 overflows from 2e19 on.  rmsnorm_linear repeats such a row with x scaled down.  The other operators keep a
 *     second sum, of (2^-70 x)^2, and use it if the first sum exceeds 2^126.  They scale the sum of d . v by 2^-32, so
 *     that it does not overflow.
 *   - mean(v) is rounded, and the error shows if v hardly varies.  The sum of v - mean corrects it.
 *   - In slices of a few elements nearly all of d cancels in dv.  Slices of up to 4 elements are computed in double.
 *   - If D or O is below 32, a result of rmsnorm_linear depends on few elements of n, whose roundings to 16 bits may
 *     all be large.  There the products run on fp32 units.
 *
 * THE PARTS lie in gt/fused/.
 *     table.h                       describes the operators (plain C, shared with the stubs and the CPU twins)
 *     rmsnorm_linear.cuh            shared by its kernels; mean and rstd
 *     rmsnorm_linear_product.cuh    its products, for any size, dtype and alignment
 *     rmsnorm_linear_sums.cuh       dx from dn, and sums over rows, for any size
 *     rmsnorm_linear_tiles.cuh      its products of aligned 16-bit rows, on tensor cores
 *     rmsnorm_linear_sm90.cuh       the same products by wgmma
 *     rmsnorm_linear_parts.cuh      fp32 operands of tensor cores, as sums of bf16 parts
 *     rmsnorm_linear_whole_sm90.cuh y from whole rows in shared memory, D <= 512
 *     rmsnorm_linear_small_sm90.cuh y with the whole weight in shared memory, D <= 128
 *     rmsnorm_linear_cublaslt.cuh   the products by the caller's cuBLASLt, with GT_WITH_CUBLASLT
 *     rmsnorm_linear_rows.cuh       kernels for rows before and after the products of tiles
 *     rmsnorm_linear_int8.cuh       its step: y of few rows from an int8 weight
 *     norm.cuh                      shared by the kernels of norm_mix and norm_gate
 *     norm_mix.cuh, norm_gate.cuh   norm_mix and norm_gate
 *     add_norm.cuh                  x + residual, then a norm
 *     rmsnorm_linear_launch.cuh, rmsnorm_linear_launch_any.cuh, rmsnorm_linear_launch_tiles.cuh,
 *     rmsnorm_linear_launch_sm90.cuh, rmsnorm_linear_launch_int8.cuh, norm_launch.cuh, add_norm_launch.cuh
 *                                   plans and launches
 *     wkv_ssm_table.h, wkv_ssm.cuh  the two recurrences of a hybrid block in one call
 *     conv_ssd_table.h, conv_ssd.h, conv_ssd_launch.cuh, conv_ssd_sm90.cuh, conv_ssd_step.cuh
 *                                   convolution with SiLU, then ssd on slices of its result
 * This file defines the C functions of the normalising operators.  wkv_ssm and conv_ssd need the operators that they
 * call.  So gt_kernels.h includes their functions, gt/fused/wkv_ssm_calls.cuh and conv_ssd_calls.cuh, only if all
 * operators are implemented. */
#ifndef GT_FUSED_CUH
#define GT_FUSED_CUH

#include "gt/fused/table.h"

#if defined(__CUDACC__) || defined(GT_EMU)

#include "gt/base/path.cuh"
#include "gt/fused/add_norm_launch.cuh"
#include "gt/fused/norm_launch.cuh"
#include "gt/fused/rmsnorm_linear_launch.cuh"
#include "gt/fused/rmsnorm_linear_launch_int8.cuh"

/* ---- rmsnorm_linear: the C functions --------------------------------------------------------- */

extern "C" {

GT_API gt_status gt_rmsnorm_linear_forward(const gt_rmsnorm_linear_args* args, gt_stream stream) {
    gt_rmsnorm_linear_args a;
    gt::Device device;
    const gt_status status = gt::rmsnorm_linear::prepare(GT_FORWARD, args, &a, &device);
    return status != GT_OK ? status : gt::rmsnorm_linear::forward(a, device, stream);
}

GT_API gt_status gt_rmsnorm_linear_backward(const gt_rmsnorm_linear_args* args, gt_stream stream) {
    gt_rmsnorm_linear_args a;
    gt::Device device;
    const gt_status status = gt::rmsnorm_linear::prepare(GT_BACKWARD, args, &a, &device);
    return status != GT_OK ? status : gt::rmsnorm_linear::backward(a, device, stream);
}

GT_API gt_status gt_rmsnorm_linear_step(const gt_rmsnorm_linear_args* args, gt_stream stream) {
    gt_rmsnorm_linear_args a;
    gt::Device device;
    const gt_status status = gt::rmsnorm_linear::prepare(GT_STEP, args, &a, &device);
    return status != GT_OK ? status : gt::rmsnorm_linear::launch_step(a, device, stream);
}

GT_API gt_status gt_rmsnorm_linear_workspace(const gt_rmsnorm_linear_args* args, gt_workspace* need) {
    gt_no_answer(need);
    gt_rmsnorm_linear_args a;
    gt::Device device;
    const gt_status status = gt::rmsnorm_linear::prepare(GT_QUERY, args, &a, &device);
    if (status != GT_OK) return status;
    if (!need) return gt_fail(GT_ERROR_NULL, "need is NULL");
    *need = gt::rmsnorm_linear::workspace_of(a, device);
    return GT_OK;
}

} /* extern "C" */

/* ---- norm_mix, norm_gate and add_norm: the C functions -------------------------------------------- */

extern "C" {

GT_API gt_status gt_norm_mix_forward(const gt_norm_mix_args* args, gt_stream stream) {
    gt_norm_mix_args a;
    gt::Device device;
    const gt_status status = gt::norm::prepare(gt_op_norm_mix(), GT_FORWARD, args, &a, &device);
    return status != GT_OK ? status : gt::norm::launch_mix_forward(a, device, stream);
}

GT_API gt_status gt_norm_mix_backward(const gt_norm_mix_args* args, gt_stream stream) {
    gt_norm_mix_args a;
    gt::Device device;
    const gt_status status = gt::norm::prepare(gt_op_norm_mix(), GT_BACKWARD, args, &a, &device);
    return status != GT_OK ? status : gt::norm::mix_backward(a, device, stream);
}

GT_API gt_status gt_norm_mix_workspace(const gt_norm_mix_args* args, gt_workspace* need) {
    gt_no_answer(need);
    gt_norm_mix_args a;
    gt::Device device;
    const gt_status status = gt::norm::prepare(gt_op_norm_mix(), GT_QUERY, args, &a, &device);
    if (status != GT_OK) return status;
    return gt::norm::answer(need, a.M, a.D, a.H, a.dtype, a.dgain_a, a.dgain_b, device);
}

GT_API gt_status gt_norm_gate_forward(const gt_norm_gate_args* args, gt_stream stream) {
    gt_norm_gate_args a;
    gt::Device device;
    const gt_status status = gt::norm::prepare(gt_op_norm_gate(), GT_FORWARD, args, &a, &device);
    return status != GT_OK ? status : gt::norm::launch_gate_forward(a, device, stream);
}

GT_API gt_status gt_norm_gate_backward(const gt_norm_gate_args* args, gt_stream stream) {
    gt_norm_gate_args a;
    gt::Device device;
    const gt_status status = gt::norm::prepare(gt_op_norm_gate(), GT_BACKWARD, args, &a, &device);
    return status != GT_OK ? status : gt::norm::gate_backward(a, device, stream);
}

GT_API gt_status gt_norm_gate_workspace(const gt_norm_gate_args* args, gt_workspace* need) {
    gt_no_answer(need);
    gt_norm_gate_args a;
    gt::Device device;
    const gt_status status = gt::norm::prepare(gt_op_norm_gate(), GT_QUERY, args, &a, &device);
    if (status != GT_OK) return status;
    return gt::norm::answer(need, a.M, a.D, a.H, a.dtype, a.dgamma, a.dbeta, device);
}

GT_API gt_status gt_add_norm_forward(const gt_add_norm_args* args, gt_stream stream) {
    gt_add_norm_args a;
    gt::Device device;
    const gt_status status = gt::norm::prepare(gt_op_add_norm(), GT_FORWARD, args, &a, &device);
    return status != GT_OK ? status : gt::add_norm::forward(a, device, stream);
}

GT_API gt_status gt_add_norm_backward(const gt_add_norm_args* args, gt_stream stream) {
    gt_add_norm_args a;
    gt::Device device;
    const gt_status status = gt::norm::prepare(gt_op_add_norm(), GT_BACKWARD, args, &a, &device);
    return status != GT_OK ? status : gt::add_norm::backward(a, device, stream);
}

GT_API gt_status gt_add_norm_workspace(const gt_add_norm_args* args, gt_workspace* need) {
    gt_no_answer(need);
    gt_add_norm_args a;
    gt::Device device;
    const gt_status status = gt::norm::prepare(gt_op_add_norm(), GT_QUERY, args, &a, &device);
    return status != GT_OK ? status : gt::add_norm::answer(a, device, need);
}

GT_API gt_status gt_rmsnorm_linear_path(const gt_rmsnorm_linear_args* args, char* text, size_t bytes) {
    const gt::PathPasses<gt_rmsnorm_linear_args> passes = {
        {gt_rmsnorm_linear_forward, gt_rmsnorm_linear_backward, gt_rmsnorm_linear_step}, nullptr};
    return gt::path_of_rows(gt_op_rmsnorm_linear(), passes, args, text, bytes, GT_STEP_ROWS);
}

GT_API gt_status gt_norm_mix_path(const gt_norm_mix_args* args, char* text, size_t bytes) {
    const gt::PathPasses<gt_norm_mix_args> passes = {{gt_norm_mix_forward, gt_norm_mix_backward, nullptr}, nullptr};
    return gt::path_of_rows(gt_op_norm_mix(), passes, args, text, bytes);
}

GT_API gt_status gt_add_norm_path(const gt_add_norm_args* args, char* text, size_t bytes) {
    const gt::PathPasses<gt_add_norm_args> passes = {{gt_add_norm_forward, gt_add_norm_backward, nullptr}, nullptr};
    return gt::path_of_rows(gt_op_add_norm(), passes, args, text, bytes);
}

GT_API gt_status gt_norm_gate_path(const gt_norm_gate_args* args, char* text, size_t bytes) {
    const gt::PathPasses<gt_norm_gate_args> passes = {{gt_norm_gate_forward, gt_norm_gate_backward, nullptr}, nullptr};
    return gt::path_of_rows(gt_op_norm_gate(), passes, args, text, bytes);
}

} /* extern "C" */

#else

/* ---- stubs: this file was compiled without nvcc ---------------------------------------------- */

#include "gt/base/stubs.h"

#ifdef __cplusplus
extern "C" {
#endif

GT_STUBS(rmsnorm_linear)
GT_STUB(rmsnorm_linear, step, GT_STEP)
GT_STUBS(norm_mix)
GT_STUBS(norm_gate)
GT_STUBS(add_norm)

#ifdef __cplusplus
}
#endif

#endif /* kernels or stubs */

#include "gt_kernels.h" /* the implementation of the other operators, if macros ask for it here */

#endif /* GT_FUSED_CUH */
