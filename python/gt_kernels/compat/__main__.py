"""python -m gt_kernels.compat [--over] PROGRAM ARGUMENTS...     or -m MODULE ARGUMENTS...

Runs a Python program with the modules of gt_kernels.compat.install().  --over: also replaces installed packages."""

import os
import runpy
import sys

from . import install


def main():
    arguments = sys.argv[1:]
    over = arguments[:1] == ["--over"]
    arguments = arguments[over:]
    is_module = arguments[:1] == ["-m"]
    arguments = arguments[is_module:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__, file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    install(over)
    sys.argv[:] = arguments
    if is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
