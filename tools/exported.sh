#!/bin/sh
# exported.sh gt_kernels.h: prints the linker's version script for a shared library.  The library exports the functions
# that gt_kernels.h declares, under the names with the version that its macros give them.
set -eu
suffix=$(sed -n 's/^#define GT_SYMBOL(name) gt_##name##_//p' "$1")
names=$(sed -n 's/^#define gt_[a-z0-9_]* GT_SYMBOL(\([a-z0-9_]*\))$/\1/p' "$1")
[ -n "$suffix" ] && [ -n "$names" ]
echo '{'
echo '  global:'
for name in $names; do echo "    gt_${name}_$suffix;"; done
echo '  local: *;'
echo '};'
