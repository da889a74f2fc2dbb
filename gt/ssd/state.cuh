/* gt/ssd/state.cuh - ssd on tensor cores: states in registers, and where a block stands.
 *
 * A unit is 64 rows of one head's state: a head with P <= 64 is one, of P = 128 two.  A block has two units of one group, whose
 * B and C they share; a warp has 32 rows of a unit and all NP >= N columns, as accumulators of mma:
 *     H[m][n][e] is row 16 m + 8 (e / 2) + g, column 8 n + 2 j + e % 2          g = lane / 4, j = lane % 4
 * in fp32, times a power of two that keeps it below 2^16, so that packing to f16 needs no scale.  The power follows an upper
 * bound of the magnitudes, which costs a few operations a chunk (E bound + what the update can add), and where a
 * checkpoint is written their maximum; it changes, exactly, as H is multiplied by E.
 *
 * The update   H <- E H + sum_t v_t b_t^T   takes v_t = (x_t or dy_t) . weight_t as f16, times a power of two, and b_t of
 * B or C; 64 tokens are summed from zero, because tensor cores round sums towards zero, and added as fp32 does.
 * registers: NP for H, 32 for v, 32 for the sums.
 */
#ifndef GT_SSD_STATE_CUH
#define GT_SSD_STATE_CUH

#include "chunk.cuh"

namespace gt {
namespace ssd {

constexpr int UNITS = 2, WARPS = 4, THREADS = 128; /* of a block */
constexpr int SLOT_CHUNKS = CHECKPOINT / CHUNK;

/* What a warp has of a state. */
template <int NP>
struct WarpState {
    static constexpr int TILES = NP / 8;
    float H[2][TILES][4];
    float bound; /* of the magnitudes, without the power */
    Power power;

    /* The bound, as a maximum. */
    GT_METHOD void measure() {
        float parts[8] = {};
        GT_UNROLL
        for (int i = 0; i < 2 * TILES * 4; i++)
            parts[i % 8] = fmaxf(parts[i % 8], fabsf(H[i / 4 / TILES][i / 4 % TILES][i % 4]));
        GT_UNROLL
        for (int i = 4; i > 0; i /= 2)
            for (int k = 0; k < i; k++) parts[k] = fmaxf(parts[k], parts[k + i]);
        float most = parts[0];
        GT_UNROLL
        for (int mask = 1; mask < 32; mask *= 2) most = fmaxf(most, shfl_xor(most, mask));
        bound = most * power.inverse;
    }

    /* Rows from row0 on of a state [P,N]; NULL: zeros. */
    GT_METHOD void load(const float* from, int row0, int P, int N) {
        power = {1.0f, 1.0f};
        const int row = row0 + here() / 4, column = 2 * (here() % 4);
        if (from) from += (int64_t)row * N + column;
        GT_UNROLL
        for (int i = 0; i < 2 * TILES * 2; i++) {
            const int m = i / 2 / TILES, n = i / 2 % TILES, half = i % 2;
            const bool exists = from && row + 16 * m + 8 * half < P && 8 * n + column < N;
            const float2 x = exists ? ldg<float2>(from + (16 * m + 8 * half) * N + 8 * n) : float2{0.0f, 0.0f};
            H[m][n][2 * half] = x.x;
            H[m][n][2 * half + 1] = x.y;
        }
        measure();
        power = power_of(bound);
        GT_UNROLL
        for (int i = 0; i < 2 * TILES * 4; i++) H[i / 4 / TILES][i / 4 % TILES][i % 4] *= power.value;
    }

    GT_METHOD void store(float* to, int row0, int P, int N, bool adds = false) const {
        const int row = row0 + here() / 4, column = 2 * (here() % 4);
        to += (int64_t)row * N + column;
        GT_UNROLL
        for (int i = 0; i < 2 * TILES * 2; i++) {
            const int m = i / 2 / TILES, n = i / 2 % TILES, half = i % 2;
            if (row + 16 * m + 8 * half >= P || 8 * n + column >= N) continue;
            float* at = to + (16 * m + 8 * half) * N + 8 * n;
            float2 x = {H[m][n][2 * half] * power.inverse, H[m][n][2 * half + 1] * power.inverse};
            if (adds) {
                const float2 before = ldg<float2>(at);
                x = {before.x + x.x, before.y + x.y};
            }
            stg<float2>(at, x);
        }
    }

