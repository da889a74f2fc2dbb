"""Tests of gt_kernels.jax: numbers and gradients against lax.scan in float64, bits against the C twins, and JAX's
transformations of operators.  They run on the CPU, and on a GPU if there is one."""

import ctypes
import functools
import itertools
import os
import subprocess
import sys
import tempfile
import unittest

# shard_map needs two devices.  JAX must not take all memory of a GPU, since PyTorch's tests run in the same process.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
try:
    import jax
except ImportError:
    raise unittest.SkipTest("no JAX") from None

import jax.numpy as jnp
import jaxlib
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import scans
from gt_kernels import ArgumentError, UnsupportedError, c
import gt_kernels.jax as gt
from gt_kernels._operators import OPERATORS, gradient, put, schema_name
from gt_kernels._shapes import Shapes
from gt_kernels.jax import _engine

OPS = {operator.name: operator for operator in OPERATORS}
RECURRENT = ("wkv6", "wkv4", "ssd", "selective_scan", "conv1d", "conv_ssd", "wkv_ssm", "wkv_ssm_mixed")
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}
STATES = ("state", "conv_state", "wkv_state", "ssm_state")
NEAR = {"cpu": 1e-6, "gpu": 2e-5}  # for calls of other sizes, which a GPU may cut into other segments
DEVICES = [jax.devices("cpu")[0]]
if _engine.has_gpu():
    DEVICES.append(jax.devices("cuda")[0])
# Options of every operator, and the options that conv_ssd requires.
OPTIONS = {"wkv6": {"scale": 0.5}, "wkv4": {"decay": "raw"}, "ssd": {"softplus": True, "dt_limit": (0.2, 0.9)},
           "selective_scan": {"softplus": True}, "conv1d": {"activation": "silu"},
           "conv_ssd": {"softplus": True}, "wkv_ssm": {"softplus": True}, "wkv_ssm_mixed": {"softplus": True},
           "rmsnorm_linear": {"norm": "layer", "eps": 1e-3}, "norm_mix": {"heads": 3, "eps": 1e-3},
           "norm_gate": {"norm": "layer", "heads": 2},
           "add_norm": {"norm": "layer", "eps": 1e-3, "reads_sum": True}}
NEEDED = {"conv_ssd": {"state_size": 8, "groups": 2}}


def function_of(module, name):
    """The function of an operator, or of its step.  wkv_ssm_mixed is wkv_ssm with mixed=True."""
    if module is gt and "_mixed" in name:
        return functools.partial(getattr(gt, name.replace("_mixed", "")), mixed=True)
    return getattr(module, name)


def public(tensor):
    return _engine._PUBLIC.get(tensor.name, tensor.name)


def shapes(op, B=2, T=19, rows=None):
    """The shape of each argument, in the order of the function's arguments."""
    H, N, P, G, D, W, O = 4, 8, 6, 2, 12, 4, 10
    rows, E = rows or B, H * P + 2 * G * N
    recurrent = {
        "wkv6": dict(r=(B, T, H, N), k=(B, T, H, N), v=(B, T, H, 5), w=(B, T, H, N), u=(H, N), state=(rows, H, N, 5)),
        "wkv4": dict(k=(B, T, D), v=(B, T, D), w=(D,), u=(D,), state=(rows, 3, D)),
        "ssd": dict(x=(B, T, H, P), dt=(B, T, H), A=(H,), Bm=(B, T, G, N), Cm=(B, T, G, N), Dskip=(H,), z=(B, T, H, P),
                    dt_bias=(H,), state=(rows, H, P, N)),
        "selective_scan": dict(u=(B, T, D), dt=(B, T, D), A=(D, N), Bm=(B, T, G, N), Cm=(B, T, G, N), Dskip=(D,),
                               z=(B, T, D), dt_bias=(D,), state=(rows, D, N)),
        "conv1d": dict(x=(B, T, D), weight=(D, W), bias=(D,), state=(rows, D, W - 1)),
        "conv_ssd": dict(xBC=(B, T, E), dt=(B, T, H), weight=(E, W), A=(H,), bias=(E,), Dskip=(H, P), z=(B, T, H, P),
                         dt_bias=(H,), conv_state=(rows, E, W - 1), state=(rows, H, P, N))}
    if op == "wkv_ssm":
        parts = {**recurrent["wkv6"], **recurrent["ssd"]}
        parts.pop("state")
        return {**parts, "wkv_state": (rows, H, N, 5), "ssm_state": (rows, H, P, N)}
    if op == "wkv_ssm_mixed":
        parts = shapes("wkv_ssm", B, T, rows)
        states = {"wkv_state": (rows, H, N, P), "ssm_state": parts.pop("ssm_state")}
        del parts["wkv_state"]
        return {**parts, "v": (B, T, H, P), "gain_wkv": (H, P), "gain_ssm": (H, P), "residual": (B, T, H, P), **states}
    return recurrent.get(op) or {
        "rmsnorm_linear": dict(x=(B, T, D), weight=(O, D), gamma=(D,), beta=(D,), bias=(O,)),
        "norm_mix": dict(a=(B, T, D), b=(B, T, D), gain_a=(D,), gain_b=(D,), residual=(B, T, D)),
        "norm_gate": dict(x=(B, T, D), z=(B, T, D), gamma=(D,), beta=(D,)),
        "add_norm": dict(x=(B, T, D), residual=(B, T, D), gamma=(D,), beta=(D,))}[op]


