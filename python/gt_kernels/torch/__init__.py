"""The operators of gt_kernels as PyTorch functions with autograd.

    from gt_kernels.torch import wkv6
    y = wkv6(r, k, v, w, u)                                   # [B,T,H,N], as RWKV-6 trains it
    y, state = wkv6(r, k, v, w, u, state, final_state=True)

For every function
  Tensors    have shape [batch, time, ...]; tensors of norms have shape [..., channels].  gt_kernels.h has the formulas
             and shapes.
  Devices    CUDA tensors run the kernels, on the current stream; CPU tensors run the twins, which are plain C.
  dtypes     All activations have the same dtype: float32, bfloat16 or float16.  w, dt and the residual of add_norm may
             be float32 beside 16-bit activations.  Under autocast, activations are cast to its dtype.  Parameters and
             states are float32; a parameter of another dtype is converted, and so is its gradient.
  Strides    [B,T,H,N], [B,H,T,N], [B,D,T] and slices of these are read in place; selective_scan also reads Bm and Cm in
             [B,G,N,T].  A tensor whose layout the C API does not have, such as an expanded tensor, is copied.
             warn_on_copy(True) reports copies, once for each operator and tensor.
  States     are float32, packed.  A state without the batch index is shared by the whole batch.  final_state=True
             returns (y, state) instead of y, or y and both states if there are two.  Gradients pass through states.
  Packed     Sequences of different lengths, without padding, have batch 1 and cu_seqlens [sequences + 1] on the same
             device.  Sequence s has the tokens cu_seqlens[s] to cu_seqlens[s+1]-1.  Each sequence then has its own
             state.  seq_count [1] on the device is the number of sequences, if there are fewer than cu_seqlens can
             hold.
  Pools      wkv6, ssd, conv1d and conv_ssd take packed sequences with slots [sequences].  state is then a pool of rows,
             and slots[s] is the row of sequence s.  The call reads the sequence's state from this row and updates the
             row in place.  It returns only y, which has no gradients.  starts_zero [sequences], bool or integers: a
             sequence whose element is not 0 starts from zero.  A sequence whose row lies outside of the pool is
             skipped; its y is 0.  No two sequences may have the same row.  Rows may lie apart; conv1d takes a pool in
             any strides.  A pool may be bfloat16 or float16: each new state is then rounded to nearest.  The two pools
             of conv_ssd may have different dtypes.
  Snapshots  wkv6, ssd and conv_ssd also write the states of prefixes, for prefix caches: the state of each sequence
             after every snapshot_every tokens.  snapshot_every is a multiple of 128.  The call writes them to
             `snapshots`, a buffer of the caller, and conv_ssd writes states of the convolution to conv_snapshots.  With
             cu_seqlens, with or without slots, the buffer has shape [floor(T / snapshot_every), ...]; "..." is the
             shape of a state.  Snapshot i of sequence s is row floor(cu_seqlens[s] / snapshot_every) + i.  The call
             does not write other rows.  Without cu_seqlens the shape is [B, floor(T / snapshot_every), ...].  Buffers
             are contiguous, and float32, bfloat16 or float16, whatever dtype the states have; but conv_snapshots has
             the dtype of conv_state.  A call with snapshots has no gradients.  With segments=1 a float32 snapshot has
             the bits of the final state of a call on only the prefix.
  recompute  True: forward saves only its inputs for backward, and backward computes the rest again.  wkv_ssm with
             mixed=True still keeps the outputs whose gains require gradients.
  Results    repeat bit for bit.  Gradients of gradients are not supported.
  Transforms torch.func and forward-mode derivatives work or raise an error; no tangent is lost.
  Numbers    eps and scale must be positive in float32; 0 does not mean a default.  Integer tensors are int32 or int64.
             An int64 value beyond int32 counts as out of range.  A sequence with such a slot is skipped; such a value
             in cu_seqlens is refused.
  Errors     are gt_kernels.ArgumentError (a ValueError), UnsupportedError (a NotImplementedError) or Error.  They name
             the function that was called and its argument.

torch.compile takes every function into one graph (fullgraph=True), and torch.export exports this graph.  Batch and
length may be dynamic: one graph then serves all sizes.  With a dynamic length and gradients, mode="reduce-overhead"
needs recompute=True, because the compiler does not know how many bytes forward saves on a GPU.
"""

