/* emu.h - runs the kernels written on gt_common.cuh on the CPU, and checks how they use the GPU.
 *
 *   Define GT_EMU, include kernels as usual, call their launchers with host pointers, then ask:
 *
 *       emu::set_seed(3);                  another schedule of warps
 *       gt::launch(kernel, {blocks}, threads, smem_bytes, nullptr, params);
 *       if (emu::faults()) for (const std::string& m : emu::messages()) puts(m.c_str());
 *
 * HOW IT RUNS.  Blocks run one after another.  Every thread is a fiber with a stack of its own.  At
 * a collective (shuffle, mma, ldmatrix, sync_warp, barrier) a lane leaves the address of its
 * operands and gives way; the last of the 32 lanes performs the operation for all.  Between
 * collectives warps are interleaved in a random order drawn from the seed.
 *
 * WHAT IS CHECKED
 *   bounds        every shared access lies in the dynamic shared memory of the launch
 *   alignment     shared and vector global accesses, cp.async and ldmatrix rows
 *   uninitialised shared memory starts as "never written" (NaN pattern) in every block
 *   races         Two accesses to a shared cell (2 bytes), one of them a write, must be ordered.
 *                 Warps are ordered by barriers only: a vector clock per warp, joined at bar_sync,
 *                 and at mbarrier_wait with what the arrivals of the complete phase released.
 *                 Lanes of one warp are ordered by sync_warp and the barriers (by mbarriers only
 *                 where an arrival comes back through a wait), as in the PTX memory model.
 *                 set_strict(false) lets the other collectives order them too, as they do where a
 *                 warp runs in step.  The verdict depends on the barriers executed, not on the
 *                 order in which accesses happen.
 *   in flight     The destination of a cp.async holds NaN patterns from issue until the issuing
 *                 thread's wait, which is when the copy lands; any access between is a fault.
 *   copies        lengths, and copies still in flight when their thread returns
 *   divergence    all 32 lanes meet at the same kind of collective, and for those that PTX calls
 *                 .aligned (mma, ldmatrix, movmatrix, bar) at the same source line
 *   barriers      ids, counts that are whole warps and agree, deadlock
 *   mbarriers     use before the initialisation or not ordered after it, a warp arriving twice in
 *                 one phase, a phase that ends before a waiting warp has seen the one before (it
 *                 could mistake the next for it), deadlock, arrivals left over at the end
 *   wgmma         A product is made by the wgmma_wait that ends its group; until then its registers
 *                 hold NaN patterns, and finding anything else there is a fault.  Also: no
 *                 wgmma_fence since the last wait, or registers changed after it; registers of
 *                 a product in flight used by another, but as accumulators; warps of a warpgroup
 *                 that execute different ones; groups never waited for.  B is read, for races, at
 *                 any time from the start of the product to the wait.
 *   async proxy   between a write and wgmma's read stands a fence_async_proxy: of the writing warp,
 *                 before it released the data, or of the reading warp, after it acquired them
 *   chain         A kernel that follows another in a chain, which it may run beside: what a block reads or
 *                 writes with the primitives below before one of its threads is in wait_for_chain() must
 *                 not be written, or read, by the kernel before; and some thread must wait, or the
 *                 kernels after it would not come after those before it.
 *   device        shared memory for a block; mma_bf16, mma_tf32 and mbarriers before sm_80; wgmma
 *                 elsewhere than on sm_90
 *   bank conflicts are counted, not faulted: stats(), traffic() and kernels().  The lanes' accesses
 *                 between two collectives are grouped into warp instructions by source line and
 *                 order.  8-byte accesses take two wavefronts, 16-byte ones four: one per 16 and 8
 *                 lanes.
 *
 * NOT MODELLED: global memory (races between blocks, and between kernels of a chain what is accessed without
 * primitives or after another thread of the block has waited; visibility; for bounds use -fsanitize=address), spin waits, thread block clusters, bulk copies, swizzled operands of wgmma
 * (a fault), reads of registers that a product in flight has (they find NaN), the rounding inside
 * tensor cores (fp32 sums in the order of k here), registers and occupancy.
 *
 * Faults are collected and never end the process; after a divergence, a barrier fault or a deadlock
 * the rest of the launch is skipped.  One thread of the host only.
 */
#ifndef GT_EMU_H
#define GT_EMU_H

#include <cxxabi.h>
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <string>
#include <type_traits>
#include <vector>

#ifdef __linux__
#include <elf.h>
#include <link.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#define EMU_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define EMU_ASAN 1
#endif
#endif
#ifdef EMU_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

/* Functions that look at registers of kernels, which may have left their scope. */
#ifdef EMU_ASAN
#define EMU_UNCHECKED __attribute__((no_sanitize("address")))
#else
#define EMU_UNCHECKED
#endif

/* Define EMU_UCONTEXT to switch fibers by ucontext on x86-64 too (slower: two system calls). */
#if !defined(__x86_64__) && !defined(EMU_UCONTEXT)
#define EMU_UCONTEXT 1
#endif
#ifdef EMU_UCONTEXT
#include <ucontext.h>
#endif

/* ---- stand-ins for the CUDA runtime, with its names and numbers ------------------------------ */

struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

typedef struct CUstream_st* cudaStream_t;

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorInvalidConfiguration = 9,
};

enum cudaDeviceAttr {
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};

namespace emu {

/* The device that launchers see; tests may change it.  So few multiprocessors that small cases keep
 * them busy. */
struct Device {
    int multiprocessors = 4;
    int capability_major = 9, capability_minor = 0;
    int smem_per_multiprocessor = 228 * 1024;
    int smem_per_block = 227 * 1024;
};
inline Device device;

} /* namespace emu */

inline const char* cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "no error";
        case cudaErrorInvalidValue: return "invalid argument";
        case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    }
    return "unrecognized error code";
}

inline cudaError_t cudaGetDevice(int* index) {
    *index = 0;
    return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int /*device*/) {
    switch (attribute) {
        case cudaDevAttrMultiProcessorCount: *value = emu::device.multiprocessors; break;
        case cudaDevAttrComputeCapabilityMajor: *value = emu::device.capability_major; break;
        case cudaDevAttrComputeCapabilityMinor: *value = emu::device.capability_minor; break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
            *value = emu::device.smem_per_multiprocessor;
            break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = emu::device.smem_per_block; break;
    }
    return cudaSuccess;
}

inline cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t) {
    if (bytes) memset(data, value, bytes);
    return cudaSuccess;
}

namespace emu {

/* ---- interface ------------------------------------------------------------------------------- */

/* A place in the source; as a default argument, the place of the call. */
/* Passed by reference, and copied by member where that is often: a processor waits for what was written in two pieces
 * and is read in one. */
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
    int bytes; /* per lane */
    bool store;
    uint64_t instructions;
    uint64_t wavefronts;
    uint64_t ideal; /* wavefronts without bank conflicts */
    int worst_ways; /* most words of one bank that one wavefront wanted */
};

/* Shared-memory traffic of one kernel, as in Traffic. */
struct KernelTraffic {
    const void* kernel;
    uint64_t wavefronts, ideal;
};

struct Stats {
    uint64_t blocks;
    uint64_t switches;    /* between fibers */
    uint64_t collectives; /* of warps, barriers included */
    uint64_t mma;
    uint64_t instructions; /* warp-wide shared-memory instructions; then as in Traffic */
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
std::vector<Traffic> traffic();        /* worst excess of wavefronts first */
std::vector<KernelTraffic> kernels();  /* in the order of their first launch */
std::string symbol_name(const void*);  /* of a kernel, with its template arguments; "": unknown */

/* ---- fibers ---------------------------------------------------------------------------------- */

constexpr int LANES = 32;
constexpr int MAX_WARPS = 32;
constexpr int MAX_THREADS = LANES * MAX_WARPS;
constexpr int BARRIERS = 16;
constexpr int MAX_MESSAGES = 64;
constexpr uint32_t ALL_LANES = 0xffffffffu;
constexpr uint32_t SMEM_BASE = 1024; /* not 0, so that a forgotten base address is out of bounds */
constexpr size_t STACK_BYTES = 256 * 1024;
constexpr size_t GUARD_BYTES = 4096;
constexpr size_t MAX_COLOUR = 16384; /* bytes left free at the top of a stack at most */

[[noreturn]] inline void internal_error(const char* text) {
    fprintf(stderr, "emu: internal error: %s\n", text);
    abort();
}

inline int lowest_bit(uint32_t mask) { return __builtin_ctz(mask); }

#ifndef EMU_UCONTEXT
/* Saves the callee-saved registers and the stack pointer, continues on the other stack. */
__attribute__((naked, noinline)) inline void switch_stack(void** /*save*/, void* /*load*/) {
    __asm__("pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
            "movq %rsp, (%rdi)\n"
            "movq %rsi, %rsp\n"
            "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n"
            "ret\n");
}
#endif

struct Fiber {
#ifdef EMU_UCONTEXT
    ucontext_t context;
#else
    void* stack_pointer = nullptr;
#endif
    char* stack = nullptr; /* lowest address; null for the host's own stack */
    size_t stack_bytes = 0;
    void* fake_stack = nullptr; /* AddressSanitizer's */
#ifdef EMU_ASAN
    const void* bottom = nullptr; /* bounds as AddressSanitizer wants them */
    size_t bottom_bytes = 0;
#endif

