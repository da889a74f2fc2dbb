"""Types of gt_kernels.torch; the functions' docstrings have shapes, dtypes and errors."""

from typing import Literal, overload

from torch import Tensor

def add_norm(x: Tensor, residual: Tensor | None = None, gamma: Tensor | None = None, beta: Tensor | None = None, *,
             norm: Literal["rms", "layer"] = "rms", eps: float = 1e-05, sum_in_fp32: bool = False,
             reads_sum: bool = False) -> tuple[Tensor, Tensor]: ...
@overload
def conv1d(x: Tensor, weight: Tensor, bias: Tensor | None = None, state: Tensor | None = None, *,
           activation: Literal["silu", "swish"] | None = None, final_state: Literal[False] = False,
           cu_seqlens: Tensor | None = None, seq_count: Tensor | None = None, slots: Tensor | None = None,
           starts_zero: Tensor | None = None) -> Tensor: ...
@overload
def conv1d(x: Tensor, weight: Tensor, bias: Tensor | None = None, state: Tensor | None = None, *,
           activation: Literal["silu", "swish"] | None = None, final_state: Literal[True],
           cu_seqlens: Tensor | None = None, seq_count: Tensor | None = None, slots: None = None,
           starts_zero: None = None) -> tuple[Tensor, Tensor]: ...
@overload
def conv1d(x: Tensor, weight: Tensor, bias: Tensor | None = None, state: Tensor | None = None, *,
           activation: Literal["silu", "swish"] | None = None, final_state: bool, cu_seqlens: Tensor | None = None,
           seq_count: Tensor | None = None, slots: None = None,
           starts_zero: None = None) -> Tensor | tuple[Tensor, Tensor]: ...
def conv1d_step(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, *,
                activation: Literal["silu", "swish"] | None = None, slots: Tensor | None = None,
                tokens: Tensor | None = None, commit: Tensor | None = None, places: Tensor | None = None) -> Tensor: ...
@overload
def conv_ssd(xBC: Tensor, dt: Tensor, weight: Tensor, A: Tensor, bias: Tensor | None = None,
             Dskip: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None,
             conv_state: Tensor | None = None, state: Tensor | None = None, *, state_size: int, groups: int = 1,
             softplus: bool = False, dt_limit: tuple[float, float] | None = None, final_state: Literal[False] = False,
             cu_seqlens: Tensor | None = None, seq_count: Tensor | None = None, slots: Tensor | None = None,
             starts_zero: Tensor | None = None, segments: int = 0, recompute: bool = False,
             conv_snapshots: Tensor | None = None, snapshots: Tensor | None = None,
             snapshot_every: int = 0) -> Tensor: ...
@overload
def conv_ssd(xBC: Tensor, dt: Tensor, weight: Tensor, A: Tensor, bias: Tensor | None = None,
             Dskip: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None,
             conv_state: Tensor | None = None, state: Tensor | None = None, *, state_size: int, groups: int = 1,
             softplus: bool = False, dt_limit: tuple[float, float] | None = None, final_state: Literal[True],
             cu_seqlens: Tensor | None = None, seq_count: Tensor | None = None, slots: None = None,
             starts_zero: None = None, segments: int = 0, recompute: bool = False, conv_snapshots: Tensor | None = None,
             snapshots: Tensor | None = None, snapshot_every: int = 0) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def conv_ssd(xBC: Tensor, dt: Tensor, weight: Tensor, A: Tensor, bias: Tensor | None = None,
             Dskip: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None,
             conv_state: Tensor | None = None, state: Tensor | None = None, *, state_size: int, groups: int = 1,
             softplus: bool = False, dt_limit: tuple[float, float] | None = None, final_state: bool,
             cu_seqlens: Tensor | None = None, seq_count: Tensor | None = None, slots: None = None,
             starts_zero: None = None, segments: int = 0, recompute: bool = False, conv_snapshots: Tensor | None = None,
             snapshots: Tensor | None = None, snapshot_every: int = 0) -> Tensor | tuple[Tensor, Tensor, Tensor]: ...
