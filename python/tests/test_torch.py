"""Tests of gt_kernels.torch: numbers and gradients against plain float64 loops, bits against the C API, and the
features of PyTorch that transform or record operators.  They run on the CPU, and on a GPU if there is one."""

import contextlib
import ctypes
import functools
import itertools
import os
import re
import tempfile
import unittest
import unittest.mock
import warnings

try:
    import torch
except ImportError:
    raise unittest.SkipTest("no PyTorch") from None

import loops
from gt_kernels import ArgumentError, Error, UnsupportedError, c
from gt_kernels._operators import OPERATORS, schema_name
import gt_kernels.torch as gt
from gt_kernels.torch import _engine, _plan
from gt_kernels.torch._errors import named

STEPPED = ("wkv6", "ssd", "selective_scan", "conv1d", "wkv4")
RECURRENT = STEPPED + ("conv_ssd", "wkv_ssm", "wkv_ssm_mixed")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
DEVICES = ["cpu"]
if torch.cuda.is_available() and c.gt_device_supported(-1) == c.GT_OK:
    DEVICES.append("cuda")
INPUTS = {
    "wkv6": "r k v w u state", "ssd": "x dt A Bm Cm Dskip z dt_bias state", "conv1d": "x weight bias state",
    "selective_scan": "u dt A Bm Cm Dskip z dt_bias state", "rmsnorm_linear": "x weight gamma beta bias",
    "norm_mix": "a b gain_a gain_b residual", "norm_gate": "x z gamma beta", "add_norm": "x residual gamma beta",
    "conv_ssd": "xBC dt weight A bias Dskip z dt_bias conv_state state",
    "wkv_ssm": "r k v w u x dt A Bm Cm Dskip z dt_bias wkv_state ssm_state", "wkv4": "k v w u state",
    "wkv_ssm_mixed": "r k v w u x dt A Bm Cm Dskip z dt_bias gain_wkv gain_ssm residual wkv_state ssm_state",
}
MIXED = ("gain_wkv", "gain_ssm", "residual")  # arguments that only a mixed call of wkv_ssm takes
PUBLIC = {**{op: op for op in INPUTS}, "wkv_ssm_mixed": "wkv_ssm"}  # functions of gt_kernels.torch
ACTIVATIONS = set("r k v w x xBC dt Bm Cm z a b residual".split())
STATES = ("state", "conv_state", "wkv_state", "ssm_state")


def is_activation(op, name):
    return ((name in ACTIVATIONS and (op, name) != ("wkv4", "w")) or (op, name) == ("rmsnorm_linear", "weight")
            or (op == "selective_scan" and name == "u"))


def shapes(op, B=2, T=19, rows=None):
    """The shape of each tensor by name.  Shapes of states include the batch index."""
    H, N, V, P, G, D, W, O = 4, 8, 8, 6, 2, 12, 4, 10
    rows, E = rows or B, H * P + 2 * G * N
    return {
        "wkv6": dict(r=(B, T, H, N), k=(B, T, H, N), v=(B, T, H, V), w=(B, T, H, N), u=(H, N), state=(rows, H, N, V)),
        "ssd": dict(x=(B, T, H, P), dt=(B, T, H), A=(H,), Bm=(B, T, G, N), Cm=(B, T, G, N), Dskip=(H,), z=(B, T, H, P),
                    dt_bias=(H,), state=(rows, H, P, N)),
        "selective_scan": dict(u=(B, T, D), dt=(B, T, D), A=(D, N), Bm=(B, T, G, N), Cm=(B, T, G, N), Dskip=(D,),
                               z=(B, T, D), dt_bias=(D,), state=(rows, D, N)),
        "conv_ssd": dict(xBC=(B, T, E), dt=(B, T, H), weight=(E, W), A=(H,), bias=(E,), Dskip=(H,), z=(B, T, H, P),
                         dt_bias=(H,), conv_state=(rows, E, W - 1), state=(rows, H, P, N)),
        "wkv_ssm": dict(r=(B, T, H, N), k=(B, T, H, N), v=(B, T, H, V), w=(B, T, H, N), u=(H, N), x=(B, T, 2 * H, P),
                        dt=(B, T, 2 * H), A=(2 * H,), Bm=(B, T, G, 2 * N), Cm=(B, T, G, 2 * N), Dskip=(2 * H,),
                        z=(B, T, 2 * H, P), dt_bias=(2 * H,), wkv_state=(rows, H, N, V),
                        ssm_state=(rows, 2 * H, P, 2 * N)),
        "wkv_ssm_mixed": dict(r=(B, T, H, N), k=(B, T, H, N), v=(B, T, H, 6), w=(B, T, H, N), u=(H, N),
                              x=(B, T, 2 * H, 3), dt=(B, T, 2 * H), A=(2 * H,), Bm=(B, T, G, 2 * N),
                              Cm=(B, T, G, 2 * N), Dskip=(2 * H,), z=(B, T, 2 * H, 3), dt_bias=(2 * H,), gain_wkv=(H, 6),
                              gain_ssm=(2 * H, 3), residual=(B, T, H, 6), wkv_state=(rows, H, N, 6),
                              ssm_state=(rows, 2 * H, 3, 2 * N)),
        "conv1d": dict(x=(B, T, D), weight=(D, W), bias=(D,), state=(rows, D, W - 1)),
        "wkv4": dict(k=(B, T, D), v=(B, T, D), w=(D,), u=(D,), state=(rows, 3, D)),
        "rmsnorm_linear": dict(x=(B, T, D), weight=(O, D), gamma=(D,), beta=(D,), bias=(O,)),
        "norm_mix": dict(a=(B, T, D), b=(B, T, D), gain_a=(D,), gain_b=(D,), residual=(B, T, D)),
        "norm_gate": dict(x=(B, T, D), z=(B, T, D), gamma=(D,), beta=(D,)),
        "add_norm": dict(x=(B, T, D), residual=(B, T, D), gamma=(D,), beta=(D,)),
    }[op]


def make(op, device="cpu", dtype=torch.float32, without=(), seed=1, shape=None, **sizes):
    """Random tensors by name.  All are leaves that require gradients."""
    torch.manual_seed(seed)
    tensors = {}
    for name, size in (shape or shapes(op, **sizes)).items():
        value = torch.randn(size)
        if name == "A":
            value = -value.exp()
        if name in ("dt", "dt_bias"):
            value = value.abs() * 0.3
        if name == "w":
            value = value - 1
        if (op, name) == ("wkv4", "state"):  # one row of the state holds sums of weights, which are positive
            value = value.abs() + 0.1
        value = value.to(device, dtype if is_activation(op, name) else torch.float32)
        tensors[name] = None if name in without else value.requires_grad_()
    return tensors


def side_by_side(tensors, rank):
    """Joins the tensors of several branches, or several states, to one tensor.  The first `rank` indices stay; the
    others are flattened.  The product with 1 makes gradients packed."""
    return tensors[0] if len(tensors) == 1 else torch.cat([(tensor * 1).flatten(rank) for tensor in tensors], rank)


def call(module, op, tensors, **options):
    """Calls an operator.  Returns (y, other), where other is the final state, the sum of add_norm, or None.
    side_by_side joins several y or several states."""
    values = [tensors[name] for name in INPUTS[op].split() if name not in STATES]
    if op == "add_norm":
        return module.add_norm(*values, **options)
    if op not in RECURRENT:
        return getattr(module, op)(*values, **options), None
    if module is gt:
        options["final_state"] = True
        if op == "wkv_ssm_mixed":
            options["mixed"] = True
    if op == "wkv_ssm_mixed":
        values = [tensors[name] for name in INPUTS["wkv_ssm"].split() if name not in STATES]
        options.update((name, tensors[name]) for name in MIXED)
    if op == "conv_ssd":
        options = {**options, "state_size": 8, "groups": 2}
    states = {name: tensors[name] for name in INPUTS[op].split() if name in STATES}
    results = getattr(module, PUBLIC[op] if module is gt else op)(*values, **states, **options)
    return side_by_side(results[: -len(states)], 2), side_by_side(results[-len(states):], 1)


def first_states(op, tensors):
    return side_by_side([tensors[name] for name in INPUTS[op].split() if name in STATES], 1)


def without_batch(shape):
    return {name: size[1:] if name in STATES else size for name, size in shape.items()}


def gradients(tensors, y, state, seed=7):
    """Gradients of a loss that weights every element of y and of the final state by a fixed random number."""
    generator = torch.Generator().manual_seed(seed)
    loss = (y.double() * torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.device)).sum()
    if state is not None:
        weights = torch.randn(state.shape, generator=generator, dtype=torch.float64).to(y.device)
        loss = loss + (state.double() * weights).sum()
    names = [name for name, value in tensors.items() if value is not None and value.requires_grad]
    return dict(zip(names, torch.autograd.grad(loss, [tensors[name] for name in names])))


def doubles(tensors):
    return {name: None if value is None else value.detach().double().cpu().requires_grad_()
            for name, value in tensors.items()}


