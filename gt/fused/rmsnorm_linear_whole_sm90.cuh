/* gt/fused/rmsnorm_linear_whole_sm90.cuh - rmsnorm_linear forward on compute capability 9.0, D <= 512: one kernel.
 *
 * y = n weight^T + bias.  A block computes n of 128 whole rows of x in shared memory, and keeps n there for all y of
 * these rows.  So x is read once and n is never stored.
 *
 * grid: one block for each multiprocessor.  Block i takes the units i, i + grid, and so on.  A unit is 128 rows and all
 * of O, or an equal part of O if rows are few.  A block has three warpgroups.  Two of them normalise 64 rows each and
 * multiply these by the weight; a warp of the third loads x and weight.
 * shared memory: 16 KB of rows for each 64 of D.  With D up to 256, each warpgroup also has two 8 KB panels of y.  The
 * rest are stages of weight, 32 KB each, for 256 of O by 64 of D: 3 stages with D = 512, 4 with D = 256.  All lie in
 * swizzled panels of 128-byte rows.
 * A block loads weight only after its first rows have arrived, since loading takes longer than normalising.  When the
 * products of the last tile have read 64 of D of the rows, the next unit's rows overwrite them.  Meanwhile the other
 * parts are still multiplied.
 * registers: 128 for results, and 64 for the previous tile's results in 16 bits, which are stored while the tensor
 * cores multiply.  With D up to 256, tile_store stores 64 columns during each quarter of a tile.  Otherwise threads
 * store from registers, which takes more instructions.  A unit's last tile is stored after its products.
 * tensor cores: 1024 cycles for a stage.  Shared memory: 640 cycles for wgmma and 256 for loads.
 * To normalise, a group of 8 lanes has four of a warp's 16 rows.  Every sum reads the rows from shared memory.  One
 * more pass reads the rows and overwrites them with n, 64 of D at a time.
 * bytes: x once, y once; weight M/128 times from the L2 cache.
 * Sums of a row: a lane adds its elements in order, 8 at a time, then a butterfly adds the lanes. */
#ifndef GT_FUSED_RMSNORM_LINEAR_WHOLE_SM90_CUH
#define GT_FUSED_RMSNORM_LINEAR_WHOLE_SM90_CUH

#include "rmsnorm_linear_sm90.cuh"

