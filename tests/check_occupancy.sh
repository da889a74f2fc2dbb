#!/bin/sh
# check_occupancy.sh: tests occupancy.awk.  First with known values.  Then, if nvcc is installed, with all values that
# occupancy.c prints; this program asks cuda_occupancy.h of the CUDA Toolkit.  CC and NVCC come from the environment.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# Architecture, registers, threads, bytes, barriers, and then blocks and limiters.
cat >"$scratch/known" <<'END'
80 24 256 0 0 8 warps
80 32 256 0 0 8 warps, registers
80 33 256 0 0 6 registers
80 64 128 0 0 8 registers
80 32 32 0 0 32 blocks
80 32 256 83968 0 1 shared memory
80 32 256 82944 0 2 shared memory
90a 32 256 115712 1 2 shared memory
90a 32 256 115713 1 1 shared memory
90a 168 384 0 1 1 registers
90a 128 256 0 1 2 registers
90a 32 128 0 16 4 barriers
90a 32 32 6144 0 32 shared memory, blocks
90a 255 512 0 0 0 registers
90a 32 256 233473 0 0 shared memory
89 40 256 0 0 6 warps, registers
89 16 64 0 16 24 warps, blocks
89 32 128 50176 0 2 shared memory
75 32 256 65537 0 0 shared memory
END

cat >"$scratch/compare" <<'END'
!set_limits($1) { print "FAIL: " $0; failed++; next }
{
    want = $7
    for (i = 8; i <= NF; i++) want = want " " $i
    set_occupancy($2, $3, $4, $5)
    lines++
    if (occupancy_blocks == $6 && limiter == want) next
    if (failed++ < 10) printf "FAIL: %s: got %d blocks, limited by %s\n", $0, occupancy_blocks, limiter
}
END {
    printf "%d values, %d wrong\n", lines, failed
    exit failed > 0 || !lines
}
END
# compare FILE: compares occupancy.awk with lines of the form above
compare() { awk -f "$here/occupancy.awk" -f "$scratch/compare" "$1"; }

compare "$scratch/known"

# The whole report, from messages of ptxas about three kernels and from their launches.
ptxas_about() {
    echo "ptxas info    : Compiling entry function '$1' for 'sm_90a'"
    echo "ptxas info    : Function properties for $1"
    echo '    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads'
    echo "ptxas info    : Used $2"
}
{
    ptxas_about 'void gt::a::one_kernel<gt::bf16, 4>(gt::a::Params)' '128 registers, used 1 barriers'
    ptxas_about 'void gt::a::two_kernel<gt::f16>(gt::a::Params)' '64 registers, used 16 barriers, 1024 bytes smem'
    ptxas_about 'gt::b::rare_kernel(gt::b::Params)' '32 registers, used 0 barriers'
} >"$scratch/log"
cat >"$scratch/launches" <<'END'
void gt::a::one_kernel<gt::bf16, 4>(gt::a::Params) 256 1000
void gt::a::one_kernel<gt::bf16, 8>(gt::a::Params) 512 1000
void gt::a::two_kernel<gt::f16>(gt::a::Params) 128 0
void gt::a::two_kernel<gt::f16>(gt::a::Params) 128 120000
void gt::a::two_kernel<gt::f16>(gt::a::Params) 128 2000
END
report() {
    awk -v arch=sm_90a -v allowed=/dev/null -v may_spill=0 -v launches="$scratch/launches" -f "$here/occupancy.awk" \
        -f "$here/resources.awk" "$scratch/log" >"$scratch/report"
}
cat >"$scratch/expected" <<'END'
  ok:  128 registers     0 bytes smem    0 stack    0 spills  a::one_kernel<bf16, 4>
        25 % of all warps: 2 blocks of 256 threads and 1000 bytes, limited by registers
  ok:   64 registers  1024 bytes smem    0 stack    0 spills  a::two_kernel<f16>
         6 % of all warps: 1 blocks of 128 threads and 120000 bytes, limited by shared memory
        25 % of all warps: 4 blocks of 128 threads and 0 bytes, limited by barriers
  ok:   32 registers     0 bytes smem    0 stack    0 spills  b::rare_kernel
           not launched by these calls
1 of 3 kernels were not launched
END
report
diff "$scratch/expected" "$scratch/report"
echo 'gt::b::rare_kernel(gt::b::Params) 256 240000' >>"$scratch/launches"
if report || ! grep -q '^FAIL:    0 % of all warps: 0 blocks of 256 threads' "$scratch/report"; then
    echo 'FAIL: a kernel of which no block fits passes'
    exit 1
fi

toolkit=$(sh "$here/../tools/cuda_toolkit.sh" ${NVCC:-nvcc} 2>/dev/null || true)
if [ ! -e "$toolkit/include/cuda_occupancy.h" ]; then
    echo 'not compared with cuda_occupancy.h: there is no CUDA Toolkit'
    exit
fi
${CC:-cc} -std=c11 -isystem "$toolkit/include" -o "$scratch/occupancy" "$here/occupancy.c"
"$scratch/occupancy" >"$scratch/values"
compare "$scratch/values"
