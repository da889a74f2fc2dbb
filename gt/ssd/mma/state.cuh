/* gt/ssd/mma/state.cuh - ssd on tensor cores: states in registers, and a block's position.
 *
 * A unit is 64 rows of one head's state: a head with P <= 64 is one unit, a head with P = 128 is two.  The units of a
 * block belong to one group and share the group's B and C.  A block has two units in mma/, and one to four in sm90/.  A
 * warp has 16 rows of a unit and all NP >= N columns, in the layout of mma accumulators:
 *
 *     H[n][e] is row 8 (e / 2) + g, column 8 n + 2 j + e % 2          g = lane / 4, j = lane % 4.
 *
 * With 32 rows per warp, B and C would be read half as often.  But then a multiprocessor has only 8 warps, too few to
 * hide latency.
 *
 * H is fp32, times a power of two that keeps all elements below 2^16, so that packing to f16 needs no scale.  The power
 * follows from an upper bound of the magnitudes, which costs a few operations per chunk.  The new bound is E times the
 * old bound, plus the most that the update can add.  At a checkpoint, the true maximum replaces the bound.  The
 * multiplication by E also changes the power.  A change of the power is exact.
 *
 * The update is H <- E H + sum_t v_t b_t^T.  v_t is (x_t or dy_t) . weight_t as f16, times a power of two, and b_t is a
 * row of B or C.  Tensor cores round sums towards zero.  So the sum over 64 tokens starts at zero, and an fp32 addition
 * adds it to H.
 * registers per thread: NP / 2 for H, 16 for v, 16 for the sums. */
#ifndef GT_SSD_MMA_STATE_CUH
#define GT_SSD_MMA_STATE_CUH

#include "../problem.cuh"
#include "chunk.cuh"

namespace gt {
namespace ssd {

/* The warp's index.  shfl_idx() tells the compiler that all lanes have the same value. */
GT_DEV int uniform_warp() {
    const int warp = shfl_idx(warp_id(), 0);
    GT_ASSUME(warp >= 0 && warp < WARPS);
    return warp;
}

/* One warp fills Weights.  weight: weights of tokens 2 lane and 2 lane + 1, times the inverses of the powers in both
 * tiles.  most: bounds of |weight| times the elements of x or dy as f16. */
GT_DEV void make_weights(uint32_t addresses, float2 weight, float2 most) {
    float largest = fmaxf(most.x, most.y), sum = most.x + most.y;
    GT_UNROLL
    for (int mask = 1; mask < 32; mask *= 2) {
        largest = fmaxf(largest, shfl_xor(largest, mask));
        sum += shfl_xor(sum, mask);
    }
    const Power power = power_of(largest);
    sts<float2>(addresses + 4 * Weights::OF_TOKENS + 8 * here(), {weight.x * power.value, weight.y * power.value});
    if (here() == 0) sts<float2>(addresses + 4 * Weights::INVERSE, {power.inverse, 0x1p14f * sum});
}

/* A warp's rows of a state. */
template <int NP>
struct WarpState {
    static constexpr int TILES = NP / 8;
    static constexpr int STAGED = NP < 64 ? NP : 64, STAGING = 16 * STAGED; /* keep() stages STAGED columns at a time,
                                                                             * in STAGING bytes */
    float H[TILES][4];
    float bound; /* at least max |H| * power.inverse */
    Power power;

    /* Replaces the bound by the true maximum. */
    GT_METHOD void measure() {
        float partial[8] = {};
        GT_UNROLL
        for (int i = 0; i < TILES * 4; i++) partial[i % 8] = fmaxf(partial[i % 8], fabsf(H[i / 4][i % 4]));
        GT_UNROLL
        for (int i = 4; i > 0; i /= 2)
            for (int k = 0; k < i; k++) partial[k] = fmaxf(partial[k], partial[k + i]);
        float most = partial[0];
        GT_UNROLL
        for (int mask = 1; mask < 32; mask *= 2) most = fmaxf(most, shfl_xor(most, mask));
        bound = most * power.inverse;
    }

    GT_METHOD void clear() {
        GT_UNROLL
        for (int i = 0; i < TILES * 4; i++) H[i / 4][i % 4] = 0.0f;
        bound = 0.0f;
        power = power_of(bound);
    }

