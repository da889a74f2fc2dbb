/* gt/wkv6/clear.cuh - what no packed sequence has.
 *
 * Zeros in the outputs of tokens from cu_seqlens[*seq_count] on; and in what sums are taken of: the states
 * of unused sequences, and all places of chunks, before those that are used are written.
 * grid fixed, block 8 warps; a warp takes rows of a token and head in turn.  bytes: the zeros. */
#ifndef GT_WKV6_CLEAR_CUH
#define GT_WKV6_CLEAR_CUH

#include "problem.cuh"

namespace gt {
namespace wkv6 {

struct ClearParams {
    struct Output {
        void* data;
        gt_stride at;
        gt_dtype dtype;
        int size;
    } outputs[4];
    int count;
    Packing packing;
    int64_t T, H;
    float* states; /* [capacity,state_size] or NULL */
    int64_t state_size;
    float* du; /* [places,H,N] or NULL */
    int64_t places, N;
};

GT_KERNEL(256, 1) clear_rest_kernel(const GT_GRID_CONSTANT ClearParams p) {
    wait_for_chain();
    const int64_t sequences = sequence_count(p.packing), first = p.packing.cu_seqlens[sequences];
    const int64_t rows = (p.T - first) * p.H;
    const int64_t thread = (int64_t)block_x() * 256 + thread_id(), threads = (int64_t)grid_x() * 256;
    for (int64_t row = thread / 32; row < rows; row += threads / 32) {
        for (int i = 0; i < p.count; i++) {
            const ClearParams::Output& x = p.outputs[i];
            const int64_t start = at(x.at, 0, first + row / p.H, row % p.H);
            for (int n = lane_id(); n < x.size; n += 32) store_as(x.data, x.dtype, start + n, 0.0f);
        }
    }
    for (int64_t i = thread; p.du && i < p.H * p.places * p.N; i += threads) p.du[i] = 0.0f;
    int64_t i = sequences * p.state_size + thread;
    for (; p.states && i < p.packing.capacity * p.state_size; i += threads) p.states[i] = 0.0f;
}

} /* namespace wkv6 */
} /* namespace gt */

#endif
