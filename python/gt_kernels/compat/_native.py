"""Functions of the compiled modules selective_scan_cuda and causal_conv1d_cuda, which some clients call directly.

They do not use autograd.  Each backward function computes its forward pass again."""

import torch
import torch.nn.functional as F

from .. import torch as gt


def _leaves(tensors):
    return [None if tensor is None else tensor.detach().requires_grad_() for tensor in tensors]


def _gradients(y, dy, leaves):
    found = iter(torch.autograd.grad(y, [leaf for leaf in leaves if leaf is not None], dy.to(y.dtype)))
    return [None if leaf is None else next(found) for leaf in leaves]


def scan_fwd(u, delta, A, B, C, D, z, delta_bias, delta_softplus, cu_seqlens=None):
    """u delta z [B,D,T], A [D,N], B C [B,G,N,T] or [D,N], D delta_bias [D] -> [y before the gate, x], with z also y
    after the gate.  x [B,D,1,2N] has the last state at odd indices of the last dimension, where callers read it, and 0
    at even ones."""
    from . import selective_scan_fn
    with torch.no_grad():
        y, state = selective_scan_fn(u, delta, A, B, C, D, None, delta_bias, delta_softplus, True, cu_seqlens)
        x = torch.stack([torch.zeros_like(state), state], -1).flatten(-2).unsqueeze(2)
        return [y, x] if z is None else [y, x, (y * F.silu(z.float()).to(y.dtype))]


def scan_bwd(u, delta, A, B, C, D, z, delta_bias, dout, x, out, dz, delta_softplus, recompute_out_z, cu_seqlens=None):
    """Returns the gradients of u, delta, A, B, C, D and delta_bias.  With z it also returns dz, in the memory given for
    dz if any, and with recompute_out_z y.  The function does not use scan_fwd's results x and out."""
    from . import selective_scan_fn
    leaves = _leaves((u, delta, A, B, C, D, delta_bias, z))
    with torch.enable_grad():
        y = selective_scan_fn(*leaves[:6], leaves[7], leaves[6], delta_softplus, cu_seqlens=cu_seqlens)
        *found, gate = _gradients(y, dout, leaves)
    if z is None:
        return found
    found.append(gate if dz is None else dz.copy_(gate))
    return [*found, y.detach()] if recompute_out_z else found


def conv_fwd(x, weight, bias, seq_idx, initial_states, final_states_out, silu):
    """x [B,D,T], weight [D,W] -> y [B,D,T], as in causal_conv1d_fn."""
    from . import causal_conv1d_fn
    with torch.no_grad():
        wanted = final_states_out is not None
        y = causal_conv1d_fn(x, weight, bias, seq_idx, initial_states, wanted, final_states_out, "silu" if silu else None)
        return y[0] if wanted else y


def conv_bwd(x, weight, bias, dout, seq_idx, initial_states, dfinal_states, dx, return_dinitial_states, silu):
    """Returns [dx, dweight, dbias or None, dinitial_states or None].  dx is in the memory given for dx, if any.
    dinitial_states is computed on request."""
    from . import causal_conv1d_fn
    leaves = _leaves((x, weight, bias, initial_states))
    with torch.enable_grad():
        y = causal_conv1d_fn(leaves[0], leaves[1], leaves[2], seq_idx, leaves[3], dfinal_states is not None, None,
                             "silu" if silu else None)
        if dfinal_states is not None:
            used = [leaf for leaf in leaves if leaf is not None]
            found = iter(torch.autograd.grad(y, used, (dout, dfinal_states)))
            found = [None if leaf is None else next(found) for leaf in leaves]
        else:
            found = _gradients(y, dout, leaves)
    if dx is not None:
        found[0] = dx.copy_(found[0])
    return [*found[:3], found[3] if return_dinitial_states else None]


def layer_norm_fwd(x, weight, bias, eps, residual=None, residual_dtype=None, is_rms_norm=False):
    """Returns (norm(x) weight + bias,), the first result of mamba_ssm's _layer_norm_fwd.  x [...,D].  A residual raises
    UnsupportedError; layer_norm_fn takes one."""
    if residual is not None:
        from .._arguments import refuse
        from .. import c
        refuse("gt_kernels.compat._layer_norm_fwd", "residual is not supported: use layer_norm_fn",
               c.GT_ERROR_UNSUPPORTED)
    return (gt.norm_gate(x, None, weight, bias, norm="rms" if is_rms_norm else "layer", eps=eps),)
