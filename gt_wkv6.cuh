/* gt_wkv6.cuh - RWKV-6 time mixing.
 *
 * THE OPERATOR (one batch element and head; the state S is [N,V], decay d_t in [0,1] per channel n)
 *     y_t = S_{t-1}^T r_t + (sum_n r_t u k_t) v_t            S_t = diag(d_t) S_{t-1} + k_t v_t^T
 * A pair of tokens j < i therefore carries prod_{j<m<i} d_m: its own two decays do not count.
 *
 * IN LEAVES OF 16 TOKENS.  With S the state before the leaf, G the gradient of the state after it,
 * and products within the leaf
 *     P_t = prod_{m<t} d_m      Q_t = prod_{m>t} d_m      D_ij = prod_{j<m<i} d_m      E = prod d_m
 *     C_ij = <dy_i, v_j>        A_ij = sum_n r_i k_j D_ij (j < i),   A_ii = sum_n r_i u k_i
 * everything is a few small products:
 *     dr_i = P_i . (S dy_i) + u . k_i C_ii + sum_{j<i} C_ij k_j . D_ij
 *     dk_j = Q_j . (G v_j)  + u . r_j C_jj + sum_{i>j} C_ij r_i . D_ij
 *     dv_j = G^T (Q_j . k_j) + sum_{i>=j} A_ij dy_i                    du = sum_t C_tt r_t . k_t
 *     dg_t = E . rowsum(S . G) + sum_{i>t} r_i . P_i . (S dy_i) + sum_{j<t} k_j . Q_j . (G v_j)
 *            + sum_{j<t<i} C_ij r_i . k_j . D_ij                        g = log d
 *     S <- E . S + sum_t (Q_t . k_t) v_t^T         G <- E . G + sum_t (P_t . r_t) dy_t^T
 *
 * NUMERICAL HAZARDS, and what is done about them
 *   - Factoring D_ij into exp(c_i) exp(-c_j) overflows under strong decay.  Only products of decays
 *     are formed, never a quotient or a positive exponent: every factor is in [0,1], exact zeros and
 *     hard resets included.
 *   - dg as a difference of two running sums is noise in fast channels.  The form above only adds.
 *   - d near 1: fp32 cannot hold 1 - d (20 % error at 1 - 3e-7), which a long accumulation shows.
 *     States are updated as S + (expm1(g) S + k v) unless the decay is strong (scale_of_log below).
 *   - raw decay: dx = dg g would be 0 * inf where d = 0; there it is selected to 0.
 *
 * This file: what describes the operator (plain C, shared with the stubs and the CPU twin), the
 * kernels, the launchers, the C functions. */
#ifndef GT_WKV6_CUH
#define GT_WKV6_CUH

#include "gt/base/op.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- the operator's table ------------------------------------------------------------------------- */

static gt_status gt_wkv6_resolve(void *filled, gt_pass pass, gt_dims *dims) {
    gt_wkv6_args *a = (gt_wkv6_args *)filled;
    gt_recurrence f = {a->B, a->T, a->segments, a->seq_capacity, a->slot_capacity,
                       a->state_in_shared, a->state_in, a->state_out,
                       a->cu_seqlens, a->seq_count, a->slots};
    gt_status status;
    if (a->V == 0) a->V = a->N;
    dims->n['V' - 'A'] = a->V;
    if ((status = gt_check_range(GT_ERROR_SIZE, "V", a->V, 1, GT_MAX_SIZE)) ||
        (status = gt_check_range(GT_ERROR_VALUE, "decay", (int)a->decay, GT_DECAY_RAW, GT_DECAY_LOG)) ||
        (status = gt_resolve_packed(&f, pass, dims)))
        return status;
    if (pass == GT_STEP) a->slot_capacity = dims->n['Q' - 'A'];
    return GT_OK;
}

#define GT_AT(field) offsetof(gt_wkv6_args, field)
GT_API const gt_op *gt_op_wkv6(void) {
    static const gt_size sizes[] = {{'B', "B", GT_AT(B), 0},
                                    {'T', "T", GT_AT(T), 0},
                                    {'H', "H", GT_AT(H), 1},
                                    {'N', "N", GT_AT(N), 1},
                                    {0, NULL, 0, 0}};
    static const gt_tensor tensors[] = {
        {"r", GT_AT(r), GT_AT(r_stride), "BTHN", 'x', "III", NULL},
        {"k", GT_AT(k), GT_AT(k_stride), "BTHN", 'x', "III", NULL},
        {"w", GT_AT(w), GT_AT(w_stride), "BTHN", 'w', "III", NULL},
        {"v", GT_AT(v), GT_AT(v_stride), "BTHV", 'x', "III", NULL},
        {"u", GT_AT(u), 0, "HN", 'f', "iii", NULL},
        {"state_in", GT_AT(state_in), 0, "SHNV", 'f', "ii-", NULL},
        {"y", GT_AT(y), GT_AT(y_stride), "BTHV", 'x', "O-O", NULL},
        {"state_out", GT_AT(state_out), 0, "QHNV", 'f', "o-s", "state_in"},
        {"slots", GT_AT(slots), 0, "B", 'i', "--i", NULL},
        {"cu_seqlens", GT_AT(cu_seqlens), 0, "C", 'i', "ii-", NULL},
        {"seq_count", GT_AT(seq_count), 0, "E", 'i', "ii-", NULL},
        {"dy", GT_AT(dy), GT_AT(dy_stride), "BTHV", 'x', "-I-", NULL},
        {"dstate_out", GT_AT(dstate_out), 0, "QHNV", 'f', "-i-", NULL},
        {"dr", GT_AT(dr), GT_AT(dr_stride), "BTHN", 'x', "-o-", NULL},
        {"dk", GT_AT(dk), GT_AT(dk_stride), "BTHN", 'x', "-o-", NULL},
        {"dw", GT_AT(dw), GT_AT(dw_stride), "BTHN", 'w', "-o-", NULL},
        {"dv", GT_AT(dv), GT_AT(dv_stride), "BTHV", 'x', "-o-", NULL},
        {"du", GT_AT(du), 0, "HN", 'f', "-g-", NULL},
        {"dstate_in", GT_AT(dstate_in), 0, "SHNV", 'f', "-o-", "dstate_out"},
        {NULL, 0, 0, NULL, 0, NULL, NULL}};
    static const gt_op op = {"wkv6",  sizeof(gt_wkv6_args), GT_AT(dtype), GT_AT(w_dtype),
                             "w_dtype", GT_AT(accumulate),    sizes,        tensors,
                             gt_wkv6_resolve};
    return &op;
}
#undef GT_AT

#ifdef __cplusplus
} /* extern "C": kernels follow */
#endif

#if defined(__CUDACC__) || defined(GT_EMU)

#include "gt/base/reduce.cuh"

namespace gt {
namespace wkv6 {

/* ---- sizes ------------------------------------------------------------------------------------------ */

constexpr int LEAF = 16;        /* tokens handled together */
constexpr int CHECKPOINT = 64; /* tokens between the states that forward leaves for backward */
constexpr int LEAVES = CHECKPOINT / LEAF;
constexpr int MAX_SIZE = 256;   /* of N and V */
constexpr int SHARED_BYTES = 64 * 1024; /* that a block may have on every architecture */
/* from 8.0 on: on all; on 8.0, 8.7, 9.0, 10.0; on 9.0 and 10.0 */
constexpr int LEAST_KB = 99, AMPERE_KB = 163, HOPPER_KB = 227;

/* States that forward keeps for backward: bf16 for bf16 activations in the sizes that have kernels on
 * tensor cores, else fp32. */
template <class T>
using StateOf = typename std::conditional<std::is_same<T, bf16>::value, bf16, float>::type;

GT_HD gt_dtype state_dtype(gt_dtype dtype, int64_t N, int64_t V) {
    return dtype == GT_BF16 && N == V && (N == 32 || N == 64 || N == 128) ? GT_BF16 : GT_F32;
}

/* Whether S is kept in two bf16 terms, its rests behind all checkpoints: in rowsum(S . G) the rounding of S is an error
 * that dw of a slow channel has in common for a chunk.  N = 32, where a checkpoint is small and a row short. */
GT_HD bool keeps_rest(gt_dtype dtype, int64_t N, int64_t V) {
    return state_dtype(dtype, N, V) == GT_BF16 && N == 32;
}

/* G, which the sweep leaves for the chunks, has elements of the activations' type; f16 with a power of two for every
 * part of a row that a warp of the sweep has (Fit). */
template <class T>
using GradientOf = typename std::conditional<std::is_same<T, f16>::value, f16, StateOf<T>>::type;

/* Whether it may lie where the chunk that reads it will write dk and dv.  fp32, N = 128: a warp of the sweep has all
 * rows, half of which would lie in dk and half in dv. */
template <class T, int N>
constexpr bool G_FITS_OUTPUTS = !(std::is_same<T, float>::value && N == 128);

/* bf16: what the sweep sums over the rows of a chunk's states, of which the chunk mends what rounding does to dg: see
 * there. */
constexpr int SWEEP_SUMS = 3;

/* What bf16 leaves of a number, or of both of a pair. */
GT_HD float rest_of(float x) { return x - bf16_to_f32(f32_to_bf16(x)); }

GT_HD uint32_t rests_of(float lo, float hi) {
    const uint32_t pair = pack_bf16(lo, hi);
    return pack_bf16(lo - unpack_bf16_lo(pair), hi - unpack_bf16_hi(pair));
}

/* Packed sequences; cu_seqlens is NULL if the call has none, and a sequence is a batch element. */
struct Packing {
    const int32_t *cu_seqlens, *seq_count;
    int64_t capacity;
};

/* One argument struct, prepared, as every kernel sees it. */
struct Problem {
    int64_t B, T, H;
    int64_t sequences; /* B, or the capacity for packed ones */
    Packing packing;
    int N, V;
    gt_dtype dtype, w_dtype;
    gt_decay decay;
    const void *r, *k, *w, *v, *dy;
    const float* u;
    gt_stride r_at, k_at, w_at, v_at, dy_at;
};

/* ---- device helpers ---------------------------------------------------------------------------------- */

GT_DEV int64_t at(gt_stride s, int64_t b, int64_t t, int64_t h) {
    return b * s.b + t * s.t + h * s.h;
}

/* Where a sequence lies.  All chunks of a head have places in one row, for every batch element. */
struct Sequence {
    bool exists;
    int64_t b, first, tokens; /* the first token of batch element b */
    int64_t place;            /* of its first chunk */
};

GT_DEV int64_t sequence_count(const Packing& p) { return p.seq_count ? *p.seq_count : p.capacity; }

GT_DEV Sequence sequence_at(const Problem& p, int64_t s) {
    const int32_t* cu_seqlens = p.packing.cu_seqlens;
    if (!cu_seqlens) return {true, s, 0, p.T, 0};
    if (s >= sequence_count(p.packing)) return {false, 0, 0, 0, 0};
    return {true, 0, cu_seqlens[s], cu_seqlens[s + 1] - cu_seqlens[s],
            gt_chunk_place(cu_seqlens, CHECKPOINT, s, 0)};
}

/* The chunk at a place; its sequence is -1 if there is none. */
GT_DEV gt_chunk chunk_at(const Packing& p, int64_t T, int64_t place) {
    if (p.cu_seqlens) return gt_chunk_at(p.cu_seqlens, sequence_count(p), CHECKPOINT, place);
    const int64_t first = place * CHECKPOINT;
    return {0, first, T - first < CHECKPOINT ? T : first + CHECKPOINT};
}

/* Division by a number that the host knows: (x + the upper half of x times magic) >> shift, for x < 2^31. */
struct Divider {
    uint32_t magic, shift;
    int divisor;
};

static inline Divider divide_by(int divisor) {
    uint32_t shift = 0;
    while ((int64_t)1 << shift < divisor) shift++;
    const uint64_t rest = ((uint64_t)1 << shift) - (uint64_t)divisor;
    return {(uint32_t)((rest << 32) / (uint64_t)divisor + 1), shift, divisor};
}

GT_DEV int divide(int x, const Divider& by, int* rest) {
    const uint32_t high = (uint32_t)((uint64_t)(uint32_t)x * by.magic >> 32);
    const int quotient = (int)((high + (uint32_t)x) >> by.shift);
    *rest = x - quotient * by.divisor;
    return quotient;
}

/* log d of one element of w: never positive infinity; minus infinity is an exact zero decay */
GT_DEV float log_decay(const Problem& p, float w) {
    return p.decay == GT_DECAY_LOG ? w : -exp_accurate(w);
}

/* How a state that decays by exp(g) is scaled: S <- keep * S + factor * S.  Near 1 the small part of
 * the decay is factor = expm1(g), which keeps its relative accuracy; keep = 1.  Else keep = 0. */
struct Scale {
    float keep, factor;
};

GT_DEV Scale scale_of_log(float g) {
    Scale s;
    const bool near_one = g > -0.69f && g < 0.05f;
    s.keep = near_one ? 1.0f : 0.0f;
    s.factor = near_one ? expm1_neg(g) : exp_accurate(g);
    return s;
}

GT_DEV float rescale(float keep, float factor, float state, float added) {
    return fma_rn(keep, state, fma_rn(factor, state, added));
}

/* ---- forward, and G backwards in time, any size: token by token ---------------------------------------
 * The recurrence of G is that of S with (k, v) replaced by (r, dy), from the last token to the first:
 * REVERSE runs it so, with y = NULL, and leaves G after every chunk of CHECKPOINT tokens.
 * grid sequences*H*tiles, block 128.  A block owns one head and COLUMNS = 128 / SLICES columns of its state.
 * A column is held by SLICES neighbouring lanes, 32 rows each: rows 4 (slice + SLICES q) + 0..3.
 * registers: 32 state values a thread, fp32, for the whole sequence.
 * shared: r, k and the decay as (keep, factor) of TOKENS = 16 tokens (N > 128: 8), v of the block's
 *     columns, the bonus sum_n r u k of each token: TOKENS (4 ROWS + COLUMNS + 1) floats = 20 KB at
 *     N = V = 64, 34 KB at most.
 * bytes: r, k, w once per tile of columns, v and y once; states once.  N = 64: one tile.
 * Sums over n are in one fixed order (registers, then a butterfly over the slices): deterministic. */
struct ForwardParams {
    Problem in;
    void* y; /* NULL: only states are wanted, and r is not read */
    gt_stride y_at;
    const float* state_in;
    float* state_out;
    void* checkpoints; /* [B,H,places,N,V] */
    gt_dtype checkpoint_dtype;
    int64_t rest; /* elements from a checkpoint to its rest, 0: none */
    int64_t places;
    int state_in_shared, is_step;
    const int32_t* slots;
    int64_t slot_capacity;
    int64_t tiles;
};

template <int SLICES>
struct ForwardTraits {
    static constexpr int THREADS = 128;
    static constexpr int ROWS = 32 * SLICES;
    static constexpr int COLUMNS = THREADS / SLICES;
    static constexpr int TOKENS = SLICES < 8 ? 16 : 8; /* in shared memory at a time */
    static constexpr int R = 0, K = R + TOKENS * ROWS, KEEP = K + TOKENS * ROWS;
    static constexpr int FACTOR = KEEP + TOKENS * ROWS, V = FACTOR + TOKENS * ROWS;
    static constexpr int BONUS = V + TOKENS * COLUMNS, END = BONUS + TOKENS; /* offsets in floats */
    static constexpr int SMEM = 4 * END;
    static_assert(SMEM <= SHARED_BYTES, "fits every architecture");
    static_assert(CHECKPOINT % TOKENS == 0, "a checkpoint is between two fills");
};

/* Fills the block's shared tile with TOKENS tokens from `first`; beyond `end` and the sizes the inputs
 * are 0 and the decay is 1. */
template <int SLICES>
GT_DEV void load_forward_tile(const ForwardParams& p, uint32_t smem, int64_t b, int64_t h,
                              int64_t first, int64_t end, int column0) {
    using C = ForwardTraits<SLICES>;
    const Problem& in = p.in;
    constexpr int COLUMN = C::ROWS < C::THREADS ? C::ROWS / 8 : C::TOKENS; /* tokens of a thread */
    for (int i = thread_id(); i < C::ROWS * (C::TOKENS / COLUMN); i += C::THREADS) {
        const int n = i % C::ROWS, token = i / C::ROWS * COLUMN;
        const int64_t t = first + token, left = n < in.N ? end - t : 0;
        float r[COLUMN], k[COLUMN], w[COLUMN];
        load_column(r, in.r, in.dtype, at(in.r_at, b, t, h) + n, in.r_at.t, p.y ? left : 0);
        load_column(k, in.k, in.dtype, at(in.k_at, b, t, h) + n, in.k_at.t, left);
        load_column(w, in.w, in.w_dtype, at(in.w_at, b, t, h) + n, in.w_at.t, left);
        GT_UNROLL
        for (int x = 0; x < COLUMN; x++) {
            const Scale scale = scale_of_log(x < left ? log_decay(in, w[x]) : 0.0f);
            const uint32_t cell = smem + 4 * ((token + x) * C::ROWS + n);
            sts<float>(cell + 4 * C::R, r[x]);
            sts<float>(cell + 4 * C::K, k[x]);
            sts<float>(cell + 4 * C::KEEP, scale.keep);
            sts<float>(cell + 4 * C::FACTOR, scale.factor);
        }
    }
    {
        constexpr int COUNT = C::TOKENS / SLICES;
        const int column = thread_id() % C::COLUMNS, token = thread_id() / C::COLUMNS * COUNT;
        const int j = column0 + column;
        const int64_t t = first + token;
        float v[COUNT];
        load_column(v, in.v, in.dtype, at(in.v_at, b, t, h) + j, in.v_at.t, j < in.V ? end - t : 0);
        GT_UNROLL
        for (int x = 0; x < COUNT; x++)
            sts<float>(smem + 4 * (C::V + (token + x) * C::COLUMNS + column), v[x]);
    }
    sync_threads();
    constexpr int LANES = C::THREADS / C::TOKENS; /* of a token's bonus */
    const int token = thread_id() / LANES;
    float bonus = 0.0f;
    for (int n = thread_id() % LANES; n < in.N; n += LANES) {
        const float u = in.u ? in.u[h * in.N + n] : 0.0f;
        bonus += lds<float>(smem + 4 * (C::R + token * C::ROWS + n)) * u *
                 lds<float>(smem + 4 * (C::K + token * C::ROWS + n));
    }
    for (int mask = 1; mask < LANES; mask <<= 1) bonus += shfl_xor(bonus, mask);
    if (thread_id() % LANES == 0) sts<float>(smem + 4 * (C::BONUS + token), bonus);
    sync_threads();
}

/* y of one token and column, and the column's step to the next token. */
template <int SLICES>
GT_DEV float forward_token(uint32_t smem, int token, int slice, int column, float (&state)[32]) {
    using C = ForwardTraits<SLICES>;
    const float v = lds<float>(smem + 4 * (C::V + token * C::COLUMNS + column));
    float y = 0.0f;
    GT_UNROLL
    for (int q = 0; q < 8; q++) {
        const uint32_t cell = smem + 4 * (token * C::ROWS + 4 * (slice + SLICES * q));
        const float4 r = lds<float4>(cell + 4 * C::R), k = lds<float4>(cell + 4 * C::K);
        const float4 keep = lds<float4>(cell + 4 * C::KEEP);
        const float4 factor = lds<float4>(cell + 4 * C::FACTOR);
        float* s = &state[4 * q];
        y = fma_rn(r.x, s[0], y);
        y = fma_rn(r.y, s[1], y);
        y = fma_rn(r.z, s[2], y);
        y = fma_rn(r.w, s[3], y);
        s[0] = rescale(keep.x, factor.x, s[0], k.x * v);
        s[1] = rescale(keep.y, factor.y, s[1], k.y * v);
        s[2] = rescale(keep.z, factor.z, s[2], k.z * v);
        s[3] = rescale(keep.w, factor.w, s[3], k.w * v);
    }
    GT_UNROLL
    for (int mask = 1; mask < SLICES; mask <<= 1) y += shfl_xor(y, mask);
    return fma_rn(lds<float>(smem + 4 * (C::BONUS + token)), v, y);
}

/* Copies a thread's 32 rows of its column from or to a state [N,V]; rows and columns outside are 0. */
template <int SLICES, bool STORE, class T>
GT_DEV void move_column(T* state, const Problem& in, int slice, int column, float (&s)[32]) {
    GT_UNROLL
    for (int i = 0; i < 32; i++) {
        const int n = 4 * (slice + SLICES * (i / 4)) + i % 4;
        const bool inside = n < in.N && column < in.V;
        if constexpr (STORE) {
            if (inside) Element<T>::store(state, (int64_t)n * in.V + column, s[i]);
        } else {
            s[i] = state && inside ? state[(int64_t)n * in.V + column] : 0.0f;
        }
    }
}

/* The same to a checkpoint. */
template <int SLICES>
GT_DEV void store_checkpoint(const ForwardParams& p, int64_t index, int slice, int column,
                             float (&s)[32]) {
    const Problem& in = p.in;
    index *= (int64_t)in.N * in.V;
    if (p.checkpoint_dtype == GT_BF16) {
        bf16* to = static_cast<bf16*>(p.checkpoints) + index;
        move_column<SLICES, true>(to, in, slice, column, s);
        if (!p.rest) return;
        float rest[32];
        GT_UNROLL
        for (int i = 0; i < 32; i++) rest[i] = rest_of(s[i]);
        move_column<SLICES, true>(to + p.rest, in, slice, column, rest);
    } else {
        move_column<SLICES, true>(static_cast<float*>(p.checkpoints) + index, in, slice, column, s);
    }
}

template <int SLICES, bool REVERSE>
GT_KERNEL(128, 2) token_kernel(const GT_GRID_CONSTANT ForwardParams p) {
    using C = ForwardTraits<SLICES>;
    wait_for_chain();
    const Problem& in = p.in;
    const uint32_t smem = smem_base();
    const int64_t tile = block_x() % p.tiles, head = block_x() / p.tiles;
    const int64_t h = head % in.H;
    const Sequence seq = sequence_at(in, head / in.H);
    if (!seq.exists) return;
    const int column0 = (int)tile * C::COLUMNS;
    const int slice = thread_id() % SLICES, column = thread_id() / SLICES;
    const int64_t NV = (int64_t)in.N * in.V;
    const int64_t row = p.is_step && p.slots ? p.slots[head / in.H] : head / in.H;
    const bool skipped = p.is_step && (row < 0 || row >= p.slot_capacity);

    float state[32];
    const int64_t row_in = p.state_in_shared ? 0 : row;
    const float* state_in = p.state_in && !skipped ? p.state_in + (row_in * in.H + h) * NV : nullptr;
    move_column<SLICES, false>(state_in, in, slice, column0 + column, state);

    constexpr int PARTS = CHECKPOINT / C::TOKENS; /* of a chunk */
    const int64_t parts = (seq.tokens + C::TOKENS - 1) / C::TOKENS, end = seq.first + seq.tokens;
    const int64_t place0 = (seq.b * in.H + h) * p.places + seq.place;
    for (int64_t i = 0; i < parts; i++) {
        const int64_t part = REVERSE ? parts - 1 - i : i, first = seq.first + part * C::TOKENS;
        const bool enters = REVERSE ? i == 0 || part % PARTS == PARTS - 1 : part % PARTS == 0;
        if (p.checkpoints && enters)
            store_checkpoint<SLICES>(p, place0 + part / PARTS, slice, column0 + column, state);
        load_forward_tile<SLICES>(p, smem, seq.b, h, first, end, column0);
        const int tokens = (int)(end - first < C::TOKENS ? end - first : C::TOKENS);
        for (int step = 0; step < tokens; step++) {
            const int token = REVERSE ? tokens - 1 - step : step;
            const float y = forward_token<SLICES>(smem, token, slice, column, state);
            if (p.y && slice == 0 && column0 + column < in.V)
                store_as(p.y, in.dtype, at(p.y_at, seq.b, first + token, h) + column0 + column,
                         skipped ? 0.0f : y);
        }
        sync_threads();
    }
    if (p.state_out && !skipped)
        move_column<SLICES, true>(p.state_out + (row * in.H + h) * NV, in, slice, column0 + column,
                                  state);
}

/* ---- forward on tensor cores: N = V in 32, 64, 128 -------------------------------------------------------
 * In a leaf, with c_t = -log2 of the product of the decays before token t,
 *     R_t = r_t 2^-c_t        K_t = k_t 2^c_(t+1)        A = tril(R K^T) + diag(bonus)
 *     y = R S + A v           S <- E . (S + K^T v)       E = 2^-c_16
 * One pair of operands serves the pairs inside the leaf, the output and the state.  2^c grows, but it
 * is bounded: a group of 16 channels in which some c_16 reaches SLOW_LIMIT (a hard reset, or 16 decays
 * under 2^-4) takes the slow form for that leaf: K holds k_t prod_{m>t} d_m, its part of A is made by
 * running products, and S is scaled before the update.  No decay is clamped in either form.
 * Compute capability 9.0 has a kernel of its own for N = 128 in 16 bits: forward_hopper_kernel.
 *
 * grid ceil(sequences*H*segments/HEADS).  Block: GROUPS preparing warps a head, 16 channels each (a lane has 2 channels
 * of 4 consecutive tokens, so that the running sums cross lanes twice); and N / COLUMNS state warps a
 * head.  They hand over two buffers, each with two mbarriers (FULL: the preparing warps arrive, EMPTY: the
 * state warps); cp.async runs AHEAD leaves ahead.
 * state warp: S^T as accumulators, MT x NT tiles of 16 x 8 (64 registers); an accumulator pair is the
 *     B operand of R S as it stands, with the inner index permuted alike in R.  tf32 operands: their
 *     error of 2^-12 vanishes under the rounding of y (fp32: below), their range is that of fp32.
 * columns of a state warp: tile i, column c stands for value 2 TILES (c/2) + 2i + c%2, so that a lane
 *     ends with 2 TILES neighbouring outputs.  v is stored permuted.
 * rows of A and y: row g is token 2g, row g + 8 token 2g + 1.  R is stored as cells of 16 bytes, two
 *     tokens by two channels, each a lane's left operand as the tensor core wants it.
 * shared, per head and buffer: R [8, N/2+4] cells, K [16, N+8] fp32 (columns xor 24 in rows with bit 2
 *     set: no bank conflicts in any access), v [16, N+8], E [N], bonus [16,GROUPS], slow groups'
 *     pairs: 16 KB at N = 64; two buffers and the rings: 70 KB.
 * tensor cores per leaf and head, N = 64: 2 x (16 + 32 + 8 + 32) m16n8k8.
 * bytes: every input once, y once, states and checkpoints once.  Deterministic: fixed order.
 *
 * fp32 activations (SPLIT): every product is three.  x = its upper 11 bits + rest, both tf32, and
 *     a b ~ a b + a_rest b + a b_rest
 * drops 2^-21 of a b.  The tensor core cuts off what is below tf32: as operand, x stands for its upper bits.
 *   - operands lie in shared memory once, in fp32, and are split where they are used: a mask and a
 *     subtraction, the same for S.  Twice the shared memory would save a tenth of the instructions.
 *   - tensor cores round sums towards zero.  So the small products have accumulators of their own, and S is
 *     none from leaf to leaf: what a leaf adds is summed from zero and added as fp32 does (update_state_split).
 *   - E near 1 as keep and factor (Scale), not rounded to fp32: a state of 4096 leaves would show it.
 *   - c below 64 is off by 2^-19 at most, and with it 2^c by 2e-6, where products of R and K are as small; the
 *     sums of neighbours, whose products are not, share all but the last roundings.  Seen: 7e-7 of y and of states.
 * v lies in cells as R does (value_cell), in the order of a left operand.
 * shared, N = 64: 18 KB a buffer, two of them and the rings, 2 leaves deep: 74 KB; N = 128: 108 KB.
 * registers: S 64, y with the small products 32, A 16. */
/* STATES: for walks that want states only, states_tensor_kernel; S_COPIES: see there. */
template <class T_, class W_, int N_, bool STATES_ = false, int S_COPIES_ = 2>
struct TensorTraits {
    using T = T_;
    using W = W_;
    using State = StateOf<T>;
    using Gradient = GradientOf<T>;
    static constexpr int N = N_;
    static constexpr bool SPLIT = std::is_same<T, float>::value; /* products of fp32 operands */
    static constexpr bool FITS_G = !std::is_same<Gradient, State>::value; /* f16, by Fit */
    static constexpr int HEADS = N == 32 ? 2 : 1; /* per block */
    static constexpr bool STATES = STATES_;
    static constexpr int TILES = (N == 128 && !STATES) || (STATES && SPLIT) ? 2 : 4;
    /* of a state warp: values, channels */
    static constexpr int COLUMNS = 8 * TILES, ROWS = !STATES || SPLIT ? N : N == 128 ? 64 : 32;
    static constexpr int MT = TILES / 2, NT = N / 8;
    /* tiles of which a lane's values are neighbours; STATES: 16 bytes of them, as G has them */
    static constexpr int PERMUTED = !STATES ? TILES : SPLIT ? 1 : 4;
    static constexpr int GROUPS = N / 16, PARTS = N / COLUMNS, SHARES = N / ROWS * PARTS; /* of a state */
    static constexpr int TURNS = STATES && N != 128 ? 2 : 1; /* preparing warps of a group that take leaves in turn */
    static constexpr int PREP_WARPS = TURNS * HEADS * GROUPS, STATE_WARPS = HEADS * SHARES;
    static constexpr int THREADS = 32 * (PREP_WARPS + STATE_WARPS);
    static constexpr bool KEEPS_BF16 = std::is_same<State, bf16>::value;
    /* Tokens that are prepared together, and of these a lane's.  STATES: no factor grows, so there may be more than a
     * leaf: N = 64 in 16 bits, where it is faster and two blocks still share the memory of 9.0. */
    static constexpr int STEP = STATES && !SPLIT && N == 64 && sizeof(W) == 2 ? 2 * LEAF : LEAF, TOKENS = STEP / 4;
    /* A ring of leaves in flight: r, k, w by rows, v by lanes.  Each preparing warp has its own, with rows of its
     * 16 channels; STATES: each team, of the warps of a head that prepare a leaf, with whole rows.  N = 128 in 16 bits: as
     * many leaves as 99 KB hold; STATES: beside two S, which need more, four. */
    static constexpr int TEAM = STATES ? GROUPS : 1, WIDTH = 16 * TEAM;
    static constexpr int AHEAD = STATES     ? (N < 128 || SPLIT ? 2 : S_COPIES_ == 2 ? 4 : sizeof(W) == 2 ? 3 : 2)
                                 : N != 128 ? (SPLIT ? 2 : 4)
                                            : (sizeof(W) == 2 ? 2 : 1);
    static constexpr int RING_ROWS = STEP * WIDTH + 4 * 16; /* elements: see ring_at */
    static constexpr int RING_R = 0, RING_K = STATES ? 0 : RING_ROWS * (int)sizeof(T); /* bytes */
    static constexpr int RING_W = RING_K + RING_ROWS * (int)sizeof(T);
    static constexpr int RING_V = RING_W + RING_ROWS * (int)sizeof(W);
    static constexpr int STAGE = RING_V + STEP * WIDTH * (int)sizeof(T);
    /* How rows of a type come into the ring: lanes of a row, 16 bytes each; rows at once; pieces of a lane. */
    template <class E>
    struct Copies {
        static constexpr int LANES = WIDTH * (int)sizeof(E) / 16, ROWS = 32 * TEAM / LANES, PIECES = STEP / ROWS;
    };
    static constexpr int PITCH = N + 8;
    static constexpr int PAIR_PITCH = 8 * N + 32; /* STATES: bytes of two tokens of K, cells of 2 x 2 */
    static_assert(STEP / 2 * PAIR_PITCH <= STEP * PITCH * 4, "within K");
    /* offsets in bytes within the buffer of one head */
    static constexpr int CELLS = N / 2 + 4; /* of R in a row */
    static constexpr int R = 0, K = STATES ? 0 : LEAF / 2 * CELLS * 16, VALUES = K + STEP * PITCH * 4;
    static constexpr int VALUE_CELLS = N / 2 + 2; /* fp32: of v in a row of two tokens; STATES: plain rows */
    static constexpr int VALUE_PITCH = 2 * VALUE_CELLS;
    static constexpr int SCALE =
        VALUES + (SPLIT ? STEP / 2 * VALUE_CELLS * 16 : STEP * PITCH * 2);
    static constexpr int BONUS = SCALE + (SPLIT ? 8 : 4) * N;
    static constexpr int SLOW = BONUS + 4 * LEAF * GROUPS, FULL = SLOW + 32, EMPTY = FULL + 8;
    static constexpr int PAIRS = SLOW + 64;
    static constexpr int HEAD_BUFFER = PAIRS + (STATES ? 0 : 4 * LEAF * LEAF * GROUPS);
    static constexpr int BUFFER = HEADS * HEAD_BUFFER;
    static constexpr int RING = 2 * BUFFER;
    static constexpr int SMEM = RING + PREP_WARPS / TEAM * AHEAD * STAGE;
    /* reverse, behind all that: bf16, S of a checkpoint of each head, once or twice; once, a sum of each row, too */
    static constexpr bool KEEPS_REST = KEEPS_BF16 && N == 32; /* keeps_rest() */
    static constexpr bool G_IN_OUTPUTS = G_FITS_OUTPUTS<T, N>;
    static constexpr int S_COPY = STATES && KEEPS_BF16 ? HEADS * N * N * 2 * (KEEPS_REST ? 2 : 1) : 0;
    static constexpr int S_COPIES = S_COPIES_, KEPT = SMEM + S_COPY;
    static constexpr int S_BYTES = S_COPIES == 2 ? 2 * S_COPY : S_COPY + 4 * ROWS * STATE_WARPS;
    static constexpr bool NEEDS_ROOM = N == 128 && (STATES ? KEEPS_BF16 && S_COPIES == 2 : SPLIT);
    static_assert(SMEM + S_BYTES <= (NEEDS_ROOM ? AMPERE_KB : LEAST_KB) * 1024,
                  "fits every architecture, or sm_80 and sm_90");
    static_assert(GROUPS * 4 <= FULL - SLOW && FULL % 8 == 0, "slow flags, then mbarriers");
};

/* Column of the stored tile for value v (even): tile i, columns 2j, 2j + 1. */
template <class C>
GT_DEV constexpr int value_column(int v) {
    const int o = v % (8 * C::PERMUTED), i = o / 2 % C::PERMUTED, j = o / (2 * C::PERMUTED);
    return v - o + 8 * i + 2 * j;
}

/* fp32: byte offset of the cell for value v, a multiple of 4, of a token.  A cell has two tokens by column c
 * of tiles 2 mt and 2 mt + 1, in the order of a left operand; v and v + 2 are half of it, v + 1 and v + 3 half of
 * the next. */
template <class C>
GT_DEV constexpr int value_cell(int token, int v) {
    const int o = v % C::COLUMNS, mt = o % (2 * C::TILES) / 4, j = o / (2 * C::TILES);
    return 16 * (token / 2 * C::VALUE_CELLS + (v - o) / 2 + 8 * mt + 2 * j) + token % 2 * 8;
}

constexpr float SLOW_LIMIT = 64.0f; /* of c_16: leaves 2^63 of fp32's range for |k v| and for sums */

/* Of numbers that f16 is to hold: the power of two that brings the largest next to 2^15, and what undoes it. */
struct Fit {
    float scale, undo;
};

GT_DEV Fit fit_f16(float largest) {
    int exponent = (int)(as_uint(largest) >> 23) - 127 - 14;
    if (exponent < -126) exponent = -126;
    return {as_float((uint32_t)(127 - exponent) << 23), as_float((uint32_t)(exponent + 127) << 23)};
}

/* How the tokens of a sequence are cut into segments: `tokens` each, a multiple of CHECKPOINT. */
struct Segments {
    int count, tokens;
};

GT_HD Segments cut_tokens(int T, int segments) {
    int tokens = (T + segments - 1) / segments;
    tokens = (tokens + CHECKPOINT - 1) / CHECKPOINT * CHECKPOINT;
    if (tokens == 0) tokens = CHECKPOINT;
    const int count = (T + tokens - 1) / tokens;
    return {count < 1 ? 1 : count, tokens};
}

/* A sequence may be cut into segments, each walked by a block of its own: first every segment from a zero
 * state (local = 1), but for that which the walk ends with; then scan_segments_kernel, then again from
 * the states found.  Of packed sequences the device finds the lengths, and so the segments. */
struct TensorParams {
    Problem in;
    void* y; /* NULL: only states are wanted */
    gt_stride y_at;
    const float* state_in;
    float* state_out;
    void* checkpoints;      /* [B,H,places,N,N], of StateOf<T>; reverse: of GradientOf<T> */
    /* reverse: G after a whole chunk lies, row for row, where its kernel will write dv, of N = 128 dk and dv: 64
     * rows in each; `checkpoints` [sequences,H,N,N] is for shorter chunks, and for last_apart.  data = NULL: all G goes
     * there */
    struct Rows {
        void* data;
        gt_stride at;
    } G_rows[2];
    int64_t rest;           /* elements from a checkpoint of S to its rest; 0: none */
    const void* S;          /* reverse, bf16: S before each chunk, and ... */
    float* rowsums;         /* ... where rowsums go, [B,H,places,3,PARTS,N]: see store_rowsums(); NULL: not wanted */
    int S_copies;           /* ... and how many S a block has room for */
    int places;
    int state_in_shared;
    Segments segments;     /* of every sequence; packed: the most of any, with that of T */
    Divider by_segments, by_H;
    int local;             /* writes segment_states and segment_decays, nothing else */
    float* segment_states; /* [sequences,H,segments,N,N], NULL if segments = 1 */
    float* segment_decays; /* [sequences,H,segments,2,N]: log2 of the decay through a segment, two terms */
    bool last_apart; /* reverse: G after a last chunk does not go in outputs, which its block writes at the same time */
    bool S_starts_zero; /* reverse: before the first chunk of every sequence */
    float* G_undo; /* reverse, f16: [B,H,places,PARTS,N], Fit::undo of G */
};

/* One head's segment. */
struct Span {
    bool exists;
    bool starts, ends;        /* first and last of its sequence, in the order of time */
    int item, head, h;        /* head: of its sequence; item = head * segments + segment */
    int64_t b;
    int64_t place;            /* of its first chunk, among those of all heads */
    int start, tokens, leaves;
};

GT_DEV Segments segments_of(const Problem& in, const Sequence& seq, Segments most) {
    return in.packing.cu_seqlens ? cut_tokens((int)seq.tokens, most.count) : most;
}

template <bool REVERSE>
GT_DEV Span span_at(const TensorParams& p, int64_t item) {
    Span s;
    const bool inside = item < p.in.sequences * p.in.H * p.segments.count;
    int segment;
    s.item = inside ? (int)item : 0;
    s.head = divide(s.item, p.by_segments, &segment);
    const Sequence seq = sequence_at(p.in, divide(s.head, p.by_H, &s.h));
    const Segments cut = segments_of(p.in, seq, p.segments);
    s.starts = segment == 0;
    s.ends = segment == cut.count - 1;
    s.exists = inside && seq.exists && segment < cut.count && !(p.local && (REVERSE ? s.starts : s.ends));
    s.b = seq.b;
    const int before = segment * cut.tokens, left = (int)seq.tokens - before;
    s.start = (int)seq.first + before;
    s.tokens = s.exists ? (left < cut.tokens ? left : cut.tokens) : 0;
    s.leaves = (s.tokens + LEAF - 1) / LEAF;
    s.place = (seq.b * p.in.H + s.h) * p.places + seq.place + before / CHECKPOINT;
    return s;
}

/* That of the block's head `sub`. */
template <class C, bool REVERSE>
GT_DEV Span span_of(const TensorParams& p, int sub) {
    return span_at<REVERSE>(p, (int64_t)block_x() * C::HEADS + sub);
}

/* Two neighbouring elements as they come from memory. */
template <class T>
struct Pair {
    uint32_t bits;
    GT_METHOD float lo() const { return Element<T>::lo(bits); }
    GT_METHOD float hi() const { return Element<T>::hi(bits); }
};
template <>
struct Pair<float> {
    float2 value;
    GT_METHOD float lo() const { return value.x; }
    GT_METHOD float hi() const { return value.y; }
};

/* What a preparing lane has of a step: 2 channels of TOKENS tokens, and pieces of v. */
template <class C>
struct RawLeaf {
    Pair<typename C::T> r[C::TOKENS], k[C::TOKENS];
    Pair<typename C::W> w[C::TOKENS];
    uint4 v[C::template Copies<typename C::T>::PIECES];
};

/* A tensor as a preparing lane copies it: 16 bytes of one token of the next leaf or step. */
struct Source {
    const char* before; /* those of the leaf before: moved first, it is in no copy's way */
    int64_t leaf_bytes;

