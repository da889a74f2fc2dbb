# The program of docs/serving.md.  The script extracts it, builds it with the page's command, runs it, and compares the
# output with the page's.  It also compiles the program with every warning.
. "$(dirname "$0")/common.sh"

# block LANGUAGE: the first fenced block of that language.
block() {
    awk -v fence="\`\`\`$1" '
        inside && /^```$/ { exit }
        inside { print }
        $0 == fence { inside = 1 }' "$SOURCE/docs/serving.md"
}

copy_source gt_kernels
cd gt_kernels
block c >serve.c
block sh >build.sh
block text >expected
[ -s serve.c ] && [ -s build.sh ] && [ -s expected ] || fail 'docs/serving.md lacks the program'
sed -i "s|^cc |$CC |; /^.\/serve/d" build.sh
check 'the program builds' sh -eu build.sh
./serve >output || fail 'the program does not run'
cmp expected output || fail "the program prints: $(cat output)"
check 'the program has no warnings' $CC -std=c99 $strict -Wconversion -I. -c serve.c
finish
