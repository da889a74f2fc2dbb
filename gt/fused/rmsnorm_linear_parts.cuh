/* gt/fused/rmsnorm_linear_parts.cuh - rmsnorm_linear: 8 elements of a row at a time; fp32 numbers in parts.
 *
 * Tensor cores of compute capability 9.0 get an fp32 number as the sum of three parts, bf16 numbers of 8 bits: hi + mid
 * + lo.  hi is the number rounded to bf16.  mid is the remainder rounded to bf16, and lo the last remainder.  Numbers
 * from 2^-110 on are exact; below, lo and then mid are too small for bf16.  Two numbers in parts have nine products,
 * and the kernels compute six.  The other three are at most 2^-24 of the result, and have either sign.
 * A matrix in parts is three matrices in memory, one after the other, lo first. */
#ifndef GT_FUSED_RMSNORM_LINEAR_PARTS_CUH
#define GT_FUSED_RMSNORM_LINEAR_PARTS_CUH

#include "rmsnorm_linear_sums.cuh"

namespace gt {
namespace rmsnorm_linear {

/* For a matrix of the caller's type T: the number of parts that tensor cores get, and the type of a part. */
template <class T>
constexpr int PARTS = sizeof(T) == 4 ? 3 : 1;
template <class T>
using PartOf = typename std::conditional<sizeof(T) == 4, bf16, T>::type;

/* ---- 8 elements --------------------------------------------------------------------------------- */

template <class T>
GT_DEV Vec<T, 8> load_piece(const T* from) {
    if constexpr (sizeof(T) == 2) {
        return ldg<Vec<T, 8>>(from);
    } else {
        Vec<T, 8> piece;
        GT_UNROLL
        for (int i = 0; i < 8; i += 4) {
            const auto four = ldg<Vec<T, 4>>(from + i);
            GT_UNROLL
            for (int j = 0; j < 4; j++) piece.word[i + j] = four.word[j];
        }
        return piece;
    }
}

template <class T>
GT_DEV void store_piece(T* to, const float (&x)[8]) {
    if constexpr (sizeof(T) == 2) {
        Vec<T, 8> piece;
        piece.set(x);
        stg(to, piece);
    } else {
        GT_UNROLL
        for (int i = 0; i < 8; i += 4) {
            const Vec<T, 4> four = {{x[i], x[i + 1], x[i + 2], x[i + 3]}};
            stg(to + i, four);
        }
    }
}

/* Splits 8 elements into parts and calls store(part, piece) for each part. */
template <class T, class Store>
GT_DEV void for_parts(const float (&x)[8], Store store) {
    if constexpr (PARTS<T> == 1) {
        Vec<T, 8> piece;
        piece.set(x);
        store(0, piece);
    } else {
        float rest[8];
        GT_UNROLL
        for (int e = 0; e < 8; e++) rest[e] = x[e];
        GT_UNROLL
        for (int part = PARTS<T> - 1; part >= 0; part--) {
            float nearest[8];
            GT_UNROLL /* hi of a large number is the largest bf16, not infinity; hi of NaN is finite, mid is NaN */
                for (int e = 0; e < 8; e++) nearest[e] =
                    part == 2 ? fminf(fmaxf(rest[e], -0x1.fep127f), 0x1.fep127f) : rest[e];
            Vec<bf16, 8> piece;
            piece.set(nearest);
            store(part, piece);
            GT_UNROLL
            for (int e = 0; e < 8; e++) rest[e] -= piece.get(e);
        }
    }
}

/* Stores 8 elements in all parts of an operand of tensor cores.  Each part is a matrix of `size` elements. */
template <class T>
GT_DEV void store_operand(PartOf<T>* to, int64_t size, const float (&x)[8]) {
    for_parts<T>(x, [&](int part, const Vec<PartOf<T>, 8>& piece) { stg(to + part * size, piece); });
}

constexpr int PIECES = 4; /* pieces (8 elements) that a lane has in flight */

/* For each of the lane's pieces, with first element d, calls load(d, i) and later f(d, i).  i is the index among pieces
 * that are loaded together; all their loads come before the first f. */
template <class Load, class Function>
GT_DEV void for_pieces(int D, Load load, Function f) {
    for (int first = 8 * lane_id(); first < D; first += 256 * PIECES) {
        GT_UNROLL
        for (int i = 0; i < PIECES; i++)
            if (first + 256 * i < D) load(first + 256 * i, i);
        GT_UNROLL
        for (int i = 0; i < PIECES; i++)
            if (first + 256 * i < D) f(first + 256 * i, i);
    }
}

/* ---- rmsnorm_linear: a matrix in parts -------------------------------------------------------
 * grid: ceil(rows/8).  Block: 256, a warp for each row.
 * bytes per element: 4 read, 6 written.
 * registers: 4 loaded pieces.  No shared memory.  No sums. */
struct SplitParams {
    const float* x;
    int64_t stride, rows;
    int columns;
    bf16* parts; /* [3, rows, columns] */
};

GT_KERNEL(32 * ROW_WARPS, 3) hopper_split_kernel(const GT_GRID_CONSTANT SplitParams p) {
    wait_for_chain();
    const int64_t m = (int64_t)block_x() * ROW_WARPS + warp_id();
    if (m >= p.rows) return;
    Vec<float, 8> v[PIECES];
    for_pieces(
        p.columns, [&](int d, int i) { v[i] = load_piece(p.x + m * p.stride + d); },
        [&](int d, int i) {
            float x[8];
            GT_UNROLL
            for (int e = 0; e < 8; e++) x[e] = v[i].get(e);
            store_operand<float>(p.parts + m * p.columns + d, p.rows * p.columns, x);
        });
}

} /* namespace rmsnorm_linear */
} /* namespace gt */

#endif