def make(op, dtype="float32", without=(), seed=1, **sizes):
    """Returns {argument: array}, without the arguments in `without`."""
    random = np.random.default_rng(seed)
    kinds = {public(tensor): tensor.kind for tensor in OPS[op].tensors}
    arrays = {}
    for name, shape in shapes(op, **sizes).items():
        value = random.standard_normal(shape)
        value = -np.exp(value) if name == "A" else abs(value) * 0.3 if name in ("dt", "dt_bias") else value
        value = value - 1 if name == "w" else value
        if (op, name) == ("wkv4", "state"):
            value[..., 1, :] = abs(value[..., 1, :])  # sums of weights, which are positive
        if name not in without:
            arrays[name] = jnp.asarray(value, jnp.float32 if kinds[name] in "fP" else dtype)
    return arrays


def optional(op):
    return [public(tensor) for tensor in OPS[op].tensors
            if tensor.optional and not (op.startswith("wkv_ssm") and tensor.name == "u")]


def results_of(module, op, arrays, options):
    """The results of a function as a tuple."""
    more = {"final_state": True} if module is gt and op in RECURRENT else {}
    found = function_of(module, op)(**arrays, **options, **more, **NEEDED.get(op, {}))
    return found if isinstance(found, tuple) else (found,)


@functools.lru_cache(None)
def with_gradients(module, op, options):
    """A compiled function of arrays.  It returns results, and the gradients of a loss that weights the elements of each
    result."""
    def loss(arrays):
        results = results_of(module, op, arrays, dict(options))
        return sum((y.astype(jnp.float64) * jnp.cos(jnp.arange(y.size, dtype=jnp.float64)).reshape(y.shape)).sum()
                   for y in results), results

    def both(arrays):
        (_, results), gradients = jax.value_and_grad(loss, has_aux=True)(arrays)
        return results, gradients
    return jax.jit(both)


def twin(op, call, arrays, options, results):
    """The results of the C twin.  arrays: {field of the struct: array}; options: as the engine stores them; results:
    {field: (shape, dtype)}."""
    operator, struct, sizes, kept = OPS[op], OPS[op].struct(), {}, []
    checks = Shapes(operator)
    arrays = {field: np.array(value, order="C") for field, value in arrays.items()}
    checks.set_options(struct, options, sizes)
    checks.set_sizes(struct, {schema_name(field): value for field, value in arrays.items()}, call, sizes)
    struct.dtype = _engine.DTYPES[arrays[operator.tensors[0].field].dtype.name]
    out = {field: np.zeros(shape, dtype) for field, (shape, dtype) in results.items()}
    for field, value in {**arrays, **out}.items():
        out_of_place = value if field not in arrays else (arrays[field] if field not in out else arrays[field])
        kept.append(out_of_place)
        put(struct, field, out_of_place.ctypes.data)
    c.check(getattr(c, f"gt_ref_{operator.c_name}_{call}")(ctypes.byref(struct)))
    return {field: arrays.get(field, out[field]) for field in results}


def inner(op, arrays):
    """{field: (shape, dtype)} of outputs that callers do not get.  arrays: by field."""
    return {output.field: (arrays[output.like].shape, arrays[output.like].dtype) for output in OPS[op].inner}


class Quiet(unittest.TestCase):
    """Runs on the CPU unless a test says otherwise."""

    @classmethod
    def setUpClass(cls):
        jax.config.update("jax_enable_x64", True)
        jax.config.update("jax_default_device", DEVICES[0])

    @classmethod
    def tearDownClass(cls):
        jax.config.update("jax_enable_x64", False)
        jax.config.update("jax_default_device", None)

    def close(self, got, expected, tolerance, what):
        got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
        self.assertEqual(got.shape, expected.shape, what)
        error = np.linalg.norm(got - expected) / max(np.linalg.norm(expected), 1e-30)
        self.assertLess(error, tolerance, what)

    def same(self, got, expected, what=""):
        self.assertEqual(got.dtype, expected.dtype, what)
        np.testing.assert_array_equal(np.asarray(got).view(np.uint8), np.asarray(expected).view(np.uint8), what)


class Interface(unittest.TestCase):
    def test_declarations_are_those_of_this_jaxlib(self):
        root = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../..")
        include = os.path.join(os.path.dirname(jaxlib.__file__), "include")
        subprocess.run(["cc", "-std=gnu11", "-fsyntax-only", "-I", root, "-I", include,
                        os.path.join(root, "tests/xla/offsets.c")], check=True)

    def test_import_needs_no_torch(self):
        code = "import sys, gt_kernels.jax; sys.exit('torch' in sys.modules)"
        subprocess.run([sys.executable, "-c", code], check=True)


