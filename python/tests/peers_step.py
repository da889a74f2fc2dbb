"""peers_step.py FOLDER: compares the training step of python/examples/hybrid.py with the same model on public packages.

FOLDER is the folder of peers.py.  The other model uses chunk_rwkv6 of flash-linear-attention and
mamba_chunk_scan_combined of mamba_ssm, both in Triton.  Its convolution is causal_conv1d if that is installed, else
PyTorch's.  Its norms are PyTorch operations, which torch.compile fuses.  Both models have the same weights.  The script
compares their losses and gradients before it times anything, and prints every line as soon as it is known.
"""

import functools
import os
import sys
import types

import torch

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "examples"))
import hybrid  # noqa: E402
import peers  # noqa: E402
import plain  # noqa: E402

import gt_kernels.torch as gt  # noqa: E402

print = functools.partial(print, flush=True)  # show each line at once, since Triton and torch.compile take minutes


def public(folder):
    """The functions that hybrid.py uses from gt_kernels.torch, taken from the public packages."""
    try:
        from causal_conv1d import causal_conv1d_fn
    except ImportError:
        causal_conv1d_fn = None
    importlib, _ = peers.prepare(folder)
    chunk = importlib.import_module("fla.ops.rwkv6.chunk").chunk_rwkv6
    scan = importlib.import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
    ops = types.SimpleNamespace(norm_gate=plain.norm_gate, norm_mix=plain.norm_mix, rmsnorm_linear=plain.rmsnorm_linear)

    def wkv6(r, k, v, w, u):
        return chunk(r, k, v, -torch.exp(w.float()).to(r.dtype), u.to(r.dtype), scale=1.0)[0]

    def conv1d(x, weight, bias, activation=None):
        return causal_conv1d_fn(x.transpose(1, 2), weight.to(x.dtype), bias.to(x.dtype),
                                activation=activation).transpose(1, 2)

    def conv_ssd(x, dt, weight, A, bias, Dskip, dt_bias, state_size, softplus=True):
        x = (conv1d if causal_conv1d_fn else plain.conv1d)(x, weight, bias, "silu")
        x, B, C = x.split([x.shape[2] - 2 * state_size, state_size, state_size], -1)
        return scan(x.unflatten(-1, (dt.shape[2], -1)), dt, A, B[:, :, None], C[:, :, None], chunk_size=128, D=Dskip,
                    dt_bias=dt_bias, dt_softplus=softplus)

    ops.wkv6, ops.conv_ssd = wkv6, conv_ssd
    return ops


def compare(folder):
    models = []
    for ops in (gt, public(folder)):
        torch.manual_seed(1)
        models.append(hybrid.Hybrid(ops, 62, 256, 2, 4, 8).cuda())
    tokens = torch.randint(62, (16, 257), device="cuda")
    for model in models:
        with torch.autocast("cuda", torch.bfloat16):
            model.out = model.loss(tokens[:, :-1], tokens[:, 1:])
        model.out.backward()
    pairs = [[p.grad.flatten() for p in model.parameters()] for model in models]
    mine, theirs = (torch.cat(grads) for grads in pairs)
    print(f"losses {models[0].out.item():.5f} and {models[1].out.item():.5f}, "
          f"gradients differ by {((mine - theirs).norm() / theirs.norm()).item():.2e}")


def main():
    folder = os.path.abspath(sys.argv[1])
    print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name()}")
    compare(folder)
    for mode in ("eager", "torch.compile"):  # compiling takes minutes
        for name, ops in (("gt_kernels", gt), ("public packages", public(folder)), ("gt_kernels", gt)):
            print(name)
            torch._dynamo.reset()
            hybrid.bench("cuda", lambda *sizes, ops=ops: hybrid.Hybrid(ops, *sizes), [mode])


if __name__ == "__main__":
    main()
