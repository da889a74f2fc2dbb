"""Types of gt_kernels.compat.vllm.  The functions' docstrings tell shapes, dtypes and errors."""

from torch import Tensor, dtype

NULL_BLOCK_ID: int
PAD_SLOT_ID: int

def causal_conv1d_fn(x: Tensor, weight: Tensor, bias: Tensor | None, conv_states: Tensor, query_start_loc: Tensor,
                     cache_indices: Tensor | None = None, has_initial_state: Tensor | None = None,
                     activation: str | bool | None = "silu", pad_slot_id: int | None = -1,
                     null_block_id: int | None = 0, metadata: object = None, validate_data: bool = False) -> Tensor: ...
def causal_conv1d_update(x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None,
                         activation: str | bool | None = None, conv_state_indices: Tensor | None = None,
                         num_accepted_tokens: Tensor | None = None, query_start_loc: Tensor | None = None,
                         max_query_len: int = -1, null_block_id: int | None = 0, validate_data: bool = False,
                         out: Tensor | None = None) -> Tensor: ...
def install() -> list[str]: ...
def mamba_chunk_scan_combined_varlen(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int,
                                     cu_seqlens: Tensor, cu_chunk_seqlens: Tensor | None,
                                     last_chunk_indices: Tensor | None, seq_idx: Tensor | None, out: Tensor,
                                     D: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None,
                                     initial_states: Tensor | None = None, dt_softplus: bool = False,
                                     dt_limit: tuple[float, float] = ..., return_intermediate_states: bool = False,
                                     state_dtype: dtype | None = None, final_states_out: Tensor | None = None,
                                     final_state_indices: Tensor | None = None) -> Tensor | None: ...
def rms_norm_gated(x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor | None = None, eps: float = 1e-06,
                   group_size: int | None = None, norm_before_gate: bool = True) -> Tensor: ...
def selective_scan_fn(u: Tensor, ssm_states: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor,
                      D: Tensor | None = None, z: Tensor | None = None, delta_bias: Tensor | None = None,
                      delta_softplus: bool = False, query_start_loc: Tensor | None = None,
                      cache_indices: Tensor | None = None, has_initial_state: Tensor | None = None,
                      null_block_id: int | None = 0, block_size: int = 1024,
                      block_idx_first_scheduled_token: Tensor | None = None,
                      block_idx_last_scheduled_token: Tensor | None = None, initial_state_idx: Tensor | None = None,
                      cu_chunk_seqlen: Tensor | None = None, last_chunk_indices: Tensor | None = None) -> Tensor: ...
def selective_state_update(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None,
                           dt_bias: Tensor | None, z: Tensor | None = None, dt_softplus: bool = False,
                           state_batch_indices: Tensor | None = None, dst_state_batch_indices: Tensor | None = None,
                           null_block_id: int | None = 0, out: Tensor | None = None,
                           num_accepted_tokens: Tensor | None = None, cu_seqlens: Tensor | None = None,
                           is_blackwell: bool = False, enable_stochastic_rounding: bool = False,
                           cache_philox_rounds: int = 0) -> Tensor: ...