class Numbers(Quiet):
    def compare(self, op, arrays, dtype, options, what):
        results, gradients = with_gradients(gt, op, tuple(options.items()))(arrays)
        exact = {name: jnp.asarray(value, jnp.float64) for name, value in arrays.items()}
        right, right_gradients = with_gradients(scans, op, tuple(options.items()))(exact)
        for i, (got, expected) in enumerate(zip(results, right)):
            self.close(got, expected, TOLERANCE[dtype], f"{what}: result {i}")
        self.assertEqual(set(gradients), set(right_gradients))
        for name in gradients:
            self.assertEqual(gradients[name].dtype, arrays[name].dtype)
            self.close(gradients[name], right_gradients[name], TOLERANCE[dtype], f"{what}: d{name}")

    def test_against_float64_scans(self):
        for device in DEVICES:
            with jax.default_device(device):
                for op in OPS:
                    for dtype in TOLERANCE if op in ("ssd", "norm_gate", "add_norm") else ("float32", "bfloat16"):
                        with self.subTest(op=op, dtype=dtype, device=device):
                            self.compare(op, make(op, dtype), dtype, OPTIONS[op], "all")
                    with self.subTest(op=op, device=device, case="bare"):
                        self.compare(op, make(op, without=optional(op)), "float32", {}, "bare")

    def test_options(self):
        cases = [("wkv6", {"decay": "log"}), ("norm_gate", {"gate_first": True}), ("add_norm", {"eps": 1e-2})]
        for device in DEVICES:
            with jax.default_device(device):
                for op, options in cases:
                    arrays = make(op)
                    if op == "wkv6":
                        arrays["w"] = -jnp.exp(arrays["w"])
                    self.compare(op, arrays, "float32", options, f"{op} {options}")

    def test_shared_state_and_conversions(self):
        """A state without the batch index, and parameters of other dtypes, whose gradients have these dtypes."""
        arrays = make("selective_scan")
        arrays["state"] = arrays["state"][0]
        arrays["Dskip"] = arrays["Dskip"].astype(jnp.bfloat16)
        self.compare("selective_scan", arrays, "bfloat16", {}, "shared")
        arrays = make("ssd", "bfloat16")
        arrays["dt"] = arrays["dt"].astype(jnp.float32)
        self.compare("ssd", arrays, "bfloat16", {}, "dt in float32")

    def test_sum_in_fp32(self):
        """A stream in float32 beside 16 bits: the sum is exact, also where the residual is converted, or missing."""
        for device, dtype, reads_sum in itertools.product(DEVICES, ("bfloat16", "float16"), (False, True)):
            for kind in ("float32", dtype, None):
                with self.subTest(device=device, dtype=dtype, residual=kind, reads_sum=reads_sum), \
                        jax.default_device(device):
                    arrays = make("add_norm", dtype, without=() if kind else ("residual",))
                    right = arrays["x"].astype("float32")
                    if kind:
                        arrays["residual"] = arrays["residual"].astype(kind)
                        right = right + arrays["residual"].astype("float32")
                    options = {"reads_sum": reads_sum, "sum_in_fp32": kind != "float32"}
                    run = functools.partial(results_of, gt, "add_norm", options=options)
                    (y, total), pull = jax.vjp(jax.jit(run), arrays)
                    self.same(total, right, "sum")
                    self.assertEqual(y.dtype, dtype)
                    cotangents = [jnp.cos(jnp.arange(y.size, dtype=r.dtype)).reshape(y.shape) for r in (y, total)]
                    found = pull(tuple(cotangents))[0]
                    wide = {name: value.astype(jnp.float64) for name, value in arrays.items()}
                    results, pull = jax.vjp(functools.partial(results_of, scans, "add_norm", options={}), wide)
                    self.close(y, results[0], TOLERANCE[dtype], "y")
                    for name, value in pull(tuple(ct.astype(jnp.float64) for ct in cotangents))[0].items():
                        self.assertEqual(found[name].dtype, arrays[name].dtype)
                        self.close(found[name], value, TOLERANCE[dtype], f"d{name}")

    def test_backward_keeps_the_sum_alone(self):
        """With reads_sum neither x nor residual is kept."""
        arrays = make("add_norm")
        for reads_sum in (False, True):
            _, pull = jax.vjp(lambda x, residual, reads=reads_sum: gt.add_norm(x, residual, reads_sum=reads),
                              arrays["x"], arrays["residual"])
            total = arrays["x"] + arrays["residual"]
            kept = [leaf for leaf in jax.tree.leaves(pull) if getattr(leaf, "size", 0) == total.size]
            self.assertEqual({(leaf.reshape(total.shape) == total).all().item() for leaf in kept}, {reads_sum})

    def test_gains_of_heads(self):
        """They give the bits of the gains of all channels of a head."""
        arrays = make("wkv_ssm_mixed")
        heads = {**arrays, "gain_wkv": arrays["gain_wkv"][:, 0], "gain_ssm": arrays["gain_ssm"][:, 1]}
        channels = {name: jnp.broadcast_to(value[:, None], arrays[name].shape) if name.startswith("gain") else value
                    for name, value in heads.items()}
        found, gradients = with_gradients(gt, "wkv_ssm_mixed", ())(heads)
        right, expected = with_gradients(gt, "wkv_ssm_mixed", ())(channels)
        for got, y in zip(found, right):
            self.same(got, y)
        for name, value in expected.items():
            value = value.sum(1) if name.startswith("gain") else value
            self.close(gradients[name], value, 1e-6, f"d{name}")

    def test_what_a_mixed_call_keeps(self):
        """y of a branch is kept only if the branch has a gain."""
        arrays = make("wkv_ssm_mixed")
        plain = {name: value for name, value in arrays.items() if name not in ("gain_wkv", "gain_ssm", "residual")}
        ys, names = gt.wkv_ssm(**plain), ("gain_wkv", "gain_ssm")
        for given in itertools.product((False, True), repeat=2):
            more = {name: arrays[name] for name, is_given in zip(names, given) if is_given}
            _, pull = jax.vjp(lambda arrays: gt.wkv_ssm(**arrays, mixed=True), {**plain, **more})
            leaves = [leaf for leaf in jax.tree.leaves(pull) if hasattr(leaf, "shape")]
            for y, is_given in zip(ys, given):
                self.assertEqual(any(leaf.shape == y.shape and (leaf == y).all().item() for leaf in leaves), is_given)

    def test_recompute_and_segments(self):
        for device in DEVICES:
            with jax.default_device(device):
                for op in ("wkv6", "ssd", "selective_scan"):
                    arrays = make(op, T=70)
                    _, right = with_gradients(gt, op, ())(arrays)
                    for options in (("recompute", True),), (("segments", 3),):
                        _, found = with_gradients(gt, op, options)(arrays)
                        for name in found:
                            self.close(found[name], right[name], NEAR[device.platform], f"{op} {options}: d{name}")


