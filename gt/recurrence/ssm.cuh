/* gt/recurrence/ssm.cuh - code that ssd and selective_scan share: the time step Delta, the decay of a state, sums over
 * lanes, blocks of rows, sums over a group. */
#ifndef GT_RECURRENCE_SSM_CUH
#define GT_RECURRENCE_SSM_CUH

#include "../base/launch.cuh"
#include "../base/warp.cuh"
#include "segments.cuh"

namespace gt {
namespace ssm {

constexpr int CHECKPOINT = 128; /* tokens between the states that forward stores for backward */
constexpr int MAX_SIZE = 256;   /* largest P and N */

/* How Delta follows from dt.  All passes use the same rule. */
struct DeltaRule {
    int softplus, limited;
    float min, max;
};

struct Delta {
    float value, slope; /* slope: derivative of Delta by dt */
};

GT_DEV Delta delta_of(const DeltaRule& rule, float v) {
    Delta d = {v, 1.0f};
    if (rule.softplus) {
        d.value = softplus(v);
        d.slope = sigmoid(v);
    }
    if (rule.limited && (d.value < rule.min || d.value > rule.max)) {
        d.value = d.value < rule.min ? rule.min : rule.max;
        d.slope = 0.0f;
    }
    return d;
}

/* If A > 0 or Delta < 0, the decay exp(a) of a token is a growth, which may exceed the range of fp32.  Its product with
 * a small state may still fit.  So for a >= FAR_GROWTH grow() computes the product. */
constexpr float FAR_GROWTH = 80.0f;

/* Returns exp(a) x for a >= FAR_GROWTH, in four steps.  0 stays 0.  The result is infinite only if the product exceeds
 * fp32. */
GT_DEV float grow(float a, float x) {
    const float step = finite(exp_accurate(0.25f * a));
    return x * step * step * step * step;
}

/* Carries values through one token: x becomes exp(a) x + added. */
struct Carrier {
    float a, keep, factor;
    GT_METHOD explicit Carrier(float a_) : a(a_) {
        const bool near_one = a > -0.69f && a < 0.05f;
        keep = near_one ? 1.0f : 0.0f;
        factor = near_one ? expm1_neg(a) : exp_fast(a); /* carry() ignores `factor` from FAR_GROWTH on */
    }
    GT_METHOD float carry(float x, float added) const {
        if (a >= FAR_GROWTH) return grow(a, x) + added;
        return rescale(keep, factor, x, added);
    }
};

/* Derivative of silu. */
GT_DEV float dsilu(float z) { return silu_derivative(z, sigmoid(z)); }

/* Joins V values over LANES lanes, which are STRIDE lanes apart, by join(a, b), such as a + b.  `lane` is the caller's
 * index among these lanes.  Afterwards v[0] ... v[V / LANES - 1] of the caller hold the results for values lane * (V /
 * LANES) and following.  If there are more lanes than values, LANES / V adjacent lanes hold the same result.  The order
 * is fixed. */
template <int V, int LANES, int STRIDE, class Join>
GT_DEV void reduce_scatter(float (&v)[V], int lane, const Join& join) {
    int width = V;
    GT_UNROLL
    for (int mask = LANES / 2; mask >= 1; mask >>= 1) {
        if (width == 1) {
            v[0] = join(v[0], shfl_xor(v[0], mask * STRIDE));
        } else {
            const bool upper = lane & mask;
            width /= 2;
            GT_UNROLL
            for (int i = 0; i < V / 2; i++) {
                if (i >= width) continue;
                const float mine = upper ? v[i + width] : v[i];
                const float other = upper ? v[i] : v[i + width];
                v[i] = join(mine, shfl_xor(other, mask * STRIDE));
            }
        }
    }
}

/* The same for sums. */
template <int V, int LANES, int STRIDE>
GT_DEV void reduce_scatter(float (&v)[V], int lane) {
    reduce_scatter<V, LANES, STRIDE>(v, lane, [](float a, float b) { return a + b; });
}

/* Loads WIDTH adjacent floats from shared memory. */
template <int WIDTH>
GT_DEV void load_vector(float (&v)[WIDTH], uint32_t address) {
    if constexpr (WIDTH % 4 == 0) {
        GT_UNROLL
        for (int i = 0; i < WIDTH; i += 4) {
            const float4 x = lds<float4>(address + 4 * i);
            v[i] = x.x, v[i + 1] = x.y, v[i + 2] = x.z, v[i + 3] = x.w;
        }
    } else if constexpr (WIDTH == 2) {
        const float2 x = lds<float2>(address);
        v[0] = x.x, v[1] = x.y;
    } else {
        v[0] = lds<float>(address);
    }
}

/* A block of rows (tokens) and columns of an activation tensor. */
struct Rows {
    const void* data;
    gt_dtype dtype;
    int64_t start, pitch, step; /* in elements: offset of the first element; distance from row to row; distance from
                                 * column to column */
    int rows, columns;          /* the rows and columns that exist; elements beyond them count as 0 */

