"""The functions that vLLM release 0.33.0 (commit 4ba787ec9) calls for layers of Mamba-1 and Mamba-2:

    causal_conv1d_fn, causal_conv1d_update, mamba_chunk_scan_combined_varlen, rms_norm_gated, selective_scan_fn,
    selective_state_update

install() replaces vLLM's functions by these.  vLLM runs models in several processes; each of them calls install() if
the environment has GT_KERNELS_VLLM=1.  The functions also work without vLLM.

Arguments have vLLM's names, order and defaults.  A state is a row of a pool and is updated in place.  A pool may have
any floating dtype and any strides.  Packed rows are not copied if they are float32, or in a step and in a prefill of a
convolution also if they have 16 bits.  selective_scan_step also needs the rows one after another, and prefill of
Mamba-1 always copies.  An index equal to null_block_id or outside the pool is padding.  Its state is neither read nor
written.  Its output is 0 or comes from a state of zeros.  No call waits for the device.

A bad argument raises ArgumentError, and an unsupported one UnsupportedError, before a state changes.  Mamba-1's prefix
cache with a state in every block is not supported (block_idx_first_scheduled_token, block_idx_last_scheduled_token,
initial_state_idx).

Two things differ from vLLM.  Outputs are new tensors, or `out`; x, delta and z are not overwritten.  Stochastic
rounding draws other numbers, and also rounds bfloat16.

With num_accepted_tokens the state after every token is stored, as vLLM expects, which takes several kernels per token.
A step of gt_kernels.torch with `commit` verifies drafts with one kernel.
"""

import functools
import importlib
import importlib.util
import inspect
import os
import sys

import torch
import torch.nn.functional as F

from .. import c
from .. import torch as gt
from .._arguments import flag, integer, refuse
from ..torch._engine import ENGINES
from ..torch._errors import named
from ..torch._plan import DTYPES
from . import (_Function, _is_expanded, _is_head_wise, _norm, _put_rows, _step, _steps_in_place, _take_rows, _together,
               _update_rows)
from . import causal_conv1d_update as _update_window

__all__ = ["causal_conv1d_fn", "causal_conv1d_update", "install", "mamba_chunk_scan_combined_varlen", "rms_norm_gated",
           "selective_scan_fn", "selective_state_update"]

NULL_BLOCK_ID, PAD_SLOT_ID = 0, -1
_RELEASE = "0.33.0 (commit 4ba787ec9)"


# ---- rows and sequences ----

def _check_count(function, name, tensor, count):
    """Checks that a tensor is None or has an element or row for each sequence."""
    if tensor is not None and tensor.shape[0] < count:
        function.refuse_shape(name, tensor, f"must have a row for each of {count} sequences")


def _check_pool(function, name, pool, indices, count):
    if not pool.shape[0]:
        function.refuse_shape(name, pool, "must have a row")
    if indices is None:
        _check_count(function, name, pool, count)
    function.check_in_place(name, pool)


def _row_indices(function, name, indices, count, *padding):
    """The indices of `count` sequences, [count] or [count,columns], with -1 for padding.  padding: pairs (name, index
    that means padding, or None)."""
    _check_count(function, name, indices, count)
    indices = indices[:count]
    for which, value in padding:
        if value is not None:
            indices = torch.where(indices == integer(function.name, which, value), -1, indices)
    return indices


def _first(function, name, indices, count, device, *padding):
    """The first index of each sequence, with -1 for padding.  Without indices sequence s has row s."""
    if indices is None:
        return torch.arange(count, device=device)
    return _row_indices(function, name, indices if indices.dim() == 1 else indices[:, 0], count, *padding)


def _rows_of_step(function, name, pool, indices, count, device, null_block_id):
    """Returns (pool, the row of each sequence in it).  If row 0 is the null block, it returns the pool without row 0,
    where index -1 is padding.  That takes one kernel less than comparing indices with 0."""
    if indices is None or null_block_id != 0 or pool.shape[0] < 2:
        return pool, _first(function, name, indices, count, device, ("null_block_id", null_block_id))
    return pool[1:], _first(function, name, indices, count, device) - 1


def _where_row(mask, rows, others):
    """rows[i] where mask[i], else others[i].  A mask with two indices selects rows[i,j]."""
    return torch.where(mask.reshape(*mask.shape, *(1,) * (rows.dim() - mask.dim())), rows, others)