class Numbers(unittest.TestCase):
    def close(self, got, expected, tolerance, what):
        got = got.detach().double().cpu()
        self.assertEqual(got.shape, expected.shape, what)
        error = (got - expected).norm() / expected.norm().clamp_min(1e-30)
        self.assertLess(error.item(), tolerance, what)

    def compare(self, op, tensors, dtype, what, loop_options=None, **options):
        y, state = call(gt, op, tensors, **options)
        found = gradients(tensors, y, state)
        exact = doubles(tensors)
        cpu = {k: v.cpu() if torch.is_tensor(v) else v for k, v in options.items()
               if k not in ("segments", "recompute", "sum_in_fp32", "reads_sum")}
        expected_y, expected_state = call(loops, op, exact, **cpu)
        expected = gradients(exact, expected_y, expected_state)
        self.assertEqual(y.dtype, dtype)
        self.close(y, expected_y, TOLERANCE[dtype], f"{what}: y")
        if state is not None:
            self.close(state, expected_state, TOLERANCE[dtype], f"{what}: state")
        self.assertEqual(set(found), set(expected))
        for name in expected:
            self.assertEqual(found[name].dtype, tensors[name].dtype, f"{what}: d{name}")
            self.close(found[name], expected[name], TOLERANCE[dtype], f"{what}: d{name}")

    def cases(self, op):
        """Yields (name of the case, tensors left out, options)."""
        yield "all", (), {}
        for left in {"wkv6": ("u", "state"), "wkv4": ("u", "state"), "ssd": ("Dskip", "z", "dt_bias", "state"), "conv1d": ("bias", "state"),
                     "selective_scan": ("Dskip", "z", "dt_bias", "state"), "rmsnorm_linear": ("gamma", "beta", "bias"),
                     "norm_mix": ("gain_a", "gain_b", "residual"), "norm_gate": ("z", "gamma", "beta"),
                     "add_norm": ("residual", "gamma", "beta"),
                     "conv_ssd": ("bias", "Dskip", "z", "dt_bias", "conv_state", "state"),
                     "wkv_ssm": ("u", "Dskip", "z", "dt_bias", "wkv_state", "ssm_state"),
                     "wkv_ssm_mixed": ("u", "z", *MIXED, "ssm_state")}[op]:
            yield f"no {left}", (left,), {}
        if op == "wkv_ssm_mixed":
            yield "no gains", ("gain_wkv", "gain_ssm"), {}
            yield "nothing but the branches", MIXED, {"recompute": True}
        yield from {
            "wkv6": [("segments", (), {"segments": 3}), ("recompute", (), {"recompute": True})],
            "ssd": [("softplus", (), {"softplus": True}), ("limits", (), {"softplus": True, "dt_limit": (0.2, 0.9)}),
                    ("segments", (), {"segments": 3}), ("recompute", (), {"recompute": True})],
            "selective_scan": [("softplus", (), {"softplus": True}), ("segments", (), {"segments": 2}),
                               ("recompute", (), {"recompute": True})],
            "conv1d": [("silu", (), {"activation": "silu"})],
            "wkv4": [("log", (), {"decay": "log"}), ("segments", (), {"segments": 2}),
                     ("recompute", (), {"recompute": True})],
            "rmsnorm_linear": [("layer", (), {"norm": "layer", "eps": 1e-3}), ("recompute", (), {"recompute": True})],
            "norm_mix": [("heads", (), {"heads": 3, "eps": 1e-3})],
            "norm_gate": [("layer", (), {"norm": "layer", "heads": 2}), ("gate first", (), {"gate_first": True})],
            "add_norm": [("layer", (), {"norm": "layer", "eps": 1e-3}), ("reads the sum", (), {"reads_sum": True}),
                         ("no residual, reads the sum", ("residual",), {"reads_sum": True}),
                         ("sum in fp32", (), {"sum_in_fp32": True}),
                         ("no residual, sum in fp32", ("residual",), {"sum_in_fp32": True})],
            **dict.fromkeys(("conv_ssd", "wkv_ssm", "wkv_ssm_mixed"), [
                ("softplus", (), {"softplus": True}), ("limits", (), {"softplus": True, "dt_limit": (0.2, 0.9)}),
                ("segments", (), {"segments": 3}), ("recompute", (), {"recompute": True})]),
        }[op]

    def test_against_float64_loops(self):
        for device in DEVICES:
            for op in INPUTS:
                for dtype in TOLERANCE:
                    for what, without, options in self.cases(op):
                        with self.subTest(op=op, device=device, dtype=dtype, case=what):
                            self.compare(op, make(op, device, dtype, without), dtype, what, **options)

    def test_log_decay(self):
        for device in DEVICES:
            for op in ("wkv6", "wkv_ssm", "wkv_ssm_mixed"):
                tensors = make(op, device)
                tensors["w"] = (-tensors["w"].detach().exp()).requires_grad_()
                self.compare(op, tensors, torch.float32, "log", decay="log")

    def test_scale(self):
        for device in DEVICES:
            tensors = make("wkv6", device)
            y, state = call(gt, "wkv6", tensors)
            scaled, same = call(gt, "wkv6", tensors, scale=0.25)
            self.assertTrue(torch.equal(scaled, y * 0.25) and torch.equal(same, state))
            found = gradients(tensors, scaled, same)
            right = gradients(tensors, y * 0.25, state)
            for name in found:
                torch.testing.assert_close(found[name], right[name], rtol=1e-4, atol=1e-5)
            with self.assertRaisesRegex(ArgumentError, "scale = 0"):
                call(gt, "wkv6", tensors, scale=0)

    def test_value_size(self):
        for device in DEVICES:
            shape = shapes("wkv6")
            shape.update(v=(2, 19, 4, 5), state=(2, 4, 8, 5))
            self.compare("wkv6", make("wkv6", device, shape=shape), torch.float32, "V = 5")
            shape = shapes("wkv_ssm")
            shape.update(v=(2, 19, 4, 5), wkv_state=(2, 4, 8, 5))
            self.compare("wkv_ssm", make("wkv_ssm", device, shape=shape), torch.float32, "V = 5")

    def test_skip_of_each_channel(self):
        for device in DEVICES:
            for op in ("ssd", "conv_ssd", "wkv_ssm", "wkv_ssm_mixed"):
                shape = shapes(op)
                shape["Dskip"] += (3 if op == "wkv_ssm_mixed" else 6,)
                self.compare(op, make(op, device, shape=shape), torch.float32, f"{op}: Dskip [H,P]")

    def test_shared_state(self):
        for device in DEVICES:
            for op in RECURRENT:
                with self.subTest(op=op, device=device):
                    self.compare(op, make(op, device, shape=without_batch(shapes(op))), torch.float32, "shared")

    def test_float32_decay_beside_16_bits(self):
        for device in DEVICES:
            for op, names in (("wkv6", "w"), ("ssd", "dt"), ("selective_scan", "dt"), ("conv_ssd", "dt"),
                              ("wkv_ssm", "w"), ("wkv_ssm", "dt"), ("wkv_ssm", "w dt")):
                with self.subTest(op=op, device=device, names=names):
                    tensors = make(op, device, torch.bfloat16)
                    for name in names.split():
                        tensors[name] = tensors[name].detach().float().requires_grad_()
                    self.compare(op, tensors, torch.bfloat16, names)

    def test_packed_sequences(self):
        for device in DEVICES:
            for op in RECURRENT:
                for shared in (False, True):
                    with self.subTest(op=op, device=device, shared=shared):
                        cu_seqlens = torch.tensor([0, 5, 5, 16, 19], dtype=torch.int32, device=device)
                        shape = shapes(op, B=1, rows=4)
                        shape = without_batch(shape) if shared else shape
                        self.compare(op, make(op, device, shape=shape), torch.float32, "packed", cu_seqlens=cu_seqlens)

    def test_fewer_sequences_than_capacity(self):
        for device in DEVICES:
            for op in RECURRENT:
                tensors = make(op, device, B=1, rows=5)
                cu_seqlens = torch.tensor([0, 5, 16, 0, 0, 0], dtype=torch.int32, device=device)
                count = torch.tensor([2], dtype=torch.int32, device=device)
                y, state = call(gt, op, tensors, cu_seqlens=cu_seqlens, seq_count=count)
                fewer = {name: value[:2] if name in STATES else value for name, value in tensors.items()}
                short, _ = call(gt, op, fewer, cu_seqlens=cu_seqlens[:3])
                self.assertEqual(y[:, 16:].abs().max().item(), 0, op)
                self.assertTrue(torch.equal(y[:, :16], short[:, :16]), op)
                self.assertEqual(state.shape[0], 5)

    def test_one_state_shared_and_the_other_not(self):
        for op, name in (("conv_ssd", "conv_state"), ("wkv_ssm", "wkv_state"), ("wkv_ssm_mixed", "ssm_state")):
            tensors = make(op)
            with self.assertRaisesRegex(ArgumentError, "both must have one, or neither"):
                call(gt, op, {**tensors, name: tensors[name][0]})

    def test_loss_of_one_branch(self):
        """If the loss uses only one y of wkv_ssm, the other y gets no gradient, and its tensors get gradients of 0."""
        tensors = make("wkv_ssm")
        exact, names = doubles(tensors), INPUTS["wkv_ssm"].split()
        for branch in (0, 1):
            results = []
            for module, values in ((gt, tensors), (loops, exact)):
                y = module.wkv_ssm(*[values[name] for name in names])[branch]
                results.append(torch.autograd.grad(y.square().sum(), list(values.values()), allow_unused=True))
            for name, found, right in zip(names, *results):
                right = torch.zeros_like(exact[name]) if right is None else right
                error = (found.double() - right).abs().max().item()
                self.assertLess(error, 1e-4 * (1 + right.abs().max().item()), name)

    def test_int64_cu_seqlens_and_other_parameter_types(self):
        cu_seqlens = torch.tensor([0, 7, 19])
        tensors = make("wkv6", B=1, rows=2)
        wide, _ = call(gt, "wkv6", tensors, cu_seqlens=cu_seqlens)
        self.assertTrue(torch.equal(wide, call(gt, "wkv6", tensors, cu_seqlens=cu_seqlens.int())[0]))
        tensors = make("ssd", dtype=torch.bfloat16)
        tensors["A"] = tensors["A"].detach().bfloat16().requires_grad_()
        y, state = call(gt, "ssd", tensors)
        self.assertEqual(gradients(tensors, y, state)["A"].dtype, torch.bfloat16)

    def test_no_tokens(self):
        for device in DEVICES:
            for op in RECURRENT:
                tensors = make(op, device, T=0)
                y, state = call(gt, op, tensors)
                self.assertTrue(torch.equal(state, first_states(op, tensors)), op)
                found = gradients(tensors, y, state)
                for name in set(STATES) & set(tensors):
                    self.assertEqual(found[name].shape, tensors[name].shape)

    def test_loss_of_the_state_alone(self):
        for op in RECURRENT:
            tensors, exact = make(op), None
            exact = doubles(tensors)
            names = list(tensors)
            found = torch.autograd.grad(call(gt, op, tensors)[1].sum(), [tensors[n] for n in names], allow_unused=True)
            right = torch.autograd.grad(call(loops, op, exact)[1].sum(), [exact[n] for n in names], allow_unused=True)
            for name, a, b in zip(names, found, right):
                b = torch.zeros_like(exact[name]) if b is None else b
                self.assertLess((a.double() - b).abs().max().item(), 1e-4 * (1 + b.abs().max().item()), f"{op} d{name}")

    def test_backward_reads_y(self):
        """Passes y to backward as on a GPU.  The twins accept y, but compute dz without it, so no gradient changes."""
        for op in ("ssd", "conv_ssd", "wkv_ssm", "wkv_ssm_mixed"):
            tensors = make(op, dtype=torch.bfloat16)
            expected = gradients(tensors, *call(gt, op, tensors))
            for without in ((), ("z",)):
                for dispatched in (False, True):
                    if without:
                        tensors = make(op, dtype=torch.bfloat16, without=without)
                        expected = gradients(tensors, *call(gt, op, tensors))
                    engine, looks = _engine.ENGINES[op], torch.overrides.BaseTorchFunctionMode()
                    engine.plans.clear()
                    with unittest.mock.patch.object(_engine, "_READS_Y", ("cpu",)), \
                            looks if dispatched else contextlib.nullcontext():
                        found = gradients(tensors, *call(gt, op, tensors))
                    for name in expected:
                        self.assertTrue(torch.equal(found[name], expected[name]), f"{op} d{name}")
                    plan, = (plan for key, plan in engine.plans.items() if key[0] == "backward")
                    args = plan.struct.from_buffer_copy(plan.template)
                    # y of a mixed call is there without z, too, because the gradient of gain_ssm needs it
                    self.assertEqual(getattr(args, "ssd", args).reads_y, op == "wkv_ssm_mixed" or not without)
        tensors = make("ssd", dtype=torch.bfloat16)
        with unittest.mock.patch.object(_engine, "_READS_Y", ("cpu",)):
            y = gt.ssd(*[tensors[name] for name in INPUTS["ssd"].split()])
            loss = y.mul_(2).sum()
            with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
                loss.backward()

    def test_sum_in_fp32(self):
        """A stream in float32 beside 16 bits: the sum is exact, also where the residual is converted, or missing."""
        for device, dtype, reads_sum in itertools.product(DEVICES, (torch.bfloat16, torch.float16), (False, True)):
            for wide, without in ((True, ()), (False, ()), (False, ("residual",))):
                with self.subTest(device=device, dtype=dtype, reads_sum=reads_sum, wide=wide, without=without):
                    tensors = make("add_norm", device, dtype, without)
                    if wide:
                        tensors["residual"] = tensors["residual"].detach().float().requires_grad_()
                    options = {"sum_in_fp32": not wide, "reads_sum": reads_sum}
                    self.compare("add_norm", tensors, dtype, "fp32", **options)
                    y, total = call(gt, "add_norm", tensors, **options)
                    right = tensors["x"].float() + (0 if without else tensors["residual"].float())
                    self.assertTrue(y.dtype == dtype and total.dtype == torch.float32 and torch.equal(total, right))

    def test_residual_of_another_dtype(self):
        """It is converted, and its gradient back."""
        x = torch.randn(3, 12, dtype=torch.bfloat16)
        for dtype, sum_dtype in ((torch.float16, torch.bfloat16), (torch.float64, torch.bfloat16)):
            residual = torch.randn(3, 12, dtype=dtype, requires_grad=True)
            y, total = gt.add_norm(x, residual)
            self.assertEqual(total.dtype, sum_dtype)
            (y.sum() + total.sum()).backward()
            self.assertEqual(residual.grad.dtype, dtype)
        self.assertEqual(gt.add_norm(x.float(), x)[1].dtype, torch.float32)

    def test_loss_of_the_sum_alone(self):
        for reads_sum in (False, True):
            tensors = make("add_norm")
            _, total = call(gt, "add_norm", tensors, reads_sum=reads_sum)
            weights = torch.randn(total.shape)
            dx, dresidual, *others = torch.autograd.grad((total * weights).sum(), list(tensors.values()))
            self.assertTrue(torch.equal(dx, weights) and torch.equal(dresidual, weights))
            self.assertFalse(any(gradient.any() for gradient in others))

    def test_backward_keeps_the_sum_alone(self):
        """With reads_sum neither x nor residual is kept, and backward sees that the sum was changed in place."""
        for dtype, wide in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
            for reads_sum in (False, True):
                tensors, kept = make("add_norm", dtype=dtype), []
                if wide:
                    tensors["residual"] = tensors["residual"].detach().float().requires_grad_()
                with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
                    y, total = call(gt, "add_norm", tensors, reads_sum=reads_sum)
                self.assertEqual([value.data_ptr() in kept for value in (tensors["x"], tensors["residual"], total)],
                                 [not reads_sum, not reads_sum, reads_sum])
        total = call(gt, "add_norm", tensors, reads_sum=True)[1]
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            total.mul_(2).sum().backward()

    def test_no_rows(self):
        for device in DEVICES:
            for op in set(INPUTS) - set(RECURRENT):
                for reads_sum in (False, True) if op == "add_norm" else (None,):
                    tensors = make(op, device, T=0)
                    y, total = call(gt, op, tensors, **({} if reads_sum is None else {"reads_sum": reads_sum}))
                    self.assertEqual(y.shape[:2], (2, 0), op)
                    for name, gradient in gradients(tensors, y, total).items():
                        self.assertEqual(gradient.shape, tensors[name].shape, f"{op} d{name}")
                        self.assertFalse(gradient.any(), f"{op} d{name}")

    def test_some_gradients(self):
        """Only the requested gradients are computed, and they are the same as in a call for all."""
        for op in INPUTS:
            tensors = make(op)
            whole = gradients(tensors, *call(gt, op, tensors))
            for name in tensors:
                part = {k: v.detach().requires_grad_(k == name) for k, v in tensors.items()}
                self.assertTrue(torch.equal(gradients(part, *call(gt, op, part))[name], whole[name]), f"{op} d{name}")


class Bits(unittest.TestCase):
    """Compares bits with the C API, which is called through ctypes with a struct that is filled in here."""

    @staticmethod
    def place(op, args, name):
        """Returns the struct that holds a tensor, and the field names of the tensor and of its gradient."""
        field = {"state": "state_in", "conv_state": "conv_state_in", "wkv_state": "state_in",
                 "ssm_state": "state_in"}.get(name, name)
        inner = args
        if op in ("wkv_ssm", "wkv_ssm_mixed") and name not in MIXED:
            inner = args.wkv6 if name in ("r", "k", "v", "w", "u", "wkv_state") else args.ssd
        return inner, field, "conv_dstate_in" if name == "conv_state" else f"d{field}"

    @staticmethod
    def outer(op, args):
        """The structs of the call that have a field y."""
        return (args.wkv6, args.ssd) if op == "wkv_ssm" else (args,)

    def direct(self, op, tensors, sizes, options, device):
        struct = getattr(c, f"gt_{PUBLIC[op]}_args")
        dtype = {torch.float32: c.GT_F32, torch.bfloat16: c.GT_BF16, torch.float16: c.GT_F16}[next(iter(tensors.values())).dtype]
        args, back, keep, out = struct(), struct(), [], {}
        first = next(iter(tensors.values()))
        for call_args in (args, back):
            call_args.dtype = dtype
            for name, value in (sizes | options).items():
                inner, _, name = name.rpartition(".")
                setattr(getattr(call_args, inner) if inner else call_args, name, value)
            for name, value in tensors.items():
                inner, field, _ = self.place(op, call_args, name)
                setattr(inner, field, value.data_ptr())
        y_shapes = {"wkv6": (tensors.get("v"),), "wkv_ssm_mixed": (tensors.get("v"),),
                    "wkv_ssm": (tensors.get("v"), tensors.get("x")),
                    "conv_ssd": (tensors.get("z"),)}.get(op, (first,))
        y_shapes = [(*value.shape[:-1], sizes["O"]) if "O" in sizes else value.shape for value in y_shapes]
        ys = [torch.empty(shape, dtype=first.dtype, device=device) for shape in y_shapes]
        y_field = "mixed" if op == "wkv_ssm_mixed" else "y"
        for inner, y in zip(self.outer(op, args), ys):
            setattr(inner, y_field, y.data_ptr())
        if op == "wkv_ssm_mixed":  # backward reads y of both branches
            for name, like in (("wkv6", "v"), ("ssd", "x")):
                keep.append(torch.empty_like(tensors[like]))
                getattr(args, name).y = getattr(back, name).y = keep[-1].data_ptr()
        states = [name for name in INPUTS[op].split() if name in STATES]
        finals = [torch.empty_like(tensors[name]) for name in states]
        for name, final in zip(states, finals):
            inner, field, _ = self.place(op, args, name)
            setattr(inner, field.replace("_in", "_out"), final.data_ptr())
        if op == "add_norm":
            out["state"] = torch.empty_like(tensors["residual"])
            args.sum = back.sum = out["state"].data_ptr()
        self.launch(op, "forward", args, device, keep)
        out["y"] = side_by_side(ys, 2)
        if states:
            out["state"] = side_by_side(finals, 1)
        dy = torch.randn(out["y"].shape, generator=torch.Generator().manual_seed(3)).to(device, first.dtype)
        dys = dy.split([y.flatten(2).shape[2] for y in ys], 2) if len(ys) > 1 else [dy]
        for inner, part in zip(self.outer(op, back), dys):
            keep.append(part.contiguous())
            setattr(inner, f"d{y_field}", keep[-1].data_ptr())
        for name, value in tensors.items():
            if (op, name) in (("norm_mix", "residual"), ("wkv_ssm_mixed", "residual")):
                out["dresidual"] = dy
                continue
            wide = (op, name) == ("rmsnorm_linear", "weight")
            out[f"d{name}"] = torch.empty_like(value, dtype=torch.float32 if wide else value.dtype)
            inner, _, field = self.place(op, back, name)
            setattr(inner, field, out[f"d{name}"].data_ptr())
        if hasattr(args, "saved"):
            back.saved, back.saved_bytes = args.saved, args.saved_bytes
        if states:
            dstate = torch.randn(out["state"].shape, generator=torch.Generator().manual_seed(4)).to(device)
            parts = dstate.split([final.flatten(1).shape[1] for final in finals], 1) if len(finals) > 1 else [dstate]
            for name, part in zip(states, parts):
                keep.append(part.contiguous())
                inner, _, field = self.place(op, back, name)
                setattr(inner, field.replace("_in", "_out"), keep[-1].data_ptr())
        if op == "add_norm":
            keep.append(torch.randn(out["state"].shape, generator=torch.Generator().manual_seed(4)).to(out["state"]))
            back.dsum = keep[-1].data_ptr()
        self.launch(op, "backward", back, device, keep)
        out = {name: value.to(first.dtype) if (op, name) == ("rmsnorm_linear", "dweight") else value
               for name, value in out.items()}
        return out

    def launch(self, op, name, args, device, keep):
        op = PUBLIC[op]
        if device == "cpu":
            c.check(getattr(c, f"gt_ref_{op}_{name}")(args))
            return
        need = c.gt_workspace()
        if name == "forward" and hasattr(args, "saved"):
            c.check(getattr(c, f"gt_{op}_workspace")(args, need))
            keep.append(torch.empty(need.saved, dtype=torch.uint8, device=device))
            args.saved, args.saved_bytes = keep[-1].data_ptr(), need.saved
        c.check(getattr(c, f"gt_{op}_workspace")(args, need))
        keep.append(torch.empty(getattr(need, name), dtype=torch.uint8, device=device))
        args.workspace, args.workspace_bytes = keep[-1].data_ptr(), getattr(need, name)
        c.check(getattr(c, f"gt_{op}_{name}")(args, torch.cuda.current_stream().cuda_stream))
        torch.cuda.synchronize()

    def test_bits(self):
        options = {"ssd": ({"softplus": True}, {"softplus": 1}), "selective_scan": ({"softplus": True}, {"softplus": 1}),
                   "conv1d": ({"activation": "silu"}, {"activation": c.GT_ACT_SILU}),
                   "conv_ssd": ({"softplus": True, "dt_limit": (0.2, 0.9)},
                                {"softplus": 1, "dt_limit": 1, "dt_min": 0.2, "dt_max": 0.9}),
                   "wkv_ssm": ({"softplus": True, "scale": 0.5, "segments": 2},
                               {"ssd.softplus": 1, "wkv6.scale": 0.5, "segments": 2}),
                   "wkv_ssm_mixed": ({"softplus": True, "scale": 0.5, "segments": 2},
                                     {"ssd.softplus": 1, "wkv6.scale": 0.5, "segments": 2, "ssd.reads_y": 1}),
                   "wkv4": ({"decay": "log"}, {"decay": c.GT_DECAY_LOG}),
                   "norm_mix": ({"heads": 3}, {"H": 3}), "norm_gate": ({"heads": 2, "norm": "layer"},
                                                                      {"H": 2, "norm": c.GT_NORM_LAYER}),
                   "add_norm": ({"norm": "layer", "reads_sum": True}, {"norm": c.GT_NORM_LAYER, "reads_sum": 1})}
        sizes = {"wkv6": dict(B=2, T=19, H=4, N=8), "wkv4": dict(B=2, T=19, D=12), "ssd": dict(B=2, T=19, H=4, P=6, N=8, G=2),
                 "selective_scan": dict(B=2, T=19, D=12, N=8, G=2), "conv1d": dict(B=2, T=19, D=12, W=4),
                 "conv_ssd": dict(B=2, T=19, H=4, P=6, N=8, G=2, W=4),
                 "wkv_ssm": {"B": 2, "T": 19, "wkv6.H": 4, "wkv6.N": 8, "ssd.H": 8, "ssd.P": 6, "ssd.N": 16,
                             "ssd.G": 2},
                 "wkv_ssm_mixed": {"B": 2, "T": 19, "wkv6.H": 4, "wkv6.N": 8, "wkv6.V": 6, "ssd.H": 8, "ssd.P": 3,
                                   "ssd.N": 16, "ssd.G": 2},
                 "rmsnorm_linear": dict(M=38, D=12, O=10), "norm_mix": dict(M=38, D=12), "norm_gate": dict(M=38, D=12),
                 "add_norm": dict(M=38, D=12)}
        for device in DEVICES:
            for dtype in TOLERANCE:
                for op in INPUTS:
                    with self.subTest(op=op, device=device, dtype=dtype):
                        python, direct = options.get(op, ({}, {}))
                        tensors = make(op, device, dtype)
                        expected = self.direct(op, {k: v.detach() for k, v in tensors.items()}, sizes[op], direct, device)
                        y, state = call(gt, op, tensors, **python)
                        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(device, dtype)
                        outputs, grads = [y], [dy]
                        if state is not None:
                            outputs.append(state)
                            grads.append(torch.randn(state.shape, generator=torch.Generator().manual_seed(4)).to(state))
                        torch.autograd.backward(outputs, grads)
                        self.assertTrue(torch.equal(y, expected["y"]))
                        if state is not None:
                            self.assertTrue(torch.equal(state, expected["state"]))
                        for name, value in tensors.items():
                            self.assertTrue(torch.equal(value.grad, expected[f"d{name}"]), f"d{name}")
                        with torch.no_grad():
                            again, _ = call(gt, op, tensors, **python)
                        self.assertTrue(torch.equal(again, y))


