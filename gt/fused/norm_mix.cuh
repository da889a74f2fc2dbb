/* gt/fused/norm_mix.cuh - norm_mix forward and backward. */
#ifndef GT_FUSED_NORM_MIX_CUH
#define GT_FUSED_NORM_MIX_CUH

#include "norm.cuh"

namespace gt {
namespace norm {

/* ---- norm_mix forward ---------------------------------------------------------------------------
 * grid tiles * groups, block up to 256, or the lanes of one slice if more: up to 512.  A thread has
 * 8 elements of a and b in registers, with their gains, and goes from row to row of its group.
 * shared: 768 bytes if a slice has more than 32 lanes.
 * bytes: a, b, residual and y once (wide slices: a and b twice).
 * Sums over a slice: registers, butterfly, warps in order: deterministic.
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
    const int64_t chunks = K::WIDE ? s.chunks : 1;
    const Real inverse = inverse_of<Real>(s);
    Place me = place_of(s);
    float gain_a[K::E], gain_b[K::E];
    if (!K::WIDE) {
        load_parameter<K>(s, me, p.gain_a, 1.0f, 0, gain_a);
        load_parameter<K>(s, me, p.gain_b, 1.0f, 0, gain_b);
    }
    for (int64_t first = me.first_row; first < s.M; first += s.groups * s.rows) {
        const bool active = me.exists && first + me.row < s.M;
        const int64_t m = active ? first + me.row : 0;
        Raw<K> a, b, residual = {};
        Real sums[4] = {};
        for (int64_t chunk = 0; chunk < chunks; chunk++) {
            a.load(s, me, p.a, p.a_stride, m, chunk);
            b.load(s, me, p.b, p.b_stride, m, chunk);
            if (!K::WIDE && p.residual)
                residual.load(s, me, p.residual, p.residual_stride, m, chunk);
            GT_UNROLL
            for (int e = 0; e < K::E; e++) {
                if (!is_inside<K>(s, me, chunk, e)) continue;
                add_square<Real>(&sums[0], a.get(e));
                add_square<Real>(&sums[2], b.get(e));
            }
        }
        slice_sum(s, me, sums);
        const Real rstd_a = rstd_of(&sums[0], inverse, 0, p.eps);
        const Real rstd_b = rstd_of(&sums[2], inverse, 0, p.eps);
        for (int64_t chunk = 0; chunk < chunks && active; chunk++) {
            if (K::WIDE) {
                a.load(s, me, p.a, p.a_stride, m, chunk);
                b.load(s, me, p.b, p.b_stride, m, chunk);
                if (p.residual) residual.load(s, me, p.residual, p.residual_stride, m, chunk);
                load_parameter<K>(s, me, p.gain_a, 1.0f, chunk, gain_a);
                load_parameter<K>(s, me, p.gain_b, 1.0f, chunk, gain_b);
            }
            Real y[K::E];
            GT_UNROLL
            for (int e = 0; e < K::E; e++)
                y[e] = (Real)a.get(e) * rstd_a * gain_a[e] + (Real)b.get(e) * rstd_b * gain_b[e] +
                       residual.get(e);
            store_elements<K>(s, me, p.y, p.y_stride, m, chunk, y);
        }
    }
}

/* ---- norm_mix backward --------------------------------------------------------------------------
 * grid and block as in forward, fewer groups of rows.  Registers: 8 elements of a, b and dy, the
 * gains and their gradients.
 * shared: 8 floats a thread to add the rows of a block, 16 KB at most.
 * bytes: a, b, dy, da, db once (wide slices: a, b and dy twice, and the partial sums per row).
 * dgain is summed over the rows of a group in order, then over groups by reduce_rows:
 * deterministic. */
struct MixBackwardParams {
    Shape shape;
    const void *a, *b, *dy;
    void *da, *db;
    int64_t a_stride, b_stride, dy_stride, da_stride, db_stride;
    const float *gain_a, *gain_b;
    float *dgain_a, *dgain_b; /* partial sums [groups, D], NULL if not wanted */
    float eps;
};

/* The sums of one branch: squares, squares scaled down, d . x */
template <class Real>
GT_DEV void add_branch(Real* sums, Real x, Real d) {
    add_square<Real>(sums, x);
    sums[2] += d * (x * (Real)PRODUCT_SCALE);
}

/* One branch of a chunk: writes dx, adds to dgain. */
template <class K>
GT_DEV void mix_branch(const Shape& s, const Place& me, const Raw<K>& x, const Raw<K>& dy,
                       const typename K::Real* sums, typename K::Real inverse, float eps,
                       const float (&gain)[K::E], void* dx, int64_t dx_stride, int64_t m,
                       int64_t chunk, float (&dgain)[K::E]) {
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
    if (dx) store_elements<K>(s, me, dx, dx_stride, m, chunk, out);
}

template <class K>
GT_KERNEL(K::THREADS, 1) mix_backward_kernel(const GT_GRID_CONSTANT MixBackwardParams p) {
    using Real = typename K::Real;
    const Shape& s = p.shape;
    const int64_t chunks = K::WIDE ? s.chunks : 1;
    const Real inverse = inverse_of<Real>(s);
    Place me = place_of(s);
    float gain_a[K::E], gain_b[K::E], dgain_a[K::E] = {}, dgain_b[K::E] = {};
    if (!K::WIDE) {
        load_parameter<K>(s, me, p.gain_a, 1.0f, 0, gain_a);
        load_parameter<K>(s, me, p.gain_b, 1.0f, 0, gain_b);
    }
    for (int64_t first = me.first_row; first < s.M; first += s.groups * s.rows) {
        const bool active = me.exists && first + me.row < s.M;
        const int64_t m = active ? first + me.row : 0;
        Raw<K> a, b, dy;
        Real sums[6] = {};
        for (int64_t chunk = 0; chunk < chunks; chunk++) {
            a.load(s, me, p.a, p.a_stride, m, chunk);
            b.load(s, me, p.b, p.b_stride, m, chunk);
            dy.load(s, me, p.dy, p.dy_stride, m, chunk);
            if (K::WIDE) {
                load_parameter<K>(s, me, p.gain_a, 1.0f, chunk, gain_a);
                load_parameter<K>(s, me, p.gain_b, 1.0f, chunk, gain_b);
            }
            GT_UNROLL
            for (int e = 0; e < K::E; e++) {
                if (!is_inside<K>(s, me, chunk, e)) continue;
                add_branch<Real>(&sums[0], a.get(e), (Real)dy.get(e) * gain_a[e]);
                add_branch<Real>(&sums[3], b.get(e), (Real)dy.get(e) * gain_b[e]);
            }
        }
        slice_sum(s, me, sums);
        for (int64_t chunk = 0; chunk < chunks && active; chunk++) {
            if (K::WIDE) {
                a.load(s, me, p.a, p.a_stride, m, chunk);
                b.load(s, me, p.b, p.b_stride, m, chunk);
                dy.load(s, me, p.dy, p.dy_stride, m, chunk);
                load_parameter<K>(s, me, p.gain_a, 1.0f, chunk, gain_a);
                load_parameter<K>(s, me, p.gain_b, 1.0f, chunk, gain_b);
                GT_UNROLL
                for (int e = 0; e < K::E; e++) dgain_a[e] = dgain_b[e] = 0.0f;
            }
            mix_branch<K>(s, me, a, dy, &sums[0], inverse, p.eps, gain_a, p.da, p.da_stride, m,
                          chunk, dgain_a);
            mix_branch<K>(s, me, b, dy, &sums[3], inverse, p.eps, gain_b, p.db, p.db_stride, m,
                          chunk, dgain_b);
            if (K::WIDE) {
                const bool is_first = first == me.first_row;
                add_to_partial<K>(s, me, p.dgain_a, chunk, is_first, dgain_a);
                add_to_partial<K>(s, me, p.dgain_b, chunk, is_first, dgain_b);
            }
        }
    }
    store_partial<K>(s, me, p.dgain_a, dgain_a);
    store_partial<K>(s, me, p.dgain_b, dgain_b);
}

} /* namespace norm */
} /* namespace gt */

#endif
