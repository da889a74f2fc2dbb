/* gt/conv1d/forward.cuh - forward: y_t = act(bias + sum_{j<W} weight[j] e_{t+j}).  e is the state's inputs, then x.
 *
 * tile.cuh defines tiles, runs, units and stages.
 * grid: tiles * (blocks of a tile).  Block: 4 warps, or fewer if their stages exceed shared memory.  All warps do the
 * same work.  In the layout [B,T,D] a lane has 4 channels, in [B,D,T] one channel.
 * registers: weights, the last W - 1 inputs, a loaded unit of x.  [B,T,D]: at most 96, so that five blocks share a
 * multiprocessor.  [B,D,T]: at most 80, for six blocks.
 * shared memory of a warp: [B,T,D] 4 stages of 2 KB; [B,D,T] 2 stages of 4.5 KB.
 * bytes: x and y once; states and parameters.  The W - 1 tokens before every run are read a second time, from a cache.
 * instructions per element (bf16, W = 4, SiLU): 4 FFMA, 6 for SiLU, 1 to unpack, 0.5 to pack, and the copies.
 * One thread sums an output in the order of the taps.  So results are deterministic, and a packed sequence has the same
 * bits as the sequence alone.
 *
 * The warps of a batch element's first run write its state_out.  They first read state_in, which may be the same
 * memory.  state.cuh computes state_out of packed sequences and of calls with T = 0. */
#ifndef GT_CONV1D_FORWARD_CUH
#define GT_CONV1D_FORWARD_CUH

#include "tile.cuh"

namespace gt {
namespace conv1d {

struct ForwardParams {
    Problem in;
    Cut cut;
    void* y;
    gt_stride y_stride;
    void* state_out; /* in.state_dtype */
};

template <class L>
constexpr int FORWARD_STAGES = L::OVER_TIME ? 2 : 4;
template <class L>
constexpr int FORWARD_BYTES = FORWARD_STAGES<L>* L::BYTES; /* shared memory of a warp */
template <class L>
constexpr int FORWARD_BLOCKS = L::OVER_TIME ? 6 : 5; /* resident blocks of a multiprocessor */

/* Computes state_out of channel d: the last W - 1 inputs of batch element b.  With T < W - 1 some of them come from
 * state_in, which may be the same memory.  j ascends, so the loop reads each input before it overwrites the input's
 * place. */
template <class T>
GT_DEV void store_state(const Problem& in, void* state_out, int64_t b, int64_t row, int64_t d) {
    const int J = in.W - 1;
    for (int j = 0; j < J; j++) {
        const int64_t t = in.T - J + j;
        const float input = t < 0 ? state_input(in, row, d, (int)t)
                                  : Element<T>::load(static_cast<const T*>(in.x), offset_of(in.x_stride, b, t, d));
        store_as(state_out, in.state_dtype, (row * in.D + d) * J + j, input);
    }
}

/* A lane's registers during a run: the parameters of its channels, and the last inputs in e[0 ... W-2]. */
template <class L, int W>
struct ForwardLane {
    using T = typename L::T;
    static constexpr int VEC = L::VEC, UNIT = L::UNIT;
    Filter<W, VEC> filter;
    float e[W][VEC];

    GT_METHOD void step(const Problem& in, const float (&x)[VEC], float (&y)[VEC]) {
        GT_UNROLL
        for (int v = 0; v < VEC; v++) {
            e[W - 1][v] = x[v];
            y[v] = output_of_sum<T>(in.has_silu, filter.sum(e, v));
        }
        shift(e);
    }

    /* Processes a unit: tokens i ... i + UNIT - 1 of the stage, which are tokens a ... a + UNIT - 1 of the run. */
    GT_METHOD void unit(const Problem& in, const RunTensor<L>& y_out, uint32_t stage, int i, int a) {
        if constexpr (L::OVER_TIME) {
            const Vec<T, UNIT> loaded = lds<Vec<T, UNIT>>(L::address(stage, i));
            float out[UNIT];
            GT_UNROLL
            for (int n = 0; n < UNIT; n++) {
                const float x[1] = {loaded.get(n)};
                float y[1];
                step(in, x, y);
                out[n] = y[0];
            }
            store_elements<T, 0, 0, UNIT>(L::address(stage, i), out);
        } else {
            T* to = y_out.token(a);
            GT_UNROLL
            for (int n = 0; n < UNIT; n++) {
                const Vec<T, VEC> loaded = lds<Vec<T, VEC>>(L::address(stage, i + n));
                float x[VEC], y[VEC];
                GT_UNROLL
                for (int v = 0; v < VEC; v++) x[v] = loaded.get(v);
                step(in, x, y);
                Vec<T, VEC> packed;
                packed.set(y);
                if (y_out.me.channels) stg(to, packed);
                to += y_out.s.t;
            }
        }
    }

