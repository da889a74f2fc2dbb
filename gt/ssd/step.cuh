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
 * STATE.  The state stays in registers for all tokens.  It is stored after the last token that the caller commits.
 * INT8 STATES have a kernel of their own, because instructions limit its speed, not bytes.  So a warp takes up to
 * INT8_TILES tiles of a head, and up to INT8_HEADS heads.  It copies B and C, and computes the decays, once for all of
 * them.  While the warp computes a tile, cp.async copies the next three to shared memory.  Each row p has a scale.  To
 * find it, each lane takes the largest magnitude of its columns, and the tree of SUMS OVER n joins the lanes.  Then one
 * lane divides, and shuffles hand the inverse of the scale to the other lanes of the row.  All decays are the single
 * number exp(a), because the state's rounding is coarser.
 * REGISTERS: 32 or 64 numbers of the state; B, C, x and z of the current token and the next one.
 * SHARED MEMORY: for each token B, C and the block's rows of x (and z).  With N = 128, 32 rows and bf16 this is 576
 * bytes per token without z.  Int8 states: also the next tiles, 2 KB each.
 * BYTES per row: 8 N to read and write an fp32 state, or 2 N + 8 for int8.  Per token and row, bf16: x, y (and z) 2
 * each.  Per token and block: 4 N for B and C together, mostly from L2.
 * ISSUE SLOTS of a warp per row and token, N = 128: 8 to advance the state, or 12 if the decay is near 1; 4 for y;
 * about 4 for sums, x, B, C and the rest.
 * ISSUE SLOTS of a warp for each number of an int8 state, N = 128, bf16, one token: 3.25 to unpack, 2 to advance, 1
 * for y, 1 for the largest magnitude, 1.75 to round, 0.6 to load B and C, 5 for the rest.
 * GRID: a strand is a set of H * parts blocks that covers all rows: a part is up to STEP_WARPS warps of one head.
 * Every batch element has its own strand, unless the grid would become too large.  Then strands take several batch
 * elements in turn.  With int8 states a block may take several heads, so a strand has fewer blocks. */
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
    struct {
        int tiles, heads;           /* tiles of each head that a warp takes; heads that it takes */
        int count, end;             /* tiles of all these heads; their rows: heads P */
        int rows;                   /* rows of a block in shared memory, of all its heads */
        int has_channel_skips;      /* Dskip has a number for each row */
        uint32_t pitch;             /* size of a token's inputs in shared memory */
        Divider by_head, by_tokens; /* divide by P and T */
    } int8;                         /* for int8 states only */
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

constexpr int INT8_TILES = 4; /* tiles of a warp in shared memory, and most tiles of a head that a block takes */
constexpr int INT8_HEADS = 4; /* most heads that a warp takes */

/* StepBlocks for int8 states. */
template <class T, bool IS_RANDOM>
struct Int8StepBlocks {
    static constexpr int VALUE = std::is_same<T, AnyType>::value || IS_RANDOM ? 2 : 4;
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
    int tiles = 1;    /* of each warp of the block; more than 1 only with int8 states */

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
            uint32_t to = smem_base() + SIZE * (uint32_t)n;
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

/* Joins `rows` over the LANES lanes by join(a, b).  Then rows[0] to rows[HELD-1] are the results for the rows from
 * StepPlace::held on. */
template <class C, class Join>
GT_DEV void join_lanes(float (&rows)[C::ROWS], int lane, const Join& join) {
    float half[C::HALF];
    GT_UNROLL
    for (int i = 0; i < C::HALF; i++) half[i] = join(rows[i], shfl_xor(rows[i + C::HALF], C::HALF_LANES));
    reduce_scatter<C::HALF, C::HALF_LANES, 1>(half, lane, join);
    GT_UNROLL
    for (int k = 0; k < C::HELD; k++) rows[k] = half[k];
}

template <class C>
GT_DEV void sum_lanes(float (&sums)[C::ROWS], int lane) {
    join_lanes<C>(sums, lane, [](float a, float b) { return a + b; });
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
        store_step_state<VECTORS, C::ROWS * C::VECS>(
            state, h[0], [&](int i) { return piece(i, N); }, p.rounding, s.b, first_group);
    }
    clear_rows<T, C>(p, y_at, element.tokens, writes);
}

