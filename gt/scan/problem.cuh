/* gt/scan/problem.cuh - code that all kernels of selective_scan share: sizes, arguments, the work of blocks and
 * threads. */
#ifndef GT_SCAN_PROBLEM_CUH
#define GT_SCAN_PROBLEM_CUH

#include "../recurrence/ssm.cuh"

namespace gt {
namespace scan {

using namespace ssm;

/* ---- sizes ------------------------------------------------------------------------------------------ */

constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr int STEPS = 8; /* tokens that share one Path */
constexpr int BATCH = 4; /* tokens whose y values are summed over the lanes together */

/* LANES adjacent lanes share COLUMNS adjacent channels.  Lane number l of the LANES lanes holds STATES state elements
 * of each of these channels, from element l * STATES on, 16 numbers in all.  This layout saves loads from shared
 * memory: a lane loads a channel's Delta once for STATES products, and a token's B once for COLUMNS products.  A warp
 * has WARP_CHANNELS channels, and a block has CHANNELS, all of one group.  EXACT: inputs and outputs are fp32.  The
 * constants below are sizes and offsets in shared memory.  They count floats. */
template <int LANES_, int STATES_, int COLUMNS_, bool EXACT_ = false>
struct Traits {
    static constexpr int LANES = LANES_, STATES = STATES_, COLUMNS = COLUMNS_;
    static constexpr bool EXACT = EXACT_;
    static constexpr int WIDTH = LANES * STATES;
    static constexpr int WARP_CHANNELS = 32 / LANES * COLUMNS, CHANNELS = WARPS * WARP_CHANNELS;
    static constexpr int ROWS = 32 / WARP_CHANNELS; /* tokens that a warp loads at once, one channel per lane */
    static_assert(STATES % 4 == 0 && STATES * COLUMNS == 16, "16 numbers a thread, in 16-byte pieces");
    /* forward: tokens of a tile, which are staged together */
    static constexpr int TILE = WIDTH <= 64 && !EXACT ? 16 : 8;
    static constexpr int F_BM = 0;                         /* B, two stages of [TILE][WIDTH] */
    static constexpr int F_CM = F_BM + 2 * TILE * WIDTH;   /* C, the same */
    static constexpr int F_WARP = F_CM + 2 * TILE * WIDTH; /* the first warp's part: */
    static constexpr int F_VALUES = TILE * WARP_CHANNELS;  /* size of Delta, of Delta u and of y,
                                                            * [TILE][WARP_CHANNELS] */
    static constexpr int F_MOST = 3 * F_VALUES;            /* [WARP_CHANNELS], see enter_channels() */
    static constexpr int F_WARP_SIZE = F_MOST + (WARP_CHANNELS + 3) / 4 * 4;
    static constexpr int FORWARD_BLOCKS = EXACT && LANES == 4 ? 3 : 2; /* least number of blocks per multiprocessor */
    static constexpr int FORWARD_END = F_WARP + WARPS * F_WARP_SIZE;
    /* backward: tokens of a sub-chunk, which are staged together; the block parks the state before each sub-chunk */
    static constexpr int SUB_CHUNK = WIDTH <= 128 ? 8 : 4, SUB_CHUNKS = CHECKPOINT / SUB_CHUNK;
    static constexpr int BM = 0, CM = BM + SUB_CHUNK * WIDTH; /* B and C, [SUB_CHUNK][WIDTH] each */
    static constexpr int WARP = CM + SUB_CHUNK * WIDTH;       /* the first warp's part: */
    static constexpr int VALUES = SUB_CHUNK * WARP_CHANNELS;  /* size of an array [SUB_CHUNK][WARP_CHANNELS] */
    static constexpr int DELTA = 0, INPUT = VALUES;           /* DELTA: Delta.  INPUT: Delta u; pair_backward()
                                                               * overwrites it with <g,B> */
    static constexpr int DY = 2 * VALUES, SLOPE = 3 * VALUES, U = 4 * VALUES;
    static constexpr int DECAYS = 5 * VALUES, OUTPUT = 6 * VALUES; /* DECAYS: <A,da>.  OUTPUT: <h,C> */
    static constexpr int PAIR = 4 * WIDTH > 512 ? 4 * WIDTH : 512; /* size of STATE for two tokens: each lane's h before
                                                                    * the first one */
    static constexpr int STATE = 7 * VALUES;                       /* h; then the warp's partial sums of dB and dC
                                                                    * overwrite h: [2][2 WIDTH] */
    static constexpr int MOST = STATE + SUB_CHUNK / 2 * PAIR;
    static constexpr int WARP_SIZE = MOST + (WARP_CHANNELS + 3) / 4 * 4;
    static constexpr int BACKWARD_END = WARP + WARPS * WARP_SIZE;
    static_assert(VALUES % 4 == 0 && F_VALUES % 4 == 0, "16-byte pieces");
    static_assert(4 * FORWARD_END <= 64 * 1024 && 4 * BACKWARD_END <= 64 * 1024, "fits every architecture");
};

/* The prepared arguments of a call, as every kernel gets them. */
struct Problem {
    Sequences sequences;
    Segments segments; /* states [slot][D,N]; decays [slot][D]: sums of Delta, which times A are logs of decays */
    int64_t D, G;
    int N;
    gt_dtype dtype, dt_dtype;
    int softplus;
    const void *u, *dt, *Bm, *Cm, *z, *dy;
    const float *A, *Dskip, *dt_bias;
    gt_stride u_stride, dt_stride, z_stride, dy_stride;
    gt_stride4 Bm_stride, Cm_stride;
    int64_t tiles; /* tiles of channels per group */
};

/* ---- how states decay --------------------------------------------------------------------------------- */

/* How a warp computes the decays of its states for STEPS tokens.  z = Delta A log2(e), so a decay is 2^z.
 *     FAST       Every decay is at most 2^-VALUE (see Least).  ex2.approx makes the decay.  Its error of 2^-22 per
 *                token adds up to at most 2^-22 / (VALUE ln 2) of a state.  This is 2^-18 with fp32 tensors and 2^-11
 *                with 16-bit tensors, whose outputs are rounded by as much or more.
 *     NEAR_ONE   Some decays are nearer to 1.  For these a polynomial makes the decay minus 1.
 *     GROWS      Some states grow: see Carrier.
 * EXACT: the tensors are fp32. */
enum Path { FAST, NEAR_ONE, GROWS };

template <bool EXACT>
struct Least {
    static constexpr float VALUE = EXACT ? 0.09f : 0.0007f; /* limit of |z| for the polynomial: log2(e) / 16 if EXACT,
                                                             * else log2(e) / 2048 */
    /* 2^z - 1 for -VALUE <= z <= 0 by Taylor's series.  The relative error is 1.3e-7 if EXACT, else 4e-8. */
    GT_HD float below_one(float z) {
        if (!EXACT) return z * fma_rn(0.240226507f, z, 0.693147181f);
        float p = 9.6181291e-3f;
        p = fma_rn(p, z, 5.5504109e-2f);
        p = fma_rn(p, z, 0.240226507f);
        return z * fma_rn(p, z, 0.693147181f);
    }
};

/* Advances a state by one token: 2^z x + added. */
template <int PATH, bool EXACT>
struct Decay;

template <bool EXACT>
struct Decay<FAST, EXACT> {
    float factor;
    GT_METHOD explicit Decay(float z) : factor(ex2_approx(z)) {}
    GT_METHOD float carry(float x, float added) const { return fma_rn(factor, x, added); }
    GT_METHOD float scale(float x) const { return factor * x; }
};

template <bool EXACT>
struct Decay<NEAR_ONE, EXACT> {
    float factor;
    bool near_one;
    GT_METHOD explicit Decay(float z) : near_one(z > -Least<EXACT>::VALUE) {
        factor = near_one ? Least<EXACT>::below_one(z) : ex2_approx(z);
    }
    GT_METHOD float carry(float x, float added) const {
        float sum = fma_rn(factor, x, added);
        if (near_one) sum += x;
        return sum;
    }
    GT_METHOD float scale(float x) const {
        float product = factor * x;
        if (near_one) product += x;
        return product;
    }
};

template <bool EXACT>
struct Decay<GROWS, EXACT> {
    Carrier carrier;
    GT_METHOD explicit Decay(float z) : carrier(z * LN_2) {}
    GT_METHOD float carry(float x, float added) const { return carrier.carry(x, added); }
    GT_METHOD float scale(float x) const { return carrier.carry(x, 0.0f); }
};

/* Calls call(std::integral_constant<int, PATH>) for a path that is known at run time.  The path must be the same in all
 * lanes. */
template <class Call>
GT_DEV void with_path(int path, const Call& call) {
    if (path == FAST)
        call(std::integral_constant<int, FAST>());
    else if (path == NEAR_ONE)
        call(std::integral_constant<int, NEAR_ONE>());
    else
        call(std::integral_constant<int, GROWS>());
}

/* ---- device helpers ---------------------------------------------------------------------------------- */

/* The work of a block and of a thread.  The grid consists of S strands.  A strand has one block for each tile of
 * channels of each group.  The blocks of strand s take the segments s, s + S, ... of all sequences.  A block belongs to
 * strand block_x() / (G * tiles). */
template <class C>
struct Coordinates {
    uint32_t smem;
    int64_t b, g, tile, d0; /* d0: the block's first channel */
    int64_t end;            /* the current segment of batch element b ends before this token */
    int channels;           /* number of existing channels of the warp; 0 or less: none */
    int first, lane;        /* first: the thread's first channel, as an index in the warp; lane: index among the LANES
                             * lanes that share it */

