#!/usr/bin/env bash
# run_gpu.sh [STEP...]: builds, tests and benches on a machine with an NVIDIA GPU.
#
#   STEP       build suites gpu train python peers peers_rwkv6 peers_step protocol memcheck modes racecheck initcheck
#              bench; all steps if none is given. "suites" runs the suites that need no GPU. "build" compiles all
#              programs of the other given steps, or everything; without it each step compiles its own programs.
#   OUT        folder for summary.txt, the logs and bench.csv (build-gpu/out)
#   BUILD      build folder (build-gpu)
#   TEXT       a text to train on in step train: 510 steps of 64 x 256 tokens
#   PEERS      times to compare with in step bench: a CSV of bench/peers.py
#   WHEELS     a folder of wheels for the Python steps on machines without a registry: meson-python, pytest, einops and
#   their dependencies
#   SOURCES    the public packages' repositories for the steps peers, peers_rwkv6 and peers_step: see
#              python/tests/peers.py
#   GPU_ARCHS  architectures to compile for (the first GPU's)
#   LIMIT      limit of a sanitizer for one operator, in seconds (900)
#   STEP_LIMIT limit of each of the steps peers, peers_rwkv6 and peers_step (540) and protocol (450), in seconds;
#   results until then stay in their logs
#   GT_COMMIT  the tested commit, for folders without .git
set -u
cd "$(dirname "$0")/.." || exit
root=$PWD
build=${BUILD:-$root/build-gpu}
out=${OUT:-$build/out}
mkdir -p "$out"
summary=$out/summary.txt
PATH=$PATH:/usr/local/cuda/bin
if ! command -v meson >/dev/null || ! command -v ninja >/dev/null; then . "$root/tests/setup.sh"; fi
steps=${*:-build suites gpu train python peers peers_rwkv6 peers_step protocol memcheck modes racecheck initcheck bench}
mapfile -t operators < <(sed -n 's/^    X(\([a-z0-9_]*\)).*/\1/p' tests/ops/list.h)
failed=0

gpu_query() { nvidia-smi --query-gpu="$1" --format=csv,noheader | head -n 1; }

architecture() { gpu_query compute_cap | sed 's/\.//; s/^90$/90a/'; }

# The summary of a log: of Meson, of all sanitizers together, or of a test program.
summarise() {
    # Meson 1.12 writes "1/43 api - gt_kernels:NAME OK", older versions write "1/43 gt_kernels:api / NAME OK"
    awk '/^ *[0-9]+\/[0-9]+ .* (\/|-) .* OK / { suite = $2; sub(/.*:/, "", suite)
                                               if (!tests[suite]++) order[++suites] = suite }
         /^Ok:/ { ok = $2 " tests" }
         /^alone/ { ok = ok " in " $2 " s" }
         /(ERROR|RACECHECK) SUMMARY:/ { n++; for (i = 1; i < NF; i++) if ($i == "SUMMARY:") errors += $(i + 1) }
         /^held-out loss/ { loss = $3 }
         /^speed/ { speed = $6 " tokens/s" }
         /^[0-9]+ passed/ { passed += $1; bad += $3 }
         END { for (i = 1; i <= suites; i++)
                   list = list (i > 1 ? ", " : ": ") tests[order[i]] " " order[i]
               if (ok) print ok list
               else if (n) printf "%d errors in %d programs, %d checks passed, %d failed\n",
                                  errors, n, passed, bad
               else if (loss) printf "held-out loss %s, %s\n", loss, speed
               else if (passed) printf "%d checks passed, %d failed\n", passed, bad }' "$1"
}

# step NAME COMMAND...: runs the command if step NAME is to run; its output goes to NAME.log
step() {
    local name=$1 started=$SECONDS status=0 result
    shift
    asked "$name" || return
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
    printf '%-11s %-8s %4d s  %s\n' "$name" "$result" $((SECONDS - started)) \
        "$(summarise "$out/$name.log")" | tee -a "$summary"
}

# asked NAME...: whether one of these steps is to run
asked() {
    local name
    for name; do
        case " $steps " in *" $name "*) return 0 ;; esac
    done
    return 1
}

configure() {
    [ -f "$build/build.ninja" ] || meson setup "$build" "$root" -Dcuda=enabled \
        -Dtest_cases=all -Dbuildtype=release "-Dgpu_archs=${GPU_ARCHS:-$(architecture)}"
}

compile() { configure && ninja -C "$build" "$@"; }