import torch

from .. import c
from .._arguments import flag, integer, number, refuse
from . import _engine

__all__ = ["add_norm", "conv1d", "conv1d_step", "conv_ssd", "norm_gate", "norm_mix", "rmsnorm_linear",
           "selective_scan", "selective_scan_step", "ssd", "ssd_step", "warn_on_copy", "wkv4", "wkv4_step", "wkv6",
           "wkv6_step", "wkv_ssm", "wkv_ssm_step"]

_DECAY = {"raw": c.GT_DECAY_RAW, "log": c.GT_DECAY_LOG}
_ACTIVATION = {None: c.GT_ACT_NONE, "silu": c.GT_ACT_SILU, "swish": c.GT_ACT_SILU}
_NORM = {"rms": c.GT_NORM_RMS, "layer": c.GT_NORM_LAYER}
_ops = torch.ops.gt_kernels


def warn_on_copy(enabled=True):
    """Turns warnings about copied tensors on or off.  There is one warning for each operator and tensor."""
    _engine.warn_on_copy[0] = bool(enabled)
    _engine._warned.clear()


def _choice(operator, name, choices, value):
    if not isinstance(value, (str, type(None))) or value not in choices:
        refuse(f"gt_kernels.torch.{operator}", f"{name} = {value!r}: must be " + " or ".join(map(repr, choices)))
    return choices[value]


def _flag(operator, name, value):
    return int(value) if value is False or value is True else flag(f"gt_kernels.torch.{operator}", name, value)


def _int(operator, name, value):
    return value if type(value) is int else integer(f"gt_kernels.torch.{operator}", name, value)


def _float(operator, name, value):
    return value if type(value) is float else number(f"gt_kernels.torch.{operator}", name, value)


def _dt_limit(operator, dt_limit):
    if dt_limit is None:
        return 0, 0.0, 0.0
    try:
        low, high = dt_limit
    except (TypeError, ValueError):
        refuse(f"gt_kernels.torch.{operator}", f"dt_limit = {dt_limit!r}: must be (smallest, largest) or None")
    return 1, _float(operator, "dt_limit[0]", low), _float(operator, "dt_limit[1]", high)


def _call(name, tensors, options, final_state=False, recompute=False, slots=None, starts_zero=None, snapshots=(),
          snapshot_every=0):
    """Calls forward.  `tensors` are in the order of the operator's table, followed by the packed sequences.
    `snapshots`: the operator's buffers of snapshots, each a tensor or None."""
    engine = _engine.ENGINES[name]
    name = engine.operator.c_name
    final_state, recompute = _flag(name, "final_state", final_state), _flag(name, "recompute", recompute)
    every = (_int(name, "snapshot_every", snapshot_every),) * len(snapshots)
    keeps = any(buffer is not None for buffer in snapshots)
    if snapshot_every and not keeps:
        refuse(f"gt_kernels.torch.{name}", f"snapshot_every = {snapshot_every}: has no effect without snapshots")
    if slots is not None:
        if final_state:
            refuse(f"gt_kernels.torch.{name}", "final_state = True: must be False with slots, because "
                   "final states go to rows of the pool")
        if isinstance(starts_zero, torch.Tensor) and starts_zero.dtype == torch.bool:
            starts_zero = starts_zero.to(torch.int32)
        return _update("pool", name, (*tensors, slots, starts_zero, *snapshots), options + every[:1])[0]
    if starts_zero is not None:
        refuse(f"gt_kernels.torch.{name}", "starts_zero is given without slots")
    if keeps:
        results = _update("snapshots", name, (*tensors, *snapshots), options + every[:1])
        return tuple(results) if final_state else results[0]
    if torch.compiler.is_dynamo_compiling():
        tensors = engine.convert("infer", tensors)
        results = engine.dispatch(tensors, engine.rest(tensors, options, final_state, recompute))
    else:
        results = engine.call(tensors, options, final_state, recompute)
    return tuple(results) if final_state or engine.y_count > 1 else results[0]


def _rounding(function, rounding):
    if rounding is None:
        return None, None
    try:
        seed, steps = rounding
    except (TypeError, ValueError):
        refuse(f"gt_kernels.torch.{function}", f"rounding = {rounding!r}: must be (seed, steps) or None")
    return seed, steps


