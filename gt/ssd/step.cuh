/* gt/ssd/step.cuh - ssd step: advances every batch element by 1 to 16 tokens and updates its state in place.
 *
 *     h <- exp(Delta A) h + Delta x B^T        y = (h C + Dskip x) silu(z)        token by token
 *
 * TILE.  LANES adjacent lanes own ROWS rows p of a head's state.  A lane has VECS vectors of 4 adjacent columns of each
 * row.  Its first vector begins at column 4 lane; if VECS = 2, its second begins 4 LANES columns further.  A warp has
 * TILE = 32 / LANES * ROWS rows.  T tokens in one call give the same bits as T calls of one token.  A result does not
 * depend on other batch elements or heads.
 *
 *     N up to   LANES   VECS   ROWS    rows of a warp
 *          16       4      1      8    64
 *          32       8      1      8    32
 *          64      16      1      8    16
 *         128      16      2   4, 8    8, 16
 *         256      32      2   4, 8    4, 8
 *     int8 states: each lane has 16 adjacent columns, so that one 16-byte load takes them all
 *          64       4      4      4    32
 *         128       8      4      4    16
 *         256      16      4      4    8
 *
 * Calls of more than 4 tokens take the larger ROWS, because a warp then reads B and C half as often per row.  Calls
 * with 16-bit states also take the larger ROWS, so that each lane has as many bytes in flight as with fp32.
 *
 * SUMS OVER n.  A lane adds its columns in order.  Then a tree adds lanes: first lanes LANES / 2 apart, and adjacent
 * lanes last.  In each stage, two lanes exchange half of their remaining rows.  So with 16 lanes, 8 rows take 4 + 2 + 1
 * + 1 shuffles.  The upper half of the lanes keeps its rows in another order: row i is row i ^ ROWS / 2 of the group.
 * So the first stage needs no selects.  ROWS does not change the tree, so it does not change the bits.
 * DECAY.  Lane t computes Delta and the decay of token t, so all tokens are done at once.  Shuffles then hand them to
 * all lanes.  If -NEAR_ONE < a < 0.05, the decay is kept as expm1(a).  Otherwise it is the single number exp(a), whose
 * rounding changes 1 - exp(a) by at most 2^-19 of its value.
 *
 * INPUTS.  First a block copies B, C and its rows of x and z for all tokens to shared memory, by cp.async.  Then it
 * loads its state, and one barrier completes the copies.  If the block copied one token at a time, each token would
 * wait for L2, and 16 tokens would take 1.2 times as long.
 * STATE.  The state stays in registers for all tokens.  It is stored after the last token that the caller commits.  An
 * int8 state has a scale for each row p.  To find the scale, each lane takes the largest magnitude of its columns, and
 * log2(LANES) shuffles per row combine the lanes.
 * REGISTERS: 32 or 64 numbers of the state; B, C, x and z of the current token and the next one.
 * SHARED MEMORY: for each token B, C and the block's rows of x (and z).  With N = 128, 32 rows and bf16 this is 576
 * bytes per token without z.
 * BYTES per row: 8 N to read and write an fp32 state, or 2 N + 8 for int8.  Per token and row, bf16: x, y (and z) 2
 * each.  Per token and block: 4 N for B and C together, mostly from L2.
 * ISSUE SLOTS of a warp per row and token, N = 128: 8 to advance the state, or 12 if the decay is near 1; 4 for y;
 * about 4 for sums, x, B, C and the rest.
 * GRID: a strand is a set of H * parts blocks that covers all rows: a part is up to STEP_WARPS warps of one head.
 * Every batch element has its own strand, unless the grid would become too large.  Then strands take several batch
 * elements in turn. */
#ifndef GT_SSD_STEP_CUH
#define GT_SSD_STEP_CUH

#include "../recurrence/sequences.cuh"
#include "../recurrence/ssm_step.cuh"

