/* gt/fused/conv_ssd_sm90.cuh - conv_ssd forward on compute capability 9.0.  The convolved x is never stored in memory.
 *
 * There are two kernels.  groups_kernel convolves B and C, which the heads of a group share.  It stores them as f16
 * with a power of two per row; each chunk's tile has the layout of shared memory.  forward_kernel is ssd's
 * forward_maps_kernel (gt/ssd/sm90/forward_maps.cuh) with one more warpgroup:
 *     convolver   A warp has one unit, 64 channels of a head, and a lane has two of these channels.  The warp takes the
 *                 tokens of a chunk in order and overwrites x with its convolution.  Earlier inputs that the taps need
 *                 stay in registers, from chunk to chunk.  Rows after the sequence's end become zeros.  Then the warp
 *                 finds the largest magnitudes of the rows, which consumers need to convert x to f16
 *     producer    as in forward_maps_kernel, except that it does not find the maxima
 *     consumers   as in forward_maps_kernel
 * Every result has the same bits as from the kernels of conv1d and ssd, because c is rounded to T before its first use.
 * conv1d's state_kernel runs afterwards and computes the final states of the convolution.
 *
 * MBARRIERS: as in forward_maps_kernel, and one more for each stage of decay factors, CONVOLVED.  It completes when x
 * is convolved and the maxima of its rows are stored; the convolver's warps that have a unit arrive.
 * x has three stages, but two if there is z and a warpgroup has 256 columns of states.  With three stages the producer
 * starts the copies of the next chunk.  With two stages the producer would wait for a free stage, so the convolver
 * starts these copies.
 *
 * INSTRUCTIONS of the convolver in bf16 machine code: 29 for each token and pair of channels, of which the taps take 8
 * and SiLU 12.  The maxima of a chunk take 250.  Latencies set the pace of a warp, so it convolves four tokens side by
 * side.
 * REGISTERS per thread, N = 128, four units: consumers 216, producer and convolver 40.  The kernel starts with 128 for
 * each of 512 threads.
 * BYTES per token and head: x, y (and z) 2 P each.  Per token and group: 4 N of B and C are read and 4 N written; the
 * written bytes are read again.
 * grid: groups_kernel has a block for each chunk and group, of B and of C; forward_kernel as forward_hopper_kernel. */
#ifndef GT_FUSED_CONV_SSD_SM90_CUH
#define GT_FUSED_CONV_SSD_SM90_CUH

#include "../conv1d/problem.cuh"
#include "../ssd/plan.cuh"
#include "../ssd/sm90/forward_maps.cuh"

namespace gt {
namespace conv_ssd {

using namespace ssd;

struct ConvolvingParams : MapsForwardParams {
    conv1d::Problem conv; /* the convolution of all channels: x, then B, then C */
};

/* ---- taps -------------------------------------------------------------------------------------------------------- */

/* The taps of two channels, and the earlier inputs that they need. */
template <class T>
struct TwoChannels {
    using E = Element<T>;
    static constexpr int BEFORE = conv1d::HALO;
    conv1d::Taps<2> taps;
    float e[conv1d::TAPS][2];