def _update(call, name, tensors, options):
    engine = _engine.ENGINES[name]
    if torch.compiler.is_dynamo_compiling():
        return engine.dispatch_update(call, engine.convert(call, tensors), options)
    return engine.update(call, tensors, options)


def _step(name, tensors, options):
    results = _update("step", name, tensors, options)
    return tuple(results) if len(results) > 1 else results[0]


def _mixed(function, mixed, gains, residual, tensors):
    """The tensors that only a mixed call of wkv_ssm has, or () if the call is not one.  A gain of a head becomes the
    gain of its channels.  gains: gain_wkv, gain_ssm.  tensors: v, x."""
    if not _flag(function, "mixed", mixed):
        for name, value in zip(("gain_wkv", "gain_ssm", "residual"), (*gains, residual)):
            if value is not None:
                refuse(f"gt_kernels.torch.{function}", f"{name} is given, but mixed = False")
        return ()

    def of_channels(gain, tensor):
        are_dense = all(isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_nested
                        for value in (gain, tensor))
        if are_dense and gain.dim() == 1 and tensor.dim() == 4 and gain.shape[0] == tensor.shape[2]:
            return gain[:, None].expand(-1, tensor.shape[3]).contiguous()
        return gain
    return (*map(of_channels, gains, tensors), residual)


def wkv6(r, k, v, w, u=None, state=None, *, decay="raw", scale=1.0, final_state=False, cu_seqlens=None,
         seq_count=None, slots=None, starts_zero=None, segments=0, recompute=False, snapshots=None, snapshot_every=0):
    """RWKV-6 time mixing.  r k w [B,T,H,N], v [B,T,H,V], u [H,N] (None: 0), state [B,H,N,V] (None: 0) -> y [B,T,H,V].
    decay="raw": the decay is exp(-exp(w)), as RWKV-6 trains it.  decay="log": the decay is exp(w), with w <= 0.  A
    token reads the state before it, and adds itself with the bonus u.  y is multiplied by scale."""
    options = (_choice("wkv6", "decay", _DECAY, decay), _float("wkv6", "scale", scale),
               _int("wkv6", "segments", segments))
    return _call("wkv6", (r, k, v, w, u, state, cu_seqlens, seq_count), options, final_state, recompute, slots,
                 starts_zero, (snapshots,), snapshot_every)


def wkv6_step(r, k, v, w, u, state, *, decay="raw", scale=1.0, slots=None, tokens=None, commit=None, rounding=None):
    """Like wkv6, for 1 to 16 new tokens; reads `state` and updates it in place.  With slots [B] (int32), state is a
    pool [rows,H,N,V], and batch element b has row slots[b].  An element whose row lies outside of the pool is skipped;
    its y is 0.  state is float32, bfloat16 or float16.  A 16-bit state is rounded once, after the call's tokens.  It is
    rounded to nearest or, with rounding = (seed [2], steps [B]), both int32, at random with the right mean.  Give each
    layer its own seed, and set steps to the number of tokens so far.  For speculative decoding, element b has tokens[b]
    of the T tokens (None: T), and y is 0 for the others.  The first commit[b] of its tokens enter the state (None: all
    of its tokens); send the other tokens again.  Both are int32 [B].  An element is skipped unless 0 <= commit[b] <=
    tokens[b] <= T."""
    options = (_choice("wkv6_step", "decay", _DECAY, decay), _float("wkv6_step", "scale", scale), 0)
    return _step("wkv6", (r, k, v, w, u, state, slots, tokens, commit, *_rounding("wkv6_step", rounding)), options)


