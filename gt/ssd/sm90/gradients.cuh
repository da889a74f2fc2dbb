/* gt/ssd/sm90/gradients.cuh - ssd backward of a chunk on compute capability 9.0, by wgmma: every gradient but dz and
 * dstate_in.
 *
 * Activations have 16 bits.  N up to 64 runs as 64 columns, and N up to 128 as 128.  The kernel computes the same as
 * chunk_gradient_kernel; mma/gradients.cuh has the formulas and the notation.  A place is a chunk of 64 tokens for one
 * group; blocks take places in turn.  A step is one tile of 64 rows p of one head; a block goes through all steps of a
 * place.  This file has the kernel, and each role of a warpgroup has its own file.  Two other kernels compute numbers
 * for each token (_tokens.cuh): Delta and decay factors before this kernel, and da and ddt after it.  With z, dy means
 * dy silu(z), which gate_kernel has stored (gate.cuh).
 *
 * WARPGROUPS.  Each has a role, and runs as far ahead of the readers of its results as stages and buffers allow:
 *     prepare   _block.cuh    Finds the chunk of the next place.  It copies the tiles of a step as soon as the stage is
 *                             free: one warp starts TMA copies of tiles, factors and powers.  All four warps copy x, dy
 *                             and NEXT by cp.async if these have no tensor maps, or if a packed sequence cuts the chunk
 *                             or its neighbour short.  NEXT is x or dy of the neighbour, which is the other chunk of
 *                             the slot.  For N = 64, three of the warps load and convert B, C and OTHER of the next
 *                             place.  OTHER is B or C of the neighbour.
 *     pairs     _pairs.cuh    S = C B^T once per place.  In each step: dS = dy x^T, W += dS L Delta, M = S L Delta, and
 *                             sums of Gamma = dS S L Delta.  With bf16, Dskip is added on the diagonal of M if it is
 *                             per head.  The role hands M on before it computes the sums.  For N = 128 it also computes
 *                             E from C h^T, beside the sums.
 *     inputs    _inputs.cuh   dC += pre dy h; U = Delta suf B G^T, and F from U; dx = U + M^T dy.  For N = 64 also E.
 *     states    _states.cuh   The state between the slot's two chunks, from the neighbour's tokens: h for the second
 *                             chunk, G for the first.  It overwrites the checkpoint in the stage.  dB += Delta suf x G.
 *                             Z from the diagonal of G h^T.
 * Matrices of pairs have rows t: warp i has rows from 16 i on, with the blocks of 16 x 16 up to the diagonal.  ddt
 * needs <x, U> without Delta: F / Delta plus the column sums of Gamma / Delta.  If Delta is close to 0, F is computed
 * without Delta (factor_of_U()).
 *
 * SHARED MEMORY in KB, for N = 128 and for N = 64: 208 and 219 in all, so one block per multiprocessor.
 * HopperGradientTraits has every offset.
 *     B, C, OTHER     48      48     f16; for N = 64 two copies, which places use in turn.
 *     stages         112     120     two stages, or three for N = 64.  X, DY, NEXT 24: not converted.  H, G 32 or 16:
 *                                    f16; the role states advances one of H and G in place.
 *     M               32      32     two buffers of two panels of 64 x 64 for M, which has two terms for bf16 without
 *                                    z.  After the last step of a place, a buffer has W for dC and W for dB.
 *     OUT              8       8     dx on its way to memory; dC.
 *     floats           7.0    10.6   2.8 per stage: factors, the neighbour's factors, powers of H and G; 0.75 per copy:
 *                                    powers of B, C and OTHER; 0.6 once: powers of dC and dB, the largest |S| of
 *                                    a block.
 *     records          0.6     0.6   of places, and mbarriers
 * MBARRIERS are initialized once.  So stages, buffers and parities are counted over all places of a block.  FULL: the
 * copies of a stage have arrived; if cp.async copied them, the readers first execute a fence for the asynchronous
 * proxy.  EMPTY: pairs, inputs and states have read the stage.  STATE_MADE: states has advanced H or G in the stage, or
 * has nothing to advance.  M_FULL, M_EMPTY: a buffer of M is full, or has been read.
 * PLACES.  PLACE_FULL: the record of a place is written.  GROUP_FULL: B, C and OTHER are converted.  With one copy (N =
 * 128), pairs, inputs and states convert one of these tiles each.  With two copies, GROUP_EMPTY means that B, C and
 * OTHER have been read.  SHARES_MADE: the powers of dC and dB are final.  The powers are final as soon as the left
 * operands of the last step exist, so pairs computes W while inputs still computes dx.  W_FULL and W_EMPTY guard W for
 * dB; M_FULL and M_EMPTY guard W for dC.  No barrier includes all warps.  A role that has finished a place begins the
 * next one, whose copies have arrived meanwhile.  The exchange of W keeps every role within one place of the others.
 * REGISTERS per thread: pairs 144 (S 32, W 32, dS or C h^T 32).  inputs and states 160 (dC or dB 64, a product 32, dy
 * or x 16, or 32 as fp32, and the neighbour's rows 32).  prepare 48.
 *
 * CODE.  A multiprocessor caches 32 KB of instructions.  A longer loop is fetched again in every step, at 7.7 bytes per
 * clock on an H200.  Versions of this kernel with 58 KB and 45 KB of code took 8,300 and 6,000 clocks per step.  So
 * inputs and states share code, rare paths are branches, and other kernels compute the numbers of tokens.  The code of
 * a step now takes about 33 KB, or 37 KB with z.  Above 32 KB, each 100 instructions cost 2 to 6 % of the time.  A
 * version of 27 KB, with loops, was slower (docs/performance.md): its limit is how long a step occupies its stage.
 *
 * NUMBERS.  In dS and M^T dy, x and dy are operands without conversion.  M has the same type: bf16, with two terms in
 * the blocks on the diagonal, or f16 times powers of two.  In products with states, x and dy are converted to f16 in
 * registers, times their decay and a power of two.  A token keeps its power from step to step as long as the power fits
 * (StateShare).  So the accumulators of these products hold dC and dB.  B and C are f16, with a power for each row.  h
 * and G are f16 as saved, with a power for 16 rows.  This power is multiplied into the left operand, or into the
 * product if the 16 rows are its columns.  When the role states advances h or G, it also computes exp(sum a) h as a
 * product, with a diagonal left operand.
 * GATE.  With z, dy is f16 with a power of two for 16 rows (gate.cuh).  x keeps its type.  If x is bf16, dS takes dy as
 * two terms of bf16, which hold an f16 number exactly.  M is f16.  chunk_factors_kernel multiplies the inverses of the
 * powers of dy into the factors of rows t.
 * POWERS.  If M is f16, it has a power for each 16 columns s and head (power_of_M()).  U_s has the same power.
 * N > 128: every 128 columns have a launch of their own.  Each launch computes dB and dC of its columns.  All launches
 * but the last store partial sums of dx in fp32.  chunk_times_kernel adds up the sums of tokens of all launches.
 *
 * PRODUCTS per step, clocks of the tensor cores at full rate (N = 128, bf16): dS 128, M^T dy 256, C h^T, B G^T, dy h
 * and x G 1024 in all, the state of the neighbour's tokens 512, G h^T 256.
 * BYTES per token and head: as chunk_gradient_kernel, without dt and ddt.  In addition factors 45 read, and sums 29
 * written for each tile (_tokens.cuh).  If N < 64, states have N columns in memory; TMA fills the others with zeros.
 * CHAIN.  The kernel initializes barriers and loads B and C without waiting for the previous kernel, because B and C
 * are inputs of the call.  All other work waits.
 * grid: at most one block per multiprocessor; block 512.  Blocks take places in turn.  Places are numbered as [B, slots
 * of 128 tokens, G][2 chunks].  With z, if dy silu(z) lies in dx, a block takes both chunks of a slot one after the
 * other.  On an H200, a block first takes 8 us to load its code from L2, and loads part of it again at each place.
 * Every sum has one fixed order, so results are deterministic. */
