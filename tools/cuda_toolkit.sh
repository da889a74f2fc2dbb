#!/bin/sh
# cuda_toolkit.sh NVCC...: prints the folder of nvcc's CUDA Toolkit, as nvcc itself names it.  A launcher such as ccache
# may call nvcc, or a link or a script in another folder.  The script prints nothing if nvcc does not name the folder.
"$@" -dryrun -x cu -c /dev/null -o /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p' | while IFS= read -r top; do
    (cd -P "$top" 2>/dev/null && pwd) || true
done
