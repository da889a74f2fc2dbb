# check_bench.sh GT_BENCH: if gt_bench cannot write, it ends with status 1 and a message; it never overwrites a file
# that it compares with.  All rows of twins run.  The floor of add_norm's backward counts the arrays that each form of it
# moves.
# shellcheck disable=SC2016,SC2034 # expect expands its arguments
set -u
case $1 in
    /*) bench=$1 ;;
    *) bench=$PWD/$1 ;;
esac
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder" || exit 1
failures=0

# expect STATUS MESSAGE COMMAND
expect() {
    (eval "$3") 2>err.txt
    status=$?
    if [ $status != "$1" ] || ! grep -q "$2" err.txt; then
        failures=1
        echo "FAIL: status $status: $3"
        cat err.txt
    fi
}
filter="--quick --filter 'norm_mix fwd ref f32'"

for options in --help --list "--quick --filter none"; do
    [ -e /dev/full ] && expect 1 'cannot write standard output: ' '"$bench" $options >/dev/full'
    expect 1 'cannot write standard output: ' '"$bench" $options >&-'
done
[ -e /dev/full ] && expect 1 'cannot write /dev/full: ' "\"\$bench\" $filter --csv /dev/full >out.txt"
expect 1 'cannot write standard output: ' "\"\$bench\" $filter --csv closed.csv >&-"
if grep -q '^version' closed.csv; then
    failures=1
    echo "FAIL: the CSV file contains printed text"
fi
expect 1 'cannot write standard output: ' 'ulimit -f 1; "$bench" --list >big.txt'
"$bench" --quick --filter 'norm_mix fwd ref f32' --csv rows.csv >out.txt || failures=1
grep -q '^norm_mix,fwd,ref,f32,' rows.csv || {
    failures=1
    echo "FAIL: no row in the CSV file"
}
cp rows.csv before.csv
ln -s rows.csv link.csv
expect 2 'would overwrite' '"$bench" --filter none --csv link.csv --peers rows.csv >out.txt'
cmp rows.csv before.csv || failures=1

"$bench" --quick --filter ref >out.txt || {
    failures=1
    echo "FAIL: rows of twins"
    grep FAIL out.txt
}

# In fp32, 4 arrays of M x D and 2 of D with the stored sum; 5 and 2 from x and residual.
"$bench" --quick --filter 'add_norm bwd ref f32' --csv sums.csv >out.txt || failures=1
awk -F, '$1 == "add_norm" { if ($5 ~ / inputs$/) inputs = $7; else stored = $7 }
    END { M = 2048; exit !(inputs > 0 && stored / inputs > (4 * M + 2) / (5 * M + 2) * .9999 &&
                           stored / inputs < (4 * M + 2) / (5 * M + 2) * 1.0001) }' sums.csv || {
    failures=1
    echo "FAIL: the floors of add_norm's backward do not have the expected ratio"
    cat sums.csv
}
[ $failures = 0 ] && echo ok
exit $failures