    /* first: token of the first leaf; tokens: from one copied to the next.  NULL stays NULL. */
    GT_METHOD void set(const void* data, gt_stride at_, int element, int64_t b, int64_t h,
                       int64_t first, int row, int column, int tokens) {
        leaf_bytes = data ? tokens * at_.t * element : 0;
        before = static_cast<const char*>(data);
        if (before)
            before += (b * at_.b + h * at_.h + (first + row) * at_.t + column) * element - leaf_bytes;
    }

    GT_METHOD void copy(uint32_t to, bool exists, bool inside) {
        before += leaf_bytes;
        if (exists) cp_async<16>(to, before, inside ? 16 : 0);
    }
};

/* Elements from the start of a ring tensor to a token: one token of each quad lie in different banks. */
template <class C>
GT_DEV int ring_at(int token) {
    return token * C::WIDTH + token / C::TOKENS * 16;
}

/* A preparing lane's place. */
template <class C>
struct Preparer {
    int quad, channel; /* tokens from TOKENS quad on, channels channel, channel + 1 of the head */
    int group;         /* channel / 16 */
    uint32_t r_cell, k_row, values, bonus, scale; /* where it writes in buffer 0 */
    uint32_t buffer0, ring;
    int tokens; /* of the span; 0 if it does not exist */
    using T = typename C::T;
    using W = typename C::W;
    static constexpr int PIECES = C::template Copies<T>::PIECES, W_PIECES = C::template Copies<W>::PIECES;
    Source r[PIECES], k[PIECES], v[PIECES], w[W_PIECES]; /* of 16 bytes each */
    float u0, u1;
    float bits[2], bits_rest[2]; /* of decay so far, log2; what their sums have rounded off */
    bool raw;      /* decay = exp(-exp(w)) */

    /* Finds the span's tensors, from token `first` on, `step` tokens from those copied to the next. */
    GT_METHOD void open(const Problem& in, const Span& span, int64_t first, int step) {
        constexpr int ELEMENT = sizeof(T);
        const int64_t b = span.b, h = span.h;
        const int channel0 = C::STATES ? 0 : 16 * group; /* of the ring */
        tokens = span.tokens;
        GT_UNROLL
        for (int i = 0; i < PIECES; i++) {
            const int row = copied_row<T>(i), column = channel0 + copied_column<T>();
            r[i].set(in.r, in.r_at, ELEMENT, b, h, first, row, column, step);
            k[i].set(in.k, in.k_at, ELEMENT, b, h, first, row, column, step);
            v[i].set(in.v, in.v_at, ELEMENT, b, h, first, v_row(i), v_column(i), step);
        }
        GT_UNROLL
        for (int i = 0; i < W_PIECES; i++)
            w[i].set(in.w, in.w_at, sizeof(W), b, h, first, copied_row<W>(i), channel0 + copied_column<W>(), step);
        u0 = in.u ? in.u[h * C::N + channel] : 0.0f;
        u1 = in.u ? in.u[h * C::N + channel + 1] : 0.0f;
        raw = in.decay == GT_DECAY_RAW;
    }

    /* Starts the copies of a leaf, leaf after leaf in the direction of the sources; zeros beyond the
     * span. */
    GT_METHOD void copy(int leaf, bool exists, int stage) {
        const uint32_t to = ring + stage * C::STAGE;
        const int left = tokens - leaf * C::STEP;
        if (C::STATES || exists) { /* a source that is moved past the end costs less than not moving it */
            GT_UNROLL
            for (int i = 0; i < PIECES; i++) {
                const int row = copied_row<T>(i);
                const uint32_t cell = to + (int)sizeof(T) * (ring_at<C>(row) + copied_column<T>());
                if (!C::STATES) r[i].copy(cell + C::RING_R, exists, row < left);
                k[i].copy(cell + C::RING_K, exists, row < left);
                v[i].copy(to + C::RING_V + v_cell(i), exists, v_row(i) < left);
            }
            GT_UNROLL
            for (int i = 0; i < W_PIECES; i++) {
                const int row = copied_row<W>(i);
                const uint32_t cell = to + (int)sizeof(W) * (ring_at<C>(row) + copied_column<W>());
                w[i].copy(cell + C::RING_W, exists, row < left);
            }
        }
        cp_async_commit();
    }

    /* Of r, k or w, of type E: the token of the lane's i-th piece, the first channel in a row of the ring. */
    GT_METHOD int lane_in_team() const { return C::STATES ? 32 * group + lane_id() : lane_id(); }
    template <class E>
    GT_METHOD int copied_row(int i) const {
        return lane_in_team() / C::template Copies<E>::LANES + i * C::template Copies<E>::ROWS;
    }
    template <class E>
    GT_METHOD int copied_column() const {
        return lane_in_team() % C::template Copies<E>::LANES * (16 / (int)sizeof(E));
    }
    GT_METHOD int v_cell(int i) const { return 16 * (lane_in_team() + 32 * C::TEAM * i); }

    /* Of a channel, so far.  Of an infinite sum the rest is NaN. */
    GT_METHOD float log2_decay(int e) const {
        return C::SPLIT && bits[e] < 1e30f ? -bits[e] - bits_rest[e] : -bits[e];
    }

    /* The lane's i-th piece of v.  fp32: half a warp has 8 pieces of two tokens of a cell. */
    GT_METHOD int v_row(int i) const {
        if constexpr (!C::SPLIT) return (32 * group + lane_id()) / (C::N / 8) + LEAF * i;
        const int second = lane_id() / 8 % 2;
        if constexpr (C::N == 32) return 8 * group + lane_id() / 16 * 4 + second + 2 * i;
        return 256 / C::N * group + second + (C::N == 64 ? 2 * i : 0);
    }
    GT_METHOD int v_column(int i) const {
        if constexpr (!C::SPLIT) return (32 * group + lane_id()) % (C::N / 8) * 8;
        if constexpr (C::N == 32) return lane_id() % 8 * 4;
        return (lane_id() % 8 + lane_id() / 16 * 8) * 4 + (C::N == 128 ? 64 * i : 0);
    }

    /* The lane's part of a leaf that has arrived. */
    GT_METHOD RawLeaf<C> read(int stage) const {
        const uint32_t from = ring + stage * C::STAGE;
        constexpr int SIZE = sizeof(typename C::T), W_SIZE = sizeof(typename C::W);
        const int own = ring_at<C>(C::TOKENS * quad) + (C::STATES ? 16 * group : 0) + lane_id() % 8 * 2;
        const uint32_t rows = from + SIZE * own, w_rows = from + C::RING_W + W_SIZE * own;
        RawLeaf<C> x = {};
        GT_UNROLL
        for (int i = 0; i < C::TOKENS; i++) {
            if (!C::STATES) x.r[i] = lds<Pair<typename C::T>>(rows + C::RING_R + SIZE * C::WIDTH * i);
            x.k[i] = lds<Pair<typename C::T>>(rows + C::RING_K + SIZE * C::WIDTH * i);
            x.w[i] = lds<Pair<typename C::W>>(w_rows + W_SIZE * C::WIDTH * i);
        }
        if (!C::STATES) read_values(x, stage);
        return x;
    }

    /* STATES: later, since by then registers are free. */
    GT_METHOD void read_values(RawLeaf<C>& x, int stage) const {
        GT_UNROLL
        for (int i = 0; i < PIECES; i++) x.v[i] = lds<uint4>(ring + stage * C::STAGE + C::RING_V + v_cell(i));
    }
};

/* -log2 of a raw decay, exp(-exp(w)) */
GT_DEV float bits_of_raw(float w) {
    constexpr float LOG2_LOG2_E = 0.52876637f;
    return ex2_approx(fma_rn(w, LOG2_E, LOG2_LOG2_E));
}

/* -log2 of a lane's decays; 0 for tokens beyond the sequence. */
template <class C>
GT_DEV void decay_bits(const Preparer<C>& me, const RawLeaf<C>& x, int leaf, float (&h)[C::TOKENS][2]) {
    if (me.raw) {
        GT_UNROLL
        for (int i = 0; i < C::TOKENS; i++) {
            h[i][0] = bits_of_raw(x.w[i].lo());
            h[i][1] = bits_of_raw(x.w[i].hi());
        }
    } else {
        GT_UNROLL
        for (int i = 0; i < C::TOKENS; i++) {
            h[i][0] = -x.w[i].lo() * LOG2_E;
            h[i][1] = -x.w[i].hi() * LOG2_E;
        }
    }
    const int left = me.tokens - leaf * C::STEP;
    if (left < C::STEP) {
        GT_UNROLL
        for (int i = 0; i < C::TOKENS; i++)
            if (C::TOKENS * me.quad + i >= left) h[i][0] = h[i][1] = 0.0f;
    }
}

/* Over the lane's tokens, pair by pair, of one of its channels. */
template <int TOKENS>
GT_DEV float sum_of(const float (&h)[TOKENS][2], int e) {
    float sum[TOKENS / 2];
    GT_UNROLL
    for (int i = 0; i < TOKENS / 2; i++) sum[i] = h[2 * i][e] + h[2 * i + 1][e];
    GT_UNROLL
    for (int left = TOKENS / 4; left > 0; left /= 2) {
        GT_UNROLL
        for (int i = 0; i < left; i++) sum[i] = sum[2 * i] + sum[2 * i + 1];
    }
    return sum[0];
}

/* 2^-bits, rounded well where it is near 1: a state meets it once per leaf of its life */
GT_DEV float leaf_decay(float bits) {
    return bits < 1.0f && bits > -0.1f ? 1.0f + expm1_neg(-bits * LN_2) : ex2_approx(-bits);
}

GT_DEV float to_tf32(float x) { return as_float(as_uint(x) + 0x1000u); } /* nearest; mma drops the rest */
GT_DEV float exact_tf32(float x) { return as_float((as_uint(x) + 0x1000u) & 0xffffe000u); }

/* What the tensor core takes of x, and what it leaves, exactly. */
GT_DEV float tf32_part(float x) { return as_float(as_uint(x) & 0xffffe000u); }
GT_DEV float tf32_rest(float x) { return x - tf32_part(x); }

/* x as an operand in shared memory: rounded, or as it is if it will be split where it is used. */
template <class C>
GT_DEV float stored_operand(float x) {
    return C::SPLIT ? x : to_tf32(x);
}

template <bool SPLIT, int COUNT>
GT_DEV void set_rests(const float (&x)[COUNT], float (&rest)[COUNT]) {
    GT_UNROLL
    for (int i = 0; SPLIT && i < COUNT; i++) rest[i] = tf32_rest(x[i]);
}

/* c += a b.  SPLIT: in three products, of which `low` gets the small ones: c is rounded (towards zero, by
 * tensor cores) once less, and the two chains of products run side by side. */
template <bool SPLIT>
GT_DEV void mma_split(float (&c)[4], float (&low)[4], const float (&a)[4], const float (&a_rest)[4],
                      float b0, float b1) {
    mma_tf32(c, a, b0, b1);
    if constexpr (SPLIT) {
        mma_tf32(low, a_rest, b0, b1);
        mma_tf32(low, a, tf32_rest(b0), tf32_rest(b1));
    }
}

/* Exclusive prefix over the 4 lanes of a channel pair (lanes 8 apart) and the total. */
GT_DEV float scan_quads(float x, int quad, float* total) {
    float y = shfl_up(x, 8);
    float sum = quad >= 1 ? x + y : x;
    y = shfl_up(sum, 16);
    sum = quad >= 2 ? sum + y : sum;
    *total = shfl_idx(sum, 24 + lane_id() % 8);
    y = shfl_up(sum, 8);
    return quad >= 1 ? y : 0.0f;
}

/* The sum over the later lanes of a channel pair, by additions only: x may be infinite. */
GT_DEV float sum_later_quads(float x, int quad) {
    float y = shfl_down(x, 8);
    float suffix = quad <= 2 ? x + y : x;
    y = shfl_down(suffix, 16);
    suffix = quad <= 1 ? suffix + y : suffix;
    y = shfl_down(suffix, 8);
    return quad <= 2 ? y : 0.0f;
}

/* The bonus of 4 tokens of a quad, summed over its 8 lanes; a lane gets that of token bonus_token(), and
 * so 4 tokens take 4 shuffles, not 12. */
GT_DEV float sum_bonus(const float (&bonus)[4]) {
    const bool upper = lane_id() & 1, odd = lane_id() & 2;
    float a = upper ? bonus[2] : bonus[0], b = upper ? bonus[3] : bonus[1];
    a += shfl_xor(upper ? bonus[0] : bonus[2], 1);
    b += shfl_xor(upper ? bonus[1] : bonus[3], 1);
    float sum = odd ? b : a;
    sum += shfl_xor(odd ? a : b, 2);
    return sum + shfl_xor(sum, 4);
}

GT_DEV int bonus_token() { return (lane_id() & 1) * 2 + (lane_id() >> 1 & 1); }

/* The slow form of one group: K with decays after the token, for store_key, and the group's part of A.  r and k
 * are read again from the ring, where the decays take the room of w and v. */
template <class C, class StoreKey>
GT_DEV void prepare_slow(const Preparer<C>& me, const RawLeaf<C>& x, const float (&h)[4][2],
                         int buffer, int stage, StoreKey store_key) {
    static_assert(C::STAGE - C::RING_W >= 4 * LEAF * LEAF, "room for the decays");
    using E = Element<typename C::T>;
    constexpr int SIZE = sizeof(typename C::T);
    const uint32_t from = me.ring + stage * C::STAGE, decays = from + C::RING_W;
    float after[2];
    GT_UNROLL
    for (int e = 0; e < 2; e++)
        after[e] = sum_later_quads(h[0][e] + h[1][e] + h[2][e] + h[3][e], me.quad);
    sync_warp(); /* w and v of the stage are read */
    GT_UNROLL
    for (int i = 3; i >= 0; i--) {
        float2 k;
        k.x = stored_operand<C>(x.k[i].lo() * ex2_approx(-after[0]));
        k.y = stored_operand<C>(x.k[i].hi() * ex2_approx(-after[1]));
        store_key(i, k);
        after[0] += h[i][0];
        after[1] += h[i][1];
        sts<float2>(decays + 4 * (LEAF * (4 * me.quad + i) + lane_id() % 8 * 2),
                    {ex2_approx(-h[i][0]), ex2_approx(-h[i][1])});
    }
    sync_warp();
    const uint32_t pairs = me.buffer0 + buffer * C::BUFFER + C::PAIRS + 4 * LEAF * LEAF * me.group;
    for (int pair = lane_id(); pair < LEAF * LEAF; pair += 32) {
        const int i = pair / LEAF, j = pair % LEAF;
        float sum = 0.0f;
        for (int n = 0; j < i && n < LEAF; n++) {
            const typename C::T r =
                lds<typename C::T>(from + C::RING_R + SIZE * (ring_at<C>(i) + n));
            const typename C::T k =
                lds<typename C::T>(from + C::RING_K + SIZE * (ring_at<C>(j) + n));
            float product = E::load(&r, 0) * E::load(&k, 0);
            for (int m = j + 1; m < i; m++) product *= lds<float>(decays + 4 * (LEAF * m + n));
            sum += product;
        }
        sts<float>(pairs + 4 * pair, sum);
    }
}

template <class C>
GT_DEV void store_scale_and_values(Preparer<C>& me, const RawLeaf<C>& x, const float (&total)[2],
                                   int buffer) {
    /* values are permuted: see value_column */
    if constexpr (C::SPLIT) {
        GT_UNROLL
        for (int e = 0; e < 2; e++) {
            const float sum = me.bits[e] + total[e];
            me.bits_rest[e] += total[e] - (sum - me.bits[e]);
            me.bits[e] = sum;
        }
        if (me.quad < 2) { /* one of the lane's channels each */
            const Scale scale = scale_of_log(-(me.quad ? total[1] : total[0]) * LN_2);
            sts<float>(me.scale + buffer * C::BUFFER, scale.factor);
            sts<float>(me.scale + buffer * C::BUFFER + 8, scale.keep);
        }
        GT_UNROLL
        for (int i = 0; i < 2; i++) {
            const int token = C::N == 128 ? 0 : 2 * i, v = C::N == 128 ? 64 * i : 0; /* from the lane's first */
            const uint32_t to = me.values + buffer * C::BUFFER;
            if constexpr (C::STATES) {
                sts<uint4>(to + 4 * (token * C::VALUE_PITCH + v), x.v[i]);
            } else {
                sts<uint2>(to + value_cell<C>(token, v), {x.v[i].x, x.v[i].z});
                sts<uint2>(to + value_cell<C>(token, v) + 16, {x.v[i].y, x.v[i].w});
            }
        }
    } else {
        me.bits[0] += total[0];
        me.bits[1] += total[1];
        if (me.quad < 2)
            sts<float>(me.scale + buffer * C::BUFFER, leaf_decay(me.quad ? total[1] : total[0]));
        GT_UNROLL
        for (int piece = 0; piece < me.PIECES; piece++) {
            const uint32_t to = me.values + buffer * C::BUFFER + 2 * LEAF * C::PITCH * piece;
            const uint32_t pairs[4] = {x.v[piece].x, x.v[piece].y, x.v[piece].z, x.v[piece].w};
            GT_UNROLL
            for (int i = 0; i < 4; i++) sts<uint32_t>(to + 2 * value_column<C>(2 * i), pairs[i]);
        }
    }
}

/* The operands R, stored, and K, whose two channels of token i are for store_key(i, k); c: before the lane's first
 * token; bonus: its channels' part. */
template <class C, class StoreKey>
GT_DEV void make_operands(const Preparer<C>& me, const RawLeaf<C>& x, const float (&h)[4][2], float (&c)[2],
                          int buffer, float (&bonus)[4], StoreKey store_key) {
    float4 cell;
    GT_UNROLL
    for (int i = 0; i < 4; i++) {
        const float r0 = x.r[i].lo(), r1 = x.r[i].hi(), k0 = x.k[i].lo(), k1 = x.k[i].hi();
        const float r_low = stored_operand<C>(r0 * ex2_approx(-c[0]));
        const float r_high = stored_operand<C>(r1 * ex2_approx(-c[1]));
        if (i % 2 == 0) {
            cell.x = r_low;
            cell.z = r_high;
        } else {
            cell.y = r_low;
            cell.w = r_high;
            sts<float4>(me.r_cell + buffer * C::BUFFER + i / 2 * C::CELLS * 16, cell);
        }
        c[0] += h[i][0];
        c[1] += h[i][1];
        float2 k;
        k.x = stored_operand<C>(k0 * ex2_approx(c[0]));
        k.y = stored_operand<C>(k1 * ex2_approx(c[1]));
        store_key(i, k);
        bonus[i] = fma_rn(r1, k1 * me.u1, r0 * (k0 * me.u0));
    }
}

/* Whether some channel of the group decays by 2^-limit, or by NaN. */
GT_DEV bool exceeds(const float (&decay)[2], float limit) {
    return warp_any(!(fabsf(decay[0]) < limit && fabsf(decay[1]) < limit));
}

/* Turns a leaf into the operands of the state warps. */
template <class C>
GT_DEV void prepare_leaf(Preparer<C>& me, const RawLeaf<C>& x, int leaf, int buffer, int stage) {
    float h[4][2], total[2], c[2], bonus[4];
    decay_bits<C>(me, x, leaf, h);
    GT_UNROLL
    for (int e = 0; e < 2; e++)
        c[e] = scan_quads((h[0][e] + h[1][e]) + (h[2][e] + h[3][e]), me.quad, &total[e]);
    const bool slow = exceeds(total, SLOW_LIMIT);
    const auto store_key = [&](int i, float2 k) {
        sts<float2>(me.k_row + buffer * C::BUFFER + 4 * i * C::PITCH, k);
    };
    make_operands<C>(me, x, h, c, buffer, bonus, store_key);
    if (slow) prepare_slow<C>(me, x, h, buffer, stage, store_key); /* its own K over the other */
    const float sum = sum_bonus(bonus);
    if ((lane_id() & 4) == 0) sts<float>(me.bonus + buffer * C::BUFFER, sum);
    if (lane_id() == 0)
        sts<uint32_t>(me.buffer0 + buffer * C::BUFFER + C::SLOW + 4 * me.group, slow);
    store_scale_and_values<C>(me, x, total, buffer);
}

/* STATES: two tokens of K, from the lane's i-th on, as a cell of two tokens by two channels, a left operand. */
template <class C>
GT_DEV void store_cell(const Preparer<C>& me, int i, const float (&k)[2][2], int buffer) {
    sts<float4>(me.k_row + buffer * C::BUFFER + i / 2 * C::PAIR_PITCH, {k[0][0], k[0][1], k[1][0], k[1][1]});
}

/* The same where only states are wanted: K with decays after the token, as the slow form has it. */
template <class C>
GT_DEV void prepare_states(Preparer<C>& me, RawLeaf<C>& x, int leaf, int buffer, int stage) {
    float h[C::TOKENS][2], total[2], after[2];
    decay_bits<C>(me, x, leaf, h);
    GT_UNROLL
    for (int e = 0; e < 2; e++) {
        const float sum = sum_of(h, e);
        after[e] = sum_later_quads(sum, me.quad);
        total[e] = shfl_idx(after[e] + sum, lane_id() % 8);
    }
    GT_UNROLL
    for (int i = C::TOKENS - 2; i >= 0; i -= 2) {
        float k[2][2];
        GT_UNROLL
        for (int j = 1; j >= 0; j--) {
            k[j][0] = stored_operand<C>(x.k[i + j].lo() * ex2_approx(-after[0]));
            k[j][1] = stored_operand<C>(x.k[i + j].hi() * ex2_approx(-after[1]));
            after[0] += h[i + j][0];
            after[1] += h[i + j][1];
        }
        store_cell<C>(me, i, k, buffer);
    }
    me.read_values(x, stage);
    store_scale_and_values<C>(me, x, total, buffer);
}

/* The same for G backwards in time: K holds r_t 2^-c_t, always in range. */
template <class C>
GT_DEV void prepare_reverse(Preparer<C>& me, RawLeaf<C>& x, int leaf, int buffer, int stage) {
    float h[C::TOKENS][2], total[2], c[2];
    decay_bits<C>(me, x, leaf, h);
    GT_UNROLL
    for (int e = 0; e < 2; e++) c[e] = scan_quads(sum_of(h, e), me.quad, &total[e]);
    GT_UNROLL
    for (int i = 0; i < C::TOKENS; i += 2) {
        float r[2][2];
        GT_UNROLL
        for (int j = 0; j < 2; j++) {
            r[j][0] = stored_operand<C>(x.k[i + j].lo() * ex2_approx(-c[0]));
            r[j][1] = stored_operand<C>(x.k[i + j].hi() * ex2_approx(-c[1]));
            c[0] += h[i + j][0];
            c[1] += h[i + j][1];
        }
        store_cell<C>(me, i, r, buffer);
    }
    me.read_values(x, stage);
    store_scale_and_values<C>(me, x, total, buffer);
}

template <class C>
GT_DEV int steps_of(const Span& span) {
    return (span.tokens + C::STEP - 1) / C::STEP;
}

template <class C, bool REVERSE>
GT_DEV void prepare_role(const TensorParams& p, uint32_t smem) {
    Preparer<C> me;
    const int sub = C::HEADS == 1 ? 0 : warp_id() / C::GROUPS % C::HEADS; /* 0: uniform addresses */
    const int turn = warp_id() / (C::HEADS * C::GROUPS);
    me.group = warp_id() % C::GROUPS;
    me.quad = lane_id() / 8;
    me.channel = 16 * me.group + 2 * (lane_id() % 8);
    me.buffer0 = smem + sub * C::HEAD_BUFFER;
    const int team = warp_id() / C::TEAM;
    me.ring = smem + C::RING + team * C::AHEAD * C::STAGE;
    me.r_cell = me.buffer0 + C::R + 16 * (2 * me.quad * C::CELLS + me.channel / 2);
    /* row 4 quad, columns xor 24 where bit 2 of the row is set */
    me.k_row = me.buffer0 + C::K +
               (C::STATES ? C::TOKENS / 2 * me.quad * C::PAIR_PITCH + 8 * me.channel
                          : 4 * (4 * me.quad * C::PITCH + (me.channel ^ (me.quad % 2 ? 24 : 0))));
    me.values =
        me.buffer0 + C::VALUES +
        (!C::SPLIT   ? 2 * (me.v_row(0) * C::PITCH + value_column<C>(me.v_column(0)))
         : C::STATES ? 4 * (me.v_row(0) * C::VALUE_PITCH + me.v_column(0))
                     : value_cell<C>(me.v_row(0), me.v_column(0)));
    /* fp32: both terms of two channels; STATES: 2 channels of a group, then of the next, as StatePart reads them */
    me.scale = me.buffer0 + C::SCALE + 4 * (me.quad & 1) +
               (C::SPLIT    ? 8 * me.channel
                : C::STATES ? 128 * (me.group / 2) + 16 * (lane_id() % 8) + 8 * (me.group % 2)
                            : 4 * me.channel);
    me.bonus = me.buffer0 + C::BONUS + 4 * ((4 * me.quad + bonus_token()) * C::GROUPS + me.group);
    const Span span = span_of<C, REVERSE>(p, sub);
    const int steps = steps_of<C>(span), direction = REVERSE ? -C::TURNS : C::TURNS;
    const auto leaf_at = [=](int i) { return REVERSE ? steps - 1 - i : i; };
    me.open(p.in, span, span.start + leaf_at(turn) * C::STEP, direction * C::STEP);
    me.bits[0] = me.bits[1] = me.bits_rest[0] = me.bits_rest[1] = 0.0f;

    /* copies go FIRST leaves ahead; a team's to the stage that it has read before, a warp's to that which it has
     * just read */
    constexpr int FIRST = C::STATES ? C::AHEAD - 1 : C::AHEAD;
    const auto copy_next = [&](int step) {
        const int next = step + C::TURNS * FIRST;
        me.copy(leaf_at(next), next < steps, next / C::TURNS % C::AHEAD);
    };
    const auto prepare = [&](int step, int buffer) {
        const int stage = step / C::TURNS % C::AHEAD;
        cp_async_wait<FIRST - 1>();
        if constexpr (C::STATES) {
            bar_sync(1 + team, 32 * C::TEAM);
            copy_next(step);
        } else {
            sync_warp();
        }
        RawLeaf<C> x = me.read(stage);
        mbarrier_wait(me.buffer0 + buffer * C::BUFFER + C::EMPTY, (step / 2 + 1) % 2);
        if constexpr (!C::STATES) {
            prepare_leaf<C>(me, x, leaf_at(step), buffer, stage);
        } else if constexpr (REVERSE) {
            prepare_reverse<C>(me, x, leaf_at(step), buffer, stage);
        } else {
            prepare_states<C>(me, x, leaf_at(step), buffer, stage);
        }
        mbarrier_arrive(me.buffer0 + buffer * C::BUFFER + C::FULL);
        if constexpr (!C::STATES) {
            sync_warp(); /* the stage is read */
            copy_next(step);
        }
    };
    for (int i = 0; i < FIRST; i++) me.copy(leaf_at(turn + C::TURNS * i), turn + C::TURNS * i < steps, i);
    if constexpr (C::TURNS == 2) {
        for (int step = turn; step < steps; step += 2) prepare(step, turn);
    } else {
        for (int step = 0; step < steps; step += 2) {
            prepare(step, 0);
            if (step + 1 < steps) prepare(step + 1, 1);
        }
    }
    if (p.local && span.exists && me.quad == 0) {
        float* bits = p.segment_decays + ((int64_t)span.item * 2 + turn) * C::N + me.channel;
        bits[0] = me.log2_decay(0);
        bits[1] = me.log2_decay(1);
        if (C::TURNS == 1) bits[C::N] = bits[C::N + 1] = 0.0f;
    }
}

/* COUNT neighbouring words of shared memory, COUNT even. */
template <class Word, int COUNT>
GT_DEV void lds_words(Word (&words)[COUNT], uint32_t addr) {
    struct alignas(16) Four {
        Word word[4];
    };
    struct alignas(8) Two {
        Word word[2];
    };
    GT_UNROLL
    for (int i = 0; i < COUNT / 4; i++) {
        const Four x = lds<Four>(addr + 16 * i);
        for (int e = 0; e < 4; e++) words[4 * i + e] = x.word[e];
    }
    if constexpr (COUNT % 4) {
        const Two x = lds<Two>(addr + 4 * (COUNT / 4 * 4));
        words[COUNT - 2] = x.word[0];
        words[COUNT - 1] = x.word[1];
    }
}

/* 2 TILES neighbours of a state in memory, in pieces of up to 16 bytes. */
template <int TILES, class T>
GT_DEV void store_row(T* to, const float (&x)[2 * TILES]) {
    if constexpr (sizeof(T) == 2) {
        Vec<T, 2 * TILES> packed;
        packed.set(x);
        stg<Vec<T, 2 * TILES>>(to, packed);
    } else if constexpr (TILES == 1) {
        stg<float2>(to, {x[0], x[1]});
    } else {
        GT_UNROLL
        for (int i = 0; i < TILES / 2; i++)
            stg<float4>(to + 4 * i, {x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]});
    }
}

/* x[i] <- the sum with the other lane's, of the lower half of 2 LEFT numbers or, for lanes with this bit,
 * of the upper. */
template <int LEFT, int COUNT>
GT_DEV void halve_sums(float (&x)[COUNT], int bit) {
    const bool upper = lane_id() & bit;
    GT_UNROLL
    for (int i = 0; i < LEFT; i++) {
        const float own = upper ? x[LEFT + i] : x[i], other = upper ? x[i] : x[LEFT + i];
        x[i] = own + shfl_xor(other, bit);
    }
}

/* A state warp: its columns of S^T, and where it stands. */
template <class C>
struct StateWarp {
    float S[C::MT][C::NT][4];
    int g, j;         /* lane / 4, lane % 4 */
    int column0; /* first of its values */
    /* addresses in buffer 0: [i] serves the columns 8i .. 8i+7 of every 32, xor 24 or not */
    uint32_t row[4];    /* K, row g, columns 2j */
    uint32_t column[4]; /* K, row 2j (fp32: 6 - 2j), column g */
    uint32_t cells;     /* R, tokens 2g and 2g + 1, channels 2j and 2j + 1 */
    uint32_t values_left, values_right, bonus, scales, pairs, flags;
    uint32_t full, empty; /* mbarriers */

    /* Of tokens, in the update.  fp32: not j, or the compiler would read v once, for two operands that need
     * it in different registers. */
    GT_METHOD int pair() const { return C::SPLIT ? 3 - j : j; }

    GT_METHOD void place(uint32_t buffer0) {
        g = lane_id() / 4;
        j = lane_id() % 4;
        GT_UNROLL
        for (int i = 0; i < 4; i++) {
            row[i] = buffer0 + C::K + 4 * (g * C::PITCH + 2 * j + 8 * (i ^ (g & 4 ? 3 : 0)));
            column[i] = buffer0 + C::K + 4 * (2 * pair() * C::PITCH + g + 8 * (i ^ (pair() & 2 ? 3 : 0)));
        }
        cells = buffer0 + C::R + 16 * (g * C::CELLS + j);
        /* matrices of 8 tokens by 8 values, in the order of a left operand and of right ones */
        const int matrix = lane_id() / 8, s = lane_id() % 8;
        if constexpr (C::SPLIT) {
            values_left = buffer0 + C::VALUES + value_cell<C>(2 * pair(), column0) + 16 * g;
            values_right = buffer0 + C::VALUES + value_cell<C>(2 * j, column0) + 16 * g;
        } else {
            values_left = buffer0 + C::VALUES +
                          2 * ((s + matrix / 2 * 8) * C::PITCH + column0 + matrix % 2 * 8);
            values_right = buffer0 + C::VALUES +
                           2 * ((s + matrix % 2 * 8) * C::PITCH + column0 + matrix / 2 * 8);
        }
        bonus = buffer0 + C::BONUS + 4 * 2 * g * C::GROUPS;
        scales = buffer0 + C::SCALE + (C::SPLIT ? 16 : 8) * j;
        pairs = buffer0 + C::PAIRS + 4 * (LEAF * 2 * g + 2 * j);
        flags = buffer0 + C::SLOW;
        full = buffer0 + C::FULL;
        empty = buffer0 + C::EMPTY;
    }

    /* Of channel 8 nt + 2j + g % 2 the values from gathered_column() on: 2 TILES neighbours, got by
     * swapping with lane ^ 4. */
    GT_METHOD void gather_row(int nt, float (&x)[2 * C::TILES]) const {
        const bool odd = g & 1;
        GT_UNROLL
        for (int i = 0; i < C::TILES; i++) {
            const float even_row = S[i / 2][nt][2 * (i % 2)];
            const float odd_row = S[i / 2][nt][2 * (i % 2) + 1];
            const float other = shfl_xor(odd ? even_row : odd_row, 4);
            x[2 * i] = odd ? other : even_row;
            x[2 * i + 1] = odd ? odd_row : other;
        }
    }

    GT_METHOD int gathered_column() const { return column0 + 2 * C::TILES * (g / 2); }

    GT_METHOD void store(float* state) const {
        state += (int64_t)(2 * j + g % 2) * C::N + gathered_column();
        GT_UNROLL
        for (int nt = 0; nt < C::NT; nt++) {
            float x[2 * C::TILES];
            gather_row(nt, x);
            store_row<C::TILES>(state + 8 * nt * C::N, x);
        }
    }

    /* The same as bf16: a lane gets channel 8 nt + g of every tile, and neighbours in it, by transposing. */
    GT_METHOD void store(bf16* state, bool rests = false) const {
        state += g * C::N + column0 + 2 * C::TILES * j;
        GT_UNROLL
        for (int nt = 0; nt < C::NT; nt++) {
            struct alignas(4 * C::TILES) {
                uint32_t pairs[C::TILES];
            } row;
            GT_UNROLL
            for (int i = 0; i < C::TILES; i++) {
                const float lo = S[i / 2][nt][2 * (i % 2)], hi = S[i / 2][nt][2 * (i % 2) + 1];
                row.pairs[i] = movmatrix_trans(rests ? rests_of(lo, hi) : pack_bf16(lo, hi));
            }
            stg(state + 8 * nt * C::N, row);
        }
    }

    /* columns 2j and 2j + 1 of a tile by their channels' decays */
    GT_METHOD void scale(int nt, float2 decay) {
        GT_UNROLL
        for (int x = 0; x < C::MT * 4; x++) S[x / 4][nt][x % 4] *= x % 2 ? decay.y : decay.x;
    }

    /* The same of fp32, to full accuracy: S <- E . (S + added), or with `after` S <- E . S + added; E in
     * two terms, as Scale has it. */
    GT_METHOD void rescale_and_add(int nt, float4 scale, const float (&added)[C::MT][4], bool after) {
        GT_UNROLL
        for (int x = 0; x < C::MT * 4; x++) {
            const float factor = x % 2 ? scale.y : scale.x, keep = x % 2 ? scale.w : scale.z;
            float& cell = S[x / 4][nt][x % 4];
            const float add = added[x / 4][x % 4];
            cell = after ? rescale(keep, factor, cell, add) : rescale(keep, factor, cell + add, 0.0f);
        }
    }

