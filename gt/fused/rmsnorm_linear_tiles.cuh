/* gt/fused/rmsnorm_linear_tiles.cuh - rmsnorm_linear: products of 16-bit matrices on tensor cores.
 *
 * The kernels compute y, dn and G as C [M,N] = A B, with a sum over K.  A block computes a tile of 128 x 256 or 128 x
 * 128, from 32 of K at a time.  The kernels need compute capability 8.0, and rows that are whole pieces of 16 bytes;
 * rmsnorm_linear_product.cuh serves all other calls.
 *
 * grid: as many blocks as are resident at a time.  Block i takes the tiles i, i + grid, and so on.  A block has 256 or
 * 128 threads, in two rows of warps; a warp computes 64 x 64.  Neighbouring blocks take 8 tiles one below another, then
 * the 8 tiles to the right of these.  So a wave of blocks reads few rows of A and of B.
 * shared memory: 4 or 3 stages of both operands, in the order of global memory.  They take 96 KB for one block a
 * multiprocessor, or 48 KB for two.  A row is 32 of K if k is the last index.  Otherwise it is 128 or 256 of M or N,
 * and ldmatrix transposes.  The 16-byte pieces of a row are swizzled: piece c of row r lies at c ^ (r / 2 % 4) in rows
 * of 64 bytes, and at c ^ (r % 8) in longer rows.  So the 8 rows of an ldmatrix and the 8 pieces of a copy use all 32
 * banks.  cp.async fills the stages, STAGES - 1 ahead of the product.  Copies do not stop at the end of a tile: the
 * next tile's first stages are copied while the current tile is stored.
 * registers: 128 for results, and 64 for operands of two times 16 of K.  So ldmatrix of the next 16 overlaps the
 * products of the current 16.
 * issue slots of a warp for 16 of K: 32 mma, 8 ldmatrix, 3 cp.async with their addresses.  A tensor core of sm_90 needs
 * 206 cycles for these (m16n8k16 at 62 % of 512 FMA a cycle), and two warps share it.
 * shared memory cycles of a block for 16 of K: 256 for ldmatrix and 96 for copies.  Tensor cores take 413 cycles.
 * bytes: A is read N/BN times and B M/128 times, from the L2 cache: 12 KB for each block and 16 of K.
 * A thread stores 16 bytes at a time.  For this, the four lanes that share a row exchange their parts of four 8-column
 * tiles, so that each lane has 8 adjacent results.
 * K is summed in order, and finish_kernel adds the slices of K in order, so sums are deterministic. */
#ifndef GT_FUSED_RMSNORM_LINEAR_TILES_CUH
#define GT_FUSED_RMSNORM_LINEAR_TILES_CUH

#include "rmsnorm_linear_product.cuh"

namespace gt {
namespace rmsnorm_linear {

/* A 16-bit matrix [rows, columns] in memory.  Rows and base are aligned to 16 bytes; columns is a multiple of 8. */
struct Matrix {
    const void* data;
    int64_t stride;
    int rows, columns;
};

struct TilesParams {
    Matrix a, b;
    void* out; /* y and dn have the operands' type, G is fp32 */
    int64_t out_stride;
    const float* bias; /* added to y; may be NULL */
    float* scales;     /* fp16 dn only, [M, N/64 rounded up]: the factor of 64 adjacent columns */
    int M, N, K;
    int slice;                   /* extent of a slice of K, a multiple of BK; each slice has its own output [M,N] */
    int tiles_m, tiles_n, tiles; /* tiles down, tiles across, and tiles of all slices */
    int group;                   /* tiles of a column that blocks take together */
};

constexpr int TILE_K = 32; /* K of a stage */

template <class T, Product P, int ACROSS>
struct TileTraits {
    typedef T Type;
    static constexpr Product PRODUCT = P;
    static constexpr bool A_IS_KM = P == DWEIGHT, B_IS_KN = P != OUTPUT; /* A is [K,M], B is [K,N] in memory */
    static constexpr int WARPS = 2 * ACROSS, THREADS = 32 * WARPS;       /* 2 rows of ACROSS warps */
    static constexpr int BM = 128, BN = 64 * ACROSS, BK = TILE_K;
    static constexpr int STAGES = ACROSS == 4 ? 4 : 3, MIN_BLOCKS = ACROSS == 4 ? 1 : 2;
    static constexpr int BYTES_A = 2 * BM * BK, BYTES_B = 2 * BN * BK, STAGE = BYTES_A + BYTES_B;
    static constexpr int SMEM = STAGES * STAGE;
};

/* Offset of piece `piece` of row `row` in a shared tile with ROW elements a row. */
template <int ROW>
GT_DEV uint32_t swizzled(int row, int piece) {
    return 2 * ROW * row + 16 * (piece ^ (ROW == 32 ? row / 2 % 4 : row % 8));
}

/* A thread's part of the copies of one operand, ROWS x COLUMNS of the matrix at a time. */
template <int THREADS, int ROWS, int COLUMNS>
struct TileCopy {
    static constexpr int ACROSS = COLUMNS / 8, STEP = THREADS / ACROSS, COUNT = ROWS / STEP;
    static_assert(STEP % 8 == 0, "a step must not change the swizzle");
    const uint16_t* from;        /* the thread's first piece in the next tile to be copied */
    int rows_left, columns_left; /* rows and columns of the matrix from that piece on */