def no_arrays(op):
    """None for each integer array of a step."""
    return next((None,) * len(operator.of_steps) for operator in OPERATORS if operator.name == op)


class Steps(unittest.TestCase):
    def test_dtypes_of_states_and_parameters(self):
        """A 16-bit state gives the float32 result after one rounding.  Parameters of 16 bits, or of several dtypes,
        give the same bits as float32 parameters."""
        parameters = {"wkv6": ["u"], "conv1d": ["weight", "bias"], "ssd": ["Dskip", "dt_bias"],
                      "selective_scan": ["Dskip", "dt_bias"]}
        for device, op, dtype in itertools.product(DEVICES, parameters, (torch.bfloat16, torch.float16)):
            with self.subTest(op=op, device=device, dtype=dtype), torch.no_grad():
                tensors = {name: value.detach() for name, value in make(op, device, T=3).items()}
                first, names = tensors.pop("state").to(dtype), parameters[op]
                small = {name: value.to(dtype) if name in names else value for name, value in tensors.items()}
                wide = {name: value.float() for name, value in small.items()}
                double = {**small, names[-1]: small[names[-1]].double()}
                step, state = getattr(gt, f"{op}_step"), first.float()
                right = step(*wide.values(), state)
                for values in (small, wide, double):
                    found = first.clone()
                    self.assertTrue(torch.equal(step(*values.values(), found), right))
                    self.assertTrue(torch.equal(found, state.to(dtype)))

    def stepped(self, op, tensors, state, lengths, **options):
        values = [tensors[name] for name in INPUTS[op].split() if name != "state"]
        parts, start = [], 0
        for length in lengths:
            cut = [v[:, start:start + length] if v.dim() > 2 and is_activation(op, n) else v
                   for n, v in zip(INPUTS[op].split(), values)]
            parts.append(getattr(gt, f"{op}_step")(*cut, state, **options))
            start += length
        return torch.cat(parts, 1)

    def test_equals_forward(self):
        for device in DEVICES:
            for op in STEPPED:
                with self.subTest(op=op, device=device), torch.no_grad():
                    tensors = make(op, device)
                    y, final = call(gt, op, tensors)
                    state = tensors["state"].clone()
                    stepped = self.stepped(op, tensors, state, (1, 16, 2))
                    self.assertLess((stepped - y).norm() / y.norm(), 1e-5)
                    self.assertLess((state - final).norm() / final.norm(), 1e-5)

    def test_after_fused_calls(self):
        """Continues from the final states of a fused operator with the steps of its parts."""
        for device in DEVICES:
            with torch.no_grad():
                x = make("conv_ssd", device)
                names, options, T = INPUTS["conv_ssd"].split(), dict(state_size=8, groups=2, final_state=True), 12
                y, *final = gt.conv_ssd(*[x[n] for n in names], **options)
                first = {n: v[:, :T] if is_activation("conv_ssd", n) else v for n, v in x.items()}
                head, conv, state = gt.conv_ssd(*[first[n] for n in names], **options)
                c_new = gt.conv1d_step(x["xBC"][:, T:], x["weight"], x["bias"], conv, activation="silu")
                rest = gt.ssd_step(c_new[..., :24].unflatten(2, (4, 6)), x["dt"][:, T:], x["A"],
                                   c_new[..., 24:40].unflatten(2, (2, 8)), c_new[..., 40:].unflatten(2, (2, 8)),
                                   x["Dskip"], x["z"][:, T:], x["dt_bias"], state)
                for got, right in ((torch.cat([head, rest], 1), y), (conv, final[0]), (state, final[1])):
                    self.assertLess((got - right).norm() / right.norm(), 1e-5)

    def test_slots(self):
        for device in DEVICES:
            for op in STEPPED:
                with self.subTest(op=op, device=device), torch.no_grad():
                    tensors = make(op, device, B=3, T=4)
                    pool = torch.rand(7, *tensors["state"].shape[1:], device=device)
                    before = pool.clone()
                    slots = torch.tensor([5, -1, 2], dtype=torch.int32, device=device)
                    y = self.stepped(op, tensors, pool, (4,), slots=slots)
                    rows = before[[5, 0, 2]].contiguous()
                    alone = self.stepped(op, tensors, rows, (4,))
                    self.assertTrue(torch.equal(y[[0, 2]], alone[[0, 2]]))
                    self.assertEqual(y[1].abs().max().item(), 0)
                    self.assertTrue(torch.equal(pool[[5, 2]], rows[[0, 2]]))
                    for untouched in (0, 1, 3, 4, 6):
                        self.assertTrue(torch.equal(pool[untouched], before[untouched]))

    def test_rounding(self):
        """Stochastic rounding gives neighbours of the fp32 state.  The result depends only on seed and step."""
        for device in DEVICES:
            for op, dtype in itertools.product(("wkv6", "ssd", "selective_scan"), (torch.bfloat16, torch.float16)):
                with self.subTest(op=op, dtype=dtype, device=device), torch.no_grad():
                    tensors = make(op, device, B=2, T=1)
                    start = torch.rand(2, *tensors["state"].shape[1:], device=device).to(dtype)
                    right, twice, pool = start.float(), start.clone(), torch.zeros(5, *start.shape[1:], device=device,
                                                                                  dtype=dtype)
                    seed, steps = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([7, -3], [4, 9]))
                    slots = torch.tensor([3, 1], dtype=torch.int32, device=device)
                    pool[slots.long()] = start
                    self.stepped(op, tensors, right, (1,))
                    self.stepped(op, tensors, twice, (1,), rounding=(seed, steps))
                    self.stepped(op, tensors, pool, (1,), rounding=(seed, steps), slots=slots)
                    self.assertTrue(torch.equal(pool[slots.long()], twice))
                    unit = torch.finfo(dtype).eps * right.abs() + torch.finfo(dtype).tiny
                    self.assertTrue(((twice.float() - right).abs() <= unit * 1.01).all())
                    other = start.clone()
                    self.stepped(op, tensors, other, (1,), rounding=(seed, steps + 1))
                    self.assertFalse(torch.equal(other, twice))
                    with self.assertRaisesRegex(ArgumentError, "rounding_seed is set, but state_dtype"):
                        self.stepped(op, tensors, right, (1,), rounding=(seed, steps))

    def test_tokens_and_commit(self):
        """The outputs of each batch element have the same bits as steps on that element alone.  Its state has the bits
        of the state after the committed tokens."""
        T, cases = 6, ((6, 6), (6, 2), (3, 3), (4, 0), (0, 0), (7, 2), (-1, 0), (3, 4), (3, -1), (5, 5))
        for device in DEVICES:
            for op in STEPPED:
                tensors = make(op, device, B=len(cases), T=T)
                pool = torch.rand(12, *tensors["state"].shape[1:], device=device)
                slots = torch.tensor([3, 5, 0, 1, 2, 4, 6, 7, 8, -1], dtype=torch.int32, device=device)
                counts = torch.tensor(cases, device=device)
                for kind in (torch.int32, torch.int64):
                    for given in (("tokens", "commit"), ("tokens",), ("commit",)):
                        with self.subTest(op=op, device=device, given=given, kind=kind), torch.no_grad():
                            arrays = {name: counts[:, at].to(kind).contiguous()
                                      for at, name in enumerate(("tokens", "commit")) if name in given}
                            state = pool.clone()
                            y = self.stepped(op, tensors, state, (T,), slots=slots, **arrays)
                            for b, (count, commit) in enumerate(cases):
                                count = count if "tokens" in given else T
                                commit = commit if "commit" in given else count
                                self.check_element(op, tensors, pool, state, y, b, int(slots[b]), count, commit)
                            self.assertTrue(torch.equal(state[9:], pool[9:]))

    def check_element(self, op, tensors, before, after, y, b, row, count, commit):
        T = y.shape[1]
        if not 0 <= commit <= count <= T or row < 0:
            count = commit = 0
        self.assertFalse(y[b, count:].any())
        alone = {name: value[b:b + 1] if value.shape[:2] == (len(y), T) else value for name, value in tensors.items()}
        for length, state in ((count, None), (commit, after)):
            right = before[row:row + 1].clone() if row >= 0 else torch.zeros_like(before[:1])
            if length:
                found = self.stepped(op, alone, right, (length,))
                if state is None:
                    self.assertTrue(torch.equal(found[0], y[b, :count]))
            if state is not None and row >= 0:
                self.assertTrue(torch.equal(right[0], state[row]))

    def test_bad_tokens(self):
        for op in STEPPED:
            for name in ("tokens", "commit"):
                for bad, text in ((torch.zeros(3), "dtype torch.float32: must be int32 or int64"),
                                  (torch.zeros(2, dtype=torch.int32), r"shape \[2\]: must have 3 elements"),
                                  (torch.zeros(3, 1, dtype=torch.int32), r"shape \[3, 1\]: must have 3 elements"),
                                  (torch.zeros(3, dtype=torch.int32, device="meta"), "meta: must be on cpu")):
                    tensors = make(op, B=3, T=4)
                    state = tensors["state"].detach().clone()
                    with torch.no_grad(), self.assertRaisesRegex(
                            ArgumentError, f"^gt_kernels.torch.{op}_step: {name} (has|is on) {text}"):
                        self.stepped(op, tensors, state, (4,), **{name: bad})
                    self.assertTrue(torch.equal(state, tensors["state"]))

    def test_refusals(self):
        tensors = make("conv1d", T=1)
        with self.assertRaisesRegex(UnsupportedError, "no gradients"):
            gt.conv1d_step(tensors["x"], tensors["weight"], tensors["bias"], tensors["state"].detach())
        with torch.no_grad():
            with self.assertRaisesRegex(ArgumentError, "contiguous"):
                gt.conv1d_step(tensors["x"], tensors["weight"], None, torch.zeros(12, 3).expand(2, 12, 3))
            with self.assertRaisesRegex(ArgumentError, r"conv1d_step: state has shape \[3, 12, 3\]: must be \[2,D,S>=W-1\]"):
                gt.conv1d_step(tensors["x"], tensors["weight"], None, torch.zeros(3, 12, 3))
            with self.assertRaisesRegex(ArgumentError, r"conv1d_step: state has shape \[2, 12, 2\]: must be \[2,D,S>=W-1\]"):
                gt.conv1d_step(tensors["x"], tensors["weight"], None, torch.zeros(2, 12, 2))
            with self.assertRaisesRegex(ArgumentError, "conv1d_step: state has dtype torch.float64: must be torch.float32 or"):
                gt.conv1d_step(tensors["x"], tensors["weight"], None, torch.zeros(2, 12, 3).double())
            with self.assertRaisesRegex(ArgumentError, "gt_kernels.torch.conv1d_step: T = 17"):
                gt.conv1d_step(torch.zeros(2, 17, 12), tensors["weight"], None, torch.zeros(2, 12, 3))
            for state, what in ((torch._neg_view(torch.zeros(2, 12, 3)), "a negated view"),
                                (torch._efficientzerotensor((2, 12, 3)), "zeros without memory")):
                with self.assertRaisesRegex(ArgumentError, f"conv1d_step: state is {what}: must be a plain tensor"):
                    gt.conv1d_step(tensors["x"], tensors["weight"], None, state)


