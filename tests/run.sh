#!/bin/sh
# Installs missing tools, builds, and runs all tests.  Arguments are options of "meson setup", such as -Dcuda=disabled;
# BUILD is the build folder, SUITES a list of suites to run, such as "api emu", TEST one test.  Without a GPU, a new
# build folder gets no kernels, and nvcc only checks their source (suite "syntax"); the option -Dcuda=enabled compiles
# them, also for the suite "resources".
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
if [ -n "${TEST-}" ]; then set -- "$TEST"; fi
# meson test first builds programs that only tests need: since Meson 1.7 the target all lacks these.
meson test -C "$build" --print-errorlogs "$@"