def _store(pool, targets, mask, rows):
    """Writes rows[i] to row targets[i] of the pool, if mask[i] holds and the pool has that row."""
    places = targets.long().clamp(0, pool.shape[0] - 1)
    mask = mask & (places == targets)
    _put_rows(pool, places, mask, _where_row(mask, rows.to(pool.dtype), pool.index_select(0, places)))


def _lengths(bounds):
    return bounds[1:] - bounds[:-1]


def _places(bounds, most, tokens):
    """For packed sequences: (the index of each token, whether the sequence has that token), both [sequences,most]."""
    places = bounds[:-1, None].long() + torch.arange(most, device=bounds.device)
    return places.clamp(0, tokens - 1), (places < bounds[1:, None]) & (places < tokens)


def _pack(bounds, values, tokens):
    """Packs values [sequences,most,...] of tokens to [tokens,...].  Tokens that belong to no sequence become 0."""
    place = torch.arange(tokens, device=bounds.device)
    sequence = torch.searchsorted(bounds.contiguous(), place.to(bounds.dtype), right=True) - 1
    at = place - bounds[sequence.clamp_min(0)]
    is_there = (sequence >= 0) & (sequence < values.shape[0]) & (at < values.shape[1])
    found = values[sequence.clamp(0, values.shape[0] - 1), at.clamp(0, values.shape[1] - 1)]
    return _where_row(is_there, found, 0)


def _has_packed_rows(pool):
    return pool[:1].is_contiguous() and pool.stride(0) >= pool[0].numel()


def _check_out(function, out):
    if out is not None:
        function.check_in_place("out", out)


def _answer(y, out, like):
    """Returns y in the dtype of `like`, or copied to `out`."""
    return y.to(like.dtype) if out is None else out.copy_(y)


# ---- convolution ----

def _check_conv(function, name, pool, sizes, weight, activation):
    """Returns (activation, the columns of the pool that hold the last inputs)."""
    function.check_width("weight", weight)
    if sizes["S"] < sizes["W"] - 1:
        function.refuse_shape(name, pool, f"must have at least W - 1 = {sizes['W'] - 1} inputs a row")
    activation = function.activation("silu" if activation is True else None if activation is False else activation)
    return activation, pool[..., :sizes["W"] - 1]


def _conv(x, weight, bias, state, bounds, slots, fresh, activation):
    """The convolution of packed sequences, x [T,D] -> y [T,D].  An empty sequence does not change its state."""
    if not len(x) or not len(slots):
        return torch.zeros_like(x)
    slots = torch.where(_lengths(bounds) > 0, slots, -1)
    options = {"activation": activation, "cu_seqlens": bounds, "starts_zero": fresh}
    if state.dtype in DTYPES:
        return gt.conv1d(x[None], weight, bias, state, slots=slots, **options)[0]
    rows, places, is_named = _take_rows(state, slots)
    pool = rows.float()
    own = torch.where(is_named, torch.arange(len(slots), device=x.device), -1)
    y = gt.conv1d(x[None], weight, bias, pool, slots=own, **options)[0]
    _put_rows(state, places, is_named, pool.to(state.dtype))
    return y


_CONV = _Function("vllm.causal_conv1d_fn", "x x DT, weight f DW, bias? f D, conv_states f ZDS, query_start_loc i L, "
                  "cache_indices? i B|BK, has_initial_state? b R")


@named(_CONV.name, state="conv_states", cu_seqlens="query_start_loc", slots="cache_indices")
@torch.no_grad()
def causal_conv1d_fn(x, weight, bias, conv_states, query_start_loc, cache_indices=None, has_initial_state=None,
                     activation="silu", pad_slot_id=PAD_SLOT_ID, null_block_id=NULL_BLOCK_ID, metadata=None,
                     validate_data=False):
    """Prefill.  x [D,T] -> y [D,T].  Sequence s has the tokens query_start_loc[s] to query_start_loc[s+1]-1, and row
    cache_indices[s] (None: s) of conv_states [rows,D,S].  The first W - 1 columns of the row are the last inputs.  The
    sequence starts from them if has_initial_state[s], else (or for None) from zero.  x is first rounded to the dtype of
    conv_states.  metadata and validate_data are not used."""
    function = _CONV
    sizes = function.check(x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state)
    activation, state = _check_conv(function, "conv_states", conv_states, sizes, weight, activation)
    count = function.sequences("query_start_loc", query_start_loc)
    _check_pool(function, "conv_states", conv_states, cache_indices, count)
    _check_count(function, "has_initial_state", has_initial_state, count)
    slots = _first(function, "cache_indices", cache_indices, count, x.device, ("pad_slot_id", pad_slot_id),
                   ("null_block_id", null_block_id))
    fresh = torch.ones_like(slots) if has_initial_state is None else has_initial_state[:count] == 0
    rounded = x.to(state.dtype) if state.dtype in DTYPES else x
    return _conv(rounded.t(), weight, bias, state, query_start_loc, slots, fresh, activation).t().to(x.dtype)


