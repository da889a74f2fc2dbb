"""Plans: the argument struct of a call with all but the addresses filled in, made from shapes, strides, dtypes and
options alone, so that fake tensors do as well as real ones."""

import ctypes

import torch

from .. import c
from ._operators import all_fields, beside, find, gradient, leaf, put, schema_name

DTYPES = {torch.float32: c.GT_F32, torch.bfloat16: c.GT_BF16, torch.float16: c.GT_F16}


OF_STEPS = ("slots", "tokens", "commit")  # integers [B] that a step takes, each may be None
_NO_DEFAULT = ("eps", "scale", "H", "N", "G")  # options


class Plan:
    """inputs: the place in the struct, in words, of each tensor that is given, in their order; copies: (which of these,
    name); outputs: (field, place, shape, stride, dtype).  names, item_sizes and ends, of each input: its name, and the
    bytes of an element and from the first to the end of the last.  state: which input a step writes."""

    __slots__ = ("names", "item_sizes", "ends", "state",
                 "struct", "template", "inputs", "copies", "outputs", "workspace", "device", "is_cuda", "arguments")

    def take(self):
        """(struct, its 8-byte words, what a C function takes for it), for one call at a time.  All but addresses is
        there; `give` them back."""
        try:
            return self.arguments.pop()
        except IndexError:
            struct = self.struct.from_buffer_copy(self.template)
            words = (ctypes.c_uint64 * (ctypes.sizeof(struct) // 8)).from_buffer(struct)
            return struct, words, ctypes.byref(struct)

    def give(self, arguments):
        self.arguments.append(arguments)


def stride_bth(tensor, count):
    """The components of a gt_stride (count = 3) or gt_stride4 (4), or None: the tensor has to be copied."""
    shape, stride = tensor.shape, tensor.stride()
    if len(shape) > count and shape[count] > 1 and stride[count] != 1:
        return None
    if any(size > 1 and step == 0 for size, step in zip(shape[:count], stride)):
        return None  # an expanded index: in a stride of the C API 0 is the default
    return tuple(int(step) if size > 1 else 0 for size, step in zip(shape[:count], stride))


def stride_rows(tensor):
    """Elements from row to row, all indices but the last counting rows, or None: the tensor has to be copied."""
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
            rows = int(step)
        elif step != expected:
            return None
        expected = step * size
    return rows


def end(tensor):
    """Bytes from the first element to the end of the last."""
    if 0 in tensor.shape:
        return 0
    return int(1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))) * tensor.element_size()


def like(tensor, shape, stride):
    """Memory for a tensor of `shape`: in the layout of `tensor` if it has that shape and its layout is one that a
    `stride` of the C API has, else packed."""
    if tuple(tensor.shape) == tuple(shape) and len(shape) > 2:
        result = torch.empty_like(tensor)
        if len(shape) == 3 or stride is c.gt_stride4 or result.stride(3) == 1:
            return result
    return tensor.new_empty(shape)


