/* Properties that hold for every implementation of every operator, with any numbers.  Each function runs a case in two
 * ways and compares the results.  With tolerance 0 the bits must be equal, otherwise `tolerance` limits the relative l2
 * error.  If the two ways sum in different orders, the results must agree within the runner's own tolerances.  A
 * function skips cases that its property does not apply to. */
#ifndef GT_INVARIANTS_H
#define GT_INVARIANTS_H

#include "gt_test.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Every pass agrees with the double twin, within the runner's tolerances. */
void test_truth_holds(const test_runner *r, const test_case *c);

/* A second run gives the same bits. */
void test_repeats(const test_runner *r, const test_case *c);
/* Every layout gives the bits of packed arrays.  Set within_tolerance if a layout may run on other kernels: its results
 * must then agree with the double twin within the runner's tolerances. */
void test_layouts_agree(const test_runner *r, const test_case *c, int within_tolerance);
/* An output may take the memory of an input, if the operator's table allows it.  The results are then the same. */
void test_in_place_agrees(const test_runner *r, const test_case *c, int within_tolerance);
/* A call may ask for some outputs only.  An output does not change if the call asks for no other optional output. */
void test_alone_agrees(const test_runner *r, const test_case *c, double tolerance);
/* A call in which an optional input is NULL gives the results of a call with the constant that replaces it. */
void test_null_agrees(const test_runner *r, const test_case *c, double tolerance);
/* With accumulate = 1 a call adds to the gradients the same numbers that it writes with accumulate = 0. */
void test_accumulate_adds(const test_runner *r, const test_case *c);
/* If the batch shares one first state, the results equal those of a call where every batch element has a copy of this
 * state.  The gradient of the shared state is the sum of the gradients of the copies. */
void test_shared_agrees(const test_runner *r, const test_case *c, double tolerance);
/* Separate calls, each for one batch element or one packed sequence, give the results of the whole call.  The sums of
 * their parameter gradients are the whole call's parameter gradients. */
void test_batch_splits(const test_runner *r, const test_case *c, double tolerance);
/* A call for the first `at` tokens, and a call for the rest that starts from the state in between, give the results of
 * one call.  Backward runs the two parts in reverse order. */
void test_time_splits(const test_runner *r, const test_case *c, int64_t at, double tolerance);
/* A forward call for the first `at` tokens, and a forward call for the rest that starts from the state in between, give
 * the bits of one call. */
void test_prefill_splits(const test_runner *r, const test_case *c, int64_t at);
/* The passes segment and join compute a sequence in `count` independent pieces, forward and backward.  The results
 * agree with the double twin of the whole sequence. */
void test_pieces_agree(const test_runner *r, const test_case *c, int64_t count);
/* The states of packed sequences may lie in rows of pools.  Such a call gives the bits of a call without pools, and
 * zeros for sequences without a row.  The call accesses no other rows.
 * kind 0: packed rows; first and last states share one pool.
 * kind 1: aligned rows in two pools.
 * kind 2: other strides of rows and of conv1d's channels.  Other kernels may run this call, so its results must agree
 * with the double twin within the runner's tolerances. */
void test_pools_agree(const test_runner *r, const test_case *c, int kind);
/* A step of all tokens gives the results of forward from the states in the step's slots.  Skipped batch elements give
 * 0. Slots that the step does not use keep their bits. */
void test_step_agrees(const test_runner *r, const test_case *c, double tolerance);
/* Each batch element alone, in steps of `most` tokens and with arrays of another alignment, gives the bits of one step
 * of the whole batch.  So no result depends on the batch, the pool row, the alignment or other elements. */
void test_step_is_alone(const test_runner *r, const test_case *c, int64_t most);
/* Checks forward with 16-bit states.  Its results have the bits of forward with fp32 states, if the last states are
 * then rounded.  kind: bits choose the dtype, stochastic rounding, and pools. */
void test_small_states_agree(const test_runner *r, const test_case *c, int kind);
/* Checks snapshots in forward.  They have the bits of the last states of calls on prefixes of the sequences, rounded.
 * No other row is written, and no other result changes.  kind: bits choose the dtype, the distance and pools.
 * tolerance: 0 for cases with one segment.  With more segments, results may differ by this much. */
void test_snapshots_agree(const test_runner *r, const test_case *c, int kind, double tolerance);
/* Gives a case as many tokens as test_snapshots_agree needs, in one segment: of B batch elements, or, with B = 0, of
 * packed sequences. */
void test_suit_snapshots(test_case *c, int64_t B);
/* Checks a step of one token with stochastic rounding.  Sets the tensor `zero` to 0 and the tensor `one` (may be NULL)
 * to 1, so that all sums are exact and the states must have the bits of the twin.  Another seed or another step must
 * give other bits.  No bit may depend on the batch, the pool row or the alignment. */
void test_rounding_agrees(const test_runner *r, const test_case *c, const char *zero, const char *one);
/* A forward call for the first `at` tokens, and steps of up to `most` tokens for the rest, agree with one forward. */
void test_steps_agree(const test_runner *r, const test_case *c, int64_t at, int64_t most, double tolerance);
/* Simulates a server with speculative decoding.  Each round steps random sequences of a pool, with random numbers of
 * tokens.  The server commits some of these tokens, and sends the others again later.  All results have the bits of
 * steps of one token.  The step skips elements whose slot, number of tokens or commit is out of range. */
void test_server_agrees(const test_runner *r, const test_case *c, int rounds);
/* Puts a NaN or infinity into one element of an input: at token at[0] in forward, at token at[1] in backward, or in the
 * last row.  Outputs may change only where the double twin's change, with two exceptions: channels of the same token
 * and head and, with has_chunks, the chunk of the operator's reach (test_op.reach).  An output must not be finite where
 * the fp32 twin's is not finite; may_vanish drops this rule, for decays that underflow to 0.
 * every: spoils every input of every pass in turn, otherwise one input of one pass. */
void test_nonfinite_stays(const test_runner *r, const test_case *c, const int64_t at[2], int has_chunks, int every,
                          int may_vanish);

#ifdef __cplusplus
}
#endif
#endif
