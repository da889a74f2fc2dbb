/* gt/ssd/mma/fp32_forward.cuh - ssd forward on tensor cores, with fp32 activations: products of split numbers
 * (fp32_chunk.cuh).  choice.cuh has the conditions.  The file also has the passes that compute only states, as in
 * states.cuh.
 *
 * grid strands*G*pairs, block 8 warps: two units of one group, 4 warps each, as in forward_tensor_kernel.  A chunk of
 * 32 tokens takes four phases:
 *     1  x, B, C have arrived.  Six warps split rows in place, and two compute decay factors.  -- barrier
 *     2  S = C B^T, once for both units: six products of 16 x 8 on and under the diagonal, one for each of six warps.
 *        The other two warps compute the weights of the update.  -- barrier
 *     3  M_ts = S_ts L_ts Delta_s of each unit, 8 rows per warp, split with a power for each row.  If Dskip is per
 *        head, it is added on the diagonal.  y = pre_t (C_t H), 32 tokens x 16 rows per warp; the accumulators of H are
 *        split into the right operand.  Then H <- E H.  -- barrier
 *     4  y += M x (and Dskip x if Dskip is per channel), times silu(z).  H += (x Delta suf)^T B.
 * Copies of the next chunk's x and B start at the beginning of phase 1.  C has only one stage, so its copy starts at
 * the end of phase 3.
 * N > 128, and BACKWARD with z: as in forward_tensor_kernel.
 *
 * registers, N = 128: H 64, y 16, operands 24 (phase 3); v 16, sums 8, operands 8 (phase 4).  Two blocks share a
 * multiprocessor.  On devices where only one block fits, the block may use all registers.
 * shared memory, N = 128: x 2 x 16 KB, B 2 x 16 KB, C 16 KB, M 6 KB, S 4 KB, factors 8 KB.  In all 98 KB.
 * tensor cores per warp and chunk, N = 128, m16n8k16: 24 for S (6 of 8 warps), 96 for y from the state, 18 for y from
 * pairs, 96 for the update.  In all 228, or 28.5 per token and head.
 * issue slots per token and head, N = 128, profiled on compute capability 9.0: 317 for forward, 141 for passes over
 * states.
 * Each phase of forward computes the warp's index and the addresses of the chunk again.  If the compiler spilled these
 * numbers, a warp would wait for L2.
 * bytes per token and head: x, y (and z) 4 P each.  B and C together 8 N / heads of a group from memory, and 4 N from
 * L2.  Checkpoints P N / 32.  Partial sums as in forward_tensor_kernel.
 * Every sum has one fixed order, so results are deterministic. */
#ifndef GT_SSD_MMA_FP32_FORWARD_CUH
#define GT_SSD_MMA_FP32_FORWARD_CUH

#include "fp32_chunk.cuh"
#include "state.cuh"

namespace gt {
namespace ssd {

/* ---- a block's position ----------------------------------------------------------------------------------------- */

/* Cursor for chunks of SHORT tokens.  It also keeps the offsets of a segment's first rows in tensors, in elements. */
struct ShortCursor : Cursor {
    enum Base {
        LEFT = 0,
        OUT = MMA_UNITS,
        RIGHT = 2 * MMA_UNITS,
        C,
        BASES
    }; /* LEFT: x or dy, OUT: y, [MMA_UNITS] each; RIGHT: B, or C in reverse; C: C of forward */
    static constexpr int BYTES = Cursor::BYTES + 8 * BASES;
    GT_METHOD int64_t token(int chunk) const { return lds<int64_t>(addresses + 8) + (int64_t)chunk * SHORT; }
    GT_METHOD int64_t left(int chunk) const { return lds<int64_t>(addresses + 16) - token(chunk); }
    GT_METHOD int tokens(int chunk) const { return left(chunk) < SHORT ? (int)left(chunk) : SHORT; }
    GT_METHOD int chunks() const { return (int)((left(0) + SHORT - 1) / SHORT); }
    GT_METHOD int64_t base(int i) const { return lds<int64_t>(addresses + Cursor::BYTES + 8 * i); }

