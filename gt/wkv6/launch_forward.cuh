/* gt/wkv6/launch_forward.cuh - launches of a walk through time, which kernels a call fits, and the plan of forward. */
#ifndef GT_WKV6_LAUNCH_FORWARD_CUH
#define GT_WKV6_LAUNCH_FORWARD_CUH

#include "../base/built.cuh"
#include "../base/launch.cuh"
#include "clear.cuh"
#include "forward.cuh"
#include "forward_sm90.cuh"
#include "generic.cuh"
#include "states.cuh"

namespace gt {
namespace wkv6 {

static inline Packing packing_of(const gt_wkv6_args& a) {
    return {a.cu_seqlens, a.seq_count, a.seq_capacity};
}

/* Sequences that there may be, and places for the chunks of a head. */
static inline int64_t sequences_of(const gt_wkv6_args& a) {
    return a.seq_capacity ? a.seq_capacity : a.B;
}

static inline int64_t places_of(const gt_wkv6_args& a) {
    return a.seq_capacity ? gt_chunk_slots(a.T, a.seq_capacity, CHECKPOINT)
                          : (a.T + CHECKPOINT - 1) / CHECKPOINT;
}

static inline Problem problem_of(const gt_wkv6_args& a) {
    Problem in = {};
    in.B = a.B, in.T = a.T, in.H = a.H;
    in.N = (int)a.N, in.V = (int)a.V;
    in.dtype = a.dtype, in.w_dtype = a.w_dtype, in.decay = a.decay;
    in.scale = a.scale, in.log2_scale = log2f(a.scale);
    in.r = a.r, in.k = a.k, in.w = a.w, in.v = a.v, in.dy = a.dy;
    in.u = a.u;
    in.sequences = sequences_of(a), in.packing = packing_of(a);
    in.r_at = a.r_stride, in.k_at = a.k_stride, in.w_at = a.w_stride, in.v_at = a.v_stride;
    in.dy_at = a.dy_stride;
    return in;
}

static inline void add_output(ClearParams& p, void* data, gt_stride at_, gt_dtype dtype, int64_t size) {
    if (data) p.outputs[p.count++] = {data, at_, dtype, (int)size};
}

static inline gt_status clear_rest(const gt_wkv6_args& a, ClearParams p, const Device& device,
                                   Chain& stream) {
    if (a.seq_capacity == 0 || (p.count == 0 && !p.states && !p.du)) return GT_OK;
    p.packing = packing_of(a);
    p.T = a.T, p.H = a.H, p.N = a.N;
    p.places = places_of(a);
    p.state_size = a.H * a.N * a.V;
    return run("wkv6 clear_rest_kernel", clear_rest_kernel, 2 * device.multiprocessors, 256, 0, stream,
               p);
}

template <int SLICES, bool REVERSE>
static gt_status launch_tokens_with(ForwardParams p, Chain& stream) {
    using C = ForwardTraits<SLICES>;
    p.tiles = (p.in.V + C::COLUMNS - 1) / C::COLUMNS;
    return run("wkv6 token_kernel", token_kernel<SLICES, REVERSE>, p.in.sequences * p.in.H * p.tiles,
               C::THREADS, C::SMEM, stream, p);
}

template <bool REVERSE>
static gt_status launch_tokens(const ForwardParams& p, Chain& stream) {
    if (p.in.N <= 32) return launch_tokens_with<1, REVERSE>(p, stream);
    if (p.in.N <= 64) return launch_tokens_with<2, REVERSE>(p, stream);
    if (p.in.N <= 128) return launch_tokens_with<4, REVERSE>(p, stream);
    return launch_tokens_with<8, REVERSE>(p, stream);
}

/* Whether rows of a tensor start at multiples of `bytes`, and a leaf spans less than 2^31 bytes. */
static inline bool aligned(const void* data, gt_stride at, int element, int bytes) {
    const int64_t n = bytes / element;
    return (uintptr_t)data % (uintptr_t)bytes == 0 && at.b % n == 0 && at.t % n == 0 &&
           at.h % n == 0 && at.t < (int64_t)1 << 24;
}

static inline int size_of(gt_dtype dtype) { return dtype == GT_F32 ? 4 : 2; }

static inline bool fits_tensor_cores(const gt_wkv6_args& a, const Device& device) {
    const int size = size_of(a.dtype);
    const bool has_room = a.dtype != GT_F32 || a.N < 128 ||
                          device.shared_bytes >= TensorTraits<float, float, 128>::SMEM;
    return device.compute_capability >= 80 && has_room && a.N == a.V && a.T < INT32_MAX / 2 &&
           (a.N == 32 || a.N == 64 || a.N == 128) && is_built(a.dtype) && is_built_head(a.N) &&
           aligned(a.r, a.r_stride, size, 16) &&
           aligned(a.k, a.k_stride, size, 16) &&
           aligned(a.w, a.w_stride, size_of(a.w_dtype), 16) && aligned(a.v, a.v_stride, size, 16);
}

static inline bool forward_fits(const gt_wkv6_args& a, const Device& device) {
    return fits_tensor_cores(a, device) && aligned(a.y, a.y_stride, size_of(a.dtype), 16) &&
           (uintptr_t)a.state_out % 16 == 0;
}

/* N = 128: channels of a slice of a chunk, by the shared memory that a block may have; 0: there is no kernel. */
static inline int slice_channels(gt_dtype dtype, const Device& device) {
    if (dtype == GT_BF16 && device.shared_bytes >= HOPPER_KB * 1024) return 128;
    if (device.shared_bytes >= AMPERE_KB * 1024) return 64;
    return dtype == GT_F32 ? 0 : 32;
}

/* Sweep and chunks. */
static inline bool backward_fits(const gt_wkv6_args& a, const Device& device) {
    const int size = size_of(a.dtype), w_size = size_of(a.w_dtype);
    return fits_tensor_cores(a, device) && (a.N < 128 || slice_channels(a.dtype, device) > 0) &&
           aligned(a.dy, a.dy_stride, size, 16) && (uintptr_t)a.dstate_in % 16 == 0 &&
           aligned(a.dv, a.dv_stride, size, 2 * size) && aligned(a.dr, a.dr_stride, size, 8) &&
           aligned(a.dk, a.dk_stride, size, 8) && aligned(a.dw, a.dw_stride, w_size, 2 * w_size) &&
           (uintptr_t)a.u % 16 == 0;
}

template <bool REVERSE, class T, class W, int N>
static gt_status launch_tensor_with(TensorParams p, Chain& stream) {
    using C = TensorTraits<T, W, N>;
    using States = StatesTraits<T, W, N>;
    const int64_t items = p.in.sequences * p.in.H * p.segments.count;
    const int64_t blocks = (items + C::HEADS - 1) / C::HEADS;
    if (items > INT32_MAX)
        return gt_fail(GT_ERROR_SIZE, "%lld segments of heads: at most %d", (long long)items, INT32_MAX);
    p.by_segments = divide_by(p.segments.count), p.by_H = divide_by((int)p.in.H);
    if constexpr (REVERSE && N == 128 && C::KEEPS_BF16) {
        using OneCopy = TensorTraits<T, W, N, true, 1>;
        if (p.S_copies == 1)
            return run("wkv6 states_tensor_kernel", states_tensor_kernel<OneCopy, REVERSE>, blocks, OneCopy::THREADS,
                       OneCopy::SMEM + (p.rowsums ? OneCopy::S_BYTES : 0), stream, p);
    }
    if (REVERSE || !p.y)
        return run("wkv6 states_tensor_kernel", states_tensor_kernel<States, REVERSE>, blocks,
                   States::THREADS, States::SMEM + (p.rowsums ? States::S_BYTES : 0), stream, p);
    if constexpr (!REVERSE && N == 128 && !C::SPLIT) {
        using Hopper = HopperTraits<T, W>;
        static Answers known = {};
        void (*const kernel)(TensorParams) = forward_hopper_kernel<Hopper>;
        if (has_sm90a(reinterpret_cast<const void*>(kernel), Hopper::THREADS, known))
            return run("wkv6 forward_hopper_kernel", kernel, blocks, Hopper::THREADS, Hopper::SMEM, stream, p);
    }
    return run("wkv6 forward_tensor_kernel", forward_tensor_kernel<C>, blocks, C::THREADS, C::SMEM,
               stream, p);
}

/* Calls that fits_tensor_cores lets through find their kernel. */
static inline gt_status left_out(const Problem& in) {
    return gt_fail(GT_ERROR_UNSUPPORTED, "no kernel of dtype %d with N = %d in this build", (int)in.dtype, in.N);
}

template <bool REVERSE, class T, class W>
static gt_status launch_tensor_of(const TensorParams& p, [[maybe_unused]] Chain& stream) {
    if constexpr (is_built_for<T, 32>())
        if (p.in.N == 32) return launch_tensor_with<REVERSE, T, W, 32>(p, stream);
    if constexpr (is_built_for<T, 64>())
        if (p.in.N == 64) return launch_tensor_with<REVERSE, T, W, 64>(p, stream);
    if constexpr (is_built_for<T, 128>())
        if (p.in.N == 128) return launch_tensor_with<REVERSE, T, W, 128>(p, stream);
    return left_out(p.in);
}

template <bool REVERSE>
static gt_status launch_tensor_once(const TensorParams& p, Chain& stream) {
    const bool w_is_float = p.in.w_dtype == GT_F32;
    if (p.in.dtype == GT_F32) return launch_tensor_of<REVERSE, float, float>(p, stream);
    if (p.in.dtype == GT_BF16)
        return w_is_float ? launch_tensor_of<REVERSE, bf16, float>(p, stream)
                          : launch_tensor_of<REVERSE, bf16, bf16>(p, stream);
    return w_is_float ? launch_tensor_of<REVERSE, f16, float>(p, stream)
                      : launch_tensor_of<REVERSE, f16, f16>(p, stream);
}

/* How T tokens of every sequence are cut: from sizes and device, or as the caller wishes. */
static inline Segments cut_time(const gt_wkv6_args& a, const Device& device, int64_t T) {
    constexpr int LEAST = 4 * CHECKPOINT; /* tokens of a segment that are worth a block */
    const int64_t heads = sequences_of(a) * a.H, blocks = a.N == 32 ? (heads + 1) / 2 : heads;
    const int64_t room = (a.N == 128 ? 1 : 2) * (int64_t)device.multiprocessors;
    int64_t count = a.segments;
    if (count == 0) {
        count = blocks > 0 ? room / blocks : 1;
        if (count > T / LEAST) count = T / LEAST;
    }
    const int64_t most = (T + CHECKPOINT - 1) / CHECKPOINT;
    if (count > most) count = most;
    if (count < 1) count = 1;
    const Segments cut = cut_tokens((int)T, (int)count);
    /* packed sequences are cut by the number wished for: it stands for that of any length */
    return a.seq_capacity ? Segments{(int)count, cut.tokens} : cut;
}

/* Workspace of a walk in segments. */
static inline void take_segments(Arena& arena, const gt_wkv6_args& a, const Segments& cut,
                                 float** states, float** decays) {
    *states = *decays = nullptr;
    if (cut.count == 1) return;
    *states = arena.take<float>(sequences_of(a) * a.H * cut.count * a.N * a.N);
    *decays = arena.take<float>(sequences_of(a) * a.H * cut.count * 2 * a.N);
}

/* One walk through time, in one launch or in three. */
template <bool REVERSE>
static gt_status launch_tensor_any(TensorParams p, Chain& stream) {
    if (p.segments.count == 1) return launch_tensor_once<REVERSE>(p, stream);
    const int64_t elements = p.in.sequences * p.in.H * p.in.N * p.in.N;
    TensorParams local = p;
    local.local = 1;
    local.y = nullptr;
    local.checkpoints = nullptr;
    local.G_rows[0].data = local.G_rows[1].data = nullptr;
    local.rowsums = nullptr;
    const int64_t step = REVERSE ? -1 : 1;
    const ScanParams scan = {p, step, step * p.in.N * p.in.N};
    gt_status status;
    if ((status = launch_tensor_once<REVERSE>(local, stream)) != GT_OK ||
        (status = run("wkv6 scan_segments_kernel", scan_segments_kernel, elements / SCAN_THREADS,
                      SCAN_THREADS, SCAN_SMEM, stream, scan)) != GT_OK)
        return status;
    return launch_tensor_once<REVERSE>(p, stream);
}

static inline size_t forward_workspace(const gt_wkv6_args& a, const Device& device) {
    Arena arena(nullptr);
    float *states, *decays;
    if (forward_fits(a, device))
        take_segments(arena, a, cut_time(a, device, a.T), &states, &decays);
    return arena.bytes();
}

/* From a checkpoint of S to its rest, in elements; 0: it has none. */
static inline int64_t rest_at(const gt_wkv6_args& a) {
    return keeps_rest(a.dtype, a.N, a.V) ? a.B * a.H * places_of(a) * a.N * a.V : 0;
}

static inline gt_status launch_tensor(const gt_wkv6_args& a, const Device& device, void* checkpoints,
                                      Chain& stream) {
    const Segments cut = cut_time(a, device, a.T);
    Arena arena(a.workspace);
    TensorParams p = {};
    p.in = problem_of(a);
    p.y = a.y;
    p.y_at = a.y_stride;
    p.state_in = a.state_in;
    p.state_out = a.state_out;
    p.checkpoints = checkpoints;
    p.rest = rest_at(a);
    p.state_in_shared = a.state_in_shared;
    p.places = (int)places_of(a);
    p.segments = cut;
    take_segments(arena, a, cut, &p.segment_states, &p.segment_decays);
    return launch_tensor_any<false>(p, stream);
}

/* `states` checkpoints in the arena, at its next place; `rest`: elements of those of S that follow. */
static inline void* take_checkpoints(Arena& arena, const gt_wkv6_args& a, gt_dtype dtype, int64_t states,
                                     int64_t rest = 0) {
    const int64_t count = states * a.N * a.V + rest;
    if (dtype == GT_F32) return arena.take<float>(count);
    return arena.take<bf16>(count);
}

/* Where forward leaves the states for backward. */
static inline void* checkpoints_in(const void* saved, const gt_wkv6_args& a, size_t* bytes) {
    Arena arena(const_cast<void*>(saved));
    const gt_dtype dtype = state_dtype(a.dtype, a.N, a.V);
    void* checkpoints = take_checkpoints(arena, a, dtype, a.B * a.H * places_of(a), rest_at(a));
    *bytes = arena.bytes();
    return checkpoints;
}

} /* namespace wkv6 */
} /* namespace gt */

#endif
