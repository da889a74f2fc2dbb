/* gt/ssd/sm90/forward_maps.cuh - ssd forward on compute capability 9.0 if many heads share B and C
 * (has_sizes_of_maps()).  Another kernel first converts B and C to f16, once for all blocks, so that the producer
 * converts neither.  The results equal those of forward_hopper_kernel bit for bit.  conv_ssd's kernel
 * (gt/fused/conv_ssd_sm90.cuh) uses the same producer, and convolves x between producer and consumers.
 *
 * group_rows_kernel     A block takes a chunk of B or C of a group, 64 tokens.  It stores the tile as f16 with a power
 *                       of two per row, in the layout of shared memory.
 * forward_maps_kernel   This is forward_hopper_kernel with another producer, which has one warp per unit.  A warp
 *                       computes the unit's decay factors, and the largest magnitudes of the rows of x, by which the
 *                       consumers convert x to f16.  It loads x and z by TMA; the first warp also loads B and C.  The
 *                       producer's warps do not wait for each other.
 * MBARRIERS.  X_FULL is new: it completes when x of a unit has arrived in a stage.  FULL also counts the bytes of B and
 * C, and GATE_FULL counts the bytes of z.  The other mbarriers are as in forward.cuh.
 *
 * REGISTERS per thread, N = 128, four units: consumers 232, producer 40.
 * BYTES per token and head: x, y (and z) 2 P each; B and C from L2 as in forward.cuh.  group_rows_kernel reads 4 N and
 * writes 4 N per token and group.
 * grid of group_rows_kernel: a block of 256 threads for each chunk slot, group, and B or C.  grid of
 * forward_maps_kernel: as forward_hopper_kernel. */
#ifndef GT_SSD_SM90_FORWARD_MAPS_CUH
#define GT_SSD_SM90_FORWARD_MAPS_CUH

#include "forward.cuh"

namespace gt {
namespace ssd {

struct MapsForwardParams : HopperForwardParams {
    TensorMap x_map, z_map; /* maps with boxes of 64 tokens by 64 rows of a head */
};

/* The index, in GroupTiles, of a segment's first chunk.  slot: the segment's first chunk slot in batch element b. */
GT_HD int64_t chunk_row(const Problem& in, int64_t b, int64_t slot) {
    return (b * chunk_slots(in.sequences, CHECKPOINT) + slot) * 2;
}

/* ---- B and C ----------------------------------------------------------------------------------------------------- */

constexpr int GROUP_ROWS_WARPS = 8;

/* Shared memory of a block that converts a tile of B or C. */
template <class T, int NP>
struct GroupTile : HopperTile<T, NP, 2, UNGATED, MAPPED_ROWS> {
    static constexpr int INVERSES = CHUNK * 2 * NP, BYTES = INVERSES + 4 * CHUNK, THREADS = 32 * GROUP_ROWS_WARPS;
};

/* The tile that a block converts.  which: 0 for B, 1 for C.  row: index of the chunk in GroupTiles.  tokens: at most 0
 * if the chunk does not exist. */
struct GroupChunk {
    int which, g, row, b, tokens;
    int64_t first, sequence;

