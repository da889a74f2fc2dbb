/* gt/fused/conv_ssd_step.cuh - conv_ssd step: 1 to 16 new tokens of every batch element.  Both states lie in slots.
 * Two launches update them in place, without workspace.
 *
 *     c = silu(bias + sum_k weight_k e_{t+k})      e is the W - 1 inputs of the convolution's state, then the tokens
 *     h <- exp(Delta A) h + Delta x B^T            y = (h C + Dskip x) silu(z)           x, B, C = slices of c
 *
 * LAUNCH 1, step_kernel, runs the code of gt/ssd/step.cuh, with the same tile, state, and order of sums.  The only
 * difference is that x, B and C come from shared memory.  A block has up to 8 warps of one head and batch element.
 *   1. An item is all tokens of 2 adjacent channels.  A thread issues the loads of its item (state, weights, bias, 2
 *      tokens), then loads of its rows of h.  Only loads of states wait for another load: their address needs the slot.
 *   2. The block convolves the 2 N columns of B and C of its group, and its own rows of x: N + rows / 2 items.  It
 *      rounds the results to dtype and stores them in shared memory.
 *   3. After one barrier each warp continues alone, token by token.
 * No other block reads the convolution's state of this block's rows of x, so the item's thread writes that state.
 * LAUNCH 2, columns_kernel, writes the convolution's states of the columns of B and C.  All blocks of a group read
 * these states, so they are written after launch 1.  The kernel may start before launch 1 ends (see Chain).  It loads
 * all its inputs before it waits for launch 1.
 *
 * Sums of the convolution have the order of gt_conv1d_step.  So gt_conv1d_step followed by gt_ssd_step gives the same
 * bits, and a result depends on its own inputs alone.
 *
 * The kernels for a dtype load 2 channels at once.  They need W = 4, P and N that are multiples of 4, and alignment.
 * In the kernel for AnyType an item has one channel.  That kernel takes any width, strides and alignment, and gives the
 * same bits.
 *
 * REGISTERS: as ssd's step.  Before the barrier a thread also holds 8 weights, 2 biases, 6 values of state and 2 tokens
 * of its item, beside 32 values of h.
 * SHARED MEMORY: T (2 N + rows of the block) elements.  N = 128, 64 rows, bf16: 640 bytes a token; at most 36 KB.
 * BYTES, for W = 4: a block moves the bytes of ssd's step, and more for the convolution.  For each row of x it reads 12
 * bytes of state and 20 bytes of parameters, and writes 12 bytes of state.  For each column of B or C it reads 32
 * bytes, mostly from L2.  For N = 128 these are 8 KB, while 64 rows of h are 32 KB read and 32 KB written.
 * ISSUE SLOTS of an item of one token: 7 loads, 8 multiply-adds, 2 SiLU, 1 store.  In launch 2 a thread of 2 channels
 * has 4 loads and 3 stores. */
#ifndef GT_FUSED_CONV_SSD_STEP_CUH
#define GT_FUSED_CONV_SSD_STEP_CUH

#include "../conv1d/problem.cuh"
#include "../ssd/step.cuh"
#include "conv_ssd.h"

namespace gt {
namespace conv_ssd {

using namespace ssm;
using conv1d::HALO;
using conv1d::TAPS;

constexpr int COLUMN_BLOCK = 128; /* threads of columns_kernel */

/* Largest number of warps of a block.  8 warps have 64 rows of 128 columns, and two such blocks on a multiprocessor
 * leave 128 registers a thread.  Threads of 8 rows, and kernels for f16, fp32 and AnyType, need more; 5 warps leave
 * them 168. */
template <class T, int ROWS>
constexpr int STEP_WARPS = std::is_same<T, bf16>::value&& ROWS == 4 ? 8 : 5;

/* Blocks that a multiprocessor must be able to hold.  With 64 values of h a thread, kernels other than bf16 need more
 * than 168 registers, so only one block fits. */
template <class T, int VECS, int ROWS>
constexpr int STEP_BLOCKS = !std::is_same<T, bf16>::value && VECS * ROWS > 8 ? 1 : 2;

/* The convolution's arguments, for both kernels. */
struct ConvInputs {
    const void* xBC;
    gt_stride stride;
    gt_dtype dtype;
    const float *weight, *bias;
    float* state; /* [slot_capacity,D,W-1] */
    int64_t D, row_stride;
    int T, W;

