/* gt/ssd/sm90/gradients.cuh - ssd backward of a chunk on compute capability 9.0, by wgmma: everything but the states.
 *
 * Activations have 16 bits.  N up to 64 runs as 64 columns, up to 128 as 128.  It computes the same as
 * chunk_gradient_kernel; mma/gradients.cuh has the formulas and the letters.  A block takes "places" in turn; a place
 * is 64 tokens of one group.  It takes the heads of a place, and their tiles of 64 rows p, one after another ("steps").
 * This file has the kernel; each warpgroup has its own file.  Other kernels do the work by token (_tokens.cuh): they
 * make Delta and decay factors before this kernel, da and ddt after it.  With z, dy is dy silu(z), which another kernel
 * has made (gate.cuh).
 *
 * WARPGROUPS.  Each runs as far ahead of the readers of its results as stages and buffers of M allow:
 *     prepare   _block.cuh    Finds the next place's chunk.  It copies a step as soon as its stage is free: one warp
 *                             starts TMA copies of tiles, factors and powers.  All four warps copy x, dy and NEXT (the
 *                             neighbour's x or dy) by cp.async in two cases.  Either these have no maps, or in packed
 *                             sequences the chunk or its neighbour is not whole.  For N = 64 three of the warps make B,
 *                             C and OTHER (the neighbour's B or C) of the next place.
 *     pairs     _pairs.cuh    S = C B^T once per place.  A step: dS = dy x^T, W += dS L Delta, sums of Gamma = dS S L
 *                             Delta, and M = S L Delta.  For bf16 a head's Dskip is on M's diagonal.  M is handed on
 *                             before the sums are made.  For N = 128 also E from C h^T, beside the sums.
 *     inputs    _inputs.cuh   dC += pre dy h;  U = Delta suf B G^T and F from it;  dx = U + M^T dy.  For N = 64 also E.
 *     states    _states.cuh   The state between the checkpoint's two chunks (h of the second, G of the first), in
 *                             place, from the neighbour's tokens.  dB += Delta suf x G.  Z from the diagonal of G h^T.
 * Pairs have rows t: in rows 16 i, warp i has the blocks of 16 x 16 up to the diagonal.  ddt needs <x, U> without
 * Delta, which is F / Delta plus the column sums of Gamma / Delta.  Where Delta is close to 0, F is made without Delta
 * (factor_of_U).
 *
 * SHARED MEMORY in KB, of N = 128 and of N = 64 (HopperGradientTraits has every offset): 208 and 219, so one block per
 * multiprocessor.
 *     B, C, OTHER     48      48     f16; N = 64 has two copies, which places use in turn.
 *     stages         112     120     2; 3.  X, DY, NEXT 24: as stored in memory; H, G 32 or 16: f16; states makes one
 *                                    of H and G in place.
 *     M               32      32     two buffers of two panels of 64 x 64: M, for bf16 without z in two terms.  At the
 *                                    end of a place: W for dC and W for dB, as one more M.
 *     OUT              8       8     dx on its way to memory; dC.
 *     floats           7.0    10.6   2.8 per stage: factors, the neighbour's factors, powers of H and G; 0.75 per copy:
 *                                    powers of B, C and OTHER; 0.6 once: powers of dC and dB, the largest |S| of
 *                                    a block.
 *     records          0.6     0.6   of places, and mbarriers
 * MBARRIERS are made once: stages, buffers and parities are counted over all places of a block.  FULL: a stage's copies
 * have arrived; warps that multiply data from cp_async first make it visible to the asynchronous proxy by a fence.
 * EMPTY: pairs, inputs and states have read the stage.  STATE_MADE: states has made H or G of the stage and the
 * inverses of its powers, if the chunk makes a state.  M_FULL, M_EMPTY: M's buffers are full or read.
 * PLACES.  PLACE_FULL: the record of a place is written.  GROUP_FULL: B, C and OTHER are made.  With one copy (N =
 * 128), pairs, inputs and states make one of these tiles each; with two copies, GROUP_EMPTY says that they are read.
 * SHARES_MADE: the powers of dC and dB are final, once the last step's left operands are made; so pairs makes W while
 * inputs still makes dx.  W_FULL, W_EMPTY guard W for dB; M_FULL and M_EMPTY guard W for dC.  No barrier is for all
 * warps.  A role that is done with a place begins the next place, whose copies have arrived meanwhile.  W keeps every
 * role within one place of the others.
 * REGISTERS per thread: pairs 144 (S 32, W 32, dS or C h^T 32).  The roles inputs and states 160 (dC or dB 64, product
 * 32, dy or x 16, or 32 as fp32; the neighbour's rows 32).  prepare 48.
 *
 * CODE.  A multiprocessor keeps 32 KB of instructions.  A longer loop is fetched again in every step, at 7.7 bytes per
 * clock on an H200.  Versions of this kernel with 58 and 45 KB take 8,300 and 6,000 clocks per step.  So inputs and
 * states share code, rare paths are branches, and other kernels do the work by token.  The code of a step has about 33
 * KB, with z 37 KB.  Above 32 KB, 100 instructions less save 2 to 6 %.  A version of 27 KB, with loops, is slower,
 * because the path of a step through its stage bounds it (docs/performance.md).
 *
 * NUMBERS.  In dS and M^T dy, x and dy are operands without conversion.  M has their type: bf16, in two terms in the
 * blocks on the diagonal, or f16 times powers of two.  For products with states, x and dy are f16 from registers, times
 * their decay and a power of two.  A token keeps its power over the heads as long as the power fits (StateShare), so
 * the products' accumulators sum dC and dB.  B, C: f16, a power per row.  h, G: as saved, with a power for 16 rows.
 * This power goes into the left operand or, where the 16 rows are columns, is applied after the product.  The state
 * that the chunk makes: exp(sum a) h is a product, too, with a diagonal left operand.
 * GATE.  With z, dy is f16 times a power of two for 16 rows, rounded once from fp32 (gate.cuh).  x keeps its type: in
 * dS, dy is two terms of bf16, which hold an f16 exactly.  M is f16.  chunk_factors_kernel puts the inverses of dy's
 * powers into the factors of rows t.
 * POWERS of M as f16: one for 16 columns s and a head (power_of_M()); U_s has the same power.
 * N > 128: launches of 128 columns, all with this kernel.  Each makes dB and dC of its columns.  The first launches
 * store their sum of dx in fp32, and the last launch adds its own.  chunk_times_kernel adds the sums by token of all
 * launches.
 *
 * PRODUCTS per step, clocks at full rate (N = 128, bf16): dS 128, M^T dy 256, C h^T, B G^T, dy h, x G 1024, the state
 * made 512, G h^T 256.
 * BYTES per token and head: as chunk_gradient_kernel, without dt and ddt; factors 45 read, sums 29 written per tile
 * (_tokens.cuh).  At N < 64 states have N columns: zeros beyond are not read.
 * CHAIN.  The kernel makes barriers and loads B and C, inputs of the call, without waiting for the previous kernel.
 * All other work waits.
 * grid: at most one block per multiprocessor; block 512.  Blocks take places in turn.  Places are numbered by [B, slots
 * of 128 tokens, G], two chunks each.  With z, if dy silu(z) lies in dx, a block takes both chunks of a slot one after
 * the other.  A block first loads its code from L2, which takes 8 us (on an H200) before its first step; it loads part
 * of the code again at each place.  Every sum has one fixed order, so results are deterministic. */
