/* Gates G0 to G4: checks of a model's health on real batches, each with its numbers, its bounds and the fault that it
 * guards against.  A number between the bounds of PASS and FAIL is a WARN. */
#ifndef HYBRID_GATES_H
#define HYBRID_GATES_H

#include "hybrid_model.h"
#include "hybrid_screen.h"

typedef enum hy_verdict { HY_PASS, HY_WARN, HY_FAIL, HY_SKIP /* nothing to judge */ } hy_verdict;

typedef struct hy_gate {
    const char *name;
    hy_verdict verdict;
    char value[64];      /* the numbers */
    const char *bounds;  /* of PASS, and in parentheses of FAIL, in the order of the numbers */
    const char *against; /* the fault that it would show */
} hy_gate;

/* G0: forward and backward of every operator of gt_kernels.h on this backend agree with the CPU twins, on small random
 * arrays. */
hy_gate hy_gate_operators(hy_backend *backend);

/* G1: a forward pass of a whole batch counts every target and gives finite numbers only. */
hy_gate hy_gate_forward(const hy_probe *probe, int64_t counted, int64_t targets);

/* G2: the entropy of the untrained model's predictions, as a part of ln(vocab), which it cannot
 * exceed: low if they are confident before anything is learnt, ln(vocab) to all digits if they do
 * not depend on the input. */
hy_gate hy_gate_entropy(double entropy, int vocab);

/* G3: after `steps` steps the mean loss of the last ones is under the first loss, and their gradient
 * norm before clipping is in bounds. */
hy_gate hy_gate_training(int64_t steps, double first_loss, double loss, double norm);

/* The same of a run that is too short for that, as losses of different batches differ by more than a
 * few steps change: `before` and `after` are the loss of the first batch, and the norm, which is
 * still falling, has its upper bound alone. */
hy_gate hy_gate_short_training(int64_t steps, double before, double after, double norm);

/* G3.5: the states are not zero and still turn in the second half of a window, and layer outputs
 * differ.  A window of one token is not judged. */
hy_gate hy_gate_states(const hy_probe *probe);

/* G4: gradient norm of the RWKV branches, divided by the norm of the Mamba branches.  A model with one branch is not
 * judged. */
hy_gate hy_gate_balance(const hy_probe *probe, double ratio);

/* The fault that a gate guards against has a line of its own; so have the bounds if they do not fit beside the values.
 * */
void hy_gates_print(const hy_screen *screen, const hy_gate *gates, int count);

#endif
