#!/usr/bin/env bash
# run_gpu.sh [STEP...]: builds, tests and benches on a machine with an NVIDIA GPU; all steps, or those
# named: build api cpu gpu memcheck racecheck initcheck bench.  Logs and bench.csv go to
# ${OUT:-build-gpu/out}; the summary comes last.  GPU_ARCHS: architectures to compile for, by default
# that of the first GPU.  GT_COMMIT: the commit, where there is no .git.
set -u
cd "$(dirname "$0")/.."
root=$PWD
build=${BUILD:-$root/build-gpu}
out=${OUT:-$build/out}
mkdir -p "$out"
summary=$out/summary.txt
PATH=$PATH:/usr/local/cuda/bin
command -v meson >/dev/null && command -v ninja >/dev/null || . "$root/tests/setup.sh"
steps=${*:-build api cpu gpu memcheck racecheck initcheck bench}
failed=0

architecture() {
    case $(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .) in
    90) echo 90a ;;
    *) nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d . ;;
    esac
}

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

gpu() {
    local program
    suite gpu || return
    # a suite that is empty, or skips everything, has not passed here
    for program in test_kernels_gpu test_gpu_large; do [ -x "$build/tests/$program" ] || return; done
    ! grep -q SKIP "$build/meson-logs/testlog.txt"
}

sanitize() {
    compute-sanitizer --tool "$1" --error-exitcode 1 --print-limit 20 "${@:2}" \
        "$build/tests/test_kernels_gpu" --short --exact
}

bench() { ninja -C "$build" gt_bench && "$build/bench/gt_bench" --csv "$out/bench.csv"; }

{
    echo "commit     ${GT_COMMIT:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}"
    echo "gpu        $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -n 1 |
        sed 's/, /, driver /')"
    echo "cuda       $(nvcc --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')"
} | tee "$summary"
started=$SECONDS
step build build
step api suite api
step cpu suite cpu
step gpu gpu
step memcheck sanitize memcheck --leak-check full
step racecheck sanitize racecheck
step initcheck sanitize initcheck
step bench bench
echo
cat "$summary"
echo "$((SECONDS - started)) s; logs in $out"
exit $failed
