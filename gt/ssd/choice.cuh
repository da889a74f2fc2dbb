/* gt/ssd/choice.cuh - which kernels a call of ssd takes.  choose() decides once, from arguments and device.  The size
 * query, gt_ssd_path and the launches all read the same Choice; nothing after choose() decides again.
 *
 * Three families of kernels can compute a pass:
 *     ANY    any size, any device, fp32 arithmetic
 *     MMA    mma.sync, compute capability 8.0 and later; N is a multiple of 16, P of 8, and rows consist of aligned
 *     16-byte pieces
 *     SM90   wgmma, compute capability 9.0; the same conditions
 * MMA and SM90 have kernels for 16-bit and for fp32 activations.  One call can mix MMA and SM90. */
#ifndef GT_SSD_CHOICE_CUH
#define GT_SSD_CHOICE_CUH

#include "../base/built.cuh"
#include "../base/bulk.cuh"
#include "problem.cuh"

namespace gt {
namespace ssd {

enum class Family { ANY, MMA, SM90 };

/* The kernel of a pass over a segment that computes states only, no outputs. */
struct StatesChoice {
    Family family;
    int units;        /* units per block; a unit is 64 rows of a head's state (mma/state.cuh) */
    int strand_units; /* units per block by which the number of strands is computed */
    int fit;          /* blocks that run on a multiprocessor at once */
};

/* The kernel of forward, or of the pass of backward that computes dz. */
struct ForwardChoice {
    Family family;
    int units;          /* units per block of the SM90 kernel for 16-bit activations; 0: another kernel runs */
    bool by_maps;       /* forward_maps_kernel runs: it loads rows by tensor maps */
    bool y_by_map;      /* SM90 stores y by a tensor map */
    StatesChoice local; /* the local pass before this pass, if there are several segments */
};

struct Choice {
    /* MMA or SM90 kernels exist for these sizes in this build and on this device.  If not, only any_segments and
     * saves_states are set. */
    bool has_tensor_sizes;
    /* The rows of the call are aligned, too.  If not, ANY takes the call, with any_segments segments. */
    bool on_tensor_cores;
    int64_t any_segments, segments;
    bool saves_states; /* forward stores states for backward */
    bool ranks;        /* packed sequences run in order of length, the longest first */
    ForwardChoice forward;

