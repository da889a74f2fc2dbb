#!/usr/bin/env bash
# protocol.sh: the measurements of whole models on a GPU for docs/seeds.md.
#
#   HYBRID     the built trainer (build/examples/hybrid_train)
#   OUT        folder for protocol.csv and, with TEXT, run.csv and run.log (.)
#   TEXT       a text to train on, 5000 steps of 8 x 256 tokens; without it this run is skipped
#   GT_COMMIT  the measured commit, for folders without .git
#   LIMIT      limit of all parts, in seconds (450); it stops the running part, and skips later ones
#
# protocol.csv begins with facts of the machine.  Then come the rows of hybrid_train --bench (docs/training.md), each
# part between a line with its command and a line with its time.  A row is written as soon as it is measured, so a
# program that is stopped leaves the rows until then.
#
# Times of the parts on an H200 (93 seconds in all; eb132b1):
#     five lengths              11 s
#     batches, three dtypes     16, 10 and 11 s
#     the CPU beside it          4 s      (16 cores)
#     other models              19 s
#     plans                      2 s
#     a text                    18 s      (5000 steps of 3 ms, 10 evaluations)
set -u
cd "$(dirname "$0")/.." || exit
hybrid=${HYBRID:-build/examples/hybrid_train} out=${OUT:-.} status=0
file=$out/protocol.csv
mkdir -p "$out" || exit
GT_COMMIT=${GT_COMMIT:-$(git describe --always --dirty 2>/dev/null || echo unknown)}
export GT_COMMIT OMP_WAIT_POLICY=passive

fact() { printf '# %-8s %s\n' "$1" "$2"; }
gpu() { nvidia-smi --query-gpu="$1" --format=csv,noheader | head -n 1; }
{
    fact commit "$GT_COMMIT"
    fact date "$(date -u +%Y-%m-%d)"
    fact machine "$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), $(nproc) cores, $(uname -sm)"
    fact gpu "$(gpu name), $(gpu memory.total), power limit $(gpu power.limit)"
    fact driver "$(gpu driver_version)"
    fact cuda "$(nvcc --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\).*/\1/p')"
} >"$file"

until=$((SECONDS + ${LIMIT:-450}))

# within NAME COMMAND...: runs the command in the time that is left, then writes a line with its time to the file
within() {
    local name=$1 started=$SECONDS result=0
    shift
    if [ $until -le $SECONDS ]; then
        echo "# not run, because no time is left: $name" >>"$file"
        status=124
        return
    fi
    timeout $((until - SECONDS)) "$@" || result=$?
    case $result in
    0) echo "# took $((SECONDS - started)) s" >>"$file" ;;
    124) echo "# stopped by its time limit after $((SECONDS - started)) s" >>"$file" ;;
    *) echo "# ended with $result after $((SECONDS - started)) s" >>"$file" ;;
    esac
    [ $result = 0 ] || status=$result
}

# part OPTION...: writes the rows of the bench with these options
part() {
    echo "# hybrid_train --device cuda $*" >>"$file"
    within "$*" "$hybrid" --device cuda "$@" >>"$file"
}

# plan OPTION...
plan() { within "$*" "$hybrid" "$@" --plan 8,64 --seq 256 >>"$file"; }

steps="--bench-steps 100 --lr 3e-4 --weight-decay 0.1"
# the standard test: five lengths in batches of 8
part --model HY --bench 256,512,1024,2048,4096
# batches and dtypes, and 100 steps of training each
# shellcheck disable=SC2086 # several options
for dtype in f32 bf16 f16; do part --model HY --dtype $dtype --bench 64 --bench-batch 1,2,4,8,16,32,64 $steps; done
# against the CPU
part --model HY --dtype f32 --batch 8 --bench 64 --bench-cpu
part --model HY --dtype bf16 --batch 8 --bench 64 --bench-cpu
# other models
for model in GF-MH CP HY-M1 RWKV-6 Mamba-2 Mamba-1 8M; do part --model $model --bench 256; done
part --model 8M --batch 16 --bench 1024
part --model HY --bench 256 --bench-batch 64
# text from random weights: times of a token for 1 sample and for 64, with HY and with 130 million parameters
generation="--bench 128 --bench-batch 1,64 --bench-generate --bench-runs 10"
# shellcheck disable=SC2086 # several options
for sizes in "" "--hidden 768 --layers 11 --head-size 64 --d-state 128"; do part --model HY $sizes $generation; done
# planned memory and memory taken
echo "# hybrid_train --plan 8,64 --seq 256, on this device and on none" >>"$file"
for model in HY HY-M1 8M; do
    plan --device cuda --model $model
    plan --model $model
done

if [ -n "${TEXT-}" ]; then
    within "a text" "$hybrid" --device cuda --data "$TEXT" --model HY --batch 8 --seq 256 --steps 5000 --lr 3e-4 \
        --eval-every 500 --sample 0 --csv "$out/run.csv" >"$out/run.log"
fi
exit $status
