#!/bin/sh
# nvcc.sh LOG COMMAND...: compiles with -Xptxas=-v, and keeps ptxas's report on each kernel in LOG, for the suite
# "resources".  It shows all other output, such as warnings; if the command fails, it shows everything.
log=$1
shift
status=0
"$@" -Xptxas=-v >"$log" 2>&1 || status=$?
if [ $status -ne 0 ]; then
    cat "$log"
    rm -f "$log"
else
    # ptxas's report on a kernel: lines of its own, and indented ones for functions and spills
    grep -Ev '^ptxas info|^ +[0-9]+ bytes (stack|cumulative)|^Function properties' "$log"
    grep 'wgmma.*serialized' "$log" # which is ptxas info, too
fi
exit $status
