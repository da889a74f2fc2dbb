# CMake projects that use gt_kernels: by add_subdirectory, by FetchContent, and installed, by CMake and by Meson.
. "$(dirname "$0")/common.sh"

have cmake || skip 'no cmake on PATH'
have "$meson" || skip 'no meson on PATH and none in $MESON'
copy_source source
version=$(sed -n "s/^  version: '\(.*\)',/\1/p" source/meson.build)

# A program that calls both, and a library with a copy of its own.
mkdir consumer
cat >consumer/program.c <<'END'
#include "gt_kernels.h"
int library_version(void);
int main(void) {
    float one[1] = {1}, y[1];
    gt_wkv6_args args = {.B = 1, .T = 1, .H = 1, .N = 1, .u = one,
                         .r = one, .k = one, .v = one, .w = one, .y = y};
    if (gt_version() != GT_VERSION || library_version() != GT_VERSION) return 1;
    if (gt_ref_wkv6_forward(&args) != GT_OK || y[0] != 1) return 2;
    return gt_wkv6_forward(&args, 0) == GT_ERROR_NO_CUDA ? 0 : 3;
}
END
cat >consumer/library.c <<'END'
#include "gt_kernels.h"
int library_version(void) { return gt_version(); }
END
cat >consumer/CMakeLists.txt <<'END'
cmake_minimum_required(VERSION 3.18)
project(consumer LANGUAGES C)
include(${FIND})
add_library(library SHARED library.c)
target_link_libraries(library PRIVATE gt_kernels::implementation)
add_executable(program program.c)
target_link_libraries(program PRIVATE library gt_kernels::implementation gt_kernels::reference)
END

# consumer NAME OPTION...: configures, builds and runs it; NAME.cmake finds the library.
consumer() {
    name=$1
    shift
    check "$name: configure" env CC="$CC" cmake -S consumer -B "$name" "-DFIND=$scratch/$name.cmake" \
        -DCMAKE_C_FLAGS="$strict" "$@"
    check "$name: build" cmake --build "$name" -j 2
    check "$name: run" "$name/program"
}

echo "add_subdirectory($scratch/source gt_kernels)" >subdirectory.cmake
consumer subdirectory

tar -czf source.tar.gz source
cat >fetched.cmake <<END
include(FetchContent)
FetchContent_Declare(gt_kernels URL file://$scratch/source.tar.gz)
FetchContent_MakeAvailable(gt_kernels)
END
consumer fetched

check 'CMake: configure' cmake -S source -B with_cmake "-DCMAKE_INSTALL_PREFIX=$scratch/by_cmake"
check 'CMake: install' cmake --install with_cmake
echo "find_package(gt_kernels $version EXACT REQUIRED)" >installed_by_cmake.cmake
consumer installed_by_cmake "-DCMAKE_PREFIX_PATH=$scratch/by_cmake"

# Headers and CPU twins without the compiled parts of the build, which an installation does not hold.
check 'Meson: setup' "$meson" setup with_meson source --prefix="$scratch/by_meson" -Dcuda=disabled \
    -Dexamples=disabled -Dtests=disabled -Dbench=disabled
check 'Meson: compile' "$meson" compile -C with_meson
check 'Meson: install' "$meson" install -C with_meson
echo "find_package(gt_kernels ${version%.*} REQUIRED)" >installed_by_meson.cmake
consumer installed_by_meson "-DCMAKE_PREFIX_PATH=$scratch/by_meson"

# Both install the same files; and an installation may be moved.
for prefix in by_cmake by_meson; do
    (cd $prefix && find include share/gt_kernels share/cmake -type f -exec cksum {} + | sort -k 3) >$prefix.files
done
cmp by_cmake.files by_meson.files || fail "CMake and Meson install different files: $(diff by_cmake.files by_meson.files)"
mv by_cmake moved
cp installed_by_cmake.cmake moved_away.cmake
consumer moved_away "-DCMAKE_PREFIX_PATH=$scratch/moved"

# A version that is not compatible is not taken.
echo 'find_package(gt_kernels 99.0 REQUIRED)' >other_version.cmake
if cmake -S consumer -B other_version "-DFIND=$scratch/other_version.cmake" \
    "-DCMAKE_PREFIX_PATH=$scratch/moved" >log 2>&1; then
    fail 'find_package(gt_kernels 99.0) finds another version'
elif ! grep -q "version: $version" log; then
    fail "find_package(gt_kernels 99.0) does not name the version that is there: $(cat log)"
fi

# With the language CUDA the same targets are the kernels.  The core is compiled, the others would take minutes.
if [ -n "${NVCC-}" ] && have ninja; then
    sed -i -e 's/LANGUAGES C/LANGUAGES C CUDA/' consumer/CMakeLists.txt
    cp subdirectory.cmake cuda.cmake
    check 'CUDA: configure' env CC="$CC" CUDACXX="$NVCC" cmake -G Ninja -S consumer -B cuda "-DFIND=$scratch/cuda.cmake" \
        -DCMAKE_CUDA_ARCHITECTURES=90a
    objects=$(ninja -C cuda -t targets all | sed -n 's/^\(.*program.dir.*\.cu\.o\):.*/\1/p')
    [ "$(printf '%s\n' "$objects" | wc -l)" -eq 5 ] || fail "CUDA: not five parts: $objects"
    check 'CUDA: compile the core' ninja -C cuda "$(printf '%s\n' "$objects" | grep gt_core)"
fi
finish
