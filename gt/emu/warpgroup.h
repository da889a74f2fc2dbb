/* gt/emu/warpgroup.h - products of warpgroups: their registers, their operands in shared memory, their sums. */
#ifndef GT_EMU_WARPGROUP_H
#define GT_EMU_WARPGROUP_H

#include "tensor.h"

namespace emu {

/* ---- registers ----------------------------------------------------------------------------------------------- */

/* Gives registers to a product, as accumulators or as A.  Returns their index in Warp::blocks.  changed_matters: a
 * change of the registers since the fence is a fault. */
EMU_UNCHECKED inline size_t Machine::take_block(Word* const* at, int count, bool accumulates, bool changed_matters,
                                                const Site& site) {
    std::vector<RegisterBlock>& blocks = warp_->blocks;
    size_t found = blocks.size();
    for (size_t i = 0; i < blocks.size(); i++) {
        if (blocks[i].is(at, count)) {
            found = i;
        } else if (blocks[i].products && blocks[i].overlaps(at, count)) {
            report(Fault::WGMMA, site, "a product in flight uses these registers in another way");
        }
    }
    const bool is_new = found == blocks.size();
    if (is_new) {
        if (blocks.size() >= MOST_BLOCKS) { /* reuses a block that no product needs */
            for (size_t n = 0; n < blocks.size() && found == blocks.size(); n++) {
                warp_->next_block = (warp_->next_block + 1) % blocks.size();
                if (blocks[warp_->next_block].products == 0) found = warp_->next_block;
            }
        }
        if (found == blocks.size()) blocks.emplace_back();
        std::copy(at, at + LANES, blocks[found].at);
        blocks[found].count = count;
        blocks[found].products = 0;
        blocks[found].values.resize((size_t)(LANES * count));
    }
    RegisterBlock& block = blocks[found];
    if (block.products++ > 0) {
        if (block.accumulates != accumulates)
            report(Fault::WGMMA, site, "a product in flight uses these registers in another way");
        return found;
    }
    block.accumulates = accumulates;
    if (!warp_->fenced) report(Fault::WGMMA, site, "no wgmma_fence since the last wgmma_wait");
    const bool compared = warp_->fenced && !is_new && changed_matters;
    for (int lane = 0; lane < LANES; lane++) {
        Word* registers = at[lane];
        uint32_t* values = &block.values[(size_t)(lane * count)];
        for (int i = 0; i < count; i++) {
            if (compared && values[i] != registers[i])
                report(Fault::WGMMA, site, "a register of lane %d changed after the wgmma_fence", lane);
            values[i] = registers[i];
            registers[i] = IN_FLIGHT_BITS;
        }
    }
    if (!accumulates) return found;
    block.sums.resize((size_t)(LANES * count));
    const int columns = 2 * count;
    for (int lane = 0; lane < LANES; lane++)
        for (int i = 0; i < count; i++)
            block.sums[(size_t)((lane / 4 + i % 4 / 2 * 8) * columns + i / 4 * 8 + lane % 4 * 2 + i % 2)] =
                float_from_bits(block.values[(size_t)(lane * count + i)]);
    return found;
}

/* Takes registers back from a product.  After the last product they get the sums. */
EMU_UNCHECKED inline void Machine::give_block(RegisterBlock& block, const Site& site) {
    if (--block.products > 0) return;
    const int count = block.count, columns = 2 * count;
    for (int lane = 0; lane < LANES; lane++) {
        Word* registers = block.at[lane];
        for (int i = 0; i < count; i++) {
            uint32_t value = block.values[(size_t)(lane * count + i)];
            if (block.accumulates)
                memcpy(&value,
                       &block.sums[(size_t)((lane / 4 + i % 4 / 2 * 8) * columns + i / 4 * 8 + lane % 4 * 2 + i % 2)],
                       4);
            if (registers[i] == IN_FLIGHT_BITS) {
                registers[i] = value;
            } else {
                report(Fault::WGMMA, site, "a register of lane %d was written in flight", lane);
            }
        }
    }
}

EMU_UNCHECKED inline void Machine::fence_registers(const Site& site) {
    if (!step(Op::WGMMA_FENCE, site, 0)) return;
    warp_->fenced = true;
    for (RegisterBlock& block : warp_->blocks) {
        if (block.products) continue;
        for (int lane = 0; lane < LANES; lane++)
            for (int i = 0; i < block.count; i++) block.values[(size_t)(lane * block.count + i)] = block.at[lane][i];
    }
}

inline void Machine::start_product(const Wgmma& what, Word* const* c, Word* const* a, const Site& site) {
    if (!step(Op::WGMMA, site, 0, what)) return;
    WarpProduct product = {};
    product.site = site;
    product.before = warp_->before;
    product.before_fence = warp_->before_fence;
    product.what = what;
    product.step = warp_->steps - 1;
    product.c = take_block(c, what.columns / 2, true, what.accumulates, site);
    if (!what.a_is_shared) product.a = take_block(a, 4, false, true, site);
    warp_->products.push_back(product);
}

/* ---- operands in shared memory ------------------------------------------------------------------------------- */

/* The layout that a wgmma descriptor describes (gt/base/wgmma.cuh): the addresses of its 16-byte pieces. */
class Layout {
  public:
    Layout(uint64_t operand, bool is_mn)
        : start_(field(operand, 0)), leading_(field(operand, 16)), stride_(field(operand, 32)), is_mn_(is_mn) {
        static const int rows[4] = {16, 128, 64, 32};
        row_ = rows[operand >> 62];
        pieces_ = row_ / 16;
        known_ = (operand & ~(0x3fffull | 0x3fffull << 16 | 0x3fffull << 32 | 3ull << 62)) == 0;
    }

