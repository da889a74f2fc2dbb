/* gt/fused/rmsnorm_linear_rows.cuh - the kernels of rmsnorm_linear before and after its products on tensor cores, for
 * rows of whole 16-byte pieces.  gt_fused.cuh and rmsnorm_linear.cuh define the letters.
 *     normalise_kernel   x -> mean and rstd, n          before y = n weight^T; in backward xhat, before G = dy^T xhat
 *     gradient_kernel    x, dn -> dx, xhat              after dn = dy weight, before G
 *     finish_kernel      G -> dweight, dgamma, dbeta    after G
 * fp32 operands of the products are in parts (rmsnorm_linear_parts.cuh).
 * The comment above each kernel states grid, registers, bytes and the order of sums. */
#ifndef GT_FUSED_RMSNORM_LINEAR_ROWS_CUH
#define GT_FUSED_RMSNORM_LINEAR_ROWS_CUH

#include "rmsnorm_linear_parts.cuh"

namespace gt {
namespace rmsnorm_linear {

/* A warp's row of x.  If the row has at most 256 PIECES elements, it is loaded once and kept. */
template <class T>
struct PieceRow {
    const T* x;
    int D;
    bool is_kept; /* v holds the whole row */
    Vec<T, 8> v[PIECES];

    GT_METHOD PieceRow(const Input& in, int64_t m) {
        x = static_cast<const T*>(in.x) + m * in.stride;
        D = (int)in.D;
        is_kept = false;
        for_pieces(
            D <= 256 * PIECES ? D : 0, [&](int d, int i) { load(d, i); }, [](int, int) {});
        is_kept = D <= 256 * PIECES;
    }

    GT_METHOD void load(int d, int i) {
        if (!is_kept) v[i] = load_piece(x + d);
    }

