"""The blocks of Mamba-2 and Mamba, with the parameters of mamba_ssm's modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Dict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import torch as gt
from ._norms import RMSNormGated

MOST_TOKENS = 16  # most tokens of a step
Cache = Dict[str, Tensor]


def is_step(x: Tensor, cache: Cache | None, cu_seqlens: Tensor | None) -> bool:
    """Returns whether the call uses the kernels for single tokens."""
    return cache is not None and cu_seqlens is None and 1 <= x.shape[1] <= MOST_TOKENS


@torch.no_grad()
def keep(cache: Cache | None, **states: Tensor | None) -> None:
    for name, state in states.items():
        if cache is not None and state is not None:
            cache[name].copy_(state)


def _dt_bias(size: int, dt_min: float, dt_max: float, floor: float, **kind: Any) -> Tensor:
    """Initial dt_bias: softplus(dt_bias) is a random time step between dt_min and dt_max."""
    dt = torch.exp(torch.rand(size, **kind) * (math.log(dt_max) - math.log(dt_min)) + math.log(dt_min)).clamp_min(floor)
    return dt + torch.log(-torch.expm1(-dt))


class Mamba2(nn.Module):
    """Mamba-2's block.  Its parameters have the names of mamba_ssm's Mamba2 and of transformers' mixer.

    forward: x [B,T,d_model] in float32, bfloat16 or float16 -> y of the same shape and dtype.
    cache     states of a batch, from new_cache(batch).  The call continues from them and updates them in place.  Under
              torch.no_grad() up to 16 tokens use the kernels for single tokens; more tokens are a prefill.
    cu_seqlens  [sequences + 1] int32 or int64: bounds of packed sequences.  B must be 1; a cache has one row
              per sequence.
    Raises ArgumentError for another shape or dtype, and UnsupportedError for gradients of single tokens."""

    __call__: Callable[..., Tensor]

    def __init__(self, d_model: int, d_state: int = 128, d_conv: int = 4, expand: int = 2, headdim: int = 64,
                 d_ssm: int | None = None, ngroups: int = 1, A_init_range: tuple[float, float] = (1, 16),
                 D_has_hdim: bool = False, rmsnorm: bool = True, norm_before_gate: bool = False, dt_min: float = 0.001,
                 dt_max: float = 0.1, dt_init_floor: float = 1e-4, dt_limit: tuple[float, float] = (0.0, math.inf),
                 bias: bool = False, conv_bias: bool = True, norm_eps: float = 1e-5, device: Any = None,
                 dtype: torch.dtype | None = None) -> None:
        super().__init__()
        kind: Any = {"device": device, "dtype": dtype}
        inner = expand * d_model
        self.d_ssm = inner if d_ssm is None else d_ssm
        self.d_state, self.headdim, self.ngroups, self.d_conv = d_state, headdim, ngroups, d_conv
        if self.d_ssm % headdim or self.d_ssm // headdim % ngroups or not 0 < self.d_ssm <= inner:
            raise ValueError(f"gt_kernels.nn.Mamba2: d_ssm = {self.d_ssm}, headdim = {headdim}, ngroups = {ngroups}: d_ssm "
                             f"must be at most {inner}, headdim must divide d_ssm, and ngroups the number of heads")
        self.nheads, self.d_mlp = self.d_ssm // headdim, inner - self.d_ssm
        self.dt_limit = None if tuple(dt_limit) == (0.0, math.inf) else tuple(dt_limit)
        channels = self.d_ssm + 2 * ngroups * d_state
        self.in_proj = nn.Linear(d_model, 2 * self.d_mlp + self.d_ssm + channels + self.nheads, bias=bias, **kind)
        self.conv1d = nn.Conv1d(channels, channels, d_conv, groups=channels, bias=conv_bias, **kind)
        self.dt_bias = nn.Parameter(_dt_bias(self.nheads, dt_min, dt_max, dt_init_floor, **kind))
        self.A_log = nn.Parameter(torch.empty(self.nheads, device=device).uniform_(*A_init_range).log().to(dtype))
        self.D = nn.Parameter(torch.ones(self.d_ssm if D_has_hdim else self.nheads, device=device))
        self.norm = RMSNormGated(self.d_ssm, norm_eps, self.d_ssm // ngroups, norm_before_gate, **kind) if rmsnorm else None
        self.out_proj = nn.Linear(inner, d_model, bias=bias, **kind)

    def new_cache(self, batch: int) -> Cache:
        """States before the first token: conv [batch,channels,d_conv-1] and ssm [batch,nheads,headdim,d_state],
        float32.  The cache also holds A [nheads]: make a new cache after a change of A_log."""
        like = self.in_proj.weight
        conv = like.new_zeros((batch, self.conv1d.weight.shape[0], self.d_conv - 1), dtype=torch.float32)
        ssm = like.new_zeros((batch, self.nheads, self.headdim, self.d_state), dtype=torch.float32)
        return {"conv": conv, "ssm": ssm, "A": -self.A_log.detach().float().exp()}

    def forward(self, x: Tensor, cache: Cache | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        H, P, G, N = self.nheads, self.headdim, self.ngroups, self.d_state
        BC = 2 * G * N
        first, second, z, xBC, dt = self.in_proj(x).split([self.d_mlp, self.d_mlp, self.d_ssm, self.d_ssm + BC, H], -1)
        D = self.D if self.D.shape[0] == H else self.D.unflatten(0, (H, P))
        gate = z.unflatten(-1, (H, P)) if self.norm is None else None
        weight, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
        limits: Any = {"softplus": True, "dt_limit": self.dt_limit}
        if cache is not None and is_step(x, cache, cu_seqlens):
            xBC = gt.conv1d_step(xBC, weight, bias, cache["conv"], activation="silu")
            u, B, C = xBC.split([self.d_ssm, BC // 2, BC // 2], -1)
            y = gt.ssd_step(u.unflatten(-1, (H, P)), dt, cache["A"], B.unflatten(-1, (G, N)), C.unflatten(-1, (G, N)), D,
                            gate, self.dt_bias, cache["ssm"], **limits)
        else:
            conv, ssm = (None, None) if cache is None else (cache["conv"], cache["ssm"])
            y, conv, ssm = gt.conv_ssd(xBC, dt, weight, -self.A_log.float().exp(), bias, D, gate, self.dt_bias, conv, ssm,
                                       state_size=N, groups=G, cu_seqlens=cu_seqlens, final_state=True, **limits)
            keep(cache, conv=conv, ssm=ssm)
        y = y.flatten(2)
        if self.norm is not None:
            y = self.norm(y, z)
        if self.d_mlp:
            y = torch.cat([F.silu(first) * second, y], -1)
        out: Tensor = self.out_proj(y)
        return out


class Mamba(nn.Module):
    """Mamba's block.  Its parameters have the names of mamba_ssm's Mamba and of transformers' mixer.  forward is the
    same as in Mamba2.  A cache has conv [batch,d_inner,d_conv-1] and ssm [batch,d_inner,d_state], float32."""

    __call__: Callable[..., Tensor]

    def __init__(self, d_model: int, d_state: int = 16, d_conv: int = 4, expand: int = 2, dt_rank: int | None = None,
                 dt_min: float = 0.001, dt_max: float = 0.1, dt_init_floor: float = 1e-4, conv_bias: bool = True,
                 bias: bool = False, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        kind: Any = {"device": device, "dtype": dtype}
        inner, self.d_state, self.d_conv = expand * d_model, d_state, d_conv
        self.dt_rank = math.ceil(d_model / 16) if dt_rank is None else dt_rank
        self.in_proj = nn.Linear(d_model, 2 * inner, bias=bias, **kind)
        self.conv1d = nn.Conv1d(inner, inner, d_conv, groups=inner, bias=conv_bias, **kind)
        self.x_proj = nn.Linear(inner, self.dt_rank + 2 * d_state, bias=False, **kind)
        self.dt_proj = nn.Linear(self.dt_rank, inner, **kind)
        with torch.no_grad():
            self.dt_proj.weight.uniform_(-self.dt_rank ** -0.5, self.dt_rank ** -0.5)
            self.dt_proj.bias.copy_(_dt_bias(inner, dt_min, dt_max, dt_init_floor, **kind))
        self.A_log = nn.Parameter(torch.arange(1.0, d_state + 1, device=device).log().repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner, device=device))
        self.out_proj = nn.Linear(inner, d_model, bias=bias, **kind)

    def new_cache(self, batch: int) -> Cache:
        """States before the first token, and A [d_inner,d_state]: make a new cache after a change of A_log."""
        like, inner = self.in_proj.weight, self.D.shape[0]
        return {"conv": like.new_zeros((batch, inner, self.d_conv - 1), dtype=torch.float32),
                "ssm": like.new_zeros((batch, inner, self.d_state), dtype=torch.float32),
                "A": -self.A_log.detach().float().exp()}

    def forward(self, x: Tensor, cache: Cache | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        u, z = self.in_proj(x).chunk(2, -1)
        weight, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
        stepped = is_step(x, cache, cu_seqlens)
        conv, ssm = (None, None) if cache is None else (cache["conv"], cache["ssm"])
        if cache is not None and stepped:
            u = gt.conv1d_step(u, weight, bias, cache["conv"], activation="silu")
        else:
            u, conv = gt.conv1d(u, weight, bias, conv, activation="silu", cu_seqlens=cu_seqlens, final_state=True)
        dt, B, C = self.x_proj(u).split([self.dt_rank, self.d_state, self.d_state], -1)
        dt, B, C = F.linear(dt, self.dt_proj.weight), B.unsqueeze(2), C.unsqueeze(2)
        if cache is not None and stepped:
            y = gt.selective_scan_step(u, dt, cache["A"], B, C, self.D, z, self.dt_proj.bias, cache["ssm"], softplus=True)
        else:
            A = -self.A_log.float().exp()
            y, ssm = gt.selective_scan(u, dt, A, B, C, self.D, z, self.dt_proj.bias, ssm, softplus=True,
                                       cu_seqlens=cu_seqlens, final_state=True)
            keep(cache, conv=conv, ssm=ssm)
        out: Tensor = self.out_proj(y)
        return out
