/* gt/wkv6/backward.cuh - backward of a chunk, on tensor cores: N = V in 32, 64, 128.
 *
 * The kernel processes all chunks of 64 tokens in parallel, since S before and G after each chunk are known.  A chunk
 * has four sub-chunks of 16 tokens; a and b below number them.  Let c_t = -log2 of the decays before token t of its
 * sub-chunk, c_16 = -log2 of the decay over the whole sub-chunk, and E = 2^-c_16.  Then
 *     R_t = r_t 2^-c_t (from the sub-chunk's start)        K_t = k_t 2^(c_(t+1) - c_16) (to its end)
 *     C_ij = <dy_i, v_j>
 * K never exceeds k.  R never exceeds r if the scale of y is 1.  Between sub-chunks every term gets one factor E for
 * each sub-chunk that it crosses, by Horner's rule:
 *     X_a = (..((S dy_a . E_0 + C_a0 K_0) . E_1 + C_a1 K_1) ..) . E_a + tril(C_aa) K_a
 *     Z_b = (..((G v_b . E_3 + C_3b^T R_3) . E_2 + C_2b^T R_2) ..) . E_b + triu(C_bb^T) R_b
 *     dr_i = 2^-c_i (2^c_16 X_i) + k_(i-1) C_(i,i-1) + u k_i C_ii
 *     dk_j = 2^c_(j+1) Z_j + r_(j+1) C_(j+1,j) + u r_j C_jj
 *     dv_b = (K_b 2^c_16 R_b^T)' dy_b + K_b R_(b+1)^T dy_(b+1) + K_b E_(b+1) R_(b+2)^T dy_(b+2) .. + K_b E.. G
 * (..)' keeps the pairs with later tokens i > j and has the bonus sum_n r u k on the diagonal.
 * Neighbours i = j+1 have no decay between them.  X and Z omit these pairs and i = j: tril and triu begin two off the
 * diagonal.  So every term of X and Z contains at least one decay.
 * dg_t sums the pairs of tokens that span token t.  dg_0 has the pairs that span the chunk's first token.  At every
 * further token some pairs begin and some end:
 *     dg_0 = E_0..E_3 . rowsum(S . G) + sum_{i>0} R_i (S dy_i)
 *     dg_t = dg_(t-1) + K_(t-1) 2^c_16 Z_(t-1) - R_t 2^c_16 X_t
 * The subtraction removes only terms that are in dg of some token of the chunk.  A pair has the same rounded operands
 * in X and in Z, so dg subtracts the same value that it added, up to fp32's rounding.
 * STRONG_DECAY_LIMIT limits c_16, as in forward.  A slice of a chunk takes the strong-decay path
 * (backward_strong_decay.cuh) if a sub-chunk exceeds the limit, or if its raw decays differ too much (is_strong).
 * The scale s of y is a factor of R, which is r_t 2^-(c_t - log2 s).  So Z and A contain s; G contains s from the
 * reverse state pass (states.cuh).  X does not contain s, so the last factor of dr contains s.  The products C_tt and
 * C_(t,t-1), and u in the bonus, are multiplied by s separately.
 *
 * Rounding in bf16.  Two rounding errors cause half of the error of dw; for a single head this is more than the limit.
 * The rounding of S adds the same error to dg of all tokens of the chunk, in channels with slow decay.  The rounding of
 * G causes an error of dg that grows from the chunk's start to its end.  The reverse state pass has G in fp32, and S
 * before and after the chunk.  From its row sums this kernel gets, with E = E_0..E_3,
 *     lost = E . rowsum((G - bf16(G)) . (S after - S before))       end = rowsum(S after . G)
 * `lost` approximates the error of dg_64 that the rounding of G causes.  `end` approximates dg_64 from another S, which
 * has another rounding error.  So
 *     dg_t += t/64 . lost + E/2 . (end - lost - dg_64)
 * where t is the first token of a part of a sub-chunk.  E is a factor because the past counts less in channels that
 * forget faster.  The last chunk of a sequence has no `end`: its G is 0, so S causes no error there.  The first chunk
 * omits the correction if S before it is 0, because then S causes no error either (and dg_0 = 0).
 *
 * grid: (chunk slots)*B*H, so that neighbouring blocks read whole rows of tokens.  For packed sequences the grid is
 * smaller (most_blocks), and blocks take work in turn.  block: 8 warps.  Phases of a chunk, with barriers between them:
 *   copy      Two warps copy each tensor.  The block waits for r, k, w first, and for v, dy, S, G one phase later.
 *   prepare   A thread has 2 channels of PART tokens.  It computes R, K, E, 2^c_16 and its part of the bonus.
 *   products  For every sub-chunk one warp computes dv, and another warp computes X and then Z.
 *   store     X and Z overwrite v, dy, S, G in shared memory.
 *   finish    A thread has the same tokens as in prepare.  It computes dr, dk and du, then running sums of dg, over
 *             parts by shuffles and over sub-chunks by shared memory, then dw.
 * A block processes its channels in slices of 64.  N = 128 has two slices, and registers keep dv across them.  bf16
 * with N = 128 has one slice if a block may have 227 KB: then C and A are computed once, with half as many barriers.
 * With 99 KB, slices have 32 channels.  In that case G does not lie in outputs (states.cuh), since dk of the first
 * slice would overwrite G of the second.
 * registers: X and Z [64,16] as accumulators, 64; dv N/2; K as left operand and its factors, 48.  N = 128 in one slice:
 * 128, 64, 96.
 * operands: S, G, v, dy have 16 bits; C, R, K, A are tf32.
 *   bf16: S and G are stored as bf16.  Their rounding error is 2^-9, as for outputs.  Row sums come from the reverse
 *   state pass, where G is fp32.
 *   f16: S is stored as fp32 and rounded here.  The reverse state pass rounds G to f16 with a power of two for each
 *   row.  This kernel computes rowsum(S . G) from the fp32 S.
 *   X and Z are computed transposed, channels by tokens.  R and K are the left operands, and C^T, in the order of its
 *   accumulators, is the right operand.
 *   R, K, X, Z lie in fragments of two tokens by two channels, 16 bytes.  A fragment is a left operand, or two right
 *   operands (of A), or a lane's accumulators of a tile.
 * shared, N = 64: R, K [64,64] fp32 32 KB, r, k, w 24 KB, v, dy 16 KB, S, G 16 KB, 10 KB of vectors: two blocks on a
 * multiprocessor.  N = 128 in one slice: R, K 64 KB, r, k, w 48 KB, v, dy 32 KB, S, G 64 KB, 18 KB of vectors; in four
 * slices: 16, 12, 32, 16, 16 KB.
 * tensor cores per sub-chunk, N = 64: 2 x (32 + 20) m16n8k16, 2 x 40 + 64 + 80 m16n8k8.
 * bytes: inputs once, gradients once, states once: 1.4 KB per token and head at N = 64, of which G takes 128 bytes.
 * fp32 activations: see backward_fp32.cuh for the differences. */
