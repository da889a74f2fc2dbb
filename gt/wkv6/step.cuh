/* gt/wkv6/step.cuh - step: 1 to 16 new tokens of every batch element.  States lie in slots and are updated in place.
 *
 * For every token and the state S [N,V] of a head, with keep and factor of the decay (scale_of_log):
 *     y_j = scale (sum_i r_i S_ij + (sum_i r_i u_i k_i) v_j)      S_ij <- keep_i S_ij + (factor_i S_ij + k_i v_j)
 *
 * tile: a block owns COLUMNS = 4 LANES columns of one head, and all rows.  A lane owns 4 adjacent columns, so LANES
 * lanes move a row in 16-byte pieces.  A block moves SLOTS = THREADS / LANES rows at a time.  A lane has ROWS rows,
 * SLOTS apart.  N = V = 64: 16 lanes, 128 threads, 8 rows each.
 * grid B * H * tiles of columns; one launch, no workspace.
 * registers: 4 ROWS values of the state (8 to 64), for all tokens of the call.  A lane stores them after the last token
 * that enters the state (`commit`).
 * shared, for TOKENS tokens at a time: (r, k, keep, factor) of every row, v, and the partial sums of y of every warp.
 * N = V = 64: 2.3 KB at one token, 9 KB at 4.  N = V = 256: 25 KB.
 * bytes per head: the state in and out, 8 N V (32 KB at N = V = 64); v and y once; r, k and w once per tile.  A thread
 * issues the loads of its state and of its first TOKENS tokens before it uses any of them.
 * issue slots per thread, N = V = 64: 16 for loads and stores of the state; 17 for each row and token; about 400 for
 * the rest.
 * Sums over i have one order: the rows of a lane, the lanes of a warp (butterfly), the warps.  The order depends only
 * on N and V.  States that are not aligned to 16 bytes move in single floats to the same lanes, so the results have the
 * same bits.
 * In an int8 state up to 64 columns of a row share a scale, and one block has all of them.  log2(LANES) shuffles find
 * the maximum of a row.
 * Calls of one token have instances without loops over tokens, because in a small batch the number of instructions
 * determines the time.  One kernel serves all dtypes: it loads raw bits, and converts them after all loads are in
 * flight. */
#ifndef GT_WKV6_STEP_CUH
#define GT_WKV6_STEP_CUH

#include "../base/built.cuh"
#include "../base/launch.cuh"
#include "../recurrence/step_states.cuh"
#include "problem.cuh"

namespace gt {
namespace wkv6 {

struct StepParams {
    Problem in;
    void* y;
    gt_stride y_stride;
    void* state; /* [slot_capacity,H,N,V] */
    int64_t row_stride;
    gt_dtype state_dtype, u_dtype;
    float* scale; /* [slot_capacity,H,N,ceil(V/64)], for int8 states */
    int64_t scale_stride;
    StepRounding rounding;
    StepElements elements;
    Divider by_tiles, by_H;
    Mix mix; /* only if states and parameters are fp32 */
};

/* MOST_ROWS: 32 if N and V are at most 32; otherwise N rounded up to 64, 128 or 256.  TOKENS: tokens at a time; 1 if
 * the call has only one, otherwise 4. */
template <int MOST_ROWS_, int TOKENS_>
struct StepTraits {
    static constexpr int MOST_ROWS = MOST_ROWS_, TOKENS = TOKENS_, LANES = MOST_ROWS == 32 ? 8 : 16;
    static constexpr int THREADS = MOST_ROWS > 128 ? MOST_ROWS : 128, WARPS = THREADS / 32;
    static constexpr int COLUMNS = 4 * LANES, SLOTS = THREADS / LANES, ROWS = MOST_ROWS / SLOTS;
    /* Blocks per multiprocessor, which limits the registers of a thread. */
    static constexpr int BLOCKS = THREADS == 256 ? 2 : ROWS > 8 ? 3 : 5;
    static constexpr int ROW_STEP = THREADS / MOST_ROWS; /* tokens whose rows the block loads at a time */
    /* Tokens whose columns the block loads at a time. */
    static constexpr int COLUMN_STEP = THREADS / COLUMNS;
    static constexpr int ROW_LOADS = (TOKENS + ROW_STEP - 1) / ROW_STEP; /* loads of a thread, for each of r, k and w */
    static constexpr int COLUMN_LOADS = (TOKENS + COLUMN_STEP - 1) / COLUMN_STEP;
    static constexpr int ROW_WARPS = MOST_ROWS / 32; /* warps that share the bonus of a token */
    static constexpr int ROW_BYTES = 16 * MOST_ROWS, COLUMN_BYTES = 4 * COLUMNS, SUM_BYTES = WARPS * COLUMN_BYTES;
    static constexpr int TOKEN_BYTES = ROW_BYTES + COLUMN_BYTES + SUM_BYTES + 4 * ROW_WARPS;
    static_assert(TOKENS * TOKEN_BYTES <= 48 * 1024, "needs no asking");
};

/* Addresses in shared memory, for `tokens` tokens. */
template <class C>
struct StepShared {
    uint32_t rows, columns, sums, bonus;