/* ---- int8 states ------------------------------------------------------------------------------------------------ */

/* The inputs of a block in shared memory: for each token B, C, the rows of x, and the rows of z if there is z.  NP:
 * columns of B and of C; columns from N on are 0. */
template <class T, class C>
struct Int8Inputs {
    static constexpr uint32_t SIZE = sizeof(typename SharedElement<T>::Type);
    static constexpr int NP = C::LANES * C::COLUMNS;

    /* The index of column 0 of the lane's vector v of B.  Vectors with the same v of adjacent lanes are adjacent, so
     * that lanes load from different banks. */
    GT_METHOD static int column(const StepPlace<C>& s, int v) { return 4 * (s.lane + C::LANES * v); }

    /* Starts to copy COPY numbers of every token, from number n of a row of the tensor on.  Numbers from `end` on
     * become 0.  place: index in shared memory. */
    GT_METHOD static void copy_run(const StepParams& p, const void* data, int64_t row, int64_t stride, int n, int end,
                                   int place) {
        TokenCursor<T> from(data, p.dtype, row + (n < end ? n : 0));
        uint32_t at = smem_base() + SIZE * (uint32_t)place;
        GT_NO_UNROLL
        for (int t = 0; t < p.elements.T; t++, at += p.int8.pitch, from.move(stride)) copy_piece(at, from, end - n);
    }
    GT_METHOD static void copy(const StepParams& p, const StepPlace<C>& s) {
        const int64_t B = offset_of(p.Bm_stride, s.b, 0, s.g), Cm = offset_of(p.Cm_stride, s.b, 0, s.g);
        GT_NO_UNROLL
        for (int n = COPY<T> * thread_id(); n < NP; n += COPY<T> * block_threads()) {
            const uint32_t vector = (uint32_t)n / 4;
            const int place = (int)(4 * (vector % C::VECS * C::LANES + vector / C::VECS) + (uint32_t)n % 4);
            copy_run(p, p.Bm, B, p.Bm_stride.t, n, p.N, place);
            copy_run(p, p.Cm, Cm, p.Cm_stride.t, n, p.N, NP + place);
        }
        GT_NO_UNROLL
        for (int n = COPY<T> * thread_id(); n < p.int8.rows; n += COPY<T> * block_threads()) {
            int row;
            const int head = divide(s.block_row + n, p.int8.by_head, &row), end = head < p.int8.heads ? p.P : 0;
            const int h = s.h + (end ? head : 0);
            copy_run(p, p.x, offset_of(p.x_stride, s.b, 0, h), p.x_stride.t, row, end, 2 * NP + n);
            if (p.z)
                copy_run(p, p.z, offset_of(p.z_stride, s.b, 0, h), p.z_stride.t, row, end, 2 * NP + p.int8.rows + n);
        }
    }
};

/* A tile of an int8 state in shared memory: 16 bytes of each lane for each of its rows, then the scales of the rows.  A
 * lane reads only its own 16 bytes, but scales that other lanes copied. */
template <class C>
struct Int8Tile {
    static constexpr uint32_t SCALES = 512 * C::ROWS, BYTES = SCALES + 4 * C::TILE;
    static_assert(C::TILE <= 32, "a lane copies one scale");