def norm_gate(x: Tensor, z: Tensor | None = None, gamma: Tensor | None = None, beta: Tensor | None = None, *,
              norm: Literal["rms", "layer"] = "rms", gate_first: bool = False, heads: int = 1,
              eps: float = 1e-05) -> Tensor: ...
def norm_mix(a: Tensor, b: Tensor, gain_a: Tensor | None = None, gain_b: Tensor | None = None,
             residual: Tensor | None = None, *, heads: int = 1, eps: float = 1e-05) -> Tensor: ...
def rmsnorm_linear(x: Tensor, weight: Tensor, gamma: Tensor | None = None, beta: Tensor | None = None,
                   bias: Tensor | None = None, *, norm: Literal["rms", "layer"] = "rms", eps: float = 1e-05,
                   recompute: bool = False) -> Tensor: ...
@overload
def selective_scan(u: Tensor, dt: Tensor, A: Tensor, Bm: Tensor, Cm: Tensor, Dskip: Tensor | None = None,
                   z: Tensor | None = None, dt_bias: Tensor | None = None, state: Tensor | None = None, *,
                   softplus: bool = False, final_state: Literal[False] = False, cu_seqlens: Tensor | None = None,
                   seq_count: Tensor | None = None, segments: int = 0, recompute: bool = False) -> Tensor: ...
@overload
def selective_scan(u: Tensor, dt: Tensor, A: Tensor, Bm: Tensor, Cm: Tensor, Dskip: Tensor | None = None,
                   z: Tensor | None = None, dt_bias: Tensor | None = None, state: Tensor | None = None, *,
                   softplus: bool = False, final_state: Literal[True], cu_seqlens: Tensor | None = None,
                   seq_count: Tensor | None = None, segments: int = 0,
                   recompute: bool = False) -> tuple[Tensor, Tensor]: ...
@overload
def selective_scan(u: Tensor, dt: Tensor, A: Tensor, Bm: Tensor, Cm: Tensor, Dskip: Tensor | None = None,
                   z: Tensor | None = None, dt_bias: Tensor | None = None, state: Tensor | None = None, *,
                   softplus: bool = False, final_state: bool, cu_seqlens: Tensor | None = None,
                   seq_count: Tensor | None = None, segments: int = 0,
                   recompute: bool = False) -> Tensor | tuple[Tensor, Tensor]: ...
def selective_scan_step(u: Tensor, dt: Tensor, A: Tensor, Bm: Tensor, Cm: Tensor, Dskip: Tensor | None,
                        z: Tensor | None, dt_bias: Tensor | None, state: Tensor, *, softplus: bool = False,
                        slots: Tensor | None = None, tokens: Tensor | None = None,
                        commit: Tensor | None = None, rounding: tuple[Tensor, Tensor] | None = None) -> Tensor: ...
@overload
def ssd(x: Tensor, dt: Tensor, A: Tensor, Bm: Tensor, Cm: Tensor, Dskip: Tensor | None = None, z: Tensor | None = None,
        dt_bias: Tensor | None = None, state: Tensor | None = None, *, softplus: bool = False,
        dt_limit: tuple[float, float] | None = None, final_state: Literal[False] = False,
        cu_seqlens: Tensor | None = None, seq_count: Tensor | None = None, slots: Tensor | None = None,
        starts_zero: Tensor | None = None, segments: int = 0, recompute: bool = False, snapshots: Tensor | None = None,
        snapshot_every: int = 0) -> Tensor: ...
@overload
def ssd(x: Tensor, dt: Tensor, A: Tensor, Bm: Tensor, Cm: Tensor, Dskip: Tensor | None = None, z: Tensor | None = None,
        dt_bias: Tensor | None = None, state: Tensor | None = None, *, softplus: bool = False,
        dt_limit: tuple[float, float] | None = None, final_state: Literal[True], cu_seqlens: Tensor | None = None,
        seq_count: Tensor | None = None, slots: None = None, starts_zero: None = None, segments: int = 0,
        recompute: bool = False, snapshots: Tensor | None = None, snapshot_every: int = 0) -> tuple[Tensor, Tensor]: ...