    /* Loads 16 rows of a state [P,N] from row0 on, in the columns of this launch.  from: row 0 of the state, in the
     * launch's first column; NULL: zeros. */
    GT_METHOD void load(const float* from, int row0, const Problem& in) {
        power = {1.0f, 1.0f};
        const int row = row0 + here() / 4, column = 2 * (here() % 4);
        if (from) from += (int64_t)row * in.N + column;
        GT_UNROLL
        for (int i = 0; i < TILES * 2; i++) {
            const int n = i % TILES, half = i / TILES;
            const bool exists = from && row + 8 * half < in.P && 8 * n + column < in.columns;
            const float2 x = exists ? ldg<float2>(from + 8 * half * in.N + 8 * n) : float2{0.0f, 0.0f};
            H[n][2 * half] = x.x;
            H[n][2 * half + 1] = x.y;
        }
        measure();
        power = power_of(bound);
        GT_UNROLL
        for (int i = 0; i < TILES * 4; i++) H[i / 4][i % 4] *= power.value;
    }

    GT_METHOD void store(float* to, int row0, const Problem& in, bool adds = false) const {
        const int row = row0 + here() / 4, column = 2 * (here() % 4);
        to += (int64_t)row * in.N + column;
        GT_UNROLL
        for (int i = 0; i < TILES * 2; i++) {
            const int n = i % TILES, half = i / TILES;
            if (row + 8 * half >= in.P || 8 * n + column >= in.columns) continue;
            float* at = to + 8 * half * in.N + 8 * n;
            float2 x = {H[n][2 * half] * power.inverse, H[n][2 * half + 1] * power.inverse};
            if (adds) {
                const float2 before = ldg<float2>(at);
                x = {before.x + x.x, before.y + x.y};
            }
            stg<float2>(at, x);
        }
    }

    /* Stores H as checkpoint `slot`.  shared: STAGING bytes of shared memory that no other warp uses. */
    GT_METHOD void keep(const Checkpoints& checkpoints, int64_t slot, uint32_t shared, int row0, const Problem& in) {
        measure();
        constexpr int PIECES = STAGED / 8, STEP = 32 / PIECES;
        const int lane = here(), g = lane / 4, j = lane % 4;
        const int row = lane / PIECES, piece = lane % PIECES; /* row: the lane's first row; its next row is STEP rows
                                                               * further */
        if (lane == 0 && row0 < in.P)
            checkpoints.powers[slot * slot_powers(in.P, in.N) + power_index(in.N, row0)] = power.inverse;
        f16* to = checkpoints.values + (slot * in.P + row0 + row) * in.N + 8 * piece;
        GT_UNROLL
        for (int i = 0; i < 2 * (NP / STAGED); i++) { /* 8 rows by STAGED columns at a time */
            const int half = i % 2, n0 = i / 2 * PIECES;
            GT_UNROLL
            for (int n = 0; n < PIECES; n++)
                sts<uint32_t>(shared + panel_at<2 * STAGED>(g, n) + 4 * j,
                              pack_f16(H[n0 + n][2 * half], H[n0 + n][2 * half + 1]));
            sync_warp();
            if (row0 + 8 * half < in.P && row < 8 && 8 * (n0 + piece) < in.columns) {
                GT_UNROLL
                for (int k = 0; k < 8; k += STEP)
                    stg<uint4>(to + (8 * half + k) * in.N + 8 * n0,
                               lds<uint4>(shared + panel_at<2 * STAGED>(row + k, piece)));
            }
            sync_warp();
        }
    }

