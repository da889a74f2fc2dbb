"""The operators as JAX primitives, gt_kernels_OP_PASS, whose lowering is a call of the library's handler for XLA.

They are primitives, because primitives may have rules of their own.  The rule of vmap merges the new axis with the
batch.  The rule of derivatives refuses second derivatives and names the operator.  The library gives the sizes of
`saved` and workspace while a call is traced.  Both are results of the call, so XLA owns their memory.
Function.__call__ checks arguments and puts a custom_vjp around the primitives.
"""

import ctypes
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .. import c
from .._arguments import refuse
from .._operators import OPERATORS, all_fields, companion, find, gradient, leaf, put, reads, schema_name
from .._shapes import Shapes

DTYPES = {"float32": c.GT_F32, "bfloat16": c.GT_BF16, "float16": c.GT_F16}
PACKED = ("cu_seqlens", "seq_count")
MEMORY = ("saved", "workspace")  # results that are arrays of bytes
_UNUSED_BY_BACKWARD = {("rmsnorm_linear", "bias"), ("norm_mix", "residual"), ("wkv_ssm_mixed", "residual"),
                       ("add_norm", "beta")}
_PUBLIC = {"state_in": "state", "state_out": "state", "conv_state_in": "conv_state", "conv_state_out": "conv_state",
           "wkv6_state_in": "wkv_state", "ssd_state_in": "ssm_state", "wkv6_state_out": "wkv_state",
           "ssd_state_out": "ssm_state"}


def _register():
    """Tells JAX of every handler of the library."""
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    handlers = c.gt_xla_handlers()
    for i in range(1 << 16):
        handler = handlers[i]
        if not handler.name:
            return
        name, platform = (ctypes.string_at(text).decode() for text in (handler.name, handler.platform))
        jax.ffi.register_ffi_target(name, capsule(handler.call, None, None),
                                    platform="cpu" if platform == "Host" else platform)


_register()


@functools.lru_cache(None)
def has_gpu():
    """Whether calls of this process may run kernels.  If so, memory is sized for kernels, also in calls on the CPU."""
    try:
        return bool(jax.devices("cuda")) and c.gt_device_supported(-1) == c.GT_OK
    except RuntimeError:
        return False


def _aval(like, shape, dtype):
    """Returns an abstract array that varies over the same axes of the same mesh as `like`."""
    aval = jax.core.ShapedArray(shape, dtype)
    if getattr(like, "sharding", None) is not None:
        spec = jax.sharding.PartitionSpec(*(None,) * len(shape))
        aval = aval.update(sharding=jax.sharding.NamedSharding(like.sharding.mesh, spec))
    if hasattr(like, "manual_axis_type"):
        return aval.update(manual_axis_type=like.manual_axis_type)
    return aval.update(vma=like.vma) if getattr(like, "vma", None) else aval


def _axes(array):
    """The axes of a mesh that an array in a shard_map varies over."""
    aval = jax.typeof(array)
    varying = getattr(getattr(aval, "mat", None), "varying", None)
    return frozenset(varying if varying is not None else getattr(aval, "vma", ()))


def _vary(arrays):
    """Makes all arrays in a shard_map vary over the same axes of its mesh.  Then JAX sums the gradient of an array that
    devices share over these devices."""
    given = [array for array in arrays if array is not None]
    axes = frozenset().union(*map(_axes, given))
    if not axes:
        return arrays

    def cast(array):
        missing = tuple(axes - _axes(array))
        if not missing:
            return array
        return jax.lax.pcast(array, missing, to="varying") if hasattr(jax.lax, "pcast") \
            else jax.lax.pvary(array, missing)
    return tuple(None if array is None else cast(array) for array in arrays)