    GT_METHOD void start(const Matrix& of, int row0, int column0) {
        const int row = row0 + thread_id() / ACROSS, column = column0 + thread_id() % ACROSS * 8;
        from = static_cast<const uint16_t*>(of.data) + row * of.stride + column;
        rows_left = of.rows - row;
        columns_left = of.columns - column;
    }

    GT_METHOD void copy(const Matrix& of, uint32_t shared) const {
        const uint32_t to = shared + swizzled<COLUMNS>(thread_id() / ACROSS, thread_id() % ACROSS);
        GT_UNROLL
        for (int i = 0; i < COUNT; i++) {
            const bool exists = STEP * i < rows_left && columns_left > 0;
            cp_async<16>(to + 2 * COLUMNS * STEP * i, exists ? from + STEP * i * of.stride : of.data, exists ? 16 : 0);
        }
    }

    GT_METHOD void move_rows(const Matrix& of, int rows) {
        from += rows * of.stride;
        rows_left -= rows;
    }

    GT_METHOD void move_columns(int columns) {
        from += columns;
        columns_left -= columns;
    }
};

/* One of the block's tiles. */
struct TilePlace {
    int m0, n0, slice, first, end; /* k is first ... end - 1 */

    GT_METHOD void set(const TilesParams& p, int tile, int rows, int columns) {
        const int in_slice = p.tiles_m * p.tiles_n;
        slice = tile / in_slice;
        const int at = tile % in_slice, group = at / (p.group * p.tiles_n) * p.group;
        const int left = p.tiles_m - group, high = left < p.group ? left : p.group;
        const int in_group = at - group * p.tiles_n;
        m0 = (group + in_group % high) * rows;
        n0 = in_group / high * columns;
        first = slice * p.slice;
        end = p.slice < p.K - first ? first + p.slice : p.K;
    }
};

/* The block's next copy.  Copies run ahead of the products, into later tiles. */
template <class C>
struct Copies {
    TileCopy<C::THREADS, C::A_IS_KM ? C::BK : C::BM, C::A_IS_KM ? C::BM : C::BK> a;
    TileCopy<C::THREADS, C::B_IS_KN ? C::BK : C::BN, C::B_IS_KN ? C::BN : C::BK> b;
    int tile, left; /* left: k of the tile that are not copied yet */

    GT_METHOD void start(const TilesParams& p, int which) {
        tile = which;
        left = 0;
        if (tile >= p.tiles) return;
        TilePlace at;
        at.set(p, tile, C::BM, C::BN);
        a.start(p.a, C::A_IS_KM ? at.first : at.m0, C::A_IS_KM ? at.m0 : at.first);
        b.start(p.b, C::B_IS_KN ? at.first : at.n0, C::B_IS_KN ? at.n0 : at.first);
        left = at.end - at.first;
    }