_CONV_UPDATE, _CONV_UPDATE_PACKED = (_Function(
    "vllm.causal_conv1d_update", f"x x {x}, conv_state f ZDS, weight f DW, bias? f D, conv_state_indices? i R|RK, "
    f"num_accepted_tokens? i Y, query_start_loc? i L, out? x {x}") for x in ("BD|BDT", "TD"))


@named(_CONV_UPDATE.name, state="conv_state", cu_seqlens="query_start_loc", slots="conv_state_indices")
@torch.no_grad()
def causal_conv1d_update(x, conv_state, weight, bias=None, activation=None, conv_state_indices=None,
                         num_accepted_tokens=None, query_start_loc=None, max_query_len=-1, null_block_id=NULL_BLOCK_ID,
                         validate_data=False, out=None):
    """Decoding.  x [B,D] or [B,D,T], or with query_start_loc [B+1] [tokens,D] -> y of the same shape, in `out` if
    given.  x is first rounded to the dtype of conv_state.  conv_state [rows,D,S]: the first W - 1 columns of row
    conv_state_indices[b] or [b,0] (None: b) are the last inputs.  With num_accepted_tokens [B] the last inputs begin at
    column num_accepted_tokens[b] - 1.  The row then becomes the last W - 2 of them, followed by all new inputs.  A
    sequence has at most max_query_len new inputs, or T without query_start_loc.  validate_data is not used."""
    function = _CONV_UPDATE if query_start_loc is None else _CONV_UPDATE_PACKED
    sizes = function.check(x, conv_state, weight, bias, conv_state_indices, num_accepted_tokens, query_start_loc, out)
    activation, state = _check_conv(function, "conv_state", conv_state, sizes, weight, activation)
    _check_out(function, out)
    is_packed, most = query_start_loc is not None, sizes.get("T", 1)
    count = function.sequences("query_start_loc", query_start_loc) if is_packed else len(x)
    _check_pool(function, "conv_state", conv_state, conv_state_indices, count)
    rounded = x.to(state.dtype) if state.dtype in DTYPES else x
    if num_accepted_tokens is None and not is_packed:
        state, slots = _rows_of_step(function, "conv_state_indices", state, conv_state_indices, count, x.device,
                                     null_block_id)
        y = _update_window(rounded, state, weight, bias, activation, conv_state_indices=slots)
        return _answer(y, out, x)
    slots = _first(function, "conv_state_indices", conv_state_indices, count, x.device,
                   ("null_block_id", null_block_id))
    if is_packed and num_accepted_tokens is None:
        y = _conv(rounded, weight, bias, state, query_start_loc, slots, torch.zeros_like(slots), activation)
        return _answer(y, out, x)
    if is_packed:
        most = integer(function.name, "max_query_len", max_query_len)
    if most < 1:
        function.refuse(f"max_query_len = {most}: must be positive with num_accepted_tokens")
    if sizes["W"] - 2 + most > sizes["S"]:
        function.refuse_shape("conv_state", conv_state, f"must have W - 2 + {most} inputs a row, for {most} tokens")
    _check_count(function, "num_accepted_tokens", num_accepted_tokens, count)
    if not count or not len(x):
        return _answer(torch.zeros_like(x), out, x)
    if is_packed:
        places, is_there = _places(query_start_loc, most, len(x))
        new, lengths = rounded[places], _lengths(query_start_loc)[:, None].clamp_max(most)
    else:
        new = (rounded[..., None] if x.dim() == 2 else rounded).transpose(1, 2)
        lengths = torch.full((count, 1), most, device=x.device)
    y = _conv_accepted(new, conv_state, weight, bias, activation, slots, num_accepted_tokens[:count], lengths)
    y = _pack(query_start_loc, y, len(x)) if is_packed else y.transpose(1, 2).reshape(x.shape)
    return _answer(y, out, x)


