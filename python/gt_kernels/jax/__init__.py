"""The operators of gt_kernels as JAX functions with gradients.

    from gt_kernels.jax import wkv6
    y = wkv6(r, k, v, w, u)                                   # [B,T,H,N], as RWKV-6 trains it
    y, state = wkv6(r, k, v, w, u, state, final_state=True)

For every function
  Arrays     have shape [batch, time, ...]; arrays of norms have shape [..., channels].  gt_kernels.h has the formulas
             and shapes.
  Platforms  A GPU runs the kernels; the CPU runs the twins, which are plain C.
  dtypes     All activations have the same dtype: float32, bfloat16 or float16.  w, dt and the residual of add_norm may
             be float32 beside 16-bit activations.  Parameters and states are float32; a parameter of another dtype is
             converted, and so is its gradient.
  States     are float32.  A state without the batch index is shared by the whole batch.  final_state=True returns (y,
             state) instead of y, or y and both states if there are two.  Gradients pass through states.
  Packed     Sequences of different lengths, without padding, have batch 1 and cu_seqlens [sequences + 1].  Sequence s
             has the tokens cu_seqlens[s] to cu_seqlens[s+1]-1.  Each sequence then has its own state.  seq_count [1] is
             the number of sequences, if there are fewer than cu_seqlens can hold.
  Pools      wkv6, ssd, conv1d and conv_ssd take packed sequences with slots [sequences].  state is then a pool of rows,
             and slots[s] is the row of sequence s.  The call returns (y, pool); donate the pool, otherwise XLA copies
             it.  starts_zero [sequences], bool or integers: a sequence whose element is not 0 starts from zero.  A
             sequence whose row lies outside of the pool is skipped; its y is 0.  These calls have no derivatives.  A
             pool may be bfloat16 or float16: each new state is then rounded to nearest.  The two pools of conv_ssd may
             have different dtypes.
  recompute  True: forward saves only its inputs for backward, and backward computes the rest again.
  Steps      return (y, state).  XLA updates the memory of the state in place if the caller donates it.
  Transforms jit, grad, scan, checkpoint, vmap and shard_map over batch and heads.  If only activations and
             states are mapped, vmap makes one larger call.  For mapped parameters, packed sequences, slots and
             gradients of parameters, vmap loops over calls.
  Results    repeat bit for bit.
  Errors     are gt_kernels.ArgumentError (a ValueError), UnsupportedError (a NotImplementedError) or Error.  They name
             the function and its argument, before anything runs.  The functions refuse gradients of gradients; JAX
             refuses forward-mode derivatives.
"""

import jax.numpy as jnp

from .. import c
from .._arguments import flag, integer, number, refuse
from ._engine import FUNCTIONS

__all__ = ["add_norm", "conv1d", "conv1d_step", "conv_ssd", "conv_ssd_step", "norm_gate", "norm_mix", "rmsnorm_linear",
           "selective_scan", "selective_scan_step", "ssd", "ssd_step", "wkv4", "wkv4_step", "wkv6", "wkv6_step", "wkv_ssm",
           "wkv_ssm_step"]

_DECAY = {"raw": c.GT_DECAY_RAW, "log": c.GT_DECAY_LOG}
_ACTIVATION = {None: c.GT_ACT_NONE, "silu": c.GT_ACT_SILU, "swish": c.GT_ACT_SILU}
_NORM = {"rms": c.GT_NORM_RMS, "layer": c.GT_NORM_LAYER}


class _Options:
    """Checks options; errors name `function`."""

    def __init__(self, function):
        self.function = f"gt_kernels.jax.{function}"

    def choice(self, name, choices, value):
        if not isinstance(value, (str, type(None))) or value not in choices:
            refuse(self.function, f"{name} = {value!r}: must be " + " or ".join(map(repr, choices)))
        return choices[value]

    def flag(self, name, value):
        return flag(self.function, name, value)

    def int(self, name, value):
        return integer(self.function, name, value)

    def float(self, name, value):
        return number(self.function, name, value)

    def wkv(self, decay, scale):
        return self.choice("decay", _DECAY, decay), self.float("scale", scale)

    def ssm(self, softplus, dt_limit):
        softplus = self.flag("softplus", softplus)
        if dt_limit is None:
            return softplus, 0, 0.0, 0.0
        try:
            low, high = dt_limit
        except (TypeError, ValueError):
            refuse(self.function, f"dt_limit = {dt_limit!r}: must be (smallest, largest) or None")
        return softplus, 1, self.float("dt_limit[0]", low), self.float("dt_limit[1]", high)


