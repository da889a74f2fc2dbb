/* gt/wkv6/states.cuh - a pass on tensor cores that computes only states: G in reverse, or S for segments and for
 * backward.
 *
 * Block, roles and buffers are as in forward.cuh, with two differences:
 *   - A head has two teams of producer warps (see TensorTraits), which take sub-chunks in turn.  Each team fills its
 *     own buffer.  N = 128 has one team, since registers allow no more.
 *   - The state is scaled before the addition.  So no factor exceeds 1, and two sub-chunks may be one step (STEP): the
 *     step scans their decays once and scales the state once.  In this file a sub-chunk is a step.
 * Forward in time the kernel computes
 *     S <- E . S + sum_t (decay after t . k_t) v_t^T
 * REVERSE takes (r, dy) in place of (k, v), runs from the last sub-chunk to the first, and computes
 *     G <- E . G + sum_t (P_t . r_t) dy_t^T                   P_t: the decay before t
 * The kernel stores a checkpoint for every chunk: S before the chunk, or G after it.  It also stores the last state.
 *
 * consumer warp: it holds ROWS channels by COLUMNS values of S, as accumulators of K^T v.  No product reads the state
 * here, so S need not be a right operand, and a lane's values of a channel are adjacent in memory.  Therefore a lane
 * stores its part of a checkpoint without shuffles.  For rowsum(S . G) it needs only its own elements of S, which it
 * copies itself.
 * shape: 32 by 32 reads the fewest operands.  fp32: all channels by 16 values, so that v is split once.
 * ring: a team copies whole rows together, and waits together for their arrival.  If each warp copied only its own
 * channels, copies would be 32 bytes wide.  The time of a copy depends on the number of 128-byte lines that it touches.
 * shared, N = 64, 16 bits: 14.1 KB a buffer; two buffers and the rings are 77.1 KB; S before and after a chunk takes 16
 * KB.  N = 128: 76.6 KB and 64 KB.
 * S_COPIES: 2 copies hold S before and after a chunk.  1 copy is for blocks that may have only 99 KB.  This copy first
 * holds S after the chunk, left from the previous checkpoint.  After the sums with that S are stored, S before the
 * chunk overwrites the copy, and the warp waits for that load.
 * bytes: k or r, w, v or dy once; checkpoints and states once.  bf16 also reads S of the checkpoints, and its lo terms
 * if any, once for rowsum(S . G), unless S is known to be 0.
 * G in outputs: dv has room for G (N = 128: dk and dv).  So G lies there, row for row, until the kernel of chunks reads
 * and overwrites it.  Each head and chunk has its own part of the outputs, which no other block touches.  In f16 each
 * warp scales its part of a row of G by a power of two (RowScale), and stores the inverse in G_inverse.  If the outputs
 * cannot hold G, it goes to workspace: for fp32 with N = 128, or if dv or dk is NULL or not aligned. */
#ifndef GT_WKV6_STATES_CUH
#define GT_WKV6_STATES_CUH

#include "prepare.cuh"

namespace gt {
namespace wkv6 {

/* ---- consumer warps -------------------------------------------------------------------------------------------- */

/* A consumer warp's share of S, ROWS channels by COLUMNS values, and its addresses.  Rows g and g + 8 of tile q are
 * channels 16 q + 2g and 16 q + 2g + 1.  Values are permuted as in forward, except in fp32. */
template <class C>
struct StatePart {
    using State = typename C::State;
    static constexpr int MT = C::ROWS / 16, NT = C::TILES;
    /* A lane has 2 NT values of a channel, in PIECES pieces.  The PIECE values of a piece are adjacent in memory. */
    static constexpr int PIECE = 2 * C::PERMUTED, PIECES = 2 * NT / PIECE;
    static constexpr int BYTES = 2 * PIECE;                      /* bytes of a piece of a bf16 copy of S */
    static constexpr int LO = C::S_COPY / C::CONSUMER_WARPS / 2; /* offset from a copy of S to its lo terms */
    float S[MT][NT][4];
    uint32_t fragments, values, scales; /* in buffer 0 */
    uint32_t full, empty;               /* mbarriers; ConsumerWarp says why Ring does not fit */

