"""overhead.py [cuda|cpu]: microseconds of the host that a forward call of each operator takes beyond the C call, under
no_grad and with autograd, and a backward call.  Tensors are tiny and launches are asynchronous: what is measured is the
thread's time.  The C call is timed through ctypes, with the struct already made."""

import sys
import time

import torch

import gt_kernels.torch as gt
from gt_kernels.torch import _engine
from test_torch import INPUTS, call, make


def microseconds(work, runs=300, rounds=15):
    """The median over rounds of the mean of some runs."""
    times = []
    for _ in range(rounds):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(runs):
            work()
        times.append((time.perf_counter() - start) / runs * 1e6)
    return sorted(times)[rounds // 2]


def c_call(op, tensors):
    """A forward call that repeats what the last one of gt_kernels.torch gave to the library."""
    engine, recorded = _engine.ENGINES[op], []
    place = next(iter(tensors.values())).device.type
    for name in ("infer", "forward"):
        original = engine.functions[name, place]

        def record(*arguments, original=original):
            recorded[:] = [original, *arguments]
            return original(*arguments)

        engine.functions[name, place] = record
        with torch.set_grad_enabled(name == "forward"):
            keep = call(gt, op, tensors)
        engine.functions[name, place] = original
    function, *arguments = recorded
    function(*arguments)
    return lambda: function(*arguments), keep


def main():
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    print(f"{device}, PyTorch {torch.__version__}: microseconds of a call; what PyTorch adds is beside it")
    print(f"{'operator':<15} {'C call':>7} {'no_grad':>14} {'autograd':>14} {'backward':>9}")
    for op in INPUTS:
        tensors = make(op, device, torch.bfloat16, T=1, B=1)
        # the buffers that the recorded call wrote are gone: other tensors may have them, but none that is looked at
        direct, keep = c_call(op, tensors)
        base = microseconds(direct)
        with torch.no_grad():
            plain = microseconds(lambda: call(gt, op, tensors))
        graph = microseconds(lambda: call(gt, op, tensors))
        y, state = call(gt, op, tensors)
        leaves, dy = list(tensors.values()), torch.ones_like(y)
        backward = microseconds(lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True, allow_unused=True))
        print(f"{op:<15} {base:7.1f} {plain:7.1f} {plain - base:+6.1f} {graph:7.1f} {graph - base:+6.1f} {backward:9.1f}")


if __name__ == "__main__":
    main()
