"""The time mix of RWKV-6, and the block of RWKV-6 and Mamba-2 that hybrid_train trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import torch as gt
from ._mamba import Cache, Mamba2, is_step, keep

_MIXED = "wkvrg"  # the order of BlinkDL's arrays
_FLA = "rwkvg"  # the order of fla's arrays


def _before(x: Tensor, shift: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """The token before each token.  Before the first token of a sequence: its row of `shift` [sequences,C], or 0."""
    if cu_seqlens is None:
        first = torch.zeros_like(x[:, :1]) if shift is None else shift.to(x.dtype)[:, None]
        return torch.cat([first, x[:, :-1]], 1)[:, :x.shape[1]]
    starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    starts = torch.where(ends > starts, starts, x.shape[1])  # row T, beyond the tokens, stands for empty sequences
    value = x.new_zeros((len(starts), x.shape[2])) if shift is None else shift.to(x.dtype)
    return F.pad(x[0], (0, 0, 1, 0)).index_put((starts,), value)[None, :-1]


def _last(x: Tensor, shift: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The last token of each sequence.  An empty sequence keeps its old one."""
    if cu_seqlens is None:
        return x[:, -1] if x.shape[1] else shift
    ends, has_tokens = cu_seqlens[1:].long() - 1, cu_seqlens[1:] > cu_seqlens[:-1]
    return torch.where(has_tokens[:, None], x[0, ends.clamp_min(0)].to(shift.dtype), shift)


