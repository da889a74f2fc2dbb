/* Normalisation and its neighbours on the CPU, the twins of gt_fused.cuh: rmsnorm_linear, norm_mix
 * and norm_gate.  All three normalise slices of rows:
 *
 *     xhat = (x - mean(x)) rstd         rstd = 1 / sqrt(mean((x - mean(x))^2) + eps)
 *     dx   = rstd (dxhat - mean(dxhat) - xhat mean(dxhat . xhat))
 *
 * where RMSNorm leaves out mean(x) and mean(dxhat).
 *
 * Zhang and Sennrich 2019, arXiv:1910.07467; Ba et al. 2016, arXiv:1607.06450. */
#include "gt_ref.h"

/* ---- one normalised slice -------------------------------------------------------------------- */

/* x . gate, where a gate that is NULL counts as 1.  In double, as all row statistics: this product
 * of floats and its square cannot overflow, and x - mean keeps its digits. */
static inline double norm_input(const real *x, const real *gate, int64_t i) {
    return gate ? (double)x[i] * gate[i] : x[i];
}

/* xhat of x . gate; returns rstd.  xhat may equal x. */
static double norm_slice(real *xhat, const real *x, const real *gate, int64_t n, gt_norm norm,
                         double eps) {
    double mean = 0, square = 0;
    if (norm == GT_NORM_LAYER) {
        for (int64_t i = 0; i < n; i++) mean += norm_input(x, gate, i);
        mean /= (double)n;
    }
    for (int64_t i = 0; i < n; i++) {
        double centred = norm_input(x, gate, i) - mean;
        square += centred * centred;
    }
    double rstd = 1 / sqrt(square / (double)n + eps);
    for (int64_t i = 0; i < n; i++) xhat[i] = (norm_input(x, gate, i) - mean) * rstd;
    return rstd;
}

/* What a slice needs, beside dxhat and xhat of the element, to give dx of an element. */
typedef struct norm_gradient {
    double rstd, mean, slope; /* mean(dxhat), or 0 for RMS; mean(dxhat . xhat) */
} norm_gradient;

static norm_gradient norm_slice_backward(const real *dxhat, const real *xhat, double rstd,
                                         int64_t n, gt_norm norm) {
    norm_gradient g = {rstd, 0, 0};
    for (int64_t i = 0; i < n; i++) {
        if (norm == GT_NORM_LAYER) g.mean += dxhat[i];
        g.slope += (double)dxhat[i] * xhat[i];
    }
    g.mean /= (double)n;
    g.slope /= (double)n;
    return g;
}

static inline double norm_dx(norm_gradient g, real dxhat, real xhat) {
    return g.rstd * (dxhat - g.mean - xhat * g.slope);
}

/* ---- rows in parallel ------------------------------------------------------------------------ */

/* The rows are cut into a fixed number of blocks, each with scratch of its own.  Sums over the rows
 * are taken per block, then over the blocks in order, whatever the number of threads. */
enum { NORM_BLOCKS = 32 };

static int64_t norm_block_start(int64_t M, int64_t block) { return M * block / NORM_BLOCKS; }

/* Writes or accumulates the sum over blocks of sums[block * block_size + i], i < n. */
static void norm_sum_blocks(float *grad, const real *sums, int64_t block_size, int64_t n,
                            int accumulate) {
    for (int64_t i = 0; i < n; i++) {
        double sum = 0;
        for (int64_t k = 0; k < NORM_BLOCKS; k++) sum += sums[k * block_size + i];
        ref_grad(grad, i, sum, accumulate);
    }
}

/* ---- rmsnorm_linear -----------------------------------------------------------------------------
 * n = xhat . gamma + beta, y = weight n + bias, and with dn = weight^T dy:
 *     dweight = sum_m dy n^T     dgamma = sum_m dn . xhat     dbeta = sum_m dn     dbias = sum_m dy
 */

/* y += s0 x[0,:] + s1 x[1,:] + s2 x[2,:] + s3 x[3,:], rows of n; four at once save three of four
 * passes over y. */
