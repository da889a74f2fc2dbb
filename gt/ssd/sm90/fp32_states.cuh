/* gt/ssd/sm90/fp32_states.cuh - ssd on compute capability 9.0, by wgmma: passes over a segment that compute only
 * states, for fp32 activations.  They compute the same as states_fp32_kernel (mma/fp32_forward.cuh), forward and
 * reverse.  They take N > 16, which runs as 64 or 128 columns, and groups of at least two units; a unit is 64 rows of a
 * head's state (mma/state.cuh).
 *
 * A block has UNITS units of one group and takes a segment chunk by chunk, 64 tokens each.  In a forward pass, left is
 * x and right is B.  In a reverse pass, left is dy and right is C.  states_fp32_kernel takes reverse passes with z.
 *
 * WARPGROUPS
 *     producer     Warpgroup 2.  It copies left and right of the next chunk by cp.async.  It splits right in place,
 *                  once for all units (SplitRight).  One warp per unit computes the tokens' weights and the chunk's
 *                  decay; dt arrives one chunk ahead (UnitTimes).
 *     consumers    Warpgroups 0 and 1, with half of the units each.  States stay in registers in the layout of
 *                  accumulators, 16 rows per warp.  A lane's rows are adjacent, 2 g and 2 g + 1, so that it reads two
 *                  numbers of left at once.  For each chunk they compute v_t = weight_t left_t, and split it in
 *                  registers as the left operand.  Then H <- E H + sum_t v_t right_t^T, 64 x N x 64, in three products.
 *                  An fp32 addition adds the sum to H.
 *
 * NUMBERS.  As in mma/fp32_chunk.cuh, a number is hi + lo of f16, and a product is three products, the small ones
 * first.  Each row of right has a power of two, whose inverse is multiplied into the weights.  The 16 rows of a warp's
 * v share one power, which follows from their largest number, so left needs no powers.  Weights are at most 1, so that
 * v does not overflow.
 * SHARED MEMORY in KB, N = 128, UNITS = 4: 196 in all, with two stages, so one block per multiprocessor.  The last
 * column names the warpgroups that write the buffer.
 *     LEFT             64     per stage: a tile of each unit, fp32 (fp32_pair_at)   producer
 *     RIGHT            32     per stage: hi and lo                                  producer
 *     PREPARED          1.1   per stage: weights and decays of each unit            producer
 *     INVERSES ...      1     inverse powers of right; cursors, barriers
 * MBARRIERS.  FULL and EMPTY belong to a stage.  The producer's threads arrive at FULL, and the consumers' threads at
 * EMPTY.
 * REGISTERS per thread, N = 128, UNITS = 4: a consumer has 224, of which H takes 128, v 32, and sums 32.  The producer
 * has 56, of which right takes 32.
 * ISSUE SLOTS per token and head, N = 128, UNITS = 4, counted in the machine code: consumers 25, checkpoints 1.5,
 * producer 11.
 * PRODUCTS, clocks of the tensor cores per unit and chunk at full rate, N = 128: 768.
 * BYTES per token and head: left 4 P; right 4 N / heads of a group from memory, and N from L2 with UNITS = 4;
 * checkpoints P N / 32.
 * grid: strands*G*bundles (a bundle has UNITS units); block 384.  Every sum has one fixed order, so results are
 * deterministic. */
#ifndef GT_SSD_SM90_FP32_STATES_CUH
#define GT_SSD_SM90_FP32_STATES_CUH

#include "fp32_forward.cuh"
#include "states.cuh"