class Bits(Quiet):
    """On the CPU results equal those of the C twin bit for bit."""

    def options(self, op, options):
        seen = []
        function = _engine.FUNCTIONS[op]
        original = type(function).__call__
        try:
            type(function).__call__ = lambda self, arrays, options, *_: seen.append(options)
            function_of(gt, op)(**make(op), **options, **NEEDED.get(op, {}))
        finally:
            type(function).__call__ = original
        return seen[0]

    def test_forward_and_backward(self):
        for op, operator in OPS.items():
            with self.subTest(op=op), jax.default_device(DEVICES[0]):
                given = make(op)
                rows = op not in RECURRENT
                fields = {public(tensor): tensor for tensor in operator.tensors}
                arrays = {fields[name].field: value for name, value in given.items()}
                options = self.options(op, OPTIONS[op])

                def run(given, op=op):
                    return results_of(gt, op, given, OPTIONS[op])
                results, pull = jax.vjp(jax.jit(run), given)
                outputs = [output.field for output in operator.outputs]
                right = twin(op, "forward", arrays, options,
                             {**{field: (y.shape, y.dtype) for field, y in zip(outputs, results)}, **inner(op, arrays)})
                for field, y in zip(outputs, results):
                    self.same(y, right[field], field)
                arrays.update((field, right[field]) for field in inner(op, arrays))  # which backward reads
                cotangents = tuple(jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape) for y in results)
                gradients = pull(cotangents)[0]
                arrays.update(zip(map(gradient, outputs), cotangents))
                arrays.update((field, y) for field, y in zip(outputs, results) if field == "sum")  # which is read
                wanted = {gradient(fields[name].field): name for name in given
                          if fields[name].field != operator.own_gradient}
                right = twin(op, "backward", arrays, options,
                             {field: (given[name].shape, given[name].dtype) for field, name in wanted.items()})
                for field, name in wanted.items():
                    self.same(gradients[name], right[field], field)
                self.assertTrue(rows or len(results) > 1)

    def test_steps(self):
        for op in RECURRENT:
            operator = OPS[op]
            with self.subTest(op=op), jax.default_device(DEVICES[0]):
                given = make(op, T=3, B=3, rows=5)
                integers = {"slots": jnp.array([4, 0, 7], jnp.int32), "tokens": jnp.array([3, 2, 3]),
                            "commit": jnp.array([1, 2, 3])}
                needed = NEEDED.get(op, {})
                results = jax.jit(functools.partial(function_of(gt, op + "_step"), **needed))(**given, **integers)
                fields = {public(tensor): tensor.field.replace("state_in", "state_out") for tensor in operator.tensors}
                arrays = {fields[name]: value for name, value in given.items()}
                arrays.update({name: np.asarray(value, np.int32) for name, value in integers.items()})
                outputs = [output.field for output in operator.outputs]
                right = twin(op, "step", arrays, self.options(op, {}),
                             {**{field: (y.shape, y.dtype) for field, y in zip(outputs, results)}, **inner(op, arrays)})
                for field, y in zip(outputs, results):
                    self.same(y, right[field], field)

    def test_states_of_16_bits(self):
        """16-bit states are rounded to nearest, or stochastically by seed and step, with the same bits as the twin."""
        for op, dtype in (("wkv6", "bfloat16"), ("ssd", "float16"), ("selective_scan", "bfloat16")):
            with self.subTest(op=op, dtype=dtype), jax.default_device(DEVICES[0]):
                given = make(op, T=1, rows=5)
                given["state"] = given["state"].astype(dtype)
                slots, steps = jnp.array([4, 1], jnp.int32), jnp.array([3, 9])
                step = jax.jit(functools.partial(function_of(gt, op + "_step"), slots=slots))
                y, exact = step(**{**given, "state": given["state"].astype("float32")})
                found, state = step(**given)
                self.same(found, y, op)
                self.same(state, exact.astype(dtype), op)
                found, state = step(**given, rounding=(jnp.array([7, -3], jnp.int32), steps))
                again = step(**given, rounding=(jnp.array([7, -3], jnp.int32), steps))[1]
                other = step(**given, rounding=(jnp.array([7, -3], jnp.int32), steps + 1))[1]
                self.same(found, y, op)
                self.same(state, again, op)
                unit = jnp.finfo(dtype).eps * abs(exact) + jnp.finfo(dtype).tiny
                self.assertTrue((abs(state.astype("float32") - exact) <= unit * 1.01).all())
                self.assertFalse((state == other).all())
                self.assertTrue((state[jnp.array([0, 2, 3])] == given["state"][jnp.array([0, 2, 3])]).all())

    def test_steps_continue_forward(self):
        for device in DEVICES:
            for op in RECURRENT:
                with self.subTest(op=op, device=device), jax.default_device(device):
                    given = make(op, T=4, without=STATES)
                    states = {name: jnp.zeros(shape, jnp.float32) for name, shape in shapes(op, T=4).items()
                              if name in STATES}
                    whole = results_of(gt, op, {**given, **states}, {})
                    names = [name for name in given if given[name].ndim > 2 and given[name].shape[1] == 4]
                    step = jax.jit(functools.partial(function_of(gt, op + "_step"), **NEEDED.get(op, {})),
                                   donate_argnames=tuple(states))
                    missing = dict.fromkeys(optional(op))
                    count = len(whole) - len(states)
                    ys = []
                    for t in range(4):
                        one = {name: value[:, t:t + 1] if name in names else value for name, value in given.items()}
                        results = step(**{**missing, **one, **states})
                        states = dict(zip(states, results[count:]))
                        ys.append(results[:count])
                    for i in range(count):
                        self.close(jnp.concatenate([y[i] for y in ys], 1), whole[i], NEAR[device.platform], f"y {i}")
                    for name, got, expected in zip(states, states.values(), whole[count:]):
                        self.close(got, expected, NEAR[device.platform], name)