#ifndef GT_SSD_SM90_GRADIENTS_CUH
#define GT_SSD_SM90_GRADIENTS_CUH

#include "gradients_inputs.cuh"
#include "gradients_pairs.cuh"
#include "gradients_states.cuh"
#include "gradients_sums.cuh"

namespace gt {
namespace ssd {

/* The roles inputs (0) and states (1) share this code: a step's product with a state, and dC or dB.  FULL says that
 * prepare has filled the stage.  STATE_MADE says that states has made its state, or has none to make.  In a second
 * chunk the state is h, which both roles read first.  In a first chunk the state is G.  inputs reads G first for N =
 * 128, else after dC.  inputs gives the stage back, by EMPTY, before it stores dx. */
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
        if (C::M_HAS_POWER && !which) Ring<1, C::S_MADE>{smem}.wait_full(number); /* S_MOST */
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
            float product[8][4]; /* inputs: C h^T or, if pairs makes C h^T, B G^T; states: G h^T */
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

/* Called by all threads, once for all places.  Also writes zeros to M, because no role writes M's blocks with s > t. */
template <class C>
GT_DEV void init_barriers(const HopperGradientParams& p, uint32_t smem) {
    const int thread = thread_id();
    typename C::Stages{smem}.init(thread, has_only_maps(p) ? 32 : 2 * C::WARPGROUP, /* one warp hands over */
                                  C::CONSUMER_THREADS);
    typename C::States{smem}.init(thread, C::WARPGROUP);
    typename C::Buffers{smem}.init(thread, C::WARPGROUP, C::WARPGROUP);
    typename C::Groups{smem}.init(thread, C::GROUP_COPIES > 1 ? 96 : C::CONSUMER_THREADS, /* prepare, or multipliers */
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

/* On other architectures the kernel is empty, and bounded to one warp: see Device::runs_sm90a. */
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
