"""A language model of RWKV-6 + Mamba-2 blocks on gt_kernels.torch, the one that hybrid_train trains.

    python hybrid.py                          trains on the text that ships, prints the held-out loss
    python hybrid.py --plain                  the same model in plain PyTorch operations
    python hybrid.py --load book.st --data book.txt    the held-out loss of a model file of hybrid_train
    python hybrid.py --bench                  times a training step

The names of the parameters are those of hybrid_train's model files (docs/training.md).
"""

import argparse
import os
import time

import torch
import torch.nn.functional as F
from torch import nn

RANK, DECAY_RANK, STATE, WIDTH = 32, 64, 64, 4  # low-rank pairs, Mamba-2's state, its convolution


def matrix(rows, columns, gain=0.5):
    return nn.Parameter(torch.randn(rows, columns) * gain / columns ** 0.5)


def vector(size, value):
    return nn.Parameter(torch.full((size,), float(value)))


# ---- the block ----


class TimeMix(nn.Module):
    """RWKV-6: token shift with data-dependent weights, wkv6, and a norm with a gate per head."""

    def __init__(self, ops, C, heads):
        super().__init__()
        self.ops, self.heads, ramp = ops, heads, torch.arange(C) / C
        for name in "xwkvrg":
            setattr(self, f"mu_{name}", nn.Parameter(1 - ramp))
        for name in "wkvrg":
            setattr(self, f"mix_down_{name}", matrix(RANK, C, 0))
            setattr(self, f"mix_up_{name}", matrix(C, RANK, 0.03))
        for name in ("receptance", "key", "value", "gate", "out"):
            setattr(self, name, matrix(C, C))
        self.decay_base = nn.Parameter(-6 + 5 * ramp)
        self.decay_down, self.decay_up = matrix(DECAY_RANK, C, 0), matrix(C, DECAY_RANK, 0.05)
        self.bonus = nn.Parameter(torch.rand(heads, C // heads))
        self.head_gamma, self.head_beta = vector(C, 1), vector(C, 0)

    def mix(self, name, n, before, x):
        low = torch.tanh(F.linear(x, getattr(self, f"mix_down_{name}")))
        return n + before * (getattr(self, f"mu_{name}") + F.linear(low, getattr(self, f"mix_up_{name}")))

    def forward(self, n):
        before = F.pad(n, (0, 0, 1, -1)) - n  # previous token minus current token
        x = n + before * self.mu_x
        w, k, v, r, g = (self.mix(name, n, before, x) for name in "wkvrg")
        w = self.decay_base + F.linear(torch.tanh(F.linear(w, self.decay_down)), self.decay_up)
        r, k, v = F.linear(r, self.receptance), F.linear(k, self.key), F.linear(v, self.value)
        r, k, v, w = (t.unflatten(-1, (self.heads, -1)) for t in (r, k, v, w))
        y = self.ops.wkv6(r, k, v, w, self.bonus).flatten(2)
        y = self.ops.norm_gate(y, F.linear(g, self.gate), self.head_gamma, self.head_beta, norm="layer",
                               heads=self.heads, eps=64e-5)
        return F.linear(y, self.out)


class Mamba(nn.Module):
    """Mamba-2: in-projection to z, x, B, C, dt, conv_ssd, gated RMSNorm."""

    def __init__(self, ops, C, heads, state=STATE):
        super().__init__()
        self.ops, self.heads, self.inner, self.state = ops, heads, 2 * C, state
        conv = self.inner + 2 * state
        self.register_parameter("in", matrix(self.inner + conv + heads, C))
        self.conv_weight, self.conv_bias = nn.Parameter(torch.rand(conv, WIDTH) - 0.5), vector(conv, 0)
        self.dt_bias = nn.Parameter(torch.empty(heads).uniform_(-7, -2))
        self.A_log, self.Dskip = nn.Parameter(torch.empty(heads).uniform_(1, 16).log()), vector(heads, 1)
        self.norm, self.out = vector(self.inner, 1), matrix(C, self.inner)

    def forward(self, n):
        z, x, dt = F.linear(n, getattr(self, "in")).split([self.inner, self.inner + 2 * self.state, self.heads], -1)
        y = self.ops.conv_ssd(x, dt, self.conv_weight, -self.A_log.exp(), self.conv_bias, self.Dskip,
                              dt_bias=self.dt_bias, state_size=self.state, softplus=True)
        return F.linear(self.ops.norm_gate(y.flatten(2), z, self.norm, gate_first=True), self.out)


class Block(nn.Module):
    def __init__(self, ops, C, heads, mamba_heads):
        super().__init__()
        self.ops, self.norm = ops, vector(C, 1)
        self.rwkv, self.mamba = TimeMix(ops, C, heads), Mamba(ops, C, mamba_heads)
        self.mix, self.ffn = nn.Module(), nn.Module()
        self.mix.gain_rwkv, self.mix.gain_mamba = vector(C, 0.5), vector(C, 0.5)
        self.ffn.norm, self.ffn.up, self.ffn.down = vector(C, 1), matrix(4 * C, C), matrix(C, 4 * C)

    def forward(self, x):
        n = self.ops.norm_gate(x, None, self.norm)
        x = self.ops.norm_mix(self.rwkv(n), self.mamba(n), self.mix.gain_rwkv, self.mix.gain_mamba, x)
        up = self.ops.rmsnorm_linear(x, self.ffn.up, self.ffn.norm)
        return x + F.linear(F.gelu(up, approximate="tanh"), self.ffn.down)


# ---- the model ----


class Hybrid(nn.Module):
    def __init__(self, ops, vocabulary, C=64, layers=4, heads=4, mamba_heads=2):
        super().__init__()
        self.ops, self.embedding, self.final_norm = ops, matrix(vocabulary, C), vector(C, 1)
        self.layers = nn.ModuleList(Block(ops, C, heads, mamba_heads) for _ in range(layers))

    def forward(self, tokens):
        x = self.embedding[tokens]
        for layer in self.layers:
            x = layer(x)
        return self.ops.rmsnorm_linear(x, self.embedding, self.final_norm)

    def loss(self, tokens, targets):
        return F.cross_entropy(self(tokens).flatten(0, -2).float(), targets.flatten())


def load(ops, path):
    """Reads a model file of hybrid_train, model HY in any size.  Returns the model, the bytes of its vocabulary, and
    its options."""
    from safetensors import safe_open
    with safe_open(path, "pt") as file:
        about = file.metadata()
        weights = {name: file.get_tensor(name) for name in file.keys()
                   if not name.startswith(("optimizer.", "state.", "run."))}
    vocabulary, C = weights["embedding"].shape
    layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("layers."))
    model = Hybrid(ops, vocabulary, C, layers, weights["layers.0.rwkv.bonus"].shape[0],
                   weights["layers.0.mamba.A_log"].shape[0])
    model.load_state_dict(weights)
    return model, bytes(map(int, about["vocabulary"].split())), about


@torch.no_grad()
def held_out(model, tokens, batch, window):
    """The mean loss over the last tenth of the text.  Windows start from zero states; each byte is predicted once."""
    device = model.embedding.device
    total, part = 0.0, tokens[len(tokens) * 9 // 10 - 1:]
    starts = list(range(0, len(part) - 1, window))
    full = [s for s in starts if s + window < len(part)]
    groups = [full[i:i + batch] for i in range(0, len(full), batch)] + [[s] for s in starts[len(full):]]
    for group in groups:
        rows = torch.stack([part[s:s + window + 1] for s in group]).to(device)
        total += model.loss(rows[:, :-1], rows[:, 1:]).item() * (rows.shape[1] - 1) * len(group)
    return total / (len(part) - 1)


def train(model, tokens, steps, batch, window, rate=0.004, report=None):
    """Trains on random windows of the first nine tenths; returns the losses."""
    device, losses = model.embedding.device, []
    part = tokens[:len(tokens) * 9 // 10]
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=max(steps, 2), pct_start=0.1)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        starts = torch.randint(len(part) - window, (batch,), generator=generator)
        rows = torch.stack([part[s:s + window + 1] for s in starts]).to(device)
        loss = model.loss(rows[:, :-1], rows[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
        if report and (step + 1) % report == 0:
            print(f"step {step + 1}  loss {torch.stack(losses[-report:]).mean().item():.4f}", flush=True)
    return [loss.item() for loss in losses]


def bench(device, make, modes=("eager", "torch.compile")):
    """Times forward and backward, in milliseconds, of a model with 8 layers of width 256, on 64 windows of 256
    tokens."""
    tokens = torch.randint(62, (64, 257), device=device)
    model = make(62, 256, 8, 4, 8).to(device)

    def step():
        with torch.autocast(device, torch.bfloat16):
            model.loss(tokens[:, :-1], tokens[:, 1:]).backward()

    for name in modes:
        run, times = step if name == "eager" else torch.compile(step), []
        for _ in range(14):
            torch.cuda.synchronize() if device == "cuda" else None
            start = time.perf_counter()
            run()
            torch.cuda.synchronize() if device == "cuda" else None
            times.append((time.perf_counter() - start) * 1e3)
            if len(times) == 1:
                print(f"{name}: first step {times[0] / 1e3:.1f} s", flush=True)
        typical = sorted(times[4:])[5]
        print(f"{name}: {typical:.2f} ms, {tokens[:, 1:].numel() / typical * 1e3:,.0f} tokens/s", flush=True)


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    parser = argparse.ArgumentParser(description="an RWKV-6 + Mamba-2 language model on gt_kernels.torch")
    parser.add_argument("--data", default=os.path.join(here, "../../examples/data/fables.txt"))
    parser.add_argument("--load", help="a model file of hybrid_train: prints its held-out loss")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--plain", action="store_true", help="plain PyTorch operations")
    parser.add_argument("--bench", action="store_true", help="time a training step")
    args = parser.parse_args()
    if args.plain:
        import plain as ops
    else:
        import gt_kernels.torch as ops
    if args.bench:
        return bench(args.device, lambda *sizes: Hybrid(ops, *sizes))
    with open(args.data, "rb") as file:
        text = file.read()
    torch.manual_seed(1)
    if args.load:
        model, vocabulary, about = load(ops, args.load)
        batch, window = int(about["option.batch"]), int(about["option.seq"])
    else:
        vocabulary, batch, window = bytes(sorted(set(text))), 8, 64
        model = Hybrid(ops, len(vocabulary))
    tokens = torch.tensor([vocabulary.index(byte) for byte in text])
    model.to(args.device)
    if not args.load:
        train(model, tokens, args.steps, batch, window, report=max(args.steps // 10, 1))
    print(f"held-out loss {held_out(model, tokens, batch, window):.4f}")


if __name__ == "__main__":
    main()