def _conv_accepted(x, pool, weight, bias, activation, slots, accepted, lengths):
    """x [B,T,D] -> y [B,T,D], where element b has lengths[b] tokens.  Rows are copied, because the window begins at a
    different column in each row."""
    width = weight.shape[1]
    rows, places, is_named = _take_rows(pool, slots)
    columns = torch.arange(width - 1, device=x.device)
    columns = columns + (accepted.long() - 1).clamp(0, pool.shape[2] - width + 1)[:, None]
    window = rows.gather(2, columns[:, None].expand(-1, rows.shape[1], -1))
    y = gt.conv1d(x, weight, bias, window.float(), activation=activation)
    found = torch.cat([window[..., 1:], x.transpose(1, 2).to(pool.dtype)], 2)
    size = found.shape[2]
    # A sequence without tokens keeps its row.
    is_written = (torch.arange(size, device=x.device) < width - 2 + lengths) & (lengths > 0) & is_named[:, None]
    _put_rows(pool[..., :size], places, is_named, torch.where(is_written[:, None], found, rows[..., :size]))
    return _where_row(is_named, y, 0)


# ---- Mamba-2 ----

_VARLEN = _Function(
    "vllm.mamba_chunk_scan_combined_varlen", "x x THP, dt x TH, A f H, B x TGN, C x TGN, cu_seqlens i L, "
    "cu_chunk_seqlens? i K, seq_idx? i R, out x THP, D? f H|HP, z? x THP, dt_bias? f H, initial_states? f SHPN, "
    "final_states_out? f ZHPN, final_state_indices? i Y")


@named(_VARLEN.name, Bm="B", Cm="C", Dskip="D", state="initial_states", dt_min="dt_limit", dt_max="dt_limit",
       slots="final_state_indices")
@torch.no_grad()
def mamba_chunk_scan_combined_varlen(x, dt, A, B, C, chunk_size, cu_seqlens, cu_chunk_seqlens, last_chunk_indices,
                                     seq_idx, out, D=None, z=None, dt_bias=None, initial_states=None,
                                     dt_softplus=False, dt_limit=(0.0, float("inf")), return_intermediate_states=False,
                                     state_dtype=None, final_states_out=None, final_state_indices=None):
    """Prefill.  x z [T,H,P], dt [T,H], A dt_bias [H], B C [T,G,N], D [H] or [H,P], initial_states [sequences,H,P,N].
    Sequence s has the tokens cu_seqlens[s] to cu_seqlens[s+1]-1.  y goes to `out`.  Returns the final states in
    state_dtype (None: the dtype of C).  With final_states_out [rows,H,P,N] it writes them to the rows
    final_state_indices instead, and returns None.  return_intermediate_states: returns the state after every chunk
    instead.  Chunk i belongs to sequence seq_idx[i] and ends before token cu_chunk_seqlens[i+1].  chunk_size and
    last_chunk_indices are not used."""
    function = _VARLEN
    function.positive("chunk_size", chunk_size)
    sizes = function.check(x, dt, A, B, C, cu_seqlens, cu_chunk_seqlens, seq_idx, out, D, z, dt_bias, initial_states,
                           final_states_out, final_state_indices)
    function.check_groups(sizes["H"], B=(B, sizes["G"]))
    _check_out(function, out)
    count = function.sequences("cu_seqlens", cu_seqlens)
    _check_count(function, "initial_states", initial_states, count)
    _check_count(function, "final_state_indices", final_state_indices, count)
    if final_states_out is not None:
        if return_intermediate_states:
            function.unsupported("final_states_out with return_intermediate_states")
        if final_state_indices is None:
            function.refuse("final_state_indices is None", c.GT_ERROR_NULL)
        function.check_in_place("final_states_out", final_states_out)
        final_state_indices = final_state_indices[:count]
    if return_intermediate_states and (cu_chunk_seqlens is None or seq_idx is None):
        function.refuse("cu_chunk_seqlens or seq_idx is None: return_intermediate_states needs both", c.GT_ERROR_NULL)
    if return_intermediate_states and sizes["R"] != sizes["K"] - 1:
        function.refuse_shape("seq_idx", seq_idx, f"must have an element for each of {sizes['K'] - 1} chunks")
    limit, dt_softplus = function.dt_limit(dt_limit), bool(dt_softplus)
    starts = None if initial_states is None else initial_states[:count]
    state_dtype = C.dtype if state_dtype is None else state_dtype
    values = _together(x, B, C, z)
    arrays = [values[0], dt, A, values[1], values[2], D, values[3], dt_bias]
    arrays = [a[None] if a is not None and i in (0, 1, 3, 4, 6) else a for i, a in enumerate(arrays)]
    options = {"softplus": dt_softplus, "dt_limit": None if dt_softplus and limit == (0.0, float("inf")) else limit}
    pool, states = final_states_out, None
    if pool is not None and starts is None and pool.dtype == torch.float32 and _has_packed_rows(pool):
        y = gt.ssd(*arrays, pool, cu_seqlens=cu_seqlens, slots=final_state_indices,
                   starts_zero=torch.ones_like(final_state_indices), **options)
    else:
        y, states = gt.ssd(*arrays, starts, cu_seqlens=cu_seqlens, final_state=True, **options)
        if pool is not None:
            _store(pool, final_state_indices, torch.ones_like(final_state_indices, dtype=torch.bool), states)
    _answer(y[0], out, x)
    if return_intermediate_states:
        if not len(seq_idx):
            return x.new_empty((0, *states.shape[1:]), dtype=state_dtype)
        delta = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
        delta = (F.softplus(delta) if dt_softplus else delta).clamp(*limit)
        sums = torch.segment_reduce(delta, "sum", offsets=cu_chunk_seqlens.long(), axis=0)
        states = gt.ssd(*arrays, cu_seqlens=cu_chunk_seqlens, final_state=True, **options)[1]
        states = _chunk_states(states, sums * A.float(), starts, seq_idx)
    return states.to(state_dtype) if pool is None else None