    /* Prepares the fiber to run `entry`, which never returns, from its beginning. */
    void start(void (*entry)(), int index, bool abandoned) {
        if (!stack) allocate();
#ifdef EMU_ASAN
        /* Frames that never returned leave their red zones: those of an abandoned kernel, or just
         * the outermost ones. */
        const size_t stale = abandoned ? stack_bytes : MAX_COLOUR + 4096;
        __asan_unpoison_memory_region(stack + stack_bytes - stale, stale);
        bottom = stack;
        bottom_bytes = stack_bytes;
        fake_stack = nullptr;
#else
        (void)abandoned;
#endif
        /* Equal depths of different stacks would compete for the same cache sets: shift them. */
        const size_t colour = (size_t)index * 13 * 64 % MAX_COLOUR;
        const size_t usable = stack_bytes - colour;
#ifdef EMU_UCONTEXT
        getcontext(&context);
        context.uc_stack.ss_sp = stack;
        context.uc_stack.ss_size = usable;
        context.uc_link = nullptr;
        makecontext(&context, entry, 0);
#else
        void** top = reinterpret_cast<void**>(stack + usable);
        *--top = nullptr; /* return address of entry; keeps the stack aligned as after a call */
        *--top = reinterpret_cast<void*>(entry);
        for (int i = 0; i < 6; i++) *--top = nullptr;
        stack_pointer = top;
#endif
    }

private:
    void allocate() {
        stack_bytes = STACK_BYTES;
        void* memory = mmap(nullptr, GUARD_BYTES + STACK_BYTES, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) internal_error("no memory for fiber stacks");
        if (mprotect(memory, GUARD_BYTES, PROT_NONE) != 0) internal_error("mprotect failed");
        stack = static_cast<char*>(memory) + GUARD_BYTES;
    }
};

inline void switch_fiber(Fiber& from, Fiber& to, bool from_ends) {
#ifdef EMU_ASAN
    __sanitizer_start_switch_fiber(from_ends ? nullptr : &from.fake_stack, to.bottom,
                                   to.bottom_bytes);
#else
    (void)from_ends;
#endif
#ifdef EMU_UCONTEXT
    swapcontext(&from.context, &to.context);
#else
    switch_stack(&from.stack_pointer, to.stack_pointer);
#endif
#ifdef EMU_ASAN
    __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

/* ---- order of accesses ----------------------------------------------------------------------- */

/* An access is stamped with its thread and the epoch of its warp: epoch << 10 | warp << 5 | lane.
 * Two epochs are reserved for the state of a cell. */
constexpr uint32_t EPOCH_NEVER = (1u << 22) - 1;
constexpr uint32_t EPOCH_IN_FLIGHT = EPOCH_NEVER - 1;
constexpr uint32_t NEVER_WRITTEN = 0xffffffffu;
constexpr uint32_t WHOLE_WARP = 32; /* as lane: the access was made by the lanes together */

inline uint32_t stamp_of(uint32_t epoch, uint32_t thread) { return epoch << 10 | thread; }
inline uint32_t epoch_of(uint32_t stamp) { return stamp >> 10; }
inline uint32_t thread_of(uint32_t stamp) { return stamp & 1023; }

/* Clock[w]: the last epoch of warp w whose accesses are ordered before what follows.  A warp's own
 * entry may lag behind its epoch: an arrival at an mbarrier ends an epoch for those who wait for
 * it, but does not order the warp's lanes. */
struct Clock {
    uint32_t epoch[MAX_WARPS];

    void join(const Clock& other, int warps) {
        for (int w = 0; w < warps; w++) epoch[w] = std::max(epoch[w], other.epoch[w]);
    }
};

/* What is remembered of the accesses to shared memory, per cell of 2 bytes. */
class AccessHistory {
public:
    void start_block(size_t bytes, int warps) {
        cells_ = (bytes + 1) / 2;
        writer_.assign(cells_, NEVER_WRITTEN);
        readers_.assign(cells_, 0);
        if (last_read_.size() < cells_ * (size_t)warps) last_read_.resize(cells_ * (size_t)warps);
    }

    /* Both return the first cell that is in the wrong state or not ordered, or -1, and then the
     * stamp of the access in conflict.  `me` is the accessing thread, or ~0 for a whole warp. */
    int64_t read(uint32_t first, uint32_t count, int warp, uint32_t lane, uint32_t now,
                 const Clock& before, uint32_t* conflict) {
        const uint32_t me = lane == WHOLE_WARP ? ~0u : (uint32_t)warp * LANES + lane;
        uint32_t* last_read = &last_read_[(size_t)warp * cells_];
        const uint32_t warp_bit = 1u << warp;
        const uint32_t my_read = now << 6 | lane;
        int64_t bad = -1;
        uint32_t accepted = 0; /* no stamp is 0 */
        for (uint32_t i = first; i < first + count; i++) {
            const uint32_t written = writer_[i];
            if (written != accepted) {
                if (ordered(written, me, before)) {
                    accepted = written;
                } else if (bad < 0) {
                    bad = i;
                    *conflict = written;
                }
            }
            const bool unordered = last_read[i] >> 6 > before.epoch[warp];
            const bool shared =
                (readers_[i] & warp_bit) && unordered && (last_read[i] & 63) != lane;
            last_read[i] = shared ? now << 6 | WHOLE_WARP : my_read;
            readers_[i] |= warp_bit;
        }
        return bad;
    }

    /* `mark` is the stamp to leave: of this write, or of a copy in flight. */
    int64_t write(uint32_t first, uint32_t count, int warp, uint32_t lane, const Clock& before,
                  uint32_t mark, uint32_t* conflict) {
        const uint32_t me = (uint32_t)warp * LANES + lane;
        int64_t bad = -1;
        for (uint32_t i = first; i < first + count; i++) {
            const uint32_t written = writer_[i];
            if (written != NEVER_WRITTEN && !ordered(written, me, before) && bad < 0) {
                bad = i;
                *conflict = written;
            }
            for (uint32_t left = readers_[i]; left; left &= left - 1) {
                const int reader = lowest_bit(left);
                const uint32_t read = last_read_[(size_t)reader * cells_ + i];
                const uint32_t read_lane = read & 63;
                const bool mine = reader == warp && read_lane == lane;
                if (read >> 6 > before.epoch[reader] && !mine && bad < 0) {
                    bad = i;
                    *conflict = stamp_of(read >> 6, (uint32_t)reader * LANES + (read_lane & 31));
                }
            }
            writer_[i] = mark;
            readers_[i] = 0;
        }
        return bad;
    }

    /* Stamp of the last write. */
    uint32_t writer(uint32_t cell) const { return writer_[cell]; }

    /* A copy arrives in cells that it has owned since its issue. */
    void land(uint32_t first, uint32_t count, uint32_t mark) {
        std::fill_n(writer_.begin() + first, count, mark);
    }

private:
    static bool ordered(uint32_t stamp, uint32_t me, const Clock& before) {
        const uint32_t epoch = epoch_of(stamp);
        if (epoch <= before.epoch[thread_of(stamp) / LANES]) return true;
        return thread_of(stamp) == me && epoch < EPOCH_IN_FLIGHT;
    }

    size_t cells_ = 0;
    std::vector<uint32_t> writer_;    /* stamp of the last write */
    std::vector<uint32_t> readers_;   /* warps that have read since */
    std::vector<uint32_t> last_read_; /* [warp][cell] epoch << 6 | lane; WHOLE_WARP for several
                                         that no barrier has ordered since */
};

/* ---- bank conflicts -------------------------------------------------------------------------- */

struct Access {
    Site site;
    uint32_t addr;
    uint16_t bytes;
    bool store;

    bool same_instruction(const Access& other) const {
        return site == other.site && bytes == other.bytes && store == other.store;
    }
};

/* Counts, over the 32 banks of 4 bytes, how many words of one bank `count` accesses want. */
inline int bank_ways(const uint32_t* addrs, int count, int bytes) {
    const int words = bytes < 4 ? 1 : bytes / 4;
    uint32_t only[32], taken = 0; /* nearly always there is one word of a bank */
    bool conflict = false;
    for (int i = 0; i < count && !conflict; i++) {
        for (int k = 0; k < words; k++) {
            const uint32_t word = addrs[i] / 4 + (uint32_t)k, bank = word % 32;
            if (!(taken >> bank & 1)) only[bank] = word;
            taken |= 1u << bank;
            conflict = conflict || only[bank] != word;
        }
    }
    if (!conflict) return 1;
    uint32_t wanted[32][LANES];
    int in_bank[32] = {0};
    int ways = 1;
    for (int i = 0; i < count; i++) {
        for (int k = 0; k < words; k++) {
            const uint32_t word = addrs[i] / 4 + (uint32_t)k, bank = word % 32;
            const uint32_t* end = wanted[bank] + in_bank[bank];
            if (std::find(static_cast<const uint32_t*>(wanted[bank]), end, word) != end) continue;
            wanted[bank][in_bank[bank]++] = word;
            ways = std::max(ways, in_bank[bank]);
        }
    }
    return ways;
}

class TrafficCounter {
public:
    void reset() {
        table_.clear();
        kernels_.clear();
        recent_ = 0;
    }

    const std::vector<Traffic>& table() const { return table_; }
    const std::vector<KernelTraffic>& kernels() const { return kernels_; }

    /* What is counted from here on is of this kernel. */
    void start(const void* kernel) {
        const auto same = [kernel](const KernelTraffic& k) { return k.kernel == kernel; };
        const auto at = std::find_if(kernels_.begin(), kernels_.end(), same);
        kernel_ = (size_t)(at - kernels_.begin());
        if (at == kernels_.end()) kernels_.push_back(KernelTraffic{kernel, 0, 0});
    }

    /* One instruction of a warp: the addresses of its active lanes, which make a wavefront each
     * 16 or 8 lanes when they are wide. */
    void count(const Access& instruction, const uint32_t* addrs, const uint8_t* lanes, int active) {
        const int shift = instruction.bytes <= 4 ? 5 : instruction.bytes == 8 ? 4 : 3; /* lanes of a wavefront */
        uint64_t wavefronts = 0, ideal = 0;
        int worst = 1;
        for (int i = 0; i < active;) {
            const int group = lanes[i] >> shift;
            int end = i;
            while (end < active && lanes[end] >> shift == group) end++;
            const int ways = bank_ways(addrs + i, end - i, instruction.bytes);
            worst = std::max(worst, ways);
            wavefronts += (uint64_t)ways;
            ideal++;
            i = end;
        }
        Traffic& t = find(instruction);
        t.instructions++;
        t.wavefronts += wavefronts;
        t.ideal += ideal;
        t.worst_ways = std::max(t.worst_ways, worst);
        kernels_[kernel_].wavefronts += wavefronts;
        kernels_[kernel_].ideal += ideal;
    }

private:
    Traffic& find(const Access& a) {
        /* Kernels loop over the same few lines: search onwards from the last one found. */
        for (size_t n = 0; n < table_.size(); n++) {
            const size_t i =
                recent_ + n < table_.size() ? recent_ + n : recent_ + n - table_.size();
            const Traffic& t = table_[i];
            if (t.site == a.site && t.bytes == a.bytes && t.store == a.store) {
                recent_ = i;
                return table_[i];
            }
        }
        recent_ = table_.size();
        table_.push_back(Traffic{a.site, a.bytes, a.store, 0, 0, 0, 1});
        return table_.back();
    }

    std::vector<Traffic> table_;
    std::vector<KernelTraffic> kernels_;
    size_t recent_ = 0, kernel_ = 0;
};

/* The shared accesses of a warp's lanes since they last met. */
class AccessLog {
public:
    void add(int lane, const Site& site, uint32_t addr, uint32_t bytes, bool store) {
        Access& access = lanes_[lane].emplace_back();
        access.site.file = site.file, access.site.line = site.line;
        access.addr = addr, access.bytes = (uint16_t)bytes, access.store = store;
        any_ = true;
    }

    void clear() {
        if (!any_) return;
        for (auto& log : lanes_) log.clear();
        any_ = false;
    }

    /* Replays the accesses in step: an instruction is issued for all lanes that stand at it. */
    void flush(TrafficCounter& counter) {
        if (!any_) return;
        size_t next[LANES] = {0};
        for (;;) {
            const Access* lead = choose(next);
            if (!lead) break;
            const Access instruction = *lead;
            uint32_t addrs[LANES];
            uint8_t active_lanes[LANES];
            int active = 0;
            for (int lane = 0; lane < LANES; lane++) {
                if (next[lane] == lanes_[lane].size()) continue;
                const Access& access = lanes_[lane][next[lane]];
                if (!access.same_instruction(instruction)) continue;
                addrs[active] = access.addr;
                active_lanes[active++] = (uint8_t)lane;
                next[lane]++;
            }
            counter.count(instruction, addrs, active_lanes, active);
        }
        clear();
    }

private:
    /* Where lanes stand at different instructions, take one that no other lane has still ahead of
     * it: the others skip it, so waiting for them is vain. */
    const Access* choose(const size_t* next) const {
        const Access* first = nullptr;
        bool diverged = false;
        for (int lane = 0; lane < LANES; lane++) {
            if (next[lane] == lanes_[lane].size()) continue;
            const Access& access = lanes_[lane][next[lane]];
            if (!first) first = &access;
            diverged = diverged || !access.same_instruction(*first);
        }
        if (!diverged) return first;
        for (int lane = 0; lane < LANES; lane++) {
            if (next[lane] == lanes_[lane].size()) continue;
            const Access& access = lanes_[lane][next[lane]];
            if (!ahead_of_any(access, next)) return &access;
        }
        return first;
    }

    bool ahead_of_any(const Access& access, const size_t* next) const {
        constexpr size_t LOOK_AHEAD = 64;
        for (int lane = 0; lane < LANES; lane++) {
            const std::vector<Access>& log = lanes_[lane];
            if (next[lane] == log.size() || log[next[lane]].same_instruction(access)) continue;
            const size_t end = std::min(log.size(), next[lane] + LOOK_AHEAD);
            for (size_t i = next[lane] + 1; i < end; i++) {
                if (log[i].same_instruction(access)) return true;
            }
        }
        return false;
    }

    std::vector<Access> lanes_[LANES];
    bool any_ = false;
};

/* ---- the machine ----------------------------------------------------------------------------- */

enum class Op {
    SHUFFLE,
    SYNC_WARP,
    MBARRIER_ARRIVE,
    MBARRIER_WAIT,
    FENCE_PROXY,
    BARRIER_SYNC, /* from here on .aligned */
    LDMATRIX,
    MOVMATRIX,
    MMA,
    WGMMA,
    WGMMA_FENCE,
    WGMMA_COMMIT,
    WGMMA_WAIT
};

inline const char* op_name(Op op) {
    static const char* const names[] = {
        "shuffle",      "sync_warp",  "mbarrier_arrive", "mbarrier_wait", "fence_async_proxy",
        "bar_sync",     "ldmatrix",   "movmatrix",       "mma",           "wgmma_tf32",
        "wgmma_fence",  "wgmma_commit", "wgmma_wait"};
    return names[(int)op];
}

struct Copy {
    uint32_t addr;
    const void* source;
    int bytes, copied;
};

/* A register that wgmma knows, by its address. */
struct Register {
    float* at;
    float value;      /* used by products in flight: its value now; else: at the last wgmma_fence */
    int products;     /* in flight that use it */
    bool accumulates; /* in these; else it is of A */
};

constexpr uint32_t IN_FLIGHT_BITS = 0xffdecade; /* a NaN that no arithmetic makes */
constexpr int WGMMA_TILES = 16;                 /* of 8 columns */

struct Thread {
    Fiber fiber;
    std::vector<Copy> copies;   /* issued and not landed, oldest first */
    std::vector<size_t> groups; /* end of each committed group in `copies` */
    std::vector<Register> registers;
};

/* A warp's part of a product in flight. */
struct Product64 {
    Site site;
    uint64_t b;
    float* c[LANES];
    const float* a[LANES];
    Clock before;       /* the warp's, at its start */
    Clock before_fence; /* ... and at its latest fence_async_proxy */
};

struct Warp {
    uint32_t live;  /* lanes that have not returned */
    uint32_t ready; /* lanes that can run on */
    bool waits;     /* a barrier holds the whole warp */
    int arrived;    /* lanes at the collective described by op and site */
    int first_lane;
    Op op;
    Site site;
    void* operands[LANES];
    uint32_t epoch; /* of its accesses now */
    Clock before;
    AccessLog log;
    std::vector<uint32_t> proxy_fences; /* the epochs that they ended */
    Clock before_fence;                 /* `before`, at the latest */
    std::vector<Product64> products;    /* in flight, oldest first */
    std::vector<size_t> groups;         /* end of each committed group in `products` */
    bool fenced;                        /* by a wgmma_fence since the last wait */
    size_t steps;                       /* operations of its warpgroup that it has executed */
};

/* What a warpgroup executes, in order. */
struct WarpgroupStep {
    Op op;
    Site site;
    uint64_t argument;
};

struct Barrier {
    int expected, arrived; /* threads; expected is set by the first that comes */
    uint32_t waiting;
    Clock clock;
};

struct Mbarrier {
    uint32_t addr;
    int expected, arrived; /* threads, in the current phase */
    uint32_t phase;        /* the current one, from 0 */
    uint32_t warps;        /* that have arrived in it */
    uint32_t waiting;      /* for its end */
    uint32_t waiters;      /* warps that have ever waited */
    uint32_t seen;         /* of these: that know that the phase before is complete */
    Clock arriving;        /* what the arrivals of the current phase release */
    Clock complete;        /* what those of the phase before did */
};

constexpr uint64_t MBARRIER_MARK = 0x7265697272616d62u; /* what its memory holds */

struct Launch {
    const void* kernel;
    const void* params;
    void (*call)(const void* kernel, const void* params);
    unsigned grid[3];
    int threads, warps;
    uint32_t smem_bytes;
    bool follows; /* another kernel of its chain */
    Site site;
};

/* Which bytes of global memory a kernel has read, and which written. */
class Footprint {
public:
    void clear() {
        for (auto& ranges : of_) ranges.clear();
    }

    void add(bool written, uintptr_t first, size_t bytes) {
        std::vector<Range>& ranges = of_[written];
        ranges.push_back(Range{first, first + bytes});
        if (ranges.size() < most_[written]) return;
        merge(ranges);
        most_[written] = std::max(LEAST, 2 * ranges.size());
    }

    /* To be called before touches(). */
    void merge() {
        for (auto& ranges : of_) merge(ranges);
    }

    bool touches(bool written, uintptr_t first, size_t bytes) const {
        const std::vector<Range>& ranges = of_[written];
        const auto after = std::upper_bound(ranges.begin(), ranges.end(), first,
                                            [](uintptr_t x, const Range& r) { return x < r.end; });
        return after != ranges.end() && after->first < first + bytes;
    }

private:
    struct Range {
        uintptr_t first, end;
    };
    static constexpr size_t LEAST = 1 << 20;

    static void merge(std::vector<Range>& ranges) {
        std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.first < b.first; });
        size_t count = 0;
        for (const Range& r : ranges) {
            if (count && r.first <= ranges[count - 1].end) {
                ranges[count - 1].end = std::max(ranges[count - 1].end, r.end);
            } else {
                ranges[count++] = r;
            }
        }
        ranges.resize(count);
    }

