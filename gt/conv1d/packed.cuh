/* gt/conv1d/packed.cuh - packed sequences: forward, backward and their states.
 *
 * The tokens of all sequences are one row, cut into runs as in forward.cuh; threads lie side by side over channels.
 * A thread looks up which sequence the first token of its run belongs to, and walks through the run piece by piece, a
 * piece being what one sequence has of it.  The inputs before a piece are earlier tokens of the sequence, or come from
 * its state.  Other strides than those of channels side by side, [B,D,T] too, are served one channel a thread.
 * What a call costs depends on the sequences that there are, not on seq_capacity: nothing is launched or stored for a
 * sequence that there may be.  Per token all is added in the same order as without packing: y, dx and the states have
 * the bits that each sequence has alone. */
#ifndef GT_CONV1D_PACKED_CUH
#define GT_CONV1D_PACKED_CUH

#include "../recurrence/sequences.cuh"
#include "backward.cuh"

namespace gt {
namespace conv1d {

/* ---- sequences and pieces -------------------------------------------------------------------------------------- */

/* The sequence that token t < used_tokens() belongs to; `low` is it, or one before it.  An eighth of those in question
 * is left after every step, whose loads are in flight together. */
GT_DEV int64_t sequence_of(const Sequences& q, int64_t t, int64_t low) {
    constexpr int PARTS = 8;
    if (t < q.cu_seqlens[low + 1]) return low;
    int64_t high = sequence_count(q), step;
    do { /* cu_seqlens[low] <= t, and t < cu_seqlens[high] */
        step = (high - low + PARTS - 1) / PARTS;
        int64_t found = low;
        GT_UNROLL
        for (int i = 1; i < PARTS; i++) {
            const int64_t s = low + i * step < high ? low + i * step : high - 1;
            if (q.cu_seqlens[s] <= t) found = s; /* of empty sequences the last */
        }
        low = found;
        if (low + step < high) high = low + step;
    } while (step > 1);
    return low;
}

/* Tokens first ... last - 1, of a sequence that has `begin` to `end` - 1. */
struct Piece {
    int64_t sequence, begin, end, first, last;
};

/* The piece from token t on, of a run that ends at `last`; `low` as above. */
GT_DEV Piece piece_at(const Sequences& q, int64_t t, int64_t last, int64_t low) {
    const int64_t s = sequence_of(q, t, low), begin = q.cu_seqlens[s], end = q.cu_seqlens[s + 1];
    return {s, begin, end, t, end < last ? end : last};
}

/* window[0..2] = the three inputs before token t of a sequence, which may be its end. */
template <class T, int VEC>
GT_DEV void load_window(float (&window)[TAPS][VEC], const Problem& p, int64_t sequence, int64_t begin, int64_t t,
                        int64_t d) {
    Vec<T, VEC> before[HALO];
    GT_UNROLL
    for (int i = 0; i < HALO; i++) {
        before[i] = {};
        if (t - HALO + i >= begin)
            before[i] = ldg<Vec<T, VEC>>(static_cast<const T*>(p.x) + at(p.x_at, 0, t - HALO + i, d));
    }
    GT_UNROLL
    for (int i = 0; i < HALO; i++) {
        const int64_t past = t - HALO + i - begin;
        GT_UNROLL
        for (int v = 0; v < VEC; v++)
            window[i][v] = past >= 0 ? before[i].get(v) : state_input(p, sequence, d + v, (int)past);
    }
}

/* A thread of a kernel over states: channel d of sequences first, first + strands, ... */
struct Strand {
    int64_t d, first;
    bool exists;
};

GT_DEV Strand strand_of(int64_t D, int64_t strands) {
    const int64_t item = (int64_t)block_x() * THREADS + thread_id();
    return {item % D, item / D, item / D < strands};
}

/* ---- forward ------------------------------------------------------------------------------------------------------
 * grid tiles * ceil(runs / rows of a block), block 256.
 * registers: as in forward.cuh.  No shared memory.
 * bytes: x and y once; 3 tokens of every run a second time, out of a cache; cu_seqlens, out of a cache. */

struct PackedForwardParams {
    ForwardParams f;
    Sequences sequences;
    int64_t strands; /* only of the kernel over states */
};

template <class T, int VEC>
GT_DEV void forward_piece(const ForwardParams& p, const Taps<VEC>& taps, const Piece& piece, int64_t d) {
    constexpr int COUNT = BATCH<T, VEC, 1>;
    const Problem& in = p.in;
    float e[TAPS][VEC];
    load_window<T, VEC>(e, in, piece.sequence, piece.begin, piece.first, d);
    for (int64_t t = piece.first; t < piece.last; t += COUNT) {
        Vec<T, VEC> x[COUNT];
        load_tokens(x, in.x, in.x_at, 0, t, d, piece.last - t);
        GT_UNROLL
        for (int i = 0; i < COUNT; i++) {
            if (t + i >= piece.last) break;
            float y[VEC];
            GT_UNROLL
            for (int v = 0; v < VEC; v++) {
                e[HALO][v] = x[i].get(v);
                const float pre = taps.sum(e, v);
                y[v] = in.has_silu ? silu_of_sigmoid(pre, sigmoid_of<T>(pre)) : pre;
            }
            store_token<T, VEC>(p.y, p.y_at, 0, t + i, d, y);
            shift(e);
        }
    }
}

template <class T, int VEC>
GT_KERNEL(THREADS, 2) packed_forward_kernel(const GT_GRID_CONSTANT PackedForwardParams p) {
    const Problem& in = p.f.in;
    const Place me = place_of<VEC>(in, p.f.cut, in.T);
    if (!me.exists) return;
    const int64_t used = used_tokens(p.sequences), last = me.last < used ? me.last : used;
    Taps<VEC> taps;
    taps.load(in, me.d);
    int64_t t = me.first, s = 0;
    while (t < last) {
        const Piece piece = piece_at(p.sequences, t, last, s);
        forward_piece<T, VEC>(p.f, taps, piece, me.d);
        s = piece.sequence;
        t = piece.last;
    }
    const float zero[VEC] = {};
    for (; t < me.last; t++) store_token<T, VEC>(p.f.y, p.f.y_at, 0, t, me.d, zero);
}

/* state_out, the inputs before the end of every sequence.  It runs after the kernel above, which reads state_in: they
 * may be the same memory, of which a thread reads all that is its own before it writes.
 * grid ceil(D * strands / 256), block 256.  registers: three inputs.  No shared memory.
 * bytes: up to 3 tokens of x and of state_in of every sequence; state_out once. */
template <class T>
GT_KERNEL(THREADS, 2) packed_state_kernel(const GT_GRID_CONSTANT PackedForwardParams p) {
    const Problem& in = p.f.in;
    const Strand me = strand_of(in.D, p.strands);
    const int64_t sequences = me.exists ? sequence_count(p.sequences) : 0, J = in.W - 1;
    for (int64_t s = me.first; s < sequences; s += p.strands) {
        float e[TAPS][1];
        load_window<T, 1>(e, in, s, p.sequences.cu_seqlens[s], p.sequences.cu_seqlens[s + 1], me.d);
        GT_UNROLL
        for (int i = 0; i < HALO; i++)
            if (i >= HALO - J) p.f.state_out[(s * in.D + me.d) * J + i - (HALO - J)] = e[i][0];
    }
}

/* ---- backward -----------------------------------------------------------------------------------------------------
 * grid, block and shared memory as in backward.cuh, but runs are of tokens: the walk through a piece goes on for 3
 * steps, for the q that its last dx need.
 * registers: as in backward.cuh.
 * bytes: x, dy and dx once; 6 tokens of x and 3 of dy of every run a second time, out of a cache; cu_seqlens, out of a
 * cache.
 * dweight and dbias are summed over a run, then as in backward.cuh: deterministic. */

struct PackedBackwardParams {
    BackwardParams b;
    Sequences sequences;
};

/* The walk from a piece's first token to 3 beyond its last: each(t, e, q, gradient) gets the inputs e_{t-3} ... e_t, as
 * many q, q_t being q[3], and the gradient of input t - 3.  Those of the first 3 steps are only whole for a piece that
 * its sequence begins with: then they are the state's. */
template <class T, int VEC, class Each>
GT_DEV void walk_back(const BackwardParams& p, const Taps<VEC>& taps, const Piece& piece, int64_t d, Each each) {
    constexpr int COUNT = BATCH<T, VEC, 2>;
    const Problem& in = p.in;
    const int64_t stop = piece.last + HALO, read = stop < piece.end ? stop : piece.end;
    float e[TAPS][VEC], q[TAPS][VEC] = {};
    load_window<T, VEC>(e, in, piece.sequence, piece.begin, piece.first, d);
    for (int64_t t = piece.first; t < stop; t += COUNT) {
        Vec<T, VEC> x[COUNT], dy[COUNT];
        load_tokens(x, in.x, in.x_at, 0, t, d, read - t);
        load_tokens(dy, p.dy, p.dy_at, 0, t, d, read - t);
        GT_UNROLL
        for (int i = 0; i < COUNT; i++) {
            if (t + i >= stop) break;
            const bool inside = t + i < piece.end;
            float gradient[VEC];
            GT_UNROLL
            for (int v = 0; v < VEC; v++) {
                e[HALO][v] = x[i].get(v);
                q[HALO][v] = inside ? gradient_of_sum<T>(in, taps.sum(e, v), dy[i].get(v)) : 0.0f;
                gradient[v] = taps.gradient(q, v);
                if (!inside) gradient[v] += state_gradient(p, piece.sequence, t + i - HALO, piece.end, d + v);
            }
            each(t + i, e, q, gradient);
            shift(e);
            shift(q);
        }
    }
}

/* dx, and what the piece adds to the parameters' gradients. */
template <class T, int VEC>
GT_DEV void backward_piece(const BackwardParams& p, const Taps<VEC>& taps, const Piece& piece, int64_t d,
                           Sums<VEC>& sums) {
    walk_back<T, VEC>(p, taps, piece, d, [&](int64_t t, const float(&e)[TAPS][VEC], const float(&q)[TAPS][VEC],
                                             const float(&dx)[VEC]) {
        if (t < piece.last) {
            GT_UNROLL
            for (int v = 0; v < VEC; v++) {
                GT_UNROLL
                for (int k = 0; k < TAPS; k++)
                    if (k >= taps.first) sums.tap[k][v] = fma_rn(e[k][v], q[HALO][v], sums.tap[k][v]);
                sums.tap[TAPS][v] += q[HALO][v];
            }
        }
        if (p.dx && t - HALO >= piece.first) store_token<T, VEC>(p.dx, p.dx_at, 0, t - HALO, d, dx);
    });
}

template <class T, int VEC>
GT_DEV void packed_backward_run(const PackedBackwardParams& p, const Place& me, Sums<VEC>& sums) {
    const int64_t used = used_tokens(p.sequences), last = me.last < used ? me.last : used;
    Taps<VEC> taps;
    taps.load(p.b.in, me.d);
    int64_t t = me.first, s = 0;
    while (t < last) {
        const Piece piece = piece_at(p.sequences, t, last, s);
        backward_piece<T, VEC>(p.b, taps, piece, me.d, sums);
        s = piece.sequence;
        t = piece.last;
    }
    const float zero[VEC] = {};
    for (; p.b.dx && t < me.last; t++) store_token<T, VEC>(p.b.dx, p.b.dx_at, 0, t, me.d, zero);
}

template <class T, int VEC>
GT_KERNEL(THREADS, 2) packed_backward_kernel(const GT_GRID_CONSTANT PackedBackwardParams p) {
    const Place me = place_of<VEC>(p.b.in, p.b.cut, p.b.in.T);
    Sums<VEC> sums = {};
    if (me.exists) packed_backward_run<T, VEC>(p, me, sums);
    if (p.b.dweight || p.b.dbias) store_sums<VEC>(p.b, me, sums);
}

/* The gradients of the states; of a shared one the sums over the sequences of each strand.  It runs after the kernel
 * above, which reads dstate_out: dstate_in may be the same memory, of which a thread reads all that is its own before it
 * writes.
 * grid ceil(D * strands / 256), block 256.  registers: as above for one channel, and two times three gradients.
 * No shared memory.
 * bytes: 3 tokens of x and dy, state_in and dstate_out of every sequence; dstate_in once. */

struct PackedStateParams {
    BackwardParams b;
    Sequences sequences;
    int64_t strands;
    bool is_summed;
    float* dstate_in; /* [sequence,D,W-1]; sums: [strands,D,W-1] */
};

GT_DEV void store_state_gradient(const PackedStateParams& p, int64_t row, int64_t d, const float (&gradient)[HALO]) {
    const int64_t J = p.b.in.W - 1;
    GT_UNROLL
    for (int i = 0; i < HALO; i++)
        if (i >= HALO - J) p.dstate_in[(row * p.b.in.D + d) * J + i - (HALO - J)] = gradient[i];
}

template <class T>
GT_KERNEL(THREADS, 2) packed_backward_state_kernel(const GT_GRID_CONSTANT PackedStateParams p) {
    const Problem& in = p.b.in;
    const Strand me = strand_of(in.D, p.strands);
    if (!me.exists) return;
    const int64_t sequences = sequence_count(p.sequences);
    Taps<1> taps;
    taps.load(in, me.d);
    float sum[HALO] = {};
    for (int64_t s = me.first; s < sequences; s += p.strands) {
        const int64_t begin = p.sequences.cu_seqlens[s], end = p.sequences.cu_seqlens[s + 1];
        const Piece none = {s, begin, end, begin, begin}; /* so that the walk has the first 3 steps alone */
        float gradient[HALO] = {};
        walk_back<T, 1>(p.b, taps, none, me.d,
                        [&](int64_t t, const float(&)[TAPS][1], const float(&)[TAPS][1], const float(&of_input)[1]) {
                            GT_UNROLL
                            for (int i = 0; i < HALO; i++)
                                if (t - begin == i) gradient[i] = of_input[0];
                        });
        if (!p.is_summed) store_state_gradient(p, s, me.d, gradient);
        GT_UNROLL
        for (int i = 0; i < HALO; i++) sum[i] += gradient[i];
    }
    if (p.is_summed) store_state_gradient(p, me.first, me.d, sum);
}

} /* namespace conv1d */
} /* namespace gt */

#endif
