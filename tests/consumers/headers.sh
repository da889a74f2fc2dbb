# gt_kernels.h in other people's programs: every language standard, strict warnings, included twice, before and after
# the implementation, without GNU extensions.
. "$(dirname "$0")/common.sh"

flags="$strict -I$SOURCE"
use=$here/use.c

c_compilers >compilers
while read -r c; do
    for std in c99 c11 c17 c2x; do
        for part in '' -DWITH_IMPLEMENTATION; do
            check "$c $std $part" $c -std=$std $flags -Wundef -Wstrict-prototypes -Wshadow \
                -Wconversion $part -c "$use" -o c.o
        done
    done
    check "$c: run" $c -std=c99 $flags -DWITH_IMPLEMENTATION "$use" -o use
    check "$c: the stubs answer" ./use
    # As another vendor's compiler sees it.  (With gcc the C library's own headers need __GNUC__ as
    # soon as stdio.h is included, so the implementation is left to clang.)
    check "$c without __GNUC__" $c -std=c99 -U__GNUC__ $flags -c "$use" -o c.o
    case $c in
    *clang*) check "$c without __GNUC__, implementation" $c -std=c99 -U__GNUC__ $flags \
        -DWITH_IMPLEMENTATION -c "$use" -o c.o ;;
    esac
done <compilers

cxx_compilers >compilers
while read -r cxx; do
    for std in c++11 c++17 c++20; do
        for part in '' -DWITH_IMPLEMENTATION; do
            check "$cxx $std $part" $cxx -x c++ -std=$std $flags $(cxx_strict "$cxx") $part -c "$use" -o cxx.o
        done
    done
done <compilers

# The example on the header's first screen, in every language that has its designated initialisers; and a file
# in which all functions are static, and some unused.
cat >example.c <<END
#include <stdio.h>
#include "gt_kernels.h"
int main(void) {
    float r[1], k[1], v[1], w[1], u[1], y[1];
    gt_stream stream = 0;
$(sed -n '/^ \*       gt_wkv6_args a = /,/puts(gt_last_error/s/^ \* *//p' "$SOURCE/gt_kernels.h")
    return 0;
}
END
grep -q 'gt_wkv6_forward(&a' example.c || fail 'no example on the first screen of gt_kernels.h'
printf '#define GT_API static\n#define GT_KERNELS_IMPLEMENTATION\n#include "gt_kernels.h"\n' >static.c
echo 'int main(void) { return gt_version() == 0; }' >>static.c
c_compilers >compilers
while read -r c; do
    for std in c99 c11; do
        check "$c $std: first example" $c -std=$std $flags -Wno-missing-field-initializers -c example.c -o c.o
        check "$c $std: GT_API = static" $c -std=$std $flags -c static.c -o c.o
    done
done <compilers
cxx_compilers >compilers
while read -r cxx; do
    check "$cxx: first example" $cxx -x c++ -std=c++20 $flags -Wno-missing-field-initializers -c example.c -o c.o
    check "$cxx: GT_API = static" $cxx -x c++ -std=c++11 $flags -c static.c -o c.o
done <compilers

# C and C++ objects in one program; either of them may hold the implementation.
if [ -n "$CXX" ]; then
    echo '#define GT_KERNELS_IMPLEMENTATION
#include "gt_kernels.h"' >impl.c
    check 'C++ program' $CXX -x c++ -std=c++11 $flags -c "$use" -o cxx.o
    check 'C implementation' $CC -std=c11 $flags -c impl.c -o c.o
    check 'C++ with C' $CXX cxx.o c.o -o use
    check 'C++ with C: runs' ./use
    check 'C program' $CC -std=c11 $flags -c "$use" -o c.o
    check 'C++ implementation' $CXX -x c++ -std=c++17 $flags -c impl.c -o cxx.o
    check 'C with C++' $CXX cxx.o c.o -o use
    check 'C with C++: runs' ./use
fi
finish