    GT_METHOD explicit GroupChunk(const Problem& in) {
        which = block_x() % 2, g = block_x() / 2 % (int)in.G, row = block_x() / 2 / (int)in.G;
        const int slots = (int)chunk_slots(in.sequences, CHECKPOINT);
        const gt_chunk chunk = chunk_at(in.sequences, CHECKPOINT, row / 2 % slots);
        b = row / 2 / slots, sequence = chunk.sequence;
        first = chunk.first + row % 2 * CHUNK;
        tokens = chunk.last - first < CHUNK ? (int)(chunk.last - first) : CHUNK;
    }
    GT_METHOD bool exists() const { return sequence >= 0 && tokens > 0; }
};

/* Converts the tile in shared memory from T to f16 and stores it to p.groups.  All threads of the block call this
 * function, after a barrier. */
template <class Tile>
GT_DEV void store_group(const MapsForwardParams& p, uint32_t smem, const GroupChunk& me) {
    constexpr int NP = Tile::NP, BLOCKS_OF_ROWS = CHUNK / RowLanes<NP>::ROWS;
    for (int i = warp_id(); i < BLOCKS_OF_ROWS; i += GROUP_ROWS_WARPS)
        blocks_to_f16<Tile, 1>(smem, smem + Tile::INVERSES, i, 0);
    sync_threads();
    const int64_t place = ((int64_t)me.row * p.in.G + me.g) * 2 + me.which;
    f16* const to = p.groups.values + place * (CHUNK * NP);
    for (int i = thread_id(); i < CHUNK * NP / 8; i += Tile::THREADS) stg<uint4>(to + 8 * i, lds<uint4>(smem + 16 * i));
    if (thread_id() < CHUNK)
        p.groups.inverses[place * CHUNK + thread_id()] = lds<float>(smem + Tile::INVERSES + 4 * thread_id());
}

template <class T, int NP>
GT_KERNEL(32 * GROUP_ROWS_WARPS, 4)
group_rows_kernel(const GT_GRID_CONSTANT MapsForwardParams p) {
    using Tile = GroupTile<T, NP>;
    constexpr int PIECES = NP / 8, COUNT = CHUNK * PIECES / Tile::THREADS;
    const uint32_t smem = smem_base_of_tiles();
    const Problem& in = p.in;
    const GroupChunk me(in);
    if (me.exists()) {
        const gt_stride& stride = me.which ? in.Cm_stride : in.Bm_stride;
        const uint16_t* const from =
            static_cast<const uint16_t*>(me.which ? in.Cm : in.Bm) + offset_of(stride, me.b, me.first, me.g);
        const auto number = [](int i) { return i * Tile::THREADS + thread_id(); };
        uint4 pieces[COUNT];
        GT_UNROLL
        for (int i = 0; i < COUNT; i++) {
            const int t = number(i) / PIECES, column = 8 * (number(i) % PIECES);
            pieces[i] = {0, 0, 0, 0};
            if (t < me.tokens && column < in.N) pieces[i] = ldg<uint4>(from + t * stride.t + column);
        }
        GT_UNROLL
        for (int i = 0; i < COUNT; i++)
            sts<uint4>(smem + group_address<Tile>(number(i) / PIECES, number(i) % PIECES), pieces[i]);
    }
    wait_for_chain(); /* a previous kernel may still read this workspace */
    if (!me.exists()) return;
    sync_threads();
    store_group<Tile>(p, smem, me);
}

/* ---- producer ---------------------------------------------------------------------------------------------------- */

/* One warp starts the load of a unit's rows of x or z for a chunk.  full: the mbarrier that counts the bytes. */
template <class Tile>
GT_DEV void load_rows(const Problem& in, const GroupCursor<Tile::UNITS>& cursor, int unit, const TensorMap& map,
                      int chunk, uint32_t tile, uint32_t full) {
    mbarrier_arrive_expect_warp(full, Tile::TILE_X);
    tile_load(tile, map, cursor.head(unit) * in.P + cursor.row0(unit), (int)cursor.token(chunk), (int)cursor.b(), full);
}

/* Waits until the stage of x is free, then calls load_rows().  number: the chunk's number, counted over all segments of
 * the block. */
template <class Tile>
GT_DEV void load_x(const MapsForwardParams& p, uint32_t smem, const GroupCursor<Tile::UNITS>& cursor, int unit,
                   int chunk, int number) {
    if (chunk >= cursor.chunks()) return;
    const unsigned n = number, stage = n % Tile::X_STAGES;
    typename Tile::Rows{smem}.wait_free(n);
    load_rows<Tile>(p.in, cursor, unit, p.x_map, chunk, smem + Tile::X + (stage * Tile::UNITS + unit) * Tile::TILE_X,
                    typename Tile::LoadedRows{smem, unit}.full(n));
}

/* The producer: each warp with a unit prepares all chunks of the unit.  Warps without a unit only take part in
 * cursor.enter(). */
template <class Tile>
GT_DEV void maps_producer(const MapsForwardParams& p, uint32_t smem) {
    constexpr int BARRIER = 1, UNITS = Tile::UNITS;
    const Problem& in = p.in;
    const GroupCursor<UNITS> cursor = {smem + Tile::CURSOR + Tile::CONSUMERS * GroupCursor<UNITS>::BYTES};
    const int unit = shfl_idx(warp_id(), 0) % 4;
    const bool works = unit < UNITS, has_gate = Tile::HAS_GATE && in.z;
    const typename Tile::Chunks ring = {smem};
    int n = 0; /* counts chunks over all segments */
    each_bundle_item(in, [&](const Span& span, int64_t item) {
        if (!span.exists) return item;
        cursor.enter(in, span, item, BARRIER);
        const int64_t row = chunk_row(in, span.b, span.chunk_slot);
        if (!works) return item;
        const int chunks = cursor.chunks();
        UnitTimes of_unit = {};
        of_unit.enter(in, cursor.head(unit));
        const auto load_times = [&](int chunk) {
            if (chunk < chunks)
                of_unit.load(in, offset_of(in.dt_stride, cursor.b(), cursor.token(chunk), cursor.head(unit)),
                             cursor.tokens(chunk));
        };
        /* Loads z of a chunk.  The consumers already work on this chunk, while the producer prepares the next one. */
        const auto load_gate = [&](int chunk) {
            if (has_gate && chunk >= 0)
                load_rows<Tile>(in, cursor, unit, p.z_map, chunk, smem + Tile::GATE + unit * Tile::TILE_X,
                                typename Tile::Gate{smem}.full(0));
        };
        load_times(0);
        if constexpr (Tile::X_AHEAD) load_x<Tile>(p, smem, cursor, unit, 0, n);
        GT_NO_UNROLL
        for (int chunk = 0; chunk < chunks; chunk++, n++) {
            const int stage = n % 2, tokens = cursor.tokens(chunk);
            const uint32_t addresses = smem + Tile::FACTORS + 4 * Merged::COUNT * (stage * UNITS + unit);
            const uint32_t prepared = smem + Tile::PREPARED + 4 * Prepared::COUNT * (stage * UNITS + unit);
            const uint32_t full = ring.full(n);
            ring.wait_free(n);
            if constexpr (!Tile::X_AHEAD && !Tile::CONVOLVES) load_x<Tile>(p, smem, cursor, unit, chunk, n);
            const int64_t place = ((row + chunk) * in.G + cursor.group()) * 2;
            if (unit == 0) {
                const f16* const from = p.groups.values + place * (Tile::TILE_B / 2);
                bulk_load(smem + Tile::B + stage * Tile::TILE_B, from, Tile::TILE_B, full);
                bulk_load(smem + Tile::C + stage * Tile::TILE_B, from + Tile::TILE_B / 2, Tile::TILE_B, full);
            }
            load_gate(chunk - 1);
            const float* const inverses = p.groups.inverses + place * CHUNK + 2 * own_lane();
            const float2 b = ldg<float2>(inverses), c = ldg<float2>(inverses + CHUNK);
            const float delta[2] = {of_unit.delta(in, 0, tokens), of_unit.delta(in, 1, tokens)};
            load_times(chunk + 1);
            make_factors(addresses, delta, of_unit.A);
            if constexpr (Tile::X_AHEAD) load_x<Tile>(p, smem, cursor, unit, chunk + 1, n + 1);
            if constexpr (Tile::CONVOLVES) {
                typename Tile::ConvolvedChunks{smem}.wait_full(n);
            } else {
                const unsigned number = (unsigned)n, at = number % Tile::X_STAGES * UNITS + unit;
                typename Tile::LoadedRows{smem, unit}.wait_full(number);
                row_maxima<typename Tile::T, 4>(smem + Tile::X + at * Tile::TILE_X, prepared + 4 * Prepared::X_POWERS,
                                                0, CHUNK);
            }
            sync_warp();
            finish_factors<Tile::NP>(addresses, prepared, b, c);
            if (unit == 0) /* the first warp announces the bytes of B and C only here; some of them may already have
                            * arrived */
                mbarrier_arrive_expect(full, 2 * Tile::TILE_B);
            else
                mbarrier_arrive(full);
        }
        if (has_gate && chunks > 0) {
            ring.wait_free(n);
            load_gate(chunks - 1);
        }
        return cursor.item();
    });
}

/* Initializes the rings.  Warps with a unit fill them, and consumers free them. */
template <class Tile>
GT_DEV void init_maps_rings(uint32_t smem) {
    constexpr int FILLERS = 32 * Tile::UNITS, USERS = Tile::CONSUMERS * WARPGROUP;
    typename Tile::Chunks{smem}.init(thread_id(), FILLERS, USERS);
    if constexpr (Tile::CONVOLVES) typename Tile::ConvolvedChunks{smem}.init(thread_id(), FILLERS);
    typename Tile::Gate{smem}.init(thread_id(), FILLERS);
    typename Tile::Rows{smem}.init(thread_id(), 0, USERS);
    typename Tile::LoadedRows{smem}.init(thread_id(), 32);
}

/* For other architectures the kernel has no code and launch bounds of one warp.  Device::runs_sm90a finds out which
 * code the device runs. */
template <class T, int NP, int UNITS, int GATE>
GT_KERNEL(GT_SM90A ? (HopperTile<T, NP, UNITS, GATE, MAPPED_ROWS>::THREADS) : 32, 1)
forward_maps_kernel(const GT_GRID_CONSTANT MapsForwardParams p) {
#if GT_SM90A
    using Tile = HopperTile<T, NP, UNITS, GATE, MAPPED_ROWS>;
    const uint32_t smem = smem_base_of_tiles();
    init_maps_rings<Tile>(smem);
    fence_async_proxy();
    sync_threads();
    wait_for_chain();
    run_roles<Tile>(
        shfl_idx(warp_id(), 0) / 4, [&] { maps_producer<Tile>(p, smem); }, [&] { forward_consumer<Tile>(p, smem); });
#else
    (void)p;
    __trap();
#endif
}

} /* namespace ssd */
} /* namespace gt */

#endif