def ssd(x, dt, A, Bm, Cm, Dskip=None, z=None, dt_bias=None, state=None, *, softplus=False, dt_limit=None,
        final_state=False, cu_seqlens=None, seq_count=None, slots=None, starts_zero=None, segments=0, recompute=False,
        snapshots=None, snapshot_every=0):
    """Mamba-2's state space duality.  x z [B,T,H,P], dt [B,T,H], A dt_bias [H], Bm Cm [B,T,G,N], Dskip [H] or [H,P],
    state [B,H,P,N] -> y [B,T,H,P].  The time step is dt + dt_bias, or with softplus=True the softplus of this sum.
    dt_limit = (smallest, largest) then clamps it.  z gates y with SiLU.  In bfloat16 on a GPU, backward computes the
    gradient of z from y.  So do not change y in place before backward."""
    return _call("ssd", (x, dt, A, Bm, Cm, Dskip, z, dt_bias, state, cu_seqlens, seq_count),
                 (_flag("ssd", "softplus", softplus), *_dt_limit("ssd", dt_limit),
                  _int("ssd", "segments", segments)), final_state, recompute, slots, starts_zero, (snapshots,),
                 snapshot_every)


def ssd_step(x, dt, A, Bm, Cm, Dskip, z, dt_bias, state, *, softplus=False, dt_limit=None, slots=None, tokens=None,
             commit=None, rounding=None):
    """Like ssd, for 1 to 16 new tokens; updates `state` in place.  slots, tokens, commit and rounding are as in
    wkv6_step."""
    return _step("ssd", (x, dt, A, Bm, Cm, Dskip, z, dt_bias, state, slots, tokens, commit,
                         *_rounding("ssd_step", rounding)),
                 (_flag("ssd_step", "softplus", softplus), *_dt_limit("ssd_step", dt_limit), 0))


def selective_scan(u, dt, A, Bm, Cm, Dskip=None, z=None, dt_bias=None, state=None, *, softplus=False, final_state=False,
                   cu_seqlens=None, seq_count=None, segments=0, recompute=False):
    """Mamba-1's scan.  u dt z [B,T,D], A [D,N], Bm Cm [B,T,G,N], Dskip dt_bias [D], state [B,D,N] -> y [B,T,D].  The
    time step is dt + dt_bias, or with softplus=True the softplus of this sum.  z gates y with SiLU."""
    return _call("selective_scan", (u, dt, A, Bm, Cm, Dskip, z, dt_bias, state, cu_seqlens, seq_count),
                 (_flag("selective_scan", "softplus", softplus), _int("selective_scan", "segments", segments)),
                 final_state, recompute)


def selective_scan_step(u, dt, A, Bm, Cm, Dskip, z, dt_bias, state, *, softplus=False, slots=None, tokens=None,
                        commit=None, rounding=None):
    """Like selective_scan, for 1 to 16 new tokens; updates `state` in place.  slots, tokens, commit and rounding are
    as in wkv6_step."""
    return _step("selective_scan", (u, dt, A, Bm, Cm, Dskip, z, dt_bias, state, slots, tokens, commit,
                                    *_rounding("selective_scan_step", rounding)),
                 (_flag("selective_scan_step", "softplus", softplus), 0))


def conv1d(x, weight, bias=None, state=None, *, activation=None, final_state=False, cu_seqlens=None, seq_count=None,
           slots=None, starts_zero=None):
    """Causal depthwise convolution.  x [B,T,D], weight [D,W] with W from 2 to 4, bias [D], state [B,D,W-1] -> y
    [B,T,D].  The state has the inputs before the first token, oldest first.  activation: None or "silu"."""
    activation = _choice("conv1d", "activation", _ACTIVATION, activation)
    return _call("conv1d", (x, weight, bias, state, cu_seqlens, seq_count), (activation,), final_state, False, slots,
                 starts_zero)


def conv1d_step(x, weight, bias, state, *, activation=None, slots=None, tokens=None, commit=None, places=None):
    """Like conv1d, for 1 to 16 new tokens; updates `state` in place.  slots, tokens and commit are as in wkv6_step.
    state is [B,D,S] with S of at least W - 1 inputs, in any strides.  With places [B] (int32) it is a ring: the next
    input of element b goes to column places[b] modulo S."""
    activation = _choice("conv1d_step", "activation", _ACTIVATION, activation)
    return _step("conv1d", (x, weight, bias, state, slots, tokens, commit, places), (activation,))


