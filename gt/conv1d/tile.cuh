/* gt/conv1d/tile.cuh - tiles and copies of the kernels in forward.cuh and backward.cuh.
 *
 * A warp takes a tile of channels and a run, up to MAX_RUN tokens of one batch element.  It goes through the run from
 * the first token to the last.  cp.async fills a ring of buffers in shared memory, called stages, ahead of the warp.
 * So bytes in flight cost no registers.  Every warp has its own ring, so warps meet at no barrier before the run is
 * done.
 *
 * Neighbouring lanes have neighbouring channels.  There are two layouts of a tensor in a stage:
 *
 *   over channels, [B,T,D]   A row is a token: 128 channels, four a lane.  8 tokens (fp32: 4) are 2 KB.
 *   over time, [B,D,T]       A row is a channel, one a lane: 128 bytes of tokens.  32 rows are 4.5 KB.  Rows are 144
 *                            bytes apart, so that 8 lanes that read 16 bytes each use no bank twice.  Outputs
 *                            overwrite the inputs in the stage, and are stored from there as whole rows.
 *
 * A unit is as many tokens as 16 bytes hold: 8 (fp32: 4).  If all tokens of a unit belong to one sequence, they are
 * computed without tests; otherwise the unit goes token by token.  All lanes are at the same token, so the end of a
 * sequence costs one branch a warp.
 *
 * The granule of a call is the number of bytes that one copy moves.  It is 16 if the alignment of all tensors permits
 * that, otherwise 4 or one element. */
#ifndef GT_CONV1D_TILE_CUH
#define GT_CONV1D_TILE_CUH

#include "problem.cuh"

namespace gt {
namespace conv1d {

constexpr int WARPS = 4;     /* most warps of a block */
constexpr int MAX_RUN = 256; /* most tokens of a run; a thread sums over one run, and longer sums round more */

template <class T_, bool OVER_TIME_>
struct Layout {
    using T = T_;
    static constexpr bool OVER_TIME = OVER_TIME_;
    static constexpr int SIZE = sizeof(T);
    static constexpr int UNIT = 16 / SIZE;                                  /* tokens */
    static constexpr int VEC = OVER_TIME ? 1 : 4;                           /* channels of a lane */
    static constexpr int CHANNELS = 32 * VEC;                               /* channels of a tile */
    static constexpr int TOKENS = OVER_TIME ? 128 / SIZE : UNIT;            /* tokens of a stage */
    static constexpr int ROWS = OVER_TIME ? CHANNELS : TOKENS;              /* rows of a stage */
    static constexpr int ROW = OVER_TIME ? TOKENS * SIZE : CHANNELS * SIZE; /* bytes */
    /* In the layout over time, a stage has one extra unit before every row.  Backward stores dx of the previous stage's
     * last unit there.  In forward the extra unit is only padding. */
    static constexpr int LEAD = OVER_TIME ? 16 : 0;
    static constexpr int PITCH = LEAD + ROW;
    static constexpr int BYTES = ROWS * PITCH;