    /* Starts the copies.  data, scale: of row 0.  tile: the tile's first row.  end: the number of rows.  Columns from N
     * on become 0.  Rows that do not exist get numbers of the last row, and no result uses them. */
    GT_METHOD static void fetch(const StepPlace<C>& s, const int8_t* data, const float* scale, int N, int tile, int end,
                                uint32_t to) {
        const int column = s.column(0) < N ? s.column(0) : 0, copied = s.column(0) < N ? 16 : 0;
        const uint32_t at = to + (uint32_t)(16 * lane_id());
        int scaled = tile + lane_id();
        if (tile + C::TILE <= end) {
            const int8_t *const first = data + (tile + s.first) * N + column, *const other =
                                                                                  data + (tile + s.other) * N + column;
            GT_UNROLL
            for (int i = 0; i < C::ROWS; i++)
                cp_async<16>(at + (uint32_t)(512 * i), (i < C::HALF ? first : other) + i % C::HALF * N, copied);
        } else {
            GT_UNROLL
            for (int i = 0; i < C::ROWS; i++) {
                const int row = tile + s.row(i);
                cp_async<16>(at + (uint32_t)(512 * i), data + (row < end ? row : end - 1) * N + column, copied);
            }
            if (scaled >= end) scaled = end - 1;
        }
        if (lane_id() < C::TILE) cp_async<4>(to + SCALES + (uint32_t)(4 * lane_id()), scale + scaled);
    }
    /* Converts the lane's rows to fp32. */
    GT_METHOD static void read(const StepPlace<C>& s, uint32_t from, float (&h)[C::ROWS][C::COLUMNS]) {
        SharedPiece<float, C::HALF> first, other;
        first.load(from + SCALES + (uint32_t)(4 * s.first));
        other.load(from + SCALES + (uint32_t)(4 * s.other));
        GT_UNROLL
        for (int i = 0; i < C::ROWS; i++) {
            const uint4 v = lds<uint4>(from + (uint32_t)(512 * i + 16 * lane_id()));
            const float scale = i < C::HALF ? first.get(i) : other.get(i - C::HALF);
            unpack_int8(h[i], v.x, scale), unpack_int8(h[i] + 4, v.y, scale);
            unpack_int8(h[i] + 8, v.z, scale), unpack_int8(h[i] + 12, v.w, scale);
        }
    }
};

/* Rounds the lane's rows of a tile, and stores their integers.  data: of the tile's first row, which is row `tile` of
 * `end` rows, counted from row 0 of head s.h on.  IS_RANDOM: stochastic rounding. */
template <bool VECTORS, bool IS_RANDOM, class C>
GT_DEV void store_int8_rows(const StepParams& p, const StepPlace<C>& s, int8_t* data, int tile, int end,
                            const float (&inverse)[C::ROWS], const float (&h)[C::ROWS][C::COLUMNS]) {
    const int N = p.N, left = s.column(0) < N ? end - tile : 0;
    int8_t *const first = data + s.first * N + s.column(0), *const other = data + s.other * N + s.column(0);
    GT_UNROLL
    for (int i = 0; i < C::ROWS; i++) {
        int8_t* const to = (i < C::HALF ? first : other) + i % C::HALF * N;
        uint32_t words[C::VECS];
        GT_UNROLL
        for (int v = 0; v < C::VECS; v++) {
            gt_random r;
            if constexpr (IS_RANDOM) {
                const int64_t row = (int64_t)s.h * p.P + made_here(tile + s.row(i));
                r = gt_random_of_group(p.rounding.seed, p.rounding.steps[s.b],
                                       row * gt_row_groups(N) + s.column(v) / 4);
            }
            words[v] = pack_finite_int8(h[i] + 4 * v, inverse[i], IS_RANDOM ? &r : nullptr);
            if (!IS_RANDOM) words[v] = (uint32_t)made_here((int)words[v]); /* or a branch skips the computation */
        }
        if constexpr (VECTORS) {
            if (s.row(i) < left) stg<uint4>(to, uint4{words[0], words[1], words[2], words[3]});
        } else {
            GT_UNROLL
            for (int v = 0; v < C::VECS; v++)
                store_int8_word<false>(to + 4 * v, words[v], s.row(i) < left ? N - s.column(v) : 0);
        }
    }
}

