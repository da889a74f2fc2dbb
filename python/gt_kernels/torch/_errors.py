"""Checks of arguments, and the names in error texts.

The text of an error is "FUNCTION: ARGUMENT ...", where FUNCTION is the function that the user called.  A function that
calls gt_kernels.torch on behalf of its caller puts its own names there:

    @named("gt_kernels.compat.selective_scan_fn", dt="delta", Bm="B", Cm="C")
    def selective_scan_fn(u, delta, A, B, C, ...):
"""

import functools
import re

import torch

from .. import c
from .._arguments import refuse


def named(function, **arguments):
    """A decorator.  Errors of gt_kernels name `function` instead of the function that found them.  `arguments` maps the
    name of an argument of gt_kernels.torch to its name in `function`.  If decorated functions are nested, the outermost
    decides."""
    def decorate(inner):
        @functools.wraps(inner)
        def outer(*values, **options):
            if torch.compiler.is_dynamo_compiling():
                return inner(*values, **options)
            try:
                return inner(*values, **options)
            except c.Error as error:
                rename(error, function, arguments)
                raise
        return outer
    return decorate


def rename(error, function, arguments):
    """Replaces the names of the function and of the arguments in an error text: the first argument's name, and every
    name before a value."""
    text = str(error)
    match = re.match(r"gt_\w+(?:\.\w+)*: \*?([\w.]*)", text)
    if match:
        text = arguments.get(match[1], match[1]) + text[match.end():]
        text = re.sub(r"(?<=[ ,])([\w.]+)(?= = | \()", lambda found: arguments.get(found[1], found[1]), text)
        text = re.sub(r", or 0 for [\w.-]+$|(?<=must be )0, or ", "", text)  # the C API's default
    error.args = (f"{function}: {text}",)


def check_tensor(function, name, tensor):
    """Refuses everything except a dense tensor on a device that supports the operators."""
    if not isinstance(tensor, torch.Tensor):
        kind = type(tensor)
        refuse(function, f"{name} is a {kind.__module__}.{kind.__qualname__}: must be a torch.Tensor")
    if tensor.layout is not torch.strided or tensor.is_nested:
        refuse(function, f"{name} is {'nested' if tensor.is_nested else tensor.layout}: must be a dense tensor")
    if tensor.device.type not in ("cpu", "cuda", "meta"):
        refuse(function, f"{name} is on {tensor.device}: must be on a CPU or a CUDA device", c.GT_ERROR_UNSUPPORTED)