    /* Advances H by a chunk.  left: tile of x or dy as f16; the warp takes its 16 columns from 16 unit_warp on.  right:
     * tile of B or C as f16.  weights: address of Weights.  E: decay of the chunk.  gate: 0, or a tile of z of type T,
     * whose silu(z) is then multiplied into left. */
    template <class T>
    GT_METHOD void update(uint32_t left, uint32_t gate, int unit_warp, uint32_t right, uint32_t weights, float E) {
        const float2 added_up = lds<float2>(weights + 4 * Weights::INVERSE);
        bound = finite(E * bound + added_up.y);
        const float undo = power.inverse;
        power = power_of(bound);
        const float factor = finite(E * undo) * power.value, scale = added_up.x * power.value;
        uint32_t v[BLOCKS][4];
        const uint32_t lefts = by_columns<64>(left), gates = by_columns<64>(gate), tokens = weights + 8 * (here() % 4);
        GT_UNROLL
        for (int block = 0; block < BLOCKS; block++) {
            uint32_t x[4], z[4];
            const float2 low = lds<float2>(tokens + 64 * block), high = lds<float2>(tokens + 64 * block + 32);
            ldmatrix_x4_trans(x, block_at<64>(lefts, block, unit_warp));
            if (gate) ldmatrix_x4_trans(z, block_at<64>(gates, block, unit_warp));
            GT_UNROLL
            for (int e = 0; e < 4; e++) {
                float2 y = {unpack_f16_lo(x[e]) * (e < 2 ? low.x : high.x),
                            unpack_f16_hi(x[e]) * (e < 2 ? low.y : high.y)};
                if (gate) {
                    y.x *= silu(Element<T>::lo(z[e]));
                    y.y *= silu(Element<T>::hi(z[e]));
                }
                v[block][e] = pack_f16(y.x, y.y);
            }
        }
        const uint32_t rights = by_rows<NP>(right);
        constexpr int WIDTH = TILES < 4 ? TILES : 4;
        GT_UNROLL
        for (int n0 = 0; n0 < TILES; n0 += WIDTH) {
            float added[WIDTH][4] = {};
            GT_UNROLL
            for (int block = 0; block < BLOCKS; block++) {
                GT_UNROLL
                for (int n = 0; n < WIDTH; n += 2) {
                    uint32_t b[4];
                    ldmatrix_x4_trans(b, block_at<NP>(rights, block, (n0 + n) / 2));
                    mma_f16(added[n], v[block], b[0], b[1]);
                    mma_f16(added[n + 1], v[block], b[2], b[3]);
                }
            }
            GT_UNROLL
            for (int i = 0; i < WIDTH * 4; i++) {
                float& x = H[n0 + i / 4][i % 4];
                x = fma_rn(added[i / 4][i % 4], scale, x * factor);
            }
        }
    }
};

/* ---- a block's position ------------------------------------------------------------------------------------------ */

/* A block's position: the segment, and the block's two units.  Pairs of units are numbered over all groups, and the
 * block has pair block_x() % (G * pairs).  The position lies in shared memory, because otherwise the compiler would
 * keep a 64-bit address of every tensor in registers. */
struct Cursor {
    static constexpr int BYTES = 64;
    uint32_t addresses;

