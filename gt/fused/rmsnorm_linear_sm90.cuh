/* gt/fused/rmsnorm_linear_sm90.cuh - rmsnorm_linear: matrix products on compute capability 9.0.
 *
 * wgmma computes y, dn and G as C [M,N] = A B, with a sum over K.  A block computes a tile of 128 x 256 or 128 x 128,
 * from 64 of K at a time.  Operands and results are the same as in rmsnorm_linear_tiles.cuh.  If a tile holds whole
 * rows of dn (D <= 256), one kernel computes dn and dx (hopper_dx_kernel).
 *
 * grid: one block for each multiprocessor.  Block i takes the tiles i, i + grid, and so on.  A block has three
 * warpgroups.  Two of them multiply, 64 rows of the tile each.  A warp of the third loads the tiles of both operands
 * (tile_load).
 * shared memory: 4 or 6 stages of both operands, 48 or 32 KB each, in swizzled panels of 128-byte rows (wgmma.cuh).  If
 * k is the last index in memory, a panel row has 64 elements along K.  Otherwise it has 64 along M or N, and wgmma
 * transposes.  A stage is FULL when its bytes have landed, and EMPTY when both warpgroups have multiplied it.
 * registers: 240.  128 of them hold results.  64 hold the rounded results of the previous tile, which are stored while
 * the first eight stages of the current tile are multiplied (multiply_and_store_tiles).
 * tensor cores: 128 cycles for 64 x 256 x 16, so 1024 cycles for a stage.
 * shared memory cycles of a stage: 640 for reads by wgmma, 384 for writes by loads.
 * bytes: A is read N/256 times and B M/128 times, from the L2 cache: 48 KB for each block and stage.
 * A thread stores 16 bytes at a time, as in rmsnorm_linear_tiles.cuh, or 8 bytes of fp32 results.
 *
 * fp32: operands are in parts (rmsnorm_linear_parts.cuh), and tiles are 128 x 128.  A stage has one part of both
 * operands.  Three stages hold the parts of 64 of K.  The six products come from these stages, so each part is loaded
 * once.  These loads take 32 bytes a clock for each block, as much as one product of 128 x 256.
 * Tensor cores round sums towards zero.  So each sum over 64 of K starts from zero, with the small products first.  The
 * sum is added to the total in fp32 while the next sum is multiplied.  Only the last four accumulations of a sum, hi by
 * hi, are large enough to matter for the rounding; each loses at most 2^-24.
 * registers: 64 results for each of two sums and for the total.
 * tensor cores: 3072 cycles for 64 of K.  Shared memory: 2304 cycles for wgmma and 768 for loads.
 *
 * K is summed in order, and finish_kernel adds the slices of K in order, so sums are deterministic. */
#ifndef GT_FUSED_RMSNORM_LINEAR_SM90_CUH
#define GT_FUSED_RMSNORM_LINEAR_SM90_CUH

#include "../base/bulk.cuh"
#include "../base/ring.cuh"
#include "../base/wgmma.cuh"
#include "rmsnorm_linear_rows.cuh"
#include "rmsnorm_linear_tiles.cuh"