class Pools(unittest.TestCase):
    """Packed forward with states in rows of pools."""

    OPS = tuple(operator.name for operator in OPERATORS if operator.has_pools)

    def call(self, op, tensors, pools, **options):
        values = [tensors[name] for name in INPUTS[op].split() if name not in STATES]
        if op == "conv_ssd":
            options = {**options, "state_size": 8, "groups": 2}
        return getattr(gt, op)(*values, **pools, **options)

    def make(self, op, device, rows=6, gap=False):
        """Returns (tensors of 19 tokens, pools by name).  gap: the rows of a pool have gaps between them, and in
        conv1d's pool the columns are the outermost index of a row."""
        tensors = {name: value.detach() for name, value in make(op, device, B=1, rows=4).items()}
        pools = {}
        for name in INPUTS[op].split():
            if name in STATES:
                shape = tensors[name].shape[1:]
                pools[name] = torch.randn(rows, 3, *shape, device=device)[:, 1] if gap else torch.randn(
                    rows, *shape, device=device)
        if gap and op == "conv1d":
            pools["state"] = torch.randn(rows, 5, 12, device=device)[:, :3].transpose(1, 2)
        return tensors, pools

    def test_has_the_bits_of_a_call_without(self):
        """A call with pools gives the bits of a call without.  Rows that no sequence uses keep their bits.  A sequence
        whose row is outside the pool has y = 0."""
        for device, op, gap, kind in itertools.product(DEVICES, self.OPS, (False, True), (torch.bool, torch.int64)):
            with self.subTest(device=device, op=op, gap=gap, kind=kind), torch.no_grad():
                tensors, pools = self.make(op, device, gap=gap)
                before = {name: pool.clone() for name, pool in pools.items()}
                cu_seqlens = torch.tensor([0, 7, 7, 15, 19], device=device)
                slots, zero = (torch.tensor(x, device=device) for x in ([4, 1, -1, 0], [False, False, True, True]))
                y = self.call(op, tensors, pools, cu_seqlens=cu_seqlens, slots=slots, starts_zero=zero.to(kind))
                starts = {name: torch.where(zero.view(-1, *[1] * (pool.dim() - 1)), 0, pool[slots.clamp_min(0)])
                          for name, pool in before.items()}
                right, *finals = self.call(op, tensors, starts, cu_seqlens=cu_seqlens, final_state=True)
                self.assertTrue(torch.equal(y[:, :7], right[:, :7]) and torch.equal(y[:, 15:], right[:, 15:]))
                self.assertFalse(y[:, 7:15].any())
                for (name, pool), final in zip(pools.items(), finals):
                    expected = before[name]
                    expected[[4, 1, 0]] = final[[0, 1, 3]]
                    self.assertTrue(torch.equal(pool, expected))

    def test_16_bits(self):
        """A pool of 16 bits gives the bits of a float32 pool with the same states, and the new states are rounded."""
        B16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
        kinds = {op: ((B16,), (F16,)) for op in self.OPS}
        kinds["conv_ssd"] = tuple(itertools.product((B16, F16, F32), repeat=2))[:-1]  # of conv_state, of state
        for device, op, gap in itertools.product(DEVICES, self.OPS, (False, True)):
            for dtypes in kinds[op]:
                self.check_16_bits(device, op, gap, dtypes)

    def check_16_bits(self, device, op, gap, dtypes):
        with self.subTest(device=device, op=op, gap=gap, dtypes=dtypes), torch.no_grad():
            tensors, pools = self.make(op, device, gap=gap)
            small = {}
            for (name, wide), dtype in zip(pools.items(), dtypes):
                small[name] = torch.empty_strided(wide.shape, wide.stride(), dtype=dtype, device=device).copy_(wide)
                wide.copy_(small[name])
            before = {name: pool.clone() for name, pool in pools.items()}
            options = {"cu_seqlens": torch.tensor([0, 7, 7, 15, 19], device=device),
                       "slots": torch.tensor([4, 1, -1, 0], device=device),
                       "starts_zero": torch.tensor([False, False, True, True], device=device)}
            y = self.call(op, tensors, small, **options)
            self.assertTrue(torch.equal(y, self.call(op, tensors, pools, **options)))
            for name, wide in pools.items():
                self.assertTrue(torch.equal(small[name], wide.to(small[name].dtype)))
                self.assertFalse(torch.equal(wide, before[name]))

    def test_chunked_prefill(self):
        """A sequence in two calls ends like in one call.  seq_count keeps the call from touching later sequences."""
        for device, op in itertools.product(DEVICES, self.OPS):
            with self.subTest(device=device, op=op), torch.no_grad():
                tensors, pools = self.make(op, device)
                whole, (slots, first, zero, count) = {name: pool.clone() for name, pool in pools.items()}, [
                    torch.tensor(x, dtype=torch.int32, device=device) for x in ([2, 3], [0, 19, 19], [1, 1], [1])]
                right = self.call(op, tensors, whole, cu_seqlens=first, slots=slots, starts_zero=zero, seq_count=count)
                parts = []
                for start, end in ((0, 8), (8, 19)):
                    cut = {name: value[:, start:end] if is_activation(op, name) else value
                           for name, value in tensors.items()}
                    parts.append(self.call(op, cut, pools, cu_seqlens=first.clamp_max(end - start), slots=slots,
                                           starts_zero=zero if start == 0 else None, seq_count=count))
                self.assertLess((torch.cat(parts, 1) - right).norm() / right.norm(), 1e-5)
                for name, pool in pools.items():
                    self.assertLess((pool[2] - whole[name][2]).norm() / whole[name][2].norm(), 1e-5)
                    self.assertTrue(torch.equal(pool[3:], whole[name][3:]))

    def test_autograd_knows_that_a_pool_is_written(self):
        with torch.no_grad():
            tensors, pools = self.make("conv_ssd", "cpu")
            versions = [pool._version for pool in pools.values()]
            self.call("conv_ssd", tensors, pools, cu_seqlens=torch.tensor([0, 19]), slots=torch.tensor([1]))
            self.assertEqual([pool._version for pool in pools.values()], [version + 1 for version in versions])

    def test_compiled(self):
        with torch.no_grad():
            torch._dynamo.reset()
            tensors, pools = self.make("conv_ssd", "cpu")
            twice = {name: pool.clone() for name, pool in pools.items()}
            options = {"cu_seqlens": torch.tensor([0, 7, 19]), "slots": torch.tensor([5, 0]),
                       "starts_zero": torch.tensor([True, False])}
            compiled = torch.compile(lambda t, p: self.call("conv_ssd", t, p, **options) + 1, fullgraph=True,
                                     backend="aot_eager")
            for _ in range(2):
                y = self.call("conv_ssd", tensors, pools, **options) + 1
                self.assertTrue(torch.equal(compiled(tensors, twice), y))
            for name, pool in pools.items():
                self.assertTrue(torch.equal(pool, twice[name]))

    def test_refusals(self):
        two, slots = torch.tensor([0, 7, 19]), torch.tensor([1, 0])
        for op in self.OPS:
            tensors, pools = self.make(op, "cpu")
            name = list(pools)[-1]
            pool, right = pools[name], {"cu_seqlens": two, "slots": slots}
            for options, text in (
                    ({"slots": slots}, "cu_seqlens is None"),
                    ({"cu_seqlens": two, "starts_zero": slots}, "starts_zero is given without slots"),
                    ({**right, "final_state": True}, "final_state = True: must be False with slots"),
                    ({**right, "slots": slots.float()}, "slots has dtype torch.float32: must be int32 or int64"),
                    ({**right, "slots": slots[:1]}, r"slots has shape \[1\]: must have 2 elements"),
                    ({**right, "starts_zero": two}, r"starts_zero has shape \[3\]: must have 2 elements"),
                    ({**right, name: None}, f"{name} is None"),
                    ({**right, name: pool[0]}, f"{name} has shape "),
                    ({**right, name: pool[:0]}, f"{name} has shape .*: "),
                    ({**right, name: pool.double()}, f"{name} has dtype torch.float64: must be torch.float32"),
                    ({**right, name: pool[:1].expand_as(pool)}, f"{name} has strides .*: must be contiguous, because"),
                    ({**right, name: torch._neg_view(pool)}, f"{name} is a negated view: must be a plain tensor")):
                before = {key: value.clone() for key, value in pools.items()}
                given = {**pools, **{key: options[key] for key in options if key in pools}}
                others = {key: value for key, value in options.items() if key not in pools}
                with self.subTest(op=op, text=text), torch.no_grad(), \
                        self.assertRaisesRegex(ArgumentError, f"^gt_kernels.torch.{op}: {text}"):
                    self.call(op, tensors, given, **others)
                for key, value in pools.items():
                    self.assertTrue(torch.equal(value, before[key]))
            with self.assertRaisesRegex(UnsupportedError, f"^gt_kernels.torch.{op}: this call updates the state in "
                                                          "place .* or use a call without slots"):
                self.call(op, make(op, B=1, rows=4), pools, **right)
        tensors, pools = self.make("conv_ssd", "cpu")
        for state, text in ((pools["state"][:5], r"state has shape \[5, 4, 6, 8\]: must be \[6,H,P,N\]"),
                            (pools["state"].double(), "state has dtype torch.float64: must be torch.float32 or torch.b")):
            with self.subTest(text=text), torch.no_grad(), self.assertRaisesRegex(ArgumentError, text):
                self.call("conv_ssd", tensors, {**pools, "state": state}, **right)


