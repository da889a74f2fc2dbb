/* gt/ssd/gated_states_sm90.cuh - ssd backward with z on compute capability 9.0, bf16 where the call reads y: the pass over
 * G that makes g = dy silu(z) and dz itself, so that nobody writes g only to read it here.  It is gate_kernel
 * (gate_sm90.cuh) and a reverse pass of states_hopper_kernel (states_sm90.cuh) in one, with the same numbers.  It takes
 * whole sequences, so that calls that are cut into segments have those two.
 *
 * A block has two units of a group and takes a sequence from its end, a chunk of 64 tokens at a time.
 * WARPGROUPS
 *     consumer     holds G of both units, as in states_sm90.cuh
 *     producer     as there, and copies z and y beside dy
 *     gates        two, with a unit each, a warp 16 tokens of it.  They make g over dy in shared memory, and what undoes
 *                  its power, for the consumer and the chunks' kernel; g and dz go to memory
 * MBARRIERS, beside those there.  COPIED: of a stage, the producer arrives, the gates wait; FULL takes both.
 *
 * SHARED MEMORY, KB, N = 128 (GatedStatesTile has every offset): 202
 *     LEFT, Z, Y       48     of a stage: dy, which becomes g; z; y: a tile of each unit
 *     RIGHT            16     of a stage
 *     Three stages: one with the consumer, one with the gates, one under way.
 * REGISTERS a thread: consumer 224, gates 112, producer 64; 128 at the launch of 512 threads.
 * ISSUE SLOTS a token and head: 83 of gate_kernel, 40 of states_hopper_kernel.  Memory's rate takes 300.
 * BYTES a token and head: dy, z, y, g, dz 2 P each, checkpoints P N / 64; 2 N from L2.
 * CHAIN.  The gates and the consumer wait first.  grid: strands*G*bundles (bundles of two units); block 512.  Every sum
 * has one fixed order: deterministic. */
#ifndef GT_SSD_GATED_STATES_SM90_CUH
#define GT_SSD_GATED_STATES_SM90_CUH

#include "gate_sm90.cuh"
#include "states_sm90.cuh"

