/* gt/emu/order.h - decides which accesses to shared memory are ordered: vector clocks, and the cells that they
 * guard. */
#ifndef GT_EMU_ORDER_H
#define GT_EMU_ORDER_H

#include "fibers.h"

namespace emu {

/* An access is stamped with its thread and the epoch of its warp: epoch << 10 | warp << 5 | lane.
 * Two epochs are reserved for cells that were never written, and for cells into which a copy is in flight. */
constexpr uint32_t EPOCH_NEVER = (1u << 22) - 1;
constexpr uint32_t EPOCH_IN_FLIGHT = EPOCH_NEVER - 1;
constexpr uint32_t NEVER_WRITTEN = 0xffffffffu;
constexpr uint32_t WHOLE_WARP = 32; /* lane of an access that all lanes make together */

inline uint32_t stamp_of(uint32_t epoch, uint32_t thread) { return epoch << 10 | thread; }
inline uint32_t epoch_of(uint32_t stamp) { return stamp >> 10; }
inline uint32_t thread_of(uint32_t stamp) { return stamp & 1023; }

/* The accesses that come before the next access of a warp: for each warp w, accesses up to epoch[w].  A warp's own
 * entry may lag behind its epoch.  The reason: an arrival at an mbarrier ends an epoch for warps that wait there, but
 * does not order the warp's own lanes. */
struct Clock {
    uint32_t epoch[MAX_WARPS];

    void join(const Clock& other, int warps) {
        for (int w = 0; w < warps; w++) epoch[w] = std::max(epoch[w], other.epoch[w]);
    }
};

/* The recorded accesses to shared memory, for each cell of 2 bytes. */
class AccessHistory {
  public:
    void start_block(size_t bytes, int warps) {
        cells_ = (bytes + 1) / 2;
        writer_.assign(cells_, NEVER_WRITTEN);
        readers_.assign(cells_, 0);
        if (last_read_.size() < cells_ * (size_t)warps) last_read_.resize(cells_ * (size_t)warps);
    }

    /* Records a read.  Returns the first cell that was never written, is in flight, or was written without an order
     * before this read.  *conflict gets the stamp of that write.  Returns -1 if there is no such cell. */
    int64_t read(uint32_t first, uint32_t count, int warp, uint32_t lane, uint32_t now, const Clock& before,
                 uint32_t* conflict) {
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
            const bool shared = (readers_[i] & warp_bit) && unordered && (last_read[i] & 63) != lane;
            last_read[i] = shared ? now << 6 | WHOLE_WARP : my_read;
            readers_[i] |= warp_bit;
        }
        return bad;
    }

    /* Records a write, with a result as in read().  `mark` is the stamp to store: of the write, or of a copy in
     * flight. */
    int64_t write(uint32_t first, uint32_t count, int warp, uint32_t lane, const Clock& before, uint32_t mark,
                  uint32_t* conflict) {
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

    /* Returns the stamp of the last write. */
    uint32_t writer(uint32_t cell) const { return writer_[cell]; }

    /* Records that a copy has landed.  Its cells were marked as in flight when it was issued. */
    void land(uint32_t first, uint32_t count, uint32_t mark) { std::fill_n(writer_.begin() + first, count, mark); }

  private:
    static bool ordered(uint32_t stamp, uint32_t me, const Clock& before) {
        const uint32_t epoch = epoch_of(stamp);
        if (epoch <= before.epoch[thread_of(stamp) / LANES]) return true;
        return thread_of(stamp) == me && epoch < EPOCH_IN_FLIGHT;
    }

    size_t cells_ = 0;
    std::vector<uint32_t> writer_;  /* stamp of the last write */
    std::vector<uint32_t> readers_; /* bit w: warp w has read since the last write */
    /* [warp][cell]: epoch << 6 | lane of the last read.  lane is WHOLE_WARP for reads of several lanes that no barrier
     * has ordered yet. */
    std::vector<uint32_t> last_read_;
};

} /* namespace emu */

#endif
