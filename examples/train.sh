#!/bin/sh
# Sets up what is missing, builds hybrid_train and runs it; arguments are hybrid_train's (--help).
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/tests/setup.sh"

# Where there is no GPU the program trains on the CPU and launches no kernel, and nvcc takes minutes to compile them: then
# it gets a build folder of its own, without them.  A build that is there already is used as it is.
build=${BUILD:-$root/build}
options=
if [ -z "${BUILD-}" ] && [ ! -f "$build/build.ninja" ] && have nvcc && ! nvidia-smi -L >/dev/null 2>&1; then
    build=$root/build-cpu
    options=-Dcuda=disabled
fi
[ -f "$build/build.ninja" ] || meson setup "$build" "$root" ${options:+"$options"}
meson compile -C "$build" hybrid_train
exec "$build/examples/hybrid_train" "$@"
