/* gt/wkv6/launch.cuh - wkv6 on the current GPU: plans and launches.  path.cuh chooses the kernels.
 * gt/recurrence/driver.cuh has the order of the launches and implements the C functions. */
#ifndef GT_WKV6_LAUNCH_CUH
#define GT_WKV6_LAUNCH_CUH

#include "../recurrence/driver.cuh"
#include "backward.cuh"
#include "forward.cuh"
#include "forward_sm90.cuh"
#include "generic.cuh"
#include "path.cuh"
#include "states.cuh"
#include "step.cuh"
#include "table.h"

namespace gt {
namespace wkv6 {

/* ---- passes ------------------------------------------------------------------------------------------------- */

/* A pass through time, forward or in reverse.  The kernels on tensor cores take `tensor`; token_kernel takes `any`. */
struct Pass {
    Choice choice;
    TensorParams tensor;
    TokenParams any;

    PassParams& params() { return choice.on_tensor_cores ? static_cast<PassParams&>(tensor) : any; }
};

/* Returns the number of blocks of a pass with `each` blocks per head. */
static inline int64_t pass_blocks(const Problem& in, int64_t each, const Device& device) {
    return most_blocks(in.sequences, most_sequences(in.sequences) * in.H * each,
                       most_sequences(sensible(in.sequences)) * in.H * each, device);
}

/* Makes a pass that computes S from the caller's states.  REVERSE: makes the reverse state pass, which computes G, with
 * r in place of k and dy in place of v. */
template <bool REVERSE>
static Pass pass_of(const gt_wkv6_args& a, const Choice& choice, const Segments& cut, void* checkpoints) {
    Pass pass = {};
    pass.choice = choice;
    PassParams& p = pass.params();
    p.in = problem_of(a);
    if (REVERSE) p.in.k = a.r, p.in.k_stride = a.r_stride, p.in.v = a.dy, p.in.v_stride = a.dy_stride;
    p.state_in = REVERSE ? a.dstate_out : a.state_in;
    p.state_in_shared = !REVERSE && a.state_in_shared;
    p.checkpoints = checkpoints;
    p.chunk_slots = chunk_slots_of(a);
    p.lo_terms = keeps_lo(a.dtype, a.N, a.V) ? a.B * a.H * p.chunk_slots * a.N * a.V : 0;
    pass.any.checkpoint_dtype = REVERSE ? GT_F32 : state_dtype(a.dtype, a.N, a.V);
    pass.tensor.segments = cut;
    pass.tensor.items = (int)(most_sequences(p.in.sequences) * a.H * cut.count);
    pass.tensor.by_segments = divide_by((int)cut.count), pass.tensor.by_H = divide_by((int)a.H);
    return pass;
}

template <bool REVERSE>
static gt_status launch_tokens(const TokenParams& params, const Device& device, Chain& stream) {
    const auto with = [&](auto slices) {
        constexpr int SLICES = decltype(slices)::value;
        using C = ForwardTraits<SLICES>;
        TokenParams p = params;
        p.tiles = (p.in.V + C::COLUMNS - 1) / C::COLUMNS;
        return run("wkv6 token_kernel", token_kernel<SLICES, REVERSE>, pass_blocks(p.in, p.tiles, device), C::THREADS,
                   C::SMEM, stream, p);
    };
    if (params.in.N <= 32) return with(std::integral_constant<int, 1>());
    if (params.in.N <= 64) return with(std::integral_constant<int, 2>());
    if (params.in.N <= 128) return with(std::integral_constant<int, 4>());
    return with(std::integral_constant<int, 8>());
}

template <bool REVERSE, class T, class W, int N>
static gt_status launch_tensor(const TensorParams& p, const Choice& choice, const Device& device, Chain& stream) {
    using C = TensorTraits<T, W, N>;
    using States = StatesTraits<T, W, N>;
    const int64_t blocks = (pass_blocks(p.in, p.segments.count, device) + C::HEADS - 1) / C::HEADS;
    if constexpr (REVERSE && N == 128 && C::KEEPS_BF16) {
        using OneCopy = TensorTraits<T, W, N, true, 1>;
        if (p.S_copies == 1)
            return run("wkv6 states_tensor_kernel", states_tensor_kernel<OneCopy, REVERSE>, blocks, OneCopy::THREADS,
                       OneCopy::SMEM + (p.rowsums ? OneCopy::S_BYTES : 0), stream, p);
    }
    if constexpr (!REVERSE && N == 128 && !C::TF32X3) {
        using Hopper = HopperTraits<T, W, true>;
        using HopperStates = HopperTraits<T, W, false>;
        void (*const kernel)(TensorParams) = !p.y           ? states_hopper_kernel<HopperStates>
                                             : p.mix.is_set ? mixed_hopper_kernel<Hopper>
                                                            : forward_hopper_kernel<Hopper>;
        const char* const name = !p.y           ? "wkv6 states_hopper_kernel"
                                 : p.mix.is_set ? "wkv6 mixed_hopper_kernel"
                                                : "wkv6 forward_hopper_kernel";
        if (choice.on_sm90) return run(name, kernel, blocks, Hopper::THREADS, Hopper::SMEM, stream, p);
    }
    if (REVERSE || !p.y)
        return run("wkv6 states_tensor_kernel", states_tensor_kernel<States, REVERSE>, blocks, States::THREADS,
                   States::SMEM + (p.rowsums ? States::S_BYTES : 0), stream, p);
    if (p.mix.is_set)
        return run("wkv6 forward_mixed_kernel", forward_mixed_kernel<C>, blocks, C::THREADS, C::SMEM, stream, p);
    return run("wkv6 forward_tensor_kernel", forward_tensor_kernel<C>, blocks, C::THREADS, C::SMEM, stream, p);
}

template <bool REVERSE>
static gt_status launch_tensor(const TensorParams& p, const Choice& choice, const Device& device, Chain& stream) {
    return dispatch(p.in.dtype, p.in.w_dtype, p.in.N, [&](auto types) {
        using K = decltype(types);
        return launch_tensor<REVERSE, typename K::T, typename K::W, K::N>(p, choice, device, stream);
    });
}

static inline ScanParams scan_of(const TensorParams& p) {
    const int64_t size = p.in.H * p.in.N;
    return {p.in.sequences, p.segments, CHECKPOINT, p.state_in, p.state_in_shared,
            size * p.in.N,  size,       nullptr,    LN_2,       2};
}

template <bool REVERSE>
static gt_status launch_pass(const Pass& pass, const Device& device, Chain& stream) {
    if (!pass.choice.on_tensor_cores) return launch_tokens<REVERSE>(pass.any, device, stream);
    const ScanParams scan = scan_of(pass.tensor);
    return run_pass<REVERSE>("wkv6 scan_segments_kernel", scan, device, stream, [&](bool is_local) {
        TensorParams once = pass.tensor;
        if (is_local) {
            once.local = ALL_BUT_LAST;
            once.y = nullptr;
            once.checkpoints = nullptr;
            once.snapshots = {};
            once.G_rows[0].data = once.G_rows[1].data = nullptr;
            once.rowsums = nullptr;
        }
        return launch_tensor<REVERSE>(once, pass.choice, device, stream);
    });
}

/* ---- forward ------------------------------------------------------------------------------------------------ */

/* Takes memory for `states` checkpoints and for `lo_terms` numbers of lo terms (keeps_lo). */
static inline void* take_checkpoints(Arena& arena, const gt_wkv6_args& a, gt_dtype dtype, int64_t states,
                                     int64_t lo_terms = 0) {
    const int64_t count = states * a.N * a.V + lo_terms;
    return dtype == GT_F32 ? static_cast<void*>(arena.take<float>(count)) : arena.take<bf16>(count);
}

/* Takes memory for S before every chunk, which forward saves for backward. */
static inline void* take_S(Arena& arena, const gt_wkv6_args& a) {
    const int64_t states = a.B * a.H * chunk_slots_of(a);
    return take_checkpoints(arena, a, state_dtype(a.dtype, a.N, a.V), states,
                            keeps_lo(a.dtype, a.N, a.V) ? states * a.N * a.V : 0);
}

/* Cuts the sequences into segments, and takes memory for the segments' states and decays. */
static inline Segments take_segments(Arena& arena, const gt_wkv6_args& a, const Choice& choice, bool wanted = false) {
    return cut_segments(arena, sequences_of(a), choice.segments, CHECKPOINT, a.H * a.N * a.V, 2 * a.H * a.N, wanted);
}

struct ForwardPlan {
    static constexpr const char* CLEAR = "wkv6 clear_unused_kernel";
    Sequences sequences;
    ClearParams unused;
    Pass states;
    size_t bytes, saved;

