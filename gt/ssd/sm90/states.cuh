/* gt/ssd/sm90/states.cuh - ssd on compute capability 9.0, by wgmma: passes over a segment that compute only states, for
 * 16-bit activations.  They compute the same as states_tensor_kernel (mma/states.cuh), forward and reverse.
 *
 * A unit is 64 rows of a head's state (mma/state.cuh).  A block has UNITS units of one group.  It takes a segment chunk
 * by chunk, 64 tokens each.  In a forward pass, left is x and right is B.  In a reverse pass, left is dy and right is
 * C.  With z, left in reverse is dy silu(z), which gate.cuh has stored as f16 with a power of two for 16 rows.
 *
 * WARPGROUPS
 *     producer     The last warpgroup.  It copies left and right of later chunks by cp.async.  One warp per unit
 *                  computes the tokens' weights and the chunk's decay.  With z, the weights include the inverse powers
 *                  of left.  dt and these inverses arrive in registers one chunk ahead (UnitTimes), so the warps wait
 *                  only for copies.  The producer waits for the previous kernel in two cases: the call ranks its
 *                  sequences (Problem::order), or that kernel computes left.  A lane also waits before it writes a
 *                  segment's decay.  Consumers wait unless they read only the caller's tensors (is_apart()).
 *     consumers    Two warpgroups with half of the units each, or one warpgroup with one unit.  States stay in
 *                  registers in the layout of accumulators, 16 rows per warp.  For each chunk they load left transposed
 *                  and compute v_t = weight_t left_t, the left operand, in registers.  Then H <- E H + sum_t v_t
 *                  right_t^T, 64 x N x 64.
 *
 * NUMBERS.  right is an operand in shared memory and is not converted.  With bf16, v is a sum of two bf16 numbers, hi +
 * lo.  This takes two products, and gives 16 bits over the whole range of fp32.  With f16, v is one f16 number, with a
 * power of two per warp.  The power follows from the largest sum of magnitudes in a row.  Tensor cores round sums
 * towards zero, so the sum of 64 tokens starts at zero, and an fp32 addition adds it to the state.
 *     The states are fp32.  Each unit has one power of two, 1 or more, by which the weights are divided.  So weights
 *     are at most 1, and v does not overflow if Delta is large.  The power changes if a chunk's largest weight exceeds
 *     the power, or is 2^8 times smaller than it.  The change is exact.  Checkpoints get their power from the maximum
 *     of 16 rows.
 *
 * SHARED MEMORY in KB, N = 128, UNITS = 4: 212.8 in all, with four stages, so one block per multiprocessor.
 * StatesHopperTile has every offset.  The last column names the warpgroups that write the buffer.
 *
 *     LEFT             32     per stage: a tile of each unit                       producer
 *     RIGHT            16     per stage                                            producer
 *     PREPARED          1.1   per stage: weights and decays of each unit           producer
 *     STAGING          16     checkpoints pass through it                          consumers
 *     CURSOR, FULL ...  0.6   cursors of warpgroups; barriers
 *     A group of one unit (a head with P <= 64) has a block with one consumer.  Two such blocks share a multiprocessor,
 *     with 105 KB each.  N <= 64 runs as 64 columns, in 73 KB.
 * MBARRIERS.  FULL and EMPTY belong to a stage.  The producer's threads arrive at FULL, and the consumers' threads at
 * EMPTY.
 * REGISTERS per thread, N = 128, UNITS = 4: a consumer has 224, of which H takes 128, v 32 (16 with f16), and sums 32.
 * The producer has 56.
 *     UNITS = 1: the consumer has 184 and the producer 72; with N <= 64, 152 and 104.  UNITS > 1, N <= 64, without z:
 *     168 and 48, so that a block of chunk_factors_kernel fits on the same multiprocessor.
 *
 * ISSUE SLOTS per token and head, counted in the machine code, bf16, N = 128, UNITS = 4: 18 for v, products and the
 * update, at most 13 for checkpoints, and 8 for the producer.  states_tensor_kernel takes 88.
 * PRODUCTS, clocks of the tensor cores per unit and chunk at full rate, N = 128: bf16 512, f16 256.
 * BYTES per token and head: left 2 P.  right takes 2 N / heads of a group from memory, and N / 2 from L2 with UNITS =
 * 4.  Checkpoints P N / 64.
 * grid: strands*G*bundles (a bundle has UNITS units); block 384, with one unit 256.  Every sum has one fixed order, so
 * results are deterministic. */
