/* gt/ssd/sm90/gate_lost.cuh - ssd backward with z on compute capability 9.0: completes dz after gate_kernel (gate.cuh).
 * gate_kernel computes dz from y, but cannot do so for elements whose u, the output before the gate, is lost in y.
 * This kernel computes u of these elements from x, B, C and the checkpoints of h, and then dz.
 *
 * u is lost if z is 0 or far below 0.  This happens in one of millions of random elements, or in whole rows that the
 * caller has padded.  So the kernel is fast if no element is lost.  It processes every token that has a lost element by
 * itself:
 *
 *     u_t = exp(sum a) h C_t + sum_s L_ts Delta_s <C_t, B_s> x_s + Dskip x_t        dz_t = dy_t u_t silu'(z_t).
 *
 * Here h is the state before the slot of 128 tokens that contains t, and s runs from the slot's start through t.  Every
 * exponent is a sum of the a that it spans, in fp32.
 *
 * A warp takes 32 places of gate_kernel and reads one flag per lane.  It goes through the tokens of a flagged place one
 * after another.  For each token, a lane has four tokens s and two rows p.
 * TIME.  No lost element: one load of the flags from L2.  One lost element: about 35 dependent loads.  All elements
 * lost: about 50 ms, estimated, for B = 8, T = 4096, H = 64.
 * BYTES: 4 per place.
 * CHAIN.  The kernel waits for previous kernels before anything else.
 * grid: at most one block per multiprocessor; block 256.  Every sum has one fixed order, so results are
 * deterministic. */
#ifndef GT_SSD_SM90_GATE_LOST_CUH
#define GT_SSD_SM90_GATE_LOST_CUH

#include "gate.cuh"

