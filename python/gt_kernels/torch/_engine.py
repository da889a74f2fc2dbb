"""The operators as PyTorch custom operators: gt_kernels::OP_infer, forward without gradients; OP_forward, which has
OP_backward as its gradient; and OP_step.

CUDA tensors run the kernels, on the current stream with memory from PyTorch's allocator; CPU tensors run the twins.  A
call is planned once for its shapes, strides, dtypes and options (_plan.py); from then on it costs a look-up, the
outputs' allocation and the C call.
"""

import ctypes
import warnings

import torch

from .. import c
from ._operators import OPERATORS
from ._plan import Planner

MAX_PLANS = 4096  # of one operator: a program whose shapes never repeat must not keep them all
warn_on_copy = [False]
_warned = set()
_KERNELS = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)

_library = torch.library.Library("gt_kernels", "DEF")
_TAGS = (getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order), torch.Tag.pt2_compliant_tag)


def _copy(operator, name, value):
    if warn_on_copy[0] and (operator, name) not in _warned:
        _warned.add((operator, name))
        warnings.warn(f"gt_kernels.torch.{operator}: {name} is copied at each such call: no layout of the C API has its "
                      f"strides {tuple(value.stride())}", stacklevel=2)
    return value.contiguous()


def _any_requires_grad(tensors):
    for tensor in tensors:
        if tensor is not None and tensor.requires_grad:
            return True
    return False