    GT_METHOD explicit Coordinates(const Problem& in) {
        const int64_t per_group = in.D / in.G;
        smem = smem_base();
        tile = block_x() % in.tiles;
        g = block_x() / in.tiles % in.G;
        b = 0;
        end = 0;
        const int64_t before = tile * C::CHANNELS + warp_id() * C::WARP_CHANNELS, left = per_group - before;
        d0 = g * per_group + before;
        channels = (int)(left < C::WARP_CHANNELS ? left : C::WARP_CHANNELS);
        first = lane_id() / C::LANES * C::COLUMNS;
        lane = lane_id() % C::LANES;
    }
    GT_METHOD void enter(const Span& span) {
        b = span.b;
        end = span.end;
    }
    GT_METHOD uint32_t address(int offset) const { return smem + 4 * offset; }
    /* index in [D,N] of the thread's first state element of channel c */
    GT_METHOD int64_t state_at(const Problem& in, int c) const { return (d0 + first + c) * in.N + lane * C::STATES; }
    /* how many of the thread's state elements of channel c exist; 0 or less: none */
    GT_METHOD int states_of(const Problem& in, int c) const {
        return first + c < channels ? in.N - lane * C::STATES : 0;
    }
};

/* items_of(): the number of segments of all sequences.  strands_of(): the number of strands, which share the segments.
 * strand_of(): the block's strand. */
GT_DEV int64_t items_of(const Problem& in) { return sequence_count(in.sequences) * in.segments.count; }
GT_DEV int64_t strands_of(const Problem& in) { return grid_x() / (in.G * in.tiles); }
GT_DEV int64_t strand_of(const Problem& in) { return block_x() / (in.G * in.tiles); }

/* The rows of a tensor [B,T,D] for the warp's channels, from token `first` on. */
template <class C>
GT_DEV Rows channel_rows(const Problem& in, const Coordinates<C>& s, const void* data, gt_stride stride, int64_t first,
                         int tokens) {
    return {data, in.dtype, offset_of(stride, s.b, first, s.d0), stride.t, stride.h, tokens, s.channels};
}

template <class C>
GT_DEV Rows dt_rows(const Problem& in, const Coordinates<C>& s, int64_t first, int tokens) {
    Rows rows = channel_rows(in, s, in.dt, in.dt_stride, first, tokens);
    rows.dtype = in.dt_dtype;
    return rows;
}

template <class C>
GT_DEV Rows group_rows(const Problem& in, const Coordinates<C>& s, const void* data, const gt_stride4& stride,
                       int64_t first, int tokens) {
    return {data, in.dtype, offset_of(stride, s.b, first, s.g), stride.t, stride.n, tokens, in.N};
}

/* A tile with a row for each token and a column for each of the warp's channels. */
template <class C, int TOKENS>
using ChannelTile = Tile<TOKENS, C::WARP_CHANNELS, 32>;

/* The channel whose inputs a lane loads and whose outputs it stores.  The channel is the same column of every
 * ChannelTile. */
struct Channel {
    bool exists;
    int column;
    int64_t d;
    float bias, skip;
    float most; /* the largest A log2(e) of the channel */
};

/* Loads A log2(e) of the thread's channels.  Missing elements must not change the warp's Path.  So an element beyond N
 * gets the value of its channel's first element, and all elements of a missing channel are -1.  most: offset in shared
 * memory of an array with a maximum for each of the warp's channels. */
template <class C>
GT_DEV Channel enter_channels(const Problem& in, const Coordinates<C>& s, int most, float (&A)[C::COLUMNS][C::STATES]) {
    GT_UNROLL
    for (int c = 0; c < C::COLUMNS; c++) {
        const int64_t at = s.state_at(in, c);
        const int count = s.states_of(in, c);
        const float other = s.first + c < s.channels ? finite(LOG2_E * in.A[at - s.lane * C::STATES]) : -1.0f;
        float largest = other;
        GT_UNROLL
        for (int i = 0; i < C::STATES; i++) {
            A[c][i] = i < count ? finite(LOG2_E * in.A[at + i]) : other;
            largest = fmaxf(largest, A[c][i]);
        }
        GT_UNROLL
        for (int mask = 1; mask < C::LANES; mask *= 2) largest = fmaxf(largest, shfl_xor(largest, mask));
        if (s.lane == 0) sts<float>(s.address(most + s.first + c), largest);
    }
    sync_warp();
    Channel own;
    own.column = lane_id() % C::WARP_CHANNELS;
    own.exists = own.column < s.channels;
    own.d = s.d0 + own.column;
    own.bias = own.exists && in.dt_bias ? in.dt_bias[own.d] : 0.0f;
    own.skip = own.exists && in.Dskip ? in.Dskip[own.d] : 0.0f;
    own.most = own.exists ? lds<float>(s.address(most + own.column)) : -1.0f;
    return own;
}

/* path[j]: the warp's Path for the STEPS tokens of a tile from STEPS j on. */
template <int TOKENS>
struct Paths {
    static constexpr int COUNT = (TOKENS + STEPS - 1) / STEPS;
    int path[COUNT];
};

/* A lane's numbers of a ChannelTile, as fp32 in registers. */
template <class C, int TOKENS>
using Numbers = float[ChannelTile<C, TOKENS>::COUNT];

/* Computes Delta of the loaded tokens, and stores Delta and Delta u at offsets `delta_at` and `input` of shared memory.
 * With SLOPE, slope becomes the derivative of Delta by dt.  Delta, Delta u and slope are 0 for missing tokens and
 * channels.  An infinite or NaN Delta does not count for the path, so it does not change the bits of other channels. */
template <bool SLOPE, class C, int TOKENS>
GT_DEV Paths<TOKENS> store_delta(const Problem& in, const Coordinates<C>& s, const Channel& own,
                                 const ChannelTile<C, TOKENS>& dt, const Numbers<C, TOKENS>& u, int tokens,
                                 int delta_at, int input, Numbers<C, TOKENS>& slope) {
    using Block = ChannelTile<C, TOKENS>;
    constexpr int COUNT = Block::COUNT, PATHS = Paths<TOKENS>::COUNT;
    float delta[COUNT], most[PATHS], least = 0.0f;
    dt.values(delta);
    GT_UNROLL
    for (int k = 0; k < COUNT; k++) delta[k] += own.bias, slope[k] = 1.0f;
    if (in.softplus) {
        GT_UNROLL
        for (int k = 0; k < COUNT; k++) {
            if (SLOPE) slope[k] = C::EXACT ? sigmoid(delta[k]) : sigmoid_fast(delta[k]);
            delta[k] = C::EXACT ? softplus(delta[k]) : softplus_fast(delta[k]);
        }
    }
    GT_UNROLL
    for (int j = 0; j < PATHS; j++) most[j] = own.exists ? -INFINITY : -1.0f;
    GT_UNROLL
    for (int k = 0; k < COUNT; k++) {
        const bool inside = own.exists && Block::row(k) < tokens;
        if (!inside) delta[k] = slope[k] = 0.0f;
        const int j = k * C::ROWS / STEPS; /* all lanes have the same j, since ROWS divides STEPS or STEPS divides
                                            * ROWS */
        const float counted = fabsf(delta[k]) < INFINITY ? delta[k] : 0.0f;
        if (own.exists) most[j] = fmaxf(most[j], counted * own.most);
        least = fminf(least, counted);
        if (Block::index(k) >= Block::SIZE) continue;
        sts<float>(s.address(delta_at + Block::index(k)), delta[k]);
        sts<float>(s.address(input + Block::index(k)), delta[k] * u[k]);
    }
    Paths<TOKENS> paths;
    const bool turns = warp_any(least < 0.0f);
    GT_UNROLL
    for (int j = 0; j < PATHS; j++)
        paths.path[j] = turns || warp_any(most[j] > 0.0f)             ? GROWS
                        : warp_any(most[j] > -Least<C::EXACT>::VALUE) ? NEAR_ONE
                                                                      : FAST;
    return paths;
}

/* A thread's numbers of one token, from shared memory. */
template <class C>
struct Token {
    float delta[C::COLUMNS], input[C::COLUMNS], B[C::STATES];

