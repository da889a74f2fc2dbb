"""The arguments of the functions of gt_kernels.torch and gt_kernels.jax, by operator, in the words of gt_kernels.h.

A tensor is "field kind shape".  A question mark after the field means that the tensor may be None.  A field of an inner
struct is written with the name of that struct, as wkv6.r.  An output is "field like shape kind", without the kind if it
is x.  Kinds:

    x   activations
    w   a companion of the activations, which may be fp32: dt, w, or the residual stream of add_norm
    p   a projection weight, which has the dtype of x; its gradient is fp32
    f   fp32
    P   fp32; in a step any dtype that all tensors of kind P share

The letters of a shape are the sizes in gt_kernels.h.  Small letters are the sizes of wkv_ssm's second struct.  Other
letters of a shape:

    M   all indices except the last
    @   rows of states: batch elements, or packed sequences.  A state without this index is shared by all of them
    w   W - 1; in a step s instead, the number of columns of a state
    3   the number 3
"""

import ctypes
from dataclasses import dataclass

from . import c


@dataclass(frozen=True)
class Tensor:
    name: str  # in a schema
    field: str
    kind: str
    shapes: tuple  # alternatives
    optional: bool

    @property
    def is_state(self):
        return self.shapes[0][0] == "@"


@dataclass(frozen=True)
class Output:
    field: str
    like: str  # the tensor whose layout it takes if that has its shape; a state: None
    shape: str
    kind: str = "x"


@dataclass(frozen=True)
class Inner(Output):
    """An output that callers do not get, because only the gradient of `gain` needs it."""
    gain: str = ""
    is_required: bool = False  # forward and a step write it in any case


@dataclass(frozen=True)
class Operator:
    name: str
    c_name: str  # in names of C functions and in errors
    struct: type  # of ctypes
    tensors: tuple  # inputs; states are the last ones
    options: tuple  # (field, type in a schema)
    outputs: tuple  # each y, and then each final state
    inner: tuple
    fields: dict  # the type of each field, of inner structs too
    sizes: dict  # the field of each size
    has_steps: bool
    has_saved: bool
    own_gradient: str  # the tensor whose gradient is dy itself
    same_gradient: tuple  # two tensors: if their dtypes are equal, the first gets the gradient of the second
    derive: object  # finds sizes from others
    decays: str  # the shape of decay_out; empty: the operator takes no sequences in pieces

    @property
    def of_steps(self):
        """Integers that a step takes, [B] except rounding_seed, which is [2]; each may be None."""
        return ("slots", "tokens", "commit") + tuple(
            name for name in ("places", "rounding_seed", "rounding_steps") if name in self.fields)

    @property
    def has_pools(self):
        """Whether packed forward takes states in rows of pools."""
        return "starts_zero" in self.fields

    def state_dtype(self, field):
        """Returns the field that holds the dtype of `field`, a state: conv_state_dtype for conv_state_out.  Calls with
        pools read it, and steps of an operator with parameter_dtype.  None: the state must be fp32."""
        has_types = self.parameter_dtype or "conv_state_dtype" in self.fields
        return beside(field, f"{leaf(field).partition('state')[0]}state_dtype") if has_types else None

    @property
    def of_snapshots(self):
        """The buffers that forward fills with the states of prefixes; empty: the operator has none."""
        return tuple(name for name in ("conv_snapshots", "snapshots") if name in self.fields)

    @property
    def parameter_dtype(self):
        """The field with the dtype of the tensors of kind P; None: in a step these must be fp32."""
        return next((name for name in ("weight_dtype", "parameter_dtype") if name in self.fields), None)

    @property
    def is_recurrent(self):
        """Whether the operator has states and packed sequences."""
        return "cu_seqlens" in self.fields


def leaf(field):
    return field.rpartition(".")[2]


def beside(field, name):
    """Returns the field `name` of the struct that `field` is in."""
    return field[: len(field) - len(leaf(field))] + name


