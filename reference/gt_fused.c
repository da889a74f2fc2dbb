/* reference/gt_fused.c - normalisation and its neighbours on the CPU, the twins of gt_fused.cuh: rmsnorm_linear,
 * norm_mix, norm_gate and add_norm.  All of them normalise rows, or slices of rows:
 *
 *     xhat = (x - mean(x)) rstd         rstd = 1 / sqrt(mean((x - mean(x))^2) + eps)
 *     dx   = rstd (dxhat - mean(dxhat) - xhat mean(dxhat . xhat))
 *
 * where RMSNorm leaves out mean(x) and mean(dxhat).
 * Sources: Zhang and Sennrich 2019, arXiv:1910.07467; Ba et al. 2016, arXiv:1607.06450.
 *
 * Rows are held in double in both builds (gt_ref.h).  So products and squares of floats cannot overflow, and the
 * differences above keep their digits.  In a slice of one or two elements almost all of dxhat cancels. */
#include "gt_ref.h"

/* ---- one normalised slice -------------------------------------------------------------------- */

/* Replaces x by xhat and returns rstd. */
static double norm_slice(double *x, int64_t n, gt_norm norm, double eps) {
    double mean = 0, square = 0;
    if (norm == GT_NORM_LAYER) {
        GT_SIMD_SUM(mean)
        for (int64_t i = 0; i < n; i++) mean += x[i];
        mean /= (double)n;
    }
    GT_SIMD_SUM(square)
    for (int64_t i = 0; i < n; i++) {
        x[i] -= mean;
        square += x[i] * x[i];
    }
    double rstd = 1 / sqrt(square / (double)n + eps);
    for (int64_t i = 0; i < n; i++) x[i] *= rstd;
    return rstd;
}

/* Replaces dxhat in d by dx. */
static void norm_slice_backward(double *d, const double *xhat, double rstd, int64_t n, gt_norm norm) {
    double mean = 0, slope = 0;
    GT_SIMD_SUM(mean, slope)
    for (int64_t i = 0; i < n; i++) {
        mean += norm == GT_NORM_LAYER ? d[i] : 0;
        slope += d[i] * xhat[i];
    }
    mean /= (double)n;
    slope /= (double)n;
    GT_SIMD
    for (int64_t i = 0; i < n; i++) d[i] = rstd * (d[i] - mean - xhat[i] * slope);
}

/* ---- rows in parallel ------------------------------------------------------------------------ */

/* Rows are cut into a fixed number of blocks, each with its own scratch.  Each block sums its rows, and then the sums
 * of the blocks are added in order.  So the result does not depend on the number of threads. */
enum { NORM_BLOCKS = 32 };

static int64_t norm_block_start(int64_t M, int64_t block) { return M * block / NORM_BLOCKS; }

/* Allocates `block_size` zeros for every block. */
static gt_status norm_scratch(double **scratch, int64_t block_size) {
    return ref_sums(scratch, NORM_BLOCKS * block_size);
}

/* Writes or accumulates the sum over blocks of sums[block * block_size + i], for i < n. */
static void norm_sum_blocks(float *grad, const double *sums, int64_t block_size, int64_t n, int accumulate) {
    for (int64_t i = 0; grad && i < n; i++) {
        double sum = 0;
        for (int64_t k = 0; k < NORM_BLOCKS; k++) sum += sums[k * block_size + i];
        ref_grad(grad, i, sum, accumulate);
    }
}

static void norm_load_row(double *to, const void *data, gt_dtype dtype, int64_t at, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = ref_load(data, dtype, at + i);
}
static void norm_store_row(void *data, gt_dtype dtype, int64_t at, const double *from, int64_t n) {
    for (int64_t i = 0; i < n; i++) ref_store(data, dtype, at + i, (real)from[i]);
}

/* Loads a parameter as a row.  If data is NULL, every element is `missing`. */
static void norm_load_param(double *to, const float *data, double missing, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = missing;
    for (int64_t i = 0; data && i < n; i++) to[i] = ((const real *)data)[i];
}

/* ---- rmsnorm_linear -----------------------------------------------------------------------------
 * n = xhat . gamma + beta, y = weight n + bias, and with dn = weight^T dy:
 *     dweight = sum_m dy n^T     dgamma = sum_m dn . xhat     dbeta = sum_m dn     dbias = sum_m dy
 */

/* Computes y += s0 x[0,:] + s1 x[1,:] + s2 x[2,:] + s3 x[3,:], for rows of n elements.  Four terms at once save three
 * of four passes over y. */
