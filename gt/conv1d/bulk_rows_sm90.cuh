/* gt/conv1d/bulk_rows_sm90.cuh - forward over time, [B,D,T], on compute capability 9.0, for long rows that are whole
 * numbers of aligned 16-byte units.  Other GPUs run forward_whole_rows_kernel (whole_rows.cuh) for such rows.  For
 * packed sequences (PACKED) they run forward_rows_kernel (rows.cuh).
 *
 * A row is one channel of one batch element.  It is cut into pieces of 2 KB; the last piece may be shorter.  All pieces
 * are numbered, and a warp takes `each` consecutive pieces.  They come through a ring of slots in shared memory.  One
 * bulk copy brings the piece and, unless it is a row's first, the 16 bytes before it.  So bytes in flight cost no
 * registers, and only a warp's first loads wait for a block to start.  Each warp has its own ring, and meets other
 * warps at no barrier.
 * A lane takes units of 16 bytes, 32 units apart, and reads the inputs before its unit from the slot.
 *
 * Packed sequences use borders.cuh.  Consecutive pieces have the same tokens of consecutive channels, so a warp seldom
 * has to look for borders again.
 *
 * grid: as many blocks as are resident at a time, or fewer.  Block: 128.  All warps do the same work.
 * registers: weights (packed: also the next channel's), a unit of x, its outputs; 80 at most, so that six blocks share
 * a multiprocessor.
 * shared memory of a block: 32.4 KB for four slots a warp and their mbarriers.  Packed calls use 0.5 KB more for
 * borders.
 * bytes: every tensor once, and 16 bytes of x once more for every piece but a row's first.
 * instructions per element (bf16, W = 4, SiLU): as many as in forward.cuh, and 2 for addresses and shared memory.  In a
 * round of 32 units with a border in or near it, an element takes 4 more.
 * The warp with a row's first piece writes the row's state_out, after it has read state_in. */
#ifndef GT_CONV1D_BULK_ROWS_SM90_CUH
#define GT_CONV1D_BULK_ROWS_SM90_CUH

#include "../base/bulk.cuh"
#include "rows.cuh"

namespace gt {
namespace conv1d {

constexpr int BULK_BLOCKS = 6; /* resident blocks of a multiprocessor */
constexpr int BULK_WARPS = ROWS_BLOCK / 32;
constexpr int BULK_PIECE = 2048, BULK_SLOT = BULK_PIECE + 16, BULK_STAGES = 4; /* bytes; slots of a warp */
constexpr int BULK_FULL = BULK_WARPS * BULK_STAGES * BULK_SLOT;                /* offset of the mbarriers */
/* offset of the borders of packed sequences */
constexpr int BULK_BORDERS = BULK_FULL + 8 * BULK_WARPS * BULK_STAGES;
template <class T>
constexpr int BULK_BORDER_BYTES = 4 * border_words(BULK_PIECE / (int)sizeof(T)); /* borders of a warp */
template <class T, bool PACKED>
constexpr int BULK_SMEM = BULK_BORDERS + (PACKED ? BULK_WARPS * BULK_BORDER_BYTES<T> : 0);

struct BulkRowsCut {
    uint32_t pieces, all, each; /* pieces of a row; pieces of all rows; pieces of a warp */
    int64_t blocks;             /* blocks of the grid */
};

struct BulkRowsParams {
    ForwardParams f;
    BulkRowsCut rows;
};

/* Where a piece lies.  number: index among all pieces.  It fits 32 bits, because memory holds fewer pieces.
 * Consecutive pieces belong to one row, or in packed calls to the same tokens of consecutive channels. */
template <class T, bool PACKED>
struct PiecePosition {
    static constexpr int TOKENS = BULK_PIECE / (int)sizeof(T);
    uint32_t number, b, d, piece;