def _call(name, arrays, options, final_state=False, recompute=False, slots=None, starts_zero=None):
    check = _Options(FUNCTIONS[name].name)
    if slots is not None:
        return FUNCTIONS[name].pool((*arrays, slots, starts_zero), options)
    if starts_zero is not None:
        refuse(check.function, "starts_zero is given without slots")
    return FUNCTIONS[name](arrays, options, check.flag("final_state", final_state), check.flag("recompute", recompute))


def _mixed(check, mixed, gains, residual, arrays):
    """The arrays that only a mixed call of wkv_ssm has, or () if the call is not one.  A gain of a head becomes the
    gain of its channels.  gains: gain_wkv, gain_ssm.  arrays: v, x."""
    if not check.flag("mixed", mixed):
        for name, value in zip(("gain_wkv", "gain_ssm", "residual"), (*gains, residual)):
            if value is not None:
                refuse(check.function, f"{name} is given, but mixed = False")
        return ()

    def of_channels(gain, array):
        shape = getattr(array, "shape", ())
        if len(shape) == 4 and getattr(gain, "shape", None) == shape[2:3]:
            return jnp.broadcast_to(jnp.asarray(gain)[:, None], shape[2:])
        return gain
    return (*map(of_channels, gains, arrays), residual)


def wkv6(r, k, v, w, u=None, state=None, *, decay="raw", scale=1.0, final_state=False, cu_seqlens=None,
         seq_count=None, slots=None, starts_zero=None, segments=0, recompute=False):
    """RWKV-6 time mixing.  r k w [B,T,H,N], v [B,T,H,V], u [H,N] (None: 0), state [B,H,N,V] (None: 0) -> y [B,T,H,V].
    decay="raw": the decay is exp(-exp(w)), as RWKV-6 trains it.  decay="log": the decay is exp(w), with w <= 0.  A
    token reads the state before it, and adds itself with the bonus u.  y is multiplied by scale."""
    check = _Options("wkv6")
    return _call("wkv6", (r, k, v, w, u, state, cu_seqlens, seq_count),
                 (*check.wkv(decay, scale), check.int("segments", segments)), final_state, recompute, slots,
                 starts_zero)


def _rounding(function, rounding):
    if rounding is None:
        return None, None
    try:
        seed, steps = rounding
    except (TypeError, ValueError):
        refuse(f"gt_kernels.jax.{function}", f"rounding = {rounding!r}: must be (seed, steps) or None")
    return seed, steps


def wkv6_step(r, k, v, w, u, state, *, decay="raw", scale=1.0, slots=None, tokens=None, commit=None, rounding=None):
    """Like wkv6, for 1 to 16 new tokens; returns (y, state).  With slots [B], state is a pool [rows,H,N,V], and batch
    element b has row slots[b].  An element whose row lies outside of the pool is skipped; its y is 0.  For speculative
    decoding, element b has tokens[b] of the T tokens (None: T), and y is 0 for the others.  The first commit[b] of its
    tokens enter the state (None: all of its tokens); send the other tokens again.  An element is skipped unless 0 <=
    commit[b] <= tokens[b] <= T.  state is float32, bfloat16 or float16.  A 16-bit state is rounded once, after the
    call's tokens.  It is rounded to nearest or, with rounding = (seed [2], steps [B]), both integers, at random with
    the right mean."""
    check = _Options("wkv6_step")
    return FUNCTIONS["wkv6"].step((r, k, v, w, u, state, slots, tokens, commit, *_rounding("wkv6_step", rounding)),
                                  (*check.wkv(decay, scale), 0))


