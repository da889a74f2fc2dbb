/* Gates G0 to G4: health checks of a model on real batches.  Each gate has numbers, bounds, and the fault that it would
 * show.  A number between the PASS bound and the FAIL bound is a WARN. */
#ifndef HYBRID_GATES_H
#define HYBRID_GATES_H

#include "hybrid_model.h"
#include "hybrid_screen.h"

typedef enum hy_verdict { HY_PASS, HY_WARN, HY_FAIL, HY_SKIP /* nothing to judge */ } hy_verdict;

typedef struct hy_gate {
    const char *name;
    hy_verdict verdict;
    char value[64];      /* the numbers */
    const char *bounds;  /* PASS bounds, then FAIL bounds in parentheses; both in the order of the numbers */
    const char *against; /* the fault that the gate would show */
} hy_gate;

/* G0: on small random arrays every operator of gt_kernels.h agrees with its CPU twin, forward and backward. */
hy_gate hy_gate_operators(hy_backend *backend);

/* G1: a forward pass of a whole batch counts every target and gives finite numbers only. */
hy_gate hy_gate_forward(const hy_probe *probe, int64_t counted, int64_t targets);

/* G2: the entropy of the untrained model's predictions, divided by its maximum ln(vocab).  A low value means that the
 * predictions are confident before the model has learnt anything.  A value of 1 to all digits means that they do not
 * depend on the input. */
hy_gate hy_gate_entropy(double entropy, int vocab);

/* G3: after `steps` steps, the mean loss of the last steps is below the first loss, and their mean gradient norm before
 * clipping is within bounds. */
hy_gate hy_gate_training(int64_t steps, double first_loss, double loss, double norm);

/* G3 of a short run.  A few steps change the loss less than batches differ, so this gate compares the loss of the first
 * batch before and after the steps.  The gradient norm is still falling, so only its upper bound applies. */
hy_gate hy_gate_short_training(int64_t steps, double before, double after, double norm);

/* G3.5: the states are not zero, and their direction still changes in the second half of a window.  The numbers of each
 * layer's output are not all equal.  A window of one token is not judged. */
hy_gate hy_gate_states(const hy_probe *probe);

/* G4: the gradient norm of the RWKV branches divided by that of the Mamba branches.  A model with one branch is not
 * judged. */
hy_gate hy_gate_balance(const hy_probe *probe, double ratio);

/* Prints the gates.  A gate's fault has its own line; its bounds have one too if they do not fit next to the values. */
void hy_gates_print(const hy_screen *screen, const hy_gate *gates, int count);

#endif