#ifndef GT_WKV6_BACKWARD_CUH
#define GT_WKV6_BACKWARD_CUH

#include "backward_fp32.cuh"

namespace gt {
namespace wkv6 {

/* ---- dv of 16-bit activations ---- */

/* dv += (K . factor) G */
template <class C>
GT_DEV void add_from_G(const BackwardBlock<C>& me, SubChunkK<C>& left, float (&dv)[C::VALUE_TILES][4]) {
    using Unpack = Element<typename C::T>;
    const int matrix = lane_id() / 8, i = lane_id() % 8;
    if constexpr (C::LARGE) {
        left.scale_factor(1.0f / TF32_MEAN);
        GT_UNROLL
        for (int kk = 0; kk < C::TILES; kk += 2) {
            float x[2][4];
            GT_UNROLL
            for (int e = 0; e < 2; e++) {
                float a[4];
                left.scaled(kk + e, a);
                x[e][0] = a[0], x[e][1] = a[2], x[e][2] = a[1], x[e][3] = a[3];
            }
            const uint32_t rows = me.smem + C::G + left_piece<C::N>();
            TwoTerms(x[0], x[1]).multiply(dv, add_16_rows<C::N>(rows, kk / 2));
        }
    } else {
        GT_UNROLL
        for (int kk = 0; kk < C::TILES; kk++) {
            float a[4];
            left.scaled(kk, a);
            GT_UNROLL
            for (int x = 0; x < C::N / 32; x++) {
                uint32_t g[4];
                ldmatrix_x4_trans(g, me.smem + C::G + row_piece<C::N>(8 * kk + i, 4 * x + matrix));
                GT_UNROLL
                for (int y = 0; y < 4; y++) mma_tf32(dv[4 * x + y], a, Unpack::lo(g[y]), Unpack::hi(g[y]));
            }
        }
    }
}

/* SUMS_A: adds A of the warp's sub-chunk and sub-chunk a to the sum over the previous slices.  Returns false while more
 * slices follow. */
template <class C>
GT_DEV bool sum_pairs(const BackwardBlock<C>& me, int a, float (&A)[2][4]) {
    const uint32_t addresses =
        me.smem + C::KEPT_A + 4 * SUB_CHUNK * SUB_CHUNK * (a * (a - 1) / 2 + me.sub_chunk) + 16 * lane_id();
    const bool is_last = me.slice0 + C::CHANNELS == C::N;
    GT_UNROLL
    for (int e = 0; e < 2; e++) {
        if (me.slice0 > 0) {
            const float4 x = lds<float4>(addresses + 512 * e);
            A[e][0] += x.x, A[e][1] += x.y, A[e][2] += x.z, A[e][3] += x.w;
        }
        if (!is_last) sts<float4>(addresses + 512 * e, {A[e][0], A[e][1], A[e][2], A[e][3]});
    }
    return is_last;
}

/* Adds the slice's channels to dv of the sub-chunk.  Rows g and g + 8 are tokens 2g and 2g + 1. */
template <class C, bool STRONG_DECAY>
GT_DEV void add_slice_dv(const BackwardParams& p, const BackwardBlock<C>& me, float (&dv)[C::VALUE_TILES][4]) {
    const int b = me.sub_chunk;
    const uint32_t row = me.smem + C::K + fragment_of<C::CHANNELS>(SUB_CHUNK / 2 * b + me.g, 2 * me.j);
    SubChunkK<C> left;
    float A[2][4];
    GT_UNROLL
    for (int kk = 0; kk < C::TILES; kk++) {
        const float4 fragment = lds<float4>(add_8(row, kk));
        left.K[kk][0] = fragment.x, left.K[kk][1] = fragment.z, left.K[kk][2] = fragment.y, left.K[kk][3] = fragment.w;
    }
    if constexpr (STRONG_DECAY) {
        strong_pairs<C>(p, me, A);
    } else {
        left.set_factor(TF32_MEAN);
        left.multiply_factor(me, C::GROWTH + 4 * b * C::CHANNELS);
        pair_products<C>(me, left, b, A);
    }
    set_bonus<C>(me, A);
    add_dv<C>(me, A, b, dv);
    left.set_factor(TF32_MEAN);
    for (int a = b + 1; a < SUB_CHUNKS; a++) {
        pair_products<C>(me, left, a, A);
        if (!C::SUMS_A || sum_pairs<C>(me, a, A)) add_dv<C>(me, A, a, dv);
        left.multiply_factor(me, C::E + 4 * a * C::CHANNELS);
    }
    if constexpr (C::ROUNDED) left.multiply_factor(me, C::G_SCALE);
    add_from_G<C>(me, left, dv);
}

template <class C>
GT_DEV void store_dv(const BackwardParams& p, const BackwardBlock<C>& me, const float (&dv)[C::VALUE_TILES][4]) {
    const int tokens = me.tokens();
    GT_UNROLL
    for (int half = 0; half < 2; half++) {
        const int t = SUB_CHUNK * me.sub_chunk + 2 * me.g + half;
        if (!p.tensors[OF_DV].data || t >= tokens) continue;
        typename C::T* to = row_of<typename C::T>(p, me, OF_DV, t) + 2 * me.j;
        GT_UNROLL
        for (int i = 0; i < C::VALUE_TILES; i++)
            stg<uint32_t>(to + 8 * i, Element<typename C::T>::pack(dv[i][2 * half], dv[i][2 * half + 1]));
    }
}

/* ---- the end of a slice, and the kernel ---- */

/* Sums du of the slice over its sub-chunks.  All sub-chunks must have stored their share before. */
template <class C>
GT_DEV void store_du(const BackwardParams& p, const BackwardBlock<C>& me) {
    if (!p.du || thread_id() >= C::CHANNELS) return;
    float x = 0.0f;
    for (int a = 0; a < SUB_CHUNKS; a++) x += lds<float>(me.smem + C::DU + 4 * (a * C::CHANNELS + thread_id()));
    p.du[(int64_t)lds<int>(me.smem + C::DU_ROW) * C::N + me.slice0 + thread_id()] = x;
}

/* Computes the thread's part of dr, dk, dw and du, from X and Z of the slice. */
template <class C>
GT_DEV void finish_part(const BackwardParams& p, const BackwardBlock<C>& me, const ChannelPart<C>& own,
                        const RawPart<C>& raw, const typename ChannelPart<C>::Decays& w) {
    using T = typename C::T;
    using W = typename C::W;
    using Raw = Pair<T>;
    constexpr int PART = C::PART;
    const int left = me.tokens() - own.t0, n = me.slice0 + own.channel;
    const uint32_t sub_chunk_sums = me.smem + 4 * (own.sub_chunk * C::CHANNELS + own.channel);
    const float2 growth = lds<float2>(sub_chunk_sums + C::GROWTH);
    const float2 u = lds<float2>(me.smem + C::U + 4 * (me.slice0 + own.channel));
    float h[PART][2], c[2], total[2];
    own.decays(p, w, h, c, total);
    float to_end[2] = {total[0] - c[0] + p.log2_scale, total[1] - c[1] + p.log2_scale}; /* log2 of the factor of dr */
    T* dr_row = row_of<T>(p, me, OF_DR, own.t0) + n;
    T* dk_row = row_of<T>(p, me, OF_DK, own.t0) + n;
    const int left_dr = p.tensors[OF_DR].data ? left : 0, left_dk = p.tensors[OF_DK].data ? left : 0;
    Raw k_before = raw.k(-1), r = raw.r(0);
    float2 near = lds<float2>(near_fragment(me, own.t0));
    /* dg is divided by 2^c_16, and still lacks the sums of earlier parts. */
    float2 dg[PART], sum = {0.0f, 0.0f}, du = {0.0f, 0.0f};
    GT_UNROLL
    for (int i = 0; i < PART; i += 2) {
        const uint32_t address = me.smem + fragment_of<C::CHANNELS>((own.t0 + i) / 2, own.channel);
        const float4 R2 = lds<float4>(address + C::R), K2 = lds<float4>(address + C::K);
        const float4 X2 = lds<float4>(address + C::X), Z2 = lds<float4>(address + C::Z);
        GT_UNROLL
        for (int e = 0; e < 2; e++) {
            const int t = own.t0 + i + e;
            const auto rows = [=](float4 x) { return e ? float2{x.z, x.w} : float2{x.x, x.y}; };
            const auto columns = [=](float4 x) { return e ? float2{x.y, x.w} : float2{x.x, x.z}; };
            const float2 R = C::TF32X3 ? columns(R2) : rows(R2), K = C::TF32X3 ? columns(K2) : rows(K2);
            const float2 X = columns(X2), Z = columns(Z2);
            const Raw k = raw.k(i + e), r_next = raw.r(i + e + 1);
            const float2 next = lds<float2>(near_fragment(me, t + 1)); /* .y is 0 for the last token */
            const float2 k_near = {k.lo() * near.x, k.hi() * near.x};
            const float2 r_near = {r.lo() * near.x, r.hi() * near.x};
            Vec<T, 2> packed;
            packed.set({fma_rn(u.x, k_near.x, fma_rn(k_before.lo(), near.y, X.x * ex2_approx(to_end[0]))),
                        fma_rn(u.y, k_near.y, fma_rn(k_before.hi(), near.y, X.y * ex2_approx(to_end[1])))});
            if (i + e < left_dr) stg<Vec<T, 2>>(dr_row, packed);
            GT_UNROLL
            for (int x = 0; x < 2; x++) c[x] += h[i + e][x], to_end[x] -= h[i + e][x];
            packed.set({fma_rn(u.x, r_near.x, fma_rn(r_next.lo(), next.y, Z.x * ex2_approx(c[0]))),
                        fma_rn(u.y, r_near.y, fma_rn(r_next.hi(), next.y, Z.y * ex2_approx(c[1])))});
            if (i + e < left_dk) stg<Vec<T, 2>>(dk_row, packed);
            dr_row += (int)p.tensors[OF_DR].stride.t;
            dk_row += (int)p.tensors[OF_DK].stride.t;
            du.x = fma_rn(r.lo(), k_near.x, du.x);
            du.y = fma_rn(r.hi(), k_near.y, du.y);
            if (t > 0) { /* subtract the pairs that end at this token */
                sum.x = fma_rn(-R.x, X.x, sum.x);
                sum.y = fma_rn(-R.y, X.y, sum.y);
            }
            dg[i + e] = sum;
            sum.x = fma_rn(K.x, Z.x, sum.x);
            sum.y = fma_rn(K.y, Z.y, sum.y);
            k_before = k, r = r_next, near = next;
        }
    }
    sum = {sum.x * growth.x, sum.y * growth.y};
    float2 before = {0.0f, 0.0f}; /* sum over the earlier parts of the sub-chunk; `sum` will also include this part */
    for (int bit = C::LANES; bit < 32; bit *= 2) {
        du.x += shfl_xor(du.x, bit);
        du.y += shfl_xor(du.y, bit);
        const float2 x = {shfl_up(sum.x, bit), shfl_up(sum.y, bit)};
        if (lane_id() < bit) continue;
        sum = {sum.x + x.x, sum.y + x.y};
        before = {before.x + x.x, before.y + x.y};
    }
    if (own.part == 0) sts<float2>(sub_chunk_sums + C::DU, du);
    if (own.part == C::SUB_CHUNK_PARTS - 1) sts<float2>(sub_chunk_sums + C::SUB_CHUNK_SUMS, sum);
    float2 sums[C::SUMS] = {};
    GT_UNROLL
    for (int i = 0; i < C::SUM_PARTS; i++) {
        const float2 x = rowsum_part<float2>(me, i, own.channel);
        sums[i / C::ROWSUM_PARTS].x += x.x;
        sums[i / C::ROWSUM_PARTS].y += x.y;
    }
    /* first: dg of the chunk's first token; further below, dg of the part's first token */
    float2 first = sums[0], decay = {1.0f, 1.0f};
    GT_UNROLL
    for (int a = SUB_CHUNKS - 1; a >= 0; a--) { /* Horner's rule from the last sub-chunk */
        const uint32_t address = me.smem + 4 * (a * C::CHANNELS + own.channel);
        const float2 E = lds<float2>(address + C::E), x = lds<float2>(address + C::FIRST);
        first.x = fma_rn(first.x, E.x, x.x);
        first.y = fma_rn(first.y, E.y, x.y);
        decay = {decay.x * E.x, decay.y * E.y};
    }
    float2 end; /* the correction end - lost - dg_64; the sums of the sub-chunks are subtracted further below */
    if constexpr (C::KEEPS_BF16) {
        const float2 lost = {decay.x * sums[1].x, decay.y * sums[1].y};
        const float share = 1.0f / CHECKPOINT * (float)own.t0;
        end = {sums[2].x - first.x - lost.x, sums[2].y - first.y - lost.y};
        decay.x = sums[2].x == 0.0f ? 0.0f : 0.5f * decay.x;
        decay.y = sums[2].y == 0.0f ? 0.0f : 0.5f * decay.y;
        before = {fma_rn(share, lost.x, before.x), fma_rn(share, lost.y, before.y)};
    }
    first = {first.x + before.x, first.y + before.y};
    sync_threads();
    store_du<C>(p, me);
    if (!p.tensors[OF_DW].data) return;
    GT_UNROLL
    for (int a = 0; a < (C::KEEPS_BF16 ? SUB_CHUNKS : SUB_CHUNKS - 1); a++) {
        const float2 x = lds<float2>(me.smem + 4 * (a * C::CHANNELS + own.channel) + C::SUB_CHUNK_SUMS);
        if (C::KEEPS_BF16) end = {end.x - x.x, end.y - x.y};
        if (a < own.sub_chunk) first = {first.x + x.x, first.y + x.y};
    }
    if (C::KEEPS_BF16) first = {fma_rn(decay.x, end.x, first.x), fma_rn(decay.y, end.y, first.y)};
    W* row = row_of<W>(p, me, OF_DW, own.t0) + n;
    const float unit = p.raw ? -LN_2 : 1.0f; /* raw: log2 d = -h, and the derivative of h by w is h */
    first = {unit * first.x, unit * first.y};
    const float2 scale = {unit * growth.x, unit * growth.y};
    GT_UNROLL
    for (int i = 0; i < PART; i++) {
        float2 dw = {fma_rn(dg[i].x, scale.x, first.x), fma_rn(dg[i].y, scale.y, first.y)};
        if (p.raw) dw = {dw.x * h[i][0], dw.y * h[i][1]};
        Vec<W, 2> packed;
        packed.set({dw.x, dw.y});
        if (i < left) stg<Vec<W, 2>>(row, packed);
        row += (int)p.tensors[OF_DW].stride.t;
    }
}

/* Computes dv of the slice, and stores X and Z in shared memory.  The caller synchronises before it reads them. */
template <class C, bool STRONG_DECAY>
GT_DEV void make_products(const BackwardParams& p, const BackwardBlock<C>& me, StateRows<C>& states,
                          float (&dv)[C::VALUE_TILES][4]) {
    if constexpr (C::TF32X3) {
        fp32_products<C, STRONG_DECAY>(p, me, states, dv);
    } else if (me.makes_dv()) {
        if (p.tensors[OF_DV].data) add_slice_dv<C, STRONG_DECAY>(p, me, dv);
        if (me.slice0 + C::CHANNELS == C::N) store_dv<C>(p, me, dv);
        sync_threads();
    } else {
        Sums<C> X, Z;
        make_X<C, STRONG_DECAY>(p.scale, me, X);
        make_Z<C, STRONG_DECAY>(me, Z);
        sync_threads(); /* all warps have read v, dy, S, G */
        store_sums<C>(me, C::X, X);
        store_sums<C>(me, C::Z, Z);
    }
}

/* dv of the warp's sub-chunk, summed over the slices.  With a single slice there is no sum to keep. */
template <class C, bool KEPT = (C::SLICES > 1)>
struct ChunkValues {
    float dv[C::VALUE_TILES][4];
};
template <class C>
struct ChunkValues<C, false> {};

template <class C, bool STRONG_DECAY>
GT_DEV void make_slice(const BackwardParams& p, const BackwardBlock<C>& me, StateRows<C>& states,
                       ChunkValues<C>& values) {
    if constexpr (C::SLICES > 1) {
        make_products<C, STRONG_DECAY>(p, me, states, values.dv);
    } else {
        ChunkValues<C, true> own = {};
        make_products<C, STRONG_DECAY>(p, me, states, own.dv);
    }
}

/* Processes a whole slice on the strong-decay path.  A separate function keeps its registers out of the usual path. */
template <class C>
GT_DEV_CALL ChunkValues<C> strong_decay_slice(const BackwardParams& p, BackwardBlock<C> me, ChunkValues<C> values) {
    constexpr int TOGETHER = C::THREADS / C::CHANNELS; /* sub-chunks that the block processes at a time */
    const int first = thread_id() / C::CHANNELS, channel = thread_id() % C::CHANNELS;
    StateRows<C> states;
    GT_NO_UNROLL
    for (int sub_chunk = first; sub_chunk < SUB_CHUNKS; sub_chunk += TOGETHER)
        prepare_strong_column<C>(p, me, sub_chunk, channel);
    sync_threads();
    make_slice<C, true>(p, me, states, values);
    sync_threads();
    GT_NO_UNROLL
    for (int sub_chunk = first; sub_chunk < SUB_CHUNKS; sub_chunk += TOGETHER)
        finish_strong_column<C>(p, me, sub_chunk, channel);
    sync_threads();
    store_du<C>(p, me);
    return values;
}

/* Processes the chunk at an index of work, if there is one. */
template <class C>
GT_DEV void backward_chunk(const BackwardParams& p, int work) {
    BackwardBlock<C> me;
    ChannelPart<C> own;
    me.smem = smem_base();
    if (C::KEEPS_WORK && thread_id() == 0) sts<int>(me.smem + C::WORK, work);
    me.sub_chunk = me.sub_chunk_of_warp();
    me.g = lane_id() / 4;
    me.j = lane_id() % 4;
    own.set_addresses();

    ChunkValues<C> values = {};
    for (me.slice0 = 0; me.slice0 < C::N; me.slice0 += C::CHANNELS) {
        typename ChannelPart<C>::Decays w;
        /* Initialise all rows: otherwise registers that a warp does not load would stay live across iterations. */
        StateRows<C> states = {};
        {
            const ChunkCoordinates here = find_chunk<C>(p, work);
            if (here.chunk.sequence < 0) { /* the slot has no chunk */
                wait_for_chain();
                if (C::KEEPS_WORK) sync_threads();
                return;
            }
            me.index = here.index, me.G_index = here.G_index;
            if constexpr (C::TF32X3) { /* load r, k, w to registers while other inputs are copied */
                const int left = here.tokens() - own.t0;
                const auto row = [&](int tensor) {
                    return global_row<float>(p, here, tensor, own.t0) + me.slice0 + own.channel;
                };
                own.load_rows(p, row(OF_W), left, w);
                const RawPart<C> raw(p, own, left, row(OF_R), row(OF_K));
                copy_fp32_inputs<C>(p, me, here);
                sync_threads(); /* u has arrived */
                prepare_part<C>(p, me, own, raw, w);
                if (me.makes_dv() && states.EARLY) states.load(p, me);
            } else {
                copy_inputs<C>(p, me, here);
            }
            if constexpr (C::ROUNDED) {
                wait_for_chain();
                round_states<C>(p, me, here);
            }
        }
        if constexpr (!C::TF32X3) {
            cp_async_wait<1>();
            sync_threads(); /* r, k, w have arrived, and the chunk's addresses are stored */
            own.load(p, me, w);
            prepare_part<C>(p, me, own, RawPart<C>(p, me, own), w);
        }
        cp_async_wait<0>();
        sync_threads();
        const uint4 x = lds<uint4>(me.smem + C::STRONG_DECAY), y = lds<uint4>(me.smem + C::STRONG_DECAY + 16);
        if (x.x | x.y | x.z | x.w | y.x | y.y | y.z | y.w) {
            values = strong_decay_slice<C>(p, me, values);
            continue;
        }
        make_slice<C, false>(p, me, states, values);
        own.load(p, me, w);
        const RawPart<C> raw(p, me, own);
        sync_threads();
        finish_part<C>(p, me, own, raw, w);
    }
}

template <class C>
GT_DEV void init_chunk_mbarriers(uint32_t smem, bool again = false) {
    if (!C::TF32X3 || thread_id() != 0) return;
    if (again) {
        mbarrier_inval(smem + C::S_READ);
        mbarrier_inval(smem + C::G_HERE);
    }
    mbarrier_init(smem + C::S_READ, C::THREADS);
    mbarrier_init(smem + C::G_HERE, C::THREADS / 2);
}

template <class C>
GT_KERNEL(C::THREADS, C::BLOCKS)
backward_tensor_kernel(const GT_GRID_CONSTANT BackwardParams p) {
#if GT_SM80_KERNELS
    int work = block_x();
    if (C::TF32X3) wait_for_chain(); /* 16 bits: waits where S and G are read */
    init_chunk_mbarriers<C>(smem_base());
    /* The goto gives this loop two entries, so that the compiler hoists nothing out of it.  take_work hides the second
     * entry from ptxas; here that would cost spills. */
    if (p.sequences.cu_seqlens) goto next;
here:
    backward_chunk<C>(p, work);
    if (!p.sequences.cu_seqlens) return;
    work = (C::KEEPS_WORK ? lds<int>(smem_base() + C::WORK) : work) + grid_x();
next:
    if (!has_chunk(p, work)) {
        wait_for_chain(); /* All blocks wait, so that later kernels still run after earlier ones. */
        return;
    }
    sync_threads(); /* no thread reads shared memory any more */
    init_chunk_mbarriers<C>(smem_base(), true);
    goto here;
#else
    (void)p;
    __trap();
#endif
}

} /* namespace wkv6 */
} /* namespace gt */

#endif
