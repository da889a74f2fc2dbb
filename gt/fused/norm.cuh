/* gt/fused/norm.cuh - what the kernels of norm_mix and norm_gate share. */
#ifndef GT_FUSED_NORM_CUH
#define GT_FUSED_NORM_CUH

#include "../base/op.h"
#include "../base/warp.cuh"

namespace gt {
namespace norm {

/* ---- sizes ----------------------------------------------------------------------------------- */

constexpr int ELEMENTS = 8; /* of a slice, in the registers of a thread; TINY in double */
constexpr int MANY = 16;    /* the same where that lets one warp hold a slice */
constexpr int MAX_LANES = 512;
constexpr int BLOCK = 256; /* threads, of several slices or of a wide one */
constexpr int TINY = 4;    /* slices so small are computed in double */

/* How a kernel is compiled: elements are Vec<T, VEC>, or of a dtype known at run time (T = Any); a thread holds E.
 * NARROW: a slice has at most 32 lanes.  WIDE: a slice does not fit into the registers of a block and is read once per
 * pass instead.  AHEAD: a thread loads its part of the next row before the sums of this one. */
struct Any {};

/* Forms of norm_gate, known when it is compiled: any, or those that models have: silu(z) before RMSNorm without beta,
 * or behind LayerNorm. */
enum Form { ANY_FORM, RMS_GATE_FIRST, LAYER_GATE_LAST };

template <class T_, int VEC_, class Real_ = float, bool WIDE_ = false, bool NARROW_ = false, int E_ = ELEMENTS,
          Form FORM_ = ANY_FORM>
struct Kind {
    using T = T_;
    using Real = Real_;
    using Index = typename std::conditional<WIDE_, int64_t, int>::type; /* within a slice */
    static constexpr int VEC = VEC_, E = std::is_same<Real, double>::value ? TINY : E_;
    static constexpr int COUNT = E / VEC;
    static constexpr bool WIDE = WIDE_, NARROW = NARROW_;
    static constexpr bool AHEAD = VEC == 8; /* loads the next row ahead: others would need too many registers */
    static constexpr Form FORM = FORM_;
    static constexpr int THREADS = std::is_same<T, Any>::value ? BLOCK
                                   : !NARROW_                  ? MAX_LANES
                                   : E == MANY                 ? BLOCK / 2
                                                               : BLOCK;
    static constexpr int FORWARD_BLOCKS = !NARROW_ ? 1 : E == MANY ? 4 : 3; /* on a multiprocessor, of THREADS */
    static constexpr int BACKWARD_BLOCKS = !NARROW_ ? 1 : E == MANY ? 3 : 2;
    static constexpr int GATE_BLOCKS = BACKWARD_BLOCKS == 3 && FORM != RMS_GATE_FIRST ? 2 : BACKWARD_BLOCKS;
    static_assert(E % VEC == 0, "whole vectors");
};

/* How the rows are cut: `lanes` threads (a power of 2) have a slice.  Up to 32 lanes: a block holds
 * some slices of some rows.  More: a block is one slice.  A group of rows goes to the same block,
 * one after another, so that parameters stay in registers. */
struct Shape {
    int64_t M, D, H, n;
    gt_dtype dtype;
    bool vectors;
    int elements;            /* of a thread */
    int lanes, slices, rows; /* slices and rows: in a block at a time */
    int threads;
    int64_t tiles, groups, chunks; /* of slices in a row; of rows; of a wide slice */
    float inverse;                 /* 1 / n */
    int smem;
};

/* ---- device helpers -------------------------------------------------------------------------- */

/* A thread's place. */
struct Place {
    int64_t column, first_row; /* first of its slice; first of the block */
    int tile, group;           /* of slices, of rows */
    int lane, row;             /* row: in the block */
    bool exists;
    uint32_t buffer; /* for the next sum over a block */
};

GT_DEV Place place_of(const Shape& s) {
    Place me;
    const int threads_of_row = s.lanes * s.slices;
    me.tile = block_x() % (int)s.tiles; /* tiles * groups is a grid's size */
    me.group = block_x() / (int)s.tiles;
    me.first_row = (int64_t)me.group * s.rows;
    me.lane = thread_id() % s.lanes;
    me.row = thread_id() / threads_of_row;
    const int64_t slice = (int64_t)me.tile * s.slices + thread_id() % threads_of_row / s.lanes;
    me.exists = me.row < s.rows && slice < s.H;
    me.column = me.exists ? slice * s.n : 0;
    me.buffer = smem_base();
    return me;
}

/* The row of a thread in the rows from `first` on; 0 where there is none, so that it can be loaded. */
GT_DEV int64_t row_of(const Shape& s, const Place& me, int64_t first) {
    return me.exists && first + me.row < s.M ? first + me.row : 0;
}

/* Element e of a thread's chunk, within the slice. */
template <class K>
GT_DEV typename K::Index index_of(const Shape& s, const Place& me, int64_t chunk, int e) {
    using Index = typename K::Index;
    const Index vector = ((Index)chunk * K::COUNT + e / K::VEC) * s.lanes + me.lane;
    return vector * K::VEC + e % K::VEC;
}

/* A vector is inside or outside as a whole. */
template <class K>
GT_DEV bool is_inside(const Shape& s, const Place& me, int64_t chunk, int e) {
    return index_of<K>(s, me, chunk, e - e % K::VEC) < (typename K::Index)s.n;
}

/* A thread's elements as they lie in memory, 0 outside of the slice. */
template <class K>
struct Raw {
    Vec<typename K::T, K::VEC> vec[K::COUNT];