def gradient(field):
    """Returns the field of a gradient: wkv6.dr for wkv6.r, conv_dstate_in for conv_state_in."""
    name = leaf(field)
    return beside(field, f"conv_d{name[5:]}" if name.startswith("conv_") else f"d{name}")


def companion(field):
    """Returns the field that holds the dtype of a tensor of kind w."""
    return beside(field, {"w": "w_dtype", "dt": "dt_dtype"}.get(leaf(field), "sum_dtype"))


def reads(field):
    """Returns the field that is 1 if backward reads `field`, an output of forward."""
    return beside(field, f"reads_{leaf(field)}")


def schema_name(field):
    """Returns the name in a schema: the name of the field, with its inner struct if two structs may have the same
    name."""
    return field.replace(".", "_") if "state_" in field or leaf(field) in ("y", "dy") else leaf(field)


def find(struct, field):
    """Returns the inner struct that a field is in, and the field's name there."""
    *outer, name = field.split(".")
    for part in outer:
        struct = getattr(struct, part)
    return struct, name


def put(struct, field, value):
    inner, name = find(struct, field)
    setattr(inner, name, value)


def all_fields(struct, before=""):
    """Yields (name, type, offset) of every field."""
    for name, kind in struct._fields_:
        offset = getattr(struct, name).offset
        if issubclass(kind, ctypes.Structure) and not kind.__name__.startswith("gt_stride"):
            for inner, inner_kind, inner_offset in all_fields(kind, f"{before}{name}."):
                yield inner, inner_kind, offset + inner_offset
        else:
            yield before + name, kind, offset


def _operator(name, tensors, outputs, options="", sizes="", own_gradient="", same_gradient=(), derive=None,
              decays="", c_name="", inner=()):
    c_name = c_name or name
    struct = getattr(c, f"gt_{c_name}_args")
    fields = {field: kind for field, kind, _ in all_fields(struct)}

    def tensor(text):
        field, kind, shapes = text.split()
        field, optional = field.rstrip("?"), field.endswith("?")
        return Tensor(schema_name(field), field, kind, tuple(shapes.split("|")), optional)

    tensors = tuple(tensor(text) for text in tensors.split(", "))
    outputs = tuple(Output(*text.split()) for text in outputs.split(", "))
    outputs += tuple(Output(t.field.replace("state_in", "state_out"), None, t.shapes[0], "f")
                     for t in tensors if t.is_state)
    options = tuple(tuple(option.split()) for option in options.split(", "))
    if "segments" in fields:
        options += (("segments", "int"),)
    sizes = dict(text.split("=") for text in sizes.split())
    # PyTorch has no step of conv_ssd: its users call conv1d_step and ssd_step
    has_steps = hasattr(c, f"gt_{c_name}_step") and any(t.is_state for t in tensors) and name != "conv_ssd"
    return Operator(name, c_name, struct, tensors, options, outputs, inner, fields, sizes, has_steps,
                    "saved" in fields, own_gradient, same_gradient, derive, decays)


def _conv_ssd_sizes(sizes):
    """Derives the head size from the channels that Bm and Cm leave.  Returns an error text, or None."""
    if "P" in sizes or "H" not in sizes:
        return None
    left = sizes["D"] - 2 * sizes["G"] * sizes["N"]
    if sizes["H"] < 1 or left < sizes["H"] or left % sizes["H"]:
        return (f"xBC has {sizes['D']} channels: must be H P + 2 G N, where H = {sizes['H']}, G = {sizes['G']}, "
                f"N = {sizes['N']}")
    sizes["P"] = left // sizes["H"]
    return None


def _mixed_sizes(sizes):
    """Checks that both branches have one width.  Returns an error text, or None."""
    if all(letter in sizes for letter in "HVhp") and sizes["H"] * sizes["V"] != sizes["h"] * sizes["p"]:
        return (f"x has H = {sizes['h']}, P = {sizes['p']}, but v has H = {sizes['H']}, V = {sizes['V']}: H P must "
                "equal H V to mix the branches")
    return None


_SSM_OPTIONS = "softplus int, dt_limit int, dt_min float, dt_max float"