@overload
def ssd(x: Tensor, dt: Tensor, A: Tensor, Bm: Tensor, Cm: Tensor, Dskip: Tensor | None = None, z: Tensor | None = None,
        dt_bias: Tensor | None = None, state: Tensor | None = None, *, softplus: bool = False,
        dt_limit: tuple[float, float] | None = None, final_state: bool, cu_seqlens: Tensor | None = None,
        seq_count: Tensor | None = None, slots: None = None, starts_zero: None = None, segments: int = 0,
        recompute: bool = False, snapshots: Tensor | None = None,
        snapshot_every: int = 0) -> Tensor | tuple[Tensor, Tensor]: ...
def ssd_step(x: Tensor, dt: Tensor, A: Tensor, Bm: Tensor, Cm: Tensor, Dskip: Tensor | None, z: Tensor | None,
             dt_bias: Tensor | None, state: Tensor, *, softplus: bool = False,
             dt_limit: tuple[float, float] | None = None, slots: Tensor | None = None, tokens: Tensor | None = None,
             commit: Tensor | None = None, rounding: tuple[Tensor, Tensor] | None = None) -> Tensor: ...
def warn_on_copy(enabled: bool = True) -> None: ...
@overload
def wkv4(k: Tensor, v: Tensor, w: Tensor, u: Tensor | None = None, state: Tensor | None = None, *,
         decay: Literal["raw", "log"] = "raw", final_state: Literal[False] = False, cu_seqlens: Tensor | None = None,
         seq_count: Tensor | None = None, segments: int = 0, recompute: bool = False) -> Tensor: ...
@overload
def wkv4(k: Tensor, v: Tensor, w: Tensor, u: Tensor | None = None, state: Tensor | None = None, *,
         decay: Literal["raw", "log"] = "raw", final_state: Literal[True], cu_seqlens: Tensor | None = None,
         seq_count: Tensor | None = None, segments: int = 0, recompute: bool = False) -> tuple[Tensor, Tensor]: ...
@overload
def wkv4(k: Tensor, v: Tensor, w: Tensor, u: Tensor | None = None, state: Tensor | None = None, *,
         decay: Literal["raw", "log"] = "raw", final_state: bool, cu_seqlens: Tensor | None = None,
         seq_count: Tensor | None = None, segments: int = 0,
         recompute: bool = False) -> Tensor | tuple[Tensor, Tensor]: ...
def wkv4_step(k: Tensor, v: Tensor, w: Tensor, u: Tensor | None, state: Tensor, *, decay: Literal["raw", "log"] = "raw",
              slots: Tensor | None = None, tokens: Tensor | None = None, commit: Tensor | None = None) -> Tensor: ...
@overload
def wkv6(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor | None = None, state: Tensor | None = None, *,
         decay: Literal["raw", "log"] = "raw", scale: float = 1.0, final_state: Literal[False] = False,
         cu_seqlens: Tensor | None = None, seq_count: Tensor | None = None, slots: Tensor | None = None,
         starts_zero: Tensor | None = None, segments: int = 0, recompute: bool = False, snapshots: Tensor | None = None,
         snapshot_every: int = 0) -> Tensor: ...
@overload
def wkv6(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor | None = None, state: Tensor | None = None, *,
         decay: Literal["raw", "log"] = "raw", scale: float = 1.0, final_state: Literal[True],
         cu_seqlens: Tensor | None = None, seq_count: Tensor | None = None, slots: None = None,
         starts_zero: None = None, segments: int = 0, recompute: bool = False, snapshots: Tensor | None = None,
         snapshot_every: int = 0) -> tuple[Tensor, Tensor]: ...