    /* Convolves COUNT tokens side by side, since little else hides a warp's latencies. */
    template <int COUNT>
    GT_METHOD void convolve(uint32_t (&values)[COUNT]) {
        float pre[COUNT][2], sigmoids[COUNT][2];
        GT_UNROLL
        for (int i = 0; i < COUNT; i++) {
            e[BEFORE][0] = E::lo(values[i]), e[BEFORE][1] = E::hi(values[i]);
            pre[i][0] = taps.sum(e, 0), pre[i][1] = taps.sum(e, 1);
            conv1d::shift(e);
        }
        GT_UNROLL
        for (int i = 0; i < 2 * COUNT; i++) sigmoids[i / 2][i % 2] = exp_fast(-pre[i / 2][i % 2]);
        GT_UNROLL
        for (int i = 0; i < 2 * COUNT; i++) sigmoids[i / 2][i % 2] = rcp_approx(1.0f + sigmoids[i / 2][i % 2]);
        GT_UNROLL
        for (int i = 0; i < COUNT; i++)
            values[i] = E::pack(silu_of_sigmoid(pre[i][0], sigmoids[i][0]), silu_of_sigmoid(pre[i][1], sigmoids[i][1]));
    }
};

/* ---- B and C ----------------------------------------------------------------------------------------------------- */

/* A thread's part of the tile in groups_kernel: two columns of OWN tokens. */
template <class T, int NP>
struct ConvolvedGroupTile : GroupTile<T, NP> {
    static constexpr int COLUMNS = NP / 2, OWN = CHUNK * COLUMNS / GroupTile<T, NP>::THREADS;
    static_assert(OWN % 8 == 0, "taken by eights");
};

/* Convolves OWN tokens of a chunk, for two channels, and stores the results in the tile.  t0: the first of these
 * tokens, counted from the start of the chunk.  first, tokens: the chunk's first token and its number of tokens.
 * start: the sequence's first token.  row: the sequence's row in the states.  column: the first channel's column in the
 * tile. */
template <class Tile>
GT_DEV void convolve_columns(const ConvolvingParams& p, uint32_t smem, int64_t b, int64_t first, int tokens,
                             int64_t start, int64_t row, int64_t channel, int column, int t0) {
    using T = typename Tile::T;
    using E = Element<T>;
    constexpr int BEFORE = conv1d::HALO, LOADED = Tile::OWN < 16 ? Tile::OWN : 16, AT_ONCE = 4;
    const conv1d::Problem& conv = p.conv;
    const T* const from = static_cast<const T*>(conv.x) + conv1d::offset_of(conv.x_stride, b, first, channel);
    const auto load = [&](int t) {
        return ldg<uint32_t>(reinterpret_cast<const uint32_t*>(from + (int64_t)t * conv.x_stride.t));
    };
    TwoChannels<T> of;
    uint32_t values[LOADED / AT_ONCE][AT_ONCE];
    /* All loads are in flight before the first result is used. */
    const auto load_all = [&](int t) {
        GT_UNROLL
        for (int i = 0; i < LOADED; i++) values[i / AT_ONCE][i % AT_ONCE] = t + i < tokens ? load(t + i) : 0;
    };
    load_all(t0);
    of.taps.load(conv, channel);
    GT_UNROLL
    for (int i = 0; i < BEFORE; i++) {
        const int t = t0 + i - BEFORE;
        const int64_t at = first + t - start; /* index in the sequence */
        const uint32_t value = at >= 0 && t < tokens ? load(t) : 0;
        /* without made_here more addresses would spill for N = 256 */
        of.e[i][0] =
            at >= 0 ? E::lo(value) : conv1d::state_input(conv, row, channel + made_here(0), made_here((int)at));
        of.e[i][1] =
            at >= 0 ? E::hi(value) : conv1d::state_input(conv, row, channel + made_here(1), made_here((int)at));
    }
    GT_NO_UNROLL
    for (int t = t0; t < t0 + Tile::OWN; t += LOADED) {
        if (t > t0) load_all(t);
        GT_UNROLL
        for (int k = 0; k < LOADED; k += AT_ONCE) {
            of.convolve(values[k / AT_ONCE]);
            GT_UNROLL
            for (int i = 0; i < AT_ONCE; i++)
                sts<uint32_t>(smem + group_address<Tile>(t + k + i, column / 8) + 2 * (column % 8),
                              t + k + i < tokens ? values[k / AT_ONCE][i] : 0);
        }
    }
}

template <class T, int NP>
GT_KERNEL(32 * GROUP_ROWS_WARPS, 4)
groups_kernel(const GT_GRID_CONSTANT ConvolvingParams p) {
    using Tile = ConvolvedGroupTile<T, NP>;
    wait_for_chain();
    const uint32_t smem = smem_base_of_tiles();
    const Problem& in = p.in;
    const GroupChunk me(in);
    if (!me.exists()) return;
    const bool packed = in.sequences.cu_seqlens;
    const int column = 2 * (thread_id() % Tile::COLUMNS), t0 = thread_id() / Tile::COLUMNS * Tile::OWN;
    if (column < in.N)
        convolve_columns<Tile>(p, smem, me.b, me.first, me.tokens, packed ? in.sequences.cu_seqlens[me.sequence] : 0,
                               packed ? me.sequence : me.b, in.H * in.P + (me.which * in.G + me.g) * in.N + column,
                               column, t0);
    else
        for (int t = t0; t < t0 + Tile::OWN; t++)
            sts<uint32_t>(smem + group_address<Tile>(t, column / 8) + 2 * (column % 8), 0);
    sync_threads();
    store_group<Tile>(p, smem, me);
}

/* ---- producer and convolver -------------------------------------------------------------------------------------- */

/* A warp of the convolver.  Values that depend only on the chunk are computed again at each use, because registers are
 * scarce. */
template <class Tile>
struct Convolver {
    using T = typename Tile::T;
    static constexpr int AT_ONCE = 4;
    uint32_t smem;
    TwoChannels<T> of;

    GT_METHOD GroupCursor<Tile::UNITS> cursor() const {
        return {smem + Tile::CURSOR + (Tile::CONSUMERS + 1) * GroupCursor<Tile::UNITS>::BYTES};
    }
    GT_METHOD int unit() const { return own_thread() / 32 % 4; }
    GT_METHOD uint32_t x(int number) const {
        return smem + Tile::X + ((unsigned)made_here(number) % Tile::X_STAGES * Tile::UNITS + unit()) * Tile::TILE_X;
    }

