"""Functions with the signatures of the packages that people use now: change one import.

    from gt_kernels.compat import chunk_rwkv6, mamba_chunk_scan_combined, causal_conv1d_fn

    flash-linear-attention   chunk_rwkv6, fused_recurrent_rwkv6
    mamba_ssm                mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined, selective_scan_fn,
                             mamba_inner_fn, selective_state_update, layer_norm_fn, rms_norm_fn, layernorm_fn,
                             rms_norm_gated (rmsnorm_fn of layernorm_gated there)
    causal-conv1d            causal_conv1d_fn, causal_conv1d_update, causal_conv1d_varlen_states
    RWKV-LM                  RUN_CUDA_RWKV6
    vLLM                     see gt_kernels.compat.vllm

With install() you change no import: it provides modules with the names of these packages.  For one program, run

    python -m gt_kernels.compat PROGRAM ARGUMENTS...      python -m gt_kernels.compat -m MODULE ARGUMENTS...

A bad argument raises ArgumentError, and an unsupported one UnsupportedError, before anything is computed or changed.
Both name the function and the argument.  Shapes must be as in the package.  Layouts and floating dtypes may differ from
it.  Mixed activations are promoted to one dtype.  seq_idx, cu_seqlens and indices are int32 or int64.
A call with seq_idx waits for the device to count the sequences, unless most_sequences(number) bounds them.
An update skips a batch element whose row lies outside of the state, and gives it a y of 0.  eps and scale must be
positive in float32.

States are computed in float32, and rounded to nearest when they are stored in 16 bits.  Gradients pass through final
states, even if they do not in the package; updates have no gradients, as in the package.
"""

import functools

import torch
import torch.nn.functional as F

from .. import c
from .. import torch as gt
from .._arguments import integer, number, refuse
from ..torch._errors import check_tensor, named
from ..torch._plan import DTYPES

__all__ = ["RUN_CUDA_RWKV6", "causal_conv1d_fn", "causal_conv1d_update", "causal_conv1d_varlen_states", "chunk_rwkv6",
           "fused_recurrent_rwkv6", "install", "layer_norm_fn", "layernorm_fn", "mamba_chunk_scan_combined",
           "mamba_inner_fn", "mamba_split_conv1d_scan_combined", "most_sequences", "rms_norm_fn", "rms_norm_gated",
           "rmsnorm_fn", "selective_scan_fn", "selective_state_update"]

_DTYPES = {"x": (torch.float32, torch.bfloat16, torch.float16),
           "f": (torch.float32, torch.bfloat16, torch.float16, torch.float64), "i": (torch.int32, torch.int64),
           "b": (torch.bool, torch.int32, torch.int64)}


MOST_TOKENS = 16  # of a step


class _Function:
    """The name of a function in errors, and its tensors as "name kind shape, ...", written as in _operators.py.  Kinds:
    x activations, f parameters and states, i integers, b flags."""

    def __init__(self, name, tensors):
        self.name, self.tensors = f"gt_kernels.compat.{name}", []
        for text in tensors.split(", "):
            name, kind, shapes = text.split()
            shapes = {"M" if letters[0] == "M" else len(letters): letters for letters in shapes.split("|")}
            self.tensors.append((name.rstrip("?"), _DTYPES[kind], shapes, name.endswith("?")))

    def refuse(self, text, status=c.GT_ERROR_VALUE):
        refuse(self.name, text, status)

    def unsupported(self, what):
        self.refuse(f"{what} is not supported", c.GT_ERROR_UNSUPPORTED)

    def refuse_shape(self, name, tensor, text):
        self.refuse(f"{name} has shape {list(tensor.shape)}: {text}", c.GT_ERROR_SIZE)

    def check(self, *tensors, **sizes):
        """Compares the shapes of tensors with each other and with `sizes`.  Returns all sizes.  Functions derive arrays
        only from checked tensors: from a wrong shape they would derive wrong values, or bounds that kernels read
        beyond."""
        device = None
        for (name, dtypes, shapes, optional), tensor in zip(self.tensors, tensors):
            if tensor is None:
                if not optional:
                    self.refuse(f"{name} is None", c.GT_ERROR_NULL)
                continue
            check_tensor(self.name, name, tensor)
            if device is None:
                device = tensor.device
            if tensor.device != device:
                self.refuse(f"{name} is on {tensor.device}: must be on {device}")
            if tensor.dtype not in dtypes:
                if tensor.is_complex():
                    self.unsupported(f"a complex {name}")
                self.refuse(f"{name} has dtype {tensor.dtype}: must be "
                            + " or ".join(str(dtype)[6:] for dtype in dtypes), c.GT_ERROR_DTYPE)
            shape = tensor.shape
            letters = shapes.get(len(shape))
            if letters is None and "M" in shapes and shape:
                letters, shape = shapes["M"], (shape[:-1], shape[-1])
            if letters is None:
                self.fail_shape(name, tensor, shapes, sizes)
            for letter, size in zip(letters, shape):
                if sizes.get(letter, size) != size:
                    self.fail_shape(name, tensor, shapes, sizes)
                if size == 0 and letter not in "BTSRLY":
                    self.refuse_shape(name, tensor, f"{letter} = 0 must be positive")
            sizes.update(zip(letters, shape))
            if letters == "DW" or letters == "KW":
                sizes["w"] = shape[1] - 1
        return sizes

    def fail_shape(self, name, tensor, shapes, sizes):
        words = {"w": "W-1", "M": "..."}
        right = " or ".join(f"[{','.join(words.get(letter, letter) for letter in letters)}]"
                            for letters in shapes.values())
        known = ", ".join(f"{letter} = {list(size) if letter == 'M' else size}" for letter, size in sizes.items()
                          if letter not in "w1")
        self.refuse_shape(name, tensor, f"must be {right}" + (f", where {known}" if known else ""))

    def check_groups(self, heads, **tensors):
        """Checks that all tensors have the same number of groups, a divisor of `heads`.  tensors: name=(tensor, its
        number of groups)."""
        first = next(iter(tensors.values()))[1]
        for name, (tensor, groups) in tensors.items():
            if groups < 1 or heads % groups:
                self.refuse_shape(name, tensor, f"its {groups} groups must divide {heads}")
            if groups != first:
                self.refuse_shape(name, tensor, f"must have {first} groups")

    def check_sequences(self, cu_seqlens, name, tensor):
        """Checks that the batch of packed sequences is 1."""
        if cu_seqlens is None:
            self.refuse("cu_seqlens is None", c.GT_ERROR_NULL)
        if tensor.shape[0] != 1:
            self.refuse_shape(name, tensor, "the batch size must be 1 with cu_seqlens")
        self.sequences("cu_seqlens", cu_seqlens)

    def sequences(self, name, bounds):
        """Returns how many sequences the bounds have."""
        if bounds.shape[0] < 2:
            self.refuse_shape(name, bounds, "must have at least 2 elements")
        return bounds.shape[0] - 1

    def check_width(self, name, weight):
        if not 2 <= weight.shape[1] <= 4:
            self.unsupported(f"{name}: width {weight.shape[1]} (must be 2 to 4)")

    def check_pool(self, name, state, batch, indices):
        """Checks that the state of an update has a row for each batch element, unless indices name the rows."""
        if indices is None and state.shape[0] != batch:
            self.refuse_shape(name, state, f"must have a row for each of {batch} batch elements")
        if indices is not None and not state.shape[0]:
            self.refuse_shape(name, state, "must have a row")
        self.check_in_place(name, state)

    def check_in_place(self, name, tensor):
        if any(size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride())):
            self.refuse(f"{name} has strides {list(tensor.stride())}: must not be expanded, because it is "
                        "written in place",
                        c.GT_ERROR_STRIDE)

    def positive(self, name, value):
        return _positive(self.name, name, value)

    def eps(self, name, value):
        value = number(self.name, name, value)
        if not 2 ** -149 <= value <= torch.finfo(torch.float32).max:  # float32: to the C API 0 is a default
            self.refuse(f"{name} = {value}: must be positive and finite in float32")
        return value

    def dt_limit(self, value):
        try:
            low, high = value
        except (TypeError, ValueError):
            self.refuse(f"dt_limit = {value!r}: must be (smallest, largest)")
        low, high = number(self.name, "dt_limit", low), number(self.name, "dt_limit", high)
        if not low <= high:
            self.refuse(f"dt_limit = {(low, high)}: the smallest must not be above the largest")
        return low, high

    def activation(self, value):
        if value is not None and value not in ("silu", "swish"):
            self.unsupported(f"activation {value!r}")
        return value

    def state_dtype(self, value):
        if value not in (None, torch.float32):
            self.unsupported(f"state_dtype {value}")


