/* Properties of every implementation of every operator, for any numbers.  Each function runs a case in two ways that
 * must agree: exactly if tolerance is 0, else in relative l2.  Sums in different orders must agree within the runner's
 * own tolerances.  A property skips cases that it does not apply to. */
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
/* Every layout gives the results of packed arrays: the same bits or, if other kernels may take it, agreement with the
 * double twin within the runner's tolerances. */
void test_layouts_agree(const test_runner *r, const test_case *c, int within_tolerance);
/* Outputs over the input that they may equal. */
void test_in_place_agrees(const test_runner *r, const test_case *c, int within_tolerance);
/* Each gradient is the same if no other is wanted, each output if no other is written. */
void test_alone_agrees(const test_runner *r, const test_case *c, double tolerance);
/* An optional input that is NULL counts as the constant stated. */
void test_null_agrees(const test_runner *r, const test_case *c, double tolerance);
/* accumulate = 1 adds the numbers that accumulate = 0 writes. */
void test_accumulate_adds(const test_runner *r, const test_case *c);
/* A shared state equals the same state in every batch element; its gradient is the sum of theirs. */
void test_shared_agrees(const test_runner *r, const test_case *c, double tolerance);
/* The batch elements, or packed sequences, one by one; parameter gradients are their sum. */
void test_batch_splits(const test_runner *r, const test_case *c, double tolerance);
/* The first `at` tokens, then the rest from the state handed over; backward likewise in reverse. */
void test_time_splits(const test_runner *r, const test_case *c, int64_t at, double tolerance);
/* Forward of the first `at` tokens, then of the rest from the state handed over: the bits of one call. */
void test_prefill_splits(const test_runner *r, const test_case *c, int64_t at);
/* `count` independent pieces, by segment and join and their backward, agree with the double twin's whole. */
void test_pieces_agree(const test_runner *r, const test_case *c, int64_t count);
/* Packed sequences with their states in rows of pools: the bits of a call without pools, zeros for sequences without a
 * row, and nothing else read or written.  kind 0: packed rows, read and written in place; 1: aligned rows of two pools;
 * 2: rows, and channels of conv1d, in other strides, within the runner's tolerances. */
void test_pools_agree(const test_runner *r, const test_case *c, int kind);
/* A step of all tokens equals forward from its slots; skipped elements give 0 and other slots keep their bits. */
void test_step_agrees(const test_runner *r, const test_case *c, double tolerance);
/* Each batch element alone, from arrays of other alignment, `most` tokens at a time, gives the bits of one step of all.
 * So nothing depends on the batch, the pool row, the alignment or other elements. */
void test_step_is_alone(const test_runner *r, const test_case *c, int64_t most);
/* A step of one token with stochastic rounding, whose sums are exact because the tensor `zero` is 0 and `one`, unless
 * NULL, is 1: states have the bits of the twin.  Other seeds and steps give other bits.  And no bit depends on the
 * batch, the pool row or the alignment. */
void test_rounding_agrees(const test_runner *r, const test_case *c, const char *zero, const char *one);
/* The first `at` tokens by forward and the others in steps of up to `most` tokens agree with one forward. */
void test_steps_agree(const test_runner *r, const test_case *c, int64_t at, int64_t most, double tolerance);
/* Plays a server with speculative decoding.  Each round takes random sequences of a pool with random numbers of tokens.
 * It commits some tokens and sends the others again.  All results have the bits of steps of one token; elements out of
 * range are skipped. */
void test_server_agrees(const test_runner *r, const test_case *c, int rounds);
/* A NaN or infinity in one element of an input, at token at[0] in forward, at[1] in backward, or in the last row,
 * changes no more elements than in the double twin, with two exceptions: channels of the same token and head, and with
 * has_chunks the chunk of the operator's reach.  An output must not be finite where the fp32 twin's is not; may_vanish
 * drops this rule, for decays that underflow to 0.  every: spoils each input of each pass, one after the other; else
 * one input of one pass. */
void test_nonfinite_stays(const test_runner *r, const test_case *c, const int64_t at[2], int has_chunks, int every,
                          int may_vanish);

#ifdef __cplusplus
}
#endif
#endif