def _chunk_states(states, decays, starts, seq_idx):
    """Returns the state after every chunk.  states [chunks,H,P,N]: the final state of each chunk alone, from a zero
    state.  decays [chunks,H]: the logarithm of each chunk's decay.  starts: the states before the sequences, or
    None."""
    is_first = torch.cat([torch.ones_like(seq_idx[:1], dtype=torch.bool), seq_idx[1:] != seq_idx[:-1]])
    if starts is not None:
        states = states + _where_row(is_first, starts.float()[seq_idx.long()] * decays.exp()[..., None, None], 0)
    decays = _where_row(is_first, torch.full_like(decays, float("-inf")), decays)
    # join gives the state before each piece.  One more, empty piece at the end yields the last state.
    pieces = [torch.cat([tensor, torch.zeros_like(tensor[:1])])[:, None] for tensor in (states, decays)]
    return ENGINES["ssd"].join("join", *pieces, None)[1:, 0]


# ---- Mamba-1 ----

_SCAN, _SCAN_BATCH = (_Function(
    "vllm.selective_scan_fn", f"u x {u}, ssm_states f ZDN, delta x {u}, A f DN, B x {B}, C x {B.replace('G', 'g')}, "
    f"D? f D, z? x {u}, delta_bias? f D, query_start_loc? i L, cache_indices? i R, has_initial_state? b S")
    for u, B in (("DT", "GNT|NT"), ("BDT", "BGNT|BNT")))


@named(_SCAN.name, dt="delta", Bm="B", Cm="C", Dskip="D", dt_bias="delta_bias", cu_seqlens="query_start_loc")
@torch.no_grad()
def selective_scan_fn(u, ssm_states, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False,
                      query_start_loc=None, cache_indices=None, has_initial_state=None, null_block_id=NULL_BLOCK_ID,
                      block_size=1024, block_idx_first_scheduled_token=None, block_idx_last_scheduled_token=None,
                      initial_state_idx=None, cu_chunk_seqlen=None, last_chunk_indices=None):
    """Prefill.  With query_start_loc [sequences+1]: u delta z [D,T], B C [G,N,T] or [N,T]; without it all five also
    have a batch index in front.  A [D,N], D delta_bias [D].  Returns y in the shape of u.  Sequence s has row
    cache_indices[s] (None: s) of ssm_states [rows,D,N].  It starts from that state if has_initial_state[s], else (or
    for None) from zero.  block_size, cu_chunk_seqlen and last_chunk_indices, which say where vLLM cuts sequences, are
    not used."""
    is_packed = query_start_loc is not None
    function = _SCAN if is_packed else _SCAN_BATCH
    for name, value in (("block_idx_first_scheduled_token", block_idx_first_scheduled_token),
                        ("block_idx_last_scheduled_token", block_idx_last_scheduled_token),
                        ("initial_state_idx", initial_state_idx)):
        if value is not None:
            function.unsupported(f"{name} (a prefix cache with a state in every block)")
    sizes = function.check(u, ssm_states, delta, A, B, C, D, z, delta_bias, query_start_loc, cache_indices,
                           has_initial_state)
    B, C = (tensor if tensor.dim() > u.dim() else tensor.unsqueeze(-3) for tensor in (B, C))
    function.check_groups(sizes["D"], B=(B, B.shape[-3]), C=(C, C.shape[-3]))
    count = function.sequences("query_start_loc", query_start_loc) if is_packed else sizes["B"]
    _check_pool(function, "ssm_states", ssm_states, cache_indices, count)
    _check_count(function, "has_initial_state", has_initial_state, count)
    slots = _first(function, "cache_indices", cache_indices, count, u.device, ("null_block_id", null_block_id))
    if is_packed:
        slots = torch.where(_lengths(query_start_loc) > 0, slots, -1)
    rows, places, is_named = _take_rows(ssm_states, slots)
    starts = None
    if has_initial_state is not None:
        starts = _where_row(is_named & (has_initial_state[:count] != 0), rows.float(), 0)
    dtype = u.dtype
    u, B, C, z = _together(u, B, C, z)

    def by_token(tensor):
        return None if tensor is None else (tensor[None] if is_packed else tensor).movedim(-1, 1)

    y, states = gt.selective_scan(by_token(u), by_token(delta), A, by_token(B), by_token(C), D, by_token(z), delta_bias,
                                  starts, softplus=bool(delta_softplus), final_state=True, cu_seqlens=query_start_loc)
    _put_rows(ssm_states, places, is_named, _where_row(is_named, states.to(rows.dtype), rows))
    y = y.movedim(1, -1).to(dtype)
    return y[0] if is_packed else y


