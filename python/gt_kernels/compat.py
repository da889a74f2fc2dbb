"""Functions with the signatures of the packages that people use now: change one import.

    from gt_kernels.compat import chunk_rwkv6, mamba_chunk_scan_combined, causal_conv1d_fn

    flash-linear-attention   chunk_rwkv6, fused_recurrent_rwkv6
    mamba_ssm                mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined, selective_scan_fn,
                             selective_state_update, rms_norm_gated (there rmsnorm_fn of layernorm_gated), layernorm_fn
    causal-conv1d            causal_conv1d_fn, causal_conv1d_update
    RWKV-LM                  RUN_CUDA_RWKV6

What an argument asks for and gt_kernels does not have is refused with UnsupportedError, which names it.  States are
computed in float32.  Gradients pass through final states, also where the package has none; updates have no gradients,
as there.
"""

import functools

import torch
import torch.nn.functional as F

from . import c
from . import torch as gt

__all__ = ["RUN_CUDA_RWKV6", "causal_conv1d_fn", "causal_conv1d_update", "chunk_rwkv6", "fused_recurrent_rwkv6",
           "layernorm_fn", "mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined", "rms_norm_gated",
           "rmsnorm_fn", "selective_scan_fn", "selective_state_update"]


def _refuse(function, what):
    raise c.UnsupportedError(c.GT_ERROR_UNSUPPORTED, f"gt_kernels.compat.{function}: {what} is not supported")


def _together(*tensors):
    """Activations of one dtype: where they differ, the one that has them all."""
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
    if len(dtypes) == 1:
        return tensors
    dtype = functools.reduce(torch.promote_types, dtypes)
    return tuple(None if tensor is None else tensor.to(dtype) for tensor in tensors)


# ---- flash-linear-attention ----


def _rwkv6(function, r, k, v, w, u, scale, initial_state, output_final_state, cu_seqlens, reverse, others):
    head_first = others.pop("head_first", False)
    others.pop("chunk_size", None)  # how it is computed there
    for name in others:
        _refuse(function, name)
    if reverse and cu_seqlens is not None:
        _refuse(function, "reverse with cu_seqlens")
    if head_first and cu_seqlens is not None:
        _refuse(function, "head_first with cu_seqlens")
    tensors = [t.transpose(1, 2) if head_first else t for t in (r, k, v, w)]
    if reverse:
        tensors = [t.flip(1) for t in tensors]
    r, k, v, w = tensors
    scale = k.shape[-1] ** -0.5 if scale is None or scale == -1 else scale
    y, state = gt.wkv6(r, k, v, w, u, initial_state, decay="log", scale=scale, final_state=True, cu_seqlens=cu_seqlens)
    if reverse:
        y = y.flip(1)
    return y.transpose(1, 2) if head_first else y, state if output_final_state else None


def chunk_rwkv6(r, k, v, w, u, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None,
                cu_seqlens_cpu=None, **kwargs):
    """r k w [B,T,H,K], v [B,T,H,V], w in log space, u [H,K]; scale: of o, None: K^-0.5.  (o, final state or None)"""
    return _rwkv6("chunk_rwkv6", r, k, v, w, u, scale, initial_state, output_final_state, cu_seqlens, False, kwargs)


def fused_recurrent_rwkv6(r, k, v, w, u, scale=None, initial_state=None, output_final_state=False, reverse=False,
                          cu_seqlens=None, **kwargs):
    """As chunk_rwkv6.  reverse: from the last token to the first."""
    return _rwkv6("fused_recurrent_rwkv6", r, k, v, w, u, scale, initial_state, output_final_state, cu_seqlens, reverse,
                  kwargs)


# ---- sequences that an index of each token tells apart ----


