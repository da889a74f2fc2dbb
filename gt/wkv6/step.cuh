/* gt/wkv6/step.cuh - step: 1 to 16 new tokens of every batch element; states lie in slots, in place.
 *
 * For every token, on the state S [N,V] of a head, with keep and factor of its decay (scale_of_log):
 *     y_j = scale (sum_i r_i S_ij + (sum_i r_i u_i k_i) v_j)      S_ij <- keep_i S_ij + (factor_i S_ij + k_i v_j)
 *
 * tile: a block owns COLUMNS = 4 LANES columns of one head, and all rows.  A lane owns 4 neighbouring columns: LANES
 *     lanes move a row in 16-byte pieces.  A block moves SLOTS = THREADS / LANES rows at a time.  A lane has ROWS rows,
 *     SLOTS apart.  N = V = 64: 16 lanes, 128 threads, 8 rows each.
 * grid B * H * tiles of columns; one launch, no workspace.
 * registers: 4 ROWS numbers of the state (8 to 64), for all tokens of the call.  They are stored when the last
 *     token to commit is done.
 * shared, for TOKENS tokens at a time: (r, k, keep, factor) of every row, v, and the partial sums of y of every warp.
 *     N = V = 64: 2.3 KB at one token, 9 KB at 4.  N = V = 256: 25 KB.
 * bytes of a head: the state once each way, 8 N V (32 KB at N = V = 64); v and y once; r, k and w once a tile.
 *     A thread issues the loads of its state and of its first TOKENS tokens before it uses any of them.
 * issue slots of a thread, N = V = 64: 16 loads and stores of the state; 17 a row and token; about 400 for all else.
 * Sums over i have one order: the rows of a lane, the lanes of a warp (butterfly), the warps.  It depends on N and V
 *     alone.  States that are not aligned to 16 bytes move in single floats to the same lanes: they give the same bits.
 * Calls of one token have instances without loops over tokens.  In a small batch the number of instructions is time.
 * One kernel serves all dtypes: it loads raw bits, and converts them when all loads are in flight. */
#ifndef GT_WKV6_STEP_CUH
#define GT_WKV6_STEP_CUH

#include "../base/launch.cuh"
#include "problem.cuh"

namespace gt {
namespace wkv6 {

struct StepParams {
    Problem in;
    void* y;
    gt_stride y_stride;
    float* state; /* [slot_capacity,H,N,V] */
    StepElements elements;
    Divider by_tiles, by_H;
};

/* MOST_ROWS: N rounded up to 32, 64, 128 or 256.  TOKENS: at a time; 1 if the call has no more, else 4. */
template <int LANES_, int MOST_ROWS_, int TOKENS_>
struct StepTraits {
    static constexpr int LANES = LANES_, MOST_ROWS = MOST_ROWS_, TOKENS = TOKENS_;
    static constexpr int THREADS = MOST_ROWS > 128 ? MOST_ROWS : 128, WARPS = THREADS / 32;
    static constexpr int COLUMNS = 4 * LANES, SLOTS = THREADS / LANES, ROWS = MOST_ROWS / SLOTS;
    static constexpr int BLOCKS = THREADS == 256 ? 2 : ROWS > 8 ? 3 : 5; /* that share a multiprocessor's registers */
    static constexpr int ROW_STEP = THREADS / MOST_ROWS;                 /* tokens whose rows are loaded side by side */
    static constexpr int COLUMN_STEP = THREADS / COLUMNS;                /* tokens whose columns are */
    static constexpr int ROW_LOADS = (TOKENS + ROW_STEP - 1) / ROW_STEP; /* of a thread, for each of r, k and w */
    static constexpr int COLUMN_LOADS = (TOKENS + COLUMN_STEP - 1) / COLUMN_STEP;
    static constexpr int ROW_WARPS = MOST_ROWS / 32; /* that share the bonus of a token */
    static constexpr int ROW_BYTES = 16 * MOST_ROWS, COLUMN_BYTES = 4 * COLUMNS, SUM_BYTES = WARPS * COLUMN_BYTES;
    static constexpr int TOKEN_BYTES = ROW_BYTES + COLUMN_BYTES + SUM_BYTES + 4 * ROW_WARPS;
    static_assert(TOKENS * TOKEN_BYTES <= 48 * 1024, "needs no asking");
};

/* Shared addresses, for `tokens` tokens. */
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

/* The bits of an element, and the number that they are.  A conversion between two loads would wait for the first. */
GT_DEV uint32_t load_bits(const void* data, gt_dtype dtype, int64_t i) {
    if (dtype == GT_F32) return as_uint(static_cast<const float*>(data)[i]);
    return static_cast<const bf16*>(data)[i].bits;
}

GT_DEV float number_of_bits(uint32_t bits, gt_dtype dtype) {
    if (dtype == GT_BF16) return bf16_to_f32((uint16_t)bits);
    if (dtype == GT_F16) return f16_to_f32((uint16_t)bits);
    return as_float(bits);
}

/* The inputs of up to TOKENS tokens, in flight: rows of r, k and w of one n, and columns of v. */
template <class C>
struct StepInputs {
    uint32_t r[C::ROW_LOADS], k[C::ROW_LOADS], w[C::ROW_LOADS], v[C::COLUMN_LOADS];

