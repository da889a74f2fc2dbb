# gt_kernels in other people's builds: as a Meson subproject, and as an installed copy that pkg-config finds.  The
# environment variable OPTIMIZATION is the optimization of the installed copy.
. "$(dirname "$0")/common.sh"

have "$meson" || skip 'no meson on PATH and none in $MESON'
copy_source source

cat >program.c <<'END'
#include "gt_kernels.h"
#include <stdio.h>
int main(void) {
    float one[1] = {1}, y[1];
    gt_wkv6_args args = {.B = 1, .T = 1, .H = 1, .N = 1, .u = one,
                         .r = one, .k = one, .v = one, .w = one, .y = y};
    if (gt_ref_wkv6_forward(&args) != GT_OK || gt_version() != GT_VERSION) return 1;
    return y[0] == 1 ? 0 : 2;
}
END

# ---- installed ----
check 'install: setup' "$meson" setup source/build source --prefix="$scratch/installed" \
    "-Doptimization=$OPTIMIZATION" -Dcuda=disabled -Dexamples=disabled -Dtests=disabled -Dbench=disabled
check 'install: compile' "$meson" compile -C source/build
check 'install' "$meson" install -C source/build
if have pkg-config; then
    PKG_CONFIG_PATH=$scratch/installed/share/pkgconfig
    export PKG_CONFIG_PATH
    printf '#define GT_KERNELS_IMPLEMENTATION\n#include "gt_kernels.h"\n' >impl.c
    cflags=$(pkg-config --cflags gt_kernels_headers) || fail 'pkg-config --cflags'
    reference=$(pkg-config --variable=referencedir gt_kernels_headers) || fail 'pkg-config --variable'
    version=$(pkg-config --modversion gt_kernels_headers) || fail 'pkg-config --modversion'
    check 'pkg-config: compile' $CC -std=c11 $strict $cflags program.c impl.c "$reference"/*.c -lm \
        -o installed_program
    check 'pkg-config: run' ./installed_program
    grep -q "version: '$version'" source/meson.build || fail "pkg-config says version $version"
else
    echo 'no pkg-config on this machine: its consumer is left out'
fi

# ---- Meson subproject, beside the installed copy, which has no library: the subproject is taken ----
mkdir -p parent/subprojects
cp -R source parent/subprojects/gt_kernels
cp program.c parent
cat >parent/meson.build <<'END'
project('parent', 'c', default_options: ['c_std=c11', 'warning_level=2', 'werror=true'])
executable('program', 'program.c', dependencies: [
  dependency('gt_kernels', fallback: 'gt_kernels'),
  dependency('gt_reference', fallback: 'gt_kernels'),
])
END
# without nvcc, since compiling the kernels once more would only take time
check 'subproject: setup' env PKG_CONFIG_PATH="$scratch/installed/share/pkgconfig" "$meson" setup parent/build parent \
    "--cmake-prefix-path=$scratch/installed" -Dgt_kernels:cuda=disabled
check 'subproject: compile' "$meson" compile -C parent/build
check 'subproject: run' parent/build/program
for unwanted in tests examples bench; do
    if ls parent/build/subprojects/gt_kernels/$unwanted/* 2>/dev/null | grep -q '\.p$'; then
        fail "the subproject builds $unwanted"
    fi
done

# A header's new version must reach every object that includes the header.
sed -i -e 's/^#define GT_VERSION_PATCH .*/#define GT_VERSION_PATCH 77/' \
    parent/subprojects/gt_kernels/gt_kernels.h
check 'edited header: compile' "$meson" compile -C parent/build
check 'edited header: run' parent/build/program

# The subproject must install nothing unless asked to.
check 'subproject: install nothing' "$meson" install -C parent/build --destdir "$scratch/nothing"
[ -z "$(find nothing -type f 2>/dev/null)" ] || fail "the subproject installs $(find nothing -type f | wc -l) files"
check 'subproject: ask' "$meson" configure parent/build -Dgt_kernels:install=enabled
check 'subproject: install' "$meson" install -C parent/build --destdir "$scratch/asked"
find asked -name gt_kernels.h | grep -q . ||
    fail 'the subproject does not install its files, although -Dinstall=enabled asks for it'
finish