    std::vector<Range> of_[2];
    size_t most_[2] = {LEAST, LEAST};
};

class Machine {
public:
    /* State that primitives read directly. */
    Launch launch = {};
    unsigned block[3] = {0, 0, 0};
    int thread = -1; /* running, or -1 outside kernels */

    void seed(uint64_t value) { random_ = value * 0x9e3779b97f4a7c15u + 1; }
    void strict(bool value) { strict_ = value; }

    void reset() {
        std::fill_n(fault_count_, (int)Fault::COUNT, 0u);
        messages_.clear();
        reported_.clear();
        stats_ = {};
        traffic_.reset();
    }

    uint64_t fault_count(Fault kind) const { return fault_count_[(int)kind]; }
    const std::vector<std::string>& fault_messages() const { return messages_; }
    const TrafficCounter& traffic() const { return traffic_; }
    Stats& stats() { return stats_; }

    void run(const Launch& what) {
        if (thread >= 0) internal_error("launch inside a kernel");
        launch = what;
        traffic_.start(launch.kernel);
        smem_.resize(launch.smem_bytes);
        std::swap(before_, footprint_);
        footprint_.clear();
        if (launch.follows) before_.merge();
        some_waited_ = false;
        bool good = true;
        for (block[2] = 0; good && block[2] < launch.grid[2]; block[2]++) {
            for (block[1] = 0; good && block[1] < launch.grid[1]; block[1]++) {
                for (block[0] = 0; good && block[0] < launch.grid[0]; block[0]++) {
                    good = run_block();
                }
            }
        }
        thread = -1;
        if (good && launch.follows && !some_waited_)
            report(Fault::CHAIN, launch.site, "no thread waits for the kernels before");
    }

    void wait_for_chain() { block_waited_ = some_waited_ = true; }

    void touch_global(bool writes, const void* pointer, size_t bytes, const Site& site) {
        const uintptr_t first = reinterpret_cast<uintptr_t>(pointer);
        footprint_.add(writes, first, bytes);
        if (!launch.follows || block_waited_) return;
        const bool written = before_.touches(true, first, bytes);
        if (written || (writes && before_.touches(false, first, bytes)))
            report(Fault::CHAIN, site, "%s of %p, which the kernel before %s, without waiting for it",
                   writes ? "write" : "read", pointer, written ? "writes" : "reads");
    }