def _pack(seq_idx):
    """seq_idx [B,T]: the bounds of the runs of equal numbers, all rows behind one another, and which run begins a row
    and ends one.  Waits for the device."""
    B, T = seq_idx.shape
    first = torch.ones_like(seq_idx, dtype=torch.bool)
    first[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    starts = first.flatten().nonzero().flatten()
    bounds = torch.cat([starts, starts.new_full((1,), B * T)]).to(torch.int32)
    runs = first.sum(1).cumsum(0)
    return bounds, torch.cat([runs.new_zeros(1), runs[:-1]]), runs - 1


def _one_row(tensor):
    return None if tensor is None else tensor.reshape(1, -1, *tensor.shape[2:])


def _spread(states, bounds, firsts):
    """A state for each run: those of the rows for the runs that begin one, else zeros."""
    if states is None:
        return None
    zeros = torch.zeros(len(bounds) - 1, *states.shape[1:], dtype=torch.float32, device=states.device)
    return zeros.index_put((firsts,), states.float())


# ---- mamba_ssm ----


def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None,
                              cu_seqlens=None, dt_softplus=False, dt_limit=(0.0, float("inf")),
                              return_final_states=False, return_varlen_states=False, state_dtype=None):
    """x [B,T,H,P], dt [B,T,H], A [H], B C [B,T,G,N], D [H] or [H,P]; chunk_size is not used.  seq_idx [B,T]: a state ends
    where it changes; initial_states are those of the first sequence of each row, final states those of the last."""
    function = "mamba_chunk_scan_combined"
    if return_varlen_states:
        _refuse(function, "return_varlen_states (gt_kernels.torch.ssd with cu_seqlens has them)")
    if state_dtype not in (None, torch.float32):
        _refuse(function, f"state_dtype {state_dtype}")
    limit = None if dt_softplus and tuple(dt_limit) == (0.0, float("inf")) else dt_limit
    dtype = x.dtype
    x, B, C, z = _together(x, B, C, z)
    options = {"softplus": dt_softplus, "dt_limit": limit, "final_state": True}
    if seq_idx is None:
        y, states = gt.ssd(x, dt, A, B, C, D, z, dt_bias, initial_states, **options)
    else:
        bounds, firsts, lasts = _pack(seq_idx)
        y, states = gt.ssd(_one_row(x), _one_row(dt), A, _one_row(B), _one_row(C), D, _one_row(z), dt_bias,
                           _spread(initial_states, bounds, firsts), cu_seqlens=bounds, **options)
        y, states = y.reshape(x.shape), states[lasts]
    y = y.to(dtype)
    return (y, states) if return_final_states else y