class Snapshots(unittest.TestCase):
    """Forward that also writes the states of prefixes.  A snapshot must equal the final state of a call on the prefix
    alone, bit for bit, because segments = 1."""

    OPS, EVERY = tuple(operator.name for operator in OPERATORS if operator.of_snapshots), 128
    BOUNDS = (0, 140, 140, 410, 550)  # packed: 1, 0, 2 and 1 snapshots, and the rows 0, -, 1, 2 and 3 of 4
    ROWS = ((0, 1), (140, 1), (140, 2), (410, 1))  # of each row: the first token, and the multiple of EVERY

    def call(self, op, tensors, **options):
        values = [tensors[name] for name in INPUTS[op].split() if name not in STATES]
        if op == "conv_ssd":
            options = {**options, "state_size": 8, "groups": 2}
        return getattr(gt, op)(*values, segments=1, **options)

    def make(self, op, device="cpu", B=1, T=550, rows=4):
        """Returns (tensors, states by name)."""
        tensors = {name: value.detach() for name, value in make(op, device, B=B, T=T, rows=rows).items()}
        return tensors, {name: tensors.pop(name) for name in INPUTS[op].split() if name in STATES}

    def buffers(self, states, *rows, dtype=torch.float32):
        """Returns buffers of snapshots, filled with 7, in the order of the states.  conv_snapshots has the dtype of
        conv_state."""
        return {name.replace("state", "snapshots"):
                torch.full((*rows, *state.shape[1:]), 7.0, device=state.device,
                           dtype=dtype if name == "state" else state.dtype) for name, state in states.items()}

    def final(self, op, tensors, states, first, end):
        """The final states of a call on the tokens first to end - 1, from the given states, without other tokens."""
        part = {name: value[:, first:end].contiguous() if is_activation(op, name) else value
                for name, value in tensors.items()}
        return self.call(op, part, **states, final_state=True)[1:]

    def check_packed(self, op, tensors, states, buffers, starts):
        """starts: of each row, the first states of its sequence."""
        for row, ((first, count), start) in enumerate(zip(self.ROWS, starts)):
            final = self.final(op, tensors, start, first, first + count * self.EVERY)
            for (name, buffer), right in zip(buffers.items(), final):
                self.assertTrue(torch.equal(buffer[row], right[0].to(buffer.dtype)), (name, row))

    def test_pools(self):
        """Also with 16-bit snapshots.  A sequence without a row in the pool has no snapshots."""
        for device, op, dtype in itertools.product(DEVICES, self.OPS, (torch.float32, torch.bfloat16, torch.float16)):
            with self.subTest(device=device, op=op, dtype=dtype), torch.no_grad():
                tensors, pools = self.make(op, device, rows=6)
                if op == "conv_ssd":
                    pools["conv_state"] = pools["conv_state"].to(dtype)
                before = {name: pool.clone() for name, pool in pools.items()}
                buffers = self.buffers(pools, 4, dtype=dtype)
                options = {"cu_seqlens": torch.tensor(self.BOUNDS, device=device),
                           "starts_zero": torch.tensor([False, False, True, False], device=device)}
                right = self.call(op, tensors, **{name: pool.clone() for name, pool in before.items()},
                                  slots=torch.tensor([4, 1, 3, 0], device=device), **options)
                versions = [buffer._version for buffer in buffers.values()]
                y = self.call(op, tensors, **pools, slots=torch.tensor([4, 1, 3, 0], device=device), **options,
                              **buffers, snapshot_every=self.EVERY)
                self.assertTrue(torch.equal(y, right))
                self.assertEqual([buffer._version for buffer in buffers.values()],
                                 [version + 1 for version in versions])
                starts = [{name: pool[slot:slot + 1].float() * (0 if row in (1, 2) else 1) for name, pool in before.items()}
                          for row, slot in enumerate((4, 3, 3, 0))]
                self.check_packed(op, tensors, before, buffers, starts)
                skipped = self.buffers(pools, 4, dtype=dtype)
                self.call(op, tensors, **pools, slots=torch.tensor([-1, 1, 3, 9], device=device), **options,
                          **skipped, snapshot_every=self.EVERY)
                for buffer in skipped.values():
                    self.assertTrue((buffer[[0, 3]] == 7).all() and not (buffer[1:3] == 7).all())

    def test_packed(self):
        """Without slots; the final states are those of a call without snapshots."""
        for device, op in itertools.product(DEVICES, self.OPS):
            with self.subTest(device=device, op=op), torch.no_grad():
                tensors, states = self.make(op, device)
                buffers, bounds = self.buffers(states, 4), torch.tensor(self.BOUNDS, device=device)
                right = self.call(op, tensors, **states, cu_seqlens=bounds, final_state=True)
                found = self.call(op, tensors, **states, cu_seqlens=bounds, final_state=True, **buffers,
                                  snapshot_every=self.EVERY)
                self.assertEqual(len(found), len(right))
                for a, b in zip(found, right):
                    self.assertTrue(torch.equal(a, b))
                self.check_packed(op, tensors, states, buffers,
                                  [{name: state[s:s + 1] for name, state in states.items()} for s in (0, 2, 2, 3)])

    def test_batch(self):
        """Without packed sequences, with and without first states; each buffer also alone."""
        for device, op, has_states in itertools.product(DEVICES, self.OPS, (False, True)):
            with self.subTest(device=device, op=op, has_states=has_states), torch.no_grad():
                tensors, states = self.make(op, device, B=2, T=300, rows=2)
                buffers, given = self.buffers(states, 2, 2), states if has_states else {}
                y = self.call(op, tensors, **given, **buffers, snapshot_every=self.EVERY)
                self.assertTrue(torch.equal(y, self.call(op, tensors, **given)))
                for i in range(2):
                    final = self.final(op, tensors, given, 0, (i + 1) * self.EVERY)
                    for (name, buffer), right in zip(buffers.items(), final):
                        self.assertTrue(torch.equal(buffer[:, i], right), (name, i))
                for name, buffer in buffers.items():
                    alone = torch.zeros_like(buffer)
                    self.call(op, tensors, **given, **{name: alone}, snapshot_every=self.EVERY)
                    self.assertTrue(torch.equal(alone, buffer))

    def test_fewer_tokens(self):
        """A call with fewer than snapshot_every tokens has a buffer without rows."""
        for op in self.OPS:
            with self.subTest(op=op), torch.no_grad():
                tensors, states = self.make(op, T=19, rows=1)
                y = self.call(op, tensors, **states, **self.buffers(states, 1, 0), snapshot_every=self.EVERY)
                self.assertTrue(torch.equal(y, self.call(op, tensors, **states)))

    def test_autocast(self):
        """Activations are cast; buffers, w and dt stay float32."""
        for op in self.OPS:
            with self.subTest(op=op), torch.no_grad():
                tensors, states = self.make(op, B=2, T=150, rows=2)
                buffers, twice = self.buffers(states, 2, 1), self.buffers(states, 2, 1)
                with torch.autocast("cpu", torch.bfloat16):
                    y = self.call(op, tensors, **states, **buffers, snapshot_every=self.EVERY)
                small = {name: value.bfloat16() if is_activation(op, name) and name not in ("w", "dt") else value
                         for name, value in tensors.items()}
                self.assertTrue(torch.equal(y, self.call(op, small, **states, **twice, snapshot_every=self.EVERY)))
                for name, buffer in buffers.items():
                    self.assertTrue(torch.equal(buffer, twice[name]))

    def test_compiled(self):
        """One graph, also with a dynamic length."""
        for op, has_pool in itertools.product(self.OPS, (False, True)):
            with self.subTest(op=op, has_pool=has_pool), torch.no_grad():
                torch._dynamo.reset()
                compiled = torch.compile(lambda t, s, b, o: self.call(op, t, **s, **b, **o, snapshot_every=self.EVERY)
                                         + 1, fullgraph=True, backend="aot_eager", dynamic=True)
                for T in (300, 300, 700):
                    tensors, states = self.make(op, T=T, rows=2)
                    options = {"cu_seqlens": torch.tensor([0, 140, T])}
                    if has_pool:
                        options["slots"] = torch.tensor([1, 0])
                    pools = {name: state.clone() for name, state in states.items()}
                    buffers, twice = (self.buffers(states, T // self.EVERY) for _ in range(2))
                    y = self.call(op, tensors, **states, **buffers, **options, snapshot_every=self.EVERY) + 1
                    self.assertTrue(torch.equal(compiled(tensors, pools, twice, options), y))
                    for name, buffer in buffers.items():
                        self.assertTrue(torch.equal(buffer, twice[name]))
                        self.assertFalse((buffer == 7).all())
                    for name, state in states.items():
                        self.assertTrue(torch.equal(state, pools[name]))

    def test_opcheck(self):
        for op in self.OPS:
            tensors, states = self.make(op, T=150, rows=2)
            options = {"wkv6": (0, 1.0, 1), "ssd": (1, 0, 0.0, 0.0, 1), "conv_ssd": (8, 2, 1, 0, 0.0, 0.0, 1)}[op]
            values, bounds = (*tensors.values(), *states.values()), torch.tensor([0, 15, 150], dtype=torch.int32)
            slots = torch.tensor([1, 0], dtype=torch.int32)
            for buffers in (tuple(self.buffers(states, 1).values()), (None,) * len(states)):
                every = (self.EVERY if buffers[0] is not None else 0,)
                torch.library.opcheck(getattr(torch.ops.gt_kernels, f"{op}_snapshots").default,
                                      (*values, bounds, None, *buffers, *options, *every))
                torch.library.opcheck(getattr(torch.ops.gt_kernels, f"{op}_pool").default,
                                      (*values, bounds, None, slots, None, *buffers, *options, *every))

    def test_refusals(self):
        bounds, slots = torch.tensor([0, 140, 300]), torch.tensor([1, 0])
        for op, has_pool in itertools.product(self.OPS, (False, True)):
            tensors, states = self.make(op, T=300, rows=2)
            buffers = self.buffers(states, 2)
            options = {"cu_seqlens": bounds, **({"slots": slots} if has_pool else {})}
            for name, buffer in buffers.items():
                wide = torch.zeros(2, 2, *buffer.shape[1:])
                for bad, every, text in (
                        (buffer, 0, f"snapshot_every = 0: must be a positive multiple of 128, because {name} is given"
                         if name == list(buffers)[0] else "snapshot_every = 0: must be"),
                        (buffer, 64, "snapshot_every = 64: must be a positive multiple of 128"),
                        (buffer, -128, "snapshot_every = -128: must be a positive multiple of 128"),
                        (buffer, 1.5, "snapshot_every = 1.5: must be an integer"),
                        (buffer[:1], 128, rf"{name} has shape \[1, .*\]: must be \[floor\(T/snapshot_every\),"),
                        (buffer[None], 128, rf"{name} has shape \[1, 2, .*\]: must be "),
                        (buffer, 256, rf"{name} has shape \[2, .*\]: must be .* = \[1, ") if
                        name == list(buffers)[0] else (buffer, 256, "has shape"),
                        (buffer[..., :1], 128, rf"{name} has shape \[2, .*, 1\]: must be "),
                        (buffer.double(), 128, f"{name} has dtype torch.float64: must be torch.float32"),
                        (buffer.int(), 128, f"{name} has dtype torch.int32: must be a floating-point dtype"),
                        (buffer.to("meta"), 128, f"{name} is on meta: must be on cpu"),
                        (wide[:, 1], 128, rf"{name} has strides .*: must be contiguous, because the call writes it"),
                        (torch._neg_view(buffer), 128, f"{name} is a negated view: must be a plain tensor")):
                    before = {key: value.clone() for key, value in {**states, **buffers}.items()}
                    with self.subTest(op=op, has_pool=has_pool, text=text), torch.no_grad(), \
                            self.assertRaisesRegex(ArgumentError, f"^gt_kernels.torch.{op}: .*{text}"):
                        self.call(op, tensors, **states, **{**buffers, name: bad}, **options, snapshot_every=every)
                    for key, value in {**states, **buffers}.items():
                        self.assertTrue(torch.equal(value, before[key]))
            with torch.no_grad(), self.assertRaisesRegex(
                    ArgumentError, f"^gt_kernels.torch.{op}: snapshot_every = 128: has no effect without snapshots"):
                self.call(op, tensors, **states, **options, snapshot_every=128)
            for name in (list(buffers)[0], list(tensors)[0]):
                given, kept = dict(tensors), dict(buffers)
                holder = given if name in given else kept
                holder[name] = holder[name].clone().requires_grad_()
                with self.assertRaisesRegex(UnsupportedError, f"^gt_kernels.torch.{op}: this call .* has no gradients"):
                    self.call(op, given, **states, **kept, **options, snapshot_every=128)
        tensors, states = self.make("conv_ssd", T=300, rows=2)
        for dtype, kept, slots in ((torch.float32, torch.float16, None), (torch.float16, torch.float32, slots)):
            states["conv_state"] = states["conv_state"].to(dtype)
            buffers = self.buffers(states, 2)
            buffers["conv_snapshots"] = buffers["conv_snapshots"].to(kept)
            with torch.no_grad(), self.assertRaisesRegex(ArgumentError, f"conv_snapshots has dtype {kept}: must be {dtype}"):
                self.call("conv_ssd", tensors, **states, cu_seqlens=bounds, slots=slots, **buffers, snapshot_every=128)


class Mixed(unittest.TestCase):
    """Calls of wkv_ssm that add the branches, and the steps of wkv_ssm.  Other classes compare numbers and bits."""

    def kept(self, tensors):
        """Returns which of (y of wkv6, y of ssd) a call keeps for backward.  Checks that it returns neither."""
        engine, kept = _engine.ENGINES["wkv_ssm_mixed"], []
        engine.plans.clear()
        engine.seen.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            results = gt.wkv_ssm(**tensors, mixed=True)
        self.assertIs(type(results), torch.Tensor)
        (key, plan), = engine.plans.items()
        fields = [field for field, *_ in plan.outputs]
        self.assertEqual([field for field, *_ in plan.scratch], [] if "ssd.y" in fields else ["ssd.y"])
        self.assertFalse(set(fields) - {"mixed", "wkv6.y", "ssd.y", "saved"})
        tails = {name: tuple(tensors[name].shape) for name in ("v", "x")}
        found = [t for t in kept if not any(t is value or t.data_ptr() == value.data_ptr() for value in
                                            tensors.values() if value is not None)]
        self.assertEqual(sorted(tuple(t.shape) for t in found if t.dtype != torch.uint8),
                         sorted(tails[{"wkv6.y": "v", "ssd.y": "x"}[field]] for field in fields if "y" in field))
        return tuple(field in fields for field in ("wkv6.y", "ssd.y"))

    def test_what_a_call_keeps(self):
        """y of a branch is kept only for the gradient of its gain."""
        for wanted in itertools.product((False, True), repeat=2):
            tensors = make("wkv_ssm_mixed")
            for name, is_wanted in zip(MIXED, wanted):
                tensors[name].requires_grad_(is_wanted)
            self.assertEqual(self.kept(tensors), wanted)
        with torch.no_grad():
            self.assertEqual(self.kept(make("wkv_ssm_mixed")), (False, False))
        self.assertEqual(self.kept(make("wkv_ssm_mixed", without=MIXED)), (False, False))
        tensors = {name: value.detach().requires_grad_(name == "gain_wkv") for name, value in
                   make("wkv_ssm_mixed").items()}
        self.assertEqual(self.kept(tensors), (True, False))
        for dtype, without, reads in ((torch.bfloat16, MIXED, True), (torch.bfloat16, (*MIXED, "z"), False),
                                      (torch.float32, MIXED, False)):
            with unittest.mock.patch.object(_engine, "_READS_Y", ("cpu",)):
                self.assertEqual(self.kept(make("wkv_ssm_mixed", dtype=dtype, without=without)), (False, reads))
        _engine.ENGINES["wkv_ssm_mixed"].plans.clear()
        _engine.ENGINES["wkv_ssm_mixed"].seen.clear()

    def test_gains_of_heads(self):
        for device, dtype in itertools.product(DEVICES, (torch.float32, torch.bfloat16)):
            tensors = make("wkv_ssm_mixed", device, dtype)
            heads = {**tensors, **{name: torch.randn(tensors[name].shape[0], device=device, requires_grad=True)
                                   for name in ("gain_wkv", "gain_ssm")}}
            channels = {name: heads[name].detach()[:, None].repeat(1, value.shape[1]).requires_grad_()
                        if "gain" in name else value for name, value in tensors.items()}
            y, state = call(gt, "wkv_ssm_mixed", heads)
            right, same = call(gt, "wkv_ssm_mixed", channels)
            self.assertTrue(torch.equal(y, right) and torch.equal(state, same))
            found, expected = gradients(heads, y, state), gradients(channels, right, same)
            for name in expected:
                wide = "gain" in name
                torch.testing.assert_close(found[name], expected[name].sum(1) if wide else expected[name],
                                           rtol=1e-6 if wide else 0, atol=1e-6 if wide else 0)

    def test_compiled_gradient_of_one_argument(self):
        """Compiled code decides at another place whether y is kept."""
        torch._dynamo.reset()
        tensors = {name: value.detach() for name, value in make("wkv_ssm_mixed", T=5).items()}
        for name in MIXED:
            def loss(value, name=name):
                return call(gt, "wkv_ssm_mixed", {**tensors, name: value})[0].square().sum()
            leaf = tensors[name].clone().requires_grad_()
            right, = torch.autograd.grad(loss(leaf), leaf)
            compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
            self.assertTrue(torch.equal(torch.autograd.grad(compiled(leaf), leaf)[0], right), name)

    def test_packed_without_tokens_of_a_sequence(self):
        """Rows outside of all sequences are 0, even with a residual."""
        tensors = make("wkv_ssm_mixed", B=1, rows=2)
        y = gt.wkv_ssm(**tensors, mixed=True, cu_seqlens=torch.tensor([0, 7, 12]))
        self.assertFalse(y[:, 12:].any())
        self.assertTrue(y[:, :12].all())

    # ---- steps ----

    def parts(self, device, dtype=torch.float32, rows=2, op="wkv_ssm_mixed", **sizes):
        """Returns (tensors without states, states)."""
        tensors = {name: value.detach() for name, value in make(op, device, dtype, rows=rows, **sizes).items()}
        return tensors, [tensors.pop(name) for name in ("wkv_state", "ssm_state")]

    def cut(self, tensors, first, end):
        return {name: value[:, first:end] if is_activation("wkv_ssm", name) else value
                for name, value in tensors.items()}

    def test_step_equals_forward(self):
        for device, dtype in itertools.product(DEVICES, (torch.float32, torch.bfloat16)):
            for op, more in (("wkv_ssm", {}), ("wkv_ssm_mixed", {"mixed": True})):
                tensors, states = self.parts(device, dtype, op=op)
                right = gt.wkv_ssm(**tensors, wkv_state=states[0], ssm_state=states[1], **more, final_state=True)
                found = [state.clone() for state in states]
                steps = []
                for first, end in ((0, 1), (1, 17), (17, 19)):
                    y = gt.wkv_ssm_step(**self.cut(tensors, first, end), wkv_state=found[0], ssm_state=found[1], **more)
                    steps.append(y if isinstance(y, tuple) else (y,))
                for got, expected in zip((*[torch.cat(y, 1) for y in zip(*steps)], *found), right):
                    error = (got.double() - expected.double()).norm() / expected.double().norm()
                    self.assertLess(error, TOLERANCE[dtype], op)

    def test_step_has_the_bits_of_two_steps(self):
        """Also with rows of pools, and with tokens that do not enter the states."""
        for device in DEVICES:
            integers = {name: torch.tensor(values, device=device) for name, values in
                        (("slots", [4, -1, 2]), ("tokens", [3, 2, 1]), ("commit", [1, 2, 0]))}
            for given in ({}, integers):
                tensors, states = self.parts(device, rows=6 if given else 3, B=3, T=3)
                plain = {name: value for name, value in tensors.items() if name not in MIXED}
                one, both, alone = ([state.clone() for state in states] for _ in range(3))
                more = {**given, "softplus": True, "scale": 0.5}
                wkv, ssm = gt.wkv_ssm_step(**plain, wkv_state=one[0], ssm_state=one[1], **more)
                y = gt.wkv_ssm_step(**tensors, wkv_state=both[0], ssm_state=both[1], mixed=True, **more)
                first = gt.wkv6_step(*[plain[n] for n in "rkvwu"], alone[0], scale=0.5, **given)
                second = gt.ssd_step(*[plain[n] for n in "x dt A Bm Cm Dskip z dt_bias".split()], alone[1],
                                     softplus=True, **given)
                self.assertTrue(torch.equal(wkv, first) and torch.equal(ssm, second))
                for i in range(2):
                    self.assertTrue(torch.equal(one[i], alone[i]) and torch.equal(both[i], alone[i]))
                    self.assertFalse(torch.equal(one[i], states[i]))
                right = tensors["residual"] + tensors["gain_wkv"] * wkv + (tensors["gain_ssm"] * ssm).reshape(wkv.shape)
                if given:
                    for b, count in enumerate((3, 0, 1)):
                        right[b, count:] = 0
                torch.testing.assert_close(y, right, rtol=1e-5, atol=1e-5)

    def test_compiled_step(self):
        for op, more in (("wkv_ssm", {}), ("wkv_ssm_mixed", {"mixed": True})):
            with torch.no_grad():
                torch._dynamo.reset()
                tensors, plain = self.parts("cpu", op=op, T=2)
                twice = [state.clone() for state in plain]
                versions = [state._version for state in plain]

                def step(tensors, states, more=more):
                    return gt.wkv_ssm_step(**tensors, wkv_state=states[0], ssm_state=states[1], **more)

                compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
                for _ in range(3):
                    right, found = step(tensors, plain), compiled(tensors, twice)
                    for a, b in [(right, found)] if more else zip(right, found):
                        self.assertTrue(torch.equal(a, b), op)
                for a, b, version in zip(plain, twice, versions):
                    self.assertTrue(torch.equal(a, b), op)
                    self.assertEqual(a._version, version + 3)

    # ---- errors ----

    def test_refusals(self):
        good, one = make("wkv_ssm_mixed"), torch.zeros(2, 19, 4, 6)
        for value in (2, None, "1", 0.5):
            with self.assertRaisesRegex(ArgumentError, f"^gt_kernels.torch.wkv_ssm: mixed = {value!r}: must be True or"):
                gt.wkv_ssm(**{**good, **dict.fromkeys(MIXED)}, mixed=value)
        for name in MIXED:
            given = {**good, **dict.fromkeys(MIXED), name: good[name]}
            with self.assertRaisesRegex(ArgumentError, f"^gt_kernels.torch.wkv_ssm: {name} is given, but mixed = False"):
                gt.wkv_ssm(**given)
        cases = (
            ({"gain_wkv": torch.zeros(4, 5)}, r"gain_wkv has shape \[4, 5\]: must be \[H,V\], where"),
            ({"gain_wkv": torch.zeros(5)}, r"gain_wkv has shape \[5\]: must be \[H,V\], where"),
            ({"gain_ssm": torch.zeros(4)}, r"gain_ssm has shape \[4\]: must be \[H,P\], where"),
            ({"gain_ssm": torch.zeros(8, 3, 1)}, r"gain_ssm has shape \[8, 3, 1\]: must be \[H,P\], where"),
            ({"gain_ssm": torch.zeros(8, 3).int()}, "gain_ssm has dtype torch.int32: must be a floating-point dtype"),
            ({"gain_wkv": 2.0}, "gain_wkv is a builtins.float: must be a torch.Tensor"),
            ({"gain_wkv": torch.zeros(4, 6, device="meta")}, "gain_wkv is on meta: must be on cpu"),
            ({"residual": one[:, :18]}, r"residual has shape \[2, 18, 4, 6\]: must be \[B,T,H,V\], where"),
            ({"residual": one.bfloat16()}, "residual has dtype torch.bfloat16: must be torch.float32"),
            ({"v": one[..., :5], "gain_wkv": None, "residual": None, "wkv_state": torch.zeros(2, 4, 8, 5)},
             "x has H = 8, P = 3, but v has H = 4, V = 5: H P must equal H V to mix the branches"))
        for change, text in cases:
            for function in (gt.wkv_ssm, gt.wkv_ssm_step):
                name = function.__name__
                with self.subTest(text=text, function=name), torch.no_grad(), \
                        self.assertRaisesRegex(ArgumentError, f"^gt_kernels.torch.{name}: {text}"):
                    function(**{**{n: None if v is None else v.detach() for n, v in good.items()}, **change}, mixed=True)

    def test_refusals_of_steps(self):
        tensors, states = self.parts("cpu", T=2)
        good = {**tensors, "wkv_state": states[0], "ssm_state": states[1]}
        before = [state.clone() for state in states]
        for name, state in (("wkv_state", states[0]), ("ssm_state", states[1])):
            wide = torch.zeros(2, 2, *state.shape[1:])[:, 0]
            for bad, text in ((None, f"{name} is None"), (state[:1], rf"{name} has shape \[1, .*\]: must be \[2,H,"),
                              (state.bfloat16(), f"{name} has dtype torch.bfloat16: must be torch.float32"),
                              (state[0], rf"{name} has shape \[[0-9, ]*\]: must be \[2,H,"),
                              (wide, f"{name} has strides .*: must be contiguous, because it is updated in place"),
                              (torch._neg_view(state), f"{name} is a negated view: must be a plain tensor")):
                for more in ({"mixed": True}, dict.fromkeys(MIXED)):
                    with self.subTest(text=text), torch.no_grad(), \
                            self.assertRaisesRegex(ArgumentError, f"^gt_kernels.torch.wkv_ssm_step: {text}"):
                        gt.wkv_ssm_step(**{**good, name: bad, **more})
        with torch.no_grad(), self.assertRaisesRegex(ArgumentError, "^gt_kernels.torch.wkv_ssm_step: T = 17"):
            gt.wkv_ssm_step(**{**self.parts("cpu", T=17)[0], "wkv_state": states[0], "ssm_state": states[1]}, mixed=True)
        with torch.no_grad(), self.assertRaisesRegex(ArgumentError, r"wkv_ssm_step: slots has shape \[3\]: must have 2"):
            gt.wkv_ssm_step(**good, mixed=True, slots=torch.zeros(3, dtype=torch.int32))
        with self.assertRaisesRegex(UnsupportedError, "^gt_kernels.torch.wkv_ssm_step: this call updates the state"):
            gt.wkv_ssm_step(**{**good, "gain_wkv": good["gain_wkv"].requires_grad_()}, mixed=True)
        for state, same in zip(states, before):
            self.assertTrue(torch.equal(state, same))


class Layouts(unittest.TestCase):
    def relaid(self, op, name, value, how):
        if value is None or value.dim() < 3 or name in STATES or name == "A":
            return value
        value = value.detach()
        if how == "BHTN":
            value = value.transpose(1, 2).contiguous().transpose(1, 2)
        elif how == "slice":
            wide = torch.full((*value.shape[:-1], value.shape[-1] + 8), 9.0, dtype=value.dtype, device=value.device)
            wide[..., 4:4 + value.shape[-1]] = value
            value = wide[..., 4:4 + value.shape[-1]]
        elif how == "expanded":
            value = value[:1].expand(value.shape)
        return value.requires_grad_()

    def test_legal_strides_are_not_copied(self):
        for device in DEVICES:
            for op in INPUTS:
                for how in ("BHTN", "slice") if op in RECURRENT else ("slice",):
                    with self.subTest(op=op, device=device, how=how), warnings.catch_warnings():
                        warnings.simplefilter("error")
                        gt.warn_on_copy(True)
                        self.addCleanup(gt.warn_on_copy, False)
                        tensors = make(op, device)
                        y, state = call(gt, op, tensors)
                        moved = {name: self.relaid(op, name, value, how) for name, value in tensors.items()}
                        moved_y, moved_state = call(gt, op, moved)
                        self.assertTrue(torch.equal(moved_y, y))
                        first = moved[next(iter(moved))]
                        if how == "BHTN" and op in STEPPED and op != "wkv6":
                            self.assertEqual(moved_y.stride(), first.stride())
                        expected, found = gradients(tensors, y, state), gradients(moved, moved_y, moved_state)
                        for name in expected:
                            error = (found[name] - expected[name]).norm() / expected[name].norm()
                            self.assertLess(error, 1e-5, name)

    def test_others_are_copied_with_one_warning(self):
        self.addCleanup(gt.warn_on_copy, False)
        for op in INPUTS:
            gt.warn_on_copy(True)
            tensors = make(op)
            moved = {name: self.relaid(op, name, value, "expanded") for name, value in tensors.items()}
            same = {name: value if value is None else value.detach().contiguous() for name, value in moved.items()}
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                y, _ = call(gt, op, moved)
                call(gt, op, moved)
            self.assertTrue(torch.equal(y, call(gt, op, same)[0]), op)
            wide = [n for n, v in moved.items() if v is not None and v.stride(0) == 0 and v.shape[0] > 1]
            self.assertEqual(len(caught), len(wide), op)
            self.assertIn("is copied", str(caught[0].message))

    def test_bm_and_cm_by_time(self):
        """B and C in mamba_ssm's layout [B,G,N,T] are read in place, and their gradients have the same layout."""
        for device in DEVICES:
            tensors = make("selective_scan", device)
            y, state = call(gt, "selective_scan", tensors)
            expected = gradients(tensors, y, state)
            moved = {n: v.detach().permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2).requires_grad_()
                     if n in ("Bm", "Cm") else v for n, v in tensors.items()}
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                gt.warn_on_copy(True)
                self.addCleanup(gt.warn_on_copy, False)
                moved_y, moved_state = call(gt, "selective_scan", moved)
                found = gradients(moved, moved_y, moved_state)
            torch.testing.assert_close(moved_y, y, rtol=1e-5, atol=1e-5)
            for name in expected:
                torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-4)
            self.assertEqual(found["Bm"].stride(), moved["Bm"].stride())

    def test_rows_in_no_one_order(self):
        """Norms of tensors [B,T,D] whose rows have no constant stride: inputs are copied, results are right."""
        for op, names in (("norm_gate", "xz"), ("norm_mix", "ab"), ("rmsnorm_linear", "x"),
                          ("add_norm", ("x", "residual"))):
            tensors = make(op)
            for order in ((1, 0, 2), (2, 0, 1)):
                back = tuple(sorted(range(3), key=order.__getitem__))
                moved = {n: v.detach().permute(order).contiguous().permute(back).requires_grad_() if n in names else v
                         for n, v in tensors.items()}
                y, moved_y = call(gt, op, tensors)[0], call(gt, op, moved)[0]
                self.assertTrue(torch.equal(moved_y, y), op)
                expected, found = gradients(tensors, y, None), gradients(moved, moved_y, None)
                for name in expected:
                    self.assertTrue(torch.equal(found[name], expected[name]), f"{op} d{name}")

    def test_transposed_last_index(self):
        tensors = make("wkv6")
        moved = {n: v if n in ("u", "state") else v.detach().transpose(2, 3).contiguous().transpose(2, 3)
                 for n, v in tensors.items()}
        self.assertTrue(torch.equal(call(gt, "wkv6", moved)[0], call(gt, "wkv6", tensors)[0]))


