/* Properties that hold for every implementation of every operator, with any numbers.  Each function runs a case in two
 * ways and compares the results: they must be equal if tolerance is 0, else close in relative l2.  Where the two ways
 * sum in different orders, the results must agree within the runner's own tolerances.  A function skips cases that its
 * property does not apply to. */
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
/* Every layout gives the bits of packed arrays.  With within_tolerance, other kernels may take a layout; its results
 * must then agree with the double twin within the runner's tolerances. */
void test_layouts_agree(const test_runner *r, const test_case *c, int within_tolerance);
/* Writing an output over the input that it may equal gives the same results. */
void test_in_place_agrees(const test_runner *r, const test_case *c, int within_tolerance);
/* A gradient does not change if the call asks for no other gradient; the same holds for the outputs of forward. */
void test_alone_agrees(const test_runner *r, const test_case *c, double tolerance);
/* An optional input that is NULL gives the results of the constant that replaces it. */
void test_null_agrees(const test_runner *r, const test_case *c, double tolerance);
/* accumulate = 1 adds to a gradient the numbers that accumulate = 0 writes. */
void test_accumulate_adds(const test_runner *r, const test_case *c);
/* A state that the batch shares gives the results of the same state in every batch element.  Its gradient is the sum of
 * their gradients. */
void test_shared_agrees(const test_runner *r, const test_case *c, double tolerance);
/* Calls of one batch element, or one packed sequence, give the results of the whole call.  The whole call's parameter
 * gradients are the sum of theirs. */
void test_batch_splits(const test_runner *r, const test_case *c, double tolerance);
/* Running the first `at` tokens, and then the rest from the state in between, gives the results of one call.  Backward
 * runs the two parts in reverse. */
void test_time_splits(const test_runner *r, const test_case *c, int64_t at, double tolerance);
/* Forward of the first `at` tokens, and then of the rest from the state in between, gives the bits of one call. */
void test_prefill_splits(const test_runner *r, const test_case *c, int64_t at);
/* `count` independent pieces agree with the double twin's whole.  Segment and join run the pieces, forward and
 * backward. */
void test_pieces_agree(const test_runner *r, const test_case *c, int64_t count);
/* Packed sequences may have their states in rows of pools.  Such a call gives the bits of a call without pools, and
 * zeros for sequences without a row.  It reads and writes no other rows.  kind 0: packed rows, read and written in
 * place. kind 1: aligned rows of two pools.  kind 2: other strides of rows and of conv1d's channels, which must agree
 * within the runner's tolerances. */
void test_pools_agree(const test_runner *r, const test_case *c, int kind);
/* A step of all tokens gives the results of forward from the states in its slots.  Skipped elements give 0, and slots
 * that the step does not use keep their bits. */
void test_step_agrees(const test_runner *r, const test_case *c, double tolerance);
/* Steps of one batch element give the bits of one step of all.  The elements' arrays have another alignment, and their
 * steps take `most` tokens.  So no result depends on the batch, the pool row, the alignment or other elements. */
void test_step_is_alone(const test_runner *r, const test_case *c, int64_t most);
/* Checks a step of one token with stochastic rounding.  The sums are exact, because the tensor `zero` is 0 and the
 * tensor `one` is 1 (NULL: no such tensor).  So the states must have the bits of the twin.  Other seeds and steps must
 * give other bits.  No bit may depend on the batch, the pool row or the alignment. */
void test_small_states_agree(const test_runner *r, const test_case *c, int kind);
void test_rounding_agrees(const test_runner *r, const test_case *c, const char *zero, const char *one);
/* Forward of the first `at` tokens, and then steps of up to `most` tokens, agree with one forward. */
void test_steps_agree(const test_runner *r, const test_case *c, int64_t at, int64_t most, double tolerance);
/* Plays a server with speculative decoding.  A round takes random sequences of a pool, each with a random number of
 * tokens.  The server commits some of the tokens and sends the others again.  All results must have the bits of steps
 * of one token.  Elements whose slot is out of range are skipped. */
void test_server_agrees(const test_runner *r, const test_case *c, int rounds);
/* Puts a NaN or infinity into one element of an input: at token at[0] in forward, at token at[1] in backward, or in the
 * last row.  No more outputs may change than in the double twin, with two exceptions: channels of the same token and
 * head, and with has_chunks the chunk of the operator's reach.  An output must not be finite where the fp32 twin's is
 * not. may_vanish drops this last rule, for decays that underflow to 0.  every: spoils each input of each pass in turn;
 * else one input of one pass. */
void test_nonfinite_stays(const test_runner *r, const test_case *c, const int64_t at[2], int has_chunks, int every,
                          int may_vanish);

#ifdef __cplusplus
}
#endif
#endif