/* Stores a tile.  scale: of the tile's first row.  Other parameters: as above. */
template <bool VECTORS, bool IS_RANDOM, class C>
GT_DEV void store_int8_tile(const StepParams& p, const StepPlace<C>& s, int8_t* data, float* scale, int tile, int end,
                            float (&h)[C::ROWS][C::COLUMNS]) {
    float most[C::ROWS], inverse[C::ROWS];
    GT_UNROLL
    for (int i = 0; i < C::ROWS; i++) {
        most[i] = 0.0f;
        GT_UNROLL
        for (int c = 0; c < C::COLUMNS; c++) most[i] = larger_or_nan(most[i], h[i][c]);
    }
    join_lanes<C>(most, s.lane, [](float a, float b) { return larger_or_nan(a, b); });
    const gt_row_scale held = gt_scale_of_row(most[0]); /* of row s.held: one lane divides for all lanes of a row */
    if (s.writes && s.held < end - tile) scale[s.held] = held.scale;
    const int holder = lane_id() & ~(C::HALF_LANES - 1);
    GT_UNROLL
    for (int i = 0; i < C::ROWS; i++)
        inverse[i] = shfl_idx(held.inverse, (i < C::HALF ? holder : holder ^ C::HALF_LANES) + i % C::HALF * C::SAME);
    if (warp_any(held.scale != held.scale)) { /* the integers of rows with a NaN or infinity become 0 */
        GT_UNROLL
        for (int i = 0; i < C::ROWS * C::COLUMNS; i++)
            if (!(inverse[i / C::COLUMNS] > 0.0f)) h[i / C::COLUMNS][i % C::COLUMNS] = 0.0f;
    }
    store_int8_rows<VECTORS, IS_RANDOM, C>(p, s, data, tile, end, inverse, h);
}

/* Runs one token for the lane's rows of a tile.  at: the address of the token's inputs.  x_at: the address of x of the
 * tile's first row.  Returns y of the held row without skip and gate. */
template <class T, class C>
GT_DEV float advance_int8(const TokenScale& token, uint32_t at, uint32_t x_at, const StepPlace<C>& s,
                          float (&h)[C::ROWS][C::COLUMNS]) {
    using Inputs = Int8Inputs<T, C>;
    SharedPiece<T, C::HALF> first, other;
    float input[C::ROWS], sums[C::ROWS], factor = token.factor;
    first.load(x_at + Inputs::SIZE * (uint32_t)s.first);
    other.load(x_at + Inputs::SIZE * (uint32_t)s.other);
    if (token.growth == FAR_OFF) { /* the factor is beyond fp32, but its product with a small state may fit */
        GT_NO_UNROLL
        for (int k = 0; k < 4; k++) {
            GT_UNROLL
            for (int i = 0; i < C::ROWS * C::COLUMNS; i++) h[i / C::COLUMNS][i % C::COLUMNS] *= factor;
        }
        factor = 1.0f;
    }
    if (token.growth == CLOSE) factor += 1.0f; /* the state's rounding exceeds the rounding of this sum */
    GT_UNROLL
    for (int i = 0; i < C::ROWS; i++) input[i] = token.delta * (i < C::HALF ? first.get(i) : other.get(i - C::HALF));
    GT_UNROLL
    for (int v = 0; v < C::VECS; v++) {
        SharedPiece<T, 4> B, Cm;
        B.load(at + Inputs::SIZE * (uint32_t)Inputs::column(s, v));
        Cm.load(at + Inputs::SIZE * (uint32_t)(Inputs::NP + Inputs::column(s, v)));
        GT_UNROLL
        for (int c = 0; c < 4; c++) {
            GT_UNROLL
            for (int i = 0; i < C::ROWS; i++) {
                float& x = h[i][4 * v + c];
                x = fma_rn(factor, x, input[i] * B.get(c));
                sums[i] = v + c ? fma_rn(x, Cm.get(c), sums[i]) : x * Cm.get(c);
            }
        }
    }
    sum_lanes<C>(sums, s.lane);
    return sums[0];
}

/* The number of tiles of a warp that are in shared memory at once, if it takes `count` tiles. */
GT_HD int int8_stages(int count) { return count < INT8_TILES ? count : INT8_TILES; }

/* The heads that a warp takes in turn have adjacent states, so rows are counted from the first head's row 0 on.  If
 * there are several heads, their tiles are full.  s: as if the warp's tile began at row 0. */
