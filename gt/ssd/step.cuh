/* gt/ssd/step.cuh - ssd step: 1 to 16 new tokens of every batch element, with states in slots, in place.
 *
 *     h <- exp(Delta A) h + Delta x B^T        y = (h C + Dskip x) silu(z)        token by token
 *
 * TILE.  LANES neighbouring lanes own ROWS rows p of a head's state.  Each lane has VECS times 4 neighbouring columns:
 * 4 lane ... 4 lane + 3, and the same 4 LANES later.  A warp has TILE = 32 / LANES * ROWS rows, and no warp waits for
 * another.  So T tokens give the bits of T steps of one token, and a result depends on its own inputs alone.
 *
 *     N up to   LANES   VECS   ROWS    rows of a warp
 *          16       4      1      8    64
 *          32       8      1      8    32
 *          64      16      1      8    16
 *         128      16      2   4, 8    8, 16
 *         256      32      2   4, 8    4, 8
 *
 * Calls of more than 4 tokens take the larger ROWS: a warp then loads B and C of a token half as often for a row.
 *
 * SUMS OVER n.  A lane adds its columns in order, then lanes meet in a tree: first those LANES / 2 apart, in the end
 * neighbours.  A stage exchanges half of the rows that are left, so 8 rows take 4 + 2 + 1 + 1 shuffles of 16 lanes.
 * In the upper half of the lanes row i is row i ^ ROWS / 2 of the group.  Then the first stage needs no selects.  ROWS
 * does not change the tree.
 * DECAY.  Lane t makes Delta and the decay of token t, all at once; shuffles hand them out.  Closer to 1 than NEAR_ONE,
 * a decay is kept as expm1(a).  Any other decay is one number, 1 + expm1(a): rounding it changes 1 - decay by 2^-19 of
 * its value at most.
 *
 * STATE.  It stays in registers for all tokens, and is stored when the last token to commit is done.
 * REGISTERS: 32 numbers of the state, or 64; B, C, x and z of the token at hand and of the next one.
 * SHARED MEMORY: none.
 * BYTES a row: the state once each way, 8 N.  A token and row, bf16: x, y (z) 2 each; a token and warp: B and C 4 N, from
 *     the first-level cache or L2.
 * ISSUE SLOTS a row and token, N = 128: 8 multiply-adds and products on the state (12 where the decay is near 1), 4 for
 *     y, about 5 for sums, x, B, C and the rest.
 * GRID: a strand has H * parts blocks, a part up to WARPS warps of one head.  There is a strand for every batch element,
 *     as far as a grid can count. */
#ifndef GT_SSD_STEP_CUH
#define GT_SSD_STEP_CUH

#include "../recurrence/sequences.cuh"
#include "../recurrence/ssm_step.cuh"

namespace gt {
namespace ssd {

using namespace ssm;

constexpr int STEP_WARPS = 5; /* of a block, at most: 10 tiles of a head, P = 80, are two blocks without idle warps */
constexpr float NEAR_ONE = 0x1p-6f;

struct StepParams {
    int64_t B, H;
    int P, N;
    gt_dtype dtype, dt_dtype;
    DeltaRule rule;
    int skip_per_channel;
    const void *x, *dt, *Bm, *Cm, *z;
    const float *A, *Dskip, *dt_bias;
    void* y;
    float* state; /* [slot_capacity,H,P,N] */
    gt_stride x_stride, dt_stride, Bm_stride, Cm_stride, z_stride, y_stride;
    StepElements elements;
    int64_t strands;
    Divider by_strand, by_head, by_group; /* blocks of a strand and of a head; heads of a group */
};

template <int LANES_, int VECS_, int ROWS_>
struct StepTraits {
    static constexpr int LANES = LANES_, VECS = VECS_, ROWS = ROWS_;
    static constexpr int COLUMNS = 4 * VECS, GROUPS = 32 / LANES, TILE = GROUPS * ROWS;
    static constexpr int HALF = ROWS / 2, HALF_LANES = LANES / 2;
    /* After the sum a lane has HELD rows, and SAME neighbours have the same ones. */
    static constexpr int HELD = HALF > HALF_LANES ? HALF / HALF_LANES : 1;
    static constexpr int SAME = HALF_LANES > HALF ? HALF_LANES / HALF : 1;
};

/* Blocks of a multiprocessor, at least: 15 or 20 warps with loads of 4 KB each in flight, or 10 to 15 warps with 8 KB. */
template <class T, int VECS, int ROWS>
struct StepBlocks {
    static constexpr bool IS_WIDE = VECS * ROWS > 8;
    static constexpr int VALUE = std::is_same<T, AnyType>::value || (std::is_same<T, float>::value && IS_WIDE) ? 2
                                 : std::is_same<T, bf16>::value && ROWS == 4                                   ? 4
                                                                                                               : 3;
};

/* The batch element, head and rows of a lane. */
template <class C>
struct StepPlace {
    int64_t b;
    int h, g;
    int lane;         /* among the lanes of a row */
    int first, other; /* rows of the lane's ROWS: the first HALF begin with `first`, the rest with `other` */
    int held;         /* first row whose y the lane holds */
    bool writes;      /* y, which its neighbours hold, too */

