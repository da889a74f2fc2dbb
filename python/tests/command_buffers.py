"""command_buffers.py FILE: runs operators of gt_kernels.jax on a GPU and stores their results in FILE, for test_jax.
XLA_FLAGS of the caller decides whether XLA captures the calls in command buffers, which are CUDA graphs.

Each function has a forward pass, a backward pass and, if the operator has one, a step.  It runs four times, because XLA
runs a new program once or twice before it captures it.  Runs have different values, in memory at different addresses."""

import sys

import jax
import numpy as np

import gt_kernels.jax as gt
import test_jax as t


def function_of(op):
    def run(arrays):
        (results, gradients) = t.with_gradients(gt, op, tuple(t.OPTIONS[op].items()))(arrays)
        return [*results, *jax.tree.leaves(gradients)]
    return jax.jit(run)


def step_of(op):
    def step(arrays):
        return jax.tree.leaves(t.function_of(gt, f"{op}_step")(**arrays, **t.OPTIONS[op], **t.NEEDED.get(op, {})))
    return jax.jit(step)


def main():
    stored = {}
    for op in t.OPS:
        functions = [("", function_of(op), lambda seed, op=op: t.make(op, "bfloat16", seed=seed))]
        if op in t.RECURRENT:
            functions.append((" step", step_of(op), lambda seed, op=op: t.make(op, "bfloat16", seed=seed, T=1)))
        for name, function, make in functions:
            kept = []
            for run in range(4):
                arrays = make(run)
                kept.append(arrays)  # so that the next arrays have other addresses
                for i, value in enumerate(function(arrays)):
                    stored[f"{op}{name} {run} {i}"] = np.asarray(value, np.float32)
    np.savez(sys.argv[1], **stored)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    with jax.default_device(t.DEVICES[-1]):
        main()
