"""Calls of gt_kernels' public functions that mypy --strict must accept, and the types that it must find."""

from typing import Optional

import torch
from typing_extensions import assert_type

import gt_kernels
import gt_kernels.torch as gt
from gt_kernels import c, compat, nn
from gt_kernels.compat import vllm

x = torch.zeros(1)
assert_type(gt_kernels.__version__, str)
assert_type(gt.wkv6(x, x, x, x), torch.Tensor)
assert_type(gt.wkv6(x, x, x, x, None, x, decay="log", final_state=True), tuple[torch.Tensor, torch.Tensor])
assert_type(gt.conv_ssd(x, x, x, x, state_size=8, final_state=True), tuple[torch.Tensor, torch.Tensor, torch.Tensor])
assert_type(gt.wkv_ssm(x, x, x, x, None, x, x, x, x, x), tuple[torch.Tensor, torch.Tensor])
assert_type(gt.wkv_ssm(x, x, x, x, None, x, x, x, x, x, mixed=True, gain_wkv=x, residual=x), torch.Tensor)
assert_type(gt.wkv_ssm(x, x, x, x, None, x, x, x, x, x, mixed=True, final_state=True),
            tuple[torch.Tensor, torch.Tensor, torch.Tensor])
assert_type(gt.wkv_ssm_step(x, x, x, x, None, x, x, x, x, x, None, None, None, x, x), tuple[torch.Tensor, torch.Tensor])
assert_type(gt.wkv_ssm_step(x, x, x, x, None, x, x, x, x, x, None, None, None, x, x, mixed=True), torch.Tensor)
assert_type(gt.ssd_step(x, x, x, x, x, None, None, None, x, dt_limit=(0.0, 1.0), slots=x), torch.Tensor)
assert_type(gt.ssd(x, x, x, x, x, state=x, cu_seqlens=x, slots=x, starts_zero=x), torch.Tensor)
assert_type(gt.ssd(x, x, x, x, x, state=x, cu_seqlens=x, slots=x, snapshots=x, snapshot_every=256), torch.Tensor)
assert_type(gt.norm_gate(x, None, x, norm="layer", heads=2), torch.Tensor)
assert_type(gt.add_norm(x, x, sum_in_fp32=True, reads_sum=True), tuple[torch.Tensor, torch.Tensor])
assert_type(compat.chunk_rwkv6(x, x, x, x, x, output_final_state=True), tuple[torch.Tensor, Optional[torch.Tensor]])
assert_type(compat.causal_conv1d_update(x, x, x, None, "silu"), torch.Tensor)
assert_type(compat.install(over=True), list[str])
assert_type(vllm.install(), list[str])
assert_type(vllm.selective_state_update(x, x, x, x, x, x, x, x, out=x, cu_seqlens=x), torch.Tensor)
assert_type(vllm.mamba_chunk_scan_combined_varlen(x, x, x, x, x, 8, x, x, x, x, x), Optional[torch.Tensor])
assert_type(nn.RMSNormGated(8)(x, x), torch.Tensor)
try:
    c.check(c.gt_version())
except gt_kernels.ArgumentError as error:
    assert_type(error.status, int)
gt.wkv6(x, x, x, x, decay="other")  # type: ignore[call-overload]
gt.conv1d(x, x, state=x, cu_seqlens=x, slots=x, final_state=True)  # type: ignore[call-overload]
gt.wkv_ssm(x, x, x, x, None, x, x, x, x, x, gain_wkv=x)  # type: ignore[call-overload]
gt.conv1d_step(x, x, None)  # type: ignore[call-arg]
