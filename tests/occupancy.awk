# occupancy.awk: these functions compute a kernel's theoretical occupancy, for check_resources.sh and
# check_occupancy.sh.  Occupancy is the share of a multiprocessor's warp slots that is filled when as many blocks run as
# fit.
#
# Limits of a multiprocessor: CUDA Programming Guide, "Compute Capabilities", tables of the resources of each compute
# capability.  The guide does not state how registers, shared memory and barriers are allocated; cuda_occupancy.h of the
# CUDA Toolkit does.  check_occupancy.sh compares these functions with that file.

function round_up(number, unit) { return int((number + unit - 1) / unit) * unit }

# Reads the limits of an architecture, such as "90a".  Returns 0 if it is unknown.
function set_limits(arch,    rows, i, n, row) {
    # warps, blocks, KB of shared memory, reserved KB for each block, unit of shared memory, barriers (0: no limit)
    n = split("75 32 16 64 0 256 0;80 64 32 164 1 128 0;86 48 16 100 1 128 0;89 48 24 100 1 128 0;" \
              "90 64 32 228 1 128 64;100 64 32 228 1 128 64;120 48 24 100 1 128 24", rows, ";")
    for (i = 1; i <= n; i++) {
        split(rows[i], row, " ")
        if (row[1] + 0 != arch + 0) continue
        most_warps = row[2]; most_blocks = row[3]; shared = 1024 * row[4]; reserved = 1024 * row[5]
        shared_unit = row[6]; most_barriers = row[7]
        return 1
    }
    return 0
}

function limit_by(name, blocks) {
    if (blocks < occupancy_blocks) {
        occupancy_blocks = blocks
        limiter = name
    } else if (blocks == occupancy_blocks) {
        limiter = limiter (limiter == "" ? "" : ", ") name
    }
}

# Computes how many blocks fit on a multiprocessor: sets occupancy_blocks, occupancy_warps, and limiter, the resources
# that allow no more blocks.
# registers: of a thread.  bytes: static and dynamic shared memory of a block.  barriers: of a block.
function set_occupancy(registers, threads, bytes, barriers,    warps, of_warp) {
    warps = round_up(threads, 32) / 32
    of_warp = round_up(32 * registers, 256)
    bytes = round_up(bytes + reserved, shared_unit)
    occupancy_blocks = 1e9
    limiter = ""
    limit_by("warps", threads > 1024 ? 0 : int(most_warps / warps))
    # Each quarter of a multiprocessor has 16384 registers.  A block starts only if its warps, rounded up to a multiple
    # of four, need at most 65536 registers.
    if (registers)
        limit_by("registers", of_warp * round_up(warps, 4) > 65536 ? 0 : int(4 * int(16384 / of_warp) / warps))
    if (bytes) limit_by("shared memory", int(shared / bytes))
    limit_by("blocks", most_blocks)
    if (most_barriers && barriers) limit_by("barriers", int(most_barriers / barriers))
    occupancy_warps = occupancy_blocks * warps
}
