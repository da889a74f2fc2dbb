/* gt/conv1d/backward.cuh - backward.
 *
 * Tiles, runs and stages as tile.cuh says.  grid tiles * blocks of a tile, block 4 warps (fewer where their stages do
 * not fit into shared memory).
 * Step t of the walk makes q_t = dy_t act'(pre_t) and finishes dx_{t-W+1}.  A run has W - 1 steps more, which make the
 * q that its last dx need; behind the end of a sequence these q are 0.
 * registers: weights and their gradients, the last W - 1 inputs and q: 168 at most, so that three blocks share a
 * multiprocessor.
 * shared: over channels 3 stages of 4 KB (fp32 too) a warp, over time 2 of 9 KB; then the parameter gradients.
 * bytes: x, dy and dx once; of every run 2 (W - 1) tokens of x and W - 1 of dy a second time, out of a cache.
 * instructions an element, bf16, W = 4, SiLU: 12 FFMA, 1 adds, 11 of q, 2 unpack, half a one packs, then copies.
 * dweight and dbias are summed over a run, then over the block's warps in order, then over blocks by reduce_rows:
 * deterministic.  dx has the bits that a packed sequence has alone. */
#ifndef GT_CONV1D_BACKWARD_CUH
#define GT_CONV1D_BACKWARD_CUH

#include "tile.cuh"

namespace gt {
namespace conv1d {

struct BackwardParams {
    Problem in;
    Cut cut;
    const void* dy;
    gt_stride dy_at;
    const float* dstate_out;
    void* dx;
    gt_stride dx_at;
    float *dweight, *dbias; /* partial sums [blocks, D*W], [blocks, D]; NULL if not wanted */
};

template <class L>
constexpr int BACKWARD_STAGES = L::OVER_TIME ? 2 : 3;
template <class L>
constexpr int BACKWARD_BYTES = BACKWARD_STAGES<L> * 2 * L::BYTES; /* of shared memory, a warp */
template <class L>
constexpr int BACKWARD_BLOCKS = 3; /* on a multiprocessor */

/* What dstate_out adds to the gradient of the input of token t of a sequence that ends at `end`: row `row` of it
 * holds the last W-1 of them. */
GT_DEV float state_gradient(const BackwardParams& p, int64_t row, int64_t t, int64_t end, int64_t d) {
    const int64_t J = p.in.W - 1, j = t - (end - J);
    return p.dstate_out && j >= 0 ? p.dstate_out[(row * p.in.D + d) * J + j] : 0.0f;
}

/* Sums of parameter gradients: of the weights, then of the bias. */
template <int W, int VEC>
struct Sums {
    float tap[W + 1][VEC];
};

/* Sums over the warps of the block; all threads. */
template <class L, int W>
GT_DEV void store_sums(const BackwardParams& p, const Run& me, const Sums<W, L::VEC>& sums) {
    constexpr int VEC = L::VEC, CELLS = (W + 1) * VEC * 32;
    static_assert(4 * CELLS <= BACKWARD_BYTES<L>, "in the place of a warp's stages");
    const Problem& in = p.in;
    const uint32_t cells = smem_base();
    sync_threads(); /* all stages have been read */
    GT_UNROLL
    for (int k = 0; k <= W; k++) {
        GT_UNROLL
        for (int v = 0; v < VEC; v++)
            sts<float>(cells + 4 * (warp_id() * CELLS + (k * VEC + v) * 32 + lane_id()), sums.tap[k][v]);
    }
    sync_threads();
    for (int i = thread_id(); i < CELLS; i += block_threads()) {
        const int k = i / 32 / VEC, v = i / 32 % VEC;
        const int64_t d = tile_channel<L>(me) + i % 32 * VEC + v;
        float sum = 0.0f;
        for (int warp = 0; warp < p.cut.warps; warp++) sum += lds<float>(cells + 4 * (warp * CELLS + i));
        if (d >= in.D) continue;
        if (k < W) {
            if (p.dweight) p.dweight[(me.block * in.D + d) * W + k] = sum;
        } else if (p.dbias) {
            p.dbias[me.block * in.D + d] = sum;
        }
    }
}

/* The walk of a lane. */
template <class L, int W>
struct BackwardWalk {
    using T = typename L::T;
    static constexpr int VEC = L::VEC, UNIT = L::UNIT, J = W - 1;
    Filter<W, VEC> filter;
    Sums<W, VEC> sums;
    float e[W][VEC], q[W][VEC];

