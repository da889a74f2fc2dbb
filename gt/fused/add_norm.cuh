/* gt/fused/add_norm.cuh - add_norm forward and backward: v = x + residual, xhat = (v - mean) rstd, y = xhat gamma +
 * beta.
 *
 * A block takes a row.  If a row has at most 8192 elements in whole, aligned groups of 8, a thread keeps 1 or 2 groups
 * of v in registers.  More groups do not fit: 4 groups spilled 1 KB a thread in backward.  Other rows are read again
 * for every sum (any_..._kernel).
 * The dtypes are known only at run time.  A thread loads raw bits, and converts them when all its loads are in flight.
 * All threads take the same branches on dtypes.  Memory bounds the kernels, so the branches cost little.  They save a
 * separate kernel for each pair of dtypes.
 * bytes per element, if all tensors have 16 bits: forward 8 (x, residual, sum, y), backward 8 (sum, dy, dsum, dx).
 * registers: forward 8 GROUPS values of v, and the loaded words.  Backward 8 GROUPS values each of v, dgamma and dbeta,
 * and the loaded words.
 * If a thread has one group, a block loads its next row before it sums the current row.  Backward then also keeps gamma
 * in registers.
 * LEAN kernels serve the usual case: RMSNorm of 16-bit tensors without beta, one group a thread, and in backward the
 * stored sum.  They compute fewer sums of a row.  Backward has no dbeta and loads gamma again, so it needs half the
 * registers, and twice as many warps hide the time of a sum.
 * Sums over a row: a thread's elements in order, then slice_sum.  Sums over rows: a block's rows in order, then blocks
 * by reduce_rows.  All orders are fixed, so results are deterministic. */
#ifndef GT_FUSED_ADD_NORM_CUH
#define GT_FUSED_ADD_NORM_CUH

#include "norm.cuh"

namespace gt {
namespace add_norm {

using norm::Coordinates;
using norm::Shape;
using norm::slice_sum;

constexpr int EIGHT = 8;                              /* elements of a group */
constexpr int64_t MOST = 2 * norm::MAX_LANES * EIGHT; /* registers hold rows of at most this many elements */
using Rows = norm::Kind<norm::Any, 1, float>;         /* any row, sums in fp32 */
using TinyRows = norm::Kind<norm::Any, 1, double>;    /* a tiny row: one thread sums in double */

struct Params {
    int64_t M, D;
    gt_dtype dtype, sum_dtype;
    bool is_layer;
    float eps, inverse;       /* 1 / D */
    const void *x, *residual; /* x is NULL if backward reads sum; residual may be NULL */
    const void* sum_in;
    int64_t x_stride, residual_stride, sum_stride;
    const float *gamma, *beta;
    /* forward */
    void *sum, *y;
    int64_t y_stride;
    /* backward */
    const void *dy, *dsum;
    void *dx, *dresidual;
    int64_t dy_stride, dsum_stride, dx_stride, dresidual_stride;
    float *dgamma, *dbeta; /* partial sums [blocks,D]; NULL: not computed */
};

/* Eight adjacent elements as they are in memory.  LEAN: the elements have 16 bits. */
template <bool LEAN>
struct Raw {
    uint4 words[LEAN ? 1 : 2]; /* the second is used only for fp32 */

    GT_METHOD void load(const void* data, gt_dtype dtype, int64_t at, bool exists) {
        GT_UNROLL
        for (int i = 0; i < (LEAN ? 1 : 2); i++) words[i] = {0, 0, 0, 0};
        if (!data || !exists) return;
        if (!LEAN && dtype == GT_F32) {
            const float* from = static_cast<const float*>(data) + at;
            GT_UNROLL
            for (int i = 0; i < (LEAN ? 1 : 2); i++) words[i] = ldg<uint4>(from + 4 * i);
        } else {
            words[0] = ldg<uint4>(static_cast<const uint16_t*>(data) + at);
        }
    }