namespace gt {
namespace rmsnorm_linear {

struct WholeParams {
    Input in;
    void* y;
    int64_t y_stride;
    const float* bias; /* may be NULL */
    int M, O;
    int k_blocks; /* blocks of 64 of D */
    int stages;   /* stages of weight; at most tiles * k_blocks */
    int tiles;    /* tiles of 256 of O in a unit */
    int parts;    /* units that share the same rows */
    int units;
    TensorMap x, weight; /* boxes: x 64 of D by 128 rows, weight 64 of D by 256 */
    TensorMap y_map;     /* if y has panels: boxes of 64 of O by 64 rows */
};

/* K_BLOCKS: largest number of blocks of 64 of D. */
template <class T, int K_BLOCKS_>
struct WholeTile {
    typedef T Type;
    static constexpr int K_BLOCKS = K_BLOCKS_, BM = 128, BN = 256, BK = 64;
    static constexpr int MULTIPLIERS = 256, THREADS = MULTIPLIERS + 128;
    static constexpr int ROWS = 2 * BM * BK, STAGE = 2 * BN * BK; /* bytes for 64 of D */
    static constexpr int MOST_STAGES = 6;
    /* y is stored through shared memory, by two panels a warpgroup.  D = 512 leaves no room for panels. */
    static constexpr bool HAS_PANELS = K_BLOCKS == 4;
    static constexpr int PANELS = (HAS_PANELS ? 6 : 7) * STAGE;
    static constexpr int ROWS_FULL = 7 * STAGE, FULL = ROWS_FULL + 8;
    static constexpr int EMPTY = FULL + 8 * MOST_STAGES;
    static constexpr int SMEM = EMPTY + 8 * MOST_STAGES;
    using Stages = Ring<MOST_STAGES, FULL, EMPTY>; /* a call uses WholeParams::stages of these stages */
    using RowsOfUnit = Ring<1, ROWS_FULL>;
    static_assert(SMEM <= 227 * 1024, "fits sm_90");
    static_assert(ROWS * K_BLOCKS + 3 * STAGE <= PANELS, "at least three stages");
    static_assert(!HAS_PANELS || PANELS + 4 * PANEL <= ROWS_FULL, "y fits");
    static constexpr int stages(int k_blocks) {
        const int fit = (PANELS - k_blocks * ROWS) / STAGE;
        return fit < MOST_STAGES ? fit : MOST_STAGES;
    }
};

/* ---- loads ------------------------------------------------------------------------------------ */

/* Where a unit lies. */
struct WholePlace {
    int m0, n0;
    GT_METHOD WholePlace(const WholeParams& p, int unit) {
        m0 = unit / p.parts * 128;
        n0 = unit % p.parts * p.tiles * 256;
    }
};

/* Loads 64 of D of the rows of a unit. */
template <class C>
GT_DEV void load_rows(const WholeParams& p, uint32_t smem, int unit, int k_block) {
    const uint32_t full = typename C::RowsOfUnit{smem}.full_of(0);
    if (k_block == 0) mbarrier_arrive_expect_warp(full, p.k_blocks * C::ROWS);
    tile_load(smem + k_block * C::ROWS, p.x, 64 * k_block, WholePlace(p, unit).m0, 0, full);
}

template <class C>
GT_DEV void load_units(const WholeParams& p, uint32_t smem) {
    const int steps = p.tiles * p.k_blocks; /* steps of a unit */
    const uint32_t weights = smem + p.k_blocks * C::ROWS;
    const typename C::Stages ring = {smem};
    RingCursor at(1);
    if (block_x() < p.units)
        for (int i = 0; i < p.k_blocks; i++) load_rows<C>(p, smem, block_x(), i);
    if (block_x() < p.units)
        typename C::RowsOfUnit{smem}.wait_full(0); /* x first: weight is loaded during the normalisation of x */
    GT_NO_UNROLL
    for (int unit = block_x(); unit < p.units; unit += grid_x()) {
        const bool is_first = unit == block_x(), has_next = unit + grid_x() < p.units;
        int n = WholePlace(p, unit).n0, k_block = 0;
        GT_NO_UNROLL
        for (int step = 0; step < steps; step++) {
            const uint32_t full = ring.full_of(at.stage);
            mbarrier_wait(ring.empty_of(at.stage), at.parity);
            mbarrier_arrive_expect_warp(full, C::STAGE);
            tile_load(weights + at.stage * C::STAGE, p.weight, 64 * k_block, n, 0, full);
            at.next(p.stages);
            if (++k_block == p.k_blocks) k_block = 0, n += C::BN;
            /* This stage is empty, so the step p.stages earlier has been multiplied.  If that step belonged to the last
             * tile of its unit, its block of 64 of D is free, and the next unit's rows go there. */
            const int of_last = step - p.stages + (step < p.stages ? p.k_blocks : p.k_blocks - steps);
            if (of_last < 0) continue;
            if (step >= p.stages && has_next) load_rows<C>(p, smem, unit + grid_x(), of_last);
            if (step < p.stages && !is_first) load_rows<C>(p, smem, unit, of_last);
        }
    }
}

/* ---- normalised rows -------------------------------------------------------------------------- */

/* A lane's rows in shared memory.  8 lanes share a row; each has a piece, 8 of every 64 elements. */
template <class T>
struct WholeRows {
    static constexpr int COUNT = 4;
    uint32_t at[COUNT]; /* address of the lane's first piece */
    int D, k_blocks;

    GT_METHOD bool has(int k_block) const { return 64 * k_block + lane_id() % 8 * 8 < D; }

