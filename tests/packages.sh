#!/bin/sh
# packages.sh FOLDER: installs, for CI, the packages that some tests need beyond a compiler and Meson.  These are cmake,
# OpenBLAS, Open MPI and clang-format 14 from Debian or Ubuntu, and Python packages in a virtual environment in FOLDER.
# Tests run FOLDER/bin/python as the environment variable GT_TEST_PYTHON.  Ends with 0 if everything is installed, with
# 77 if a package is missing and its registry does not answer, else with 1.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$1
status=0
. "$root/tests/setup.sh"

# lacks WHAT COMMAND...: prints that WHAT could not be installed; the command succeeds if the registry answers.
lacks() {
    echo "$1 could not be installed"
    shift
    if "$@" >/dev/null 2>&1; then
        status=1
    elif [ $status -eq 0 ]; then
        echo 'because its registry does not answer'
        status=77
    fi
}

missing=
have cmake || missing="$missing cmake"
grep -qx 'VERSION_CODENAME=bookworm' /etc/os-release 2>/dev/null && ! have clang-format-14 &&
    missing="$missing clang-format-14" # Debian 12; others have other versions
pkg-config --exists openblas || missing="$missing libopenblas-dev"
{ have mpirun && have mpicc; } || missing="$missing libopenmpi-dev openmpi-bin"
if [ -n "$missing" ]; then
    # shellcheck disable=SC2086 # a list
    if ! have apt-get; then
        echo "not Debian or Ubuntu: install$missing yourself"
        status=1
    elif ! apt_install $missing; then
        # without this option apt-get update succeeds even if nothing answers
        lacks "$missing" ${as_root} apt-get -q -o APT::Update::Error-Mode=any update
    fi
fi

imports='import jax, matplotlib, numpy, safetensors.numpy'
if ! "$folder/bin/python" -c "$imports" 2>/dev/null; then
    python3 -m venv --clear "$folder" >/dev/null 2>&1 ||
        { have apt-get && apt_install python3-venv && python3 -m venv --clear "$folder"; } || true
    if [ ! -x "$folder/bin/pip" ]; then
        echo 'python3 lacks the module venv, which makes virtual environments: install python3-venv'
        status=1
    elif ! "$folder/bin/pip" -q install jax matplotlib numpy safetensors || ! "$folder/bin/python" -c "$imports"; then
        # pip itself is on every registry of Python packages
        lacks 'the Python packages' "$folder/bin/pip" -q download --no-deps --no-cache-dir -d "$folder/probe" pip
    fi
fi
exit $status