class Packed(Quiet):
    def test_sequences_are_those_alone(self):
        for device in DEVICES:
            for op in RECURRENT:
                with self.subTest(op=op, device=device), jax.default_device(device):
                    bounds = [0, 7, 7, 19]
                    given = make(op, B=1, rows=3)
                    run = functools.partial(results_of, gt, op)
                    whole = jax.jit(lambda given, cu: run(given, {"cu_seqlens": cu}))(given, jnp.array(bounds))
                    count = len(whole) - sum(name in STATES for name in given)
                    for s, (first, last) in enumerate(zip(bounds, bounds[1:])):
                        if first == last:
                            continue
                        alone = run({name: value[:, first:last] if value.ndim > 2 and value.shape[1] == 19 else
                                     value[s:s + 1] if name in STATES else value for name, value in given.items()}, {})
                        for i, y in enumerate(alone):
                            part = whole[i][:, first:last] if i < count else whole[i][s:s + 1]
                            self.close(part, y, NEAR[device.platform], f"sequence {s}, result {i}")

    def test_pools(self):
        """A call with a pool gives the bits of a call without.  Other rows of the pool do not change, also if the
        caller keeps the old pool."""
        kinds = {"wkv6": "bool", "ssd": "int32", "conv1d": "bool", "conv_ssd": "int32"}
        for device, (op, kind) in itertools.product(DEVICES, kinds.items()):
            with self.subTest(op=op, device=device, kind=kind), jax.default_device(device):
                given, names = make(op, B=1, rows=6), [name for name in shapes(op) if name in STATES]
                pools = {name: given.pop(name) for name in names}
                cu, slots = jnp.array([0, 7, 7, 15, 19]), jnp.array([4, 1, -1, 0])
                zero = jnp.array([0, 0, 1, 1])
                run = jax.jit(lambda given, pools, op=op, kind=kind: function_of(gt, op)(
                    **given, **pools, cu_seqlens=cu, slots=slots, starts_zero=zero.astype(kind), **NEEDED.get(op, {})))
                y, *after = run(given, pools)
                starts = {name: jnp.where(zero.reshape(-1, *[1] * (pool.ndim - 1)) > 0, 0, pool[slots.clip(0)])
                          for name, pool in pools.items()}
                right, *finals = results_of(gt, op, {**given, **starts}, {"cu_seqlens": cu})
                self.same(y[:, :7], right[:, :7], op)
                self.same(y[:, 15:], right[:, 15:], op)
                self.assertFalse(y[:, 7:15].any())
                for pool, state, final in zip(pools.values(), after, finals):
                    named = jnp.array([4, 1, 0])
                    self.same(state, pool.at[named].set(final[jnp.array([0, 1, 3])]), op)
                donated = jax.jit(lambda pools, given: run(given, pools), donate_argnums=0)
                for got, expected in zip(donated(jax.tree.map(lambda pool: pool * 1, pools), given), (y, *after)):
                    self.same(got, expected, op)

    def test_pools_of_16_bits(self):
        """A pool of 16 bits gives the bits of a float32 pool with the same states, and new states are rounded."""
        dtypes = {op: (("bfloat16",), ("float16",)) for op in ("wkv6", "ssd", "conv1d")}
        dtypes["conv_ssd"] = (("bfloat16", "float16"), ("float16", "float32"), ("float32", "bfloat16"))
        for device, (op, kind) in itertools.product(DEVICES, [(op, kind) for op in dtypes for kind in dtypes[op]]):
            with self.subTest(op=op, device=device, kind=kind), jax.default_device(device):
                given, names = make(op, B=1, rows=6), [name for name in shapes(op) if name in STATES]
                small = {name: given.pop(name).astype(dtype) for name, dtype in zip(names, kind)}
                run = jax.jit(lambda given, pools, op=op: function_of(gt, op)(
                    **given, **pools, cu_seqlens=jnp.array([0, 7, 15, 19]), slots=jnp.array([4, -1, 0]),
                    starts_zero=jnp.array([0, 0, 1]), **NEEDED.get(op, {})))
                y, *states = run(given, small)
                right, *afters = run(given, {name: pool.astype(jnp.float32) for name, pool in small.items()})
                self.same(y, right, op)
                for pool, state, after in zip(small.values(), states, afters):
                    self.assertEqual(state.dtype, pool.dtype)
                    self.same(state.astype(jnp.float32), after.astype(pool.dtype).astype(jnp.float32), op)
                    self.assertTrue((state != pool).any())

    def test_gradients_and_seq_count(self):
        given = make("ssd", B=1, rows=3)
        cu = jnp.array([0, 7, 19, 19])

        def loss(given, **more):
            y, state = gt.ssd(**given, final_state=True, cu_seqlens=cu, **more)
            return (y ** 2).sum() + (state[:2] ** 2).sum()
        found = jax.grad(loss)(given)
        fewer = jax.grad(lambda given: loss(given, seq_count=jnp.array([2])))(given)
        for name in found:
            self.close(fewer[name][:2] if name == "state" else fewer[name],
                       found[name][:2] if name == "state" else found[name], 1e-6, name)
        self.assertGreater(np.linalg.norm(found["state"][:2]), 0)