    /* To a checkpoint, by way of 16 NP bytes of shared memory that no other warp uses. */
    GT_METHOD void keep(f16* values, float* powers, uint32_t shared, int row0, int P, int N) {
        measure();
        const int lane = here(), g = lane / 4, j = lane % 4;
        const int row = lane / TILES, piece = lane % TILES; /* of the first it stores; rows STEP further follow */
        constexpr int STEP = 32 / TILES;
        f16* to = values + (int64_t)(row0 + row) * N + 8 * piece;
        GT_UNROLL
        for (int i = 0; i < 4; i++) { /* 8 rows at a time */
            GT_UNROLL
            for (int n = 0; n < TILES; n++)
                sts<uint32_t>(shared + tile_cell<NP>(g, n) + 4 * j,
                              pack_f16(H[i / 2][n][2 * (i % 2)], H[i / 2][n][2 * (i % 2) + 1]));
            sync_warp();
            if (row0 + 8 * i < P && row < 8 && 8 * piece < N) {
                GT_UNROLL
                for (int k = 0; k < 8; k += STEP)
                    stg<uint4>(to + k * N, lds<uint4>(shared + tile_cell<NP>(row + k, piece)));
            }
            to += 8 * N;
            sync_warp();
        }
        if (lane < 2 && row0 + 16 * lane < P) powers[row0 / 16 + lane] = power.inverse;
    }

    /* The chunk's part of H.  left: x or dy, tile of 64 columns, of which the warp has pair `pair` and the next; right: B or C
     * as f16.  weight: of the tokens 2 lane, 2 lane + 1, without powers but for the inverse of right's; most: bounds of
     * |left| . |weight|.  E: decay of the chunk.  gate: NULL, or a tile of z: left is times silu(z). */
    template <class T>
    GT_METHOD void update(uint32_t left, uint32_t gate, int pair, uint32_t right, float2 weight, float2 most, float E) {
        float largest = fmaxf(most.x, most.y), sum = most.x + most.y;
        GT_UNROLL
        for (int mask = 1; mask < 32; mask *= 2) {
            largest = fmaxf(largest, shfl_xor(largest, mask));
            sum += shfl_xor(sum, mask);
        }
        bound = finite(E * bound + 0x1p14f * sum);
        const float undo = power.inverse;
        power = power_of(bound);
        const float factor = finite(E * undo) * power.value;
        const Power own = power_of(largest);
        weight.x *= own.value;
        weight.y *= own.value;
        uint32_t v[BLOCKS][2][4];
        const int j = here() % 4;
        const uint32_t lefts = by_columns<64>(left), gates = by_columns<64>(gate);
        GT_UNROLL
        for (int block = 0; block < BLOCKS; block++) {
            const int from = 8 * block + j;
            const float w[4] = {shfl_idx(weight.x, from), shfl_idx(weight.y, from), shfl_idx(weight.x, from + 4),
                                shfl_idx(weight.y, from + 4)};
            GT_UNROLL
            for (int m = 0; m < 2; m++) {
                uint32_t x[4], z[4];
                ldmatrix_x4_trans(x, tile_at<64>(lefts, block, pair + m));
                if (gate) ldmatrix_x4_trans(z, tile_at<64>(gates, block, pair + m));
                GT_UNROLL
                for (int e = 0; e < 4; e++) {
                    float lo = Element<T>::lo(x[e]) * w[e / 2 * 2], hi = Element<T>::hi(x[e]) * w[e / 2 * 2 + 1];
                    if (gate) {
                        lo *= silu(Element<T>::lo(z[e]));
                        hi *= silu(Element<T>::hi(z[e]));
                    }
                    v[block][m][e] = pack_f16(lo, hi);
                }
            }
        }
        const float scale = own.inverse * power.value;
        const uint32_t rights = by_rows<NP>(right);
        constexpr int WIDTH = TILES < 4 ? TILES : 4;
        GT_UNROLL
        for (int n0 = 0; n0 < TILES; n0 += WIDTH) {
            float added[2][WIDTH][4] = {};
            GT_UNROLL
            for (int block = 0; block < BLOCKS; block++) {
                GT_UNROLL
                for (int n = 0; n < WIDTH; n += 2) {
                    uint32_t b[4];
                    ldmatrix_x4_trans(b, tile_at<NP>(rights, block, (n0 + n) / 2));
                    GT_UNROLL
                    for (int m = 0; m < 2; m++) {
                        mma_f16(added[m][n], v[block][m], b[0], b[1]);
                        mma_f16(added[m][n + 1], v[block][m], b[2], b[3]);
                    }
                }
            }
            GT_UNROLL
            for (int i = 0; i < 2 * WIDTH * 4; i++) {
                float& x = H[i / 4 / WIDTH][n0 + i / 4 % WIDTH][i % 4];
                x = fma_rn(added[i / 4 / WIDTH][i / 4 % WIDTH][i % 4], scale, x * factor);
            }
        }
    }
};

/* ---- where a block stands ---------------------------------------------------------------------------------------- */

/* Units of a group, and blocks for them. */
GT_HD int64_t group_units(const Problem& in) { return in.H / in.G * in.tiles; }
GT_HD int64_t group_pairs(const Problem& in) { return (group_units(in) + UNITS - 1) / UNITS; }

/* Where a block stands: the segment, and its units, number block_x() % (G pairs) of all pairs.  It lies in shared memory, and
 * nothing that is made of it (the first address of every tensor, 64 bits each) is kept in registers from chunk to chunk. */
struct Walk {
    static constexpr int BYTES = 64;
    uint32_t cells;