template <class T, bool IS_RANDOM, class C>
GT_DEV void step_int8_rows(const StepParams& p, const StepPlace<C>& s) {
    constexpr bool VECTORS = !std::is_same<T, AnyType>::value;
    constexpr int AHEAD = INT8_TILES - 1; /* tiles whose copies are in flight while the warp computes one */
    using Inputs = Int8Inputs<T, C>;
    static_assert(C::HELD == 1 && C::COLUMNS == 16, "a lane holds y of one row, and has 16 bytes of each row");
    const StepElement element(p.elements, s.b);
    const int heads = p.int8.heads, tokens = p.elements.T;
    uint32_t dt = 0, bias = 0; /* lane T i + t: of token t of head i */
    float A = 0.0f, own_skip = 0.0f;
    if (lane_id() < heads * tokens) {
        int t;
        const int h = s.h + divide(lane_id(), p.int8.by_tokens, &t);
        dt = load_bits(p.dt, p.dt_dtype, offset_of(p.dt_stride, s.b, t, h));
        A = p.A[h];
        if (p.dt_bias) bias = load_bits(p.dt_bias, p.parameter_dtype, h);
        if (!p.int8.has_channel_skips) own_skip = load_parameter(p.Dskip, p.parameter_dtype, h);
    }
    Inputs::copy(p, s);
    const int start = s.block_row + warp_id() * C::TILE * s.tiles; /* the warp's first row */
    TokenCursor<T> head_y(p.y, p.dtype, offset_of(p.y_stride, s.b, 0, s.h) + start + s.held);
    if (element.is_skipped(p.elements)) {
        cp_async_commit();
        cp_async_wait<0>();
        for (int i = 0; i < heads; i++, head_y.move(p.y_stride.h)) {
            TokenCursor<T> y_at = head_y;
            for (int k = 0; k < s.tiles; k++, y_at.move(C::TILE))
                clear_rows<T, C>(p, y_at, 0, s.writes ? p.P - start - k * C::TILE - s.held : 0);
        }
        return;
    }
    const int64_t first_row = (int64_t)s.h * p.P;
    int8_t* const data = static_cast<int8_t*>(p.state) + element.row * p.row_stride + first_row * p.N;
    float* const scale_at = p.scale + element.row * p.scale_stride + first_row;
    const int end = p.int8.end;
    const uint32_t ring = smem_base() + (uint32_t)tokens * p.int8.pitch +
                          (uint32_t)(warp_id() * int8_stages(p.int8.count)) * Int8Tile<C>::BYTES;
    const auto fetch = [&](int k) {
        if constexpr (VECTORS) {
            if (k < p.int8.count)
                Int8Tile<C>::fetch(s, data, scale_at, p.N, start + k * C::TILE, end,
                                   ring + (uint32_t)k % INT8_TILES * Int8Tile<C>::BYTES);
            cp_async_commit();
        }
    };
    GT_NO_UNROLL
    for (int k = 0; k < AHEAD; k++) fetch(k);
    const TokenScale own =
        token_scale(p.rule, value_of_bits(dt, p.dt_dtype) + value_of_bits(bias, p.parameter_dtype), A);
    if constexpr (VECTORS) cp_async_wait<AHEAD - 1>(); /* the inputs and the first tile */
    sync_threads();
    int k = 0, row = start; /* the warp's tile, and its first row */
    GT_NO_UNROLL
    for (int i = 0; i < heads; i++, head_y.move(p.y_stride.h)) {
        TokenCursor<T> tile_y = head_y;
        GT_NO_UNROLL
        for (int in_head = 0; in_head < s.tiles; in_head++, k++, row += C::TILE, tile_y.move(C::TILE)) {
            const int left = end - row, writes = s.writes ? left - s.held : 0;
            float h[C::ROWS][C::COLUMNS];
            float skip = shfl_idx(own_skip, i * tokens);
            if (p.int8.has_channel_skips && s.held < left)
                skip = load_parameter(p.Dskip, p.parameter_dtype, first_row + row + s.held);
            fetch(k + AHEAD);
            if constexpr (VECTORS) {
                cp_async_wait<AHEAD>();
                sync_warp();
                Int8Tile<C>::read(s, ring + (uint32_t)k % INT8_TILES * Int8Tile<C>::BYTES, h);
            } else {
                GT_UNROLL
                for (int r = 0; r < C::ROWS; r++) {
                    const bool exists = s.row(r) < left;
                    const int8_t* const numbers = data + (row + s.row(r)) * p.N;
                    const float scale = exists ? scale_at[row + s.row(r)] : 0.0f;
                    GT_UNROLL
                    for (int v = 0; v < C::VECS; v++)
                        unpack_int8(h[r] + 4 * v,
                                    load_int8_word<false>(numbers + s.column(v), exists ? p.N - s.column(v) : 0),
                                    scale);
                }
            }
            TokenCursor<T> y_at = tile_y;
            uint32_t at = smem_base(), x_at = at + Inputs::SIZE * (uint32_t)(2 * Inputs::NP + row - s.block_row);
            GT_NO_UNROLL
            for (int t = 0; t < element.tokens; t++, at += p.int8.pitch, x_at += p.int8.pitch) {
                const int from = i * tokens + t;
                const TokenScale token = {shfl_idx(own.delta, from), shfl_idx(own.factor, from),
                                          shfl_idx(own.growth, from)};
                const float sum = advance_int8<T, C>(token, at, x_at, s, h);
                SharedPiece<T, 1> x, z;
                x.load(x_at + Inputs::SIZE * (uint32_t)s.held);
                float y = fma_rn(skip, x.get(0), sum);
                if (p.z) {
                    z.load(x_at + Inputs::SIZE * (uint32_t)(p.int8.rows + s.held));
                    y *= silu(z.get(0));
                }
                if (writes > 0) y_at.store(0, y);
                y_at.move(p.y_stride.t);
                if (t + 1 == element.commit)
                    store_int8_tile<VECTORS, IS_RANDOM, C>(p, s, data + row * p.N, scale_at + row, row, end, h);
            }
            clear_rows<T, C>(p, y_at, element.tokens, writes);
            sync_warp(); /* before the next copies to this tile's shared memory */
        }
    }
}

