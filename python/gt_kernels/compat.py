"""Functions with the signatures of the packages that people use now: change one import.

    from gt_kernels.compat import chunk_rwkv6, mamba_chunk_scan_combined, causal_conv1d_fn

    flash-linear-attention   chunk_rwkv6, fused_recurrent_rwkv6
    mamba_ssm                mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined, selective_scan_fn,
                             selective_state_update, rms_norm_gated (there rmsnorm_fn of layernorm_gated), layernorm_fn
    causal-conv1d            causal_conv1d_fn, causal_conv1d_update
    RWKV-LM                  RUN_CUDA_RWKV6

A bad argument raises ArgumentError, and an unsupported one UnsupportedError, before anything is computed or changed.
Both name the function and the argument.  Shapes must be as in the package.  Layouts and floating dtypes may differ from
it.  seq_idx, cu_seqlens and indices are int32 or int64.  An update skips a batch element whose row lies outside of the
state, and gives it a y of 0.  eps and scale must be positive in float32.

States are computed in float32.  Gradients pass through final states, also where the package has none; updates have no
gradients, as there.
"""

import functools

import torch
import torch.nn.functional as F

from . import c
from . import torch as gt
from .torch._errors import check_tensor, integer, named, number, refuse

__all__ = ["RUN_CUDA_RWKV6", "causal_conv1d_fn", "causal_conv1d_update", "chunk_rwkv6", "fused_recurrent_rwkv6",
           "layernorm_fn", "mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined", "rms_norm_gated",
           "rmsnorm_fn", "selective_scan_fn", "selective_state_update"]

_DTYPES = {"x": (torch.float32, torch.bfloat16, torch.float16),
           "f": (torch.float32, torch.bfloat16, torch.float16, torch.float64), "i": (torch.int32, torch.int64)}


class _Function:
    """The name of a function in errors, and its tensors as "name kind shape, ..." in the words of torch/_operators.py.
    Kinds: x activations, f parameters and states, i integers."""

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
        """Holds tensors against each other and against `sizes`.  Returns all sizes.  Functions derive arrays only from
        checked tensors: from a wrong shape they would derive wrong values, or bounds that kernels read beyond."""
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
                if size == 0 and letter not in "BTSRL":
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
                          if letter != "w")
        self.refuse_shape(name, tensor, f"must be {right}" + (f", where {known}" if known else ""))

    def check_groups(self, heads, **tensors):
        """tensors: name=(tensor, its number of groups)."""
        first = next(iter(tensors.values()))[1]
        for name, (tensor, groups) in tensors.items():
            if groups < 1 or heads % groups:
                self.refuse_shape(name, tensor, f"its {groups} groups do not divide {heads}")
            if groups != first:
                self.refuse_shape(name, tensor, f"must have {first} groups")

    def check_width(self, name, weight):
        if not 2 <= weight.shape[1] <= 4:
            self.unsupported(f"{name}: width {weight.shape[1]}, not 2 to 4,")

    def check_pool(self, name, state, batch, indices):
        """A state of an update has a row for each batch element, or indices say which."""
        if indices is None and state.shape[0] != batch:
            self.refuse_shape(name, state, f"must have a row for each of {batch} batch elements")
        if indices is not None and not state.shape[0]:
            self.refuse_shape(name, state, "must have a row")
        self.check_in_place(name, state)

    def check_in_place(self, name, tensor):
        if any(size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride())):
            self.refuse(f"{name} has strides {list(tensor.stride())}: must not be expanded, it is written in place",
                        c.GT_ERROR_STRIDE)

    def positive(self, name, value):
        value = integer(self.name, name, value)
        if value < 1:
            self.refuse(f"{name} = {value}: must be positive")
        return value

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
    """Activations of one dtype: where they differ, the one that has them all."""
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
    chunk_size = others.pop("chunk_size", None)  # how it is computed there
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
        if rows != 1:
            function.refuse_shape("r", r, "the batch size must be 1 with cu_seqlens")
        rows = sizes["L"] - 1
        if rows < 1:
            function.refuse_shape("cu_seqlens", cu_seqlens, "must have at least 2 elements")
    if initial_state is not None and sizes["S"] != rows:
        function.refuse_shape("initial_state", initial_state, f"must have a state for each of {rows} sequences")
    tensors = [t.transpose(1, 2) if head_first else t for t in (r, k, v, w)]
    if reverse:
        tensors = [t.flip(1) for t in tensors]
    r, k, v, w = tensors
    scale = k.shape[-1] ** -0.5 if scale is None else number(function.name, "scale", scale)
    y, state = gt.wkv6(r, k, v, w, u, initial_state, decay="log", scale=scale, final_state=True, cu_seqlens=cu_seqlens)
    if reverse:
        y = y.flip(1)
    return y.transpose(1, 2) if head_first else y, state if output_final_state else None


