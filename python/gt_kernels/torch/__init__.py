"""The operators of gt_kernels as PyTorch functions with autograd.

    from gt_kernels.torch import wkv6
    y = wkv6(r, k, v, w, u)                                   # [B,T,H,N], as RWKV-6 trains it
    y, state = wkv6(r, k, v, w, u, state, final_state=True)

True of every function
  Tensors    are [batch, time, ...]; those of norms are [..., channels].  gt_kernels.h has the formulas and shapes.
  Devices    CUDA tensors run the kernels, on the current stream; CPU tensors run the twins, which are plain C.
  dtypes     activations are float32, bfloat16 or float16, all the same; w and dt may be float32 beside 16 bits.  Under
             autocast activations are cast to its dtype.  Parameters and states are float32; a parameter of another
             dtype is converted (its gradient, too).
  Strides    of any [B,T,H,N], [B,H,T,N], [B,D,T] or slice are read in place, and [B,G,N,T] of Bm and Cm in
             selective_scan.  What no layout of the C API has, such as
             an expanded tensor, is copied; warn_on_copy(True) says so, once for each operator and tensor.
  States     are float32, packed; one without the batch index is shared by the whole batch.  final_state=True returns
             (y, state) instead of y.  Gradients pass through states.
  Packed     sequences of different lengths, without padding: batch 1, and cu_seqlens [sequences + 1] on the same
             device.  Sequence s has the tokens cu_seqlens[s] to cu_seqlens[s+1]-1.  A state is then one for each
             sequence.  seq_count [1] on the device: how many of them there are, if fewer.
  recompute  True: nothing is saved for backward but the inputs; it computes again what it needs.
  Results    repeat bit for bit.  No gradients of gradients.
  Errors     are gt_kernels.ArgumentError (a ValueError), UnsupportedError (a NotImplementedError) or Error.

torch.compile takes all of them into one graph (fullgraph=True).  It makes a graph for each shape.
"""

import torch

from .. import c
from . import _engine

__all__ = ["conv1d", "conv1d_step", "norm_gate", "norm_mix", "rmsnorm_linear", "selective_scan", "selective_scan_step",
           "ssd", "ssd_step", "warn_on_copy", "wkv6", "wkv6_step"]

_DECAY = {"raw": c.GT_DECAY_RAW, "log": c.GT_DECAY_LOG}
_ACTIVATION = {None: c.GT_ACT_NONE, "silu": c.GT_ACT_SILU, "swish": c.GT_ACT_SILU}
_NORM = {"rms": c.GT_NORM_RMS, "layer": c.GT_NORM_LAYER}
_ops = torch.ops.gt_kernels


def warn_on_copy(enabled=True):
    """Whether a tensor that has to be copied gives a warning, one for each operator and tensor."""
    _engine.warn_on_copy[0] = bool(enabled)
    _engine._warned.clear()


def _choice(operator, name, choices, value):
    if value not in choices:
        raise c.ArgumentError(c.GT_ERROR_VALUE, f"gt_kernels.torch.{operator}: {name} = {value!r}: must be "
                              + " or ".join(map(repr, choices)))
    return choices[value]


def _scale(operator, scale):
    """To the C API 0 is the default, 1: here it is an error."""
    if scale == 0:
        raise c.ArgumentError(c.GT_ERROR_VALUE, f"gt_kernels.torch.{operator}: scale = 0")
    return float(scale)


def _float(tensor):
    return tensor if tensor is None or tensor.dtype == torch.float32 else tensor.float()


def _int32(tensor):
    return tensor if tensor is None or tensor.dtype == torch.int32 else tensor.to(torch.int32)


def _cast(*tensors):
    """Activations as autocast has them."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(None if tensor is None else tensor.to(dtype) for tensor in tensors)


def _companion(tensor, activation):
    """w or dt: of the activations' dtype, or float32."""
    return tensor if tensor.dtype in (activation.dtype, torch.float32) else tensor.to(activation.dtype)


