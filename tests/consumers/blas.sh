# -Dblas: a library that is called openblas but is another BLAS does not count, OpenBLAS does.
. "$(dirname "$0")/common.sh"

have "$meson" || skip 'no meson on PATH and none in $MESON'
have pkg-config || skip 'no pkg-config'

# openblas HEADER: makes an openblas for pkg-config, with this cblas.h and libm, which has nothing of BLAS.
export PKG_CONFIG_LIBDIR="$scratch"
openblas() {
    printf '%s\n' "$1" >cblas.h
    printf 'Name: openblas\nDescription: made up\nVersion: 1\nCflags: -I%s\nLibs: -lm\n' "$scratch" >openblas.pc
}

# expect STATUS PATTERN SETUP-OPTIONS...
expect() {
    status=$1
    pattern=$2
    shift 2
    rm -rf build
    got=0
    "$meson" setup build "$SOURCE" -Dcuda=disabled -Dtests=disabled -Dbench=disabled "$@" >log 2>&1 || got=1
    if [ "$got" -eq "$status" ] && grep "$pattern" log; then
        echo "ok: $*"
    else
        fail "$*: status $got, expected $status and $pattern"
        sed 's/^/    /' log
    fi
}

openblas 'char *openblas_get_config(void); void openblas_set_num_threads(int n);'
expect 0 'OpenBLAS for hybrid_train *: NO' -Dblas=auto
expect 1 'ERROR: .*blas: .* is not OpenBLAS' -Dblas=enabled
openblas 'static char *openblas_get_config(void) { return "OpenBLAS"; }
static void openblas_set_num_threads(int n) { (void)n; }'
expect 0 'OpenBLAS for hybrid_train *: YES' -Dblas=auto
expect 0 'OpenBLAS for hybrid_train *: NO' -Dblas=disabled
finish
