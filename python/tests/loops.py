"""The operators as plain loops over tokens in PyTorch operations, for float64 tensors.  Tests compare the gradients of
gt_kernels.torch with the autograd gradients of these loops."""

import torch
import torch.nn.functional as F


def over_sequences(loop):
    """Runs each packed sequence alone, with its own row of the state."""
    def run(*tensors, state=None, cu_seqlens=None, **options):
        if cu_seqlens is None:
            return loop(*tensors, state=state, **options)
        bounds, parts = cu_seqlens.tolist(), []
        for s, (start, end) in enumerate(zip(bounds, bounds[1:])):
            cut = [t[:, start:end] if t is not None and t.dim() > 2 and t.shape[1] == bounds[-1] else t for t in tensors]
            row = state[s:s + 1] if state is not None and state.dim() == run.state_rank else state
            parts.append(loop(*cut, state=row, **options))
        return torch.cat([y for y, _ in parts], 1), torch.cat([s for _, s in parts])
    run.state_rank = {"wkv6": 4, "ssd": 4, "selective_scan": 3, "conv1d": 3, "wkv4": 3}[loop.__name__]
    return run


def first_state(state, B, shape, x):
    if state is None:
        return x.new_zeros((B, *shape))
    return state if state.dim() == len(shape) + 1 else state.expand(B, *shape)


@over_sequences
def wkv6(r, k, v, w, u, state=None, decay="raw"):
    B, T, H, N = r.shape
    S = first_state(state, B, (H, N, v.shape[-1]), r)
    d = torch.exp(-torch.exp(w)) if decay == "raw" else torch.exp(w)
    y = []
    for t in range(T):
        kv = k[:, t, :, :, None] * v[:, t, :, None, :]
        bonus = 0 if u is None else u[None, :, :, None] * kv
        y.append(((S + bonus) * r[:, t, :, :, None]).sum(2))
        S = d[:, t, :, :, None] * S + kv
    return torch.stack(y, 1) if y else v.clone(), S


def step_sizes(dt, dt_bias, softplus, dt_limit=None):
    dt = dt if dt_bias is None else dt + dt_bias
    dt = F.softplus(dt, threshold=1000) if softplus else dt
    return dt if dt_limit is None else dt.clamp(*dt_limit)


