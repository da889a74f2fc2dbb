/* gt/ssd/sm90/plan.cuh - what a launch of ssd's forward is given, and what kernels for compute capability 9.0 need of the
 * host beside it: tensor maps, and how units are shared among blocks.  No launches: conv_ssd, which has a kernel of its
 * own for the same plan, includes this and not launch.cuh. */
#ifndef GT_SSD_SM90_PLAN_CUH
#define GT_SSD_SM90_PLAN_CUH

#include "../choice.cuh"
#include "../any/forward.cuh"
#include "forward.cuh"

namespace gt {
namespace ssd {

/* A call's forward. */
struct ForwardPlan {
    static constexpr const char* CLEAR = "ssd clear_unused_kernel";
    Choice choice;
    Sequences sequences;
    ClearParams unused;
    TensorParams tensor;
    ForwardParams any;
    size_t bytes, saved;

    gt_status pass(const Device& device, Chain& chain) const; /* launch.cuh */
};

/* ---- blocks ------------------------------------------------------------------------------------------------------ */

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

/* Where has_rows() holds. */
static inline gt_status map_rows(TensorMap* map, const void* data, const gt_stride& stride, const Problem& in) {
    return report(make_tensor_map(map, static_cast<const f16*>(data), rows_shape(stride, in)),
                  "ssd cuTensorMapEncodeTiled");
}

/* The maps of what forward's kernel writes. */
static inline gt_status map_outputs(HopperForwardParams& p, bool y_by_map) {
    const int64_t slots = chunk_slots(p.in.sequences, CHECKPOINT);
    p.y_map = p.checkpoint_map = TensorMap();
    p.has_y_map = y_by_map;
    const gt_status status = y_by_map ? map_rows(&p.y_map, p.y, p.y_stride, p.in) : GT_OK;
    if (status != GT_OK || !p.checkpoints.values || slots == 0) return status;
    return map_states(&p.checkpoint_map, p.checkpoints, p.in, slots, 16);
}

} /* namespace ssd */
} /* namespace gt */

#endif
