#!/bin/sh
# Sets up what is missing, builds hybrid_train and runs it; arguments are hybrid_train's (--help).
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/tests/setup.sh"

build=${BUILD:-$root/build}
[ -f "$build/build.ninja" ] || meson setup "$build" "$root"
meson compile -C "$build" hybrid_train
exec "$build/examples/hybrid_train" "$@"
