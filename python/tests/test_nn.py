"""Tests of gt_kernels.nn in float32 against plain float64 formulas: training, prefill, single tokens, packed sequences,
and state dicts of the original packages."""

import os
import sys
import unittest

try:
    import torch
except ImportError:
    raise unittest.SkipTest("no PyTorch") from None

import torch.nn.functional as F

import loops
from gt_kernels import UnsupportedError, nn

DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
C = 16


def norm_gate(x, z, weight, heads=1, first=True, norm="rms", bias=None, eps=1e-5):
    return loops.norm_gate(x, z, weight, bias, norm=norm, gate_first=first, heads=heads, eps=eps)


def mamba2(p, x, block):
    H, P, G, N = block.nheads, block.headdim, block.ngroups, block.d_state
    inner, mlp = H * P, block.d_mlp
    first, second, z, xBC, dt = F.linear(x, p["in_proj.weight"], p.get("in_proj.bias")).split(
        [mlp, mlp, inner, inner + 2 * G * N, H], -1)
    xBC = loops.conv1d(xBC, p["conv1d.weight"][:, 0], p.get("conv1d.bias"), activation="silu")[0]
    u, B, Cm = xBC.split([inner, G * N, G * N], -1)
    D = p["D"] if len(p["D"]) == H else p["D"].unflatten(0, (H, P))
    y = loops.ssd(u.unflatten(2, (H, P)), dt, -p["A_log"].exp(), B.unflatten(2, (G, N)), Cm.unflatten(2, (G, N)), D, None,
                  p["dt_bias"], softplus=True, dt_limit=block.dt_limit)[0].flatten(2)
    y = y * F.silu(z) if block.norm is None else \
        norm_gate(y, z, p["norm.weight"], G, not block.norm.norm_before_gate)
    y = torch.cat([F.silu(first) * second, y], -1)
    return F.linear(y, p["out_proj.weight"], p.get("out_proj.bias"))


def mamba(p, x, block):
    u, z = F.linear(x, p["in_proj.weight"]).chunk(2, -1)
    u = loops.conv1d(u, p["conv1d.weight"][:, 0], p["conv1d.bias"], activation="silu")[0]
    dt, B, Cm = F.linear(u, p["x_proj.weight"]).split([block.dt_rank, block.d_state, block.d_state], -1)
    y = loops.selective_scan(u, dt @ p["dt_proj.weight"].T, -p["A_log"].exp(), B[:, :, None], Cm[:, :, None], p["D"], z,
                             p["dt_proj.bias"], softplus=True)[0]
    return y @ p["out_proj.weight"].T


def time_mix(p, x, block):
    step = F.pad(x, (0, 0, 1, 0))[:, :-1] - x
    low = torch.tanh((x + step * p["time_maa_x"]) @ p["time_maa_w1"]).chunk(5, -1)
    w, k, v, r, g = (x + step * (p[f"time_maa_{name}"] + low[i] @ p["time_maa_w2"][i]) for i, name in enumerate("wkvrg"))
    w = p["time_decay"] + torch.tanh(w @ p["time_decay_w1"]) @ p["time_decay_w2"]
    heads = [t.unflatten(-1, (block.heads, -1)) for t in (r @ p["receptance.weight"].T, k @ p["key.weight"].T,
                                                          v @ p["value.weight"].T, w)]
    y = loops.wkv6(*heads, p["time_faaaa"])[0].flatten(2)
    y = norm_gate(y, g @ p["gate.weight"].T, p["ln_x.weight"], block.heads, False, "layer", p["ln_x.bias"], block.ln_x.eps)
    return y @ p["output.weight"].T


def hybrid(p, x, block):
    def part(name):
        return {key[len(name) + 1:]: value for key, value in p.items() if key.startswith(f"{name}.")}

    n = norm_gate(x, None, p["norm"])
    a, b = time_mix(part("rwkv"), n, block.rwkv), mamba2(part("mamba"), n, block.mamba)
    x = x + norm_gate(a, None, p["mix.gain_rwkv"]) + norm_gate(b, None, p["mix.gain_mamba"])
    up = F.gelu(norm_gate(x, None, p["ffn.norm"]) @ p["ffn.up"].T, approximate="tanh")
    return x + up @ p["ffn.down"].T