    GT_METHOD void set_addresses(uint32_t buffer0, int share) {
        const int g = lane_id() / 4, j = lane_id() % 4;
        const int column0 = share % C::PARTS * C::COLUMNS, channel = share / C::PARTS * C::ROWS + 2 * g;
        fragments = buffer0 + C::K + j * C::PAIR_PITCH + 8 * channel;
        if constexpr (C::TF32X3) {
            values = buffer0 + C::VALUES + 4 * (2 * j * C::VALUE_PITCH + column0 + g);
        } else { /* matrices of 8 tokens by a tile's 8 values */
            values = buffer0 + C::VALUES + 2 * (lane_id() % 8 * C::PITCH + column0 + lane_id() / 8 * 8);
        }
        scales = buffer0 + C::SCALE + (C::TF32X3 ? 8 * channel : 4 * channel + 8 * g);
        full = buffer0 + C::FULL;
        empty = buffer0 + C::EMPTY;
    }

    /* Index of the lane's first element in a state [N,N].  The functions below take pointers to this element. */
    static GT_METHOD int first(int share) {
        const int channel = share / C::PARTS * C::ROWS + lane_id() / 4 * 2;
        return channel * C::N + share % C::PARTS * C::COLUMNS + PIECE * (lane_id() % 4);
    }

    /* channel_at(i): the lane's i-th channel, relative to its first one.  value_at(k): the first value of piece k,
     * relative to the lane's first value. */
    static GT_METHOD constexpr int channel_at(int i) { return 16 * (i / 2) + i % 2; }
    static GT_METHOD constexpr int value_at(int k) { return 4 * PIECE * k; }

    GT_METHOD void load(const float* state) {
        GT_UNROLL
        for (int x = 0; x < MT * NT * 4; x++) {
            const int q = x / 4 / NT, i = x / 4 % NT, e = x % 4;
            const int v = value_at(2 * i / PIECE) + 2 * i % PIECE + e % 2;
            S[q][i][e] = state ? state[channel_at(2 * q + e / 2) * C::N + v] : 0.0f;
        }
    }

    /* Gathers the lane's values of its i-th channel. */
    GT_METHOD void row(int i, float (&x)[2 * NT]) const {
        GT_UNROLL
        for (int k = 0; k < 2 * NT; k++) x[k] = S[i / 2][k / 2][2 * (i % 2) + k % 2];
    }

    /* Stores the lane's elements, or their lo terms.  pitch: the number of elements from one row to the next. */
    template <class To>
    GT_METHOD void store(To* state, int pitch, bool of_lo = false) const {
        GT_UNROLL
        for (int i = 0; i < 2 * MT; i++) {
            float x[2 * NT];
            To* to = state + channel_at(i) * (int64_t)pitch;
            row(i, x);
            GT_UNROLL
            for (int k = 0; of_lo && k < 2 * NT; k++) x[k] = bf16_lo(x[k]);
            GT_UNROLL
            for (int k = 0; k < PIECES; k++) {
                float piece[PIECE];
                GT_UNROLL
                for (int e = 0; e < PIECE; e++) piece[e] = x[PIECE * k + e];
                store_row<C::PERMUTED>(to + value_at(k), piece);
            }
        }
    }

    /* Stores the lane's elements as scaled f16.  The inverse factors of the warp's part go to `inverse`, from the
     * lane's first channel on. */
    GT_METHOD void store_scaled(f16* state, int pitch, float* inverse) const {
        GT_UNROLL
        for (int i = 0; i < 2 * MT; i++) {
            float x[2 * NT], largest = 0.0f;
            row(i, x);
            GT_UNROLL
            for (int k = 0; k < 2 * NT; k++) largest = fmaxf(largest, fabsf(x[k]));
            largest = fmaxf(largest, shfl_xor(largest, 1));
            largest = fmaxf(largest, shfl_xor(largest, 2));
            const RowScale row_scale = row_scale_f16(largest);
            if (lane_id() % 4 == 0) inverse[channel_at(i)] = row_scale.inverse;
            GT_UNROLL
            for (int k = 0; k < PIECES; k++) {
                float piece[PIECE];
                GT_UNROLL
                for (int e = 0; e < PIECE; e++) piece[e] = x[PIECE * k + e] * row_scale.scale;
                store_row<C::PERMUTED>(state + channel_at(i) * (int64_t)pitch + value_at(k), piece);
            }
        }
    }

