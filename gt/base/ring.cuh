/* gt/base/ring.cuh - for kernels: stages in shared memory that warps pass to each other in turn, by mbarriers.
 *
 * Both sides count the items of a ring: item n lies in stage n % STAGES.
 *
 * | filler                                         | user                                                   |
 * |------------------------------------------------|--------------------------------------------------------|
 * | wait_free(n)  until number n - STAGES is free  | wait_full(n)  until number n is there                  |
 * | fill(n)       arrives at FULL                  | free(n)       arrives at EMPTY: has read number n      |
 *
 * wait_freed(n) waits until item n itself is free.  full(n) and empty(n) are addresses of barriers, for bulk copies,
 * cp_async_arrive and the arrival of a warp.
 *
 * A Ring holds no count, since some kernels have no register for one.  They pass a count of their own, int or unsigned,
 * and the ring divides in that type.  A RingCursor holds the stage and the parity of a role.  It serves kernels that
 * count nothing else, and rings whose number of stages only the launch knows.
 *
 * Phase k of a barrier ends when all threads of init() have arrived k + 1 times.  A wait names the parity of its phase.
 * So a role must not be two phases ahead of a wait: the parity would be the same again. */
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

/* FULL and EMPTY: where the barriers begin, in bytes from `base`, or NO_BARRIER.  Barriers are PITCH bytes apart.
 * SIDES rings may interleave: each stage has one barrier for each side.  `side` is the side of this ring. */
template <int STAGES, int FULL, int EMPTY = NO_BARRIER, int PITCH = 8, int SIDES = 1>
struct Ring {
    uint32_t base;
    int side = 0;

    /* Address of barrier `place`, counted through all stages and sides; the functions below take item number n. */
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
    /* Initialises the barriers of all sides; every thread calls it.  fillers, users: numbers of threads that arrive at
     * FULL, at EMPTY. */
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

/* The stage that a role has come to, and the parity that it waits for.  The parity begins with 1 for a filler, with 0
 * for a user. */
struct RingCursor {
    int stage, parity;
    GT_METHOD explicit RingCursor(int parity) : stage(0), parity(parity) {}
    template <int STAGES>
    GT_METHOD void next() {
        if (++stage < STAGES) return;
        stage = 0;
        parity ^= 1;
    }
    GT_METHOD void next(int stages) { /* stages: the launch knows it */
        if (++stage == stages) stage = 0, parity ^= 1;
    }
};

} /* namespace gt */

#endif