namespace gt {
namespace ssd {

struct LostParams {
    Problem in; /* has the caller's z and dy */
    GateGradient gradient;
    Checkpoints h;       /* values NULL: zeros */
    int64_t slots, rows; /* as in GateParams */
};

constexpr int LOST_BLOCKS = 1;

/* A place: a chunk's tokens in a slot, a head, and a tile of 64 rows. */
struct LostPlace {
    int b, head, row0;    /* row0: first row of the tile */
    int first, end;       /* tokens first to end - 1 of the slot */
    int64_t start, state; /* start: the slot's first token; state: the slot's index, counted over all heads and batch
                           * elements */
};

GT_DEV LostPlace find_lost_place(const LostParams& p, int64_t place) {
    const Problem& in = p.in;
    const int64_t units = in.H * in.tiles, row = place / units, slot = row / SLOT_CHUNKS % p.slots;
    const gt_chunk chunk = chunk_at(in.sequences, CHECKPOINT, slot);
    LostPlace me;
    me.b = (int)(row / SLOT_CHUNKS / p.slots);
    me.head = (int)(place % units / in.tiles);
    me.row0 = (int)(place % in.tiles) * TILE_P;
    const int tokens = (int)(chunk.last - chunk.first);
    me.first = (int)(row % SLOT_CHUNKS) * CHUNK;
    me.end = tokens < me.first + CHUNK ? tokens : me.first + CHUNK;
    me.start = chunk.first;
    me.state = ((int64_t)me.b * in.H + me.head) * p.slots + slot;
    return me;
}

/* Loads eight numbers of a row, as fp32. */
template <class T>
GT_DEV void load_eight(const void* row, int n, float (&x)[8]) {
    using E = Element<T>;
    const uint4 four = ldg<uint4>(static_cast<const uint16_t*>(row) + n);
    const uint32_t pairs[4] = {four.x, four.y, four.z, four.w};
    GT_UNROLL
    for (int e = 0; e < 4; e++) x[2 * e] = E::lo(pairs[e]), x[2 * e + 1] = E::hi(pairs[e]);
}

/* Computes L_ts Delta_s for the lane's tokens s = 64 k + 2 lane + i of the slot.  Tokens after t get 0.  Returns the
 * decay from the slot's start through t. */
GT_DEV float decay_tokens(const float (&delta)[SLOT_CHUNKS][2], float A, int t, float (&weight)[SLOT_CHUNKS][2]) {
    float later = 0.0f; /* sum of log2 of the decays of later chunks */
    for (int k = SLOT_CHUNKS - 1; k >= 0; k--) {
        const int s = CHUNK * k + 2 * lane_id();
        const float first = s <= t ? delta[k][0] * A * LOG2_E : 0.0f, second = s < t ? delta[k][1] * A * LOG2_E : 0.0f;
        float all = first + second;
        GT_UNROLL
        for (int d = 1; d < 32; d *= 2) {
            const float other = shfl_down(all, d);
            all += lane_id() + d < 32 ? other : 0.0f;
        }
        float after = shfl_down(all, 1);
        after = lane_id() < 31 ? after : 0.0f;
        weight[k][0] = s <= t ? delta[k][0] * exp2_finite(after + second + later) : 0.0f;
        weight[k][1] = s < t ? delta[k][1] * exp2_finite(after + later) : 0.0f;
        later += shfl_idx(all, 0);
    }
    return exp2_finite(later);
}

/* Computes u of a token t of the slot, for rows `row` and row + 1, which may lie beyond P.  before, weight: results of
 * decay_tokens().  The code issues many loads at once, because nothing else hides their latency. */
template <class T>
GT_DEV float2 ungated(const LostParams& p, const LostPlace& me, int t, int row, float before,
                      const float (&weight)[SLOT_CHUNKS][2]) {
    using E = Element<T>;
    constexpr int OWN = 2 * SLOT_CHUNKS, AT_ONCE = 16;
    const Problem& in = p.in;
    const int group = (int)(me.head / (in.H / in.G));
    const bool exists = row < in.P;
    const auto rows = [&](const void* data, const gt_stride& stride, int head) {
        return static_cast<const uint16_t*>(data) + offset_of(stride, me.b, me.start, head);
    };
    const uint16_t* const C = rows(in.Cm, in.Cm_stride, group) + t * in.Cm_stride.t;
    const uint16_t* const B = rows(in.Bm, in.Bm_stride, group);
    const uint16_t* const x = rows(in.x, in.x_stride, me.head) + row;
    const bool has_state = p.h.values && exists;
    const f16* const h = has_state ? p.h.values + (me.state * in.P + row) * in.N : nullptr;
    const float* const powers =
        has_state ? p.h.powers + me.state * slot_powers(in.P, in.N) + power_index(in.N, row) : nullptr;
    float S[OWN] = {};
    float2 u = {0.0f, 0.0f};
    GT_NO_UNROLL
    for (int n = 0; n < in.N; n += 8) {
        float c[8], of_B[OWN][8], of_h[2][8] = {};
        load_eight<T>(C, n, c);
        GT_UNROLL
        for (int i = 0; i < OWN; i++) {
            const int s = CHUNK * (i / 2) + 2 * lane_id() + i % 2;
            load_eight<T>(B + (s <= t ? s : t) * in.Bm_stride.t, n, of_B[i]);
        }
        const float power = has_state ? powers[n / SLAB] * before : 0.0f;
        if (has_state) load_eight<f16>(h, n, of_h[0]), load_eight<f16>(h + in.N, n, of_h[1]);
        GT_UNROLL
        for (int e = 0; e < 8; e++) {
            GT_UNROLL
            for (int i = 0; i < OWN; i++) S[i] = fma_rn(c[e], of_B[i][e], S[i]);
            u.x = fma_rn(of_h[0][e] * power, c[e], u.x), u.y = fma_rn(of_h[1][e] * power, c[e], u.y);
        }
    }
    GT_UNROLL
    for (int i = 0; i < OWN; i++)
        S[i] = weight[i / 2][i % 2] != 0.0f || S[i] != S[i] ? S[i] * weight[i / 2][i % 2] : 0.0f;
    float2 own = {0.0f, 0.0f};
    GT_NO_UNROLL
    for (int first = 0; first <= t; first += AT_ONCE) {
        uint32_t pairs[AT_ONCE];
        GT_UNROLL
        for (int i = 0; i < AT_ONCE; i++) {
            const uint16_t* const at = x + (first + i) * in.x_stride.t;
            pairs[i] = exists && first + i <= t ? ldg<uint32_t>(reinterpret_cast<const uint32_t*>(at)) : 0;
        }
        GT_UNROLL
        for (int i = 0; i < AT_ONCE; i++) {
            const int k = first / CHUNK;
            const float of_s = shfl_idx(k ? S[2 + i % 2] : S[i % 2], (first % CHUNK + i) / 2);
            u.x = fma_rn(of_s, E::lo(pairs[i]), u.x), u.y = fma_rn(of_s, E::hi(pairs[i]), u.y);
            if (first + i == t) own = {E::lo(pairs[i]), E::hi(pairs[i])};
        }
    }
    if (in.Dskip && exists) {
        const float* const skip = in.Dskip + (in.skip_per_channel ? (int64_t)me.head * in.P + row : me.head);
        u.x = fma_rn(skip[0], own.x, u.x), u.y = fma_rn(skip[in.skip_per_channel ? 1 : 0], own.y, u.y);
    }
    return u;
}

/* Computes dz of the lost elements of a token, for the lane's two rows.  dy, z: the pairs of these rows. */
template <class T>
GT_DEV void make_lost_token(const LostParams& p, const LostPlace& me, const float (&delta)[SLOT_CHUNKS][2], int t,
                            int row, uint32_t dy, uint32_t z, const bool (&lost)[2]) {
    using E = Element<T>;
    const GateGradient& more = p.gradient;
    float weight[SLOT_CHUNKS][2];
    const float before = decay_tokens(delta, p.in.A[me.head], t, weight);
    const float2 u = ungated<T>(p, me, t, row, before, weight);
    uint16_t* const to = static_cast<uint16_t*>(more.dz) + offset_of(more.dz_stride, me.b, me.start + t, me.head) + row;
    const auto gradient = [](float a, float b, float c) { return c * silu_derivative(b, sigmoid_fast(b)) * a; };
    if (lost[0]) to[0] = (uint16_t)E::pack(gradient(E::lo(dy), E::lo(z), u.x), 0.0f);
    if (lost[1]) to[1] = (uint16_t)E::pack(gradient(E::hi(dy), E::hi(z), u.y), 0.0f);
}

/* Computes dz of a place's lost elements. */
template <class T>
GT_DEV void make_lost(const LostParams& p, int64_t place) {
    using E = Element<T>;
    static_assert(SLOT_CHUNKS == 2, "a lane has two tokens of either");
    const Problem& in = p.in;
    const GateGradient& more = p.gradient;
    const LostPlace me = find_lost_place(p, place);
    const int row = me.row0 + 2 * lane_id();
    float delta[SLOT_CHUNKS][2];
    GT_UNROLL
    for (int k = 0; k < SLOT_CHUNKS; k++) {
        float dt[2];
        const int tokens = me.end - CHUNK * k;
        load_dt(in, offset_of(in.dt_stride, me.b, me.start + CHUNK * k, me.head), tokens, dt);
        deltas_of(in, me.head, tokens, dt, delta[k]);
    }
    constexpr int AT_ONCE = 8;
    const auto pair = [&](const void* data, const gt_stride& stride, int t) {
        const uint16_t* const at = static_cast<const uint16_t*>(data) + offset_of(stride, me.b, me.start + t, me.head);
        return row < in.P && t < me.end ? ldg<uint32_t>(reinterpret_cast<const uint32_t*>(at + row)) : 0;
    };
    const auto is_pair_lost = [](uint32_t dy, uint32_t z, uint32_t y, bool(&lost)[2]) {
        lost[0] = is_lost(E::lo(dy), E::lo(z), E::lo(y)), lost[1] = is_lost(E::hi(dy), E::hi(z), E::hi(y));
        return warp_any(lost[0] || lost[1]);
    };
    GT_NO_UNROLL
    for (int first = me.first; first < me.end; first += AT_ONCE) {
        uint32_t dy[AT_ONCE], z[AT_ONCE], y[AT_ONCE], tokens = 0; /* one bit for each token with lost elements */
        GT_UNROLL
        for (int i = 0; i < AT_ONCE; i++) {
            dy[i] = pair(in.dy, in.dy_stride, first + i), z[i] = pair(in.z, in.z_stride, first + i);
            y[i] = pair(more.y, more.y_stride, first + i);
        }
        bool lost[2];
        GT_UNROLL
        for (int i = 0; i < AT_ONCE; i++) tokens |= is_pair_lost(dy[i], z[i], y[i], lost) ? 1u << i : 0;
        GT_NO_UNROLL
        for (int t = first; tokens; t++, tokens >>= 1) {
            if (tokens % 2 == 0) continue;
            const uint32_t own_dy = pair(in.dy, in.dy_stride, t), own_z = pair(in.z, in.z_stride, t);
            is_pair_lost(own_dy, own_z, pair(more.y, more.y_stride, t), lost);
            make_lost_token<T>(p, me, delta, t, row, own_dy, own_z, lost);
        }
    }
}

template <class T>
GT_KERNEL(32 * GATE_WARPS, LOST_BLOCKS)
gate_lost_kernel(const GT_GRID_CONSTANT LostParams p) {
    wait_for_chain();
    const Problem& in = p.in;
    const int64_t rows = in.sequences.cu_seqlens ? used_slots(in.sequences, CHECKPOINT) * SLOT_CHUNKS : p.rows;
    const int64_t places = rows * in.H * in.tiles, step = grid_x() * (int64_t)(32 * GATE_WARPS);
    for (int64_t place = block_x() * (int64_t)(32 * GATE_WARPS) + 32 * warp_id(); place < places; place += step) {
        const bool is_lost = place + lane_id() < places && p.gradient.lost[place + lane_id()] != 0;
        if (!warp_any(is_lost)) continue;
        for (int i = 0; i < 32; i++)
            if (shfl_idx((int)is_lost, i)) make_lost<T>(p, place + i);
    }
}

} /* namespace ssd */
} /* namespace gt */

#endif