    GT_METHOD void load(const float* state) {
        GT_UNROLL
        for (int x = 0; x < C::MT * C::NT * 4; x++) {
            const int mt = x / 4 / C::NT, nt = x / 4 % C::NT, e = x % 4;
            const int i = 2 * mt + e / 2, n = 8 * nt + 2 * j + e % 2;
            const int column = column0 + 2 * C::TILES * (g / 2) + 2 * i + g % 2;
            S[mt][nt][e] = state ? state[(int64_t)n * C::N + column] : 0.0f;
        }
    }
};

/* Which groups have the slow form.  fp32: in one register, since there are none to spare. */
struct SlowMask {
    uint32_t bits;
    template <int COUNT>
    GT_METHOD SlowMask(const uint32_t (&flags)[COUNT]) : bits(0) {
        GT_UNROLL
        for (int i = 0; i < COUNT; i++) bits |= flags[i] << i;
    }
    GT_METHOD bool operator[](int group) const { return bits >> group & 1; }
};

template <class C>
using SlowGroups = typename std::conditional<C::SPLIT, SlowMask, const uint32_t (&)[C::GROUPS]>::type;

/* Matrices of v, transposed, as left operands: 8 tokens each. */
template <class T>
GT_DEV void unpack_left(const uint32_t (&x)[4], float (&v)[2][4]) {
    using E = Element<T>;
    GT_UNROLL
    for (int half = 0; half < 2; half++) {
        v[half][0] = E::lo(x[2 * half]);
        v[half][1] = E::lo(x[2 * half + 1]);
        v[half][2] = E::hi(x[2 * half]);
        v[half][3] = E::hi(x[2 * half + 1]);
    }
}

/* S^T <- (S^T + v^T K) . E, or with SLOW, for groups that are, S^T . E + v^T K.  v is read again where
 * state_leaf has read it: as the left operand it needs other registers side by side, and a read is
 * cheaper than the moves. */
template <class C, bool SLOW>
GT_DEV void update_state_rounded(StateWarp<C>& me, int offset, SlowGroups<C> slow) {
    float v[C::MT][2][4];
    GT_UNROLL
    for (int mt = 0; mt < C::MT; mt++) {
        uint32_t x[4];
        ldmatrix_x4_trans(x, me.values_left + offset + 32 * mt);
        unpack_left<typename C::T>(x, v[mt]);
    }
    GT_UNROLL
    for (int nt = 0; nt < C::NT; nt++) {
        const float2 scale = lds<float2>(me.scales + offset + 32 * nt);
        if (SLOW && slow[nt / 2]) me.scale(nt, scale);
        GT_UNROLL
        for (int half = 0; half < 2; half++) {
            const uint32_t cell =
                me.column[nt % 4] + offset + 128 * (nt / 4) + 32 * half * C::PITCH;
            const float k0 = lds<float>(cell), k1 = lds<float>(cell + 4 * C::PITCH);
            GT_UNROLL
            for (int mt = 0; mt < C::MT; mt++) mma_tf32(me.S[mt][nt], v[mt][half], k0, k1);
        }
        if (!SLOW || !slow[nt / 2]) me.scale(nt, scale);
    }
}

/* What a leaf adds to a tile of an fp32 state.  It is summed by itself, the small products first: tensor cores
 * round sums towards zero, which over the leaves of a long memory would take away far more than fp32 does. */
template <int MT>
GT_DEV void multiply_split(float (&added)[MT][4], const float (&v)[MT][2][4], const float (&rest)[MT][2][4],
                           const float (&k)[2][2]) {
    GT_UNROLL
    for (int i = 0; i < 2 * MT; i++) {
        const int mt = i % MT, half = i / MT;
        mma_tf32(added[mt], rest[mt][half], k[half][0], k[half][1]);
        mma_tf32(added[mt], v[mt][half], tf32_rest(k[half][0]), tf32_rest(k[half][1]));
    }
    GT_UNROLL
    for (int i = 0; i < 2 * MT; i++)
        mma_tf32(added[i % MT], v[i % MT][i / MT], k[i / MT][0], k[i / MT][1]);
}

/* The same of fp32, where nothing is rounded to tf32. */
template <class C, bool SLOW>
GT_DEV void update_state_split(StateWarp<C>& me, int offset, SlowGroups<C> slow) {
    float v[C::MT][2][4], rest[C::MT][2][4];
    GT_UNROLL
    for (int i = 0; i < 2 * C::MT; i++) {
        lds_words(v[i / 2][i % 2], me.values_left + offset + value_cell<C>(8 * (i % 2), 4 * (i / 2)));
        set_rests<true>(v[i / 2][i % 2], rest[i / 2][i % 2]);
    }
    GT_UNROLL
    for (int nt = 0; nt < C::NT; nt++) {
        float added[C::MT][4] = {}, k[2][2];
        GT_UNROLL
        for (int i = 0; i < 4; i++)
            k[i / 2][i % 2] = lds<float>(me.column[nt % 4] + offset + 128 * (nt / 4) +
                                         4 * C::PITCH * (8 * (i / 2) + i % 2));
        multiply_split<C::MT>(added, v, rest, k);
        const float4 scale = lds<float4>(me.scales + offset + 64 * nt);
        me.rescale_and_add(nt, scale, added, SLOW && slow[nt / 2]);
    }
}

template <class C, bool SLOW>
GT_DEV void update_state_warp(StateWarp<C>& me, int offset, SlowGroups<C> slow) {
    if constexpr (C::SPLIT) {
        update_state_split<C, SLOW>(me, offset, slow);
    } else {
        update_state_rounded<C, SLOW>(me, offset, slow);
    }
}

/* The part of a slow group in A: tokens 2g, 2g + 1 by 8i + 2j, + 1 in A[i]. */
GT_DEV void add_slow_pairs(uint32_t pairs, float (&A)[2][4]) {
    GT_UNROLL
    for (int e = 0; e < 4; e++) { /* tile e / 2, token 2g + e % 2 */
        const float2 pair = lds<float2>(pairs + 4 * (LEAF * (e % 2) + 8 * (e / 2)));
        A[e / 2][2 * (e % 2)] += pair.x;
        A[e / 2][2 * (e % 2) + 1] += pair.y;
    }
}

/* Makes A strictly lower, with the bonus of tokens 2g and 2g + 1 on its diagonal, and an operand. */
template <class C>
GT_DEV void complete_pairs(int g, int j, const float (&bonus)[2], float (&A)[2][4]) {
    GT_UNROLL
    for (int i = 0; i < 2; i++) {
        const bool below = j + 4 * i < g, on = j + 4 * i == g;
        A[i][0] = stored_operand<C>(below ? A[i][0] : on ? bonus[0] : 0.0f);
        A[i][1] = stored_operand<C>(below ? A[i][1] : 0.0f);
        A[i][2] = stored_operand<C>(below || on ? A[i][2] : 0.0f);
        A[i][3] = stored_operand<C>(below ? A[i][3] : on ? bonus[1] : 0.0f);
    }
}

/* One leaf of a state warp: y of 16 tokens into y[tile][4], S to the next leaf.  SLOW: some groups have
 * the slow form. */
template <class C, bool SLOW>
GT_DEV void state_leaf(StateWarp<C>& me, int offset, SlowGroups<C> slow,
                       float (&y)[C::TILES][4]) {
    using E = Element<typename C::T>;

    /* A = R K^T and y = R S, then y += A v */
    float A[2][4] = {}, A_low[2][4] = {}, y_low[C::TILES][4] = {};
    GT_UNROLL
    for (int kk = 0; kk < C::NT; kk++) {
        const float4 cell = lds<float4>(me.cells + offset + 64 * kk);
        const float r[4] = {cell.x, cell.y, cell.z, cell.w};
        float r_rest[4];
        set_rests<C::SPLIT>(r, r_rest);
        if (!SLOW || !slow[kk / 2]) {
            const uint32_t row = me.row[kk % 4] + offset + 128 * (kk / 4);
            const float2 k0 = lds<float2>(row), k1 = lds<float2>(row + 8 * C::PITCH * 4);
            mma_split<C::SPLIT>(A[0], A_low[0], r, r_rest, k0.x, k0.y);
            mma_split<C::SPLIT>(A[1], A_low[1], r, r_rest, k1.x, k1.y);
        }
        GT_UNROLL
        for (int i = 0; i < C::TILES; i++)
            mma_split<C::SPLIT>(y[i], y_low[i], r, r_rest, me.S[i / 2][kk][2 * (i % 2)],
                                me.S[i / 2][kk][2 * (i % 2) + 1]);
    }
    GT_UNROLL
    for (int i = 0; C::SPLIT && i < 8; i++) A[i / 4][i % 4] += A_low[i / 4][i % 4];
    GT_UNROLL
    for (int i = 0; SLOW && i < C::GROUPS; i++)
        if (slow[i]) add_slow_pairs(me.pairs + offset + 4 * LEAF * LEAF * i, A);
    float words[2 * C::GROUPS], bonus[2] = {0.0f, 0.0f};
    lds_words(words, me.bonus + offset);
    GT_UNROLL
    for (int i = 0; i < 2 * C::GROUPS; i++) bonus[i / C::GROUPS] += words[i];
    complete_pairs<C>(me.g, me.j, bonus, A);
    const float left[2][4] = {{A[0][0], A[0][2], A[0][1], A[0][3]},
                              {A[1][0], A[1][2], A[1][1], A[1][3]}};
    if constexpr (C::SPLIT) {
        GT_UNROLL
        for (int i = 0; i < 2; i++) {
            float rest[4];
            set_rests<true>(left[i], rest);
            GT_UNROLL
            for (int mt = 0; mt < C::MT; mt++) {
                float x[4];
                lds_words(x, me.values_right + offset + value_cell<C>(8 * i, 4 * mt));
                GT_UNROLL
                for (int e = 0; e < 2; e++) {
                    const float b0 = tf32_part(x[e]), b1 = tf32_part(x[e + 2]);
                    mma_tf32(y[2 * mt + e], left[i], b0, b1);
                    mma_tf32(y_low[2 * mt + e], rest, b0, b1);
                    mma_tf32(y_low[2 * mt + e], left[i], x[e] - b0, x[e + 2] - b1);
                }
            }
        }
        GT_UNROLL
        for (int i = 0; i < 4 * C::TILES; i++) y[i / 4][i % 4] += y_low[i / 4][i % 4];
    } else {
        GT_UNROLL
        for (int mt = 0; mt < C::MT; mt++) {
            uint32_t x[4];
            ldmatrix_x4_trans(x, me.values_right + offset + 32 * mt);
            GT_UNROLL
            for (int i = 0; i < 4; i++)
                mma_tf32(y[2 * mt + i / 2], left[i % 2], E::lo(x[i]), E::hi(x[i]));
        }
    }
    update_state_warp<C, SLOW>(me, offset, slow);
}

/* The state that a span starts from: the caller's at `row`, what the scan found, or NULL for zero. */
template <class C>
GT_DEV const float* first_state(const TensorParams& p, const Span& span, int64_t row) {
    constexpr int64_t NV = C::N * C::N;
    if (!span.exists || p.local) return nullptr;
    if (p.segments.count > 1) return p.segment_states + span.item * NV;
    return p.state_in ? p.state_in + row * NV : nullptr;
}

/* Where the state after it goes, NULL if nowhere; `is_last`: the walk of its sequence ends here. */
template <class C>
GT_DEV float* last_state(const TensorParams& p, const Span& span, bool is_last) {
    constexpr int64_t NV = C::N * C::N;
    if (!span.exists) return nullptr;
    if (p.local) return p.segment_states + span.item * NV;
    return is_last && p.state_out ? p.state_out + span.head * NV : nullptr;
}

template <class C>
GT_DEV void state_role(const TensorParams& p, uint32_t smem) {
    using E = Element<typename C::T>;
    const int warp = warp_id() - C::PREP_WARPS, sub = C::HEADS == 1 ? 0 : warp / C::PARTS;
    StateWarp<C> me;
    me.column0 = warp % C::PARTS * C::COLUMNS;
    me.place(smem + sub * C::HEAD_BUFFER);
    const Span span = span_of<C, false>(p, sub);
    me.load(first_state<C>(p, span, p.state_in_shared ? span.h : span.head));
    typename C::State* checkpoints = static_cast<typename C::State*>(p.checkpoints);
    if (checkpoints) checkpoints += span.place * C::N * C::N;
    typename C::T* y_out = static_cast<typename C::T*>(p.y) + at(p.y_at, span.b, span.start, span.h) +
                           me.column0 + 2 * C::TILES * me.j;

    constexpr int STEP = C::SPLIT && C::N == 64 ? 1 : 2; /* two leaves side by side would spill there */
    for (int leaf = 0; leaf < span.leaves; leaf += STEP) {
        if (checkpoints && leaf % LEAVES == 0) {
            typename C::State* checkpoint = checkpoints + leaf / LEAVES * C::N * C::N;
            me.store(checkpoint);
            if constexpr (C::KEEPS_REST) me.store(checkpoint + p.rest, true);
        }
        GT_UNROLL
        for (int i = 0; i < STEP; i++) {
            if (leaf + i >= span.leaves) break;
            const int buffer = STEP == 1 ? leaf % 2 : i;
            float y[C::TILES][4] = {};
            mbarrier_wait(me.full + buffer * C::BUFFER, leaf / 2 % 2);
            uint32_t slow[C::GROUPS], any = 0;
            lds_words(slow, me.flags + buffer * C::BUFFER);
            GT_UNROLL
            for (int k = 0; k < C::GROUPS; k++) any |= slow[k];
            if (any) {
                state_leaf<C, true>(me, buffer * C::BUFFER, slow, y);
            } else {
                state_leaf<C, false>(me, buffer * C::BUFFER, slow, y);
            }
            mbarrier_arrive(me.empty + buffer * C::BUFFER);
            GT_UNROLL
            for (int half = 0; half < 2; half++) {
                const int t = (leaf + i) * LEAF + 2 * me.g + half;
                if constexpr (C::SPLIT) {
                    float x[2 * C::TILES];
                    GT_UNROLL
                    for (int k = 0; k < 2 * C::TILES; k++) x[k] = y[k / 2][2 * half + k % 2];
                    if (t < span.tokens) store_row<C::TILES>(y_out + t * p.y_at.t, x);
                } else {
                    uint32_t pairs[C::TILES];
                    GT_UNROLL
                    for (int k = 0; k < C::TILES; k++)
                        pairs[k] = E::pack(y[k][2 * half], y[k][2 * half + 1]);
                    if (t >= span.tokens) continue;
                    if constexpr (C::TILES == 4) {
                        stg<uint4>(y_out + t * p.y_at.t, {pairs[0], pairs[1], pairs[2], pairs[3]});
                    } else {
                        stg<uint2>(y_out + t * p.y_at.t, {pairs[0], pairs[1]});
                    }
                }
            }
        }
    }
    const Span same = span_of<C, false>(p, sub); /* found again: no registers keep it */
    if (float* to = last_state<C>(p, same, same.ends)) me.store(to);
}

/* Before the roles: a thread for each buffer of a head. */
template <class C>
GT_DEV void init_mbarriers(uint32_t smem) {
    if (thread_id() < 2 * C::HEADS) {
        const uint32_t buffer = smem + thread_id() * C::HEAD_BUFFER;
        mbarrier_init(buffer + C::FULL, 32 * C::GROUPS);
        mbarrier_init(buffer + C::EMPTY, 32 * C::SHARES);
    }
    sync_threads();
}

template <class C>
GT_KERNEL(C::THREADS, C::N == 128 ? 1 : 2) forward_tensor_kernel(const GT_GRID_CONSTANT TensorParams p) {
#if GT_SM80_KERNELS
    init_mbarriers<C>(smem_base());
    wait_for_chain();
    if (warp_id() < C::PREP_WARPS) {
        prepare_role<C, false>(p, smem_base());
    } else {
        state_role<C>(p, smem_base());
    }
#else
    (void)p;
    __trap();
#endif
}

/* ---- the same on compute capability 9.0: 16-bit activations, N = V = 128 ------------------------------------
 * Block, leaves, operands and what a state warp has are those of forward_tensor_kernel, but
 *     S^T += v^T K      by wgmma, twice a leaf: a warpgroup of 4 state warps has 64 values.  Its accumulators are
 *         StateWarp::S as it stands, v^T comes from registers, K from shared memory, read once for all four.
 *         Meanwhile the warps add A v to y and store it.
 *     y = R S           stays with mma_tf32, for which an accumulator pair of S is a right operand.  As left operand
 *         of wgmma it would have to be moved into another order, into registers that there are not.
 *     A                 is made once a leaf, by the preparing warps in turn, each a leaf after it has prepared its own
 *         part, so that it does not wait for the others.  Four buffers keep state warps from waiting for it; a third
 *         mbarrier of each, A_FULL, hands it over.
 *     E                 is owed: R and K of the leaves that follow have it, 2^-(owed + c_t) and 2^(owed + c_(t+1)),
 *         until a checkpoint, the end of the walk, or OWED_LIMIT in a channel of a group; then all of S is scaled.
 *         That is once in four leaves, but under strong decay.  The slow form scales S by what is owed, too.
 * K lies as wgmma wants it without swizzle: 8 channels by 4 tokens are 128 bytes, 144 bytes apart, which makes the
 * stores of a preparing lane (4 tokens of 2 channels) and the reads for A free of bank conflicts.  A preparing warp
 * hands it to the asynchronous proxy (fence_async_proxy) before it arrives at FULL.
 *
 * registers: S is 64 of 128.  Addresses are kept (kept()), or a third of the preparing warp's instructions would
 *     make them again.
 * shared: 32.4 KB a buffer, with the rings 205 KB, or 226 KB if w is fp32.  Wavefronts a leaf and head: 1560, of
 *     which 512 are R (forward_tensor_kernel: 2544).
 * tensor cores per leaf and head: 32 + 8 x 36 m16n8k8 and 4 m64n128k8.
 * issue slots per token and head, counted: 246 (forward_tensor_kernel: 370).
 * bytes: as above. */
template <class T_, class W_>
struct HopperTraits : TensorTraits<T_, W_, 128> {
    using Base = TensorTraits<T_, W_, 128>;
    static constexpr int N = 128, GROUPS = Base::GROUPS, PREP_WARPS = Base::PREP_WARPS;
    static constexpr int AHEAD = 4, BUFFERS = 4;
    /* of K: 8 channels by 4 tokens, and all channels by 4 tokens; 16 bytes too many, against bank conflicts */
    static constexpr int BLOCK = 128 + 16, PLANE = N / 8 * BLOCK + 16;
    static constexpr int VALUES = Base::K + LEAF / 4 * PLANE, A = VALUES + LEAF * Base::PITCH * 2;
    /* by which S is scaled after the update, and in the slow form before */
    static constexpr int SCALE = A + LEAF * LEAF * 4, SLOW_SCALE = SCALE + 4 * N;
    static constexpr int BONUS = SLOW_SCALE + 4 * N, SLOW = BONUS + 4 * LEAF * GROUPS;
    static constexpr int FULL = SLOW + 2 * GROUPS, EMPTY = FULL + 8, A_FULL = EMPTY + 8, PAIRS = SLOW + 64;
    static constexpr int HEAD_BUFFER = PAIRS + 4 * LEAF * LEAF * GROUPS, BUFFER = HEAD_BUFFER;
    static constexpr int RING = BUFFERS * BUFFER, SMEM = RING + PREP_WARPS * AHEAD * Base::STAGE;
    static_assert(!Base::SPLIT && PREP_WARPS % 4 == 0 && Base::STATE_WARPS % 4 == 0, "warpgroups");
    static_assert(FULL % 8 == 0 && A_FULL + 8 <= PAIRS && BUFFER % 16 == 0, "flags, then mbarriers");
    static_assert(SMEM <= 227 * 1024, "fits sm_90");
};

constexpr float OWED_LIMIT = 16.0f; /* of the decay that a state may lack, log2 */

/* Of a group in a leaf: S is scaled before the update, or after it. */
constexpr uint32_t IS_SLOW = 1, IS_SCALED = 2;

/* Those of all groups, as they lie at SLOW: 16 bits each. */
template <class C>
struct GroupFlags {
    uint32_t words[C::GROUPS / 2];

    GT_METHOD uint32_t any() const {
        uint32_t any = 0;
        GT_UNROLL
        for (int i = 0; i < C::GROUPS / 2; i++) any |= words[i];
        return any | any >> 16;
    }
    /* Whether a group is slow. */
    GT_METHOD bool operator[](int group) const { return words[group / 2] >> 16 * (group % 2) & IS_SLOW; }
};

/* x, of which the compiler does not know how it was made: it keeps it in a register, where it would make it again
 * in every leaf. */
GT_DEV uint32_t kept(uint32_t x) { return shfl_idx(x, lane_id()); }

/* x, which is the same in all lanes.  Now the compiler knows: it prepares for no divergence where x decides. */
GT_DEV int uniform(int x) { return shfl_idx(x, 0); }

template <class C>
struct HopperPreparer : Preparer<C> {
    float owed[2];  /* of the channels' decay, log2: by which the state has not been scaled */
    uint32_t flags; /* the group's, in buffer 0 */
    /* in stage 0: what the lane reads of r and k, and of w; to where and from which token it copies */
    uint32_t read_at, w_read_at, copy_at, w_copy_at, v_at;
    int copy_row, w_copy_row, v_copy_row;
};

template <class C>
GT_DEV void place_preparer(HopperPreparer<C>& me, uint32_t smem) {
    constexpr int SIZE = sizeof(typename C::T), W_SIZE = sizeof(typename C::W);
    const int lane = lane_id();
    me.group = uniform(warp_id());
    me.quad = lane / 8;
    me.channel = 16 * me.group + 2 * (lane % 8);
    me.buffer0 = smem;
    me.ring = smem + C::RING + me.group * C::AHEAD * C::STAGE;
    me.r_cell = kept(smem + C::R + 16 * (2 * me.quad * C::CELLS + me.channel / 2));
    me.k_row = kept(smem + C::K + me.quad * C::PLANE + me.channel / 8 * C::BLOCK + me.channel % 8 * 16);
    me.values = kept(smem + C::VALUES + 2 * (me.v_row(0) * C::PITCH + value_column<C>(me.v_column(0))));
    /* 2 channels of a tile, then of the next, as the state warps read them; one of the lane's two */
    me.scale = kept(smem + C::SCALE + 64 * me.group + 16 * (lane % 4) + 8 * (lane / 4 % 2) + 4 * (me.quad % 2));
    me.bonus = kept(smem + C::BONUS + 4 * (LEAF * me.group + 4 * me.quad + bonus_token()));
    me.flags = kept(smem + C::SLOW + 2 * me.group);

    const int own = ring_at<C>(4 * me.quad) + lane % 8 * 2;
    me.read_at = me.w_read_at = kept(me.ring + SIZE * own);
    me.copy_row = me.w_copy_row = kept(me.template copied_row<typename C::T>(0));
    me.copy_at = me.w_copy_at =
        kept(me.ring + SIZE * (ring_at<C>(me.copy_row) + me.template copied_column<typename C::T>()));
    if constexpr (me.W_PIECES > 1) {
        me.w_read_at = kept(me.ring + W_SIZE * own);
        me.w_copy_row = kept(me.template copied_row<typename C::W>(0));
        me.w_copy_at =
            kept(me.ring + W_SIZE * (ring_at<C>(me.w_copy_row) + me.template copied_column<typename C::W>()));
    }
    me.v_at = kept(me.ring + C::RING_V + me.v_cell(0));
    me.v_copy_row = kept(me.v_row(0));
}

/* Starts the copies of a leaf, leaf after leaf; beyond the span they write zeros, which nobody reads. */
template <class C>
GT_DEV void copy_leaf(HopperPreparer<C>& me, int leaf) {
    const uint32_t to = leaf % C::AHEAD * C::STAGE;
    const int left = me.tokens - leaf * LEAF;
    me.r[0].copy(me.copy_at + to + C::RING_R, true, me.copy_row < left);
    me.k[0].copy(me.copy_at + to + C::RING_K, true, me.copy_row < left);
    me.v[0].copy(me.v_at + to, true, me.v_copy_row < left);
    GT_UNROLL
    for (int i = 0; i < me.W_PIECES; i++) { /* half a leaf further each */
        const int half = i * ring_at<C>(LEAF / 2) * (int)sizeof(typename C::W);
        me.w[i].copy(me.w_copy_at + to + C::RING_W + half, true, me.w_copy_row + i * LEAF / 2 < left);
    }
    cp_async_commit();
}

/* The lane's part of a leaf that has arrived. */
template <class C>
GT_DEV RawLeaf<C> read_leaf(const HopperPreparer<C>& me, int stage) {
    constexpr int ROW = sizeof(typename C::T) * C::WIDTH, W_ROW = sizeof(typename C::W) * C::WIDTH;
    const uint32_t from = stage * C::STAGE;
    RawLeaf<C> x = {};
    GT_UNROLL
    for (int i = 0; i < 4; i++) {
        x.r[i] = lds<Pair<typename C::T>>(me.read_at + from + C::RING_R + ROW * i);
        x.k[i] = lds<Pair<typename C::T>>(me.read_at + from + C::RING_K + ROW * i);
        x.w[i] = lds<Pair<typename C::W>>(me.w_read_at + from + C::RING_W + W_ROW * i);
    }
    x.v[0] = lds<uint4>(me.v_at + from);
    return x;
}

/* As prepare_leaf, for a state that has not been scaled by what is owed. */
template <class C>
GT_DEV void hopper_prepare_leaf(HopperPreparer<C>& me, const RawLeaf<C>& x, int leaf, int buffer, int stage) {
    const int offset = buffer * C::BUFFER;
    float h[4][2], c[2], end[2], bonus[4], k[2][4]; /* k: 4 tokens of a channel */
    decay_bits<C>(me, x, leaf, h);
    GT_UNROLL
    for (int e = 0; e < 2; e++) {
        c[e] = scan_quads((h[0][e] + h[1][e]) + (h[2][e] + h[3][e]), me.quad, &end[e]) + me.owed[e];
        end[e] += me.owed[e];
    }
    bool scaled = exceeds(end, OWED_LIMIT);
    const bool slow = scaled && exceeds(end, SLOW_LIMIT);
    scaled |= leaf % LEAVES == LEAVES - 1 || (leaf + 1) * LEAF >= me.tokens;
    GT_UNROLL
    for (int e = 0; e < 2; e++) me.owed[e] = scaled ? 0.0f : end[e];

    make_operands<C>(me, x, h, c, buffer, bonus, [&](int i, float2 pair) {
        k[0][i] = pair.x;
        k[1][i] = pair.y;
    });
    GT_UNROLL
    for (int e = 0; e < 2; e++)
        sts<float4>(me.k_row + offset + 16 * e, {k[e][0], k[e][1], k[e][2], k[e][3]});
    if (slow) { /* its own K over the other */
        prepare_slow<C>(me, x, h, buffer, stage, [&](int i, float2 pair) {
            sts<float>(me.k_row + offset + 4 * i, pair.x);
            sts<float>(me.k_row + offset + 4 * i + 16, pair.y);
        });
    }
    const float sum = sum_bonus(bonus);
    if ((lane_id() & 4) == 0) sts<float>(me.bonus + offset, sum);
    const uint32_t flags = (slow ? IS_SLOW : 0) | (scaled ? IS_SCALED : 0);
    if (lane_id() == 0) sts<uint16_t>(me.flags + offset, (uint16_t)flags);
    if (me.quad < 2) { /* a channel each; 1 where only other groups are scaled */
        const float decay = scaled ? leaf_decay(me.quad ? end[1] : end[0]) : 1.0f;
        sts<float>(me.scale + offset, slow ? 1.0f : decay);
        if (slow) sts<float>(me.scale + offset + C::SLOW_SCALE - C::SCALE, decay);
    }
    static_assert(value_column<C>(4) == value_column<C>(0) + 2, "every other pair is a neighbour");
    sts<uint2>(me.values + offset + 2 * value_column<C>(0), {x.v[0].x, x.v[0].z});
    sts<uint2>(me.values + offset + 2 * value_column<C>(2), {x.v[0].y, x.v[0].w});
}

/* A preparing warp as that which makes A of a leaf: lane (g, j) has tokens 2g, 2g + 1.  Addresses in buffer 0. */
template <class C>
struct PairsWarp {
    int g, j;
    uint32_t cells, columns, bonus, pairs, to; /* of R, K; to: A, as left operands */

    GT_METHOD void place(uint32_t buffer0) {
        g = lane_id() / 4;
        j = lane_id() % 4;
        cells = buffer0 + C::R + 16 * (g * C::CELLS + j);
        columns = buffer0 + C::K + g / 4 * C::PLANE + g % 4 * 4 + 32 * j;
        bonus = buffer0 + C::BONUS + 4 * 2 * g;
        pairs = buffer0 + C::PAIRS + 4 * (LEAF * 2 * g + 2 * j);
        to = buffer0 + C::A + 16 * lane_id();
    }
};

template <class C, bool SLOW>
GT_DEV void make_pairs(const PairsWarp<C>& me, int offset, const GroupFlags<C>& slow) {
    float A[2][4] = {}, bonus[2] = {};
    GT_UNROLL
    for (int kk = 0; kk < C::NT; kk++) {
        if (SLOW && slow[kk / 2]) continue;
        const float4 cell = lds<float4>(me.cells + offset + 64 * kk);
        const float r[4] = {cell.x, cell.y, cell.z, cell.w};
        GT_UNROLL
        for (int i = 0; i < 2; i++) {
            const uint32_t column = me.columns + offset + 2 * i * C::PLANE + C::BLOCK * kk;
            mma_tf32(A[i], r, lds<float>(column), lds<float>(column + 16));
        }
    }
    GT_UNROLL
    for (int i = 0; SLOW && i < C::GROUPS; i++)
        if (slow[i]) add_slow_pairs(me.pairs + offset + 4 * LEAF * LEAF * i, A);
    GT_UNROLL
    for (int i = 0; i < C::GROUPS; i++) {
        const float2 part = lds<float2>(me.bonus + offset + 4 * LEAF * i);
        bonus[0] += part.x;
        bonus[1] += part.y;
    }
    complete_pairs<C>(me.g, me.j, bonus, A);
    GT_UNROLL
    for (int i = 0; i < 2; i++)
        sts<float4>(me.to + offset + 512 * i, {A[i][0], A[i][2], A[i][1], A[i][3]});
}

template <class C>
GT_DEV void make_pairs_of(const PairsWarp<C>& me, uint32_t buffer0, int leaf) {
    const int offset = leaf % C::BUFFERS * C::BUFFER;
    mbarrier_wait(buffer0 + offset + C::FULL, leaf / C::BUFFERS % 2);
    GroupFlags<C> flags;
    lds_words(flags.words, buffer0 + offset + C::SLOW);
    if (flags.any() & IS_SLOW) {
        make_pairs<C, true>(me, offset, flags);
    } else {
        make_pairs<C, false>(me, offset, flags);
    }
    mbarrier_arrive(buffer0 + offset + C::A_FULL);
}

template <class C>
GT_DEV void hopper_prepare_role(const TensorParams& p, uint32_t smem) {
    HopperPreparer<C> me;
    PairsWarp<C> pairs;
    place_preparer<C>(me, smem);
    pairs.place(smem);
    const Span span = span_of<C, false>(p, 0);
    me.open(p.in, span, span.start, LEAF);
    me.owed[0] = me.owed[1] = 0.0f;
    const int leaves = uniform(span.leaves), turn_after = (me.group + 1) % C::PREP_WARPS;
    for (int leaf = 0; leaf < C::AHEAD; leaf++) copy_leaf<C>(me, leaf);
    for (int leaf = 0; leaf <= leaves; leaf++) {
        if (leaf < leaves) {
            const int buffer = leaf % C::BUFFERS, stage = leaf % C::AHEAD;
            cp_async_wait<C::AHEAD - 1>();
            sync_warp();
            const RawLeaf<C> x = read_leaf<C>(me, stage);
            mbarrier_wait(smem + buffer * C::BUFFER + C::EMPTY, (leaf / C::BUFFERS + 1) % 2);
            hopper_prepare_leaf<C>(me, x, leaf, buffer, stage);
            fence_async_proxy();
            mbarrier_arrive(smem + buffer * C::BUFFER + C::FULL);
            sync_warp(); /* the stage is read */
            copy_leaf<C>(me, leaf + C::AHEAD);
        }
        /* A a leaf later, when it waits for no other warp */
        if (leaf > 0 && leaf % C::PREP_WARPS == turn_after) make_pairs_of<C>(pairs, smem, leaf - 1);
    }
    cp_async_wait<0>();
}

template <class C>
struct HopperStateWarp : StateWarp<C> {
    uint32_t k, left, a_full; /* in buffer 0: K, A, and the mbarrier of A */

    GT_METHOD void place(uint32_t smem) {
        StateWarp<C>::place(smem);
        k = smem + C::K;
        left = kept(smem + C::A + 16 * lane_id());
        a_full = smem + C::A_FULL;
        this->cells = kept(this->cells);
        /* as in StateWarp, but a lane's pair of tokens is 4 apart: K has them in their order */
        const int matrix = lane_id() / 8, token = lane_id() % 8 / 2 + lane_id() % 2 * 4;
        this->values_left =
            smem + C::VALUES + 2 * ((token + matrix / 2 * 8) * C::PITCH + this->column0 + matrix % 2 * 8);
        this->scales = smem + C::SCALE + 16 * this->j;
    }

    /* The channels of a group by their decays. */
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
        const float4 cell = lds<float4>(me.cells + offset + 64 * kk);
        const float r[4] = {cell.x, cell.y, cell.z, cell.w};
        GT_UNROLL
        for (int i = 0; i < 2; i++) mma_tf32(y[i], r, me.S[0][kk][2 * i], me.S[0][kk][2 * i + 1]);
    }
}

/* Starts S^T += v^T K: until wgmma_wait(), S and v belong to it. */
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
        const float4 cell = lds<float4>(me.left + offset + 512 * i);
        const float left[4] = {cell.x, cell.y, cell.z, cell.w};
        mma_tf32(y[0], left, E::lo(x[i]), E::hi(x[i]));
        mma_tf32(y[1], left, E::lo(x[i + 2]), E::hi(x[i + 2]));
    }
}

template <class C>
GT_DEV void hopper_state_role(const TensorParams& p, uint32_t smem) {
    using E = Element<typename C::T>;
    HopperStateWarp<C> me;
    me.column0 = (warp_id() - C::PREP_WARPS) * C::COLUMNS;
    me.place(smem);
    const Span span = span_of<C, false>(p, 0);
    me.load(first_state<C>(p, span, p.state_in_shared ? span.h : span.head));
    typename C::State* checkpoints = static_cast<typename C::State*>(p.checkpoints);
    if (checkpoints) checkpoints += span.place * C::N * C::N;
    typename C::T* y_row = static_cast<typename C::T*>(p.y) + at(p.y_at, span.b, span.start + 2 * me.g, span.h) +
                           me.column0 + 2 * C::TILES * me.j;
    for (int leaf = 0; leaf < span.leaves; leaf++) {
        if (checkpoints && leaf % LEAVES == 0) me.store(checkpoints + leaf / LEAVES * C::N * C::N);
        const int offset = leaf % C::BUFFERS * C::BUFFER, parity = leaf / C::BUFFERS % 2;
        float y[2][4] = {}, v[2][4];
        GroupFlags<C> flags;
        mbarrier_wait(me.full + offset, parity);
        lds_words(flags.words, me.flags + offset);
        const uint32_t any = flags.any();
        multiply_state<C>(me, offset, y);
        GT_UNROLL
        for (int i = 0; (any & IS_SLOW) && i < C::GROUPS; i++)
            if (flags[i]) me.scale_group(i, me.scales + offset + C::SLOW_SCALE - C::SCALE);
        start_update<C>(me, offset, v);

        mbarrier_wait(me.a_full + offset, parity);
        add_pairs<C>(me, offset, y);
        GT_UNROLL
        for (int half = 0; half < 2; half++) {
            /* as one number: the compiler would store two one by one */
            const uint32_t low = E::pack(y[0][2 * half], y[0][2 * half + 1]);
            const uint64_t high = E::pack(y[1][2 * half], y[1][2 * half + 1]);
            if (leaf * LEAF + 2 * me.g + half < span.tokens) stg<uint64_t>(y_row, high << 32 | low);
            y_row += half ? (LEAF - 1) * p.y_at.t : p.y_at.t;
        }
        wgmma_wait<0>();
        GT_UNROLL
        for (int i = 0; (any & IS_SCALED) && i < C::GROUPS; i++) me.scale_group(i, me.scales + offset);
        mbarrier_arrive(me.empty + offset);
    }
    const Span same = span_of<C, false>(p, 0); /* found again: no registers keep it */
    if (float* to = last_state<C>(p, same, same.ends)) me.store(to);
}

/* For other architectures it is empty, and bounded to one warp: see has_sm90a. */
template <class C>
GT_KERNEL(GT_SM90A ? C::THREADS : 32, 1) forward_hopper_kernel(const GT_GRID_CONSTANT TensorParams p) {
#if GT_SM90A
    const uint32_t smem = smem_base();
    if (thread_id() < C::BUFFERS) {
        const uint32_t buffer = smem + thread_id() * C::BUFFER;
        mbarrier_init(buffer + C::FULL, 32 * C::PREP_WARPS);
        mbarrier_init(buffer + C::A_FULL, 32);
        mbarrier_init(buffer + C::EMPTY, 32 * C::STATE_WARPS);
    }
    sync_threads();
    wait_for_chain();
    if (uniform(warp_id()) < C::PREP_WARPS) {
        hopper_prepare_role<C>(p, smem);
    } else {
        hopper_state_role<C>(p, smem);
    }
#else
    (void)p;
    __trap();
#endif
}

/* ---- states only: G backwards in time, S of segments, on tensor cores ---------------------------------------
 * The same block, roles and buffers, but two teams of a head, each the preparing warps of a leaf, take leaves in
 * turn, each for its own buffer (N = 128: one; there are no registers for more), and the state is scaled before it is
 * added to, which needs no growing factor.  So two leaves may be one step (STEP): their decays are scanned, and the
 * state is scaled, once.  Below, a leaf is a step.  Forward
 *     S <- E . S + sum_t (decay after t . k_t) v_t^T
 * REVERSE: (k, v) are (r, dy), the leaves come last to first, and
 *     G <- E . G + sum_t (P_t . r_t) dy_t^T
 * Leaves the state before, reverse after, every chunk (the checkpoints) and that which the walk ends with.
 *
 * state warp: S itself, ROWS channels by COLUMNS values, as accumulators of K^T v: nothing is made from the state here,
 *     so it need not be a right operand, and a lane's values of a channel are neighbours in memory.  A checkpoint is
 *     stored without shuffles; rowsum(S . G) needs but the lane's own elements of S, which it has copied for itself.
 * shape: 32 by 32 reads the fewest operands.  fp32: all channels by 16 values, so that v is split once.
 * ring: a team copies whole rows together and meets when they have arrived.  A warp's own pieces of rows would be
 *     32 bytes, and a copy takes as long as it has lines of 128 bytes.
 * shared, N = 64, 16 bits: 14.1 KB a buffer, two of them and the rings: 77.1 KB; S before and after a chunk: 16 KB.
 *     N = 128: 76.6 KB, and 64 KB.  S_COPIES = 1, where a block may have 99 KB: S after a chunk is there from the
 *     checkpoint before, and once its sums are made, S before the chunk takes its place, which is waited for.
 * bytes: k or r, w, v or dy once, checkpoints and states once; bf16: S of the checkpoints once, for rowsum(S . G), with
 *     its rests if it has any, but not where it is known to be 0.
 * G in outputs: dv has room for it (N = 128: dk and dv), so it lies there, row for row, until the kernel of chunks has
 *     read it and writes them.  What a head and chunk have of them no other reads or writes.
 *     f16: times a power of two for a warp's part of each channel (Fit), which goes to G_undo.
 *     Where that cannot be (fp32 with N = 128; dv or dk is not wanted or not aligned) G goes to workspace. */
template <class T, class W, int N>
using StatesTraits = TensorTraits<T, W, N, true>;

/* Of a state warp: its share of S, ROWS channels by COLUMNS values, and where it stands.  Tile q, rows g and g + 8 are
 * channels 16 q + 2g and the next.  Values are permuted as in forward, but for fp32. */
template <class C>
struct StatePart {
    using State = typename C::State;
    static constexpr int MT = C::ROWS / 16, NT = C::TILES;
    /* of the 2 NT values that a lane has of a channel: neighbours in a piece */
    static constexpr int PIECE = 2 * C::PERMUTED, PIECES = 2 * NT / PIECE;
    static constexpr int BYTES = 2 * PIECE; /* of a copy of S, bf16 */
    static constexpr int REST = C::S_COPY / C::STATE_WARPS / 2; /* from where copies of S go to where its rests do */
    float S[MT][NT][4];
    uint32_t cells, values, scales; /* in buffer 0 */
    uint32_t full, empty;           /* mbarriers */

    GT_METHOD void place(uint32_t buffer0, int share) {
        const int g = lane_id() / 4, j = lane_id() % 4;
        const int column0 = share % C::PARTS * C::COLUMNS, channel = share / C::PARTS * C::ROWS + 2 * g;
        cells = buffer0 + C::K + j * C::PAIR_PITCH + 8 * channel;
        if constexpr (C::SPLIT) {
            values = buffer0 + C::VALUES + 4 * (2 * j * C::VALUE_PITCH + column0 + g);
        } else { /* matrices of 8 tokens by the 8 values of a tile */
            values = buffer0 + C::VALUES + 2 * (lane_id() % 8 * C::PITCH + column0 + lane_id() / 8 * 8);
        }
        scales = buffer0 + C::SCALE + (C::SPLIT ? 8 * channel : 4 * channel + 8 * g);
        full = buffer0 + C::FULL;
        empty = buffer0 + C::EMPTY;
    }

