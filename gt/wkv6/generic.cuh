/* gt/wkv6/generic.cuh - kernels for any N and V, without tensor cores.  token_kernel goes through time: forward, or G
 * in reverse.  backward_chunk_kernel computes the gradients of chunks. */
#ifndef GT_WKV6_GENERIC_CUH
#define GT_WKV6_GENERIC_CUH

#include "problem.cuh"

namespace gt {
namespace wkv6 {

/* ---- forward, and G backwards in time, any size: token by token ---------------------------------------
 * G has the recurrence of S with (r, dy) in place of (k, v), from the last token to the first.  REVERSE computes G: y
 * is NULL, r is multiplied by the scale of y, and G after every chunk of CHECKPOINT tokens is stored.
 * grid: sequences*H*tiles.  For packed sequences the grid is smaller (most_blocks), and blocks take sequences in turn.
 * block: 128 threads.  A block owns one head and a tile of COLUMNS = 128 / SLICES columns of its state.
 * SLICES adjacent lanes share a column.  Each has 32 rows: rows 4 (slice + SLICES q) ... + 3 for q = 0 ... 7.
 * registers: 32 fp32 values of the state per thread, for the whole sequence.
 * shared: r, k and the decay (keep, factor) of TOKENS = 16 tokens (N > 128: 8 tokens), v of the block's columns, and
 * the bonus sum_n r u k of each token.  These are TOKENS (4 ROWS + COLUMNS + 1) floats: 20 KB at N = V = 64, 34 KB at
 * most.
 * bytes: r, k, w once per tile; v, y and states once.  N = 64 has one tile.
 * Sums over n have a fixed order (registers, then a butterfly over the slices), so results are deterministic. */
struct TokenParams : PassParams { /* if y is NULL, the kernel does not read r */
    gt_dtype checkpoint_dtype;
    int64_t tiles;
    Mix mix; /* forward only */
};

template <int SLICES>
struct ForwardTraits {
    static constexpr int THREADS = 128;
    static constexpr int ROWS = 32 * SLICES;
    static constexpr int COLUMNS = THREADS / SLICES;
    static constexpr int TOKENS = SLICES < 8 ? 16 : 8; /* tokens that shared memory holds at a time */
    static constexpr int R = 0, K = R + TOKENS * ROWS, KEEP = K + TOKENS * ROWS;
    static constexpr int FACTOR = KEEP + TOKENS * ROWS, V = FACTOR + TOKENS * ROWS;
    static constexpr int BONUS = V + TOKENS * COLUMNS, END = BONUS + TOKENS; /* offsets in floats */
    static constexpr int SMEM = 4 * END;
    static_assert(SMEM <= SHARED_BYTES, "fits every architecture");
    static_assert(CHECKPOINT % TOKENS == 0, "a checkpoint is between two fills");
};

/* Fills the block's shared memory with TOKENS tokens from `first` on.  From token `end` on, and outside of N and V,
 * inputs are 0 and decays are 1. */
template <int SLICES>
GT_DEV void load_forward_tile(const TokenParams& p, uint32_t smem, int64_t b, int64_t h, int64_t first, int64_t end,
                              int column0, float k_scale) {
    using C = ForwardTraits<SLICES>;
    const Problem& in = p.in;
    constexpr int COLUMN = C::ROWS < C::THREADS ? C::ROWS / 8 : C::TOKENS; /* tokens that a thread loads */
    for (int i = thread_id(); i < C::ROWS * (C::TOKENS / COLUMN); i += C::THREADS) {
        const int n = i % C::ROWS, token = i / C::ROWS * COLUMN;
        const int64_t t = first + token, left = n < in.N ? end - t : 0;
        float r[COLUMN], k[COLUMN], w[COLUMN];
        load_column(r, in.r, in.dtype, offset_of(in.r_stride, b, t, h) + n, in.r_stride.t, p.y ? left : 0);
        load_column(k, in.k, in.dtype, offset_of(in.k_stride, b, t, h) + n, in.k_stride.t, left);
        load_column(w, in.w, in.w_dtype, offset_of(in.w_stride, b, t, h) + n, in.w_stride.t, left);
        GT_UNROLL
        for (int x = 0; x < COLUMN; x++) {
            const Scale scale = scale_of_log(x < left ? log_decay(in, w[x]) : 0.0f);
            const uint32_t address = smem + 4 * ((token + x) * C::ROWS + n);
            sts<float>(address + 4 * C::R, r[x]);
            sts<float>(address + 4 * C::K, k_scale * k[x]);
            sts<float>(address + 4 * C::KEEP, scale.keep);
            sts<float>(address + 4 * C::FACTOR, scale.factor);
        }
    }
    {
        constexpr int COUNT = C::TOKENS / SLICES;
        const int column = thread_id() % C::COLUMNS, token = thread_id() / C::COLUMNS * COUNT;
        const int j = column0 + column;
        const int64_t t = first + token;
        float v[COUNT];
        load_column(v, in.v, in.dtype, offset_of(in.v_stride, b, t, h) + j, in.v_stride.t, j < in.V ? end - t : 0);
        GT_UNROLL
        for (int x = 0; x < COUNT; x++) sts<float>(smem + 4 * (C::V + (token + x) * C::COLUMNS + column), v[x]);
    }
    sync_threads();
    constexpr int LANES = C::THREADS / C::TOKENS; /* lanes that sum a token's bonus */
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

/* Computes y of one token and one column, and updates the column of the state. */
template <int SLICES>
GT_DEV float forward_token(uint32_t smem, int token, int slice, int column, float (&state)[32]) {
    using C = ForwardTraits<SLICES>;
    const float v = lds<float>(smem + 4 * (C::V + token * C::COLUMNS + column));
    float y = 0.0f;
    GT_UNROLL
    for (int q = 0; q < 8; q++) {
        const uint32_t address = smem + 4 * (token * C::ROWS + 4 * (slice + SLICES * q));
        const float4 r = lds<float4>(address + 4 * C::R), k = lds<float4>(address + 4 * C::K);
        const float4 keep = lds<float4>(address + 4 * C::KEEP);
        const float4 factor = lds<float4>(address + 4 * C::FACTOR);
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

/* Copies a thread's 32 rows of its column from or to a state [N,V].  Rows and columns outside the state are 0. */
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

/* Stores a thread's 32 rows of its column in checkpoint number `index`. */
template <int SLICES>
GT_DEV void store_checkpoint(const TokenParams& p, int64_t index, int slice, int column, float (&s)[32]) {
    const Problem& in = p.in;
    index *= (int64_t)in.N * in.V;
    if (p.checkpoint_dtype == GT_BF16) {
        bf16* to = static_cast<bf16*>(p.checkpoints) + index;
        move_column<SLICES, true>(to, in, slice, column, s);
        if (!p.lo_terms) return;
        float lo[32];
        GT_UNROLL
        for (int i = 0; i < 32; i++) lo[i] = bf16_lo(s[i]);
        move_column<SLICES, true>(to + p.lo_terms, in, slice, column, lo);
    } else {
        move_column<SLICES, true>(static_cast<float*>(p.checkpoints) + index, in, slice, column, s);
    }
}

/* Runs the whole pass for one head of a sequence. `head` numbers the heads of all sequences. */
template <int SLICES, bool REVERSE>
GT_DEV void pass_tokens(const TokenParams& p, int64_t tile, int64_t head) {
    using C = ForwardTraits<SLICES>;
    const Problem& in = p.in;
    const uint32_t smem = smem_base();
    const int64_t h = head % in.H;
    const Sequence seq = sequence_at(in.sequences, CHECKPOINT, head / in.H);
    const int column0 = (int)tile * C::COLUMNS;
    const int slice = thread_id() % SLICES, column = thread_id() / SLICES;
    const int64_t NV = (int64_t)in.N * in.V;

    float state[32];
    const float* start = start_row(in.sequences, p.state_in, in.H * NV, p.state_in_shared ? 0 : head / in.H);
    move_column<SLICES, false>(start ? start + h * NV : nullptr, in, slice, column0 + column, state);

    constexpr int PARTS = CHECKPOINT / C::TOKENS; /* parts of a chunk */
    const int64_t parts = (seq.tokens + C::TOKENS - 1) / C::TOKENS, end = seq.first + seq.tokens;
    const int64_t chunk0 = (seq.b * in.H + h) * p.chunk_slots + seq.slot;
    for (int64_t i = 0; i < parts; i++) {
        const int64_t part = REVERSE ? parts - 1 - i : i, first = seq.first + part * C::TOKENS;
        const bool enters = REVERSE ? i == 0 || part % PARTS == PARTS - 1 : part % PARTS == 0;
        if (p.checkpoints && enters) store_checkpoint<SLICES>(p, chunk0 + part / PARTS, slice, column0 + column, state);
        load_forward_tile<SLICES>(p, smem, seq.b, h, first, end, column0, REVERSE ? in.scale : 1.0f);
        const int tokens = (int)(end - first < C::TOKENS ? end - first : C::TOKENS);
        for (int step = 0; step < tokens; step++) {
            const int token = REVERSE ? tokens - 1 - step : step;
            const float y = forward_token<SLICES>(smem, token, slice, column, state);
            if (p.y && slice == 0 && column0 + column < in.V) {
                float out = in.scale * y;
                if (!REVERSE && p.mix.ssm) out = mix_element(p.mix, in, seq.b, first + token, h, column0 + column, out);
                store_as(p.y, in.dtype, offset_of(p.y_stride, seq.b, first + token, h) + column0 + column, out);
            }
        }
        if (!REVERSE && p.snapshots.data && part % PARTS == PARTS - 1) {
            float* const to =
                snapshot_row(in.sequences, p.snapshots, in.H * NV, head / in.H, seq.first, first - seq.first + tokens);
            if (to) move_column<SLICES, true>(to + h * NV, in, slice, column0 + column, state);
        }
        sync_threads();
    }
    float* const last = end_row(in.sequences, p.state_out, in.H * NV, head / in.H);
    if (last) move_column<SLICES, true>(last + h * NV, in, slice, column0 + column, state);
}

template <int SLICES, bool REVERSE>
GT_KERNEL(128, 2)
token_kernel(const GT_GRID_CONSTANT TokenParams p) {
    wait_for_chain();
    const int64_t work_count = sequence_count(p.in.sequences) * p.in.H * p.tiles;
    for (int64_t work = block_x(); work < work_count; work += grid_x())
        pass_tokens<SLICES, REVERSE>(p, work % p.tiles, work / p.tiles);
}

/* ---- backward, any size ---------------------------------------------------------------------------------
 * All chunks are independent once S before and G after each chunk are known.  A fixed number of blocks of 256 threads
 * takes chunks of 4 sub-chunks in turn.  A block computes a chunk in two parts (gt_wkv6.cuh has the formulas):
 *   1 The terms with states, for a tile of columns at a time.  S goes forward through the sub-chunks, and the block
 *     stores S before each of them (`parked`).  Then G goes back through the sub-chunks.  The results go to the block's
 *     scratch:
 *     Sdy[t,n] = (S dy_t)[n]   Gv[t,n] = (G v_t)[n]   Gk[t,j] = (G^T (Q_t . k_t))[j]
 *     SG[sub-chunk,n] = rowsum(S . G)
 *   2 The pairs of tokens inside a sub-chunk, sub-chunk by sub-chunk.  Every gradient is written once.
 * shared, part 1: one state [N, columns+4] (S, then G); Q.k and P.r of the sub-chunk [16,N]; v and dy [16,columns]; the
 * decays of the state: 34 KB at N = V = 64.
 * shared, part 2: r, k, d [16,N]; v and dy [16,V], which Sdy and Gv [16,N] overwrite later; C and A [16,16]: 22 KB.  If
 * part 2 needs more than 64 KB (N = V > 198), WIDE reads v, dy, Sdy and Gv from global memory.
 * scratch of a block: 115 KB in global memory, small enough to stay in L2.
 * arithmetic, part 1: 6 products of 16 N columns multiply-adds each.  Operands come from shared memory in 16-byte
 * pieces, 2 to 5 loads for 16 multiply-adds.
 * arithmetic, part 2: D_ij are running products, computed where they are needed.
 * bytes per token and head, N = V = 64: inputs up to three times (2 KB), gradients 512 B. */
struct ChunkParams {
    Problem in;
    const void *S_checkpoints, *G_checkpoints; /* [B,H,chunk slots,N,V]: S before and G after each chunk */
    gt_dtype S_dtype, G_dtype;
    void *dr, *dk, *dw, *dv;
    gt_stride dr_stride, dk_stride, dw_stride, dv_stride;
    float* du;      /* partial sums [B,chunk slots,H,N] or NULL */
    float* scratch; /* [blocks, scratch_size] */
    int64_t chunk_slots, scratch_size;
    int tiles, columns, pitch; /* tiles of the state; columns of a tile; floats of a row in shared memory.  The last
                                * two are multiples of 4 */
    int rows;                  /* N rounded up to a multiple of 4 */
};

constexpr int STATES_THREADS = 256;

/* Offsets in floats of part 1's shared memory. */
struct StatesLayout {
    int state, Qk, Pr, v, dy, keep, factor, end;
};

GT_HD StatesLayout states_layout(int rows, int columns, int pitch) {
    StatesLayout at;
    at.state = 0;
    at.Qk = at.state + rows * pitch;
    at.Pr = at.Qk + SUB_CHUNK * rows;
    at.v = at.Pr + SUB_CHUNK * rows;
    at.dy = at.v + SUB_CHUNK * columns;
    at.keep = at.dy + SUB_CHUNK * columns;
    at.factor = at.keep + rows;
    at.end = at.factor + rows;
    return at;
}

/* Chooses how a call cuts states into tiles, and the size of its scratch. */
static inline ChunkParams any_chunks_of(const gt_wkv6_args& a) {
    ChunkParams c = {};
    c.in = problem_of(a);
    c.rows = (int)(a.N + 3) / 4 * 4;
    c.columns = (int)(a.V + 3) / 4 * 4;
    int limit = 64;
    while (4 * states_layout(c.rows, limit, limit + 4).end > SHARED_BYTES) limit /= 2;
    if (c.columns > limit) c.columns = limit;
    c.pitch = c.columns + 4;
    c.tiles = (int)(a.V + c.columns - 1) / c.columns;
    c.chunk_slots = chunk_slots_of(a);
    c.scratch_size = SUB_CHUNKS * c.rows * c.columns + CHECKPOINT * (2 * a.N + a.V) + SUB_CHUNKS * a.N;
    c.scratch_size = (c.scratch_size + 63) / 64 * 64;
    c.dr = a.dr, c.dk = a.dk, c.dw = a.dw, c.dv = a.dv;
    c.dr_stride = a.dr_stride, c.dk_stride = a.dk_stride, c.dw_stride = a.dw_stride, c.dv_stride = a.dv_stride;
    return c;
}

struct StatesBlock { /* the chunk and tile that a block works on */
    uint32_t smem;
    StatesLayout at;
    int64_t b, h, start; /* first token of the chunk */
    int tokens, tile, column0;
    float *parked, *Sdy, *Gv, *Gk, *SG; /* sections of the block's scratch */
};

/* Loads Q.k, P.r, v, dy and the decays of a state for the sub-chunk that starts at `first`. */
GT_DEV void load_states_sub_chunk(const ChunkParams& p, const StatesBlock& s, int64_t first) {
    const Problem& in = p.in;
    for (int n = thread_id(); n < p.rows; n += STATES_THREADS) {
        const int left = n < in.N ? s.tokens - (int)(first - s.start) : 0;
        float g[SUB_CHUNK], r[SUB_CHUNK], k[SUB_CHUNK], product = 1.0f, sum = 0.0f;
        load_column(g, in.w, in.w_dtype, offset_of(in.w_stride, s.b, first, s.h) + n, in.w_stride.t, left);
        load_column(r, in.r, in.dtype, offset_of(in.r_stride, s.b, first, s.h) + n, in.r_stride.t, left);
        load_column(k, in.k, in.dtype, offset_of(in.k_stride, s.b, first, s.h) + n, in.k_stride.t, left);
        GT_UNROLL
        for (int t = 0; t < SUB_CHUNK; t++) {
            g[t] = t < left ? log_decay(in, g[t]) : 0.0f;
            sts<float>(s.smem + 4 * (s.at.Pr + t * p.rows + n), in.scale * r[t] * product);
            sum += g[t];
            g[t] = exp_accurate(g[t]);
            product *= g[t];
        }
        product = 1.0f;
        GT_UNROLL
        for (int t = SUB_CHUNK - 1; t >= 0; t--) {
            sts<float>(s.smem + 4 * (s.at.Qk + t * p.rows + n), k[t] * product);
            product *= g[t];
        }
        const Scale scale = scale_of_log(sum);
        sts<float>(s.smem + 4 * (s.at.keep + n), scale.keep);
        sts<float>(s.smem + 4 * (s.at.factor + n), scale.factor);
    }
    for (int i = thread_id(); i < 4 * p.columns; i += STATES_THREADS) {
        const int column = i % p.columns, token = i / p.columns * 4, j = s.column0 + column;
        const int64_t t = first + token;
        const int left = j < in.V ? s.tokens - (int)(t - s.start) : 0;
        float v[4], dy[4];
        load_column(v, in.v, in.dtype, offset_of(in.v_stride, s.b, t, s.h) + j, in.v_stride.t, left);
        load_column(dy, in.dy, in.dtype, offset_of(in.dy_stride, s.b, t, s.h) + j, in.dy_stride.t, left);
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

/* out[t,n] = sum_j state[n,j] x[t,j] over the block's columns.  A thread computes 4 tokens of a row. */
GT_DEV void state_times_tokens(const ChunkParams& p, const StatesBlock& s, int64_t first, int x, float* out) {
    const Problem& in = p.in;
    for (int i = thread_id(); i < p.rows * (SUB_CHUNK / 4); i += STATES_THREADS) {
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
                float& element = out[(first - s.start + t0 + t) * in.N + n];
                element = s.tile ? element + sum[t] : sum[t];
            }
    }
}

/* Gk[t,j] = sum_n G[n,j] Qk[t,n].  A thread computes 4 columns of a token. */
GT_DEV void tokens_times_state(const ChunkParams& p, const StatesBlock& s, int64_t first) {
    const Problem& in = p.in;
    for (int i = thread_id(); i < SUB_CHUNK * (p.columns / 4); i += STATES_THREADS) {
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
            if (s.column0 + j + c < in.V) s.Gk[(first - s.start + t) * in.V + s.column0 + j + c] = column[c];
    }
}

/* SG[n] = sum_j S[n,j] G[n,j], with S from the scratch.  4 lanes take a row. */
GT_DEV void rowsum_states(const ChunkParams& p, const StatesBlock& s, int sub_chunk) {
    const Problem& in = p.in;
    const float* S = s.parked + (int64_t)sub_chunk * p.rows * p.columns;
    for (int i = thread_id(); i < (p.rows * 4 + 31) / 32 * 32; i += STATES_THREADS) {
        const int n = i / 4;
        float sum = 0.0f;
        for (int j = i % 4 * 4; n < p.rows && j < p.columns; j += 16)
            sum =
                dot4(ldg<float4>(S + n * p.columns + j), lds<float4>(s.smem + 4 * (s.at.state + n * p.pitch + j)), sum);
        sum += shfl_xor(sum, 1);
        sum += shfl_xor(sum, 2);
        if (i % 4 == 0 && n < in.N) {
            float& element = s.SG[sub_chunk * in.N + n];
            element = s.tile ? element + sum : sum;
        }
    }
}

/* state <- E . state + sum_t left_t right_t^T.  A thread updates 4 x 4 elements at a time. */
GT_DEV void update_state(const ChunkParams& p, const StatesBlock& s, int left, int right) {
    for (int i = thread_id(); i < (p.rows / 4) * (p.columns / 4); i += STATES_THREADS) {
        const int n = i / (p.columns / 4) * 4, j = i % (p.columns / 4) * 4;
        float sum[4][4] = {};
        GT_UNROLL
        for (int t = 0; t < SUB_CHUNK; t++) {
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
            const uint32_t address = s.smem + 4 * (s.at.state + (n + e) * p.pitch + j);
            float4 x = lds<float4>(address);
            x.x = rescale(keep, factor, x.x, sum[e][0]);
            x.y = rescale(keep, factor, x.y, sum[e][1]);
            x.z = rescale(keep, factor, x.z, sum[e][2]);
            x.w = rescale(keep, factor, x.w, sum[e][3]);
            sts<float4>(address, x);
        }
    }
    sync_threads();
}

/* Loads the tile's columns of the checkpoint [N,V] at `first` into the shared state; elements outside are 0. */
GT_DEV void load_state(const ChunkParams& p, const StatesBlock& s, const void* from, gt_dtype dtype, int64_t first) {
    for (int i = thread_id(); i < p.rows * p.columns; i += STATES_THREADS) {
        const int n = i / p.columns, j = i % p.columns;
        const bool inside = n < p.in.N && s.column0 + j < p.in.V;
        sts<float>(s.smem + 4 * (s.at.state + n * p.pitch + j),
                   inside ? load_as(from, dtype, first + (int64_t)n * p.in.V + s.column0 + j) : 0.0f);
    }
    sync_threads();
}

/* Computes part 1 for one tile of columns.  state: offset of the chunk's checkpoints. */
GT_DEV void roll_tile(const ChunkParams& p, const StatesBlock& s, int sub_chunks, int64_t state) {
    const int64_t parked = (int64_t)p.rows * p.columns;
    load_state(p, s, p.S_checkpoints, p.S_dtype, state);
    for (int sub_chunk = 0; sub_chunk < sub_chunks; sub_chunk++) { /* forwards: store S before each sub-chunk */
        const int64_t first = s.start + sub_chunk * SUB_CHUNK;
        for (int i = thread_id(); i < p.rows * (p.columns / 4); i += STATES_THREADS) {
            const int n = i / (p.columns / 4), j = i % (p.columns / 4) * 4;
            stg<float4>(s.parked + sub_chunk * parked + n * p.columns + j,
                        lds<float4>(s.smem + 4 * (s.at.state + n * p.pitch + j)));
        }
        load_states_sub_chunk(p, s, first);
        state_times_tokens(p, s, first, s.at.dy, s.Sdy);
        sync_threads();
        if (sub_chunk + 1 < sub_chunks) update_state(p, s, s.at.Qk, s.at.v);
    }
    load_state(p, s, p.G_checkpoints, p.G_dtype, state);
    for (int sub_chunk = sub_chunks - 1; sub_chunk >= 0; sub_chunk--) { /* backwards: use G after each sub-chunk */
        const int64_t first = s.start + sub_chunk * SUB_CHUNK;
        load_states_sub_chunk(p, s, first);
        state_times_tokens(p, s, first, s.at.v, s.Gv);
        tokens_times_state(p, s, first);
        rowsum_states(p, s, sub_chunk);
        sync_threads();
        if (sub_chunk > 0) update_state(p, s, s.at.Pr, s.at.dy);
    }
}

/* Part 2: the sub-chunk that a block works on. */
struct SubChunkBlock {
    uint32_t smem;
    int r, k, d, v, dy, Sdy, Gv, C, A; /* offsets in floats */
    int64_t b, h, first;
    int tokens, sub_chunk;
    const float* products; /* part 1's results for the chunk: Sdy, Gv, Gk, SG */
};

GT_HD int sub_chunk_smem(int N, int V, bool wide) {
    return 4 * (SUB_CHUNK * (3 * N + (wide ? 0 : 2 * (N > V ? N : V))) + 2 * SUB_CHUNK * SUB_CHUNK);
}

static_assert(4 * (SUB_CHUNK * 3 * MAX_SIZE + 2 * SUB_CHUNK * SUB_CHUNK) <= SHARED_BYTES, "the wide form fits");

GT_DEV float staged(const SubChunkBlock& s, int offset) { return lds<float>(s.smem + 4 * offset); }

/* Sdy and Gv of the sub-chunk, at index x = token * N + n. */
template <bool WIDE>
GT_DEV float Sdy_at(const ChunkParams& p, const SubChunkBlock& s, int x) {
    return WIDE ? s.products[s.sub_chunk * SUB_CHUNK * p.in.N + x] : staged(s, s.Sdy + x);
}

template <bool WIDE>
GT_DEV float Gv_at(const ChunkParams& p, const SubChunkBlock& s, int x) {
    return WIDE ? s.products[(CHECKPOINT + s.sub_chunk * SUB_CHUNK) * p.in.N + x] : staged(s, s.Gv + x);
}

/* v and dy of a token of the sub-chunk. */
template <bool WIDE>
GT_DEV float v_stride(const ChunkParams& p, const SubChunkBlock& s, int token, int j) {
    return WIDE ? load_as(p.in.v, p.in.dtype, offset_of(p.in.v_stride, s.b, s.first + token, s.h) + j)
                : staged(s, s.v + token * p.in.V + j);
}

template <bool WIDE>
GT_DEV float dy_stride(const ChunkParams& p, const SubChunkBlock& s, int token, int j) {
    return WIDE ? load_as(p.in.dy, p.in.dtype, offset_of(p.in.dy_stride, s.b, s.first + token, s.h) + j)
                : staged(s, s.dy + token * p.in.V + j);
}

/* Stores four tokens of one column of a tile [16, size]. */
GT_DEV void store_column(const SubChunkBlock& s, int offset, int size, int token, int column, const float (&x)[4]) {
    GT_UNROLL
    for (int i = 0; i < 4; i++) sts<float>(s.smem + 4 * (offset + (token + i) * size + column), x[i]);
}

/* Loads r, k, d, v and dy of the sub-chunk; r is multiplied by the scale of y.  Missing tokens get d = 1 and zeros. */
template <bool WIDE>
GT_DEV void load_sub_chunk(const ChunkParams& p, const SubChunkBlock& s) {
    const Problem& in = p.in;
    for (int i = thread_id(); i < 4 * in.N; i += 256) {
        const int n = i % in.N, token = i / in.N * 4;
        const int64_t t = s.first + token;
        const int left = s.tokens - token;
        float r[4], k[4], d[4];
        load_column(r, in.r, in.dtype, offset_of(in.r_stride, s.b, t, s.h) + n, in.r_stride.t, left);
        load_column(k, in.k, in.dtype, offset_of(in.k_stride, s.b, t, s.h) + n, in.k_stride.t, left);
        load_column(d, in.w, in.w_dtype, offset_of(in.w_stride, s.b, t, s.h) + n, in.w_stride.t, left);
        GT_UNROLL
        for (int x = 0; x < 4; x++) r[x] *= in.scale, d[x] = x < left ? exp_accurate(log_decay(in, d[x])) : 1.0f;
        store_column(s, s.r, in.N, token, n, r);
        store_column(s, s.k, in.N, token, n, k);
        store_column(s, s.d, in.N, token, n, d);
    }
    for (int i = thread_id(); !WIDE && i < 4 * in.V; i += 256) {
        const int j = i % in.V, token = i / in.V * 4;
        const int64_t t = s.first + token;
        const int left = s.tokens - token;
        float v[4], dy[4];
        load_column(v, in.v, in.dtype, offset_of(in.v_stride, s.b, t, s.h) + j, in.v_stride.t, left);
        load_column(dy, in.dy, in.dtype, offset_of(in.dy_stride, s.b, t, s.h) + j, in.dy_stride.t, left);
        store_column(s, s.v, in.V, token, j, v);
        store_column(s, s.dy, in.V, token, j, dy);
    }
    sync_threads();
}

/* Loads Sdy and Gv of the sub-chunk.  They overwrite v and dy in shared memory. */
GT_DEV void load_products(const ChunkParams& p, const SubChunkBlock& s) {
    const Problem& in = p.in;
    sync_threads();
    for (int i = thread_id(); i < 4 * in.N; i += 256) {
        const int n = i % in.N, token = i / in.N * 4;
        const int index = (s.sub_chunk * SUB_CHUNK + token) * in.N + n;
        float Sdy[4], Gv[4];
        load_column(Sdy, s.products, GT_F32, index, in.N, 4);
        load_column(Gv, s.products, GT_F32, CHECKPOINT * in.N + index, in.N, 4);
        store_column(s, s.Sdy, in.N, token, n, Sdy);
        store_column(s, s.Gv, in.N, token, n, Gv);
    }
    sync_threads();
}

/* Computes C_ij = <dy_i, v_j> for j <= i, one pair per thread.  Also computes A_ij, with 16 lanes per row i, which
 * share the sum over n. */
template <bool WIDE>
GT_DEV void pair_products(const ChunkParams& p, const SubChunkBlock& s) {
    const Problem& in = p.in;
    const int i = thread_id() / SUB_CHUNK, j = thread_id() % SUB_CHUNK;
    float c = 0.0f;
    const bool pair = j <= i && (!WIDE || i < s.tokens);
    for (int x = 0; pair && x < in.V; x++) c = fma_rn(dy_stride<WIDE>(p, s, i, x), v_stride<WIDE>(p, s, j, x), c);
    sts<float>(s.smem + 4 * (s.C + thread_id()), c);

    float a[SUB_CHUNK] = {};
    for (int n = j; n < in.N; n += SUB_CHUNK) {
        float product = staged(s, s.r + i * in.N + n); /* r_i D_im for the current m, which runs down from i-1 */
        GT_UNROLL
        for (int m = SUB_CHUNK - 1; m >= 0; m--) {
            const float k = staged(s, s.k + m * in.N + n);
            if (m == i && in.u) a[m] = fma_rn(product * in.u[s.h * in.N + n], k, a[m]);
            if (m < i) {
                a[m] = fma_rn(product, k, a[m]);
                product *= staged(s, s.d + m * in.N + n);
            }
        }
    }
    GT_UNROLL
    for (int m = 0; m < SUB_CHUNK; m++) {
        for (int mask = 1; mask < SUB_CHUNK; mask <<= 1) a[m] += shfl_xor(a[m], mask);
        if (j == m) sts<float>(s.smem + 4 * (s.A + i * SUB_CHUNK + m), a[m]);
    }
    sync_threads();
}

/* dv_j = Gk_j + sum_{i >= j} A_ij dy_i */
template <bool WIDE>
GT_DEV void sub_chunk_dv(const ChunkParams& p, const SubChunkBlock& s) {
    const Problem& in = p.in;
    for (int x = thread_id(); x < s.tokens * in.V; x += 256) {
        const int t = x / in.V, j = x % in.V;
        float dv = s.products[2 * CHECKPOINT * in.N + (s.sub_chunk * SUB_CHUNK + t) * in.V + j];
        for (int i = t; i < s.tokens; i++)
            dv = fma_rn(staged(s, s.A + i * SUB_CHUNK + t), dy_stride<WIDE>(p, s, i, j), dv);
        store_as(p.dv, in.dtype, offset_of(p.dv_stride, s.b, s.first + t, s.h) + j, dv);
    }
}

template <bool WIDE>
GT_DEV void sub_chunk_dr(const ChunkParams& p, const SubChunkBlock& s) {
    const Problem& in = p.in;
    for (int x = thread_id(); x < s.tokens * in.N; x += 256) {
        const int i = x / in.N, n = x % in.N;
        const float u = in.u ? in.u[s.h * in.N + n] : 0.0f;
        float dr = u * staged(s, s.k + x) * staged(s, s.C + i * SUB_CHUNK + i), product = 1.0f;
        for (int j = i - 1; j >= 0; j--) {
            dr = fma_rn(product * staged(s, s.C + i * SUB_CHUNK + j), staged(s, s.k + j * in.N + n), dr);
            product *= staged(s, s.d + j * in.N + n);
        }
        dr = fma_rn(product, Sdy_at<WIDE>(p, s, x), dr);
        store_as(p.dr, in.dtype, offset_of(p.dr_stride, s.b, s.first + i, s.h) + n, in.scale * dr);
    }
}

template <bool WIDE>
GT_DEV void sub_chunk_dk(const ChunkParams& p, const SubChunkBlock& s) {
    const Problem& in = p.in;
    for (int x = thread_id(); x < s.tokens * in.N; x += 256) {
        const int j = x / in.N, n = x % in.N;
        const float u = in.u ? in.u[s.h * in.N + n] : 0.0f;
        float dk = u * staged(s, s.r + x) * staged(s, s.C + j * SUB_CHUNK + j), product = 1.0f;
        for (int i = j + 1; i < s.tokens; i++) {
            dk = fma_rn(product * staged(s, s.C + i * SUB_CHUNK + j), staged(s, s.r + i * in.N + n), dk);
            product *= staged(s, s.d + i * in.N + n);
        }
        dk = fma_rn(product, Gv_at<WIDE>(p, s, x), dk);
        store_as(p.dk, in.dtype, offset_of(p.dk_stride, s.b, s.first + j, s.h) + n, dk);
    }
}

/* Computes dg of all tokens of channel n.  There are no subtractions, so nothing cancels. */
template <bool WIDE>
GT_DEV void sub_chunk_dg(const ChunkParams& p, const SubChunkBlock& s, int n, float (&dg)[SUB_CHUNK]) {
    const Problem& in = p.in;
    float k[SUB_CHUNK], all = 1.0f;
    GT_UNROLL
    for (int t = 0; t < SUB_CHUNK; t++) {
        k[t] = staged(s, s.k + t * in.N + n);
        dg[t] = 0.0f;
    }
    /* The terms sum_{j<t} k_j Q_j (G v_j) and E rowsum(S . G).  `left` adds them up from the first token on. */
    float left = s.products[CHECKPOINT * (2 * in.N + in.V) + s.sub_chunk * in.N + n];
    float Qk[SUB_CHUNK];
    GT_UNROLL
    for (int t = SUB_CHUNK - 1; t >= 0; t--) {
        Qk[t] = k[t] * all * Gv_at<WIDE>(p, s, t * in.N + n);
        all *= staged(s, s.d + t * in.N + n);
    }
    left *= all;
    GT_UNROLL
    for (int t = 0; t < SUB_CHUNK; t++) {
        dg[t] += left;
        left += Qk[t];
    }
    /* The pairs that end at token i.  Token t < i is spanned by the pairs of i with S and with tokens 0 ... t-1. */
    GT_UNROLL
    for (int i = 1; i < SUB_CHUNK; i++) {
        if (i < s.tokens) {
            float term[SUB_CHUNK], product = staged(s, s.r + i * in.N + n);
            GT_UNROLL
            for (int j = i - 1; j >= 0; j--) {
                term[j] = product * k[j] * staged(s, s.C + i * SUB_CHUNK + j);
                product *= staged(s, s.d + j * in.N + n);
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
GT_DEV void sub_chunk_dw(const ChunkParams& p, const SubChunkBlock& s) {
    const Problem& in = p.in;
    for (int n = thread_id(); n < in.N; n += 256) {
        float dg[SUB_CHUNK], w[SUB_CHUNK];
        load_column(w, in.w, in.w_dtype, offset_of(in.w_stride, s.b, s.first, s.h) + n, in.w_stride.t, s.tokens);
        sub_chunk_dg<WIDE>(p, s, n, dg);
        GT_UNROLL
        for (int t = 0; t < SUB_CHUNK; t++) {
            if (t >= s.tokens) break;
            float dw = dg[t];
            if (in.decay == GT_DECAY_RAW) dw *= log_decay(in, w[t]);
            if (staged(s, s.d + t * in.N + n) == 0.0f) dw = 0.0f; /* log d may be -inf, and its product with dg NaN */
            store_as(p.dw, in.w_dtype, offset_of(p.dw_stride, s.b, s.first + t, s.h) + n, dw);
        }
    }
}

/* Returns sum_t C_tt r_t k_t of channel n. */
GT_DEV float sub_chunk_du(const ChunkParams& p, const SubChunkBlock& s, int n) {
    float du = 0.0f;
    for (int t = 0; t < s.tokens; t++)
        du = fma_rn(staged(s, s.C + t * SUB_CHUNK + t) * staged(s, s.r + t * p.in.N + n),
                    staged(s, s.k + t * p.in.N + n), du);
    return du;
}

template <bool WIDE>
GT_KERNEL(256, 2)
backward_chunk_kernel(const GT_GRID_CONSTANT ChunkParams p) {
    wait_for_chain();
    const Problem& in = p.in;
    StatesBlock s;
    SubChunkBlock l;
    s.smem = l.smem = smem_base();
    s.at = states_layout(p.rows, p.columns, p.pitch);
    s.parked = p.scratch + (int64_t)block_x() * p.scratch_size;
    s.Sdy = s.parked + SUB_CHUNKS * p.rows * p.columns;
    l.products = s.Sdy;
    s.Gv = s.Sdy + CHECKPOINT * in.N;
    s.Gk = s.Gv + CHECKPOINT * in.N;
    s.SG = s.Gk + CHECKPOINT * in.V;
    l.r = 0;
    l.k = l.r + SUB_CHUNK * in.N;
    l.d = l.k + SUB_CHUNK * in.N;
    l.v = l.d + SUB_CHUNK * in.N;
    l.dy = l.v + SUB_CHUNK * in.V;
    l.Sdy = l.v;
    l.Gv = l.Sdy + SUB_CHUNK * in.N;
    l.C = l.v + (WIDE ? 0 : 2 * SUB_CHUNK * (in.N > in.V ? in.N : in.V));
    l.A = l.C + SUB_CHUNK * SUB_CHUNK;

    const int64_t heads = in.sequences.B * in.H;
    const int64_t slots = in.sequences.cu_seqlens ? used_slots(in.sequences, CHECKPOINT) : p.chunk_slots;
    for (int64_t item = block_x(); item < heads * slots; item += grid_x()) {
        const int64_t slot = item / heads, head = item % heads;
        s.b = l.b = head / in.H;
        s.h = l.h = head % in.H;
        const gt_chunk chunk = chunk_at(in.sequences, CHECKPOINT, slot);
        if (chunk.sequence < 0) continue;
        s.start = chunk.first, s.tokens = (int)(chunk.last - chunk.first);
        const int sub_chunks = (s.tokens + SUB_CHUNK - 1) / SUB_CHUNK;
        for (s.tile = 0; s.tile < p.tiles; s.tile++) {
            s.column0 = s.tile * p.columns;
            roll_tile(p, s, sub_chunks, (head * p.chunk_slots + slot) * in.N * in.V);
        }
        sync_threads();
        float du = 0.0f; /* du of channel thread_id(); N is at most 256 */
        for (int sub_chunk = 0; sub_chunk < sub_chunks; sub_chunk++) {
            l.first = s.start + sub_chunk * SUB_CHUNK;
            l.tokens = s.tokens - sub_chunk * SUB_CHUNK < SUB_CHUNK ? s.tokens - sub_chunk * SUB_CHUNK : SUB_CHUNK;
            l.sub_chunk = sub_chunk;
            load_sub_chunk<WIDE>(p, l);
            pair_products<WIDE>(p, l);
            if (p.dv) sub_chunk_dv<WIDE>(p, l);
            if (!WIDE) load_products(p, l);
            if (p.dr) sub_chunk_dr<WIDE>(p, l);
            if (p.dk) sub_chunk_dk<WIDE>(p, l);
            if (p.dw) sub_chunk_dw<WIDE>(p, l);
            if (thread_id() < in.N) du += sub_chunk_du(p, l, thread_id());
            sync_threads();
        }
        if (p.du && thread_id() < in.N) p.du[((l.b * p.chunk_slots + slot) * in.H + l.h) * in.N + thread_id()] = du;
    }
}

} /* namespace wkv6 */
} /* namespace gt */

#endif
