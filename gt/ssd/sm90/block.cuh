/* gt/ssd/sm90/block.cuh - code that the passes over units share on compute capability 9.0.  The units of a block belong
 * to one group; they are called its bundle.  The producer warpgroup copies rows ahead; consumer warpgroups keep states
 * in the layout of accumulators (mma/state.cuh). */
#ifndef GT_SSD_SM90_BLOCK_CUH
#define GT_SSD_SM90_BLOCK_CUH

#include "../../base/bulk.cuh"
#include "../../base/ring.cuh"
#include "../../base/wgmma.cuh"
#include "../../recurrence/roles_sm90.cuh"
#include "../problem.cuh"
#include "../mma/chunk.cuh"

namespace gt {
namespace ssd {

/* forward.cuh */
/* y_map: map of y with boxes of 64 tokens by 64 rows of a head, if has_y_map.  checkpoint_map: map of the checkpoints,
 * if there are any, with boxes of 16 rows by 64 columns. */
struct HopperForwardParams : TensorParams {
    TensorMap y_map, checkpoint_map;
    int has_y_map;
};

/* own_lane() and own_thread() are here() and thread_here() with known ranges, so that the compiler turns quotients into
 * shifts.  Helpers that other kernels share omit these hints, because they change register allocation there. */
GT_DEV int own_lane() {
    const int lane = made_here(lane_id());
    GT_ASSUME(lane >= 0 && lane < 32);
    return lane;
}
GT_DEV int own_thread() {
    const int thread = made_here(thread_id());
    GT_ASSUME(thread >= 0 && thread < 1024);
    return thread;
}

/* wgmma_step() that changes only the low one of two registers.  A step's address also fits in 14 bits, so nothing is
 * carried into the high register. */
GT_DEV uint64_t operand_step(uint64_t operand, uint32_t bytes) {
    return (operand >> 32 << 32) | (uint32_t)((uint32_t)operand + (bytes >> 4));
}

/* ---- where a block stands ---------------------------------------------------------------------------------------- */

/* Sets the bundles of a launch with `units` units per block. */
static inline void set_bundles(Problem& in, int units, int64_t strands) {
    const int64_t bundles = group_bundles(in, units);
    in.bundles = {(int)strands,
                  (int)(in.H / in.G),
                  (int)group_units(in),
                  divide_by((int)(in.G * bundles)),
                  divide_by((int)bundles),
                  divide_by(in.tiles),
                  divide_by((int)in.segments.count)};
}

GT_DEV int bundle_strand(const Problem& in) {
    int index;
    return divide(block_x(), in.bundles.by_strand, &index);
}

/* each_item() for this block. */
template <class Pass>
GT_DEV void each_bundle_item(const Problem& in, const Pass& pass) {
    each_item(
        in, bundle_strand(in), [&] { return in.bundles.strands; }, pass);
}

/* Cursor for a warpgroup of a block with UNITS units.  If units are missing, the last unit takes their places, and its
 * repeated results are not stored.  So no code branches on missing units. */
template <int UNITS>
struct GroupCursor {
    static constexpr int BYTES = 176;
    static_assert(UNITS <= 4, "fits");
    uint32_t addresses;

