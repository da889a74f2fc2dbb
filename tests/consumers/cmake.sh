# CMake projects that use gt_kernels.  They use add_subdirectory: in C, in only C++, and in C++ with CUDA.  With
# ALL_CASES=true they also use FetchContent, and copies that CMake and Meson installed.
. "$(dirname "$0")/common.sh"

have cmake || skip 'no cmake on PATH'
have "$meson" || skip 'no meson on PATH and none in $MESON'
copy_source source
version=$(sed -n "s/^  version: '\(.*\)',/\1/p" source/meson.build)

# A program that calls both kernels and twins, and a library that embeds its own copy.
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
target_link_libraries(program PRIVATE library gt_kernels::reference)
END

# consumer NAME OPTION...: configures, builds and runs the program; NAME.cmake finds the library.
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

# Configuring again must change no source, because kernels would compile again, for minutes.
written=subdirectory/gt_kernels/gt_kernels-implementation
[ -s $written/gt_core.c ] || fail 'there is no gt_core.c'
touch before
check 'configure again' cmake subdirectory
[ -z "$(find $written -type f -newer before)" ] || fail "configured again, CMake writes $(find $written -type f -newer before)"

# Without the language C the stubs are C++.  The twins need C, so they stop the configuration and give the reason.
mkdir no_c
cat >no_c/program.cpp <<'END'
#include "gt_kernels.h"
int main() { return gt_version() == GT_VERSION && gt_norm_mix_forward(0, 0) == GT_ERROR_NO_CUDA ? 0 : 1; }
END
mkdir in_c
echo 'project(in_c LANGUAGES C)' >in_c/CMakeLists.txt # C of another folder does not count
cat >no_c/CMakeLists.txt <<END
cmake_minimum_required(VERSION 3.18)
project(no_c LANGUAGES \${LANGUAGES})
add_subdirectory($scratch/in_c in_c)
add_subdirectory($scratch/source gt_kernels)
add_executable(program program.cpp)
target_link_libraries(program PRIVATE gt_kernels::\${TARGET})
END

# no_c NAME LANGUAGES OPTION...
no_c() {
    name=$1
    languages=$2
    shift 2
    check "$languages: configure" env CXX="${CXX:-c++}" CC="$CC" cmake -S no_c -B "$name" "-DLANGUAGES=$languages" \
        -DTARGET=implementation "$@"
    if cmake -S no_c -B "$name" -DTARGET=reference >log 2>&1; then
        fail "$languages: CMake leaves out the twins, but does not say so"
    elif ! tr -s ' \n' ' ' <log | grep -q 'gt_kernels::reference needs the language C: enable it'; then
        fail "$languages: CMake does not say that the twins need the language C: $(cat log)"
    fi
    check "$languages: configure again" cmake -S no_c -B "$name" -DTARGET=implementation
}
no_c cxx CXX
check 'CXX: build' cmake --build cxx -j 2
check 'CXX: run' cxx/program

# With the language CUDA the same target is the kernels.  The test compiles only the core, since the others take
# minutes.
if [ -n "${NVCC-}" ] && have ninja; then
    no_c cuda 'CXX;CUDA' -G Ninja "-DCMAKE_CUDA_COMPILER=$NVCC" -DCMAKE_CUDA_ARCHITECTURES=90a
    objects=$(ninja -C cuda -t targets all | sed -n 's/^\(.*program.dir.*\.cu\.o\):.*/\1/p')
    parts=$(find source/gt_*.cuh | sed 's/.*gt_\(.*\)\.cuh/\1/' && echo core)
    made=$(printf '%s\n' "$objects" | sed 's/.*gt_\(.*\)\.cu\.o/\1/')
    [ "$(echo "$made" | sort)" = "$(echo "$parts" | sort)" ] || fail "CUDA: CMake makes the parts $made instead of $parts"
    check 'CUDA: compile the core' ninja -C cuda "$(printf '%s\n' "$objects" | grep gt_core)"
fi

if [ "${ALL_CASES-}" != true ]; then
    finish
    exit
fi

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

# Turns off everything that is compiled: an installation has only headers and the sources of the CPU twins.
check 'Meson: setup' "$meson" setup with_meson source --prefix="$scratch/by_meson" -Dcuda=disabled \
    -Dexamples=disabled -Dtests=disabled -Dbench=disabled
check 'Meson: compile' "$meson" compile -C with_meson
check 'Meson: install' "$meson" install -C with_meson
echo "find_package(gt_kernels ${version%.*} REQUIRED)" >installed_by_meson.cmake
consumer installed_by_meson "-DCMAKE_PREFIX_PATH=$scratch/by_meson"

# CMake and Meson must install the same files, and an installation may be moved.
for prefix in by_cmake by_meson; do
    (cd $prefix && find include share/gt_kernels share/cmake -type f -exec cksum {} + | sort -k 3) >$prefix.files
done
cmp by_cmake.files by_meson.files || fail "CMake and Meson install different files: $(diff by_cmake.files by_meson.files)"
mv by_cmake moved
cp installed_by_cmake.cmake moved_away.cmake
consumer moved_away "-DCMAKE_PREFIX_PATH=$scratch/moved"

# find_package must refuse a version that is not compatible.
echo 'find_package(gt_kernels 99.0 REQUIRED)' >other_version.cmake
if cmake -S consumer -B other_version "-DFIND=$scratch/other_version.cmake" \
    "-DCMAKE_PREFIX_PATH=$scratch/moved" >log 2>&1; then
    fail 'find_package(gt_kernels 99.0) finds another version'
elif ! grep -q "version: $version" log; then
    fail "find_package(gt_kernels 99.0) does not name the installed version: $(cat log)"
fi

finish
