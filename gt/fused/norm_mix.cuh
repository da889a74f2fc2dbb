/* gt/fused/norm_mix.cuh - norm_mix forward and backward.  For every slice of a row
 *     y = residual + gain_a xhat_a + gain_b xhat_b     xhat_a = a rstd_a     rstd_a = 1 / sqrt(mean(a^2) + eps)
 *     da = rstd_a (d - xhat_a mean(d xhat_a))          d = dy gain_a         dgain_a = sum over rows of dy xhat_a
 * and likewise for b.  norm.cuh describes blocks, lanes, rounds, register bounds and the fixed order of sums. */
#ifndef GT_FUSED_NORM_MIX_CUH
#define GT_FUSED_NORM_MIX_CUH

#include "norm.cuh"

namespace gt {
namespace norm {

/* A thread's elements of a row: a, b, and a third tensor, which is residual in forward and dy in backward. */
template <class K>
struct MixRow {
    Raw<K> a, b, third;

    /* data, stride: the third tensor, which is not loaded if data is NULL. */
    template <class Params>
    GT_METHOD void load(const Params& p, const Coordinates& me, const void* data, int64_t stride, int64_t m,
                        int64_t round) {
        a.load(p.shape, me, p.a, p.a_stride, m, round);
        b.load(p.shape, me, p.b, p.b_stride, m, round);
        if (data) third.load(p.shape, me, data, stride, m, round);
    }
};

/* ---- norm_mix forward ---------------------------------------------------------------------------
 * grid: tiles * groups.
 * registers: both gains, and the loaded elements of a, b and residual of one row (16-bit vectors: of two rows).
 * shared memory: 768 bytes if a slice has more than 32 lanes.
 * bytes: a, b, residual and y once (wide slices: a and b twice).
 * y may be residual: a thread reads its elements of a row before it writes them. */
struct MixForwardParams {
    Shape shape;
    const void *a, *b, *residual;
    void* y;
    int64_t a_stride, b_stride, residual_stride, y_stride;
    const float *gain_a, *gain_b;
    float eps;
};

template <class K>
GT_KERNEL(K::THREADS, K::FORWARD_BLOCKS)
mix_forward_kernel(const GT_GRID_CONSTANT MixForwardParams p) {
    using Real = typename K::Real;
    const Shape& s = p.shape;
    const int64_t rounds = K::WIDE ? s.rounds : 1;
    const Real inverse = inverse_of<Real>(s);
    Coordinates me = coordinates_of(s);
    const int64_t step = s.groups * s.rows;
    MixRow<K> next = {};
    if (K::AHEAD) next.load(p, me, p.residual, p.residual_stride, row_of(s, me, me.first_row), 0);
    float gain_a[K::E], gain_b[K::E];
    if (!K::WIDE) {
        load_parameter<K>(s, me, p.gain_a, 1.0f, 0, gain_a);
        load_parameter<K>(s, me, p.gain_b, 1.0f, 0, gain_b);
    }
    for (int64_t first = me.first_row; first < s.M; first += step) {
        const bool active = me.exists && first + me.row < s.M;
        const int64_t m = row_of(s, me, first);
        MixRow<K> row = next;
        if (!K::WIDE && !K::AHEAD) row.load(p, me, p.residual, p.residual_stride, m, 0);
        if (K::AHEAD && first + step < s.M)
            next.load(p, me, p.residual, p.residual_stride, row_of(s, me, first + step), 0);
        Real sums[4] = {};
        for (int64_t round = 0; round < rounds; round++) {
            if (K::WIDE) row.load(p, me, nullptr, 0, m, round);
            GT_UNROLL
            for (int e = 0; e < K::E; e++) {
                add_square<Real>(&sums[0], row.a.get(e));
                add_square<Real>(&sums[2], row.b.get(e));
            }
        }
        slice_sum<K>(s, me, sums);
        const Real rstd_a = rstd_of(&sums[0], inverse, 0, p.eps);
        const Real rstd_b = rstd_of(&sums[2], inverse, 0, p.eps);
        for (int64_t round = 0; round < rounds && active; round++) {
            if (K::WIDE) {
                row.load(p, me, p.residual, p.residual_stride, m, round);
                load_parameter<K>(s, me, p.gain_a, 1.0f, round, gain_a);
                load_parameter<K>(s, me, p.gain_b, 1.0f, round, gain_b);
            }
            Real y[K::E];
            GT_UNROLL
            for (int e = 0; e < K::E; e++)
                y[e] = (Real)row.a.get(e) * rstd_a * gain_a[e] + (Real)row.b.get(e) * rstd_b * gain_b[e] +
                       row.third.get(e);
            store_elements<K>(s, me, p.y, p.y_stride, m, round, y);
        }
    }
}

/* ---- norm_mix backward --------------------------------------------------------------------------
 * grid: tiles * groups, with fewer groups than forward, since each group stores a row of partial sums.
 * registers: gains, their gradients, and the loaded elements of a, b and dy of one row (16-bit vectors: of two
 * rows).
 * shared memory: 16 or 32 floats a thread, to add the rows of a block; 32 KB at most.
 * bytes: a, b, dy, da and db once (wide slices: a, b and dy twice).  Each group stores 8 D bytes of partial sums (wide
 * slices: reads and writes them with every row). */
struct MixBackwardParams {
    Shape shape;
    const void *a, *b, *dy;
    void *da, *db;
    int64_t a_stride, b_stride, dy_stride, da_stride, db_stride;
    const float *gain_a, *gain_b;
    float *dgain_a, *dgain_b; /* partial sums [groups, D]; NULL: not computed */
    float eps;
};

/* Adds one element to the three sums of a branch: the two sums of add_square(x), and the sum of PRODUCT_SCALE d x. */
template <class Real>
GT_DEV void add_branch(Real* sums, Real x, Real d) {
    add_square<Real>(sums, x);
    sums[2] += d * (x * (Real)PRODUCT_SCALE);
}

/* Processes one round of one branch, where x is a or b: stores dx and adds to dgain.  sums: the sums of add_branch over
 * the slice. */
template <class K>
GT_DEV void mix_branch(const Shape& s, const Coordinates& me, const Raw<K>& x, const Raw<K>& dy,
                       const typename K::Real* sums, typename K::Real inverse, float eps, const float (&gain)[K::E],
                       void* dx, int64_t dx_stride, int64_t m, int64_t round, float (&dgain)[K::E]) {
    using Real = typename K::Real;
    const Real rstd = rstd_of(sums, inverse, 0, eps);
    const Real slope = sums[2] * inverse * (rstd * (Real)(1.0f / PRODUCT_SCALE));
    Real out[K::E];
    GT_UNROLL
    for (int e = 0; e < K::E; e++) {
        const Real xhat = (Real)x.get(e) * rstd, d = dy.get(e);
        dgain[e] += (float)(d * xhat);
        out[e] = rstd * (d * gain[e] - xhat * slope);
    }
    if (dx) store_elements<K>(s, me, dx, dx_stride, m, round, out);
}

template <class K>
GT_KERNEL(K::THREADS, K::BACKWARD_BLOCKS)
mix_backward_kernel(const GT_GRID_CONSTANT MixBackwardParams p) {
    wait_for_chain(); /* first kernel of the chain: does not wait, but lets the next kernel's blocks start early */
    using Real = typename K::Real;
    const Shape& s = p.shape;
    const int64_t rounds = K::WIDE ? s.rounds : 1;
    const Real inverse = inverse_of<Real>(s);
    Coordinates me = coordinates_of(s);
    const int64_t step = s.groups * s.rows;
    MixRow<K> next = {};
    if (K::AHEAD) next.load(p, me, p.dy, p.dy_stride, row_of(s, me, me.first_row), 0);
    float gain_a[K::E], gain_b[K::E], dgain_a[K::E] = {}, dgain_b[K::E] = {};
    if (!K::WIDE) {
        load_parameter<K>(s, me, p.gain_a, 1.0f, 0, gain_a);
        load_parameter<K>(s, me, p.gain_b, 1.0f, 0, gain_b);
    }
    for (int64_t first = me.first_row; first < s.M; first += step) {
        const bool active = me.exists && first + me.row < s.M;
        const int64_t m = row_of(s, me, first);
        MixRow<K> row = next;
        const Raw<K>& dy = row.third;
        if (!K::WIDE && !K::AHEAD) row.load(p, me, p.dy, p.dy_stride, m, 0);
        if (K::AHEAD && first + step < s.M) next.load(p, me, p.dy, p.dy_stride, row_of(s, me, first + step), 0);
        Real sums[6] = {};
        for (int64_t round = 0; round < rounds; round++) {
            if (K::WIDE) {
                row.load(p, me, p.dy, p.dy_stride, m, round);
                load_parameter<K>(s, me, p.gain_a, 1.0f, round, gain_a);
                load_parameter<K>(s, me, p.gain_b, 1.0f, round, gain_b);
            }
            GT_UNROLL
            for (int e = 0; e < K::E; e++) {
                add_branch<Real>(&sums[0], row.a.get(e), (Real)dy.get(e) * gain_a[e]);
                add_branch<Real>(&sums[3], row.b.get(e), (Real)dy.get(e) * gain_b[e]);
            }
        }
        slice_sum<K>(s, me, sums);
        for (int64_t round = 0; round < rounds && active; round++) {
            if (K::WIDE) {
                row.load(p, me, p.dy, p.dy_stride, m, round);
                load_parameter<K>(s, me, p.gain_a, 1.0f, round, gain_a);
                load_parameter<K>(s, me, p.gain_b, 1.0f, round, gain_b);
                GT_UNROLL
                for (int e = 0; e < K::E; e++) dgain_a[e] = dgain_b[e] = 0.0f;
            }
            mix_branch<K>(s, me, row.a, dy, &sums[0], inverse, p.eps, gain_a, p.da, p.da_stride, m, round, dgain_a);
            mix_branch<K>(s, me, row.b, dy, &sums[3], inverse, p.eps, gain_b, p.db, p.db_stride, m, round, dgain_b);
            if (K::WIDE) {
                const bool is_first = first == me.first_row;
                add_to_partial<K>(s, me, p.dgain_a, round, is_first, dgain_a);
                add_to_partial<K>(s, me, p.dgain_b, round, is_first, dgain_b);
            }
        }
    }
    store_partials<K>(s, me, p.dgain_a, dgain_a, p.dgain_b, dgain_b);
}

} /* namespace norm */
} /* namespace gt */

#endif
