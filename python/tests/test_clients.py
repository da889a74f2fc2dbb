"""Tests of the functions and modules that clients of mamba_ssm, causal-conv1d and flash-linear-attention import:
numbers against float64 formulas, and modules under these packages' names."""

import ast
import inspect
import itertools
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import unittest
import unittest.mock

try:
    import torch
except ImportError:
    raise unittest.SkipTest("no PyTorch") from None

import torch.nn.functional as F

import loops
import test_compat
import gt_kernels.torch as gt
from gt_kernels import compat, nn
from gt_kernels.compat import _native, vllm
from test_compat import DEVICES, exact, leaf


class Numbers(unittest.TestCase):
    same = test_compat.Compat.same
    ssd = test_compat.Compat.ssd

    def setUp(self):
        torch.manual_seed(3)

    def test_varlen_states(self):
        for device in DEVICES:
            bounds = torch.tensor([0, 4, 5, 12], dtype=torch.int32, device=device)
            seq_idx = torch.tensor([[0] * 4 + [1] + [2] * 7], dtype=torch.int32, device=device)
            tensors, twins = self.ssd(device, B=1)
            *tensors, state = tensors
            x, dt, A, B, C, D, z, bias = tensors
            twin_states = torch.cat([twins[8], torch.zeros_like(twins[8]).expand(2, -1, -1, -1)])
            y, states = loops.ssd(*twins[:8], state=twin_states, softplus=True, cu_seqlens=bounds.cpu())
            options = {"seq_idx": seq_idx, "cu_seqlens": bounds, "dt_softplus": True, "initial_states": state,
                       "return_varlen_states": True}
            both = compat.mamba_chunk_scan_combined(x, dt, A, B, C, 64, D, z, bias, **options)
            self.same([*tensors, state], both, twins, (y, states))
            three = compat.mamba_chunk_scan_combined(x, dt, A, B, C, 64, D, z, bias, return_final_states=True, **options)
            self.assertTrue(torch.equal(three[1], states.to(three[1])[-1:]) or
                            torch.allclose(three[1].double().cpu(), states[-1:], 1e-4, 1e-4))
            self.assertTrue(torch.equal(three[0], both[0]) and torch.equal(three[2], both[1]))

    def test_varlen_states_of_a_convolution(self):
        for device in DEVICES:
            x = torch.randn(12, 5, device=device)
            for bounds in ([0, 4, 4, 5, 12], [0, 12], [0, 0, 12]):
                for length in (1, 3, 20):
                    states = compat.causal_conv1d_varlen_states(x, torch.tensor(bounds, device=device), length)
                    for state, start, end in zip(states, bounds, bounds[1:]):
                        right = torch.cat([x.new_zeros(length, 5), x[start:end]])[-length:].T
                        self.assertTrue(torch.equal(state, right))

    def inner(self, B=2, D=6, T=9, N=4, R=3, O=5):
        tensors = {"xz": leaf(B, 2 * D, T), "conv1d_weight": leaf(D, 1, 4), "conv1d_bias": leaf(D),
                   "x_proj_weight": leaf(R + 2 * N, D), "delta_proj_weight": leaf(D, R), "out_proj_weight": leaf(O, D),
                   "out_proj_bias": leaf(O), "A": leaf(D, N), "D": leaf(D), "delta_bias": leaf(D), "B_proj_bias": leaf(N),
                   "C_proj_bias": leaf(N), "b_rms_weight": leaf(N), "c_rms_weight": leaf(N), "dt_rms_weight": leaf(D)}
        with torch.no_grad():
            tensors["A"].copy_(-tensors["A"].exp())
        return tensors

    @staticmethod
    def inner_loop(t, bounds=None):
        x, z = t["xz"].transpose(1, 2).chunk(2, -1)
        x = loops.conv1d(x, t["conv1d_weight"].squeeze(1), t["conv1d_bias"], activation="silu", cu_seqlens=bounds)[0]
        rank, N = t["delta_proj_weight"].shape[1], t["A"].shape[1]

        def norm(rows, gain):
            return rows if gain is None else rows * (rows.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gain

        delta, B, C = (x @ t["x_proj_weight"].T).split([rank, N, N], -1)
        B, C = (part if t[f"{name}_proj_bias"] is None else part + t[f"{name}_proj_bias"] for name, part in zip("BC", (B, C)))
        delta = norm(delta @ t["delta_proj_weight"].T, t["dt_rms_weight"])
        B, C = norm(B, t["b_rms_weight"]).unsqueeze(2), norm(C, t["c_rms_weight"]).unsqueeze(2)
        y = loops.selective_scan(x, delta, t["A"], B, C, t["D"], z, t["delta_bias"], softplus=True, cu_seqlens=bounds)[0]
        y = y @ t["out_proj_weight"].T
        return y if t["out_proj_bias"] is None else y + t["out_proj_bias"]

    def test_mamba_inner(self):
        optional = ("conv1d_bias", "out_proj_bias", "D", "delta_bias", "B_proj_bias", "C_proj_bias", "b_rms_weight",
                    "c_rms_weight", "dt_rms_weight")
        for without, bounds in (((), None), (optional, None), (optional[:6], torch.tensor([0, 2, 9])),
                                (optional[6:], torch.tensor([0, 4, 5, 9]))):
            with self.subTest(without=without, bounds=bounds):
                tensors = self.inner(B=1 if bounds is not None else 2)
                tensors.update(dict.fromkeys(without))
                twins = dict(zip(tensors, exact(tensors.values())))
                y = compat.mamba_inner_fn(**tensors, cu_seqlens=bounds)
                self.same(list(tensors.values()), [y], list(twins.values()), [self.inner_loop(twins, bounds)])

    def test_compiled_modules(self):
        """Calls the compiled modules as an autograd function of a client does."""
        B, D, T, N = 2, 6, 9, 4
        for gated in (False, True):
            tensors = [leaf(B, D, T), leaf(B, D, T), leaf(D, N), leaf(B, 1, N, T), leaf(B, 1, N, T), leaf(D),
                       leaf(B, D, T) if gated else None, leaf(D)]
            with torch.no_grad():
                tensors[2].copy_(-tensors[2].exp())
            y, state = compat.selective_scan_fn(*tensors, True, True)
            out, x, *rest = _native.scan_fwd(*tensors, True)
            self.assertTrue(torch.equal(x[:, :, -1, 1::2], state))
            self.assertTrue(torch.allclose(rest[0] if gated else out, y, 1e-5, 1e-5))
            dy, buffer = torch.randn_like(y), torch.zeros(B, 2 * D, T)
            dz = buffer[:, D:] if gated else None
            found = _native.scan_bwd(*tensors, dy, x, out, dz, True, gated)
            order = [tensors[i] for i in (0, 1, 2, 3, 4, 5, 7) + (6,) * gated]
            for a, b in zip(found, torch.autograd.grad(y, order, dy)):
                self.assertTrue(torch.equal(a, b))
            self.assertEqual(buffer[:, D:].any().item(), gated)
            self.assertTrue(not gated or torch.equal(found[8], y))
        x, weight, bias, states = leaf(B, D, T), leaf(D, 4), leaf(D), leaf(B, D, 3)
        y = compat.causal_conv1d_fn(x, weight, bias, initial_states=states, activation="silu")
        dy, dx = torch.randn_like(y), torch.empty_like(x)
        self.assertTrue(torch.equal(_native.conv_fwd(x, weight, bias, None, states, None, True), y))
        found = _native.conv_bwd(x, weight, bias, dy, None, states, None, dx, True, True)
        self.assertIs(found[0], dx)
        for a, b in zip(found, torch.autograd.grad(y, (x, weight, bias, states), dy)):
            self.assertTrue(torch.equal(a, b))

    def test_add_norm(self):
        def norm(x, weight, bias, is_rms):
            if not is_rms:
                x = x - x.mean(-1, keepdim=True)
            y = x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * weight
            return y if bias is None else y + bias

        for device in DEVICES:
            for without in ((), ("residual",), ("bias", "x1"), ("weight1", "bias1", "rowscale"),
                            ("x1", "weight1", "bias1"), ("x1", "weight1", "bias1", "rowscale", "residual")):
                for is_rms in (False, True):
                    tensors = {"x": leaf(3, 5, 12, device=device), "weight": leaf(12, device=device),
                               "bias": leaf(12, device=device), "residual": leaf(3, 5, 12, device=device),
                               "x1": leaf(3, 5, 12, device=device), "weight1": leaf(12, device=device),
                               "bias1": leaf(12, device=device), "rowscale": leaf(3, 5, device=device)}
                    tensors.update(dict.fromkeys(without))
                    t = dict(zip(tensors, exact(tensors.values())))
                    total = t["x"] if t["x1"] is None else t["x"] + t["x1"]
                    total = total if t["rowscale"] is None else total * t["rowscale"][..., None]
                    total = total if t["residual"] is None else total + t["residual"]
                    right = [norm(total, t["weight"], t["bias"], is_rms)]
                    right += [norm(total, t["weight1"], t["bias1"], is_rms)] if "weight1" not in without else []
                    function = compat.rms_norm_fn if is_rms else compat.layer_norm_fn
                    y = function(**tensors, eps=1e-3, prenorm=True)
                    self.same(list(tensors.values()), y, list(t.values()), [*right, total])
            x, residual = torch.randn(3, 12, device=device).bfloat16(), torch.randn(3, 12, device=device)
            weight = torch.rand(12, device=device)
            y, total = compat.rms_norm_fn(x, weight, None, residual, prenorm=True)
            self.assertTrue(torch.equal(total, x.float() + residual) and y.dtype == torch.bfloat16)
            for in_fp32, dtype in ((False, torch.bfloat16), (True, torch.float32)):
                y, total = compat.rms_norm_fn(x, weight, None, prenorm=True, residual_in_fp32=in_fp32)
                self.assertTrue(torch.equal(total, x.to(dtype)) and total.dtype == dtype)
            torch.manual_seed(0)
            y, total = compat.rms_norm_fn(x.float(), weight, None, dropout_p=0.5, prenorm=True)
            dropped = total == 0
            self.assertTrue(0 < dropped.sum() < total.numel())
            self.assertTrue(torch.equal(total[~dropped], 2 * x.float()[~dropped]))

    def test_add_norm_is_one_call(self):
        """A residual stream takes one call each way, whatever its dtype, and no sum of another."""
        dtypes = (torch.float32, torch.bfloat16, torch.float16)
        for device, is_rms in itertools.product(DEVICES, (False, True)):
            for x_dtype, dtype in (*itertools.product(dtypes, dtypes), (torch.bfloat16, torch.float64)):
                with self.subTest(device=device, is_rms=is_rms, x=x_dtype, residual=dtype):
                    x = torch.randn(3, 12, device=device).to(x_dtype).requires_grad_()
                    residual = torch.randn(3, 12, device=device).to(dtype).requires_grad_()
                    weight = torch.rand(12, device=device, requires_grad=True)
                    dy, dtotal = torch.randn(2, 3, 12, device=device)
                    function = compat.rms_norm_fn if is_rms else compat.layer_norm_fn
                    with unittest.mock.patch.object(gt, "norm_gate", side_effect=AssertionError), \
                            unittest.mock.patch.object(gt, "add_norm", wraps=gt.add_norm) as calls:
                        y, total = function(x, weight, None, residual, eps=1e-3, prenorm=True)
                        alone = function(x, weight, None, residual, eps=1e-3)
                    self.assertEqual(calls.call_count, 2)
                    self.assertTrue(torch.equal(alone, y))
                    self.assertEqual((y.dtype, total.dtype), (x_dtype, dtype))
                    self.assertTrue(torch.equal(total, (x.float() + residual.float()).to(dtype)))
                    wide = [value.detach().double().requires_grad_() for value in (x, residual, weight)]
                    exact = wide[0] + wide[1]
                    right = exact if is_rms else exact - exact.mean(-1, keepdim=True)
                    right = right * (right.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * wide[2]
                    limit = 2e-2 if torch.bfloat16 in (x_dtype, dtype) else 3e-3
                    self.assertLess(((y.double() - right).norm() / right.norm()).item(), limit)
                    found = torch.autograd.grad((y, total), (x, residual, weight), (dy.to(x_dtype), dtotal.to(dtype)))
                    for a, b in zip(found, torch.autograd.grad((right, exact), wide, (dy.double(), dtotal.double()))):
                        self.assertLess(((a.double() - b).norm() / b.norm()).item(), limit)

    def test_add_norm_under_autocast(self):
        """The sum is not rounded to autocast's dtype."""
        x, residual, weight = torch.randn(3, 12), torch.randn(3, 12), torch.rand(12)
        with torch.autocast("cpu", torch.bfloat16):
            y, total = compat.rms_norm_fn(x, weight, None, residual, prenorm=True)
            narrow, wide = compat.rms_norm_fn(x.bfloat16(), weight, None, residual, prenorm=True)
        self.assertTrue(y.dtype == torch.float32 and torch.equal(total, x + residual))
        self.assertTrue(narrow.dtype == torch.bfloat16 and torch.equal(wide, x.bfloat16().float() + residual))

    def test_norm_modules(self):
        x, z = torch.randn(3, 12), torch.randn(3, 12)
        self.assertTrue(torch.equal(nn.RMSNormGated(12, group_size=4)(x, z),
                                    compat.rmsnorm_fn(x, torch.ones(12), None, z, 1e-5, 4)))
        self.assertTrue(torch.equal(nn.LayerNormGated(12, norm_before_gate=False)(x, z),
                                    compat.layernorm_fn(x, torch.ones(12), torch.zeros(12), z, 1e-5, None, False)))
        self.assertTrue(torch.equal(nn.RMSNorm(12)(x, z), compat.rms_norm_fn(x, torch.ones(12), None, z, eps=1e-5)))
        self.assertEqual([list(module(12).state_dict()) for module in (nn.RMSNorm, nn.RMSNormGated, nn.LayerNormGated)],
                         [["weight"], ["weight"], ["weight", "bias"]])


class Types(unittest.TestCase):
    def test_stubs(self):
        """The type stub of each public function has the same arguments in the same order, with the same kinds and
        defaults."""
        for module in (gt, compat, vllm):
            with open(f"{module.__file__}i", encoding="utf-8") as file:
                stubs = [node for node in ast.parse(file.read()).body if isinstance(node, ast.FunctionDef)]
            self.assertEqual({stub.name for stub in stubs}, set(module.__all__))
            for stub in stubs:
                right = inspect.signature(getattr(module, stub.name)).parameters.values()
                given = stub.args
                plain, keyword = [arg.arg for arg in given.args], [arg.arg for arg in given.kwonlyargs]
                kinds = inspect.Parameter
                self.assertEqual(plain, [p.name for p in right if p.kind == kinds.POSITIONAL_OR_KEYWORD], stub.name)
                self.assertEqual(keyword, [p.name for p in right if p.kind == kinds.KEYWORD_ONLY], stub.name)
                defaults = [None] * (len(plain) - len(given.defaults)) + given.defaults + given.kw_defaults
                for name, default in zip(plain + keyword, defaults):
                    value = inspect.signature(getattr(module, stub.name)).parameters[name].default
                    if name not in ("final_state", "mixed") and (default is None or ast.unparse(default) != "..."):
                        found = kinds.empty if default is None else ast.literal_eval(default)
                        self.assertEqual(found, value, f"{stub.name}: {name}")

    def test_docstrings(self):
        """The docstring of each public function tells shapes.  Dtypes and errors are in the docstring of its module."""
        for module in (gt, compat, nn, vllm):
            for word in ("float32", "ArgumentError"):
                self.assertIn(word, module.__doc__)
            for name in module.__all__:
                text = inspect.getdoc(getattr(module, name))
                is_alike = re.search(r"\b[Aa]s \w+|\bby its name", text)
                self.assertTrue("[" in text or is_alike or name in ("install", "most_sequences", "warn_on_copy"), name)


CLIENT = """
import importlib.metadata, importlib.util, sys
assert importlib.util.find_spec("mamba_ssm") is not None and importlib.util.find_spec("causal_conv1d") is not None
assert tuple(map(int, importlib.metadata.version("mamba_ssm").split("."))) >= (2, 0, 4)
assert importlib.metadata.version("causal-conv1d") == importlib.metadata.version("causal_conv1d") >= "1.4.0"
import mamba_ssm, causal_conv1d, selective_scan_cuda, causal_conv1d_cuda
from mamba_ssm.ops.selective_scan_interface import mamba_inner_fn, selective_scan_fn
from mamba_ssm.ops.triton.selective_state_update import selective_state_update
from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined
from mamba_ssm.ops.triton.layernorm_gated import LayerNorm, RMSNorm, layernorm_fn, rmsnorm_fn
from mamba_ssm.ops.triton.layer_norm import RMSNorm, _layer_norm_fwd, layer_norm_fn, rms_norm_fn
from causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from causal_conv1d.causal_conv1d_interface import causal_conv1d_fn
from causal_conv1d.causal_conv1d_varlen import causal_conv1d_varlen_states
from gt_kernels import compat
assert causal_conv1d_fn is compat.causal_conv1d_fn and mamba_ssm.selective_scan_fn is compat.selective_scan_fn
assert callable(mamba_ssm.selective_state_update) and callable(selective_scan_cuda.fwd)
try:
    import mamba_ssm.ops.other
except ImportError:
    print(*sys.argv[1:], "client")
"""

FLA = """
class BaseBackend:
    backend_type, env_var, priority, implementation, verifier = "base", None, 5, None, None
    def is_enabled(self):
        import os
        return os.environ.get(self.env_var, "1") != "0"
functions = {}
def dispatch(function):
    def outer(*values, **options):
        backend = functions[function]
        if backend.is_enabled():
            return getattr(backend, function.__name__)(*values, **options)
        return function(*values, **options)
    functions[function] = None
    return outer
def register(function):
    def decorate(backend):
        functions[function] = backend()
    return decorate
"""


class Install(unittest.TestCase):
    def run_client(self, code, *command, files=(), **environment):
        """Runs a client and returns its output.  files: {path: text} of packages next to it."""
        with tempfile.TemporaryDirectory() as folder:
            for path, text in {"client.py": code, **dict(files)}.items():
                os.makedirs(os.path.dirname(os.path.join(folder, path)), exist_ok=True)
                with open(os.path.join(folder, path), "w", encoding="utf-8") as file:
                    file.write(textwrap.dedent(text))
            done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True,
                                  env={**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(compat.__path__[0])),
                                       **environment})
            self.assertEqual(done.returncode, 0, done.stderr)
            return done.stdout.strip()

    def test_programs(self):
        self.assertEqual(self.run_client(CLIENT, "-m", "gt_kernels.compat", "-m", "client", "--option", "1"),
                         "--option 1 client")

    def test_over(self):
        """An installed package stays, except with install(over=True)."""
        other = {"mamba_ssm/__init__.py": "__version__ = '9'"}
        code = """
            import mamba_ssm
            from gt_kernels import compat
            print(compat.install())
            import mamba_ssm
            print(mamba_ssm.__version__)
            print(compat.install(over=True))
            import mamba_ssm
            print(mamba_ssm.__version__, compat.install())
            """
        self.assertEqual(self.run_client(code, "client.py", files=other).splitlines(),
                         ["['causal_conv1d']", "9", "['causal_conv1d', 'mamba_ssm']",
                          "2.3.2 ['causal_conv1d', 'mamba_ssm']"])
        code = """
            import mamba_ssm
            print(mamba_ssm.__version__)
            """
        self.assertEqual(self.run_client(code, "-m", "gt_kernels.compat", "--over", "client.py", files=other), "2.3.2")

    def test_fla(self):
        """The registry of fla chooses the backend, whether fla is imported before or after install().  A module that
        has already imported a function gets the new one, too."""
        own = "".join(f"def {name}(r, k, v, w, u): return 'own'\n" for name in ("chunk_rwkv6", "fused_recurrent_rwkv6"))
        files = {"fla/__init__.py": "", "fla/backends.py": FLA, "fla/ops/__init__.py": "", "fla/ops/rwkv6/__init__.py": own,
                 "fla/layer.py": "from fla.ops.rwkv6 import chunk_rwkv6, fused_recurrent_rwkv6 as other"}
        code = """
            import sys, torch
            import {first}
            from gt_kernels import compat
            compat.install()
            compat.install()
            import fla.layer
            x, u = torch.randn(4, 1, 5, 2, 8), torch.randn(2, 8)
            for function, right in ((fla.layer.chunk_rwkv6, compat.chunk_rwkv6),
                                    (fla.layer.other, compat.fused_recurrent_rwkv6)):
                y = function(*x, u)
                print(y if y == "own" else torch.equal(y[0], right(*x, u)[0]))
            """
        self.assertEqual(self.run_client(code.format(first="fla.layer"), "client.py", files=files), "True\nTrue")
        code = code.format(first="os") + """
            os.environ["FLA_GT_KERNELS"] = "0"
            print(fla.layer.chunk_rwkv6(*x, u))
            """
        self.assertEqual(self.run_client(code, "client.py", files=files), "True\nTrue\nown")


if __name__ == "__main__":
    unittest.main()
