# check_symbols.sh LIBRARY...: every strong global symbol of this build's objects must be a gt_ name with the version.
# A shared library made from these objects must export none, unless EXPORTED says that they are compiled for export.
set -eu
suffix=$(sed -n 's/^#define GT_SYMBOL(name) gt_##name##_//p' "$SOURCE/gt_kernels.h")
[ -n "$suffix" ]
failures=0
for library in "$@"; do
    strong=$("$NM" -g --defined-only "$library" | sed -n 's/^[0-9a-f]* [A-TX-Z] //p')
    strangers=$(printf '%s\n' "$strong" | grep -v "^gt_[a-z0-9_]*_$suffix\$" || true)
    if [ -z "$strong" ] || [ -n "$strangers" ]; then
        failures=1
        echo "FAIL: $library: ${strangers:-no symbols}"
    else
        echo "ok: $library: $(printf '%s\n' "$strong" | wc -l) symbols"
    fi
done

[ "${EXPORTED-}" != true ] || exit $failures
shared=$(mktemp)
trap 'rm -f "$shared"' EXIT
$CC -shared -nostdlib -Wl,--whole-archive "$@" -Wl,--no-whole-archive -o "$shared"
if "$NM" -D --defined-only "$shared" | grep ' gt_'; then
    failures=1
    echo 'FAIL: a shared library exports these'
fi
exit $failures