    /* Called by all threads of a warpgroup.  barrier: the number of its barrier.  One thread calls fill(), which may
     * put offsets. */
    template <class Fill>
    GT_METHOD void enter(const Problem& in, const Span& span, int64_t item, int barrier, const Fill& fill) const {
        bar_sync(barrier, WARPGROUP); /* other threads may still read the previous segment */
        if (thread_id() % WARPGROUP == 0) {
            int index, bundle;
            divide(block_x(), in.bundles.by_strand, &index);
            const int group = divide(index, in.bundles.by_group, &bundle);
            const int first = bundle * UNITS, all = in.bundles.units;
            sts<int64_t>(addresses, span.b);
            sts<int64_t>(addresses + 8, span.first);
            sts<int64_t>(addresses + 16, span.end);
            sts<int>(addresses + 24, (int)((span.end - span.first + CHUNK - 1) / CHUNK));
            sts<int64_t>(addresses + 32, item);
            sts<int>(addresses + 40, group);
            sts<int>(addresses + 44, all - first < UNITS ? all - first : UNITS);
            for (int i = 0; i < UNITS; i++) {
                int tile;
                const int unit = divide(first + i < all ? first + i : all - 1, in.bundles.by_tile, &tile);
                sts<int>(addresses + 48 + 4 * i, group * in.bundles.heads + unit);
                sts<int>(addresses + 64 + 4 * i, tile * TILE_P);
                sts<int64_t>(addresses + 80 + 8 * i,
                             (span.b * in.H + head(i)) * chunk_slots(in.sequences, CHECKPOINT) + span.chunk_slot);
            }
            fill();
        }
        bar_sync(barrier, WARPGROUP);
    }
    GT_METHOD void enter(const Problem& in, const Span& span, int64_t item, int barrier) const {
        enter(in, span, item, barrier, [] {});
    }
    GT_METHOD int64_t b() const { return lds<int64_t>(addresses); }
    GT_METHOD int64_t item() const { return lds<int64_t>(addresses + 32); }
    GT_METHOD int64_t token(int chunk) const { return lds<int64_t>(addresses + 8) + (int64_t)chunk * CHUNK; }
    GT_METHOD int64_t left(int chunk) const { return lds<int64_t>(addresses + 16) - token(chunk); }
    GT_METHOD int tokens(int chunk) const { return left(chunk) < CHUNK ? (int)left(chunk) : CHUNK; }
    GT_METHOD int chunks() const { return lds<int>(addresses + 24); }
    GT_METHOD int head(int unit) const { return lds<int>(addresses + 48 + 4 * unit); }
    GT_METHOD int row0(int unit) const { return lds<int>(addresses + 64 + 4 * unit); }
    GT_METHOD int group() const { return lds<int>(addresses + 40); }
    GT_METHOD bool exists(int unit) const { return unit < lds<int>(addresses + 44); }
    /* Offset of the state of a unit's head, in row `row` of a tensor [rows,H,P,N]. */
    GT_METHOD int64_t state(const Problem& in, int unit, int64_t row) const {
        return (row * in.H + head(unit)) * in.P * in.N;
    }
    /* The checkpoint slot of a unit's chunk, counted over all heads and batch elements. */
    GT_METHOD int64_t slot(int unit, int chunk) const {
        return lds<int64_t>(addresses + 80 + 8 * unit) + chunk / SLOT_CHUNKS;
    }
    /* A number for each unit, which takes the place of a second tensor's offset. */
    GT_METHOD float number(int unit) const { return lds<float>(addresses + 144 + 8 * unit); }
    GT_METHOD void put_number(int unit, float x) const { sts<float>(addresses + 144 + 8 * unit, x); }
    /* Offset of a unit's rows at the segment's first token, in one of up to 8 / UNITS tensors. */
    GT_METHOD int64_t offset(int tensor, int unit) const {
        return lds<int64_t>(addresses + 112 + 8 * UNITS * tensor + 8 * unit);
    }
    GT_METHOD void put_offsets(int tensor, const gt_stride& stride) const {
        const int64_t first = token(0);
        for (int i = 0; i < UNITS; i++)
            sts<int64_t>(addresses + 112 + 8 * UNITS * tensor + 8 * i,
                         offset_of(stride, b(), first, head(i)) + row0(i));
    }
};

/* A consumer's addresses.  They are computed again at each use: kept through a chunk, they would take registers from
 * the states.  n: the chunk's number, counted over all segments; i: one of the warpgroup's units. */
template <class Tile>
struct BundleConsumer {
    uint32_t smem;
    GT_METHOD int warpgroup() const { return Tile::CONSUMERS == 1 ? 0 : own_thread() / WARPGROUP; }
    GT_METHOD int unit_warp() const { return own_thread() / 32 % 4; }
    GT_METHOD int unit(int i) const { return warpgroup() * Tile::CONSUMER_UNITS + i; }
    GT_METHOD GroupCursor<Tile::UNITS> cursor() const {
        return {smem + Tile::CURSOR + warpgroup() * GroupCursor<Tile::UNITS>::BYTES};
    }
    GT_METHOD int row0(int i) const { return cursor().row0(unit(i)) + 16 * unit_warp(); }
    GT_METHOD void wait() const { bar_sync(2 + warpgroup(), WARPGROUP); } /* for the warpgroup */
};

/* ---- times ------------------------------------------------------------------------------------------------------- */

/* A producer lane's values of a unit: the head's bias and A, and dt of the tokens 2 lane, 2 lane + 1 of a chunk, as
 * stored.  Loads return after the copies issued before them, so no lane uses dt before the next chunk. */
struct UnitTimes {
    float bias, A;
    uint32_t dt[2];

