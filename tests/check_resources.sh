#!/bin/sh
# check_resources.sh [--report] [--built ARCH FOLDER] [--launches PROGRAM] ARCHS [PART...]: reads the resources of
# kernels from ptxas, and prints them for every kernel.  PART: parts of the library; all if not given.  ARCHS: a list,
# such as "75 90a", or all.  It skips architectures that this nvcc does not know, with a message.
#
# No kernel may spill registers or keep a stack frame, except kernels that ops/OP.spills lists.  In no kernel may ptxas
# serialise products of warpgroups.  No kernel may have more static shared memory than the architecture offers.
# (static_asserts beside the kernels bound dynamic shared memory.)
#
# --launches: the program of launches.c, which knows block sizes and dynamic shared memory.  The script then prints the
# theoretical occupancy of each kernel: how many blocks a multiprocessor can run at once, which share of its warps these
# are, and the resources that allow no more blocks.  If launches of a kernel differ, it prints the lowest and the
# highest occupancy.  At least one block must fit.
#
# The script compiles the kernels and prints the time.  --built: the build has already compiled them for ARCH, and has
# written FOLDER/gt_PART.resources.  --report: prints spills and allows them, for compilers that ops/OP.spills was not
# written for.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
nvcc=${NVCC:-nvcc}
built= built_in= launches= may_spill=0
if [ "${1-}" = --report ]; then
    may_spill=1
    shift
fi
if [ "${1-}" = --built ]; then
    built=$2
    built_in=$(cd "$3" && pwd)
    shift 3
fi
if [ "${1-}" = --launches ]; then
    launches=$2
    shift 2
fi
archs=${1:-90a}
[ $# -eq 0 ] || shift
[ "$archs" != all ] || archs='75 80 86 89 90a 100 120'
[ $# -gt 0 ] || set -- $(sed -n "s/^kernel_parts = \[\(.*\)\]$/\1/p" "$root/meson.build" | tr -d "',")
if ! command -v "$nvcc" >/dev/null; then
    echo 'SKIP: no nvcc'
    exit 77
fi

# 90a is not in the list, 90 is
codes=$("$nvcc" --list-gpu-code)
known=
for arch in $archs; do
    if echo "$codes" | grep -qx "sm_${arch%a}"; then
        known="$known $arch"
    else
        echo "sm_$arch: not checked, this nvcc does not know it"
    fi
done
archs=$known
if [ -z "$archs" ]; then
    echo 'FAIL: no architectures'
    exit 1
fi

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

# Exceptions, one a line: architecture and kernel, which are regular expressions without spaces; most bytes of stack
# frame; most bytes of spill stores and loads; the reason.  The last line that matches counts.
cat "$root"/tests/ops/*.spills >"$out/allowed"

cat >"$out/compile" <<END
#!/bin/sh
# compile PART ARCH
name=$out/\$1.sm_\$2
if [ "\$2" = '$built' ]; then
    cp '$built_in'/gt_\$1.resources \$name.log || touch \$name.failed
    echo 'compiled by the build' >\$name.how
    exit
fi
start=\$(date +%s)
macro=GT_\$(echo \$1 | tr a-z A-Z)_IMPLEMENTATION
$nvcc -std=c++17 -Xptxas -v -cubin -gencode=arch=compute_\$2,code=sm_\$2 -D\$macro -I'$root' \\
    -o \$name.cubin '$root/gt/impl/impl.cu' >\$name.log 2>&1 || touch \$name.failed
echo "compiled in \$((\$(date +%s) - start)) s" >\$name.how
END
for part in "$@"; do
    for arch in $archs; do echo "$part $arch"; done
done | xargs -P 2 -L 1 sh "$out/compile"

demangle=cat
command -v c++filt >/dev/null && demangle=c++filt
failures=0
for arch in $archs; do
    : >"$out/launches.sm_$arch"
    [ -n "$launches" ] || continue
    if "$launches" "${arch%a}" >"$out/launches"; then
        $demangle <"$out/launches" >"$out/launches.sm_$arch"
    else
        echo "FAIL: $launches ${arch%a}"
        tail -n 5 "$out/launches"
        failures=1
    fi
done
for part in "$@"; do
    for arch in $archs; do
        name=$out/$part.sm_$arch
        echo "$part, sm_$arch: $(cat "$name.how")"
        if [ -e "$name.failed" ]; then
            cat "$name.log"
            failures=1
            continue
        fi
        $demangle <"$name.log" >"$out/log"
        awk -v arch="sm_$arch" -v allowed="$out/allowed" -v may_spill=$may_spill -v launches="$out/launches.sm_$arch" \
            -f "$root/tests/occupancy.awk" -f "$root/tests/resources.awk" "$out/log" || failures=1
    done
done
[ $failures -eq 0 ] && echo 'all kernels fit'
exit $failures
