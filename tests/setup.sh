# Sourced by tests/run.sh, tests/packages.sh and examples/train.sh with $root set: makes sure that a compiler, ninja and
# Meson 1.0 exist.  On Debian and Ubuntu it installs missing packages, as root or through sudo.  If it cannot, or the
# packaged Meson is too old, pip installs Meson and ninja in $root/build-venv.  $without_kernels: an option of "meson
# setup" if there is nvcc but no GPU; else empty.

have() { command -v "$1" >/dev/null 2>&1; }

meson_fits() {
    have meson && case $(meson --version) in 0.*) return 1 ;; esac
}

# apt_install PACKAGE...: on Debian and Ubuntu; its output is shown if it fails.
apt_install() {
    echo "installing: $*"
    as_root=
    [ "$(id -u)" -eq 0 ] || as_root=sudo
    # dpkg needs the sbin folders, which a user's PATH may lack
    $as_root env PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin" DEBIAN_FRONTEND=noninteractive \
        sh -ec 'apt-get -q update; apt-get -q -y --no-install-recommends install "$@"' \
        sh "$@" >"$root/build-setup.log" 2>&1 || {
        cat "$root/build-setup.log"
        return 1
    }
}

PATH=$root/build-venv/bin:$PATH # a missing folder changes nothing

missing=
have cc || missing="$missing gcc"
have c++ || missing="$missing g++"
have ninja || missing="$missing ninja-build"
have pkg-config || missing="$missing pkg-config"
meson_fits || missing="$missing meson python3-venv"

if [ -n "$missing" ] && have apt-get; then
    # shellcheck disable=SC2086 # a list
    apt_install $missing || true # a missing compiler is named below
fi
if ! have cc || ! have c++; then
    echo 'a C and a C++ compiler are needed: install gcc and g++' >&2
    exit 1
fi
if ! meson_fits || ! have ninja; then
    python3 -m venv "$root/build-venv"
    "$root/build-venv/bin/pip" -q install 'meson>=1.0' ninja
fi

# nvcc takes minutes to compile kernels that no program would launch.
without_kernels=
if have nvcc && ! nvidia-smi -L >/dev/null 2>&1; then without_kernels=-Dcuda=disabled; fi