def wkv4(k, v, w, u=None, state=None, *, decay="raw", final_state=False, cu_seqlens=None, seq_count=None, segments=0,
         recompute=False):
    """RWKV-4 time mixing, which never overflows.  k v [B,T,D], w u [D] (u None: 0), state [B,3,D] (None: 0) -> y
    [B,T,D].  decay="raw": the decay is exp(-exp(w)), as RWKV-4 trains it.  decay="log": the decay is exp(w).  The state
    is RWKV-4's (a, b, p), where a and b are sums of exp(k - p) v and exp(k - p).  A state of zeros means that no token
    came before.  The final state has b = 1, and b takes no gradient."""
    return _call("wkv4", (k, v, w, u, state, cu_seqlens, seq_count),
                 (_choice("wkv4", "decay", _DECAY, decay), _int("wkv4", "segments", segments)), final_state, recompute)


def wkv4_step(k, v, w, u, state, *, decay="raw", slots=None, tokens=None, commit=None):
    """Like wkv4, for 1 to 16 new tokens; updates `state` in place.  slots, tokens and commit are as in wkv6_step."""
    return _step("wkv4", (k, v, w, u, state, slots, tokens, commit),
                 (_choice("wkv4_step", "decay", _DECAY, decay), 0))


def conv_ssd(xBC, dt, weight, A, bias=None, Dskip=None, z=None, dt_bias=None, conv_state=None, state=None, *,
             state_size, groups=1, softplus=False, dt_limit=None, final_state=False, cu_seqlens=None, seq_count=None,
             slots=None, starts_zero=None, segments=0, recompute=False, conv_snapshots=None, snapshots=None,
             snapshot_every=0):
    """conv1d with SiLU, then ssd, as Mamba-2 has them between its projections.  xBC [B,T,D], whose rows are x [H,P], Bm
    [G,N] and Cm [G,N] one after another; dt [B,T,H], weight [D,W], bias [D], A dt_bias [H], Dskip [H] or [H,P], z
    [B,T,H,P], conv_state [B,D,W-1], state [B,H,P,N] -> y [B,T,H,P].  state_size is N, groups is G.  final_state=True
    returns (y, conv_state, state).  The output of the convolution is not stored.  For the next tokens, call conv1d_step
    with SiLU and ssd_step on the two states."""
    return _call("conv_ssd", (xBC, dt, weight, A, bias, Dskip, z, dt_bias, conv_state, state, cu_seqlens, seq_count),
                 (_int("conv_ssd", "state_size", state_size), _int("conv_ssd", "groups", groups),
                  _flag("conv_ssd", "softplus", softplus), *_dt_limit("conv_ssd", dt_limit),
                  _int("conv_ssd", "segments", segments)), final_state, recompute, slots, starts_zero,
                 (conv_snapshots, snapshots), snapshot_every)


def wkv_ssm(r, k, v, w, u, x, dt, A, Bm, Cm, Dskip=None, z=None, dt_bias=None, wkv_state=None, ssm_state=None, *,
            decay="raw", scale=1.0, softplus=False, dt_limit=None, final_state=False, cu_seqlens=None, seq_count=None,
            segments=0, recompute=False, mixed=False, gain_wkv=None, gain_ssm=None, residual=None):
    """Computes wkv6 and ssd of one hybrid block, on the same tokens, in one call.  Returns (y of wkv6, y of ssd), and
    with final_state=True also both states after them.  Tensors and options are as in wkv6 and ssd.

    With mixed=True the call returns one tensor [B,T,H,V] instead of both y:
        residual + gain_wkv (y of wkv6) + gain_ssm (y of ssd)
    Both branches then have one width: H V of v is H P of x.  gain_wkv is [H,V] and gain_ssm is [H,P], or [H] with one
    gain for each head (None: 1).  residual is [B,T,H,V] (None: 0).  The kernel of wkv6 adds the branches, then rounds
    once.  The call keeps y of a branch for backward only if the gain of this branch requires a gradient, also with
    recompute=True.  Otherwise ssd's y is scratch memory of the call, and wkv6's y is not stored."""
    options = (_choice("wkv_ssm", "decay", _DECAY, decay), _float("wkv_ssm", "scale", scale),
               _flag("wkv_ssm", "softplus", softplus),
               *_dt_limit("wkv_ssm", dt_limit), _int("wkv_ssm", "segments", segments))
    more = _mixed("wkv_ssm", mixed, (gain_wkv, gain_ssm), residual, (v, x))
    return _call("wkv_ssm_mixed" if more else "wkv_ssm",
                 (r, k, v, w, u, x, dt, A, Bm, Cm, Dskip, z, dt_bias, *more, wkv_state, ssm_state, cu_seqlens,
                  seq_count), options, final_state, recompute)