    /* Index of the lane's first element in a state [N,N]; the functions below get pointers to it. */
    static GT_METHOD int first(int share) {
        const int channel = share / C::PARTS * C::ROWS + lane_id() / 4 * 2;
        return channel * C::N + share % C::PARTS * C::COLUMNS + PIECE * (lane_id() % 4);
    }

    /* From the lane's first channel to its i-th, from its first value to that of piece k. */
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

    /* What the lane has of its i-th channel. */
    GT_METHOD void row(int i, float (&x)[2 * NT]) const {
        GT_UNROLL
        for (int k = 0; k < 2 * NT; k++) x[k] = S[i / 2][k / 2][2 * (i % 2) + k % 2];
    }

    /* pitch: elements from a row to the next */
    template <class To>
    GT_METHOD void store(To* state, int pitch, bool rests = false) const {
        GT_UNROLL
        for (int i = 0; i < 2 * MT; i++) {
            float x[2 * NT];
            To* to = state + channel_at(i) * (int64_t)pitch;
            row(i, x);
            GT_UNROLL
            for (int k = 0; rests && k < 2 * NT; k++) x[k] = rest_of(x[k]);
            GT_UNROLL
            for (int k = 0; k < PIECES; k++) {
                float piece[PIECE];
                GT_UNROLL
                for (int e = 0; e < PIECE; e++) piece[e] = x[PIECE * k + e];
                store_row<C::PERMUTED>(to + value_at(k), piece);
            }
        }
    }

    /* The same as f16; undo: of this part, from the lane's first channel on. */
    GT_METHOD void store_fit(f16* state, int pitch, float* undo) const {
        GT_UNROLL
        for (int i = 0; i < 2 * MT; i++) {
            float x[2 * NT], largest = 0.0f;
            row(i, x);
            GT_UNROLL
            for (int k = 0; k < 2 * NT; k++) largest = fmaxf(largest, fabsf(x[k]));
            largest = fmaxf(largest, shfl_xor(largest, 1));
            largest = fmaxf(largest, shfl_xor(largest, 2));
            const Fit fit = fit_f16(largest);
            if (lane_id() % 4 == 0) undo[channel_at(i)] = fit.undo;
            GT_UNROLL
            for (int k = 0; k < PIECES; k++) {
                float piece[PIECE];
                GT_UNROLL
                for (int e = 0; e < PIECE; e++) piece[e] = x[PIECE * k + e] * fit.scale;
                store_row<C::PERMUTED>(state + channel_at(i) * (int64_t)pitch + value_at(k), piece);
            }
        }
    }

    /* Starts the copies of the lane's part of another state, or clears it; a warp's pieces lie side by side. */
    GT_METHOD void copy(const bf16* state, uint32_t to, bool wanted) const {
        GT_UNROLL
        for (int x = 0; x < 2 * MT * PIECES; x++)
            cp_async<BYTES>(to + 32 * BYTES * x, state + channel_at(x / PIECES) * C::N + value_at(x % PIECES),
                            wanted ? BYTES : 0);
    }

    /* Of G after a chunk, which this is, and of copies of S: the warp's part of rowsum(S . G) of the lane's i-th
     * channel, and `rest`, that of S and what bf16 leaves of G; in the lane that has_sums().
     * Tensor cores: the diagonal of G S^T for 8 channels.  G's 8 rows in bf16 and those of their rests are one left
     * operand, and what a lane has of G and S are operands as it is. */
    struct RowSum {
        float all, rest;
    };
    static GT_METHOD bool has_sums() { return lane_id() % 4 == lane_id() / 8; }

    template <int COUNT>
    GT_METHOD void multiply_row(int i, const uint32_t (&copies)[COUNT], RowSum (&sums)[COUNT]) const {
        float x[2 * NT], sum[COUNT][4] = {};
        row(i, x);
        GT_UNROLL
        for (int k = 0; k < 2 * NT; k++) x[k] = made_here(x[k]); /* in a loop: operands of all rows would spill */
        GT_UNROLL
        for (int k = 0; k < 2 * NT; k += 4) {
            const int at = 32 * BYTES * (PIECES * i + k / PIECE) + 2 * (k % PIECE);
            uint32_t a[4];
            GT_UNROLL
            for (int e = 0; e < 4; e += 2) {
                a[e] = pack_bf16(x[k + e], x[k + e + 1]);
                a[e + 1] = rests_of(x[k + e], x[k + e + 1]);
            }
            GT_UNROLL
            for (int c = 0; c < COUNT; c++) {
                const uint2 b = lds<uint2>(copies[c] + at);
                mma_bf16(sum[c], a, b.x, b.y);
                if constexpr (C::KEEPS_REST) {
                    const uint2 rest = lds<uint2>(copies[c] + REST + at);
                    mma_bf16(sum[c], a, rest.x, rest.y);
                }
            }
        }
        const int odd = lane_id() / 4 % 2;
        GT_UNROLL
        for (int c = 0; c < COUNT; c++) {
            sums[c].rest = odd ? sum[c][3] : sum[c][2];
            sums[c].all = (odd ? sum[c][1] : sum[c][0]) + sums[c].rest;
        }
    }

    /* To sums[3,PARTS,N], from the lane's first channel on:
     *     S before . G      G's rest . (S after - S before), 0 for the last chunk      S after . G, 0 if not known */
    GT_METHOD void store_rowsums(uint32_t before, uint32_t after, float* sums, bool is_last, bool knows_after) const {
        GT_UNROLL
        for (int i = 0; i < 2 * MT; i++) {
            RowSum x[2];
            multiply_row(i, {before, after}, x);
            if (!has_sums()) continue;
            float* to = sums + channel_at(i);
            to[0] = x[0].all;
            to[C::PARTS * C::N] = is_last ? 0.0f : x[1].rest - x[0].rest;
            to[2 * C::PARTS * C::N] = knows_after ? x[1].all : 0.0f;
        }
    }

    /* The same in two calls, first with S after the chunk, then with S before it; kept: from one to the other. */
    GT_METHOD void store_rowsums_of(bool is_after, uint32_t copy, uint32_t kept, float* sums, bool is_last,
                                    bool knows_after) const {
        GT_UNROLL
        for (int i = 0; i < 2 * MT; i++) {
            RowSum x[1];
            multiply_row(i, {copy}, x);
            if (!has_sums()) continue;
            float* to = sums + channel_at(i);
            const uint32_t rest = kept + 4 * 8 * i;
            if (is_after) {
                to[2 * C::PARTS * C::N] = knows_after ? x[0].all : 0.0f;
                sts<float>(rest, x[0].rest);
            } else {
                to[0] = x[0].all;
                to[C::PARTS * C::N] = is_last ? 0.0f : lds<float>(rest) - x[0].rest;
            }
        }
    }
};

/* S <- E . S + K^T v of a leaf */
template <class C>
GT_DEV void add_leaf_rounded(StatePart<C>& me, int offset) {
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
            const float4 cell = lds<float4>(me.cells + offset + 4 * half * C::PAIR_PITCH + 128 * q);
            const float k[4] = {cell.x, cell.y, cell.z, cell.w};
            GT_UNROLL
            for (int i = 0; i < me.NT; i++) mma_tf32(me.S[q][i], k, E::lo(v[i]), E::hi(v[i]));
        }
    }
}

/* The same of fp32, in three products that are summed by themselves: see multiply_split. */
template <class C>
GT_DEV void add_leaf_split(StatePart<C>& me, int offset) {
    float v[2][2][2], v_rest[2][2][2]; /* of a half, a tile and a token */
    GT_UNROLL
    for (int x = 0; x < 8; x++) {
        const int half = x / 4, i = x / 2 % 2, e = x % 2;
        v[half][i][e] = lds<float>(me.values + offset + 4 * ((8 * half + e) * C::VALUE_PITCH + 8 * i));
        v_rest[half][i][e] = tf32_rest(v[half][i][e]);
    }
    static_assert(StatePart<C>::NT == 2, "tiles of v");
    GT_UNROLL
    for (int q = 0; q < me.MT; q++) {
        float k[2][4], added[2][4] = {};
        GT_UNROLL
        for (int half = 0; half < 2; half++) {
            float rest[4];
            lds_words(k[half], me.cells + offset + 4 * half * C::PAIR_PITCH + 128 * q);
            set_rests<true>(k[half], rest);
            GT_UNROLL
            for (int i = 0; i < 2; i++) {
                mma_tf32(added[i], rest, v[half][i][0], v[half][i][1]);
                mma_tf32(added[i], k[half], v_rest[half][i][0], v_rest[half][i][1]);
            }
        }
        GT_UNROLL
        for (int x = 0; x < 4; x++)
            mma_tf32(added[x % 2], k[x / 2], v[x / 2][x % 2][0], v[x / 2][x % 2][1]);
        const float4 scale = lds<float4>(me.scales + offset + 128 * q); /* of 2 channels */
        GT_UNROLL
        for (int x = 0; x < 8; x++) {
            const float factor = x % 4 < 2 ? scale.x : scale.y, keep = x % 4 < 2 ? scale.z : scale.w;
            float& cell = me.S[q][x / 4][x % 4];
            cell = rescale(keep, factor, cell, added[x / 4][x % 4]);
        }
    }
}

template <class C, bool REVERSE>
GT_DEV void states_role(const TensorParams& p, uint32_t smem) {
    using State = typename C::State;
    using Left = typename std::conditional<REVERSE, typename C::Gradient, State>::type; /* as checkpoints */
    constexpr int NN = C::N * C::N, STEPS = CHECKPOINT / C::STEP; /* of a chunk */
    const int warp = warp_id() - C::PREP_WARPS, sub = C::HEADS == 1 ? 0 : warp / C::SHARES;
    const int share = warp % C::SHARES, first = StatePart<C>::first(share);
    const bool wants_rowsums = REVERSE && C::KEEPS_BF16 && p.rowsums;
    StatePart<C> me;
    me.place(smem + sub * C::HEAD_BUFFER, share);
    const Span span = span_of<C, REVERSE>(p, sub);
    const int steps = steps_of<C>(span);
    /* of the next checkpoint */
    int chunk = (int)span.place + (REVERSE && steps ? (steps - 1) / STEPS : 0);
    const auto element = [&](int at) { return (int64_t)at * NN + first; };                  /* the lane's first there */

    /* Where the checkpoint of the last step's chunk goes.  A whole chunk's rows may lie in outputs */
    const auto& outputs = p.G_rows[C::N > CHECKPOINT ? first / (CHECKPOINT * C::N) : 0];
    const bool in_outputs = REVERSE && C::G_IN_OUTPUTS && outputs.data;
    const bool is_apart = p.last_apart || span.tokens % CHECKPOINT != 0; /* that of the last chunk */
    const int pitch = in_outputs ? (int)outputs.at.t : C::N;
    Left* checkpoint = static_cast<Left*>(p.checkpoints) + element(chunk); /* a branch here would cost registers */
    if (in_outputs) {
        const int token = span.start + (steps - 1) / STEPS * CHECKPOINT + first / C::N % CHECKPOINT;
        checkpoint = static_cast<Left*>(outputs.data) + at(outputs.at, span.b, token, span.h) + first % C::N;
    }
    /* the lane's first in [B,H,places,PARTS,N], bf16: [B,H,places,3,PARTS,N], of the next checkpoint */
    const auto own_part = [&](float* parts) {
        constexpr int SUMS = C::KEEPS_BF16 ? SWEEP_SUMS : 1;
        return parts + (int64_t)chunk * (SUMS * C::PARTS * C::N) + share % C::PARTS * C::N + first / C::N;
    };
    const auto leave = [&](Left* to, int to_pitch) {
        if constexpr (REVERSE && C::FITS_G) {
            me.store_fit(to, to_pitch, own_part(p.G_undo));
        } else {
            me.store(to, to_pitch);
        }
    };

    /* S of the next checkpoint and that before, or the latter alone: a lane copies what it reads, and waits for none */
    const uint32_t copies = smem + C::SMEM + C::S_COPY / C::STATE_WARPS * warp + StatePart<C>::BYTES * lane_id();
    const uint32_t kept = smem + C::KEPT + 4 * (C::ROWS * warp + lane_id() / 4);
    const auto copy_of = [&](int at) { return copies + (C::S_COPIES == 2 ? (at & 1) * C::S_COPY : 0); };
    const auto fetch = [&](int at, bool wanted) {
        const bf16* S = static_cast<const bf16*>(p.S) + element(at);
        me.copy(S, copy_of(at), wanted);
        if constexpr (C::KEEPS_REST) me.copy(S + p.rest, copy_of(at) + StatePart<C>::REST, wanted);
        cp_async_commit();
    };
    const int zero_steps = p.S_starts_zero && span.starts ? STEPS : 0; /* of the chunk that S is 0 before */

    /* What is left at the checkpoint of the chunk that a step belongs to.  The sums come first: of G as it is stored
     * nothing is to be kept in registers meanwhile. */
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
        if constexpr (C::KEEPS_REST && !REVERSE) me.store(to + p.rest, C::N, true);
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
    if (REVERSE && has_checkpoints && steps) { /* that of the last chunk, which may be cut short and lie elsewhere */
        const bool apart = in_outputs && is_apart;
        pass_checkpoint(steps - 1, apart ? static_cast<Left*>(p.checkpoints) + element(span.head) : checkpoint,
                        apart ? C::N : pitch, span.ends);
    }
    for (int last = steps - 1; last >= 0; last -= 2) { /* the step to come, if the walk is reverse */
        GT_UNROLL
        for (int buffer = 0; buffer < 2; buffer++) {
            if (last - buffer < 0) break;
            const int step = REVERSE ? last - buffer : steps - 1 - last + buffer;
            const bool at_checkpoint = REVERSE ? (step + 1) % STEPS == 0 && step < steps - 1 : step % STEPS == 0;
            if (has_checkpoints && at_checkpoint) pass_checkpoint(step, checkpoint, pitch, false);
            mbarrier_wait(me.full + buffer * C::BUFFER, (steps - 1 - last) / 2 % 2);
            if constexpr (C::SPLIT) {
                add_leaf_split<C>(me, buffer * C::BUFFER);
            } else {
                add_leaf_rounded<C>(me, buffer * C::BUFFER);
            }
            mbarrier_arrive(me.empty + buffer * C::BUFFER);
        }
    }
    if (p.local || p.state_out) {
        const Span same = span_of<C, REVERSE>(p, sub); /* found again: no registers keep it */
        float* end = last_state<C>(p, same, REVERSE ? same.starts : same.ends);
        if (end) me.store(end + first, C::N);
    }
}

template <class C, bool REVERSE>
GT_KERNEL(C::THREADS, C::N == 128 ? 1 : 2) states_tensor_kernel(const GT_GRID_CONSTANT TensorParams p) {
#if GT_SM80_KERNELS
    init_mbarriers<C>(smem_base());
    if (warp_id() < C::PREP_WARPS) {
        prepare_role<C, REVERSE>(p, smem_base());
    } else {
        wait_for_chain(); /* the others read what no kernel of the chain has written */
        states_role<C, REVERSE>(p, smem_base());
    }
#else
    (void)p;
    __trap();
#endif
}

/* ---- states between segments -----------------------------------------------------------------------------
 * segment_states: from what each segment adds to a zero state, to the state that each starts from,
 *     S <- state_in;   for every segment, in the order of the walk:   (its sum, S) <- (S, D . S + its sum)
 * The last segment's sum is not needed, and not there.
 * grid over sequences*H*N*N/128 elements of a state, a thread each: a few rows of one head.  All of its time is
 * latency, so the sums of 64 segments come by cp.async at once; meanwhile the block makes the scales of its rows.
 * shared: 64 sums of each element, 64 scales of each row: 34 KB.  bytes: the segment states once each way. */
struct ScanParams {
    TensorParams walk;
    int64_t step, stride; /* from an item to the next of the walk, and between their states */
};

constexpr int SCAN_THREADS = 128, SCAN_ROWS = 4; /* of a block at most, N = 32 */
constexpr int SCAN_BATCH = 64, SCAN_STEPS = 8;   /* segments, and those of whose loads none waits for another */
constexpr int SCAN_SCALES = 4 * SCAN_BATCH * SCAN_THREADS; /* byte offset */
constexpr int SCAN_SMEM = SCAN_SCALES + 8 * SCAN_BATCH * SCAN_ROWS;
static_assert(SCAN_THREADS == 1 << 7, "scan_segments_kernel shifts by 7");

GT_KERNEL(SCAN_THREADS, 4) scan_segments_kernel(const GT_GRID_CONSTANT ScanParams p) {
    wait_for_chain();
    const Problem& in = p.walk.in;
    const int N = in.N, NN = N * N;
    const int bits = N == 32 ? 5 : N == 64 ? 6 : 7; /* divisions would be a good part of the time */
    const int row_bits = 7 - bits, block_bits = 2 * bits - 7; /* rows of a block, blocks of a head */
    const int head = block_x() >> block_bits, block = block_x() & ((1 << block_bits) - 1);
    const Sequence seq = sequence_at(in, head / in.H);
    if (!seq.exists) return;
    const int count = segments_of(in, seq, p.walk.segments).count;
    const int64_t item0 = (int64_t)head * p.walk.segments.count + (p.step < 0 ? count - 1 : 0);
    const int element = block * SCAN_THREADS + thread_id();
    const int64_t head_in = p.walk.state_in_shared ? head % in.H : head;
    float S = p.walk.state_in ? p.walk.state_in[head_in * NN + element] : 0.0f;
    float* states = p.walk.segment_states + item0 * NN + element;
    const uint32_t sums = smem_base(), scales = sums + SCAN_SCALES;
    for (int first = 0; first < count - 1; first += SCAN_BATCH) {
        const int left = count - 1 - first < SCAN_BATCH ? count - 1 - first : SCAN_BATCH;
        const int padded = (left + SCAN_STEPS - 1) / SCAN_STEPS * SCAN_STEPS;
        const float* from = p.walk.segment_states + item0 * NN + (first + warp_id()) * p.stride +
                            block * SCAN_THREADS + 4 * lane_id();
        GT_NO_UNROLL
        for (int k = warp_id(); k < padded; k += SCAN_THREADS / 32) {
            cp_async<16>(sums + 16 * (32 * k + lane_id()), from, k < left ? 16 : 0);
            from += SCAN_THREADS / 32 * p.stride;
        }
        cp_async_commit();
        constexpr int SCALES = SCAN_BATCH * SCAN_ROWS / SCAN_THREADS; /* of a thread */
        float decay_bits[SCALES];
        GT_UNROLL
        for (int j = 0; j < SCALES; j++) {
            const int i = thread_id() + SCAN_THREADS * j, k = i / SCAN_ROWS, row = i % SCAN_ROWS;
            const int64_t item = item0 + (first + k) * p.step;
            const float* decays = p.walk.segment_decays + item * 2 * N + (block << row_bits) + row;
            decay_bits[j] = k < left && row < 1 << row_bits ? decays[0] + decays[N] : 0.0f;
        }
        GT_UNROLL
        for (int j = 0; j < SCALES; j++) {
            const Scale scale = scale_of_log(decay_bits[j] * LN_2);
            sts<float2>(scales + 8 * (thread_id() + SCAN_THREADS * j), {scale.keep, scale.factor});
        }
        cp_async_wait<0>();
        sync_threads();
        uint32_t sum_at = sums + 4 * thread_id(), scale_at = scales + 8 * (thread_id() >> bits);
        for (int k = 0; k < left; k += SCAN_STEPS) {
            float sum[SCAN_STEPS];
            float2 scale[SCAN_STEPS];
            GT_UNROLL
            for (int i = 0; i < SCAN_STEPS; i++) {
                sum[i] = lds<float>(sum_at + 4 * SCAN_THREADS * i);
                scale[i] = lds<float2>(scale_at + 8 * SCAN_ROWS * i);
            }
            GT_UNROLL
            for (int i = 0; i < SCAN_STEPS; i++) {
                if (k + i < left) {
                    *states = S;
                    states += p.stride;
                    S = rescale(scale[i].x, scale[i].y, S, sum[i]);
                }
            }
            sum_at += 4 * SCAN_THREADS * SCAN_STEPS;
            scale_at += 8 * SCAN_ROWS * SCAN_STEPS;
        }
        sync_threads(); /* before the next are written over them */
    }
    *states = S;
}

/* ---- backward, any size ---------------------------------------------------------------------------------
 * A fixed number of blocks of 256 threads; each takes chunks of 4 leaves in turn, all chunks being
 * independent once S before and G after each are known.  For one chunk:
 *   1 what needs the states, COLUMNS columns of them at a time: roll S forward through the leaves, park
 *     the state before each, then walk back through them with G.  Leaves in the block's scratch
 *     Sdy[t,n] = (S dy_t)[n]   Gv[t,n] = (G v_t)[n]   Gk[t,j] = (G^T (Q_t . k_t))[j]
 *     SG[leaf,n] = rowsum(S . G)
 *   2 leaf by leaf, the pairs of tokens inside the leaf; every gradient is written once.
 * shared, 1: one state [N, COLUMNS+4] (S, then G), the leaf's Q.k, P.r [16,N], v, dy [16,COLUMNS], the
 *     state scales: 34 KB at N = V = 64.  2: r, k, d [16,N], then v, dy [16,V] and after them Sdy, Gv
 *     [16,N], C and A [16,16]: 22 KB.  WIDE, where that exceeds 64 KB (N = V > 198): v, dy, Sdy and Gv
 *     are read where they are in global memory.
 * scratch of a block, in global memory and small enough to stay in L2: 115 KB.
 * arithmetic, 1: 6 products of 16 N COLUMNS multiply-adds; operands from shared memory in 16-byte
 *     pieces, 16 multiply-adds per 2 to 5 loads.  2: D_ij as running products, where they are used.
 * bytes per token and head, N = V = 64: inputs up to three times (2 KB), gradients 512 B. */
struct ChunkParams {
    Problem in;
    const void *S_checkpoints, *G_checkpoints; /* [B,H,places,N,V]: S before, G after each chunk */
    gt_dtype S_dtype, G_dtype;
    void *dr, *dk, *dw, *dv;
    gt_stride dr_at, dk_at, dw_at, dv_at;
    float* du;      /* partial sums [B,places,H,N] or NULL */
    float* scratch; /* [blocks, scratch_size] */
    int64_t places, scratch_size;
    int tiles, columns, pitch; /* tiles of the state; its row in shared memory; multiples of 4 */
    int rows;                  /* N rounded up to 4 */
};

constexpr int SWEEP_THREADS = 256;

/* Offsets in floats of the sweep's shared memory. */
struct SweepLayout {
    int state, Qk, Pr, v, dy, keep, factor, end;
};

GT_HD SweepLayout sweep_layout(int rows, int columns, int pitch) {
    SweepLayout at;
    at.state = 0;
    at.Qk = at.state + rows * pitch;
    at.Pr = at.Qk + LEAF * rows;
    at.v = at.Pr + LEAF * rows;
    at.dy = at.v + LEAF * columns;
    at.keep = at.dy + LEAF * columns;
    at.factor = at.keep + rows;
    at.end = at.factor + rows;
    return at;
}

struct SweepBlock { /* where a block stands */
    uint32_t smem;
    SweepLayout at;
    int64_t b, h, start; /* first token of the chunk */
    int tokens, tile, column0;
    float *parked, *Sdy, *Gv, *Gk, *SG; /* parts of its scratch */
};

/* Q.k, P.r, v, dy and the scales of the leaf that starts at `first`. */
GT_DEV void load_sweep_leaf(const ChunkParams& p, const SweepBlock& s, int64_t first) {
    const Problem& in = p.in;
    for (int n = thread_id(); n < p.rows; n += SWEEP_THREADS) {
        const int left = n < in.N ? s.tokens - (int)(first - s.start) : 0;
        float g[LEAF], r[LEAF], k[LEAF], product = 1.0f, sum = 0.0f;
        load_column(g, in.w, in.w_dtype, at(in.w_at, s.b, first, s.h) + n, in.w_at.t, left);
        load_column(r, in.r, in.dtype, at(in.r_at, s.b, first, s.h) + n, in.r_at.t, left);
        load_column(k, in.k, in.dtype, at(in.k_at, s.b, first, s.h) + n, in.k_at.t, left);
        GT_UNROLL
        for (int t = 0; t < LEAF; t++) {
            g[t] = t < left ? log_decay(in, g[t]) : 0.0f;
            sts<float>(s.smem + 4 * (s.at.Pr + t * p.rows + n), r[t] * product);
            sum += g[t];
            g[t] = exp_accurate(g[t]);
            product *= g[t];
        }
        product = 1.0f;
        GT_UNROLL
        for (int t = LEAF - 1; t >= 0; t--) {
            sts<float>(s.smem + 4 * (s.at.Qk + t * p.rows + n), k[t] * product);
            product *= g[t];
        }
        const Scale scale = scale_of_log(sum);
        sts<float>(s.smem + 4 * (s.at.keep + n), scale.keep);
        sts<float>(s.smem + 4 * (s.at.factor + n), scale.factor);
    }
    for (int i = thread_id(); i < 4 * p.columns; i += SWEEP_THREADS) {
        const int column = i % p.columns, token = i / p.columns * 4, j = s.column0 + column;
        const int64_t t = first + token;
        const int left = j < in.V ? s.tokens - (int)(t - s.start) : 0;
        float v[4], dy[4];
        load_column(v, in.v, in.dtype, at(in.v_at, s.b, t, s.h) + j, in.v_at.t, left);
        load_column(dy, in.dy, in.dtype, at(in.dy_at, s.b, t, s.h) + j, in.dy_at.t, left);
        GT_UNROLL
        for (int x = 0; x < 4; x++) {
            sts<float>(s.smem + 4 * (s.at.v + (token + x) * p.columns + column), v[x]);
            sts<float>(s.smem + 4 * (s.at.dy + (token + x) * p.columns + column), dy[x]);
        }
    }
    sync_threads();
}

GT_DEV float dot4(float4 a, float4 b, float sum) {
    sum = fma_rn(a.x, b.x, sum);
    sum = fma_rn(a.y, b.y, sum);
    sum = fma_rn(a.z, b.z, sum);
    return fma_rn(a.w, b.w, sum);
}

/* out[t,n] = sum_j state[n,j] x[t,j] over the block's columns; a thread makes 4 tokens of a row. */
GT_DEV void state_times_tokens(const ChunkParams& p, const SweepBlock& s, int64_t first, int x,
                               float* out) {
    const Problem& in = p.in;
    for (int i = thread_id(); i < p.rows * (LEAF / 4); i += SWEEP_THREADS) {
        const int n = i % p.rows, t0 = i / p.rows * 4;
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        for (int j = 0; j < p.columns; j += 4) {
            const float4 a = lds<float4>(s.smem + 4 * (s.at.state + n * p.pitch + j));
            GT_UNROLL
            for (int t = 0; t < 4; t++)
                sum[t] = dot4(a, lds<float4>(s.smem + 4 * (x + (t0 + t) * p.columns + j)), sum[t]);
        }
        GT_UNROLL
        for (int t = 0; t < 4; t++)
            if (n < in.N) {
                float& cell = out[(first - s.start + t0 + t) * in.N + n];
                cell = s.tile ? cell + sum[t] : sum[t];
            }
    }
}

/* Gk[t,j] = sum_n G[n,j] Qk[t,n]; a thread makes 4 columns of a token. */
GT_DEV void tokens_times_state(const ChunkParams& p, const SweepBlock& s, int64_t first) {
    const Problem& in = p.in;
    for (int i = thread_id(); i < LEAF * (p.columns / 4); i += SWEEP_THREADS) {
        const int t = i / (p.columns / 4), j = i % (p.columns / 4) * 4;
        float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
        for (int n = 0; n < p.rows; n++) {
            const float k = lds<float>(s.smem + 4 * (s.at.Qk + t * p.rows + n));
            const float4 g = lds<float4>(s.smem + 4 * (s.at.state + n * p.pitch + j));
            sum.x = fma_rn(g.x, k, sum.x);
            sum.y = fma_rn(g.y, k, sum.y);
            sum.z = fma_rn(g.z, k, sum.z);
            sum.w = fma_rn(g.w, k, sum.w);
        }
        const float column[4] = {sum.x, sum.y, sum.z, sum.w};
        GT_UNROLL
        for (int c = 0; c < 4; c++)
            if (s.column0 + j + c < in.V)
                s.Gk[(first - s.start + t) * in.V + s.column0 + j + c] = column[c];
    }
}

/* SG[n] = sum_j S[n,j] G[n,j] with S from the scratch; 4 lanes a row. */
GT_DEV void rowsum_states(const ChunkParams& p, const SweepBlock& s, int leaf) {
    const Problem& in = p.in;
    const float* S = s.parked + (int64_t)leaf * p.rows * p.columns;
    for (int i = thread_id(); i < (p.rows * 4 + 31) / 32 * 32; i += SWEEP_THREADS) {
        const int n = i / 4;
        float sum = 0.0f;
        for (int j = i % 4 * 4; n < p.rows && j < p.columns; j += 16)
            sum = dot4(ldg<float4>(S + n * p.columns + j),
                       lds<float4>(s.smem + 4 * (s.at.state + n * p.pitch + j)), sum);
        sum += shfl_xor(sum, 1);
        sum += shfl_xor(sum, 2);
        if (i % 4 == 0 && n < in.N) {
            float& cell = s.SG[leaf * in.N + n];
            cell = s.tile ? cell + sum : sum;
        }
    }
}

/* state <- E . state + sum_t left_t right_t^T; a thread owns 4 x 4 elements at a time. */
GT_DEV void update_state(const ChunkParams& p, const SweepBlock& s, int left, int right) {
    for (int i = thread_id(); i < (p.rows / 4) * (p.columns / 4); i += SWEEP_THREADS) {
        const int n = i / (p.columns / 4) * 4, j = i % (p.columns / 4) * 4;
        float sum[4][4] = {};
        GT_UNROLL
        for (int t = 0; t < LEAF; t++) {
            const float4 a = lds<float4>(s.smem + 4 * (left + t * p.rows + n));
            const float4 b = lds<float4>(s.smem + 4 * (right + t * p.columns + j));
            const float x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
            GT_UNROLL
            for (int e = 0; e < 16; e++) sum[e / 4][e % 4] = fma_rn(x[e / 4], y[e % 4], sum[e / 4][e % 4]);
        }
        GT_UNROLL
        for (int e = 0; e < 4; e++) {
            const float keep = lds<float>(s.smem + 4 * (s.at.keep + n + e));
            const float factor = lds<float>(s.smem + 4 * (s.at.factor + n + e));
            const uint32_t cell = s.smem + 4 * (s.at.state + (n + e) * p.pitch + j);
            float4 x = lds<float4>(cell);
            x.x = rescale(keep, factor, x.x, sum[e][0]);
            x.y = rescale(keep, factor, x.y, sum[e][1]);
            x.z = rescale(keep, factor, x.z, sum[e][2]);
            x.w = rescale(keep, factor, x.w, sum[e][3]);
            sts<float4>(cell, x);
        }
    }
    sync_threads();
}

/* Shared state <- its columns of the checkpoint [N,V] at `first`, 0 outside. */
GT_DEV void load_state(const ChunkParams& p, const SweepBlock& s, const void* from, gt_dtype dtype,
                       int64_t first) {
    for (int i = thread_id(); i < p.rows * p.columns; i += SWEEP_THREADS) {
        const int n = i / p.columns, j = i % p.columns;
        const bool inside = n < p.in.N && s.column0 + j < p.in.V;
        sts<float>(s.smem + 4 * (s.at.state + n * p.pitch + j),
                   inside ? load_as(from, dtype, first + (int64_t)n * p.in.V + s.column0 + j) : 0.0f);
    }
    sync_threads();
}

/* Part 1 for one tile of columns. */
GT_DEV void sweep_tile(const ChunkParams& p, const SweepBlock& s, int leaves, int64_t state) {
    const int64_t parked = (int64_t)p.rows * p.columns;
    load_state(p, s, p.S_checkpoints, p.S_dtype, state);
    for (int leaf = 0; leaf < leaves; leaf++) { /* forwards: S before each leaf */
        const int64_t first = s.start + leaf * LEAF;
        for (int i = thread_id(); i < p.rows * (p.columns / 4); i += SWEEP_THREADS) {
            const int n = i / (p.columns / 4), j = i % (p.columns / 4) * 4;
            stg<float4>(s.parked + leaf * parked + n * p.columns + j,
                        lds<float4>(s.smem + 4 * (s.at.state + n * p.pitch + j)));
        }
        load_sweep_leaf(p, s, first);
        state_times_tokens(p, s, first, s.at.dy, s.Sdy);
        sync_threads();
        if (leaf + 1 < leaves) update_state(p, s, s.at.Qk, s.at.v);
    }
    load_state(p, s, p.G_checkpoints, p.G_dtype, state);
    for (int leaf = leaves - 1; leaf >= 0; leaf--) { /* backwards: G after each leaf */
        const int64_t first = s.start + leaf * LEAF;
        load_sweep_leaf(p, s, first);
        state_times_tokens(p, s, first, s.at.v, s.Gv);
        tokens_times_state(p, s, first);
        rowsum_states(p, s, leaf);
        sync_threads();
        if (leaf > 0) update_state(p, s, s.at.Pr, s.at.dy);
    }
}

/* Part 2: where a block stands in a leaf. */
struct LeafBlock {
    uint32_t smem;
    int r, k, d, v, dy, Sdy, Gv, C, A; /* offsets in floats */
    int64_t b, h, first;
    int tokens, leaf;
    const float* sweep; /* what part 1 left of the chunk: Sdy, Gv, Gk, SG */
};

GT_HD int leaf_smem(int N, int V, bool wide) {
    return 4 * (LEAF * (3 * N + (wide ? 0 : 2 * (N > V ? N : V))) + 2 * LEAF * LEAF);
}

static_assert(4 * (LEAF * 3 * MAX_SIZE + 2 * LEAF * LEAF) <= SHARED_BYTES, "the wide form fits");

GT_DEV float cell(const LeafBlock& s, int offset) { return lds<float>(s.smem + 4 * offset); }

/* Sdy and Gv at x = token * N + n. */
template <bool WIDE>
GT_DEV float Sdy_at(const ChunkParams& p, const LeafBlock& s, int x) {
    return WIDE ? s.sweep[s.leaf * LEAF * p.in.N + x] : cell(s, s.Sdy + x);
}

template <bool WIDE>
GT_DEV float Gv_at(const ChunkParams& p, const LeafBlock& s, int x) {
    return WIDE ? s.sweep[(CHECKPOINT + s.leaf * LEAF) * p.in.N + x] : cell(s, s.Gv + x);
}

/* v and dy of a token of the leaf. */
template <bool WIDE>
GT_DEV float v_at(const ChunkParams& p, const LeafBlock& s, int token, int j) {
    return WIDE ? load_as(p.in.v, p.in.dtype, at(p.in.v_at, s.b, s.first + token, s.h) + j)
                : cell(s, s.v + token * p.in.V + j);
}

template <bool WIDE>
GT_DEV float dy_at(const ChunkParams& p, const LeafBlock& s, int token, int j) {
    return WIDE ? load_as(p.in.dy, p.in.dtype, at(p.in.dy_at, s.b, s.first + token, s.h) + j)
                : cell(s, s.dy + token * p.in.V + j);
}

/* Four tokens of a column of a [16, size] tile. */
GT_DEV void store_column(const LeafBlock& s, int offset, int size, int token, int column,
                         const float (&x)[4]) {
    GT_UNROLL
    for (int i = 0; i < 4; i++)
        sts<float>(s.smem + 4 * (offset + (token + i) * size + column), x[i]);
}

/* r, k, d, v, dy of the leaf; tokens beyond it have 0, 0, 1, 0, 0. */
template <bool WIDE>
GT_DEV void load_leaf(const ChunkParams& p, const LeafBlock& s) {
    const Problem& in = p.in;
    for (int i = thread_id(); i < 4 * in.N; i += 256) {
        const int n = i % in.N, token = i / in.N * 4;
        const int64_t t = s.first + token;
        const int left = s.tokens - token;
        float r[4], k[4], d[4];
        load_column(r, in.r, in.dtype, at(in.r_at, s.b, t, s.h) + n, in.r_at.t, left);
        load_column(k, in.k, in.dtype, at(in.k_at, s.b, t, s.h) + n, in.k_at.t, left);
        load_column(d, in.w, in.w_dtype, at(in.w_at, s.b, t, s.h) + n, in.w_at.t, left);
        GT_UNROLL
        for (int x = 0; x < 4; x++) d[x] = x < left ? exp_accurate(log_decay(in, d[x])) : 1.0f;
        store_column(s, s.r, in.N, token, n, r);
        store_column(s, s.k, in.N, token, n, k);
        store_column(s, s.d, in.N, token, n, d);
    }
    for (int i = thread_id(); !WIDE && i < 4 * in.V; i += 256) {
        const int j = i % in.V, token = i / in.V * 4;
        const int64_t t = s.first + token;
        const int left = s.tokens - token;
        float v[4], dy[4];
        load_column(v, in.v, in.dtype, at(in.v_at, s.b, t, s.h) + j, in.v_at.t, left);
        load_column(dy, in.dy, in.dtype, at(in.dy_at, s.b, t, s.h) + j, in.dy_at.t, left);
        store_column(s, s.v, in.V, token, j, v);
        store_column(s, s.dy, in.V, token, j, dy);
    }
    sync_threads();
}

/* Sdy and Gv of the leaf, where v and dy were. */
GT_DEV void load_sweep(const ChunkParams& p, const LeafBlock& s) {
    const Problem& in = p.in;
    sync_threads();
    for (int i = thread_id(); i < 4 * in.N; i += 256) {
        const int n = i % in.N, token = i / in.N * 4;
        const int index = (s.leaf * LEAF + token) * in.N + n;
        float Sdy[4], Gv[4];
        load_column(Sdy, s.sweep, GT_F32, index, in.N, 4);
        load_column(Gv, s.sweep, GT_F32, CHECKPOINT * in.N + index, in.N, 4);
        store_column(s, s.Sdy, in.N, token, n, Sdy);
        store_column(s, s.Gv, in.N, token, n, Gv);
    }
    sync_threads();
}

/* C_ij = <dy_i, v_j> for j <= i, one pair a thread; A_ij by 16 lanes a row i, which share the sum
 * over n. */
template <bool WIDE>
GT_DEV void pair_products(const ChunkParams& p, const LeafBlock& s) {
    const Problem& in = p.in;
    const int i = thread_id() / LEAF, j = thread_id() % LEAF;
    float c = 0.0f;
    const bool pair = j <= i && (!WIDE || i < s.tokens);
    for (int x = 0; pair && x < in.V; x++)
        c = fma_rn(dy_at<WIDE>(p, s, i, x), v_at<WIDE>(p, s, j, x), c);
    sts<float>(s.smem + 4 * (s.C + thread_id()), c);

    float a[LEAF] = {};
    for (int n = j; n < in.N; n += LEAF) {
        float product = cell(s, s.r + i * in.N + n); /* r_i D_ij as j runs down from i-1 */
        GT_UNROLL
        for (int m = LEAF - 1; m >= 0; m--) {
            const float k = cell(s, s.k + m * in.N + n);
            if (m == i && in.u) a[m] = fma_rn(product * in.u[s.h * in.N + n], k, a[m]);
            if (m < i) {
                a[m] = fma_rn(product, k, a[m]);
                product *= cell(s, s.d + m * in.N + n);
            }
        }
    }
    GT_UNROLL
    for (int m = 0; m < LEAF; m++) {
        for (int mask = 1; mask < LEAF; mask <<= 1) a[m] += shfl_xor(a[m], mask);
        if (j == m) sts<float>(s.smem + 4 * (s.A + i * LEAF + m), a[m]);
    }
    sync_threads();
}