def wkv4(k, v, w, u=None, state=None, *, decay="raw", final_state=False, cu_seqlens=None, seq_count=None, segments=0,
         recompute=False):
    """RWKV-4 time mixing, which never overflows.  k v [B,T,D], w u [D] (u None: 0), state [B,3,D] (None: 0) -> y
    [B,T,D].  decay="raw": the decay is exp(-exp(w)), as RWKV-4 trains it.  decay="log": the decay is exp(w).  The state
    is RWKV-4's (a, b, p), where a and b are sums of exp(k - p) v and exp(k - p).  A state of zeros means that no token
    came before.  The final state has b = 1, and b takes no gradient."""
    check = _Options("wkv4")
    return _call("wkv4", (k, v, w, u, state, cu_seqlens, seq_count),
                 (check.choice("decay", _DECAY, decay), check.int("segments", segments)), final_state, recompute)


def wkv4_step(k, v, w, u, state, *, decay="raw", slots=None, tokens=None, commit=None):
    """Like wkv4, for 1 to 16 new tokens; returns (y, state).  slots, tokens and commit are as in wkv6_step."""
    check = _Options("wkv4_step")
    return FUNCTIONS["wkv4"].step((k, v, w, u, state, slots, tokens, commit), (check.choice("decay", _DECAY, decay), 0))


def ssd(x, dt, A, Bm, Cm, Dskip=None, z=None, dt_bias=None, state=None, *, softplus=False, dt_limit=None,
        final_state=False, cu_seqlens=None, seq_count=None, slots=None, starts_zero=None, segments=0, recompute=False):
    """Mamba-2's state space duality.  x z [B,T,H,P], dt [B,T,H], A dt_bias [H], Bm Cm [B,T,G,N], Dskip [H] or [H,P],
    state [B,H,P,N] -> y [B,T,H,P].  The time step is dt + dt_bias, or with softplus=True the softplus of this sum.
    dt_limit = (smallest, largest) then clamps it.  z gates y with SiLU."""
    check = _Options("ssd")
    return _call("ssd", (x, dt, A, Bm, Cm, Dskip, z, dt_bias, state, cu_seqlens, seq_count),
                 (*check.ssm(softplus, dt_limit), check.int("segments", segments)), final_state, recompute, slots,
                 starts_zero)


def ssd_step(x, dt, A, Bm, Cm, Dskip, z, dt_bias, state, *, softplus=False, dt_limit=None, slots=None, tokens=None,
             commit=None, rounding=None):
    """Like ssd, for 1 to 16 new tokens; returns (y, state).  slots, tokens, commit and rounding are as in wkv6_step."""
    return FUNCTIONS["ssd"].step((x, dt, A, Bm, Cm, Dskip, z, dt_bias, state, slots, tokens, commit,
                                  *_rounding("ssd_step", rounding)), (*_Options("ssd_step").ssm(softplus, dt_limit), 0))


def selective_scan(u, dt, A, Bm, Cm, Dskip=None, z=None, dt_bias=None, state=None, *, softplus=False, final_state=False,
                   cu_seqlens=None, seq_count=None, segments=0, recompute=False):
    """Mamba-1's scan.  u dt z [B,T,D], A [D,N], Bm Cm [B,T,G,N], Dskip dt_bias [D], state [B,D,N] -> y [B,T,D].  The
    time step is dt + dt_bias, or with softplus=True the softplus of this sum.  z gates y with SiLU."""
    check = _Options("selective_scan")
    return _call("selective_scan", (u, dt, A, Bm, Cm, Dskip, z, dt_bias, state, cu_seqlens, seq_count),
                 (check.flag("softplus", softplus), check.int("segments", segments)), final_state, recompute)


def selective_scan_step(u, dt, A, Bm, Cm, Dskip, z, dt_bias, state, *, softplus=False, slots=None, tokens=None,
                        commit=None, rounding=None):
    """Like selective_scan, for 1 to 16 new tokens; returns (y, state).  slots, tokens, commit and rounding are as in
    wkv6_step."""
    return FUNCTIONS["selective_scan"].step((u, dt, A, Bm, Cm, Dskip, z, dt_bias, state, slots, tokens, commit,
                                             *_rounding("selective_scan_step", rounding)),
                                            (_Options("selective_scan_step").flag("softplus", softplus), 0))


