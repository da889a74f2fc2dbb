/* gt/fused/rmsnorm_linear_product.cuh - rmsnorm_linear: the products, for any size.
 *
 * A product is C [M,N] = A B, with a sum over K.  A block computes a tile of BM x 64, from 32 of K at a time.
 * grid: (slices of K) * (tiles of M) * (tiles of N), tiles of N fastest.  Block: 128.
 * 16-bit operands run on tensor cores; a warp computes BM/2 x 32 of the tile.  fp32, small sizes, and bf16 on sm_75 run
 * on fp32 units; a thread computes 8 x 4.
 * shared memory: two stages of both operands, at most 34 KB.  One stage is read while the other is filled from
 * registers, which were loaded before.  For tensor cores tiles have the order of global memory; ldmatrix transposes
 * where needed.  Rows have 16 bytes of padding, so that ldmatrix has no bank conflicts.  For fp32 units k is the
 * slowest index.
 * registers: the thread's results (on tensor cores BM/2, otherwise 32) and 16 to 32 for loads of the next stage.
 * bytes: A is read N/64 times and B M/BM times, mostly from the L2 cache.
 * K is summed in order, and reduce_rows adds the slices of K in order, so sums are deterministic. */
#ifndef GT_FUSED_RMSNORM_LINEAR_PRODUCT_CUH
#define GT_FUSED_RMSNORM_LINEAR_PRODUCT_CUH

#include "rmsnorm_linear.cuh"

namespace gt {
namespace rmsnorm_linear {

enum Product { OUTPUT, DNORM, DWEIGHT }; /* y, dn, dweight */

constexpr int THREADS = 128;
constexpr int BN = 64, BK = 32;

/* A matrix in memory, [rows, columns]. */
struct Operand {
    const void* data;
    int64_t stride, rows, columns;
    bool is_aligned; /* whether rows and base are aligned to 16 bytes */
};

struct ProductParams {
    Operand a, b;
    Input in;                    /* x is A of OUTPUT and B of DWEIGHT; kernels normalise it */
    bool parameters_are_aligned; /* whether gamma and beta are aligned to 16 bytes */
    void* out;
    int64_t out_stride;
    bool out_is_aligned; /* whether rows and base are aligned to two elements */
    const float* bias;
    int accumulate;
    int64_t M, N, K;
    int64_t slice; /* extent of a slice of K, a multiple of BK; each slice has its own output [M,N] */
    int64_t tiles_m, tiles_n, slices;
};

/* A thread's part of ROWS x COLUMNS of an operand, in registers on the way from global to shared memory. */
template <class T, int ROWS, int COLUMNS>
struct Tile {
    static constexpr int CHUNK = 16 / sizeof(T);
    static constexpr int ACROSS = COLUMNS / CHUNK, STEP = THREADS / ACROSS;
    static constexpr int COUNT = ROWS / STEP; /* chunks (16 bytes) of a thread, all in one column */
    Vec<T, CHUNK> chunk[COUNT];