namespace gt {
namespace rmsnorm_linear {

template <class T, Product P, int COLUMNS>
struct HopperTile {
    typedef T Type;
    typedef PartOf<T> Operand;
    static constexpr Product PRODUCT = P;
    static constexpr Major MAJOR_A = P == DWEIGHT ? Major::MN : Major::K, MAJOR_B = P == OUTPUT ? Major::K : Major::MN;
    static constexpr bool IS_SPLIT = PARTS<T> == 3;
    static constexpr int BM = 128, BN = COLUMNS, BK = 64;
    static constexpr int LOADS = IS_SPLIT ? 6 : 1; /* stages that are multiplied together */
    static constexpr int STEP = BK * LOADS / PARTS<T>;
    static constexpr int MULTIPLIERS = 256, THREADS = MULTIPLIERS + 128;
    static constexpr bool STORES_LATE = P != DWEIGHT && !IS_SPLIT; /* 16-bit results: multiply_and_store_tiles */
    static constexpr int BYTES_A = 2 * BM * BK, BYTES_B = 2 * BN * BK, STAGE = BYTES_A + BYTES_B;
    static constexpr int STAGES = BN == 256 ? 4 : 6;
    static constexpr int FULL = STAGES * STAGE, EMPTY = FULL + 8 * STAGES, SMEM = EMPTY + 8 * STAGES;
    using Stages = Ring<STAGES, FULL, EMPTY>;
    static_assert(SMEM <= 227 * 1024, "fits sm_90");
    static_assert(!IS_SPLIT || STAGES == LOADS, "multiply_parts names stages");
};

constexpr int PANEL = 128 * 64; /* bytes of 64 rows of 128 bytes */

/* ---- loads ------------------------------------------------------------------------------------ */

/* A product, with tensor maps of its operands.  A box of a map is one panel of 128-byte rows: EXTENT of M or N by 64 of
 * K, or 64 of K by 64 of M or N. */
struct HopperParams {
    TilesParams tiles;
    TensorMap a, b;
};

template <Major MAJOR, int EXTENT>
static inline TensorShape panels_of(const Matrix& of, int parts = 1) {
    const int64_t part = parts > 1 ? of.rows * of.stride : of.stride;
    return {{of.columns, of.rows, parts}, {of.stride, part}, {64, MAJOR == Major::K ? EXTENT : 64, 1}, true};
}

/* Loads the panels of one part: EXTENT rows or columns from index `mn` on, and 64 elements of K from index `k` on. */
template <Major MAJOR, int EXTENT>
GT_DEV void load_panels(uint32_t to, const TensorMap& from, int mn, int k, int part, uint32_t barrier) {
    if constexpr (MAJOR == Major::K) {
        tile_load(to, from, k, mn, part, barrier);
    } else {
        GT_UNROLL
        for (int i = 0; i < EXTENT / 64; i++) tile_load(to + PANEL * i, from, mn + 64 * i, k, part, barrier);
    }
}

template <class C>
GT_DEV void load_tiles(const TilesParams& p, const TensorMap& a, const TensorMap& b, uint32_t smem) {
    const typename C::Stages ring = {smem};
    RingCursor at_stage(1);
    GT_NO_UNROLL
    for (int tile = block_x(); tile < p.tiles; tile += grid_x()) {
        TilePlace at;
        at.set(p, tile, C::BM, C::BN);
        GT_NO_UNROLL
        for (int i = 0; at.first + i / PARTS<typename C::Type> * C::BK < at.end || i % C::LOADS; i++) {
            const uint32_t stage = smem + at_stage.stage * C::STAGE, full = ring.full_of(at_stage.stage);
            const int k = at.first + i / PARTS<typename C::Type> * C::BK, part = i % PARTS<typename C::Type>;
            mbarrier_wait(ring.empty_of(at_stage.stage), at_stage.parity);
            mbarrier_arrive_expect_warp(full, C::STAGE);
            load_panels<C::MAJOR_A, C::BM>(stage, a, at.m0, k, part, full);
            load_panels<C::MAJOR_B, C::BN>(stage + C::BYTES_A, b, at.n0, k, part, full);
            at_stage.next<C::STAGES>();
        }
    }
}

/* ---- results ---------------------------------------------------------------------------------- */

/* A warp's 16 rows of 64 x 8 TILES results, in the register layout of mma. */
template <class T, int TILES>
struct WarpRows {
    float c[TILES][4];

    /* Adds bias[n] to column n. */
    GT_METHOD void add_to_columns(const float* bias, int n, int columns) {
        GT_UNROLL
        for (int j = 0; j < TILES; j++) {
            const int at = made_here(n) + 8 * j + lane_id() % 4 * 2; /* otherwise the compiler loads all of bias at
                                                                      * once */
            Vec<float, 2> two = {};
            if (at < columns) two = {{bias[at], bias[at + 1]}};
            GT_UNROLL
            for (int e = 0; e < 4; e++) c[j][e] += two.word[e % 2];
        }
    }

