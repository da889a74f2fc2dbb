# The one-file versions of the headers and twins, in $SINGLE.  The script compiles each alone in a folder, as stubs in C
# and C++, and with nvcc one as kernels.  It also puts two into one program, and all twins into one.
. "$(dirname "$0")/common.sh"

# function HEADER: a function that the header declares and implements
function() {
    case $1 in
    gt_wkv6.cuh) echo gt_wkv6_forward ;;
    gt_ssm.cuh) echo gt_ssd_forward ;;
    gt_conv1d.cuh) echo gt_conv1d_forward ;;
    gt_wkv4.cuh) echo gt_wkv4_forward ;;
    gt_fused.cuh) echo gt_norm_mix_forward ;;
    esac
}

# program FILE STATUS FUNCTION...: checks the version, and that each function, called without arguments, returns STATUS.
program() {
    file=$1
    answer=$2
    shift 2
    {
        echo 'int main(void) {'
        echo '    if (gt_version() != GT_VERSION) return 1;'
        for name; do
            echo "    if ($name(0, 0) != $answer || !gt_last_error()[0]) return 2;"
        done
        echo '    return 0;'
        echo '}'
    } >>"$file"
}

# ---- gt_kernels.h, without any other file ----
mkdir whole
cp "$SINGLE/gt_kernels.h" whole
grep -n '^ *# *include *"' whole/gt_kernels.h && fail 'gt_kernels.h includes another file'
check 'gt_kernels.h: C' $CC -std=c11 $strict -Iwhole -DWITH_IMPLEMENTATION "$here/use.c" -o use
check 'gt_kernels.h: C, runs' ./use
if [ -n "$CXX" ]; then
    check 'gt_kernels.h: C++' $CXX -x c++ -std=c++11 $strict -Wno-missing-field-initializers -Iwhole \
        -DWITH_IMPLEMENTATION "$here/use.c" -o use
    check 'gt_kernels.h: C++, runs' ./use
fi

# ---- each of the others, without any other file ----
operators=
for path in "$SINGLE"/gt_*.cuh; do
    header=${path##*/}
    name=$(function "$header")
    if [ -z "$name" ]; then
        fail "$header: this test has no function for this header"
        continue
    fi
    operators="$operators $header"
    mkdir "only_$header"
    cp "$path" "only_$header"
    printf '#define GT_CORE_IMPLEMENTATION\n#include "%s"\n' "$header" >only.c
    program only.c GT_ERROR_NO_CUDA "$name"
    check "$header: C" $CC -std=c11 $strict "-Ionly_$header" only.c -o only
    check "$header: C, runs" ./only
    if [ -n "$CXX" ]; then
        check "$header: C++" $CXX -x c++ -std=c++17 $strict "-Ionly_$header" only.c -o only
        check "$header: C++, runs" ./only
    fi
done

# ---- two, three, all in one file of a program, in both orders; the core in whichever comes first ----
reverse() {
    reversed=
    for header; do reversed="$header $reversed"; done
    echo $reversed
}
for headers in 'gt_wkv6.cuh gt_ssm.cuh' 'gt_ssm.cuh gt_wkv6.cuh' 'gt_kernels.h gt_fused.cuh' \
    "$operators" "$(reverse $operators)"; do
    echo '#define GT_CORE_IMPLEMENTATION' >several.c
    functions=
    for header in $headers; do
        echo "#include \"$header\"" >>several.c
        functions="$functions $(function "$header")"
    done
    program several.c GT_ERROR_NO_CUDA $functions
    check "$headers: compile" $CC -std=c11 $strict "-I$SINGLE" several.c -o several
    check "$headers: run" ./several
done

# ---- two in two files of a program, and the whole in a third ----
printf '#define GT_CORE_IMPLEMENTATION\n#include "gt_conv1d.cuh"\n' >first.c
echo '#include "gt_ssm.cuh"' >second.c
echo '#include "gt_kernels.h"' >main.c
program main.c GT_ERROR_NO_CUDA gt_conv1d_forward gt_ssd_forward
check 'two files' $CC -std=c11 $strict -Ionly_gt_conv1d.cuh -c first.c -o first.o
check 'two files, the second' $CC -std=c11 $strict -Ionly_gt_ssm.cuh -c second.c -o second.o
check 'two files, the program' $CC -std=c11 $strict -Iwhole main.c first.o second.o -o two
check 'two files: run' ./two

# A one-file version may be asked for the implementation of another.  It must take that one from the file beside it.
printf '#define GT_KERNELS_IMPLEMENTATION\n#include "gt_wkv6.cuh"\n' >beside.c
program beside.c GT_ERROR_NO_CUDA $(for header in $operators; do function "$header"; done)
check 'beside: compile' $CC -std=c11 $strict "-I$SINGLE" beside.c -o beside
check 'beside: run' ./beside

# ---- the CPU twins, each without any other file; then with gt_kernels.h, in a program ----
objects=
for path in "$SOURCE"/reference/*.c; do
    name=${path##*/}
    mkdir "only_$name"
    cp "$SINGLE/$name" "only_$name"
    check "$name: alone" $CC -std=c11 $strict -c "only_$name/$name" -o "$name.o"
    objects="$objects $name.o"
done
sed -n 's/^GT_REF_FUNCTION gt_status \(gt_ref_[a-z0-9_]*\)(.*/\1/p' "$SOURCE/gt_kernels.h" >functions
[ -s functions ] || fail 'gt_kernels.h declares no twins'
{
    printf '#define GT_KERNELS_IMPLEMENTATION\n#include "gt_kernels.h"\nint main(void) {\n'
    sed 's/.*/    if (&(0) != GT_ERROR_NULL) return 1;/' functions
    printf '    return 0;\n}\n'
} >twins.c
check 'twins: program' $CC -std=c11 $strict -Iwhole twins.c $objects -lm -o twins
check 'twins: run' ./twins

# ---- kernels ----
if [ -n "${NVCC-}" ]; then
    printf '#define GT_CORE_IMPLEMENTATION\n#include "gt_conv1d.cuh"\n' >kernels.cu
    cat >>kernels.cu <<'END'
int main() {
    gt_status status = gt_device_supported(-1); /* this machine need not have a GPU */
    if (status != GT_OK && status != GT_ERROR_NO_DEVICE) return 1;
    return gt_conv1d_forward(0, 0) == GT_ERROR_NULL ? 0 : 2;
}
END
    check 'kernels: compile' "$NVCC" -std=c++17 -arch=sm_90a -Werror=all-warnings -Ionly_gt_conv1d.cuh kernels.cu \
        -o kernels
    check 'kernels: run' ./kernels
fi
finish
