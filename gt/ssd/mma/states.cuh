/* gt/ssd/mma/states.cuh - ssd on tensor cores: passes over a segment that compute only states, for 16-bit activations.
 *
 *     forward   H <- E H + sum_t Delta_t suf_t x_t B_t^T.  The local pass (gt/recurrence/segments.cuh) computes a
 *               segment's end state from zeros.  In backward, the pass makes checkpoints if forward stored none.
 *     REVERSE   G <- E G + sum_t pre_t dy_t C_t^T, from the last chunk to the first.  The pass is the local pass of
 *               backward, or makes checkpoints of G and dstate_in.  A checkpoint of G is the gradient of the state
 *               after a slot's last token.  With z, dy silu(z) replaces dy.  The kernel computes this product together
 *               with v.  The power of two of v follows from bounds of dy and silu(z).
 *
 * grid, block and units: as in forward_tensor_kernel.  In each chunk, warps first convert both tiles to f16 and compute
 * the decay factors.  Then they compute the weights and update the states.
 * REGISTERS per thread, N = 128: H or G 64, v 16, sums 16.
 * SHARED MEMORY, N = 128: x or dy 2 x 16 KB, B or C 2 x 16 KB, z 16 KB, checkpoints 8 KB, factors 10 KB.  In all 98.6
 * KB, so two blocks share a multiprocessor.  On devices where only one block fits, the block may use all registers.
 * BYTES per token and head: x or dy (and z) 2 P each; B or C 2 N per head from L2; checkpoints P N / 64.
 * Every sum has one fixed order, so results are deterministic. */
#ifndef GT_SSD_MMA_STATES_CUH
#define GT_SSD_MMA_STATES_CUH

#include "state.cuh"