class Engine:
    """The custom operators of one operator."""

    def __init__(self, operator):
        self.operator, self.name = operator, operator.name
        self.planner = Planner(operator)
        self.plans = {}
        self.functions = {}
        inputs = tuple(tensor.name for tensor in operator.tensors)
        packed = ("cu_seqlens", "seq_count") if operator.recurrent else ()
        state, saved = ("dstate_out",) * operator.recurrent, ("saved",) * operator.has_saved
        self.inputs = inputs
        # the tensors of each call, in the order of its schema; then come the options, then what is wanted
        self.names = {"infer": inputs + packed, "forward": inputs + packed, "step": inputs[:-1] + ("state_out", "slots"),
                      "backward": ("dy",) + state + saved + inputs + packed}
        self.option_count = len(operator.options)
        self.results = ("y",) + ("state_out",) * operator.recurrent + saved
        self.gradients = tuple(f"d{name}" for name in inputs if name != operator.own_gradient)
        self.define()

    # ---- schemas ----

    def define(self):
        optional = {tensor.name for tensor in self.operator.tensors if tensor.optional}
        optional |= {"cu_seqlens", "seq_count", "slots", "dstate_out", "saved"}
        options = [f"{kind} {name}" for name, kind in self.operator.options]
        wanted = [f"bool {name}_wanted" for name in self.results[1:]]
        results = f"({', '.join('Tensor' for _ in self.results)})" if wanted else "Tensor"

        def tensors(call):
            return [f"Tensor{'?' if name in optional else '(a!)' if name == 'state_out' else ''} {name}"
                    for name in self.names[call]]

        infer_wanted = [text for text in wanted if "state" in text]
        self.define_one("infer", tensors("infer") + options + infer_wanted, "Tensor[]")
        self.define_one("forward", tensors("forward") + options + wanted, results)
        self.define_one("backward", tensors("backward") + options + ["int wanted"], "Tensor[]")
        self.add_autograd("forward", self.autograd_context, self.autograd_backward)
        self.add_autograd("backward", lambda ctx, arguments, output: None, self.double_backward)
        if self.operator.recurrent:
            self.define_one("step", tensors("step") + options, "Tensor")

    def define_one(self, call, arguments, results):
        name = f"{self.name}_{call}"
        _library.define(f"{name}({', '.join(arguments)}) -> {results}", tags=_TAGS)
        for key, prefix in (("CPU", "gt_ref_"), ("CUDA", "gt_")):
            function = f"{prefix}{self.name}_{'forward' if call == 'infer' else call}"
            self.functions[call, key.lower()] = getattr(c, function)
            _library.impl(name, lambda *arguments: self.run(call, arguments), key)
        torch.library.register_fake(f"gt_kernels::{name}", lambda *arguments: self.fake(call, arguments), lib=_library)

    def add_autograd(self, call, context, backward):
        """As torch.library.register_autograd does; but where nothing lies between autograd and the kernel, it is called
        without another turn through the dispatcher."""
        operator = getattr(getattr(torch.ops.gt_kernels, f"{self.name}_{call}"), "default")

        count = len(self.names[call])

        def below(keyset, arguments):
            keyset = keyset & torch._C._after_autograd_keyset
            if keyset.highestPriorityTypeId() in _KERNELS:
                return self.run(call, arguments)
            with torch._C._AutoDispatchBelowAutograd():
                return operator.redispatch(keyset, *arguments)

        def forward(ctx, keyset, *arguments):
            output = below(keyset, arguments)
            context(ctx, arguments, output)
            return tuple(output) if isinstance(output, list) else output

        def gradient(ctx, *gradients):
            return (None, *backward(ctx, *gradients))

        function = type(f"gt_kernels_{self.name}_{call}", (torch.autograd.Function,),
                        {"forward": staticmethod(forward), "backward": staticmethod(gradient)})

        def autograd(keyset, *arguments):
            if torch.is_grad_enabled() and _any_requires_grad(arguments[:count]):
                output = function.apply(keyset, *arguments)
                return list(output) if call == "backward" else output
            return below(keyset, arguments)

        _library.impl(f"{self.name}_{call}", autograd, "Autograd", with_keyset=True)

    # ---- calls ----

    def wanted(self, call, rest):
        """The fields of the outputs that a call asks for."""
        if call == "backward":
            return tuple(field for bit, field in enumerate(self.gradients) if rest[-1] >> bit & 1)
        flags = rest[self.option_count:]
        return ("y",) + tuple(field for field, is_wanted in zip(self.results[1:], flags) if is_wanted)

    def plan(self, call, values, rest):
        pairs = list(zip(self.names[call], values))
        return self.planner.plan(call, pairs, rest[:self.option_count], self.wanted(call, rest))

    def answer(self, call, plan, outputs, first):
        """What the schema promises: outputs of forward that were not asked for are empty."""
        if call == "step":
            return outputs[0]
        if call != "forward":
            return outputs
        if len(self.results) == 1:
            return outputs[0]
        found = {field: output for (field, *_), output in zip(plan.outputs, outputs)}
        return tuple(found[field] if field in found else
                     first.new_empty((0,), dtype=torch.uint8 if field == "saved" else torch.float32)
                     for field in self.results)

    def fake(self, call, arguments):
        count = len(self.names[call])
        plan = self.plan(call, arguments[:count], arguments[count:])
        outputs = [torch.empty_strided(shape, stride, dtype=dtype, device=plan.device)
                   for _, shape, stride, dtype in plan.outputs]
        return self.answer(call, plan, outputs, arguments[0])

    def run(self, call, arguments):
        device = arguments[0].device
        if device.type == "cuda" and device.index != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return self.run(call, arguments)
        count = len(self.names[call])
        values, rest = arguments[:count], arguments[count:]
        key = (call, rest, *[None if value is None else (value.shape, value.stride(), value.dtype, value.device)
                             for value in values])
        plan = self.plans.get(key)
        if plan is None:
            plan = self.plan(call, values, rest)
            if len(self.plans) >= MAX_PLANS:
                self.plans.clear()
            self.plans[key] = plan
        if plan.copies:
            values = list(values)
            for position, name in plan.copies:
                values[position] = _copy(self.name, name, values[position])
        args = self.operator.struct.from_buffer_copy(plan.template)
        alignment = 0
        for position, field in plan.fields:
            address = values[position].data_ptr()
            setattr(args, field, address)
            alignment = alignment << 4 | address & 15
        outputs = []
        for field, shape, stride, dtype in plan.outputs:
            output = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            setattr(args, field, output.data_ptr())
            outputs.append(output)
        if device.type == "cpu":
            status = self.functions[call, "cpu"](args)
        else:
            need = plan.workspace.get(alignment)
            if need is None:
                need = plan.workspace[alignment] = getattr(self.planner.ask(args), "forward" if call == "infer" else call)
            if need:
                workspace = torch.empty(need, dtype=torch.uint8, device=device)
                args.workspace, args.workspace_bytes = workspace.data_ptr(), need
            status = self.functions[call, "cuda"](args, torch._C._cuda_getCurrentRawStream(device.index))
        if status:
            c.check(status)
        return self.answer(call, plan, outputs, arguments[0])

    # ---- autograd ----

    def autograd_context(self, ctx, arguments, output):
        count = len(self.names["forward"])
        saved = output[-1] if self.operator.has_saved and arguments[-1] else None
        ctx.save_for_backward(*arguments[:count], saved)
        ctx.options = arguments[count:count + self.option_count]
        ctx.set_materialize_grads(False)

    def autograd_backward(self, ctx, dy, dstate_out=None, dsaved=None):
        *values, saved = ctx.saved_tensors
        needed = ctx.needs_input_grad[1:]  # without the key set
        if not self.operator.recurrent:
            dstate_out = None
        if dy is None:
            if dstate_out is None:
                return (None,) * len(needed)
            dy = torch.zeros_like(values[self.inputs.index(self.operator.like)])  # a loss of the final state alone
        needs = dict(zip((f"d{name}" for name in self.inputs), needed))
        bits = [bit for bit, field in enumerate(self.gradients) if needs[field]]
        found = {f"d{self.operator.own_gradient}": dy}
        if bits:
            before = (dy,) + (dstate_out,) * self.operator.recurrent + (saved,) * self.operator.has_saved
            backward = getattr(torch.ops.gt_kernels, f"{self.name}_backward")
            results = backward(*before, *values, *ctx.options, sum(1 << bit for bit in bits))
            found.update(zip((self.gradients[bit] for bit in bits), results))
        gradients = [None] * len(needed)
        for position, (tensor, value) in enumerate(zip(self.operator.tensors, values)):
            if needed[position]:
                gradient = found[f"d{tensor.name}"]
                gradients[position] = gradient.to(value.dtype) if tensor.kind == "p" else gradient
        return tuple(gradients)

    def double_backward(self, ctx, *_):
        raise NotImplementedError(f"gt_kernels.torch.{self.name}: gradients of gradients (create_graph=True, double "
                                  "backward) are not supported")


ENGINES = {operator.name: Engine(operator) for operator in OPERATORS}