    bool is_swizzled() const { return pieces_ > 1; }
    bool is_known() const { return known_; }

    /* Returns whether the pattern of the swizzle starts at the first row. */
    bool is_aligned() const {
        const uint32_t pattern = 8 * (uint32_t)row_;
        if (!is_swizzled()) return true;
        return start_ % pattern < (uint32_t)row_ && stride_ % pattern == 0 && (!is_mn_ || leading_ % pattern == 0);
    }

    /* Returns whether a row's pieces lie in one panel, or in several panels that are read from their start. */
    bool stays_in_panel(int pieces) const {
        const int first = (int)(start_ / 16) % pieces_;
        return !is_swizzled() || first + pieces <= pieces_ || (is_mn_ && first == 0);
    }

    /* Returns the address of a piece.  row: the index along M or N, or along K for an MN-major operand.  Pieces follow
     * one another along the other index. */
    uint32_t at(int row, int piece) const {
        uint32_t far, beside; /* bytes to the next 8 rows, and to the next panel */
        if (is_swizzled()) {
            far = stride_;
            beside = leading_;
        } else {
            far = is_mn_ ? leading_ : stride_;
            beside = is_mn_ ? stride_ : leading_;
        }
        const uint32_t addr = start_ + (uint32_t)(row / 8) * far + (uint32_t)(row % 8 * row_) +
                              (uint32_t)(piece / pieces_) * beside + 16u * (uint32_t)(piece % pieces_);
        return addr ^ ((addr >> 7 & (uint32_t)(pieces_ - 1)) << 4);
    }

  private:
    static uint32_t field(uint64_t operand, int bit) { return (uint32_t)(operand >> bit & 0x3fff) << 4; }

