/* gt/conv1d/borders.cuh - packed sequences in rows over time, [B,D,T], for rows.cuh and bulk_rows_sm90.cuh.
 *
 * A row is one channel and holds all sequences, one after another.  A border is the first token of a sequence, or the
 * end of the last sequence.  All rows have the same borders.  So borders are looked up once for a piece of a row and
 * stored as bits in shared memory.  Warps that take this piece of other channels use the same bits.
 * `near` is a unit's view of these bits, from HALO tokens before the unit to HALO tokens after it.  Inputs before a
 * sequence count as 0 (open_window, next_window).  The q (see backward.cuh) after a sequence count as 0, too
 * (close_window, prior_window).  Each of these values costs a select instruction.  If no unit of a warp has a border
 * near it, near = 0 is a compile-time constant and the compiler removes the selects.  Few units need inputs or
 * gradients of a state; for these, single tokens are computed again. */
#ifndef GT_CONV1D_BORDERS_CUH
#define GT_CONV1D_BORDERS_CUH

#include "backward.cuh"
#include "forward.cuh"

namespace gt {
namespace conv1d {

/* Number of 32-bit words that hold the bits of all units that begin within `tokens` tokens.  `tokens` is a multiple of
 * 64. */
GT_HD constexpr int border_words(int tokens) { return tokens / 32 + 2; }

/* The border bits of a piece of a row, in shared memory. */
struct Borders {
    static constexpr int LEAD = 32; /* tokens before the piece that also have bits */
    uint32_t words;                 /* address of the bits; bit i is token i - LEAD of the piece */

    /* Computes the bits of tokens t ... t + 63, with one search and then one step for each border. */
    GT_DEV uint64_t bits(const Sequences& q, int64_t used, int64_t t) {
        if (t > used) return 0;
        int64_t s = t > 0 ? sequence_of(q, t - 1, 0) + 1 : 0;
        uint64_t bits = 0;
        for (;; s++) { /* starts at the first sequence that begins at t or later */
            const int64_t begin = q.cu_seqlens[s];
            if (begin >= t + 64) return bits;
            bits |= (uint64_t)1 << (int)(begin - t);
            if (begin >= used) return bits; /* the last border: no sequence follows it */
        }
    }

    /* Writes the bits of `tokens` tokens of the row, from `first` on.  `threads` threads share the work, two words
     * each, so that their searches wait for memory at the same time. */
    GT_METHOD void write(const Sequences& q, int64_t used, int64_t first, int tokens, int thread, int threads) const {
        GT_NO_UNROLL
        for (int i = 2 * thread; i < border_words(tokens); i += 2 * threads) {
            const uint64_t two = bits(q, used, first - LEAD + 32 * i);
            sts<uint32_t>(words + 4 * i, (uint32_t)two);
            sts<uint32_t>(words + 4 * i + 4, (uint32_t)(two >> 32));
        }
    }