/* dv_j = Gk_j + sum_{i >= j} A_ij dy_i */
template <bool WIDE>
GT_DEV void leaf_dv(const ChunkParams& p, const LeafBlock& s) {
    const Problem& in = p.in;
    for (int x = thread_id(); x < s.tokens * in.V; x += 256) {
        const int t = x / in.V, j = x % in.V;
        float dv = s.sweep[2 * CHECKPOINT * in.N + (s.leaf * LEAF + t) * in.V + j];
        for (int i = t; i < s.tokens; i++)
            dv = fma_rn(cell(s, s.A + i * LEAF + t), dy_at<WIDE>(p, s, i, j), dv);
        store_as(p.dv, in.dtype, at(p.dv_at, s.b, s.first + t, s.h) + j, dv);
    }
}

template <bool WIDE>
GT_DEV void leaf_dr(const ChunkParams& p, const LeafBlock& s) {
    const Problem& in = p.in;
    for (int x = thread_id(); x < s.tokens * in.N; x += 256) {
        const int i = x / in.N, n = x % in.N;
        const float u = in.u ? in.u[s.h * in.N + n] : 0.0f;
        float dr = u * cell(s, s.k + x) * cell(s, s.C + i * LEAF + i), product = 1.0f;
        for (int j = i - 1; j >= 0; j--) {
            dr = fma_rn(product * cell(s, s.C + i * LEAF + j), cell(s, s.k + j * in.N + n), dr);
            product *= cell(s, s.d + j * in.N + n);
        }
        dr = fma_rn(product, Sdy_at<WIDE>(p, s, x), dr);
        store_as(p.dr, in.dtype, at(p.dr_at, s.b, s.first + i, s.h) + n, dr);
    }
}

template <bool WIDE>
GT_DEV void leaf_dk(const ChunkParams& p, const LeafBlock& s) {
    const Problem& in = p.in;
    for (int x = thread_id(); x < s.tokens * in.N; x += 256) {
        const int j = x / in.N, n = x % in.N;
        const float u = in.u ? in.u[s.h * in.N + n] : 0.0f;
        float dk = u * cell(s, s.r + x) * cell(s, s.C + j * LEAF + j), product = 1.0f;
        for (int i = j + 1; i < s.tokens; i++) {
            dk = fma_rn(product * cell(s, s.C + i * LEAF + j), cell(s, s.r + i * in.N + n), dk);
            product *= cell(s, s.d + i * in.N + n);
        }
        dk = fma_rn(product, Gv_at<WIDE>(p, s, x), dk);
        store_as(p.dk, in.dtype, at(p.dk_at, s.b, s.first + j, s.h) + n, dk);
    }
}

/* dg of all tokens of channel n, by sums alone. */
template <bool WIDE>
GT_DEV void leaf_dg(const ChunkParams& p, const LeafBlock& s, int n, float (&dg)[LEAF]) {
    const Problem& in = p.in;
    float k[LEAF], all = 1.0f;
    GT_UNROLL
    for (int t = 0; t < LEAF; t++) {
        k[t] = cell(s, s.k + t * in.N + n);
        dg[t] = 0.0f;
    }
    /* sum_{j<t} k_j Q_j (G v_j): Q needs the product from the right, so Horner from the left */
    float left = s.sweep[CHECKPOINT * (2 * in.N + in.V) + s.leaf * in.N + n];
    float Qk[LEAF];
    GT_UNROLL
    for (int t = LEAF - 1; t >= 0; t--) {
        Qk[t] = k[t] * all * Gv_at<WIDE>(p, s, t * in.N + n);
        all *= cell(s, s.d + t * in.N + n);
    }
    left *= all;
    GT_UNROLL
    for (int t = 0; t < LEAF; t++) {
        dg[t] += left;
        left += Qk[t];
    }
    /* for every i: the pairs (S, i), (0, i) ... (t-1, i) all span t < i */
    GT_UNROLL
    for (int i = 1; i < LEAF; i++) {
        if (i < s.tokens) {
            float term[LEAF], product = cell(s, s.r + i * in.N + n);
            GT_UNROLL
            for (int j = i - 1; j >= 0; j--) {
                term[j] = product * k[j] * cell(s, s.C + i * LEAF + j);
                product *= cell(s, s.d + j * in.N + n);
            }
            float sum = product * Sdy_at<WIDE>(p, s, i * in.N + n);
            GT_UNROLL
            for (int t = 0; t < i; t++) {
                dg[t] += sum;
                sum += term[t];
            }
        }
    }
}

template <bool WIDE>
GT_DEV void leaf_dw(const ChunkParams& p, const LeafBlock& s) {
    const Problem& in = p.in;
    for (int n = thread_id(); n < in.N; n += 256) {
        float dg[LEAF], w[LEAF];
        load_column(w, in.w, in.w_dtype, at(in.w_at, s.b, s.first, s.h) + n, in.w_at.t, s.tokens);
        leaf_dg<WIDE>(p, s, n, dg);
        GT_UNROLL
        for (int t = 0; t < LEAF; t++) {
            if (t >= s.tokens) break;
            float dw = dg[t];
            if (in.decay == GT_DECAY_RAW) dw *= log_decay(in, w[t]);
            if (cell(s, s.d + t * in.N + n) == 0.0f) dw = 0.0f; /* log d may be -inf there */
            store_as(p.dw, in.w_dtype, at(p.dw_at, s.b, s.first + t, s.h) + n, dw);
        }
    }
}

/* sum_t C_tt r_t k_t of channel n */
GT_DEV float leaf_du(const ChunkParams& p, const LeafBlock& s, int n) {
    float du = 0.0f;
    for (int t = 0; t < s.tokens; t++)
        du = fma_rn(cell(s, s.C + t * LEAF + t) * cell(s, s.r + t * p.in.N + n),
                    cell(s, s.k + t * p.in.N + n), du);
    return du;
}

template <bool WIDE>
GT_KERNEL(256, 2) backward_chunk_kernel(const GT_GRID_CONSTANT ChunkParams p) {
    wait_for_chain();
    const Problem& in = p.in;
    SweepBlock s;
    LeafBlock l;
    s.smem = l.smem = smem_base();
    s.at = sweep_layout(p.rows, p.columns, p.pitch);
    s.parked = p.scratch + (int64_t)block_x() * p.scratch_size;
    s.Sdy = s.parked + LEAVES * p.rows * p.columns;
    l.sweep = s.Sdy;
    s.Gv = s.Sdy + CHECKPOINT * in.N;
    s.Gk = s.Gv + CHECKPOINT * in.N;
    s.SG = s.Gk + CHECKPOINT * in.V;
    l.r = 0;
    l.k = l.r + LEAF * in.N;
    l.d = l.k + LEAF * in.N;
    l.v = l.d + LEAF * in.N;
    l.dy = l.v + LEAF * in.V;
    l.Sdy = l.v;
    l.Gv = l.Sdy + LEAF * in.N;
    l.C = l.v + (WIDE ? 0 : 2 * LEAF * (in.N > in.V ? in.N : in.V));
    l.A = l.C + LEAF * LEAF;

    const int64_t items = in.B * in.H * p.places;
    for (int64_t item = block_x(); item < items; item += grid_x()) {
        const int64_t place = item % p.places;
        s.b = l.b = item / p.places / in.H;
        s.h = l.h = item / p.places % in.H;
        const gt_chunk chunk = chunk_at(in.packing, in.T, place);
        if (chunk.sequence < 0) continue;
        s.start = chunk.first, s.tokens = (int)(chunk.last - chunk.first);
        const int leaves = (s.tokens + LEAF - 1) / LEAF;
        for (s.tile = 0; s.tile < p.tiles; s.tile++) {
            s.column0 = s.tile * p.columns;
            sweep_tile(p, s, leaves, item * in.N * in.V);
        }
        sync_threads();
        float du = 0.0f; /* of channel thread_id(); N is at most 256 */
        for (int leaf = 0; leaf < leaves; leaf++) {
            l.first = s.start + leaf * LEAF;
            l.tokens = s.tokens - leaf * LEAF < LEAF ? s.tokens - leaf * LEAF : LEAF;
            l.leaf = leaf;
            load_leaf<WIDE>(p, l);
            pair_products<WIDE>(p, l);
            if (p.dv) leaf_dv<WIDE>(p, l);
            if (!WIDE) load_sweep(p, l);
            if (p.dr) leaf_dr<WIDE>(p, l);
            if (p.dk) leaf_dk<WIDE>(p, l);
            if (p.dw) leaf_dw<WIDE>(p, l);
            if (thread_id() < in.N) du += leaf_du(p, l, thread_id());
            sync_threads();
        }
        if (p.du && thread_id() < in.N)
            p.du[((l.b * p.places + place) * in.H + l.h) * in.N + thread_id()] = du;
    }
}

/* ---- backward of a chunk, on tensor cores: N = V in 32, 64, 128 ------------------------------------------------
 * All chunks of 64 tokens in parallel, from S before and G after each; four leaves a, b, ... of 16 tokens.
 * With c_t = -log2 of the decays before token t of its leaf, c_16 those of the whole leaf, E = 2^-c_16,
 *     R_t = r_t 2^-c_t (from the leaf's start)        K_t = k_t 2^(c_(t+1) - c_16) (to its end)
 *     C_ij = <dy_i, v_j>
 * where R and K never exceed r and k,
 * a row of leaf a (of leaf b) is taken through the leaves between by one factor E each, as Horner's rule:
 *     X_a = (..((S dy_a . E_0 + C_a0 K_0) . E_1 + C_a1 K_1) ..) . E_a + tril(C_aa) K_a
 *     Z_b = (..((G v_b . E_3 + C_3b^T R_3) . E_2 + C_2b^T R_2) ..) . E_b + triu(C_bb^T) R_b
 *     dr_i = 2^-c_i (2^c_16 X_i) + k_(i-1) C_(i,i-1) + u k_i C_ii
 *     dk_j = 2^c_(j+1) Z_j + r_(j+1) C_(j+1,j) + u r_j C_jj
 *     dv_b = (K_b 2^c_16 R_b^T)' dy_b + K_b R_(b+1)^T dy_(b+1) + K_b E_(b+1) R_(b+2)^T dy_(b+2) .. + K_b E.. G
 * Neighbours i = j+1 have no decay between them and are kept out of X and Z (tril, triu: two off the
 * diagonal), so that all that X and Z hold carries at least one decay.  Then, from the pairs across the
 * chunk's first token, and per token what begins and what ends,
 *     dg_0 = E_0..E_3 . rowsum(S . G) + sum_{i>0} R_i (S dy_i)
 *     dg_t = dg_(t-1) + K_(t-1) 2^c_16 Z_(t-1) - R_t 2^c_16 X_t
 * subtracts, but only terms that are in dg of some token of the chunk, and every pair enters X and Z with
 * the same rounded operands: it leaves as it came, to fp32's rounding.  2^c_16 is what forward bounds with
 * SLOW_LIMIT; a slice of a chunk with a leaf beyond it takes the slow form, below, and so does one with raw
 * decays that differ too much (is_slow).
 * Rounding of S to bf16 is an error that dg of a slow channel has in common for the chunk, and that of G adds up from
 * its start to its end: half of dw's error, more than single heads may have.  bf16: of the sweep, which has G in
 * fp32, S before the chunk and that after it, with E = E_0..E_3,
 *     lost = E . rowsum((G - bf16(G)) . (S after - S before))       end = rowsum(S after . G)
 * are about what is missing from dg_64, and dg_64 with the rounding of another S.  So
 *     dg_t += t/64 . lost + E/2 . (end - lost - dg_64)
 * with t of a part of a leaf, and E since what is before counts less, the faster a channel forgets.  end is not known
 * for the last chunk of a sequence, whose error of S is gone at its end where G is 0; and not used for the first if
 * S is 0 before it, which has no such error (and dg_0 = 0).
 *
 * grid places*B*H, so that blocks side by side read whole rows of tokens; block 8 warps.  In turn, with
 * a barrier between:
 *   copy      two warps a tensor; r, k, w are waited for, v, dy, S, G one phase later
 *   prepare   all warps, 2 channels of PART tokens a thread: R, K, E, 2^c_16, the bonus sum_n r u k
 *   products  a warp a leaf for dv, another for X, then Z
 *   store     X and Z, over v, dy, S, G
 *   finish    as prepare: dr, dk, du; running sums of dg, over parts by shuffles, over leaves by shared memory; dw
 * Channels go in slices of 64 (N = 128: two; dv is kept in registers across them).  bf16 with N = 128 has them in one
 * slice where a block may have 227 KB: C and A are made once, and there are half as many barriers.  Where it may have
 * 99 KB, slices are of 32, and G is not in outputs, since dk of the first slice would come before G of the second.
 * registers: X and Z [64,16] as accumulators, 64; dv N/2; K as left operand and its factors, 48.  N = 128 in one
 *     slice: 128, 64, 96.
 * operands: S, G, v, dy 16-bit; C, R, K, A tf32.  bf16: S and G are kept as bf16 (their rounding, 2^-9, is
 *     that of the outputs); rowsums come from the sweep, where G is fp32.  f16: S is kept as fp32 and
 *     rounded here, G in the sweep, to f16 with a power of two a row; rowsum(S . G) is made here, of S as it is kept.
 * X and Z are made transposed, channels by tokens: R and K are their left operands, and C^T the right one, as
 *     its accumulators stand.  R, K, X, Z lie in cells of two tokens by two channels: 16 bytes are a left
 *     operand, two right ones (of A), or a lane's accumulators of a tile.
 * shared, N = 64: R, K [64,64] fp32 32 KB, r, k, w 24 KB, v, dy 16 KB, S, G 16 KB, 10 KB of vectors: two
 *     blocks on a multiprocessor.  N = 128 in one slice: R, K 64 KB, r, k, w 48 KB, v, dy 32 KB, S, G 64 KB, 18 KB of
 *     vectors; in four: 16, 12, 32, 16, 16 KB.
 * tensor cores per leaf, N = 64: 2 x (32 + 20) m16n8k16, 2 x 40 + 64 + 80 m16n8k8.
 * bytes: inputs once, gradients once, states once: 1.4 KB per token and head at N = 64, 128 of them G.
 * fp32 activations: what differs stands before their products, below. */

enum { OF_R, OF_K, OF_W, OF_V, OF_DY, OF_DR, OF_DK, OF_DW, OF_DV, TENSORS };

struct BackwardParams {
    struct Tensor {
        void* data;
        gt_stride at; /* below 2^31 bytes from token to token */
        int element;  /* bytes */
    } tensors[TENSORS];
    Divider heads, H; /* heads: B*H */
    int T, places;
    bool G_in_outputs; /* see TensorParams::G_rows */
    Packing packing;
    bool raw; /* decay = exp(-exp(w)) */
    /* G after the last chunk of every sequence is 0, so its block needs nothing from the sweep: these blocks come first
     * and run beside it, on multiprocessors that it leaves free.  The others wait. */
    bool last_first;
    const float* u;
    const void* S_checkpoints; /* [B,H,places,N,V] */
    const void* G_checkpoints; /* [B,H,places,N,V]; G_in_outputs: [sequences,H,N,V], of chunks cut short */
    const float* rowsums; /* bf16: [B,H,places,SUMS,ROWSUM_PARTS,N]: see StatePart::store_rowsums() */
    float* du;            /* [B,places,H,N] or NULL */
    const float* G_undo;  /* f16: [B,H,places,G_PARTS,N], Fit::undo of G */
};

/* CHANNELS_: of a slice; N = 128 has 128, 64 or 32, see slice_channels(). */
template <class T_, class W_, int N_, int CHANNELS_ = N_>
struct BackwardTraits {
    using T = T_;
    using W = W_;
    using State = StateOf<T>;
    using Gradient = GradientOf<T>;
    static constexpr bool SPLIT = std::is_same<T, float>::value; /* products of fp32 operands */
    static constexpr bool ROUNDED = std::is_same<T, f16>::value; /* S kept as fp32, used as f16 */
    static constexpr bool KEEPS_BF16 = std::is_same<State, bf16>::value;
    static constexpr int SIZE = sizeof(T);                       /* of an element of v, dy, S, G */
    static constexpr int N = N_, CHANNELS = CHANNELS_;
    static constexpr int SLICES = N / CHANNELS, GROUPS = CHANNELS / 16;
    static constexpr bool G_IN_OUTPUTS = G_FITS_OUTPUTS<T, N> && SLICES <= 2; /* the second's G is not in dk */
    static constexpr int STATE_ROWS = CHANNELS < 64 ? CHANNELS : 64; /* of S or G side by side in memory */
    static constexpr int TILES = CHANNELS / 8, VALUE_TILES = N / 8;
    static constexpr int THREADS = 2 * 32 * LEAVES;
    static constexpr bool PAIRED = !SPLIT && N > 32; /* where it is faster, see leaf_of_warp() */
    static_assert(!PAIRED || LEAVES == 4, "leaf_of_warp()");
    /* on a multiprocessor; with three f16 would spill */
    static constexpr int BLOCKS = N == 128 ? 1 : N == 32 && sizeof(State) == 2 ? 3 : 2;
    /* outside the products: 2 channels of PART tokens a thread, half a slice of a leaf a warp */
    static constexpr int LANES = CHANNELS / 4, LEAF_PARTS = 32 / LANES, PART = LEAF / LEAF_PARTS;
    static constexpr int FP32_ROWS = 4 * CHECKPOINT * CHANNELS;
    static constexpr int PER_LEAF = 4 * LEAVES * CHANNELS; /* fp32 [4,CHANNELS] */
    /* offsets in bytes */
    static constexpr int R = 0, K = R + FP32_ROWS;
    static constexpr int RAW_ROWS = 2 * CHECKPOINT * CHANNELS; /* of 16 bits; fp32: no room */
    static constexpr int RAW_R = K + FP32_ROWS, RAW_K = RAW_R + (SPLIT ? 0 : RAW_ROWS);
    static constexpr int RAW_W = RAW_K + (SPLIT ? 0 : RAW_ROWS);
    static constexpr int VALUES = RAW_W + (sizeof(W) == 2 ? RAW_ROWS : 0);
    static constexpr int DY = VALUES + SIZE * CHECKPOINT * N;
    static constexpr int S = DY + SIZE * CHECKPOINT * N, G = SPLIT ? S : S + SIZE * CHANNELS * N;
    static constexpr int STATES_END = G + SIZE * CHANNELS * N;
    /* X and Z, once the products are made: over v, dy, S, G; N = 128: over S, G */
    static constexpr int X = N == 128 ? S : VALUES, Z = X + FP32_ROWS;
    static constexpr int E = STATES_END > Z + FP32_ROWS ? STATES_END : Z + FP32_ROWS;
    static constexpr int GROWTH = E + PER_LEAF;     /* 2^c_16 */
    static constexpr int FIRST = GROWTH + PER_LEAF; /* sum_i R_i (S dy_i) */
    static constexpr int DU = FIRST + PER_LEAF;
    static constexpr int G_PARTS = StatesTraits<T, W, N>::PARTS; /* of a row, in the sweep */
    static constexpr int ROWSUM_PARTS = KEEPS_BF16 ? G_PARTS : 1;
    static constexpr int LEAF_SUMS = DU + PER_LEAF; /* of dg */
    static constexpr int SUMS = KEEPS_BF16 ? SWEEP_SUMS : 1, SUM_PARTS = SUMS * ROWSUM_PARTS;
    static constexpr int ROWSUM = LEAF_SUMS + PER_LEAF, U = ROWSUM + 4 * SUM_PARTS * N;
    static constexpr int BONUS = U + 4 * N; /* [64,2] */
    static constexpr int NEAR = BONUS + 8 * CHECKPOINT; /* [64+1]: C_tt, C_(t,t-1) */
    static constexpr int S_SCALE = NEAR + 8 * (CHECKPOINT + 2), G_SCALE = S_SCALE + (ROUNDED ? 4 * CHANNELS : 0);
    static constexpr int PLACE = G_SCALE + (ROUNDED ? 4 * CHANNELS : 0); /* of the chunk in every tensor */
    static constexpr int TOKENS = PLACE + 8 * TENSORS, DU_ROW = TOKENS + 4, SLOW = DU_ROW + 4;
    static constexpr int FLAGS_END = SLOW + 4 * 2 * LEAVES;
    /* fp32: C of two leaves, 10 times; else of a leaf with itself, 4 times, in the slow form */
    static constexpr int C_CELLS = SPLIT ? FLAGS_END : RAW_R;
    static constexpr int C_END = SPLIT ? C_CELLS + 10 * 4 * LEAF * LEAF : FLAGS_END;
    static constexpr int S_READ = C_END, G_HERE = S_READ + 8; /* mbarriers */
    /* LARGE: alone on its multiprocessor, where nobody else works while it waits, but with 255 registers a thread:
     * TwoTerms, and LeafRows are kept.  SUMS_A, besides: A of two leaves is summed over the slices before it meets dy */
    static constexpr bool LARGE = N == 128 && KEEPS_BF16, SUMS_A = LARGE && SLICES > 1;
    static constexpr int KEPT_A = G_HERE + 8, SMEM = KEPT_A + (SUMS_A ? 6 * 4 * LEAF * LEAF : 0);
    static_assert(KEPT_A % 16 == 0, "read by 16 bytes");
    static_assert(SLOW % 16 == 0 && NEAR % 16 == 0 && DU % 16 == 0, "read by 16 bytes");
    /* raw decays: h of a strong token, and what it may exceed those of the others by: see is_slow() */
    static constexpr float STRONG = SPLIT ? 5.0f : 8.0f, STRONG_SHARE = SPLIT ? 1.0f / 8 : 1.0f / 64;
    /* the slow form: sums of leaves where it needs neither 2^c_16 nor those of dg */
    static constexpr int SLOW_ENDS = LEAF_SUMS, SLOW_BEGINS = GROWTH;
    static_assert(LEAVES >= 3 && (SPLIT || VALUES - RAW_R >= 4 * LEAVES * LEAF * LEAF), "room for the slow form");
    static constexpr uint32_t MINUS_INFINITIES = std::is_same<W, bf16>::value ? 0xff80ff80u : 0xfc00fc00u;
    static_assert(CHANNELS < 128 || LARGE, "G and the slow form of others are by slices");
    static_assert(SMEM <= (CHANNELS == 128 ? HOPPER_KB : SLICES == 2 ? AMPERE_KB : LEAST_KB) * 1024,
                  "as slice_channels() has it");
};

template <class C>
struct BackwardBlock {
    uint32_t smem;
    int index;  /* of the chunk in [B,H,places] */
    int G_index; /* in G_checkpoints; below 0: in outputs */
    int leaf;   /* of the warp, in products */
    int slice0; /* first channel of the slice */
    int g, j;   /* lane / 4, lane % 4 */

    GT_METHOD int tokens() const { return lds<int>(smem + C::TOKENS); } /* of the chunk */

    /* In products a warp makes dv of a leaf, or its X and Z.  PAIRED: warps w and w + 4, which share a scheduler and
     * its instruction cache, run the same code, for leaves 0 and 3 or 1 and 2: of dv the first leaf takes most, the
     * last least. */
    GT_METHOD static bool makes_dv() { return C::PAIRED ? warp_id() & 2 : warp_id() < LEAVES; }
    GT_METHOD static int leaf_of_warp() {
        if (!C::PAIRED) return warp_id() % LEAVES;
        return warp_id() < 4 ? warp_id() & 1 : 3 - (warp_id() & 1);
    }
};

/* Byte offset of 8 neighbours in a tile of 16-bit rows: pieces are swapped so that 8 rows in a row, and 8
 * rows of one parity, lie in different banks. */
template <int N>
GT_DEV uint32_t row_piece(int row, int piece) {
    if constexpr (N == 32) {
        const int line = row / 2;
        return 128 * line + 16 * (((row & 1) * 4 + piece) ^ (line & 7));
    } else {
        return 2 * N * row + 16 * (piece ^ ((row ^ row >> 3) & 7));
    }
}

/* From there 16 kk values on, and 16 rows on as often as `rows` says: of the swapping one exclusive or is left. */
GT_DEV uint32_t add_16(uint32_t piece, int kk) { return (piece ^ kk % 4 * 32) + kk / 4 * 128; }

template <int N>
GT_DEV uint32_t add_16_rows(uint32_t piece, int rows) {
    return (N == 32 ? piece : piece ^ rows % 4 * 32) + 32 * N * rows;
}

/* Byte offset of 4 neighbours in a tile of fp32 rows.  In different banks lie two neighbours of rows 4, or 2,
 * apart, and four of rows 1, or 2, apart: the rows that lanes read together. */
GT_DEV int fp32_swap(int row) { return (row >> 2 & 1) << 1 | ((row ^ row >> 1 ^ row >> 3) & 1) << 2; }

template <int N>
GT_DEV uint32_t fp32_piece(int row, int piece) {
    return 4 * N * row + 16 * (piece ^ fp32_swap(row));
}

/* The chunk of this block; sequence < 0: none. */
struct ChunkPlace {
    int b, h, place;
    int index;     /* in [B,H,places] */
    int G_index;   /* in G_checkpoints; below 0: in outputs */
    bool is_early; /* see BackwardParams::last_first */
    gt_chunk chunk;

    GT_METHOD int tokens() const { return (int)(chunk.last - chunk.first); }
};

template <class C>
GT_DEV ChunkPlace find_chunk(const BackwardParams& p) {
    ChunkPlace at;
    int head; /* of the batch */
    at.place = divide(block_x(), p.heads, &head);
    at.is_early = C::KEEPS_BF16 && p.last_first && at.place == 0;
    if (C::KEEPS_BF16 && p.last_first) at.place = (at.place ? at.place : p.places) - 1;
    at.b = divide(head, p.H, &at.h);
    at.index = head * p.places + at.place;
    at.chunk = chunk_at(p.packing, p.T, at.place);
    at.G_index = at.index;
    if (p.G_in_outputs) { /* b or sequence is 0 */
        const int sequence = at.b + (int)at.chunk.sequence;
        at.G_index = at.tokens() == CHECKPOINT ? -1 : sequence * p.H.divisor + at.h;
    }
    return at;
}

/* What the later phases need of that, kept here for want of registers, by one warp: where its first token is in
 * every tensor, its number of tokens and its row of p.du. */
template <class C>
GT_DEV void store_place(const BackwardParams& p, const BackwardBlock<C>& me, const ChunkPlace& here) {
    const int i = lane_id();
    if (i == TENSORS) {
        sts<int>(me.smem + C::TOKENS, here.tokens());
        sts<int>(me.smem + C::DU_ROW, (here.b * p.places + here.place) * p.H.divisor + here.h);
    }
    if (i >= TENSORS) return;
    const BackwardParams::Tensor& x = p.tensors[i];
    sts<char*>(me.smem + C::PLACE + 8 * i,
               static_cast<char*>(x.data) + at(x.at, here.b, here.chunk.first, here.h) * x.element);
}

/* Where token t of the chunk is. */
template <class T, class C>
GT_DEV T* row_of(const BackwardParams& p, const BackwardBlock<C>& me, int tensor, int t) {
    const int bytes = (int)p.tensors[tensor].at.t * (int)sizeof(T);
    return global_pointer<T>(lds<char*>(me.smem + C::PLACE + 8 * tensor) + (int64_t)t * bytes);
}

/* The same before that is known to all. */
template <class T>
GT_DEV T* global_row(const BackwardParams& p, const ChunkPlace& here, int tensor, int t) {
    const BackwardParams::Tensor& x = p.tensors[tensor];
    return static_cast<T*>(x.data) + at(x.at, here.b, here.chunk.first + t, here.h);
}

/* Rows of a slice of a state, `pitch` elements apart, from one of them on. */
template <class State>
struct SliceRows {
    const State* data;
    int pitch;
};

template <class State, class C>
GT_DEV SliceRows<State> checkpoint_rows(const BackwardBlock<C>& me, const void* states, int index, int row = 0) {
    return {static_cast<const State*>(states) + ((int64_t)index * C::N + me.slice0 + row) * C::N, C::N};
}

/* Those of G; `output` tells where the chunk's rows of an output start. */
template <class C, class Output>
GT_DEV SliceRows<typename C::Gradient> G_rows(const BackwardParams& p, const BackwardBlock<C>& me, Output&& output,
                                              int row = 0) {
    if (!C::G_IN_OUTPUTS || me.G_index >= 0)
        return checkpoint_rows<typename C::Gradient>(me, p.G_checkpoints, me.G_index, row);
    const int tensor = me.slice0 + row + C::STATE_ROWS < C::N ? OF_DK : OF_DV;
    return {output(tensor), (int)p.tensors[tensor].at.t};
}

/* The same where store_place() is done. */
template <class C>
GT_DEV SliceRows<typename C::Gradient> G_rows(const BackwardParams& p, const BackwardBlock<C>& me) {
    return G_rows<C>(p, me, [&](int tensor) { return row_of<typename C::Gradient>(p, me, tensor, 0); });
}

/* Byte offset of a cell of R, K, X or Z: two tokens by two channels from an even one.  Cells are swapped so
 * that in different banks lie 8 neighbours, 4 of 2 rows, 2 of 4 rows. */
template <class C>
GT_DEV uint32_t cell_of(int pair, int channel) {
    const int swap = ((pair ^ pair >> 1) & 1) << 2 | (pair & 3);
    return 8 * pair * C::CHANNELS + 16 * (channel / 2 ^ swap);
}

/* The cell 8 kk channels on: the swapping leaves one exclusive or. */
GT_DEV uint32_t add_8(uint32_t cell, int kk) { return (cell ^ kk % 2 * 64) + kk / 2 * 128; }

/* Of an element within a cell of R or K, and of X or Z. */
template <class C>
GT_DEV int operand_in_cell(int token, int channel) {
    return 4 * (C::SPLIT ? 2 * (channel % 2) + token % 2 : 2 * (token % 2) + channel % 2);
}

GT_DEV int sum_in_cell(int token, int channel) { return 4 * (2 * (channel % 2) + token % 2); }

/* Byte offset of a channel in the 16-bit rows of r, k or w; rows PART apart lie in different banks. */
template <class C>
GT_DEV uint32_t raw_cell(int row, int channel) {
    const int swap = (row >> 3 & 1) << 6 | (C::CHANNELS == 32 ? (row >> 2 & 1) << 5 : 0);
    return (2 * (row * C::CHANNELS + channel)) ^ swap;
}

/* Where r, k or w of the slice are; what stands there for a pair of channels beyond the sequence. */
template <class C>
GT_DEV uint32_t raw_rows(const BackwardBlock<C>& me, int tensor) {
    return me.smem + (tensor == OF_R ? C::RAW_R : tensor == OF_K ? C::RAW_K : C::RAW_W);
}

template <class C>
GT_DEV uint32_t no_token(const BackwardParams& p, int tensor) {
    return tensor == OF_W && p.raw ? C::MINUS_INFINITIES : 0;
}

/* What a thread has of a slice outside the products: 2 channels of PART tokens of a leaf. */
template <class C>
struct ChannelPart {
    int leaf, part, t0; /* part: of the leaf; t0: its first token */
    int channel;        /* of the slice */

    GT_METHOD void place() {
        leaf = warp_id() / 2;
        part = lane_id() / C::LANES;
        t0 = LEAF * leaf + C::PART * part;
        channel = warp_id() % 2 * (C::CHANNELS / 2) + lane_id() % C::LANES * 2;
    }

    using Decays = Pair<typename C::W>[C::PART];

    /* w of the part; beyond the sequence what is no decay */
    GT_METHOD void load(const BackwardParams& p, const BackwardBlock<C>& me, Decays& w) const {
        using W = typename C::W;
        if constexpr (sizeof(W) == 2) {
            GT_UNROLL
            for (int i = 0; i < C::PART; i++)
                w[i] = lds<Pair<W>>(raw_rows(me, OF_W) + raw_cell<C>(t0 + i, channel));
        } else {
            load_rows(p, row_of<W>(p, me, OF_W, t0) + me.slice0 + channel, me.tokens() - t0, w);
        }
    }

    /* fp32 w: from the part's first token on, of which there are `left` */
    GT_METHOD void load_rows(const BackwardParams& p, const float* row, int left, Decays& w) const {
        GT_UNROLL
        for (int i = 0; i < C::PART; i++) {
            w[i].value.x = w[i].value.y = p.raw ? -INFINITY : 0.0f;
            if (i < left) w[i] = ldg<Pair<float>>(row);
            row += (int)p.tensors[OF_W].at.t;
        }
    }

    /* h = -log2 of the decays; c = their sum from the leaf's start to the part; total = that of the leaf */
    GT_METHOD void decays(const BackwardParams& p, const Decays& w, float (&h)[C::PART][2], float (&c)[2],
                          float (&total)[2]) const {
        if (p.raw) { /* a branch, since all lanes take the same */
            GT_UNROLL
            for (int i = 0; i < C::PART; i++) {
                h[i][0] = bits_of_raw(w[i].lo());
                h[i][1] = bits_of_raw(w[i].hi());
            }
        } else {
            GT_UNROLL
            for (int i = 0; i < C::PART; i++) h[i][0] = -w[i].lo() * LOG2_E, h[i][1] = -w[i].hi() * LOG2_E;
        }
        float sum[2] = {h[0][0], h[0][1]};
        GT_UNROLL
        for (int i = 1; i < C::PART; i++) sum[0] += h[i][0], sum[1] += h[i][1];
        GT_UNROLL
        for (int e = 0; e < 2; e++) {
            if constexpr (C::LEAF_PARTS == 1) {
                total[e] = sum[e];
                c[e] = 0.0f;
            } else if constexpr (C::LEAF_PARTS == 2) {
                const float other = shfl_xor(sum[e], 16);
                total[e] = sum[e] + other;
                c[e] = part ? other : 0.0f;
            } else {
                c[e] = scan_quads(sum[e], part, &total[e]);
            }
        }
    }

    /* What c_16 cannot exceed without is_slow(). */
    GT_METHOD static float limit(const BackwardParams& p) { return p.raw ? C::STRONG : SLOW_LIMIT; }

    /* Whether a leaf of raw decays takes the slow form.  Where a few tokens decay far more than the others, their h,
     * too, would show the rounding of sums that dg is the difference of. */
    GT_METHOD bool is_slow(const float (&h)[C::PART][2], const float (&total)[2]) const {
        bool slow = false;
        GT_UNROLL
        for (int e = 0; e < 2; e++) {
            float most = 0.0f, others = 0.0f;
            GT_UNROLL
            for (int i = 0; i < C::PART; i++) {
                most = fmaxf(most, h[i][e]);
                others += h[i][e] > C::STRONG ? 0.0f : h[i][e];
            }
            for (int lane = C::LANES; lane < 32; lane *= 2) {
                most = fmaxf(most, shfl_xor(most, lane));
                others += shfl_xor(others, lane);
            }
            slow |= !(total[e] < SLOW_LIMIT) || (most > C::STRONG && others < most * C::STRONG_SHARE);
        }
        return slow;
    }
};

/* r and k of a part: of its token i and, of k, of the one before.  16-bit: where the copies are. */
template <class C, bool SPLIT = C::SPLIT>
struct RawPart {
    using Raw = Pair<typename C::T>;
    const ChannelPart<C>& own;
    uint32_t r_rows, k_rows;

    GT_METHOD RawPart(const BackwardParams&, const BackwardBlock<C>& me, const ChannelPart<C>& own_)
        : own(own_), r_rows(raw_rows(me, OF_R)), k_rows(raw_rows(me, OF_K)) {}
    GT_METHOD Raw load(uint32_t rows, int t) const { return lds<Raw>(rows + raw_cell<C>(t, own.channel)); }
    GT_METHOD Raw r(int i) const {
        if (i < C::PART || own.t0 + i < CHECKPOINT) return load(r_rows, own.t0 + i);
        return {};
    }
    GT_METHOD Raw k(int i) const {
        if (i >= 0 || own.t0 > 0) return load(k_rows, own.t0 + i);
        return {};
    }
};

/* fp32: in registers, from global memory. */
template <class C>
struct RawPart<C, true> {
    using Raw = Pair<float>;
    Raw rs[C::PART + 1], ks[C::PART + 1];

    GT_METHOD RawPart(const BackwardParams& p, const BackwardBlock<C>& me, const ChannelPart<C>& own)
        : RawPart(p, own, me.tokens() - own.t0, row_of<float>(p, me, OF_R, own.t0) + me.slice0 + own.channel,
                  row_of<float>(p, me, OF_K, own.t0) + me.slice0 + own.channel) {}

    /* rows: from the part's first token on, of which there are `left` */
    GT_METHOD RawPart(const BackwardParams& p, const ChannelPart<C>& own, int left, const float* r_row,
                      const float* k_row) {
        ks[0].value = rs[C::PART].value = {0.0f, 0.0f};
        if (own.t0 > 0 && left >= 0) ks[0] = ldg<Raw>(k_row - (int)p.tensors[OF_K].at.t);
        GT_UNROLL
        for (int i = 0; i < C::PART; i++) {
            rs[i].value = ks[i + 1].value = {0.0f, 0.0f};
            if (i < left) rs[i] = ldg<Raw>(r_row), ks[i + 1] = ldg<Raw>(k_row);
            r_row += (int)p.tensors[OF_R].at.t;
            k_row += (int)p.tensors[OF_K].at.t;
        }
        if (C::PART < left && own.t0 + C::PART < CHECKPOINT) rs[C::PART] = ldg<Raw>(r_row);
    }
    GT_METHOD Raw r(int i) const { return rs[i]; }
    GT_METHOD Raw k(int i) const { return ks[i + 1]; }
};

/* The `lane` of LANES that copy COUNT 16-bit elements of every token to shared memory, 8 of them at cell(token, first);
 * `from`: what it copies of its first token, lane / (COUNT / 8).  Pairs of them are `none` beyond the sequence. */
template <int COUNT, int LANES, class Cell>
GT_DEV void copy_rows(int lane, const uint16_t* from, int stride, int tokens, uint32_t none, const Cell& cell) {
    constexpr int PIECES = COUNT / 8, ROWS = LANES / PIECES;
    const int row = lane / PIECES, first = lane % PIECES * 8, step = ROWS * stride;
    if (tokens == CHECKPOINT) { /* copies under a condition cost more instructions */
        GT_UNROLL
        for (int i = 0; i < CHECKPOINT; i += ROWS) {
            cp_async<16>(cell(row | i, first), from);
            from += step;
        }
        return;
    }
    for (int t = row; t < CHECKPOINT; t += ROWS) {
        const uint32_t to = cell(t, first);
        if (t < tokens) {
            cp_async<16>(to, from);
        } else {
            sts<uint4>(to, {none, none, none, none});
        }
        from += step;
    }
}

