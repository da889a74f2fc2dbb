/* gt/emu/machine.h - the emulated machine.  It runs the blocks of a launch and checks every access and barrier of their
 * threads. */
#ifndef GT_EMU_MACHINE_H
#define GT_EMU_MACHINE_H

#include "banks.h"

namespace emu {

enum class Op {
    SHUFFLE,
    SYNC_WARP,
    MBARRIER_ARRIVE,
    MBARRIER_WAIT,
    MBARRIER_EXPECT,
    COPIES_ARRIVE,
    BULK_LOAD,
    BULK_STORE,
    BULK_COMMIT,
    BULK_WAIT,
    FENCE_PROXY,
    BARRIER_SYNC, /* PTX calls this operation and all below .aligned */
    LDMATRIX,
    STMATRIX,
    MOVMATRIX,
    MMA,
    WGMMA,
    WGMMA_FENCE,
    WGMMA_COMMIT,
    WGMMA_WAIT,
    REGISTERS
};

inline const char* op_name(Op op) {
    static const char* const names[] = {"shuffle",
                                        "sync_warp",
                                        "mbarrier_arrive",
                                        "mbarrier_wait",
                                        "mbarrier_arrive_expect",
                                        "cp_async_arrive",
                                        "bulk_load",
                                        "bulk_store",
                                        "bulk_commit",
                                        "bulk_wait",
                                        "fence_async_proxy",
                                        "bar_sync",
                                        "ldmatrix",
                                        "stmatrix",
                                        "movmatrix",
                                        "mma",
                                        "wgmma",
                                        "wgmma_fence",
                                        "wgmma_commit",
                                        "wgmma_wait",
                                        "setmaxnreg"};
    return names[(int)op];
}

struct Copy {
    uint32_t addr;
    const void* source;
    int bytes, copied;
};

typedef uint32_t __attribute__((may_alias)) Word;

/* Registers that a warp's wgmma products use as one operand.  Each lane has an array of them. */
struct RegisterBlock {
    Word* at[LANES];
    int count;        /* registers of a lane */
    int products;     /* products in flight that use the registers */
    bool accumulates; /* true: accumulators; false: operand A */
    /* [lane][count]: the contents when the products in flight started; without products, at the last wgmma_fence */
    std::vector<uint32_t> values;
    std::vector<float> sums; /* accumulators of products in flight, the warp's 16 rows */

    bool is(Word* const* registers, int n) const { return n == count && std::equal(at, at + LANES, registers); }
    bool overlaps(Word* const* registers, int n) const {
        return registers[0] < at[0] + count && at[0] < registers[0] + n;
    }
};

constexpr uint32_t IN_FLIGHT_BITS = 0xffdecade; /* a NaN that no arithmetic makes */
constexpr size_t MOST_BLOCKS = 64;              /* operands that a warp remembers */

struct Thread {
    Fiber fiber;
    std::vector<Copy> copies;   /* cp.async copies in flight, oldest first */
    size_t landed;              /* number of copies that have landed before these */
    std::vector<size_t> groups; /* for each committed group, its end in `copies` */
};

enum class Format { TF32, F16, BF16 };

/* A product of a warpgroup. */
struct Wgmma {
    Format format;
    int columns;
    bool accumulates, a_is_shared, a_is_mn, b_is_mn;
    uint64_t a, b; /* descriptors of operands in shared memory */

    int depth() const { return format == Format::TF32 ? 8 : 16; }
    bool operator==(const Wgmma& x) const {
        return format == x.format && columns == x.columns && accumulates == x.accumulates &&
               a_is_shared == x.a_is_shared && a_is_mn == x.a_is_mn && b_is_mn == x.b_is_mn && a == x.a && b == x.b;
    }
};

/* A read of shared memory that may last until a later wait. `before` is the warp's clock when the read starts. */
struct AsyncRead {
    Site site;
    Clock before;
    Clock before_fence; /* the warp's clock at its latest fence_async_proxy before the read */
};

/* A tensor in global memory and the box that bulk copies move (gt/base/bulk.cuh). */
struct TensorMap {
    char* data;
    int element; /* bytes, like strides */
    bool swizzled;
    int64_t size[3], stride[3];
    int box[3];

    uint32_t box_bytes() const { return (uint32_t)(box[0] * box[1] * box[2] * element); }
};

/* The global side of a bulk copy: adjacent bytes, or a box of a tensor. */
struct BulkSide {
    char* bytes = nullptr;
    TensorMap tensor = {};
    int at[3] = {0, 0, 0};

    BulkSide() = default;
    explicit BulkSide(const void* p) : bytes(static_cast<char*>(const_cast<void*>(p))) {}
    BulkSide(const TensorMap* map, const int* start) : tensor(*map) { std::copy(start, start + 3, at); }

