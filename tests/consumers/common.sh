# The scripts here source this file.  It makes a scratch directory, finds compilers, and counts checks.
set -eu
meson=${MESON:-$1}
here=$(cd "$(dirname "$0")" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
trap 'exit 1' HUP INT TERM
cd "$scratch"
strict='-Wall -Wextra -Wpedantic -Werror'
failures=0

have() { command -v "$1" >/dev/null 2>&1; }

fail() {
    failures=$((failures + 1))
    echo "FAIL: $*"
}

# check WHAT COMMAND...: the command must succeed; if it fails, its output is shown.
check() {
    what=$1
    shift
    if "$@" >log 2>&1; then
        echo "ok: $what"
    else
        fail "$what"
        echo "    $*"
        sed 's/^/    /' log
    fi
}

# skip WHY: this test needs something that is missing.  In CI that is a failure, because CI installs what tests need and
# sets GT_TEST_STRICT.
skip() {
    echo "skipped: $1"
    [ -n "${GT_TEST_STRICT-}" ] && exit 1
    exit 77
}

finish() {
    [ "$failures" -eq 0 ] || exit 1
}

# is_gcc COMPILER COMMAND: whether both are the same program, and that is gcc; "ccache cc" may be, for example.
is_gcc() {
    case $1 in g[c+]*) ;; *) return 1 ;; esac
    first=$(readlink -f "$(command -v "$1")")
    second=$(command -v "${2##* }") && [ "$first" = "$(readlink -f "$second")" ]
}

# The build's own compilers and, where they exist, gcc and clang.
c_compilers() {
    printf '%s\n' "$CC"
    for compiler in gcc clang; do
        if have $compiler && [ "$compiler" != "$CC" ] && ! is_gcc $compiler "$CC"; then echo $compiler; fi
    done
}
cxx_compilers() {
    [ -z "$CXX" ] || printf '%s\n' "$CXX"
    for compiler in g++ clang++; do
        if have $compiler && [ "$compiler" != "$CXX" ] && ! is_gcc $compiler "$CXX"; then echo $compiler; fi
    done
}

# cxx_strict COMPILER: more warnings of C++.
cxx_strict() {
    echo '-Wconversion -Wshadow -Wold-style-cast'
    case $1 in *clang*) ;; *) echo '-Wuseless-cast' ;; esac
}

# Copies the files that a user copies: headers, reference, and everything that the build needs.
copy_source() {
    mkdir -p "$1"
    (cd "$SOURCE" && tar -cf - meson.build meson_options.txt ./*.h ./*.cuh gt reference tests examples \
        bench tools CMakeLists.txt cmake) | (cd "$1" && tar -xf -)
}