    GT_METHOD void load(const Shape& s, const Place& me, const void* data, int64_t stride, int64_t m, int64_t chunk) {
        using T = typename K::T;
        const T* from = static_cast<const T*>(data) + m * stride + me.column;
        GT_UNROLL
        for (int c = 0; c < K::COUNT; c++) {
            const int e = c * K::VEC;
            vec[c] = {};
            if (is_inside<K>(s, me, chunk, e)) vec[c] = ldg<Vec<T, K::VEC>>(from + index_of<K>(s, me, chunk, e));
        }
    }
    GT_METHOD float get(int e) const { return vec[e / K::VEC].get(e % K::VEC); }
};

template <int VEC, class Real, bool WIDE>
struct Raw<Kind<Any, VEC, Real, WIDE>> {
    using K = Kind<Any, VEC, Real, WIDE>;
    static_assert(VEC == 1, "elements one by one");
    float value[K::E];

    GT_METHOD void load(const Shape& s, const Place& me, const void* data, int64_t stride, int64_t m, int64_t chunk) {
        const int64_t i = index_of<K>(s, me, chunk, 0);
        load_column(value, data, s.dtype, m * stride + me.column + i, s.lanes, (s.n - i + s.lanes - 1) / s.lanes);
    }
    GT_METHOD float get(int e) const { return value[e]; }
};

template <class K>
GT_DEV void store_elements(const Shape& s, const Place& me, void* data, int64_t stride, int64_t m, int64_t chunk,
                           const typename K::Real (&x)[K::E]) {
    const int64_t first = m * stride + me.column;
    GT_UNROLL
    for (int c = 0; c < K::COUNT; c++) {
        if (!is_inside<K>(s, me, chunk, c * K::VEC)) break;
        const int64_t i = first + index_of<K>(s, me, chunk, c * K::VEC);
        if constexpr (std::is_same<typename K::T, Any>::value) {
            store_as(data, s.dtype, i, (float)x[c]);
        } else {
            Vec<typename K::T, K::VEC> packed;
            float part[K::VEC];
            GT_UNROLL
            for (int v = 0; v < K::VEC; v++) part[v] = x[c * K::VEC + v];
            packed.set(part);
            stg(static_cast<typename K::T*>(data) + i, packed);
        }
    }
}

/* A parameter [D] at a thread's elements. */
template <class K>
GT_DEV void load_parameter(const Shape& s, const Place& me, const float* data, float missing, int64_t chunk,
                           float (&to)[K::E]) {
    GT_UNROLL
    for (int e = 0; e < K::E; e++)
        to[e] = data && is_inside<K>(s, me, chunk, e) ? data[me.column + index_of<K>(s, me, chunk, e)] : missing;
}

constexpr int SUMS = 6; /* at most, over a slice at a time */
constexpr int SUM_SMEM = 2 * 4 * SUMS * MAX_LANES / 32;

/* Sums over the lanes of a slice, the same in all of them; all threads of the block.  Two buffers
 * take turns: who writes one again has passed the barrier after it was read. */
template <class K, int N>
GT_DEV void slice_sum(const Shape& s, Place& me, float (&sums)[N]) {
    GT_UNROLL
    for (int mask = 1; mask < 32; mask <<= 1) {
        if (mask >= s.lanes) break;
        GT_UNROLL
        for (int i = 0; i < N; i++) sums[i] += shfl_xor(sums[i], mask);
    }
    if (K::NARROW || s.lanes <= 32) return;
    static_assert(N <= SUMS, "room in a buffer");
    if (lane_id() == 0) {
        GT_UNROLL
        for (int i = 0; i < N; i++) sts<float>(me.buffer + 4 * (SUMS * warp_id() + i), sums[i]);
    }
    sync_threads();
    const bool is_warp = lane_id() < s.lanes / 32;
    GT_UNROLL
    for (int i = 0; i < N; i++) sums[i] = is_warp ? lds<float>(me.buffer + 4 * (SUMS * lane_id() + i)) : 0.0f;
    for (int mask = 1; mask < s.lanes / 32; mask <<= 1) {
        GT_UNROLL
        for (int i = 0; i < N; i++) sums[i] += shfl_xor(sums[i], mask);
    }
    GT_UNROLL
    for (int i = 0; i < N; i++) sums[i] = shfl_idx(sums[i], 0);
    me.buffer = me.buffer == smem_base() ? smem_base() + SUM_SMEM / 2 : smem_base();
}

template <class K, int N>
GT_DEV void slice_sum(const Shape&, Place&, double (&)[N]) {} /* only slices of one thread */

/* Squares of v, and of v scaled down; sums[0] and sums[1]. */
template <class Real>
GT_DEV void add_square(Real* sums, Real v) {
    const Real small = v * (Real)0x1p-70f;
    sums[0] += v * v;
    sums[1] += small * small;
}

/* `shift`: what the mean that was subtracted lacked */
GT_DEV float rstd_of(const float* sums, float inverse, float shift, float eps) {
    if (sums[0] < 0x1p126f) {
        float x = fma_rn(sums[0], inverse, -shift * shift) + eps;
        if (x < 0x1p-126f) x = 0x1p-126f;
        const float rstd = rsqrt_approx(x); /* and a step of Newton's method, for all of a slice */
        return fma_rn(rstd, fma_rn(-0.5f * x * rstd, rstd, 0.5f), rstd);
    }
    return 0x1p-70f * rsqrt_approx(sums[1] * inverse);
}
GT_DEV double rstd_of(const double* sums, double inverse, double shift, float eps) {
    return 1.0 / sqrt(sums[0] * inverse - shift * shift + (double)eps);
}

template <class Real>
GT_DEV Real inverse_of(const Shape& s) {
    if constexpr (std::is_same<Real, double>::value)
        return 1.0 / (double)s.n;
    else
        return s.inverse;
}

constexpr float PRODUCT_SCALE = 0x1p-32f; /* of the sum of d . v */

/* Sums of two parameter gradients over a block's rows, in order, into row `group` of each partial [groups, D]; all
 * threads.  Wide slices add to them as they go, by add_to_partial. */
template <class K>
GT_DEV void store_partials(const Shape& s, Place me, float* partial, const float (&sums)[K::E], float* other_partial,
                           const float (&other)[K::E]) {
    if (K::WIDE || (!partial && !other_partial)) return;
    const uint32_t cells = smem_base();
    const int threads_of_row = s.lanes * s.slices;
    if (!K::NARROW) sync_threads(); /* earlier sums have been read */
    GT_UNROLL
    for (int e = 0; e < K::E; e++) {
        if (partial) sts<float>(cells + 4 * (e * s.threads + thread_id()), sums[e]);
        if (other_partial) sts<float>(cells + 4 * ((K::E + e) * s.threads + thread_id()), other[e]);
    }
    sync_threads();
    const int first = partial ? 0 : K::E, last = other_partial ? 2 * K::E : K::E;
    for (int i = first * threads_of_row + thread_id(); i < last * threads_of_row; i += s.threads) {
        const int cell = i / threads_of_row, e = cell % K::E, thread = i % threads_of_row;
        const int64_t slice = (int64_t)me.tile * s.slices + thread / s.lanes;
        me.lane = thread % s.lanes;
        float sum = 0.0f;
        for (int row = 0; row < s.rows; row++)
            sum += lds<float>(cells + 4 * (cell * s.threads + row * threads_of_row + thread));
        if (slice < s.H && is_inside<K>(s, me, 0, e))
            (cell < K::E ? partial : other_partial)[me.group * s.D + slice * s.n + index_of<K>(s, me, 0, e)] = sum;
    }
}

template <class K>
GT_DEV void add_to_partial(const Shape& s, const Place& me, float* partial, int64_t chunk, bool is_first,
                           const float (&added)[K::E]) {
    if (!partial) return;
    float* cells = partial + me.group * s.D + me.column;
    GT_UNROLL
    for (int e = 0; e < K::E; e++) {
        if (!is_inside<K>(s, me, chunk, e)) break;
        const auto i = index_of<K>(s, me, chunk, e);
        cells[i] = is_first ? added[e] : cells[i] + added[e];
    }
}

} /* namespace norm */
} /* namespace gt */

#endif
