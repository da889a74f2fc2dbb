"""gt_kernels: CUDA kernels for RWKV-6 / Mamba-2 hybrid models, each with a CPU twin.

    gt_kernels.torch    the operators as PyTorch functions with autograd
    gt_kernels.compat   functions with the signatures of the packages that people use now
    gt_kernels.c        the C API through ctypes

The import fails if the library is of another version than this package or has structs of another size.
"""

from .c import VERSION_TEXT as __version__
from .c import ArgumentError, Error, UnsupportedError

__all__ = ["ArgumentError", "Error", "UnsupportedError", "__version__"]