class Errors(unittest.TestCase):
    def test_texts(self):
        good = make("ssd")
        for change, kind, text in (
                ({"Bm": torch.zeros(2, 18, 2, 8)}, ArgumentError, r"ssd: Bm has shape \[2, 18, 2, 8\]: must be \[B,T,G,N\]"),
                ({"dt_bias": torch.zeros(5)}, ArgumentError, r"dt_bias has shape \[5\]"),
                ({"state": torch.zeros(3, 4, 6, 8)}, ArgumentError, "ssd: state has shape"),
                ({"Cm": torch.zeros(2, 19, 2, 8).bfloat16()}, ArgumentError, "Cm has dtype torch.bfloat16: must be torch.float32"),
                ({"x": torch.zeros(2, 19, 4, 6).double()}, ArgumentError, "x has dtype torch.float64"),
                ({"Bm": torch.zeros(2, 19, 3, 8), "Cm": torch.zeros(2, 19, 3, 8)}, ArgumentError, "G = 3")):
            with self.assertRaisesRegex(kind, text):
                call(gt, "ssd", {**good, **change})
        fused = make("conv_ssd")
        with self.assertRaisesRegex(ArgumentError, r"conv_ssd: xBC has 55 channels: must be H P \+ 2 G N"):
            call(gt, "conv_ssd", {**fused, "xBC": torch.zeros(2, 19, 55)})
        with self.assertRaisesRegex(ArgumentError, r"conv_ssd: z has shape \[2, 19, 4, 5\]"):
            call(gt, "conv_ssd", {**fused, "z": torch.zeros(2, 19, 4, 5)})
        with self.assertRaisesRegex(ArgumentError, r"wkv_ssm: Bm has shape \[2, 18, 2, 8\]: must be \[B,T,G,N\]"):
            call(gt, "wkv_ssm", {**make("wkv_ssm"), "Bm": torch.zeros(2, 18, 2, 8)})
        stream = make("add_norm")
        for change, text in (({"residual": torch.zeros(2, 18, 12)}, r"residual has shape \[2, 18, 12\]: must be \[...,D\]"),
                             ({"gamma": torch.zeros(11)}, r"gamma has shape \[11\]"),
                             ({"beta": torch.zeros(12, 1)}, r"beta has shape \[12, 1\]"),
                             ({"x": None}, "x is None"), ({"x": torch.zeros(12, 0)}, "residual has shape"),
                             ({"x": torch.zeros(2, 19, 12).double()}, "x has dtype torch.float64")):
            with self.assertRaisesRegex(ArgumentError, f"^gt_kernels.torch.add_norm: {text}"):
                call(gt, "add_norm", {**stream, **change})
        with self.assertRaisesRegex(ArgumentError, "^gt_kernels.torch.add_norm: D = 0: must be positive"):
            gt.add_norm(torch.zeros(3, 0))
        x, total = torch.zeros(3, 12, dtype=torch.bfloat16), torch.zeros(3, 12)
        with self.assertRaisesRegex(ArgumentError, "add_norm, backward: residual has dtype torch.bfloat16: must be "
                                                   "torch.float32"):
            torch.ops.gt_kernels.add_norm_backward(x, total, total, x, x, None, None, 0, 1e-5, 0, 1, 1)
        with self.assertRaisesRegex(ValueError, "decay = 'exp': must be 'raw' or 'log'"):
            call(gt, "wkv6", make("wkv6"), decay="exp")
        with self.assertRaisesRegex(ArgumentError, "gt_kernels.torch.conv1d: W = 5"):
            gt.conv1d(torch.zeros(1, 2, 3), torch.zeros(3, 5))
        with self.assertRaisesRegex(ArgumentError, "cu_seqlens"):
            call(gt, "wkv6", make("wkv6", B=1, rows=2), cu_seqlens=torch.tensor([0, 9, 5]))
        with self.assertRaisesRegex(ArgumentError, "seq_count is given without"):
            gt.conv1d(torch.zeros(1, 2, 3), torch.zeros(3, 4), seq_count=torch.tensor([1]))
        with self.assertRaisesRegex(ArgumentError, "segments"):
            call(gt, "wkv6", make("wkv6"), segments=-1)

    def test_devices(self):
        if "cuda" not in DEVICES:
            self.skipTest("no GPU")
        with self.assertRaisesRegex(ArgumentError, "weight is on cpu: must be on cuda:0"):
            gt.conv1d(torch.zeros(1, 2, 3, device="cuda"), torch.zeros(3, 4))

    def test_double_backward(self):
        for op in INPUTS:
            tensors = make(op)
            y, _ = call(gt, op, tensors)
            first = next(iter(tensors.values()))
            grad, = torch.autograd.grad(y.square().sum(), first, create_graph=True)
            with self.assertRaisesRegex(NotImplementedError, f"{PUBLIC[op]}: gradients of gradients"):
                grad.square().sum().backward()


class Other(torch.Tensor):
    pass


def shrunk(value):
    value = value.clone()
    value.untyped_storage().resize_(value.untyped_storage().nbytes() - 4)
    return value