    /* Returns the index in xBC of channel d of token t. */
    GT_METHOD int64_t at(int64_t b, int t, int64_t d) const { return b * stride.b + t * stride.t + d * stride.h; }
};

struct StepParams : ssd::StepParams {
    ConvInputs conv;
    int64_t first_B, first_C; /* first channel of B, and of C */
    int units;                /* most units of VEC channels that a block convolves */
};

/* ---- launch 1: an item of the convolution ---------------------------------------------------- */

/* The loaded values of an item: tokens, state and parameters of 2 adjacent channels of type T.  W = 4. */
template <class T>
struct ItemLoads {
    static constexpr int VEC = 2, BATCH = 2; /* VEC: channels of an item; BATCH: tokens that are loaded together */
    using Token = Vec<T, 2>;
    Token token[BATCH];
    float2 state[HALO], bias;
    float4 weight[VEC];

    GT_METHOD static Token element(const ConvInputs& in, int64_t at) {
        return ldg<Token>(static_cast<const T*>(in.xBC) + at);
    }
    GT_METHOD static int first_tap(const ConvInputs&) { return 0; }
    GT_METHOD void load_parameters(const ConvInputs& in, int64_t d) {
        GT_UNROLL
        for (int v = 0; v < VEC; v++) weight[v] = ldg<float4>(in.weight + (d + v) * TAPS);
        bias = {0.0f, 0.0f};
        if (in.bias) bias = ldg<float2>(in.bias + d);
    }
    GT_METHOD void load_state(const ConvInputs&, const float* from) {
        GT_UNROLL
        for (int i = 0; i < HALO; i++) state[i] = ldg<float2>(from + 2 * i);
    }
    GT_METHOD static float value(const ConvInputs&, const Token& x, int v) { return x.get(v); }
    GT_METHOD float weight_of(int k, int v) const {
        const float4& w = weight[v];
        return k == 0 ? w.x : k == 1 ? w.y : k == 2 ? w.z : w.w;
    }
    GT_METHOD float bias_of(int v) const { return v ? bias.y : bias.x; }
    GT_METHOD float state_of(int k, int v) const {
        const int i = HALO * v + k;
        return i % 2 ? state[i / 2].y : state[i / 2].x;
    }
    GT_METHOD static void store_state(const ConvInputs&, float* to, const float (&e)[HALO][2]) {
        GT_UNROLL
        for (int i = 0; i < 2 * HALO; i += 2)
            stg<float2>(to + i, {e[i % HALO][i / HALO], e[(i + 1) % HALO][(i + 1) / HALO]});
    }
    GT_METHOD static void share(const ConvInputs&, uint32_t address, const float (&sum)[2]) {
        float c[2];
        GT_UNROLL
        for (int v = 0; v < 2; v++) c[v] = conv1d::output_of_sum<T>(true, sum[v]);
        Vec<T, 2> packed;
        packed.set(c);
        sts<Vec<T, 2>>(address, packed);
    }
};

/* ItemLoads of one channel, of any dtype and width.  Tap k of the W taps has index k + TAPS - W, so that the current
 * token's tap is always the last. */
template <>
struct ItemLoads<AnyType> {
    static constexpr int VEC = 1, BATCH = 2;
    using Token = uint32_t;
    Token token[BATCH];
    float state[HALO], weight[TAPS], bias;