    bool is_box() const { return bytes == nullptr; }

    /* Returns the address of element (x, y, z) of the box, or null if it lies outside of the tensor. */
    char* element(int x, int y, int z) const {
        const int64_t index[3] = {(int64_t)at[0] + x, (int64_t)at[1] + y, (int64_t)at[2] + z};
        char* p = tensor.data;
        for (int i = 0; i < 3; i++) {
            if (index[i] < 0 || index[i] >= tensor.size[i]) return nullptr;
            p += index[i] * tensor.stride[i];
        }
        return p;
    }

    /* Returns the shared address of byte number `byte` of the copy. */
    uint32_t place(uint32_t addr, uint32_t byte) const {
        const uint32_t row = (uint32_t)(tensor.box[0] * tensor.element);
        const uint32_t plain = addr + byte;
        return is_box() && tensor.swizzled ? plain ^ (plain >> 7 & (row / 16 - 1)) << 4 : plain;
    }

    /* Calls visit(global, shared address, bytes) for every piece. `global` is null for pieces outside of the tensor. */
    template <class Visit>
    void pieces(uint32_t addr, uint32_t count, Visit visit) const {
        if (!is_box()) {
            visit(bytes, addr, count);
            return;
        }
        const int per_piece = 16 / tensor.element;
        uint32_t byte = 0;
        for (int z = 0; z < tensor.box[2]; z++) {
            for (int y = 0; y < tensor.box[1]; y++) {
                for (int x = 0; x < tensor.box[0]; x += per_piece, byte += 16) {
                    char* first = element(x, y, z);
                    if (first && element(x + per_piece - 1, y, z)) {
                        visit(first, place(addr, byte), 16u);
                        continue;
                    }
                    for (int e = 0; e < per_piece; e++) {
                        const uint32_t bytes = (uint32_t)tensor.element;
                        visit(element(x + e, y, z), place(addr, byte + (uint32_t)e * bytes), bytes);
                    }
                }
            }
        }
    }
};

/* A bulk copy from shared to global memory. */
struct BulkStore : AsyncRead {
    BulkSide target;
    uint32_t addr, bytes;
};

/* An event at an mbarrier: a bulk load lands, or a warp's copies arrive.  A warp has started the event, and the
 * emulation delays it as long as possible. */
struct Event {
    Site site;
    int warp;
    uint32_t barrier, phase; /* phase: the barrier's phase when the warp started the event */
    uint32_t epoch;          /* an epoch of the warp for this event alone */
    Clock before;
    /* bytes > 0: a bulk load to addr.  bytes = 0: an arrival, after landed[i] copies of each lane i have landed. */
    uint32_t addr, bytes;
    BulkSide source;
    size_t landed[LANES];
};

/* One warp's part of a product in flight. */
struct WarpProduct : AsyncRead {
    Wgmma what;
    size_t c, a; /* indices of C and A in Warp::blocks */
    size_t step; /* number of the operation in the warpgroup's sequence */
};

/* B of a product, read once and shared by the warpgroup's 4 warps. */
struct UnpackedB {
    size_t step;
    int warps; /* warps that have used B */
    std::vector<float> values;
};

struct ProxyFence {
    uint32_t epoch; /* epoch of the warp's writes before the fence */
    Clock before;
};

struct Warp {
    uint32_t live;  /* lanes that have not returned */
    uint32_t ready; /* lanes that can continue */
    bool waits;     /* a barrier blocks the whole warp */
    int arrived;    /* lanes that have reached the current collective (op, site) */
    int first_lane;
    Op op;
    Site site;
    void* operands[LANES];
    uint32_t epoch; /* epoch of the warp's current accesses */
    Clock before;   /* accesses of other warps that come before the warp's next access */
    AccessLog log;
    std::vector<ProxyFence> proxy_fences;
    std::vector<uint32_t> async_epochs; /* epochs in which only bulk loads wrote */
    std::vector<BulkStore> stores;      /* stores in flight, oldest first */
    std::vector<size_t> store_groups;   /* for each committed group, its end in `stores` */
    int registers;                      /* registers of a thread, as set by setmaxnreg; 0: as launched */
    Clock before_fence;                 /* `before` at the latest fence_async_proxy */
    std::vector<WarpProduct> products;  /* products in flight, oldest first */
    std::vector<size_t> groups;         /* for each committed group, its end in `products` */
    std::vector<RegisterBlock> blocks;  /* register operands that products have used */
    size_t next_block;                  /* where the search for a reusable element of `blocks` starts */
    bool fenced;                        /* a wgmma_fence came after the last wait */
    size_t steps;                       /* operations of its warpgroup that the warp has executed */
};

/* One operation in a warpgroup's sequence.  All 4 warps execute the sequence in order. */
struct WarpgroupStep {
    Op op;
    Site site;
    uint64_t argument;
    Wgmma product;
};

struct Barrier {
    int expected, arrived; /* numbers of threads; the first arrival sets `expected` */
    uint32_t waiting;
    Clock clock;
};

struct Mbarrier {
    uint32_t addr;
    int expected, arrived; /* numbers of threads in the current phase */
    int64_t bytes;         /* bytes of bulk copies that have not landed yet */
    uint32_t phase;        /* number of the current phase, from 0 */
    uint32_t warps;        /* warps that have arrived in the current phase */
    uint32_t by_thread;    /* arrived warps that called mbarrier_arrive */
    uint32_t by_copies;    /* arrived warps that called cp_async_arrive */
    uint32_t waiting;      /* warps that wait for the end of the current phase */
    uint32_t waiters;      /* warps that have waited at this barrier at least once */
    uint32_t seen;         /* waiters that know that the previous phase is complete */
    Clock arriving;        /* clocks that arrivals of the current phase release */
    Clock complete;        /* clocks that arrivals of the previous phase released */
};

constexpr uint64_t MBARRIER_MARK = 0x7265697272616d62u; /* contents of an mbarrier's memory */

struct Launch {
    const void* kernel;
    const void* params;
    void (*call)(const void* kernel, const void* params);
    unsigned grid[3];
    int threads, warps;
    uint32_t smem_bytes;
    bool follows; /* comes after another kernel in the chain */
    Site site;
};

/* The bytes of global memory that a kernel has read, and the bytes that it has written. */
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