class Kinds(unittest.TestCase):
    """Tensors of every kind give right numbers or an error, whether a call with plain tensors came before or comes
    after."""

    REFUSED = {
        "sparse": lambda v: v.to_sparse(), "mkldnn": lambda v: v.to_mkldnn(), "bool": lambda v: v > 0,
        "csr": lambda v: v.reshape(v.shape[0], -1).to_sparse_csr(), "shrunk": shrunk,
        "nested": lambda v: torch.nested.nested_tensor(list(v)), "complex": lambda v: torch.complex(v, v).conj(),
        "jagged": lambda v: torch.nested.nested_tensor(list(v), layout=torch.jagged), "list": lambda v: v.tolist(),
        "quantized": lambda v: torch.quantize_per_tensor(v, 0.1, 0, torch.qint8)}

    # Tensors with unusual memory: not packed, holding other numbers than the tensor's value, or shared between
    # elements.
    TAKEN = {
        "packed": lambda v: v.clone(), "one": lambda v: v.flatten()[:1].reshape((1,) * v.dim()).expand(v.shape),
        "rows": lambda v: v[:1].expand(v.shape), "subclass": lambda v: v.as_subclass(Other),
        "parameter": lambda v: torch.nn.Parameter(v.clone()), "backwards": lambda v: v.flip(0),
        "transposed": lambda v: v.mT.contiguous().mT if v.dim() > 1 else v,
        "slice": lambda v: torch.cat([v, v, v], -1)[..., 1:1 + v.shape[-1]],
        "negated": lambda v: torch.complex(v, -v).conj().imag, "conjugate": lambda v: torch.complex(v, v).conj().real,
        "zeros": lambda v: torch._efficientzerotensor(v.shape),
        "windows": lambda v: torch.randn(v.numel() + 7).abs().as_strided(v.shape, (1,) * v.dim(), 3)}

    def test_fuzz(self):
        """Makes calls with random kinds of random tensors.  Each must give right numbers or an error.  .ci/long makes
        more calls, under AddressSanitizer."""
        warnings.simplefilter("ignore")
        self.addCleanup(warnings.resetwarnings)
        random = torch.Generator().manual_seed(int(os.environ.get("GT_TEST_SEED", 0)))

        def pick(values):
            values = list(values)
            return values[torch.randint(len(values), (), generator=random)]

        for _ in range(int(os.environ.get("GT_TEST_CALLS", 100))):
            op = pick(INPUTS)
            tensors = {name: value.detach() for name, value in make(op, T=pick((1, 5)), B=pick((1, 2))).items()}
            names, others = list(tensors), dict(tensors)
            for name in {pick(names) for _ in range(pick((1, 1, 2, 4)))}:
                kind = pick((*self.TAKEN, *self.TAKEN, *self.REFUSED, "meta"))
                if kind in self.TAKEN:
                    tensors[name] = others[name] = self.TAKEN[kind](tensors[name])
                elif kind == "meta":
                    others[name] = tensors[name].to("meta")
                elif kind not in ("nested", "jagged") or tensors[name].dim() > 1:
                    others[name] = self.REFUSED[kind](tensors[name].clone())
            right = {name: value.as_subclass(torch.Tensor).resolve_neg().detach().clone(memory_format=torch.contiguous_format)
                     for name, value in tensors.items()}
            changed = [name for name in names if others[name] is not tensors[name]]
            with self.subTest(op=op, changed=changed, types=[type(value) for value in others.values()]):
                if changed:
                    with self.assertRaises(Error):
                        call(gt, op, others)
                    continue
                takes_gradients = pick((False, True)) and not any(value._is_zerotensor() for value in others.values())
                for values in (others, right):
                    for name in names:
                        values[name] = values[name].detach().requires_grad_(takes_gradients)
                y, state = call(gt, op, others)
                expected, expected_state = call(gt, op, right)
                self.assertTrue(torch.allclose(y.as_subclass(torch.Tensor), expected, 1e-5, 1e-5, equal_nan=True))
                if takes_gradients:
                    found, expected = gradients(others, y, state), gradients(right, expected, expected_state)
                    for name in names:
                        self.assertTrue(torch.allclose(found[name].as_subclass(torch.Tensor), expected[name], 1e-4, 1e-4,
                                                       equal_nan=True), name)
                if op in STEPPED:
                    self.fuzz_step(op, {name: value.detach() for name, value in others.items()},
                                   {name: value.detach() for name, value in right.items()})

    def fuzz_step(self, op, others, right):
        """A step writes a state in place, or refuses it."""
        step, names = getattr(gt, f"{op}_step"), INPUTS[op].split()
        with torch.no_grad():
            expected = step(*[right[name] for name in names])
            try:
                y = step(*[others[name] for name in names])
            except Error:
                state = others["state"]
                self.assertFalse(state.is_contiguous() and not state.is_neg() and not state._is_zerotensor())
                return
        self.assertTrue(torch.allclose(y.as_subclass(torch.Tensor), expected, 1e-5, 1e-5, equal_nan=True))
        self.assertTrue(torch.allclose(others["state"].as_subclass(torch.Tensor), right["state"], 1e-5, 1e-5,
                                       equal_nan=True))

    def test_others_are_refused(self):
        warnings.simplefilter("ignore")
        self.addCleanup(warnings.resetwarnings)
        for op in INPUTS:
            tensors = {name: value.detach() for name, value in make(op, T=5).items()}
            for before in (False, True):
                _engine.ENGINES[op].plans.clear()
                _engine.ENGINES[op].seen.clear()
                for name in tensors:
                    for kind, make_other in self.REFUSED.items():
                        if kind in ("nested", "jagged") and tensors[name].dim() < 2:
                            continue
                        with self.subTest(op=op, name=name, kind=kind, before=before):
                            other = {**tensors, name: make_other(tensors[name])}
                            if before:
                                call(gt, op, tensors)
                            with self.assertRaisesRegex(Error, f"^gt_kernels.torch.{PUBLIC[op]}: {name} "):
                                call(gt, op, other)

    def test_a_refused_tensor_leaves_no_plan(self):
        x, weight = torch.randn(2, 10, 6), torch.randn(6, 4)
        infer = torch.ops.gt_kernels.conv1d_infer
        for use in (gt.conv1d, lambda x, w: infer(x, w, None, None, None, None, 0, False)[0]):
            with self.assertRaises((Error, RuntimeError)):
                use(x.to_sparse(), weight)
            one = torch.ones(()).expand(2, 10, 6)
            self.assertTrue(torch.equal(use(one, weight), gt.conv1d(one.contiguous(), weight)))

    def test_meta(self):
        for op in INPUTS:
            tensors = make(op)
            y, state = call(gt, op, {name: value.detach().to("meta").requires_grad_() for name, value in tensors.items()})
            self.assertEqual(y.shape, call(gt, op, tensors)[0].shape)
            y.sum().backward()


class Numbers0(unittest.TestCase):
    """0 does not mean a default, and no number is converted silently."""

    def refused(self, text, function, *values, **options):
        with self.assertRaisesRegex(ArgumentError, text):
            function(*values, **options)

    def test_scalars(self):
        for option in ("sum_in_fp32", "reads_sum"):
            for value in (2, None, "1", 0.5):
                self.refused(f"^gt_kernels.torch.add_norm: {option} = ", call, gt, "add_norm", make("add_norm"),
                             **{option: value})
        self.refused("^gt_kernels.torch.add_norm: norm = 'batch'", call, gt, "add_norm", make("add_norm"), norm="batch")
        for op in ("rmsnorm_linear", "norm_mix", "norm_gate", "add_norm"):
            for eps in (0.0, 0, 1e-50, -1.0, float("nan"), float("inf"), None, "1"):
                self.refused(f"^gt_kernels.torch.{op}: eps = ", call, gt, op, make(op), eps=eps)
            for eps in (0.0, 1e39, float("nan")):  # the text neither allows 0 nor shows another value
                self.refused(f": eps = {re.escape(str(eps))}: must be positive and finite in float32$",
                             call, gt, op, make(op), eps=eps)
        for op in ("norm_mix", "norm_gate"):
            for heads in (0, -1, 2.0, 2 ** 64 + 1, 5):
                self.refused(f"^gt_kernels.torch.{op}: .*heads = ", call, gt, op, make(op), heads=heads)
        for op in ("wkv6", "wkv_ssm"):
            for scale in (0.0, 1e-50, -1, None, "1"):
                self.refused(f"^gt_kernels.torch.{op}: scale = ", call, gt, op, make(op), scale=scale)
            self.refused(r": scale = 1e\+10: must be 2\^-32 to 2\^32$", call, gt, op, make(op), scale=1e10)
        for op in ("ssd", "conv_ssd", "wkv_ssm"):
            for limit in (1.0, (1,), (None, 1), (float("nan"), 1)):
                self.refused(f"^gt_kernels.torch.{op}: dt_limit", call, gt, op, make(op), dt_limit=limit)
            zero = call(gt, op, make(op), dt_limit=(0, 0))[0]
            self.assertFalse(torch.equal(zero, call(gt, op, make(op))[0]))
            self.refused(f"^gt_kernels.torch.{op}: softplus = 0.5", call, gt, op, make(op), softplus=0.5)
            self.refused(f"^gt_kernels.torch.{op}: segments = ", call, gt, op, make(op), segments=2 ** 64)
            self.refused(f"^gt_kernels.torch.{op}: segments = ", call, gt, op, make(op), segments=1.0)
        x = make("conv_ssd")
        values = [x[name] for name in INPUTS["conv_ssd"].split()]
        for name in ("state_size", "groups"):
            for value in (0, 2.0):
                self.refused(f"conv_ssd: {name} = ", gt.conv_ssd, *values,
                             **{"state_size": 8, "groups": 2, name: value})

    def test_sizes(self):
        r = torch.zeros(1, 2, 3, 4)
        self.refused("wkv6: V = 0", gt.wkv6, r, r, r[..., :0], r)
        self.refused("ssd: G = 0", gt.ssd, r, r[..., 0], torch.zeros(3), r[:, :, :0], r[:, :, :0])

    def test_integers(self):
        tensors = {name: value.detach() for name, value in make("wkv6", B=1, rows=2).items()}
        for bad in (torch.tensor([0, 3.9, 19]), torch.tensor([False, True, True])):
            self.refused("^gt_kernels.torch.wkv6: cu_seqlens has dtype", call, gt, "wkv6", tensors, cu_seqlens=bad)
        self.refused(r"^gt_kernels.torch.wkv6: cu_seqlens", call, gt, "wkv6", tensors,
                     cu_seqlens=torch.tensor([0, 2 ** 32 + 7, 19]))
        self.refused(r"^gt_kernels.torch.wkv6: seq_count = 3: must be 0 to the sequences of cu_seqlens \(2\)$",
                     call, gt, "wkv6", tensors, cu_seqlens=torch.tensor([0, 7, 19]), seq_count=torch.tensor([3]))
        for op in STEPPED:
            x = {name: value.detach() for name, value in make(op, B=1, T=1).items()}
            values, pool = [x[name] for name in INPUTS[op].split()[:-1]], x["state"].clone()
            step = getattr(gt, f"{op}_step")
            for slot in (2 ** 32, -2 ** 32, 1):
                self.assertEqual(step(*values, pool, slots=torch.tensor([slot])).abs().max().item(), 0)
            self.assertTrue(torch.equal(pool, x["state"]))
            self.refused(f"{op}_step: slots has dtype", step, *values, pool, slots=torch.tensor([0.0]))
            self.refused(f"{op}_step: state has shape", step, *values, pool[:0], slots=torch.tensor([0]))

    def test_named(self):
        @named("my.function", Bm="B")
        def function(**options):
            return call(gt, "ssd", {**make("ssd"), **options})
        self.refused(r"^my.function: B has shape \[1\]", function, Bm=torch.zeros(1))


