#!/bin/sh
# cuda_toolkit.sh NVCC...: the folder of the CUDA Toolkit that nvcc belongs to, as nvcc itself names it.  nvcc may be
# called by a launcher such as ccache, or through a link or script elsewhere.  Prints nothing if nvcc does not say.
"$@" -dryrun -x cu -c /dev/null -o /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p' | while IFS= read -r top; do
    (cd -P "$top" 2>/dev/null && pwd) || true
done
