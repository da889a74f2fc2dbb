# resources.awk: the judge of check_resources.sh.  It reads the messages of ptxas about one part of the library, with
# demangled names, and needs the functions of occupancy.awk.
# Variables: arch, such as sm_90a; allowed, a file of exceptions; may_spill; launches, a file of launches or an empty one.

# The name of a kernel without namespaces of the library and without parameters.
function plain_name(kernel) {
    gsub(/_INTERNAL_[0-9a-z_]*::|gt::|\(anonymous namespace\)::|^void /, "", kernel)
    if (match(kernel, /wkv6::strong_decay_slice</)) kernel = substr(kernel, RSTART)   # behind its type
    sub(/\(.*/, "", kernel)       # parameters of a demangled name
    return kernel
}
BEGIN {
    while ((getline line < launches) > 0) {
        n = split(line, word, " ")
        kernel = line
        sub(/ [0-9]+ [0-9]+$/, "", kernel)
        launch[++launched] = plain_name(kernel)
        threads_of[launched] = word[n - 1]; bytes_of[launched] = word[n]
    }
    knows = set_limits(substr(arch, 4))
    while ((getline line < allowed) > 0) {
        n = split(line, word, " ")
        if (n < 5) continue
        exceptions++
        on[exceptions] = word[1]; of[exceptions] = word[2]
        stack_of[exceptions] = word[3]; spill_of[exceptions] = word[4]
    }
}
function number(line, pattern,    text) {
    if (!match(line, pattern)) return 0
    text = substr(line, RSTART, RLENGTH)
    gsub(/[^0-9]/, "", text)
    return text + 0
}
# The occupancy of a kernel in its launch i, as a text.
function occupancy_text(i) {
    return sprintf("%s %4d %% of all warps: %d blocks of %d threads and %d bytes, limited by %s",
                   occupancy_blocks ? "     " : "FAIL:", 100 * occupancy_warps / most_warps + 0.5, occupancy_blocks,
                   threads_of[i], bytes_of[i], limiter)
}
# Prints the lowest and the highest occupancy of all launches of a kernel.
function judge_launches(kernel, registers, smem, barriers,    i, n, least, highest, of_least, of_highest) {
    kernel = plain_name(kernel)
    n = 0
    for (i = 1; i <= launched; i++) {
        if (launch[i] != kernel) continue
        set_occupancy(registers, threads_of[i], smem + bytes_of[i], barriers)
        if (!n || occupancy_warps < least) { least = occupancy_warps; of_least = occupancy_text(i) }
        if (!n || occupancy_warps > highest) { highest = occupancy_warps; of_highest = occupancy_text(i) }
        n++
        failed += occupancy_blocks == 0
    }
    unlaunched += n == 0
    print n ? of_least : "           not launched by these calls"
    if (n && least < highest) print of_highest
}
function judge(kernel, registers, smem, stack, spill) {
    kernel = plain_name(kernel)
    allowed_stack = allowed_spill = 0
    for (i = 1; i <= exceptions; i++)
        if (arch ~ on[i] && kernel ~ of[i]) {
            allowed_stack = stack_of[i]
            allowed_spill = spill_of[i]
        }
    most = 227
    if (arch == "sm_75") most = 64
    if (arch == "sm_80") most = 163
    if (arch ~ /^sm_(86|89|120)$/) most = 99
    over = stack > allowed_stack || spill > allowed_spill
    bad = over && !may_spill || smem > most * 1024
    failed += bad
    printf "%s %4d registers %5d bytes smem %4d stack %4d spills  %s\n",
           bad ? "FAIL:" : over ? "more:" : "  ok:", registers, smem, stack, spill, kernel
}
# (C7510) and others: registers and spills do not show the loss of these products
/wgmma.*serialized/ {
    sub(/^ptxas [a-z]+ *: */, "")
    print "FAIL: " $0
    failed++
}
/Compiling entry function/ {
    kernel = $0
    sub(/.*entry function ./, "", kernel)
    sub(/. for .sm_.*/, "", kernel)
}
/Function properties for/ {
    name = $0
    sub(/.*Function properties for /, "", name)
}
/bytes stack frame/ {
    stack = number($0, "[0-9]+ bytes stack frame")
    spill = number($0, "[0-9]+ bytes spill stores") + number($0, "[0-9]+ bytes spill loads")
    if (name != kernel) judge(name, 0, 0, stack, spill)   # a function that it calls
}
/Used [0-9]+ registers/ {
    kernels++
    registers = number($0, "Used [0-9]+ registers")
    smem = number($0, "[0-9]+ bytes smem")
    judge(kernel, registers, smem, stack, spill)
    if (launched && knows) judge_launches(kernel, registers, smem, number($0, "used [0-9]+ barriers"))
}
END {
    if (!kernels) print "FAIL: no kernels"
    if (launched && !knows) print "no occupancy: occupancy.awk does not know " arch
    if (unlaunched) printf "%d of %d kernels were not launched\n", unlaunched, kernels
    exit failed > 0 || !kernels
}
