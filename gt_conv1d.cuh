/* gt_conv1d.cuh - causal depthwise convolution.
 *
 * THE OPERATOR (one batch element and channel), with e = [the W-1 inputs before the first; x_0 ...]
 *     pre_t = bias + sum_{j<W} weight[j] e_{t+j}     y_t = act(pre_t)     state_out = last W-1 of e
 * Backward, with q_t = dy_t act'(pre_t):
 *     de_{t+j} += weight[j] q_t     dweight[j] += e_{t+j} q_t     dbias += q_t
 * where the last W-1 of de begin with dstate_out, and its first W-1 are dstate_in.
 *
 * NUMERICAL HAZARDS, and what is done about them
 *   - Kernels take every width as 4.  The taps that a smaller one lacks are skipped, not 0: the
 *     input there may be infinite.
 *   - SiLU and its derivative at infinity: silu_of_sigmoid and silu_derivative.
 *   - dweight and dbias are sums over batch and time: a thread adds at most 32 tokens, then a block
 *     its threads, then reduce_rows the blocks.
 *
 * This file: what describes the operator (plain C, shared with the stubs and the CPU twin), the
 * kernels, the launchers, the C functions. */
#ifndef GT_CONV1D_CUH
#define GT_CONV1D_CUH

#include "gt/base/op.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- the operator's table -------------------------------------------------------------------- */

static gt_status gt_conv1d_resolve(void *filled, gt_pass pass, gt_dims *dims) {
    gt_conv1d_args *a = (gt_conv1d_args *)filled;
    gt_recurrence f = {a->B, a->T, 0, a->seq_capacity, a->slot_capacity,
                       a->state_in_shared, a->state_in, a->state_out,
                       a->cu_seqlens, a->seq_count, a->slots};
    gt_status status;
    dims->n['J' - 'A'] = a->W - 1; /* inputs that a state holds */
    if ((status = gt_check_range(GT_ERROR_SIZE, "W", a->W, 2, 4)) ||
        (status = gt_check_range(GT_ERROR_VALUE, "activation", (int)a->activation, GT_ACT_NONE,
                                 GT_ACT_SILU)) ||
        (status = gt_resolve_recurrent(&f, pass, dims)))
        return status;
    if (pass == GT_STEP) a->slot_capacity = dims->n['Q' - 'A'];
    return GT_OK;
}

#define GT_AT(field) offsetof(gt_conv1d_args, field)
GT_API const gt_op *gt_op_conv1d(void) {
    static const gt_size sizes[] = {{'B', "B", GT_AT(B), 0},
                                    {'T', "T", GT_AT(T), 0},
                                    {'D', "D", GT_AT(D), 1},
                                    {'W', "W", GT_AT(W), 2},
                                    {0, NULL, 0, 0}};
    static const gt_tensor tensors[] = {
        {"x", GT_AT(x), GT_AT(x_stride), "BTD", 'x', "III", NULL},
        {"weight", GT_AT(weight), 0, "DW", 'f', "III", NULL},
        {"bias", GT_AT(bias), 0, "D", 'f', "iii", NULL},
        {"state_in", GT_AT(state_in), 0, "SDJ", 'f', "ii-", NULL},
        {"y", GT_AT(y), GT_AT(y_stride), "BTD", 'x', "O-O", NULL},
        {"state_out", GT_AT(state_out), 0, "QDJ", 'f', "o-s", "state_in"},
        {"slots", GT_AT(slots), 0, "B", 'i', "--i", NULL},
        {"dy", GT_AT(dy), GT_AT(dy_stride), "BTD", 'x', "-I-", NULL},
        {"dstate_out", GT_AT(dstate_out), 0, "QDJ", 'f', "-i-", NULL},
        {"dx", GT_AT(dx), GT_AT(dx_stride), "BTD", 'x', "-o-", NULL},
        {"dweight", GT_AT(dweight), 0, "DW", 'f', "-g-", NULL},
        {"dbias", GT_AT(dbias), 0, "D", 'f', "-g-", NULL},
        {"dstate_in", GT_AT(dstate_in), 0, "SDJ", 'f', "-o-", "dstate_out"},
        {NULL, 0, 0, NULL, 0, NULL, NULL}};
    static const gt_op op = {"conv1d", sizeof(gt_conv1d_args), GT_AT(dtype), 0,
                             NULL,     GT_AT(accumulate),      sizes,        tensors,
                             gt_conv1d_resolve};
    return &op;
}
#undef GT_AT

#ifdef __cplusplus
} /* extern "C": kernels follow */
#endif

#if defined(__CUDACC__) || defined(GT_EMU)

#include "gt/base/reduce.cuh"

namespace gt {
namespace conv1d {

/* ---- sizes ----------------------------------------------------------------------------------- */

constexpr int TAPS = 4;        /* every width is taken as 4, with the first 4 - W taps left out */
constexpr int HALO = TAPS - 1; /* tokens that a tap reaches back */
constexpr int THREADS = 256;
constexpr int MAX_RUN = 32, MIN_RUN = 8; /* tokens that a thread walks through */
static_assert(MIN_RUN >= 2 * HALO, "only the first run of a sequence needs the state");

/* One argument struct, prepared, as every kernel sees it. */
struct Problem {
    int64_t B, T, D;
    int W;
    gt_dtype dtype;
    bool has_silu;
    const float *weight, *bias;
    const void* x;
    gt_stride x_at;
    const float* state_in;
    bool state_in_shared;
};

/* How a kernel over channels is cut into blocks: `lanes` neighbouring threads (a power of 2 up to
 * 32) hold neighbouring groups of channels, THREADS / lanes rows lie in a block; a row is a run of
 * tokens of one batch element. */
struct Cut {
    int lanes, run;
    int64_t tiles, runs, blocks; /* of channels; in a sequence; of rows */
};

/* Tokens that a thread has in flight: of one tensor in forward, of two in backward. */
template <class T, int VEC, int TENSORS>
constexpr int BATCH = VEC * sizeof(T) * TENSORS == 16 ? 4 : 8;

/* ---- device helpers -------------------------------------------------------------------------- */

GT_DEV int64_t at(gt_stride s, int64_t b, int64_t t, int64_t d) {
    return b * s.b + t * s.t + d * s.h;
}

/* The sigmoid of outputs stored in T: under the rounding of 16 bits the fast one will do. */
template <class T>
GT_DEV float sigmoid_of(float x) {
    if constexpr (std::is_same<T, float>::value)
        return sigmoid(x);
    else
        return sigmoid_fast(x);
}

/* The parameters of VEC channels.  A tap before `first` does not exist: it is skipped, not
 * multiplied by 0, for the input there may be infinite. */
template <int VEC>
struct Taps {
    float weight[TAPS][VEC], bias[VEC];
    int first;