    /* Tokens first ... first + tokens - 1. */
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

    /* Converts them into shared memory.  A row that does not exist has r = k = 0 and decay 1. */
    GT_METHOD void share(const StepParams& p, const StepShared<C>& shared, int tokens, float u) const {
        const Problem& in = p.in;
        const int n = thread_id() % C::MOST_ROWS, row_token = thread_id() / C::MOST_ROWS;
        const int column = thread_id() % C::COLUMNS, column_token = thread_id() / C::COLUMNS;
        GT_UNROLL
        for (int i = 0; i < C::ROW_LOADS; i++) {
            const int token = row_token + i * C::ROW_STEP;
            if (token >= tokens) break; /* the same for all lanes of a warp */
            const float r_n = number_of_bits(r[i], in.dtype), k_n = number_of_bits(k[i], in.dtype);
            const float log_d = n < in.N ? log_decay(in, number_of_bits(w[i], in.w_dtype)) : 0.0f;
            const Scale decay = scale_of_log(log_d);
            sts<float4>(shared.row(token, n), {r_n, k_n, decay.keep, decay.factor});
            if (!in.u) continue;
            const float bonus = warp_sum(r_n * u * k_n);
            if (lane_id() == 0) sts<float>(shared.bonus_of(token, n / 32), bonus);
        }
        GT_UNROLL
        for (int i = 0; i < C::COLUMN_LOADS; i++) {
            const int token = column_token + i * C::COLUMN_STEP;
            if (token < tokens) sts<float>(shared.column(token, column), number_of_bits(v[i], in.dtype));
        }
    }
};

/* A thread's part of a state [N,V]: rows slot + SLOTS q, 4 columns from j on.  Rows and columns outside are 0. */
template <class C, bool IS_ALIGNED>
GT_DEV void load_step_state(const float* state, const Problem& in, int slot, int j, float (&s)[4 * C::ROWS]) {
    const float* at = state + j;
    GT_UNROLL
    for (int q = 0; q < C::ROWS; q++) {
        const int n = slot + C::SLOTS * q;
        const float* from = at + n * in.V;
        if constexpr (IS_ALIGNED) {
            float4 x = {0.0f, 0.0f, 0.0f, 0.0f};
            if (n < in.N && j < in.V) x = ldg<float4>(from);
            s[4 * q] = x.x, s[4 * q + 1] = x.y, s[4 * q + 2] = x.z, s[4 * q + 3] = x.w;
        } else {
            GT_UNROLL
            for (int c = 0; c < 4; c++) s[4 * q + c] = n < in.N && j + c < in.V ? from[c] : 0.0f;
        }
    }
}

template <class C, bool IS_ALIGNED>
GT_DEV void store_step_state(float* state, const Problem& in, int slot, int j, const float (&s)[4 * C::ROWS]) {
    slot = made_here(slot); /* else the addresses of the loads are kept for the stores: two registers a row */
    float* at = state + j;
    GT_UNROLL
    for (int q = 0; q < C::ROWS; q++) {
        const int n = slot + C::SLOTS * q;
        float* to = at + n * in.V;
        if constexpr (IS_ALIGNED) {
            if (n < in.N && j < in.V) stg<float4>(to, {s[4 * q], s[4 * q + 1], s[4 * q + 2], s[4 * q + 3]});
        } else {
            GT_UNROLL
            for (int c = 0; c < 4; c++)
                if (n < in.N && j + c < in.V) to[c] = s[4 * q + c];
        }
    }
}

/* One token: the warp's partial sums of y into shared memory, and the thread's part of the state after it. */
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

/* Tokens first ... first + tokens - 1 of y, from the sums of the warps. */
template <class C>
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
        y = fma_rn(bonus, lds<float>(shared.column(token, column)), y);
        store_as(p.y, p.in.dtype, offset_of(p.y_stride, b, first + token, h) + j, p.in.scale * y);
    }
}

