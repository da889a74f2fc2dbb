/* gt/recurrence/roles_sm90.cuh - for recurrent operators on compute capability 9.0: the shell of a kernel whose
 * warpgroups have roles.  The first Tile::CONSUMERS warpgroups are consumers, which hold states.  The next warpgroup is
 * the producer, which copies and prepares ahead of them.  A ring (base/ring.cuh) connects producer and consumers. */
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

/* run_roles() in which each role waits for the chain of launches at its own time.
 *
 *     producer_waits()   whether the producer reads outputs of a previous kernel.
 *     is_apart()         whether consumers read no such output: then they release the next kernel, and one block waits
 *                        at its end, for the sake of later kernels.
 *
 * Each role calls these functions itself.  If the kernel called them first, both roles would hold the answers in
 * registers. */
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

/* Calls pass(span, item) for the segments that strand `first` of strands() takes.  The operator defines ordered_span()
 * and items_of().  pass returns the item: a role that keeps it in shared memory spends no register on it. */
template <class Problem, class Strands, class Pass>
GT_DEV void each_item(const Problem& in, int first, const Strands& strands, const Pass& pass) {
    for (int64_t item = first; item < items_of(in); item += strands()) item = pass(ordered_span(in, item), item);
}

} /* namespace gt */

#endif
