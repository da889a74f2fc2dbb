"""Plans.  A plan holds the argument struct of a call with everything except addresses.  It depends only on shapes,
strides, dtypes and options, so fake tensors suffice to make one."""

import ctypes
import types

import torch

from .. import c
from .._operators import all_fields, companion, find, gradient, leaf, put, reads
from .._shapes import Shapes

DTYPES = {torch.float32: c.GT_F32, torch.bfloat16: c.GT_BF16, torch.float16: c.GT_F16}
SAVES = ("cuda",)  # the twins save nothing


class Plan:
    """The plan of a call.  A place is an offset in the struct, in 8-byte words.

    inputs      the place of each given tensor, in order
    copies      (index of the input, name) of inputs that must be copied
    outputs     (field, place, shape, stride, dtype) of each output
    scratch     the same of memory that the call writes, but does not return
    names, item_sizes   of each input: name, bytes of an element
    ends        of each input: bytes from the first element to the end of the last element
    states      indices of the inputs that are written
    twins       (place, input) of each input that is also read under another name"""

    __slots__ = ("names", "item_sizes", "ends", "states", "twins",
                 "struct", "template", "inputs", "copies", "outputs", "scratch", "workspace", "device", "is_cuda",
                 "arguments")

    def take(self):
        """Returns (struct, its 8-byte words, its ctypes reference) for one call.  The struct is complete except for
        addresses.  Return the tuple with `give` after the call."""
        try:
            return self.arguments.pop()
        except IndexError:
            struct = self.struct.from_buffer_copy(self.template)
            words = (ctypes.c_uint64 * (ctypes.sizeof(struct) // 8)).from_buffer(struct)
            return struct, words, ctypes.byref(struct)

    def give(self, arguments):
        self.arguments.append(arguments)


def symbolic_struct(operator):
    """A substitute for the struct if sizes are symbols of a compiler, which ctypes fields cannot hold."""
    struct = types.SimpleNamespace()
    for field in operator.fields:
        *outer, name = field.split(".")
        inner = struct
        for part in outer:
            inner = inner.__dict__.setdefault(part, types.SimpleNamespace())
        setattr(inner, name, 0)
    return struct


def has_symbols(tensors):
    return any(isinstance(number, torch.SymInt) for tensor in tensors for number in (*tensor.shape, *tensor.stride()))


def stride_bth(tensor, count):
    """The components of a gt_stride (count = 3) or gt_stride4 (count = 4).  None: the tensor must be copied."""
    shape, stride = tensor.shape, tensor.stride()
    if len(shape) > count and shape[count] > 1 and stride[count] != 1:
        return None
    if any(size > 1 and step == 0 for size, step in zip(shape[:count], stride)):
        return None  # an expanded index has stride 0, which means the default in the C API
    return tuple(step if size > 1 else 0 for size, step in zip(shape[:count], stride))


def stride_rows(tensor):
    """The stride of rows in elements, where all indices but the last together count rows.  None: there is no constant
    stride, and the tensor must be copied."""
    shape, stride = tensor.shape, tensor.stride()
    if shape[-1] > 1 and stride[-1] != 1:
        return None
    rows = expected = 0
    for size, step in zip(reversed(shape[:-1]), reversed(stride[:-1])):
        if size == 1:
            continue
        if rows == 0:
            if step < shape[-1]:
                return None
            rows = step
        elif step != expected:
            return None
        expected = step * size
    return rows


def end(tensor):
    """Bytes from the first element to the end of the last."""
    if 0 in tensor.shape:
        return 0
    return (1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))) * tensor.element_size()


def like(tensor, shape, stride, dtype=None):
    """Allocates a tensor of `shape`.  It has the layout of `tensor` if the shapes are equal and the C API's `stride`
    can express that layout; else it is packed.  dtype None: the dtype of `tensor`."""
    if tuple(tensor.shape) == tuple(shape) and len(shape) > 2:
        result = torch.empty_like(tensor, dtype=dtype)
        if len(shape) == 3 or stride is c.gt_stride4 or result.stride(3) == 1:
            return result
    return tensor.new_empty(shape, dtype=dtype)


