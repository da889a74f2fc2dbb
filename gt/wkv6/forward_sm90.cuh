/* gt/wkv6/forward_sm90.cuh - forward, and a pass that computes only states, on compute capability 9.0: 16-bit
 * activations, N = V = 128.
 *
 * forward_hopper_kernel works as forward_tensor_kernel does (forward.cuh), with four differences:
 *   - S^T += v^T K uses wgmma, twice a sub-chunk.  A warpgroup of 4 consumer warps has 64 values, and ConsumerWarp::S
 *     is its accumulators, in the same order.  v^T comes from registers.  K comes from shared memory, which the
 *     hardware reads once for all four warps.  While wgmma runs, the warps add A v to y and store y.
 *   - Producer warps compute A, in turn, once for all consumer warps.  A warp computes A of a sub-chunk after it has
 *     prepared its part of the next sub-chunk, so that it waits for no other warp.  Four buffers keep consumer warps
 *     from waiting for A.  Each buffer has a third mbarrier for A: A_FULL.
 *   - The decay E of S is deferred.  For a while S is not scaled; R and K of later sub-chunks contain the deferred
 *     decay instead, as 2^-(deferred + c_t) and 2^(deferred + c_(t+1)).  S is scaled at every checkpoint, at the end of
 *     the pass, and when the deferred decay of a channel exceeds DEFERRED_LIMIT.  So S is scaled once in four
 *     sub-chunks, and more often under strong decay.  The strong-decay path also scales S by the deferred decay.
 *   - K has wgmma's layout without swizzle: 8 channels by 4 tokens are 128 bytes.  These blocks lie 144 bytes apart, so
 *     that stores of a producer lane (4 tokens of 2 channels) and loads for A have no bank conflicts.  A producer warp
 *     makes K visible to the asynchronous proxy (fence_async_proxy) before it arrives at FULL.
 * y = R S still uses mma_tf32, for which a pair of accumulators of S is a right operand.  A left operand of wgmma has
 * another order, and no registers are left to move S.
 * mixed_hopper_kernel is forward_hopper_kernel with the sum of a mixed call, as forward_mixed_kernel in forward.cuh.
 * states_hopper_kernel computes only S, without r, A and y.  It serves the local pass over segments, and backward if
 * forward has saved no states.  Its states equal forward's bit for bit.
 *
 * registers: S takes 64 of 128.  Addresses stay in registers (kept()); otherwise a third of a producer warp's
 * instructions would compute them again.
 * shared: 32.4 KB a buffer; with the rings 205 KB, or 226 KB if w is fp32.  Shared-memory wavefronts per sub-chunk and
 * head: 1560, including 512 for R (forward_tensor_kernel: 2544).
 * tensor cores per sub-chunk and head: 32 + 8 x 36 m16n8k8 and 4 m64n128k8.
 * issue slots per token and head, counted: 246 (forward_tensor_kernel: 370).
 * bytes: as in forward_tensor_kernel. */
#ifndef GT_WKV6_FORWARD_SM90_CUH
#define GT_WKV6_FORWARD_SM90_CUH

#include "../base/ring.cuh"
#include "forward.cuh"

