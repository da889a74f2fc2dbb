/* gt/ssd/sm90/gradients_tokens.cuh - ssd backward of a chunk on compute capability 9.0 (gradients.cuh): two kernels
 * that compute numbers for each token, so that chunk_gradient_hopper_kernel needs no code for them.
 *     chunk_factors_kernel   Runs before chunk_gradient_hopper_kernel.  It computes Delta and decay factors; with z,
 *                            the inverses of the powers of dy are multiplied into these factors.  It also collects the
 *                            inverses of the powers of h and G.  Without z, only this second part waits for earlier
 *                            kernels.
 *     chunk_times_kernel     Runs after chunk_gradient_hopper_kernel.  From the sums that this kernel stored, it
 *                            computes da, ddt, and partial sums of dA, ddt_bias and dDskip.
 * A warp has a chunk and head, and a lane has tokens 2 lane and 2 lane + 1.  Here a place is a chunk and 8 heads;
 * blocks take places in turn.  Places are numbered as [B, slots of 128 tokens, two chunks, ceil(H / 8)].  With packed
 * sequences, blocks take only existing places.
 * grid: at most TOKEN_BLOCKS per multiprocessor, block 256.  shared memory: chunk_factors_kernel 20.5 KB, with POWERS
 * 20.8 KB; chunk_times_kernel none.
 * Bytes per token and head: factors 41 written, and 45 read by chunk_gradient_hopper_kernel; sums 29 for each tile,
 * written and read, or 45 with Dskip per channel; dt read twice.  Every sum has one fixed order, so results are
 * deterministic. */
#ifndef GT_SSD_SM90_GRADIENTS_TOKENS_CUH
#define GT_SSD_SM90_GRADIENTS_TOKENS_CUH

#include "gradients_block.cuh"