class Transforms(Quiet):
    def test_vmap_is_a_larger_batch(self):
        for device in DEVICES:
            for op in OPS:
                with self.subTest(op=op, device=device), jax.default_device(device):
                    parameters = {public(t) for t in OPS[op].tensors if t.shapes[0][0] not in "BM@"}
                    given, other = make(op), make(op, seed=2)
                    axes = {name: None if name in parameters else 0 for name in given}
                    stacked = {name: given[name] if name in parameters else jnp.stack([given[name], other[name]])
                               for name in given}
                    run = functools.partial(results_of, gt, op, options=OPTIONS[op])
                    found = jax.jit(jax.vmap(run, in_axes=(axes,)))(stacked)
                    text = str(jax.make_jaxpr(jax.vmap(run, in_axes=(axes,)))(stacked))
                    self.assertNotIn("scan[", text)
                    for row, one in enumerate((given, {**other, **{name: given[name] for name in parameters}})):
                        for got, expected in zip(found, run(one)):
                            self.close(got[row], expected, NEAR[device.platform], f"row {row}")

    def test_vmap_of_gradients(self):
        """Gradients under vmap equal those of each row alone, also for parameters; then with mapped parameters."""
        for op in ("wkv6", "ssd", "rmsnorm_linear", "add_norm"):
            parameters = {public(t) for t in OPS[op].tensors if t.shapes[0][0] not in "BM@"}
            given, other = make(op), make(op, seed=2)

            def gradients(given, op=op):
                return jax.grad(lambda given: sum((y ** 2).sum() for y in results_of(gt, op, given, {})))(given)
            for mapped in (set(given) - parameters, set(given)):
                stacked = {name: jnp.stack([given[name], other[name]]) if name in mapped else given[name]
                           for name in given}
                axes = {name: 0 if name in mapped else None for name in given}
                found = jax.jit(jax.vmap(gradients, in_axes=(axes,)))(stacked)
                for row, one in enumerate((given, {**given, **{name: other[name] for name in mapped}})):
                    right = gradients(one)
                    for name in given:
                        self.close(found[name][row], right[name], 1e-6, f"{op}: row {row}: d{name}")

    def test_vmap_of_cotangents_and_packed(self):
        given = make("conv1d")
        y, pull = jax.vjp(lambda x: gt.conv1d(x, given["weight"]), given["x"])
        rows = jnp.stack([y, 2 * y])
        for row, found in enumerate(jax.vmap(pull)(rows)[0]):
            self.close(found, pull(rows[row])[0], 1e-6, f"row {row}")
        given, cu = make("conv1d", B=1, without=("state",)), jnp.array([0, 4, 19])
        run = functools.partial(gt.conv1d, weight=given["weight"], cu_seqlens=cu)
        found = jax.vmap(run)(jnp.stack([given["x"], 2 * given["x"]]))
        self.close(found[1], run(2 * given["x"]), 1e-6, "packed")

    def test_vmap_of_a_step(self):
        given = make("selective_scan", T=1)
        step = functools.partial(gt.selective_scan_step, **{name: given[name] for name in ("A", "Dskip", "dt_bias")})
        mapped = {name: jnp.stack([value, 2 * value]) for name, value in given.items()
                  if name not in ("A", "Dskip", "dt_bias")}
        found = jax.vmap(lambda mapped: step(**mapped))(mapped)
        right = step(**{name: value[1] for name, value in mapped.items()})
        for got, expected in zip(found, right):
            self.close(got[1], expected, 1e-6, "step")

    def test_scan_and_checkpoint(self):
        """In a model of three layers the gradients of a loop, of a scan and of a checkpointed scan are the same."""
        given = make("conv1d", without=("state",))
        weights = jnp.stack([given["weight"], 2 * given["weight"], -given["weight"]])

        def layer(x, weight):
            return x + gt.conv1d(x, weight, given["bias"], activation="silu"), None

        def loop(weights):
            x = given["x"]
            for weight in weights:
                x, _ = layer(x, weight)
            return (x ** 2).sum()
        right = jax.grad(loop)(weights)
        for one in (layer, jax.checkpoint(layer)):
            found = jax.jit(jax.grad(lambda w, one=one: (jax.lax.scan(one, given["x"], w)[0] ** 2).sum()))(weights)
            self.close(found, right, 1e-6, "scan")

    def test_shard_map(self):
        """shard_map over batch, with parameters on both devices, and over heads."""
        devices = jax.devices("cpu")
        self.assertGreaterEqual(len(devices), 2, "XLA_FLAGS was read before this test was imported")
        mesh = Mesh(np.array(devices[:2]), ("d",))
        try:
            shard_map = jax.shard_map
        except AttributeError:
            from jax.experimental.shard_map import shard_map
        P = PartitionSpec
        heads = {"r": P(None, None, "d"), "u": P("d"), "state": P(None, "d")}
        for op, over in (("wkv6", "batch"), ("ssd", "batch"), ("norm_gate", "batch"), ("add_norm", "batch"),
                         ("wkv6", "heads")):
            with self.subTest(op=op, over=over), jax.default_device(devices[0]):
                parameters = {public(t) for t in OPS[op].tensors if t.shapes[0][0] not in "BM@"}
                given = make(op)
                if over == "batch":
                    specs = {name: P() if name in parameters else P("d") for name in given}
                    out = P("d")
                else:
                    specs = {name: heads.get(name, heads["r"]) for name in given}
                    out = (heads["r"], heads["state"])

                def run(given, op=op):
                    results = results_of(gt, op, given, {})
                    return results if len(results) > 1 else results[0]
                sharded = jax.jit(shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=out))

                def loss(function, given):
                    return sum((y ** 2).sum() for y in jax.tree_util.tree_leaves(function(given)))
                for got, expected in zip(*map(jax.tree_util.tree_leaves, (sharded(given), run(given)))):
                    self.same(got, expected, "y")
                found = jax.jit(jax.grad(functools.partial(loss, sharded)))(given)
                right = jax.grad(functools.partial(loss, run))(given)
                for name in given:
                    self.close(found[name], right[name], 1e-6, f"d{name}")