class Call:
    """A pass of an operator as a primitive.  Parameters of the primitive: operands and results, the struct's fields of
    its inputs and outputs; options, the values of the operator's options, in their order."""

    def __init__(self, shapes, name):
        self.shapes, self.operator, self.name = shapes, shapes.operator, name
        self.fields = {field for field, _, _ in all_fields(self.operator.struct)}
        self.by_field = {tensor.field: tensor for tensor in self.operator.tensors}
        self.words = {output.field: output.shape for output in (*self.operator.outputs, *self.operator.inner)}
        self.words.update({gradient(output.field): output.shape for output in self.operator.outputs})
        self.target = f"gt_xla_{self.operator.c_name}_{name}"
        self.describe = functools.lru_cache(4096)(self.describe)
        self.compiled = functools.lru_cache(4096)(self.compiled)
        primitive = self.primitive = Primitive(f"gt_kernels_{self.operator.name}_{name}")
        primitive.multiple_results = True
        primitive.def_impl(lambda *arrays, **parameters: self.compiled(**parameters)(*arrays))
        primitive.def_abstract_eval(self.abstract)
        mlir.register_lowering(primitive, self.lower)
        batching.primitive_batchers[primitive] = self.batch
        ad.primitive_jvps[primitive] = self.refuse_derivative
        _check_replication(primitive)

    def bind(self, operands, results, options):
        """operands: [(field, array)].  Returns {field: array}, without `saved` and workspace if they have no bytes."""
        fields, arrays = zip(*operands)
        types = self.describe(fields, tuple((array.shape, array.dtype) for array in arrays), tuple(results), options,
                              has_gpu())
        results = tuple(field for field, (shape, _) in zip(results, types) if field not in MEMORY or shape[0])
        return dict(zip(results, self.primitive.bind(*arrays, operands=fields, results=results, options=options)))

    def compiled(self, **parameters):
        return jax.jit(functools.partial(self.primitive.bind, **parameters))

    # ---- shapes and sizes ----

    def abstract(self, *avals, operands, results, options):
        types = self.describe(operands, tuple((a.shape, a.dtype) for a in avals), results, options, has_gpu())
        return [_aval(avals[0], *type_) for type_ in types]

    def describe(self, operands, types, results, options, is_gpu):
        """The shape and dtype of each result."""
        operator, struct, sizes = self.operator, self.operator.struct(), {}
        values = {field: jax.ShapeDtypeStruct(*type_) for field, type_ in zip(operands, types)}
        call = "pool" if self.name == "forward" and "slots" in values else self.name
        named = {schema_name(self.in_place(field) if call == "pool" else field): value
                 for field, value in values.items()}
        self.shapes.set_options(struct, options, sizes)
        rows = self.shapes.set_sizes(struct, named, call, sizes)
        dtype = values[operator.tensors[0].field].dtype
        struct.dtype = DTYPES[dtype.name]
        for field, value in values.items():
            written = self.in_place(field) if call == "pool" else field if call == "step" else ""
            if "state_out" in written and operator.state_dtype(written):
                put(struct, operator.state_dtype(written), DTYPES[value.dtype.name])
            if self.shapes.kind_of.get(schema_name(field)) == "w":
                put(struct, companion(field), DTYPES[value.dtype.name])

        found = {}
        for field in results:
            tensor = self.tensor_of_gradient(field)
            if field in self.words:
                output = next(o for o in (*operator.outputs, *operator.inner) if field == o.field)
                state = named.get(schema_name(field)) if call in ("step", "pool") else None
                found[field] = (self.shapes.shape(output.shape, sizes, rows),
                                dtype if output.kind == "x" else self.companion_dtype(struct, field, dtype)
                                if output.kind == "w" else jnp.float32 if state is None else state.dtype)
            elif tensor:
                shape = values[tensor.field].shape if tensor.field in values \
                    else self.shapes.shape(tensor.shapes[0], sizes, rows)
                found[field] = (shape, values[tensor.field].dtype if tensor.kind in "xw" else jnp.float32)
        if "saved" in values:
            struct.saved, struct.saved_bytes = 256, values["saved"].shape[0]
        need = self.memory(struct, (*operands, *results)) if is_gpu else c.gt_workspace()
        found["saved"] = ((need.saved,), jnp.uint8)
        found["workspace"] = ((getattr(need, self.name),), jnp.uint8)
        return tuple((tuple(map(int, found[field][0])), np.dtype(found[field][1])) for field in results)

    @staticmethod
    def companion_dtype(struct, field, dtype):
        """The dtype of an output of kind w beside activations of `dtype`."""
        inner, name = find(struct, companion(field))
        return next((key for key, value in DTYPES.items() if value == getattr(inner, name)), dtype)

    @staticmethod
    def in_place(field):
        return field.replace("state_in", "state_out")

    def tensor_of_gradient(self, field):
        return next((t for t in self.operator.tensors if gradient(t.field) == field and field not in self.words), None)

    def memory(self, struct, fields):
        """Asks the library for the sizes of `saved` and workspace, for tensors aligned as XLA aligns them."""
        for field in fields:
            if field not in MEMORY:
                put(struct, field, 256)
            if self.name == "backward" and reads(field) in self.fields:
                put(struct, reads(field), 1)
        query, need = getattr(c, f"gt_{self.operator.c_name}_workspace"), c.gt_workspace()
        c.check(query(ctypes.byref(struct), ctypes.byref(need)))
        if self.name == "forward" and "saved" in fields:
            struct.saved, struct.saved_bytes = 256, need.saved
            c.check(query(ctypes.byref(struct), ctypes.byref(need)))
        return need

    # ---- rules ----

    def lower(self, context, *values, operands, results, options):
        attributes = {field: (np.float32 if kind == "float" else np.int64)(value)
                      for (field, kind), value in zip(self.operator.options, options)
                      if field != "sum_dtype"}  # the handler takes sum_dtype from the buffers
        outputs = [self.in_place(field) if "slots" in operands else field for field in operands]
        aliases = {i: results.index(field) for i, field in enumerate(outputs) if field in results}
        rule = jax.ffi.ffi_lowering(self.target, operand_output_aliases=aliases)
        return rule(context, *values, operands=" ".join(operands), results=" ".join(results), **attributes)

    def refuse_derivative(self, primals, tangents, *, operands, **_):
        name = f"gt_kernels.jax.{self.operator.c_name}"
        if self.name == "forward" and "slots" in operands:
            refuse(name, "a call with slots has no derivatives: call it without slots", c.GT_ERROR_UNSUPPORTED)
        refuse(name + ("_step" if self.name == "step" else ""),
               "a step has no derivatives: use the function without _step" if self.name == "step" else
               "gradients of gradients are not supported", c.GT_ERROR_UNSUPPORTED)

    def is_of_batch(self, field, shape):
        """Whether the first index of an array counts batch elements or rows.  `shape` lacks vmap's index."""
        tensor = self.by_field.get(field) or self.tensor_of_gradient(field) or \
            self.by_field.get(field.replace("state_out", "state_in"))
        words = tensor.shapes[0] if tensor else self.words.get(field, "B")  # integers of steps: [B]
        return words[0] in "BM" or (words[0] == "@" and len(shape) == len(words))

    def batch(self, arrays, axes, *, operands, results, options):
        """The rule for vmap.  Calls whose parameters are the same become one larger call.  Other calls, and gradients
        of parameters, run in a loop.  Backward does not use `saved`, which fits only the batch of its own forward
        call."""
        count = next(array.shape[axis] for array, axis in zip(arrays, axes) if axis is not None)
        arrays = [array if axis is None else jnp.moveaxis(array, axis, 0) for array, axis in zip(arrays, axes)]
        inputs = [(field, array, axis is not None) for field, array, axis in zip(operands, arrays, axes)
                  if field != "saved"]
        shapes = {field: array.shape[is_mapped:] for field, array, is_mapped in inputs}
        wanted = [field for field in results if field not in MEMORY]
        cannot_merge = any(field in ("cu_seqlens", "slots", "rounding_seed") or
                           (is_mapped and not self.is_of_batch(field, shapes[field])) for field, _, is_mapped in inputs)

        def is_parameter(field):
            tensor = self.tensor_of_gradient(field)
            return tensor is not None and not self.is_of_batch(field, shapes.get(tensor.field, (0,) * 9))
        looped = wanted if cannot_merge else [field for field in wanted if is_parameter(field)]
        merged = [field for field in wanted if field not in looped]
        found = {}
        if merged:
            operands_ = []
            for field, array, is_mapped in inputs:
                if self.is_of_batch(field, shapes[field]):
                    array = array if is_mapped else jnp.broadcast_to(array, (count, *array.shape))
                    array = array.reshape(count * array.shape[1], *array.shape[2:])
                operands_.append((field, array))
            outputs = self.bind(operands_, [*merged, "workspace"], options)
            for field in merged:
                rows, *rest = outputs[field].shape
                found[field] = outputs[field].reshape(count, rows // count, *rest)
        if looped:
            mapped = [array for _, array, is_mapped in inputs if is_mapped]

            def one(values):
                values = iter(values)
                operands_ = [(field, next(values) if is_mapped else array) for field, array, is_mapped in inputs]
                outputs = self.bind(operands_, [*looped, "workspace"], options)
                return [outputs[field] for field in looped]
            found.update(zip(looped, jax.lax.map(one, mapped)))
        for field in set(results) - set(wanted):
            found[field] = jnp.zeros((count, 0), jnp.uint8)
        return [found[field] for field in results], [0] * len(results)


def _check_replication(primitive):
    """shard_map of JAX before 0.7 wants a rule that says on which devices results are the same."""
    try:
        from jax.experimental import shard_map
        shard_map.register_check(primitive)(
            lambda mesh, *sets, results, **_: [functools.reduce(set.intersection, [s for s in sets if s is not None])]
            * len(results))
        shard_map.register_standard_rewrite(primitive)
    except (ImportError, AttributeError):
        pass


class Function:
    """An operator as its users call it."""

    def __init__(self, operator):
        self.operator, self.name = operator, operator.c_name
        shapes = Shapes(operator)
        shapes.module = "gt_kernels.jax"
        self.shapes = shapes
        steps = hasattr(c, f"gt_{operator.c_name}_step")
        self.calls = {name: Call(shapes, name) for name in ("forward", "backward", "step")[:2 + steps]}
        self.states = [tensor for tensor in operator.tensors if tensor.is_state]
        self.outputs = [output.field for output in operator.outputs]
        self.ys = self.outputs[:len(self.outputs) - len(self.states)]
        self.required = tuple(output.field for output in operator.inner if output.is_required)
        self.is_rows = operator.tensors[0].shapes[0][0] == "M"
        self.fields = self.calls["forward"].fields
        self.kept = [y for y in self.ys if reads(y) in self.fields]
        self.reads_sum = next((i for i, (field, _) in enumerate(operator.options) if field == "reads_sum"), None)
        self.names = [tensor.field for tensor in operator.tensors] + list(PACKED) * operator.is_recurrent

        @functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
        def apply(options, flags, *arrays):
            return self.forward(options, flags[0], arrays, False)[0]
        apply.defvjp(self.forward_rule, self.backward_rule)
        self.apply = apply

    # ---- arguments ----

    def refuse(self, function, name, text, status=c.GT_ERROR_VALUE):
        refuse(f"gt_kernels.jax.{function}", f"{_PUBLIC.get(name, name)} {text}", status)

    def convert(self, function, fields, arrays):
        """Converts arrays to the dtypes that the library takes."""
        kinds = {tensor.field: tensor.kind for tensor in self.operator.tensors}
        first, result = None, []
        for field, array in zip(fields, arrays):
            name = schema_name(field)
            kind = kinds.get(field.replace("state_out", "state_in"), "i")
            if array is None:
                if field in kinds and not self.shapes.tensors[name].optional:
                    self.refuse(function, name, "is None", c.GT_ERROR_NULL)
                if "state_out" in field:
                    self.refuse(function, name, "is None", c.GT_ERROR_NULL)
                result.append(None)
                continue
            if not isinstance(array, (jax.Array, np.ndarray)):
                kind = type(array)
                self.refuse(function, name, f"is a {kind.__module__}.{kind.__qualname__}: must be an array")
            array = jnp.asarray(array)
            if kind == "i":
                result.append(self.integers(function, name, array))
                continue
            if not jnp.issubdtype(array.dtype, jnp.floating):
                self.refuse(function, name, f"has dtype {array.dtype}: must be a floating-point dtype",
                            c.GT_ERROR_DTYPE)
            first = array.dtype if first is None else first
            if kind in "xp" and (array.dtype != first or first.name not in DTYPES):
                right = "float32, bfloat16 or float16" if first.name not in DTYPES else str(first)
                self.refuse(function, name, f"has dtype {array.dtype}: must be {right}", c.GT_ERROR_DTYPE)
            if kind == "f" and ("state_out" in field or ("state_in" in field and "slots" in fields)):
                # a step rounds states only if its parameters may have 16 bits; a pool of conv_ssd has its own dtype
                is_step, types = function.endswith("_step"), self.operator.state_dtype(field)
                right = DTYPES if types and (not is_step or self.operator.parameter_dtype) else ("float32",)
                if array.dtype.name not in right:
                    self.refuse(function, name, f"has dtype {array.dtype}: must be {' or '.join(right)}",
                                c.GT_ERROR_DTYPE)
            elif kind in "fP":
                array = array.astype(jnp.float32)
            if kind == "w" and array.dtype not in (first, jnp.float32):
                array = array.astype(first)
            result.append(array)
        return result

    def integers(self, function, name, array):
        """Converts an array to int32.  A number beyond int32 becomes the nearest int32, so that it stays out of
        range."""
        if not jnp.issubdtype(array.dtype, jnp.integer):
            self.refuse(function, name, f"has dtype {array.dtype}: must be int32 or int64", c.GT_ERROR_DTYPE)
        if array.dtype.itemsize == 8:
            array = jnp.clip(array, -2 ** 31, 2 ** 31 - 1)
        return array.astype(jnp.int32)

    def check(self, call, function, operands, results, options):
        """Finds a wrong shape before anything is traced, and names the argument as the caller knows it."""
        try:
            self.calls[call].describe(tuple(field for field, _ in operands),
                                      tuple((array.shape, array.dtype) for _, array in operands), tuple(results),
                                      options, False)
        except c.Error as error:
            text = str(error).partition(": ")[2]
            name, space, rest = text.partition(" ")
            names = {**_PUBLIC, "dt_min": "dt_limit[0]", "dt_max": "dt_limit[1]", "H": "heads", "N": "state_size",
                     "G": "groups"} if rest.startswith("=") else _PUBLIC
            text = f"gt_kernels.jax.{function}: {names.get(name, name)}{space}{rest}"
            raise type(error)(error.status, text) from None

    # ---- calls ----

    def __call__(self, arrays, options, final_state=False, recompute=False):
        arrays = self.convert(self.name, self.names, arrays)
        if self.is_rows:
            self.check_rows(arrays)
        rows = arrays[0].shape[:-1]
        if self.is_rows:
            arrays = [array if array is None or tensor.shapes[0][0] != "M" else
                      array.reshape(math.prod(array.shape[:-1]), array.shape[-1])
                      for tensor, array in zip(self.operator.tensors, arrays)]
        operands = [(field, array) for field, array in zip(self.names, arrays) if array is not None]
        self.check("forward", self.name, operands, self.outputs, options)
        results = self.apply(options, (bool(final_state), bool(recompute)), *_vary(tuple(arrays)))
        if self.is_rows:
            results = [y.reshape(*rows, y.shape[-1]) for y in results]
        return tuple(results) if len(results) > 1 else results[0]

    def pool(self, arrays, options):
        """arrays: inputs with pools of states, cu_seqlens, seq_count, slots, starts_zero.  Returns each y and pool."""
        fields = self.names + ["slots", "starts_zero"]
        for field, array in zip(fields, arrays):
            if array is None and (field in ("cu_seqlens", "slots") or "state_in" in field):
                self.refuse(self.name, schema_name(field), "is None", c.GT_ERROR_NULL)
        if getattr(arrays[-1], "dtype", None) == jnp.bool_:
            arrays = (*arrays[:-1], jnp.asarray(arrays[-1], jnp.int32))
        return self.update("forward", self.name, fields, arrays, options)

    def check_rows(self, arrays):
        """All indices but the last count rows.  Checks that these indices are the same in all arrays."""
        for tensor, array in zip(self.operator.tensors, arrays):
            if array is None or tensor.shapes[0][0] != "M":
                continue
            if array.ndim < 1 or array.shape[:-1] != arrays[0].shape[:-1]:
                self.refuse(self.name, tensor.name, f"has shape {list(array.shape)}: must be [...,D], where ... = "
                            f"{list(arrays[0].shape[:-1])}", c.GT_ERROR_SIZE)

    def step(self, arrays, options):
        """arrays: inputs with the states, then slots, tokens and commit.  Returns each y and each state."""
        fields = [tensor.field.replace("state_in", "state_out") for tensor in self.operator.tensors] + list(self.operator.of_steps)
        return self.update("step", f"{self.name}_step", fields, arrays, options)

    def update(self, call, function, fields, arrays, options):
        arrays = self.convert(function, fields, (*arrays, *(None,) * (len(fields) - len(arrays))))
        operands = [(field, array) for field, array in zip(fields, arrays) if array is not None]
        self.check(call, function, operands, self.outputs, options)
        varying = _vary(tuple(array for _, array in operands))
        found = self.calls[call].bind([(field, array) for (field, _), array in zip(operands, varying)],
                                      (*self.outputs, *self.required, "workspace"), options)
        return tuple(found[field] for field in self.outputs)

    def forward(self, options, final_state, arrays, is_saved, kept=()):
        """Returns (the outputs that the user gets, the array `saved` or None, each y, {field: inner output}).  kept:
        the inner outputs that backward reads."""
        operands = [(field, array) for field, array in zip(self.names, arrays) if array is not None]
        wanted = self.outputs if final_state else self.ys
        saved = ("saved",) * (is_saved and self.operator.has_saved)
        inner = tuple(dict.fromkeys((*kept, *self.required)))
        found = self.calls["forward"].bind(operands, (*wanted, *inner, *saved, "workspace"), options)
        return (tuple(found[field] for field in wanted), found.get("saved"), [found[y] for y in self.ys],
                {field: found[field] for field in kept})

    def forward_rule(self, options, flags, *arrays):
        final_state, recompute = flags
        given = {field for field, array in zip(self.names, arrays) if array is not None}
        inner = tuple(output.field for output in self.operator.inner
                      if output.gain in given or (reads(output.field) in self.fields and self.reads_y(arrays)))
        results, saved, ys, inner = self.forward(options, final_state, arrays, not recompute, inner)
        kept = [y if self.reads(arrays, options) and field in self.kept else None for field, y in zip(self.ys, ys)]
        if self.reads_sum is not None and options[self.reads_sum]:
            arrays = self.stand_in(arrays, kept[self.ys.index("sum")])
        return results, (arrays, saved, kept, inner)

    @staticmethod
    def stand_in(arrays, total):
        """Returns arrays for the backward pass of add_norm.  Backward reads the sum, `total`.  Of x and residual it
        needs only shape and dtype."""
        x, residual, *others = arrays
        return (total if x.dtype == total.dtype else x, None if residual is None else total, *others)

    def reads(self, arrays, options):
        """Whether backward reads an output: the sum, if the option reads_sum is set; or y, from which kernels of
        bfloat16 compute dz."""
        if self.reads_sum is not None:
            return bool(options[self.reads_sum])
        return bool(self.kept and self.reads_y(arrays))

    def reads_y(self, arrays):
        z = [array for field, array in zip(self.names, arrays) if leaf(field) == "z" and array is not None]
        return bool(z and z[0].dtype == jnp.bfloat16 and has_gpu())

    def backward_rule(self, options, flags, residuals, cotangents):
        arrays, saved, ys, inner = residuals
        given = list(zip(self.names, arrays))
        operands = [(field, array) for field, array in given
                    if array is not None and (self.operator.name, field) not in _UNUSED_BY_BACKWARD]
        operands += inner.items()
        operands += [(field, y) for field, y in zip(self.ys, ys) if y is not None]
        operands += [(gradient(field), value) for field, value in zip(self.outputs, cotangents)]
        if saved is not None:
            operands.append(("saved", saved))
        tensors = {tensor.field: tensor for tensor in self.operator.tensors}
        same = self.same_gradient(dict(given))
        wanted = [gradient(field) for field, array in given
                  if field in tensors and array is not None and field not in (self.operator.own_gradient, same)]
        found = self.calls["backward"].bind(operands, (*wanted, "workspace"), options)
        if self.operator.own_gradient:
            found[gradient(self.operator.own_gradient)] = cotangents[0]
        if same:
            found[gradient(same)] = found[gradient(self.operator.same_gradient[1])]
        return tuple(None if array is None or field not in tensors else found[gradient(field)].astype(array.dtype)
                     for field, array in given)

    def same_gradient(self, arrays):
        """Returns the tensor that gets the gradient of another tensor, because both have the same dtype.  None: there
        is none."""
        one, other = self.operator.same_gradient or (None, None)
        is_same = one and arrays[one] is not None and arrays[one].dtype == arrays[other].dtype
        return one if is_same else None


FUNCTIONS = {operator.name: Function(operator) for operator in OPERATORS}
