# Several copies of the code in one program: per-operator files, GT_API = static, two libraries that each embed a copy,
# and headers of different versions.
. "$(dirname "$0")/common.sh"

flags="-std=c11 $strict -I$SOURCE"
use=$here/use.c
parts=CORE
for part in "$SOURCE"/gt_*.cuh; do # gt_fused.cuh: FUSED
    part=$(basename "$part" .cuh)
    parts="$parts $(echo "${part#gt_}" | tr a-z A-Z)"
done

# ---- one object per part, linked together ----
objects=
for part in $parts; do
    printf '#define GT_%s_IMPLEMENTATION\n#include "gt_kernels.h"\n' $part >$part.c
    check "compile $part" $CC $flags -c $part.c -o $part.o
    objects="$objects $part.o"
done
check 'parts: compile a program' $CC $flags -c "$use" -o use.o
check 'parts: link' $CC use.o $objects -o parts
check 'parts: run' ./parts

# ---- the whole in one file, private to it ----
check 'GT_API = static: compile' $CC $flags -DGT_API=static -DWITH_IMPLEMENTATION "$use" -o private
check 'GT_API = static: run' ./private
if nm -g --defined-only private | grep ' gt_'; then fail 'GT_API = static leaves global symbols'; fi

# ---- two libraries, with copies of different versions, in one process ----
major=$(sed -n 's/^#define GT_VERSION_MAJOR //p' "$SOURCE/gt_kernels.h")
minor=$(sed -n 's/^#define GT_VERSION_MINOR //p' "$SOURCE/gt_kernels.h")
patch=$(sed -n 's/^#define GT_VERSION_PATCH //p' "$SOURCE/gt_kernels.h")
suffix=v${major}_${minor}_${patch}
other=v${major}_${minor}_77
mkdir newer
cp -R "$SOURCE"/*.h "$SOURCE"/*.cuh "$SOURCE"/gt newer
sed -e "s/^#define GT_VERSION_PATCH .*/#define GT_VERSION_PATCH 77/" -e "s/_$suffix/_$other/" \
    "$SOURCE/gt_kernels.h" >newer/gt_kernels.h

cat >library.c <<'END'
#define GT_KERNELS_IMPLEMENTATION
#include "gt_kernels.h"
#define JOIN(a, b) a##b
#define NAME(prefix, name) JOIN(prefix, name)
int NAME(PREFIX, version)(void) { return gt_version(); }
int NAME(PREFIX, fails)(void) { return gt_wkv6_forward(0, 0); }
const char *NAME(PREFIX, error)(void) { return gt_last_error(); }
END
cat >program.c <<'END'
#include <string.h>
int a_version(void), b_version(void), c_version(void), a_fails(void), b_fails(void);
const char *a_error(void), *b_error(void), *c_error(void);
int main(void) {
    if (a_version() != b_version() || a_version() == c_version()) return 1;
    if (!a_fails() || !strlen(a_error())) return 2;
    return strlen(b_error()) || strlen(c_error()) ? 3 : 0; /* b and c have not failed yet */
}
END
for lib in a_ b_ c_; do
    case $lib in
    c_) include=newer ;;
    *) include=$SOURCE ;;
    esac
    check "library $lib" $CC -std=c11 $strict -I$include -DPREFIX=$lib \
        -fPIC -shared library.c -o lib$lib.so
    if nm -D --defined-only lib$lib.so | grep ' gt_'; then fail "lib$lib.so exports gt_ symbols"; fi
done
check 'two libraries: link' $CC program.c -L. -l:liba_.so -l:libb_.so -l:libc_.so \
    -Wl,-rpath,"$scratch" -o program
check 'two libraries: run' ./program

# ---- a program and an implementation of different versions do not link, and say why ----
check 'newer program: compile' $CC -std=c11 $strict -Inewer -c "$use" -o newer.o
if $CC newer.o $objects -o mixed 2>log; then
    fail 'a program linked with a library of another version'
elif ! grep -q "gt_wkv6_forward_$other" log; then
    fail 'the linker does not name the version:'
    cat log
fi

# ---- the version is stated once ----
printf '#include "gt_kernels.h"\nGT_SYMBOL(x) VERSION GT_VERSION\n' >version.c
want="gt_x_$suffix VERSION ($major * 10000 + $minor * 100 + $patch)"
got=$($CC -E -P -I"$SOURCE" version.c | tail -n 1)
[ "$got" = "$want" ] || fail "GT_SYMBOL and GT_VERSION disagree: $got, expected $want"
grep -q "^  version: '$major.$minor.$patch'," "$SOURCE/meson.build" ||
    fail "meson.build does not say version $major.$minor.$patch"
head -n 1 "$SOURCE/gt_kernels.h" | grep -q "gt_kernels $major.$minor.$patch " ||
    fail "the first line of gt_kernels.h does not say version $major.$minor.$patch"
finish