namespace gt {
namespace ssd {

/* ---- shared memory ----------------------------------------------------------------------------------------------- */

/* The producer's data for a chunk and unit, as offsets in floats.  OF_TOKENS: weights of tokens.  INVERSE: the
 * inverse of their power.  KEEP: the Scale of the chunk (gt/recurrence/segments.cuh). */
struct SplitUnitWeights {
    static constexpr int OF_TOKENS = 0, INVERSE = 64, KEEP = 66, COUNT = 68;
};

/* Offsets in shared memory, in bytes.  Comments give the shapes of arrays. */
template <int NP_, int UNITS_>
struct StatesSplitHopperTile {
    static constexpr int NP = NP_, UNITS = UNITS_, CONSUMERS = 2, CONSUMER_UNITS = UNITS / CONSUMERS, STAGES = 2;
    static constexpr int THREADS = (CONSUMERS + 1) * WARPGROUP;
    static constexpr int REGISTERS = CONSUMER_UNITS * NP > 128 ? 224 : 200, PRODUCER_REGISTERS = 504 - 2 * REGISTERS;
    static constexpr int PANELS = NP / 64, PANEL = CHUNK * 128, LO = PANELS * PANEL; /* hi of all columns, then lo */
    static constexpr int TILE_LEFT = CHUNK * 256, TILE_RIGHT = 2 * LO;
    static constexpr int LEFT = 0, RIGHT = LEFT + UNITS * TILE_LEFT; /* in a stage; LEFT: [UNITS] */
    static constexpr int STAGE = RIGHT + TILE_RIGHT;
    static constexpr int PREPARED = STAGES * STAGE;                                          /* [STAGES][UNITS] */
    static constexpr int INVERSES = PREPARED + STAGES * UNITS * 4 * SplitUnitWeights::COUNT; /* [STAGES] */
    static constexpr int CURSOR = INVERSES + STAGES * 4 * CHUNK;                             /* one per warpgroup */
    static constexpr int FULL = CURSOR + (CONSUMERS + 1) * GroupCursor<UNITS>::BYTES,
                         EMPTY = FULL + 8 * STAGES; /* [STAGES] */
    static constexpr int BYTES = EMPTY + 8 * STAGES;
    using Stages = Ring<STAGES, FULL, EMPTY>;
    using Number = unsigned;
    static_assert(UNITS % CONSUMERS == 0 && STAGE % 1024 == 0 && FULL % 8 == 0, "aligned");
    static_assert(BYTES <= 227 * 1024, "fits sm_90");
};

/* ---- producer ---------------------------------------------------------------------------------------------------- */

/* How the producer copies a chunk of B or C and splits it in place.  A row has 8 adjacent lanes.  A lane splits 8
 * adjacent numbers of every 64 columns, in rows 16 apart.  copy() puts the first 4 of these 8 numbers where their own
 * hi will lie.  It puts the other 4 where lo of the numbers 32 columns away will lie.  So the copies of 8 lanes lie in
 * different banks. */
template <class Tile>
struct SplitRight {
    static constexpr int ROWS = CHUNK / 16, PIECES = 2 * Tile::PANELS; /* PIECES: pieces of 4 numbers that a lane copies
                                                                        * per row */

    GT_METHOD static int row() { return own_thread() % WARPGROUP / 8; }
    GT_METHOD static int piece() { return own_thread() % 8; }
    GT_METHOD static int64_t own(int64_t pitch) { return row() * pitch + 4 * piece(); }

    /* Starts to copy the chunk to a tile.  from: the chunk's first element plus own().  rows, columns: how many exist;
     * the others become zeros. */
    GT_METHOD static void copy(uint32_t tile, const float* from, int64_t pitch, int rows, int columns) {
        const int second = piece() % 2;
        const uint32_t to = (tile + panel_at<128>(row(), piece() / 2) + second * Tile::LO) ^ 64 * second;
        const int left = rows - row(), right = columns - 4 * piece();
        GT_UNROLL
        for (int k = 0; k < ROWS; k++) {
            GT_UNROLL
            for (int i = 0; i < PIECES; i++)
                cp_async<16>((to ^ 64 * (i % 2)) + 16 * 128 * k + Tile::PANEL * (i / 2), from + 32 * i,
                             16 * k < left && 32 * i < right ? 16 : 0);
            from += 16 * pitch;
        }
    }