    /* Call this before touches(). */
    void merge() {
        for (auto& ranges : of_) merge(ranges);
    }

    void add(const Footprint& other) {
        for (int i = 0; i < 2; i++) of_[i].insert(of_[i].end(), other.of_[i].begin(), other.of_[i].end());
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
    int thread = -1; /* the running thread; -1: the scheduler, or no kernel */

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
        if (released_early_) footprint_.add(before_); /* this kernel may overlap the previous two */
        std::swap(before_, footprint_);
        footprint_.clear();
        if (launch.follows) before_.merge();
        some_waited_ = released_early_ = false;
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
            report(Fault::CHAIN, launch.site, "no thread waits for the kernels before it");
    }

    void wait_for_chain() { block_waited_ = some_waited_ = true; }
    void release_chain() { released_early_ |= launch.follows && !block_waited_; }

    void touch_global(bool writes, const void* pointer, size_t bytes, const Site& site) {
        const uintptr_t first = reinterpret_cast<uintptr_t>(pointer);
        footprint_.add(writes, first, bytes);
        if (!launch.follows || block_waited_) return;
        const bool written = before_.touches(true, first, bytes);
        if (written || (writes && before_.touches(false, first, bytes)))
            report(Fault::CHAIN, site, "%s of %p without waiting for the kernel before, which %s the same memory",
                   writes ? "write" : "read", pointer, written ? "writes" : "reads");
    }

    __attribute__((format(printf, 4, 5))) void report(Fault kind, const Site& site, const char* format, ...) {
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
        message += std::string(fault_name(kind)) + ": " + detail + "; kernel " + kernel_name() + place;
        if (thread >= 0) message += " thread " + std::to_string(thread);
        messages_.push_back(message);
    }

