/* gt/wkv6/problem.cuh - shared by all kernels of wkv6: sizes, arguments, decays. */
#ifndef GT_WKV6_PROBLEM_CUH
#define GT_WKV6_PROBLEM_CUH

#include "../recurrence/snapshots.cuh"

namespace gt {
namespace wkv6 {

/* ---- sizes ------------------------------------------------------------------------------------------ */

constexpr int SUB_CHUNK = 16;  /* tokens handled together */
constexpr int CHECKPOINT = 64; /* tokens between two states that forward saves for backward */
constexpr int SUB_CHUNKS = CHECKPOINT / SUB_CHUNK;
constexpr int MAX_SIZE = 256;           /* the largest N and V */
constexpr int SHARED_BYTES = 64 * 1024; /* shared memory that a block may have on every architecture */
/* KB of shared memory that a block may have: on every GPU from 8.0 on; on 8.0, 8.7, 9.0 and 10.0; on 9.0 and 10.0. */
constexpr int LEAST_KB = 99, AMPERE_KB = 163, HOPPER_KB = 227;

/* The type of the states that forward saves for backward: bf16 for bf16 activations in sizes that have kernels on
 * tensor cores, otherwise fp32. */
template <class T>
using StateOf = typename std::conditional<std::is_same<T, bf16>::value, bf16, float>::type;

GT_HD gt_dtype state_dtype(gt_dtype dtype, int64_t N, int64_t V) {
    return dtype == GT_BF16 && N == V && (N == 32 || N == 64 || N == 128) ? GT_BF16 : GT_F32;
}

/* Returns whether saved states S consist of two bf16 terms, S = hi + lo.  The lo terms lie behind all checkpoints.
 * Backward uses rowsum(S . G).  There the rounding of S gives dw of a slowly decaying channel the same error in the
 * whole chunk; lo removes this error.  Only N = 32 has two terms, because its checkpoints are small and its rows
 * short. */
GT_HD bool keeps_lo(gt_dtype dtype, int64_t N, int64_t V) { return state_dtype(dtype, N, V) == GT_BF16 && N == 32; }

/* The type of G, which the reverse state pass (states.cuh) stores for the chunks: the type of the activations.  f16
 * numbers are scaled by a power of two for each part of a row (RowScale).  A part is the share of one warp of the
 * reverse state pass. */
template <class T>
using GradientOf = typename std::conditional<std::is_same<T, f16>::value, f16, StateOf<T>>::type;

/* Whether G may lie in the memory of dk and dv.  The chunk that reads G overwrites it there afterwards.  fp32 with N =
 * 128 is an exception: a warp of the reverse state pass has all rows, and half of them would lie in dk, half in dv. */
template <class T, int N>
constexpr bool G_FITS_OUTPUTS = !(std::is_same<T, float>::value && N == 128);

/* bf16 only: how many sums over each row of a chunk's states the reverse state pass computes.  backward.cuh uses them
 * to correct the rounding errors of dg. */
constexpr int REVERSE_SUMS = 3;

/* Returns x minus x rounded to bf16.  bf16_lo_pair() does this for two numbers and packs the results. */
GT_HD float bf16_lo(float x) { return x - bf16_to_f32(f32_to_bf16(x)); }

GT_HD uint32_t bf16_lo_pair(float lo, float hi) {
    const uint32_t pair = pack_bf16(lo, hi);
    return pack_bf16(lo - unpack_bf16_lo(pair), hi - unpack_bf16_hi(pair));
}

/* The prepared arguments of a call, as every kernel gets them. */
struct Problem {
    Sequences sequences;
    int64_t H;
    int N, V;
    gt_dtype dtype, w_dtype;
    gt_decay decay;
    float scale, log2_scale; /* scale of y.  In backward it multiplies dr, and r in all other gradients */
    const void *r, *k, *w, *v, *dy;
    const float* u;
    gt_stride r_stride, k_stride, w_stride, v_stride, dy_stride;
};

/* Parameters of every pass through time: forward, and the reverse state pass, which computes G. */
struct PassParams {
    Problem in;
    void* y; /* NULL: the pass computes only states */
    gt_stride y_stride;
    const float* state_in;
    float* state_out;
    Snapshots snapshots; /* only forward stores them */
    void* checkpoints;   /* [B,H,chunk slots,N,V] */
    int64_t lo_terms;    /* elements from a checkpoint of S to its lo terms (keeps_lo); 0: none */
    int64_t chunk_slots; /* chunk slots of a head */
    int state_in_shared;
};

/* What forward and a step of a mixed call of wkv_ssm add to y: see gt_mix in gt/base/op.h.  ssm NULL: nothing. */
struct Mix {
    void* y; /* NULL, or where y alone goes.  The sum goes to the call's y */
    const void *ssm, *residual;
    const float *gain_wkv, *gain_ssm;
    gt_stride y_stride, ssm_stride, residual_stride;
    Divider by_P;
    bool is_set; /* for the choice of kernels: gt_wkv_ssm_path may have no pointers */
};

/* ---- from a call's arguments ------------------------------------------------------------------------- */

static inline int size_of(gt_dtype dtype) { return dtype == GT_F32 ? 4 : 2; }

static inline Problem problem_of(const gt_wkv6_args& a) {
    Problem in = {};
    in.sequences = sequences_of(a, a.state_out_stride);
    in.H = a.H;
    in.N = (int)a.N, in.V = (int)a.V;
    in.dtype = a.dtype, in.w_dtype = a.w_dtype, in.decay = a.decay;
    in.scale = a.scale, in.log2_scale = log2f(a.scale);
    in.r = a.r, in.k = a.k, in.w = a.w, in.v = a.v, in.dy = a.dy;
    in.u = a.u;
    in.r_stride = a.r_stride, in.k_stride = a.k_stride, in.w_stride = a.w_stride, in.v_stride = a.v_stride;
    in.dy_stride = a.dy_stride;
    return in;
}

static inline Mix mix_of(const gt_mix& m) {
    return {m.y,        m.ssm,        m.residual,        m.gain_wkv,          m.gain_ssm,
            m.y_stride, m.ssm_stride, m.residual_stride, divide_by((int)m.P), true};
}

static inline int64_t chunk_slots_of(const gt_wkv6_args& a) { return chunk_slots(sequences_of(a), CHECKPOINT); }

/* ---- device helpers ---------------------------------------------------------------------------------- */

/* Returns log d for one element of w.  The result is never positive infinity; minus infinity means a decay of exactly
 * 0. */
GT_DEV float log_decay(const Problem& p, float w) { return p.decay == GT_DECAY_LOG ? w : -exp_accurate(w); }

/* Returns the offset of channel c of a token in Mix::ssm. */
GT_DEV int64_t ssm_offset(const Mix& m, int64_t b, int64_t t, int c) {
    int inside;
    const int head = divide(c, m.by_P, &inside);
    return offset_of(m.ssm_stride, b, t, head) + inside;
}

/* Returns the sum for column j of a token and head, in the kernels for any size.  Stores y alone if the call wants
 * it. */
GT_DEV float mix_element(const Mix& m, const Problem& in, int64_t b, int64_t t, int64_t h, int j, float y) {
    const int c = (int)h * in.V + j;
    const float rest = m.residual ? load_as(m.residual, in.dtype, offset_of(m.residual_stride, b, t, h) + j) : 0.0f;
    const float ssm = load_as(m.ssm, in.dtype, ssm_offset(m, b, t, c));
    if (m.y) store_as(m.y, in.dtype, offset_of(m.y_stride, b, t, h) + j, y);
    return fma_rn(m.gain_wkv ? m.gain_wkv[c] : 1.0f, y, fma_rn(m.gain_ssm ? m.gain_ssm[c] : 1.0f, ssm, rest));
}

/* Scale a state that decays by exp(g), as gt::scale_of_log and gt::rescale do (recurrence/segments.cuh).  Here a decay
 * is at most 1, so factors never become infinite.  The function uses exp_accurate, because the kernels for any size
 * promise more accuracy than 16 bits. */
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

} /* namespace wkv6 */
} /* namespace gt */

#endif
