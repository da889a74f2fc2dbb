/* gt/fused/rmsnorm_linear_small_sm90.cuh - rmsnorm_linear forward on compute capability 9.0, D <= 128 in 16 bits: one
 * kernel that keeps the weight in shared memory.
 *
 * y = n weight^T + bias.  The whole weight fits in shared memory up to O = 512 with D = 128, or O = 1024 with D = 64.
 *
 * grid: one block for each multiprocessor.  A unit is 128 rows; block i takes the units i, i + grid, and so on.  A
 * block has four warpgroups, and two of them share 64 rows.  The weight has pieces of 128 of O, counted from the
 * block's first piece.  One of two warpgroups multiplies by the even pieces, the other by the odd ones.
 * A warp loads 8 rows of x into registers at once, with gamma and beta, and stores the normalised rows in shared
 * memory.  It loads the next unit's rows before the products of the current unit, and gamma and beta after these
 * products.  Each piece of the weight has a barrier of its own, so that the first piece is multiplied while others are
 * in flight.  Two pieces are loaded after the block's first rows, the others when these rows are normalised.  x goes
 * first, because it comes from memory, while the weight comes from the L2 cache.
 * tile_store stores y, half a piece at a time: the left half is stored while the right half is multiplied.
 * shared memory: 16 KB of normalised rows for each 64 of D, room for 128 KB of weight, and 16 KB of y for each
 * warpgroup.  All lie in swizzled panels of 128-byte rows.
 * registers: 128.  64 of them hold results, and 16 hold x.  gamma and beta take 32, but not while results are held.
 * clocks of a unit with D = 128, O = 512: 4096 on tensor cores, and 8600 for 160 KB of x and y at 19 bytes a clock.
 * bytes: x once, y once; the weight once for each block, from the L2 cache.
 * Sums of a row have the fixed order of rmsnorm_linear_whole_sm90.cuh. */
#ifndef GT_FUSED_RMSNORM_LINEAR_SMALL_SM90_CUH
#define GT_FUSED_RMSNORM_LINEAR_SMALL_SM90_CUH

#include "rmsnorm_linear_whole_sm90.cuh"

namespace gt {
namespace rmsnorm_linear {

struct SmallParams {
    Input in;
    const float* bias; /* may be NULL */
    int M, O;
    int pieces;          /* pieces of 128 of O */
    int units;           /* units of 128 rows */
    TensorMap weight, y; /* boxes: weight 64 of D by 128 of O, y 64 of O by 64 rows */
};

/* K_BLOCKS: number of blocks of 64 of D. */
template <class T, int K_BLOCKS_>
struct SmallTile {
    typedef T Type;
    static constexpr int K_BLOCKS = K_BLOCKS_, BM = 128, BN = 128, THREADS = 512;
    static constexpr int ROWS = 2 * BM * 64, PIECE = 2 * BN * 64; /* bytes for 64 of D */
    static constexpr int MOST = 8 / K_BLOCKS;                     /* most pieces of weight */
    static constexpr int WEIGHT = K_BLOCKS * ROWS, Y = WEIGHT + MOST * K_BLOCKS * PIECE;
    static constexpr int FULL = Y + 4 * 2 * PANEL, SMEM = FULL + 8 * MOST;
    static_assert(SMEM <= 227 * 1024, "fits sm_90");
};

/* A warp's 8 rows.  A group of 8 lanes shares two of them; each lane has 8 of every 64 elements. */
template <class C>
struct SmallRows {
    typedef typename C::Type T;
    static constexpr int ROWS = C::BM / (C::THREADS / 32), COUNT = ROWS / 4; /* rows of a warp, rows of a lane */
    const Input& in;
    Vec<T, 8> x[COUNT][C::K_BLOCKS];
    Gains gains[C::K_BLOCKS];

    GT_METHOD explicit SmallRows(const Input& input) : in(input) {}

    GT_METHOD bool has(int k) const { return 64 * k + lane_id() % 8 * 8 < (int)in.D; }