static inline void linear_add4(real *restrict y, const real *restrict x, int64_t n, real s0, real s1, real s2,
                               real s3) {
    const real *restrict x1 = x + n, *restrict x2 = x1 + n, *restrict x3 = x2 + n;
    for (int64_t i = 0; i < n; i++) y[i] += s0 * x[i] + s1 * x1[i] + s2 * x2[i] + s3 * x3[i];
}

static inline void linear_add(real *restrict y, const real *restrict x, int64_t n, real s) {
    for (int64_t i = 0; i < n; i++) y[i] += s * x[i];
}

/* Rows of C that are computed together.  They use the same rows of B, and all these rows stay in cache. */
enum { LINEAR_ROWS = 8 };

/* Computes C += A B for rows first ... last-1 of C.  C is [P,R] and B is [Q,R].  Element [p,q] of A [P,Q] lies at p *
 * p_stride + q * q_stride. */
static void linear_product_rows(real *C, const real *A, int64_t p_stride, int64_t q_stride, const real *B,
                                int64_t first, int64_t last, int64_t Q, int64_t R) {
    int64_t q = 0;
    for (; q + 4 <= Q; q += 4)
        for (int64_t p = first; p < last; p++) {
            const real *s = A + p * p_stride + q * q_stride;
            linear_add4(C + p * R, B + q * R, R, s[0], s[q_stride], s[2 * q_stride], s[3 * q_stride]);
        }
    for (; q < Q; q++)
        for (int64_t p = first; p < last; p++) linear_add(C + p * R, B + q * R, R, A[p * p_stride + q * q_stride]);
}

static void linear_product(real *C, const real *A, int64_t p_stride, int64_t q_stride, const real *B, int64_t P,
                           int64_t Q, int64_t R) {
    GT_PARALLEL_FOR
    for (int64_t first = 0; first < P; first += LINEAR_ROWS) {
        int64_t last = first + LINEAR_ROWS < P ? first + LINEAR_ROWS : P;
        linear_product_rows(C, A, p_stride, q_stride, B, first, last, Q, R);
    }
}

/* Computes sum [P,R] += A^T B for A [Q,P] and B [Q,R], where Q may be large.  `part` [P,R] holds partial sums over
 * LINEAR_TERMS rows, so that their rounding errors stay small.  The partial sums are added in double. */
enum { LINEAR_TERMS = 256 };

static void linear_long_product(double *sum, real *part, const real *A, const real *B, int64_t P, int64_t Q,
                                int64_t R) {
    GT_PARALLEL_FOR
    for (int64_t first = 0; first < P; first += LINEAR_ROWS) {
        int64_t last = first + LINEAR_ROWS < P ? first + LINEAR_ROWS : P;
        for (int64_t q = 0; q < Q; q += LINEAR_TERMS) {
            int64_t terms = Q - q < LINEAR_TERMS ? Q - q : LINEAR_TERMS;
            memset(part + first * R, 0, (size_t)((last - first) * R) * sizeof(real));
            linear_product_rows(part, A + q * P, 1, P, B + q * R, first, last, terms, R);
            for (int64_t i = first * R; i < last * R; i++) sum[i] += part[i];
        }
    }
}

/* Scratch of one block of rows: two rows, and the sums dgamma and dbeta. */
static int64_t linear_block_size(const gt_rmsnorm_linear_args *a) { return 4 * a->D; }

/* Computes xhat of row m and returns rstd. */
static double linear_row(const gt_rmsnorm_linear_args *a, int64_t m, double *xhat) {
    norm_load_row(xhat, a->x, a->dtype, m * a->x_stride, a->D);
    return norm_slice(xhat, a->D, a->norm, a->eps);
}

/* Computes n [M,D]. */
static void linear_normalise(const gt_rmsnorm_linear_args *a, real *n, double *blocks) {
    GT_PARALLEL_FOR
    for (int64_t k = 0; k < NORM_BLOCKS; k++) {
        double *xhat = blocks + k * linear_block_size(a);
        for (int64_t m = norm_block_start(a->M, k); m < norm_block_start(a->M, k + 1); m++) {
            linear_row(a, m, xhat);
            for (int64_t d = 0; d < a->D; d++)
                n[m * a->D + d] = (real)(xhat[d] * ref_param(a->gamma, d, 1) + ref_param(a->beta, d, 0));
        }
    }
}