    /* Returns these rows without the first `skipped` ones. */
    GT_METHOD Rows after(int skipped) const {
        Rows tail = *this;
        tail.start += skipped * pitch;
        tail.rows -= skipped;
        return tail;
    }
};

/* A block of ROWS x WIDTH elements in the registers of THREADS threads: of a warp if THREADS is 32, else of the thread
 * block.  Thread i holds elements i, i + THREADS, ... in row order.  All loads are in flight before the first
 * conversion waits for one. */
template <int ROWS, int WIDTH, int THREADS>
struct Tile {
    static constexpr int SIZE = ROWS * WIDTH, COUNT = (SIZE + THREADS - 1) / THREADS;
    uint32_t bits[COUNT] = {}; /* as stored; converted when used */
    gt_dtype dtype = GT_F32;

    GT_DEV int index(int k) { return (THREADS == 32 ? lane_id() : thread_id()) + k * THREADS; }
    GT_DEV int row(int k) { return index(k) / WIDTH; }
    GT_DEV int column(int k) { return index(k) % WIDTH; }

    template <class Bits>
    GT_METHOD void load_bits(const Rows& from) {
        const Bits* data = static_cast<const Bits*>(from.data) + from.start;
        if constexpr (THREADS % WIDTH == 0) { /* a thread stays in its column */
            if (column(0) >= from.columns) return;
            data += row(0) * from.pitch + column(0) * from.step;
            const int64_t stride = THREADS / WIDTH * from.pitch;
            GT_UNROLL
            for (int k = 0; k < COUNT; k++) {
                if (row(k) < from.rows) bits[k] = ldg<Bits>(data);
                data += stride;
            }
        } else {
            GT_UNROLL
            for (int k = 0; k < COUNT; k++)
                if (row(k) < from.rows && column(k) < from.columns)
                    bits[k] = ldg<Bits>(data + row(k) * from.pitch + column(k) * from.step);
        }
    }

    GT_METHOD void load(const Rows& from) {
        dtype = from.dtype;
        if (dtype == GT_F32)
            load_bits<uint32_t>(from);
        else
            load_bits<uint16_t>(from);
    }

    GT_METHOD float value(int k) const {
        if (dtype == GT_BF16) return unpack_bf16_lo(bits[k]);
        return dtype == GT_F16 ? unpack_f16_lo(bits[k]) : as_float(bits[k]);
    }

    /* Converts all values, with a single branch on the dtype. */
    GT_METHOD void values(float (&x)[COUNT]) const {
        if (dtype == GT_BF16) {
            GT_UNROLL
            for (int k = 0; k < COUNT; k++) x[k] = unpack_bf16_lo(bits[k]);
        } else if (dtype == GT_F16) {
            GT_UNROLL
            for (int k = 0; k < COUNT; k++) x[k] = unpack_f16_lo(bits[k]);
        } else {
            GT_UNROLL
            for (int k = 0; k < COUNT; k++) x[k] = as_float(bits[k]);
        }
    }

