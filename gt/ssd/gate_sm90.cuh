/* gt/ssd/gate_sm90.cuh - ssd with z on compute capability 9.0, 16-bit calls: g = dy silu(z), which the passes over G
 * and the chunks' gradients take in place of dy.
 *
 * g is f16 with a power of two for 64 numbers, a token's of a head's tile: it is rounded once, from fp32, to 11 bits
 * over 27 binades, whatever the range of dy and z.  What undoes the power lies apart (Problem::dy_inverses), 0.03 of y.
 * g lies in the memory of dz, which is made last, from dy and z; where there is no dz, in workspace.
 *
 * A warp has a chunk's 64 tokens of a tile, 16 at a time: eight lanes a row, a piece of 16 bytes a lane.  The warps of
 * a block have tiles beside each other.  A row's largest magnitude comes of three exchanges.
 * REGISTERS a thread: 80, of which dy and z under way 32.  No shared memory.
 * ISSUE SLOTS a token and head, P = 64, counted in the machine code: 40.
 * BYTES a token and head: dy, z, g 2 P each, 4 a tile.
 * CHAIN.  It waits first: of packed sequences a kernel before it has cleared rows of dz.
 * grid: GATE_BLOCKS a multiprocessor at most; block 256.  Places in turn: [B, slots of 128 tokens, 2, H, tiles], of
 * packed sequences those that there are.  No sums. */
#ifndef GT_SSD_GATE_SM90_CUH
#define GT_SSD_GATE_SM90_CUH

#include "state.cuh"

namespace gt {
namespace ssd {

/* g as kernels take it: in place of dy, with z = NULL. */
struct GatedRows {
    void* rows; /* f16 [B,T,H,P]; NULL: none */
    gt_stride stride;
    float* inverses; /* see inverses_index() */
};

struct GateParams {
    Problem in;
    GatedRows g;
    int64_t slots, rows; /* of a batch element; B*slots*2 */
};

constexpr int GATE_WARPS = 8, GATE_BLOCKS = 8;

/* silu(z), to what 16 bits tell. */
GT_DEV float gate_of(float z) { return silu_of_sigmoid(z, sigmoid_fast(z)); }

/* A row's piece of g; returns the row's inverse. */
template <class T>
GT_DEV float gate_piece(const uint4& dy, const uint4& z, uint4& g) {
    using E = Element<T>;
    const uint32_t left[4] = {dy.x, dy.y, dy.z, dy.w}, right[4] = {z.x, z.y, z.z, z.w};
    float x[8], largest = 0.0f;
    GT_UNROLL
    for (int e = 0; e < 4; e++) {
        x[2 * e] = E::lo(left[e]) * gate_of(E::lo(right[e]));
        x[2 * e + 1] = E::hi(left[e]) * gate_of(E::hi(right[e]));
        largest = fmaxf(largest, fmaxf(fabsf(x[2 * e]), fabsf(x[2 * e + 1])));
    }
    GT_UNROLL
    for (int mask = 1; mask < 8; mask *= 2) largest = fmaxf(largest, shfl_xor(largest, mask));
    const Power power = power_of(finite(largest));
    const auto pair = [&](int e) { return pack_f16(x[e] * power.value, x[e + 1] * power.value); };
    g = {pair(0), pair(2), pair(4), pair(6)};
    return power.inverse;
}

/* A chunk's tile: its first token, how many there are, its head and tile. */
template <class T>
GT_DEV void gate_tile(const GateParams& p, int b, int64_t first, int tokens, int64_t head, int tile, float* inverses) {
    constexpr int AT_ONCE = 4, ROWS = 4; /* rows of a warp: 4 at a time */
    const Problem& in = p.in;
    const int lane = lane_id(), row = lane / 8, column = tile * TILE_P + 8 * (lane % 8);
    const int left = column < in.P ? tokens - row : 0;
    const auto at = [&](const gt_stride& stride) { return offset_of(stride, b, first + row, head) + column; };
    const uint16_t *dy = static_cast<const uint16_t*>(in.dy) + at(in.dy_stride),
                   *z = static_cast<const uint16_t*>(in.z) + at(in.z_stride);
    uint16_t* g = static_cast<uint16_t*>(p.g.rows) + at(p.g.stride);
    GT_NO_UNROLL
    for (int t = 0; t < CHUNK; t += AT_ONCE * ROWS) {
        uint4 x[AT_ONCE], gate[AT_ONCE];
        GT_UNROLL
        for (int k = 0; k < AT_ONCE; k++) {
            x[k] = gate[k] = {0, 0, 0, 0};
            if (t + ROWS * k < left) {
                x[k] = ldg<uint4>(dy + ROWS * k * in.dy_stride.t);
                gate[k] = ldg<uint4>(z + ROWS * k * in.z_stride.t);
            }
        }
        GT_UNROLL
        for (int k = 0; k < AT_ONCE; k++) {
            uint4 out;
            const float inverse = gate_piece<T>(x[k], gate[k], out);
            if (t + ROWS * k < left) stg<uint4>(g + ROWS * k * p.g.stride.t, out);
            if (lane % 8 == 0) inverses[t + ROWS * k + row] = inverse;
        }
        dy += AT_ONCE * ROWS * in.dy_stride.t, z += AT_ONCE * ROWS * in.z_stride.t;
        g += AT_ONCE * ROWS * p.g.stride.t;
    }
}

template <class T>
GT_KERNEL(32 * GATE_WARPS, 3)
gate_kernel(const GT_GRID_CONSTANT GateParams p) {
    wait_for_chain();
    const Problem& in = p.in;
    const int64_t units = in.H * in.tiles;
    const int64_t rows = in.sequences.cu_seqlens ? used_slots(in.sequences, CHECKPOINT) * SLOT_CHUNKS : p.rows;
    const int64_t step = grid_x() * (int64_t)GATE_WARPS;
    GT_NO_UNROLL
    for (int64_t place = block_x() * (int64_t)GATE_WARPS + warp_id(); place < rows * units; place += step) {
        const int64_t row = place / units, head = place % units / in.tiles;
        const int tile = (int)(place % in.tiles), second = (int)(row % SLOT_CHUNKS);
        const int64_t slot = row / SLOT_CHUNKS % p.slots, b = row / SLOT_CHUNKS / p.slots;
        const gt_chunk chunk = chunk_at(in.sequences, CHECKPOINT, slot);
        if (chunk.sequence < 0) continue;
        const int64_t first = chunk.first + second * CHUNK, left = chunk.last - first;
        if (left <= 0) continue;
        gate_tile<T>(p, (int)b, first, left < CHUNK ? (int)left : CHUNK, head, tile,
                     p.g.inverses + inverses_index(in, (b * in.H + head) * p.slots + slot, second, tile));
    }
}

} /* namespace ssd */
} /* namespace gt */

#endif