namespace gt {
namespace wkv6 {

/* MAKES_Y: true for forward_hopper_kernel, false for states_hopper_kernel. */
template <class T_, class W_, bool MAKES_Y_>
struct HopperTraits : TensorTraits<T_, W_, 128> {
    using Base = TensorTraits<T_, W_, 128>;
    static constexpr int N = 128, GROUPS = Base::GROUPS, PRODUCER_WARPS = Base::PRODUCER_WARPS;
    static constexpr int AHEAD = 4, BUFFERS = 4;
    static constexpr bool MAKES_Y = MAKES_Y_;
    /* Bytes of K: 8 channels by 4 tokens, and all channels by 4 tokens.  Both include 16 bytes of padding, against bank
     * conflicts. */
    static constexpr int BLOCK = 128 + 16, PLANE = N / 8 * BLOCK + 16;
    static constexpr int VALUES = Base::K + SUB_CHUNK / 4 * PLANE, A = VALUES + SUB_CHUNK * Base::PITCH * 2;
    /* SCALE: factors by which S is multiplied after an update.  STRONG_DECAY_SCALE: factors before an update, on the
     * strong-decay path. */
    static constexpr int SCALE = A + SUB_CHUNK * SUB_CHUNK * 4, STRONG_DECAY_SCALE = SCALE + 4 * N;
    static constexpr int BONUS = STRONG_DECAY_SCALE + 4 * N, STRONG_DECAY = BONUS + 4 * SUB_CHUNK * GROUPS;
    static constexpr int FULL = STRONG_DECAY + 2 * GROUPS, EMPTY = FULL + 8, A_FULL = EMPTY + 8,
                         WORK = STRONG_DECAY + 56, PAIRS = STRONG_DECAY + 64;
    static constexpr int HEAD_BUFFER = PAIRS + 4 * SUB_CHUNK * SUB_CHUNK * GROUPS, BUFFER = HEAD_BUFFER;
    using Buffers = Ring<BUFFERS, FULL, EMPTY, BUFFER>;      /* every buffer contains its own barriers */
    using Pairs = Ring<BUFFERS, A_FULL, NO_BARRIER, BUFFER>; /* A becomes free together with its buffer, so it needs no
                                                              * barrier for that */
    static constexpr int RING = BUFFERS * BUFFER, SMEM = RING + PRODUCER_WARPS * AHEAD * Base::STAGE;
    static_assert(!Base::TF32X3 && PRODUCER_WARPS % 4 == 0 && Base::CONSUMER_WARPS % 4 == 0, "warpgroups");
    static_assert(FULL % 8 == 0 && A_FULL + 8 <= WORK && BUFFER % 16 == 0, "flags, then mbarriers");
    static_assert(SMEM <= 227 * 1024, "fits sm_90");
};

/* ---- a group's deferred decay ------------------------------------------------------------------------------- */

constexpr float DEFERRED_LIMIT = 16.0f; /* limit of -log2 of the deferred decay */

/* Flags of a group in a sub-chunk.  IS_STRONG_DECAY: consumer warps scale S before the update.  IS_SCALED: they scale S
 * after the update. */
constexpr uint32_t IS_STRONG_DECAY = 1, IS_SCALED = 2;

/* The flags of all groups, 16 bits each, as they lie in shared memory at STRONG_DECAY. */
template <class C>
struct GroupFlags {
    uint32_t words[C::GROUPS / 2];