class CommandBuffers(unittest.TestCase):
    """XLA captures calls in command buffers, which are CUDA graphs.  Replays have the bits of calls without them."""

    @unittest.skipIf(len(DEVICES) == 1, "no GPU")
    def test_replays_have_the_same_bits(self):
        program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "command_buffers.py")
        found = []
        with tempfile.TemporaryDirectory() as folder:
            for flags in ("", "FUSION,CUSTOM_CALL"):
                path, dump = (os.path.join(folder, flags + name) for name in (".npz", ".dump"))
                flags = f"--xla_gpu_enable_command_buffer={flags} --xla_gpu_graph_min_graph_size=1"
                subprocess.run([sys.executable, program, path], check=True,
                               env={**os.environ, "XLA_FLAGS": f"{flags} --xla_dump_to={dump}"})
                with np.load(path) as results:
                    found.append(dict(results))
            inside, outside = 0, []
            for name in os.listdir(dump):
                if name.endswith("thunk_sequence_after_thunk_passes.txt"):
                    with open(os.path.join(dump, name), encoding="utf-8") as lines:
                        calls = [line for line in lines if "kCustomCall" in line]
                    inside += sum(line.startswith(" ") for line in calls)  # lines of a command buffer are indented
                    outside += [f"{name}: {line}" for line in calls if not line.startswith(" ")]
        self.assertEqual(outside, [])
        self.assertGreaterEqual(inside, 2 * len(OPS) + len(RECURRENT))
        self.assertEqual(found[0].keys(), found[1].keys())
        for name, value in found[0].items():
            np.testing.assert_array_equal(value, found[1][name], name)


