#!/bin/sh
# Installs missing build tools, builds hybrid_train, and runs it with the arguments of this script (see --help).
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/tests/setup.sh"

# Uses an existing build without changing its options.
build=${BUILD:-$root/build}
[ -f "$build/build.ninja" ] || meson setup "$build" "$root" ${without_kernels:+"$without_kernels"}
meson compile -C "$build" hybrid_train
exec "$build/examples/hybrid_train" "$@"
