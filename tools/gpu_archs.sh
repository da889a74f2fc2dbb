#!/bin/sh
# gpu_archs.sh auto|all RELEASE: the GPU architectures to compile for with this release of nvcc, such as 13.0.
#   all   every supported one that this nvcc knows, and PTX
#   auto  the architectures of this machine's GPUs, as nvidia-smi names them; without GPUs, 90a and PTX
# The first line of the output lists them, ptx being one; the second says why.
set -eu
mode=$1
release=$2
capabilities=
if [ "$mode" = auto ]; then
    capabilities=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | tr '\n' ' ') || true
fi

awk -v mode="$mode" -v release="$release" -v capabilities="$capabilities" '
# Whether nvcc of this release knows the architectures that came with release r.
function knows(r,    a, b) {
    split(release, a, ".")
    split(r, b, ".")
    return a[1] + 0 > b[1] + 0 || a[1] + 0 == b[1] + 0 && a[2] + 0 >= b[2] + 0
}
function add(arch) {
    if (arch in chosen) return
    chosen[arch]
    list = list (list == "" ? "" : " ") arch
}
# Machine code runs on GPUs with the same major version and at least its minor version.  90a runs only on 9.0.
function best(major, minor,    i, found) {
    for (i = 1; i <= archs; i++) {
        if (int(number[i] / 10) != major || number[i] % 10 > minor) continue
        if (name[i] ~ /a$/ && number[i] % 10 != minor) continue
        found = name[i]
    }
    return found
}
BEGIN {
    # each architecture and the release of nvcc that first knew it
    count = split("75 10.0 80 11.0 86 11.1 89 11.8 90a 12.0 100 12.8 120 12.8", word, " ")
    for (i = 1; i < count; i += 2)
        if (knows(word[i + 1])) {
            name[++archs] = word[i]
            number[archs] = word[i] + 0
        }
    gpus = 0
    n = split(capabilities, capability, " ")
    for (i = 1; i <= n; i++) {
        if (capability[i] !~ /^[0-9]+\.[0-9]+$/) continue # a message
        split(capability[i], part, ".")
        if (part[1] * 10 + part[2] < 75) {
            old = old ", " capability[i] " is older than the oldest supported, 7.5"
            continue
        }
        gpus++
        if (!(capability[i] in seen)) named = named (named == "" ? "" : ", ") capability[i]
        seen[capability[i]]
        arch = best(part[1] + 0, part[2] + 0)
        add(arch == "" ? "ptx" : arch)
    }
    if (mode == "all") {
        for (i = 1; i <= archs; i++) add(name[i])
        add("ptx")
        why = "all that nvcc " release " knows"
    } else if (gpus) {
        why = "for the GPUs of this machine: " named old
    } else {
        add("90a")
        add("ptx")
        why = "nvidia-smi names no GPU of this machine" old
    }
    print list
    print why
}'