    /* Returns the address of token i of the lane's channels in a stage.  In the layout over time, i may be as low as
     * -UNIT. */
    GT_DEV uint32_t address(uint32_t stage, int i) {
        return OVER_TIME ? stage + lane_id() * PITCH + LEAD + i * SIZE : stage + i * PITCH + lane_id() * VEC * SIZE;
    }
};

/* How a call is cut: channels into `tiles`, every batch element into `runs` of `run` tokens.  A block takes `warps`
 * runs of one tile. */
struct Cut {
    int run, warps, granule;     /* granule: bytes of one copy */
    int64_t tiles, runs, blocks; /* blocks: number of blocks for each tile */
    /* In the layout over channels: each lane has four channels or none, so it stores a token with one 8- or 16-byte
     * store. */
    bool is_whole;
};

/* The run and the channels that a warp works on. */
struct Run {
    int64_t b, first; /* batch element; first token of the run */
    int tile, block;  /* index of the tile; index of the block within the tile */
    /* tokens of the run; tokens that the run may read, including those after its end */
    int tokens, readable;
    int width, channels; /* channels of the tile; channels of the lane, perhaps 0 */
    bool exists;
};

/* Return the first channel of a tile, and of a lane. */
template <class L>
GT_DEV int64_t tile_channel(const Run& me) {
    return (int64_t)me.tile * L::CHANNELS;
}
template <class L>
GT_DEV int64_t lane_channel(const Run& me) {
    return tile_channel<L>(me) + lane_id() * L::VEC;
}

/* lookahead: number of tokens after the run's end that the kernel reads. */
template <class L>
GT_DEV Run run_of(const Problem& p, const Cut& cut, int lookahead) {
    Run me;
    me.tile = block_x() % (int)cut.tiles; /* fits an int, since tiles * blocks is a grid's size */
    me.block = block_x() / (int)cut.tiles;
    const int64_t item = (int64_t)me.block * cut.warps + warp_id();
    me.b = item / cut.runs;
    me.first = item % cut.runs * cut.run;
    me.exists = me.b < p.B;
    const int64_t left = p.T - me.first;
    me.tokens = left < cut.run ? (int)left : cut.run;
    me.readable = left < cut.run + lookahead ? (int)left : cut.run + lookahead;
    const int64_t width = p.D - tile_channel<L>(me);
    me.width = width < L::CHANNELS ? (int)width : L::CHANNELS;
    const int channels = me.width - lane_id() * L::VEC;
    me.channels = channels < 0 ? 0 : channels < L::VEC ? channels : L::VEC;
    return me;
}

/* Returns how many of the run's tokens belong to sequences. */
GT_DEV int used_of(const Problem& p, const Run& me) {
    const int64_t used = used_tokens(p.sequences) - me.first;
    return used < 0 ? 0 : used < me.tokens ? (int)used : me.tokens;
}

/* A sequence's first token, and the token after its last, both relative to the run's first token.  A border that is
 * more than MAX_RUN + 64 tokens away is moved to that distance.  So it fits an int and is still outside the tokens that
 * the run reads. */
struct SequenceBounds {
    int64_t sequence;
    int begin, end;
};

/* Returns the sequence that holds the run's token a.  The search starts at sequence `low`, which must not be later. */
GT_DEV SequenceBounds bounds_at(const Problem& p, const Run& me, int a, int64_t low) {
    constexpr int FAR = MAX_RUN + 64;
    const int64_t s = p.sequences.cu_seqlens ? sequence_of(p.sequences, me.first + a, low) : me.b;
    const int64_t begin = (p.sequences.cu_seqlens ? p.sequences.cu_seqlens[s] : 0) - me.first;
    const int64_t end = (p.sequences.cu_seqlens ? p.sequences.cu_seqlens[s + 1] : p.T) - me.first;
    return {s, begin < -FAR ? -FAR : (int)begin, end > FAR ? FAR : (int)end};
}

/* ---- copies ---------------------------------------------------------------------------------- */

/* Clears the channels that a tile at the end of D lacks, in `count` buffers of BYTES, since lanes compute with these
 * channels, too.  The channels stay 0: copies write nothing there, or fill the last 16 bytes with zeros
 * (fill_whole). */
template <class L>
GT_DEV void clear_missing(const Run& me, uint32_t stages, int count) {
    if (me.width == L::CHANNELS) return;
    GT_NO_UNROLL
    for (int i = 0; i < count * L::TOKENS && me.channels < L::VEC; i++)
        sts(L::address(stages + i / L::TOKENS * L::BYTES, i % L::TOKENS), Vec<typename L::T, L::VEC>{});
    sync_warp();
}

/* One tensor, as a run reads or writes it. */
template <class L>
struct RunTensor {
    using T = typename L::T;
    T* from; /* address of the run's first token and the tile's first channel */
    const gt_stride& s;
    const Run& me;

    GT_METHOD RunTensor(const void* data, const gt_stride& s_, const Run& me_)
        : from(static_cast<T*>(const_cast<void*>(data)) + offset_of(s_, me_.b, me_.first, tile_channel<L>(me_))), s(s_),
          me(me_) {}

    /* Returns the address of the lane's first channel of token t. */
    GT_METHOD T* token(int t) const { return from + t * s.t + lane_id() * L::VEC * s.h; }

