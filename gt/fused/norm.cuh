/* gt/fused/norm.cuh - shared by the kernels of norm_mix and norm_gate: how rows are cut, and sums over slices.
 *
 * A row of D elements has H slices of n = D / H elements.  Each slice is normalised by itself.  `lanes` threads share a
 * slice; `lanes` is a power of 2.  Each thread holds 8 or 16 elements.  There are three ways to cut rows:
 *     narrow, up to 32 lanes   a block has several slices of several rows: up to 256 threads of 8 elements, or 128
 *                              threads of 16 elements
 *     more, up to 512 lanes    a block has one slice of one row at a time
 *     wide                     the slice does not fit into registers.  A block of 256 threads reads it again for every
 *                              sum and for the result, in rounds of 8 elements a thread
 * All warps do the same work.  A block takes the rows of its group one after another, so parameters and the sums of
 * their gradients stay in registers.
 *
 * Sums over a slice: a thread adds its elements in order, a butterfly adds the lanes of a warp, and a second butterfly
 * adds the warps (slice_sum).
 * Sums over rows: a thread adds its rows in order, then the block adds its rows in order (store_partials), then
 * reduce_rows adds the groups.  All orders are fixed, so results are deterministic.
 * Most registers of a thread, as THREADS and the *_BLOCKS of Kind imply:
 *     narrow, 8 elements a thread    80, backward 128
 *     narrow, 16 elements            128, backward 168; norm_gate's backward 255, but 168 for RMS_GATE_FIRST
 *     wide, tiny                     255
 *     others                         128 */
#ifndef GT_FUSED_NORM_CUH
#define GT_FUSED_NORM_CUH

#include "../base/op.h"
#include "../base/warp.cuh"