    GT_METHOD explicit StepShared(int tokens) {
        rows = smem_base();
        columns = rows + (uint32_t)(tokens * C::ROW_BYTES);
        sums = columns + (uint32_t)(tokens * C::COLUMN_BYTES);
        bonus = sums + (uint32_t)(tokens * C::SUM_BYTES);
    }
    GT_METHOD uint32_t row(int token, int n) const { return rows + 16 * (uint32_t)(token * C::MOST_ROWS + n); }
    GT_METHOD uint32_t column(int token, int j) const { return columns + 4 * (uint32_t)(token * C::COLUMNS + j); }
    GT_METHOD uint32_t sum(int token, int warp, int j) const {
        return sums + 4 * (uint32_t)((token * C::WARPS + warp) * C::COLUMNS + j);
    }
    GT_METHOD uint32_t bonus_of(int token, int warp) const {
        return bonus + 4 * (uint32_t)(token * C::ROW_WARPS + warp);
    }
};

/* A thread's share of the inputs of up to TOKENS tokens, as raw bits whose loads may be in flight: r, k and w of one
 * row n, and v of one column. */
template <class C>
struct StepInputs {
    uint32_t r[C::ROW_LOADS], k[C::ROW_LOADS], w[C::ROW_LOADS], v[C::COLUMN_LOADS];

    /* Loads tokens first ... first + tokens - 1. */
    GT_METHOD void load(const StepParams& p, int64_t b, int64_t h, int64_t first, int tokens, int column0) {
        const Problem& in = p.in;
        const int n = thread_id() % C::MOST_ROWS, row_token = thread_id() / C::MOST_ROWS;
        const int j = thread_id() % C::COLUMNS + column0, column_token = thread_id() / C::COLUMNS;
        int64_t r_at = offset_of(in.r_stride, b, first + row_token, h) + n;
        int64_t k_at = offset_of(in.k_stride, b, first + row_token, h) + n;
        int64_t w_at = offset_of(in.w_stride, b, first + row_token, h) + n;
        int64_t v_at = offset_of(in.v_stride, b, first + column_token, h) + j;
        GT_UNROLL
        for (int i = 0; i < C::ROW_LOADS; i++) {
            const bool exists = row_token + i * C::ROW_STEP < tokens && n < in.N;
            r[i] = exists ? load_bits(in.r, in.dtype, r_at) : 0;
            k[i] = exists ? load_bits(in.k, in.dtype, k_at) : 0;
            w[i] = exists ? load_bits(in.w, in.w_dtype, w_at) : 0;
            r_at += C::ROW_STEP * in.r_stride.t, k_at += C::ROW_STEP * in.k_stride.t;
            w_at += C::ROW_STEP * in.w_stride.t;
        }
        GT_UNROLL
        for (int i = 0; i < C::COLUMN_LOADS; i++) {
            const bool exists = column_token + i * C::COLUMN_STEP < tokens && j < in.V;
            v[i] = exists ? load_bits(in.v, in.dtype, v_at) : 0;
            v_at += C::COLUMN_STEP * in.v_stride.t;
        }
    }