BLOCKS = {
    "Mamba2": (mamba2, lambda: nn.Mamba2(C, d_state=8, headdim=4, ngroups=2)),
    "Mamba2, all": (mamba2, lambda: nn.Mamba2(C, d_state=8, headdim=4, d_ssm=24, D_has_hdim=True, norm_before_gate=True,
                                              dt_limit=(0.01, 0.5), bias=True)),
    "Mamba2, no norm": (mamba2, lambda: nn.Mamba2(C, d_state=8, headdim=8, rmsnorm=False, conv_bias=False)),
    "Mamba": (mamba, lambda: nn.Mamba(C, d_state=8)),
    "RWKV6TimeMix": (time_mix, lambda: nn.RWKV6TimeMix(C, 2, mix_rank=4, decay_rank=5)),
    "RWKV6TimeMix, V": (time_mix, lambda: nn.RWKV6TimeMix(C, 2, 8, 12, mix_rank=4, decay_rank=5, eps=1e-3)),
    "HybridBlock": (hybrid, lambda: nn.HybridBlock(C, 2, 4, d_state=8, mix_rank=4, decay_rank=5)),
}


def spread(block):
    """Sets parameters to numbers without zeros and symmetries."""
    with torch.no_grad():
        for name, value in block.named_parameters():
            if value.dim() == 1 or "time_" in name or "mix." in name:
                value.add_(torch.randn_like(value) * 0.3)
    return block


def clone(cache):
    return {name: clone(value) if isinstance(value, dict) else value.clone() for name, value in cache.items()}


class Norms(unittest.TestCase):
    def test_stream(self):
        """Layers that norm a residual stream in float32 and add to it, in bfloat16, with gradients."""
        torch.manual_seed(9)
        for device in DEVICES:
            norms = [spread(nn.RMSNorm(C, device=device)) for _ in range(3)]
            x = torch.randn(2, 5, C, device=device, dtype=torch.bfloat16, requires_grad=True)
            hidden, residual = x, None
            for norm in norms:
                hidden, residual = norm(hidden, residual, prenorm=True, residual_in_fp32=True)
                self.assertEqual((hidden.dtype, residual.dtype), (torch.bfloat16, torch.float32))
                hidden = torch.tanh(hidden)
            last = norms[0](hidden, residual)
            exact = [x.detach().double().requires_grad_(),
                     *(norm.weight.detach().double().requires_grad_() for norm in norms)]
            total = exact[0]
            for weight in exact[1:]:
                total = total + torch.tanh(loops.norm_gate(total, None, weight, None))
            right = loops.norm_gate(total, None, exact[1], None)
            self.assertLess(((last.double() - right).norm() / right.norm()).item(), 2e-2)
            found = torch.autograd.grad(last.square().sum(), [x, *(norm.weight for norm in norms)])
            for a, b in zip(found, torch.autograd.grad(right.square().sum(), exact)):
                self.assertLess(((a.double() - b).norm() / b.norm()).item(), 3e-2)