    GT_DEV int row(int i) { return thread_id() / ACROSS + STEP * i; }
    GT_DEV int column() { return thread_id() % ACROSS * CHUNK; }
};

template <class T, Product P, bool TENSOR, int ROWS_OF_TILE>
struct ProductTraits {
    typedef T Type;
    typedef typename std::conditional<P == OUTPUT, T, float>::type Out;
    static constexpr Product PRODUCT = P;
    static constexpr bool USES_TENSOR_CORES = TENSOR;
    static constexpr int BM = ROWS_OF_TILE, MT = BM / 32, NT = 4;        /* a warp has MT x NT tiles of 16 x 8 */
    static constexpr bool A_IS_KM = P == DWEIGHT, B_IS_KN = P != OUTPUT; /* A is [K,M], B is [K,N] in memory */
    typedef Tile<T, A_IS_KM ? BK : BM, A_IS_KM ? BM : BK> TileA;
    typedef Tile<T, B_IS_KN ? BK : BN, B_IS_KN ? BN : BK> TileB;
    /* PITCH: elements from row to row in shared memory.  BYTES: bytes of an operand in a stage. */
    static constexpr int PITCH_A = !TENSOR ? BM + 4 : (A_IS_KM ? BM : BK) + 8;
    static constexpr int PITCH_B = !TENSOR ? BN + 4 : (B_IS_KN ? BN : BK) + 8;
    static constexpr int BYTES_A = !TENSOR ? 4 * BK * PITCH_A : 2 * (A_IS_KM ? BK : BM) * PITCH_A;
    static constexpr int BYTES_B = !TENSOR ? 4 * BK * PITCH_B : 2 * (B_IS_KN ? BK : BN) * PITCH_B;
    static constexpr int STAGE = BYTES_A + BYTES_B, SMEM = 2 * STAGE;
    static constexpr int MIN_BLOCKS = BM == 128 ? 2 : 3; /* most blocks on a multiprocessor without spills */
    static_assert(TENSOR || BM == 64, "128 threads of 8 x 4 results");
};

/* Loads the 16 bytes at [row, column].  Elements beyond the matrix are 0. */
template <class T>
GT_DEV Vec<T, 16 / sizeof(T)> load_chunk(const void* data, int64_t stride, int64_t rows, int64_t columns,
                                         bool is_aligned, int64_t row, int64_t column) {
    constexpr int CHUNK = 16 / sizeof(T);
    const T* from = static_cast<const T*>(data) + row * stride + column;
    const int64_t left = row < rows ? columns - column : 0;
    if (is_aligned && left >= CHUNK) return ldg<Vec<T, CHUNK>>(from);
    T raw[CHUNK];
    GT_UNROLL
    for (int i = 0; i < CHUNK; i++) raw[i] = i < left ? from[i] : T{};
    Vec<T, CHUNK> chunk;
    memcpy(&chunk, raw, sizeof chunk);
    return chunk;
}

template <class T, int ROWS, int COLUMNS>
GT_DEV void load_tile(Tile<T, ROWS, COLUMNS>& tile, const Operand& from, int64_t row0, int64_t column0) {
    GT_UNROLL
    for (int i = 0; i < tile.COUNT; i++)
        tile.chunk[i] = load_chunk<T>(from.data, from.stride, from.rows, from.columns, from.is_aligned,
                                      row0 + tile.row(i), column0 + tile.column());
}

/* Loads parameter[column ...].  Elements beyond the row are 0.  If the parameter is NULL, every element is
 * `missing`. */
template <int COUNT>
GT_DEV void load_parameter(float (&to)[COUNT], const float* parameter, const ProductParams& p, int64_t column,
                           float missing) {
    GT_UNROLL
    for (int i = 0; i < COUNT; i += 4) {
        Vec<float, 4> four = {};
        if (parameter) four = load_chunk<float>(parameter, 0, 1, p.in.D, p.parameters_are_aligned, 0, column + i);
        GT_UNROLL
        for (int j = 0; j < 4; j++) to[i + j] = parameter || column + i + j >= p.in.D ? four.get(j) : missing;
    }
}

/* Stores a chunk, given as fp32, at its place in the shared tile. */
template <class T, bool TENSOR, bool K_IS_FIRST, int PITCH, int CHUNK>
GT_DEV void store_chunk(uint32_t tile, int row, int column, const float (&x)[CHUNK]) {
    if constexpr (TENSOR) {
        Vec<T, CHUNK> chunk;
        chunk.set(x);
        sts(tile + 2 * (row * PITCH + column), chunk);
    } else if constexpr (K_IS_FIRST) {
        GT_UNROLL
        for (int i = 0; i < CHUNK; i += 4) {
            const Vec<float, 4> four = {{x[i], x[i + 1], x[i + 2], x[i + 3]}};
            sts(tile + 4 * (row * PITCH + column + i), four);
        }
    } else {
        GT_UNROLL
        for (int i = 0; i < CHUNK; i++) sts(tile + 4 * ((column + i) * PITCH + row), x[i]);
    }
}

template <class T, bool TENSOR, bool K_IS_FIRST, int PITCH, int ROWS, int COLUMNS>
GT_DEV void store_tile(uint32_t shared, const Tile<T, ROWS, COLUMNS>& tile) {
    constexpr int CHUNK = Tile<T, ROWS, COLUMNS>::CHUNK;
    GT_UNROLL
    for (int i = 0; i < tile.COUNT; i++) {
        if constexpr (TENSOR) {
            sts(shared + 2 * (tile.row(i) * PITCH + tile.column()), tile.chunk[i]);
        } else {
            float x[CHUNK];
            GT_UNROLL
            for (int j = 0; j < CHUNK; j++) x[j] = tile.chunk[i].get(j);
            store_chunk<T, TENSOR, K_IS_FIRST, PITCH>(shared, tile.row(i), tile.column(), x);
        }
    }
}

/* Normalises a tile of x and stores n.  Columns beyond D become 0.  Rows beyond M do not matter: in dweight they are
 * multiplied by zeros of dy, and rows of y beyond M are not stored. */
template <class T, bool TENSOR, bool K_IS_FIRST, int PITCH, int ROWS, int COLUMNS>
GT_DEV void store_normalised(uint32_t shared, const Tile<T, ROWS, COLUMNS>& tile, const ProductParams& p, int64_t row0,
                             int64_t column0) {
    constexpr int CHUNK = Tile<T, ROWS, COLUMNS>::CHUNK;
    float gamma[CHUNK], beta[CHUNK];
    load_parameter(gamma, p.in.gamma, p, column0 + tile.column(), 1.0f);
    load_parameter(beta, p.in.beta, p, column0 + tile.column(), 0.0f);
    GT_UNROLL
    for (int i = 0; i < tile.COUNT; i++) {
        const int64_t m = row0 + tile.row(i);
        Moments s = {};
        if (m < p.in.M) s = ldg<Moments>(p.in.moments + m);
        float x[CHUNK];
        GT_UNROLL
        for (int j = 0; j < CHUNK; j++) x[j] = fma_rn(xhat_of(s, tile.chunk[i].get(j)), gamma[j], beta[j]);
        store_chunk<T, TENSOR, K_IS_FIRST, PITCH>(shared, tile.row(i), tile.column(), x);
    }
}

template <class C>
GT_DEV void load_stage(typename C::TileA& a, typename C::TileB& b, const ProductParams& p, int64_t m0, int64_t n0,
                       int64_t k) {
    load_tile(a, p.a, C::A_IS_KM ? k : m0, C::A_IS_KM ? m0 : k);
    load_tile(b, p.b, C::B_IS_KN ? k : n0, C::B_IS_KN ? n0 : k);
}

template <class C>
GT_DEV void store_stage(uint32_t stage, const typename C::TileA& a, const typename C::TileB& b, const ProductParams& p,
                        int64_t m0, int64_t n0, int64_t k) {
    constexpr bool TENSOR = C::USES_TENSOR_CORES;
    typedef typename C::Type T;
    if constexpr (C::PRODUCT == OUTPUT)
        store_normalised<T, TENSOR, C::A_IS_KM, C::PITCH_A>(stage, a, p, m0, k);
    else
        store_tile<T, TENSOR, C::A_IS_KM, C::PITCH_A>(stage, a);
    if constexpr (C::PRODUCT == DWEIGHT)
        store_normalised<T, TENSOR, C::B_IS_KN, C::PITCH_B>(stage + C::BYTES_A, b, p, k, n0);
    else
        store_tile<T, TENSOR, C::B_IS_KN, C::PITCH_B>(stage + C::BYTES_A, b);
}

/* Stores two neighbouring results of a row. */
template <class C>
GT_DEV void store_results(const ProductParams& p, int64_t slice, int64_t m, int64_t n, float first, float second) {
    typedef typename C::Out Out;
    if (m >= p.M || n >= p.N) return;
    const bool is_pair = n + 1 < p.N;
    const int64_t at = (slice * p.M + m) * p.out_stride + n;
    Out* out = static_cast<Out*>(p.out);
    if constexpr (C::PRODUCT == OUTPUT) {
        if (p.bias) {
            first += p.bias[n];
            if (is_pair) second += p.bias[n + 1];
        }
    } else if constexpr (C::PRODUCT == DWEIGHT) {
        if (p.accumulate) {
            first += out[at];
            if (is_pair) second += out[at + 1];
        }
    }
    if (is_pair && p.out_is_aligned) {
        const float both[2] = {first, second};
        Vec<Out, 2> pair;
        pair.set(both);
        stg(out + at, pair);
        return;
    }
    Element<Out>::store(out, at, first);
    if (is_pair) Element<Out>::store(out, at + 1, second);
}

/* The results of a warp on tensor cores. */
template <class C>
struct WarpResults {
    float c[C::MT][C::NT][4];