class Errors(Quiet):
    def test_arguments(self):
        x, s, k = make("ssd"), make("selective_scan"), make("conv_ssd", T=1)
        p, cu, two = make("ssd", B=1, rows=3), jnp.array([0, 7, 19]), jnp.array([0, 1], jnp.int32)
        q, m = make("conv_ssd", B=1, rows=3), make("wkv_ssm_mixed", T=1)
        gains = dict.fromkeys(("gain_wkv", "gain_ssm", "residual"))
        cases = [
            ("wkv_ssm: mixed = 2: must be True or False", lambda: gt.wkv_ssm(**{**m, **gains}, mixed=2)),
            *[(f"{name}: {gain} is given, but mixed = False", lambda name=name, gain=gain: getattr(gt, name)(
                **{**m, **gains, gain: m[gain]})) for name in ("wkv_ssm", "wkv_ssm_step") for gain in gains],
            (r"wkv_ssm: gain_wkv has shape \[3\]: must be \[H,V\], where", lambda: gt.wkv_ssm(
                **{**m, "gain_wkv": jnp.ones(3)}, mixed=True)),
            (r"wkv_ssm_step: gain_ssm has shape \[4, 5\]: must be \[H,P\], where", lambda: gt.wkv_ssm_step(
                **{**m, "gain_ssm": jnp.ones((4, 5))}, mixed=True)),
            (r"wkv_ssm: residual has shape \[2, 1, 4\]: must be \[B,T,H,V\], where", lambda: gt.wkv_ssm(
                **{**m, "residual": m["residual"][..., 0]}, mixed=True)),
            ("wkv_ssm: residual has dtype bfloat16: must be float32", lambda: gt.wkv_ssm(
                **{**m, "residual": m["residual"].astype("bfloat16")}, mixed=True)),
            ("wkv_ssm: x has H = 4, P = 5, but v has H = 4, V = 6: H P must equal H V to mix", lambda: gt.wkv_ssm(
                **{**m, **gains, "x": m["x"][..., :5], "z": None, "ssm_state": None}, mixed=True)),
            ("wkv_ssm_step: ssm_state is None", lambda: gt.wkv_ssm_step(**{**m, "ssm_state": None}, mixed=True)),
            ("ssd: dt has shape", lambda: gt.ssd(**{**x, "dt": x["dt"][:, :3]})),
            ("ssd: A is None", lambda: gt.ssd(**{**x, "A": None})),
            ("ssd: Bm has dtype bfloat16: must be float32", lambda: gt.ssd(**{**x, "Bm": x["Bm"].astype("bfloat16")})),
            ("ssd: x has dtype float64", lambda: gt.ssd(**{**x, "x": x["x"].astype(jnp.float64)})),
            ("ssd: x is a builtins.list", lambda: gt.ssd(**{**x, "x": [1.0]})),
            ("ssd: z has dtype int32: must be a floating", lambda: gt.ssd(**{**x, "z": x["z"].astype("int32")})),
            ("ssd: state has shape", lambda: gt.ssd(**{**x, "state": x["state"][:, :1]})),
            ("ssd: softplus = 2", lambda: gt.ssd(**x, softplus=2)),
            ("ssd: dt_limit = 3", lambda: gt.ssd(**x, dt_limit=3)),
            ("ssd: segments = 1.5", lambda: gt.ssd(**x, segments=1.5)),
            ("ssd: cu_seqlens has shape", lambda: gt.ssd(**x, cu_seqlens=jnp.zeros((1,), jnp.int32))),
            ("ssd: cu_seqlens has dtype", lambda: gt.ssd(**x, cu_seqlens=jnp.zeros((3,)))),
            ("ssd: seq_count", lambda: gt.ssd(**x, seq_count=jnp.ones((1,), jnp.int32))),
            ("ssd_step: state is None", lambda: gt.ssd_step(**{**x, "state": None})),
            ("ssd_step: slots has shape", lambda: gt.ssd_step(**x, slots=jnp.zeros((3,), jnp.int32))),
            ("ssd_step: rounding = 3: must be", lambda: gt.ssd_step(**x, rounding=3)),
            ("ssd_step: state has dtype float64", lambda: gt.ssd_step(**{**x, "state": x["state"].astype(jnp.float64)})),
            ("conv_ssd_step: state has dtype bfloat16: must be float32", lambda: gt.conv_ssd_step(
                **{**k, "state": k["state"].astype("bfloat16")}, **NEEDED["conv_ssd"])),
            ("ssd: starts_zero is given without slots", lambda: gt.ssd(**x, starts_zero=two)),
            ("ssd: cu_seqlens is None", lambda: gt.ssd(**x, slots=two)),
            ("ssd: state is None", lambda: gt.ssd(**{**p, "state": None}, cu_seqlens=cu, slots=two)),
            ("ssd: state has shape", lambda: gt.ssd(**{**p, "state": p["state"][0]}, cu_seqlens=cu, slots=two)),
            ("ssd: state has dtype float64: must be float32", lambda: gt.ssd(
                **{**p, "state": p["state"].astype(jnp.float64)}, cu_seqlens=cu, slots=two)),
            ("conv_ssd: state has dtype float64: must be float32", lambda: gt.conv_ssd(
                **{**q, "state": q["state"].astype(jnp.float64)}, cu_seqlens=cu, slots=two, **NEEDED["conv_ssd"])),
            ("ssd: slots has shape", lambda: gt.ssd(**p, cu_seqlens=cu, slots=two[:1])),
            ("ssd: starts_zero has shape", lambda: gt.ssd(**p, cu_seqlens=cu, slots=two, starts_zero=two[:1])),
            ("selective_scan: A has shape", lambda: gt.selective_scan(**{**s, "A": s["A"].T})),
            ("wkv6: decay = 'no'", lambda: gt.wkv6(**make("wkv6"), decay="no")),
            ("wkv6: scale = 0", lambda: gt.wkv6(**make("wkv6"), scale=0)),
            ("norm_mix: b has shape", lambda: gt.norm_mix(**{**make("norm_mix"), "b": s["u"][0]})),
            ("norm_mix: heads = 0", lambda: gt.norm_mix(**make("norm_mix"), heads=0)),
            ("add_norm: residual has shape", lambda: gt.add_norm(**{**make("add_norm"), "residual": s["u"][0]})),
            ("add_norm: gamma has shape", lambda: gt.add_norm(**{**make("add_norm"), "gamma": jnp.ones(11)})),
            ("add_norm: residual has dtype int32", lambda: gt.add_norm(s["u"], s["u"].astype("int32"))),
            ("add_norm: x is None", lambda: gt.add_norm(None, s["u"])),
            ("add_norm: D = 0", lambda: gt.add_norm(s["u"][..., :0])),
            ("add_norm: eps = 0", lambda: gt.add_norm(s["u"], eps=0)),
            ("add_norm: norm = 'no'", lambda: gt.add_norm(s["u"], norm="no")),
            ("add_norm: reads_sum = 2", lambda: gt.add_norm(s["u"], reads_sum=2)),
            ("add_norm: sum_in_fp32 = 'no'", lambda: gt.add_norm(s["u"], sum_in_fp32="no")),
            ("conv_ssd: xBC has .* channels", lambda: gt.conv_ssd(**make("conv_ssd"), state_size=100)),
        ]
        for text, run in cases:
            for call in (run, lambda run=run: jax.jit(run)()):
                with self.subTest(text), self.assertRaisesRegex(ArgumentError, "^gt_kernels.jax." + text):
                    call()

    def test_of_the_library(self):
        """If only the library finds a value wrong, the error has the library's text."""
        with jax.default_device(DEVICES[0]), self.assertRaisesRegex(
                Exception, "gt_(ref_norm_mix_forward|norm_mix_workspace): D = 12"):
            jax.block_until_ready(gt.norm_mix(**make("norm_mix"), heads=5))

    def test_derivatives_that_there_are_not(self):
        x = make("conv1d")

        def loss(x):
            return gt.conv1d(**x).sum()
        with self.assertRaisesRegex(UnsupportedError, "gt_kernels.jax.conv1d: gradients of gradients"):
            jax.grad(lambda x: sum(map(jnp.sum, jax.grad(loss)(x).values())))(x)
        with self.assertRaisesRegex(TypeError, "forward-mode"):
            jax.jvp(loss, (x,), (x,))
        with self.assertRaisesRegex(UnsupportedError, "gt_kernels.jax.conv1d: a call with slots has no derivatives"):
            jax.grad(lambda x: gt.conv1d(**make("conv1d", B=1, without=("x",)), x=x, cu_seqlens=jnp.array([0, 19]),
                                         slots=jnp.array([0]))[0].sum())(x["x"][:1])
        with self.assertRaisesRegex(UnsupportedError, "gt_kernels.jax.conv1d_step: a step has no derivatives"):
            jax.grad(lambda x: gt.conv1d_step(**make("conv1d", T=1, without=("x",)), x=x)[0].sum())(x["x"][:, :1])

    def test_empty(self):
        for op in RECURRENT:
            given = make(op, T=0)
            results = results_of(gt, op, given, {})
            states = [given[name] for name in given if name in STATES]
            for got, expected in zip(results[-len(states):], states):
                self.same(got, expected, op)
        for reads_sum in (False, True):
            given = make("add_norm", T=0)
            (y, total), pull = jax.vjp(lambda given, reads=reads_sum: gt.add_norm(**given, reads_sum=reads), given)
            self.assertTrue(y.shape == total.shape == (2, 0, 12))
            for name, gradient in pull((y, total))[0].items():
                self.assertEqual(gradient.shape, given[name].shape)
                self.assertFalse(gradient.any())


if __name__ == "__main__":
    unittest.main()