namespace gt {
namespace norm {

/* ---- sizes ----------------------------------------------------------------------------------- */

constexpr int ELEMENTS = 8; /* elements of a slice that a thread holds */
constexpr int MANY = 16;    /* elements of a thread if one warp can then hold a slice */
constexpr int MAX_LANES = 512;
constexpr int BLOCK = 256; /* threads of a block that has several slices or a wide one */
constexpr int TINY = 4;    /* a slice of at most this many elements has one thread, which computes in double */

/* Takes the place of an element type that is known only at run time. */
struct Any {};

/* Two forms of norm_gate have kernels of their own.  RMS_GATE_FIRST: silu(z) before RMSNorm without beta.
 * LAYER_GATE_LAST: silu(z) after LayerNorm.  Kernels of ANY_FORM read the form from their parameters. */
enum Form { ANY_FORM, RMS_GATE_FIRST, LAYER_GATE_LAST };

/* How a kernel is compiled.
 * T, VEC: elements have type T and are loaded as Vec<T, VEC>. Real: type of sums.
 * WIDE, NARROW: the cut of rows, see the top of this file.  E: elements of a thread.  FORM: the form of norm_gate.
 * COUNT: vectors of a thread.  AHEAD: a thread loads its elements of the next row before it sums this row. */
template <class T_, int VEC_, class Real_ = float, bool WIDE_ = false, bool NARROW_ = false, int E_ = ELEMENTS,
          Form FORM_ = ANY_FORM>
struct Kind {
    using T = T_;
    using Real = Real_;
    using Index = typename std::conditional<WIDE_, int64_t, int>::type; /* index of an element in its slice */
    static constexpr int VEC = VEC_, E = std::is_same<Real, double>::value ? TINY : E_;
    static constexpr int COUNT = E / VEC;
    static constexpr bool WIDE = WIDE_, NARROW = NARROW_;
    static constexpr bool AHEAD = VEC == 8; /* only for 16-bit elements in whole vectors: other kinds would need too
                                             * many registers */
    static constexpr Form FORM = FORM_;
    static constexpr int THREADS = std::is_same<T, Any>::value ? BLOCK
                                   : !NARROW_                  ? MAX_LANES
                                   : E == MANY                 ? BLOCK / 2
                                                               : BLOCK;
    static constexpr int FORWARD_BLOCKS = !NARROW_ ? 1 : E == MANY ? 4 : 3; /* blocks of THREADS on a multiprocessor */
    static constexpr int BACKWARD_BLOCKS = !NARROW_ ? 1 : E == MANY ? 3 : 2;
    static constexpr int GATE_BLOCKS = BACKWARD_BLOCKS == 3 && FORM != RMS_GATE_FIRST ? 2 : BACKWARD_BLOCKS;
    static_assert(E % VEC == 0, "whole vectors");
};

/* How the rows of a call are cut.  A tile is the slices of a row that one block has.  Block i of a tile takes the rows
 * of group i.  It starts at row i * rows, takes `rows` rows at a time, and advances by groups * rows rows. */
struct Shape {
    int64_t M, D, H, n;
    gt_dtype dtype;
    bool vectors;            /* 16-byte accesses are aligned */
    int elements;            /* elements of a thread */
    int lanes, slices, rows; /* lanes of a slice; slices and rows that a block has at a time */
    int threads;
    int64_t tiles, groups, rounds; /* tiles of a row; groups of rows; rounds of a wide slice, else 1 */
    float inverse;                 /* 1 / n */
    int smem;
};

/* ---- device helpers -------------------------------------------------------------------------- */

/* The slice and the row that a thread works on. */
struct Coordinates {
    int64_t column, first_row; /* first column of the thread's slice; first row of its block */
    int tile, group;
    int lane, row;   /* index among the slice's lanes; index among the rows that the block has at a time */
    bool exists;     /* whether the slice exists */
    uint32_t buffer; /* shared memory for the next sum over warps */
};

GT_DEV Coordinates coordinates_of(const Shape& s) {
    Coordinates me;
    const int threads_of_row = s.lanes * s.slices;
    me.tile = block_x() % (int)s.tiles; /* fits an int, since tiles * groups is a grid's size */
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

/* Returns the row of a thread.  `first` is the first of the rows that the block has now.  A thread without a row gets
 * row 0, so that its loads are valid. */
GT_DEV int64_t row_of(const Shape& s, const Coordinates& me, int64_t first) {
    return me.exists && first + me.row < s.M ? first + me.row : 0;
}

/* Returns where the thread's element e of a round lies in the slice. */
template <class K>
GT_DEV typename K::Index index_of(const Shape& s, const Coordinates& me, int64_t round, int e) {
    using Index = typename K::Index;
    const Index vector = ((Index)round * K::COUNT + e / K::VEC) * s.lanes + me.lane;
    return vector * K::VEC + e % K::VEC;
}

/* Returns whether the thread's element e of a round is inside the slice.  A vector is inside or outside as a whole. */
template <class K>
GT_DEV bool is_inside(const Shape& s, const Coordinates& me, int64_t round, int e) {
    return index_of<K>(s, me, round, e - e % K::VEC) < (typename K::Index)s.n;
}

/* Loads a thread's elements of row m without conversion.  Elements outside of the slice are 0. */
template <class K>
struct Raw {
    Vec<typename K::T, K::VEC> vec[K::COUNT];

    GT_METHOD void load(const Shape& s, const Coordinates& me, const void* data, int64_t stride, int64_t m,
                        int64_t round) {
        using T = typename K::T;
        const T* from = static_cast<const T*>(data) + m * stride + me.column;
        GT_UNROLL
        for (int c = 0; c < K::COUNT; c++) {
            const int e = c * K::VEC;
            vec[c] = {};
            if (is_inside<K>(s, me, round, e)) vec[c] = ldg<Vec<T, K::VEC>>(from + index_of<K>(s, me, round, e));
        }
    }
    GT_METHOD float get(int e) const { return vec[e / K::VEC].get(e % K::VEC); }
};

/* Elements of any dtype, which are converted as they are loaded. */
template <int VEC, class Real, bool WIDE>
struct Raw<Kind<Any, VEC, Real, WIDE>> {
    using K = Kind<Any, VEC, Real, WIDE>;
    static_assert(VEC == 1, "elements one by one");
    float value[K::E];

    GT_METHOD void load(const Shape& s, const Coordinates& me, const void* data, int64_t stride, int64_t m,
                        int64_t round) {
        const int64_t i = index_of<K>(s, me, round, 0);
        load_column(value, data, s.dtype, m * stride + me.column + i, s.lanes, (s.n - i + s.lanes - 1) / s.lanes);
    }
    GT_METHOD float get(int e) const { return value[e]; }
};

/* Stores a thread's elements of row m. */
template <class K>
GT_DEV void store_elements(const Shape& s, const Coordinates& me, void* data, int64_t stride, int64_t m, int64_t round,
                           const typename K::Real (&x)[K::E]) {
    const int64_t first = m * stride + me.column;
    GT_UNROLL
    for (int c = 0; c < K::COUNT; c++) {
        if (!is_inside<K>(s, me, round, c * K::VEC)) break;
        const int64_t i = first + index_of<K>(s, me, round, c * K::VEC);
        if constexpr (std::is_same<typename K::T, Any>::value) {
            store_as(data, s.dtype, i, (float)x[c]);
        } else {
            Vec<typename K::T, K::VEC> packed;
            float values[K::VEC];
            GT_UNROLL
            for (int v = 0; v < K::VEC; v++) values[v] = x[c * K::VEC + v];
            packed.set(values);
            stg(static_cast<typename K::T*>(data) + i, packed);
        }
    }
}

/* Loads a parameter [D] for the thread's elements.  If data is NULL, every element is `missing`. */
template <class K>
GT_DEV void load_parameter(const Shape& s, const Coordinates& me, const float* data, float missing, int64_t round,
                           float (&to)[K::E]) {
    GT_UNROLL
    for (int e = 0; e < K::E; e++)
        to[e] = data && is_inside<K>(s, me, round, e) ? data[me.column + index_of<K>(s, me, round, e)] : missing;
}

constexpr int SUMS = 6;                                 /* slice_sum adds at most this many sums at once */
constexpr int SUM_SMEM = 2 * 4 * SUMS * MAX_LANES / 32; /* bytes of the two buffers of slice_sum */

/* Adds `sums` over the lanes of a slice.  All lanes get the same bits.  All threads of the block must call this.
 * Calls use two buffers in shared memory in turn, so one barrier for each call is enough.  Before a warp writes a
 * buffer again, it passes the barrier of the call in between, and all warps have read the buffer before that. */
template <class K, int N>
GT_DEV void slice_sum(const Shape& s, Coordinates& me, float (&sums)[N]) {
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
    const bool is_warp = lane_id() < s.lanes / 32; /* lane w takes the sum of warp w */
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
GT_DEV void slice_sum(const Shape&, Coordinates&, double (&)[N]) {} /* a tiny slice has only one thread */

/* Adds v^2 to sums[0], and (2^-70 v)^2, which cannot overflow, to sums[1]. */
template <class Real>
GT_DEV void add_square(Real* sums, Real v) {
    const Real small = v * (Real)0x1p-70f;
    sums[0] += v * v;
    sums[1] += small * small;
}

/* Returns 1 / sqrt(mean square - shift^2 + eps), from add_square's sums of v - mean.  inverse is 1 / n.  shift is the
 * mean of the summed values, which is not exactly 0, because the subtracted mean is rounded. */
GT_DEV float rstd_of(const float* sums, float inverse, float shift, float eps) {
    if (sums[0] < 0x1p126f) {
        float x = fma_rn(sums[0], inverse, -shift * shift) + eps;
        if (x < 0x1p-126f) x = 0x1p-126f;
        const float rstd = rsqrt_approx(x); /* one step of Newton's method refines it */
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

constexpr float PRODUCT_SCALE = 0x1p-32f; /* factor that keeps backward's sum of d . v from overflow */

/* Adds up two parameter gradients over the block's rows, in order.  Stores the sums as row `group` of `partial` and
 * `other_partial`, [groups, D]; a NULL output is skipped.  All threads of the block must call it.  For wide slices it
 * does nothing, since add_to_partial has added every row. */
template <class K>
GT_DEV void store_partials(const Shape& s, Coordinates me, float* partial, const float (&sums)[K::E],
                           float* other_partial, const float (&other)[K::E]) {
    if (K::WIDE || (!partial && !other_partial)) return;
    const uint32_t values = smem_base();
    const int threads_of_row = s.lanes * s.slices;
    if (!K::NARROW) sync_threads(); /* all threads have read earlier sums */
    GT_UNROLL
    for (int e = 0; e < K::E; e++) {
        if (partial) sts<float>(values + 4 * (e * s.threads + thread_id()), sums[e]);
        if (other_partial) sts<float>(values + 4 * ((K::E + e) * s.threads + thread_id()), other[e]);
    }
    sync_threads();
    const int first = partial ? 0 : K::E, last = other_partial ? 2 * K::E : K::E;
    for (int i = first * threads_of_row + thread_id(); i < last * threads_of_row; i += s.threads) {
        const int which = i / threads_of_row, e = which % K::E, thread = i % threads_of_row;
        const int64_t slice = (int64_t)me.tile * s.slices + thread / s.lanes;
        me.lane = thread % s.lanes;
        float sum = 0.0f;
        for (int row = 0; row < s.rows; row++)
            sum += lds<float>(values + 4 * (which * s.threads + row * threads_of_row + thread));
        if (slice < s.H && is_inside<K>(s, me, 0, e))
            (which < K::E ? partial : other_partial)[me.group * s.D + slice * s.n + index_of<K>(s, me, 0, e)] = sum;
    }
}

/* Wide slices: adds one row's terms of a parameter gradient to the group's partial sum in global memory. */
template <class K>
GT_DEV void add_to_partial(const Shape& s, const Coordinates& me, float* partial, int64_t round, bool is_first,
                           const float (&added)[K::E]) {
    if (!partial) return;
    float* values = partial + me.group * s.D + me.column;
    GT_UNROLL
    for (int e = 0; e < K::E; e++) {
        if (!is_inside<K>(s, me, round, e)) break;
        const auto i = index_of<K>(s, me, round, e);
        values[i] = is_first ? added[e] : values[i] + added[e];
    }
}

} /* namespace norm */
} /* namespace gt */

#endif