    __attribute__((format(printf, 4, 5))) void report(Fault kind, const Site& site, const char* format,
                                                      ...) {
        fault_count_[(int)kind]++;
        for (const Reported& r : reported_) {
            if (r.kind == kind && r.site == site) return;
        }
        if (messages_.size() == MAX_MESSAGES) return;
        reported_.push_back(Reported{kind, site});
        char detail[512];
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(detail, sizeof detail, format, arguments);
        va_end(arguments);
        char place[128];
        snprintf(place, sizeof place, " block (%u,%u,%u)", block[0], block[1], block[2]);
        std::string message = std::string(site.name()) + ":" + std::to_string(site.line) + ": ";
        message +=
            std::string(fault_name(kind)) + ": " + detail + "; kernel " + kernel_name() + place;
        if (thread >= 0) message += " thread " + std::to_string(thread);
        messages_.push_back(message);
    }

    /* Ends the launch from inside a kernel after a fault that leaves no way on. */
    void abandon() {
        abandoned_ = true;
        enter(-1, false);
    }

    /* -- shared memory -- */

    void load(void* value, uint32_t addr, uint32_t bytes, const Site& site) {
        if (!legal(addr, bytes, bytes, "read", site)) {
            memset(value, 0xff, bytes);
            return;
        }
        warp_->log.add(lane(), site, addr, bytes, false);
        read(value, addr, bytes, (uint32_t)lane(), site);
    }

    void store(const void* value, uint32_t addr, uint32_t bytes, const Site& site) {
        if (!legal(addr, bytes, bytes, "write", site)) return;
        warp_->log.add(lane(), site, addr, bytes, true);
        write(addr, bytes, stamp(), site);
        memcpy(&smem_[addr - SMEM_BASE], value, bytes);
    }

    /* A row of a matrix, read by the warp as one. */
    void load_row(void* row, uint32_t addr, const Site& site) {
        if (!legal(addr, 16, 16, "ldmatrix", site)) {
            memset(row, 0xff, 16);
            return;
        }
        read(row, addr, 16, WHOLE_WARP, site);
    }

    void count_matrices(const uint32_t* addrs, int rows, const Site& site) {
        uint8_t lanes[LANES];
        for (int i = 0; i < rows; i++) lanes[i] = (uint8_t)i;
        traffic_.count(Access{site, 0, 16, false}, addrs, lanes, rows);
    }

    /* What traps on older devices. */
    void need_sm80(const char* what, const Site& site) {
        if (device.capability_major >= 8) return;
        report(Fault::UNSUPPORTED, site, "%s on sm_%d%d", what, device.capability_major,
               device.capability_minor);
    }

    void check_global(const void* pointer, size_t bytes, const Site& site) {
        if (reinterpret_cast<uintptr_t>(pointer) % bytes == 0) return;
        report(Fault::ALIGNMENT, site, "%zu-byte access to global address %p", bytes, pointer);
    }

    void copy(uint32_t addr, const void* source, int bytes, int copied, const Site& site) {
        if (copied < 0 || copied > bytes || copied % 2 != 0) {
            report(Fault::COPY, site, "cp_async of %d bytes asked for %d", bytes, copied);
            copied = 0;
        }
        check_global(source, (size_t)bytes, site);
        if (copied > 0) touch_global(false, source, (size_t)copied, site);
        if (!legal(addr, (uint32_t)bytes, (uint32_t)bytes, "cp_async", site)) return;
        warp_->log.add(lane(), site, addr, bytes, true);
        write(addr, (uint32_t)bytes, stamp_of(EPOCH_IN_FLIGHT, (uint32_t)thread), site);
        memset(&smem_[addr - SMEM_BASE], 0xff, (size_t)bytes);
        current().copies.push_back(Copy{addr, source, bytes, copied});
    }

    void commit_copies() {
        Thread& t = current();
        t.groups.push_back(t.copies.size());
    }

    void wait_copies(size_t groups_left) {
        Thread& t = current();
        if (t.groups.size() <= groups_left) return;
        const size_t done = t.groups.size() - groups_left, end = t.groups[done - 1];
        for (size_t i = 0; i < end; i++) land(t.copies[i]);
        t.copies.erase(t.copies.begin(), t.copies.begin() + (ptrdiff_t)end);
        t.groups.erase(t.groups.begin(), t.groups.begin() + (ptrdiff_t)done);
        for (size_t& group : t.groups) group -= end;
    }

    /* -- collectives -- */

    int lane() const { return thread % LANES; }

    /* Waits until all lanes of the warp have come; the last one calls perform(operands of all
     * lanes) for the warp. */
    template <class Operands, class Perform>
    void meet(Op op, const Site& site, Operands& mine, Perform perform) {
        if (thread < 0) internal_error("primitive used outside a kernel");
        Warp& w = *warp_;
        if (w.arrived == 0) {
            w.op = op;
            w.site = site;
            w.first_lane = lane();
        } else if (w.op != op || (op >= Op::BARRIER_SYNC && w.site != site)) {
            report(Fault::DIVERGENCE, site, "at %s while lane %d of the warp is at %s in %s:%d",
                   op_name(op), w.first_lane, op_name(w.op), w.site.name(), w.site.line);
            abandon();
        }
        w.operands[lane()] = &mine;
        if (++w.arrived < LANES) {
            w.ready &= ~(1u << lane());
            give_way(false);
            return;
        }
        w.arrived = 0;
        stats_.collectives++;
        w.log.flush(traffic_);
        const bool orders = !strict_ || op == Op::SYNC_WARP || op == Op::BARRIER_SYNC;
        if (orders) next_epoch(w);
        perform(reinterpret_cast<Operands**>(w.operands));
        if (orders && op == Op::LDMATRIX) next_epoch(w);
        if (w.waits) {
            w.ready = 0;
            give_way(false);
            return;
        }
        w.ready = w.live;
        if (--patience_ <= 0) enter(-1, false);
    }

    void sync(int id, int threads, const Site& site) {
        if (id < 0 || id >= BARRIERS || threads <= 0 || threads % LANES != 0 ||
            threads > launch.threads) {
            report(Fault::BARRIER, site, "barrier %d for %d threads in a block of %d", id, threads,
                   launch.threads);
            abandon();
        }
        Barrier& b = barriers_[id];
        if (b.arrived == 0) b.expected = threads;
        if (b.expected != threads) {
            report(Fault::BARRIER, site, "barrier %d for %d threads, others said %d", id, threads,
                   b.expected);
            abandon();
        }
        b.arrived += LANES;
        b.clock.join(warp_->before, launch.warps);
        b.waiting |= own_bit();
        warp_->waits = true;
        if (b.arrived < b.expected) return;
        release(b.waiting, b.clock);
        memset(&b, 0, sizeof b);
    }

    /* -- mbarriers -- */

    void init_mbarrier(uint32_t addr, int threads, const Site& site) {
        need_sm80("an mbarrier", site);
        if (!legal(addr, 8, 8, "mbarrier", site)) return;
        if (threads <= 0 || threads % LANES != 0 || threads > launch.threads) {
            report(Fault::BARRIER, site, "mbarrier for %d threads in a block of %d", threads,
                   launch.threads);
            abandon();
        }
        write(addr, 8, stamp(), site);
        memcpy(&smem_[addr - SMEM_BASE], &MBARRIER_MARK, 8);
        Mbarrier fresh = {};
        fresh.addr = addr;
        fresh.expected = threads;
        for (Mbarrier& m : mbarriers_) {
            if (m.addr != addr) continue;
            m = fresh;
            return;
        }
        mbarriers_.push_back(fresh);
    }

    void arrive(uint32_t addr, const Site& site) {
        Mbarrier& m = mbarrier_at(addr, "mbarrier_arrive", site);
        if (m.warps & own_bit()) {
            report(Fault::BARRIER, site, "warp %d arrives twice at %s in one phase", warp_index(),
                   mbarrier_name(m).c_str());
            abandon();
        }
        m.warps |= own_bit();
        m.arriving.join(warp_->before, launch.warps);
        m.arriving.epoch[warp_index()] = warp_->epoch;
        begin_epoch(*warp_);
        m.arrived += LANES;
        if (m.arrived == m.expected) complete(m, site);
    }

    void wait(uint32_t addr, int parity, const Site& site) {
        Mbarrier& m = mbarrier_at(addr, "mbarrier_wait", site);
        if (parity != 0 && parity != 1) {
            report(Fault::BARRIER, site, "parity %d at %s", parity, mbarrier_name(m).c_str());
            abandon();
        }
        m.waiters |= own_bit();
        if ((int)(m.phase % 2) == parity) {
            m.waiting |= own_bit();
            warp_->waits = true;
        } else {
            m.seen |= own_bit();
            warp_->before.join(m.complete, launch.warps);
        }
    }

    /* -- warpgroups -- */

    void fence_proxy(const Site& site) {
        need_sm90("fence_async_proxy", site);
        warp_->proxy_fences.push_back(warp_->epoch);
        warp_->before_fence = warp_->before;
        begin_epoch(*warp_);
    }

    void start_product(const Product64& product) {
        if (!step(Op::WGMMA, product.site, product.b)) return;
        for (int lane = 0; lane < LANES; lane++) {
            for (int i = 0; i < 4 * WGMMA_TILES; i++)
                use(lane, product.c[lane] + i, true, product.site);
            for (int i = 0; i < 4; i++)
                use(lane, const_cast<float*>(product.a[lane]) + i, false, product.site);
        }
        warp_->products.push_back(product);
        warp_->products.back().before = warp_->before;
        warp_->products.back().before_fence = warp_->before_fence;
    }

    EMU_UNCHECKED void fence_registers(const Site& site) {
        if (!step(Op::WGMMA_FENCE, site, 0)) return;
        warp_->fenced = true;
        for (int lane = 0; lane < LANES; lane++)
            for (Register& r : lane_thread(lane).registers)
                if (r.products == 0) r.value = *r.at;
    }

    void commit_products(const Site& site) {
        if (step(Op::WGMMA_COMMIT, site, 0)) warp_->groups.push_back(warp_->products.size());
    }

