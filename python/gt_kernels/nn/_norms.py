"""Norms as modules, with the parameters and arguments of mamba_ssm's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import compat


class RMSNorm(torch.nn.Module):
    """norm(x + residual) weight.  x residual [...,D] in float32, bfloat16 or float16 -> [...,D] in the dtype of x.

    prenorm: returns (y, x + residual).  The sum has the dtype of residual, or float32 with residual_in_fp32.
    dropout_p: probability with which training drops elements of x before the sum.  Raises ArgumentError for another
    shape or dtype."""

    bias: Tensor | None

    def __init__(self, hidden_size: int, eps: float = 1e-5, dropout_p: float = 0.0, device: Any = None,
                 dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.eps, self.dropout_p = eps, dropout_p
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False,
                residual_in_fp32: bool = False) -> Any:
        return compat.rms_norm_fn(x, self.weight, self.bias, residual, eps=self.eps, prenorm=prenorm,
                                  dropout_p=self.dropout_p if self.training else 0.0, residual_in_fp32=residual_in_fp32)


class _Gated(torch.nn.Module):
    function: Callable[..., Tensor]
    bias: Tensor | None

    __call__: Callable[..., Tensor]

    def __init__(self, hidden_size: int, eps: float = 1e-5, group_size: int | None = None,
                 norm_before_gate: bool = True, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.eps, self.group_size, self.norm_before_gate = eps, group_size, norm_before_gate
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        return self.function(x, self.weight, self.bias, z=z, eps=self.eps, group_size=self.group_size,
                             norm_before_gate=self.norm_before_gate)


class RMSNormGated(_Gated):
    """norm(x) weight silu(z); with norm_before_gate=False norm(x silu(z)) weight.  x z [...,D] in float32, bfloat16 or
    float16 -> [...,D] in the dtype of x.  z may be None.  group_size: channels of each norm, None: all D.  Raises
    ArgumentError for another shape or dtype, and if group_size does not divide D."""

    function = staticmethod(compat.rmsnorm_fn)


class LayerNormGated(_Gated):
    """The same as RMSNormGated, but with LayerNorm and a bias."""

    function = staticmethod(compat.layernorm_fn)

    def __init__(self, hidden_size: int, eps: float = 1e-5, group_size: int | None = None,
                 norm_before_gate: bool = True, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__(hidden_size, eps, group_size, norm_before_gate, device, dtype)
        self.bias = torch.nn.Parameter(torch.zeros(hidden_size, device=device, dtype=dtype))