@named("gt_kernels.compat.chunk_rwkv6", state="initial_state")
def chunk_rwkv6(r, k, v, w, u, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None,
                cu_seqlens_cpu=None, **kwargs):
    """r k w [B,T,H,K], v [B,T,H,V], w in log space, u [H,K]; scale: of o, None: K^-0.5.  (o, final state or None)"""
    return _rwkv6("chunk_rwkv6", r, k, v, w, u, scale, initial_state, output_final_state, cu_seqlens, False, kwargs)


@named("gt_kernels.compat.fused_recurrent_rwkv6", state="initial_state")
def fused_recurrent_rwkv6(r, k, v, w, u, scale=None, initial_state=None, output_final_state=False, reverse=False,
                          cu_seqlens=None, **kwargs):
    """As chunk_rwkv6.  reverse: from the last token to the first."""
    return _rwkv6("fused_recurrent_rwkv6", r, k, v, w, u, scale, initial_state, output_final_state, cu_seqlens, reverse,
                  kwargs)


# ---- sequences that an index of each token tells apart ----


def _pack(seq_idx):
    """The bounds of the runs of equal numbers in seq_idx [B,T], all rows behind one another, and which run begins a row
    and ends one.  seq_idx is checked and not empty.  Waits for the device."""
    B, T = seq_idx.shape
    first = torch.ones_like(seq_idx, dtype=torch.bool)
    first[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    starts = first.flatten().nonzero().flatten()
    bounds = torch.cat([starts, starts.new_full((1,), B * T)]).to(torch.int32)
    runs = first.sum(1).cumsum(0)
    return bounds, torch.cat([runs.new_zeros(1), runs[:-1]]), runs - 1


def _has_tokens(seq_idx):
    return seq_idx is not None and seq_idx.numel() > 0


def _one_row(tensor):
    return None if tensor is None else tensor.reshape(1, -1, *tensor.shape[2:])


def _spread(states, bounds, firsts):
    """A state for each run: those of the rows for the runs that begin one, else zeros."""
    if states is None:
        return None
    zeros = torch.zeros(len(bounds) - 1, *states.shape[1:], dtype=torch.float32, device=states.device)
    return zeros.index_put((firsts,), states.float())


# ---- states of updates ----

def _is_expanded(tensor, *dims):
    """Whether each of the dimensions repeats one element."""
    return all(tensor.shape[dim] == 1 or tensor.stride(dim) == 0 for dim in dims)


def _take_rows(pool, indices):
    """(the rows of a state that indices name, where they lie, whether each index is in the pool).  Without indices: the
    state itself.  An index outside reads some row."""
    if indices is None:
        return pool, None, None
    places = indices.long().clamp(0, pool.shape[0] - 1)
    return pool.index_select(0, places), places, places == indices


def _put_rows(pool, places, named, rows):
    """Writes what _take_rows took; a row whose index is outside must be unchanged.  It could still overwrite that of
    another batch element: where there is one in the pool, the others write that one's row once more."""
    if len(rows):
        count = torch.arange(len(rows), device=rows.device)
        source = torch.where(named, count, named.to(torch.int32).argmax())
        pool.index_copy_(0, places[source], rows[source])


# ---- mamba_ssm ----

_CHUNK_SCAN = _Function(
    "mamba_chunk_scan_combined", "x x BTHP, dt x BTH, A f H, B x BTGN, C x BTGN, D? f H|HP, z? x BTHP, dt_bias? f H, "
    "initial_states? f BHPN, seq_idx? i BT")


@named(_CHUNK_SCAN.name, Bm="B", Cm="C", Dskip="D", state="initial_states", dt_min="dt_limit", dt_max="dt_limit")
def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None,
                              cu_seqlens=None, dt_softplus=False, dt_limit=(0.0, float("inf")),
                              return_final_states=False, return_varlen_states=False, state_dtype=None):
    """x [B,T,H,P], dt [B,T,H], A [H], B C [B,T,G,N], D [H] or [H,P]; chunk_size is not used.  seq_idx [B,T]: a state ends
    where it changes; initial_states are those of the first sequence of each row, final states those of the last."""
    function = _CHUNK_SCAN
    if return_varlen_states:
        function.unsupported("return_varlen_states (gt_kernels.torch.ssd with cu_seqlens has them)")
    function.state_dtype(state_dtype)
    function.positive("chunk_size", chunk_size)
    sizes = function.check(x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx)
    function.check_groups(sizes["H"], B=(B, sizes["G"]))
    limit, dt_softplus, dtype = function.dt_limit(dt_limit), bool(dt_softplus), x.dtype
    x, B, C, z = _together(x, B, C, z)
    options = {"softplus": dt_softplus, "final_state": True,
               "dt_limit": None if dt_softplus and limit == (0.0, float("inf")) else limit}
    if _has_tokens(seq_idx):
        bounds, firsts, lasts = _pack(seq_idx)
        y, states = gt.ssd(_one_row(x), _one_row(dt), A, _one_row(B), _one_row(C), D, _one_row(z), dt_bias,
                           _spread(initial_states, bounds, firsts), cu_seqlens=bounds, **options)
        y, states = y.reshape(x.shape), states[lasts]
    else:
        y, states = gt.ssd(x, dt, A, B, C, D, z, dt_bias, initial_states, **options)
    y = y.to(dtype)
    return (y, states) if return_final_states else y


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
    """All of a Mamba-2 block behind its in-projection.  zxbcdt [B,T,...], rows of z, x, B, C and dt, and before them,
    if they are longer, both halves of a gated MLP beside it; conv1d_weight [H P + 2 G N,W], D [H] (then headdim is P)
    or [H,P]; chunk_size is not used.  With rmsnorm_weight [H P] a norm of each group and the gate follow the scan, else
    the gate alone; then the product with outproj_weight.  seq_idx and states as in mamba_chunk_scan_combined; where
    seq_idx is negative, the convolution gives 0, as in causal_conv1d_fn."""
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
    options = {"softplus": True, "dt_limit": None if limit == (0.0, float("inf")) else limit, "final_state": True}
    lasts = padding = None
    if _has_tokens(seq_idx):
        options["cu_seqlens"], firsts, lasts = _pack(seq_idx)
        initial_states = _spread(initial_states, options["cu_seqlens"], firsts)
        xBC, dt, gate = _one_row(xBC), _one_row(dt), _one_row(gate)
        negative = _one_row(seq_idx[..., None] < 0)
        padding = negative if negative.any() else None
    if activation is None or padding is not None:  # conv_ssd always applies SiLU, and cannot zero the convolution
        xBC = gt.conv1d(xBC, conv1d_weight, conv1d_bias, activation=activation, cu_seqlens=options.get("cu_seqlens"))
        if padding is not None:
            xBC = torch.where(padding, 0, xBC)
        x, B, C = xBC.split([inner, BC // 2, BC // 2], -1)
        y, states = gt.ssd(x.unflatten(-1, (H, P)), dt, A, B.unflatten(-1, (ngroups, N)), C.unflatten(-1, (ngroups, N)),
                           D, gate, dt_bias, initial_states, **options)
    else:
        y, _, states = gt.conv_ssd(xBC, dt, conv1d_weight, A, conv1d_bias, D, gate, dt_bias, None, initial_states,
                                   state_size=N, groups=ngroups, **options)
    y = y.reshape(z.shape)
    if rmsnorm_weight is not None:
        y = gt.norm_gate(y, z, rmsnorm_weight, gate_first=not norm_before_gate, heads=ngroups, eps=rmsnorm_eps)
    if beside:
        first, second = gated.chunk(2, -1)
        y = torch.cat([F.silu(first) * second, y], -1)
    if outproj_weight is not None:
        y = F.linear(y, outproj_weight, outproj_bias)
    return (y, states if lasts is None else states[lasts]) if return_final_states else y


def _is_autocast(tensor):
    return tensor.device.type != "meta" and torch.is_autocast_enabled(tensor.device.type)


def _scan_input(B, batch, T, groups):
    """B or C of selective_scan_fn as [B,T,G,N]."""
    if B.dim() == 2:  # the same for all tokens, another one for each channel
        return B.expand(batch, T, *B.shape)
    B = B.transpose(1, 2).unsqueeze(2) if B.dim() == 3 else B.permute(0, 3, 1, 2)
    return B if B.shape[2] == groups else B.repeat_interleave(groups // B.shape[2], 2)


_SELECTIVE_SCAN = _Function("selective_scan_fn", "u x BDT, delta x BDT, A f DN, B x DN|BNT|BGNT, C x DN|BNT|BgNT, "
                            "D? f D, z? x BDT, delta_bias? f D")


@named(_SELECTIVE_SCAN.name, dt="delta", Bm="B", Cm="C", Dskip="D", dt_bias="delta_bias")
def selective_scan_fn(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False):
    """u delta z [B,D,T], A [D,N], B C [D,N], [B,N,T] or [B,G,N,T], D delta_bias [D]."""
    sizes = _SELECTIVE_SCAN.check(u, delta, A, B, C, D, z, delta_bias)
    variable = {name: (tensor, tensor.shape[1] if tensor.dim() == 4 else 1)
                for name, tensor in (("B", B), ("C", C)) if tensor.dim() > 2}
    if variable:
        _SELECTIVE_SCAN.check_groups(sizes["D"], **variable)
    dtype, groups = u.dtype, sizes["D"] if len(variable) < 2 else variable["B"][1]
    B, C = (_scan_input(tensor, sizes["B"], sizes["T"], groups) for tensor in (B, C))
    u, B, C, z = _together(u.transpose(1, 2), B, C, None if z is None else z.transpose(1, 2))
    y, state = gt.selective_scan(u, delta.transpose(1, 2), A, B, C, D, z, delta_bias, softplus=bool(delta_softplus),
                                 final_state=True)
    y = y.transpose(1, 2).to(dtype)
    return (y, state) if return_last_state else y


_UPDATE, _UPDATE_HEADS = (_Function("selective_state_update", tensors) for tensors in (
    "state f SDN|SHPN, x x BD, dt x BD, A f DN, B x BN|BGN, C x BN|BgN, D? f D, z? x BD, dt_bias? f D, "
    "state_batch_indices? i B",
    "state f SHPN, x x BHP, dt x BHP, A f HPN, B x BN|BGN, C x BN|BgN, D? f HP, z? x BHP, dt_bias? f HP, "
    "state_batch_indices? i B"))


def _is_head_wise(sizes, dt, A, dt_bias):
    """Whether ssd_step takes the update: one A, dt and dt_bias a head, and a head size that its kernel has."""
    return ("P" in sizes and sizes["P"] <= 256 and _is_expanded(A, 1, 2) and _is_expanded(dt, 2)
            and (dt_bias is None or _is_expanded(dt_bias, 1)))


@named(_UPDATE.name, u="x", Bm="B", Cm="C", Dskip="D", slots="state_batch_indices")
@torch.no_grad()
def selective_state_update(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False,
                           state_batch_indices=None):
    """One token.  state [B,D,N] or [B,H,P,N], updated in place; x dt z [B,D] or [B,H,P]; A [D,N] or [H,P,N]; B C [B,N]
    or [B,G,N]; D dt_bias [D] or [H,P].  state_batch_indices [B]: rows of state.

    ssd_step serves heads whose A, dt and dt_bias are expanded over P and N, as Mamba-2 has them; selective_scan_step
    serves the others.  The step works in place on a state that is float32 and contiguous: the call is one kernel."""
    function = _UPDATE_HEADS if isinstance(state, torch.Tensor) and state.dim() == 4 else _UPDATE
    sizes = function.check(state, x, dt, A, B, C, D, z, dt_bias, state_batch_indices)
    function.check_groups(sizes.get("H", 1), B=(B, B.shape[1] if B.dim() == 3 else 1),
                          C=(C, C.shape[1] if C.dim() == 3 else 1))
    function.check_pool("state", state, sizes["B"], state_batch_indices)
    dtype, shape, softplus = x.dtype, x.shape, bool(dt_softplus)
    x, B, C, z = _together(x, B, C, z)
    pool, places = state, None
    arrays = {"slots": state_batch_indices}
    if state.dtype != torch.float32 or not state.is_contiguous():
        rows, places, named = _take_rows(state, state_batch_indices)
        pool = rows.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        arrays = {} if places is None else {"tokens": named.to(torch.int32)}  # no token for an index outside

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
    if places is not None:
        _put_rows(state, places, named, pool.to(state.dtype))
    elif pool is not state:
        state.copy_(pool)
    return y.reshape(shape).to(dtype)


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
    """norm(x) weight + bias, gated with SiLU(z): the norm of each group of group_size channels, None: of all."""
    return _norm(_LAYERNORM, x, weight, bias, z, eps, group_size, norm_before_gate, is_rms_norm)


@named(_RMS_NORM_GATED.name, gamma="weight", beta="bias")
def rms_norm_gated(x, weight, bias=None, z=None, eps=1e-6, group_size=None, norm_before_gate=True):
    """As layernorm_fn, with RMSNorm."""
    return _norm(_RMS_NORM_GATED, x, weight, bias, z, eps, group_size, norm_before_gate, True)


@named(_RMSNORM.name, gamma="weight", beta="bias")
def rmsnorm_fn(x, weight, bias=None, z=None, eps=1e-6, group_size=None, norm_before_gate=True):
    """rms_norm_gated by its name in mamba_ssm.ops.triton.layernorm_gated."""
    return _norm(_RMSNORM, x, weight, bias, z, eps, group_size, norm_before_gate, True)


# ---- causal-conv1d ----

_CONV = _Function("causal_conv1d_fn", "x x BDT, weight f DW, bias? f D, seq_idx? i BT, initial_states? f BDw, "
                  "final_states_out? f BDw")


@named(_CONV.name, state="initial_states")
def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False,
                     final_states_out=None, activation=None):
    """x [B,D,T], weight [D,W] with W 2 to 4, bias [D], initial_states and final_states_out [B,D,W-1].  seq_idx [B,T]:
    a sequence ends where it changes; y is 0 where it is negative."""
    function = _CONV
    activation = function.activation(activation)
    if seq_idx is not None and (initial_states is not None or return_final_states):
        function.unsupported("seq_idx with states")
    out = final_states_out if return_final_states else None  # else not used there
    function.check(x, weight, bias, seq_idx, initial_states, out)
    function.check_width("weight", weight)
    if out is not None:
        function.check_in_place("final_states_out", out)
        if out.dtype != x.dtype:
            function.refuse(f"final_states_out has dtype {out.dtype}: must be {x.dtype}", c.GT_ERROR_DTYPE)
    rows = x.transpose(1, 2)
    if _has_tokens(seq_idx):
        bounds, _, _ = _pack(seq_idx)
        y = gt.conv1d(_one_row(rows), weight, bias, activation=activation, cu_seqlens=bounds).reshape(rows.shape)
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
    """New tokens: x [B,D] or [B,D,T]; conv_state [B,D,S], S at least W - 1, the last S inputs, updated in place.
    cache_seqlens [B]: conv_state is a ring, and these its next places.  conv_state_indices [B]: rows of conv_state."""
    function = _CONV_UPDATE
    activation = function.activation(activation)
    sizes = function.check(x, conv_state, weight, bias, cache_seqlens, conv_state_indices)
    function.check_width("weight", weight)
    function.check_pool("conv_state", conv_state, sizes["B"], conv_state_indices)
    T, W, S = sizes.get("T", 1), sizes["W"], sizes["S"]
    if S < W - 1:
        function.refuse_shape("conv_state", conv_state, f"must have at least W - 1 = {W - 1} inputs a row")
    tokens = x.unsqueeze(-1) if x.dim() == 2 else x
    if (cache_seqlens is None and S == W - 1 and 1 <= T <= 16 and conv_state.dtype == torch.float32
            and conv_state.is_contiguous()):
        y = gt.conv1d_step(tokens.transpose(1, 2), weight, bias, conv_state, activation=activation,
                           slots=conv_state_indices).transpose(1, 2)
        return y.squeeze(-1) if x.dim() == 2 else y
    pool, tokens = conv_state.transpose(1, 2), tokens.transpose(1, 2)
    rows, places, named = _take_rows(pool, conv_state_indices)
    if cache_seqlens is None:
        inputs = torch.cat([rows, tokens], 1)
        after, inputs = inputs[:, T:], inputs[:, S - (W - 1):]
        if inputs.dtype == torch.float64:
            inputs = inputs.float()
        y = gt.conv1d(inputs, weight, bias, activation=activation)[:, W - 1:].to(x.dtype)
    else:
        at = torch.arange(-(W - 1), T, device=x.device) + cache_seqlens.long()[:, None]
        at = (at % S)[..., None].expand(-1, -1, rows.shape[2])
        new = min(T, S)  # of more tokens than places the last ones stay
        after = rows.scatter(1, at[:, at.shape[1] - new:], tokens[:, T - new:].to(rows.dtype))
        before = rows.gather(1, at[:, :W - 1]).transpose(1, 2)
        y = gt.conv1d(tokens, weight, bias, before, activation=activation)
    if places is None:
        pool.copy_(after)
    else:
        y = y.masked_fill(~named[:, None, None], 0)
        _put_rows(pool, places, named, torch.where(named[:, None, None], after.to(rows.dtype), rows))
    return y[:, 0] if x.dim() == 2 else y.transpose(1, 2)


# ---- RWKV-LM ----

_RWKV_LM = _Function("RUN_CUDA_RWKV6", "r x BTC, k x BTC, v x BTC, w x BTC, u f HN|C")


@named(_RWKV_LM.name)
def RUN_CUDA_RWKV6(B, T, C, H, r, k, v, w, u):
    """r k v w [B,T,C], decay exp(-exp(w)), u [H,C/H] -> [B,T,C]."""
    B, T, C, H = (integer(_RWKV_LM.name, name, value) for name, value in zip("BTCH", (B, T, C, H)))
    if H < 1 or C % H:
        _RWKV_LM.refuse(f"H = {H}: must divide C = {C}")
    _RWKV_LM.check(r, k, v, w, u, B=B, T=T, C=C, H=H, N=C // H)
    r, k, v, w = (t.view(B, T, H, C // H) for t in (r, k, v, w))
    return gt.wkv6(r, k, v, w, u.reshape(H, C // H)).view(B, T, C)