def wkv_ssm_step(r, k, v, w, u, x, dt, A, Bm, Cm, Dskip, z, dt_bias, wkv_state, ssm_state, *, decay="raw", scale=1.0,
                 softplus=False, dt_limit=None, slots=None, tokens=None, commit=None, mixed=False, gain_wkv=None,
                 gain_ssm=None, residual=None):
    """Like wkv_ssm, for 1 to 16 new tokens; updates both states in place.  Returns (y of wkv6, y of ssd), or their sum
    with mixed=True.  slots, tokens and commit are as in wkv6_step; both states are float32 and have the same rows."""
    options = (_choice("wkv_ssm_step", "decay", _DECAY, decay), _float("wkv_ssm_step", "scale", scale),
               _flag("wkv_ssm_step", "softplus", softplus), *_dt_limit("wkv_ssm_step", dt_limit), 0)
    more = _mixed("wkv_ssm_step", mixed, (gain_wkv, gain_ssm), residual, (v, x))
    return _step("wkv_ssm_mixed" if more else "wkv_ssm",
                 (r, k, v, w, u, x, dt, A, Bm, Cm, Dskip, z, dt_bias, *more, wkv_state, ssm_state, slots, tokens,
                  commit), options)


def rmsnorm_linear(x, weight, gamma=None, beta=None, bias=None, *, norm="rms", eps=1e-5, recompute=False):
    """RMSNorm or LayerNorm (norm="layer"), then a projection: (norm(x) gamma + beta) weight^T + bias.  x [...,D],
    weight [O,D] in the dtype of x, gamma beta [D], bias [O] -> [...,O]."""
    options = (_choice("rmsnorm_linear", "norm", _NORM, norm), _float("rmsnorm_linear", "eps", eps))
    return _call("rmsnorm_linear", (x, weight, gamma, beta, bias), options, recompute=recompute)


def norm_mix(a, b, gain_a=None, gain_b=None, residual=None, *, heads=1, eps=1e-5):
    """Returns residual + gain_a RMSNorm(a) + gain_b RMSNorm(b).  a b residual [...,D], gains [D] (None: 1).  Each of
    `heads` equal slices has its own mean square."""
    return _call("norm_mix", (a, b, gain_a, gain_b, residual), (_int("norm_mix", "heads", heads),
                                                                _float("norm_mix", "eps", eps)))


def norm_gate(x, z=None, gamma=None, beta=None, *, norm="rms", gate_first=False, heads=1, eps=1e-5):
    """Returns (norm(x) gamma + beta) SiLU(z), or norm(x SiLU(z)) gamma + beta with gate_first.  x z [...,D], gamma beta
    [D].  Each of `heads` equal slices has its own norm."""
    norm = _choice("norm_gate", "norm", _NORM, norm)
    return _call("norm_gate", (x, z, gamma, beta), (norm, _flag("norm_gate", "gate_first", gate_first),
                                                    _int("norm_gate", "heads", heads), _float("norm_gate", "eps", eps)))


def add_norm(x, residual=None, gamma=None, beta=None, *, norm="rms", eps=1e-5, sum_in_fp32=False, reads_sum=False):
    """Returns (y, sum), where sum = x + residual and y = norm(sum) gamma + beta.  x residual [...,D], gamma beta [D].
    The norm reads the sum before it is rounded.  y has the dtype of x.  sum is float32 if residual is float32 or if
    sum_in_fp32 is set; otherwise it has the dtype of x.  Gradients pass through both.  With reads_sum, backward reads
    the rounded sum, and the call saves neither x nor residual."""
    sum_dtype = c.GT_F32 if _flag("add_norm", "sum_in_fp32", sum_in_fp32) else c.GT_DTYPE_DEFAULT
    if sum_dtype and isinstance(residual, torch.Tensor) and residual.is_floating_point():
        residual = residual.float()
    return _call("add_norm", (x, residual, gamma, beta), (_choice("add_norm", "norm", _NORM, norm),
                                                          _float("add_norm", "eps", eps), sum_dtype,
                                                          _flag("add_norm", "reads_sum", reads_sum)))