def conv1d(x, weight, bias=None, state=None, *, activation=None, final_state=False, cu_seqlens=None, seq_count=None,
           slots=None, starts_zero=None):
    """Causal depthwise convolution.  x [B,T,D], weight [D,W] with W from 2 to 4, bias [D], state [B,D,W-1] -> y
    [B,T,D].  The state has the inputs before the first token, oldest first.  activation: None or "silu"."""
    return _call("conv1d", (x, weight, bias, state, cu_seqlens, seq_count),
                 (_Options("conv1d").choice("activation", _ACTIVATION, activation),), final_state, False, slots,
                 starts_zero)


def conv1d_step(x, weight, bias, state, *, activation=None, slots=None, tokens=None, commit=None):
    """Like conv1d, for 1 to 16 new tokens; returns (y, state).  slots, tokens and commit are as in wkv6_step."""
    return FUNCTIONS["conv1d"].step((x, weight, bias, state, slots, tokens, commit),
                                    (_Options("conv1d_step").choice("activation", _ACTIVATION, activation),))


def conv_ssd(xBC, dt, weight, A, bias=None, Dskip=None, z=None, dt_bias=None, conv_state=None, state=None, *,
             state_size, groups=1, softplus=False, dt_limit=None, final_state=False, cu_seqlens=None, seq_count=None,
             slots=None, starts_zero=None, segments=0, recompute=False):
    """conv1d with SiLU, then ssd, as Mamba-2 has them between its projections.  xBC [B,T,D], whose rows are x [H,P], Bm
    [G,N] and Cm [G,N] one after another; dt [B,T,H], weight [D,W], bias [D], A dt_bias [H], Dskip [H] or [H,P], z
    [B,T,H,P], conv_state [B,D,W-1], state [B,H,P,N] -> y [B,T,H,P].  state_size is N, groups is G.  final_state=True
    returns (y, conv_state, state).  The output of the convolution is not stored."""
    check = _Options("conv_ssd")
    return _call("conv_ssd", (xBC, dt, weight, A, bias, Dskip, z, dt_bias, conv_state, state, cu_seqlens, seq_count),
                 (check.int("state_size", state_size), check.int("groups", groups), *check.ssm(softplus, dt_limit),
                  check.int("segments", segments)), final_state, recompute, slots, starts_zero)


def conv_ssd_step(xBC, dt, weight, A, bias, Dskip, z, dt_bias, conv_state, state, *, state_size, groups=1,
                  softplus=False, dt_limit=None, slots=None, tokens=None, commit=None):
    """Like conv_ssd, for 1 to 16 new tokens; returns (y, conv_state, state).  slots, tokens and commit are as in
    wkv6_step; both states have the same rows."""
    check = _Options("conv_ssd_step")
    return FUNCTIONS["conv_ssd"].step(
        (xBC, dt, weight, A, bias, Dskip, z, dt_bias, conv_state, state, slots, tokens, commit),
        (check.int("state_size", state_size), check.int("groups", groups), *check.ssm(softplus, dt_limit), 0))


def wkv_ssm(r, k, v, w, u, x, dt, A, Bm, Cm, Dskip=None, z=None, dt_bias=None, wkv_state=None, ssm_state=None, *,
            decay="raw", scale=1.0, softplus=False, dt_limit=None, final_state=False, cu_seqlens=None, seq_count=None,
            segments=0, recompute=False, mixed=False, gain_wkv=None, gain_ssm=None, residual=None):
    """Computes wkv6 and ssd of one hybrid block, on the same tokens, in one call.  Returns (y of wkv6, y of ssd), and
    with final_state=True also both states after them.  Arrays and options are as in wkv6 and ssd.

    With mixed=True the call returns one array [B,T,H,V] instead of both y:
        residual + gain_wkv (y of wkv6) + gain_ssm (y of ssd)
    Both branches then have one width: H V of v is H P of x.  gain_wkv is [H,V] and gain_ssm is [H,P], or [H] with one
    gain for each head (None: 1).  residual is [B,T,H,V] (None: 0).  The kernel of wkv6 adds the branches, then rounds
    once.  A call with gradients keeps y of each branch that has a gain, also with recompute=True."""
    check = _Options("wkv_ssm")
    more = _mixed(check, mixed, (gain_wkv, gain_ssm), residual, (v, x))
    return _call("wkv_ssm_mixed" if more else "wkv_ssm",
                 (r, k, v, w, u, x, dt, A, Bm, Cm, Dskip, z, dt_bias, *more, wkv_state, ssm_state, cu_seqlens,
                  seq_count),
                 (*check.wkv(decay, scale), *check.ssm(softplus, dt_limit), check.int("segments", segments)),
                 final_state, recompute)