namespace gt {
namespace ssd {

template <class T_, int NP_>
struct StatesTile {
    using T = T_;
    static constexpr int NP = NP_, TILE_LEFT = TileShape<64>::BYTES, TILE_RIGHT = TileShape<NP>::BYTES;
    static constexpr int LEFT = 0;                                           /* x or dy: [2 stages][MMA_UNITS] */
    static constexpr int RIGHT = LEFT + 2 * MMA_UNITS * TILE_LEFT;           /* B or C: [2 stages] */
    static constexpr int STAGING = RIGHT + 2 * TILE_RIGHT;                   /* [WARPS] */
    static constexpr int GATE = STAGING + WARPS * WarpState<NP>::STAGING;    /* z: [MMA_UNITS] */
    static constexpr int FACTORS = GATE + MMA_UNITS * TILE_LEFT;             /* [MMA_UNITS] */
    static constexpr int WEIGHTS = FACTORS + MMA_UNITS * 4 * Factors::COUNT; /* [WARPS] */
    static constexpr int INVERSE = WEIGHTS + WARPS * 4 * Weights::COUNT;
    static constexpr int LEFT_INVERSE = INVERSE + 4 * CHUNK;                /* [MMA_UNITS] */
    static constexpr int NEXT_DELTA = LEFT_INVERSE + MMA_UNITS * 4 * CHUNK; /* [MMA_UNITS]: Delta of the next chunk */
    static constexpr int CURSOR = NEXT_DELTA + MMA_UNITS * 4 * CHUNK;
    static constexpr int STREAMS = CURSOR + Cursor::BYTES;
    static constexpr int LEFT_STREAM = 0, RIGHT_STREAM = MMA_UNITS, GATE_STREAM = RIGHT_STREAM + 1;
    static constexpr int BYTES = STREAMS + Streams::BYTES;
    static constexpr int MIN_BLOCKS = blocks_at_once(BYTES);
    static constexpr int AT_ONCE = NP == 128 ? 2 : 1; /* row blocks that a warp converts to f16 together */
    static_assert(STAGING % 128 == 0 && GATE % 128 == 0, "tiles begin at multiples of 128");
    static_assert(BYTES <= 99 * 1024, "fits every device with tensor cores for bf16");
};

/* Runs one segment, chunk by chunk.  Returns `item` from shared memory, so that no register keeps it during the
 * pass. */
template <class Tile, bool REVERSE>
GT_DEV int64_t pass_over_states(const StatesParams& p, int64_t item) {
    using T = typename Tile::T;
    constexpr int NP = Tile::NP;
    const Problem& in = p.in;
    const uint32_t smem = smem_base();
    const Cursor cursor = {smem + Tile::CURSOR};
    const Streams streams = {smem + Tile::STREAMS};
    const int warp = uniform_warp(), unit = warp / UNIT_WARPS, unit_warp = warp % UNIT_WARPS;
    const uint32_t addresses = smem + Tile::FACTORS + 4 * Factors::COUNT * unit;
    const void *left = REVERSE ? in.dy : in.x, *right = REVERSE ? in.Cm : in.Bm;
    const gt_stride &left_stride = REVERSE ? in.dy_stride : in.x_stride,
                    &right_stride = REVERSE ? in.Cm_stride : in.Bm_stride;
    const bool gated = REVERSE && in.z;
    TwoTermSum log;
    WarpState<NP> state;
    {
        const Span span = span_at(in.sequences, in.segments.count, CHECKPOINT, item);
        if (skips(p.is_local, span, REVERSE ? span.starts : span.ends)) return item;
        cursor.enter(in, span, item);
        const float* start = nullptr;
        if (!p.is_local) start = first_state(in, span, p.state_in, p.state_in_shared ? 0 : span.sequence);
        const bool reads = start && unit < cursor.units();
        state.load(reads ? start + unit_state(in, cursor, unit, 0) : nullptr, cursor.row0(unit) + 16 * unit_warp, in);
    }
    const int chunks = cursor.chunks();
    /* Streams of left and right start at the second chunk, and streams of z at the first.  All streams advance
     * together, after the copies of left and right and before the copy of z. */
    if (thread_id() == 0) {
        const int first = REVERSE ? chunks - 1 : 0, second = REVERSE ? chunks - 2 : 1;
        for (int k = 0; k < MMA_UNITS; k++) {
            const int h = cursor.head(k), row0 = cursor.row0(k);
            streams.begin<T>(Tile::LEFT_STREAM + k, left,
                             offset_of(left_stride, cursor.b(), cursor.token(second), h) + row0);
            streams.begin<T>(Tile::GATE_STREAM + k, in.z,
                             offset_of(in.z_stride, cursor.b(), cursor.token(first), h) + row0);
        }
        streams.begin<T>(Tile::RIGHT_STREAM, right,
                         offset_of(right_stride, cursor.b(), cursor.token(second), cursor.group()));
        streams.set_whole(whole_chunks<NP>(in, cursor));
    }
    const auto load = [&](int i) {
        const int chunk = REVERSE ? chunks - 1 - i : i;
        const uint32_t lefts = smem + Tile::LEFT + i % 2 * MMA_UNITS * Tile::TILE_LEFT,
                       rights = smem + Tile::RIGHT + i % 2 * Tile::TILE_RIGHT;
        if (i > 0 && i < chunks && chunk < streams.whole()) {
            load_whole_units<T>(streams, Tile::LEFT_STREAM, left_stride.t, lefts, cursor.units());
            load_whole_tile<NP, THREADS>(rights, streams.at<T>(Tile::RIGHT_STREAM), right_stride.t);
        } else if (i < chunks) {
            load_units<T>(in, left, left_stride, lefts, cursor, chunk);
            load_group<T, NP>(in, right, right_stride, rights, cursor, chunk);
        }
        cp_async_commit();
    };
    const auto load_gate = [&](int i) {
        const int chunk = chunks - 1 - i;
        if (gated && i > 0 && i < chunks && chunk < streams.whole())
            load_whole_units<T>(streams, Tile::GATE_STREAM, in.z_stride.t, smem + Tile::GATE, cursor.units());
        else if (gated && i < chunks)
            load_units<T>(in, in.z, in.z_stride, smem + Tile::GATE, cursor, chunk);
        cp_async_commit();
    };
    load(0);
    load_gate(0);
    const uint32_t next_delta = smem + Tile::NEXT_DELTA + 4 * CHUNK * unit;
    const auto chunk_of = [&](int i) { return REVERSE ? chunks - 1 - i : i; };
    const auto make_deltas = [&](int i, const uint32_t(&bits)[2]) {
        float delta[2];
        deltas_of(in, cursor, unit, chunk_of(i), bits, delta);
        sts<float2>(next_delta + 8 * here(), {delta[0], delta[1]});
    };
    /* bits: dt in the warp that makes Delta.  This is warp 0 for the first chunk, and later warp 3, which has less
     * work. */
    uint32_t bits[2] = {0, 0};
    if (unit < cursor.units() && unit_warp == 0 && chunks > 0) {
        load_dt(in, cursor, unit, chunk_of(0), bits);
        make_deltas(0, bits);
    }
    if (unit < cursor.units() && unit_warp == 3 && chunks > 1) load_dt(in, cursor, unit, chunk_of(1), bits);
    GT_NO_UNROLL
    for (int i = 0; i < chunks; i++) {
        const int chunk = chunk_of(i);
        const uint32_t x = smem + Tile::LEFT + (i % 2 * MMA_UNITS + unit) * Tile::TILE_LEFT;
        const uint32_t b = smem + Tile::RIGHT + i % 2 * Tile::TILE_RIGHT,
                       z = smem + Tile::GATE + unit * Tile::TILE_LEFT;
        const bool active = unit < cursor.units();
        float delta[2] = {0.0f, 0.0f}, A = 0.0f;
        if (active && unit_warp == 0) {
            const float2 kept = lds<float2>(next_delta + 8 * here());
            delta[0] = kept.x, delta[1] = kept.y;
            A = in.A[cursor.head(unit)];
        }
        const bool at_slot = REVERSE ? i == 0 || chunk % SLOT_CHUNKS == SLOT_CHUNKS - 1 : chunk % SLOT_CHUNKS == 0;
        if (active && p.checkpoints.values && at_slot) {
            state.keep(p.checkpoints, unit_slot(in, cursor, unit, chunk),
                       smem + Tile::STAGING + warp * WarpState<NP>::STAGING, cursor.row0(unit) + 16 * unit_warp, in);
        }
        cp_async_wait<0>();
        sync_threads();
        load(i + 1); /* copies to the stage that the previous chunk has freed */
        if (active && unit_warp == 3 && i + 1 < chunks) {
            make_deltas(i + 1, bits);
            if (i + 2 < chunks) load_dt(in, cursor, unit, chunk_of(i + 2), bits);
        }
        const uint32_t inverses = smem + Tile::LEFT_INVERSE + 4 * CHUNK * unit;
        if (unit_warp >= 2) {
            rows_to_f16<T, NP, Tile::AT_ONCE>(b, smem + Tile::INVERSE, 2 * unit + unit_warp - 2, 2 * MMA_UNITS);
        } else if (active) {
            if (unit_warp == 0) {
                make_factors<SUM_FACTORS | CHUNK_FACTORS>(addresses, delta, A);
            } else {
                rows_to_f16<T, 64, 2>(x, inverses, 0, 1);
            }
        }
        sync_threads();
        if (warp == 1 && lane_id() == 0) {
            constexpr int STEP = REVERSE ? -CHUNK : CHUNK;
            GT_UNROLL
            for (int k = 0; k < MMA_UNITS; k++) {
                streams.move<T>(Tile::LEFT_STREAM + k, STEP * left_stride.t);
                if (gated) streams.move<T>(Tile::GATE_STREAM + k, STEP * in.z_stride.t);
            }
            streams.move<T>(Tile::RIGHT_STREAM, STEP * right_stride.t);
        }
        /* Without z, each warp computes the weights itself, which is faster than waiting for another warp.  With z, one
         * warp computes them, because the bounds of rows of z take longer. */
        const uint32_t weights = smem + Tile::WEIGHTS + 4 * Weights::COUNT * (gated ? UNIT_WARPS * unit : warp);
        if (active && (!gated || unit_warp == 3)) {
            const float2 weight = update_weight(addresses, inverses, smem + Tile::INVERSE, REVERSE);
            float2 most = update_bounds(weight);
            if (gated) {
                const int t = 2 * here();
                most = {finite(most.x * gate_bound(largest_in_row<T>(z, t))),
                        finite(most.y * gate_bound(largest_in_row<T>(z, t + 1)))};
            }
            make_weights(weights, weight, most);
        }
        if (gated)
            sync_threads();
        else
            sync_warp();
        if (active) {
            state.template update<T>(x, gated ? z : 0, unit_warp, b, weights, chunk_decay(addresses));
            if (p.is_local) log.add(lds<float>(addresses + 4 * Factors::LOG));
        }
        if (gated) {
            sync_threads();
            load_gate(i + 1);
        }
    }
    const Span same = span_at(in.sequences, in.segments.count, CHECKPOINT, cursor.item()); /* computed again, which
                                                                                            * needs no registers during
                                                                                            * the pass */
    const int row0 = cursor.row0(unit) + 16 * unit_warp;
    if (unit < cursor.units() && p.is_local) {
        state.store(in.segments.states + unit_state(in, cursor, unit, same.segment_slot), row0, in);
        if (row0 == 0 && lane_id() == 0) in.segments.decays[same.segment_slot * in.H + cursor.head(unit)] = log.value();
    } else if (unit < cursor.units() && (REVERSE ? same.starts : same.ends)) {
        float* const end = last_state(in, p.state_out, same.sequence);
        if (end) state.store(end + unit_state(in, cursor, unit, 0), row0, in);
        if (p.state_sum) state.store(p.state_sum + unit_state(in, cursor, unit, unit_strand(in)), row0, in, true);
    }
    return cursor.item();
}

/* Clears the strand's row of state_sum, because a strand may have no sequence. */
template <class Tile>
GT_DEV void clear_sum(const StatesParams& p) {
    const Cursor cursor = {smem_base() + Tile::CURSOR};
    cursor.enter(p.in, Span{}, 0);
    const int unit = warp_id() / UNIT_WARPS, row0 = cursor.row0(unit) + warp_id() % UNIT_WARPS * 16;
    if (unit >= cursor.units()) return;
    WarpState<Tile::NP> zeros;
    zeros.load(nullptr, row0, p.in);
    zeros.store(p.state_sum + unit_state(p.in, cursor, unit, unit_strand(p.in)), row0, p.in);
}

template <class T, int NP, bool REVERSE>
GT_KERNEL(THREADS, (StatesTile<T, NP>::MIN_BLOCKS))
states_tensor_kernel(const GT_GRID_CONSTANT StatesParams p) {
#if GT_SM80_KERNELS
    wait_for_chain();
    if (p.state_sum) clear_sum<StatesTile<T, NP>>(p);
    for (int64_t item = unit_strand(p.in); item < items_of(p.in); item += unit_strands(p.in))
        item = pass_over_states<StatesTile<T, NP>, REVERSE>(p, item);
#else
    (void)p;
    __trap();
#endif
}

} /* namespace ssd */
} /* namespace gt */

#endif