/* Computes y [M,O] = n weight^T + bias.  `weight` is room for the transposed weight [D,O]. */
static void linear_output(const gt_rmsnorm_linear_args *a, const real *n, real *weight, real *y) {
    for (int64_t o = 0; o < a->O; o++)
        for (int64_t d = 0; d < a->D; d++) weight[d * a->O + o] = ref_load(a->weight, a->dtype, o * a->D + d);
    for (int64_t m = 0; m < a->M; m++)
        for (int64_t o = 0; o < a->O; o++) y[m * a->O + o] = ref_param(a->bias, o, 0);
    linear_product(y, n, a->D, 1, weight, a->M, a->D, a->O);
    for (int64_t m = 0; m < a->M; m++) ref_store_row(a->y, a->dtype, m * a->y_stride, y + m * a->O, a->O);
}

/* Computes y for O = 1, all in double.  The terms of y may cancel, and the row has no other output that shows how large
 * they were. */
static void linear_single(const gt_rmsnorm_linear_args *a, double *blocks) {
    GT_PARALLEL_FOR
    for (int64_t k = 0; k < NORM_BLOCKS; k++) {
        double *xhat = blocks + k * linear_block_size(a);
        for (int64_t m = norm_block_start(a->M, k); m < norm_block_start(a->M, k + 1); m++) {
            double sum = ref_param(a->bias, 0, 0);
            linear_row(a, m, xhat);
            for (int64_t d = 0; d < a->D; d++)
                sum +=
                    (xhat[d] * ref_param(a->gamma, d, 1) + ref_param(a->beta, d, 0)) * ref_load(a->weight, a->dtype, d);
            norm_store_row(a->y, a->dtype, m * a->y_stride, &sum, 1);
        }
    }
}

gt_status GT_REF(rmsnorm_linear_forward)(const gt_rmsnorm_linear_args *args) {
    gt_rmsnorm_linear_args a;
    gt_dims dims;
    gt_status status = gt_prepare(gt_op_rmsnorm_linear(), GT_FORWARD, GT_HOST, args, &a, &dims);
    if (status != GT_OK || a.M == 0) return status;
    real *n = NULL; /* n [M,D], the transposed weight [D,O], y [M,O] */
    double *blocks = NULL;
    status = norm_scratch(&blocks, linear_block_size(&a));
    if (status == GT_OK) status = ref_scratch(&n, a.M * a.D + a.D * a.O + a.M * a.O);
    if (status == GT_OK && a.O == 1) {
        linear_single(&a, blocks);
    } else if (status == GT_OK) {
        real *weight = n + a.M * a.D, *y = weight + a.D * a.O;
        linear_normalise(&a, n, blocks);
        linear_output(&a, n, weight, y);
    }
    free(n);
    free(blocks);
    return status;
}

/* A step has at most 64 rows, so its sums can be computed in double, output by output. */
gt_status GT_REF(rmsnorm_linear_step)(const gt_rmsnorm_linear_args *args) {
    gt_rmsnorm_linear_args a;
    gt_dims dims;
    gt_status status = gt_prepare(gt_op_rmsnorm_linear(), GT_STEP, GT_HOST, args, &a, &dims);
    if (status != GT_OK || a.M == 0) return status;
    real *n = NULL; /* [M,D] */
    double *blocks = NULL;
    status = norm_scratch(&blocks, linear_block_size(&a));
    if (status == GT_OK) status = ref_scratch(&n, a.M * a.D);
    if (status == GT_OK) {
        linear_normalise(&a, n, blocks);
        GT_PARALLEL_FOR
        for (int64_t o = 0; o < a.O; o++)
            for (int64_t m = 0; m < a.M; m++) {
                double sum = 0;
                for (int64_t d = 0; d < a.D; d++) sum += (double)n[m * a.D + d] * ref_int8(a.weight_int8, o * a.D + d);
                const double y = sum * ref_param(a.weight_scale, o, 0) + ref_param(a.bias, o, 0);
                ref_store(a.y, a.dtype, m * a.y_stride + o, (real)y);
            }
    }
    free(n);
    free(blocks);
    return status;
}

/* Computes dbias.  `dbias` is room for the sums, which holds zeros on entry. */
static void linear_dbias(const gt_rmsnorm_linear_args *a, const real *dy, double *dbias) {
    if (!a->dbias) return;
    for (int64_t m = 0; m < a->M; m++)
        for (int64_t o = 0; o < a->O; o++) dbias[o] += dy[m * a->O + o];
    for (int64_t o = 0; o < a->O; o++) ref_grad(a->dbias, o, dbias[o], a->accumulate);
}