/* Calls take() for every batch element of the block. */
template <class C, class Take>
GT_DEV void step_block(const StepParams& p, StepPlace<C>& s, const Take& take) {
    release_chain(); /* In a step of wkv_ssm, wkv6's kernel follows.  It shares no memory with this kernel, so it may
                      * start early. */
    int in_strand, part, in_group;
    const int strand = divide(block_x(), p.by_strand, &in_strand);
    s.h = divide(in_strand, p.by_head, &part);
    if (C::IS_INT8) s.h *= p.int8.heads;
    s.g = divide(s.h, p.by_group, &in_group);
    s.block_row = part * (block_threads() / 32) * C::TILE * s.tiles;
    s.take_rows(C::IS_INT8 ? 0 : s.block_row + warp_id() * C::TILE); /* a warp without rows takes part in the copies,
                                                                      * too */
    for (s.b = strand; s.b < p.B; s.b += p.strands) {
        take();
        if (s.b + p.strands < p.B) sync_threads(); /* before shared memory is written again */
    }
}

template <class T, int LANES, int VECS, int ROWS, bool MIXED>
GT_KERNEL(32 * STEP_WARPS, (StepBlocks<T, VECS, ROWS>::VALUE))
step_kernel(const GT_GRID_CONSTANT StepParams p) {
    using C = StepTraits<LANES, VECS, ROWS>;
    StepPlace<C> s;
    step_block(p, s, [&] { step_rows<T, StepInputs<T, C>, MIXED>(p, s); });
}