    /* Copies the next BK of k to a stage, and commits a group of copies, even if it is empty. */
    GT_METHOD void next(const TilesParams& p, uint32_t stage) {
        if (tile < p.tiles) {
            a.copy(p.a, stage);
            b.copy(p.b, stage + C::BYTES_A);
            if (C::A_IS_KM)
                a.move_rows(p.a, C::BK);
            else
                a.move_columns(C::BK);
            if (C::B_IS_KN)
                b.move_rows(p.b, C::BK);
            else
                b.move_columns(C::BK);
            left -= C::BK;
            if (left <= 0) start(p, tile + grid_x());
        }
        cp_async_commit();
    }
};

/* A warp's operands for 16 of k: 64 of M, 64 of N. */
struct Fragments {
    uint32_t a[4][4], b[4][4];
};

template <class C>
GT_DEV void load_fragments(Fragments& f, uint32_t stage, int k) {
    const int row = warp_id() % 2 * 64, column = warp_id() / 2 * 64;
    const int matrix = lane_id() / 8, line = lane_id() % 8;
    GT_UNROLL
    for (int i = 0; i < 4; i++) {
        const int at_k = k + matrix / 2 * 8, at_m = row + 16 * i + matrix % 2 * 8;
        if constexpr (C::A_IS_KM)
            ldmatrix_x4_trans(f.a[i], stage + swizzled<C::BM>(at_k + line, at_m / 8));
        else
            ldmatrix_x4(f.a[i], stage + swizzled<C::BK>(at_m + line, at_k / 8));
    }
    stage += C::BYTES_A;
    GT_UNROLL
    for (int j = 0; j < 4; j++) {
        const int at_k = k + matrix % 2 * 8, at_n = column + 16 * j + matrix / 2 * 8;
        if constexpr (C::B_IS_KN)
            ldmatrix_x4_trans(f.b[j], stage + swizzled<C::BN>(at_k + line, at_n / 8));
        else
            ldmatrix_x4(f.b[j], stage + swizzled<C::BK>(at_n + line, at_k / 8));
    }
}

/* Transposes 4 x 4 words between four lanes: word t of lane j moves to word j of lane t. */
GT_DEV void transpose_words(uint32_t (&word)[4], int j) {
    GT_UNROLL
    for (int t = 0; t < 4; t += 2) {
        const uint32_t other = shfl_xor(j & 1 ? word[t] : word[t + 1], 1);
        if (j & 1)
            word[t] = other;
        else
            word[t + 1] = other;
    }
    GT_UNROLL
    for (int t = 0; t < 2; t++) {
        const uint32_t other = shfl_xor(j & 2 ? word[t] : word[t + 2], 2);
        if (j & 2)
            word[t] = other;
        else
            word[t + 2] = other;
    }
}

/* A power of two (down) and its inverse (up).  The power scales the largest of 64 adjacent values of a row to about
 * 2^15, so that all of them fit fp16.  scale_of: four lanes share the row; `most` is the largest magnitude of the
 * lane's values. */
struct Scale {
    float down, up;
};

GT_DEV Scale scale_of(float most) {
    most = fmaxf(most, shfl_xor(most, 1));
    most = fmaxf(most, shfl_xor(most, 2));
    const uint32_t exponent = as_uint(fmaxf(most, 0x1p-110f)) >> 23; /* 14 to 254, so the powers below are normal
                                                                      * numbers */
    return {as_float((268 - exponent) << 23), as_float((exponent - 14) << 23)};
}

/* A warp's results: 64 x 64, in tiles of 16 x 8. */
template <class C>
struct TileResults {
    typedef typename C::Type T;
    float c[4][8][4];

    GT_METHOD void clear() {
        GT_UNROLL
        for (int i = 0; i < 128; i++) c[i / 32][i / 4 % 8][i % 4] = 0.0f;
    }

    GT_METHOD void add(const Fragments& f) {
        GT_UNROLL
        for (int i = 0; i < 4; i++) {
            GT_UNROLL
            for (int j = 0; j < 8; j++) mma<T>(c[i][j], f.a[i], f.b[j / 2][j % 2 * 2], f.b[j / 2][j % 2 * 2 + 1]);
        }
    }

    /* Adds bias[n] to column n. */
    GT_METHOD void add_to_columns(const float* bias, int n, int columns) {
        GT_UNROLL
        for (int j = 0; j < 8; j++) {
            GT_UNROLL
            for (int e = 0; e < 2; e++) {
                const int at = n + 8 * j + lane_id() % 4 * 2 + e;
                const float x = at < columns ? bias[at] : 0.0f;
                GT_UNROLL
                for (int i = 0; i < 4; i++) {
                    c[i][j][e] += x;
                    c[i][j][e + 2] += x;
                }
            }
        }
    }

    /* Multiplies 64 adjacent values of each row by their power of two, and stores the power's inverse. */
    GT_METHOD void scale_rows(const TilesParams& p, int m, int n) {
        const int groups = (p.N + 63) / 64;
        GT_UNROLL
        for (int i = 0; i < 8; i++) { /* 8-row halves of the 16-row tiles */
            float most = 0.0f;
            GT_UNROLL
            for (int j = 0; j < 16; j++) most = fmaxf(most, fabsf(c[i / 2][j / 2][i % 2 * 2 + j % 2]));
            const Scale scale = scale_of(most);
            GT_UNROLL
            for (int j = 0; j < 16; j++) c[i / 2][j / 2][i % 2 * 2 + j % 2] *= scale.down;
            const int row = m + 8 * i + lane_id() / 4;
            if (lane_id() % 4 == 0 && row < p.M && n < p.N) p.scales[(int64_t)row * groups + n / 64] = scale.up;
        }
    }

