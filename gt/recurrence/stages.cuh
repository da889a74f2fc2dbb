/* gt/recurrence/stages.cuh - lets a fused operator enqueue the stages of another operator's pass among its own launches
 * (gt/fused/wkv_ssm.cuh, conv_ssd_launch.cuh).  gt_OP_plan checks and plans the pass, and gt_OP_run launches one stage
 * of it (op.h); driver.cuh implements both.  The kernels stay in the object of the operator that owns the pass; this
 * file has none. */
#ifndef GT_RECURRENCE_STAGES_CUH
#define GT_RECURRENCE_STAGES_CUH

#include "../base/reduce.cuh"

#include <new>

namespace gt {

/* The launches of a pass, in this order:
 *     forward    CLEAR, PASS
 *     backward   CLEAR, STATES (launches nothing if forward has saved the states), GRADIENTS, CHUNKS.  Then the caller
 *                adds up `sums`. */
enum class Stage { CLEAR, PASS, STATES, GRADIENTS, CHUNKS };

/* A planned pass.  The caller owns it; only the operator that planned the pass knows the type of the plan. */
class PassPlan {
  public:
    gt_pass pass;
    Device device;
    size_t bytes, saved; /* sizes of workspace and of `saved` */
    const RowSums* sums; /* the sums that the caller adds up after backward; NULL for forward */
    int accumulate;

    PassPlan() = default;
    PassPlan(const PassPlan&) = delete; /* `sums` points into room_ */
    PassPlan& operator=(const PassPlan&) = delete;

    template <class Plan>
    void hold(const Plan& plan) {
        static_assert(sizeof(Plan) <= sizeof room_ && alignof(Plan) <= 16, "a plan fits");
        static_assert(std::is_trivially_destructible<Plan>::value, "it is not destroyed");
        const Plan* const held = new (room_) Plan(plan);
        bytes = held->bytes, saved = held->saved;
        hold_sums(*held, 0);
    }
    template <class Plan>
    const Plan& plan() const {
        return *reinterpret_cast<const Plan*>(room_);
    }

  private:
    alignas(16) unsigned char room_[8192];

    template <class Plan>
    auto hold_sums(const Plan& plan, int) -> decltype((void)plan.sums) {
        sums = &plan.sums, accumulate = plan.accumulate;
    }
    template <class Plan>
    void hold_sums(const Plan&, long) {
        sums = nullptr, accumulate = 0;
    }
};

} /* namespace gt */

#endif