/* Computes dweight.  `dweight` is room for the sums, which holds zeros on entry; `part` is scratch of the same size. */
static void linear_dweight(const gt_rmsnorm_linear_args *a, const real *dy, real *n, real *part, double *dweight,
                           double *blocks) {
    if (!a->dweight) return;
    linear_normalise(a, n, blocks);
    linear_long_product(dweight, part, dy, n, a->O, a->M, a->D);
    for (int64_t i = 0; i < a->O * a->D; i++) ref_grad(a->dweight, i, dweight[i], a->accumulate);
}

/* Computes dx of row m from its dn, and adds to dgamma and dbeta. */
static void linear_row_backward(const gt_rmsnorm_linear_args *a, int64_t m, const real *dn, double *xhat, double *dx,
                                double *dgamma, double *dbeta) {
    double rstd = linear_row(a, m, xhat);
    for (int64_t d = 0; d < a->D; d++) {
        dx[d] = (double)dn[d] * ref_param(a->gamma, d, 1);
        dgamma[d] += (double)dn[d] * xhat[d];
        dbeta[d] += dn[d];
    }
    if (!a->dx) return;
    norm_slice_backward(dx, xhat, rstd, a->D, a->norm);
    norm_store_row(a->dx, a->dtype, m * a->dx_stride, dx, a->D);
}

/* Computes dx, dgamma and dbeta.  `blocks` holds zeros on entry. */
static void linear_dinput(const gt_rmsnorm_linear_args *a, const real *dy, real *dn, real *weight, double *blocks) {
    int64_t D = a->D, block_size = linear_block_size(a);
    if (!a->dx && !a->dgamma && !a->dbeta) return;
    ref_load_row(weight, a->weight, a->dtype, 0, a->O * D);
    memset(dn, 0, (size_t)(a->M * D) * sizeof(real));
    linear_product(dn, dy, a->O, 1, weight, a->M, a->O, D);
    GT_PARALLEL_FOR
    for (int64_t k = 0; k < NORM_BLOCKS; k++) {
        double *xhat = blocks + k * block_size, *dx = xhat + D, *dgamma = dx + D;
        for (int64_t m = norm_block_start(a->M, k); m < norm_block_start(a->M, k + 1); m++)
            linear_row_backward(a, m, dn + m * D, xhat, dx, dgamma, dgamma + D);
    }
    norm_sum_blocks(a->dgamma, blocks + 2 * D, block_size, D, a->accumulate);
    norm_sum_blocks(a->dbeta, blocks + 3 * D, block_size, D, a->accumulate);
}

gt_status GT_REF(rmsnorm_linear_backward)(const gt_rmsnorm_linear_args *args) {
    gt_rmsnorm_linear_args a;
    gt_dims dims;
    gt_status status = gt_prepare(gt_op_rmsnorm_linear(), GT_BACKWARD, GT_HOST, args, &a, &dims);
    if (status != GT_OK) return status;
    if (a.M == 0) {
        ref_no_grad(a.dweight, gt_times(a.O, a.D), a.accumulate);
        ref_no_grad(a.dgamma, a.D, a.accumulate);
        ref_no_grad(a.dbeta, a.D, a.accumulate);
        ref_no_grad(a.dbias, a.O, a.accumulate);
        return GT_OK;
    }
    real *dy = NULL;                     /* dy [M,O]; n, later dn [M,D]; partial sums of dweight, later weight [O,D] */
    double *blocks = NULL, *sums = NULL; /* dbias [O], dweight [O,D] */
    status = norm_scratch(&blocks, linear_block_size(&a));
    if (status == GT_OK) status = ref_sums(&sums, a.O + a.O * a.D);
    if (status == GT_OK) status = ref_scratch(&dy, a.M * a.O + a.M * a.D + a.O * a.D);
    if (status == GT_OK) {
        real *rows = dy + a.M * a.O, *matrix = rows + a.M * a.D;
        for (int64_t m = 0; m < a.M; m++) ref_load_row(dy + m * a.O, a.dy, a.dtype, m * a.dy_stride, a.O);
        linear_dbias(&a, dy, sums);
        linear_dweight(&a, dy, rows, matrix, sums + a.O, blocks);
        linear_dinput(&a, dy, rows, matrix, blocks);
    }
    free(dy);
    free(sums);
    free(blocks);
    return status;
}