def mamba_split_conv1d_scan_combined(zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, initial_states=None,
                                     seq_idx=None, dt_limit=(0.0, float("inf")), return_final_states=False,
                                     activation="silu", rmsnorm_weight=None, rmsnorm_eps=1e-6, outproj_weight=None,
                                     outproj_bias=None, headdim=None, ngroups=1, norm_before_gate=True,
                                     state_dtype=None):
    """All of a Mamba-2 block behind its in-projection.  zxbcdt [B,T,...], rows of z, x, B, C and dt, and before them,
    if they are longer, both halves of a gated MLP beside it; conv1d_weight [H P + 2 G N,W], D [H] (then headdim is P)
    or [H,P]; chunk_size is not used.  With rmsnorm_weight [H P] a norm of each group and the gate follow the scan, else
    the gate alone; then the product with outproj_weight.  seq_idx and states as in mamba_chunk_scan_combined."""
    function = "mamba_split_conv1d_scan_combined"
    if state_dtype not in (None, torch.float32):
        _refuse(function, f"state_dtype {state_dtype}")
    if outproj_weight is None and outproj_bias is not None:
        _refuse(function, "outproj_bias without outproj_weight")
    if D.dim() == 1 and headdim is None:
        _refuse(function, "D [H] without headdim")
    activation = _activation(function, activation)
    H, P = (D.shape[0], headdim) if D.dim() == 1 else D.shape
    inner, BC = H * P, conv1d_weight.shape[0] - H * P
    N = BC // (2 * ngroups)
    beside = zxbcdt.shape[-1] - 2 * inner - BC - H
    gated, z, xBC, dt = zxbcdt.split([beside, inner, inner + BC, H], -1)
    heads = z.unflatten(-1, (H, P))
    gate = heads if rmsnorm_weight is None else None
    options = {"softplus": True, "dt_limit": None if tuple(dt_limit) == (0.0, float("inf")) else dt_limit,
               "final_state": True}
    lasts = None
    if seq_idx is not None:
        options["cu_seqlens"], firsts, lasts = _pack(seq_idx)
        initial_states = _spread(initial_states, options["cu_seqlens"], firsts)
        xBC, dt, gate = _one_row(xBC), _one_row(dt), _one_row(gate)
    if activation is None:
        bounds = options.get("cu_seqlens")
        x, B, C = gt.conv1d(xBC, conv1d_weight, conv1d_bias, cu_seqlens=bounds).split([inner, BC // 2, BC // 2], -1)
        y, states = gt.ssd(x.unflatten(-1, (H, P)), dt, A, B.unflatten(-1, (ngroups, N)), C.unflatten(-1, (ngroups, N)),
                           D, gate, dt_bias, initial_states, **options)
    else:
        y, _, states = gt.conv_ssd(xBC, dt, conv1d_weight, A, conv1d_bias, D, gate, dt_bias, None, initial_states,
                                   state_size=N, groups=ngroups, **options)
    y = y.reshape(z.shape)
    if rmsnorm_weight is not None:
        y = gt.norm_gate(y, z, rmsnorm_weight, gate_first=not norm_before_gate, heads=ngroups, eps=rmsnorm_eps)
    if beside:
        first, second = gated.chunk(2, -1)
        y = torch.cat([F.silu(first) * second, y], -1)
    if outproj_weight is not None:
        y = F.linear(y, outproj_weight, outproj_bias)
    return (y, states if lasts is None else states[lasts]) if return_final_states else y


def _scan_input(name, B, u):
    """B or C of selective_scan_fn as [B,T,G,N]."""
    if B.is_complex():
        _refuse("selective_scan_fn", f"a complex {name}")
    if B.dim() == 2:  # the same for all tokens, another one for each channel
        return B.expand(u.shape[0], u.shape[2], *B.shape)
    return B.transpose(1, 2).unsqueeze(2) if B.dim() == 3 else B.permute(0, 3, 1, 2)


def selective_scan_fn(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False):
    """u delta z [B,D,T], A [D,N], B C [D,N], [B,N,T] or [B,G,N,T], D delta_bias [D]."""
    if A.is_complex():
        _refuse("selective_scan_fn", "a complex A")
    dtype, B, C = u.dtype, _scan_input("B", B, u), _scan_input("C", C, u)
    u, B, C, z = _together(u.transpose(1, 2), B, C, None if z is None else z.transpose(1, 2))
    y, state = gt.selective_scan(u, delta.transpose(1, 2), A, B, C, D, z, delta_bias, softplus=delta_softplus,
                                 final_state=True)
    y = y.transpose(1, 2).to(dtype)
    return (y, state) if return_last_state else y


@torch.no_grad()
def selective_state_update(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False,
                           state_batch_indices=None):
    """One token.  state [B,D,N] or [B,H,P,N], updated in place; x dt z [B,D] or [B,H,P]; A [D,N] or [H,P,N]; B C [B,N] or
    [B,G,N]; D dt_bias [D] or [H,P].  state_batch_indices [B]: rows of state."""
    shape, dtype = x.shape, x.dtype
    x, B, C, z = _together(x, B, C, z)
    rows = state.reshape(state.shape[0], -1, state.shape[-1])
    pool = rows if rows.dtype == torch.float32 and rows.data_ptr() == state.data_ptr() and rows.is_contiguous() else \
        rows.float().contiguous()

    def channels(tensor):
        return None if tensor is None else tensor.reshape(tensor.shape[0], 1, -1)

    def parameter(tensor):
        return None if tensor is None else tensor.flatten()

    def groups(tensor):
        return tensor[:, None, None] if tensor.dim() == 2 else tensor[:, None]

    y = gt.selective_scan_step(
        channels(x), channels(dt), A.reshape(-1, A.shape[-1]), groups(B), groups(C), parameter(D),
        channels(z), parameter(dt_bias), pool, softplus=dt_softplus,
        slots=state_batch_indices)
    if pool is not rows or rows.data_ptr() != state.data_ptr():
        state.copy_(pool.reshape(state.shape))
    return y.reshape(shape).to(dtype)


def layernorm_fn(x, weight, bias, z=None, eps=1e-6, group_size=None, norm_before_gate=True, is_rms_norm=False):
    """norm(x) weight + bias, gated with SiLU(z): the norm of each group of group_size channels, None: of all."""
    size = x.shape[-1] if group_size is None else group_size
    dtype = x.dtype
    x, z = _together(x, z)
    y = gt.norm_gate(x, z, weight, bias, norm="rms" if is_rms_norm else "layer", gate_first=not norm_before_gate,
                     heads=x.shape[-1] // size, eps=eps)
    return y.to(dtype)


def rms_norm_gated(x, weight, bias=None, z=None, eps=1e-6, group_size=None, norm_before_gate=True):
    """As layernorm_fn, with RMSNorm."""
    return layernorm_fn(x, weight, bias, z, eps, group_size, norm_before_gate, is_rms_norm=True)


rmsnorm_fn = rms_norm_gated  # its name in mamba_ssm.ops.triton.layernorm_gated

# ---- causal-conv1d ----


def _activation(function, activation):
    if activation not in (None, "silu", "swish"):
        _refuse(function, f"activation {activation!r}")
    return activation


def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False,
                     final_states_out=None, activation=None):
    """x [B,D,T], weight [D,W] with W 2 to 4, bias [D], initial_states and final_states_out [B,D,W-1].  seq_idx [B,T]:
    a sequence ends where it changes; y is 0 where it is negative."""
    function = "causal_conv1d_fn"
    activation, rows = _activation(function, activation), x.transpose(1, 2)
    if seq_idx is not None:
        if initial_states is not None or return_final_states:
            _refuse(function, "seq_idx with states")
        bounds, _, _ = _pack(seq_idx)
        y = gt.conv1d(_one_row(rows), weight, bias, activation=activation, cu_seqlens=bounds).reshape(rows.shape)
        return torch.where((seq_idx < 0)[..., None], 0, y).transpose(1, 2)
    y, states = gt.conv1d(rows, weight, bias, initial_states, activation=activation, final_state=True)
    if not return_final_states:
        return y.transpose(1, 2)
    states = states.to(x.dtype)
    return y.transpose(1, 2), states if final_states_out is None else final_states_out.copy_(states)


@torch.no_grad()
def causal_conv1d_update(x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, conv_state_indices=None):
    """New tokens: x [B,D] or [B,D,T]; conv_state [B,D,S], S at least W - 1, the last S inputs, updated in place.
    cache_seqlens [B]: conv_state is a ring, and these its next places.  conv_state_indices [B]: rows of conv_state; a
    negative one skips the element, its y is 0."""
    activation = _activation("causal_conv1d_update", activation)
    tokens = x.unsqueeze(-1) if x.dim() == 2 else x
    T, W, S = tokens.shape[2], weight.shape[1], conv_state.shape[2]
    if (cache_seqlens is None and S == W - 1 and 1 <= T <= 16 and conv_state.dtype == torch.float32
            and conv_state.is_contiguous()):
        y = gt.conv1d_step(tokens.transpose(1, 2), weight, bias, conv_state, activation=activation,
                           slots=conv_state_indices).transpose(1, 2)
        return y.squeeze(-1) if x.dim() == 2 else y
    rows = conv_state if conv_state_indices is None else conv_state[conv_state_indices.long().clamp_min(0)]
    if cache_seqlens is None:
        before = rows[..., S - (W - 1):]
        after = torch.cat([rows, tokens.to(rows.dtype)], -1)[..., T:]
    else:
        places = torch.arange(-(W - 1), T, device=x.device) + cache_seqlens.long()[:, None]
        places = (places % S)[:, None].expand(-1, rows.shape[1], -1)
        before = rows.gather(2, places[..., :W - 1])
        new = min(T, S)  # of more tokens than places the last ones stay
        after = rows.scatter(2, places[..., places.shape[2] - new:], tokens[..., T - new:].to(rows.dtype))
    y = gt.conv1d(tokens.transpose(1, 2), weight, bias, before, activation=activation).transpose(1, 2)
    if conv_state_indices is None:
        conv_state.copy_(after)
    else:
        used = conv_state_indices >= 0
        conv_state[conv_state_indices[used].long()] = after[used]
        y = torch.where(used[:, None, None], y, 0)
    return y.squeeze(-1) if x.dim() == 2 else y


# ---- RWKV-LM ----


def RUN_CUDA_RWKV6(B, T, C, H, r, k, v, w, u):
    """r k v w [B,T,C], decay exp(-exp(w)), u [H,C/H] -> [B,T,C]."""
    r, k, v, w = (t.view(B, T, H, C // H) for t in (r, k, v, w))
    return gt.wkv6(r, k, v, w, u.view(H, C // H)).view(B, T, C)