    /* All threads. */
    GT_METHOD void enter(const Problem& in, const Span& span) const {
        sync_threads(); /* the segment before may still be read */
        if (thread_id() == 0) {
            const int pairs = (int)group_pairs(in), place = block_x() % ((int)in.G * pairs), group = place / pairs;
            const int first = place % pairs * UNITS, units = (int)group_units(in);
            sts<int64_t>(cells, span.b);
            sts<int64_t>(cells + 8, span.first);
            sts<int64_t>(cells + 16, span.end);
            sts<int64_t>(cells + 24, span.chunk_slot);
            for (int i = 0; i < UNITS; i++) {
                sts<int>(cells + 32 + 4 * i, group * (int)(in.H / in.G) + (first + i) / in.tiles);
                sts<int>(cells + 40 + 4 * i, (first + i) % in.tiles * TILE_P);
            }
            sts<int>(cells + 48, group);
            sts<int>(cells + 52, units - first < UNITS ? units - first : UNITS);
        }
        sync_threads();
    }
    GT_METHOD int64_t b() const { return lds<int64_t>(cells); }
    GT_METHOD int64_t token(int chunk) const { return lds<int64_t>(cells + 8) + (int64_t)chunk * CHUNK; }
    GT_METHOD int64_t left(int chunk) const { return lds<int64_t>(cells + 16) - token(chunk); }
    GT_METHOD int tokens(int chunk) const { return left(chunk) < CHUNK ? (int)left(chunk) : CHUNK; }
    GT_METHOD int chunks() const { return (int)((left(0) + CHUNK - 1) / CHUNK); }
    GT_METHOD int64_t chunk_slot() const { return lds<int64_t>(cells + 24); }
    GT_METHOD int head(int unit) const { return lds<int>(cells + 32 + 4 * unit); }
    GT_METHOD int row0(int unit) const { return lds<int>(cells + 40 + 4 * unit); }
    GT_METHOD int group() const { return lds<int>(cells + 48); }
    GT_METHOD int units() const { return lds<int>(cells + 52); } /* that exist */
};

/* Where a unit's state begins in row `row` of a tensor [rows,H,P,N]: its head's. */
GT_DEV int64_t unit_state(const Problem& in, const Walk& walk, int unit, int64_t row) {
    return (row * in.H + walk.head(unit)) * in.P * in.N;
}

/* The checkpoint slot, of all heads and batch elements, of a unit's chunk. */
GT_DEV int64_t unit_slot(const Problem& in, const Walk& walk, int unit, int chunk) {
    return (walk.b() * in.H + walk.head(unit)) * chunk_slots(in.sequences, CHECKPOINT) + walk.chunk_slot() +
           chunk / SLOT_CHUNKS;
}

GT_DEV int64_t unit_strands(const Problem& in) { return grid_x() / (in.G * group_pairs(in)); }
GT_DEV int64_t unit_strand(const Problem& in) { return block_x() / (in.G * group_pairs(in)); }

} /* namespace ssd */
} /* namespace gt */

#endif
