/* gt/ssd/any/block.cuh - ssd for any size: which tokens, rows and columns a block and a thread take, and the products
 * of a sub-chunk of 16 tokens. */
#ifndef GT_SSD_ANY_BLOCK_CUH
#define GT_SSD_ANY_BLOCK_CUH

#include "../../base/built.cuh"
#include "../problem.cuh"

namespace gt {
namespace ssd {

constexpr int SUB_CHUNK = 16; /* tokens handled together */
constexpr int SUB_CHUNKS = CHECKPOINT / SUB_CHUNK;
constexpr int PITCH = SUB_CHUNK + 1; /* row pitch of a matrix of token pairs in shared memory, in floats */

/* A block holds 64 rows p of a state and all its columns n in registers.  A lane has two indices: its p lane is lane %
 * 8, and its n lane is 4 warp + lane / 8.  A thread has rows 4 p_lane to 4 p_lane + 3 and the 4 rows 32 below them, and
 * RN columns from column n_lane RN on.  So the 4 WARPS n lanes of a block hold WIDTH columns.  A sum over p needs one
 * warp only; a sum over n adds up the warps in shared memory.  The offsets below count floats in shared memory; their
 * comments give the shapes of arrays. */
template <int RN_, int WARPS_>
struct Traits {
    static constexpr int RN = RN_, WARPS = WARPS_, THREADS = 32 * WARPS;
    static constexpr int WIDTH = 4 * WARPS * RN;
    static constexpr int ROUND = 32 / WARPS;                   /* tokens whose sums over n are computed together */
    static constexpr int X = 0;                                /* [16][64] */
    static constexpr int B = X + SUB_CHUNK * TILE_P;           /* [16][WIDTH] */
    static constexpr int C = B + SUB_CHUNK * WIDTH;            /* [16][WIDTH] */
    static constexpr int PARTIAL = C + SUB_CHUNK * WIDTH;      /* [WARPS][ROUND][64] */
    static constexpr int S = PARTIAL + WARPS * ROUND * TILE_P; /* [16][PITCH], S_ts */
    static constexpr int DELTA = S + SUB_CHUNK * PITCH;        /* [16]; LOG, PRE, SUF and WEIGHT hold a, pre, suf and
                                                                * Delta suf */
    static constexpr int LOG = DELTA + SUB_CHUNK, PRE = LOG + SUB_CHUNK, SUF = PRE + SUB_CHUNK;
    static constexpr int WEIGHT = SUF + SUB_CHUNK;
    static constexpr int SCALE = WEIGHT + SUB_CHUNK; /* keep and factor of the state's Scale, E, log E */
    static constexpr int POSITION = SCALE + 4;       /* what Position::enter() stores */
    static constexpr int GATE = POSITION + 12;       /* [16][64]: forward silu(z), backward dy silu'(z) */
    static constexpr int FORWARD_END = GATE + SUB_CHUNK * TILE_P;
    static constexpr int DY = FORWARD_END;                     /* [16][64] */
    static constexpr int R = DY + SUB_CHUNK * TILE_P;          /* [16][PITCH], Delta_s R_ts */
    static constexpr int PAIR = R + SUB_CHUNK * PITCH;         /* [16][PITCH], c_ts */
    static constexpr int BEFORE = PAIR + SUB_CHUNK * PITCH;    /* [16][PITCH], sum_{s<k} Delta_s c_ts */
    static constexpr int E_PARTS = BEFORE + SUB_CHUNK * PITCH; /* partial sums of the warps: e_t and f_s [WARPS][16]
                                                                * each; Z_PARTS: <G,h> [WARPS] */
    static constexpr int F_PARTS = E_PARTS + WARPS * SUB_CHUNK, Z_PARTS = F_PARTS + WARPS * SUB_CHUNK;
    static constexpr int BACKWARD_END = Z_PARTS + WARPS;
    static_assert(DY % 4 == 0, "its rows are read in 16-byte pieces");
    static_assert(POSITION % 2 == 0, "it has tokens, 8 bytes each");
    static_assert(4 * BACKWARD_END <= 64 * 1024, "fits every architecture");
};

GT_HD int64_t windows_of(int64_t T) { return (T + CHECKPOINT - 1) / CHECKPOINT; }

/* ---- where a block stands --------------------------------------------------------------------------------------- */

/* The position of a block and a thread.  A block has one tile of one head.  The blocks of a tile and head share all
 * segments: with S of these blocks, block number s takes segments s, s + S, and so on.  This number is the block's
 * strand, block_x() / (H * tiles). */
template <class C>
struct Position {
    uint32_t smem;
    int64_t b;
    int h, g, tile;
    int64_t end;            /* the first token after the current segment, in batch element b */
    int p0, rows;           /* p0: first row of the block's tile; rows: the number of existing rows */
    int p_lane, n_lane, n0; /* n_lane: index in the block; n0: the thread's first column */