namespace gt {
namespace ssd {

using namespace ssm;

constexpr int STEP_WARPS = 5; /* most warps of a block; 10 tiles of a head (P = 80) make two blocks of 5 warps, so no
                               * warp is idle */
constexpr float NEAR_ONE = 0x1p-6f;

struct StepParams {
    int64_t B, H;
    int P, N;
    gt_dtype dtype, dt_dtype;
    DeltaRule rule;
    int skip_per_channel;
    const void *x, *dt, *Bm, *Cm, *z;
    const float* A;
    const void *Dskip, *dt_bias;
    gt_dtype parameter_dtype;
    void* y;
    void* state; /* [slot_capacity,H,P,N] */
    int64_t row_stride;
    gt_dtype state_dtype;
    float* scale; /* [slot_capacity,H,P]: scales of int8 states */
    int64_t scale_stride;
    StepRounding rounding;
    gt_stride x_stride, dt_stride, Bm_stride, Cm_stride, z_stride, y_stride;
    StepElements elements;
    int64_t strands;
    Divider by_strand, by_head, by_group; /* divide by the blocks of a strand, the blocks of a head and the heads of a
                                           * group */
};

template <int LANES_, int VECS_, int ROWS_>
struct StepTraits {
    static constexpr int LANES = LANES_, VECS = VECS_, ROWS = ROWS_;
    static constexpr bool IS_INT8 = false;
    static constexpr int COLUMNS = 4 * VECS, GROUPS = 32 / LANES, TILE = GROUPS * ROWS;
    static constexpr int FIRST = 4, NEXT = 4 * LANES; /* the step in columns from lane to lane, and from vector to
                                                       * vector */
    static constexpr int HALF = ROWS / 2, HALF_LANES = LANES / 2;
    /* After the sum over lanes, a lane holds the sums of HELD rows, and SAME adjacent lanes hold the same sums. */
    static constexpr int HELD = HALF > HALF_LANES ? HALF / HALF_LANES : 1;
    static constexpr int SAME = HALF_LANES > HALF ? HALF_LANES / HALF : 1;
};

/* StepTraits for int8 states. */
template <int LANES>
struct Int8StepTraits : StepTraits<LANES, 4, 4> {
    static constexpr bool IS_INT8 = true;
    static constexpr int FIRST = 16, NEXT = 4;
};

/* The least number of blocks per multiprocessor, which limits the registers per thread.  So a multiprocessor runs 15 or
 * 20 warps with 4 KB of loads in flight each, or 10 to 15 warps with 8 KB each. */
template <class T, int VECS, int ROWS>
struct StepBlocks {
    static constexpr bool IS_WIDE = VECS * ROWS > 8;
    static constexpr int VALUE = std::is_same<T, AnyType>::value || (std::is_same<T, float>::value && IS_WIDE) ? 2
                                 : std::is_same<T, bf16>::value && ROWS == 4                                   ? 4
                                                                                                               : 3;
};

constexpr int INT8_STEP_WARPS = 4;

/* StepBlocks for int8 states: 16 warps with 2 KB of loads in flight each.  Types that would spill get 12 or 8 warps. */
template <class T>
struct Int8StepBlocks {
    static constexpr int VALUE = std::is_same<T, AnyType>::value ? 2 : std::is_same<T, bf16>::value ? 4 : 3;
};

/* The batch element, head and rows of a lane. */
template <class C>
struct StepPlace {
    int64_t b;
    int h, g;
    int block_row;    /* first row of the block */
    int lane;         /* index among the lanes of a row */
    int first, other; /* the lane's ROWS rows are two runs of HALF rows: one begins at `first`, the next at `other` */
    int held;         /* first of the rows whose y the lane holds */
    bool writes;      /* this lane stores y; the other SAME - 1 lanes with the same y do not */

