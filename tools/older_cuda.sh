#!/bin/sh
# older_cuda.sh FOLDER: puts the compiler of CUDA 12.4 in FOLDER, from packages of Debian 13, and prints the path of its
# nvcc.  The packages, 1 GB, come from the mirror that apt uses already; nothing is installed.  FOLDER has no
# libraries except the runtime, so it can only compile kernels.  To see the kernels for an RTX 40:
#     NVCC=$(sh tools/older_cuda.sh build-cuda12) sh tests/check_resources.sh --report 89
# Ends with status 77 if there is no apt, or if the mirror does not answer.
set -eu
mkdir -p "$1"
folder=$(cd "$1" && pwd)
nvcc=$folder/bin/nvcc
suite=trixie

skip() {
    echo "SKIP: $*" >&2
    exit 77
}

if [ ! -x "$nvcc" ]; then
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Label: Debian' 'Created-By: Packages' 2>/dev/null | head -n 1)
    key=$(find /usr/share/keyrings -name 'debian-archive-keyring.*' 2>/dev/null | head -n 1)
    [ -n "$mirror" ] && [ -n "$key" ] || skip 'apt names no mirror of Debian, or the package debian-archive-keyring is missing'
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    mkdir -p "$scratch/lists/partial" "$scratch/cache/archives/partial"
    echo "deb [signed-by=$key] $mirror $suite non-free" >"$scratch/sources.list"
    : >"$scratch/status"
    cd "$scratch"
    # apt_get ARGUMENT...: runs apt-get with only this suite, and keeps apt-get's files here
    apt_get() {
        apt-get -qq -o "Dir::Etc::sourcelist=$scratch/sources.list" -o Dir::Etc::sourceparts=/dev/null \
            -o "Dir::State::lists=$scratch/lists" -o "Dir::State::status=$scratch/status" \
            -o "Dir::Cache=$scratch/cache" -o APT::Sandbox::User=root -o APT::Update::Error-Mode=any "$@" >&2
    }
    apt_get update || skip "the mirror does not answer for $suite"
    apt_get download nvidia-cuda-toolkit nvidia-cuda-dev libnvvm4
    for package in nvidia-cuda-toolkit libnvvm4; do dpkg-deb -x $package*.deb root; done
    dpkg-deb --fsys-tarfile nvidia-cuda-dev*.deb | tar -x -C root --wildcards ./usr/include '*/libcudart*' '*/libcudadevrt*'
    toolkit=root/usr/lib/nvidia-cuda-toolkit
    mkdir "$folder/bin"
    mv root/usr/include "$toolkit/libdevice" "$folder"
    mv root/usr/lib/x86_64-linux-gnu "$folder/lib"
    mv root/usr/bin/cudafe++ root/usr/bin/cuobjdump root/usr/bin/fatbinary root/usr/bin/nvdisasm root/usr/bin/nvlink \
        root/usr/bin/ptxas "$toolkit/bin/cicc" "$toolkit/bin/crt" "$folder/bin"
    cat >"$folder/bin/nvcc.profile" <<'PROFILE'
TOP                = $(_HERE_)/..
NVVMIR_LIBRARY_DIR = $(TOP)/libdevice
LD_LIBRARY_PATH   += $(TOP)/lib:
PATH              += $(_HERE_):
INCLUDES          += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES         =+ $(_SPACE_) "-L$(TOP)/lib"
PROFILE
    mv "$toolkit/bin/nvcc" "$nvcc" # last: a folder with nvcc is whole
fi
"$nvcc" --version >&2
echo "$nvcc"