# ---- decoding of Mamba-1 and Mamba-2 ----

_UPDATE, _UPDATE_HEADS = (_Function("vllm.selective_state_update", tensors + "state_batch_indices? i T|TK, "
                                    "dst_state_batch_indices? i R|RQ, num_accepted_tokens? i Y, cu_seqlens? i L")
                          for tensors in (
    "state f ZDN, x x BD, dt x BD, A f DN, B x BN|BGN, C x BN|BgN, D? f D, dt_bias? f D, z? x BD, out? x BD, ",
    "state f ZHPN, x x BHP, dt x BHP, A f HPN, B x BN|BGN, C x BN|BgN, D? f HP, dt_bias? f HP, z? x BHP, out? x BHP, "))


@named(_UPDATE.name, u="x", Bm="B", Cm="C", Dskip="D", slots="state_batch_indices", cu_seqlens="cu_seqlens")
@torch.no_grad()
def selective_state_update(state, x, dt, A, B, C, D, dt_bias, z=None, dt_softplus=False, state_batch_indices=None,
                           dst_state_batch_indices=None, null_block_id=NULL_BLOCK_ID, out=None,
                           num_accepted_tokens=None, cu_seqlens=None, is_blackwell=False,
                           enable_stochastic_rounding=False, cache_philox_rounds=0):
    """Decodes one token of each sequence, or with cu_seqlens [sequences+1] the tokens cu_seqlens[s] to
    cu_seqlens[s+1]-1.  state [rows,D,N] or [rows,H,P,N]; x dt z [tokens,D] or [tokens,H,P], A [D,N] or [H,P,N], B C
    [tokens,N] or [tokens,G,N], D dt_bias [D] or [H,P] -> y in the shape of x, in `out` if given.  The state is read
    from row state_batch_indices[s] or [s,0] (None: s), and written to row dst_state_batch_indices[s] or [s,0] (None:
    the same row).  With num_accepted_tokens the state is read from row state_batch_indices[s,num_accepted_tokens[s]-1],
    and the state after token i is rounded to nearest and written to row dst_state_batch_indices[s,i].
    enable_stochastic_rounding needs 16-bit states, and does not work with cu_seqlens unless num_accepted_tokens is
    given.  is_blackwell and cache_philox_rounds are not used."""
    function = _UPDATE_HEADS if isinstance(state, torch.Tensor) and state.dim() == 4 else _UPDATE
    sizes = function.check(state, x, dt, A, B, C, D, dt_bias, z, out, state_batch_indices, dst_state_batch_indices,
                           num_accepted_tokens, cu_seqlens)
    B, C = (tensor if tensor.dim() == 3 else tensor[:, None] for tensor in (B, C))
    function.check_groups(sizes.get("H", 1), B=(B, B.shape[1]), C=(C, C.shape[1]))
    _check_out(function, out)
    count = len(x) if cu_seqlens is None else function.sequences("cu_seqlens", cu_seqlens)
    _check_pool(function, "state", state, state_batch_indices, count)
    if state_batch_indices is None:
        for name, value in (("dst_state_batch_indices", dst_state_batch_indices),
                            ("num_accepted_tokens", num_accepted_tokens)):
            if value is not None:
                function.unsupported(f"{name} without state_batch_indices")
    is_random = flag(function.name, "enable_stochastic_rounding", enable_stochastic_rounding)
    if is_random and state.dtype not in (torch.float16, torch.bfloat16):
        function.refuse(f"enable_stochastic_rounding = {enable_stochastic_rounding}: state has dtype {state.dtype}, "
                        "must be float16 or bfloat16")
    if is_random and cu_seqlens is not None and num_accepted_tokens is None:
        function.unsupported("enable_stochastic_rounding with cu_seqlens")
    x_, B, C, z = _together(x, B, C, z)
    update = _Update(sizes, x_, dt, A, B, C, D, dt_bias, z, bool(dt_softplus))
    null = ("null_block_id", null_block_id)
    if num_accepted_tokens is not None:
        _check_count(function, "num_accepted_tokens", num_accepted_tokens, count)
        names = "state_batch_indices", "dst_state_batch_indices"
        both = state_batch_indices, dst_state_batch_indices
        sources, targets = (_row_indices(function, name, value if value.dim() == 2 else value[:, None], count, null)
                            for name, value in zip(names, both if both[1] is not None else (both[0], both[0])))
        y = update.after_every_token(state, sources, targets, num_accepted_tokens[:count], cu_seqlens)
        return _answer(y, out, x)
    targets = None
    if dst_state_batch_indices is not None and dst_state_batch_indices is not state_batch_indices:
        targets = _first(function, "dst_state_batch_indices", dst_state_batch_indices, count, x.device, null)
    if cu_seqlens is not None:
        sources = _first(function, "state_batch_indices", state_batch_indices, count, x.device, null)
        y = update.packed(state, sources, sources if targets is None else targets, cu_seqlens)
    else:
        if targets is None:
            state, sources = _rows_of_step(function, "state_batch_indices", state, state_batch_indices, count, x.device,
                                           null_block_id)
        else:
            sources = _first(function, "state_batch_indices", state_batch_indices, count, x.device, null)
        rounding = None
        if is_random:
            rounding = (torch.randint(-2 ** 31, 2 ** 31, (2,), dtype=torch.int32, device=x.device),
                        torch.arange(count, dtype=torch.int32, device=x.device))
        y = update.one_token(state, sources, targets, rounding)
    return _answer(y, out, x)


