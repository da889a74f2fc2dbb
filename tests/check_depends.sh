# check_depends.sh NINJA BUILD OBJECT...: ninja must know which headers the implementation's objects include, so that
# editing a header rebuilds them.
set -eu
ninja=$1
build=$2
shift 2
failures=0
for object in "$@"; do
    part=${object#lib}
    part=${part#gt_}
    part=${part%%.*}
    needed="gt_kernels.h gt/base/op.h"
    [ "$part" = core ] || needed="$needed gt_$part.cuh"
    # -n: compiles nothing, and only reads ninja's log of dependencies
    known=$("$ninja" -n -C "$build" -t deps "$object")
    for header in $needed; do
        case $known in
        *"/$header"*) echo "ok: $object depends on $header" ;;
        *)
            failures=1
            echo "FAIL: $object does not depend on $header"
            ;;
        esac
    done
done
exit $failures