def _together(*tensors):
    """Converts activations of different dtypes to the dtype that can hold all of them."""
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
    if len(dtypes) == 1:
        return tensors
    dtype = functools.reduce(torch.promote_types, dtypes)
    return tuple(None if tensor is None else tensor.to(dtype) for tensor in tensors)


# ---- flash-linear-attention ----

_RWKV6 = "r x BTHK, k x BTHK, v x BTHV, w x BTHK, u f HK, initial_state? f SHKV, cu_seqlens? i L"
_FLA = {(name, head_first): _Function(name, _RWKV6.replace("BTH", "BHT") if head_first else _RWKV6)
        for name in ("chunk_rwkv6", "fused_recurrent_rwkv6") for head_first in (False, True)}


def _rwkv6(name, r, k, v, w, u, scale, initial_state, output_final_state, cu_seqlens, reverse, others):
    head_first = bool(others.pop("head_first", False))
    function = _FLA[name, head_first]
    chunk_size = others.pop("chunk_size", None)  # how that package computes; checked, not used
    for other in others:
        function.unsupported(other)
    if chunk_size is not None:
        chunk_size = function.positive("chunk_size", chunk_size)
        if chunk_size & (chunk_size - 1):
            function.refuse(f"chunk_size = {chunk_size}: must be a power of 2")
    for wrong, what in ((reverse, "reverse"), (head_first, "head_first")):
        if wrong and cu_seqlens is not None:
            function.unsupported(f"{what} with cu_seqlens")
    sizes = function.check(r, k, v, w, u, initial_state, cu_seqlens)
    rows = sizes["B"]
    if cu_seqlens is not None:
        function.check_sequences(cu_seqlens, "r", r)
        rows = sizes["L"] - 1
    if initial_state is not None and sizes["S"] != rows:
        function.refuse_shape("initial_state", initial_state, f"must have a state for each of {rows} sequences")
    tensors = [t.transpose(1, 2) if head_first else t for t in (r, k, v, w)]
    if reverse:
        tensors = [t.flip(1) for t in tensors]
    dtype = v.dtype
    r, k, v, w = (*_together(*tensors[:3]), tensors[3])
    scale = k.shape[-1] ** -0.5 if scale is None else number(function.name, "scale", scale)
    y, state = gt.wkv6(r, k, v, w, u, initial_state, decay="log", scale=scale, final_state=True, cu_seqlens=cu_seqlens)
    y = (y.flip(1) if reverse else y).to(dtype)
    return y.transpose(1, 2) if head_first else y, state if output_final_state else None


@named("gt_kernels.compat.chunk_rwkv6", state="initial_state")
def chunk_rwkv6(r, k, v, w, u, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None,
                cu_seqlens_cpu=None, **kwargs):
    """r k w [B,T,H,K], where w is the logarithm of the decay; v [B,T,H,V], u [H,K].  o is multiplied by scale; None
    means K^-0.5.  Returns (o, final state or None)."""
    return _rwkv6("chunk_rwkv6", r, k, v, w, u, scale, initial_state, output_final_state, cu_seqlens, False, kwargs)


@named("gt_kernels.compat.fused_recurrent_rwkv6", state="initial_state")
def fused_recurrent_rwkv6(r, k, v, w, u, scale=None, initial_state=None, output_final_state=False, reverse=False,
                          cu_seqlens=None, **kwargs):
    """The same as chunk_rwkv6.  With reverse it runs from the last token to the first."""
    return _rwkv6("fused_recurrent_rwkv6", r, k, v, w, u, scale, initial_state, output_final_state, cu_seqlens, reverse,
                  kwargs)


# ---- sequences that an index of each token tells apart ----