    /* Does the same as TileResults::scale_rows. */
    GT_METHOD void scale_rows(const TilesParams& p, int m, int n) {
        const int groups = (p.N + 63) / 64;
        GT_UNROLL
        for (int i = 0; i < TILES / 4; i++) { /* i / 2: 64 columns; i % 2: 8 rows */
            float most = 0.0f;
            GT_UNROLL
            for (int j = 0; j < 16; j++) most = fmaxf(most, fabsf(c[i / 2 * 8 + j / 2][i % 2 * 2 + j % 2]));
            const Scale scale = scale_of(most);
            GT_UNROLL
            for (int j = 0; j < 16; j++) c[i / 2 * 8 + j / 2][i % 2 * 2 + j % 2] *= scale.down;
            const int row = m + i % 2 * 8 + lane_id() / 4, column = n + i / 2 * 64;
            if (lane_id() % 4 == 0 && row < p.M && column < p.N)
                p.scales[(int64_t)row * groups + column / 64] = scale.up;
        }
    }

    /* Stores the results as fp32. */
    GT_METHOD void store_sums(const TilesParams& p, int slice, int m, int n) const {
        const int row0 = m + lane_id() / 4, column0 = n + lane_id() % 4 * 2;
        float* out = static_cast<float*>(p.out) + ((int64_t)slice * p.M + row0) * p.out_stride + column0;
        GT_UNROLL
        for (int j = 0; j < TILES; j++) {
            GT_UNROLL
            for (int half = 0; half < 2; half++) {
                const Vec<float, 2> pair = {{c[j][2 * half], c[j][2 * half + 1]}};
                if (row0 + 8 * half < p.M && column0 + 8 * j < p.N) stg(out + 8 * half * p.out_stride + 8 * j, pair);
            }
        }
    }
};

/* A tile's results, rounded to 16 bits and kept until they are stored. */
template <class T, int TILES>
struct HeldRows {
    uint32_t pair[TILES][2]; /* rows lane / 4 and lane / 4 + 8, 2 columns each */

    GT_METHOD void take(const float (&c)[TILES][4]) {
        GT_UNROLL
        for (int i = 0; i < 2 * TILES; i++)
            pair[i / 2][i % 2] = Element<T>::pack(c[i / 2][i % 2 * 2], c[i / 2][i % 2 * 2 + 1]);
    }

    /* Stores parts first ... end - 1 of the TILES / 2 parts.  A part is 8 rows by 32 columns.  The tile begins at row m
     * and column n of out [rows, columns].  Addresses are computed here, since no registers are left to keep them. */
    GT_METHOD void store(void* out, int64_t stride, int rows, int columns, int m, int n, int first, int end) const {
        const int j = lane_id() % 4;
        GT_UNROLL
        for (int i = 0; i < TILES / 2; i++) {
            if (i < first || i >= end) continue;
            const int half = i % 2, tile = i / 2 * 4;
            Vec<uint32_t, 4> four;
            GT_UNROLL
            for (int t = 0; t < 4; t++) four.word[t] = pair[tile + t][half];
            transpose_words(four.word, j);
            const int row = made_here(m) + 16 * warp_id() + 8 * half + lane_id() / 4;
            const int column = made_here(n) + 8 * tile + 8 * j;
            if (row < rows && column < columns) stg(static_cast<T*>(out) + row * stride + column, four);
        }
    }
};

/* ---- the products ----------------------------------------------------------------------------- */

/* wgmma descriptors of the warpgroup's operands in stage 0. */
template <class C>
struct TileOperands {
    uint64_t a, b;
    GT_METHOD explicit TileOperands(uint32_t smem) {
        a = wgmma_tile<128, C::MAJOR_A>(smem + warp_id() / 4 * PANEL, PANEL);
        b = wgmma_tile<128, C::MAJOR_B>(smem + C::BYTES_A, PANEL);
    }
};

/* A warpgroup's progress through the stages. */
template <class C>
struct Multiplier {
    typedef typename C::Type T;
    typedef WarpRows<T, C::BN / 8> Results;
    TileOperands<C> operands;
    typename C::Stages ring;
    RingCursor at;
    int before; /* the previous stage, whose products may be in flight, or -1 */

