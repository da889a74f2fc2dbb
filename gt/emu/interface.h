/* gt/emu/interface.h - the emulation's interface for tests: faults, statistics, the device. */
#ifndef GT_EMU_INTERFACE_H
#define GT_EMU_INTERFACE_H

#include "runtime.h"

namespace emu {

/* A line of the source.  Site::here() as a default argument gives the line of the call.  Functions pass a Site by
 * reference.  Frequent copies go member by member, because a CPU stalls if one load reads the data of two stores. */
struct Site {
    const char* file;
    int line;

    static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
        return Site{file, line};
    }
    bool operator==(const Site& other) const { return line == other.line && file == other.file; }
    bool operator!=(const Site& other) const { return !(*this == other); }
    const char* name() const { /* file name without folders */
        const char* slash = strrchr(file, '/');
        return slash ? slash + 1 : file;
    }
};

enum class Fault {
    BOUNDS,
    ALIGNMENT,
    UNINITIALISED,
    RACE,
    IN_FLIGHT,
    DIVERGENCE,
    BARRIER,
    DEADLOCK,
    COPY,
    WGMMA,
    PROXY,
    UNSUPPORTED,
    CHAIN,
    COUNT
};

inline const char* fault_name(Fault kind) {
    static const char* const names[] = {"out of bounds", "misaligned", "uninitialised read",
                                        "race",          "in flight",  "divergence",
                                        "barrier",       "deadlock",   "copy",
                                        "wgmma",         "proxy",      "unsupported",
                                        "chain"};
    return names[(int)kind];
}

/* Shared-memory traffic of one source line, in warp instructions. */
struct Traffic {
    Site site;
    int bytes; /* bytes per lane */
    bool store;
    uint64_t instructions;
    uint64_t wavefronts;
    uint64_t ideal; /* wavefronts without bank conflicts */
    int worst_ways; /* most words that one wavefront needs from one bank */
};

/* Shared-memory traffic of one kernel, as in Traffic. */
struct KernelTraffic {
    const void* kernel;
    uint64_t wavefronts, ideal;
};

struct Stats {
    uint64_t blocks;
    uint64_t switches;    /* switches between fibers */
    uint64_t collectives; /* collectives of warps, including barriers */
    uint64_t mma;
    uint64_t instructions; /* this and the next fields: totals of traffic(); worst_ways: the maximum */
    uint64_t wavefronts;
    uint64_t ideal;
    int worst_ways;
    Site worst_site;

    double average_ways() const { return ideal ? (double)wavefronts / (double)ideal : 1.0; }
};

void set_seed(uint64_t seed);
void set_strict(bool strict);
void reset(); /* forgets faults and statistics */
uint64_t faults();
uint64_t faults(Fault kind);
const std::vector<std::string>& messages(); /* the first fault of each kind and source line */
Stats stats();
std::vector<Traffic> traffic();       /* sorted: the most excess wavefronts first */
std::vector<KernelTraffic> kernels(); /* in the order of their first launch */
std::string symbol_name(const void*); /* name of a kernel, with template arguments; "": unknown */

} /* namespace emu */

#endif
