/* gt/wkv4/step.cuh - wkv4 step: 1 to 16 new tokens of every batch element.  States lie in slots and are updated in
 * place.
 *
 * A thread has one channel of one batch element; no thread waits for another.  After every token the kernel converts
 * the state to the caller's form and back, which rounds it.  So a call with T tokens gives the same bits as T calls
 * with one token.
 * GRID: B * ceil(D / 128).  Block: 128 threads.  No shared memory.
 * REGISTERS: a state, the parameters of a channel, the next token.
 * BYTES per channel: the state in and out, 24; w and u from the L2, 8.  Per token and channel, bf16: k, v and y 2
 * each. */
#ifndef GT_WKV4_STEP_CUH
#define GT_WKV4_STEP_CUH

#include "problem.cuh"

namespace gt {
namespace wkv4 {

constexpr int STEP_THREADS = 128;

struct StepParams {
    Problem in; /* tiles: blocks of a batch element */
    void* y;
    gt_stride y_stride;
    float* state; /* [slot_capacity,3,D] */
    StepElements elements;
};

template <class T>
GT_KERNEL(STEP_THREADS, 8)
step_kernel(const GT_GRID_CONSTANT StepParams p) {
    const Problem& in = p.in;
    constexpr bool EXACT = std::is_same<T, float>::value;
    const int64_t b = block_x() / in.tiles;
    const Channel c = channel_of(in, block_x() % in.tiles * STEP_THREADS + thread_id());
    const bool is_plain = has_plain_bonus(c);
    if (!c.exists) return;
    const StepElement element(p.elements, b);
    const bool is_skipped = element.is_skipped(p.elements);
    const T* k = static_cast<const T*>(in.k) + offset_of(in.k_stride, b, 0, c.d);
    const T* v = static_cast<const T*>(in.v) + offset_of(in.v_stride, b, 0, c.d);
    T* y = static_cast<T*>(p.y) + offset_of(p.y_stride, b, 0, c.d);
    const int tokens = is_skipped ? 0 : element.tokens;
    float key = 0.0f, value = 0.0f;
    State s = neutral_state();
    if (tokens) {
        key = Element<T>::load(k, 0), value = Element<T>::load(v, 0);
        s = load_state_in(in, c, p.state, element.row);
    }
    GT_NO_UNROLL
    for (int t = 0; t < tokens; t++) {
        const float this_key = key, this_value = value;
        if (t + 1 < tokens) {
            key = Element<T>::load(k, (t + 1) * in.k_stride.t), value = Element<T>::load(v, (t + 1) * in.v_stride.t);
        }
        Token token = {}; /* meet() sets it before any read, but nvcc would warn */
        if (is_plain)
            token.meet<true, true, EXACT>(s, c, this_key);
        else
            token.meet<false, true, EXACT>(s, c, this_key);
        Element<T>::store(y, t * p.y_stride.t, fma_rn(token.share, this_value, token.rest));
        const Three x = state_of_caller(token.after(this_value));
        s = state_of(x);
        if (t + 1 == element.commit) store_three(in, c, p.state, element.row, x.x, x.y, x.z);
    }
    for (int t = tokens; t < p.elements.T; t++) Element<T>::store(y, t * p.y_stride.t, 0.0f);
}

} /* namespace wkv4 */
} /* namespace gt */

#endif