    GT_METHOD uint32_t any() const {
        uint32_t any = 0;
        GT_UNROLL
        for (int i = 0; i < C::GROUPS / 2; i++) any |= words[i];
        return any | any >> 16;
    }
    /* Returns whether a group takes the strong-decay path. */
    GT_METHOD bool operator[](int group) const { return words[group / 2] >> 16 * (group % 2) & IS_STRONG_DECAY; }
};

/* Returns x.  The shuffle hides from the compiler how x was computed, so x stays in a register.  Otherwise the compiler
 * would compute x again in every sub-chunk. */
GT_DEV uint32_t kept(uint32_t x) { return shfl_idx(x, lane_id()); }

/* ---- producer warps ---------------------------------------------------------------------------------------- */

template <class C>
struct HopperProducer : Producer<C> {
    float deferred[2]; /* -log2 of the decay that S still lacks, for the lane's two channels */
    uint32_t flags;    /* address of the group's flags in buffer 0 */
    /* Addresses in stage 0.  read_at, w_read_at: where the lane reads r and k, and w.  copy_at, w_copy_at: where it
     * copies r and k, and w, to.  v_stride: where it copies v to and reads v. */
    uint32_t read_at, w_read_at, copy_at, w_copy_at, v_stride;
    int copy_row, w_copy_row, v_copy_row; /* tokens of the sub-chunk that the lane copies */
};

template <class C>
GT_DEV void init_producer(HopperProducer<C>& me, uint32_t smem) {
    constexpr int SIZE = sizeof(typename C::T), W_SIZE = sizeof(typename C::W);
    const int lane = lane_id();
    me.group = uniform(warp_id());
    me.quad = lane / 8;
    me.channel = 16 * me.group + 2 * (lane % 8);
    me.buffer0 = smem;
    me.ring = smem + C::RING + me.group * C::AHEAD * C::STAGE;
    me.r_fragment = kept(smem + C::R + 16 * (2 * me.quad * C::FRAGMENTS + me.channel / 2));
    me.k_row = kept(smem + C::K + me.quad * C::PLANE + me.channel / 8 * C::BLOCK + me.channel % 8 * 16);
    me.values = kept(smem + C::VALUES + 2 * (me.v_row(0) * C::PITCH + value_column<C>(me.v_column(0))));
    /* Scales lie in the order in which consumer warps read them: 2 channels of a tile, then 2 of the next tile.  The
     * lane writes the scale of one of its two channels. */
    me.scale = kept(smem + C::SCALE + 64 * me.group + 16 * (lane % 4) + 8 * (lane / 4 % 2) + 4 * (me.quad % 2));
    me.bonus = kept(smem + C::BONUS + 4 * (SUB_CHUNK * me.group + 4 * me.quad + bonus_token()));
    me.flags = kept(smem + C::STRONG_DECAY + 2 * me.group);

    const int own = ring_at<C>(4 * me.quad) + lane % 8 * 2;
    me.read_at = me.w_read_at = kept(me.ring + SIZE * own);
    me.copy_row = me.w_copy_row = kept(me.template copied_row<typename C::T>(0));
    me.copy_at = me.w_copy_at =
        kept(me.ring + SIZE * (ring_at<C>(me.copy_row) + me.template copied_column<typename C::T>()));
    if constexpr (HopperProducer<C>::W_PIECES > 1) {
        me.w_read_at = kept(me.ring + W_SIZE * own);
        me.w_copy_row = kept(me.template copied_row<typename C::W>(0));
        me.w_copy_at =
            kept(me.ring + W_SIZE * (ring_at<C>(me.w_copy_row) + me.template copied_column<typename C::W>()));
    }
    me.v_stride = kept(me.ring + C::RING_V + me.v_fragment(0));
    me.v_copy_row = kept(me.v_row(0));
}

/* Starts to copy the next sub-chunk.  Past the end of the span the copies write zeros, which no warp reads. */
template <class C>
GT_DEV void copy_sub_chunk(HopperProducer<C>& me, int sub_chunk) {
    const uint32_t to = sub_chunk % C::AHEAD * C::STAGE;
    const int left = me.tokens - sub_chunk * SUB_CHUNK;
    if constexpr (C::MAKES_Y) me.r[0].copy(me.copy_at + to + C::RING_R, true, me.copy_row < left);
    me.k[0].copy(me.copy_at + to + C::RING_K, true, me.copy_row < left);
    me.v[0].copy(me.v_stride + to, true, me.v_copy_row < left);
    GT_UNROLL
    for (int i = 0; i < me.W_PIECES; i++) { /* each piece is half a sub-chunk after the previous one */
        const int half = i * ring_at<C>(SUB_CHUNK / 2) * (int)sizeof(typename C::W);
        me.w[i].copy(me.w_copy_at + to + C::RING_W + half, true, me.w_copy_row + i * SUB_CHUNK / 2 < left);
    }
    cp_async_commit();
}

/* Loads the lane's part of a sub-chunk that has arrived. */
template <class C>
GT_DEV RawSubChunk<C> read_sub_chunk(const HopperProducer<C>& me, int stage) {
    constexpr int ROW = sizeof(typename C::T) * C::WIDTH, W_ROW = sizeof(typename C::W) * C::WIDTH;
    const uint32_t from = stage * C::STAGE;
    RawSubChunk<C> x = {};
    GT_UNROLL
    for (int i = 0; i < 4; i++) {
        if constexpr (C::MAKES_Y) x.r[i] = lds<Pair<typename C::T>>(me.read_at + from + C::RING_R + ROW * i);
        x.k[i] = lds<Pair<typename C::T>>(me.read_at + from + C::RING_K + ROW * i);
        x.w[i] = lds<Pair<typename C::W>>(me.w_read_at + from + C::RING_W + W_ROW * i);
    }
    x.v[0] = lds<uint4>(me.v_stride + from);
    return x;
}

/* prepare_sub_chunk() for a state that still lacks the deferred decay. */
template <class C>
GT_DEV void hopper_prepare_sub_chunk(HopperProducer<C>& me, const RawSubChunk<C>& x, int sub_chunk, int buffer,
                                     int stage) {
    const int offset = buffer * C::BUFFER;
    float h[4][2], c[2], end[2], bonus[4], k[2][4]; /* k: 4 tokens of a channel */
    decay_bits<C>(me, x, sub_chunk, h);
    GT_UNROLL
    for (int e = 0; e < 2; e++) {
        c[e] = scan_quads((h[0][e] + h[1][e]) + (h[2][e] + h[3][e]), me.quad, &end[e]) + me.deferred[e];
        if constexpr (!C::MAKES_Y) me.neg_log2[e] += end[e];
        end[e] += me.deferred[e];
    }
    bool scaled = exceeds(end, DEFERRED_LIMIT);
    const bool strong = scaled && exceeds(end, STRONG_DECAY_LIMIT);
    scaled |= sub_chunk % SUB_CHUNKS == SUB_CHUNKS - 1 || (sub_chunk + 1) * SUB_CHUNK >= me.tokens;
    GT_UNROLL
    for (int e = 0; e < 2; e++) me.deferred[e] = scaled ? 0.0f : end[e];

    make_operands<C>(me, x, h, c, buffer, bonus, [&](int i, float2 pair) {
        k[0][i] = pair.x;
        k[1][i] = pair.y;
    });
    GT_UNROLL
    for (int e = 0; e < 2; e++) sts<float4>(me.k_row + offset + 16 * e, {k[e][0], k[e][1], k[e][2], k[e][3]});
    if (strong) { /* K of the strong-decay path overwrites the usual K */
        prepare_strong_decay<C>(me, x, h, buffer, stage, [&](int i, float2 pair) {
            sts<float>(me.k_row + offset + 4 * i, pair.x);
            sts<float>(me.k_row + offset + 4 * i + 16, pair.y);
        });
    }
    if constexpr (C::MAKES_Y) {
        const float sum = sum_bonus(bonus);
        if ((lane_id() & 4) == 0) sts<float>(me.bonus + offset, sum);
    }
    const uint32_t flags = (strong ? IS_STRONG_DECAY : 0) | (scaled ? IS_SCALED : 0);
    if (lane_id() == 0) sts<uint16_t>(me.flags + offset, (uint16_t)flags);
    if (me.quad < 2) { /* each lane stores the factor of one channel: 1 if this group is not scaled */
        const float decay = scaled ? sub_chunk_decay(me.quad ? end[1] : end[0]) : 1.0f;
        sts<float>(me.scale + offset, strong ? 1.0f : decay);
        if (strong) sts<float>(me.scale + offset + C::STRONG_DECAY_SCALE - C::SCALE, decay);
    }
    static_assert(value_column<C>(4) == value_column<C>(0) + 2, "every other pair is a neighbour");
    sts<uint2>(me.values + offset + 2 * value_column<C>(0), {x.v[0].x, x.v[0].z});
    sts<uint2>(me.values + offset + 2 * value_column<C>(2), {x.v[0].y, x.v[0].w});
}

/* ---- A of a sub-chunk -------------------------------------------------------------------------------------------- */

/* A producer warp while it computes A of a sub-chunk.  Lane (g, j) has tokens 2g and 2g + 1 as rows.  Addresses are in
 * buffer 0. */
template <class C>
struct PairsWarp {
    int g, j;
    uint32_t fragments, columns, bonus, pairs, to; /* R; K; bonus; A of strong-decay groups; A, as left operands */