/* ---- norm_mix -----------------------------------------------------------------------------------
 * y = residual + gain_a . ahat + gain_b . bhat, where a and b are normalised per slice of D/H.  The gradient of
 * residual is dy.  For both branches alike: dahat = dy . gain_a, dgain_a = sum_m dy . ahat. */

static void mix_normalise(const gt_norm_mix_args *a, const void *x, int64_t x_stride, int64_t m, double *xhat) {
    int64_t n = a->D / a->H;
    norm_load_row(xhat, x, a->dtype, m * x_stride, a->D);
    for (int64_t first = 0; first < a->D; first += n) norm_slice(xhat + first, n, GT_NORM_RMS, a->eps);
}

gt_status GT_REF(norm_mix_forward)(const gt_norm_mix_args *args) {
    gt_norm_mix_args a;
    gt_dims dims;
    gt_status status = gt_prepare(gt_op_norm_mix(), GT_FORWARD, GT_HOST, args, &a, &dims);
    if (status != GT_OK || a.M == 0) return status;
    double *blocks; /* per block: ahat, bhat, gain_a, gain_b, and the residual, which y overwrites */
    status = norm_scratch(&blocks, 5 * a.D);
    if (status != GT_OK) return status;
    GT_PARALLEL_FOR
    for (int64_t k = 0; k < NORM_BLOCKS; k++) {
        double *ahat = blocks + k * 5 * a.D, *bhat = ahat + a.D;
        double *gain_a = bhat + a.D, *gain_b = gain_a + a.D, *y = gain_b + a.D;
        norm_load_param(gain_a, a.gain_a, 1, a.D);
        norm_load_param(gain_b, a.gain_b, 1, a.D);
        for (int64_t m = norm_block_start(a.M, k); m < norm_block_start(a.M, k + 1); m++) {
            mix_normalise(&a, a.a, a.a_stride, m, ahat);
            mix_normalise(&a, a.b, a.b_stride, m, bhat);
            if (a.residual) norm_load_row(y, a.residual, a.dtype, m * a.residual_stride, a.D);
            GT_SIMD
            for (int64_t d = 0; d < a.D; d++)
                y[d] = (a.residual ? y[d] : 0) + gain_a[d] * ahat[d] + gain_b[d] * bhat[d];
            norm_store_row(a.y, a.dtype, m * a.y_stride, y, a.D);
        }
    }
    free(blocks);
    return GT_OK;
}

typedef struct mix_branch {
    const void *x;
    const float *gain;
    void *dx;
    float *dgain;
    int64_t x_stride, dx_stride;
} mix_branch;

/* Computes dx of row m of one branch, and adds to dgain. */
static void mix_row_backward(const gt_norm_mix_args *a, const mix_branch *branch, int64_t m, double *xhat, double *dx,
                             double *dgain, const double *gain) {
    int64_t n = a->D / a->H;
    norm_load_row(xhat, branch->x, a->dtype, m * branch->x_stride, a->D);
    norm_load_row(dx, a->dy, a->dtype, m * a->dy_stride, a->D);
    for (int64_t first = 0; first < a->D; first += n) {
        double rstd = norm_slice(xhat + first, n, GT_NORM_RMS, a->eps);
        GT_SIMD
        for (int64_t d = first; d < first + n; d++) {
            dgain[d] += dx[d] * xhat[d];
            dx[d] *= gain[d];
        }
        norm_slice_backward(dx + first, xhat + first, rstd, n, GT_NORM_RMS);
    }
    if (branch->dx) norm_store_row(branch->dx, a->dtype, m * branch->dx_stride, dx, a->D);
}

/* Scratch of one block of rows: two rows, the sums dgain, and the gain. */
static int64_t mix_block_size(const gt_norm_mix_args *a) { return 4 * a->D; }

static void mix_branch_backward(const gt_norm_mix_args *a, const mix_branch *branch, double *blocks) {
    int64_t block_size = mix_block_size(a);
    if (!branch->dx && !branch->dgain) return;
    memset(blocks, 0, (size_t)(NORM_BLOCKS * block_size) * sizeof(double));
    GT_PARALLEL_FOR
    for (int64_t k = 0; k < NORM_BLOCKS; k++) {
        double *xhat = blocks + k * block_size, *dx = xhat + a->D, *dgain = dx + a->D;
        double *gain = dgain + a->D;
        norm_load_param(gain, branch->gain, 1, a->D);
        for (int64_t m = norm_block_start(a->M, k); m < norm_block_start(a->M, k + 1); m++)
            mix_row_backward(a, branch, m, xhat, dx, dgain, gain);
    }
    norm_sum_blocks(branch->dgain, blocks + 2 * a->D, block_size, a->D, a->accumulate);
}

