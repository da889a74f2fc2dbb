"""python -m gt_kernels: reports what is installed, and whether its kernels run on this machine."""

import importlib.metadata
import importlib.resources
import platform

from . import __version__, _build, c


def device():
    """A text that says whether kernels run on the current CUDA device."""
    status = c.gt_device_supported(-1)
    return "kernels run on the current device" if status == c.GT_OK else \
        c.gt_last_error().decode().partition("gt_device_supported: ")[2]


def main():
    lines = [("version", f"{__version__}, on Python {platform.python_version()}"),
             ("library", importlib.resources.files("gt_kernels").joinpath("libgt_kernels.so")),
             ("kernels", c.kernels()), ("GPU architectures", _build.ARCHITECTURES or "none"), ("device", device()),
             ("CPU twins", f"all operators; OpenMP: {_build.OPENMP}")]
    for name in ("torch", "jax"):
        try:
            lines.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            lines.append((name, f"not installed; only gt_kernels.{name} needs it"))
    for name, text in lines:
        print(f"{name:<18} {text}")
    if not _build.NVCC:
        print("\nTo install kernels, put nvcc on the PATH, and run in a copy of the source (-v prints what is built):\n"
              "    pip install -v --force-reinstall --no-cache-dir .")


if __name__ == "__main__":
    main()
