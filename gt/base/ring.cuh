/* gt/base/ring.cuh - for kernels: a ring of stages in shared memory.  Some warps (the filler) fill the stages in turn,
 * and other warps (the user) read them.  mbarriers pass the stages between them.
 *
 * Filler and user number the items that pass through a ring: item n lies in stage n % STAGES.
 *
 * | filler                                              | user                                              |
 * |-----------------------------------------------------|---------------------------------------------------|
 * | wait_free(n)  waits until item n - STAGES is free   | wait_full(n)  waits until item n is there         |
 * | fill(n)       arrives at FULL: item n is there      | free(n)       arrives at EMPTY: item n is read    |
 *
 * wait_freed(n) waits until item n itself is free.  full(n) and empty(n) are the addresses of the barriers of item n,
 * for bulk copies, cp_async_arrive and mbarrier_arrive_warp.
 *
 * A Ring does not hold the item number, since some kernels have no register for it.  The caller passes n, int or
 * unsigned, and the ring divides in that type.  A RingCursor holds a role's stage and parity instead.  Use it in
 * kernels that do not count items, and for rings whose number of stages is known only at launch.
 *
 * Phase k of a barrier ends when all threads of init() have arrived k + 1 times.  A wait knows a phase only by its
 * parity.  So no role may be two phases ahead of a role that still waits: the same parity would come again. */
#ifndef GT_BASE_RING_CUH
#define GT_BASE_RING_CUH

#include "device.cuh"

namespace gt {

/* In the emulation a report names the line that calls a ring, not a line of this file. */
#ifdef GT_EMU
#define GT_SITE , emu::Site site = emu::Site::here()
#define GT_AT_SITE , site
#else
#define GT_SITE
#define GT_AT_SITE
#endif

constexpr int NO_BARRIER = -1;

/* FULL and EMPTY: offsets of the first barriers in bytes from `base`, or NO_BARRIER.  Barriers are PITCH bytes apart.
 * SIDES rings may interleave: then each stage has one barrier of a kind for every ring.  `side` is the index of this
 * ring. */
template <int STAGES, int FULL, int EMPTY = NO_BARRIER, int PITCH = 8, int SIDES = 1>
struct Ring {
    uint32_t base;
    int side = 0;

    /* The address of barrier number `place`, counted through all stages and sides.  The functions further down take an
     * item number n instead. */
    GT_METHOD uint32_t full_of(int place) const {
        static_assert(FULL != NO_BARRIER, "nobody fills it");
        return base + FULL + PITCH * place;
    }
    GT_METHOD uint32_t empty_of(int place) const {
        static_assert(EMPTY != NO_BARRIER, "nobody frees it");
        return base + EMPTY + PITCH * place;
    }
    template <class N>
    GT_METHOD uint32_t full(N n) const {
        return full_of(n % STAGES * SIDES + side);
    }
    template <class N>
    GT_METHOD uint32_t empty(N n) const {
        return empty_of(n % STAGES * SIDES + side);
    }
    /* Initialises the barriers of all sides; every thread of the block calls it.
     * fillers: number of threads that arrive at FULL.  users: number of threads that arrive at EMPTY. */
    GT_METHOD void init(int thread, int fillers, int users = 0 GT_SITE) const {
        constexpr int COUNT = STAGES * SIDES;
        if (COUNT == 1 ? thread != 0 : thread >= COUNT) return;
        if constexpr (FULL != NO_BARRIER) mbarrier_init(full_of(thread), fillers GT_AT_SITE);
        if constexpr (EMPTY != NO_BARRIER) mbarrier_init(empty_of(thread), users GT_AT_SITE);
    }
    template <class N>
    GT_METHOD void wait_full(N n GT_SITE) const {
        mbarrier_wait(full(n), n / STAGES % 2 GT_AT_SITE);
    }
    template <class N>
    GT_METHOD void wait_free(N n GT_SITE) const {
        mbarrier_wait(empty(n), (n / STAGES + 1) % 2 GT_AT_SITE);
    }
    template <class N>
    GT_METHOD void wait_freed(N n GT_SITE) const {
        mbarrier_wait(empty(n), n / STAGES % 2 GT_AT_SITE);
    }
    template <class N>
    GT_METHOD void fill(N n GT_SITE) const {
        mbarrier_arrive(full(n) GT_AT_SITE);
    }
    template <class N>
    GT_METHOD void free(N n GT_SITE) const {
        mbarrier_arrive(empty(n) GT_AT_SITE);
    }
};

/* The stage that a role has reached, and the parity for which the role waits there.  A filler starts with parity 1, a
 * user with parity 0. */
struct RingCursor {
    int stage, parity;
    GT_METHOD explicit RingCursor(int parity) : stage(0), parity(parity) {}
    template <int STAGES>
    GT_METHOD void next() {
        if (++stage < STAGES) return;
        stage = 0;
        parity ^= 1;
    }
    GT_METHOD void next(int stages) { /* for a number of stages that is known only at launch */
        if (++stage == stages) stage = 0, parity ^= 1;
    }
};

} /* namespace gt */

#endif
