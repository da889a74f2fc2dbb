"""Provides modules with the names of mamba_ssm, causal_conv1d and their compiled modules, and replaces the RWKV-6
functions of flash-linear-attention."""

import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import types

from . import _native

_VERSIONS = {"mamba_ssm": "2.3.2", "causal_conv1d": "1.6.1"}  # releases with these functions; clients check versions


def _contents():
    """{module: its contents by name}.  A module without contents is a package that only holds other modules."""
    from .. import compat, nn

    def take(*names):
        return {name: getattr(compat, name) for name in names}

    scans = take("selective_scan_fn", "mamba_inner_fn")
    update = take("selective_state_update")
    combined = take("mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined")
    convolution = take("causal_conv1d_fn", "causal_conv1d_update")
    varlen = take("causal_conv1d_varlen_states")
    return {
        "mamba_ssm": {**scans, **update, **combined},
        "mamba_ssm.ops": {},
        "mamba_ssm.ops.selective_scan_interface": scans,
        "mamba_ssm.ops.triton": {},
        "mamba_ssm.ops.triton.selective_state_update": update,
        "mamba_ssm.ops.triton.ssd_combined": combined,
        "mamba_ssm.ops.triton.layernorm_gated": {**take("layernorm_fn", "rmsnorm_fn"), "LayerNorm": nn.LayerNormGated,
                                                 "RMSNorm": nn.RMSNormGated},
        "mamba_ssm.ops.triton.layer_norm": {**take("layer_norm_fn", "rms_norm_fn"), "RMSNorm": nn.RMSNorm,
                                            "_layer_norm_fwd": _native.layer_norm_fwd},
        "causal_conv1d": {**convolution, **varlen},
        "causal_conv1d.causal_conv1d_interface": convolution,
        "causal_conv1d.causal_conv1d_varlen": varlen,
        "selective_scan_cuda": {"fwd": _native.scan_fwd, "bwd": _native.scan_bwd},
        "causal_conv1d_cuda": {"causal_conv1d_fwd": _native.conv_fwd, "causal_conv1d_bwd": _native.conv_bwd},
    }


class _Distribution(importlib.metadata.Distribution):
    """Metadata, for importlib.metadata, of a package that install() provides."""

    def __init__(self, name):
        self.package = name

    def read_text(self, filename):
        return {"METADATA": f"Metadata-Version: 2.1\nName: {self.package}\nVersion: {_VERSIONS[self.package]}\n",
                "top_level.txt": self.package}.get(filename)

    def locate_file(self, path):
        return path


class _Finder(importlib.metadata.DistributionFinder):
    """A finder on sys.meta_path: gives versions, and replaces fla's RWKV-6 functions when fla is imported."""

    packages = set()

    @classmethod
    def find_distributions(cls, context=importlib.metadata.DistributionFinder.Context()):
        wanted = context.name and context.name.replace("-", "_").lower()
        return [_Distribution(name) for name in sorted(cls.packages) if wanted in (None, name)]

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != "fla.ops.rwkv6":
            return None
        sys.meta_path.remove(cls)  # so that the other finders find the module
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, cls)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                _use_fla(module)

            spec.loader.exec_module = exec_module
        return spec


def _use_fla(module):
    """Registers both RWKV-6 functions as a backend of fla.  fla then chooses the backend, logs its choice, and lets the
    user turn it off."""
    from .. import compat
    try:
        from fla.backends import BaseBackend, dispatch, register
    except ImportError:
        try:
            from fla.ops.backends import BackendRegistry, BaseBackend, dispatch
        except ImportError:
            raise ImportError("gt_kernels.compat.install: this version of fla has no registry of backends: call "
                              "gt_kernels.compat.chunk_rwkv6 instead of its function") from None
        register = None
    functions = {name: getattr(compat, name) for name in ("chunk_rwkv6", "fused_recurrent_rwkv6")}
    backend = type("GtKernelsBackend", (BaseBackend,), {
        "backend_type": "gt_kernels", "env_var": "FLA_GT_KERNELS", "priority": 0,
        **{name: staticmethod(function) for name, function in functions.items()}})
    if register is None:
        registry = BackendRegistry("gt_kernels")
        BackendRegistry._initialized.add("gt_kernels")
        registry.register(backend())
    for name in functions:
        original = getattr(module, name)
        if hasattr(original, "_gt_kernels"):
            continue
        dispatched = (dispatch if register else dispatch("gt_kernels"))(original)
        if register:
            register(original)(backend)
        dispatched._gt_kernels = True
        for other in [other for key, other in sys.modules.items() if key.partition(".")[0] == "fla"]:
            for key, value in list(vars(other).items()):
                if value is original:  # the module may have another name for it
                    setattr(other, key, dispatched)


def install(over=False):
    """Provides mamba_ssm and causal_conv1d, each with its compiled module, unless the package is installed.  Also makes
    gt_kernels the first backend of flash-linear-attention's RWKV-6 (FLA_GT_KERNELS=0 turns that off).

    over: also replace packages that are installed or imported.  Functions that a client has already imported from such
    a package do not change, so call install() before importing the client.  Returns the names of the packages that it
    provides.  Raises ArgumentError if `over` is no bool."""
    from .._arguments import flag
    flag("gt_kernels.compat.install", "over", over)
    contents = _contents()
    for package in _VERSIONS:
        if package in _Finder.packages:
            continue
        if over or (package not in sys.modules and importlib.util.find_spec(package) is None):
            _Finder.packages.add(package)
            for name in [name for name in sys.modules if name.partition(".")[0] == package]:
                del sys.modules[name]
    for name, values in contents.items():
        package = {"selective_scan_cuda": "mamba_ssm", "causal_conv1d_cuda": "causal_conv1d"}.get(
            name, name.partition(".")[0])
        is_ours = getattr(sys.modules.get(name), "_gt_kernels", False)
        if package not in _Finder.packages or is_ours:
            continue
        module = types.ModuleType(name, f"{package} on gt_kernels.compat")
        is_package = any(other.startswith(f"{name}.") for other in contents)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, origin="gt_kernels.compat", is_package=is_package)
        module.__version__, module._gt_kernels = _VERSIONS[package], True
        if is_package:
            module.__path__ = []
        vars(module).update(values)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent and child not in vars(sys.modules[parent]):  # selective_state_update is also a function there
            setattr(sys.modules[parent], child, module)
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
    if "fla.ops.rwkv6" in sys.modules:
        _use_fla(sys.modules["fla.ops.rwkv6"])
    return sorted(_Finder.packages)