    GT_METHOD int row(int i) const { return i < C::HALF ? first + i : other + i - C::HALF; }
    GT_METHOD int column(int v) const { return 4 * lane + 4 * C::LANES * v; }
};

/* How a token scales the state. */
enum Growth { PLAIN, CLOSE, FAR_OFF }; /* factor times h; h + factor h; factor^4 times h */

struct TokenScale {
    float delta, factor;
    int growth;
};

GT_DEV TokenScale token_scale(const DeltaRule& rule, float dt, float A) {
    TokenScale s;
    s.delta = delta_of(rule, dt).value;
    const float a = s.delta * A;
    if (a >= FAR_GROWTH) {
        s.growth = FAR_OFF;
        s.factor = finite(exp_accurate(0.25f * a));
    } else {
        const float less = expm1_neg(a);
        s.growth = a > -NEAR_ONE && a < 0.05f ? CLOSE : PLAIN;
        s.factor = s.growth == CLOSE ? less : a > -0.69f && a <= -NEAR_ONE ? 1.0f + less : exp_fast(a);
    }
    return s;
}

/* The lane's place in the activations, and its elements of one token, as loaded. */
template <class T, class C>
struct StepInputs {
    TokenCursor<T> B_at, C_at, x_at, other_at, z_at;
    Piece<T, 4> B[C::VECS], Cm[C::VECS];
    Piece<T, C::HALF> x, other;
    Piece<T, 1> z[C::HELD];

