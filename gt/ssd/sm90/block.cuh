/* gt/ssd/sm90/block.cuh - code that forward and the passes over states share on compute capability 9.0.  The units of a
 * block (64 rows of a head's state each) belong to one group and are called its bundle.  The producer warpgroup copies
 * rows ahead of their use.  Consumer warpgroups keep states in the layout of accumulators (mma/state.cuh). */
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

/* Parameters of the kernel in forward.cuh.  y_map: tensor map of y with boxes of 64 tokens by 64 rows of a head, if
has_y_map.  checkpoint_map: tensor map of the checkpoints, if there are any, with boxes of 16 rows by 64 columns. */
struct HopperForwardParams : TensorParams {
    TensorMap y_map, checkpoint_map;
    int has_y_map;
};

/* own_lane() and own_thread() are here() and thread_here() with known ranges, so that the compiler turns divisions into
 * shifts.  here() and thread_here() omit these hints, because the hints would change register allocation in other
 * kernels. */
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

/* wgmma_step() in one register.  The descriptor's address has 14 bits and a step stays within them.  So the addition
 * never carries into the high register. */
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

/* Calls pass(span, item) for each segment of this block's strand. */
template <class Pass>
GT_DEV void each_bundle_item(const Problem& in, const Pass& pass) {
    each_item(
        in, bundle_strand(in), [&] { return in.bundles.strands; }, pass);
}

/* A cursor is the position of a warpgroup: its segment, and the UNITS units of its block.  It lies in shared memory.
 * If units are missing, the last unit takes their places, and its repeated results are not stored.  So the code has no
 * branches for missing units. */
template <int UNITS>
struct GroupCursor {
    static constexpr int BYTES = 176;
    static_assert(UNITS <= 4, "fits");
    uint32_t addresses;

    /* All threads of the warpgroup call this function.  barrier: number of the warpgroup's named barrier.  One thread
     * calls fill(), which may call put_offsets() and put_number(). */
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
    /* The offset of a unit's head in row `row` of a tensor [rows,H,P,N]. */
    GT_METHOD int64_t state(const Problem& in, int unit, int64_t row) const {
        return (row * in.H + head(unit)) * in.P * in.N;
    }
    /* The checkpoint slot of a unit's chunk, counted over all heads and batch elements. */
    GT_METHOD int64_t slot(int unit, int chunk) const {
        return lds<int64_t>(addresses + 80 + 8 * unit) + chunk / SLOT_CHUNKS;
    }
    /* One float for each unit, for any use.  It shares memory with the offsets of a second tensor. */
    GT_METHOD float number(int unit) const { return lds<float>(addresses + 144 + 8 * unit); }
    GT_METHOD void put_number(int unit, float x) const { sts<float>(addresses + 144 + 8 * unit, x); }
    /* The offset of a unit's rows at the segment's first token.  tensor: index of one of up to 8 / UNITS tensors. */
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

/* A consumer's addresses.  Each use computes them again, because the states need the registers.  n: the chunk's number,
 * counted over all segments of the block.  i: index of a unit in the warpgroup. */
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
    GT_METHOD void wait() const { bar_sync(2 + warpgroup(), WARPGROUP); } /* barrier of the warpgroup */
};

/* ---- times ------------------------------------------------------------------------------------------------------- */

/* A producer lane's values of a unit: the head's bias and A, and the bits of dt for tokens 2 lane and 2 lane + 1 of a
 * chunk.  dt is loaded one chunk ahead, because a load returns only after the copies that were issued before it. */
struct UnitTimes {
    float bias, A;
    uint32_t dt[2];

    GT_METHOD void enter(const Problem& in, int h) {
        bias = in.dt_bias ? in.dt_bias[h] : 0.0f;
        A = in.A[h];
    }
    /* first: index of the chunk's first dt.  tokens: number of tokens in the chunk. */
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
                dt[i] = static_cast<const bf16*>(in.dt)[at].bits; /* f16 has as many bits */
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

/* The part of one producer thread in a copy of 64 rows.  A row has PIECES pieces of 16 bytes, and the thread copies one
 * piece of every STEP-th row. */
template <int PIECES>
struct CopiedRows {
    static constexpr int STEP = WARPGROUP / PIECES, ROW = PIECES < 8 ? 16 * PIECES : 128, PANEL = CHUNK * ROW;
    /* The address in shared memory k * STEP rows further.  The swizzle repeats every 8 rows, so with STEP = 4 every
     * second step also flips a bit. */
    GT_HD uint32_t next(uint32_t address, int k) {
        return (STEP == 4 && k % 2 ? address ^ 64 : address) + k * STEP * ROW;
    }
    GT_METHOD int row() const { return own_thread() % WARPGROUP / PIECES; }
    GT_METHOD int piece() const { return own_thread() % PIECES; }
    GT_METHOD int64_t own(int64_t pitch) const { return row() * pitch + 8 * piece(); }
    GT_METHOD uint32_t address() const { return tile_at<ROW>(row(), piece(), PANEL); }
    /* The global address of the thread's first piece.  first: address of row 0. */
    template <class T>
    GT_METHOD const T* own(const T* first, int64_t pitch) const {
        return first + row() * pitch + 8 * piece();
    }
    /* Starts to copy a tile without missing rows or columns.  to: tile + address().  from: own(first). */
    template <class T>
    GT_METHOD void copy_whole(uint32_t to, const T* from, int64_t pitch) const {
        GT_UNROLL
        for (int k = 0; k < CHUNK / STEP; k++) {
            cp_async<16>(next(to, k), from);
            from += STEP * pitch;
        }
    }
    /* Starts to copy a tile.  from: own(first).  rows, columns: how many exist; the others become zeros.  columns is a
     * multiple of 8. */
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

/* Starts to copy a chunk of a tensor x, one tile for each unit.  own: of_units.own(), plus the offset of the chunk in
 * the segment.  tensor: the index of x in the cursor's offsets. */
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

/* Stores a warp's 16 rows of a checkpoint, times a power of two.  The rows pass through the warp's own rows of a tile
 * in shared memory.  to: the first row in global memory.  pitch: elements from row to row.  rows, columns: how many
 * exist. */
template <int NP>
GT_DEV void store_checkpoint_rows(uint32_t tile, int unit_warp, const float (&H)[NP / 8][4], float power, f16* to,
                                  int rows, int pitch, int columns) {
    constexpr int COLUMNS = NP < 64 ? NP : 64, PIECES = COLUMNS / 8, STEP = 32 / PIECES;
    const int lane = own_lane(), row = lane / PIECES, piece = lane % PIECES;
    const uint32_t address = by_rows<64>(tile, own_lane()), from = tile + panel_at<128>(16 * unit_warp + row, piece);
    const auto values_at = [&](int k) { return lds<uint4>((from ^ 16 * (k % 8)) + 128 * k); }; /* a piece of row + k */
    const bool whole = pitch == NP && columns == NP && rows >= 16;
    to += row * pitch + 8 * piece;
    GT_UNROLL
    for (int n0 = 0; n0 < NP / 8; n0 += PIECES) {
        store_accumulators<PIECES / 2>(
            H + n0, [&](int k) { return block_at<64>(address, unit_warp, k); },
            [&](float x, float y) { return pack_f16(x * power, y * power); });
        sync_warp();
        if (whole) { /* the addresses differ by constants, which takes fewer instructions */
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