    /* Splits the numbers that the warp has copied.  inverses[row] becomes the inverse of the row's power. */
    GT_METHOD static void split(uint32_t tile, uint32_t inverses) {
        const uint32_t at = tile + panel_at<128>(row(), piece()), first = inverses + 4 * row();
        GT_NO_UNROLL
        for (int k = 0; k < ROWS; k++) {
            const uint32_t to = at + 16 * 128 * k;
            float4 x[PIECES];
            GT_UNROLL
            for (int i = 0; i < PIECES; i++)
                x[i] = lds<float4>((i % 2 ? to ^ 64 : to) + Tile::PANEL * (i / 2) + Tile::LO * (i % 2));
            float most = 0.0f;
            GT_UNROLL
            for (const float4& v : x)
                most = fmaxf(most, fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
            GT_UNROLL
            for (int mask = 1; mask < 8; mask *= 2) most = fmaxf(most, shfl_xor(most, mask));
            const Power power = split_power(most);
            sync_warp(); /* all lanes have read the rows */
            GT_UNROLL
            for (int i = 0; i < Tile::PANELS; i++) {
                const float4 v = x[2 * i], w = x[2 * i + 1];
                uint4 hi, lo;
                split_pair(v.x * power.value, v.y * power.value, hi.x, lo.x);
                split_pair(v.z * power.value, v.w * power.value, hi.y, lo.y);
                split_pair(w.x * power.value, w.y * power.value, hi.z, lo.z);
                split_pair(w.z * power.value, w.w * power.value, hi.w, lo.w);
                sts<uint4>(to + Tile::PANEL * i, hi);
                sts<uint4>(to + Tile::PANEL * i + Tile::LO, lo);
            }
            if (piece() == 0) sts<float>(first + 4 * 16 * k, power.inverse);
        }
    }
};

/* One warp fills SplitUnitWeights.  weight: weights of tokens 2 lane and 2 lane + 1.  right: inverse powers of these
 * tokens' rows of right.  sum: log of the chunk's decay.  Weights are computed 2^11 times too large.  The reason: for
 * numbers near 1 an inverse is 2^-13, so its product with the smallest weights would leave the range of fp32. */
GT_DEV void put_split_weights(uint32_t addresses, float2 weight, float2 right, float sum) {
    const int lane = own_lane();
    weight = {clamped(weight.x * (right.x * 0x1p11f)), clamped(weight.y * (right.y * 0x1p11f))};
    float most = fmaxf(fabsf(weight.x), fabsf(weight.y));
    GT_UNROLL
    for (int mask = 1; mask < 32; mask *= 2) most = fmaxf(most, shfl_xor(most, mask));
    const Power power = split_power(most); /* times 2^-14, so that weights are at most 1 */
    sts<float2>(addresses + 8 * lane, {weight.x * power.value * 0x1p-14f, weight.y * power.value * 0x1p-14f});
    if (lane > 0) return;
    const Scale scale = scale_of_log(sum);
    sts<float>(addresses + 4 * SplitUnitWeights::INVERSE, power.inverse * 0x1p3f); /* 2^14 / 2^11 */
    sts<float2>(addresses + 4 * SplitUnitWeights::KEEP, {scale.keep, scale.factor});
}

template <class Tile>
GT_DEV void split_states_producer(const HopperStatesParams& p, uint32_t smem) {
    constexpr int BARRIER = 1, UNITS = Tile::UNITS, STAGES = Tile::STAGES;
    using Right = SplitRight<Tile>;
    const Problem& in = p.states.in;
    const GroupCursor<UNITS> cursor = {smem + Tile::CURSOR + Tile::CONSUMERS * GroupCursor<UNITS>::BYTES};
    const int unit = warp_id() % 4;
    const bool makes_weights = unit < UNITS;
    const typename Tile::Stages ring = {smem};
    int n = 0; /* counts chunks over all segments */
    each_bundle_item(in, [&](const Span& span, int64_t item) {
        const bool is_last = p.reverse ? span.starts : span.ends;
        if (skips(p.states.is_local, span, is_last)) return item;
        cursor.enter(in, span, item, BARRIER, [&] { cursor.put_offsets(0, p.left_stride); });
        const int chunks = cursor.chunks(), step = p.reverse ? -CHUNK : CHUNK;
        const int added = NeededChunks(p.states, p.reverse, is_last, chunks).added();
        const auto chunk_at = [&](int i) { return p.reverse ? chunks - 1 - i : i; };
        /* where the thread's rows of the next chunk to copy begin */
        const int64_t first = (int64_t)chunk_at(0) * CHUNK;
        int64_t left = (own_thread() % WARPGROUP / 16 + first) * p.left_stride.t + 4 * (own_thread() % 16);
        const float* right = static_cast<const float*>(p.right) +
                             offset_of(p.right_stride, cursor.b(), cursor.token(chunk_at(0)), cursor.group()) +
                             Right::own(p.right_stride.t);
        int64_t times =
            makes_weights ? offset_of(in.dt_stride, cursor.b(), cursor.token(chunk_at(0)), cursor.head(unit)) : 0;
        UnitTimes of_unit = {};
        if (makes_weights) of_unit.enter(in, cursor.head(unit));
        const auto load_times = [&](int i) {
            if (makes_weights && i < added) of_unit.load(in, times, cursor.tokens(chunk_at(i)));
            times += step * in.dt_stride.t;
        };
        const auto copy =
            [&](int i, int number) { /* copies chunk i of the segment; number: counted over all segments */
                                     if (i >= added) return;
                                     const uint32_t to = smem + number % STAGES * Tile::STAGE;
                                     const int tokens = cursor.tokens(chunk_at(i));
                                     ring.wait_free(number);
                                     Right::copy(to + Tile::RIGHT, right, p.right_stride.t, tokens, in.columns);
                                     GT_NO_UNROLL
                                     for (int k = 0; k < UNITS; k++)
                                         copy_split_x(to + Tile::LEFT + k * Tile::TILE_LEFT,
                                                      static_cast<const float*>(p.left) + (cursor.offset(0, k) + left),
                                                      p.left_stride.t, tokens, (int)in.P - cursor.row0(k));
                                     cp_async_commit();
                                     left += step * p.left_stride.t, right += step * p.right_stride.t;
            };
        load_times(0);
        copy(0, n);
        TwoTermSum log;
        GT_NO_UNROLL
        for (int i = 0; i < added; i++, n++) {
            const uint32_t inverses = smem + Tile::INVERSES + n % STAGES * 4 * CHUNK;
            float weight[2] = {0.0f, 0.0f}, sum = 0.0f;
            if (makes_weights) {
                const int tokens = cursor.tokens(chunk_at(i));
                const float delta[2] = {of_unit.delta(in, 0, tokens), of_unit.delta(in, 1, tokens)};
                load_times(i + 1);
                sum = warp_sum(weights_of(p.reverse, delta, of_unit.A, weight));
                log.add(sum);
            }
            cp_async_wait<0>();
            sync_warp();
            Right::split(smem + n % STAGES * Tile::STAGE + Tile::RIGHT, inverses);
            bar_sync(BARRIER, WARPGROUP);
            if (makes_weights)
                put_split_weights(smem + Tile::PREPARED + 4 * SplitUnitWeights::COUNT * (n % STAGES * UNITS + unit),
                                  {weight[0], weight[1]}, lds<float2>(inverses + 8 * own_lane()), sum);
            fence_async_proxy();
            ring.fill(n);
            copy(i + 1, n + 1);
        }
        item = cursor.item();
        if (p.states.is_local && makes_weights && cursor.exists(unit) && cursor.row0(unit) == 0 && lane_id() == 0) {
            wait_for_chain();
            const Span same = ordered_span(in, item);
            in.segments.decays[same.segment_slot * in.H + cursor.head(unit)] = log.value();
        }
        return item;
    });
}

/* ---- consumers --------------------------------------------------------------------------------------------------- */

/* SplitState, but a lane has rows 2 g and 2 g + 1 of the warp's 16 rows. */
template <int NP>
struct PairedState : SplitState<NP> {
    using SplitState<NP>::H;