_WKV_SSM = ("wkv6.r x BTHN, wkv6.k x BTHN, wkv6.v x BTHV, wkv6.w w BTHN, wkv6.u? f HN, ssd.x x BThp, ssd.dt w BTh, "
            "ssd.A f h, ssd.Bm x BTgn, ssd.Cm x BTgn, ssd.Dskip? f h|hp, ssd.z? x BThp, ssd.dt_bias? f h, ")
_WKV_SSM_STATES = "wkv6.state_in? f @HNV, ssd.state_in? f @hpn"
_WKV_SSM_MORE = {
    "options": "wkv6.decay int, wkv6.scale float, ssd.softplus int, ssd.dt_limit int, ssd.dt_min float, "
               "ssd.dt_max float",
    "sizes": "H=wkv6.H N=wkv6.N V=wkv6.V h=ssd.H p=ssd.P g=ssd.G n=ssd.N"}

OPERATORS = tuple(_operator(*description, **more) for description, more in (
    (("wkv6", "r x BTHN, k x BTHN, v x BTHV, w w BTHN, u? P HN, state_in? f @HNV", "y v BTHV"),
     {"options": "decay int, scale float", "decays": "@HN"}),
    (("ssd", "x x BTHP, dt w BTH, A f H, Bm x BTGN, Cm x BTGN, Dskip? P H|HP, z? x BTHP, dt_bias? P H, "
      "state_in? f @HPN", "y x BTHP"), {"options": _SSM_OPTIONS, "decays": "@H"}),
    (("selective_scan", "u x BTD, dt w BTD, A f DN, Bm x BTGN, Cm x BTGN, Dskip? P D, z? x BTD, dt_bias? P D, "
      "state_in? f @DN", "y u BTD"), {"options": "softplus int"}),
    (("conv1d", "x x BTD, weight P DW, bias? P D, state_in? f @Dw", "y x BTD"),
     {"options": "activation int", "sizes": "s=state_columns"}),
    (("wkv4", "k x BTD, v x BTD, w f D, u? f D, state_in? f @3D", "y v BTD"), {"options": "decay int"}),
    (("conv_ssd", "xBC x BTD, dt w BTH, weight f DW, A f H, bias? f D, Dskip? f H|HP, z? x BTHP, dt_bias? f H, "
      "conv_state_in? f @Dw, state_in? f @HPN", "y z BTHP"),
     {"options": "N int, G int, " + _SSM_OPTIONS, "sizes": "D=", "derive": _conv_ssd_sizes}),
    (("wkv_ssm", _WKV_SSM + _WKV_SSM_STATES, "wkv6.y wkv6.v BTHV, ssd.y ssd.x BThp"), _WKV_SSM_MORE),
    (("wkv_ssm_mixed", _WKV_SSM + "gain_wkv? f HV, gain_ssm? f hp, residual? x BTHV, " + _WKV_SSM_STATES,
      "mixed wkv6.v BTHV"),
     {**_WKV_SSM_MORE, "c_name": "wkv_ssm", "own_gradient": "residual", "derive": _mixed_sizes,
      "inner": (Inner("wkv6.y", "wkv6.v", "BTHV", gain="gain_wkv"),
                Inner("ssd.y", "ssd.x", "BThp", gain="gain_ssm", is_required=True))}),
    (("rmsnorm_linear", "x x MD, weight p OD, gamma? f D, beta? f D, bias? f O", "y x MO"),
     {"options": "norm int, eps float"}),
    (("norm_mix", "a x MD, b x MD, gain_a? f D, gain_b? f D, residual? x MD", "y a MD"),
     {"options": "H int, eps float", "own_gradient": "residual"}),
    (("norm_gate", "x x MD, z? x MD, gamma? f D, beta? f D", "y x MD"),
     {"options": "norm int, gate_first int, H int, eps float"}),
    (("add_norm", "x x MD, residual? w MD, gamma? f D, beta? f D", "y x MD, sum residual MD w"),
     {"options": "norm int, eps float, sum_dtype int, reads_sum int", "same_gradient": ("residual", "x")}),
))
