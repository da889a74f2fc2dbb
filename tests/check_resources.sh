#!/bin/sh
# check_resources.sh [--built ARCH FOLDER] ARCHS [PART...]: reads from ptxas what the kernels of each part (wkv6, ssm,
# conv1d, fused) take.  None may spill registers or keep a stack frame, but for those listed below, nor have products of
# warpgroups that ptxas makes wait for each other, nor more static shared memory than the architecture offers.  (Dynamic shared memory is bounded by static_asserts beside the kernels.)
# Prints what every kernel takes.  ARCHS is a list, such as "75 90a", or all; those that this nvcc does not know are left
# out and named.  They are compiled here, and the time this took is printed, but for ARCH, of which the build left
# FOLDER/gt_PART.resources.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
nvcc=${NVCC:-nvcc}
built= built_in=
if [ "${1-}" = --built ]; then
    built=$2
    built_in=$(cd "$3" && pwd)
    shift 3
fi
archs=${1:-90a}
[ $# -eq 0 ] || shift
[ "$archs" != all ] || archs='75 80 86 89 90a 100 120'
[ $# -gt 0 ] || set -- wkv6 ssm conv1d fused
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

# Exceptions, one a line: architecture and kernel (regular expressions without spaces), most bytes
# of stack frame, most bytes of spill stores and loads, and the reason.
cat >"$out/allowed" <<'END'
sm_ ssd::backward_sweep_kernel<[12],.4> 24 140 at 168 registers three blocks share a multiprocessor; what spills are addresses
sm_ ssd::backward_sweep_kernel<8,.8> 8 28 an address of a checkpoint, read once in 128 tokens
sm_ scan::backward_kernel<4,.4> 64 300 the same
sm_ ssd::forward_kernel<8,.4> 72 320 at 128 registers four blocks share a multiprocessor; what spills are addresses of a leaf
sm_90a? ssd::forward_hopper_kernel<.*,.128,.2,.false> 32 80 two states take 128 of 216 registers a consumer; what spills are a few of their numbers, around the loop
sm_90a? ssd::forward_hopper_kernel<.*,.128,.2,.true> 144 640 the same, with z beside them
sm_ ssd::forward_tensor_kernel<.*,.128> 16 40 two blocks of 8 warps leave 128 registers a thread, 64 of them the state; what spills are addresses of a chunk
sm_ ssd::states_tensor_kernel<.*,.128,.*> 40 248 the same; a few numbers of a checkpoint, too, which comes once in two chunks
sm_ ssd::states_tensor_kernel<.*,.64,.*> 8 16 the same
sm_ ssd::chunk_gradient_kernel<128,.*,.false> 56 112 dB and dC of all heads take 64 of 255 registers, S and the sum of W 32; what spills are addresses of a head
sm_ ssd::chunk_gradient_kernel<128,.*,.true> 112 440 the same, and those of z and of shares, with one stage; with two it is 40 and 80
sm_ ssd::chunk_gradient_kernel<64,.*,.false> 8 24 the same
sm_ ssd::chunk_gradient_kernel<64,.*,.true> 16 28 the same
sm_90 ssd::chunk_gradient_hopper_kernel<.*> 80 280 dB, dC, S and the sum of W of all heads take 64 registers of a warpgroup each; what spills are addresses of a head, and what the preparing warps need once a head
sm_ wkv6::backward_chunk_kernel 24 140 at 128 registers two blocks share a multiprocessor, which is 1.5 times faster (docs/performance.md); what spills are addresses, outside of the inner loops
sm_ wkv6::forward_tensor_kernel<.*,.128,.false,.*> 40 150 sixteen warps leave 128 registers a thread, 64 of them the state; what spills are a few addresses of a sub-chunk
sm_ wkv6::states_tensor_kernel<.*<float,.float,.(32|128),.*> 24 60 as many warps as fit leave no register idle; what spills are addresses of a checkpoint, written once in 64 tokens
sm_ wkv6::backward_tensor_kernel<.*> 540 100 two or three blocks of 256 threads need 128 or 80 registers a thread, N = 128 takes all 255; a few addresses of a chunk spill.  The stack is for what strong_decay_slice is handed
sm_ wkv6::strong_decay_slice<.*> 0 600 the rare chunk of the same kernels: called, so that it takes no register from the others
sm_ wkv6::forward_tensor_kernel<.*<float,.float,.(32|64),.false,.*> 32 80 fp32: operands in two terms beside a state of 64 registers; what spills are a few addresses
sm_ wkv6::forward_tensor_kernel<.*<float,.float,.128,.false,.*> 80 240 fp32: the same in 128 registers a thread; what spills are addresses and what a sub-chunk on the strong-decay path needs
sm_ wkv6::states_tensor_kernel<.*<float,.float,.64,.*> 48 180 fp32: operands in two terms in 80 registers a thread; what spills are addresses of a sub-chunk and v
sm_ wkv6::states_tensor_kernel<.*<bf16,.bf16,.64,.*> 24 48 80 registers a thread, so that two blocks share a multiprocessor; what spills is an address or two of a step
sm_ conv1d::backward_rows_kernel<.*> 16 40 80 registers let six blocks share a multiprocessor, which is 5 % faster; what spills is an address
sm_(100|120) conv1d::forward_kernel<.*true>,.*> 8 32 80 registers let six blocks share a multiprocessor; what spills is an address of a run
sm_(100|120) norm::mix_backward_kernel<norm::Kind<.*,.8,.float,.false,.true,.16,.* 96 280 ptxas needs more registers for the same code there; not measured on such a GPU
sm_ norm::gate_backward_kernel<norm::Kind<.*,.8,.float,.false,.true,.16,.* 24 80 168 registers let three blocks share a multiprocessor; what spills are addresses of a row
sm_(100|120) wkv6::states_tensor_kernel<.*<f16,.*,.(64|128),.*> 40 104 ptxas needs more registers for the same code there; not measured on such a GPU, nor are the following
sm_(100|120) wkv6::states_tensor_kernel<.*<float,.float,.(32|128),.*> 16 52 the same
sm_(100|120) wkv6::states_tensor_kernel<.*<float,.float,.64,.*> 56 180 the same
sm_100 wkv6::states_tensor_kernel<.*<bf16,.*,.32,.*> 16 24 the same
sm_120 wkv6::states_tensor_kernel<.*<bf16,.float,.64,.*> 8 16 the same
sm_(100|120) wkv6::forward_tensor_kernel<.*<float,.float,.64,.false,.*> 40 110 the same
sm_(100|120) wkv6::forward_tensor_kernel<.*<float,.float,.128,.false,.*> 104 690 the same
sm_(100|120) wkv6::backward_tensor_kernel<.*> 560 140 the same
END

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
        $demangle <"$name.log" | awk -v arch="sm_$arch" -v allowed="$out/allowed" '
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
            bad = stack > allowed_stack || spill > allowed_spill || smem > most * 1024
            failed += bad
            printf "%s %4d registers %5d bytes smem %4d stack %4d spills  %s\n",
                   bad ? "FAIL:" : "  ok:", registers, smem, stack, spill, kernel
        }
        # (C7510) and others: what products of warpgroups lose is not seen in registers or spills
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