#ifndef GT_SSD_SM90_STATES_CUH
#define GT_SSD_SM90_STATES_CUH

#include "../mma/state.cuh"
#include "block.cuh"

namespace gt {
namespace ssd {

struct HopperStatesParams {
    StatesParams states;
    const void *left, *right;
    gt_stride left_stride, right_stride;
    int reverse; /* not 0: the pass goes from the last chunk to the first */
};

/* ---- shared memory ----------------------------------------------------------------------------------------------- */

/* The producer's data for a chunk and unit, as offsets in floats.  OF_TOKENS: weights of tokens.  DECAY: E.
 * CHANGE: the state is multiplied by it before the update, because the power changes; 0 if E is 0.  BEFORE: the unit's
 * power before the chunk.  POWER: its power from the chunk on.  The stored state times the power is the true state. */
struct UnitWeights {
    static constexpr int OF_TOKENS = 0, DECAY = 64, CHANGE = 65, BEFORE = 66, POWER = 67, COUNT = 68;
};

/* Offsets in shared memory, in bytes.  Comments give the shapes of arrays.  L: the type of left. */
template <class T_, int NP_, int UNITS_, class L_>
struct StatesHopperTile {
    using T = T_;
    using L = L_;
    static constexpr bool IS_BF16 = std::is_same<T, bf16>::value;
    static constexpr int NP = NP_, UNITS = UNITS_, CONSUMERS = UNITS == 1 ? 1 : 2, CONSUMER_UNITS = UNITS / CONSUMERS;
    /* FIT: blocks per multiprocessor. */
    static constexpr int THREADS = (CONSUMERS + 1) * WARPGROUP, FIT = UNITS == 1 ? 2 : 1;
    /* Whether the kernel leaves registers for a block of chunk_factors_kernel on the same multiprocessor.  With z this
     * would cost more than it gains. */
    static constexpr bool LEAVES_ROOM = UNITS > 1 && NP <= 64 && std::is_same<T, L>::value;
    static constexpr int REGISTERS = UNITS == 1                  ? (NP > 64 ? 184 : 152)
                                     : LEAVES_ROOM               ? 168
                                     : CONSUMER_UNITS * NP > 128 ? 224
                                                                 : 200,
                         PRODUCER_REGISTERS = UNITS == 1    ? 256 - REGISTERS
                                              : LEAVES_ROOM ? 48
                                                            : 504 - 2 * REGISTERS;
    /* The launch bound.  It determines how many registers per thread a block gets at its launch. */
    static constexpr int MOST_THREADS = LEAVES_ROOM ? 512 : THREADS;
    static constexpr int ROW = NP < 64 ? 2 * NP : 128, PANEL = CHUNK * ROW; /* bytes of a row and a panel of right: see
                                                                             * wgmma.cuh */
    static constexpr int TILE_LEFT = CHUNK * 128, TILE_RIGHT = CHUNK * 2 * NP;
    static constexpr int STAGES = 4;
    static constexpr int LEFT = 0, RIGHT = LEFT + UNITS * TILE_LEFT; /* in a stage; LEFT: [UNITS] */
    static constexpr int STAGE = RIGHT + TILE_RIGHT;
    static constexpr int STAGING = STAGES * STAGE;                   /* [CONSUMERS], 64 rows of 64 columns */
    static constexpr int PREPARED = STAGING + CONSUMERS * TILE_LEFT; /* [STAGES][UNITS] */
    static constexpr int CURSOR = PREPARED + STAGES * UNITS * 4 * UnitWeights::COUNT; /* one per warpgroup */
    static constexpr int FULL = CURSOR + (CONSUMERS + 1) * GroupCursor<UNITS>::BYTES,
                         EMPTY = FULL + 8 * STAGES; /* [STAGES] */
    static constexpr int BYTES = EMPTY + 8 * STAGES;
    using Stages = Ring<STAGES, FULL, EMPTY>;
    using Number = int; /* the type of chunk numbers; with another type ptxas takes more registers */
    static_assert(STAGE % 1024 == 0 && FULL % 8 == 0, "aligned");
    static_assert(FIT * (BYTES + 1024) <= 228 * 1024, "fits sm_90");
};

/* The chunks of a segment that a pass must run.  If the caller wants the state after the sequence, these are all
 * chunks.  If not, the last segment in the pass's direction stops at its last checkpoint.  The producer still prepares
 * the chunk after this checkpoint, because the checkpoint needs UnitWeights::BEFORE. */
struct NeededChunks {
    int count;  /* the number of chunks, from the first on */
    bool whole; /* false: the last chunk is not added to the state */