    void wait_products(size_t groups_left, const Site& site) {
        if (!step(Op::WGMMA_WAIT, site, groups_left)) return;
        warp_->fenced = false;
        std::vector<size_t>& groups = warp_->groups;
        if (groups.size() <= groups_left) return;
        const size_t done = groups.size() - groups_left, end = groups[done - 1];
        std::vector<Product64>& products = warp_->products;
        for (size_t i = 0; i < end; i++) perform(products[i]);
        products.erase(products.begin(), products.begin() + (ptrdiff_t)end);
        groups.erase(groups.begin(), groups.begin() + (ptrdiff_t)done);
        for (size_t& group : groups) group -= end;
    }

private:
    struct Reported {
        Fault kind;
        Site site;
    };

    Thread& lane_thread(int lane) { return threads_[warp_index() * LANES + lane]; }

    void need_sm90(const char* what, const Site& site) {
        if (device.capability_major == 9) return;
        report(Fault::UNSUPPORTED, site, "%s on sm_%d%d", what, device.capability_major,
               device.capability_minor);
    }

    /* One operation of a warp, which all 4 of its warpgroup execute; false: none can follow. */
    bool step(Op op, const Site& site, uint64_t argument) {
        need_sm90(op_name(op), site);
        const int group = warp_index() / 4;
        if (4 * group + 4 > launch.warps) {
            report(Fault::WGMMA, site, "%s by warp %d of %d, not one of 4", op_name(op),
                   warp_index(), launch.warps);
            return false;
        }
        std::vector<WarpgroupStep>& steps = warpgroups_[group];
        const WarpgroupStep now = {op, site, argument};
        if (warp_->steps++ == steps.size()) steps.push_back(now);
        const WarpgroupStep& first = steps[warp_->steps - 1];
        if (first.op == op && first.site == site && first.argument == argument) return true;
        report(Fault::WGMMA, site,
               "%s of warp %d is %s in %s:%d, or with other arguments, in its warpgroup",
               op_name(op), warp_index(), op_name(first.op), first.site.name(), first.site.line);
        return true;
    }

    /* A product takes a register: as accumulator, or as part of A. */
    EMU_UNCHECKED void use(int lane, float* at, bool accumulates, const Site& site) {
        std::vector<Register>& known = lane_thread(lane).registers;
        const auto is_it = [at](const Register& r) { return r.at == at; };
        auto r = std::find_if(known.begin(), known.end(), is_it);
        const bool is_new = r == known.end();
        if (is_new) r = known.insert(r, Register{at, *at, 0, accumulates});
        if (r->products == 0) {
            if (!warp_->fenced)
                report(Fault::WGMMA, site, "no wgmma_fence since the last wgmma_wait");
            else if (!is_new && memcmp(&r->value, at, 4) != 0)
                report(Fault::WGMMA, site, "a register of lane %d changed after the wgmma_fence",
                       lane);
            r->value = *at;
            r->accumulates = accumulates;
            memcpy(at, &IN_FLIGHT_BITS, 4);
        } else if (r->accumulates != accumulates) {
            report(Fault::WGMMA, site, "a register of lane %d is used by a product in flight",
                   lane);
        }
        r->products++;
    }

    float take(int lane, const float* at) {
        for (const Register& r : lane_thread(lane).registers)
            if (r.at == at) return r.value;
        internal_error("a register of a product is not known");
    }

    /* ... and gives it back. */
    EMU_UNCHECKED void give(int lane, const float* at, const float* value, const Site& site) {
        for (Register& r : lane_thread(lane).registers) {
            if (r.at != at) continue;
            if (value) r.value = *value;
            if (--r.products > 0) return;
            if (memcmp(at, &IN_FLIGHT_BITS, 4) != 0)
                report(Fault::WGMMA, site, "a register of lane %d was written in flight", lane);
            memcpy(r.at, &r.value, 4);
            return;
        }
    }

    void perform(const Product64& p);

    /* 4 neighbours of a row of B.  Checks what read() does, and the fences between proxies. */
    void read_async(float* row, uint32_t addr, const Product64& p) {
        if (!legal(addr, 16, 16, "wgmma operand", p.site)) {
            memset(row, 0xff, 16);
            return;
        }
        const uint32_t offset = addr - SMEM_BASE;
        uint32_t conflict;
        const int64_t bad = history_.read(offset / 2, 8, warp_index(), WHOLE_WARP, warp_->epoch,
                                          p.before, &conflict);
        if (bad >= 0) report_conflict("wgmma", bad, conflict, p.site);
        memcpy(row, &smem_[offset], 16);
        for (uint32_t cell = offset / 2; bad < 0 && cell < offset / 2 + 8; cell++) {
            const uint32_t written = history_.writer(cell), writer = thread_of(written) / LANES;
            const std::vector<uint32_t>& fences = warps_[writer].proxy_fences;
            const auto released =
                std::upper_bound(fences.begin(), fences.end(), p.before.epoch[writer]);
            if (released != fences.begin() && released[-1] >= epoch_of(written)) continue;
            if (epoch_of(written) <= p.before_fence.epoch[writer]) continue;
            report(Fault::PROXY, p.site,
                   "wgmma reads smem_base() + %u without a fence_async_proxy since warp %u wrote",
                   2 * cell, writer);
            return;
        }
    }

    uint32_t random() {
        random_ ^= random_ << 13;
        random_ ^= random_ >> 7;
        random_ ^= random_ << 17;
        return (uint32_t)(random_ >> 32);
    }

    Thread& current() { return threads_[thread]; }

    uint32_t stamp() const {
        return stamp_of(warp_->epoch, (uint32_t)thread);
    }

    int warp_index() const { return thread / LANES; }
    uint32_t own_bit() const { return 1u << warp_index(); }

    void begin_epoch(Warp& w) {
        if (++w.epoch >= EPOCH_IN_FLIGHT - 1) internal_error("a warp met too often in one block");
    }

    /* Orders the lanes' accesses until now before those that follow. */
    void next_epoch(Warp& w) {
        w.before.epoch[&w - warps_] = w.epoch;
        begin_epoch(w);
    }

    /* -- scheduling -- */

    bool run_block() {
        start_block();
        while (live_warps_) {
            uint32_t runnable = 0;
            for (int w = 0; w < launch.warps; w++) runnable |= (warps_[w].ready ? 1u : 0u) << w;
            if (!runnable) {
                report_deadlock();
                break;
            }
            for (uint32_t skip = random() % (uint32_t)__builtin_popcount(runnable); skip; skip--) {
                runnable &= runnable - 1;
            }
            if (!run_warp(lowest_bit(runnable))) break;
        }
        const bool good = live_warps_ == 0;
        abandoned_ = !good;
        if (good) check_mbarriers_idle();
        if (good) check_warpgroups_idle();
        return good;
    }

    void start_block() {
        stats_.blocks++;
        block_waited_ = false;
        std::fill(smem_.begin(), smem_.end(), (uint8_t)0xff);
        history_.start_block(launch.smem_bytes, launch.warps);
        memset(barriers_, 0, sizeof barriers_);
        mbarriers_.clear();
        for (auto& steps : warpgroups_) steps.clear();
        for (int i = 0; i < launch.threads; i++) {
            threads_[i].fiber.start(thread_entry, i, abandoned_);
            threads_[i].copies.clear();
            threads_[i].groups.clear();
            threads_[i].registers.clear();
        }
        for (int i = 0; i < launch.warps; i++) {
            Warp& w = warps_[i];
            w.live = w.ready = ALL_LANES;
            w.waits = false;
            w.arrived = 0;
            w.epoch = 1;
            memset(&w.before, 0, sizeof w.before);
            w.log.clear();
            w.proxy_fences.clear();
            memset(&w.before_fence, 0, sizeof w.before_fence);
            w.products.clear();
            w.groups.clear();
            w.fenced = false;
            w.steps = 0;
        }
        live_warps_ = launch.warps;
        abandoned_ = false;
    }

    /* Runs a warp for a while; false when the block cannot go on. */
    bool run_warp(int index) {
        warp_ = &warps_[index];
        patience_ = 1 + (int)(random() % 8);
        enter(index * LANES + lowest_bit(warp_->ready), false);
        if (abandoned_) return false;
        if (warp_->live == 0) {
            live_warps_--;
        } else if (warp_->ready == 0 && !warp_->waits) {
            thread = index * LANES + warp_->first_lane;
            report(Fault::DIVERGENCE, warp_->site, "%d lanes are at %s, the others have returned",
                   warp_->arrived, op_name(warp_->op));
            return false;
        }
        return true;
    }

    /* Continues with another lane of the warp that can run, else with the scheduler. */
    void give_way(bool ended) {
        const uint32_t ready = warp_->ready;
        const uint32_t above = ready & ~((2u << lane()) - 1u);
        const int base = thread - lane();
        enter(ready == 0 ? -1 : base + lowest_bit(above ? above : ready), ended);
    }

    /* Switches from the running fiber to that of thread `next`, or to the scheduler for -1. */
    void enter(int next, bool ended) {
        Fiber& from = thread < 0 ? scheduler_ : threads_[thread].fiber;
        thread = next;
        stats_.switches++;
        switch_fiber(from, next < 0 ? scheduler_ : threads_[next].fiber, ended);
    }

    static void thread_entry();

    void thread_main() {
#ifdef EMU_ASAN
        /* The first fiber is entered from the scheduler: learn the bounds of the host's stack. */
        const void* bottom;
        size_t bytes;
        __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
        if (!scheduler_.bottom) {
            scheduler_.bottom = bottom;
            scheduler_.bottom_bytes = bytes;
        }
#endif
        launch.call(launch.kernel, launch.params);
        if (!current().copies.empty()) {
            report(Fault::COPY, launch.site, "returns with %zu copies in flight",
                   current().copies.size());
        }
        warp_->live &= ~(1u << lane());
        warp_->ready &= ~(1u << lane());
        if (warp_->live == 0) warp_->log.flush(traffic_);
        give_way(true);
    }

    /* -- memory -- */

    bool legal(uint32_t addr, uint32_t bytes, uint32_t alignment, const char* what, const Site& site) {
        if (thread < 0) internal_error("primitive used outside a kernel");
        const uint32_t offset = addr - SMEM_BASE;
        if (addr < SMEM_BASE || offset > launch.smem_bytes || bytes > launch.smem_bytes - offset) {
            report(Fault::BOUNDS, site, "%s of %u bytes at smem_base() %+d of %u", what, bytes,
                   (int)offset, launch.smem_bytes);
            return false;
        }
        if (offset & (alignment - 1)) { /* a power of two */
            report(Fault::ALIGNMENT, site, "%s of %u bytes at smem_base() + %u", what, bytes,
                   offset);
            return false;
        }
        return true;
    }