    GT_METHOD PiecePosition(const Problem& p, const BulkRowsCut& cut, uint32_t n) {
        const uint32_t row = n / cut.pieces;
        number = n, piece = PACKED ? n / (uint32_t)p.D : n % cut.pieces;
        b = PACKED ? 0 : row / (uint32_t)p.D, d = (PACKED ? n : row) % (uint32_t)p.D;
    }
    GT_METHOD void advance(const Problem& p, const BulkRowsCut& cut) {
        number++;
        if constexpr (PACKED) {
            if (++d == (uint32_t)p.D) d = 0, piece++;
            return;
        }
        if (++piece < cut.pieces) return;
        piece = 0;
        if (++d == (uint32_t)p.D) d = 0, b++;
    }
    GT_METHOD int tokens(const Problem& p) const {
        const int64_t left = p.T - (int64_t)piece * TOKENS;
        return left < TOKENS ? (int)left : TOKENS;
    }
    GT_METHOD int64_t offset(const gt_stride& s) const { return offset_of(s, b, (int64_t)piece * TOKENS, d); }
};

/* Without sm_90a code this kernel never runs, so its body is empty and its launch bound is one warp. */
template <class T, int W, bool PACKED>
GT_KERNEL(GT_SM90A ? ROWS_BLOCK : 32, BULK_BLOCKS)
forward_bulk_rows_kernel(const GT_GRID_CONSTANT BulkRowsParams p) {
#if GT_SM90A
    constexpr int N = 16 / (int)sizeof(T), J = W - 1, SIZE = sizeof(T), TOKENS = PiecePosition<T, PACKED>::TOKENS;
    const Problem& in = p.f.in;
    const int warp = shfl_idx(warp_id(), 0);
    const uint32_t slots = smem_base() + warp * BULK_STAGES * BULK_SLOT;
    const uint32_t full = smem_base() + BULK_FULL + 8 * BULK_STAGES * warp;
    if (lane_id() < BULK_STAGES) mbarrier_init(full + 8 * lane_id(), 32);
    sync_warp();
    fence_async_proxy();
    const uint32_t first = (block_x() * BULK_WARPS + warp) * p.rows.each;
    if (first >= p.rows.all) return;
    const uint32_t end = p.rows.all - first < p.rows.each ? p.rows.all : first + p.rows.each;
    PiecePosition<T, PACKED> at(in, p.rows, first), next = at;
    const auto load = [&](int stage) {
        if (next.number >= end) return;
        const uint32_t before = next.piece > 0 ? 16 : 0, bytes = SIZE * next.tokens(in) + before;
        const char* from = reinterpret_cast<const char*>(static_cast<const T*>(in.x) + next.offset(in.x_stride));
        mbarrier_arrive_expect_warp(full + 8 * stage, bytes);
        bulk_load(slots + stage * BULK_SLOT + 16 - before, from - before, bytes, full + 8 * stage);
        next.advance(in, p.rows);
    };
    GT_UNROLL
    for (int i = 0; i < BULK_STAGES - 1; i++) load(i);
    const Borders borders = {smem_base() + BULK_BORDERS + warp * BULK_BORDER_BYTES<T>};
    const int64_t used = PACKED ? used_tokens(in.sequences) : 0;
    int used_here = 0; /* number of the piece's tokens that belong to sequences */
    /* next_filter: packed only; the weights of the next piece, loaded while this piece is computed */
    Filter<W, 1> filter, next_filter;
    if constexpr (PACKED) next_filter.load(in, at.d, 1);
    int stage = 0, parity = 0;
    GT_NO_UNROLL
    for (bool is_new = true; at.number < end; at.advance(in, p.rows), is_new = (PACKED ? at.d : at.piece) == 0) {
        if constexpr (PACKED) {
            filter = next_filter;
            next_filter.load(in, at.d + 1 < (uint32_t)in.D ? at.d + 1 : 0, 1);
        } else if (is_new) {
            filter.load(in, at.d, 1);
        }
        load(stage == 0 ? BULK_STAGES - 1 : stage - 1);
        if (PACKED && is_new) {
            const int64_t first = (int64_t)at.piece * TOKENS;
            used_here = used - first < TOKENS ? (int)(used - first) : TOKENS;
            borders.write(in.sequences, used, first, TOKENS, lane_id(), 32);
            sync_warp();
        }
        const uint32_t slot = slots + stage * BULK_SLOT + 16;
        const int tokens = at.tokens(in);
        T* y = static_cast<T*>(p.f.y) + at.offset(p.f.y_stride);
        mbarrier_wait(full + 8 * stage, parity);
        GT_NO_UNROLL
        for (int t = lane_id() * N; (PACKED ? t - lane_id() * N : t) < tokens; t += 32 * N) {
            const bool exists = !PACKED || t < tokens;     /* packed: all lanes look up borders */
            const bool is_first = at.piece == 0 && t == 0; /* first unit of the row */
            Unit<T> own = {};
            Before<T> earlier = {};
            if (exists) own = lds<Unit<T>>(slot + t * SIZE);
            if (exists && !is_first) earlier = lds<Before<T>>(slot + (t - BEFORE) * SIZE);
            float e[N + J], out[N];
            GT_UNROLL
            for (int i = 0; i < J; i++) e[i] = earlier.get(BEFORE - J + i);
            GT_UNROLL
            for (int n = 0; n < N; n++) e[n + J] = own.get(n);
            if constexpr (PACKED) {
                const T* row = static_cast<const T*>(in.x) + at.d * in.x_stride.h;
                forward_packed_unit(out, in, filter, e, borders.near(t, N), row, at.d, (int64_t)at.piece * TOKENS, t,
                                    used_here);
            } else {
                if (is_first && in.state_in) {
                    GT_UNROLL
                    for (int i = 0; i < J; i++) e[i] = state_input(in, at.b, at.d, i - J);
                }
                forward_unit<T>(out, in, filter, e, 0);
            }
            if (!exists) break;
            Unit<T> packed;
            packed.set(out);
            stg(y + t, packed);
        }
        if (!PACKED && p.f.state_out && at.piece == 0 && lane_id() == 0)
            store_state<T>(in, p.f.state_out, at.b, at.b, at.d);
        sync_warp(); /* all lanes have read the slot and the borders */
        if (++stage == BULK_STAGES) stage = 0, parity ^= 1;
    }
#else
    (void)p;
    __trap();
#endif
}

} /* namespace conv1d */
} /* namespace gt */

#endif