    GT_METHOD void get(gt_dtype dtype, float (&x)[EIGHT]) const {
        const uint4 first = words[0], second = words[LEAN ? 0 : 1];
        const uint32_t all[EIGHT] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
        GT_UNROLL
        for (int i = 0; i < EIGHT; i++) {
            const uint32_t pair = all[i / 2];
            if (!LEAN && dtype == GT_F32)
                x[i] = as_float(all[i]);
            else if (dtype == GT_BF16)
                x[i] = i % 2 ? unpack_bf16_hi(pair) : unpack_bf16_lo(pair);
            else
                x[i] = i % 2 ? unpack_f16_hi(pair) : unpack_f16_lo(pair);
        }
    }
};

template <bool LEAN>
GT_DEV void store_eight(void* data, gt_dtype dtype, int64_t at, const float (&x)[EIGHT]) {
    if (!data) return;
    if (!LEAN && dtype == GT_F32) {
        float* to = static_cast<float*>(data) + at;
        stg<float4>(to, float4{x[0], x[1], x[2], x[3]});
        stg<float4>(to + 4, float4{x[4], x[5], x[6], x[7]});
        return;
    }
    uint16_t* to = static_cast<uint16_t*>(data) + at;
    if (dtype == GT_BF16)
        stg<uint4>(to,
                   uint4{pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7])});
    else
        stg<uint4>(to, uint4{pack_f16(x[0], x[1]), pack_f16(x[2], x[3]), pack_f16(x[4], x[5]), pack_f16(x[6], x[7])});
}

/* The block as slice_sum sees it: all threads are lanes of one slice. */
struct Block {
    Shape shape = {};
    Coordinates me = {};
    GT_METHOD Block() { shape.lanes = (int)block_threads(), me.buffer = smem_base(); }
    template <class K, int N, class Real>
    GT_METHOD void sum(Real (&sums)[N]) {
        slice_sum<K>(shape, me, sums);
    }
};

/* ---- rows in registers -------------------------------------------------------------------------------------- */

/* Returns the index in the row of the first element of a thread's group k. */
GT_DEV int group_at(int k) { return EIGHT * (k * (int)block_threads() + thread_id()); }

/* The loaded values that make up v of a row: x and residual, or sum alone.  FROM_SUM: always sum. */
template <int GROUPS, bool LEAN, bool FROM_SUM>
struct RawRow {
    Raw<LEAN> x[GROUPS], residual[FROM_SUM ? 1 : GROUPS];

    GT_METHOD void load(const Params& p, int64_t m) {
        GT_UNROLL
        for (int k = 0; k < GROUPS; k++) {
            const int at = group_at(k);
            if (FROM_SUM || p.sum_in) {
                x[k].load(p.sum_in, p.sum_dtype, m * p.sum_stride + at, at < p.D);
            } else {
                x[k].load(p.x, p.dtype, m * p.x_stride + at, at < p.D);
                residual[FROM_SUM ? 0 : k].load(p.residual, p.sum_dtype, m * p.residual_stride + at, at < p.D);
            }
        }
    }
    GT_METHOD void get(const Params& p, int k, float (&v)[EIGHT]) const {
        x[k].get(FROM_SUM || p.sum_in ? p.sum_dtype : p.dtype, v);
        if (FROM_SUM || p.sum_in || !p.residual) return;
        float added[EIGHT];
        residual[FROM_SUM ? 0 : k].get(p.sum_dtype, added);
        GT_UNROLL
        for (int i = 0; i < EIGHT; i++) v[i] += added[i];
    }
};

/* LayerNorm: replaces v by v - mean(v) inside the row.  Elements outside of the row stay 0. */
template <int GROUPS, bool LEAN>
GT_DEV void center(const Params& p, Block& block, float (&v)[GROUPS][EIGHT]) {
    if (LEAN || !p.is_layer) return;
    float sums[1] = {};
    GT_UNROLL
    for (int k = 0; k < GROUPS; k++) GT_UNROLL
    for (int i = 0; i < EIGHT; i++) sums[0] += v[k][i] * p.inverse;
    block.sum<Rows>(sums);
    GT_UNROLL
    for (int k = 0; k < GROUPS; k++) GT_UNROLL
    for (int i = 0; i < EIGHT; i++) v[k][i] = group_at(k) < p.D ? v[k][i] - sums[0] : 0.0f;
}