    /* The run as rows and columns, as stages hold it.  The steps are the strides of rows and columns in the tensor, in
     * elements.  The numbers of rows and columns include all that the run may read. */
    GT_METHOD int64_t row_step() const { return L::OVER_TIME ? s.h : s.t; }
    GT_METHOD int64_t column_step() const { return L::OVER_TIME ? s.t : s.h; }
    GT_METHOD int rows() const { return L::OVER_TIME ? me.width : me.readable; }
    GT_METHOD int columns() const { return L::OVER_TIME ? me.readable : me.width; }

    /* Copies the run's tokens k TOKENS ... (k + 1) TOKENS - 1 to a stage, 16 bytes at a time.  If the columns end
     * within 16 bytes, cp.async reads the existing columns and writes zeros for the others.  If no column of the 16
     * bytes exists, they are not written. */
    GT_METHOD void fill_whole(uint32_t stage, int k) const {
        /* STEP: rows that are copied at once */
        constexpr int N = 16 / L::SIZE, PER_ROW = L::ROW / 16, STEP = 32 / PER_ROW;
        const int row = L::OVER_TIME ? 0 : k * L::TOKENS, column = L::OVER_TIME ? k * L::TOKENS : 0;
        const int r0 = lane_id() / PER_ROW, c = column + lane_id() % PER_ROW * N, valid = columns() - c;
        const int last = valid > 0 ? rows() - row - r0 : 0, bytes = valid < N ? valid * L::SIZE : 16;
        const T* source = from + (row + r0) * row_step() + c; /* columns are adjacent */
        const uint32_t target = stage + L::LEAD + r0 * L::PITCH + lane_id() % PER_ROW * 16;
        GT_UNROLL
        for (int r = 0; r < L::ROWS; r += STEP) {
            if (r < last) cp_async<16>(target + r * L::PITCH, source, bytes);
            source += STEP * row_step();
        }
    }

    /* Does the same as fill_whole, with copies of G bytes.  A lane copies G bytes of BATCH rows at a time.  Copies of
     * less than 4 bytes go through registers, since cp.async moves at least 4. */
    template <int G>
    GT_METHOD void fill_rows(uint32_t stage, int k) const {
        constexpr int N = G / L::SIZE, BATCH = 8; /* BATCH: rows whose loads are in flight together */
        const int row = L::OVER_TIME ? 0 : k * L::TOKENS, column = L::OVER_TIME ? k * L::TOKENS : 0;
        GT_NO_UNROLL
        for (int i = lane_id(); i < L::ROW / G * (L::ROWS / BATCH + (L::ROWS < BATCH)); i += 32) {
            const int r0 = i / (L::ROW / G) * BATCH, c = column + i % (L::ROW / G) * N, valid = columns() - c;
            const int last = valid > 0 ? rows() - row - r0 : 0, bytes = valid < N ? valid * L::SIZE : G;
            const T* source = from + (row + r0) * row_step() + c * column_step();
            const uint32_t target = stage + L::LEAD + r0 * L::PITCH + i % (L::ROW / G) * G;
            T value[BATCH] = {};
            GT_UNROLL
            for (int r = 0; r < BATCH && r < L::ROWS; r++) {
                if (r >= last) continue; /* row r may lie beyond the tensor */
                if constexpr (G < 4)
                    value[r] = source[r * row_step()];
                else
                    cp_async<G>(target + r * L::PITCH, source + r * row_step(), bytes);
            }
            GT_UNROLL
            for (int r = 0; r < BATCH && r < L::ROWS && G < 4; r++)
                if (r < last) sts<T>(target + r * L::PITCH, value[r]);
        }
    }

    GT_METHOD void fill(uint32_t stage, int k, int granule) const {
        if (granule == 16)
            fill_whole(stage, k);
        else if (L::SIZE == 4 || granule == 4)
            fill_rows<4>(stage, k);
        else
            fill_rows<L::SIZE>(stage, k);
    }

