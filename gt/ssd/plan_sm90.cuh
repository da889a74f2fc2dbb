/* gt/ssd/plan_sm90.cuh - what a launch of ssd's forward is given, and what kernels for compute capability 9.0 need of the
 * host beside it: tensor maps, and how units are shared among blocks.  No launches: conv_ssd, which has a kernel of its
 * own for the same plan, includes this and not launch.cuh. */
#ifndef GT_SSD_PLAN_SM90_CUH
#define GT_SSD_PLAN_SM90_CUH

#include "forward.cuh"
#include "forward_sm90.cuh"

namespace gt {
namespace ssd {

/* A call's forward or step. */
struct ForwardPlan {
    static constexpr const char* CLEAR = "ssd clear_unused_kernel";
    Sequences sequences;
    ClearParams unused;
    bool on_tensor_cores;
    int units; /* of a block of the kernel for 9.0; 0: another, whose local states have `states` */
    int states;
    TensorParams tensor;
    ForwardParams any;
    size_t bytes, saved;

    gt_status pass(const Device& device, Chain& chain) const; /* launch.cuh */
};

/* ---- blocks ------------------------------------------------------------------------------------------------------ */

/* Blocks of the same `units` units, each with segments of its own, where `fit` blocks run on a multiprocessor. */
static inline int64_t strands_of_units(const Problem& in, int units, int fit, const Device& device) {
    return strands(most_sequences(in.sequences) * in.segments.count, in.G * group_bundles(in, units),
                   grid_room(in.sequences, 8 * fit, device));
}

/* The blocks of a launch that has `units` units in each; in.bundles says where they stand. */
static inline int64_t take_bundles(Problem& in, int units, int64_t strands) {
    set_bundles(in, units, strands);
    return strands * in.G * group_bundles(in, units);
}

/* ---- tensor maps ------------------------------------------------------------------------------------------------- */

/* States by boxes of `rows` rows of 64 of in.columns columns. */
static inline gt_status map_states(TensorMap* map, const Checkpoints& states, const Problem& in, int64_t slots,
                                   int rows) {
    TensorShape shape = {
        {in.columns, in.P, in.sequences.B * in.H * slots}, {in.N, (int64_t)in.P * in.N}, {64, rows, 1}, true};
    if (!states.values) shape.size[0] = 8, shape.size[1] = shape.size[2] = 1;
    const f16* data = states.values ? states.values : static_cast<const f16*>(in.x); /* for zeros any address does */
    return report(make_tensor_map(map, data, shape), "ssd cuTensorMapEncodeTiled");
}

/* x, y, z, dy or dz by boxes of 64 tokens of a head's 64 rows. */
static inline TensorShape rows_shape(const gt_stride& stride, const Problem& in) {
    const int64_t T = in.sequences.T, B = in.sequences.B;
    return {{in.H * in.P, T, B}, {stride.t, B > 1 ? stride.b : stride.t}, {TILE_P, CHUNK, 1}, true};
}

/* Whether it is a tensor for such maps.  NULL, as in a query, counts as aligned. */
static inline bool has_rows(const void* data, const gt_stride& stride, const Problem& in) {
    return in.P % TILE_P == 0 && (stride.h == in.P || in.H == 1) && in.sequences.T <= INT32_MAX &&
           in.H * in.P <= INT32_MAX && is_tensor(static_cast<const f16*>(data), rows_shape(stride, in));
}

/* Whether there is a map. */
static inline bool map_rows(TensorMap* map, const void* data, const gt_stride& stride, const Problem& in) {
    return has_rows(data, stride, in) &&
           make_tensor_map(map, static_cast<const f16*>(data), rows_shape(stride, in)) == cudaSuccess;
}

/* The maps of what forward's kernel writes. */
static inline gt_status map_outputs(HopperForwardParams& p) {
    const int64_t slots = chunk_slots(p.in.sequences, CHECKPOINT);
    p.y_map = p.checkpoint_map = TensorMap();
    p.has_y_map = !p.makes_dz && map_rows(&p.y_map, p.y, p.y_stride, p.in);
    if (!p.checkpoints.values || slots == 0) return GT_OK;
    return map_states(&p.checkpoint_map, p.checkpoints, p.in, slots, 16);
}

} /* namespace ssd */
} /* namespace gt */

#endif
