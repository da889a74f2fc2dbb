"""The functions that hybrid.py uses from gt_kernels.torch, in plain PyTorch operations.  They are slow; tests compare
the operators with them."""

import torch
import torch.nn.functional as F


def wkv6(r, k, v, w, u):
    B, T, H, N = r.shape
    state, y = r.new_zeros(B, H, N, v.shape[-1]), []
    decay = torch.exp(-torch.exp(w))
    for t in range(T):
        kv = k[:, t, :, :, None] * v[:, t, :, None, :]
        y.append(((state + u[:, :, None] * kv) * r[:, t, :, :, None]).sum(2))
        state = decay[:, t, :, :, None] * state + kv
    return torch.stack(y, 1)


def ssd(x, dt, A, Bm, Cm, Dskip, dt_bias, softplus=True):
    dt = F.softplus(dt + dt_bias)
    state, y = x.new_zeros(x.shape[0], *x.shape[2:], Bm.shape[-1]), []
    for t in range(x.shape[1]):
        new = (dt[:, t, :, None] * x[:, t])[..., None] * Bm[:, t, :, None]
        state = torch.exp(dt[:, t] * A)[..., None, None] * state + new
        y.append((state * Cm[:, t, :, None]).sum(-1) + Dskip[:, None] * x[:, t])
    return torch.stack(y, 1)


def conv1d(x, weight, bias, activation=None):
    width = weight.shape[1]
    y = F.conv1d(F.pad(x.transpose(1, 2), (width - 1, 0)), weight[:, None], bias, groups=x.shape[-1]).transpose(1, 2)
    return F.silu(y) if activation == "silu" else y


def conv_ssd(x, dt, weight, A, bias, Dskip, dt_bias, state_size, softplus=True):
    heads = dt.shape[2]
    x, B, C = conv1d(x, weight, bias, "silu").split([x.shape[2] - 2 * state_size, state_size, state_size], -1)
    return ssd(x.unflatten(-1, (heads, -1)), dt, A, B[:, :, None], C[:, :, None], Dskip, dt_bias, softplus)


def normed(x, norm, heads, eps):
    parts = x.unflatten(-1, (heads, -1))
    if norm == "layer":
        parts = parts - parts.mean(-1, keepdim=True)
    return (parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)).flatten(-2)


def norm_gate(x, z=None, gamma=1, beta=0, norm="rms", gate_first=False, heads=1, eps=1e-5):
    gate = 1 if z is None else F.silu(z)
    if gate_first:
        return normed(x * gate, norm, heads, eps) * gamma + beta
    return (normed(x, norm, heads, eps) * gamma + beta) * gate


def norm_mix(a, b, gain_a, gain_b, residual, eps=1e-5):
    return residual + gain_a * normed(a, "rms", 1, eps) + gain_b * normed(b, "rms", 1, eps)


def rmsnorm_linear(x, weight, gamma, eps=1e-5):
    return F.linear(normed(x, "rms", 1, eps) * gamma, weight)
