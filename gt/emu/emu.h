/* gt/emu/emu.h - runs the kernels written on gt/base/device.cuh on the CPU, and checks how they use the GPU.
 *
 *   Define GT_EMU, include kernels as usual, call their launchers with host pointers, then ask:
 *
 *       emu::set_seed(3);                  another schedule of warps
 *       gt::launch(kernel, {blocks}, threads, smem_bytes, nullptr, params);
 *       if (emu::faults()) for (const std::string& m : emu::messages()) puts(m.c_str());
 *
 * HOW IT RUNS.  Blocks run one after another.  Every thread is a fiber with its own stack.  At a collective (shuffle,
 * mma, ldmatrix, sync_warp, barrier) a lane leaves the address of its operands and gives way; the last of the 32 lanes
 * performs the operation for all.  Between collectives warps are interleaved in a random order drawn from the seed.
 *
 * WHAT IS CHECKED
 *   bounds        every shared access lies in the dynamic shared memory of the launch
 *   alignment     shared and vector global accesses, cp.async and ldmatrix rows
 *   uninitialised shared memory starts as "never written" (NaN pattern) in every block
 *   races         Two accesses to a shared cell (2 bytes), one of them a write, must be ordered.
 *                 Only barriers order warps: a vector clock per warp is joined at bar_sync, and at mbarrier_wait with
 *                 the clocks of the complete phase's arrivals.  Lanes of one warp are ordered by sync_warp and the
 *                 barriers (by mbarriers only where an arrival comes back through a wait), as in the PTX memory model.
 *                 set_strict(false) lets the other collectives order them too, as they do if a warp runs in step.  The
 *                 verdict depends on the barriers executed, not on the order in which accesses happen.
 *   in flight     The destination of a cp.async holds NaN patterns from issue until the issuing
 *                 thread's wait, when the copy lands; any access between is a fault.
 *   copies        lengths, and copies still in flight when their thread returns
 *   divergence    all 32 lanes meet at the same kind of collective, and for those that PTX calls
 *                 .aligned (mma, ldmatrix, movmatrix, bar) at the same source line
 *   barriers      ids, counts that are whole warps and agree, deadlock
 *   mbarriers     use before the initialisation or not ordered after it, a warp arriving twice in
 *                 one phase, a phase that ends before a waiting warp has seen the one before (it
 *                 could mistake the next for it), deadlock, arrivals left over at the end
 *   wgmma         A product is made by the wgmma_wait that ends its group; until then its registers
 *                 hold NaN patterns, and finding anything else there is a fault.  Also: no
 *                 wgmma_fence since the last wait, or registers changed after it; registers of a product in flight used
 *                 by another, except as accumulators of the same shape; warps of a warpgroup that execute
 *                 different ones; groups never waited for.
 *                 Operands in shared memory are read where the operand says: another layout than they were written in
 *                 gives other numbers, as on the GPU.  For races, they are read at any time from the start of the
 *                 product to the wait.  Panels that do not start where the pattern of the swizzle does are a fault, as
 *                 is leaving one sideways.
 *   registers     give_registers and take_registers: a whole warpgroup calls them, the count changes in their
 *                 direction, and all counts together do not exceed a multiprocessor's registers
 *   bulk copies   The target of a load holds NaN patterns until the load lands, at its mbarrier.  It lands as
 *                 late as it can: when every warp waits.  So a warp that does not wait finds the patterns.
 *                 The same goes for arrivals of cp_async.  Faults: more bytes than were expected, bytes that
 *                 come after their phase, loads and stores without a wait; fewer bytes are a deadlock.  Stores read,
 *                 for races, until their wait.
 *   async proxy   A fence_async_proxy must come between a write and an access by wgmma or a bulk copy.  The writing
 *                 warp calls it before it releases the data, or the accessing warp after it acquired them, or a warp
 *                 between the two.  An mbarrier of bulk loads counts as written by its init.
 *   chain         A kernel may run beside the kernel before it in a chain.  A block may read or write data with the
 *                 primitives before one of its threads is in wait_for_chain().  The kernel before must not write, or
 *                 read, these data, nor may kernels that this one was released beside (release_chain).  Some thread
 *                 must wait: else the kernels after this one would not come after the kernels before it.
 *   device        shared memory for a block; mma_bf16, mma_tf32 and mbarriers before sm_80; wgmma
 *                 elsewhere than on sm_90
 *   bank conflicts are counted, not faulted: stats(), traffic() and kernels().  The lanes' accesses
 *                 between two collectives are grouped into warp instructions by source line and
 *                 order.  8-byte accesses take two wavefronts, 16-byte ones four: one per 16 and 8
 *                 lanes.
 *
 * NOT MODELLED: races between blocks in global memory; races between kernels of a chain by accesses without primitives,
 * or after another thread of the block has waited; visibility; bounds of global memory (use -fsanitize=address); spin
 * waits; thread block clusters; reads of registers of a product in flight (they find NaN); the rounding inside tensor
 * cores (fp32 sums in the order of k here); registers and occupancy.
 *
 * Faults are collected and never end the process; after a divergence, a barrier fault or a deadlock
 * the rest of the launch is skipped.  One thread of the host only.
 */
#ifndef GT_EMU_EMU_H
#define GT_EMU_EMU_H

#include "primitives.h"

#endif