GT_DEV void load_parameter(const Params& p, const float* data, float missing, int k, float (&x)[EIGHT]) {
    Raw<false> raw;
    raw.load(data, GT_F32, group_at(k), group_at(k) < p.D);
    raw.get(GT_F32, x);
    GT_UNROLL
    for (int i = 0; i < EIGHT; i++)
        if (!data) x[i] = missing;
}

/* Returns 1 / sqrt(mean(v^2) + eps) of RMSNorm, from the sum of v^2.  Only a sum near overflow needs the second sum of
 * norm::rstd_of. */
template <int GROUPS>
GT_DEV float lean_rstd(const Params& p, Block& block, const float (&v)[GROUPS][EIGHT], float square) {
    float squares[2] = {square, 0.0f};
    if (!(square < 0x1p126f)) { /* all threads branch alike, so the block may sum again */
        float sums[2] = {};
        GT_UNROLL
        for (int k = 0; k < GROUPS; k++) GT_UNROLL
        for (int i = 0; i < EIGHT; i++) norm::add_square(sums, v[k][i]);
        block.sum<Rows>(sums);
        squares[1] = sums[1];
    }
    return norm::rstd_of(squares, p.inverse, 0.0f, p.eps);
}

/* If a thread has one group, a block loads its next row while it sums the current row.  Two groups leave no registers
 * for that.  LEAN: RMSNorm without beta; x, residual, sum and y have 16 bits. */
template <int GROUPS, bool LEAN>
GT_KERNEL(norm::MAX_LANES, 2)
forward_kernel(const GT_GRID_CONSTANT Params p) {
    constexpr bool AHEAD = GROUPS == 1;
    Block block;
    RawRow<GROUPS, LEAN, false> next;
    if (AHEAD && block_x() < p.M) next.load(p, block_x());
    for (int64_t m = block_x(); m < p.M; m += grid_x()) {
        RawRow<GROUPS, LEAN, false> raw;
        if (AHEAD) {
            raw = next;
            if (m + grid_x() < p.M) next.load(p, m + grid_x());
        } else {
            raw.load(p, m);
        }
        float v[GROUPS][EIGHT];
        GT_UNROLL
        for (int k = 0; k < GROUPS; k++) {
            raw.get(p, k, v[k]);
            if (group_at(k) < p.D) store_eight<LEAN>(p.sum, p.sum_dtype, m * p.sum_stride + group_at(k), v[k]);
        }
        center<GROUPS, LEAN>(p, block, v);
        float shift = 0.0f, rstd;
        if constexpr (LEAN) {
            float sums[1] = {};
            GT_UNROLL
            for (int k = 0; k < GROUPS; k++) GT_UNROLL
            for (int i = 0; i < EIGHT; i++) sums[0] += v[k][i] * v[k][i];
            block.sum<Rows>(sums);
            rstd = lean_rstd(p, block, v, sums[0]);
        } else {
            float sums[3] = {}; /* two sums of add_square(v - mean), then the mean of v - mean */
            GT_UNROLL
            for (int k = 0; k < GROUPS; k++) GT_UNROLL
            for (int i = 0; i < EIGHT; i++) {
                norm::add_square(sums, v[k][i]);
                if (p.is_layer) sums[2] += v[k][i] * p.inverse;
            }
            block.sum<Rows>(sums);
            shift = sums[2], rstd = norm::rstd_of(sums, p.inverse, shift, p.eps);
        }
        GT_UNROLL
        for (int k = 0; k < GROUPS; k++) {
            float gamma[EIGHT], beta[EIGHT];
            load_parameter(p, p.gamma, 1.0f, k, gamma);
            load_parameter(p, LEAN ? nullptr : p.beta, 0.0f, k, beta);
            GT_UNROLL
            for (int i = 0; i < EIGHT; i++) v[k][i] = (v[k][i] - shift) * rstd * gamma[i] + beta[i];
            if (group_at(k) < p.D) store_eight<LEAN>(p.y, p.dtype, m * p.y_stride + group_at(k), v[k]);
        }
    }
}