/* Two warps, this as `lane` of theirs: the same of the elements from `column` on of a tensor. */
template <int COUNT, class Cell>
GT_DEV void copy_tensor(int lane, const BackwardParams& p, const ChunkPlace& here, int tensor, int column,
                        uint32_t none, const Cell& cell) {
    constexpr int PIECES = COUNT / 8;
    const BackwardParams::Tensor& x = p.tensors[tensor];
    const int64_t first = at(x.at, here.b, here.chunk.first + lane / PIECES, here.h) + column + lane % PIECES * 8;
    copy_rows<COUNT, 64>(lane, static_cast<const uint16_t*>(x.data) + first, (int)x.at.t, here.tokens(), none, cell);
}

/* Two warps: STATE_ROWS rows of a state kept as bf16, or zeros, to rows at `to`. */
template <class C>
GT_DEV void copy_state(int lane, const BackwardBlock<C>& me, const SliceRows<bf16>& rows, int to,
                       bool is_zero = false) {
    constexpr int PIECES = C::N / 8, ROWS = 64 / PIECES;
    const int row = lane / PIECES, piece = lane % PIECES;
    const bf16* from = rows.data + row * (int64_t)rows.pitch + 8 * piece;
    GT_UNROLL
    for (int i = 0; i < C::STATE_ROWS; i += ROWS) {
        cp_async<16>(me.smem + to + row_piece<C::N>(row | i, piece), from, is_zero ? 0 : 16);
        from += ROWS * (int64_t)rows.pitch;
    }
}

/* A warp: half of the chunk's tokens of v or dy as fp32 rows; 0 beyond the sequence. */
template <class C>
GT_DEV void copy_half_rows(const BackwardParams& p, const BackwardBlock<C>& me, const ChunkPlace& here, int tensor,
                           int half, int to) {
    constexpr int PIECES = C::N / 4, ROWS = 32 / PIECES;
    const BackwardParams::Tensor& x = p.tensors[tensor];
    const int piece = lane_id() % PIECES, first = CHECKPOINT / 2 * half + lane_id() / PIECES;
    const int left = here.tokens() - first;
    const float* from = static_cast<const float*>(x.data) + at(x.at, here.b, here.chunk.first + first, here.h) +
                        4 * piece;
    GT_UNROLL
    for (int i = 0; i < CHECKPOINT / 2; i += ROWS) {
        cp_async<16>(me.smem + to + fp32_piece<C::N>(first + i, piece), from, i < left ? 16 : 0);
        from += ROWS * (int)x.at.t;
    }
}

/* A warp: rows of a slice of a state kept as fp32, to where S and then G is. */
template <class C>
GT_DEV void copy_state_rows(const BackwardBlock<C>& me, const SliceRows<float>& rows, int first, int last) {
    constexpr int PIECES = C::N / 4, ROWS = 32 / PIECES;
    const int piece = lane_id() % PIECES;
    for (int row = first + lane_id() / PIECES; row < last; row += ROWS)
        cp_async<16>(me.smem + C::S + fp32_piece<C::N>(row, piece), rows.data + row * (int64_t)rows.pitch + 4 * piece);
}

/* A warp: u of a slice, LARGE: of all. */
template <class C>
GT_DEV void copy_u(const BackwardParams& p, const BackwardBlock<C>& me, const ChunkPlace& here) {
    GT_UNROLL
    for (int i = 0; i < (C::LARGE ? C::N : C::CHANNELS) / 32; i++) {
        const int n = me.slice0 + 32 * i + lane_id();
        if (p.u) {
            cp_async<4>(me.smem + C::U + 4 * n, p.u + here.h * C::N + n);
        } else {
            sts<float>(me.smem + C::U + 4 * n, 0.0f);
        }
    }
}

/* bf16: the same of the sweep's sums in parts; f16 has rowsum(S . G) from round_states(), fp32 from sum_states(). */
template <class C>
GT_DEV void copy_rowsums(const BackwardParams& p, const BackwardBlock<C>& me, const ChunkPlace& here) {
    constexpr int COUNT = C::LARGE ? C::N : C::CHANNELS;
    const float* sums = p.rowsums + (int64_t)here.index * C::SUM_PARTS * C::N + me.slice0;
    GT_UNROLL
    for (int i = 0; i < C::SUM_PARTS * COUNT; i += 4 * 32) {
        const int at = i + 4 * lane_id(), part = at / COUNT, place = part * C::N + at % COUNT;
        if (part < C::SUM_PARTS)
            cp_async<16>(me.smem + C::ROWSUM + 4 * (me.slice0 + place), sums + place, here.is_early ? 0 : 16);
    }
}

/* A part of a sum of channels of the slice: of one, or of two as float2. */
template <class Word, class C>
GT_DEV Word rowsum_part(const BackwardBlock<C>& me, int part, int channel) {
    return lds<Word>(me.smem + C::ROWSUM + 4 * (part * C::N + me.slice0 + channel));
}

/* Starts the copies of a slice, two warps a tensor: r, k, w and u, for which all wait, and as a second group the rest.
 * Of these only S, G and rowsum(S . G) come from kernels of the chain. */
template <class C>
GT_DEV void copy_inputs(const BackwardParams& p, const BackwardBlock<C>& me, const ChunkPlace& here) {
    const int warp = warp_id(), tensor = warp / 2, lane = 32 * (warp % 2) + lane_id();
    const bool is_first = me.slice0 == 0, wants_rest = is_first || !C::LARGE; /* u, rowsums */
    if (tensor <= (sizeof(typename C::W) == 2 ? OF_W : OF_K)) {
        const uint32_t to = raw_rows(me, tensor);
        copy_tensor<C::CHANNELS>(lane, p, here, tensor, me.slice0, no_token<C>(p, tensor),
                                 [=](int t, int n) { return to + raw_cell<C>(t, n); });
    }
    if (warp == 6 && wants_rest) copy_u<C>(p, me, here);
    if (warp == 7 && is_first) store_place<C>(p, me, here);
    cp_async_commit();
    if (tensor < 2) {
        const uint32_t to = me.smem + (tensor ? C::DY : C::VALUES);
        if (is_first)
            copy_tensor<C::N>(lane, p, here, tensor ? OF_DY : OF_V, 0, 0,
                              [=](int t, int v) { return to + row_piece<C::N>(t, v / 8); });
    } else {
        if constexpr (C::KEEPS_BF16) {
            if (!here.is_early) wait_for_chain();
            const auto output = [&](int i) { return global_row<bf16>(p, here, i, 0); };
            GT_UNROLL
            for (int row = 0; row < C::CHANNELS; row += C::STATE_ROWS) {
                const int to = 2 * C::N * row;
                if (tensor == 2) {
                    copy_state<C>(lane, me, checkpoint_rows<bf16>(me, p.S_checkpoints, me.index, row), C::S + to);
                } else {
                    copy_state<C>(lane, me, G_rows<C>(p, me, output, row), C::G + to, here.is_early);
                }
            }
        }
        if (C::KEEPS_BF16 && warp == 7 && wants_rest && p.tensors[OF_DW].data) copy_rowsums<C>(p, me, here);
    }
    cp_async_commit();
}

/* fp32: u; the rest is waited for later, r, k, w are in registers. */
template <class C>
GT_DEV void copy_fp32_inputs(const BackwardParams& p, const BackwardBlock<C>& me, const ChunkPlace& here) {
    const int warp = warp_id();
    if (warp < 4 && me.slice0 == 0)
        copy_half_rows<C>(p, me, here, warp / 2 ? OF_DY : OF_V, warp % 2, warp / 2 ? C::DY : C::VALUES);
    if (warp >= 4 && warp < 7)
        copy_state_rows<C>(me, checkpoint_rows<float>(me, p.S_checkpoints, me.index), C::CHANNELS * (warp - 4) / 3,
                           C::CHANNELS * (warp - 3) / 3);
    if (warp == 7) {
        copy_u<C>(p, me, here);
        if (me.slice0 == 0) store_place<C>(p, me, here);
    }
    cp_async_commit();
    if (warp == 7) cp_async_wait<0>();
}

/* A slice of S, kept as fp32, as f16 rows, each times what Fit has for it; and of G, whose parts of a row have a power
 * of two each, all by the largest of these.  What undoes that, and rowsum(S . G).  By all threads; all loads come
 * first. */
template <class C>
GT_DEV void round_states(const BackwardParams& p, const BackwardBlock<C>& me, const ChunkPlace& here) {
    constexpr int LANES = C::THREADS / C::CHANNELS, PARTS = C::G_PARTS, COUNT = C::N / PARTS / LANES; /* of a part */
    const int n = thread_id() / LANES, lane = thread_id() % LANES;
    const float* S_from = checkpoint_rows<float>(me, p.S_checkpoints, me.index, n).data + COUNT * lane;
    const auto output = [&](int i) { return global_row<f16>(p, here, i, 0); };
    const SliceRows<f16> rows = G_rows<C>(p, me, output);
    const f16* G_from = rows.data + n * (int64_t)rows.pitch + COUNT * lane;
    const float* undo_from = p.G_undo + (int64_t)here.index * (PARTS * C::N) + me.slice0 + n;
    Vec<float, 4> S[PARTS][COUNT / 4];
    Vec<f16, COUNT> G[PARTS];
    float undo[PARTS], largest = 0.0f, G_largest = 0.0f, sum = 0.0f;
    GT_UNROLL
    for (int i = 0; i < PARTS; i++) {
        GT_UNROLL
        for (int e = 0; e < COUNT; e += 4) S[i][e / 4] = ldg<Vec<float, 4>>(S_from + COUNT * LANES * i + e);
        G[i] = ldg<Vec<f16, COUNT>>(G_from + COUNT * LANES * i);
        undo[i] = ldg<float>(undo_from + C::N * i);
    }
    GT_UNROLL
    for (int i = 0; i < PARTS; i++) {
        G_largest = fmaxf(G_largest, undo[i]);
        GT_UNROLL
        for (int e = 0; e < COUNT; e++) {
            const float x = S[i][e / 4].get(e % 4);
            largest = fmaxf(largest, fabsf(x));
            sum = fma_rn(x, G[i].get(e) * undo[i], sum);
        }
    }
    GT_UNROLL
    for (int mask = 1; mask < LANES; mask <<= 1) {
        largest = fmaxf(largest, shfl_xor(largest, mask));
        sum += shfl_xor(sum, mask);
    }
    const Fit fit = fit_f16(largest);
    const float G_scale = as_float((254u << 23) - as_uint(G_largest)); /* 1 / G_largest */
    if (lane == 0) {
        sts<float>(me.smem + C::S_SCALE + 4 * n, fit.undo);
        sts<float>(me.smem + C::G_SCALE + 4 * n, G_largest);
        sts<float>(me.smem + C::ROWSUM + 4 * (me.slice0 + n), sum);
    }
    GT_UNROLL
    for (int i = 0; i < PARTS; i++) {
        const int column = COUNT * (lane + LANES * i);
        const uint32_t cell = me.smem + row_piece<C::N>(n, column / 8) + 2 * (column % 8);
        const float by = undo[i] * G_scale;
        float scaled[COUNT], united[COUNT];
        GT_UNROLL
        for (int e = 0; e < COUNT; e++)
            scaled[e] = S[i][e / 4].get(e % 4) * fit.scale, united[e] = G[i].get(e) * by;
        Vec<f16, COUNT> rounded;
        rounded.set(scaled);
        sts<Vec<f16, COUNT>>(cell + C::S, rounded);
        rounded.set(united);
        sts<Vec<f16, COUNT>>(cell + C::G, rounded);
    }
}

/* An element of R or K.  16 bits: rounded in full, since dg takes away with R and K what the tensor cores added
 * with them. */
template <class C>
GT_DEV float chunk_operand(float x) {
    return C::SPLIT ? x : exact_tf32(x);
}

/* R, K, E, growth and bonus of the thread's part of a slice. */
template <class C>
GT_DEV void prepare_part(const BackwardParams& p, const BackwardBlock<C>& me, const ChannelPart<C>& own,
                         const RawPart<C>& raw, const typename ChannelPart<C>::Decays& w) {
    using Raw = Pair<typename C::T>;
    float h[C::PART][2], c[2], total[2], bonus[C::PART];
    const float2 u = lds<float2>(me.smem + C::U + 4 * (me.slice0 + own.channel));
    own.decays(p, w, h, c, total);
    bool slow = warp_any(!(fabsf(total[0]) < own.limit(p) && fabsf(total[1]) < own.limit(p)));
    if (slow && p.raw) slow = warp_any(own.is_slow(h, total)); /* a closer look */
    if (lane_id() == 0) sts<uint32_t>(me.smem + C::SLOW + 4 * warp_id(), slow);
    float R[4], K[4]; /* a cell */
    GT_UNROLL
    for (int i = 0; i < C::PART; i++) {
        const Raw r = raw.r(i), k = raw.k(i);
        const float r_[2] = {r.lo(), r.hi()}, k_[2] = {k.lo(), k.hi()};
        GT_UNROLL
        for (int e = 0; e < 2; e++) {
            const int in_cell = C::SPLIT ? 2 * e + i % 2 : 2 * (i % 2) + e;
            R[in_cell] = chunk_operand<C>(r_[e] * ex2_approx(-c[e]));
            c[e] += h[i][e];
            K[in_cell] = chunk_operand<C>(k_[e] * ex2_approx(c[e] - total[e]));
        }
        bonus[i] = fma_rn(r_[1], k_[1] * u.y, r_[0] * (k_[0] * u.x));
        if (i % 2 == 0) continue;
        const uint32_t cell = me.smem + cell_of<C>((own.t0 + i) / 2, own.channel);
        sts<float4>(cell + C::R, {R[0], R[1], R[2], R[3]});
        sts<float4>(cell + C::K, {K[0], K[1], K[2], K[3]});
    }
    const uint32_t scales = me.smem + 4 * (own.leaf * C::CHANNELS + own.channel);
    if (own.part == 0) sts<float2>(scales + C::E, {leaf_decay(total[0]), leaf_decay(total[1])});
    if (own.part == C::LEAF_PARTS - 1) sts<float2>(scales + C::GROWTH, {ex2_approx(total[0]), ex2_approx(total[1])});
    if constexpr (C::PART == 16) halve_sums<8>(bonus, 16);
    if constexpr (C::PART >= 8) halve_sums<4>(bonus, 8);
    halve_sums<2>(bonus, 4);
    halve_sums<1>(bonus, 2);
    const float sum = bonus[0] + shfl_xor(bonus[0], 1);
    if (lane_id() % 2 == 0)
        sts<float>(me.smem + C::BONUS + 8 * (own.t0 + lane_id() / 2 % C::PART) + 4 * (warp_id() % 2), sum);
}

/* For ldmatrix the lane's piece of 16-bit rows: of the first 16, their first 16 values, as a left operand, and as two
 * right ones. */
template <int N>
GT_DEV uint32_t left_piece() {
    return row_piece<N>(lane_id() / 8 % 2 * 8 + lane_id() % 8, lane_id() / 16);
}

template <int N>
GT_DEV uint32_t right_piece() {
    return row_piece<N>(lane_id() / 16 * 8 + lane_id() % 8, lane_id() / 8 % 2);
}

/* Sums of a leaf, [channels,16 tokens]: tile q, rows g and g + 8 are channels 16 q + 2g and the next, tile e,
 * column c token 8e + c.  So a lane's part of two tiles is a cell. */
template <class C>
struct Sums {
    float tile[C::GROUPS][2][4];
};

/* sum = a state's slice times the warp's tokens */
template <class C>
GT_DEV void times_state(const BackwardBlock<C>& me, int from, int state, Sums<C>& sum) {
    const uint32_t tokens = me.smem + from + add_16_rows<C::N>(right_piece<C::N>(), me.leaf);
    const uint32_t rows = me.smem + state + row_piece<C::N>(lane_id() % 8 * 2 + lane_id() / 8 % 2, lane_id() / 16);
    sum = {};
    GT_UNROLL
    for (int kk = 0; kk < C::N / 16; kk++) {
        uint32_t b[4];
        ldmatrix_x4(b, add_16(tokens, kk));
        GT_UNROLL
        for (int q = 0; q < C::GROUPS; q++) {
            uint32_t a[4];
            ldmatrix_x4(a, add_16_rows<C::N>(add_16(rows, kk), q));
            mma<typename C::T>(sum.tile[q][0], a, b[0], b[1]);
            mma<typename C::T>(sum.tile[q][1], a, b[2], b[3]);
        }
    }
}

/* The warp's tokens of v or dy as left operands: read again and again, but where there are registers to keep them. */
template <class C>
struct LeafRows {
    uint32_t left;
    uint32_t kept[C::LARGE ? C::N / 16 : 1][4];

    GT_METHOD LeafRows(const BackwardBlock<C>& me, int from)
        : left(me.smem + from + add_16_rows<C::N>(left_piece<C::N>(), me.leaf)) {
        if constexpr (C::LARGE) {
            GT_UNROLL
            for (int kk = 0; kk < C::N / 16; kk++) ldmatrix_x4(kept[kk], add_16(left, kk));
        }
    }

    GT_METHOD void get(int kk, uint32_t (&a)[4]) const {
        if constexpr (C::LARGE) {
            GT_UNROLL
            for (int i = 0; i < 4; i++) a[i] = kept[kk][i];
        } else {
            ldmatrix_x4(a, add_16(left, kk));
        }
    }
};

/* c = products of the warp's tokens, rows, with those of another leaf, at `other`: tile e, column c is token 8e + c. */
template <class C>
GT_DEV void token_products(const BackwardBlock<C>& me, const LeafRows<C>& own, int other, int leaf,
                           float (&c)[2][4]) {
    constexpr int SUMS = C::LARGE ? 2 : 1; /* two chains where there are registers */
    const uint32_t right = me.smem + other + add_16_rows<C::N>(right_piece<C::N>(), leaf);
    float sums[SUMS][2][4] = {};
    GT_UNROLL
    for (int kk = 0; kk < C::N / 16; kk++) {
        uint32_t a[4], b[4];
        own.get(kk, a);
        ldmatrix_x4(b, add_16(right, kk));
        mma<typename C::T>(sums[kk % SUMS][0], a, b[0], b[1]);
        mma<typename C::T>(sums[kk % SUMS][1], a, b[2], b[3]);
    }
    GT_UNROLL
    for (int x = 0; x < 8; x++) {
        c[x / 4][x % 4] = sums[0][x / 4][x % 4];
        if (SUMS == 2) c[x / 4][x % 4] += sums[SUMS - 1][x / 4][x % 4];
    }
}

/* The columns of tile e of products of tokens as a left operand. */
GT_DEV void left_of(const float (&c)[4], float (&a)[4]) {
    a[0] = to_tf32(c[0]), a[1] = to_tf32(c[2]), a[2] = to_tf32(c[1]), a[3] = to_tf32(c[3]);
}

/* sum += (R or K of a leaf)^T c^T */
template <class C>
GT_DEV void add_leaf(const BackwardBlock<C>& me, const float (&c)[2][4], int from, int leaf, Sums<C>& sum) {
    float b[2][4];
    GT_UNROLL
    for (int x = 0; x < 8; x++) b[x / 4][x % 4] = to_tf32(c[x / 4][x % 4]);
    GT_UNROLL
    for (int e = 0; e < 2; e++) {
        const uint32_t cell = me.smem + from + cell_of<C>(LEAF / 2 * leaf + 4 * e + me.j, 2 * me.g);
        GT_UNROLL
        for (int q = 0; q < C::GROUPS; q++) {
            const float4 x = lds<float4>(cell + 128 * q);
            const float a[4] = {x.x, x.y, x.z, x.w};
            mma_tf32(sum.tile[q][0], a, b[e][0], b[e][1]);
            mma_tf32(sum.tile[q][1], a, b[e][2], b[e][3]);
        }
    }
}

/* Where, in the slow form, the sums of pairs are that begin before leaf a and end in leaf c > a > 0. */
template <class C>
GT_DEV int slow_ends(int a, int c) {
    return C::SLOW_ENDS + 4 * (a + c - 3) * C::CHANNELS;
}

/* Channels by a vector in shared memory. */
template <class C>
GT_DEV void scale_channels(const BackwardBlock<C>& me, uint32_t offset, Sums<C>& sum) {
    GT_UNROLL
    for (int q = 0; q < C::GROUPS; q++) {
        const float2 scale = lds<float2>(me.smem + offset + 4 * (16 * q + 2 * me.g));
        GT_UNROLL
        for (int x = 0; x < 8; x++) sum.tile[q][x / 4][x % 4] *= x % 4 < 2 ? scale.x : scale.y;
    }
}

/* Products of a token and of its neighbours, for what carries no decay. */
template <class C>
GT_DEV uint32_t near_cell(const BackwardBlock<C>& me, int token) {
    return me.smem + C::NEAR + 8 * token;
}

/* The cell of C of leaves a >= b: two tokens of a by two of b.  16 bits: a = b. */
template <class C>
GT_DEV uint32_t C_cell(const BackwardBlock<C>& me, int a, int b, int pair_a, int pair_b) {
    const int swap = (pair_a & 1) << 2 | (pair_a & 2), block = C::SPLIT ? a * (a + 1) / 2 + b : a;
    return me.smem + C::C_CELLS + 4 * LEAF * LEAF * block + 128 * pair_a + 16 * (pair_b ^ swap);
}

template <class C>
GT_DEV uint32_t C_element(const BackwardBlock<C>& me, int leaf, int i, int j) {
    return C_cell(me, leaf, leaf, i / 2, j / 2) + 4 * (2 * (i % 2) + j % 2);
}

/* What the leaf's R_i x_i or K_j x_j, `of` which, sum up to, to [channels] at `to`: of S dy, its part of dg_0.  The
 * chunk's first token carries no decay. */
template <class C>
GT_DEV void store_leaf_sum(const BackwardBlock<C>& me, const Sums<C>& sum, int of, int to) {
    constexpr int COUNT = 2 * C::GROUPS;
    const float carries = of == C::R && me.leaf == 0 && me.j == 0 ? 0.0f : 1.0f;
    float first[COUNT];
    GT_UNROLL
    for (int q = 0; q < C::GROUPS; q++) {
        const uint32_t cell = me.smem + of + 128 * q;
        const float4 R0 = lds<float4>(cell + cell_of<C>(LEAF / 2 * me.leaf + me.j, 2 * me.g));
        const float4 R1 = lds<float4>(cell + cell_of<C>(LEAF / 2 * me.leaf + 4 + me.j, 2 * me.g));
        const float(&x)[2][4] = sum.tile[q];
        first[2 * q] = fma_rn(R1.z, x[1][1], fma_rn(R1.x, x[1][0], fma_rn(R0.z, x[0][1], R0.x * x[0][0] * carries)));
        first[2 * q + 1] =
            fma_rn(R1.w, x[1][3], fma_rn(R1.y, x[1][2], fma_rn(R0.w, x[0][3], R0.y * x[0][2] * carries)));
    }
    halve_sums<COUNT / 2>(first, 2);
    halve_sums<COUNT / 4>(first, 1);
    GT_UNROLL
    for (int x = 0; x < COUNT / 4; x++) {
        const int i = COUNT / 2 * (me.j / 2) + COUNT / 4 * (me.j % 2) + x;
        sts<float>(me.smem + to + 4 * (16 * (i / 2) + 2 * me.g + i % 2), first[x]);
    }
}

/* X of the leaf, but for its last factor 2^c_16; its products near the diagonal, its part of dg_0.  In the slow form
 * X of what comes before the leaf, from its start; C of the leaf, and what pairs that end here sum up to. */
template <class C, bool SLOW>
GT_DEV void make_X(const BackwardBlock<C>& me, Sums<C>& sum) {
    const int a = me.leaf;
    const bool corner = me.g == 0 && me.j == 3; /* has the first token's product with the one before */
    float c[2][4], before = 0.0f;               /* the latter; of the chunk's first token it is in S */
    times_state<C>(me, C::DY, C::S, sum);
    if constexpr (C::ROUNDED) scale_channels<C>(me, C::S_SCALE, sum);
    store_leaf_sum<C>(me, sum, C::R, C::FIRST + 4 * a * C::CHANNELS);
    const LeafRows<C> dy(me, C::DY);
    for (int b = 0; b < a; b++) {
        token_products<C>(me, dy, C::VALUES, b, c);
        if (b == a - 1 && corner) {
            before = c[1][1];
            c[1][1] = 0.0f;
        }
        scale_channels<C>(me, C::E + 4 * b * C::CHANNELS, sum);
        add_leaf<C>(me, c, C::K, b, sum);
        if (SLOW && b < a - 1) store_leaf_sum<C>(me, sum, C::R, slow_ends<C>(b + 1, a));
    }
    if (corner) sts<float>(near_cell(me, LEAF * a) + 4, before);
    if (a == LEAVES - 1 && corner) sts<float2>(near_cell(me, CHECKPOINT), {0.0f, 0.0f}); /* in G */
    token_products<C>(me, dy, C::VALUES, a, c);
    GT_UNROLL
    for (int x = 0; x < 8; x++) {
        const int i = me.g + x % 4 / 2 * 8, j = 8 * (x / 4) + 2 * me.j + x % 2;
        float& cell = c[x / 4][x % 4];
        if (j == i || j + 1 == i) sts<float>(near_cell(me, LEAF * a + i) + (j == i ? 0 : 4), cell);
        if (SLOW) sts<float>(C_element(me, a, i, j), cell);
        if (j + 1 >= i) cell = 0.0f;
    }
    if (SLOW) return;
    scale_channels<C>(me, C::E + 4 * a * C::CHANNELS, sum);
    add_leaf<C>(me, c, C::K, a, sum);
}

/* Z of the leaf, but for its last factor 2^c_16.  In the slow form of what comes after the leaf, from its end; and what
 * pairs of the leaf and G sum up to. */
template <class C, bool SLOW>
GT_DEV void make_Z(const BackwardBlock<C>& me, Sums<C>& sum) {
    const int b = me.leaf;
    float c[2][4];
    times_state<C>(me, C::VALUES, C::G, sum);
    if constexpr (C::ROUNDED) scale_channels<C>(me, C::G_SCALE, sum);
    if (SLOW) store_leaf_sum<C>(me, sum, C::K, C::SLOW_BEGINS + 4 * b * C::CHANNELS);
    const LeafRows<C> v(me, C::VALUES);
    for (int a = LEAVES - 1; a > b; a--) {
        token_products<C>(me, v, C::DY, a, c);
        if (a == b + 1 && me.g == 7 && me.j == 0) c[0][2] = 0.0f;
        scale_channels<C>(me, C::E + 4 * a * C::CHANNELS, sum);
        add_leaf<C>(me, c, C::R, a, sum);
    }
    if (SLOW) return;
    token_products<C>(me, v, C::DY, b, c);
    GT_UNROLL
    for (int x = 0; x < 8; x++) {
        const int j = me.g + x % 4 / 2 * 8, i = 8 * (x / 4) + 2 * me.j + x % 2;
        if (i <= j + 1) c[x / 4][x % 4] = 0.0f;
    }
    scale_channels<C>(me, C::E + 4 * b * C::CHANNELS, sum);
    add_leaf<C>(me, c, C::R, b, sum);
}

/* X or Z of the leaf to shared memory; a cell has the two tokens of its first channel, then of its second. */
template <class C>
GT_DEV void store_sums(const BackwardBlock<C>& me, int to, const Sums<C>& sum) {
    GT_UNROLL
    for (int e = 0; e < 2; e++) {
        const uint32_t cell = me.smem + to + cell_of<C>(LEAF / 2 * me.leaf + 4 * e + me.j, 2 * me.g);
        GT_UNROLL
        for (int q = 0; q < C::GROUPS; q++) {
            const float(&x)[4] = sum.tile[q][e];
            sts<float4>(cell + 128 * q, {x[0], x[1], x[2], x[3]});
        }
    }
}

/* LARGE: a left operand of 16 columns, from two tiles as accumulators have them, in two bf16 terms.  It takes as many
 * products as tf32, is more exact, and rows of bf16 need no conversion; but it takes more registers. */
struct TwoTerms {
    uint32_t high[4], low[4];

    GT_METHOD TwoTerms(const float (&x)[4], const float (&y)[4]) {
        set(0, x[0], x[1]);
        set(1, x[2], x[3]);
        set(2, y[0], y[1]);
        set(3, y[2], y[3]);
    }

    GT_METHOD void set(int i, float a, float b) {
        high[i] = pack_bf16(a, b);
        low[i] = pack_bf16(a - unpack_bf16_lo(high[i]), b - unpack_bf16_hi(high[i]));
    }

    /* dv += this times 16 rows of bf16; rows: the lane's row and piece, for a lane of an odd 8 in their second half */
    template <int TILES>
    GT_METHOD void multiply(float (&dv)[TILES][4], uint32_t rows) const {
        GT_UNROLL
        for (int x = 0; x < TILES; x += 2) {
            uint32_t b[4]; /* of two tiles, both halves of the rows of each */
            ldmatrix_x4_trans(b, add_16(rows, x / 2));
            GT_UNROLL
            for (int y = 0; y < 2; y++) {
                mma_bf16(dv[x + y], high, b[2 * y], b[2 * y + 1]);
                mma_bf16(dv[x + y], low, b[2 * y], b[2 * y + 1]);
            }
        }
    }
};

/* dv += (A^T as a left operand, tile e, column c: token 2c + e of leaf a) dy_a */
template <class C>
GT_DEV void add_dv(const BackwardBlock<C>& me, const float (&A)[2][4], int leaf,
                   float (&dv)[C::VALUE_TILES][4]) {
    using Unpack = Element<typename C::T>;
    const int matrix = lane_id() / 8, i = lane_id() % 8;
    if constexpr (C::LARGE) { /* its halves: even and odd tokens */
        const uint32_t rows = me.smem + C::DY + row_piece<C::N>(2 * i + matrix % 2, matrix / 2);
        TwoTerms(A[0], A[1]).multiply(dv, add_16_rows<C::N>(rows, leaf));
    } else {
        GT_UNROLL
        for (int e = 0; e < 2; e++) {
            const uint32_t rows = me.smem + C::DY + row_piece<C::N>(2 * i + e, matrix);
            float a[4];
            left_of(A[e], a);
            GT_UNROLL
            for (int x = 0; x < C::N / 32; x++) {
                uint32_t b[4];
                ldmatrix_x4_trans(b, add_16(add_16_rows<C::N>(rows, leaf), 2 * x));
                GT_UNROLL
                for (int y = 0; y < 4; y++)
                    mma_tf32(dv[4 * x + y], a, Unpack::lo(b[y]), Unpack::hi(b[y]));
            }
        }
    }
}

/* K of a leaf as left operands, and factors of the channels that it is to be used with.  The tensor core drops
 * bits; the factors start from TF32_MEAN, so that it does not make products smaller in the mean. */
constexpr float TF32_MEAN = 1.0f + 0.69f / 2048.0f;

template <class C>
struct LeafK {
    float K[C::TILES][4];
    float2 factor[C::TILES];

    GT_METHOD void scaled(int kk, float (&left)[4]) const {
        GT_UNROLL
        for (int e = 0; e < 4; e++) left[e] = K[kk][e] * (e < 2 ? factor[kk].x : factor[kk].y);
    }

    GT_METHOD void set_factor(float x) {
        GT_UNROLL
        for (int kk = 0; kk < C::TILES; kk++) factor[kk] = {x, x};
    }

    GT_METHOD void scale_factor(float x) {
        GT_UNROLL
        for (int kk = 0; kk < C::TILES; kk++) factor[kk] = {factor[kk].x * x, factor[kk].y * x};
    }

    /* by a vector in shared memory */
    GT_METHOD void multiply_factor(const BackwardBlock<C>& me, uint32_t offset) {
        GT_UNROLL
        for (int kk = 0; kk < C::TILES; kk++) {
            const float2 x = lds<float2>(me.smem + offset + 4 * (8 * kk + 2 * me.j));
            factor[kk] = {factor[kk].x * x.x, factor[kk].y * x.y};
        }
    }
};

/* A^T = K_b R_a^T: tile e, column c is token 2c + e of leaf a */
template <class C>
GT_DEV void pair_products(const BackwardBlock<C>& me, const LeafK<C>& left, int leaf, float (&A)[2][4]) {
    const uint32_t row = me.smem + C::R + cell_of<C>(LEAF / 2 * leaf + me.g, 2 * me.j);
    GT_UNROLL
    for (int x = 0; x < 8; x++) A[x / 4][x % 4] = 0.0f;
    GT_UNROLL
    for (int kk = 0; kk < C::TILES; kk++) {
        float a[4];
        left.scaled(kk, a);
        const float4 b = lds<float4>(add_8(row, kk));
        mma_tf32(A[0], a, b.x, b.y);
        mma_tf32(A[1], a, b.z, b.w);
    }
}

/* A of the leaf itself, transposed as pair_products() has it: later tokens, and the bonus. */
template <class C>
GT_DEV void set_bonus(const BackwardBlock<C>& me, float (&A)[2][4]) {
    const float4 parts = lds<float4>(me.smem + C::BONUS + 8 * (LEAF * me.leaf + 2 * me.g));
    const float bonus[2] = {parts.x + parts.y, parts.z + parts.w};
    GT_UNROLL
    for (int x = 0; x < 8; x++) {
        const int j = 2 * me.g + x % 4 / 2, i = 4 * me.j + 2 * (x % 2) + x / 4;
        float& cell = A[x / 4][x % 4];
        cell = i > j ? cell : i == j ? bonus[x % 4 / 2] : 0.0f;
    }
}

/* ---- the slow form of a slice -----------------------------------------------------------------------------------
 * Only 2^c_16 overflows: between leaves all factors are below 1 already.  So X and Z stop at the leaf's own borders,
 *     X_a = S dy_a + what leaves before add, from the leaf's start
 *     Z_b = G v_b + what leaves after add, from its end
 * and what happens within the leaf is made by running products, as backward_chunk_kernel makes it.  With
 * e_ij = C_ij prod_{j<m<i} d_m, for pairs j < i - 1 of a leaf
 *     dr_i = 2^-c_i X_i + sum_j e_ij k_j + ..      dk_j = 2^-(c_16 - c_(j+1)) Z_j + sum_i e_ij r_i + ..
 *     dg_t = crossing + sum_{i>t} R_i X_i + sum_{j<t} K_j Z_j + sum_{j<t<i} e_ij r_i k_j
 * and no difference is taken: a channel's few hard resets may stand beside decays close to 1.  Pairs that cross all of
 * leaf a, from leaves b < a (or S) to leaves c > a (or G):
 *     crossing = E_0 .. E_3 rowsum(S . G) + sum_c E_a .. E_(c-1) sum_i R_i (X_c before leaf a's part)_i
 *                                         + sum_b E_(b+1) .. E_3 sum_j K_j (G v_b)_j
 * A thread has a channel of a leaf.  r, k, w are read from memory again (L2). */
template <class C>
struct SlowColumn {
    using T = typename C::T;
    using W = typename C::W;
    const BackwardParams& p;
    int t0, tokens;  /* of the leaf: its first token in the chunk, what the chunk has of it */
    const T *r0, *k0; /* that token's */
    const W* w0;

    GT_METHOD SlowColumn(const BackwardParams& p_, const BackwardBlock<C>& me, int leaf, int channel)
        : p(p_), t0(LEAF * leaf), tokens(me.tokens() - LEAF * leaf),
          r0(row_of<T>(p, me, OF_R, t0) + me.slice0 + channel), k0(row_of<T>(p, me, OF_K, t0) + me.slice0 + channel),
          w0(row_of<W>(p, me, OF_W, t0) + me.slice0 + channel) {}

    /* Of token t of the leaf, or of a neighbour in the chunk, else 0.  h: -log2 of its decay. */
    template <class E>
    GT_METHOD float load(const E* from, int tensor, int t) const {
        const bool inside = t < tokens && t0 + t >= 0 && t0 + t < CHECKPOINT;
        return inside ? Element<E>::load(from + (int64_t)t * (int)p.tensors[tensor].at.t, 0) : 0.0f;
    }
    GT_METHOD float r(int t) const { return load(r0, OF_R, t); }
    GT_METHOD float k(int t) const { return load(k0, OF_K, t); }
    GT_METHOD float h(int t) const {
        const float w = load(w0, OF_W, t);
        return t >= tokens ? 0.0f : p.raw ? bits_of_raw(w) : -w * LOG2_E;
    }
};

/* R, K and E again: the sums to the leaf's end only add, since they may be infinite. */
template <class C>
GT_DEV void prepare_slow_column(const BackwardParams& p, const BackwardBlock<C>& me, int leaf, int channel) {
    const SlowColumn<C> own(p, me, leaf, channel);
    float before = 0.0f, after = 0.0f;
    GT_NO_UNROLL
    for (int i = 0; i < LEAF; i++) {
        const int j = LEAF - 1 - i;
        const auto cell = [&](int t) {
            return me.smem + cell_of<C>((own.t0 + t) / 2, channel) + operand_in_cell<C>(t, channel);
        };
        sts<float>(C::R + cell(i), chunk_operand<C>(own.r(i) * ex2_approx(-before)));
        sts<float>(C::K + cell(j), chunk_operand<C>(own.k(j) * ex2_approx(-after)));
        before += own.h(i);
        after += own.h(j);
    }
    sts<float>(me.smem + C::E + 4 * (leaf * C::CHANNELS + channel), leaf_decay(before));
}

/* A of the leaf, as pair_products() has it.  A lane runs down row i of every other channel. */
template <class C>
GT_DEV void slow_pairs(const BackwardParams& p, const BackwardBlock<C>& me, float (&A)[2][4]) {
    const int i = lane_id() % LEAF;
    float a[LEAF] = {};
    GT_NO_UNROLL
    for (int channel = lane_id() / LEAF; channel < C::CHANNELS; channel += 2) {
        const SlowColumn<C> own(p, me, me.leaf, channel);
        float product = own.r(i);
        GT_UNROLL
        for (int j = LEAF - 2; j >= 0; j--) {
            const float k = own.k(j), decay = ex2_approx(-own.h(j));
            a[j] = fma_rn(j < i ? product : 0.0f, k, a[j]);
            product *= j < i ? decay : 1.0f;
        }
    }
    GT_UNROLL
    for (int j = 0; j < LEAF; j++) a[j] += shfl_xor(a[j], LEAF);
    GT_UNROLL
    for (int x = 0; x < 8; x++) { /* token j of row i to the lane that has it as operand */
        const int row = 4 * me.j + 2 * (x % 2) + x / 4;
        GT_UNROLL
        for (int g = 0; g < 8; g++) {
            const float from = shfl_idx(a[2 * g + x % 4 / 2], row);
            if (me.g == g) A[x / 4][x % 4] = from;
        }
    }
}