gt_status GT_REF(norm_mix_backward)(const gt_norm_mix_args *args) {
    gt_norm_mix_args a;
    gt_dims dims;
    gt_status status = gt_prepare(gt_op_norm_mix(), GT_BACKWARD, GT_HOST, args, &a, &dims);
    if (status != GT_OK) return status;
    if (a.M == 0) {
        ref_no_grad(a.dgain_a, a.D, a.accumulate);
        ref_no_grad(a.dgain_b, a.D, a.accumulate);
        return GT_OK;
    }
    mix_branch branch_a = {a.a, a.gain_a, a.da, a.dgain_a, a.a_stride, a.da_stride};
    mix_branch branch_b = {a.b, a.gain_b, a.db, a.dgain_b, a.b_stride, a.db_stride};
    double *blocks;
    status = norm_scratch(&blocks, mix_block_size(&a));
    if (status != GT_OK) return status;
    mix_branch_backward(&a, &branch_a, blocks);
    mix_branch_backward(&a, &branch_b, blocks);
    free(blocks);
    return GT_OK;
}

/* ---- norm_gate ----------------------------------------------------------------------------------
 * With s = silu(z), or 1 without z, per slice of D/H:
 *     norm first:  y = n . s with n = norm(x) . gamma + beta
 *     gate first:  y = n     with n = norm(v) . gamma + beta, v = x . s
 * Backward has dn = dy . s, or gate first dn = dy.  dgamma = sum_m dn . xhat, dbeta = sum_m dn, and:
 *     norm first:  ds = dy . n                              dz = ds . silu'(z)
 *     gate first:  ds = dv . x      dx = dv . s
 */

/* One row.  xhat first holds x or v, then its normalised value.  In forward d holds y.  In backward d holds dxhat, then
 * dx or dv. */
typedef struct gate_row {
    double *x, *z, *s, *xhat, *dy, *d, *gamma, *beta;
} gate_row;

enum { GATE_ROW_SIZE = 8 }; /* arrays of D */

static gate_row gate_row_in(const gt_norm_gate_args *a, double *scratch) {
    int64_t D = a->D;
    gate_row row = {scratch,         scratch + D,     scratch + 2 * D, scratch + 3 * D,
                    scratch + 4 * D, scratch + 5 * D, scratch + 6 * D, scratch + 7 * D};
    norm_load_param(row.gamma, a->gamma, 1, D);
    norm_load_param(row.beta, a->beta, 0, D);
    return row;
}

/* Loads x, z and s, and stores the input of the norm in xhat. */
static void gate_load(const gt_norm_gate_args *a, int64_t m, const gate_row *row) {
    const double *x = row->x, *z = row->z;
    double *s = row->s, *xhat = row->xhat;
    norm_load_row(row->x, a->x, a->dtype, m * a->x_stride, a->D);
    if (a->z) norm_load_row(row->z, a->z, a->dtype, m * a->z_stride, a->D);
    for (int64_t d = 0; d < a->D; d++) s[d] = a->z ? ref_silu((real)z[d]) : 1;
    GT_SIMD
    for (int64_t d = 0; d < a->D; d++) xhat[d] = a->gate_first ? x[d] * s[d] : x[d];
}

/* Returns n. */
static double gate_affine(const gate_row *row, int64_t d) { return row->xhat[d] * row->gamma[d] + row->beta[d]; }

gt_status GT_REF(norm_gate_forward)(const gt_norm_gate_args *args) {
    gt_norm_gate_args a;
    gt_dims dims;
    gt_status status = gt_prepare(gt_op_norm_gate(), GT_FORWARD, GT_HOST, args, &a, &dims);
    if (status != GT_OK || a.M == 0) return status;
    int64_t n = a.D / a.H, block_size = GATE_ROW_SIZE * a.D;
    double *blocks;
    status = norm_scratch(&blocks, block_size);
    if (status != GT_OK) return status;
    GT_PARALLEL_FOR
    for (int64_t k = 0; k < NORM_BLOCKS; k++) {
        gate_row row = gate_row_in(&a, blocks + k * block_size);
        for (int64_t m = norm_block_start(a.M, k); m < norm_block_start(a.M, k + 1); m++) {
            gate_load(&a, m, &row);
            for (int64_t first = 0; first < a.D; first += n) norm_slice(row.xhat + first, n, a.norm, a.eps);
            GT_SIMD
            for (int64_t d = 0; d < a.D; d++) row.d[d] = gate_affine(&row, d) * (a.gate_first ? 1 : row.s[d]);
            norm_store_row(a.y, a.dtype, m * a.y_stride, row.d, a.D);
        }
    }
    free(blocks);
    return GT_OK;
}