    template <class Function>
    GT_METHOD void sums(float (&sum)[COUNT], Function f) const {
        GT_UNROLL
        for (int i = 0; i < COUNT; i++) sum[i] = 0.0f;
        GT_NO_UNROLL
        for (int k_block = 0; k_block < k_blocks; k_block++) {
            Vec<T, 8> x[COUNT];
            GT_UNROLL
            for (int i = 0; i < COUNT; i++) x[i] = lds<Vec<T, 8>>(at[i] + k_block * (2 * PANEL));
            GT_UNROLL
            for (int i = 0; i < COUNT; i++) {
                float part = 0.0f;
                GT_UNROLL
                for (int e = 0; e < 8; e++) part += f(x[i].get(e), i);
                if (has(k_block)) sum[i] += part;
            }
        }
        GT_UNROLL
        for (int mask = 1; mask < 8; mask *= 2) {
            GT_UNROLL
            for (int i = 0; i < COUNT; i++) sum[i] += shfl_xor(sum[i], mask);
        }
    }
};

/* Calls write(xhat), where xhat is a function of moments and x.  For RMSNorm the function is one multiplication, with
 * the same result as xhat_of. */
template <class Write>
GT_DEV void with_xhat(const Input& in, Write write) {
    if (in.norm == GT_NORM_LAYER)
        write([](const Moments& s, float x) { return xhat_of(s, x); });
    else
        write([](const Moments& s, float x) { return x * s.rstd; });
}

/* 8 elements of gamma and beta. */
struct Gains {
    float gamma[8], beta[8];
    GT_METHOD void load(const Input& in, int d) {
        load_8(gamma, in.gamma, d, 1.0f);
        load_8(beta, in.beta, d, 0.0f);
    }
};

/* Overwrites x of the warp's 16 rows with n, in shared memory.  If `writes`, stores the moments of the rows. */
template <class C>
GT_DEV void normalise_rows(const WholeParams& p, uint32_t smem, int m0, bool writes) {
    typedef typename C::Type T;
    constexpr int COUNT = WholeRows<T>::COUNT;
    const int piece = lane_id() % 8, first = 16 * warp_id() + lane_id() / 8, k_blocks = p.k_blocks;
    WholeRows<T> rows;
    rows.D = (int)p.in.D, rows.k_blocks = k_blocks;
    GT_UNROLL
    for (int i = 0; i < COUNT; i++) rows.at[i] = smem + panel_at<128>(first + 4 * i, piece);
    Gains next = {};
    if (rows.has(0)) next.load(p.in, 8 * piece);
    Moments s[COUNT];
    moments_of_rows(s, rows, p.in);
    GT_UNROLL
    for (int i = 0; i < COUNT; i++)
        if (writes && piece == 0 && m0 + first + 4 * i < p.M) stg(p.in.moments + m0 + first + 4 * i, s[i]);
    GT_NO_UNROLL
    for (int k_block = 0; k_block < k_blocks; k_block++) {
        if (!rows.has(k_block)) break; /* D ends here */
        const Gains gains = next;
        if (rows.has(k_block + 1)) next.load(p.in, 64 * (k_block + 1) + 8 * piece);
        Vec<T, 8> x[COUNT];
        GT_UNROLL
        for (int i = 0; i < COUNT; i++) x[i] = lds<Vec<T, 8>>(rows.at[i] + k_block * (2 * PANEL));
        with_xhat(p.in, [&](auto xhat) {
            GT_UNROLL
            for (int i = 0; i < COUNT; i++) {
                float n[8];
                GT_UNROLL
                for (int e = 0; e < 8; e++) n[e] = fma_rn(xhat(s[i], x[i].get(e)), gains.gamma[e], gains.beta[e]);
                Vec<T, 8> eight;
                eight.set(n);
                sts(rows.at[i] + k_block * (2 * PANEL), eight);
            }
        });
    }
}

/* ---- products --------------------------------------------------------------------------------- */

/* Stores columns 64 part ... 64 part + 63 of the warpgroup's 64 rows of a tile, through a panel of shared memory.  The
 * tile begins at row m and column n of y. */
template <class T, int TILES>
GT_DEV void store_panel(const HeldRows<T, TILES>& held, const WholeParams& p, uint32_t panels, int m, int n, int part) {
    const int warp = shfl_idx(warp_id(), 0), group = warp / 4;
    const bool stores = warp % 4 == 0;
    const uint32_t panel = panels + (2 * group + part % 2) * PANEL;
    if (stores) bulk_wait_read<1>(); /* the panel's previous contents are stored */
    bar_sync(3 + group, 128);
    const int lane = made_here(lane_id()), matrix = lane / 8, row = warp % 4 * 16 + matrix % 2 * 8 + lane % 8;
    GT_UNROLL
    for (int i = 0; i < 8; i += 2) { /* 16 columns: words of both row halves, then of the next 8 columns */
        uint32_t four[4];
        GT_UNROLL
        for (int t = 0; t < 4; t++) four[t] = held.pair[8 * part + i + t / 2][t % 2];
        stmatrix_x4(panel + panel_at<128>(row, i + matrix / 2), four);
    }
    fence_async_proxy();
    bar_sync(3 + group, 128);
    if (!stores) return;
    if (m < p.M && n + 64 * part < p.O) tile_store(p.y_map, n + 64 * part, m, 0, panel);
    bulk_commit();
}

GT_DEV int before(const WholeParams& p, int stage) { return (stage == 0 ? p.stages : stage) - 1; }

template <class C>
GT_DEV void multiply_units(const WholeParams& p, uint32_t smem) {
    typedef typename C::Type T;
    /* Without panels HeldRows stores a tile of y in parts, PARTS of them during each step of 64 of D.  With K_BLOCKS =
     * 8 registers are scarce, so the last parts are stored at once. */
    constexpr int TILES = C::BN / 8, PARTS = TILES / 2 / C::K_BLOCKS, HELD = TILES / 2 - (C::K_BLOCKS == 8 ? PARTS : 0);
    const int group = shfl_idx(warp_id(), 0) / 4;
    const uint64_t a0 = wgmma_tile<128, Major::K>(smem + group * PANEL);
    const uint64_t b0 = wgmma_tile<128, Major::K>(smem + p.k_blocks * C::ROWS);
    const typename C::Stages ring = {smem};
    RingCursor at_stage(0), at_rows(0);
    GT_NO_UNROLL
    for (int unit = block_x(); unit < p.units; unit += grid_x()) {
        const WholePlace at(p, unit);
        HeldRows<T, TILES> held; /* results of the previous tile */
        int n = at.n0 - C::BN;   /* first column of the previous tile */
        const auto store = [&](int first, int end) { held.store(p.y, p.y_stride, p.M, p.O, at.m0, n, first, end); };
        mbarrier_wait(typename C::RowsOfUnit{smem}.full_of(0), at_rows.parity);
        at_rows.next(1);
        normalise_rows<C>(p, smem, at.m0, at.n0 == 0);
        fence_async_proxy();
        bar_sync(1 + group, 128);
        GT_NO_UNROLL
        for (int tile = 0; tile < p.tiles; tile++) {
            WarpRows<T, TILES> results;
            GT_UNROLL
            for (int i = 0; i < C::K_BLOCKS; i++) {
                if (i == 0 || i < p.k_blocks) {
                    mbarrier_wait(ring.full_of(at_stage.stage), at_stage.parity);
                    wgmma_fence();
                    const uint64_t a = wgmma_step(a0, i * C::ROWS), b = wgmma_step(b0, at_stage.stage * C::STAGE);
                    GT_UNROLL
                    for (int k = 0; k < C::BK; k += 16)
                        wgmma<T>(results.c, wgmma_step(a, 2 * k), wgmma_step(b, 2 * k), i > 0 || k > 0);
                    wgmma_commit();
                    if (i > 0) {
                        wgmma_wait<1>();
                        mbarrier_arrive_warp(ring.empty_of(before(p, at_stage.stage)));
                    }
                    at_stage.next(p.stages);
                }
                if constexpr (C::HAS_PANELS) {
                    if (tile > 0) store_panel(held, p, smem + C::PANELS, at.m0 + 64 * group, n, i);
                } else {
                    if (tile > 0 && i * PARTS < HELD) store(i * PARTS, (i + 1) * PARTS);
                }
            }
            wgmma_wait<0>();
            wgmma_pin(results.c);
            mbarrier_arrive_warp(ring.empty_of(before(p, at_stage.stage)));
            n += C::BN;
            if (p.bias) results.add_to_columns(p.bias, n, p.O);
            held.take(results.c);
            if constexpr (!C::HAS_PANELS) store(HELD, TILES / 2);
        }
        if constexpr (C::HAS_PANELS) {
            GT_UNROLL
            for (int i = 0; i < C::K_BLOCKS; i++) store_panel(held, p, smem + C::PANELS, at.m0 + 64 * group, n, i);
        } else {
            store(0, HELD);
        }
    }
    if (C::HAS_PANELS && shfl_idx(warp_id(), 0) % 4 == 0) bulk_wait_read<0>();
}

/* Without sm_90a code this kernel never runs, so its body is empty and its launch bound is one warp. */
template <class C>
GT_KERNEL(GT_SM90A ? C::THREADS : 32, 1)
hopper_whole_kernel(const GT_GRID_CONSTANT WholeParams p) {
#if GT_SM90A
    const uint32_t smem = smem_base_of_tiles();
    if (thread_id() < p.stages) typename C::Stages{smem}.init(thread_id(), 32, C::MULTIPLIERS);
    typename C::RowsOfUnit{smem}.init(thread_id(), 32);
    run_loader_and_multipliers<C>([&] { load_units<C>(p, smem); }, [&] { multiply_units<C>(p, smem); });
#else
    (void)p;
    __trap();
#endif
}

} /* namespace rmsnorm_linear */
} /* namespace gt */

#endif