    /* Converts the inputs and stores them in shared memory.  A missing row has r = k = 0 and decay 1. */
    GT_METHOD void share(const StepParams& p, const StepShared<C>& shared, int tokens, float u) const {
        const Problem& in = p.in;
        const int n = thread_id() % C::MOST_ROWS, row_token = thread_id() / C::MOST_ROWS;
        const int column = thread_id() % C::COLUMNS, column_token = thread_id() / C::COLUMNS;
        GT_UNROLL
        for (int i = 0; i < C::ROW_LOADS; i++) {
            const int token = row_token + i * C::ROW_STEP;
            if (token >= tokens) break; /* the same for all lanes of a warp */
            const float r_n = value_of_bits(r[i], in.dtype), k_n = value_of_bits(k[i], in.dtype);
            const float log_d = n < in.N ? log_decay(in, value_of_bits(w[i], in.w_dtype)) : 0.0f;
            const Scale decay = scale_of_log(log_d);
            sts<float4>(shared.row(token, n), {r_n, k_n, decay.keep, decay.factor});
            if (!in.u) continue;
            const float bonus = warp_sum(r_n * u * k_n);
            if (lane_id() == 0) sts<float>(shared.bonus_of(token, n / 32), bonus);
        }
        GT_UNROLL
        for (int i = 0; i < C::COLUMN_LOADS; i++) {
            const int token = column_token + i * C::COLUMN_STEP;
            if (token < tokens) sts<float>(shared.column(token, column), value_of_bits(v[i], in.dtype));
        }
    }
};

/* Describes four columns, from j on, of row slot + SLOTS q of a state [N,V].  Numbers outside the state do not
 * exist. */
template <class C>
GT_DEV StatePiece step_piece(const Problem& in, int slot, int j, int q) {
    const int n = slot + C::SLOTS * q;
    return {n * in.V + j, n < in.N ? in.V - j : 0, n * (int)gt_row_groups(in.V) + j / 4};
}

/* Processes one token: stores the warp's partial sums of y in shared memory, and updates the thread's part of the
 * state. */
template <class C>
GT_DEV void step_token(const StepShared<C>& shared, int token, int slot, int lane, float (&s)[4 * C::ROWS]) {
    const float4 v = lds<float4>(shared.column(token, 4 * lane));
    float y[4] = {};
    GT_UNROLL
    for (int q = 0; q < C::ROWS; q++) {
        const float4 row = lds<float4>(shared.row(token, slot + C::SLOTS * q)); /* r, k, keep, factor */
        const float added[4] = {row.y * v.x, row.y * v.y, row.y * v.z, row.y * v.w};
        GT_UNROLL
        for (int c = 0; c < 4; c++) {
            y[c] = fma_rn(row.x, s[4 * q + c], y[c]);
            s[4 * q + c] = rescale(row.z, row.w, s[4 * q + c], added[c]);
        }
    }
    GT_UNROLL
    for (int mask = C::LANES; mask < 32; mask <<= 1) {
        GT_UNROLL
        for (int c = 0; c < 4; c++) y[c] += shfl_xor(y[c], mask);
    }
    if (lane_id() < C::LANES) sts<float4>(shared.sum(token, warp_id(), 4 * lane), {y[0], y[1], y[2], y[3]});
}

/* Stores y of tokens first ... first + tokens - 1, from the sums of the warps. */
template <class C, bool MIXES>
GT_DEV void store_step_outputs(const StepParams& p, const StepShared<C>& shared, int64_t b, int64_t h, int64_t first,
                               int tokens, int column0) {
    const int column = thread_id() % C::COLUMNS, j = column0 + column;
    if (j >= p.in.V) return;
    for (int token = thread_id() / C::COLUMNS; token < tokens; token += C::COLUMN_STEP) {
        float y = 0.0f, bonus = 0.0f;
        GT_UNROLL
        for (int warp = 0; warp < C::WARPS; warp++) y += lds<float>(shared.sum(token, warp, column));
        GT_UNROLL
        for (int warp = 0; warp < C::ROW_WARPS; warp++)
            bonus += p.in.u ? lds<float>(shared.bonus_of(token, warp)) : 0.0f;
        y = p.in.scale * fma_rn(bonus, lds<float>(shared.column(token, column)), y);
        if (MIXES && p.mix.ssm) y = mix_element(p.mix, p.in, b, first + token, h, j, y);
        store_as(p.y, p.in.dtype, offset_of(p.y_stride, b, first + token, h) + j, y);
    }
}

/* Stores y = 0 for tokens first ... T-1. */
template <class C, bool MIXES>
GT_DEV void clear_step_outputs(const StepParams& p, int64_t b, int64_t h, int first, int column0) {
    const int j = column0 + thread_id() % C::COLUMNS;
    if (j >= p.in.V) return;
    for (int t = first + thread_id() / C::COLUMNS; t < p.elements.T; t += C::COLUMN_STEP) {
        store_as(p.y, p.in.dtype, offset_of(p.y_stride, b, t, h) + j, 0.0f);
        if (MIXES && p.mix.y) store_as(p.mix.y, p.in.dtype, offset_of(p.mix.y_stride, b, t, h) + j, 0.0f);
    }
}

/* step_piece() for an int8 state.  A block has all the columns of a row that share a scale. */
template <class C>
GT_DEV Int8Row step_int8_row(const Problem& in, int slot, int j, int q) {
    const StatePiece piece = step_piece<C>(in, slot, j, q);
    const int of_row = (in.V + GT_INT8_COLUMNS - 1) / GT_INT8_COLUMNS;
    return {piece.offset, piece.valid, (slot + C::SLOTS * q) * of_row + j / GT_INT8_COLUMNS, piece.group};
}

template <class C, bool IS_ALIGNED, bool MIXED, bool IS_INT8 = false>
GT_DEV void step_block(const StepParams& p) {
    static_assert(C::COLUMNS <= GT_INT8_COLUMNS, "a block owns the columns of a scale");
    constexpr bool MIXES = !IS_INT8 && (!MIXED || !IS_ALIGNED); /* wkv_ssm has fp32 states: instances it may take */
    const Problem& in = p.in;
    int tile, h;
    const int b = divide(divide(block_x(), p.by_tiles, &tile), p.by_H, &h), column0 = tile * C::COLUMNS;
    const StepElement element(p.elements, b);
    if (element.is_skipped(p.elements)) {
        clear_step_outputs<C, MIXES>(p, b, h, 0, column0);
        return;
    }
    const int T = C::TOKENS == 1 ? 1 : element.tokens, lane = lane_id() % C::LANES, slot = thread_id() / C::LANES;
    const int n = thread_id() % C::MOST_ROWS;
    const StepShared<C> shared(T < C::TOKENS ? T : C::TOKENS);
    const StepState state = {p.state, MIXED ? p.state_dtype : GT_F32,
                             element.row * p.row_stride + h * ((int64_t)in.N * in.V)};
    const int j = column0 + 4 * lane;
    StepInputs<C> inputs;
    float s[4 * C::ROWS];
    inputs.load(p, b, h, 0, T < C::TOKENS ? T : C::TOKENS, column0);
    const gt_dtype u_dtype = MIXED ? p.u_dtype : GT_F32;
    const uint32_t u = in.u && n < in.N ? load_bits(in.u, u_dtype, (int64_t)h * in.N + n) : 0;
    const int of_row = (in.V + GT_INT8_COLUMNS - 1) / GT_INT8_COLUMNS;
    const Int8State int8 = {static_cast<int8_t*>(p.state), p.scale, state.at,
                            element.row * p.scale_stride + h * ((int64_t)in.N * of_row)};
    if constexpr (IS_INT8)
        load_int8_state<IS_ALIGNED, C::ROWS>(s, int8, [&](int q) { return step_int8_row<C>(in, slot, j, q); });
    else
        load_step_state<IS_ALIGNED, C::ROWS>(s, state, [&](int q) { return step_piece<C>(in, slot, j, q); });
    for (int first = 0;; first += C::TOKENS) {
        const int tokens = T - first < C::TOKENS ? T - first : C::TOKENS;
        const bool is_last = first + C::TOKENS >= T;
        inputs.share(p, shared, tokens, value_of_bits(u, u_dtype));
        sync_threads();
        if (!is_last) {
            const int left = T - first - C::TOKENS;
            inputs.load(p, b, h, first + C::TOKENS, left < C::TOKENS ? left : C::TOKENS, column0);
        }
        GT_NO_UNROLL
        for (int token = 0; token < tokens; token++) {
            step_token<C>(shared, token, slot, lane, s);
            if (first + token + 1 != element.commit) continue;
            const int row =
                made_here(slot); /* or the compiler keeps the loads' addresses for the stores, 2 registers per row */
            const int64_t first_group = h * (in.N * gt_row_groups(in.V));
            if constexpr (IS_INT8)
                store_int8_state<IS_ALIGNED, C::ROWS, C::LANES>(
                    int8, s, [&](int q) { return step_int8_row<C>(in, row, j, q); }, lane, p.rounding, b, first_group);
            else
                store_step_state<IS_ALIGNED, C::ROWS>(
                    state, s, [&](int q) { return step_piece<C>(in, row, j, q); }, p.rounding, b, first_group);
        }
        sync_threads();
        if (MIXES && p.mix.ssm) wait_for_chain(); /* for ssd's y */
        store_step_outputs<C, MIXES>(p, shared, b, h, first, tokens, column0);
        if (is_last) break;
        sync_threads();
    }
    if (C::TOKENS > 1) clear_step_outputs<C, MIXES>(p, b, h, T, column0);
}

/* In a step of wkv_ssm this kernel follows ssd's kernel.  Unless the call is mixed, they share no memory.  So it waits
 * for that kernel only at its end, and later work on the stream comes after both. */
template <class C, bool IS_ALIGNED, bool MIXED>
GT_KERNEL(C::THREADS, C::BLOCKS)
step_kernel(const GT_GRID_CONSTANT StepParams p) {
    step_block<C, IS_ALIGNED, MIXED>(p);
    wait_for_chain();
}

template <class C, bool IS_ALIGNED>
GT_KERNEL(C::THREADS, C::BLOCKS)
step_int8_kernel(const GT_GRID_CONSTANT StepParams p) {
    step_block<C, IS_ALIGNED, true, true>(p);
}

/* ---- launch ------------------------------------------------------------------------------------------------- */

template <int MOST_ROWS>
static gt_status launch_step(const gt_wkv6_args& a, StepParams p, Chain& chain) {
    using One = StepTraits<MOST_ROWS, 1>;
    using More = StepTraits<MOST_ROWS, 4>;
    const int64_t tiles = (a.V + One::COLUMNS - 1) / One::COLUMNS, tokens = a.T < More::TOKENS ? a.T : More::TOKENS;
    const bool is_aligned =
        a.V % 4 == 0 && a.state_out_stride % 4 == 0 && has_aligned_fours(a.state_out, a.state_dtype);
    p.by_tiles = divide_by((int)tiles), p.by_H = divide_by((int)a.H);
    const bool is_mixed = a.state_dtype != GT_F32 || a.parameter_dtype != GT_F32;
    if (a.state_dtype == GT_INT8)
        return run("wkv6 step_int8_kernel",
                   !is_aligned ? step_int8_kernel<More, false>
                   : a.T == 1  ? step_int8_kernel<One, true>
                               : step_int8_kernel<More, true>,
                   a.B * a.H * tiles, One::THREADS, (size_t)(tokens * One::TOKEN_BYTES), chain, p);
    void (*const kernel)(StepParams) = !is_aligned ? step_kernel<More, false, true>
                                       : a.T == 1
                                           ? is_mixed ? step_kernel<One, true, true> : step_kernel<One, true, false>
                                       : is_mixed ? step_kernel<More, true, true>
                                                  : step_kernel<More, true, false>;
    return run("wkv6 step_kernel", kernel, a.B * a.H * tiles, One::THREADS, (size_t)(tokens * One::TOKEN_BYTES), chain,
               p);
}

static inline gt_status launch_step(const gt_wkv6_args& a, Chain& chain, const Mix& mix = {}) {
    static_assert(MAX_SIZE == 256, "the largest N that a kernel here takes");
    if (a.T == 0) return GT_OK;
    StepParams p = {};
    p.in = problem_of(a);
    p.y = a.y, p.y_stride = a.y_stride;
    p.state = a.state_out, p.row_stride = a.state_out_stride;
    p.scale = a.state_scale, p.scale_stride = a.state_scale_stride;
    p.state_dtype = a.state_dtype, p.u_dtype = a.parameter_dtype;
    p.rounding = step_rounding_of(a);
    p.elements = step_elements_of(a);
    p.mix = mix;
    if constexpr (BUILT_N32)
        if (a.N <= 32 && a.V <= 32) return launch_step<32>(a, p, chain);
    if constexpr (BUILT_N64)
        if (a.N <= 64) return launch_step<64>(a, p, chain);
    if constexpr (BUILT_N128)
        if (a.N <= 128) return launch_step<128>(a, p, chain);
    return launch_step<256>(a, p, chain);
}

} /* namespace wkv6 */
} /* namespace gt */

#endif