class Modules(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(9)

    def close(self, found, right, what=""):
        self.assertLess(((found.double().cpu() - right.double().cpu()).norm() / right.norm().clamp_min(1e-9)).item(), 1e-4,
                        what)

    def each(self):
        for device in DEVICES:
            for name, (formula, make) in BLOCKS.items():
                with self.subTest(name, device=device):
                    yield formula, spread(make()).to(device), torch.randn(2, 25, C, device=device)

    def test_training(self):
        for formula, block, x in self.each():
            x.requires_grad_()
            p = {name: value.detach().double().cpu().requires_grad_() for name, value in block.named_parameters()}
            exact = x.detach().double().cpu().requires_grad_()
            y, right = block(x), formula(p, exact, block)
            self.close(y.detach(), right.detach())
            weights = torch.randn(right.shape, dtype=torch.float64)
            (y.double().cpu() * weights).sum().backward()
            (right * weights).sum().backward()
            self.close(x.grad, exact.grad, "x")
            for name, value in block.named_parameters():
                self.close(value.grad, p[name].grad, name)

    def test_prefill_and_single_tokens(self):
        for _, block, x in self.each():
            with torch.no_grad():
                right = block(x)
                for lengths in ((20, 1, 1, 3), (1, 17, 7), (25,), (2,) * 12 + (1,)):
                    cache = block.new_cache(2)
                    y = torch.cat([block(part, cache) for part in x.split(lengths, 1)], 1)
                    self.close(y, right, lengths)

    def test_packed_sequences(self):
        for _, block, x in self.each():
            bounds, x = torch.tensor([0, 6, 6, 7, 25], device=x.device), x[:1]
            with torch.no_grad():
                cache = block.new_cache(4)
                y = block(x, cache, bounds)
                self.close(block(x, cu_seqlens=bounds), y)
                next_y = block(x[:, :1].expand(4, -1, -1), cache)
                again = block(x, clone(cache), bounds)
                for s, (start, end) in enumerate(zip(bounds.tolist(), bounds.tolist()[1:])):
                    alone = block.new_cache(1)
                    if end > start:
                        self.close(y[:, start:end], block(x[:, start:end], alone))
                    self.close(next_y[s:s + 1], block(x[:, :1], alone))
                    if end > start:
                        self.close(again[:, start:end], block(x[:, start:end], alone))

    def test_gradients_of_packed_sequences(self):
        for _, block, x in self.each():
            bounds, x = torch.tensor([0, 6, 25], device=x.device), x[:1].clone().requires_grad_()
            y = block(x, cu_seqlens=bounds)
            found = torch.autograd.grad(y.square().sum(), [x, *block.parameters()])
            loss = sum(block(part).square().sum() for part in (x[:, :6], x[:, 6:]))
            for a, b in zip(found, torch.autograd.grad(loss, [x, *block.parameters()])):
                self.close(a, b)

    def test_no_gradients_of_single_tokens(self):
        for _, block, x in self.each():
            cache = block.new_cache(2)
            before = clone(cache)
            with self.assertRaises(UnsupportedError):
                block(x[:, :1], cache)
            for name, value in before.items():
                self.assertTrue(isinstance(value, dict) or torch.equal(value, cache[name]))

    def test_bad_sizes(self):
        for make in (lambda: nn.Mamba2(C, headdim=5), lambda: nn.Mamba2(C, headdim=4, ngroups=3),
                     lambda: nn.RWKV6TimeMix(C, 3), lambda: nn.HybridBlock(C, 2, 3)):
            with self.assertRaisesRegex(ValueError, r"^gt_kernels.nn.\w+: \w+ = "):
                make()

    def test_names_of_the_originals(self):
        self.assertEqual(set(dict(nn.Mamba2(C, headdim=4).named_parameters())),
                         {"dt_bias", "A_log", "D", "in_proj.weight", "conv1d.weight", "conv1d.bias", "norm.weight",
                          "out_proj.weight"})
        self.assertEqual({name: tuple(p.shape) for name, p in nn.Mamba(C).named_parameters()},
                         {"A_log": (32, 16), "D": (32,), "in_proj.weight": (64, 16), "conv1d.weight": (32, 1, 4),
                          "conv1d.bias": (32,), "x_proj.weight": (33, 32), "dt_proj.weight": (32, 1), "dt_proj.bias": (32,),
                          "out_proj.weight": (16, 32)})

    def test_state_dict_of_fla(self):
        """A state dict with the names and layouts of RWKV6Attention gives the results of that module's formulas."""
        block = spread(nn.RWKV6TimeMix(C, 2, 8, 12, mix_rank=4, decay_rank=5))
        theirs = block.fla_state_dict()
        p = {name: value.double() for name, value in theirs.items()}
        x = torch.randn(2, 9, C, dtype=torch.float64)
        delta = F.pad(x, (0, 0, 1, 0))[:, :-1] - x
        low = torch.tanh((x + delta * p["x_proj.0.mu"]) @ p["x_proj.0.linear.weight"].T).unflatten(-1, (5, 4))
        mixes = torch.einsum("btnr,hnr->btnh", low, p["x_proj.2.weight"].view(C, 5, 4)) + p["x_bias"]
        r, w, k, v, g = (x + delta * mix for mix in mixes.unbind(-2))
        w = torch.tanh(w @ p["w_proj.linear.lora.0.weight"].T) @ p["w_proj.linear.lora.2.weight"].T
        w = w + p["w_proj.linear.lora.2.bias"]
        r, k, v, g = (t @ p[f"{name}_proj.linear.weight"].T for name, t in zip("rkvg", (r, k, v, g)))
        y = loops.wkv6(*(t.unflatten(-1, (2, -1)) for t in (r, k, v, -w.exp())), p["bonus"], decay="log")[0].flatten(2)
        y = norm_gate(y, g, p["g_norm.weight"], 2, False, "layer", p["g_norm.bias"], 64e-5) @ p["o_proj.weight"].T
        self.close(block(x.float()).detach(), y)
        other = nn.RWKV6TimeMix(C, 2, 8, 12, mix_rank=4, decay_rank=5)
        other.load_state_dict(theirs)
        self.assertTrue(all(torch.equal(a, b) for a, b in zip(other.parameters(), block.parameters())))

    def test_state_dict_of_the_trainer(self):
        examples = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "examples")
        if not os.path.exists(examples):
            self.skipTest("not beside the source tree")
        sys.path.insert(0, examples)
        self.addCleanup(sys.path.remove, examples)
        import hybrid as example
        import gt_kernels.torch as gt
        original = spread(example.Block(gt, 64, 4, 2))
        block = nn.HybridBlock(64, 4, 2)
        block.load_state_dict(original.state_dict())
        x = torch.randn(2, 9, 64)
        self.close(block(x).detach(), original(x).detach())
        saved = block.trainer_state_dict()
        self.assertEqual(set(saved), set(original.state_dict()))
        for name, value in original.state_dict().items():
            self.assertTrue(torch.equal(saved[name], value), name)


