#!/bin/sh
# check_format.sh: every C, C++ and CUDA file must be formatted as clang-format 14 (Debian 12) formats it with
# .clang-format. No line, comments included, may be over 120 columns.  Other versions of clang-format differ in details,
# so the test is skipped without version 14.  SOURCE comes from the environment.
set -eu
cd "$SOURCE"
sources() {
    find . \( -name 'build*' -o -name '.*' ! -name . \) -prune -o \
        \( -name '*.c' -o -name '*.h' -o -name '*.cuh' -o -name '*.cu' -o -name '*.cpp' \) -print | sort
}
# counts characters, not bytes: in C.UTF-8 a Greek letter is one character
if sources | LC_ALL=C.UTF-8 xargs grep -nE '^.{121}'; then
    echo 'FAIL: these lines are over 120 columns'
    exit 1
fi
for tool in clang-format-14 clang-format; do
    if command -v "$tool" >/dev/null && "$tool" --version | grep -q 'version 14\.'; then
        sources | xargs "$tool" --dry-run --Werror
        exit
    fi
done
echo 'clang-format 14 is not installed'
exit 77