    /* Starts to copy the lane's part of another state to shared memory, or clears that memory if `wanted` is false.
     * The pieces of a warp are adjacent. */
    GT_METHOD void copy(const bf16* state, uint32_t to, bool wanted) const {
        GT_UNROLL
        for (int x = 0; x < 2 * MT * PIECES; x++)
            cp_async<BYTES>(to + 32 * BYTES * x, state + channel_at(x / PIECES) * C::N + value_at(x % PIECES),
                            wanted ? BYTES : 0);
    }

    /* Sums over rows of S . G, where this part holds G after a chunk, and shared memory holds copies of S.  For a
     * channel, `all` is the warp's part of rowsum(S . G).  `lo` is the same with the error of rounding G to bf16 in
     * place of G.  Lanes for which has_sums() is true get the results.
     * Tensor cores compute the sums as the diagonal of G S^T for 8 channels.  One left operand holds 8 rows of G in
     * bf16, and the 8 rows of their rounding errors.  A lane's elements of G and S are operands without a move. */
    struct RowSum {
        float all, lo;
    };
    static GT_METHOD bool has_sums() { return lane_id() % 4 == lane_id() / 8; }

    template <int COUNT>
    GT_METHOD void multiply_row(int i, const uint32_t (&copies)[COUNT], RowSum (&sums)[COUNT]) const {
        float x[2 * NT], sum[COUNT][4] = {};
        row(i, x);
        GT_UNROLL
        for (int k = 0; k < 2 * NT; k++) x[k] = made_here(x[k]); /* or the compiler hoists all operands, and spills */
        GT_UNROLL
        for (int k = 0; k < 2 * NT; k += 4) {
            const int at = 32 * BYTES * (PIECES * i + k / PIECE) + 2 * (k % PIECE);
            uint32_t a[4];
            GT_UNROLL
            for (int e = 0; e < 4; e += 2) {
                a[e] = pack_bf16(x[k + e], x[k + e + 1]);
                a[e + 1] = bf16_lo_pair(x[k + e], x[k + e + 1]);
            }
            GT_UNROLL
            for (int c = 0; c < COUNT; c++) {
                const uint2 b = lds<uint2>(copies[c] + at);
                mma_bf16(sum[c], a, b.x, b.y);
                if constexpr (C::KEEPS_LO) {
                    const uint2 lo = lds<uint2>(copies[c] + LO + at);
                    mma_bf16(sum[c], a, lo.x, lo.y);
                }
            }
        }
        const int odd = lane_id() / 4 % 2;
        GT_UNROLL
        for (int c = 0; c < COUNT; c++) {
            sums[c].lo = odd ? sum[c][3] : sum[c][2];
            sums[c].all = (odd ? sum[c][1] : sum[c][0]) + sums[c].lo;
        }
    }

    /* Stores three row sums in sums[3,PARTS,N], from the lane's first channel on:
     *     0   rowsum(S before the chunk . G)
     *     1   rowsum((S after - S before) . rounding error of G), or 0 for the last chunk
     *     2   rowsum(S after the chunk . G), or 0 if S after the chunk is not known */
    GT_METHOD void store_rowsums(uint32_t before, uint32_t after, float* sums, bool is_last, bool knows_after) const {
        GT_UNROLL
        for (int i = 0; i < 2 * MT; i++) {
            RowSum x[2];
            multiply_row(i, {before, after}, x);
            if (!has_sums()) continue;
            float* to = sums + channel_at(i);
            to[0] = x[0].all;
            to[C::PARTS * C::N] = is_last ? 0.0f : x[1].lo - x[0].lo;
            to[2 * C::PARTS * C::N] = knows_after ? x[1].all : 0.0f;
        }
    }

