/* gt/ssd/group_sm90.cuh - ssd forward on compute capability 9.0: B and C of all chunks as forward_sm90.cuh multiplies
 * them, made once where many blocks read them.
 *
 * An image is what a block has of a chunk and group in shared memory: the tile of B and that of C, in f16 with a power
 * of two a row, in panels that wgmma reads, zeros beyond the chunk's tokens and columns; then what undoes the powers, of
 * B's rows and of C's.  So the block's producer fetches it by three copies that one thread starts (bulk.cuh), where it
 * would take a quarter of its time to convert it.  The numbers are those that the producer makes: see group_to_f16().
 *
 * A warp has 16 rows of B or C.  REGISTERS a thread: 16 of rows, 32 of 256 columns.  No shared memory.
 * BYTES a token and group: 4 N read, 4 NP + 8 written; those of the forward kernel's blocks come from L2.
 * CHAIN.  It reads inputs of the call alone, but waits first: others of the chain wait for it.
 * grid: GROUP_BLOCKS a multiprocessor at most; block 256.  Places in turn: [B, slots of 128 tokens, 2, G, B or C, rows],
 * of packed sequences those that there are.  No sums. */
#ifndef GT_SSD_GROUP_SM90_CUH
#define GT_SSD_GROUP_SM90_CUH

#include "block_sm90.cuh"

namespace gt {
namespace ssd {

constexpr int GROUP_WARPS = 8, GROUP_BLOCKS = 8;

/* Whether forward has a kernel that takes images.  With four consumers, which z has up to 64 columns, shared memory
 * would not do. */
GT_HD constexpr bool has_images(int NP, int units, bool has_gate) {
    return NP > SLAB || (units == 4 && (NP > 64 || !has_gate));
}

/* The columns of an image. */
GT_HD constexpr int image_columns(int N) { return N <= 16 ? 16 : N <= 64 ? 64 : N <= SLAB ? SLAB : 2 * SLAB; }
GT_HD constexpr int image_bytes(int N) { return 4 * CHUNK * image_columns(N) + 8 * CHUNK; }

/* Where things lie in an image, in bytes. */
template <int NP>
struct GroupImage {
    static constexpr int ROW = NP < 64 ? 2 * NP : 128, PANEL = CHUNK * ROW, TILE = CHUNK * 2 * NP; /* see wgmma.cuh */
    static constexpr int B = 0, C = TILE, INVERSES = C + TILE, BYTES = INVERSES + 2 * 4 * CHUNK;
    static_assert(BYTES == image_bytes(NP), "as the workspace has it");
    static_assert(TILE % 16 == 0 && BYTES % 16 == 0, "copied by bulk_load");
};

struct GroupParams {
    Problem in;
    char* images;        /* [B][slots][2][G] */
    int64_t slots, rows; /* of a batch element; B*slots*2 */
};

/* Rows of a chunk's B or C to its tile of an image, and what undoes their powers.  first: the chunk's first row;
 * tokens: that it has. */
template <class T, int NP, int AT_ONCE>
GT_DEV void rows_to_image(const T* first, int64_t pitch, int tokens, int columns, int block, char* tile,
                          float* inverses) {
    using Lanes = RowLanes<NP>;
    using Image = GroupImage<NP>;
    const Lanes at(lane_id());
    const auto row = [&](int k) { return (block + k) * Lanes::ROWS + at.row; };
    uint4 x[AT_ONCE][Lanes::PIECES];
    GT_UNROLL
    for (int k = 0; k < AT_ONCE; k++) {
        GT_UNROLL
        for (int i = 0; i < Lanes::PIECES; i++) {
            const int column = 8 * (at.piece + Lanes::LANES * i);
            x[k][i] = {0, 0, 0, 0};
            if (row(k) < tokens && column < columns) x[k][i] = ldg<uint4>(first + row(k) * pitch + column);
        }
    }
    GT_UNROLL
    for (int k = 0; k < AT_ONCE; k++) {
        const Power power = power_of(row_maximum<T, Lanes::LANES>(larger_of<T>(x[k])));
        GT_UNROLL
        for (int i = 0; i < Lanes::PIECES; i++)
            stg<uint4>(tile + gt::tile_at<Image::ROW>(row(k), at.piece + Lanes::LANES * i, Image::PANEL),
                       {scaled_f16<T>(x[k][i].x, power.value), scaled_f16<T>(x[k][i].y, power.value),
                        scaled_f16<T>(x[k][i].z, power.value), scaled_f16<T>(x[k][i].w, power.value)});
        if (at.piece == 0) inverses[row(k)] = power.inverse;
    }
}

template <class T, int NP>
GT_KERNEL(32 * GROUP_WARPS, NP > 128 ? 3 : 4)
group_images_kernel(const GT_GRID_CONSTANT GroupParams p) {
    using Image = GroupImage<NP>;
    constexpr int ALL = CHUNK / RowLanes<NP>::ROWS, AT_ONCE = NP > 16 && NP <= 128 ? 2 : 1, PARTS = ALL / AT_ONCE;
    wait_for_chain();
    const Problem& in = p.in;
    const int64_t rows = in.sequences.cu_seqlens ? used_slots(in.sequences, CHECKPOINT) * SLOT_CHUNKS : p.rows;
    const int64_t places = rows * in.G * 2 * PARTS, step = grid_x() * (int64_t)GROUP_WARPS;
    GT_NO_UNROLL
    for (int64_t place = block_x() * (int64_t)GROUP_WARPS + warp_id(); place < places; place += step) {
        const int part = (int)(place % PARTS), is_C = (int)(place / PARTS % 2);
        const int64_t image = place / (2 * PARTS), g = image % in.G, row = image / in.G;
        const int64_t slot = row / SLOT_CHUNKS % p.slots, b = row / SLOT_CHUNKS / p.slots;
        const gt_chunk chunk = chunk_at(in.sequences, CHECKPOINT, slot);
        if (chunk.sequence < 0) continue;
        const int64_t first = chunk.first + row % SLOT_CHUNKS * CHUNK, left = chunk.last - first;
        if (left <= 0) continue;
        const gt_stride& stride = is_C ? in.Cm_stride : in.Bm_stride;
        const T* const from = static_cast<const T*>(is_C ? in.Cm : in.Bm) + offset_of(stride, b, first, g);
        char* const to = p.images + image * Image::BYTES;
        rows_to_image<T, NP, AT_ONCE>(from, stride.t, left < CHUNK ? (int)left : CHUNK, in.N, part * AT_ONCE,
                                      to + (is_C ? Image::C : Image::B),
                                      reinterpret_cast<float*>(to + Image::INVERSES) + is_C * CHUNK);
    }
}

} /* namespace ssd */
} /* namespace gt */

#endif