    /* For the layout over time: stores the outputs that lie `offset` bytes into the rows of a stage.  The first of them
     * is the run's token `first`.  Tokens before 0 and from `end` on are not stored. */
    GT_METHOD void flush_whole(uint32_t stage, int offset, int first, int end) const {
        constexpr int N = 16 / L::SIZE, PER_ROW = L::ROW / 16, STEP = 32 / PER_ROW;
        const int r0 = lane_id() / PER_ROW, t = first + lane_id() % PER_ROW * N;
        const int last = t >= 0 && t < end ? rows() - r0 : 0, count = end - t;
        T* target = from + r0 * row_step() + t;
        const uint32_t source = stage + offset + r0 * L::PITCH + lane_id() % PER_ROW * 16;
        GT_UNROLL
        for (int r = 0; r < L::ROWS; r += STEP) {
            if (r < last) {
                const Vec<T, N> unit = lds<Vec<T, N>>(source + r * L::PITCH);
                if (count >= N) {
                    stg(target, unit);
                } else {
                    GT_NO_UNROLL
                    for (int i = 0; i < count; i++) target[i] = lds<T>(source + r * L::PITCH + i * L::SIZE);
                }
            }
            target += STEP * row_step();
        }
    }

    /* Does the same as flush_whole, with stores of G bytes. */
    template <int G>
    GT_METHOD void flush_rows(uint32_t stage, int offset, int first, int end) const {
        constexpr int N = G / L::SIZE;
        GT_NO_UNROLL
        for (int i = lane_id(); i < L::ROW / G * rows(); i += 32) {
            const int r = i / (L::ROW / G), t = first + i % (L::ROW / G) * N;
            T* target = from + r * row_step() + t * column_step();
            const uint32_t source = stage + offset + r * L::PITCH + i % (L::ROW / G) * G;
            if (t < 0 || t >= end) continue;
            if (t + N <= end)
                stg(target, lds<Vec<T, N>>(source));
            else
                *target = lds<T>(source); /* the second of two 16-bit elements is at `end` */
        }
    }

    GT_METHOD void flush(uint32_t stage, int offset, int first, int end, int granule) const {
        if (granule == 16)
            flush_whole(stage, offset, first, end);
        else if (L::SIZE == 4 || granule == 4)
            flush_rows<4>(stage, offset, first, end);
        else
            flush_rows<L::SIZE>(stage, offset, first, end);
    }
};

/* ---- single tokens --------------------------------------------------------------------------- */

/* Loads token t of a lane's channels from global memory.  Channels that do not exist get 0. */
template <class L>
GT_DEV void load_token(float (&to)[L::VEC], const RunTensor<L>& in, int t) {
    using T = typename L::T;
    const T* from = in.token(t);
    GT_UNROLL
    for (int v = 0; v < L::VEC; v++) to[v] = v < in.me.channels ? Element<T>::load(from, v * in.s.h) : 0.0f;
}

template <class L>
GT_DEV void store_token(const RunTensor<L>& out, int t, bool is_whole, const float (&y)[L::VEC]) {
    using T = typename L::T;
    T* to = out.token(t);
    if (is_whole) {
        Vec<T, L::VEC> packed;
        packed.set(y);
        if (out.me.channels) stg(to, packed);
        return;
    }
    GT_UNROLL
    for (int v = 0; v < L::VEC; v++)
        if (v < out.me.channels) Element<T>::store(to, v * out.s.h, y[v]);
}

/* Clears the run's tokens from `first` on. */
template <class L>
GT_DEV void clear_tokens(const RunTensor<L>& out, int first) {
    using T = typename L::T;
    GT_NO_UNROLL
    for (int r = 0; r < (L::OVER_TIME ? out.rows() : out.me.channels); r++) {
        GT_NO_UNROLL
        for (int t = L::OVER_TIME ? first + lane_id() : first; t < out.me.tokens; t += L::OVER_TIME ? 32 : 1)
            Element<T>::store(L::OVER_TIME ? out.from : out.token(0), r * out.s.h + t * out.s.t, 0.0f);
    }
}

/* ---- the operator on a lane's channels -------------------------------------------------------- */

/* The parameters of a lane's channels.  Channels that do not exist have 0. */
template <int W, int VEC>
struct Filter {
    float weight[W][VEC], bias[VEC];