def wkv_ssm_step(r, k, v, w, u, x, dt, A, Bm, Cm, Dskip, z, dt_bias, wkv_state, ssm_state, *, decay="raw", scale=1.0,
                 softplus=False, dt_limit=None, slots=None, tokens=None, commit=None, mixed=False, gain_wkv=None,
                 gain_ssm=None, residual=None):
    """Like wkv_ssm, for 1 to 16 new tokens; returns (y of wkv6, y of ssd, wkv_state, ssm_state), or with mixed=True
    (sum, wkv_state, ssm_state).  slots, tokens and commit are as in wkv6_step; both states have the same rows."""
    check = _Options("wkv_ssm_step")
    more = _mixed(check, mixed, (gain_wkv, gain_ssm), residual, (v, x))
    return FUNCTIONS["wkv_ssm_mixed" if more else "wkv_ssm"].step(
        (r, k, v, w, u, x, dt, A, Bm, Cm, Dskip, z, dt_bias, *more, wkv_state, ssm_state, slots, tokens, commit),
        (*check.wkv(decay, scale), *check.ssm(softplus, dt_limit), 0))


def rmsnorm_linear(x, weight, gamma=None, beta=None, bias=None, *, norm="rms", eps=1e-5, recompute=False):
    """RMSNorm or LayerNorm (norm="layer"), then a projection: (norm(x) gamma + beta) weight^T + bias.  x [...,D],
    weight [O,D] in the dtype of x, gamma beta [D], bias [O] -> [...,O]."""
    check = _Options("rmsnorm_linear")
    return _call("rmsnorm_linear", (x, weight, gamma, beta, bias),
                 (check.choice("norm", _NORM, norm), check.float("eps", eps)), recompute=recompute)


def norm_mix(a, b, gain_a=None, gain_b=None, residual=None, *, heads=1, eps=1e-5):
    """Returns residual + gain_a RMSNorm(a) + gain_b RMSNorm(b).  a b residual [...,D], gains [D] (None: 1).  Each of
    `heads` equal slices has its own mean square."""
    check = _Options("norm_mix")
    return _call("norm_mix", (a, b, gain_a, gain_b, residual), (check.int("heads", heads), check.float("eps", eps)))


def norm_gate(x, z=None, gamma=None, beta=None, *, norm="rms", gate_first=False, heads=1, eps=1e-5):
    """Returns (norm(x) gamma + beta) SiLU(z), or norm(x SiLU(z)) gamma + beta with gate_first.  x z [...,D], gamma beta
    [D].  Each of `heads` equal slices has its own norm."""
    check = _Options("norm_gate")
    return _call("norm_gate", (x, z, gamma, beta), (check.choice("norm", _NORM, norm),
                                                    check.flag("gate_first", gate_first), check.int("heads", heads),
                                                    check.float("eps", eps)))


def add_norm(x, residual=None, gamma=None, beta=None, *, norm="rms", eps=1e-5, sum_in_fp32=False, reads_sum=False):
    """Returns (y, sum), where sum = x + residual and y = norm(sum) gamma + beta.  x residual [...,D], gamma beta [D].
    The norm reads the sum before it is rounded.  y has the dtype of x.  sum is float32 if residual is float32 or if
    sum_in_fp32 is set; otherwise it has the dtype of x.  Gradients pass through both.  With reads_sum, backward reads
    the rounded sum instead of x and residual.  The call saves x only if sum has another dtype, and never saves
    residual."""
    check = _Options("add_norm")
    sum_dtype = c.GT_F32 if check.flag("sum_in_fp32", sum_in_fp32) else c.GT_DTYPE_DEFAULT
    if sum_dtype and jnp.issubdtype(getattr(residual, "dtype", int), jnp.floating):
        residual = jnp.asarray(residual, jnp.float32)
    return _call("add_norm", (x, residual, gamma, beta), (check.choice("norm", _NORM, norm), check.float("eps", eps),
                                                          sum_dtype, check.flag("reads_sum", reads_sum)))