/* The loaded values of a row in backward. */
template <int GROUPS, bool LEAN>
struct RawGradients {
    RawRow<GROUPS, LEAN, LEAN> v;
    Raw<LEAN> dy[GROUPS], dsum[GROUPS];

    GT_METHOD void load(const Params& p, int64_t m) {
        v.load(p, m);
        GT_UNROLL
        for (int k = 0; k < GROUPS; k++) {
            const int at = group_at(k);
            dy[k].load(p.dy, p.dtype, m * p.dy_stride + at, at < p.D);
            if (!LEAN) load_dsum(p, m, k);
        }
    }
    GT_METHOD void load_dsum(const Params& p, int64_t m, int k) {
        dsum[k].load(p.dsum, p.sum_dtype, m * p.dsum_stride + group_at(k), group_at(k) < p.D);
    }
};

/* Values that follow from the sums over a row.  shift: the mean of v - mean, not exactly 0 because of rounding.  slope:
 * mean(d xhat), where d = dy gamma.  mean_d: mean(d), or 0 for RMSNorm. */
template <class Real>
struct RowSlope {
    Real shift, rstd, slope, mean_d;

    GT_METHOD RowSlope(Real rstd_, Real product, Real inverse) : shift(0), rstd(rstd_), mean_d(0) {
        slope = product * inverse * (rstd * (Real)(1.0f / norm::PRODUCT_SCALE));
    }
    /* sums, in order: two sums of add_square(v - mean), the sum of PRODUCT_SCALE d (v - mean), the mean of v - mean,
     * and the sum of d. */
    GT_METHOD RowSlope(const Params& p, const Real (&sums)[5], Real inverse) {
        shift = sums[3];
        const Real product = sums[2] - shift * (Real)norm::PRODUCT_SCALE * sums[4];
        mean_d = p.is_layer ? sums[4] * inverse : 0;
        rstd = norm::rstd_of(sums, inverse, shift, p.eps);
        slope = product * inverse * (rstd * (Real)(1.0f / norm::PRODUCT_SCALE));
    }
};

template <class Real>
GT_DEV void add_terms(const Params& p, Real inverse, Real v, Real d, Real (&sums)[5]) {
    norm::add_square(sums, v);
    sums[2] += d * (v * (Real)norm::PRODUCT_SCALE);
    if (p.is_layer) sums[3] += v * inverse;
    sums[4] += d;
}

/* LEAN: RMSNorm of tensors of 16 bits, from the stored sum, without dbeta.  A lean kernel needs so few registers that
 * two blocks of 512 threads run at once on a multiprocessor. */