    GT_METHOD void load(const float* from, int row0, const Problem& in) {
        const int row = row0 + 2 * (own_lane() / 4), column = 2 * (own_lane() % 4);
        const bool has_rows = from && row < in.P;
        if (from) from += (int64_t)row * in.N + column;
        GT_UNROLL
        for (int i = 0; i < NP / 4; i++) {
            const int n = i / 2, half = i % 2;
            float2 x = {0.0f, 0.0f};
            if (has_rows && 8 * n + column < in.columns) x = ldg<float2>(from + half * in.N + 8 * n);
            H[n][2 * half] = x.x, H[n][2 * half + 1] = x.y;
        }
    }

    GT_METHOD void store(float* to, int row0, const Problem& in, bool adds = false) const {
        const int row = row0 + 2 * (own_lane() / 4), column = 2 * (own_lane() % 4);
        if (row >= in.P) return;
        to += (int64_t)row * in.N + column;
        float* const second = to + in.N;
        if (in.columns == NP && !adds) { /* the common case, without conditions */
            GT_UNROLL
            for (int n = 0; n < NP / 8; n++) {
                stg<float2>(to + 8 * n, {H[n][0], H[n][1]});
                stg<float2>(second + 8 * n, {H[n][2], H[n][3]});
            }
            return;
        }
        GT_UNROLL
        for (int i = 0; i < NP / 4; i++) {
            const int n = i / 2, half = i % 2;
            if (8 * n + column >= in.columns) continue;
            float* const at = (half ? second : to) + 8 * n;
            float2 x = {H[n][2 * half], H[n][2 * half + 1]};
            if (adds) {
                const float2 before = ldg<float2>(at);
                x = {before.x + x.x, before.y + x.y};
            }
            stg<float2>(at, x);
        }
    }
};

template <class Tile>
struct SplitStatesConsumer : StatesConsumer<Tile> {
    /* The lane's address in a unit's tile of left: token 2 j, row 16 unit_warp + 2 g.  The swizzle
     * repeats every 8 tokens, so the lane's other tokens lie at constant offsets. */
    GT_METHOD uint32_t left(int n, int i) const {
        return StatesConsumer<Tile>::left(n, i) +
               fp32_pair_at(2 * (own_lane() % 4), 16 * this->unit_warp() + 2 * (own_lane() / 4));
    }
};
static_assert(SplitUnitWeights::COUNT == UnitWeights::COUNT, "StatesConsumer finds them");

/* Advances the state of unit i of a consumer by one chunk. */
template <class Tile>
GT_DEV void add_split_chunk(const SplitStatesConsumer<Tile>& me, int n, int i, PairedState<Tile::NP>& state) {
    constexpr int NP = Tile::NP, PANEL = Tile::PANEL;
    const uint32_t prepared = me.prepared(n, i);
    uint32_t hi[BLOCKS][4], lo[BLOCKS][4];
    float undo;
    {
        const uint32_t left = me.left(n, i), tokens = prepared + 8 * (own_lane() % 4);
        float v[BLOCKS][4][2], most[4] = {}; /* v[..][e]: tokens 2 j and 2 j + 1, plus 8 (e / 2); row 2 g + e % 2 */
        GT_UNROLL
        for (int k = 0; k < 2 * BLOCKS; k++) {
            const float2 weight = lds<float2>(tokens + 32 * k);
            const float2 x = lds<float2>(left + 256 * 8 * k), y = lds<float2>(left + 256 * (8 * k + 1));
            float(&a)[2] = v[k / 2][k % 2 * 2], (&b)[2] = v[k / 2][k % 2 * 2 + 1];
            a[0] = x.x * weight.x, a[1] = y.x * weight.y;
            b[0] = x.y * weight.x, b[1] = y.y * weight.y;
            most[0] = fmaxf(most[0], fabsf(a[0])), most[1] = fmaxf(most[1], fabsf(a[1]));
            most[2] = fmaxf(most[2], fabsf(b[0])), most[3] = fmaxf(most[3], fabsf(b[1]));
        }
        float largest = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
        GT_UNROLL
        for (int mask = 1; mask < 32; mask *= 2) largest = fmaxf(largest, shfl_xor(largest, mask));
        const Power power = split_power(largest);
        undo = clamped(lds<float>(prepared + 4 * SplitUnitWeights::INVERSE) * power.inverse);
        GT_UNROLL
        for (int e = 0; e < 4 * BLOCKS; e++) {
            const float(&pair)[2] = v[e / 4][e % 4];
            split_pair(pair[0] * power.value, pair[1] * power.value, hi[e / 4][e % 4], lo[e / 4][e % 4]);
        }
    }
    const uint64_t right = wgmma_tile<128, Major::MN>(me.right(n), PANEL);
    float sums[8][4];
    GT_UNROLL
    for (int n0 = 0; n0 < NP / 8; n0 += 8) {
        wgmma_fence();
        multiply_left<Major::MN>(sums, hi, lo, operand_step(right, mn_bytes<128, Major::MN>(8 * n0, PANEL)), PANEL,
                                 Tile::LO, false);
        wgmma_commit();
        if (n0 == 0) { /* overlaps with the products */
            const float2 scale = lds<float2>(prepared + 4 * SplitUnitWeights::KEEP);
            state.decay({scale.x, scale.y});
        }
        wgmma_wait<0>();
        wgmma_pin(sums);
        GT_UNROLL
        for (int k = 0; k < 32; k++) {
            float& to = state.H[n0 + k / 4][k % 4];
            to = fma_rn(sums[k / 4][k % 4], undo, to);
        }
    }
}

template <class Tile>
GT_DEV void split_states_consumer(const HopperStatesParams& params, uint32_t smem) {
    constexpr int NP = Tile::NP, CONSUMER_UNITS = Tile::CONSUMER_UNITS;
    const StatesParams& p = params.states;
    const Problem& in = p.in;
    const bool reverse = params.reverse;
    const SplitStatesConsumer<Tile> me = {smem};
    const typename Tile::Stages ring = {smem};
    if (p.state_sum) {
        PairedState<NP> zeros;
        zeros.load(nullptr, 0, in);
        clear_state_sums<Tile>(p, me, zeros);
    }
    int n = 0; /* counts chunks over all segments */
    each_bundle_item(in, [&](const Span& span, int64_t item) {
        PairedState<NP> state[CONSUMER_UNITS];
        const bool is_last = reverse ? span.starts : span.ends;
        if (skips(p.is_local, span, is_last)) return item;
        me.cursor().enter(in, span, item, 2 + me.warpgroup());
        const float* start = nullptr;
        if (!p.is_local) start = first_state(in, span, p.state_in, p.state_in_shared ? 0 : span.sequence);
        GT_UNROLL
        for (int i = 0; i < CONSUMER_UNITS; i++)
            state[i].load(start ? start + me.cursor().state(in, me.unit(i), 0) : nullptr, me.row0(i), in);
        const int chunks = me.cursor().chunks();
        const NeededChunks needed(p, reverse, is_last, chunks);
        GT_NO_UNROLL
        for (int number = 0; number < needed.count; number++) {
            const int chunk = reverse ? chunks - 1 - number : number;
            const bool at_slot =
                reverse ? number == 0 || chunk % SLOT_CHUNKS == SLOT_CHUNKS - 1 : chunk % SLOT_CHUNKS == 0;
            if (p.checkpoints.plain && at_slot) {
                GT_UNROLL
                for (int i = 0; i < CONSUMER_UNITS; i++)
                    if (me.cursor().exists(me.unit(i)))
                        state[i].store(p.checkpoints.plain + me.cursor().slot(me.unit(i), chunk) * in.P * in.N,
                                       me.row0(i), in);
            }
            if (number == needed.added()) break;
            ring.wait_full(n);
            GT_UNROLL
            for (int i = 0; i < CONSUMER_UNITS; i++) add_split_chunk<Tile>(me, n, i, state[i]);
            ring.free(n);
            n++;
        }
        item = me.cursor().item();
        const Span same = ordered_span(in, item); /* computed again, because no registers are left to keep it */
        GT_UNROLL
        for (int i = 0; i < CONSUMER_UNITS; i++) {
            if (me.cursor().exists(me.unit(i))) store_last_state<Tile>(p, me, i, reverse, same, state[i]);
        }
        return item;
    });
}

/* For other architectures the kernel has no code and launch bounds of one warp.  Device::runs_sm90a finds out which
 * code the device runs. */
template <int NP, int UNITS>
GT_KERNEL(GT_SM90A ? (StatesSplitHopperTile<NP, UNITS>::THREADS) : 32, 1)
states_fp32_hopper_kernel(const GT_GRID_CONSTANT HopperStatesParams p) {
#if GT_SM90A
    using Tile = StatesSplitHopperTile<NP, UNITS>;
    const uint32_t smem = smem_base_of_tiles();
    typename Tile::Stages{smem}.init(thread_id(), WARPGROUP, Tile::CONSUMERS * WARPGROUP);
    sync_threads();
    run_chained_roles<Tile>([&] { return p.states.in.order != nullptr; }, [] { return false; },
                            [&] { split_states_producer<Tile>(p, smem); },
                            [&] { split_states_consumer<Tile>(p, smem); });
#else
    (void)p;
    __trap();
#endif
}

} /* namespace ssd */
} /* namespace gt */

#endif