class Planner:
    """Plans the calls of one operator."""

    def __init__(self, operator):
        self.operator = operator
        self.query = getattr(c, f"gt_{operator.name}_workspace")
        self.words = {field: offset // 8 for field, _, offset in all_fields(operator.struct)}
        self.tensors = {tensor.name: tensor for tensor in operator.tensors}
        self.field_of, self.kind_of = {}, {"cu_seqlens": "i", "seq_count": "i", "saved": "b"}
        self.kind_of.update(dict.fromkeys(OF_STEPS, "i"))
        self.state_of_step = {}  # in a step a state is read and written in place
        for tensor in operator.tensors:
            self.field_of[tensor.name], self.kind_of[tensor.name] = tensor.field, tensor.kind
        for output in operator.outputs:
            for field in (output.field, gradient(output.field)):
                self.field_of[schema_name(field)] = field
                self.kind_of[schema_name(field)] = "x" if output.like else "f"
        for tensor in operator.tensors:
            if tensor.is_state:
                self.state_of_step[tensor.name] = schema_name(tensor.field.replace("state_in", "state_out"))
        self.tensor_of_gradient = {gradient(tensor.field): tensor for tensor in operator.tensors}

    def fail(self, status, text):
        kind = c.UnsupportedError if status // 100 == 2 else c.ArgumentError
        raise kind(status, f"gt_kernels.torch.{self.operator.name}: {text}")

    def plan(self, call, values, options, wanted):
        """values: (name, tensor or None) in the order of the schema; options in the order of the operator's; wanted: the
        outputs' fields."""
        operator, given = self.operator, {name: value for name, value in values if value is not None}
        for tensor in operator.tensors:
            if not tensor.optional and tensor.name not in given:
                self.fail(c.GT_ERROR_NULL, f"{tensor.name} is None")
        if call == "step" and "state_out" not in given:
            self.fail(c.GT_ERROR_NULL, "state_out is None")
        for name, value in given.items():
            if value.layout is not torch.strided:
                self.fail(c.GT_ERROR_VALUE, f"{name} is {value.layout}: must be a dense tensor")
        struct, plan = operator.struct(), Plan()
        plan.struct, plan.arguments, plan.workspace = operator.struct, [], {}
        plan.device = given[operator.tensors[0].name].device
        if plan.device.type not in ("cpu", "cuda", "meta"):
            self.fail(c.GT_ERROR_UNSUPPORTED, f"device {plan.device}: only CPU and CUDA")
        plan.is_cuda = plan.device.type == "cuda"
        self.set_dtypes(struct, given, plan.device)
        sizes = {}
        for (field, kind), value in zip(operator.options, options):
            put(struct, field, value)
            inner, name = find(struct, field)
            if kind == "int" and getattr(inner, name) != value:
                self.fail(c.GT_ERROR_VALUE, f"{name} = {value}: is out of range")
            if name in _NO_DEFAULT and getattr(inner, name) <= 0:  # 0: to the C API a default
                self.fail(c.GT_ERROR_VALUE, f"{name} = {value}: must be positive"
                          + (" in float32" if kind == "float" else ""))
            if len(field) == 1:
                sizes[field] = value
        rows = self.set_sizes(struct, given, call, sizes)
        shapes = {}
        for output in operator.outputs:
            shapes[output.field] = shapes[gradient(output.field)] = self.shape(output.shape, sizes, rows)

        plan.inputs, plan.copies, plan.state = [], [], None
        plan.names = tuple(given)
        plan.item_sizes = tuple(value.element_size() for value in given.values())
        plan.ends = tuple(map(end, given.values()))
        for name, value in given.items():
            if call == "step" and name == "state_out":
                plan.state = len(plan.inputs)
            field = self.field_of.get(name, name)
            if call == "backward" and field in shapes and tuple(value.shape) != shapes[field]:
                self.fail(c.GT_ERROR_SIZE, f"{name} has shape {list(value.shape)}: must be {list(shapes[field])}")
            if not self.set_stride(struct, field, value):
                if call == "step" and field in shapes:
                    self.fail(c.GT_ERROR_STRIDE, f"{name} is updated in place: it must be contiguous")
                plan.copies.append((len(plan.inputs), name))
                self.set_stride(struct, field, value.new_empty(value.shape))
            if name == "saved":
                struct.saved_bytes = value.numel()
            if call == "backward" and leaf(field) == "y":
                put(struct, beside(field, "reads_y"), 1)
            plan.inputs.append(self.words[field])

        plan.outputs = []
        for field in wanted:
            result = self.output(struct, plan, field, given, shapes)
            if not self.set_stride(struct, field, result):
                result = result.new_empty(result.shape)
                self.set_stride(struct, field, result)
            shape, stride = tuple(map(int, result.shape)), tuple(map(int, result.stride()))
            plan.outputs.append((field, self.words[field], shape, stride, result.dtype))
        plan.template = bytes(struct)
        return plan

    def output(self, struct, plan, field, given, shapes):
        """Memory for an output or a gradient."""
        if field == "saved":
            struct.saved_bytes = self.saved_bytes(struct, plan)
            return torch.empty(struct.saved_bytes, dtype=torch.uint8, device="meta")
        first = given[self.operator.tensors[0].name]
        for output in self.operator.outputs:
            if field == output.field and output.like:
                like_name = leaf(output.like)
                return like(given.get(like_name, first), shapes[field], self.stride_type(field))
            if field == output.field:
                return first.new_empty(shapes[field], dtype=torch.float32)
        tensor = self.tensor_of_gradient[field]
        source, stride = given[tensor.name], self.stride_type(tensor.field)
        return like(source, source.shape, stride) if stride else source.new_empty(source.shape, dtype=torch.float32)

    def set_dtypes(self, struct, given, device):
        """Holds dtypes and devices against each other."""
        dtype = given[self.operator.tensors[0].name].dtype
        if dtype not in DTYPES:
            self.fail(c.GT_ERROR_DTYPE, f"{self.operator.tensors[0].name} has dtype {dtype}: must be float32, bfloat16 "
                      "or float16")
        for name, value in given.items():
            kind = self.kind_of[name]
            right = {"x": (dtype,), "p": (dtype,), "w": (dtype, torch.float32), "i": (torch.int32,),
                     "b": (torch.uint8,), "f": (torch.float32,)}[kind]
            if value.dtype not in right:
                self.fail(c.GT_ERROR_DTYPE, f"{name} has dtype {value.dtype}: must be "
                          f"{' or '.join(str(x) for x in dict.fromkeys(right))}")
            if value.device != device:
                self.fail(c.GT_ERROR_VALUE, f"{name} is on {value.device}: must be on {device}")
            if kind == "w":
                put(struct, beside(self.field_of[name], "w_dtype" if name == "w" else "dt_dtype"), DTYPES[value.dtype])
        struct.dtype = DTYPES[dtype]

    def set_sizes(self, struct, given, call, sizes):
        """Finds the sizes in the tensors' shapes and holds these against each other; what else shapes tell.  Returns
        the rows of states."""
        rows, shared = None, set()
        for tensor in self.operator.tensors:
            name = self.state_of_step[tensor.name] if call == "step" and tensor.is_state else tensor.name
            value = given.get(name)
            if tensor.is_state:
                rows = sizes["B"]
                if "cu_seqlens" in given:
                    rows = struct.seq_capacity = self.length(given, "cu_seqlens", 2, None) - 1
                    self.length(given, "seq_count", 1, 1)
                elif "seq_count" in given:
                    self.fail(c.GT_ERROR_VALUE, "seq_count is given without cu_seqlens")
                for array in OF_STEPS:
                    self.length(given, array, 0, sizes["B"])
                if "slots" in given:
                    rows = struct.slot_capacity = value.shape[0] if value.dim() else 0
                    if not rows:  # to the C API 0 is a default
                        self.fail(c.GT_ERROR_SIZE, f"{name} has shape {list(value.shape)}: the pool has no row")
            if value is None:
                continue
            letters = self.match(tensor, value, sizes, rows)
            if letters is None or (call == "step" and letters[0] != "@" and tensor.is_state):
                self.fail_shape(tensor, value, sizes, rows)
            if tensor.is_state:
                shared.add(letters[0] != "@")
            if tensor.name == "Dskip" and len(letters) == 2:
                put(struct, beside(tensor.field, "Dskip_per_channel"), 1)
            wrong = self.operator.derive and self.operator.derive(sizes)
            if wrong:
                self.fail(c.GT_ERROR_SIZE, wrong)
        if len(shared) == 2:
            self.fail(c.GT_ERROR_SIZE, "one state has the batch index and the other has not: both must, or neither")
        if True in shared:
            struct.state_in_shared = 1
        for letter, size in sizes.items():
            if size == 0 and letter not in "BT":  # to the C API 0 is a default of some
                self.fail(c.GT_ERROR_SIZE, f"{letter.upper()} = 0: must be positive")
            field = self.operator.sizes.get(letter, letter)
            if letter == "M":
                struct.M = 1
                for part in size:
                    struct.M *= part
            elif field:
                put(struct, field, size)
        return rows

    def length(self, given, name, least, exactly):
        if name not in given:
            return 0
        shape = tuple(given[name].shape)
        if len(shape) != 1 or shape[0] < least or (exactly is not None and shape[0] != exactly):
            self.fail(c.GT_ERROR_SIZE, f"{name} has shape {list(shape)}: must have "
                      + (f"{exactly} elements" if exactly is not None else f"at least {least} elements"))
        return int(shape[0])

    @staticmethod
    def match(tensor, value, sizes, rows):
        """The letters that fit the shape, or None; `sizes` grows by those found."""
        for letters in tensor.shapes:
            found, shape, fitting = dict(sizes), tuple(value.shape), letters
            if letters[0] == "M":
                if not shape or found.setdefault("M", shape[:-1]) != shape[:-1]:
                    continue
                letters, shape = letters[1:], shape[-1:]
            elif letters[0] == "@" and len(shape) == len(letters) - 1:
                letters = fitting = letters[1:]
            if len(shape) != len(letters):
                continue
            known = {"@": rows, "w": found.get("W", 1) - 1}
            if all(size == (known[letter] if letter in known else found.setdefault(letter, size))
                   for letter, size in zip(letters, shape)):
                sizes.update(found)
                return fitting
        return None

    def fail_shape(self, tensor, value, sizes, rows):
        words = {"w": "W-1", "@": "sequences" if rows is None else str(rows), "M": "..."}
        words.update({letter: letter.upper() for letter in "hpgn"})
        shapes = " or ".join(f"[{','.join(words.get(x, x) for x in shape)}]" for shape in tensor.shapes)
        known = ", ".join(f"{x} = {list(size) if x == 'M' else size}" for x, size in sizes.items())
        self.fail(c.GT_ERROR_SIZE, f"{tensor.name} has shape {list(value.shape)}: must be {shapes}"
                  + (f", where {known}" if known else ""))

    @staticmethod
    def shape(letters, sizes, rows):
        result = ()
        for letter in letters:
            result += sizes["M"] if letter == "M" else \
                (rows if letter == "@" else sizes["W"] - 1 if letter == "w" else sizes[letter],)
        return tuple(map(int, result))

    def stride_type(self, field):
        """The type of the stride of a tensor in the struct; None: it has to be packed."""
        return self.operator.fields.get(f"{field}_stride")

    def set_stride(self, struct, field, value):
        """Puts a tensor's stride into the struct.  False: the C API has none such, it has to be copied."""
        kind = self.stride_type(field)
        if kind is None:
            return value.is_contiguous()
        if kind is ctypes.c_int64:
            stride = stride_rows(value)
        else:
            stride = stride_bth(value, len(kind._fields_))
        if stride is not None:
            put(struct, f"{field}_stride", stride if kind is ctypes.c_int64 else kind(*stride))
        return stride is not None

    def saved_bytes(self, struct, plan):
        """The size of `saved`: it does not depend on how tensors are aligned, and is asked for with aligned ones."""
        if plan.device.type != "cuda":
            return 0  # the twins use none
        question = self.operator.struct.from_buffer_copy(struct)
        places = (ctypes.c_uint64 * (ctypes.sizeof(question) // 8)).from_buffer(question)
        for place in plan.inputs:
            places[place] = 256
        return self.ask(question).saved

    def ask(self, question):
        need = c.gt_workspace()
        c.check(self.query(ctypes.byref(question), ctypes.byref(need)))
        return need