    GT_METHOD void enter(const Problem& in, int h) {
        bias = in.dt_bias ? in.dt_bias[h] : 0.0f;
        A = in.A[h];
    }
    /* first: the chunk's first element; tokens: the number of tokens. */
    GT_METHOD void load(const Problem& in, int64_t first, int tokens) {
        GT_UNROLL
        for (int i = 0; i < 2; i++) {
            const int t = 2 * own_lane() + i;
            const int64_t at = first + t * in.dt_stride.t;
            dt[i] = 0;
            if (t >= tokens) continue;
            if (in.dt_dtype == GT_F32)
                dt[i] = as_uint(static_cast<const float*>(in.dt)[at]);
            else
                dt[i] = static_cast<const bf16*>(in.dt)[at].bits; /* or of f16 */
        }
    }
    GT_METHOD float delta(const Problem& in, int i, int tokens) const {
        const float x = in.dt_dtype == GT_F32    ? as_float(dt[i])
                        : in.dt_dtype == GT_BF16 ? unpack_bf16_lo(dt[i])
                                                 : unpack_f16_lo(dt[i]);
        return 2 * own_lane() + i < tokens ? delta_of(in.rule, x + bias).value : 0.0f;
    }
};

/* ---- rows in and states out -------------------------------------------------------------------------------------- */

/* A producer thread's part of a copy of 64 rows, PIECES pieces of 16 bytes each: one piece of every STEP-th row. */
template <int PIECES>
struct CopiedRows {
    static constexpr int STEP = WARPGROUP / PIECES, ROW = PIECES < 8 ? 16 * PIECES : 128, PANEL = CHUNK * ROW;
    /* The address k STEP rows further.  The swizzle repeats every 8 rows; with STEP = 4, every second step also flips a
     * bit. */
    GT_HD uint32_t next(uint32_t address, int k) {
        return (STEP == 4 && k % 2 ? address ^ 64 : address) + k * STEP * ROW;
    }
    GT_METHOD int row() const { return own_thread() % WARPGROUP / PIECES; }
    GT_METHOD int piece() const { return own_thread() % PIECES; }
    GT_METHOD int64_t own(int64_t pitch) const { return row() * pitch + 8 * piece(); }
    GT_METHOD uint32_t address() const { return tile_at<ROW>(row(), piece(), PANEL); }
    /* Address in memory of the thread's first row and piece.  first: address of row 0. */
    template <class T>
    GT_METHOD const T* own(const T* first, int64_t pitch) const {
        return first + row() * pitch + 8 * piece();
    }
    /* Starts the copy of a tile whose rows and columns all exist.  to: the thread's address() in the tile; from:
     * own(first). */
    template <class T>
    GT_METHOD void copy_whole(uint32_t to, const T* from, int64_t pitch) const {
        GT_UNROLL
        for (int k = 0; k < CHUNK / STEP; k++) {
            cp_async<16>(next(to, k), from);
            from += STEP * pitch;
        }
    }
    /* Starts the copy to a tile.  from: own(first).  rows, columns (a multiple of 8): the numbers that exist; zeros
     * follow. */
    template <class T>
    GT_METHOD void copy(uint32_t tile, const T* from, int64_t pitch, int rows, int columns) const {
        const uint32_t to = tile + address();
        const int left = 8 * piece() < columns ? rows - row() : 0;
        if (left > CHUNK - STEP) {
            copy_whole(to, from, pitch);
            return;
        }
        const T* const first = from - row() * pitch - 8 * piece();
        GT_UNROLL
        for (int k = 0; k < CHUNK / STEP; k++) {
            const bool exists = k * STEP < left;
            cp_async<16>(next(to, k), exists ? from : first, exists ? 16 : 0);
            from += STEP * pitch;
        }
    }
};

/* Starts the copies of a chunk of one tensor, one tile per unit.  x: the tensor.  own: offset from the segment's first
 * token to the thread's row of the chunk, from of_units.own().  tensor: its number in the cursor. */
template <int UNITS, class T>
GT_DEV void copy_units(const CopiedRows<8>& of_units, const GroupCursor<UNITS>& cursor, int tensor, uint32_t tile,
                       const T* x, int64_t own, int64_t pitch, int tokens, int64_t P) {
    constexpr int TILE = CHUNK * 128;
    if (tokens == CHUNK && P % TILE_P == 0) {
        const uint32_t to = tile + of_units.address();
        GT_UNROLL
        for (int i = 0; i < UNITS; i++) of_units.copy_whole(to + i * TILE, x + (cursor.offset(tensor, i) + own), pitch);
        return;
    }
    GT_NO_UNROLL
    for (int i = 0; i < UNITS; i++)
        of_units.copy(tile + i * TILE, x + (cursor.offset(tensor, i) + own), pitch, tokens, (int)P - cursor.row0(i));
}

/* Stores a warp's rows of a checkpoint, times a power of two.  They pass through the warp's rows of a tile that no
 * other warp uses meanwhile.  to: the first row; pitch: elements from row to row; rows, columns: the numbers that
 * exist. */
template <int NP>
GT_DEV void store_checkpoint_rows(uint32_t tile, int unit_warp, const float (&H)[NP / 8][4], float power, f16* to,
                                  int rows, int pitch, int columns) {
    constexpr int COLUMNS = NP < 64 ? NP : 64, PIECES = COLUMNS / 8, STEP = 32 / PIECES;
    const int lane = own_lane(), row = lane / PIECES, piece = lane % PIECES;
    const uint32_t address = by_rows<64>(tile, own_lane()), from = tile + panel_at<128>(16 * unit_warp + row, piece);
    const auto values_at = [&](int k) { return lds<uint4>((from ^ 16 * (k % 8)) + 128 * k); }; /* row + k */
    const bool whole = pitch == NP && columns == NP && rows >= 16;
    to += row * pitch + 8 * piece;
    GT_UNROLL
    for (int n0 = 0; n0 < NP / 8; n0 += PIECES) {
        store_accumulators<PIECES / 2>(
            H + n0, [&](int k) { return block_at<64>(address, unit_warp, k); },
            [&](float x, float y) { return pack_f16(x * power, y * power); });
        sync_warp();
        if (whole) { /* addresses differ by constants */
            GT_UNROLL
            for (int k = 0; k < 16; k += STEP) stg<uint4>(to + (k * NP + 8 * n0), values_at(k));
        } else {
            const int left = 8 * (n0 + piece) < columns ? rows - row : 0;
            GT_UNROLL
            for (int k = 0; k < 16; k += STEP) {
                const uint4 values = values_at(k);
                if (k < left) stg<uint4>(to + (k * pitch + 8 * n0), values);
            }
        }
        sync_warp();
    }
}

} /* namespace ssd */
} /* namespace gt */

#endif
