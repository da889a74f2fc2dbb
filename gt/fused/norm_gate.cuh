/* gt/fused/norm_gate.cuh - norm_gate forward and backward.  s = silu(z), or 1 if z is NULL.  For every slice of a row,
 * forward computes
 *     norm first: v = x, y = n s      gate first: v = x s, y = n      n = gamma xhat + beta      xhat = (v - mean) rstd
 *     rstd = 1 / sqrt(mean((v - mean)^2) + eps)           mean = mean(v), or 0 for RMSNorm
 * Backward starts from dn, the gradient of n: dy s with the norm first, dy with the gate first.  With d = gamma dn:
 *     dv = rstd (d - mean(d) - xhat mean(d xhat))         without mean(d) for RMSNorm
 *     dx = dv, ds = dy n      gate first: dx = dv s, ds = dv x        dz = ds silu'(z)
 *     dgamma = sum over rows of dn xhat                   dbeta = sum over rows of dn
 * norm.cuh describes blocks, lanes, rounds, register bounds and the fixed order of sums. */
#ifndef GT_FUSED_NORM_GATE_CUH
#define GT_FUSED_NORM_GATE_CUH

#include "norm.cuh"

namespace gt {
namespace norm {

/* ---- norm_gate forward --------------------------------------------------------------------------
 * grid: tiles * groups.  shared memory: 768 bytes if a slice has more than 32 lanes.
 * registers: v, sigmoid(z), gamma, beta, and the loaded elements of x and z of one row (16-bit vectors: of two
 * rows).
 * bytes: x, z and y once (wide slices: x and z twice, with LayerNorm three times). */
struct GateParams {
    Shape shape;
    const void *x, *z;
    int64_t x_stride, z_stride;
    const float *gamma, *beta;
    bool is_layer, gate_first; /* is_layer: LayerNorm, not RMSNorm; gate_first: the gate acts before the norm */
    float eps;
};

struct GateForwardParams {
    GateParams in;
    void* y;
    int64_t y_stride;
};

/* These answers are constants of the kernel's form.  For ANY_FORM they come from the parameters. */
template <class K>
GT_DEV bool is_layer(const GateParams& p) {
    return K::FORM == ANY_FORM ? p.is_layer : K::FORM == LAYER_GATE_LAST;
}
template <class K>
GT_DEV bool gate_first(const GateParams& p) {
    return K::FORM == ANY_FORM ? p.gate_first : K::FORM == RMS_GATE_FIRST;
}
template <class K>
GT_DEV bool has_gate(const GateParams& p) {
    return K::FORM == ANY_FORM ? p.z != nullptr : true;
}

template <class K>
constexpr bool MAY_HAVE_BETA = K::FORM != RMS_GATE_FIRST;

/* A thread's elements of one row: x and z as loaded, sigmoid(z), and the input v of the norm. */
template <class K>
struct GateRow {
    using Real = typename K::Real;
    Raw<K> x, z;
    float sigmoid_z[K::E];
    Real v[K::E];

    GT_METHOD void load(const GateParams& p, const Coordinates& me, int64_t m, int64_t round) {
        x.load(p.shape, me, p.x, p.x_stride, m, round);
        if (has_gate<K>(p)) z.load(p.shape, me, p.z, p.z_stride, m, round);
    }

    /* The fast sigmoid's error is smaller than the rounding to 16 bits. */
    GT_METHOD void compute(const GateParams& p) {
        constexpr bool is_16_bit = std::is_same<typename K::T, bf16>::value || std::is_same<typename K::T, f16>::value;
        GT_UNROLL
        for (int e = 0; e < K::E; e++) {
            sigmoid_z[e] = !has_gate<K>(p) ? 1.0f : is_16_bit ? sigmoid_fast(z.get(e)) : sigmoid(z.get(e));
            v[e] = gate_first<K>(p) ? (Real)x.get(e) * gate(p, e) : (Real)x.get(e);
        }
    }

    /* Replaces v by v - mean for LayerNorm.  Elements outside of the slice become 0. */
    GT_METHOD void center(const GateParams& p, const Coordinates& me, int64_t round, Real mean) {
        GT_UNROLL
        for (int e = 0; e < K::E; e++)
            if (is_layer<K>(p)) v[e] = is_inside<K>(p.shape, me, round, e) ? v[e] - mean : (Real)0;
    }

