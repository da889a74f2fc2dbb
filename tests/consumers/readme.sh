# The C example of README.md: extracted, built with the command given there, run, and compared with the
# output given there.
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
finish