    GT_METHOD void load(const Problem& p, int64_t d) {
        first = TAPS - p.W;
        GT_UNROLL
        for (int v = 0; v < VEC; v++) {
            GT_UNROLL
            for (int k = 0; k < TAPS; k++)
                weight[k][v] = k >= first ? p.weight[(d + v) * p.W + k - first] : 0.0f;
            bias[v] = p.bias ? p.bias[d + v] : 0.0f;
        }
    }

    /* pre_t of channel v from the inputs e_{t-3} ... e_t */
    template <int ROWS>
    GT_METHOD float sum(const float (&e)[ROWS][VEC], int v) const {
        float pre = bias[v];
        GT_UNROLL
        for (int k = 0; k < TAPS; k++)
            if (k >= first) pre = fma_rn(weight[k][v], e[k][v], pre);
        return pre;
    }

    /* the gradient of an input from the q of its own token, q[3], and the three before it in a walk
     * that goes forward: the input was three tokens ago */
    GT_METHOD float gradient(const float (&q)[TAPS][VEC], int v) const {
        float sum = 0.0f;
        GT_UNROLL
        for (int k = 0; k < TAPS; k++)
            if (k >= first) sum = fma_rn(weight[k][v], q[HALO - k][v], sum);
        return sum;
    }
};

/* dy silu'(pre) */
template <class T>
GT_DEV float gradient_of_sum(const Problem& p, float pre, float dy) {
    return p.has_silu ? dy * silu_derivative(pre, sigmoid_of<T>(pre)) : dy;
}

/* The input t < 0, one of the 3 before the sequence, of batch element `row` of the states. */
GT_DEV float state_input(const Problem& p, int64_t row, int64_t d, int t) {
    const int64_t J = p.W - 1, j = t + J;
    if (!p.state_in || j < 0) return 0.0f;
    return p.state_in[((p.state_in_shared ? 0 : row) * p.D + d) * J + j];
}

/* A thread's channels and tokens. */
struct Place {
    int64_t b, d, first, last; /* batch element, first channel, tokens [first, last) */
    int64_t block;             /* of rows */
    int lane, row;             /* in the block */
    bool exists;
};

template <int VEC>
GT_DEV Place place_of(const Problem& p, const Cut& cut, int64_t tokens) {
    Place me;
    const int64_t tile = block_x() % (int)cut.tiles; /* tiles * blocks is a grid's size */
    me.block = block_x() / (int)cut.tiles;
    me.lane = thread_id() % cut.lanes;
    me.row = thread_id() / cut.lanes;
    const int64_t row = me.block * (THREADS / cut.lanes) + me.row;
    me.b = row / cut.runs;
    me.d = (tile * cut.lanes + me.lane) * VEC;
    me.first = row % cut.runs * cut.run;
    me.last = me.first + cut.run < tokens ? me.first + cut.run : tokens;
    me.exists = me.b < p.B && me.d < p.D;
    return me;
}

/* Tokens t, t+1, ... of VEC channels as they lie in memory; those from `valid` on repeat the first.
 *  All loads are in flight together. */
template <class T, int VEC, int COUNT>
GT_DEV void load_tokens(Vec<T, VEC> (&to)[COUNT], const void* data, gt_stride s, int64_t b,
                        int64_t t, int64_t d, int64_t valid) {
    if (valid <= 0) {
        GT_UNROLL
        for (int i = 0; i < COUNT; i++) to[i] = {};
        return;
    }
    const T* from = static_cast<const T*>(data) + at(s, b, t, d);
    GT_UNROLL
    for (int i = 0; i < COUNT; i++) to[i] = ldg<Vec<T, VEC>>(from + (i < valid ? i : 0) * s.t);
}

template <class T, int VEC>
GT_DEV void store_token(void* data, gt_stride s, int64_t b, int64_t t, int64_t d,
                        const float (&y)[VEC]) {
    Vec<T, VEC> packed;
    packed.set(y);
    stg(static_cast<T*>(data) + at(s, b, t, d), packed);
}

/* window[0..2] = the three inputs before token t: those of the state if t is 0. */
template <class T, int VEC>
GT_DEV void load_window(float (&window)[TAPS][VEC], const Problem& p, const Place& me, int64_t t,
                        int64_t state_row) {
    Vec<T, VEC> before[HALO];
    load_tokens(before, p.x, p.x_at, me.b, t - HALO, me.d, t > 0 ? HALO : 0);
    GT_UNROLL
    for (int i = 0; i < HALO; i++) {
        GT_UNROLL
        for (int v = 0; v < VEC; v++)
            window[i][v] = t > 0 ? before[i].get(v) : state_input(p, state_row, me.d + v, i - HALO);
    }
}

template <int VEC>
GT_DEV void shift(float (&window)[TAPS][VEC]) {
    GT_UNROLL
    for (int i = 0; i < HALO; i++) {
        GT_UNROLL
        for (int v = 0; v < VEC; v++) window[i][v] = window[i + 1][v];
    }
}

/* ---- forward and step, threads side by side over channels ---------------------------------------
 * grid tiles * ceil(B * runs / rows of a block), block 256.  A thread has VEC channels and walks
 * through a run of 8 to 32 tokens: BATCH loads, then as many outputs.
 * registers: weights, the last three inputs, BATCH tokens as loaded.  No shared memory.
 * bytes: x and y once; 3 tokens of every run a second time, out of a cache.
 * VEC = 4 or 2 elements lie together in all tensors; VEC = 1 serves any strides.
 * The thread of the first run reads the state and then writes state_out, which may be the same.
 * An output is summed by one thread, in the order of the taps: deterministic. */
struct ForwardParams {
    Problem in;
    Cut cut;
    void* y;
    gt_stride y_at;
    float* state_out;
    bool is_step;
    const int32_t* slots;
    int64_t slot_capacity;
};

/* The last inputs; ascending, for state_in may be the same memory. */
template <class T>
GT_DEV void store_state(const ForwardParams& p, int64_t b, int64_t row, int64_t d) {
    const int J = p.in.W - 1;
    for (int j = 0; j < J; j++) {
        const int64_t t = p.in.T - J + j;
        p.state_out[(row * p.in.D + d) * J + j] =
            t < 0 ? state_input(p.in, row, d, (int)t)
                  : Element<T>::load(static_cast<const T*>(p.in.x), at(p.in.x_at, b, t, d));
    }
}

template <class T, int VEC>
GT_KERNEL(THREADS, 2) forward_kernel(const GT_GRID_CONSTANT ForwardParams p) {
    constexpr int COUNT = BATCH<T, VEC, 1>;
    const Problem& in = p.in;
    const Place me = place_of<VEC>(in, p.cut, in.T);
    if (!me.exists) return;
    const int64_t state_row = p.slots ? p.slots[me.b] : me.b;
    const bool skipped = p.is_step && (state_row < 0 || state_row >= p.slot_capacity);
    if (skipped) {
        const float zero[VEC] = {};
        for (int64_t t = me.first; t < me.last; t++)
            store_token<T, VEC>(p.y, p.y_at, me.b, t, me.d, zero);
        return;
    }
    Taps<VEC> taps;
    taps.load(in, me.d);
    float e[TAPS][VEC];
    load_window<T, VEC>(e, in, me, me.first, state_row);
    for (int64_t t = me.first; t < me.last; t += COUNT) {
        Vec<T, VEC> x[COUNT];
        load_tokens(x, in.x, in.x_at, me.b, t, me.d, me.last - t);
        GT_UNROLL
        for (int i = 0; i < COUNT; i++) {
            if (t + i >= me.last) break;
            float y[VEC];
            GT_UNROLL
            for (int v = 0; v < VEC; v++) {
                e[HALO][v] = x[i].get(v);
                const float pre = taps.sum(e, v);
                y[v] = in.has_silu ? silu_of_sigmoid(pre, sigmoid_of<T>(pre)) : pre;
            }
            store_token<T, VEC>(p.y, p.y_at, me.b, t + i, me.d, y);
            shift(e);
        }
    }
    if (p.state_out && me.first == 0)
        for (int v = 0; v < VEC; v++) store_state<T>(p, me.b, state_row, me.d + v);
}

/* ---- backward, threads side by side over channels -----------------------------------------------
 * grid and block as in forward, but a run is one of gradients: step i of the walk makes q_i and
 * finishes dx_{i-3}, i < T + 3.  A run but the first begins 3 steps early, for the q that its first
 * dx needs. registers: weights and their gradients, three inputs and three q, BATCH tokens of x and
 * dy as loaded; more than 2 channels a thread do not fit.
 * shared: the parameter gradients of all threads, 20 VEC bytes each: 10 KB for VEC = 2.
 * bytes: x, dy and dx once; 6 tokens of x and 3 of dy of every run a second time, out of a cache.
 * dweight and dbias are summed over a run, then over the block's runs in order, then over blocks by
 * reduce_rows: deterministic. */
struct BackwardParams {
    Problem in;
    Cut cut; /* only of the kernel over channels */
    const void* dy;
    gt_stride dy_at;
    const float* dstate_out;
    void* dx;
    gt_stride dx_at;
    float *dweight, *dbias; /* partial sums [rows, D*W], [rows, D]; NULL if not wanted */
    int lanes, passes;      /* only of the kernel over time */
    int64_t segments;
};

/* What dstate_out adds to the gradient of the input of token t: it holds the last W-1 of them. */
GT_DEV float state_gradient(const BackwardParams& p, int64_t b, int64_t t, int64_t d) {
    const int64_t J = p.in.W - 1, j = t - (p.in.T - J);
    return p.dstate_out && j >= 0 ? p.dstate_out[(b * p.in.D + d) * J + j] : 0.0f;
}

/* Sums of parameter gradients: of the weights, then of the bias. */
template <int VEC>
struct Sums {
    float tap[TAPS + 1][VEC];
};

/* Sums over the rows of the block; all threads. */
template <int VEC>
GT_DEV void store_sums(const BackwardParams& p, const Place& me, const Sums<VEC>& sums) {
    const Problem& in = p.in;
    const int lanes = p.cut.lanes, first = TAPS - in.W;
    const uint32_t cells = smem_base();
    GT_UNROLL
    for (int k = 0; k <= TAPS; k++) {
        GT_UNROLL
        for (int v = 0; v < VEC; v++)
            sts<float>(cells + 4 * ((k * VEC + v) * THREADS + thread_id()), sums.tap[k][v]);
    }
    sync_threads();
    const int64_t tile = me.d - (int64_t)me.lane * VEC;
    for (int i = thread_id(); i < (TAPS + 1) * VEC * lanes; i += THREADS) {
        const int k = i / lanes / VEC, v = i / lanes % VEC, lane = i % lanes;
        const int64_t d = tile + (int64_t)lane * VEC + v;
        float sum = 0.0f;
        for (int row = 0; row < THREADS / lanes; row++)
            sum += lds<float>(cells + 4 * ((k * VEC + v) * THREADS + row * lanes + lane));
        if (d >= in.D || k < first) continue;
        if (k < TAPS) {
            if (p.dweight) p.dweight[(me.block * in.D + d) * in.W + k - first] = sum;
        } else if (p.dbias) {
            p.dbias[me.block * in.D + d] = sum;
        }
    }
}

template <class T, int VEC>
GT_DEV void backward_run(const BackwardParams& p, const Place& me, Sums<VEC>& sums) {
    constexpr int COUNT = BATCH<T, VEC, 2>;
    const Problem& in = p.in;
    const int64_t start = me.first > 0 ? me.first - HALO : 0;
    Taps<VEC> taps;
    taps.load(in, me.d);
    float e[TAPS][VEC], q[TAPS][VEC] = {};
    load_window<T, VEC>(e, in, me, start, me.b);
    for (int64_t t = start; t < me.last; t += COUNT) {
        Vec<T, VEC> x[COUNT], dy[COUNT];
        load_tokens(x, in.x, in.x_at, me.b, t, me.d, in.T - t);
        load_tokens(dy, p.dy, p.dy_at, me.b, t, me.d, in.T - t);
        GT_UNROLL
        for (int i = 0; i < COUNT; i++) {
            if (t + i >= me.last) break;
            const bool own = t + i >= me.first, inside = t + i < in.T;
            float dx[VEC];
            GT_UNROLL
            for (int v = 0; v < VEC; v++) {
                e[HALO][v] = x[i].get(v);
                q[HALO][v] =
                    inside ? gradient_of_sum<T>(in, taps.sum(e, v), dy[i].get(v)) : 0.0f;
                if (own && inside) {
                    GT_UNROLL
                    for (int k = 0; k < TAPS; k++)
                        if (k >= taps.first)
                            sums.tap[k][v] = fma_rn(e[k][v], q[HALO][v], sums.tap[k][v]);
                    sums.tap[TAPS][v] += q[HALO][v];
                }
                dx[v] = taps.gradient(q, v);
                if (!inside) dx[v] += state_gradient(p, me.b, t + i - HALO, me.d + v);
            }
            if (p.dx && own && t + i >= HALO)
                store_token<T, VEC>(p.dx, p.dx_at, me.b, t + i - HALO, me.d, dx);
            shift(e);
            shift(q);
        }
    }
}

template <class T, int VEC>
GT_KERNEL(THREADS, 2) backward_kernel(const GT_GRID_CONSTANT BackwardParams p) {
    const Place me = place_of<VEC>(p.in, p.cut, p.in.T + HALO);
    Sums<VEC> sums = {};
    if (me.exists) backward_run<T, VEC>(p, me, sums);
    if (p.dweight || p.dbias) store_sums<VEC>(p, me, sums);
}

/* ---- threads side by side over time: [B,D,T] ----------------------------------------------------
 * A row is one channel of one batch element, cut into chunks of 16 bytes at 16-byte boundaries of
 * memory: rows of any length and alignment, as long as all tensors have the same.  `lanes`
 * neighbouring threads (a power of 2 up to 32) take neighbouring chunks, `passes` times in a row.
 * grid ceil(B*D*segments / (256 / lanes)), block 256; no shared memory.
 * registers: a chunk, and its neighbours for the three elements beyond either end.
 * bytes: every tensor once; neighbours a second time, out of the first-level cache.
 * Sums over a segment go through registers, then a butterfly over the lanes; over segments and
 * batch by reduce_rows: deterministic. */
template <class T>
constexpr int CHUNK = 16 / (int)sizeof(T);

constexpr int PASSES = 4; /* at most */

struct ForwardTimeParams {
    ForwardParams f;
    int lanes, passes;
    int64_t segments;
};

/* A thread's row. */
struct Row {
    int64_t b, d, segment;
    int lane, shift; /* elements from a 16-byte boundary to the row */
    bool exists;
};

template <class T>
GT_DEV Row row_of(const Problem& p, int lanes, int64_t segments) {
    Row me;
    int64_t item = (int64_t)block_x() * (THREADS / lanes) + thread_id() / lanes;
    me.exists = item < p.B * p.D * segments;
    if (!me.exists) item = 0;
    me.lane = thread_id() % lanes;
    me.segment = item % segments;
    me.d = item / segments % p.D;
    me.b = item / segments / p.D;
    const T* row = static_cast<const T*>(p.x) + at(p.x_at, me.b, 0, me.d);
    me.shift = (int)((uintptr_t)row / sizeof(T) % CHUNK<T>);
    return me;
}

/* Elements t ... of a row of T; 0 outside. */
template <class T>
GT_DEV void load_chunk(Vec<T, CHUNK<T>>& to, const T* row, int64_t t, int64_t end) {
    if (t >= 0 && t + CHUNK<T> <= end) {
        to = ldg<Vec<T, CHUNK<T>>>(row + t);
        return;
    }
    float x[CHUNK<T>];
    GT_UNROLL
    for (int i = 0; i < CHUNK<T>; i++)
        x[i] = t + i >= 0 && t + i < end ? Element<T>::load(row, t + i) : 0.0f;
    to.set(x);
}

template <class T>
GT_DEV void store_chunk(T* row, int64_t t, int64_t end, const float (&y)[CHUNK<T>]) {
    if (t >= 0 && t + CHUNK<T> <= end) {
        Vec<T, CHUNK<T>> packed;
        packed.set(y);
        stg(row + t, packed);
        return;
    }
    GT_UNROLL
    for (int i = 0; i < CHUNK<T>; i++)
        if (t + i >= 0 && t + i < end) Element<T>::store(row, t + i, y[i]);
}

/* e[i] = the input of token t - 3 + i, from the chunks around t; inputs before the first from the
 * state. */
template <class T, int COUNT, int CHUNKS>
GT_DEV void inputs_around(float (&e)[COUNT][1], const Problem& p, const Row& me, int64_t t,
                          const Vec<T, CHUNK<T>> (&chunks)[CHUNKS]) {
    constexpr int BACK = CHUNK<T> - HALO; /* chunks[0] begins that much before e */
    static_assert(BACK + COUNT <= CHUNKS * CHUNK<T>, "enough chunks");
    GT_UNROLL
    for (int i = 0; i < COUNT; i++) {
        e[i][0] = chunks[(i + BACK) / CHUNK<T>].get((i + BACK) % CHUNK<T>);
        if (t - HALO + i < 0 && t - HALO + i >= -HALO)
            e[i][0] = state_input(p, me.b, me.d, (int)(t - HALO + i));
    }
}

template <class T>
GT_KERNEL(THREADS, 2) forward_time_kernel(const GT_GRID_CONSTANT ForwardTimeParams p) {
    constexpr int N = CHUNK<T>;
    const Problem& in = p.f.in;
    const Row me = row_of<T>(in, p.lanes, p.segments);
    const T* x = static_cast<const T*>(in.x) + at(in.x_at, me.b, 0, me.d);
    T* y = static_cast<T*>(p.f.y) + at(p.f.y_at, me.b, 0, me.d);
    const int64_t step = (int64_t)p.lanes * N;
    const int64_t first = me.segment * p.passes * step + (int64_t)me.lane * N - me.shift;
    const int64_t end = me.exists ? in.T : 0;
    Taps<1> taps;
    taps.load(in, me.d);
    Vec<T, N> chunks[PASSES][2];
    GT_UNROLL
    for (int i = 0; i < PASSES; i++) {
        const int64_t t = first + i * step;
        if (i >= p.passes) break;
        load_chunk<T>(chunks[i][0], x, t - N, t < end ? end : 0);
        load_chunk<T>(chunks[i][1], x, t, end);
    }
    GT_UNROLL
    for (int i = 0; i < PASSES; i++) {
        const int64_t t = first + i * step;
        if (i >= p.passes || t >= end) break;
        float e[N + HALO][1], out[N];
        inputs_around<T>(e, in, me, t, chunks[i]);
        GT_UNROLL
        for (int n = 0; n < N; n++) {
            const float window[TAPS][1] = {{e[n][0]}, {e[n + 1][0]}, {e[n + 2][0]}, {e[n + 3][0]}};
            const float pre = taps.sum(window, 0);
            out[n] = in.has_silu ? silu_of_sigmoid(pre, sigmoid_of<T>(pre)) : pre;
        }
        store_chunk<T>(y, t, end, out);
    }
    sync_warp(); /* the lanes beside have read the state */
    if (p.f.state_out && me.exists && me.segment == 0 && me.lane == 0)
        store_state<T>(p.f, me.b, me.b, me.d);
}

/* A thread's sums over its lanes, then stored by the first of them; all threads. */
GT_DEV void store_row_sums(const BackwardParams& p, const Row& me, Sums<1>& sums) {
    const Problem& in = p.in;
    const int first = TAPS - in.W;
    for (int mask = 1; mask < p.lanes; mask <<= 1) {
        GT_UNROLL
        for (int k = 0; k <= TAPS; k++) sums.tap[k][0] += shfl_xor(sums.tap[k][0], mask);
    }
    if (!me.exists || me.lane != 0) return;
    const int64_t cell = (me.b * p.segments + me.segment) * in.D + me.d;
    GT_UNROLL
    for (int k = 0; k < TAPS; k++)
        if (p.dweight && k >= first) p.dweight[cell * in.W + k - first] = sums.tap[k][0];
    if (p.dbias) p.dbias[cell] = sums.tap[TAPS][0];
}

/* A chunk of gradients, from the inputs 3 before to 3 behind it: dx_t needs q_t ... q_{t+3}. */
template <class T>
GT_DEV void backward_chunk(const BackwardParams& p, const Row& me, const Taps<1>& taps, int64_t t,
                           Sums<1>& sums) {
    constexpr int N = CHUNK<T>;
    const Problem& in = p.in;
    const T* x = static_cast<const T*>(in.x) + at(in.x_at, me.b, 0, me.d);
    const T* dy = static_cast<const T*>(p.dy) + at(p.dy_at, me.b, 0, me.d);
    Vec<T, N> chunks[3], dy_chunks[2];
    GT_UNROLL
    for (int i = 0; i < 3; i++) load_chunk<T>(chunks[i], x, t + (i - 1) * N, in.T);
    GT_UNROLL
    for (int i = 0; i < 2; i++) load_chunk<T>(dy_chunks[i], dy, t + i * N, in.T);
    float e[N + 2 * HALO][1], q[N + HALO], dx[N];
    inputs_around<T>(e, in, me, t, chunks);
    GT_UNROLL
    for (int n = 0; n < N + HALO; n++) {
        const float window[TAPS][1] = {{e[n][0]}, {e[n + 1][0]}, {e[n + 2][0]}, {e[n + 3][0]}};
        const bool inside = t + n >= 0 && t + n < in.T;
        q[n] = inside ? gradient_of_sum<T>(in, taps.sum(window, 0), dy_chunks[n / N].get(n % N))
                      : 0.0f;
        if (n >= N || !inside) continue;
        GT_UNROLL
        for (int k = 0; k < TAPS; k++)
            if (k >= taps.first) sums.tap[k][0] = fma_rn(window[k][0], q[n], sums.tap[k][0]);
        sums.tap[TAPS][0] += q[n];
    }
    if (!p.dx) return;
    GT_UNROLL
    for (int n = 0; n < N; n++) {
        const float later[TAPS][1] = {{q[n]}, {q[n + 1]}, {q[n + 2]}, {q[n + 3]}};
        dx[n] = taps.gradient(later, 0);
        if (t + n + HALO >= in.T && t + n < in.T) dx[n] += state_gradient(p, me.b, t + n, me.d);
    }
    store_chunk<T>(static_cast<T*>(p.dx) + at(p.dx_at, me.b, 0, me.d), t, in.T, dx);
}

template <class T>
GT_KERNEL(THREADS, 2) backward_time_kernel(const GT_GRID_CONSTANT BackwardParams p) {
    constexpr int N = CHUNK<T>;
    const Row me = row_of<T>(p.in, p.lanes, p.segments);
    const int64_t step = (int64_t)p.lanes * N;
    const int64_t first = me.segment * p.passes * step + (int64_t)me.lane * N - me.shift;
    Taps<1> taps;
    Sums<1> sums = {};
    taps.load(p.in, me.d);
    for (int i = 0; i < p.passes; i++) {
        const int64_t t = first + i * step;
        if (me.exists && t < p.in.T) backward_chunk<T>(p, me, taps, t, sums);
    }
    if (p.dweight || p.dbias) store_row_sums(p, me, sums);
}

/* ---- the gradient of the state ------------------------------------------------------------------
 * grid ceil(B*D/256), block 256: a thread per channel and batch element.  It runs after the kernels
 * above, which read dstate_out: dstate_in may be the same memory.
 * registers: weights, the first 3 tokens of x and dy, the state and q.  No shared memory.
 * bytes: 3 tokens of x and dy, state_in, dstate_out and dstate_in once.
 * Every sum is one thread's: deterministic. */
struct StateParams {
    BackwardParams b;
    float* dstate_in; /* [B,D,W-1] */
};

GT_KERNEL(THREADS, 1) backward_state_kernel(const GT_GRID_CONSTANT StateParams p) {
    const Problem& in = p.b.in;
    const int64_t item = (int64_t)block_x() * THREADS + thread_id();
    const int64_t b = item / in.D, d = item % in.D;
    if (b >= in.B) return;
    Taps<1> taps;
    taps.load(in, d);
    float x[HALO], dy[HALO], e[2 * HALO][1], q[TAPS][1] = {}, gradient[HALO];
    load_column(x, in.x, in.dtype, at(in.x_at, b, 0, d), in.x_at.t, in.T);
    load_column(dy, p.b.dy, in.dtype, at(p.b.dy_at, b, 0, d), p.b.dy_at.t, in.T);
    GT_UNROLL
    for (int i = 0; i < HALO; i++) {
        e[i][0] = state_input(in, b, d, i - HALO);
        e[i + HALO][0] = x[i];
    }
    GT_UNROLL
    for (int i = 0; i < HALO; i++) { /* as in the walk over channels, steps 0 to 2 */
        const float window[TAPS][1] = {{e[i][0]}, {e[i + 1][0]}, {e[i + 2][0]}, {e[i + 3][0]}};
        const float pre = taps.sum(window, 0);
        q[HALO][0] = 0.0f;
        if (i < in.T)
            q[HALO][0] = in.dtype == GT_F32 ? gradient_of_sum<float>(in, pre, dy[i])
                                            : gradient_of_sum<bf16>(in, pre, dy[i]);
        gradient[i] = taps.gradient(q, 0);
        if (i >= in.T) gradient[i] += state_gradient(p.b, b, i - HALO, d);
        shift(q);
    }
    GT_UNROLL
    for (int i = 0; i < HALO; i++)
        if (i >= taps.first)
            p.dstate_in[(b * in.D + d) * (in.W - 1) + i - taps.first] = gradient[i];
}

/* ---- launchers ------------------------------------------------------------------------------- */

static inline Problem problem_of(const gt_conv1d_args& a) {
    Problem in = {};
    in.B = a.B, in.T = a.T, in.D = a.D;
    in.W = (int)a.W;
    in.dtype = a.dtype;
    in.has_silu = a.activation == GT_ACT_SILU;
    in.weight = a.weight, in.bias = a.bias;
    in.x = a.x;
    in.x_at = a.x_stride;
    in.state_in = a.state_in;
    in.state_in_shared = a.state_in_shared;
    return in;
}

/* The largest power of 2 up to `most` that is not more than needed for n. */
static inline int power_for(int64_t n, int most) {
    int power = 1;
    while (power < n && power < most) power *= 2;
    return power;
}

/* Long runs read less twice, short ones give more blocks. */
static inline Cut cut_for(int64_t B, int64_t D, int64_t tokens, int vec, const Device& device) {
    Cut cut = {};
    const int64_t groups = (D + vec - 1) / vec;
    cut.lanes = power_for(groups, 32);
    cut.tiles = (groups + cut.lanes - 1) / cut.lanes;
    const int64_t rows = THREADS / cut.lanes;
    for (cut.run = MAX_RUN;; cut.run /= 2) {
        cut.runs = tokens > cut.run ? (tokens + cut.run - 1) / cut.run : 1;
        cut.blocks = (B * cut.runs + rows - 1) / rows;
        if (cut.run == MIN_RUN || cut.blocks * cut.tiles >= 4 * device.multiprocessors) return cut;
    }
}

/* How a kernel over time is cut. */
struct TimeCut {
    int lanes, passes;
    int64_t segments, blocks;
};

/* Rows may begin anywhere in their first chunk.  If there are several segments a segment has 32
 * chunks or more, so that one warp meets all of the state. */
static inline TimeCut time_cut_for(int64_t B, int64_t D, int64_t T, int chunk,
                                   const Device& device) {
    TimeCut cut = {};
    const int64_t chunks = (T + 2 * (chunk - 1)) / chunk;
    cut.lanes = power_for(chunks, 32);
    for (cut.passes = PASSES;; cut.passes /= 2) {
        const int64_t chunks_of_segment = cut.lanes * cut.passes;
        cut.segments = (chunks + chunks_of_segment - 1) / chunks_of_segment;
        if (cut.passes == 1 || (cut.lanes * cut.passes / 2 < chunks &&
                                B * D * cut.segments * cut.lanes >= 1024 * device.multiprocessors))
            break;
    }
    const int64_t rows = THREADS / cut.lanes;
    cut.blocks = (B * D * cut.segments + rows - 1) / rows;
    return cut;
}

static inline int size_of(gt_dtype dtype) { return dtype == GT_F32 ? 4 : 2; }

/* A tensor of the call; data is NULL if it has none of it. */
struct View {
    const void* data;
    gt_stride at;
};

/* Channels that one load of every tensor can move: a power of 2 up to `most`. */
template <int COUNT>
static int vector_size(const gt_conv1d_args& a, const View (&views)[COUNT], int most) {
    const int size = size_of(a.dtype);
    for (int vec = most; vec > 1; vec /= 2) {
        bool fits = a.D % vec == 0;
        for (const View& v : views) {
            if (!v.data) continue;
            fits = fits && (uintptr_t)v.data % (uintptr_t)(vec * size) == 0 && v.at.h == 1 &&
                   v.at.b % vec == 0 && v.at.t % vec == 0;
        }
        if (fits) return vec;
    }
    return 1;
}

/* Whether time is contiguous in all tensors, with rows that begin at the same place of a chunk. */
template <int COUNT>
static bool is_over_time(const gt_conv1d_args& a, const View (&views)[COUNT]) {
    const int size = size_of(a.dtype), chunk = 16 / size;
    for (const View& v : views) {
        if (!v.data) continue;
        if (v.at.t != 1 || (v.at.b - views[0].at.b) % chunk != 0 ||
            (v.at.h - views[0].at.h) % chunk != 0 ||
            ((uintptr_t)v.data - (uintptr_t)views[0].data) % 16 != 0)
            return false;
    }
    return true;
}

template <class T, int VEC>
static gt_status launch_forward_with(ForwardParams p, const Device& device, gt_stream stream) {
    p.cut = cut_for(p.in.B, p.in.D, p.in.T, VEC, device);
    return run("conv1d forward_kernel", forward_kernel<T, VEC>, p.cut.blocks * p.cut.tiles, THREADS,
               0, stream, p);
}

template <class T>
static gt_status launch_forward_of(const gt_conv1d_args& a, const ForwardParams& p,
                                   const Device& device, gt_stream stream) {
    const View views[] = {{a.x, a.x_stride}, {a.y, a.y_stride}};
    if (!p.is_step && is_over_time(a, views)) {
        const TimeCut cut = time_cut_for(a.B, a.D, a.T, CHUNK<T>, device);
        const ForwardTimeParams time = {p, cut.lanes, cut.passes, cut.segments};
        return run("conv1d forward_time_kernel", forward_time_kernel<T>, cut.blocks, THREADS, 0,
                   stream, time);
    }
    const int vec = vector_size(a, views, 4);
    if (vec == 4) return launch_forward_with<T, 4>(p, device, stream);
    if (vec == 2) return launch_forward_with<T, 2>(p, device, stream);
    return launch_forward_with<T, 1>(p, device, stream);
}

static inline gt_status launch_forward(const gt_conv1d_args& a, bool is_step, const Device& device,
                                       gt_stream stream) {
    ForwardParams p = {};
    p.in = problem_of(a);
    if (is_step) p.in.state_in = a.state_out;
    p.y = a.y;
    p.y_at = a.y_stride;
    p.state_out = a.state_out;
    p.is_step = is_step;
    p.slots = a.slots;
    p.slot_capacity = a.slot_capacity;
    if (a.dtype == GT_BF16) return launch_forward_of<bf16>(a, p, device, stream);
    if (a.dtype == GT_F16) return launch_forward_of<f16>(a, p, device, stream);
    return launch_forward_of<float>(a, p, device, stream);
}

/* The pieces of backward's workspace, as large as any alignment and strides may need. */
struct BackwardPlan {
    float *dweight, *dbias, *dstate;
    size_t bytes;
};

static inline bool sums_states(const gt_conv1d_args& a) { return a.dstate_in && a.state_in_shared; }

static inline BackwardPlan plan_backward(const gt_conv1d_args& a, const Device& device) {
    BackwardPlan plan = {};
    Arena arena(a.workspace);
    int64_t rows = a.B * time_cut_for(a.B, a.D, a.T, 16 / size_of(a.dtype), device).segments;
    for (int vec = 1; vec <= 2; vec++) {
        const int64_t blocks = cut_for(a.B, a.D, a.T + HALO, vec, device).blocks;
        if (blocks > rows) rows = blocks;
    }
    if (a.dweight) plan.dweight = arena.take<float>(rows * a.D * a.W);
    if (a.dbias) plan.dbias = arena.take<float>(rows * a.D);
    if (sums_states(a)) plan.dstate = arena.take<float>(a.B * a.D * (a.W - 1));
    plan.bytes = arena.bytes();
    return plan;
}

template <class T, int VEC>
static gt_status launch_backward_with(BackwardParams p, int64_t* rows, const Device& device,
                                      gt_stream stream) {
    p.cut = cut_for(p.in.B, p.in.D, p.in.T + HALO, VEC, device);
    *rows = p.cut.blocks;
    return run("conv1d backward_kernel", backward_kernel<T, VEC>, p.cut.blocks * p.cut.tiles,
               THREADS, 4 * (TAPS + 1) * VEC * THREADS, stream, p);
}

/* *rows: of the partial sums */
template <class T>
static gt_status launch_backward_of(const gt_conv1d_args& a, BackwardParams p, int64_t* rows,
                                    const Device& device, gt_stream stream) {
    const View views[] = {{a.x, a.x_stride}, {a.dy, a.dy_stride}, {a.dx, a.dx_stride}};
    if (is_over_time(a, views)) {
        const TimeCut cut = time_cut_for(a.B, a.D, a.T, CHUNK<T>, device);
        p.lanes = cut.lanes;
        p.passes = cut.passes;
        p.segments = cut.segments;
        *rows = a.B * cut.segments;
        return run("conv1d backward_time_kernel", backward_time_kernel<T>, cut.blocks, THREADS, 0,
                   stream, p);
    }
    if (vector_size(a, views, 2) == 2) return launch_backward_with<T, 2>(p, rows, device, stream);
    return launch_backward_with<T, 1>(p, rows, device, stream);
}

static inline gt_status launch_backward_runs(const gt_conv1d_args& a, const BackwardParams& p,
                                             const Device& device, gt_stream stream) {
    gt_status status;
    int64_t rows = 0;
    if (a.dtype == GT_BF16)
        status = launch_backward_of<bf16>(a, p, &rows, device, stream);
    else if (a.dtype == GT_F16)
        status = launch_backward_of<f16>(a, p, &rows, device, stream);
    else
        status = launch_backward_of<float>(a, p, &rows, device, stream);
    if (status == GT_OK && a.dweight)
        status = reduce_rows(p.dweight, a.dweight, rows, a.D * a.W, a.accumulate, stream);
    if (status == GT_OK && a.dbias)
        status = reduce_rows(p.dbias, a.dbias, rows, a.D, a.accumulate, stream);
    return status;
}

static inline gt_status launch_backward(const gt_conv1d_args& a, const BackwardPlan& plan,
                                        const Device& device, gt_stream stream) {
    BackwardParams p = {};
    p.in = problem_of(a);
    p.dy = a.dy;
    p.dy_at = a.dy_stride;
    p.dstate_out = a.dstate_out;
    p.dx = a.dx;
    p.dx_at = a.dx_stride;
    p.dweight = plan.dweight;
    p.dbias = plan.dbias;
    gt_status status = GT_OK;
    if (a.dx || a.dweight || a.dbias) status = launch_backward_runs(a, p, device, stream);
    if (status != GT_OK || !a.dstate_in) return status;
    const StateParams state = {p, sums_states(a) ? plan.dstate : a.dstate_in};
    status = run("conv1d backward_state_kernel", backward_state_kernel,
                 (a.B * a.D + THREADS - 1) / THREADS, THREADS, 0, stream, state);
    if (status != GT_OK || !sums_states(a)) return status;
    return reduce_rows(plan.dstate, a.dstate_in, a.B, a.D * (a.W - 1), a.accumulate, stream);
}

/* ---- dispatch and checks --------------------------------------------------------------------- */

static inline gt_status prepare(gt_pass pass, const gt_conv1d_args* args, gt_conv1d_args* a,
                                Device* device) {
    gt_dims dims;
    const gt_status status = gt_prepare(gt_op_conv1d(), pass, GT_DEVICE, args, a, &dims);
    return status != GT_OK ? status : current_device(device);
}

} /* namespace conv1d */
} /* namespace gt */