    GT_METHOD explicit Multiplier(uint32_t smem) : operands(smem), ring{smem}, at(0), before(-1) {}

    /* Starts the products of a stage.  Then waits for the products of the previous stage and releases that stage. */
    GT_METHOD void step(Results& results, bool is_first) {
        mbarrier_wait(ring.full_of(at.stage), at.parity);
        wgmma_fence();
        const uint64_t a = wgmma_step(operands.a, at.stage * C::STAGE);
        const uint64_t b = wgmma_step(operands.b, at.stage * C::STAGE);
        GT_UNROLL
        for (int k = 0; k < C::BK; k += 16)
            wgmma<T, C::MAJOR_A, C::MAJOR_B>(results.c, wgmma_step(a, k_bytes<128, C::MAJOR_A>(k)),
                                             wgmma_step(b, k_bytes<128, C::MAJOR_B>(k)), k > 0 || !is_first);
        wgmma_commit();
        if (before >= 0) {
            wgmma_wait<1>();
            mbarrier_arrive_warp(ring.empty_of(before));
        }
        before = at.stage;
        at.next<C::STAGES>();
    }

    /* Waits until no product is in flight, and releases the last stage. */
    GT_METHOD void finish() {
        wgmma_wait<0>();
        mbarrier_arrive_warp(ring.empty_of(before));
        before = -1;
    }
};

/* For every tile, calls before_end(place) while the last products run, and then end(results, place). */
template <class C, class BeforeEnd, class End>
GT_DEV void multiply_tiles(const TilesParams& p, uint32_t smem, BeforeEnd before_end, End end) {
    Multiplier<C> multiplier(smem);
    GT_NO_UNROLL
    for (int tile = block_x(); tile < p.tiles; tile += grid_x()) {
        typename Multiplier<C>::Results results;
        TilePlace at;
        at.set(p, tile, C::BM, C::BN);
        if constexpr (ADDS_TO_ZEROS) wgmma_clear(results.c);
        GT_NO_UNROLL
        for (int left = at.end - at.first; left > 0; left -= C::BK)
            multiplier.step(results, !ADDS_TO_ZEROS && multiplier.before < 0);
        before_end(at);
        multiplier.finish();
        wgmma_pin(results.c);
        end(results, at);
    }
}

/* Does the same as multiply_tiles, but rounds a tile's results and stores them during the next tile.  In each of the
 * first eight stages it starts the products, then stores an eighth of the parts.  Storing all results at once would
 * leave the tensor cores idle for 1500 clocks.  A tile takes 34,000 clocks for K = 2048, or 18,000 for K = 1024.  The
 * eight stages have an unrolled loop of their own, because registers cannot be indexed at run time.  Between this loop
 * and the next loop no product is in flight; the other warpgroup multiplies meanwhile. */
template <class C, class End>
GT_DEV void multiply_and_store_tiles(const TilesParams& p, uint32_t smem, End end) {
    constexpr int STEPS = 8, TILES = C::BN / 8, PARTS = TILES / 2 / STEPS;
    static_assert(PARTS * STEPS * 2 == TILES, "every step stores as much");
    Multiplier<C> multiplier(smem);
    HeldRows<typename C::Type, TILES> held;
    int m = p.M, n = 0; /* where held results go; at first nowhere */
    const auto store = [&](int i) { held.store(p.out, p.out_stride, p.M, p.N, m, n, i * PARTS, (i + 1) * PARTS); };
    GT_NO_UNROLL
    for (int tile = block_x(); tile < p.tiles; tile += grid_x()) {
        typename Multiplier<C>::Results results;
        TilePlace at;
        at.set(p, tile, C::BM, C::BN);
        int left = at.end - at.first;
        const bool is_long = left >= STEPS * C::BK;
        if (is_long) {
            GT_UNROLL
            for (int i = 0; i < STEPS; i++) {
                multiplier.step(results, i == 0);
                store(i);
            }
            multiplier.finish();
            left -= STEPS * C::BK;
        } else {
            GT_UNROLL
            for (int i = 0; i < STEPS; i++) store(i);
        }
        if (left > 0) {
            GT_NO_UNROLL
            for (bool is_first = !is_long; left > 0; left -= C::BK, is_first = false)
                multiplier.step(results, is_first);
            multiplier.finish();
        }
        wgmma_pin(results.c);
        m = at.m0, n = at.n0;
        end(results, at);
        held.take(results.c);
    }
    GT_UNROLL
    for (int i = 0; i < STEPS; i++) store(i);
}

/* A warpgroup's sums for operands in parts. */
template <class C>
struct PartSums {
    static constexpr int TILES = C::BN / 8;
    float total[TILES][4], even[TILES][4], odd[TILES][4]; /* the total, and two sums over 64 of K */

