/* gt/conv1d/backward.cuh - backward: with q_t = dy_t act'(pre_t),
 *     dx_t = sum_{j<W} weight[j] q_{t+W-1-j}     dweight[j] = sum_t e_{t+j} q_t     dbias = sum_t q_t
 *
 * tile.cuh defines tiles, runs, units and stages.  A stage holds x and dy.
 * grid: tiles * (blocks of a tile).  Block: 4 warps, or fewer if their stages exceed shared memory.  All warps do the
 * same work.  In the layout [B,T,D] a lane has 4 channels, in [B,D,T] one channel.
 * Step t computes q_t and completes dx_{t-W+1}.  At the end of a sequence or of the run, W - 1 more steps compute the q
 * that the last dx need.  After the end of a sequence these q are 0.  After the end of a run they come from the tokens
 * that follow.
 * registers: weights and their gradients, the last W - 1 inputs and q: 168 at most, so that three blocks share a
 * multiprocessor.
 * shared memory of a warp: [B,T,D] 3 stages of 4 KB; [B,D,T] 2 stages of 9 KB.  At the end the sums for dweight and
 * dbias overwrite the stages.
 * bytes: x, dy and dx once.  The W - 1 tokens of x before every run, and of x and dy after it, are read a second time,
 * from a cache.  A block stores 4 (W + 1) bytes of sums for each channel.
 * instructions per element (bf16, W = 4, SiLU): 12 FFMA, 1 FADD, 11 for q, 2 to unpack, 0.5 to pack, and the copies.
 * dweight and dbias are summed over a run, then over the block's warps, then over blocks by reduce_rows.  The order is
 * fixed, so the sums are deterministic.  dx of a packed sequence has the same bits as dx of the sequence alone. */
#ifndef GT_CONV1D_BACKWARD_CUH
#define GT_CONV1D_BACKWARD_CUH

#include "tile.cuh"

namespace gt {
namespace conv1d {

struct BackwardParams {
    Problem in;
    Cut cut;
    const void* dy;
    gt_stride dy_stride;
    const float* dstate_out;
    void* dx;
    gt_stride dx_stride;
    float *dweight, *dbias; /* partial sums [blocks, D*W] and [blocks, D]; NULL: not computed */
};

template <class L>
constexpr int BACKWARD_STAGES = L::OVER_TIME ? 2 : 3;
template <class L>
constexpr int BACKWARD_BYTES = BACKWARD_STAGES<L> * 2 * L::BYTES; /* shared memory of a warp */
template <class L>
constexpr int BACKWARD_BLOCKS = 3; /* resident blocks of a multiprocessor */

/* Returns what dstate_out adds to the gradient of input t.  state_out holds the last W - 1 inputs of a sequence, so
 * only these get a term.  `end`: one past the sequence's last token.  row: the sequence's row in dstate_out. */
GT_DEV float state_gradient(const BackwardParams& p, int64_t row, int64_t t, int64_t end, int64_t d) {
    const int64_t J = p.in.W - 1, j = t - (end - J);
    return p.dstate_out && j >= 0 ? p.dstate_out[(row * p.in.D + d) * J + j] : 0.0f;
}

/* Partial sums of the gradients of weights and bias. */
template <int W, int VEC>
struct Sums {
    float tap[W + 1][VEC]; /* weights of taps 0 ... W-1, then the bias */
};

/* Adds up the sums of the block's warps and stores them in row me.block.  All threads of the block must call this. */
template <class L, int W>
GT_DEV void store_sums(const BackwardParams& p, const Run& me, const Sums<W, L::VEC>& sums) {
    constexpr int VEC = L::VEC, VALUES = (W + 1) * VEC * 32;
    static_assert(4 * VALUES <= BACKWARD_BYTES<L>, "the sums fit where the warp's stages were");
    const Problem& in = p.in;
    const uint32_t values = smem_base();
    sync_threads(); /* all warps have read their stages */
    GT_UNROLL
    for (int k = 0; k <= W; k++) {
        GT_UNROLL
        for (int v = 0; v < VEC; v++)
            sts<float>(values + 4 * (warp_id() * VALUES + (k * VEC + v) * 32 + lane_id()), sums.tap[k][v]);
    }
    sync_threads();
    for (int i = thread_id(); i < VALUES; i += block_threads()) {
        const int k = i / 32 / VEC, v = i / 32 % VEC;
        const int64_t d = tile_channel<L>(me) + i % 32 * VEC + v;
        float sum = 0.0f;
        for (int warp = 0; warp < p.cut.warps; warp++) sum += lds<float>(values + 4 * (warp * VALUES + i));
        if (d >= in.D) continue;
        if (k < W) {
            if (p.dweight) p.dweight[(me.block * in.D + d) * W + k] = sum;
        } else if (p.dbias) {
            p.dbias[me.block * in.D + d] = sum;
        }
    }
}

/* A lane's registers during a run: the parameters of its channels and their gradients; in e[0 ... W-2] and q[0 ... W-2]
 * the last inputs and their q. */
template <class L, int W>
struct BackwardLane {
    using T = typename L::T;
    static constexpr int VEC = L::VEC, UNIT = L::UNIT, J = W - 1;
    Filter<W, VEC> filter;
    Sums<W, VEC> sums;
    float e[W][VEC], q[W][VEC];