@overload
def wkv6(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor | None = None, state: Tensor | None = None, *,
         decay: Literal["raw", "log"] = "raw", scale: float = 1.0, final_state: bool, cu_seqlens: Tensor | None = None,
         seq_count: Tensor | None = None, slots: None = None, starts_zero: None = None, segments: int = 0,
         recompute: bool = False, snapshots: Tensor | None = None,
         snapshot_every: int = 0) -> Tensor | tuple[Tensor, Tensor]: ...
def wkv6_step(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor | None, state: Tensor, *,
              decay: Literal["raw", "log"] = "raw", scale: float = 1.0, slots: Tensor | None = None,
              tokens: Tensor | None = None, commit: Tensor | None = None,
              rounding: tuple[Tensor, Tensor] | None = None) -> Tensor: ...
@overload
def wkv_ssm(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor | None, x: Tensor, dt: Tensor, A: Tensor, Bm: Tensor,
            Cm: Tensor, Dskip: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None,
            wkv_state: Tensor | None = None, ssm_state: Tensor | None = None, *, decay: Literal["raw", "log"] = "raw",
            scale: float = 1.0, softplus: bool = False, dt_limit: tuple[float, float] | None = None,
            final_state: Literal[False] = False, cu_seqlens: Tensor | None = None, seq_count: Tensor | None = None,
            segments: int = 0, recompute: bool = False, mixed: Literal[False] = False, gain_wkv: None = None,
            gain_ssm: None = None, residual: None = None) -> tuple[Tensor, Tensor]: ...
