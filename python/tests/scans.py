"""The operators as lax.scan in JAX operations.  Tests compare the gradients of gt_kernels.jax with these in float64;
bench/jax_rows.py times them in float32."""

import jax
import jax.numpy as jnp


def first_state(state, batch, shape, like):
    if state is None:
        return jnp.zeros((batch, *shape), like.dtype)
    return jnp.broadcast_to(state, (batch, *shape))


def over_time(step, state, *arrays):
    """Scans over time with step(state, arrays of one token) -> (state, y).  arrays are [B,T,...].  Returns (y,
    state)."""
    state, y = jax.lax.scan(step, state, tuple(jnp.moveaxis(array, 1, 0) for array in arrays))
    return jnp.moveaxis(y, 0, 1), state


def wkv6(r, k, v, w, u=None, state=None, decay="raw", scale=1.0):
    B, _, H, N = r.shape
    d = jnp.exp(-jnp.exp(w)) if decay == "raw" else jnp.exp(w)

    def step(S, token):
        r, k, v, d = token
        kv = k[..., :, None] * v[..., None, :]
        bonus = 0 if u is None else u[:, :, None] * kv
        return d[..., None] * S + kv, ((S + bonus) * r[..., None]).sum(2) * scale
    return over_time(step, first_state(state, B, (H, N, v.shape[-1]), r), r, k, v, d)


def wkv4(k, v, w, u=None, state=None, decay="raw"):
    B, _, D = k.shape
    d = jnp.exp(-jnp.exp(w)) if decay == "raw" else jnp.exp(w)
    a, b, p = jnp.moveaxis(first_state(state, B, (3, D), k), 1, 0)

    def step(sums, token):
        k, v = token
        own = jnp.exp(k + (0 if u is None else u))
        y = (sums[0] + own * v) / (sums[1] + own)
        return (d * sums[0] + jnp.exp(k) * v, d * sums[1] + jnp.exp(k)), y
    y, (values, weights) = over_time(step, (a * jnp.exp(p), b * jnp.exp(p)), k, v)
    return y, jnp.stack([values / weights, jnp.ones_like(weights), jnp.log(weights)], 1)


def step_sizes(dt, dt_bias, softplus, dt_limit=None):
    dt = dt if dt_bias is None else dt + dt_bias
    dt = jax.nn.softplus(dt) if softplus else dt
    return dt if dt_limit is None else jnp.clip(dt, *dt_limit)


def gated(y, x, Dskip, z):
    if Dskip is not None:
        y = y + Dskip * x
    return y if z is None else y * jax.nn.silu(z)


def ssd(x, dt, A, Bm, Cm, Dskip=None, z=None, dt_bias=None, state=None, softplus=False, dt_limit=None):
    B, _, H, P = x.shape
    dt = step_sizes(dt, dt_bias, softplus, dt_limit)
    Bm, Cm = (jnp.repeat(array, H // array.shape[2], 2) for array in (Bm, Cm))

    def step(S, token):
        x, dt, b, c = token
        S = jnp.exp(dt * A)[..., None, None] * S + (dt[..., None] * x)[..., None] * b[:, :, None, :]
        return S, (S * c[:, :, None, :]).sum(-1)
    y, state = over_time(step, first_state(state, B, (H, P, Bm.shape[-1]), x), x, dt, Bm, Cm)
    return gated(y, x, Dskip[:, None] if Dskip is not None and Dskip.ndim == 1 else Dskip, z), state


def selective_scan(u, dt, A, Bm, Cm, Dskip=None, z=None, dt_bias=None, state=None, softplus=False):
    B, _, D = u.shape
    dt = step_sizes(dt, dt_bias, softplus)

    def step(S, token):
        u, dt, b, c = token
        b, c = (jnp.repeat(array, D // array.shape[1], 1) for array in (b, c))
        S = jnp.exp(dt[..., None] * A) * S + (dt * u)[..., None] * b
        return S, (S * c).sum(-1)
    y, state = over_time(step, first_state(state, B, A.shape, u), u, dt, Bm, Cm)
    return gated(y, u, Dskip, z), state


def conv1d(x, weight, bias=None, state=None, activation=None):
    B, T, D = x.shape
    W = weight.shape[1]
    e = jnp.concatenate([jnp.swapaxes(first_state(state, B, (D, W - 1), x), 1, 2), x], 1)
    y = sum(weight[:, j] * e[:, j:j + T] for j in range(W))
    y = y if bias is None else y + bias
    return jax.nn.silu(y) if activation else y, jnp.swapaxes(e[:, T:], 1, 2)


def conv_ssd(xBC, dt, weight, A, bias=None, Dskip=None, z=None, dt_bias=None, conv_state=None, state=None, *,
             state_size, groups, softplus=False, dt_limit=None):
    c, conv_state = conv1d(xBC, weight, bias, conv_state, "silu")
    H, GN = dt.shape[2], groups * state_size
    x, Bm, Cm = jnp.split(c, (xBC.shape[2] - 2 * GN, xBC.shape[2] - GN), -1)
    heads = [array.reshape(*array.shape[:2], count, -1) for array, count in ((x, H), (Bm, groups), (Cm, groups))]
    y, state = ssd(heads[0], dt, A, heads[1], heads[2], Dskip, z, dt_bias, state, softplus, dt_limit)
    return y, conv_state, state


def wkv_ssm(r, k, v, w, u, x, dt, A, Bm, Cm, Dskip=None, z=None, dt_bias=None, wkv_state=None, ssm_state=None, *,
            decay="raw", softplus=False, dt_limit=None):
    wkv_y, wkv_state = wkv6(r, k, v, w, u, wkv_state, decay)
    ssd_y, ssm_state = ssd(x, dt, A, Bm, Cm, Dskip, z, dt_bias, ssm_state, softplus, dt_limit)
    return wkv_y, ssd_y, wkv_state, ssm_state


def wkv_ssm_mixed(*, gain_wkv=None, gain_ssm=None, residual=None, **arrays):
    wkv_y, ssd_y, *states = wkv_ssm(**arrays)
    mixed = affine(wkv_y, gain_wkv) + affine(ssd_y, gain_ssm).reshape(wkv_y.shape)
    return affine(mixed, None, residual), *states


def normed(x, norm, eps, heads=1):
    parts = x.reshape(*x.shape[:-1], heads, -1)
    if norm == "layer":
        parts = parts - parts.mean(-1, keepdims=True)
    return (parts * jax.lax.rsqrt((parts * parts).mean(-1, keepdims=True) + eps)).reshape(x.shape)


def affine(x, gain=None, bias=None):
    x = x if gain is None else x * gain
    return x if bias is None else x + bias


def rmsnorm_linear(x, weight, gamma=None, beta=None, bias=None, norm="rms", eps=1e-5):
    return affine(affine(normed(x, norm, eps), gamma, beta) @ weight.T, None, bias)


def norm_mix(a, b, gain_a=None, gain_b=None, residual=None, heads=1, eps=1e-5):
    return affine(affine(normed(a, "rms", eps, heads), gain_a) + affine(normed(b, "rms", eps, heads), gain_b), None,
                  residual)


def add_norm(x, residual=None, gamma=None, beta=None, norm="rms", eps=1e-5, reads_sum=False):
    total = affine(x, None, residual)
    return affine(normed(total, norm, eps), gamma, beta), total


def norm_gate(x, z=None, gamma=None, beta=None, norm="rms", gate_first=False, heads=1, eps=1e-5):
    gate = 1 if z is None else jax.nn.silu(z)
    y = affine(normed(x * gate if gate_first else x, norm, eps, heads), gamma, beta)
    return y if gate_first else y * gate
