/* gt_fused.cuh - normalisation fused with its neighbours: rmsnorm_linear, norm_mix, norm_gate.
 *
 * ALL OPERATORS normalise slices v of n elements: rows of x, or the heads of one
 *     xhat = (v - mean(v)) rstd             rstd = 1 / sqrt(mean((v - mean(v))^2) + eps)
 *     dv = rstd (d - mean(d) - xhat mean(d . xhat))                   d = the gradient of xhat
 * where RMSNorm leaves out mean(v) and mean(d).
 *   rmsnorm_linear, v = x:
 *     n = xhat . gamma + beta    y = n weight^T + bias
 *     dn = dy weight             d = dn . gamma             dgamma = sum_m dn . xhat
 *     dbeta = sum_m dn           dweight = dy^T n           dbias = sum_m dy
 *   norm_mix, for both branches alike, v = a or b:
 *     y = residual + gain . xhat + ...      d = dy . gain   dgain = sum_m dy . xhat
 *   norm_gate, with n = xhat . gamma + beta and s = silu(z):
 *     norm first, v = x:      y = n . s     dn = dy . s     dx = dv         ds = dy . n
 *     gate first, v = x . s:  y = n         dn = dy         dx = dv . s     ds = dv . x
 *     d = dn . gamma             dgamma = sum_m dn . xhat   dbeta = sum_m dn
 *
 * NUMERICAL HAZARDS, and what is done about them
 *   - x^2 overflows from 2e19 on.  rmsnorm_linear repeats such a row with x scaled down; the others
 *     keep a second sum of (2^-70 x)^2, which replaces the first where that is beyond 2^126, and
 *     sum d . v with a factor of 2^-32.
 *   - mean(v) is rounded, which shows where v hardly varies: the sum of v - mean corrects it.
 *   - In slices of a few elements nearly all of d cancels in dv: up to 4 they are computed in
 *     double.
 *   - Where D or O is below 32 a result of rmsnorm_linear depends on few elements of n, whose
 *     roundings to 16 bits may all be large: there the products run on fp32 units.
 *
 * This file: what describes the operators (plain C, shared with the stubs and the CPU twins); then
 * rmsnorm_linear, and norm_mix with norm_gate: kernels, launchers, C functions. */
#ifndef GT_FUSED_CUH
#define GT_FUSED_CUH

#include "gt/base/op.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- fields that the operators share --------------------------------------------------------- */

/* The bits of a positive float rise with its value, so one comparison refuses a sign, infinity and
 * NaN, also where the compiler was told that NaN does not exist. */
static gt_status gt_resolve_eps(float *eps) {
    if (*eps == 0) *eps = 1e-5f;
    if (gt_float_bits(*eps) < 0x7f800000u) return GT_OK;
    return gt_fail(GT_ERROR_VALUE, "eps = %g: must be positive and finite, or 0 for 1e-5", *eps);
}

static gt_status gt_resolve_norm(gt_norm norm) {
    return gt_check_range(GT_ERROR_VALUE, "norm", (int)norm, GT_NORM_RMS, GT_NORM_LAYER);
}

/* H slices of a row of D. */
static gt_status gt_resolve_slices(int64_t *H, int64_t D) {
    gt_status status;
    if (*H == 0) *H = 1;
    if ((status = gt_check_range(GT_ERROR_SIZE, "H", *H, 1, GT_MAX_SIZE)) != GT_OK) return status;
    if (D % *H == 0) return GT_OK;
    return gt_fail(GT_ERROR_SIZE, "D = %lld: must be a multiple of H = %lld", (long long)D,
                   (long long)*H);
}

/* ---- rmsnorm_linear: the operator's table ---------------------------------------------------- */

static gt_status gt_rmsnorm_linear_resolve(void *filled, gt_pass pass, gt_dims *dims) {
    gt_rmsnorm_linear_args *a = (gt_rmsnorm_linear_args *)filled;
    gt_status status;
    (void)pass, (void)dims;
    if ((status = gt_resolve_norm(a->norm)) != GT_OK) return status;
    return gt_resolve_eps(&a->eps);
}

#define GT_AT(field) offsetof(gt_rmsnorm_linear_args, field)
GT_API const gt_op *gt_op_rmsnorm_linear(void) {
    static const gt_size sizes[] = {{'M', "M", GT_AT(M), 0},
                                    {'D', "D", GT_AT(D), 1},
                                    {'O', "O", GT_AT(O), 1},
                                    {0, NULL, 0, 0}};
    static const gt_tensor tensors[] = {
        {"x", GT_AT(x), GT_AT(x_stride), "MD", 'x', "II-", NULL},
        {"weight", GT_AT(weight), 0, "OD", 'x', "II-", NULL},
        {"gamma", GT_AT(gamma), 0, "D", 'f', "ii-", NULL},
        {"beta", GT_AT(beta), 0, "D", 'f', "ii-", NULL},
        {"bias", GT_AT(bias), 0, "O", 'f', "i--", NULL},
        {"y", GT_AT(y), GT_AT(y_stride), "MO", 'x', "O--", NULL},
        {"dy", GT_AT(dy), GT_AT(dy_stride), "MO", 'x', "-I-", NULL},
        {"dx", GT_AT(dx), GT_AT(dx_stride), "MD", 'x', "-o-", NULL},
        {"dweight", GT_AT(dweight), 0, "OD", 'f', "-g-", NULL},
        {"dgamma", GT_AT(dgamma), 0, "D", 'f', "-g-", NULL},
        {"dbeta", GT_AT(dbeta), 0, "D", 'f', "-g-", NULL},
        {"dbias", GT_AT(dbias), 0, "O", 'f', "-g-", NULL},
        {NULL, 0, 0, NULL, 0, NULL, NULL}};
    static const gt_op op = {"rmsnorm_linear",
                             sizeof(gt_rmsnorm_linear_args),
                             GT_AT(dtype),
                             0,
                             NULL,
                             GT_AT(accumulate),
                             sizes,
                             tensors,
                             gt_rmsnorm_linear_resolve};
    return &op;
}
#undef GT_AT

/* ---- norm_mix: the operator's table ---------------------------------------------------------- */

static gt_status gt_norm_mix_resolve(void *filled, gt_pass pass, gt_dims *dims) {
    gt_norm_mix_args *a = (gt_norm_mix_args *)filled;
    gt_status status;
    (void)pass, (void)dims;
    if ((status = gt_resolve_slices(&a->H, a->D)) != GT_OK) return status;
    return gt_resolve_eps(&a->eps);
}

#define GT_AT(field) offsetof(gt_norm_mix_args, field)
GT_API const gt_op *gt_op_norm_mix(void) {
    static const gt_size sizes[] = {
        {'M', "M", GT_AT(M), 0}, {'D', "D", GT_AT(D), 1}, {0, NULL, 0, 0}};
    static const gt_tensor tensors[] = {
        {"a", GT_AT(a), GT_AT(a_stride), "MD", 'x', "II-", NULL},
        {"b", GT_AT(b), GT_AT(b_stride), "MD", 'x', "II-", NULL},
        {"gain_a", GT_AT(gain_a), 0, "D", 'f', "ii-", NULL},
        {"gain_b", GT_AT(gain_b), 0, "D", 'f', "ii-", NULL},
        {"residual", GT_AT(residual), GT_AT(residual_stride), "MD", 'x', "i--", NULL},
        {"y", GT_AT(y), GT_AT(y_stride), "MD", 'x', "O--", "residual"},
        {"dy", GT_AT(dy), GT_AT(dy_stride), "MD", 'x', "-I-", NULL},
        {"da", GT_AT(da), GT_AT(da_stride), "MD", 'x', "-o-", NULL},
        {"db", GT_AT(db), GT_AT(db_stride), "MD", 'x', "-o-", NULL},
        {"dgain_a", GT_AT(dgain_a), 0, "D", 'f', "-g-", NULL},
        {"dgain_b", GT_AT(dgain_b), 0, "D", 'f', "-g-", NULL},
        {NULL, 0, 0, NULL, 0, NULL, NULL}};
    static const gt_op op = {"norm_mix", sizeof(gt_norm_mix_args), GT_AT(dtype), 0,
                             NULL,       GT_AT(accumulate),        sizes,        tensors,
                             gt_norm_mix_resolve};
    return &op;
}
#undef GT_AT

/* ---- norm_gate: the operator's table --------------------------------------------------------- */

static gt_status gt_norm_gate_resolve(void *filled, gt_pass pass, gt_dims *dims) {
    gt_norm_gate_args *a = (gt_norm_gate_args *)filled;
    gt_status status;
    (void)dims;
    if ((status = gt_resolve_slices(&a->H, a->D)) || (status = gt_resolve_norm(a->norm)) ||
        (status = gt_check_range(GT_ERROR_VALUE, "gate_first", a->gate_first, 0, 1)) ||
        (status = gt_resolve_eps(&a->eps)))
        return status;
    if (pass == GT_BACKWARD && a->M > 0 && a->dz && !a->z)
        return gt_fail(GT_ERROR_NULL, "z is NULL, but dz is not");
    return GT_OK;
}

