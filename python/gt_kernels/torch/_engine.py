"""The operators as PyTorch custom operators.  gt_kernels::OP_infer is forward without gradients.  OP_forward is forward
with OP_backward as its gradient.  OP_step is a decoding step.  OP_pool is packed forward with states in rows of pools.
OP_snapshots is forward without gradients that also fills the caller's buffers of snapshots.

CUDA tensors run the kernels, on the current stream with memory from PyTorch's allocator.  CPU tensors run the twins.  A
call is planned once for its shapes, strides, dtypes and options (_plan.py).  A later call with the same plan costs a
look-up, the allocation of outputs, and the C call.

Engine.call skips PyTorch's dispatcher if nothing but autograd could come between the call and the kernel.  Then no
mode, transform, trace, profiler or subclass of Tensor is active.  The dispatcher's path through Python costs more than
the rest of a call.
"""

import ctypes
import warnings

import torch
from torch.autograd import forward_ad

from .. import c
from .._arguments import refuse
from .._operators import OPERATORS, gradient, leaf, reads, schema_name
from ._errors import check_tensor, rename
from ._plan import DTYPES, Planner

MAX_PLANS = 4096  # per operator, so that a program whose shapes never repeat does not keep a plan for each
warn_on_copy = [False]
_warned = set()
_KERNELS = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)

_library = torch.library.Library("gt_kernels", "DEF")
_TAGS = (getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order), torch.Tag.pt2_compliant_tag)


def _copy(operator, name, value):
    if warn_on_copy[0] and (operator, name) not in _warned:
        _warned.add((operator, name))
        warnings.warn(f"gt_kernels.torch.{operator}: {name} is copied in each such call, because no layout of the C API has "
                      f"its strides {tuple(value.stride())}", stacklevel=2)
    return value.contiguous()


def _any_requires_grad(tensors):
    for tensor in tensors:
        if tensor is not None and tensor.requires_grad:
            return True
    return False


def _is_plain():
    """Returns whether no mode, transform, trace or profiler of PyTorch needs to see calls of operators."""
    return not (torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
                or torch._C._are_functorch_transforms_active() or torch._C._autograd._profiler_enabled()
                or torch._C._get_tracing_state() is not None or forward_ad._current_level >= 0)


def _allocators():
    """Returns {device type: allocation function of shape, stride and dtype}, for the current CUDA device.  Uses the
    functions of PyTorch's compiled code if they exist, since torch.empty_strided takes three times as long."""
    def slow(device):
        return lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype, device=device)

    try:
        guards = torch._C._dynamo.guards
    except AttributeError:
        guards = None
    return {device: getattr(guards, f"_empty_strided_{device}", None) or slow(device) for device in ("cpu", "cuda")}


def _are_plain(tensors):
    """Returns whether tensors have PyTorch's own types, and their memory holds their values: no subclass, no negated
    view and no zero tensor without memory."""
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in _TYPES or tensor.is_neg() or tensor._is_zerotensor()):
            return False
    return tensors[0] is not None and tensors[0].device.type in _EMPTY


_EMPTY = _allocators()
_TYPES = (torch.Tensor, torch.nn.Parameter)
_data_ptr = torch.Tensor.data_ptr
# A class of PyTorch's compiler that checks all tensors of a call at once: types, dtypes, devices, shapes, strides and
# dispatch keys.
_GUARDS = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)
_READS_Y = ("cuda",)  # the twins make dz without y
MOST_CHECKS = 8  # per combination of options; calls with further kinds of tensors look up their plan
_any_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def _float(tensor):
    return tensor if tensor.dtype == torch.float32 else tensor.float()


def _int32(function, name, tensor):
    """Converts a tensor to int32.  A number beyond int32 becomes the nearest int32, so that it stays out of range.  A
    check would have to wait for the device."""
    if tensor.dtype == torch.int32:
        return tensor
    if tensor.dtype not in (torch.int64, torch.int16, torch.int8, torch.uint8):
        refuse(function, f"{name} has dtype {tensor.dtype}: must be int32 or int64", c.GT_ERROR_DTYPE)
    return (tensor.clamp(-2 ** 31, 2 ** 31 - 1) if tensor.dtype == torch.int64 else tensor).to(torch.int32)