    /* All threads call this function.  item: the segment's number. */
    GT_METHOD void enter(const Problem& in, const Span& span, int64_t item) const {
        sync_threads(); /* other threads may still read the previous segment */
        if (thread_id() == 0) {
            const int pairs = (int)group_pairs(in), index = block_x() % ((int)in.G * pairs), group = index / pairs;
            const int first = index % pairs * MMA_UNITS, units = (int)group_units(in);
            sts<int64_t>(addresses, span.b);
            sts<int64_t>(addresses + 8, span.first);
            sts<int64_t>(addresses + 16, span.end);
            sts<int64_t>(addresses + 24, span.chunk_slot);
            for (int i = 0; i < MMA_UNITS; i++) {
                sts<int>(addresses + 32 + 4 * i, group * (int)(in.H / in.G) + (first + i) / in.tiles);
                sts<int>(addresses + 40 + 4 * i, (first + i) % in.tiles * TILE_P);
            }
            sts<int>(addresses + 48, group);
            sts<int>(addresses + 52, units - first < MMA_UNITS ? units - first : MMA_UNITS);
            sts<int64_t>(addresses + 56, item);
        }
        sync_threads();
    }
    GT_METHOD int64_t b() const { return lds<int64_t>(addresses); }
    GT_METHOD int64_t item() const { return lds<int64_t>(addresses + 56); }
    GT_METHOD int64_t token(int chunk) const { return lds<int64_t>(addresses + 8) + (int64_t)chunk * CHUNK; }
    GT_METHOD int64_t left(int chunk) const { return lds<int64_t>(addresses + 16) - token(chunk); }
    GT_METHOD int tokens(int chunk) const { return left(chunk) < CHUNK ? (int)left(chunk) : CHUNK; }
    GT_METHOD int chunks() const { return (int)((left(0) + CHUNK - 1) / CHUNK); }
    GT_METHOD int64_t chunk_slot() const { return lds<int64_t>(addresses + 24); }
    GT_METHOD int head(int unit) const { return lds<int>(addresses + 32 + 4 * unit); }
    GT_METHOD int row0(int unit) const { return lds<int>(addresses + 40 + 4 * unit); }
    GT_METHOD int group() const { return lds<int>(addresses + 48); }
    GT_METHOD int units() const { return lds<int>(addresses + 52); } /* the number of existing units */
};

/* The offset of a unit's head in row `row` of a tensor [rows,H,P,N]. */
GT_DEV int64_t unit_state(const Problem& in, const Cursor& cursor, int unit, int64_t row) {
    return (row * in.H + cursor.head(unit)) * in.P * in.N;
}

/* The checkpoint slot of a unit's chunk, counted over all heads and batch elements. */
GT_DEV int64_t unit_slot(const Problem& in, const Cursor& cursor, int unit, int chunk) {
    return (cursor.b() * in.H + cursor.head(unit)) * chunk_slots(in.sequences, CHECKPOINT) + cursor.chunk_slot() +
           chunk / SLOT_CHUNKS;
}

GT_DEV int64_t unit_strands(const Problem& in) { return grid_x() / (in.G * group_pairs(in)); }
GT_DEV int64_t unit_strand(const Problem& in) { return block_x() / (in.G * group_pairs(in)); }

/* Stores a warp's states after a segment's first `tokens` tokens, if a snapshot is due.  tokens: INT32_MAX at the
 * segment's end.  A kernel asks before a chunk or after it, wherever ptxas spills fewer registers. */
template <class State, class AnyCursor>
GT_DEV void keep_snapshot(const TensorParams& p, const AnyCursor& cursor, int unit, int unit_warp, int tokens,
                          const State& state) {
    const Span span = span_at(p.in.sequences, p.in.segments.count, CHECKPOINT, cursor.item());
    float* const to = snapshot_row(p.in, p.snapshots, span, tokens);
    if (to && unit < cursor.units())
        state.store(to + unit_state(p.in, cursor, unit, 0), cursor.row0(unit) + 16 * unit_warp, p.in);
}

/* ---- copies ----------------------------------------------------------------------------------------------------- */

/* A stream is the global address of the next chunk of a tensor.  One thread advances all streams, so that other threads
 * need no multiplications by 64-bit strides.  Streams lie in shared memory, as Cursor does.  The caller
 * synchronises. */
struct Streams {
    static constexpr int COUNT = 6, WHOLE = 8 * COUNT, BYTES = WHOLE + 8;
    uint32_t addresses;

