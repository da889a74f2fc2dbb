"""Tests of the state updates of gt_kernels.compat, which decoding calls.  They compare every form of arguments that
clients pass with plain operations, count kernel launches, and try torch.compile and CUDA graphs."""

import itertools
import unittest

try:
    import torch
except ImportError:
    raise unittest.SkipTest("no PyTorch") from None

import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from gt_kernels import ArgumentError, c, compat

DEVICES = ["cpu"]
if torch.cuda.is_available() and c.gt_device_supported(-1) == c.GT_OK:
    DEVICES.append("cuda")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
B, H, P, G, N, D, W = 3, 4, 6, 2, 5, 8, 4
SLOTS, ROWS = [5, -1, 2], 7


class Launches(TorchDispatchMode):
    """Records the names of the PyTorch operators of a call that launch kernels."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        is_view = any(value.alias_info and not value.alias_info.is_write for value in func._schema.returns)
        if not is_view and not func._schema.name.startswith(("aten::empty", "aten::detach")):
            self.names.append(func._schema.name.split("::")[1])
            self.shapes += [value.shape for value in (result if isinstance(result, (tuple, list)) else [result])]
        return result

    def __enter__(self):
        self.names, self.shapes = [], []
        return super().__enter__()


def launches(call):
    with Launches() as seen:
        call()
    return seen


def relative(found, right):
    return ((found.double() - right).norm() / right.norm().clamp_min(1e-30)).item()


def relaid(state, layout):
    """The same state in channel-last memory, or as a view into longer rows."""
    if layout == "transposed":
        return state.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "rows":
        wide = torch.zeros(state.shape[0], 2, *state.shape[1:], dtype=state.dtype, device=state.device)
        wide[:, 1] = state
        return wide[:, 1]
    return state


def heads(device="cpu", dtype=torch.float32, state_dtype=torch.float32, expanded=("dt", "A", "D", "dt_bias"),
          slots=None, layout=None, without=(), parameters=torch.float32):
    """The arguments of an update with heads, by name.  expanded: expands some tensors over P and N."""
    def tensor(shape, name, dtype=torch.float32):
        shape = tuple(1 if name in expanded and axis >= shape.index(P) else size for axis, size in enumerate(shape))
        return torch.randn(shape).to(device, dtype)

    state = torch.randn(ROWS if slots is not None else B, H, P, N).to(device, state_dtype)
    values = {"state": relaid(state, layout), "x": tensor((B, H, P), "x", dtype),
              "dt": tensor((B, H, P), "dt", dtype).expand(B, H, P),
              "A": (-tensor((H, P, N), "A").abs()).expand(H, P, N),
              "B": torch.randn(B, G, N).to(device, dtype), "C": torch.randn(B, G, N).to(device, dtype),
              "D": tensor((H, P), "D", parameters).expand(H, P), "z": tensor((B, H, P), "z", dtype),
              "dt_bias": tensor((H, P), "dt_bias", parameters).expand(H, P), "dt_softplus": True}
    if slots is not None:
        values["state_batch_indices"] = torch.tensor(slots, dtype=torch.int32, device=device)
    return {name: value for name, value in values.items() if name not in without}


def plain_update(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, state_batch_indices=None):
    """Returns (y, the new state) in float64."""
    after, y = state.double().clone(), torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    slots = range(len(x)) if state_batch_indices is None else state_batch_indices.tolist()
    x, dt, A, B, C, D, z, dt_bias = (None if t is None else t.double() for t in (x, dt, A, B, C, D, z, dt_bias))
    B, C = (t.repeat_interleave(x.shape[1] // t.shape[1], 1) for t in (B, C))
    delta = dt if dt_bias is None else dt + dt_bias
    delta = F.softplus(delta) if dt_softplus else delta
    for b, row in enumerate(slots):
        if 0 <= row < len(after):
            after[row] = after[row] * torch.exp(delta[b, ..., None] * A) + (delta[b] * x[b])[..., None] * B[b, :, None]
            y[b] = (after[row] * C[b, :, None]).sum(-1) + (0 if D is None else D * x[b])
            y[b] *= 1 if z is None else F.silu(z[b])
    return y, after


def convolution(device="cpu", dtype=torch.float32, state_dtype=None, T=None, columns=W - 1, slots=None, layout=None,
                ring=None, parameters=torch.float32):
    state = torch.randn(ROWS if slots is not None else B, D, columns).to(device, state_dtype or dtype)
    values = {"x": torch.randn(B, D, *(() if T is None else (T,))).to(device, dtype),
              "conv_state": relaid(state, layout), "weight": torch.randn(D, W).to(device, parameters),
              "bias": torch.randn(D).to(device, parameters), "activation": "silu"}
    for name, value in (("conv_state_indices", slots), ("cache_seqlens", ring)):
        if value is not None:
            values[name] = torch.tensor(value, dtype=torch.int32, device=device)
    return values


def plain_convolution(x, conv_state, weight, bias, activation, cache_seqlens=None, conv_state_indices=None):
    """Returns (y, the new state), computed token by token."""
    after, tokens, size = conv_state.clone(), x[..., None] if x.dim() == 2 else x, conv_state.shape[2]
    y = torch.zeros(tokens.shape, dtype=torch.float64, device=x.device)
    slots = range(len(x)) if conv_state_indices is None else conv_state_indices.tolist()
    for b, row in enumerate(slots):
        if not 0 <= row < len(after):
            continue
        at = None if cache_seqlens is None else int(cache_seqlens[b])
        order = list(range(size)) if at is None else [(at + j) % size for j in range(-(W - 1), 0)]
        window = after[row][:, order][:, len(order) - (W - 1):].double()
        for t in range(tokens.shape[2]):
            window = torch.cat([window, tokens[b, :, t:t + 1].double()], 1)
            y[b, :, t] = F.silu((window * weight.double()).sum(1) + bias.double())
            window = window[:, 1:]
            if at is None:
                after[row] = torch.cat([after[row], tokens[b, :, t:t + 1].to(after.dtype)], 1)[:, 1:]
            else:
                after[row][:, (at + t) % size] = tokens[b, :, t].to(after.dtype)
    return y.reshape(x.shape), after


class Updates(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(11)

    def copied(self, values):
        """Runs a call on a copy of the state, in the same layout."""
        name = "state" if "state" in values else "conv_state"
        state = torch.empty_strided(values[name].shape, values[name].stride(), dtype=values[name].dtype,
                                    device=values[name].device).copy_(values[name])
        return state, {**values, name: state}

    def check_update(self, **options):
        values = heads(**options)
        dtype = max((values["x"].dtype, values["state"].dtype), key=TOLERANCE.get)
        right, right_state = plain_update(**values)
        state, before = values["state"], values["state"].clone()
        version = state._version
        y = compat.selective_state_update(**values)
        self.assertEqual((y.shape, y.dtype), (values["x"].shape, values["x"].dtype))
        self.assertGreater(state._version, version)
        self.assertLess(relative(y, right), TOLERANCE[dtype])
        self.assertLess(relative(state, right_state), TOLERANCE[dtype])
        if options.get("slots") is not None:
            others = [row for row in range(ROWS) if row not in options["slots"]]
            self.assertTrue(torch.equal(state[others], before[others]))
            self.assertEqual(y[1].abs().max().item(), 0)

    def test_state_update(self):
        every = ("dt", "A", "D", "dt_bias")
        for device, slots in itertools.product(DEVICES, (None, SLOTS)):
            for expanded in (every, (), *(tuple(set(every) - {name}) for name in every)):
                with self.subTest(device=device, slots=slots, expanded=expanded):
                    self.check_update(device=device, slots=slots, expanded=expanded)
            for dtype, state_dtype in itertools.product(TOLERANCE, TOLERANCE):
                for layout in (None, "transposed", "rows"):
                    with self.subTest(device=device, slots=slots, dtype=dtype, state=state_dtype, layout=layout):
                        self.check_update(device=device, slots=slots, dtype=dtype, state_dtype=state_dtype,
                                          layout=layout)
            for without in ((), ("D", "z"), ("dt_bias",)):
                for expanded in (every, ()):
                    self.check_update(device=device, slots=slots, without=without, expanded=expanded)

    def test_an_element_that_differs(self):
        """The update must not take a full tensor for an expanded one, even if nearly all its numbers are equal: an
        element that differs changes the result."""
        for name, at in (("A", (1, 2, 3)), ("dt", (1, 2, 3)), ("dt_bias", (1, 2))):
            values = heads()
            values[name] = values[name].clone()
            values[name][at] -= 0.5
            right, right_state = plain_update(**values)
            _, copied = self.copied(values)
            seen = launches(lambda: compat.selective_state_update(**copied)).names
            self.assertEqual([operator for operator in seen if "step" in operator], ["selective_scan_step"])
            y = compat.selective_state_update(**values)
            self.assertLess(relative(y, right), 1e-5)
            self.assertLess(relative(values["state"], right_state), 1e-5)

    def test_padding_beside_a_named_row(self):
        """Padding reads row 0 or the last row, which another batch element may change.  Padding changes no row
        itself."""
        for device in DEVICES:
            for slots in ([-1, 0, -1], [0, -1, 3], [ROWS, 1, ROWS - 1], [-1, ROWS - 1, ROWS + 5], [-1, ROWS, -7]):
                for make, options in ((heads, dict(state_dtype=torch.bfloat16)),
                                      (convolution, dict(dtype=torch.bfloat16)), (convolution, dict(ring=[3, 0, 1]))):
                    function = compat.selective_state_update if make is heads else compat.causal_conv1d_update
                    with self.subTest(function.__name__, device=device, slots=slots, **options):
                        values = make(device=device, slots=slots, **options)
                        state = values.get("state", values.get("conv_state"))
                        right, right_state = (plain_update if make is heads else plain_convolution)(**values)
                        y = function(**values)
                        self.assertLess(relative(y, right), 2e-2)
                        self.assertLess(relative(state, right_state.double()), 2e-2)
                        outside = [b for b, row in enumerate(slots) if not 0 <= row < ROWS]
                        self.assertFalse(y[outside].any())

    def test_no_batch(self):
        for state_dtype, slots in itertools.product(TOLERANCE, (None, SLOTS)):
            values = heads(state_dtype=state_dtype, slots=slots)
            values.update((name, values[name][:0]) for name in ("x", "dt", "B", "C", "z"))
            if slots is None:
                values["state"] = values["state"][:0]
            else:
                values["state_batch_indices"] = values["state_batch_indices"][:0]
            state, values = self.copied(values)
            before = state.clone()
            self.assertEqual(compat.selective_state_update(**values).shape, (0, H, P))
            self.assertTrue(torch.equal(state, before))

    def test_convolution(self):
        for device, slots, columns in itertools.product(DEVICES, (None, SLOTS), (W - 1, W, W + 3)):
            for dtype, layout, T in itertools.product(TOLERANCE, (None, "transposed", "rows"), (None, 1, 5)):
                self.check_convolution(device=device, dtype=dtype, slots=slots, columns=columns, layout=layout, T=T)
            for dtype, state_dtype in itertools.permutations(TOLERANCE, 2):
                self.check_convolution(device=device, dtype=dtype, state_dtype=state_dtype, slots=slots,
                                       columns=columns)
            for dtype, layout in itertools.product(TOLERANCE, (None, "transposed", "rows")):
                self.check_convolution(device=device, dtype=dtype, slots=slots, columns=columns, layout=layout,
                                       ring=[0, 2, 11])

    def check_convolution(self, **options):
        with self.subTest(**options):
            values = convolution(**options)
            right, right_state = plain_convolution(**values)
            state, version = values["conv_state"], values["conv_state"]._version
            y = compat.causal_conv1d_update(**values)
            self.assertEqual((y.shape, y.dtype), (values["x"].shape, values["x"].dtype))
            self.assertGreater(state._version, version)
            self.assertLess(relative(y, right), TOLERANCE[values["x"].dtype])
            self.assertTrue(torch.equal(state, right_state))
            if y.dim() == 2:
                self.assertEqual(y.stride(1), 1)  # the next operation takes y without a copy

    # ---- kernels ----

    ONE_KERNEL = [("heads", dict(slots=slots, dtype=dtype, expanded=expanded))
                  for slots in (None, SLOTS) for dtype in TOLERANCE
                  for expanded in (("dt", "A", "D", "dt_bias"), ("dt", "A", "dt_bias"), ())]
    ONE_KERNEL += [("heads", dict(layout="rows", slots=slots, state_dtype=dtype)) for slots in (None, SLOTS)
                   for dtype in TOLERANCE]
    ONE_KERNEL += [("convolution", dict(slots=slots, T=T, state_dtype=torch.float32, dtype=dtype))
                   for slots in (None, SLOTS) for T in (None, 5) for dtype in TOLERANCE]
    ONE_KERNEL += [("heads", dict(dtype=torch.bfloat16, state_dtype=state, parameters=parameters, slots=slots))
                   for state in TOLERANCE for parameters in TOLERANCE for slots in (None, SLOTS)]
    ONE_KERNEL += [("convolution", dict(dtype=dtype, parameters=dtype, columns=columns, layout=layout, ring=ring, T=T))
                   for dtype in TOLERANCE for columns in (W - 1, W, W + 3) for layout in (None, "transposed", "rows")
                   for ring in (None, [0, 2, 11]) for T in (None, 3)]

    def each(self, cases, device, check):
        """Calls check(function, arguments by name) for each case."""
        for kind, options in cases:
            with self.subTest(kind, device=device, **options):
                make, function = ((heads, compat.selective_state_update) if kind == "heads" else
                                  (convolution, compat.causal_conv1d_update))
                check(function, make(device=device, **options))

    def test_one_kernel(self):
        def check(function, values):
            seen = launches(lambda: function(**values)).names
            self.assertEqual(len(seen), 1, seen)
            if function is compat.selective_state_update:
                is_head = 0 in values["A"].stride()
                self.assertEqual(seen, ["ssd_step" if is_head else "selective_scan_step"])

        self.each(self.ONE_KERNEL, "cpu", check)

    def test_three_kernels(self):
        """A state that the kernel cannot use in place is copied once before and once after."""
        cases = [("heads", dict(layout="rows", expanded=())), ("heads", dict(layout="transposed"))]
        def check(function, values):
            seen = launches(lambda: function(**values)).names
            self.assertLessEqual(len(seen), 3, seen)

        self.each(cases, "cpu", check)

    def test_rows_named(self):
        """With slots, a call reads and writes only these rows of a state, and does not wait for the device."""
        pool = 1000
        cases = [("heads", dict(state_dtype=dtype)) for dtype in (torch.bfloat16, torch.float16)]
        cases += [("convolution", dict(dtype=torch.bfloat16, columns=columns, layout=layout, ring=ring))
                  for columns in (W - 1, W) for layout in (None, "transposed") for ring in (None, [0, 2, 11])]
        def check(function, values):
            state = "state" if "state" in values else "conv_state"
            indices = "state_batch_indices" if "state" in values else "conv_state_indices"
            values[state] = values[state].repeat(pool // B, *(1,) * (values[state].dim() - 1))
            values[indices] = torch.tensor(SLOTS, dtype=torch.int32)
            seen = launches(lambda: function(**values))
            self.assertEqual(len(seen.names), 1, seen.names)

        self.each(cases, "cpu", check)

    EVERY_WAY = [("heads", dict(slots=SLOTS)), ("heads", dict(expanded=())),
                 ("heads", dict(state_dtype=torch.bfloat16, slots=SLOTS)), ("heads", dict(layout="rows")),
                 ("convolution", dict(slots=SLOTS)),
                 ("convolution", dict(dtype=torch.bfloat16, columns=W, slots=SLOTS, layout="transposed")),
                 ("convolution", dict(dtype=torch.bfloat16, columns=W)),
                 ("convolution", dict(slots=SLOTS, ring=[0, 2, 11]))]

    def test_compile_fullgraph(self):
        def check(function, values):
            torch._dynamo.reset()
            state, eager = self.copied(values)
            found_state, values = self.copied(values)
            compiled = torch.compile(lambda v: function(**v), fullgraph=True, backend="aot_eager")
            for _ in range(2):
                self.assertTrue(torch.equal(compiled(values), function(**eager)))
            self.assertTrue(torch.equal(found_state, state))

        self.each(self.EVERY_WAY, "cpu", check)

    def test_cuda_graph(self):
        if "cuda" not in DEVICES:
            self.skipTest("no GPU")
        def check(function, values):
            state, eager = self.copied(values)
            captured_state, values = self.copied(values)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                function(**self.copied(values)[1])
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = function(**values)
            for _ in range(3):
                graph.replay()
                right = function(**eager)
            torch.cuda.synchronize()
            self.assertTrue(torch.equal(y, right))
            self.assertTrue(torch.equal(captured_state, state))

        self.each(self.EVERY_WAY, "cuda", check)

    def test_one_kernel_on_gpu(self):
        if "cuda" not in DEVICES:
            self.skipTest("no GPU")
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile
        def check(function, values):
            function(**values)
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
                function(**values)
                torch.cuda.synchronize()
            kernels = [event.name for event in seen.events() if event.device_type == DeviceType.CUDA]
            self.assertEqual(len(kernels), 1, kernels)

        self.each(self.ONE_KERNEL, "cuda", check)

    # ---- errors ----

    def test_errors_of_the_step(self):
        """An error that the operator finds has the names of the update.  Here the state's memory is too small."""
        every = ("state", "D"), ("conv_state", "weight", "bias")
        for make, function, names in zip((heads, convolution), (compat.selective_state_update,
                                                                compat.causal_conv1d_update), every):
            for name in names:
                values = make(slots=SLOTS, **{"expanded": ("dt", "A", "dt_bias")} if make is heads else {})
                values[name].untyped_storage().resize_(2)
                text = f"^gt_kernels.compat.{function.__name__}: {name} has 2 bytes"
                with self.assertRaisesRegex(ArgumentError, text):
                    function(**values)


if __name__ == "__main__":
    unittest.main()