    /* d is the first of `channels` channels, at most VEC.  Parameters of four channels are adjacent, so a lane loads
     * them 16 bytes at a time.  Loads of 4 bytes at large distances would keep the L1 cache busy for thousands of
     * clocks. */
    GT_METHOD void load(const Problem& p, int64_t d, int channels) {
        if constexpr (VEC == 4) {
            const float *weights = p.weight + d * W, *biases = p.bias ? p.bias + d : nullptr;
            if (channels == VEC && ((uintptr_t)weights | (uintptr_t)biases) % 16 == 0) {
                Vec<float, 4> of_taps[W], of_bias = {};
                GT_UNROLL
                for (int i = 0; i < W; i++) of_taps[i] = ldg<Vec<float, 4>>(weights + 4 * i);
                if (biases) of_bias = ldg<Vec<float, 4>>(biases);
                GT_UNROLL
                for (int v = 0; v < VEC; v++) {
                    GT_UNROLL
                    for (int k = 0; k < W; k++) weight[k][v] = of_taps[(v * W + k) / 4].get((v * W + k) % 4);
                    bias[v] = of_bias.get(v);
                }
                return;
            }
        }
        GT_UNROLL
        for (int v = 0; v < VEC; v++) {
            const bool exists = v < channels;
            GT_UNROLL
            for (int k = 0; k < W; k++) weight[k][v] = exists ? p.weight[(d + v) * W + k] : 0.0f;
            bias[v] = exists && p.bias ? p.bias[d + v] : 0.0f;
        }
    }

    /* Returns pre_t (see gt_conv1d.cuh) of channel v.  e holds the inputs e_{t-W+1} ... e_t. */
    GT_METHOD float sum(const float (&e)[W][VEC], int v) const {
        float pre = bias[v];
        GT_UNROLL
        for (int k = 0; k < W; k++) pre = fma_rn(weight[k][v], e[k][v], pre);
        return pre;
    }

    /* Returns the gradient of the input of one token.  q[0] is the token's q (see backward.cuh); the others belong to
     * the W - 1 tokens after it. */
    GT_METHOD float gradient(const float (&q)[W][VEC], int v) const {
        float sum = 0.0f;
        GT_UNROLL
        for (int k = 0; k < W; k++) sum = fma_rn(weight[k][v], q[W - 1 - k][v], sum);
        return sum;
    }
};

/* Sets window[0 ... W-2] to the inputs before the run's token t.  These are earlier tokens of the same sequence.
 * Inputs before the sequence's first token come from its state. */
template <class L, int W, bool FORWARD>
GT_DEV void load_window(float (&window)[W][L::VEC], const Problem& p, const RunTensor<L>& x,
                        const SequenceBounds& bounds, int t) {
    GT_UNROLL
    for (int i = 0; i < W - 1; i++) {
        const int past = t - (W - 1) + i;
        if (past >= bounds.begin) {
            load_token(window[i], x, past);
        } else {
            GT_UNROLL
            for (int v = 0; v < L::VEC; v++) {
                /* without made_here the compiler computes addresses earlier and keeps them in registers */
                const int64_t d = lane_channel<L>(x.me) + made_here(v);
                const int early = made_here(past - bounds.begin);
                window[i][v] = v < x.me.channels ? state_input<FORWARD>(p, bounds.sequence, d, early) : 0.0f;
            }
        }
    }
}

/* Stores x[FROM ... FROM + COUNT - 1] as elements FIRST, FIRST + 1, ... of a unit in shared memory.  Each store moves
 * as many elements as alignment permits. */
template <class T, int FIRST, int FROM, int COUNT, int N>
GT_DEV void store_elements(uint32_t unit, const float (&x)[N]) {
    constexpr int SIZE = FIRST % 4 == 0 && COUNT >= 4 ? 4 : FIRST % 2 == 0 && COUNT >= 2 ? 2 : 1;
    if constexpr (COUNT > 0) {
        float values[SIZE];
        Vec<T, SIZE> packed;
        GT_UNROLL
        for (int i = 0; i < SIZE; i++) values[i] = x[FROM + i];
        packed.set(values);
        sts(unit + FIRST * (int)sizeof(T), packed);
        store_elements<T, FIRST + SIZE, FROM + SIZE, COUNT - SIZE>(unit, x);
    }
}

} /* namespace conv1d */
} /* namespace gt */

#endif