    template <class Function>
    GT_METHOD void sums(float (&sum)[COUNT], Function f) {
        GT_UNROLL
        for (int i = 0; i < COUNT; i++) {
            sum[i] = 0.0f;
            GT_UNROLL
            for (int k = 0; k < C::K_BLOCKS; k++) {
                float part = 0.0f;
                GT_UNROLL
                for (int e = 0; e < 8; e++) part += f(x[i][k].get(e), i);
                if (has(k)) sum[i] += part;
            }
        }
        GT_UNROLL
        for (int mask = 1; mask < 8; mask *= 2) {
            GT_UNROLL
            for (int i = 0; i < COUNT; i++) sum[i] += shfl_xor(sum[i], mask);
        }
        GT_UNROLL
        for (int i = 0; i < COUNT; i++) { /* otherwise the compiler keeps x in fp32 */
            GT_UNROLL
            for (int j = 0; j < C::K_BLOCKS * 4; j++)
                x[i][j / 4].word[j % 4] = (uint32_t)made_here((int)x[i][j / 4].word[j % 4]);
        }
    }

    GT_METHOD void load_gains() {
        GT_UNROLL
        for (int k = 0; k < C::K_BLOCKS; k++) {
            gains[k] = {};
            if (has(k)) gains[k].load(in, 64 * k + lane_id() % 8 * 8);
        }
    }

    GT_METHOD void load(int m0) {
        const int first = made_here(m0) + ROWS * warp_id() + lane_id() / 8;
        const T* from = static_cast<const T*>(in.x) + first * in.stride + lane_id() % 8 * 8;
        GT_UNROLL
        for (int i = 0; i < COUNT; i++) {
            GT_UNROLL
            for (int k = 0; k < C::K_BLOCKS; k++) {
                x[i][k] = {};
                if (first + 4 * i < in.M && has(k)) x[i][k] = ldg<Vec<T, 8>>(from + 4 * i * in.stride + 64 * k);
            }
        }
    }

