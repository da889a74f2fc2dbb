"""Sizes and options of a call.  The code finds the sizes in the shapes of the arguments, checks that they agree, and
puts them into the struct.  An argument needs no more than a shape."""

from . import c
from ._operators import beside, find, gradient, put, schema_name

_NO_DEFAULT = ("eps", "scale", "H", "N", "G")  # options


class Shapes:
    """Sizes and options of one operator's calls.  In errors `module` stands before the operator's name."""

    module = "gt_kernels"

    def __init__(self, operator):
        self.operator = operator
        self.tensors = {tensor.name: tensor for tensor in operator.tensors}
        self.field_of, self.kind_of = {}, {"cu_seqlens": "i", "seq_count": "i", "saved": "b"}
        self.kind_of.update(dict.fromkeys((*operator.of_steps, "starts_zero"), "i"))
        self.state_in_place = {}  # steps and pools read and write a state in place
        for tensor in operator.tensors:
            self.field_of[tensor.name], self.kind_of[tensor.name] = tensor.field, tensor.kind
        for output in (*operator.outputs, *operator.inner):
            for field in (output.field, gradient(output.field)):
                self.field_of[schema_name(field)] = field
                self.kind_of[schema_name(field)] = output.kind
        for tensor in operator.tensors:
            if tensor.is_state:
                self.state_in_place[tensor.name] = schema_name(tensor.field.replace("state_in", "state_out"))
        # the letters of a state's shape, for each buffer of snapshots
        self.snapshot_shapes = {name: next(tensor.shapes[0][1:] for tensor in operator.tensors
                                           if tensor.name == name.replace("snapshots", "state_in"))
                                for name in operator.of_snapshots}
        self.kind_of.update(dict.fromkeys(operator.of_snapshots, "f"))

    def fail(self, status, text):
        kind = c.UnsupportedError if status // 100 == 2 else c.ArgumentError
        raise kind(status, f"{self.module}.{self.operator.c_name}: {text}")

    def set_options(self, struct, options, sizes):
        """Puts options into the struct.  `options` are in the order of operator.options; snapshot_every may follow.
        Adds those that are sizes to `sizes`."""
        for (field, kind), value in zip((*self.operator.options, ("snapshot_every", "int")), options):
            put(struct, field, value)
            inner, name = find(struct, field)
            if kind == "int" and getattr(inner, name) != value:
                self.fail(c.GT_ERROR_VALUE, f"{name} = {value}: is out of range")
            if name in _NO_DEFAULT and not 0 < getattr(inner, name) < float("inf"):  # for the C API 0 means a default
                self.fail(c.GT_ERROR_VALUE, f"{name} = {value}: must be positive"
                          + (" and finite in float32" if kind == "float" else ""))
            if len(field) == 1:
                sizes[field] = value

    def set_sizes(self, struct, given, call, sizes):
        """Finds the sizes in the tensors' shapes, and checks that the shapes agree.  Sets the other fields that follow
        from shapes.  Returns the rows of states."""
        rows, shared, in_place = None, set(), call in ("step", "pool")
        for tensor in self.operator.tensors:
            name = self.state_in_place[tensor.name] if in_place and tensor.is_state else tensor.name
            value = given.get(name)
            if tensor.is_state:
                rows = sizes["B"]
                if "cu_seqlens" in given:
                    rows = struct.seq_capacity = self.length(given, "cu_seqlens", 2, None) - 1
                    self.length(given, "seq_count", 1, 1)
                elif "seq_count" in given:
                    self.fail(c.GT_ERROR_VALUE, "seq_count is given without cu_seqlens")
                for array in (*self.operator.of_steps, "starts_zero"):
                    self.length(given, array, 0, 2 if array == "rounding_seed" else rows)
                if "slots" in given:
                    rows = struct.slot_capacity = struct.slot_capacity or (value.shape[0] if len(value.shape) else 0)
                    if not rows:  # for the C API 0 means a default
                        self.fail(c.GT_ERROR_SIZE, f"{name} has shape {list(value.shape)}: must have at least one row")
            if value is None:
                continue
            letters = self.match(tensor, value, sizes, rows, call)
            if letters is None or (in_place and letters[0] != "@" and tensor.is_state):
                self.fail_shape(tensor, value, sizes, rows, call)
            if tensor.is_state:
                shared.add(letters[0] != "@")
            if tensor.name == "Dskip" and len(letters) == 2:
                put(struct, beside(tensor.field, "Dskip_per_channel"), 1)
            wrong = self.operator.derive and self.operator.derive(sizes)
            if wrong:
                self.fail(c.GT_ERROR_SIZE, wrong)
        if len(shared) == 2:
            self.fail(c.GT_ERROR_SIZE,
                      "one state has a batch index, but the other has none: both must have one, or neither")
        if True in shared:
            struct.state_in_shared = 1
        for letter, size in sizes.items():
            if size == 0 and letter not in "BT":  # for the C API 0 means a default of some sizes
                self.fail(c.GT_ERROR_SIZE, f"{letter.upper()} = 0: must be positive")
            field = self.operator.sizes.get(letter, letter)
            if letter == "M":
                struct.M = 1
                for part in size:
                    struct.M *= part
            elif field:
                put(struct, field, size)
        return rows

    def check_snapshots(self, given, sizes, every):
        """Checks the shapes of the buffers for snapshots.  every: snapshot_every."""
        for name, letters in self.snapshot_shapes.items():
            if name not in given:
                continue
            if every < 1 or every % 128:
                self.fail(c.GT_ERROR_VALUE, f"snapshot_every = {every}: must be a positive multiple of 128, because "
                          f"{name} is given")
            if "cu_seqlens" in given:
                rows, words = (sizes["T"] // every,), "[floor(T/snapshot_every),"
            else:
                rows, words = (sizes["B"], sizes["T"] // every), "[B,floor(T/snapshot_every),"
            shape, found = rows + self.shape(letters, sizes, None), tuple(given[name].shape)
            if found != shape:
                words += ",".join({"w": "W-1"}.get(letter, letter) for letter in letters)
                self.fail(c.GT_ERROR_SIZE, f"{name} has shape {list(found)}: must be {words}] = {list(shape)}")

    def length(self, given, name, least, exactly):
        if name not in given:
            return 0
        shape = tuple(given[name].shape)
        if len(shape) != 1 or shape[0] < least or (exactly is not None and shape[0] != exactly):
            self.fail(c.GT_ERROR_SIZE, f"{name} has shape {list(shape)}: must have "
                      + (f"{exactly} elements" if exactly is not None else f"at least {least} elements"))
        return shape[0]

    @staticmethod
    def match(tensor, value, sizes, rows, call):
        """Returns the letters that fit the shape, or None.  Adds the sizes that it finds to `sizes`."""
        for letters in tensor.shapes:
            if call == "step" and tensor.is_state:
                letters = letters.replace("w", "s")
            found, shape, fitting = dict(sizes), tuple(value.shape), letters
            if letters[0] == "M":
                if not shape or found.setdefault("M", shape[:-1]) != shape[:-1]:
                    continue
                letters, shape = letters[1:], shape[-1:]
            elif letters[0] == "@" and len(shape) == len(letters) - 1:
                letters = fitting = letters[1:]
            if len(shape) != len(letters):
                continue
            known = {"@": rows, "w": found.get("W", 1) - 1, "3": 3}
            if letters[-1] == "s" and shape[-1] < known["w"]:
                continue
            if all(size == (known[letter] if letter in known else found.setdefault(letter, size))
                   for letter, size in zip(letters, shape)):
                sizes.update(found)
                return fitting
        return None

    def fail_shape(self, tensor, value, sizes, rows, call):
        words = {"w": "W-1", "s": "S>=W-1", "@": "sequences" if rows is None else str(rows), "M": "..."}
        words.update({letter: letter.upper() for letter in "hpgn"})
        shapes = (shape.replace("w", "s") if call == "step" and tensor.is_state else shape for shape in tensor.shapes)
        shapes = " or ".join(f"[{','.join(words.get(x, x) for x in shape)}]" for shape in shapes)
        known = ", ".join(f"{x} = {list(size) if x == 'M' else size}" for x, size in sizes.items())
        self.fail(c.GT_ERROR_SIZE, f"{tensor.name} has shape {list(value.shape)}: must be {shapes}"
                  + (f", where {known}" if known else ""))

    @staticmethod
    def shape(letters, sizes, rows):
        result = ()
        for letter in letters:
            result += sizes["M"] if letter == "M" else \
                (rows if letter == "@" else sizes["W"] - 1 if letter == "w" else 3 if letter == "3" else sizes[letter],)
        return result