namespace gt {
namespace ssd {

/* The chunk and head of a warp.  tokens = 0: the warp has none. */
struct TokenWarp {
    int64_t row, first;
    int b, slot, h, tokens;
    bool second;
};

/* The number of places.  With packed sequences, places with tokens come first, and only these count. */
GT_DEV int64_t token_places(const TokenParams& p) {
    const Problem& in = p.chunk.in;
    const int64_t rows = in.sequences.cu_seqlens ? used_slots(in.sequences, CHECKPOINT) * 2 : p.rows;
    return rows * ((in.H + TOKEN_WARPS - 1) / TOKEN_WARPS);
}

GT_DEV TokenWarp find_token_warp(const TokenParams& p, int64_t place) {
    const Problem& in = p.chunk.in;
    const int64_t heads = (in.H + TOKEN_WARPS - 1) / TOKEN_WARPS;
    TokenWarp me = {place / heads, 0, 0, 0, (int)(place % heads) * TOKEN_WARPS + shfl_idx(warp_id(), 0), 0, false};
    me.second = me.row % 2;
    me.slot = (int)(me.row / 2 % p.chunk.slots);
    me.b = (int)(me.row / 2 / p.chunk.slots);
    if (me.h >= in.H) return me;
    const gt_chunk chunk = chunk_at(in.sequences, CHECKPOINT, me.slot);
    const int all = chunk.sequence < 0 ? 0 : (int)(chunk.last - chunk.first), left = all - CHUNK > 0 ? all - CHUNK : 0;
    me.first = chunk.first + (me.second ? CHUNK : 0);
    me.tokens = me.second ? left : all - left;
    return me;
}

/* Stores a record to memory.  Without POWERS there is one copy.  With POWERS there are p.records copies; with z each
 * copy has the powers of dy of its own tile. */
template <bool POWERS>
GT_DEV void store_record(const TokenParams& p, const TokenWarp& me, uint32_t record, float largest) {
    using Tokens = ChunkTokens<POWERS>;
    const Problem& in = p.chunk.in;
    const int lane = lane_id();
    float* to = p.tokens + (me.row * in.H + me.h) * p.records * p.record_count;
    if constexpr (!POWERS) {
        for (int i = lane; i < Tokens::COUNT / 4; i += 32) stg<float4>(to + 4 * i, lds<float4>(record + 16 * i));
        sync_warp(); /* all lanes have read the record */
        return;
    }
    const float most = largest * lds<float>(record + 4 * Tokens::GROWTH);
    for (int tile = 0; tile < p.records; tile++, to += p.record_count) {
        float4 dy = {1.0f, 1.0f, 1.0f, 1.0f};
        if (in.dy_inverses) {
            const int64_t slot = (me.b * in.H + me.h) * p.chunk.slots + me.slot;
            dy = ldg<float4>(in.dy_inverses + inverses_index(in, slot, me.second, tile));
        }
        if (lane == 0) {
            sts<float4>(record + 4 * Tokens::DY_INVERSE, dy);
            sts<float4>(record + 4 * Tokens::BOUND, {dy.x * most, dy.y * most, dy.z * most, dy.w * most});
        }
        sync_warp();
        GT_NO_UNROLL
        for (int i = lane; i < Tokens::COUNT / 4; i += 32) {
            const float4 four = lds<float4>(record + 16 * i);
            const int block = Tokens::block_of_dy(4 * i);
            const float by = block < 0 ? 1.0f : part_of(dy, block);
            stg<float4>(to + 4 * i, {four.x * by, four.y * by, four.z * by, four.w * by});
        }
        sync_warp(); /* all lanes have read the record */
    }
}

template <bool POWERS>
GT_DEV void make_chunk_factors(const TokenParams& p, const TokenWarp& me) {
    using Tokens = ChunkTokens<POWERS>;
    const Problem& in = p.chunk.in;
    const int lane = lane_id();
    const uint32_t record = smem_base() + warp_id() * (4 * Tokens::COUNT);
    float dt[2];
    Delta delta[2];
    load_dt(in, offset_of(in.dt_stride, me.b, me.first, me.h), me.tokens, dt);
    deltas_of(in, me.h, me.tokens, dt, delta);
    const float values[2] = {delta[0].value, delta[1].value};
    float largest = fmaxf(fabsf(values[0]), fabsf(values[1]));
    if constexpr (POWERS) {
        largest = fmaxf(largest, LEAST_DELTA);
        GT_UNROLL
        for (int mask = 1; mask < 32; mask *= 2) largest = fmaxf(largest, shfl_xor(largest, mask));
    }
    make_factors<SUM_FACTORS | SQUARE_FACTORS | (POWERS ? GROWTH_FACTOR : 0), Tokens>(record, values, in.A[me.h]);
    const auto pair = [&](int offset) { return lds<float2>(record + 4 * (offset + 2 * lane)); }; /* the lane's two
                                                                                                  * tokens */
    const float2 suf = pair(Tokens::SUF);
    sts<float2>(record + 4 * (Tokens::WEIGHTS + 2 * lane), {values[0] * suf.x, values[1] * suf.y});
    if (lane % 8 == 7) sts<float>(record + 4 * (Tokens::AFTER + lane / 8), suf.y);
    if (lane == 31) {
        const bool has_skip = POWERS && in.Dskip && !in.skip_per_channel;
        const float kept = pair(Tokens::PRE).y;
        sts<float2>(record + 4 * Tokens::KEPT, {kept, has_skip ? in.Dskip[me.h] : 0.0f});
        if (!POWERS) sts<float>(record + 4 * Tokens::GROWTH, 0.0f);
        sts<float>(record + 4 * (Tokens::GROWTH + 1), 0.0f);
        sts<float4>(record + 4 * (Tokens::WEIGHTS + CHUNK), {kept, 0.0f, 0.0f, 0.0f});
    }
    sync_warp();
    store_record<POWERS>(p, me, record, largest);
}

/* Collects the inverses of the powers of a chunk's h and G, for each tile and slab. */
GT_DEV void gather_inverses(const TokenParams& p, const TokenWarp& me) {
    const Problem& in = p.chunk.in;
    const int64_t slot = (me.b * in.H + me.h) * p.chunk.slots + me.slot;
    for (int slab = 0; slab < slabs(in.N); slab++) {
        for (int i = lane_id(); i < 8 * in.tiles; i += 32) {
            const int row = i / 8 * TILE_P + i % 4 * 16;
            const float* powers = i / 4 % 2 ? p.chunk.G.powers : p.chunk.h.powers;
            p.inverses[((slab * p.rows + me.row) * in.H + me.h) * (8 * in.tiles) + i] =
                powers && row < in.P ? powers[slot * slot_powers(in.P, in.N) + power_index(in.N, row) + slab]
                                     : 0x1p-100f;
        }
    }
}

/* Only the powers of the states and of dy come from earlier kernels.  The rest of this kernel overlaps with them. */
template <bool POWERS>
GT_KERNEL(32 * TOKEN_WARPS, 5)
chunk_factors_kernel(const GT_GRID_CONSTANT TokenParams p) {
    release_chain(); /* early, because blocks of chunk_gradient_hopper_kernel take long to begin */
    const int64_t places = token_places(p);
    const auto each = [&](const auto& make) {
        GT_NO_UNROLL
        for (int64_t place = block_x(); place < places; place += grid_x()) {
            const TokenWarp me = find_token_warp(p, place);
            if (me.tokens > 0) make(me);
        }
    };
    if (POWERS && p.chunk.in.dy_inverses) wait_for_chain();
    each([&](const TokenWarp& me) { make_chunk_factors<POWERS>(p, me); });
    wait_for_chain();
    each([&](const TokenWarp& me) { gather_inverses(p, me); });
}

template <bool POWERS>
GT_DEV void make_chunk_times(const TokenParams& p, const TokenWarp& me) {
    using Tokens = ChunkTokens<POWERS>;
    const ChunkGradientParams& c = p.chunk;
    const Problem& in = c.in;
    const int lane = lane_id(), block = lane / 8, h = me.h, count = p.sums_count;
    const float* const record = p.tokens + (me.row * in.H + h) * p.records * p.record_count;
    uint32_t bits[2];
    load_dt(in, offset_of(in.dt_stride, me.b, me.first, h), me.tokens, bits);
    const float A = in.A[h], kept = record[Tokens::KEPT];
    Delta delta[2] = {};
    float2 values = {}, by = {};
    float2 da = {0.0f, 0.0f}, direct = {0.0f, 0.0f};
    float dskip = 0.0f;
    const int last = slabs(in.N) - 1;
    for (int i = 0; i < (last + 1) * in.tiles; i++) {
        const int slab = i / in.tiles, tile = i % in.tiles;
        const float* const sums = p.sums + (((slab * p.rows + me.row) * in.H + h) * in.tiles + tile) * count;
        const auto pair = [&](int offset) { return ldg<float2>(sums + offset + 2 * lane); };
        const float2 E = pair(ChunkSums::E), f = pair(ChunkSums::F), near = pair(ChunkSums::NEAR);
        const float2 diagonal = pair(ChunkSums::DIAGONAL);
        float2 pairs[3];
        GT_UNROLL
        for (int k = 0; k < 3; k++) pairs[k] = pair(ChunkSums::PAIRS + CHUNK * k);
        const float4 z = ldg<float4>(sums + ChunkSums::Z);
        if (i == 0) { /* computed while loads of the sums are in flight */
            deltas_of(in, h, me.tokens, bits, delta);
            values = {delta[0].value, delta[1].value};
            by = {factor_of_U(values.x), factor_of_U(values.y)};
        }
        float2 columns = {0.0f, 0.0f}, here = sums_from(E);
        GT_UNROLL
        for (int k = 0; k < 3; k++) { /* Gamma_ts with s in block k, which is earlier than the block of the token */
            const float2 row = sums_from(k < block ? pairs[k] : float2{0.0f, 0.0f});
            if (k < block)
                here = plus(here, row);
            else
                columns = plus(columns, pairs[k]);
        }
        /* Gamma_ts with s in the token's block and t in a later block */
        here = plus(here, sums_before<8>({columns.x * values.x, columns.y * values.y}));
        here = plus(here, diagonal); /* Gamma_ts with both in the token's block */
        /* <x, U>: the part from pairs, and the part from G */
        direct = plus(direct, plus(plus(columns, near), {f.x / by.x, f.y / by.y}));
        here = plus(
            here, sums_before<32>({by.x == values.x ? f.x : f.x * values.x, by.y == values.y ? f.y : f.y * values.y}));
        const float EGh = kept * ((z.x + z.y) + (z.z + z.w));
        da = plus(da, plus(here, {EGh, EGh}));
        if (!c.dskip || slab < last) continue;
        float4 dy = {1.0f, 1.0f, 1.0f, 1.0f};
        if (POWERS) dy = ldg<float4>(record + (p.records > 1 ? tile : 0) * p.record_count + Tokens::DY_INVERSE);
        if (in.skip_per_channel) {
            float2 all = {0.0f, 0.0f};
            GT_UNROLL
            for (int w = 0; w < 4; w++) {
                const float2 of_warp = pair(ChunkSums::DSKIP + CHUNK * w);
                all = plus(all, {of_warp.x * part_of(dy, w), of_warp.y * part_of(dy, w)});
            }
            const int column = tile * TILE_P + 2 * lane;
            float* const to = c.dskip + (me.row * in.H + h) * in.P + column;
            if (column < in.P) to[0] = all.x;
            if (column + 1 < in.P) to[1] = all.y;
        } else {
            const float4 warps = ldg<float4>(sums + ChunkSums::DSKIP_HEAD);
            dskip += (warps.x * dy.x + warps.y * dy.y) + (warps.z * dy.z + warps.w * dy.w);
        }
    }
    float dA = 0.0f, dbias = 0.0f;
    GT_UNROLL
    for (int i = 0; i < 2; i++) {
        const int t = 2 * lane + i;
        const float da_t = i ? da.y : da.x, direct_t = i ? direct.y : direct.x;
        if (t >= me.tokens) continue;
        /* multiplies each term by the slope first, because the sum of the bare terms may overflow */
        const float slope = delta[i].slope;
        float ddt = fma_rn(slope * A, da_t, slope * direct_t);
        if (slope == 0.0f) ddt = 0.0f;
        dA = fma_rn(delta[i].value, da_t, dA);
        dbias += ddt;
        if (c.ddt) store_as(c.ddt, in.dt_dtype, offset_of(c.ddt_stride, me.b, me.first + t, h), ddt);
    }
    dA = warp_sum(dA);
    dbias = warp_sum(dbias);
    if (lane > 0) return;
    for (int slab = 0; slab <= last; slab++) { /* reduce_rows() adds the rows of all slabs, so only the first gets the
                                                * sums */
        const int64_t to = (slab * p.rows + me.row) * in.H + h;
        if (c.dA) c.dA[to] = slab ? 0.0f : dA;
        if (c.dbias) c.dbias[to] = slab ? 0.0f : dbias;
    }
    if (c.dskip && !in.skip_per_channel) c.dskip[me.row * in.H + h] = dskip;
}

template <bool POWERS>
GT_KERNEL(32 * TOKEN_WARPS, 4)
chunk_times_kernel(const GT_GRID_CONSTANT TokenParams p) {
    wait_for_chain();
    const int64_t places = token_places(p);
    GT_NO_UNROLL
    for (int64_t place = block_x(); place < places; place += grid_x()) {
        const TokenWarp me = find_token_warp(p, place);
        if (me.tokens > 0) make_chunk_times<POWERS>(p, me);
    }
}

} /* namespace ssd */
} /* namespace gt */

#endif