    GT_METHOD void store(uint32_t shared) const {
        GT_UNROLL
        for (int k = 0; k < COUNT; k++)
            if (index(k) < SIZE) sts<float>(shared + 4 * index(k), value(k));
    }
};

/* Stores a Tile in which every thread has elements of one column only.  x[k] is the thread's element k. */
template <class Block, class T>
GT_DEV void store_tile_of(const Rows& to, const float (&x)[Block::COUNT]) {
    if (Block::column(0) >= to.columns) return;
    T* data =
        static_cast<T*>(const_cast<void*>(to.data)) + to.start + Block::row(0) * to.pitch + Block::column(0) * to.step;
    const int64_t stride = (Block::row(1) - Block::row(0)) * to.pitch;
    GT_UNROLL
    for (int k = 0; k < Block::COUNT; k++) {
        if (Block::row(k) < to.rows) Element<T>::store(data, 0, x[k]);
        data += stride;
    }
}

template <class Block>
GT_DEV void store_tile(const Rows& to, const float (&x)[Block::COUNT]) {
    if (to.dtype == GT_BF16)
        store_tile_of<Block, bf16>(to, x);
    else if (to.dtype == GT_F16)
        store_tile_of<Block, f16>(to, x);
    else
        store_tile_of<Block, float>(to, x);
}

/* Copies ROWS x WIDTH elements to shared memory, as fp32.  A thread holds at most 8 values at a time. */
template <int ROWS, int WIDTH, int THREADS>
GT_DEV void stage(uint32_t shared, const Rows& from) {
    constexpr int BATCH = 8 * THREADS / WIDTH < ROWS ? 8 * THREADS / WIDTH : ROWS;
    static_assert(ROWS % BATCH == 0, "whole batches");
    GT_NO_UNROLL
    for (int row = 0; row < ROWS; row += BATCH) {
        Tile<BATCH, WIDTH, THREADS> tile;
        tile.load(from.after(row));
        tile.store(shared + 4 * row * WIDTH);
    }
}

/* ---- sums over a group ----------------------------------------------------------------------------
 * out[b,t,g,n] = sum over `share` of in[b,t,g,share,n].  This kernel makes dBm and dCm.  A share is the partial sum of
 * one head of the group, or of one tile of channels.
 * grid: ceil(B*T*G*N/256).  block: 256 threads, one output per thread.  No shared memory.
 * bytes: 4 per partial sum, and the output.  A thread adds the partial sums in order, so results are deterministic. */
struct GroupSumParams {
    const float* in;
    void* out;
    gt_dtype dtype;
    gt_stride out_stride;
    Sequences sequences;
    int64_t G, shares;
    int N;
    int64_t step = 1; /* distance of adjacent outputs of a row, in elements */
};

GT_KERNEL(256, 1) group_sum_kernel(const GT_GRID_CONSTANT GroupSumParams p) {
    const int64_t i = (int64_t)block_x() * 256 + thread_id();
    const int64_t T = p.sequences.T;
    if (i >= p.sequences.B * T * p.G * p.N) return;
    const int64_t n = i % p.N, row = i / p.N;
    const int64_t g = row % p.G, t = row / p.G % T, b = row / p.G / T;
    const int64_t shares = t < used_tokens(p.sequences) ? p.shares : 0; /* a token of no sequence gets 0 */
    const float* in = p.in + row * p.shares * p.N + n;
    float sum = 0.0f;
    for (int64_t share = 0; share < shares; share++) sum += in[share * p.N];
    store_as(p.out, p.dtype, offset_of(p.out_stride, b, t, g) + n * p.step, sum);
}

static inline gt_status group_sum(const char* name, const GroupSumParams& p, gt_stream stream) {
    const int64_t outputs = p.sequences.B * p.sequences.T * p.G * p.N;
    return run(name, group_sum_kernel, (outputs + 255) / 256, 256, 0, stream, p);
}

/* ---- ssd on tensor cores: constants and helpers for its problem.cuh and mma/chunk.cuh ---------------------------- */

constexpr int CHUNK = 64; /* tokens that a block takes at a time */
/* BLOCK: tokens of a tile in the products of pairs of tokens.  BLOCKS: such tiles in a chunk. */
constexpr int BLOCK = 16, BLOCKS = CHUNK / BLOCK;

/* Return the lane and the thread, for addresses that a kernel computes again in each chunk.  If the compiler kept such
 * addresses over the loop, they would take registers from the state.  GT_ASSUME lets the compiler divide a lane by
 * shifts alone; it is off in code for 9.0, where some kernels would spill more. */
GT_DEV int here() {
    const int lane = made_here(lane_id());
#if !GT_SM90A
    GT_ASSUME(lane >= 0 && lane < 32);
#endif
    return lane;
}
GT_DEV int thread_here() { return made_here(thread_id()); }

/* A power of two and its inverse.  power_of(bound) chooses the power so that bound * value is in 2^13 ... 2^14, for
 * bound >= 0.  The power stays within 2^-115 ... 2^100. */
struct Power {
    float value, inverse;
};

/* Returns the inverse of a power of two. */
GT_DEV float inverse_of(float power) { return as_float(0x7f000000u - as_uint(power)); }

GT_DEV Power power_of(float bound) {
    int exponent = 127 + 13 + 127 - (int)(as_uint(bound) >> 23);
    exponent = exponent < 12 ? 12 : exponent > 227 ? 227 : exponent;
    return {as_float((uint32_t)exponent << 23), as_float((uint32_t)(254 - exponent) << 23)};
}

} /* namespace ssm */
} /* namespace gt */

#endif