def most_sequences(number=None):
    """Sets an upper bound for the number of sequences in the seq_idx of later calls, counted over all rows of the
    batch.

    None is the default: each call counts the sequences.  For this it waits for the device, so it cannot be captured in
    a CUDA graph.  With a number no call waits, and the shapes in a compiled call do not depend on data.  If there are
    more sequences, a call on the CPU raises ArgumentError, and a captured, compiled or CUDA call returns a y of NaN.
    The number also sets the memory for states of the backward pass.  causal_conv1d_fn needs no number and never
    waits."""
    _most_sequences[0] = None if number is None else _positive("gt_kernels.compat.most_sequences", "number", number)


def _positive(function, name, value):
    value = integer(function, name, value)
    if value < 1:
        refuse(function, f"{name} = {value}: must be positive")
    return value


_most_sequences = [None]


def _count_bounds(first):
    starts = first.flatten().nonzero().flatten()
    return torch.cat([starts, starts.new_full((1,), first.numel())]).to(torch.int32)


# A separate operator, because the number of its results is the number of sequences, which a compiler cannot know.
gt._engine._library.define("count_bounds(Tensor first) -> Tensor")
for _key in ("CPU", "CUDA"):
    gt._engine._library.impl("count_bounds", _count_bounds, _key)
torch.library.register_fake("gt_kernels::count_bounds", lambda first: first.new_empty(
    torch.library.get_ctx().new_dynamic_size(min=2), dtype=torch.int32), lib=gt._engine._library)


class _Runs:
    """The runs of equal numbers in seq_idx [B,T], with the rows one behind another.  seq_idx is checked and not empty.

    bounds, count: their cu_seqlens and seq_count.  firsts, lasts [B]: the runs that begin and end a row."""

    def __init__(self, function, seq_idx, most=None):
        B, T = seq_idx.shape
        first = torch.cat([torch.ones_like(seq_idx[:, :1], dtype=torch.bool), seq_idx[:, 1:] != seq_idx[:, :-1]], 1)
        runs = first.sum(1).cumsum(0)
        self.excess = None
        most = most or _most_sequences[0]
        if most is None:
            if seq_idx.is_cuda and not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing():
                function.unsupported("seq_idx in a CUDA graph without compat.most_sequences(...)")
            self.bounds, self.count = torch.ops.gt_kernels.count_bounds(first), None
        else:
            first, run = first.flatten(), first.flatten().cumsum(0)
            if most < B * T:
                self.excess = runs[-1] > most
                if seq_idx.device.type == "cpu" and not torch.compiler.is_compiling() and self.excess:
                    function.refuse(f"seq_idx has {int(runs[-1])} sequences: "
                                    f"must be at most {most}, the number in compat.most_sequences")
            place = torch.where(first & (run <= most), run - 1, most + 1)  # the last one is for all other tokens
            ends = run.new_full((most + 2,), B * T).scatter(0, place, torch.arange(B * T, device=run.device))
            self.bounds = ends[:most + 1].to(torch.int32)
            self.count = runs[-1:].clamp_max(most).to(torch.int32)
            runs = runs.clamp_max(most)
        self.firsts, self.lasts = torch.cat([runs.new_zeros(1), runs[:-1]]), runs - 1
        if most is not None:
            self.firsts = self.firsts.clamp_max(most - 1)

    def options(self):
        return {"cu_seqlens": self.bounds, "seq_count": self.count}

    def poison(self, A):
        """Returns A, or NaN instead if there are more runs than bounds."""
        return A if self.excess is None else A + torch.where(self.excess, float("nan"), 0.0).to(A.dtype)


def _has_tokens(function, seq_idx):
    if seq_idx is not None and seq_idx.device.type == "meta":  # its values say how many sequences there are
        function.unsupported("seq_idx on the meta device")
    return seq_idx is not None and seq_idx.numel() > 0


def _one_row(tensor):
    return None if tensor is None else tensor.reshape(1, -1, *tensor.shape[2:])


def _spread(states, runs):
    """Returns a state for each run.  It is the state of the row if the run begins a row, otherwise zeros."""
    if states is None:
        return None
    zeros = states.new_zeros((runs.bounds.shape[0] - 1, *states.shape[1:]), dtype=torch.float32)
    return zeros.index_put((runs.firsts,), states.float())


# ---- states of updates ----

def _is_expanded(tensor, *dims):
    """Whether each of the dimensions repeats one element."""
    return all(tensor.shape[dim] == 1 or tensor.stride(dim) == 0 for dim in dims)


def _take_rows(pool, indices):
    """Returns (the rows of a state that indices name, the places of these rows, whether each index is in the pool).
    Without indices it returns the state itself.  For an index outside of the pool it returns some other row."""
    if indices is None:
        return pool, None, None
    places = indices.long().clamp(0, pool.shape[0] - 1)
    return pool.index_select(0, places), places, places == indices


def _put_rows(pool, places, named, rows):
    """Writes the rows that _take_rows took.  An index outside of the pool must not change any row, but index_copy_
    needs a target row for each index.  So for each index outside, the row of the first element with an index in the
    pool is written once more."""
    if len(rows):
        count = torch.arange(len(rows), device=rows.device)
        source = torch.where(named, count, named.to(torch.int32).argmax())
        pool.index_copy_(0, places[source], rows[source])


def _update_rows(state, indices, update, in_place):
    """Calls update(pool, ...), which advances the states of a batch.  If in_place, update works on the rows of `state`
    that `indices` name, otherwise on a copy of these rows."""
    if in_place:
        return update(state, slots=indices)
    rows, places, named = _take_rows(state, indices)
    pool = rows.to(state.dtype if state.dtype in DTYPES else torch.float32, copy=True,
                   memory_format=torch.contiguous_format)
    if places is None:
        y = update(pool)
        state.copy_(pool)
    else:
        y = update(pool, tokens=named.to(torch.int32))  # no token for an index outside
        _put_rows(state, places, named, pool.to(state.dtype))
    return y


# ---- mamba_ssm ----

_CHUNK_SCAN = _Function(
    "mamba_chunk_scan_combined", "x x BTHP, dt x BTH, A f H, B x BTGN, C x BTGN, D? f H|HP, z? x BTHP, dt_bias? f H, "
    "initial_states? f BHPN, seq_idx? i BT, cu_seqlens? i L")


