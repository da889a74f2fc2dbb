/* gt/base/bulk.cuh - copies between global and shared memory that a thread starts and hardware makes.
 *
 * Compute capability 9.0 and newer: elsewhere everything here traps.  All of it is collective (W): lane 0 acts for the
 * warp, the others say the same.
 *
 * | primitive                              | semantics (PTX)                                                     |
 * |----------------------------------------|---------------------------------------------------------------------|
 * | bulk_load(addr, source, bytes, barrier)| cp.async.bulk, global to shared, of a multiple of 16 bytes between  |
 * |                                        | multiples of 16.  The mbarrier's current phase, of which            |
 * |                                        | mbarrier_arrive_expect has told the bytes, completes when they are  |
 * |                                        | there and all threads have arrived                                  |
 * | bulk_store(target, addr, bytes)        | cp.async.bulk, shared to global, into the warp's open group         |
 * | bulk_commit()                          | closes the warp's group of stores                                   |
 * | bulk_wait_read<N>()                    | waits until at most the N latest groups still have shared memory to |
 * |                                        | read; bulk_wait<N>(): to write global memory.  One comes before the |
 * |                                        | block ends                                                          |
 *
 * The copies belong to the asynchronous proxy.  fence_async_proxy and then a barrier come between what the kernel has
 * written (sts, stmatrix, cp_async, mbarrier_init) and a copy that reads or writes it: that of the warp that wrote,
 * before its arrival.  Who has waited for the mbarrier reads what was loaded, by lds or as a tile of wgmma, without it.
 */
#ifndef GT_BASE_BULK_CUH
#define GT_BASE_BULK_CUH

#include "device.cuh"

namespace gt {

#ifndef GT_EMU

GT_DEV void bulk_load(uint32_t addr, const void* source, uint32_t bytes, uint32_t barrier) {
#if GT_SM90
    if (lane_id() == 0)
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(addr),
            "l"(__cvta_generic_to_global(source)), "r"(bytes), "r"(barrier)
            : "memory");
#else
    __trap();
#endif
}

GT_DEV void bulk_store(void* target, uint32_t addr, uint32_t bytes) {
#if GT_SM90
    if (lane_id() == 0)
        asm volatile(
            "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(target)),
            "r"(addr), "r"(bytes)
            : "memory");
#else
    __trap();
#endif
}

GT_DEV void bulk_commit() {
#if GT_SM90
    if (lane_id() == 0) asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#else
    __trap();
#endif
}

template <int N>
GT_DEV void bulk_wait_read() {
#if GT_SM90
    if (lane_id() == 0) asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
#else
    __trap();
#endif
}

template <int N>
GT_DEV void bulk_wait() {
#if GT_SM90
    if (lane_id() == 0) asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
#else
    __trap();
#endif
}

#else /* GT_EMU */

GT_DEV void bulk_load(uint32_t addr, const void* source, uint32_t bytes, uint32_t barrier,
                      emu::Site site = emu::Site::here()) {
    emu::bulk(emu::Op::BULK_LOAD, {source, addr, bytes, barrier}, site,
              [site](const emu::BulkCall& c) { emu::machine.start_load(c.addr, c.global, c.bytes, c.barrier, site); });
}

GT_DEV void bulk_store(void* target, uint32_t addr, uint32_t bytes, emu::Site site = emu::Site::here()) {
    emu::bulk(emu::Op::BULK_STORE, {target, addr, bytes, 0}, site, [site](const emu::BulkCall& c) {
        emu::machine.start_store(const_cast<void*>(c.global), c.addr, c.bytes, site);
    });
}

GT_DEV void bulk_commit(emu::Site site = emu::Site::here()) {
    emu::bulk(emu::Op::BULK_COMMIT, {}, site, [](const emu::BulkCall&) { emu::machine.commit_stores(); });
}

template <int N>
void bulk_wait_read(emu::Site site = emu::Site::here()) {
    emu::bulk(emu::Op::BULK_WAIT, {}, site, [](const emu::BulkCall&) { emu::machine.wait_stores(N); });
}

template <int N>
void bulk_wait(emu::Site site = emu::Site::here()) {
    emu::bulk(emu::Op::BULK_WAIT, {}, site, [](const emu::BulkCall&) { emu::machine.wait_stores(N); });
}

#endif /* GT_EMU */

} /* namespace gt */

#endif
