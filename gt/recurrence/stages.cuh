/* gt/recurrence/stages.cuh - the launches of a call as stages, by which a call of two operators (gt/fused/wkv_ssm.cuh)
 * has those of both in one chain.  No kernels; with_stages() in driver.cuh makes them. */
#ifndef GT_RECURRENCE_STAGES_CUH
#define GT_RECURRENCE_STAGES_CUH

#include "../base/reduce.cuh"

namespace gt {

/* The launches of a call, for a call that enqueues those of two operators in one chain, by turns:
 *     forward    CLEAR, PASS
 *     backward   CLEAR, STATES (launches nothing if forward has saved them), GRADIENTS, CHUNKS; then the caller adds up
 *                `sums` */
enum class Stage { CLEAR, PASS, STATES, GRADIENTS, CHUNKS };

struct Stages {
    const void* plan;
    const Device* device;
    gt_status (*run)(const Stages& me, Stage stage, Chain& chain);
    const RowSums* sums; /* NULL: forward */
    int accumulate;
};

/* Who is given the stages of a call. */
struct StagesUser {
    gt_status (*use)(const Stages& stages, const void* context);
    const void* context;
};

} /* namespace gt */

#endif