#define GT_AT(field) offsetof(gt_norm_gate_args, field)
GT_API const gt_op *gt_op_norm_gate(void) {
    static const gt_size sizes[] = {
        {'M', "M", GT_AT(M), 0}, {'D', "D", GT_AT(D), 1}, {0, NULL, 0, 0}};
    static const gt_tensor tensors[] = {
        {"x", GT_AT(x), GT_AT(x_stride), "MD", 'x', "II-", NULL},
        {"z", GT_AT(z), GT_AT(z_stride), "MD", 'x', "ii-", NULL},
        {"gamma", GT_AT(gamma), 0, "D", 'f', "ii-", NULL},
        {"beta", GT_AT(beta), 0, "D", 'f', "ii-", NULL},
        {"y", GT_AT(y), GT_AT(y_stride), "MD", 'x', "O--", NULL},
        {"dy", GT_AT(dy), GT_AT(dy_stride), "MD", 'x', "-I-", NULL},
        {"dx", GT_AT(dx), GT_AT(dx_stride), "MD", 'x', "-o-", NULL},
        {"dz", GT_AT(dz), GT_AT(dz_stride), "MD", 'x', "-o-", NULL},
        {"dgamma", GT_AT(dgamma), 0, "D", 'f', "-g-", NULL},
        {"dbeta", GT_AT(dbeta), 0, "D", 'f', "-g-", NULL},
        {NULL, 0, 0, NULL, 0, NULL, NULL}};
    static const gt_op op = {"norm_gate", sizeof(gt_norm_gate_args), GT_AT(dtype), 0,
                             NULL,        GT_AT(accumulate),         sizes,        tensors,
                             gt_norm_gate_resolve};
    return &op;
}
#undef GT_AT

#ifdef __cplusplus
} /* extern "C": kernels follow */
#endif

#if defined(__CUDACC__) || defined(GT_EMU)

#include "gt/base/reduce.cuh"

