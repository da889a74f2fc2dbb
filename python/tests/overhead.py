"""overhead.py [cuda|cpu]: measures the overhead of each operator in host microseconds.

It times forward under no_grad and with autograd, and prints what each adds to the C call.  It also times backward, and
the apply of a bare torch.autograd.Function, which saves the same tensors and returns an empty tensor.  Tensors are tiny
and launches are asynchronous, so it measures the time of the host thread.  It times each C call through ctypes, with
the struct already made.  The C call for autograd saves arrays for backward, the one for no_grad does not.
Each number is the median of 1,000 calls.  Calls of one operator take turns, so other load affects them alike."""

import ctypes
import statistics
import sys
import time

import torch

import gt_kernels.torch as gt
from gt_kernels.torch import _engine
from test_torch import INPUTS, STATES, make


def prepared(op, tensors):
    """A call like test_torch.call, but without joining the results, and with arguments that are made in advance."""
    values = [tensors[name] for name in INPUTS[op].split() if name not in STATES]
    states = {name: tensors[name] for name in INPUTS[op].split() if name in STATES}
    options = {"state_size": 8, "groups": 2} if op == "conv_ssd" else {}
    options.update(states, **({"final_state": True} if states else {}))
    function = getattr(gt, op)
    return lambda: function(*values, **options)


class Bare(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *tensors):
        ctx.save_for_backward(*tensors)
        return torch.empty_like(tensors[0])

    @staticmethod
    def backward(ctx, dy):
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors)


def medians(*works, count=1000):
    """The median of `count` calls of each function, in microseconds."""
    times = [[] for _ in works]
    for i in range(count + 20):
        for work, own in zip(works, times):
            start = time.perf_counter()
            work()
            own.append(time.perf_counter() - start)
        if i % 20 == 0 and torch.cuda.is_available():
            torch.cuda.synchronize()
    return [statistics.median(own[20:]) * 1e6 for own in times]


def c_call(op, tensors):
    """Returns the C call that forward of gt_kernels.torch makes with the same arguments, and the objects that it
    needs."""
    engine, recorded, keep = _engine.ENGINES[op], [], []
    key = "forward" if torch.is_grad_enabled() else "infer", next(iter(tensors.values())).device.type
    original, execute = engine.functions[key], engine.execute

    def record(arguments, *stream):
        recorded[:] = [type(arguments._obj).from_buffer_copy(arguments._obj), *stream]
        return original(arguments, *stream)

    def keep_outputs(*arguments):
        keep.append(execute(*arguments))
        return list(keep[-1])

    engine.functions[key], engine.execute = record, keep_outputs
    prepared(op, tensors)()
    engine.functions[key] = original
    del engine.execute
    # The workspace of the call has been freed.  Other tensors may use that memory, but nothing reads their values.
    arguments = [ctypes.byref(recorded[0]), *recorded[1:]]
    return lambda: original(*arguments), (recorded, keep)


def main():
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    print(f"{device}, PyTorch {torch.__version__}: microseconds of a call; +: beyond the C call; share: "
          "of autograd, + / bare")
    print(f"{'operator':<15} {'C call':>7} {'no_grad':>14} {'C call':>7} {'autograd':>14} {'bare':>6} {'share':>6} "
          f"{'backward':>9}")
    for op in INPUTS:
        tensors = make(op, device, torch.bfloat16, T=1, B=1)
        call = prepared(op, tensors)
        leaves = list(tensors.values())
        with torch.no_grad():
            direct, keep = c_call(op, tensors)
            infer, plain = medians(direct, call)
        direct, keep = c_call(op, tensors)
        base, graph, bare = medians(direct, call, lambda: Bare.apply(*leaves))
        y = call()
        y = y[0] if isinstance(y, tuple) else y
        dy = torch.ones_like(y)
        (backward,) = medians(lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True, allow_unused=True))
        print(f"{op:<15} {infer:7.1f} {plain:7.1f} {plain - infer:+6.1f} {base:7.1f} {graph:7.1f} {graph - base:+6.1f} "
              f"{bare:6.1f} {(graph - base) / bare:6.2f} {backward:9.1f}")


if __name__ == "__main__":
    main()