    GT_METHOD static Token element(const ConvInputs& in, int64_t at) { return load_bits(in.xBC, in.dtype, at); }
    GT_METHOD static int first_tap(const ConvInputs& in) { return TAPS - in.W; }
    GT_METHOD void load_parameters(const ConvInputs& in, int64_t d) {
        const int first = first_tap(in);
        GT_UNROLL
        for (int k = 0; k < TAPS; k++) weight[k] = k >= first ? in.weight[d * in.W + k - first] : 0.0f;
        bias = in.bias ? in.bias[d] : 0.0f;
    }
    GT_METHOD void load_state(const ConvInputs& in, const float* from) {
        const int first = first_tap(in);
        GT_UNROLL
        for (int k = 0; k < HALO; k++) state[k] = k >= first ? from[k - first] : 0.0f;
    }
    GT_METHOD static float value(const ConvInputs& in, Token x, int) { return value_of_bits(x, in.dtype); }
    GT_METHOD float weight_of(int k, int) const { return weight[k]; }
    GT_METHOD float bias_of(int) const { return bias; }
    GT_METHOD float state_of(int k, int) const { return state[k]; }
    GT_METHOD static void store_state(const ConvInputs& in, float* to, const float (&e)[HALO][1]) {
        const int first = first_tap(in);
        GT_UNROLL
        for (int k = 0; k < HALO; k++)
            if (k >= first) to[k - first] = e[k][0];
    }
    GT_METHOD static void share(const ConvInputs& in, uint32_t address, const float (&sum)[1]) {
        float c =
            in.dtype == GT_F32 ? conv1d::output_of_sum<float>(true, sum[0]) : conv1d::output_of_sum<bf16>(true, sum[0]);
        if (in.dtype == GT_BF16) c = unpack_bf16_lo(pack_bf16(c, 0.0f));
        if (in.dtype == GT_F16) c = unpack_f16_lo(pack_f16(c, 0.0f));
        sts<float>(address, c);
    }
};

/* An item: all tokens of VEC channels of one batch element. */
template <class T>
struct Item {
    using Loads = ItemLoads<T>;
    static constexpr int VEC = Loads::VEC, BATCH = Loads::BATCH;
    Loads loads;
    int64_t b, d;
    float* state;
    int column;  /* column in a row of shared memory; -1: the thread has no item */
    bool writes; /* whether this block writes the state */