/* Computes dx and dz of row m, and overwrites d and dy. */
static void gate_store_gradients(const gt_norm_gate_args *a, int64_t m, const gate_row *row) {
    const double *x = row->x, *z = row->z, *s = row->s;
    double *dx = row->d, *dz = row->dy;
    if (a->dz) {
        GT_SIMD
        for (int64_t d = 0; d < a->D; d++) /* ds */
            dz[d] = a->gate_first ? dx[d] * x[d] : dz[d] * gate_affine(row, d);
        for (int64_t d = 0; d < a->D; d++) dz[d] *= ref_dsilu((real)z[d]);
        norm_store_row(a->dz, a->dtype, m * a->dz_stride, dz, a->D);
    }
    if (!a->dx) return;
    GT_SIMD
    for (int64_t d = 0; d < a->D; d++) dx[d] *= a->gate_first ? s[d] : 1;
    norm_store_row(a->dx, a->dtype, m * a->dx_stride, dx, a->D);
}

/* Computes the gradients of row m, and adds to dgamma and dbeta. */
static void gate_row_backward(const gt_norm_gate_args *a, int64_t m, const gate_row *row, double *dgamma,
                              double *dbeta) {
    int64_t n = a->D / a->H;
    gate_load(a, m, row);
    norm_load_row(row->dy, a->dy, a->dtype, m * a->dy_stride, a->D);
    for (int64_t first = 0; first < a->D; first += n) {
        double rstd = norm_slice(row->xhat + first, n, a->norm, a->eps);
        GT_SIMD
        for (int64_t d = first; d < first + n; d++) {
            double dn = row->dy[d] * (a->gate_first ? 1 : row->s[d]);
            dgamma[d] += dn * row->xhat[d];
            dbeta[d] += dn;
            row->d[d] = dn * row->gamma[d];
        }
        norm_slice_backward(row->d + first, row->xhat + first, rstd, n, a->norm);
    }
    gate_store_gradients(a, m, row);
}

gt_status GT_REF(norm_gate_backward)(const gt_norm_gate_args *args) {
    gt_norm_gate_args a;
    gt_dims dims;
    gt_status status = gt_prepare(gt_op_norm_gate(), GT_BACKWARD, GT_HOST, args, &a, &dims);
    if (status != GT_OK) return status;
    if (a.M == 0) {
        ref_no_grad(a.dgamma, a.D, a.accumulate);
        ref_no_grad(a.dbeta, a.D, a.accumulate);
        return GT_OK;
    }
    int64_t sums = GATE_ROW_SIZE * a.D, block_size = sums + 2 * a.D;
    double *blocks; /* per block: a gate_row, dgamma, dbeta */
    status = norm_scratch(&blocks, block_size);
    if (status != GT_OK) return status;
    GT_PARALLEL_FOR
    for (int64_t k = 0; k < NORM_BLOCKS; k++) {
        gate_row row = gate_row_in(&a, blocks + k * block_size);
        double *dgamma = blocks + k * block_size + sums;
        for (int64_t m = norm_block_start(a.M, k); m < norm_block_start(a.M, k + 1); m++)
            gate_row_backward(&a, m, &row, dgamma, dgamma + a.D);
    }
    norm_sum_blocks(a.dgamma, blocks + sums, block_size, a.D, a.accumulate);
    norm_sum_blocks(a.dbeta, blocks + sums + a.D, block_size, a.D, a.accumulate);
    free(blocks);
    return GT_OK;
}

/* ---- add_norm -------------------------------------------------------------------------------- */

enum { ADD_ROW_SIZE = 5 }; /* arrays of D: xhat d dsum gamma beta */

/* Loads x + residual of row m, or the sum that forward stored. */
static void add_load(const gt_add_norm_args *a, int64_t m, double *v, double *scratch) {
    if (a->reads_sum && a->sum) {
        norm_load_row(v, a->sum, a->sum_dtype, m * a->sum_stride, a->D);
        return;
    }
    norm_load_row(v, a->x, a->dtype, m * a->x_stride, a->D);
    if (!a->residual) return;
    norm_load_row(scratch, a->residual, a->sum_dtype, m * a->residual_stride, a->D);
    GT_SIMD
    for (int64_t d = 0; d < a->D; d++) v[d] += scratch[d];
}