#ifndef GT_SSD_SM90_GRADIENTS_CUH
#define GT_SSD_SM90_GRADIENTS_CUH

#include "gradients_inputs.cuh"
#include "gradients_pairs.cuh"
#include "gradients_states.cuh"
#include "gradients_sums.cuh"

namespace gt {
namespace ssd {

/* The roles inputs (which = 0) and states (which = 1) share this code: the products of a step with a state, and dC or
 * dB.  The role states advances one state, h in the second chunk of a slot and G in the first.  Both roles wait for
 * STATE_MADE before they read that state.  Both read h first in a second chunk.  In a first chunk, inputs reads G first
 * if N = 128, else after dC.  inputs frees the stage before it stores dx. */
template <class C>
GT_DEV void sums_role(const HopperGradientParams& p, uint32_t smem, int which) {
    const WarpRows at(shfl_idx(warp_id(), 0));
    const int tile = which ? TILE_OTHER : TILE_B;
    StateShare<C> share;
    GT_NO_UNROLL
    for (int number = made_here(0);; number++) {
        const HopperBlock<C> me(p, smem, number);
        if (number > 0) {
            const HopperBlock<C> last(p, smem, number - 1);
            float inverse[2];
            add_W(last, at, which, share, inverse);
            store_share(p, last, at, which, share, inverse);
        }
        if (C::GROUP_COPIES == 1) convert_group_rows(p.in, me, tile);
        wait_for_chain();
        if (me.tokens == 0) break;
        share = StateShare<C>();
        me.groups().wait_full(number);
        if (C::M_HAS_POWER && !which) Ring<1, C::S_MADE>{smem}.wait_full(number); /* S_MOST is complete */
        GT_NO_UNROLL
        for (int step = 0; step < me.steps; step++) {
            const uint32_t n = me.in_stages(step), tiles = me.stage(step);
            wait_for_rows(me, step);
            if (which) {
                if (me.makes_state()) make_hopper_state(me, at, step);
                me.states().fill(n);
            }
            const auto wait_for_state = [&] { me.states().wait_full(n); };
            if (which || me.second || C::PAIRS_MAKE_E) wait_for_state();
            float product[8][4]; /* inputs: C h^T, or B G^T if pairs computes C h^T; states: G h^T */
            {
                uint32_t a[4][4];
                const uint32_t left = me.tile_of(C::PAIRS_MAKE_E ? C::B : C::C);
                const uint32_t right = tiles + (C::PAIRS_MAKE_E ? C::G : C::H);
                wgmma_fence();
                multiply_rows<C>(product, which ? tiles + C::G : left, which ? tiles + C::H : right);
                wgmma_commit();
                make_left(me, at, step, which, share, a);
                wgmma_fence();
                add_left(me, step, which, share, a);
                wgmma_commit();
                if (step + 1 == me.steps) hand_powers_on(me, at, which, share);
                wgmma_wait<1>();
                wgmma_pin(product);
                if (which)
                    store_Z(me, at, step, product);
                else if (!C::PAIRS_MAKE_E)
                    store_E(me, at, step, product);
                wgmma_wait<0>();
            }
            if (which) {
                me.stages().free(n);
                continue;
            }
            if constexpr (!C::PAIRS_MAKE_E) {
                if (!me.second) wait_for_state();
                wgmma_fence();
                multiply_rows<C>(product, me.tile_of(C::B), tiles + C::G);
                wgmma_commit();
            }
            make_inputs(p, me, at, step, product);
        }
    }
}

/* All threads initialize the barriers, once for all places.  They also clear M, because no role writes the blocks of M
 * with s > t. */
template <class C>
GT_DEV void init_barriers(const HopperGradientParams& p, uint32_t smem) {
    const int thread = thread_id();
    typename C::Stages{smem}.init(thread, has_only_maps(p) ? 32 : 2 * C::WARPGROUP, /* one warp, or each thread twice */
                                  C::CONSUMER_THREADS);
    typename C::States{smem}.init(thread, C::WARPGROUP);
    typename C::Buffers{smem}.init(thread, C::WARPGROUP, C::WARPGROUP);
    typename C::Groups{smem}.init(thread, C::GROUP_COPIES > 1 ? 96 : C::CONSUMER_THREADS, /* three warps of prepare, or
                                                                                           * the three other roles */
                                  C::CONSUMER_THREADS);
    typename C::Places{smem}.init(thread, 32);
    if (C::M_HAS_POWER) Ring<1, C::S_MADE>{smem}.init(thread, C::WARPGROUP);
    Ring<1, C::SHARES_MADE>{smem}.init(thread, 2 * C::WARPGROUP);
    typename C::WForStates{smem}.init(thread, C::WARPGROUP, C::WARPGROUP);
    GT_NO_UNROLL
    for (int i = thread; i < (C::OUT - C::M) / 16; i += C::THREADS) sts<uint4>(smem + C::M + 16 * i, {0, 0, 0, 0});
    fence_async_proxy();
    sync_threads();
}

/* For other architectures the kernel has no code and launch bounds of one warp.  Device::runs_sm90a finds out which
 * code the device runs. */
template <class T, int N, class D>
GT_KERNEL(GT_SM90A ? 512 : 32, 1)
chunk_gradient_hopper_kernel(const GT_GRID_CONSTANT HopperGradientParams p) {
#if GT_SM90A
    using C = HopperGradientTraits<T, N, D>;
    const uint32_t smem = smem_base_of_tiles();
    const int role = shfl_idx(warp_id(), 0) / 4;
    init_barriers<C>(p, smem);
    if (role == 3) {
        give_registers<C::PREPARE_REGISTERS>();
        prepare_role<C>(p, smem);
    } else if (role == 0) {
        take_registers<C::PAIRS_REGISTERS>();
        pairs_role<C>(p, smem);
    } else {
        take_registers<C::SUMS_REGISTERS>();
        sums_role<C>(p, smem, role - 1);
    }
#else
    (void)p;
    __trap();
#endif
}

} /* namespace ssd */
} /* namespace gt */

#endif
