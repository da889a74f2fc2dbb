"""Types of gt_kernels.compat.  Any: a tensor, or a tuple of them as the arguments say."""

from typing import Any

from torch import Tensor, dtype

def RUN_CUDA_RWKV6(B: int, T: int, C: int, H: int, r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor: ...
def causal_conv1d_fn(x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: Tensor | None = None,
                     initial_states: Tensor | None = None, return_final_states: bool = False,
                     final_states_out: Tensor | None = None, activation: str | None = None) -> Any: ...
def causal_conv1d_update(x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None,
                         activation: str | None = None, cache_seqlens: Tensor | None = None,
                         conv_state_indices: Tensor | None = None) -> Tensor: ...
def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor: ...
def chunk_rwkv6(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, scale: float | None = None,
                initial_state: Tensor | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None,
                cu_seqlens_cpu: Tensor | None = None, **kwargs: object) -> tuple[Tensor, Tensor | None]: ...
def fused_recurrent_rwkv6(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, scale: float | None = None,
                          initial_state: Tensor | None = None, output_final_state: bool = False, reverse: bool = False,
                          cu_seqlens: Tensor | None = None, **kwargs: object) -> tuple[Tensor, Tensor | None]: ...
def install(over: bool = False) -> list[str]: ...
def layer_norm_fn(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None,
                  x1: Tensor | None = None, weight1: Tensor | None = None, bias1: Tensor | None = None,
                  eps: float = 1e-06, dropout_p: float = 0.0, rowscale: Tensor | None = None, prenorm: bool = False,
                  residual_in_fp32: bool = False, is_rms_norm: bool = False,
                  return_dropout_mask: bool = False) -> Any: ...
def layernorm_fn(x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor | None = None, eps: float = 1e-06,
                 group_size: int | None = None, norm_before_gate: bool = True, is_rms_norm: bool = False) -> Tensor: ...
def mamba_chunk_scan_combined(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int,
                              D: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None,
                              initial_states: Tensor | None = None, seq_idx: Tensor | None = None,
                              cu_seqlens: Tensor | None = None, dt_softplus: bool = False,
                              dt_limit: tuple[float, float] = ..., return_final_states: bool = False,
                              return_varlen_states: bool = False, state_dtype: dtype | None = None) -> Any: ...
def mamba_inner_fn(xz: Tensor, conv1d_weight: Tensor, conv1d_bias: Tensor | None, x_proj_weight: Tensor,
                   delta_proj_weight: Tensor, out_proj_weight: Tensor, out_proj_bias: Tensor | None, A: Tensor,
                   B: Tensor | None = None, C: Tensor | None = None, D: Tensor | None = None,
                   delta_bias: Tensor | None = None, B_proj_bias: Tensor | None = None,
                   C_proj_bias: Tensor | None = None, delta_softplus: bool = True, checkpoint_lvl: int = 1,
                   b_rms_weight: Tensor | None = None, c_rms_weight: Tensor | None = None,
                   dt_rms_weight: Tensor | None = None, b_c_dt_rms_eps: float = 1e-06, cu_seqlens: Tensor | None = None,
                   seq_idx: Tensor | None = None) -> Tensor: ...
def mamba_split_conv1d_scan_combined(zxbcdt: Tensor, conv1d_weight: Tensor, conv1d_bias: Tensor | None, dt_bias: Tensor,
                                     A: Tensor, D: Tensor, chunk_size: int, initial_states: Tensor | None = None,
                                     seq_idx: Tensor | None = None, dt_limit: tuple[float, float] = ...,
                                     return_final_states: bool = False, activation: str | None = "silu",
                                     rmsnorm_weight: Tensor | None = None, rmsnorm_eps: float = 1e-06,
                                     outproj_weight: Tensor | None = None, outproj_bias: Tensor | None = None,
                                     headdim: int | None = None, ngroups: int = 1, norm_before_gate: bool = True,
                                     state_dtype: dtype | None = None) -> Any: ...
def most_sequences(number: int | None = None) -> None: ...
def rms_norm_fn(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None,
                x1: Tensor | None = None, weight1: Tensor | None = None, bias1: Tensor | None = None,
                eps: float = 1e-06, dropout_p: float = 0.0, rowscale: Tensor | None = None, prenorm: bool = False,
                residual_in_fp32: bool = False, return_dropout_mask: bool = False) -> Any: ...
def rms_norm_gated(x: Tensor, weight: Tensor, bias: Tensor | None = None, z: Tensor | None = None, eps: float = 1e-06,
                   group_size: int | None = None, norm_before_gate: bool = True) -> Tensor: ...
def rmsnorm_fn(x: Tensor, weight: Tensor, bias: Tensor | None = None, z: Tensor | None = None, eps: float = 1e-06,
               group_size: int | None = None, norm_before_gate: bool = True) -> Tensor: ...
def selective_scan_fn(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
                      z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False,
                      return_last_state: bool = False, cu_seqlens: Tensor | None = None) -> Any: ...
def selective_state_update(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
                           D: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None,
                           dt_softplus: bool = False, state_batch_indices: Tensor | None = None) -> Tensor: ...