    /* Processes one token.  dx becomes the gradient of the input J tokens earlier. */
    GT_METHOD void step(const Problem& in, const float (&x)[VEC], const float (&dy)[VEC], float (&dx)[VEC]) {
        GT_UNROLL
        for (int v = 0; v < VEC; v++) {
            e[J][v] = x[v];
            q[J][v] = gradient_of_sum<T>(in.has_silu, filter.sum(e, v), dy[v]);
            GT_UNROLL
            for (int k = 0; k < W; k++) sums.tap[k][v] = fma_rn(e[k][v], q[J][v], sums.tap[k][v]);
            sums.tap[W][v] += q[J][v];
            dx[v] = filter.gradient(q, v);
        }
        shift(e);
        shift(q);
    }

    /* Stores dx of the run's token t.  In the layout over time, dx goes to the stage whose first token is `begin`.  t
     * may lie in the unit before the stage: Layout::LEAD leaves room for that. */
    GT_METHOD void store(const BackwardParams& p, const RunTensor<L>& out, uint32_t stage, int begin, int t,
                         const float (&dx)[VEC]) {
        if (!p.dx) return;
        if constexpr (L::OVER_TIME) {
            Vec<T, 1> packed;
            packed.set(dx);
            sts(L::address(stage, t - begin), packed);
        } else {
            store_token(out, t, p.cut.is_whole, dx);
        }
    }

    /* Processes a unit: tokens i ... i + UNIT - 1 of the stage, which are tokens a ... a + UNIT - 1 of the run.
     * has_before: the J tokens before the unit belong to the same sequence and run, so their dx is stored. */
    GT_METHOD void unit(const BackwardParams& p, const RunTensor<L>& out, uint32_t stage, int i, int a,
                        bool has_before) {
        if constexpr (L::OVER_TIME) {
            const Vec<T, UNIT> xs = lds<Vec<T, UNIT>>(L::address(stage, i));
            const Vec<T, UNIT> dys = lds<Vec<T, UNIT>>(L::address(stage + L::BYTES, i));
            float dxs[UNIT];
            GT_UNROLL
            for (int n = 0; n < UNIT; n++) {
                const float x[1] = {xs.get(n)}, dy[1] = {dys.get(n)};
                float dx[1];
                step(p.in, x, dy, dx);
                dxs[n] = dx[0];
            }
            if (has_before) store_elements<T, UNIT - J, 0, J>(L::address(stage, i - UNIT), dxs);
            store_elements<T, 0, J, UNIT - J>(L::address(stage, i), dxs);
        } else {
            T* to = out.token(a - J);
            const bool stores = p.dx && out.me.channels;
            GT_UNROLL
            for (int n = 0; n < UNIT; n++) {
                const Vec<T, VEC> xs = lds<Vec<T, VEC>>(L::address(stage, i + n));
                const Vec<T, VEC> dys = lds<Vec<T, VEC>>(L::address(stage + L::BYTES, i + n));
                float x[VEC], dy[VEC], dx[VEC];
                GT_UNROLL
                for (int v = 0; v < VEC; v++) {
                    x[v] = xs.get(v);
                    dy[v] = dys.get(v);
                }
                step(p.in, x, dy, dx);
                Vec<T, VEC> packed;
                packed.set(dx);
                if (n < J ? stores && has_before : stores) stg(to, packed);
                to += out.s.t;
            }
        }
    }