    gt_status pass(const Device& device, Chain& stream) const { return launch_pass<false>(states, device, stream); }
};

static inline ForwardPlan plan_forward(const gt_wkv6_args& a, const Choice& choice, const Device&) {
    ForwardPlan plan = {};
    Arena arena(a.workspace), saved(a.saved);
    plan.sequences = sequences_of(a, a.state_out_stride);
    add_output(plan.unused, a.y, a.y_stride, a.dtype, a.H, a.V);
    void* checkpoints = take_S(saved, a);
    plan.states = pass_of<false>(a, choice, take_segments(arena, a, choice), checkpoints);
    PassParams& p = plan.states.params();
    p.y = a.y, p.y_stride = a.y_stride;
    p.state_out = a.state_out;
    p.snapshots = snapshots_of(a);
    plan.bytes = arena.bytes(), plan.saved = saved.bytes();
    return plan;
}

/* ---- backward ----------------------------------------------------------------------------------------------- */

struct BackwardPlan {
    static constexpr const char* CLEAR = "wkv6 clear_unused_kernel";
    Sequences sequences;
    ClearParams unused;
    bool has_states;
    Pass states, gradients;
    bool on_tensor_cores;
    BackwardParams chunks; /* parameters of the kernel on tensor cores */
    int slice;             /* N = 128: channels of a slice */
    ChunkParams any;       /* parameters of the kernel for any size */
    int64_t blocks;        /* blocks of the kernel that computes chunks */
    gt::RowSums sums;      /* of base/reduce.cuh; wkv6::RowSums is another type */
    int accumulate;
    size_t bytes, saved;

