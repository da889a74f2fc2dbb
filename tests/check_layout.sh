# check_layout.sh: the structure of the library's files.
# - Includes run one way: declarations (gt_kernels.h) <- gt/base and gt/emu <- gt/recurrence <- the operators <- the
#   top-level .cuh files.  No operator includes another, except the files of gt/fused.
# - An operator's includes are at most six levels deep.
# - Every header compiles by itself, and no file is too long.
# - gt/ has the files, kernels and functions that docs/wkv6.md and docs/ssd.md name.
# - Files of the trainer and of the bench call each other one way.
# - Each test of Meson states its limit.
# SOURCE, CC, CXX (may be empty) and ALONE come from the environment.  ALONE is "all", or "top": C++ for the top-level
# headers only, in a twentieth of the time.
set -eu
cd "$SOURCE"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
failures=0

fail() {
    failures=$((failures + 1))
    echo "FAIL: $*"
}

files=$(ls gt_*.h gt_*.cuh && find gt -type f | sort)

# ---- includes ----

# The layer of a file, and its folder.
layer() {
    case $1 in
    gt_kernels.h) echo 0 declarations ;;
    gt/base/* | gt/emu/*) echo 1 "$(dirname "$1")" ;;
    gt/recurrence/*) echo 2 gt/recurrence ;;
    gt/impl/*) echo 5 gt/impl ;;
    gt/*/*) echo 3 "$(echo "$1" | cut -d / -f 1,2)" ;;
    gt_*.cuh) echo 4 top ;;
    *) echo 9 "$1" ;;
    esac
}

# The switch at the end of gt_kernels.h includes the files that implement it, and gt_*.cuh end with this switch.
is_switch() {
    case "$1 $2" in
    'gt_kernels.h gt/base/op_impl.h' | 'gt_kernels.h gt/recurrence/int8_states.cuh' | 'gt_kernels.h gt/xla/handlers.h' | 'gt_kernels.h gt/fused/'*_calls.cuh) return 0 ;;
    'gt_kernels.h gt_'*.cuh | gt_*.cuh' gt_kernels.h') return 0 ;;
    esac
    return 1
}

: >"$scratch/edges"
for file in $files; do
    for name in $(sed -n 's/^ *# *include *"\([^"]*\)".*/\1/p' "$file"); do
        if ! path=$(realpath -q --relative-to=. "$(dirname "$file")/$name") || [ ! -f "$path" ]; then
            fail "$file includes \"$name\", which is not beside it"
            continue
        fi
        is_switch "$file" "$path" && continue
        echo "$path $file" >>"$scratch/edges"
        read -r from from_folder <<EOF
$(layer "$file")
EOF
        read -r to to_folder <<EOF
$(layer "$path")
EOF
        [ "$to" -le "$from" ] || fail "$file includes $path: a file may include only files of its own level or below"
        if [ "$from$to" = 33 ] && [ "$from_folder" != "$to_folder" ] && [ "$from_folder" != gt/fused ]; then
            fail "$file includes $path: an operator may not include another operator"
        fi
    done
done
[ -s "$scratch/edges" ] || fail 'no includes were found'
tsort "$scratch/edges" >/dev/null 2>"$scratch/loop" || fail "files include each other: $(cat "$scratch/loop")"
# An operator's files include each other in at most six levels, so that a reader can follow a chain.  These three files
# are deeper, and may not get any deeper.
cat >"$scratch/depth" <<'END_OF_SCRIPT'
function operator(file, parts) {
    if (split(file, parts, "/") < 3 || parts[2] ~ /^(base|emu|impl|recurrence)$/) return ""
    return parts[2]
}
BEGIN { most["wkv6"] = 10; most["fused"] = 10; most["conv1d"] = 7 }
operator($1) != "" && operator($1) == operator($2) { to[++edges] = $1; from[edges] = $2 }
END {
    do {
        changed = 0
        for (i = 1; i <= edges; i++) {
            level = level_of[to[i]] + 1
            if (level <= level_of[from[i]]) continue
            level_of[from[i]] = level
            below[from[i]] = to[i]
            changed = 1
        }
    } while (changed)
    for (file in level_of) {
        name = operator(file)
        if (level_of[file] + 1 <= (name in most ? most[name] : 6)) continue
        chain = file
        for (next_file = below[file]; next_file != ""; next_file = below[next_file]) chain = chain " " next_file
        print level_of[file] + 1 " levels of includes: " chain
    }
}
END_OF_SCRIPT
: >"$scratch/deep" # a circle has no depth
[ -s "$scratch/loop" ] || awk -f "$scratch/depth" "$scratch/edges" >"$scratch/deep"
if [ -s "$scratch/deep" ]; then fail "$(sort -rn "$scratch/deep" | head -n 3)"; fi
echo "includes: $(wc -l <"$scratch/edges") in $(echo "$files" | wc -l) files"