build() {
    local targets=()
    if asked gpu memcheck modes racecheck initcheck; then
        targets+=(tests/test_kernels_gpu tests/test_wkv6_hard_gpu tests/test_ssd_hard_gpu tests/test_hybrid_ops
                  tests/test_gpu_large)
    fi
    if asked gpu; then targets+=(tests/test_train tests/test_kernels_gpu_ptx); fi
    if asked gpu train protocol memcheck modes racecheck initcheck; then targets+=(examples/hybrid_train); fi
    if asked bench; then configure && mapfile -t -O ${#targets[@]} targets < <(bench_programs); fi
    if asked suites; then targets=(); fi
    compile "${targets[@]}"
}

# Meson first compiles the tests' programs.
suites() { configure && meson test -C "$build" --print-errorlogs "$@"; }

# On a GPU no test may be skipped, not even for lack of GPU memory.  The last test compiles operators from PTX, which
# lacks the features that only compute capability 9.0 has.
gpu() {
    local started=$SECONDS
    suites --suite gpu && ! grep -q SKIP "$build/meson-logs/testlog.txt" &&
        echo "alone $((SECONDS - started)) s" &&
        compile tests/test_kernels_gpu_ptx && "$build/tests/test_kernels_gpu_ptx" --once wkv6 &&
        "$build/tests/test_kernels_gpu_ptx" --few ssd selective_scan
}

# sanitize TOOL OPTION...: the options from -- on go to the operators' tests.  Each operator runs in a process of its
# own.  With the usual tests, so do WKV6's hard cases, the trainer and its operators, and large tensors.  With the tests
# of other ways to call, one process runs all large tensors.  All processes run at the same time.
sanitize() {
    local tool=$1 options=() commands=() processes=() status=0 preload= cuda i
    export OMP_WAIT_POLICY=passive # otherwise every process would spin on all cores
    shift
    while [ "$1" != -- ]; do
        options+=("$1")
        shift
    done
    for i in "${operators[@]}"; do commands+=("test_kernels_gpu ${*:2} $i"); done
    if [[ $* = *--exact* ]]; then
        # a text of only 1 KB, because the held-out loss at the end reads the whole last tenth
        commands+=("../examples/hybrid_train --device cuda --layers 1 --batch 2 --seq 32 --steps 3
                    --data $root/LICENSE --sample 8"
                   "test_hybrid_ops device")
        # Hard cases and large tensors take long in racecheck; large tensors also take long in initcheck.  So these
        # tools get fewer and shorter cases.
        case $tool in
        memcheck) commands+=(test_wkv6_hard_gpu "test_ssd_hard_gpu --short") ;;
        racecheck) commands+=("test_wkv6_hard_gpu --short" "test_ssd_hard_gpu --short" "test_gpu_large --short bf16") ;;
        initcheck)
            commands+=(test_wkv6_hard_gpu "test_ssd_hard_gpu --short" "test_gpu_large --short bf16")
            preload=$build/clear_products.so # clear_products.c says why
            cuda=$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")
            cc -shared -fPIC -I"$cuda/include" -o "$preload" "$root/tests/clear_products.c" -L"$cuda/lib64" -lcudart \
                -Wl,-rpath,"$cuda/lib64" -ldl || return
            ;;
        esac
    else
        commands+=("test_gpu_large bf16")
    fi
    compile tests/test_kernels_gpu tests/test_{wkv6,ssd}_hard_gpu tests/test_hybrid_ops tests/test_gpu_large \
        examples/hybrid_train || return
    for i in "${!commands[@]}"; do
        # shellcheck disable=SC2086 # a command and its options
        LD_PRELOAD=$preload timeout "${LIMIT:-900}" compute-sanitizer --tool "$tool" --error-exitcode 1 \
            --print-limit 20 "${options[@]}" "$build/tests/"${commands[i]} >"$out/$tool.$i.log" 2>&1 &
        processes+=($!)
    done
    for i in "${!processes[@]}"; do
        wait "${processes[i]}" || { status=1 && echo "FAILED: $tool of ${commands[i]}"; }
        cat "$out/$tool.$i.log"
        rm -f "$out/$tool.$i.log"
    done
    return $status
}

# Compares one step with the CPU, times whole models (model.csv), and trains a model on $TEXT.
train() {
    compile examples/hybrid_train || return
    local program=$build/examples/hybrid_train
    "$program" --device cuda --check --dtype f32 --batch 2 --seq 128 &&
        "$program" --device cuda --check --dtype bf16 --layers 2 --batch 2 --seq 128 &&
        "$program" --device cuda --check --dtype f16 --layers 2 --batch 2 --seq 128 &&
        "$program" --device cuda --bench 256,512,1024,2048,4096 >"$out/model.csv" || return
    [ -z "${TEXT-}" ] || "$program" --device cuda --data "$TEXT" --batch 64 --seq 256 --steps 510 \
        --lr 0.004 --weight-decay 1
}

# Installs the package and WHEELS, in a separate folder.
install_package() {
    local site=$build/python
    rm -rf "$site"
    [ -z "${WHEELS-}" ] ||
        python3 -m pip -q install --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl || return
    PYTHONPATH=$site PATH=$site/bin:$PATH python3 -m pip -q install --no-deps --no-build-isolation --target "$site" \
        ${WHEELS:+--no-index} --config-settings=setup-args=-Dcuda=enabled \
        "--config-settings=setup-args=-Dgpu_archs=${GPU_ARCHS:-$(architecture)}" "$root" || return
    touch "$site/is_complete"
}