/* Sums over the channel's pairs that cross the whole leaf, and what mends dg there. */
template <class C>
GT_DEV float slow_crossing(const BackwardBlock<C>& me, int leaf, int channel) {
    const auto of = [&](int vector) { return lds<float>(me.smem + vector + 4 * channel); };
    const auto E = [&](int a) { return of(C::E + 4 * a * C::CHANNELS); };
    float sum = 0.0f, end = 0.0f, decay = 1.0f, sums[C::SUMS] = {}; /* end: dg of the chunk's end */
    for (int c = leaf + 1; c < LEAVES; c++) {
        decay *= E(c - 1);
        sum = fma_rn(decay, of(leaf == 0 ? C::FIRST + 4 * c * C::CHANNELS : slow_ends<C>(leaf, c)), sum);
    }
    decay = 1.0f;
    for (int b = LEAVES - 1; b >= 0; b--) { /* b: of leaves before; decay from its end on */
        const float begins = of(C::SLOW_BEGINS + 4 * b * C::CHANNELS);
        if (b < leaf) sum = fma_rn(decay, begins, sum);
        end = fma_rn(decay, begins, end);
        decay *= E(b);
    }
    GT_UNROLL
    for (int i = 0; i < C::SUM_PARTS; i++) sums[i / C::ROWSUM_PARTS] += rowsum_part<float>(me, i, channel);
    sum = fma_rn(decay, sums[0], sum);
    if constexpr (C::KEEPS_BF16) {
        const float lost = decay * sums[1];
        end = sums[2] - fma_rn(decay, sums[0], end) - lost;
        sum = fma_rn(lost, (float)leaf / LEAVES, sum);
        if (sums[2] != 0.0f) sum = fma_rn(0.5f * decay, end, sum);
    }
    return sum;
}

/* dr, dk, dw and du of a channel of a leaf.  Inner loops go over what is in registers, outer ones stay loops. */
template <class C>
GT_DEV void finish_slow_column(const BackwardParams& p, const BackwardBlock<C>& me, int leaf, int channel) {
    using T = typename C::T;
    using W = typename C::W;
    const SlowColumn<C> own(p, me, leaf, channel);
    const int n = me.slice0 + channel;
    const float u = lds<float>(me.smem + C::U + 4 * (me.slice0 + channel));
    const auto near = [&](int t) { return lds<float2>(near_cell(me, own.t0 + t)); };
    const auto sum_at = [&](int of, int t) {
        return lds<float>(me.smem + of + cell_of<C>((own.t0 + t) / 2, channel) + sum_in_cell(t, channel));
    };
    float d[LEAF], x[LEAF], dg[LEAF], decayed = 0.0f, du = 0.0f; /* x: k, then r; decayed: bits */
    GT_UNROLL
    for (int t = 0; t < LEAF; t++) {
        d[t] = ex2_approx(-own.h(t));
        x[t] = own.k(t);
        dg[t] = 0.0f;
    }
    GT_NO_UNROLL
    for (int i = 0; i < LEAF; i++) { /* pairs that end at i */
        const float r = own.r(i), k = own.k(i), from_start = ex2_approx(-decayed) * sum_at(C::X, i);
        const float2 products = near(i);
        float term[LEAF], within = 0.0f, decay = 1.0f, crossing = from_start;
        GT_UNROLL
        for (int j = LEAF - 2; j >= 0; j--) {
            const bool is_pair = j < i - 1;
            decay *= is_pair ? d[j + 1] : 1.0f;
            term[j] = is_pair ? decay * lds<float>(C_element(me, leaf, i, j)) * x[j] : 0.0f;
            within += term[j];
        }
        GT_UNROLL
        for (int t = 0; t < LEAF - 1; t++) {
            dg[t] = fma_rn(t < i ? r : 0.0f, crossing, dg[t]);
            crossing += term[t];
        }
        const float dr = fma_rn(u * k, products.x, fma_rn(own.k(i - 1), products.y, from_start + within));
        if (p.tensors[OF_DR].data && i < own.tokens)
            Element<T>::store(row_of<T>(p, me, OF_DR, own.t0 + i), n, dr);
        du = fma_rn(products.x * r, k, du);
        decayed += own.h(i);
    }
    sts<float>(me.smem + C::DU + 4 * (leaf * C::CHANNELS + channel), du);
    const float all = slow_crossing(me, leaf, channel);
    GT_UNROLL
    for (int t = 0; t < LEAF; t++) {
        x[t] = own.r(t);
        dg[t] += all;
    }
    decayed = 0.0f;
    GT_NO_UNROLL
    for (int j = LEAF - 1; j >= 0; j--) { /* those that begin at j */
        const float k = own.k(j), to_end = ex2_approx(-decayed) * sum_at(C::Z, j);
        float within = 0.0f;
        GT_UNROLL
        for (int i = LEAF - 1; i >= 2; i--)
            if (i >= j + 2) within = fma_rn(lds<float>(C_element(me, leaf, i, j)), x[i], within) * d[i - 1];
        GT_UNROLL
        for (int t = 1; t < LEAF; t++) dg[t] = fma_rn(t > j ? k : 0.0f, to_end, dg[t]);
        const float dk = fma_rn(u * own.r(j), near(j).x, fma_rn(own.r(j + 1), near(j + 1).y, to_end + within));
        if (p.tensors[OF_DK].data && j < own.tokens)
            Element<T>::store(row_of<T>(p, me, OF_DK, own.t0 + j), n, dk);
        decayed += own.h(j);
    }
    if (!p.tensors[OF_DW].data) return;
    GT_UNROLL
    for (int t = 0; t < LEAF; t++) {
        /* h may be infinite where no decay is left */
        const float dw = d[t] == 0.0f ? 0.0f : p.raw ? -LN_2 * own.h(t) * dg[t] : dg[t];
        if (t < own.tokens) Element<W>::store(row_of<W>(p, me, OF_DW, own.t0 + t), n, dw);
    }
}