    GT_METHOD void set_addresses(uint32_t buffer0) {
        g = lane_id() / 4;
        j = lane_id() % 4;
        fragments = buffer0 + C::R + 16 * (g * C::FRAGMENTS + j);
        columns = buffer0 + C::K + g / 4 * C::PLANE + g % 4 * 4 + 32 * j;
        bonus = buffer0 + C::BONUS + 4 * 2 * g;
        pairs = buffer0 + C::PAIRS + 4 * (SUB_CHUNK * 2 * g + 2 * j);
        to = buffer0 + C::A + 16 * lane_id();
    }
};

template <class C, bool STRONG_DECAY>
GT_DEV void make_pairs(const PairsWarp<C>& me, int offset, const GroupFlags<C>& strong) {
    float A[2][4] = {}, bonus[2] = {};
    GT_UNROLL
    for (int kk = 0; kk < C::NT; kk++) {
        if (STRONG_DECAY && strong[kk / 2]) continue;
        const float4 fragment = lds<float4>(me.fragments + offset + 64 * kk);
        const float r[4] = {fragment.x, fragment.y, fragment.z, fragment.w};
        GT_UNROLL
        for (int i = 0; i < 2; i++) {
            const uint32_t column = me.columns + offset + 2 * i * C::PLANE + C::BLOCK * kk;
            mma_tf32(A[i], r, lds<float>(column), lds<float>(column + 16));
        }
    }
    GT_UNROLL
    for (int i = 0; STRONG_DECAY && i < C::GROUPS; i++)
        if (strong[i]) add_strong_pairs(me.pairs + offset + 4 * SUB_CHUNK * SUB_CHUNK * i, A);
    GT_UNROLL
    for (int i = 0; i < C::GROUPS; i++) {
        const float2 part = lds<float2>(me.bonus + offset + 4 * SUB_CHUNK * i);
        bonus[0] += part.x;
        bonus[1] += part.y;
    }
    complete_pairs<C>(me.g, me.j, bonus, A);
    GT_UNROLL
    for (int i = 0; i < 2; i++) sts<float4>(me.to + offset + 512 * i, {A[i][0], A[i][2], A[i][1], A[i][3]});
}

template <class C>
GT_DEV void make_pairs_of(const PairsWarp<C>& me, uint32_t buffer0, int sub_chunk) {
    const int offset = sub_chunk % C::BUFFERS * C::BUFFER;
    typename C::Buffers{buffer0}.wait_full(sub_chunk);
    GroupFlags<C> flags;
    lds_words(flags.words, buffer0 + offset + C::STRONG_DECAY);
    if (flags.any() & IS_STRONG_DECAY) {
        make_pairs<C, true>(me, offset, flags);
    } else {
        make_pairs<C, false>(me, offset, flags);
    }
    typename C::Pairs{buffer0}.fill(sub_chunk);
}

template <class C>
GT_DEV void hopper_produce(const TensorParams& p, uint32_t smem, int work) {
    HopperProducer<C> me;
    PairsWarp<C> pairs;
    init_producer<C>(me, smem);
    pairs.set_addresses(smem);
    const HeadSpan span = span_of<C, false>(p, work, 0);
    me.open(p.in, span, span.start, SUB_CHUNK);
    me.deferred[0] = me.deferred[1] = me.neg_log2[0] = me.neg_log2[1] = 0.0f;
    const int sub_chunks = uniform(span.sub_chunks), turn_after = (me.group + 1) % C::PRODUCER_WARPS;
    for (int sub_chunk = 0; sub_chunk < C::AHEAD; sub_chunk++) copy_sub_chunk<C>(me, sub_chunk);
    for (int sub_chunk = 0; sub_chunk < sub_chunks + C::MAKES_Y; sub_chunk++) {
        if (!C::MAKES_Y || sub_chunk < sub_chunks) {
            const int buffer = sub_chunk % C::BUFFERS, stage = sub_chunk % C::AHEAD;
            cp_async_wait<C::AHEAD - 1>();
            sync_warp();
            const RawSubChunk<C> x = read_sub_chunk<C>(me, stage);
            typename C::Buffers{smem}.wait_free(sub_chunk);
            hopper_prepare_sub_chunk<C>(me, x, sub_chunk, buffer, stage);
            fence_async_proxy();
            typename C::Buffers{smem}.fill(sub_chunk);
            sync_warp(); /* all lanes have read the stage */
            copy_sub_chunk<C>(me, sub_chunk + C::AHEAD);
        }
        /* A of a sub-chunk is computed one sub-chunk later, when the warp no longer has to wait for other warps. */
        if (C::MAKES_Y && sub_chunk > 0 && sub_chunk % C::PRODUCER_WARPS == turn_after)
            make_pairs_of<C>(pairs, smem, sub_chunk - 1);
    }
    cp_async_wait<0>();
    if constexpr (!C::MAKES_Y) {
        /* Compute the span again: no registers are left to keep it over the loop. */
        const HeadSpan same = span_of<C, false>(p, work_of<C>(smem), 0);
        store_decays<C>(p, same, me, 0);
    }
}

/* ---- consumer warps, and the kernel ---------------------------------------------------------------------------- */

template <class C>
struct HopperStateWarp : ConsumerWarp<C> {
    uint32_t k, left; /* addresses of K and A in buffer 0 */

