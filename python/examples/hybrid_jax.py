"""hybrid.py in JAX: the language model of RWKV-6 + Mamba-2 blocks that hybrid_train trains, on gt_kernels.jax.

    python hybrid_jax.py                          trains on the text that ships, prints the held-out loss
    python hybrid_jax.py --load book.st --data book.txt    the held-out loss of a model file of hybrid_train

A model is a dictionary of arrays.  Its names are those of hybrid_train's model files (docs/training.md).
"""

import argparse
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np

import gt_kernels.jax as gt

RANK, DECAY_RANK, STATE, WIDTH = 32, 64, 64, 4  # low-rank pairs, Mamba-2's state, its convolution


# ---- the model ----


def create(seed, vocabulary, C=64, layers=4, heads=4, mamba_heads=2):
    """Random weights with the same distributions as in hybrid.py."""
    random = np.random.default_rng(seed)

    def matrix(rows, columns, gain=0.5):
        return random.standard_normal((rows, columns)) * gain / columns ** 0.5

    ramp, conv = np.arange(C) / C, 2 * C + 2 * STATE
    model = {"embedding": matrix(vocabulary, C), "final_norm": np.ones(C)}
    for layer in range(layers):
        block = {"norm": np.ones(C), "mix.gain_rwkv": np.full(C, 0.5), "mix.gain_mamba": np.full(C, 0.5),
                 "ffn.norm": np.ones(C), "ffn.up": matrix(4 * C, C), "ffn.down": matrix(C, 4 * C)}
        block.update({f"rwkv.mu_{name}": 1 - ramp for name in "xwkvrg"})
        for name in "wkvrg":
            block[f"rwkv.mix_down_{name}"], block[f"rwkv.mix_up_{name}"] = matrix(RANK, C, 0), matrix(C, RANK, 0.03)
        block.update({f"rwkv.{name}": matrix(C, C) for name in ("receptance", "key", "value", "gate", "out")})
        block.update({
            "rwkv.decay_base": -6 + 5 * ramp, "rwkv.decay_down": matrix(DECAY_RANK, C, 0),
            "rwkv.decay_up": matrix(C, DECAY_RANK, 0.05), "rwkv.bonus": random.random((heads, C // heads)),
            "rwkv.head_gamma": np.ones(C), "rwkv.head_beta": np.zeros(C),
            "mamba.in": matrix(2 * C + conv + mamba_heads, C), "mamba.conv_weight": random.random((conv, WIDTH)) - 0.5,
            "mamba.conv_bias": np.zeros(conv), "mamba.dt_bias": random.uniform(-7, -2, mamba_heads),
            "mamba.A_log": np.log(random.uniform(1, 16, mamba_heads)), "mamba.Dskip": np.ones(mamba_heads),
            "mamba.norm": np.ones(2 * C), "mamba.out": matrix(C, 2 * C)})
        model.update({f"layers.{layer}.{name}": value for name, value in block.items()})
    return {name: jnp.asarray(value, jnp.float32) for name, value in model.items()}


def time_mix(p, n):
    """RWKV-6: token shift with data-dependent weights, wkv6, and a norm with a gate per head."""
    heads = p["rwkv.bonus"].shape[0]
    before = jnp.pad(n, ((0, 0), (1, 0), (0, 0)))[:, :-1] - n  # previous token minus current token
    x = n + before * p["rwkv.mu_x"]

    def mix(name):
        low = jnp.tanh(x @ p[f"rwkv.mix_down_{name}"].T)
        return n + before * (p[f"rwkv.mu_{name}"] + low @ p[f"rwkv.mix_up_{name}"].T)
    w, k, v, r, g = map(mix, "wkvrg")
    w = p["rwkv.decay_base"] + jnp.tanh(w @ p["rwkv.decay_down"].T) @ p["rwkv.decay_up"].T
    r, k, v = r @ p["rwkv.receptance"].T, k @ p["rwkv.key"].T, v @ p["rwkv.value"].T
    y = gt.wkv6(*(t.reshape(*t.shape[:2], heads, -1) for t in (r, k, v, w)), p["rwkv.bonus"]).reshape(n.shape)
    y = gt.norm_gate(y, g @ p["rwkv.gate"].T, p["rwkv.head_gamma"], p["rwkv.head_beta"], norm="layer", heads=heads,
                     eps=64e-5)
    return y @ p["rwkv.out"].T


def mamba(p, n):
    """Mamba-2: in-projection to z, x, B, C, dt, conv_ssd, gated RMSNorm."""
    inner, conv = p["mamba.norm"].shape[0], p["mamba.conv_weight"].shape[0]
    z, x, dt = jnp.split(n @ p["mamba.in"].T, (inner, inner + conv), -1)
    y = gt.conv_ssd(x, dt, p["mamba.conv_weight"], -jnp.exp(p["mamba.A_log"]), p["mamba.conv_bias"], p["mamba.Dskip"],
                    dt_bias=p["mamba.dt_bias"], state_size=STATE, softplus=True)
    return gt.norm_gate(y.reshape(z.shape), z, p["mamba.norm"], gate_first=True) @ p["mamba.out"].T


def block(p, x):
    n = gt.norm_gate(x, None, p["norm"])
    x = gt.norm_mix(time_mix(p, n), mamba(p, n), p["mix.gain_rwkv"], p["mix.gain_mamba"], x)
    return x + jax.nn.gelu(gt.rmsnorm_linear(x, p["ffn.up"], p["ffn.norm"]), approximate=True) @ p["ffn.down"].T


def layers_of(model):
    """The weights of the blocks, each stacked over layers: the first index is the layer."""
    count = 1 + max(int(name.split(".")[1]) for name in model if name.startswith("layers."))
    names = [name.split(".", 2)[2] for name in model if name.startswith("layers.0.")]
    return {name: jnp.stack([model[f"layers.{layer}.{name}"] for layer in range(count)]) for name in names}


def logits(model, tokens):
    x, _ = jax.lax.scan(lambda x, p: (block(p, x), None), model["embedding"][tokens], layers_of(model))
    return gt.rmsnorm_linear(x, model["embedding"], model["final_norm"])


def loss(model, tokens):
    """The mean loss.  In each window every token but the first is predicted from the tokens before it."""
    found = jax.nn.log_softmax(logits(model, tokens[:, :-1]))
    return -jnp.take_along_axis(found, tokens[:, 1:, None], -1).mean()


def load(path):
    """Reads a model file of hybrid_train, model HY in any size.  Returns the model, the bytes of its vocabulary, and
    its options."""
    from safetensors import safe_open
    with safe_open(path, "np") as file:
        about = file.metadata()
        model = {name: jnp.asarray(file.get_tensor(name)) for name in file.keys()
                 if not name.startswith(("optimizer.", "state.", "run."))}
    return model, bytes(map(int, about["vocabulary"].split())), about


# ---- training ----


def held_out(model, tokens, batch, window):
    """The mean loss over the last tenth of the text.  Windows start from zero states; each byte is predicted once."""
    total, part, run = 0.0, tokens[len(tokens) * 9 // 10 - 1:], jax.jit(loss)
    starts = list(range(0, len(part) - 1, window))
    full = [s for s in starts if s + window < len(part)]
    groups = [full[i:i + batch] for i in range(0, len(full), batch)] + [[s] for s in starts[len(full):]]
    for group in groups:
        rows = np.stack([part[s:s + window + 1] for s in group])
        total += float(run(model, rows)) * (rows.shape[1] - 1) * len(group)
    return total / (len(part) - 1)


def rate_at(step, steps, rate):
    """The learning rate of a step: rises to `rate` in a tenth of the steps, then falls; both along a cosine."""
    up = 0.1 * steps - 1
    low, high, x = (rate / 25, rate, step / up) if step <= up else (rate, rate / 25e4, (step - up) / (steps - 1 - up))
    return high + (low - high) * (1 + np.cos(np.pi * x)) / 2


@functools.partial(jax.jit, donate_argnums=(0, 1, 2))
def update(model, mean, square, tokens, step, rate):
    """AdamW with clipped gradients."""
    value, gradients = jax.value_and_grad(loss)(model, tokens)
    size = jnp.sqrt(sum((g * g).sum() for g in gradients.values()))
    scale = jnp.minimum(1, 1 / (size + 1e-6))
    for name, weight in model.items():
        g = gradients[name] * scale
        mean[name] = 0.9 * mean[name] + 0.1 * g
        square[name] = 0.95 * square[name] + 0.05 * g * g
        change = mean[name] / (1 - 0.9 ** step) / (jnp.sqrt(square[name] / (1 - 0.95 ** step)) + 1e-8)
        model[name] = weight - rate * (change + 0.1 * weight)
    return model, mean, square, value


def train(model, tokens, steps, batch, window, rate=0.004, report=None):
    """Trains on random windows of the first nine tenths; returns the model and the losses."""
    model, losses, random = {name: jnp.array(value) for name, value in model.items()}, [], np.random.default_rng(1)
    mean, square = ({name: jnp.zeros_like(value) for name, value in model.items()} for _ in range(2))
    part = tokens[:len(tokens) * 9 // 10]
    for step in range(steps):
        rows = np.stack([part[s:s + window + 1] for s in random.integers(len(part) - window, size=batch)])
        model, mean, square, value = update(model, mean, square, rows, step + 1.0,
                                            rate_at(step, max(steps, 2), rate))
        losses.append(value)
        if report and (step + 1) % report == 0:
            print(f"step {step + 1}  loss {np.mean(jax.device_get(losses[-report:])):.4f}", flush=True)
    return model, [float(value) for value in losses]


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    parser = argparse.ArgumentParser(description="an RWKV-6 + Mamba-2 language model on gt_kernels.jax")
    parser.add_argument("--data", default=os.path.join(here, "../../examples/data/fables.txt"))
    parser.add_argument("--load", help="a model file of hybrid_train: prints its held-out loss")
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    with open(args.data, "rb") as file:
        text = file.read()
    if args.load:
        model, vocabulary, about = load(args.load)
        batch, window = int(about["option.batch"]), int(about["option.seq"])
    else:
        vocabulary, batch, window = bytes(sorted(set(text))), 8, 64
        model = create(1, len(vocabulary))
    tokens = np.array([vocabulary.index(byte) for byte in text], np.int32)
    if not args.load:
        model, _ = train(model, tokens, args.steps, batch, window, report=max(args.steps // 10, 1))
    print(f"held-out loss {held_out(model, tokens, batch, window):.4f}")


if __name__ == "__main__":
    main()