/* dv += (K . factor) G */
template <class C>
GT_DEV void add_from_G(const BackwardBlock<C>& me, LeafK<C>& left, float (&dv)[C::VALUE_TILES][4]) {
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

/* SUMS_A: A of leaf a > the warp's, with what the slices before add; false: others are to come. */
template <class C>
GT_DEV bool sum_pairs(const BackwardBlock<C>& me, int a, float (&A)[2][4]) {
    const uint32_t cells = me.smem + C::KEPT_A + 4 * LEAF * LEAF * (a * (a - 1) / 2 + me.leaf) + 16 * lane_id();
    const bool is_last = me.slice0 + C::CHANNELS == C::N;
    GT_UNROLL
    for (int e = 0; e < 2; e++) {
        if (me.slice0 > 0) {
            const float4 x = lds<float4>(cells + 512 * e);
            A[e][0] += x.x, A[e][1] += x.y, A[e][2] += x.z, A[e][3] += x.w;
        }
        if (!is_last) sts<float4>(cells + 512 * e, {A[e][0], A[e][1], A[e][2], A[e][3]});
    }
    return is_last;
}

/* What the slice's channels add to dv of the leaf: rows g and g + 8 are tokens 2g and 2g + 1. */
template <class C, bool SLOW>
GT_DEV void add_slice_dv(const BackwardParams& p, const BackwardBlock<C>& me, float (&dv)[C::VALUE_TILES][4]) {
    const int b = me.leaf;
    const uint32_t row = me.smem + C::K + cell_of<C>(LEAF / 2 * b + me.g, 2 * me.j);
    LeafK<C> left;
    float A[2][4];
    GT_UNROLL
    for (int kk = 0; kk < C::TILES; kk++) {
        const float4 cell = lds<float4>(add_8(row, kk));
        left.K[kk][0] = cell.x, left.K[kk][1] = cell.z, left.K[kk][2] = cell.y, left.K[kk][3] = cell.w;
    }
    if constexpr (SLOW) {
        slow_pairs<C>(p, me, A);
    } else {
        left.set_factor(TF32_MEAN);
        left.multiply_factor(me, C::GROWTH + 4 * b * C::CHANNELS);
        pair_products<C>(me, left, b, A);
    }
    set_bonus<C>(me, A);
    add_dv<C>(me, A, b, dv);
    left.set_factor(TF32_MEAN);
    for (int a = b + 1; a < LEAVES; a++) {
        pair_products<C>(me, left, a, A);
        if (!C::SUMS_A || sum_pairs<C>(me, a, A)) add_dv<C>(me, A, a, dv);
        left.multiply_factor(me, C::E + 4 * a * C::CHANNELS);
    }
    if constexpr (C::ROUNDED) left.multiply_factor(me, C::G_SCALE);
    add_from_G<C>(me, left, dv);
}

template <class C>
GT_DEV void store_dv(const BackwardParams& p, const BackwardBlock<C>& me,
                     const float (&dv)[C::VALUE_TILES][4]) {
    const int tokens = me.tokens();
    GT_UNROLL
    for (int half = 0; half < 2; half++) {
        const int t = LEAF * me.leaf + 2 * me.g + half;
        if (!p.tensors[OF_DV].data || t >= tokens) continue;
        typename C::T* to = row_of<typename C::T>(p, me, OF_DV, t) + 2 * me.j;
        GT_UNROLL
        for (int i = 0; i < C::VALUE_TILES; i++)
            stg<uint32_t>(to + 8 * i, Element<typename C::T>::pack(dv[i][2 * half], dv[i][2 * half + 1]));
    }
}

/* ---- the products of fp32 activations ----------------------------------------------------------------------
 * Every product is three, as in forward (SPLIT), made from operands that are split as they are read.  What differs
 * from 16 bits:
 *   - X and Z lie tokens by channels: states, tokens, R and K are right operands there, and left ones where dv is
 *     made (values by tokens), so that each is read in the order of its registers.  C is made once, by the warps of
 *     X, and kept for Z, which wants its transpose: a cell of two tokens by two serves both.
 *   - G comes to where S was, as soon as that is read; rowsum(S . G) is made here.
 *   - r, k, w are read from memory again in the end.
 *   - loops stay loops where registers allow: unrolled, the code exceeds the instruction cache (44 % of the
 *     samples waited for it).
 * rows and columns in products of 16 (two steps of 8): row g and g + 8 are tokens (values) 2g and 2g + 1; inner
 *     indices j and j + 4 are neighbours.  Tiles 2m and 2m + 1 of X and Z have the even and the odd channels from
 *     16m on: a lane has 4 neighbours, 4j.. of 16.
 * shared, N = 64: R, K 32 KB, v, dy 32 KB, S and then G 16 KB, C 10 KB, vectors 9 KB: 98 KB.
 * tensor cores per leaf, N = 64: 3 x (64 + 64 S dy, G v; 40 C; 80 X, Z; 40 A; 40 + 64 dv) m16n8k8.
 * bytes: as above at 4 bytes each, r, k, w and G once more from L2: 3.3 KB per token and head. */
template <int COUNT>
struct Split {
    float part[COUNT], rest[COUNT]; /* what the tensor core takes, what that leaves */

    GT_METHOD void set(int i, float x) {
        part[i] = tf32_part(x);
        rest[i] = x - part[i];
    }
    GT_METHOD void set4(int i, float4 x) {
        set(i, x.x), set(i + 1, x.y), set(i + 2, x.z), set(i + 3, x.w);
    }

    /* The same of numbers that are not in the order of registers: made by arithmetic, or the compiler moves x to
     * its place for every product, since it knows what the tensor core drops. */
    GT_METHOD void reorder4(int i, float4 x) {
        set4(i, x);
        part[i] = x.x - rest[i], part[i + 1] = x.y - rest[i + 1];
        part[i + 2] = x.z - rest[i + 2], part[i + 3] = x.w - rest[i + 3];
    }
};

/* Operands of two steps of 8: [4 step + e], [2 step + e]. */
using SplitLeft = Split<8>;
using SplitRight = Split<4>;

/* sum = a b.  The small products first: tensor cores cut a sum off at the size that it has. */
GT_DEV void mma_16(float (&sum)[4], const SplitLeft& a, const SplitRight& b) {
    const auto add = [&](const float (&x)[8], const float (&y)[4]) {
        GT_UNROLL
        for (int s = 0; s < 2; s++) {
            const float left[4] = {x[4 * s], x[4 * s + 1], x[4 * s + 2], x[4 * s + 3]};
            mma_tf32(sum, left, y[2 * s], y[2 * s + 1]);
        }
    };
    GT_UNROLL
    for (int e = 0; e < 4; e++) sum[e] = 0.0f;
    add(a.rest, b.part);
    add(a.part, b.rest);
    add(a.part, b.part);
}

/* c += a b */
GT_DEV void add_mma_16(float (&c)[4], const SplitLeft& a, const SplitRight& b) {
    float sum[4];
    mma_16(sum, a, b);
    GT_UNROLL
    for (int e = 0; e < 4; e++) c[e] += sum[e];
}

/* Two neighbouring rows as left operand of 16 kk.., a lane's 4 in a row; first: the lane's piece of 16 bytes. */
GT_DEV void load_two_rows(uint32_t row0, uint32_t row1, SplitLeft& a) {
    const float4 x = lds<float4>(row0), y = lds<float4>(row1);
    a.reorder4(0, {x.x, y.x, x.y, y.y});
    a.reorder4(4, {x.z, y.z, x.w, y.w});
}

/* X or Z of a leaf. */
template <class C>
struct RowSums {
    float tile[C::GROUPS][2][4];
};

/* sum = the warp's tokens at `from` times the state's slice */
template <class C>
GT_DEV void rows_times_state(const BackwardBlock<C>& me, int from, RowSums<C>& sum) {
    const int swap0 = 16 * (me.j ^ fp32_swap(2 * me.g)), swap1 = 16 * (me.j ^ fp32_swap(2 * me.g + 1));
    const uint32_t tokens = me.smem + from + 4 * C::N * (LEAF * me.leaf + 2 * me.g);
    const uint32_t state = me.smem + C::S + 4 * C::N * 2 * me.g;
    sum = {};
    GT_NO_UNROLL
    for (int kk = 0; kk < C::N / 16; kk++) {
        const int even = swap0 ^ 64 * kk, odd = 4 * C::N + (swap1 ^ 64 * kk);
        SplitLeft a;
        load_two_rows(tokens + even, tokens + odd, a);
        GT_UNROLL
        for (int m = 0; m < C::GROUPS; m++) {
            GT_UNROLL
            for (int e = 0; e < 2; e++) {
                SplitRight b;
                b.set4(0, lds<float4>(state + (e ? odd : even) + 64 * C::N * m));
                add_mma_16(sum.tile[m][e], a, b);
            }
        }
    }
}

/* c = products of dy of the warp's tokens with v of those of another leaf: tile e, column c is token 8e + c. */
template <class C>
GT_DEV void row_products(const BackwardBlock<C>& me, int leaf, float (&c)[2][4]) {
    const int swap0 = 16 * (me.j ^ fp32_swap(2 * me.g)), swap1 = 16 * (me.j ^ fp32_swap(2 * me.g + 1));
    const uint32_t left = me.smem + C::DY + 4 * C::N * (LEAF * me.leaf + 2 * me.g);
    const uint32_t right = me.smem + C::VALUES + 4 * C::N * (LEAF * leaf + me.g);
    const int swap = 16 * (me.j ^ fp32_swap(me.g));
    GT_UNROLL
    for (int x = 0; x < 8; x++) c[x / 4][x % 4] = 0.0f;
    GT_NO_UNROLL
    for (int kk = 0; kk < C::N / 16; kk++) {
        SplitLeft a;
        load_two_rows(left + (swap0 ^ 64 * kk), left + 4 * C::N + (swap1 ^ 64 * kk), a);
        GT_UNROLL
        for (int e = 0; e < 2; e++) { /* 8 rows on, another swap */
            SplitRight b;
            b.set4(0, lds<float4>(right + 32 * C::N * e + (swap ^ 64 * e ^ 64 * kk)));
            add_mma_16(c[e], a, b);
        }
    }
}

/* sum = sum . E of the leaf + c times its rows of R or K */
template <class C>
GT_DEV void add_rows(const BackwardBlock<C>& me, const SplitLeft& c, int from, int leaf, RowSums<C>& sum) {
    const uint32_t rows = me.smem + from + cell_of<C>(LEAF / 2 * leaf + me.j, 2 * me.g);
    const uint32_t rows8 = me.smem + from + cell_of<C>(LEAF / 2 * leaf + 4 + me.j, 2 * me.g);
    GT_UNROLL
    for (int m = 0; m < C::GROUPS; m++) {
        const float4 E = lds<float4>(me.smem + C::E + 4 * (leaf * C::CHANNELS + 16 * m + 4 * me.j));
        const float4 x = lds<float4>(rows + 128 * m), y = lds<float4>(rows8 + 128 * m);
        GT_UNROLL
        for (int e = 0; e < 2; e++) {
            float added[4];
            SplitRight b;
            b.set4(0, e ? float4{x.z, x.w, y.z, y.w} : float4{x.x, x.y, y.x, y.y});
            mma_16(added, c, b);
            GT_UNROLL
            for (int i = 0; i < 4; i++) {
                const float scale = e ? (i % 2 ? E.w : E.y) : (i % 2 ? E.z : E.x);
                float& cell = sum.tile[m][e][i];
                cell = fma_rn(cell, scale, added[i]);
            }
        }
    }
}

/* store_leaf_sum() of these */
template <class C>
GT_DEV void store_leaf_rows(const BackwardBlock<C>& me, const RowSums<C>& sum, int of, int to) {
    constexpr int COUNT = 4 * C::GROUPS;
    const float carries = of == C::R && me.leaf == 0 && me.g == 0 ? 0.0f : 1.0f;
    float first[COUNT];
    GT_UNROLL
    for (int m = 0; m < C::GROUPS; m++) {
        GT_UNROLL
        for (int i = 0; i < 2; i++) { /* two channels */
            const float4 R = lds<float4>(me.smem + of +
                                         cell_of<C>(LEAF / 2 * me.leaf + me.g, 16 * m + 4 * me.j + 2 * i));
            const float(&x)[2][4] = sum.tile[m];
            first[4 * m + 2 * i] = fma_rn(R.y, x[0][2 + i], R.x * x[0][i] * carries);
            first[4 * m + 2 * i + 1] = fma_rn(R.w, x[1][2 + i], R.z * x[1][i] * carries);
        }
    }
    halve_sums<COUNT / 2>(first, 16);
    halve_sums<COUNT / 4>(first, 8);
    halve_sums<COUNT / 8>(first, 4);
    GT_UNROLL
    for (int x = 0; x < COUNT / 8; x++) {
        const int i = COUNT / 8 * (4 * (me.g / 4) + 2 * (me.g / 2 % 2) + me.g % 2) + x;
        sts<float>(me.smem + to + 4 * (16 * (i / 4) + 4 * me.j + i % 4), first[x]);
    }
}

/* Products as left operand, rows as they are. */
GT_DEV void split_products(const float (&c)[2][4], SplitLeft& a) {
    GT_UNROLL
    for (int e = 0; e < 2; e++) a.reorder4(4 * e, {c[e][0], c[e][2], c[e][1], c[e][3]});
}

/* make_X() of fp32; leaves C */
template <class C, bool SLOW>
GT_DEV void make_X_rows(const BackwardParams& p, const BackwardBlock<C>& me, RowSums<C>& X) {
    const int a = me.leaf;
    const bool corner = me.g == 0 && me.j == 3; /* has the first token's product with the one before */
    rows_times_state<C>(me, C::DY, X);
    mbarrier_arrive(me.smem + C::S_READ);
    store_leaf_rows<C>(me, X, C::R, C::FIRST + 4 * a * C::CHANNELS);
    mbarrier_wait(me.smem + C::S_READ, me.slice0 / C::CHANNELS % 2);
    constexpr int ROWS = C::CHANNELS / LEAVES;
    copy_state_rows<C>(me, G_rows<C>(p, me), ROWS * a, ROWS * (a + 1));
    cp_async_commit();
    if (a == 0 && corner) sts<float>(near_cell(me, 0) + 4, 0.0f);                        /* is in S */
    if (a == LEAVES - 1 && corner) sts<float2>(near_cell(me, CHECKPOINT), {0.0f, 0.0f}); /* in G */
    GT_NO_UNROLL
    for (int b = 0; b <= a; b++) {
        float c[2][4];
        row_products<C>(me, b, c);
        if (b == a) {
            GT_UNROLL
            for (int x = 0; x < 8; x++) {
                const int i = 2 * me.g + x % 4 / 2, j = 8 * (x / 4) + 2 * me.j + x % 2;
                float& cell = c[x / 4][x % 4];
                if (j == i || j + 1 == i) sts<float>(near_cell(me, LEAF * a + i) + (j == i ? 0 : 4), cell);
                if (j + 1 >= i) cell = 0.0f;
            }
        } else if (b == a - 1 && corner) {
            sts<float>(near_cell(me, LEAF * a) + 4, c[1][1]);
            c[1][1] = 0.0f;
        }
        GT_UNROLL
        for (int e = 0; e < 2; e++)
            sts<float4>(C_cell(me, a, b, me.g, 4 * e + me.j), {c[e][0], c[e][1], c[e][2], c[e][3]});
        if (SLOW && b == a) break;
        SplitLeft left;
        split_products(c, left);
        add_rows<C>(me, left, C::K, b, X);
        if (SLOW && b < a - 1) store_leaf_rows<C>(me, X, C::R, slow_ends<C>(b + 1, a));
    }
}

/* make_Z() of fp32 */
template <class C, bool SLOW>
GT_DEV void make_Z_rows(const BackwardBlock<C>& me, RowSums<C>& Z) {
    rows_times_state<C>(me, C::VALUES, Z);
    if (SLOW) store_leaf_rows<C>(me, Z, C::K, C::SLOW_BEGINS + 4 * me.leaf * C::CHANNELS);
    GT_NO_UNROLL
    for (int a = LEAVES - 1; a >= me.leaf + SLOW; a--) {
        SplitLeft left;
        left.set4(0, lds<float4>(C_cell(me, a, me.leaf, me.j, me.g)));
        left.set4(4, lds<float4>(C_cell(me, a, me.leaf, 4 + me.j, me.g)));
        add_rows<C>(me, left, C::R, a, Z);
    }
}

/* X or Z to shared memory, in the cells that finish_part() reads */
template <class C>
GT_DEV void store_rows(const BackwardBlock<C>& me, int to, const RowSums<C>& sum) {
    GT_UNROLL
    for (int m = 0; m < C::GROUPS; m++) {
        const float(&x)[2][4] = sum.tile[m];
        GT_UNROLL
        for (int i = 0; i < 2; i++)
            sts<float4>(me.smem + to + cell_of<C>(LEAF / 2 * me.leaf + me.g, 16 * m + 4 * me.j + 2 * i),
                        {x[0][i], x[0][2 + i], x[1][i], x[1][2 + i]});
    }
}

/* rowsum(S . G) of a slice, by the warps of dv, that have loaded G by then (N = 128: no registers hold so much). */
template <class C>
struct StateRows {
    static constexpr int ROWS = C::CHANNELS / 16; /* of a lane, 4 apart, which it shares with 7 others */
    static constexpr int PIECES = C::N / 32;
    static constexpr bool EARLY = C::N < 128;
    float4 G[ROWS][PIECES];

    GT_METHOD int row0(const BackwardBlock<C>& me) const { return C::CHANNELS / LEAVES * me.leaf + lane_id() / 8; }

    GT_METHOD void load(const BackwardParams& p, const BackwardBlock<C>& me) {
        const SliceRows<float> rows = G_rows<C>(p, me);
        const float* from = rows.data + row0(me) * (int64_t)rows.pitch + 4 * (lane_id() % 8);
        GT_UNROLL
        for (int i = 0; i < ROWS; i++) {
            GT_UNROLL
            for (int k = 0; k < PIECES; k++) G[i][k] = ldg<float4>(from + 32 * k);
            from += 4 * (int64_t)rows.pitch;
        }
    }

    GT_METHOD void sum(const BackwardBlock<C>& me) const {
        float sum[ROWS];
        GT_UNROLL
        for (int i = 0; i < ROWS; i++) {
            sum[i] = 0.0f;
            GT_UNROLL
            for (int k = 0; k < PIECES; k++) {
                const float4 x = G[i][k];
                const float4 y =
                    lds<float4>(me.smem + C::S + fp32_piece<C::N>(row0(me) + 4 * i, lane_id() % 8 + 8 * k));
                sum[i] = fma_rn(x.x, y.x, fma_rn(x.y, y.y, fma_rn(x.z, y.z, fma_rn(x.w, y.w, sum[i]))));
            }
        }
        int i = lane_id() >> 2 & 1;
        halve_sums<ROWS / 2>(sum, 4);
        if constexpr (ROWS == 4) {
            halve_sums<1>(sum, 2);
            i = 2 * i + (lane_id() >> 1 & 1);
        } else {
            sum[0] += shfl_xor(sum[0], 2);
        }
        sum[0] += shfl_xor(sum[0], 1);
        if (lane_id() % (8 / ROWS) == 0) sts<float>(me.smem + C::ROWSUM + 4 * (me.slice0 + row0(me) + 4 * i), sum[0]);
    }
};

/* dv += rows of dy or G, transposed, times b; rows: of the lane in both steps.  dv of the warp's leaf is values by
 * tokens: tile 2m + e, rows g and g + 8 are values 16m + 2g and the next, column c token 2c + e. */
template <class C>
GT_DEV void add_columns(const uint32_t (&rows)[4], const SplitRight (&b)[2], float (&dv)[C::VALUE_TILES][4]) {
    GT_UNROLL
    for (int m = 0; m < C::N / 16; m++) {
        SplitLeft a;
        GT_UNROLL
        for (int i = 0; i < 4; i++) {
            const float2 x = lds<float2>((rows[i] ^ 64 * (m % 2)) + 128 * (m / 2));
            a.set(2 * i, x.x), a.set(2 * i + 1, x.y);
        }
        add_mma_16(dv[2 * m], a, b[0]);
        add_mma_16(dv[2 * m + 1], a, b[1]);
    }
}

/* Where a lane's two values of a row are, of the first 16; of the next 16 this xor 64; and 128 for every 32. */
template <class C>
GT_DEV uint32_t column_address(const BackwardBlock<C>& me, int from, int row) {
    static_assert(C::DY % 128 == 0 && C::G % 128 == 0, "as smem_base() is");
    return me.smem + from + fp32_piece<C::N>(row, me.g / 2) + 8 * (me.g % 2);
}

/* The factors that R or K of other leaves is to be used with, one for each channel, by the warp's leaf. */
template <class C>
GT_DEV void set_factors(const BackwardBlock<C>& me, int by) {
    constexpr int COUNT = C::CHANNELS / 32;
    const uint32_t to = me.smem + C::DU + 4 * (me.leaf * C::CHANNELS + lane_id());
    sync_warp();
    GT_UNROLL
    for (int i = 0; i < COUNT; i++) {
        const float x = by < 0 ? 1.0f : lds<float>(to + 128 * i) * lds<float>(me.smem + by + 4 * (lane_id() + 32 * i));
        sts<float>(to + 128 * i, x);
    }
    sync_warp();
}

/* The slice's part of dv of the leaf b.  A^T = K_b (R_a . factors)^T: tile e, column c is token 2c + e of leaf a,
 * as column of K G^T of leaf b. */
template <class C, bool SLOW>
GT_DEV void add_dv_columns(const BackwardParams& p, const BackwardBlock<C>& me, float (&dv)[C::VALUE_TILES][4]) {
    const int b = me.leaf;
    const uint32_t K = me.smem + C::K + cell_of<C>(LEAF / 2 * b + me.g, 2 * me.j);
    const uint32_t factors = me.smem + C::DU + 4 * (b * C::CHANNELS + 2 * me.j);
    const auto scaled = [&](uint32_t cell, int kk) { /* channels 8 kk on */
        const float4 x = lds<float4>(add_8(cell, kk));
        const float2 f = lds<float2>(factors + 32 * kk);
        return float4{x.x * f.x, x.z * f.y, x.y * f.x, x.w * f.y}; /* by tokens */
    };
    set_factors<C>(me, -1);
    GT_NO_UNROLL
    for (int a = b; a < LEAVES; a++) {
        const uint32_t R = me.smem + C::R + cell_of<C>(LEAF / 2 * a + me.g, 2 * me.j);
        float A[2][4] = {};
        const bool runs = SLOW && a == b; /* running products */
        if (runs) {
            slow_pairs<C>(p, me, A);
        } else if (a == b) {
            set_factors<C>(me, C::GROWTH + 4 * b * C::CHANNELS);
        } else if (a == b + 1) {
            set_factors<C>(me, -1);
        } else {
            set_factors<C>(me, C::E + 4 * (a - 1) * C::CHANNELS);
        }
        GT_NO_UNROLL
        for (int kk = 0; kk < C::TILES && !runs; kk += 2) {
            SplitLeft left;
            SplitRight right[2];
            left.set4(0, lds<float4>(add_8(K, kk)));
            left.set4(4, lds<float4>(add_8(K, kk + 1)));
            const float4 x = scaled(R, kk), y = scaled(R, kk + 1);
            right[0].set4(0, {x.x, x.y, y.x, y.y});
            right[1].set4(0, {x.z, x.w, y.z, y.w});
            add_mma_16(A[0], left, right[0]);
            add_mma_16(A[1], left, right[1]);
        }
        if (a == b) set_bonus<C>(me, A);
        /* inner index: tokens 4j + e and 4j + 2 + e of tile e */
        SplitRight right[2];
        GT_UNROLL
        for (int x = 0; x < 8; x++) right[x / 4].set(x % 4, A[x % 4 / 2][x / 4 * 2 + x % 2]);
        const int t = LEAF * a + 4 * me.j;
        const uint32_t rows[4] = {column_address<C>(me, C::DY, t), column_address<C>(me, C::DY, t + 2),
                                  column_address<C>(me, C::DY, t + 1), column_address<C>(me, C::DY, t + 3)};
        add_columns<C>(rows, right, dv);
    }
    set_factors<C>(me, b == LEAVES - 1 ? -1 : C::E + 4 * (LEAVES - 1) * C::CHANNELS);
    mbarrier_wait(me.smem + C::G_HERE, me.slice0 / C::CHANNELS % 2);
    GT_NO_UNROLL
    for (int kk = 0; kk < C::TILES; kk += 2) {
        const int n = 8 * kk + 2 * me.j;
        const float4 x = scaled(K, kk), y = scaled(K, kk + 1);
        SplitRight right[2];
        right[0].set4(0, {x.x, x.y, y.x, y.y});
        right[1].set4(0, {x.z, x.w, y.z, y.w});
        const uint32_t rows[4] = {column_address<C>(me, C::G, n), column_address<C>(me, C::G, n + 1),
                                  column_address<C>(me, C::G, n + 8), column_address<C>(me, C::G, n + 9)};
        add_columns<C>(rows, right, dv);
    }
}

template <class C>
GT_DEV void store_dv_columns(const BackwardParams& p, const BackwardBlock<C>& me,
                             const float (&dv)[C::VALUE_TILES][4]) {
    const int tokens = me.tokens();
    GT_UNROLL
    for (int x = 0; x < 4; x++) {
        const int e = x / 2, c = x % 2, t = LEAF * me.leaf + 2 * (2 * me.j + c) + e;
        if (!p.tensors[OF_DV].data || t >= tokens) continue;
        float* to = row_of<float>(p, me, OF_DV, t) + 2 * me.g;
        GT_UNROLL
        for (int m = 0; m < C::N / 16; m++)
            stg<float2>(to + 16 * m, {dv[2 * m + e][c], dv[2 * m + e][2 + c]});
    }
}

template <class C, bool SLOW>
GT_DEV void fp32_products(const BackwardParams& p, const BackwardBlock<C>& me, StateRows<C>& states,
                          float (&dv)[C::VALUE_TILES][4]) {
    const int slice = me.slice0 / C::CHANNELS;
    if (me.makes_dv()) {
        if (!states.EARLY || SLOW) states.load(p, me);
        states.sum(me);
        mbarrier_arrive(me.smem + C::S_READ);
        if (p.tensors[OF_DV].data) add_dv_columns<C, SLOW>(p, me, dv);
        if (slice + 1 == C::SLICES) store_dv_columns<C>(p, me, dv);
        sync_threads();
    } else {
        RowSums<C> X, Z;
        make_X_rows<C, SLOW>(p, me, X);
        cp_async_wait<0>();
        mbarrier_arrive(me.smem + C::G_HERE);
        mbarrier_wait(me.smem + C::G_HERE, slice % 2);
        make_Z_rows<C, SLOW>(me, Z);
        sync_threads(); /* v, dy, G are read */
        store_rows<C>(me, C::X, X);
        store_rows<C>(me, C::Z, Z);
    }
}

/* du of the slice, once its leaves have left theirs. */
template <class C>
GT_DEV void store_du(const BackwardParams& p, const BackwardBlock<C>& me) {
    if (!p.du || thread_id() >= C::CHANNELS) return;
    float x = 0.0f;
    for (int a = 0; a < LEAVES; a++) x += lds<float>(me.smem + C::DU + 4 * (a * C::CHANNELS + thread_id()));
    p.du[(int64_t)lds<int>(me.smem + C::DU_ROW) * C::N + me.slice0 + thread_id()] = x;
}

/* The thread's part of dr, dk, dw and du, from X and Z of the slice. */
template <class C>
GT_DEV void finish_part(const BackwardParams& p, const BackwardBlock<C>& me, const ChannelPart<C>& own,
                        const RawPart<C>& raw, const typename ChannelPart<C>::Decays& w) {
    using T = typename C::T;
    using W = typename C::W;
    using Raw = Pair<T>;
    constexpr int PART = C::PART;
    const int left = me.tokens() - own.t0, n = me.slice0 + own.channel;
    const uint32_t leaf_cell = me.smem + 4 * (own.leaf * C::CHANNELS + own.channel);
    const float2 growth = lds<float2>(leaf_cell + C::GROWTH);
    const float2 u = lds<float2>(me.smem + C::U + 4 * (me.slice0 + own.channel));
    float h[PART][2], c[2], total[2];
    own.decays(p, w, h, c, total);
    float to_end[2] = {total[0] - c[0], total[1] - c[1]};
    T* dr_row = row_of<T>(p, me, OF_DR, own.t0) + n;
    T* dk_row = row_of<T>(p, me, OF_DK, own.t0) + n;
    const int left_dr = p.tensors[OF_DR].data ? left : 0, left_dk = p.tensors[OF_DK].data ? left : 0;
    Raw k_before = raw.k(-1), r = raw.r(0);
    float2 near = lds<float2>(near_cell(me, own.t0));
    float2 dg[PART], sum = {0.0f, 0.0f}, du = {0.0f, 0.0f}; /* dg: over 2^c_16, less what the parts before add */
    GT_UNROLL
    for (int i = 0; i < PART; i += 2) {
        const uint32_t cell = me.smem + cell_of<C>((own.t0 + i) / 2, own.channel);
        const float4 R2 = lds<float4>(cell + C::R), K2 = lds<float4>(cell + C::K);
        const float4 X2 = lds<float4>(cell + C::X), Z2 = lds<float4>(cell + C::Z);
        GT_UNROLL
        for (int e = 0; e < 2; e++) {
            const int t = own.t0 + i + e;
            const auto rows = [=](float4 x) { return e ? float2{x.z, x.w} : float2{x.x, x.y}; };
            const auto columns = [=](float4 x) { return e ? float2{x.y, x.w} : float2{x.x, x.z}; };
            const float2 R = C::SPLIT ? columns(R2) : rows(R2), K = C::SPLIT ? columns(K2) : rows(K2);
            const float2 X = columns(X2), Z = columns(Z2);
            const Raw k = raw.k(i + e), r_next = raw.r(i + e + 1);
            const float2 next = lds<float2>(near_cell(me, t + 1)); /* for the last: its second is 0 */
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
            dr_row += (int)p.tensors[OF_DR].at.t;
            dk_row += (int)p.tensors[OF_DK].at.t;
            du.x = fma_rn(r.lo(), k_near.x, du.x);
            du.y = fma_rn(r.hi(), k_near.y, du.y);
            if (t > 0) { /* what ends here leaves */
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
    float2 before = {0.0f, 0.0f}; /* sum of the leaf's parts before; `sum`: and this */
    for (int bit = C::LANES; bit < 32; bit *= 2) {
        du.x += shfl_xor(du.x, bit);
        du.y += shfl_xor(du.y, bit);
        const float2 x = {shfl_up(sum.x, bit), shfl_up(sum.y, bit)};
        if (lane_id() < bit) continue;
        sum = {sum.x + x.x, sum.y + x.y};
        before = {before.x + x.x, before.y + x.y};
    }
    if (own.part == 0) sts<float2>(leaf_cell + C::DU, du);
    if (own.part == C::LEAF_PARTS - 1) sts<float2>(leaf_cell + C::LEAF_SUMS, sum);
    float2 sums[C::SUMS] = {};
    GT_UNROLL
    for (int i = 0; i < C::SUM_PARTS; i++) {
        const float2 x = rowsum_part<float2>(me, i, own.channel);
        sums[i / C::ROWSUM_PARTS].x += x.x;
        sums[i / C::ROWSUM_PARTS].y += x.y;
    }
    float2 first = sums[0], decay = {1.0f, 1.0f}; /* first: dg of the chunk's first token, then of the part's */
    GT_UNROLL
    for (int a = LEAVES - 1; a >= 0; a--) { /* Horner from the last leaf */
        const uint32_t cell = me.smem + 4 * (a * C::CHANNELS + own.channel);
        const float2 E = lds<float2>(cell + C::E), x = lds<float2>(cell + C::FIRST);
        first.x = fma_rn(first.x, E.x, x.x);
        first.y = fma_rn(first.y, E.y, x.y);
        decay = {decay.x * E.x, decay.y * E.y};
    }
    float2 end; /* what dg of the chunk's end is beyond what the leaves will have summed */
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
    for (int a = 0; a < (C::KEEPS_BF16 ? LEAVES : LEAVES - 1); a++) {
        const float2 x = lds<float2>(me.smem + 4 * (a * C::CHANNELS + own.channel) + C::LEAF_SUMS);
        if (C::KEEPS_BF16) end = {end.x - x.x, end.y - x.y};
        if (a < own.leaf) first = {first.x + x.x, first.y + x.y};
    }
    if (C::KEEPS_BF16) first = {fma_rn(decay.x, end.x, first.x), fma_rn(decay.y, end.y, first.y)};
    W* row = row_of<W>(p, me, OF_DW, own.t0) + n;
    const float unit = p.raw ? -LN_2 : 1.0f; /* raw: log2 d = -h, and h is its own derivative by w */
    first = {unit * first.x, unit * first.y};
    const float2 scale = {unit * growth.x, unit * growth.y};
    GT_UNROLL
    for (int i = 0; i < PART; i++) {
        float2 dw = {fma_rn(dg[i].x, scale.x, first.x), fma_rn(dg[i].y, scale.y, first.y)};
        if (p.raw) dw = {dw.x * h[i][0], dw.y * h[i][1]};
        Vec<W, 2> packed;
        packed.set({dw.x, dw.y});
        if (i < left) stg<Vec<W, 2>>(row, packed);
        row += (int)p.tensors[OF_DW].at.t;
    }
}

/* dv of the slice; X and Z of it in shared memory, for which the caller waits. */
template <class C, bool SLOW>
GT_DEV void make_products(const BackwardParams& p, const BackwardBlock<C>& me, StateRows<C>& states,
                          float (&dv)[C::VALUE_TILES][4]) {
    if constexpr (C::SPLIT) {
        fp32_products<C, SLOW>(p, me, states, dv);
    } else if (me.makes_dv()) {
        if (p.tensors[OF_DV].data) add_slice_dv<C, SLOW>(p, me, dv);
        if (me.slice0 + C::CHANNELS == C::N) store_dv<C>(p, me, dv);
        sync_threads();
    } else {
        Sums<C> X, Z;
        make_X<C, SLOW>(me, X);
        make_Z<C, SLOW>(me, Z);
        sync_threads(); /* v, dy, S, G are read */
        store_sums<C>(me, C::X, X);
        store_sums<C>(me, C::Z, Z);
    }
}

/* dv of the warp's leaf, over the slices; of one slice it is not kept. */
template <class C, bool KEPT = (C::SLICES > 1)>
struct ChunkValues {
    float dv[C::VALUE_TILES][4];
};
template <class C>
struct ChunkValues<C, false> {};

template <class C, bool SLOW>
GT_DEV void make_slice(const BackwardParams& p, const BackwardBlock<C>& me, StateRows<C>& states,
                       ChunkValues<C>& values) {
    if constexpr (C::SLICES > 1) {
        make_products<C, SLOW>(p, me, states, values.dv);
    } else {
        ChunkValues<C, true> own = {};
        make_products<C, SLOW>(p, me, states, own.dv);
    }
}

/* All of a slice in the slow form.  A function of its own, so that it takes no registers from the usual one. */
template <class C>
GT_DEV_CALL ChunkValues<C> slow_slice(const BackwardParams& p, BackwardBlock<C> me, ChunkValues<C> values) {
    constexpr int TOGETHER = C::THREADS / C::CHANNELS; /* leaves; N = 32 has threads to spare */
    const int first = thread_id() / C::CHANNELS, channel = thread_id() % C::CHANNELS;
    StateRows<C> states;
    GT_NO_UNROLL
    for (int leaf = first; leaf < LEAVES; leaf += TOGETHER) prepare_slow_column<C>(p, me, leaf, channel);
    sync_threads();
    make_slice<C, true>(p, me, states, values);
    sync_threads();
    GT_NO_UNROLL
    for (int leaf = first; leaf < LEAVES; leaf += TOGETHER) finish_slow_column<C>(p, me, leaf, channel);
    sync_threads();
    store_du<C>(p, me);
    return values;
}

template <class C>
GT_KERNEL(C::THREADS, C::BLOCKS)
backward_tensor_kernel(const GT_GRID_CONSTANT BackwardParams p) {
#if GT_SM80_KERNELS
    if (C::SPLIT) wait_for_chain(); /* else where S and G are read */
    BackwardBlock<C> me;
    ChannelPart<C> own;
    me.smem = smem_base();
    me.leaf = me.leaf_of_warp();
    me.g = lane_id() / 4;
    me.j = lane_id() % 4;
    own.place();
    if (C::SPLIT && thread_id() == 0) {
        mbarrier_init(me.smem + C::S_READ, C::THREADS);
        mbarrier_init(me.smem + C::G_HERE, C::THREADS / 2);
    }

    ChunkValues<C> values = {};
    for (me.slice0 = 0; me.slice0 < C::N; me.slice0 += C::CHANNELS) {
        typename ChannelPart<C>::Decays w;
        StateRows<C> states;
        {
            const ChunkPlace here = find_chunk<C>(p);
            if (here.chunk.sequence < 0) { /* if all do so, those after them still come after those before */
                wait_for_chain();
                return;
            }
            me.index = here.index, me.G_index = here.G_index;
            if constexpr (C::SPLIT) { /* r, k, w in registers, while the rest is copied */
                const int left = here.tokens() - own.t0;
                const auto row = [&](int tensor) {
                    return global_row<float>(p, here, tensor, own.t0) + me.slice0 + own.channel;
                };
                own.load_rows(p, row(OF_W), left, w);
                const RawPart<C> raw(p, own, left, row(OF_R), row(OF_K));
                copy_fp32_inputs<C>(p, me, here);
                sync_threads(); /* u */
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
        if constexpr (!C::SPLIT) {
            cp_async_wait<1>();
            sync_threads(); /* r, k, w are there, and where the chunk is */
            own.load(p, me, w);
            prepare_part<C>(p, me, own, RawPart<C>(p, me, own), w);
        }
        cp_async_wait<0>();
        sync_threads();
        const uint4 x = lds<uint4>(me.smem + C::SLOW), y = lds<uint4>(me.smem + C::SLOW + 16);
        if (x.x | x.y | x.z | x.w | y.x | y.y | y.z | y.w) {
            values = slow_slice<C>(p, me, values);
            continue;
        }
        make_slice<C, false>(p, me, states, values);
        own.load(p, me, w);
        const RawPart<C> raw(p, me, own);
        sync_threads();
        finish_part<C>(p, me, own, raw, w);
    }
#else
    (void)p;
    __trap();
#endif
}

/* ---- what no packed sequence has ---------------------------------------------------------------------------
 * Zeros in the outputs of tokens from cu_seqlens[*seq_count] on; and in what sums are taken of: the states
 * of unused sequences, and all places of chunks, before those that are used are written.
 * grid fixed, block 8 warps; a warp takes rows of a token and head in turn.  bytes: the zeros. */
struct ClearParams {
    struct Output {
        void* data;
        gt_stride at;
        gt_dtype dtype;
        int size;
    } outputs[4];
    int count;
    Packing packing;
    int64_t T, H;
    float* states; /* [capacity,state_size] or NULL */
    int64_t state_size;
    float* du; /* [places,H,N] or NULL */
    int64_t places, N;
};

GT_KERNEL(256, 1) clear_rest_kernel(const GT_GRID_CONSTANT ClearParams p) {
    wait_for_chain();
    const int64_t sequences = sequence_count(p.packing), first = p.packing.cu_seqlens[sequences];
    const int64_t rows = (p.T - first) * p.H;
    const int64_t thread = (int64_t)block_x() * 256 + thread_id(), threads = (int64_t)grid_x() * 256;
    for (int64_t row = thread / 32; row < rows; row += threads / 32) {
        for (int i = 0; i < p.count; i++) {
            const ClearParams::Output& x = p.outputs[i];
            const int64_t start = at(x.at, 0, first + row / p.H, row % p.H);
            for (int n = lane_id(); n < x.size; n += 32) store_as(x.data, x.dtype, start + n, 0.0f);
        }
    }
    for (int64_t i = thread; p.du && i < p.H * p.places * p.N; i += threads) p.du[i] = 0.0f;
    int64_t i = sequences * p.state_size + thread;
    for (; p.states && i < p.packing.capacity * p.state_size; i += threads) p.states[i] = 0.0f;
}

/* ---- launchers -------------------------------------------------------------------------------------------- */

static inline Packing packing_of(const gt_wkv6_args& a) {
    return {a.cu_seqlens, a.seq_count, a.seq_capacity};
}

/* Sequences that there may be, and places for the chunks of a head. */
static inline int64_t sequences_of(const gt_wkv6_args& a) {
    return a.seq_capacity ? a.seq_capacity : a.B;
}

static inline int64_t places_of(const gt_wkv6_args& a) {
    return a.seq_capacity ? gt_chunk_places(a.T, a.seq_capacity, CHECKPOINT)
                          : (a.T + CHECKPOINT - 1) / CHECKPOINT;
}

static inline Problem problem_of(const gt_wkv6_args& a) {
    Problem in = {};
    in.B = a.B, in.T = a.T, in.H = a.H;
    in.N = (int)a.N, in.V = (int)a.V;
    in.dtype = a.dtype, in.w_dtype = a.w_dtype, in.decay = a.decay;
    in.r = a.r, in.k = a.k, in.w = a.w, in.v = a.v, in.dy = a.dy;
    in.u = a.u;
    in.sequences = sequences_of(a), in.packing = packing_of(a);
    in.r_at = a.r_stride, in.k_at = a.k_stride, in.w_at = a.w_stride, in.v_at = a.v_stride;
    in.dy_at = a.dy_stride;
    return in;
}

static inline void add_output(ClearParams& p, void* data, gt_stride at_, gt_dtype dtype, int64_t size) {
    if (data) p.outputs[p.count++] = {data, at_, dtype, (int)size};
}

static inline gt_status clear_rest(const gt_wkv6_args& a, ClearParams p, const Device& device,
                                   Chain& stream) {
    if (a.seq_capacity == 0 || (p.count == 0 && !p.states && !p.du)) return GT_OK;
    p.packing = packing_of(a);
    p.T = a.T, p.H = a.H, p.N = a.N;
    p.places = places_of(a);
    p.state_size = a.H * a.N * a.V;
    return run("wkv6 clear_rest_kernel", clear_rest_kernel, 2 * device.multiprocessors, 256, 0, stream,
               p);
}

template <int SLICES, bool REVERSE>
static gt_status launch_tokens_with(ForwardParams p, Chain& stream) {
    using C = ForwardTraits<SLICES>;
    p.tiles = (p.in.V + C::COLUMNS - 1) / C::COLUMNS;
    return run("wkv6 token_kernel", token_kernel<SLICES, REVERSE>, p.in.sequences * p.in.H * p.tiles,
               C::THREADS, C::SMEM, stream, p);
}

template <bool REVERSE>
static gt_status launch_tokens(const ForwardParams& p, Chain& stream) {
    if (p.in.N <= 32) return launch_tokens_with<1, REVERSE>(p, stream);
    if (p.in.N <= 64) return launch_tokens_with<2, REVERSE>(p, stream);
    if (p.in.N <= 128) return launch_tokens_with<4, REVERSE>(p, stream);
    return launch_tokens_with<8, REVERSE>(p, stream);
}

/* Whether rows of a tensor start at multiples of `bytes`, and a leaf spans less than 2^31 bytes. */
static inline bool aligned(const void* data, gt_stride at, int element, int bytes) {
    const int64_t n = bytes / element;
    return (uintptr_t)data % (uintptr_t)bytes == 0 && at.b % n == 0 && at.t % n == 0 &&
           at.h % n == 0 && at.t < (int64_t)1 << 24;
}

static inline int size_of(gt_dtype dtype) { return dtype == GT_F32 ? 4 : 2; }

static inline bool fits_tensor_cores(const gt_wkv6_args& a, const Device& device) {
    const int size = size_of(a.dtype);
    const bool has_room = a.dtype != GT_F32 || a.N < 128 ||
                          device.shared_bytes >= TensorTraits<float, float, 128>::SMEM;
    return device.compute_capability >= 80 && has_room && a.N == a.V && a.T < INT32_MAX / 2 &&
           (a.N == 32 || a.N == 64 || a.N == 128) && aligned(a.r, a.r_stride, size, 16) &&
           aligned(a.k, a.k_stride, size, 16) &&
           aligned(a.w, a.w_stride, size_of(a.w_dtype), 16) && aligned(a.v, a.v_stride, size, 16);
}

static inline bool forward_fits(const gt_wkv6_args& a, const Device& device) {
    return fits_tensor_cores(a, device) && aligned(a.y, a.y_stride, size_of(a.dtype), 16) &&
           (uintptr_t)a.state_out % 16 == 0;
}

/* N = 128: channels of a slice of a chunk, by the shared memory that a block may have; 0: there is no kernel. */
static inline int slice_channels(gt_dtype dtype, const Device& device) {
    if (dtype == GT_BF16 && device.shared_bytes >= HOPPER_KB * 1024) return 128;
    if (device.shared_bytes >= AMPERE_KB * 1024) return 64;
    return dtype == GT_F32 ? 0 : 32;
}

/* Sweep and chunks. */
static inline bool backward_fits(const gt_wkv6_args& a, const Device& device) {
    const int size = size_of(a.dtype), w_size = size_of(a.w_dtype);
    return fits_tensor_cores(a, device) && (a.N < 128 || slice_channels(a.dtype, device) > 0) &&
           aligned(a.dy, a.dy_stride, size, 16) && (uintptr_t)a.dstate_in % 16 == 0 &&
           aligned(a.dv, a.dv_stride, size, 2 * size) && aligned(a.dr, a.dr_stride, size, 8) &&
           aligned(a.dk, a.dk_stride, size, 8) && aligned(a.dw, a.dw_stride, w_size, 2 * w_size) &&
           (uintptr_t)a.u % 16 == 0;
}

template <bool REVERSE, class T, class W, int N>
static gt_status launch_tensor_with(TensorParams p, Chain& stream) {
    using C = TensorTraits<T, W, N>;
    using States = StatesTraits<T, W, N>;
    const int64_t items = p.in.sequences * p.in.H * p.segments.count;
    const int64_t blocks = (items + C::HEADS - 1) / C::HEADS;
    if (items > INT32_MAX)
        return gt_fail(GT_ERROR_SIZE, "%lld segments of heads: at most %d", (long long)items, INT32_MAX);
    p.by_segments = divide_by(p.segments.count), p.by_H = divide_by((int)p.in.H);
    if constexpr (REVERSE && N == 128 && C::KEEPS_BF16) {
        using OneCopy = TensorTraits<T, W, N, true, 1>;
        if (p.S_copies == 1)
            return run("wkv6 states_tensor_kernel", states_tensor_kernel<OneCopy, REVERSE>, blocks, OneCopy::THREADS,
                       OneCopy::SMEM + (p.rowsums ? OneCopy::S_BYTES : 0), stream, p);
    }
    if (REVERSE || !p.y)
        return run("wkv6 states_tensor_kernel", states_tensor_kernel<States, REVERSE>, blocks,
                   States::THREADS, States::SMEM + (p.rowsums ? States::S_BYTES : 0), stream, p);
    if constexpr (!REVERSE && N == 128 && !C::SPLIT) {
        using Hopper = HopperTraits<T, W>;
        static Answers known = {};
        void (*const kernel)(TensorParams) = forward_hopper_kernel<Hopper>;
        if (has_sm90a(reinterpret_cast<const void*>(kernel), Hopper::THREADS, known))
            return run("wkv6 forward_hopper_kernel", kernel, blocks, Hopper::THREADS, Hopper::SMEM, stream, p);
    }
    return run("wkv6 forward_tensor_kernel", forward_tensor_kernel<C>, blocks, C::THREADS, C::SMEM,
               stream, p);
}

template <bool REVERSE, class T, class W>
static gt_status launch_tensor_of(const TensorParams& p, Chain& stream) {
    if (p.in.N == 32) return launch_tensor_with<REVERSE, T, W, 32>(p, stream);
    if (p.in.N == 64) return launch_tensor_with<REVERSE, T, W, 64>(p, stream);
    return launch_tensor_with<REVERSE, T, W, 128>(p, stream);
}

template <bool REVERSE>
static gt_status launch_tensor_once(const TensorParams& p, Chain& stream) {
    const bool w_is_float = p.in.w_dtype == GT_F32;
    if (p.in.dtype == GT_F32) return launch_tensor_of<REVERSE, float, float>(p, stream);
    if (p.in.dtype == GT_BF16)
        return w_is_float ? launch_tensor_of<REVERSE, bf16, float>(p, stream)
                          : launch_tensor_of<REVERSE, bf16, bf16>(p, stream);
    return w_is_float ? launch_tensor_of<REVERSE, f16, float>(p, stream)
                      : launch_tensor_of<REVERSE, f16, f16>(p, stream);
}

/* How T tokens of every sequence are cut: from sizes and device, or as the caller wishes. */
static inline Segments cut_time(const gt_wkv6_args& a, const Device& device, int64_t T) {
    constexpr int LEAST = 4 * CHECKPOINT; /* tokens of a segment that are worth a block */
    const int64_t heads = sequences_of(a) * a.H, blocks = a.N == 32 ? (heads + 1) / 2 : heads;
    const int64_t room = (a.N == 128 ? 1 : 2) * (int64_t)device.multiprocessors;
    int64_t count = a.segments;
    if (count == 0) {
        count = blocks > 0 ? room / blocks : 1;
        if (count > T / LEAST) count = T / LEAST;
    }
    const int64_t most = (T + CHECKPOINT - 1) / CHECKPOINT;
    if (count > most) count = most;
    if (count < 1) count = 1;
    const Segments cut = cut_tokens((int)T, (int)count);
    /* packed sequences are cut by the number wished for: it stands for that of any length */
    return a.seq_capacity ? Segments{(int)count, cut.tokens} : cut;
}

/* Workspace of a walk in segments. */
static inline void take_segments(Arena& arena, const gt_wkv6_args& a, const Segments& cut,
                                 float** states, float** decays) {
    *states = *decays = nullptr;
    if (cut.count == 1) return;
    *states = arena.take<float>(sequences_of(a) * a.H * cut.count * a.N * a.N);
    *decays = arena.take<float>(sequences_of(a) * a.H * cut.count * 2 * a.N);
}

/* One walk through time, in one launch or in three. */
template <bool REVERSE>
static gt_status launch_tensor_any(TensorParams p, Chain& stream) {
    if (p.segments.count == 1) return launch_tensor_once<REVERSE>(p, stream);
    const int64_t elements = p.in.sequences * p.in.H * p.in.N * p.in.N;
    TensorParams local = p;
    local.local = 1;
    local.y = nullptr;
    local.checkpoints = nullptr;
    local.G_rows[0].data = local.G_rows[1].data = nullptr;
    local.rowsums = nullptr;
    const int64_t step = REVERSE ? -1 : 1;
    const ScanParams scan = {p, step, step * p.in.N * p.in.N};
    gt_status status;
    if ((status = launch_tensor_once<REVERSE>(local, stream)) != GT_OK ||
        (status = run("wkv6 scan_segments_kernel", scan_segments_kernel, elements / SCAN_THREADS,
                      SCAN_THREADS, SCAN_SMEM, stream, scan)) != GT_OK)
        return status;
    return launch_tensor_once<REVERSE>(p, stream);
}

static inline size_t forward_workspace(const gt_wkv6_args& a, const Device& device) {
    Arena arena(nullptr);
    float *states, *decays;
    if (forward_fits(a, device))
        take_segments(arena, a, cut_time(a, device, a.T), &states, &decays);
    return arena.bytes();
}

/* From a checkpoint of S to its rest, in elements; 0: it has none. */
static inline int64_t rest_at(const gt_wkv6_args& a) {
    return keeps_rest(a.dtype, a.N, a.V) ? a.B * a.H * places_of(a) * a.N * a.V : 0;
}

static inline gt_status launch_tensor(const gt_wkv6_args& a, const Device& device, void* checkpoints,
                                      Chain& stream) {
    const Segments cut = cut_time(a, device, a.T);
    Arena arena(a.workspace);
    TensorParams p = {};
    p.in = problem_of(a);
    p.y = a.y;
    p.y_at = a.y_stride;
    p.state_in = a.state_in;
    p.state_out = a.state_out;
    p.checkpoints = checkpoints;
    p.rest = rest_at(a);
    p.state_in_shared = a.state_in_shared;
    p.places = (int)places_of(a);
    p.segments = cut;
    take_segments(arena, a, cut, &p.segment_states, &p.segment_decays);
    return launch_tensor_any<false>(p, stream);
}

/* `states` checkpoints in the arena, at its next place; `rest`: elements of those of S that follow. */
static inline void* take_checkpoints(Arena& arena, const gt_wkv6_args& a, gt_dtype dtype, int64_t states,
                                     int64_t rest = 0) {
    const int64_t count = states * a.N * a.V + rest;
    if (dtype == GT_F32) return arena.take<float>(count);
    return arena.take<bf16>(count);
}

/* Where forward leaves the states for backward. */
static inline void* checkpoints_in(const void* saved, const gt_wkv6_args& a, size_t* bytes) {
    Arena arena(const_cast<void*>(saved));
    const gt_dtype dtype = state_dtype(a.dtype, a.N, a.V);
    void* checkpoints = take_checkpoints(arena, a, dtype, a.B * a.H * places_of(a), rest_at(a));
    *bytes = arena.bytes();
    return checkpoints;
}

/* The pieces of backward's workspace. */
struct BackwardPlan {
    bool tensor; /* on tensor cores; else by the kernels for any size */
    ChunkParams chunk;
    void* S_checkpoints;
    void* G_checkpoints; /* [B,H,places,N,V] */
    bool last_first;     /* see BackwardParams */
    bool G_in_outputs;   /* see TensorParams::G_rows; G_checkpoints is [sequences,H,N,N] then, for last chunks */
    float *rowsums, *G_undo; /* bf16 [B,H,places,3,G_parts(),N]; f16 without the 3 */
    bool shared_gradient; /* dstate_in is a sum over the sequences: of dstate_sum [sequences,H,N,V] */
    float* dstate_sum;
    Segments cut;
    float *segment_states, *segment_decays;
    int64_t blocks;
    size_t bytes;
};

static inline int G_parts(const gt_wkv6_args& a) {
    return a.N == 32   ? StatesTraits<bf16, bf16, 32>::PARTS
           : a.N == 64 ? StatesTraits<bf16, bf16, 64>::PARTS
                       : StatesTraits<bf16, bf16, 128>::PARTS;
}

/* Whether the gradients that are wanted can hold G. */
static inline bool outputs_hold_G(const gt_wkv6_args& a, const Device& device) {
    const int size = size_of(a.dtype);
    if (a.N == 128 && (a.dtype == GT_F32 || slice_channels(a.dtype, device) < 64)) return false; /* G_IN_OUTPUTS */
    return a.dv && aligned(a.dv, a.dv_stride, size, 16) &&
           (a.N < 128 || (a.dk && aligned(a.dk, a.dk_stride, size, 16)));
}

static inline BackwardPlan plan_with(const gt_wkv6_args& a, const Device& device, bool G_in_outputs) {
    BackwardPlan plan = {};
    ChunkParams& c = plan.chunk;
    Arena arena(a.workspace);
    c.in = problem_of(a);
    c.rows = (int)(a.N + 3) / 4 * 4;
    c.columns = (int)(a.V + 3) / 4 * 4;
    int limit = 64;
    while (4 * sweep_layout(c.rows, limit, limit + 4).end > SHARED_BYTES) limit /= 2;
    if (c.columns > limit) c.columns = limit;
    c.pitch = c.columns + 4;
    c.tiles = (int)(a.V + c.columns - 1) / c.columns;
    c.places = places_of(a);
    c.scratch_size = LEAVES * c.rows * c.columns + CHECKPOINT * (2 * a.N + a.V) + LEAVES * a.N;
    c.scratch_size = (c.scratch_size + 63) / 64 * 64;
    plan.blocks = a.B * a.H * c.places;
    if (plan.blocks > 2 * device.multiprocessors) plan.blocks = 2 * device.multiprocessors;
    c.S_dtype = state_dtype(a.dtype, a.N, a.V);
    plan.tensor = backward_fits(a, device);
    c.G_dtype = plan.tensor ? a.dtype : GT_F32; /* GradientOf */
    if (!a.saved) plan.S_checkpoints = take_checkpoints(arena, a, c.S_dtype, a.B * a.H * c.places, rest_at(a));
    plan.last_first = plan.tensor && c.S_dtype == GT_BF16 && a.saved && !a.dstate_out && !a.seq_capacity &&
                      c.places > 1 && cut_time(a, device, a.T).count == 1;
    plan.G_in_outputs = G_in_outputs;
    if (!G_in_outputs) {
        plan.G_checkpoints = take_checkpoints(arena, a, c.G_dtype, a.B * a.H * c.places);
    } else if (plan.last_first || a.seq_capacity || a.T % CHECKPOINT) {
        plan.G_checkpoints = take_checkpoints(arena, a, c.G_dtype, sequences_of(a) * a.H);
    }
    if (!plan.tensor) c.scratch = arena.take<float>(plan.blocks * c.scratch_size);
    if (plan.tensor && a.dtype == GT_BF16)
        plan.rowsums = arena.take<float>(a.B * a.H * c.places * SWEEP_SUMS * G_parts(a) * a.N);
    if (plan.tensor && a.dtype == GT_F16)
        plan.G_undo = arena.take<float>(a.B * a.H * c.places * G_parts(a) * a.N);
    if (a.du) c.du = arena.take<float>(a.B * c.places * a.H * a.N);
    plan.shared_gradient = a.dstate_in && a.state_in_shared;
    if (plan.shared_gradient) plan.dstate_sum = arena.take<float>(sequences_of(a) * a.H * a.N * a.V);
    if (plan.tensor) {
        plan.cut = cut_time(a, device, a.T);
        take_segments(arena, a, plan.cut, &plan.segment_states, &plan.segment_decays);
    }
    plan.bytes = arena.bytes();
    c.dr = a.dr, c.dk = a.dk, c.dw = a.dw, c.dv = a.dv;
    c.dr_at = a.dr_stride, c.dk_at = a.dk_stride, c.dw_at = a.dw_stride, c.dv_at = a.dv_stride;
    return plan;
}

/* G lies in gradients unless sequences are so short that it takes more workspace there. */
static inline BackwardPlan plan_backward(const gt_wkv6_args& a, const Device& device) {
    const BackwardPlan plan = plan_with(a, device, false);
    if (!plan.tensor || !outputs_hold_G(a, device)) return plan;
    const BackwardPlan in_outputs = plan_with(a, device, true);
    return in_outputs.bytes <= plan.bytes ? in_outputs : plan;
}

/* S before every chunk: what forward saved, or made again. */
static inline gt_status make_S_checkpoints(const gt_wkv6_args& a, BackwardPlan& plan, Chain& stream) {
    size_t bytes;
    plan.chunk.S_checkpoints = checkpoints_in(a.saved, a, &bytes);
    if (a.saved) return GT_OK;
    if (plan.tensor) {
        TensorParams t = {};
        t.in = problem_of(a);
        t.state_in = a.state_in;
        t.state_in_shared = a.state_in_shared;
        t.checkpoints = plan.S_checkpoints;
        t.rest = rest_at(a);
        t.places = (int)places_of(a);
        t.segments = plan.cut;
        t.segment_states = plan.segment_states, t.segment_decays = plan.segment_decays;
        plan.chunk.S_checkpoints = plan.S_checkpoints;
        return launch_tensor_any<false>(t, stream);
    }
    ForwardParams p = {};
    p.in = problem_of(a);
    p.state_in = a.state_in;
    p.state_in_shared = a.state_in_shared;
    p.checkpoints = plan.S_checkpoints;
    p.rest = rest_at(a);
    p.places = places_of(a);
    p.checkpoint_dtype = plan.chunk.S_dtype;
    plan.chunk.S_checkpoints = plan.S_checkpoints;
    return launch_tokens<false>(p, stream);
}

/* G after every chunk, and dstate_in. */
static inline gt_status make_G_checkpoints(const gt_wkv6_args& a, BackwardPlan& plan, const Device& device,
                                           Chain& stream) {
    plan.chunk.G_checkpoints = plan.G_checkpoints;
    if (plan.tensor) {
        TensorParams t = {};
        t.in = problem_of(a);
        t.in.k = a.r;
        t.in.k_at = a.r_stride;
        t.in.v = a.dy;
        t.in.v_at = a.dy_stride;
        t.state_in = a.dstate_out;
        t.state_out = plan.shared_gradient ? plan.dstate_sum : a.dstate_in;
        t.checkpoints = plan.G_checkpoints;
        if (plan.G_in_outputs) {
            t.G_rows[0] = {a.dv, a.dv_stride};
            if (a.N == 128) t.G_rows[0] = {a.dk, a.dk_stride}, t.G_rows[1] = {a.dv, a.dv_stride};
        }
        t.rest = rest_at(a);
        if (a.dw && plan.rowsums) t.S = plan.chunk.S_checkpoints, t.rowsums = plan.rowsums;
        t.S_copies = a.N < 128 || slice_channels(a.dtype, device) >= 64 ? 2 : 1;
        t.S_starts_zero = !a.state_in;
        t.last_apart = plan.last_first;
        t.G_undo = plan.G_undo;
        t.places = (int)places_of(a);
        t.segments = plan.cut;
        t.segment_states = plan.segment_states, t.segment_decays = plan.segment_decays;
        return launch_tensor_any<true>(t, stream);
    }
    ForwardParams p = {};
    p.in = problem_of(a);
    p.in.k = a.r;
    p.in.k_at = a.r_stride;
    p.in.v = a.dy;
    p.in.v_at = a.dy_stride;
    p.state_in = a.dstate_out;
    p.state_out = plan.shared_gradient ? plan.dstate_sum : a.dstate_in;
    p.checkpoints = plan.G_checkpoints;
    p.places = places_of(a);
    p.checkpoint_dtype = plan.chunk.G_dtype;
    return launch_tokens<true>(p, stream);
}

template <class T, class W, int N, int CHANNELS = N>
static gt_status launch_chunks_with(const BackwardParams& p, Chain& stream) {
    using C = BackwardTraits<T, W, N, CHANNELS>;
    return run("wkv6 backward_tensor_kernel", backward_tensor_kernel<C>, (int64_t)p.places * p.heads.divisor,
               C::THREADS, C::SMEM, stream, p);
}

template <class T, class W>
static gt_status launch_chunks_of(const gt_wkv6_args& a, const BackwardParams& p, const Device& device,
                                  Chain& stream) {
    if (a.N == 32) return launch_chunks_with<T, W, 32>(p, stream);
    if (a.N == 64) return launch_chunks_with<T, W, 64>(p, stream);
    const int channels = slice_channels(a.dtype, device);
    if constexpr (std::is_same<T, bf16>::value) {
        if (channels == 128) return launch_chunks_with<T, W, 128, 128>(p, stream);
    }
    if constexpr (!std::is_same<T, float>::value) {
        if (channels == 32) return launch_chunks_with<T, W, 128, 32>(p, stream);
    }
    return launch_chunks_with<T, W, 128, 64>(p, stream);
}

static inline gt_status launch_chunks(const gt_wkv6_args& a, const BackwardPlan& plan, const Device& device,
                                      Chain& stream) {
    const ChunkParams& c = plan.chunk;
    const int size = size_of(a.dtype), w_size = size_of(a.w_dtype);
    if (a.B == 0 || c.places == 0) return GT_OK;
    BackwardParams p = {};
    const auto set = [&](int i, const void* data, gt_stride at_, int element) {
        p.tensors[i] = {const_cast<void*>(data), at_, element};
    };
    set(OF_R, a.r, a.r_stride, size);
    set(OF_K, a.k, a.k_stride, size);
    set(OF_W, a.w, a.w_stride, w_size);
    set(OF_V, a.v, a.v_stride, size);
    set(OF_DY, a.dy, a.dy_stride, size);
    set(OF_DR, a.dr, a.dr_stride, size);
    set(OF_DK, a.dk, a.dk_stride, size);
    set(OF_DW, a.dw, a.dw_stride, w_size);
    set(OF_DV, a.dv, a.dv_stride, size);
    p.heads = divide_by((int)(a.B * a.H)), p.H = divide_by((int)a.H), p.T = (int)a.T;
    p.packing = packing_of(a);
    p.raw = a.decay == GT_DECAY_RAW;
    p.last_first = plan.last_first;
    p.u = a.u;
    p.S_checkpoints = c.S_checkpoints, p.G_checkpoints = c.G_checkpoints;
    p.G_in_outputs = plan.G_in_outputs;
    p.rowsums = plan.rowsums;
    p.G_undo = plan.G_undo;
    p.du = c.du;
    p.places = (int)c.places;
    if (a.dtype == GT_F32) return launch_chunks_of<float, float>(a, p, device, stream);
    if (a.dtype == GT_BF16)
        return a.w_dtype == GT_F32 ? launch_chunks_of<bf16, float>(a, p, device, stream)
                                   : launch_chunks_of<bf16, bf16>(a, p, device, stream);
    return a.w_dtype == GT_F32 ? launch_chunks_of<f16, float>(a, p, device, stream)
                               : launch_chunks_of<f16, f16>(a, p, device, stream);
}

/* Chunks of any size. */
static inline gt_status launch_any_chunks(const gt_wkv6_args& a, const BackwardPlan& plan, Chain& stream) {
    const ChunkParams& c = plan.chunk;
    const int part1 = 4 * sweep_layout(c.rows, c.columns, c.pitch).end;
    const bool wide = leaf_smem((int)a.N, (int)a.V, false) > SHARED_BYTES;
    const int part2 = leaf_smem((int)a.N, (int)a.V, wide);
    return run("wkv6 backward_chunk_kernel", wide ? backward_chunk_kernel<true> : backward_chunk_kernel<false>,
               plan.blocks, SWEEP_THREADS, part1 > part2 ? part1 : part2, stream, c);
}

static inline gt_status launch_backward(const gt_wkv6_args& a, BackwardPlan& plan,
                                        const Device& device, Chain& stream) {
    const ChunkParams& c = plan.chunk;
    ClearParams rest = {};
    gt_status status;
    add_output(rest, a.dr, a.dr_stride, a.dtype, a.N);
    add_output(rest, a.dk, a.dk_stride, a.dtype, a.N);
    add_output(rest, a.dw, a.dw_stride, a.w_dtype, a.N);
    add_output(rest, a.dv, a.dv_stride, a.dtype, a.V);
    rest.states = plan.dstate_sum, rest.du = c.du;
    if ((status = clear_rest(a, rest, device, stream)) != GT_OK ||
        (status = make_S_checkpoints(a, plan, stream)) != GT_OK ||
        (status = make_G_checkpoints(a, plan, device, stream)) != GT_OK ||
        (status = plan.tensor ? launch_chunks(a, plan, device, stream)
                              : launch_any_chunks(a, plan, stream)) != GT_OK)
        return status;
    if (a.du && (status = reduce_rows(c.du, a.du, a.B * c.places, a.H * a.N, a.accumulate,
                                      stream)) != GT_OK)
        return status;
    if (plan.shared_gradient)
        return reduce_rows(plan.dstate_sum, a.dstate_in, sequences_of(a), a.H * a.N * a.V, a.accumulate,
                           stream);
    return GT_OK;
}

/* ---- dispatch and checks ------------------------------------------------------------------------------------ */

/* Prepares the arguments and checks what only the GPU limits. */
static inline gt_status prepare(gt_pass pass, const gt_wkv6_args* args, gt_wkv6_args* a,
                                Device* device) {
    gt_dims dims;
    gt_status status = gt_prepare(gt_op_wkv6(), pass, GT_DEVICE, args, a, &dims);
    if (status != GT_OK) return status;
    if (a->N > MAX_SIZE)
        return gt_fail(GT_ERROR_UNSUPPORTED, "N = %lld: at most %d", (long long)a->N, MAX_SIZE);
    if (a->V > MAX_SIZE)
        return gt_fail(GT_ERROR_UNSUPPORTED, "V = %lld: at most %d", (long long)a->V, MAX_SIZE);
    return current_device(device);
}

static inline gt_status forward(const gt_wkv6_args& a, bool is_step, const Device& device,
                                Chain& stream) {
    size_t bytes;
    void* checkpoints = is_step ? nullptr : checkpoints_in(a.saved, a, &bytes);
    ClearParams rest = {};
    add_output(rest, a.y, a.y_stride, a.dtype, a.V);
    const gt_status status = clear_rest(a, rest, device, stream);
    if (status != GT_OK) return status;
    if (!is_step && forward_fits(a, device)) return launch_tensor(a, device, checkpoints, stream);
    ForwardParams p = {};
    p.in = problem_of(a);
    p.y = a.y;
    p.y_at = a.y_stride;
    p.state_in = is_step ? a.state_out : a.state_in;
    p.state_out = a.state_out;
    p.checkpoints = checkpoints;
    p.places = places_of(a);
    p.checkpoint_dtype = state_dtype(a.dtype, a.N, a.V);
    p.rest = rest_at(a);
    p.state_in_shared = a.state_in_shared;
    p.is_step = is_step;
    p.slots = a.slots;
    p.slot_capacity = a.slot_capacity;
    return launch_tokens<false>(p, stream);
}

} /* namespace wkv6 */
} /* namespace gt */

/* ---- the C functions -------------------------------------------------------------------------------------------- */

extern "C" {

GT_API gt_status gt_wkv6_forward(const gt_wkv6_args* args, gt_stream stream) {
    gt_wkv6_args a;
    gt::Device device;
    size_t saved;
    gt_status status = gt::wkv6::prepare(GT_FORWARD, args, &a, &device);
    if (status != GT_OK) return status;
    gt::wkv6::checkpoints_in(a.saved, a, &saved);
    const size_t need = gt::wkv6::forward_workspace(a, device);
    if ((status = gt::check_saved(a.saved, a.saved_bytes, saved)) != GT_OK ||
        (status = gt::check_workspace(a.workspace, a.workspace_bytes, need)) != GT_OK)
        return status;
    gt::Chain chain = {stream};
    return gt::wkv6::forward(a, false, device, chain);
}

GT_API gt_status gt_wkv6_step(const gt_wkv6_args* args, gt_stream stream) {
    gt_wkv6_args a;
    gt::Device device;
    const gt_status status = gt::wkv6::prepare(GT_STEP, args, &a, &device);
    gt::Chain chain = {stream};
    return status != GT_OK ? status : gt::wkv6::forward(a, true, device, chain);
}

GT_API gt_status gt_wkv6_backward(const gt_wkv6_args* args, gt_stream stream) {
    gt_wkv6_args a;
    gt::Device device;
    size_t saved;
    gt_status status = gt::wkv6::prepare(GT_BACKWARD, args, &a, &device);
    if (status != GT_OK) return status;
    gt::wkv6::BackwardPlan plan = gt::wkv6::plan_backward(a, device);
    gt::wkv6::checkpoints_in(a.saved, a, &saved);
    if ((status = gt::check_saved(a.saved, a.saved_bytes, saved)) != GT_OK ||
        (status = gt::check_workspace(a.workspace, a.workspace_bytes, plan.bytes)) != GT_OK)
        return status;
    gt::Chain chain = {stream};
    return gt::wkv6::launch_backward(a, plan, device, chain);
}

GT_API gt_status gt_wkv6_workspace(const gt_wkv6_args* args, gt_workspace* need) {
    gt_wkv6_args a;
    gt::Device device;
    const gt_status status = gt::wkv6::prepare(GT_QUERY, args, &a, &device);
    if (status != GT_OK) return status;
    if (!need) return gt_fail(GT_ERROR_NULL, "need is NULL");
    gt_workspace sizes = {0, 0, 0, 0};
    a.workspace = nullptr;
    sizes.forward = gt::wkv6::forward_workspace(a, device);
    sizes.backward = gt::wkv6::plan_backward(a, device).bytes;
    gt::wkv6::checkpoints_in(nullptr, a, &sizes.saved);
    *need = sizes;
    return GT_OK;
}

} /* extern "C" */

#else

/* ---- stubs: this file was compiled without nvcc --------------------------------------------------- */

#ifdef __cplusplus
extern "C" {
#endif

GT_API gt_status gt_wkv6_forward(const gt_wkv6_args *args, gt_stream stream) {
    (void)args, (void)stream;
    return gt_no_cuda(gt_op_wkv6(), GT_FORWARD);
}
GT_API gt_status gt_wkv6_backward(const gt_wkv6_args *args, gt_stream stream) {
    (void)args, (void)stream;
    return gt_no_cuda(gt_op_wkv6(), GT_BACKWARD);
}
GT_API gt_status gt_wkv6_step(const gt_wkv6_args *args, gt_stream stream) {
    (void)args, (void)stream;
    return gt_no_cuda(gt_op_wkv6(), GT_STEP);
}
GT_API gt_status gt_wkv6_workspace(const gt_wkv6_args *args, gt_workspace *need) {
    (void)args, (void)need;
    return gt_no_cuda(gt_op_wkv6(), GT_QUERY);
}

#ifdef __cplusplus
}
#endif

#endif /* kernels or stubs */

#include "gt_kernels.h" /* the rest of the implementation, if this file is to hold it */

#endif /* GT_WKV6_CUH */