template <int GROUPS, bool LEAN>
GT_KERNEL(norm::MAX_LANES, LEAN ? 2 : 1)
backward_kernel(const GT_GRID_CONSTANT Params p) {
    wait_for_chain(); /* first kernel of the chain: does not wait, but lets the next kernel's blocks start early */
    constexpr bool AHEAD = GROUPS == 1, KEEPS_GAMMA = AHEAD && !LEAN;
    Block block;
    float kept[EIGHT], dgamma[GROUPS][EIGHT] = {}, dbeta[GROUPS][EIGHT] = {};
    if (KEEPS_GAMMA) load_parameter(p, p.gamma, 1.0f, 0, kept);
    /* Where registers are scarce, gamma is loaded again for each use. */
    const auto load_gamma = [&](int k, float(&gamma)[EIGHT]) {
        if constexpr (KEEPS_GAMMA) {
            GT_UNROLL
            for (int i = 0; i < EIGHT; i++) gamma[i] = kept[i];
        } else {
            load_parameter(p, p.gamma, 1.0f, k, gamma);
        }
    };
    RawGradients<GROUPS, LEAN> next;
    if (AHEAD && block_x() < p.M) next.load(p, block_x());
    for (int64_t m = block_x(); m < p.M; m += grid_x()) {
        RawGradients<GROUPS, LEAN> raw;
        if (AHEAD) {
            raw = next;
            if (LEAN) raw.load_dsum(p, m, 0); /* dsum is needed last; no registers are left to load it earlier */
            if (m + grid_x() < p.M) next.load(p, m + grid_x());
        } else {
            raw.load(p, m);
        }
        float v[GROUPS][EIGHT];
        GT_UNROLL
        for (int k = 0; k < GROUPS; k++) raw.v.get(p, k, v[k]);
        center<GROUPS, LEAN>(p, block, v);
        const auto sum_terms = [&](auto& sums) {
            GT_UNROLL
            for (int k = 0; k < GROUPS; k++) {
                float dy[EIGHT], gamma[EIGHT];
                raw.dy[k].get(p.dtype, dy);
                load_gamma(k, gamma);
                GT_UNROLL
                for (int i = 0; i < EIGHT; i++) {
                    if constexpr (LEAN) {
                        sums[0] += v[k][i] * v[k][i];
                        sums[1] += dy[i] * gamma[i] * (v[k][i] * norm::PRODUCT_SCALE);
                    } else {
                        add_terms(p, p.inverse, v[k][i], dy[i] * gamma[i], sums);
                    }
                }
            }
            block.sum<Rows>(sums);
        };
        float sums[LEAN ? 2 : 5] = {};
        sum_terms(sums);
        const RowSlope<float> row = [&] {
            if constexpr (LEAN)
                return RowSlope<float>(lean_rstd(p, block, v, sums[0]), sums[1], p.inverse);
            else
                return RowSlope<float>(p, sums, p.inverse);
        }();
        GT_UNROLL
        for (int k = 0; k < GROUPS; k++) {
            float dy[EIGHT], gamma[EIGHT], out[EIGHT];
            raw.dy[k].get(p.dtype, dy);
            raw.dsum[k].get(p.sum_dtype, out);
            load_gamma(k, gamma);
            GT_UNROLL
            for (int i = 0; i < EIGHT; i++) {
                const float xhat = (v[k][i] - row.shift) * row.rstd;
                dgamma[k][i] += dy[i] * xhat;
                if (!LEAN) dbeta[k][i] += dy[i];
                out[i] += row.rstd * (dy[i] * gamma[i] - row.mean_d - xhat * row.slope);
            }
            if (group_at(k) >= p.D) continue;
            store_eight<LEAN>(p.dx, p.dtype, m * p.dx_stride + group_at(k), out);
            store_eight<LEAN>(p.dresidual, p.sum_dtype, m * p.dresidual_stride + group_at(k), out);
        }
    }
    GT_UNROLL
    for (int k = 0; k < GROUPS; k++) {
        if (group_at(k) >= p.D) continue;
        const int64_t at = block_x() * p.D + group_at(k);
        store_eight<false>(p.dgamma, GT_F32, at, dgamma[k]);
        if (!LEAN) store_eight<false>(p.dbeta, GT_F32, at, dbeta[k]);
    }
}

/* ---- any rows ------------------------------------------------------------------------------------------------ */

/* Returns element e of v in row m. */
GT_DEV float value_at(const Params& p, int64_t m, int64_t e) {
    if (p.sum_in) return load_as(p.sum_in, p.sum_dtype, m * p.sum_stride + e);
    const float x = load_as(p.x, p.dtype, m * p.x_stride + e);
    return p.residual ? x + load_as(p.residual, p.sum_dtype, m * p.residual_stride + e) : x;
}

GT_DEV float parameter_at(const float* data, int64_t e, float missing) { return data ? data[e] : missing; }

/* Number of threads that share a row.  For sums in double one thread has the whole row. */
template <class K>
GT_DEV int row_threads() {
    return std::is_same<K, TinyRows>::value ? 1 : (int)block_threads();
}
template <class K>
GT_DEV int64_t row_end(const Params& p) {
    return std::is_same<K, TinyRows>::value && thread_id() > 0 ? 0 : p.D;
}