    /* One token; dx is that of the token J before. */
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

    /* Stores dx of the run's token t, which the stage holds, or the one before. */
    GT_METHOD void store(const BackwardParams& p, const Stream<L>& out, uint32_t stage, int begin, int t,
                         const float (&dx)[VEC]) {
        if (!p.dx) return;
        if constexpr (L::OVER_TIME) {
            Vec<T, 1> packed;
            packed.set(dx);
            sts(L::cell(stage, t - begin), packed);
        } else {
            store_token(out, t, p.cut.is_whole, dx);
        }
    }

    /* Tokens i ... i + UNIT - 1 of a stage, a ... of the run.  has_before: the J before are the piece's, too. */
    GT_METHOD void unit(const BackwardParams& p, const Stream<L>& out, uint32_t stage, int i, int a, bool has_before) {
        if constexpr (L::OVER_TIME) {
            const Vec<T, UNIT> xs = lds<Vec<T, UNIT>>(L::cell(stage, i));
            const Vec<T, UNIT> dys = lds<Vec<T, UNIT>>(L::cell(stage + L::BYTES, i));
            float dxs[UNIT];
            GT_UNROLL
            for (int n = 0; n < UNIT; n++) {
                const float x[1] = {xs.get(n)}, dy[1] = {dys.get(n)};
                float dx[1];
                step(p.in, x, dy, dx);
                dxs[n] = dx[0];
            }
            if (has_before) store_part<T, UNIT - J, 0, J>(L::cell(stage, i - UNIT), dxs);
            store_part<T, 0, J, UNIT - J>(L::cell(stage, i), dxs);
        } else {
            T* to = out.token(a - J);
            const bool stores = p.dx && out.me.channels;
            GT_UNROLL
            for (int n = 0; n < UNIT; n++) {
                const Vec<T, VEC> xs = lds<Vec<T, VEC>>(L::cell(stage, i + n));
                const Vec<T, VEC> dys = lds<Vec<T, VEC>>(L::cell(stage + L::BYTES, i + n));
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

    GT_METHOD void token(const BackwardParams& p, const Stream<L>& out, uint32_t stage, int begin, int a,
                         bool has_before) {
        const Vec<T, VEC> xs = lds<Vec<T, VEC>>(L::cell(stage, a - begin));
        const Vec<T, VEC> dys = lds<Vec<T, VEC>>(L::cell(stage + L::BYTES, a - begin));
        float x[VEC], dy[VEC], dx[VEC];
        GT_UNROLL
        for (int v = 0; v < VEC; v++) {
            x[v] = xs.get(v);
            dy[v] = dys.get(v);
        }
        step(p.in, x, dy, dx);
        if (has_before) store(p, out, stage, begin, a - J, dx);
    }

    /* The last J gradients of the piece of a sequence from the run's token `first` to a - 1.  What the sequence has
     * behind it is in the stage, which begins with token a then. */
    GT_METHOD void finish(const BackwardParams& p, const Stream<L>& out, const Piece& piece, uint32_t stage, int begin,
                          int first, int a) {
        GT_NO_UNROLL
        for (int t = a; t < a + J; t++) {
            const bool inside = t < piece.end;
            Vec<T, VEC> x = {}, dy = {};
            float dx[VEC];
            if (inside) {
                x = lds<Vec<T, VEC>>(L::cell(stage, t - begin));
                dy = lds<Vec<T, VEC>>(L::cell(stage + L::BYTES, t - begin));
            }
            GT_UNROLL
            for (int v = 0; v < VEC; v++) {
                e[J][v] = x.get(v);
                q[J][v] = inside ? gradient_of_sum<T>(p.in.has_silu, filter.sum(e, v), dy.get(v)) : 0.0f;
                dx[v] = filter.gradient(q, v);
                if (!inside && v < out.me.channels)
                    dx[v] += state_gradient(p, piece.sequence, t - J, piece.end, lane_channel<L>(out.me) + v);
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
    const int all = stages + (used == me.tokens && me.readable > used); /* with one for what is behind the run */
    const Stream<L> x(in.x, in.x_at, me), dy(p.dy, p.dy_at, me), dx(p.dx, p.dx_at, me);
    clear_missing<L>(me, base, 2 * STAGES);
    BackwardWalk<L, W> walk;
    walk.sums = {};
    Piece piece = {};
    int a = 0, first = 0, stop = 0; /* tokens done; the piece of a sequence: tokens first ... stop - 1 */
    const auto start_piece = [&] {
        piece = piece_at(in, me, a, piece.sequence);
        first = a;
        stop = piece.end < used ? piece.end : used;
        load_window<L, W>(walk.e, in, x, piece, a);
        GT_UNROLL
        for (int i = 0; i < W; i++) {
            GT_UNROLL
            for (int v = 0; v < L::VEC; v++) walk.q[i][v] = 0.0f;
        }
    };
    for (int k = 1 - STAGES; k < all; k++) { /* below 0: only copies */
        const int ahead = k + STAGES - 1;
        if (k >= 0) {
            cp_async_wait<STAGES - 2>();
            sync_warp(); /* stage k is there, and the one before is free */
        }
        if (ahead < all) {
            x.fill(base + ahead % STAGES * STAGE, ahead, granule);
            dy.fill(base + ahead % STAGES * STAGE + L::BYTES, ahead, granule);
        }
        cp_async_commit();
        if (k < 0) { /* what else the first stage needs is on its way with it */
            if (k < -1 || stages == 0) continue;
            walk.filter.load(in, lane_channel<L>(me), me.channels);
            start_piece();
            continue;
        }
        const uint32_t stage = base + k % STAGES * STAGE;
        const int begin = k * TOKENS, end = used - begin < TOKENS ? used : begin + TOKENS;
        if (k == stages && piece.end <= a) break; /* the last sequence ends with the run */
        for (;;) {
            if (a == stop) {
                if (k < stages && a == used && piece.end > a) break;
                if (a > 0) walk.finish(p, dx, piece, stage, begin, first, a);
                if (a == used) break;
                start_piece();
            }
            if (a == end) break;
            const bool is_unit = a % UNIT == 0 && a + UNIT <= stop && (a == first || a - (W - 1) >= first);
            if (is_unit && (L::OVER_TIME || p.cut.is_whole)) {
                walk.unit(p, dx, stage, a - begin, a, a > first);
                a += UNIT;
            } else {
                walk.token(p, dx, stage, begin, a, a - (W - 1) >= first);
                a++;
            }
        }
        if (L::OVER_TIME && p.dx) { /* the last UNIT tokens of a stage are not all there yet: the next one has them */
            sync_warp();
            dx.flush(stage, 0, begin - UNIT, a, granule);
            const bool is_last = k == stages || (a == used && piece.end <= a);
            if (is_last) {
                for (int t = begin + TOKENS - UNIT; t < a && me.channels; t++)
                    *dx.token(t) = lds<T>(L::cell(stage, t - begin));
            } else {
                sts(L::cell(base + (k + 1) % STAGES * STAGE, -UNIT), lds<Vec<T, UNIT>>(L::cell(stage, TOKENS - UNIT)));
            }
        }
    }
    if (p.dx && used < me.tokens) clear_tokens(dx, used);
    sums = walk.sums;
}

template <class L, int W>
GT_KERNEL(32 * WARPS, BACKWARD_BLOCKS<L>)
backward_kernel(const GT_GRID_CONSTANT BackwardParams p) {
    wait_for_chain(); /* for the kernel behind: it may take places that become free */
    const Run me = run_of<L>(p.in, p.cut, W - 1);
    Sums<W, L::VEC> sums = {};
    if (me.exists) backward_run<L, W>(p, me, sums);
    if (p.dweight || p.dbias) store_sums<L, W>(p, me, sums);
}

} /* namespace conv1d */
} /* namespace gt */

#endif