    void read(void* value, uint32_t addr, uint32_t bytes, uint32_t lane, const Site& site) {
        const uint32_t offset = addr - SMEM_BASE;
        uint32_t conflict;
        const int64_t bad =
            history_.read(offset / 2, bytes / 2, warp_index(), lane, warp_->epoch, warp_->before,
                          &conflict);
        if (bad >= 0) report_conflict("read", bad, conflict, site);
        memcpy(value, &smem_[offset], bytes);
    }

    void write(uint32_t addr, uint32_t bytes, uint32_t mark, const Site& site) {
        uint32_t conflict;
        const int64_t bad = history_.write((addr - SMEM_BASE) / 2, bytes / 2, thread / LANES,
                                           (uint32_t)lane(), warp_->before, mark, &conflict);
        if (bad >= 0) report_conflict("write", bad, conflict, site);
    }

    void report_conflict(const char* what, int64_t cell, uint32_t conflict, const Site& site) {
        const long offset = (long)cell * 2;
        if (conflict == NEVER_WRITTEN) {
            report(Fault::UNINITIALISED, site, "%s at smem_base() + %ld", what, offset);
        } else if (epoch_of(conflict) == EPOCH_IN_FLIGHT) {
            report(Fault::IN_FLIGHT, site, "%s at smem_base() + %ld, where thread %u copies", what,
                   offset, thread_of(conflict));
        } else {
            report(Fault::RACE, site, "%s at smem_base() + %ld, not ordered after thread %u", what,
                   offset, thread_of(conflict));
        }
    }

    void land(const Copy& c) {
        const uint32_t offset = c.addr - SMEM_BASE;
        if (c.copied) memcpy(&smem_[offset], c.source, (size_t)c.copied);
        memset(&smem_[offset] + c.copied, 0, (size_t)(c.bytes - c.copied));
        history_.land(offset / 2, (uint32_t)c.bytes / 2, stamp());
    }

    /* -- barriers -- */

    void release(uint32_t waiting, const Clock& clock) {
        for (; waiting; waiting &= waiting - 1) {
            Warp& w = warps_[lowest_bit(waiting)];
            w.before.join(clock, launch.warps);
            w.waits = false;
            w.ready = w.live;
        }
    }

    void complete(Mbarrier& m, const Site& site) {
        /* who arrives in every phase cannot take one for another */
        if (const uint32_t late = m.waiters & ~m.seen & ~m.waiting & ~m.warps) {
            report(Fault::BARRIER, site,
                   "a phase of %s ends before warp %d has seen the end of the one before",
                   mbarrier_name(m).c_str(), lowest_bit(late));
            abandon();
        }
        release(m.waiting, m.arriving);
        m.seen = m.waiting;
        m.waiting = m.warps = 0;
        m.arrived = 0;
        m.phase++;
        m.complete = m.arriving;
        memset(&m.arriving, 0, sizeof m.arriving);
    }

    Mbarrier& mbarrier_at(uint32_t addr, const char* what, const Site& site) {
        if (!legal(addr, 8, 8, what, site)) abandon();
        uint64_t mark;
        memcpy(&mark, &smem_[addr - SMEM_BASE], 8);
        if (mark != MBARRIER_MARK) {
            report(Fault::BARRIER, site, "%s at smem_base() + %u, where no mbarrier is", what,
                   addr - SMEM_BASE);
            abandon();
        }
        read(&mark, addr, 8, WHOLE_WARP, site);
        for (Mbarrier& m : mbarriers_) {
            if (m.addr == addr) return m;
        }
        internal_error("a mark without an mbarrier");
    }

    static std::string mbarrier_name(const Mbarrier& m) {
        return "the mbarrier at smem_base() + " + std::to_string(m.addr - SMEM_BASE);
    }

    void report_deadlock() {
        std::string text;
        Site site = launch.site;
        const auto add = [&](const std::string& name, uint32_t waits, int arrived, int expected) {
            if (!waits) return;
            const int waiting = lowest_bit(waits);
            site = warps_[waiting].site;
            thread = waiting * LANES;
            text += (text.empty() ? "" : ", ") + name + " has " + std::to_string(arrived) + " of " +
                    std::to_string(expected) + " threads";
        };
        for (int id = 0; id < BARRIERS; id++) {
            const Barrier& b = barriers_[id];
            add("barrier " + std::to_string(id), b.waiting, b.arrived, b.expected);
        }
        for (const Mbarrier& m : mbarriers_) {
            add(mbarrier_name(m), m.waiting, m.arrived, m.expected);
        }
        report(Fault::DEADLOCK, site, "%s", text.c_str());
    }

    void check_mbarriers_idle() {
        for (const Mbarrier& m : mbarriers_) {
            if (m.arrived == 0) continue;
            report(Fault::BARRIER, launch.site, "%s is left with %d of %d threads",
                   mbarrier_name(m).c_str(), m.arrived, m.expected);
        }
    }

    void check_warpgroups_idle() {
        for (int i = 0; i < launch.warps; i++) {
            const Warp& w = warps_[i];
            if (!w.products.empty())
                report(Fault::WGMMA, w.products[0].site, "warp %d returns with products in flight",
                       i);
            if (w.steps && w.steps != warpgroups_[i / 4].size())
                report(Fault::WGMMA, launch.site,
                       "warp %d returns after %zu of its warpgroup's %zu steps", i, w.steps,
                       warpgroups_[i / 4].size());
        }
    }

    std::string kernel_name() const;

    Fiber scheduler_;
    Thread threads_[MAX_THREADS];
    Warp warps_[MAX_WARPS];
    Barrier barriers_[BARRIERS];
    std::vector<Mbarrier> mbarriers_;
    std::vector<WarpgroupStep> warpgroups_[MAX_WARPS / 4];
    Warp* warp_ = nullptr;
    int live_warps_ = 0;
    int patience_ = 0; /* collectives until another warp may run */
    bool abandoned_ = false;
    bool strict_ = true;
    uint64_t random_ = 1;

    std::vector<uint8_t> smem_;
    AccessHistory history_;
    Footprint footprint_, before_; /* of this kernel, of the one before */
    bool some_waited_ = false, block_waited_ = false; /* for the chain: threads of the kernel, of the block */

    uint64_t fault_count_[(int)Fault::COUNT] = {0};
    std::vector<std::string> messages_;
    std::vector<Reported> reported_;
    Stats stats_ = {};
    TrafficCounter traffic_;
};

inline Machine machine;

inline void Machine::thread_entry() {
    machine.thread_main();
    internal_error("a finished thread was resumed");
}

#ifdef __linux__
inline std::vector<char> read_program() {
    std::vector<char> image;
    if (FILE* file = fopen("/proc/self/exe", "rb")) {
        char buffer[4096];
        for (size_t n; (n = fread(buffer, 1, sizeof buffer, file)) > 0;) {
            image.insert(image.end(), buffer, buffer + n);
        }
        fclose(file);
    }
    return image;
}
#endif

/* Looks the kernel up in the symbol table of the program; empty when there is none. */
inline std::string symbol_name(const void* function) {
#ifdef __linux__
    uintptr_t load_address = 0;
    /* The program itself comes first. */
    const auto take_first = [](struct dl_phdr_info* info, size_t, void* address) {
        *static_cast<uintptr_t*>(address) = info->dlpi_addr;
        return 1;
    };
    dl_iterate_phdr(take_first, &load_address);
    static const std::vector<char> image = read_program();
    if (image.size() < sizeof(ElfW(Ehdr))) return "";
    const auto at = [](size_t offset) { return image.data() + offset; };
    const auto* header = reinterpret_cast<const ElfW(Ehdr)*>(at(0));
    const auto* sections = reinterpret_cast<const ElfW(Shdr)*>(at(header->e_shoff));
    for (int s = 0; s < header->e_shnum; s++) {
        if (sections[s].sh_type != SHT_SYMTAB) continue;
        const auto* symbols = reinterpret_cast<const ElfW(Sym)*>(at(sections[s].sh_offset));
        const char* names = at(sections[sections[s].sh_link].sh_offset);
        for (size_t i = 0; i < sections[s].sh_size / sizeof *symbols; i++) {
            if (symbols[i].st_value + load_address != reinterpret_cast<uintptr_t>(function))
                continue;
            if ((symbols[i].st_info & 15) != STT_FUNC) continue;
            const char* name = names + symbols[i].st_name;
            char* readable = abi::__cxa_demangle(name, nullptr, nullptr, nullptr);
            const std::string result = readable ? readable : name;
            free(readable);
            return result.substr(0, result.rfind('('));
        }
    }
#else
    (void)function;
#endif
    return "";
}

inline std::string Machine::kernel_name() const {
    const std::string name = symbol_name(launch.kernel);
    if (!name.empty()) return name;
    return std::string("launched in ") + launch.site.name() + ":" +
           std::to_string(launch.site.line);
}

inline void set_seed(uint64_t seed) { machine.seed(seed); }
inline void set_strict(bool strict) { machine.strict(strict); }
inline void reset() { machine.reset(); }
inline uint64_t faults(Fault kind) { return machine.fault_count(kind); }
inline const std::vector<std::string>& messages() { return machine.fault_messages(); }

inline uint64_t faults() {
    uint64_t total = 0;
    for (int kind = 0; kind < (int)Fault::COUNT; kind++) total += faults((Fault)kind);
    return total;
}

inline Stats stats() {
    Stats s = machine.stats();
    s.worst_ways = 1;
    for (const Traffic& t : machine.traffic().table()) {
        s.instructions += t.instructions;
        s.wavefronts += t.wavefronts;
        s.ideal += t.ideal;
        if (t.worst_ways > s.worst_ways) {
            s.worst_ways = t.worst_ways;
            s.worst_site = t.site;
        }
    }
    return s;
}

inline std::vector<KernelTraffic> kernels() { return machine.traffic().kernels(); }

inline std::vector<Traffic> traffic() {
    std::vector<Traffic> sorted = machine.traffic().table();
    std::sort(sorted.begin(), sorted.end(), [](const Traffic& a, const Traffic& b) {
        return a.wavefronts - a.ideal > b.wavefronts - b.ideal;
    });
    return sorted;
}

