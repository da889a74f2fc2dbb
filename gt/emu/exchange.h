/* gt/emu/exchange.h - operations that all lanes of a warp execute together: matrices, shuffles, barriers. */
#ifndef GT_EMU_EXCHANGE_H
#define GT_EMU_EXCHANGE_H

#include "machine.h"

namespace emu {

/* Returns the pair of elements of an 8 by 8 matrix that a lane holds. */
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

inline void load_matrices(int count, bool transposed, uint32_t* registers, uint32_t addr, const Site& site) {
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

inline void store_matrices(bool transposed, const uint32_t* registers, uint32_t addr, const Site& site) {
    struct Stored {
        uint32_t addr;
        const uint32_t* registers;
    } mine = {addr, registers};
    machine.meet(Op::STMATRIX, site, mine, [=](Stored** lanes) {
        machine.need_sm90("stmatrix", site);
        uint16_t rows[32][8];
        uint32_t addrs[32];
        for (int lane = 0; lane < LANES; lane++) {
            const int g = lane / 4;
            for (int i = 0; i < 8; i++) { /* lower and upper halves of the register for matrix i / 2 */
                const uint16_t half = (uint16_t)(lanes[lane]->registers[i / 2] >> 16 * (i % 2));
                const int column = 2 * (lane % 4) + i % 2;
                (transposed ? rows[8 * (i / 2) + column][g] : rows[8 * (i / 2) + g][column]) = half;
            }
        }
        for (int i = 0; i < LANES; i++) {
            addrs[i] = lanes[i]->addr;
            machine.store_row(rows[i], addrs[i], site);
        }
        machine.count_matrices(addrs, LANES, site, true);
    });
}

struct Shuffle {
    uint32_t value;
    int argument;
    uint32_t result;
};

/* source(lane, argument) returns the lane to read from. */
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
            machine.report(Fault::BARRIER, site, "lane 0 is at barrier %d, lane %d at barrier %d", first.id, lane,
                           lanes[lane]->id);
            machine.abandon();
        }
        machine.sync(first.id, first.threads, site);
    });
}

struct MbarrierCall {
    uint32_t addr;
    int argument; /* parity of a wait, or expected bytes */
};

inline void mbarrier(Op op, uint32_t addr, int argument, const Site& site) {
    MbarrierCall mine = {addr, argument};
    machine.meet(op, site, mine, [op, site](MbarrierCall** lanes) {
        const MbarrierCall first = *lanes[0];
        for (int lane = 1; lane < LANES; lane++) {
            if (lanes[lane]->addr == first.addr && lanes[lane]->argument == first.argument) continue;
            machine.report(Fault::BARRIER, site, "lanes 0 and %d differ: mbarriers %u bytes apart, arguments %d and %d",
                           lane, lanes[lane]->addr - first.addr, first.argument, lanes[lane]->argument);
            machine.abandon();
        }
        if (op == Op::MBARRIER_WAIT) {
            machine.wait(first.addr, first.argument, site);
        } else if (op == Op::MBARRIER_EXPECT) {
            machine.need_sm90("mbarrier_arrive_expect", site);
            machine.arrive(first.addr, (uint32_t)first.argument, site);
        } else if (op == Op::COPIES_ARRIVE) {
            machine.arrive_after_copies(first.addr, site);
        } else {
            machine.arrive(first.addr, 0, site);
        }
    });
}

} /* namespace emu */

#endif
