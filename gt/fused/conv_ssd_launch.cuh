/* gt/fused/conv_ssd_launch.cuh - conv_ssd on the current GPU: which kernels, and where the convolved rows lie.
 *
 * c, the convolved rows [B,T,D] in dtype, is scratch of one call: forward makes it by conv1d's kernels and ssd's read
 * it, but where conv_ssd_sm90.cuh takes the call, and no c is made; backward makes it again, then ssd's backward writes
 * its gradient dc beside it, which conv1d's takes.  Sums and states are those of the two operators, and so is their
 * determinism.
 *
 *     bytes of a row, 16-bit      forward, by two calls                backward
 *     conv1d                      2 D read, 2 D written                twice that, and 2 D read, 2 D read, 2 D written
 *     ssd                         its own, with D - 2 G N of x         its own
 *     kept from forward           what ssd saves: states every 128 tokens.  Two calls keep c, 2 D, beside it */
#ifndef GT_FUSED_CONV_SSD_LAUNCH_CUH
#define GT_FUSED_CONV_SSD_LAUNCH_CUH

#include "../base/launch.cuh"
#include "../conv1d/state.cuh"
#include "../recurrence/stages.cuh"
#include "conv_ssd.h"
#include "conv_ssd_backward_sm90.cuh"

namespace gt {
namespace conv_ssd {

constexpr int64_t MOST = 256; /* of P and N: what ssd's kernels take */

static inline int64_t size_of(gt_dtype dtype) { return dtype == GT_F32 ? 4 : 2; }

/* Prepares the arguments and checks what only the GPU limits. */
static inline gt_status prepare(gt_pass pass, const gt_conv_ssd_args* args, gt_conv_ssd_args* a, Device* device) {
    gt_dims dims;
    const gt_status status = gt_prepare(gt_op_conv_ssd(), pass, GT_DEVICE, args, a, &dims);
    if (status != GT_OK) return status;
    if (a->B == 0) { /* neither tokens nor states, of packed sequences either */
        a->seq_capacity = 0;
        a->cu_seqlens = a->seq_count = nullptr;
    }
    if (a->P > MOST) return gt_fail(GT_ERROR_UNSUPPORTED, "P = %lld: at most %d", (long long)a->P, (int)MOST);
    if (a->N > MOST) return gt_fail(GT_ERROR_UNSUPPORTED, "N = %lld: at most %d", (long long)a->N, (int)MOST);
    return current_device(device);
}

/* ---- forward on compute capability 9.0: see conv_ssd_sm90.cuh ---------------------------------------------------- */

/* Columns of its kernels; 0: they do not take N. */
static inline int convolving_columns(int64_t N) {
    return N % 16 || N < 32 ? 0 : N <= 64 ? 64 : N <= SLAB ? SLAB : N <= 2 * SLAB ? 2 * SLAB : 0;
}

/* Chunks that there may be. */
static inline int64_t chunk_rows(const Sequences& q) { return q.B * chunk_slots(q, CHECKPOINT) * 2; }

/* Bytes of its scratch: tiles of B and C, and what undoes their powers. */
static inline int64_t convolving_bytes(const gt_conv_ssd_args& a) {
    Arena arena(nullptr);
    const int64_t tiles = chunk_rows(sequences_of(a)) * a.G * 2;
    arena.take<f16>(tiles * CHUNK * convolving_columns(a.N));
    arena.take<float>(tiles * CHUNK);
    return (int64_t)arena.bytes();
}

/* Whether its kernels may take the call, by sizes.  Packed sequences may have far more chunks than tokens would fill;
 * c_bytes: of c, which it must not need more than. */
static inline bool may_convolve(const gt_conv_ssd_args& a, int64_t c_bytes) {
    return c_bytes > 0 && a.dtype == GT_BF16 && convolving_columns(a.N) && a.xBC_stride.h == 1 &&
           convolving_bytes(a) <= c_bytes;
}

/* What the stages of ssd are run with. */
struct Convolving {
    const gt_conv1d_args* conv;
    void* scratch;
    gt_stream stream;
    bool* takes; /* not NULL: it is asked whether the kernels take the call, and nothing is launched */
};

template <int NP, int UNITS>
static gt_status launch_convolving(const ConvolvingParams& all, const Device& device, Chain& chain) {
    using Group = GroupTile<bf16, NP>;
    ConvolvingParams p = all;
    gt_status status = run("conv_ssd groups_kernel", groups_kernel<bf16, NP>, p.rows * p.in.G * 2, Group::THREADS,
                           Group::BYTES, chain, p);
    if (status != GT_OK) return status;
    const auto with = [&](auto gate) {
        constexpr int GATE = decltype(gate)::value;
        using Tile = HopperTile<bf16, NP, UNITS, GATE, true>;
        const int64_t blocks = take_bundles(p.in, UNITS, strands_of_units(p.in, UNITS, 1, device));
        return run("conv_ssd forward_kernel", forward_kernel<bf16, NP, UNITS, GATE>, blocks, Tile::THREADS, Tile::BYTES,
                   chain, p);
    };
    if (p.in.z) return with(std::integral_constant<int, GATED>());
    constexpr int WITHOUT_Z = UNITS == 2 && NP <= SLAB ? GATED : UNGATED; /* as in ssd */
    return with(std::integral_constant<int, WITHOUT_Z>());
}

template <int NP>
static gt_status launch_units(const ConvolvingParams& p, int units, const Device& device, Chain& chain) {
    return units == 4 ? launch_convolving<NP, 4>(p, device, chain) : launch_convolving<NP, 2>(p, device, chain);
}

/* Given ssd's plan of the call, whose x, B and C are not yet convolved. */
static inline bool takes_plan(const ForwardPlan& plan) {
    static Answers known = {};
    void (*const kernel)(ConvolvingParams) = forward_kernel<bf16, 64, 2, GATED>;
    using Tile = HopperTile<bf16, 64, 2, GATED, true>;
    const Problem& in = plan.tensor.in;
    return plan.on_tensor_cores && plan.units >= 2 && in.segments.count == 1 && has_rows(in.x, in.x_stride, in) &&
           (!in.z || has_rows(in.z, in.z_stride, in)) &&
           has_sm90a(reinterpret_cast<const void*>(kernel), Tile::THREADS, known);
}

static inline gt_status convolve(const Stages& stages, const void* context) {
    const Convolving& me = *static_cast<const Convolving*>(context);
    const ForwardPlan& plan = *static_cast<const ForwardPlan*>(stages.plan);
    if (me.takes) {
        *me.takes = takes_plan(plan);
        return GT_OK;
    }
    ConvolvingParams p = {};
    static_cast<TensorParams&>(p) = plan.tensor;
    p.in.columns = p.in.N;
    p.conv = conv1d::problem_of(*me.conv);
    const bool has_maps =
        map_rows(&p.x_map, p.in.x, p.in.x_stride, p.in) && (!p.in.z || map_rows(&p.z_map, p.in.z, p.in.z_stride, p.in));
    gt_status status = has_maps ? map_outputs(p) : report(cudaErrorInvalidValue, "conv_ssd cuTensorMapEncodeTiled");
    if (status != GT_OK) return status;
    if (!p.in.z) p.z_map = p.x_map; /* not read */
    const int columns = convolving_columns(p.in.N);
    Arena scratch(me.scratch);
    p.rows = chunk_rows(p.in.sequences);
    p.groups = scratch.take<f16>(p.rows * p.in.G * 2 * CHUNK * columns);
    p.inverses = scratch.take<float>(p.rows * p.in.G * 2 * CHUNK);
    Chain chain = {me.stream};
    if ((status = stages.run(stages, Stage::CLEAR, chain)) != GT_OK) return status;
    if (columns == 2 * SLAB)
        status = launch_convolving<2 * SLAB, 2>(p, *stages.device, chain);
    else if (columns == SLAB)
        status = launch_units<SLAB>(p, plan.units, *stages.device, chain);
    else
        status = launch_units<64>(p, plan.units, *stages.device, chain);
    if (status != GT_OK || !me.conv->state_out) return status;
    return conv1d::launch_state<bf16>(*me.conv, *stages.device, me.stream); /* last: it may overwrite state_in */
}

/* ---- backward on compute capability 9.0: see conv_ssd_backward_sm90.cuh ------------------------------------------ */

/* Whether its kernels may take the call, by sizes and what is asked for. */
static inline bool may_convolve_backward(const gt_conv_ssd_args& a) {
    return a.B > 0 && a.T > 0 && a.dtype == GT_BF16 && !a.seq_capacity && a.N >= 32 && a.N <= SLAB && a.N % 16 == 0 &&
           a.saved && !(a.z && a.dz) && a.dxBC && a.xBC_stride.h == 1 && a.T <= INT32_MAX;
}

static inline bool takes_backward_plan(const HopperChunks& plan) {
    const Problem& in = plan.tokens.chunk.in;
    return plan.is_taken && !plan.reads_rows && !in.dy_inverses && has_rows(in.x, in.x_stride, in) &&
           has_rows(in.dy, in.dy_stride, in);
}

template <int N>
static gt_status launch_gradient(const GradientParams& p, int64_t blocks, Chain& chain) {
    using C = HopperGradientTraits<bf16, N, false, true>;
    return run("conv_ssd gradient_kernel", gradient_kernel<bf16, N>, blocks, C::THREADS, C::SMEM, chain, p);
}

/* ssd's stages, with x not convolved, and B and C of scratch. */
static inline gt_status convolve_backward(const Stages& stages, const void* context) {
    const Convolving& me = *static_cast<const Convolving*>(context);
    const HopperChunks& plan = *static_cast<const HopperChunks*>(stages.plan);
    if (me.takes) {
        *me.takes = takes_backward_plan(plan);
        return GT_OK;
    }
    const TokenParams& tokens = plan.tokens;
    const Problem& in = tokens.chunk.in;
    const Device& device = *stages.device;
    ColumnsParams columns = {conv1d::problem_of(*me.conv), me.scratch, in.H * in.P, (int)(2 * in.G * in.N)};
    const int64_t pieces = (in.sequences.T + COLUMN_TOKENS - 1) / COLUMN_TOKENS, parts = (columns.columns / 2 + 127) / 128;
    gt_status status =
        run("conv_ssd columns_kernel", columns_kernel<bf16>, in.sequences.B * pieces * parts, 128, 0, me.stream, columns);
    /* a chain of its own: its first kernel reads C without waiting for one before it */
    Chain chain = {me.stream};
    for (const Stage stage : {Stage::CLEAR, Stage::GRADIENTS})
        if (status == GT_OK) status = stages.run(stages, stage, chain);
    ChunkGradientParams chunk = tokens.chunk;
    chunk.in.columns = in.N;
    GradientParams p;
    int64_t blocks = 0;
    if (status == GT_OK) status = plan_hopper_chunks(chunk, tokens, 0, device, &p, &blocks);
    if (status == GT_OK && blocks && !p.has_rows) status = report(cudaErrorInvalidValue, "conv_ssd cuTensorMapEncodeTiled");
    if (status != GT_OK) return status;
    p.conv = columns.conv;
    const int64_t by_token = token_blocks(tokens, device);
    status = run("ssd chunk_factors_kernel", chunk_factors_kernel, by_token, 32 * TOKEN_WARPS,
                 TOKEN_WARPS * 4 * ChunkTokens::COUNT, chain, tokens);
    if (status == GT_OK)
        status = in.N <= 64 ? launch_gradient<64>(p, blocks, chain) : launch_gradient<SLAB>(p, blocks, chain);
    if (status == GT_OK)
        status = run("ssd chunk_times_kernel", chunk_times_kernel, by_token, 32 * TOKEN_WARPS, 0, chain, tokens);
    return status != GT_OK ? status : reduce_rows(*stages.sums, stages.accumulate, chain);
}

/* ---- which kernels ------------------------------------------------------------------------------------------------- */

/* Addresses for what is not there yet: outputs, which must overlap nothing. */
static inline char* far_away(int number) { return reinterpret_cast<char*>((uintptr_t)(number + 1) << 56); }

/* Whether the kernels of a pass take a call, perhaps a query's: pointers that are still NULL count as aligned. */
static inline bool takes_convolving(gt_pass pass, const gt_ssd_args& unconvolved) {
    gt_ssd_args a = unconvolved;
    bool takes = false;
    const Convolving question = {nullptr, nullptr, nullptr, &takes};
    const StagesUser user = {pass == GT_FORWARD ? convolve : convolve_backward, &question};
    const void* const any = reinterpret_cast<const void*>((uintptr_t)256);
    for (const void** pointer : {&a.x, &a.dt, &a.Bm, &a.Cm})
        if (!*pointer) *pointer = any;
    if (!a.A) a.A = static_cast<const float*>(any);
    if (pass == GT_FORWARD && !a.y) a.y = far_away(0);
    if (pass == GT_BACKWARD && !a.dy) a.dy = any;
    a.workspace = const_cast<void*>(any), a.workspace_bytes = a.saved_bytes = SIZE_MAX / 2;
    return gt_ssd_stages(pass, &a, &user) == GT_OK && takes;
}

/* ---- the two calls ------------------------------------------------------------------------------------------------- */

/* The two calls of a pass, and the pieces of its workspace. */
struct Plan {
    gt_conv1d_args conv;
    gt_ssd_args ssd;
    bool convolves;    /* without c: see convolve() and convolve_backward() */
    void* scratch;     /* c, or what those kernels take */
    bool has_channels; /* without tokens those that nothing lies in may be more than conv1d takes */
    size_t saved, bytes;
};

/* ssd's call with x, B and C where they are before the convolution. */
static inline gt_ssd_args unconvolved(const gt_conv_ssd_args& a, char* dc) {
    gt_ssd_args s = gt_conv_ssd_ssd(&a, a.xBC, dc, size_of(a.dtype));
    s.x_stride.b = s.Bm_stride.b = s.Cm_stride.b = a.xBC_stride.b;
    s.x_stride.t = s.Bm_stride.t = s.Cm_stride.t = a.xBC_stride.t;
    return s;
}

/* The same, but B and C are the convolved ones, [B][T][2 G N]. */
static inline gt_ssd_args unconvolved_x(const gt_conv_ssd_args& a, void* columns, char* dc) {
    gt_ssd_args s = unconvolved(a, dc);
    const int64_t row = 2 * a.G * a.N;
    s.Bm_stride = s.Cm_stride = {a.T * row, row, a.N};
    s.Bm = columns, s.Cm = static_cast<char*>(columns) + a.G * a.N * size_of(a.dtype);
    return s;
}

/* c, dc, and behind them what either call needs: they follow one another.  If there is no workspace, any address will
 * do to ask for sizes. */
static inline gt_status plan_call(const gt_conv_ssd_args& a, gt_pass pass, Plan* plan) {
    Arena arena(a.workspace ? a.workspace : reinterpret_cast<void*>((uintptr_t)256));
    const bool is_backward = pass == GT_BACKWARD, has_tokens = a.B > 0 && a.T > 0;
    const int64_t bytes = has_tokens ? a.B * a.T * gt_conv_ssd_channels(&a) * size_of(a.dtype) : 0;
    plan->convolves =
        is_backward ? may_convolve_backward(a) && takes_convolving(pass, unconvolved_x(a, far_away(0), far_away(1)))
                    : may_convolve(a, bytes) && takes_convolving(pass, unconvolved(a, nullptr));
    gt_enter(GT_DEVICE, "conv_ssd", pass); /* messages name this call again */
    const int64_t scratch_bytes = !plan->convolves ? bytes
                                  : is_backward    ? a.B * a.T * 2 * a.G * a.N * size_of(a.dtype)
                                                   : convolving_bytes(a);
    plan->scratch = has_tokens ? arena.take<char>(scratch_bytes) : nullptr;
    void* const c = plan->convolves ? nullptr : plan->scratch;
    char* const dc = has_tokens && is_backward && gt_conv_ssd_wants_dc(&a) ? arena.take<char>(bytes) : nullptr;
    gt_workspace of_ssd = {}, of_conv = {};
    plan->conv = gt_conv_ssd_conv(&a, c, dc);
    plan->ssd = !plan->convolves ? gt_conv_ssd_ssd(&a, c, dc, size_of(a.dtype))
                : is_backward    ? unconvolved_x(a, plan->scratch, dc)
                                 : unconvolved(a, nullptr);
    plan->has_channels = has_tokens || gt_conv_ssd_channels(&a) <= GT_MAX_SIZE;
    gt_status status = gt_ssd_workspace(&plan->ssd, &of_ssd);
    if (status == GT_OK && plan->has_channels) status = gt_conv1d_workspace(&plan->conv, &of_conv);
    if (status != GT_OK) return status;
    gt_enter(GT_DEVICE, "conv_ssd", pass);
    const size_t for_ssd = is_backward ? of_ssd.backward : of_ssd.forward;
    const size_t for_conv = is_backward ? of_conv.backward : of_conv.forward;
    const size_t most = for_ssd > for_conv ? for_ssd : for_conv;
    plan->ssd.workspace = plan->conv.workspace = most ? arena.take<char>((int64_t)most) : nullptr;
    plan->ssd.workspace_bytes = plan->conv.workspace_bytes = most;
    plan->saved = of_ssd.saved;
    plan->bytes = arena.bytes();
    return GT_OK;
}

static inline gt_status begin(gt_pass pass, const gt_conv_ssd_args* args, Plan* plan) {
    gt_conv_ssd_args a;
    Device device;
    gt_status status = prepare(pass, args, &a, &device);
    if (status == GT_OK) status = plan_call(a, pass, plan);
    if (status == GT_OK) status = check_saved(a.saved, a.saved_bytes, plan->saved);
    return status != GT_OK ? status : check_workspace(a.workspace, a.workspace_bytes, plan->bytes);
}

static inline gt_status forward(const gt_conv_ssd_args* args, gt_stream stream) {
    Plan plan = {};
    gt_status status = begin(GT_FORWARD, args, &plan);
    if (status != GT_OK) return status;
    if (plan.convolves) {
        const Convolving convolving = {&plan.conv, plan.scratch, stream, nullptr};
        const StagesUser user = {convolve, &convolving};
        return gt_ssd_stages(GT_FORWARD, &plan.ssd, &user);
    }
    if (plan.has_channels) status = gt_conv1d_forward(&plan.conv, stream);
    return status != GT_OK ? status : gt_ssd_forward(&plan.ssd, stream);
}

static inline gt_status backward(const gt_conv_ssd_args* args, gt_stream stream) {
    Plan plan = {};
    gt_status status = begin(GT_BACKWARD, args, &plan);
    if (status != GT_OK) return status;
    if (plan.convolves) {
        const Convolving convolving = {&plan.conv, plan.scratch, stream, nullptr};
        const StagesUser user = {convolve_backward, &convolving};
        status = gt_ssd_stages(GT_BACKWARD, &plan.ssd, &user);
    } else {
        gt_conv1d_args again = plan.conv;
        again.state_out = nullptr;
        if (again.y) status = gt_conv1d_forward(&again, stream);
        if (status == GT_OK) status = gt_ssd_backward(&plan.ssd, stream);
    }
    const bool is_wanted = plan.conv.dy || !plan.conv.y; /* without tokens there are states and zeros */
    return status == GT_OK && plan.has_channels && is_wanted ? gt_conv1d_backward(&plan.conv, stream) : status;
}

static inline gt_status workspace(const gt_conv_ssd_args* args, gt_workspace* need) {
    gt_conv_ssd_args a;
    Device device;
    Plan of_forward = {}, of_backward = {};
    gt_status status = prepare(GT_QUERY, args, &a, &device);
    if (status != GT_OK) return status;
    if (!need) return gt_fail(GT_ERROR_NULL, "need is NULL");
    gt_workspace sizes = {0, 0, 0, 0, 0};
    a.workspace = nullptr;
    if ((status = plan_call(a, GT_FORWARD, &of_forward)) != GT_OK ||
        (status = plan_call(a, GT_BACKWARD, &of_backward)) != GT_OK)
        return status;
    sizes.forward = of_forward.bytes;
    sizes.backward = of_backward.bytes;
    sizes.saved = of_forward.saved;
    *need = sizes;
    return GT_OK;
}

} /* namespace conv_ssd */
} /* namespace gt */

#endif