@named(_CHUNK_SCAN.name, Bm="B", Cm="C", Dskip="D", state="initial_states", dt_min="dt_limit", dt_max="dt_limit")
def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None,
                              cu_seqlens=None, dt_softplus=False, dt_limit=(0.0, float("inf")),
                              return_final_states=False, return_varlen_states=False, state_dtype=None):
    """x [B,T,H,P], dt [B,T,H], A [H], B C [B,T,G,N], D [H] or [H,P]; chunk_size is not used.  A sequence ends where
    seq_idx [B,T] changes.  Each row has one initial state, for its first sequence, and one final state, of its last
    sequence.  With return_varlen_states, B is 1 and cu_seqlens [L] has the bounds of the sequences, which seq_idx must
    not contradict.  The last result is then their final states [L-1,H,P,N].  Without return_varlen_states cu_seqlens is
    not used, as in the package."""
    function = _CHUNK_SCAN
    function.state_dtype(state_dtype)
    function.positive("chunk_size", chunk_size)
    sizes = function.check(x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx,
                           cu_seqlens if return_varlen_states else None)
    function.check_groups(sizes["H"], B=(B, sizes["G"]))
    if return_varlen_states:
        function.check_sequences(cu_seqlens, "x", x)
    limit, dt_softplus, dtype = function.dt_limit(dt_limit), bool(dt_softplus), x.dtype
    x, B, C, z = _together(x, B, C, z)
    wants_states = bool(return_final_states or return_varlen_states)
    options = {"softplus": dt_softplus, "final_state": wants_states,
               "dt_limit": None if dt_softplus and limit == (0.0, float("inf")) else limit}
    if return_varlen_states:
        runs = None
        if initial_states is not None:
            initial_states = F.pad(initial_states, (0, 0, 0, 0, 0, 0, 0, sizes["L"] - 2))
        results = gt.ssd(x, dt, A, B, C, D, z, dt_bias, initial_states, cu_seqlens=cu_seqlens, **options)
    elif _has_tokens(function, seq_idx):
        runs = _Runs(function, seq_idx)
        results = gt.ssd(_one_row(x), _one_row(dt), runs.poison(A), _one_row(B), _one_row(C), D, _one_row(z), dt_bias,
                         _spread(initial_states, runs), **runs.options(), **options)
    else:
        runs, results = None, gt.ssd(x, dt, A, B, C, D, z, dt_bias, initial_states, **options)
    y, states = results if wants_states else (results, None)
    y = y.reshape(x.shape).to(dtype)
    if return_varlen_states:
        return (y, states[-1:], states) if return_final_states else (y, states)
    return (y, states if runs is None else states[runs.lasts]) if return_final_states else y


_SPLIT = _Function(
    "mamba_split_conv1d_scan_combined", "D f H|HP, zxbcdt x BTZ, conv1d_weight f KW, conv1d_bias? f K, dt_bias f H, "
    "A f H, initial_states? f BHPN, seq_idx? i BT, rmsnorm_weight? f I, outproj_weight? f OJ, outproj_bias? f O")


@named(_SPLIT.name, x="zxbcdt", xBC="zxbcdt", dt="zxbcdt", z="zxbcdt", weight="conv1d_weight", bias="conv1d_bias",
       Dskip="D", state="initial_states", dt_min="dt_limit", dt_max="dt_limit", gamma="rmsnorm_weight",
       eps="rmsnorm_eps")