/* ---- tensor cores ---------------------------------------------------------------------------- */

inline float float_from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

inline float decode_bf16(uint32_t half) { return float_from_bits(half << 16); }

inline float decode_f16(uint32_t half) {
    const uint32_t exponent = half >> 10 & 31, mantissa = half & 1023;
    float magnitude;
    if (exponent == 0) {
        magnitude = (float)mantissa * 0x1p-24f;
    } else {
        magnitude = float_from_bits((exponent == 31 ? 255 : exponent + 112) << 23 | mantissa << 13);
    }
    return half >> 15 ? -magnitude : magnitude;
}

inline float decode_tf32(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return float_from_bits(bits & 0xffffe000u);
}

/* C[16][8] += A[16][K] B[K][8] in fp32, k upwards. */
template <int K>
struct Product {
    typedef float Quad __attribute__((vector_size(16)));

    float a[16][K];
    alignas(16) float b[K][8];
    alignas(16) float c[16][8];

    void exchange_c(int lane, float* registers, bool to_lane) {
        for (int i = 0; i < 4; i++) {
            float& element = c[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2];
            if (to_lane) {
                registers[i] = element;
            } else {
                element = registers[i];
            }
        }
    }

    void multiply() {
        for (int row = 0; row < 16; row++) {
            Quad sum[2], factor[2];
            memcpy(sum, c[row], sizeof sum);
            for (int k = 0; k < K; k++) {
                memcpy(factor, b[k], sizeof factor);
                sum[0] += a[row][k] * factor[0];
                sum[1] += a[row][k] * factor[1];
            }
            memcpy(c[row], sum, sizeof sum);
        }
    }
};

struct Mma16 {
    float* c;
    const uint32_t* a;
    uint32_t b[2];
};

template <class Decode>
void perform_mma16(Mma16** lanes, Decode decode) {
    Product<16> p;
    for (int lane = 0; lane < LANES; lane++) {
        const int g = lane / 4, j = lane % 4;
        for (int i = 0; i < 4; i++) {
            float* element = &p.a[g + 8 * (i % 2)][2 * j + 8 * (i / 2)];
            element[0] = decode(lanes[lane]->a[i] & 0xffff);
            element[1] = decode(lanes[lane]->a[i] >> 16);
        }
        for (int i = 0; i < 2; i++) {
            p.b[2 * j + 8 * i][g] = decode(lanes[lane]->b[i] & 0xffff);
            p.b[2 * j + 8 * i + 1][g] = decode(lanes[lane]->b[i] >> 16);
        }
        p.exchange_c(lane, lanes[lane]->c, false);
    }
    p.multiply();
    for (int lane = 0; lane < LANES; lane++) p.exchange_c(lane, lanes[lane]->c, true);
}

/* The 16 rows of C[64][128] += A[64][8] B[8][128] that are the warp's; B^T lies in shared memory as
 * wgmma_operand() says. */
inline void Machine::perform(const Product64& p) {
    const uint64_t unknown = p.b & ~(0x3fffull | 0x3fffull << 16 | 0x3fffull << 32);
    const uint32_t start = (uint32_t)(p.b & 0x3fff) << 4;
    const uint32_t k_bytes = (uint32_t)(p.b >> 16 & 0x3fff) << 4;
    const uint32_t n_bytes = (uint32_t)(p.b >> 32 & 0x3fff) << 4;
    if (unknown) report(Fault::UNSUPPORTED, p.site, "a swizzled operand of wgmma");
    stats_.mma++;
    for (int tile = 0; tile < WGMMA_TILES; tile++) {
        Product<8> part;
        uint32_t addrs[16];
        for (int i = 0; i < 16; i++) { /* rows of 4 */
            float row[4];
            const int n = i % 8, k = i / 8;
            addrs[i] = start + (uint32_t)tile * n_bytes + 16u * (uint32_t)n + (uint32_t)k * k_bytes;
            read_async(row, addrs[i], p);
            for (int e = 0; e < 4; e++) part.b[4 * k + e][n] = decode_tf32(row[e]);
        }
        if (warp_index() % 4 == 0) count_matrices(addrs, 16, p.site); /* the others read along */
        for (int lane = 0; lane < LANES; lane++) {
            float c[4];
            for (int i = 0; i < 4; i++) {
                part.a[lane / 4 + 8 * (i % 2)][lane % 4 + 4 * (i / 2)] =
                    decode_tf32(take(lane, p.a[lane] + i));
                c[i] = take(lane, p.c[lane] + 4 * tile + i);
            }
            part.exchange_c(lane, c, false);
        }
        part.multiply();
        for (int lane = 0; lane < LANES; lane++) {
            float c[4];
            part.exchange_c(lane, c, true);
            for (int i = 0; i < 4; i++) give(lane, p.c[lane] + 4 * tile + i, &c[i], p.site);
        }
    }
    for (int lane = 0; lane < LANES; lane++)
        for (int i = 0; i < 4; i++) give(lane, p.a[lane] + i, nullptr, p.site);
}

struct Mma8 {
    float* c;
    const float* a;
    float b[2];
};

inline void perform_mma_tf32(Mma8** lanes) {
    Product<8> p;
    for (int lane = 0; lane < LANES; lane++) {
        const int g = lane / 4, j = lane % 4;
        for (int i = 0; i < 4; i++) {
            p.a[g + 8 * (i % 2)][j + 4 * (i / 2)] = decode_tf32(lanes[lane]->a[i]);
        }
        for (int i = 0; i < 2; i++) p.b[j + 4 * i][g] = decode_tf32(lanes[lane]->b[i]);
        p.exchange_c(lane, lanes[lane]->c, false);
    }
    p.multiply();
    for (int lane = 0; lane < LANES; lane++) p.exchange_c(lane, lanes[lane]->c, true);
}

/* ---- matrices and shuffles ------------------------------------------------------------------- */

/* Element pair that a lane holds of an 8 by 8 matrix. */
inline uint32_t matrix_pair(const uint16_t (*matrix)[8], int lane, bool transposed) {
    const int g = lane / 4, j = lane % 4;
    const uint32_t lo = transposed ? matrix[2 * j][g] : matrix[g][2 * j];
    const uint32_t hi = transposed ? matrix[2 * j + 1][g] : matrix[g][2 * j + 1];
    return lo | hi << 16;
}

struct LdMatrix {
    uint32_t addr;
    uint32_t* registers;
};

inline void load_matrices(int count, bool transposed, uint32_t* registers, uint32_t addr,
                          const Site& site) {
    LdMatrix mine = {addr, registers};
    machine.meet(Op::LDMATRIX, site, mine, [=](LdMatrix** lanes) {
        uint16_t rows[32][8];
        uint32_t addrs[32];
        for (int i = 0; i < 8 * count; i++) {
            addrs[i] = lanes[i]->addr;
            machine.load_row(rows[i], addrs[i], site);
        }
        machine.count_matrices(addrs, 8 * count, site);
        for (int lane = 0; lane < LANES; lane++) {
            for (int m = 0; m < count; m++) {
                lanes[lane]->registers[m] = matrix_pair(rows + 8 * m, lane, transposed);
            }
        }
    });
}

struct Shuffle {
    uint32_t value;
    int argument;
    uint32_t result;
};

/* source(lane, argument) is the lane to read from. */
template <class T, class Source>
T shuffle(T value, int argument, const Site& site, Source source) {
    static_assert(sizeof(T) == 4, "shuffles move 32 bits");
    Shuffle mine = {0, argument, 0};
    memcpy(&mine.value, &value, sizeof value);
    machine.meet(Op::SHUFFLE, site, mine, [source](Shuffle** lanes) {
        for (int lane = 0; lane < LANES; lane++) {
            lanes[lane]->result = lanes[source(lane, lanes[lane]->argument)]->value;
        }
    });
    memcpy(&value, &mine.result, sizeof value);
    return value;
}

struct BarrierCall {
    int id, threads;
};

inline void barrier(int id, int threads, const Site& site) {
    BarrierCall mine = {id, threads};
    machine.meet(Op::BARRIER_SYNC, site, mine, [site](BarrierCall** lanes) {
        const BarrierCall first = *lanes[0];
        for (int lane = 1; lane < LANES; lane++) {
            if (lanes[lane]->id == first.id && lanes[lane]->threads == first.threads) continue;
            machine.report(Fault::BARRIER, site, "lane 0 is at barrier %d, lane %d at barrier %d",
                           first.id, lane, lanes[lane]->id);
            machine.abandon();
        }
        machine.sync(first.id, first.threads, site);
    });
}

struct MbarrierCall {
    uint32_t addr;
    int parity;
};

inline void mbarrier(Op op, uint32_t addr, int parity, const Site& site) {
    MbarrierCall mine = {addr, parity};
    machine.meet(op, site, mine, [op, site](MbarrierCall** lanes) {
        const MbarrierCall first = *lanes[0];
        for (int lane = 1; lane < LANES; lane++) {
            if (lanes[lane]->addr == first.addr && lanes[lane]->parity == first.parity) continue;
            machine.report(Fault::BARRIER, site,
                           "lanes 0 and %d are at mbarriers %u bytes apart, parities %d and %d",
                           lane, lanes[lane]->addr - first.addr, first.parity, lanes[lane]->parity);
            machine.abandon();
        }
        if (op == Op::MBARRIER_ARRIVE) {
            machine.arrive(first.addr, site);
        } else {
            machine.wait(first.addr, first.parity, site);
        }
    });
}

} /* namespace emu */

/* ---- the primitives of gt_common.cuh, where they are described ------------------------------- */

namespace gt {

inline int thread_id() { return emu::machine.thread; }
inline int lane_id() { return emu::machine.thread % 32; }
inline int warp_id() { return emu::machine.thread / 32; }
inline int block_threads() { return emu::machine.launch.threads; }
inline int block_x() { return (int)emu::machine.block[0]; }
inline int block_y() { return (int)emu::machine.block[1]; }
inline int block_z() { return (int)emu::machine.block[2]; }
inline int grid_x() { return (int)emu::machine.launch.grid[0]; }
inline int grid_y() { return (int)emu::machine.launch.grid[1]; }
inline int grid_z() { return (int)emu::machine.launch.grid[2]; }

inline uint32_t smem_base() { return emu::SMEM_BASE; }

template <class T>
T lds(uint32_t addr, emu::Site site = emu::Site::here()) {
    static_assert(std::is_trivially_copyable<T>::value, "lds moves plain data");
    static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16,
                  "lds moves 2, 4, 8 or 16 bytes");
    T value;
    emu::machine.load(&value, addr, sizeof(T), site);
    return value;
}