    /* Returns the bits around a unit of n tokens that begins with token t of the piece.  Bit HALO + i belongs to token
     * t + i, for i from -HALO to n + HALO - 1. */
    GT_METHOD uint32_t near(int t, int n) const {
        const uint32_t i = (uint32_t)(t + LEAD - HALO), at = words + i / 32 * 4;
        const uint64_t both = (uint64_t)lds<uint32_t>(at + 4) << 32 | lds<uint32_t>(at);
        return (uint32_t)(both >> i % 32) & ((1u << (n + 2 * HALO)) - 1);
    }
};

/* A mask for `near`: the bits of the unit's tokens from ... to - 1. */
GT_HD constexpr uint32_t near_bits(int from, int to) { return (1u << (HALO + to)) - (1u << (HALO + from)); }

/* Bit n: the sequence of the unit's token n began less than J tokens before it, so the token needs inputs of the
 * state. */
template <int J>
GT_DEV uint32_t early_tokens(uint32_t near) {
    uint32_t bits = 0;
    GT_UNROLL
    for (int i = 0; i < J; i++) bits |= near >> (HALO - i);
    return bits;
}

/* Bit n: the unit's token n is one of the last J of its sequence, so it is in state_out. */
template <int J>
GT_DEV uint32_t late_tokens(uint32_t near) {
    uint32_t bits = 0;
    GT_UNROLL
    for (int i = 1; i <= J; i++) bits |= near >> (HALO + i);
    return bits;
}

/* Sets window[0 ... W-2] to the inputs e before a unit.  Inputs that are not in the sequence of the token before the
 * unit become 0. */
template <int W>
GT_DEV void open_window(float (&window)[W][1], const float* e, uint32_t near) {
    GT_UNROLL
    for (int i = 0; i < W - 1; i++) window[i][0] = near & near_bits(i + 2 - W, 0) ? 0.0f : e[i];
}

/* Completes the window of the unit's token n.  x is the token's own input.  If token n begins a sequence, the earlier
 * inputs become 0. */
template <int W>
GT_DEV void next_window(float (&window)[W][1], float x, int n, uint32_t near) {
    GT_UNROLL
    for (int i = 0; i < W - 1; i++) window[i][0] = near & near_bits(n, n + 1) ? 0.0f : window[i][0];
    window[W - 1][0] = x;
}

/* Sets later[0 ... W-2] to the q after a unit of N tokens.  The q that are not in the sequence of the token after the
 * unit become 0. */
template <int N, int W>
GT_DEV void close_window(float (&later)[W][1], const float* q, uint32_t near) {
    GT_UNROLL
    for (int i = 0; i < W - 1; i++) later[i][0] = near & near_bits(N + 1, N + 1 + i) ? 0.0f : q[i];
}

/* Sets later[0 ... W-1] to the q of the unit's token n and of the tokens after it.  q belongs to token n.  If the next
 * token begins a sequence, the later q become 0. */
template <int W>
GT_DEV void prior_window(float (&later)[W][1], float q, int n, uint32_t near) {
    GT_UNROLL
    for (int i = W - 1; i > 0; i--) later[i][0] = near & near_bits(n + 1, n + 2) ? 0.0f : later[i - 1][0];
    later[0][0] = q;
}

/* Loads the W inputs of token t of a packed row from global memory.  t < used_tokens(). */
template <class T, bool FORWARD, int W>
GT_DEV void load_window_of(float (&window)[W][1], const Problem& p, const T* row, int64_t d, int64_t t) {
    const int64_t s = sequence_of(p.sequences, t, 0), begin = p.sequences.cu_seqlens[s];
    GT_UNROLL
    for (int k = 0; k < W; k++) {
        const int64_t past = t - (W - 1) + k;
        window[k][0] = past >= begin ? Element<T>::load(row, past) : state_input<FORWARD>(p, s, d, (int)(past - begin));
    }
}

/* Computes the outputs of a unit.  e holds the W - 1 inputs before the unit, then the unit's own. */
template <class T, int W, int N, int COUNT>
GT_DEV void forward_unit(float (&y)[N], const Problem& p, const Filter<W, 1>& filter, const float (&e)[COUNT],
                         uint32_t near) {
    float window[W][1];
    open_window(window, e, near);
    GT_UNROLL
    for (int n = 0; n < N; n++) {
        next_window(window, e[n + W - 1], n, near);
        y[n] = output_of_sum<T>(p.has_silu, filter.sum(window, 0));
        shift(window);
    }
}

/* Computes the outputs of a unit of a packed row.  The unit begins with token t.  Tokens from `end` on belong to no
 * sequence, so their outputs are 0.  t and `end` count from the row's token `first`.  row: the row of x.  All lanes of
 * a warp must call this function. */
template <class T, int W, int N, int COUNT>
GT_DEV void forward_packed_unit(float (&y)[N], const Problem& p, const Filter<W, 1>& filter, const float (&e)[COUNT],
                                uint32_t near, const T* row, int64_t d, int64_t first, int t, int end) {
    if (!warp_any(near != 0)) {
        forward_unit<T>(y, p, filter, e, 0);
    } else {
        forward_unit<T>(y, p, filter, e, near);
        if (p.state_in && near) {
            const uint32_t early = early_tokens<W - 1>(near);
            GT_NO_UNROLL
            for (int n = 0; n < N; n++) {
                if (!(early >> n & 1) || first + t + n < 0 || t + n >= end) continue;
                float window[W][1];
                load_window_of<T, true>(window, p, row, d, first + t + n);
                const float of_token = output_of_sum<T>(p.has_silu, filter.sum(window, 0));
                GT_UNROLL
                for (int i = 0; i < N; i++) y[i] = i == n ? of_token : y[i];
            }
        }
    }
    if (t + N > end) {
        GT_UNROLL
        for (int n = 0; n < N; n++) y[n] = t + n < end ? y[n] : 0.0f;
    }
}

} /* namespace conv1d */
} /* namespace gt */

#endif