    /* backward */
    StatesChoice states, reverse; /* the passes that make checkpoints of h, and of its gradient G */
    ForwardChoice gate;           /* the pass that makes dz */
    Family chunks;                /* the kernel for the gradients of chunks */
    int chunk_stages;             /* MMA: stages of its loads, for launches of at least 64 columns */
    bool chunks_by_map;           /* SM90 loads x and dy by tensor maps */
    bool gates_rows;              /* a first kernel makes g = dy silu(z), which replaces dy: sm90/gate.cuh */
    bool gates_in_dx;             /* g lies in the memory of dx until dx overwrites it; a first chunk reads g of the
                                   * second, so one block must take both chunks of a slot */
    bool gates_by_y;              /* the kernel that makes g also makes dz, from y */
};

/* ---- tensors ----------------------------------------------------------------------------------------------------- */

/* Whether every row is aligned to 16 bytes, or data is NULL. */
static inline bool has_pieces(const gt_ssd_args& a, const void* data, const gt_stride& stride) {
    const int piece = a.dtype == GT_F32 ? 4 : 8;
    return !data ||
           ((uintptr_t)data % 16 == 0 && stride.b % piece == 0 && stride.t % piece == 0 && stride.h % piece == 0);
}

/* Whether a state is aligned to two floats, since the kernels read and write two numbers at a time. */
static inline bool has_pairs(const float* state) { return (uintptr_t)state % 8 == 0; }

/* has_pairs() for rows of a pool of states. */
static inline bool has_paired_rows(const gt_ssd_args& a) { return !a.slots || a.state_out_stride % 2 == 0; }

/* has_pairs() for snapshots.  Kernels store them in fp32. */
static inline bool has_paired_snapshots(const gt_ssd_args& a) {
    return a.snapshot_every == 0 || a.snapshot_dtype > GT_F32 || has_pairs(static_cast<const float*>(a.snapshots));
}

static inline bool has_whole_rows(const gt_ssd_args& a) {
    return has_pieces(a, a.x, a.x_stride) && has_pieces(a, a.Bm, a.Bm_stride) && has_pieces(a, a.Cm, a.Cm_stride) &&
           has_pieces(a, a.z, a.z_stride) && has_pieces(a, a.y, a.y_stride) && has_pieces(a, a.dy, a.dy_stride) &&
           has_pieces(a, a.dx, a.dx_stride) && has_pieces(a, a.dz, a.dz_stride) && has_pieces(a, a.dBm, a.dBm_stride) &&
           has_pieces(a, a.dCm, a.dCm_stride) && has_pairs(a.state_in) && has_pairs(a.state_out) &&
           has_pairs(a.dstate_in) && has_pairs(a.dstate_out) && has_paired_rows(a) && has_paired_snapshots(a);
}

/* The shape of a tensor map of x, y, z, dy or dz.  A box has 64 tokens by 64 rows p of a head. */
static inline TensorShape rows_shape(const gt_stride& stride, const Problem& in) {
    const int64_t T = in.sequences.T, B = in.sequences.B;
    return {{in.H * in.P, T, B}, {stride.t, B > 1 ? stride.b : stride.t}, {TILE_P, CHUNK, 1}, true};
}

/* Whether a tensor can have a map of rows_shape().  NULL counts as aligned, because a query may lack tensors. */
static inline bool has_rows(const void* data, const gt_stride& stride, const Problem& in) {
    return in.P % TILE_P == 0 && (stride.h == in.P || in.H == 1) && in.sequences.T <= INT32_MAX &&
           in.H * in.P <= INT32_MAX && is_tensor(static_cast<const f16*>(data), rows_shape(stride, in));
}

/* Whether the call has too many slots for MMA and SM90, counted over heads and over tiles of 64 rows.  These kernels
 * index slots and quarters of slots by int. */
static inline bool has_too_many_slots(const gt_ssd_args& a) {
    return gt_times(checkpoint_slots(a), (a.P + TILE_P - 1) / TILE_P) >= INT32_MAX / 8;
}

/* ---- blocks and segments ----------------------------------------------------------------------------------------- */

/* The number of strands for blocks of `units` units.  A strand has one block for each bundle of units in each group;
 * the strands share the segments.  fit: blocks that run on a multiprocessor at once. */
static inline int64_t strands_of_units(const Problem& in, int units, int fit, const Device& device) {
    return strands(most_sequences(in.sequences) * in.segments.count, in.G * group_bundles(in, units),
                   grid_room(in.sequences, 8 * fit, device));
}

static inline int64_t strands_of(const Problem& in, const StatesChoice& states, const Device& device) {
    return strands_of_units(in, states.strand_units, states.fit, device);
}

/* ANY: the number of segments per sequence that gives every multiprocessor three blocks. */
static inline int64_t segments_of_any(const gt_ssd_args& a, const Device& device) {
    const int64_t tiles = (a.P + TILE_P - 1) / TILE_P;
    return choose_segments(sequences_of(a), a.segments, a.H * tiles, 3 * (int64_t)device.multiprocessors,
                           4 * CHECKPOINT, CHECKPOINT);
}

/* MMA and SM90: the number of segments per sequence that gives every multiprocessor `fit` blocks of `units` units. */
static inline int64_t segments_of_units(const gt_ssd_args& a, const Problem& in, int units, int fit,
                                        const Device& device) {
    return choose_segments(sequences_of(a), a.segments, a.G * group_bundles(in, units),
                           fit * (int64_t)device.multiprocessors, 2 * CHECKPOINT, CHECKPOINT);
}

/* Units per block of the SM90 kernel for passes over states, with 16-bit activations:
 *     1    if a group has one unit
 *     2    in any of four cases:
 *          1. A group has two units.
 *          2. Blocks of 2 fill more than three quarters of the multiprocessors in one round, so no segments are needed.
 *          3. Blocks of 4 fill at most three quarters, and sequences are too short to cut.
 *          4. Segments would be short.  Storing, joining and loading their states would take longer than reading B and
 *             C for twice as many blocks.
 *     4    otherwise */
static inline int units_of_states(const gt_ssd_args& a, const Problem& in, const Device& device) {
    const int64_t units = group_units(in), room = device.multiprocessors;
    if (units == 1) return 1;
    const int64_t sequences = most_sequences(in.sequences) * a.G;
    const int64_t with_4 = sequences * ((units + 3) / 4), with_2 = sequences * ((units + 1) / 2);
    if (a.T > 2 * CHECKPOINT && with_4 <= 2 * CHECKPOINT * room / a.T) return 2;
    if (with_2 <= room && 4 * with_2 > 3 * room) return 2;
    return units > 2 && (with_2 > room || 4 * with_4 > 3 * room || a.T > 2 * CHECKPOINT) ? 4 : 2;
}

/* Units per block of the SM90 forward kernel when it makes dz, with 16-bit activations.  0: MMA makes dz.  With more
 * than SLAB columns a block has at most two units, because a warpgroup holds only one. */
static inline int units_of_gate(const gt_ssd_args& a, int states) { return states == 1 ? 0 : a.N <= SLAB ? states : 2; }

/* Units per block of the SM90 forward kernel, with 16-bit activations.  0: MMA takes the call.  Short sequences of few
 * heads get two blocks of one unit instead of one block of two units.  The two blocks take no longer, and the previous
 * kernel makes room for a small block earlier.  This is limited to N from 17 to 64: there both kinds of blocks multiply
 * 64 columns, so results have the same bits. */
static inline int units_of_forward(const gt_ssd_args& a, int states) {
    if (states == 2 && a.N > 16 && a.N <= 64 && a.T <= 2 * CHECKPOINT) return 1;
    return a.N <= SLAB ? states : states >= 2 ? 2 : 0;
}

/* ---- passes ------------------------------------------------------------------------------------------------------ */

/* Chooses the kernel of a pass over states.  units: units per block for 16-bit activations on SM90, or 0.  If units is
 * 0, SM90 takes fp32 calls with is_split, and MMA takes all other calls.  in.segments.count must be set. */
static inline StatesChoice choose_states(const Problem& in, int units, bool is_split, const Device& device) {
    if (units) return {Family::SM90, units, units, units == 1 ? 2 : 1};
    StatesChoice c = {Family::MMA, 2, 2, 2};
    if (!is_split) return c;
    /* Each multiprocessor runs one block at a time.  So if there are more blocks of 2 units than multiprocessors,
     * blocks take 4 units. */
    const int64_t blocks = strands_of(in, c, device) * in.G * group_bundles(in, 2);
    c.family = Family::SM90;
    c.units = group_units(in) > 2 && blocks > device.multiprocessors ? 4 : 2;
    return c;
}

/* Whether forward_maps_kernel may take a call of these sizes.  One more kernel first converts B and C, so enough heads
 * must share them.  Packed sequences are excluded, because a box of rows could cover two sequences. */
static inline bool has_sizes_of_maps(const gt_ssd_args& a, const Problem& in, int units) {
    return units == 4 && a.N > SLAB / 2 && a.N <= SLAB && a.P % TILE_P == 0 && a.seq_capacity == 0 &&
           group_units(in) >= (a.z ? 16 : 48);
}

/* Whether blocks that take both chunks of a slot finish as early as blocks that take one chunk. */
static inline bool go_in_twos(const Problem& in, const Device& device) {
    const int64_t slots = chunk_slots(in.sequences, CHECKPOINT);
    const int64_t pairs = in.sequences.B * slots * in.G, room = device.multiprocessors;
    return 2 * ((pairs + room - 1) / room) <= (2 * pairs + room - 1) / room;
}

/* Makes all choices for MMA and SM90.  c->has_tensor_sizes must be true. */
static inline void choose_on_tensor_cores(const gt_ssd_args& a, gt_pass pass, Problem in, const Device& device,
                                          Choice* c) {
    const bool is_fp32 = a.dtype == GT_F32, has_sm90 = device.runs_sm90a, is_sm90 = has_sm90 && !is_fp32;
    /* fp32 runs on SM90 except in two cases.  If a group has one unit, half of a block would be idle.  If N <= 16, the
     * kernel would multiply 64 columns. */
    const bool is_split = has_sm90 && is_fp32 && in.N > 16 && group_units(in) >= 2;
    const int units = is_sm90 ? units_of_states(a, in, device) : 0;
    ForwardChoice& f = c->forward;
    f.units = is_sm90 ? units_of_forward(a, units) : 0;
    const int leading = pass == GT_FORWARD ? f.units : units; /* the first pass of the call decides the number of
                                                               * segments */
    in.segments.count = c->segments = segments_of_units(a, in, leading ? leading : 2, leading > 1 ? 1 : 2, device);
    /* Blocks of four units have no code for snapshots (HopperTile::HAS_SNAPSHOTS).  Segments do not change, so that y
     * has the same bits with and without snapshots. */
    if (a.snapshot_every && f.units == 4) f.units = 2;
    c->ranks = leading && a.seq_capacity > 1;

    f.family = f.units || (is_split && in.N <= SLAB) ? Family::SM90 : Family::MMA;
    f.by_maps =
        has_sizes_of_maps(a, in, f.units) && has_rows(a.x, a.x_stride, in) && (!a.z || has_rows(a.z, a.z_stride, in));
    f.y_by_map = f.units && has_rows(a.y, a.y_stride, in);
    f.local = choose_states(in, f.units ? f.units : units, is_split, device);

    c->states = choose_states(in, units, is_split, device);
    c->reverse = choose_states(in, units, is_split && !a.z, device);
    c->gate = {};
    c->gate.units = is_sm90 ? units_of_gate(a, units) : 0;
    c->gate.family = c->gate.units || (is_split && in.N <= SLAB) ? Family::SM90 : Family::MMA;
    c->gate.local = choose_states(in, c->gate.units ? c->gate.units : units, is_split, device);
    c->gates_rows = is_sm90 && a.z;
    c->gates_in_dx = c->gates_rows && a.dx && go_in_twos(in, device);
    c->gates_by_y = c->gates_rows && a.reads_y && a.dz && a.dtype == GT_BF16;
    const bool has_room = device.shared_bytes >= 227 * 1024;
    c->chunks = has_room && has_sm90 && (!is_fp32 || in.N > 16) ? Family::SM90 : Family::MMA;
    c->chunk_stages = device.shared_bytes >= 163 * 1024 ? 2 : 1;
    const int64_t row = a.H * a.P;
    c->chunks_by_map = has_rows(a.x, a.x_stride, in) && (c->gates_in_dx  ? has_rows(a.dx, a.dx_stride, in)
                                                         : c->gates_rows ? has_rows(nullptr, {a.T * row, row, a.P}, in)
                                                                         : has_rows(a.dy, a.dy_stride, in));
}

static inline Problem problem_of(const gt_ssd_args& a) {
    Problem in = {};
    in.sequences = sequences_of(a, a.state_out_stride);
    in.H = a.H, in.G = a.G;
    in.P = (int)a.P, in.N = (int)a.N;
    in.dtype = a.dtype, in.dt_dtype = a.dt_dtype;
    in.rule = {a.softplus, a.dt_limit, a.dt_min, a.dt_max};
    in.skip_per_channel = a.Dskip_per_channel;
    in.x = a.x, in.dt = a.dt, in.Bm = a.Bm, in.Cm = a.Cm, in.z = a.z, in.dy = a.dy;
    in.A = a.A, in.Dskip = a.Dskip, in.dt_bias = a.dt_bias;
    in.x_stride = a.x_stride, in.dt_stride = a.dt_stride, in.Bm_stride = a.Bm_stride, in.Cm_stride = a.Cm_stride;
    in.z_stride = a.z_stride, in.dy_stride = a.dy_stride;
    in.tiles = ((int)a.P + TILE_P - 1) / TILE_P;
    return in;
}

/* Whether MMA and SM90 support the sizes, and this build has their kernels for the dtype and N. */
static inline bool has_kernels(const gt_ssd_args& a) {
    return has_tensor_sizes(a) && is_built(a.dtype) && is_built_columns(a.N);
}

/* pass: any pass but the step.  a: prepared arguments; NULL pointers count as aligned. */
static inline Choice choose(const gt_ssd_args& a, gt_pass pass, const Device& device) {
    Choice choice = {}, *const c = &choice;
    c->any_segments = segments_of_any(a, device);
    /* saves_states must not depend on the alignment of tensors, because forward and backward must agree on it.  For
     * sequences of one slot, MMA and SM90 need only the caller's states. */
    c->saves_states = a.seq_capacity > 0 || a.T > CHECKPOINT || !has_kernels(a) || device.compute_capability < 80;
    c->has_tensor_sizes =
        has_kernels(a) && !has_too_many_slots(a) && device.compute_capability >= 80 && device.shared_bytes >= 99 * 1024;
    if (!c->has_tensor_sizes) return choice;
    c->on_tensor_cores = has_whole_rows(a);
    choose_on_tensor_cores(a, pass, problem_of(a), device, c);
    return choice;
}

} /* namespace ssd */
} /* namespace gt */

#endif