    /* One thread calls these functions, after enter() and before a barrier. */
    GT_METHOD void keep_base(int i, int64_t elements) const {
        sts<int64_t>(addresses + Cursor::BYTES + 8 * i, elements);
    }
    GT_METHOD void keep_units(Base i, const gt_stride& stride) const {
        for (int unit = 0; unit < units(); unit++)
            keep_base(i + unit, offset_of(stride, b(), token(0), head(unit)) + row0(unit));
    }
    GT_METHOD void keep_group(Base i, const gt_stride& stride) const {
        keep_base(i, offset_of(stride, b(), token(0), group()));
    }
};

/* Starts to copy a chunk's tiles of x or dy, one for each unit.  tokens: the number of tokens in the chunk. */
GT_DEV void load_split_units(const Problem& in, const void* data, const gt_stride& stride, uint32_t tiles,
                             const ShortCursor& cursor, int chunk, int tokens) {
    constexpr unsigned PIECES = 64 / 4;
    const unsigned thread = thread_here();
    const float* from = static_cast<const float*>(data) +
                        (((int64_t)chunk * SHORT + thread / PIECES) * stride.t + 4 * (thread % PIECES));
    GT_UNROLL
    for (int unit = 0; unit < MMA_UNITS; unit++) {
        if (unit >= cursor.units()) continue;
        load_split_rows<64>(tiles + unit * SplitTile<64>::BYTES, from + cursor.base(ShortCursor::LEFT + unit), stride.t,
                            tokens, in.P - cursor.row0(unit));
    }
}

template <int NP>
GT_DEV void load_split_group(const Problem& in, const void* data, const gt_stride& stride, uint32_t tile,
                             const ShortCursor& cursor, ShortCursor::Base base, int chunk, int tokens) {
    constexpr unsigned PIECES = NP / 4;
    const unsigned thread = thread_here();
    const int64_t from = ((int64_t)chunk * SHORT + thread / PIECES) * stride.t + 4 * (thread % PIECES);
    load_split_rows<NP>(tile, static_cast<const float*>(data) + (cursor.base(base) + from), stride.t, tokens,
                        in.columns);
}

/* Loads dt of tokens 2 lane and 2 lane + 1 of a chunk.  Lanes from SHORT / 2 on have no tokens. */
GT_DEV void load_dt(const Problem& in, const ShortCursor& cursor, int unit, int chunk, float (&dt)[2]) {
    load_dt(in, offset_of(in.dt_stride, cursor.b(), cursor.token(chunk), cursor.head(unit)), cursor.tokens(chunk), dt);
}

/* The address of a unit's fp32 checkpoint.  It holds the state before chunk `chunk`, or in reverse the gradient after
 * it. */
GT_DEV float* plain_slot(const Problem& in, const ShortCursor& cursor, const Checkpoints& checkpoints, int unit,
                         int chunk) {
    return checkpoints.plain + unit_slot(in, cursor, unit, chunk / (CHUNK / SHORT)) * in.P * in.N;
}

/* One warp computes the weights of a unit's update: Delta suf, or pre in reverse. */
GT_DEV void split_update_weights(uint32_t weights, uint32_t addresses, uint32_t left, uint32_t right, bool reverse) {
    const int t = 2 * here();
    float2 a = {0.0f, 0.0f}, b = a, weight = a;
    if (t < SHORT) {
        a = lds<float2>(left + 4 * t);
        b = lds<float2>(right + 4 * t);
        const float2 first = lds<float2>(addresses + 4 * ((reverse ? Factors::PRE : Factors::DELTA) + t));
        const float2 suf = reverse ? float2{1.0f, 1.0f} : lds<float2>(addresses + 4 * (Factors::SUF + t));
        weight = {first.x * suf.x, first.y * suf.y};
    }
    make_split_weights(weights, weight, a, b);
}

/* ---- forward ---------------------------------------------------------------------------------------------------- */

/* Offsets in shared memory, in bytes.  Comments give the shapes of arrays. */
template <int NP_>
struct ForwardSplitTile {
    static constexpr int NP = NP_, TILE_X = SplitTile<64>::BYTES, TILE_B = SplitTile<NP>::BYTES;
    static constexpr int PAIR_BLOCKS = SHORT_BLOCKS * (SHORT_BLOCKS + 1) / 2; /* blocks of 16 x 16 */
    static constexpr int M_BLOCK = BLOCK * TileShape<2 * BLOCK>::PITCH_BYTES; /* bytes of a block of split numbers */
    static constexpr int S_PITCH = 4 * (BLOCK + 4), S_BLOCK = BLOCK * S_PITCH;
    static constexpr int X = 0;                          /* [2 stages][MMA_UNITS] */
    static constexpr int B = X + 2 * MMA_UNITS * TILE_X; /* [2 stages] */
    static constexpr int C = B + 2 * TILE_B;
    static constexpr int M = C + TILE_B;                                     /* [MMA_UNITS][PAIR_BLOCKS] */
    static constexpr int S = M + MMA_UNITS * PAIR_BLOCKS * M_BLOCK;          /* [PAIR_BLOCKS] */
    static constexpr int FACTORS = S + PAIR_BLOCKS * S_BLOCK;                /* [MMA_UNITS] */
    static constexpr int WEIGHTS = FACTORS + MMA_UNITS * 4 * Factors::COUNT; /* [MMA_UNITS] */
    static constexpr int B_INVERSE = WEIGHTS + MMA_UNITS * 4 * Weights::COUNT, C_INVERSE = B_INVERSE + 4 * SHORT;
    static constexpr int X_INVERSE = C_INVERSE + 4 * SHORT;             /* [MMA_UNITS] */
    static constexpr int M_INVERSE = X_INVERSE + MMA_UNITS * 4 * SHORT; /* [MMA_UNITS] */
    static constexpr int DT = M_INVERSE + MMA_UNITS * 4 * SHORT;        /* [MMA_UNITS]: dt of the next chunk */
    static constexpr int CURSOR = DT + MMA_UNITS * 4 * SHORT;
    static constexpr int BYTES = CURSOR + ShortCursor::BYTES;
    static_assert(M % 128 == 0 && C % 128 == 0, "tiles begin at multiples of 128");
    static_assert(BYTES <= 99 * 1024, "fits every device with tensor cores for fp32 activations");
};

GT_DEV int short_block(int tb, int sb) { return tb * (tb + 1) / 2 + sb; }

/* Computes one of the six products of S, 16 tokens t by 8 tokens s.  number: 0 to 5. */
template <class Tile>
GT_DEV void make_split_S(uint32_t smem, uint32_t B, int number) {
    constexpr int NP = Tile::NP, WIDE = SplitTile<NP>::WIDE, LO = SplitTile<NP>::LO;
    const int tb = number < 2 ? 0 : 1, group = number < 2 ? number : number - 2; /* group: index of the 8 tokens s */
    const int lane = here(), g = lane / 4, j = lane % 4;
    float sums[3][4] = {}; /* one sum for each of the three products of split numbers, so that a product waits only for
                            * every third one */
    const uint32_t C = by_rows<WIDE>(smem + Tile::C), row = B + panel_at<2 * WIDE>(8 * group + lane % 8, lane / 8 % 2);
    GT_UNROLL
    for (int k = 0; k < NP / 16; k++) {
        SplitLeft c;
        uint32_t hi[2], lo[2];
        ldmatrix_x4(c.hi, block_at<WIDE>(C, tb, k));
        ldmatrix_x4(c.lo, block_at<WIDE>(C, tb, k + LO));
        ldmatrix_x2(hi, block_at<WIDE>(row, 0, k));
        ldmatrix_x2(lo, block_at<WIDE>(row, 0, k + LO));
        mma_f16(sums[0], c.lo, hi[0], hi[1]);
        mma_f16(sums[1], c.hi, lo[0], lo[1]);
        mma_f16(sums[2], c.hi, hi[0], hi[1]);
    }
    float S[4];
    GT_UNROLL
    for (int i = 0; i < 4; i++) S[i] = sums[2][i] + (sums[0][i] + sums[1][i]);
    const uint32_t to = smem + Tile::S + short_block(tb, group / 2) * Tile::S_BLOCK + 4 * (group % 2 * 8 + 2 * j);
    sts<float2>(to + g * Tile::S_PITCH, {S[0], S[1]});
    sts<float2>(to + (g + 8) * Tile::S_PITCH, {S[2], S[3]});
}

/* Computes M of 8 tokens t, from 8 group on.  A lane has one t and 8 tokens s.  skip: Dskip if it is per head, else 0.
 * On the diagonal of M, skip adds Dskip x to y. */
template <class Tile>
GT_DEV void make_split_M(uint32_t smem, int unit, int group, float skip) {
    const int lane = here(), j = lane % 4, t = 8 * group + lane / 4;
    const uint32_t addresses = smem + Tile::FACTORS + 4 * Factors::COUNT * unit;
    const int block = short_block(group / 2, j / 2), half = j % 2, row = t % BLOCK;
    const bool exists = j <= group; /* the group of s is not after the group of t */
    float M[8];
    GT_UNROLL
    for (int i = 0; i < 8; i++) M[i] = 0.0f;
    float largest = 0.0f;
    if (exists) {
        float from = lds<float>(smem + Tile::C_INVERSE + 4 * t);
        int to = Factors::DIAGONAL + 8 * t; /* where the factors of L for the 8 tokens s lie */
        if (j < group) {
            const bool same = j / 2 == group / 2; /* t and s lie in one block of 16 tokens */
            from *= lds<float>(addresses + 4 * ((same ? Factors::HALF : Factors::U) + t));
            to = (same ? Factors::HALF : Factors::V) + 8 * j;
        }
        GT_UNROLL
        for (int i = 0; i < 8; i += 4) {
            const int s = 8 * j + i;
            const float4 S =
                lds<float4>(smem + Tile::S + block * Tile::S_BLOCK + row * Tile::S_PITCH + 4 * (8 * half + i));
            const float4 L = lds<float4>(addresses + 4 * (to + i)),
                         delta = lds<float4>(addresses + 4 * (Factors::DELTA + s));
            const float4 b = lds<float4>(smem + Tile::B_INVERSE + 4 * s),
                         x = lds<float4>(smem + Tile::X_INVERSE + 4 * (SHORT * unit + s));
            M[i] = finite(S.x * b.x * from * (delta.x * x.x * L.x));
            M[i + 1] = finite(S.y * b.y * from * (delta.y * x.y * L.y));
            M[i + 2] = finite(S.z * b.z * from * (delta.z * x.z * L.z));
            M[i + 3] = finite(S.w * b.w * from * (delta.w * x.w * L.w));
        }
        float diagonal = 0.0f;
        GT_UNROLL
        for (int i = 0; i < 8; i++) {
            if (8 * j + i > t) M[i] = 0.0f; /* above the diagonal S may have any value */
            if (8 * j + i == t) diagonal = M[i];
        }
        diagonal = finite(fma_rn(skip, lds<float>(smem + Tile::X_INVERSE + 4 * (SHORT * unit + t)), diagonal));
        GT_UNROLL
        for (int i = 0; i < 8; i++) {
            if (8 * j + i == t) M[i] = diagonal;
            largest = fmaxf(largest, fabsf(M[i]));
        }
    }
    GT_UNROLL
    for (int mask = 1; mask < 4; mask *= 2) largest = fmaxf(largest, shfl_xor(largest, mask));
    const Power power = split_power(largest);
    if (j == 0) sts<float>(smem + Tile::M_INVERSE + 4 * (SHORT * unit + t), power.inverse);
    if (j / 2 > group / 2) return; /* this block lies above the diagonal */
    uint4 hi, lo;
    split_pair(M[0] * power.value, M[1] * power.value, hi.x, lo.x);
    split_pair(M[2] * power.value, M[3] * power.value, hi.y, lo.y);
    split_pair(M[4] * power.value, M[5] * power.value, hi.z, lo.z);
    split_pair(M[6] * power.value, M[7] * power.value, hi.w, lo.w);
    const uint32_t to = smem + Tile::M + (unit * Tile::PAIR_BLOCKS + block) * Tile::M_BLOCK;
    sts<uint4>(to + panel_at<4 * BLOCK>(row, half), hi);
    sts<uint4>(to + panel_at<4 * BLOCK>(row, half + 2), lo);
}

/* A warp's y of 32 tokens: [block of t][n][registers of an mma accumulator].  n: 8 rows p, from 16 unit_warp + 8 n
 * on. */
typedef float SplitY[SHORT_BLOCKS][2][4];

/* y = pre_t (C_t H) */
template <class Tile>
GT_DEV void make_split_y(uint32_t smem, int unit, const SplitState<Tile::NP>& state, SplitY& y) {
    constexpr int WIDE = SplitTile<Tile::NP>::WIDE, LO = SplitTile<Tile::NP>::LO;
    const Power power = state.power();
    GT_UNROLL
    for (int i = 0; i < 16; i++) y[i / 8][i / 4 % 2][i % 4] = 0.0f;
    const uint32_t C = by_rows<WIDE>(smem + Tile::C);
    GT_UNROLL
    for (int k = 0; k < Tile::NP / 16; k++) {
        uint32_t hi[2][2], lo[2][2];
        SplitLeft c[SHORT_BLOCKS];
        state.operands(k, power.value, hi, lo);
        GT_UNROLL
        for (int tb = 0; tb < SHORT_BLOCKS; tb++) {
            ldmatrix_x4(c[tb].hi, block_at<WIDE>(C, tb, k));
            ldmatrix_x4(c[tb].lo, block_at<WIDE>(C, tb, k + LO));
        }
        mma_split(y, c, hi, lo);
    }
    const uint32_t pre = smem + Tile::FACTORS + 4 * (Factors::COUNT * unit + Factors::PRE);
    GT_UNROLL
    for (int i = 0; i < 4; i++) {
        const int t = 8 * i + here() / 4;
        const float factor = lds<float>(pre + 4 * t) * lds<float>(smem + Tile::C_INVERSE + 4 * t);
        GT_UNROLL
        for (int n = 0; n < 4; n++) {
            float& to = y[i / 2][n / 2][i % 2 * 2 + n % 2];
            to = finite(to * power.inverse * factor);
        }
    }
}

/* y += M x */
template <class Tile>
GT_DEV void add_split_pairs(uint32_t smem, uint32_t x, int unit, int unit_warp, SplitY& y) {
    using X = SplitTile<64>;
    float sums[SHORT_BLOCKS][1][2][4] = {};
    const uint32_t M = by_rows<2 * BLOCK>(smem + Tile::M + unit * Tile::PAIR_BLOCKS * Tile::M_BLOCK);
    const uint32_t rows = by_rows<X::WIDE>(x);
    GT_UNROLL
    for (int sb = 0; sb < SHORT_BLOCKS; sb++) {
        uint32_t hi[4], lo[4];
        ldmatrix_x4_trans(hi, block_at<X::WIDE>(rows, sb, unit_warp));
        ldmatrix_x4_trans(lo, block_at<X::WIDE>(rows, sb, unit_warp + X::LO));
        const uint32_t x_hi[2][2] = {{hi[0], hi[1]}, {hi[2], hi[3]}}, x_lo[2][2] = {{lo[0], lo[1]}, {lo[2], lo[3]}};
        GT_UNROLL
        for (int tb = sb; tb < SHORT_BLOCKS; tb++) {
            SplitLeft m[1];
            const uint32_t block = M + short_block(tb, sb) * Tile::M_BLOCK;
            ldmatrix_x4(m[0].hi, block_at<2 * BLOCK>(block, 0, 0));
            ldmatrix_x4(m[0].lo, block_at<2 * BLOCK>(block, 0, 1));
            mma_split(sums[tb], m, x_hi, x_lo);
        }
    }
    GT_UNROLL
    for (int i = 0; i < 4; i++) {
        const float inverse = lds<float>(smem + Tile::M_INVERSE + 4 * (SHORT * unit + 8 * i + here() / 4));
        GT_UNROLL
        for (int n = 0; n < 4; n++) {
            const int e = i % 2 * 2 + n % 2;
            y[i / 2][n / 2][e] = fma_rn(sums[i / 2][0][n / 2][e], inverse, y[i / 2][n / 2][e]);
        }
    }
}

/* Adds the partial sums of earlier launches, and Dskip x if Dskip is per channel.  Applies the gate and stores y.  The
 * lanes of a token write 32 adjacent bytes. */
template <class Tile>
GT_DEV void store_split_y(const TensorParams& p, uint32_t smem, uint32_t x, const ShortCursor& cursor, int chunk,
                          int unit, int unit_warp, SplitY& y) {
    using X = SplitTile<64>;
    const Problem& in = p.in;
    const int lane = here(), g = lane / 4, j = lane % 4, h = cursor.head(unit),
              row0 = cursor.row0(unit) + 16 * unit_warp;
    const int tokens = cursor.tokens(chunk) - g;
    const auto exists = [&](int i) { return 8 * (i / 2) < tokens && row0 + 8 * (i % 2) < in.P; };
    const auto sum = [&](int i) { return &y[i / 4][i % 2][i / 2 % 2 * 2]; }; /* token 8 (i / 2) + g, rows from 8 (i % 2)
                                                                              * + 2 j on */
    const auto each_of = [&](const float* from, int64_t pitch, auto work) {
        GT_UNROLL
        for (int i = 0; i < 8; i++)
            if (exists(i)) work(sum(i), from + 8 * (i / 2) * pitch + 8 * (i % 2));
    };
    const auto each = [&](const void* data, const gt_stride& stride, auto work) {
        each_of(static_cast<const float*>(data) + offset_of(stride, cursor.b(), cursor.token(chunk) + g, h) + row0 +
                    2 * j,
                stride.t, work);
    };
    if (p.share) {
        const gt_stride stride = {in.sequences.T * in.H * in.P, in.H * in.P, in.P};
        each(p.share, stride, [&](float* to, const float* address) {
            if (p.has_share) {
                const float2 before = ldg<float2>(address);
                to[0] += before.x, to[1] += before.y;
            }
            if (p.leaves_share) stg<float2>(const_cast<float*>(address), {to[0], to[1]});
        });
        if (p.leaves_share) return;
    }
    if (in.Dskip && in.skip_per_channel) {
        float2 skip[2];
        GT_UNROLL
        for (int n = 0; n < 2; n++) {
            const int row = row0 + 8 * n + 2 * j;
            skip[n] = {0.0f, 0.0f};
            if (row < in.P) skip[n] = {in.Dskip[(int64_t)h * in.P + row], in.Dskip[(int64_t)h * in.P + row + 1]};
        }
        GT_UNROLL
        for (int i = 0; i < 8; i++) {
            const int t = 8 * (i / 2) + g, piece = 2 * unit_warp + i % 2;
            const uint32_t hi = lds<uint32_t>(x + panel_at<2 * X::WIDE>(t, piece) + 4 * j),
                           lo = lds<uint32_t>(x + panel_at<2 * X::WIDE>(t, piece + 8) + 4 * j);
            const float inverse = lds<float>(smem + Tile::X_INVERSE + 4 * (SHORT * unit + t));
            float* to = sum(i);
            to[0] = fma_rn(skip[i % 2].x, (unpack_f16_lo(hi) + unpack_f16_lo(lo)) * inverse, to[0]);
            to[1] = fma_rn(skip[i % 2].y, (unpack_f16_hi(hi) + unpack_f16_hi(lo)) * inverse, to[1]);
        }
    }
    if (in.z) {
        each(in.z, in.z_stride, [&](float* to, const float* address) {
            const float2 z = ldg<float2>(address);
            to[0] *= p.makes_dz ? dsilu(z.x) : silu(z.x);
            to[1] *= p.makes_dz ? dsilu(z.y) : silu(z.y);
        });
    }
    if (p.makes_dz) {
        each(in.dy, in.dy_stride, [&](float* to, const float* address) {
            const float2 dy = ldg<float2>(address);
            to[0] *= dy.x, to[1] *= dy.y;
        });
    }
    const int64_t row = ((int64_t)chunk * SHORT + g) * p.y_stride.t + 16 * unit_warp + 2 * j;
    each_of(static_cast<const float*>(p.y) + (cursor.base(ShortCursor::OUT + unit) + row), p.y_stride.t,
            [&](float* to, const float* address) {
                stg<float2>(const_cast<float*>(address), {to[0], to[1]});
            });
}

/* Runs one segment, chunk by chunk.  Returns `item` from shared memory, so that no register keeps it. */
template <class Tile>
GT_DEV int64_t forward_split_pass(const TensorParams& p, int64_t item) {
    constexpr int NP = Tile::NP;
    using Rows = SplitTile<NP>;
    const Problem& in = p.in;
    const uint32_t smem = smem_base();
    const ShortCursor cursor = {{smem + Tile::CURSOR}};
    SplitState<NP> state;
    {
        const Span span = span_at(in.sequences, in.segments.count, CHECKPOINT, item);
        if (!span.exists) return item;
        cursor.enter(in, span, item);
        const float* start = first_state(in, span, p.state_in, p.state_in_shared ? 0 : span.sequence);
        const int unit = unit_here(), unit_warp = part_here();
        const bool reads = start && unit < cursor.units();
        state.load(reads ? start + unit_state(in, cursor, unit, 0) : nullptr, cursor.row0(unit) + 16 * unit_warp, in);
    }
    if (thread_id() == 0) {
        cursor.keep_units(ShortCursor::LEFT, in.x_stride);
        cursor.keep_units(ShortCursor::OUT, p.y_stride);
        cursor.keep_group(ShortCursor::RIGHT, in.Bm_stride);
        cursor.keep_group(ShortCursor::C, in.Cm_stride);
    }
    sync_threads();
    if (cursor.chunks() > 0) {
        const int tokens = cursor.tokens(0);
        load_split_units(in, in.x, in.x_stride, smem + Tile::X, cursor, 0, tokens);
        load_split_group<NP>(in, in.Bm, in.Bm_stride, smem + Tile::B, cursor, ShortCursor::RIGHT, 0, tokens);
        load_split_group<NP>(in, in.Cm, in.Cm_stride, smem + Tile::C, cursor, ShortCursor::C, 0, tokens);
    }
    cp_async_commit();
    const auto fetch_dt =
        [&](int unit, int chunk) { /* a lane has two tokens */
                                   float dt[2];
                                   load_dt(in, cursor, unit, chunk, dt);
                                   if (2 * here() < SHORT)
                                       sts<float2>(smem + Tile::DT + 4 * SHORT * unit + 8 * here(), {dt[0], dt[1]});
        };
    if (part_here() == 0 && unit_here() < cursor.units() && cursor.chunks() > 0) fetch_dt(unit_here(), 0);
    GT_NO_UNROLL
    for (int chunk = 0; chunk < cursor.chunks(); chunk++) {
        const auto x = [&](int unit) { return smem + Tile::X + (chunk % 2 * MMA_UNITS + unit) * Tile::TILE_X; };
        const auto B = [&] { return smem + Tile::B + chunk % 2 * Tile::TILE_B; };
        const auto addresses = [&](int unit) { return smem + Tile::FACTORS + 4 * Factors::COUNT * unit; };
        const auto weights = [&](int unit) { return smem + Tile::WEIGHTS + 4 * Weights::COUNT * unit; };
        const auto inverses = [&](int unit) { return smem + Tile::X_INVERSE + 4 * SHORT * unit; };
        if (p.checkpoints.plain && chunk % SLOT_SHORTS == 0) {
            const int unit = unit_here();
            if (unit < cursor.units())
                state.store(plain_slot(in, cursor, p.checkpoints, unit, chunk), cursor.row0(unit) + 16 * part_here(),
                            in);
        }
        if (p.snapshots.data && chunk > 0 && chunk % SLOT_SHORTS == 0)
            keep_snapshot(p, cursor, unit_here(), part_here(), chunk * SHORT, state);
        cp_async_wait<0>();
        sync_threads();
        if (chunk + 1 < cursor.chunks()) { /* copies to the stage that the previous chunk has freed */
            const int tokens = cursor.tokens(chunk + 1);
            load_split_units(in, in.x, in.x_stride, smem + Tile::X + (chunk + 1) % 2 * MMA_UNITS * Tile::TILE_X, cursor,
                             chunk + 1, tokens);
            load_split_group<NP>(in, in.Bm, in.Bm_stride, smem + Tile::B + (chunk + 1) % 2 * Tile::TILE_B, cursor,
                                 ShortCursor::RIGHT, chunk + 1, tokens);
        }
        cp_async_commit();
        if (const int unit = unit_here(), unit_warp = part_here(); unit_warp >= 2) {
            constexpr int SETS = 2 * MMA_UNITS * Rows::AT_ONCE, TIMES = (Rows::ROW_SETS + SETS - 1) / SETS;
            const int group = Rows::AT_ONCE * (2 * unit + unit_warp - 2);
            const RowSplitter<NP> rows(group);
            GT_NO_UNROLL
            for (int i = 0; i < 2 * TIMES && group < Rows::ROW_SETS; i++)
                rows.split(i < TIMES ? B() : smem + Tile::C, smem + (i < TIMES ? Tile::B_INVERSE : Tile::C_INVERSE),
                           i % TIMES * SETS * Rows::ROWS);
        } else if (unit < cursor.units() && unit_warp == 1) {
            split_rows<64>(x(unit), inverses(unit), 0, 1);
        } else if (unit < cursor.units()) {
            float dt[2] = {0.0f, 0.0f}, delta[2];
            if (2 * here() < SHORT) {
                const float2 kept = lds<float2>(smem + Tile::DT + 4 * SHORT * unit + 8 * here());
                dt[0] = kept.x, dt[1] = kept.y;
            }
            deltas_of(in, cursor.head(unit), cursor.tokens(chunk), dt, delta);
            make_factors(addresses(unit), delta, in.A[cursor.head(unit)]);
            sync_warp(); /* all lanes have read this chunk's dt */
            if (chunk + 1 < cursor.chunks()) fetch_dt(unit, chunk + 1);
        }
        sync_threads();
        if (const int unit = unit_here(), unit_warp = part_here(); unit_warp < 3)
            make_split_S<Tile>(smem, B(), 3 * unit + unit_warp);
        else if (unit < cursor.units())
            split_update_weights(weights(unit), addresses(unit), inverses(unit), smem + Tile::B_INVERSE, false);
        sync_threads();
        SplitY y;
        if (const int unit = unit_here(); unit < cursor.units()) {
            const bool skips = in.Dskip && !in.skip_per_channel && !p.leaves_share;
            make_split_M<Tile>(smem, unit, part_here(), skips ? in.Dskip[cursor.head(unit)] : 0.0f);
            make_split_y<Tile>(smem, unit, state, y);
            state.decay(split_decay(addresses(unit)));
        }
        sync_threads(); /* all warps have read C */
        if (chunk + 1 < cursor.chunks())
            load_split_group<NP>(in, in.Cm, in.Cm_stride, smem + Tile::C, cursor, ShortCursor::C, chunk + 1,
                                 cursor.tokens(chunk + 1));
        cp_async_commit();
        const int unit = unit_here(), unit_warp = part_here();
        if (unit >= cursor.units()) continue;
        add_split_pairs<Tile>(smem, x(unit), unit, unit_warp, y);
        store_split_y<Tile>(p, smem, x(unit), cursor, chunk, unit, unit_warp, y);
        state.update(x(unit), unit_warp, B(), weights(unit));
    }
    if (p.snapshots.data) keep_snapshot(p, cursor, unit_here(), part_here(), INT32_MAX, state);
    const Span same = span_at(in.sequences, in.segments.count, CHECKPOINT, cursor.item()); /* computed again */
    const int unit = unit_here(), unit_warp = part_here();
    float* const end = same.ends ? last_state(in, p.state_out, same.sequence) : nullptr;
    if (unit < cursor.units() && end)
        state.store(end + unit_state(in, cursor, unit, 0), cursor.row0(unit) + 16 * unit_warp, in);
    return cursor.item();
}

template <int NP>
GT_KERNEL(THREADS, (blocks_at_once(ForwardSplitTile<NP>::BYTES)))
forward_fp32_kernel(const GT_GRID_CONSTANT TensorParams p) {
#if GT_SM80_KERNELS
    wait_for_chain();
    for (int64_t item = unit_strand(p.in); item < items_of(p.in); item += unit_strands(p.in))
        item = forward_split_pass<ForwardSplitTile<NP>>(p, item);
#else
    (void)p;
    __trap();
#endif
}

/* ---- states alone ---------------------------------------------------------------------------------------------- */

template <int NP_>
struct StatesSplitTile {
    static constexpr int NP = NP_, TILE_LEFT = SplitTile<64>::BYTES, TILE_RIGHT = SplitTile<NP>::BYTES;
    static constexpr int LEFT = 0;                                           /* x or dy: [2 stages][MMA_UNITS] */
    static constexpr int RIGHT = LEFT + 2 * MMA_UNITS * TILE_LEFT;           /* B or C: [2 stages] */
    static constexpr int FACTORS = RIGHT + 2 * TILE_RIGHT;                   /* [MMA_UNITS] */
    static constexpr int WEIGHTS = FACTORS + MMA_UNITS * 4 * Factors::COUNT; /* [MMA_UNITS] */
    static constexpr int INVERSE = WEIGHTS + MMA_UNITS * 4 * Weights::COUNT;
    static constexpr int LEFT_INVERSE = INVERSE + 4 * SHORT;         /* [MMA_UNITS] */
    static constexpr int LOG = LEFT_INVERSE + MMA_UNITS * 4 * SHORT; /* [MMA_UNITS]: TwoTermSum of the logs
                                                                      * of decays */
    static constexpr int CURSOR = LOG + MMA_UNITS * 8;
    static constexpr int BYTES = CURSOR + ShortCursor::BYTES;
    static_assert(BYTES <= 99 * 1024, "fits every device with tensor cores for fp32 activations");
};

/* pass_over_states() for split numbers.  Returns `item` from shared memory, so that no register keeps it. */
template <class Tile, bool REVERSE>
GT_DEV int64_t pass_over_split_states(const StatesParams& p, int64_t item) {
    constexpr int NP = Tile::NP;
    const Problem& in = p.in;
    const uint32_t smem = smem_base();
    const ShortCursor cursor = {{smem + Tile::CURSOR}};
    const int warp = warp_id(), unit = warp / UNIT_WARPS, unit_warp = warp % UNIT_WARPS;
    const uint32_t addresses = smem + Tile::FACTORS + 4 * Factors::COUNT * unit,
                   weights = smem + Tile::WEIGHTS + 4 * Weights::COUNT * unit,
                   inverses = smem + Tile::LEFT_INVERSE + 4 * SHORT * unit;
    const void *left = REVERSE ? in.dy : in.x, *right = REVERSE ? in.Cm : in.Bm;
    const gt_stride &left_stride = REVERSE ? in.dy_stride : in.x_stride,
                    &right_stride = REVERSE ? in.Cm_stride : in.Bm_stride;
    const uint32_t log = smem + Tile::LOG + 8 * unit;
    const bool adds_log = p.is_local && unit_warp == 0 && lane_id() == 0;
    SplitState<NP> state;
    {
        const Span span = span_at(in.sequences, in.segments.count, CHECKPOINT, item);
        if (skips(p.is_local, span, REVERSE ? span.starts : span.ends)) return item;
        cursor.enter(in, span, item);
        const float* start = nullptr;
        if (!p.is_local) start = first_state(in, span, p.state_in, p.state_in_shared ? 0 : span.sequence);
        const bool reads = start && unit < cursor.units();
        state.load(reads ? start + unit_state(in, cursor, unit, 0) : nullptr, cursor.row0(unit) + 16 * unit_warp, in);
    }
    if (thread_id() == 0) {
        cursor.keep_units(ShortCursor::LEFT, left_stride);
        cursor.keep_group(ShortCursor::RIGHT, right_stride);
    }
    if (adds_log) sts<TwoTermSum>(log, TwoTermSum());
    sync_threads();
    const int chunks = cursor.chunks();
    const auto load = [&](int i) {
        if (i < chunks) {
            const int chunk = REVERSE ? chunks - 1 - i : i;
            const int tokens = cursor.tokens(chunk);
            load_split_units(in, left, left_stride, smem + Tile::LEFT + i % 2 * MMA_UNITS * Tile::TILE_LEFT, cursor,
                             chunk, tokens);
            load_split_group<NP>(in, right, right_stride, smem + Tile::RIGHT + i % 2 * Tile::TILE_RIGHT, cursor,
                                 ShortCursor::RIGHT, chunk, tokens);
        }
        cp_async_commit();
    };
    load(0);
    GT_NO_UNROLL
    for (int i = 0; i < chunks; i++) {
        const int chunk = REVERSE ? chunks - 1 - i : i;
        const uint32_t x = smem + Tile::LEFT + (i % 2 * MMA_UNITS + unit) * Tile::TILE_LEFT;
        const uint32_t b = smem + Tile::RIGHT + i % 2 * Tile::TILE_RIGHT;
        const bool active = unit < cursor.units();
        const bool at_slot = REVERSE ? i == 0 || chunk % SLOT_SHORTS == SLOT_SHORTS - 1 : chunk % SLOT_SHORTS == 0;
        if (active && p.checkpoints.plain && at_slot)
            state.store(plain_slot(in, cursor, p.checkpoints, unit, chunk), cursor.row0(unit) + 16 * unit_warp, in);
        cp_async_wait<0>();
        sync_threads();
        load(i + 1); /* copies to the stage that the previous chunk has freed */
        if (unit_warp >= 2) {
            split_rows<NP>(b, smem + Tile::INVERSE, 2 * unit + unit_warp - 2, 2 * MMA_UNITS);
        } else if (active && unit_warp == 1) {
            const int row0 = cursor.row0(unit);
            const float* gates = nullptr;
            if (REVERSE && in.z)
                gates = static_cast<const float*>(in.z) +
                        offset_of(in.z_stride, cursor.b(), cursor.token(chunk), cursor.head(unit)) + row0;
            const RowSplitter<64> rows(0);
            GT_NO_UNROLL
            for (int further = 0; further < SHORT; further += SplitTile<64>::ROWS * SplitTile<64>::AT_ONCE)
                rows.split(x, inverses, further, gates, in.z_stride.t, cursor.tokens(chunk), in.P - row0);
        } else if (active) {
            float dt[2], delta[2];
            load_dt(in, cursor, unit, chunk, dt);
            deltas_of(in, cursor.head(unit), cursor.tokens(chunk), dt, delta);
            make_factors<SUM_FACTORS | CHUNK_FACTORS>(addresses, delta, in.A[cursor.head(unit)]);
        }
        sync_threads();
        if (active && unit_warp == 3) split_update_weights(weights, addresses, inverses, smem + Tile::INVERSE, REVERSE);
        if (active) state.decay(split_decay(addresses));
        sync_threads();
        if (!active) continue;
        state.update(x, unit_warp, b, weights);
        if (adds_log) {
            TwoTermSum sum = lds<TwoTermSum>(log);
            sum.add(lds<float>(addresses + 4 * Factors::LOG));
            sts<TwoTermSum>(log, sum);
        }
    }
    const Span same = span_at(in.sequences, in.segments.count, CHECKPOINT, cursor.item()); /* computed again */
    const int row0 = cursor.row0(unit) + 16 * unit_warp;
    if (unit < cursor.units() && p.is_local) {
        state.store(in.segments.states + unit_state(in, cursor, unit, same.segment_slot), row0, in);
        if (row0 == 0 && adds_log)
            in.segments.decays[same.segment_slot * in.H + cursor.head(unit)] = lds<TwoTermSum>(log).value();
    } else if (unit < cursor.units() && (REVERSE ? same.starts : same.ends)) {
        float* const end = last_state(in, p.state_out, same.sequence);
        if (end) state.store(end + unit_state(in, cursor, unit, 0), row0, in);
        if (p.state_sum) state.store(p.state_sum + unit_state(in, cursor, unit, unit_strand(in)), row0, in, true);
    }
    return cursor.item();
}

template <int NP, bool REVERSE>
GT_KERNEL(THREADS, (blocks_at_once(StatesSplitTile<NP>::BYTES)))
states_fp32_kernel(const GT_GRID_CONSTANT StatesParams p) {
#if GT_SM80_KERNELS
    using Tile = StatesSplitTile<NP>;
    wait_for_chain();
    if (p.state_sum) { /* clears the strand's row, because a strand may have no sequence */
        const ShortCursor cursor = {{smem_base() + Tile::CURSOR}};
        cursor.enter(p.in, Span{}, 0);
        const int unit = warp_id() / UNIT_WARPS, row0 = cursor.row0(unit) + warp_id() % UNIT_WARPS * 16;
        SplitState<NP> zeros;
        zeros.load(nullptr, row0, p.in);
        if (unit < cursor.units())
            zeros.store(p.state_sum + unit_state(p.in, cursor, unit, unit_strand(p.in)), row0, p.in);
    }
    for (int64_t item = unit_strand(p.in); item < items_of(p.in); item += unit_strands(p.in))
        item = pass_over_split_states<Tile, REVERSE>(p, item);
#else
    (void)p;
    __trap();
#endif
}

} /* namespace ssd */
} /* namespace gt */

#endif
