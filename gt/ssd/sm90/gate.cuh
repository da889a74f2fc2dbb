/* gt/ssd/sm90/gate.cuh - ssd backward with z on compute capability 9.0, for 16-bit activations: computes g = dy
 * silu(z).  Later kernels take g in place of dy.  If backward reads y and the type is bf16, this kernel also computes
 * dz.
 *
 * g is f16, with a power of two for 16 tokens of a tile (64 rows of a head).  It is rounded once, from fp32.  An
 * element keeps 11 bits if it is at most 27 binades below the largest of these 16 rows, whatever the range of dy and z.
 * The inverses of the powers lie in Problem::dy_inverses and take 0.002 of the bytes of y.
 * g normally lies in the memory of dx.  The kernel for chunks overwrites g with dx after all reads of g
 * (HopperGradientParams::in_twos).  g lies in workspace if the caller does not want dx, or if there are so few chunks
 * that sharing memory would be slower.
 * dz = dy u silu'(z), where u is the output before the gate.  y = u silu(z), so dz = dy y (1 / z + 1 - sigmoid(z)),
 * with the rounding error of y.  u is lost if silu(z) is so close to 0, or y so large, that y no longer determines u
 * (is_lost()).  This is rare, because bf16 has the range of fp32.  gate_kernel sets a flag for the place (a chunk of a
 * tile), and gate_lost_kernel then computes these elements (gate_lost.cuh).
 *
 * A warp takes a place, 64 tokens of a tile, 16 tokens at a time: eight lanes for each row, and a piece of 16 bytes for
 * each lane.  The warps of a block take adjacent places.
 * REGISTERS per thread: 80, including 32 for loads of dy and z.  With y 128, including 48 for loads of dy, z and y.  No
 * shared memory.
 * ISSUE SLOTS per token and head, P = 64, counted in the machine code: 40, or 83 with y.
 * BYTES per token and head: dy, z and g 2 P each; with y also y and dz 2 P each.  4 for each 16 tokens of a tile.
 * CHAIN.  The kernel waits for previous kernels before anything else, because with packed sequences one of them clears
 * rows of dx and dz.
 * grid: at most GATE_BLOCKS per multiprocessor; block 256.  Blocks take places in turn; with packed sequences only
 * existing places.  Places are numbered as [B, slots of 128 tokens, 2, H, tiles].  The kernel has no sums. */
#ifndef GT_SSD_SM90_GATE_CUH
#define GT_SSD_SM90_GATE_CUH

#include "../problem.cuh"
#include "../mma/chunk.cuh"