    GT_METHOD void clear() {
        GT_UNROLL
        for (int i = 0; i < 4 * TILES; i++) total[i / 4][i % 4] = 0.0f;
    }

    /* Adds a complete sum to the total. */
    GT_METHOD void add(float (&sum)[TILES][4]) {
        wgmma_pin(sum);
        GT_UNROLL
        for (int i = 0; i < 4 * TILES; i++) total[i / 4][i % 4] += sum[i / 4][i % 4];
    }

    /* Starts the products that set `sum` to the sum over 64 of K.  The parts lie in three stages from FIRST on.  Calls
     * then(i) when the last product that reads part i has been started. */
    template <int FIRST, class Then>
    GT_METHOD void multiply(float (&sum)[TILES][4], uint32_t smem, int parity, Then then) {
        const TileOperands<C> operands(smem);
        GT_UNROLL
        for (int i = 0; i < 3; i++) mbarrier_wait(typename C::Stages{smem}.full_of(FIRST + i), parity);
        wgmma_fence();
        GT_UNROLL
        for (int least = 0; least < 3; least++) {
            GT_UNROLL
            for (int i = least; i < 3; i++) {
                const uint64_t a = wgmma_step(operands.a, (FIRST + i) * C::STAGE);
                const uint64_t b = wgmma_step(operands.b, (FIRST + 2 + least - i) * C::STAGE);
                GT_UNROLL
                for (int k = 0; k < C::BK; k += 16)
                    wgmma<bf16, C::MAJOR_A, C::MAJOR_B>(sum, wgmma_step(a, k_bytes<128, C::MAJOR_A>(k)),
                                                        wgmma_step(b, k_bytes<128, C::MAJOR_B>(k)),
                                                        least > 0 || i > 0 || k > 0);
            }
            wgmma_commit();
            then(least);
        }
    }
};

/* Does the same as multiply_tiles for operands in parts.  Between two steps of 128 of K no product is in flight,
 * because otherwise ptxas cannot see that a sum is complete before it is added.  The other warpgroup multiplies
 * meanwhile. */
template <class C, class End>
GT_DEV void multiply_parts(const TilesParams& p, uint32_t smem, End end) {
    const auto release = [&](int stage) { mbarrier_arrive_warp(typename C::Stages{smem}.empty_of(stage)); };
    int parity = 0;
    GT_NO_UNROLL
    for (int tile = block_x(); tile < p.tiles; tile += grid_x()) {
        PartSums<C> sums;
        TilePlace at;
        at.set(p, tile, C::BM, C::BN);
        sums.clear();
        GT_NO_UNROLL
        for (int left = at.end - at.first; left > 0; left -= C::STEP) {
            const uint32_t here = (uint32_t)made_here((int)smem); /* else registers keep addresses of all products */
            sums.template multiply<0>(sums.even, here, parity, [](int) {});
            sums.template multiply<3>(sums.odd, here, parity, [&](int i) {
                wgmma_wait<3>();
                release(i);
            });
            sums.add(sums.even);
            wgmma_wait<2>();
            release(3);
            wgmma_wait<1>();
            release(4);
            wgmma_wait<0>();
            release(5);
            sums.add(sums.odd);
            parity ^= 1;
        }
        WarpRows<typename C::Type, C::BN / 8> results;
        GT_UNROLL
        for (int i = 0; i < C::BN / 2; i++) results.c[i / 4][i % 4] = sums.total[i / 4][i % 4];
        end(results, at);
    }
}

/* Gives the warps their roles: one warp loads, two warpgroups multiply.  The caller has initialised the barriers. */
template <class C, class Load, class Multiply>
GT_DEV void run_loader_and_multipliers(Load load, Multiply multiply) {
    sync_warp();
    fence_async_proxy();
    sync_threads();
    wait_for_chain();
    const int warp = shfl_idx(warp_id(), 0) - C::MULTIPLIERS / 32;
    if (warp >= 0) {
        give_registers<24>();
        if (warp == 0) load();
    } else {
        take_registers<240>();
        multiply();
    }
}

/* Runs a product: one warp loads the tiles, and both multiplying warpgroups run multiply(smem). */
template <class C, class Multiply>
GT_DEV void run_tiles(const TilesParams& p, const TensorMap& a, const TensorMap& b, Multiply multiply) {
    const uint32_t smem = smem_base_of_tiles();
    typename C::Stages{smem}.init(thread_id(), 32, C::MULTIPLIERS);
    run_loader_and_multipliers<C>([&] { load_tiles<C>(p, a, b, smem); }, [&] { multiply(smem); });
}

/* Without sm_90a code this kernel never runs, so its body is empty and its launch bound is one warp. */
template <class C>
GT_KERNEL(GT_SM90A ? C::THREADS : 32, 1)
hopper_tiles_kernel(const GT_GRID_CONSTANT HopperParams params) {
#if GT_SM90A
    typedef typename C::Type T;
    typedef WarpRows<T, C::BN / 8> Results;
    const TilesParams& p = params.tiles;
    run_tiles<C>(p, params.a, params.b, [&](uint32_t smem) {
        if constexpr (C::STORES_LATE) {
            multiply_and_store_tiles<C>(p, smem, [&](Results& results, const TilePlace& at) {
                if (C::PRODUCT == OUTPUT && p.bias) results.add_to_columns(p.bias, at.n0, p.N);
                if (C::PRODUCT == DNORM && std::is_same<T, f16>::value)
                    results.scale_rows(p, at.m0 + 16 * warp_id(), at.n0);
            });
        } else {
            const auto end = [&](Results& results, const TilePlace& at) {
                if (C::PRODUCT == OUTPUT && p.bias) results.add_to_columns(p.bias, at.n0, p.N);
                results.store_sums(p, at.slice, at.m0 + 16 * warp_id(), at.n0);
            };
            if constexpr (C::IS_SPLIT)
                multiply_parts<C>(p, smem, end);
            else
                multiply_tiles<C>(
                    p, smem, [](const TilePlace&) {}, end);
        }
    });
#else
    (void)params;
    __trap();
#endif
}

/* ---- dx from whole rows of dn --------------------------------------------------------------------
 * hopper_dx_kernel computes dn like hopper_tiles_kernel, for D <= 256, where a tile has all columns.  dn stays in
 * registers, in fp32, and becomes dx.  The kernel also stores xhat if it is wanted.
 * registers: 32 more than hopper_tiles_kernel, for 8 of the warp's rows of x.  The first 8 rows are loaded while the
 * last products run. */
struct DxParams {
    HopperParams product;
    GradientParams gradient;
};

/* 8 of a warp's 16 rows of x, in the register layout of mma.  pair[i] holds 2 columns of row lane / 4, from tile i of 8
 * columns. */
template <class T, int TILES>
struct XRows {
    uint32_t pair[TILES];
    Moments s;

