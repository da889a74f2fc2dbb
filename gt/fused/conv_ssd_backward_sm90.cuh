/* gt/fused/conv_ssd_backward_sm90.cuh - conv_ssd backward on compute capability 9.0: the convolved x is never in memory.
 *
 * Forward's input has x, B and C before their convolution.  columns_kernel convolves B and C, which the heads of a group
 * share, into scratch; ssd's pass over states reads C there.  gradient_kernel is ssd's kernel for chunks
 * (gt/ssd/backward_sm90.cuh) on x as it is before the convolution: three of the four preparing warps, which there have
 * nothing to do where x comes by TMA, convolve it in the stage.  dc goes to memory as ssd's backward leaves it, for
 * conv1d's backward: the gradient of a token before the convolution needs dc of the next W - 1, which other blocks make.
 * Every number is what conv1d's and ssd's kernels make, bit for bit.
 *
 * A STEP has the rows of its own chunk (X) and, of a slot's second chunk, those of the first (NEXT), which lie before
 *     them: 64 or 128 tokens in a row, of which each warp takes a third, four at a time, and writes each over itself.  A
 *     lane has two of the 64 channels.  What the taps of a warp's first tokens reach back to comes from memory, for
 *     the warp before writes over it.  Tokens behind the end of a sequence are zeros and stay so.
 * MBARRIERS, beside those of backward_sm90.cuh.  CONVOLVED: of a stage; the three warps arrive once they have written it,
 *     and those that multiply wait for it in place of FULL.
 * INSTRUCTIONS, bf16: 29 a token and two channels, 60 a step and warp for taps and what they reach back to.
 * REGISTERS a thread: 48, as all of the preparing warps.
 * grid: columns_kernel, a block a chunk, group, and B or C; gradient_kernel as chunk_gradient_hopper_kernel. */
#ifndef GT_FUSED_CONV_SSD_BACKWARD_SM90_CUH
#define GT_FUSED_CONV_SSD_BACKWARD_SM90_CUH

#include "../ssd/plan_backward_sm90.cuh"
#include "conv_ssd_sm90.cuh"

namespace gt {
namespace conv_ssd {

struct GradientParams : HopperGradientParams {
    conv1d::Problem conv; /* of all channels: x, B and C lie one behind the other */
};

/* ---- B and C ------------------------------------------------------------------------------------------------------- */

struct ColumnsParams {
    conv1d::Problem conv;
    void* to;      /* [B][T][columns], of B and then C of all groups */
    int64_t first; /* their first channel */
    int columns;
};

constexpr int COLUMN_TOKENS = 16; /* of a thread, which has two channels */

/* grid: B * ceil(T / COLUMN_TOKENS) * ceil(columns / 2 / block); sequences are not packed. */
template <class T>
GT_KERNEL(128, 8)
columns_kernel(const GT_GRID_CONSTANT ColumnsParams p) {
    using E = Element<T>;
    constexpr int BEFORE = conv1d::HALO, AT_ONCE = 8;
    wait_for_chain();
    const conv1d::Problem& conv = p.conv;
    const int parts = (p.columns / 2 + 127) / 128;
    const int64_t pieces = (conv.T + COLUMN_TOKENS - 1) / COLUMN_TOKENS, place = block_x() / parts;
    const int64_t b = place / pieces, t0 = place % pieces * COLUMN_TOKENS;
    const int column = 2 * (block_x() % parts * 128 + thread_id());
    if (column >= p.columns) return;
    const int tokens = conv.T - t0 < COLUMN_TOKENS ? (int)(conv.T - t0) : COLUMN_TOKENS;
    const int64_t channel = p.first + column;
    const T* const from = static_cast<const T*>(conv.x) + conv1d::offset_of(conv.x_stride, b, t0, channel);
    const auto load = [&](int t) {
        return ldg<uint32_t>(reinterpret_cast<const uint32_t*>(from + (int64_t)t * conv.x_stride.t));
    };
    TwoChannels<T> of;
    of.taps.load(conv, channel);
    of.enter(conv, b, t0, channel, [&](int t) { return load(t); });
    T* const to = static_cast<T*>(p.to) + (b * conv.T + t0) * p.columns + column;
    GT_UNROLL
    for (int first = 0; first < COLUMN_TOKENS; first += AT_ONCE) {
        uint32_t values[AT_ONCE];
        GT_UNROLL
        for (int i = 0; i < AT_ONCE; i++) values[i] = first + i < tokens ? load(first + i) : 0;
        of.convolve(values);
        GT_UNROLL
        for (int i = 0; i < AT_ONCE; i++)
            if (first + i < tokens) stg<uint32_t>(to + (first + i) * (int64_t)p.columns, values[i]);
    }
}

/* ---- x ------------------------------------------------------------------------------------------------------------- */

/* Of all steps of a place.  warp: 0, 1 or 2. */
template <class C>
GT_DEV void convolve_place(const GradientParams& p, const HopperBlock<C>& me, int warp) {
    using T = typename C::T;
    constexpr int AT_ONCE = 4;
    const conv1d::Problem& conv = p.conv;
    const int fours = me.second ? 2 * CHUNK / AT_ONCE : CHUNK / AT_ONCE, exist = (me.second ? CHUNK : 0) + me.tokens;
    const int first = fours * warp / 3 * AT_ONCE, behind = fours * (warp + 1) / 3 * AT_ONCE;
    const int end = behind < exist ? behind : exist;
    const int64_t token = (me.second ? me.neighbour() : me.first) + first;
    GT_NO_UNROLL
    for (int step = 0; step < me.steps; step++) {
        const int stage = me.stage_of(step);
        const int64_t channel = (int64_t)me.head(p, step) * p.in.P + me.p0(p, step) + 2 * own_lane();
        TwoChannels<T> of;
        of.taps.load(conv, channel);
        const T* const from = static_cast<const T*>(conv.x) + conv1d::offset_of(conv.x_stride, me.b, token, channel);
        of.enter(conv, me.b, token, channel, [&](int t) {
            return ldg<uint32_t>(reinterpret_cast<const uint32_t*>(from + t * conv.x_stride.t));
        });
        mbarrier_wait(me.smem + C::FULL + 8 * stage, me.parity_of(step));
        GT_NO_UNROLL
        for (int row = first; row < end; row += AT_ONCE) {
            const uint32_t tile = me.stage(step) + (me.second && row < CHUNK ? C::NEXT : C::X);
            const uint32_t at = tile + panel_at<128>(row % CHUNK, own_lane() / 4) + own_lane() % 4 * 4;
            const auto address = [&](int i) { return (at ^ (16 * i)) + 128 * i; };
            uint32_t values[AT_ONCE];
            GT_UNROLL
            for (int i = 0; i < AT_ONCE; i++) values[i] = lds<uint32_t>(address(i));
            of.convolve(values);
            GT_UNROLL
            for (int i = 0; i < AT_ONCE; i++)
                if (row + i < end) sts<uint32_t>(address(i), values[i]);
        }
        fence_async_proxy();
        mbarrier_arrive(me.smem + C::CONVOLVED + 8 * stage);
    }
}

/* For other architectures it is empty, and bounded to one warp: see has_sm90a. */
template <class T, int N>
GT_KERNEL(GT_SM90A ? 512 : 32, 1)
gradient_kernel(const GT_GRID_CONSTANT GradientParams p) {
#if GT_SM90A
    chunk_gradient_block<HopperGradientTraits<T, N, false, true>>(p);
#else
    (void)p;
    __trap();
#endif
}

} /* namespace conv_ssd */
} /* namespace gt */

#endif
