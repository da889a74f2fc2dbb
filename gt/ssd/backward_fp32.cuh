/* gt/ssd/backward_fp32.cuh - ssd backward of a chunk on tensor cores, fp32 activations: products of split numbers
 * (chunk_fp32.cuh).  Every gradient but dz and dstate_in, which come from where backward_tensor.cuh has them.
 *
 * A slot of 128 tokens, from one checkpoint to the next, is one chunk of the chunked form: with h before it and G after
 * it no state is made again.  A block has 32 tokens of a slot, number `me` of its four chunks, and one group; it takes
 * the group's heads, and their tiles of 32 rows p, one after another ("steps").  L, pre, suf and E are the slot's:
 *     own t, any s <= t of the slot      w_ts = <dy_t, x_s> L_ts Delta_s       W += w       dC_t += sum W_ts B_s  (end)
 *     own s, any t >= s of the slot      w_ts, and M_ts = <C_t, B_s> L_ts      W += w       dB_s += sum W_ts C_t  (end)
 *     U_s = suf_s G B_s + sum_{t>=s} M_ts dy_t               dx_s = Delta_s U_s + Dskip . dy_s
 *     dC_t += pre_t h^T dy_t          dB_s += Delta_s suf_s G^T x_s            fp32, in registers
 * So a block meets each of the four chunks of its slot once: those before its own as s, those after it as t, its own as
 * both.  <C_t, B_s> is made once a block, and W is summed over the steps, both in registers.
 *
 * da_k is a sum over pairs of the slot (docs/ssd.md, 6).  The block adds those that have a token of its own; the sums of
 * those that have none are the same for all 32 tokens k, and are left as numbers of a chunk and head ("across"):
 *     sum E_t and sum F_s of the chunk, sum Gamma_ts with each chunk before it, its share of Z
 * chunk_times_fp32_kernel adds them up and makes ddt, dA and ddt_bias.  F_s = Delta_s <x_s, suf_s G B_s>, from U.
 *
 * WARPS, 8.  A step:
 *     copies of x, dy, of the other chunks' x (before) or dy (after), and of G have come                    -- barrier
 *     rows are split, a power of two a row; maxima of G; a head's decay factors; da of the step before      -- barrier
 *     G is split, a power of two for 16 rows; pairs: 32 own tokens x 16 others a warp: w, W, Gamma, M       -- barrier
 *     dB and dC: 32 tokens x N / 8 columns a warp, h from global memory straight into operands; U: 16 s x 8 p a warp;
 *     dx, <x, U>, <G, h>: 16 of 64 rows a block                                                             -- barrier
 * Each 16 rows p of a state and each 16 tokens of M have powers of their own, so that products are summed in fp32 over
 * them.
 *
 * registers a thread, N = 128: <C, B> 16, W 16, dB and dC 32; 60 for the product at hand.  Two blocks a multiprocessor.
 * shared, N = 128: B 16 KB, C 17 KB, G 16 KB, five tiles of 32 x 32 20 KB, M 16 KB, factors and sums 11 KB: 96 KB.
 * tensor cores a step, N = 128, m16n8k16: dB, dC, G B 192 each, <dy, x> 192, M dy 96 to 192: 27 a token and 32 rows p.
 * bytes a token and head, P 64, N 128: x, dy, dx 768 from memory; other chunks 768 and h, G 2048, three quarters of them
 *     from L2.
 * N > 128: a launch for every 128 columns; dx, da, <x, U> and the sums across are added to what is there.
 * grid: [B, slots, G], four chunks each; block 256.  Every sum has one fixed order: deterministic. */
#ifndef GT_SSD_BACKWARD_FP32_CUH
#define GT_SSD_BACKWARD_FP32_CUH

#include "backward_tensor.cuh"
#include "chunk_fp32.cuh"

namespace gt {
namespace ssd {

/* What a chunk leaves for the others of its slot: [B, slots][SLOT_SHORTS][COUNT][H]. */
struct Across {
    static constexpr int E = 0, F = 1, GAMMA = 2 /* with chunk 0, 1, 2 */, Z = 5, COUNT = 6;
};

struct SplitGradientParams {
    Problem in;
    Checkpoints h, G; /* before the first token of each slot; after its last; plain NULL: 0 */
    int64_t slots;
    float *dx, *dBm, *dCm; /* NULL: not wanted */
    gt_stride dx_at, dBm_at, dCm_at;
    float *da, *direct, *across; /* [B,T,H]: da but for what is across, <x, U>; NULL: not wanted */
    float* dskip;                /* [B*slots*4][H], per channel [H][P]; NULL: not wanted */
    int has_share;               /* a launch before has left its share of dx, da, direct and across */
};

constexpr int ROWS_P = 32; /* of a step */

template <int NP_>
struct GradientSplitTile {
    static constexpr int NP = NP_, WIDE = SplitTile<NP>::WIDE, LO = SplitTile<NP>::LO;
    static constexpr int TILES = NP < 64 ? 1 : NP / 64, ACTIVE = NP / 8 / TILES; /* of 8 columns, of a warp; warps */
    static constexpr int TILE = SplitTile<NP>::BYTES, ROWS = SplitTile<ROWS_P>::BYTES, BLOCK16 = SplitTile<16>::BYTES;
    static constexpr int C_PITCH = NP + 8; /* C as it is */
    static constexpr int B = 0, G = B + TILE;
    static constexpr int X = G + TILE, DY = X + ROWS, OTHERS = DY + ROWS; /* [3] */
    static constexpr int M = OTHERS + 3 * ROWS;                           /* [8 times 16 tokens t] */
    static constexpr int C = M + 8 * BLOCK16;
    static constexpr int FLOATS = C + 4 * SHORT * C_PITCH;
    /* floats, from there */
    static constexpr int FACTORS = 0, PRE = FACTORS + Factors::COUNT, SUF = PRE + SHORT; /* PRE, SUF: the slot's */
    static constexpr int OTHER = SUF + SHORT;               /* [4 chunks]: their factor of L, see slot_factors */
    static constexpr int INVERSES = OTHER + 4 * SHORT;      /* x, dy, [3] */
    static constexpr int B_INVERSE = INVERSES + 5 * SHORT;  /* B, C, [3 others] */
    static constexpr int M_INVERSE = B_INVERSE + 5 * SHORT; /* [8] */
    static constexpr int E = M_INVERSE + 8 * SHORT, F = E + 8 * SHORT;            /* [8 warps], [4 times 8 rows p] */
    static constexpr int DIRECT = F + 4 * SHORT, GAMMA = DIRECT + 4 * SHORT;      /* [4], [8 warps] */
    static constexpr int DIAGONAL = GAMMA + 8 * SHORT, CORNER = DIAGONAL + SHORT; /* [16 rows, 16 columns] */
    static constexpr int DSKIP = CORNER + SHORT, KEPT = DSKIP + 2 * SHORT;        /* [2], [da, direct, across] */
    static constexpr int Z = KEPT + 3 * SHORT, G_MOST = Z + 8, ALL = G_MOST + 8;  /* [8 warps], [8 warps], E */
    static constexpr int DSKIP_SUM = ALL + 1, COUNT = ALL + 4;
    static constexpr int BYTES = FLOATS + 4 * COUNT;
    static_assert(TILE <= 8 * BLOCK16 && TILE <= 5 * ROWS && TILE <= 4 * SHORT * C_PITCH, "tiles of a group fit there");
    static_assert(4 * SHORT * (SHORT + 1) + 2 * BLOCK16 <= 5 * ROWS, "W fits there, at the end");
    static_assert(C % 128 == 0 && FLOATS % 16 == 0, "tiles begin at multiples of 128");
    static_assert(BYTES <= 99 * 1024, "fits every device with tensor cores for fp32 activations");
};

/* What a block works on. */
template <class Tile>
struct SplitGradientBlock {
    uint32_t smem;
    int64_t first; /* token of the slot */
    int b, slot, g;
    int warp;        /* its number, in a form that the compiler knows to be the same in all lanes */
    int me;          /* number of the chunk */
    int slot_tokens; /* 0: there are none */