# ---- length ----

for file in $files; do
    most=1100
    case $file in gt/emu/*) most=1500 ;; gt_kernels.h) most=1300 ;; esac
    lines=$(wc -l <"$file")
    [ "$lines" -le $most ] || fail "$file has $lines lines, more than $most"
done

# ---- programs: files call each other one way ----

# Public functions of a program's files: lines without indentation that begin a definition.
for folder in examples bench; do
    (cd $folder && grep -HoE '^[a-z][a-z0-9_ *]*\b(hy|bench)_[a-z0-9_]+\([^;]*$' ./*.c | grep -vE ':(static|typedef)' |
        sed -E 's/^\.\/([^:]*):.*\b((hy|bench)_[a-z0-9_]+)\(.*/\2 \1/') | sort -u >"$scratch/defined"
    [ "$(wc -l <"$scratch/defined")" -ge 10 ] || fail "$folder: no functions were found"
    while read -r name file; do
        (cd $folder && grep -lw "$name" ./*.c) | sed "s|^\./||; s|^|$file |"
    done <"$scratch/defined" | awk '$1 != $2' | sort -u >"$scratch/calls"
    tsort "$scratch/calls" >/dev/null 2>"$scratch/loop" || fail "files of $folder call each other: $(cat "$scratch/loop")"
    echo "$folder: $(wc -l <"$scratch/calls") pairs of files"
done

# ---- every test states its limit: Meson's default, 30 seconds, is too little on a busy machine ----

cat >"$scratch/limits" <<'END_OF_SCRIPT'
/^ *test\(/ { call = ""; depth = 0; within = 1 }
within {
    call = call $0
    depth += gsub(/\(/, "(") - gsub(/\)/, ")")
    if (depth > 0) next
    within = 0
    calls++
    if (call !~ /timeout: [0-9]/) print FILENAME ":" FNR ": a test without a timeout: " call
}
END { if (calls < 40) print "tests of Meson were not found: " calls + 0 }
END_OF_SCRIPT
find tests bench python reference examples tools -name meson.build -exec awk -f "$scratch/limits" meson.build {} + \
    >"$scratch/without_limit"
if [ -s "$scratch/without_limit" ]; then fail "$(cat "$scratch/without_limit")"; fi
grep -q 'timeout_multiplier: 8, is_default: not meson.is_subproject()' tests/meson.build ||
    fail 'tests/meson.build: the default setup does not multiply limits'

# ---- docs/wkv6.md and docs/ssd.md name kernels and functions ----

for page in docs/wkv6.md docs/ssd.md; do
    names=$(sed -n '/^## [0-9]*\. In the code/,$s/|/\n/gp' $page | grep -o '`[A-Za-z0-9_./]*`' | tr -d '`' | sort -u)
    [ "$(echo "$names" | wc -l)" -ge 40 ] || fail "$page: its table of functions was not found"
    for name in $names; do
        case $name in
        *.cuh) [ -n "$(find gt -path "gt/*/$name")" ] || fail "$page names $name, which is not in gt" ;;
        *) grep -rqw "$name" gt || fail "$page names $name, which is not in gt" ;;
        esac
    done
done

# ---- alone ----

# alone FILE COMPILER...: prints failures to standard output
cat >"$scratch/alone" <<'END_OF_SCRIPT'
file=$1
shift
if ! printf '#include "%s"\n' "$file" | "$@" -I. -fsyntax-only - >"$0.$$" 2>&1; then
    echo "$file does not compile by itself: $*"
    head -n 5 "$0.$$"
fi
END_OF_SCRIPT
strict='-Wall -Wextra -Wpedantic -Werror -Wno-unused-function'
headers=$(echo "$files" | grep -v '^gt/impl/')
alone=$headers
[ "$ALONE" = all ] || alone=$(echo "$headers" | grep '^gt_')
{
    # in C: everything but device code
    for file in $(echo "$headers" | grep -E '\.h$|^gt_' | grep -v '^gt/emu/'); do
        echo "$file $CC -std=c11 $strict -x c"
    done
    if [ -n "$CXX" ]; then
        for file in $alone; do echo "$file $CXX -std=c++17 -DGT_EMU $strict -x c++"; done
    else
        echo 'no C++ compiler: headers are compiled as C only' >&2
    fi
} | xargs -P 2 -L 1 sh "$scratch/alone" >"$scratch/failed"
if [ -s "$scratch/failed" ]; then fail "$(cat "$scratch/failed")"; fi
echo "headers: $(echo "$alone" | wc -l) of $(echo "$headers" | wc -l), each compiled by itself"
[ $failures -eq 0 ]
