/* gt/ssd/finish.cuh - ssd backward on tensor cores, last: dA, ddt_bias and dDskip, from what every chunk left.
 *
 * out[c] (+)= sum_r in[r][c]: r ascending within each of 16 interleaved partial sums, which are then added in order, as
 * reduce_rows does; one launch for all three.
 * grid: ceil(columns/32) blocks a sum, block 512 = 16 rows x 32 columns; shared 2 KB; reads rows * columns * 4 bytes once. */
#ifndef GT_SSD_FINISH_CUH
#define GT_SSD_FINISH_CUH

#include "../base/reduce.cuh"

namespace gt {
namespace ssd {

struct FinishParams {
    struct Sum {
        const float* in; /* [rows][columns] */
        float* out;
        int64_t columns;
    } sums[3];
    int count;
    int64_t rows;
    int accumulate;
};

GT_KERNEL(32 * REDUCED_ROWS, 1) finish_kernel(const GT_GRID_CONSTANT FinishParams p) {
    constexpr int BATCH = 16; /* loads in flight */
    wait_for_chain();
    int64_t block = block_x();
    int which = 0;
    while (which + 1 < p.count && block >= (p.sums[which].columns + 31) / 32)
        block -= (p.sums[which++].columns + 31) / 32;
    const FinishParams::Sum& s = p.sums[which];
    const int64_t c = block * 32 + lane_id();
    float sum = 0.0f;
    for (int64_t r = warp_id(); c < s.columns && r < p.rows; r += BATCH * REDUCED_ROWS) {
        float x[BATCH];
        load_column(x, s.in, GT_F32, r * s.columns + c, REDUCED_ROWS * s.columns,
                    (p.rows - r + REDUCED_ROWS - 1) / REDUCED_ROWS);
        GT_UNROLL
        for (int i = 0; i < BATCH; i++) sum += x[i];
    }
    const uint32_t cells = smem_base();
    sts<float>(cells + 4 * thread_id(), sum);
    sync_threads();
    if (warp_id() == 0 && c < s.columns) {
        sum = 0.0f;
        for (int i = 0; i < REDUCED_ROWS; i++) sum += lds<float>(cells + 4 * (32 * i + lane_id()));
        s.out[c] = p.accumulate ? s.out[c] + sum : sum;
    }
}

static inline void add_sum(FinishParams& p, const float* in, float* out, int64_t columns) {
    if (out) p.sums[p.count++] = {in, out, columns};
}

static inline gt_status finish_sums(const FinishParams& p, Chain& chain) {
    int64_t blocks = 0;
    for (int i = 0; i < p.count; i++) blocks += (p.sums[i].columns + 31) / 32;
    return run("ssd finish_kernel", finish_kernel, blocks, 32 * REDUCED_ROWS, 4 * 32 * REDUCED_ROWS, chain, p);
}

} /* namespace ssd */
} /* namespace gt */

#endif
