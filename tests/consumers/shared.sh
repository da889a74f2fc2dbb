# -Dshared_library=true makes a library with exactly the functions that gt_kernels.h declares.  pkg-config finds it, and
# a subproject has it as a dependency.  One program links the library, another loads it.
. "$(dirname "$0")/common.sh"

have "$meson" || skip 'no meson on PATH and none in $MESON'
copy_source source
check 'setup' "$meson" setup build source --prefix="$scratch/installed" --libdir=lib -Dshared_library=true \
    -Dcuda=disabled -Dexamples=disabled -Dtests=disabled -Dbench=disabled
check 'compile' "$meson" compile -C build
check 'install' "$meson" install -C build

version=$(sed -n "s/^  version: '\(.*\)',/\1/p" source/meson.build)
library=installed/lib/libgt_kernels.so.$version
[ -f $library ] || fail "no $library"
suffix=$(sed -n 's/^#define GT_SYMBOL(name) gt_##name##_//p' source/gt_kernels.h)
# declared: "GT_FUNCTION gt_status gt_name(", and GT_REF_FUNCTION, GT_XLA_FUNCTION
sed -n 's/^GT_\(REF_\|XLA_\)\{0,1\}FUNCTION .*[ *]\(gt_[a-z0-9_]*\)(.*/\2/p' source/gt_kernels.h |
    sed "s/\$/_$suffix/" | sort >declared
nm -D --defined-only $library | sed -n 's/^[0-9a-f]* [A-Z] //p' | sed 's/@.*//' | sort >exported
[ -s declared ] || fail 'no declarations found in gt_kernels.h'
diff declared exported || fail 'the library does not export exactly the functions that gt_kernels.h declares'

cat >program.c <<'END'
#include "gt_kernels.h"
int main(void) {
    float one[1] = {1}, y[1];
    gt_wkv6_args args = {.B = 1, .T = 1, .H = 1, .N = 1, .u = one,
                         .r = one, .k = one, .v = one, .w = one, .y = y};
    if (gt_version() != GT_VERSION) return 1;
    if (gt_ref_wkv6_forward(&args) != GT_OK || y[0] != 1) return 2;
    return gt_wkv6_forward(&args, 0) == GT_ERROR_NO_CUDA && gt_last_error()[0] ? 0 : 3;
}
END
if have pkg-config; then
    PKG_CONFIG_PATH=$(dirname "$(find "$scratch/installed" -name gt_kernels_shared.pc)")
    export PKG_CONFIG_PATH
    flags=$(pkg-config --cflags --libs gt_kernels_shared) || fail 'pkg-config --cflags --libs'
    check 'pkg-config: compile' $CC -std=c11 $strict program.c $flags -Wl,-rpath,"$scratch/installed/lib" -o program
    check 'pkg-config: run' ./program
else
    skip 'no pkg-config'
fi

cat >load.c <<END
#include <dlfcn.h>
int main(void) {
    void *library = dlopen("$scratch/$library", RTLD_NOW);
    int (*version)(void);
    if (!library) return 1;
    *(void **)&version = dlsym(library, "gt_version_$suffix");
    return version && version() > 0 && !dlsym(library, "gt_prepare_$suffix") ? 0 : 2;
}
END
check 'dlopen: compile' $CC -std=c11 load.c -ldl -o load
check 'dlopen: run' ./load

mkdir -p parent/subprojects
cp -R source parent/subprojects/gt_kernels
cp program.c parent
cat >parent/meson.build <<'END'
project('parent', 'c', default_options: ['c_std=c11', 'warning_level=2', 'werror=true'])
executable('program', 'program.c', dependencies: dependency('gt_kernels_shared', fallback: 'gt_kernels',
  default_options: ['shared_library=true', 'cuda=disabled']))
END
check 'subproject: setup' "$meson" setup parent/build parent --wrap-mode=forcefallback
check 'subproject: compile' "$meson" compile -C parent/build
check 'subproject: run' parent/build/program
finish