class Planner(Shapes):
    """Plans the calls of one operator."""

    module = "gt_kernels.torch"

    def __init__(self, operator):
        super().__init__(operator)
        self.query = getattr(c, f"gt_{operator.c_name}_workspace")
        self.words = {field: offset // 8 for field, _, offset in all_fields(operator.struct)}
        self.tensor_of_gradient = {gradient(tensor.field): tensor for tensor in operator.tensors}

    def plan(self, call, values, options, wanted):
        """Plans a call.  values: (name, tensor or None) in the order of the schema.  options: in the order of
        operator.options; snapshot_every may follow.  wanted: the fields of the outputs."""
        operator, given = self.operator, {name: value for name, value in values if value is not None}
        for tensor in operator.tensors:
            if not tensor.optional and tensor.name not in given:
                self.fail(c.GT_ERROR_NULL, f"{tensor.name} is None")
        in_place = call in ("step", "pool")
        needed = self.state_in_place.values() if in_place else ()
        for name in (*needed, "cu_seqlens", "slots") if call == "pool" else needed:
            if name not in given:
                self.fail(c.GT_ERROR_NULL, f"{name} is None")
        for name, value in given.items():
            if value.layout is not torch.strided:
                self.fail(c.GT_ERROR_VALUE, f"{name} is {value.layout}: must be a dense tensor")
        symbolic, plan = has_symbols(given.values()), Plan()
        struct = symbolic_struct(operator) if symbolic else operator.struct()
        plan.struct, plan.arguments, plan.workspace = operator.struct, [], {}
        plan.device = given[operator.tensors[0].name].device
        if plan.device.type not in ("cpu", "cuda", "meta"):
            self.fail(c.GT_ERROR_UNSUPPORTED, f"device {plan.device}: must be a CPU or a CUDA device")
        plan.is_cuda = plan.device.type == "cuda"
        sizes = {}
        self.set_options(struct, options, sizes)
        self.set_dtypes(struct, call, given, plan.device)
        rows = self.set_sizes(struct, given, call, sizes)
        self.check_snapshots(given, sizes, struct.snapshot_every if operator.of_snapshots else 0)
        shapes = {}
        for output in (*operator.outputs, *operator.inner):
            shapes[output.field] = shapes[gradient(output.field)] = self.shape(output.shape, sizes, rows)
        shapes["decay_out"] = self.shape(operator.decays, sizes, rows)

        plan.inputs, plan.copies, plan.states, plan.twins = [], [], [], []
        plan.names = tuple(given)
        plan.item_sizes = tuple(value.element_size() for value in given.values())
        plan.ends = () if symbolic else tuple(map(end, given.values()))
        for name, value in given.items():
            field = self.field_of.get(name, name)
            if in_place and name in self.state_in_place.values():
                if call == "pool":
                    plan.twins.append((self.words[field.replace("state_out", "state_in")], len(plan.inputs)))
                plan.states.append(len(plan.inputs))
            elif name in operator.of_snapshots:
                plan.states.append(len(plan.inputs))
                if not value.is_contiguous():
                    self.fail(c.GT_ERROR_STRIDE, f"{name} has strides {tuple(value.stride())}: must be contiguous, "
                              "because the call writes it")
            if call == "backward" and field in shapes and tuple(value.shape) != shapes[field]:
                self.fail(c.GT_ERROR_SIZE, f"{name} has shape {list(value.shape)}: must be {list(shapes[field])}")
            if not self.set_stride(struct, field, value, call):
                if in_place and field in shapes:
                    self.fail(c.GT_ERROR_STRIDE, f"{name} has strides {tuple(value.stride())}: must be contiguous, "
                              "because it is updated in place")
                plan.copies.append((len(plan.inputs), name))
                self.set_stride(struct, field, value.new_empty(value.shape), call)
            if name == "saved":
                struct.saved_bytes = value.numel()
            if call == "backward" and reads(field) in operator.fields:
                put(struct, reads(field), 1)
            plan.inputs.append(self.words[field])

        scratch = tuple(output.field for output in operator.inner
                        if call != "backward" and output.is_required and output.field not in wanted)
        plan.outputs, plan.scratch = [], []
        for field in (*scratch, *wanted):  # `saved` is last, because its size may depend on the others
            result = self.output(struct, plan, field, given, shapes)
            if not self.set_stride(struct, field, result, call):
                result = result.new_empty(result.shape)
                self.set_stride(struct, field, result, call)
            (plan.scratch if field in scratch else plan.outputs).append(
                (field, self.words[field], tuple(result.shape), tuple(result.stride()), result.dtype))
        plan.template = None if symbolic else bytes(struct)
        return plan

    def output(self, struct, plan, field, given, shapes):
        """Plans the memory of an output or a gradient."""
        if field == "saved":
            if isinstance(struct, types.SimpleNamespace) and plan.device.type in SAVES:  # the C API needs numbers
                struct.saved_bytes = torch.library.get_ctx().new_dynamic_size()
            else:
                struct.saved_bytes = self.saved_bytes(struct, plan)
            return torch.empty(struct.saved_bytes, dtype=torch.uint8, device="meta")
        first = given[self.operator.tensors[0].name]
        if field == "decay_out":
            return first.new_empty(shapes[field], dtype=torch.float32)
        for output in (*self.operator.outputs, *self.operator.inner):
            if field == output.field and output.like:
                like_name = leaf(output.like)
                dtype = first.dtype if output.kind == "x" else self.companion_dtype(struct, field, first.dtype)
                return like(given.get(like_name, first), shapes[field], self.stride_type(field), dtype)
            if field == output.field:
                return first.new_empty(shapes[field], dtype=torch.float32)
        tensor = self.tensor_of_gradient[field]
        source, stride = given[tensor.name], self.stride_type(tensor.field)
        return like(source, source.shape, stride) if stride else source.new_empty(source.shape, dtype=torch.float32)

    @staticmethod
    def companion_dtype(struct, field, dtype):
        """The dtype of an output of kind w beside activations of `dtype`."""
        inner, name = find(struct, companion(field))
        return next((key for key, value in DTYPES.items() if value == getattr(inner, name)), dtype)

    def set_dtypes(self, struct, call, given, device):
        """Checks that dtypes and devices agree, and puts the dtypes into the struct."""
        parameters, companions = [], {}
        dtype = given[self.operator.tensors[0].name].dtype
        if dtype not in DTYPES:
            self.fail(c.GT_ERROR_DTYPE, f"{self.operator.tensors[0].name} has dtype {dtype}: must be float32, bfloat16 "
                      "or float16")
        for name, value in given.items():
            kind = self.kind_of[name]
            right = {"x": (dtype,), "p": (dtype,), "w": (dtype, torch.float32), "i": (torch.int32,),
                     "b": (torch.uint8,), "f": (torch.float32,), "P": (torch.float32,)}[kind]
            is_state = call in ("step", "pool") and name in self.state_in_place.values()
            own = self.operator.state_dtype(self.field_of[name]) if is_state else None
            if name in self.operator.of_snapshots:
                own = "snapshot_dtype"
            if own or (call == "step" and kind == "P"):
                right = tuple(DTYPES)
            if name == "conv_snapshots":  # must have the dtype of conv_state, which has set conv_state_dtype
                state, own = given.get("conv_state_out"), None
                right = (torch.float32 if state is None else state.dtype,)
            if call == "step" and kind == "P":
                right = parameters = parameters or (right if value.dtype not in right else (value.dtype,))
            if kind == "w":  # all tensors that share a field of the struct have one dtype
                first = right if value.dtype not in right else (value.dtype,)
                right = companions.setdefault(companion(self.field_of[name]), first)
            if value.dtype not in right:
                self.fail(c.GT_ERROR_DTYPE, f"{name} has dtype {value.dtype}: must be "
                          f"{' or '.join(str(x) for x in dict.fromkeys(right))}")
            if value.device != device:
                self.fail(c.GT_ERROR_VALUE, f"{name} is on {value.device}: must be on {device}")
            if kind == "w":
                put(struct, companion(self.field_of[name]), DTYPES[value.dtype])
            if call == "step" and kind == "P":
                setattr(struct, self.operator.parameter_dtype, DTYPES[value.dtype])
            if own:
                put(struct, own, DTYPES[value.dtype])
        struct.dtype = DTYPES[dtype]

    def stride_type(self, field):
        """The type of a tensor's stride field in the struct.  None: there is no such field, so the tensor must be
        packed."""
        return self.operator.fields.get(f"{field}_stride")

    def set_stride(self, struct, field, value, call):
        """Puts a tensor's stride into the struct.  Returns False if the C API cannot express the stride, so that the
        tensor must be copied."""
        kind = self.stride_type(field)
        is_state = leaf(field).endswith("state_out")
        if kind is None or (is_state and (call not in ("step", "pool") or "." in field)):
            return value.is_contiguous()  # inner structs have no stride of states either
        if is_state and kind is ctypes.c_int64:  # rows of a pool are packed, but may have gaps between them
            if value.is_contiguous():
                return True
            if not value[:1].is_contiguous() or value.stride(0) < value[0].numel():
                return False
            if isinstance(struct, ctypes.Structure):
                put(struct, f"{field}_stride", value.stride(0))
            return True
        if kind is ctypes.c_int64:
            stride = stride_rows(value)
        else:
            stride = stride_bth(value, len(kind._fields_))
        if stride is not None and isinstance(struct, ctypes.Structure):
            put(struct, f"{field}_stride", stride if kind is ctypes.c_int64 else kind(*stride))
        return stride is not None

    def saved_bytes(self, struct, plan):
        """The size of `saved`.  It does not depend on the alignment of tensors, so the query uses aligned addresses."""
        if plan.device.type not in SAVES:
            return 0
        question = self.operator.struct.from_buffer_copy(struct)
        places = (ctypes.c_uint64 * (ctypes.sizeof(question) // 8)).from_buffer(question)
        for place in plan.inputs:
            places[place] = 256
        if self.operator.inner:  # the kernels of a mixed call differ, and `mixed` tells that it is one
            for _, place, *_ in (*plan.outputs, *plan.scratch):
                places[place] = 256
        return self.ask(question).saved

    def ask(self, question):
        need = c.gt_workspace()
        c.check(self.query(ctypes.byref(question), ctypes.byref(need)))
        return need