gt_status GT_REF(add_norm_forward)(const gt_add_norm_args *args) {
    gt_add_norm_args a;
    gt_dims dims;
    gt_status status = gt_prepare(gt_op_add_norm(), GT_FORWARD, GT_HOST, args, &a, &dims);
    if (status != GT_OK || a.M == 0) return status;
    a.reads_sum = 0;
    int64_t block_size = ADD_ROW_SIZE * a.D;
    double *blocks;
    status = norm_scratch(&blocks, block_size);
    if (status != GT_OK) return status;
    GT_PARALLEL_FOR
    for (int64_t k = 0; k < NORM_BLOCKS; k++) {
        double *xhat = blocks + k * block_size, *scratch = xhat + a.D, *gamma = xhat + 3 * a.D, *beta = xhat + 4 * a.D;
        norm_load_param(gamma, a.gamma, 1, a.D);
        norm_load_param(beta, a.beta, 0, a.D);
        for (int64_t m = norm_block_start(a.M, k); m < norm_block_start(a.M, k + 1); m++) {
            add_load(&a, m, xhat, scratch);
            norm_store_row(a.sum, a.sum_dtype, m * a.sum_stride, xhat, a.D);
            norm_slice(xhat, a.D, a.norm, a.eps);
            GT_SIMD
            for (int64_t d = 0; d < a.D; d++) xhat[d] = xhat[d] * gamma[d] + beta[d];
            norm_store_row(a.y, a.dtype, m * a.y_stride, xhat, a.D);
        }
    }
    free(blocks);
    return GT_OK;
}

/* Computes the gradients of row m, and adds to dgamma and dbeta. */
static void add_row_backward(const gt_add_norm_args *a, int64_t m, double *block, double *dgamma, double *dbeta) {
    const int64_t D = a->D;
    double *xhat = block, *dx = block + D, *dsum = block + 2 * D, *gamma = block + 3 * D;
    add_load(a, m, xhat, dx);
    norm_load_row(dx, a->dy, a->dtype, m * a->dy_stride, D);
    const double rstd = norm_slice(xhat, D, a->norm, a->eps);
    GT_SIMD
    for (int64_t d = 0; d < D; d++) {
        dgamma[d] += dx[d] * xhat[d];
        dbeta[d] += dx[d];
        dx[d] *= gamma[d];
    }
    norm_slice_backward(dx, xhat, rstd, D, a->norm);
    if (a->dsum) {
        norm_load_row(dsum, a->dsum, a->sum_dtype, m * a->dsum_stride, D);
        GT_SIMD
        for (int64_t d = 0; d < D; d++) dx[d] += dsum[d];
    }
    if (a->dx) norm_store_row(a->dx, a->dtype, m * a->dx_stride, dx, D);
    if (a->dresidual) norm_store_row(a->dresidual, a->sum_dtype, m * a->dresidual_stride, dx, D);
}

gt_status GT_REF(add_norm_backward)(const gt_add_norm_args *args) {
    gt_add_norm_args a;
    gt_dims dims;
    gt_status status = gt_prepare(gt_op_add_norm(), GT_BACKWARD, GT_HOST, args, &a, &dims);
    if (status != GT_OK) return status;
    if (a.M == 0) {
        ref_no_grad(a.dgamma, a.D, a.accumulate);
        ref_no_grad(a.dbeta, a.D, a.accumulate);
        return GT_OK;
    }
    int64_t sums = ADD_ROW_SIZE * a.D, block_size = sums + 2 * a.D;
    double *blocks; /* per block: a row, dgamma, dbeta */
    status = norm_scratch(&blocks, block_size);
    if (status != GT_OK) return status;
    GT_PARALLEL_FOR
    for (int64_t k = 0; k < NORM_BLOCKS; k++) {
        double *block = blocks + k * block_size, *dgamma = block + sums;
        norm_load_param(block + 3 * a.D, a.gamma, 1, a.D);
        for (int64_t m = norm_block_start(a.M, k); m < norm_block_start(a.M, k + 1); m++)
            add_row_backward(&a, m, block, dgamma, dgamma + a.D);
    }
    norm_sum_blocks(a.dgamma, blocks + sums, block_size, a.D, a.accumulate);
    norm_sum_blocks(a.dbeta, blocks + sums + a.D, block_size, a.D, a.accumulate);
    free(blocks);
    return GT_OK;
}