class Engine:
    """The custom operators of one operator."""

    def __init__(self, operator):
        self.operator, self.name = operator, operator.name
        self.planner = Planner(operator)
        self.plans = {}
        self.seen = {}  # {kind of call: [(check of tensors, plan, whether a backward pass may follow)]}
        self.functions = {}
        inputs = tuple(tensor.name for tensor in operator.tensors)
        packed = ("cu_seqlens", "seq_count") if operator.is_recurrent else ()
        saved = ("saved",) * operator.has_saved
        self.inputs = inputs
        self.state_count = sum(tensor.is_state for tensor in operator.tensors)
        self.y_count = len(operator.outputs) - self.state_count
        gradients = [schema_name(gradient(output.field)) for output in operator.outputs]
        self.inner = tuple(output.field for output in operator.inner)
        # The indices, among the outputs, of each y or sum that backward may read (reads_y, reads_sum).
        self.kept = [i for i, output in enumerate(operator.outputs)
                     if output.like and reads(output.field) in operator.fields]
        # The index of the option reads_sum.  None: the operator lacks this option, and the engine decides.
        self.reads_sum = next((i for i, (field, _) in enumerate(operator.options) if field == "reads_sum"), None)
        kept = tuple(map(schema_name, (*(operator.outputs[i].field for i in self.kept), *self.inner)))
        # The tensors of each call, in the order of its schema.  Behind the tensors a schema has the options, then the
        # wanted outputs.
        self.names = {"infer": inputs + packed, "forward": inputs + packed,
                      "backward": (*gradients, *saved, *kept) + inputs + packed}
        states = self.planner.state_in_place
        in_place = tuple(states.get(name, name) for name in inputs)
        self.states = tuple(states.values())
        if operator.has_steps:
            self.names["step"] = in_place + operator.of_steps
        if operator.has_pools:
            self.names["pool"] = in_place + packed + ("slots", "starts_zero") + operator.of_snapshots
        if operator.of_snapshots:
            self.names["snapshots"] = inputs + packed + operator.of_snapshots
        if operator.decays:  # for batches without packed sequences: see distributed.py
            self.names.update(segment=inputs, segment_backward=("dy",) + inputs)
        # How each call converts its tensors: one letter for each, see convert().  "-" means no conversion.
        kinds = "".join(tensor.kind for tensor in operator.tensors)
        self.kinds = {"infer": kinds + "i" * len(packed)}
        no_change = "-" * len(operator.of_snapshots)
        self.kinds["snapshots"] = self.kinds["infer"] + no_change
        kinds = kinds[:len(inputs) - self.state_count] + "-" * self.state_count
        self.kinds.update(step=kinds + "i" * len(operator.of_steps), pool=kinds + "iiii" + no_change)
        self.option_count = len(operator.options)
        # the options of each call, of which snapshot_every is the last
        self.option_counts = dict.fromkeys(self.names, self.option_count)
        for call in ("pool", "snapshots") * bool(operator.of_snapshots):
            self.option_counts[call] += 1
        self.results = tuple(output.field for output in operator.outputs) + self.inner + saved
        self.gradients = tuple(gradient(tensor.field) for tensor in operator.tensors
                               if tensor.name != operator.own_gradient)
        # Names in the schema or struct, and the names that callers know for these arguments.
        self.public = {"state_in": "state", "state_out": "state", "conv_state_in": "conv_state",
                       "conv_state_out": "conv_state", "slot_capacity": "the rows of state",
                       "wkv6_state_in": "wkv_state", "ssd_state_in": "ssm_state", "wkv6_state_out": "wkv_state",
                       "ssd_state_out": "ssm_state", "dt_min": "dt_limit[0]",
                       "dt_max": "dt_limit[1]", "seq_capacity": "the sequences of cu_seqlens"}
        names = {"H": "heads", "N": "state_size", "G": "groups"}
        self.public.update({"ssd.dt_min": "dt_limit[0]", "ssd.dt_max": "dt_limit[1]", "wkv6.scale": "scale"})
        self.public.update((field, names[field]) for field, _ in operator.options if field in names)
        self.define()

    def function(self, call):
        return f"gt_kernels.torch.{self.operator.c_name}" + {"step": "_step", "backward": ", backward"}.get(call, "")

    # ---- schemas ----

    def define(self):
        optional = {tensor.name for tensor in self.operator.tensors if tensor.optional}
        optional |= {"cu_seqlens", "seq_count", "saved", "starts_zero", *self.operator.of_steps}
        optional |= {schema_name(self.operator.outputs[i].field) for i in self.kept} | set(map(schema_name, self.inner))
        optional |= {schema_name(gradient(output.field)) for output in self.operator.outputs if output.kind != "x"}
        options = [f"{kind} {leaf(field)}" for field, kind in self.operator.options]
        wanted = [f"bool {schema_name(field)}_wanted" for field in self.results[self.y_count:]]

        def several(fields):
            return f"({', '.join('Tensor' for _ in fields)})" if len(fields) > 1 else "Tensor"

        every = ["int snapshot_every"] * bool(self.operator.of_snapshots)
        written = {name: f"({letter}!)" for name, letter in zip(self.states + self.operator.of_snapshots, "abcd")}
        optional |= set(self.operator.of_snapshots)

        def tensors(call):
            return [f"Tensor{written.get(name, '')}{'?' if name in optional else ''} {name}"
                    for name in self.names[call]]

        self.define_one("infer", tensors("infer") + options + wanted[:self.state_count], "Tensor[]")
        self.define_one("forward", tensors("forward") + options + wanted, several(self.results))
        self.define_one("backward", tensors("backward") + options + ["int wanted"], "Tensor[]")
        if every:
            self.define_one("snapshots", tensors("snapshots") + options + every, several(self.operator.outputs))
            self.add_autograd("snapshots")
        self.add_autograd("infer")
        self.add_autograd("forward", self.autograd_context, self.autograd_backward)
        self.add_autograd("backward", lambda ctx, arguments, output: None, self.double_backward)
        for call in ("step", "pool"):
            if call in self.names:
                self.define_one(call, tensors(call) + options + every * (call == "pool"),
                                several(self.results[:self.y_count]))
                self.add_autograd(call)
        for call in ("segment", "segment_backward", "join", "join_backward"):
            for device, prefix in (("cpu", "gt_ref_"), ("cuda", "gt_")) * bool(self.operator.decays):
                self.functions[call, device] = getattr(c, f"{prefix}{self.operator.c_name}_{call}")
        self.direct = self.make_direct()

    def define_one(self, call, arguments, results):
        name = f"{self.name}_{call}"
        _library.define(f"{name}({', '.join(arguments)}) -> {results}", tags=_TAGS)
        for key, prefix in (("CPU", "gt_ref_"), ("CUDA", "gt_")):
            function = "forward" if call in ("infer", "pool", "snapshots") else call
            self.functions[call, key.lower()] = getattr(c, f"{prefix}{self.operator.c_name}_{function}")
            _library.impl(name, lambda *arguments: self.run(call, arguments), key)
        torch.library.register_fake(f"gt_kernels::{name}", lambda *arguments: self.fake(call, arguments), lib=_library)

    def add_autograd(self, call, context=None, backward=None):
        """Registers autograd, like torch.library.register_autograd.  But if no other dispatch key is active below
        autograd, the kernel is called directly, which saves a pass through the dispatcher.  Without `backward`,
        gradients are refused; tangents are always refused."""
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
            self.refuse_tangents(call, arguments[:count])
            if backward is None:
                self.refuse_gradients(call, arguments[:count])
            elif torch.is_grad_enabled() and _any_requires_grad(arguments[:count]):
                output = function.apply(keyset, *arguments)
                return list(output) if call == "backward" else output
            return below(keyset, arguments)

        _library.impl(f"{self.name}_{call}", autograd, "Autograd", with_keyset=True)

    # ---- calls ----

    def wanted(self, call, rest):
        """The fields of the outputs that a call requests."""
        if call in ("segment", "segment_backward"):
            return ("state_out" if call == "segment" else "dstate_in", "decay_out")
        if call == "backward":
            return tuple(field for bit, field in enumerate(self.gradients) if rest[-1] >> bit & 1)
        if call == "snapshots":
            return self.results[:len(self.operator.outputs)]
        flags = rest[self.option_counts[call]:]
        return self.results[:self.y_count] + tuple(
            field for field, is_wanted in zip(self.results[self.y_count:], flags) if is_wanted)

    def plan(self, call, values, rest):
        pairs = list(zip(self.names[call], values))
        try:
            return self.planner.plan(call, pairs, rest[:self.option_counts[call]], self.wanted(call, rest))
        except c.Error as error:
            rename(error, self.function(call), self.public)
            raise

    def answer(self, call, plan, outputs, first):
        """Returns the outputs that the schema promises.  Outputs of forward that were not requested are empty
        tensors."""
        if call in ("step", "pool"):
            return outputs[0] if self.y_count == 1 else tuple(outputs)
        if call == "snapshots":
            return tuple(outputs)
        if call != "forward":
            return outputs
        if len(self.results) == 1:
            return outputs[0]
        if len(outputs) == len(self.results):
            return tuple(outputs)
        found = {field: output for (field, *_), output in zip(plan.outputs, outputs)}
        return tuple(found[field] if field in found else
                     first.new_empty((0,), dtype=torch.uint8 if field == "saved" else torch.float32)
                     for field in self.results)

    def fake(self, call, arguments):
        count = len(self.names[call])
        plan = self.plan(call, arguments[:count], arguments[count:])
        outputs = [torch.empty_strided(shape, stride, dtype=dtype, device=plan.device)
                   for _, _, shape, stride, dtype in plan.outputs]
        return self.answer(call, plan, outputs, arguments[0])

    def run(self, call, arguments):
        count = len(self.names[call])
        values, rest = arguments[:count], arguments[count:]
        plan = self.find_plan(call, values, rest)
        present = [value for value in values if value is not None]
        return self.answer(call, plan, self.execute(call, plan, present), values[0])

    def find_plan(self, call, values, rest):
        key = (call, rest, *[None if value is None else (value.shape, value.stride(), value.dtype, value.device,
                                                                 value.layout)
                             for value in values])
        plan = self.plans.get(key)
        if plan is None:
            plan = self.plan(call, values, rest)
            if len(self.plans) >= MAX_PLANS:
                self.plans.clear()
            self.plans[key] = plan
        return plan

    def execute(self, call, plan, tensors):
        """Makes a planned call with the tensors that are not None.  Returns the outputs in the order of the plan."""
        device, is_cuda = plan.device, plan.is_cuda
        if is_cuda and device.index != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return self.execute(call, plan, tensors)
        for tensor, size, end in zip(tensors, plan.item_sizes, plan.ends):
            if end and tensor.untyped_storage().nbytes() < tensor.storage_offset() * size + end:
                self.fail_storage(call, plan, tensors)
        if plan.copies:
            tensors = list(tensors)
            for position, name in plan.copies:
                tensors[position] = _copy(self.operator.c_name, name, tensors[position])
        args, words, reference = arguments = plan.take()
        addresses, outputs, empty, bits = list(map(_data_ptr, tensors)), [], _EMPTY[device.type], 0
        for place, address in zip(plan.inputs, addresses):
            words[place] = address
            bits |= address
        for place, position in plan.twins:
            words[place] = addresses[position]
        for _, place, shape, stride, dtype in plan.outputs:
            output = empty(shape, stride, dtype)
            words[place] = output.data_ptr()
            outputs.append(output)
        scratch = [(place, empty(shape, stride, dtype)) for _, place, shape, stride, dtype in plan.scratch]
        for place, memory in scratch:
            words[place] = memory.data_ptr()
        if is_cuda:
            alignment = bits & 15 and tuple([address & 15 for address in addresses])  # 0: all are multiples of 16
            need = plan.workspace.get(alignment)
            if need is None:
                args.workspace, args.workspace_bytes = None, 0  # these belong to the previous call
                need = self.ask(call, args)
                field = {"infer": "forward", "pool": "forward", "snapshots": "forward",
                         "segment_backward": "segment"}.get(call, call)
                need = plan.workspace[alignment] = getattr(need, field)
            workspace = empty((need,), (1,), torch.uint8) if need else None
            args.workspace, args.workspace_bytes = workspace.data_ptr() if need else None, need
            status = self.functions[call, "cuda"](reference, torch._C._cuda_getCurrentRawStream(device.index))
        else:
            status = self.functions[call, "cpu"](reference)
        plan.give(arguments)
        if status:
            self.check(call, status)
        for position in plan.states:
            if not tensors[position].is_inference():
                torch.autograd.graph.increment_version(tensors[position])  # the kernel has written to its address
        return outputs

    def check(self, call, status):
        try:
            c.check(status)
        except c.Error as error:
            rename(error, self.function(call), self.public)
            raise

    def ask(self, call, args):
        try:
            return self.planner.ask(args)
        except c.Error as error:
            rename(error, self.function(call), self.public)
            raise

    def fail_storage(self, call, plan, tensors):
        for name, tensor, size, end in zip(plan.names, tensors, plan.item_sizes, plan.ends):
            needed, there = tensor.storage_offset() * size + end, tensor.untyped_storage().nbytes()
            if there < needed:
                refuse(self.function(call), f"{self.public.get(name, name)} has {there} bytes of memory, but its shape "
                       f"and strides need {needed}")

    def join(self, call, states, decays, first):
        """Calls join or join_backward: computes the state that each piece starts from, or the gradient of the state
        that it ends with.  The result overwrites states [pieces,B,...].  first: the state before all pieces (join) or
        the gradient after all pieces (join_backward), or None."""
        sizes = dict(zip(self.operator.outputs[-1].shape.replace("@", "B"), map(int, states.shape[1:])))
        args = self.operator.struct(**sizes, pieces=len(states), piece_states=states.data_ptr(),
                                    piece_decays=decays.data_ptr(), piece_starts=states.data_ptr())
        if first is not None:
            setattr(args, "state_in" if call == "join" else "dstate_out", first.data_ptr())
        if states.is_cuda:
            with torch.cuda.device(states.device):
                stream = torch._C._cuda_getCurrentRawStream(states.device.index)
                self.check(call, self.functions[call, "cuda"](ctypes.byref(args), stream))
        else:
            self.check(call, self.functions[call, "cpu"](ctypes.byref(args)))
        return states

    # ---- calls from gt_kernels.torch ----

    def call(self, tensors, options, final_state, recompute):
        """Forward, with the caller's tensors.  Returns each y and, if wanted, each final state."""
        if _any_autocast():
            tensors = self.convert("infer", tensors)
        rest = self.rest(tensors, options, final_state, recompute)
        if not _is_plain():
            return self.dispatch(self.convert("infer", tensors), rest)
        present = [tensor for tensor in tensors if tensor is not None]
        seen_key = (torch.is_grad_enabled(), rest, *map(type, tensors))
        seen = self.find_seen(seen_key, present)
        for check, plan, has_gradient in seen:
            if check(*present):
                break
        else:
            right = self.convert("infer", tensors)
            if not _are_plain(tensors):
                return self.dispatch(right, rest)
            if any(a is not b for a, b in zip(right, tensors)):
                return self.call(right, options, final_state, recompute)
            has_gradient = seen_key[0] and _any_requires_grad(present)
            plan = self.find_plan("forward" if has_gradient else "infer", tensors,
                                  rest if has_gradient else rest[:self.option_count + self.state_count])
            self.remember(seen_key, present, plan, has_gradient)
        if has_gradient:
            return self.direct.apply(plan, rest, *tensors)
        return self.execute("infer", plan, present)

    def update(self, call, tensors, options):
        """A step, forward with a pool, or forward that fills snapshots.  Returns the outputs, and updates states in
        place."""
        if _any_autocast():
            tensors = self.convert(call, tensors)
        if not _is_plain():
            return self.dispatch_update(call, self.convert(call, tensors), options)
        present = [tensor for tensor in tensors if tensor is not None]
        seen_key = (call, torch.is_grad_enabled(), options, *map(type, tensors))
        seen = self.find_seen(seen_key, present)
        for check, plan, _ in seen:
            if check(*present):
                break
        else:
            right = self.convert(call, tensors)
            if not _are_plain(tensors):
                return self.dispatch_update(call, right, options)
            if any(a is not b for a, b in zip(right, tensors)):
                return self.update(call, right, options)
            self.refuse_gradients(call, present)
            plan = self.find_plan(call, tensors, options)
            self.remember(seen_key, present, plan, False)
        return self.execute(call, plan, present)

    def rest(self, tensors, options, final_state, recompute):
        """The arguments after the tensors in the schema of forward."""
        inner = self.keeps_inner(tensors) if self.inner else ()
        return options + (bool(final_state),) * self.state_count + inner + (not recompute,) * self.operator.has_saved

    def keeps_inner(self, tensors):
        """Returns, for each inner output, whether backward reads it: for the gradient of its gain, or for dz."""
        if not torch.is_grad_enabled():
            return (False,) * len(self.inner)
        gains = [tensors[self.inputs.index(output.gain)] for output in self.operator.inner]
        return tuple(bool(getattr(gain, "requires_grad", False)
                          or (reads(field) in self.operator.fields and self.reads_y(tensors)))
                     for field, gain in zip(self.inner, gains))

    def reads_y(self, tensors):
        """Whether backward reads y for dz.  On a GPU it does in bf16."""
        z = tensors[self.inputs.index("z")]
        return isinstance(z, torch.Tensor) and z.dtype == torch.bfloat16 and z.device.type in _READS_Y

    def find_seen(self, key, tensors):
        """The stored checks of `key`.  If a tensor is nested, returns no checks, because PyTorch's check would end the
        process."""
        seen = self.seen.get(key, ())
        if seen:
            for tensor in tensors:
                if tensor.is_nested:
                    return ()
        return seen

    def remember(self, key, tensors, plan, has_gradient):
        """Stores a check of all tensors, so that the next call with such tensors finds its plan by one check."""
        if _GUARDS is None:
            return
        if len(self.seen) >= MAX_PLANS:
            self.seen.clear()
        entries = self.seen.setdefault(key, [])
        if len(entries) < MOST_CHECKS:
            guards = _GUARDS(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
            entries.append((guards.check, plan, has_gradient))

    def refuse_gradients(self, call, tensors):
        if torch.is_grad_enabled() and _any_requires_grad(tensors):
            does, other = {
                "step": ("updates the state in place", "the function without _step"),
                "pool": ("updates the state in place", "a call without slots"),
                "snapshots": ("writes snapshots", "a call without snapshots")}.get(call, (None, None))
            text = (f"this call {does} and has no gradients: call it under torch.no_grad(), or use {other}"
                    if does else "this call has no gradients: use the operator of forward")
            refuse(self.function(call), text, c.GT_ERROR_UNSUPPORTED)

    def refuse_tangents(self, call, tensors):
        if forward_ad._current_level < 0:
            return
        for tensor in tensors:
            if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
                refuse(self.function(call), "forward-mode derivatives (jvp, jacfwd, linearize, forward_ad) are not "
                       "supported", c.GT_ERROR_UNSUPPORTED)

    def convert(self, call, tensors):
        """Converts tensors to the dtypes that an operator accepts.  Activations get the dtype of autocast.  Companions
        such as w and dt get the dtype of activations or float32, parameters get float32.  Tensors of the right dtype do
        not change."""
        kinds, function = self.kinds[call], self.function(call)
        names = [self.public.get(name, name) for name in self.names[call]]
        for kind, name, tensor in zip(kinds, names, tensors):
            if tensor is not None:
                check_tensor(function, name, tensor)
                if kind != "i" and not tensor.is_floating_point():
                    refuse(function, f"{name} has dtype {tensor.dtype}: must be a floating-point dtype",
                           c.GT_ERROR_DTYPE)
        if call != "infer" and not torch.compiler.is_dynamo_compiling():
            written = () if call == "snapshots" else self.states
            for name, public, state in zip(self.names[call], names, tensors):
                if state is None or not (name in written or name in self.operator.of_snapshots):
                    continue
                if state.is_neg() or state._is_zerotensor():
                    what = "a negated view" if state.is_neg() else "zeros without memory"
                    refuse(function, f"{public} is {what}: must be a plain tensor, because it is updated in place",
                           c.GT_ERROR_STRIDE)
        first = tensors[0]
        dtype = None if first is None else first.dtype
        if first is not None and first.device.type != "meta" and torch.is_autocast_enabled(first.device.type):
            dtype = torch.get_autocast_dtype(first.device.type)
        else:
            kinds = kinds.replace("x", "-").replace("p", "-")
        if call == "step":  # parameters stay, if all have one dtype that the kernels support
            dtypes = {tensor.dtype for kind, tensor in zip(kinds, tensors) if kind == "P" and tensor is not None}
            if len(dtypes) == 1 and all(dtype in DTYPES for dtype in dtypes):
                kinds = kinds.replace("P", "-")
        result = []
        for kind, name, tensor in zip(kinds, names, tensors):
            if tensor is None or kind == "-":
                pass
            elif kind in "xp":
                tensor = tensor.to(dtype)
            elif kind == "w":
                tensor = tensor if tensor.dtype in (dtype, torch.float32) else tensor.to(dtype)
            else:
                tensor = _int32(function, name, tensor) if kind == "i" else _float(tensor)
            result.append(tensor)
        return tuple(result)

    def dispatch(self, tensors, rest):
        """Like `call`, but through PyTorch's operators, also under torch.compile.  Tensors have the right dtypes."""
        if not (torch.is_grad_enabled() and _any_requires_grad(tensors)):
            rest = rest[:self.option_count + self.state_count]
            return getattr(torch.ops.gt_kernels, f"{self.name}_infer")(*tensors, *rest)
        results = getattr(torch.ops.gt_kernels, f"{self.name}_forward")(*tensors, *rest)
        if len(self.results) == 1:
            return (results,)
        wants_states = self.state_count and rest[self.option_count]
        return results[: len(self.operator.outputs) if wants_states else self.y_count]

    def dispatch_update(self, call, tensors, options):
        self.refuse_gradients(call, tensors)
        results = getattr(torch.ops.gt_kernels, f"{self.name}_{call}")(*tensors, *options)
        return results if isinstance(results, (tuple, list)) else (results,)

    def make_direct(self):
        """Makes the autograd function of planned forward calls."""
        engine, has_saved = self, self.operator.has_saved
        count, option_count = len(self.names["forward"]), self.option_count
        # the places of inner outputs among the arguments after the tensors, in reverse
        inner_flags = [option_count + self.state_count + i for i in reversed(range(len(self.inner)))]

        class Direct(torch.autograd.Function):
            @staticmethod
            def forward(ctx, plan, rest, *tensors):
                outputs = engine.execute("forward", plan, [tensor for tensor in tensors if tensor is not None])
                saved = outputs.pop() if has_saved and rest[-1] else None
                inner = [outputs.pop() if rest[i] else None for i in inner_flags]
                ctx.options, ctx.plan = rest[:option_count], plan
                engine.save(ctx, tensors, saved, outputs, inner[::-1])
                ctx.set_materialize_grads(False)
                return tuple(outputs)

            @staticmethod
            def backward(ctx, *gradients):
                shapes = [shape for _, _, shape, _, _ in ctx.plan.outputs[:engine.y_count]]
                return None, None, *engine.find_gradients(ctx, shapes, gradients, ctx.needs_input_grad[2:2 + count])

        Direct.__name__ = Direct.__qualname__ = f"gt_kernels_{self.name}"
        return Direct

    # ---- autograd ----

    def keep(self, tensors, outputs, options=()):
        """Returns each output if backward may read it, otherwise None.  Backward reads the sum of add_norm if the
        option reads_sum is set.  On a GPU backward in bf16 computes dz from y."""
        if not self.kept:
            return ()
        keeps = self.reads_y(tensors) if self.reads_sum is None else options[self.reads_sum]
        return [outputs[i] if keeps else None for i in self.kept]

    def save(self, ctx, tensors, saved, outputs, inner):
        """Saves the tensors that backward needs.  With reads_sum, the sum of add_norm replaces x and residual.  inner:
        each inner output, or None."""
        kept = (*self.keep(tensors, outputs, ctx.options), *inner)
        if self.reads_sum is not None and ctx.options[self.reads_sum]:
            ctx.dtype, tensors = tensors[0].dtype, (None, None, *tensors[2:])
        ctx.save_for_backward(*tensors, saved, *kept)

    @staticmethod
    def stand_in(values, total, dtype, needed):
        """Returns values for the backward pass of add_norm if forward has kept the sum, `total`, instead of x and
        residual.  The C function checks these tensors, but reads only the sum."""
        x = total if total.dtype == dtype else torch.empty_like(total, dtype=dtype)  # nothing reads its elements
        return (x, total if needed[1] else None, *values[2:])

    def autograd_context(self, ctx, arguments, output):
        count = len(self.names["forward"])
        saved = output[-1] if self.operator.has_saved and arguments[-1] else None
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        ctx.options = arguments[count:count + self.option_count]
        first, flags = len(self.operator.outputs), arguments[count + self.option_count + self.state_count:]
        inner = outputs[first:first + len(self.inner)]
        ctx.mark_non_differentiable(*inner)
        self.save(ctx, arguments[:count], saved, outputs, [y if flag else None for y, flag in zip(inner, flags)])
        ctx.shapes = [y.shape for y in outputs[:self.y_count]]
        ctx.set_materialize_grads(False)

    def autograd_backward(self, ctx, *gradients):
        count = len(self.names["forward"])
        needed = ctx.needs_input_grad[1:]  # skips the dispatch key set
        return self.find_gradients(ctx, ctx.shapes, gradients, needed[:count]) + (None,) * (len(needed) - count)

    def find_gradients(self, ctx, shapes, gradients, needed):
        """Computes the gradients of forward's tensors.  shapes: the shape of each y."""
        everything, count = ctx.saved_tensors, len(self.names["forward"])
        values, (saved, *kept) = everything[:count], everything[count:]
        states = list(gradients[self.y_count:self.y_count + self.state_count])
        states += [None] * (self.state_count - len(states))
        if all(gradient is None for gradient in (*gradients[:self.y_count], *states)):
            return (None,) * len(needed)
        if self.reads_sum is not None and ctx.options[self.reads_sum]:
            values = self.stand_in(values, kept[0], ctx.dtype, needed)
        dys = [values[0].new_zeros(shape) if dy is None and output.kind == "x" else dy  # the loss does not use y
               for output, shape, dy in zip(self.operator.outputs, shapes, gradients)]
        needs = {gradient(tensor.field): need for tensor, need in zip(self.operator.tensors, needed)}
        same = self.same_gradient(values, needs)
        bits = [bit for bit, field in enumerate(self.gradients) if needs[field] and field != same]
        found = {gradient(self.operator.own_gradient): dys[0]} if self.operator.own_gradient else {}
        if bits:
            arguments = (*dys, *states, *(saved,) * self.operator.has_saved, *kept, *values, *ctx.options,
                         sum(1 << bit for bit in bits))
            if torch.is_grad_enabled() or not (_is_plain() and _are_plain(arguments[:-1 - self.option_count])):
                results = getattr(torch.ops.gt_kernels, f"{self.name}_backward")(*arguments)
            else:
                results = self.run("backward", arguments)
            found.update(zip((self.gradients[bit] for bit in bits), results))
        if same:
            found[same] = found[gradient(self.operator.same_gradient[1])]
        results = [None] * len(needed)
        for position, (tensor, value) in enumerate(zip(self.operator.tensors, values)):
            if needed[position]:
                result = found[gradient(tensor.field)]
                results[position] = result.to(value.dtype) if tensor.kind == "p" else result
        return tuple(results)

    def same_gradient(self, values, needs):
        """Returns the gradient that equals the gradient of another tensor.  None: there is none."""
        if not self.operator.same_gradient:
            return None
        (one, other), names = self.operator.same_gradient, self.inputs
        if not (needs[gradient(one)] and needs[gradient(other)]):
            return None
        is_same = values[names.index(one)].dtype == values[names.index(other)].dtype
        return gradient(one) if is_same else None

    def double_backward(self, ctx, *_):
        raise NotImplementedError(f"gt_kernels.torch.{self.operator.c_name}: gradients of gradients "
                                  "(create_graph=True, double backward) are not supported")


ENGINES = {operator.name: Engine(operator) for operator in OPERATORS}