class Example(unittest.TestCase):
    def test_generates(self):
        """Generates the tokens of a plain float64 model from a checkpoint in the layout of transformers' Mamba-2."""
        import json
        import tempfile
        from safetensors.torch import save_file
        examples = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "examples")
        if not os.path.exists(examples):
            self.skipTest("not beside the source tree")
        sys.path.insert(0, examples)
        self.addCleanup(sys.path.remove, examples)
        import mamba2 as example
        torch.manual_seed(2)
        config = {"vocab_size": 50, "hidden_size": C, "num_hidden_layers": 2, "state_size": 8, "conv_kernel": 4, "expand": 2,
                  "head_dim": 8, "num_heads": 4, "n_groups": 1, "use_bias": False, "use_conv_bias": True,
                  "layer_norm_epsilon": 1e-5, "time_step_limit": [0.0, float("inf")], "tie_word_embeddings": False}
        mixers = [spread(nn.Mamba2(C, d_state=8, headdim=8)) for _ in range(2)]
        weights = {"backbone.embeddings.weight": torch.randn(50, C), "backbone.norm_f.weight": torch.rand(C) + 0.5,
                   "lm_head.weight": torch.randn(50, C)}
        for i, mixer in enumerate(mixers):
            weights[f"backbone.layers.{i}.norm.weight"] = torch.rand(C) + 0.5
            weights.update({f"backbone.layers.{i}.mixer.{name}": value for name, value in mixer.state_dict().items()})
        p = {name: value.double() for name, value in weights.items()}

        def logits(tokens):
            x = p["backbone.embeddings.weight"][tokens]
            for i, mixer in enumerate(mixers):
                own = {name: p[f"backbone.layers.{i}.mixer.{name}"] for name in mixer.state_dict()}
                x = x + mamba2(own, norm_gate(x, None, p[f"backbone.layers.{i}.norm.weight"]), mixer)
            return norm_gate(x, None, p["backbone.norm_f.weight"]) @ p["lm_head.weight"].T

        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
                json.dump(config, file)
            save_file({name: value.contiguous() for name, value in weights.items()},
                      os.path.join(folder, "model.safetensors"))
            model = example.load(folder)
        prompt = torch.randint(50, (2, 21))
        found, right = example.generate(model, prompt, 8), prompt
        for _ in range(8):
            right = torch.cat([right, logits(right)[:, -1:].argmax(-1)], 1)
        self.assertTrue(torch.equal(found, right))


if __name__ == "__main__":
    unittest.main()