    /* delta_at, input_at: addresses of the thread's first channel.  B_at: address of the thread's first state
     * element. */
    GT_METHOD void load(uint32_t delta_at, uint32_t input_at, uint32_t B_at) {
        load_vector(delta, delta_at);
        load_vector(input, input_at);
        load_vector(B, B_at);
    }

    /* h <- exp(Delta A) h + Delta u B */
    template <int PATH>
    GT_METHOD void advance(float (&h)[C::COLUMNS][C::STATES], const float (&A)[C::COLUMNS][C::STATES]) const {
        GT_UNROLL
        for (int c = 0; c < C::COLUMNS; c++) {
            GT_UNROLL
            for (int i = 0; i < C::STATES; i++)
                h[c][i] = Decay<PATH, C::EXACT>(delta[c] * A[c][i]).carry(h[c][i], input[c] * B[i]);
        }
    }
};

/* Loads the thread's elements of a state [D,N].  Elements outside the state become 0.  If `from` is NULL, all elements
 * become 0. */
template <class C>
GT_DEV void load_state(const Problem& in, const Coordinates<C>& s, const float* from,
                       float (&state)[C::COLUMNS][C::STATES]) {
    GT_UNROLL
    for (int c = 0; c < C::COLUMNS; c++) {
        const int64_t at = s.state_at(in, c);
        const int count = from ? s.states_of(in, c) : 0;
        GT_UNROLL
        for (int i = 0; i < C::STATES; i++) state[c][i] = i < count ? from[at + i] : 0.0f;
    }
}

template <class C>
GT_DEV void store_state(const Problem& in, const Coordinates<C>& s, float* to,
                        const float (&state)[C::COLUMNS][C::STATES]) {
    GT_UNROLL
    for (int c = 0; c < C::COLUMNS; c++) {
        const int64_t at = s.state_at(in, c);
        const int count = s.states_of(in, c);
        GT_UNROLL
        for (int i = 0; i < C::STATES; i++)
            if (i < count) to[at + i] = state[c][i];
    }
}

/* store_state() for checkpoints, whose memory is aligned to 16 bytes.  If N is a multiple of 4, rows are aligned, too,
 * and the stores are 16 bytes wide. */
template <class C>
GT_DEV void store_checkpoint(const Problem& in, const Coordinates<C>& s, float* to,
                             const float (&state)[C::COLUMNS][C::STATES]) {
    if (in.N % 4 != 0) return store_state(in, s, to, state);
    GT_UNROLL
    for (int c = 0; c < C::COLUMNS; c++) {
        const int count = s.states_of(in, c);
        GT_UNROLL
        for (int i = 0; i < C::STATES; i += 4)
            if (i < count)
                stg<float4>(to + s.state_at(in, c) + i,
                            float4{state[c][i], state[c][i + 1], state[c][i + 2], state[c][i + 3]});
    }
}

/* Stores the state after a segment that starts from zero, and the sum of the segment's Delta, for scan_segments.
 * deltas: the lane's sum over its own tokens. */
template <class C>
GT_DEV void store_segment(const Problem& in, const Coordinates<C>& s, const Span& span,
                          const float (&state)[C::COLUMNS][C::STATES], const Channel& own, const TwoTermSum& deltas) {
    store_state(in, s, in.segments.states + span.segment_slot * in.D * in.N, state);
    float hi = deltas.hi, lo = deltas.lo;
    GT_UNROLL
    for (int mask = C::WARP_CHANNELS; mask < 32; mask *= 2) {
        TwoTermSum sum = {hi, lo};
        sum.add(shfl_xor(hi, mask));
        hi = sum.hi, lo = sum.lo + shfl_xor(lo, mask);
    }
    if (own.exists && lane_id() < C::WARP_CHANNELS) in.segments.decays[span.segment_slot * in.D + own.d] = hi + lo;
}

/* Adds the staged Delta of the lane's channel to `sum`, for the tokens that the lane has loaded.  offset: where Delta
 * begins in shared memory. */
template <class C>
GT_DEV void add_deltas(const Coordinates<C>& s, int offset, int tokens, TwoTermSum& sum) {
    for (int t = lane_id() / C::WARP_CHANNELS; t < tokens; t += C::ROWS)
        sum.add(lds<float>(s.address(offset + t * C::WARP_CHANNELS + lane_id() % C::WARP_CHANNELS)));
}

} /* namespace scan */
} /* namespace gt */

#endif