    uint32_t start_, leading_, stride_;
    int row_, pieces_; /* a panel's row in bytes and in pieces */
    bool is_mn_, known_;
};

inline int unpack_piece(const uint8_t (&piece)[16], Format format, float (&values)[8]) {
    if (format == Format::TF32) {
        float raw[4];
        memcpy(raw, piece, 16);
        for (int e = 0; e < 4; e++) values[e] = decode_tf32(raw[e]);
        return 4;
    }
    uint16_t raw[8];
    memcpy(raw, piece, 16);
    for (int e = 0; e < 8; e++) values[e] = format == Format::F16 ? decode_f16(raw[e]) : decode_bf16(raw[e]);
    return 8;
}

inline void check_operand(const Layout& layout, int pieces, Machine& machine, const Wgmma& what, bool is_mn,
                          const Site& site) {
    if (!layout.is_known() || (what.format == Format::TF32 && (is_mn || layout.is_swizzled())))
        machine.report(Fault::UNSUPPORTED, site, "an operand of wgmma was not made by wgmma_tile");
    if (!layout.is_aligned())
        machine.report(Fault::ALIGNMENT, site, "the panels of an operand of wgmma do not start at multiples of 8 rows");
    if (!layout.stays_in_panel(pieces))
        machine.report(Fault::WGMMA, site, "an operand of wgmma starts inside a panel and leaves it");
}

/* Returns B[depth][columns] as floats.  The first warp of the warpgroup decodes B, and every warp uses the result. */
inline const std::vector<float>& Machine::unpack_b(const WarpProduct& p) {
    const Wgmma& what = p.what;
    const Layout layout(what.b, what.b_is_mn);
    std::vector<UnpackedB>& unpacked = unpacked_[warp_index() / 4];
    const auto is_it = [&p](const UnpackedB& u) { return u.step == p.step; };
    auto found = std::find_if(unpacked.begin(), unpacked.end(), is_it);
    const bool is_first = found == unpacked.end();
    const int rows = what.b_is_mn ? what.depth() : what.columns;
    const int pieces = what.b_is_mn ? what.columns / 8 : 2;
    if (is_first) {
        check_operand(layout, pieces, *this, what, what.b_is_mn, p.site);
        found = unpacked.insert(unpacked.end(), UnpackedB{p.step, 0, {}});
        if (!idle_.empty()) {
            found->values.swap(idle_.back());
            idle_.pop_back();
        }
        found->values.resize((size_t)(what.depth() * what.columns));
    }
    found->warps++;
    uint32_t addrs[LANES];
    int counted = 0;
    for (int piece = 0; piece < pieces; piece++) {
        for (int row = 0; row < rows; row++) {
            uint8_t bytes[16];
            const uint32_t addr = layout.at(row, piece);
            read_async(bytes, addr, p, "wgmma");
            if (!is_first) continue;
            addrs[counted++] = addr;
            if (counted == LANES || (row + 1 == rows && piece + 1 == pieces)) {
                count_matrices(addrs, counted, p.site);
                counted = 0;
            }
            float values[8];
            const int elements = unpack_piece(bytes, what.format, values);
            for (int e = 0; e < elements; e++) {
                const int k = what.b_is_mn ? row : elements * piece + e;
                const int n = what.b_is_mn ? elements * piece + e : row;
                found->values[(size_t)(k * what.columns + n)] = values[e];
            }
        }
    }
    return found->values;
}

/* Decodes the warp's 16 rows of A. */
inline void Machine::unpack_a(const WarpProduct& p, float (*a)[16]) {
    const Wgmma& what = p.what;
    if (!what.a_is_shared) {
        const RegisterBlock& block = warp_->blocks[p.a];
        for (int lane = 0; lane < LANES; lane++) {
            for (int i = 0; i < 4; i++) {
                const uint32_t bits = block.values[(size_t)(4 * lane + i)];
                float* row = a[lane / 4 + 8 * (i % 2)];
                if (what.format == Format::TF32) {
                    row[lane % 4 + 4 * (i / 2)] = decode_tf32(float_from_bits(bits));
                } else {
                    const bool is_f16 = what.format == Format::F16;
                    float* pair = row + 2 * (lane % 4) + 8 * (i / 2);
                    pair[0] = is_f16 ? decode_f16(bits & 0xffff) : decode_bf16(bits & 0xffff);
                    pair[1] = is_f16 ? decode_f16(bits >> 16) : decode_bf16(bits >> 16);
                }
            }
        }
        return;
    }
    const Layout layout(what.a, what.a_is_mn);
    const int warp = warp_index() % 4;
    if (warp == 0) check_operand(layout, what.a_is_mn ? 8 : 2, *this, what, what.a_is_mn, p.site);
    uint32_t addrs[LANES];
    int counted = 0;
    for (int piece = 0; piece < 2; piece++) {
        for (int row = 0; row < 16; row++) {
            uint8_t bytes[16];
            const uint32_t addr = what.a_is_mn ? layout.at(row, 2 * warp + piece) : layout.at(16 * warp + row, piece);
            read_async(bytes, addr, p, "wgmma");
            addrs[counted++] = addr;
            float values[8];
            unpack_piece(bytes, what.format, values);
            for (int e = 0; e < 8; e++) (what.a_is_mn ? a[8 * piece + e][row] : a[row][8 * piece + e]) = values[e];
        }
    }
    count_matrices(addrs, counted, p.site);
}

/* ---- sums ---------------------------------------------------------------------------------------------------- */

/* Adds the products of one row of A with COLUMNS columns of B: c += a[k] b[k], in ascending order of k. */
template <int COLUMNS>
void add_products(float* c, const float* a, const float* b, int depth, int columns) {
    typedef float Quad __attribute__((vector_size(16)));
    Quad sum[COLUMNS / 4], factor;
    memcpy(sum, c, sizeof sum);
    for (int k = 0; k < depth; k++) {
        for (int i = 0; i < COLUMNS / 4; i++) {
            memcpy(&factor, b + k * columns + 4 * i, sizeof factor);
            sum[i] += a[k] * factor;
        }
    }
    memcpy(c, sum, sizeof sum);
}

/* Computes the warp's 16 rows of C[64][columns] += A[64][depth] B[depth][columns] in fp32. */
inline void Machine::perform(const WarpProduct& p) {
    stats_.mma++;
    const int columns = p.what.columns, depth = p.what.depth();
    float a[16][16];
    unpack_a(p, a);
    const float* b = unpack_b(p).data();
    RegisterBlock& block = warp_->blocks[p.c];
    if (!p.what.accumulates) std::fill(block.sums.begin(), block.sums.end(), 0.0f);
    for (int row = 0; row < 16; row++) {
        float* c = &block.sums[(size_t)(row * columns)];
        int n = 0;
        for (; n + 32 <= columns; n += 32) add_products<32>(c + n, a[row], b + n, depth, columns);
        for (; n < columns; n += 8) add_products<8>(c + n, a[row], b + n, depth, columns);
    }
    give_block(block, p.site);
    if (!p.what.a_is_shared) give_block(warp_->blocks[p.a], p.site);
    std::vector<UnpackedB>& unpacked = unpacked_[warp_index() / 4];
    const auto is_done = [](const UnpackedB& u) { return u.warps == 4; };
    const auto done = std::find_if(unpacked.begin(), unpacked.end(), is_done);
    if (done == unpacked.end()) return;
    idle_.emplace_back();
    idle_.back().swap(done->values);
    unpacked.erase(done);
}

/* The arguments with which a lane calls wgmma. */
struct WgmmaCall {
    Wgmma what;
    void* c;
    const void* a;
};

inline void start_product(WgmmaCall mine, const Site& site) {
    machine.meet(Op::WGMMA, site, mine, [site](WgmmaCall** lanes) {
        Word *c[LANES], *a[LANES];
        for (int lane = 0; lane < LANES; lane++) {
            c[lane] = static_cast<Word*>(lanes[lane]->c);
            a[lane] = static_cast<Word*>(const_cast<void*>(lanes[lane]->a));
            if (!(lanes[lane]->what == lanes[0]->what))
                machine.report(Fault::WGMMA, site, "lanes 0 and %d have different operands", lane);
        }
        machine.start_product(lanes[0]->what, c, a, site);
    });
}

} /* namespace emu */

#endif
