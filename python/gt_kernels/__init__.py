"""gt_kernels: CUDA kernels for RWKV-6 / Mamba-2 hybrid models, each with a CPU twin.

    gt_kernels.torch    the operators as PyTorch functions with autograd
    gt_kernels.torch.distributed    some of these functions, for sequences that are split over several processes
    gt_kernels.jax      the operators as JAX functions with gradients
    gt_kernels.nn       PyTorch modules: Mamba2, Mamba, the time mix of RWKV-6, norms
    gt_kernels.compat   functions with the signatures of mamba_ssm, causal-conv1d, flash-linear-attention and vLLM
    gt_kernels.c        the C API through ctypes

The import fails if the library has another version than this package, or structs of another size.  Submodules such as
gt_kernels.torch are imported when they are first used.  python -m gt_kernels tells what is installed.
"""

import importlib
from types import ModuleType

from .c import VERSION_TEXT as __version__
from .c import ArgumentError, Error, UnsupportedError

__all__ = ["ArgumentError", "Error", "UnsupportedError", "__version__"]


def __getattr__(name: str) -> ModuleType:
    if name in ("compat", "jax", "nn", "torch"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