    /* Stores the same sums in two calls, for S_COPIES = 1: first with S after the chunk, then with S before it.  kept:
     * shared memory that holds a sum per row between the calls. */
    GT_METHOD void store_rowsums_of(bool is_after, uint32_t copy, uint32_t kept, float* sums, bool is_last,
                                    bool knows_after) const {
        GT_UNROLL
        for (int i = 0; i < 2 * MT; i++) {
            RowSum x[1];
            multiply_row(i, {copy}, x);
            if (!has_sums()) continue;
            float* to = sums + channel_at(i);
            const uint32_t lo = kept + 4 * 8 * i;
            if (is_after) {
                to[2 * C::PARTS * C::N] = knows_after ? x[0].all : 0.0f;
                sts<float>(lo, x[0].lo);
            } else {
                to[0] = x[0].all;
                to[C::PARTS * C::N] = is_last ? 0.0f : lds<float>(lo) - x[0].lo;
            }
        }
    }
};

/* ---- a sub-chunk ------------------------------------------------------------------------------------------------- */

/* S <- E . S + K^T v of a sub-chunk */
template <class C>
GT_DEV void add_sub_chunk_rounded(StatePart<C>& me, int offset) {
    using E = Element<typename C::T>;
    GT_UNROLL
    for (int q = 0; q < me.MT; q += 2) {
        const float4 scale = lds<float4>(me.scales + offset + 64 * q);
        GT_UNROLL
        for (int x = 0; x < 4 * me.NT; x++) {
            me.S[q][x / 4][x % 4] *= x % 4 < 2 ? scale.x : scale.y;
            me.S[q + 1][x / 4][x % 4] *= x % 4 < 2 ? scale.z : scale.w;
        }
    }
    GT_UNROLL
    for (int half = 0; half < C::STEP / 8; half++) {
        uint32_t v[4];
        static_assert(StatePart<C>::NT == 4, "a tile each");
        ldmatrix_x4_trans(v, me.values + offset + 16 * half * C::PITCH);
        GT_UNROLL
        for (int q = 0; q < me.MT; q++) {
            const float4 fragment = lds<float4>(me.fragments + offset + 4 * half * C::PAIR_PITCH + 128 * q);
            const float k[4] = {fragment.x, fragment.y, fragment.z, fragment.w};
            GT_UNROLL
            for (int i = 0; i < me.NT; i++) mma_tf32(me.S[q][i], k, E::lo(v[i]), E::hi(v[i]));
        }
    }
}

/* S <- E . S + K^T v in fp32: three products, whose sum starts at zero.  See multiply_3xtf32. */
template <class C>
GT_DEV void add_sub_chunk_3xtf32(StatePart<C>& me, int offset) {
    float v[2][2][2], v_lo[2][2][2]; /* by half, tile and token */
    GT_UNROLL
    for (int x = 0; x < 8; x++) {
        const int half = x / 4, i = x / 2 % 2, e = x % 2;
        v[half][i][e] = lds<float>(me.values + offset + 4 * ((8 * half + e) * C::VALUE_PITCH + 8 * i));
        v_lo[half][i][e] = tf32_lo(v[half][i][e]);
    }
    static_assert(StatePart<C>::NT == 2, "tiles of v");
    GT_UNROLL
    for (int q = 0; q < me.MT; q++) {
        float k[2][4], added[2][4] = {};
        GT_UNROLL
        for (int half = 0; half < 2; half++) {
            float lo[4];
            lds_words(k[half], me.fragments + offset + 4 * half * C::PAIR_PITCH + 128 * q);
            set_lo<true>(k[half], lo);
            GT_UNROLL
            for (int i = 0; i < 2; i++) {
                mma_tf32(added[i], lo, v[half][i][0], v[half][i][1]);
                mma_tf32(added[i], k[half], v_lo[half][i][0], v_lo[half][i][1]);
            }
        }
        GT_UNROLL
        for (int x = 0; x < 4; x++) mma_tf32(added[x % 2], k[x / 2], v[x / 2][x % 2][0], v[x / 2][x % 2][1]);
        const float4 scale = lds<float4>(me.scales + offset + 128 * q); /* scales of 2 channels */
        GT_UNROLL
        for (int x = 0; x < 8; x++) {
            const float factor = x % 4 < 2 ? scale.x : scale.y, keep = x % 4 < 2 ? scale.z : scale.w;
            float& element = me.S[q][x / 4][x % 4];
            element = rescale(keep, factor, element, added[x / 4][x % 4]);
        }
    }
}

/* ---- the kernel --------------------------------------------------------------------------------------------- */

template <class C, bool REVERSE>
GT_DEV void consume_states(const TensorParams& p, uint32_t smem, int work) {
    using State = typename C::State;
    using Left = typename std::conditional<REVERSE, typename C::Gradient, State>::type; /* type of checkpoints */
    constexpr int NN = C::N * C::N, STEPS = CHECKPOINT / C::STEP;                       /* STEPS: steps of a chunk */
    const int warp = warp_id() - C::PRODUCER_WARPS, sub = C::HEADS == 1 ? 0 : warp / C::SHARES;
    const int share = warp % C::SHARES, first = StatePart<C>::first(share);
    const bool wants_rowsums = REVERSE && C::KEEPS_BF16 && p.rowsums;
    StatePart<C> me;
    me.set_addresses(smem + sub * C::HEAD_BUFFER, share);
    const HeadSpan span = span_of<C, REVERSE>(p, work, sub);
    const int steps = steps_of<C>(span);
    /* Index of the next checkpoint. */
    int chunk = (int)span.chunk + (REVERSE && steps ? (steps - 1) / STEPS : 0);
    /* Index of the lane's first element in state number `at`. */
    const auto element = [&](int at) { return (int64_t)at * NN + first; };

    /* Where the checkpoint of the last step's chunk goes.  Checkpoints of whole chunks may lie in outputs. */
    const auto& outputs = p.G_rows[C::N > CHECKPOINT ? first / (CHECKPOINT * C::N) : 0];
    const bool in_outputs = REVERSE && C::G_IN_OUTPUTS && outputs.data;
    /* Whether G of the last chunk goes to p.checkpoints although other chunks' G lies in outputs. */
    const bool is_apart = p.last_apart || span.tokens % CHECKPOINT != 0;
    const int pitch = in_outputs ? (int)outputs.stride.t : C::N;
    /* Computed without an else branch, which would cost registers. */
    Left* checkpoint = static_cast<Left*>(p.checkpoints) + element(chunk);
    if (in_outputs) {
        const int token = span.start + (steps - 1) / STEPS * CHECKPOINT + first / C::N % CHECKPOINT;
        checkpoint = static_cast<Left*>(outputs.data) + offset_of(outputs.stride, span.b, token, span.h) + first % C::N;
    }
    /* Returns the address of the lane's first float for the next checkpoint.  `parts` is G_inverse [B,H,chunk
     * slots,PARTS,N] for f16, rowsums [B,H,chunk slots,3,PARTS,N] for bf16. */
    const auto own_part = [&](float* parts) {
        constexpr int SUMS = C::KEEPS_BF16 ? REVERSE_SUMS : 1;
        return parts + (int64_t)chunk * (SUMS * C::PARTS * C::N) + share % C::PARTS * C::N + first / C::N;
    };
    const auto leave = [&](Left* to, int to_pitch) {
        if constexpr (REVERSE && C::SCALES_G) {
            me.store_scaled(to, to_pitch, own_part(p.G_inverse));
        } else {
            me.store(to, to_pitch);
        }
    };

    /* The copies of S at the next checkpoint and at the previous one; with one copy, only at one of them.  A lane reads
     * only its own copies, so no barrier is needed. */
    const uint32_t copies = smem + C::SMEM + C::S_COPY / C::CONSUMER_WARPS * warp + StatePart<C>::BYTES * lane_id();
    const uint32_t kept = smem + C::KEPT + 4 * (C::ROWS * warp + lane_id() / 4);
    const auto copy_of = [&](int at) { return copies + (C::S_COPIES == 2 ? (at & 1) * C::S_COPY : 0); };
    const auto fetch = [&](int at, bool wanted) {
        const bf16* S = static_cast<const bf16*>(p.S) + element(at);
        me.copy(S, copy_of(at), wanted);
        if constexpr (C::KEEPS_LO) me.copy(S + p.lo_terms, copy_of(at) + StatePart<C>::LO, wanted);
        cp_async_commit();
    };
    const int zero_steps = p.S_starts_zero && span.starts ? STEPS : 0; /* steps of a first chunk, if S = 0 before it */

    /* Stores the checkpoint of a step's chunk, and its row sums.  The sums come first, so that registers need not hold
     * the rounded G meanwhile. */
    const auto pass_checkpoint = [&](int step, Left* to, int to_pitch, bool is_last) {
        if (wants_rowsums) {
            float* sums = own_part(p.rowsums);
            const bool knows_after = !is_last && step >= zero_steps;
            if constexpr (C::S_COPIES == 2) {
                cp_async_wait<0>();
                me.store_rowsums(copy_of(chunk), copy_of(chunk + 1), sums, is_last, knows_after);
            } else {
                GT_NO_UNROLL
                for (int is_after = 1; is_after >= 0; is_after--) {
                    cp_async_wait<0>();
                    me.store_rowsums_of(is_after, copies, kept, sums, is_last, knows_after);
                    if (is_after) fetch(chunk, step >= zero_steps);
                }
            }
        }
        leave(to, to_pitch);
        if constexpr (C::KEEPS_LO && !REVERSE) me.store(to + p.lo_terms, C::N, true);
        checkpoint += REVERSE ? -(in_outputs ? (int64_t)pitch * CHECKPOINT : NN) : NN;
        chunk += REVERSE ? -1 : 1;
        if (wants_rowsums && C::S_COPIES == 2 && step >= STEPS) fetch(chunk, step - STEPS >= zero_steps);
    };
    const bool has_checkpoints = p.checkpoints || in_outputs;
    if (wants_rowsums && steps) {
        if constexpr (C::S_COPIES == 2) fetch(chunk, steps - 1 >= zero_steps);
        fetch(chunk + 1, !span.ends);
    }
    const float* from = first_state<C>(p, span, p.state_in_shared ? span.h : span.head);
    me.load(from ? from + first : nullptr);
    if (REVERSE && has_checkpoints && steps) { /* a short last chunk has its checkpoint in p.checkpoints */
        const bool apart = in_outputs && is_apart;
        pass_checkpoint(steps - 1, apart ? static_cast<Left*>(p.checkpoints) + element(span.head) : checkpoint,
                        apart ? C::N : pitch, span.ends);
    }
    for (int last = steps - 1; last >= 0; last -= 2) { /* last: the next step, if the pass is in reverse */
        GT_UNROLL
        for (int buffer = 0; buffer < 2; buffer++) {
            if (last - buffer < 0) break;
            const int step = REVERSE ? last - buffer : steps - 1 - last + buffer;
            const bool at_checkpoint = REVERSE ? (step + 1) % STEPS == 0 && step < steps - 1 : step % STEPS == 0;
            if (has_checkpoints && at_checkpoint) pass_checkpoint(step, checkpoint, pitch, false);
            mbarrier_wait(me.full + buffer * C::BUFFER, (steps - 1 - last) / 2 % 2);
            if constexpr (C::TF32X3) {
                add_sub_chunk_3xtf32<C>(me, buffer * C::BUFFER);
            } else {
                add_sub_chunk_rounded<C>(me, buffer * C::BUFFER);
            }
            mbarrier_arrive(me.empty + buffer * C::BUFFER);
        }
    }
    if (p.local || p.state_out) {
        /* Compute the span again: no registers are left to keep it over the loop. */
        const HeadSpan same = span_of<C, REVERSE>(p, work_of<C>(smem), sub);
        float* end = last_state<C>(p, same, REVERSE ? same.starts : same.ends);
        if (end) me.store(end + first, C::N);
    }
}

template <class C, bool REVERSE>
GT_KERNEL(C::THREADS, C::N == 128 ? 1 : 2)
states_tensor_kernel(const GT_GRID_CONSTANT TensorParams p) {
#if GT_SM80_KERNELS
    const uint32_t smem = smem_base();
    init_work<C>(smem, block_x());
    if (warp_id() < C::PRODUCER_WARPS) {
        take_work<C>(p, smem, [&](int work) { produce<C, REVERSE>(p, smem, work); });
    } else {
        wait_for_chain(); /* producer warps need not wait: they read no output of earlier kernels in the chain */
        take_work<C>(p, smem, [&](int work) { consume_states<C, REVERSE>(p, smem, work); });
    }
#else
    (void)p;
    __trap();
#endif
}

} /* namespace wkv6 */
} /* namespace gt */

#endif