    template <class C>
    GT_METHOD void place(const StepParams& p, const ssd::StepPlace<C>& s, int unit) {
        constexpr int NP = C::LANES * C::COLUMNS;
        const int channel = unit * VEC, x = channel - 2 * p.N; /* x: index in the block's rows */
        writes = x >= 0;
        d = writes           ? (int64_t)s.h * p.P + s.block_row + x
            : channel >= p.N ? p.first_C + (int64_t)s.g * p.N + channel - p.N
                             : p.first_B + (int64_t)s.g * p.N + channel;
        column = writes ? 2 * NP + x : channel >= p.N ? NP + channel - p.N : channel;
        if (unit >= p.units || s.block_row + x >= p.P) column = -1;
        b = s.b;
    }
    GT_METHOD void load_tokens(const StepParams& p, int t) {
        GT_UNROLL
        for (int i = 0; i < BATCH; i++)
            if (t + i < p.conv.T) loads.token[i] = Loads::element(p.conv, p.conv.at(b, t + i, d));
    }
    /* The state is loaded last, because its address depends on the slot. */
    GT_METHOD void load(const StepParams& p, const StepElement& element) {
        if (column < 0) return;
        load_tokens(p, 0);
        loads.load_parameters(p.conv, d);
        state = p.conv.state + element.row * p.conv.row_stride + d * (p.conv.W - 1);
        if (!element.is_skipped(p.elements)) loads.load_state(p.conv, state);
    }
    /* Convolves the batch element's tokens.  Stores the results in shared memory, in rows of `pitch` elements. */
    GT_METHOD void convolve(const StepParams& p, const StepElement& element, int pitch) {
        if (column < 0) return;
        constexpr uint32_t SIZE = sizeof(typename ssd::SharedElement<T>::Type);
        const int first_tap = Loads::first_tap(p.conv);
        float e[HALO][VEC];
        GT_UNROLL
        for (int k = 0; k < HALO; k++) {
            GT_UNROLL
            for (int v = 0; v < VEC; v++) e[k][v] = loads.state_of(k, v);
        }
        uint32_t to = smem_base() + SIZE * (uint32_t)column;
        GT_NO_UNROLL
        for (int t = 0; t < element.tokens; t += BATCH) {
            float x[BATCH][VEC];
            GT_UNROLL
            for (int i = 0; i < BATCH; i++) {
                GT_UNROLL
                for (int v = 0; v < VEC; v++)
                    x[i][v] = t + i < element.tokens ? Loads::value(p.conv, loads.token[i], v) : 0.0f;
            }
            load_tokens(p, t + BATCH); /* in flight while these tokens are convolved */
            GT_UNROLL
            for (int i = 0; i < BATCH; i++) {
                if (t + i >= element.tokens) break;
                float sum[VEC];
                GT_UNROLL
                for (int v = 0; v < VEC; v++) {
                    sum[v] = loads.bias_of(v);
                    GT_UNROLL
                    for (int k = 0; k < TAPS; k++)
                        if (k >= first_tap)
                            sum[v] = fma_rn(loads.weight_of(k, v), k < HALO ? e[k < HALO ? k : 0][v] : x[i][v], sum[v]);
                    GT_UNROLL
                    for (int k = 0; k < HALO - 1; k++) e[k][v] = e[k + 1][v];
                    e[HALO - 1][v] = x[i][v];
                }
                Loads::share(p.conv, to, sum);
                to += SIZE * (uint32_t)pitch;
                if (writes && t + i + 1 == element.commit) Loads::store_state(p.conv, state, e);
            }
        }
    }
};

/* Replaces ssd::StepInputs: this kernel convolves B, C and x itself. */
template <class T, class C>
struct StepInputs : ssd::SharedInputs<T, C> {
    using Base = ssd::SharedInputs<T, C>;
    Item<T> item; /* the thread's first item */
    StepElement element;

