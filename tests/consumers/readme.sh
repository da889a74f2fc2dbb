# The example of README.md: extracted, built with the command given there, run, and compared with the output given
# there; then as C++20, and with the fields assigned, as README.md has it for C++11.  The options and files that
# README.md and docs name.
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

block cpp 1 >fields
[ -s fields ] || fail 'README.md lacks the example for C++'
sed -e '/gt_wkv6_args a = {/r fields' -e '/gt_wkv6_args a = {/,/};/d' example.c >fields.cpp
cp example.c named.cpp
check 'CPU twin' $CC -I. -c reference/gt_wkv6.c -o twin.o
cxx_compilers >compilers
while read -r cxx; do
    for program in fields:c++11 fields:c++20 named:c++20; do
        source=${program%:*}.cpp
        check "$cxx, $program" $cxx -std=${program#*:} $strict -Wno-missing-field-initializers -I. $source \
            twin.o -lm -o example
        ./example >output && cmp expected output || fail "$cxx, $program prints: $(cat output)"
    done
done <compilers

sed -n "s/^option('\([a-z_]*\)'.*/\1/p" "$SOURCE/meson_options.txt" | sort >options
grep -o -e '-D[a-z_]*=' "$SOURCE/README.md" | sed 's/-D\(.*\)=/\1/' | sort -u >named
[ -s options ] && cmp options named || fail 'README.md does not name just the options of meson_options.txt'

# Files in backquotes from the source tree on (OP stands for an operator: wkv6, or what its files are named after), and
# links from the document's own folder on.
for document in README.md $(cd "$SOURCE" && ls docs/*.md); do
    (cd "$SOURCE" && grep -oE '`(bench|docs|examples|gt|reference|tests|tools)/[A-Za-z0-9_./*-]*`' "$document") |
        tr -d '`' | sed 's|reference/gt_OP|reference/gt_wkv6|; s|/OP|/wkv6|' >paths || true
    (cd "$SOURCE" && grep -oE ']\([^):#]+\)' "$document") | sed "s|](\(.*\))|$(dirname "$document")/\1|" >>paths || true
    while read -r path; do
        ls -d "$SOURCE"/$path >/dev/null 2>&1 || fail "$document names $path, which is not there"
    done <paths
done
finish