static inline void linear_add4(real *restrict y, const real *restrict x, int64_t n, real s0,
                               real s1, real s2, real s3) {
    const real *restrict x1 = x + n, *restrict x2 = x1 + n, *restrict x3 = x2 + n;
    for (int64_t i = 0; i < n; i++) y[i] += s0 * x[i] + s1 * x1[i] + s2 * x2[i] + s3 * x3[i];
}

static inline void linear_add(real *restrict y, const real *restrict x, int64_t n, real s) {
    for (int64_t i = 0; i < n; i++) y[i] += s * x[i];
}

/* C += A B for C [P,R], A [P,Q] with element [p,q] at p * p_stride + q * q_stride, B [Q,R].  A few
 * rows of C at a time stay in cache with the rows of B that they share. */
static void linear_product(real *C, const real *A, int64_t p_stride, int64_t q_stride,
                           const real *B, int64_t P, int64_t Q, int64_t R) {
    enum { ROWS = 8 };
    GT_PARALLEL_FOR
    for (int64_t first = 0; first < P; first += ROWS) {
        int64_t last = first + ROWS < P ? first + ROWS : P, q = 0;
        for (; q + 4 <= Q; q += 4)
            for (int64_t p = first; p < last; p++) {
                const real *s = A + p * p_stride + q * q_stride;
                linear_add4(C + p * R, B + q * R, R, s[0], s[q_stride], s[2 * q_stride],
                            s[3 * q_stride]);
            }
        for (; q < Q; q++)
            for (int64_t p = first; p < last; p++)
                linear_add(C + p * R, B + q * R, R, A[p * p_stride + q * q_stride]);
    }
}

/* n [M,D] */
static void linear_normalise(const gt_rmsnorm_linear_args *a, real *n) {
    GT_PARALLEL_FOR
    for (int64_t m = 0; m < a->M; m++) {
        real *row = n + m * a->D;
        ref_load_row(row, a->x, a->dtype, m * a->x_stride, a->D);
        norm_slice(row, row, NULL, a->D, a->norm, a->eps);
        for (int64_t d = 0; d < a->D; d++)
            row[d] = row[d] * ref_param(a->gamma, d, 1) + ref_param(a->beta, d, 0);
    }
}

gt_status GT_REF(rmsnorm_linear_forward)(const gt_rmsnorm_linear_args *args) {
    gt_rmsnorm_linear_args a;
    gt_dims dims;
    gt_status status = gt_prepare(gt_op_rmsnorm_linear(), GT_FORWARD, GT_HOST, args, &a, &dims);
    if (status != GT_OK) return status;
    real *scratch; /* n [M,D], the transposed weight [D,O], y [M,O] */
    status = ref_scratch(&scratch, a.M * a.D + a.D * a.O + a.M * a.O);
    if (status != GT_OK) return status;
    real *n = scratch, *weight = n + a.M * a.D, *y = weight + a.D * a.O;
    linear_normalise(&a, n);
    for (int64_t o = 0; o < a.O; o++)
        for (int64_t d = 0; d < a.D; d++)
            weight[d * a.O + o] = ref_load(a.weight, a.dtype, o * a.D + d);
    for (int64_t m = 0; m < a.M; m++)
        for (int64_t o = 0; o < a.O; o++) y[m * a.O + o] = ref_param(a.bias, o, 0);
    linear_product(y, n, a.D, 1, weight, a.M, a.D, a.O);
    for (int64_t m = 0; m < a.M; m++)
        ref_store_row(a.y, a.dtype, m * a.y_stride, y + m * a.O, a.O);
    free(scratch);
    return GT_OK;
}