    GT_METHOD StepInputs(const StepParams& p, const StepPlace<C>& s)
        : B_at(p.Bm, p.dtype, offset_of(p.Bm_stride, s.b, 0, s.g) + s.column(0)),
          C_at(p.Cm, p.dtype, offset_of(p.Cm_stride, s.b, 0, s.g) + s.column(0)),
          x_at(p.x, p.dtype, offset_of(p.x_stride, s.b, 0, s.h) + s.first),
          other_at(p.x, p.dtype, offset_of(p.x_stride, s.b, 0, s.h) + s.other),
          z_at(p.z, p.dtype, offset_of(p.z_stride, s.b, 0, s.h) + s.held) {
        load(p, s);
    }
    GT_METHOD void load(const StepParams& p, const StepPlace<C>& s) {
        GT_UNROLL
        for (int v = 0; v < C::VECS; v++) {
            B[v].load(B_at, 4 * C::LANES * v, p.N - s.column(v));
            Cm[v].load(C_at, 4 * C::LANES * v, p.N - s.column(v));
        }
        x.load(x_at, 0, p.P - s.first);
        other.load(other_at, 0, p.P - s.other);
        GT_UNROLL
        for (int k = 0; k < C::HELD; k++)
            if (p.z) z[k].load(z_at, k, p.P - s.held - k);
    }
    GT_METHOD void move(const StepParams& p) {
        B_at.move(p.Bm_stride.t);
        C_at.move(p.Cm_stride.t);
        x_at.move(p.x_stride.t);
        other_at.move(p.x_stride.t);
        z_at.move(p.z_stride.t);
    }
};

/* One token of the lane's rows.  sums: their h C over the lane's columns. */
template <bool IS_CLOSE, class C>
GT_DEV void advance_rows(float (&h)[C::ROWS][C::COLUMNS], float factor, const float (&input)[C::ROWS],
                         const float (&B)[C::COLUMNS], const float (&Cm)[C::COLUMNS], float (&sums)[C::ROWS]) {
    GT_UNROLL
    for (int i = 0; i < C::ROWS; i++) {
        GT_UNROLL
        for (int c = 0; c < C::COLUMNS; c++) {
            const float moved = fma_rn(factor, h[i][c], input[i] * B[c]);
            h[i][c] = IS_CLOSE ? h[i][c] + moved : moved;
            sums[i] = c ? fma_rn(h[i][c], Cm[c], sums[i]) : h[i][c] * Cm[c];
        }
    }
}

/* Sums over the LANES lanes.  sums[0 ... HELD-1] become those of the rows that the lane holds. */
template <class C>
GT_DEV void sum_lanes(float (&sums)[C::ROWS], int lane) {
    float half[C::HALF];
    GT_UNROLL
    for (int i = 0; i < C::HALF; i++) half[i] = sums[i] + shfl_xor(sums[i + C::HALF], C::HALF_LANES);
    reduce_scatter<C::HALF, C::HALF_LANES, 1>(half, lane);
    GT_UNROLL
    for (int k = 0; k < C::HELD; k++) sums[k] = half[k];
}

/* y = 0 of tokens t ... T-1.  y_at: at token t. */
template <class T, class C>
GT_DEV void clear_rows(const StepParams& p, TokenCursor<T> y_at, int t, int writes) {
    for (; t < p.elements.T; t++, y_at.move(p.y_stride.t)) {
        GT_UNROLL
        for (int k = 0; k < C::HELD; k++)
            if (k < writes) y_at.store(k, 0.0f);
    }
}

/* All tokens of the warp's rows of one batch element. */
template <class T, class C>
GT_DEV void step_rows(const StepParams& p, const StepPlace<C>& s) {
    constexpr bool VECTORS = !std::is_same<T, AnyType>::value;
    const StepElement element(p.elements, s.b);
    const float A = p.A[s.h], bias = p.dt_bias ? p.dt_bias[s.h] : 0.0f;
    uint32_t dt = 0; /* lane t: dt of token t */
    if (lane_id() < p.elements.T) dt = load_bits(p.dt, p.dt_dtype, offset_of(p.dt_stride, s.b, lane_id(), s.h));
    StepInputs<T, C> inputs(p, s);
    TokenCursor<T> y_at(p.y, p.dtype, offset_of(p.y_stride, s.b, 0, s.h) + s.held);
    const int writes =
        s.writes ? p.P - s.held : 0; /* how many of the held rows the lane stores, if not more than HELD */
    if (element.is_skipped(p.elements)) {
        clear_rows<T, C>(p, y_at, 0, writes);
        return;
    }
    float* const state = p.state + ((element.row * p.H + s.h) * p.P) * p.N;
    float h[C::ROWS][C::COLUMNS];
    GT_UNROLL
    for (int i = 0; i < C::ROWS; i++) {
        GT_UNROLL
        for (int v = 0; v < C::VECS; v++)
            load_four<VECTORS>(h[i] + 4 * v, state + s.row(i) * p.N + s.column(v),
                               s.row(i) < p.P ? p.N - s.column(v) : 0);
    }
    const TokenScale own = token_scale(p.rule, value_of_bits(dt, p.dt_dtype) + bias, A);
    float skip[C::HELD];
    GT_UNROLL
    for (int k = 0; k < C::HELD; k++) {
        skip[k] = 0.0f;
        if (p.Dskip && s.held + k < p.P) skip[k] = p.Dskip[p.skip_per_channel ? (int64_t)s.h * p.P + s.held + k : s.h];
    }
    GT_NO_UNROLL
    for (int t = 0; t < element.tokens; t++) {
        const float delta = shfl_idx(own.delta, t);
        float factor = shfl_idx(own.factor, t), B[C::COLUMNS], Cm[C::COLUMNS], input[C::ROWS], sums[C::ROWS];
        float held[C::HELD], gate[C::HELD];
        const int growth = shfl_idx(own.growth, t);
        GT_UNROLL
        for (int c = 0; c < C::COLUMNS; c++) B[c] = inputs.B[c / 4].get(c % 4), Cm[c] = inputs.Cm[c / 4].get(c % 4);
        GT_UNROLL
        for (int k = 0; k < C::HELD; k++) {
            gate[k] = p.z ? inputs.z[k].get(0) : 0.0f;
            held[k] = 0.0f; /* x of a held row: one of the lane's first half */
        }
        GT_UNROLL
        for (int i = 0; i < C::HALF; i++) {
            const float x = inputs.x.get(i);
            input[i] = delta * x;
            input[i + C::HALF] = delta * inputs.other.get(i);
            if (s.held - s.first == i / C::HELD * C::HELD) held[i % C::HELD] = x;
        }
        inputs.move(p); /* the next token is loaded where this one was */
        if (t + 1 < element.tokens) inputs.load(p, s);
        if (growth == FAR_OFF) { /* more than fp32 may hold, but its product with a small state fits */
            GT_NO_UNROLL
            for (int k = 0; k < 4; k++) {
                GT_UNROLL
                for (int i = 0; i < C::ROWS * C::COLUMNS; i++) h[i / C::COLUMNS][i % C::COLUMNS] *= factor;
            }
            factor = 1.0f;
        }
        if (growth == CLOSE)
            advance_rows<true, C>(h, factor, input, B, Cm, sums);
        else
            advance_rows<false, C>(h, factor, input, B, Cm, sums);
        sum_lanes<C>(sums, s.lane);
        GT_UNROLL
        for (int k = 0; k < C::HELD; k++) {
            float y = fma_rn(skip[k], held[k], sums[k]);
            if (p.z) y *= silu(gate[k]);
            if (k < writes) y_at.store(k, y);
        }
        y_at.move(p.y_stride.t);
        if (t + 1 != element.commit) continue;
        const int N = made_here(p.N); /* so that addresses are not kept from the loads above */
        GT_UNROLL
        for (int i = 0; i < C::ROWS; i++) {
            GT_UNROLL
            for (int v = 0; v < C::VECS; v++)
                store_four<VECTORS>(state + s.row(i) * N + s.column(v), h[i] + 4 * v,
                                    s.row(i) < p.P ? N - s.column(v) : 0);
        }
    }
    clear_rows<T, C>(p, y_at, element.tokens, writes);
}

template <class T, int LANES, int VECS, int ROWS>
GT_KERNEL(32 * STEP_WARPS, (StepBlocks<T, VECS, ROWS>::VALUE))
step_kernel(const GT_GRID_CONSTANT StepParams p) {
    using C = StepTraits<LANES, VECS, ROWS>;
    StepPlace<C> s;
    int in_strand, part, in_group;
    const int strand = divide(block_x(), p.by_strand, &in_strand);
    s.h = divide(in_strand, p.by_head, &part);
    s.g = divide(s.h, p.by_group, &in_group);
    const int tile = (part * (block_threads() / 32) + warp_id()) * C::TILE;
    if (tile >= p.P) return;
    s.lane = lane_id() % LANES;
    const bool is_upper = s.lane >= C::HALF_LANES;
    const int group = tile + lane_id() / LANES * ROWS;
    s.first = group + (is_upper ? C::HALF : 0);
    s.other = group + (is_upper ? 0 : C::HALF);
    s.held = s.first + s.lane % C::HALF_LANES / C::SAME * C::HELD;
    s.writes = s.lane % C::SAME == 0;
    for (s.b = strand; s.b < p.B; s.b += p.strands) step_rows<T>(p, s);
}

/* ---- launch ---------------------------------------------------------------------------------------------------- */

/* Whether rows of x, B, C and states are whole numbers of aligned fours. */
static inline bool has_step_vectors(const gt_ssd_args& a) {
    return a.N % 4 == 0 && a.P % 4 == 0 && has_fours(a.state_out) && has_fours(a.x, a.x_stride, a.dtype) &&
           has_fours(a.Bm, a.Bm_stride, a.dtype) && has_fours(a.Cm, a.Cm_stride, a.dtype);
}

template <class T, int LANES, int VECS, int ROWS>
static inline gt_status launch_step_of(const gt_ssd_args& a, gt_stream stream) {
    const int64_t tiles = (a.P + StepTraits<LANES, VECS, ROWS>::TILE - 1) / StepTraits<LANES, VECS, ROWS>::TILE;
    const int64_t parts = (tiles + STEP_WARPS - 1) / STEP_WARPS, warps = (tiles + parts - 1) / parts;
    StepParams p = {};
    p.B = a.B, p.H = a.H;
    p.P = (int)a.P, p.N = (int)a.N;
    p.dtype = a.dtype, p.dt_dtype = a.dt_dtype;
    p.rule = {a.softplus, a.dt_limit, a.dt_min, a.dt_max};
    p.skip_per_channel = a.Dskip_per_channel;
    p.x = a.x, p.dt = a.dt, p.Bm = a.Bm, p.Cm = a.Cm, p.z = a.z;
    p.A = a.A, p.Dskip = a.Dskip, p.dt_bias = a.dt_bias;
    p.y = a.y, p.state = a.state_out;
    p.x_stride = a.x_stride, p.dt_stride = a.dt_stride, p.Bm_stride = a.Bm_stride, p.Cm_stride = a.Cm_stride;
    p.z_stride = a.z_stride, p.y_stride = a.y_stride;
    p.elements = step_elements_of(a);
    p.strands = a.T > 0 ? strands(a.B, a.H * parts, INT32_MAX) : 0;
    p.by_strand = divide_by((int)(a.H * parts)), p.by_head = divide_by((int)parts);
    p.by_group = divide_by((int)(a.H / a.G));
    return run("ssd step_kernel", step_kernel<T, LANES, VECS, ROWS>, p.strands * a.H * parts, 32 * (unsigned)warps, 0,
               stream, p);
}

/* The kernel that handles N.  From 5 tokens on with twice the rows, where every multiprocessor still gets 8 warps. */
template <class T>
static inline gt_status launch_step_with(const gt_ssd_args& a, const Device& device, gt_stream stream) {
    if (a.N <= 16) return launch_step_of<T, 4, 1, 8>(a, stream);
    if (a.N <= 32) return launch_step_of<T, 8, 1, 8>(a, stream);
    if (a.N <= 64) return launch_step_of<T, 16, 1, 8>(a, stream);
    if constexpr (!std::is_same<T, AnyType>::value) {
        const double warps = (double)a.B * (double)a.H * (double)a.P / (a.N <= 128 ? 16 : 8);
        if (a.T > 4 && warps >= 8.0 * device.multiprocessors)
            return a.N <= 128 ? launch_step_of<T, 16, 2, 8>(a, stream) : launch_step_of<T, 32, 2, 8>(a, stream);
    }
    return a.N <= 128 ? launch_step_of<T, 16, 2, 4>(a, stream) : launch_step_of<T, 32, 2, 4>(a, stream);
}

static inline gt_status launch_step(const gt_ssd_args& a, const Device& device, gt_stream stream) {
    if (!has_step_vectors(a)) return launch_step_with<AnyType>(a, device, stream);
    return with_activations(a.dtype, [&](auto type) { return launch_step_with<decltype(type)>(a, device, stream); });
}

} /* namespace ssd */
} /* namespace gt */

#endif