    GT_METHOD StepInputs(const StepParams& p, const ssd::StepPlace<C>& s, const StepElement& of) : element(of) {
        item.place(p, s, thread_id());
        item.load(p, element);
        if (p.z) Base::copy(p, s, 2 * Base::NP + Base::rows(), 2 * (Base::NP + Base::rows()));
    }
    GT_METHOD void begin(const StepParams& p, const ssd::StepPlace<C>& s) {
        const int pitch = ssd::shared_pitch(Base::NP, Base::rows(), p.z);
        item.convolve(p, element, pitch);
        for (int unit = thread_id() + block_threads(); unit < p.units; unit += block_threads()) {
            Item<T> more;
            more.place(p, s, unit);
            more.load(p, element);
            more.convolve(p, element, pitch);
        }
        clear(p, s, pitch);
        Base::meet(p, s);
    }
    /* Clears the rest of the tile: columns of B and C from N on, and rows of x from P on. */
    GT_METHOD static void clear(const StepParams& p, const ssd::StepPlace<C>& s, int pitch) {
        const int columns = Base::NP - p.N, end = Base::rows() - (p.P - s.block_row), rows = end > 0 ? end : 0;
        if (columns + rows == 0) return;
        for (int t = 0; t < p.conv.T; t++) {
            const uint32_t at = smem_base() + Base::SIZE * (uint32_t)(t * pitch);
            for (int i = thread_id(); i < 2 * columns + rows; i += block_threads()) {
                const int n = i < columns       ? p.N + i
                              : i < 2 * columns ? Base::NP + p.N + i - columns
                                                : 2 * Base::NP + Base::rows() - rows + i - 2 * columns;
                sts<typename ssd::SharedElement<T>::Type>(at + Base::SIZE * (uint32_t)n, {});
            }
        }
    }
};

template <class T, int LANES, int VECS, int ROWS>
GT_KERNEL((32 * STEP_WARPS<T, ROWS>), (STEP_BLOCKS<T, VECS, ROWS>))
step_kernel(const GT_GRID_CONSTANT StepParams p) {
    using C = ssd::StepTraits<LANES, VECS, ROWS>;
    ssd::StepPlace<C> s;
    release_chain(); /* columns_kernel may start when every block has come here */
    int in_strand, part, in_group;
    const int strand = divide(block_x(), p.by_strand, &in_strand);
    s.h = divide(in_strand, p.by_head, &part);
    s.g = divide(s.h, p.by_group, &in_group);
    s.block_row = part * (block_threads() / 32) * C::TILE;
    s.take_rows(s.block_row + warp_id() * C::TILE); /* warps without rows convolve, too */
    for (s.b = strand; s.b < p.B; s.b += p.strands) {
        ssd::step_rows<T, StepInputs<T, C>, false>(p, s);
        if (s.b + p.strands < p.B) sync_threads(); /* before the block writes shared memory again */
    }
}

/* ---- launch 2: the convolution's states of B and C -------------------------------------------- */

struct ColumnParams {
    ConvInputs conv;
    int64_t B;
    StepElements elements;
    int64_t first, units; /* channel of column 0; units of VEC columns of a batch element */
};

/* A thread updates the states of VEC columns of one batch element, then of further ones. */
template <class T>
GT_KERNEL(COLUMN_BLOCK, 4)
columns_kernel(const GT_GRID_CONSTANT ColumnParams p) {
    using Loads = ItemLoads<T>;
    constexpr int VEC = Loads::VEC;
    const ConvInputs& in = p.conv;
    const int first_tap = Loads::first_tap(in);
    const int64_t stride = (int64_t)grid_x() * COLUMN_BLOCK, items = p.B * p.units;
    for (int64_t item = (int64_t)block_x() * COLUMN_BLOCK + thread_id(); item < items; item += stride) {
        const int64_t b = item / p.units, d = p.first + item % p.units * VEC;
        const StepElement element(p.elements, b);
        const bool is_written = !element.is_skipped(p.elements) && element.commit > 0;
        float* const state = in.state + element.row * in.row_stride + d * (in.W - 1);
        Loads loads = {};
        typename Loads::Token before[HALO] = {};
        float e[HALO][VEC];
        GT_UNROLL
        for (int k = 0; k < HALO; k++) {
            const int t =
                element.commit - HALO + k; /* the token that becomes the k-th input; negative: an input of the old
                                            * state */
            if (is_written && t >= 0 && k >= first_tap) before[k] = Loads::element(in, in.at(b, t, d));
        }
        if (is_written && element.commit < HALO) loads.load_state(in, state);
        GT_UNROLL
        for (int k = 0; k < HALO; k++) {
            GT_UNROLL
            for (int v = 0; v < VEC; v++) {
                e[k][v] = Loads::value(in, before[k], v);
                GT_UNROLL
                for (int old = k + 1; old < HALO; old++)
                    if (old - k == element.commit) e[k][v] = loads.state_of(old, v);
            }
        }
        wait_for_chain();
        if (is_written) Loads::store_state(in, state, e);
    }
}

/* ---- launch ------------------------------------------------------------------------------------ */

/* Returns whether the kernels for a dtype can run.  They need pairs of channels, and groups of 4 rows and columns, that
 * are adjacent and aligned in every tensor. */
static inline bool has_step_vectors(const gt_conv_ssd_args& a) {
    return a.W == TAPS && a.P % 4 == 0 && a.N % 4 == 0 && a.xBC_stride.h == 1 && a.xBC_stride.b % 2 == 0 &&
           a.xBC_stride.t % 2 == 0 && (uintptr_t)a.xBC % (a.dtype == GT_F32 ? 8 : 4) == 0 &&
           has_aligned_fours(a.state_out, GT_F32) && a.state_out_stride % 4 == 0 && a.conv_state_out_stride % 2 == 0 &&
           has_fours(a.z, a.z_stride, a.dtype) && has_aligned_fours(a.weight, GT_F32) &&
           (uintptr_t)a.conv_state_out % 8 == 0 && (uintptr_t)a.bias % 8 == 0;
}

static inline ConvInputs conv_inputs_of(const gt_conv_ssd_args& a) {
    ConvInputs in = {};
    in.xBC = a.xBC, in.stride = a.xBC_stride, in.dtype = a.dtype;
    in.weight = a.weight, in.bias = a.bias;
    in.state = a.conv_state_out;
    in.D = gt_conv_ssd_channels(&a), in.row_stride = a.conv_state_out_stride;
    in.T = (int)a.T, in.W = (int)a.W;
    return in;
}

template <class T, class C>
static inline gt_status launch_step_rows(const gt_conv_ssd_args& a, const gt_ssd_args& ssd, Chain& chain) {
    const ssd::StepGrid grid(a.P, C::TILE, STEP_WARPS<T, C::ROWS>);
    const int threads = 32 * (int)grid.warps, rows = (int)grid.warps * C::TILE;
    StepParams p = {};
    static_cast<ssd::StepParams&>(p) = ssd::step_params_of(ssd, grid);
    p.conv = conv_inputs_of(a);
    p.first_B = a.H * a.P, p.first_C = p.first_B + a.G * a.N;
    p.units = (2 * (int)a.N + rows) / ItemLoads<T>::VEC;
    const size_t row_bytes =
        (size_t)ssd::shared_pitch(ssd::SharedInputs<T, C>::NP, rows, a.z) * ssd::SharedInputs<T, C>::SIZE;
    return run("conv_ssd step_kernel", step_kernel<T, C::LANES, C::VECS, C::ROWS>, p.strands * a.H * grid.parts,
               (unsigned)threads, (size_t)a.T * row_bytes, chain, p);
}

template <class T>
static inline gt_status launch_step_with(const gt_conv_ssd_args& a, const Device& device, Chain& chain) {
    gt_ssd_args ssd = gt_conv_ssd_ssd(&a, nullptr, nullptr, 0);
    ssd.state_out_stride = a.state_out_stride; /* set here, since nothing fills in defaults of `ssd` */
    const gt_status status = ssd::with_step_size<T>(
        ssd, device, [&](auto traits) { return launch_step_rows<T, decltype(traits)>(a, ssd, chain); });
    if (status != GT_OK) return status;
    ColumnParams p = {};
    p.conv = conv_inputs_of(a);
    p.B = a.B;
    p.elements = step_elements_of(a);
    p.first = a.H * a.P, p.units = 2 * a.G * a.N / ItemLoads<T>::VEC;
    const int64_t blocks = (a.B * p.units + COLUMN_BLOCK - 1) / COLUMN_BLOCK;
    return run("conv_ssd columns_kernel", columns_kernel<T>, blocks < INT32_MAX ? blocks : INT32_MAX, COLUMN_BLOCK, 0,
               chain, p);
}

/* `a` holds checked arguments with their defaults filled in. */
static inline gt_status launch_step(const gt_conv_ssd_args& a, const Device& device, gt_stream stream) {
    Chain chain = {stream};
    if (a.T == 0) return GT_OK;
    if (!has_step_vectors(a)) return launch_step_with<AnyType>(a, device, chain);
    return with_activations(a.dtype, [&](auto type) { return launch_step_with<decltype(type)>(a, device, chain); });
}

} /* namespace conv_ssd */
} /* namespace gt */

#endif