/* IS_RANDOM: stochastic rounding, in a kernel of its own because it takes more registers. */
template <class T, int LANES, bool IS_RANDOM>
GT_KERNEL(32 * INT8_TILES, (Int8StepBlocks<T, IS_RANDOM>::VALUE))
step_int8_kernel(const GT_GRID_CONSTANT StepParams p) {
    using C = Int8StepTraits<LANES>;
    StepPlace<C> s;
    s.tiles = p.int8.tiles;
    step_block(p, s, [&] { step_int8_rows<T, IS_RANDOM, C>(p, s); });
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

template <class T, bool MIXED>
static inline gt_status launch_step_with(const gt_ssd_args& a, const Device& device, Chain& chain) {
    return with_step_size<T>(a, device, [&](auto traits) {
        using C = decltype(traits);
        const StepGrid grid(a.P, C::TILE, STEP_WARPS);
        const int pitch = shared_pitch(SharedInputs<T, C>::NP, (int)grid.warps * C::TILE, a.z);
        const StepParams p = step_params_of(a, grid);
        return run("ssd step_kernel", step_kernel<T, C::LANES, C::VECS, C::ROWS, MIXED>, p.strands * a.H * grid.parts,
                   32 * (unsigned)grid.warps, (size_t)a.T * (size_t)pitch * SharedInputs<T, C>::SIZE, chain, p);
    });
}

/* How many tiles of a head, and how many heads, a warp takes with int8 states.  More of them share the work before the
 * first tile.  But every multiprocessor should have 8 warps. */
struct Int8Share {
    int tiles = 1, heads = 1;
    Int8Share(const gt_ssd_args& a, int tile, const Device& device) {
        const int64_t all = (a.P + tile - 1) / tile, parts = (all + INT8_TILES - 1) / INT8_TILES;
        const double warps = (double)a.B * (double)a.H * (double)parts / (8.0 * device.multiprocessors);
        if (warps < 1) return;
        tiles = (int)((all + parts - 1) / parts);
        if (parts > 1 || a.P % tile) return;
        while (heads < INT8_HEADS && a.H / a.G % (2 * heads) == 0 && 2 * heads * a.T <= 32 && warps >= 2 * heads)
            heads *= 2;
    }
};

template <class T, int LANES>
static inline gt_status launch_int8_step_of(const gt_ssd_args& a, const Device& device, Chain& chain) {
    using C = Int8StepTraits<LANES>;
    using Inputs = Int8Inputs<T, C>;
    const Int8Share share(a, C::TILE, device);
    const StepGrid grid(a.P, C::TILE * share.tiles, INT8_TILES / share.tiles);
    const int count = share.tiles * share.heads, rows = (int)grid.warps * C::TILE * count;
    const uint32_t pitch = Inputs::SIZE * (uint32_t)shared_pitch(Inputs::NP, rows, a.z);
    size_t bytes = (size_t)a.T * pitch;
    if (!std::is_same<T, AnyType>::value) bytes += (size_t)(grid.warps * int8_stages(count)) * Int8Tile<C>::BYTES;
    StepParams p = step_params_of(a, grid);
    const int64_t blocks = a.H / share.heads * grid.parts; /* of a batch element */
    p.strands = strands(a.B, blocks, INT32_MAX);
    p.by_strand = divide_by((int)blocks);
    p.int8 = {share.tiles,
              share.heads,
              count,
              share.heads * (int)a.P,
              rows,
              a.Dskip && a.Dskip_per_channel,
              pitch,
              divide_by((int)a.P),
              divide_by((int)a.T)};
    return run("ssd step_int8_kernel",
               a.rounding_seed ? step_int8_kernel<T, LANES, true> : step_int8_kernel<T, LANES, false>,
               p.strands * blocks, 32 * (unsigned)grid.warps, bytes, chain, p);
}

template <class T>
static inline gt_status launch_int8_step(const gt_ssd_args& a, const Device& device, Chain& chain) {
    if constexpr (BUILT_N64)
        if (a.N <= 64) return launch_int8_step_of<T, 4>(a, device, chain);
    return a.N <= 128 ? launch_int8_step_of<T, 8>(a, device, chain) : launch_int8_step_of<T, 16>(a, device, chain);
}

/* Launches the step kernel.  The function is a template, so a file that includes this one only for device code does not
 * compile the kernels again. */
template <class Stream>
static inline gt_status launch_step(const gt_ssd_args& a, const Device& device, Stream& chain) {
    if (a.T == 0) return GT_OK;
    if (a.state_dtype == GT_INT8) {
        if (!has_step_vectors(a)) return launch_int8_step<AnyType>(a, device, chain);
        return with_activations(a.dtype, [&](auto type) { return launch_int8_step<decltype(type)>(a, device, chain); });
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