namespace gt {
namespace ssd {

struct GateParams {
    Problem in;
    GatedRows g;
    GateGradient gradient;
    int64_t slots, rows; /* slots: of a batch element; rows: B*slots*2, the chunk slots */
};

constexpr int GATE_WARPS = 8, GATE_BLOCKS = 8;

/* Whether y does not determine u, the output before the gate, although dz depends on u.  For all other elements
 * |silu(z)| is at least 2^-60.  So y leaves the range of bf16 only if |u| is below 2^-66. */
GT_DEV bool is_lost(float dy, float z, float y) {
    return dy != 0.0f && (!(fabsf(z) >= 0x1p-59f && z >= -40.0f) || !(fabsf(y) <= FLT_MAX));
}

/* Computes a piece of a row of g as fp32, without a power.  Returns the largest magnitude of the piece. */
template <class T>
GT_DEV float gate_piece(const uint4& dy, const uint4& z, float (&g)[8]) {
    using E = Element<T>;
    const uint32_t left[4] = {dy.x, dy.y, dy.z, dy.w}, right[4] = {z.x, z.y, z.z, z.w};
    float largest = 0.0f;
    const auto gated = [](float a, float b) { return a * silu_of_sigmoid(b, sigmoid_fast(b)); }; /* accurate to 16
                                                                                                  * bits */
    GT_UNROLL
    for (int e = 0; e < 4; e++) {
        g[2 * e] = gated(E::lo(left[e]), E::lo(right[e]));
        g[2 * e + 1] = gated(E::hi(left[e]), E::hi(right[e]));
        largest = fmaxf(largest, fmaxf(fabsf(g[2 * e]), fabsf(g[2 * e + 1])));
    }
    return largest;
}

/* Computes a piece of dz from y.  Returns whether u of one of its elements is lost. */
template <class T>
GT_DEV bool gradient_piece(const uint4& dy, const uint4& z, const uint4& y, uint4& dz) {
    using E = Element<T>;
    const uint32_t as[4] = {dy.x, dy.y, dy.z, dy.w}, bs[4] = {z.x, z.y, z.z, z.w}, cs[4] = {y.x, y.y, y.z, y.w};
    uint32_t out[4];
    bool lost = false;
    const auto number = [&](float a, float b, float c) {
        lost |= is_lost(a, b, c);
        return c * (rcp_approx(b) + (1.0f - sigmoid_fast(b))) * a;
    };
    GT_UNROLL
    for (int e = 0; e < 4; e++) {
        const float lo = number(E::lo(as[e]), E::lo(bs[e]), E::lo(cs[e]));
        const float hi = number(E::hi(as[e]), E::hi(bs[e]), E::hi(cs[e]));
        out[e] = E::pack(E::lo(as[e]) == 0.0f ? 0.0f : lo, E::hi(as[e]) == 0.0f ? 0.0f : hi);
    }
    dz = {out[0], out[1], out[2], out[3]};
    return lost;
}

/* A warp computes g of 16 rows, and dz with OF_Y.  A lane has four pieces; piece k belongs to row 4 k + lane / 8.
 * Passes pieces of g to store_g(k, piece) and pieces of dz to store_dz(k, piece).  Sets `lost` if u of an element is
 * lost.  Returns the inverse of the power of g. */
constexpr int GATE_ROWS = 4, GATE_PARTS = BLOCK / GATE_ROWS;
template <class T, bool OF_Y, class StoreG, class StoreDz>
GT_DEV float gate_block(const uint4 (&dy)[GATE_PARTS], const uint4 (&z)[GATE_PARTS], const uint4 (&y)[GATE_PARTS],
                        bool& lost, const StoreG& store_g, const StoreDz& store_dz) {
    float product[GATE_PARTS][8], largest = 0.0f;
    GT_UNROLL
    for (int k = 0; k < GATE_PARTS; k++) {
        largest = fmaxf(largest, gate_piece<T>(dy[k], z[k], product[k]));
        if constexpr (OF_Y) {
            uint4 out;
            lost |= gradient_piece<T>(dy[k], z[k], y[k], out);
            store_dz(k, out);
        }
    }
    GT_UNROLL
    for (int mask = 1; mask < 32; mask *= 2) largest = fmaxf(largest, shfl_xor(largest, mask));
    const Power power = power_of(finite(largest));
    GT_UNROLL
    for (int k = 0; k < GATE_PARTS; k++) {
        const auto pair = [&](int e) { return pack_f16(product[k][e] * power.value, product[k][e + 1] * power.value); };
        store_g(k, {pair(0), pair(2), pair(4), pair(6)});
    }
    return power.inverse;
}

/* A warp computes g of a place, and dz with OF_Y.  first: the chunk's first token.  inverses: where the inverses of the
 * place's powers go.  Returns whether u of one of the lane's elements is lost. */
template <class T, bool OF_Y>
GT_DEV bool gate_tile(const GateParams& p, int b, int64_t first, int tokens, int64_t head, int tile, float* inverses) {
    constexpr int ROWS = GATE_ROWS, PARTS = GATE_PARTS;
    const Problem& in = p.in;
    const GateGradient& more = p.gradient;
    const int lane = lane_id(), row = lane / 8, column = tile * TILE_P + 8 * (lane % 8);
    const int left = column < in.P ? tokens - row : 0;
    bool lost = false;
    const auto at = [&](const gt_stride& stride) { return offset_of(stride, b, first + row, head) + column; };
    const uint16_t *dy = static_cast<const uint16_t*>(in.dy) + at(in.dy_stride),
                   *z = static_cast<const uint16_t*>(in.z) + at(in.z_stride);
    uint16_t* g = static_cast<uint16_t*>(p.g.rows) + at(p.g.stride);
    const uint16_t* y = nullptr;
    uint16_t* dz = nullptr;
    if constexpr (OF_Y) {
        y = static_cast<const uint16_t*>(more.y) + at(more.y_stride);
        dz = static_cast<uint16_t*>(more.dz) + at(more.dz_stride);
    }
    GT_NO_UNROLL
    for (int t = 0; t < CHUNK; t += BLOCK) {
        uint4 x[PARTS], gate[PARTS], gated[PARTS];
        GT_UNROLL
        for (int k = 0; k < PARTS; k++) {
            x[k] = gate[k] = gated[k] = {0, 0, 0, 0};
            if (t + ROWS * k < left) {
                x[k] = ldg<uint4>(dy + ROWS * k * in.dy_stride.t);
                gate[k] = ldg<uint4>(z + ROWS * k * in.z_stride.t);
                if (OF_Y) gated[k] = ldg<uint4>(y + ROWS * k * more.y_stride.t);
            }
        }
        const float inverse = gate_block<T, OF_Y>(
            x, gate, gated, lost,
            [&](int k, const uint4& out) {
                if (t + ROWS * k < left) stg<uint4>(g + ROWS * k * p.g.stride.t, out);
            },
            [&](int k, const uint4& out) {
                if (t + ROWS * k < left) stg<uint4>(dz + ROWS * k * more.dz_stride.t, out);
            });
        if (lane == 0) inverses[t / BLOCK] = inverse;
        dy += BLOCK * in.dy_stride.t, z += BLOCK * in.z_stride.t, g += BLOCK * p.g.stride.t;
        if (OF_Y) y += BLOCK * more.y_stride.t, dz += BLOCK * more.dz_stride.t;
    }
    return lost;
}

template <class T, bool OF_Y>
GT_KERNEL(32 * GATE_WARPS, OF_Y ? 2 : 3)
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
        const int64_t first = chunk.first + second * CHUNK, left = chunk.last - first;
        bool lost = false;
        if (chunk.sequence >= 0 && left > 0)
            lost =
                gate_tile<T, OF_Y>(p, (int)b, first, left < CHUNK ? (int)left : CHUNK, head, tile,
                                   p.g.inverses + inverses_index(in, (b * in.H + head) * p.slots + slot, second, tile));
        if (!OF_Y) continue;
        lost = warp_any(lost);
        if (lane_id() == 0) p.gradient.lost[place] = lost;
    }
}

} /* namespace ssd */
} /* namespace gt */

#endif
