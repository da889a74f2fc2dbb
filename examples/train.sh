#!/bin/sh
# Sets up a build if there is none, builds hybrid_train and runs it.  Passes its arguments to hybrid_train (see --help).
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/tests/setup.sh"

# Uses an existing build without changing its options.
build=${BUILD:-$root/build}
[ -f "$build/build.ninja" ] || meson setup "$build" "$root" ${without_kernels:+"$without_kernels"}
meson compile -C "$build" hybrid_train
exec "$build/examples/hybrid_train" "$@"