namespace gt {
namespace ssd {

struct GatedStatesParams : HopperStatesParams { /* left: dy; states.in: with z */
    GatedRows g;
    GateGradient gradient; /* of y */
    int64_t slots;         /* of a batch element */
};

/* As StatesHopperTile. */
template <int NP_>
struct GatedStatesTile {
    using T = bf16;
    using L = f16;
    static constexpr bool IS_BF16 = true, GATES = true;
    static constexpr int NP = NP_, UNITS = 2, GROUPS = 1, HEADS = UNITS;
    static constexpr int PRODUCER = GROUPS, FIRST_GATE = PRODUCER + 1, WARPGROUPS = FIRST_GATE + UNITS;
    static constexpr int THREADS = (GROUPS + 1 + UNITS) * WARPGROUP;
    static constexpr int REGISTERS = 224, GATE_REGISTERS = 112, PRODUCER_REGISTERS = 64;
    static constexpr int ROW = 128, PANEL = CHUNK * ROW; /* of right: see wgmma.cuh */
    static constexpr int TILE_LEFT = CHUNK * 128, TILE_RIGHT = CHUNK * 2 * NP;
    static constexpr int STAGES = 3;
    static constexpr int LEFT = 0, Z = LEFT + UNITS * TILE_LEFT, Y = Z + UNITS * TILE_LEFT; /* of a stage: [UNITS] */
    static constexpr int RIGHT = Y + UNITS * TILE_LEFT, STAGE = RIGHT + TILE_RIGHT;
    static constexpr int STAGING = STAGES * STAGE;                                      /* 64 rows of 64 columns */
    static constexpr int PREPARED = STAGING + TILE_LEFT;                                /* [STAGES][UNITS] */
    static constexpr int INVERSES = PREPARED + STAGES * UNITS * 4 * UnitWeights::COUNT; /* [STAGES][UNITS][BLOCKS] */
    static constexpr int CURSOR = INVERSES + STAGES * UNITS * 4 * BLOCKS;               /* of each warpgroup */
    static constexpr int FULL = CURSOR + WARPGROUPS * GroupCursor<UNITS>::BYTES, EMPTY = FULL + 8 * STAGES,
                         COPIED = EMPTY + 8 * STAGES; /* [STAGES] */
    static constexpr int BYTES = COPIED + 8 * STAGES;
    static_assert(STAGE % 1024 == 0 && FULL % 8 == 0, "aligned");
    static_assert(BYTES + 1024 <= 227 * 1024, "fits sm_90");
};

/* ---- gates ------------------------------------------------------------------------------------------------------- */

/* A warp's 16 tokens of a chunk of the warpgroup's unit.  stage: where the chunk's tiles lie; inverses: to be filled. */
template <class Tile>
GT_DEV void gate_tokens(const GatedStatesParams& p, const GroupCursor<Tile::UNITS>& cursor, int unit, int chunk,
                        uint32_t stage, uint32_t inverses) {
    const Problem& in = p.states.in;
    const GateGradient& more = p.gradient;
    const int lane = own_lane(), block = own_thread() / 32 % 4, row = BLOCK * block + lane / 8, piece = lane % 8;
    const int row0 = cursor.row0(unit), tile = row0 / TILE_P;
    const bool exists = cursor.exists(unit);
    const int left = exists && row0 + 8 * piece < in.P ? cursor.tokens(chunk) - row : 0;
    const int64_t first = (int64_t)chunk * CHUNK + row; /* in the sequence */
    uint16_t* const g = static_cast<uint16_t*>(p.g.rows) + cursor.offset(0, unit) + first * p.g.stride.t + 8 * piece;
    uint16_t* const dz =
        static_cast<uint16_t*>(more.dz) + cursor.offset(1, unit) + first * more.dz_stride.t + 8 * piece;
    const uint32_t own = stage + unit * Tile::TILE_LEFT + panel_at<128>(row, piece);
    const auto at = [&](int tensor, int k) { /* rows 4 apart differ by a bit of the swizzle */
                                             return (k % 2 ? own ^ 64 : own) + (tensor + 128 * GATE_ROWS * k);
    };
    uint4 x[GATE_PARTS], gate[GATE_PARTS], gated[GATE_PARTS];
    GT_UNROLL
    for (int k = 0; k < GATE_PARTS; k++) {
        x[k] = lds<uint4>(at(Tile::LEFT, k));
        gate[k] = lds<uint4>(at(Tile::Z, k));
        gated[k] = lds<uint4>(at(Tile::Y, k));
    }
    bool lost = false;
    float inverse = gate_block<bf16, true>(/* const makes nvcc 13.0 fail */
                                           x, gate, gated, lost,
                                           [&](int k, const uint4& out) {
                                               sts<uint4>(at(Tile::LEFT, k), out);
                                               if (GATE_ROWS * k < left)
                                                   stg<uint4>(g + GATE_ROWS * k * p.g.stride.t, out);
                                           },
                                           [&](int k, const uint4& out) {
                                               if (GATE_ROWS * k < left)
                                                   stg<uint4>(dz + GATE_ROWS * k * more.dz_stride.t, out);
                                           });
    lost = warp_any(lost);
    if (lane > 0) return;
    sts<float>(inverses + 4 * (unit * BLOCKS + block), inverse);
    if (!exists) return;
    const int64_t slot = cursor.slot(unit, chunk);
    p.g.inverses[inverses_index(in, slot, chunk, tile) + block] = inverse;
    /* the place as gate_kernel counts them, of whose flag each warp writes a byte */
    const int64_t b = cursor.b(), head = cursor.head(unit), units = in.H * in.tiles;
    const int64_t row_of_chunks =
        (b * p.slots + (slot - (b * in.H + head) * p.slots)) * SLOT_CHUNKS + chunk % SLOT_CHUNKS;
    const int64_t place = row_of_chunks * units + head * in.tiles + tile;
    uint8_t* const flags = reinterpret_cast<uint8_t*>(more.lost) + 4 * place + block;
    *flags = lost;
    if (chunk % SLOT_CHUNKS == 0 && chunk + 1 == cursor.chunks()) flags[4 * units] = 0; /* there is no second one */
}

template <class Tile>
GT_DEV void gate_role(const GatedStatesParams& p, uint32_t smem) {
    constexpr int UNITS = Tile::UNITS, STAGES = Tile::STAGES, BARRIER = 3;
    const Problem& in = p.states.in;
    const int unit = shfl_idx(warp_id(), 0) / 4 - Tile::FIRST_GATE;
    const GroupCursor<UNITS> cursor = {smem + Tile::CURSOR + (Tile::FIRST_GATE + unit) * GroupCursor<UNITS>::BYTES};
    int n = 0; /* chunks of all sequences */
    for (int64_t item = bundle_strand(in); item < items_of(in); item += in.bundles.strands) {
        {
            const Span span = ordered_span(in, item);
            if (!span.exists) continue;
            cursor.enter(in, span, item, BARRIER + unit,
                         [&] { cursor.put_offsets(0, p.g.stride), cursor.put_offsets(1, p.gradient.dz_stride); });
        }
        GT_NO_UNROLL
        for (int chunk = cursor.chunks() - 1; chunk >= 0; chunk--, n++) {
            const int stage = n % STAGES;
            mbarrier_wait(smem + Tile::COPIED + 8 * stage, n / STAGES % 2);
            gate_tokens<Tile>(p, cursor, unit, chunk, smem + stage * Tile::STAGE,
                              smem + Tile::INVERSES + stage * (4 * BLOCKS * UNITS));
            mbarrier_arrive(smem + Tile::FULL + 8 * stage);
        }
        item = cursor.item();
    }
}

/* For other architectures it is empty, and bounded to one warp: see has_sm90a. */
template <int NP>
GT_KERNEL(GT_SM90A ? (GatedStatesTile<NP>::THREADS) : 32, 1)
gated_states_kernel(const GT_GRID_CONSTANT GatedStatesParams p) {
#if GT_SM90A
    using Tile = GatedStatesTile<NP>;
    const uint32_t smem = smem_base_of_tiles();
    if (thread_id() < Tile::STAGES) {
        mbarrier_init(smem + Tile::FULL + 8 * thread_id(), (1 + Tile::UNITS) * WARPGROUP);
        mbarrier_init(smem + Tile::EMPTY + 8 * thread_id(), WARPGROUP);
        mbarrier_init(smem + Tile::COPIED + 8 * thread_id(), WARPGROUP);
    }
    sync_threads();
    const int role = shfl_idx(warp_id(), 0) / 4;
    if (role == Tile::PRODUCER) {
        if (p.states.in.order) wait_for_chain(); /* else it reads inputs of the call alone */
        give_registers<Tile::PRODUCER_REGISTERS>();
        states_producer<Tile>(p, smem);
        return;
    }
    wait_for_chain();
    if (role >= Tile::FIRST_GATE) {
        give_registers<Tile::GATE_REGISTERS>();
        gate_role<Tile>(p, smem);
    } else {
        take_registers<Tile::REGISTERS>();
        states_consumer<Tile>(p, smem);
    }
#else
    (void)p;
    __trap();
#endif
}

} /* namespace ssd */
} /* namespace gt */

#endif
