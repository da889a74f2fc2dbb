/* What must hold for every implementation of every operator, whatever its numbers are.  Each
 * function runs a case in two ways that have to agree: exactly if tolerance is 0, else in relative
 * l2; sums that were taken in different orders, within the runner's own tolerances.  A case that a
 * property does not apply to is left alone. */
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
/* Every layout gives what packed arrays give: the same bits or, if other kernels may take it, what agrees with the double
 * twin within the runner's tolerances. */
void test_layouts_agree(const test_runner *r, const test_case *c, int within_tolerance);
/* Outputs in the place of the input that they may equal. */
void test_in_place_agrees(const test_runner *r, const test_case *c, int within_tolerance);
/* Each gradient is the same when no other is asked for, each output when no other is written. */
void test_alone_agrees(const test_runner *r, const test_case *c, double tolerance);
/* An optional input that is NULL counts as the constant stated. */
void test_null_agrees(const test_runner *r, const test_case *c, double tolerance);
/* accumulate = 1 adds what accumulate = 0 writes. */
void test_accumulate_adds(const test_runner *r, const test_case *c);
/* A shared state is that state in every batch element, its gradient their sum. */
void test_shared_agrees(const test_runner *r, const test_case *c, double tolerance);
/* The batch elements, or packed sequences, one by one; parameter gradients are their sum. */
void test_batch_splits(const test_runner *r, const test_case *c, double tolerance);
/* The first `at` tokens, then the rest from the state handed over; backward likewise in reverse. */
void test_time_splits(const test_runner *r, const test_case *c, int64_t at, double tolerance);
/* In `count` pieces that know nothing of each other, by segment and join and their backward: as the double twin has the
 * whole. */
void test_pieces_agree(const test_runner *r, const test_case *c, int64_t count);
/* A step of all tokens is a forward from its slots; skipped elements give 0 and other slots keep their bits. */
void test_step_agrees(const test_runner *r, const test_case *c, double tolerance);
/* Each batch element alone, from arrays of other alignment, in `most` tokens at a time: the bits of a step of all, with
 * all tokens.  So nothing depends on the batch, the pool row, the alignment or other elements. */
void test_step_is_alone(const test_runner *r, const test_case *c, int64_t most);
/* The first `at` tokens by forward, the rest in steps of up to `most` tokens: as all at once. */
void test_steps_agree(const test_runner *r, const test_case *c, int64_t at, int64_t most, double tolerance);
/* A server of speculative decoding: rounds of random sequences of a pool, random numbers of tokens, some of which it
 * commits, others it sends again.  All has the bits of steps of one token; elements out of range are skipped. */
void test_server_agrees(const test_runner *r, const test_case *c, int rounds);
/* A NaN or infinity in one element of an input, at token at[0] in forward, at[1] in backward, or in the last row, changes
 * no more elements than in the double twin, but for two exceptions: channels of the same token and head, and with
 * has_chunks the chunk of the operator's reach.  And no output is finite where the fp32 twin's is not.  may_vanish lifts
 * that, for decays that come to 0.  every: spoils each input of each pass, one after the other; else one input of one
 * pass. */
void test_nonfinite_stays(const test_runner *r, const test_case *c, const int64_t at[2], int has_chunks, int every,
                          int may_vanish);

#ifdef __cplusplus
}
#endif
#endif
