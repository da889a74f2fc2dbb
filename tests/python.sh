#!/bin/sh
# python.sh FOLDER: makes the Python package's source distribution, and a wheel from it, without nvcc.  It installs the
# wheel in the virtual environment FOLDER (of tests/packages.sh) and runs python/tests.  It also installs PyTorch, if
# that takes at most TORCH_SECONDS (900); else the tests that need PyTorch are skipped.  Tests compare with the trainer
# of the build folder BUILD.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$(cd "$1" && pwd)
. "$root/tests/setup.sh"
PATH=$folder/bin:$PATH

python -c 'import torch' 2>/dev/null || timeout "${TORCH_SECONDS:-900}" pip -q install --no-compile torch ||
    echo 'PyTorch could not be installed in time: tests that need it are skipped'
python -c 'import mesonpy' 2>/dev/null || pip -q install meson-python

dist=$folder/dist
rm -rf "$dist"
mkdir -p "$dist"
cd "$root"
python -c 'import sys, mesonpy; print(mesonpy.build_sdist(sys.argv[1]))' "$dist"
pip -q wheel --no-deps --no-build-isolation -w "$dist" --config-settings=setup-args=-Dcuda=disabled "$dist"/*.tar.gz
ls -l "$dist"
pip -q install --no-deps --force-reinstall "$dist"/*.whl
cd "$folder"
GT_TEST_BUILD=${BUILD:-$root/build} OMP_WAIT_POLICY=passive python "$root/python/tests/run.py"