    /* Returns the sum of f(x) over the row.  All lanes get the same sum. */
    template <class Function>
    GT_METHOD float sum(Function f) {
        float sum = 0.0f;
        for_pieces(
            D, [&](int d, int i) { load(d, i); },
            [&](int, int i) {
                GT_UNROLL
                for (int e = 0; e < 8; e++) sum += f(v[i].get(e));
            });
        return warp_sum(sum);
    }
};

/* Loads parameter[d ... d + 7].  If the parameter is NULL, all 8 elements are `missing`. */
GT_DEV void load_8(float (&to)[8], const float* parameter, int d, float missing) {
    GT_UNROLL
    for (int i = 0; i < 8; i += 4) {
        Vec<float, 4> four = {{missing, missing, missing, missing}};
        if (parameter) four = ldg<Vec<float, 4>>(parameter + d + i);
        GT_UNROLL
        for (int j = 0; j < 4; j++) to[i + j] = four.get(j);
    }
}

/* ---- rmsnorm_linear: n, or xhat --------------------------------------------------------------
 * grid: ceil(M/8).  Block: 256, a warp for each row.
 * bytes: x and out once.  Rows of more than 1024 elements are read again from the L1 cache, once (RMS) or three times
 * (LAYER).
 * registers: 4 loaded pieces.  No shared memory.
 * A lane sums its elements in order, then a butterfly adds the lanes, so sums are deterministic. */
struct NormaliseParams {
    Input in;        /* with gamma = beta = NULL, n is xhat */
    int has_moments; /* 1: reads in.moments; 0: computes and stores in.moments */
    void* out;       /* n or xhat, [M,D]; fp32: in parts */
};

template <class T>
GT_KERNEL(32 * ROW_WARPS, sizeof(T) == 2 ? 4 : 2)
normalise_kernel(const GT_GRID_CONSTANT NormaliseParams p) {
    wait_for_chain();
    const Input& in = p.in;
    const int64_t m = (int64_t)block_x() * ROW_WARPS + warp_id();
    if (m >= in.M) return;
    const int D = (int)in.D;
    PieceRow<T> row(in, m);
    const Moments s = p.has_moments ? ldg<Moments>(in.moments + m) : moments_of(row, in);
    if (!p.has_moments && lane_id() == 0) stg(in.moments + m, s);
    PartOf<T>* out = static_cast<PartOf<T>*>(p.out) + m * D;
    for_pieces(
        D, [&](int d, int i) { row.load(d, i); },
        [&](int d, int i) {
            float gamma[8], beta[8], n[8];
            load_8(gamma, in.gamma, d, 1.0f);
            load_8(beta, in.beta, d, 0.0f);
            GT_UNROLL
            for (int e = 0; e < 8; e++) n[e] = fma_rn(xhat_of(s, row.v[i].get(e)), gamma[e], beta[e]);
            store_operand<T>(out + d, in.M * D, n);
        });
}

/* ---- rmsnorm_linear: dx, and xhat -------------------------------------------------------------
 * dx = rstd (dxhat - mean(dxhat) - xhat mean(dxhat . xhat)), dxhat = dn . gamma; RMSNorm leaves out mean(dxhat).
 * grid, block and order of sums: as normalise_kernel.
 * bytes: x and dn once; dx, and xhat if wanted.  Rows of more than 1024 elements are read again from the L1 cache.
 * registers: 4 pieces of x and of dn, two sums.  No shared memory. */
struct GradientParams {
    Input in;
    const void* dn;      /* [M,D] */
    void* xhat;          /* [M,D], fp32 in parts; 16 bits: overwrites dn */
    const float* scales; /* scales of dn in fp16, one for 64 adjacent columns of a row */
    void* dx;
    int64_t dx_stride;
    int wants_xhat;
};

template <class T>
GT_KERNEL(32 * ROW_WARPS, sizeof(T) == 2 ? 3 : 2)
gradient_kernel(const GT_GRID_CONSTANT GradientParams p) {
    wait_for_chain();
    const Input& in = p.in;
    const int64_t m = (int64_t)block_x() * ROW_WARPS + warp_id();
    if (m >= in.M) return;
    const int D = (int)in.D;
    const T* x = static_cast<const T*>(in.x) + m * in.stride;
    const T* from = static_cast<const T*>(p.dn) + m * D;
    PartOf<T>* to = static_cast<PartOf<T>*>(p.xhat) + m * D;
    T* dx = static_cast<T*>(p.dx) + m * p.dx_stride;
    const float* scales = p.scales + m * ((D + 63) / 64);
    const Moments s = ldg<Moments>(in.moments + m);
    Vec<T, 8> v[PIECES], dn[PIECES];
    float xhat[8], dxhat[8], mean = 0.0f, slope = 0.0f; /* mean(dxhat), mean(dxhat . xhat) */
    bool is_kept = false;                               /* registers hold the whole row */
    const auto load = [&](int d, int i) {
        if (is_kept) return;
        v[i] = load_piece(x + d);
        dn[i] = load_piece(from + d);
    };
    const auto unpack = [&](int d, int i) {
        float gamma[8], scale = 1.0f;
        load_8(gamma, in.gamma, d, 1.0f);
        if constexpr (std::is_same<T, f16>::value) scale = scales[d / 64];
        GT_UNROLL
        for (int e = 0; e < 8; e++) {
            xhat[e] = xhat_of(s, v[i].get(e));
            dxhat[e] = dn[i].get(e) * scale * gamma[e];
        }
    };
    for_pieces(D, load, [&](int d, int i) {
        unpack(d, i);
        GT_UNROLL
        for (int e = 0; e < 8; e++) {
            mean += dxhat[e];
            slope = fma_rn(dxhat[e], xhat[e], slope);
        }
    });
    mean = in.norm == GT_NORM_RMS ? 0.0f : warp_sum(mean) / (float)D;
    slope = warp_sum(slope) / (float)D;
    is_kept = D <= 256 * PIECES;
    for_pieces(D, load, [&](int d, int i) {
        unpack(d, i);
        GT_UNROLL
        for (int e = 0; e < 8; e++) dxhat[e] = s.rstd * (dxhat[e] - mean - xhat[e] * slope);
        store_piece(dx + d, dxhat);
        if (p.wants_xhat) store_operand<T>(to + d, in.M * D, xhat);
    });
}

/* ---- rmsnorm_linear: dweight, dgamma and dbeta from G -----------------------------------------
 * G = dy^T xhat comes in slices; each slice is the sum over some of the M rows.
 * grid: (blocks of rows of weight) * ceil(D/128), tiles of 128 columns fastest.  A block has 8 warps.  A warp takes 128
 * columns of one row, a lane 4 of them.
 * shared memory: 8 KB, the warps' sums for dgamma and dbeta.
 * registers: 4 columns of 8 slices of G, of gamma and beta, and of two sums.
 * bytes: the slices of G once; weight once if dgamma or dbeta is wanted; dweight once, or twice if it accumulates.
 * The slices are added in order, then a warp's rows in order, then the warps, so sums are deterministic. */
struct FinishParams {
    const float* parts; /* the slices of G, [slices,O,D] */
    int64_t slices;
    const void* weight;
    const float *gamma, *beta;
    const float* dbias;    /* [O]; needed if beta or dbeta is not NULL */
    float* dweight;        /* [O,D], or NULL */
    float *dgamma, *dbeta; /* partial sums [blocks of rows,D], or NULL */
    int O, D, accumulate;
    int rows; /* rows of a warp */
};

constexpr int SLICES_AT_ONCE = 8;

/* Adds up the sums of 8 warps for the lane's columns d ... d + 3.  Stores the totals in row `block` of `partials`.
 * values: address of the warps' sums. */
GT_DEV void store_finished(float* partials, uint32_t values, int64_t block, int D, int d) {
    if (!partials || d >= D) return;
    Vec<float, 4> sum = {};
    for (int i = 0; i < ROW_WARPS; i++) {
        const auto added = lds<Vec<float, 4>>(values + 16 * (32 * i + lane_id()));
        GT_UNROLL
        for (int e = 0; e < 4; e++) sum.word[e] += added.word[e];
    }
    stg(partials + block * D + d, sum);
}

template <class T>
GT_KERNEL(32 * ROW_WARPS, 3)
finish_kernel(const GT_GRID_CONSTANT FinishParams p) {
    wait_for_chain();
    const int tiles = (p.D + 127) / 128, d = block_x() % tiles * 128 + 4 * lane_id();
    const int64_t block = block_x() / tiles;
    const bool wants_sums = p.dgamma || p.dbeta;
    Vec<float, 4> gamma = {{1.0f, 1.0f, 1.0f, 1.0f}}, beta = {}, dgamma = {}, dbeta = {};
    if (d < p.D && p.gamma) gamma = ldg<Vec<float, 4>>(p.gamma + d);
    if (d < p.D && p.beta) beta = ldg<Vec<float, 4>>(p.beta + d);
    for (int row = 0; row < p.rows; row++) {
        const int64_t o = (block * p.rows + row) * ROW_WARPS + warp_id();
        if (o >= p.O || d >= p.D) break;
        const int64_t element = o * p.D + d, size = (int64_t)p.O * p.D;
        Vec<float, 4> g = {}, slices[SLICES_AT_ONCE];
        for (int64_t slice = 0; slice < p.slices; slice += SLICES_AT_ONCE) {
            GT_UNROLL
            for (int i = 0; i < SLICES_AT_ONCE; i++)
                if (slice + i < p.slices) slices[i] = ldg<Vec<float, 4>>(p.parts + (slice + i) * size + element);
            GT_UNROLL
            for (int i = 0; i < 4 * SLICES_AT_ONCE; i++)
                if (slice + i / 4 < p.slices) g.word[i % 4] += slices[i / 4].word[i % 4];
        }
        const float dbias = p.dbias ? p.dbias[o] : 0.0f;
        if (wants_sums) {
            const auto weight = ldg<Vec<T, 4>>(static_cast<const T*>(p.weight) + element);
            GT_UNROLL
            for (int e = 0; e < 4; e++) {
                dgamma.word[e] = fma_rn(weight.get(e), g.word[e], dgamma.word[e]);
                dbeta.word[e] = fma_rn(weight.get(e), dbias, dbeta.word[e]);
            }
        }
        GT_UNROLL
        for (int e = 0; e < 4; e++) g.word[e] = fma_rn(g.word[e], gamma.word[e], dbias * beta.word[e]);
        if (p.dweight && p.accumulate) {
            const auto old = ldg<Vec<float, 4>>(p.dweight + element);
            GT_UNROLL
            for (int e = 0; e < 4; e++) g.word[e] += old.word[e];
        }
        if (p.dweight) stg(p.dweight + element, g);
    }
    if (!wants_sums) return;
    const uint32_t dgammas = smem_base(), dbetas = dgammas + 16 * 32 * ROW_WARPS;
    sts(dgammas + 16 * thread_id(), dgamma);
    sts(dbetas + 16 * thread_id(), dbeta);
    sync_threads();
    if (warp_id() == 0) store_finished(p.dgamma, dgammas, block, p.D, d);
    if (warp_id() == 1) store_finished(p.dbeta, dbetas, block, p.D, d);
}

} /* namespace rmsnorm_linear */
} /* namespace gt */

#endif