@over_sequences
def ssd(x, dt, A, Bm, Cm, Dskip, z, dt_bias, state=None, softplus=False, dt_limit=None):
    B, T, H, P = x.shape
    S = first_state(state, B, (H, P, Bm.shape[-1]), x)
    dt = step_sizes(dt, dt_bias, softplus, dt_limit)
    Bm, Cm = (t.repeat_interleave(H // t.shape[2], 2) for t in (Bm, Cm))
    y = []
    for t in range(T):
        S = torch.exp(dt[:, t] * A)[:, :, None, None] * S + \
            (dt[:, t, :, None] * x[:, t])[..., None] * Bm[:, t, :, None, :]
        out = (S * Cm[:, t, :, None, :]).sum(-1)
        if Dskip is not None:
            out = out + (Dskip[:, None] if Dskip.dim() == 1 else Dskip) * x[:, t]
        y.append(out if z is None else out * F.silu(z[:, t]))
    return torch.stack(y, 1) if y else x.clone(), S


@over_sequences
def selective_scan(u, dt, A, Bm, Cm, Dskip, z, dt_bias, state=None, softplus=False):
    B, T, D = u.shape
    S = first_state(state, B, A.shape, u)
    dt = step_sizes(dt, dt_bias, softplus)
    Bm, Cm = (t.repeat_interleave(D // t.shape[2], 2) for t in (Bm, Cm))
    y = []
    for t in range(T):
        S = torch.exp(dt[:, t, :, None] * A) * S + (dt[:, t] * u[:, t])[..., None] * Bm[:, t]
        out = (S * Cm[:, t]).sum(-1)
        if Dskip is not None:
            out = out + Dskip * u[:, t]
        y.append(out if z is None else out * F.silu(z[:, t]))
    return torch.stack(y, 1) if y else u.clone(), S


@over_sequences
def conv1d(x, weight, bias, state=None, activation=None):
    B, T, D = x.shape
    W = weight.shape[1]
    before = first_state(state, B, (D, W - 1), x).transpose(1, 2)
    e = torch.cat([before, x], 1)
    y = sum(weight[:, j] * e[:, j:j + T] for j in range(W))
    if bias is not None:
        y = y + bias
    return F.silu(y) if activation == "silu" else y, e[:, T:].transpose(1, 2)


@over_sequences
def wkv4(k, v, w, u, state=None, decay="raw"):
    B, T, D = k.shape
    first = first_state(state, B, (3, D), k)
    g = -torch.exp(w) if decay == "raw" else w
    S, norm = first[:, 0] * torch.exp(first[:, 2]), first[:, 1] * torch.exp(first[:, 2])
    y = []
    for t in range(T):
        own, weight = torch.exp(k[:, t] + (0 if u is None else u)), torch.exp(k[:, t])
        y.append((S + own * v[:, t]) / (norm + own))
        S, norm = torch.exp(g) * S + weight * v[:, t], torch.exp(g) * norm + weight
    if not y:
        return v.clone(), first
    return torch.stack(y, 1), torch.stack([S / norm, torch.ones_like(norm), norm.log()], 1)


def conv_ssd(xBC, dt, weight, A, bias, Dskip, z, dt_bias, conv_state=None, state=None, *, state_size, groups,
             softplus=False, dt_limit=None, cu_seqlens=None):
    convolved, conv_state = conv1d(xBC, weight, bias, state=conv_state, activation="silu", cu_seqlens=cu_seqlens)
    H, GN = dt.shape[2], groups * state_size
    x, Bm, Cm = convolved.split((xBC.shape[2] - 2 * GN, GN, GN), -1)
    y, state = ssd(x.unflatten(2, (H, -1)), dt, A, Bm.unflatten(2, (groups, -1)), Cm.unflatten(2, (groups, -1)), Dskip,
                   z, dt_bias, state=state, softplus=softplus, dt_limit=dt_limit, cu_seqlens=cu_seqlens)
    return y, conv_state, state


def wkv_ssm(r, k, v, w, u, x, dt, A, Bm, Cm, Dskip, z, dt_bias, wkv_state=None, ssm_state=None, *, decay="raw",
            softplus=False, dt_limit=None, cu_seqlens=None):
    wkv_y, wkv_state = wkv6(r, k, v, w, u, state=wkv_state, decay=decay, cu_seqlens=cu_seqlens)
    ssd_y, ssm_state = ssd(x, dt, A, Bm, Cm, Dskip, z, dt_bias, state=ssm_state, softplus=softplus, dt_limit=dt_limit,
                           cu_seqlens=cu_seqlens)
    return wkv_y, ssd_y, wkv_state, ssm_state


def wkv_ssm_mixed(*values, gain_wkv, gain_ssm, residual, **options):
    wkv_y, ssd_y, *states = wkv_ssm(*values, **options)
    ssd_y = times(ssd_y, None if gain_ssm is None else gain_ssm if gain_ssm.dim() == 2 else gain_ssm[:, None])
    wkv_y = times(wkv_y, None if gain_wkv is None else gain_wkv if gain_wkv.dim() == 2 else gain_wkv[:, None])
    return plus(wkv_y + ssd_y.reshape(wkv_y.shape), residual), *states


def normed(x, norm, eps, heads=1):
    parts = x.unflatten(-1, (heads, -1))
    if norm == "layer":
        parts = parts - parts.mean(-1, keepdim=True)
    return (parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)).flatten(-2)


def times(x, gain):
    return x if gain is None else x * gain


def plus(x, bias):
    return x if bias is None else x + bias


def rmsnorm_linear(x, weight, gamma, beta, bias, norm="rms", eps=1e-5):
    return plus(plus(times(normed(x, norm, eps), gamma), beta) @ weight.T, bias)


def norm_mix(a, b, gain_a, gain_b, residual, heads=1, eps=1e-5):
    return plus(times(normed(a, "rms", eps, heads), gain_a) + times(normed(b, "rms", eps, heads), gain_b), residual)


def add_norm(x, residual, gamma, beta, norm="rms", eps=1e-5):
    total = plus(x, residual)
    return plus(times(normed(total, norm, eps), gamma), beta), total * 1


def norm_gate(x, z, gamma, beta, norm="rms", gate_first=False, heads=1, eps=1e-5):
    gate = 1 if z is None else F.silu(z)
    x = x * gate if gate_first else x
    y = plus(times(normed(x, norm, eps, heads), gamma), beta)
    return y if gate_first else y * gate