def _has_gradient(*tensors):
    """Whether a backward pass may come."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def _refuse_gradients(operator, *tensors):
    if _has_gradient(*tensors):
        raise c.UnsupportedError(c.GT_ERROR_UNSUPPORTED, f"gt_kernels.torch.{operator}: it updates the state in place and "
                                 "has no gradients: call it under torch.no_grad(), or the function without _step")


def _call(infer, forward, arguments, final_state, recompute, *tensors):
    """forward of a recurrent operator; `tensors`: those whose gradients may be asked for."""
    if not _has_gradient(*tensors):
        results = infer(*arguments, final_state)
        return (results[0], results[1]) if final_state else results[0]
    results = forward(*arguments, final_state, *(() if recompute is None else (not recompute,)))
    return (results[0], results[1]) if final_state else results[0]


def wkv6(r, k, v, w, u=None, state=None, *, decay="raw", scale=1.0, final_state=False, cu_seqlens=None, seq_count=None,
         segments=0, recompute=False):
    """RWKV-6 time mixing.  r k w [B,T,H,N], v [B,T,H,V], u [H,N] (None: 0), state [B,H,N,V] (None: 0) -> y [B,T,H,V].
    decay: "raw", exp(-exp(w)) as RWKV-6 trains it, or "log", exp(w) with w <= 0.  The token sees the state before it,
    and itself with the bonus u.  y is multiplied by scale."""
    decay, scale = _choice("wkv6", "decay", _DECAY, decay), _scale("wkv6", scale)
    r, k, v = _cast(r, k, v)
    arguments = (r, k, v, _companion(w, r), _float(u), _float(state), _int32(cu_seqlens), _int32(seq_count), decay,
                 scale, segments)
    return _call(_ops.wkv6_infer, _ops.wkv6_forward, arguments, final_state, recompute, r, k, v, w, u, state)


def wkv6_step(r, k, v, w, u, state, *, decay="raw", scale=1.0, slots=None):
    """1 to 16 new tokens: as wkv6, with `state` read and updated in place.  With slots [B] (int32) state is a pool
    [rows,H,N,V], of which batch element b has row slots[b]; one outside of the pool is skipped, its y is 0."""
    decay, scale = _choice("wkv6_step", "decay", _DECAY, decay), _scale("wkv6_step", scale)
    r, k, v = _cast(r, k, v)
    _refuse_gradients("wkv6_step", r, k, v, w, u, state)
    return _ops.wkv6_step(r, k, v, _companion(w, r), _float(u), state, _int32(slots), decay, scale, 0)


def _dt_limit(dt_limit):
    low, high = (0.0, float("inf")) if dt_limit is None else dt_limit
    return (0, 0.0, 0.0) if dt_limit is None else (1, float(low), float(high))


def ssd(x, dt, A, Bm, Cm, Dskip=None, z=None, dt_bias=None, state=None, *, softplus=False, dt_limit=None,
        final_state=False, cu_seqlens=None, seq_count=None, segments=0, recompute=False):
    """Mamba-2's state space duality.  x z [B,T,H,P], dt [B,T,H], A dt_bias [H], Bm Cm [B,T,G,N], Dskip [H] or [H,P],
    state [B,H,P,N] -> y [B,T,H,P].  softplus: of dt + dt_bias.  dt_limit: (smallest, largest) dt after that.  z gates y
    with SiLU."""
    x, Bm, Cm, z = _cast(x, Bm, Cm, z)
    arguments = (x, _companion(dt, x), _float(A), Bm, Cm, _float(Dskip), z, _float(dt_bias), _float(state),
                 _int32(cu_seqlens), _int32(seq_count), int(softplus), *_dt_limit(dt_limit), segments)
    return _call(_ops.ssd_infer, _ops.ssd_forward, arguments, final_state, recompute, x, dt, A, Bm, Cm, Dskip, z, dt_bias,
                 state)


def ssd_step(x, dt, A, Bm, Cm, Dskip, z, dt_bias, state, *, softplus=False, dt_limit=None, slots=None):
    """1 to 16 new tokens: as ssd, with `state` read and updated in place; slots as in wkv6_step."""
    x, Bm, Cm, z = _cast(x, Bm, Cm, z)
    _refuse_gradients("ssd_step", x, dt, A, Bm, Cm, Dskip, z, dt_bias, state)
    return _ops.ssd_step(x, _companion(dt, x), _float(A), Bm, Cm, _float(Dskip), z, _float(dt_bias), state, _int32(slots),
                         int(softplus), *_dt_limit(dt_limit), 0)


def selective_scan(u, dt, A, Bm, Cm, Dskip=None, z=None, dt_bias=None, state=None, *, softplus=False, final_state=False,
                   cu_seqlens=None, seq_count=None, segments=0, recompute=False):
    """Mamba-1's scan.  u dt z [B,T,D], A [D,N], Bm Cm [B,T,G,N], Dskip dt_bias [D], state [B,D,N] -> y [B,T,D].
    softplus: of dt + dt_bias.  z gates y with SiLU."""
    u, Bm, Cm, z = _cast(u, Bm, Cm, z)
    arguments = (u, _companion(dt, u), _float(A), Bm, Cm, _float(Dskip), z, _float(dt_bias), _float(state),
                 _int32(cu_seqlens), _int32(seq_count), int(softplus), segments)
    return _call(_ops.selective_scan_infer, _ops.selective_scan_forward, arguments, final_state, recompute, u, dt, A, Bm,
                 Cm, Dskip, z, dt_bias, state)


def selective_scan_step(u, dt, A, Bm, Cm, Dskip, z, dt_bias, state, *, softplus=False, slots=None):
    """1 to 16 new tokens: as selective_scan, with `state` read and updated in place; slots as in wkv6_step."""
    u, Bm, Cm, z = _cast(u, Bm, Cm, z)
    _refuse_gradients("selective_scan_step", u, dt, A, Bm, Cm, Dskip, z, dt_bias, state)
    return _ops.selective_scan_step(u, _companion(dt, u), _float(A), Bm, Cm, _float(Dskip), z, _float(dt_bias), state,
                                    _int32(slots), int(softplus), 0)


def conv1d(x, weight, bias=None, state=None, *, activation=None, final_state=False, cu_seqlens=None, seq_count=None):
    """Causal depthwise convolution.  x [B,T,D], weight [D,W] with W 2 to 4, bias [D], state [B,D,W-1], the inputs before
    the first, oldest first -> y [B,T,D].  activation: None or "silu"."""
    activation = _choice("conv1d", "activation", _ACTIVATION, activation)
    x, = _cast(x)
    arguments = (x, _float(weight), _float(bias), _float(state), _int32(cu_seqlens), _int32(seq_count), activation)
    return _call(_ops.conv1d_infer, _ops.conv1d_forward, arguments, final_state, None, x, weight, bias, state)


def conv1d_step(x, weight, bias, state, *, activation=None, slots=None):
    """1 to 16 new tokens: as conv1d, with `state` read and updated in place; slots as in wkv6_step."""
    activation = _choice("conv1d_step", "activation", _ACTIVATION, activation)
    x, = _cast(x)
    _refuse_gradients("conv1d_step", x, weight, bias, state)
    return _ops.conv1d_step(x, _float(weight), _float(bias), state, _int32(slots), activation)


def rmsnorm_linear(x, weight, gamma=None, beta=None, bias=None, *, norm="rms", eps=1e-5, recompute=False):
    """RMSNorm or LayerNorm (norm="layer"), then a projection: (norm(x) gamma + beta) weight^T + bias.  x [...,D], weight
    [O,D] of the dtype of x, gamma beta [D], bias [O] -> [...,O]."""
    norm = _choice("rmsnorm_linear", "norm", _NORM, norm)
    x, weight = _cast(x, weight)
    arguments = (x, weight, _float(gamma), _float(beta), _float(bias), norm, eps)
    if not _has_gradient(x, weight, gamma, beta, bias):
        return _ops.rmsnorm_linear_infer(*arguments)[0]
    return _ops.rmsnorm_linear_forward(*arguments, not recompute)[0]


def norm_mix(a, b, gain_a=None, gain_b=None, residual=None, *, heads=1, eps=1e-5):
    """residual + gain_a RMSNorm(a) + gain_b RMSNorm(b).  a b residual [...,D], gains [D] (None: 1).  The mean square is
    that of each of `heads` equal slices."""
    a, b, residual = _cast(a, b, residual)
    arguments = (a, b, _float(gain_a), _float(gain_b), residual, heads, eps)
    if not _has_gradient(a, b, gain_a, gain_b, residual):
        return _ops.norm_mix_infer(*arguments)[0]
    return _ops.norm_mix_forward(*arguments)


def norm_gate(x, z=None, gamma=None, beta=None, *, norm="rms", gate_first=False, heads=1, eps=1e-5):
    """(norm(x) gamma + beta) SiLU(z), or norm(x SiLU(z)) gamma + beta with gate_first.  x z [...,D], gamma beta [D].
    The norm is that of each of `heads` equal slices."""
    norm = _choice("norm_gate", "norm", _NORM, norm)
    x, z = _cast(x, z)
    arguments = (x, z, _float(gamma), _float(beta), norm, int(gate_first), heads, eps)
    if not _has_gradient(x, z, gamma, beta):
        return _ops.norm_gate_infer(*arguments)[0]
    return _ops.norm_gate_forward(*arguments)