# Sets the environment for Python programs, so that they find the installed package and not the sources.  Output is
# flushed line by line, so that a log is complete when the time runs out.
enter_package() {
    [ "${1-}" != new ] && [ -e "$build/python/is_complete" ] || install_package || return
    cd /tmp || return
    export PYTHONPATH=$build/python GT_TEST_BUILD=$build PYTHONUNBUFFERED=1
}

# Runs the package's tests, and measures the cost of a call.
python() {
    local status=0
    enter_package new || return
    python3 "$root/python/tests/run.py" || status=$?
    python3 "$root/python/tests/overhead.py" cuda || status=$?
    return $status
}

# peers SUITE:N...: runs the public packages' own tests.  Of the longest suites it runs one test in N, always the same.
# Suites run one after the other, because several at once would exceed the GPU's memory.
peers() {
    local status=0 suite until
    [ -n "${SOURCES-}" ] || return 77
    enter_package || return
    until=$((SECONDS + ${STEP_LIMIT:-540}))
    for suite; do
        [ $until -gt $SECONDS ] || { echo "FAILED: no time left for ${suite%:*}" && status=124 && continue; }
        echo "==== ${suite%:*}, one test in ${suite#*:}, $((until - SECONDS)) s left"
        timeout $((until - SECONDS)) python3 "$root/python/tests/peers.py" "$SOURCES" --suite "${suite%:*}" \
            --every "${suite#*:}" || { status=$? && echo "FAILED: ${suite%:*} ended with $status"; }
    done
    return $status
}

# Runs RWKV-6's tests in PARTS processes, because they wait for Triton's compiler.
PARTS=10
peers_rwkv6() {
    local status=0 processes=() i
    [ -n "${SOURCES-}" ] || return 77
    enter_package || return
    for ((i = 0; i < PARTS; i++)); do
        timeout "${STEP_LIMIT:-540}" python3 "$root/python/tests/peers.py" "$SOURCES" --suite rwkv6 --part "$i/$PARTS" \
            >"$out/rwkv6.$i.log" 2>&1 &
        processes+=($!)
    done
    for ((i = 0; i < PARTS; i++)); do
        wait "${processes[i]}" || { status=$? && echo "FAILED: part $i of $PARTS ended with $status"; }
        cat "$out/rwkv6.$i.log"
    done
    echo "==== all parts"
    sed -n 's/^\(rwkv6, [a-z_]*\) *\([0-9]*\) of \([0-9]*\) pass.*/\1 \2 \3/p' "$out"/rwkv6.*.log |
        awk '{ pass[$2] += $3; of[$2] += $4 }
            END { for (name in of) print name ": " pass[name] " of " of[name] " pass" }'
    rm -f "$out"/rwkv6.*.log
    return $status
}

# Compares a training step with the public packages' step.
peers_step() {
    [ -n "${SOURCES-}" ] || return 77
    enter_package || return
    timeout "${STEP_LIMIT:-540}" python3 "$root/python/tests/peers_step.py" "$SOURCES"
}

# Measures whole models: $out/protocol.csv and, with TEXT, a run of 5000 steps.
protocol() {
    compile examples/hybrid_train &&
        HYBRID=$build/examples/hybrid_train OUT=$out LIMIT=${STEP_LIMIT:-450} bash "$root/bench/protocol.sh"
}

# Lists the bench programs of this build; one of them needs cuBLASLt.
bench_programs() {
    local name
    for name in gt_bench gt_bench_ptx gt_bench_cublaslt; do
        [ ! -d "$build/bench/$name.p" ] || echo "bench/$name"
    done
}

# Collects the rows of all programs in one file.
bench() {
    local program status=0 programs csvs=()
    configure && mapfile -t programs < <(bench_programs) && compile "${programs[@]}" || return
    for program in "${programs[@]}"; do
        csvs+=("$out/${program#bench/}.csv")
        "$build/$program" --csv "${csvs[-1]}" ${PEERS:+--peers "$PEERS"} || status=$?
    done
    awk '!/^op,/ || !heads++' "${csvs[@]}" >"$out/bench.csv" || return
    rm "${csvs[@]}" && return $status
}

{
    echo "commit     ${GT_COMMIT:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}"
    echo "gpu        $(gpu_query name), driver $(gpu_query driver_version)"
    echo "cuda       $(nvcc --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')"
} | tee "$summary"
started=$SECONDS
step build build
step suites suites --no-suite gpu
step gpu gpu
step train train
# in subshells, since they change the folder and variables
step python eval '(python)'
step peers eval '(peers causal-conv1d:40 selective_scan:1 selective_state_update:6 layernorm:1)'
step peers_rwkv6 eval '(peers_rwkv6)'
step peers_step eval '(peers_step)'
step protocol protocol
step memcheck sanitize memcheck --leak-check full -- --short --exact
# One of the other ways to call starts with a failing CUDA call of the caller, so sanitizers must not report API errors.
step modes sanitize memcheck --report-api-errors no -- --short --mode all
step racecheck sanitize racecheck -- --once --exact
step initcheck sanitize initcheck -- --short --exact
step bench bench
echo
cat "$summary"
echo "$((SECONDS - started)) s; logs in $out"
exit $failed
