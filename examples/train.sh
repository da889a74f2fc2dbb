#!/bin/sh
# Sets up what is missing, builds hybrid_train and runs it; arguments are hybrid_train's (--help).
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/tests/setup.sh"

build=${BUILD:-$root/build}
[ -f "$build/build.ninja" ] || meson setup "$build" "$root"
meson compile -C "$build" hybrid_train
# an OpenMP thread that waits must not take a core from one that works, nor from other programs
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"
exec "$build/examples/hybrid_train" "$@"