/* dbias and dweight from dy [M,O].  dbias is a product with a row of ones, all in one place. */
static void linear_backward_weight(const gt_rmsnorm_linear_args *a, const real *dy, real *n,
                                   real *dweight, real *dbias) {
    const real one = 1;
    if (a->dbias) {
        memset(dbias, 0, (size_t)a->O * sizeof(real));
        linear_product(dbias, &one, 0, 0, dy, 1, a->M, a->O);
        for (int64_t o = 0; o < a->O; o++) ref_grad(a->dbias, o, dbias[o], a->accumulate);
    }
    if (a->dweight) {
        linear_normalise(a, n);
        memset(dweight, 0, (size_t)(a->O * a->D) * sizeof(real));
        linear_product(dweight, dy, 1, a->O, n, a->O, a->M, a->D);
        for (int64_t i = 0; i < a->O * a->D; i++)
            ref_grad(a->dweight, i, dweight[i], a->accumulate);
    }
}

/* Scratch of one block of rows: two rows, and the sums dgamma, dbeta. */
static int64_t linear_block_size(const gt_rmsnorm_linear_args *a) { return 4 * a->D; }

/* dx of row m from its dn; dgamma and dbeta are added to. */
static void linear_row_backward(const gt_rmsnorm_linear_args *a, int64_t m, const real *dn,
                                real *xhat, real *dxhat, real *dgamma, real *dbeta) {
    ref_load_row(xhat, a->x, a->dtype, m * a->x_stride, a->D);
    double rstd = norm_slice(xhat, xhat, NULL, a->D, a->norm, a->eps);
    for (int64_t d = 0; d < a->D; d++) {
        dxhat[d] = dn[d] * ref_param(a->gamma, d, 1);
        dgamma[d] += dn[d] * xhat[d];
        dbeta[d] += dn[d];
    }
    if (!a->dx) return;
    norm_gradient g = norm_slice_backward(dxhat, xhat, rstd, a->D, a->norm);
    for (int64_t d = 0; d < a->D; d++)
        ref_store(a->dx, a->dtype, m * a->dx_stride + d, norm_dx(g, dxhat[d], xhat[d]));
}

/* dx, dgamma and dbeta from dy [M,O]. */
static void linear_backward_input(const gt_rmsnorm_linear_args *a, const real *dy, real *dn,
                                  real *weight, real *blocks) {
    int64_t D = a->D, block_size = linear_block_size(a);
    if (!a->dx && !a->dgamma && !a->dbeta) return;
    ref_load_row(weight, a->weight, a->dtype, 0, a->O * D);
    memset(dn, 0, (size_t)(a->M * D) * sizeof(real));
    linear_product(dn, dy, a->O, 1, weight, a->M, a->O, D);
    memset(blocks, 0, (size_t)(NORM_BLOCKS * block_size) * sizeof(real));
    GT_PARALLEL_FOR
    for (int64_t k = 0; k < NORM_BLOCKS; k++) {
        real *xhat = blocks + k * block_size, *dxhat = xhat + D, *dgamma = dxhat + D;
        for (int64_t m = norm_block_start(a->M, k); m < norm_block_start(a->M, k + 1); m++)
            linear_row_backward(a, m, dn + m * D, xhat, dxhat, dgamma, dgamma + D);
    }
    norm_sum_blocks(a->dgamma, blocks + 2 * D, block_size, D, a->accumulate);
    norm_sum_blocks(a->dbeta, blocks + 3 * D, block_size, D, a->accumulate);
}

gt_status GT_REF(rmsnorm_linear_backward)(const gt_rmsnorm_linear_args *args) {
    gt_rmsnorm_linear_args a;
    gt_dims dims;
    gt_status status = gt_prepare(gt_op_rmsnorm_linear(), GT_BACKWARD, GT_HOST, args, &a, &dims);
    if (status != GT_OK) return status;
    real *scratch; /* dy [M,O], n then dn [M,D], dweight then weight [O,D], dbias [O], blocks */
    status = ref_scratch(&scratch, a.M * a.O + a.M * a.D + a.O * a.D + a.O +
                                       NORM_BLOCKS * linear_block_size(&a));
    if (status != GT_OK) return status;
    real *dy = scratch, *rows = dy + a.M * a.O, *matrix = rows + a.M * a.D;
    real *dbias = matrix + a.O * a.D, *blocks = dbias + a.O;
    for (int64_t m = 0; m < a.M; m++)
        ref_load_row(dy + m * a.O, a.dy, a.dtype, m * a.dy_stride, a.O);
    linear_backward_weight(&a, dy, rows, matrix, dbias);
    linear_backward_input(&a, dy, rows, matrix, blocks);
    free(scratch);
    return GT_OK;
}

