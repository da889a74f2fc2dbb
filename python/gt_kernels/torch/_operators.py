"""What the functions of gt_kernels.torch take, operator by operator, in the words of gt_kernels.h.

A tensor is "name kind shape".  Kinds: x activations, w their companion (dt, w), which may be fp32, p a projection
weight (the dtype of x, its gradient is fp32), f fp32.  A shape is written in the letters of the header's sizes, with
M for all indices but the last, @ for the rows of states (batch elements, or packed sequences; a state without that
index is shared by all), and w for W - 1.  A question mark behind the name: may be None.
"""

from dataclasses import dataclass

from .. import c


@dataclass(frozen=True)
class Tensor:
    name: str
    kind: str
    shapes: tuple  # of which one has to fit
    optional: bool
    stride: type  # of its stride in the argument struct, and its gradient's: gt_stride, gt_stride4, an integer, or None


@dataclass(frozen=True)
class Operator:
    name: str
    struct: type  # of ctypes
    tensors: tuple  # inputs; of recurrent operators the state is the last one
    options: tuple  # (name, type in a schema)
    like: str  # the tensor whose layout y takes
    y_shape: str
    recurrent: bool  # has states, packed sequences and a step
    has_saved: bool
    own_gradient: str = ""  # the tensor whose gradient is dy itself


def _operator(name, tensors, like, y_shape=None, options="", own_gradient=""):
    struct = getattr(c, f"gt_{name}_args")
    fields = dict(struct._fields_)

    def tensor(text):
        label, kind, shapes = text.split()
        label, optional = label.rstrip("?"), label.endswith("?")
        return Tensor(label, kind, tuple(shapes.split("|")), optional, fields.get(f"{label}_stride"))

    tensors = tuple(tensor(text) for text in tensors.split(", "))
    y_shape = y_shape or next(t.shapes[0] for t in tensors if t.name == like)
    options = tuple(tuple(option.split()) for option in options.split(", "))
    if "segments" in fields:
        options += (("segments", "int"),)
    return Operator(name, struct, tensors, options, like, y_shape, "cu_seqlens" in fields, "saved" in fields,
                    own_gradient)


OPERATORS = tuple(_operator(*description, **more) for description, more in (
    (("wkv6", "r x BTHN, k x BTHN, v x BTHV, w w BTHN, u? f HN, state_in? f @HNV", "v"),
     {"options": "decay int, scale float"}),
    (("ssd", "x x BTHP, dt w BTH, A f H, Bm x BTGN, Cm x BTGN, Dskip? f H|HP, z? x BTHP, dt_bias? f H, "
      "state_in? f @HPN", "x"), {"options": "softplus int, dt_limit int, dt_min float, dt_max float"}),
    (("selective_scan", "u x BTD, dt w BTD, A f DN, Bm x BTGN, Cm x BTGN, Dskip? f D, z? x BTD, dt_bias? f D, "
      "state_in? f @DN", "u"), {"options": "softplus int"}),
    (("conv1d", "x x BTD, weight f DW, bias? f D, state_in? f @Dw", "x"), {"options": "activation int"}),
    (("rmsnorm_linear", "x x MD, weight p OD, gamma? f D, beta? f D, bias? f O", "x", "MO"),
     {"options": "norm int, eps float"}),
    (("norm_mix", "a x MD, b x MD, gain_a? f D, gain_b? f D, residual? x MD", "a"),
     {"options": "H int, eps float", "own_gradient": "residual"}),
    (("norm_gate", "x x MD, z? x MD, gamma? f D, beta? f D", "x"),
     {"options": "norm int, gate_first int, H int, eps float"}),
))
