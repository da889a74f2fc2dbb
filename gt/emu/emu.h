/* gt/emu/emu.h - runs the kernels written on gt/base/device.cuh on the CPU, and checks how they use the GPU.
 *
 *   Define GT_EMU, include kernels as usual, call their launchers with host pointers, then ask:
 *
 *       emu::set_seed(3);                  another schedule of warps
 *       gt::launch(kernel, {blocks}, threads, smem_bytes, nullptr, params);
 *       if (emu::faults()) for (const std::string& m : emu::messages()) puts(m.c_str());
 *
 * HOW IT RUNS.  Blocks run one after another.  Every thread is a fiber with its own stack.  At a collective (shuffle,
 * mma, ldmatrix, sync_warp, barrier) a lane stores the address of its operands and gives way.  The last of the 32 lanes
 * performs the operation for all.  Between collectives warps run interleaved, in a random order drawn from the seed.
 *
 * WHAT IS CHECKED
 *   bounds        Every shared access lies in the dynamic shared memory of the launch.
 *   alignment     Shared and vector global accesses, cp.async and ldmatrix rows are aligned.
 *   uninitialised Shared memory starts as "never written" (NaN pattern) in every block.
 *   races         Two accesses to a shared cell (2 bytes), one of them a write, must be ordered.  Only barriers order
 *                 warps.  Each warp has a vector clock.  bar_sync joins the clocks of all its warps; mbarrier_wait
 *                 joins the clocks of the complete phase's arrivals.  sync_warp and bar_sync order the lanes of one
 *                 warp.  An arrival at an mbarrier does not, until the warp itself waits for it, directly or through
 *                 other warps' arrivals.  This is the PTX memory model.  With set_strict(false) the other collectives
 *                 order lanes, too, as they do if a warp runs in step.  The verdict depends on the barriers executed,
 *                 not on the order in which accesses happen.
 *   in flight     The destination of a cp.async holds NaN patterns from issue until the issuing thread's wait, when the
 *                 copy lands.  Any access in between is a fault.
 *   copies        Lengths are checked.  Copies still in flight when their thread returns are a fault.
 *   divergence    All 32 lanes meet at the same kind of collective.  For collectives that PTX calls .aligned (mma,
 *                 ldmatrix, movmatrix, bar) they meet at the same source line.
 *   barriers      Ids are checked.  Counts must be whole warps and agree.  A deadlock is a fault.
 *   mbarriers     Faults: use before the initialisation, or not ordered after it; a warp that arrives twice in one
 *                 phase; a phase that ends before a waiting warp has seen the phase before (the warp could mistake the
 *                 next phase for it); deadlock; arrivals left over at the end.
 *   wgmma         The wgmma_wait that ends a product's group computes the product.  Until then its registers hold NaN
 *                 patterns, and any other contents at the wait are a fault.  More faults: no wgmma_fence since the last
 *                 wait, or registers changed after it; registers of a product in flight used by another product, except
 *                 as accumulators of the same shape; warps of a warpgroup that execute different products; groups that
 *                 no thread waits for.
 *                 Operands in shared memory are read where the operand says.  If they were written in another layout,
 *                 the numbers differ, as on the GPU.  For races, they are read at any time from the start of the
 *                 product to the wait.  A panel that does not start where the swizzle's pattern starts is a fault, and
 *                 so is an operand that starts inside a row of a panel and runs past the end of that row.
 *   registers     give_registers and take_registers: a whole warpgroup calls them, the count changes in their
 *                 direction, and all counts together do not exceed a multiprocessor's registers.
 *   bulk copies   The target of a load holds NaN patterns until the load lands, at its mbarrier.  The load lands as
 *                 late as possible: when every warp waits.  So a warp that does not wait finds the patterns.  Arrivals
 *                 of cp_async are delayed alike.  Faults: more bytes than were expected; bytes that come after their
 *                 phase; loads and stores without a wait.  Fewer bytes are a deadlock.  For races, stores read until
 *                 their wait.
 *   async proxy   A fence_async_proxy must come between a write and an access by wgmma or a bulk copy.  The writing
 *                 warp calls it before it releases the data, or the accessing warp after it acquired them, or a warp
 *                 between the two.  The init of an mbarrier of bulk loads counts as a write.
 *   chain         A kernel may overlap the kernel before it in a chain.  Before one of its threads is in
 *                 wait_for_chain(), a block may already access data with the primitives.  The kernel before must not
 *                 write data that the block reads, nor access data that the block writes.  If the kernel before called
 *                 release_chain() before it waited, this kernel may also overlap the kernels that the kernel before
 *                 overlaps, and the same rules hold for them.  Some thread must wait: otherwise the kernels after this
 *                 one would not come after the kernels before it.
 *   device        A launch with more shared memory than a block may have returns an error.  mma_bf16, mma_tf32 and
 *                 mbarriers before sm_80 are faults, and so are wgmma and the other primitives of sm_90 elsewhere.
 *   bank conflicts are counted and are no faults: stats(), traffic() and kernels().  The lanes' accesses between two
 *                 collectives are grouped into warp instructions by source line and order.  8-byte accesses take two
 *                 wavefronts, 16-byte accesses four: one for every 16 or 8 lanes.
 *
 * NOT MODELLED: races between blocks in global memory; races between kernels of a chain by accesses without primitives,
 * or after another thread of the block has waited; visibility; bounds of global memory (use -fsanitize=address); spin
 * waits; thread block clusters; reads of registers of a product in flight (they find NaN); the rounding inside tensor
 * cores (fp32 sums in the order of k here); registers and occupancy.
 *
 * Faults are collected and never end the process.  After a divergence, a barrier fault or a deadlock the rest of the
 * launch is skipped.  Only one thread of the host may use the emulation. */
#ifndef GT_EMU_EMU_H
#define GT_EMU_EMU_H

#include "primitives.h"

#endif