/* ---- norm_mix -----------------------------------------------------------------------------------
 * y = residual + gain_a . ahat + gain_b . bhat, normalised per slice of D/H.  The gradient of
 * residual is dy; both branches go back alike: dahat = dy . gain_a, dgain_a = sum_m dy . ahat.
 */

static void mix_normalise(const gt_norm_mix_args *a, const void *x, int64_t x_stride, int64_t m,
                          real *xhat) {
    int64_t n = a->D / a->H;
    ref_load_row(xhat, x, a->dtype, m * x_stride, a->D);
    for (int64_t i = 0; i < a->D; i += n)
        norm_slice(xhat + i, xhat + i, NULL, n, GT_NORM_RMS, a->eps);
}

gt_status GT_REF(norm_mix_forward)(const gt_norm_mix_args *args) {
    gt_norm_mix_args a;
    gt_dims dims;
    gt_status status = gt_prepare(gt_op_norm_mix(), GT_FORWARD, GT_HOST, args, &a, &dims);
    if (status != GT_OK) return status;
    real *scratch; /* per block: ahat, bhat */
    status = ref_scratch(&scratch, NORM_BLOCKS * 2 * a.D);
    if (status != GT_OK) return status;
    GT_PARALLEL_FOR
    for (int64_t k = 0; k < NORM_BLOCKS; k++) {
        real *ahat = scratch + k * 2 * a.D, *bhat = ahat + a.D;
        for (int64_t m = norm_block_start(a.M, k); m < norm_block_start(a.M, k + 1); m++) {
            mix_normalise(&a, a.a, a.a_stride, m, ahat);
            mix_normalise(&a, a.b, a.b_stride, m, bhat);
            for (int64_t d = 0; d < a.D; d++) {
                real y = a.residual ? ref_load(a.residual, a.dtype, m * a.residual_stride + d) : 0;
                y += ref_param(a.gain_a, d, 1) * ahat[d] + ref_param(a.gain_b, d, 1) * bhat[d];
                ref_store(a.y, a.dtype, m * a.y_stride + d, y);
            }
        }
    }
    free(scratch);
    return GT_OK;
}

typedef struct mix_branch {
    const void *x;
    const float *gain;
    void *dx;
    float *dgain;
    int64_t x_stride, dx_stride;
} mix_branch;

/* Row m of one branch; dgain is added to. */
static void mix_row_backward(const gt_norm_mix_args *a, const mix_branch *branch, int64_t m,
                             real *xhat, real *dxhat, real *dgain) {
    int64_t n = a->D / a->H;
    ref_load_row(xhat, branch->x, a->dtype, m * branch->x_stride, a->D);
    for (int64_t first = 0; first < a->D; first += n) {
        double rstd = norm_slice(xhat + first, xhat + first, NULL, n, GT_NORM_RMS, a->eps);
        for (int64_t d = first; d < first + n; d++) {
            real dy = ref_load(a->dy, a->dtype, m * a->dy_stride + d);
            dxhat[d] = dy * ref_param(branch->gain, d, 1);
            dgain[d] += dy * xhat[d];
        }
        if (!branch->dx) continue;
        norm_gradient g = norm_slice_backward(dxhat + first, xhat + first, rstd, n, GT_NORM_RMS);
        for (int64_t d = first; d < first + n; d++)
            ref_store(branch->dx, a->dtype, m * branch->dx_stride + d,
                      norm_dx(g, dxhat[d], xhat[d]));
    }
}

/* Scratch of one block of rows: two rows, and the sums dgain. */
static int64_t mix_block_size(const gt_norm_mix_args *a) { return 3 * a->D; }

