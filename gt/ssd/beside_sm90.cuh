/* gt/ssd/beside_sm90.cuh - ssd forward and its pass over states on compute capability 9.0, in blocks that leave room on
 * their multiprocessor for a block of another operator: for wkv_ssm, whose two operators run at the same time.
 *
 * They compute what forward_hopper_kernel and states_hopper_kernel compute with HEADS = 1 and NP = 64, by the same code
 * and so with the same bits.  What differs:
 *     registers    96 or 80 a thread at the launch, instead of 168, which are all that a multiprocessor has
 *     shared       forward 129.8 KB, with room for z; states 114.7 KB, without
 *     chain        a block waits for the kernels before at its end: it shares nothing with them, and runs beside them
 * Beside it fits, of 65536 registers and 228 KB with 1 KB a block:
 *     forward      36864 + 26112, 130 + 73 KB    wkv6 forward_tensor_kernel, N = 32, a block of two heads
 *     states       30720 + 30720, 116 + 60 KB    wkv6 states_tensor_kernel, N = 32; N = 64: 116 + 95 KB
 * REGISTERS a thread: forward 112, producer 64; states 88, producer 64.  tests/ops/ssd.spills has what spills.
 * grid, block, bytes, sums: those of the two kernels.  Deterministic. */
#ifndef GT_SSD_BESIDE_SM90_CUH
#define GT_SSD_BESIDE_SM90_CUH

#include "forward_sm90.cuh"
#include "states_sm90.cuh"

namespace gt {
namespace ssd {

/* BOUND: as many threads as would have a multiprocessor's registers at the number that a thread has at the launch. */
template <class T>
struct BesideTile : HopperTile<T, 64, 1, true> {
    static constexpr int BOUND = 640, AT_LAUNCH = 96;
    static constexpr int REGISTERS = 112, PRODUCER_REGISTERS = 3 * AT_LAUNCH - 2 * REGISTERS;
};

template <class T>
struct BesideStatesTile : StatesHopperTile<T, 64, 1, false> {
    static constexpr int BOUND = 768, AT_LAUNCH = 80;
    static constexpr int REGISTERS = 88, PRODUCER_REGISTERS = 3 * AT_LAUNCH - 2 * REGISTERS;
};

/* For other architectures they are empty, and bounded to one warp: see has_sm90a. */
template <class T>
GT_KERNEL(GT_SM90A ? BesideTile<T>::BOUND : 32, 1)
forward_beside_kernel(const GT_GRID_CONSTANT TensorParams p) {
#if GT_SM90A
    using Tile = BesideTile<T>;
    const uint32_t smem = smem_base_of_tiles();
    if (thread_id() < 2) {
        mbarrier_init(smem + Tile::FULL + 8 * thread_id(), WARPGROUP);
        mbarrier_init(smem + Tile::EMPTY + 8 * thread_id(), CONSUMERS * WARPGROUP);
        if (thread_id() == 0) mbarrier_init(smem + Tile::GATE_FULL, WARPGROUP);
    }
    sync_threads();
    if (warp_id() / 4 == CONSUMERS) {
        give_registers<Tile::PRODUCER_REGISTERS>();
        forward_producer<Tile>(p, smem);
    } else {
        take_registers<Tile::REGISTERS>();
        forward_consumer<Tile>(p, smem);
    }
    wait_for_chain(); /* so that kernels after this one wait for those before it, too */
#else
    (void)p;
    __trap();
#endif
}

template <class T>
GT_KERNEL(GT_SM90A ? BesideStatesTile<T>::BOUND : 32, 1)
states_beside_kernel(const GT_GRID_CONSTANT HopperStatesParams p) {
#if GT_SM90A
    using Tile = BesideStatesTile<T>;
    const uint32_t smem = smem_base_of_tiles();
    if (thread_id() < Tile::STAGES) {
        mbarrier_init(smem + Tile::FULL + 8 * thread_id(), WARPGROUP);
        mbarrier_init(smem + Tile::EMPTY + 8 * thread_id(), CONSUMERS * WARPGROUP);
    }
    sync_threads();
    if (warp_id() / 4 == CONSUMERS) {
        give_registers<Tile::PRODUCER_REGISTERS>();
        states_producer<Tile>(p, smem);
    } else {
        take_registers<Tile::REGISTERS>();
        states_consumer<Tile>(p, smem);
    }
    wait_for_chain();
#else
    (void)p;
    __trap();
#endif
}

} /* namespace ssd */
} /* namespace gt */

#endif