template <class T>
void sts(uint32_t addr, T value, emu::Site site = emu::Site::here()) {
    static_assert(std::is_trivially_copyable<T>::value, "sts moves plain data");
    static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16,
                  "sts moves 2, 4, 8 or 16 bytes");
    emu::machine.store(&value, addr, sizeof(T), site);
}

template <class T>
T ldg(const void* source, emu::Site site = emu::Site::here()) {
    emu::machine.check_global(source, sizeof(T), site);
    emu::machine.touch_global(false, source, sizeof(T), site);
    T value;
    memcpy(&value, source, sizeof value);
    return value;
}

template <class T>
void stg(void* target, T value, emu::Site site = emu::Site::here()) {
    emu::machine.check_global(target, sizeof(T), site);
    emu::machine.touch_global(true, target, sizeof(T), site);
    memcpy(target, &value, sizeof value);
}

template <int BYTES>
void cp_async(uint32_t addr, const void* source, int copied = BYTES,
              emu::Site site = emu::Site::here()) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async moves 4, 8 or 16 bytes");
    emu::machine.copy(addr, source, BYTES, copied, site);
}

template <class T>
T* global_pointer(void* pointer) {
    return static_cast<T*>(pointer);
}

inline void wait_for_chain() { emu::machine.wait_for_chain(); }

inline void cp_async_commit() { emu::machine.commit_copies(); }

template <int N>
void cp_async_wait() {
    emu::machine.wait_copies(N);
}

inline void sync_warp(emu::Site site = emu::Site::here()) {
    char nothing = 0;
    emu::machine.meet(emu::Op::SYNC_WARP, site, nothing, [](char**) {});
}
inline void bar_sync(int id, int threads, emu::Site site = emu::Site::here()) {
    emu::barrier(id, threads, site);
}
inline void sync_threads(emu::Site site = emu::Site::here()) {
    emu::barrier(0, emu::machine.launch.threads, site);
}

inline void mbarrier_init(uint32_t addr, int threads, emu::Site site = emu::Site::here()) {
    emu::machine.init_mbarrier(addr, threads, site);
}
inline void mbarrier_arrive(uint32_t addr, emu::Site site = emu::Site::here()) {
    emu::mbarrier(emu::Op::MBARRIER_ARRIVE, addr, 0, site);
}
inline void mbarrier_wait(uint32_t addr, int parity, emu::Site site = emu::Site::here()) {
    emu::mbarrier(emu::Op::MBARRIER_WAIT, addr, parity, site);
}

template <class T>
T shfl_xor(T value, int mask, emu::Site site = emu::Site::here()) {
    return emu::shuffle(value, mask, site, [](int lane, int m) { return (lane ^ m) & 31; });
}
template <class T>
T shfl_up(T value, int distance, emu::Site site = emu::Site::here()) {
    return emu::shuffle(value, distance, site,
                        [](int lane, int d) { return lane >= d ? lane - d : lane; });
}
template <class T>
T shfl_down(T value, int distance, emu::Site site = emu::Site::here()) {
    return emu::shuffle(value, distance, site,
                        [](int lane, int d) { return lane + d < 32 ? lane + d : lane; });
}
template <class T>
T shfl_idx(T value, int lane, emu::Site site = emu::Site::here()) {
    return emu::shuffle(value, lane, site, [](int, int from) { return from & 31; });
}

inline void ldmatrix_x1(uint32_t& r, uint32_t addr, emu::Site site = emu::Site::here()) {
    emu::load_matrices(1, false, &r, addr, site);
}
inline void ldmatrix_x1_trans(uint32_t& r, uint32_t addr, emu::Site site = emu::Site::here()) {
    emu::load_matrices(1, true, &r, addr, site);
}
inline void ldmatrix_x2(uint32_t (&r)[2], uint32_t addr, emu::Site site = emu::Site::here()) {
    emu::load_matrices(2, false, r, addr, site);
}
inline void ldmatrix_x2_trans(uint32_t (&r)[2], uint32_t addr, emu::Site site = emu::Site::here()) {
    emu::load_matrices(2, true, r, addr, site);
}
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t addr, emu::Site site = emu::Site::here()) {
    emu::load_matrices(4, false, r, addr, site);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t addr, emu::Site site = emu::Site::here()) {
    emu::load_matrices(4, true, r, addr, site);
}

inline uint32_t movmatrix_trans(uint32_t r, emu::Site site = emu::Site::here()) {
    emu::Shuffle mine = {r, 0, 0};
    emu::machine.meet(emu::Op::MOVMATRIX, site, mine, [](emu::Shuffle** lanes) {
        uint16_t matrix[8][8];
        for (int lane = 0; lane < 32; lane++) {
            matrix[lane / 4][2 * (lane % 4)] = (uint16_t)lanes[lane]->value;
            matrix[lane / 4][2 * (lane % 4) + 1] = (uint16_t)(lanes[lane]->value >> 16);
        }
        for (int lane = 0; lane < 32; lane++) {
            lanes[lane]->result = emu::matrix_pair(matrix, lane, true);
        }
    });
    return mine.result;
}

inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                     emu::Site site = emu::Site::here()) {
    emu::Mma16 mine = {c, a, {b0, b1}};
    emu::machine.meet(emu::Op::MMA, site, mine, [site](emu::Mma16** lanes) {
        emu::machine.need_sm80("mma_bf16", site);
        emu::machine.stats().mma++;
        emu::perform_mma16(lanes, emu::decode_bf16);
    });
}

inline void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                    emu::Site site = emu::Site::here()) {
    emu::Mma16 mine = {c, a, {b0, b1}};
    emu::machine.meet(emu::Op::MMA, site, mine, [](emu::Mma16** lanes) {
        emu::machine.stats().mma++;
        emu::perform_mma16(lanes, emu::decode_f16);
    });
}

inline void mma_tf32(float (&c)[4], const float (&a)[4], float b0, float b1,
                     emu::Site site = emu::Site::here()) {
    emu::Mma8 mine = {c, a, {b0, b1}};
    emu::machine.meet(emu::Op::MMA, site, mine, [site](emu::Mma8** lanes) {
        emu::machine.need_sm80("mma_tf32", site);
        emu::machine.stats().mma++;
        emu::perform_mma_tf32(lanes);
    });
}

inline uint64_t wgmma_operand(uint32_t addr, uint32_t k_bytes, uint32_t n_bytes,
                              emu::Site site = emu::Site::here()) {
    if ((addr | k_bytes | n_bytes) % 16 != 0)
        emu::machine.report(emu::Fault::ALIGNMENT, site, "an operand of wgmma");
    return (uint64_t)(addr >> 4) | (uint64_t)(k_bytes >> 4) << 16 | (uint64_t)(n_bytes >> 4) << 32;
}

inline void wgmma_tf32(float (&c)[emu::WGMMA_TILES][4], const float (&a)[4], uint64_t b,
                       emu::Site site = emu::Site::here()) {
    struct Operands {
        float* c;
        const float* a;
        uint64_t b;
    } mine = {c[0], a, b};
    emu::machine.meet(emu::Op::WGMMA, site, mine, [site](Operands** lanes) {
        emu::Product64 product = {};
        product.site = site;
        product.b = lanes[0]->b;
        for (int lane = 0; lane < 32; lane++) {
            product.c[lane] = lanes[lane]->c;
            product.a[lane] = lanes[lane]->a;
            if (lanes[lane]->b != product.b)
                emu::machine.report(emu::Fault::WGMMA, site,
                                    "lanes 0 and %d have different operands", lane);
        }
        emu::machine.start_product(product);
    });
}

inline void wgmma_fence(emu::Site site = emu::Site::here()) {
    char nothing = 0;
    emu::machine.meet(emu::Op::WGMMA_FENCE, site, nothing,
                      [site](char**) { emu::machine.fence_registers(site); });
}
inline void wgmma_commit(emu::Site site = emu::Site::here()) {
    char nothing = 0;
    emu::machine.meet(emu::Op::WGMMA_COMMIT, site, nothing,
                      [site](char**) { emu::machine.commit_products(site); });
}
template <int N>
void wgmma_wait(emu::Site site = emu::Site::here()) {
    char nothing = 0;
    emu::machine.meet(emu::Op::WGMMA_WAIT, site, nothing,
                      [site](char**) { emu::machine.wait_products(N, site); });
}
inline void fence_async_proxy(emu::Site site = emu::Site::here()) {
    char nothing = 0;
    emu::machine.meet(emu::Op::FENCE_PROXY, site, nothing,
                      [site](char**) { emu::machine.fence_proxy(site); });
}

struct Grid {
    unsigned x, y = 1, z = 1;
};

template <class Params>
cudaError_t launch(void (*kernel)(Params), Grid grid, unsigned threads, size_t smem_bytes,
                   cudaStream_t /*stream*/, const Params& params, bool follows = false,
                   emu::Site site = emu::Site::here()) {
    static_assert(std::is_trivially_copyable<Params>::value, "parameters are copied bit by bit");
    const bool fits = grid.x > 0 && grid.y > 0 && grid.z > 0 && grid.x <= 0x7fffffffu &&
                      grid.y <= 65535 && grid.z <= 65535 && threads > 0 &&
                      threads <= (unsigned)emu::MAX_THREADS;
    if (!fits || threads % emu::LANES != 0) return cudaErrorInvalidConfiguration;
    if (smem_bytes > (size_t)emu::device.smem_per_block) return cudaErrorInvalidValue;
    emu::Launch what = {};
    what.kernel = reinterpret_cast<const void*>(kernel);
    what.params = &params;
    what.call = [](const void* function, const void* p) {
        reinterpret_cast<void (*)(Params)>(const_cast<void*>(function))(
            *static_cast<const Params*>(p));
    };
    what.grid[0] = grid.x;
    what.grid[1] = grid.y;
    what.grid[2] = grid.z;
    what.threads = (int)threads;
    what.warps = (int)(threads / emu::LANES);
    what.smem_bytes = (uint32_t)smem_bytes;
    what.follows = follows;
    what.site = site;
    emu::machine.run(what);
    return cudaSuccess;
}

} /* namespace gt */

#endif /* GT_EMU_H */
