"""The C API through ctypes.  Constants, structs and functions have the names of gt_kernels.h, which explains them.

    from ctypes import byref
    from gt_kernels import c

    args = c.gt_wkv6_args(B=8, T=512, H=4, N=64, dtype=c.GT_BF16, r=..., y=...)   # addresses, as integers
    c.check(c.gt_ref_wkv6_forward(byref(args)))

The second argument of gt_OP_forward is the stream, an integer or None.  Functions return a status; `check` raises an
exception for an error.  The module needs neither PyTorch nor NumPy.
"""

import ctypes
import importlib.resources

try:
    from . import _build, _header
    from ._header import *  # noqa: F401,F403 - the names of the header
except ImportError:
    raise ImportError("gt_kernels: the source folder of the package has no library: install the package (pip install . in "
                      "the folder of pyproject.toml), and start Python in another folder") from None


class Error(RuntimeError):
    """A call failed.  The text comes from gt_last_error; `status` is the gt_status."""

    def __init__(self, status, text):
        super().__init__(text)
        self.status = status

    def __reduce__(self):  # pickling would otherwise lose the status
        return type(self), (self.status, *self.args), self.__dict__


class ArgumentError(Error, ValueError):
    """A bad argument (status 100 to 199): fix the call."""


class UnsupportedError(Error, NotImplementedError):
    """A valid call that this build, version or device does not support (status 200 to 299)."""


def load(path):
    """Loads the library at `path`, and returns its functions by name.  Raises ImportError unless library and package
    were built from the same header."""
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise ImportError(f"gt_kernels: cannot load the library: {error}") from None
    functions = {}
    for name, (symbol, returns, arguments) in _header.FUNCTIONS.items():
        try:
            function = getattr(library, symbol)
        except AttributeError:
            raise ImportError(f"gt_kernels: {path} has no function {symbol}: its version is not that of this package, "
                              f"{_header.VERSION_TEXT}; install the package again") from None
        function.restype, function.argtypes = returns, arguments
        functions[name] = function
    if functions["gt_version"]() != _header.VERSION:
        raise ImportError(f"gt_kernels: {path} has version {functions['gt_version']()}, but this package has version "
                          f"{_header.VERSION}; install the package again")
    for name, function in functions.items():
        if name.endswith("_args_size"):
            struct = getattr(_header, name[: -len("_size")])
            if function() != ctypes.sizeof(struct):
                raise ImportError(f"gt_kernels: {struct.__name__} has {function()} bytes in {path}, "
                                  f"but {ctypes.sizeof(struct)} in this package; install the package again")
    return functions


def kernels():
    """A line of text that says which kernels the library has, and why."""
    if not _build.NVCC:
        return f"none, because {_build.WHY_NONE} when gt_kernels was installed"
    return f"for {_build.ARCHITECTURES} ({_build.ARCHITECTURES_WHY}), by nvcc {_build.NVCC}"


def advice(status, text):
    """The text of an error.  If the library lacks kernels, the text says how to install one that has them."""
    if status not in (_header.GT_ERROR_NO_CUDA, _header.GT_ERROR_ARCH):
        return text
    option = "" if not _build.NVCC else " --config-settings=setup-args=-Dgpu_archs=all"
    text = text.partition(": built without CUDA")[0] if not _build.NVCC else text
    return (f"{text}: kernels of this installation: {kernels()}.  To install kernels for this device, put nvcc on the "
            f"PATH and run \"pip install --force-reinstall --no-cache-dir{option} .\" in a copy of the source.  CPU tensors "
            "need no kernels.  python -m gt_kernels tells more")


def check(status):
    """Raises the exception that belongs to a status, with the text of this thread's last error."""
    if status != _header.GT_OK:
        text = (gt_last_error() or gt_status_string(status)).decode()  # noqa: F821
        kind = {1: ArgumentError, 2: UnsupportedError}.get(status // 100, Error)
        raise kind(status, advice(status, text))


# In an editable installation the library is in the build folder, not next to this file.
globals().update(load(str(importlib.resources.files(__package__).joinpath("libgt_kernels.so"))))
