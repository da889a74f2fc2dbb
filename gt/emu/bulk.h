/* gt/emu/bulk.h - events at mbarriers that happen later than the call that starts them: the end of a bulk load, and
 * arrivals of cp_async. */
#ifndef GT_EMU_BULK_H
#define GT_EMU_BULK_H

#include "exchange.h"

namespace emu {

/* Starts an event.  The event has an epoch of its own, after everything that the warp has done. */
inline Event Machine::start_event(uint32_t barrier, const char* what, const Site& site) {
    Event event = {};
    event.site = site;
    event.warp = warp_index();
    event.barrier = barrier;
    event.phase = mbarrier_at(barrier, what, site).phase;
    event.before = warp_->before;
    begin_epoch(*warp_);
    event.epoch = warp_->epoch;
    begin_epoch(*warp_);
    return event;
}

/* Counts a warp's arrival.  already: warps that have arrived in this phase by the same kind of arrival. */
inline void Machine::count_arrival(Mbarrier& m, uint32_t& already, const Clock& before, uint32_t epoch,
                                   const Site& site) {
    if (already & own_bit()) {
        report(Fault::BARRIER, site, "warp %d arrives twice at %s in one phase", warp_index(),
               mbarrier_name(m).c_str());
        abandon();
        return;
    }
    already |= own_bit();
    m.warps |= own_bit();
    m.arriving.join(before, launch.warps);
    m.arriving.epoch[warp_index()] = std::max(m.arriving.epoch[warp_index()], epoch);
    m.arrived += LANES;
    check_phase(m, site);
}

/* Ends the phase if it is complete. */
inline void Machine::check_phase(Mbarrier& m, const Site& site) {
    if (m.arrived < m.expected || (m.arrived == m.expected && m.bytes > 0)) return;
    if (m.arrived == m.expected && m.bytes == 0) {
        complete(m, site);
        return;
    }
    report(Fault::BARRIER, site, "%s: %d of %d threads have arrived, and %lld more bytes than expected",
           mbarrier_name(m).c_str(), m.arrived, m.expected, (long long)-m.bytes);
    abandon();
}

/* Removes a random event and returns it.  Arrivals of one warp keep their order. */
inline Event Machine::next_event() {
    auto next = events_.begin() + (ptrdiff_t)(random() % events_.size());
    const auto comes_before = [&](const Event& e) { return e.bytes == 0 && e.warp == next->warp; };
    if (next->bytes == 0) next = std::find_if(events_.begin(), next, comes_before);
    const Event event = *next;
    events_.erase(next);
    return event;
}

/* Lets an event happen, in the name of its warp.  No thread runs at this time. */
inline void Machine::happen(const Event& event) {
    warp_ = &warps_[event.warp];
    thread = event.warp * LANES;
    between_ = true;
    const auto is_it = [&event](const Mbarrier& m) { return m.addr == event.barrier; };
    Mbarrier& m = *std::find_if(mbarriers_.begin(), mbarriers_.end(), is_it);
    if (event.bytes) {
        event.source.pieces(event.addr, event.bytes, [this](const char* from, uint32_t to, uint32_t bytes) {
            if (from) {
                memcpy(&smem_[to - SMEM_BASE], from, bytes);
            } else {
                memset(&smem_[to - SMEM_BASE], 0, bytes);
            }
        });
        history_.land((event.addr - SMEM_BASE) / 2, event.bytes / 2, stamp_of(event.epoch, (uint32_t)thread));
        m.bytes -= event.bytes;
        m.arriving.epoch[event.warp] = std::max(m.arriving.epoch[event.warp], event.epoch);
        if (m.phase == event.phase) {
            check_phase(m, event.site);
        } else {
            report(Fault::BARRIER, event.site,
                   "%u bytes arrive after the end of the phase of %s for which they were loaded", event.bytes,
                   mbarrier_name(m).c_str());
            abandon();
        }
    } else {
        for (int i = 0; i < LANES; i++) {
            land_until(threads_[thread + i], event.landed[i], stamp_of(event.epoch, (uint32_t)(thread + i)));
        }
        count_arrival(m, m.by_copies, event.before, event.epoch, event.site);
    }
    between_ = false;
    thread = -1;
}

/* Checks where a box begins.  At other places an H200 reports an illegal instruction, although no document says so. */
inline bool Machine::check_box(const BulkSide& box, bool writes, const Site& site) {
    const int64_t first = (int64_t)box.at[0] * box.tensor.element;
    if (first % 16 != 0) {
        report(Fault::ALIGNMENT, site, "a box begins %lld bytes into its rows: must be a multiple of 16",
               (long long)first);
        return false;
    }
    if (writes && (box.at[0] < 0 || box.at[1] < 0 || box.at[2] < 0)) {
        report(Fault::BOUNDS, site, "a box is stored at %d, %d, %d, which is before the start of the tensor", box.at[0],
               box.at[1], box.at[2]);
        return false;
    }
    return true;
}

/* Returns whether a copy is possible. */
inline bool Machine::check_bulk(const BulkSide& side, uint32_t addr, uint32_t bytes, bool writes, const char* what,
                                const Site& site) {
    need_sm90(what, site);
    const uint32_t row = (uint32_t)(side.tensor.box[0] * side.tensor.element);
    const uint32_t alignment = !side.is_box() ? 16 : side.tensor.swizzled ? 8 * row : 128;
    if (bytes == 0 || bytes % 16 != 0 || reinterpret_cast<uintptr_t>(side.bytes) % 16 != 0) {
        report(Fault::ALIGNMENT, site, "%s of %u bytes at %p: size and address must be multiples of 16", what, bytes,
               side.bytes);
        return false;
    }
    if (!legal(addr, bytes, alignment, what, site)) return false;
    if (side.is_box() && !check_box(side, writes, site)) return false;
    side.pieces(addr, bytes, [&](const char* at, uint32_t, uint32_t count) {
        if (at) touch_global(writes, at, count, site);
    });
    return true;
}

inline void Machine::start_load(uint32_t addr, const BulkSide& source, uint32_t bytes, uint32_t barrier,
                                const Site& site) {
    Event event = start_event(barrier, "bulk_load", site);
    const AsyncRead now = {site, warp_->before, warp_->before_fence};
    check_proxy((barrier - SMEM_BASE) / 2, 4, now, "bulk_load at an mbarrier");
    if (!check_bulk(source, addr, bytes, false, "bulk_load", site)) return;
    const uint32_t first = (addr - SMEM_BASE) / 2;
    check_proxy(first, bytes / 2, now, "bulk_load");
    uint32_t conflict;
    const int64_t bad = history_.write(first, bytes / 2, warp_index(), 0, warp_->before,
                                       stamp_of(EPOCH_IN_FLIGHT, (uint32_t)(warp_index() * LANES)), &conflict);
    if (bad >= 0) report_conflict("bulk_load", bad, conflict, site);
    memset(&smem_[addr - SMEM_BASE], 0xff, bytes);
    warp_->async_epochs.push_back(event.epoch);
    event.addr = addr;
    event.bytes = bytes;
    event.source = source;
    events_.push_back(event);
}

inline void Machine::start_store(const BulkSide& target, uint32_t addr, uint32_t bytes, const Site& site) {
    if (!check_bulk(target, addr, bytes, true, "bulk_store", site)) return;
    BulkStore store = {};
    store.site = site;
    store.before = warp_->before;
    store.before_fence = warp_->before_fence;
    store.target = target;
    store.addr = addr;
    store.bytes = bytes;
    warp_->stores.push_back(store);
}

/* Performs the stores of the groups that are complete.  Stores read shared memory only now. */
inline void Machine::wait_stores(size_t groups_left) {
    std::vector<size_t>& groups = warp_->store_groups;
    if (groups.size() <= groups_left) return;
    const size_t done = groups.size() - groups_left, end = groups[done - 1];
    for (size_t i = 0; i < end; i++) {
        const BulkStore& store = warp_->stores[i];
        std::vector<char> copied(store.bytes);
        for (uint32_t at = 0; at < store.bytes; at += 16) read_async(&copied[at], store.addr + at, store, "bulk_store");
        store.target.pieces(store.addr, store.bytes, [&](char* to, uint32_t from, uint32_t bytes) {
            if (to) memcpy(to, &copied[from - store.addr], bytes);
        });
    }
    warp_->stores.erase(warp_->stores.begin(), warp_->stores.begin() + (ptrdiff_t)end);
    groups.erase(groups.begin(), groups.begin() + (ptrdiff_t)done);
    for (size_t& group : groups) group -= end;
}

inline void Machine::check_copies_idle() {
    for (const Event& e : events_) report(Fault::COPY, e.site, "no thread has waited for it by the end of the block");
    for (int i = 0; i < launch.warps; i++)
        if (!warps_[i].stores.empty())
            report(Fault::COPY, warps_[i].stores[0].site, "warp %d has not waited for it by the end of the block", i);
}

/* ---- calls --------------------------------------------------------------------------------------------------- */

struct BulkCall {
    const void* global;
    uint32_t addr, bytes, barrier;
    const TensorMap* map; /* not compared, because each lane may have a copy of the map */
    int at[3];

    bool operator==(const BulkCall& x) const {
        return global == x.global && addr == x.addr && bytes == x.bytes && barrier == x.barrier &&
               std::equal(at, at + 3, x.at);
    }
};

template <class Perform>
void bulk(Op op, BulkCall mine, const Site& site, Perform perform) {
    machine.meet(op, site, mine, [site, perform](BulkCall** lanes) {
        for (int lane = 1; lane < LANES; lane++)
            if (!(*lanes[lane] == *lanes[0]))
                machine.report(Fault::COPY, site, "lanes 0 and %d pass different arguments", lane);
        perform(*lanes[0]);
    });
}

} /* namespace emu */

#endif