class _Update:
    """The arguments of selective_state_update except the state, and one method for each form of the call.  sources and
    targets are rows of the state, -1 for padding."""

    def __init__(self, sizes, x, dt, A, B, C, D, dt_bias, z, softplus):
        self.sizes, self.tokens, self.z = sizes, (x, dt, B, C), z
        self.parameters = A, D, dt_bias, softplus
        self.is_head_wise = _is_head_wise(sizes, dt, A, dt_bias)

    def step(self, pool, at=None, **arrays):
        """Runs one token of each sequence.  at: the index of each sequence's token among packed tokens; None: token s
        belongs to sequence s."""
        (x, dt, B, C), z, (A, D, dt_bias, softplus) = self.tokens, self.z, self.parameters
        if at is not None:
            shape = (len(at), *x.shape[1:])
            dt = dt[..., :1][at].expand(shape) if self.is_head_wise else dt[at]
            x, B, C, z = x[at], B[at], C[at], None if z is None else z[at]
        return _step(self.sizes, x, dt, A, B, C, D, z, dt_bias, softplus, pool, **arrays)

    def one_token(self, state, sources, targets, rounding):
        (_, dt, *_), (A, _, dt_bias, _) = self.tokens, self.parameters
        step = functools.partial(self.step, rounding=rounding)
        if targets is None:
            return _update_rows(state, sources, step, _steps_in_place(state, self.sizes, dt, A, dt_bias))
        rows, _, is_named = _take_rows(state, sources)
        pool = rows.contiguous() if rows.dtype in DTYPES else rows.float()
        y = step(pool, tokens=is_named.to(torch.int32))
        _store(state, targets, is_named, pool)
        return y

    def packed(self, state, sources, targets, bounds):
        (x, dt, B, C), z, (A, D, dt_bias, softplus) = self.tokens, self.z, self.parameters
        rows, _, is_named = _take_rows(state, sources)
        starts = _where_row(is_named, rows.float(), 0)
        if self.is_head_wise:
            D = D[:, 0] if D is not None and _is_expanded(D, 1) else D
            y, states = gt.ssd(x[None], dt[None, ..., 0], A[:, 0, 0], B[None], C[None], D,
                               None if z is None else z[None], None if dt_bias is None else dt_bias[:, 0], starts,
                               softplus=softplus, final_state=True, cu_seqlens=bounds)
        else:
            flat = (None if tensor is None else tensor.flatten(1)[None] for tensor in (x, dt, z))
            (flat_x, flat_dt, flat_z), (D, dt_bias) = flat, (None if p is None else p.flatten() for p in (D, dt_bias))
            y, states = gt.selective_scan(flat_x, flat_dt, A.flatten(0, -2), B[None], C[None], D, flat_z, dt_bias,
                                          starts.flatten(1, -2), softplus=softplus, final_state=True, cu_seqlens=bounds)
        _store(state, targets, is_named & (_lengths(bounds) > 0), states.view(rows.shape))
        return y.reshape(x.shape)

    def after_every_token(self, state, sources, targets, accepted, bounds):
        """Stores the state after every token.  Reads all states before it writes the first, because a row may be the
        source of one sequence and the target of another."""
        x = self.tokens[0]
        if not len(x) or not len(sources):
            return torch.zeros_like(x)
        most = 1 if bounds is None else targets.shape[1]
        bounds = torch.arange(len(x) + 1, device=x.device) if bounds is None else bounds
        column = (accepted.long() - 1).clamp(0, sources.shape[1] - 1)
        rows, _, is_named = _take_rows(state, sources.gather(1, column[:, None])[:, 0])
        pool, y = rows.to(torch.float32, copy=True), []
        places, is_there = _places(bounds, most, len(x))
        for i in range(most):
            has_token = is_named & is_there[:, i]
            y.append(self.step(pool, places[:, i], tokens=has_token.to(torch.int32)))
            _store(state, targets[:, i], has_token, pool)
        return _pack(bounds, torch.stack(y, 1), len(x))


