# check_toy.sh TOY_BENCH: the bench must have rows of the toy operator.  Only the toy's own files (SOURCE/tests/toy) and
# the build's files may name it.
set -eu
bench=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
cd "$SOURCE"
fail() {
    echo "FAIL: $1"
    exit 1
}
for row in 'fwd,ref,f32' 'bwd,ref,f32' 'fwd,ref,bf16' 'bwd,ref,bf16'; do
    pass=${row%%,*} dtype=${row##*,}
    "$bench" --quick --filter "toy $pass ref $dtype" | grep -Eq "^$pass +ref +$dtype +M256 D64 +[0-9.]+ " ||
        fail "no row $row"
done
"$bench" --list | grep -qx 'toy,bwd,gt,bf16,M65536 D512' || fail 'no row for GPUs'
named=$(grep -rlE 'gt_(ref_)?toy|test_op_toy' gt tests bench reference gt_*.cuh gt_kernels.h | grep -v '^tests/toy/' |
    grep -vx tests/check_toy.sh || true)
[ -z "$named" ] || fail "named by $named"