template <class K>
GT_DEV typename K::Real mean_of(const Params& p, Block& block, int64_t m) {
    using Real = typename K::Real;
    if (!p.is_layer) return 0;
    Real sums[1] = {};
    for (int64_t e = thread_id(); e < row_end<K>(p); e += row_threads<K>())
        sums[0] += (Real)value_at(p, m, e) / (Real)p.D;
    block.sum<K>(sums);
    return sums[0];
}

template <class K>
GT_KERNEL(norm::BLOCK, 1)
any_forward_kernel(const GT_GRID_CONSTANT Params p) {
    using Real = typename K::Real;
    Block block;
    const Real inverse = (Real)1 / (Real)p.D;
    for (int64_t m = block_x(); m < p.M; m += grid_x()) {
        const Real mean = mean_of<K>(p, block, m);
        Real sums[3] = {};
        for (int64_t e = thread_id(); e < row_end<K>(p); e += row_threads<K>()) {
            const Real v = (Real)value_at(p, m, e) - mean;
            norm::add_square(sums, v);
            if (p.is_layer) sums[2] += v * inverse;
        }
        block.sum<K>(sums);
        const Real shift = sums[2], rstd = norm::rstd_of(sums, inverse, shift, p.eps);
        for (int64_t e = thread_id(); e < row_end<K>(p); e += row_threads<K>()) {
            const float v = value_at(p, m, e);
            const Real xhat = ((Real)v - mean - shift) * rstd;
            const Real y = xhat * parameter_at(p.gamma, e, 1.0f) + parameter_at(p.beta, e, 0.0f);
            store_as(p.sum, p.sum_dtype, m * p.sum_stride + e, v);
            store_as(p.y, p.dtype, m * p.y_stride + e, (float)y);
        }
    }
}

template <class K>
GT_KERNEL(norm::BLOCK, 1)
any_backward_kernel(const GT_GRID_CONSTANT Params p) {
    wait_for_chain();
    using Real = typename K::Real;
    Block block;
    const Real inverse = (Real)1 / (Real)p.D;
    for (int64_t m = block_x(); m < p.M; m += grid_x()) {
        const Real mean = mean_of<K>(p, block, m);
        Real sums[5] = {};
        for (int64_t e = thread_id(); e < row_end<K>(p); e += row_threads<K>()) {
            const Real dy = load_as(p.dy, p.dtype, m * p.dy_stride + e);
            add_terms<Real>(p, inverse, (Real)value_at(p, m, e) - mean, dy * parameter_at(p.gamma, e, 1.0f), sums);
        }
        block.sum<K>(sums);
        const RowSlope<Real> row(p, sums, inverse);
        const bool is_first = m == block_x();
        for (int64_t e = thread_id(); e < row_end<K>(p); e += row_threads<K>()) {
            const Real dy = load_as(p.dy, p.dtype, m * p.dy_stride + e);
            const Real xhat = ((Real)value_at(p, m, e) - mean - row.shift) * row.rstd;
            const Real d = dy * parameter_at(p.gamma, e, 1.0f);
            float out = (float)(row.rstd * (d - row.mean_d - xhat * row.slope));
            if (p.dsum) out += load_as(p.dsum, p.sum_dtype, m * p.dsum_stride + e);
            if (p.dx) store_as(p.dx, p.dtype, m * p.dx_stride + e, out);
            if (p.dresidual) store_as(p.dresidual, p.sum_dtype, m * p.dresidual_stride + e, out);
            const int64_t at = block_x() * p.D + e;
            if (p.dgamma) p.dgamma[at] = (is_first ? 0.0f : p.dgamma[at]) + (float)(dy * xhat);
            if (p.dbeta) p.dbeta[at] = (is_first ? 0.0f : p.dbeta[at]) + (float)dy;
        }
    }
}

} /* namespace add_norm */
} /* namespace gt */

#endif