    GT_METHOD explicit Position(const Problem& in) {
        const int heads = (int)in.H; /* at most the number of blocks, so 32 bits suffice */
        smem = smem_base();
        tile = block_x() % in.tiles;
        h = block_x() / in.tiles % heads;
        g = h / (heads / (int)in.G);
        b = 0;
        end = 0;
        p0 = tile * TILE_P;
        rows = in.P - p0 < TILE_P ? in.P - p0 : TILE_P;
        p_lane = lane_id() % 8;
        n_lane = 4 * warp_id() + lane_id() / 8;
        n0 = n_lane * C::RN;
    }
    GT_METHOD uint32_t address(int offset) const { return smem + 4 * offset; }
    GT_METHOD float value(int offset) const { return lds<float>(address(offset)); }
    /* enter() stores the segment in shared memory, and recall() loads it again for each sub-chunk.  So the compiler
     * does not keep a 64-bit address of every tensor in registers from sub-chunk to sub-chunk.  All threads call both
     * functions.  recall() returns the segment's first token. */
    GT_METHOD void enter(const Span& span) {
        sync_threads(); /* other threads may still read the previous segment */
        if (thread_id() == 0) {
            sts<int64_t>(address(C::POSITION), span.b);
            sts<int>(address(C::POSITION + 2), h);
            sts<int>(address(C::POSITION + 3), g);
            sts<int64_t>(address(C::POSITION + 4), span.first);
            sts<int64_t>(address(C::POSITION + 6), span.end);
            sts<int64_t>(address(C::POSITION + 8), span.chunk_slot);
            sts<TwoTermSum>(address(C::POSITION + 10), TwoTermSum());
        }
        sync_threads();
        recall();
    }
    GT_METHOD int64_t recall() {
        b = lds<int64_t>(address(C::POSITION));
        h = lds<int>(address(C::POSITION + 2));
        g = lds<int>(address(C::POSITION + 3));
        end = lds<int64_t>(address(C::POSITION + 6));
        return lds<int64_t>(address(C::POSITION + 4));
    }
    GT_METHOD int64_t chunk_slot() const { return lds<int64_t>(address(C::POSITION + 8)); }
    /* adds log E of the staged sub-chunk to the sum that store_segment() stores */
    GT_METHOD void add_log() const {
        if (thread_id() != 0) return;
        TwoTermSum sum = lds<TwoTermSum>(address(C::POSITION + 10));
        sum.add(value(C::SCALE + 3));
        sts<TwoTermSum>(address(C::POSITION + 10), sum);
    }
    /* the thread's i-th row, as an index in the tile */
    GT_METHOD int row(int i) const { return 4 * p_lane + i + (i < 4 ? 0 : 28); }
    /* loads the thread's 8 rows of a vector of 64 */
    GT_METHOD void load_p(float (&v)[8], int offset) const {
        const float4 a = lds<float4>(address(offset + 4 * p_lane));
        const float4 b4 = lds<float4>(address(offset + 32 + 4 * p_lane));
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
        v[4] = b4.x, v[5] = b4.y, v[6] = b4.z, v[7] = b4.w;
    }
    /* loads the thread's columns of a vector of WIDTH */
    GT_METHOD void load_n(float (&v)[C::RN], int offset) const { load_vector(v, address(offset + n0)); }
};

/* launched_strands(): the number of strands, that is, of blocks for each tile and head.  own_strand(): the block's
 * strand. */
GT_DEV int64_t launched_strands(const Problem& in) { return grid_x() / ((int)in.H * in.tiles); }
GT_DEV int64_t own_strand(const Problem& in) { return block_x() / ((int)in.H * in.tiles); }

/* The number of tokens of the sub-chunk that starts with token `first`. */
template <class C>
GT_DEV int tokens_from(const Position<C>& s, int64_t first) {
    return (int)(s.end - first < SUB_CHUNK ? s.end - first : SUB_CHUNK);
}

template <class C>
GT_DEV Rows head_rows(const Problem& in, const Position<C>& s, const void* data, gt_stride stride, int64_t first) {
    return {data, in.dtype, offset_of(stride, s.b, first, s.h) + s.p0, stride.t, 1, tokens_from(s, first), s.rows};
}

template <class C>
GT_DEV Rows group_rows(const Problem& in, const Position<C>& s, const void* data, gt_stride stride, int64_t first) {
    return {data, in.dtype, offset_of(stride, s.b, first, s.g), stride.t, 1, tokens_from(s, first), in.N};
}

/* ---- a sub-chunk ------------------------------------------------------------------------------------------------ */

/* The first warp computes Delta and all decay factors of a sub-chunk.  Tokens beyond the segment have Delta = 0. */
template <class C>
GT_DEV void stage_decays(const Problem& in, const Position<C>& s, int64_t first) {
    if (warp_id() != 0) return;
    const int lane = lane_id();
    float delta = 0.0f;
    if (lane < tokens_from(s, first)) {
        const float bias = in.dt_bias ? in.dt_bias[s.h] : 0.0f;
        const float dt = load_as(in.dt, in.dt_dtype, offset_of(in.dt_stride, s.b, first + lane, s.h));
        delta = delta_of(in.rule, dt + bias).value;
    }
    const float a = delta * in.A[s.h];
    float before = a, after = a; /* sums of a through this token, and from this token on; a = 0 beyond lane 15 */
    GT_UNROLL
    for (int d = 1; d < SUB_CHUNK; d *= 2) {
        const float left = shfl_up(before, d), right = shfl_down(after, d);
        before += lane >= d ? left : 0.0f;
        after += lane + d < SUB_CHUNK ? right : 0.0f;
    }
    const float all = shfl_idx(before, SUB_CHUNK - 1);
    after = shfl_down(after, 1);
    if (lane < SUB_CHUNK) {
        const float suf = finite(exp_accurate(after));
        sts<float>(s.address(C::DELTA + lane), delta);
        sts<float>(s.address(C::LOG + lane), a);
        sts<float>(s.address(C::PRE + lane), finite(exp_accurate(before)));
        sts<float>(s.address(C::SUF + lane), suf);
        sts<float>(s.address(C::WEIGHT + lane), finite(delta * suf));
    }
    if (lane == 0) {
        const Scale scale = scale_of_log(all);
        sts<float>(s.address(C::SCALE), scale.keep);
        sts<float>(s.address(C::SCALE + 1), scale.factor);
        sts<float>(s.address(C::SCALE + 2), finite(exp_accurate(all)));
        sts<float>(s.address(C::SCALE + 3), all);
    }
}

/* Warps 0 to 3 compute the inner products of all rows t of `left` with all rows s of `right`.  A row has K values, a
 * multiple of 4.  Each thread computes 4 x 4 products over an eighth of the values: t from 4 warp on, s from 4 (lane /
 * 8) on.  Then 8 lanes add their sums, and each keeps two of the products: t = 4 warp + lane % 8 / 2, with s = 4 (lane
 * / 8) + 2 (lane % 2) and the next s. */
template <class C>
GT_DEV void pair_products(const Position<C>& s, int left, int right, int K, float (&pair)[2]) {
    const int t0 = 4 * warp_id(), s0 = lane_id() / 8 * 4;
    float sum[16] = {};
    GT_NO_UNROLL
    for (int k = lane_id() % 8 * 4; k < K; k += 32) {
        float4 b[4];
        GT_UNROLL
        for (int j = 0; j < 4; j++) b[j] = lds<float4>(s.address(right + (s0 + j) * K + k));
        GT_UNROLL
        for (int i = 0; i < 4; i++) {
            const float4 a = lds<float4>(s.address(left + (t0 + i) * K + k));
            GT_UNROLL
            for (int j = 0; j < 4; j++) sum[4 * i + j] = dot4(a, b[j], sum[4 * i + j]);
        }
    }
    reduce_scatter<16, 8, 1>(sum, lane_id() % 8);
    pair[0] = sum[0];
    pair[1] = sum[1];
}

/* Returns L_ts, s = `from`.  The exponent is the sum of a over tokens s + 1 to t, computed by additions only. */
template <class C>
GT_DEV float pair_decay(const Position<C>& s, int t, int from) {
    float sum = 0.0f;
    for (int k = from + 1; k <= t; k++) sum += s.value(C::LOG + k);
    return finite(exp_accurate(sum));
}

/* In stage_pairs(), 8 lanes share a token t.  Returns the sum of `value` over the lanes of the same t that have a
 * smaller s. */
GT_DEV float sum_before(float value) {
    const int order = lane_id() / 8 * 2 + lane_id() % 2;
    GT_UNROLL
    for (int d = 1; d < 8; d *= 2) {
        const int from = order >= d ? order - d : 0;
        const float left = shfl_idx(value, from / 2 * 8 + (lane_id() & 6) + from % 2);
        value += order >= d ? left : 0.0f;
    }
    const int from = order > 0 ? order - 1 : 0;
    const float before = shfl_idx(value, from / 2 * 8 + (lane_id() & 6) + from % 2);
    return order > 0 ? before : 0.0f;
}

/* Returns finite(product) if the factor x is finite.  If x is not, the caller's data are infinite or NaN, and so the
 * product is returned as it is. */
GT_DEV float finite_of(float x, float product) { return fabsf(x) <= FLT_MAX ? finite(product) : product; }

/* Computes S for all pairs of tokens; with BACKWARD also R, PAIR and BEFORE (see Traits). */
template <class C, bool BACKWARD>
GT_DEV void stage_pairs(const Position<C>& s) {
    if (warp_id() >= 4) return;
    const int t = 4 * warp_id() + lane_id() % 8 / 2, s0 = lane_id() / 8 * 4 + lane_id() % 2 * 2;
    float CB[2], dyx[2] = {0.0f, 0.0f}, weighted[2] = {0.0f, 0.0f};
    pair_products(s, C::C, C::B, C::WIDTH, CB);
    if constexpr (BACKWARD) pair_products(s, C::DY, C::X, TILE_P, dyx);
    GT_UNROLL
    for (int i = 0; i < 2; i++) {
        const int from = s0 + i, pair = t * PITCH + from;
        const float L = from <= t ? pair_decay(s, t, from) : 0.0f;
        const float S = from <= t ? finite_of(CB[i], CB[i] * L) : 0.0f;
        sts<float>(s.address(C::S + pair), S);
        if constexpr (BACKWARD) {
            const float delta = s.value(C::DELTA + from);
            const float c = from <= t ? finite_of(fmaxf(fabsf(dyx[i]), fabsf(S)), dyx[i] * S) : 0.0f;
            sts<float>(s.address(C::R + pair), from <= t ? finite_of(dyx[i], dyx[i] * L * delta) : 0.0f);
            sts<float>(s.address(C::PAIR + pair), c);
            weighted[i] = delta * c;
        }
    }
    if constexpr (BACKWARD) {
        const float before = sum_before(weighted[0] + weighted[1]);
        sts<float>(s.address(C::BEFORE + t * PITCH + s0), before);
        sts<float>(s.address(C::BEFORE + t * PITCH + s0 + 1), before + weighted[0]);
    }
}

/* A matrix of token pairs in shared memory, or its transpose.  Element [i][j] lies at offset + i row + j column. */
struct Pairs {
    int offset, row, column;
};

/* For ROUND tokens t from `first` on and every row p, computes scale_t sum_n state[p][n] vector_t[n] + sum_j
 * pairs[t][j] v_j[p].  Each warp stores a partial sum to PARTIAL.  n lane j < 16 holds v_j. */
template <class C>
GT_DEV void sum_over_n(const Position<C>& s, const float (&state)[8][C::RN], int first, int tokens, int vector,
                       int scale, Pairs pairs, const float (&v)[8]) {
    const int end = first + C::ROUND < tokens ? first + C::ROUND : tokens;
    GT_NO_UNROLL
    for (int t = first; t < end; t++) {
        float x[C::RN], sum[8];
        s.load_n(x, vector + t * C::WIDTH);
        const float factor = s.value(scale + t);
        const float pair = s.value(pairs.offset + t * pairs.row + s.n_lane % SUB_CHUNK * pairs.column);
        GT_UNROLL
        for (int i = 0; i < 8; i++) {
            float inner = 0.0f;
            GT_UNROLL
            for (int n = 0; n < C::RN; n++) inner = fma_rn(state[i][n], x[n], inner);
            sum[i] = fma_rn(pair, v[i], inner * factor);
        }
        const int lane = lane_id() / 8;
        reduce_scatter<8, 4, 8>(sum, lane);
        const int partial = (warp_id() * C::ROUND + t - first) * TILE_P;
        sts<float2>(s.address(C::PARTIAL + partial + s.row(2 * lane)), float2{sum[0], sum[1]});
    }
}

/* Adds up the warps' partial sums of sum_over_n(), for token first + i / 64 and row i % 64. */
template <class C>
GT_DEV float sum_partial(const Position<C>& s, int i) {
    float sum = 0.0f;
    GT_UNROLL
    for (int w = 0; w < C::WARPS; w++) sum += s.value(C::PARTIAL + w * C::ROUND * TILE_P + i);
    return sum;
}

/* Loads v_j for sum_over_n(): row j of `rows`, times value j of `weights`.  A negative `weights` means no weights. */
template <class C>
GT_DEV void load_pair_rows(const Position<C>& s, int rows, int weights, float (&v)[8]) {
    const int j = s.n_lane % SUB_CHUNK;
    s.load_p(v, rows + j * TILE_P);
    const float weight = weights >= 0 ? s.value(weights + j) : 1.0f;
    GT_UNROLL
    for (int i = 0; i < 8; i++) v[i] = s.n_lane < SUB_CHUNK ? v[i] * weight : 0.0f;
}

/* state <- E . state + sum_t weight_t left_t right_t^T.  The sum over a sub-chunk's tokens starts at zero and is added
 * to the state once.  If every token were added to the state by itself, the rounding errors of a million tokens would
 * exceed 1e-5.  The code takes the thread's rows in rounds, so that the sums take at most 32 registers. */
template <class C>
GT_DEV void update_state(const Position<C>& s, float (&state)[8][C::RN], int tokens, int left, int weights, int right) {
    constexpr int ROWS = C::RN > 4 ? 4 : 8, PIECE = ROWS < 4 ? ROWS : 4; /* ROWS: rows of a round; PIECE: rows loaded
                                                                          * together */
    GT_UNROLL
    for (int first = 0; first < 8; first += ROWS) {
        float added[ROWS][C::RN] = {};
        GT_NO_UNROLL
        for (int t = 0; t < tokens; t++) {
            float b[C::RN];
            s.load_n(b, right + t * C::WIDTH);
            const float weight = s.value(weights + t);
            GT_UNROLL
            for (int i = 0; i < ROWS; i += PIECE) {
                float a[PIECE];
                load_vector(a, s.address(left + t * TILE_P + s.row(first + i)));
                GT_UNROLL
                for (int k = 0; k < PIECE; k++) {
                    a[k] *= weight;
                    GT_UNROLL
                    for (int n = 0; n < C::RN; n++) added[i + k][n] = fma_rn(a[k], b[n], added[i + k][n]);
                }
            }
        }
        const float keep = s.value(C::SCALE), factor = s.value(C::SCALE + 1);
        GT_UNROLL
        for (int i = 0; i < ROWS; i++) {
            GT_UNROLL
            for (int n = 0; n < C::RN; n++)
                state[first + i][n] = rescale(keep, factor, state[first + i][n], added[i][n]);
        }
    }
}

/* Loads the thread's elements of a state [P,N] from global memory; elements outside the state become 0.  If `from` is
 * NULL, all elements become 0. */
template <class C>
GT_DEV void load_state(const Problem& in, const Position<C>& s, const float* from, float (&state)[8][C::RN]) {
    if (from) from += (s.p0 + s.row(0)) * in.N + s.n0;
    GT_UNROLL
    for (int i = 0; i < 8; i++) {
        GT_UNROLL
        for (int n = 0; n < C::RN; n++) state[i][n] = from && s.row(i) < s.rows && s.n0 + n < in.N ? from[n] : 0.0f;
        if (from) from += i == 3 ? 29 * in.N : in.N;
    }
}

template <class C>
GT_DEV void store_state(const Problem& in, const Position<C>& s, float* to, const float (&state)[8][C::RN]) {
    to += (s.p0 + s.row(0)) * in.N + s.n0;
    GT_UNROLL
    for (int i = 0; i < 8; i++) {
        GT_UNROLL
        for (int n = 0; n < C::RN; n++)
            if (s.row(i) < s.rows && s.n0 + n < in.N) to[n] = state[i][n];
        to += i == 3 ? 29 * in.N : in.N;
    }
}

/* The number of slabs (SLAB columns each) of a state.  It follows from WIDTH, except in a build without the kernel for
 * N = 128: then N <= 128 also runs in a wider kernel. */
template <class C>
GT_DEV int slabs_of([[maybe_unused]] const Problem& in) {
    if constexpr (BUILT_N128)
        return (C::WIDTH + SLAB - 1) / SLAB;
    else
        return slabs(in.N);
}

/* store_checkpoint() and load_checkpoint() access a slot of the checkpoints.  slot: counted over all heads and batch
 * elements.  All threads must call store_checkpoint(), which uses PARTIAL and barriers. */
template <class C>
GT_DEV void store_checkpoint(const Problem& in, const Position<C>& s, const Checkpoints& to, int64_t slot,
                             const float (&state)[8][C::RN]) {
    const int64_t size = (int64_t)in.P * in.N;
    if (to.plain) return store_state(in, s, to.plain + slot * size, state);
    float most = 0.0f;
    GT_UNROLL
    for (int i = 0; i < 8 * C::RN; i++) {
        const float x = fabsf(state[i / C::RN][i % C::RN]);
        most = x > most ? x : most;
    }
    GT_UNROLL
    for (int mask = 1; mask < 32; mask *= 2) {
        const float other = shfl_xor(most, mask);
        most = other > most ? other : most;
    }
    if (lane_id() == 0) sts<float>(s.address(C::PARTIAL + warp_id()), most);
    sync_threads();
    for (int i = 0; i < C::WARPS; i++) {
        const float other = s.value(C::PARTIAL + i);
        most = other > most ? other : most;
    }
    sync_threads();
    const Power power = power_of(most);
    f16* values = to.values + slot * size + (s.p0 + s.row(0)) * in.N + s.n0;
    GT_UNROLL
    for (int i = 0; i < 8; i++) {
        GT_UNROLL
        for (int n = 0; n < C::RN; n++)
            if (s.row(i) < s.rows && s.n0 + n < in.N) values[n].bits = f32_to_f16(state[i][n] * power.value);
        values += i == 3 ? 29 * in.N : in.N;
    }
    const int count = slabs_of<C>(in);
    if (thread_id() < 4 * count && s.p0 + thread_id() / count * 16 < in.P)
        to.powers[(slot * row_tiles(in.P) + s.p0 / 16) * count + thread_id()] = power.inverse;
}

template <class C>
GT_DEV void load_checkpoint(const Problem& in, const Position<C>& s, const Checkpoints& from, int64_t slot,
                            float (&state)[8][C::RN]) {
    const int64_t size = (int64_t)in.P * in.N;
    if (from.plain) return load_state(in, s, from.plain + slot * size, state);
    const f16* values = from.values + slot * size + (s.p0 + s.row(0)) * in.N + s.n0;
    const int count = slabs_of<C>(in);
    const float* powers = from.powers + (slot * row_tiles(in.P) + s.p0 / 16) * count;
    if (count > 1) powers += s.n0 / SLAB;
    GT_UNROLL
    for (int i = 0; i < 8; i++) {
        GT_UNROLL
        for (int n = 0; n < C::RN; n++)
            state[i][n] = s.row(i) < s.rows && s.n0 + n < in.N
                              ? f16_to_f32(values[n].bits) * powers[s.row(i) / 16 * count]
                              : 0.0f;
        values += i == 3 ? 29 * in.N : in.N;
    }
}

/* The offset of the head's state in row `row` of a tensor [rows,H,P,N]. */
template <class C>
GT_DEV int64_t state_of(const Problem& in, const Position<C>& s, int64_t row) {
    return (row * in.H + s.h) * in.P * in.N;
}

/* After a segment that began with a zero state, stores the state and the log of the segment's decay. */
template <class C>
GT_DEV void store_segment(const Problem& in, const Position<C>& s, const Span& span, const float (&state)[8][C::RN]) {
    store_state(in, s, in.segments.states + state_of(in, s, span.segment_slot), state);
    if (s.tile > 0 || thread_id() > 0) return;
    in.segments.decays[span.segment_slot * in.H + s.h] = lds<TwoTermSum>(s.address(C::POSITION + 10)).value();
}

template <class C>
GT_DEV float skip_of(const Problem& in, const Position<C>& s, int row) {
    if (!in.Dskip || row >= s.rows) return 0.0f;
    return in.Dskip[in.skip_per_channel ? (int64_t)s.h * in.P + s.p0 + row : s.h];
}

/* Calls launch(Traits) for the smallest built variant that handles N, and returns its result.  A build may leave out
 * variants, but never the largest one. */
template <class Launch>
static inline auto dispatch_size(int64_t N, const Launch& launch) {
    if constexpr (is_built_columns<0, 16>())
        if (N <= 16) return launch(Traits<1, 4>());
    if constexpr (is_built_columns<16, 32>())
        if (N <= 32) return launch(Traits<2, 4>());
    if constexpr (is_built_columns<32, 64>())
        if (N <= 64) return launch(Traits<4, 4>());
    if constexpr (is_built_columns<64, 128>())
        if (N <= 128) return launch(Traits<8, 4>());
    return launch(Traits<8, 8>());
}

} /* namespace ssd */
} /* namespace gt */

#endif
