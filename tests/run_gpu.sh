#!/usr/bin/env bash
# run_gpu.sh [STEP...]: builds, tests and benches on a machine with an NVIDIA GPU.
#
#   STEP       build api cpu gpu memcheck racecheck initcheck bench; all of them if none is named
#   OUT        where summary.txt, the logs and bench.csv go (build-gpu/out)
#   GPU_ARCHS  architectures to compile for (that of the first GPU)
#   GT_COMMIT  the commit that is tested, where there is no .git
set -u
cd "$(dirname "$0")/.."
root=$PWD
build=${BUILD:-$root/build-gpu}
out=${OUT:-$build/out}
mkdir -p "$out"
summary=$out/summary.txt
PATH=$PATH:/usr/local/cuda/bin
if ! command -v meson >/dev/null || ! command -v ninja >/dev/null; then . "$root/tests/setup.sh"; fi
steps=${*:-build api cpu gpu memcheck racecheck initcheck bench}
failed=0

gpu_query() { nvidia-smi --query-gpu="$1" --format=csv,noheader | head -n 1; }

architecture() { gpu_query compute_cap | sed 's/\.//; s/^90$/90a/'; }

# step NAME COMMAND...: runs the command if the step is asked for, its output in NAME.log
step() {
    local name=$1 started=$SECONDS status=0 result
    shift
    case " $steps " in *" $name "*) ;; *) return ;; esac
    "$@" >"$out/$name.log" 2>&1 || status=$?
    case $status in
    0) result=passed ;;
    77) result=skipped ;;
    *)
        result=FAILED
        failed=1
        grep -E 'FAIL|[Ee]rror|=========' "$out/$name.log" | head -n 20
        tail -n 5 "$out/$name.log"
        ;;
    esac
    printf '%-10s %-8s %4d s  %s\n' "$name" "$result" $((SECONDS - started)) \
        "$(grep -E '^[0-9]+ passed|ERROR SUMMARY|^Ok:' "$out/$name.log" | tail -n 1)" |
        tee -a "$summary"
}

build() {
    local options=("-Dgpu_archs=${GPU_ARCHS:-$(architecture)}" -Dcuda=enabled -Dbuildtype=release)
    if [ ! -f "$build/build.ninja" ]; then
        meson setup "$build" "$root" "${options[@]}" || return
    fi
    ninja -C "$build"
}

suite() { meson test -C "$build" --no-rebuild --print-errorlogs --suite "$1"; }

# Nothing may be skipped here.
gpu() { suite gpu && ! grep -q SKIP "$build/meson-logs/testlog.txt"; }

# sanitize TOOL OPTION...: the last options, from --, are the test program's
sanitize() {
    local tool=$1 options=()
    shift
    while [ "$1" != -- ]; do
        options+=("$1")
        shift
    done
    compute-sanitizer --tool "$tool" --error-exitcode 1 --print-limit 20 "${options[@]}" \
        "$build/tests/test_kernels_gpu" "${@:2}"
}

bench() { ninja -C "$build" bench/gt_bench && "$build/bench/gt_bench" --csv "$out/bench.csv"; }

{
    echo "commit     ${GT_COMMIT:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}"
    echo "gpu        $(gpu_query name), driver $(gpu_query driver_version)"
    echo "cuda       $(nvcc --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')"
} | tee "$summary"
started=$SECONDS
step build build
step api suite api
step cpu suite cpu
step gpu gpu
step memcheck sanitize memcheck --leak-check full -- --short --exact
# racecheck takes no account of bar.arrive: kernels with producers and consumers, which the
# emulation checks by happens-before, are left out.
step racecheck sanitize racecheck \
    --kernel-regex-exclude 'kre=wkv6.*(forward|reverse)_tensor_kernel' -- --once --exact
step initcheck sanitize initcheck -- --short --exact
step bench bench
echo
cat "$summary"
echo "$((SECONDS - started)) s; logs in $out"
exit $failed
