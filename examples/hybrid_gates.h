/* Gates G0 to G4: health checks of a model on real batches.  Each gate measures some numbers, compares them with
 * bounds, and names the fault that a FAIL indicates.  A number between the PASS bound and the FAIL bound gives WARN. */
#ifndef HYBRID_GATES_H
#define HYBRID_GATES_H

#include "hybrid_model.h"
#include "hybrid_screen.h"

typedef enum hy_verdict { HY_PASS, HY_WARN, HY_FAIL, HY_SKIP /* the gate has nothing to judge */ } hy_verdict;

typedef struct hy_gate {
    const char *name;
    hy_verdict verdict;
    char value[64];      /* the measured numbers, as text */
    const char *bounds;  /* the PASS bound of each number, then in parentheses the FAIL bound of each */
    const char *against; /* the fault that a FAIL indicates */
} hy_gate;

/* G0: every operator of gt_kernels.h agrees with its CPU twin on small random arrays, forward and backward. */
hy_gate hy_gate_operators(hy_backend *backend);

/* G1: a forward pass of a whole batch counts every target and gives finite numbers only. */
hy_gate hy_gate_forward(const hy_probe *probe, int64_t counted, int64_t targets);

/* G2: judges the entropy of the untrained model's predictions, divided by its maximum ln(vocab).  A low quotient
 * means that the model is confident before it has learnt anything.  A quotient of 1, to all digits of a double,
 * means that the predictions do not depend on the input. */
hy_gate hy_gate_entropy(double entropy, int vocab);

/* G3: after `steps` steps the mean loss of the last steps is below the first loss.  The mean gradient norm of these
 * steps, before clipping, is within bounds. */
hy_gate hy_gate_training(int64_t steps, double first_loss, double loss, double norm);

/* G3 of a short run.  A few steps change the loss less than two batches differ, so this gate evaluates the first
 * batch before and after the steps.  The gradient norm is still falling then, so only its upper bound applies. */
hy_gate hy_gate_short_training(int64_t steps, double before, double after, double norm);

/* G3.5: the states are not zero, and their direction still changes in the second half of a window.  The numbers of
 * each layer's output are not all equal.  The gate skips a window of one token. */
hy_gate hy_gate_states(const hy_probe *probe);

/* G4: judges the quotient of two gradient norms: RWKV branches divided by Mamba branches.  The gate skips a model
 * with one branch. */
hy_gate hy_gate_balance(const hy_probe *probe, double ratio);

/* Prints the gates.  A gate's fault has a line of its own.  The bounds have one too, if they do not fit next to the
 * numbers. */
void hy_gates_print(const hy_screen *screen, const hy_gate *gates, int count);

#endif