    /* Processes token a of the run.  The stage begins with token `begin`.  has_before: token a - J belongs to the same
     * sequence and run, so its dx is stored. */
    GT_METHOD void token(const BackwardParams& p, const RunTensor<L>& out, uint32_t stage, int begin, int a,
                         bool has_before) {
        const Vec<T, VEC> xs = lds<Vec<T, VEC>>(L::address(stage, a - begin));
        const Vec<T, VEC> dys = lds<Vec<T, VEC>>(L::address(stage + L::BYTES, a - begin));
        float x[VEC], dy[VEC], dx[VEC];
        GT_UNROLL
        for (int v = 0; v < VEC; v++) {
            x[v] = xs.get(v);
            dy[v] = dys.get(v);
        }
        step(p.in, x, dy, dx);
        if (has_before) store(p, out, stage, begin, a - J, dx);
    }

    /* Computes dx of the last J tokens before token a.  Tokens first ... a - 1 of the run belong to one sequence.  The
     * sequence ends at a, or it continues after the run.  In the second case the stage holds the tokens from a on. */
    GT_METHOD void finish(const BackwardParams& p, const RunTensor<L>& out, const SequenceBounds& bounds,
                          uint32_t stage, int begin, int first, int a) {
        GT_NO_UNROLL
        for (int t = a; t < a + J; t++) {
            const bool inside = t < bounds.end;
            Vec<T, VEC> x = {}, dy = {};
            float dx[VEC];
            if (inside) {
                x = lds<Vec<T, VEC>>(L::address(stage, t - begin));
                dy = lds<Vec<T, VEC>>(L::address(stage + L::BYTES, t - begin));
            }
            GT_UNROLL
            for (int v = 0; v < VEC; v++) {
                e[J][v] = x.get(v);
                q[J][v] = inside ? gradient_of_sum<T>(p.in.has_silu, filter.sum(e, v), dy.get(v)) : 0.0f;
                dx[v] = filter.gradient(q, v);
                if (!inside && v < out.me.channels)
                    dx[v] += state_gradient(p, bounds.sequence, t - J, bounds.end, lane_channel<L>(out.me) + v);
            }
            if (t - J >= first) store(p, out, stage, begin, t - J, dx);
            shift(e);
            shift(q);
        }
    }
};

template <class L, int W>
GT_DEV void backward_run(const BackwardParams& p, const Run& me, Sums<W, L::VEC>& sums) {
    using T = typename L::T;
    constexpr int STAGES = BACKWARD_STAGES<L>, UNIT = L::UNIT, TOKENS = L::TOKENS, STAGE = 2 * L::BYTES;
    const Problem& in = p.in;
    const uint32_t base = smem_base() + warp_id() * BACKWARD_BYTES<L>;
    const int granule = p.cut.granule, used = used_of(in, me), stages = (used + TOKENS - 1) / TOKENS;
    /* one stage more if tokens after the run are needed */
    const int all = stages + (used == me.tokens && me.readable > used);
    const RunTensor<L> x(in.x, in.x_stride, me), dy(p.dy, p.dy_stride, me), dx(p.dx, p.dx_stride, me);
    clear_missing<L>(me, base, 2 * STAGES);
    BackwardLane<L, W> lane;
    lane.sums = {};
    SequenceBounds bounds = {};
    int a = 0;               /* number of processed tokens of the run */
    int first = 0, stop = 0; /* tokens first ... stop - 1 of the run belong to the current sequence */
    const auto start_sequence = [&] {
        bounds = bounds_at(in, me, a, bounds.sequence);
        first = a;
        stop = bounds.end < used ? bounds.end : used;
        load_window<L, W, false>(lane.e, in, x, bounds, a);
        GT_UNROLL
        for (int i = 0; i < W; i++) {
            GT_UNROLL
            for (int v = 0; v < L::VEC; v++) lane.q[i][v] = 0.0f;
        }
    };
    for (int k = 1 - STAGES; k < all; k++) { /* k < 0: only copies */
        const int ahead = k + STAGES - 1;
        if (k >= 0) {
            cp_async_wait<STAGES - 2>();
            sync_warp(); /* stage k has arrived, and no lane still reads stage k - 1 */
        }
        if (ahead < all) {
            x.fill(base + ahead % STAGES * STAGE, ahead, granule);
            dy.fill(base + ahead % STAGES * STAGE + L::BYTES, ahead, granule);
        }
        cp_async_commit();
        if (k < 0) { /* load the other inputs while the first stage is copied */
            if (k < -1 || stages == 0) continue;
            lane.filter.load(in, lane_channel<L>(me), me.channels);
            start_sequence();
            continue;
        }
        const uint32_t stage = base + k % STAGES * STAGE;
        const int begin = k * TOKENS, end = used - begin < TOKENS ? used : begin + TOKENS;
        if (k == stages && bounds.end <= a) break; /* the last sequence ends with the run */
        for (;;) {
            if (a == stop) {
                if (k < stages && a == used && bounds.end > a) break; /* tokens after the run follow */
                if (a > 0) lane.finish(p, dx, bounds, stage, begin, first, a);
                if (a == used) break;
                start_sequence();
            }
            if (a == end) break;
            /* unit() requires that all J tokens before the unit belong to the same sequence and run, or none. */
            const bool is_unit = a % UNIT == 0 && a + UNIT <= stop && (a == first || a - (W - 1) >= first);
            if (is_unit && (L::OVER_TIME || p.cut.is_whole)) {
                lane.unit(p, dx, stage, a - begin, a, a > first);
                a += UNIT;
            } else {
                lane.token(p, dx, stage, begin, a, a - (W - 1) >= first);
                a++;
            }
        }
        if (L::OVER_TIME && p.dx) {
            /* dx of the stage's last J tokens needs tokens of the next stage.  So the stage's last unit moves to the
             * room before the next stage's rows (LEAD), and the next flush stores it.  This flush begins with the last
             * unit of the previous stage. */
            sync_warp();
            dx.flush(stage, 0, begin - UNIT, a, granule);
            const bool is_last = k == stages || (a == used && bounds.end <= a);
            if (is_last) {
                for (int t = begin + TOKENS - UNIT; t < a && me.channels; t++)
                    *dx.token(t) = lds<T>(L::address(stage, t - begin));
            } else {
                sts(L::address(base + (k + 1) % STAGES * STAGE, -UNIT),
                    lds<Vec<T, UNIT>>(L::address(stage, TOKENS - UNIT)));
            }
        }
    }
    if (p.dx && used < me.tokens) clear_tokens(dx, used);
    sums = lane.sums;
}

template <class L, int W>
GT_KERNEL(32 * WARPS, BACKWARD_BLOCKS<L>)
backward_kernel(const GT_GRID_CONSTANT BackwardParams p) {
    wait_for_chain(); /* first kernel of the chain: does not wait, but lets the next kernel's blocks start early */
    const Run me = run_of<L>(p.in, p.cut, W - 1);
    Sums<W, L::VEC> sums = {};
    if (me.exists) backward_run<L, W>(p, me, sums);
    if (p.dweight || p.dbias) store_sums<L, W>(p, me, sums);
}

} /* namespace conv1d */
} /* namespace gt */

#endif