/* ---- the C functions ------------------------------------------------------------------------- */

extern "C" {

GT_API gt_status gt_conv1d_forward(const gt_conv1d_args* args, gt_stream stream) {
    gt_conv1d_args a;
    gt::Device device;
    const gt_status status = gt::conv1d::prepare(GT_FORWARD, args, &a, &device);
    return status != GT_OK ? status : gt::conv1d::launch_forward(a, false, device, stream);
}

GT_API gt_status gt_conv1d_step(const gt_conv1d_args* args, gt_stream stream) {
    gt_conv1d_args a;
    gt::Device device;
    const gt_status status = gt::conv1d::prepare(GT_STEP, args, &a, &device);
    return status != GT_OK ? status : gt::conv1d::launch_forward(a, true, device, stream);
}

GT_API gt_status gt_conv1d_backward(const gt_conv1d_args* args, gt_stream stream) {
    gt_conv1d_args a;
    gt::Device device;
    gt_status status = gt::conv1d::prepare(GT_BACKWARD, args, &a, &device);
    if (status != GT_OK) return status;
    const gt::conv1d::BackwardPlan plan = gt::conv1d::plan_backward(a, device);
    status = gt::check_workspace(a.workspace, a.workspace_bytes, plan.bytes);
    return status != GT_OK ? status : gt::conv1d::launch_backward(a, plan, device, stream);
}

GT_API gt_status gt_conv1d_workspace(const gt_conv1d_args* args, gt_workspace* need) {
    gt_conv1d_args a;
    gt::Device device;
    const gt_status status = gt::conv1d::prepare(GT_QUERY, args, &a, &device);
    if (status != GT_OK) return status;
    if (!need) return gt_fail(GT_ERROR_NULL, "need is NULL");
    gt_workspace sizes = {0, 0, 0, 0};
    a.workspace = nullptr;
    sizes.backward = gt::conv1d::plan_backward(a, device).bytes;
    *need = sizes;
    return GT_OK;
}

} /* extern "C" */

#else

/* ---- stubs: this file was compiled without nvcc ---------------------------------------------- */

#ifdef __cplusplus
extern "C" {
#endif

GT_API gt_status gt_conv1d_forward(const gt_conv1d_args *args, gt_stream stream) {
    (void)args, (void)stream;
    return gt_no_cuda(gt_op_conv1d(), GT_FORWARD);
}
GT_API gt_status gt_conv1d_backward(const gt_conv1d_args *args, gt_stream stream) {
    (void)args, (void)stream;
    return gt_no_cuda(gt_op_conv1d(), GT_BACKWARD);
}
GT_API gt_status gt_conv1d_step(const gt_conv1d_args *args, gt_stream stream) {
    (void)args, (void)stream;
    return gt_no_cuda(gt_op_conv1d(), GT_STEP);
}
GT_API gt_status gt_conv1d_workspace(const gt_conv1d_args *args, gt_workspace *need) {
    (void)args, (void)need;
    return gt_no_cuda(gt_op_conv1d(), GT_QUERY);
}

#ifdef __cplusplus
}
#endif

#endif /* kernels or stubs */

#include "gt_kernels.h" /* the rest of the implementation, if this file is to hold it */

#endif /* GT_CONV1D_CUH */