    /* Stores the results in 16 bits, to rows from m on and columns from n on. */
    GT_METHOD void store(const TilesParams& p, int m, int n) const {
        const int j = lane_id() % 4;
        T* out = static_cast<T*>(p.out) + (int64_t)(m + lane_id() / 4) * p.out_stride + n + 8 * j;
        GT_UNROLL
        for (int i = 0; i < 16; i++) { /* blocks of 8 rows by 32 columns */
            const int half = i / 2 % 2, first = i % 2 * 4;
            Vec<uint32_t, 4> four;
            GT_UNROLL
            for (int t = 0; t < 4; t++) {
                const float(&x)[4] = c[i / 4][first + t];
                four.word[t] = Element<T>::pack(x[2 * half], x[2 * half + 1]);
            }
            transpose_words(four.word, j);
            const int row = i / 2 * 8;
            if (m + row + lane_id() / 4 < p.M && n + 8 * first + 8 * j < p.N)
                stg(out + row * p.out_stride + 8 * first, four);
        }
    }

    /* Stores the results as fp32. */
    GT_METHOD void store_sums(const TilesParams& p, int slice, int m, int n) const {
        const int row0 = m + lane_id() / 4, column0 = n + lane_id() % 4 * 2;
        float* out = static_cast<float*>(p.out) + ((int64_t)slice * p.M + row0) * p.out_stride + column0;
        GT_UNROLL
        for (int i = 0; i < 8; i++) {
            GT_UNROLL
            for (int j = 0; j < 8; j++) {
                const float(&x)[4] = c[i / 2][j];
                const Vec<float, 2> pair = {{x[i % 2 * 2], x[i % 2 * 2 + 1]}};
                if (row0 + 8 * i < p.M && column0 + 8 * j < p.N) stg(out + 8 * i * p.out_stride + 8 * j, pair);
            }
        }
    }
};

template <class C>
GT_KERNEL(C::THREADS, C::MIN_BLOCKS)
tiles_kernel(const GT_GRID_CONSTANT TilesParams p) {
#if GT_SM80_KERNELS
    constexpr int STEPS = C::BK / 16, AHEAD = C::STAGES - 1;
    wait_for_chain();
    const uint32_t smem = smem_base();
    Copies<C> copies;
    copies.start(p, block_x());
    for (int i = 0; i < AHEAD; i++) copies.next(p, smem + i * C::STAGE);
    cp_async_wait<AHEAD - 1>();
    sync_threads();
    uint32_t stage = smem, filled = smem + AHEAD * C::STAGE;
    Fragments f[2];
    load_fragments<C>(f[0], stage, 0);
    GT_NO_UNROLL
    for (int tile = block_x(); tile < p.tiles; tile += grid_x()) {
        TilePlace at;
        at.set(p, tile, C::BM, C::BN);
        TileResults<C> results;
        results.clear();
        const bool is_last = p.tiles - tile <= grid_x();
        GT_NO_UNROLL
        for (int left = at.end - at.first; left > 0; left -= C::BK) {
            GT_UNROLL
            for (int s = 0; s < STEPS; s++) {
                if (s < STEPS - 1) {
                    load_fragments<C>(f[(s + 1) % 2], stage, 16 * (s + 1));
                } else { /* after this the next stage has arrived, and no thread reads the current one again */
                    cp_async_wait<AHEAD - 1>();
                    sync_threads();
                    stage = stage == smem + (C::STAGES - 1) * C::STAGE ? smem : stage + C::STAGE;
                    if (!is_last || left > C::BK) load_fragments<C>(f[(s + 1) % 2], stage, 0);
                }
                if (s == 0) {
                    copies.next(p, filled);
                    filled = filled == smem + (C::STAGES - 1) * C::STAGE ? smem : filled + C::STAGE;
                }
                results.add(f[s % 2]);
            }
        }
        at.set(p, tile, C::BM, C::BN); /* computed again, to save registers */
        const int m = at.m0 + warp_id() % 2 * 64, n = at.n0 + warp_id() / 2 * 64;
        if constexpr (C::PRODUCT == DWEIGHT) {
            results.store_sums(p, at.slice, m, n);
        } else {
            if (C::PRODUCT == OUTPUT && p.bias) results.add_to_columns(p.bias, n, p.N);
            if (C::PRODUCT == DNORM && std::is_same<typename C::Type, f16>::value) results.scale_rows(p, m, n);
            results.store(p, m, n);
        }
    }
    cp_async_wait<0>();
#endif
}

} /* namespace rmsnorm_linear */
} /* namespace gt */

#endif