class RWKV6TimeMix(nn.Module):
    """RWKV-6's time mix: token shift with data-dependent weights, wkv6, and a norm with a gate per head.

    Its parameters have the names of RWKV-LM's RWKV_Tmix_x060, which transformers uses, too.  load_state_dict also
    accepts the names of fla's RWKV6Attention, and fla_state_dict returns them.  forward: x [B,T,d_model] in float32,
    bfloat16 or float16 -> y of the same shape and dtype.  cache and cu_seqlens are as in Mamba2.  A cache has shift
    [batch,d_model] and wkv [batch,heads,N,V], float32.  key_dim, value_dim: None means d_model.  Raises ArgumentError
    for another shape or dtype, and UnsupportedError for gradients of single tokens."""

    __call__: Callable[..., Tensor]
    time_maa_x: Tensor

    def __init__(self, d_model: int, heads: int, key_dim: int | None = None, value_dim: int | None = None,
                 mix_rank: int = 32, decay_rank: int = 64, eps: float = 64e-5, device: Any = None,
                 dtype: torch.dtype | None = None) -> None:
        super().__init__()
        kind: Any = {"device": device, "dtype": dtype}
        key, value = key_dim or d_model, value_dim or d_model
        if heads < 1 or key % heads or value % heads:
            raise ValueError(f"gt_kernels.nn.RWKV6TimeMix: heads = {heads}: must divide {key} keys and {value} values")
        self.heads, ramp = heads, torch.arange(d_model, **kind) / d_model
        for name in "x" + _MIXED:
            setattr(self, f"time_maa_{name}", nn.Parameter((1 - ramp)[None, None].clone()))
        self.time_maa_w1 = nn.Parameter(torch.zeros(d_model, 5 * mix_rank, **kind))
        self.time_maa_w2 = nn.Parameter(torch.empty(5, mix_rank, d_model, **kind).uniform_(-0.01, 0.01))
        self.time_decay = nn.Parameter((-6 + 5 * torch.arange(key, **kind) / key)[None, None])
        self.time_decay_w1 = nn.Parameter(torch.zeros(d_model, decay_rank, **kind))
        self.time_decay_w2 = nn.Parameter(torch.empty(decay_rank, key, **kind).uniform_(-0.01, 0.01))
        self.time_faaaa = nn.Parameter(torch.rand(heads, key // heads, **kind))
        self.receptance = nn.Linear(d_model, key, bias=False, **kind)
        self.key = nn.Linear(d_model, key, bias=False, **kind)
        self.value = nn.Linear(d_model, value, bias=False, **kind)
        self.gate = nn.Linear(d_model, value, bias=False, **kind)
        self.output = nn.Linear(value, d_model, bias=False, **kind)
        self.ln_x = nn.GroupNorm(heads, value, eps=eps, **kind)
        self._register_load_state_dict_pre_hook(_take_fla)

    def new_cache(self, batch: int) -> Cache:
        """Returns the states before the first token."""
        like, (H, N), V = self.time_maa_x, self.time_faaaa.shape, self.value.weight.shape[0] // self.heads
        return {"shift": like.new_zeros((batch, like.shape[-1]), dtype=torch.float32),
                "wkv": like.new_zeros((batch, H, N, V), dtype=torch.float32)}

    def forward(self, x: Tensor, cache: Cache | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        shift = None if cache is None else cache["shift"]
        step = _before(x, shift, cu_seqlens) - x
        low = torch.tanh((x + step * self.time_maa_x) @ self.time_maa_w1).unflatten(-1, (5, -1))
        mixes = torch.einsum("btnr,nrc->nbtc", low, self.time_maa_w2)
        w, k, v, r, g = (x + step * (getattr(self, f"time_maa_{name}") + mix) for name, mix in zip(_MIXED, mixes))
        w = self.time_decay + torch.tanh(w @ self.time_decay_w1) @ self.time_decay_w2
        r, k, v = self.receptance(r), self.key(k), self.value(v)
        r, k, v, w = (part.unflatten(-1, (self.heads, -1)) for part in (r, k, v, w))
        if cache is not None and is_step(x, cache, cu_seqlens):
            y = gt.wkv6_step(r, k, v, w, self.time_faaaa, cache["wkv"])
        else:
            y, state = gt.wkv6(r, k, v, w, self.time_faaaa, None if cache is None else cache["wkv"], final_state=True,
                               cu_seqlens=cu_seqlens)
            keep(cache, wkv=state)
        if shift is not None:
            keep(cache, shift=_last(x.detach(), shift, cu_seqlens))
        y = gt.norm_gate(y.flatten(2), self.gate(g), self.ln_x.weight, self.ln_x.bias, norm="layer", heads=self.heads,
                         eps=self.ln_x.eps)
        out: Tensor = self.output(y)
        return out

    def fla_state_dict(self) -> dict[str, Tensor]:
        """The parameters with the names and layouts of fla's RWKV6Attention."""
        own = {name: value.detach() for name, value in self.named_parameters()}
        order = [_MIXED.index(name) for name in _FLA]
        down = own["time_maa_w1"].T.unflatten(0, (5, -1))[order].flatten(0, 1)
        up = own["time_maa_w2"][order].permute(2, 0, 1).flatten(1)
        found = {"x_bias": torch.cat([own[f"time_maa_{name}"][0] for name in _FLA]), "x_proj.0.mu": own["time_maa_x"][0, 0],
                 "x_proj.0.linear.weight": down, "x_proj.2.weight": up, "bonus": own["time_faaaa"],
                 "w_proj.linear.lora.0.weight": own["time_decay_w1"].T, "w_proj.linear.lora.2.bias": own["time_decay"][0, 0],
                 "w_proj.linear.lora.2.weight": own["time_decay_w2"].T, "g_norm.weight": own["ln_x.weight"],
                 "g_norm.bias": own["ln_x.bias"], **{theirs: own[ours] for theirs, ours in _FLA_SAME.items()}}
        return {name: value.contiguous().clone() for name, value in found.items()}


_FLA_SAME = {"r_proj.linear.weight": "receptance.weight", "k_proj.linear.weight": "key.weight",
             "v_proj.linear.weight": "value.weight", "g_proj.linear.weight": "gate.weight", "o_proj.weight": "output.weight"}


def _take_fla(state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Replaces fla's names by RWKV-LM's."""
    if f"{prefix}x_proj.0.mu" not in state:
        return

    def take(name: str) -> Tensor:
        return state.pop(prefix + name)

    def put(name: str, value: Tensor) -> None:
        state[prefix + name] = value

    order = [_FLA.index(name) for name in _MIXED]
    put("time_maa_x", take("x_proj.0.mu")[None, None])
    for name, row in zip(_FLA, take("x_bias")):
        put(f"time_maa_{name}", row[None, None])
    put("time_maa_w1", take("x_proj.0.linear.weight").unflatten(0, (5, -1))[order].flatten(0, 1).T)
    put("time_maa_w2", take("x_proj.2.weight").unflatten(1, (5, -1)).permute(1, 2, 0)[order])
    put("time_decay", take("w_proj.linear.lora.2.bias")[None, None])
    put("time_decay_w1", take("w_proj.linear.lora.0.weight").T)
    put("time_decay_w2", take("w_proj.linear.lora.2.weight").T)
    put("time_faaaa", take("bonus"))
    put("ln_x.weight", take("g_norm.weight"))
    put("ln_x.bias", take("g_norm.bias"))
    for theirs, ours in _FLA_SAME.items():
        put(ours, take(theirs))


class HybridBlock(nn.Module):
    """hybrid_train's block: RWKV-6 and Mamba-2 branches that read the same norm of x.  The norms of both outputs are
    added to x; an MLP follows.

    load_state_dict also accepts the names of hybrid_train's model files (docs/training.md), and trainer_state_dict
    returns them.  forward: x [B,T,d_model] in float32, bfloat16 or float16 -> y of the same shape and dtype.  cache and
    cu_seqlens are as in Mamba2; new_cache(batch) makes a cache.  Raises the errors of its parts."""

    __call__: Callable[..., Tensor]

    def __init__(self, d_model: int, heads: int, mamba_heads: int, d_state: int = 64, mix_rank: int = 32,
                 decay_rank: int = 64, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        kind: Any = {"device": device, "dtype": dtype}
        if mamba_heads < 1 or 2 * d_model % mamba_heads:
            raise ValueError(f"gt_kernels.nn.HybridBlock: mamba_heads = {mamba_heads}: must divide {2 * d_model} channels")
        self.norm = nn.Parameter(torch.ones(d_model, **kind))
        self.rwkv = RWKV6TimeMix(d_model, heads, mix_rank=mix_rank, decay_rank=decay_rank, **kind)
        self.mamba = Mamba2(d_model, d_state, headdim=2 * d_model // mamba_heads, **kind)
        self.mix: Any = nn.Module()
        self.ffn: Any = nn.Module()
        self.mix.gain_rwkv = nn.Parameter(torch.full((d_model,), 0.5, **kind))
        self.mix.gain_mamba = nn.Parameter(torch.full((d_model,), 0.5, **kind))
        self.ffn.norm = nn.Parameter(torch.ones(d_model, **kind))
        self.ffn.up = nn.Parameter(torch.randn(4 * d_model, d_model, **kind) * 0.5 / d_model ** 0.5)
        self.ffn.down = nn.Parameter(torch.randn(d_model, 4 * d_model, **kind) * 0.25 / d_model ** 0.5)
        self._register_load_state_dict_pre_hook(_take_trainer)

    def new_cache(self, batch: int) -> dict[str, Cache]:
        """States of both branches before the first token."""
        return {"rwkv": self.rwkv.new_cache(batch), "mamba": self.mamba.new_cache(batch)}

    def forward(self, x: Tensor, cache: dict[str, Cache] | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        n = gt.norm_gate(x, None, self.norm)
        rwkv, mamba = (branch(n, None if cache is None else cache[name], cu_seqlens)
                       for name, branch in (("rwkv", self.rwkv), ("mamba", self.mamba)))
        mix, ffn = self.mix, self.ffn
        x = gt.norm_mix(rwkv, mamba, mix.gain_rwkv, mix.gain_mamba, x)
        up = gt.rmsnorm_linear(x, ffn.up, ffn.norm)
        return x + F.linear(F.gelu(up, approximate="tanh"), ffn.down)

    def trainer_state_dict(self) -> dict[str, Tensor]:
        """The parameters with the names and layouts of hybrid_train's model files."""
        own = {name: value.detach() for name, value in self.named_parameters()}
        found = {name: value for name, value in own.items() if not name.startswith(("rwkv.", "mamba."))}
        for theirs, ours in _TRAINER.items():
            found[theirs] = own[ours].reshape(own[ours].shape[2:] if own[ours].dim() == 3 and len(own[ours]) == 1 else
                                              own[ours].shape)
        found["mamba.conv_weight"] = own["mamba.conv1d.weight"].squeeze(1)
        for name in ("down", "up"):
            found[f"rwkv.decay_{name}"] = own[f"rwkv.time_decay_w{1 + (name == 'up')}"].T
        for name, down, up in zip(_MIXED, own["rwkv.time_maa_w1"].T.unflatten(0, (5, -1)), own["rwkv.time_maa_w2"]):
            found[f"rwkv.mix_down_{name}"], found[f"rwkv.mix_up_{name}"] = down, up.T
        return {name: value.contiguous().clone() for name, value in found.items()}


_TRAINER = {**{f"rwkv.mu_{name}": f"rwkv.time_maa_{name}" for name in "x" + _MIXED},
            **{f"rwkv.{name}": f"rwkv.{name}.weight" for name in ("receptance", "key", "value", "gate")},
            "rwkv.out": "rwkv.output.weight", "rwkv.decay_base": "rwkv.time_decay", "rwkv.bonus": "rwkv.time_faaaa",
            "rwkv.head_gamma": "rwkv.ln_x.weight", "rwkv.head_beta": "rwkv.ln_x.bias", "mamba.in": "mamba.in_proj.weight",
            "mamba.conv_bias": "mamba.conv1d.bias", "mamba.dt_bias": "mamba.dt_bias", "mamba.A_log": "mamba.A_log",
            "mamba.Dskip": "mamba.D", "mamba.norm": "mamba.norm.weight", "mamba.out": "mamba.out_proj.weight"}


def _take_trainer(state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Replaces the names of hybrid_train's model files by the module's."""
    if f"{prefix}rwkv.mu_x" not in state:
        return
    for theirs, ours in _TRAINER.items():
        value = state.pop(prefix + theirs)
        is_row = ".mu_" in theirs or theirs.endswith("decay_base")
        state[prefix + ours] = value[None, None] if is_row else value
    state[f"{prefix}mamba.conv1d.weight"] = state.pop(f"{prefix}mamba.conv_weight").unsqueeze(1)
    for name in ("down", "up"):
        state[f"{prefix}rwkv.time_decay_w{1 + (name == 'up')}"] = state.pop(f"{prefix}rwkv.decay_{name}").T
    downs, ups = ([state.pop(f"{prefix}rwkv.mix_{part}_{name}") for name in _MIXED] for part in ("down", "up"))
    state[f"{prefix}rwkv.time_maa_w1"] = torch.cat(downs).T
    state[f"{prefix}rwkv.time_maa_w2"] = torch.stack([up.T for up in ups])