    gt_status make_states(const Device& device, Chain& stream) const {
        return launch_pass<false>(states, device, stream);
    }
    gt_status make_gradients(const Device& device, Chain& stream) const {
        return launch_pass<true>(gradients, device, stream);
    }
    gt_status finish_chunks(const Device& device, Chain& stream) const;
};

template <class T, class W, int N>
static gt_status launch_chunks(const BackwardPlan& plan, Chain& stream) {
    const auto with = [&](auto channels) {
        using C = BackwardTraits<T, W, N, decltype(channels)::value>;
        return run("wkv6 backward_tensor_kernel", backward_tensor_kernel<C>, plan.blocks, C::THREADS, C::SMEM, stream,
                   plan.chunks);
    };
    if constexpr (N == 128 && std::is_same<T, bf16>::value)
        if (plan.slice == 128) return with(std::integral_constant<int, 128>());
    if constexpr (N == 128 && !std::is_same<T, float>::value)
        if (plan.slice == 32) return with(std::integral_constant<int, 32>());
    constexpr int CHANNELS = N == 128 ? 64 : N;
    return with(std::integral_constant<int, CHANNELS>());
}

inline gt_status BackwardPlan::finish_chunks(const Device&, Chain& stream) const {
    const Problem& in = any.in;
    if (on_tensor_cores)
        return dispatch(in.dtype, in.w_dtype, in.N, [&](auto types) {
            using K = decltype(types);
            return launch_chunks<typename K::T, typename K::W, K::N>(*this, stream);
        });
    const int states_smem = 4 * states_layout(any.rows, any.columns, any.pitch).end;
    const bool wide = sub_chunk_smem(in.N, in.V, false) > SHARED_BYTES;
    const int pairs_smem = sub_chunk_smem(in.N, in.V, wide);
    return run("wkv6 backward_chunk_kernel", wide ? backward_chunk_kernel<true> : backward_chunk_kernel<false>, blocks,
               STATES_THREADS, states_smem > pairs_smem ? states_smem : pairs_smem, stream, any);
}

static inline BackwardPlan plan_backward(const gt_wkv6_args& a, const Choice& choice, const Device& device) {
    BackwardPlan plan = {};
    Arena arena(a.workspace), saved(const_cast<void*>(static_cast<const void*>(a.saved)));
    const bool on_tensor_cores = choice.on_tensor_cores, G_in_outputs = choice.G_in_outputs;
    const int64_t slots = chunk_slots_of(a), chunks = a.B * a.H * slots, most = most_sequences(sequences_of(a));
    const gt_dtype S_dtype = state_dtype(a.dtype, a.N, a.V),
                   G_dtype = on_tensor_cores ? a.dtype : GT_F32; /* GradientOf */
    plan.sequences = sequences_of(a);
    plan.on_tensor_cores = on_tensor_cores;
    plan.accumulate = a.accumulate;
    plan.has_states = a.saved;
    void* S = take_S(saved, a);
    if (!a.saved) S = take_S(arena, a);
    const Segments cut = take_segments(arena, a, choice);
    void* G = nullptr;
    if (!G_in_outputs) {
        G = take_checkpoints(arena, a, G_dtype, chunks);
    } else if (choice.last_first || a.seq_capacity || a.T % CHECKPOINT) {
        G = take_checkpoints(arena, a, G_dtype, most * a.H);
    }
    float* du = plan.sums.take(arena, a.du, a.B * slots, a.H * a.N, packed_rows(plan.sequences, CHECKPOINT));
    float* dstate_sum = plan.sums.take(arena, a.state_in_shared ? a.dstate_in : nullptr, most, a.H * a.N * a.V,
                                       packed_rows(plan.sequences, 0));
    plan.states = pass_of<false>(a, choice, cut, S);
    plan.gradients = pass_of<true>(a, choice, cut, G);
    plan.gradients.params().state_out = a.state_in_shared ? dstate_sum : a.dstate_in;
    if (on_tensor_cores) {
        TensorParams& t = plan.gradients.tensor;
        BackwardParams& p = plan.chunks;
        p = tensor_chunks_of(a);
        plan.blocks =
            most_blocks(plan.sequences, chunks, chunk_slots(sensible(plan.sequences), CHECKPOINT) * a.B * a.H, device);
        plan.slice = slice_channels(a.dtype, device);
        if (G_in_outputs && a.N == 128) {
            t.G_rows[0] = {a.dk, a.dk_stride}, t.G_rows[1] = {a.dv, a.dv_stride};
        } else if (G_in_outputs) {
            t.G_rows[0] = {a.dv, a.dv_stride};
        }
        /* Parts of a row of G, one for each warp of the reverse state pass. */
        const int64_t parts = a.N / StatesTraits<bf16, bf16, 64>::COLUMNS;
        if (a.dtype == GT_BF16) p.rowsums = arena.take<float>(chunks * REVERSE_SUMS * parts * a.N);
        if (a.dtype == GT_F16) t.G_inverse = arena.take<float>(chunks * parts * a.N);
        if (a.dw && p.rowsums) t.S = S, t.rowsums = const_cast<float*>(p.rowsums);
        t.S_copies = a.N < 128 || plan.slice >= 64 ? 2 : 1;
        t.S_starts_zero = !a.state_in;
        t.last_apart = p.last_first = choice.last_first;
        p.S_checkpoints = S, p.G_checkpoints = G;
        p.G_in_outputs = G_in_outputs;
        p.G_inverse = t.G_inverse;
        p.du = du;
    }
    ChunkParams& c = plan.any;
    c = any_chunks_of(a);
    if (!on_tensor_cores) {
        plan.blocks = chunks < 2 * device.multiprocessors ? chunks : 2 * device.multiprocessors;
        c.scratch = arena.take<float>(plan.blocks * c.scratch_size);
        c.S_checkpoints = S, c.G_checkpoints = G;
        c.S_dtype = S_dtype, c.G_dtype = G_dtype;
        c.du = du;
    }
    add_output(plan.unused, a.dr, a.dr_stride, a.dtype, a.H, a.N);
    add_output(plan.unused, a.dk, a.dk_stride, a.dtype, a.H, a.N);
    add_output(plan.unused, a.dw, a.dw_stride, a.w_dtype, a.H, a.N);
    add_output(plan.unused, a.dv, a.dv_stride, a.dtype, a.H, a.V);
    plan.unused.sums = {du, a.H * a.N, CHECKPOINT};
    plan.bytes = arena.bytes(), plan.saved = saved.bytes();
    return plan;
}

} /* namespace wkv6 */
} /* namespace gt */

#endif