    /* Ends the launch from inside a kernel, after a fault that makes the rest meaningless. */
    void abandon() {
        abandoned_ = true;
        if (!between_) enter(-1, false); /* while an event happens, the caller returns instead */
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

    /* Reads a row of a matrix.  All lanes of the warp make this access together. */
    void load_row(void* row, uint32_t addr, const Site& site) {
        if (!legal(addr, 16, 16, "ldmatrix", site)) {
            memset(row, 0xff, 16);
            return;
        }
        read(row, addr, 16, WHOLE_WARP, site);
    }

    void store_row(const void* row, uint32_t addr, const Site& site) {
        if (!legal(addr, 16, 16, "stmatrix", site)) return;
        write(addr, 16, stamp(), site);
        memcpy(&smem_[addr - SMEM_BASE], row, 16);
    }

    void count_matrices(const uint32_t* addrs, int rows, const Site& site, bool stores = false) {
        uint8_t lanes[LANES];
        for (int i = 0; i < rows; i++) lanes[i] = (uint8_t)i;
        traffic_.count(Access{site, 0, 16, stores}, addrs, lanes, rows);
    }

    /* Reports a use of a primitive that traps before sm_80. */
    void need_sm80(const char* what, const Site& site) {
        if (device.capability_major >= 8) return;
        report(Fault::UNSUPPORTED, site, "%s does not exist on sm_%d%d", what, device.capability_major,
               device.capability_minor);
    }

    void need_sm90(const char* what, const Site& site) {
        if (device.capability_major == 9) return;
        report(Fault::UNSUPPORTED, site, "%s does not exist on sm_%d%d", what, device.capability_major,
               device.capability_minor);
    }

    void check_global(const void* pointer, size_t bytes, const Site& site) {
        if (reinterpret_cast<uintptr_t>(pointer) % bytes == 0) return;
        report(Fault::ALIGNMENT, site, "access of %zu bytes to the global address %p, which is not aligned", bytes,
               pointer);
    }

    void copy(uint32_t addr, const void* source, int bytes, int copied, const Site& site) {
        if (copied < 0 || copied > bytes || copied % 2 != 0) {
            report(Fault::COPY, site, "cp_async of %d bytes: the count %d must be even, and from 0 to the size", bytes,
                   copied);
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
        t.groups.erase(t.groups.begin(), t.groups.begin() + (ptrdiff_t)done);
        const size_t landed = t.landed + end;
        for (const Event& e : events_) /* copies before a cp_async_arrive get its epoch, which mbarrier_wait acquires */
            if (e.bytes == 0 && e.warp == warp_index())
                land_until(t, std::min(landed, e.landed[lane()]), stamp_of(e.epoch, (uint32_t)thread));
        land_until(t, landed, stamp());
    }

    /* -- collectives -- */

    int lane() const { return thread % LANES; }

    /* A collective: waits until all lanes of the warp have arrived.  Then the last lane calls perform(operands of all
     * lanes) once for the warp. */
    template <class Operands, class Perform>
    void meet(Op op, const Site& site, Operands& mine, Perform perform) {
        if (thread < 0) internal_error("primitive used outside a kernel");
        Warp& w = *warp_;
        if (w.arrived == 0) {
            w.op = op;
            w.site = site;
            w.first_lane = lane();
        } else if (w.op != op || (op >= Op::BARRIER_SYNC && w.site != site)) {
            report(Fault::DIVERGENCE, site, "is at %s, while lane %d of the warp is at %s in %s:%d", op_name(op),
                   w.first_lane, op_name(w.op), w.site.name(), w.site.line);
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
        if (orders && (op == Op::LDMATRIX || op == Op::STMATRIX)) next_epoch(w);
        if (w.waits) {
            w.ready = 0;
            give_way(false);
            return;
        }
        w.ready = w.live;
        if (--patience_ <= 0) enter(-1, false);
    }

    void sync(int id, int threads, const Site& site) {
        if (id < 0 || id >= BARRIERS || threads <= 0 || threads % LANES != 0 || threads > launch.threads) {
            report(Fault::BARRIER, site,
                   "barrier %d is for %d threads: must be a multiple of 32, at most the %d threads of the block", id,
                   threads, launch.threads);
            abandon();
        }
        Barrier& b = barriers_[id];
        if (b.arrived == 0) b.expected = threads;
        if (b.expected != threads) {
            report(Fault::BARRIER, site, "barrier %d for %d threads, but other threads passed %d", id, threads,
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
            report(Fault::BARRIER, site,
                   "an mbarrier is for %d threads: must be a multiple of 32, at most the %d threads of the block",
                   threads, launch.threads);
            abandon();
        }
        write(addr, 8, stamp(), site);
        memcpy(&smem_[addr - SMEM_BASE], &MBARRIER_MARK, 8);
        Mbarrier fresh = {};
        fresh.addr = addr;
        fresh.expected = threads;
        for (Mbarrier& m : mbarriers_) {
            if (m.addr != addr) continue;
            report(Fault::BARRIER, site, "mbarrier_init of %s, which already exists", mbarrier_name(m).c_str());
            m = fresh;
            return;
        }
        mbarriers_.push_back(fresh);
    }

    void end_mbarrier(uint32_t addr, const Site& site) {
        if (!legal(addr, 8, 8, "mbarrier_inval", site)) return;
        const auto is_it = [=](const Mbarrier& m) { return m.addr == addr; };
        const auto m = std::find_if(mbarriers_.begin(), mbarriers_.end(), is_it);
        if (m == mbarriers_.end()) {
            report(Fault::BARRIER, site, "mbarrier_inval at smem_base() + %u, where there is no mbarrier",
                   addr - SMEM_BASE);
            return;
        }
        check_mbarrier_idle(*m, site);
        if (m->waiting) report(Fault::BARRIER, site, "%s ends while warps wait at it", mbarrier_name(*m).c_str());
        write(addr, 8, stamp(), site);
        memset(&smem_[addr - SMEM_BASE], 0, 8);
        mbarriers_.erase(m);
    }

    void arrive(uint32_t addr, uint32_t bytes, const Site& site) {
        Mbarrier& m = mbarrier_at(addr, "mbarrier_arrive", site);
        m.bytes += bytes;
        count_arrival(m, m.by_thread, warp_->before, warp_->epoch, site);
        begin_epoch(*warp_);
    }

    /* Arrives at a barrier when all copies that the warp has issued have landed. */
    void arrive_after_copies(uint32_t addr, const Site& site) {
        Event event = start_event(addr, "cp_async_arrive", site);
        for (int i = 0; i < LANES; i++) {
            const Thread& t = threads_[warp_index() * LANES + i];
            event.landed[i] = t.landed + t.copies.size();
        }
        events_.push_back(event);
    }

    void wait(uint32_t addr, int parity, const Site& site) {
        Mbarrier& m = mbarrier_at(addr, "mbarrier_wait", site);
        if (parity != 0 && parity != 1) {
            report(Fault::BARRIER, site, "parity %d at %s: must be 0 or 1", parity, mbarrier_name(m).c_str());
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

    /* -- bulk copies; their bodies are in bulk.h -- */

    void start_load(uint32_t addr, const BulkSide& source, uint32_t bytes, uint32_t barrier, const Site& site);
    void start_store(const BulkSide& target, uint32_t addr, uint32_t bytes, const Site& site);
    void commit_stores() { warp_->store_groups.push_back(warp_->stores.size()); }
    void wait_stores(size_t groups_left);

    /* -- warpgroups -- */

    void set_registers(int count, bool takes, const Site& site) {
        if (!step(Op::REGISTERS, site, (uint64_t)count)) return;
        if (warp_->registers && (takes ? count < warp_->registers : count > warp_->registers))
            report(Fault::WGMMA, site, "warp %d %s registers: it had %d per thread, and would then have %d",
                   warp_index(), takes ? "takes" : "gives", warp_->registers, count);
        warp_->registers = count;
    }

    void fence_proxy(const Site& site) {
        need_sm90("fence_async_proxy", site);
        warp_->proxy_fences.push_back({warp_->epoch, warp_->before});
        warp_->before_fence = warp_->before;
        begin_epoch(*warp_);
    }

    void start_product(const Wgmma& what, Word* const* c, Word* const* a, const Site& site);
    void fence_registers(const Site& site);

    void commit_products(const Site& site) {
        if (step(Op::WGMMA_COMMIT, site, 0)) warp_->groups.push_back(warp_->products.size());
    }

    void wait_products(size_t groups_left, const Site& site) {
        if (!step(Op::WGMMA_WAIT, site, groups_left)) return;
        warp_->fenced = false;
        std::vector<size_t>& groups = warp_->groups;
        if (groups.size() <= groups_left) return;
        const size_t done = groups.size() - groups_left, end = groups[done - 1];
        std::vector<WarpProduct>& products = warp_->products;
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

    /* Checks an operation that all 4 warps of a warpgroup must execute in the same order.  Returns false if the warp
     * belongs to no whole warpgroup. */
    bool step(Op op, const Site& site, uint64_t argument, const Wgmma& product = {}) {
        need_sm90(op_name(op), site);
        const int group = warp_index() / 4;
        if (4 * group + 4 > launch.warps) {
            report(Fault::WGMMA, site, "%s by warp %d of %d, which is not in a whole warpgroup", op_name(op),
                   warp_index(), launch.warps);
            return false;
        }
        std::vector<WarpgroupStep>& steps = warpgroups_[group];
        const WarpgroupStep now = {op, site, argument, product};
        if (warp_->steps++ == steps.size()) steps.push_back(now);
        const WarpgroupStep& first = steps[warp_->steps - 1];
        if (first.op == op && first.site == site && first.argument == argument && first.product == product) return true;
        report(Fault::WGMMA, site,
               "%s of warp %d: another warp of its warpgroup runs %s in %s:%d here, or passes other arguments",
               op_name(op), warp_index(), op_name(first.op), first.site.name(), first.site.line);
        return true;
    }

    /* events: bodies are in bulk.h */
    Event start_event(uint32_t barrier, const char* what, const Site& site);
    void count_arrival(Mbarrier& m, uint32_t& already, const Clock& before, uint32_t epoch, const Site& site);
    void check_phase(Mbarrier& m, const Site& site);
    Event next_event();
    void happen(const Event& event);
    bool check_box(const BulkSide& box, bool writes, const Site& site);
    bool check_bulk(const BulkSide& side, uint32_t addr, uint32_t bytes, bool writes, const char* what,
                    const Site& site);
    void check_copies_idle();

    /* products: bodies are in warpgroup.h */
    size_t take_block(Word* const* at, int count, bool accumulates, bool changed_matters, const Site& site);
    void give_block(RegisterBlock& block, const Site& site);
    void perform(const WarpProduct& p);
    const std::vector<float>& unpack_b(const WarpProduct& p);
    void unpack_a(const WarpProduct& p, float (*a)[16]);

    /* Reads a piece of 16 bytes for an asynchronous read.  Besides the checks of read(), checks the fences between
     * proxies. */
    void read_async(void* piece, uint32_t addr, const AsyncRead& reader, const char* what) {
        if (!legal(addr, 16, 16, what, reader.site)) {
            memset(piece, 0xff, 16);
            return;
        }
        const uint32_t offset = addr - SMEM_BASE;
        uint32_t conflict;
        const int64_t bad =
            history_.read(offset / 2, 8, warp_index(), WHOLE_WARP, warp_->epoch, reader.before, &conflict);
        if (bad >= 0) report_conflict(what, bad, conflict, reader.site);
        memcpy(piece, &smem_[offset], 16);
        if (bad < 0) check_proxy(offset / 2, 8, reader, what);
    }

    /* Returns whether some warp called fence_async_proxy between the write and the read.  This may be the writing or
     * the reading warp, or a warp that acquired the data from the first and released them to the second. */
    bool is_fenced(uint32_t epoch, uint32_t writer, const AsyncRead& reader) const {
        if (epoch <= reader.before_fence.epoch[writer]) return true;
        for (uint32_t w = 0; w < (uint32_t)launch.warps; w++) {
            const std::vector<ProxyFence>& fences = warps_[w].proxy_fences;
            const auto after = std::upper_bound(fences.begin(), fences.end(), reader.before.epoch[w],
                                                [](uint32_t e, const ProxyFence& f) { return e < f.epoch; });
            if (after == fences.begin()) continue;
            if (epoch <= (w == writer ? after[-1].epoch : after[-1].before.epoch[writer])) return true;
        }
        return false;
    }

    /* Checks that a fence stands between each write by the generic proxy and this access by the asynchronous proxy. */
    void check_proxy(uint32_t first, uint32_t count, const AsyncRead& reader, const char* what) {
        uint32_t accepted = NEVER_WRITTEN;
        for (uint32_t cell = first; cell < first + count; cell++) {
            const uint32_t written = history_.writer(cell), writer = thread_of(written) / LANES;
            if (written == accepted || written == NEVER_WRITTEN) continue;
            accepted = written;
            if (is_fenced(epoch_of(written), writer, reader)) continue;
            const std::vector<uint32_t>& async = warps_[writer].async_epochs;
            if (std::binary_search(async.begin(), async.end(), epoch_of(written))) continue;
            report(Fault::PROXY, reader.site, "%s at smem_base() + %u without a fence_async_proxy since warp %u wrote",
                   what, 2 * cell, writer);
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

    uint32_t stamp() const { return stamp_of(warp_->epoch, (uint32_t)thread); }

    int warp_index() const { return thread / LANES; }
    uint32_t own_bit() const { return 1u << warp_index(); }

    void begin_epoch(Warp& w) {
        if (++w.epoch >= EPOCH_IN_FLIGHT - 1) internal_error("too many epochs of a warp in one block");
    }

    /* Begins a new epoch, so that the lanes' earlier accesses come before their later ones. */
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
            if (!runnable && !events_.empty()) {
                happen(next_event());
                if (abandoned_) break;
                continue;
            }
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
        if (good) check_copies_idle();
        return good;
    }

    void start_block() {
        stats_.blocks++;
        block_waited_ = false;
        std::fill(smem_.begin(), smem_.end(), (uint8_t)0xff);
        history_.start_block(launch.smem_bytes, launch.warps);
        memset(barriers_, 0, sizeof barriers_);
        mbarriers_.clear();
        events_.clear();
        for (auto& steps : warpgroups_) steps.clear();
        for (auto& unpacked : unpacked_) unpacked.clear();
        for (int i = 0; i < launch.threads; i++) {
            threads_[i].fiber.start(thread_entry, i, abandoned_);
            threads_[i].copies.clear();
            threads_[i].groups.clear();
            threads_[i].landed = 0;
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
            w.async_epochs.clear();
            w.stores.clear();
            w.store_groups.clear();
            w.registers = 0;
            memset(&w.before_fence, 0, sizeof w.before_fence);
            w.products.clear();
            w.groups.clear();
            w.blocks.clear();
            w.next_block = 0;
            w.fenced = false;
            w.steps = 0;
        }
        live_warps_ = launch.warps;
        abandoned_ = false;
    }

    /* Runs a warp until it blocks or another warp's turn comes.  Returns false if the block cannot continue. */
    bool run_warp(int index) {
        warp_ = &warps_[index];
        patience_ = 1 + (int)(random() % 8);
        enter(index * LANES + lowest_bit(warp_->ready), false);
        if (abandoned_) return false;
        if (warp_->live == 0) {
            live_warps_--;
        } else if (warp_->ready == 0 && !warp_->waits) {
            thread = index * LANES + warp_->first_lane;
            report(Fault::DIVERGENCE, warp_->site, "%d lanes are at %s, the others have returned", warp_->arrived,
                   op_name(warp_->op));
            return false;
        }
        return true;
    }

    /* Switches to another lane of the warp that can run, or to the scheduler if there is none. */
    void give_way(bool ended) {
        const uint32_t ready = warp_->ready;
        const uint32_t above = ready & ~((2u << lane()) - 1u);
        const int base = thread - lane();
        enter(ready == 0 ? -1 : base + lowest_bit(above ? above : ready), ended);
    }

    /* Switches from the running fiber to the fiber of thread `next`, or with -1 to the scheduler. */
    void enter(int next, bool ended) {
        Fiber& from = thread < 0 ? scheduler_ : threads_[thread].fiber;
        thread = next;
        stats_.switches++;
        switch_fiber(from, next < 0 ? scheduler_ : threads_[next].fiber, ended);
    }

    static void thread_entry();

    void thread_main() {
#ifdef EMU_ASAN
        /* The scheduler enters the first fiber here: record the bounds of the host's stack. */
        const void* bottom;
        size_t bytes;
        __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
        if (!scheduler_.bottom) {
            scheduler_.bottom = bottom;
            scheduler_.bottom_bytes = bytes;
        }
#endif
        launch.call(launch.kernel, launch.params);
        size_t awaited = current().landed; /* copies that have landed or that a cp_async_arrive covers */
        for (const Event& e : events_)
            if (e.bytes == 0 && e.warp == warp_index()) awaited = std::max(awaited, e.landed[lane()]);
        const size_t started = current().landed + current().copies.size();
        if (started > awaited)
            report(Fault::COPY, launch.site, "returns while %zu copies are in flight", started - awaited);
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
            report(Fault::BOUNDS, site, "%s of %u bytes at smem_base() %+d, but shared memory has %u bytes", what,
                   bytes, (int)offset, launch.smem_bytes);
            return false;
        }
        if (offset & (alignment - 1)) { /* alignment is a power of two */
            report(Fault::ALIGNMENT, site, "%s of %u bytes at smem_base() + %u, which is not aligned", what, bytes,
                   offset);
            return false;
        }
        return true;
    }

    void read(void* value, uint32_t addr, uint32_t bytes, uint32_t lane, const Site& site) {
        const uint32_t offset = addr - SMEM_BASE;
        uint32_t conflict;
        const int64_t bad =
            history_.read(offset / 2, bytes / 2, warp_index(), lane, warp_->epoch, warp_->before, &conflict);
        if (bad >= 0) report_conflict("read", bad, conflict, site);
        memcpy(value, &smem_[offset], bytes);
    }

    void write(uint32_t addr, uint32_t bytes, uint32_t mark, const Site& site) {
        uint32_t conflict;
        const int64_t bad = history_.write((addr - SMEM_BASE) / 2, bytes / 2, thread / LANES, (uint32_t)lane(),
                                           warp_->before, mark, &conflict);
        if (bad >= 0) report_conflict("write", bad, conflict, site);
    }

    void report_conflict(const char* what, int64_t cell, uint32_t conflict, const Site& site) {
        const long offset = (long)cell * 2;
        if (conflict == NEVER_WRITTEN) {
            report(Fault::UNINITIALISED, site, "%s at smem_base() + %ld", what, offset);
        } else if (epoch_of(conflict) == EPOCH_IN_FLIGHT) {
            report(Fault::IN_FLIGHT, site, "%s at smem_base() + %ld, while a copy of thread %u is in flight", what,
                   offset, thread_of(conflict));
        } else {
            report(Fault::RACE, site, "%s at smem_base() + %ld, not ordered after an access of thread %u", what, offset,
                   thread_of(conflict));
        }
    }

    void land(const Copy& c, uint32_t mark) {
        const uint32_t offset = c.addr - SMEM_BASE;
        if (c.copied) memcpy(&smem_[offset], c.source, (size_t)c.copied);
        memset(&smem_[offset] + c.copied, 0, (size_t)(c.bytes - c.copied));
        history_.land(offset / 2, (uint32_t)c.bytes / 2, mark);
    }

    void land_until(Thread& t, size_t landed, uint32_t mark) {
        if (landed <= t.landed) return;
        const size_t count = landed - t.landed;
        for (size_t i = 0; i < count; i++) land(t.copies[i], mark);
        t.copies.erase(t.copies.begin(), t.copies.begin() + (ptrdiff_t)count);
        for (size_t& group : t.groups) group -= std::min(group, count);
        t.landed = landed;
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
        /* A late warp could mistake one phase for another.  A warp that arrives in every phase cannot. */
        if (const uint32_t late = m.waiters & ~m.seen & ~m.waiting & ~m.warps) {
            report(Fault::BARRIER, site, "a phase of %s ends before warp %d has seen the end of the one before",
                   mbarrier_name(m).c_str(), lowest_bit(late));
            abandon();
            return;
        }
        release(m.waiting, m.arriving);
        m.seen = m.waiting;
        m.waiting = m.warps = m.by_thread = m.by_copies = 0;
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
            report(Fault::BARRIER, site, "%s at smem_base() + %u, where there is no mbarrier", what, addr - SMEM_BASE);
            abandon();
        }
        read(&mark, addr, 8, WHOLE_WARP, site);
        for (Mbarrier& m : mbarriers_) {
            if (m.addr == addr) return m;
        }
        internal_error("a value that marks an mbarrier, but there is no mbarrier");
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
            const std::string missing = m.bytes ? ", " + std::to_string(m.bytes) + " bytes missing," : "";
            add(mbarrier_name(m) + missing, m.waiting, m.arrived, m.expected);
        }
        report(Fault::DEADLOCK, site, "%s", text.c_str());
    }

    void check_mbarriers_idle() {
        for (const Mbarrier& m : mbarriers_) check_mbarrier_idle(m, launch.site);
    }

    void check_mbarrier_idle(const Mbarrier& m, const Site& site) {
        if (m.arrived == 0 && m.bytes == 0) return;
        report(Fault::BARRIER, site, "%s ends after %d of %d threads have arrived, with %lld bytes missing",
               mbarrier_name(m).c_str(), m.arrived, m.expected, (long long)m.bytes);
    }

    void check_warpgroups_idle() {
        int registers = 0; /* a lower bound: 24 for a warp that never set its number */
        for (int i = 0; i < launch.warps; i++) registers += warps_[i].registers ? warps_[i].registers : 24;
        if (registers > 65536 / LANES)
            report(Fault::DEADLOCK, launch.site, "the warps take %d registers per lane, but a multiprocessor has %d",
                   registers, 65536 / LANES);
        for (int i = 0; i < launch.warps; i++) {
            const Warp& w = warps_[i];
            if (!w.products.empty())
                report(Fault::WGMMA, w.products[0].site, "warp %d returns while products are in flight", i);
            if (w.steps != warpgroups_[i / 4].size())
                report(Fault::WGMMA, launch.site, "warp %d returns after %zu of its warpgroup's %zu steps", i, w.steps,
                       warpgroups_[i / 4].size());
        }
    }

    std::string kernel_name() const;

    Fiber scheduler_;
    Thread threads_[MAX_THREADS];
    Warp warps_[MAX_WARPS];
    Barrier barriers_[BARRIERS];
    std::vector<Mbarrier> mbarriers_;
    std::vector<Event> events_; /* events that have not happened yet */
    std::vector<WarpgroupStep> warpgroups_[MAX_WARPS / 4];
    std::vector<UnpackedB> unpacked_[MAX_WARPS / 4]; /* B of products that some warps have not reached */
    std::vector<std::vector<float>> idle_;           /* buffers that unpacked_ reuses */
    Warp* warp_ = nullptr;
    int live_warps_ = 0;
    int patience_ = 0; /* collectives until another warp may run */
    bool abandoned_ = false;
    bool between_ = false; /* no thread runs, because an event happens */
    bool strict_ = true;
    uint64_t random_ = 1;

    std::vector<uint8_t> smem_;
    AccessHistory history_;
    Footprint footprint_, before_;                    /* of the current and of the previous kernel */
    bool some_waited_ = false, block_waited_ = false; /* some thread of the kernel, of the block, has called
                                                       * wait_for_chain() */
    bool released_early_ = false;                     /* the kernel released the chain before it waited */

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

/* Returns the name of a kernel from the program's symbol table, or an empty string. */
inline std::string symbol_name(const void* function) {
#ifdef __linux__
    uintptr_t load_address = 0;
    /* The callback's first call is for the program itself; it stops there. */
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
            if (symbols[i].st_value + load_address != reinterpret_cast<uintptr_t>(function)) continue;
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
    return std::string("launched in ") + launch.site.name() + ":" + std::to_string(launch.site.line);
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
    std::sort(sorted.begin(), sorted.end(),
              [](const Traffic& a, const Traffic& b) { return a.wavefronts - a.ideal > b.wavefronts - b.ideal; });
    return sorted;
}

} /* namespace emu */

#endif
