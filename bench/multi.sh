#!/usr/bin/env bash
# multi.sh: ranks of the trainer on the GPUs of one machine, for docs/scaling.md.
#
#   HYBRID     the built trainer, with MPI (build/examples/hybrid_train)
#   MPIRUN     the program that starts ranks (mpirun).  An Open MPI outside its own folder also needs OPAL_PREFIX
#   OUT        folder for multi.csv (.)
#   GPUS       number of GPUs to use (all that nvidia-smi lists)
#   RUNS       runs of each row (3)
#   LIMIT      limit of all runs, in seconds (400); later runs are skipped
#   WINDOWS    windows of each GPU (64)
#   SEQ        tokens of a window (256)
#   OPTIONS    more options of the trainer, such as those of a small model for a trial of this script
#   GT_COMMIT  the measured commit, for folders without .git
#
# multi.csv begins with facts of the machine.  Each run has a row:
#
#   part          one: a single process; weak: WINDOWS windows for each rank; strong: as many windows for all ranks
#                 shared: two ranks on one GPU
#                 large one, large weak: the same for a model of 1.1e9 parameters, with 16 windows of 1024 for each rank
#   tokens_per_s  of all ranks, by the clock, from step 100 to step 500; of large models from step 31 to step 60
#   waiting       per cent of the time of a step for which the GPU of rank 0 waited for NCCL; empty: no NCCL
#
# At the end, two runs with the same ranks must write the same log.  Losses show how near NCCL, MPI and one process with
# the same windows are.
#
# NVLink multicast stays off unless NCCL_NVLS_ENABLE is set, because it can disturb other users of a host's switches.
set -u
cd "$(dirname "$0")/.." || exit
hybrid=${HYBRID:-build/examples/hybrid_train} mpirun=${MPIRUN:-mpirun} out=${OUT:-.} status=0
windows=${WINDOWS:-64} seq=${SEQ:-256} runs=${RUNS:-3} steps=500 prefix='' size=()
gpus=${GPUS:-$(nvidia-smi --list-gpus 2>/dev/null | grep -c .)}
file=$out/multi.csv
mkdir -p "$out" || exit
work=$(mktemp -d) || exit
trap 'rm -rf "$work"' EXIT
GT_COMMIT=${GT_COMMIT:-$(git describe --always --dirty 2>/dev/null || echo unknown)}
export GT_COMMIT OMP_WAIT_POLICY=passive NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
library=$(python3 -c 'import nvidia.nccl as n; print(list(n.__path__)[0] + "/lib")' 2>/dev/null)
[ -z "$library" ] || export LD_LIBRARY_PATH="$library${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
until=$((SECONDS + ${LIMIT:-400}))

fact() { printf '# %-8s %s\n' "$1" "$2"; }
gpu() { nvidia-smi --query-gpu="$1" --format=csv,noheader 2>/dev/null | head -n 1; }
{
    fact commit "$GT_COMMIT"
    fact date "$(date -u +%Y-%m-%d)"
    fact machine "$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), $(nproc) cores, $(uname -sm)"
    fact gpus "$gpus x $(gpu name), driver $(gpu driver_version)"
    fact mpi "$("$mpirun" --version 2>&1 | head -n 1)"
    nvidia-smi topo -m 2>/dev/null | sed 's/\x1b\[[0-9;]*m//g; s/^/# /'
    echo part,ranks,transport,batch,seq,tokens_per_s,ms_per_step,waiting
} >"$file"

# train RANKS NCCL OPTION...: trains HY, and leaves the report in $work/log; RANKS 0: without mpirun
train() {
    local ranks=$1 nccl=$2 result=0 left=$((until - SECONDS))
    shift 2
    [ $left -gt 0 ] || return 124
    # shellcheck disable=SC2086 # several options
    set -- "$hybrid" --device cuda --model HY --seq "$seq" --sample 0 --quiet --eval-every 0 --final-eval-tokens 256 \
        --stall-timeout 60 --nccl "$nccl" "${size[@]}" "$@" ${OPTIONS-}
    [ "$ranks" = 0 ] || set -- "$mpirun" -n "$ranks" --oversubscribe "$@"
    timeout $left "$@" >"$work/log" 2>&1 || result=$?
    [ $result = 0 ] && return
    echo "# ended with $result: $* : $(grep hybrid_train: "$work/log" | tail -n 1)" >>"$file"
    status=$result
    return $result
}

# row PART RANKS NCCL BATCH
row() {
    local run speed waiting transport
    for ((run = 0; run < runs; run++)); do
        if [ $until -le $SECONDS ]; then
            echo "# not run, because no time is left: $*" >>"$file"
            status=124
            return
        fi
        train "$2" "$3" --batch "$4" --steps "$steps" --csv "$work/steps" || return
        speed=$(sed -n 's/^speed.*: \([0-9,]*\) tokens.*/\1/p' "$work/log" | tr -d ,)
        [ -n "$speed" ] || speed=$(awk -F, -v from=$((steps / 2)) \
            'NR > 1 && $1 > from && $9 > 0 { time += 1 / $9; n++ } END { printf "%.0f", (n ? n / time : 0) }' "$work/steps")
        waiting=$(sed -n 's/^waiting *\([0-9.]*\) %.*/\1/p' "$work/log")
        transport=$(sed -n 's/^gradients *added up by \([A-Z]*\) *\([0-9.]*\).*/\1 \2/p' "$work/log" | sed 's/ *$//')
        awk -v s="$speed" -v head="$prefix$1,$2,${transport:-none},$4,$seq" -v tokens=$(($4 * seq)) -v waiting="$waiting" \
            'BEGIN { printf "%s,%s,%.4f,%s\n", head, s, (s > 0 ? 1000 * tokens / s : 0), waiting }' >>"$file"
    done
}

# logs NAME RANKS NCCL: 20 steps with as many windows as `most` ranks have; keeps the columns of the log that do not
# depend on time
most=$((gpus > 1 ? gpus : 2)) use=$([ "$gpus" -gt 1 ] && echo on || echo off)
logs() {
    train "$2" "$3" --batch $((windows * most)) --steps 20 --csv "$work/csv" && cut -d, -f1-7 "$work/csv" >"$work/$1"
}

# losses NAME: of steps 3 and 20
losses() { echo "$(sed -n 4p "$work/$1" | cut -d, -f3) $(tail -n 1 "$work/$1" | cut -d, -f3)"; }

row one 0 off "$windows"
row one 0 on "$windows"
for ((n = 2; n <= gpus; n *= 2)); do
    row weak $n on $((windows * n))
    row strong $n on "$windows"
    row weak $n off $((windows * n))
done
row shared 2 off $((windows * 2))

large() {
    local seq=1024 steps=60 runs=1 prefix='large ' size=(--hidden 2048 --layers 13 --head-size 64)
    row one 0 off 16
    for ((n = 2; n <= gpus; n *= 2)); do row weak $n on $((16 * n)); done
}
[ -n "${OPTIONS-}" ] || large

if logs first $most "$use" && logs again $most "$use" && logs host $most off && logs alone 0 off; then
    same=differ
    cmp -s "$work/first" "$work/again" && same="are equal"
    echo "# the logs of two runs with $most ranks, nccl $use, $same" >>"$file"
    [ "$same" = differ ] && status=1
    echo "# losses of steps 3 and 20: nccl $use $(losses first), nccl off $(losses host)," \
        "one process $(losses alone)" >>"$file"
fi
exit $status