    template <class T>
    GT_METHOD void begin(int stream, const void* data, int64_t offset) const {
        sts<int64_t>(addresses + 8 * stream, (int64_t) reinterpret_cast<uintptr_t>(data) + offset * (int)sizeof(T));
    }
    template <class T>
    GT_METHOD void move(int stream, int64_t elements) const {
        const uint32_t at = addresses + 8 * stream;
        sts<int64_t>(at, lds<int64_t>(at) + elements * (int)sizeof(T));
    }
    template <class T>
    GT_METHOD T* at(int stream) const {
        return lds<T*>(addresses + 8 * stream);
    }
    /* Chunks before number `chunks` have no missing rows or columns in any tile. */
    GT_METHOD void set_whole(int chunks) const { sts<int>(addresses + WHOLE, chunks); }
    GT_METHOD int whole() const { return lds<int>(addresses + WHOLE); }
};

/* Starts to copy a chunk's tiles of x, dy or z, one tile for each unit. */
template <class T>
GT_DEV void load_units(const Problem& in, const void* data, const gt_stride& stride, uint32_t tiles,
                       const Cursor& cursor, int chunk) {
    GT_UNROLL
    for (int unit = 0; unit < MMA_UNITS; unit++) {
        if (unit >= cursor.units()) continue;
        const int row0 = cursor.row0(unit);
        const T* first =
            static_cast<const T*>(data) + offset_of(stride, cursor.b(), cursor.token(chunk), cursor.head(unit)) + row0;
        load_tile<64, THREADS>(tiles + unit * TileShape<64>::BYTES, first, stride.t, cursor.tokens(chunk), in.P - row0);
    }
}

/* Starts to copy a chunk's tile of B or C. */
template <class T, int NP>
GT_DEV void load_group(const Problem& in, const void* data, const gt_stride& stride, uint32_t tile,
                       const Cursor& cursor, int chunk) {
    const T* first = static_cast<const T*>(data) + offset_of(stride, cursor.b(), cursor.token(chunk), cursor.group());
    load_tile<NP, THREADS>(tile, first, stride.t, cursor.tokens(chunk), in.columns);
}

/* load_units() for tiles without missing rows or columns.  The first unit has stream `first`. */
template <class T>
GT_DEV void load_whole_units(const Streams& streams, int first, int64_t pitch, uint32_t tiles, int units) {
    GT_UNROLL
    for (int unit = 0; unit < MMA_UNITS; unit++)
        if (unit < units)
            load_whole_tile<64, THREADS>(tiles + unit * TileShape<64>::BYTES, streams.at<T>(first + unit), pitch);
}

/* The number of chunks in a segment whose tiles have no missing rows or columns.  It is 0 if any unit of the block has
 * fewer than 64 rows, or if the columns are fewer than NP. */
template <int NP>
GT_DEV int whole_chunks(const Problem& in, const Cursor& cursor) {
    bool all = in.columns == NP;
    for (int unit = 0; unit < cursor.units(); unit++) all = all && cursor.row0(unit) + TILE_P <= in.P;
    return all ? (int)(cursor.left(0) / CHUNK) : 0;
}

/* ---- a chunk and unit ------------------------------------------------------------------------------------------- */

/* Loads dt of tokens 2 lane and 2 lane + 1 of a chunk, as bits. */
GT_DEV void load_dt(const Problem& in, const Cursor& cursor, int unit, int chunk, uint32_t (&bits)[2]) {
    load_dt(in, offset_of(in.dt_stride, cursor.b(), cursor.token(chunk), cursor.head(unit)), cursor.tokens(chunk),
            bits);
}

/* Delta of these two tokens. */
GT_DEV void deltas_of(const Problem& in, const Cursor& cursor, int unit, int chunk, const uint32_t (&bits)[2],
                      float (&delta)[2]) {
    deltas_of(in, cursor.head(unit), cursor.tokens(chunk), bits, delta);
}

/* The decay of a chunk. */
GT_DEV float chunk_decay(uint32_t addresses) {
    const float2 scale = lds<float2>(addresses + 4 * Factors::KEEP);
    return scale.x + scale.y;
}

/* The weights of tokens 2 lane and 2 lane + 1 in the state's update: Delta suf, or pre in reverse, times the inverses
 * of the powers in both tiles. */
GT_DEV float2 update_weight(uint32_t addresses, uint32_t left, uint32_t right, bool reverse) {
    const int t = 2 * here();
    const float2 a = lds<float2>(left + 4 * t), b = lds<float2>(right + 4 * t);
    if (reverse) {
        const float2 pre = lds<float2>(addresses + 4 * (Factors::PRE + t));
        return {pre.x * a.x * b.x, pre.y * a.y * b.y};
    }
    const float2 delta = lds<float2>(addresses + 4 * (Factors::DELTA + t)),
                 suf = lds<float2>(addresses + 4 * (Factors::SUF + t));
    return {delta.x * suf.x * a.x * b.x, delta.y * suf.y * a.y * b.y};
}

/* Bounds of |weight| times the elements of x or dy as f16, which are at most 2^14. */
GT_DEV float2 update_bounds(float2 weight) {
    return {finite(fabsf(weight.x) * 0x1p14f), finite(fabsf(weight.y) * 0x1p14f)};
}

} /* namespace ssd */
} /* namespace gt */

#endif
