#!/bin/sh
# check_resources.sh [--report] [--built ARCH FOLDER] ARCHS [PART...]: reads the resources of kernels from ptxas, and
# prints them for every kernel.  PART: parts of the library; all if not given.  ARCHS: a list, such as "75 90a", or all.
# It skips architectures that this nvcc does not know, with a message.
#
# No kernel may spill registers or keep a stack frame, except kernels that ops/OP.spills lists.  In no kernel may ptxas
# serialise products of warpgroups.  No kernel may have more static shared memory than the architecture offers.
# (static_asserts beside the kernels bound dynamic shared memory.)
#
# The script compiles the kernels and prints the time.  --built: the build has already compiled them for ARCH, and has
# written FOLDER/gt_PART.resources.  --report: prints spills and allows them, for compilers that ops/OP.spills was not
# written for.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
nvcc=${NVCC:-nvcc}
built= built_in= may_spill=0
if [ "${1-}" = --report ]; then
    may_spill=1
    shift
fi
if [ "${1-}" = --built ]; then
    built=$2
    built_in=$(cd "$3" && pwd)
    shift 3
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
for part in "$@"; do
    for arch in $archs; do
        name=$out/$part.sm_$arch
        echo "$part, sm_$arch: $(cat "$name.how")"
        if [ -e "$name.failed" ]; then
            cat "$name.log"
            failures=1
            continue
        fi
        $demangle <"$name.log" | awk -v arch="sm_$arch" -v allowed="$out/allowed" -v may_spill=$may_spill '
        BEGIN {
            while ((getline line < allowed) > 0) {
                n = split(line, word, " ")
                if (n < 5) continue
                exceptions++
                on[exceptions] = word[1]; of[exceptions] = word[2]
                stack_of[exceptions] = word[3]; spill_of[exceptions] = word[4]
            }
        }
        function number(line, pattern,    text) {
            if (!match(line, pattern)) return 0
            text = substr(line, RSTART, RLENGTH)
            gsub(/[^0-9]/, "", text)
            return text + 0
        }
        function judge(kernel, registers, smem, stack, spill) {
            gsub(/_INTERNAL_[0-9a-z_]*::|gt::|\(anonymous namespace\)::|^void /, "", kernel)
            if (match(kernel, /wkv6::strong_decay_slice</)) kernel = substr(kernel, RSTART)   # behind its type
            sub(/\(.*/, "", kernel)       # parameters of a demangled name
            allowed_stack = allowed_spill = 0
            for (i = 1; i <= exceptions; i++)
                if (arch ~ on[i] && kernel ~ of[i]) {
                    allowed_stack = stack_of[i]
                    allowed_spill = spill_of[i]
                }
            most = 227
            if (arch == "sm_75") most = 64
            if (arch == "sm_80") most = 163
            if (arch ~ /^sm_(86|89|120)$/) most = 99
            over = stack > allowed_stack || spill > allowed_spill
            bad = over && !may_spill || smem > most * 1024
            failed += bad
            printf "%s %4d registers %5d bytes smem %4d stack %4d spills  %s\n",
                   bad ? "FAIL:" : over ? "more:" : "  ok:", registers, smem, stack, spill, kernel
        }
        # (C7510) and others: registers and spills do not show the loss of these products
        /wgmma.*serialized/ {
            sub(/^ptxas [a-z]+ *: */, "")
            print "FAIL: " $0
            failed++
        }
        /Compiling entry function/ {
            kernel = $0
            sub(/.*entry function ./, "", kernel)
            sub(/. for .sm_.*/, "", kernel)
        }
        /Function properties for/ {
            name = $0
            sub(/.*Function properties for /, "", name)
        }
        /bytes stack frame/ {
            stack = number($0, "[0-9]+ bytes stack frame")
            spill = number($0, "[0-9]+ bytes spill stores") + number($0, "[0-9]+ bytes spill loads")
            if (name != kernel) judge(name, 0, 0, stack, spill)   # a function that it calls
        }
        /Used [0-9]+ registers/ {
            kernels++
            judge(kernel, number($0, "Used [0-9]+ registers"), number($0, "[0-9]+ bytes smem"), stack, spill)
        }
        END {
            if (!kernels) print "FAIL: no kernels"
            exit failed > 0 || !kernels
        }' || failures=1
    done
done
[ $failures -eq 0 ] && echo 'all kernels fit'
exit $failures