@overload
def wkv_ssm(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor | None, x: Tensor, dt: Tensor, A: Tensor, Bm: Tensor,
            Cm: Tensor, Dskip: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None,
            wkv_state: Tensor | None = None, ssm_state: Tensor | None = None, *, decay: Literal["raw", "log"] = "raw",
            scale: float = 1.0, softplus: bool = False, dt_limit: tuple[float, float] | None = None,
            final_state: Literal[True], cu_seqlens: Tensor | None = None, seq_count: Tensor | None = None,
            segments: int = 0, recompute: bool = False, mixed: Literal[False] = False, gain_wkv: None = None,
            gain_ssm: None = None, residual: None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...
@overload
def wkv_ssm(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor | None, x: Tensor, dt: Tensor, A: Tensor, Bm: Tensor,
            Cm: Tensor, Dskip: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None,
            wkv_state: Tensor | None = None, ssm_state: Tensor | None = None, *, decay: Literal["raw", "log"] = "raw",
            scale: float = 1.0, softplus: bool = False, dt_limit: tuple[float, float] | None = None, final_state: bool,
            cu_seqlens: Tensor | None = None, seq_count: Tensor | None = None, segments: int = 0,
            recompute: bool = False, mixed: Literal[False] = False, gain_wkv: None = None, gain_ssm: None = None,
            residual: None = None) -> tuple[Tensor, ...]: ...
@overload
def wkv_ssm(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor | None, x: Tensor, dt: Tensor, A: Tensor, Bm: Tensor,
            Cm: Tensor, Dskip: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None,
            wkv_state: Tensor | None = None, ssm_state: Tensor | None = None, *, decay: Literal["raw", "log"] = "raw",
            scale: float = 1.0, softplus: bool = False, dt_limit: tuple[float, float] | None = None,
            final_state: Literal[False] = False, cu_seqlens: Tensor | None = None, seq_count: Tensor | None = None,
            segments: int = 0, recompute: bool = False, mixed: Literal[True], gain_wkv: Tensor | None = None,
            gain_ssm: Tensor | None = None, residual: Tensor | None = None) -> Tensor: ...
@overload
def wkv_ssm(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor | None, x: Tensor, dt: Tensor, A: Tensor, Bm: Tensor,
            Cm: Tensor, Dskip: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None,
            wkv_state: Tensor | None = None, ssm_state: Tensor | None = None, *, decay: Literal["raw", "log"] = "raw",
            scale: float = 1.0, softplus: bool = False, dt_limit: tuple[float, float] | None = None,
            final_state: Literal[True], cu_seqlens: Tensor | None = None, seq_count: Tensor | None = None,
            segments: int = 0, recompute: bool = False, mixed: Literal[True], gain_wkv: Tensor | None = None,
            gain_ssm: Tensor | None = None, residual: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def wkv_ssm(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor | None, x: Tensor, dt: Tensor, A: Tensor, Bm: Tensor,
            Cm: Tensor, Dskip: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None,
            wkv_state: Tensor | None = None, ssm_state: Tensor | None = None, *, decay: Literal["raw", "log"] = "raw",
            scale: float = 1.0, softplus: bool = False, dt_limit: tuple[float, float] | None = None, final_state: bool,
            cu_seqlens: Tensor | None = None, seq_count: Tensor | None = None, segments: int = 0,
            recompute: bool = False, mixed: Literal[True], gain_wkv: Tensor | None = None,
            gain_ssm: Tensor | None = None, residual: Tensor | None = None) -> Tensor | tuple[Tensor, ...]: ...
@overload
def wkv_ssm(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor | None, x: Tensor, dt: Tensor, A: Tensor, Bm: Tensor,
            Cm: Tensor, Dskip: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None,
            wkv_state: Tensor | None = None, ssm_state: Tensor | None = None, *, decay: Literal["raw", "log"] = "raw",
            scale: float = 1.0, softplus: bool = False, dt_limit: tuple[float, float] | None = None,
            final_state: bool = False, cu_seqlens: Tensor | None = None, seq_count: Tensor | None = None,
            segments: int = 0, recompute: bool = False, mixed: bool, gain_wkv: Tensor | None = None,
            gain_ssm: Tensor | None = None, residual: Tensor | None = None) -> Tensor | tuple[Tensor, ...]: ...
@overload
def wkv_ssm_step(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor | None, x: Tensor, dt: Tensor, A: Tensor,
                 Bm: Tensor, Cm: Tensor, Dskip: Tensor | None, z: Tensor | None, dt_bias: Tensor | None,
                 wkv_state: Tensor, ssm_state: Tensor, *, decay: Literal["raw", "log"] = "raw", scale: float = 1.0,
                 softplus: bool = False, dt_limit: tuple[float, float] | None = None, slots: Tensor | None = None,
                 tokens: Tensor | None = None, commit: Tensor | None = None, mixed: Literal[False] = False,
                 gain_wkv: None = None, gain_ssm: None = None, residual: None = None) -> tuple[Tensor, Tensor]: ...
@overload
def wkv_ssm_step(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor | None, x: Tensor, dt: Tensor, A: Tensor,
                 Bm: Tensor, Cm: Tensor, Dskip: Tensor | None, z: Tensor | None, dt_bias: Tensor | None,
                 wkv_state: Tensor, ssm_state: Tensor, *, decay: Literal["raw", "log"] = "raw", scale: float = 1.0,
                 softplus: bool = False, dt_limit: tuple[float, float] | None = None, slots: Tensor | None = None,
                 tokens: Tensor | None = None, commit: Tensor | None = None, mixed: Literal[True],
                 gain_wkv: Tensor | None = None, gain_ssm: Tensor | None = None,
                 residual: Tensor | None = None) -> Tensor: ...
@overload
def wkv_ssm_step(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor | None, x: Tensor, dt: Tensor, A: Tensor,
                 Bm: Tensor, Cm: Tensor, Dskip: Tensor | None, z: Tensor | None, dt_bias: Tensor | None,
                 wkv_state: Tensor, ssm_state: Tensor, *, decay: Literal["raw", "log"] = "raw", scale: float = 1.0,
                 softplus: bool = False, dt_limit: tuple[float, float] | None = None, slots: Tensor | None = None,
                 tokens: Tensor | None = None, commit: Tensor | None = None, mixed: bool,
                 gain_wkv: Tensor | None = None, gain_ssm: Tensor | None = None,
                 residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]: ...
