#!/bin/sh
# Sets up what is missing, builds, and runs all tests.  Arguments are options of "meson setup", such as
# -Dcuda=disabled; BUILD is the build folder, SUITES the suites to run if not all, such as "api emu".
# Where there is no GPU, a new build folder gets no kernels, and nvcc only checks their source (suite "syntax"), unless
# an option says what to do with nvcc: -Dcuda=enabled compiles them, for the suite "resources", too.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/tests/setup.sh"

build=${BUILD:-$root/build}
if [ ! -f "$build/build.ninja" ]; then
    case " $*" in
    *' -Dcuda='* | *' -Dgpu_archs='* | *' -Dresources_archs='*) ;;
    *) set -- ${without_kernels:+"$without_kernels"} "$@" ;;
    esac
    meson setup "$build" "$root" "$@"
elif [ $# -gt 0 ]; then
    meson setup --reconfigure "$build" "$root" "$@"
fi
meson compile -C "$build"
set --
for suite in ${SUITES-}; do set -- "$@" --suite "$suite"; done
# meson test first builds what only tests need: since Meson 1.7 that is no part of the target all.
meson test -C "$build" --print-errorlogs "$@"