/* y = 0 of tokens first ... T-1. */
template <class C>
GT_DEV void clear_step_outputs(const StepParams& p, int64_t b, int64_t h, int first, int column0) {
    const int j = column0 + thread_id() % C::COLUMNS;
    if (j >= p.in.V) return;
    for (int t = first + thread_id() / C::COLUMNS; t < p.elements.T; t += C::COLUMN_STEP)
        store_as(p.y, p.in.dtype, offset_of(p.y_stride, b, t, h) + j, 0.0f);
}

template <class C, bool IS_ALIGNED>
GT_KERNEL(C::THREADS, C::BLOCKS)
step_kernel(const GT_GRID_CONSTANT StepParams p) {
    const Problem& in = p.in;
    int tile, h;
    const int b = divide(divide(block_x(), p.by_tiles, &tile), p.by_H, &h), column0 = tile * C::COLUMNS;
    const StepElement element(p.elements, b);
    if (element.is_skipped(p.elements)) {
        clear_step_outputs<C>(p, b, h, 0, column0);
        return;
    }
    const int T = C::TOKENS == 1 ? 1 : element.tokens, lane = lane_id() % C::LANES, slot = thread_id() / C::LANES;
    const int n = thread_id() % C::MOST_ROWS;
    const StepShared<C> shared(T < C::TOKENS ? T : C::TOKENS);
    float* state = p.state + (element.row * in.H + h) * ((int64_t)in.N * in.V);
    StepInputs<C> inputs;
    float s[4 * C::ROWS];
    inputs.load(p, b, h, 0, T < C::TOKENS ? T : C::TOKENS, column0);
    const float u = in.u && n < in.N ? in.u[(int64_t)h * in.N + n] : 0.0f;
    load_step_state<C, IS_ALIGNED>(state, in, slot, column0 + 4 * lane, s);
    for (int first = 0;; first += C::TOKENS) {
        const int tokens = T - first < C::TOKENS ? T - first : C::TOKENS;
        const bool is_last = first + C::TOKENS >= T;
        inputs.share(p, shared, tokens, u);
        sync_threads();
        if (!is_last) {
            const int left = T - first - C::TOKENS;
            inputs.load(p, b, h, first + C::TOKENS, left < C::TOKENS ? left : C::TOKENS, column0);
        }
        GT_NO_UNROLL
        for (int token = 0; token < tokens; token++) {
            step_token<C>(shared, token, slot, lane, s);
            if (first + token + 1 == element.commit)
                store_step_state<C, IS_ALIGNED>(state, in, slot, column0 + 4 * lane, s);
        }
        sync_threads();
        store_step_outputs<C>(p, shared, b, h, first, tokens, column0);
        if (is_last) break;
        sync_threads();
    }
    if (C::TOKENS > 1) clear_step_outputs<C>(p, b, h, T, column0);
}

/* ---- launch ------------------------------------------------------------------------------------------------- */

template <int LANES, int MOST_ROWS>
static gt_status launch_step(const gt_wkv6_args& a, StepParams p, gt_stream stream) {
    using One = StepTraits<LANES, MOST_ROWS, 1>;
    using More = StepTraits<LANES, MOST_ROWS, 4>;
    const int64_t tiles = (a.V + One::COLUMNS - 1) / One::COLUMNS, tokens = a.T < More::TOKENS ? a.T : More::TOKENS;
    const bool is_aligned = a.V % 4 == 0 && (uintptr_t)a.state_out % 16 == 0;
    p.by_tiles = divide_by((int)tiles), p.by_H = divide_by((int)a.H);
    void (*const kernel)(StepParams) = !is_aligned ? step_kernel<More, false>
                                       : a.T == 1  ? step_kernel<One, true>
                                                   : step_kernel<More, true>;
    return run("wkv6 step_kernel", kernel, a.B * a.H * tiles, One::THREADS, (size_t)(tokens * One::TOKEN_BYTES), stream,
               p);
}

template <int LANES>
static gt_status launch_step(const gt_wkv6_args& a, const StepParams& p, gt_stream stream) {
    if (a.N <= 32) return launch_step<LANES, 32>(a, p, stream);
    if (a.N <= 64) return launch_step<LANES, 64>(a, p, stream);
    if (a.N <= 128) return launch_step<LANES, 128>(a, p, stream);
    return launch_step<LANES, 256>(a, p, stream);
}

static inline gt_status launch_step(const gt_wkv6_args& a, gt_stream stream) {
    static_assert(MAX_SIZE == 256, "the largest N that a kernel here takes");
    if (a.T == 0) return GT_OK;
    StepParams p = {};
    p.in = problem_of(a);
    p.y = a.y, p.y_stride = a.y_stride;
    p.state = a.state_out;
    p.elements = step_elements_of(a);
    return a.V <= 32 ? launch_step<8>(a, p, stream) : launch_step<16>(a, p, stream);
}

} /* namespace wkv6 */
} /* namespace gt */

#endif
