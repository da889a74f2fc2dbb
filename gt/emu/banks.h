/* gt/emu/banks.h - counts bank conflicts of shared memory. */
#ifndef GT_EMU_BANKS_H
#define GT_EMU_BANKS_H

#include "order.h"

namespace emu {

struct Access {
    Site site;
    uint32_t addr;
    uint16_t bytes;
    bool store;

    bool same_instruction(const Access& other) const {
        return site == other.site && bytes == other.bytes && store == other.store;
    }
};

/* Returns how many words `count` accesses need from the busiest bank.  There are 32 banks of 4 bytes. */
inline int bank_ways(const uint32_t* addrs, int count, int bytes) {
    const int words = bytes < 4 ? 1 : bytes / 4;
    uint32_t only[32], taken = 0; /* the usual case: one word of each bank */
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

    /* Counts later traffic for this kernel. */
    void start(const void* kernel) {
        const auto same = [kernel](const KernelTraffic& k) { return k.kernel == kernel; };
        const auto at = std::find_if(kernels_.begin(), kernels_.end(), same);
        kernel_ = (size_t)(at - kernels_.begin());
        if (at == kernels_.end()) kernels_.push_back(KernelTraffic{kernel, 0, 0});
    }

    /* Counts one instruction of a warp, from the addresses of its active lanes.  Wide accesses have a wavefront for
     * every 16 or 8 lanes. */
    void count(const Access& instruction, const uint32_t* addrs, const uint8_t* lanes, int active) {
        /* 1 << shift lanes share a wavefront */
        const int shift = instruction.bytes <= 4 ? 5 : instruction.bytes == 8 ? 4 : 3;
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
        /* Kernels loop over the same few lines, so the search starts at the last line found. */
        for (size_t n = 0; n < table_.size(); n++) {
            const size_t i = recent_ + n < table_.size() ? recent_ + n : recent_ + n - table_.size();
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

/* The shared accesses that a warp's lanes have made since they last met. */
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

    /* Replays the lanes' accesses in lockstep.  An instruction counts for all lanes whose next access it is. */
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
    /* Chooses the next instruction.  If the lanes' next accesses differ, takes one that no other lane makes later.  The
     * other lanes skip this instruction, so it need not wait for them. */
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

} /* namespace emu */

#endif