    GT_METHOD uint32_t cell(int offset) const { return smem + Tile::FLOATS + 4 * offset; }
    GT_METHOD float value(int offset) const { return lds<float>(cell(offset)); }
    GT_METHOD int64_t token(int chunk) const { return first + SHORT * chunk; }
    GT_METHOD int tokens(int chunk) const {
        const int left = slot_tokens - SHORT * chunk;
        return left < 0 ? 0 : left < SHORT ? left : SHORT;
    }
    GT_METHOD int other(int chunk) const { return chunk - (chunk > me); } /* place among the three */
    /* the tile of a step that has the tokens of a chunk, and what undoes its rows; the block's own: dy */
    GT_METHOD uint32_t rows(int chunk) const {
        return smem + (chunk == me ? Tile::DY : Tile::OTHERS + Tile::ROWS * other(chunk));
    }
    GT_METHOD int inverses(int chunk) const { return Tile::INVERSES + SHORT * (chunk == me ? 1 : 2 + other(chunk)); }
};

/* Blocks: [B,slots,G], then the chunks of a slot. */
template <class Tile>
GT_DEV SplitGradientBlock<Tile> find_split_chunk(const SplitGradientParams& p) {
    const Problem& in = p.in;
    SplitGradientBlock<Tile> me;
    const int64_t place = block_x() / SLOT_SHORTS;
    me.smem = smem_base();
    me.warp = shfl_idx(warp_id(), 0);
    me.me = (int)(block_x() % SLOT_SHORTS);
    me.g = (int)(place % in.G);
    me.slot = (int)(place / in.G % p.slots);
    me.b = (int)(place / in.G / p.slots);
    const gt_chunk chunk = chunk_at(in.sequences, CHECKPOINT, me.slot);
    me.first = chunk.first;
    me.slot_tokens = chunk.sequence < 0 ? 0 : (int)(chunk.last - chunk.first);
    return me;
}

/* ---- pairs ------------------------------------------------------------------------------------------------------ */

/* A warp's pairs: the block's 32 tokens, 16 of chunk warp / 2: [16 own][8 others][as mma has them].  Own tokens are t
 * where the chunk is before the block's, else s. */
typedef float SplitPairs[2][2][4];

/* sums += own rows times rows 16 `half` ... of others, over COLUMNS columns. */
template <int COLUMNS>
GT_DEV void multiply_pairs(uint32_t own, uint32_t others, int half, SplitPairs& sums) {
    using S = SplitTile<COLUMNS>;
    const uint32_t left = by_rows<S::WIDE>(own), right = by_columns<S::WIDE>(others);
    GT_UNROLL
    for (int k = 0; k < COLUMNS / 16; k++) {
        SplitLeft a[2];
        uint32_t hi[4], lo[4];
        GT_UNROLL
        for (int m = 0; m < 2; m++) {
            ldmatrix_x4(a[m].hi, tile_at<S::WIDE>(left, m, k));
            ldmatrix_x4(a[m].lo, tile_at<S::WIDE>(left, m, k + S::LO));
        }
        ldmatrix_x4(hi, tile_at<S::WIDE>(right, half, k));
        ldmatrix_x4(lo, tile_at<S::WIDE>(right, half, k + S::LO));
        const uint32_t b_hi[2][2] = {{hi[0], hi[1]}, {hi[2], hi[3]}}, b_lo[2][2] = {{lo[0], lo[1]}, {lo[2], lo[3]}};
        mma_split(sums, a, b_hi, b_lo);
    }
}

/* Leaves pairs as left operands, a power of two for each row of 16: `block` is a tile of 16 columns. */
GT_DEV void store_split_pairs(const SplitPairs& v, uint32_t block, uint32_t inverses) {
    const int g = lane_id() / 4, j = lane_id() % 4;
    GT_UNROLL
    for (int i = 0; i < 4; i++) { /* row 8 i + g */
        const float* const x[2] = {&v[i / 2][0][i % 2 * 2], &v[i / 2][1][i % 2 * 2]};
        float largest = fmaxf(fmaxf(fabsf(x[0][0]), fabsf(x[0][1])), fmaxf(fabsf(x[1][0]), fabsf(x[1][1])));
        largest = fmaxf(largest, shfl_xor(largest, 1));
        largest = fmaxf(largest, shfl_xor(largest, 2));
        const Power power = split_power(largest);
        GT_UNROLL
        for (int n = 0; n < 2; n++) {
            uint32_t hi, lo;
            split_pair(x[n][0] * power.value, x[n][1] * power.value, hi, lo);
            sts<uint32_t>(block + tile_cell<32>(8 * i + g, n) + 4 * j, hi);
            sts<uint32_t>(block + tile_cell<32>(8 * i + g, n + 2) + 4 * j, lo);
        }
        if (j == 0) sts<float>(inverses + 4 * (8 * i + g), power.inverse);
    }
}

/* <C_t, B_s> of the warp's pairs; the block's B is left as it is, C comes as it is. */
template <class Tile>
GT_DEV void make_split_products(const SplitGradientParams& p, const SplitGradientBlock<Tile>& me, SplitPairs& S) {
    constexpr int NP = Tile::NP;
    using Rows = SplitTile<NP>;
    const Problem& in = p.in;
    /* B, C, the other chunks' */
    const auto tile = [&](int i) {
        return me.smem + (i == 0 ? Tile::B : i == 1 ? Tile::C : i == 2 ? Tile::G : i == 3 ? Tile::X : Tile::M);
    };
    const auto load = [&](int i, bool is_C, int chunk) {
        const gt_stride& stride = is_C ? in.Cm_at : in.Bm_at;
        const float* first = static_cast<const float*>(is_C ? in.Cm : in.Bm) + at(stride, me.b, me.token(chunk), me.g);
        load_split_tile<NP>(tile(i), first, stride.t, me.tokens(chunk), in.columns);
    };
    load(0, false, me.me);
    load(1, true, me.me);
    for (int i = 0; i < 3; i++) load(2 + i, i >= me.me, i + (i >= me.me));
    cp_async_commit();
    cp_async_wait<0>();
    sync_threads();
    constexpr int CALLS = Rows::GROUPS / Rows::AT_ONCE;
    GT_NO_UNROLL
    for (int i = me.warp; i < 5 * CALLS; i += WARPS)
        split_rows<NP>(tile(i / CALLS), me.cell(Tile::B_INVERSE + i / CALLS * SHORT), i % CALLS * Rows::AT_ONCE);
    sync_threads();
    const int chunk = me.warp / 2, half = me.warp % 2, lane = lane_id();
    const int left = chunk < me.me ? 1 : 0, right = chunk == me.me ? 1 : 2 + me.other(chunk);
    GT_UNROLL
    for (int i = 0; i < 16; i++) S[i / 8][i / 4 % 2][i % 4] = 0.0f;
    multiply_pairs<NP>(tile(left), tile(right), half, S);
    GT_UNROLL
    for (int i = 0; i < 16; i++) {
        const int row = 16 * (i / 8) + 8 * (i / 2 % 2) + lane / 4,
                  column = 16 * half + 8 * (i / 4 % 2) + 2 * (lane % 4);
        float& to = S[i / 8][i / 4 % 2][i % 4];
        to = finite(to * me.value(Tile::B_INVERSE + left * SHORT + row) *
                    me.value(Tile::B_INVERSE + right * SHORT + column + i % 2));
    }
    sync_threads();
    constexpr int PIECES = NP / 4;
    const float* first = static_cast<const float*>(in.Cm) + at(in.Cm_at, me.b, me.token(me.me), me.g);
    for (int i = thread_id(); i < SHORT * PIECES; i += THREADS) {
        const int row = i / PIECES, piece = i % PIECES;
        const bool exists = row < me.tokens(me.me) && 4 * piece < in.columns;
        cp_async<16>(me.smem + Tile::C + 4 * (row * Tile::C_PITCH + 4 * piece),
                     exists ? first + row * in.Cm_at.t + 4 * piece : first, exists ? 16 : 0);
    }
}

/* ---- a step: copies, splitting, factors --------------------------------------------------------------------------- */

/* Starts the copies of rows p0 ... of a head. */
template <class Tile>
GT_DEV void copy_split_step(const SplitGradientParams& p, const SplitGradientBlock<Tile>& me, int h, int p0) {
    const Problem& in = p.in;
    const auto load = [&](uint32_t tile, bool is_dy, int chunk) {
        const gt_stride& stride = is_dy ? in.dy_at : in.x_at;
        const float* first =
            static_cast<const float*>(is_dy ? in.dy : in.x) + at(stride, me.b, me.token(chunk), h) + p0;
        load_split_tile<ROWS_P>(tile, first, stride.t, me.tokens(chunk), in.P - p0);
    };
    load(me.smem + Tile::X, false, me.me);
    load(me.smem + Tile::DY, true, me.me);
    for (int i = 0; i < 3; i++) load(me.smem + Tile::OTHERS + Tile::ROWS * i, i >= me.me, i + (i >= me.me));
    const float* G = static_cast<const float*>(in.x); /* for zeros any address does */
    if (p.G.plain) G = p.G.plain + ((((int64_t)me.b * in.H + h) * p.slots + me.slot) * in.P + p0) * in.N;
    load_split_tile<Tile::NP>(me.smem + Tile::G, G, in.N, p.G.plain ? in.P - p0 : 0, in.columns);
    cp_async_commit();
}

/* Splits 16 rows of a tile of x or dy, `number` of ten. */
template <class Tile>
GT_DEV void split_step_rows(const SplitGradientParams& p, const SplitGradientBlock<Tile>& me, int h, int p0,
                            int number) {
    const Problem& in = p.in;
    const int tile = number / 2, chunk = tile < 2 ? me.me : tile - 2 + (tile - 2 >= me.me);
    const float* gates = nullptr;
    if (in.z && (tile == 1 || chunk > me.me))
        gates = static_cast<const float*>(in.z) + at(in.z_at, me.b, me.token(chunk), h) + p0;
    split_rows<ROWS_P>(me.smem + Tile::X + Tile::ROWS * tile, me.cell(Tile::INVERSES + SHORT * tile), number % 2 * 2,
                       gates, in.z_at.t, me.tokens(chunk), in.P - p0);
}

/* What a warp has of G before it is split: 4 rows. */
template <class Tile>
struct SplitRows {
    static constexpr int PIECES = Tile::NP / 4, COUNT = (4 * PIECES + 31) / 32;
    float4 x[COUNT];