static void mix_branch_backward(const gt_norm_mix_args *a, const mix_branch *branch, real *blocks) {
    int64_t block_size = mix_block_size(a);
    if (!branch->dx && !branch->dgain) return;
    memset(blocks, 0, (size_t)(NORM_BLOCKS * block_size) * sizeof(real));
    GT_PARALLEL_FOR
    for (int64_t k = 0; k < NORM_BLOCKS; k++) {
        real *xhat = blocks + k * block_size, *dxhat = xhat + a->D, *dgain = dxhat + a->D;
        for (int64_t m = norm_block_start(a->M, k); m < norm_block_start(a->M, k + 1); m++)
            mix_row_backward(a, branch, m, xhat, dxhat, dgain);
    }
    norm_sum_blocks(branch->dgain, blocks + 2 * a->D, block_size, a->D, a->accumulate);
}

gt_status GT_REF(norm_mix_backward)(const gt_norm_mix_args *args) {
    gt_norm_mix_args a;
    gt_dims dims;
    gt_status status = gt_prepare(gt_op_norm_mix(), GT_BACKWARD, GT_HOST, args, &a, &dims);
    if (status != GT_OK) return status;
    real *scratch;
    status = ref_scratch(&scratch, NORM_BLOCKS * mix_block_size(&a));
    if (status != GT_OK) return status;
    mix_branch_backward(
        &a, &(mix_branch){a.a, a.gain_a, a.da, a.dgain_a, a.a_stride, a.da_stride}, scratch);
    mix_branch_backward(
        &a, &(mix_branch){a.b, a.gain_b, a.db, a.dgain_b, a.b_stride, a.db_stride}, scratch);
    free(scratch);
    return GT_OK;
}

/* ---- norm_gate ----------------------------------------------------------------------------------
 * With s = silu(z), or 1 without z, per slice of D/H:
 *     norm first:  xhat of x       y = (xhat . gamma + beta) . s
 *     gate first:  xhat of x . s   y = xhat . gamma + beta
 * Backward, dn = dL/d(xhat . gamma + beta), which is dy . s or dy, and dv = the norm's dx:
 *     dgamma = sum_m dn . xhat     dbeta = sum_m dn
 *     norm first:  dx = dv         dz = dy . (xhat . gamma + beta) . silu'(z)
 *     gate first:  dx = dv . s     dz = dv . x . silu'(z)
 */

/* One row as numbers. */
typedef struct gate_row {
    real *x, *z, *s, *xhat, *dy, *dxhat;
} gate_row;

enum { GATE_ROWS = 6 }; /* of D in a gate_row */

static gate_row gate_row_in(const gt_norm_gate_args *a, real *scratch) {
    int64_t D = a->D;
    gate_row row = {scratch,         scratch + D,     scratch + 2 * D,
                    scratch + 3 * D, scratch + 4 * D, scratch + 5 * D};
    return row;
}

static void gate_load(const gt_norm_gate_args *a, int64_t m, gate_row *row) {
    ref_load_row(row->x, a->x, a->dtype, m * a->x_stride, a->D);
    if (a->z) ref_load_row(row->z, a->z, a->dtype, m * a->z_stride, a->D);
    for (int64_t d = 0; d < a->D; d++) row->s[d] = a->z ? ref_silu(row->z[d]) : 1;
}

/* xhat of the slice that starts at `first`; returns rstd. */
static double gate_normalise(const gt_norm_gate_args *a, int64_t first, gate_row *row) {
    return norm_slice(row->xhat + first, row->x + first, a->gate_first ? row->s + first : NULL,
                      a->D / a->H, a->norm, a->eps);
}

/* xhat . gamma + beta */
static real gate_affine(const gt_norm_gate_args *a, const gate_row *row, int64_t d) {
    return row->xhat[d] * ref_param(a->gamma, d, 1) + ref_param(a->beta, d, 0);
}