    GT_METHOD void token(const Problem& in, const RunTensor<L>& y_out, bool is_whole, uint32_t stage, int i, int a) {
        const Vec<T, VEC> loaded = lds<Vec<T, VEC>>(L::address(stage, i));
        float x[VEC], y[VEC];
        GT_UNROLL
        for (int v = 0; v < VEC; v++) x[v] = loaded.get(v);
        step(in, x, y);
        if constexpr (L::OVER_TIME) {
            Vec<T, 1> packed;
            packed.set(y);
            sts(L::address(stage, i), packed);
        } else {
            store_token(y_out, a, is_whole, y);
        }
    }
};

template <class L, int W>
GT_DEV void forward_run(const ForwardParams& p, const Run& me) {
    using T = typename L::T;
    constexpr int STAGES = FORWARD_STAGES<L>, UNIT = L::UNIT, TOKENS = L::TOKENS;
    const Problem& in = p.in;
    const uint32_t base = smem_base() + warp_id() * FORWARD_BYTES<L>;
    const int granule = p.cut.granule, used = used_of(in, me), stages = (used + TOKENS - 1) / TOKENS;
    const RunTensor<L> x(in.x, in.x_stride, me), y(p.y, p.y_stride, me);
    clear_missing<L>(me, base, STAGES);
    ForwardLane<L, W> lane;
    SequenceBounds bounds = {};
    int a = 0, stop = 0;                        /* a: number of processed tokens; stop: end of the current sequence */
    for (int k = 1 - STAGES; k < stages; k++) { /* k < 0: only copies */
        const int ahead = k + STAGES - 1;
        if (k >= 0) {
            cp_async_wait<STAGES - 2>();
            sync_warp(); /* stage k has arrived, and no lane still reads stage k - 1 */
        }
        if (ahead < stages) x.fill(base + ahead % STAGES * L::BYTES, ahead, granule);
        cp_async_commit();
        if (k < 0) { /* loads weights after all copies have started, since copies take longer */
            if (k == -1) lane.filter.load(in, lane_channel<L>(me), me.channels);
            continue;
        }
        const uint32_t stage = base + k % STAGES * L::BYTES;
        const int begin = k * TOKENS, end = used - begin < TOKENS ? used : begin + TOKENS;
        while (a < end) {
            if (a == stop) {
                bounds = bounds_at(in, me, a, bounds.sequence);
                stop = bounds.end < used ? bounds.end : used;
                load_window<L, W, true>(lane.e, in, x, bounds, a);
            }
            if ((L::OVER_TIME || p.cut.is_whole) && a % UNIT == 0 && a + UNIT <= stop) {
                lane.unit(in, y, stage, a - begin, a);
                a += UNIT;
            } else {
                lane.token(in, y, p.cut.is_whole, stage, a - begin, a);
                a++;
            }
        }
        if (L::OVER_TIME) {
            sync_warp();
            y.flush(stage, L::LEAD, begin, end, granule);
        }
    }
    if (used < me.tokens) clear_tokens(y, used);
    if (p.state_out && me.first == 0 && !in.sequences.cu_seqlens)
        for (int v = 0; v < me.channels; v++) store_state<T>(in, p.state_out, me.b, me.b, lane_channel<L>(me) + v);
}

template <class L, int W>
GT_KERNEL(32 * WARPS, FORWARD_BLOCKS<L>)
forward_kernel(const GT_GRID_CONSTANT ForwardParams p) {
    const Run me = run_of<L>(p.in, p.cut, 0);
    if (me.exists) forward_run<L, W>(p, me);
}

} /* namespace conv1d */
} /* namespace gt */

#endif
