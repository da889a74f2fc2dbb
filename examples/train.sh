#!/bin/sh
# Sets up what is missing, builds hybrid_train and runs it; arguments are hybrid_train's (--help).
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/tests/setup.sh"

# A build that is there already is used as it is.
build=${BUILD:-$root/build}
[ -f "$build/build.ninja" ] || meson setup "$build" "$root" ${without_kernels:+"$without_kernels"}
meson compile -C "$build" hybrid_train
exec "$build/examples/hybrid_train" "$@"