gt_status GT_REF(norm_gate_forward)(const gt_norm_gate_args *args) {
    gt_norm_gate_args a;
    gt_dims dims;
    gt_status status = gt_prepare(gt_op_norm_gate(), GT_FORWARD, GT_HOST, args, &a, &dims);
    if (status != GT_OK) return status;
    real *scratch;
    status = ref_scratch(&scratch, NORM_BLOCKS * GATE_ROWS * a.D);
    if (status != GT_OK) return status;
    GT_PARALLEL_FOR
    for (int64_t k = 0; k < NORM_BLOCKS; k++) {
        gate_row row = gate_row_in(&a, scratch + k * GATE_ROWS * a.D);
        for (int64_t m = norm_block_start(a.M, k); m < norm_block_start(a.M, k + 1); m++) {
            gate_load(&a, m, &row);
            for (int64_t first = 0; first < a.D; first += a.D / a.H)
                gate_normalise(&a, first, &row);
            for (int64_t d = 0; d < a.D; d++)
                ref_store(a.y, a.dtype, m * a.y_stride + d,
                          gate_affine(&a, &row, d) * (a.gate_first ? 1 : row.s[d]));
        }
    }
    free(scratch);
    return GT_OK;
}

/* dx and dz of element d of row m. */
static void gate_store_gradients(const gt_norm_gate_args *a, int64_t m, int64_t d,
                                 const gate_row *row, norm_gradient g) {
    double dv = norm_dx(g, row->dxhat[d], row->xhat[d]);
    if (a->dx)
        ref_store(a->dx, a->dtype, m * a->dx_stride + d, a->gate_first ? dv * row->s[d] : dv);
    if (a->dz) {
        double ds = a->gate_first ? dv * row->x[d] : row->dy[d] * gate_affine(a, row, d);
        ref_store(a->dz, a->dtype, m * a->dz_stride + d, ds * ref_dsilu(row->z[d]));
    }
}

/* Row m; dgamma and dbeta are added to. */
static void gate_row_backward(const gt_norm_gate_args *a, int64_t m, gate_row *row, real *dgamma,
                              real *dbeta) {
    int64_t n = a->D / a->H;
    gate_load(a, m, row);
    ref_load_row(row->dy, a->dy, a->dtype, m * a->dy_stride, a->D);
    for (int64_t first = 0; first < a->D; first += n) {
        double rstd = gate_normalise(a, first, row);
        for (int64_t d = first; d < first + n; d++) {
            real dn = row->dy[d] * (a->gate_first ? 1 : row->s[d]);
            row->dxhat[d] = dn * ref_param(a->gamma, d, 1);
            dgamma[d] += dn * row->xhat[d];
            dbeta[d] += dn;
        }
        norm_gradient g =
            norm_slice_backward(row->dxhat + first, row->xhat + first, rstd, n, a->norm);
        for (int64_t d = first; d < first + n; d++) gate_store_gradients(a, m, d, row, g);
    }
}

gt_status GT_REF(norm_gate_backward)(const gt_norm_gate_args *args) {
    gt_norm_gate_args a;
    gt_dims dims;
    gt_status status = gt_prepare(gt_op_norm_gate(), GT_BACKWARD, GT_HOST, args, &a, &dims);
    if (status != GT_OK) return status;
    int64_t sums = GATE_ROWS * a.D, block_size = sums + 2 * a.D; /* dgamma, dbeta after the row */
    real *scratch;
    status = ref_scratch(&scratch, NORM_BLOCKS * block_size);
    if (status != GT_OK) return status;
    memset(scratch, 0, (size_t)(NORM_BLOCKS * block_size) * sizeof(real));
    GT_PARALLEL_FOR
    for (int64_t k = 0; k < NORM_BLOCKS; k++) {
        real *block = scratch + k * block_size, *dgamma = block + sums;
        gate_row row = gate_row_in(&a, block);
        for (int64_t m = norm_block_start(a.M, k); m < norm_block_start(a.M, k + 1); m++)
            gate_row_backward(&a, m, &row, dgamma, dgamma + a.D);
    }
    norm_sum_blocks(a.dgamma, scratch + sums, block_size, a.D, a.accumulate);
    norm_sum_blocks(a.dbeta, scratch + sums + a.D, block_size, a.D, a.accumulate);
    free(scratch);
    return GT_OK;
}