    /* Sets the lane's rows.  tile: the warp's first row. */
    GT_METHOD void take_rows(int tile) {
        lane = lane_id() % C::LANES;
        const bool is_upper = lane >= C::HALF_LANES;
        const int group = tile + lane_id() / C::LANES * C::ROWS;
        first = group + (is_upper ? C::HALF : 0);
        other = group + (is_upper ? 0 : C::HALF);
        held = first + lane % C::HALF_LANES / C::SAME * C::HELD;
        writes = lane % C::SAME == 0;
    }
    GT_METHOD int row(int i) const { return i < C::HALF ? first + i : other + i - C::HALF; }
    GT_METHOD int column(int v) const { return C::FIRST * lane + C::NEXT * v; }
};

/* How a token scales the state. */
enum Growth { PLAIN, CLOSE, FAR_OFF }; /* PLAIN: factor times h; CLOSE: h + factor h; FAR_OFF: factor^4 times h */

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

/* ---- inputs in shared memory ---------------------------------------------------------------------------------------
 * A block keeps B, C and its rows of x and z of all tokens there (INPUTS above). */

/* The type of a number in shared memory. */
template <class T>
struct SharedElement {
    using Type = T;
};
template <>
struct SharedElement<AnyType> {
    using Type = float;
};

/* The size of a token in shared memory, in numbers: B, C, the block's rows of x, and the rows of z if there is z.  NP:
 * columns of B and of C in shared memory; columns from N on are 0. */
GT_HD int shared_pitch(int NP, int rows, bool has_z) { return 2 * NP + (has_z ? 2 : 1) * rows; }

/* COUNT adjacent numbers from shared memory.  get() converts them to fp32. */
template <class T, int COUNT>
struct SharedPiece {
    Vec<T, COUNT> bits;
    GT_METHOD void load(uint32_t from) { bits = lds<Vec<T, COUNT>>(from); }
    GT_METHOD float get(int i) const { return bits.get(i); }
};

template <int COUNT>
struct SharedPiece<AnyType, COUNT> : SharedPiece<float, COUNT> {};

/* copy_piece() copies COPY adjacent numbers to shared memory.  valid: how many of them exist, all or none; missing
 * numbers become 0.  Unless T is AnyType, the copies are complete only after cp_async_wait. */
template <class T>
constexpr int COPY = std::is_same<T, AnyType>::value ? 1 : 4;

template <class T>
GT_DEV void copy_piece(uint32_t to, const TokenCursor<T>& from, int valid) {
    if constexpr (std::is_same<T, AnyType>::value) {
        Piece<T, 1> piece;
        piece.load(from, 0, valid);
        sts<float>(to, piece.get(0));
    } else {
        cp_async<4 * sizeof(T)>(to, from.at, valid > 0 ? 4 * (int)sizeof(T) : 0);
    }
}

/* A lane's inputs of one token: B, C, x and z.  A derived type copies them to shared memory.  Rows beyond the head may
 * hold any values, because no result uses them. */
template <class T, class C>
struct SharedInputs {
    static constexpr uint32_t SIZE = sizeof(typename SharedElement<T>::Type);
    static constexpr int NP = C::LANES * C::COLUMNS;
    uint32_t at, pitch; /* at: address of the current token; pitch: size of a token in bytes */
    SharedPiece<T, 4> B[C::VECS], Cm[C::VECS];
    SharedPiece<T, C::HALF> x, other;
    SharedPiece<T, 1> held[C::HELD], z[C::HELD]; /* for the rows whose y the lane holds */

    GT_METHOD static int rows() { return block_threads() / 32 * C::TILE; }

