# check_gpu_archs.sh: tests tools/gpu_archs.sh with GPUs that a fake nvidia-smi names.
set -eu
script=$(cd "$(dirname "$0")/.." && pwd)/tools/gpu_archs.sh
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
failures=0

# expect WANT MODE RELEASE SMI: SMI is the body of the fake script nvidia-smi; empty: there is no nvidia-smi.
expect() {
    rm -f "$scratch/nvidia-smi"
    if [ -n "$4" ]; then
        printf '#!/bin/sh\n%s\n' "$4" >"$scratch/nvidia-smi"
        chmod +x "$scratch/nvidia-smi"
    fi
    got=$(PATH=$scratch:/usr/bin:/bin sh "$script" "$2" "$3")
    if [ "$(printf '%s\n' "$got" | sed -n 1p)" = "$1" ] && [ -n "$(printf '%s\n' "$got" | sed -n 2p)" ]; then
        echo "ok: $2, nvcc $3, $4: $got"
    else
        failures=1
        echo "FAIL: $2, nvcc $3, $4: expected $1, got $got"
    fi
}

none='echo "NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver."; exit 9'
expect '90a ptx' auto 13.0.88 "$none"
expect '90a ptx' auto 13.0 'echo "Field \"compute_cap\" is not a valid field to query."; exit 2'
expect '90a' auto 13.0 'echo 9.0; echo 9.0'
expect '86 90a' auto 12.4 'printf "8.6\n9.0\n8.6\n"'
expect '86' auto 13.0 'echo 8.7'              # runs machine code of 8.6
expect '89' auto 12.0 'echo 8.9'
expect '86' auto 11.6 'echo 8.9'              # an nvcc that does not know 8.9
expect '100' auto 13.0 'echo 10.3'
expect '120' auto 13.0 'echo 12.1'
expect 'ptx' auto 12.4 'echo 12.0'            # newer than this nvcc
expect 'ptx' auto 13.0 'echo 11.0'
expect '75' auto 13.0 'printf "7.0\n7.5\n"'
expect '90a ptx' auto 13.0 'echo 7.0'         # too old for the library
expect '75 80 86 89 90a 100 120 ptx' all 13.0.88 ''
expect '75 80 86 89 90a ptx' all 12.4 'echo 9.0'
exit $failures
