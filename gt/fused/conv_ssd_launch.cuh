/* gt/fused/conv_ssd_launch.cuh - conv_ssd on the current GPU: which kernels run, and where the convolved rows lie.
 *
 * c, the convolved rows [B,T,D] in dtype, is scratch of one call.  In forward conv1d's kernels write c and ssd's read
 * it; the kernels of conv_ssd_sm90.cuh need no c.  Backward computes c again.  Then ssd's backward writes the gradient
 * dc beside c, and conv1d's backward reads dc.  The two operators compute all sums and states, so conv_ssd is as
 * deterministic as they are.
 *
 *     bytes of a row, 16-bit      forward, by two calls      backward
 *     conv1d                      2 D read, 2 D written      again 2 D read (xBC), 2 D written (c); then 4 D read (xBC,
 *                                                            dc), 2 D written (dxBC)
 *     ssd                         as gt_ssd_forward          as gt_ssd_backward
 *     kept from forward           only `saved` of ssd, a state every 128 tokens.  A caller of the two operators would
 *                                 also have to keep c, 2 D bytes */
#ifndef GT_FUSED_CONV_SSD_LAUNCH_CUH
#define GT_FUSED_CONV_SSD_LAUNCH_CUH

#include "../base/launch.cuh"
#include "../conv1d/state.cuh"
#include "../recurrence/small_states.cuh"
#include "../recurrence/stages.cuh"
#include "conv_ssd.h"
#include "conv_ssd_sm90.cuh"
#include "conv_ssd_step.cuh"