    GT_METHOD void normalise(uint32_t smem, int m0) {
        /* made_here: otherwise the compiler keeps these values in registers */
        const int lane = made_here(lane_id()), first = ROWS * warp_id() + lane / 8, piece = lane % 8;
        Moments s[COUNT];
        moments_of_rows(s, *this, in);
        GT_UNROLL
        for (int i = 0; i < COUNT; i++)
            if (piece == 0 && m0 + first + 4 * i < in.M) stg(in.moments + m0 + first + 4 * i, s[i]);
        with_xhat(in, [&](auto xhat) {
            GT_UNROLL
            for (int i = 0; i < COUNT; i++) {
                GT_UNROLL
                for (int k = 0; k < C::K_BLOCKS; k++) {
                    float n[8];
                    GT_UNROLL
                    for (int e = 0; e < 8; e++)
                        n[e] = fma_rn(xhat(s[i], x[i][k].get(e)), gains[k].gamma[e], gains[k].beta[e]);
                    Vec<T, 8> eight = {};
                    if (has(k)) eight.set(n);
                    sts(smem + k * C::ROWS + panel_at<128>(first + 4 * i, piece), eight);
                }
            }
        });
    }
};

/* Stores the warp's 16-bit results in its 16 rows of a panel of 64 columns. */
template <class T>
GT_DEV void store_panel(uint32_t panel, const float (&c)[8][4]) {
    const int lane = made_here(lane_id()), matrix = lane / 8, row = warp_id() % 4 * 16 + matrix % 2 * 8 + lane % 8;
    store_accumulators<4>(
        c, [&](int k) { return panel + panel_at<128>(row, 2 * k + matrix / 2); }, Element<T>::pack);
}

/* Returns the piece that follows `piece` by `count`, cyclically.  Neighbouring blocks start with different pieces, so
 * that they do not load the same piece at the same time. */
GT_DEV int piece_after(const SmallParams& p, int piece, int count) {
    piece += count;
    return piece < p.pieces ? piece : piece - p.pieces;
}

template <class C>
GT_DEV void load_weight(const SmallParams& p, uint32_t smem, int piece, int count) {
    GT_NO_UNROLL
    for (int i = 0; i < count; i++, piece = piece_after(p, piece, 1)) {
        const uint32_t full = smem + C::FULL + 8 * piece;
        mbarrier_arrive_expect(full, C::K_BLOCKS * C::PIECE);
        GT_UNROLL
        for (int k = 0; k < C::K_BLOCKS; k++)
            tile_load(smem + C::WEIGHT + (piece * C::K_BLOCKS + k) * C::PIECE, p.weight, 64 * k, C::BN * piece, 0,
                      full);
    }
}

/* Stores results of 64 rows from m on and 64 columns from n on.  They go through the warpgroup's panel in `panels`. */
template <class C>
GT_DEV void store_small(const SmallParams& p, uint32_t panels, WarpRows<typename C::Type, 8>& results, int m, int n) {
    const int warp = shfl_idx(warp_id(), 0), group = warp / 4;
    const bool stores = warp % 4 == 0;
    const uint32_t panel = panels + group * 2 * PANEL;
    if (p.bias) results.add_to_columns(p.bias, n, p.O);
    if (stores) bulk_wait_read<1>(); /* this panel's previous results are stored */
    bar_sync(3 + group, 128);
    store_panel<typename C::Type>(panel, results.c);
    fence_async_proxy();
    bar_sync(3 + group, 128);
    if (!stores) return;
    if (m < p.M && n < p.O) tile_store(p.y, n, m, 0, panel);
    bulk_commit();
}

/* Starts the products of 64 rows by 64 columns, as one wgmma group. */
template <class C>
GT_DEV void multiply_small(float (&c)[8][4], uint64_t a0, uint64_t b0) {
    GT_UNROLL
    for (int i = 0; i < C::K_BLOCKS; i++) {
        const uint64_t a = wgmma_step(a0, i * C::ROWS), b = wgmma_step(b0, i * C::PIECE);
        GT_UNROLL
        for (int k = 0; k < 64; k += 16)
            wgmma<typename C::Type>(c, wgmma_step(a, 2 * k), wgmma_step(b, 2 * k), i > 0 || k > 0);
    }
    wgmma_commit();
}

/* Without sm_90a code this kernel never runs, so its body is empty and its launch bound is one warp. */
template <class C>
GT_KERNEL(GT_SM90A ? C::THREADS : 32, 1)
hopper_small_kernel(const GT_GRID_CONSTANT SmallParams p) {
#if GT_SM90A
    typedef typename C::Type T;
    const uint32_t smem = smem_base_of_tiles();
    const int first = block_x() % p.pieces;
    const bool loads = shfl_idx(warp_id(), 0) == C::THREADS / 32 - 1;
    wait_for_chain();
    SmallRows<C> x(p.in);
    x.load(block_x() * C::BM);
    x.load_gains();
    if (loads) {
        if (lane_id() < p.pieces) mbarrier_init(smem + C::FULL + 8 * lane_id(), 32);
        sync_warp();
        fence_async_proxy();
        load_weight<C>(p, smem, first, p.pieces < 2 ? p.pieces : 2);
    }
    GT_NO_UNROLL
    for (int unit = block_x(); unit < p.units; unit += grid_x()) {
        const int m0 = unit * C::BM, group = shfl_idx(warp_id(), 0) / 4, half = group / 2;
        const uint64_t a0 = wgmma_tile<128, Major::K>(smem + half * PANEL);
        const uint64_t b0 = wgmma_tile<128, Major::K>(smem + C::WEIGHT);
        if (unit != block_x()) bar_sync(1 + half, 256); /* the previous rows have been multiplied */
        x.normalise(smem, m0);
        fence_async_proxy();
        if (unit == block_x()) {
            sync_threads();
            /* the other pieces are loaded only now, so that x is loaded first */
            if (loads && p.pieces > 2) load_weight<C>(p, smem, piece_after(p, first, 2), p.pieces - 2);
        } else {
            bar_sync(1 + half, 256);
        }
        if (unit + grid_x() < p.units) x.load(m0 + grid_x() * C::BM);
        GT_NO_UNROLL
        for (int i = group % 2; i < p.pieces; i += 2) {
            const int piece = piece_after(p, first, i);
            WarpRows<T, 8> left, right;                   /* left and right columns of the piece */
            mbarrier_wait(smem + C::FULL + 8 * piece, 0); /* no Ring, since each piece is filled only once */
            wgmma_fence();
            multiply_small<C>(left.c, a0, wgmma_step(b0, piece * C::K_BLOCKS * C::PIECE));
            multiply_small<C>(right.c, a0, wgmma_step(b0, piece * C::K_BLOCKS * C::PIECE + PANEL));
            wgmma_wait<1>();
            wgmma_pin(left.c);
            store_small<C>(p, smem + C::Y, left, m0 + 64 * half, C::BN * piece);
            wgmma_wait<0>();
            wgmma_pin(right.c);
            store_small<C>(p, smem + C::Y + PANEL, right, m0 + 64 * half, C::BN * piece + 64);
        }
        if (unit + grid_x() < p.units) x.load_gains(); /* here, since products leave no registers for them */
    }
    if (shfl_idx(warp_id(), 0) % 4 == 0) bulk_wait_read<0>();
#else
    (void)p;
    __trap();
#endif
}

} /* namespace rmsnorm_linear */
} /* namespace gt */

#endif
