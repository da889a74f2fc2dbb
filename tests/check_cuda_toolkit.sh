# check_cuda_toolkit.sh: tests tools/cuda_toolkit.sh with a fake nvcc, which it calls in every way that a build uses.
set -eu
script=$(cd "$(dirname "$0")/.." && pwd)/tools/cuda_toolkit.sh
scratch=$(cd "$(mktemp -d)" && pwd -P)
trap 'rm -rf "$scratch"' EXIT
failures=0

# expect WHAT WANT NVCC...
expect() {
    what=$1
    want=$2
    shift 2
    got=$(PATH=$scratch/launchers:$scratch/toolkit/bin:/usr/bin:/bin sh "$script" "$@")
    if [ "$got" = "$want" ]; then
        echo "ok: $what"
    else
        failures=1
        echo "FAIL: $what: expected '$want', got '$got'"
    fi
}

mkdir -p "$scratch/toolkit/bin" "$scratch/launchers" "$scratch/old" "$scratch/a b/bin"
# nvcc's answer in its own folder; a link to it is resolved first, as nvcc does
cat >"$scratch/toolkit/bin/nvcc" <<'NVCC'
#!/bin/sh
case " $* " in *" -dryrun "*) ;; *) exit 1 ;; esac
bin=$(dirname "$(readlink -f "$0")")
echo "#\$ _HERE_=$bin" >&2
echo "#\$ TOP=$bin/.." >&2
echo "#\$ LIBRARIES=  \"-L$bin/../lib\"" >&2
NVCC
printf '#!/bin/sh\nexec "$@"\n' >"$scratch/launchers/ccache"
printf '#!/bin/sh\necho "nvcc fatal   : Unknown option" >&2\nexit 1\n' >"$scratch/old/nvcc"
chmod +x "$scratch/toolkit/bin/nvcc" "$scratch/launchers/ccache" "$scratch/old/nvcc"
cp "$scratch/toolkit/bin/nvcc" "$scratch/a b/bin/nvcc"
ln -s ../toolkit/bin/nvcc "$scratch/launchers/linked-nvcc"
expect 'nvcc on PATH' "$scratch/toolkit" nvcc
expect 'nvcc by its whole name' "$scratch/toolkit" "$scratch/toolkit/bin/nvcc"
expect 'through ccache' "$scratch/toolkit" ccache nvcc
expect 'through ccache by its whole name' "$scratch/toolkit" "$scratch/launchers/ccache" "$scratch/toolkit/bin/nvcc"
expect 'through a link' "$scratch/toolkit" linked-nvcc
expect 'with options of its own' "$scratch/toolkit" ccache nvcc -ccbin=gcc
expect 'in a folder with a space' "$scratch/a b" "$scratch/a b/bin/nvcc"
expect 'an nvcc that does not say' '' "$scratch/old/nvcc"
exit $failures