    GT_METHOD void set_addresses(uint32_t smem) {
        ConsumerWarp<C>::set_addresses(smem);
        k = smem + C::K;
        left = kept(smem + C::A + 16 * lane_id());
        this->fragments = kept(this->fragments);
        /* As in ConsumerWarp, but a lane's two tokens are 4 apart, because here K has the tokens in order. */
        const int matrix = lane_id() / 8, token = lane_id() % 8 / 2 + lane_id() % 2 * 4;
        this->values_left =
            smem + C::VALUES + 2 * ((token + matrix / 2 * 8) * C::PITCH + this->column0 + matrix % 2 * 8);
        this->scales = smem + C::SCALE + 16 * this->j;
    }

    /* Multiplies the channels of a group by their decays. */
    GT_METHOD void scale_group(int group, uint32_t decays) {
        const float4 x = lds<float4>(decays + 64 * group);
        this->scale(2 * group, {x.x, x.y});
        this->scale(2 * group + 1, {x.z, x.w});
    }
};

/* y = R S */
template <class C>
GT_DEV void multiply_state(const HopperStateWarp<C>& me, int offset, float (&y)[2][4]) {
    GT_UNROLL
    for (int kk = 0; kk < C::NT; kk++) {
        const float4 fragment = lds<float4>(me.fragments + offset + 64 * kk);
        const float r[4] = {fragment.x, fragment.y, fragment.z, fragment.w};
        GT_UNROLL
        for (int i = 0; i < 2; i++) mma_tf32(y[i], r, me.S[0][kk][2 * i], me.S[0][kk][2 * i + 1]);
    }
}

/* Starts S^T += v^T K.  Until wgmma_wait() no thread may use S and v. */
template <class C>
GT_DEV void start_update(HopperStateWarp<C>& me, int offset, float (&v)[2][4]) {
    uint32_t x[4];
    ldmatrix_x4_trans(x, me.values_left + offset);
    unpack_left<typename C::T>(x, v);
    wgmma_fence();
    wgmma_tf32(me.S[0], v[0], wgmma_operand(me.k + offset, C::PLANE, C::BLOCK));
    wgmma_tf32(me.S[0], v[1], wgmma_operand(me.k + offset + 2 * C::PLANE, C::PLANE, C::BLOCK));
    wgmma_commit();
}

/* y += A v */
template <class C>
GT_DEV void add_pairs(const HopperStateWarp<C>& me, int offset, float (&y)[2][4]) {
    using E = Element<typename C::T>;
    uint32_t x[4];
    ldmatrix_x4_trans(x, me.values_right + offset);
    GT_UNROLL
    for (int i = 0; i < 2; i++) {
        const float4 fragment = lds<float4>(me.left + offset + 512 * i);
        const float left[4] = {fragment.x, fragment.y, fragment.z, fragment.w};
        mma_tf32(y[0], left, E::lo(x[i]), E::hi(x[i]));
        mma_tf32(y[1], left, E::lo(x[i + 2]), E::hi(x[i + 2]));
    }
}

template <class C, bool MIXES>
GT_DEV void hopper_consume(const TensorParams& p, uint32_t smem, int work) {
    using E = Element<typename C::T>;
    HopperStateWarp<C> me;
    me.column0 = (warp_id() - C::PRODUCER_WARPS) * C::COLUMNS;
    me.set_addresses(smem);
    const HeadSpan span = span_of<C, false>(p, work, 0);
    me.load(first_state<C>(p, span, p.state_in_shared ? span.h : span.head));
    typename C::State* checkpoints = static_cast<typename C::State*>(p.checkpoints);
    if (checkpoints) checkpoints += span.chunk * C::N * C::N;
    typename C::T* y_row = nullptr;
    if constexpr (C::MAKES_Y)
        y_row = static_cast<typename C::T*>(p.y) + offset_of(p.y_stride, span.b, span.start + 2 * me.g, span.h) +
                me.column0 + 2 * C::TILES * me.j;
    MixPlace place;
    if (MIXES) place.set(p, span, me.column0 + 2 * C::TILES * me.j);
    const bool is_scaled = warp_any(p.in.scale != 1.0f);
    for (int sub_chunk = 0; sub_chunk < span.sub_chunks; sub_chunk++) {
        if (checkpoints && sub_chunk % SUB_CHUNKS == 0) me.store(checkpoints + sub_chunk / SUB_CHUNKS * C::N * C::N);
        if (C::MAKES_Y && p.snapshots.data && sub_chunk > 0 && sub_chunk % SUB_CHUNKS == 0)
            if (float* to = snapshot_of<C>(p, work_of<C>(smem), 0, SUB_CHUNK * sub_chunk)) me.store(to);
        const int offset = sub_chunk % C::BUFFERS * C::BUFFER;
        float y[2][4] = {}, v[2][4];
        GroupFlags<C> flags;
        typename C::Buffers{smem}.wait_full(sub_chunk);
        lds_words(flags.words, me.flags + offset);
        const uint32_t any = flags.any();
        if constexpr (C::MAKES_Y) multiply_state<C>(me, offset, y);
        GT_UNROLL
        for (int i = 0; (any & IS_STRONG_DECAY) && i < C::GROUPS; i++)
            if (flags[i]) me.scale_group(i, me.scales + offset + C::STRONG_DECAY_SCALE - C::SCALE);
        start_update<C>(me, offset, v);

        if constexpr (C::MAKES_Y) {
            typename C::Pairs{smem}.wait_full(sub_chunk);
            add_pairs<C>(me, offset, y);
            scale_y(is_scaled, p.in.scale, y);
            if (MIXES) mix_sub_chunk<C>(p.mix, place, sub_chunk * SUB_CHUNK + 2 * me.g, span.tokens, y);
        }
        GT_UNROLL
        for (int half = 0; C::MAKES_Y && half < 2; half++) {
            /* One 64-bit number: with two numbers the compiler would emit two stores. */
            const uint32_t low = E::pack(y[0][2 * half], y[0][2 * half + 1]);
            const uint64_t high = E::pack(y[1][2 * half], y[1][2 * half + 1]);
            if (sub_chunk * SUB_CHUNK + 2 * me.g + half < span.tokens) stg<uint64_t>(y_row, high << 32 | low);
            y_row += half ? (SUB_CHUNK - 1) * p.y_stride.t : p.y_stride.t;
        }
        wgmma_wait<0>();
        GT_UNROLL
        for (int i = 0; (any & IS_SCALED) && i < C::GROUPS; i++) me.scale_group(i, me.scales + offset);
        typename C::Buffers{smem}.free(sub_chunk);
    }
    if (C::MAKES_Y && p.snapshots.data)
        if (float* to = snapshot_of<C>(p, work_of<C>(smem), 0, INT32_MAX)) me.store(to);
    const HeadSpan same = span_of<C, false>(p, work_of<C>(smem), 0); /* computed again to save registers in the loop */
    if (float* to = last_state<C>(p, same, same.ends)) me.store(to);
}

template <class C, bool MIXES = false>
GT_DEV void hopper_pass(const TensorParams& p) {
#if GT_SM90A
    const uint32_t smem = smem_base();
    init_work<C>(smem, block_x());
    if (uniform(warp_id()) < C::PRODUCER_WARPS) { /* producer warps read no output of earlier kernels in the chain */
        take_work<C>(p, smem, [&](int work) { hopper_produce<C>(p, smem, work); });
    } else {
        wait_for_chain();
        take_work<C>(p, smem, [&](int work) { hopper_consume<C, MIXES>(p, smem, work); });
    }
#else
    (void)p;
    __trap();
#endif
}

/* In code for other architectures these kernels only trap, and have a launch bound of one warp: see
 * Device::runs_sm90a. */
template <class C>
GT_KERNEL(GT_SM90A ? C::THREADS : 32, 1)
forward_hopper_kernel(const GT_GRID_CONSTANT TensorParams p) {
    hopper_pass<C>(p);
}

template <class C>
GT_KERNEL(GT_SM90A ? C::THREADS : 32, 1)
mixed_hopper_kernel(const GT_GRID_CONSTANT TensorParams p) {
    hopper_pass<C, true>(p);
}

template <class C>
GT_KERNEL(GT_SM90A ? C::THREADS : 32, 1)
states_hopper_kernel(const GT_GRID_CONSTANT TensorParams p) {
    hopper_pass<C>(p);
}

} /* namespace wkv6 */
} /* namespace gt */

#endif