    GT_METHOD void load(const Input& in, int m0) {
        const int m = m0 + lane_id() / 4, j = lane_id() % 4;
        const T* x = static_cast<const T*>(in.x) + m * in.stride + 8 * j;
        s = {};
        if (m < in.M) s = ldg<Moments>(in.moments + m);
        GT_UNROLL
        for (int i = 0; i < TILES; i += 4) {
            Vec<uint32_t, 4> four = {};
            if (m < in.M && 8 * i + 8 * j < in.D) four = ldg<Vec<uint32_t, 4>>(x + 8 * i);
            transpose_words(four.word, j);
            GT_UNROLL
            for (int t = 0; t < 4; t++) pair[i + t] = four.word[t];
        }
    }

    GT_METHOD float xhat(int i, int e) const {
        const uint32_t two = (uint32_t)made_here((int)pair[i]); /* otherwise the compiler keeps all xhat */
        return xhat_of(s, e ? Element<T>::hi(two) : Element<T>::lo(two));
    }
};

/* Computes and stores dx, and xhat if it is wanted, of the 8 rows from m0 on.  They are half HALF of the warp's rows of
 * dn. */
template <int HALF, class T, int TILES>
GT_DEV void store_dx(const GradientParams& p, WarpRows<T, TILES>& dn, const XRows<T, TILES>& x, int m0) {
    const int D = (int)p.in.D, j = lane_id() % 4, m = m0 + lane_id() / 4;
    float mean = 0.0f, slope = 0.0f;
    GT_UNROLL
    for (int i = 0; i < TILES; i++) {
        const int d = made_here(2 * j) + 8 * i; /* otherwise the compiler loads gamma for all i at once */
        Vec<float, 2> gamma = {{1.0f, 1.0f}};
        if (p.in.gamma && d < D) gamma = ldg<Vec<float, 2>>(p.in.gamma + d);
        GT_UNROLL
        for (int e = 0; e < 2; e++) {
            float& dxhat = dn.c[i][2 * HALF + e]; /* 0 beyond D */
            dxhat *= gamma.word[e];
            mean += dxhat;
            slope = fma_rn(dxhat, x.xhat(i, e), slope);
        }
    }
    GT_UNROLL
    for (int mask = 1; mask < 4; mask *= 2) {
        mean += shfl_xor(mean, mask);
        slope += shfl_xor(slope, mask);
    }
    mean = p.in.norm == GT_NORM_RMS ? 0.0f : mean / (float)D;
    slope /= (float)D;
    T* dx = static_cast<T*>(p.dx) + m * p.dx_stride + 8 * j;
    T* xhat_rows = static_cast<T*>(p.xhat) + (int64_t)m * D + 8 * j;
    GT_UNROLL
    for (int i = 0; i < TILES; i += 4) {
        Vec<uint32_t, 4> of_dx, of_xhat;
        GT_UNROLL
        for (int t = 0; t < 4; t++) {
            float two[2], xhat[2];
            GT_UNROLL
            for (int e = 0; e < 2; e++) {
                xhat[e] = x.xhat(i + t, e);
                two[e] = x.s.rstd * (dn.c[i + t][2 * HALF + e] - mean - xhat[e] * slope);
            }
            of_dx.word[t] = Element<T>::pack(two[0], two[1]);
            of_xhat.word[t] = Element<T>::pack(xhat[0], xhat[1]);
        }
        transpose_words(of_dx.word, j);
        transpose_words(of_xhat.word, j);
        if (m >= p.in.M || 8 * i + 8 * j >= D) continue;
        stg(dx + 8 * i, of_dx);
        if (p.wants_xhat) stg(xhat_rows + 8 * i, of_xhat);
    }
}

template <class C>
GT_KERNEL(GT_SM90A ? C::THREADS : 32, 1)
hopper_dx_kernel(const GT_GRID_CONSTANT DxParams p) {
#if GT_SM90A
    typedef typename C::Type T;
    typedef WarpRows<T, C::BN / 8> Results;
    XRows<T, C::BN / 8> first;
    const TilesParams& tiles = p.product.tiles;
    run_tiles<C>(tiles, p.product.a, p.product.b, [&](uint32_t smem) {
        multiply_tiles<C>(
            tiles, smem, [&](const TilePlace& at) { first.load(p.gradient.in, at.m0 + 16 * warp_id()); },
            [&](Results& dn, const TilePlace& at) {
                const int m = at.m0 + 16 * warp_id();
                store_dx<0>(p.gradient, dn, first, m);
                XRows<T, C::BN / 8> second;
                second.load(p.gradient.in, m + 8);
                store_dx<1>(p.gradient, dn, second, m + 8);
            });
    });
#else
    (void)p;
    __trap();
#endif
}

} /* namespace rmsnorm_linear */
} /* namespace gt */

#endif