    GT_METHOD NeededChunks(const StatesParams& p, bool reverse, bool is_last, int chunks) {
        whole = !is_last || p.is_local || p.state_out || p.state_sum || chunks == 0;
        count = whole ? chunks : reverse ? (chunks > 1 ? chunks - 1 : 1) : (chunks - 1) / SLOT_CHUNKS * SLOT_CHUNKS + 1;
    }
    GT_METHOD int added() const { return whole ? count : count - 1; }
};

/* ---- producer ---------------------------------------------------------------------------------------------------- */

/* One warp computes the weights of tokens 2 lane and 2 lane + 1: Delta suf, or pre in reverse.  delta: Delta of these
 * tokens.  Returns the lane's part of the log of the chunk's decay. */
GT_DEV float weights_of(bool reverse, const float (&delta)[2], float A, float (&weight)[2]) {
    const int lane = own_lane();
    const float a0 = delta[0] * A, a1 = delta[1] * A, l0 = a0 * LOG2_E, l1 = a1 * LOG2_E;
    float all = l0 + l1;
    if (reverse) { /* weights are sums through each token */
        GT_UNROLL
        for (int d = 1; d < 32; d *= 2) {
            const float other = shfl_up(all, d);
            all += lane >= d ? other : 0.0f;
        }
        const float before = shfl_up(all, 1), first = (lane > 0 ? before : 0.0f) + l0;
        weight[0] = exp2_finite(first), weight[1] = exp2_finite(first + l1);
    } else { /* weights are sums over later tokens */
        GT_UNROLL
        for (int d = 1; d < 32; d *= 2) {
            const float other = shfl_down(all, d);
            all += lane + d < 32 ? other : 0.0f;
        }
        float after = shfl_down(all, 1);
        after = lane < 31 ? after : 0.0f;
        weight[0] = delta[0] * exp2_finite(after + l1), weight[1] = delta[1] * exp2_finite(after);
    }
    return a0 + a1;
}

/* One warp fills UnitWeights.  delta: Delta of tokens 2 lane and 2 lane + 1.  left: the inverse power of these tokens'
 * rows of left.  power: the unit's power, which may change.  Returns the log of the chunk's decay. */
GT_DEV float weigh_chunk(uint32_t addresses, bool reverse, const float (&delta)[2], float left, float A, float& power) {
    const int lane = own_lane();
    float weight[2], sum = weights_of(reverse, delta, A, weight);
    weight[0] *= left, weight[1] *= left;
    GT_UNROLL
    for (int i = 0; i < 2; i++)
        weight[i] = weight[i] > 0x1p125f ? 0x1p125f : weight[i] < -0x1p125f ? -0x1p125f : weight[i];
    float most = fmaxf(fabsf(weight[0]), fabsf(weight[1]));
    GT_UNROLL
    for (int mask = 1; mask < 32; mask *= 2) {
        most = fmaxf(most, shfl_xor(most, mask));
        sum += shfl_xor(sum, mask);
    }
    const float needed = most > 1.0f ? as_float(((as_uint(most) >> 23) + 1) << 23) : 1.0f;
    const float old = power;
    float change = 1.0f;
    if (needed > power || needed * 0x1p8f < power) change = old * inverse_of(needed), power = needed;
    const float inverse = inverse_of(power);
    sts<float2>(addresses + 8 * lane, {weight[0] * inverse, weight[1] * inverse});
    const Scale scale = scale_of_log(sum);
    const float E = scale.keep + scale.factor;
    if (lane == 0) {
        sts<float2>(addresses + 4 * UnitWeights::DECAY, {E, E == 0.0f ? 0.0f : change});
        sts<float2>(addresses + 4 * UnitWeights::BEFORE, {old, power});
    }
    return sum;
}

template <class Tile>
GT_DEV void states_producer(const HopperStatesParams& p, uint32_t smem) {
    using T = typename Tile::T;
    constexpr int BARRIER = 1, UNITS = Tile::UNITS, STAGES = Tile::STAGES, AHEAD = STAGES - 1;
    const Problem& in = p.states.in;
    const GroupCursor<UNITS> cursor = {smem + Tile::CURSOR + Tile::CONSUMERS * GroupCursor<UNITS>::BYTES};
    const CopiedRows<8> of_units;
    const CopiedRows<Tile::NP / 8> of_group;
    const int unit = warp_id() % 4;
    constexpr bool MAY_HAVE_POWERS = std::is_same<typename Tile::L, f16>::value;
    const bool makes_weights = unit < UNITS, has_powers = MAY_HAVE_POWERS && p.reverse && in.dy_inverses;
    const typename Tile::Stages ring = {smem};
    int n = 0; /* counts chunks over all segments */
    each_bundle_item(in, [&](const Span& span, int64_t item) {
        const bool is_last = p.reverse ? span.starts : span.ends;
        if (skips(p.states.is_local, span, is_last)) return item;
        cursor.enter(in, span, item, BARRIER, [&] { cursor.put_offsets(0, p.left_stride); });
        const int chunks = cursor.chunks(), step = p.reverse ? -CHUNK : CHUNK;
        const NeededChunks needed(p.states, p.reverse, is_last, chunks);
        const auto chunk_at = [&](int i) { return p.reverse ? chunks - 1 - i : i; };
        /* where the thread's rows of the next chunk to copy begin */
        const int64_t b = cursor.b(), token = cursor.token(chunk_at(0));
        const int64_t first = (int64_t)chunk_at(0) * CHUNK;
        int64_t left = of_units.own(p.left_stride.t) + first * p.left_stride.t;
        const T* right = of_group.own(
            static_cast<const T*>(p.right) + offset_of(p.right_stride, b, token, cursor.group()), p.right_stride.t);
        int64_t times = makes_weights ? offset_of(in.dt_stride, b, token, cursor.head(unit)) : 0;
        UnitTimes of_unit = {};
        float inverse = 1.0f; /* inverse power of left for the 16 rows that contain the lane's tokens */
        const auto load_times = [&](int i) {
            if (makes_weights && i < needed.count) {
                const int chunk = chunk_at(i);
                of_unit.load(in, times, cursor.tokens(chunk));
                if (has_powers)
                    inverse =
                        in.dy_inverses[inverses_index(in, cursor.slot(unit, chunk), chunk, cursor.row0(unit) / TILE_P) +
                                       2 * own_lane() / BLOCK];
            }
            times += step * in.dt_stride.t;
        };
        /* Copies chunk i of the segment.  number: the chunk's number, counted over all segments of the block. */
        const auto copy = [&](int i, int number) {
            if (i < needed.count) {
                ring.wait_free(number);
                const uint32_t to = smem + number % STAGES * Tile::STAGE;
                const int tokens = needed.whole || i + 1 < needed.count ? cursor.tokens(chunk_at(i)) : 0;
                if (tokens > 0) {
                    copy_units(of_units, cursor, 0, to + Tile::LEFT, static_cast<const T*>(p.left), left,
                               p.left_stride.t, tokens, in.P);
                    of_group.copy(to + Tile::RIGHT, right, p.right_stride.t, tokens, in.columns);
                }
                left += step * p.left_stride.t, right += step * p.right_stride.t;
            }
            cp_async_commit();
        };
        load_times(0);
        if (makes_weights) of_unit.enter(in, cursor.head(unit));
        GT_NO_UNROLL
        for (int i = 0; i < AHEAD; i++) copy(i, n + i);
        TwoTermSum log;
        float power = 1.0f;
        GT_NO_UNROLL
        for (int i = 0; i < needed.count; i++, n++) {
            if (makes_weights) {
                const int tokens = cursor.tokens(chunk_at(i));
                const float delta[2] = {of_unit.delta(in, 0, tokens), of_unit.delta(in, 1, tokens)};
                const float by = inverse;
                load_times(i + 1);
                const uint32_t addresses = smem + Tile::PREPARED + 4 * UnitWeights::COUNT * (n % STAGES * UNITS + unit);
                log.add(weigh_chunk(addresses, p.reverse, delta, by, of_unit.A, power));
            }
            cp_async_wait<AHEAD - 1>();
            fence_async_proxy();
            ring.fill(n);
            copy(i + AHEAD, n + AHEAD);
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

template <class Tile>
struct StatesConsumer : BundleConsumer<Tile> {
    using Base = BundleConsumer<Tile>;
    using Base::smem, Base::unit, Base::warpgroup;
    GT_METHOD uint32_t stage(int n) const {
        return smem + (typename Tile::Number)made_here(n) % Tile::STAGES * Tile::STAGE;
    }
    GT_METHOD uint32_t left(int n, int i) const { return stage(n) + Tile::LEFT + unit(i) * Tile::TILE_LEFT; }
    GT_METHOD uint32_t right(int n) const { return stage(n) + Tile::RIGHT; }
    GT_METHOD uint32_t staging() const { return smem + Tile::STAGING + warpgroup() * Tile::TILE_LEFT; }
    GT_METHOD uint32_t prepared(int n, int i) const {
        return smem + Tile::PREPARED +
               4 * UnitWeights::COUNT * ((typename Tile::Number)made_here(n) % Tile::STAGES * Tile::UNITS + unit(i));
    }
};

/* Clears the strand's row of state_sum, because a strand may have no sequence. */
template <class Tile, class State>
GT_DEV void clear_state_sums(const StatesParams& p, const StatesConsumer<Tile>& me, const State& zeros) {
    me.cursor().enter(p.in, Span{}, 0, 2 + me.warpgroup());
    GT_UNROLL
    for (int i = 0; i < Tile::CONSUMER_UNITS; i++)
        if (me.cursor().exists(me.unit(i)))
            zeros.store(p.state_sum + me.cursor().state(p.in, me.unit(i), bundle_strand(p.in)), me.row0(i), p.in);
}

/* For unit i of a consumer, stores the state at the end of the pass through a segment. */
template <class Tile, class State>
GT_DEV void store_last_state(const StatesParams& p, const StatesConsumer<Tile>& me, int i, bool reverse,
                             const Span& segment, const State& state) {
    const Problem& in = p.in;
    const GroupCursor<Tile::UNITS> cursor = me.cursor();
    const int unit = me.unit(i);
    if (p.is_local) {
        state.store(in.segments.states + cursor.state(in, unit, segment.segment_slot), me.row0(i), in);
    } else if (reverse ? segment.starts : segment.ends) {
        float* const end = last_state(in, p.state_out, segment.sequence);
        if (end) state.store(end + cursor.state(in, unit, 0), me.row0(i), in);
        if (p.state_sum) state.store(p.state_sum + cursor.state(in, unit, bundle_strand(in)), me.row0(i), in, true);
    }
}

/* Computes v of the 16 tokens of block k and the warp's 16 rows.  v[2 e] and v[2 e + 1] are pair e of a left
 * operand. */
template <class Tile>
GT_DEV void weigh_left(const StatesConsumer<Tile>& me, int n, int i, int k, float (&v)[8]) {
    using E = Element<typename Tile::L>;
    const uint32_t tokens = me.prepared(n, i) + 4 * UnitWeights::OF_TOKENS + 8 * (own_lane() % 4) + 64 * k;
    const float2 low = lds<float2>(tokens), high = lds<float2>(tokens + 32);
    uint32_t x[4];
    ldmatrix_x4_trans(x, block_at<64>(by_columns<64>(me.left(n, i), own_lane()), k, me.unit_warp()));
    GT_UNROLL
    for (int e = 0; e < 4; e++) { /* e / 2: 8 tokens later; e % 2: 8 rows later */
        v[2 * e] = E::lo(x[e]) * (e < 2 ? low.x : high.x);
        v[2 * e + 1] = E::hi(x[e]) * (e < 2 ? low.y : high.y);
    }
}

/* Advances the state of unit i of a consumer by one chunk. */
template <class Tile>
GT_DEV void add_chunk(const StatesConsumer<Tile>& me, int n, int i, float (&H)[Tile::NP / 8][4]) {
    using T = typename Tile::T;
    constexpr int NP = Tile::NP, ROW = Tile::ROW, PANEL = Tile::PANEL;
    constexpr int WIDTH = Tile::CONSUMER_UNITS * NP > 128 ? 8 : NP / 8; /* tiles of 8 columns in a product */
    const float2 decay = lds<float2>(me.prepared(n, i) + 4 * UnitWeights::DECAY);
    if (decay.y != 1.0f) { /* a factor of 0 clears the state, because 0 times infinity would be NaN */
        GT_UNROLL
        for (int k = 0; k < NP / 2; k++) H[k / 4][k % 4] = decay.y == 0.0f ? 0.0f : H[k / 4][k % 4] * decay.y;
    }
    const uint64_t right = wgmma_tile<ROW, Major::MN>(me.right(n), PANEL);
    const auto from = [&](int k, int n0) {
        return operand_step(right, k_bytes<ROW, Major::MN>(16 * k, PANEL) + mn_bytes<ROW, Major::MN>(8 * n0, PANEL));
    };
    float added[WIDTH][4], scale = 1.0f;
    uint32_t v[BLOCKS][4];
    [[maybe_unused]] uint32_t rest[BLOCKS][4];
    if constexpr (Tile::IS_BF16) { /* each product starts as soon as its operand is ready */
        GT_UNROLL
        for (int k = 0; k < BLOCKS; k++) {
            float weighed[8];
            weigh_left<Tile>(me, n, i, k, weighed);
            GT_UNROLL
            for (int e = 0; e < 4; e++) {
                const float first = weighed[2 * e], second = weighed[2 * e + 1];
                v[k][e] = pack_bf16(first, second);
                rest[k][e] = pack_bf16(first - unpack_bf16_lo(v[k][e]), second - unpack_bf16_hi(v[k][e]));
            }
            wgmma_fence();
            wgmma<T, Major::MN>(added, v[k], from(k, 0), k > 0);
            wgmma<T, Major::MN>(added, rest[k], from(k, 0));
        }
    } else {
        float weighed[BLOCKS][8], sums[2] = {0.0f, 0.0f}; /* sums of the lane's rows + 0 and + 8 */
        GT_UNROLL
        for (int k = 0; k < BLOCKS; k++) {
            weigh_left<Tile>(me, n, i, k, weighed[k]);
            GT_UNROLL
            for (int e = 0; e < 8; e++) sums[e / 2 % 2] += fabsf(weighed[k][e]);
        }
        GT_UNROLL
        for (int mask = 1; mask < 4; mask *= 2)
            for (int e = 0; e < 2; e++) sums[e] += shfl_xor(sums[e], mask);
        float most = fmaxf(sums[0], sums[1]);
        GT_UNROLL
        for (int mask = 4; mask < 32; mask *= 2) most = fmaxf(most, shfl_xor(most, mask));
        const Power power = power_of(most);
        scale = power.inverse;
        GT_UNROLL
        for (int k = 0; k < BLOCKS * 4; k++) {
            const float* pair = weighed[k / 4] + k % 4 * 2;
            v[k / 4][k % 4] = pack_f16(pair[0] * power.value, pair[1] * power.value);
        }
        wgmma_fence();
        GT_UNROLL
        for (int k = 0; k < BLOCKS; k++) wgmma<T, Major::MN>(added, v[k], from(k, 0), k > 0);
    }
    GT_UNROLL
    for (int n0 = 0; n0 < NP / 8; n0 += WIDTH) {
        if (n0 > 0) {
            wgmma_fence();
            GT_UNROLL
            for (int k = 0; k < BLOCKS; k++) {
                wgmma<T, Major::MN>(added, v[k], from(k, n0), k > 0);
                if constexpr (Tile::IS_BF16) wgmma<T, Major::MN>(added, rest[k], from(k, n0));
            }
        }
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_pin(added);
        GT_UNROLL
        for (int k = 0; k < WIDTH * 4; k++) {
            float& to = H[n0 + k / 4][k % 4];
            to = Tile::IS_BF16 ? fma_rn(to, decay.x, added[k / 4][k % 4])
                               : fma_rn(added[k / 4][k % 4], scale, to * decay.x);
        }
    }
}

/* For unit i of a consumer, stores the state before a chunk as a checkpoint. */
template <class Tile>
GT_DEV void keep_unit(const StatesParams& p, const StatesConsumer<Tile>& me, int chunk, int n, int i,
                      WarpState<Tile::NP>& state) {
    const Problem& in = p.in;
    const GroupCursor<Tile::UNITS> cursor = me.cursor();
    const int unit = me.unit(i), row0 = me.row0(i);
    if (!cursor.exists(unit)) return;
    const int64_t slot = cursor.slot(unit, chunk);
    state.power = {1.0f, 1.0f};
    state.measure();
    const Power power = power_of(state.bound);
    if (lane_id() == 0 && row0 < in.P)
        p.checkpoints.powers[slot * slot_powers(in.P, in.N) + power_index(in.N, row0)] =
            power.inverse * lds<float>(me.prepared(n, i) + 4 * UnitWeights::BEFORE);
    store_checkpoint_rows<Tile::NP>(me.staging(), me.unit_warp(), state.H, power.value,
                                    p.checkpoints.values + (slot * in.P + row0) * in.N, in.P - row0, in.N, in.columns);
}

template <class Tile>
GT_DEV void states_consumer(const HopperStatesParams& params, uint32_t smem) {
    constexpr int NP = Tile::NP, CONSUMER_UNITS = Tile::CONSUMER_UNITS;
    const StatesParams& p = params.states;
    const Problem& in = p.in;
    const bool reverse = params.reverse;
    const StatesConsumer<Tile> me = {smem};
    const typename Tile::Stages ring = {smem};
    if (p.state_sum) {
        WarpState<NP> zeros;
        zeros.clear();
        clear_state_sums<Tile>(p, me, zeros);
    }
    int n = 0; /* counts chunks over all segments */
    each_bundle_item(in, [&](const Span& span, int64_t item) {
        WarpState<NP> state[CONSUMER_UNITS];
        const bool is_last = reverse ? span.starts : span.ends;
        if (skips(p.is_local, span, is_last)) return item;
        me.cursor().enter(in, span, item, 2 + me.warpgroup());
        const float* start = nullptr;
        if (!p.is_local) start = first_state(in, span, p.state_in, p.state_in_shared ? 0 : span.sequence);
        GT_UNROLL
        for (int i = 0; i < CONSUMER_UNITS; i++) {
            state[i].clear();
            if (!start) continue; /* skips the code of load(), because short segments wait for instruction fetches */
            state[i].load(start + me.cursor().state(in, me.unit(i), 0), me.row0(i), in);
            GT_UNROLL
            for (int k = 0; k < NP / 2; k++) state[i].H[k / 4][k % 4] *= state[i].power.inverse;
        }
        const int chunks = me.cursor().chunks();
        const NeededChunks needed(p, reverse, is_last, chunks);
        GT_NO_UNROLL
        for (int number = 0; number < needed.count; number++, n++) {
            const int chunk = reverse ? chunks - 1 - number : number;
            const bool at_slot =
                reverse ? number == 0 || chunk % SLOT_CHUNKS == SLOT_CHUNKS - 1 : chunk % SLOT_CHUNKS == 0;
            ring.wait_full(n);
            if (p.checkpoints.values && at_slot) {
                GT_UNROLL
                for (int i = 0; i < CONSUMER_UNITS; i++) keep_unit<Tile>(p, me, chunk, n, i, state[i]);
            }
            if (number + 1 == needed.count && !needed.whole) {
                n++;
                break;
            }
            GT_UNROLL
            for (int i = 0; i < CONSUMER_UNITS; i++) add_chunk<Tile>(me, n, i, state[i].H);
            if (number + 1 < needed.count) ring.free(n);
        }
        const bool has_chunks = me.cursor().chunks() > 0; /* the last chunk's stage still holds the units' powers */
        item = me.cursor().item();
        /* computed again, because no registers are left to keep it */
        const Span same = ordered_span(in, item);
        GT_UNROLL
        for (int i = 0; i < CONSUMER_UNITS; i++) {
            if (!me.cursor().exists(me.unit(i))) continue;
            state[i].power.inverse = has_chunks ? lds<float>(me.prepared(n - 1, i) + 4 * UnitWeights::POWER) : 1.0f;
            store_last_state<Tile>(p, me, i, reverse, same, state[i]);
        }
        if (has_chunks) ring.free(n - 1);
        return item;
    });
}

/* For other architectures the kernel has no code and launch bounds of one warp.  Device::runs_sm90a finds out which
 * code the device runs. */
template <class T, int NP, int UNITS, class L>
GT_KERNEL(GT_SM90A ? (StatesHopperTile<T, NP, UNITS, L>::MOST_THREADS) : 32, (StatesHopperTile<T, NP, UNITS, L>::FIT))
states_hopper_kernel(const GT_GRID_CONSTANT HopperStatesParams p) {
#if GT_SM90A
    using Tile = StatesHopperTile<T, NP, UNITS, L>;
    const uint32_t smem = smem_base_of_tiles();
    typename Tile::Stages{smem}.init(thread_id(), WARPGROUP, Tile::CONSUMERS * WARPGROUP);
    sync_threads();
    const Problem& in = p.states.in;
    const auto reads_gated = [&] { return p.reverse && in.dy_inverses; };
    run_chained_roles<Tile>([&] { return in.order || reads_gated(); }, [&] { return is_apart(in) && !reads_gated(); },
                            [&] { states_producer<Tile>(p, smem); }, [&] { states_consumer<Tile>(p, smem); });
#else
    (void)p;
    __trap();
#endif
}

} /* namespace ssd */
} /* namespace gt */

#endif