    /* The index in shared memory of number n of B and C.  For int8 states, the vectors with the same index v in
     * adjacent lanes become adjacent, so that lanes load from different banks. */
    GT_METHOD static int place(int n) {
        if (!C::IS_INT8) return n;
        const int column = n % NP, vector = column / 4;
        return n - column + 4 * (vector % C::VECS * C::LANES + vector / C::VECS) + column % 4;
    }
    /* Copies numbers first to end - 1 of every token, counted in the order B, C, x, z.  One copy never covers two
     * tensors. */
    GT_METHOD static void copy(const StepParams& p, const StepPlace<C>& s, int first, int end) {
        const uint32_t token = SIZE * (uint32_t)shared_pitch(NP, rows(), p.z);
        for (int n = first + COPY<T> * thread_id(); n < end; n += COPY<T> * block_threads()) {
            const bool is_C = n >= NP, is_x = n >= 2 * NP, is_z = n >= 2 * NP + rows();
            const void* const data = is_z ? p.z : is_x ? p.x : is_C ? p.Cm : p.Bm;
            const gt_stride stride = is_z ? p.z_stride : is_x ? p.x_stride : is_C ? p.Cm_stride : p.Bm_stride;
            const int i = n - (is_z ? 2 * NP + rows() : is_x ? 2 * NP : is_C ? NP : 0) + (is_x ? s.block_row : 0);
            const int valid = (is_x ? p.P : p.N) - i;
            TokenCursor<T> from(data, p.dtype, offset_of(stride, s.b, 0, is_x ? s.h : s.g) + (valid > 0 ? i : 0));
            uint32_t to = smem_base() + SIZE * (uint32_t)(is_x ? n : place(n));
            for (int t = 0; t < p.elements.T; t++, to += token, from.move(stride.t)) copy_piece(to, from, valid);
        }
        cp_async_commit();
    }
    /* Waits at a barrier until all copies are complete; then the lane loads token 0. */
    GT_METHOD void meet(const StepParams& p, const StepPlace<C>& s) {
        cp_async_wait<0>();
        sync_threads();
        at = smem_base();
        pitch = SIZE * (uint32_t)shared_pitch(NP, rows(), p.z);
        load(p, s);
    }
    GT_METHOD void load(const StepParams& p, const StepPlace<C>& s) {
        const uint32_t columns = at + SIZE * (uint32_t)(4 * s.lane),
                       x_at = at + SIZE * (uint32_t)(2 * NP - s.block_row);
        GT_UNROLL
        for (int v = 0; v < C::VECS; v++) {
            B[v].load(columns + SIZE * (uint32_t)(4 * C::LANES * v));
            Cm[v].load(columns + SIZE * (uint32_t)(NP + 4 * C::LANES * v));
        }
        x.load(x_at + SIZE * (uint32_t)s.first);
        other.load(x_at + SIZE * (uint32_t)s.other);
        GT_UNROLL
        for (int k = 0; k < C::HELD; k++) {
            held[k].load(x_at + SIZE * (uint32_t)(s.held + k));
            if (p.z) z[k].load(x_at + SIZE * (uint32_t)(rows() + s.held + k));
        }
    }
    GT_METHOD void move() { at += pitch; }
};

/* SharedInputs that are copied from the tensors of the call.  The constructor issues all copies, before the loads of
 * the state. */
template <class T, class C>
struct StepInputs : SharedInputs<T, C> {
    GT_METHOD StepInputs(const StepParams& p, const StepPlace<C>& s, const StepElement&) {
        using Base = SharedInputs<T, C>;
        Base::copy(p, s, 0, shared_pitch(Base::NP, Base::rows(), p.z));
    }
    /* Called after the loads of the state are issued, before the first token. */
    GT_METHOD void begin(const StepParams& p, const StepPlace<C>& s) { SharedInputs<T, C>::meet(p, s); }
};

/* Advances the lane's rows by one token.  sums[i]: row i of h C, summed over the lane's columns only. */
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

/* Adds `sums` over the LANES lanes.  Then sums[0] to sums[HELD-1] are the totals of the rows from StepPlace::held
 * on. */
template <class C>
GT_DEV void sum_lanes(float (&sums)[C::ROWS], int lane) {
    float half[C::HALF];
    GT_UNROLL
    for (int i = 0; i < C::HALF; i++) half[i] = sums[i] + shfl_xor(sums[i + C::HALF], C::HALF_LANES);
    reduce_scatter<C::HALF, C::HALF_LANES, 1>(half, lane);
    GT_UNROLL
    for (int k = 0; k < C::HELD; k++) sums[k] = half[k];
}

/* Stores y = 0 for tokens t ... T-1.  y_at: at token t. */
template <class T, class C>
GT_DEV void clear_rows(const StepParams& p, TokenCursor<T> y_at, int t, int writes) {
    for (; t < p.elements.T; t++, y_at.move(p.y_stride.t)) {
        GT_UNROLL
        for (int k = 0; k < C::HELD; k++)
            if (k < writes) y_at.store(k, 0.0f);
    }
}

/* Runs all tokens of one batch element for the warp's rows.  Inputs: StepInputs, or conv_ssd's type with the same
 * members.  MIXED: the dtypes of state, Dskip and dt_bias are known only at run time.  Without MIXED, all of these are
 * fp32. */
template <class T, class Inputs, bool MIXED, class Params, class C>
GT_DEV void step_rows(const Params& p, const StepPlace<C>& s) {
    constexpr bool VECTORS = !std::is_same<T, AnyType>::value;
    const StepElement element(p.elements, s.b);
    const gt_dtype parameter_dtype = MIXED ? p.parameter_dtype : GT_F32;
    const float A = p.A[s.h];
    const uint32_t bias = p.dt_bias ? load_bits(p.dt_bias, parameter_dtype, s.h) : 0;
    uint32_t dt = 0; /* lane t: dt of token t */
    if (lane_id() < p.elements.T) dt = load_bits(p.dt, p.dt_dtype, offset_of(p.dt_stride, s.b, lane_id(), s.h));
    Inputs inputs(p, s, element);
    TokenCursor<T> y_at(p.y, p.dtype, offset_of(p.y_stride, s.b, 0, s.h) + s.held);
    const int writes = s.writes ? p.P - s.held : 0; /* how many rows from `held` on the lane may store; it stores HELD
                                                     * at most */
    if (element.is_skipped(p.elements)) {
        cp_async_wait<0>();
        clear_rows<T, C>(p, y_at, 0, writes);
        return;
    }
    const StepState state = {p.state, MIXED ? p.state_dtype : GT_F32,
                             element.row * p.row_stride + (int64_t)s.h * p.P * p.N};
    float h[C::ROWS][C::COLUMNS];
    const auto piece = [&](int i, int N) {
        const int row = s.row(i / C::VECS), column = s.column(i % C::VECS);
        return StatePiece{row * N + column, row < p.P ? N - column : 0, row * (int)gt_row_groups(N) + column / 4};
    };
    const Int8State int8 = {static_cast<int8_t*>(p.state), p.scale, state.at,
                            element.row * p.scale_stride + (int64_t)s.h * p.P};
    const auto int8_row = [&](int i, int N) {
        const StatePiece first = piece(C::VECS * i, N);
        return Int8Row{first.offset, first.valid, s.row(i), first.group};
    };
    if constexpr (C::IS_INT8)
        load_int8_state<VECTORS, C::ROWS, C::VECS, 4>(h[0], int8, [&](int i) { return int8_row(i, p.N); });
    else
        load_step_state<VECTORS, C::ROWS * C::VECS>(h[0], state, [&](int i) { return piece(i, p.N); });
    uint32_t skip_bits[C::HELD];
    GT_UNROLL
    for (int k = 0; k < C::HELD; k++) {
        const int row = s.held + k;
        skip_bits[k] = p.Dskip && row < p.P
                           ? load_bits(p.Dskip, parameter_dtype, p.skip_per_channel ? (int64_t)s.h * p.P + row : s.h)
                           : 0;
    }
    const TokenScale own = token_scale(p.rule, value_of_bits(dt, p.dt_dtype) + value_of_bits(bias, parameter_dtype), A);
    float skip[C::HELD];
    GT_UNROLL
    for (int k = 0; k < C::HELD; k++) skip[k] = value_of_bits(skip_bits[k], parameter_dtype);
    inputs.begin(p, s);
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
            held[k] = inputs.held[k].get(0);
        }
        GT_UNROLL
        for (int i = 0; i < C::HALF; i++) {
            input[i] = delta * inputs.x.get(i);
            input[i + C::HALF] = delta * inputs.other.get(i);
        }
        inputs.move(); /* the next token's inputs overwrite the current ones */
        if (t + 1 < element.tokens) inputs.load(p, s);
        if (growth == FAR_OFF) { /* the factor is beyond fp32, but its product with a small state may fit */
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
        const int N = made_here(p.N); /* otherwise the addresses of the loads above would stay in registers */
        const int64_t first_group = s.h * (p.P * gt_row_groups(N));
        if constexpr (C::IS_INT8)
            store_int8_state<VECTORS, C::ROWS, C::VECS, 4, C::LANES, C::HALF>(
                int8, h[0], [&](int i) { return int8_row(i, N); }, s.lane, p.rounding, s.b, first_group);
        else
            store_step_state<VECTORS, C::ROWS * C::VECS>(
                state, h[0], [&](int i) { return piece(i, N); }, p.rounding, s.b, first_group);
    }
    clear_rows<T, C>(p, y_at, element.tokens, writes);
}

template <class T, class C, bool MIXED>
GT_DEV void step_block(const StepParams& p) {
    StepPlace<C> s;
    release_chain(); /* In a step of wkv_ssm, wkv6's kernel follows.  It shares no memory with this kernel, so it may
                      * start early. */
    int in_strand, part, in_group;
    const int strand = divide(block_x(), p.by_strand, &in_strand);
    s.h = divide(in_strand, p.by_head, &part);
    s.g = divide(s.h, p.by_group, &in_group);
    s.block_row = part * (block_threads() / 32) * C::TILE;
    s.take_rows(s.block_row + warp_id() * C::TILE); /* a warp without rows takes part in the copies, too */
    for (s.b = strand; s.b < p.B; s.b += p.strands) {
        step_rows<T, StepInputs<T, C>, MIXED>(p, s);
        if (s.b + p.strands < p.B) sync_threads(); /* before shared memory is written again */
    }
}

template <class T, int LANES, int VECS, int ROWS, bool MIXED>
GT_KERNEL(32 * STEP_WARPS, (StepBlocks<T, VECS, ROWS>::VALUE))
step_kernel(const GT_GRID_CONSTANT StepParams p) {
    step_block<T, StepTraits<LANES, VECS, ROWS>, MIXED>(p);
}

template <class T, int LANES>
GT_KERNEL(32 * INT8_STEP_WARPS, (Int8StepBlocks<T>::VALUE))
step_int8_kernel(const GT_GRID_CONSTANT StepParams p) {
    step_block<T, Int8StepTraits<LANES>, true>(p);
}

/* ---- launch ---------------------------------------------------------------------------------------------------- */

/* Whether all rows of x, z, B, C and states consist of aligned vectors of four numbers, or of 16 numbers for int8
 * states. */
static inline bool has_step_vectors(const gt_ssd_args& a) {
    if (a.state_dtype == GT_INT8 && (a.N % 16 || (uintptr_t)a.state_out % 16 || a.state_out_stride % 16)) return false;
    return a.N % 4 == 0 && a.P % 4 == 0 && has_aligned_fours(a.state_out, dtype_or_fp32(a.state_dtype)) &&
           a.state_out_stride % 4 == 0 && has_fours(a.x, a.x_stride, a.dtype) &&
           has_fours(a.Bm, a.Bm_stride, a.dtype) && has_fours(a.Cm, a.Cm_stride, a.dtype) &&
           has_fours(a.z, a.z_stride, a.dtype);
}

/* The blocks that share a head's rows, and the warps of each block. */
struct StepGrid {
    int64_t parts, warps; /* parts: blocks of a head; warps: warps of a block */
    StepGrid(int64_t P, int tile, int most_warps) {
        const int64_t tiles = (P + tile - 1) / tile;
        parts = (tiles + most_warps - 1) / most_warps;
        warps = (tiles + parts - 1) / parts;
    }
};

/* a: prepared arguments; T is at least 1. */
static inline StepParams step_params_of(const gt_ssd_args& a, const StepGrid& grid) {
    StepParams p = {};
    p.B = a.B, p.H = a.H;
    p.P = (int)a.P, p.N = (int)a.N;
    p.dtype = a.dtype, p.dt_dtype = a.dt_dtype;
    p.rule = {a.softplus, a.dt_limit, a.dt_min, a.dt_max};
    p.skip_per_channel = a.Dskip_per_channel;
    p.x = a.x, p.dt = a.dt, p.Bm = a.Bm, p.Cm = a.Cm, p.z = a.z;
    p.A = a.A, p.Dskip = a.Dskip, p.dt_bias = a.dt_bias;
    p.parameter_dtype = dtype_or_fp32(a.parameter_dtype), p.state_dtype = dtype_or_fp32(a.state_dtype);
    p.y = a.y, p.state = a.state_out, p.row_stride = a.state_out_stride;
    p.scale = a.state_scale, p.scale_stride = a.state_scale_stride;
    p.x_stride = a.x_stride, p.dt_stride = a.dt_stride, p.Bm_stride = a.Bm_stride, p.Cm_stride = a.Cm_stride;
    p.z_stride = a.z_stride, p.y_stride = a.y_stride;
    p.elements = step_elements_of(a);
    p.rounding = step_rounding_of(a);
    p.strands = strands(a.B, a.H * grid.parts, INT32_MAX);
    p.by_strand = divide_by((int)(a.H * grid.parts)), p.by_head = divide_by((int)grid.parts);
    p.by_group = divide_by((int)(a.H / a.G));
    return p;
}

/* Calls launch(StepTraits) with the traits for N.  If N > 64, a lane may get 8 rows instead of 4.  This requires 5
 * tokens or more, or a 16-bit state (TILE above), and 8 warps for every multiprocessor. */
template <class T, class Launch>
static inline gt_status with_step_size(const gt_ssd_args& a, const Device& device, const Launch& launch) {
    if constexpr (BUILT_N32) {
        if (a.N <= 16) return launch(StepTraits<4, 1, 8>());
        if (a.N <= 32) return launch(StepTraits<8, 1, 8>());
    }
    if constexpr (BUILT_N64)
        if (a.N <= 64) return launch(StepTraits<16, 1, 8>());
    if constexpr (!std::is_same<T, AnyType>::value) {
        const double warps = (double)a.B * (double)a.H * (double)a.P / (a.N <= 128 ? 16 : 8);
        const bool is_wide = a.T > 4 || dtype_or_fp32(a.state_dtype) != GT_F32;
        if (is_wide && warps >= 8.0 * device.multiprocessors)
            return a.N <= 128 ? launch(StepTraits<16, 2, 8>()) : launch(StepTraits<32, 2, 8>());
    }
    return a.N <= 128 ? launch(StepTraits<16, 2, 4>()) : launch(StepTraits<32, 2, 4>());
}

template <class T, class C>
static inline gt_status launch_step_of(const char* name, void (*kernel)(StepParams), int most_warps,
                                       const gt_ssd_args& a, Chain& chain) {
    const StepGrid grid(a.P, C::TILE, most_warps);
    const int pitch = shared_pitch(SharedInputs<T, C>::NP, (int)grid.warps * C::TILE, a.z);
    const StepParams p = step_params_of(a, grid);
    return run(name, kernel, p.strands * a.H * grid.parts, 32 * (unsigned)grid.warps,
               (size_t)a.T * (size_t)pitch * SharedInputs<T, C>::SIZE, chain, p);
}

template <class T, bool MIXED>
static inline gt_status launch_step_with(const gt_ssd_args& a, const Device& device, Chain& chain) {
    return with_step_size<T>(a, device, [&](auto traits) {
        using C = decltype(traits);
        return launch_step_of<T, C>("ssd step_kernel", step_kernel<T, C::LANES, C::VECS, C::ROWS, MIXED>, STEP_WARPS, a,
                                    chain);
    });
}

template <class T, int LANES>
static inline gt_status launch_int8_step_of(const gt_ssd_args& a, Chain& chain) {
    return launch_step_of<T, Int8StepTraits<LANES>>("ssd step_int8_kernel", step_int8_kernel<T, LANES>, INT8_STEP_WARPS,
                                                    a, chain);
}

template <class T>
static inline gt_status launch_int8_step(const gt_ssd_args& a, Chain& chain) {
    if constexpr (BUILT_N64)
        if (a.N <= 64) return launch_int8_step_of<T, 4>(a, chain);
    return a.N <= 128 ? launch_int8_step_of<T, 8>(a, chain) : launch_int8_step_of<T, 16>(a, chain);
}

/* Launches the step kernel.  The function is a template, so a file that includes this one only for device code does not
 * compile the kernels again. */
template <class Stream>
static inline gt_status launch_step(const gt_ssd_args& a, const Device& device, Stream& chain) {
    if (a.T == 0) return GT_OK;
    if (a.state_dtype == GT_INT8) {
        if (!has_step_vectors(a)) return launch_int8_step<AnyType>(a, chain);
        return with_activations(a.dtype, [&](auto type) { return launch_int8_step<decltype(type)>(a, chain); });
    }
    if (!has_step_vectors(a)) return launch_step_with<AnyType, true>(a, device, chain);
    const bool is_mixed = dtype_or_fp32(a.state_dtype) != GT_F32 || dtype_or_fp32(a.parameter_dtype) != GT_F32;
    return with_activations(a.dtype, [&](auto type) {
        using T = decltype(type);
        if constexpr (!std::is_same<T, AnyType>::value)
            if (!is_mixed) return launch_step_with<T, false>(a, device, chain);
        return launch_step_with<T, true>(a, device, chain);
    });
}

} /* namespace ssd */
} /* namespace gt */

#endif