class PyTorch(unittest.TestCase):
    """Features of PyTorch that transform or record operators."""

    def test_opcheck(self):
        for op in INPUTS:
            tensors = {name: value.detach().requires_grad_() for name, value in make(op, T=5).items()}
            values = [tensors[name] for name in INPUTS[op].split()]
            options = {"wkv6": (0, 0.5, 0), "wkv4": (0, 0), "ssd": (1, 0, 0.0, 0.0, 0), "selective_scan": (1, 0), "conv1d": (1,),
                       "rmsnorm_linear": (0, 1e-5), "norm_mix": (3, 1e-5), "norm_gate": (0, 0, 2, 1e-5),
                       "add_norm": (0, 1e-5, 0, 1),
                       "conv_ssd": (8, 2, 1, 0, 0.0, 0.0, 0), "wkv_ssm": (0, 0.5, 1, 1, 0.2, 0.9, 0),
                       "wkv_ssm_mixed": (0, 0.5, 1, 1, 0.2, 0.9, 0)}[op]
            packed = (None, None) if op in RECURRENT else ()
            states = sum(name in STATES for name in tensors)
            engine, ops = _engine.ENGINES[op], torch.ops.gt_kernels
            wanted = (True,) * (len(engine.results) - engine.y_count)
            with self.subTest(op=op):
                torch.library.opcheck(getattr(ops, f"{op}_forward").default, (*values, *packed, *options, *wanted))
                torch.library.opcheck(getattr(ops, f"{op}_infer").default,
                                      ([v.detach() for v in values] + [*packed, *options] + [True] * states))
                outputs = getattr(ops, f"{op}_forward")(*(v.detach() for v in values), *packed, *options, *wanted)
                outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs
                names = engine.names["backward"]
                made = dict(zip(map(schema_name, engine.results), outputs))
                made.update(zip(names, outputs[:len(engine.operator.outputs)]))  # gradients of the outputs
                given = [made.get(name) for name in names[:len(names) - len(values) - len(packed)]]
                torch.library.opcheck(getattr(ops, f"{op}_backward").default,
                                      (*given, *(v.detach() for v in values), *packed, *options,
                                       2 ** len(engine.gradients) - 1),
                                      test_utils=("test_schema", "test_faketensor"))  # forward passed the others
                if "step" in engine.names:
                    plain = [v.detach() for v in values]
                    torch.library.opcheck(getattr(ops, f"{op}_step").default, (*plain, *no_arrays(op), *options))

    def test_opcheck_of_sequences(self):
        """opcheck of packed sequences, and of the operator that counts the sequences of seq_idx."""
        bounds = torch.tensor([0, 2, 5], dtype=torch.int32)
        for op in ("conv1d", "ssd"):
            values = [value.detach() for value in make(op, T=5, B=1, rows=2).values()]
            options = {"ssd": (1, 0, 0.0, 0.0, 0), "conv1d": (1,)}[op]
            torch.library.opcheck(getattr(torch.ops.gt_kernels, f"{op}_infer").default,
                                  (*values, bounds, bounds[1:2], *options, True))
        values = [value.detach() for value in make("conv_ssd", T=5, B=1, rows=2).values()]
        slots, zero = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
        torch.library.opcheck(torch.ops.gt_kernels.conv_ssd_pool.default,
                              (*values, bounds, None, slots, zero, None, None, 8, 2, 1, 0, 0.0, 0.0, 0, 0))
        import gt_kernels.compat  # noqa: F401 - it defines the operator
        torch.library.opcheck(torch.ops.gt_kernels.count_bounds.default, (torch.tensor([[True, False], [True, True]]),))

    def check_compiled(self, backend, device):
        for op in INPUTS:
            with self.subTest(op=op, device=device):
                torch._dynamo.reset()
                tensors = make(op, device)
                names = list(tensors)

                def block(*values, op=op, names=names):
                    y, state = call(gt, op, {name: value * 1.5 for name, value in zip(names, values)})
                    return y * 2, state

                compiled = torch.compile(block, fullgraph=True, backend=backend)
                y, state = block(*tensors.values())
                expected = gradients(tensors, y, state)
                compiled_y, compiled_state = compiled(*tensors.values())
                found = gradients(tensors, compiled_y, compiled_state)
                torch.testing.assert_close(compiled_y, y)
                for name in expected:
                    torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-4)
                with torch.no_grad():
                    torch.testing.assert_close(compiled(*tensors.values())[0], y)

    def test_compile_fullgraph(self):
        self.check_compiled("aot_eager", "cpu")

    def test_inductor_on_gpu(self):
        if "cuda" not in DEVICES:
            self.skipTest("no GPU")
        self.check_compiled("inductor", "cuda")

    def dynamic(self, op, tensors):
        """The indices of each tensor's batch and length dimensions."""
        B, T = shapes(op, B=3, T=11), shapes(op, B=5, T=11)
        first = [tuple(i for i, (a, b) in enumerate(zip(B[name], T[name])) if a != b) for name in tensors]
        return [{0: "B", 1: "T"} if at and name not in STATES and B[name][:2] == (3, 11) else {0: "B"} if at else {}
                for at, name in zip(first, tensors)]

    def test_export_with_dynamic_shapes(self):
        """One exported program runs with all batch sizes and lengths."""
        names = {name: torch.export.Dim(name, min=2, max=4096) for name in "BT"}
        for op in INPUTS:
            class Module(torch.nn.Module):
                def forward(self, *values, op=op):
                    return call(gt, op, dict(zip(INPUTS[op].split(), values)))

            with self.subTest(op=op), torch.no_grad():
                tensors = make(op, B=3, T=11)
                dims = tuple({at: names[dim] for at, dim in dims.items()} for dims in self.dynamic(op, tensors))
                program = torch.export.export(Module(), tuple(v.detach() for v in tensors.values()),
                                              dynamic_shapes=(dims,)).module()
                for B, T in ((2, 19), (5, 4)):
                    values = [value.detach() for value in make(op, B=B, T=T).values()]
                    for found, right in zip(program(*values), Module()(*values)):
                        self.assertTrue(right is None or torch.equal(found, right))

    def check_dynamic(self, op):
        """One graph and its gradients run with all batch sizes and lengths."""
        import torch._dynamo.testing
        torch._dynamo.reset()

        def block(*values):
            y, state = call(gt, op, dict(zip(INPUTS[op].split(), values)))
            return y * 2, state

        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(block, fullgraph=True, backend=counter)
        for B, T in ((3, 11), (2, 19), (5, 4)):
            tensors = make(op, B=B, T=T)
            for value, dims in zip(tensors.values(), self.dynamic(op, tensors)):
                for at in dims:
                    torch._dynamo.mark_dynamic(value, at)
            found, expected = (gradients(tensors, *function(*tensors.values())) for function in (compiled, block))
            for name in expected:
                self.assertTrue(torch.equal(found[name], expected[name]), name)
        self.assertEqual(counter.frame_count, 1)

    def test_compile_with_dynamic_shapes(self):
        for op in ("conv1d", "wkv_ssm_mixed"):
            self.check_dynamic(op)

    def test_compile_with_dynamic_shapes_and_saved(self):
        """Imitates a GPU: forward saves an array whose size only the C API knows."""
        def answer(question):
            if hasattr(question, "mixed"):  # the question tells that the call is a mixed one
                self.assertTrue(question.mixed and question.ssd.y)
            return c.gt_workspace(saved=question.T * 40)

        for op in ("selective_scan", "wkv_ssm_mixed"):
            need = unittest.mock.Mock(side_effect=answer)
            with unittest.mock.patch.object(_plan, "SAVES", ("cpu",)), \
                    unittest.mock.patch.object(_plan.Planner, "ask", need):
                _engine.ENGINES[op].plans.clear()
                self.check_dynamic(op)
            _engine.ENGINES[op].plans.clear()
            _engine.ENGINES[op].seen.clear()
            self.assertTrue(need.called)

    def test_compiled_step(self):
        arrays = {name: torch.tensor(values, dtype=torch.int32)
                  for name, values in (("slots", [2, -1, 0]), ("tokens", [2, 1, 2]), ("commit", [1, 1, 2]))}
        for op, given in zip(STEPPED, (arrays, {}, arrays, arrays, arrays)):
            with torch.no_grad():
                torch._dynamo.reset()
                tensors = make(op, B=3, T=2)
                values = [tensors[name].detach() for name in INPUTS[op].split()[:-1]]
                step = functools.partial(getattr(gt, f"{op}_step"), **given)
                compiled_step = torch.compile(lambda *a, step=step: step(*a) + 1, fullgraph=True, backend="aot_eager")
                plain, compiled = tensors["state"].detach().clone(), tensors["state"].detach().clone()
                for _ in range(3):
                    y = step(*values, plain) + 1
                    self.assertTrue(torch.equal(compiled_step(*values, compiled), y), op)
                self.assertTrue(torch.equal(plain, compiled), op)

    def test_who_looks_at_calls_sees_them(self):
        """Under modes, transforms and the profiler calls go through the dispatcher, with the same results."""
        from torch.overrides import TorchFunctionMode
        from torch.utils._python_dispatch import TorchDispatchMode
        seen = []

        class Dispatch(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                seen.append(str(function))
                return function(*args, **(kwargs or {}))

        class Function(TorchFunctionMode):
            def __torch_function__(self, function, types, args=(), kwargs=None):
                seen.append(str(function))
                return function(*args, **(kwargs or {}))

        class Other(torch.Tensor):
            @classmethod
            def __torch_function__(cls, function, types, args=(), kwargs=None):
                seen.append(str(function))
                return super().__torch_function__(function, types, args, kwargs or {})

        for op in INPUTS:
            tensors = make(op)
            y, state = call(gt, op, tensors)
            expected = gradients(tensors, y, state)
            for mode in (Dispatch, Function):
                for call_name in ("forward", "infer"):
                    seen.clear()
                    with mode(), torch.set_grad_enabled(call_name == "forward"):
                        again, same = call(gt, op, tensors)
                    self.assertTrue(any(f"gt_kernels.{op}_{call_name}" in text for text in seen), (op, mode, seen))
                    self.assertTrue(torch.equal(again, y), op)
            again, same = call(gt, op, tensors)
            seen.clear()
            with Dispatch():
                found = gradients(tensors, again, same)
            self.assertTrue(any(f"gt_kernels.{op}_backward" in text for text in seen), (op, seen))
            for name in expected:
                self.assertTrue(torch.equal(found[name], expected[name]), f"{op} d{name}")
            with torch.profiler.profile() as profile:
                call(gt, op, tensors)
            self.assertIn(f"gt_kernels::{op}_forward", [event.key for event in profile.key_averages()])
            first = next(iter(tensors))
            seen.clear()
            with torch.no_grad():
                again = call(gt, op, {**tensors, first: tensors[first].detach().as_subclass(Other)})[0]
            self.assertTrue(any(f"gt_kernels.{op}_infer" in text for text in seen), (op, seen))
            self.assertTrue(torch.equal(again.as_subclass(torch.Tensor), y), op)

    def test_tensors_whose_memory_is_not_their_value(self):
        value = torch.complex(torch.randn(2, 9, 12), torch.randn(2, 9, 12))
        negative = value.conj().imag
        self.assertTrue(negative.is_neg())
        weight = torch.randn(12, 4)
        self.assertTrue(torch.equal(gt.conv1d(negative, weight), gt.conv1d(negative.resolve_neg(), weight)))
        zeros = torch._efficientzerotensor((2, 9, 12))
        self.assertEqual(gt.conv1d(zeros, weight).abs().max().item(), 0)

    def test_forward_mode_is_refused(self):
        for op in INPUTS:
            tensors = {name: value.detach() for name, value in make(op, T=5).items()}
            for name, value in tensors.items():
                def function(v, op=op, tensors=tensors, name=name):
                    return call(gt, op, {**tensors, name: v})[0]

                def dual(v, function=function):
                    with torch.autograd.forward_ad.dual_level():
                        return function(torch.autograd.forward_ad.make_dual(v, v))

                for use in (dual, torch.func.jacfwd(function), lambda v: torch.func.jvp(function, (v,), (v,)),
                            lambda v: torch.func.linearize(function, v)):
                    with self.assertRaisesRegex(UnsupportedError, f"{PUBLIC[op]}: forward-mode"):
                        use(value)

    def test_other_transforms(self):
        """Each transform gives the same as plain calls and autograd, or raises an error."""
        for op in INPUTS:
            tensors = {name: value.detach() for name, value in make(op, T=5).items()}
            name, value = next(iter(tensors.items()))

            def function(v, op=op, tensors=tensors, name=name):
                return call(gt, op, {**tensors, name: v})[0]

            def loss(v, function=function):
                return function(v).float().pow(2).sum()

            def gradient(v, loss=loss):
                v = v.clone().requires_grad_()
                loss(v).backward()
                return v.grad

            def vjp(v, function=function):
                y, back = torch.func.vjp(function, v)
                return back(2 * y)[0]

            two = torch.stack([value, 2 * value])
            uses = {"vmap": (lambda: torch.func.vmap(function)(two), lambda: torch.stack([function(v) for v in two])),
                    "grad": (lambda: torch.func.grad(loss)(value), lambda: gradient(value)),
                    "vjp": (lambda: vjp(value), lambda: gradient(value)),
                    "jacrev": (lambda: torch.func.jacrev(loss)(value), lambda: gradient(value)),
                    "vmap of grad": (lambda: torch.func.vmap(torch.func.grad(loss))(two),
                                     lambda: torch.stack([gradient(v) for v in two])),
                    "functionalize": (lambda: torch.func.functionalize(function)(value), lambda: function(value))}
            for use, (found, expected) in uses.items():
                with self.subTest(op=op, use=use):
                    try:
                        result = found()
                    except RuntimeError:
                        continue
                    torch.testing.assert_close(result, expected())
            with self.subTest(op=op, use="hessian"), self.assertRaises(RuntimeError):
                torch.func.hessian(loss)(value)

    def test_steps_are_changes_to_autograd(self):
        for op in STEPPED:
            tensors = make(op, T=1)
            values = [value.detach() for value in tensors.values()][:-1]
            options = {"wkv6": (0, 1.0, 0), "ssd": (0, 0, 0.0, 0.0, 0), "selective_scan": (0, 0), "conv1d": (0,),
                       "wkv4": (0, 0)}[op]
            step = getattr(gt, f"{op}_step")
            for use in (step, torch.compile(step, backend="aot_eager"),
                        lambda *v: getattr(torch.ops.gt_kernels, f"{op}_step")(*v, *no_arrays(op), *options)):
                state = tensors["state"].detach().clone()
                y = call(gt, op, {**tensors, "state": state})[0]
                with torch.no_grad():
                    use(*values, state)
                with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
                    y.sum().backward()

    def test_hooks_of_saved_tensors(self):
        """Tensors that these hooks return may have another layout."""
        for op in INPUTS:
            tensors = make(op)
            wide = {n: torch.cat([v.detach(), v.detach()], -1)[..., :v.shape[-1]].requires_grad_()
                    if v.dim() > 2 and n not in STATES else v for n, v in tensors.items()}
            expected = gradients(tensors, *call(gt, op, tensors))
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone().contiguous(), lambda t: t.clone()):
                results = call(gt, op, wide)
            found = gradients(wide, *results)
            for name in expected:
                self.assertTrue(torch.equal(found[name], expected[name]), f"{op} d{name}")

    def test_autocast(self):
        for device in DEVICES:
            for op in INPUTS:
                tensors = make(op, device)
                with torch.autocast(device, torch.bfloat16):
                    y, state = call(gt, op, tensors)
                self.assertEqual(y.dtype, torch.bfloat16, op)
                for name, grad in gradients(tensors, y, state).items():
                    self.assertEqual(grad.dtype, torch.float32, f"{op} d{name}")

    def test_checkpointing(self):
        for reentrant in (False, True):
            for op in INPUTS:
                tensors = make(op)
                expected = gradients(tensors, *call(gt, op, tensors))

                def block(*values, op=op, names=tuple(tensors)):
                    return call(gt, op, dict(zip(names, values)))

                if reentrant:
                    y, state = torch.utils.checkpoint.checkpoint(block, *tensors.values(), use_reentrant=True)
                    leaves = [value for value in tensors.values()]
                    generator = torch.Generator().manual_seed(7)
                    loss = (y.double() * torch.randn(y.shape, generator=generator, dtype=torch.float64)).sum()
                    if state is not None:
                        loss = loss + (state.double() * torch.randn(state.shape, generator=generator,
                                                                    dtype=torch.float64)).sum()
                    loss.backward()
                    found = dict(zip(tensors, (leaf.grad for leaf in leaves)))
                else:
                    found = gradients(tensors, *torch.utils.checkpoint.checkpoint(block, *tensors.values(),
                                                                                  use_reentrant=False))
                for name in expected:
                    self.assertTrue(torch.equal(found[name], expected[name]), f"{op} d{name}")

    def test_distributed_data_parallel(self):
        import torch.distributed as dist

        class Mix(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.randn(12, 4))
                self.gamma = torch.nn.Parameter(torch.randn(12))

            def forward(self, x):
                return gt.norm_gate(gt.conv1d(x, self.weight, activation="silu"), None, self.gamma)

        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
            try:
                module = Mix()
                x = torch.randn(2, 9, 12)
                module(x).square().sum().backward()
                expected = [p.grad.clone() for p in module.parameters()]
                module.zero_grad()
                torch.nn.parallel.DistributedDataParallel(module)(x).square().sum().backward()
                for parameter, grad in zip(module.parameters(), expected):
                    self.assertTrue(torch.equal(parameter.grad, grad))
            finally:
                dist.destroy_process_group()

    def test_threads(self):
        from concurrent.futures import ThreadPoolExecutor
        cases = [(op, make(op, T=3 + i)) for i in range(6) for op in INPUTS]

        def run(case):
            op, tensors = case
            y, state = call(gt, op, tensors)
            return [y] + list(gradients(tensors, y, state).values())

        expected = [run(case) for case in cases]
        with ThreadPoolExecutor(8) as pool:
            for found, right in zip(pool.map(run, cases), expected):
                for a, b in zip(found, right):
                    self.assertTrue(torch.equal(a, b))

    def test_cuda_graph(self):
        if "cuda" not in DEVICES:
            self.skipTest("no GPU")
        for op in INPUTS:
            with self.subTest(op=op):
                tensors = make(op, "cuda")
                weights = torch.randn(call(gt, op, tensors)[0].shape, device="cuda")

                def step():
                    # New leaves, because a gradient goes to the stream on which its leaf was first used.
                    leaves = {name: value.detach().requires_grad_() for name, value in tensors.items()}
                    y = call(gt, op, leaves)[0]
                    return y.detach(), torch.autograd.grad((y * weights).sum(), list(leaves.values()), allow_unused=True)

                expected, right = step()
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    for _ in range(2):
                        step()
                torch.cuda.current_stream().wait_stream(side)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    captured, found = step()
                graph.replay()
                torch.cuda.synchronize()
                self.assertTrue(torch.equal(captured, expected))
                for a, b in zip(found, right):
                    self.assertTrue(torch.equal(a, b))

    def test_streams(self):
        if "cuda" not in DEVICES:
            self.skipTest("no GPU")
        tensors = make("wkv6", "cuda", T=300)
        expected = call(gt, "wkv6", tensors)[0]
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)  # a kernel on the default stream would not wait for it
            late = {name: value * 1 for name, value in tensors.items()}
            y = call(gt, "wkv6", late)[0]
        stream.synchronize()
        self.assertTrue(torch.equal(y, expected))


if __name__ == "__main__":
    unittest.main()