    GT_METHOD void clear() {
        GT_UNROLL
        for (int i = 0; i < C::MT * C::NT * 4; i++) c[i / 4 / C::NT][i / 4 % C::NT][i % 4] = 0.0f;
    }

    GT_METHOD void add(uint32_t stage) {
        const int row = warp_id() / 2 * (C::BM / 2), column = warp_id() % 2 * (BN / 2);
        const int matrix = lane_id() / 8, line = lane_id() % 8;
        GT_UNROLL
        for (int k = 0; k < BK; k += 16) {
            uint32_t b[C::NT / 2][4];
            GT_UNROLL
            for (int j = 0; j < C::NT / 2; j++) {
                const int at_k = k + matrix % 2 * 8, at_n = column + 16 * j + matrix / 2 * 8;
                const uint32_t shared = stage + C::BYTES_A;
                if constexpr (C::B_IS_KN)
                    ldmatrix_x4_trans(b[j], shared + 2 * ((at_k + line) * C::PITCH_B + at_n));
                else
                    ldmatrix_x4(b[j], shared + 2 * ((at_n + line) * C::PITCH_B + at_k));
            }
            GT_UNROLL
            for (int i = 0; i < C::MT; i++) {
                const int at_k = k + matrix / 2 * 8, at_m = row + 16 * i + matrix % 2 * 8;
                uint32_t a[4];
                if constexpr (C::A_IS_KM)
                    ldmatrix_x4_trans(a, stage + 2 * ((at_k + line) * C::PITCH_A + at_m));
                else
                    ldmatrix_x4(a, stage + 2 * ((at_m + line) * C::PITCH_A + at_k));
                GT_UNROLL
                for (int j = 0; j < C::NT; j++)
                    mma<typename C::Type>(c[i][j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
            }
        }
    }

    GT_METHOD void store(const ProductParams& p, int64_t slice, int64_t m0, int64_t n0) const {
        const int64_t m = m0 + warp_id() / 2 * (C::BM / 2) + lane_id() / 4;
        const int64_t n = n0 + warp_id() % 2 * (BN / 2) + lane_id() % 4 * 2;
        GT_UNROLL
        for (int i = 0; i < C::MT; i++) {
            GT_UNROLL
            for (int j = 0; j < C::NT; j++) {
                const float(&x)[4] = c[i][j];
                store_results<C>(p, slice, m + 16 * i, n + 8 * j, x[0], x[1]);
                store_results<C>(p, slice, m + 16 * i + 8, n + 8 * j, x[2], x[3]);
            }
        }
    }
};

/* The results of a thread on fp32 units. */
template <class C>
struct ThreadResults {
    float c[8][4];

    GT_METHOD void clear() {
        GT_UNROLL
        for (int i = 0; i < 32; i++) c[i / 4][i % 4] = 0.0f;
    }

    GT_METHOD void add(uint32_t stage) {
        const uint32_t a_at = stage + 4 * (thread_id() / 16 * 8);
        const uint32_t b_at = stage + C::BYTES_A + 4 * (thread_id() % 16 * 4);
        GT_UNROLL
        for (int k = 0; k < BK; k++) {
            const auto a0 = lds<Vec<float, 4>>(a_at + 4 * k * C::PITCH_A);
            const auto a1 = lds<Vec<float, 4>>(a_at + 4 * k * C::PITCH_A + 16);
            const auto b = lds<Vec<float, 4>>(b_at + 4 * k * C::PITCH_B);
            GT_UNROLL
            for (int i = 0; i < 32; i++) {
                const float a = i < 16 ? a0.get(i / 4) : a1.get(i / 4 - 4);
                c[i / 4][i % 4] = fma_rn(a, b.get(i % 4), c[i / 4][i % 4]);
            }
        }
    }

    GT_METHOD void store(const ProductParams& p, int64_t slice, int64_t m0, int64_t n0) const {
        const int64_t m = m0 + thread_id() / 16 * 8, n = n0 + thread_id() % 16 * 4;
        GT_UNROLL
        for (int i = 0; i < 8; i++) {
            store_results<C>(p, slice, m + i, n, c[i][0], c[i][1]);
            store_results<C>(p, slice, m + i, n + 2, c[i][2], c[i][3]);
        }
    }
};

template <class C>
GT_KERNEL(THREADS, C::MIN_BLOCKS)
product_kernel(const GT_GRID_CONSTANT ProductParams p) {
    const int64_t block = block_x(), slice = block / p.tiles_n / p.tiles_m;
    const int64_t m0 = block / p.tiles_n % p.tiles_m * C::BM, n0 = block % p.tiles_n * BN;
    const int64_t first = slice * p.slice, end = first + p.slice < p.K ? first + p.slice : p.K;
    const uint32_t smem = smem_base();
    typename std::conditional<C::USES_TENSOR_CORES, WarpResults<C>, ThreadResults<C>>::type results;
    typename C::TileA a;
    typename C::TileB b;
    results.clear();
    load_stage<C>(a, b, p, m0, n0, first);
    store_stage<C>(smem, a, b, p, m0, n0, first);
    sync_threads();
    uint32_t stage = smem, next = smem + C::STAGE;
    GT_NO_UNROLL
    for (int64_t k = first; k < end; k += BK) {
        const bool has_next = k + BK < end;
        if (has_next) load_stage<C>(a, b, p, m0, n0, k + BK);
        results.add(stage);
        if (has_next) store_stage<C>(next, a, b, p, m0, n0, k + BK);
        sync_threads();
        const uint32_t read = stage;
        stage = next;
        next = read;
    }
    results.store(p, slice, m0, n0);
}

} /* namespace rmsnorm_linear */
} /* namespace gt */

#endif
