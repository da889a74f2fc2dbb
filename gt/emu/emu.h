/* gt/emu/emu.h - runs the kernels written on gt/base/device.cuh on the CPU, and checks how they use the GPU.
 *
 *   Define GT_EMU, include kernels as usual, call their launchers with host pointers, then ask for faults:
 *
 *       emu::set_seed(3);                  selects another schedule of warps
 *       gt::launch(kernel, {blocks}, threads, smem_bytes, nullptr, params);
 *       if (emu::faults()) for (const std::string& m : emu::messages()) puts(m.c_str());
 *
 * HOW IT RUNS.  Blocks run one after another.  Every thread is a fiber with its own stack.  At a collective (shuffle,
 * mma, ldmatrix, sync_warp, barrier) a lane stores the address of its operands and yields.  The last of the 32 lanes
 * performs the operation for all.  At collectives the scheduler may switch to another warp; the seed decides.
 *
 * WHAT IS CHECKED
 *   bounds        Every shared access lies in the dynamic shared memory of the launch.
 *   alignment     Shared and vector global accesses, cp.async and ldmatrix rows are aligned.
 *   uninitialised In every block shared memory starts as never written, with NaN patterns.  A read of it is a fault.
 *   races         Two accesses to a shared cell (2 bytes), one of them a write, must be ordered.  Only barriers order
 *                 warps.  Each warp has a vector clock.  bar_sync joins the clocks of all its warps; mbarrier_wait
 *                 joins the clocks of the complete phase's arrivals.  sync_warp and bar_sync order the lanes of one
 *                 warp.  An arrival at an mbarrier orders the lanes of its own warp only when the warp waits for it,
 *                 directly or through other warps' arrivals.  This is the PTX memory model.  With set_strict(false) the
 *                 other collectives order lanes, too, as if a warp ran in lockstep.  The verdict depends on the
 *                 barriers executed, not on the order in which accesses happen.
 *   in flight     A cp.async lands when the thread that issued it waits.  Until then its destination holds NaN
 *                 patterns, and any access to the destination is a fault.
 *   copies        Lengths are checked.  Copies still in flight when their thread returns are a fault.
 *   divergence    All 32 lanes meet at the same kind of collective.  For collectives that PTX calls .aligned (mma,
 *                 ldmatrix, movmatrix, bar) they meet at the same source line.
 *   barriers      Ids are checked.  Thread counts must be whole warps, and the same in all warps.  A deadlock is a
 *   fault.
 *   mbarriers     Faults: use before the initialisation, or not ordered after it; a warp that arrives twice in one
 *                 phase; a phase that ends before a waiting warp has seen the end of the previous phase (the warp could
 *                 confuse the two); deadlock; arrivals left over at the end.
 *   wgmma         A product is computed at the wgmma_wait that completes its group.  Until then its registers hold NaN
 *                 patterns, and any other contents at the wait are a fault.  More faults: no wgmma_fence since the last
 *                 wait, or registers changed after the fence; registers of a product in flight used by another product,
 *                 except as accumulators of the same shape; warps of a warpgroup that execute different products;
 *                 groups that no thread waits for.
 *                 Operands in shared memory are read where their descriptor says.  If they were written in another
 *                 layout, the numbers differ, as on the GPU.  The race check assumes that a product reads them at any
 *                 time from its start to the wait.  A panel that does not start where the swizzle's pattern starts is a
 *                 fault.  So is an operand that starts inside a row of a panel and runs past the end of that row.
 *   registers     A whole warpgroup must call give_registers and take_registers.  The first must not raise the number
 *                 of registers, and the second must not lower it.  All threads together must not have more registers
 *                 than a multiprocessor.
 *   bulk copies   The target of a load holds NaN patterns until the load lands, at its mbarrier.  The load lands as
 *                 late as possible: when every warp waits.  So a warp that does not wait finds the patterns.  Arrivals
 *                 of cp_async are delayed in the same way.  Faults: more bytes than were expected; bytes that come
 *                 after their phase; loads and stores without a wait.  Fewer bytes are a deadlock.  The race check
 *                 assumes that a store reads shared memory until its wait.
 *   async proxy   A fence_async_proxy must come between a write and an access by wgmma or a bulk copy.  The writing
 *                 warp calls the fence before it releases the data, or the accessing warp after it acquired the data,
 *                 or a warp through which the data were passed.  The init of an mbarrier of bulk loads counts as a
 *                 write.
 *   chain         A kernel of a chain may overlap the kernel before it.  So a block may access global data before one
 *                 of its threads calls wait_for_chain().  In this time it must not read data that the kernel before
 *                 writes, nor write data that the kernel before accesses.  If the kernel before called release_chain()
 *                 before it waited, the current kernel may also overlap the kernels that the kernel before overlaps,
 *                 and the same rules hold for them.  Some thread must wait: otherwise later kernels of the chain would
 *                 not come after earlier ones.
 *   device        A launch with more shared memory than a block may have returns an error.  mma_bf16, mma_tf32 and
 *                 mbarriers before sm_80 are faults, and so are wgmma and the other primitives of sm_90 elsewhere.
 *   bank conflicts are counted, but are no faults: see stats(), traffic() and kernels().  Accesses of the lanes between
 *                 two collectives are grouped into warp instructions by source line and order.  8-byte accesses take
 *                 two wavefronts, 16-byte accesses four: one for every 16 or 8 lanes.
 *
 * NOT MODELLED: races between blocks in global memory; races between kernels of a chain by accesses without primitives,
 * or after another thread of the block has waited; memory visibility; bounds of global memory (use -fsanitize=address);
 * spin waits; thread block clusters; reads of registers of a product in flight (they find NaN); the rounding inside
 * tensor cores (the emulation adds in fp32, in the order of k); registers and occupancy.
 *
 * Faults are collected and never end the process.  After a divergence, a barrier fault or a deadlock the rest of the
 * launch is skipped.  Only one thread of the host may use the emulation. */
#ifndef GT_EMU_EMU_H
#define GT_EMU_EMU_H

#include "primitives.h"

#endif