# ---- norm ----

_RMS_NORM = _Function("vllm.rms_norm_gated", "x x MD, weight f D, bias? f D, z? x MD")


@named(_RMS_NORM.name, gamma="weight", beta="bias")
@torch.no_grad()
def rms_norm_gated(x, weight, bias, z=None, eps=1e-6, group_size=None, norm_before_gate=True):
    """The same as gt_kernels.compat.rms_norm_gated, but without gradients."""
    return _norm(_RMS_NORM, x, weight, bias, z, eps, group_size, norm_before_gate, True)


# ---- replacing vLLM's functions ----

_OPS = "vllm.model_executor.layers.mamba.ops"
_MODULES = {f"{_OPS}.causal_conv1d": (causal_conv1d_fn, causal_conv1d_update),
            f"{_OPS}.layernorm_gated": (rms_norm_gated,),
            f"{_OPS}.mamba_ssm": (selective_scan_fn, selective_state_update),
            f"{_OPS}.ssd_combined": (mamba_chunk_scan_combined_varlen,)}


def install():
    """Replaces vLLM's functions in vllm.model_executor.layers.mamba.ops, and in each module of vLLM that has imported
    them.  Call install() before the model is loaded.  vLLM calls selective_state_update through a backend; only the
    backend "triton", the default on GPUs, uses the replacement.  Returns the names of the modules in ops; without vLLM
    an empty list.  Raises UnsupportedError, and replaces nothing, if a function of vLLM has other parameters."""
    if "vllm" not in sys.modules and importlib.util.find_spec("vllm") is None:
        return []
    found = []
    for name, functions in _MODULES.items():
        module = importlib.import_module(name)
        for function in functions:
            original = getattr(module, function.__name__, None)
            theirs = list(inspect.signature(original).parameters) if original else None
            ours = list(inspect.signature(function).parameters)
            if theirs != ours:
                refuse("gt_kernels.compat.vllm.install", f"{name}.{function.__name__} has the parameters {theirs}: "
                       f"must be {ours}, as in vLLM {_RELEASE}", c.GT_ERROR_UNSUPPORTED)
            found.append((original, function))
    for module in [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "vllm"]:
        for key, value in list(vars(module).items()):
            for original, function in found:
                if value is original:
                    setattr(module, key, function)
    return list(_MODULES)


def plugin():
    """The entry point in "vllm.general_plugins", which vLLM calls in each of its processes."""
    if os.environ.get("GT_KERNELS_VLLM") == "1":
        install()
