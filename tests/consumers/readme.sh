# The C example of README.md.  The script extracts it, builds it with the README's command, runs it, and compares the
# output with the README's.  Then it compiles the example as C and C++ of every standard and, with nvcc, links it with
# kernels.  It also checks the options and files that README.md and docs name.
. "$(dirname "$0")/common.sh"

# block LANGUAGE N: the N-th fenced block of that language after the heading "Use it from C"
block() {
    awk -v fence="\`\`\`$1" -v n="$2" '
        /^## / { section = /^## Use it from C/ }
        inside && /^```$/ { exit }
        inside { print }
        section && $0 == fence && ++count == n { inside = 1 }' "$SOURCE/README.md"
}

copy_source gt_kernels
cd gt_kernels
block c 1 >example.c
block sh 1 >build.sh
block text 1 >expected
[ -s example.c ] && [ -s build.sh ] && [ -s expected ] || fail 'README.md lacks the example'
check 'the example builds' env CC="$CC" sh -eu build.sh
./example >output || fail 'the example does not run'
cmp expected output || fail "the example prints: $(cat output)"

# Compiles the same file as C and C++ of every standard, without a warning, and the README's initialiser.
block c 2 >initialiser
[ -s initialiser ] || fail 'README.md lacks the initialiser'
sed -e '/memset(/d; /^    a\./d' -e '/gt_wkv6_args a;/r initialiser' -e '/gt_wkv6_args a;/d' -e '/string\.h/d' example.c >named.c
cp example.c example.cpp
cp named.c named.cpp
check 'CPU twin' $CC -I. -c reference/gt_wkv6.c -o twin.o

# prints WHAT COMMAND...: the command must make a program that, with the CPU twin, prints README.md's output.
prints() {
    what=$1
    shift
    check "$what" "$@" -Wconversion -Wshadow -I. twin.o -lm -o example
    ./example >output && cmp expected output || fail "$what prints: $(cat output)"
}
c_compilers >compilers
while read -r c; do
    for std in c99 c11 c17 c2x; do prints "$c $std" $c -std=$std $strict example.c; done
    prints "$c c99, initialiser" $c -std=c99 $strict named.c
done <compilers
cxx_compilers >compilers
while read -r cxx; do
    for std in c++11 c++17 c++20; do
        prints "$cxx $std" $cxx -std=$std $strict $(cxx_strict "$cxx") example.cpp
    done
    prints "$cxx c++20, initialiser" $cxx -std=c++20 $strict -Wno-missing-field-initializers named.cpp
done <compilers

# With nvcc: links an object with kernels as README.md says.  The object has one operator, because the others take
# minutes.  The twin's own stubs must be linked beside it.
if [ -n "${NVCC-}" ]; then
    sed -i -e '/GT_KERNELS_IMPLEMENTATION/d' -e 's/^    return 0;/    return gt_conv1d_forward(0, 0) == GT_ERROR_NULL ? 0 : 2;/' example.c
    printf '#define GT_CORE_IMPLEMENTATION\n#include "gt_conv1d.cuh"\n' >gt_impl.cu
    printf '#define GT_WKV6_IMPLEMENTATION\n#include "gt_kernels.h"\n' >stubs.c
    check 'kernels: stubs' $CC -I. -c stubs.c
    toolkit=$(dirname "$(dirname "$(readlink -f "$NVCC")")")
    PATH=$(dirname "$NVCC"):$PATH
    block sh 2 >kernels.sh
    check 'kernels: compile' sh -eu kernels.sh
    for n in 3 4; do
        block sh $n | sed "s|/usr/local/cuda|$toolkit|g; s|^cc |$CC |; s|gt_impl.o|& stubs.o|" >link.sh
        rm -f example
        check "kernels: link, block $n" env LD_RUN_PATH="$toolkit/lib64" sh -eu link.sh
        ./example >output && cmp expected output || fail "kernels, link, block $n, print: $(cat output)"
    done
fi

sed -n "s/^option('\([a-z_]*\)'.*/\1/p" "$SOURCE/meson_options.txt" | sort >options
grep -o -e '-D[a-z_]*=' "$SOURCE/README.md" | sed 's/-D\(.*\)=/\1/' | sort -u >named
[ -s options ] && cmp options named || fail 'README.md must list exactly the options of meson_options.txt'

# Files in backquotes from the source tree on (OP stands for an operator: wkv6, or what its files are named after), and
# links from the document's own folder on.
for document in README.md $(cd "$SOURCE" && ls docs/*.md); do
    (cd "$SOURCE" && grep -oE '`(bench|docs|examples|gt|reference|tests|tools)/[A-Za-z0-9_./*-]*`' "$document") |
        tr -d '`' | sed 's|reference/gt_OP|reference/gt_wkv6|; s|/OP|/wkv6|' >paths || true
    (cd "$SOURCE" && grep -oE ']\([^):#]+\)' "$document") | sed "s|](\(.*\))|$(dirname "$document")/\1|" >>paths || true
    while read -r path; do
        ls -d "$SOURCE"/$path >/dev/null 2>&1 || fail "$document names $path, which does not exist"
    done <paths
done
finish
