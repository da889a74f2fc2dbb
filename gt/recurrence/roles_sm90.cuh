/* gt/recurrence/roles_sm90.cuh - for recurrent operators on compute capability 9.0: the frame of a kernel whose
 * warpgroups have roles.  The first Tile::CONSUMERS warpgroups are consumers, which hold states.  The next warpgroup is
 * the producer: it copies inputs and prepares operands ahead of the consumers.  A ring (base/ring.cuh) connects
 * producer and consumers. */
#ifndef GT_RECURRENCE_ROLES_SM90_CUH
#define GT_RECURRENCE_ROLES_SM90_CUH

#include "../base/launch.cuh"
#include "sequences.cuh"

namespace gt {

constexpr int WARPGROUP = 128;

/* Gives each role its registers per thread: Tile::PRODUCER_REGISTERS or Tile::REGISTERS. */
template <class Tile, class Produce, class Consume>
GT_DEV void run_roles(int warpgroup, const Produce& produce, const Consume& consume) {
    if (warpgroup == Tile::CONSUMERS) {
        give_registers<Tile::PRODUCER_REGISTERS>();
        produce();
    } else {
        take_registers<Tile::REGISTERS>();
        consume();
    }
}

/* run_roles() for a kernel of a Chain (base/launch.cuh).  Each role waits for earlier kernels only if it must:
 *
 *     producer_waits()   whether the producer reads outputs of an earlier kernel.
 *     is_apart()         whether the consumers read no outputs of an earlier kernel.  Then they release the next kernel
 *                        at once.  Block 0 waits at its end, so that later kernels still wait for earlier ones.
 *
 * The producer calls producer_waits(), and the consumers call is_apart().  If the kernel called both before the roles
 * part, all threads would hold both answers in registers. */
template <class Tile, class ProducerWaits, class IsApart, class Produce, class Consume>
GT_DEV void run_chained_roles(const ProducerWaits& producer_waits, const IsApart& is_apart, const Produce& produce,
                              const Consume& consume) {
    if (warp_id() / 4 == Tile::CONSUMERS) {
        if (producer_waits()) wait_for_chain();
        give_registers<Tile::PRODUCER_REGISTERS>();
        produce();
    } else {
        const bool apart = is_apart();
        if (apart)
            release_chain();
        else
            wait_for_chain();
        take_registers<Tile::REGISTERS>();
        consume();
        if (apart && block_x() == 0) wait_for_chain();
    }
}

/* Calls pass(span, item) for the segments of one strand: item number `first`, and then every strands()-th item.  A
 * strand is a group of blocks that work on the same items (sequences.cuh).  The operator defines ordered_span() and
 * items_of().  `pass` returns the item, so that a role can keep the item in shared memory during the pass instead of in
 * a register. */
template <class Problem, class Strands, class Pass>
GT_DEV void each_item(const Problem& in, int first, const Strands& strands, const Pass& pass) {
    for (int64_t item = first; item < items_of(in); item += strands()) item = pass(ordered_span(in, item), item);
}

} /* namespace gt */

#endif
