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

#ifndef GT_KERNELS_INTERNAL
#define GT_KERNELS_INTERNAL
#endif
#include "gt_kernels.h"

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
        (status = gt_resolve_recurrent(&f, pass, dims)))
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

#include "gt_common.cuh"

namespace gt {
namespace wkv6 {

/* ---- sizes ------------------------------------------------------------------------------------------ */

constexpr int LEAF = 16;        /* tokens handled together */
constexpr int CHECKPOINT = 128; /* tokens between the states that forward leaves for backward */
constexpr int LEAVES = CHECKPOINT / LEAF;
constexpr int MAX_SIZE = 256;   /* of N and V */

/* One argument struct, prepared, as every kernel sees it. */
struct Problem {
    int64_t B, T, H;
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

/* ---- forward, any size: token by token ---------------------------------------------------------------
 * grid B*H*tiles, block 128.  A block owns one head and COLUMNS = 128 / SLICES columns of its state.
 * A column is held by SLICES neighbouring lanes, 32 rows each: rows 4 (slice + SLICES q) + 0..3.
 * registers: 32 state values a thread, fp32, for the whole sequence.
 * shared: r, k and the decay as (keep, factor) of 16 tokens, v of the block's columns, the bonus
 *     sum_n r u k of each token: 16 (4 ROWS + COLUMNS + 1) floats = 25 KB at N = V = 64.
 * bytes: r, k, w once per tile of columns, v and y once; states once.  N = 64: one tile.
 * Sums over n are in one fixed order (registers, then a butterfly over the slices): deterministic. */
struct ForwardParams {
    Problem in;
    void* y; /* NULL: only states are wanted */
    gt_stride y_at;
    const float* state_in;
    float *state_out, *checkpoints; /* checkpoints [B,H,ceil(T/128),N,V] */
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
    static constexpr int R = 0, K = R + LEAF * ROWS, KEEP = K + LEAF * ROWS;
    static constexpr int FACTOR = KEEP + LEAF * ROWS, V = FACTOR + LEAF * ROWS;
    static constexpr int BONUS = V + LEAF * COLUMNS, END = BONUS + LEAF; /* offsets in floats */
    static constexpr int SMEM = 4 * END;
    static_assert(SMEM <= 99 * 1024, "fits every architecture");
};

/* Fills the block's shared tile with tokens first .. first+15; beyond the sequence and the sizes the
 * inputs are 0 and the decay is 1. */
template <int SLICES>
GT_DEV void load_forward_tile(const ForwardParams& p, uint32_t smem, int64_t b, int64_t h,
                              int64_t first, int column0) {
    using C = ForwardTraits<SLICES>;
    const Problem& in = p.in;
    for (int i = thread_id(); i < LEAF * C::ROWS; i += C::THREADS) {
        const int n = i % C::ROWS;
        const int64_t t = first + i / C::ROWS;
        float r = 0.0f, k = 0.0f, g = 0.0f;
        if (n < in.N && t < in.T) {
            r = load_as(in.r, in.dtype, at(in.r_at, b, t, h) + n);
            k = load_as(in.k, in.dtype, at(in.k_at, b, t, h) + n);
            g = log_decay(in, load_as(in.w, in.w_dtype, at(in.w_at, b, t, h) + n));
        }
        const Scale scale = scale_of_log(g);
        sts<float>(smem + 4 * (C::R + i), r);
        sts<float>(smem + 4 * (C::K + i), k);
        sts<float>(smem + 4 * (C::KEEP + i), scale.keep);
        sts<float>(smem + 4 * (C::FACTOR + i), scale.factor);
    }
    for (int i = thread_id(); i < LEAF * C::COLUMNS; i += C::THREADS) {
        const int j = column0 + i % C::COLUMNS;
        const int64_t t = first + i / C::COLUMNS;
        const bool inside = j < in.V && t < in.T;
        sts<float>(smem + 4 * (C::V + i),
                   inside ? load_as(in.v, in.dtype, at(in.v_at, b, t, h) + j) : 0.0f);
    }
    sync_threads();
    /* bonus: 8 lanes a token */
    const int token = thread_id() / 8;
    float bonus = 0.0f;
    for (int n = thread_id() % 8; n < in.N; n += 8) {
        const float u = in.u ? in.u[h * in.N + n] : 0.0f;
        bonus += lds<float>(smem + 4 * (C::R + token * C::ROWS + n)) * u *
                 lds<float>(smem + 4 * (C::K + token * C::ROWS + n));
    }
    for (int mask = 1; mask < 8; mask <<= 1) bonus += shfl_xor(bonus, mask);
    if (thread_id() % 8 == 0) sts<float>(smem + 4 * (C::BONUS + token), bonus);
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
template <int SLICES, bool STORE, class Pointer>
GT_DEV void move_column(Pointer state, const Problem& in, int slice, int column, float (&s)[32]) {
    GT_UNROLL
    for (int i = 0; i < 32; i++) {
        const int n = 4 * (slice + SLICES * (i / 4)) + i % 4;
        const bool inside = n < in.N && column < in.V;
        if constexpr (STORE) {
            if (inside) state[(int64_t)n * in.V + column] = s[i];
        } else {
            s[i] = state && inside ? state[(int64_t)n * in.V + column] : 0.0f;
        }
    }
}

template <int SLICES>
GT_KERNEL(128, 3) forward_kernel(const GT_GRID_CONSTANT ForwardParams p) {
    using C = ForwardTraits<SLICES>;
    const Problem& in = p.in;
    const uint32_t smem = smem_base();
    const int64_t tile = block_x() % p.tiles, head = block_x() / p.tiles;
    const int64_t b = head / in.H, h = head % in.H;
    const int column0 = (int)tile * C::COLUMNS;
    const int slice = thread_id() % SLICES, column = thread_id() / SLICES;
    const int64_t NV = (int64_t)in.N * in.V;
    const int64_t row = p.is_step && p.slots ? p.slots[b] : b;
    const bool skipped = p.is_step && (row < 0 || row >= p.slot_capacity);

    float state[32];
    const int64_t row_in = p.state_in_shared ? 0 : row;
    const float* state_in = p.state_in && !skipped ? p.state_in + (row_in * in.H + h) * NV : nullptr;
    move_column<SLICES, false>(state_in, in, slice, column0 + column, state);

    for (int64_t first = 0; first < in.T; first += LEAF) {
        if (p.checkpoints && first % CHECKPOINT == 0) {
            const int64_t chunks = (in.T + CHECKPOINT - 1) / CHECKPOINT;
            float* checkpoint = p.checkpoints + (head * chunks + first / CHECKPOINT) * NV;
            move_column<SLICES, true>(checkpoint, in, slice, column0 + column, state);
        }
        load_forward_tile<SLICES>(p, smem, b, h, first, column0);
        const int tokens = (int)(in.T - first < LEAF ? in.T - first : LEAF);
        for (int token = 0; token < tokens; token++) {
            const float y = forward_token<SLICES>(smem, token, slice, column, state);
            if (p.y && slice == 0 && column0 + column < in.V)
                store_as(p.y, in.dtype, at(p.y_at, b, first + token, h) + column0 + column,
                         skipped ? 0.0f : y);
        }
        sync_threads();
    }
    if (p.state_out && !skipped)
        move_column<SLICES, true>(p.state_out + (row * in.H + h) * NV, in, slice, column0 + column,
                                  state);
}

/* ---- backward, any size, part 1: what needs the states ------------------------------------------------
 * grid B*H*tiles, block 256.  A block owns one head and COLUMNS columns of S and of G, and walks the
 * sequence backwards, one checkpoint (8 leaves) at a time: it rolls S forward through the 8 leaves,
 * parks the state before each in a scratch of its own (global, small enough to stay in L2), then walks
 * back through them with G.  Per leaf, over the block's columns only, it leaves in the workspace
 *     Sdy[t,n] = (S dy_t)[n]     Gv[t,n] = (G v_t)[n]     SG[n] = rowsum(S . G)
 *     Gk[t,j]  = (G^T (Q_t . k_t))[j]
 * shared: S and G [N, COLUMNS+4], the leaf's Q.k, P.r [16,N], v, dy [16,COLUMNS], the state scales:
 *     2 N (COLUMNS+4) + 32 N + 32 COLUMNS + 2 N floats = 51 KB at N = V = 64.
 * arithmetic: 5 products of 16 N COLUMNS multiply-adds and the roll's one; operands from shared
 * memory in 16-byte pieces, 16 multiply-adds per 2 to 5 loads.
 * bytes per token and head, N = V = 64: k, v, w twice and r, dy once or twice (about 1 KB), 768 B out. */
struct SweepParams {
    Problem in;
    const float *checkpoints, *dstate_out;
    float *scratch, *Sdy, *Gv, *SG, *Gk; /* Sdy, Gv [tiles,B,T,H,N]; SG [tiles,B,leaves,H,N]; Gk
                                            [B,T,H,V]; scratch [B,H,tiles,8,N,COLUMNS] */
    float* dstate_in;                    /* [B,H,N,V] or NULL */
    int64_t tiles;
    int columns, pitch; /* of a state row in shared memory; both multiples of 4 */
    int rows;           /* N rounded up to 4 */
};

constexpr int SWEEP_THREADS = 256;

/* Offsets in floats of the sweep's shared memory. */
struct SweepLayout {
    int S, G, Qk, Pr, v, dy, keep, factor, end;
};

GT_HD SweepLayout sweep_layout(int rows, int columns, int pitch) {
    SweepLayout at;
    at.S = 0;
    at.G = at.S + rows * pitch;
    at.Qk = at.G + rows * pitch;
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
    int64_t b, h, tile;
    int column0;
};

/* Q.k, P.r, v, dy and the scales of the leaf that starts at `first`. */
GT_DEV void load_sweep_leaf(const SweepParams& p, const SweepBlock& s, int64_t first) {
    const Problem& in = p.in;
    for (int n = thread_id(); n < p.rows; n += SWEEP_THREADS) {
        float g[LEAF], product = 1.0f, sum = 0.0f;
        GT_UNROLL
        for (int t = 0; t < LEAF; t++) {
            const bool inside = n < in.N && first + t < in.T;
            g[t] = inside ? log_decay(in, load_as(in.w, in.w_dtype,
                                                  at(in.w_at, s.b, first + t, s.h) + n))
                          : 0.0f;
            const float r =
                inside ? load_as(in.r, in.dtype, at(in.r_at, s.b, first + t, s.h) + n) : 0.0f;
            sts<float>(s.smem + 4 * (s.at.Pr + t * p.rows + n), r * product);
            sum += g[t];
            g[t] = exp_accurate(g[t]);
            product *= g[t];
        }
        product = 1.0f;
        GT_UNROLL
        for (int t = LEAF - 1; t >= 0; t--) {
            const bool inside = n < in.N && first + t < in.T;
            const float k =
                inside ? load_as(in.k, in.dtype, at(in.k_at, s.b, first + t, s.h) + n) : 0.0f;
            sts<float>(s.smem + 4 * (s.at.Qk + t * p.rows + n), k * product);
            product *= g[t];
        }
        const Scale scale = scale_of_log(sum);
        sts<float>(s.smem + 4 * (s.at.keep + n), scale.keep);
        sts<float>(s.smem + 4 * (s.at.factor + n), scale.factor);
    }
    for (int i = thread_id(); i < LEAF * p.columns; i += SWEEP_THREADS) {
        const int j = s.column0 + i % p.columns;
        const int64_t t = first + i / p.columns;
        const bool inside = j < in.V && t < in.T;
        sts<float>(s.smem + 4 * (s.at.v + i),
                   inside ? load_as(in.v, in.dtype, at(in.v_at, s.b, t, s.h) + j) : 0.0f);
        sts<float>(s.smem + 4 * (s.at.dy + i),
                   inside ? load_as(in.dy, in.dtype, at(in.dy_at, s.b, t, s.h) + j) : 0.0f);
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
GT_DEV void state_times_tokens(const SweepParams& p, const SweepBlock& s, int64_t first, int state,
                               int x, float* out) {
    const Problem& in = p.in;
    for (int i = thread_id(); i < p.rows * (LEAF / 4); i += SWEEP_THREADS) {
        const int n = i % p.rows, t0 = i / p.rows * 4;
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        for (int j = 0; j < p.columns; j += 4) {
            const float4 a = lds<float4>(s.smem + 4 * (state + n * p.pitch + j));
            GT_UNROLL
            for (int t = 0; t < 4; t++)
                sum[t] = dot4(a, lds<float4>(s.smem + 4 * (x + (t0 + t) * p.columns + j)), sum[t]);
        }
        GT_UNROLL
        for (int t = 0; t < 4; t++)
            if (n < in.N && first + t0 + t < in.T)
                out[(((s.tile * in.B + s.b) * in.T + first + t0 + t) * in.H + s.h) * in.N + n] =
                    sum[t];
    }
}

/* Gk[t,j] = sum_n G[n,j] Qk[t,n]; a thread makes 4 columns of a token. */
GT_DEV void tokens_times_state(const SweepParams& p, const SweepBlock& s, int64_t first) {
    const Problem& in = p.in;
    for (int i = thread_id(); i < LEAF * (p.columns / 4); i += SWEEP_THREADS) {
        const int t = i / (p.columns / 4), j = i % (p.columns / 4) * 4;
        float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
        for (int n = 0; n < p.rows; n++) {
            const float k = lds<float>(s.smem + 4 * (s.at.Qk + t * p.rows + n));
            const float4 g = lds<float4>(s.smem + 4 * (s.at.G + n * p.pitch + j));
            sum.x = fma_rn(g.x, k, sum.x);
            sum.y = fma_rn(g.y, k, sum.y);
            sum.z = fma_rn(g.z, k, sum.z);
            sum.w = fma_rn(g.w, k, sum.w);
        }
        const float column[4] = {sum.x, sum.y, sum.z, sum.w};
        GT_UNROLL
        for (int c = 0; c < 4; c++)
            if (first + t < in.T && s.column0 + j + c < in.V)
                p.Gk[((s.b * in.T + first + t) * in.H + s.h) * in.V + s.column0 + j + c] = column[c];
    }
}

/* SG[n] = sum_j S[n,j] G[n,j] with S from the scratch; 4 lanes a row. */
GT_DEV void rowsum_states(const SweepParams& p, const SweepBlock& s, int64_t leaf, const float* S) {
    const Problem& in = p.in;
    const int64_t leaves = (in.T + LEAF - 1) / LEAF;
    for (int i = thread_id(); i < (p.rows * 4 + 31) / 32 * 32; i += SWEEP_THREADS) {
        const int n = i / 4;
        float sum = 0.0f;
        for (int j = i % 4 * 4; n < p.rows && j < p.columns; j += 16)
            sum = dot4(ldg<float4>(S + n * p.columns + j),
                       lds<float4>(s.smem + 4 * (s.at.G + n * p.pitch + j)), sum);
        sum += shfl_xor(sum, 1);
        sum += shfl_xor(sum, 2);
        if (i % 4 == 0 && n < in.N)
            p.SG[(((s.tile * in.B + s.b) * leaves + leaf) * in.H + s.h) * in.N + n] = sum;
    }
}

/* state <- E . state + sum_t left_t right_t^T; a thread owns 4 x 4 elements at a time. */
GT_DEV void update_state(const SweepParams& p, const SweepBlock& s, int state, int left, int right) {
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
            const uint32_t cell = s.smem + 4 * (state + (n + e) * p.pitch + j);
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

/* Shared state <- its columns of a state [N,V] in global memory, 0 outside and for NULL. */
GT_DEV void load_state(const SweepParams& p, const SweepBlock& s, int state, const float* from) {
    for (int i = thread_id(); i < p.rows * p.columns; i += SWEEP_THREADS) {
        const int n = i / p.columns, j = i % p.columns;
        const bool inside = from && n < p.in.N && s.column0 + j < p.in.V;
        sts<float>(s.smem + 4 * (state + n * p.pitch + j),
                   inside ? from[(int64_t)n * p.in.V + s.column0 + j] : 0.0f);
    }
    sync_threads();
}

GT_KERNEL(256, 1) backward_sweep_kernel(const GT_GRID_CONSTANT SweepParams p) {
    const Problem& in = p.in;
    SweepBlock s;
    s.smem = smem_base();
    s.at = sweep_layout(p.rows, p.columns, p.pitch);
    s.tile = block_x() % p.tiles;
    const int64_t head = block_x() / p.tiles, NV = (int64_t)in.N * in.V;
    s.b = head / in.H;
    s.h = head % in.H;
    s.column0 = (int)s.tile * p.columns;
    const int64_t chunks = (in.T + CHECKPOINT - 1) / CHECKPOINT;
    const int64_t parked = (int64_t)p.rows * p.columns;
    float* scratch = p.scratch + (int64_t)block_x() * LEAVES * parked;

    load_state(p, s, s.at.G, p.dstate_out ? p.dstate_out + head * NV : nullptr);
    for (int64_t chunk = chunks - 1; chunk >= 0; chunk--) {
        const int64_t start = chunk * CHECKPOINT;
        const int64_t tokens = in.T - start < CHECKPOINT ? in.T - start : CHECKPOINT;
        const int leaves = (int)((tokens + LEAF - 1) / LEAF);
        load_state(p, s, s.at.S, p.checkpoints + (head * chunks + chunk) * NV);
        for (int leaf = 0; leaf < leaves; leaf++) { /* forwards: S before each leaf */
            const int64_t first = start + leaf * LEAF;
            for (int i = thread_id(); i < p.rows * (p.columns / 4); i += SWEEP_THREADS) {
                const int n = i / (p.columns / 4), j = i % (p.columns / 4) * 4;
                stg<float4>(scratch + leaf * parked + n * p.columns + j,
                            lds<float4>(s.smem + 4 * (s.at.S + n * p.pitch + j)));
            }
            load_sweep_leaf(p, s, first);
            state_times_tokens(p, s, first, s.at.S, s.at.dy, p.Sdy);
            sync_threads();
            if (leaf + 1 < leaves) update_state(p, s, s.at.S, s.at.Qk, s.at.v);
        }
        for (int leaf = leaves - 1; leaf >= 0; leaf--) { /* backwards: G after each leaf */
            const int64_t first = start + leaf * LEAF;
            load_sweep_leaf(p, s, first);
            state_times_tokens(p, s, first, s.at.G, s.at.v, p.Gv);
            tokens_times_state(p, s, first);
            rowsum_states(p, s, first / LEAF, scratch + leaf * parked);
            sync_threads();
            update_state(p, s, s.at.G, s.at.Pr, s.at.dy);
        }
    }
    for (int i = thread_id(); p.dstate_in && i < p.rows * p.columns; i += SWEEP_THREADS) {
        const int n = i / p.columns, j = i % p.columns;
        if (n < in.N && s.column0 + j < in.V)
            p.dstate_in[head * NV + (int64_t)n * in.V + s.column0 + j] =
                lds<float>(s.smem + 4 * (s.at.G + n * p.pitch + j));
    }
}

/* ---- backward, any size, part 2: within the leaves ---------------------------------------------------------
 * grid B*H*leaves, block 256: a leaf each, all in parallel.  Adds the pairs of tokens inside the leaf
 * to what the sweep left, and writes every gradient once.
 * shared: r, k, d [16,N], v, dy [16,V], C and A [16,16]: 16 (3N + 2V + 32) floats = 22 KB at N = V = 64.
 * The products D_ij are running products over j (or i), made where they are used.
 * bytes per token and head, N = V = 64: 640 in, 768 B from the sweep, 512 out. */
struct LeafParams {
    Problem in;
    const float *Sdy, *Gv, *SG, *Gk;
    void *dr, *dk, *dw, *dv;
    gt_stride dr_at, dk_at, dw_at, dv_at;
    float* du; /* partial sums [B,leaves,H,N] or NULL */
    int64_t tiles, leaves;
};

struct LeafBlock {
    uint32_t smem;
    int r, k, d, v, dy, C, A; /* offsets in floats */
    int64_t b, h, leaf, first;
    int tokens;
};

GT_HD int leaf_smem(int N, int V) { return 4 * (LEAF * (3 * N + 2 * V) + 2 * LEAF * LEAF); }

GT_DEV float cell(const LeafBlock& s, int offset) { return lds<float>(s.smem + 4 * offset); }

/* r, k, d, v, dy of the leaf; tokens beyond the sequence have 0, 0, 1, 0, 0. */
GT_DEV void load_leaf(const LeafParams& p, const LeafBlock& s) {
    const Problem& in = p.in;
    for (int i = thread_id(); i < LEAF * in.N; i += 256) {
        const int n = i % in.N;
        const int64_t t = s.first + i / in.N;
        const bool inside = t < in.T;
        sts<float>(s.smem + 4 * (s.r + i),
                   inside ? load_as(in.r, in.dtype, at(in.r_at, s.b, t, s.h) + n) : 0.0f);
        sts<float>(s.smem + 4 * (s.k + i),
                   inside ? load_as(in.k, in.dtype, at(in.k_at, s.b, t, s.h) + n) : 0.0f);
        const float g =
            inside ? log_decay(in, load_as(in.w, in.w_dtype, at(in.w_at, s.b, t, s.h) + n)) : 0.0f;
        sts<float>(s.smem + 4 * (s.d + i), exp_accurate(g));
    }
    for (int i = thread_id(); i < LEAF * in.V; i += 256) {
        const int j = i % in.V;
        const int64_t t = s.first + i / in.V;
        const bool inside = t < in.T;
        sts<float>(s.smem + 4 * (s.v + i),
                   inside ? load_as(in.v, in.dtype, at(in.v_at, s.b, t, s.h) + j) : 0.0f);
        sts<float>(s.smem + 4 * (s.dy + i),
                   inside ? load_as(in.dy, in.dtype, at(in.dy_at, s.b, t, s.h) + j) : 0.0f);
    }
    sync_threads();
}

/* C_ij = <dy_i, v_j> for j <= i, one pair a thread; A_ij by 16 lanes a row i, which share the sum
 * over n. */
GT_DEV void pair_products(const LeafParams& p, const LeafBlock& s) {
    const Problem& in = p.in;
    const int i = thread_id() / LEAF, j = thread_id() % LEAF;
    float c = 0.0f;
    for (int x = 0; j <= i && x < in.V; x++)
        c = fma_rn(cell(s, s.dy + i * in.V + x), cell(s, s.v + j * in.V + x), c);
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
GT_DEV void leaf_dv(const LeafParams& p, const LeafBlock& s) {
    const Problem& in = p.in;
    for (int x = thread_id(); x < s.tokens * in.V; x += 256) {
        const int t = x / in.V, j = x % in.V;
        float dv = p.Gk[((s.b * in.T + s.first + t) * in.H + s.h) * in.V + j];
        for (int i = t; i < s.tokens; i++)
            dv = fma_rn(cell(s, s.A + i * LEAF + t), cell(s, s.dy + i * in.V + j), dv);
        store_as(p.dv, in.dtype, at(p.dv_at, s.b, s.first + t, s.h) + j, dv);
    }
}

/* What the sweep left for token t and channel n, summed over its tiles of columns. */
GT_DEV float sum_tiles(const float* x, const LeafParams& p, const LeafBlock& s, int t, int n) {
    const Problem& in = p.in;
    float sum = 0.0f;
    for (int64_t tile = 0; tile < p.tiles; tile++)
        sum += x[(((tile * in.B + s.b) * in.T + s.first + t) * in.H + s.h) * in.N + n];
    return sum;
}

GT_DEV void leaf_dr(const LeafParams& p, const LeafBlock& s) {
    const Problem& in = p.in;
    for (int x = thread_id(); x < s.tokens * in.N; x += 256) {
        const int i = x / in.N, n = x % in.N;
        const float u = in.u ? in.u[s.h * in.N + n] : 0.0f;
        float dr = u * cell(s, s.k + x) * cell(s, s.C + i * LEAF + i), product = 1.0f;
        for (int j = i - 1; j >= 0; j--) {
            dr = fma_rn(product * cell(s, s.C + i * LEAF + j), cell(s, s.k + j * in.N + n), dr);
            product *= cell(s, s.d + j * in.N + n);
        }
        dr = fma_rn(product, sum_tiles(p.Sdy, p, s, i, n), dr);
        store_as(p.dr, in.dtype, at(p.dr_at, s.b, s.first + i, s.h) + n, dr);
    }
}

GT_DEV void leaf_dk(const LeafParams& p, const LeafBlock& s) {
    const Problem& in = p.in;
    for (int x = thread_id(); x < s.tokens * in.N; x += 256) {
        const int j = x / in.N, n = x % in.N;
        const float u = in.u ? in.u[s.h * in.N + n] : 0.0f;
        float dk = u * cell(s, s.r + x) * cell(s, s.C + j * LEAF + j), product = 1.0f;
        for (int i = j + 1; i < s.tokens; i++) {
            dk = fma_rn(product * cell(s, s.C + i * LEAF + j), cell(s, s.r + i * in.N + n), dk);
            product *= cell(s, s.d + i * in.N + n);
        }
        dk = fma_rn(product, sum_tiles(p.Gv, p, s, j, n), dk);
        store_as(p.dk, in.dtype, at(p.dk_at, s.b, s.first + j, s.h) + n, dk);
    }
}

/* dg of all tokens of channel n, by sums alone. */
GT_DEV void leaf_dg(const LeafParams& p, const LeafBlock& s, int n, float (&dg)[LEAF]) {
    const Problem& in = p.in;
    float k[LEAF], d[LEAF], all = 1.0f;
    GT_UNROLL
    for (int t = 0; t < LEAF; t++) {
        k[t] = cell(s, s.k + t * in.N + n);
        d[t] = cell(s, s.d + t * in.N + n);
        dg[t] = 0.0f;
    }
    /* sum_{j<t} k_j Q_j (G v_j): Q needs the product from the right, so Horner from the left */
    float left = 0.0f;
    for (int64_t tile = 0; tile < p.tiles; tile++)
        left += p.SG[(((tile * in.B + s.b) * p.leaves + s.leaf) * in.H + s.h) * in.N + n];
    float Qk[LEAF];
    GT_UNROLL
    for (int t = LEAF - 1; t >= 0; t--) {
        Qk[t] = t < s.tokens ? k[t] * all * sum_tiles(p.Gv, p, s, t, n) : 0.0f;
        all *= d[t];
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
                product *= d[j];
            }
            float sum = product * sum_tiles(p.Sdy, p, s, i, n);
            GT_UNROLL
            for (int t = 0; t < i; t++) {
                dg[t] += sum;
                sum += term[t];
            }
        }
    }
}

GT_DEV void leaf_dw(const LeafParams& p, const LeafBlock& s) {
    const Problem& in = p.in;
    for (int n = thread_id(); n < in.N; n += 256) {
        float dg[LEAF];
        leaf_dg(p, s, n, dg);
        GT_UNROLL
        for (int t = 0; t < LEAF; t++) {
            if (t >= s.tokens) break;
            const float w = load_as(in.w, in.w_dtype, at(in.w_at, s.b, s.first + t, s.h) + n);
            float dw = dg[t];
            if (in.decay == GT_DECAY_RAW) dw *= log_decay(in, w);
            if (cell(s, s.d + t * in.N + n) == 0.0f) dw = 0.0f; /* log d may be -inf there */
            store_as(p.dw, in.w_dtype, at(p.dw_at, s.b, s.first + t, s.h) + n, dw);
        }
    }
}

GT_DEV void leaf_du(const LeafParams& p, const LeafBlock& s) {
    const Problem& in = p.in;
    for (int n = thread_id(); n < in.N; n += 256) {
        float du = 0.0f;
        for (int t = 0; t < s.tokens; t++)
            du = fma_rn(cell(s, s.C + t * LEAF + t) * cell(s, s.r + t * in.N + n),
                        cell(s, s.k + t * in.N + n), du);
        p.du[((s.b * p.leaves + s.leaf) * in.H + s.h) * in.N + n] = du;
    }
}

GT_KERNEL(256, 2) backward_leaf_kernel(const GT_GRID_CONSTANT LeafParams p) {
    const Problem& in = p.in;
    LeafBlock s;
    s.smem = smem_base();
    s.r = 0;
    s.k = s.r + LEAF * in.N;
    s.d = s.k + LEAF * in.N;
    s.v = s.d + LEAF * in.N;
    s.dy = s.v + LEAF * in.V;
    s.C = s.dy + LEAF * in.V;
    s.A = s.C + LEAF * LEAF;
    s.leaf = block_x() % p.leaves;
    s.h = block_x() / p.leaves % in.H;
    s.b = block_x() / p.leaves / in.H;
    s.first = s.leaf * LEAF;
    s.tokens = (int)(in.T - s.first < LEAF ? in.T - s.first : LEAF);
    load_leaf(p, s);
    pair_products(p, s);
    if (p.dv) leaf_dv(p, s);
    if (p.dr) leaf_dr(p, s);
    if (p.dk) leaf_dk(p, s);
    if (p.dw) leaf_dw(p, s);
    if (p.du) leaf_du(p, s);
}

/* ---- launchers -------------------------------------------------------------------------------------------- */

static inline Problem problem_of(const gt_wkv6_args& a) {
    Problem in = {};
    in.B = a.B, in.T = a.T, in.H = a.H;
    in.N = (int)a.N, in.V = (int)a.V;
    in.dtype = a.dtype, in.w_dtype = a.w_dtype, in.decay = a.decay;
    in.r = a.r, in.k = a.k, in.w = a.w, in.v = a.v, in.dy = a.dy;
    in.u = a.u;
    in.r_at = a.r_stride, in.k_at = a.k_stride, in.w_at = a.w_stride, in.v_at = a.v_stride;
    in.dy_at = a.dy_stride;
    return in;
}

template <int SLICES>
static gt_status launch_forward_with(ForwardParams p, gt_stream stream) {
    using C = ForwardTraits<SLICES>;
    p.tiles = (p.in.V + C::COLUMNS - 1) / C::COLUMNS;
    return run("wkv6 forward_kernel", forward_kernel<SLICES>, p.in.B * p.in.H * p.tiles, C::THREADS,
               C::SMEM, stream, p);
}

static inline gt_status launch_forward(const ForwardParams& p, gt_stream stream) {
    if (p.in.N <= 32) return launch_forward_with<1>(p, stream);
    if (p.in.N <= 64) return launch_forward_with<2>(p, stream);
    if (p.in.N <= 128) return launch_forward_with<4>(p, stream);
    return launch_forward_with<8>(p, stream);
}

static inline int64_t checkpoint_count(const gt_wkv6_args& a) {
    return a.B * a.H * ((a.T + CHECKPOINT - 1) / CHECKPOINT) * a.N * a.V;
}

/* The pieces of backward's workspace. */
struct BackwardPlan {
    SweepParams sweep;
    LeafParams leaf;
    float *checkpoints, *dstate_sum;
    size_t bytes;
};

static inline BackwardPlan plan_backward(const gt_wkv6_args& a) {
    BackwardPlan plan = {};
    SweepParams& s = plan.sweep;
    Arena arena(a.workspace);
    const int64_t tokens = a.B * a.T * a.H, leaves = (a.T + LEAF - 1) / LEAF;
    s.rows = (int)(a.N + 3) / 4 * 4;
    s.columns = (int)(a.V + 3) / 4 * 4;
    const int limit = a.N > 128 ? 16 : 64; /* keeps two states within 99 KB */
    if (s.columns > limit) s.columns = limit;
    s.pitch = s.columns + 4;
    s.tiles = (a.V + s.columns - 1) / s.columns;
    if (!a.saved) plan.checkpoints = arena.take<float>(checkpoint_count(a));
    s.scratch = arena.take<float>(a.B * a.H * s.tiles * LEAVES * s.rows * s.columns);
    s.Sdy = arena.take<float>(s.tiles * tokens * a.N);
    s.Gv = arena.take<float>(s.tiles * tokens * a.N);
    s.Gk = arena.take<float>(tokens * a.V);
    s.SG = arena.take<float>(s.tiles * a.B * leaves * a.H * a.N);
    if (a.du) plan.leaf.du = arena.take<float>(a.B * leaves * a.H * a.N);
    if (a.dstate_in && a.state_in_shared)
        plan.dstate_sum = arena.take<float>(a.B * a.H * a.N * a.V);
    plan.bytes = arena.bytes();
    return plan;
}

static inline gt_status launch_backward(const gt_wkv6_args& a, BackwardPlan& plan, gt_stream stream) {
    SweepParams& s = plan.sweep;
    LeafParams& l = plan.leaf;
    const int64_t leaves = (a.T + LEAF - 1) / LEAF;
    gt_status status;
    s.in = l.in = problem_of(a);
    s.checkpoints = static_cast<const float*>(a.saved);
    if (!a.saved) {
        ForwardParams f = {};
        f.in = s.in;
        f.state_in = a.state_in;
        f.state_in_shared = a.state_in_shared;
        f.checkpoints = plan.checkpoints;
        if ((status = launch_forward(f, stream)) != GT_OK) return status;
        s.checkpoints = plan.checkpoints;
    }
    s.dstate_out = a.dstate_out;
    s.dstate_in = plan.dstate_sum ? plan.dstate_sum : a.dstate_in;
    const int smem = 4 * sweep_layout(s.rows, s.columns, s.pitch).end;
    if ((status = run("wkv6 backward_sweep_kernel", backward_sweep_kernel, a.B * a.H * s.tiles,
                      SWEEP_THREADS, smem, stream, s)) != GT_OK)
        return status;

    l.Sdy = s.Sdy, l.Gv = s.Gv, l.SG = s.SG, l.Gk = s.Gk;
    l.dr = a.dr, l.dk = a.dk, l.dw = a.dw, l.dv = a.dv;
    l.dr_at = a.dr_stride, l.dk_at = a.dk_stride, l.dw_at = a.dw_stride, l.dv_at = a.dv_stride;
    l.tiles = s.tiles;
    l.leaves = leaves;
    if ((status = run("wkv6 backward_leaf_kernel", backward_leaf_kernel, a.B * a.H * leaves, 256,
                      leaf_smem((int)a.N, (int)a.V), stream, l)) != GT_OK)
        return status;
    if (a.du && (status = reduce_rows(l.du, a.du, a.B * leaves, a.H * a.N, a.accumulate, stream)) !=
                    GT_OK)
        return status;
    if (plan.dstate_sum)
        return reduce_rows(plan.dstate_sum, a.dstate_in, a.B, a.H * a.N * a.V, a.accumulate, stream);
    return GT_OK;
}

/* ---- dispatch and checks ------------------------------------------------------------------------------------ */

/* Prepares the arguments and checks what only the GPU limits. */
static inline gt_status prepare(gt_pass pass, const gt_wkv6_args* args, gt_wkv6_args* a) {
    gt_dims dims;
    Device device;
    gt_status status = gt_prepare(gt_op_wkv6(), pass, GT_DEVICE, args, a, &dims);
    if (status != GT_OK) return status;
    if (a->N > MAX_SIZE)
        return gt_fail(GT_ERROR_UNSUPPORTED, "N = %lld: at most %d", (long long)a->N, MAX_SIZE);
    if (a->V > MAX_SIZE)
        return gt_fail(GT_ERROR_UNSUPPORTED, "V = %lld: at most %d", (long long)a->V, MAX_SIZE);
    return current_device(&device);
}

static inline gt_status forward(const gt_wkv6_args& a, bool is_step, gt_stream stream) {
    ForwardParams p = {};
    p.in = problem_of(a);
    p.y = a.y;
    p.y_at = a.y_stride;
    p.state_in = is_step ? a.state_out : a.state_in;
    p.state_out = a.state_out;
    p.checkpoints = is_step ? nullptr : static_cast<float*>(a.saved);
    p.state_in_shared = a.state_in_shared;
    p.is_step = is_step;
    p.slots = a.slots;
    p.slot_capacity = a.slot_capacity;
    return launch_forward(p, stream);
}

} /* namespace wkv6 */
} /* namespace gt */

/* ---- the C functions -------------------------------------------------------------------------------------------- */

extern "C" {

GT_API gt_status gt_wkv6_forward(const gt_wkv6_args* args, gt_stream stream) {
    gt_wkv6_args a;
    gt_status status = gt::wkv6::prepare(GT_FORWARD, args, &a);
    if (status != GT_OK) return status;
    const size_t saved = 4 * (size_t)gt::wkv6::checkpoint_count(a);
    if ((status = gt::check_saved(a.saved, a.saved_bytes, saved)) != GT_OK) return status;
    return gt::wkv6::forward(a, false, stream);
}

GT_API gt_status gt_wkv6_step(const gt_wkv6_args* args, gt_stream stream) {
    gt_wkv6_args a;
    const gt_status status = gt::wkv6::prepare(GT_STEP, args, &a);
    return status != GT_OK ? status : gt::wkv6::forward(a, true, stream);
}

GT_API gt_status gt_wkv6_backward(const gt_wkv6_args* args, gt_stream stream) {
    gt_wkv6_args a;
    gt_status status = gt::wkv6::prepare(GT_BACKWARD, args, &a);
    if (status != GT_OK) return status;
    gt::wkv6::BackwardPlan plan = gt::wkv6::plan_backward(a);
    const size_t saved = 4 * (size_t)gt::wkv6::checkpoint_count(a);
    if ((status = gt::check_saved(a.saved, a.saved_bytes, saved)) != GT_OK ||
        (status = gt::check_workspace(a.workspace, a.workspace_bytes, plan.bytes)) != GT_OK)
        return status;
    return gt::wkv6::launch_backward(a, plan, stream);
}

GT_API gt_status gt_wkv6_workspace(const gt_wkv6_args* args, gt_workspace* need) {
    gt_wkv6_args a;
    gt_status status = gt::wkv6::prepare(GT_QUERY, args, &a);
    if (status != GT_OK) return status;
    if (!need) return gt_fail(GT_ERROR_NULL, "need is NULL");
    gt_workspace sizes = {0, 0, 0, 0};
    a.workspace = nullptr;
    sizes.backward = gt::wkv6::plan_backward(a).bytes;
    sizes.saved = 4 * (size_t)gt::wkv6::checkpoint_count(a);
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
#endif /* GT_WKV6_CUH */