namespace gt {
namespace conv_ssd {

constexpr int64_t MOST = 256; /* the largest P and N of ssd's kernels */

static inline int64_t size_of(gt_dtype dtype) { return dtype == GT_F32 ? 4 : 2; }

/* Checks the arguments and the limits of the kernels, and fills in defaults. */
static inline gt_status prepare(gt_pass pass, const gt_conv_ssd_args* args, gt_conv_ssd_args* a, Device* device) {
    gt_dims dims;
    const gt_status status = gt_prepare(gt_op_conv_ssd(), pass, GT_DEVICE, args, a, &dims);
    if (status != GT_OK) return status;
    if (a->B == 0) { /* neither tokens nor states, not even of packed sequences */
        a->seq_capacity = a->slot_capacity = 0;
        a->cu_seqlens = a->seq_count = a->slots = a->starts_zero = nullptr;
    }
    if (a->P > MOST) return gt_fail(GT_ERROR_UNSUPPORTED, "P = %lld: at most %d", (long long)a->P, (int)MOST);
    if (a->N > MOST) return gt_fail(GT_ERROR_UNSUPPORTED, "N = %lld: at most %d", (long long)a->N, (int)MOST);
    return current_device(device);
}

/* ---- forward on compute capability 9.0: see conv_ssd_sm90.cuh ---------------------------------------------------- */

/* Number of state columns of the kernels that serve N, or 0 if no kernel serves N. */
static inline int convolving_columns(int64_t N) {
    return N % 16 || N < 32 ? 0 : N <= 64 ? 64 : N <= SLAB ? SLAB : N <= 2 * SLAB ? 2 * SLAB : 0;
}

/* Bytes of scratch that the kernels need: tiles of B and C in f16, and for each row the inverse of its power of two. */
static inline int64_t convolving_bytes(const gt_conv_ssd_args& a) {
    Arena arena(nullptr);
    take_group_tiles(arena, sequences_of(a), a.G, convolving_columns(a.N));
    return (int64_t)arena.bytes();
}

/* Returns whether dtype and sizes suit the kernels.  Their scratch must not exceed c_bytes, the size of c.  The scratch
 * could be larger, because packed sequences may have many more chunks than their tokens fill. */
static inline bool may_convolve(const gt_conv_ssd_args& a, int64_t c_bytes) {
    return c_bytes > 0 && a.dtype == GT_BF16 && BUILT_BF16 && is_built_columns(a.N) && convolving_columns(a.N) &&
           a.xBC_stride.h == 1 && convolving_bytes(a) <= c_bytes;
}

template <int NP, int UNITS>
static gt_status launch_convolving(const ConvolvingParams& all, const Device& device, Chain& chain) {
    using Group = GroupTile<bf16, NP>;
    ConvolvingParams p = all;
    gt_status status = run("conv_ssd groups_kernel", groups_kernel<bf16, NP>, group_tiles(p.in.sequences, p.in.G),
                           Group::THREADS, Group::BYTES, chain, p);
    if (status != GT_OK) return status;
    const auto with = [&](auto gate) {
        constexpr int GATE = decltype(gate)::value;
        using Tile = HopperTile<bf16, NP, UNITS, GATE, CONVOLVED_ROWS>;
        const int64_t blocks = take_bundles(p.in, UNITS, strands_of_units(p.in, UNITS, 1, device));
        return run("conv_ssd forward_kernel", forward_kernel<bf16, NP, UNITS, GATE>, blocks, Tile::THREADS, Tile::BYTES,
                   chain, p);
    };
    if (p.in.z) return with(std::integral_constant<int, GATED>());
    constexpr int WITHOUT_Z = UNITS == 2 && NP <= SLAB ? GATED : UNGATED; /* as in ssd */
    return with(std::integral_constant<int, WITHOUT_Z>());
}

template <int NP>
static gt_status launch_units([[maybe_unused]] const ConvolvingParams& p, [[maybe_unused]] int units,
                              [[maybe_unused]] const Device& device, [[maybe_unused]] Chain& chain) {
    if constexpr (BUILT_BF16 && is_built_columns<(NP > 64 ? NP / 2 : 0), NP>()) {
        if constexpr (NP <= SLAB)
            if (units == 4) return launch_convolving<NP, 4>(p, device, chain);
        return launch_convolving<NP, 2>(p, device, chain);
    }
    return gt_fail(GT_ERROR_UNSUPPORTED, "N = %d: this build has no kernels for it", NP); /* see may_convolve() */
}

/* Returns whether the kernels can run the call that ssd has planned.  x, B and C of the plan are columns of xBC, not
 * yet convolved. */
static inline bool takes_plan(const ForwardPlan& plan, const Device& device) {
    const Problem& in = plan.tensor.in;
    return plan.choice.on_tensor_cores && plan.choice.forward.units && group_units(in) >= 2 && in.segments.count == 1 &&
           has_rows(in.x, in.x_stride, in) && (!in.z || has_rows(in.z, in.z_stride, in)) && device.runs_sm90a;
}

/* Runs forward without c.  scratch: room for the tiles of B and C, or NULL if ssd's workspace has room for them. */
static inline gt_status convolve(const gt_conv1d_args& conv, const PassPlan& ssd, void* scratch, gt_stream stream) {
    const ForwardPlan& plan = ssd.plan<ForwardPlan>();
    ConvolvingParams p = {};
    static_cast<TensorParams&>(p) = plan.tensor;
    p.in.columns = p.in.N;
    p.conv = conv1d::problem_of(conv);
    gt_status status = map_outputs(p, plan.choice.forward.y_by_map);
    if (status == GT_OK) status = map_rows(&p.x_map, p.in.x, p.in.x_stride, p.in);
    p.z_map = p.x_map; /* the kernel reads z_map only if there is z */
    if (status == GT_OK && p.in.z) status = map_rows(&p.z_map, p.in.z, p.in.z_stride, p.in);
    if (status != GT_OK) return status;
    const int columns = convolving_columns(p.in.N), units = plan.choice.forward.units;
    if (scratch) {
        Arena arena(scratch);
        p.groups = take_group_tiles(arena, p.in.sequences, p.in.G, columns);
    }
    Chain chain = {stream};
    if ((status = gt_ssd_run(&ssd, (int)Stage::CLEAR, &chain)) != GT_OK) return status;
    if (columns == 2 * SLAB)
        status = launch_units<2 * SLAB>(p, units, ssd.device, chain);
    else if (columns == SLAB)
        status = launch_units<SLAB>(p, units, ssd.device, chain);
    else
        status = launch_units<64>(p, units, ssd.device, chain);
    if (status != GT_OK ||
        (status = clear_skipped("conv_ssd clear_skipped_kernel", plan.unused, p.in.sequences, ssd.device, chain)) !=
            GT_OK ||
        !conv.state_out)
        return status;
    return conv1d::launch_state<bf16>(conv, ssd.device, stream); /* last, since it may overwrite state_in */
}

/* ---- snapshots --------------------------------------------------------------------------------------------------- */

/* Stores the states of the convolution after every `every` tokens of a sequence: the last W - 1 inputs.
 * grid: at most 16 blocks per multiprocessor.  block: 256.  Blocks take 256 channels of a sequence in turn.
 * bytes: W - 1 tokens of xBC and as many numbers of each snapshot. */
struct InputSnapshotsParams {
    conv1d::Problem conv;
    Snapshots snapshots;  /* `data` is not used */
    void* data;           /* [B,rows][D,W-1], conv.state_dtype */
    int64_t every, count; /* count: the most sequences */
};

GT_KERNEL(256, 2) input_snapshots_kernel(const GT_GRID_CONSTANT InputSnapshotsParams p) {
    const conv1d::Problem& in = p.conv;
    const int64_t tiles = (in.D + 255) / 256;
    for (int64_t item = block_x(); item < p.count * tiles; item += grid_x()) {
        const int64_t s = item / tiles, d = item % tiles * 256 + thread_id();
        if (!sequence_exists(in.sequences, s)) return;
        const conv1d::Extent its = conv1d::extent_of(in.sequences, s);
        for (int64_t done = p.every; d < in.D && done <= its.tokens; done += p.every) {
            const int64_t row = snapshot_number(in.sequences, p.snapshots, s, done), J = in.W - 1;
            for (int64_t i = 0; row >= 0 && i < J; i++)
                store_as(p.data, in.state_dtype, (row * in.D + d) * J + i,
                         load_as(in.x, in.dtype, conv1d::offset_of(in.x_stride, its.b, its.first + done - J + i, d)));
        }
    }
}

static inline gt_status keep_inputs(const gt_conv_ssd_args& a, const gt_conv1d_args& conv, const Device& device,
                                    gt_stream stream) {
    gt_conv_ssd_args of_inputs = a;
    of_inputs.snapshots = a.conv_snapshots;
    const Snapshots snapshots = snapshots_of(of_inputs);
    if (!snapshots.data) return GT_OK;
    const InputSnapshotsParams p = {conv1d::problem_of(conv), snapshots, a.conv_snapshots, a.snapshot_every,
                                    most_sequences(sequences_of(a))};
    const int64_t items = p.count * ((conv.D + 255) / 256), room = 16 * (int64_t)device.multiprocessors;
    return run("conv_ssd input_snapshots_kernel", input_snapshots_kernel, items < room ? items : room, 256, 0, stream,
               p);
}

/* ---- the two calls ----------------------------------------------------------------------------------------------- */

/* The calls of conv1d and ssd that make up a pass, and the pieces of its workspace. */
struct Plan {
    gt_conv1d_args conv;
    gt_ssd_args ssd;
    bool convolves; /* forward runs without c: see convolve() */
    void* scratch;  /* c, or scratch of convolve() */
    /* false: D exceeds the limit of conv1d.  Then the call has neither tokens nor states, and skips conv1d. */
    bool has_channels;
    size_t saved, bytes;
    gt_conv_ssd_args call;                     /* the call's prepared arguments */
    WideSnapshots<gt_conv_ssd_args> snapshots; /* fp32 rows for snapshots of ssd; `states`: for states of ssd */
    WideStates<gt_ssd_args> states;
};

/* Returns arguments of ssd in which x, B and C are columns of xBC, before the convolution. */
static inline gt_ssd_args unconvolved(const gt_conv_ssd_args& a) {
    gt_ssd_args s = gt_conv_ssd_ssd(&a, a.xBC, nullptr, size_of(a.dtype));
    s.x_stride.b = s.Bm_stride.b = s.Cm_stride.b = a.xBC_stride.b;
    s.x_stride.t = s.Bm_stride.t = s.Cm_stride.t = a.xBC_stride.t;
    return s;
}

/* Returns the arguments s, with all fields of states and of their rows copied from `wide`. */
static inline gt_ssd_args with_wide_states(gt_ssd_args s, const gt_ssd_args& wide) {
    s.state_in = wide.state_in, s.state_out = wide.state_out;
    s.state_dtype = wide.state_dtype, s.state_out_stride = wide.state_out_stride;
    s.rounding_seed = wide.rounding_seed, s.rounding_steps = wide.rounding_steps;
    s.slots = wide.slots, s.slot_capacity = wide.slot_capacity;
    return s;
}

/* Plans a pass of ssd as for a size query, and stores the plan in *ssd. */
static inline gt_status ask_ssd(const gt_ssd_args& args, gt_pass pass, PassPlan* ssd) {
    const gt_status status = gt_ssd_plan(pass, true, &args, ssd);
    gt_enter(GT_DEVICE, "conv_ssd", pass); /* messages name conv_ssd again */
    return status;
}

/* Plans the workspace: fp32 rows for snapshots and for states of 16 bits, then c and dc, then room for conv1d or ssd.
 * They run one after the other, so the larger of their needs suffices.  A size query has no workspace, so it computes
 * with an arbitrary address. */
static inline gt_status plan_call(const gt_conv_ssd_args& call, gt_pass pass, const Device& device, Plan* plan) {
    plan->call = call;
    if (pass == GT_FORWARD) {
        plan->snapshots = WideSnapshots<gt_conv_ssd_args>(call, {call.H * call.P, call.N});
    } else { /* a size query may set snapshots and 16-bit states, which backward lacks */
        gt_conv_ssd_args& args = plan->snapshots.args = call;
        args.snapshots = args.conv_snapshots = nullptr;
        args.snapshot_every = 0, args.snapshot_dtype = GT_F32;
        args.state_dtype = args.conv_state_dtype = GT_F32;
        args.rounding_seed = args.rounding_steps = nullptr;
        /* A size query may also set forward's final states, which backward does not use.  Without tokens and without
         * other states, backward has nothing to do. */
        args.conv_state_out = args.state_out = nullptr;
        const bool has_states = args.conv_state_in || args.state_in || args.conv_dstate_in || args.dstate_in ||
                                args.conv_dstate_out || args.dstate_out;
        if (args.T == 0 && !has_states) {
            args.B = args.seq_capacity = 0;
            args.cu_seqlens = args.seq_count = nullptr;
        }
    }
    const gt_conv_ssd_args& a = plan->snapshots.args;
    gt_ssd_args states = gt_conv_ssd_ssd(&a, nullptr, nullptr, 0);
    states.workspace = a.workspace;
    plan->states = WideStates<gt_ssd_args>(states, {a.H * a.P, a.N});
    void* const rest = plan->states.args.workspace;
    Arena arena(rest ? rest : reinterpret_cast<void*>((uintptr_t)256));
    const bool is_backward = pass == GT_BACKWARD, has_tokens = a.B > 0 && a.T > 0;
    const int64_t bytes = has_tokens ? a.B * a.T * gt_conv_ssd_channels(&a) * size_of(a.dtype) : 0;
    PassPlan ssd;
    gt_status status = GT_OK;
    int64_t scratch = bytes;
    plan->convolves = false;
    if (pass == GT_FORWARD && may_convolve(a, bytes)) {
        plan->ssd = with_wide_states(unconvolved(a), plan->states.args);
        if ((status = ask_ssd(plan->ssd, pass, &ssd)) != GT_OK) return status;
        const ForwardPlan& forward = ssd.plan<ForwardPlan>();
        plan->convolves = takes_plan(forward, device);
        if (plan->convolves) { /* otherwise forward.tensor may be empty */
            const bool has_room = has_sizes_of_maps(plan->ssd, forward.tensor.in, forward.choice.forward.units);
            scratch = has_room ? 0 : convolving_bytes(a);
        }
    }
    plan->scratch = scratch ? arena.take<char>(scratch) : nullptr;
    void* const c = plan->convolves ? nullptr : plan->scratch;
    char* const dc = has_tokens && is_backward && gt_conv_ssd_wants_dc(&a) ? arena.take<char>(bytes) : nullptr;
    gt_workspace of_conv = {};
    plan->conv = gt_conv_ssd_conv(&a, c, dc);
    if (!plan->convolves) {
        plan->ssd = with_wide_states(gt_conv_ssd_ssd(&a, c, dc, size_of(a.dtype)), plan->states.args);
        if ((status = ask_ssd(plan->ssd, pass, &ssd)) != GT_OK) return status;
    }
    plan->has_channels = has_tokens || gt_conv_ssd_channels(&a) <= GT_MAX_SIZE;
    if (plan->has_channels) status = gt_conv1d_workspace(&plan->conv, &of_conv);
    gt_enter(GT_DEVICE, "conv_ssd", pass);
    if (status != GT_OK) return status;
    const size_t for_conv = is_backward ? of_conv.backward : of_conv.forward;
    const size_t most = ssd.bytes > for_conv ? ssd.bytes : for_conv;
    plan->ssd.workspace = plan->conv.workspace = most ? arena.take<char>((int64_t)most) : nullptr;
    plan->ssd.workspace_bytes = plan->conv.workspace_bytes = most;
    plan->saved = ssd.saved;
    plan->bytes = arena.bytes() + plan->snapshots.bytes + plan->states.bytes;
    return GT_OK;
}

static inline gt_status begin(gt_pass pass, const gt_conv_ssd_args* args, Plan* plan, Device* device) {
    gt_conv_ssd_args a;
    gt_status status = prepare(pass, args, &a, device);
    if (status == GT_OK) status = plan_call(a, pass, *device, plan);
    if (status == GT_OK) status = check_saved(a.saved, a.saved_bytes, plan->saved);
    return status != GT_OK ? status : check_workspace(a.workspace, a.workspace_bytes, plan->bytes);
}

static inline gt_status forward(const gt_conv_ssd_args* args, gt_stream stream) {
    Plan plan = {};
    Device device;
    gt_status status = begin(GT_FORWARD, args, &plan, &device);
    if (status != GT_OK || (status = plan.states.load(device, stream)) != GT_OK) return status;
    if (plan.convolves) {
        PassPlan ssd;
        status = gt_ssd_plan(GT_FORWARD, false, &plan.ssd, &ssd);
        if (status == GT_OK) status = convolve(plan.conv, ssd, plan.scratch, stream);
    } else {
        if (plan.has_channels) status = gt_conv1d_forward(&plan.conv, stream);
        if (status == GT_OK) status = gt_ssd_forward(&plan.ssd, stream);
    }
    if (status == GT_OK) status = plan.snapshots.store(device, stream);
    if (status == GT_OK) status = plan.states.store(device, stream);
    return status != GT_OK ? status : keep_inputs(plan.call, plan.conv, device, stream);
}

static inline gt_status backward(const gt_conv_ssd_args* args, gt_stream stream) {
    Plan plan = {};
    Device device;
    gt_status status = begin(GT_BACKWARD, args, &plan, &device);
    if (status != GT_OK) return status;
    gt_conv1d_args again = plan.conv;
    again.state_out = nullptr;
    if (again.y) status = gt_conv1d_forward(&again, stream);
    if (status == GT_OK) status = gt_ssd_backward(&plan.ssd, stream);
    const bool is_wanted = plan.conv.dy || !plan.conv.y; /* without tokens y is NULL; states are still written */
    return status == GT_OK && plan.has_channels && is_wanted ? gt_conv1d_backward(&plan.conv, stream) : status;
}

static inline gt_status step(const gt_conv_ssd_args* args, gt_stream stream) {
    gt_conv_ssd_args a;
    Device device;
    const gt_status status = prepare(GT_STEP, args, &a, &device);
    return status != GT_OK ? status : launch_step(a, device, stream);
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
    if ((status = plan_call(a, GT_FORWARD, device, &of_forward)) != GT_OK ||
        (status = plan_call(a, GT_BACKWARD, device, &of_backward)) != GT_OK)
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