    /* Starts a sequence.  sequence: its row in the states. */
    GT_METHOD void begin(const ConvolvingParams& p, int64_t sequence) {
        const int64_t channel = (int64_t)cursor().head(unit()) * p.in.P + cursor().row0(unit()) + 2 * own_lane();
        of.taps.load(p.conv, channel);
        GT_UNROLL
        for (int i = 0; i < 2 * of.BEFORE; i++)
            of.e[i / 2][i % 2] = conv1d::state_input(p.conv, sequence, channel + i % 2, i / 2 - of.BEFORE);
    }
    GT_METHOD void wait_for_x(int n) const {
        const unsigned number = made_here(n);
        typename Tile::LoadedRows{smem, unit()}.wait_full(number);
    }
    /* at: address of the lane's channels in the first row of a tile.  The swizzle of the tile has a period of eight
     * rows. */
    GT_METHOD void convolve(uint32_t at, int rows) {
        const auto address = [&](int i) { return (at ^ (16 * i)) + 128 * i; };
        int left = CHUNK;
        GT_NO_UNROLL
        for (; rows >= 8; rows -= 8, left -= 8, at += 8 * 128) {
            GT_UNROLL
            for (int i0 = 0; i0 < 8; i0 += AT_ONCE) {
                uint32_t values[AT_ONCE];
                GT_UNROLL
                for (int i = 0; i < AT_ONCE; i++) values[i] = lds<uint32_t>(address(i0 + i));
                of.convolve(values);
                GT_UNROLL
                for (int i = 0; i < AT_ONCE; i++) sts<uint32_t>(address(i0 + i), values[i]);
            }
        }
        GT_NO_UNROLL
        for (int i = 0; i < left; i++) { /* the sequence ends here */
            uint32_t value[1] = {0};
            if (i < rows) {
                value[0] = lds<uint32_t>(address(i));
                of.convolve(value);
            }
            sts<uint32_t>((at ^ (16 * (i % 8))) + 128 * i, value[0]);
        }
    }
    GT_METHOD void find_maxima(int n) const {
        const int number = made_here(n), stage = number % 2;
        typename Tile::Chunks{smem}.wait_free(number); /* the maxima's place is free */
        sync_warp();                                   /* all lanes have written their rows */
        row_maxima<T, 2>(
            x(n), smem + Tile::PREPARED + 4 * (Prepared::COUNT * (stage * Tile::UNITS + unit()) + Prepared::X_POWERS),
            0, CHUNK);
        typename Tile::ConvolvedChunks{smem}.fill(made_here(n));
    }
};

template <class Tile>
GT_DEV void convolver_role(const ConvolvingParams& p, uint32_t smem) {
    constexpr int BARRIER = 6;
    const Problem& in = p.in;
    Convolver<Tile> me;
    me.smem = smem;
    int n = 0; /* number of the chunk over all segments */
    each_bundle_item(in, [&](const Span& span, int64_t item) {
        if (!span.exists) return item;
        me.cursor().enter(in, span, item, BARRIER);
        if (me.unit() >= Tile::UNITS) return item;
        me.begin(p, span.sequence);
        if constexpr (!Tile::X_AHEAD) load_x<Tile>(p, smem, me.cursor(), me.unit(), 0, n);
        GT_NO_UNROLL
        for (int chunk = 0; chunk < me.cursor().chunks(); chunk++, n++) {
            me.wait_for_x(n);
            me.convolve(me.x(n) + 4 * own_lane(), me.cursor().tokens(chunk));
            me.find_maxima(n);
            if constexpr (!Tile::X_AHEAD) load_x<Tile>(p, smem, me.cursor(), me.unit(), chunk + 1, n + 1);
        }
        return me.cursor().item();
    });
}

/* Without sm_90a code this kernel never runs, so its body is empty and its launch bound is one warp. */
template <class T, int NP, int UNITS, int GATE>
GT_KERNEL(GT_SM90A ? (HopperTile<T, NP, UNITS, GATE, CONVOLVED_ROWS>::THREADS) : 32, 1)
forward_kernel(const GT_GRID_CONSTANT ConvolvingParams p) {
#if GT_SM90A
    using Tile = HopperTile<T, NP, UNITS, GATE, CONVOLVED_ROWS>;
    const uint32_t smem = smem_base_of_tiles();
    init_maps_rings<Tile>(smem);
    fence_async_proxy();
    sync_threads();
    const int role = shfl_idx(warp_id(), 0) / 4;
    if (role > Tile::CONSUMERS) {
        if (p.in.order) wait_for_chain(); /* otherwise the convolver reads only inputs of the call */
        give_registers<Tile::PRODUCER_REGISTERS>();
        convolver_role<Tile>(p, smem);
        return;
    }
    wait_for_chain();
    run_roles<Tile>(
        role, [&] { maps_producer<Tile>(p, smem); }, [&] { forward_consumer<Tile>(p, smem); });
#else
    (void)p;
    __trap();
#endif
}

} /* namespace conv_ssd */
} /* namespace gt */

#endif