    /* Returns s = silu(z), or 1 without z. */
    GT_METHOD Real gate(const GateParams& p, int e) const {
        return has_gate<K>(p) ? silu_of_sigmoid(z.get(e), sigmoid_z[e]) : 1.0f;
    }
};

/* Returns mean(v) for LayerNorm, otherwise 0.  With K::WIDE the function loads the slice itself, round by round;
 * otherwise the caller has loaded the row. */
template <class K>
GT_DEV typename K::Real gate_mean(const GateParams& p, Coordinates& me, GateRow<K>& row, int64_t m,
                                  typename K::Real inverse) {
    const Shape& s = p.shape;
    typename K::Real sum[1] = {};
    if (!is_layer<K>(p)) return 0;
    for (int64_t round = 0; round < (K::WIDE ? s.rounds : 1); round++) {
        if (K::WIDE) {
            row.load(p, me, m, round);
            row.compute(p);
        }
        GT_UNROLL
        for (int e = 0; e < K::E; e++) sum[0] += row.v[e] * inverse;
    }
    slice_sum<K>(s, me, sum);
    return sum[0];
}

template <class K>
GT_KERNEL(K::THREADS, K::FORWARD_BLOCKS)
gate_forward_kernel(const GT_GRID_CONSTANT GateForwardParams p) {
    using Real = typename K::Real;
    const GateParams& in = p.in;
    const Shape& s = in.shape;
    const int64_t rounds = K::WIDE ? s.rounds : 1;
    const Real inverse = inverse_of<Real>(s);
    Coordinates me = coordinates_of(s);
    const int64_t step = s.groups * s.rows;
    GateRow<K> next = {};
    if (K::AHEAD) next.load(in, me, row_of(s, me, me.first_row), 0);
    float gamma[K::E], beta[K::E];
    if (!K::WIDE) {
        load_parameter<K>(s, me, in.gamma, 1.0f, 0, gamma);
        load_parameter<K>(s, me, MAY_HAVE_BETA<K> ? in.beta : nullptr, 0.0f, 0, beta);
    }
    for (int64_t first = me.first_row; first < s.M; first += step) {
        const bool active = me.exists && first + me.row < s.M;
        const int64_t m = row_of(s, me, first);
        GateRow<K> row = next;
        if (!K::WIDE) {
            if (!K::AHEAD) row.load(in, me, m, 0);
            if (K::AHEAD && first + step < s.M) next.load(in, me, row_of(s, me, first + step), 0);
            row.compute(in);
        }
        const Real mean = gate_mean<K>(in, me, row, m, inverse);
        constexpr bool MAY_CENTER = K::FORM != RMS_GATE_FIRST;
        Real sums[MAY_CENTER ? 3 : 2] = {}; /* two sums of add_square(v - mean), then the mean of v - mean */
        for (int64_t round = 0; round < rounds; round++) {
            if (K::WIDE) {
                row.load(in, me, m, round);
                row.compute(in);
            }
            row.center(in, me, round, mean);
            GT_UNROLL
            for (int e = 0; e < K::E; e++) {
                add_square<Real>(sums, row.v[e]);
                if constexpr (MAY_CENTER)
                    if (is_layer<K>(in)) sums[2] += row.v[e] * inverse;
            }
        }
        slice_sum<K>(s, me, sums);
        Real shift = 0;
        if constexpr (MAY_CENTER) shift = sums[2];
        const Real rstd = rstd_of(sums, inverse, shift, in.eps);
        for (int64_t round = 0; round < rounds && active; round++) {
            if (K::WIDE) {
                row.load(in, me, m, round);
                row.compute(in);
                row.center(in, me, round, mean);
                load_parameter<K>(s, me, in.gamma, 1.0f, round, gamma);
                load_parameter<K>(s, me, in.beta, 0.0f, round, beta);
            }
            Real y[K::E];
            GT_UNROLL
            for (int e = 0; e < K::E; e++) {
                y[e] = (row.v[e] - shift) * rstd * gamma[e] + beta[e];
                if (!gate_first<K>(in)) y[e] *= row.gate(in, e);
            }
            store_elements<K>(s, me, p.y, p.y_stride, m, round, y);
        }
    }
}

/* ---- norm_gate backward -------------------------------------------------------------------------
 * grid: tiles * groups, with fewer groups than forward, since each group stores a row of partial sums.
 * shared memory: 16 or 32 floats a thread, to add the rows of a block; 32 KB at most.
 * registers: v, sigmoid(z), gamma, the gradients of gamma and beta, and the loaded elements of x, z and dy of one row
 * (16-bit vectors: of two rows).  If dz needs beta, beta is read again with every row.
 * bytes: x, z, dy, dx and dz once (wide slices: x, z and dy twice, with LayerNorm x and z three times).  Each group
 * stores 8 D bytes of partial sums (wide slices: reads and writes them with every row). */
struct GateBackwardParams {
    GateParams in;
    const void* dy;
    void *dx, *dz;
    int64_t dy_stride, dx_stride, dz_stride;
    float *dgamma, *dbeta; /* partial sums [groups, D]; NULL: not computed */
};

/* Values that follow from the sums over a slice.  shift: the mean of v - mean, not exactly 0 because of rounding.
 * slope: mean(d xhat).  mean_d: mean(d), or 0 for RMSNorm. */
template <class Real>
struct GateSlice {
    Real shift, rstd, slope, mean_d;
};

/* Processes one round: stores dx and dz, and adds to dgamma and dbeta.  row.v holds v - mean, and is overwritten. */
template <class K>
GT_DEV void gate_round(const GateBackwardParams& p, const Coordinates& me, GateRow<K>& row, const Raw<K>& dy,
                       const GateSlice<typename K::Real>& slice, int64_t m, int64_t round, const float (&gamma)[K::E],
                       float (&dgamma)[K::E], float (&dbeta)[K::E]) {
    using Real = typename K::Real;
    const GateParams& in = p.in;
    Real out[K::E];
    float beta[K::E]; /* loaded again for every row: no registers are left to keep it */
    load_parameter<K>(in.shape, me, !MAY_HAVE_BETA<K> || gate_first<K>(in) || !p.dz ? nullptr : in.beta, 0.0f, round,
                      beta);
    GT_UNROLL
    for (int e = 0; e < K::E; e++) {
        const Real xhat = (row.v[e] - slice.shift) * slice.rstd;
        const Real dn = gate_first<K>(in) ? (Real)dy.get(e) : dy.get(e) * row.gate(in, e);
        const Real dv = slice.rstd * (dn * gamma[e] - slice.mean_d - xhat * slice.slope);
        dgamma[e] += (float)(dn * xhat);
        if (MAY_HAVE_BETA<K>) dbeta[e] += (float)dn;
        out[e] = gate_first<K>(in) ? dv * row.gate(in, e) : dv;
        row.v[e] = gate_first<K>(in) ? dv : xhat * gamma[e] + beta[e]; /* ds is this times dy, or gate first times x */
    }
    if (p.dx) store_elements<K>(in.shape, me, p.dx, p.dx_stride, m, round, out);
    if (!p.dz) return;
    GT_UNROLL
    for (int e = 0; e < K::E; e++) {
        const Real ds = row.v[e] * (gate_first<K>(in) ? row.x.get(e) : dy.get(e));
        out[e] = ds * silu_derivative(row.z.get(e), row.sigmoid_z[e]);
    }
    store_elements<K>(in.shape, me, p.dz, p.dz_stride, m, round, out);
}

template <class K>
GT_KERNEL(K::THREADS, K::GATE_BLOCKS)
gate_backward_kernel(const GT_GRID_CONSTANT GateBackwardParams p) {
    wait_for_chain(); /* first kernel of the chain: does not wait, but lets the next kernel's blocks start early */
    using Real = typename K::Real;
    const GateParams& in = p.in;
    const Shape& s = in.shape;
    const int64_t rounds = K::WIDE ? s.rounds : 1;
    const Real inverse = inverse_of<Real>(s);
    Coordinates me = coordinates_of(s);
    const int64_t step = s.groups * s.rows;
    GateRow<K> next = {};
    Raw<K> next_dy = {};
    if (K::AHEAD) {
        next.load(in, me, row_of(s, me, me.first_row), 0);
        next_dy.load(s, me, p.dy, p.dy_stride, row_of(s, me, me.first_row), 0);
    }
    float gamma[K::E], dgamma[K::E] = {}, dbeta[K::E] = {};
    if (!K::WIDE) load_parameter<K>(s, me, in.gamma, 1.0f, 0, gamma);
    for (int64_t first = me.first_row; first < s.M; first += step) {
        const bool active = me.exists && first + me.row < s.M;
        const int64_t m = row_of(s, me, first);
        GateRow<K> row = next;
        Raw<K> dy = next_dy;
        if (!K::WIDE) {
            if (!K::AHEAD) {
                row.load(in, me, m, 0);
                dy.load(s, me, p.dy, p.dy_stride, m, 0);
            } else if (first + step < s.M) {
                next.load(in, me, row_of(s, me, first + step), 0);
                next_dy.load(s, me, p.dy, p.dy_stride, row_of(s, me, first + step), 0);
            }
            row.compute(in);
        }
        GateSlice<Real> slice;
        const Real mean = gate_mean<K>(in, me, row, m, inverse);
        constexpr bool MAY_CENTER = K::FORM != RMS_GATE_FIRST;
        /* In order: two sums of add_square(v - mean), the sum of PRODUCT_SCALE d (v - mean), the mean of v - mean, and
         * the sum of d. */
        Real sums[MAY_CENTER ? 5 : 3] = {};
        for (int64_t round = 0; round < rounds; round++) {
            if (K::WIDE) {
                row.load(in, me, m, round);
                dy.load(s, me, p.dy, p.dy_stride, m, round);
                row.compute(in);
                load_parameter<K>(s, me, in.gamma, 1.0f, round, gamma);
            }
            row.center(in, me, round, mean);
            GT_UNROLL
            for (int e = 0; e < K::E; e++) {
                const Real v = row.v[e];
                const Real dn = gate_first<K>(in) ? (Real)dy.get(e) : dy.get(e) * row.gate(in, e);
                const Real d = dn * gamma[e];
                add_square<Real>(sums, v);
                sums[2] += d * (v * (Real)PRODUCT_SCALE);
                if constexpr (MAY_CENTER) {
                    if (is_layer<K>(in)) sums[3] += v * inverse;
                    sums[4] += d;
                }
            }
        }
        slice_sum<K>(s, me, sums);
        Real product = sums[2];
        slice.shift = slice.mean_d = 0;
        if constexpr (MAY_CENTER) {
            slice.shift = sums[3];
            product -= slice.shift * (Real)PRODUCT_SCALE * sums[4];
            slice.mean_d = is_layer<K>(in) ? sums[4] * inverse : 0;
        }
        slice.rstd = rstd_of(sums, inverse, slice.shift, in.eps);
        slice.slope = product * inverse * (slice.rstd * (Real)(1.0f / PRODUCT_SCALE));
        for (int64_t round = 0; round < rounds && active; round++) {
            if (K::WIDE) {
                row.load(in, me, m, round);
                dy.load(s, me, p.dy, p.dy_stride, m, round);
                row.compute(in);
                row.center(in, me, round, mean);
                load_parameter<K>(s, me, in.gamma, 1.0f, round, gamma);
                GT_UNROLL
                for (int e = 0; e < K::E; e++) dgamma[e] = dbeta[e] = 0.0f;
            }
            gate_round<K>(p, me, row, dy, slice, m, round, gamma, dgamma, dbeta);
            if (K::WIDE) {
                const bool is_first = first == me.first_row;
                add_to_partial<K>(s, me, p.dgamma, round, is_first, dgamma);
                add_to_partial<K>(s, me, p.dbeta, round, is_first, dbeta);
            }
        }
    }
    store_partials<K>(s, me, p.dgamma, dgamma, MAY_HAVE_BETA<K> ? p.dbeta : nullptr, dbeta);
}

} /* namespace norm */
} /* namespace gt */

#endif