namespace gt {
namespace rmsnorm_linear {

/* ---- rmsnorm_linear: what its kernels share --------------------------------------------------
 * In the words of the top:
 *     moments_kernel   mean and rstd of every row: what `saved` holds
 *     product_kernel   y = n weight^T + bias        dn = dy weight          dweight = dy^T n
 *     row_kernel       dx   = rstd (dxhat - mean(dxhat) - xhat mean(dxhat . xhat))
 *                      with dxhat = dn . gamma; RMSNorm leaves out mean(dxhat)
 *     column_kernel    dgamma = sum_m dn . xhat     dbeta = sum_m dn        dbias = sum_m dy
 * n is never stored: the products normalise x on its way to shared memory, and round it there to
 * the operands' type if they run on tensor cores.  dn is fp32 in the workspace.  All sums have a
 * fixed order. */

/* xhat = (x - center) rstd - offset.  center is the mean rounded to fp32, offset what the rounding
 * took, times rstd: xhat keeps its digits in rows that are far from zero. */
struct alignas(16) Moments {
    float center, rstd, offset, unused;
};

struct Input {
    const void* x;
    int64_t stride, M, D;
    gt_dtype dtype;
    gt_norm norm;
    float eps;
    const float *gamma, *beta;
    Moments* moments;
};

constexpr int ROW_WARPS = 8; /* in a block of the kernels that are not products */
constexpr int AT_ONCE = 8;   /* loads of a thread in flight there */

GT_DEV float xhat_of(Moments s, float x) { return fma_rn(x - s.center, s.rstd, -s.offset); }

/* ---- rmsnorm_linear: mean and rstd -----------------------------------------------------------
 * grid ceil(M/8), block 256: a warp per row.  Reads x once for RMS, three times for LAYER, from the
 * first-level cache but for the first; writes 16 bytes a row.
 * registers: 8 elements as loaded and a sum.  No shared memory.
 * Sums: a lane's elements in order, then a butterfly: deterministic. */

/* Sum over the row of f(x), the same in all lanes. */
template <class Function>
GT_DEV float row_sum(const Input& in, int64_t m, Function f) {
    float sum = 0.0f;
    for (int64_t d = lane_id(); d < in.D; d += 32 * AT_ONCE) {
        float x[AT_ONCE];
        load_column(x, in.x, in.dtype, m * in.stride + d, 32, (in.D - d + 31) / 32);
        GT_UNROLL
        for (int i = 0; i < AT_ONCE; i++) sum += d + 32 * i < in.D ? f(x[i]) : 0.0f;
    }
    return warp_sum(sum);
}

/* Of the row times scale, a power of two: its mean as the sum of center and rest, and the sum of
 * squared distances from it. */
struct ScaledMoments {
    float center, rest, square;
};

GT_DEV ScaledMoments scaled_moments(const Input& in, int64_t m, float scale) {
    const float count = (float)in.D;
    ScaledMoments s = {0.0f, 0.0f, 0.0f};
    if (in.norm == GT_NORM_LAYER) {
        s.center = row_sum(in, m, [=](float x) { return x * scale; }) / count;
        s.rest = row_sum(in, m, [=](float x) { return x * scale - s.center; }) / count;
    }
    s.square = row_sum(in, m, [=](float x) {
        const float distance = x * scale - s.center - s.rest;
        return distance * distance;
    });
    return s;
}

GT_KERNEL(32 * ROW_WARPS, 1) moments_kernel(const GT_GRID_CONSTANT Input in) {
    const int64_t m = (int64_t)block_x() * ROW_WARPS + warp_id();
    if (m >= in.M) return;
    float scale = 1.0f;
    ScaledMoments s = scaled_moments(in, m, scale);
    if (!(s.square < INFINITY)) { /* squares or the sum overflow, but the result need not */
        scale = 0x1p-80f;
        s = scaled_moments(in, m, scale);
    }
    const float eps = fmaxf(in.eps * scale * scale, 0x1p-126f);
    const float rstd = 1.0f / sqrtf(s.square / (float)in.D + eps);
    const Moments moments = {s.center / scale, rstd * scale, s.rest * rstd, 0.0f};
    if (lane_id() == 0) stg(in.moments + m, moments);
}

/* ---- rmsnorm_linear: the products ------------------------------------------------------------
 * C [M,N] = A B, K being summed over, in tiles of BM x 64, 32 of K at a time.
 * grid: tiles of N fastest, tiles of M, slices of K; block 128.
 * 16-bit operands run on tensor cores, a warp computing BM/2 x 32 of the tile; fp32, small sizes,
 * and bf16 on sm_75 run on fp32 units, a thread computing 8 x 4.
 * shared: two stages of both operands, one being read while the other is filled from registers,
 *     whose loads were issued before: at most 34 KB.  For tensor cores tiles lie as in memory
 *     (ldmatrix transposes), rows 16 bytes apart more than they are long, which keeps ldmatrix free
 *     of bank conflicts; for fp32 units k comes first.
 * registers: the thread's results (TENSOR: BM/2, else 32) and the loads of the next stage, 16 to
 *     32.
 * bytes: A is read N/64 times and B M/BM times, mostly from the second-level cache.
 * K is summed in order, slices of it by reduce_rows: deterministic. */

enum Product { OUTPUT, DNORM, DWEIGHT }; /* y, dn, dweight */

constexpr int THREADS = 128;
constexpr int BN = 64, BK = 32;

/* A matrix in memory, [rows, columns]. */
struct Operand {
    const void* data;
    int64_t stride, rows, columns;
    bool is_aligned; /* rows and base, to 16 bytes */
};

struct ProductParams {
    Operand a, b;
    Input in; /* normalises A of OUTPUT, B of DWEIGHT */
    bool parameters_are_aligned; /* gamma and beta, to 16 bytes */
    void* out;
    int64_t out_stride;
    bool out_is_aligned; /* rows and base, to two elements */
    const float* bias;
    int accumulate;
    int64_t M, N, K;
    int64_t slice; /* of K, a multiple of BK; each has an output of its own, [M,N] */
    int64_t tiles_m, tiles_n, slices;
};

/* ROWS x COLUMNS of an operand on their way to shared memory. */
template <class T, int ROWS, int COLUMNS>
struct Tile {
    static constexpr int CHUNK = 16 / sizeof(T);
    static constexpr int ACROSS = COLUMNS / CHUNK, STEP = THREADS / ACROSS;
    static constexpr int COUNT = ROWS / STEP; /* chunks of a thread, one below the other */
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
    static constexpr int BM = ROWS_OF_TILE, MT = BM / 32, NT = 4; /* 16 x 8 tiles of a warp */
    static constexpr bool A_IS_KM = P == DWEIGHT, B_IS_KN = P != OUTPUT; /* in memory */
    typedef Tile<T, A_IS_KM ? BK : BM, A_IS_KM ? BM : BK> TileA;
    typedef Tile<T, B_IS_KN ? BK : BN, B_IS_KN ? BN : BK> TileB;
    /* elements from row to row in shared memory, and bytes of an operand */
    static constexpr int PITCH_A = !TENSOR ? BM + 4 : (A_IS_KM ? BM : BK) + 8;
    static constexpr int PITCH_B = !TENSOR ? BN + 4 : (B_IS_KN ? BN : BK) + 8;
    static constexpr int BYTES_A = !TENSOR ? 4 * BK * PITCH_A : 2 * (A_IS_KM ? BK : BM) * PITCH_A;
    static constexpr int BYTES_B = !TENSOR ? 4 * BK * PITCH_B : 2 * (B_IS_KN ? BK : BN) * PITCH_B;
    static constexpr int STAGE = BYTES_A + BYTES_B, SMEM = 2 * STAGE;
    static constexpr int MIN_BLOCKS = BM == 128 ? 2 : 3; /* on a multiprocessor, without spills */
    static_assert(TENSOR || BM == 64, "128 threads of 8 x 4 results");
};

/* The 16 bytes at [row, column]; 0 beyond the matrix. */
template <class T>
GT_DEV Vec<T, 16 / sizeof(T)> load_chunk(const void* data, int64_t stride, int64_t rows,
                                         int64_t columns, bool is_aligned, int64_t row,
                                         int64_t column) {
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
GT_DEV void load_tile(Tile<T, ROWS, COLUMNS>& tile, const Operand& from, int64_t row0,
                      int64_t column0) {
    GT_UNROLL
    for (int i = 0; i < tile.COUNT; i++)
        tile.chunk[i] = load_chunk<T>(from.data, from.stride, from.rows, from.columns,
                                      from.is_aligned, row0 + tile.row(i), column0 + tile.column());
}

/* parameter[column ...], 0 beyond the row, `missing` if it is NULL. */
template <int COUNT>
GT_DEV void load_parameter(float (&to)[COUNT], const float* parameter, const ProductParams& p,
                           int64_t column, float missing) {
    GT_UNROLL
    for (int i = 0; i < COUNT; i += 4) {
        Vec<float, 4> four = {};
        if (parameter)
            four = load_chunk<float>(parameter, 0, 1, p.in.D, p.parameters_are_aligned, 0,
                                     column + i);
        GT_UNROLL
        for (int j = 0; j < 4; j++)
            to[i + j] = parameter || column + i + j >= p.in.D ? four.get(j) : missing;
    }
}

/* One chunk, as fp32, to where it belongs in the shared tile. */
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

/* The same for a tile of x, which becomes n.  Columns beyond D become 0.  Rows beyond M do not
 * matter: they meet zeros of dy, or give rows of y that do not exist. */
template <class T, bool TENSOR, bool K_IS_FIRST, int PITCH, int ROWS, int COLUMNS>
GT_DEV void store_normalised(uint32_t shared, const Tile<T, ROWS, COLUMNS>& tile,
                             const ProductParams& p, int64_t row0, int64_t column0) {
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
        for (int j = 0; j < CHUNK; j++)
            x[j] = fma_rn(xhat_of(s, tile.chunk[i].get(j)), gamma[j], beta[j]);
        store_chunk<T, TENSOR, K_IS_FIRST, PITCH>(shared, tile.row(i), tile.column(), x);
    }
}

template <class C>
GT_DEV void load_stage(typename C::TileA& a, typename C::TileB& b, const ProductParams& p,
                       int64_t m0, int64_t n0, int64_t k) {
    load_tile(a, p.a, C::A_IS_KM ? k : m0, C::A_IS_KM ? m0 : k);
    load_tile(b, p.b, C::B_IS_KN ? k : n0, C::B_IS_KN ? n0 : k);
}

template <class C>
GT_DEV void store_stage(uint32_t stage, const typename C::TileA& a, const typename C::TileB& b,
                        const ProductParams& p, int64_t m0, int64_t n0, int64_t k) {
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

/* Two neighbouring results. */
template <class C>
GT_DEV void store_results(const ProductParams& p, int64_t slice, int64_t m, int64_t n, float first,
                          float second) {
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

/* What a warp of tensor cores computes. */
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

/* What a thread of fp32 units computes. */
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
GT_KERNEL(THREADS, C::MIN_BLOCKS) product_kernel(const GT_GRID_CONSTANT ProductParams p) {
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

/* ---- rmsnorm_linear: dx from dn --------------------------------------------------------------
 * grid ceil(M/8), block 256: a warp per row.  Reads x and dn twice, the second time from the
 * first-level cache, and writes dx.
 * registers: 8 elements of x, dn and gamma as loaded, two sums.  No shared memory.
 * Sums as those of the moments: deterministic. */
struct RowParams {
    Input in;
    const float* dn; /* [M,D] */
    void* dx;
    int64_t dx_stride;
};

/* Up to here, rows are finished in double: in a row of one or two elements almost all of dxhat
 * cancels, and what eps leaves of it has to keep its digits. */
constexpr int SHORT_ROW = 4;

GT_DEV void finish_short_row(const RowParams& p, int64_t m) {
    const Input& in = p.in;
    const int D = (int)in.D;
    const auto x = [&](int d) { return (double)load_as(in.x, in.dtype, m * in.stride + d); };
    const auto dxhat = [&](int d) {
        return (double)p.dn[m * D + d] * (in.gamma ? in.gamma[d] : 1.0f);
    };
    const bool has_mean = in.norm == GT_NORM_LAYER;
    double mean = 0, square = 0, dmean = 0, slope = 0;
    for (int d = 0; d < D; d++) {
        mean += has_mean ? x(d) / D : 0;
        dmean += has_mean ? dxhat(d) / D : 0;
    }
    for (int d = 0; d < D; d++) square += (x(d) - mean) * (x(d) - mean);
    const double rstd = 1 / sqrt(square / D + (double)in.eps);
    for (int d = 0; d < D; d++) slope += dxhat(d) * (x(d) - mean) * rstd / D;
    for (int d = 0; d < D; d++)
        store_as(p.dx, in.dtype, m * p.dx_stride + d,
                 (float)(rstd * (dxhat(d) - dmean - (x(d) - mean) * rstd * slope)));
}

/* Elements d, d + 32, ... of row m; dxhat is 0 beyond the row. */
GT_DEV void load_row(float (&xhat)[AT_ONCE], float (&dxhat)[AT_ONCE], const RowParams& p, Moments s,
                     int64_t m, int64_t d) {
    const int64_t valid = (p.in.D - d + 31) / 32;
    float gamma[AT_ONCE];
    load_column(xhat, p.in.x, p.in.dtype, m * p.in.stride + d, 32, valid);
    load_column(dxhat, p.dn, GT_F32, m * p.in.D + d, 32, valid);
    if (p.in.gamma) load_column(gamma, p.in.gamma, GT_F32, d, 32, valid);
    GT_UNROLL
    for (int i = 0; i < AT_ONCE; i++) {
        xhat[i] = xhat_of(s, xhat[i]);
        if (p.in.gamma) dxhat[i] *= gamma[i];
    }
}

GT_KERNEL(32 * ROW_WARPS, 1) row_kernel(const GT_GRID_CONSTANT RowParams p) {
    const int64_t m = (int64_t)block_x() * ROW_WARPS + warp_id();
    if (m >= p.in.M) return;
    if (p.in.D <= SHORT_ROW) {
        if (lane_id() == 0) finish_short_row(p, m);
        return;
    }
    const Moments s = ldg<Moments>(p.in.moments + m);
    float xhat[AT_ONCE], dxhat[AT_ONCE], mean = 0.0f, slope = 0.0f;
    for (int64_t d = lane_id(); d < p.in.D; d += 32 * AT_ONCE) {
        load_row(xhat, dxhat, p, s, m, d);
        GT_UNROLL
        for (int i = 0; i < AT_ONCE; i++) {
            mean += dxhat[i];
            slope = fma_rn(dxhat[i], xhat[i], slope);
        }
    }
    mean = p.in.norm == GT_NORM_RMS ? 0.0f : warp_sum(mean) / (float)p.in.D;
    slope = warp_sum(slope) / (float)p.in.D;
    for (int64_t d = lane_id(); d < p.in.D; d += 32 * AT_ONCE) {
        load_row(xhat, dxhat, p, s, m, d);
        GT_UNROLL
        for (int i = 0; i < AT_ONCE; i++)
            if (d + 32 * i < p.in.D)
                store_as(p.dx, p.in.dtype, m * p.dx_stride + d + 32 * i,
                         s.rstd * (dxhat[i] - mean - xhat[i] * slope));
    }
}

/* ---- rmsnorm_linear: sums over the rows ------------------------------------------------------
 * Of v [M,C], and of v . xhat if C = D: partial sums of a block of rows, for reduce_rows.
 * grid ceil(C/32) times blocks of rows, block 256 = 8 rows x 32 columns; 2 KB of shared memory.
 * registers: 8 elements of v and x as loaded, two sums.
 * bytes: v once, x once if wanted, 16 a row and tile of columns for the moments.
 * A warp adds its rows in order, then the warps' sums are added in order: deterministic. */
struct ColumnParams {
    const void* v;
    gt_dtype dtype;
    int64_t stride, columns;
    Input in;
    int64_t tiles, rows; /* of columns; of a block */
    float *sums, *dots;  /* [blocks of rows, C]; NULL: not wanted */
};

/* Adds up the cells of the 8 warps and writes the block's partial sum. */
GT_DEV void store_column(float* partials, uint32_t cells, const ColumnParams& p, int64_t block,
                         int64_t c) {
    if (!partials || c >= p.columns) return;
    float sum = 0.0f;
    for (int i = 0; i < ROW_WARPS; i++) sum += lds<float>(cells + 4 * (32 * i + lane_id()));
    partials[block * p.columns + c] = sum;
}

GT_KERNEL(32 * ROW_WARPS, 1) column_kernel(const GT_GRID_CONSTANT ColumnParams p) {
    const int64_t block = block_x() / p.tiles, c = block_x() % p.tiles * 32 + lane_id();
    const int64_t first = block * p.rows;
    const int64_t end = c >= p.columns ? first : first + p.rows < p.in.M ? first + p.rows : p.in.M;
    float sum = 0.0f, dot = 0.0f;
    for (int64_t m = first + warp_id(); m < end; m += ROW_WARPS * AT_ONCE) {
        const int64_t valid = (end - m + ROW_WARPS - 1) / ROW_WARPS;
        float v[AT_ONCE], x[AT_ONCE];
        load_column(v, p.v, p.dtype, m * p.stride + c, ROW_WARPS * p.stride, valid);
        GT_UNROLL
        for (int i = 0; i < AT_ONCE; i++) sum += v[i];
        if (!p.dots) continue;
        load_column(x, p.in.x, p.in.dtype, m * p.in.stride + c, ROW_WARPS * p.in.stride, valid);
        GT_UNROLL
        for (int i = 0; i < AT_ONCE; i++)
            if (i < valid) {
                const Moments s = ldg<Moments>(p.in.moments + m + ROW_WARPS * i);
                dot = fma_rn(v[i], xhat_of(s, x[i]), dot);
            }
    }
    const uint32_t cells = smem_base(), more_cells = cells + 4 * 32 * ROW_WARPS;
    sts<float>(cells + 4 * thread_id(), sum);
    sts<float>(more_cells + 4 * thread_id(), dot);
    sync_threads();
    if (warp_id() == 0) store_column(p.sums, cells, p, block, c);
    if (warp_id() == 1) store_column(p.dots, more_cells, p, block, c);
}

/* ---- rmsnorm_linear: launchers ---------------------------------------------------------------
 * args->cublaslt, with GT_WITH_CUBLASLT, is accepted but not used yet. */

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

static inline bool is_aligned(const void* data, int64_t stride, int64_t element, int64_t bytes) {
    return (uintptr_t)data % (uintptr_t)bytes == 0 && stride * element % bytes == 0;
}

static inline int64_t size_of(gt_dtype dtype) { return dtype == GT_F32 ? 4 : 2; }

static inline Input input_of(const gt_rmsnorm_linear_args& a, Moments* moments) {
    return {a.x, a.x_stride, a.M, a.D, a.dtype, a.norm, a.eps, a.gamma, a.beta, moments};
}

/* Not where a result depends on few elements of n only, whose rounding errors may all be large. */
static inline bool uses_tensor_cores(const gt_rmsnorm_linear_args& a, const Device& device) {
    if (a.D < 32 || a.O < 32) return false;
    return a.dtype == GT_F16 || (a.dtype == GT_BF16 && device.compute_capability >= 80);
}

/* Of tensor cores: large tiles where they still give every multiprocessor work. */
static inline int tile_rows(int64_t M, int64_t N, const Device& device) {
    return ceil_div(M, 128) * ceil_div(N, BN) >= 2 * device.multiprocessors ? 128 : 64;
}

static inline gt_status launch_moments(const Input& in, gt_stream stream) {
    return run("rmsnorm_linear moments_kernel", moments_kernel, ceil_div(in.M, ROW_WARPS),
               32 * ROW_WARPS, 0, stream, in);
}

template <class C>
static gt_status launch_tiles(ProductParams p, gt_stream stream) {
    p.tiles_m = ceil_div(p.M, C::BM);
    p.tiles_n = ceil_div(p.N, BN);
    return run("rmsnorm_linear product_kernel", product_kernel<C>, p.tiles_m * p.tiles_n * p.slices,
               THREADS, C::SMEM, stream, p);
}

template <class T, Product P>
static gt_status launch_product_of(const ProductParams& p, int rows, gt_stream stream) {
    if constexpr (sizeof(T) == 2) {
        if (rows == 128) return launch_tiles<ProductTraits<T, P, true, 128>>(p, stream);
        if (rows == 64) return launch_tiles<ProductTraits<T, P, true, 64>>(p, stream);
    }
    return launch_tiles<ProductTraits<T, P, false, 64>>(p, stream);
}

template <Product P>
static gt_status launch_product(const gt_rmsnorm_linear_args& a, ProductParams p,
                                const Device& device, gt_stream stream) {
    const int64_t size = size_of(a.dtype), out_size = P == OUTPUT ? size : 4;
    p.a.is_aligned = is_aligned(p.a.data, p.a.stride, size, 16);
    p.b.is_aligned = is_aligned(p.b.data, p.b.stride, size, 16);
    p.parameters_are_aligned = is_aligned(a.gamma, 0, 4, 16) && is_aligned(a.beta, 0, 4, 16);
    p.out_is_aligned = is_aligned(p.out, p.out_stride, out_size, 2 * out_size);
    const int rows = uses_tensor_cores(a, device) ? tile_rows(p.M, p.N, device) : 0;
    if (a.dtype == GT_BF16) return launch_product_of<bf16, P>(p, rows, stream);
    if (a.dtype == GT_F16) return launch_product_of<f16, P>(p, rows, stream);
    return launch_product_of<float, P>(p, rows, stream);
}

/* y = n weight^T + bias */
static inline gt_status launch_output(const gt_rmsnorm_linear_args& a, const Input& in,
                                      const Device& device, gt_stream stream) {
    ProductParams p = {};
    p.a = {a.x, a.x_stride, a.M, a.D, false};
    p.b = {a.weight, a.D, a.O, a.D, false};
    p.in = in;
    p.out = a.y;
    p.out_stride = a.y_stride;
    p.bias = a.bias;
    p.M = a.M, p.N = a.O, p.K = a.D;
    p.slices = 1, p.slice = ceil_div(a.D, BK) * BK;
    return launch_product<OUTPUT>(a, p, device, stream);
}

/* dn = dy weight */
static inline gt_status launch_dnorm(const gt_rmsnorm_linear_args& a, const Input& in, float* dn,
                                     const Device& device, gt_stream stream) {
    ProductParams p = {};
    p.a = {a.dy, a.dy_stride, a.M, a.O, false};
    p.b = {a.weight, a.D, a.O, a.D, false};
    p.in = in;
    p.out = dn;
    p.out_stride = a.D;
    p.M = a.M, p.N = a.D, p.K = a.O;
    p.slices = 1, p.slice = ceil_div(a.O, BK) * BK;
    return launch_product<DNORM>(a, p, device, stream);
}

/* Workspace of a backward pass, and how its sums over the rows are cut. */
struct BackwardPlan {
    Moments* moments;
    float* dn;                               /* [M,D] */
    float *dweight, *dbias, *dgamma, *dbeta; /* partial sums, slowest index the cut */
    int64_t slice, slices; /* of dweight: rows of one, and their number */
    int64_t rows, blocks;  /* of the other sums, the same */
    size_t bytes;
};

/* rows, a multiple of `unit`, so that about `wanted` parts of M are made. */
static inline int64_t part_of(int64_t M, int64_t wanted, int64_t unit) {
    return ceil_div(ceil_div(M, wanted > 1 ? wanted : 1), unit) * unit;
}

static inline BackwardPlan plan_backward(const gt_rmsnorm_linear_args& a, const Device& device) {
    BackwardPlan plan = {};
    Arena arena(a.workspace);
    const int64_t rows = uses_tensor_cores(a, device) ? tile_rows(a.O, a.D, device) : 64;
    const int64_t tiles = ceil_div(a.O, rows) * ceil_div(a.D, BN);
    plan.slice = part_of(a.M, 4 * device.multiprocessors / tiles, 4 * BK);
    plan.slices = a.M ? ceil_div(a.M, plan.slice) : 0;
    plan.rows = part_of(a.M, 4 * device.multiprocessors, ROW_WARPS * AT_ONCE);
    plan.blocks = a.M ? ceil_div(a.M, plan.rows) : 0;
    if (!a.saved) plan.moments = arena.take<Moments>(a.M);
    if (a.dx || a.dgamma || a.dbeta) plan.dn = arena.take<float>(a.M * a.D);
    if (a.dweight && plan.slices > 1)
        plan.dweight = arena.take<float>(plan.slices * a.O * a.D);
    if (a.dbias) plan.dbias = arena.take<float>(plan.blocks * a.O);
    if (a.dgamma) plan.dgamma = arena.take<float>(plan.blocks * a.D);
    if (a.dbeta) plan.dbeta = arena.take<float>(plan.blocks * a.D);
    plan.bytes = arena.bytes();
    return plan;
}

/* dweight = dy^T n */
static inline gt_status launch_dweight(const gt_rmsnorm_linear_args& a, const Input& in,
                                       const BackwardPlan& plan, const Device& device,
                                       gt_stream stream) {
    const bool is_whole = plan.slices == 1;
    ProductParams p = {};
    p.a = {a.dy, a.dy_stride, a.M, a.O, false};
    p.b = {a.x, a.x_stride, a.M, a.D, false};
    p.in = in;
    p.out = is_whole ? a.dweight : plan.dweight;
    p.out_stride = a.D;
    p.accumulate = is_whole && a.accumulate;
    p.M = a.O, p.N = a.D, p.K = a.M;
    p.slices = plan.slices, p.slice = plan.slice;
    const gt_status status = launch_product<DWEIGHT>(a, p, device, stream);
    if (status != GT_OK || is_whole) return status;
    return reduce_rows(plan.dweight, a.dweight, plan.slices, a.O * a.D, a.accumulate, stream);
}

static inline gt_status launch_columns(ColumnParams p, const BackwardPlan& plan, gt_stream stream) {
    p.tiles = ceil_div(p.columns, 32);
    p.rows = plan.rows;
    return run("rmsnorm_linear column_kernel", column_kernel, p.tiles * plan.blocks, 32 * ROW_WARPS,
               2 * 4 * 32 * ROW_WARPS, stream, p);
}

static inline gt_status launch_dbias(const gt_rmsnorm_linear_args& a, const Input& in,
                                     const BackwardPlan& plan, gt_stream stream) {
    ColumnParams p = {};
    p.v = a.dy;
    p.dtype = a.dtype;
    p.stride = a.dy_stride, p.columns = a.O;
    p.in = in;
    p.sums = plan.dbias;
    const gt_status status = launch_columns(p, plan, stream);
    if (status != GT_OK) return status;
    return reduce_rows(plan.dbias, a.dbias, plan.blocks, a.O, a.accumulate, stream);
}

static inline gt_status launch_dparameters(const gt_rmsnorm_linear_args& a, const Input& in,
                                           const BackwardPlan& plan, gt_stream stream) {
    ColumnParams p = {};
    p.v = plan.dn;
    p.dtype = GT_F32;
    p.stride = a.D, p.columns = a.D;
    p.in = in;
    p.sums = plan.dbeta;
    p.dots = plan.dgamma;
    gt_status status = launch_columns(p, plan, stream);
    if (status == GT_OK && a.dgamma)
        status = reduce_rows(plan.dgamma, a.dgamma, plan.blocks, a.D, a.accumulate, stream);
    if (status == GT_OK && a.dbeta)
        status = reduce_rows(plan.dbeta, a.dbeta, plan.blocks, a.D, a.accumulate, stream);
    return status;
}

static inline gt_status launch_dx(const gt_rmsnorm_linear_args& a, const Input& in,
                                  const BackwardPlan& plan, gt_stream stream) {
    const RowParams p = {in, plan.dn, a.dx, a.dx_stride};
    return run("rmsnorm_linear row_kernel", row_kernel, ceil_div(a.M, ROW_WARPS), 32 * ROW_WARPS, 0,
               stream, p);
}

static inline gt_status launch_backward(const gt_rmsnorm_linear_args& a, const BackwardPlan& plan,
                                        Moments* saved, const Device& device, gt_stream stream) {
    const Input in = input_of(a, saved ? saved : plan.moments);
    gt_status status = saved ? GT_OK : launch_moments(in, stream);
    if (status == GT_OK && a.dbias) status = launch_dbias(a, in, plan, stream);
    if (status == GT_OK && a.dweight) status = launch_dweight(a, in, plan, device, stream);
    if (status == GT_OK && (a.dx || a.dgamma || a.dbeta))
        status = launch_dnorm(a, in, plan.dn, device, stream);
    if (status == GT_OK && a.dx) status = launch_dx(a, in, plan, stream);
    if (status == GT_OK && (a.dgamma || a.dbeta)) status = launch_dparameters(a, in, plan, stream);
    return status;
}

/* ---- rmsnorm_linear: dispatch and checks ----------------------------------------------------- */

static inline gt_status prepare(gt_pass pass, const gt_rmsnorm_linear_args* args,
                                gt_rmsnorm_linear_args* a, Device* device) {
    gt_dims dims;
    const gt_status status = gt_prepare(gt_op_rmsnorm_linear(), pass, GT_DEVICE, args, a, &dims);
    return status != GT_OK ? status : current_device(device);
}

/* The moments of all rows in a buffer, `saved` or the workspace of forward. */
static inline Moments* moments_in(void* buffer, const gt_rmsnorm_linear_args& a, size_t* bytes) {
    Arena arena(buffer);
    Moments* moments = arena.take<Moments>(a.M);
    *bytes = arena.bytes();
    return moments;
}

static inline gt_status forward(const gt_rmsnorm_linear_args& a, const Device& device,
                                gt_stream stream) {
    size_t bytes;
    const Input in = input_of(a, moments_in(a.saved ? a.saved : a.workspace, a, &bytes));
    gt_status status = a.saved ? check_saved(a.saved, a.saved_bytes, bytes)
                               : check_workspace(a.workspace, a.workspace_bytes, bytes);
    if (status == GT_OK) status = launch_moments(in, stream);
    return status != GT_OK ? status : launch_output(a, in, device, stream);
}

static inline gt_status backward(const gt_rmsnorm_linear_args& a, const Device& device,
                                 gt_stream stream) {
    const BackwardPlan plan = plan_backward(a, device);
    size_t bytes;
    Moments* saved = moments_in(a.saved, a, &bytes);
    gt_status status = check_saved(a.saved, a.saved_bytes, bytes);
    if (status == GT_OK) status = check_workspace(a.workspace, a.workspace_bytes, plan.bytes);
    return status != GT_OK ? status : launch_backward(a, plan, saved, device, stream);
}

} /* namespace rmsnorm_linear */
} /* namespace gt */

/* ---- rmsnorm_linear: the C functions --------------------------------------------------------- */

extern "C" {

GT_API gt_status gt_rmsnorm_linear_forward(const gt_rmsnorm_linear_args* args, gt_stream stream) {
    gt_rmsnorm_linear_args a;
    gt::Device device;
    const gt_status status = gt::rmsnorm_linear::prepare(GT_FORWARD, args, &a, &device);
    return status != GT_OK ? status : gt::rmsnorm_linear::forward(a, device, stream);
}

GT_API gt_status gt_rmsnorm_linear_backward(const gt_rmsnorm_linear_args* args, gt_stream stream) {
    gt_rmsnorm_linear_args a;
    gt::Device device;
    const gt_status status = gt::rmsnorm_linear::prepare(GT_BACKWARD, args, &a, &device);
    return status != GT_OK ? status : gt::rmsnorm_linear::backward(a, device, stream);
}

GT_API gt_status gt_rmsnorm_linear_workspace(const gt_rmsnorm_linear_args* args,
                                             gt_workspace* need) {
    gt_rmsnorm_linear_args a;
    gt::Device device;
    const gt_status status = gt::rmsnorm_linear::prepare(GT_QUERY, args, &a, &device);
    if (status != GT_OK) return status;
    if (!need) return gt_fail(GT_ERROR_NULL, "need is NULL");
    gt_workspace sizes = {0, 0, 0, 0};
    a.workspace = nullptr;
    gt::rmsnorm_linear::moments_in(nullptr, a, &sizes.saved);
    sizes.forward = a.saved ? 0 : sizes.saved;
    sizes.backward = gt::rmsnorm_linear::plan_backward(a, device).bytes;
    *need = sizes;
    return GT_OK;
}

} /* extern "C" */

/* ---- norm_mix and norm_gate: what their kernels share ---------------------------------------- */

namespace gt {
namespace norm {

/* ---- sizes ----------------------------------------------------------------------------------- */

constexpr int ELEMENTS = 8; /* of a slice, in the registers of a thread; TINY in double */
constexpr int MAX_LANES = 512;
constexpr int BLOCK = 256; /* threads, of several slices or of a wide one */
constexpr int TINY = 4;    /* slices so small are computed in double */

/* How a kernel is compiled: elements are Vec<T, VEC>, or of a dtype known at run time (T = Any).
 * WIDE: a slice does not fit into the registers of a block and is read once per pass instead. */
struct Any {};
template <class T_, int VEC_, class Real_ = float, bool WIDE_ = false>
struct Kind {
    using T = T_;
    using Real = Real_;
    using Index = typename std::conditional<WIDE_, int64_t, int>::type; /* within a slice */
    static constexpr int VEC = VEC_, E = std::is_same<Real, double>::value ? TINY : ELEMENTS;
    static constexpr int COUNT = E / VEC;
    static constexpr bool WIDE = WIDE_;
    static constexpr int THREADS = std::is_same<T, Any>::value ? BLOCK : MAX_LANES; /* at most */
    static constexpr int FORWARD_BLOCKS = VEC == 8 ? 2 : 1; /* on a multiprocessor, of THREADS */
    static_assert(E % VEC == 0, "whole vectors");
};

/* How the rows are cut: `lanes` threads (a power of 2) have a slice.  Up to 32 lanes: a block holds
 * some slices of some rows.  More: a block is one slice.  A group of rows goes to the same block,
 * one after another, so that parameters stay in registers. */
struct Shape {
    int64_t M, D, H, n;
    gt_dtype dtype;
    int lanes, slices, rows; /* slices and rows: in a block at a time */
    int threads;
    int64_t tiles, groups, chunks; /* of slices in a row; of rows; of a wide slice */
    float inverse; /* 1 / n */
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

/* Element e of a thread's chunk, within the slice. */
template <class K>
GT_DEV typename K::Index index_of(const Shape& s, const Place& me, int64_t chunk, int e) {
    using Index = typename K::Index;
    const Index vector = ((Index)chunk * K::COUNT + e / K::VEC) * s.lanes + me.lane;
    return vector * K::VEC + e % K::VEC;
}

template <class K>
GT_DEV bool is_inside(const Shape& s, const Place& me, int64_t chunk, int e) {
    return index_of<K>(s, me, chunk, e) < (typename K::Index)s.n;
}

/* A thread's elements as they lie in memory; those outside of the slice are undefined. */
template <class K>
struct Raw {
    Vec<typename K::T, K::VEC> vec[K::COUNT];

    GT_METHOD void load(const Shape& s, const Place& me, const void* data, int64_t stride,
                        int64_t m, int64_t chunk) {
        using T = typename K::T;
        const T* from = static_cast<const T*>(data) + m * stride + me.column;
        GT_UNROLL
        for (int c = 0; c < K::COUNT; c++) {
            const int e = c * K::VEC;
            const auto i = is_inside<K>(s, me, chunk, e) ? index_of<K>(s, me, chunk, e) : 0;
            vec[c] = ldg<Vec<T, K::VEC>>(from + i);
        }
    }
    GT_METHOD float get(int e) const { return vec[e / K::VEC].get(e % K::VEC); }
};

template <int VEC, class Real, bool WIDE>
struct Raw<Kind<Any, VEC, Real, WIDE>> {
    using K = Kind<Any, VEC, Real, WIDE>;
    static_assert(VEC == 1, "elements one by one");
    float value[K::E];

    GT_METHOD void load(const Shape& s, const Place& me, const void* data, int64_t stride,
                        int64_t m, int64_t chunk) {
        const int64_t i = index_of<K>(s, me, chunk, 0);
        load_column(value, data, s.dtype, m * stride + me.column + i, s.lanes,
                    (s.n - i + s.lanes - 1) / s.lanes);
    }
    GT_METHOD float get(int e) const { return value[e]; }
};

template <class K>
GT_DEV void store_elements(const Shape& s, const Place& me, void* data, int64_t stride, int64_t m,
                           int64_t chunk, const typename K::Real (&x)[K::E]) {
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
GT_DEV void load_parameter(const Shape& s, const Place& me, const float* data, float missing,
                           int64_t chunk, float (&to)[K::E]) {
    GT_UNROLL
    for (int e = 0; e < K::E; e++)
        to[e] = data && is_inside<K>(s, me, chunk, e)
                    ? data[me.column + index_of<K>(s, me, chunk, e)]
                    : missing;
}

constexpr int SUMS = 6; /* at most, over a slice at a time */
constexpr int SUM_SMEM = 2 * 4 * SUMS * MAX_LANES / 32;

/* Sums over the lanes of a slice, the same in all of them; all threads of the block.  Two buffers
 * take turns: who writes one again has passed the barrier after it was read. */
template <int N>
GT_DEV void slice_sum(const Shape& s, Place& me, float (&sums)[N]) {
    for (int mask = 1; mask < s.lanes && mask < 32; mask <<= 1) {
        GT_UNROLL
        for (int i = 0; i < N; i++) sums[i] += shfl_xor(sums[i], mask);
    }
    if (s.lanes <= 32) return;
    static_assert(N <= SUMS, "room in a buffer");
    if (lane_id() == 0) {
        GT_UNROLL
        for (int i = 0; i < N; i++) sts<float>(me.buffer + 4 * (SUMS * warp_id() + i), sums[i]);
    }
    sync_threads();
    const bool is_warp = lane_id() < s.lanes / 32;
    GT_UNROLL
    for (int i = 0; i < N; i++)
        sums[i] = is_warp ? lds<float>(me.buffer + 4 * (SUMS * lane_id() + i)) : 0.0f;
    for (int mask = 1; mask < s.lanes / 32; mask <<= 1) {
        GT_UNROLL
        for (int i = 0; i < N; i++) sums[i] += shfl_xor(sums[i], mask);
    }
    GT_UNROLL
    for (int i = 0; i < N; i++) sums[i] = shfl_idx(sums[i], 0);
    me.buffer = me.buffer == smem_base() ? smem_base() + SUM_SMEM / 2 : smem_base();
}

template <int N>
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

/* Sums of a parameter gradient over a block's rows, in order, into row `group` of partial [groups,
 * D]; all threads.  Wide slices add to it as they go, by add_to_partial. */
template <class K>
GT_DEV void store_partial(const Shape& s, Place me, float* partial, const float (&sums)[K::E]) {
    if (!partial || K::WIDE) return;
    const uint32_t cells = smem_base();
    const int threads_of_row = s.lanes * s.slices;
    sync_threads(); /* earlier sums have been read */
    GT_UNROLL
    for (int e = 0; e < K::E; e++)
        sts<float>(cells + 4 * (e * s.threads + thread_id()), sums[e]);
    sync_threads();
    for (int i = thread_id(); i < K::E * threads_of_row; i += s.threads) {
        const int e = i / threads_of_row, thread = i % threads_of_row;
        const int64_t slice = (int64_t)me.tile * s.slices + thread / s.lanes;
        me.lane = thread % s.lanes;
        float sum = 0.0f;
        for (int row = 0; row < s.rows; row++)
            sum += lds<float>(cells + 4 * (e * s.threads + row * threads_of_row + thread));
        if (slice < s.H && is_inside<K>(s, me, 0, e))
            partial[me.group * s.D + slice * s.n + index_of<K>(s, me, 0, e)] = sum;
    }
}

template <class K>
GT_DEV void add_to_partial(const Shape& s, const Place& me, float* partial, int64_t chunk,
                           bool is_first, const float (&added)[K::E]) {
    if (!partial) return;
    float* cells = partial + me.group * s.D + me.column;
    GT_UNROLL
    for (int e = 0; e < K::E; e++) {
        if (!is_inside<K>(s, me, chunk, e)) break;
        const auto i = index_of<K>(s, me, chunk, e);
        cells[i] = is_first ? added[e] : cells[i] + added[e];
    }
}

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

/* ---- norm_gate forward --------------------------------------------------------------------------
 * grid, block, shared memory and order of sums as norm_mix forward.
 * registers: 8 elements of x and z, and gamma and beta.
 * bytes: x, z and y once (wide slices: x and z twice, three times for LayerNorm). */
struct GateParams {
    Shape shape;
    const void *x, *z;
    int64_t x_stride, z_stride;
    const float *gamma, *beta;
    bool is_layer, gate_first;
    float eps;
};

struct GateForwardParams {
    GateParams in;
    void* y;
    int64_t y_stride;
};

/* A thread's part of one row: x and z as loaded, sigmoid(z), and the input v of the norm. */
template <class K>
struct GateRow {
    using Real = typename K::Real;
    Raw<K> x, z;
    float sigmoid_z[K::E];
    Real v[K::E];

    GT_METHOD void load(const GateParams& p, const Place& me, int64_t m, int64_t chunk) {
        x.load(p.shape, me, p.x, p.x_stride, m, chunk);
        if (p.z) z.load(p.shape, me, p.z, p.z_stride, m, chunk);
    }

    /* 16-bit results hide the error of the fast sigmoid */
    GT_METHOD void compute(const GateParams& p) {
        constexpr bool is_16_bit =
            std::is_same<typename K::T, bf16>::value || std::is_same<typename K::T, f16>::value;
        GT_UNROLL
        for (int e = 0; e < K::E; e++) {
            sigmoid_z[e] = !p.z ? 1.0f : is_16_bit ? sigmoid_fast(z.get(e)) : sigmoid(z.get(e));
            v[e] = p.gate_first ? (Real)x.get(e) * gate(p, e) : (Real)x.get(e);
        }
    }

    GT_METHOD void center(Real mean) {
        GT_UNROLL
        for (int e = 0; e < K::E; e++) v[e] -= mean;
    }

    GT_METHOD Real gate(const GateParams& p, int e) const {
        return p.z ? silu_of_sigmoid(z.get(e), sigmoid_z[e]) : 1.0f;
    }
};

/* mean(v) of LayerNorm, else 0; the row is loaded and computed, unless it is wide. */
template <class K>
GT_DEV typename K::Real gate_mean(const GateParams& p, Place& me, GateRow<K>& row, int64_t m,
                                  typename K::Real inverse) {
    const Shape& s = p.shape;
    typename K::Real sum[1] = {};
    if (!p.is_layer) return 0;
    for (int64_t chunk = 0; chunk < (K::WIDE ? s.chunks : 1); chunk++) {
        if (K::WIDE) {
            row.load(p, me, m, chunk);
            row.compute(p);
        }
        GT_UNROLL
        for (int e = 0; e < K::E; e++)
            if (is_inside<K>(s, me, chunk, e)) sum[0] += row.v[e] * inverse;
    }
    slice_sum(s, me, sum);
    return sum[0];
}

template <class K>
GT_KERNEL(K::THREADS, K::FORWARD_BLOCKS)
gate_forward_kernel(const GT_GRID_CONSTANT GateForwardParams p) {
    using Real = typename K::Real;
    const GateParams& in = p.in;
    const Shape& s = in.shape;
    const int64_t chunks = K::WIDE ? s.chunks : 1;
    const Real inverse = inverse_of<Real>(s);
    Place me = place_of(s);
    float gamma[K::E], beta[K::E];
    if (!K::WIDE) {
        load_parameter<K>(s, me, in.gamma, 1.0f, 0, gamma);
        load_parameter<K>(s, me, in.beta, 0.0f, 0, beta);
    }
    for (int64_t first = me.first_row; first < s.M; first += s.groups * s.rows) {
        const bool active = me.exists && first + me.row < s.M;
        const int64_t m = active ? first + me.row : 0;
        GateRow<K> row;
        if (!K::WIDE) {
            row.load(in, me, m, 0);
            row.compute(in);
        }
        const Real mean = gate_mean<K>(in, me, row, m, inverse);
        Real sums[3] = {}; /* of v - mean: as add_square, and plain */
        for (int64_t chunk = 0; chunk < chunks; chunk++) {
            if (K::WIDE) {
                row.load(in, me, m, chunk);
                row.compute(in);
            }
            row.center(mean);
            GT_UNROLL
            for (int e = 0; e < K::E; e++) {
                if (!is_inside<K>(s, me, chunk, e)) continue;
                add_square<Real>(sums, row.v[e]);
                if (in.is_layer) sums[2] += row.v[e] * inverse;
            }
        }
        slice_sum(s, me, sums);
        const Real shift = sums[2], rstd = rstd_of(sums, inverse, shift, in.eps);
        for (int64_t chunk = 0; chunk < chunks && active; chunk++) {
            if (K::WIDE) {
                row.load(in, me, m, chunk);
                row.compute(in);
                row.center(mean);
                load_parameter<K>(s, me, in.gamma, 1.0f, chunk, gamma);
                load_parameter<K>(s, me, in.beta, 0.0f, chunk, beta);
            }
            Real y[K::E];
            GT_UNROLL
            for (int e = 0; e < K::E; e++) {
                y[e] = (row.v[e] - shift) * rstd * gamma[e] + beta[e];
                if (!in.gate_first) y[e] *= row.gate(in, e);
            }
            store_elements<K>(s, me, p.y, p.y_stride, m, chunk, y);
        }
    }
}

/* ---- norm_gate backward -------------------------------------------------------------------------
 * grid, block, shared memory and order of sums as norm_mix backward.
 * registers: 8 elements of x, z and dy, gamma, and the gradients of gamma and beta.
 * bytes: x, z, dy, dx, dz once (wide slices: what is read, twice; for LayerNorm x and z three
 * times). */
struct GateBackwardParams {
    GateParams in;
    const void* dy;
    void *dx, *dz;
    int64_t dy_stride, dx_stride, dz_stride;
    float *dgamma, *dbeta; /* partial sums [groups, D], NULL if not wanted */
};

/* What the sums over a slice amount to; shift: of the mean. */
template <class Real>
struct GateSlice {
    Real shift, rstd, slope, mean_d;
};

/* A chunk: writes dx and dz, adds to dgamma and dbeta; row.v, the v - mean, is lost. */
template <class K>
GT_DEV void gate_chunk(const GateBackwardParams& p, const Place& me, GateRow<K>& row,
                       const Raw<K>& dy, const GateSlice<typename K::Real>& slice, int64_t m,
                       int64_t chunk, const float (&gamma)[K::E], float (&dgamma)[K::E],
                       float (&dbeta)[K::E]) {
    using Real = typename K::Real;
    const GateParams& in = p.in;
    Real out[K::E];
    float beta[K::E]; /* every row again: no registers are left to keep it */
    load_parameter<K>(in.shape, me, in.gate_first || !p.dz ? nullptr : in.beta, 0.0f, chunk, beta);
    GT_UNROLL
    for (int e = 0; e < K::E; e++) {
        const Real xhat = (row.v[e] - slice.shift) * slice.rstd;
        const Real dn = in.gate_first ? (Real)dy.get(e) : dy.get(e) * row.gate(in, e);
        const Real dv = slice.rstd * (dn * gamma[e] - slice.mean_d - xhat * slice.slope);
        dgamma[e] += (float)(dn * xhat);
        dbeta[e] += (float)dn;
        out[e] = in.gate_first ? dv * row.gate(in, e) : dv;
        row.v[e] = in.gate_first ? dv : xhat * gamma[e] + beta[e]; /* the other factor of ds */
    }
    if (p.dx) store_elements<K>(in.shape, me, p.dx, p.dx_stride, m, chunk, out);
    if (!p.dz) return;
    GT_UNROLL
    for (int e = 0; e < K::E; e++) {
        const Real ds = row.v[e] * (in.gate_first ? row.x.get(e) : dy.get(e));
        out[e] = ds * silu_derivative(row.z.get(e), row.sigmoid_z[e]);
    }
    store_elements<K>(in.shape, me, p.dz, p.dz_stride, m, chunk, out);
}

template <class K>
GT_KERNEL(K::THREADS, 1) gate_backward_kernel(const GT_GRID_CONSTANT GateBackwardParams p) {
    using Real = typename K::Real;
    const GateParams& in = p.in;
    const Shape& s = in.shape;
    const int64_t chunks = K::WIDE ? s.chunks : 1;
    const Real inverse = inverse_of<Real>(s);
    Place me = place_of(s);
    float gamma[K::E], dgamma[K::E] = {}, dbeta[K::E] = {};
    if (!K::WIDE) load_parameter<K>(s, me, in.gamma, 1.0f, 0, gamma);
    for (int64_t first = me.first_row; first < s.M; first += s.groups * s.rows) {
        const bool active = me.exists && first + me.row < s.M;
        const int64_t m = active ? first + me.row : 0;
        GateRow<K> row;
        Raw<K> dy;
        if (!K::WIDE) {
            row.load(in, me, m, 0);
            dy.load(s, me, p.dy, p.dy_stride, m, 0);
            row.compute(in);
        }
        GateSlice<Real> slice;
        const Real mean = gate_mean<K>(in, me, row, m, inverse);
        Real sums[5] = {}; /* of v - mean as in forward, its product with d, d */
        for (int64_t chunk = 0; chunk < chunks; chunk++) {
            if (K::WIDE) {
                row.load(in, me, m, chunk);
                dy.load(s, me, p.dy, p.dy_stride, m, chunk);
                row.compute(in);
                load_parameter<K>(s, me, in.gamma, 1.0f, chunk, gamma);
            }
            row.center(mean);
            GT_UNROLL
            for (int e = 0; e < K::E; e++) {
                if (!is_inside<K>(s, me, chunk, e)) continue;
                const Real v = row.v[e];
                const Real dn = in.gate_first ? (Real)dy.get(e) : dy.get(e) * row.gate(in, e);
                const Real d = dn * gamma[e];
                add_square<Real>(sums, v);
                if (in.is_layer) sums[2] += v * inverse;
                sums[3] += d * (v * (Real)PRODUCT_SCALE);
                sums[4] += d;
            }
        }
        slice_sum(s, me, sums);
        slice.shift = sums[2];
        slice.rstd = rstd_of(sums, inverse, slice.shift, in.eps);
        slice.slope = (sums[3] - slice.shift * (Real)PRODUCT_SCALE * sums[4]) * inverse *
                      (slice.rstd * (Real)(1.0f / PRODUCT_SCALE));
        slice.mean_d = in.is_layer ? sums[4] * inverse : 0;
        for (int64_t chunk = 0; chunk < chunks && active; chunk++) {
            if (K::WIDE) {
                row.load(in, me, m, chunk);
                dy.load(s, me, p.dy, p.dy_stride, m, chunk);
                row.compute(in);
                row.center(mean);
                load_parameter<K>(s, me, in.gamma, 1.0f, chunk, gamma);
                GT_UNROLL
                for (int e = 0; e < K::E; e++) dgamma[e] = dbeta[e] = 0.0f;
            }
            gate_chunk<K>(p, me, row, dy, slice, m, chunk, gamma, dgamma, dbeta);
            if (K::WIDE) {
                const bool is_first = first == me.first_row;
                add_to_partial<K>(s, me, p.dgamma, chunk, is_first, dgamma);
                add_to_partial<K>(s, me, p.dbeta, chunk, is_first, dbeta);
            }
        }
    }
    store_partial<K>(s, me, p.dgamma, dgamma);
    store_partial<K>(s, me, p.dbeta, dbeta);
}

/* ---- launchers ------------------------------------------------------------------------------- */

static inline Shape shape_for(int64_t M, int64_t D, int64_t H, gt_dtype dtype, gt_pass pass,
                              const Device& device) {
    Shape s = {};
    s.M = M, s.D = D, s.H = H, s.n = D / H;
    s.dtype = dtype;
    s.inverse = 1.0f / (float)s.n;
    s.lanes = 1;
    while (s.lanes < MAX_LANES && s.lanes * ELEMENTS < s.n) s.lanes *= 2;
    if (s.lanes * ELEMENTS < s.n) s.lanes = BLOCK;
    s.chunks = (s.n + s.lanes * ELEMENTS - 1) / (s.lanes * ELEMENTS);
    s.slices = s.rows = 1;
    if (s.lanes <= 32) {
        const int64_t most = BLOCK / s.lanes; /* slices of a block */
        s.slices = (int)(H < most ? H : most);
        s.rows = (int)(most / s.slices);
    }
    s.threads = (s.lanes * s.slices * s.rows + 31) / 32 * 32;
    s.tiles = (H + s.slices - 1) / s.slices;
    /* backward: few groups, for each has a row of partial sums */
    const int64_t threads = (int64_t)device.multiprocessors * (pass == GT_FORWARD ? 2048 : 1024);
    const int64_t blocks = threads / s.threads, groups = (M + s.rows - 1) / s.rows;
    s.groups = blocks / s.tiles < groups ? blocks / s.tiles : groups;
    if (s.groups == 0 && M > 0) s.groups = 1;
    s.smem = pass == GT_BACKWARD ? 4 * ELEMENTS * s.threads : s.lanes > 32 ? SUM_SMEM : 0;
    return s;
}

/* Whether vectors of 16 bytes can move rows of a tensor; NULL: there is none. */
static inline bool is_aligned(const Shape& s, const void* data, int64_t stride) {
    const int vec = s.dtype == GT_F32 ? 4 : 8;
    return !data ||
           (s.n % vec == 0 && (uintptr_t)data % 16 == 0 && (s.M == 1 || stride % vec == 0));
}

/* Calls launch(kind) for the kind of kernel that fits. */
template <class Launch>
static gt_status with_kind(const Shape& s, bool vectors, Launch launch) {
    if (s.n <= TINY) return launch(Kind<Any, 1, double>());
    if (s.chunks > 1) return launch(Kind<Any, 1, float, true>());
    if (s.dtype == GT_BF16) return vectors ? launch(Kind<bf16, 8>()) : launch(Kind<bf16, 1>());
    if (s.dtype == GT_F16) return vectors ? launch(Kind<f16, 8>()) : launch(Kind<f16, 1>());
    return vectors ? launch(Kind<float, 4>()) : launch(Kind<float, 1>());
}

static inline gt_status launch_mix_forward(const gt_norm_mix_args& a, const Device& device,
                                           gt_stream stream) {
    MixForwardParams p = {};
    p.shape = shape_for(a.M, a.D, a.H, a.dtype, GT_FORWARD, device);
    p.a = a.a, p.b = a.b, p.residual = a.residual, p.y = a.y;
    p.a_stride = a.a_stride, p.b_stride = a.b_stride;
    p.residual_stride = a.residual_stride, p.y_stride = a.y_stride;
    p.gain_a = a.gain_a, p.gain_b = a.gain_b;
    p.eps = a.eps;
    const Shape& s = p.shape;
    const bool vectors = is_aligned(s, a.a, a.a_stride) && is_aligned(s, a.b, a.b_stride) &&
                         is_aligned(s, a.residual, a.residual_stride) &&
                         is_aligned(s, a.y, a.y_stride);
    return with_kind(s, vectors, [&](auto kind) {
        return run("norm_mix forward_kernel", mix_forward_kernel<decltype(kind)>,
                   s.tiles * s.groups, (unsigned)s.threads, (size_t)s.smem, stream, p);
    });
}

/* Partial sums of two parameter gradients, in backward's workspace; NULL if not wanted. */
struct Partials {
    float *first, *second;
    size_t bytes;
};

static inline Partials partials_in(void* workspace, const Shape& s, bool first, bool second) {
    Partials partials = {};
    Arena arena(workspace);
    if (first) partials.first = arena.take<float>(s.groups * s.D);
    if (second) partials.second = arena.take<float>(s.groups * s.D);
    partials.bytes = arena.bytes();
    return partials;
}

static inline gt_status reduce_partials(const Partials& partials, const Shape& s, float* first,
                                        float* second, int accumulate, gt_stream stream) {
    gt_status status = GT_OK;
    if (first) status = reduce_rows(partials.first, first, s.groups, s.D, accumulate, stream);
    if (status == GT_OK && second)
        status = reduce_rows(partials.second, second, s.groups, s.D, accumulate, stream);
    return status;
}

static inline gt_status launch_mix_backward(const gt_norm_mix_args& a, const Shape& s,
                                            const Partials& partials, gt_stream stream) {
    MixBackwardParams p = {};
    p.shape = s;
    p.a = a.a, p.b = a.b, p.dy = a.dy, p.da = a.da, p.db = a.db;
    p.a_stride = a.a_stride, p.b_stride = a.b_stride, p.dy_stride = a.dy_stride;
    p.da_stride = a.da_stride, p.db_stride = a.db_stride;
    p.gain_a = a.gain_a, p.gain_b = a.gain_b;
    p.dgain_a = partials.first, p.dgain_b = partials.second;
    p.eps = a.eps;
    const bool vectors = is_aligned(s, a.a, a.a_stride) && is_aligned(s, a.b, a.b_stride) &&
                         is_aligned(s, a.dy, a.dy_stride) && is_aligned(s, a.da, a.da_stride) &&
                         is_aligned(s, a.db, a.db_stride);
    const gt_status status = with_kind(s, vectors, [&](auto kind) {
        return run("norm_mix backward_kernel", mix_backward_kernel<decltype(kind)>,
                   s.tiles * s.groups, (unsigned)s.threads, (size_t)s.smem, stream, p);
    });
    if (status != GT_OK) return status;
    return reduce_partials(partials, s, a.dgain_a, a.dgain_b, a.accumulate, stream);
}

static inline GateParams gate_params_of(const gt_norm_gate_args& a, const Shape& s) {
    GateParams p = {};
    p.shape = s;
    p.x = a.x, p.z = a.z;
    p.x_stride = a.x_stride, p.z_stride = a.z_stride;
    p.gamma = a.gamma, p.beta = a.beta;
    p.is_layer = a.norm == GT_NORM_LAYER;
    p.gate_first = a.gate_first;
    p.eps = a.eps;
    return p;
}

static inline gt_status launch_gate_forward(const gt_norm_gate_args& a, const Device& device,
                                            gt_stream stream) {
    const Shape s = shape_for(a.M, a.D, a.H, a.dtype, GT_FORWARD, device);
    const GateForwardParams p = {gate_params_of(a, s), a.y, a.y_stride};
    const bool vectors = is_aligned(s, a.x, a.x_stride) && is_aligned(s, a.z, a.z_stride) &&
                         is_aligned(s, a.y, a.y_stride);
    return with_kind(s, vectors, [&](auto kind) {
        return run("norm_gate forward_kernel", gate_forward_kernel<decltype(kind)>,
                   s.tiles * s.groups, (unsigned)s.threads, (size_t)s.smem, stream, p);
    });
}

static inline gt_status launch_gate_backward(const gt_norm_gate_args& a, const Shape& s,
                                             const Partials& partials, gt_stream stream) {
    GateBackwardParams p = {};
    p.in = gate_params_of(a, s);
    p.dy = a.dy, p.dx = a.dx, p.dz = a.dz;
    p.dy_stride = a.dy_stride, p.dx_stride = a.dx_stride, p.dz_stride = a.dz_stride;
    p.dgamma = partials.first, p.dbeta = partials.second;
    const bool vectors = is_aligned(s, a.x, a.x_stride) && is_aligned(s, a.z, a.z_stride) &&
                         is_aligned(s, a.dy, a.dy_stride) && is_aligned(s, a.dx, a.dx_stride) &&
                         is_aligned(s, a.dz, a.dz_stride);
    const gt_status status = with_kind(s, vectors, [&](auto kind) {
        return run("norm_gate backward_kernel", gate_backward_kernel<decltype(kind)>,
                   s.tiles * s.groups, (unsigned)s.threads, (size_t)s.smem, stream, p);
    });
    if (status != GT_OK) return status;
    return reduce_partials(partials, s, a.dgamma, a.dbeta, a.accumulate, stream);
}

/* ---- dispatch and checks --------------------------------------------------------------------- */

template <class Args>
static gt_status prepare(const gt_op* op, gt_pass pass, const Args* args, Args* a, Device* device) {
    gt_dims dims;
    const gt_status status = gt_prepare(op, pass, GT_DEVICE, args, a, &dims);
    return status != GT_OK ? status : current_device(device);
}

static inline gt_status mix_backward(const gt_norm_mix_args& a, const Device& device,
                                     gt_stream stream) {
    const Shape s = shape_for(a.M, a.D, a.H, a.dtype, GT_BACKWARD, device);
    const Partials partials = partials_in(a.workspace, s, a.dgain_a, a.dgain_b);
    const gt_status status = check_workspace(a.workspace, a.workspace_bytes, partials.bytes);
    return status != GT_OK ? status : launch_mix_backward(a, s, partials, stream);
}

static inline gt_status gate_backward(const gt_norm_gate_args& a, const Device& device,
                                      gt_stream stream) {
    const Shape s = shape_for(a.M, a.D, a.H, a.dtype, GT_BACKWARD, device);
    const Partials partials = partials_in(a.workspace, s, a.dgamma, a.dbeta);
    const gt_status status = check_workspace(a.workspace, a.workspace_bytes, partials.bytes);
    return status != GT_OK ? status : launch_gate_backward(a, s, partials, stream);
}

/* What gt_OP_workspace answers. */
static inline gt_status answer(gt_workspace* need, const Shape& s, bool first, bool second) {
    if (!need) return gt_fail(GT_ERROR_NULL, "need is NULL");
    gt_workspace sizes = {0, 0, 0, 0};
    sizes.backward = partials_in(nullptr, s, first, second).bytes;
    *need = sizes;
    return GT_OK;
}

} /* namespace norm */
} /* namespace gt */

/* ---- norm_mix and norm_gate: the C functions ------------------------------------------------- */

extern "C" {

GT_API gt_status gt_norm_mix_forward(const gt_norm_mix_args* args, gt_stream stream) {
    gt_norm_mix_args a;
    gt::Device device;
    const gt_status status = gt::norm::prepare(gt_op_norm_mix(), GT_FORWARD, args, &a, &device);
    return status != GT_OK ? status : gt::norm::launch_mix_forward(a, device, stream);
}

GT_API gt_status gt_norm_mix_backward(const gt_norm_mix_args* args, gt_stream stream) {
    gt_norm_mix_args a;
    gt::Device device;
    const gt_status status = gt::norm::prepare(gt_op_norm_mix(), GT_BACKWARD, args, &a, &device);
    return status != GT_OK ? status : gt::norm::mix_backward(a, device, stream);
}

GT_API gt_status gt_norm_mix_workspace(const gt_norm_mix_args* args, gt_workspace* need) {
    gt_norm_mix_args a;
    gt::Device device;
    const gt_status status = gt::norm::prepare(gt_op_norm_mix(), GT_QUERY, args, &a, &device);
    if (status != GT_OK) return status;
    return gt::norm::answer(need,
                            gt::norm::shape_for(a.M, a.D, a.H, a.dtype, GT_BACKWARD, device),
                            a.dgain_a, a.dgain_b);
}

GT_API gt_status gt_norm_gate_forward(const gt_norm_gate_args* args, gt_stream stream) {
    gt_norm_gate_args a;
    gt::Device device;
    const gt_status status = gt::norm::prepare(gt_op_norm_gate(), GT_FORWARD, args, &a, &device);
    return status != GT_OK ? status : gt::norm::launch_gate_forward(a, device, stream);
}

GT_API gt_status gt_norm_gate_backward(const gt_norm_gate_args* args, gt_stream stream) {
    gt_norm_gate_args a;
    gt::Device device;
    const gt_status status = gt::norm::prepare(gt_op_norm_gate(), GT_BACKWARD, args, &a, &device);
    return status != GT_OK ? status : gt::norm::gate_backward(a, device, stream);
}

GT_API gt_status gt_norm_gate_workspace(const gt_norm_gate_args* args, gt_workspace* need) {
    gt_norm_gate_args a;
    gt::Device device;
    const gt_status status = gt::norm::prepare(gt_op_norm_gate(), GT_QUERY, args, &a, &device);
    if (status != GT_OK) return status;
    return gt::norm::answer(need,
                            gt::norm::shape_for(a.M, a.D, a.H, a.dtype, GT_BACKWARD, device),
                            a.dgamma, a.dbeta);
}

} /* extern "C" */

#else

/* ---- stubs: this file was compiled without nvcc ---------------------------------------------- */

#ifdef __cplusplus
extern "C" {
#endif

GT_API gt_status gt_rmsnorm_linear_forward(const gt_rmsnorm_linear_args *args, gt_stream stream) {
    (void)args, (void)stream;
    return gt_no_cuda(gt_op_rmsnorm_linear(), GT_FORWARD);
}
GT_API gt_status gt_rmsnorm_linear_backward(const gt_rmsnorm_linear_args *args, gt_stream stream) {
    (void)args, (void)stream;
    return gt_no_cuda(gt_op_rmsnorm_linear(), GT_BACKWARD);
}
GT_API gt_status gt_rmsnorm_linear_workspace(const gt_rmsnorm_linear_args *args,
                                             gt_workspace *need) {
    (void)args, (void)need;
    return gt_no_cuda(gt_op_rmsnorm_linear(), GT_QUERY);
}

GT_API gt_status gt_norm_mix_forward(const gt_norm_mix_args *args, gt_stream stream) {
    (void)args, (void)stream;
    return gt_no_cuda(gt_op_norm_mix(), GT_FORWARD);
}
GT_API gt_status gt_norm_mix_backward(const gt_norm_mix_args *args, gt_stream stream) {
    (void)args, (void)stream;
    return gt_no_cuda(gt_op_norm_mix(), GT_BACKWARD);
}
GT_API gt_status gt_norm_mix_workspace(const gt_norm_mix_args *args, gt_workspace *need) {
    (void)args, (void)need;
    return gt_no_cuda(gt_op_norm_mix(), GT_QUERY);
}

GT_API gt_status gt_norm_gate_forward(const gt_norm_gate_args *args, gt_stream stream) {
    (void)args, (void)stream;
    return gt_no_cuda(gt_op_norm_gate(), GT_FORWARD);
}
GT_API gt_status gt_norm_gate_backward(const gt_norm_gate_args *args, gt_stream stream) {
    (void)args, (void)stream;
    return gt_no_cuda(gt_op_norm_gate(), GT_BACKWARD);
}
GT_API gt_status gt_norm_gate_workspace(const gt_norm_gate_args *args, gt_workspace *need) {
    (void)args, (void)need;
    return gt_no_cuda(gt_op_norm_gate(), GT_QUERY);
}

#ifdef __cplusplus
}
#endif

#endif /* kernels or stubs */

#include "gt_kernels.h" /* the rest of the implementation, if this file is to hold it */

#endif /* GT_FUSED_CUH */
