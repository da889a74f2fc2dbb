/* The kernels that depend on tokens or on their order: embedding, and lerp, which contains the token shift.  A block
 * has 8 warps (hybrid_machine.cuh). */
#ifndef HYBRID_TOKENS_CUH
#define HYBRID_TOKENS_CUH

#include "hybrid_machine.cuh"

namespace hy {

/* ---- embedding ------------------------------------------------------------------------------- */

struct EmbeddingParams {
    int64_t M, V, D;
    const int32_t* token;
    const void *table, *dy;
    void* y;
    float* sums;
    int64_t rows; /* number of rows per warp */
};

/* The grid has ceil(M/8) blocks, with one warp per row. */
template <class T, int N>
GT_KERNEL(THREADS, 1)
embedding_forward_kernel(const GT_GRID_CONSTANT EmbeddingParams p) {
    const int64_t row = row_of_warp();
    if (row >= p.M) return;
    const int64_t from = p.token[row] * p.D;
    for (int64_t d = lane_id() * N; d < p.D; d += 32 * N) {
        float x[N];
        load<T>(x, p.table, from + d);
        store<T>(p.y, row * p.D + d, x);
    }
}

/* Computes sums[part][v][d], the sum of dy[m][d] over the part's rows m that have token v.  Each warp adds in rising
 * order of m.  A block reads the tokens of its part, and only those rows of dy that it adds.
 *
 * The grid has (V * parts) x ceil(D / 128) blocks, each with 4 KB of shared memory; block x is v * parts + part. */
template <class T, int N>
GT_KERNEL(THREADS, 1)
embedding_backward_kernel(const GT_GRID_CONSTANT EmbeddingParams p) {
    constexpr int AT_ONCE = 8; /* number of loads in flight */
    const int64_t parts = grid_x() / p.V, v = block_x() / parts, part = block_x() % parts;
    const int64_t d = ((int64_t)block_y() * 32 + lane_id()) * N;
    const int64_t first = (part * WARPS + warp_id()) * p.rows;
    const int64_t last = first + p.rows < p.M ? first + p.rows : p.M;
    float sum[1][N] = {};
    for (int64_t row = first; row < last; row += 32) {
        const int32_t mine = row + lane_id() < last ? p.token[row + lane_id()] : -1;
        if (!warp_any(mine == v)) continue;
        for (int lane = 0; lane < 32; lane += AT_ONCE) {
            float x[AT_ONCE][N] = {};
            GT_UNROLL
            for (int k = 0; k < AT_ONCE; k++)
                if (shfl_idx(mine, lane + k) == v && d < p.D) load<T>(x[k], p.dy, (row + lane + k) * p.D + d);
            GT_UNROLL
            for (int k = 0; k < AT_ONCE; k++) {
                GT_UNROLL
                for (int j = 0; j < N; j++) sum[0][j] += x[k][j];
            }
        }
    }
    write_block_sums(p.sums + (part * p.V + v) * p.D, p.D, sum);
}

static gt_status embedding_forward(hy_backend* be, const hy_embedding_args* a) {
    const EmbeddingParams p = {a->M, a->V, a->D, a->token, a->table, nullptr, a->y, nullptr, 0};
    return with_layout(a->dtype, in_fours(a->D, a->table, a->y), [&](auto l) {
        using L = decltype(l);
        return enqueue(machine(be), "embedding", embedding_forward_kernel<typename L::T, L::N>, ceil_div(a->M, WARPS),
                       1, 0, p);
    });
}

static gt_status embedding_backward(hy_backend* be, const hy_embedding_args* a) {
    const Machine& m = machine(be);
    const int64_t wanted = smaller(16, ceil_div(a->M, 32 * WARPS));
    int64_t parts;
    gt_status status = count_parts(m, "embedding", wanted, a->V * a->D, &parts);
    if (status != GT_OK) return status;
    const int64_t rows = parts ? ceil_div(a->M, parts * WARPS) : 0;
    const EmbeddingParams p = {a->M, a->V, a->D, a->token, nullptr, a->dy, nullptr, m.sums, rows};
    status = with_layout(a->dtype, in_fours(a->D, a->dy), [&](auto l) {
        using L = decltype(l);
        return enqueue(m, "embedding", embedding_backward_kernel<typename L::T, L::N>, a->V * parts,
                       ceil_div(a->D, 32 * L::N), block_sums_bytes<1, L::N>(), p);
    });
    if (status != GT_OK) return status;
    return reduce_parts(m, a->dtable, parts, a->V * a->D, a->accumulate);
}

/* ---- lerp -------------------------------------------------------------------------------------
 * A kernel computes COUNT lerps at once: all five data-dependent lerps of the model, or a single lerp. */

struct LerpParams {
    int64_t M, T, D;
    int accumulate_dx;
    const void *x, *m, *dy; /* m may be NULL */
    const float *state_in, *mu;
    void *y, *dx, *dm;       /* dx and dm may be NULL */
    float *state_out, *sums; /* may be NULL */
    int64_t rows;            /* number of rows per warp */
};

/* Loads x of the token before row `row`, at columns d, d + 1, ...  t is the row's index in its sequence. */
template <class T, int N>
GT_DEV void load_before(float (&before)[N], const LerpParams& p, int64_t row, int64_t t, int64_t d) {
    if (t > 0) {
        load<T>(before, p.x, (row - 1) * p.D + d);
        return;
    }
    GT_UNROLL
    for (int j = 0; j < N; j++) before[j] = p.state_in ? p.state_in[row / p.T * p.D + d + j] : 0.0f;
}

/* Loads the weights of lerp i in this row: w = mu[i] + m[i]. */
template <class T, int N>
GT_DEV void load_weight(float (&w)[N], const LerpParams& p, int i, int64_t row, int64_t d) {
    load<float>(w, p.mu, i * p.D + d);
    if (!p.m) return;
    float m[N];
    load<T>(m, p.m, (i * p.M + row) * p.D + d);
    GT_UNROLL
    for (int j = 0; j < N; j++) w[j] += m[j];
}

/* The grid has ceil(M/8) blocks, with one warp per row.  state_in and state_out may be the same array, so the warp
 * that reads a sequence's state_in also writes its state_out. */
template <class T, int N, int COUNT>
GT_KERNEL(THREADS, 1)
lerp_forward_kernel(const GT_GRID_CONSTANT LerpParams p) {
    const int64_t row = row_of_warp(), t = row % p.T;
    if (row >= p.M) return;
    for (int64_t d = lane_id() * N; d < p.D; d += 32 * N) {
        float x[N], before[N], w[COUNT][N], y[N];
        load<T>(x, p.x, row * p.D + d);
        load_before<T>(before, p, row, t, d);
        GT_UNROLL
        for (int i = 0; i < COUNT; i++) load_weight<T>(w[i], p, i, row, d);
        GT_UNROLL
        for (int i = 0; i < COUNT; i++) {
            GT_UNROLL
            for (int j = 0; j < N; j++) y[j] = fma_rn(before[j] - x[j], w[i][j], x[j]);
            store<T>(p.y, (i * p.M + row) * p.D + d, y);
        }
        if (t == 0 && p.state_out) {
            load<T>(x, p.x, (row + p.T - 1) * p.D + d);
            store<float>(p.state_out, row / p.T * p.D + d, x);
        }
    }
}

/* A warp walks backwards through its rows.  `next` holds the contribution of token t+1 to dx_t.  So the warp first
 * computes the contribution of the row that follows its last row.
 *
 * The grid has parts x ceil(D / 128) blocks; five lerps take 20 KB of shared memory.  The kernel reads x, m and dy
 * once.  It reads one row more per warp, so 1/rows of the data twice.  It writes dx and dm. */
template <class T, int N, int COUNT>
GT_KERNEL(THREADS, 1)
lerp_backward_kernel(const GT_GRID_CONSTANT LerpParams p) {
    const int64_t d = ((int64_t)block_y() * 32 + lane_id()) * N;
    const int64_t first = row_of_warp() * p.rows;
    const int64_t last = first + p.rows < p.M ? first + p.rows : p.M;
    float dmu[COUNT][N] = {}, next[N] = {}, w[COUNT][N], g[COUNT][N];
    if (d < p.D && last < p.M && first < last && last % p.T) {
        GT_UNROLL
        for (int i = 0; i < COUNT; i++) {
            load_weight<T>(w[i], p, i, last, d);
            load<T>(g[i], p.dy, (i * p.M + last) * p.D + d);
        }
        GT_UNROLL
        for (int i = 0; i < COUNT; i++) {
            GT_UNROLL
            for (int j = 0; j < N; j++) next[j] = fma_rn(g[i][j], w[i][j], next[j]);
        }
    }
    for (int64_t row = last - 1, t = (last - 1) % p.T; d < p.D && row >= first; row--) {
        float x[N], before[N], dx[N] = {}, earlier[N] = {};
        load<T>(x, p.x, row * p.D + d);
        load_before<T>(before, p, row, t, d);
        if (p.dx && p.accumulate_dx) load<T>(dx, p.dx, row * p.D + d);
        GT_UNROLL
        for (int i = 0; i < COUNT; i++) {
            load_weight<T>(w[i], p, i, row, d);
            load<T>(g[i], p.dy, (i * p.M + row) * p.D + d);
        }
        GT_UNROLL
        for (int j = 0; j < N; j++) dx[j] += next[j];
        GT_UNROLL
        for (int i = 0; i < COUNT; i++) {
            float dm[N];
            GT_UNROLL
            for (int j = 0; j < N; j++) {
                dx[j] = fma_rn(g[i][j], 1.0f - w[i][j], dx[j]);
                earlier[j] = fma_rn(g[i][j], w[i][j], earlier[j]);
                dm[j] = g[i][j] * (before[j] - x[j]);
                dmu[i][j] += dm[j];
            }
            if (p.dm) store<T>(p.dm, (i * p.M + row) * p.D + d, dm);
        }
        if (p.dx) store<T>(p.dx, row * p.D + d, dx);
        GT_UNROLL
        for (int j = 0; j < N; j++) next[j] = t > 0 ? earlier[j] : 0.0f;
        t = t > 0 ? t - 1 : p.T - 1;
    }
    if (p.sums) write_block_sums(p.sums + (int64_t)block_x() * COUNT * p.D, p.D, dmu);
}

/* Makes the kernel's parameters for the lerps that begin at index i. */
static LerpParams lerps_from(const hy_lerp_args* a, int64_t i) {
    const int64_t M = a->B * a->T, skip = i * M * a->D * (int64_t)size_of(a->dtype);
    LerpParams p = {};
    p.M = M, p.T = a->T, p.D = a->D;
    p.accumulate_dx = a->accumulate_dx || i > 0;
    p.x = a->x, p.state_in = a->state_in, p.mu = a->mu + i * a->D;
    if (a->m) p.m = static_cast<const char*>(a->m) + skip;
    if (a->y) p.y = static_cast<char*>(a->y) + skip;
    if (a->dy) p.dy = static_cast<const char*>(a->dy) + skip;
    if (a->dm) p.dm = static_cast<char*>(a->dm) + skip;
    p.dx = a->dx;
    return p;
}

template <int COUNT>
static gt_status lerp_group_forward(const Machine& m, const hy_lerp_args* a, int64_t i) {
    LerpParams p = lerps_from(a, i);
    if (i + COUNT == a->count) p.state_out = a->state_out; /* only the last group, since no later one reads state_in */
    const bool fours = in_fours(p.D, p.x, p.m, p.mu, p.y, p.state_out);
    return with_layout(a->dtype, fours, [&](auto l) {
        using L = decltype(l);
        return enqueue(m, "lerp", lerp_forward_kernel<typename L::T, L::N, COUNT>, ceil_div(p.M, WARPS), 1, 0, p);
    });
}

template <int COUNT>
static gt_status lerp_group_backward(const Machine& m, const hy_lerp_args* a, int64_t i) {
    LerpParams p = lerps_from(a, i);
    int64_t parts;
    gt_status status = count_parts(m, "lerp", ceil_div(p.M, 8 * WARPS), COUNT * p.D, &parts);
    if (status != GT_OK) return status;
    p.rows = parts ? ceil_div(p.M, parts * WARPS) : 0;
    p.sums = a->dmu ? m.sums : nullptr;
    const bool fours = in_fours(p.D, p.x, p.m, p.mu, p.dy, p.dx, p.dm);
    status = with_layout(a->dtype, fours, [&](auto l) {
        using L = decltype(l);
        return enqueue(m, "lerp", lerp_backward_kernel<typename L::T, L::N, COUNT>, parts, ceil_div(p.D, 32 * L::N),
                       block_sums_bytes<COUNT, L::N>(), p);
    });
    if (status != GT_OK || !a->dmu) return status;
    return reduce_parts(m, a->dmu + i * p.D, parts, COUNT * p.D, a->accumulate);
}

static gt_status lerp_forward(hy_backend* be, const hy_lerp_args* a) {
    if (a->count == 5) return lerp_group_forward<5>(machine(be), a, 0);
    gt_status status = GT_OK;
    for (int64_t i = 0; i < a->count && status == GT_OK; i++) status = lerp_group_forward<1>(machine(be), a, i);
    return status;
}

static gt_status lerp_backward(hy_backend* be, const hy_lerp_args* a) {
    if (a->count == 5) return lerp_group_backward<5>(machine(be), a, 0);
    gt_status status = GT_OK;
    for (int64_t i = 0; i < a->count && status == GT_OK; i++) status = lerp_group_backward<1>(machine(be), a, i);
    return status;
}

} /* namespace hy */

#endif