    GT_METHOD static bool exists(int i) { return 4 * PIECES >= 32 || lane_id() + 32 * i < 4 * PIECES; }
    GT_METHOD static int row(int warp, int i) { return 4 * warp + (lane_id() + 32 * i) / PIECES; }
    GT_METHOD static int piece(int i) { return (lane_id() + 32 * i) % PIECES; }

    /* most <- the largest magnitude of them */
    GT_METHOD void load(uint32_t tile, int warp, uint32_t most) {
        float largest = 0.0f;
        GT_UNROLL
        for (int i = 0; i < COUNT; i++) {
            x[i] = {0.0f, 0.0f, 0.0f, 0.0f};
            if (exists(i)) x[i] = lds<float4>(tile + tile_cell<Tile::WIDE>(row(warp, i), piece(i)));
            largest = fmaxf(largest, fmaxf(fmaxf(fabsf(x[i].x), fabsf(x[i].y)), fmaxf(fabsf(x[i].z), fabsf(x[i].w))));
        }
        GT_UNROLL
        for (int mask = 1; mask < 32; mask *= 2) largest = fmaxf(largest, shfl_xor(largest, mask));
        if (lane_id() == 0) sts<float>(most, largest);
    }

    GT_METHOD void store(uint32_t tile, int warp, float power) const {
        GT_UNROLL
        for (int i = 0; i < COUNT; i++) {
            uint2 hi, lo;
            if (!exists(i)) continue;
            split_pair(x[i].x * power, x[i].y * power, hi.x, lo.x);
            split_pair(x[i].z * power, x[i].w * power, hi.y, lo.y);
            const uint32_t half = 8 * (piece(i) % 2);
            sts<uint2>(tile + tile_cell<Tile::WIDE>(row(warp, i), piece(i) / 2) + half, hi);
            sts<uint2>(tile + tile_cell<Tile::WIDE>(row(warp, i), piece(i) / 2 + Tile::NP / 8) + half, lo);
        }
    }
};

/* Of rows 16 `block` ... of the step's G. */
template <class Tile>
GT_DEV Power power_of_G(const SplitGradientBlock<Tile>& me, int block) {
    const float4 most = lds<float4>(me.cell(Tile::G_MOST + 4 * block));
    return split_power(fmaxf(fmaxf(most.x, most.y), fmaxf(most.z, most.w)));
}

/* dt of a lane's token of each chunk of the slot, as it is in memory. */
struct SlotTimes {
    float dt[SLOT_SHORTS] = {};
};

template <class Tile>
GT_DEV void load_slot_times(const Problem& in, const SplitGradientBlock<Tile>& me, int h, SlotTimes& times) {
    GT_UNROLL
    for (int i = 0; i < SLOT_SHORTS; i++) {
        const int t = SHORT * i + lane_id();
        if (t < me.slot_tokens) times.dt[i] = load_as(in.dt, in.dt_dtype, at(in.dt_at, me.b, me.first + t, h));
    }
}

/* Of each token of chunk `chunk`, its factor of L and w:
 *     before the block's     Delta_s exp(from after s to the block's first)      times PRE of the block's tokens is L Delta
 *     after                  exp(from after the block's last through t)          times SUF is L
 *     the block's own        pre_t and suf_t of the slot; ALL */
template <class Tile>
GT_DEV void slot_factors(const Problem& in, const SplitGradientBlock<Tile>& me, int h, int chunk,
                         const SlotTimes& times) {
    const int lane = lane_id();
    const float bias = in.dt_bias ? in.dt_bias[h] : 0.0f, A = in.A[h];
    float total[SLOT_SHORTS], delta = 0.0f, log = 0.0f;
    GT_UNROLL
    for (int i = 0; i < SLOT_SHORTS; i++) {
        const float own = SHORT * i + lane < me.slot_tokens ? delta_of(in.rule, times.dt[i] + bias).value : 0.0f;
        const float a = own * A * LOG2_E;
        if (i == chunk) delta = own, log = a;
        total[i] = warp_sum(a);
    }
    float upto = log, from = log, before = 0.0f, between = 0.0f, after = 0.0f;
    GT_UNROLL
    for (int d = 1; d < 32; d *= 2) {
        const float left = shfl_up(upto, d), right = shfl_down(from, d);
        upto += lane >= d ? left : 0.0f;
        from += lane + d < 32 ? right : 0.0f;
    }
    from = shfl_down(from, 1);
    from = lane < 31 ? from : 0.0f; /* after the token */
    GT_UNROLL
    for (int i = 0; i < SLOT_SHORTS; i++) {
        before += i < me.me ? total[i] : 0.0f;
        after += i > me.me ? total[i] : 0.0f;
        between += (i > chunk && i < me.me) || (i > me.me && i < chunk) ? total[i] : 0.0f;
    }
    if (chunk == me.me) {
        sts<float>(me.cell(Tile::PRE + lane), exp2_finite(before + upto));
        sts<float>(me.cell(Tile::SUF + lane), exp2_finite(after + from));
        if (lane == 0) sts<float>(me.cell(Tile::ALL), exp2_finite((total[0] + total[1]) + (total[2] + total[3])));
        return;
    }
    const float factor = chunk < me.me ? delta * exp2_finite(between + from) : exp2_finite(between + upto);
    sts<float>(me.cell(Tile::OTHER + SHORT * chunk + lane), finite(factor));
}

/* ---- a step: w, W, M, Gamma ---------------------------------------------------------------------------------------- */

/* L_ts of the block's own pairs, rows s 16 m ..., columns t 16 half + 8 n .... */
template <class Tile>
GT_DEV void own_decays(const SplitGradientBlock<Tile>& me, int m, int half, int n, float (&L)[4]) {
    const int g = lane_id() / 4, j = lane_id() % 4, t = 16 * half + 8 * n + 2 * j, s = 16 * m + g;
    if (m > half) { /* t before s */
        L[0] = L[1] = L[2] = L[3] = 0.0f;
        return;
    }
    if (m < half) {
        const float2 u = lds<float2>(me.cell(Tile::FACTORS + Factors::U + t));
        const float v0 = me.value(Tile::FACTORS + Factors::V + s), v1 = me.value(Tile::FACTORS + Factors::V + s + 8);
        L[0] = u.x * v0, L[1] = u.y * v0, L[2] = u.x * v1, L[3] = u.y * v1;
        return;
    }
    const uint32_t diagonal = me.cell(Tile::FACTORS + Factors::DIAGONAL + 8 * t + g);
    const float near0 = lds<float>(diagonal), near1 = lds<float>(diagonal + 32);
    const float2 u = lds<float2>(me.cell(Tile::FACTORS + Factors::HALF + t));
    const float v = me.value(Tile::FACTORS + Factors::HALF + s);
    L[0] = n ? u.x * v : near0, L[1] = n ? u.y * v : near1;
    L[2] = n ? near0 : 0.0f, L[3] = n ? near1 : 0.0f;
}

template <class Tile>
GT_DEV void make_split_pairs(const SplitGradientBlock<Tile>& me, const SplitPairs& S, SplitPairs& W) {
    const int chunk = me.warp / 2, half = me.warp % 2, g = lane_id() / 4, j = lane_id() % 4;
    const bool is_own = chunk == me.me, is_before = chunk < me.me;
    SplitPairs v = {}; /* <dy, x>, then M */
    multiply_pairs<ROWS_P>(me.smem + (is_before ? Tile::DY : Tile::X), me.rows(chunk), half, v);
    float2 column[2]; /* what undoes t or s, and its factor */
    GT_UNROLL
    for (int n = 0; n < 2; n++) {
        const int c = 16 * half + 8 * n + 2 * j;
        column[n] = lds<float2>(me.cell(me.inverses(chunk) + c));
        if (is_own) continue;
        const float2 factor = lds<float2>(me.cell(Tile::OTHER + SHORT * chunk + c));
        column[n].x *= factor.x, column[n].y *= factor.y;
    }
    float rows[4] = {};
    GT_UNROLL
    for (int m = 0; m < 2; m++) {
        float decay[2], weight[2], gamma[2][4];
        GT_UNROLL
        for (int e = 0; e < 2; e++) {
            const int row = 16 * m + 8 * e + g;
            if (is_before) {
                decay[e] = me.value(Tile::FACTORS + Factors::PRE + row) * me.value(Tile::INVERSES + SHORT + row);
                weight[e] = 1.0f;
            } else {
                decay[e] = is_own ? 1.0f : me.value(Tile::FACTORS + Factors::SUF + row);
                weight[e] = me.value(Tile::FACTORS + Factors::DELTA + row) * me.value(Tile::INVERSES + row);
            }
        }
        GT_UNROLL
        for (int n = 0; n < 2; n++) {
            float L[4];
            if (is_own) own_decays(me, m, half, n, L);
            GT_UNROLL
            for (int e = 0; e < 4; e++) {
                const float by = (is_own ? L[e] : decay[e / 2]) * (e % 2 ? column[n].y : column[n].x);
                const float w = v[m][n][e] * finite(finite(by) * weight[e / 2]);
                W[m][n][e] += w;
                gamma[n][e] = w * S[m][n][e];
                v[m][n][e] = finite(S[m][n][e] * finite(by));
            }
            GT_UNROLL
            for (int e = 0; e < 2; e++) rows[2 * m + e] += gamma[n][2 * e] + gamma[n][2 * e + 1];
        }
        if (!is_own) continue;
        if (m == half) store_diagonal(gamma, me.cell(Tile::DIAGONAL + 16 * m));
        if (m < half) {
            float columns[4] = {gamma[0][0] + gamma[0][2], gamma[0][1] + gamma[0][3], gamma[1][0] + gamma[1][2],
                                gamma[1][1] + gamma[1][3]};
            store_column_sums(columns, me.cell(Tile::CORNER + 16));
        }
    }
    reduce_scatter<4, 4, 1>(rows, j); /* of token 8 j + g */
    if (!is_own) sts<float>(me.cell(Tile::GAMMA + SHORT * me.warp + 8 * j + g), rows[0]);
    if (is_own && half == 1 && j < 2) sts<float>(me.cell(Tile::CORNER + 8 * j + g), rows[0]);
    if (!is_before)
        store_split_pairs(v, me.smem + Tile::M + Tile::BLOCK16 * me.warp, me.cell(Tile::M_INVERSE + SHORT * me.warp));
}

/* ---- a step: dB, dC, U, dx ------------------------------------------------------------------------------------------ */

/* A warp's columns, of all tokens of the block: [16 tokens][8 columns][as mma has them]. */
template <class Tile>
struct SplitSums {
    float dB[2][Tile::TILES][4], dC[2][Tile::TILES][4];
};

template <class Tile>
GT_DEV void load_left(uint32_t rows, int k, SplitLeft (&a)[2]) {
    GT_UNROLL
    for (int m = 0; m < 2; m++) {
        ldmatrix_x4(a[m].hi, tile_at<2 * ROWS_P>(rows, m, k));
        ldmatrix_x4(a[m].lo, tile_at<2 * ROWS_P>(rows, m, k + SplitTile<ROWS_P>::LO));
    }
}

/* Right operands of a warp's columns, rows 16 k ... of a tile of N columns. */
template <class Tile>
GT_DEV void load_right(const SplitGradientBlock<Tile>& me, uint32_t rows, int k, uint32_t (&hi)[Tile::TILES][2],
                       uint32_t (&lo)[Tile::TILES][2]) {
    uint32_t a[4], b[4];
    const int pair = me.warp * Tile::TILES / 2;
    ldmatrix_x4_trans(a, tile_at<Tile::WIDE>(rows, k, pair));
    ldmatrix_x4_trans(b, tile_at<Tile::WIDE>(rows, k, pair + Tile::LO));
    GT_UNROLL
    for (int i = 0; i < 2 * Tile::TILES; i++) {
        const bool second = Tile::TILES == 1 && me.warp % 2;
        hi[i / 2][i % 2] = second ? a[2 + i % 2] : a[i];
        lo[i / 2][i % 2] = second ? b[2 + i % 2] : b[i];
    }
}

template <class Tile>
GT_DEV void add_split_states(const SplitGradientParams& p, const SplitGradientBlock<Tile>& me, int h, int p0,
                             SplitSums<Tile>& sums) {
    constexpr int TILES = Tile::TILES;
    const Problem& in = p.in;
    if (me.warp >= Tile::ACTIVE) return;
    const int g = lane_id() / 4, j = lane_id() % 4, column0 = 8 * TILES * me.warp;
    /* h[2 j, + 1, + 8, + 9][g], as a right operand */
    float state[2][TILES][4];
    const float* from = p.h.plain;
    if (from) from += ((((int64_t)me.b * in.H + h) * p.slots + me.slot) * in.P + p0 + 2 * j) * in.N + column0 + g;
    GT_UNROLL
    for (int i = 0; i < 8 * TILES; i++) {
        const int row = 16 * (i / 4 / TILES) + 8 * (i / 2 % 2) + i % 2, n = i / 4 % TILES;
        const bool exists = from && p0 + 2 * j + row < in.P && column0 + 8 * n + g < in.columns;
        state[i / 4 / TILES][n][i % 4] = exists ? ldg<float>(from + row * in.N + 8 * n) : 0.0f;
    }
    float factor[4], Z = 0.0f;
    const int chunks = (me.slot_tokens + SHORT - 1) / SHORT; /* they share the rows of Z */
    const auto factors = [&](int decay, int weight, int inverses) {
        GT_UNROLL
        for (int i = 0; i < 4; i++) {
            factor[i] = me.value(decay + 8 * i + g) * me.value(inverses + 8 * i + g);
            if (weight >= 0) factor[i] *= me.value(weight + 8 * i + g);
        }
    };
    factors(Tile::SUF, Tile::FACTORS + Factors::DELTA, Tile::INVERSES);
    GT_UNROLL
    for (int k = 0; k < 2; k++) {
        SplitLeft a[2];
        uint32_t hi[TILES][2], lo[TILES][2];
        float share[2][TILES][4] = {};
        load_left<Tile>(by_rows<2 * ROWS_P>(me.smem + Tile::X), k, a);
        load_right(me, by_rows<Tile::WIDE>(me.smem + Tile::G), k, hi, lo);
        mma_split(share, a, hi, lo);
        const float inverse = power_of_G(me, k).inverse;
        GT_UNROLL
        for (int i = 0; i < 8 * TILES; i++) {
            const int m = i / 4 / TILES, n = i / 4 % TILES, e = i % 4;
            sums.dB[m][n][e] = fma_rn(finite(factor[2 * m + e / 2] * inverse), share[m][n][e], sums.dB[m][n][e]);
        }
        if ((p0 / 16 + k) % chunks != me.me) continue;
        float Gh = 0.0f;
        GT_UNROLL
        for (int i = 0; i < 4 * TILES; i++) {
            const uint32_t x = hi[i / 4][i / 2 % 2], y = lo[i / 4][i / 2 % 2];
            const float G = i % 2 ? unpack_f16_hi(x) + unpack_f16_hi(y) : unpack_f16_lo(x) + unpack_f16_lo(y);
            Gh = fma_rn(G * inverse, state[k][i / 4][i % 4], Gh);
        }
        Z += warp_sum(Gh);
    }
    if (lane_id() == 0) sts<float>(me.cell(Tile::Z + me.warp), Z * me.value(Tile::ALL));
    factors(Tile::PRE, -1, Tile::INVERSES + SHORT);
    float dots[4] = {};
    GT_UNROLL
    for (int k = 0; k < 2; k++) {
        SplitLeft a[2];
        uint32_t hi[TILES][2], lo[TILES][2];
        float share[2][TILES][4] = {}, largest = 0.0f;
        GT_UNROLL
        for (int i = 0; i < 4 * TILES; i++) largest = fmaxf(largest, fabsf(state[k][i / 4][i % 4]));
        GT_UNROLL
        for (int mask = 1; mask < 32; mask *= 2) largest = fmaxf(largest, shfl_xor(largest, mask));
        const Power power = split_power(largest);
        GT_UNROLL
        for (int i = 0; i < 2 * TILES; i++) {
            const float* x = &state[k][i / 2][i % 2 * 2];
            split_pair(x[0] * power.value, x[1] * power.value, hi[i / 2][i % 2], lo[i / 2][i % 2]);
        }
        load_left<Tile>(by_rows<2 * ROWS_P>(me.smem + Tile::DY), k, a);
        mma_split(share, a, hi, lo);
        GT_UNROLL
        for (int i = 0; i < 4 * TILES; i++) {
            const int m = i / 2 / TILES, n = i / 2 % TILES, e = i % 2; /* row 16 m + 8 e + g */
            const float by = finite(factor[2 * m + e] * power.inverse);
            const float2 C =
                lds<float2>(me.smem + Tile::C + 4 * ((16 * m + 8 * e + g) * Tile::C_PITCH + column0 + 8 * n + 2 * j));
            const float x0 = by * share[m][n][2 * e], x1 = by * share[m][n][2 * e + 1];
            sums.dC[m][n][2 * e] += x0;
            sums.dC[m][n][2 * e + 1] += x1;
            dots[2 * m + e] = fma_rn(x0, C.x, fma_rn(x1, C.y, dots[2 * m + e]));
        }
    }
    reduce_scatter<4, 4, 1>(dots, j);
    sts<float>(me.cell(Tile::E + SHORT * me.warp + 8 * j + g), dots[0]);
}

/* U of 16 tokens s by 8 rows p a warp; dx, <x, U>, F, dDskip. */
template <class Tile>
GT_DEV void finish_split_inputs(const SplitGradientParams& p, const SplitGradientBlock<Tile>& me, int h, int p0) {
    constexpr int NP = Tile::NP, WIDE = Tile::WIDE, LO = SplitTile<ROWS_P>::LO;
    const Problem& in = p.in;
    const int lane = lane_id(), g = lane / 4, j = lane % 4, s_block = me.warp / 4, p_block = me.warp % 4;
    const int s = 16 * s_block + g, row = p0 + 8 * p_block + 2 * j;
    float from_G[1][1][4] = {}, from_pairs[4] = {};
    const uint32_t B = by_rows<WIDE>(me.smem + Tile::B),
                   G = me.smem + Tile::G +
                       tile_cell<WIDE>(8 * p_block + lane % 8, lane / 8 % 2 + lane / 16 * (NP / 8)); /* hi, lo */
    const auto multiply = [&](float(&sums)[1][1][4], const SplitLeft(&a)[1], const uint32_t(&b)[4]) {
        const uint32_t hi[1][2] = {{b[0], b[1]}}, lo[1][2] = {{b[2], b[3]}};
        mma_split(sums, a, hi, lo);
    };
    GT_UNROLL
    for (int k = 0; k < NP / 16; k++) {
        SplitLeft a[1];
        uint32_t b[4];
        ldmatrix_x4(a[0].hi, tile_at<WIDE>(B, s_block, k));
        ldmatrix_x4(a[0].lo, tile_at<WIDE>(B, s_block, k + Tile::LO));
        ldmatrix_x4(b, tile_at<WIDE>(G, 0, k));
        multiply(from_G, a, b);
    }
    const int blocks = (me.slot_tokens + 15) / 16;
    const int dy_cell = tile_cell<2 * ROWS_P>(lane % 16, p_block + lane / 16 * 2 * LO);
    GT_NO_UNROLL
    for (int k = 2 * me.me + s_block; k < blocks; k++) { /* 16 tokens t, from those of s on */
        SplitLeft a[1];
        uint32_t b[4];
        float share[1][1][4] = {};
        const uint32_t M = by_rows<32>(me.smem + Tile::M + Tile::BLOCK16 * k);
        ldmatrix_x4(a[0].hi, tile_at<32>(M, s_block, 0));
        ldmatrix_x4(a[0].lo, tile_at<32>(M, s_block, 1));
        ldmatrix_x4_trans(b, tile_at<2 * ROWS_P>(me.rows(k / 2) + dy_cell, k % 2, 0));
        multiply(share, a, b);
        const float inverse0 = me.value(Tile::M_INVERSE + SHORT * k + s),
                    inverse1 = me.value(Tile::M_INVERSE + SHORT * k + s + 8);
        GT_UNROLL
        for (int e = 0; e < 4; e++) from_pairs[e] = fma_rn(e < 2 ? inverse0 : inverse1, share[0][0][e], from_pairs[e]);
    }
    const float G_inverse = power_of_G(me, p_block / 2).inverse;
    const float2 skip = skips_of(in, h, row);
    const bool needs_dy = in.Dskip || p.dskip;
    float dots[4], dskip[2] = {}; /* <x, U> and F of s and s + 8 */
    GT_UNROLL
    for (int e = 0; e < 2; e++) {
        const int t = s + 8 * e;
        const float x_inverse = me.value(Tile::INVERSES + t), delta = me.value(Tile::FACTORS + Factors::DELTA + t);
        const float by = finite(me.value(Tile::SUF + t) * me.value(Tile::B_INVERSE + t) * G_inverse);
        const auto pair = [&](uint32_t tile) {
            const uint32_t hi = lds<uint32_t>(tile + tile_cell<2 * ROWS_P>(t, p_block) + 4 * j),
                           lo = lds<uint32_t>(tile + tile_cell<2 * ROWS_P>(t, p_block + 2 * LO) + 4 * j);
            return float2{unpack_f16_lo(hi) + unpack_f16_lo(lo), unpack_f16_hi(hi) + unpack_f16_hi(lo)};
        };
        const float2 x = pair(me.smem + Tile::X);
        const float g0 = by * from_G[0][0][2 * e], g1 = by * from_G[0][0][2 * e + 1];
        const float U0 = g0 + from_pairs[2 * e], U1 = g1 + from_pairs[2 * e + 1];
        dots[e] = fma_rn(x.x, U0, x.y * U1) * x_inverse;
        dots[2 + e] = fma_rn(x.x, g0, x.y * g1) * x_inverse * delta;
        float dx0 = delta * U0, dx1 = delta * U1;
        if (needs_dy) {
            float2 dy = pair(me.smem + Tile::DY);
            const float dy_inverse = me.value(Tile::INVERSES + SHORT + t);
            dy.x *= dy_inverse, dy.y *= dy_inverse;
            dx0 = fma_rn(skip.x, dy.x, dx0);
            dx1 = fma_rn(skip.y, dy.y, dx1);
            dskip[0] = fma_rn(dy.x, x.x * x_inverse, dskip[0]);
            dskip[1] = fma_rn(dy.y, x.y * x_inverse, dskip[1]);
        }
        if (!p.dx || t >= me.tokens(me.me) || row >= in.P) continue;
        float* to = p.dx + at(p.dx_at, me.b, me.token(me.me) + t, h) + row;
        if (p.has_share) {
            const float2 before = ldg<float2>(to);
            dx0 += before.x, dx1 += before.y;
        }
        stg<float2>(to, {dx0, dx1});
    }
    reduce_scatter<4, 4, 1>(dots, j);
    sts<float>(me.cell((j < 2 ? Tile::DIRECT : Tile::F) + SHORT * p_block + s + 8 * (j % 2)), dots[0]);
    if (!p.dskip) return;
    reduce_scatter<2, 8, 4>(dskip, g);
    if (g % 4 == 0) sts<float>(me.cell(Tile::DSKIP + SHORT * s_block + 8 * p_block + 2 * j + g / 4), dskip[0]);
}

/* ---- what is made by token ------------------------------------------------------------------------------------------ */

/* da, <x, U>, the sums across and dDskip of a step that is done, added to those of the head's steps before; after the
 * last they go to memory.  One warp. */
template <class Tile>
GT_DEV void finish_split_step(const SplitGradientParams& p, const SplitGradientBlock<Tile>& me, int h, int p0) {
    const Problem& in = p.in;
    const int lane = lane_id(), tokens = me.tokens(me.me);
    const bool is_first = p0 == 0, is_last = p0 + ROWS_P >= in.P;
    const auto cell = [&](int offset) { return lds<float>(me.cell(offset + lane)); };
    if (p.dskip) {
        const int64_t row = ((int64_t)me.b * p.slots + me.slot) * SLOT_SHORTS + me.me;
        const float sum = cell(Tile::DSKIP) + cell(Tile::DSKIP + SHORT);
        if (in.skip_per_channel) {
            if (p0 + lane < in.P) p.dskip[(row * in.H + h) * in.P + p0 + lane] = sum;
        } else {
            float all = warp_sum(sum);
            if (!is_first) all += me.value(Tile::DSKIP_SUM);
            sync_warp();
            if (lane == 0) {
                sts<float>(me.cell(Tile::DSKIP_SUM), all);
                if (is_last) p.dskip[row * in.H + h] = all;
            }
        }
    }
    if (!p.da) return;
    float E = 0.0f, Z = 0.0f;
    GT_UNROLL
    for (int i = 0; i < Tile::ACTIVE; i++) E += cell(Tile::E + SHORT * i);
    GT_UNROLL
    for (int i = 0; i < Tile::ACTIVE; i++) Z += me.value(Tile::Z + i);
    const float F = (cell(Tile::F) + cell(Tile::F + SHORT)) + (cell(Tile::F + 2 * SHORT) + cell(Tile::F + 3 * SHORT));
    float direct = (cell(Tile::DIRECT) + cell(Tile::DIRECT + SHORT)) +
                   (cell(Tile::DIRECT + 2 * SHORT) + cell(Tile::DIRECT + 3 * SHORT));
    float across = 0.0f, from = E, upto = F; /* of k: sums over t >= k, over s < k */
    const float all_E = warp_sum(E), all_F = warp_sum(F);
    if (lane == Across::E) across = all_E;
    if (lane == Across::F) across = all_F;
    if (lane == Across::Z) across = Z;
    GT_UNROLL
    for (int i = 0; i < SLOT_SHORTS; i++) {
        if (i == me.me) continue;
        const float row = cell(Tile::GAMMA + 2 * SHORT * i) + cell(Tile::GAMMA + 2 * SHORT * i + SHORT);
        if (i > me.me) {
            upto += row;
            continue;
        }
        from += row;
        const float all = warp_sum(row);
        if (lane == Across::GAMMA + i) across = all;
    }
    const float corner = cell(Tile::CORNER); /* s of the first 16 with all later t; t of the later with all of those */
    float corner_upto = corner, corner_from = corner;
    GT_UNROLL
    for (int d = 1; d < 32; d *= 2) {
        const float left = shfl_up(upto, d), right = shfl_down(from, d);
        upto += lane >= d ? left : 0.0f;
        from += lane + d < 32 ? right : 0.0f;
        const float corner_left = shfl_up(corner_upto, d), corner_right = shfl_down(corner_from, d);
        corner_upto += lane >= d ? corner_left : 0.0f;
        corner_from += lane + d < 32 ? corner_right : 0.0f;
    }
    upto = shfl_up(upto, 1);
    corner_upto = shfl_up(corner_upto, 1);
    if (lane == 0) upto = corner_upto = 0.0f;
    float da = from + upto + (lane < 16 ? corner_upto : corner_from) + cell(Tile::DIAGONAL);
    if (!is_first) {
        da += cell(Tile::KEPT);
        direct += cell(Tile::KEPT + SHORT);
        across += cell(Tile::KEPT + 2 * SHORT);
    }
    if (!is_last) {
        sync_warp();
        sts<float>(me.cell(Tile::KEPT + lane), da);
        sts<float>(me.cell(Tile::KEPT + SHORT + lane), direct);
        sts<float>(me.cell(Tile::KEPT + 2 * SHORT + lane), across);
        sync_warp();
        return;
    }
    const auto put = [&](float* to, float value) { *to = p.has_share ? *to + value : value; };
    if (lane < tokens) {
        const int64_t to = ((int64_t)me.b * in.sequences.T + me.token(me.me) + lane) * in.H + h;
        put(p.da + to, da);
        put(p.direct + to, direct);
    }
    const int64_t slot = (int64_t)me.b * p.slots + me.slot;
    if (lane < Across::COUNT) put(p.across + ((slot * SLOT_SHORTS + me.me) * Across::COUNT + lane) * in.H + h, across);
}

/* ---- dB and dC in the end ---------------------------------------------------------------------------------------------- */

/* sums += what the pairs in blocks of 16 columns from `pairs` on give with the rows of `right`. */
template <class Tile>
GT_DEV void add_weighted(const SplitGradientBlock<Tile>& me, float (&sums)[2][Tile::TILES][4], uint32_t pairs,
                         int inverses, uint32_t right) {
    if (me.warp >= Tile::ACTIVE) return;
    GT_UNROLL
    for (int k = 0; k < 2; k++) {
        SplitLeft a[2];
        uint32_t hi[Tile::TILES][2], lo[Tile::TILES][2];
        float share[2][Tile::TILES][4] = {};
        const uint32_t rows = by_rows<32>(pairs + Tile::BLOCK16 * k);
        GT_UNROLL
        for (int m = 0; m < 2; m++) {
            ldmatrix_x4(a[m].hi, tile_at<32>(rows, m, 0));
            ldmatrix_x4(a[m].lo, tile_at<32>(rows, m, 1));
        }
        load_right(me, by_rows<Tile::WIDE>(right), k, hi, lo);
        mma_split(share, a, hi, lo);
        GT_UNROLL
        for (int i = 0; i < 8 * Tile::TILES; i++) {
            const int m = i / 4 / Tile::TILES, n = i / 4 % Tile::TILES, e = i % 4;
            const float inverse = me.value(inverses + SHORT * k + 16 * m + 8 * (e / 2) + lane_id() / 4);
            sums[m][n][e] = fma_rn(inverse, share[m][n][e], sums[m][n][e]);
        }
    }
}

template <class Tile>
GT_DEV void store_split_sums(const SplitGradientBlock<Tile>& me, const Problem& in, float* out, const gt_stride& stride,
                             const float (&sums)[2][Tile::TILES][4]) {
    if (!out || me.warp >= Tile::ACTIVE) return;
    const int column0 = 8 * Tile::TILES * me.warp + 2 * (lane_id() % 4);
    GT_UNROLL
    for (int i = 0; i < 4; i++) {
        const int t = 8 * i + lane_id() / 4;
        float* to = out + at(stride, me.b, me.token(me.me) + t, me.g) + column0;
        GT_UNROLL
        for (int n = 0; n < Tile::TILES; n++)
            if (t < me.tokens(me.me) && column0 + 8 * n < in.columns)
                stg<float2>(to + 8 * n, {sums[i / 2][n][i % 2 * 2], sums[i / 2][n][i % 2 * 2 + 1]});
    }
}

/* dC += W B, dB += W^T C, chunk by chunk of the others; both to memory. */
template <class Tile>
GT_DEV void finish_split_sums(const SplitGradientParams& p, const SplitGradientBlock<Tile>& me, SplitPairs& W,
                              SplitSums<Tile>& sums) {
    constexpr int NP = Tile::NP;
    using Rows = SplitTile<NP>;
    const Problem& in = p.in;
    const int half = me.warp % 2, lane = lane_id(), g = lane / 4, j = lane % 4;
    const uint32_t tile = me.smem + Tile::G, plain = me.smem + Tile::X; /* W of the own pairs, [s][33] */
    constexpr int TURNED = 4 * SHORT * (SHORT + 1), PITCH = SHORT + 1;
    GT_NO_UNROLL
    for (int chunk = 0; chunk < SLOT_SHORTS; chunk++) {
        const bool is_own = chunk == me.me, is_C = chunk >= me.me, mine = me.warp / 2 == chunk;
        if (me.tokens(chunk) == 0) continue;
        const gt_stride& stride = is_C ? in.Cm_at : in.Bm_at;
        const float* first = static_cast<const float*>(is_C ? in.Cm : in.Bm) + at(stride, me.b, me.token(chunk), me.g);
        sync_threads();
        load_split_tile<NP>(tile, first, stride.t, me.tokens(chunk), in.columns);
        cp_async_commit();
        if (is_own && mine) {
            GT_UNROLL
            for (int i = 0; i < 16; i++)
                sts<float>(plain + 4 * (PITCH * (16 * (i / 8) + 8 * (i / 2 % 2) + g) + 16 * half + 8 * (i / 4 % 2) +
                                        2 * j + i % 2),
                           W[i / 8][i / 4 % 2][i % 4]);
        }
        cp_async_wait<0>();
        sync_threads();
        GT_NO_UNROLL
        for (int i = me.warp; i < Rows::GROUPS / Rows::AT_ONCE; i += WARPS)
            split_rows<NP>(tile, me.cell(Tile::B_INVERSE + SHORT), i * Rows::AT_ONCE);
        sync_threads();
        if (mine) {
            GT_UNROLL
            for (int i = 0; i < 4; i++) {
                const float undo = me.value(Tile::B_INVERSE + SHORT + 16 * half + 8 * (i / 2) + 2 * j + i % 2);
                GT_UNROLL
                for (int row = 0; row < 4; row++) {
                    float& x = W[row / 2][i / 2][row % 2 * 2 + i % 2];
                    x = finite(x * undo);
                }
            }
            store_split_pairs(W, me.smem + Tile::M + Tile::BLOCK16 * half, me.cell(Tile::M_INVERSE + SHORT * half));
        }
        if (is_own && me.warp / 2 == (chunk + 1) % SLOT_SHORTS) { /* 16 columns s of a row t a lane */
            float x[16], largest = 0.0f;
            GT_UNROLL
            for (int i = 0; i < 16; i++) {
                const int s = 16 * half + i;
                x[i] = finite(lds<float>(plain + 4 * (PITCH * s + lane)) * me.value(Tile::B_INVERSE + s));
                largest = fmaxf(largest, fabsf(x[i]));
            }
            const Power power = split_power(largest);
            const uint32_t block = plain + TURNED + Tile::BLOCK16 * half;
            GT_UNROLL
            for (int i = 0; i < 2; i++) {
                uint32_t hi[4], lo[4];
                GT_UNROLL
                for (int k = 0; k < 4; k++)
                    split_pair(x[8 * i + 2 * k] * power.value, x[8 * i + 2 * k + 1] * power.value, hi[k], lo[k]);
                sts<uint4>(block + tile_cell<32>(lane, i), {hi[0], hi[1], hi[2], hi[3]});
                sts<uint4>(block + tile_cell<32>(lane, i + 2), {lo[0], lo[1], lo[2], lo[3]});
            }
            sts<float>(me.cell(Tile::M_INVERSE + SHORT * (2 + half) + lane), power.inverse);
        }
        sync_threads();
        if (is_C)
            add_weighted(me, sums.dB, me.smem + Tile::M, Tile::M_INVERSE, tile);
        else
            add_weighted(me, sums.dC, me.smem + Tile::M, Tile::M_INVERSE, tile);
        if (is_own) add_weighted(me, sums.dC, plain + TURNED, Tile::M_INVERSE + 2 * SHORT, me.smem + Tile::B);
    }
    store_split_sums(me, in, p.dBm, p.dBm_at, sums.dB);
    store_split_sums(me, in, p.dCm, p.dCm_at, sums.dC);
}

/* ---- the kernels --------------------------------------------------------------------------------------------------------- */

/* Zeros where sums are added over all chunks that there may be. */
GT_DEV void clear_split_sums(const SplitGradientParams& p, int64_t row) {
    const Problem& in = p.in;
    const int64_t skips = in.skip_per_channel ? in.H * in.P : in.H;
    for (int64_t i = thread_id(); p.dskip && i < skips; i += block_threads()) p.dskip[row * skips + i] = 0.0f;
}

template <class Tile>
GT_DEV void split_gradients_of(const SplitGradientParams& p, const SplitGradientBlock<Tile>& me) {
    const Problem& in = p.in;
    const int heads = (int)(in.H / in.G), h0 = me.g * heads;
    SplitPairs S, W = {};
    SplitSums<Tile> sums = {};
    SlotTimes times;
    if (me.warp < SLOT_SHORTS) load_slot_times(in, me, h0, times);
    make_split_products(p, me, S);
    int before_h = -1, before_p = 0;
    GT_NO_UNROLL
    for (int h = h0; h < h0 + heads; h++) {
        GT_NO_UNROLL
        for (int p0 = 0; p0 < in.P; p0 += ROWS_P) {
            SplitRows<Tile> G;
            copy_split_step(p, me, h, p0);
            cp_async_wait<0>();
            sync_threads();
            G.load(me.smem + Tile::G, me.warp, me.cell(Tile::G_MOST + me.warp));
            split_step_rows(p, me, h, p0, me.warp);
            if (me.warp >= 6) split_step_rows(p, me, h, p0, me.warp + 2);
            if (me.warp == 5 && before_h >= 0) finish_split_step(p, me, before_h, before_p);
            before_h = h, before_p = p0;
            if (p0 == 0 && me.warp < SLOT_SHORTS) {
                slot_factors(in, me, h, me.warp, times);
                if (h + 1 < h0 + heads) load_slot_times(in, me, h + 1, times);
            }
            if (p0 == 0 && me.warp == SLOT_SHORTS) {
                float dt[2], delta[2];
                load_dt(in, at(in.dt_at, me.b, me.token(me.me), h), me.tokens(me.me), dt);
                deltas_of(in, h, me.tokens(me.me), dt, delta);
                make_factors<SUM_FACTORS | DIAGONAL_FACTORS>(me.cell(Tile::FACTORS), delta, in.A[h]);
            }
            sync_threads();
            G.store(me.smem + Tile::G, me.warp, power_of_G(me, me.warp / 4).value);
            make_split_pairs(me, S, W);
            sync_threads();
            add_split_states(p, me, h, p0, sums);
            finish_split_inputs(p, me, h, p0);
            sync_threads();
        }
    }
    if (me.warp == 5) finish_split_step(p, me, before_h, before_p);
    finish_split_sums(p, me, W, sums);
}

template <int NP>
GT_KERNEL(THREADS, 2)
chunk_gradient_fp32_kernel(const GT_GRID_CONSTANT SplitGradientParams p) {
#if GT_SM80_KERNELS
    using Tile = GradientSplitTile<NP>;
    wait_for_chain();
    const SplitGradientBlock<Tile> me = find_split_chunk<Tile>(p);
    if (me.tokens(me.me) == 0) {
        if (me.g == 0) clear_split_sums(p, ((int64_t)me.b * p.slots + me.slot) * SLOT_SHORTS + me.me);
        return;
    }
    split_gradients_of(p, me);
#else
    (void)p;
    __trap();
#endif
}

/* What is across chunks of a slot; ddt, dA and ddt_bias.
 * grid B*slots*ceil(H/32), block 256: a slot of 32 heads, a head a lane; warp w takes tokens w, w + 8, ... in order, and
 * the warps' sums are added in order.
 * registers: a sum for each chunk.  shared: 2 KB.  bytes per token and head: dt, ddt, and 8.  Deterministic. */
struct ChunkTimesParams {
    Problem in;
    int64_t slots;
    const float *da, *direct, *across; /* of SplitGradientParams */
    void* ddt;
    gt_stride ddt_at;
    float *dA, *dbias; /* [B*slots][H]; NULL: not wanted */
};

GT_KERNEL(THREADS, 2) chunk_times_fp32_kernel(const GT_GRID_CONSTANT ChunkTimesParams p) {
    const Problem& in = p.in;
    wait_for_chain();
    const int64_t lanes = (in.H + 31) / 32, slot = block_x() / lanes, b = slot / p.slots;
    const int64_t h = block_x() % lanes * 32 + lane_id();
    const gt_chunk chunk = chunk_at(in.sequences, CHECKPOINT, slot % p.slots);
    const int tokens = chunk.sequence < 0 || h >= in.H ? 0 : (int)(chunk.last - chunk.first);
    const int chunks = (tokens + SHORT - 1) / SHORT;
    /* of each chunk k: E of those after it, F of those before it, Gamma of t after it with s before it, Z */
    float sums[SLOT_SHORTS] = {}, Z = 0.0f;
    GT_UNROLL
    for (int i = 0; i < SLOT_SHORTS; i++) {
        if (i >= chunks) continue;
        const float* from = p.across + (slot * SLOT_SHORTS + i) * Across::COUNT * in.H + h;
        Z += from[Across::Z * in.H];
        float later = from[Across::E * in.H]; /* with s in a chunk before k, or h */
        const float earlier = from[Across::F * in.H];
        GT_UNROLL
        for (int k = 0; k < SLOT_SHORTS; k++) {
            if (k < i) {
                sums[k] += later;
                later += from[(Across::GAMMA + (k < 3 ? k : 0)) * in.H];
            } else if (k > i) {
                sums[k] += earlier;
            }
        }
    }
    float dA = 0.0f, dbias = 0.0f;
    const float bias = h < in.H && in.dt_bias ? in.dt_bias[h] : 0.0f;
    for (int t = warp_id(); t < tokens; t += WARPS) {
        const int64_t token = chunk.first + t, from = (b * in.sequences.T + token) * in.H + h;
        const int k = t / SHORT;
        const float da = p.da[from] + (k < 2 ? k < 1 ? sums[0] : sums[1] : k < 3 ? sums[2] : sums[3]) + Z;
        const Delta delta = delta_of(in.rule, load_as(in.dt, in.dt_dtype, at(in.dt_at, b, token, h)) + bias);
        /* the slope first: the sum without it may overflow */
        float ddt = fma_rn(delta.slope * in.A[h], da, delta.slope * p.direct[from]);
        if (delta.slope == 0.0f) ddt = 0.0f;
        if (p.ddt) store_as(p.ddt, in.dt_dtype, at(p.ddt_at, b, token, h), ddt);
        dA = fma_rn(delta.value, da, dA);
        dbias += ddt;
    }
    const uint32_t cells = smem_base();
    sts<float2>(cells + 8 * thread_id(), float2{dA, dbias});
    sync_threads();
    if (warp_id() != 0 || h >= in.H) return;
    dA = dbias = 0.0f;
    for (int w = 0; w < WARPS; w++) {
        const float2 sum = lds<float2>(cells + 8 * (32 * w + lane_id()));
        dA += sum.x;
        dbias += sum.y;
    }
    if (p.dA) p.dA[slot * in.H + h] = dA;
    if (p.dbias) p.dbias[slot * in.H + h] = dbias;
}

} /* namespace ssd */
} /* namespace gt */

#endif