def mamba_split_conv1d_scan_combined(zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, initial_states=None,
                                     seq_idx=None, dt_limit=(0.0, float("inf")), return_final_states=False,
                                     activation="silu", rmsnorm_weight=None, rmsnorm_eps=1e-6, outproj_weight=None,
                                     outproj_bias=None, headdim=None, ngroups=1, norm_before_gate=True,
                                     state_dtype=None):
    """Computes the part of a Mamba-2 block after its in-projection.  zxbcdt [B,T,...] has rows of z, x, B, C and dt.
    If the rows are longer, they begin with both halves of a gated MLP beside the block.  conv1d_weight [H P + 2 G N,W],
    D [H] (then headdim is P) or [H,P]; chunk_size is not used.  With rmsnorm_weight [H P], a norm of each group and the
    gate follow the scan; without it only the gate follows.  The product with outproj_weight comes last.  seq_idx and
    states are as in mamba_chunk_scan_combined; where seq_idx is negative, the convolution gives 0, as in
    causal_conv1d_fn."""
    function = _SPLIT
    function.state_dtype(state_dtype)
    function.positive("chunk_size", chunk_size)
    activation, limit = function.activation(activation), function.dt_limit(dt_limit)
    if outproj_weight is None and outproj_bias is not None:
        function.unsupported("outproj_bias without outproj_weight")
    known = {}
    if isinstance(D, torch.Tensor) and D.dim() == 1:
        if headdim is None:
            function.unsupported("D [H] without headdim")
        known["P"] = function.positive("headdim", headdim)
    function.check(D)
    H, P = (*D.shape, *known.values())
    ngroups = function.positive("ngroups", ngroups)
    if H < 1 or H % ngroups:
        function.refuse(f"ngroups = {ngroups}: must divide the {H} heads of D")
    function.check(D, zxbcdt, conv1d_weight, **known)
    function.check_width("conv1d_weight", conv1d_weight)
    inner, BC = H * P, conv1d_weight.shape[0] - H * P
    if BC < 1 or BC % (2 * ngroups):
        function.refuse_shape("conv1d_weight", conv1d_weight, "must be [H P + 2 G N,W], where "
                              f"H = {H}, P = {P}, G = {ngroups}")
    N = BC // (2 * ngroups)
    beside = zxbcdt.shape[-1] - 2 * inner - BC - H
    if beside < 0 or beside % 2:
        function.refuse_shape("zxbcdt", zxbcdt, f"rows must have 2 H P + 2 G N + H = {2 * inner + BC + H} elements, "
                              "or an even number more")
    sizes = function.check(D, zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, initial_states, seq_idx, rmsnorm_weight,
                           outproj_weight, outproj_bias, **known, N=N, I=inner, J=inner + beside // 2)
    if rmsnorm_weight is not None:
        rmsnorm_eps = function.eps("rmsnorm_eps", rmsnorm_eps)
    if outproj_weight is not None and not _is_autocast(zxbcdt):
        for name, tensor in (("outproj_weight", outproj_weight), ("outproj_bias", outproj_bias)):
            if tensor is not None and tensor.dtype != zxbcdt.dtype:
                function.refuse(f"{name} has dtype {tensor.dtype}: must be {zxbcdt.dtype}", c.GT_ERROR_DTYPE)
    gated, z, xBC, dt = zxbcdt.split([beside, inner, inner + BC, H], -1)
    heads = z.unflatten(-1, (H, P))
    gate = heads if rmsnorm_weight is None else None
    options = {"softplus": True, "dt_limit": None if limit == (0.0, float("inf")) else limit,
               "final_state": bool(return_final_states)}
    runs = padding = None
    packed, apart = {}, activation is None  # conv_ssd always applies SiLU
    if _has_tokens(function, seq_idx):
        runs, padding = _Runs(function, seq_idx), (seq_idx < 0)[..., None]
        packed, A = runs.options(), runs.poison(A)
        # the convolution's output for padding must not enter a state
        apart = apart or return_final_states or initial_states is not None
        initial_states = _spread(initial_states, runs)
        xBC, dt, gate = _one_row(xBC), _one_row(dt), _one_row(gate)
    if apart:
        xBC = gt.conv1d(xBC, conv1d_weight, conv1d_bias, activation=activation, **packed)
        if padding is not None:
            xBC = torch.where(_one_row(padding), 0, xBC)
        x, B, C = xBC.split([inner, BC // 2, BC // 2], -1)
        results = gt.ssd(x.unflatten(-1, (H, P)), dt, A, B.unflatten(-1, (ngroups, N)), C.unflatten(-1, (ngroups, N)),
                         D, gate, dt_bias, initial_states, **packed, **options)
    else:
        results = gt.conv_ssd(xBC, dt, conv1d_weight, A, conv1d_bias, D, gate, dt_bias, None, initial_states,
                              state_size=N, groups=ngroups, **packed, **options)
    y, states = (results[0], results[-1]) if return_final_states else (results, None)
    y = y.reshape(z.shape)
    if padding is not None:
        y = torch.where(padding, 0, y)
    if rmsnorm_weight is not None:
        y = gt.norm_gate(y, z, rmsnorm_weight, gate_first=not norm_before_gate, heads=ngroups, eps=rmsnorm_eps)
    if beside:
        first, second = gated.chunk(2, -1)
        y = torch.cat([F.silu(first) * second, y], -1)
    if outproj_weight is not None:
        y = F.linear(y, outproj_weight, outproj_bias)
    return (y, states if runs is None else states[runs.lasts]) if return_final_states else y


def _is_autocast(tensor):
    return tensor.device.type != "meta" and torch.is_autocast_enabled(tensor.device.type)


def _scan_input(B, batch, T, groups):
    """Returns B or C of selective_scan_fn as [B,T,G,N]."""
    if B.dim() == 2:  # [D,N]: the same for all tokens, different in each channel
        return B.expand(batch, T, *B.shape)
    B = B.transpose(1, 2).unsqueeze(2) if B.dim() == 3 else B.permute(0, 3, 1, 2)
    return B if B.shape[2] == groups else B.repeat_interleave(groups // B.shape[2], 2)


_SELECTIVE_SCAN = _Function("selective_scan_fn", "u x BDT, delta x BDT, A f DN, B x DN|BNT|BGNT, C x DN|BNT|BgNT, "
                            "D? f D, z? x BDT, delta_bias? f D, cu_seqlens? i L")


@named(_SELECTIVE_SCAN.name, dt="delta", Bm="B", Cm="C", Dskip="D", dt_bias="delta_bias")
def selective_scan_fn(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False,
                      cu_seqlens=None):
    """u delta z [B,D,T], A [D,N], B C [D,N], [B,N,T] or [B,G,N,T], D delta_bias [D] -> y [B,D,T].  With
    return_last_state it also returns the state [B,D,N] in float32.  cu_seqlens [L] has the bounds of sequences; B is
    then 1."""
    sizes = _SELECTIVE_SCAN.check(u, delta, A, B, C, D, z, delta_bias, cu_seqlens)
    if cu_seqlens is not None:
        _SELECTIVE_SCAN.check_sequences(cu_seqlens, "u", u)
    variable = {name: (tensor, tensor.shape[1] if tensor.dim() == 4 else 1)
                for name, tensor in (("B", B), ("C", C)) if tensor.dim() > 2}
    if variable:
        _SELECTIVE_SCAN.check_groups(sizes["D"], **variable)
    dtype, groups = u.dtype, sizes["D"] if len(variable) < 2 else variable["B"][1]
    B, C = (_scan_input(tensor, sizes["B"], sizes["T"], groups) for tensor in (B, C))
    u, B, C, z = _together(u.transpose(1, 2), B, C, None if z is None else z.transpose(1, 2))
    y, state = gt.selective_scan(u, delta.transpose(1, 2), A, B, C, D, z, delta_bias, softplus=bool(delta_softplus),
                                 final_state=True, cu_seqlens=cu_seqlens)
    y = y.transpose(1, 2).to(dtype)
    return (y, state if cu_seqlens is None else state[-1:]) if return_last_state else y


_INNER = _Function("mamba_inner_fn", "A f DN, xz x BZT, conv1d_weight f DW|D1W, conv1d_bias? f D, x_proj_weight f XD, "
                   "delta_proj_weight f DR, out_proj_weight f OD, out_proj_bias? f O, B? x DN|BNT|BGNT, C? x DN|BNT|BgNT, "
                   "D? f D, delta_bias? f D, B_proj_bias? f N, C_proj_bias? f N, b_rms_weight? f N, c_rms_weight? f N, "
                   "dt_rms_weight? f D, cu_seqlens? i L, seq_idx? i BT")


@named(_INNER.name, u="xz", x="xz", delta="xz", dt="xz", z="xz", weight="conv1d_weight", bias="conv1d_bias", Bm="B", Cm="C",
       Dskip="D", dt_bias="delta_bias", eps="b_c_dt_rms_eps")
def mamba_inner_fn(xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias, A,
                   B=None, C=None, D=None, delta_bias=None, B_proj_bias=None, C_proj_bias=None, delta_softplus=True,
                   checkpoint_lvl=1, b_rms_weight=None, c_rms_weight=None, dt_rms_weight=None, b_c_dt_rms_eps=1e-6,
                   cu_seqlens=None, seq_idx=None):
    """Computes the part of a Mamba block after its in-projection.  xz [B,2D,T] has rows of x and z; conv1d_weight
    [D,1,W], A [D,N], delta_proj_weight [D,R], out_proj_weight [O,D] -> [B,T,O].  x_proj_weight [R+2N,D] makes delta, B
    and C from the convolved x.  If B or C is given, it has R+N rows; if both are given, R rows.  b_rms_weight,
    c_rms_weight [N] and dt_rms_weight [D] are gains of norms of B, C and delta.  checkpoint_lvl is not used.
    cu_seqlens and seq_idx are as in the other functions."""
    function = _INNER
    sizes = function.check(A, xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight,
                           out_proj_bias, B, C, D, delta_bias, B_proj_bias, C_proj_bias, b_rms_weight, c_rms_weight,
                           dt_rms_weight, cu_seqlens, seq_idx, **{"1": 1})
    inner, N, rank, T = sizes["D"], sizes["N"], sizes["R"], sizes["T"]
    if sizes["Z"] != 2 * inner:
        function.refuse_shape("xz", xz, f"must have 2 D = {2 * inner} channels")
    wanted = rank + N * ((B is None) + (C is None))
    if sizes["X"] != wanted:
        function.refuse_shape("x_proj_weight", x_proj_weight, f"must have {wanted} rows, where R = {rank}, N = {N}")
    if cu_seqlens is not None:
        function.check_sequences(cu_seqlens, "xz", xz)
        if seq_idx is None and T:
            places = torch.arange(T, device=xz.device)
            seq_idx = torch.bucketize(places, cu_seqlens.to(torch.int64), right=True)[None]
    x, z = xz.chunk(2, 1)
    x = causal_conv1d_fn(x, conv1d_weight.reshape(inner, -1), conv1d_bias, seq_idx, activation="silu")
    rows = F.linear(x.transpose(1, 2), x_proj_weight)
    delta = F.linear(rows[..., :rank], delta_proj_weight)

    def part(given, start, bias, gain):
        if given is None:
            given = rows[..., start:start + N]
            given = (given if bias is None else given + bias.to(given.dtype)).transpose(1, 2)
        if gain is not None:
            if given.dim() != 3:
                function.unsupported("a norm of B or C that are not [B,N,T]")
            given = gt.norm_gate(given.transpose(1, 2), None, gain, eps=b_c_dt_rms_eps).transpose(1, 2)
        return given

    B = part(B, rank, B_proj_bias, b_rms_weight)
    C = part(C, sizes["X"] - N, C_proj_bias, c_rms_weight)
    if dt_rms_weight is not None:
        delta = gt.norm_gate(delta, None, dt_rms_weight, eps=b_c_dt_rms_eps)
    y = selective_scan_fn(x, delta.transpose(1, 2), A, B, C, D, z, delta_bias, delta_softplus, cu_seqlens=cu_seqlens)
    return F.linear(y.transpose(1, 2), out_proj_weight, out_proj_bias)


_UPDATE, _UPDATE_HEADS = (_Function("selective_state_update", tensors) for tensors in (
    "state f SDN|SHPN, x x BD, dt x BD, A f DN, B x BN|BGN, C x BN|BgN, D? f D, z? x BD, dt_bias? f D, "
    "state_batch_indices? i B",
    "state f SHPN, x x BHP, dt x BHP, A f HPN, B x BN|BGN, C x BN|BgN, D? f HP, z? x BHP, dt_bias? f HP, "
    "state_batch_indices? i B"))


def _is_head_wise(sizes, dt, A, dt_bias):
    """Whether ssd_step can compute the update: each head has one A, dt and dt_bias, and the kernel supports the head
    size."""
    return ("P" in sizes and sizes["P"] <= 256 and _is_expanded(A, 1, 2) and _is_expanded(dt, 2)
            and (dt_bias is None or _is_expanded(dt_bias, 1)))


@named(_UPDATE.name, u="x", Bm="B", Cm="C", Dskip="D", slots="state_batch_indices")
@torch.no_grad()
def selective_state_update(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False,
                           state_batch_indices=None):
    """Decodes one token of each element.  state [B,D,N] or [B,H,P,N] is updated in place.  x dt z [B,D] or [B,H,P]; A
    [D,N] or [H,P,N]; B C [B,N] or [B,G,N]; D dt_bias [D] or [H,P].  state_batch_indices [B]: rows of state.

    ssd_step computes heads whose A, dt and dt_bias are expanded over P and N, as in Mamba-2.  selective_scan_step
    computes all others.  A step works in place, as one kernel, on a contiguous state.  ssd_step also does so on packed
    rows that lie apart."""
    function = _UPDATE_HEADS if isinstance(state, torch.Tensor) and state.dim() == 4 else _UPDATE
    sizes = function.check(state, x, dt, A, B, C, D, z, dt_bias, state_batch_indices)
    function.check_groups(sizes.get("H", 1), B=(B, B.shape[1] if B.dim() == 3 else 1),
                          C=(C, C.shape[1] if C.dim() == 3 else 1))
    function.check_pool("state", state, sizes["B"], state_batch_indices)
    dtype, softplus = x.dtype, bool(dt_softplus)
    x, B, C, z = _together(x, B, C, z)
    step = functools.partial(_step, sizes, x, dt, A, B, C, D, z, dt_bias, softplus)
    return _update_rows(state, state_batch_indices, step, _steps_in_place(state, sizes, dt, A, dt_bias)).to(dtype)


def _steps_in_place(state, sizes, dt, A, dt_bias):
    """Whether a step can update this state in place: it is contiguous, or ssd_step runs and its rows are packed."""
    if state.dtype not in DTYPES:
        return False
    return state.is_contiguous() or (_is_head_wise(sizes, dt, A, dt_bias) and state[:1].is_contiguous()
                                     and state.stride(0) >= state[0].numel())


def _step(sizes, x, dt, A, B, C, D, z, dt_bias, softplus, pool, **arrays):
    """Runs one token of each element.  Arguments are as in selective_state_update.  Returns y in the shape of x."""
    shape = x.shape

    def token(tensor):
        return None if tensor is None else tensor[:, None]

    def groups(tensor):
        return tensor[:, None, None] if tensor.dim() == 2 else tensor[:, None]

    if _is_head_wise(sizes, dt, A, dt_bias):
        skip = D[:, 0] if D is not None and _is_expanded(D, 1) else D
        y = gt.ssd_step(token(x), token(dt[..., 0]), A[:, 0, 0], groups(B), groups(C), skip, token(z),
                        None if dt_bias is None else dt_bias[:, 0], pool, softplus=softplus, **arrays)
    else:
        x, dt, z = (None if tensor is None else tensor.flatten(1) for tensor in (x, dt, z))
        D, dt_bias = (None if tensor is None else tensor.flatten() for tensor in (D, dt_bias))
        y = gt.selective_scan_step(token(x), token(dt), A.flatten(0, -2), groups(B), groups(C), D, token(z), dt_bias,
                                   pool.flatten(1, -2), softplus=softplus, **arrays)
    return y.reshape(shape)


def _norm(function, x, weight, bias, z, eps, group_size, norm_before_gate, is_rms_norm):
    channels = function.check(x, weight, bias, z)["D"]
    size = channels if group_size is None else function.positive("group_size", group_size)
    if size < 1 or channels % size:
        function.refuse(f"group_size = {size}: must divide the {channels} channels of x")
    eps, dtype = function.eps("eps", eps), x.dtype
    x, z = _together(x, z)
    y = gt.norm_gate(x, z, weight, bias, norm="rms" if is_rms_norm else "layer", gate_first=not norm_before_gate,
                     heads=channels // size, eps=eps)
    return y.to(dtype)


_LAYERNORM, _RMS_NORM_GATED, _RMSNORM = (_Function(name, "x x MD, weight f D, bias? f D, z? x MD")
                                         for name in ("layernorm_fn", "rms_norm_gated", "rmsnorm_fn"))


@named(_LAYERNORM.name, gamma="weight", beta="bias")
def layernorm_fn(x, weight, bias, z=None, eps=1e-6, group_size=None, norm_before_gate=True, is_rms_norm=False):
    """Returns norm(x) weight + bias, gated with SiLU(z), in the dtype of x.  x z [...,D], weight bias [D].  The norm is
    computed for each group of group_size channels.  None: one group of all channels."""
    return _norm(_LAYERNORM, x, weight, bias, z, eps, group_size, norm_before_gate, is_rms_norm)


@named(_RMS_NORM_GATED.name, gamma="weight", beta="bias")
def rms_norm_gated(x, weight, bias=None, z=None, eps=1e-6, group_size=None, norm_before_gate=True):
    """The same as layernorm_fn, but with RMSNorm."""
    return _norm(_RMS_NORM_GATED, x, weight, bias, z, eps, group_size, norm_before_gate, True)


@named(_RMSNORM.name, gamma="weight", beta="bias")
def rmsnorm_fn(x, weight, bias=None, z=None, eps=1e-6, group_size=None, norm_before_gate=True):
    """rms_norm_gated by its name in mamba_ssm.ops.triton.layernorm_gated."""
    return _norm(_RMSNORM, x, weight, bias, z, eps, group_size, norm_before_gate, True)


_LAYER_NORM, _RMS_NORM = (_Function(name, "x x MD, weight f D, bias? f D, residual? f MD, x1? x MD, weight1? f D, "
                                    "bias1? f D, rowscale? f M1") for name in ("layer_norm_fn", "rms_norm_fn"))


def _is_cast(x):
    """Whether autocast gives activations another dtype."""
    kind = x.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != x.dtype


def _add_norm(function, x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm, residual_in_fp32,
              is_rms_norm, return_dropout_mask):
    sizes = function.check(x, weight, bias, residual, x1, weight1, bias1)
    if rowscale is not None:
        check_tensor(function.name, "rowscale", rowscale)
        if rowscale.shape != sizes["M"]:
            function.refuse_shape("rowscale", rowscale, f"must be {list(sizes['M'])}")
        function.check(x, weight, bias, residual, x1, weight1, bias1, rowscale[..., None], **{"1": 1})
    if return_dropout_mask:
        function.unsupported("return_dropout_mask")
    if weight1 is None and bias1 is not None:
        function.unsupported("bias1 without weight1")
    eps, dropout_p = function.eps("eps", eps), number(function.name, "dropout_p", dropout_p)
    if not 0 <= dropout_p < 1:
        function.refuse(f"dropout_p = {dropout_p}: must be 0 to 1")
    residual_dtype = residual.dtype if residual is not None else torch.float32 if residual_in_fp32 else x.dtype
    norm, total = "rms" if is_rms_norm else "layer", None
    for part in (x, x1):
        if part is not None:
            part = part if rowscale is None else part * rowscale[..., None].to(part.dtype)
            part = F.dropout(part, dropout_p) if dropout_p else part
            total = part if total is None else total.float() + part.float()
    has_sum = residual is not None or (prenorm and residual_dtype != x.dtype)
    if has_sum and x1 is None and weight1 is None and not _is_cast(x):
        if residual is not None and residual.dtype != x.dtype:
            residual = residual.float()  # other dtypes cannot hold the sum
        # backward reads a sum that is not rounded
        y, total = gt.add_norm(total, residual, weight, bias, norm=norm, eps=eps, sum_in_fp32=residual is None,
                               reads_sum=residual is not None and residual.dtype == torch.float32)
        return (y, total.to(residual_dtype)) if prenorm else y
    if residual is not None:
        total = total.float() + residual.float()
    results = [gt.norm_gate(total, None, weight, bias, norm=norm, eps=eps).to(x.dtype)]
    if weight1 is not None:
        results.append(gt.norm_gate(total, None, weight1, bias1, norm=norm, eps=eps).to(x.dtype))
    if prenorm:
        results.append(total.to(residual_dtype))
    return tuple(results) if len(results) > 1 else results[0]


@named(_LAYER_NORM.name, gamma="weight", beta="bias")
def layer_norm_fn(x, weight, bias, residual=None, x1=None, weight1=None, bias1=None, eps=1e-6, dropout_p=0.0, rowscale=None,
                  prenorm=False, residual_in_fp32=False, is_rms_norm=False, return_dropout_mask=False):
    """Returns norm(x + x1 + residual) weight + bias, in the dtype of x.  x x1 residual [...,D]; the sum is float32.
    With weight1 it also returns the same norm with weight1 and bias1.  With prenorm it also returns the sum, in the
    dtype of residual, or in float32 with residual_in_fp32.  Before the sum, rowscale [...] multiplies x and x1, and
    dropout_p drops elements of both."""
    return _add_norm(_LAYER_NORM, x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm,
                     residual_in_fp32, is_rms_norm, return_dropout_mask)


@named(_RMS_NORM.name, gamma="weight", beta="bias")
def rms_norm_fn(x, weight, bias, residual=None, x1=None, weight1=None, bias1=None, eps=1e-6, dropout_p=0.0, rowscale=None,
                prenorm=False, residual_in_fp32=False, return_dropout_mask=False):
    """The same as layer_norm_fn, but with RMSNorm."""
    return _add_norm(_RMS_NORM, x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm,
                     residual_in_fp32, True, return_dropout_mask)


# ---- causal-conv1d ----

_CONV = _Function("causal_conv1d_fn", "x x BDT, weight f DW, bias? f D, seq_idx? i BT, initial_states? f BDw, "
                  "final_states_out? f BDw")


@named(_CONV.name, state="initial_states")
def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False,
                     final_states_out=None, activation=None):
    """x [B,D,T], weight [D,W] with W from 2 to 4, bias [D], initial_states and final_states_out [B,D,W-1].  A sequence
    ends where seq_idx [B,T] changes; y is 0 where seq_idx is negative."""
    function = _CONV
    activation = function.activation(activation)
    if seq_idx is not None and (initial_states is not None or return_final_states):
        function.unsupported("seq_idx with states")
    out = final_states_out if return_final_states else None  # the package uses it only then
    function.check(x, weight, bias, seq_idx, initial_states, out)
    function.check_width("weight", weight)
    if out is not None:
        function.check_in_place("final_states_out", out)
        if out.dtype != x.dtype:
            function.refuse(f"final_states_out has dtype {out.dtype}: must be {x.dtype}", c.GT_ERROR_DTYPE)
    rows = x.transpose(1, 2)
    if _has_tokens(function, seq_idx):
        runs = _Runs(function, seq_idx, most=seq_idx.numel())
        y = gt.conv1d(_one_row(rows), weight, bias, activation=activation, **runs.options()).reshape(rows.shape)
        return torch.where((seq_idx < 0)[..., None], 0, y).transpose(1, 2)
    y, states = gt.conv1d(rows, weight, bias, initial_states, activation=activation, final_state=True)
    if not return_final_states:
        return y.transpose(1, 2)
    states = states.to(x.dtype)
    return y.transpose(1, 2), states if out is None else out.copy_(states)


_CONV_UPDATE = _Function("causal_conv1d_update", "x x BD|BDT, conv_state f RDS, weight f DW, bias? f D, "
                         "cache_seqlens? i B, conv_state_indices? i B")


@named(_CONV_UPDATE.name, state="conv_state", slots="conv_state_indices")
@torch.no_grad()
def causal_conv1d_update(x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, conv_state_indices=None):
    """Convolves new tokens, x [B,D] or [B,D,T].  conv_state [B,D,S] has the last S inputs, at least W - 1, and is
    updated in place.  With cache_seqlens [B] conv_state is a ring, and cache_seqlens has its next places.
    conv_state_indices [B]: rows of conv_state."""
    function = _CONV_UPDATE
    activation = function.activation(activation)
    sizes = function.check(x, conv_state, weight, bias, cache_seqlens, conv_state_indices)
    function.check_width("weight", weight)
    function.check_pool("conv_state", conv_state, sizes["B"], conv_state_indices)
    T, W, S = sizes.get("T", 1), sizes["W"], sizes["S"]
    if S < W - 1:
        function.refuse_shape("conv_state", conv_state, f"must have at least W - 1 = {W - 1} inputs a row")
    tokens, y = (x.unsqueeze(-1) if x.dim() == 2 else x).transpose(1, 2), []
    pool = conv_state if conv_state.dtype in DTYPES else conv_state.float()
    for start in range(0, T, MOST_TOKENS):
        places = cache_seqlens if cache_seqlens is None or start == 0 else cache_seqlens + start
        y.append(gt.conv1d_step(tokens[:, start:start + MOST_TOKENS], weight, bias, pool, activation=activation,
                                slots=conv_state_indices, places=places))
    if pool is not conv_state:
        conv_state.copy_(pool)
    y = y[0] if len(y) == 1 else torch.cat([tokens[:, :0], *y], 1)
    return y[:, 0] if x.dim() == 2 else y.transpose(1, 2)


_VARLEN = _Function("causal_conv1d_varlen_states", "x x TD, cu_seqlens i L")


@named(_VARLEN.name)
def causal_conv1d_varlen_states(x, cu_seqlens, state_len):
    """Returns the last state_len inputs of each sequence of x [T,D], as [sequences,D,state_len].  If a sequence is
    shorter, zeros come first."""
    _VARLEN.check(x, cu_seqlens)
    state_len = _VARLEN.positive("state_len", state_len)
    _VARLEN.check_sequences(cu_seqlens, "x", x[None])
    bounds = cu_seqlens.long()
    places = bounds[1:, None] + torch.arange(-state_len, 0, device=x.device)
    is_inside = (places >= bounds[:-1, None].clamp_min(0)) & (places < x.shape[0])
    rows = F.pad(x, (0, 0, 0, 1))[torch.where(is_inside, places, x.shape[0])]  # the last row is zeros
    return rows.transpose(1, 2)


# ---- RWKV-LM ----

_RWKV_LM = _Function("RUN_CUDA_RWKV6", "r x BTC, k x BTC, v x BTC, w x BTC, u f HN|C")


@named(_RWKV_LM.name)
def RUN_CUDA_RWKV6(B, T, C, H, r, k, v, w, u):
    """r k v w [B,T,C], u [H,C/H] -> [B,T,C].  The decay is exp(-exp(w))."""
    B, T, C, H = (integer(_RWKV_LM.name, name, value) for name, value in zip("BTCH", (B, T, C, H)))
    if H < 1 or C % H:
        _RWKV_LM.refuse(f"H = {H}: must divide C = {C}")
    _RWKV_LM.check(r, k, v, w, u, B=B, T=T, C=C, H=H, N=C // H)
    dtype, (r, k, v) = v.dtype, _together(r, k, v)
    r, k, v, w = (t.view(B, T, H, C // H) for t in (r, k, v, w))
    return gt.wkv6(r, k, v, w, u.reshape(H, C // H)).view(B, T, C).to(dtype)


from ._install import install  # noqa: E402 - which needs all names above
