"""Plans: the argument struct of a call with all but the addresses filled in, made from shapes, strides, dtypes and
options alone, so that fake tensors do as well as real ones."""

import ctypes

import torch

from .. import c

DTYPES = {torch.float32: c.GT_F32, torch.bfloat16: c.GT_BF16, torch.float16: c.GT_F16}


class Plan:
    __slots__ = ("template", "fields", "copies", "outputs", "workspace", "device")


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
        self.by_name = {tensor.name: tensor for tensor in operator.tensors}
        self.query = getattr(c, f"gt_{operator.name}_workspace")

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
        struct, plan = operator.struct(), Plan()
        plan.device = given[operator.tensors[0].name].device
        if plan.device.type not in ("cpu", "cuda", "meta"):
            self.fail(c.GT_ERROR_UNSUPPORTED, f"device {plan.device}: only CPU and CUDA")
        self.set_dtypes(struct, given, plan.device)
        sizes, rows = self.set_sizes(struct, given, call)
        for (name, _), value in zip(operator.options, options):
            setattr(struct, name, value)
        shapes = {"y": self.shape(operator.y_shape, sizes, rows)}
        shapes["dy"] = shapes["y"]
        if operator.recurrent:
            shapes["state_out"] = shapes["dstate_out"] = self.shape(operator.tensors[-1].shapes[0], sizes, rows)

        plan.fields, plan.copies = [], []
        for position, (name, value) in enumerate(values):
            if value is None or (name == "saved" and value.numel() == 0):
                continue
            if name in ("dy", "dstate_out") and tuple(value.shape) != shapes[name]:
                self.fail(c.GT_ERROR_SIZE, f"{name} has shape {list(value.shape)}: must be {list(shapes[name])}")
            if not self.set_stride(struct, name, value):
                if name == "state_out":
                    self.fail(c.GT_ERROR_STRIDE, "state is updated in place: it must be contiguous")
                plan.copies.append((position, name))
                self.set_stride(struct, name, value.new_empty(value.shape))
            if name == "saved":
                struct.saved_bytes = value.numel()
            plan.fields.append((position, name))

        plan.outputs = []
        for field in wanted:
            if field == "saved":
                struct.saved_bytes = self.saved_bytes(struct, plan)
                result = torch.empty(struct.saved_bytes, dtype=torch.uint8, device="meta")
            elif field in ("y", "state_out"):
                source = given[operator.like]
                result = like(source, shapes["y"], self.stride_type("y")) if field == "y" else \
                    source.new_empty(shapes["state_out"], dtype=torch.float32)
            else:
                tensor = self.by_name[field[1:]]
                source = given[tensor.name]
                result = like(source, source.shape, tensor.stride) if tensor.stride else \
                    source.new_empty(source.shape, dtype=torch.float32)
            self.set_stride(struct, field, result)
            plan.outputs.append((field, tuple(map(int, result.shape)), tuple(map(int, result.stride())), result.dtype))
        plan.template = bytes(struct)
        plan.workspace = {}
        return plan

    def set_dtypes(self, struct, given, device):
        """Holds dtypes and devices against each other."""
        dtype = given[self.operator.tensors[0].name].dtype
        if dtype not in DTYPES:
            self.fail(c.GT_ERROR_DTYPE, f"{self.operator.tensors[0].name} has dtype {dtype}: must be float32, bfloat16 "
                      "or float16")
        for name, value in given.items():
            tensor = self.by_name.get(name)
            kind = tensor.kind if tensor else {"dy": "x", "cu_seqlens": "i", "seq_count": "i", "slots": "i",
                                               "saved": "b"}.get(name, "f")
            right = {"x": (dtype,), "p": (dtype,), "w": (dtype, torch.float32), "i": (torch.int32,),
                     "b": (torch.uint8,), "f": (torch.float32,)}[kind]
            if value.dtype not in right:
                self.fail(c.GT_ERROR_DTYPE, f"{name} has dtype {value.dtype}: must be "
                          f"{' or '.join(str(x) for x in dict.fromkeys(right))}")
            if value.device != device:
                self.fail(c.GT_ERROR_VALUE, f"{name} is on {value.device}: must be on {device}")
            if kind == "w":
                setattr(struct, "w_dtype" if name == "w" else "dt_dtype", DTYPES[value.dtype])
        struct.dtype = DTYPES[dtype]

    def set_sizes(self, struct, given, call):
        """Finds the sizes in the tensors' shapes and holds these against each other; what else shapes tell."""
        sizes, rows = {}, None
        for tensor in self.operator.tensors:
            value = given.get("state_out" if call == "step" and tensor.name == "state_in" else tensor.name)
            if tensor.shapes[0][0] == "@":
                rows = sizes["B"]
                if "cu_seqlens" in given:
                    rows = struct.seq_capacity = self.length(given, "cu_seqlens", 2, None) - 1
                    self.length(given, "seq_count", 1, 1)
                elif "seq_count" in given:
                    self.fail(c.GT_ERROR_VALUE, "seq_count is given without cu_seqlens")
                if "slots" in given:
                    self.length(given, "slots", 0, sizes["B"])
                    rows = struct.slot_capacity = value.shape[0]
            if value is None:
                continue
            letters = self.match(tensor, value, sizes, rows)
            if letters is None or (call == "step" and letters[0] != "@" and tensor.shapes[0][0] == "@"):
                self.fail_shape(tensor, value, sizes, rows)
            if letters == tensor.shapes[0][1:]:
                struct.state_in_shared = 1
            if tensor.name == "Dskip" and len(letters) == 2:
                struct.Dskip_per_channel = 1
        for letter, size in sizes.items():
            if letter == "M":
                struct.M = 1
                for part in size:
                    struct.M *= part
            else:
                setattr(struct, letter, size)
        return sizes, rows

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

    def stride_type(self, name):
        """The type of the stride of an input, output or gradient in the struct; None: it has to be packed."""
        if name in ("y", "dy"):
            name = self.operator.like
        tensor = self.by_name.get(name) or self.by_name.get(name[1:] if name[0] == "d" else "")
        return tensor and tensor.stride

    def set_stride(self, struct, name, value):
        """Puts a tensor's stride into the struct.  False: the C API has none such, it has to be copied."""
        kind = self.stride_type(name)
        if kind is None:
            return value.is_contiguous()
        if kind is ctypes.c_int64:
            stride = stride_rows(value)
        else:
            stride = stride_bth(value, len(kind._fields_))
        if stride is not None:
            setattr(struct, f"{name}_stride", stride if kind is ctypes.c_int64 else kind(*stride))
        return stride is not None

    def saved_bytes(self, struct, plan):
        """The size of `saved`: it does not depend on how tensors are aligned, and is asked for with aligned ones."""
        if plan.device.type != "cuda":
            return 0  # the twins use none
        question = self.operator.struct.from_buffer_copy(struct)
        for _, field in plan.fields:
            setattr(question, field, 256)
        return self.ask(question).saved

    def ask(self, question):
        need = c.gt_workspace()
        c.check(self.query(ctypes.byref(question), ctypes.byref(need)))
        return need
